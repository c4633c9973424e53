/* SPDX-License-Identifier: MIT OR Unlicense */
/* reference.h - recomputes a dump's step: log-probs and gradients of a Llama-type model on the
 * dump's rows, on one rank, in fp64 or bf16. A mistake inside the model is recomputed the same
 * way, with wrong attention (reference_attention.h) or wrong positions. */
#ifndef ORACLE_REFERENCE_H
#define ORACLE_REFERENCE_H
#include "adapters.h"
#include "reference_tensors.h"

/* ---- the model ---- */

/* Loads a parameter from the folder. If the dump has it too, both must agree, and the dump's
   values are used: training may keep weights in more bits than a folder stores. */
static inline int reference_load(reference *f, const demo_weights *from, int names,
                                 int64_t tensor) {
    const seqpar_tensor *t = &f->model.tensors[tensor];
    demo_tensor_location place = demo_tensor_location_of(&f->model, tensor, names);
    seqpar_safetensors_file *file = demo_weights_file(from, place.name);
    seqpar_safetensors_part all = {
        .name = place.name, .first = place.first * t->cols, .count = t->rows * t->cols};
    tensor_name name;
    whole w = {.copy = -1}, own;
    int status = whole_alloc(f->d, &w, all.count);
    if (!status && tensor != adapter_head(f))
        status = seqpar_safetensors_read_f64(file, w.values, &all, &f->d->error);
    if (reference_part(f, "param.", tensor, &name, &own)) status = -1;
    if (!status && own.values)
        status = reference_compare(f, "--model", from->folder, name.text, &own, &w,
                                   reference_rounding(file, place.name));
    if (!status) {
        double *values = own.values ? own.values : w.values;
        adapters_add(f, values, tensor);
        seqpar_device_write(f->device, f->model.params.data, t->offset, values, all.count,
                            f->device->storage);
    }
    whole_free(&own);
    whole_free(&w);
    return status ? -1 : 0;
}

static inline void reference_score_in(reference *f, seqpar_safetensors_file *file) {
    for (int64_t i = 0; i < seqpar_safetensors_count(file); i++) {
        const seqpar_safetensors_tensor *t = seqpar_safetensors_at(file, i);
        size_t length = strlen(t->name), ending = strlen(".weight");
        if (t->dims == 2 && t->shape[0] == 1 && strncmp(t->name, "model.", 6) &&
            length > ending && length - ending < sizeof f->head &&
            !strcmp(t->name + length - ending, ".weight"))
            snprintf(f->head, sizeof f->head, "%.*s", (int)(length - ending), t->name);
    }
}

/* Finds the name of a reward model's head: score, or else the folder's weight of shape (1, n)
   outside of "model.", which has the layers and norms. */
static inline int reference_score(reference *f, const char *folder) {
    demo_weights w;
    snprintf(f->head, sizeof f->head, "score");
    if (demo_weights_open(&w, folder, &f->d->error)) return -1;
    for (int64_t i = 0; i < w.count && !demo_weights_find(&w, "score.weight"); i++)
        reference_score_in(f, w.shards[i].file);
    demo_weights_close(&w);
    return 0;
}

static inline int reference_weights(reference *f, const char *folder) {
    demo_weights w;
    int status = demo_model_weights(&w, &f->model, folder, &f->d->error), names;
    if (status) return -1;
    names = demo_names_of(&w);
    for (int64_t i = 0; !status && i < f->model.tensor_count; i++)
        status = reference_load(f, &w, names, i);
    demo_weights_close(&w);
    return status ? -1 : 0;
}

/* Allocates the lists of rows. Takes the device over: reference_close closes it. */
static inline int reference_begin(reference *f, dump *d, seqpar_device *device) {
    memset(f, 0, sizeof *f);
    f->d = d;
    f->device = device;
    f->comm = seqpar_comm_self();
    f->count = d->world / d->sp * d->accumulation;
    f->rows = (dump_row *)calloc((size_t)f->count, sizeof *f->rows);
    f->logp = (double **)calloc((size_t)f->count, sizeof *f->logp);
    return f->device && f->comm && f->rows && f->logp ? 0 : reference_no_memory(f);
}

/* Reads all rows. 0; 1: a row lacks ids or labels, or its index is wrong; -1 with d->error. */
static inline int reference_rows(reference *f) {
    for (int64_t i = 0; i < f->count; i++) {
        dump_row *row = &f->rows[i];
        dump_places found;
        if (dump_read_row(f->d, i / f->d->accumulation, i % f->d->accumulation, row, &found))
            return -1;
        if (!row->ids || found.missing + found.twice + found.outside) return 1;
        if (!row->labels && f->d->facts.objective != DUMP_RM) return 1;
    }
    return 0;
}

static inline void reference_close(reference *f) {
    for (int64_t i = 0; f->rows && i < f->count; i++) dump_row_free(&f->rows[i]);
    for (int64_t i = 0; f->logp && i < f->count; i++) free(f->logp[i]);
    for (int64_t i = 0; f->tapes && i < f->count; i++) tape_free(&f->tapes[i]);
    free(f->tapes);
    free(f->rows);
    free(f->logp);
    if (f->adapters_open) free(f->gradient);
    free(f->whole);
    free(f->adapter);
    if (f->optim_open) seqpar_optim_close(&f->ctx, &f->optim);
    if (f->adapters_open) seqpar_llama_close(&f->ctx, &f->adapters);
    if (f->model_open) seqpar_llama_close(&f->ctx, &f->model);
    if (f->ctx_open) seqpar_ctx_close(&f->ctx);
    if (f->device) seqpar_device_close(f->device);
    if (f->comm) seqpar_comm_free(f->comm);
}

/* Opens the model without weights. It needs the sizes that reference_rows reads. */
static inline int reference_config(reference *f, const seqpar_llama_config *config) {
    seqpar_optim_desc desc = {.kind = SEQPAR_OPTIM_SGD};
    for (int64_t i = 0; i < f->count; i++) {
        f->logp[i] = (double *)calloc((size_t)f->rows[i].tokens + 1, sizeof **f->logp);
        if (!f->logp[i]) return reference_no_memory(f);
    }
    if (seqpar_ctx_open(&f->ctx, f->comm, f->device, 1)) return reference_failed(f);
    f->ctx_open = 1;
    if (seqpar_llama_open(&f->ctx, &f->model, config)) return reference_failed(f);
    f->model_open = 1;
    if (seqpar_optim_open(&f->ctx, &f->optim, f->model.tensors, f->model.tensor_count, &desc))
        return reference_failed(f);
    f->optim_open = 1;
    f->gradient = f->whole = (double *)calloc((size_t)f->model.elements + 1, sizeof *f->whole);
    return f->whole ? 0 : reference_no_memory(f);
}

/* If all layers of the model have a window, the metadata must give the same one. If only some
   have it (window_from), the model's is used; if none, the metadata's. */
static inline int reference_window(reference *f, const seqpar_llama_config *c,
                                   const char *folder) {
    const dump_facts *facts = &f->d->facts;
    if (!c->window || c->window_from || facts->window == c->window) return 0;
    seqpar_fail(
        &f->d->error, SEQPAR_ERR_FILE_FORMAT,
        "%.300s: metadata window is %lld, but the model in %.300s has %lld; leave out metadata "
        "window, or give --model the model that was trained",
        f->d->ranks[0].path, (long long)facts->window, folder, (long long)c->window);
    return -1;
}

/* Refuses attention dropout: a dump does not hold its masks. */
static inline int reference_dropout(reference *f, const seqpar_llama_config *c,
                                    const char *folder) {
    if (c->attention_dropout <= 0) return 0;
    seqpar_fail(&f->d->error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s/config.json: \"attention_dropout\" is %g, but a dump does not hold "
                "dropout masks; train and judge with dropout 0",
                folder, c->attention_dropout);
    return -1;
}

/* Loads the model in `folder`, after reference_rows. adapter: the adapters' folder, or NULL. */
static inline int reference_model(reference *f, const char *folder, const char *adapter) {
    seqpar_llama_config config = {.layers = 0};
    if (demo_load_config(folder, &config, &f->d->error) ||
        reference_window(f, &config, folder) || reference_dropout(f, &config, folder))
        return -1;
    if (f->d->facts.objective == DUMP_RM) {
        if (reference_score(f, folder)) return -1;
        config.score = f->head;
    }
    if (reference_config(f, &config) || (adapter && reference_adapters(f, adapter))) return -1;
    return reference_weights(f, folder);
}

/* device: fp64 or bf16, closed by reference_close, which is to be called in any case. 0; 1: the
   dump lacks something; -1 with d->error. */
static inline int reference_open(reference *f, dump *d, const char *folder, const char *adapter,
                                 seqpar_device *device) {
    int status = reference_begin(f, d, device);
    if (!status) status = reference_rows(f);
    return status ? status : reference_model(f, folder, adapter);
}

/* NULL: the model has no such tensor. */
static inline const seqpar_tensor *model_tensor(const reference *f, const char *name) {
    for (int64_t i = 0; i < f->model.tensor_count; i++)
        if (!strcmp(f->model.tensors[i].name, name)) return &f->model.tensors[i];
    return NULL;
}

/* ---- a step ---- */

/* A row as seqpar.h takes it: one document, since reference_attention.h masks the dump's
   documents itself. */
typedef struct reference_row {
    seqpar_row row;
    int64_t cu_seqlens[2], source[1];
    int32_t *ids, *targets, *positions;
} reference_row;

/* How many tokens of t's document lie before t and on t's rank. */
static inline int64_t position_of_own(const dump_row *row, int64_t t) {
    int64_t count = 0;
    for (int64_t i = row_document_begin(row, t); i < t; i++)
        count += row->rank[i] == row->rank[t];
    return count;
}

static inline int64_t way_position(const reference *f, const dump_row *row, int64_t t) {
    return f->way->positions == POSITIONS_RUN_ON           ? position_runs_on(row, t)
           : f->way->positions == POSITIONS_LOCAL          ? position_local(row, t)
           : f->way->positions == POSITIONS_LOCAL_DOCUMENT ? position_of_own(row, t)
                                                           : position_right(row, t);
}

/* Row i without its padding, with the way's positions. An id or label that is no int32 becomes
   -1, which is refused; a cast could make it a valid one. */
static inline int reference_row_make(const reference *f, int64_t i, reference_row *to) {
    const dump_row *row = &f->rows[i];
    int64_t n = row_end(row);
    memset(to, 0, sizeof *to);
    to->ids = (int32_t *)calloc((size_t)n * 3 + 1, sizeof *to->ids);
    if (!to->ids) return seqpar_fail(&f->d->error, SEQPAR_ERR_MEMORY, "no memory"), -1;
    to->targets = to->ids + n;
    to->positions = to->targets + n;
    for (int64_t t = 0; t < n; t++) {
        int64_t id = row->ids[t], label = row->labels ? row->labels[t] : DUMP_IGNORE;
        to->ids[t] = id < 0 || id > INT32_MAX ? -1 : (int32_t)id;
        to->targets[t] = label == DUMP_IGNORE             ? SEQPAR_IGNORE
                         : label < 0 || label > INT32_MAX ? -1
                                                          : (int32_t)label;
        to->positions[t] = (int32_t)way_position(f, row, t);
    }
    to->cu_seqlens[1] = n;
    to->source[0] = i;
    to->row = (seqpar_row){.index = i,
                           .tokens = n,
                           .cell = n,
                           .docs = 1,
                           .cu_seqlens = to->cu_seqlens,
                           .ids = to->ids,
                           .targets = to->targets,
                           .position_ids = to->positions,
                           .doc_source = to->source};
    return 0;
}

/* Reads row i's log-probs, or a reward model's values, from the device. */
static inline void reference_read(reference *f, const seqpar_llama_batch *b, int64_t i) {
    if (f->model.config.score)
        seqpar_device_read(f->device, f->logp[i], b->score.data, 0, b->tokens,
                           f->device->storage);
    else
        seqpar_device_read(f->device, f->logp[i], b->logp.data, 0, b->tokens,
                           f->device->accumulator);
}

/* What a term is multiplied by in this reference. */
static inline double reference_term(const reference *f, int term) {
    return f->weights && !f->without[term] ? term_factor(&f->d->facts, term) : 0;
}

/* The seeds of a pass on the device: of log-probs, and of each term. */
typedef struct pass_seeds {
    seqpar_buffer logp, term[TERMS];
} pass_seeds;

static inline int pass_seeds_add(reference *f, seqpar_buffer *to, int64_t tokens, double factor,
                                 const double *seeds) {
    int type = f->model.config.score ? f->device->storage : f->device->accumulator;
    double *scaled = (double *)malloc((size_t)tokens * sizeof *scaled);
    int status = scaled ? seqpar_buffer_new(&f->ctx, to, tokens * seqpar_dtype_bytes(type),
                                            SEQPAR_MEM_ACTIVATIONS)
                        : seqpar_fail(f->ctx.error, SEQPAR_ERR_MEMORY,
                                      "no memory for the reference's seeds");
    for (int64_t t = 0; !status && t < tokens; t++) scaled[t] = factor * seeds[t];
    if (!status) seqpar_device_write(f->device, to->data, 0, scaled, tokens, type);
    free(scaled);
    return status;
}

/* A token's loss is w ((1 - smoothing) (-logp) + smoothing (-mean_logp) + z lse^2 - entropy),
   each with its factor; seeds and f->weights have -w. */
static inline int pass_seeds_open(reference *f, int64_t i, int64_t tokens, const double *seeds,
                                  pass_seeds *to) {
    static const double sign[TERMS] = {-1, -1, 1};
    int status = pass_seeds_add(f, &to->logp, tokens, 1 - reference_term(f, TERM_SMOOTHING),
                                seeds);
    for (int k = 0; k < TERMS && !status; k++)
        if (reference_term(f, k) > 0)
            status = pass_seeds_add(f, &to->term[k], tokens, sign[k] * reference_term(f, k),
                                    f->weights[i]);
    return status;
}

static inline void pass_seeds_free(reference *f, pass_seeds *s) {
    if (s->logp.data) seqpar_buffer_free(&f->ctx, &s->logp);
    for (int k = 0; k < TERMS; k++)
        if (s->term[k].data) seqpar_buffer_free(&f->ctx, &s->term[k]);
}

/* seeds NULL: the forward pass of row i, to f->logp[i]. Else both passes, with seeds (tokens)
   for dL/dlogp; f->logp[i] stays. */
static inline int reference_pass(reference *f, const seqpar_row *row, int64_t i,
                                 const double *seeds) {
    seqpar_attn_kernel kernel = {reference_forward, reference_gradients, f};
    seqpar_llama_batch_desc run = {.kernel = &kernel, .untaught = f->untaught};
    seqpar_llama_batch b;
    pass_seeds own = {.logp = {.data = NULL}};
    int status = seqpar_llama_open_batch(&f->ctx, &f->model, &b, row, 1, &run);
    f->row = i;
    f->calls = 0;
    if (!status && seeds) status = pass_seeds_open(f, i, b.tokens, seeds, &own);
    seqpar_vocab_seeds given = {.dlogp = own.logp.data,
                                .dsmooth = own.term[TERM_SMOOTHING].data,
                                .dzloss = own.term[TERM_Z].data,
                                .dentropy = own.term[TERM_ENTROPY].data};
    if (!status) status = seqpar_llama_forward(&f->ctx, &f->model, &b, seeds != NULL);
    if (!status && seeds)
        status = seqpar_llama_backward(&f->ctx, &f->model, &b, &f->optim, 0, &given);
    if (!status && !seeds) status = seqpar_llama_values(&f->ctx, &f->model, &b);
    if (!status && !seeds) reference_read(f, &b, i);
    pass_seeds_free(f, &own);
    seqpar_llama_close_batch(&f->ctx, &f->model, &b);
    return status ? reference_failed(f) : 0;
}

/* Log-probs of all rows, computed in this way, to f->logp. 0, or -1 with d->error. */
static inline int reference_logp(reference *f, const reference_way *way) {
    int status = 0;
    f->way = way;
    for (int64_t i = 0; !status && i < f->count; i++) {
        reference_row row;
        status = reference_row_make(f, i, &row);
        if (!status && row.row.tokens) status = reference_pass(f, &row.row, i, NULL);
        bar_step(1);
        free(row.ids);
    }
    return status;
}

/* Adds the last step's gradient to f->whole; seqpar_step_norm makes it readable. 0, or -1 with
   d->error. */
static inline int reference_add(reference *f) {
    int64_t most = 0;
    int status = seqpar_step_norm(&f->ctx, &f->optim);
    for (int64_t i = 0; i < f->model.tensor_count; i++)
        if (f->model.tensors[i].rows * f->model.tensors[i].cols > most)
            most = f->model.tensors[i].rows * f->model.tensors[i].cols;
    double *one = (double *)calloc((size_t)most + 1, sizeof *one);
    for (int64_t i = 0; one && !status && i < f->model.tensor_count; i++) {
        const seqpar_tensor *t = &f->model.tensors[i];
        seqpar_optim_part part = {.state = SEQPAR_STATE_GRADIENT, .tensor = i};
        part.count = t->rows * t->cols;
        status = seqpar_optim_read(&f->ctx, &f->optim, one, &part);
        for (int64_t e = 0; !status && e < part.count; e++) f->whole[t->offset + e] += one[e];
    }
    if (!one) return reference_no_memory(f);
    free(one);
    return status ? reference_failed(f) : 0;
}

/* Row i is a step of its own: seqpar_step_begin takes all rows of a step at once, and here only
   one row is in memory at a time. */
static inline int reference_step(reference *f, const seqpar_row *row, int64_t i,
                                 const double *seeds) {
    if (seqpar_step_begin(&f->ctx, &f->optim, row, 1, SEQPAR_LAYOUT_CONTIGUOUS, 1))
        return reference_failed(f);
    return reference_pass(f, row, i, seeds) ? -1 : reference_add(f);
}

/* The gradient, computed in this way, to f->gradient. seeds (count): dL/dlogp of each row
   (tokens), or NULL: the row is skipped. 0, or -1 with d->error. */
static inline int reference_gradient(reference *f, const reference_way *way,
                                     double *const *seeds) {
    int status = 0;
    f->way = way;
    memset(f->whole, 0, (size_t)f->model.elements * sizeof *f->whole);
    for (int64_t i = 0; !status && i < f->count; i++) {
        reference_row row;
        status = reference_row_make(f, i, &row);
        if (!status && row.row.tokens && seeds[i])
            status = reference_step(f, &row.row, i, seeds[i]);
        bar_step(1);
        free(row.ids);
    }
    if (f->adapters_open) adapters_gradient(f);
    return status;
}
#endif
