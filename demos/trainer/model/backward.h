/* SPDX-License-Identifier: MIT OR Unlicense */
/* backward.h - the backward pass of a micro-batch, with the load-balancing loss if there is
 * one. */
#ifndef DEMO_BACKWARD_H
#define DEMO_BACKWARD_H
#include "experts.h"

static inline seqpar_status demo_backward(seqpar_ctx *ctx, demo_experts *e, seqpar_llama *model,
                                          seqpar_llama_batch *b, seqpar_optim *optim,
                                          int64_t micro, const seqpar_vocab_seeds *seeds) {
    if (e->on) return demo_experts_backward(ctx, e, model, b, optim, micro, seeds);
    return seqpar_llama_backward(ctx, model, b, optim, micro, seeds);
}
#endif
