/* SPDX-License-Identifier: MIT OR Unlicense */
/* pairs.h - the losses of pairs: documents 2i and 2i + 1 of a row are the chosen and the
 * rejected response, of which every rank may hold a part.
 *
 *     DPO   h = (chosen - ref_chosen) - (rejected - ref_rejected)      sums over all ranks
 *           L = mean over pairs of -log sigmoid(beta h)
 *     RM    L = mean over pairs of -log sigmoid(score of chosen - score of rejected) */
#ifndef ORACLE_PAIRS_H
#define ORACLE_PAIRS_H
#include "documents.h"
#include "means.h"

/* Sums over pairs of what each mistake computes in the place of L. */
typedef struct pair_ways {
    double right, parts, averaged, added, swapped, no_reference, by_length, gathered;
    double without_zeros, zero_labels; /* targets with id 0 left out; how many there are */
    double from[SOURCES];  /* ref_logp from elsewhere */
    double values[SCORES]; /* RM whose scores are not told */
    double *alone;         /* (sp) from the part of one rank */
    int64_t pairs;
    double largest, rounding; /* |h|; squares of what rounding may do to right */
} pair_ways;

/* softplus(-x), without overflow */
static inline double pair_loss(double x) {
    return isnan(x) ? x : (x < 0 ? -x : 0) + log1p(exp(-fabs(x)));
}

static inline double pair_slope(double x) { return 1 / (1 + exp(x)); } /* sigmoid(-x) */

static inline double part_margin(const document_part *p) { return p->policy - p->reference; }

static inline double part_mean(const document_part *p) {
    return p->tokens > 0 ? part_margin(p) / p->tokens : 0;
}

/* Adding up thousands of log-probs in fp32 rounds, too. */
static inline double sum_rounding(const document_part *p) {
    return square(0x1p-22 * p->policy) + square(0x1p-22 * p->reference);
}

/* ---- DPO ---- */

static inline void add_pair_parts(pair_ways *w, const step_documents *s, int64_t i,
                                  double beta) {
    const document_part *chosen = &s->part[i * s->sp], *rejected = chosen + s->sp;
    for (int64_t r = 0; r < s->sp; r++) {
        double own = pair_loss(beta * (part_margin(&chosen[r]) - part_margin(&rejected[r])));
        w->parts += own / (double)s->sp;
        w->alone[r] += own;
    }
}

/* Returns the loss of the pair that begins with document i. */
static inline double add_pair(pair_ways *w, const step_documents *s, int64_t i, double beta) {
    const document *chosen = &s->of[i], *rejected = chosen + 1;
    document_part c = document_whole(s, i), r = document_whole(s, i + 1);
    double h = part_margin(&c) - part_margin(&r), policy = c.policy - r.policy;
    w->pairs++;
    w->right += pair_loss(beta * h);
    w->averaged += pair_loss(beta * h / (double)s->sp);
    w->added += pair_loss(beta * h * (double)s->sp);
    w->swapped += pair_loss(-beta * h);
    w->no_reference += pair_loss(beta * policy);
    w->by_length += pair_loss(beta * (part_mean(&c) - part_mean(&r)));
    w->gathered += pair_loss(beta * (chosen->policy_gathered - chosen->reference_gathered -
                                     rejected->policy_gathered + rejected->reference_gathered));
    w->without_zeros += pair_loss(beta * (h - chosen->zeros + rejected->zeros));
    w->zero_labels += chosen->zero_labels + rejected->zero_labels;
    for (int k = 0; k < SOURCES; k++)
        w->from[k] += pair_loss(beta * (policy - chosen->reference_from[k] +
                                        rejected->reference_from[k]));
    add_pair_parts(w, s, i, beta);
    if (!(fabs(h) <= w->largest)) w->largest = fabs(h);
    w->rounding += square(beta * pair_slope(beta * h)) *
                   (chosen->rounding + rejected->rounding + sum_rounding(&c) +
                    sum_rounding(&r));
    return pair_loss(beta * h);
}

static inline const char *pairs_vacuous(const answers *a, const law *l, int64_t sp) {
    if (sp == 1) return "one rank has nothing to put together";
    return answers_show(a, l, "log_probs_averaged") &&
                   answers_show(a, l, "sigmoid_of_parts") && answers_show(a, l, "pair_swapped")
               ? NULL
               : "policy and reference are so close that other ways to put log-probs together "
                 "give the same; dump a later step";
}

static inline void pairs_begin_answers(const pair_ways *w, answers *a, law *l, int low) {
    double n = (double)w->pairs;
    memset(a, 0, sizeof *a);
    a->right = w->right / n;
    a->slack = l->slack = 4 * sqrt(w->rounding) / n;
    a->low_precision = low;
    snprintf(a->what, sizeof a->what, "%lld pairs", (long long)w->pairs);
}

static inline void dpo_answers(const pair_ways *w, answers *a, law *l, const dump_facts *f,
                               const step_documents *s) {
    double n = (double)w->pairs, several = f->sp > 1 ? n : NAN;
    pairs_begin_answers(w, a, l, s->unit.logp > 1e-6);
    answers_add(a, "sigmoid_of_parts", w->parts / several, NULL);
    answers_add(a, "log_probs_averaged", w->averaged / several, NULL);
    answers_add(a, "log_probs_added", w->added / several, NULL);
    answers_add(a, "pair_swapped", w->swapped / n, NULL);
    answers_add(a, "reference_missing", w->no_reference / n, NULL);
    answers_add(a, "log_probs_by_length", w->by_length / n, NULL);
    answers_add(a, "gathered_in_rank_order", w->gathered / n, NULL);
    if (w->zero_labels > 0) answers_add(a, "token_zero_ignored", w->without_zeros / n, NULL);
    for (int k = 0; k < SOURCES; k++)
        answers_add(a, "side_tensor_not_split", w->from[k] / n,
                    token_ways[TOKEN_REFERENCE + k].how);
    a->vacuous = pairs_vacuous(a, l, f->sp);
    if (w->largest == 0)
        a->hint = "policy and reference are equal in this dump, so the loss should be ln 2: "
                  "what was trained had other log-probs";
}

/* ---- RM ---- */

/* What is taken for a document's score: the dump's, or the value at its last token. */
static inline double document_score(const step_documents *s, int64_t i) {
    return s->has_scores ? s->of[i].score : s->of[i].values[SCORE_RIGHT];
}

static inline double owned_score(const step_documents *s, int64_t i, int64_t member) {
    const document *o = &s->of[i];
    return o->last_rank == o->dp * s->sp + member ? document_score(s, i) : 0;
}

static inline double add_score_pair(pair_ways *w, const step_documents *s, int64_t i) {
    double chosen = document_score(s, i), rejected = document_score(s, i + 1);
    double h = chosen - rejected;
    double unit = s->has_scores ? s->unit.scores : s->unit.values;
    w->pairs++;
    w->right += pair_loss(h);
    w->averaged += pair_loss(h / (double)s->sp);
    w->added += pair_loss(h * (double)s->sp);
    w->swapped += pair_loss(-h);
    for (int k = 0; k < SCORES; k++)
        w->values[k] += pair_loss(s->of[i].values[k] - s->of[i + 1].values[k]);
    for (int64_t r = 0; r < s->sp; r++) {
        double own = pair_loss(owned_score(s, i, r) - owned_score(s, i + 1, r));
        w->parts += own / (double)s->sp;
        w->alone[r] += own;
    }
    if (!(fabs(h) <= w->largest)) w->largest = fabs(h);
    w->rounding += square(pair_slope(h) * unit) * (square(chosen) + square(rejected));
    return pair_loss(h);
}

static const char *const score_names[SCORES] = {
    NULL, "score_of_rank_end", "score_of_first_token", "score_of_row_end", "score_of_row_end",
    "score_of_padding", "gathered_in_rank_order"};

static inline void rm_answers(const pair_ways *w, answers *a, law *l, const dump_facts *f,
                              const step_documents *s) {
    double n = (double)w->pairs, several = f->sp > 1 ? n : NAN;
    double unit = s->has_scores ? s->unit.scores : s->unit.values;
    pairs_begin_answers(w, a, l, unit > 1e-6);
    answers_add(a, "pair_swapped", w->swapped / n, NULL);
    answers_add(a, "scores_averaged", w->averaged / several, NULL);
    answers_add(a, "scores_added", w->added / several, NULL);
    answers_add(a, "sigmoid_of_parts", w->parts / several, NULL);
    for (int k = SCORE_RIGHT + 1; k < SCORES && !s->has_scores; k++)
        answers_add(a, score_names[k], w->values[k] / n, NULL);
    if (!answers_show(a, l, NULL))
        a->vacuous = "the scores of a pair are so close that the order and the ranks they come "
                     "from do not show; dump a later step";
}

/* ---- all pairs of the step ---- */

/* 0, or -1: no memory. */
static inline int pairs_begin(pair_ways *w, int64_t sp) {
    memset(w, 0, sizeof *w);
    w->alone = (double *)calloc((size_t)sp, sizeof *w->alone);
    return w->alone ? 0 : -1;
}

static inline void pairs_answers(pair_ways *w, step_means *means, const step_documents *s,
                                 answers *a, law *l, const dump_facts *f) {
    int rm = f->objective == DUMP_RM;
    means_begin(means, f, 0);
    for (int64_t i = 0; i < s->count; i++) {
        double loss;
        if (!document_begins_pair(s, i)) continue;
        loss = rm ? add_score_pair(w, s, i) : add_pair(w, s, i, f->beta);
        means_add(means, f, -1, s->of[i].dp, s->of[i].micro, loss, 1);
    }
    for (int64_t r = 0; r < s->sp; r++) w->alone[r] /= (double)w->pairs;
    if (rm)
        rm_answers(w, a, l, f, s);
    else
        dpo_answers(w, a, l, f, s);
    if (s->odd)
        a->lacks = "a row has a document without a partner: documents 2i and 2i + 1 are a pair";
}
#endif
