/* SPDX-License-Identifier: MIT OR Unlicense */
/* ppo.h - PPO and its critic-free relatives: rollouts, rewards, advantages, updates.
 *
 * A rollout: every rank generates its share of the texts, all ranks get all of them. Log-probs, values and scores are then
 * taken on packed rows split like those of training, and brought together token by token, so that everything that looks at
 * more than one token (KL, rewards, GAE, groups, whitening) is the same plain arithmetic on every rank. Random numbers hang
 * on the text's number and the token's position: D x P changes no text. */
#ifndef DEMO_PPO_H
#define DEMO_PPO_H
#include "preference.h"

typedef struct {
    const char *input_key, *label_key, *ref_pretrain, *reward_pretrain, *reward_rule, *critic_pretrain, *value_head_prefix, *advantage_estimator, *kl_estimator;
    bool use_kl_loss, no_advantage_std_norm;
    int64_t rollout_batch_size, n_samples_per_prompt, num_episodes, prompt_max_len, generate_max_len, kl_horizon, freezing_actor_steps, top_k;
    double actor_learning_rate, critic_learning_rate, eps_clip, value_clip, lambd, gamma, init_kl_coef, kl_target, temperature, top_p, dual_clip, entropy_loss_coef;
    double reward_clip_range[2], eps_clip_low_high[2];
} demo_ppo_config;

#define DEMO_PPO_BINDINGS(c, p) \
    {"prompt_data", &(c).dataset, DEMO_STRING, NULL, "prompts: .jsonl, a comma list", DEMO_ANY}, \
    {"input_key", &(p).input_key, DEMO_STRING, "input", "JSON key of the prompt", DEMO_ANY}, \
    {"label_key", &(p).label_key, DEMO_STRING, NULL, "JSON key of the right answer, for --reward_rule", DEMO_ANY}, \
    {"ref_pretrain", &(p).ref_pretrain, DEMO_STRING, NULL, "folder of the reference model; without it the model training starts from", DEMO_ANY}, \
    {"reward_pretrain", &(p).reward_pretrain, DEMO_STRING, NULL, "folders of reward models, a comma list; their scores are added", DEMO_ANY}, \
    {"reward_rule", &(p).reward_rule, DEMO_STRING, NULL, "last_number: 1 if the text's last number is the label's, else 0", DEMO_ANY}, \
    {"critic_pretrain", &(p).critic_pretrain, DEMO_STRING, NULL, "folder the critic starts from; without it the reward model, or the actor", DEMO_ANY}, \
    {"value_head_prefix", &(p).value_head_prefix, DEMO_STRING, "score", "name of the heads of critic and reward model", DEMO_ANY}, \
    {"advantage_estimator", &(p).advantage_estimator, DEMO_STRING, "gae", "gae, reinforce, rloo, reinforce_baseline, group_norm or dr_grpo", DEMO_ANY}, \
    {"kl_estimator", &(p).kl_estimator, DEMO_STRING, "k1", "k1, k2 or k3", DEMO_ANY}, \
    {"use_kl_loss", &(p).use_kl_loss, DEMO_FLAG, NULL, "the KL term is part of the loss, not of the reward", DEMO_ANY}, \
    {"no_advantage_std_norm", &(p).no_advantage_std_norm, DEMO_FLAG, NULL, "advantages lose their mean only", DEMO_ANY}, \
    {"rollout_batch_size", &(p).rollout_batch_size, DEMO_INT, "32", "prompts of a rollout", DEMO_AT_LEAST(1)}, \
    {"n_samples_per_prompt", &(p).n_samples_per_prompt, DEMO_INT, "1", "texts for every prompt", DEMO_AT_LEAST(1)}, \
    {"num_episodes", &(p).num_episodes, DEMO_INT, "1", "passes over the prompts", DEMO_AT_LEAST(1)}, \
    {"prompt_max_len", &(p).prompt_max_len, DEMO_INT, "1024", "longest prompt, in tokens", DEMO_AT_LEAST(1)}, \
    {"generate_max_len", &(p).generate_max_len, DEMO_INT, "64", "longest text, in tokens", DEMO_AT_LEAST(1)}, \
    {"temperature", &(p).temperature, DEMO_FLOAT, "1", "of sampling", DEMO_ABOVE(0)}, \
    {"top_p", &(p).top_p, DEMO_FLOAT, "1", "share of probability that is sampled from", DEMO_BETWEEN(0, 1)}, \
    {"top_k", &(p).top_k, DEMO_INT, "0", "so many most probable tokens are sampled from; 0: all", DEMO_AT_LEAST(0)}, \
    {"actor_learning_rate", &(p).actor_learning_rate, DEMO_FLOAT, "2e-4", "of the actor", DEMO_ABOVE(0)}, \
    {"critic_learning_rate", &(p).critic_learning_rate, DEMO_FLOAT, "1e-3", "of the critic", DEMO_ABOVE(0)}, \
    {"eps_clip", &(p).eps_clip, DEMO_FLOAT, "0.2", "the ratio is clipped to 1 +- this", DEMO_ABOVE(0)}, \
    {"eps_clip_low_high", &(p).eps_clip_low_high, DEMO_FLOATS2, "0,0", "the two sides apart; 0: eps_clip", DEMO_AT_LEAST(0)}, \
    {"dual_clip", &(p).dual_clip, DEMO_FLOAT, "0", "bound on the ratio where the advantage is negative; 0: none", DEMO_AT_LEAST(0)}, \
    {"value_clip", &(p).value_clip, DEMO_FLOAT, "0.2", "values move at most so far from the old ones; 0: no clip", DEMO_AT_LEAST(0)}, \
    {"lambd", &(p).lambd, DEMO_FLOAT, "0.95", "lambda of GAE", DEMO_BETWEEN(0, 1)}, \
    {"gamma", &(p).gamma, DEMO_FLOAT, "1", "discount of rewards", DEMO_BETWEEN(0, 1)}, \
    {"init_kl_coef", &(p).init_kl_coef, DEMO_FLOAT, "0.01", "coefficient of the KL to the reference", DEMO_AT_LEAST(0)}, \
    {"kl_target", &(p).kl_target, DEMO_FLOAT, "0", "KL that the coefficient is steered to; 0: it is fixed", DEMO_AT_LEAST(0)}, \
    {"kl_horizon", &(p).kl_horizon, DEMO_INT, "10000", "texts over which it is steered", DEMO_AT_LEAST(1)}, \
    {"reward_clip_range", &(p).reward_clip_range, DEMO_FLOATS2, "-10,10", "rewards are clipped to it", DEMO_ANY}, \
    {"entropy_loss_coef", &(p).entropy_loss_coef, DEMO_FLOAT, "0", "weight of the entropy bonus", DEMO_AT_LEAST(0)}, \
    {"freezing_actor_steps", &(p).freezing_actor_steps, DEMO_INT, "-1", "the critic alone learns for so many steps", DEMO_AT_LEAST(-1)}

/* ---- a rollout: texts, and an entry for every token that was generated ---- */

enum { OLD_LOGP, REF_LOGP_OF, VALUE, KL, REWARD, ADVANTAGE, RETURN, ENTRY };
typedef struct {
    demo_dataset set;          /* prompt and text in one document each, texts of a prompt side by side */
    int64_t *prompt, *first;   /* (texts) tokens of the prompt; number of the first entry */
    int64_t texts, entries;
    double *entry;             /* (entries, ENTRY); entry t of a text belongs to position prompt - 1 + t, which predicts token t */
    double *score, *kl;        /* (texts) reward; mean KL */
    const demo_document **source; /* (texts) the prompt's document, for the rule */
} demo_rollout;

enum { DEMO_REWARDS = 8 };
typedef struct { /* an actor's rank carries these */
    demo_reference reference;
    seqpar_llama critic, reward[DEMO_REWARDS];
    seqpar_optim critic_optim;
    bool has_critic;
    int rewards, scorer;       /* reward models, and the one at work */
    demo_rollout rollout;
    seqpar_kl_controller kl;
    int64_t *place;            /* what the pass at hand has seen: entry numbers and values, stb_ds arrays */
    double *seen;
    int column;
    double policy[4], value[2], seconds[3]; /* means of the last rollout's updates: loss, clipped, entropy, KL; loss, clipped; generate, score, train */
} demo_ppo;

static demo_ppo *demo_ppo_of(demo_rank *r) { return r->own; }
static const demo_ppo_config *demo_ppo_options(const demo_rank *r) { return r->job->options; }

static void demo_rollout_free(demo_rollout *o) {
    demo_data_free(&o->set);
    free(o->prompt); free(o->entry); free(o->score); free(o->source);
    memset(o, 0, sizeof *o);
}

/* ---- generating ---- */

/* All before the label, or without one all but the EOS. */
static int64_t demo_prompt_tokens(const demo_rank *r, const demo_document *d) {
    int64_t n = 0;
    if (!demo_ppo_options(r)->label_key) return d->tokens - (d->ids[d->tokens - 1] == DEMO_EOS);
    while (n < d->tokens && !d->loss_mask[n]) n++;
    return n;
}

/* Prompts of rollout number `number`: places in the training set, the same on all ranks. */
static int64_t *demo_rollout_prompts(const demo_job *job, int64_t number, int64_t batch) {
    int64_t per_epoch = job->usable_count / batch, *order = calloc((size_t)job->usable_count, sizeof *order), *which = NULL;
    seqpar_shuffle(order, job->usable_count, (uint64_t)job->config.seed, (uint64_t)(number / per_epoch));
    for (int64_t i = 0; i < batch; i++) arrput(which, job->usable[order[number % per_epoch * batch + i]]);
    free(order);
    return which;
}

/* Everybody gets everybody's texts: (count, longest + 1) ids, the count first. */
static seqpar_status demo_share_texts(demo_rank *r, int32_t *all, const seqpar_llama_text *texts, int64_t first, int64_t end, int64_t total, int64_t longest) {
    int64_t width = longest + 1, *bytes = calloc((size_t)r->ctx.world->size, sizeof *bytes);
    int32_t *mine = calloc((size_t)((end - first) * width + 1), sizeof *mine);
    for (int64_t i = 0; i < end - first; i++) {
        mine[i * width] = (int32_t)texts[i].count;
        memcpy(mine + i * width + 1, texts[i].ids, (size_t)texts[i].count * sizeof *mine);
    }
    for (int64_t w = 0; w < r->ctx.world->size; w++)
        bytes[w] = (seqpar_grid_begin(total, r->ctx.world->size, w + 1) - seqpar_grid_begin(total, r->ctx.world->size, w)) * width * 4;
    seqpar_status status = seqpar_comm_all_gather(r->ctx.world, all, mine, bytes, "texts");
    free(mine);
    free(bytes);
    return status;
}

static void demo_rollout_take(demo_rollout *o, int64_t i, const demo_document *prompt, int64_t tokens, const int32_t *text) {
    demo_document d = {0};
    for (int64_t t = 0; t < tokens; t++) demo_push(&d, prompt->ids[t], false);
    for (int64_t t = 0; t < text[0]; t++) demo_push(&d, text[1 + t], true);
    arrput(o->set.documents, d);
    o->prompt[i] = tokens;
    o->first[i] = o->entries;
    o->entries += text[0];
    o->source[i] = prompt;
}

static seqpar_status demo_generate(demo_rank *r, int64_t number) {
    const demo_ppo_config *c = demo_ppo_options(r);
    demo_rollout *o = &demo_ppo_of(r)->rollout;
    const int32_t stop = DEMO_EOS;
    int64_t *which = demo_rollout_prompts(r->job, number, c->rollout_batch_size), total = c->rollout_batch_size * c->n_samples_per_prompt, n = c->n_samples_per_prompt;
    int64_t first = seqpar_grid_begin(total, r->ctx.world->size, r->ctx.world->rank), end = seqpar_grid_begin(total, r->ctx.world->size, r->ctx.world->rank + 1);
    seqpar_llama_sample_desc desc = {.max_new_tokens = c->generate_max_len, .temperature = c->temperature, .top_p = c->top_p, .top_k = c->top_k, .stops = &stop, .stop_count = 1, .seed = (uint64_t)r->job->config.seed};
    seqpar_llama_prompt *prompts = calloc((size_t)(end - first) + 1, sizeof *prompts);
    seqpar_llama_text *texts = calloc((size_t)(end - first) + 1, sizeof *texts);
    int32_t *all = calloc((size_t)(total * (c->generate_max_len + 1)), sizeof *all);
    for (int64_t i = first; i < end; i++) {
        const demo_document *d = &r->job->train.documents[which[i / n]];
        prompts[i - first] = (seqpar_llama_prompt){d->ids, demo_prompt_tokens(r, d), number * total + i};
    }
    seqpar_status status = seqpar_llama_generate(&r->ctx, &r->model, texts, prompts, end - first, &desc);
    if (!status) status = demo_share_texts(r, all, texts, first, end, total, c->generate_max_len);
    if (!status) seqpar_llama_texts_free(texts, end - first);
    demo_rollout_free(o);
    o->texts = total;
    o->prompt = calloc((size_t)(2 * total), sizeof *o->prompt);
    o->first = o->prompt + total;
    o->source = calloc((size_t)total, sizeof *o->source);
    for (int64_t i = 0; !status && i < total; i++) {
        const demo_document *d = &r->job->train.documents[which[i / n]];
        demo_rollout_take(o, i, d, demo_prompt_tokens(r, d), all + i * (c->generate_max_len + 1));
    }
    o->entry = calloc((size_t)(o->entries * ENTRY), sizeof *o->entry);
    o->score = calloc((size_t)(2 * total), sizeof *o->score);
    o->kl = o->score + total;
    arrfree(which);
    free(prompts); free(texts); free(all);
    return status;
}

/* ---- passes over the rollout: a number for every entry, known to all ranks ---- */

/* Entry of a local token; -1 where it predicts nothing that was generated. */
static int64_t demo_entry_of(const demo_rollout *o, const demo_window *w, const seqpar_row *row, int64_t position) {
    int64_t d = 0;
    while (d + 1 < row->docs && row->cu_seqlens[d + 1] <= position) d++;
    int64_t text = w->which[row->doc_source[d]], t = position - row->cu_seqlens[d] - (o->prompt[text] - 1);
    return row->targets[position] == SEQPAR_IGNORE || t < 0 ? -1 : o->first[text] + t;
}

static seqpar_status demo_pass_rows(demo_rank *r, demo_window *w, seqpar_llama *model, int64_t first, int64_t count) {
    demo_ppo *p = demo_ppo_of(r);
    seqpar_llama_run run = demo_run_desc(r->job);
    seqpar_llama_batch b;
    seqpar_status status = seqpar_llama_open_batch(&r->ctx, model, &b, w->batch.row + first, count, &run);
    double *value = calloc((size_t)b.tokens + 1, sizeof *value);
    if (!status) status = seqpar_llama_forward(&r->ctx, model, &b, 0);
    if (!status) status = seqpar_llama_values(&r->ctx, model, &b);
    if (!status) seqpar_device_read(r->device, value, model->config.score ? b.score.data : b.logp.data, 0, b.tokens);
    for (int64_t i = 0; !status && i < b.share->count; i++)
        for (int64_t k = 0; k < b.share->pieces[i].count; k++) {
            const seqpar_piece *piece = &b.share->pieces[i];
            int64_t entry = demo_entry_of(&p->rollout, w, &w->batch.row[first + piece->row], piece->start + k * piece->stride);
            if (entry < 0) continue;
            arrput(p->place, entry);
            arrput(p->seen, value[piece->local + k]);
        }
    free(value);
    seqpar_llama_close_batch(&r->ctx, model, &b);
    return status;
}
static seqpar_status demo_actor_rows(demo_rank *r, demo_window *w, int64_t first, int64_t count, int64_t micro) { (void)micro; return demo_pass_rows(r, w, &r->model, first, count); }
static seqpar_status demo_reference_rows(demo_rank *r, demo_window *w, int64_t first, int64_t count, int64_t micro) { (void)micro; return demo_pass_rows(r, w, &demo_ppo_of(r)->reference.model, first, count); }
static seqpar_status demo_critic_rows(demo_rank *r, demo_window *w, int64_t first, int64_t count, int64_t micro) { (void)micro; return demo_pass_rows(r, w, &demo_ppo_of(r)->critic, first, count); }

/* Every entry was seen by exactly one rank. */
static seqpar_status demo_share_entries(demo_rank *r, int column) {
    demo_ppo *p = demo_ppo_of(r);
    int64_t size = r->ctx.world->size, n = arrlen(p->place), *counts = calloc((size_t)(2 * size), sizeof *counts), *bytes = counts + size, *place = calloc((size_t)p->rollout.entries + 1, sizeof *place), at = 0;
    double *seen = calloc((size_t)p->rollout.entries + 1, sizeof *seen);
    for (int64_t w = 0; w < size; w++) bytes[w] = 8;
    seqpar_status status = seqpar_comm_all_gather(r->ctx.world, counts, &n, bytes, "entry counts");
    for (int64_t w = 0; w < size; w++) { bytes[w] = counts[w] * 8; at += counts[w]; }
    if (!status && at != p->rollout.entries) status = seqpar_fail(r->ctx.error, SEQPAR_ERR_SIZE, "the ranks saw %lld of %lld generated tokens", (long long)at, (long long)p->rollout.entries);
    if (!status) status = seqpar_comm_all_gather(r->ctx.world, place, p->place, bytes, "entries");
    if (!status) status = seqpar_comm_all_gather(r->ctx.world, seen, p->seen, bytes, "entry values");
    for (int64_t i = 0; !status && i < at; i++) p->rollout.entry[place[i] * ENTRY + column] = seen[i];
    arrfree(p->place);
    arrfree(p->seen);
    free(counts); free(place); free(seen);
    return status;
}

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

/* ---- rewards and advantages: the same arithmetic on every rank ---- */

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

/* KL of every token and text; shaped rewards; advantages and returns of one text. */
static void demo_text_advantages(demo_rank *r, int64_t i, double scalar, double coef, double gamma) {
    const demo_ppo_config *c = demo_ppo_options(r);
    demo_rollout *o = &demo_ppo_of(r)->rollout;
    int64_t n = (i + 1 < o->texts ? o->first[i + 1] : o->entries) - o->first[i], gae = demo_ppo_of(r)->has_critic;
    double *e = o->entry + o->first[i] * ENTRY, *line = calloc((size_t)(5 * n), sizeof *line), *kl = line + n, *value = kl + n, *advantage = value + n, *back = advantage + n;
    for (int64_t t = 0; t < n; t++) { kl[t] = e[t * ENTRY + KL]; value[t] = e[t * ENTRY + VALUE]; }
    seqpar_shaped_rewards(line, kl, n, coef, scalar, c->reward_clip_range[0], c->reward_clip_range[1]);
    seqpar_gae(advantage, back, line, gae ? value : NULL, n, gamma, c->lambd);
    for (int64_t t = 0; t < n; t++) { e[t * ENTRY + REWARD] = line[t]; e[t * ENTRY + ADVANTAGE] = advantage[t]; e[t * ENTRY + RETURN] = back[t]; }
    free(line);
}

static void demo_whiten_advantages(demo_rollout *o, int mean_only) {
    double *x = calloc((size_t)o->entries, sizeof *x);
    for (int64_t i = 0; i < o->entries; i++) x[i] = o->entry[i * ENTRY + ADVANTAGE];
    seqpar_whiten(x, o->entries, mean_only);
    for (int64_t i = 0; i < o->entries; i++) o->entry[i * ENTRY + ADVANTAGE] = x[i];
    free(x);
}

/* Groups are compared, and without a critic returns are not discounted there (as in OpenRLHF). */
static seqpar_status demo_advantages(demo_rank *r) {
    static const char *const estimators[] = {"gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"}, *const kls[] = {"k1", "k2", "k3"};
    static const int groups[] = {-1, -1, SEQPAR_GROUP_MEAN, SEQPAR_GROUP_RLOO, SEQPAR_GROUP_GRPO, SEQPAR_GROUP_MEAN};
    const demo_ppo_config *c = demo_ppo_options(r);
    demo_ppo *p = demo_ppo_of(r);
    demo_rollout *o = &p->rollout;
    int estimator = demo_pick(c->advantage_estimator, estimators, 6), kl = demo_pick(c->kl_estimator, kls, 3);
    double *scalar = calloc((size_t)o->texts, sizeof *scalar);
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; i < o->texts; i++) {
        int64_t n = (i + 1 < o->texts ? o->first[i + 1] : o->entries) - o->first[i];
        for (int64_t t = 0; t < n; t++) {
            double *e = o->entry + (o->first[i] + t) * ENTRY;
            e[KL] = seqpar_kl(e[OLD_LOGP], e[REF_LOGP_OF], kl, NULL);
            o->kl[i] += e[KL] / (double)n;
        }
        scalar[i] = o->score[i];
    }
    for (int64_t i = 0; !status && groups[estimator] >= 0 && i < o->texts; i += c->n_samples_per_prompt)
        status = seqpar_group_advantages(r->ctx.error, scalar + i, o->score + i, c->n_samples_per_prompt, groups[estimator], 1e-9);
    for (int64_t i = 0; !status && i < o->texts; i++) demo_text_advantages(r, i, scalar[i], c->use_kl_loss ? 0.0 : p->kl.coef, groups[estimator] >= 0 ? 1.0 : c->gamma);
    if (!status && estimator <= 2) demo_whiten_advantages(o, c->no_advantage_std_norm);
    free(scalar);
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

static seqpar_status demo_experience(demo_rank *r) {
    const demo_ppo_config *c = demo_ppo_options(r);
    demo_ppo *p = demo_ppo_of(r);
    demo_window w = {.set = &p->rollout.set};
    for (int64_t i = 0; i < p->rollout.texts; i++) arrput(w.which, i);
    seqpar_status status = demo_window_open(r, &w, 1, 0);
    if (!status) status = demo_window_values(r, &w, demo_actor_rows);
    if (!status) status = demo_share_entries(r, OLD_LOGP);
    if (!status) status = demo_window_values(r, &w, demo_reference_rows);
    if (!status) status = demo_share_entries(r, REF_LOGP_OF);
    if (!status && p->has_critic) status = demo_window_values(r, &w, demo_critic_rows);
    if (!status && p->has_critic) status = demo_share_entries(r, VALUE);
    for (p->scorer = 0; !status && p->scorer < p->rewards; p->scorer++) status = demo_add_scores(r, &w);
    for (int64_t i = 0; !status && c->reward_rule && i < p->rollout.texts; i++) p->rollout.score[i] += demo_rule_score(&p->rollout, i);
    demo_window_close(&w);
    return status ? status : demo_advantages(r);
}

/* ---- updates ---- */

typedef struct { demo_rank *r; demo_window *w; seqpar_llama *model; seqpar_optim *optim; double *sums; int64_t *leaf; } demo_update;
enum { UPDATE_COLUMNS = 4 };

/* Loss of one entry; its derivatives by log-prob (or value) and entropy. */
static void demo_entry_loss(const demo_update *u, const double *e, double x, double entropy, double columns[UPDATE_COLUMNS], double *slope, double *entropy_slope) {
    static const char *const kls[] = {"k1", "k2", "k3"};
    const demo_ppo_config *c = demo_ppo_options(u->r);
    double dkl = 0, kl;
    if (u->model->config.score) {
        seqpar_value_result v = seqpar_value_loss(x, e[VALUE], e[RETURN], c->value_clip);
        columns[0] = v.loss;
        columns[1] = v.clipped;
        *slope = v.dvalue;
        return;
    }
    seqpar_policy_desc clip = {c->eps_clip_low_high[0] > 0 ? c->eps_clip_low_high[0] : c->eps_clip, c->eps_clip_low_high[1] > 0 ? c->eps_clip_low_high[1] : c->eps_clip, c->dual_clip};
    seqpar_policy_result p = seqpar_policy_loss(x, e[OLD_LOGP], e[ADVANTAGE], &clip);
    kl = seqpar_kl(x, e[REF_LOGP_OF], demo_pick(c->kl_estimator, kls, 3), &dkl);
    double coef = c->use_kl_loss ? demo_ppo_of(u->r)->kl.coef : 0.0;
    columns[0] = p.loss + coef * kl - c->entropy_loss_coef * entropy;
    columns[1] = p.clipped;
    columns[2] = entropy;
    columns[3] = kl;
    *slope = p.dlogp + coef * dkl;
    *entropy_slope = -c->entropy_loss_coef;
}

/* Seeds of the local tokens, and sums of what they lose, one row a piece. host (2, tokens). */
static seqpar_status demo_update_seeds(demo_update *u, const seqpar_llama_batch *b, const seqpar_row *rows, double *host) {
    demo_rank *r = u->r;
    double *x = calloc((size_t)(2 * b->tokens + 1), sizeof *x), *entropy = x + b->tokens, weight = 1.0 / (double)u->w->batch.counts.supervised;
    seqpar_device_read(r->device, x, u->model->config.score ? b->score.data : b->logp.data, 0, b->tokens);
    if (!u->model->config.score) seqpar_device_read(r->device, entropy, b->entropy.data, 0, b->tokens);
    for (int64_t i = 0; i < b->share->count; i++) {
        const seqpar_piece *p = &b->share->pieces[i];
        double sum[UPDATE_COLUMNS] = {0};
        for (int64_t k = 0; k < p->count; k++) {
            int64_t at = p->local + k, entry = demo_entry_of(&demo_ppo_of(r)->rollout, u->w, &rows[p->row], p->start + k * p->stride);
            double columns[UPDATE_COLUMNS] = {0};
            if (entry < 0) continue;
            demo_entry_loss(u, demo_ppo_of(r)->rollout.entry + entry * ENTRY, x[at], entropy[at], columns, &host[at], &host[b->tokens + at]);
            host[at] *= weight;
            host[b->tokens + at] *= weight;
            for (int c = 0; c < UPDATE_COLUMNS; c++) sum[c] += columns[c];
        }
        arrput(u->leaf, p->leaf);
        for (int c = 0; c < UPDATE_COLUMNS; c++) arrput(u->sums, sum[c]);
    }
    free(x);
    return SEQPAR_OK;
}

static seqpar_status demo_update_micro(demo_update *u, int64_t index) {
    demo_rank *r = u->r;
    seqpar_llama_run run = demo_run_desc(r->job);
    seqpar_llama_batch b;
    seqpar_head_seeds seeds = {0};
    demo_seeds buffers = {0};
    int64_t first, count;
    seqpar_step_rows(&r->ctx, u->optim, index, &first, &count);
    seqpar_status status = seqpar_llama_open_batch(&r->ctx, u->model, &b, u->w->batch.row + first, count, &run);
    double *host = calloc((size_t)(2 * b.tokens + 1), sizeof *host);
    if (!status) status = seqpar_llama_forward(&r->ctx, u->model, &b, 1);
    if (!status) status = seqpar_llama_values(&r->ctx, u->model, &b);
    if (!status) status = demo_update_seeds(u, &b, u->w->batch.row + first, host);
    if (!status) status = demo_seeds_write(r, &buffers, 2, host, b.tokens);
    seeds.dlogp = buffers.part[0].data;
    if (demo_ppo_options(r)->entropy_loss_coef > 0 && !u->model->config.score) seeds.dentropy = buffers.part[1].data;
    if (!status) status = seqpar_llama_backward(&r->ctx, u->model, &b, u->optim, index, &seeds);
    demo_seeds_free(r, &buffers);
    free(host);
    seqpar_llama_close_batch(&r->ctx, u->model, &b);
    return status;
}

/* One optimizer step of actor or critic on a mini-batch; means (UPDATE_COLUMNS) over its tokens. */
static seqpar_status demo_update_step(demo_update *u, double lr, double *means) {
    demo_rank *r = u->r;
    int64_t accumulation = demo_accumulation(r->job, u->w->batch.rows);
    seqpar_status status = seqpar_step_begin(&r->ctx, u->optim, u->w->batch.row, u->w->batch.rows, r->job->layout, accumulation);
    for (int64_t i = 0; !status && i < accumulation; i++) status = demo_update_micro(u, i);
    if (!status) status = seqpar_sum_pieces(&r->ctx, means, u->leaf, u->sums, arrlen(u->leaf), UPDATE_COLUMNS);
    for (int c = 0; c < UPDATE_COLUMNS; c++) means[c] /= (double)u->w->batch.counts.supervised;
    if (!status && !(fabs(means[0]) <= 1e300))
        status = seqpar_fail(r->ctx.error, SEQPAR_ERR_NOT_FINITE, "step %lld: the loss of the %s is %g; lower its learning rate", (long long)r->step + 1, u->model->config.score ? "critic" : "actor", means[0]);
    if (!status) status = seqpar_step_end(&r->ctx, u->optim, u->model->params.data, lr);
    arrfree(u->leaf);
    arrfree(u->sums);
    return status;
}

/* A mini-batch: the actor, unless frozen, and the critic. */
static seqpar_status demo_mini_batch(demo_rank *r, demo_window *w) {
    const demo_ppo_config *c = demo_ppo_options(r);
    demo_ppo *p = demo_ppo_of(r);
    double factor = seqpar_schedule_factor(r->job->lr_kind, r->step, r->job->warmup, r->job->total_steps, r->job->config.min_lr_ratio);
    demo_update actor = {r, w, &r->model, &r->optim, NULL, NULL}, critic = {r, w, &p->critic, &p->critic_optim, NULL, NULL};
    double means[UPDATE_COLUMNS];
    seqpar_status status = SEQPAR_OK;
    if (r->step > c->freezing_actor_steps) status = demo_update_step(&actor, c->actor_learning_rate * factor, p->policy);
    if (!status) demo_average_step(&r->ctx, &r->model, &r->average);
    if (!status && p->has_critic) status = demo_update_step(&critic, c->critic_learning_rate * factor, means);
    if (!status && p->has_critic) memcpy(p->value, means, sizeof p->value);
    if (!status) r->step++;
    return status;
}

/* max_epochs over the rollout in mini-batches of train_batch_size texts, in another order each time. */
static seqpar_status demo_updates(demo_rank *r, int64_t number) {
    const demo_config *c = &r->job->config;
    demo_ppo *p = demo_ppo_of(r);
    int64_t texts = p->rollout.texts, batch = c->train_batch_size < texts ? c->train_batch_size : texts, *order = calloc((size_t)texts, sizeof *order);
    seqpar_status status = SEQPAR_OK;
    for (int64_t epoch = 0; !status && epoch < (int64_t)c->max_epochs; epoch++) {
        seqpar_shuffle(order, texts, (uint64_t)c->seed + 1, (uint64_t)(number * (int64_t)c->max_epochs + epoch));
        for (int64_t first = 0; !status && first + batch <= texts; first += batch) {
            demo_window w = {.set = &p->rollout.set};
            for (int64_t i = 0; i < batch; i++) arrput(w.which, order[first + i]);
            status = demo_window_open(r, &w, 1, 0);
            if (!status) status = demo_mini_batch(r, &w);
            demo_window_close(&w);
        }
    }
    free(order);
    return status;
}

/* ---- evaluation: how many of the held-out prompts are answered rightly when the most probable token is always taken ---- */

static seqpar_status demo_ppo_evaluate(demo_rank *r, int64_t rollouts) {
    const demo_ppo_config *c = demo_ppo_options(r);
    const int32_t stop = DEMO_EOS;
    int64_t total = arrlen(r->job->eval.documents), right = 0, first = seqpar_grid_begin(total, r->ctx.world->size, r->ctx.world->rank), end = seqpar_grid_begin(total, r->ctx.world->size, r->ctx.world->rank + 1);
    seqpar_llama_sample_desc desc = {.max_new_tokens = c->generate_max_len, .top_p = 1, .stops = &stop, .stop_count = 1};
    seqpar_llama_prompt *prompts = calloc((size_t)(end - first) + 1, sizeof *prompts);
    seqpar_llama_text *texts = calloc((size_t)(end - first) + 1, sizeof *texts);
    if (!total) { free(prompts); free(texts); return SEQPAR_OK; }
    for (int64_t i = first; i < end; i++) {
        const demo_document *d = &r->job->eval.documents[i];
        prompts[i - first] = (seqpar_llama_prompt){d->ids, demo_prompt_tokens(r, d), i};
    }
    seqpar_status status = seqpar_llama_generate(&r->ctx, &r->model, texts, prompts, end - first, &desc);
    for (int64_t i = 0; !status && i < end - first; i++) right += demo_same_number(texts[i].ids, texts[i].count, &r->job->eval.documents[first + i], prompts[i].tokens);
    if (!status) seqpar_llama_texts_free(texts, end - first);
    if (!status) status = seqpar_comm_sum_i64(r->ctx.world, &right, 1);
    free(prompts);
    free(texts);
    if (status || r->ctx.world->rank) return status;
    r->eval_means[0] = (double)right / (double)total;
    demo_progress_say(&r->progress, "after %lld rollouts: %lld of %lld held-out prompts answered rightly (%.1f %%)", (long long)rollouts, (long long)right, (long long)total, 100 * r->eval_means[0]);
    if (r->metrics) fprintf(r->metrics, "{\"rollout\": %lld, \"eval_exact\": %.17g, \"eval_prompts\": %lld}\n", (long long)rollouts, r->eval_means[0], (long long)total);
    return SEQPAR_OK;
}

/* ---- the loop ---- */

static void demo_text_print(FILE *out, const int32_t *ids, int64_t tokens) {
    for (int64_t t = 0; t < tokens; t++)
        if (ids[t] == '\n') fputs("\\n", out);
        else if (ids[t] >= 32 && ids[t] < 256) fputc(ids[t], out);
}

static void demo_rollout_log(demo_rank *r, int64_t number) {
    demo_ppo *p = demo_ppo_of(r);
    const demo_rollout *o = &p->rollout;
    double back = 0, reward = seqpar_mean(o->score, o->texts), kl = seqpar_mean(o->kl, o->texts), length = (double)o->entries / (double)o->texts;
    if (r->ctx.world->rank) return;
    for (int64_t i = 0; i < o->entries; i++) back += o->entry[i * ENTRY + REWARD];
    arrput(r->losses, reward);
    arrput(r->steps, (double)number);
    r->norm_last = r->optim.norm;
    r->tokens += o->entries;
    r->seconds += p->seconds[0] + p->seconds[1] + p->seconds[2];
    demo_progress_step(&r->progress, number + 1, reward, o->entries);
    if (number % r->job->config.logging_steps == 0) {
        fprintf(stderr, "rollout %lld: reward %.4f, KL %.4f, length %.1f, generate %.1f s, score %.1f s, train %.1f s; text 0 (%.2f): ", (long long)number + 1, reward, kl, length, p->seconds[0], p->seconds[1], p->seconds[2], o->score[0]);
        demo_text_print(stderr, o->set.documents[0].ids + o->prompt[0], o->set.documents[0].tokens - o->prompt[0]);
        fputc('\n', stderr);
    }
    if (!r->metrics) return;
    fprintf(r->metrics, "{\"rollout\": %lld, \"step\": %lld, \"reward\": %.17g, \"return\": %.17g, \"kl\": %.17g, \"kl_coef\": %.17g, \"response_length\": %.17g, \"policy_loss\": %.17g, \"clipfrac\": %.17g, \"entropy\": %.17g, \"critic_loss\": %.17g, \"grad_norm\": %.17g, ",
            (long long)number + 1, (long long)r->step, reward, back / (double)o->texts, kl, p->kl.coef, length, p->policy[0], p->policy[1], p->policy[2], p->value[0], r->optim.norm);
    fprintf(r->metrics, "\"generate_seconds\": %.3f, \"score_seconds\": %.3f, \"train_seconds\": %.3f}\n", p->seconds[0], p->seconds[1], p->seconds[2]);
    fflush(r->metrics);
}

static seqpar_status demo_ppo_rollout(demo_rank *r, int64_t number) {
    demo_ppo *p = demo_ppo_of(r);
    double began = demo_seconds(), kl;
    seqpar_status status = demo_generate(r, number);
    p->seconds[0] = demo_seconds() - began;
    if (!status) status = demo_experience(r);
    p->seconds[1] = demo_seconds() - began - p->seconds[0];
    if (!status) status = demo_updates(r, number);
    p->seconds[2] = demo_seconds() - began - p->seconds[0] - p->seconds[1];
    if (status) return status;
    demo_rollout_log(r, number);
    kl = 0; /* weighted by length: the mean over all tokens */
    for (int64_t i = 0; i < p->rollout.entries; i++) kl += p->rollout.entry[i * ENTRY + KL] / (double)p->rollout.entries;
    seqpar_kl_controller_update(&p->kl, kl, p->rollout.texts);
    return SEQPAR_OK;
}

/* Steps of a rollout: all of them alike. */
static int64_t demo_ppo_steps(const demo_job *job) {
    const demo_ppo_config *p = job->options;
    return (int64_t)job->config.max_epochs * (p->rollout_batch_size * p->n_samples_per_prompt / job->config.train_batch_size);
}

static void demo_ppo_count(demo_job *job) {
    const demo_ppo_config *p = job->options;
    demo_config *c = &job->config;
    int64_t texts = p->rollout_batch_size * p->n_samples_per_prompt;
    if (c->train_batch_size > texts) c->train_batch_size = texts;
    job->rounds = p->num_episodes * (job->usable_count / p->rollout_batch_size);
    job->total_steps = job->rounds * demo_ppo_steps(job);
    if (c->max_steps > 0 && c->max_steps < job->total_steps) {
        job->rounds = (job->rounds * c->max_steps + job->total_steps - 1) / job->total_steps;
        job->total_steps = c->max_steps;
    }
}

/* The critic is a checkpoint of its own inside the folder, written first: the actor's `latest` says that both are there. */
static seqpar_status demo_ppo_save(demo_rank *r, demo_state *state) {
    demo_ppo *p = demo_ppo_of(r);
    char root[1100];
    memcpy(&state->extra, &p->kl.coef, sizeof state->extra);
    snprintf(root, sizeof root, "%s/critic", r->job->config.ckpt_path);
    return p->has_critic ? demo_save_checkpoint(&r->ctx, &p->critic, &p->critic_optim, root, state, r->job->config.max_ckpt_num) : SEQPAR_OK;
}
static seqpar_status demo_ppo_load_state(demo_rank *r, const demo_state *state) {
    demo_ppo *p = demo_ppo_of(r);
    char root[1100];
    demo_state critic;
    memcpy(&p->kl.coef, &state->extra, sizeof state->extra);
    snprintf(root, sizeof root, "%s/critic", r->job->config.ckpt_path);
    seqpar_status status = p->has_critic ? demo_load_checkpoint(&r->ctx, &p->critic, &p->critic_optim, root, &critic) : SEQPAR_OK;
    if (!status && p->has_critic && critic.step != state->step)
        return seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_FORMAT, "%s is of step %lld, the actor beside it of step %lld; take the checkpoint before", root, (long long)critic.step, (long long)state->step);
    return status;
}

static seqpar_status demo_ppo_train(demo_rank *r) {
    const demo_config *c = &r->job->config;
    int stop = 0;
    char critic[1280];
    seqpar_status status = r->ctx.world->rank ? SEQPAR_OK : demo_make_folder(c->save_path, r->ctx.error);
    if (!status) status = demo_ppo_evaluate(r, r->step / demo_ppo_steps(r->job));
    for (int64_t i = r->step / demo_ppo_steps(r->job); !status && !stop && i < r->job->rounds; i++) {
        status = demo_ppo_rollout(r, i);
        if (!status) status = demo_stop_wanted(r, &stop);
        if (!status && (stop || (c->save_steps > 0 && (i + 1) % c->save_steps == 0))) status = demo_checkpoint(r);
        if (!status && (i + 1 == r->job->rounds || (c->eval_steps > 0 && (i + 1) % c->eval_steps == 0))) status = demo_ppo_evaluate(r, i + 1);
    }
    snprintf(critic, sizeof critic, "%s/critic", c->save_path);
    if (stop) return status;
    if (!status && r->ctx.world->rank == 0) status = demo_save_model(&r->ctx, &r->model, c->save_path);
    if (!status && r->ctx.world->rank == 0 && demo_ppo_of(r)->has_critic) status = demo_make_folder(critic, r->ctx.error);
    if (!status && r->ctx.world->rank == 0 && demo_ppo_of(r)->has_critic) status = demo_save_model(&r->ctx, &demo_ppo_of(r)->critic, critic);
    if (!status && r->ctx.world->rank == 0 && c->plot_loss) status = demo_draw_loss(r);
    return status ? status : seqpar_comm_barrier(r->ctx.world);
}

/* ---- opening and closing ---- */

/* A score model: from a folder, or the actor's weights with a new head. */
static seqpar_status demo_open_scorer(demo_rank *r, seqpar_llama *model, const char *folder) {
    const demo_config *c = &r->job->config;
    seqpar_llama_config config = r->job->model;
    seqpar_error why = {0};
    if (folder && demo_load_config(folder, &config, &why)) return seqpar_fail(r->ctx.error, why.status, "%s", why.text);
    config.score = demo_ppo_options(r)->value_head_prefix;
    seqpar_status status = seqpar_llama_open(&r->ctx, model, &config);
    if (!status) seqpar_llama_init(&r->ctx, model, (uint64_t)c->seed);
    if (!status && !folder) folder = c->pretrain;
    return status || !folder ? status : demo_load_weights(&r->ctx, model, folder);
}

static seqpar_status demo_ppo_open(demo_rank *r) {
    const demo_ppo_config *c = demo_ppo_options(r);
    seqpar_optim_desc optim = r->optim.desc;
    seqpar_status status = demo_reference_open(r, c->ref_pretrain);
    demo_ppo *p = calloc(1, sizeof *p);
    if (r->own) p->reference = *(demo_reference *)r->own;
    free(r->own);
    r->own = p;
    p->kl = (seqpar_kl_controller){c->init_kl_coef, c->kl_target, (double)c->kl_horizon};
    p->has_critic = !strcmp(c->advantage_estimator, "gae");
    for (const char *at = c->reward_pretrain; !status && at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        char folder[1024];
        snprintf(folder, sizeof folder, "%.*s", (int)strcspn(at, ","), at);
        if (p->rewards == DEMO_REWARDS) return seqpar_fail(r->ctx.error, SEQPAR_ERR_OPTION, "reward_pretrain names more than %d models; give fewer", DEMO_REWARDS);
        if (p->rewards == 0 && p->has_critic && !c->critic_pretrain) status = demo_open_scorer(r, &p->critic, folder); /* the critic begins as the first */
        if (!status) status = demo_open_scorer(r, &p->reward[p->rewards++], folder);
    }
    if (!status && p->has_critic && !p->critic.tensors) status = demo_open_scorer(r, &p->critic, c->critic_pretrain);
    if (!status && p->has_critic) status = seqpar_optim_open(&r->ctx, &p->critic_optim, p->critic.tensors, p->critic.tensor_count, &optim);
    return status;
}
static void demo_ppo_close(demo_rank *r) {
    demo_ppo *p = demo_ppo_of(r);
    if (!p) return;
    demo_rollout_free(&p->rollout);
    if (p->critic_optim.tensors) seqpar_optim_close(&r->ctx, &p->critic_optim);
    if (p->critic.tensors) seqpar_llama_close(&r->ctx, &p->critic);
    for (int i = 0; i < p->rewards; i++) seqpar_llama_close(&r->ctx, &p->reward[i]);
    if (p->reference.there) seqpar_llama_close(&r->ctx, &p->reference.model);
    free(p);
    r->own = NULL;
}

/* Prompts; a label makes the document go on as the right answer. */
static int demo_ppo_load(const demo_job *job, demo_dataset *set, const char *paths, int64_t max_samples, char *error, size_t size) {
    const demo_ppo_config *p = job->options;
    demo_data_options options = {.input_key = p->input_key, .output_key = p->label_key, .input_template = job->config.input_template, .max_len = p->prompt_max_len, .max_samples = max_samples, .vocab_size = job->model.vocab};
    if (demo_data_load(set, paths, &options, error, size)) return -1;
    demo_data_summary(set, set->summary, sizeof set->summary);
    if (arrlen(set->documents) < p->rollout_batch_size) return snprintf(error, size, "%lld prompts are fewer than rollout_batch_size %lld; lower it", (long long)arrlen(set->documents), (long long)p->rollout_batch_size), -1;
    return 0;
}

/* Options that do not go together are refused before anything is read. */
static int demo_ppo_prepare(demo_job *job, char *error, size_t size) {
    const demo_ppo_config *p = job->options;
    job->config.max_len = p->prompt_max_len + p->generate_max_len;
    job->temperature = p->temperature;
    if (!job->config.dataset) return snprintf(error, size, "no prompts; give --prompt_data FILE"), -1;
    if (p->reward_rule && strcmp(p->reward_rule, "last_number")) return snprintf(error, size, "reward_rule %s is unknown; use last_number", p->reward_rule), -1;
    if (p->reward_rule && !p->label_key) return snprintf(error, size, "reward_rule %s compares with a right answer; name it by --label_key", p->reward_rule), -1;
    if (!(p->reward_clip_range[0] < p->reward_clip_range[1])) return snprintf(error, size, "reward_clip_range runs from %g to %g; give the lower bound first", p->reward_clip_range[0], p->reward_clip_range[1]), -1;
    if (job->config.max_epochs < 1 || job->config.max_epochs != floor(job->config.max_epochs)) return snprintf(error, size, "max_epochs is %g; a rollout is gone through a whole number of times, at least once", job->config.max_epochs), -1;
    if (job->config.eval_dataset && !p->label_key) return snprintf(error, size, "an evaluation counts right answers; name them by --label_key"), -1;
    if (!p->reward_rule && !p->reward_pretrain) return snprintf(error, size, "nothing gives a reward; give --reward_pretrain FOLDER or --reward_rule last_number"), -1;
    if (strcmp(p->advantage_estimator, "gae") && strcmp(p->advantage_estimator, "reinforce") && p->n_samples_per_prompt < 2)
        return snprintf(error, size, "advantage_estimator %s compares texts of one prompt, n_samples_per_prompt is %lld; give 2 or more", p->advantage_estimator, (long long)p->n_samples_per_prompt), -1;
    return 0;
}

static const demo_objective demo_ppo_objective = {.unit = "texts", .weight = "texts", .measure = "", .documents_per_unit = 1, .columns = 1, .column = {"reward"}, .evaluates = "exact",
                                                  .open = demo_ppo_open, .close = demo_ppo_close, .load = demo_ppo_load, .prepare = demo_ppo_prepare, .count = demo_ppo_count, .train = demo_ppo_train, .save = demo_ppo_save, .load_state = demo_ppo_load_state};
#endif
