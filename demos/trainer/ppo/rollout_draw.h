/* SPDX-License-Identifier: MIT OR Unlicense */
/* rollout_draw.h - draws the rollout to train on: generates and scores texts, drops groups
   without a useful reward signal, and subtracts length penalties. */
#ifndef DEMO_ROLLOUT_DRAW_H
#define DEMO_ROLLOUT_DRAW_H
#include "ppo_options.h"
#include "reward.h"

/* ---- the next prompts of the stream ---- */

/* Elements first .. first + count - 1 of an endless stream of indices 0 .. set - 1. Every pass
   over the set has a new random order. A pass consists of whole batches; the rest of the order
   is dropped. The caller calls free(). */
static int64_t *demo_stream(int64_t set, int64_t batch, uint64_t seed, int64_t first,
                            int64_t count) {
    int64_t span = set / batch * batch, pass = -1;
    int64_t *order = (int64_t *)demo_alloc(set, sizeof *order);
    int64_t *which = (int64_t *)demo_alloc(count + 1, sizeof *which);
    for (int64_t i = 0; i < count; i++) {
        if ((first + i) / span != pass)
            seqpar_shuffle(order, set, seed, (uint64_t)(pass = (first + i) / span));
        which[i] = order[(first + i) % span];
    }
    free(order);
    return which;
}

/* Generates texts for the next `count` prompts, without scoring them. The index of a text in
   the stream of all texts determines its random numbers. */
static seqpar_status demo_draw(demo_rank *r, int64_t count) {
    const demo_ppo_config *c = demo_ppo_options(r);
    const demo_job *job = r->job;
    demo_ppo *p = demo_ppo_of(r);
    int64_t n = c->n_samples_per_prompt;
    int64_t *which = demo_stream(job->usable_count, c->rollout_batch_size,
                                 (uint64_t)job->config.seed, p->drawn, count);
    seqpar_llama_sample_desc desc = demo_sample_desc(r);
    seqpar_llama_prompt *prompts = (seqpar_llama_prompt *)demo_alloc(count * n,
                                                                     sizeof *prompts);
    double began = demo_seconds();
    demo_texts all = {0};
    for (int64_t i = 0; i < count * n; i++) {
        const demo_document *d = &job->train.documents[job->usable[which[i / n]]];
        prompts[i] = (seqpar_llama_prompt){d->ids, demo_prompt_tokens(r, d), p->drawn * n + i};
    }
    seqpar_status status = demo_generate(r, &all, prompts, count * n, &desc);
    demo_rollout_new(&p->rollout, count * n);
    for (int64_t i = 0; !status && i < count * n; i++)
        demo_rollout_take(&p->rollout, demo_text_document(&prompts[i], demo_text_ids(&all, i)),
                          all.logp + i * all.longest, prompts[i].tokens,
                          &job->train.documents[job->usable[which[i / n]]], 0.0);
    p->drawn += count;
    p->seconds[0] += demo_seconds() - began;
    free(which);
    free(prompts);
    demo_texts_free(&all);
    return status;
}

/* ---- groups that dynamic filtering keeps ---- */

/* Dynamic sampling of DAPO (Yu et al. 2025): drops a group (the texts of a prompt) whose mean
   score is at or beyond an end of the range, up to rounding. With right and wrong answers at
   the two ends, all answers of such a group are right or all are wrong, so its advantages are
   0. */
static bool demo_group_selected(const double *scores, int64_t n, const double range[2]) {
    double mean = seqpar_mean(scores, n);
    return mean > range[0] + 1e-6 && mean < range[1] - 1e-6;
}

/* Moves the selected groups from `drawn` to `kept`; `drawn` still owns the other texts. */
static void demo_keep_groups(demo_rollout *kept, demo_rollout *drawn, int64_t n,
                             const double range[2]) {
    for (int64_t i = 0; i < drawn->texts; i++) {
        if (!demo_group_selected(drawn->score + i / n * n, n, range)) continue;
        demo_rollout_take(kept, drawn->set.documents[i], drawn->sampled + drawn->first[i],
                          drawn->prompt[i], drawn->source[i], drawn->score[i]);
        drawn->set.documents[i] = (demo_document){0};
    }
}

/* Draws and scores prompts until enough groups are selected for a rollout, or the prompts are
   used up. */
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

/* ---- length penalties ---- */

static int64_t demo_text_tokens(const demo_rollout *o, int64_t i) {
    return (i + 1 < o->texts ? o->first[i + 1] : o->entries) - o->first[i];
}

/* Returns the score after length penalties: the soft overlong punishment of DAPO, which grows
   linearly over the last overlong_buffer_len tokens, then stop_properly_penalty_coef for a text
   that was cut off: a factor of the score or, if negative, its new value. */
static double demo_length_penalty(const demo_ppo_config *c, double score, int64_t tokens,
                                  bool cut_off) {
    double over = (double)tokens - ((double)c->generate_max_len - c->overlong_buffer_len);
    double coef = c->stop_properly_penalty_coef;
    if (c->overlong_buffer_len > 0 && over > 0)
        score -= over / c->overlong_buffer_len * c->overlong_penalty_factor;
    return !cut_off ? score : coef < 0 ? coef : score * coef;
}

/* Draws the next rollout: its texts and their scores with penalties. */
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
    o->entry = (double *)demo_alloc(o->entries * ENTRY + 1, sizeof *o->entry);
    return status ? status : demo_rewards_fit(r);
}
#endif
