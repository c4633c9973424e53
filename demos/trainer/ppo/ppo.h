/* SPDX-License-Identifier: MIT OR Unlicense */
/* ppo.h - PPO and its critic-free variants: evaluation, the loop over rollouts and updates,
   checkpoints. */
#ifndef DEMO_PPO_H
#define DEMO_PPO_H
#include "samples.h"

/* ---- evaluation: how many texts for held-out prompts have the right answer ---- */

/* Adds the number of correct texts to right[0], and the number of prompts with at least one
   correct text to right[1]. */
static void demo_count_right(const demo_rank *r, const demo_texts *texts, int64_t right[2]) {
    int64_t n = demo_ppo_options(r)->eval_n_samples_per_prompt;
    for (int64_t i = 0; i < arrlen(r->job->eval.documents); i++) {
        int64_t before = right[0];
        for (int64_t k = i * n; k < (i + 1) * n; k++) {
            const int32_t *ids = demo_text_ids(texts, k);
            right[0] += demo_sampled_right(r, ids + 1, ids[0], &r->job->eval,
                                           &r->job->eval.documents[i]);
        }
        right[1] += right[0] > before;
    }
}

/* Prints and logs the fractions of correct texts and of prompts with a correct text. */
static void demo_say_right(demo_rank *r, int64_t rollouts, const int64_t right[2], int64_t n) {
    int64_t prompts = arrlen(r->job->eval.documents);
    double pass = (double)right[1] / (double)prompts;
    demo_report report = {.phase = "eval", .step = r->step};
    r->eval_means[0] = (double)right[0] / (double)(prompts * n);
    if (r->world->rank) return;
    if (n == 1)
        demo_progress_say(
            &r->progress,
            "after %lld rollouts: %lld of %lld held-out prompts answered correctly (%.1f %%)",
            (long long)rollouts, (long long)right[0], (long long)prompts,
            100 * r->eval_means[0]);
    else
        demo_progress_say(&r->progress,
                          "after %lld rollouts: %lld of %lld texts for held-out prompts are "
                          "correct (%.1f %%), %lld of %lld prompts have a correct one",
                          (long long)rollouts, (long long)right[0], (long long)(prompts * n),
                          100 * r->eval_means[0], (long long)right[1], (long long)prompts);
    demo_report_add(&report, "rollout", (double)rollouts, DEMO_PLACE);
    demo_report_add(&report, "exact", r->eval_means[0], DEMO_EXACT);
    demo_report_add(&report, "pass", pass, DEMO_EXACT);
    demo_report_add(&report, "prompts", (double)prompts, DEMO_WHOLE);
    demo_log(r, &report);
}

/* Generates texts for the held-out prompts and counts the correct ones. */
static seqpar_status demo_ppo_evaluate(demo_rank *r, int64_t rollouts) {
    const demo_ppo_config *c = demo_ppo_options(r);
    const demo_words words = demo_rank_words(r);
    int64_t n = c->eval_n_samples_per_prompt, total = arrlen(r->job->eval.documents) * n;
    int64_t right[2] = {0};
    seqpar_llama_sample_desc desc = {.max_new_tokens = c->generate_max_len,
                                     .batch = c->micro_rollout_batch_size,
                                     .temperature = c->eval_temperature,
                                     .top_p = 1,
                                     .stops = words.stops,
                                     .stop_count = words.stop_count,
                                     .seed = (uint64_t)r->job->config.seed +
                                             (UINT64_C(1) << 32)}; /* random numbers differ
                                                                      from training's */
    if (!total) return SEQPAR_OK;
    seqpar_llama_prompt *prompts = (seqpar_llama_prompt *)demo_alloc(total, sizeof *prompts);
    demo_texts texts = {0};
    for (int64_t i = 0; i < total; i++) {
        const demo_document *d = &r->job->eval.documents[i / n];
        prompts[i] = (seqpar_llama_prompt){d->ids, demo_prompt_tokens(r, d), i};
    }
    seqpar_status status = demo_generate(r, &texts, prompts, total, &desc);
    if (!status) demo_count_right(r, &texts, right);
    if (!status) demo_say_right(r, rollouts, right, n);
    free(prompts);
    demo_texts_free(&texts);
    return status;
}

/* ---- the loop ---- */

static void demo_rollout_say(const demo_rank *r, const demo_report *report) {
    const demo_ppo *p = (const demo_ppo *)r->own;
    const demo_rollout *o = &p->rollout;
    fprintf(stderr,
            "rollout %lld: reward %.4f, KL %.4f, length %.1f, generate %.1f s, score %.1f "
            "s, train %.1f s; text 0 (%.2f): ",
            (long long)report->round, demo_report_value(report, "reward"),
            demo_report_value(report, "kl"), demo_report_value(report, "response_length"),
            p->seconds[0], p->seconds[1], p->seconds[2], o->score[0]);
    const demo_words words = demo_rank_words(r);
    char *text = demo_tokens_as_text(&words, o->set.documents[0].ids + o->prompt[0],
                                     o->set.documents[0].tokens - o->prompt[0]);
    demo_text_print(stderr, text);
    free(text);
    fputc('\n', stderr);
}

/* Adds the metrics of a rollout and its updates to the report. */
static void demo_rollout_figures(demo_rank *r, demo_report *report) {
    const demo_ppo *p = demo_ppo_of(r);
    const demo_rollout *o = &p->rollout;
    double back = 0;
    for (int64_t i = 0; i < o->entries; i++) back += o->entry[i * ENTRY + REWARD];
    demo_report_add(report, "rollout", (double)report->round, DEMO_PLACE);
    demo_report_add(report, "step", (double)r->step, DEMO_PLACE);
    demo_report_add(report, "reward", seqpar_mean(o->score, o->texts), DEMO_EXACT);
    demo_report_add(report, "return", back / (double)o->texts, DEMO_EXACT);
    demo_report_add(report, "kl", seqpar_mean(o->kl, o->texts), DEMO_EXACT);
    demo_report_add(report, "kl_coef", p->kl.coef, DEMO_EXACT);
    demo_report_add(report, "response_length", (double)o->entries / (double)o->texts,
                    DEMO_EXACT);
    demo_report_add(report, "policy_loss", p->policy[LOSS_OF], DEMO_EXACT);
    demo_report_add(report, "clipfrac", p->policy[CLIPPED], DEMO_EXACT);
    demo_report_add(report, "entropy", p->policy[ENTROPY_OF], DEMO_EXACT);
    demo_report_add(report, "critic_loss", p->value[LOSS_OF], DEMO_EXACT);
    demo_report_add(report, "grad_norm", r->optim.norm, DEMO_EXACT);
    if (r->job->config.aux_loss_coef > 0 && r->model.config.experts)
        demo_report_add(report, "aux_loss", r->experts.loss, DEMO_EXACT);
    if (p->critic_experts.loss > 0) /* rank 0 may lack the critic's config */
        demo_report_add(report, "critic_aux_loss", p->critic_experts.loss, DEMO_EXACT);
    if (demo_ppo_options(r)->pretrain_data)
        demo_report_add(report, "ptx_loss", p->policy[PRETRAINING_LOSS], DEMO_EXACT);
    if (demo_ppo_options(r)->dynamic_filtering)
        demo_report_add(report, "prompts_drawn", (double)p->drawn, DEMO_WHOLE);
    demo_report_add(report, "generate_seconds", p->seconds[0], DEMO_THOUSANDTHS);
    demo_report_add(report, "score_seconds", p->seconds[1], DEMO_THOUSANDTHS);
    demo_report_add(report, "train_seconds", p->seconds[2], DEMO_THOUSANDTHS);
    if (demo_who_generates(r) == DEMO_GENERATOR)
        demo_report_add(report, "hand_over_seconds", p->seconds[3], DEMO_THOUSANDTHS);
    demo_report_add(report, "peak_bytes", (double)demo_peak_bytes(r), DEMO_WHOLE);
}

static void demo_rollout_log(demo_rank *r, int64_t number) {
    const demo_ppo *p = demo_ppo_of(r);
    demo_report report = {.phase = "train",
                          .step = r->step,
                          .round = number + 1,
                          .tokens = p->rollout.entries,
                          .seconds = p->seconds[0] + p->seconds[1] + p->seconds[2]};
    if (r->world->rank) return;
    demo_sample *samples = demo_samples_of(r, &report.sample_count);
    report.samples = samples;
    demo_rollout_figures(r, &report);
    demo_log(r, &report);
    if (!number || (number + 1) % r->job->config.logging_steps == 0)
        demo_rollout_say(r, &report);
    demo_samples_print(stderr, &report, demo_ppo_options(r)->n_samples_per_prompt);
    demo_samples_free(samples, report.sample_count);
}

/* One rollout and its optimizer steps. There are no steps if filtering has used up the prompts
   or a reward server failed. */
static seqpar_status demo_ppo_rollout(demo_rank *r, int64_t number) {
    demo_ppo *p = demo_ppo_of(r);
    double began = demo_seconds(), kl = 0;
    p->seconds[0] = p->seconds[3] = 0;
    seqpar_status status = demo_rollout_draw(r);
    if (status || p->used_up || p->given_up) return status;
    status = demo_experience(r);
    p->seconds[1] = demo_seconds() - began - p->seconds[0];
    if (!status) status = demo_updates(r, number);
    p->seconds[2] = demo_seconds() - began - p->seconds[0] - p->seconds[1];
    if (status) return status;
    demo_rollout_log(r, number);
    /* the KL controller gets the mean over all tokens, not over texts: long texts weigh more */
    for (int64_t i = 0; i < p->rollout.entries; i++)
        kl += p->rollout.entry[i * ENTRY + KL] / (double)p->rollout.entries;
    kl_controller_update(&p->kl, kl, p->rollout.texts);
    return SEQPAR_OK;
}

/* Optimizer steps per rollout; the same number in every rollout. */
static int64_t demo_ppo_steps(const demo_job *job) {
    const demo_ppo_config *p = (const demo_ppo_config *)job->options;
    return (int64_t)job->config.max_epochs *
           (p->rollout_batch_size * p->n_samples_per_prompt / job->config.train_batch_size);
}

/* Sets the numbers of rollouts and of optimizer steps. */
static void demo_ppo_count(demo_job *job) {
    const demo_ppo_config *p = (const demo_ppo_config *)job->options;
    demo_config *c = &job->config;
    int64_t texts = p->rollout_batch_size * p->n_samples_per_prompt;
    if (c->train_batch_size > texts) c->train_batch_size = texts;
    /* with filtering, a rollout takes no fixed number of prompts */
    job->epoch_units = p->dynamic_filtering ? job->usable_count : p->rollout_batch_size;
    job->round_steps = demo_ppo_steps(job);
    job->rounds = p->num_episodes * (job->usable_count / p->rollout_batch_size);
    job->last_step = job->total_steps = job->rounds * demo_ppo_steps(job);
    bool fewer = c->max_steps >= 0 && c->max_steps < job->total_steps;
    if (fewer) job->rounds = (c->max_steps + demo_ppo_steps(job) - 1) / demo_ppo_steps(job);
    demo_settle_often(job, job->rounds);
    job->eval_every = demo_eval_every(job, job->usable_count / p->rollout_batch_size);
    if (!fewer) return;
    job->total_steps = c->max_steps; /* this sets the length of the learning-rate schedule */
    job->last_step = job->rounds * demo_ppo_steps(job);
    if (job->last_step > job->total_steps && !job->rank)
        fprintf(stderr,
                "notice: a rollout is trained on in %lld steps, so training ends after step "
                "%lld, not %lld\n",
                (long long)demo_ppo_steps(job), (long long)job->last_step,
                (long long)job->total_steps);
}

/* Saves the critic in the subfolder "critic" of the checkpoint. */
static seqpar_status demo_ppo_save(demo_rank *r, demo_state *state, const char *folder) {
    demo_ppo *p = demo_ppo_of(r);
    char critic[1200];
    memcpy(&state->extra[0], &p->kl.coef, sizeof state->extra[0]);
    state->extra[1] = p->drawn;
    snprintf(critic, sizeof critic, "%s/critic", folder);
    seqpar_status status = demo_has_role(r, DEMO_CRITIC) && r->ctx.world->rank == 0
                               ? demo_make_folder(critic, r->ctx.error)
                               : SEQPAR_OK;
    return status || !demo_has_role(r, DEMO_CRITIC)
               ? status
               : demo_save_checkpoint(&r->ctx, demo_learner_of(&p->critic), &p->critic_optim,
                                      critic, state);
}

static seqpar_status demo_ppo_load_critic(demo_rank *r, int64_t step) {
    demo_ppo *p = demo_ppo_of(r);
    char folder[1200];
    demo_error why;
    demo_state state = {0};
    snprintf(folder, sizeof folder, "%s/global_step%lld/critic", r->job->config.ckpt_path,
             (long long)step);
    if (demo_model_compare(&p->critic.config, folder, &why))
        return seqpar_fail(r->ctx.error, SEQPAR_ERR_OPTION, "%s", why.text);
    seqpar_llama *critic = p->critic.adapters ? p->critic.adapters : &p->critic;
    return demo_load_checkpoint(&r->ctx, critic, &p->critic_optim, folder, step, &state);
}

/* Restores the state of PPO that a checkpoint adds to that of the model. */
static seqpar_status demo_ppo_load_state(demo_rank *r, const demo_state *state) {
    demo_ppo *p = demo_ppo_of(r);
    memcpy(&p->kl.coef, &state->extra[0], sizeof p->kl.coef);
    p->drawn = state->extra[1];
    const demo_ppo_config *c = demo_ppo_options(r);
    int64_t rollouts = state->step / demo_ppo_steps(r->job);
    int64_t all = INT64_MAX / 4 / c->n_samples_per_prompt;
    if (p->drawn < rollouts * c->rollout_batch_size || p->drawn > all ||
        !(p->kl.coef >= 0 && p->kl.coef <= 1e300))
        return seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_FORMAT,
                           "the checkpoint in %.300s says that %lld prompts were drawn and "
                           "the KL coefficient is %g, which is impossible; take another",
                           r->job->config.ckpt_path, (long long)p->drawn, p->kl.coef);
    return demo_has_role(r, DEMO_CRITIC) ? demo_ppo_load_critic(r, state->step) : SEQPAR_OK;
}

/* Writes the final models of actor and critic; the first rank of each group writes. */
static seqpar_status demo_ppo_write(demo_rank *r) {
    const demo_config *c = &r->job->config;
    demo_ppo *p = demo_ppo_of(r);
    const seqpar_llama *const models[] = {demo_has_role(r, DEMO_ACTOR) ? demo_learner(r) : NULL,
                                          r->saves_critic ? demo_learner_of(&p->critic) : NULL};
    static const char *const names[] = {"", "/critic"};
    seqpar_status status = SEQPAR_OK;
    for (int i = 0; !status && i < 2; i++) {
        char folder[1280];
        snprintf(folder, sizeof folder, "%s%s", c->save_path, names[i]);
        if (models[i]) status = demo_make_folder(folder, r->ctx.error);
        if (!status && models[i]) status = demo_save_model(r, models[i], folder, NULL);
    }
    return status || !c->plot_loss || r->world->rank ? status : demo_draw_loss(r);
}

/* Reports that filtering has used up the prompts, which ends training. It is an error if no
   step was done. */
static seqpar_status demo_say_used_up(demo_rank *r, int64_t rollouts) {
    const demo_ppo_config *c = demo_ppo_options(r);
    demo_ppo *p = demo_ppo_of(r);
    const double *range = c->dynamic_filtering_reward_range;
    int64_t kept = p->rollout.texts / c->n_samples_per_prompt;
    if (!r->step)
        return seqpar_fail(r->ctx.error, SEQPAR_ERR_OPTION,
                           "dynamic_filtering kept %lld of %lld prompts, a rollout needs %lld; "
                           "widen dynamic_filtering_reward_range (%g, %g), lower "
                           "rollout_batch_size or give more prompts",
                           (long long)kept, (long long)p->drawn,
                           (long long)c->rollout_batch_size, range[0], range[1]);
    if (r->world->rank == 0)
        demo_progress_say(&r->progress,
                          "notice: all %lld prompts are used up after %lld of %lld rollouts; "
                          "the %lld left with mean rewards inside (%g, %g) are too few for "
                          "another",
                          (long long)p->drawn, (long long)rollouts, (long long)r->job->rounds,
                          (long long)kept, range[0], range[1]);
    return SEQPAR_OK;
}

/* The training loop over rollouts. If a rollout could not be scored (given_up), its prompts are
   not counted as drawn, so a resumed run draws them again. */
static seqpar_status demo_ppo_train(demo_rank *r) {
    const demo_config *c = &r->job->config;
    demo_ppo *p = demo_ppo_of(r);
    int stop = 0, last = 0;
    int64_t i = r->step / demo_ppo_steps(r->job), drawn;
    seqpar_status status = SEQPAR_OK;
    if (!i || demo_evaluation_due(r->job, i)) status = demo_ppo_evaluate(r, i);
    if (!status) status = demo_stop_wanted(r, &stop);
    while (!status && !stop && !last && i < r->job->rounds) {
        drawn = p->drawn;
        status = demo_ppo_rollout(r, i);
        last = p->used_up;
        if (p->given_up) p->drawn = drawn;
        if (!status && last)
            status = demo_say_used_up(r, i);
        else if (!p->given_up)
            i++;
        if (!status) status = demo_stop_wanted(r, &stop);
        if (!status && r->step &&
            (stop || (!last && c->save_steps > 0 && i % c->save_steps == 0)))
            status = demo_checkpoint(r);
        if (!status && !stop && (last || demo_evaluation_due(r->job, i)))
            status = demo_ppo_evaluate(r, i);
    }
    if (!status && !stop) status = demo_finish(r, demo_ppo_write, &stop);
    r->stopped = stop;
    return status;
}

/* ---- opening and closing ---- */

/* Loads the weights of the critic and records their folder. */
static seqpar_status demo_critic_begin(demo_rank *r, const char *folder) {
    demo_ppo *p = demo_ppo_of(r);
    snprintf(p->critic_source, sizeof p->critic_source, "%s", folder ? folder : "");
    r->critic_source = folder ? p->critic_source : r->job->config.pretrain;
    seqpar_status status = demo_open_scorer(r, &p->critic, folder, false);
    if (!status && demo_definition_of(r->job)->padding)
        p->critic_untaught = demo_untaught(r->critic_source, p->critic.config.vocab);
    return status;
}

/* Opens the reward models. Without --critic_pretrain the critic starts from the weights of the
   first reward model. */
static seqpar_status demo_open_rewards(demo_rank *r) {
    const demo_ppo_config *c = demo_ppo_options(r);
    char first[DEMO_PATH_LIMIT + 1];
    seqpar_status status = SEQPAR_OK;
    if (c->reward_pretrain && demo_has_role(r, DEMO_CRITIC) && !c->critic_pretrain) {
        snprintf(first, sizeof first, "%.*s", (int)strcspn(c->reward_pretrain, ","),
                 c->reward_pretrain);
        status = demo_critic_begin(r, first);
    }
    return status ? status : demo_rewards_open(r);
}

/* The critic has its own adapters, with the actor's rank, alpha and targets. In a critic with
   experts only the targets in attention are used. */
static seqpar_status demo_critic_adapters(demo_rank *r) {
    demo_ppo *p = demo_ppo_of(r);
    seqpar_adapter_desc desc = r->job->adapter;
    if (p->critic.config.experts) desc.targets &= DEMO_LORA_ATTENTION;
    seqpar_status status = seqpar_llama_open_adapters(&r->ctx, &p->critic_adapters, &p->critic,
                                                      &desc, r->job->config.zero_stage == 3, 0);
    return status ? status
                  : demo_lora_begin(r, &p->critic, &p->critic_adapters, DEMO_OF_CRITIC);
}

static seqpar_status demo_open_critic(demo_rank *r) {
    const demo_ppo_config *c = demo_ppo_options(r);
    demo_ppo *p = demo_ppo_of(r);
    seqpar_optim_desc optim = r->optim.desc;
    if (c->critic.optim) {
        optim.kind = demo_optim_kind(c->critic.optim);
        optim.state_bits = demo_optim_bits(c->critic.optim);
    }
    if (c->critic.adam_betas[0] >= 0) {
        optim.beta1 = c->critic.adam_betas[0];
        optim.beta2 = c->critic.adam_betas[1];
    }
    if (c->critic.adam_eps >= 0) optim.eps = c->critic.adam_eps;
    if (c->critic.l2 >= 0) optim.decay = c->critic.l2;
    if (c->critic.max_norm >= 0) optim.max_norm = c->critic.max_norm;
    seqpar_status status = p->critic.tensors ? SEQPAR_OK
                                             : demo_critic_begin(r, c->critic_pretrain);
    if (!status && r->job->adapter.rank) status = demo_critic_adapters(r);
    const seqpar_llama *learner = demo_learner_of(&p->critic);
    return status ? status
                  : seqpar_optim_open(&r->ctx, &p->critic_optim, learner->tensors,
                                      learner->tensor_count, &optim);
}

/* Makes the dataset `mixed`: empty documents in place of the texts of a rollout, followed by
   the pretraining documents. */
static void demo_open_mixed(demo_rank *r) {
    const demo_ppo_config *c = demo_ppo_options(r);
    demo_dataset *mixed = &demo_ppo_of(r)->mixed;
    const demo_dataset *more = &c->pretraining;
    for (int64_t i = 0; i < c->rollout_batch_size * c->n_samples_per_prompt; i++)
        arrput(mixed->documents, (demo_document){0});
    for (int64_t i = 0; i < arrlen(more->documents); i++)
        arrput(mixed->documents, more->documents[i]);
}

static seqpar_status demo_ppo_reference_open(demo_rank *r, demo_reference *reference) {
    const demo_ppo_config *c = demo_ppo_options(r);
    seqpar_status status = SEQPAR_OK;
    if (demo_has_role(r, DEMO_REF))
        status = demo_reference_open(r, c->ref_pretrain,
                                     c->ref_offload || c->ref_reward_offload);
    if (r->own) *reference = *(demo_reference *)r->own;
    free(r->own);
    r->own = NULL;
    return status;
}

/* Opens the model on the generator ranks, each of which has all weights, and the communicator
   over which the first actor rank sends the weights. */
static seqpar_status demo_generators_open(demo_rank *r) {
    bool generates = demo_has_role(r, DEMO_GENERATOR);
    if (demo_who_generates(r) == DEMO_ACTOR) return SEQPAR_OK;
    seqpar_status status = generates ? seqpar_llama_open(&r->ctx, &r->model, &r->job->model)
                                     : SEQPAR_OK;
    if (!status && generates && r->job->adapter.rank) {
        status = seqpar_llama_open_adapters(&r->ctx, &r->adapters, &r->model, &r->job->adapter,
                                            0, 0);
        r->model.adapters = &r->adapters;
    }
    seqpar_comm *part = NULL;
    bool hands = generates || r->world->rank == 0;
    if (!status) status = seqpar_comm_split(r->world, hands, r->world->rank, &part);
    if (hands)
        demo_ppo_of(r)->handing = part;
    else
        seqpar_comm_free(part);
    return status;
}

/* Makes the digests of frozen models known to all ranks by a sum over all ranks: the first rank
   of the group that holds a model contributes its digest, all other ranks 0. */
static seqpar_status demo_ppo_digests(demo_rank *r) {
    int64_t digests[DEMO_REFERENCES] = {0};
    if (r->job->groups < 2) return SEQPAR_OK;
    if (!r->ctx.world->rank) memcpy(digests, r->reference, sizeof digests);
    seqpar_status status = seqpar_comm_sum_i64(r->world, digests, DEMO_REFERENCES);
    memcpy(r->reference, digests, sizeof digests);
    return status;
}

static seqpar_status demo_ppo_open(demo_rank *r) {
    const demo_ppo_config *c = demo_ppo_options(r);
    demo_ppo *p = (demo_ppo *)demo_alloc(1, sizeof *p);
    seqpar_status status = demo_ppo_reference_open(r, &p->reference);
    r->own = p;
    if (!status) status = demo_generators_open(r);
    p->kl = (kl_controller){c->init_kl_coef, c->kl_target, (double)c->kl_horizon};
    p->has_critic = !strcmp(c->advantage_estimator, "gae");
    if (demo_has_role(r, DEMO_CRITIC)) r->critic = &p->critic;
    if (!status) status = demo_open_rewards(r);
    r->saves_critic = c->save_value_network && demo_has_role(r, DEMO_CRITIC);
    if (!status && demo_has_role(r, DEMO_CRITIC)) status = demo_open_critic(r);
    if (!status) status = demo_ppo_digests(r);
    if (c->pretrain_data) demo_open_mixed(r);
    return status;
}

static void demo_ppo_close(demo_rank *r) {
    demo_ppo *p = demo_ppo_of(r);
    if (!p) return;
    demo_rollout_free(&p->rollout);
    arrfree(p->mixed.documents);
    if (p->critic_optim.blocks.tensors) seqpar_optim_close(&r->ctx, &p->critic_optim);
    if (p->critic_adapters.tensors) seqpar_llama_close(&r->ctx, &p->critic_adapters);
    if (p->critic.tensors) seqpar_llama_close(&r->ctx, &p->critic);
    demo_experts_free(&p->critic_experts);
    demo_rewards_close(r);
    for (int i = 0; i < ENTRY; i++) {
        arrfree(p->place[i]);
        arrfree(p->seen[i]);
    }
    seqpar_comm_free(p->handing);
    if (p->reference.there) seqpar_llama_close(&r->ctx, &p->reference.model);
    free(p);
    r->own = NULL;
}

/* Loads the pretraining text. All its tokens are supervised. */
static int demo_pretraining_load(const demo_job *job, demo_error *error) {
    demo_ppo_config *p = (demo_ppo_config *)job->options;
    demo_data_options options = demo_data_asked(job, p->pretrain_data, job->config.max_samples,
                                                p->pretrain_data_probs, DEMO_TOKENS_SFT);
    options.input_key = demo_named_key(job, "input_key", p->input_key);
    options.pretrain_mode = true;
    options.output_option = "input_key";
    options.length_option = "generate_max_len";
    return demo_data_load(&p->pretraining, p->pretrain_data, &options, error);
}

/* Makes the largest possible rollout: the longest prompts, each with a text of generate_max_len
   tokens. */
static void demo_rollout_longest(demo_rank *r) {
    const demo_ppo_config *c = demo_ppo_options(r);
    const demo_job *job = r->job;
    demo_rollout *o = &demo_ppo_of(r)->rollout;
    int64_t n = c->n_samples_per_prompt;
    int64_t *which = demo_longest_units(job, c->rollout_batch_size);
    demo_texts text = demo_texts_new(1, c->generate_max_len);
    text.ids[0] = (int32_t)c->generate_max_len;
    demo_rollout_new(o, c->rollout_batch_size * n);
    for (int64_t i = 0; i < c->rollout_batch_size * n; i++) {
        const demo_document *d = &job->train.documents[which[i / n]];
        seqpar_llama_prompt prompt = {d->ids, demo_prompt_tokens(r, d), i};
        demo_rollout_take(o, demo_text_document(&prompt, text.ids), text.logp, prompt.tokens, d,
                          0.0);
    }
    o->entry = (double *)demo_alloc(o->entries * ENTRY + 1, sizeof *o->entry);
    arrfree(which);
    demo_texts_free(&text);
}

/* The dry run of a rollout: generates texts, scores them by reward models, and takes the steps.
   No reward server is called. */
static seqpar_status demo_ppo_walk(demo_rank *r) {
    const demo_ppo_config *c = demo_ppo_options(r);
    demo_ppo *p = demo_ppo_of(r);
    demo_window w = {.set = &p->rollout.set};
    seqpar_status status = demo_draw(r, c->rollout_batch_size);
    if (!status) demo_rollout_longest(r);
    for (int64_t i = 0; !status && i < p->rollout.texts; i++) arrput(w.which, i);
    if (!status && p->rewards) status = demo_window_open(r, &w, 1, 0);
    for (p->scorer = 0; !status && p->scorer < p->rewards; p->scorer++)
        status = demo_add_scores(r, &w);
    demo_window_close(&w);
    r->step = c->freezing_actor_steps + 1; /* so that the actor is trained, too */
    if (!status) status = demo_experience(r);
    return status ? status : demo_updates(r, 0);
}

/* Loads the prompts. For training there must be at least rollout_batch_size. */
static int demo_ppo_load(const demo_job *job, demo_dataset *set, const char *paths,
                         int64_t max_samples, demo_error *error) {
    const demo_ppo_config *p = (const demo_ppo_config *)job->options;
    if (demo_prompts_read(job, set, paths, max_samples, error)) return -1;
    if (set == &job->eval) return 0;
    if (arrlen(set->documents) < p->rollout_batch_size)
        return demo_fail(error, "%lld prompts are fewer than rollout_batch_size %lld; lower it",
                         (long long)arrlen(set->documents), (long long)p->rollout_batch_size);
    double steps = (double)p->num_episodes *
                   (double)(arrlen(set->documents) / p->rollout_batch_size) *
                   job->config.max_epochs *
                   (double)(p->rollout_batch_size * p->n_samples_per_prompt);
    if (!(steps < 9e15))
        return demo_fail(error,
                         "num_episodes %lld and max_epochs %g make up to %g optimizer steps, "
                         "more than 9e15; lower them",
                         (long long)p->num_episodes, job->config.max_epochs, steps);
    if (p->pretrain_data && demo_pretraining_load(job, error)) return -1;
    return demo_sets_agree(job, &p->pretraining, p->pretrain_data, error);
}

/* Adds the pretraining text to the digest of the training data. */
static uint64_t demo_ppo_digest(const demo_job *job, const demo_dataset *set, uint64_t digest) {
    const demo_dataset *more = &((const demo_ppo_config *)job->options)->pretraining;
    return set == &job->eval || !arrlen(more->documents)
               ? digest
               : demo_digest_number(digest, (int64_t)demo_digest_documents(more));
}

/* Writes the folder that the critic starts from: its own, that of the first reward model, or
   that of the actor. False if there is no critic or no folder. */
static bool demo_ppo_beside(const demo_job *job, char *folder) {
    const demo_ppo_config *c = (const demo_ppo_config *)job->options;
    const char *from = c->critic_pretrain   ? c->critic_pretrain
                       : c->reward_pretrain ? c->reward_pretrain
                                            : job->config.pretrain;
    if (!from || strcmp(c->advantage_estimator, "gae")) return false;
    snprintf(folder, DEMO_PATH_LIMIT + 1, "%.*s", (int)strcspn(from, ","), from);
    return true;
}

/* Writes the names of the roles of a group, for messages. */
static void demo_ppo_group_name(const demo_job *job, int group, char text[64]) {
    static const char *const names[DEMO_ROLES] = {"actor", "reference", "critic", "reward",
                                                  "generator"};
    const demo_roles *roles = &((const demo_ppo_config *)job->options)->roles;
    *text = 0;
    for (int i = 0; i < DEMO_ROLES; i++) {
        if (roles->group[i] != group) continue;
        if (*text) strcat(text, " + ");
        strcat(text, names[i]);
    }
}

static const demo_objective demo_ppo_objective = {.unit = "texts",
                                                  .weight = "texts",
                                                  .measure = "",
                                                  .documents_per_unit = 1,
                                                  .columns = 1,
                                                  .kind = DEMO_TOKENS_PROMPTS,
                                                  .column = {"reward"},
                                                  .evaluates = "exact",
                                                  .round = "rollout",
                                                  .fixed = "max_epochs",
                                                  .needs_model = true,
                                                  .open = demo_ppo_open,
                                                  .close = demo_ppo_close,
                                                  .load = demo_ppo_load,
                                                  .digest = demo_ppo_digest,
                                                  .prepare = demo_ppo_prepare,
                                                  .count = demo_ppo_count,
                                                  .train = demo_ppo_train,
                                                  .walk = demo_ppo_walk,
                                                  .save = demo_ppo_save,
                                                  .load_state = demo_ppo_load_state,
                                                  .group_name = demo_ppo_group_name,
                                                  .beside = demo_ppo_beside,
                                                  .loss_text = demo_ppo_text};
#endif
