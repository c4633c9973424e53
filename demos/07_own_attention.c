/* SPDX-License-Identifier: MIT OR Unlicense */
/* 07_own_attention.c - a flash attention of your own, here in plain C, over four ranks.
 *
 * It gets all of this rank's queries and all keys of one rank at a time, and does not know of
 * ranks: seqpar sends the keys, merges the partial results by their log-sum-exp and takes
 * gradients to their owners. On a GPU the pointers are the device's and the work goes to
 * `queue`. cc 07_own_attention.c -lm -lpthread */
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

static float dot(const float *a, const float *b) {
    float sum = 0;
    for (int i = 0; i < HEAD_DIM; i++) sum += a[i] * b[i];
    return sum;
}

static void add(float *to, float factor, const float *x) {
    for (int i = 0; i < HEAD_DIM; i++) to[i] += factor * x[i];
}

/* Does query t see key n of a piece? There is one row; with several, those of both must be
   equal. */
static int sees(const seqpar_attn_source *a, int64_t t, const seqpar_piece *keys, int64_t n) {
    int64_t position = keys->start + n * keys->stride;
    return position >= a->visible_begin[t] && position < a->visible_end[t];
}

/* One pass with a running maximum. */
static void forward_row(const seqpar_attn_source *a, int64_t t, int64_t h, float *out,
                        float *lse) {
    const float *q = (const float *)a->q + t * a->q_stride + h * HEAD_DIM;
    int64_t kv = h / (a->heads / a->kv_heads) * HEAD_DIM;
    float top = -INFINITY, total = 0;
    for (int64_t j = 0; j < a->k_piece_count; j++)
        for (int64_t n = 0; n < a->k_pieces[j].count; n++) {
            int64_t row = a->k_pieces[j].local + n;
            if (!sees(a, t, &a->k_pieces[j], n)) continue;
            float s = (float)a->scale * dot(q, (const float *)a->k + row * a->k_stride + kv);
            float high = fmaxf(top, s), keep = expf(top - high), p = expf(s - high);
            for (int i = 0; i < HEAD_DIM; i++) out[i] *= keep;
            add(out, p, (const float *)a->v + row * a->v_stride + kv);
            total = total * keep + p;
            top = high;
        }
    for (int i = 0; i < HEAD_DIM && total > 0; i++) out[i] /= total;
    *lse = total > 0 ? top + logf(total) : -INFINITY;
}

static int my_forward(void *user, const seqpar_attn_source *a, void *out, void *lse,
                      void *queue) {
    (void)user, (void)queue;
    for (int64_t n = 0; n < a->q_tokens * a->heads; n++)
        forward_row(a, n / a->heads, n % a->heads, (float *)out + n * HEAD_DIM,
                    (float *)lse + n);
    return 0;
}

/* lse and delta are those of all sources together, so each one's gradients just add up. */
static int my_backward(void *user, const seqpar_attn_source *a, void *dq, void *dk, void *dv,
                       void *queue) {
    (void)user, (void)queue;
    for (int64_t t = 0; t < a->q_tokens; t++)
        for (int64_t h = 0; h < a->heads; h++) {
            const float *q = (const float *)a->q + t * a->q_stride + h * HEAD_DIM;
            const float *dout = (const float *)a->dout + t * a->dout_stride + h * HEAD_DIM;
            float lse = ((const float *)a->lse)[t * a->lse_stride + h];
            float delta = ((const float *)a->delta)[t * a->lse_stride + h];
            int64_t kv = h / (a->heads / a->kv_heads);
            for (int64_t j = 0; j < a->k_piece_count; j++)
                for (int64_t n = 0; n < a->k_pieces[j].count; n++) {
                    int64_t row = a->k_pieces[j].local + n;
                    int64_t to = (row * a->kv_heads + kv) * HEAD_DIM;
                    if (!sees(a, t, &a->k_pieces[j], n)) continue;
                    const float *k = (const float *)a->k + row * a->k_stride + kv * HEAD_DIM;
                    const float *v = (const float *)a->v + row * a->v_stride + kv * HEAD_DIM;
                    float p = expf((float)a->scale * dot(q, k) - lse);
                    float ds = p * (dot(dout, v) - delta) * (float)a->scale;
                    add((float *)dq + (t * a->heads + h) * HEAD_DIM, ds, k);
                    add((float *)dk + to, ds, q);
                    add((float *)dv + to, p, dout);
                }
        }
    return 0;
}

static const seqpar_attn_kernel my_kernel = {my_forward, my_backward, NULL};
static const char *const names[TENSORS] = {"q", "k", "v", "dout", "out", "dq", "dk", "dv"};
static const int widths[TENSORS] = {WIDE, NARROW, NARROW, WIDE, WIDE, WIDE, NARROW, NARROW};
/* global tensors */
typedef struct {
    float tensor[TENSORS][TOKENS * WIDE];
    int64_t ranks;
    int own, schedule;
} problem;

static seqpar_status attend(seqpar_ctx *ctx, problem *p) {
    static const int64_t cu_seqlens[] = {0, 250, 600};
    seqpar_row row = {.tokens = TOKENS, .cell = 32, .docs = 2, .cu_seqlens = cu_seqlens};
    seqpar_attn_desc desc = {.heads = HEADS,
                             .kv_heads = KV_HEADS,
                             .head_dim = HEAD_DIM,
                             .layout = SEQPAR_LAYOUT_ZIGZAG,
                             .schedule = p->schedule,
                             .kernel = p->own ? &my_kernel : NULL}; /* this is all */
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
    static problem runs[5]; /* ours; own on one rank; own on four, by each schedule */
    seqpar_error error;
    int bad = 0;
    for (int t = 0; t < 4; t++)
        for (int64_t i = 0; i < TOKENS * widths[t]; i++)
            runs[0].tensor[t][i] = (float)seqpar_random_normal(1, (uint64_t)t, (uint64_t)i);
    for (int i = 0; i < 5; i++) {
        if (i) runs[i] = runs[0];
        runs[i].own = i > 0;
        runs[i].ranks = i > 1 ? 4 : 1;
        runs[i].schedule = i > 1 ? i - 2 : 0;
    }
    for (int i = 0; i < 5; i++)
        if (seqpar_run_threads(runs[i].ranks, rank_main, &runs[i], &error))
            return fprintf(stderr, "error: %s\n", error.text), 1;
    printf("own flash attention against seqpar's on one rank: relative error\n");
    printf("       1 rank   4: %-8s %-8s %s\n", seqpar_schedule_name(0),
           seqpar_schedule_name(1), seqpar_schedule_name(2));
    for (int t = 4; t < TENSORS; t++) {
        printf("  %-4s", names[t]);
        for (int i = 1; i < 5; i++) {
            double off = distance(runs[i].tensor[t], runs[0].tensor[t], TOKENS * widths[t]);
            printf(i == 2 ? "    %.1e" : " %.1e", off);
            bad += !(off <= 2e-6);
        }
        printf("\n");
    }
    printf("all within rounding, 2e-6: %s\n", bad ? "no" : "yes");
    return bad;
}
