/* SPDX-License-Identifier: MIT OR Unlicense */
/* objective_seeds.h - the seeds of any objective. */
#ifndef ORACLE_OBJECTIVE_SEEDS_H
#define ORACLE_OBJECTIVE_SEEDS_H
#include "document_seeds.h"
#include "policy_seeds.h"

static inline int seeds_are_of_tokens(const dump *d) { return loss_is_of_tokens(&d->facts); }

static inline int seed_ways(const dump *d) {
    int count = d->facts.objective == DUMP_PPO ? PPO_SEEDS : MEAN_WAYS;
    if (!seeds_are_of_tokens(d)) document_ways(d, &count);
    return count;
}

/* NULL: no mistake. */
static inline const char *seed_way_name(const dump *d, int way) {
    int count;
    if (d->facts.objective == DUMP_SFT) return mean_way_name(d, way);
    if (d->facts.objective == DUMP_PPO) return ppo_way_name(d, way);
    return document_way_name(d, &document_ways(d, &count)[way]);
}

/* A text on the form of the mistake; NULL: none. */
static inline const char *seed_way_how(const dump *d, int way) {
    int count;
    if (d->facts.objective == DUMP_SFT) return NULL;
    return d->facts.objective == DUMP_PPO ? ppo_way_how(way)
                                          : document_ways(d, &count)[way].how;
}

/* Whose means are averaged: one of means.h; another number if it is no mean of means. */
static inline int seed_way_grouping(const dump *d, int way) {
    int count;
    if (!seeds_are_of_tokens(d)) return document_ways(d, &count)[way].grouping;
    return way < MEAN_WAYS ? mean_ways[way].grouping : BY_ALL;
}

static inline int seed_way_is_of_last(const dump *d, int way) {
    int count;
    if (!seeds_are_of_tokens(d)) return document_ways(d, &count)[way].last;
    return way < MEAN_WAYS && mean_ways[way].last;
}

/* Whether the mistake is that an option of the metadata is left out. */
static inline int seed_way_is_of_option(const dump *d, int way) {
    int count;
    if (seeds_are_of_tokens(d))
        return d->facts.objective == DUMP_PPO && ppo_token_way(way) == TOKEN_KL_PLAIN;
    return document_ways(d, &count)[way].plain;
}

static inline int seed_way_drops_zero(const dump *d, int way) {
    return seeds_are_of_tokens(d) && way < MEAN_WAYS && mean_ways[way].zero;
}

/* Whether token 0 is a target. */
static inline int seeds_have_zero(const seed_set *s) {
    for (int64_t i = 0; i < s->f->count; i++)
        for (int64_t t = 0; t < row_end(&s->f->rows[i]); t++)
            if (is_target(&s->f->rows[i], t) && s->f->rows[i].labels[t] == 0) return 1;
    return 0;
}

static inline int seeds_are_finite(const seed_set *s) {
    for (int64_t i = 0; i < s->f->count; i++)
        for (int64_t t = 0; t < row_end(&s->f->rows[i]); t++)
            if (!isfinite(s->of[i][t])) return 0;
    return 1;
}

/* Token weights are factors of losses, so of seeds. */
static inline void seeds_weigh(seed_set *s) {
    for (int64_t i = 0; i < s->f->count; i++)
        for (int64_t t = 0; t < row_end(&s->f->rows[i]) && s->f->rows[i].weights; t++)
            if (is_target(&s->f->rows[i], t)) s->of[i][t] *= s->f->rows[i].weights[t];
}

/* Writes the tokens' weights, which the loss's terms are made of. */
static inline void seeds_keep_weights(seed_set *s, int way) {
    if (!seeds_are_of_tokens(s->f->d)) return;
    make_mean_seeds(s, way < MEAN_WAYS ? way : SEEDS_RIGHT);
    seeds_weigh(s);
    for (int64_t i = 0; i < s->f->count; i++) {
        size_t bytes = (size_t)(s->f->rows[i].tokens + 1) * sizeof **s->of;
        memcpy(s->weights[i], s->of[i], bytes);
        memset(s->of[i], 0, bytes);
    }
}

/* Writes the seeds into s->of. 0: the dump lacks something, or the way does not apply, such as
   lost micro-batches in a step of one. */
static inline int seed_set_make(const seed_set *set, int way) {
    seed_set *s = (seed_set *)set;
    int64_t objective = s->f->d->facts.objective;
    int made = 1;
    if (objective == DUMP_VALUE || objective == DUMP_OTHER) return 0;
    if (seed_way_is_of_last(s->f->d, way) && s->f->d->accumulation == 1) return 0;
    if (seed_way_drops_zero(s->f->d, way) && !seeds_have_zero(s)) return 0;
    for (int64_t i = 0; i < s->f->count; i++)
        memset(s->of[i], 0, (size_t)(s->f->rows[i].tokens + 1) * sizeof **s->of);
    if (has_terms(&s->f->d->facts)) seeds_keep_weights(s, way);
    if (objective == DUMP_SFT)
        make_mean_seeds(s, way);
    else
        made = objective == DUMP_PPO ? make_ppo_seeds(s, way) : make_document_seeds(s, way);
    if (seeds_are_of_tokens(s->f->d)) seeds_weigh(s);
    return made && (way == SEEDS_RIGHT || seeds_are_finite(s));
}

/* Is the factor that of a mean divided by all tokens instead of the supervised ones? */
static inline int seeds_are_of_all_tokens(const seed_set *set, double factor, double limit) {
    const dump *d = set->f->d;
    double all = 0, supervised = 0;
    for (int64_t i = 0; i < set->f->count; i++) {
        all += (double)set->f->rows[i].tokens;
        for (int64_t t = 0; t < row_end(&set->f->rows[i]); t++)
            supervised += is_target(&set->f->rows[i], t);
    }
    return seeds_are_of_tokens(d) && d->facts.reduction == DUMP_BY_TOKEN && supervised < all &&
           fabs(factor * all / supervised - 1) <= limit;
}

/* How far the rounding of log-probs moves the pairs' slopes, relative to all slopes. */
static inline double preference_rounding(const document_seeds *b) {
    double off = 0, all = 0;
    for (int64_t i = 0; i < b->documents.count; i++) {
        double error = 0, x, slope;
        if (!document_begins_pair(&b->documents, i)) continue;
        for (int64_t k = i; k < i + 2; k++) {
            document_part whole = document_whole(&b->documents, k);
            double tokens = document_is_by_length(b) ? document_tokens(b, k, -1) : 1;
            error += (b->documents.of[k].rounding + sum_rounding(&whole)) / square(tokens);
        }
        error = sqrt(error);
        x = document_h(b, i, -1) - document_h(b, i + 1, -1);
        slope = preference_derivative(b->f, x, 0);
        off += square(fmax(fabs(preference_derivative(b->f, x + error, 0) - slope),
                           fabs(preference_derivative(b->f, x - error, 0) - slope)));
        all += square(slope);
    }
    return all > 0 ? sqrt(off / all) : 0;
}

/* beta times the error of h: the logarithm of sigmoid's slope changes by no more than its
   argument, and a pair has two documents. */
static inline double sigmoid_rounding(const document_seeds *b) {
    double worst = 0;
    for (int64_t i = 0; i < b->documents.count; i++) {
        document_part whole = document_whole(&b->documents, i);
        worst = fmax(worst, b->documents.of[i].rounding + sum_rounding(&whole));
    }
    return b->f->beta * sqrt(2 * worst);
}

/* The relative rounding error of DPO's or KTO's seeds. */
static inline double seeds_rounding(const seed_set *set) {
    document_seeds b = {.s = (seed_set *)set, .way = dpo_ways};
    const dump_facts *f = &set->f->d->facts;
    int is_sigmoid = f->objective == DUMP_KTO ||
                     (f->loss_type == DUMP_SIGMOID && f->label_smoothing == 0);
    double off = 0;
    if (f->objective != DUMP_DPO && f->objective != DUMP_KTO) return 0;
    if (!document_seeds_begin(&b))
        off = is_sigmoid ? sigmoid_rounding(&b) : preference_rounding(&b);
    document_seeds_end(&b);
    return off;
}

/* Does the mistake that was named last explain the factor already? */
static inline int seed_way_takes_factor(const verdict *v) {
    const char *name = v->count ? v->named[v->count - 1]->name : "";
    return !strcmp(name, "sum_of_means") || !strcmp(name, "local_count") ||
           !strcmp(name, "mean_of_non_empty_means");
}

/* Names the mistake. Its gradient times the factor is the dump's. */
static inline void seed_way_say(const seed_set *set, int way, double factor, double limit,
                                verdict *v) {
    const dump *d = set->f->d;
    const char *name = seed_way_name(d, way), *how = seed_way_how(d, way);
    if (seeds_are_of_tokens(d) && !strcmp(name, "mean_of_means"))
        name_mean_of_means((seed_set *)set, way, factor, limit, v);
    else
        verdict_name(v, mistake_named(name));
    if (!strcmp(name, "sigmoid_of_parts")) /* a loss of one rank only has the same gradient */
        verdict_name(v, mistake_named(d->facts.objective == DUMP_RM ? "scores_of_one_rank"
                                                                    : "log_probs_of_one_rank"));
    if (how) verdict_say(v, "%s: %s", name, how);
    if (fabs(factor - 1) > limit)
        verdict_say(v, "they are those of %s times %.6g", name, factor);
}
#endif
