/* SPDX-License-Identifier: MIT OR Unlicense */
/* 10_loss_and_optimizer.c - losses and optimizer alone; the model that makes hidden states and
   takes their gradient is yours. A step's tokens are four parts. Their gradients are added in a
   tree, so 1 rank that takes all parts and 4 ranks that take one each get the same bits.
   cc 10_loss_and_optimizer.c -lm -lpthread */
#include <stdio.h>
#include <string.h>
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"

enum { PARTS = 4, TOKENS = 50, HIDDEN = 16, VOCAB = 23, SIZE = VOCAB * HIDDEN, STEPS = 3 };
static const seqpar_tensor table = {"table", VOCAB, HIDDEN, 0, 1, 0};

/* Forward, backward and update, on a rank that takes every ranks-th part. */
static seqpar_status step(seqpar_ctx *ctx, seqpar_optim *optim, float *params) {
    const int64_t ranks = ctx->world->size, mine = PARTS / ranks;
    float hidden[TOKENS * HIDDEN], dhidden[TOKENS * HIDDEN], gradient[SIZE];
    float logp[TOKENS], seed[TOKENS]; /* seed: dloss/dlogp, loss: the mean of -logp */
    int32_t targets[TOKENS];
    int64_t part[PARTS];
    double losses[PARTS] = {0}, loss; /* as sums */
    seqpar_vocab_desc vocab = {.hidden = HIDDEN, .vocab = VOCAB};
    seqpar_vocab_io io = {.hidden = hidden, .table = params, .targets = targets};
    io.tokens = TOKENS, io.values.logp = logp, io.seeds.dlogp = seed;
    io.dhidden = dhidden, io.nodes = gradient;
    seqpar_step_nodes sum = {.nodes = gradient, .elements = SIZE};
    seqpar_status status = seqpar_step_begin_plain(ctx, optim, mine);
    for (int64_t i = 0; !status && i < mine; i++) {
        part[i] = i * ranks + ctx->world->rank;   /* its place in the tree */
        for (int j = 0; j < TOKENS * HIDDEN; j++) /* your forward */
            hidden[j] = (float)seqpar_random_normal(7, (uint64_t)part[i], (uint64_t)j);
        for (int t = 0; t < TOKENS; t++) {
            targets[t] = (int32_t)((t * t + part[i]) % VOCAB);
            seed[t] = -1.0f / (PARTS * TOKENS);
        }
        status = seqpar_vocab_backward(ctx, &io, NULL, NULL, &vocab);
        for (int t = 0; !status && t < TOKENS; t++) losses[i] -= (double)logp[t];
        /* your backward, from dhidden on; then give gradients, plain sums over tokens */
        sum.micro_batch = i;
        if (!status) status = seqpar_step_gradient(ctx, optim, &sum);
    }
    if (!status) status = seqpar_sum_pieces(ctx, &loss, part, losses, mine, 1);
    if (!status) status = seqpar_step_norm(ctx, optim); /* now seqpar_optim_read reads it */
    if (!status && ctx->world->rank == 0)
        printf("ranks: %d, loss %.12f, norm %.12f\n", (int)ranks, loss / (PARTS * TOKENS),
               optim->norm);
    return status ? status : seqpar_step_end(ctx, optim, params, SIZE, 0.1);
}

static seqpar_status rank_main(seqpar_comm *world, void *params) {
    seqpar_optim_desc adam = {.beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .max_norm = 1};
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_optim optim = {0};
    adam.zero_stage = adam.params_shared = 1; /* ranks are threads, with one array of weights */
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, 1);
    if (!status) status = seqpar_optim_open(&ctx, &optim, &table, 1, &adam);
    for (int i = 0; !status && i < STEPS; i++) status = step(&ctx, &optim, (float *)params);
    seqpar_optim_close(&ctx, &optim);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

int main(void) {
    static float params[2][SIZE];
    seqpar_error error;
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < SIZE; j++) params[i][j] = 0.02f * (float)(j % 7);
        if (seqpar_run_threads(i ? PARTS : 1, rank_main, params[i], &error))
            return fprintf(stderr, "%s\n", error.text), 1;
    }
    int same = !memcmp(params[0], params[1], sizeof params[0]);
    printf("identical bits: %s\n", same ? "yes" : "no");
    return !same;
}
