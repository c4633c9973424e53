/* SPDX-License-Identifier: MIT OR Unlicense */
/* preferences.h - the loss of one pair by metadata loss_type. x = h(chosen) - h(rejected);
 * h is the sum over a response's tokens of policy - reference log-probs; z = beta x; e is
 * label_smoothing.
 *
 *     sigmoid    softplus(-z) (1 - e) + softplus(z) e
 *     robust     (softplus(-z) (1 - e) - softplus(z) e) / (1 - 2 e)
 *     hinge      max(0, 1 - z)
 *     ipo        (x - 1 / (2 beta))^2; in ipo_mean, h is the mean over tokens
 *     simpo      as sigmoid, with z - simpo_gamma; h is the mean of the policy's log-probs */
#ifndef ORACLE_PREFERENCES_H
#define ORACLE_PREFERENCES_H
#include "documents.h"

/* softplus(-x), without overflow */
static inline double pair_loss(double x) {
    return isnan(x) ? x : (x < 0 ? -x : 0) + log1p(exp(-fabs(x)));
}

static inline int preference_is_by_length(const dump_facts *f) {
    return f->loss_type == DUMP_IPO_MEAN || f->loss_type == DUMP_SIMPO;
}

static inline int preference_has_reference(const dump_facts *f) {
    return f->loss_type != DUMP_SIMPO;
}

static inline double preference_loss(const dump_facts *f, double x) {
    double z = f->beta * x, e = f->label_smoothing;
    switch (f->loss_type) {
    case DUMP_ROBUST: return (pair_loss(z) * (1 - e) - pair_loss(-z) * e) / (1 - 2 * e);
    case DUMP_HINGE: return isnan(z) ? z : fmax(0, 1 - z);
    case DUMP_IPO:
    case DUMP_IPO_MEAN: return square(x - 1 / (2 * f->beta));
    case DUMP_SIMPO: z -= f->simpo_gamma; break;
    default: break;
    }
    return pair_loss(z) * (1 - e) + pair_loss(-z) * e;
}

/* d loss / d x; plain 1: without label_smoothing. */
static inline double preference_derivative(const dump_facts *f, double x, int plain) {
    double z = f->beta * x, e = plain ? 0 : f->label_smoothing;
    double down, up; /* slopes of softplus(-z) and softplus(z) */
    if (f->loss_type == DUMP_IPO || f->loss_type == DUMP_IPO_MEAN)
        return 2 * (x - 1 / (2 * f->beta));
    if (f->loss_type == DUMP_HINGE) return z < 1 ? -f->beta : 0;
    if (f->loss_type == DUMP_SIMPO) z -= f->simpo_gamma;
    down = -1 / (1 + exp(z));
    up = 1 / (1 + exp(-z));
    if (f->loss_type == DUMP_ROBUST) return f->beta * (down * (1 - e) - up * e) / (1 - 2 * e);
    return f->beta * (down * (1 - e) + up * e);
}

/* Upper bound of |d loss / d x|: at this x for IPO, at any x for the others. */
static inline double preference_slope(const dump_facts *f, double x) {
    if (f->loss_type == DUMP_IPO || f->loss_type == DUMP_IPO_MEAN)
        return 2 * fabs(x - 1 / (2 * f->beta));
    return f->loss_type == DUMP_ROBUST ? f->beta / (1 - 2 * f->label_smoothing) : f->beta;
}

/* h of a response, or of a rank's part of it; by_length: the mean over its tokens. */
static inline double response_of(const document_part *p, int reference, int by_length) {
    double h = p->policy - (reference ? p->reference : 0);
    if (!by_length) return h;
    return p->tokens > 0 ? h / p->tokens : 0;
}

/* How a mistake combines each rank's own mean of a response: adds them, or averages over all
   ranks, or over the ranks that have a token of it. */
enum { MEANS_ADDED, MEANS_AVERAGED, MEANS_OF_FILLED, MEANS_LOCAL };
static const char *const local_means_texts[MEANS_LOCAL] = {
    "added over ranks", "averaged over ranks",
    "averaged over the ranks that have a token of the response"};

static inline double response_of_means(const document_part *p, int64_t sp, int reference,
                                       int how) {
    double sum = 0, filled = 0;
    for (int64_t r = 0; r < sp; r++) {
        sum += response_of(&p[r], reference, 1);
        filled += p[r].tokens > 0;
    }
    if (how == MEANS_ADDED || filled == 0) return sum;
    return sum / (how == MEANS_AVERAGED ? (double)sp : filled);
}
#endif
