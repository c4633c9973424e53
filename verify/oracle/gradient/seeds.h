/* SPDX-License-Identifier: MIT OR Unlicense */
/* seeds.h - seeds: dL/dlogp of every token, rightly and with mistakes in how losses are
 * combined. This file has what all objectives share, and means over tokens: in SFT a supervised
 * token's seed is -1 / N. Other objectives are in policy_seeds.h and document_seeds.h. */
#ifndef ORACLE_SEEDS_H
#define ORACLE_SEEDS_H
#include "oracle/reference/reference.h"

enum { SEEDS_RIGHT };

/* Rows of seeds for the reference's rows. */
typedef struct seed_set {
    const reference *f;
    double **of;                   /* (rows) each (tokens) */
    double **weights;              /* the same: minus each token's weight in the loss */
    double *const *logp;           /* (rows) of the policy; of RM, values */
    double *sums, *counts, *other; /* (most) scratch memory by group or document */
    int64_t most;                  /* of groups or documents */
} seed_set;

static inline void seed_set_close(seed_set *s) {
    for (int64_t i = 0; s->of && i < s->f->count; i++) free(s->of[i]);
    for (int64_t i = 0; s->weights && i < s->f->count; i++) free(s->weights[i]);
    free(s->of);
    free(s->weights);
    free(s->sums);
}

/* 0, or -1: no memory. logp: (rows), borrowed. */
static inline int seed_set_open(seed_set *s, double *const *logp) {
    const reference *f = s->f;
    int64_t documents = 0;
    s->logp = logp;
    s->of = (double **)calloc((size_t)f->count + 1, sizeof *s->of);
    s->weights = (double **)calloc((size_t)f->count + 1, sizeof *s->weights);
    for (int64_t i = 0; s->of && s->weights && i < f->count; i++) {
        documents += f->rows[i].docs + 1;
        s->of[i] = (double *)calloc((size_t)f->rows[i].tokens + 1, sizeof **s->of);
        s->weights[i] = (double *)calloc((size_t)f->rows[i].tokens + 1, sizeof **s->weights);
        if (!s->of[i] || !s->weights[i]) return -1;
    }
    s->most = documents * f->d->sp + f->d->world * f->d->accumulation;
    s->sums = (double *)calloc((size_t)(3 * s->most) + 1, sizeof *s->sums);
    s->counts = s->sums ? s->sums + s->most : NULL;
    s->other = s->sums ? s->counts + s->most : NULL;
    return s->of && s->weights && s->sums ? 0 : -1;
}

static inline int is_target(const dump_row *row, int64_t t) {
    return row->labels && row->labels[t] != DUMP_IGNORE;
}

/* Calls `visit` for every supervised token. */
typedef void (*token_visit)(seed_set *s, int64_t row, int64_t token, int which);
static inline void each_target(seed_set *s, token_visit visit, int which) {
    for (int64_t i = 0; i < s->f->count; i++)
        for (int64_t t = 0; t < row_end(&s->f->rows[i]); t++)
            if (is_target(&s->f->rows[i], t)) visit(s, i, t, which);
}

/* ---- groups of tokens ---- */

/* Beside the groupings of means.h: documents, a document's tokens on one rank, all tokens. */
enum { BY_DOCUMENT = GROUPINGS, BY_DOCUMENT_RANK, BY_ALL };

/* How many documents the rows before this one have. Each row counts one more, for the tokens
   after its last document. */
static inline int64_t documents_before(const seed_set *s, int64_t row) {
    int64_t count = 0;
    for (int64_t i = 0; i < row; i++) count += s->f->rows[i].docs + 1;
    return count;
}

static inline int64_t document_at(const dump_row *row, int64_t t) {
    int64_t low = 0, high = row->docs;
    while (low < high) {
        int64_t mid = (low + high) / 2;
        if (row->cu_seqlens[mid + 1] <= t)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static inline int64_t group_of(const seed_set *s, int64_t i, int64_t t, int grouping) {
    const dump *d = s->f->d;
    const dump_row *row = &s->f->rows[i];
    int64_t dp = i / d->accumulation, micro = i % d->accumulation, rank = row->rank[t];
    int64_t document = documents_before(s, i) + document_at(row, t);
    switch (grouping) {
    case BY_RANK_MICRO: return micro * d->world + rank;
    case BY_RANK: return rank;
    case BY_MICRO: return micro;
    case BY_REPLICA: return dp;
    case BY_REPLICA_MICRO: return i;
    case BY_DOCUMENT: return document;
    case BY_DOCUMENT_RANK: return document * d->sp + rank % d->sp;
    default: return 0;
    }
}

static inline int64_t groups_in(const seed_set *s, int grouping) {
    const dump *d = s->f->d;
    int64_t documents = documents_before(s, s->f->count);
    int64_t dp = d->world / d->sp;
    int64_t all[] = {d->world * d->accumulation, d->world,  d->accumulation,   dp,
                     dp * d->accumulation,       documents, documents * d->sp, 1};
    return all[grouping];
}

static inline void count_target(seed_set *s, int64_t row, int64_t token, int grouping) {
    s->counts[group_of(s, row, token, grouping)]++;
}

static inline void count_groups(seed_set *s, int grouping) {
    memset(s->counts, 0, (size_t)s->most * sizeof *s->counts);
    each_target(s, count_target, grouping);
}

static inline int64_t filled_groups(const seed_set *s) {
    int64_t filled = 0;
    for (int64_t g = 0; g < s->most; g++) filled += s->counts[g] > 0;
    return filled;
}

static inline void seed_by_count(seed_set *s, int64_t row, int64_t token, int grouping) {
    s->of[row][token] = -1 / s->counts[group_of(s, row, token, grouping)];
}

static inline void scale_seeds(seed_set *s, double factor) {
    for (int64_t i = 0; i < s->f->count; i++)
        for (int64_t t = 0; t < s->f->rows[i].tokens; t++) s->of[i][t] *= factor;
}

/* Seeds of a mean of groups' means; filled: groups without a token do not count. */
static inline void seed_means(seed_set *s, int grouping, int filled) {
    count_groups(s, grouping);
    each_target(s, seed_by_count, grouping);
    scale_seeds(s, 1 / (double)(filled ? filled_groups(s) : groups_in(s, grouping)));
}

/* Micro-batches other than the last are lost. */
static inline void keep_last_micro_batch(seed_set *s) {
    int64_t accumulation = s->f->d->accumulation;
    for (int64_t i = 0; i < s->f->count; i++)
        if (i % accumulation != accumulation - 1)
            memset(s->of[i], 0, (size_t)s->f->rows[i].tokens * sizeof **s->of);
}

/* Ways to weight tokens in a mean; the one without a name is right. */
typedef struct mean_way {
    const char *name;
    int grouping, filled, last; /* last: only the last micro-batch counts */
    int zero;                   /* targets of id 0 are left out */
} mean_way;
static const mean_way mean_ways[] = {{NULL, BY_ALL, 1, 0, 0},
                                     {"mean_of_means", BY_RANK_MICRO, 0, 0, 0},
                                     {"mean_of_means", BY_RANK, 0, 0, 0},
                                     {"mean_of_means", BY_MICRO, 0, 0, 0},
                                     {"mean_of_means", BY_REPLICA, 0, 0, 0},
                                     {"mean_of_means", BY_REPLICA_MICRO, 0, 0, 0},
                                     {"mean_over_sequences", BY_DOCUMENT, 1, 0, 0},
                                     {"sequence_counts_local", BY_DOCUMENT_RANK, 1, 0, 0},
                                     {"micro_batches_lost", BY_ALL, 1, 1, 0},
                                     {"token_zero_ignored", BY_ALL, 1, 0, 1}};
enum { MEAN_WAYS = sizeof mean_ways / sizeof *mean_ways };

/* The grouping of the right mean, by the metadata's reduction. */
static inline int right_grouping(const dump *d) {
    static const int groupings[] = {BY_ALL, BY_DOCUMENT, BY_ALL, BY_REPLICA_MICRO, BY_REPLICA};
    return groupings[d->facts.reduction];
}

/* The metadata define the right grouping. The way with that grouping is then no mistake: in its
   place stands the mean over all tokens. */
static inline int mean_grouping(const dump *d, int way) {
    int grouping = mean_ways[way].grouping, right = right_grouping(d);
    return grouping == BY_ALL ? right : grouping == right ? BY_ALL : grouping;
}

static inline const char *mean_way_name(const dump *d, int way) {
    int turned = mean_ways[way].grouping == right_grouping(d) && right_grouping(d) != BY_ALL;
    return turned ? "mean_over_tokens" : mean_ways[way].name;
}

static inline void drop_zero(seed_set *s, int64_t row, int64_t token, int way) {
    if (s->f->rows[row].labels[token] == 0) s->of[row][token] = 0;
    (void)way;
}

/* Minus the token's weight in the mean: the seeds of SFT. */
static inline void make_mean_seeds(seed_set *s, int way) {
    const dump_facts *f = &s->f->d->facts;
    int of_all = mean_ways[way].grouping == BY_ALL;
    int by_groups = of_all && right_grouping(s->f->d) < BY_DOCUMENT; /* empty groups count */
    seed_means(s, mean_grouping(s->f->d, way), mean_ways[way].filled && !by_groups);
    if (f->reduction == DUMP_BY_CONSTANT && of_all)
        scale_seeds(s, s->counts[0] / f->reduction_constant);
    if (mean_ways[way].last) keep_last_micro_batch(s);
    if (mean_ways[way].zero) each_target(s, drop_zero, way);
}

/* The gradient is a mean of means times a factor. The factor tells how the means were combined,
   and so the mistake's name. */
static inline void name_mean_of_means(seed_set *s, int way, double factor, double limit,
                                      verdict *v) {
    double groups, filled;
    count_groups(s, mean_grouping(s->f->d, way));
    groups = (double)groups_in(s, mean_grouping(s->f->d, way));
    filled = (double)filled_groups(s);
    if (fabs(factor / groups - 1) <= limit && groups > 1) {
        verdict_name(v, mistake_named("sum_of_means"));
        if (mean_ways[way].grouping <= BY_RANK) verdict_name(v, mistake_named("local_count"));
    } else if (filled < groups && fabs(factor * filled / groups - 1) <= limit)
        verdict_name(v, mistake_named("mean_of_non_empty_means"));
    else
        verdict_name(v, mistake_named("mean_of_means"));
}
#endif
