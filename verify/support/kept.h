/* SPDX-License-Identifier: MIT OR Unlicense */
/* A model's parameters and what an optimizer keeps, whole: every tensor at its offset among the
   parameters. Reading is collective. */
#ifndef KEPT_H
#define KEPT_H
#include "seqpar_llama.h"

__attribute__((unused)) static seqpar_status kept_read(seqpar_ctx *ctx,
                                                       const seqpar_optim *optim,
                                                       double *values, int state) {
    seqpar_optim_part part = {.state = state};
    seqpar_status status = SEQPAR_OK;
    for (; !status && part.tensor < optim->blocks.tensor_count; part.tensor++) {
        const seqpar_tensor *t = &optim->blocks.tensors[part.tensor];
        part.count = t->rows * t->cols;
        status = seqpar_optim_read(ctx, optim, values + t->offset, &part);
    }
    return status;
}

/* Moments and masters, `elements` apart; what this optimizer does not keep is not touched. */
__attribute__((unused)) static seqpar_status kept_state(seqpar_ctx *ctx,
                                                        const seqpar_optim *optim,
                                                        double *values, int64_t elements) {
    seqpar_status status = SEQPAR_OK;
    for (int state = SEQPAR_STATE_M; !status && state <= SEQPAR_STATE_MASTER; state++)
        if (seqpar_optim_keeps(ctx, optim, state))
            status = kept_read(ctx, optim, values + (state - SEQPAR_STATE_M) * elements, state);
    return status;
}

/* Opens a model; at zero_stage 3 each parameter is only on its owner, except in four bits. */
__attribute__((unused)) static seqpar_status params_open(seqpar_ctx *ctx, seqpar_llama *model,
                                                         const seqpar_llama_config *config,
                                                         const seqpar_optim_desc *optim) {
    return optim->zero_stage == 3 && !config->four_bits
               ? seqpar_llama_open_sharded(ctx, model, config, optim->slice,
                                           optim->offload & SEQPAR_OFFLOAD_PARAMS)
               : seqpar_llama_open(ctx, model, config);
}

__attribute__((unused)) static seqpar_status params_read(seqpar_ctx *ctx,
                                                         const seqpar_llama *model,
                                                         double *values) {
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; !status && i < model->tensor_count; i++) {
        const seqpar_tensor *t = &model->tensors[i];
        status = seqpar_llama_read(ctx, model, values + t->offset, i, 0, t->rows * t->cols);
    }
    return status;
}

__attribute__((unused)) static seqpar_status params_write(seqpar_ctx *ctx, seqpar_llama *model,
                                                          const double *values) {
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; !status && i < model->tensor_count; i++) {
        const seqpar_tensor *t = &model->tensors[i];
        status = seqpar_llama_write(ctx, model, values + t->offset, i, 0, t->rows * t->cols);
    }
    return status;
}
#endif
