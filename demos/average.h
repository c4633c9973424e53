/* SPDX-License-Identifier: MIT OR Unlicense */
/* average.h - the moving average of the weights (--enable_ema): average += (1 - beta) (weights - average) after every
 * optimizer step, in fp64 whatever the weights are. Every rank keeps an equal share of it. Elements do not meet, so how
 * many ranks there are changes no bit. */
#ifndef DEMO_AVERAGE_H
#define DEMO_AVERAGE_H
#include <math.h>
#include "memory.h"
#include "seqpar_llama.h"

typedef struct {
    double beta, *share;  /* NULL: none is kept */
    int64_t begin, count; /* the share's elements */
} demo_average;

/* This rank's share of the whole. */
static void demo_average_set(demo_average *average, const double *whole) { memcpy(average->share, whole + average->begin, (size_t)average->count * sizeof *whole); }

/* The average begins as the weights. */
static seqpar_status demo_average_open(seqpar_ctx *ctx, const seqpar_llama *model, demo_average *average, double beta) {
    int64_t ranks = ctx->world->size, end = seqpar_grid_begin(model->elements, ranks, ctx->world->rank + 1);
    average->beta = beta;
    average->begin = seqpar_grid_begin(model->elements, ranks, ctx->world->rank);
    average->count = end - average->begin;
    average->share = (double *)demo_room(average->count + 1, sizeof *average->share);
    if (!average->share) return seqpar_fail(ctx->error, SEQPAR_ERR_MEMORY, "out of memory for the moving average; leave out --enable_ema");
    seqpar_device_read(ctx->device, average->share, model->params.data, average->begin, average->count, ctx->device->storage);
    return SEQPAR_OK;
}
static void demo_average_close(demo_average *average) { free(average->share); }

/* Of equal numbers it is that number, to the bit. */
static void demo_average_step(seqpar_ctx *ctx, const seqpar_llama *model, demo_average *average) {
    enum { PART = 4096 };
    double weights[PART];
    for (int64_t first = 0; average->share && first < average->count; first += PART) {
        int64_t count = average->count - first < PART ? average->count - first : PART;
        seqpar_device_read(ctx->device, weights, model->params.data, average->begin + first, count, ctx->device->storage);
        for (int64_t i = 0; i < count; i++) average->share[first + i] = fma(1.0 - average->beta, weights[i] - average->share[first + i], average->share[first + i]);
    }
}

/* Collective: the whole average (elements), for free(); NULL where none is kept. */
static seqpar_status demo_average_gather(seqpar_ctx *ctx, const seqpar_llama *model, const demo_average *average, double **whole) {
    int64_t ranks = ctx->world->size, *bytes = (int64_t *)demo_room(ranks, sizeof *bytes);
    *whole = average->share ? (double *)demo_room(model->elements, sizeof **whole) : NULL;
    for (int64_t i = 0; i < ranks; i++) bytes[i] = (seqpar_grid_begin(model->elements, ranks, i + 1) - seqpar_grid_begin(model->elements, ranks, i)) * (int64_t)sizeof **whole;
    seqpar_status status = average->share ? seqpar_comm_all_gather(ctx->world, *whole, average->share, bytes, "moving average") : SEQPAR_OK;
    free(bytes);
    return status;
}
#endif
