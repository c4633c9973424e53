/* SPDX-License-Identifier: MIT OR Unlicense */
/* advantage.h - the arithmetic of a rollout that needs no communication: every rank has all
   the numbers and computes the same results. */
#ifndef DEMO_ADVANTAGE_H
#define DEMO_ADVANTAGE_H
#include <math.h>
#include "trainer/objective/definitions.h"

/* As in seqpar.h: the compiler must not fuse a product with a sum (FMA), so that every compiler
   gives the same bits. */
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off", "no-trapping-math", "no-math-errno")
#endif

/* Coefficient of the KL penalty. If target is 0, it is fixed. Else each rollout multiplies it
   by 1 + clip(kl / target - 1, +-0.2) n / horizon (Ziegler et al. 2019). kl: mean over all
   responses of the rollout; n: number of responses. Usual values: 0.01, 0, 10000. */
typedef struct {
    double coef, target, horizon;
} kl_controller;

static inline void kl_controller_update(kl_controller *c, double kl, int64_t n) {
    double off;
    if (!(c->target > 0)) return;
    off = kl / c->target - 1.0;
    if (off > 0.2) off = 0.2;
    if (off < -0.2) off = -0.2;
    c->coef *= 1.0 + off * (double)n / c->horizon;
}

/* Rewards of the tokens of one response: rewards[t] = -coef kl[t]. The reward of the last token
   also gets the score, clipped to [low, high]. */
typedef struct {
    double coef, low, high;
} reward_shape;

static inline void shaped_rewards(double *rewards, const double *kl, int64_t count,
                                  double score, const reward_shape *s) {
    for (int64_t t = 0; t < count; t++) rewards[t] = s->coef > 0 ? -s->coef * kl[t] : 0.0;
    if (count > 0)
        rewards[count - 1] += score < s->low ? s->low : score > s->high ? s->high : score;
}

/* Generalized advantage estimation for one response, from the last token to the first: d = r +
   gamma V' - V, A = d + gamma lambda A', return = A + V (Schulman et al. 2015). V after the
   last token is 0. With values NULL (REINFORCE, REINFORCE++) both advantages and returns are
   the discounted rewards to go. */
typedef struct {
    double gamma, lambda;
} gae_desc;

static inline void gae(double *advantages, double *returns, const double *rewards,
                       const double *values, int64_t count, const gae_desc *d) {
    double next_value = 0, next = 0.0;
    for (int64_t t = count - 1; t >= 0; t--) {
        double value = values ? values[t] : 0.0;
        double delta = rewards[t] + d->gamma * next_value - value;
        next = delta + d->gamma * (values ? d->lambda : 1.0) * next;
        next_value = value;
        returns[t] = next + value;
        advantages[t] = next;
    }
}

/* Advantages of n responses to one prompt, from their rewards r; std divides by n - 1:
   GRPO (r - mean) / (std + eps), eps 1e-9 OpenRLHF, 1e-4 TRL (Shao et al. 2024); MEAN
   r - mean (Dr. GRPO, Liu et al. 2025; REINFORCE++-baseline); RLOO r - mean of the others
   (Ahmadian et al. 2024). */
enum { ADVANTAGE_GRPO, ADVANTAGE_MEAN, ADVANTAGE_RLOO };
static inline seqpar_status group_advantages(seqpar_error *error, double *advantages,
                                             const double *rewards, int64_t n, int kind,
                                             double eps) {
    double mean = seqpar_mean(rewards, n), square = 0, scale;
    if (n < 2)
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "a group has %lld responses, but the advantage compares at least "
                           "2; raise n_samples_per_prompt",
                           (long long)n);
    for (int64_t i = 0; i < n; i++) square += (rewards[i] - mean) * (rewards[i] - mean);
    scale = kind == ADVANTAGE_GRPO   ? 1.0 / (sqrt(square / (double)(n - 1)) + eps)
            : kind == ADVANTAGE_RLOO ? (double)n / (double)(n - 1)
                                     : 1.0;
    for (int64_t i = 0; i < n; i++) advantages[i] = (rewards[i] - mean) * scale;
    return SEQPAR_OK;
}

/* Shifts and scales x (count: all tokens of the rollout) to mean 0 and variance 1.
   WHITEN_POPULATION: (x - mean) / sqrt(max(var, 1e-8)), var over count (OpenRLHF);
   WHITEN_UNBIASED: (x - mean) / sqrt(var + 1e-8), var over count - 1 (TRL);
   WHITEN_MEAN_ONLY: x - mean, with the variance as it was. */
static inline void whiten(double *x, int64_t count, int how) {
    double mean = seqpar_mean(x, count), square = 0, variance, scale = 1.0;
    for (int64_t i = 0; i < count; i++) square += (x[i] - mean) * (x[i] - mean);
    variance = square / (double)(how == WHITEN_UNBIASED ? count - 1 : count);
    if (how == WHITEN_POPULATION) scale = 1.0 / sqrt(variance < 1e-8 ? 1e-8 : variance);
    if (how == WHITEN_UNBIASED) scale = 1.0 / sqrt(variance + 1e-8);
    for (int64_t i = 0; i < count; i++) x[i] = (x[i] - mean) * scale;
}

#if !defined(__clang__) && defined(__GNUC__)
#pragma GCC pop_options
#endif
#endif
