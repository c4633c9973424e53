/* SPDX-License-Identifier: MIT OR Unlicense */
/* values.h - a critic's loss of one token, right and with each mistake:
 *
 *     max((V - G)^2, (V_old + clip(V - V_old, -clip_value, clip_value) - G)^2) / 2
 *
 * where V is the token's value, G its return, and V_old its value when the text was sampled.
 * Without metadata clip_value above 0 it is (V - G)^2 / 2. */
#ifndef ORACLE_VALUES_H
#define ORACLE_VALUES_H
#include "policy.h"

typedef struct value_side {
    double value, returns, old; /* old: not used without a clip */
} value_side;

static inline double value_clipped(const dump_facts *f, const value_side *s) {
    double step = s->value - s->old;
    if (!(f->clip_value > 0) || isnan(step)) return f->clip_value > 0 ? step : s->value;
    return s->old + fmin(fmax(step, -f->clip_value), f->clip_value);
}

static inline double value_loss(const dump_facts *f, const value_side *s, int wrong_side) {
    double free = square(s->value - s->returns) / 2;
    double bound = square(value_clipped(f, s) - s->returns) / 2;
    if (isnan(bound)) return bound;
    return (free > bound) != wrong_side ? free : bound;
}

static inline value_side value_side_of(const dump_facts *f, const dump_row *row, int64_t t) {
    return (value_side){row->values[t], row->returns[t],
                        f->clip_value > 0 ? row->old_values[t] : 0};
}

/* loss: (TOKEN_WAYS), NaN where a mistake cannot be made */
static inline void value_losses(const dump_facts *f, const dump_row *row, int64_t t,
                                double *loss) {
    value_side s = value_side_of(f, row, t);
    for (int way = 0; way < TOKEN_WAYS; way++) loss[way] = NAN;
    loss[TOKEN_RIGHT] = value_loss(f, &s, 0);
    for (int source = 0; source < SOURCES; source++) {
        int64_t from = row_source(row, source, t);
        value_side returns = s, old = s;
        if (from < 0) continue;
        returns.returns = row->returns[from];
        loss[TOKEN_RETURNS + source] = value_loss(f, &returns, 0);
        if (!(f->clip_value > 0)) continue;
        old.old = row->old_values[from];
        loss[TOKEN_OLD_VALUES + source] = value_loss(f, &old, 0);
    }
    if (!(f->clip_value > 0)) return;
    loss[TOKEN_WRONG_SIDE] = value_loss(f, &s, 1);
    loss[TOKEN_NO_CLIP] = square(s.value - s.returns) / 2;
}

/* Upper bound of the absolute derivative of the loss by V, G or V_old. */
static inline double value_slope(const dump_facts *f, const dump_row *row, int64_t t) {
    value_side s = value_side_of(f, row, t);
    return fmax(fabs(s.value - s.returns), fabs(value_clipped(f, &s) - s.returns));
}

static inline int row_has_values(const dump_facts *f, const dump_row *row) {
    return row->values && row->returns && row->labels &&
           (row->old_values || !(f->clip_value > 0));
}
#endif
