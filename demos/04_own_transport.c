/* SPDX-License-Identifier: MIT OR Unlicense */
/* 04_own_transport.c - ring attention over four processes and a transport of one's own; the bits of one rank.
   cc 04_own_transport.c -lm -lpthread.  The transport is in unix_sockets.h; below is what uses it, and it is what would use any other. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "unix_sockets.h"

enum { TOKENS = 1000, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 32, WIDE = HEADS * HEAD_DIM, NARROW = KV_HEADS * HEAD_DIM };

static float all_q[TOKENS * WIDE], all_k[TOKENS * NARROW], all_v[TOKENS * NARROW], want[TOKENS * WIDE]; /* want: what one rank computes */
static const int64_t cu_seqlens[] = {0, 420, 421, 1000}; /* three documents, one of a single token */
static const seqpar_row row = {.tokens = TOKENS, .padded = TOKENS, .chunks = 32, .docs = 3, .cu_seqlens = cu_seqlens};

/* A world of one puts its output into `want`. Others, forked later, inherit it and count the tokens of theirs that differ. */
static seqpar_status attend(seqpar_ctx *ctx, int64_t *differ) {
    seqpar_attn_desc desc = {.heads = HEADS, .kv_heads = KV_HEADS, .head_dim = HEAD_DIM, .layout = SEQPAR_ZIGZAG, .schedule = SEQPAR_RING};
    seqpar_attn *attn;
    seqpar_status status = seqpar_attn_open(ctx, &attn, &row, 1, &desc);
    if (status) return status;
    const seqpar_share *mine = seqpar_attn_share(attn);
    float *q = malloc((size_t)mine->tokens * (3 * WIDE + 2 * NARROW + HEADS) * sizeof *q);
    float *k = q + mine->tokens * WIDE, *v = k + mine->tokens * NARROW, *out = v + mine->tokens * NARROW, *lse = out + mine->tokens * WIDE, *one = lse + mine->tokens * HEADS;
    seqpar_scatter(q, all_q, mine, 0, WIDE * sizeof *q);
    seqpar_scatter(k, all_k, mine, 0, NARROW * sizeof *k);
    seqpar_scatter(v, all_v, mine, 0, NARROW * sizeof *v);
    seqpar_attn_io io = {.q = q, .k = k, .v = v, .out = out, .lse = lse};
    status = seqpar_attn_forward(ctx, attn, &io);
    if (ctx->world->size == 1) seqpar_gather(want, out, mine, 0, WIDE * sizeof *out);
    seqpar_scatter(one, want, mine, 0, WIDE * sizeof *one);
    for (int64_t t = 0; t < mine->tokens; t++) *differ += memcmp(out + t * WIDE, one + t * WIDE, WIDE * sizeof *out) != 0;
    free(q);
    seqpar_attn_close(ctx, attn);
    return status;
}

static seqpar_status rank_main(seqpar_comm *world, void *user) {
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    int64_t sum[2] = {0, 0}; /* tokens that differ, bytes sent */
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, world->size);
    (void)user;
    if (!status) status = attend(&ctx, &sum[0]);
    if (!status) sum[1] = ctx.sp->bytes_sent, status = seqpar_comm_sum_i64(world, sum, 2); /* processes share no memory: over the comm */
    if (!status && world->rank == 0) printf("%lld over '%s': %lld bytes sent, %lld of %d tokens differ\n", (long long)world->size, world->table->name, (long long)sum[1], (long long)sum[0], TOKENS);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status || !sum[0] ? status : seqpar_fail(world->error, SEQPAR_ERR_NOT_FINITE, "%lld tokens have other bits than on one rank", (long long)sum[0]);
}

int main(void) {
    seqpar_error error;
    for (int64_t i = 0; i < TOKENS * WIDE; i++) all_q[i] = (float)seqpar_random_normal(1, 0, (uint64_t)i);
    for (int64_t i = 0; i < TOKENS * NARROW; i++) all_k[i] = (float)seqpar_random_normal(1, 1, (uint64_t)i);
    for (int64_t i = 0; i < TOKENS * NARROW; i++) all_v[i] = (float)seqpar_random_normal(1, 2, (uint64_t)i);
    if (seqpar_run_threads(1, rank_main, NULL, &error) || run_processes(4, rank_main, NULL, &error)) fprintf(stderr, "%s\n", error.text);
    printf("identical bits: %s\n", error.status ? "no" : "yes");
    return error.status != 0;
}
