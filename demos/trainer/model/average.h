/* SPDX-License-Identifier: MIT OR Unlicense */
/* average.h - the exponential moving average of the weights (--enable_ema):
 * average += (1 - beta) (weights - average) after every optimizer step, in fp64 for weights of
 * any type. Every rank stores an equal share of it. Elements do not depend on each other, so
 * the number of ranks changes no bit. */
#ifndef DEMO_AVERAGE_H
#define DEMO_AVERAGE_H
#include <math.h>
#include "trainer/run/plan_device.h"
#include "seqpar_llama.h"

typedef struct {
    double beta, *share;  /* share NULL: there is no average */
    int64_t begin, count; /* the share's elements */
} demo_average;

static int64_t demo_average_begin(const seqpar_ctx *ctx, const seqpar_llama *model,
                                  int64_t rank) {
    return seqpar_part_begin(model->elements, ctx->world->size, rank);
}

/* The number of elements of [first, first + count) that lie in [begin, end); *at: the first of
   them. */
static int64_t demo_average_part(int64_t begin, int64_t end, int64_t first, int64_t count,
                                 int64_t *at) {
    *at = begin > first ? begin : first;
    int64_t last = end < first + count ? end : first + count;
    return last > *at ? last - *at : 0;
}

/* Stores those of `values`, elements [first, first + count) of the average, that are in this
   rank's share. */
static void demo_average_write(demo_average *average, const double *values, int64_t first,
                               int64_t count) {
    int64_t at;
    int64_t mine = demo_average_part(average->begin, average->begin + average->count, first,
                                     count, &at);
    if (mine)
        memcpy(average->share + at - average->begin, values + at - first,
               (size_t)mine * sizeof *values);
}

/* Collective: every rank gets elements [first, first + count) of the average in values. */
static seqpar_status demo_average_read(seqpar_ctx *ctx, const seqpar_llama *model,
                                       const demo_average *average, double *values,
                                       int64_t first, int64_t count) {
    int64_t ranks = ctx->world->size;
    int64_t *bytes = (int64_t *)calloc((size_t)ranks, sizeof *bytes);
    int64_t at;
    for (int64_t i = 0; i < ranks; i++)
        bytes[i] = demo_average_part(demo_average_begin(ctx, model, i),
                                     demo_average_begin(ctx, model, i + 1), first, count, &at) *
                   (int64_t)sizeof *values;
    demo_average_part(average->begin, average->begin + average->count, first, count, &at);
    seqpar_status status = seqpar_comm_all_gather(
        ctx->world, values,
        average->share + (bytes[ctx->world->rank] ? at - average->begin : 0), bytes,
        "moving average");
    free(bytes);
    return status;
}

#ifndef DEMO_AVERAGE_PART
#define DEMO_AVERAGE_PART (1 << 15) /* elements in a block */
#endif
/* Updates this rank's share by one step of the average; begins: copies the weights instead.
   Works a block at a time. An average that equals its weight keeps its bits. Collective if the
   weights are sharded. */
static seqpar_status demo_average_meet(seqpar_ctx *ctx, const seqpar_llama *model,
                                       demo_average *average, bool begins) {
    double *weights = (double *)demo_alloc(DEMO_AVERAGE_PART, sizeof *weights);
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; !status && i < model->tensor_count; i++) {
        const seqpar_tensor *t = &model->tensors[i];
        int64_t at, count, all = t->rows * t->cols;
        for (int64_t first = 0; !status && first < all; first += count) {
            count = all - first < DEMO_AVERAGE_PART ? all - first : (int64_t)DEMO_AVERAGE_PART;
            int64_t mine = demo_average_part(average->begin, average->begin + average->count,
                                             t->offset + first, count, &at);
            if (!mine && !model->shards) continue;
            status = seqpar_llama_read(ctx, model, weights, i, first, count);
            for (int64_t k = 0; k < mine; k++) {
                double *share = &average->share[at - average->begin + k];
                double weight = weights[at - t->offset - first + k];
                *share = begins ? weight : fma(1.0 - average->beta, weight - *share, *share);
            }
        }
    }
    free(weights);
    return status;
}

/* Updates the average after an optimizer step. Collective. */
static seqpar_status demo_average_step(seqpar_ctx *ctx, const seqpar_llama *model,
                                       demo_average *average) {
    if (!average->share || demo_is_planned(ctx->device)) return SEQPAR_OK;
    return demo_average_meet(ctx, model, average, false);
}

/* Opens the average and initializes it with the weights. Collective. */
static seqpar_status demo_average_open(seqpar_ctx *ctx, const seqpar_llama *model,
                                       demo_average *average, double beta) {
    average->beta = beta;
    average->begin = demo_average_begin(ctx, model, ctx->world->rank);
    average->count = demo_average_begin(ctx, model, ctx->world->rank + 1) - average->begin;
    if (demo_is_planned(ctx->device)) average->count = 0; /* no host memory in a dry run */
    average->share = (double *)demo_alloc(average->count + 1, sizeof *average->share);
    if (!average->share)
        return seqpar_fail(ctx->error, SEQPAR_ERR_MEMORY,
                           "out of memory for the moving average; leave out --enable_ema");
    return demo_is_planned(ctx->device) ? SEQPAR_OK
                                        : demo_average_meet(ctx, model, average, true);
}

static void demo_average_close(demo_average *average) { free(average->share); }
#endif
