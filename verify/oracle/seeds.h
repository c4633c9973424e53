/* SPDX-License-Identifier: MIT OR Unlicense */
/* seeds.h - dL/dlogp of every token: the right one, and what it becomes where losses are put
 * together wrongly. SFT: -1 / N of a supervised token. DPO: beta sigmoid(-beta h) / pairs of a
 * rejected response's tokens, and its negative of a chosen one's. */
#ifndef ORACLE_SEEDS_H
#define ORACLE_SEEDS_H
#include "reference.h"

enum { SEEDS_RIGHT };

/* Rows of seeds for the reference's rows. */
typedef struct seed_set {
    const reference *f;
    double **of;              /* (rows) each (tokens) */
    double *const *logp;      /* (rows) of the policy, as the reference has them */
    double *sums, *counts, *other; /* room by group or document */
    int64_t most;             /* of groups or documents */
} seed_set;

static inline void seed_set_close(seed_set *s) {
    for (int64_t i = 0; s->of && i < s->f->count; i++) free(s->of[i]);
    free(s->of);
    free(s->sums);
}

/* 0, or -1: no memory. logp: (rows), borrowed. */
static inline int seed_set_open(seed_set *s, double *const *logp) {
    const reference *f = s->f;
    int64_t documents = 0;
    s->logp = logp;
    s->of = (double **)calloc((size_t)f->count + 1, sizeof *s->of);
    for (int64_t i = 0; s->of && i < f->count; i++) {
        documents += f->rows[i].docs + 1;
        s->of[i] = (double *)calloc((size_t)f->rows[i].tokens + 1, sizeof **s->of);
        if (!s->of[i]) return -1;
    }
    s->most = documents * f->d->sp + f->d->world * f->d->accumulation;
    s->sums = (double *)calloc((size_t)(3 * s->most) + 1, sizeof *s->sums);
    s->counts = s->sums ? s->sums + s->most : NULL;
    s->other = s->sums ? s->counts + s->most : NULL;
    return s->of && s->sums ? 0 : -1;
}

static inline int is_target(const dump_row *row, int64_t t) {
    return row->labels[t] != DUMP_IGNORE;
}

/* Calls `visit` for every supervised token. */
typedef void (*token_visit)(seed_set *s, int64_t row, int64_t token, int which);
static inline void each_target(seed_set *s, token_visit visit, int which) {
    for (int64_t i = 0; i < s->f->count; i++)
        for (int64_t t = 0; t < row_end(&s->f->rows[i]); t++)
            if (is_target(&s->f->rows[i], t)) visit(s, i, t, which);
}

/* ---- groups of tokens ---- */

/* By the groupings of checks.h, or documents, or a document's tokens on one rank. */
enum { BY_DOCUMENT = GROUPINGS, BY_DOCUMENT_RANK, BY_ALL };

/* Documents of rows before this one, one more than there are for what follows the last. */
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
    int64_t all[] = {d->world * d->accumulation, d->world,         d->accumulation, dp,
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

/* The mean over groups of their tokens' means; filled: over those that have a token. */
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

static const struct {
    const char *name;
    int grouping, filled, last;
} sft_seeds[] = {{NULL, BY_ALL, 1, 0},
                 {"mean_of_means", BY_RANK_MICRO, 0, 0},
                 {"mean_of_means", BY_RANK, 0, 0},
                 {"mean_of_means", BY_MICRO, 0, 0},
                 {"mean_of_means", BY_REPLICA, 0, 0},
                 {"mean_of_means", BY_REPLICA_MICRO, 0, 0},
                 {"mean_over_sequences", BY_DOCUMENT, 1, 0},
                 {"sequence_counts_local", BY_DOCUMENT_RANK, 1, 0},
                 {"micro_batches_lost", BY_ALL, 1, 1}};
enum { SFT_SEEDS = sizeof sft_seeds / sizeof *sft_seeds };

/* Over which groups' means the right mean is. */
static inline int right_grouping(const dump *d) {
    static const int groupings[] = {BY_ALL, BY_DOCUMENT, BY_ALL, BY_REPLICA_MICRO, BY_REPLICA};
    return groupings[d->facts.reduction];
}

static inline void make_sft_seeds(seed_set *s, int way) {
    const dump_facts *f = &s->f->d->facts;
    int right = right_grouping(s->f->d), grouping = sft_seeds[way].grouping;
    int filled = sft_seeds[way].filled;
    if (grouping == BY_ALL) {
        grouping = right;
        filled = right < BY_DOCUMENT ? 0 : filled;
    } else if (grouping == right) {
        grouping = BY_ALL;
    }
    seed_means(s, grouping, filled);
    if (f->reduction == DUMP_BY_CONSTANT && sft_seeds[way].grouping == BY_ALL)
        scale_seeds(s, s->counts[0] / f->reduction_constant);
    if (sft_seeds[way].last) keep_last_micro_batch(s);
}

/* ---- pairs ---- */

enum { PAIRS_RIGHT, PAIRS_OF_PARTS, PAIRS_AVERAGED, PAIRS_WITHOUT_REFERENCE, PAIRS_SWAPPED };
static const struct {
    const char *name;
    int how, last;
} dpo_seeds[] = {{NULL, PAIRS_RIGHT, 0},
                 {"sigmoid_of_parts", PAIRS_OF_PARTS, 0},
                 {"log_probs_averaged", PAIRS_AVERAGED, 0},
                 {"reference_missing", PAIRS_WITHOUT_REFERENCE, 0},
                 {"pair_swapped", PAIRS_SWAPPED, 0},
                 {"micro_batches_lost", PAIRS_RIGHT, 1}};
enum { DPO_SEEDS = sizeof dpo_seeds / sizeof *dpo_seeds };

/* Sums of policy - reference by document, or by what a rank has of one. */
static inline void add_to_document(seed_set *s, int64_t i, int64_t t, int how) {
    int grouping = how == PAIRS_OF_PARTS ? BY_DOCUMENT_RANK : BY_DOCUMENT;
    double reference = how == PAIRS_WITHOUT_REFERENCE ? 0 : s->f->rows[i].ref_logp[t];
    s->sums[group_of(s, i, t, grouping)] += s->logp[i][t] - reference;
}

static inline void seed_pair(seed_set *s, int64_t i, int64_t t, int how) {
    int grouping = how == PAIRS_OF_PARTS ? BY_DOCUMENT_RANK : BY_DOCUMENT;
    int64_t sp = s->f->d->sp, step = how == PAIRS_OF_PARTS ? sp : 1;
    int64_t own = group_of(s, i, t, grouping);
    int rejected = (int)(document_at(&s->f->rows[i], t) % 2);
    int64_t other = own + (rejected ? -step : step);
    double h = rejected ? s->sums[other] - s->sums[own] : s->sums[own] - s->sums[other];
    double beta = s->f->d->facts.beta, x;
    if (how == PAIRS_SWAPPED) h = -h;
    x = beta * h / (how == PAIRS_AVERAGED ? (double)sp : 1);
    s->of[i][t] = beta / (1 + exp(x)) * (rejected != (how == PAIRS_SWAPPED) ? 1 : -1);
}

static inline int pairs_are_known(const seed_set *s, double *pairs) {
    *pairs = 0;
    for (int64_t i = 0; i < s->f->count; i++) {
        const dump_row *row = &s->f->rows[i];
        if (!row->ref_logp || row->docs % 2 || !row->docs) return 0;
        *pairs += (double)(row->docs / 2);
    }
    return *pairs > 0;
}

static inline int make_dpo_seeds(seed_set *s, int way) {
    const dump_facts *f = &s->f->d->facts;
    double pairs;
    if (f->loss_type != DUMP_SIGMOID || f->label_smoothing > 0) return 0;
    if (!pairs_are_known(s, &pairs)) return 0;
    memset(s->sums, 0, (size_t)s->most * sizeof *s->sums);
    each_target(s, add_to_document, dpo_seeds[way].how);
    each_target(s, seed_pair, dpo_seeds[way].how);
    scale_seeds(s, 1 / pairs);
    if (dpo_seeds[way].last) keep_last_micro_batch(s);
    return 1;
}

/* ---- any objective ---- */

static inline int seed_ways(const dump *d) {
    return d->facts.objective == DUMP_SFT ? SFT_SEEDS
           : d->facts.objective == DUMP_DPO ? DPO_SEEDS
                                            : 1;
}

static inline const char *seed_way_name(const dump *d, int way) {
    if (d->facts.objective == DUMP_DPO) return dpo_seeds[way].name;
    return way && sft_seeds[way].grouping == right_grouping(d) && !sft_seeds[way].last
               ? "mean_over_tokens"
               : sft_seeds[way].name;
}

/* Into s->of. 0: the dump lacks something, or there is nothing of the kind: the right way, a
   last micro-batch of one. */
static inline int seed_set_make(const seed_set *set, int way) {
    seed_set *s = (seed_set *)set;
    int dpo = s->f->d->facts.objective == DUMP_DPO;
    int last = dpo ? dpo_seeds[way].last : sft_seeds[way].last;
    if (last && s->f->d->accumulation == 1) return 0;
    if (s->f->d->facts.objective > DUMP_DPO) return 0;
    for (int64_t i = 0; i < s->f->count; i++)
        memset(s->of[i], 0, (size_t)(s->f->rows[i].tokens + 1) * sizeof **s->of);
    if (dpo) return make_dpo_seeds(s, way);
    make_sft_seeds(s, way);
    return 1;
}
#endif
