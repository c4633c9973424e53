/* SPDX-License-Identifier: MIT OR Unlicense */
/* 08_own_trainer.c - a trainer with layers of your own: an embedding, one attention over a
   packed qkv projection, a projection to the vocabulary. The layers are plain loops. seqpar
   packs, splits, exchanges keys, sums losses and gradients, and updates. 1 rank and 4 ranks
   give the same bits. cc 08_own_trainer.c -lm -lpthread */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"

enum { VOCAB = 23, HIDDEN = 16, QKV = 3 * HIDDEN, DOCS = 6, LENGTH = 41, STEPS = 60 };
enum {
    TABLE = 0,
    WQKV = TABLE + VOCAB * HIDDEN,
    HEAD = WQKV + QKV * HIDDEN,
    PARAMS = HEAD + VOCAB * HIDDEN
};
static const seqpar_tensor tensors[] = {{"table", VOCAB, HIDDEN, TABLE, 0, 0},
                                        {"wqkv", QKV, HIDDEN, WQKV, 0, 1},
                                        {"head", VOCAB, HIDDEN, HEAD, 0, 2}};

typedef struct training {
    float params[PARAMS];
    double loss[STEPS];
} training;

typedef struct model { /* what one rank has: its tokens alone */
    const seqpar_share *mine;
    int64_t tokens, node_count;
    int32_t *ids, *targets;
    float *x, *qkv, *out, *lse, *hidden, *logp, *seed, *dhidden, *dqkv, *dx, *nodes;
} model;

static const seqpar_vocab_desc vocab = {.hidden = HIDDEN, .vocab = VOCAB};

static float *room(int64_t count) { return (float *)calloc((size_t)count + 1, sizeof(float)); }

static void model_open(model *m, const seqpar_row *row, const seqpar_share *mine) {
    int64_t n = mine->tokens, h = n * HIDDEN;
    float **all[] = {&m->x, &m->out, &m->hidden, &m->dhidden, &m->dx};
    m->mine = mine;
    m->tokens = n;
    m->ids = (int32_t *)room(n);
    m->targets = (int32_t *)room(n);
    for (int i = 0; i < 5; i++) *all[i] = room(h);
    m->qkv = room(n * QKV), m->dqkv = room(n * QKV);
    m->lse = room(n), m->logp = room(n), m->seed = room(n);
    seqpar_scatter(m->ids, row->ids, mine, 0, 4);
    seqpar_scatter(m->targets, row->targets, mine, 0, 4); /* shifted already, by packing */
}

static void model_close(model *m) {
    void *all[] = {m->ids,  m->targets, m->x,       m->qkv,  m->out, m->lse,  m->hidden,
                   m->logp, m->seed,    m->dhidden, m->dqkv, m->dx,  m->nodes};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* Room for what is left of a gradient's sum until it goes to its owners: a node or two a row */
static void nodes_new(model *m, const seqpar_token_fold *fold) {
    int64_t places = seqpar_vocab_node_count(m->mine, fold, &vocab);
    m->node_count = fold->node_count;
    free(m->nodes);
    m->nodes = room((places > m->node_count ? places : m->node_count) * QKV * HIDDEN);
}

/* y (tokens, out) = x (tokens, in) W^T, or with `back` x = y W added: a row at a time, so
   that its bits are its own */
static void linear(float *y, float *x, const float *w, int64_t tokens, int out, int in,
                   int back) {
    for (int64_t t = 0; t < tokens; t++)
        for (int i = 0; i < out; i++)
            for (int k = 0; k < in; k++) {
                if (back)
                    x[t * in + k] += y[t * out + i] * w[i * in + k];
                else
                    y[t * out + i] += x[t * in + k] * w[i * in + k];
            }
}

/* Leaves of the weight gradients: sums over the tokens of one piece, in their order */
static seqpar_status table_leaf(void *user, void *value, int64_t leaf) {
    const model *m = (const model *)user;
    const seqpar_piece *p = &m->mine->pieces[leaf];
    memset(value, 0, VOCAB * HIDDEN * sizeof(float));
    for (int64_t t = p->local; t < p->local + p->count; t++)
        for (int k = 0; k < HIDDEN; k++)
            ((float *)value)[m->ids[t] * HIDDEN + k] += m->dx[t * HIDDEN + k];
    return SEQPAR_OK;
}
static seqpar_status qkv_leaf(void *user, void *value, int64_t leaf) {
    const model *m = (const model *)user;
    const seqpar_piece *p = &m->mine->pieces[leaf];
    memset(value, 0, QKV * HIDDEN * sizeof(float));
    for (int64_t t = p->local; t < p->local + p->count; t++)
        for (int i = 0; i < QKV; i++)
            for (int k = 0; k < HIDDEN; k++)
                ((float *)value)[i * HIDDEN + k] += m->dqkv[t * QKV + i] * m->x[t * HIDDEN + k];
    return SEQPAR_OK;
}

static seqpar_attn_io attention(model *m) { /* q, k and v lie in one projection */
    seqpar_attn_io io = {.q = m->qkv,
                         .k = m->qkv + HIDDEN,
                         .v = m->qkv + 2 * HIDDEN,
                         .out = m->out,
                         .lse = m->lse};
    io.dout = m->dhidden;
    io.dq = m->dqkv, io.dk = m->dqkv + HIDDEN, io.dv = m->dqkv + 2 * HIDDEN;
    io.q_stride = io.k_stride = io.v_stride = io.dq_stride = io.dk_stride = io.dv_stride = QKV;
    return io;
}

static seqpar_status forward(seqpar_ctx *ctx, seqpar_attn *attn, model *m, float *params) {
    seqpar_attn_io io = attention(m);
    memset(m->qkv, 0, (size_t)(m->tokens * QKV) * sizeof(float));
    for (int64_t t = 0; t < m->tokens; t++)
        memcpy(m->x + t * HIDDEN, params + TABLE + m->ids[t] * HIDDEN, HIDDEN * sizeof(float));
    linear(m->qkv, m->x, params + WQKV, m->tokens, QKV, HIDDEN, 0);
    seqpar_status status = seqpar_attn_forward(ctx, attn, &io);
    for (int64_t i = 0; i < m->tokens * HIDDEN; i++) m->hidden[i] = m->x[i] + m->out[i];
    return status;
}

/* Sends the nodes of a tensor's gradient to their owners. */
static seqpar_status give(seqpar_ctx *ctx, seqpar_optim *optim, const model *m, int tensor) {
    int64_t size = tensors[tensor].rows * tensors[tensor].cols;
    seqpar_step_nodes nodes = {.nodes = m->nodes,
                               .node_stride = size,
                               .elements = m->node_count * size,
                               .group = tensor};
    return seqpar_step_gradient(ctx, optim, &nodes);
}

static seqpar_status backward(seqpar_ctx *ctx, seqpar_attn *attn, seqpar_optim *optim, model *m,
                              float *params, const seqpar_token_fold *fold) {
    seqpar_vocab_io head = {.hidden = m->hidden,
                            .table = params + HEAD,
                            .targets = m->targets,
                            .tokens = m->tokens};
    seqpar_attn_io io = attention(m);
    seqpar_leaves qkv = {qkv_leaf, m, QKV * HIDDEN}, table = {table_leaf, m, VOCAB * HIDDEN};
    head.values.logp = m->logp;
    head.seeds.dlogp = m->seed;
    head.dhidden = m->dhidden;
    head.nodes = m->nodes;
    head.node_stride = VOCAB * HIDDEN;
    seqpar_status status = seqpar_vocab_backward(ctx, &head, m->mine, fold, &vocab);
    if (!status) status = give(ctx, optim, m, 2);
    if (!status) status = seqpar_attn_backward(ctx, attn, &io);
    if (!status) status = seqpar_fold_leaves(ctx, m->nodes, QKV * HIDDEN, fold, &qkv);
    if (!status) status = give(ctx, optim, m, 1);
    memcpy(m->dx, m->dhidden, (size_t)(m->tokens * HIDDEN) * sizeof(float));
    linear(m->dqkv, m->dx, params + WQKV, m->tokens, QKV, HIDDEN, 1);
    if (!status) status = seqpar_fold_leaves(ctx, m->nodes, VOCAB * HIDDEN, fold, &table);
    return status ? status : give(ctx, optim, m, 0);
}

/* -1/N for every supervised token; the loss is the mean of -logp, folded over all ranks */
static seqpar_status loss_of(seqpar_ctx *ctx, const model *m, int64_t supervised,
                             double *loss) {
    seqpar_segments step = {.width = 1};
    double *value = (double *)calloc((size_t)m->tokens + 1, sizeof *value);
    seqpar_status status = SEQPAR_OK;
    for (int64_t t = 0; t < m->tokens; t++) value[t] = -(double)m->logp[t] / (double)supervised;
    for (int64_t i = 0; !status && i < m->mine->count; i++) {
        double sum = 0;
        for (int64_t t = 0; t < m->mine->pieces[i].count; t++)
            sum += value[m->mine->pieces[i].local + t];
        status = seqpar_segments_push(ctx->error, &step, 0, m->mine->pieces[i].leaf, &sum);
    }
    if (!status) status = seqpar_segments_sum(ctx->world, loss, 1, &step);
    seqpar_segments_free(&step);
    free(value);
    return status;
}

static seqpar_status train(seqpar_ctx *ctx, const seqpar_batch *batch, training *run) {
    seqpar_attn_desc desc = {
        .heads = 1, .kv_heads = 1, .head_dim = HIDDEN, .layout = SEQPAR_LAYOUT_ZIGZAG};
    seqpar_optim_desc adam = {.kind = SEQPAR_OPTIM_ADAMW,
                              .zero_stage = 2,
                              .beta1 = 0.9,
                              .beta2 = 0.99,
                              .eps = 1e-8,
                              .max_norm = 1};
    const seqpar_token_fold *fold = NULL;
    seqpar_attn *attn = NULL;
    seqpar_optim optim;
    model m = {0};
    seqpar_status status = seqpar_optim_open(ctx, &optim, tensors, 3, &adam);
    if (!status) status = seqpar_attn_open(ctx, &attn, batch->row, batch->rows, &desc);
    if (!status) model_open(&m, batch->row, seqpar_attn_share(attn));
    for (int64_t t = 0; t < m.tokens; t++)
        m.seed[t] = m.targets[t] == SEQPAR_IGNORE ? 0 : -1.0f / (float)batch->counts.supervised;
    for (int step = 0; !status && step < STEPS; step++) {
        status = seqpar_step_begin(ctx, &optim, batch->row, batch->rows, desc.layout, 1);
        if (!status) status = seqpar_step_fold(ctx, &optim, &fold, m.mine, 0);
        if (!status) nodes_new(&m, fold);
        if (!status) status = forward(ctx, attn, &m, run->params);
        if (!status) status = backward(ctx, attn, &optim, &m, run->params, fold);
        if (!status) status = loss_of(ctx, &m, batch->counts.supervised, &run->loss[step]);
        if (!status) status = seqpar_step_end(ctx, &optim, run->params, PARAMS, 0.02);
    }
    model_close(&m);
    seqpar_attn_close(ctx, attn);
    seqpar_optim_close(ctx, &optim);
    return status;
}

typedef struct job {
    const seqpar_batch *batch;
    training *run;
    int64_t ranks;
} job;

static seqpar_status rank_main(seqpar_comm *world, void *user) {
    job *j = (job *)user;
    training *own = (training *)malloc(sizeof *own); /* every rank has the weights */
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, j->ranks);
    for (uint64_t i = 0; i < PARAMS; i++)
        own->params[i] = (float)(0.3 * seqpar_random_normal(7, 0, i));
    if (!status) status = train(&ctx, j->batch, own);
    if (!status && world->rank == 0) *j->run = *own;
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    free(own);
    return status;
}

int main(void) {
    static int32_t ids[DOCS][LENGTH];
    static training run[2];
    seqpar_document documents[DOCS];
    seqpar_pack_desc pack = {.pack_len = DOCS * LENGTH, .vocab = VOCAB};
    seqpar_error error = {SEQPAR_OK, 0, ""};
    seqpar_batch batch;
    for (int d = 0; d < DOCS; d++) { /* every text counts on by a step of its own */
        for (int t = 0; t < LENGTH; t++) ids[d][t] = (d + t * (d + 1)) % VOCAB;
        documents[d] = (seqpar_document){.ids = ids[d], .tokens = LENGTH, .unit = d};
    }
    seqpar_status status = seqpar_pack(&error, &batch, documents, DOCS, &pack);
    for (int i = 0; !status && i < 2; i++) {
        job j = {&batch, &run[i], i ? 4 : 1};
        status = seqpar_run_threads(j.ranks, rank_main, &j, &error);
        if (!status)
            printf("%lld rank%s: loss %.6f -> %.6f\n", (long long)j.ranks, i ? "s" : " ",
                   run[i].loss[0], run[i].loss[STEPS - 1]);
    }
    if (status) return fprintf(stderr, "%s\n", error.text), 1;
    seqpar_batch_free(&batch);
    int same = !memcmp(&run[0], &run[1], sizeof run[0]);
    printf("identical bits of %d losses and %d parameters: %s\n", STEPS, PARAMS,
           same ? "yes" : "no");
    return !same;
}
