/* SPDX-License-Identifier: MIT OR Unlicense */
/* 01_ring.c - ring attention over four ranks of this process, and the bits of one rank.  cc
   01_ring.c -lm -lpthread */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"

enum {
    TOKENS = 1000,
    HEADS = 4,
    KV_HEADS = 2,
    HEAD_DIM = 32,
    WIDE = HEADS * HEAD_DIM,
    NARROW = KV_HEADS * HEAD_DIM
};

typedef struct { /* global tensors: (tokens, heads, head_dim) */
    float q[TOKENS * WIDE], k[TOKENS * NARROW], v[TOKENS * NARROW], out[TOKENS * WIDE];
    int64_t ranks, sent;
} problem;

/* three documents, one of a single token */
static const int64_t cu_seqlens[] = {0, 420, 421, 1000};
static const seqpar_row row = {
    .tokens = TOKENS, .cell = 32, .docs = 3, .cu_seqlens = cu_seqlens};

static seqpar_status attend(seqpar_ctx *ctx, problem *p) {
    seqpar_attn_desc desc = {.heads = HEADS,
                             .kv_heads = KV_HEADS,
                             .head_dim = HEAD_DIM,
                             .layout = SEQPAR_LAYOUT_ZIGZAG,
                             .schedule = SEQPAR_SCHEDULE_RING};
    seqpar_attn *attn;
    seqpar_status status = seqpar_attn_open(ctx, &attn, &row, 1, &desc);
    if (status) return status;
    const seqpar_share *mine = seqpar_attn_share(attn); /* the tokens this rank holds */
    float *q = (float *)malloc((size_t)mine->tokens * (2 * WIDE + 2 * NARROW + HEADS) *
                               sizeof *q);
    float *k = q + mine->tokens * WIDE, *v = k + mine->tokens * NARROW;
    float *out = v + mine->tokens * NARROW, *lse = out + mine->tokens * WIDE;
    seqpar_scatter(q, p->q, mine, 0, WIDE * sizeof *q);
    seqpar_scatter(k, p->k, mine, 0, NARROW * sizeof *k);
    seqpar_scatter(v, p->v, mine, 0, NARROW * sizeof *v);
    seqpar_attn_io io = {.q = q, .k = k, .v = v, .out = out, .lse = lse};
    status = seqpar_attn_forward(ctx, attn, &io);
    seqpar_gather(p->out, out, mine, 0, WIDE * sizeof *out);
    free(q);
    seqpar_attn_close(ctx, attn);
    return status;
}

static seqpar_status rank_main(seqpar_comm *world, void *user) {
    problem *p = (problem *)user;
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, p->ranks);
    if (!status) status = attend(&ctx, p);
    if (!status && world->rank == 0) p->sent = ctx.sp->bytes_sent;
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static int run(problem *p, int64_t ranks) {
    seqpar_error error;
    p->ranks = ranks;
    if (seqpar_run_threads(ranks, rank_main, p, &error))
        return fprintf(stderr, "%s\n", error.text), 1;
    printf("%lld rank%s: out[999] = %.5g ..., rank 0 sent %lld bytes\n", (long long)ranks,
           ranks > 1 ? "s" : " ", (double)p->out[999 * WIDE], (long long)p->sent);
    return 0;
}

int main(void) {
    static problem one, four;
    for (int64_t i = 0; i < TOKENS * WIDE; i++)
        one.q[i] = (float)seqpar_random_normal(1, 0, (uint64_t)i);
    for (int64_t i = 0; i < TOKENS * NARROW; i++)
        one.k[i] = (float)seqpar_random_normal(1, 1, (uint64_t)i);
    for (int64_t i = 0; i < TOKENS * NARROW; i++)
        one.v[i] = (float)seqpar_random_normal(1, 2, (uint64_t)i);
    four = one;
    if (run(&one, 1) || run(&four, 4)) return 1;
    int same = !memcmp(one.out, four.out, sizeof one.out);
    printf("identical bits: %s\n", same ? "yes" : "no");
    return !same;
}
