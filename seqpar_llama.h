/* seqpar_llama.h - v0.1.0 - reference decoder-only transformer on seqpar.h: forward, backward, recompute - MIT or Unlicense */
/* SPDX-License-Identifier: MIT OR Unlicense */
/*
   A Llama-style model (RMSNorm, rotary embedding at document positions, grouped-query attention, SwiGLU, tied or
   untied head) whose tokens are split over the ranks of a seqpar_ctx. It never looks into a device buffer: every
   number is made by an operation of the device table, so the same lines run on the fp64 reference device, the fast
   CPU device and a GPU.

   Does:      one optimizer step over packed rows; evaluation; logits for tests; init from a seed.
   Does not:  generate text, shard weights (ZeRO-3), mix experts.

   #define SEQPAR_IMPLEMENTATION / SEQPAR_LLAMA_IMPLEMENTATION in one unit. Options: SEQPAR_STATIC as in seqpar.h.

   One step:
       seqpar_step_begin(ctx, &optim, batch.row, batch.rows, layout, accumulation);
       for (i = 0; i < accumulation; i++) {
           seqpar_llama_open_batch(ctx, &model, &b, rows of micro-batch i, ...);
           seqpar_llama_forward(ctx, &model, &b, 1);
           seqpar_llama_backward(ctx, &model, &b, &optim, i, &seeds);
           seqpar_llama_close_batch(ctx, &b);
       }
       seqpar_step_end(ctx, &optim, model.params.data, lr);
*/
#ifndef SEQPAR_LLAMA_H
#define SEQPAR_LLAMA_H
#include "seqpar.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct seqpar_llama_config {
    int64_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocab;
    double rope_theta, rms_eps; /* 0: 10000, 1e-5 */
    int tied;                   /* the head is the embedding table */
} seqpar_llama_config;

typedef struct seqpar_llama {
    seqpar_llama_config config;
    seqpar_tensor *tensors;     /* in Hugging Face's names; offsets into params */
    int64_t tensor_count, elements, values; /* elements with the gaps between tensors, values without */
    seqpar_buffer params;
    seqpar_buffer cosine, sine; /* (positions, head_dim/2) */
    int64_t positions;
    char *names;
} seqpar_llama;

/* Makes the tensor table and room for the parameters (zero). Free with seqpar_llama_close. */
SEQPAR_DEF seqpar_status seqpar_llama_open(seqpar_ctx *ctx, seqpar_llama *model, const seqpar_llama_config *config);
SEQPAR_DEF void seqpar_llama_close(seqpar_ctx *ctx, seqpar_llama *model);
/* Normal(0, 1/columns) with outputs into the residual stream / sqrt(2 layers), gains 1. A value depends on (seed,
   tensor, index) alone. */
SEQPAR_DEF void seqpar_llama_init(seqpar_ctx *ctx, seqpar_llama *model, uint64_t seed);

typedef struct seqpar_llama_run { /* how the work is done; changes no bit (stripe, zigzag-doc, relaxed: the error rule) */
    int layout, schedule;
    int64_t heads_k_stride;
    int recompute;           /* keep (x, out, lse) per layer, compute the rest again in backward */
    int64_t head_rows;       /* logits rows held at a time; 0: 256 */
    int64_t ulysses_size;    /* ranks that exchange tokens for heads; 0: 1, or by schedule */
    int relaxed;             /* attention as in seqpar_attn_desc.relaxed */
} seqpar_llama_run;

typedef struct seqpar_llama_layer { seqpar_buffer x, q, k, v, out, lse, x2, gate, up, rstd1, rstd2; } seqpar_llama_layer;
typedef struct seqpar_llama_batch { /* the local part of some rows, and what forward keeps */
    seqpar_llama_run run;
    seqpar_attn *attn;
    const seqpar_share *share;
    int64_t tokens;
    int32_t *ids, *targets, *positions; /* (tokens) */
    seqpar_llama_layer *layers;         /* (layers) */
    seqpar_llama_layer shared;          /* recompute: one set for all layers */
    seqpar_buffer x, n, hidden, rstd;   /* residual stream, scratch, normed output and its statistics */
    seqpar_buffer logp, entropy, lse, smooth; /* (tokens), accumulator type */
    seqpar_buffer wide;                 /* scratch (tokens, intermediate) */
} seqpar_llama_batch;

/* rows (borrowed) are the same on all ranks of ctx->sp; row_count may be 0. */
SEQPAR_DEF seqpar_status seqpar_llama_open_batch(seqpar_ctx *ctx, seqpar_llama *model, seqpar_llama_batch *batch, const seqpar_row *rows,
                                                 int64_t row_count, const seqpar_llama_run *run);
SEQPAR_DEF void seqpar_llama_close_batch(seqpar_ctx *ctx, seqpar_llama *model, seqpar_llama_batch *batch);
/* To batch->hidden. keep: for a backward pass. Collective over ctx->sp. */
SEQPAR_DEF seqpar_status seqpar_llama_forward(seqpar_ctx *ctx, seqpar_llama *model, seqpar_llama_batch *batch, int keep);
/* batch->logp, entropy, lse, smooth from batch->hidden (entry A). */
SEQPAR_DEF seqpar_status seqpar_llama_values(seqpar_ctx *ctx, seqpar_llama *model, seqpar_llama_batch *batch);
/* Values (entry B) and, through seqpar_step_gradient, the gradient of every group. Seeds are per local token.
   Collective over the world; ranks without rows call it with an empty batch. */
SEQPAR_DEF seqpar_status seqpar_llama_backward(seqpar_ctx *ctx, seqpar_llama *model, seqpar_llama_batch *batch, seqpar_optim *optim,
                                               int64_t micro_batch, const seqpar_head_seeds *seeds);
/* logits (batch->tokens, vocab), device memory of the caller, from batch->hidden. For tests: the head never does this. */
SEQPAR_DEF seqpar_status seqpar_llama_logits(seqpar_ctx *ctx, seqpar_llama *model, seqpar_llama_batch *batch, void *logits);

#ifdef __cplusplus
}
#endif
#endif /* SEQPAR_LLAMA_H */

#if defined(SEQPAR_LLAMA_IMPLEMENTATION) && !defined(SEQPAR__LLAMA_IMPLEMENTED)
#define SEQPAR__LLAMA_IMPLEMENTED
#if !defined(SEQPAR__IMPLEMENTED)
#error "seqpar_llama.h: define SEQPAR_IMPLEMENTATION in the same unit; the model is built from the core's parts"
#endif
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off", "no-trapping-math", "no-math-errno")
#endif

/* ---- >>tensors  the parameter table ---- */

enum { SEQPAR__NORM1, SEQPAR__Q, SEQPAR__K, SEQPAR__V, SEQPAR__O, SEQPAR__NORM2, SEQPAR__GATE, SEQPAR__UP, SEQPAR__DOWN, SEQPAR__PER_LAYER };
#define SEQPAR__NAME_BYTES 96

static void seqpar__llama_tensor(seqpar_llama *m, int64_t rows, int64_t cols, int64_t group, const char *format, int64_t layer) {
    seqpar_tensor *t = &m->tensors[m->tensor_count];
    char *name = m->names + m->tensor_count++ * SEQPAR__NAME_BYTES;
    snprintf(name, SEQPAR__NAME_BYTES, format, (long long)layer);
    t->name = name;
    t->rows = rows;
    t->cols = cols;
    t->offset = m->elements;
    t->decay = rows > 1;
    t->group = group;
    m->elements += (rows * cols + SEQPAR_BLOCK - 1) / SEQPAR_BLOCK * SEQPAR_BLOCK;
    m->values += rows * cols;
}

static void seqpar__llama_tensors(seqpar_llama *m) {
    const seqpar_llama_config *c = &m->config;
    int64_t i, wide = c->heads * c->head_dim, narrow = c->kv_heads * c->head_dim;
    seqpar__llama_tensor(m, c->vocab, c->hidden, 0, "model.embed_tokens.weight", 0);
    for (i = 0; i < c->layers; i++) {
        seqpar__llama_tensor(m, 1, c->hidden, i + 1, "model.layers.%lld.input_layernorm.weight", i);
        seqpar__llama_tensor(m, wide, c->hidden, i + 1, "model.layers.%lld.self_attn.q_proj.weight", i);
        seqpar__llama_tensor(m, narrow, c->hidden, i + 1, "model.layers.%lld.self_attn.k_proj.weight", i);
        seqpar__llama_tensor(m, narrow, c->hidden, i + 1, "model.layers.%lld.self_attn.v_proj.weight", i);
        seqpar__llama_tensor(m, c->hidden, wide, i + 1, "model.layers.%lld.self_attn.o_proj.weight", i);
        seqpar__llama_tensor(m, 1, c->hidden, i + 1, "model.layers.%lld.post_attention_layernorm.weight", i);
        seqpar__llama_tensor(m, c->intermediate, c->hidden, i + 1, "model.layers.%lld.mlp.gate_proj.weight", i);
        seqpar__llama_tensor(m, c->intermediate, c->hidden, i + 1, "model.layers.%lld.mlp.up_proj.weight", i);
        seqpar__llama_tensor(m, c->hidden, c->intermediate, i + 1, "model.layers.%lld.mlp.down_proj.weight", i);
    }
    seqpar__llama_tensor(m, 1, c->hidden, c->layers + 1, "model.norm.weight", 0);
    if (!c->tied) seqpar__llama_tensor(m, c->vocab, c->hidden, c->layers + 1, "lm_head.weight", 0);
}

static int64_t seqpar__llama_final_norm(const seqpar_llama *m) { return 1 + m->config.layers * SEQPAR__PER_LAYER; }
static int64_t seqpar__llama_head(const seqpar_llama *m) { return m->config.tied ? 0 : seqpar__llama_final_norm(m) + 1; }
static int64_t seqpar__llama_part(int64_t layer, int part) { return 1 + layer * SEQPAR__PER_LAYER + part; }

static void *seqpar__llama_param(seqpar_ctx *ctx, const seqpar_llama *m, int64_t tensor) {
    return seqpar__at(m->params.data, m->tensors[tensor].offset, ctx->device->storage);
}

static seqpar_status seqpar__check_llama(seqpar_error *error, const seqpar_llama_config *c) {
    if (c->layers <= 0 || c->hidden <= 0 || c->intermediate <= 0 || c->vocab <= 0)
        return seqpar_fail(error, SEQPAR_ERR_SIZE, "the model has %lld layers, hidden %lld, intermediate %lld, vocab %lld; all must be positive",
                           (long long)c->layers, (long long)c->hidden, (long long)c->intermediate, (long long)c->vocab);
    if (c->heads <= 0 || c->kv_heads <= 0 || c->heads % c->kv_heads)
        return seqpar_fail(error, SEQPAR_ERR_HEADS, "%lld heads over %lld kv_heads; heads must be a positive multiple of kv_heads", (long long)c->heads, (long long)c->kv_heads);
    if (c->head_dim <= 0 || c->head_dim % 2)
        return seqpar_fail(error, SEQPAR_ERR_HEAD_DIM, "head_dim is %lld; rotary embedding needs a positive even one", (long long)c->head_dim);
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_llama_open(seqpar_ctx *ctx, seqpar_llama *m, const seqpar_llama_config *config) {
    int64_t count = 3 + config->layers * SEQPAR__PER_LAYER;
    seqpar_status status;
    memset(m, 0, sizeof *m);
    SEQPAR__TRY(seqpar__check_llama(ctx->error, config));
    m->config = *config;
    if (m->config.rope_theta == 0) m->config.rope_theta = 10000.0;
    if (m->config.rms_eps == 0) m->config.rms_eps = 1e-5;
    m->tensors = SEQPAR__NEW(seqpar_tensor, count);
    m->names = SEQPAR__NEW(char, count * SEQPAR__NAME_BYTES);
    if (!m->tensors || !m->names) return seqpar__no_memory(ctx->error, "the model");
    seqpar__llama_tensors(m);
    status = seqpar_buffer_new(ctx, &m->params, m->elements * seqpar_dtype_bytes(ctx->device->storage), SEQPAR_MEM_WEIGHTS);
    if (!status) ctx->device->zero(ctx->device, m->params.data, m->params.bytes, ctx->queue);
    return status;
}

SEQPAR_DEF void seqpar_llama_close(seqpar_ctx *ctx, seqpar_llama *m) {
    seqpar_buffer_free(ctx, &m->params);
    seqpar_buffer_free(ctx, &m->cosine);
    seqpar_buffer_free(ctx, &m->sine);
    SEQPAR_FREE(m->tensors);
    SEQPAR_FREE(m->names);
    memset(m, 0, sizeof *m);
}

/* Standard deviation that keeps the scale of what a matrix is applied to. The usual constant 0.02 suits widths of
   thousands; a hidden size of 128 learns markedly slower with it. */
static double seqpar__llama_spread(const seqpar_llama *m, int64_t tensor) {
    int64_t part = (tensor - 1) % SEQPAR__PER_LAYER;
    int residual = tensor > 0 && tensor < seqpar__llama_final_norm(m) && (part == SEQPAR__O || part == SEQPAR__DOWN);
    return 1.0 / sqrt((double)m->tensors[tensor].cols * (residual ? 2.0 * (double)m->config.layers : 1.0));
}

SEQPAR_DEF void seqpar_llama_init(seqpar_ctx *ctx, seqpar_llama *m, uint64_t seed) {
    int64_t i, j, n, k;
    double part[256];
    for (i = 0; i < m->tensor_count; i++) {
        const seqpar_tensor *t = &m->tensors[i];
        for (j = 0; j < t->rows * t->cols; j += n) {
            n = SEQPAR__MIN(256, t->rows * t->cols - j);
            for (k = 0; k < n; k++)
                part[k] = t->rows == 1 ? 1.0 : seqpar__llama_spread(m, i) * seqpar_random_normal(seed, (uint64_t)i, (uint64_t)(j + k));
            seqpar_device_write(ctx->device, m->params.data, t->offset + j, part, n);
        }
    }
}

/* ---- >>batch  what one micro-batch needs ---- */

/* Tables of cosine and sine for at least `positions`; from fp64 on the host, so that every device has the same. */
static seqpar_status seqpar__llama_rope_tables(seqpar_ctx *ctx, seqpar_llama *m, int64_t positions) {
    int64_t half = m->config.head_dim / 2, p, i, bytes = positions * half * seqpar_dtype_bytes(ctx->device->storage);
    double *line;
    if (positions <= m->positions) return SEQPAR_OK;
    seqpar_buffer_free(ctx, &m->cosine);
    seqpar_buffer_free(ctx, &m->sine);
    SEQPAR__TRY(seqpar_buffer_new(ctx, &m->cosine, bytes, SEQPAR_MEM_WEIGHTS));
    SEQPAR__TRY(seqpar_buffer_new(ctx, &m->sine, bytes, SEQPAR_MEM_WEIGHTS));
    line = SEQPAR__NEW(double, 2 * half);
    if (!line) return seqpar__no_memory(ctx->error, "rotary tables");
    for (p = 0; p < positions; p++) {
        for (i = 0; i < half; i++) {
            double angle = (double)p * pow(m->config.rope_theta, -2.0 * (double)i / (double)m->config.head_dim);
            line[i] = cos(angle);
            line[half + i] = sin(angle);
        }
        seqpar_device_write(ctx->device, m->cosine.data, p * half, line, half);
        seqpar_device_write(ctx->device, m->sine.data, p * half, line + half, half);
    }
    SEQPAR_FREE(line);
    m->positions = positions;
    return SEQPAR_OK;
}

static seqpar_status seqpar__llama_tokens(seqpar_ctx *ctx, const seqpar_llama *m, seqpar_llama_batch *b, const seqpar_row *rows, int64_t row_count, int64_t *positions) {
    int64_t r, i;
    b->ids = SEQPAR__NEW(int32_t, 3 * b->tokens);
    if (!b->ids) return seqpar__no_memory(ctx->error, "a micro-batch");
    b->targets = b->ids + b->tokens;
    b->positions = b->targets + b->tokens;
    for (r = 0; r < row_count; r++) {
        seqpar_scatter(b->ids, rows[r].ids, b->share, r, 4);
        seqpar_scatter(b->targets, rows[r].targets, b->share, r, 4);
        for (i = 0; SEQPAR__FAULT(35) && i + 1 < b->tokens; i++) b->targets[i] = b->targets[i] == SEQPAR_IGNORE ? SEQPAR_IGNORE : b->ids[i + 1]; /* shift after split */
        seqpar_scatter(b->positions, rows[r].position_ids, b->share, r, 4);
        for (i = 0; SEQPAR__FAULT(33) && i < b->tokens; i++) b->positions[i] = (int32_t)i; /* local positions */
        for (i = 0; i < rows[r].tokens; i++) {
            *positions = SEQPAR__MAX(*positions, rows[r].position_ids[i] + 1);
            if (rows[r].ids[i] < 0 || rows[r].ids[i] >= m->config.vocab || (rows[r].targets[i] != SEQPAR_IGNORE && (rows[r].targets[i] < 0 || rows[r].targets[i] >= m->config.vocab)))
                return seqpar_fail(ctx->error, SEQPAR_ERR_TOKEN_ID, "row %lld, token %lld has id %d and target %d; the model has ids 0..%lld",
                                   (long long)rows[r].index, (long long)i, (int)rows[r].ids[i], (int)rows[r].targets[i], (long long)m->config.vocab - 1);
        }
    }
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_llama_open_batch(seqpar_ctx *ctx, seqpar_llama *m, seqpar_llama_batch *b, const seqpar_row *rows,
                                                 int64_t row_count, const seqpar_llama_run *run) {
    const seqpar_llama_config *c = &m->config;
    int64_t size = seqpar_dtype_bytes(ctx->device->storage), acc = seqpar_dtype_bytes(ctx->device->accumulator), positions = 1;
    seqpar_attn_desc desc;
    memset(b, 0, sizeof *b);
    memset(&desc, 0, sizeof desc);
    b->run = *run;
    desc.heads = c->heads; desc.kv_heads = c->kv_heads; desc.head_dim = c->head_dim;
    desc.layout = run->layout; desc.schedule = run->schedule; desc.heads_k_stride = run->heads_k_stride;
    desc.ulysses_size = run->ulysses_size;
    desc.relaxed = run->relaxed;
    SEQPAR__TRY(seqpar_attn_open(ctx, &b->attn, rows, row_count, &desc));
    b->share = seqpar_attn_share(b->attn);
    b->tokens = b->share->tokens;
    SEQPAR__TRY(seqpar__llama_tokens(ctx, m, b, rows, row_count, &positions));
    SEQPAR__TRY(seqpar__llama_rope_tables(ctx, m, positions));
    b->layers = SEQPAR__NEW(seqpar_llama_layer, c->layers);
    if (!b->layers) return seqpar__no_memory(ctx->error, "layers");
    SEQPAR__TRY(seqpar_buffer_new(ctx, &b->x, b->tokens * c->hidden * size, SEQPAR_MEM_SCRATCH));
    SEQPAR__TRY(seqpar_buffer_new(ctx, &b->n, b->tokens * c->hidden * size, SEQPAR_MEM_SCRATCH));
    SEQPAR__TRY(seqpar_buffer_new(ctx, &b->hidden, b->tokens * c->hidden * size, SEQPAR_MEM_ACTIVATIONS));
    SEQPAR__TRY(seqpar_buffer_new(ctx, &b->wide, b->tokens * c->intermediate * size, SEQPAR_MEM_SCRATCH));
    SEQPAR__TRY(seqpar_buffer_new(ctx, &b->rstd, b->tokens * acc, SEQPAR_MEM_ACTIVATIONS));
    SEQPAR__TRY(seqpar_buffer_new(ctx, &b->logp, b->tokens * acc, SEQPAR_MEM_ACTIVATIONS));
    SEQPAR__TRY(seqpar_buffer_new(ctx, &b->entropy, b->tokens * acc, SEQPAR_MEM_ACTIVATIONS));
    SEQPAR__TRY(seqpar_buffer_new(ctx, &b->lse, b->tokens * acc, SEQPAR_MEM_ACTIVATIONS));
    return seqpar_buffer_new(ctx, &b->smooth, b->tokens * acc, SEQPAR_MEM_ACTIVATIONS);
}

static void seqpar__llama_free_layer(seqpar_ctx *ctx, seqpar_llama_layer *l) {
    seqpar_buffer *all = &l->x;
    size_t i;
    for (i = 0; i < sizeof *l / sizeof *all; i++) seqpar_buffer_free(ctx, &all[i]);
}

SEQPAR_DEF void seqpar_llama_close_batch(seqpar_ctx *ctx, seqpar_llama *m, seqpar_llama_batch *b) {
    int64_t i;
    for (i = 0; b->layers && i < m->config.layers; i++) seqpar__llama_free_layer(ctx, &b->layers[i]);
    seqpar__llama_free_layer(ctx, &b->shared);
    seqpar_buffer_free(ctx, &b->x); seqpar_buffer_free(ctx, &b->n); seqpar_buffer_free(ctx, &b->hidden);
    seqpar_buffer_free(ctx, &b->wide); seqpar_buffer_free(ctx, &b->rstd);
    seqpar_buffer_free(ctx, &b->logp); seqpar_buffer_free(ctx, &b->entropy);
    seqpar_buffer_free(ctx, &b->lse); seqpar_buffer_free(ctx, &b->smooth);
    SEQPAR_FREE(b->layers);
    SEQPAR_FREE(b->ids);
    seqpar_attn_close(ctx, b->attn);
    memset(b, 0, sizeof *b);
}

/* ---- >>layer  one layer forward and backward ---- */

typedef struct seqpar__layer_call { /* everything the functions of a layer need */
    seqpar_ctx *ctx;
    seqpar_device *dev;
    const seqpar_llama *m;
    seqpar_llama_batch *b;
    int64_t layer;
    void *x, *q, *k, *v, *out, *lse, *x2, *gate, *up, *rstd1, *rstd2;
    const seqpar_token_fold *fold; /* backward */
    void *nodes;
    int64_t node_stride;           /* elements of the group */
    int64_t group_begin;
} seqpar__layer_call;

static seqpar_mat seqpar__mat(void *data, int64_t stride) {
    seqpar_mat m;
    m.data = data; m.stride = stride;
    return m;
}

/* y (tokens, rows of w) = x . w^T, or with transposed: y (tokens, columns of w) = x . w; w is tensor number `tensor` */
static seqpar_status seqpar__linear(const seqpar__layer_call *c, void *y, void *x, int64_t tensor, int transposed, int accumulate) {
    const seqpar_tensor *t = &c->m->tensors[tensor];
    seqpar_matmul_args a;
    a.out = transposed ? t->cols : t->rows;
    a.in = transposed ? t->rows : t->cols;
    a.y = seqpar__mat(y, a.out);
    a.x = seqpar__mat(x, a.in);
    a.w = seqpar__mat(seqpar__llama_param(c->ctx, c->m, tensor), t->cols);
    a.rows = c->b->tokens;
    a.transposed = transposed;
    a.accumulate = accumulate;
    return c->dev->matmul(c->dev, &a, c->ctx->queue);
}

static seqpar_fold_run seqpar__token_run(const seqpar__layer_call *c, int64_t tensor) {
    seqpar_fold_run r;
    r.program = c->fold->program;
    r.program_count = c->fold->program_count;
    r.depth = c->fold->depth;
    r.store = seqpar__at(c->nodes, c->m->tensors[tensor].offset - c->group_begin, c->dev->storage);
    r.store_stride = c->node_stride;
    r.finish = NULL; /* a partial fold always stores */
    return r;
}

static seqpar_status seqpar__linear_grad(const seqpar__layer_call *c, void *dy, void *x, int64_t tensor) {
    const seqpar_tensor *t = &c->m->tensors[tensor];
    seqpar_weight_grad_args a;
    a.fold = seqpar__token_run(c, tensor);
    a.leaves = c->b->share->pieces;
    a.dy = seqpar__mat(dy, t->rows);
    a.x = seqpar__mat(x, t->cols);
    a.out = t->rows;
    a.in = t->cols;
    return c->dev->weight_grad(c->dev, &a, c->ctx->queue);
}

static seqpar_status seqpar__norm(const seqpar__layer_call *c, void *y, void *x, void *rstd, int64_t tensor) {
    seqpar_rmsnorm_args a;
    a.y = seqpar__mat(y, c->m->config.hidden);
    a.x = seqpar__mat(x, c->m->config.hidden);
    a.rstd = rstd;
    a.gain = seqpar__llama_param(c->ctx, c->m, tensor);
    a.rows = c->b->tokens;
    a.width = c->m->config.hidden;
    a.eps = c->m->config.rms_eps;
    return c->dev->rmsnorm(c->dev, &a, c->ctx->queue);
}

static seqpar_status seqpar__norm_grad(const seqpar__layer_call *c, void *dx, void *dy, void *x, void *rstd, int64_t tensor) {
    seqpar_rmsnorm_grad_args a;
    a.fold = seqpar__token_run(c, tensor);
    a.leaves = c->b->share->pieces;
    a.dx = seqpar__mat(dx, c->m->config.hidden);
    a.dy = seqpar__mat(dy, c->m->config.hidden);
    a.x = seqpar__mat(x, c->m->config.hidden);
    a.rstd = rstd;
    a.gain = seqpar__llama_param(c->ctx, c->m, tensor);
    a.rows = c->b->tokens;
    a.width = c->m->config.hidden;
    return c->dev->rmsnorm_grad(c->dev, &a, c->ctx->queue);
}

static seqpar_status seqpar__rotate(const seqpar__layer_call *c, void *x, int64_t heads, int inverse) {
    seqpar_rope_args a;
    a.x = seqpar__mat(x, heads * c->m->config.head_dim);
    a.cosine = c->m->cosine.data;
    a.sine = c->m->sine.data;
    a.positions = c->b->positions;
    a.rows = c->b->tokens;
    a.heads = heads;
    a.head_dim = c->m->config.head_dim;
    a.inverse = inverse;
    return c->dev->rope(c->dev, &a, c->ctx->queue);
}

static seqpar_status seqpar__swiglu(const seqpar__layer_call *c, void *y, int gradient) {
    seqpar_swiglu_args a;
    a.y = seqpar__mat(y, c->m->config.intermediate);
    a.gate = seqpar__mat(c->gate, c->m->config.intermediate);
    a.up = seqpar__mat(c->up, c->m->config.intermediate);
    a.rows = c->b->tokens;
    a.width = c->m->config.intermediate;
    return (gradient ? c->dev->swiglu_grad : c->dev->swiglu)(c->dev, &a, c->ctx->queue);
}

static seqpar_status seqpar__layer_buffer(const seqpar__layer_call *c, seqpar_buffer *own, seqpar_buffer *shared, int64_t width, int accumulator, int keep, void **data) {
    seqpar_buffer *buffer = keep ? own : shared;
    int64_t bytes = c->b->tokens * width * seqpar_dtype_bytes(accumulator ? c->dev->accumulator : c->dev->storage);
    if (!buffer->data) SEQPAR__TRY(seqpar_buffer_new(c->ctx, buffer, bytes, keep ? SEQPAR_MEM_ACTIVATIONS : SEQPAR_MEM_SCRATCH));
    *data = buffer->data;
    return SEQPAR_OK;
}

/* Which buffers a layer owns: with recompute only (x, out, lse); without a backward pass none. */
static seqpar_status seqpar__layer_call_open(seqpar__layer_call *c, int keep) {
    const seqpar_llama_config *f = &c->m->config;
    seqpar_llama_layer *own = &c->b->layers[c->layer], *shared = &c->b->shared;
    int all = keep && !c->b->run.recompute;
    int64_t wide = f->heads * f->head_dim, narrow = f->kv_heads * f->head_dim;
    SEQPAR__TRY(seqpar__layer_buffer(c, &own->x, &shared->x, f->hidden, 0, keep, &c->x));
    SEQPAR__TRY(seqpar__layer_buffer(c, &own->out, &shared->out, wide, 0, keep, &c->out));
    SEQPAR__TRY(seqpar__layer_buffer(c, &own->lse, &shared->lse, f->heads, 1, keep, &c->lse));
    SEQPAR__TRY(seqpar__layer_buffer(c, &own->q, &shared->q, wide, 0, all, &c->q));
    SEQPAR__TRY(seqpar__layer_buffer(c, &own->k, &shared->k, narrow, 0, all, &c->k));
    SEQPAR__TRY(seqpar__layer_buffer(c, &own->v, &shared->v, narrow, 0, all, &c->v));
    SEQPAR__TRY(seqpar__layer_buffer(c, &own->x2, &shared->x2, f->hidden, 0, all, &c->x2));
    SEQPAR__TRY(seqpar__layer_buffer(c, &own->gate, &shared->gate, f->intermediate, 0, all, &c->gate));
    SEQPAR__TRY(seqpar__layer_buffer(c, &own->up, &shared->up, f->intermediate, 0, all, &c->up));
    SEQPAR__TRY(seqpar__layer_buffer(c, &own->rstd1, &shared->rstd1, 1, 1, all, &c->rstd1));
    return seqpar__layer_buffer(c, &own->rstd2, &shared->rstd2, 1, 1, all, &c->rstd2);
}

static int64_t seqpar__hidden_bytes(const seqpar__layer_call *c) { return c->b->tokens * c->m->config.hidden * seqpar_dtype_bytes(c->dev->storage); }

static seqpar_attn_io seqpar__attention_io(const seqpar__layer_call *c) {
    seqpar_attn_io io;
    memset(&io, 0, sizeof io);
    io.q = c->q; io.k = c->k; io.v = c->v;
    io.out = c->out; io.lse = c->lse;
    return io;
}

/* From x to gate and up; attention itself only where out is not kept. */
static seqpar_status seqpar__layer_inner(const seqpar__layer_call *c, int attend) {
    const seqpar_llama_config *f = &c->m->config;
    void *n = c->b->n.data;
    SEQPAR__TRY(seqpar__norm(c, n, c->x, c->rstd1, seqpar__llama_part(c->layer, SEQPAR__NORM1)));
    SEQPAR__TRY(seqpar__linear(c, c->q, n, seqpar__llama_part(c->layer, SEQPAR__Q), 0, 0));
    SEQPAR__TRY(seqpar__linear(c, c->k, n, seqpar__llama_part(c->layer, SEQPAR__K), 0, 0));
    SEQPAR__TRY(seqpar__linear(c, c->v, n, seqpar__llama_part(c->layer, SEQPAR__V), 0, 0));
    SEQPAR__TRY(seqpar__rotate(c, c->q, f->heads, 0));
    SEQPAR__TRY(seqpar__rotate(c, c->k, f->kv_heads, 0));
    if (attend) {
        seqpar_attn_io io = seqpar__attention_io(c);
        SEQPAR__TRY(seqpar_attn_forward(c->ctx, c->b->attn, &io));
    }
    c->dev->copy(c->dev, c->x2, c->x, seqpar__hidden_bytes(c), c->ctx->queue);
    SEQPAR__TRY(seqpar__linear(c, c->x2, c->out, seqpar__llama_part(c->layer, SEQPAR__O), 0, 1));
    SEQPAR__TRY(seqpar__norm(c, n, c->x2, c->rstd2, seqpar__llama_part(c->layer, SEQPAR__NORM2)));
    SEQPAR__TRY(seqpar__linear(c, c->gate, n, seqpar__llama_part(c->layer, SEQPAR__GATE), 0, 0));
    return seqpar__linear(c, c->up, n, seqpar__llama_part(c->layer, SEQPAR__UP), 0, 0);
}

static seqpar_status seqpar__layer_forward(seqpar__layer_call *c, int keep) {
    SEQPAR__TRY(seqpar__layer_call_open(c, keep));
    c->dev->copy(c->dev, c->x, c->b->x.data, seqpar__hidden_bytes(c), c->ctx->queue);
    SEQPAR__TRY(seqpar__layer_inner(c, 1));
    SEQPAR__TRY(seqpar__swiglu(c, c->b->wide.data, 0));
    c->dev->copy(c->dev, c->b->x.data, c->x2, seqpar__hidden_bytes(c), c->ctx->queue);
    return seqpar__linear(c, c->b->x.data, c->b->wide.data, seqpar__llama_part(c->layer, SEQPAR__DOWN), 0, 1);
}

/* x += swiglu(norm2(x2)) Wdown^T, backwards; dx is the gradient of the residual stream, in place */
static seqpar_status seqpar__mlp_backward(const seqpar__layer_call *c, void *dx, void *dn) {
    int64_t gate = seqpar__llama_part(c->layer, SEQPAR__GATE), up = seqpar__llama_part(c->layer, SEQPAR__UP), norm = seqpar__llama_part(c->layer, SEQPAR__NORM2);
    void *wide = c->b->wide.data, *n = c->b->n.data;
    SEQPAR__TRY(seqpar__swiglu(c, wide, 0));
    SEQPAR__TRY(seqpar__linear_grad(c, dx, wide, seqpar__llama_part(c->layer, SEQPAR__DOWN)));
    SEQPAR__TRY(seqpar__linear(c, wide, dx, seqpar__llama_part(c->layer, SEQPAR__DOWN), 1, 0));
    SEQPAR__TRY(seqpar__swiglu(c, wide, 1)); /* gate and up become their gradients */
    SEQPAR__TRY(seqpar__norm(c, n, c->x2, NULL, norm));
    SEQPAR__TRY(seqpar__linear_grad(c, c->gate, n, gate));
    SEQPAR__TRY(seqpar__linear_grad(c, c->up, n, up));
    SEQPAR__TRY(seqpar__linear(c, dn, c->gate, gate, 1, 0));
    SEQPAR__TRY(seqpar__linear(c, dn, c->up, up, 1, 1));
    return seqpar__norm_grad(c, dx, dn, c->x2, c->rstd2, norm);
}

typedef struct seqpar__layer_gradients { seqpar_buffer dx, dn, dq, dk, dv, dout; } seqpar__layer_gradients;

/* x2 = x + attention(norm1(x)) Wo^T, backwards */
static seqpar_status seqpar__attention_backward(const seqpar__layer_call *c, const seqpar__layer_gradients *g) {
    const seqpar_llama_config *f = &c->m->config;
    int64_t q = seqpar__llama_part(c->layer, SEQPAR__Q), k = q + 1, v = q + 2, o = q + 3, norm = seqpar__llama_part(c->layer, SEQPAR__NORM1);
    seqpar_attn_io io = seqpar__attention_io(c);
    void *n = c->b->n.data;
    SEQPAR__TRY(seqpar__linear_grad(c, g->dx.data, c->out, o));
    SEQPAR__TRY(seqpar__linear(c, g->dout.data, g->dx.data, o, 1, 0));
    io.dout = g->dout.data; io.dq = g->dq.data; io.dk = g->dk.data; io.dv = g->dv.data;
    SEQPAR__TRY(seqpar_attn_backward(c->ctx, c->b->attn, &io));
    SEQPAR__TRY(seqpar__rotate(c, g->dq.data, f->heads, 1));
    SEQPAR__TRY(seqpar__rotate(c, g->dk.data, f->kv_heads, !SEQPAR__FAULT(34))); /* fault: gradient turned the wrong way */
    SEQPAR__TRY(seqpar__norm(c, n, c->x, NULL, norm));
    SEQPAR__TRY(seqpar__linear_grad(c, g->dq.data, n, q));
    SEQPAR__TRY(seqpar__linear_grad(c, g->dk.data, n, k));
    SEQPAR__TRY(seqpar__linear_grad(c, g->dv.data, n, v));
    SEQPAR__TRY(seqpar__linear(c, g->dn.data, g->dq.data, q, 1, 0));
    SEQPAR__TRY(seqpar__linear(c, g->dn.data, g->dk.data, k, 1, 1));
    SEQPAR__TRY(seqpar__linear(c, g->dn.data, g->dv.data, v, 1, 1));
    return seqpar__norm_grad(c, g->dx.data, g->dn.data, c->x, c->rstd1, norm);
}

/* ---- >>model  the whole of it ---- */

static seqpar__layer_call seqpar__call(seqpar_ctx *ctx, const seqpar_llama *m, seqpar_llama_batch *b) {
    seqpar__layer_call c;
    memset(&c, 0, sizeof c);
    c.ctx = ctx; c.dev = ctx->device; c.m = m; c.b = b;
    return c;
}

SEQPAR_DEF seqpar_status seqpar_llama_forward(seqpar_ctx *ctx, seqpar_llama *m, seqpar_llama_batch *b, int keep) {
    seqpar__layer_call c = seqpar__call(ctx, m, b);
    seqpar_embedding_args e;
    e.x = seqpar__mat(b->x.data, m->config.hidden);
    e.table = seqpar__mat(seqpar__llama_param(ctx, m, 0), m->config.hidden);
    e.ids = b->ids;
    e.rows = b->tokens;
    e.width = m->config.hidden;
    SEQPAR__TRY(ctx->device->embedding(ctx->device, &e, ctx->queue));
    for (c.layer = 0; c.layer < m->config.layers; c.layer++) SEQPAR__TRY(seqpar__layer_forward(&c, keep));
    return seqpar__norm(&c, b->hidden.data, b->x.data, b->rstd.data, seqpar__llama_final_norm(m));
}

static seqpar_head_values seqpar__llama_head_values(const seqpar_llama_batch *b) {
    seqpar_head_values v;
    v.logp = b->logp.data; v.entropy = b->entropy.data; v.lse = b->lse.data; v.smooth = b->smooth.data;
    return v;
}
static seqpar_head_desc seqpar__llama_head_desc(const seqpar_llama *m, const seqpar_llama_batch *b) {
    seqpar_head_desc d;
    d.hidden = m->config.hidden; d.vocab = m->config.vocab; d.rows_max = b->run.head_rows;
    return d;
}

SEQPAR_DEF seqpar_status seqpar_llama_values(seqpar_ctx *ctx, seqpar_llama *m, seqpar_llama_batch *b) {
    seqpar_head_values values = seqpar__llama_head_values(b);
    seqpar_head_desc desc = seqpar__llama_head_desc(m, b);
    return seqpar_head_forward(ctx, &values, b->hidden.data, seqpar__llama_param(ctx, m, seqpar__llama_head(m)), b->targets, b->tokens, &desc);
}

SEQPAR_DEF seqpar_status seqpar_llama_logits(seqpar_ctx *ctx, seqpar_llama *m, seqpar_llama_batch *b, void *logits) {
    seqpar__layer_call c = seqpar__call(ctx, m, b);
    return seqpar__linear(&c, logits, b->hidden.data, seqpar__llama_head(m), 0, 0);
}

static seqpar_status seqpar__nodes_new(seqpar__layer_call *c, const seqpar_optim *optim, int64_t group, int64_t places, seqpar_buffer *nodes) {
    c->group_begin = optim->group_begin[group];
    c->node_stride = optim->group_begin[group + 1] - c->group_begin;
    SEQPAR__TRY(seqpar_buffer_new(c->ctx, nodes, places * c->node_stride * seqpar_dtype_bytes(c->dev->storage), SEQPAR_MEM_GRADIENTS));
    c->nodes = nodes->data;
    if (nodes->data) c->dev->zero(c->dev, nodes->data, nodes->bytes, c->ctx->queue); /* gaps between tensors stay zero */
    return SEQPAR_OK;
}

/* dx (tokens, hidden) becomes the gradient of the last layer's output */
static seqpar_status seqpar__llama_head_backward(seqpar__layer_call *c, seqpar_optim *optim, int64_t micro, const seqpar_head_seeds *seeds, void *dx, void *dn) {
    const seqpar_llama *m = c->m;
    seqpar_head_values values = seqpar__llama_head_values(c->b);
    seqpar_head_desc desc = seqpar__llama_head_desc(m, c->b);
    int64_t head = seqpar__llama_head(m), group = m->tensors[head].group, last = m->config.layers + 1;
    seqpar_buffer nodes, norm_nodes;
    seqpar_status status;
    memset(&nodes, 0, sizeof nodes);
    memset(&norm_nodes, 0, sizeof norm_nodes);
    status = seqpar__nodes_new(c, optim, group, c->fold->node_count ? seqpar_head_places(c->fold) : 0, &nodes);
    if (!status) status = seqpar_head_backward(c->ctx, dn, seqpar__at(nodes.data, m->tensors[head].offset - c->group_begin, c->dev->storage), c->node_stride, &values, seeds,
                                               c->b->hidden.data, seqpar__llama_param(c->ctx, m, head), c->b->targets, c->b->share, c->fold, &desc);
    if (!status && m->config.tied) {
        status = seqpar_step_gradient(c->ctx, optim, micro, group, 1, nodes.data, c->node_stride);
        if (!status) status = seqpar__nodes_new(c, optim, last, c->fold->node_count, &norm_nodes);
    }
    c->dev->zero(c->dev, dx, seqpar__hidden_bytes(c), c->ctx->queue);
    if (!status) status = seqpar__norm_grad(c, dx, dn, c->b->x.data, c->b->rstd.data, seqpar__llama_final_norm(m));
    if (!status) status = seqpar_step_gradient(c->ctx, optim, micro, last, 0, c->nodes, c->node_stride);
    seqpar_buffer_free(c->ctx, &nodes);
    seqpar_buffer_free(c->ctx, &norm_nodes);
    return status;
}

static seqpar_status seqpar__llama_layer_backward(seqpar__layer_call *c, seqpar_optim *optim, int64_t micro, const seqpar__layer_gradients *g) {
    seqpar_buffer nodes;
    seqpar_status status;
    memset(&nodes, 0, sizeof nodes);
    SEQPAR__TRY(seqpar__layer_call_open(c, 1));
    if (c->b->run.recompute && !SEQPAR__FAULT(32)) SEQPAR__TRY(seqpar__layer_inner(c, 0)); /* fault: another layer's activations */
    status = seqpar__nodes_new(c, optim, c->layer + 1, c->fold->node_count, &nodes);
    if (!status) status = seqpar__mlp_backward(c, g->dx.data, g->dn.data);
    if (!status) status = seqpar__attention_backward(c, g);
    if (!status) status = seqpar_step_gradient(c->ctx, optim, micro, c->layer + 1, 0, nodes.data, c->node_stride);
    seqpar_buffer_free(c->ctx, &nodes);
    seqpar__llama_free_layer(c->ctx, &c->b->layers[c->layer]); /* its activations are spent */
    return status;
}

static seqpar_status seqpar__llama_embedding_backward(seqpar__layer_call *c, seqpar_optim *optim, int64_t micro, void *dx) {
    seqpar_embedding_grad_args a;
    seqpar_buffer nodes;
    seqpar_status status;
    memset(&nodes, 0, sizeof nodes);
    status = seqpar__nodes_new(c, optim, 0, c->fold->node_count, &nodes);
    a.fold = seqpar__token_run(c, 0);
    a.leaves = c->b->share->pieces;
    a.dx = seqpar__mat(dx, c->m->config.hidden);
    a.ids = c->b->ids;
    a.vocab = c->m->config.vocab;
    a.width = c->m->config.hidden;
    if (!status) status = c->dev->embedding_grad(c->dev, &a, c->ctx->queue);
    if (!status) status = seqpar_step_gradient(c->ctx, optim, micro, 0, 0, nodes.data, c->node_stride);
    seqpar_buffer_free(c->ctx, &nodes);
    return status;
}

static seqpar_status seqpar__layer_gradients_new(const seqpar__layer_call *c, seqpar__layer_gradients *g) {
    const seqpar_llama_config *f = &c->m->config;
    int64_t row = c->b->tokens * seqpar_dtype_bytes(c->dev->storage), wide = f->heads * f->head_dim, narrow = f->kv_heads * f->head_dim;
    memset(g, 0, sizeof *g);
    SEQPAR__TRY(seqpar_buffer_new(c->ctx, &g->dx, row * f->hidden, SEQPAR_MEM_SCRATCH));
    SEQPAR__TRY(seqpar_buffer_new(c->ctx, &g->dn, row * f->hidden, SEQPAR_MEM_SCRATCH));
    SEQPAR__TRY(seqpar_buffer_new(c->ctx, &g->dq, row * wide, SEQPAR_MEM_SCRATCH));
    SEQPAR__TRY(seqpar_buffer_new(c->ctx, &g->dout, row * wide, SEQPAR_MEM_SCRATCH));
    SEQPAR__TRY(seqpar_buffer_new(c->ctx, &g->dk, row * narrow, SEQPAR_MEM_SCRATCH));
    return seqpar_buffer_new(c->ctx, &g->dv, row * narrow, SEQPAR_MEM_SCRATCH);
}

SEQPAR_DEF seqpar_status seqpar_llama_backward(seqpar_ctx *ctx, seqpar_llama *m, seqpar_llama_batch *b, seqpar_optim *optim,
                                               int64_t micro, const seqpar_head_seeds *seeds) {
    seqpar__layer_call c = seqpar__call(ctx, m, b);
    seqpar__layer_gradients g;
    seqpar_buffer *all = &g.dx;
    size_t i;
    seqpar_status status;
    c.fold = seqpar_step_fold(ctx, optim, micro);
    status = seqpar__layer_gradients_new(&c, &g);
    if (!status) status = seqpar__llama_head_backward(&c, optim, micro, seeds, g.dx.data, g.dn.data);
    for (c.layer = m->config.layers - 1; !status && c.layer >= 0; c.layer--) status = seqpar__llama_layer_backward(&c, optim, micro, &g);
    if (!status) status = seqpar__llama_embedding_backward(&c, optim, micro, g.dx.data);
    for (i = 0; i < sizeof g / sizeof *all; i++) seqpar_buffer_free(ctx, &all[i]);
    return status;
}

#if !defined(__clang__) && defined(__GNUC__)
#pragma GCC pop_options
#endif
#endif /* SEQPAR_LLAMA_IMPLEMENTATION */
