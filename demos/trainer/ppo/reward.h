/* SPDX-License-Identifier: MIT OR Unlicense */
/* reward.h - the reward of a text: the sum of the rewards of a rule, reward models and reward
 * servers. Every rank gets the rewards of all texts. */
#ifndef DEMO_REWARD_H
#define DEMO_REWARD_H
#include "rollout.h"

/* ---- by a rule ---- */

/* The digits of the last whole number in a text; length 0 if there is none. */
static const char *demo_last_number(const char *text, int64_t *length) {
    const char *end = text + strlen(text), *begin;
    while (end > text && !isdigit((unsigned char)end[-1])) end--;
    for (begin = end; begin > text && isdigit((unsigned char)begin[-1]); begin--) {
    }
    *length = end - begin;
    return begin;
}

/* Is the last number of the text that of the right answer? */
static int demo_same_number(const char *text, const char *answer) {
    int64_t n, m;
    const char *a = demo_last_number(text, &n), *b = demo_last_number(answer, &m);
    return n && n == m && !memcmp(a, b, (size_t)n);
}

/* The text of a prompt (demo_answer_text: of its right answer). The caller calls free(). A
   token file has both as text. Otherwise the document has the tokens of the prompt followed by
   those of the answer. */
static char *demo_prompt_text(const demo_rank *r, const demo_dataset *set,
                              const demo_document *d) {
    const demo_words words = demo_rank_words(r);
    if (!set->file) return demo_tokens_as_text(&words, d->ids, demo_prompt_tokens(r, d));
    demo_slice text = demo_token_slice(set->file, DEMO_PROMPT_OFFSETS, DEMO_PROMPT_TEXT,
                                       d - set->documents);
    return demo_bytes_as_text(text.bytes, text.size);
}

static char *demo_answer_text(const demo_rank *r, const demo_dataset *set,
                              const demo_document *d) {
    const demo_words words = demo_rank_words(r);
    int64_t prompt = demo_prompt_tokens(r, d);
    if (!set->file) return demo_tokens_as_text(&words, d->ids + prompt, d->tokens - prompt);
    demo_slice text = demo_token_slice(set->file, DEMO_ANSWER_OFFSETS, DEMO_ANSWER_TEXT,
                                       d - set->documents);
    return demo_bytes_as_text(text.bytes, text.size);
}

/* Does the text that was sampled for this prompt end in the right number? */
static int demo_sampled_right(const demo_rank *r, const int32_t *ids, int64_t tokens,
                              const demo_dataset *set, const demo_document *d) {
    const demo_words words = demo_rank_words(r);
    char *text = demo_tokens_as_text(&words, ids, tokens),
         *answer = demo_answer_text(r, set, d);
    int right = demo_same_number(text, answer);
    free(text);
    free(answer);
    return right;
}

static double demo_rule_score(const demo_rank *r, const demo_rollout *o, int64_t i) {
    const demo_document *text = &o->set.documents[i];
    return demo_sampled_right(r, text->ids + o->prompt[i], text->tokens - o->prompt[i],
                              &r->job->train, o->source[i]);
}

/* ---- by reward models ---- */

/* Scores whole texts by the current reward model. */
static seqpar_status demo_reward_rows(demo_rank *r, demo_window *w, int64_t first,
                                      int64_t count, int64_t micro) {
    seqpar_llama *model = &demo_ppo_of(r)->reward[demo_ppo_of(r)->scorer];
    seqpar_llama_batch_desc run = demo_batch_desc(r->job);
    seqpar_llama_batch b;
    (void)micro;
    seqpar_status status = seqpar_llama_open_batch(&r->ctx, model, &b, w->batch.row + first,
                                                   count, &run);
    double *last = (double *)demo_alloc(b.tokens + 1, sizeof *last);
    if (!status) status = seqpar_llama_forward(&r->ctx, model, &b, 0);
    if (!status) status = seqpar_llama_values(&r->ctx, model, &b);
    if (!status) status = demo_last_terms(r, &b, w->batch.row + first, &w->seen, last);
    free(last);
    seqpar_llama_close_batch(&r->ctx, model, &b);
    return status;
}

/* Reads mean and standard deviation of a reward model's scores on evaluation data, which
   train_rm or OpenRLHF wrote to config.json. */
static seqpar_status demo_read_moments(seqpar_error *error, demo_moments *m,
                                       const char *folder) {
    char path[4352];
    cJSON *json = demo_config_open(folder, path, sizeof path, error);
    const cJSON *mean = cJSON_GetObjectItemCaseSensitive(json, "mean"),
                *std = cJSON_GetObjectItemCaseSensitive(json, "std");
    bool there = cJSON_IsNumber(mean) && cJSON_IsNumber(std) && isfinite(mean->valuedouble) &&
                 isfinite(std->valuedouble) && std->valuedouble > 0;
    if (there) *m = (demo_moments){mean->valuedouble, std->valuedouble};
    cJSON_Delete(json);
    if (there) return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                       "%s: normalize_reward needs \"mean\" and a positive \"std\" of the "
                       "scores in this file; train_rm writes them",
                       path);
}

/* Opens a model with a score head: the model of the folder or, without a folder, the actor's
   weights with a new head. */
static seqpar_status demo_open_scorer(demo_rank *r, seqpar_llama *model, const char *folder,
                                      bool offload) {
    const demo_config *c = &r->job->config;
    seqpar_llama_config config = r->job->model;
    seqpar_error why = {0};
    if (folder && demo_load_config(folder, &config, &why))
        return seqpar_fail(r->ctx.error, why.status, "%s", why.text);
    config.score = demo_ppo_options(r)->value_head_prefix;
    seqpar_status status = demo_model_open(&r->ctx, model, &config, r->job->shared, offload);
    return status ? status
                  : demo_begin_model(&r->ctx, model, folder ? folder : c->pretrain, c->seed);
}

/* Opens one reward model, and reads the mean and standard deviation that normalize its scores.
   PPO requires them with normalize_reward; generate uses them if the folder has them. */
static seqpar_status demo_reward_open(demo_rank *r, const char *folder) {
    const demo_ppo_config *c = demo_ppo_options(r);
    demo_ppo *p = demo_ppo_of(r);
    int i = p->rewards;
    seqpar_error none = {0};
    seqpar_status status = SEQPAR_OK;
    if (i == DEMO_REWARDS)
        return seqpar_fail(r->ctx.error, SEQPAR_ERR_OPTION,
                           "reward_pretrain names more than %d models; give fewer",
                           DEMO_REWARDS);
    p->moments[i] = (demo_moments){0, 1};
    if (r->job->objective->generates)
        (void)demo_read_moments(&none, &p->moments[i], folder);
    else if (c->normalize_reward)
        status = demo_read_moments(r->ctx.error, &p->moments[i], folder);
    p->rewards++;
    if (!demo_has_role(r, DEMO_REWARD)) return status;
    if (!status) status = demo_open_scorer(r, &p->reward[i], folder, c->ref_reward_offload);
    return status ? status : demo_head_there(&p->reward[i], folder, r->ctx.error);
}

static seqpar_status demo_rewards_open(demo_rank *r) {
    seqpar_status status = SEQPAR_OK;
    char folder[4096];
    for (const char *at = demo_ppo_options(r)->reward_pretrain; !status && at;
         at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        snprintf(folder, sizeof folder, "%.*s", (int)strcspn(at, ","), at);
        status = demo_reward_open(r, folder);
    }
    return status;
}

static void demo_rewards_close(demo_rank *r) {
    demo_ppo *p = demo_ppo_of(r);
    for (int i = 0; i < p->rewards; i++)
        if (p->reward[i].tensors) seqpar_llama_close(&r->ctx, &p->reward[i]);
}

/* Adds the normalized scores of reward model `scorer` to the rewards of the rollout. */
static seqpar_status demo_add_scores(demo_rank *r, demo_window *w) {
    demo_rollout *o = &demo_ppo_of(r)->rollout;
    const demo_moments *m = &demo_ppo_of(r)->moments[demo_ppo_of(r)->scorer];
    double *score = (double *)demo_alloc(o->texts, sizeof *score);
    seqpar_status status = demo_has_role(r, DEMO_REWARD)
                               ? demo_window_values(r, w, demo_reward_rows)
                               : SEQPAR_OK;
    w->seen.width = 1;
    if (!status) status = seqpar_segments_sum(r->world, score, o->texts, &w->seen);
    for (int64_t i = 0; i < o->texts; i++) {
        o->score[i] += (score[i] - m->mean) / m->std;
        if (!status && !(fabs(score[i]) <= 1e300))
            status = seqpar_fail(
                r->ctx.error, SEQPAR_ERR_NOT_FINITE,
                "reward model %d scores text %lld with %g, which cannot be trained on; check "
                "that model",
                demo_ppo_of(r)->scorer + 1, (long long)i, score[i]);
    }
    seqpar_segments_free(&w->seen);
    free(score);
    return status;
}

/* ---- by servers: if one fails, training stops with a checkpoint, as after a signal ---- */

/* The prompt as the model got it, followed by the sampled text without special tokens. */
static char *demo_query_text(const demo_rank *r, const char *prompt, const int32_t *ids,
                             int64_t tokens) {
    const demo_words words = demo_rank_words(r);
    char *text = demo_tokens_as_text(&words, ids, tokens);
    int64_t size = (int64_t)(strlen(prompt) + strlen(text) + 1);
    char *query = (char *)demo_alloc(size, 1);
    snprintf(query, (size_t)size, "%s%s", prompt, text);
    free(text);
    return query;
}

static demo_reward_question demo_question_of(const demo_rank *r, const demo_rollout *o) {
    demo_reward_question q = {.query = (char **)demo_alloc(3 * o->texts, sizeof *q.query),
                              .count = o->texts};
    q.prompt = q.query + o->texts;
    q.label = q.prompt + o->texts;
    for (int64_t i = 0; i < o->texts; i++) {
        const demo_document *text = &o->set.documents[i], *source = o->source[i];
        q.prompt[i] = demo_prompt_text(r, &r->job->train, source);
        q.label[i] = demo_answer_text(r, &r->job->train, source);
        q.query[i] = demo_query_text(r, q.prompt[i], text->ids + o->prompt[i],
                                     text->tokens - o->prompt[i]);
    }
    return q;
}

static void demo_question_free(demo_reward_question *q) {
    for (int64_t i = 0; i < 3 * q->count; i++) free(q->query[i]);
    free(q->query);
}

/* Adds the rewards of the servers. If a server failed or a signal came, `asked` is above 0 on
   all ranks, and all of them discard the rollout. */
static seqpar_status demo_add_server_scores(demo_rank *r) {
    demo_rollout *o = &demo_ppo_of(r)->rollout;
    double *score = (double *)demo_alloc(o->texts, sizeof *score);
    seqpar_status status = SEQPAR_OK;
    int64_t asked = 0;
    demo_error why;
    if (r->world->rank == 0) {
        demo_reward_question question = demo_question_of(r, o);
        asked = demo_ask_servers(&demo_ppo_options(r)->servers, &question, score, &why);
        demo_question_free(&question);
        if (asked < 0) {
            (void)seqpar_fail(&r->trouble,
                              asked == DEMO_NO_ANSWER ? SEQPAR_ERR_TIMEOUT
                                                      : SEQPAR_ERR_FILE_FORMAT,
                              "%s", why.text);
            demo_interrupted = DEMO_TROUBLE;
            asked = 1;
        }
    }
    if (!status) status = seqpar_comm_max_i64(r->world, &asked, 1);
    if (asked > 0) demo_ppo_of(r)->given_up = true;
    if (!status)
        status = seqpar_comm_broadcast(r->world, score, o->texts * (int64_t)sizeof *score, 0);
    for (int64_t i = 0; !status && i < o->texts; i++) o->score[i] += score[i];
    free(score);
    return status;
}

/* ---- all of them ---- */

/* Refuses rewards above DEMO_REWARD_MOST. If a sum of rewards overflowed, all advantages would
   be 0 or NaN, and no later check would find it. */
static seqpar_status demo_rewards_fit(demo_rank *r) {
    const demo_rollout *o = &demo_ppo_of(r)->rollout;
    for (int64_t i = 0; i < o->texts; i++)
        if (!(fabs(o->score[i]) <= DEMO_REWARD_MOST))
            return seqpar_fail(r->ctx.error, SEQPAR_ERR_NOT_FINITE,
                               "text %lld of the rollout has a reward of %g, but the limit "
                               "is %g; check what it is made of (reward models, their "
                               "\"std\", penalties)",
                               (long long)i, o->score[i], DEMO_REWARD_MOST);
    return SEQPAR_OK;
}

/* Computes the rewards of all texts of the rollout from all sources. */
static seqpar_status demo_score_texts(demo_rank *r) {
    demo_ppo *p = demo_ppo_of(r);
    demo_window w = {.set = &p->rollout.set};
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; i < p->rollout.texts; i++) arrput(w.which, i);
    if (p->rewards) status = demo_window_open(r, &w, 1, 0);
    for (p->scorer = 0; !status && p->scorer < p->rewards; p->scorer++)
        status = demo_add_scores(r, &w);
    for (int64_t i = 0; !status && demo_ppo_options(r)->reward_rule && i < p->rollout.texts;
         i++)
        p->rollout.score[i] += demo_rule_score(r, &p->rollout, i);
    if (!status && demo_ppo_options(r)->servers.urls) status = demo_add_server_scores(r);
    demo_window_close(&w);
    return status ? status : demo_rewards_fit(r);
}

#endif
