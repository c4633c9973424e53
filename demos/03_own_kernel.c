/* SPDX-License-Identifier: MIT OR Unlicense */
/* 03_own_kernel.c - a block kernel of your own, here bf16 in plain C, inside ring attention
 * over four ranks.
 *
 * It stands for a kernel that you want to keep. It gets one block (queries of a cell x keys of
 * a cell, one head) and does not know of ranks. seqpar does rings, masks and merging, and takes
 * gradients to their owners.      cc 03_own_kernel.c -lm -lpthread */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"

enum {
    TOKENS = 600,
    HEADS = 4,
    KV_HEADS = 2,
    HEAD_DIM = 32,
    WIDE = HEADS * HEAD_DIM,
    NARROW = KV_HEADS * HEAD_DIM,
    TENSORS = 8
};

static float dot(const uint16_t *a, const uint16_t *b) {
    float sum = 0;
    for (int i = 0; i < HEAD_DIM; i++)
        sum += seqpar_bf16_to_float(a[i]) * seqpar_bf16_to_float(b[i]);
    return sum;
}

/* out and lse of this block alone */
static int my_forward(void *user, const seqpar_block *b, void *out, double *lse) {
    const uint16_t *q = (const uint16_t *)b->q, *k = (const uint16_t *)b->k;
    const uint16_t *v = (const uint16_t *)b->v;
    (void)user;
    for (int64_t r = 0; r < b->queries; r++) {
        float sum[HEAD_DIM] = {0}, top = -INFINITY, total = 0;
        for (int64_t n = b->visible_begin[r]; n < b->visible_end[r]; n++)
            top = fmaxf(top, (float)b->scale * dot(q + r * HEAD_DIM, k + n * HEAD_DIM));
        for (int64_t n = b->visible_begin[r]; n < b->visible_end[r]; n++) {
            float p = expf((float)b->scale * dot(q + r * HEAD_DIM, k + n * HEAD_DIM) - top);
            total += p;
            for (int i = 0; i < HEAD_DIM; i++)
                sum[i] += p * seqpar_bf16_to_float(v[n * HEAD_DIM + i]);
        }
        for (int i = 0; i < HEAD_DIM; i++)
            ((uint16_t *)out)[r * HEAD_DIM + i] = seqpar_bf16_from_float(
                total > 0 ? sum[i] / total : 0);
        lse[r] = total > 0 ? (double)(top + logf(total)) : -INFINITY;
    }
    return 0;
}

/* dq, dk and dv of a block, from the lse of the whole row */
static int my_backward(void *user, const seqpar_block *b, void *dq, void *dk, void *dv) {
    const uint16_t *q = (const uint16_t *)b->q, *k = (const uint16_t *)b->k;
    const uint16_t *v = (const uint16_t *)b->v, *dout = (const uint16_t *)b->dout;
    float *sum = (float *)calloc((size_t)(b->queries + 2 * b->keys) * HEAD_DIM, sizeof *sum);
    float *sk = sum + b->queries * HEAD_DIM, *sv = sk + b->keys * HEAD_DIM;
    (void)user;
    if (!sum) return 1;
    for (int64_t r = 0; r < b->queries; r++)
        for (int64_t n = b->visible_begin[r]; n < b->visible_end[r]; n++) {
            float p = expf((float)(b->scale * (double)dot(q + r * HEAD_DIM, k + n * HEAD_DIM) -
                                   b->lse[r]));
            float ds = p * (dot(dout + r * HEAD_DIM, v + n * HEAD_DIM) - (float)b->delta[r]) *
                       (float)b->scale;
            for (int i = 0; i < HEAD_DIM; i++) {
                sum[r * HEAD_DIM + i] += ds * seqpar_bf16_to_float(k[n * HEAD_DIM + i]);
                sk[n * HEAD_DIM + i] += ds * seqpar_bf16_to_float(q[r * HEAD_DIM + i]);
                sv[n * HEAD_DIM + i] += p * seqpar_bf16_to_float(dout[r * HEAD_DIM + i]);
            }
        }
    for (int64_t i = 0; i < b->queries * HEAD_DIM; i++)
        ((uint16_t *)dq)[i] = seqpar_bf16_from_float(sum[i]);
    for (int64_t i = 0; i < b->keys * HEAD_DIM; i++)
        ((uint16_t *)dk)[i] = seqpar_bf16_from_float(sk[i]);
    for (int64_t i = 0; i < b->keys * HEAD_DIM; i++)
        ((uint16_t *)dv)[i] = seqpar_bf16_from_float(sv[i]);
    free(sum);
    return 0;
}

static const seqpar_block_kernel my_kernel = {SEQPAR_DTYPE_BF16, my_forward, my_backward, NULL};
static const char *const names[TENSORS] = {"q", "k", "v", "dout", "out", "dq", "dk", "dv"};
static const int widths[TENSORS] = {WIDE, NARROW, NARROW, WIDE, WIDE, WIDE, NARROW, NARROW};
/* global tensors */
typedef struct {
    float tensor[TENSORS][TOKENS * WIDE];
    int64_t ranks;
    int own;
} problem;

static seqpar_status attend(seqpar_ctx *ctx, problem *p) {
    static const int64_t cu_seqlens[] = {0, 250, 600};
    seqpar_row row = {.tokens = TOKENS, .cell = 32, .docs = 2, .cu_seqlens = cu_seqlens};
    seqpar_attn_desc desc = {.heads = HEADS,
                             .kv_heads = KV_HEADS,
                             .head_dim = HEAD_DIM,
                             .layout = SEQPAR_LAYOUT_ZIGZAG};
    seqpar_attn *attn;
    seqpar_status status = seqpar_attn_open(ctx, &attn, &row, 1, &desc);
    if (status) return status;
    const seqpar_share *mine = seqpar_attn_share(attn);
    float *x[TENSORS], *lse = (float *)calloc((size_t)mine->tokens + 1, HEADS * sizeof *lse);
    for (int i = 0; i < TENSORS; i++) {
        x[i] = (float *)calloc((size_t)mine->tokens + 1, (size_t)widths[i] * sizeof(float));
        seqpar_scatter(x[i], p->tensor[i], mine, 0, widths[i] * (int64_t)sizeof(float));
    }
    seqpar_attn_io io = {.q = x[0],
                         .k = x[1],
                         .v = x[2],
                         .out = x[4],
                         .lse = lse,
                         .dout = x[3],
                         .dq = x[5],
                         .dk = x[6],
                         .dv = x[7]};
    status = seqpar_attn_forward(ctx, attn, &io);
    if (!status) status = seqpar_attn_backward(ctx, attn, &io);
    for (int i = 4; i < TENSORS; i++)
        seqpar_gather(p->tensor[i], x[i], mine, 0, widths[i] * (int64_t)sizeof(float));
    for (int i = 0; i < TENSORS; i++) free(x[i]);
    free(lse);
    seqpar_attn_close(ctx, attn);
    return status;
}

static seqpar_status rank_main(seqpar_comm *world, void *user) {
    problem *p = (problem *)user;
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    if (p->own) seqpar_device_user_kernel(device, &my_kernel); /* this is all */
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, p->ranks);
    if (!status) status = attend(&ctx, p);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static double distance(const float *a, const float *b, int64_t count) {
    double diff = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        diff += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)b[i] * (double)b[i];
    }
    return sqrt(diff / size);
}

int main(void) {
    static problem ours, own_one, own_four;
    seqpar_error error;
    int bad = 0;
    for (int t = 0; t < 4; t++)
        for (int64_t i = 0; i < TOKENS * widths[t]; i++)
            ours.tensor[t][i] = (float)seqpar_random_normal(1, (uint64_t)t, (uint64_t)i);
    ours.ranks = 1;
    own_one = own_four = ours;
    own_one.own = own_four.own = 1;
    own_four.ranks = 4;
    problem *runs[] = {&ours, &own_one, &own_four};
    for (int i = 0; i < 3; i++)
        if (seqpar_run_threads(runs[i]->ranks, rank_main, runs[i], &error))
            return fprintf(stderr, "error: %s\n", error.text), 1;
    printf("own bf16 kernel against seqpar's fp32: relative error on 1 rank and on 4\n");
    for (int t = 4; t < TENSORS; t++) {
        double one = distance(own_one.tensor[t], ours.tensor[t], TOKENS * widths[t]);
        double four = distance(own_four.tensor[t], ours.tensor[t], TOKENS * widths[t]);
        printf("  %-4s %.1e %.1e\n", names[t], one, four);
        bad += !(four <= 2 * one && one <= 2e-2);
    }
    printf("error rule (4 ranks at most twice 1 rank): %s\n", bad ? "no" : "yes");
    return bad;
}
