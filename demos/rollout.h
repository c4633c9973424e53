/* SPDX-License-Identifier: MIT OR Unlicense */
/* rollout.h - texts for prompts, and passes over them.
 *
 * Every rank generates its share of the texts, all ranks get all of them. Log-probs, values and scores are then taken on
 * packed rows split like those of training, and brought together token by token, so that everything that looks at more than
 * one token is the same plain arithmetic on every rank. Random numbers hang on the text's number and the token's position:
 * D x P changes no text. */
#ifndef DEMO_ROLLOUT_H
#define DEMO_ROLLOUT_H
#include "ppo_options.h"

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

#endif
