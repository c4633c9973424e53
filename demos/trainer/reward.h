/* SPDX-License-Identifier: MIT OR Unlicense */
/* reward.h - what a text is worth: by a rule, by reward models, by servers; which groups of
 * texts are worth training on, and what bad lengths cost. Every rank knows the score of every
 * text. */
#ifndef DEMO_REWARD_H
#define DEMO_REWARD_H
#include "rollout.h"

/* ---- by a rule ---- */

/* The last whole number in a text, as its digits; length 0 where there is none. */
static const char *demo_last_number(const char *text, int64_t *length) {
    const char *end = text + strlen(text), *begin;
    while (end > text && !isdigit((unsigned char)end[-1])) end--;
    for (begin = end; begin > text && isdigit((unsigned char)begin[-1]); begin--) {
    }
    *length = end - begin;
    return begin;
}

/* Does a text end in the number that the right answer ends in? */
static int demo_same_number(const char *text, const char *answer) {
    int64_t n, m;
    const char *a = demo_last_number(text, &n), *b = demo_last_number(answer, &m);
    return n && n == m && !memcmp(a, b, (size_t)n);
}

/* Texts that belong to a prompt of this set, for free(): its own, and the right answer. Token
   files hold them; elsewhere the document goes on as the answer. */
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

/* Does what was sampled for this prompt end in the right number? */
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

/* Scores of whole texts by a reward model. */
static seqpar_status demo_reward_rows(demo_rank *r, demo_window *w, int64_t first,
                                      int64_t count, int64_t micro) {
    seqpar_llama *model = &demo_ppo_of(r)->reward[demo_ppo_of(r)->scorer];
    seqpar_llama_run run = demo_run_desc(r->job);
    seqpar_llama_batch b;
    (void)micro;
    seqpar_status status = seqpar_llama_open_batch(&r->ctx, model, &b, w->batch.row + first,
                                                   count, &run);
    double *last = (double *)demo_room(b.tokens + 1, sizeof *last);
    if (!status) status = seqpar_llama_forward(&r->ctx, model, &b, 0);
    if (!status) status = seqpar_llama_values(&r->ctx, model, &b);
    if (!status) status = demo_last_terms(r, &b, w->batch.row + first, &w->seen, last);
    free(last);
    seqpar_llama_close_batch(&r->ctx, model, &b);
    return status;
}

/* Mean and deviation of a reward model's scores on its evaluation data, where train_rm or
   OpenRLHF put them. */
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
                       "scores there; train_rm writes them",
                       path);
}

/* Adds the scores of the reward model at work. */
static seqpar_status demo_add_scores(demo_rank *r, demo_window *w) {
    demo_rollout *o = &demo_ppo_of(r)->rollout;
    const demo_moments *m = &demo_ppo_of(r)->moments[demo_ppo_of(r)->scorer];
    double *score = (double *)demo_room(o->texts, sizeof *score);
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
                "reward model %d scores text %lld with %g; it cannot be trained on",
                demo_ppo_of(r)->scorer + 1, (long long)i, score[i]);
    }
    seqpar_segments_free(&w->seen);
    free(score);
    return status;
}

/* ---- by servers: rank 0 asks, all hear what they say; one that fails ends training as a signal does, with a checkpoint ---- */

/* A prompt as the model was given it, and behind it what was sampled, without special tokens. */
static char *demo_query_text(const demo_rank *r, const char *prompt, const int32_t *ids,
                             int64_t tokens) {
    const demo_words words = demo_rank_words(r);
    char *text = demo_tokens_as_text(&words, ids, tokens);
    int64_t size = (int64_t)(strlen(prompt) + strlen(text) + 1);
    char *query = (char *)demo_room(size, 1);
    snprintf(query, (size_t)size, "%s%s", prompt, text);
    free(text);
    return query;
}

static demo_reward_question demo_question_of(const demo_rank *r, const demo_rollout *o) {
    demo_reward_question q = {.query = (char **)demo_room(3 * o->texts, sizeof *q.query),
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

static seqpar_status demo_add_server_scores(demo_rank *r) {
    demo_rollout *o = &demo_ppo_of(r)->rollout;
    double *score = (double *)demo_room(o->texts, sizeof *score);
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

/* A sum that overflows makes the advantages of all texts 0 or no numbers, and no step is
   refused. */
static seqpar_status demo_rewards_fit(demo_rank *r) {
    const demo_rollout *o = &demo_ppo_of(r)->rollout;
    for (int64_t i = 0; i < o->texts; i++)
        if (!(fabs(o->score[i]) <= DEMO_REWARD_MOST))
            return seqpar_fail(r->ctx.error, SEQPAR_ERR_NOT_FINITE,
                               "text %lld of the rollout has a reward of %g, and sums over "
                               "texts hold at most %g each; look at what gives it (reward "
                               "models, their \"std\", penalties)",
                               (long long)i, o->score[i], DEMO_REWARD_MOST);
    return SEQPAR_OK;
}

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

/* ---- groups that are worth training on ---- */

/* Dynamic sampling of DAPO (Yu et al. 2025): where all answers are right, or all wrong,
   there is nothing to compare. The ends of the range, up to rounding of the mean, are
   outside. */
static bool demo_group_kept(const double *scores, int64_t n, const double range[2]) {
    double mean = seqpar_mean(scores, n);
    return mean > range[0] + 1e-6 && mean < range[1] - 1e-6;
}

/* Moves the groups that are kept to `kept`; what stays is the other's. */
static void demo_keep_groups(demo_rollout *kept, demo_rollout *drawn, int64_t n,
                             const double range[2]) {
    for (int64_t i = 0; i < drawn->texts; i++) {
        if (!demo_group_kept(drawn->score + i / n * n, n, range)) continue;
        demo_rollout_take(kept, drawn->set.documents[i], drawn->sampled + drawn->first[i],
                          drawn->prompt[i], drawn->source[i], drawn->score[i]);
        drawn->set.documents[i] = (demo_document){0};
    }
}

/* Draws until the rollout is full or the prompts are used up. */
static seqpar_status demo_draw_filtered(demo_rank *r) {
    const demo_ppo_config *c = demo_ppo_options(r);
    demo_ppo *p = demo_ppo_of(r);
    demo_rollout kept = {0};
    int64_t n = c->n_samples_per_prompt, batch = c->rollout_batch_size;
    int64_t all = r->job->usable_count / batch * batch * c->num_episodes;
    int64_t missing = batch;
    seqpar_status status = SEQPAR_OK;
    demo_rollout_new(&kept, batch * n);
    while (!status && missing && p->drawn < all && !p->given_up) {
        status = demo_draw(r, missing < all - p->drawn ? missing : all - p->drawn);
        if (!status) status = demo_score_texts(r);
        if (!status) demo_keep_groups(&kept, &p->rollout, n, c->dynamic_filtering_reward_range);
        missing = batch - kept.texts / n;
    }
    demo_rollout_free(&p->rollout);
    p->rollout = kept;
    p->used_up = missing > 0 && !p->given_up;
    return status;
}

/* ---- what lengths cost ---- */

/* Soft overlong punishment (DAPO), growing over the last tokens there is room for; and what
   a text that was cut off gets. */
static double demo_length_penalty(const demo_ppo_config *c, double score, int64_t tokens,
                                  bool cut_off) {
    double over = (double)tokens - ((double)c->generate_max_len - c->overlong_buffer_len);
    double coef = c->stop_properly_penalty_coef;
    if (c->overlong_buffer_len > 0 && over > 0)
        score -= over / c->overlong_buffer_len * c->overlong_penalty_factor;
    return !cut_off ? score : coef < 0 ? coef : score * coef;
}

/* Texts and scores of the next rollout. */
static seqpar_status demo_rollout_draw(demo_rank *r) {
    const demo_ppo_config *c = demo_ppo_options(r);
    demo_rollout *o = &demo_ppo_of(r)->rollout;
    const demo_words words = demo_rank_words(r);
    seqpar_status status = c->dynamic_filtering ? demo_draw_filtered(r)
                                                : demo_draw(r, c->rollout_batch_size);
    if (!status && !c->dynamic_filtering) status = demo_score_texts(r);
    for (int64_t i = 0; !status && i < o->texts; i++)
        o->score[i] = demo_length_penalty(
            c, o->score[i], demo_text_tokens(o, i),
            !demo_is_stop(&words, o->set.documents[i].ids[o->set.documents[i].tokens - 1]));
    o->entry = (double *)demo_room(o->entries * ENTRY + 1, sizeof *o->entry);
    return status ? status : demo_rewards_fit(r);
}
#endif
