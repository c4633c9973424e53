/* SPDX-License-Identifier: MIT OR Unlicense */
/* deal.h - which rank holds a token if a framework splits a row, or each document of it, into
   slots whose lengths differ by at most one token. Suites that write dumps use it: slots end
   inside documents, as seqpar.h's do in long documents. */
#ifndef DEAL_H
#define DEAL_H
#include <stdio.h>
#include <stdlib.h>
#include "seqpar.h"

/* The slot of token t of n: the last of `slots` that begins at t or before, at
   floor(slot n / slots). */
static inline int64_t deal_slot(int64_t t, int64_t n, int64_t slots) {
    return ((t + 1) * slots - 1) / n;
}

/* The rank of sp that holds token t of a row of n. cu_seqlens has docs + 1 numbers; tokens
   behind the last document are one more. */
static inline int64_t deal_rank(int layout, int64_t sp, int64_t n, const int64_t *cu_seqlens,
                                int64_t docs, int64_t t) {
    int64_t d = 0, begin = 0, end = n, slot;
    if (layout == SEQPAR_LAYOUT_STRIPE) return t % sp;
    if (layout == SEQPAR_LAYOUT_CONTIGUOUS) return deal_slot(t, n, sp);
    if (layout != SEQPAR_LAYOUT_ZIGZAG && layout != SEQPAR_LAYOUT_ZIGZAG_DOC) {
        fprintf(stderr, "error: layout %s has no map in support/deal.h\n",
                seqpar_layout_name(layout));
        exit(1);
    }
    while (d < docs && cu_seqlens[d + 1] <= t) d++;
    if (layout == SEQPAR_LAYOUT_ZIGZAG_DOC) begin = cu_seqlens[d];
    if (layout == SEQPAR_LAYOUT_ZIGZAG_DOC && d < docs) end = cu_seqlens[d + 1];
    slot = deal_slot(t - begin, end - begin, 2 * sp);
    return slot < sp ? slot : 2 * sp - 1 - slot;
}
#endif
