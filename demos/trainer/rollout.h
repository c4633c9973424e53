/* SPDX-License-Identifier: MIT OR Unlicense */
/* rollout.h - texts for prompts, and passes over them.
 *
 * Every rank generates its share of the texts, all ranks get all of them. Log-probs, values and
 * scores are then taken on packed rows split like those of training, and brought together token
 * by token, so that everything that looks at more than one token is the same plain arithmetic
 * on every rank. Random numbers hang on the text's number and the token's position: D x P
 * changes no text. */
#ifndef DEMO_ROLLOUT_H
#define DEMO_ROLLOUT_H
#include "advantage.h"
#include "ppo_options.h"

/* ---- a rollout: texts, and an entry for every token that was generated ---- */

enum { OLD_LOGP, REF_LOGP_OF, VALUE, KL, REWARD, ADVANTAGE, RETURN, ENTRY };
typedef struct {
    /* prompt and text in one document each, texts of a prompt side by side */
    demo_dataset set;
    int64_t *prompt, *first; /* (texts) tokens of the prompt; number of the first entry */
    int64_t texts, entries;
    /* (entries, ENTRY); entry t of a text belongs to position prompt - 1 + t, which predicts
       token t */
    double *entry;
    double *sampled;              /* (entries) log-probs as they were sampled, stb_ds array */
    double *score, *kl;           /* (texts) reward; mean KL */
    const demo_document **source; /* (texts) the prompt's document in the training set */
} demo_rollout;

enum { DEMO_REWARDS = 8, UPDATE_COLUMNS = 8 };
typedef struct {
    double mean, std;
} demo_moments;

typedef struct { /* an actor's rank carries these */
    demo_reference reference;
    seqpar_llama critic, critic_adapters, reward[DEMO_REWARDS];
    seqpar_optim critic_optim;
    demo_experts critic_experts; /* another number of them than the actor has, perhaps */
    char critic_source[DEMO_PATH_LIMIT + 1];
    int64_t critic_untaught; /* as in seqpar_llama_run */
    /* scores of a reward model are brought to mean 0 and deviation 1 from these */
    demo_moments moments[DEMO_REWARDS];
    bool has_critic;
    int rewards, scorer; /* reward models, and the one at work */
    demo_rollout rollout;
    int64_t drawn; /* prompts so far */
    bool used_up;  /* filtering left too few of them for a whole rollout */
    /* a reward server failed, or a signal came while it was silent: the rollout is as if it
       had not begun */
    bool given_up;
    /* the rollout's texts and behind them the pretraining documents, all borrowed */
    demo_dataset mixed;
    kl_controller kl;
    /* the column that the pass at hand fills; what passes have seen of each, until it is shared:
       entry numbers and values, stb_ds arrays */
    int column;
    int64_t *place[ENTRY];
    double *seen[ENTRY];
    seqpar_comm *handing; /* the actor's first rank and the generators, where there are such */
    bool handed;          /* generators have the model */
    /* means of the last update; generate, score, train, and of the first: weights on their way */
    double policy[UPDATE_COLUMNS], value[UPDATE_COLUMNS], seconds[4];
} demo_ppo;

static demo_ppo *demo_ppo_of(demo_rank *r) { return (demo_ppo *)r->own; }
static const demo_ppo_config *demo_ppo_options(const demo_rank *r) {
    return (const demo_ppo_config *)r->job->options;
}

static bool demo_has_role(const demo_rank *r, int role) {
    return demo_ppo_options(r)->roles.group[role] == r->group;
}

static void demo_rollout_free(demo_rollout *o) {
    demo_data_free(&o->set);
    free(o->prompt);
    free(o->entry);
    arrfree(o->sampled);
    free(o->score);
    free(o->source);
    memset(o, 0, sizeof *o);
}

/* ---- generating ---- */

static demo_words demo_rank_words(const demo_rank *r) {
    return demo_words_of(r->job->train.file);
}

/* All of a token file's; of others all before the label, or without one all but the EOS. */
static int64_t demo_prompt_tokens(const demo_rank *r, const demo_document *d) {
    int64_t n = 0;
    if (r->job->train.file) return d->tokens;
    if (!demo_ppo_options(r)->label_key) return d->tokens - (d->ids[d->tokens - 1] == DEMO_EOS);
    while (n < d->tokens && !d->loss_mask[n]) n++;
    return n;
}

/* Places first .. first + count of an endless stream of 0 .. set - 1, for free(): every pass
   in an order of its own, in whole batches; what does not fill the last one is left out. */
static int64_t *demo_stream(int64_t set, int64_t batch, uint64_t seed, int64_t first,
                            int64_t count) {
    int64_t span = set / batch * batch, pass = -1;
    int64_t *order = (int64_t *)demo_room(set, sizeof *order);
    int64_t *which = (int64_t *)demo_room(count + 1, sizeof *which);
    for (int64_t i = 0; i < count; i++) {
        if ((first + i) / span != pass)
            seqpar_shuffle(order, set, seed, (uint64_t)(pass = (first + i) / span));
        which[i] = order[(first + i) % span];
    }
    free(order);
    return which;
}

/* The ranks *first .. + *count of a role's group. */
static void demo_role_group(const demo_rank *r, int role, int64_t *first, int64_t *count) {
    int group = demo_ppo_options(r)->roles.group[role];
    *first = 0;
    *count = r->job->groups > 1 ? r->job->group_ranks[group] : r->world->size;
    for (int g = 0; r->job->groups > 1 && g < group; g++) *first += r->job->group_ranks[g];
}

/* Whose texts are generated by ranks of their own, or by the actor's. */
static int demo_who_generates(const demo_rank *r) {
    return demo_ppo_options(r)->roles.group[DEMO_GENERATOR] > 0 ? DEMO_GENERATOR : DEMO_ACTOR;
}

/* Everybody gets what everybody has of their texts, `width` bytes of each. */
static seqpar_status demo_share_rows(demo_rank *r, void *all, const void *mine, int64_t total,
                                     int64_t width, const char *what) {
    int64_t *bytes = (int64_t *)demo_room(r->world->size, sizeof *bytes), begin, ranks;
    demo_role_group(r, demo_who_generates(r), &begin, &ranks);
    for (int64_t w = 0; w < ranks; w++)
        bytes[begin + w] = (seqpar_part_begin(total, ranks, w + 1) -
                            seqpar_part_begin(total, ranks, w)) *
                           width;
    seqpar_status status = seqpar_comm_all_gather(r->world, all, mine, bytes, what);
    free(bytes);
    return status;
}

/* Texts of all ranks: ids (total, longest + 1), the count first; logp (total, longest). */
typedef struct {
    int32_t *ids;
    double *logp;
    int64_t longest;
} demo_texts;

static demo_texts demo_texts_new(int64_t total, int64_t longest) {
    return (demo_texts){(int32_t *)demo_room(total * (longest + 1) + 1, sizeof(int32_t)),
                        (double *)demo_room(total * longest + 1, sizeof(double)), longest};
}

static void demo_texts_free(demo_texts *t) {
    free(t->ids);
    free(t->logp);
}

static const int32_t *demo_text_ids(const demo_texts *t, int64_t i) {
    return t->ids + i * (t->longest + 1);
}

/* `count` texts are this rank's. */
static seqpar_status demo_share_texts(demo_rank *r, demo_texts *all,
                                      const seqpar_llama_text *texts, int64_t count,
                                      int64_t total) {
    int64_t longest = all->longest;
    demo_texts mine = demo_texts_new(count, longest);
    for (int64_t i = 0; i < count; i++) {
        int32_t *ids = mine.ids + i * (longest + 1);
        ids[0] = (int32_t)texts[i].count;
        memcpy(ids + 1, texts[i].ids, (size_t)texts[i].count * sizeof *ids);
        memcpy(mine.logp + i * longest, texts[i].logp,
               (size_t)texts[i].count * sizeof *mine.logp);
    }
    seqpar_status status = demo_share_rows(r, all->ids, mine.ids, total, (longest + 1) * 4,
                                           "texts");
    if (!status)
        status = demo_share_rows(r, all->logp, mine.logp, total, longest * 8, "log-probs");
    demo_texts_free(&mine);
    return status;
}

#ifndef DEMO_HANDED_BYTES
#define DEMO_HANDED_BYTES (1 << 24)
#endif
/* Weights go to the generators, as they are, a piece at a time: from the actor's first rank. */
static seqpar_status demo_hand_over_to(demo_rank *r, const seqpar_llama *model) {
    demo_ppo *p = demo_ppo_of(r);
    int64_t bytes = model->elements * seqpar_dtype_bytes(r->device->storage), n;
    char *host = p->handing ? (char *)demo_room(DEMO_HANDED_BYTES, 1) : NULL;
    seqpar_status status = SEQPAR_OK;
    for (int64_t at = 0; !status && p->handing && at < bytes; at += n) {
        char *part = (char *)model->params.data + at;
        n = bytes - at < DEMO_HANDED_BYTES ? bytes - at : (int64_t)DEMO_HANDED_BYTES;
        if (r->group == 0) r->device->copy(r->device, host, part, n, NULL);
        status = seqpar_comm_broadcast(p->handing, host, n, 0);
        if (r->group) r->device->copy(r->device, part, host, n, NULL);
    }
    free(host);
    return status;
}

/* What has changed since: adapters, and the weights of a model without. The actor has all of them
   for that time. Collective over all. */
static seqpar_status demo_hand_weights(demo_rank *r) {
    demo_ppo *p = demo_ppo_of(r);
    double began = demo_seconds();
    seqpar_status status = SEQPAR_OK;
    if (demo_who_generates(r) == DEMO_ACTOR) return SEQPAR_OK;
    if (r->group == 0) status = seqpar_llama_gather(&r->ctx, &r->model);
    if (!status && (!r->job->adapter.rank || !p->handed))
        status = demo_hand_over_to(r, &r->model);
    if (!status && r->job->adapter.rank) status = demo_hand_over_to(r, &r->adapters);
    p->handed = true;
    if (r->group == 0) seqpar_llama_drop(&r->ctx, &r->model);
    p->seconds[3] += demo_seconds() - began;
    return status;
}

/* Texts for these prompts (total), each generated by one rank. For demo_texts_free. */
static seqpar_status demo_generate(demo_rank *r, demo_texts *all,
                                   const seqpar_llama_prompt *prompts, int64_t total,
                                   const seqpar_llama_sample_desc *desc) {
    bool mine = demo_has_role(r, demo_who_generates(r));
    int64_t ranks = r->ctx.world->size, rank = r->ctx.world->rank;
    int64_t first = mine ? seqpar_part_begin(total, ranks, rank) : 0;
    int64_t end = mine ? seqpar_part_begin(total, ranks, rank + 1) : 0;
    seqpar_llama_text *texts = (seqpar_llama_text *)demo_room(end - first + 1, sizeof *texts);
    *all = demo_texts_new(total, desc->max_new_tokens);
    /* every rank makes texts of its own: with all weights, wherever they are else */
    seqpar_status status = demo_hand_weights(r);
    if (!status && mine) status = seqpar_llama_gather(&r->ctx, &r->model);
    if (!status && mine)
        status = seqpar_llama_generate(&r->ctx, &r->model, texts, prompts + first, end - first,
                                       desc);
    if (mine) seqpar_llama_drop(&r->ctx, &r->model);
    if (!status) status = demo_share_texts(r, all, texts, end - first, total);
    if (!status && mine) seqpar_llama_texts_free(texts, end - first);
    free(texts);
    return status;
}

static void demo_rollout_new(demo_rollout *o, int64_t room) {
    demo_rollout_free(o);
    o->prompt = (int64_t *)demo_room(2 * room, sizeof *o->prompt);
    o->first = o->prompt + room;
    o->source = (const demo_document **)demo_room(room, sizeof *o->source);
    o->score = (double *)demo_room(2 * room, sizeof *o->score);
    o->kl = o->score + room;
}

/* Takes a document that begins with the prompt over, and copies its log-probs. */
static void demo_rollout_take(demo_rollout *o, demo_document text, const double *logp,
                              int64_t prompt, const demo_document *source, double score) {
    arrput(o->set.documents, text);
    for (int64_t t = 0; t < text.tokens - prompt; t++) arrput(o->sampled, logp[t]);
    o->prompt[o->texts] = prompt;
    o->first[o->texts] = o->entries;
    o->source[o->texts] = source;
    o->score[o->texts++] = score;
    o->entries += text.tokens - prompt;
}

static int64_t demo_text_tokens(const demo_rollout *o, int64_t i) {
    return (i + 1 < o->texts ? o->first[i + 1] : o->entries) - o->first[i];
}

static demo_document demo_text_document(const seqpar_llama_prompt *prompt,
                                        const int32_t *text) {
    demo_document d = {0};
    for (int64_t t = 0; t < prompt->tokens; t++) demo_push(&d, prompt->ids[t], false);
    for (int64_t t = 0; t < text[0]; t++) demo_push(&d, text[1 + t], true);
    return d;
}

/* Texts for the next `count` prompts, a rollout without scores. A text's number is its place
   in the stream of all texts. */
static seqpar_status demo_draw(demo_rank *r, int64_t count) {
    const demo_ppo_config *c = demo_ppo_options(r);
    const demo_job *job = r->job;
    demo_ppo *p = demo_ppo_of(r);
    const demo_words words = demo_rank_words(r);
    int64_t n = c->n_samples_per_prompt;
    int64_t *which = demo_stream(job->usable_count, c->rollout_batch_size,
                                 (uint64_t)job->config.seed, p->drawn, count);
    seqpar_llama_sample_desc desc = {.max_new_tokens = c->generate_max_len,
                                     .batch = c->micro_rollout_batch_size,
                                     .temperature = c->temperature,
                                     .top_p = c->top_p,
                                     .top_k = c->top_k,
                                     .stops = words.stops,
                                     .stop_count = words.stop_count,
                                     .seed = (uint64_t)job->config.seed,
                                     .cell = job->config.cell};
    seqpar_llama_prompt *prompts = (seqpar_llama_prompt *)demo_room(count * n, sizeof *prompts);
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

/* ---- passes over the rollout: a number for every entry, known to all ranks ---- */

/* Whose a local token is: the text that it predicts a token of (behind the last: a
   pretraining document), or -1; its entry. */
typedef struct {
    int64_t text, entry;
} demo_place;

static demo_place demo_place_of(const demo_rollout *o, const demo_window *w,
                                const seqpar_row *row, int64_t position) {
    int64_t d = 0;
    while (d + 1 < row->docs && row->cu_seqlens[d + 1] <= position) d++;
    demo_place place = {.text = w->which[row->doc_source[d]]};
    if (row->targets[position] == SEQPAR_IGNORE) return (demo_place){-1, -1};
    if (place.text >= o->texts) return place;
    place.entry = o->first[place.text] + position - row->cu_seqlens[d] -
                  (o->prompt[place.text] - 1);
    return place.entry < o->first[place.text] ? (demo_place){-1, -1} : place;
}

/* Of all local tokens, for free(). */
static demo_place *demo_places(const demo_rollout *o, const demo_window *w,
                               const seqpar_llama_batch *b, const seqpar_row *rows) {
    demo_place *places = (demo_place *)demo_room(b->tokens + 1, sizeof *places);
    for (int64_t i = 0; i < b->share->count; i++) {
        const seqpar_piece *piece = &b->share->pieces[i];
        for (int64_t k = 0; k < piece->count; k++)
            places[piece->local + k] = demo_place_of(o, w, &rows[piece->row],
                                                     piece->start + k * piece->stride);
    }
    return places;
}

static seqpar_status demo_pass_rows(demo_rank *r, demo_window *w, seqpar_llama *model,
                                    int64_t first, int64_t count) {
    demo_ppo *p = demo_ppo_of(r);
    seqpar_llama_run run = demo_run_desc(r->job);
    seqpar_llama_batch b;
    seqpar_status status = seqpar_llama_open_batch(&r->ctx, model, &b, w->batch.row + first,
                                                   count, &run);
    double *value = (double *)demo_room(b.tokens + 1, sizeof *value);
    if (!status) status = seqpar_llama_forward(&r->ctx, model, &b, 0);
    if (!status) status = seqpar_llama_values(&r->ctx, model, &b);
    if (!status)
        seqpar_device_read(r->device, value, model->config.score ? b.score.data : b.logp.data,
                           0, b.tokens, demo_value_dtype(r, model));
    demo_place *places = status ? NULL : demo_places(&p->rollout, w, &b, w->batch.row + first);
    for (int64_t t = 0; !status && t < b.tokens; t++) {
        if (places[t].text < 0) continue;
        arrput(p->place[p->column], places[t].entry);
        arrput(p->seen[p->column], value[t]);
    }
    free(places);
    free(value);
    seqpar_llama_close_batch(&r->ctx, model, &b);
    return status;
}

static seqpar_status demo_actor_rows(demo_rank *r, demo_window *w, int64_t first, int64_t count,
                                     int64_t micro) {
    (void)micro;
    return demo_pass_rows(r, w, &r->model, first, count);
}

static seqpar_status demo_reference_rows(demo_rank *r, demo_window *w, int64_t first,
                                         int64_t count, int64_t micro) {
    demo_reference *reference = &demo_ppo_of(r)->reference;
    seqpar_llama *model = reference->there ? &reference->model : &r->model;
    seqpar_llama *adapters = model->adapters;
    (void)micro;
    model->adapters = NULL; /* the actor's, without them, is the reference */
    seqpar_status status = demo_pass_rows(r, w, model, first, count);
    model->adapters = adapters;
    return status;
}

static seqpar_status demo_critic_rows(demo_rank *r, demo_window *w, int64_t first,
                                      int64_t count, int64_t micro) {
    (void)micro;
    return demo_pass_rows(r, w, &demo_ppo_of(r)->critic, first, count);
}

/* Every entry was seen by exactly one rank. */
static seqpar_status demo_share_entries(demo_rank *r, int column) {
    demo_ppo *p = demo_ppo_of(r);
    int64_t size = r->world->size, n = arrlen(p->place[column]);
    int64_t *counts = (int64_t *)demo_room(2 * size, sizeof *counts);
    int64_t *bytes = counts + size;
    int64_t *place = (int64_t *)demo_room(p->rollout.entries + 1, sizeof *place);
    int64_t at = 0;
    double *seen = (double *)demo_room(p->rollout.entries + 1, sizeof *seen);
    for (int64_t w = 0; w < size; w++) bytes[w] = 8;
    seqpar_status status = seqpar_comm_all_gather(r->world, counts, &n, bytes, "entry counts");
    for (int64_t w = 0; w < size; w++) {
        bytes[w] = counts[w] * 8;
        at += counts[w];
    }
    if (!status && at != p->rollout.entries)
        status = seqpar_fail(r->ctx.error, SEQPAR_ERR_SIZE,
                             "the ranks saw %lld of %lld generated tokens", (long long)at,
                             (long long)p->rollout.entries);
    if (!status)
        status = seqpar_comm_all_gather(r->world, place, p->place[column], bytes, "entries");
    if (!status)
        status = seqpar_comm_all_gather(r->world, seen, p->seen[column], bytes, "entry values");
    for (int64_t i = 0; !status && i < at; i++)
        p->rollout.entry[place[i] * ENTRY + column] = seen[i];
    arrfree(p->place[column]);
    arrfree(p->seen[column]);
    free(counts);
    free(place);
    free(seen);
    return status;
}

#endif
