/* SPDX-License-Identifier: MIT OR Unlicense */
/* reward.h - what a text is worth: by a rule, by reward models, by servers. Every rank knows the score of every text. */
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
/* ---- by servers: rank 0 asks, all hear what they say ---- */

static demo_reward_question demo_question_of(const demo_rollout *o) {
    demo_reward_question q = {.query = calloc((size_t)(3 * o->texts), sizeof *q.query), .count = o->texts};
    q.prompt = q.query + o->texts;
    q.label = q.prompt + o->texts;
    for (int64_t i = 0; i < o->texts; i++) {
        const demo_document *text = &o->set.documents[i], *source = o->source[i];
        q.query[i] = demo_tokens_as_text(text->ids, text->tokens);
        q.prompt[i] = demo_tokens_as_text(text->ids, o->prompt[i]);
        q.label[i] = demo_tokens_as_text(source->ids + o->prompt[i], source->tokens - o->prompt[i]);
    }
    return q;
}
static void demo_question_free(demo_reward_question *q) {
    for (int64_t i = 0; i < 3 * q->count; i++) free(q->query[i]);
    free(q->query);
}

static seqpar_status demo_add_server_scores(demo_rank *r) {
    demo_rollout *o = &demo_ppo_of(r)->rollout;
    double *score = calloc((size_t)o->texts, sizeof *score);
    seqpar_status status = SEQPAR_OK;
    char why[512];
    if (r->ctx.world->rank == 0) {
        demo_reward_question question = demo_question_of(o);
        if (demo_ask_servers(&demo_ppo_options(r)->servers, &question, score, why, sizeof why)) status = seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_FORMAT, "%s", why);
        demo_question_free(&question);
    }
    if (!status) status = seqpar_comm_broadcast(r->ctx.world, score, o->texts * (int64_t)sizeof *score, 0);
    for (int64_t i = 0; !status && i < o->texts; i++) o->score[i] += score[i];
    free(score);
    return status;
}

/* ---- all of them ---- */

static seqpar_status demo_score_texts(demo_rank *r) {
    demo_ppo *p = demo_ppo_of(r);
    demo_window w = {.set = &p->rollout.set};
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; i < p->rollout.texts; i++) arrput(w.which, i);
    if (p->rewards) status = demo_window_open(r, &w, 1, 0);
    for (p->scorer = 0; !status && p->scorer < p->rewards; p->scorer++) status = demo_add_scores(r, &w);
    for (int64_t i = 0; !status && demo_ppo_options(r)->reward_rule && i < p->rollout.texts; i++) p->rollout.score[i] += demo_rule_score(&p->rollout, i);
    if (!status && demo_ppo_options(r)->servers.urls) status = demo_add_server_scores(r);
    demo_window_close(&w);
    return status;
}
#endif
