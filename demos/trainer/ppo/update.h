/* SPDX-License-Identifier: MIT OR Unlicense */
/* update.h - from a rollout to optimizer steps of actor and critic: advantages, losses,
   pretraining documents in the same step (ptx), moving average of the weights. */
#ifndef DEMO_UPDATE_H
#define DEMO_UPDATE_H
#include "passes.h"

/* ---- advantages: the same arithmetic on every rank ---- */

/* Computes shaped rewards, advantages and returns of one text, from the KL of its tokens. */
static void demo_text_advantages(demo_rank *r, int64_t i, double scalar, double coef,
                                 double gamma) {
    const demo_ppo_config *c = demo_ppo_options(r);
    demo_rollout *o = &demo_ppo_of(r)->rollout;
    int64_t n = demo_text_tokens(o, i);
    reward_shape shape = {coef, c->reward_clip_range[0], c->reward_clip_range[1]};
    gae_desc discount = {gamma, c->lambd};
    double *e = o->entry + o->first[i] * ENTRY;
    double *line = (double *)demo_alloc(5 * n, sizeof *line);
    double *kl = line + n, *value = kl + n, *advantage = value + n, *back = advantage + n;
    for (int64_t t = 0; t < n; t++) {
        kl[t] = e[t * ENTRY + KL];
        value[t] = e[t * ENTRY + VALUE];
    }
    shaped_rewards(line, kl, n, scalar, &shape);
    gae(advantage, back, line, demo_ppo_of(r)->has_critic ? value : NULL, n, &discount);
    for (int64_t t = 0; t < n; t++) {
        e[t * ENTRY + REWARD] = line[t];
        e[t * ENTRY + ADVANTAGE] = advantage[t];
        e[t * ENTRY + RETURN] = back[t];
    }
    free(line);
}

static void demo_whiten_advantages(demo_rollout *o, int how) {
    double *x = (double *)demo_alloc(o->entries, sizeof *x);
    for (int64_t i = 0; i < o->entries; i++) x[i] = o->entry[i * ENTRY + ADVANTAGE];
    whiten(x, o->entries, how);
    for (int64_t i = 0; i < o->entries; i++) o->entry[i * ENTRY + ADVANTAGE] = x[i];
    free(x);
}

/* Computes KL, rewards, advantages and returns of all texts. Estimators that compare the texts
   of a prompt do not discount, as in OpenRLHF. */
static seqpar_status demo_advantages(demo_rank *r) {
    static const char *const estimators[] = {"gae",  "reinforce",  "reinforce_baseline",
                                             "rloo", "group_norm", "dr_grpo"},
                             *const kls[] = {"k1", "k2", "k3"};
    static const int groups[] = {
        -1, -1, ADVANTAGE_MEAN, ADVANTAGE_RLOO, ADVANTAGE_GRPO, ADVANTAGE_MEAN};
    const demo_ppo_config *c = demo_ppo_options(r);
    const demo_definition *by = demo_definition_of(r->job);
    demo_ppo *p = demo_ppo_of(r);
    demo_rollout *o = &p->rollout;
    int estimator = demo_pick(c->advantage_estimator, estimators, 6);
    int kl = demo_pick(c->kl_estimator, kls, 3);
    double *scalar = (double *)demo_alloc(o->texts, sizeof *scalar);
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; i < o->texts; i++) {
        int64_t n = demo_text_tokens(o, i);
        for (int64_t t = 0; t < n; t++) {
            double *e = o->entry + (o->first[i] + t) * ENTRY;
            e[KL] = demo_defined_kl(by, e[OLD_LOGP], e[REF_LOGP_OF], kl, NULL);
            o->kl[i] += e[KL] / (double)n;
        }
        scalar[i] = o->score[i];
    }
    for (int64_t i = 0; !status && groups[estimator] >= 0 && i < o->texts;
         i += c->n_samples_per_prompt)
        status = group_advantages(r->ctx.error, scalar + i, o->score + i,
                                  c->n_samples_per_prompt, groups[estimator], by->group_eps);
    for (int64_t i = 0; !status && i < o->texts; i++)
        demo_text_advantages(r, i, scalar[i], c->use_kl_loss ? 0.0 : p->kl.coef,
                             groups[estimator] >= 0 ? 1.0 : c->gamma);
    if (!status && estimator <= 2)
        demo_whiten_advantages(o, c->no_advantage_std_norm ? WHITEN_MEAN_ONLY : by->whiten);
    free(scalar);
    return status;
}

/* Returns why the actor's log-probs must be computed by a forward pass; NULL if not. If
   training sums in the same order as the sampler, both give the same bits, and the log-probs
   from sampling are used. */
static const char *demo_old_pass(const demo_rank *r) {
    const demo_config *c = &r->job->config;
    return demo_ppo_options(r)->recompute_old_logp ? "--recompute_old_logp"
           : c->relaxed_attention ? "--relaxed_attention sums in a different order than the "
                                    "sampler"
           : c->cublas            ? "cuBLAS rounds products of different shapes differently"
           : !seqpar_layout_at(r->job->layout)->whole_cells
               ? "this layout sums in a different order than the sampler"
               : NULL;
}

static void demo_take_sampled(demo_rollout *o) {
    for (int64_t i = 0; i < o->entries; i++) o->entry[i * ENTRY + OLD_LOGP] = o->sampled[i];
}

/* Computes for every generated token what the updates need: log-probs under actor and
   reference, values, and from these the advantages. */
static seqpar_status demo_experience(demo_rank *r) {
    demo_ppo *p = demo_ppo_of(r);
    demo_window w = {.set = &p->rollout.set};
    static const int roles[] = {DEMO_ACTOR, DEMO_REF, DEMO_CRITIC};
    static const int columns[] = {OLD_LOGP, REF_LOGP_OF, VALUE};
    static const demo_rows_fn passes[] = {demo_actor_rows, demo_reference_rows,
                                          demo_critic_rows};
    for (int64_t i = 0; i < p->rollout.texts; i++) arrput(w.which, i);
    seqpar_status status = demo_window_open(r, &w, 1, 0);
    int first = !demo_old_pass(r);
    if (first) demo_take_sampled(&p->rollout);
    /* groups of ranks run their passes concurrently and gather the results afterwards */
    for (int i = first; !status && i < 3; i++) {
        p->column = columns[i];
        if (demo_has_role(r, roles[i])) status = demo_window_values(r, &w, passes[i]);
    }
    for (int i = first; !status && i < (p->has_critic ? 3 : 2); i++)
        status = demo_share_entries(r, columns[i]);
    demo_window_close(&w);
    return status ? status : demo_advantages(r);
}

/* ---- losses: of a token, and of a whole text ---- */

typedef struct {
    double loss, slope, clipped;
} demo_text_loss;

typedef struct {
    demo_rank *r;
    demo_window *w;
    seqpar_llama *model;
    seqpar_optim *optim;
    demo_experts *experts;
    seqpar_aggregate aggregate; /* of the policy or value loss over the generated tokens */
    seqpar_aggregate added;     /* of the KL and entropy terms */
    int64_t pretraining;        /* tokens of the pretraining documents */
    /* (texts) GSPO's losses; NULL: the loss has a ratio per token */
    demo_text_loss *text;
    double *sums;
    int64_t *leaf;
} demo_update;

/* Columns of the means. The last three count tokens of the actor: all tokens, those with ratio
   exactly 1, and those whose log-prob is bit for bit that of the reference. */
enum {
    LOSS_OF,
    CLIPPED,
    ENTROPY_OF,
    KL_OF,
    PRETRAINING_LOSS,
    ACTOR_TOKENS,
    RATIO_ONE,
    KL_ZERO
};

/* The clip range: eps_clip replaces a 0 in eps_clip_low_high. */
static seqpar_policy_desc demo_clip(const demo_job *job) {
    const demo_ppo_config *c = (const demo_ppo_config *)job->options;
    return demo_defined_clip(
        demo_definition_of(job), demo_is_gspo(c),
        c->eps_clip_low_high[0] > 0 ? c->eps_clip_low_high[0] : c->eps_clip,
        c->eps_clip_low_high[1] > 0 ? c->eps_clip_low_high[1] : c->eps_clip, c->dual_clip);
}

/* GSPO (Zheng et al. 2025): the ratio of a text is exp of the mean of logp - old_logp over its
   n tokens, here change / n. Advantages can differ between tokens (KL penalty, GAE), so the
   loss is the mean over tokens. slope: n times the derivative of the loss by the sum of the
   log-probs. */
static demo_text_loss demo_gspo_loss(const double *entries, int64_t n, double change,
                                     const seqpar_policy_desc *clip) {
    demo_text_loss text = {0};
    for (int64_t t = 0; t < n; t++) {
        seqpar_policy_result p = seqpar_policy_loss(change / (double)n, 0.0,
                                                    entries[t * ENTRY + ADVANTAGE], clip);
        text.loss += p.loss / (double)n;
        text.slope += p.dlogp / (double)n;
        text.clipped += p.clipped / (double)n;
    }
    return text;
}

/* Computes GSPO's losses of all texts in these rows. First sums logp - old_logp of each text
   over the ranks that hold tokens of it. */
static seqpar_status demo_gspo_texts(demo_update *u, const seqpar_llama_batch *b,
                                     const seqpar_row *rows, int64_t count,
                                     const demo_prediction *places, const double *logp) {
    const demo_rollout *o = &demo_ppo_of(u->r)->rollout;
    seqpar_policy_desc clip = demo_clip(u->r->job);
    int64_t documents = arrlen(u->w->which);
    seqpar_segments segments = {.width = 1};
    double *change = (double *)demo_alloc(documents + b->tokens + 1, sizeof *change);
    double *term = change + documents;
    for (int64_t t = 0; t < b->tokens; t++)
        if (places[t].text >= 0 && places[t].text < o->texts)
            term[t] = logp[t] - o->entry[places[t].entry * ENTRY + OLD_LOGP];
    seqpar_status status = seqpar_segments_add(u->r->ctx.error, &segments, term, b->share);
    if (!status) status = seqpar_segments_sum(u->r->ctx.sp, change, documents, &segments);
    for (int64_t row = 0, doc = 0, unit;
         !status && (unit = demo_next_unit(rows, count, 1, &row, &doc)) >= 0;) {
        int64_t text = u->w->which[unit];
        if (text < o->texts)
            u->text[text] = demo_gspo_loss(o->entry + o->first[text] * ENTRY,
                                           demo_text_tokens(o, text), change[unit], &clip);
    }
    seqpar_segments_free(&segments);
    free(change);
    return status;
}

/* Computes the columns of a generated token of the actor, and the derivatives of its loss by
   log-prob and entropy. The caller multiplies all of them by the weight of the token. */
static void demo_policy_seed(const demo_update *u, demo_prediction place, double logp,
                             double entropy, double *columns, double seed[2]) {
    static const char *const kls[] = {"k1", "k2", "k3"};
    const demo_ppo_config *c = demo_ppo_options(u->r);
    const demo_rollout *o = &demo_ppo_of(u->r)->rollout;
    const double *e = o->entry + place.entry * ENTRY;
    seqpar_policy_desc clip = demo_clip(u->r->job);
    seqpar_policy_result p = seqpar_policy_loss(logp, e[OLD_LOGP], e[ADVANTAGE], &clip);
    demo_text_loss own = {p.loss, p.dlogp, (double)p.clipped};
    if (u->text) own = u->text[place.text];
    double dkl = 0;
    double kl = demo_defined_kl(demo_definition_of(u->r->job), logp, e[REF_LOGP_OF],
                                demo_pick(c->kl_estimator, kls, 3), &dkl);
    double coef = c->use_kl_loss ? demo_ppo_of(u->r)->kl.coef : 0.0;
    int64_t n = demo_text_tokens(o, place.text);
    /* the KL and entropy terms may have another weight than the loss; the caller multiplies by
       that of the loss */
    const demo_definition *by = demo_definition_of(u->r->job);
    double added = demo_defined_weight(by, &u->added, n) /
                   demo_defined_weight(by, &u->aggregate, n);
    columns[LOSS_OF] = own.loss + added * coef * kl - added * c->entropy_loss_coef * entropy;
    columns[CLIPPED] = own.clipped;
    columns[ENTROPY_OF] = added * entropy;
    columns[KL_OF] = added * kl;
    seed[0] = own.slope + added * coef * dkl;
    seed[1] = -added * c->entropy_loss_coef;
}

/* Computes what a local token adds to the means of the step, and the derivatives of the step's
   loss by its log-prob (critic: its value) and its entropy. */
static void demo_token_seed(const demo_update *u, demo_prediction place, double x,
                            double entropy, double columns[UPDATE_COLUMNS], double seed[2]) {
    const demo_rollout *o = &demo_ppo_of(u->r)->rollout;
    if (place.text < 0) return;
    if (place.text >= o->texts) {
        columns[PRETRAINING_LOSS] = -x / (double)u->pretraining;
        seed[0] = -demo_ppo_options(u->r)->ptx_coef / (double)u->pretraining;
        return;
    }
    if (u->model->config.score) {
        const double *e = o->entry + place.entry * ENTRY;
        seqpar_value_result v = seqpar_value_loss(x, e[VALUE], e[RETURN],
                                                  demo_ppo_options(u->r)->value_clip);
        columns[LOSS_OF] = v.loss;
        columns[CLIPPED] = v.clipped;
        seed[0] = v.dvalue;
    } else
        demo_policy_seed(u, place, x, entropy, columns, seed);
    double weight = demo_defined_weight(demo_definition_of(u->r->job), &u->aggregate,
                                        demo_text_tokens(o, place.text));
    for (int c = 0; c < UPDATE_COLUMNS; c++) columns[c] *= weight;
    seed[0] *= weight;
    seed[1] *= weight;
    if (u->model->config.score) return;
    const double *e = o->entry + place.entry * ENTRY;
    columns[ACTOR_TOKENS] = 1;
    columns[RATIO_ONE] = x == e[OLD_LOGP];
    columns[KL_ZERO] = x == e[REF_LOGP_OF];
}

/* ---- a step ---- */

/* Computes the seeds of the local tokens in host (2, tokens), and sums the columns over the
   tokens of each piece. */
static seqpar_status demo_update_seeds(demo_update *u, const seqpar_llama_batch *b,
                                       const seqpar_row *rows, int64_t count, double *host) {
    demo_rank *r = u->r;
    double *x = (double *)demo_alloc(2 * b->tokens + 1, sizeof *x), *entropy = x + b->tokens;
    demo_prediction *places = demo_predictions(&demo_ppo_of(r)->rollout, u->w, b, rows);
    seqpar_status status = SEQPAR_OK;
    seqpar_device_read(r->device, x, u->model->config.score ? b->score.data : b->logp.data, 0,
                       b->tokens, demo_value_dtype(r, u->model));
    if (!u->model->config.score)
        seqpar_device_read(r->device, entropy, b->entropy.data, 0, b->tokens,
                           r->device->accumulator);
    if (u->text) status = demo_gspo_texts(u, b, rows, count, places, x);
    for (int64_t i = 0; !status && i < b->share->count; i++) {
        const seqpar_piece *p = &b->share->pieces[i];
        double sum[UPDATE_COLUMNS] = {0};
        for (int64_t t = p->local; t < p->local + p->count; t++) {
            double columns[UPDATE_COLUMNS] = {0}, seed[2] = {0};
            demo_token_seed(u, places[t], x[t], entropy[t], columns, seed);
            host[t] = seed[0];
            host[b->tokens + t] = seed[1];
            for (int c = 0; c < UPDATE_COLUMNS; c++) sum[c] += columns[c];
        }
        arrput(u->leaf, p->leaf);
        for (int c = 0; c < UPDATE_COLUMNS; c++) arrput(u->sums, sum[c]);
    }
    free(places);
    free(x);
    return status;
}

/* Runs forward and backward on one micro-batch of the mini-batch. */
static seqpar_status demo_update_micro(demo_update *u, int64_t index) {
    demo_rank *r = u->r;
    seqpar_llama_batch_desc run = demo_batch_desc_of(r, index);
    if (u->model->config.score) run.untaught = demo_ppo_of(r)->critic_untaught;
    seqpar_llama_batch b = {0};
    seqpar_vocab_seeds seeds = {0};
    demo_seeds buffers = {0};
    int64_t first, count;
    seqpar_status status = seqpar_step_rows(&r->ctx, u->optim, index, &first, &count);
    if (!status)
        status = seqpar_llama_open_batch(&r->ctx, u->model, &b, u->w->batch.row + first, count,
                                         &run);
    double *host = (double *)demo_alloc(2 * b.tokens + 1, sizeof *host);
    if (!status) status = seqpar_llama_forward(&r->ctx, u->model, &b, 1);
    if (!status) status = seqpar_llama_values(&r->ctx, u->model, &b);
    if (!status) status = demo_update_seeds(u, &b, u->w->batch.row + first, count, host);
    if (!status)
        status = demo_seeds_write(r, &buffers, 2, host, b.tokens,
                                  demo_value_dtype(r, u->model));
    seeds.dlogp = buffers.part[0].data;
    if (demo_ppo_options(r)->entropy_loss_coef > 0 && !u->model->config.score)
        seeds.dentropy = buffers.part[1].data;
    if (!status)
        status = demo_backward(&r->ctx, u->experts, u->model, &b, u->optim, index, &seeds);
    demo_seeds_free(r, &buffers);
    free(host);
    seqpar_llama_close_batch(&r->ctx, u->model, &b);
    return status;
}

/* Sets over how many texts and tokens the losses are averaged. The critic's loss is always a
   mean over tokens. */
static void demo_update_counts(demo_update *u) {
    const demo_rollout *o = &demo_ppo_of(u->r)->rollout;
    const demo_ppo_config *c = demo_ppo_options(u->r);
    const demo_definition *by = demo_definition_of(u->r->job);
    bool actor = !u->model->config.score, gspo = actor && demo_is_gspo(c);
    u->aggregate = (seqpar_aggregate){.kind = SEQPAR_AGGREGATE_TOKEN_MEAN,
                                      .length_max = c->generate_max_len};
    if (actor)
        u->aggregate.kind = demo_defined_mean(by, c->loss_agg_mode, gspo,
                                              c->advantage_estimator);
    if (gspo) u->text = (demo_text_loss *)demo_alloc(o->texts, sizeof *u->text);
    for (int64_t i = 0; i < arrlen(u->w->which); i++) {
        if (u->w->which[i] >= o->texts) continue;
        u->aggregate.documents++;
        u->aggregate.tokens += demo_text_tokens(o, u->w->which[i]);
    }
    u->added = u->aggregate;
    if (by->added_by_tokens) u->added.kind = SEQPAR_AGGREGATE_TOKEN_MEAN;
    u->pretraining = u->w->batch.counts.supervised - u->aggregate.tokens;
}

/* One optimizer step of actor or critic on a mini-batch; means (UPDATE_COLUMNS). */
static seqpar_status demo_update_step(demo_update *u, double lr, double *means) {
    demo_rank *r = u->r;
    int64_t accumulation = u->w->batch.micro_batches;
    demo_update_counts(u);
    seqpar_status status = seqpar_step_begin(&r->ctx, u->optim, u->w->batch.row,
                                             u->w->batch.rows, r->job->layout, accumulation);
    const seqpar_llama_batch_desc run = demo_batch_desc_of(r, 0);
    if (!status && demo_experts_balanced(u->model, r->job->config.aux_loss_coef))
        status = demo_experts_begin(&r->ctx, u->experts, u->model, u->optim, u->w->batch.row,
                                    accumulation, &run, r->job->config.aux_loss_coef);
    for (int64_t i = 0; !status && i < accumulation; i++) status = demo_update_micro(u, i);
    if (!status)
        status = seqpar_sum_pieces(&r->ctx, means, u->leaf, u->sums, arrlen(u->leaf),
                                   UPDATE_COLUMNS);
    if (!status && u->experts->on) status = demo_experts_end(&r->ctx, u->experts);
    if (!status && !(fabs(means[LOSS_OF] + means[PRETRAINING_LOSS]) <= 1e300))
        status = seqpar_fail(r->ctx.error, SEQPAR_ERR_NOT_FINITE,
                             "step %lld: the loss of the %s is %g; lower its learning rate",
                             (long long)r->step + 1,
                             u->model->config.score ? "critic" : "actor",
                             means[LOSS_OF] + means[PRETRAINING_LOSS]);
    int64_t elements;
    void *params = seqpar_llama_trainable(u->model, &elements);
    if (!status) status = seqpar_step_end(&r->ctx, u->optim, params, elements, lr);
    arrfree(u->leaf);
    arrfree(u->sums);
    free(u->text);
    return status;
}

/* Packs the texts of a mini-batch and train_batch_size pretraining documents into one window,
   so that one optimizer step sums the gradients of both. */
static seqpar_status demo_mixed_open(demo_rank *r, demo_window *mixed, const demo_window *w) {
    demo_ppo *p = demo_ppo_of(r);
    int64_t documents = arrlen(demo_ppo_options(r)->pretraining.documents);
    int64_t batch = r->job->config.train_batch_size < documents
                        ? r->job->config.train_batch_size
                        : documents;
    int64_t *which = demo_stream(documents, batch, (uint64_t)r->job->config.seed + 2,
                                 r->step * batch, batch);
    memcpy(p->mixed.documents, p->rollout.set.documents,
           (size_t)p->rollout.texts * sizeof *p->mixed.documents);
    mixed->set = &p->mixed;
    for (int64_t i = 0; i < arrlen(w->which); i++) arrput(mixed->which, w->which[i]);
    for (int64_t i = 0; i < batch; i++) arrput(mixed->which, p->rollout.texts + which[i]);
    free(which);
    return demo_window_open(r, mixed, 1, 0);
}

/* Prints a check at the first step. No weight has changed yet, so all ratios must be 1, and the
   KL to the initial model must be 0. */
static void demo_say_first(const demo_rank *r, const double *means) {
    const char *pass = demo_old_pass(r);
    fprintf(
        stderr,
        "first step: ratio exactly 1 for %.0f of %.0f tokens, KL against the reference exactly "
        "0 for %.0f%s%s\n",
        means[RATIO_ONE], means[ACTOR_TOKENS], means[KL_ZERO],
        pass ? "; old log-probs are not the sampler's: " : "", pass ? pass : "");
}

/* One optimizer step of the actor on a mini-batch, mixed with pretraining documents if there
   are any. */
static seqpar_status demo_actor_step(demo_rank *r, demo_window *w) {
    const demo_config *c = &r->job->config;
    demo_ppo *p = demo_ppo_of(r);
    demo_window mixed = {0};
    demo_update actor = {
        .r = r, .w = w, .model = &r->model, .optim = &r->optim, .experts = &r->experts};
    double factor = seqpar_lr_factor(r->job->lr_kind, r->step, r->job->warmup,
                                     r->job->total_steps, c->min_lr_ratio);
    seqpar_status status = SEQPAR_OK;
    if (demo_ppo_options(r)->pretrain_data) status = demo_mixed_open(r, actor.w = &mixed, w);
    if (!status)
        status = demo_update_step(&actor, demo_ppo_options(r)->actor_learning_rate * factor,
                                  p->policy);
    if (!status && r->step == 0 && r->world->rank == 0) demo_say_first(r, p->policy);
    if (!status) status = demo_average_step(&r->ctx, demo_learner(r), &r->average);
    demo_window_close(&mixed);
    return status;
}

static double demo_critic_rate(const demo_rank *r) {
    const demo_ppo_config *c = demo_ppo_options(r);
    const demo_job *job = r->job;
    const char *own = c->critic.lr_scheduler;
    int kind = own ? demo_lr_kind(own) : job->lr_kind;
    int64_t warmup = own && !strcmp(own, "constant") ? 0
                     : c->critic.lr_warmup_ratio >= 0
                         ? (int64_t)ceil(c->critic.lr_warmup_ratio * (double)job->total_steps)
                         : job->warmup;
    double floor_ratio = c->critic.min_lr_ratio >= 0 ? c->critic.min_lr_ratio
                                                     : job->config.min_lr_ratio;
    return c->critic_learning_rate *
           seqpar_lr_factor(kind, r->step, warmup, job->total_steps, floor_ratio);
}

/* Trains on a mini-batch: the actor, unless it is frozen, and the critic. */
static seqpar_status demo_mini_batch(demo_rank *r, demo_window *w) {
    demo_ppo *p = demo_ppo_of(r);
    demo_update critic = {.r = r,
                          .w = w,
                          .model = &p->critic,
                          .optim = &p->critic_optim,
                          .experts = &p->critic_experts};
    seqpar_status status = SEQPAR_OK;
    bool frozen = r->step / r->job->round_steps < demo_ppo_options(r)->freezing_actor_steps;
    if (!frozen && demo_has_role(r, DEMO_ACTOR)) status = demo_actor_step(r, w);
    if (!status && demo_has_role(r, DEMO_CRITIC))
        status = demo_update_step(&critic, demo_critic_rate(r), p->value);
    if (!status) r->step++;
    return status;
}

/* Broadcasts the critic's losses from the critic's group, since rank 0 reports them. */
static seqpar_status demo_share_means(demo_rank *r) {
    demo_ppo *p = demo_ppo_of(r);
    int64_t first, ranks;
    if (!p->has_critic || demo_ppo_options(r)->roles.group[DEMO_CRITIC] == 0) return SEQPAR_OK;
    demo_role_group(r, DEMO_CRITIC, &first, &ranks);
    seqpar_status status = seqpar_comm_broadcast(r->world, p->value, sizeof p->value, first);
    double *balance = &p->critic_experts.loss;
    return status ? status : seqpar_comm_broadcast(r->world, balance, sizeof *balance, first);
}

/* Trains max_epochs passes over the rollout, in mini-batches of train_batch_size texts. Each
   pass has a new random order. */
static seqpar_status demo_updates(demo_rank *r, int64_t number) {
    const demo_config *c = &r->job->config;
    demo_ppo *p = demo_ppo_of(r);
    int64_t texts = p->rollout.texts;
    int64_t batch = c->train_batch_size < texts ? c->train_batch_size : texts;
    int64_t *order = (int64_t *)demo_alloc(texts, sizeof *order);
    seqpar_status status = SEQPAR_OK;
    for (int64_t epoch = 0; !status && epoch < (int64_t)c->max_epochs; epoch++) {
        seqpar_shuffle(order, texts, (uint64_t)c->seed + 1,
                       (uint64_t)(number * (int64_t)c->max_epochs + epoch));
        for (int64_t first = 0; !status && first + batch <= texts; first += batch) {
            demo_window w = {.set = &p->rollout.set};
            for (int64_t i = 0; i < batch; i++) arrput(w.which, order[first + i]);
            status = demo_window_open(r, &w, 1, 0);
            if (!status) status = demo_mini_batch(r, &w);
            demo_window_close(&w);
        }
    }
    free(order);
    return status ? status : demo_share_means(r);
}
#endif
