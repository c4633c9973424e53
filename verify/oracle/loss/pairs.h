/* SPDX-License-Identifier: MIT OR Unlicense */
/* pairs.h - the losses of pairs: documents 2i and 2i + 1 of a row are the chosen and the
 * rejected response, of which every rank may hold a part.
 *
 *     DPO   by loss_type (preferences.h), of sums over all ranks
 *     RM    L = mean over pairs of -log sigmoid(score of chosen - score of rejected - margin)
 *               + center (score of chosen + score of rejected)^2 */
#ifndef ORACLE_PAIRS_H
#define ORACLE_PAIRS_H
#include "means.h"
#include "preferences.h"

/* Sums over pairs of the right loss, and of what each mistake computes instead. */
typedef struct pair_ways {
    double right, parts, averaged, added, swapped, no_reference, by_length, gathered;
    double local_means[MEANS_LOCAL];   /* loss types by length: with ranks' own means */
    double no_margin;                  /* RM */
    int has_margins;                   /* RM: some margin is not 0 */
    double without_zeros, zero_labels; /* less targets of id 0; number of these */
    double from[SOURCES];              /* ref_logp of other tokens, by source */
    double values[SCORES];             /* RM without scores in the dump: by SCORE_... */
    double *alone;                     /* (sp) the loss from one rank's part alone */
    int64_t pairs;
    double largest, rounding; /* |x| or |h|; sum of squares of what rounding may do to each
                                 pair's term of `right` */
} pair_ways;

static inline double part_margin(const document_part *p) { return p->policy - p->reference; }

static inline double part_mean(const document_part *p) { return response_of(p, 1, 1); }

/* Adding up thousands of log-probs in fp32 rounds, too. */
static inline double sum_rounding(const document_part *p) {
    return square(0x1p-22 * p->policy) + square(0x1p-22 * p->reference);
}

/* ---- DPO ---- */

/* x (preferences.h) of a pair, from whole responses or from one rank's parts of them. */
static inline double pair_x(const dump_facts *f, const document_part *chosen,
                            const document_part *rejected) {
    int reference = preference_has_reference(f), by_length = preference_is_by_length(f);
    return response_of(chosen, reference, by_length) -
           response_of(rejected, reference, by_length);
}

static inline void add_pair_parts(pair_ways *w, const step_documents *s, int64_t i,
                                  const dump_facts *f) {
    const document_part *chosen = &s->part[i * s->sp], *rejected = chosen + s->sp;
    int reference = preference_has_reference(f);
    for (int64_t r = 0; r < s->sp; r++) {
        double own = preference_loss(f, pair_x(f, &chosen[r], &rejected[r]));
        w->parts += own / (double)s->sp;
        w->alone[r] += own;
    }
    for (int how = 0; how < MEANS_LOCAL; how++)
        w->local_means[how] += preference_loss(
            f, response_of_means(chosen, s->sp, reference, how) -
                   response_of_means(rejected, s->sp, reference, how));
}

/* The loss with ref_logp of other tokens, and the loss without ref_logp. */
static inline void add_pair_references(pair_ways *w, const document *chosen, document_part c,
                                       document_part r, const dump_facts *f) {
    for (int k = 0; k < SOURCES; k++) {
        c.reference = chosen->reference_from[k];
        r.reference = chosen[1].reference_from[k];
        w->from[k] += preference_loss(f, pair_x(f, &c, &r));
    }
    c.reference = r.reference = 0;
    w->no_reference += preference_loss(f, pair_x(f, &c, &r));
}

/* Sum of squares of the roundings in one response's term of x. */
static inline double response_rounding(const document *o, document_part p,
                                       const dump_facts *f) {
    double squares;
    if (!preference_has_reference(f)) p.reference = 0;
    squares = o->rounding + sum_rounding(&p);
    return preference_is_by_length(f) && p.tokens > 0 ? squares / square(p.tokens) : squares;
}

/* Targets with id 0 left out. */
static inline document_part without_zeros(document_part p, const document *d) {
    p.policy -= d->zeros;
    p.tokens -= d->zero_labels;
    return p;
}

static inline void add_pair_without_zeros(pair_ways *w, const document *chosen, document_part c,
                                          document_part r, const dump_facts *f) {
    c = without_zeros(c, chosen);
    r = without_zeros(r, chosen + 1);
    w->without_zeros += preference_loss(f, pair_x(f, &c, &r));
    w->zero_labels += chosen->zero_labels + chosen[1].zero_labels;
}

/* Returns the loss of the pair that begins with document i. */
static inline double add_pair(pair_ways *w, const step_documents *s, int64_t i,
                              const dump_facts *f) {
    const document *chosen = &s->of[i], *rejected = chosen + 1;
    document_part c = document_whole(s, i), r = document_whole(s, i + 1);
    int reference = preference_has_reference(f), by_length = preference_is_by_length(f);
    double x = pair_x(f, &c, &r);
    w->pairs++;
    w->right += preference_loss(f, x);
    w->averaged += preference_loss(f, x / (double)s->sp);
    w->added += preference_loss(f, x * (double)s->sp);
    w->swapped += preference_loss(f, -x);
    w->by_length += preference_loss(f, response_of(&c, reference, !by_length) -
                                           response_of(&r, reference, !by_length));
    w->gathered += preference_loss(f, pair_x(f, &chosen->gathered, &rejected->gathered));
    add_pair_without_zeros(w, chosen, c, r, f);
    add_pair_references(w, chosen, c, r, f);
    add_pair_parts(w, s, i, f);
    if (!(fabs(x) <= w->largest)) w->largest = fabs(x);
    w->rounding += square(preference_slope(f, x)) *
                   (response_rounding(chosen, c, f) + response_rounding(rejected, r, f));
    return preference_loss(f, x);
}

/* With sp 1 no log-probs are combined; only replicas and micro-batches combine means. */
static inline const char *pairs_alone_vacuous(const answers *a, const law *l,
                                              const step_means *means, const dump_facts *f) {
    if (f->world * f->accumulation == 1) return "one rank has nothing to put together";
    return means_show(means, l, a->right)
               ? NULL
               : "replicas and micro-batches have the same mean here, so that one alone would "
                 "not show; dump a later step";
}

static inline const char *pairs_vacuous(const answers *a, const law *l, const step_means *means,
                                        const dump_facts *f) {
    if (f->sp == 1) return pairs_alone_vacuous(a, l, means, f);
    return answers_show(a, l, "log_probs_averaged") && answers_show(a, l, "sigmoid_of_parts") &&
                   answers_show(a, l, "pair_swapped")
               ? NULL
               : "policy and reference are so close that other ways to put log-probs together "
                 "give the same; dump a later step";
}

static inline void pairs_begin_answers(const pair_ways *w, answers *a, int low) {
    double n = (double)w->pairs;
    memset(a, 0, sizeof *a);
    a->right = w->right / n;
    a->size = fabs(a->right);
    a->slack = 3 * sqrt(w->rounding) / n + added_rounding(n, a->size);
    a->low_precision = low;
    snprintf(a->what, sizeof a->what, "%lld pairs", (long long)w->pairs);
}

static inline void dpo_add_means(const pair_ways *w, answers *a, const dump_facts *f,
                                 double several) {
    if (!preference_is_by_length(f)) {
        answers_add(a, "log_probs_by_length", w->by_length / (double)w->pairs, NULL);
        return;
    }
    answers_add(a, "log_probs_not_by_length", w->by_length / (double)w->pairs, NULL);
    for (int how = 0; how < MEANS_LOCAL; how++)
        answers_add(a, "sequence_counts_local", w->local_means[how] / several,
                    local_means_texts[how]);
}

static inline void dpo_answers(const pair_ways *w, answers *a, const dump_facts *f,
                               const step_documents *s) {
    double n = (double)w->pairs, several = f->sp > 1 ? n : NAN;
    pairs_begin_answers(w, a, s->unit.logp > NARROW);
    answers_add(a, "sigmoid_of_parts", w->parts / several, NULL);
    answers_add(a, "log_probs_averaged", w->averaged / several, NULL);
    answers_add(a, "log_probs_added", w->added / several, NULL);
    answers_add(a, "pair_swapped", w->swapped / n, NULL);
    dpo_add_means(w, a, f, several);
    answers_add(a, "gathered_in_rank_order", w->gathered / n, NULL);
    if (w->zero_labels > 0) answers_add(a, "token_zero_ignored", w->without_zeros / n, NULL);
    if (!preference_has_reference(f)) return;
    answers_add(a, "reference_missing", w->no_reference / n, NULL);
    for (int k = 0; k < SOURCES; k++)
        answers_add(a, "side_tensor_not_split", w->from[k] / n,
                    token_ways[TOKEN_REFERENCE + k].how);
    if (w->largest == 0 && f->loss_type <= DUMP_ROBUST)
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

/* RM's loss of a pair, from its scores or from what a mistake takes for scores. */
static inline double score_loss(const dump_facts *f, double chosen, double rejected,
                                double margin) {
    return pair_loss(chosen - rejected - margin) + f->center * square(chosen + rejected);
}

static inline double add_score_pair(pair_ways *w, const step_documents *s, int64_t i,
                                    const dump_facts *f) {
    double chosen = document_score(s, i), rejected = document_score(s, i + 1);
    double h = chosen - rejected, m = s->of[i].margin, sp = (double)s->sp;
    double unit = s->has_scores ? s->unit.scores : s->unit.values;
    w->pairs++;
    w->right += score_loss(f, chosen, rejected, m);
    w->averaged += score_loss(f, chosen / sp, rejected / sp, m);
    w->added += score_loss(f, chosen * sp, rejected * sp, m);
    w->swapped += score_loss(f, rejected, chosen, m);
    w->no_margin += score_loss(f, chosen, rejected, 0);
    w->has_margins |= m != 0;
    for (int k = 0; k < SCORES; k++)
        w->values[k] += score_loss(f, s->of[i].values[k], s->of[i + 1].values[k], m);
    for (int64_t r = 0; r < s->sp; r++) {
        double own = score_loss(f, owned_score(s, i, r), owned_score(s, i + 1, r), m);
        w->parts += own / sp;
        w->alone[r] += own;
    }
    if (!(fabs(h) <= w->largest)) w->largest = fabs(h);
    w->rounding += square(unit * (1 + 2 * f->center * fabs(chosen + rejected))) *
                   (square(chosen) + square(rejected));
    return score_loss(f, chosen, rejected, m);
}

static const char *const score_names[SCORES] = {NULL,
                                                "score_of_rank_end",
                                                "score_of_first_token",
                                                "score_of_row_end",
                                                "score_of_row_end",
                                                "score_of_padding",
                                                "gathered_in_rank_order"};

static inline const char *rm_vacuous(const answers *a, const law *l) {
    return answers_show(a, l, NULL)
               ? NULL
               : "the scores of a pair are so close that the order and the ranks they come "
                 "from do not show; dump a later step";
}

static inline void rm_answers(const pair_ways *w, answers *a, const dump_facts *f,
                              const step_documents *s) {
    double n = (double)w->pairs, several = f->sp > 1 ? n : NAN;
    double unit = s->has_scores ? s->unit.scores : s->unit.values;
    pairs_begin_answers(w, a, unit > NARROW);
    answers_add(a, "pair_swapped", w->swapped / n, NULL);
    answers_add(a, "margin_missing", w->has_margins ? w->no_margin / n : NAN, NULL);
    answers_add(a, "scores_averaged", w->averaged / several, NULL);
    answers_add(a, "scores_added", w->added / several, NULL);
    answers_add(a, "sigmoid_of_parts", w->parts / several, NULL);
    for (int k = SCORE_RIGHT + 1; k < SCORES && !s->has_scores; k++)
        answers_add(a, score_names[k], w->values[k] / n, NULL);
}

/* ---- all pairs of the step ---- */

/* 0, or -1: no memory. */
static inline int pairs_begin(pair_ways *w, int64_t sp) {
    memset(w, 0, sizeof *w);
    w->alone = (double *)calloc((size_t)sp, sizeof *w->alone);
    return w->alone ? 0 : -1;
}

static inline void pairs_answers(pair_ways *w, step_means *means, const step_documents *s,
                                 answers *a, const dump_facts *f) {
    int rm = f->objective == DUMP_RM;
    means_begin(means, f, 0);
    for (int64_t i = 0; i < s->count; i++) {
        double loss;
        if (!document_begins_pair(s, i)) continue;
        loss = rm ? add_score_pair(w, s, i, f) : add_pair(w, s, i, f);
        means_add(means, f, -1, s->of[i].dp, s->of[i].micro, loss, 1);
    }
    for (int64_t r = 0; r < s->sp; r++) w->alone[r] /= (double)w->pairs;
    if (rm)
        rm_answers(w, a, f, s);
    else
        dpo_answers(w, a, f, s);
    if (s->odd)
        a->lacks = "a row has a document without a partner: documents 2i and 2i + 1 are a pair";
}
#endif
