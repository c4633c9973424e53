/* SPDX-License-Identifier: MIT OR Unlicense */
/* counts.h - each rank's sum of a micro-batch's losses, and its divisor of this sum before the
 * backward pass. The right divisor is the step's count of supervised tokens. All ranks may
 * share a factor, as the reduction of gradients may undo it. */
#ifndef ORACLE_COUNTS_H
#define ORACLE_COUNTS_H
#include <math.h>
#include <stdint.h>
#include "oracle/verdict/stages.h"

/* A grouping has one bit per dimension: member, replica, micro-batch. A set bit keeps one count
   for each index of its dimension; counts are summed over the other dimensions. */
enum { APART_MEMBER = 1, APART_REPLICA = 2, APART_MICRO = 4, APARTS = 8 };
static const char *const apart_texts[APARTS] = {
    "the count of the whole step",
    "the count of each member of a sequence, over all replicas and micro-batches",
    "the count of each replica",
    "the count of each rank, over its micro-batches",
    "the count of each micro-batch, over all ranks",
    "the count of each member and micro-batch, over all replicas",
    "the count of each replica's micro-batch",
    "the count of each rank's micro-batch"};

/* Numbers of one rank's micro-batch. */
typedef struct count_cell {
    double labels, tokens, sum; /* from index, labels and logp; sum NaN: no log-probs */
    double size;                /* sum of absolute losses, for the rounding limit */
    double got_count, got_sum;  /* loss_count and loss_sum of the dump */
    int has_count, has_sum;
} count_cell;

typedef struct step_counts {
    count_cell *cell;      /* (world, accumulation); NULL: no memory, or not judged */
    double *group, *sizes; /* (world * accumulation), by counts_group */
    int64_t sp, dp, accumulation, cells;
    double unit; /* relative rounding of log-probs */
} step_counts;

static inline int is_about(double x, double want) {
    return fabs(x - want) <= 1e-6 * fabs(want);
}

static inline void counts_begin(step_counts *c, const dump_facts *f) {
    memset(c, 0, sizeof *c);
    c->sp = f->sp;
    c->dp = f->world / f->sp;
    c->accumulation = f->accumulation;
    c->cells = f->world * f->accumulation;
    if (f->objective != DUMP_SFT || f->reduction != DUMP_BY_TOKEN) return;
    c->cell = (count_cell *)calloc((size_t)c->cells, sizeof *c->cell);
    c->group = (double *)calloc((size_t)c->cells, sizeof *c->group);
    c->sizes = (double *)calloc((size_t)c->cells, sizeof *c->sizes);
}

static inline void counts_free(step_counts *c) {
    free(c->cell);
    free(c->group);
    free(c->sizes);
}

/* ---- what the dump has ---- */

/* Reads a rank's number. Returns whether the dump has its tensor. */
static inline int counts_read(dump *d, int64_t rank, int64_t micro, const char *what,
                              double *to) {
    const seqpar_safetensors_tensor *t = dump_find(d, rank, micro, what);
    double *x;
    if (!t) return 0;
    if (t->count != 1) {
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor %s has %lld elements; write one number, that of this rank "
                    "in this micro-batch",
                    d->ranks[rank].path, t->name, (long long)t->count);
        return 0;
    }
    x = (double *)dump_as_numbers_of_any(d, rank, t);
    if (x) *to = x[0];
    free(x);
    return 1;
}

static inline void counts_add_token(step_counts *c, const dump_row *row, int64_t t,
                                    int64_t micro) {
    count_cell *cell = &c->cell[row->rank[t] * c->accumulation + micro];
    cell->tokens++;
    if (!row_supervised(row, t)) return;
    cell->labels++;
    cell->sum -= row->logp ? row->logp[t] : NAN;
    cell->size += row->logp ? fabs(row->logp[t]) : 0;
}

/* 0, or -1 with d->error. */
static inline int counts_add_row(step_counts *c, dump *d, const dump_row *row, int64_t dp,
                                 int64_t micro) {
    if (!c->cell || !row->rank || !row->labels) return 0;
    for (int64_t r = dp * c->sp; r < (dp + 1) * c->sp; r++) {
        count_cell *cell = &c->cell[r * c->accumulation + micro];
        cell->has_count = counts_read(d, r, micro, "loss_count", &cell->got_count);
        cell->has_sum = counts_read(d, r, micro, "loss_sum", &cell->got_sum);
    }
    for (int64_t t = 0; t < row->tokens; t++)
        if (row->rank[t] >= 0) counts_add_token(c, row, t, micro);
    c->unit = fmax(c->unit, row->unit.logp);
    return d->error.status ? -1 : 0;
}

/* ---- sums over groups ---- */

static inline int64_t counts_group(const step_counts *c, int64_t i, int apart) {
    int64_t rank = i / c->accumulation, micro = i % c->accumulation;
    int64_t member = apart & APART_MEMBER ? rank % c->sp : 0;
    int64_t replica = apart & APART_REPLICA ? rank / c->sp : 0;
    return ((apart & APART_MICRO ? micro : 0) * c->dp + replica) * c->sp + member;
}

static inline double count_field(const count_cell *cell, size_t field) {
    double x;
    memcpy(&x, (const char *)cell + field, sizeof x);
    return x;
}

/* field: offset of a double in count_cell. to: its sums, indexed by counts_group. */
static inline void counts_sum(const step_counts *c, double *to, int apart, size_t field) {
    memset(to, 0, (size_t)c->cells * sizeof *to);
    for (int64_t i = 0; i < c->cells; i++)
        to[counts_group(c, i, apart)] += count_field(&c->cell[i], field);
}

/* Whether each set bit splits the counts: the bit of a dimension of size 1 does not. */
static inline int apart_exists(const step_counts *c, int apart) {
    return !((apart & APART_MEMBER && c->sp == 1) || (apart & APART_REPLICA && c->dp == 1) ||
             (apart & APART_MICRO && c->accumulation == 1));
}

/* ---- divisors ---- */

/* Whether k is a product of powers -1, 0 or 1 of sp, dp and accumulation, which a reduction may
   undo. */
static inline int counts_is_factor(const step_counts *c, double k) {
    for (int n = 0; n < 27; n++)
        if (is_about(k, pow((double)c->sp, n % 3 - 1) * pow((double)c->dp, n / 3 % 3 - 1) *
                            pow((double)c->accumulation, n / 9 - 1)))
            return 1;
    return 0;
}

/* Whether every divisor is *factor times its group's sum, with one factor for all. A group with
   sum 0 has no loss, so its divisor is not checked. */
static inline int counts_fit(step_counts *c, int apart, size_t field, double *factor) {
    int begun = 0;
    *factor = 0;
    counts_sum(c, c->group, apart, field);
    for (int64_t i = 0; i < c->cells; i++) {
        double want = c->group[counts_group(c, i, apart)], got = c->cell[i].got_count;
        if (want == 0) continue;
        if (!begun++) *factor = got / want;
        if (!is_about(got, *factor * want)) return 0;
    }
    return counts_is_factor(c, *factor);
}

static inline void counts_say_first(step_counts *c, double factor, verdict *v) {
    counts_sum(c, c->group, 0, offsetof(count_cell, labels));
    for (int64_t i = 0; i < c->cells; i++) {
        if (is_about(c->cell[i].got_count, factor * c->group[0])) continue;
        verdict_say(v,
                    "first at rank %lld, micro-batch %lld: %.9g, and the step has %.9g "
                    "supervised tokens",
                    (long long)(i / c->accumulation), (long long)(i % c->accumulation),
                    c->cell[i].got_count, c->group[0]);
        return;
    }
}

/* Reports the right divisor: INSUFFICIENT if a wrong divisor has the same value, or if no wrong
   one is possible. */
static inline void counts_show(step_counts *c, verdict *v, double factor) {
    const char *same = NULL;
    int others = 0;
    double other;
    for (int apart = 1; apart < APARTS; apart++) {
        if (!apart_exists(c, apart)) continue;
        others++;
        if (counts_fit(c, apart, offsetof(count_cell, labels), &other))
            same = apart_texts[apart];
    }
    if (counts_fit(c, 0, offsetof(count_cell, tokens), &other) && is_about(other, 1) &&
        !is_about(factor, 1))
        same = "the number of all tokens";
    counts_sum(c, c->group, 0, offsetof(count_cell, labels));
    v->kind = others && !same ? VERDICT_RIGHT : VERDICT_INSUFFICIENT;
    verdict_say(v, "all divide by %.9g, %s%.9g supervised tokens of the step",
                factor * c->group[0], is_about(factor, 1) ? "the " : "a multiple of the ",
                c->group[0]);
    if (same)
        verdict_say(v,
                    "%s is the same here; give a step whose ranks and "
                    "micro-batches have unequal counts",
                    same);
    if (!others) verdict_say(v, "one rank and one micro-batch have no other count");
}

/* Whether ranks divide by the sums of this field in these groups. If so, names the mistake. */
static inline int counts_name(step_counts *c, int apart, size_t field, const char *name,
                              verdict *v) {
    double factor;
    if (!counts_fit(c, apart, field, &factor)) return 0;
    verdict_name(v, mistake_named(name));
    verdict_say(v, "they divide by %s, %s", apart_texts[apart],
                field == offsetof(count_cell, labels) ? "supervised" : "of all tokens");
    return 1;
}

static inline void counts_judge(step_counts *c, verdict *v) {
    double factor;
    if (counts_fit(c, 0, offsetof(count_cell, labels), &factor)) {
        counts_show(c, v, factor);
        return;
    }
    v->kind = VERDICT_WRONG;
    for (int apart = 0; apart < APARTS && !v->count; apart++)
        if (apart_exists(c, apart) &&
            !counts_name(c, apart, offsetof(count_cell, labels), "mean_of_means", v))
            counts_name(c, apart, offsetof(count_cell, tokens), "all_tokens_counted", v);
    counts_say_first(c, 1, v);
}

/* ---- sums ---- */

/* Whether each reported sum is that of its group; *first: the first cell where it is not. */
static inline int sums_fit(step_counts *c, int apart, int64_t *first) {
    counts_sum(c, c->group, apart, offsetof(count_cell, sum));
    counts_sum(c, c->sizes, apart, offsetof(count_cell, size));
    for (*first = 0; *first < c->cells; ++*first) {
        int64_t group = counts_group(c, *first, apart);
        double limit = c->sizes[group] * (c->unit + 0x1p-20);
        if (!(fabs(c->cell[*first].got_sum - c->group[group]) <= limit)) return 0;
    }
    return 1;
}

static inline void sums_judge(step_counts *c, verdict *v) {
    int64_t first = 0, other;
    if (sums_fit(c, APARTS - 1, &first)) {
        verdict_say(v, "each sum of losses is that of the rank's own tokens");
        return;
    }
    for (int apart = 0; apart + 1 < APARTS; apart++)
        if (apart_exists(c, apart) && sums_fit(c, apart, &other)) {
            verdict_say(v, "sums of losses go with %s", apart_texts[apart]);
            return;
        }
    v->kind = VERDICT_WRONG;
    v->count = 0;
    verdict_say(v,
                "first at rank %lld, micro-batch %lld: the sum of losses is %.9g, log-probs "
                "of its tokens give %.9g",
                (long long)(first / c->accumulation), (long long)(first % c->accumulation),
                c->cell[first].got_sum, c->cell[first].sum);
}

/* has: offset of has_count or has_sum. Returns the number of cells with it; *lacks: the first
   cell without it, -1: none. */
static inline int64_t counts_having(const step_counts *c, size_t has, int64_t *lacks) {
    int64_t have = 0;
    *lacks = -1;
    for (int64_t i = 0; i < c->cells; i++) {
        int one;
        memcpy(&one, (const char *)&c->cell[i] + has, sizeof one);
        have += one;
        if (!one && *lacks < 0) *lacks = i;
    }
    return have;
}

static inline void counts_say_lacks(const step_counts *c, int64_t at, const char *what,
                                    verdict *v) {
    v->kind = VERDICT_INSUFFICIENT;
    verdict_say(v, "rank %lld has no %lld.%s; write it on all ranks, of all micro-batches",
                (long long)(at / c->accumulation), (long long)(at % c->accumulation), what);
}

/* The ranks' divisor over the step's count of supervised tokens. 0: unknown, for example where
   a rank's sum covers more than its own tokens. */
static inline double counts_divisor(const stage *s, step_counts *c, int has_counts,
                                    int has_sums) {
    double factor;
    int64_t first;
    if (!has_counts || s->v.kind == VERDICT_WRONG) return 0;
    if (!counts_fit(c, 0, offsetof(count_cell, labels), &factor)) return 0;
    return has_sums && !sums_fit(c, APARTS - 1, &first) ? 0 : factor;
}

/* Judges stage COUNTS after all rows are added. Returns counts_divisor; 0 if not judged. */
static inline double check_divisors(stage *s, step_counts *c) {
    int64_t no_count, no_sum, counts, sums;
    int logp = 1;
    if (!c->cell || !c->group || !c->sizes) return 0;
    counts = counts_having(c, offsetof(count_cell, has_count), &no_count);
    sums = counts_having(c, offsetof(count_cell, has_sum), &no_sum);
    for (int64_t i = 0; i < c->cells; i++) logp = logp && !isnan(c->cell[i].sum);
    if (!counts && !(sums && logp)) return 0;
    stage_begin(s, VERDICT_RIGHT);
    if (counts && no_count >= 0) counts_say_lacks(c, no_count, "loss_count", &s->v);
    if (counts && no_count < 0) counts_judge(c, &s->v);
    if (sums && logp && s->v.kind != VERDICT_WRONG) {
        if (no_sum >= 0)
            counts_say_lacks(c, no_sum, "loss_sum", &s->v);
        else
            sums_judge(c, &s->v);
    }
    return counts_divisor(s, c, (counts && no_count < 0), (sums > 0));
}
#endif
