/* SPDX-License-Identifier: MIT OR Unlicense */
/* 04_own_transport.c - ring attention over four processes, with a transport of your own and the
   bits of one rank.  cc 04_own_transport.c -lm -lpthread

   The transport is in unix_sockets.h. The code below uses it as it would use any other. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "unix_sockets.h"

enum {
    TOKENS = 1000,
    HEADS = 4,
    DIM = 32,
    WIDE = HEADS * DIM,
    ROW_BYTES = WIDE * sizeof(float)
};

enum { Q, K, V, WANT, OUT, LSE, TENSORS };
/* WANT is what one rank computes; processes started later inherit it */
static float whole[WANT + 1][TOKENS * WIDE];

static seqpar_status rank_main(seqpar_comm *world, void *user) {
    /* three documents, one of a single token */
    static const int64_t cu_seqlens[] = {0, 420, 421, 1000};
    seqpar_row row = {.tokens = TOKENS, .cell = 32, .docs = 3, .cu_seqlens = cu_seqlens};
    seqpar_attn_desc desc = {.heads = HEADS,
                             .kv_heads = HEADS,
                             .head_dim = DIM,
                             .layout = SEQPAR_LAYOUT_ZIGZAG,
                             .schedule = SEQPAR_SCHEDULE_RING};
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_attn *attn = NULL;
    float *x[TENSORS];
    int64_t sum[] = {0, 0}; /* tokens that differ, bytes sent */
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, world->size);
    (void)user;
    if (!status) status = seqpar_attn_open(&ctx, &attn, &row, 1, &desc);
    if (!status) {
        const seqpar_share *mine = seqpar_attn_share(attn);
        for (int i = 0; i < TENSORS; i++)
            x[i] = (float *)malloc((size_t)mine->tokens * ROW_BYTES);
        for (int i = Q; i <= WANT; i++) seqpar_scatter(x[i], whole[i], mine, 0, ROW_BYTES);
        seqpar_attn_io io = {.q = x[Q], .k = x[K], .v = x[V], .out = x[OUT], .lse = x[LSE]};
        status = seqpar_attn_forward(&ctx, attn, &io);
        if (world->size == 1)
            seqpar_gather(whole[WANT], x[OUT], mine, 0, ROW_BYTES);
        else
            for (int64_t t = 0; t < mine->tokens; t++)
                sum[0] += memcmp(x[OUT] + t * WIDE, x[WANT] + t * WIDE, ROW_BYTES) != 0;
        for (int i = 0; i < TENSORS; i++) free(x[i]);
        sum[1] = ctx.sp->bytes_sent;
    }
    /* processes share no memory: over the comm */
    if (!status) status = seqpar_comm_sum_i64(world, sum, 2);
    if (!status && world->rank == 0)
        printf("%d over '%s': %d bytes sent, %d of %d tokens differ\n", (int)world->size,
               world->table->name, (int)sum[1], (int)sum[0], TOKENS);
    seqpar_attn_close(&ctx, attn);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status || !sum[0]
               ? status
               : seqpar_fail(world->error, SEQPAR_ERR_NOT_FINITE,
                             "%d tokens have other bits than on one rank", (int)sum[0]);
}

int main(void) {
    seqpar_error error;
    for (int i = Q; i <= V; i++)
        for (int64_t t = 0; t < TOKENS * WIDE; t++)
            whole[i][t] = (float)seqpar_random_normal(1, (uint64_t)i, (uint64_t)t);
    if (seqpar_run_threads(1, rank_main, NULL, &error) ||
        run_processes(4, rank_main, NULL, &error))
        fprintf(stderr, "%s\n", error.text);
    printf("identical bits: %s\n", error.status ? "no" : "yes");
    return error.status != 0;
}
