/* SPDX-License-Identifier: MIT OR Unlicense */
/* sampled_world.h - samples texts on one rank and compares each token's log-prob with that of a
   training pass over the texts, on any ranks and in any packing. */
#ifndef SAMPLED_WORLD_H
#define SAMPLED_WORLD_H
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "seqpar_llama.h"

enum { TEXTS = 7 };

/* Prompts, what was sampled after them, and the same texts in training. */
typedef struct world {
    seqpar_llama_config config;
    seqpar_adapter_desc adapter; /* rank 0: none */
    seqpar_device *(*device)(int64_t threads);
    seqpar_llama_sample_desc sample;
    int64_t count, prompt_tokens[TEXTS];
    int32_t *prompt[TEXTS];
    seqpar_llama_text text[TEXTS];
    /* training: the texts in order, so many documents in each row */
    int64_t row_docs[TEXTS], rows, ranks;
    int layout, schedule, numbered;
    double *logp[TEXTS];
    _Atomic int64_t found; /* log-probs that training has */
} world;

/* Weights are 3 times init's, so that texts differ. Gains, biases and adapters move away from
   their initial values, so that no bias and no adapter's B is 0. */
static void spread_weights(seqpar_ctx *ctx, seqpar_llama *m) {
    seqpar_llama_init(ctx, m, 11);
    for (int64_t i = 0; i < m->tensor_count; i++)
        for (int64_t n = 0; n < m->tensors[i].rows * m->tensors[i].cols; n++) {
            int64_t at = m->tensors[i].offset + n;
            double x;
            seqpar_device_read(ctx->device, &x, m->params.data, at, 1, ctx->device->storage);
            x = m->tensors[i].decay && !m->adapter.rank ? 3 * x
                                                        : x + 0.3 * cos((double)(7 * i + n));
            seqpar_device_write(ctx->device, m->params.data, at, &x, 1, ctx->device->storage);
        }
}

/* A rank with a model; what follows a failed open is not tried. */
typedef struct place {
    seqpar_device *device;
    seqpar_ctx ctx;
    seqpar_llama model, adapters;
} place;

static seqpar_status place_open(place *p, seqpar_comm *comm, const world *w, int64_t threads) {
    p->device = w->device(threads);
    seqpar_status status = seqpar_ctx_open(&p->ctx, comm, p->device, comm->size);
    if (!status) status = seqpar_llama_open(&p->ctx, &p->model, &w->config);
    if (!status) spread_weights(&p->ctx, &p->model);
    memset(&p->adapters, 0, sizeof p->adapters);
    if (status || !w->adapter.rank) return status;
    status = seqpar_llama_open_adapters(&p->ctx, &p->adapters, &p->model, &w->adapter, 0, 0);
    if (!status) spread_weights(&p->ctx, &p->adapters);
    p->model.adapters = &p->adapters;
    return status;
}

static void place_close(place *p) {
    seqpar_llama_close(&p->ctx, &p->adapters);
    seqpar_llama_close(&p->ctx, &p->model);
    seqpar_ctx_close(&p->ctx);
    seqpar_device_close(p->device);
}

static seqpar_status sample_rank(seqpar_comm *comm, void *user) {
    world *w = user;
    seqpar_llama_prompt prompts[TEXTS];
    place p;
    seqpar_status status = place_open(&p, comm, w, 1);
    for (int64_t i = 0; i < w->count; i++)
        prompts[i] = (seqpar_llama_prompt){w->prompt[i], w->prompt_tokens[i], 100 + i};
    if (!status)
        status = seqpar_llama_generate(&p.ctx, &p.model, w->text, prompts, w->count,
                                       &w->sample);
    place_close(&p);
    return status;
}

/* ---- training on the texts ---- */

static int64_t text_tokens(const world *w, int64_t i) {
    return w->prompt_tokens[i] + w->text[i].count;
}

static int32_t text_id(const world *w, int64_t i, int64_t t) {
    return t < w->prompt_tokens[i] ? w->prompt[i][t] : w->text[i].ids[t - w->prompt_tokens[i]];
}

static void row_fill(const world *w, seqpar_row *row, int64_t first) {
    int64_t *cu = (int64_t *)row->cu_seqlens, *source = (int64_t *)row->doc_source, at = 0;
    for (int64_t d = 0; d < row->docs; d++, cu[d] = at) {
        int64_t tokens = text_tokens(w, first + d);
        source[d] = 5 * (first + d) + 3; /* numbers rise, and leave some out */
        for (int64_t t = 0; t < tokens; t++, at++) {
            ((int32_t *)row->ids)[at] = text_id(w, first + d, t);
            ((int32_t *)row->position_ids)[at] = (int32_t)t;
            ((int32_t *)row->targets)[at] = t + 1 < tokens ? text_id(w, first + d, t + 1)
                                                           : SEQPAR_IGNORE;
        }
    }
    if (!w->numbered) row->doc_source = NULL;
}

/* The rows of the world; all that they point to lies in *room, to be freed. */
static void rows_new(const world *w, seqpar_row *rows, void **room) {
    int64_t total = 0, first = 0;
    for (int64_t i = 0; i < w->count; i++) total += text_tokens(w, i);
    int64_t *numbers = *room = calloc((size_t)(3 * TEXTS + 2 * total + 2), 8);
    int32_t *ids = (int32_t *)(numbers + 3 * TEXTS);
    for (int64_t r = 0; r < w->rows; first += w->row_docs[r++]) {
        seqpar_row *row = &rows[r];
        *row = (seqpar_row){.index = r, .cell = w->sample.cell, .docs = w->row_docs[r]};
        for (int64_t d = 0; d < row->docs; d++) row->tokens += text_tokens(w, first + d);
        row->cu_seqlens = numbers;
        row->doc_source = numbers + row->docs + 1;
        numbers += 2 * row->docs + 1;
        row->ids = ids;
        row->position_ids = ids + row->tokens;
        row->targets = ids + 2 * row->tokens;
        ids += 3 * row->tokens;
        row_fill(w, row, first);
    }
}

/* The log-probs that this rank has of row r, whose first text is number `first`. */
static void take_logp(world *w, const seqpar_row *rows, int64_t r, int64_t first,
                      const seqpar_share *share, const double *local) {
    double *row = calloc((size_t)rows[r].tokens + 1, sizeof *row);
    for (int64_t t = 0; t < rows[r].tokens; t++) row[t] = NAN;
    seqpar_gather(row, local, share, r, sizeof *row);
    for (int64_t d = 0; d < rows[r].docs; d++)
        for (int64_t i = 0; i < w->text[first + d].count; i++) {
            double x = row[rows[r].cu_seqlens[d] + w->prompt_tokens[first + d] + i - 1];
            if (x != x) continue;
            w->logp[first + d][i] = x;
            w->found++;
        }
    free(row);
}

static seqpar_status train_rank(seqpar_comm *comm, void *user) {
    world *w = user;
    double temperature = w->sample.temperature ? w->sample.temperature : 1;
    seqpar_llama_batch_desc how = {
        .layout = w->layout, .schedule = w->schedule, .temperature = temperature};
    seqpar_row rows[TEXTS];
    seqpar_llama_batch b = {0};
    void *room;
    place p;
    seqpar_status status = place_open(&p, comm, w, 1);
    rows_new(w, rows, &room);
    if (!status) status = seqpar_llama_open_batch(&p.ctx, &p.model, &b, rows, w->rows, &how);
    if (!status) status = seqpar_llama_forward(&p.ctx, &p.model, &b, 0);
    if (!status) status = seqpar_llama_values(&p.ctx, &p.model, &b);
    double *local = calloc((size_t)b.tokens + 1, sizeof *local);
    if (!status)
        seqpar_device_read(p.device, local, b.logp.data, 0, b.tokens, p.device->accumulator);
    for (int64_t r = 0, first = 0; !status && r < w->rows; first += w->row_docs[r++])
        take_logp(w, rows, r, first, b.share, local);
    seqpar_llama_close_batch(&p.ctx, &p.model, &b);
    place_close(&p);
    free(local);
    free(room);
    return status;
}

/* Log-probs of sampling against training's: how many there are, how many differ in bits, how
   many training lacks, and the largest difference. */
typedef struct comparison {
    int64_t all, differ, missing;
    double worst;
} comparison;

/* Trains one pass over the texts; 0 where it failed, and *error says why. */
static int world_compare(world *w, comparison *c, seqpar_error *error) {
    memset(c, 0, sizeof *c);
    w->found = 0;
    for (int64_t i = 0; i < w->count; i++)
        memset(w->logp[i], 0xff, (size_t)w->text[i].count * sizeof *w->logp[i]);
    if (seqpar_run_threads(w->ranks, train_rank, w, error)) return 0;
    for (int64_t i = 0; i < w->count; i++)
        for (int64_t t = 0; t < w->text[i].count; t++, c->all++) {
            double a = w->text[i].logp[t], b = w->logp[i][t];
            c->differ += memcmp(&a, &b, sizeof a) != 0;
            if (!(fabs(a - b) <= c->worst)) c->worst = fabs(a - b);
        }
    c->missing = c->all - w->found;
    return 1;
}

/* Samples, on one rank; 0 where it failed. */
static int world_sample(world *w, seqpar_error *error) {
    if (seqpar_run_threads(1, sample_rank, w, error)) return 0;
    for (int64_t i = 0; i < w->count; i++)
        w->logp[i] = (double *)malloc((size_t)w->text[i].count * sizeof *w->logp[i]);
    return 1;
}

static void world_free(world *w) {
    seqpar_llama_texts_free(w->text, w->count);
    for (int64_t i = 0; i < w->count; i++) {
        free(w->prompt[i]);
        free(w->logp[i]);
    }
}
#endif
