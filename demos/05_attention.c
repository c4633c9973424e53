/* SPDX-License-Identifier: MIT OR Unlicense */
/* 05_attention.c - attention alone in a program of your own: split, forward, backward,
   unsplit.  cc 05_attention.c -lm -lpthread */
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"

enum {
    TOKENS = 777,
    HEADS = 4,
    DIM = 16,
    WIDE = HEADS * DIM,
    ROW_BYTES = WIDE * sizeof(float)
};

enum { Q, K, V, DOUT, OUT, DQ, DK, DV, TENSORS };
/* as your program has them: (tokens, heads, head_dim) */
static float whole[TENSORS][TOKENS * WIDE];

static seqpar_status rank_main(seqpar_comm *world, void *user) {
    static const int64_t cu_seqlens[] = {0, 300, 777};
    seqpar_row row = {.tokens = TOKENS, .cell = 32, .docs = 2, .cu_seqlens = cu_seqlens};
    seqpar_attn_desc desc = {.heads = HEADS,
                             .kv_heads = HEADS,
                             .head_dim = DIM,
                             .layout = SEQPAR_LAYOUT_ZIGZAG,
                             .schedule = *(int *)user};
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_attn *attn = NULL;
    float *x[TENSORS + 1]; /* the last: lse */
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, world->size);
    if (!status) status = seqpar_attn_open(&ctx, &attn, &row, 1, &desc);
    if (!status) {
        const seqpar_share *mine = seqpar_attn_share(attn);
        for (int i = 0; i <= TENSORS; i++)
            x[i] = (float *)malloc((size_t)(mine->tokens + 1) * ROW_BYTES);
        for (int i = Q; i <= DOUT; i++) seqpar_scatter(x[i], whole[i], mine, 0, ROW_BYTES);
        seqpar_attn_io io = {.q = x[Q],
                             .k = x[K],
                             .v = x[V],
                             .out = x[OUT],
                             .lse = x[TENSORS],
                             .dout = x[DOUT],
                             .dq = x[DQ],
                             .dk = x[DK],
                             .dv = x[DV]};
        status = seqpar_attn_forward(&ctx, attn, &io);
        if (!status) status = seqpar_attn_backward(&ctx, attn, &io);
        for (int i = OUT; i < TENSORS; i++) seqpar_gather(whole[i], x[i], mine, 0, ROW_BYTES);
        for (int i = 0; i <= TENSORS; i++) free(x[i]);
    }
    seqpar_attn_close(&ctx, attn);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

int main(void) {
    int64_t ranks[] = {1, 4, 4, 4};
    int schedules[] = {SEQPAR_SCHEDULE_RING, SEQPAR_SCHEDULE_RING, SEQPAR_SCHEDULE_LLAMA3,
                       SEQPAR_SCHEDULE_ULYSSES};
    int bad = 0;
    static float first[TENSORS][TOKENS * WIDE];
    seqpar_error error;
    for (int t = Q; t <= DOUT; t++)
        for (int64_t i = 0; i < TOKENS * WIDE; i++)
            whole[t][i] = (float)seqpar_random_normal(7, (uint64_t)t, (uint64_t)i);
    for (int i = 0; i < 4; i++) {
        if (seqpar_run_threads(ranks[i], rank_main, &schedules[i], &error))
            return fprintf(stderr, "error: %s\n", error.text), 1;
        if (i == 0) memcpy(first, whole, sizeof whole);
        bad += memcmp(first, whole, sizeof whole) != 0;
        printf("%lld rank%s, %-7s: dk[776] = %.6g ..., %s\n", (long long)ranks[i],
               ranks[i] > 1 ? "s" : " ", seqpar_schedule_name(schedules[i]),
               (double)whole[DK][776 * WIDE],
               memcmp(first, whole, sizeof whole) ? "OTHER BITS" : "same bits");
    }
    return bad;
}
