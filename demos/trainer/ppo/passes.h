/* SPDX-License-Identifier: MIT OR Unlicense */
/* passes.h - forward passes that compute log-probs or values for a rollout. An entry is a
 * generated token; each pass fills one column of the table of entries.
 *
 * Each rank computes the entries of its own tokens, in packed rows that are split over ranks as
 * in training. Then all ranks gather all entries. So advantages and other results that need
 * several tokens are computed on every rank, by the same arithmetic. */
#ifndef DEMO_PASSES_H
#define DEMO_PASSES_H
#include "rollout_draw.h"

/* The prediction of a local token. text: index of the text whose next token it predicts;
   o->texts or more: a pretraining document; -1: none. entry: the entry of that next token. */
typedef struct {
    int64_t text, entry;
} demo_prediction;

static demo_prediction demo_prediction_of(const demo_rollout *o, const demo_window *w,
                                          const seqpar_row *row, int64_t position) {
    int64_t d = 0;
    while (d + 1 < row->docs && row->cu_seqlens[d + 1] <= position) d++;
    demo_prediction it = {.text = w->which[row->doc_source[d]]};
    if (row->targets[position] == SEQPAR_IGNORE) return (demo_prediction){-1, -1};
    if (it.text >= o->texts) return it;
    it.entry = o->first[it.text] + position - row->cu_seqlens[d] - (o->prompt[it.text] - 1);
    return it.entry < o->first[it.text] ? (demo_prediction){-1, -1} : it;
}

/* The predictions of all local tokens; the caller calls free(). */
static demo_prediction *demo_predictions(const demo_rollout *o, const demo_window *w,
                                         const seqpar_llama_batch *b, const seqpar_row *rows) {
    demo_prediction *predictions = (demo_prediction *)demo_alloc(b->tokens + 1,
                                                                 sizeof *predictions);
    for (int64_t i = 0; i < b->share->count; i++) {
        const seqpar_piece *piece = &b->share->pieces[i];
        for (int64_t k = 0; k < piece->count; k++)
            predictions[piece->local + k] = demo_prediction_of(
                o, w, &rows[piece->row], piece->start + k * piece->stride);
    }
    return predictions;
}

/* Runs forward of a model on these rows. Appends the log-probs (or values, if the model has a
   score head) of generated tokens to those of the current column. */
static seqpar_status demo_pass_rows(demo_rank *r, demo_window *w, seqpar_llama *model,
                                    int64_t first, int64_t count) {
    demo_ppo *p = demo_ppo_of(r);
    seqpar_llama_batch_desc run = demo_batch_desc(r->job);
    seqpar_llama_batch b;
    seqpar_status status = seqpar_llama_open_batch(&r->ctx, model, &b, w->batch.row + first,
                                                   count, &run);
    double *value = (double *)demo_alloc(b.tokens + 1, sizeof *value);
    if (!status) status = seqpar_llama_forward(&r->ctx, model, &b, 0);
    if (!status) status = seqpar_llama_values(&r->ctx, model, &b);
    if (!status)
        seqpar_device_read(r->device, value, model->config.score ? b.score.data : b.logp.data,
                           0, b.tokens, demo_value_dtype(r, model));
    demo_prediction *predictions =
        status ? NULL : demo_predictions(&p->rollout, w, &b, w->batch.row + first);
    for (int64_t t = 0; !status && t < b.tokens; t++) {
        if (predictions[t].text < 0) continue;
        arrput(p->place[p->column], predictions[t].entry);
        arrput(p->seen[p->column], value[t]);
    }
    free(predictions);
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
    model->adapters = NULL; /* without its adapters, the actor model is the reference */
    seqpar_status status = demo_pass_rows(r, w, model, first, count);
    model->adapters = adapters;
    return status;
}

static seqpar_status demo_critic_rows(demo_rank *r, demo_window *w, int64_t first,
                                      int64_t count, int64_t micro) {
    (void)micro;
    return demo_pass_rows(r, w, &demo_ppo_of(r)->critic, first, count);
}

/* Gathers one column of the entries on all ranks. Exactly one rank has computed each entry. */
static seqpar_status demo_share_entries(demo_rank *r, int column) {
    demo_ppo *p = demo_ppo_of(r);
    int64_t size = r->world->size, n = arrlen(p->place[column]);
    int64_t *counts = (int64_t *)demo_alloc(2 * size, sizeof *counts);
    int64_t *bytes = counts + size;
    int64_t *place = (int64_t *)demo_alloc(p->rollout.entries + 1, sizeof *place);
    int64_t at = 0;
    double *seen = (double *)demo_alloc(p->rollout.entries + 1, sizeof *seen);
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
