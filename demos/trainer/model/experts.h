/* SPDX-License-Identifier: MIT OR Unlicense */
/* experts.h - the load-balancing loss of mixture-of-experts models (--aux_loss_coef). It is
 * computed over the whole step: a mean of losses of micro-batches or ranks would be another
 * loss. So a separate forward pass counts how often each expert is chosen, before any backward
 * pass. */
#ifndef DEMO_EXPERTS_H
#define DEMO_EXPERTS_H
#include "trainer/data/data.h"
#include "seqpar_llama.h"

typedef struct {
    bool on; /* the steps have this loss */
    int64_t *chosen;
    /* (experts) slopes[i]: derivative of the loss by a token's probability of expert i */
    double *slopes;
    int64_t *leaf; /* stb_ds arrays: leaf number and loss of each of this rank's pieces */
    double *value;
    double loss; /* loss of the last step, times the coefficient */
} demo_experts;

static inline void demo_experts_free(demo_experts *e) {
    free(e->chosen);
    free(e->slopes);
    arrfree(e->leaf);
    arrfree(e->value);
    memset(e, 0, sizeof *e);
}

/* Counts how many tokens choose each expert, by a forward pass over the micro-batches of a step
   that has begun. Collective over the world. */
static inline seqpar_status demo_experts_count(seqpar_ctx *ctx, demo_experts *e,
                                               seqpar_llama *model, seqpar_optim *optim,
                                               const seqpar_row *rows, int64_t micro_batches,
                                               const seqpar_llama_batch_desc *run) {
    int64_t experts = model->config.experts, first, count;
    seqpar_status status = SEQPAR_OK;
    memset(e->chosen, 0, (size_t)experts * sizeof *e->chosen);
    for (int64_t i = 0; !status && i < micro_batches; i++) {
        seqpar_llama_batch b;
        status = seqpar_step_rows(ctx, optim, i, &first, &count);
        if (status) return status;
        status = seqpar_llama_open_batch(ctx, model, &b, rows + first, count, run);
        if (!status) status = seqpar_llama_forward(ctx, model, &b, 0);
        for (int64_t k = 0; !status && k < experts; k++) e->chosen[k] += b.chosen[k];
        seqpar_llama_close_batch(ctx, model, &b);
    }
    return status ? status : seqpar_comm_sum_i64(ctx->world, e->chosen, experts);
}

/* Does a step of this model have a load-balancing loss? If not, nothing else here is called. */
static inline bool demo_experts_balanced(const seqpar_llama *model, double coefficient) {
    return coefficient > 0 && model->config.experts > 0;
}

/* Begins the load-balancing loss of a step, after seqpar_step_begin: counts the tokens of each
   expert and computes the slopes. Collective over the world. */
static inline seqpar_status demo_experts_begin(seqpar_ctx *ctx, demo_experts *e,
                                               seqpar_llama *model, seqpar_optim *optim,
                                               const seqpar_row *rows, int64_t micro_batches,
                                               const seqpar_llama_batch_desc *run,
                                               double coefficient) {
    int64_t experts = model->config.experts;
    e->on = true;
    if (!e->chosen) e->chosen = (int64_t *)demo_alloc(experts, sizeof *e->chosen);
    if (!e->slopes) e->slopes = (double *)demo_alloc(experts, sizeof *e->slopes);
    arrsetlen(e->leaf, 0);
    arrsetlen(e->value, 0);
    seqpar_status status = demo_experts_count(ctx, e, model, optim, rows, micro_batches, run);
    if (!status) seqpar_llama_balance(&model->config, e->slopes, e->chosen, coefficient);
    return status;
}

/* Adds a batch's part of the loss, as one sum for each piece. */
static inline void demo_experts_add(seqpar_ctx *ctx, demo_experts *e,
                                    const seqpar_llama_batch *b) {
    double *values = (double *)demo_alloc(b->tokens, sizeof *values);
    seqpar_device_read(ctx->device, values, b->balance_loss.data, 0, b->tokens,
                       ctx->device->accumulator);
    for (int64_t i = 0; i < b->share->count; i++) {
        const seqpar_piece *p = &b->share->pieces[i];
        double sum = 0;
        for (int64_t t = p->local; t < p->local + p->count; t++) sum += values[t];
        arrput(e->leaf, p->leaf);
        arrput(e->value, sum);
    }
    free(values);
}

/* Runs seqpar_llama_backward and adds the gradient of the load-balancing loss. */
static inline seqpar_status demo_experts_backward(seqpar_ctx *ctx, demo_experts *e,
                                                  seqpar_llama *model, seqpar_llama_batch *b,
                                                  seqpar_optim *optim, int64_t micro,
                                                  const seqpar_vocab_seeds *seeds) {
    b->balance = e->slopes;
    seqpar_status status = seqpar_llama_backward(ctx, model, b, optim, micro, seeds);
    if (!status) demo_experts_add(ctx, e, b);
    return status;
}

/* Sums the loss, after the backward passes of all micro-batches. Collective over the world. */
static inline seqpar_status demo_experts_end(seqpar_ctx *ctx, demo_experts *e) {
    return seqpar_sum_pieces(ctx, &e->loss, e->leaf, e->value, arrlen(e->leaf), 1);
}
#endif
