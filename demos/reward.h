/* SPDX-License-Identifier: MIT OR Unlicense */
/* reward.h - what a text is worth: by a rule, by reward models. Every rank knows the score of every text. */
#ifndef DEMO_REWARD_H
#define DEMO_REWARD_H
#include "rollout.h"

/* ---- by a rule ---- */

/* The last whole number in a text, as its digits; length 0 where there is none. */
static int demo_last_number(const int32_t *ids, int64_t tokens, int64_t *length) {
    int64_t end = tokens, begin;
    while (end > 0 && !(ids[end - 1] < 256 && isdigit(ids[end - 1]))) end--;
    for (begin = end; begin > 0 && ids[begin - 1] < 256 && isdigit(ids[begin - 1]); begin--) {}
    *length = end - begin;
    return (int)begin;
}
/* Does a text end in the number that the label, a document whose first tokens are the prompt, ends in? */
static int demo_same_number(const int32_t *text, int64_t tokens, const demo_document *label, int64_t prompt) {
    int64_t n, m;
    int a = demo_last_number(text, tokens, &n), b = demo_last_number(label->ids + prompt, label->tokens - prompt, &m);
    return n && n == m && !memcmp(text + a, label->ids + prompt + b, (size_t)n * sizeof *text);
}
static double demo_rule_score(const demo_rollout *o, int64_t i) {
    const demo_document *text = &o->set.documents[i];
    return demo_same_number(text->ids + o->prompt[i], text->tokens - o->prompt[i], o->source[i], o->prompt[i]);
}

/* ---- by reward models ---- */

/* Scores of whole texts by a reward model. */
static seqpar_status demo_reward_rows(demo_rank *r, demo_window *w, int64_t first, int64_t count, int64_t micro) {
    seqpar_llama *model = &demo_ppo_of(r)->reward[demo_ppo_of(r)->scorer];
    seqpar_llama_run run = demo_run_desc(r->job);
    seqpar_llama_batch b;
    (void)micro;
    seqpar_status status = seqpar_llama_open_batch(&r->ctx, model, &b, w->batch.row + first, count, &run);
    double *last = calloc((size_t)b.tokens + 1, sizeof *last);
    if (!status) status = seqpar_llama_forward(&r->ctx, model, &b, 0);
    if (!status) status = seqpar_llama_values(&r->ctx, model, &b);
    if (!status) status = demo_last_terms(r, &b, w->batch.row + first, &w->seen, last);
    free(last);
    seqpar_llama_close_batch(&r->ctx, model, &b);
    return status;
}

/* Adds the scores of the reward model at work. */
static seqpar_status demo_add_scores(demo_rank *r, demo_window *w) {
    demo_rollout *o = &demo_ppo_of(r)->rollout;
    double *score = calloc((size_t)o->texts, sizeof *score);
    seqpar_status status = demo_window_values(r, w, demo_reward_rows);
    w->seen.width = 1;
    if (!status) status = seqpar_segments_sum(r->ctx.world, score, o->texts, &w->seen);
    for (int64_t i = 0; i < o->texts; i++) {
        o->score[i] += score[i];
        if (!status && !(fabs(score[i]) <= 1e300)) status = seqpar_fail(r->ctx.error, SEQPAR_ERR_NOT_FINITE, "reward model %d scores text %lld with %g; it cannot be trained on", demo_ppo_of(r)->scorer + 1, (long long)i, score[i]);
    }
    seqpar_segments_free(&w->seen);
    free(score);
    return status;
}
#endif
