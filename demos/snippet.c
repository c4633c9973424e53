/* SPDX-License-Identifier: MIT OR Unlicense */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include <stdio.h>
#include <string.h>

enum { TOKENS = 101, HEADS = 4, DIM = 32, N = TOKENS * HEADS * DIM };
static const int64_t cu_seqlens[] = {0, 37, TOKENS}; /* 2 packed documents */
static float qkv[3 * N], out[2][N];                  /* (tokens, heads, dim) */
static seqpar_row row;                               /* 0: each its default */
static seqpar_attn_desc desc;
static seqpar_attn_io io;
static seqpar_error error;

int main(void) {
    row.tokens = TOKENS, row.cell = 16;
    row.docs = 2, row.cu_seqlens = cu_seqlens;
    desc.heads = desc.kv_heads = HEADS, desc.head_dim = DIM;
    desc.layout = SEQPAR_LAYOUT_ZIGZAG, desc.schedule = SEQPAR_SCHEDULE_RING;
    io.q = qkv, io.k = qkv + N, io.v = qkv + 2 * N;
    for (int i = 0; i < 3 * N; i++) qkv[i] = seqpar_random_normal(1, 0, i);
    for (int i = 0; i < 2; i++) { /* on 1 rank, then on 4 */
        io.out = out[i];
        if (seqpar_attn_run_threads(&error, &io, &row, &desc, i ? 4 : 1))
            return fprintf(stderr, "%s\n", error.text), 1;
        printf("ranks: %d, last of out: %.6f\n", i ? 4 : 1, out[i][N - 1]);
    }
    int same = !memcmp(out[0], out[1], sizeof out[0]);
    printf("identical bits: %s\n", same ? "yes" : "no");
    return !same;
}
