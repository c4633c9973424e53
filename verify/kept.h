/* SPDX-License-Identifier: MIT OR Unlicense */
/* What an optimizer keeps, whole: every tensor at its offset among the parameters.
   Collective. */
#ifndef KEPT_H
#define KEPT_H
#include "seqpar.h"

__attribute__((unused)) static seqpar_status kept_read(seqpar_ctx *ctx,
                                                       const seqpar_optim *optim,
                                                       double *values, int state) {
    seqpar_optim_part part = {.state = state};
    seqpar_status status = SEQPAR_OK;
    for (; !status && part.tensor < optim->tensor_count; part.tensor++) {
        part.count = optim->tensors[part.tensor].rows * optim->tensors[part.tensor].cols;
        status = seqpar_optim_read(ctx, optim, values + optim->tensors[part.tensor].offset,
                                   &part);
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
#endif
