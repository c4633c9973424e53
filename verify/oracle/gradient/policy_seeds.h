/* SPDX-License-Identifier: MIT OR Unlicense */
/* policy_seeds.h - dL/dlogp of PPO: a token's weight in the mean times the slope of its loss
 * (policy.h), rightly and with each known mistake. */
#ifndef ORACLE_POLICY_SEEDS_H
#define ORACLE_POLICY_SEEDS_H
#include "oracle/loss/losses.h"
#include "seeds.h"

/* Advantages that were whitened after the dump, over the tokens of each group. grouping: of
   means.h, or BY_ALL. */
typedef struct white_way {
    const char *name, *how;
    int grouping, unbiased;
} white_way;
static const white_way white_ways[] = {
    {NULL,
     "advantages are whitened over all supervised tokens of the step after what the dump "
     "has: no mistake of sequence parallelism",
     BY_ALL, 0},
    {NULL,
     "advantages are whitened over all supervised tokens of the step after what the dump "
     "has, with the unbiased deviation: no mistake of sequence parallelism",
     BY_ALL, 1},
    {"whitened_by_rank", "over the tokens of each rank", BY_RANK, 0},
    {"whitened_by_rank", "over the tokens of each rank, unbiased", BY_RANK, 1},
    {"whitened_by_rank", "over the tokens of each rank's micro-batch", BY_RANK_MICRO, 0},
    {"whitened_by_rank", "over the tokens of each rank's micro-batch, unbiased", BY_RANK_MICRO,
     1},
    {"whitened_by_rank", "over the tokens of each replica", BY_REPLICA, 0},
    {"whitened_by_rank", "over the tokens of each replica, unbiased", BY_REPLICA, 1},
    {"whitened_by_rank", "over the tokens of each replica's micro-batch", BY_REPLICA_MICRO, 0},
    {"whitened_by_rank", "over the tokens of each replica's micro-batch, unbiased",
     BY_REPLICA_MICRO, 1}};
enum {
    WHITE_WAYS = sizeof white_ways / sizeof *white_ways,
    PPO_TOKENS = MEAN_WAYS, /* from here on TOKEN_KL_CUT and the token ways after it */
    PPO_WHITENED = PPO_TOKENS + TOKEN_WAYS - TOKEN_KL_CUT,
    PPO_SEEDS = PPO_WHITENED + WHITE_WAYS
};

static inline int ppo_token_way(int way) {
    return way >= PPO_TOKENS && way < PPO_WHITENED ? way - PPO_TOKENS + TOKEN_KL_CUT
                                                   : TOKEN_RIGHT;
}

static inline const char *ppo_way_name(const dump *d, int way) {
    return way < PPO_TOKENS     ? mean_way_name(d, way)
           : way < PPO_WHITENED ? token_ways[ppo_token_way(way)].name
                                : white_ways[way - PPO_WHITENED].name;
}

static inline const char *ppo_way_how(int way) {
    return way < PPO_TOKENS     ? NULL
           : way < PPO_WHITENED ? token_ways[ppo_token_way(way)].how
                                : white_ways[way - PPO_WHITENED].how;
}

/* ---- slopes ---- */

static inline double ratio_bound(const dump_facts *f, double advantage) {
    return advantage > 0 ? 1 + f->clip_high : 1 - f->clip_low;
}

/* The derivative of -min(r, cispo) A logp with respect to logp, r held. */
static inline double cispo_slope(const dump_facts *f, const token_side *s, int way) {
    double ratio = exp(way == TOKEN_INVERTED ? -s->ratio : s->ratio);
    return -s->advantage * (way == TOKEN_NO_CLIP ? ratio : fmin(ratio, f->cispo));
}

/* The derivative of max(-A r, -A clip(r)) with respect to logp. */
static inline double clipped_slope(const dump_facts *f, const token_side *s, int way) {
    double ratio = exp(s->ratio), turn = 1, free, bound;
    int inside, takes_free;
    if (f->cispo > 0) return cispo_slope(f, s, way);
    if (way == TOKEN_INVERTED) {
        ratio = 1 / ratio;
        turn = -1;
    }
    if (f->dual_clip > 0 && s->advantage < 0 && ratio > f->dual_clip) return 0;
    inside = ratio >= 1 - f->clip_low && ratio <= 1 + f->clip_high;
    free = -s->advantage * ratio;
    bound = clipped_loss(f, ratio, s->advantage, 0);
    takes_free = (free >= bound) != (way == TOKEN_WRONG_SIDE);
    return inside || takes_free || way == TOKEN_NO_CLIP ? turn * free : 0;
}

/* The KL estimate and its derivative with respect to logp; d = ref_logp - logp. */
typedef struct kl_estimate {
    double value, slope;
} kl_estimate;
static inline kl_estimate kl_estimate_of(double d, int way) {
    return way == TOKEN_K1                     ? (kl_estimate){-d, 1}
           : way == TOKEN_K2                   ? (kl_estimate){d * d / 2, -d}
           : way == TOKEN_KL_REVERSED          ? (kl_estimate){k3(-d), expm1(-d)}
           : way == TOKEN_KL_CUT && k3(d) > 10 ? (kl_estimate){10, 0}
                                               : (kl_estimate){k3(d), -expm1(d)};
}

/* The derivative of the KL term, whose weight may be the ratio. */
static inline double kl_slope(const dump_facts *f, const token_side *s, int way) {
    kl_estimate kl = kl_estimate_of(s->reference - s->logp, way);
    if (!(f->kl_coef > 0) || way == TOKEN_NO_KL) return 0;
    if (way == TOKEN_KL_PLAIN) return f->kl_coef * kl.slope;
    return kl_weight(f, s) * (kl.slope + (f->kl_ratio ? kl.value : 0));
}

/* Sets ratio, advantage and reference from the elements that the way reads. 0: it reads outside
   of the row, or it does not apply. */
static inline int policy_side(const dump_facts *f, const dump_row *row, int64_t t, int way,
                              token_side *s) {
    int from_first = way >= TOKEN_OLD ? (way - TOKEN_OLD) % SOURCES : 0;
    int64_t from = way >= TOKEN_OLD ? row_source(row, from_first, t) : t;
    int of_kl = way == TOKEN_KL_CUT || (way >= TOKEN_NO_KL && way < TOKEN_OLD) ||
                way >= TOKEN_REFERENCE;
    int of_other = way >= TOKEN_RETURNS || (way >= TOKEN_RATIO_PART && way < TOKEN_OLD);
    if (from < 0 || of_other || (of_kl && !(f->kl_coef > 0))) return 0;
    if (way == TOKEN_WRONG_SIDE && f->cispo > 0) return 0;
    if (way == TOKEN_KL_PLAIN && !f->kl_ratio) return 0;
    s->ratio = s->logp - row->old_logp[way >= TOKEN_OLD && way < TOKEN_ADVANTAGE ? from : t];
    s->advantage = row->advantages[way >= TOKEN_ADVANTAGE && way < TOKEN_REFERENCE ? from : t];
    s->reference = f->kl_coef > 0 ? row->ref_logp[way >= TOKEN_REFERENCE ? from : t] : 0;
    return 1;
}

/* ---- whitening ---- */

static inline void white_sum(seed_set *s, int64_t i, int64_t t, int grouping) {
    int64_t g = group_of(s, i, t, grouping);
    s->sums[g] += s->f->rows[i].advantages[t];
    s->counts[g]++;
}
static inline void white_square(seed_set *s, int64_t i, int64_t t, int grouping) {
    int64_t g = group_of(s, i, t, grouping);
    s->other[g] += square(s->f->rows[i].advantages[t] - s->sums[g] / s->counts[g]);
}

static inline void white_begin(seed_set *s, const white_way *w) {
    memset(s->sums, 0, (size_t)(3 * s->most) * sizeof *s->sums);
    each_target(s, white_sum, w->grouping);
    each_target(s, white_square, w->grouping);
}

static inline double white_advantage(const seed_set *s, const white_way *w, int64_t i,
                                     int64_t t) {
    int64_t g = group_of(s, i, t, w->grouping);
    double deviation = s->counts[g] > w->unbiased
                           ? sqrt(s->other[g] / (s->counts[g] - w->unbiased))
                           : 0;
    double off = s->f->rows[i].advantages[t] - s->sums[g] / s->counts[g];
    return deviation > 1e-6 ? off / (deviation + 1e-8) : 0;
}

/* ---- seeds of the step ---- */

static inline int ppo_is_known(const seed_set *s) {
    if (s->f->d->facts.importance != DUMP_RATIO_OF_TOKEN) return 0;
    for (int64_t i = 0; i < s->f->count; i++) {
        const dump_row *row = &s->f->rows[i];
        if (!row->old_logp || !row->advantages) return 0;
        if (s->f->d->facts.kl_coef > 0 && !row->ref_logp) return 0;
    }
    return 1;
}

/* s->of has minus each token's weight and becomes its seed: the weight times the slope of the
   loss. 0: the way has no meaning for a token of the row. */
static inline int ppo_seed_row(seed_set *s, int64_t i, int way) {
    const dump_facts *f = &s->f->d->facts;
    const dump_row *row = &s->f->rows[i];
    int of_token = ppo_token_way(way);
    for (int64_t t = 0; t < row_end(row); t++) {
        token_side side = {.logp = s->logp[i][t]};
        if (!is_target(row, t)) continue;
        if (!policy_side(f, row, t, of_token, &side)) return 0;
        if (way >= PPO_WHITENED)
            side.advantage = white_advantage(s, &white_ways[way - PPO_WHITENED], i, t);
        s->of[i][t] *= -clipped_slope(f, &side, of_token) - kl_slope(f, &side, of_token);
    }
    return 1;
}

/* 0: the dump lacks something, or the way has no meaning. */
static inline int make_ppo_seeds(seed_set *s, int way) {
    if (!ppo_is_known(s)) return 0;
    make_mean_seeds(s, way < PPO_TOKENS ? way : SEEDS_RIGHT);
    if (way >= PPO_WHITENED) white_begin(s, &white_ways[way - PPO_WHITENED]);
    for (int64_t i = 0; i < s->f->count; i++)
        if (!ppo_seed_row(s, i, way)) return 0;
    return 1;
}

/* Counts tokens whose ratio is so near to the clip bound that rounding of log-probs may turn
   their gradient on or off. distance: error of a log-prob beside the rounding of its type. */
static inline int64_t ppo_near_clip(const seed_set *s, double distance) {
    const dump_facts *f = &s->f->d->facts;
    int64_t count = 0;
    if (f->cispo > 0) return 0; /* its slope does not jump */
    for (int64_t i = 0; i < s->f->count; i++) {
        const dump_row *row = &s->f->rows[i];
        for (int64_t t = 0; t < row_end(row); t++) {
            double bound, off, rounding;
            if (!is_target(row, t)) continue;
            bound = ratio_bound(f, row->advantages[t]);
            off = fabs(s->logp[i][t] - row->old_logp[t] - log(bound));
            rounding = row->unit.logp * fabs(s->logp[i][t]) +
                       row->unit.old_logp * fabs(row->old_logp[t]) + distance;
            count += off <= 2 * rounding;
        }
    }
    return count;
}
#endif
