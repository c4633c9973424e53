/* SPDX-License-Identifier: MIT OR Unlicense */
/* reference.h - the step computed again: log-probs and gradients of a Llama-type model on the
 * rows of a dump, in fp64 on one rank. Mistakes that happen inside of the model are computed
 * the same way, by another mask, other positions or another backward pass. */
#ifndef ORACLE_REFERENCE_H
#define ORACLE_REFERENCE_H
#include "model_folder.h"
#include "checks.h"
#include "parts.h"
#include "kept.h"

/* Which keys a query sees. All but the first two ask who holds which token. */
typedef enum reference_mask {
    MASK_RIGHT,
    MASK_WHOLE_ROW,  /* documents are ignored */
    MASK_NOT_CAUSAL, /* later tokens of the document, too */
    MASK_OWN_TOKENS, /* those of the rank alone */
    MASK_LOCAL_ROWS, /* rows of ranks are compared, not places */
    MASK_WITHOUT_LAST_HOP /* the last rank of the ring is left out */
} reference_mask;

typedef enum reference_backward {
    BACKWARD_RIGHT,
    BACKWARD_DKV_STAYS,   /* dk, dv from the rank's own queries */
    BACKWARD_DQ_STAYS,    /* dq from the rank's own keys */
    BACKWARD_NO_DELTA,    /* out . dout is not subtracted */
    BACKWARD_DELTA_OF_HOP /* each hop uses its own out and lse */
} reference_backward;

typedef enum reference_positions {
    POSITIONS_RIGHT,
    POSITIONS_RUN_ON,
    POSITIONS_LOCAL
} reference_positions;

/* How the step is computed. */
typedef struct reference_way {
    const char *name; /* of the mistake */
    reference_mask mask;
    reference_backward backward;
    reference_positions positions;
} reference_way;

/* What went through layer 0's attention: (tokens, heads or kv_heads, head_dim), lse
   (tokens, heads). */
typedef struct reference_tape {
    double *q, *k, *v, *out, *lse, *dout, *dq, *dk, *dv;
} reference_tape;

typedef struct reference {
    dump *d;
    seqpar_comm *comm;
    seqpar_device *device;
    seqpar_ctx ctx;
    seqpar_llama model;
    seqpar_optim optim;
    int ctx_open, model_open, optim_open;
    int64_t count;
    dump_row *rows; /* (count) replica after replica, of each its micro-batches */
    /* of the way that was run last */
    double **logp;    /* (count) by token */
    double *gradient; /* (model.elements) */
    const reference_way *way;
    int64_t row; /* which one attention is computed of */
    reference_tape *tapes; /* (count), or NULL: nothing is kept */
    int64_t calls;         /* of attention in this pass */
} reference;

/* ---- attention ---- */

/* Distance round the ring from the query's rank to the key's. */
static inline int64_t hop_of(const reference *f, const dump_row *row, int64_t query,
                             int64_t key) {
    int64_t sp = f->d->sp;
    return (row->rank[query] - row->rank[key] + sp) % sp;
}

static inline int reference_sees(const reference *f, const dump_row *row, int64_t query,
                                 int64_t key) {
    int same = row_document_begin(row, query) == row_document_begin(row, key);
    int causal = key <= query;
    switch (f->way->mask) {
    case MASK_WHOLE_ROW: return causal;
    case MASK_NOT_CAUSAL: return same;
    case MASK_OWN_TOKENS: return same && causal && hop_of(f, row, query, key) == 0;
    case MASK_LOCAL_ROWS:
        return (same && row->local[key] <= row->local[query]) || key == query;
    case MASK_WITHOUT_LAST_HOP:
        return same && causal &&
               (hop_of(f, row, query, key) == 0 || hop_of(f, row, query, key) < f->d->sp - 1);
    default: return same && causal;
    }
}

/* One head of one row in fp64: (tokens, head_dim) each, lse and delta (tokens). */
typedef struct head_arrays {
    int64_t tokens, head_dim;
    double *q, *k, *v, *out, *dout, *dq, *dk, *dv, *lse, *delta;
    char *sees; /* (tokens) of one query */
    /* of one query, by the hop that brings the key: sums for BACKWARD_DELTA_OF_HOP */
    double *hop_total, *hop_dot;
} head_arrays;

static inline double reference_number(const void *x, int64_t i, int type) {
    return type == SEQPAR_DTYPE_F64   ? ((const double *)x)[i]
           : type == SEQPAR_DTYPE_F32 ? (double)((const float *)x)[i]
                                      : (double)seqpar_bf16_to_float(((const uint16_t *)x)[i]);
}

static inline void reference_set(void *x, int64_t i, int type, double value) {
    if (type == SEQPAR_DTYPE_F64)
        ((double *)x)[i] = value;
    else
        ((float *)x)[i] = (float)value;
}

static inline double dot_product(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static inline void add_multiple(double *to, double factor, const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] += factor * x[i];
}

static inline void look(const reference *f, head_arrays *h, int64_t query) {
    const dump_row *row = &f->rows[f->row];
    for (int64_t j = 0; j < h->tokens; j++) h->sees[j] = (char)reference_sees(f, row, query, j);
}

static inline double head_score(const head_arrays *h, int64_t i, int64_t j, double scale) {
    return scale * dot_product(h->q + i * h->head_dim, h->k + j * h->head_dim, h->head_dim);
}

static inline void head_forward(const reference *f, head_arrays *h, double scale) {
    int64_t d = h->head_dim;
    for (int64_t i = 0; i < h->tokens; i++) {
        double most = -INFINITY, total = 0;
        look(f, h, i);
        for (int64_t j = 0; j < h->tokens; j++)
            if (h->sees[j]) most = fmax(most, head_score(h, i, j, scale));
        for (int64_t j = 0; j < h->tokens; j++) {
            double w = h->sees[j] ? exp(head_score(h, i, j, scale) - most) : 0;
            total += w;
            if (w > 0) add_multiple(h->out + i * d, w, h->v + j * d, d);
        }
        for (int64_t c = 0; c < d; c++) h->out[i * d + c] /= total;
        h->lse[i] = most + log(total);
    }
}

/* The softmax within each hop's keys, and what stands in the place of delta there. */
static inline void hop_sums(const reference *f, head_arrays *h, int64_t i, double scale) {
    const dump_row *row = &f->rows[f->row];
    int64_t d = h->head_dim, sp = f->d->sp;
    memset(h->hop_total, 0, (size_t)sp * sizeof *h->hop_total);
    memset(h->hop_dot, 0, (size_t)sp * sizeof *h->hop_dot);
    for (int64_t j = 0; j < h->tokens; j++) {
        double w = h->sees[j] ? exp(head_score(h, i, j, scale) - h->lse[i]) : 0;
        int64_t hop = hop_of(f, row, i, j);
        h->hop_total[hop] += w;
        h->hop_dot[hop] += w * dot_product(h->dout + i * d, h->v + j * d, d);
    }
}

/* What the pair adds; hop: how the key came to the query. */
static inline void pair_gradient(const reference *f, head_arrays *h, int64_t i, int64_t j,
                                 double scale) {
    int64_t d = h->head_dim, hop = hop_of(f, &f->rows[f->row], i, j);
    reference_backward how = f->way->backward;
    double w = exp(head_score(h, i, j, scale) - h->lse[i]);
    double delta = how == BACKWARD_NO_DELTA ? 0 : h->delta[i], ds;
    if (how == BACKWARD_DELTA_OF_HOP) delta = h->hop_dot[hop] / h->hop_total[hop];
    ds = scale * w * (dot_product(h->dout + i * d, h->v + j * d, d) - delta);
    if (how != BACKWARD_DQ_STAYS || !hop) add_multiple(h->dq + i * d, ds, h->k + j * d, d);
    if (how == BACKWARD_DKV_STAYS && hop) return;
    add_multiple(h->dk + j * d, ds, h->q + i * d, d);
    add_multiple(h->dv + j * d, w, h->dout + i * d, d);
}

static inline void head_backward(const reference *f, head_arrays *h, double scale) {
    for (int64_t i = 0; i < h->tokens; i++) {
        look(f, h, i);
        if (f->way->backward == BACKWARD_DELTA_OF_HOP) hop_sums(f, h, i, scale);
        for (int64_t j = 0; j < h->tokens; j++)
            if (h->sees[j]) pair_gradient(f, h, i, j, scale);
    }
}

static inline int head_room(head_arrays *h, int64_t tokens, int64_t head_dim, int64_t sp) {
    int64_t wide = tokens * head_dim;
    double *x = (double *)calloc((size_t)(8 * wide + 2 * tokens + 2 * sp + 1), sizeof *x);
    double **arrays[] = {&h->q, &h->k, &h->v, &h->out, &h->dout, &h->dq, &h->dk, &h->dv};
    *h = (head_arrays){.tokens = tokens, .head_dim = head_dim};
    h->sees = (char *)calloc((size_t)tokens + 1, 1);
    for (int i = 0; x && i < 8; i++) *arrays[i] = x + i * wide;
    if (x) h->lse = x + 8 * wide;
    if (x) h->delta = h->lse + tokens;
    if (x) h->hop_total = h->delta + tokens;
    if (x) h->hop_dot = h->hop_total + sp;
    return x && h->sees ? 0 : -1;
}

static inline void head_free(head_arrays *h) {
    free(h->q);
    free(h->sees);
}

/* Column `head` of a tensor whose rows are `stride` elements apart, and back. */
static inline void head_take(double *to, const void *from, int64_t stride, int64_t head,
                             const head_arrays *h, int type) {
    for (int64_t i = 0; i < h->tokens * h->head_dim; i++)
        to[i] = reference_number(from, i / h->head_dim * stride + head * h->head_dim +
                                           i % h->head_dim,
                                 type);
}

static inline void head_give(void *to, int64_t heads, int64_t head, const double *from,
                             const head_arrays *h, int type) {
    for (int64_t i = 0; i < h->tokens * h->head_dim; i++)
        reference_set(to, (i / h->head_dim * heads + head) * h->head_dim + i % h->head_dim,
                      type, from[i]);
}

static inline void head_add(void *to, int64_t heads, int64_t head, const double *from,
                            const head_arrays *h, int type) {
    for (int64_t i = 0; i < h->tokens * h->head_dim; i++) {
        int64_t at = (i / h->head_dim * heads + head) * h->head_dim + i % h->head_dim;
        reference_set(to, at, type, reference_number(to, at, type) + from[i]);
    }
}

static inline void head_inputs(const reference *f, const seqpar_attn_source *a, int64_t head,
                               head_arrays *h) {
    int64_t kv = head / (a->heads / a->kv_heads);
    int type = f->device->storage;
    head_take(h->q, a->q, a->q_stride, head, h, type);
    head_take(h->k, a->k, a->k_stride, kv, h, type);
    head_take(h->v, a->v, a->v_stride, kv, h, type);
}

/* A copy of `rows` rows, `width` elements each, `stride` apart; NULL: no memory. */
static inline void keep(double **to, const void *from, int64_t rows, int64_t width,
                        int64_t stride, int type) {
    double *copy = (double *)malloc(((size_t)(rows * width) + 1) * sizeof *copy);
    for (int64_t i = 0; copy && i < rows * width; i++)
        copy[i] = reference_number(from, i / width * stride + i % width, type);
    free(*to);
    *to = copy;
}

static inline void keep_forward(const reference *f, const seqpar_attn_source *a,
                                const void *out, const void *lse) {
    reference_tape *tape = &f->tapes[f->row];
    int64_t n = a->q_tokens, wide = a->heads * a->head_dim, kv = a->kv_heads * a->head_dim;
    int storage = f->device->storage, sums = f->device->accumulator;
    keep(&tape->q, a->q, n, wide, a->q_stride, storage);
    keep(&tape->k, a->k, n, kv, a->k_stride, storage);
    keep(&tape->v, a->v, n, kv, a->v_stride, storage);
    keep(&tape->out, out, n, wide, wide, sums);
    keep(&tape->lse, lse, n, a->heads, a->heads, sums);
}

static inline void keep_backward(const reference *f, const seqpar_attn_source *a,
                                 const void *dq, const void *dk, const void *dv) {
    reference_tape *tape = &f->tapes[f->row];
    int64_t n = a->q_tokens, wide = a->heads * a->head_dim, kv = a->kv_heads * a->head_dim;
    int sums = f->device->accumulator;
    keep(&tape->dout, a->dout, n, wide, a->dout_stride, f->device->storage);
    keep(&tape->dq, dq, n, wide, wide, sums);
    keep(&tape->dk, dk, n, kv, kv, sums);
    keep(&tape->dv, dv, n, kv, kv, sums);
}

static inline void tape_free(reference_tape *t) {
    double *all[] = {t->q, t->k, t->v, t->out, t->lse, t->dout, t->dq, t->dk, t->dv};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* As seqpar_attn_kernel wants them: one row, one rank, so the source is all keys. */
static inline int reference_forward(void *user, const seqpar_attn_source *a, void *out,
                                    void *lse, void *queue) {
    reference *f = (reference *)user;
    head_arrays h;
    int status = 0;
    for (int64_t head = 0; !status && head < a->heads; head++) {
        status = head_room(&h, a->q_tokens, a->head_dim, f->d->sp);
        if (!status) head_inputs(f, a, head, &h);
        if (!status) head_forward(f, &h, a->scale);
        if (!status) head_give(out, a->heads, head, h.out, &h, f->device->accumulator);
        for (int64_t i = 0; !status && i < h.tokens; i++)
            reference_set(lse, i * a->heads + head, f->device->accumulator, h.lse[i]);
        head_free(&h);
    }
    if (!status && f->tapes && !f->calls++) keep_forward(f, a, out, lse);
    return (void)queue, status;
}

static inline int reference_gradients(void *user, const seqpar_attn_source *a, void *dq,
                                      void *dk, void *dv, void *queue) {
    const reference *f = (const reference *)user;
    int storage = f->device->storage, sums = f->device->accumulator, status = 0;
    head_arrays h;
    for (int64_t head = 0; !status && head < a->heads; head++) {
        int64_t kv = head / (a->heads / a->kv_heads);
        if ((status = head_room(&h, a->q_tokens, a->head_dim, f->d->sp)) == 0) {
            head_inputs(f, a, head, &h);
            head_take(h.dout, a->dout, a->dout_stride, head, &h, storage);
            for (int64_t i = 0; i < h.tokens; i++) {
                h.lse[i] = reference_number(a->lse, i * a->lse_stride + head, sums);
                h.delta[i] = reference_number(a->delta, i * a->lse_stride + head, sums);
            }
            head_backward(f, &h, a->scale);
            head_give(dq, a->heads, head, h.dq, &h, sums);
            head_add(dk, a->kv_heads, kv, h.dk, &h, sums);
            head_add(dv, a->kv_heads, kv, h.dv, &h, sums);
        }
        head_free(&h);
    }
    if (!status && f->tapes) keep_backward(f, a, dq, dk, dv); /* layer 0 comes last */
    return (void)queue, status;
}

/* ---- the model ---- */

/* A parameter from the dump, as it was before the step, or from the folder. */
static inline int reference_load(reference *f, seqpar_safetensors_file *file,
                                 const seqpar_tensor *t) {
    seqpar_safetensors_part all = {.name = t->name, .count = t->rows * t->cols};
    tensor_name name;
    whole w;
    int status = whole_read(f->d, tensor_of(&name, "param.", t->name), 0, f->d->world, &w);
    if (!status && w.values && w.count != all.count) {
        seqpar_fail(&f->d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor %.100s has %lld elements; the model has %lld",
                    f->d->ranks[0].path, name.text, (long long)w.count, (long long)all.count);
        status = -1;
    }
    if (!status && !w.values) {
        status = whole_room(f->d, &w, all.count) ||
                 seqpar_safetensors_read_f64(file, w.values, &all, &f->d->error);
    }
    if (!status)
        seqpar_device_write(f->device, f->model.params.data, t->offset, w.values, all.count,
                            f->device->storage);
    whole_free(&w);
    return status ? -1 : 0;
}

static inline int reference_weights(reference *f, const char *folder) {
    seqpar_safetensors_file *file = NULL;
    char path[1200];
    int status;
    snprintf(path, sizeof path, "%.1000s/model.safetensors", folder);
    status = demo_check_weights(&f->model, folder, &f->d->error) ||
             seqpar_safetensors_open(&file, path, &f->d->error);
    for (int64_t i = 0; !status && i < f->model.tensor_count; i++)
        status = reference_load(f, file, &f->model.tensors[i]);
    seqpar_safetensors_close(file);
    return status ? -1 : 0;
}

static inline int reference_no_memory(reference *f) {
    seqpar_fail(&f->d->error, SEQPAR_ERR_MEMORY, "no memory for the reference");
    return -1;
}

/* Room for the rows of the step. */
static inline int reference_begin(reference *f, dump *d, seqpar_device *device) {
    memset(f, 0, sizeof *f);
    f->d = d;
    f->device = device;
    f->comm = seqpar_comm_self();
    f->count = d->world / d->sp * d->accumulation;
    f->rows = (dump_row *)calloc((size_t)f->count, sizeof *f->rows);
    f->logp = (double **)calloc((size_t)f->count, sizeof *f->logp);
    return f->rows && f->logp ? 0 : reference_no_memory(f);
}

/* All rows, which have what it takes. 0; 1: they lack something; -1 with d->error. */
static inline int reference_rows(reference *f) {
    for (int64_t i = 0; i < f->count; i++) {
        dump_row *row = &f->rows[i];
        dump_places found;
        if (dump_read_row(f->d, i / f->d->accumulation, i % f->d->accumulation, row, &found))
            return -1;
        if (!row->ids || !row->labels || found.missing + found.twice + found.outside) return 1;
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
    free(f->gradient);
    if (f->optim_open) seqpar_optim_close(&f->ctx, &f->optim);
    if (f->model_open) seqpar_llama_close(&f->ctx, &f->model);
    if (f->ctx_open) seqpar_ctx_close(&f->ctx);
    if (f->device) seqpar_device_close(f->device);
    if (f->comm) seqpar_comm_free(f->comm);
}

/* What seqpar says of it, as the dump's error. */
static inline int reference_failed(reference *f) {
    if (f->ctx.error && f->ctx.error->status && !f->d->error.status)
        f->d->error = *f->ctx.error;
    return -1;
}

/* A model without weights, for rows that are there. */
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
    f->gradient = (double *)calloc((size_t)f->model.elements + 1, sizeof *f->gradient);
    return f->gradient ? 0 : reference_no_memory(f);
}

/* The model of a folder, for rows that are there. */
static inline int reference_model(reference *f, const char *folder) {
    seqpar_llama_config config = {.layers = 0};
    if (demo_load_config(folder, &config, &f->d->error)) return -1;
    return reference_config(f, &config) ? -1 : reference_weights(f, folder);
}

/* device: an own one, in fp64 or bf16. 0; 1: the dump lacks something; -1 with d->error. To be
   closed in any case. */
static inline int reference_open(reference *f, dump *d, const char *folder,
                                 seqpar_device *device) {
    int status = reference_begin(f, d, device);
    if (!status) status = reference_rows(f);
    return status ? status : reference_model(f, folder);
}

/* ---- a step ---- */

/* A row as seqpar has it: one document, since the mask knows of the others. */
typedef struct reference_row {
    seqpar_row row;
    int64_t cu_seqlens[2], source[1];
    int32_t *ids, *targets, *positions;
} reference_row;

static inline int64_t way_position(const reference *f, const dump_row *row, int64_t t) {
    return f->way->positions == POSITIONS_RUN_ON  ? position_runs_on(row, t)
           : f->way->positions == POSITIONS_LOCAL ? position_local(row, t)
                                                  : position_right(row, t);
}

static inline int reference_row_make(const reference *f, int64_t i, reference_row *to) {
    const dump_row *row = &f->rows[i];
    int64_t n = row_end(row);
    memset(to, 0, sizeof *to);
    to->ids = (int32_t *)calloc((size_t)n * 3 + 1, sizeof *to->ids);
    if (!to->ids) return seqpar_fail(&f->d->error, SEQPAR_ERR_MEMORY, "no memory"), -1;
    to->targets = to->ids + n;
    to->positions = to->targets + n;
    for (int64_t t = 0; t < n; t++) {
        int64_t id = row->ids[t], label = row->labels[t];
        to->ids[t] = id < 0 || id > INT32_MAX ? -1 : (int32_t)id;
        to->targets[t] = label == DUMP_IGNORE              ? SEQPAR_IGNORE
                         : label < 0 || label > INT32_MAX ? -1
                                                           : (int32_t)label;
        to->positions[t] = (int32_t)way_position(f, row, t);
    }
    to->cu_seqlens[1] = n;
    to->row = (seqpar_row){.index = i,
                           .tokens = n,
                           .padded = n,
                           .chunks = 1,
                           .docs = 1,
                           .cu_seqlens = to->cu_seqlens,
                           .ids = to->ids,
                           .targets = to->targets,
                           .position_ids = to->positions,
                           .doc_source = to->source};
    return 0;
}

/* Forward of row i, to f->logp[i]; with seeds (tokens), backward, too. */
static inline int reference_pass(reference *f, const seqpar_row *row, int64_t i,
                                 const double *seeds) {
    seqpar_attn_kernel kernel = {reference_forward, reference_gradients, f};
    seqpar_llama_run run = {.kernel = &kernel};
    seqpar_vocab_seeds given = {.dlogp = NULL};
    seqpar_llama_batch b;
    seqpar_buffer seed = {.data = NULL};
    int type = f->device->accumulator;
    int status = seqpar_llama_open_batch(&f->ctx, &f->model, &b, row, 1, &run);
    f->row = i;
    f->calls = 0;
    if (!status && seeds)
        status = seqpar_buffer_new(&f->ctx, &seed, b.tokens * seqpar_dtype_bytes(type),
                                   SEQPAR_MEM_ACTIVATIONS);
    if (!status && seeds) {
        seqpar_device_write(f->device, seed.data, 0, seeds, b.tokens, type);
        given.dlogp = seed.data;
    }
    if (!status) status = seqpar_llama_forward(&f->ctx, &f->model, &b, seeds != NULL);
    if (!status && seeds)
        status = seqpar_llama_backward(&f->ctx, &f->model, &b, &f->optim, i, &given);
    if (!status && !seeds) status = seqpar_llama_values(&f->ctx, &f->model, &b);
    if (!status && !seeds)
        seqpar_device_read(f->device, f->logp[i], b.logp.data, 0, b.tokens, type);
    if (seed.data) seqpar_buffer_free(&f->ctx, &seed);
    seqpar_llama_close_batch(&f->ctx, &f->model, &b);
    return status ? reference_failed(f) : 0;
}

/* Log-probs of all rows in that way. 0, or -1 with d->error. */
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

/* The gradient in that way, from dL/dlogp of every token: seeds (count), each (tokens); NULL:
   none of that row. 0, or -1 with d->error. */
static inline int reference_gradient(reference *f, const reference_way *way,
                                     double *const *seeds) {
    reference_row *made = (reference_row *)calloc((size_t)f->count, sizeof *made);
    seqpar_row *rows = (seqpar_row *)calloc((size_t)f->count, sizeof *rows);
    int status = made && rows ? 0 : -1;
    f->way = way;
    if (status) seqpar_fail(&f->d->error, SEQPAR_ERR_MEMORY, "no memory for rows");
    for (int64_t i = 0; !status && i < f->count; i++) {
        status = reference_row_make(f, i, &made[i]);
        rows[i] = made[i].row;
    }
    if (!status && seqpar_step_begin(&f->ctx, &f->optim, rows, f->count,
                                     SEQPAR_LAYOUT_CONTIGUOUS, f->count))
        status = reference_failed(f);
    for (int64_t i = 0; !status && i < f->count; i++) {
        status = reference_pass(f, &rows[i], i, seeds[i]);
        bar_step(1);
    }
    if (!status && (seqpar_step_norm(&f->ctx, &f->optim) ||
                    kept_read(&f->ctx, &f->optim, f->gradient, SEQPAR_STATE_GRADIENT)))
        status = reference_failed(f);
    for (int64_t i = 0; made && i < f->count; i++) free(made[i].ids);
    free(made);
    free(rows);
    return status;
}
#endif
