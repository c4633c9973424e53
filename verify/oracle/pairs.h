/* SPDX-License-Identifier: MIT OR Unlicense */
/* pairs.h - DPO's loss from log-probs: documents 2i and 2i + 1 of a row are the chosen and the
 * rejected response, of which every rank may hold a part.
 *
 *     h = (chosen - ref_chosen) - (rejected - ref_rejected)      sums over all ranks
 *     L = mean over pairs of -log sigmoid(beta h) */
#ifndef ORACLE_PAIRS_H
#define ORACLE_PAIRS_H
#include "law.h"
#include "rows.h"

/* What each mistake computes in the place of L. */
typedef struct pair_ways {
    double right, parts, averaged, swapped, no_reference, by_length;
    double *alone; /* (sp) from the part of one rank */
    int64_t pairs;
    double largest; /* |h| */
} pair_ways;

typedef struct pair_part {
    double policy, reference, tokens;
} pair_part;

/* softplus(-beta h), without overflow */
static inline double pair_loss(double beta, double h) {
    double x = -beta * h;
    return (x > 0 ? x : 0) + log1p(exp(-fabs(x)));
}

static inline double pair_margin(const pair_part *chosen, const pair_part *rejected) {
    return chosen->policy - chosen->reference - (rejected->policy - rejected->reference);
}

static inline double part_mean(const pair_part *p) {
    return p->tokens > 0 ? (p->policy - p->reference) / p->tokens : 0;
}

/* One pair; part: (2 documents, sp ranks). */
static inline void add_pair(pair_ways *w, const pair_part *part, int64_t sp, double beta) {
    pair_part whole[2] = {{0}};
    double h;
    for (int64_t i = 0; i < 2 * sp; i++) {
        whole[i / sp].policy += part[i].policy;
        whole[i / sp].reference += part[i].reference;
        whole[i / sp].tokens += part[i].tokens;
    }
    h = pair_margin(&whole[0], &whole[1]);
    w->pairs++;
    w->right += pair_loss(beta, h);
    w->averaged += pair_loss(beta, h / (double)sp);
    w->swapped += pair_loss(beta, -h);
    w->no_reference += pair_loss(beta, whole[0].policy - whole[1].policy);
    w->by_length += pair_loss(beta, part_mean(&whole[0]) - part_mean(&whole[1]));
    for (int64_t r = 0; r < sp; r++) {
        double own = pair_loss(beta, pair_margin(&part[r], &part[sp + r]));
        w->parts += own / (double)sp;
        w->alone[r] += own;
    }
    if (!(fabs(h) <= w->largest)) w->largest = fabs(h);
}

/* All pairs of a row. 0, or -1: no memory. */
static inline int add_pairs(pair_ways *w, const dump_row *row, int64_t first_rank, int64_t sp,
                            double beta) {
    pair_part *part = (pair_part *)calloc((size_t)(2 * sp), sizeof *part);
    for (int64_t pair = 0; part && pair < row->docs / 2; pair++) {
        int64_t middle = row->cu_seqlens[2 * pair + 1];
        memset(part, 0, (size_t)(2 * sp) * sizeof *part);
        for (int64_t t = row->cu_seqlens[2 * pair]; t < row->cu_seqlens[2 * pair + 2]; t++) {
            pair_part *p;
            if (row->rank[t] < 0 || row->labels[t] == DUMP_IGNORE) continue;
            p = &part[(t >= middle) * sp + row->rank[t] - first_rank];
            p->policy += row->logp[t];
            p->reference += row->ref_logp[t];
            p->tokens++;
        }
        add_pair(w, part, sp, beta);
    }
    free(part);
    return part ? 0 : -1;
}

static inline void name_pair_mistakes(verdict *v, const law *l, const pair_ways *w,
                                      int64_t rank) {
    double n = (double)w->pairs;
    const struct {
        const char *name;
        double loss;
    } ways[] = {{"sigmoid_of_parts", w->parts / n},
                {"log_probs_averaged", w->averaged / n},
                {"pair_swapped", w->swapped / n},
                {"reference_missing", w->no_reference / n},
                {"log_probs_by_length", w->by_length / n}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        if (law_equal(l, l->got, ways[i].loss)) verdict_name(v, mistake_named(ways[i].name));
    if (law_equal(l, l->got, w->alone[rank] / n))
        verdict_name(v, mistake_named("log_probs_of_one_rank"));
}

/* Whether mistakes give the right number, too. */
static inline int pairs_are_vacuous(const law *l, const pair_ways *w) {
    return law_equal(l, w->averaged, w->right) || law_equal(l, w->parts, w->right) ||
           law_equal(l, w->swapped, w->right);
}

/* rank: of the sequence, whose number it is */
static inline void judge_pairs(verdict *v, double got, const pair_ways *w, int64_t sp,
                               int64_t rank, double tolerance) {
    law l = {.got = got, .tolerance = tolerance};
    double right = w->right / (double)w->pairs;
    memset(v, 0, sizeof *v);
    verdict_say(v, "got %.9g; %lld pairs give %.9g (tolerance %g)", got, (long long)w->pairs,
                right, tolerance);
    v->kind = law_equal(&l, got, right) ? VERDICT_RIGHT : VERDICT_WRONG;
    if (!isfinite(right)) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, "a log-prob is NaN or Inf already");
    } else if (v->kind == VERDICT_RIGHT && pairs_are_vacuous(&l, w)) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, sp == 1 ? "one rank has nothing to put together"
                               : "policy and reference are so close that other ways to put "
                                 "log-probs together give the same; dump a later step");
    }
    if (v->kind != VERDICT_WRONG) return;
    name_pair_mistakes(v, &l, w, rank);
    if (w->largest == 0)
        verdict_say(v, "policy and reference are equal in this dump, so the loss should be "
                       "ln 2: what was trained had other log-probs");
}
#endif
