/* SPDX-License-Identifier: MIT OR Unlicense */
/* Runs a small model for some optimizer steps in one of many equivalent ways and keeps
   everything it computed. */
#ifndef RUN_MODEL_H
#define RUN_MODEL_H
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "late_moves.h"
#include "seqpar_llama.h"
#include "inject.h"
#include "test.h"
#include "kept.h"

/* further bits of model_way.offload: to files; moves end only when waited for (late_moves.h) */
enum { MODEL_OFFLOAD_FILES = 4, MODEL_LATE = 8 };
typedef struct model_way { /* how to do it */
    int64_t dp, sp, accumulation, threads, heads_k_stride, vocab_rows, mlp_rows, steps;
    /* reference: test_device */
    int layout, schedule, zero_stage, recompute, reference, optimizer;
    const seqpar_inject_desc *inject;
    int64_t inject_rank; /* only this rank is disturbed; -1: all */
    int64_t ulysses_size;
    const seqpar_attn_kernel *kernel; /* attention of one's own */
    int64_t slice;                    /* as in seqpar_optim_desc */
    int offload;                      /* the same, with MODEL_* bits */
    int state_bits, stochastic;       /* the same */
} model_way;

typedef struct model_task { /* what to do */
    seqpar_llama_config config;
    seqpar_batch batch;
    seqpar_sft_desc objective;
    uint64_t seed;
    const double *start; /* parameters (elements) to begin with; NULL: from the seed */
    double lr, max_norm, decay;
    const double *entropy_seeds; /* (global tokens, row after row) or NULL */
    double balance;              /* coefficient of the experts' load-balancing loss */
} model_task;

typedef struct model_result {
    int64_t tokens, elements, vocab;
    double *logits, *logp;  /* of the first step, global order */
    double *gradient;       /* (elements) of the first step */
    double *start, *params; /* (elements) before and after all steps */
    /* (3, elements) m, v and master parameters after all steps; 0: there are none */
    double *state;
    double loss, norm, last_norm;
    int64_t activations_peak[64], scratch_peak[64], total_peak[64], bytes_sent, supervised;
    seqpar_error error;
    seqpar_status status;
} model_result;

typedef struct model_job {
    const model_task *task;
    const model_way *way;
    model_result *result;
} model_job;

static int64_t task_tokens(const model_task *t) {
    int64_t r, n = 0;
    for (r = 0; r < t->batch.rows; r++) n += t->batch.row[r].tokens;
    return n;
}

static int64_t row_base(const model_task *t, int64_t row) {
    int64_t r, n = 0;
    for (r = 0; r < row; r++) n += t->batch.row[r].tokens;
    return n;
}

/* After a step every rank must hold the same parameters: their hash is compared, all ranks
   taking part. */
static seqpar_status expect_ranks_agree(seqpar_ctx *ctx, const seqpar_llama *model) {
    double *values = calloc((size_t)model->elements, sizeof *values);
    int64_t hash[2] = {0, 0}, i, bits;
    seqpar_status status = params_read(ctx, model, values);
    for (i = 0; !status && i < model->elements; i++) {
        memcpy(&bits, &values[i], 8);
        hash[0] = (int64_t)(((uint64_t)hash[0] ^ (uint64_t)bits) * UINT64_C(1099511628211)) &
                  INT64_MAX;
    }
    free(values);
    hash[1] = -hash[0];
    if (!status) status = seqpar_comm_max_i64(ctx->world, hash, 2);
    if (!status && hash[0] != -hash[1])
        status = seqpar_fail(ctx->error, SEQPAR_ERR_OPTION,
                             "the ranks hold different parameters after the step");
    return status;
}

/* Local rows of a device tensor to their places in a global one. */
static void collect_rows(seqpar_ctx *ctx, const model_task *task, const seqpar_llama_batch *b,
                         int64_t first, double *global, const void *local, int64_t width,
                         int dtype) {
    int64_t i, t;
    for (i = 0; i < b->share->count; i++)
        for (t = 0; t < b->share->pieces[i].count; t++) {
            const seqpar_piece *p = &b->share->pieces[i];
            seqpar_device_read(
                ctx->device,
                global + (row_base(task, first + p->row) + p->start + t * p->stride) * width,
                local, (p->local + t) * width, width, dtype);
        }
}

/* A local token's loss times the objective's count. */
static double token_loss(seqpar_ctx *ctx, const model_task *task, const seqpar_llama_batch *b,
                         int64_t t) {
    double logp, smooth, lse, balance = 0;
    int acc = ctx->device->accumulator;
    if (b->balance) seqpar_device_read(ctx->device, &balance, b->balance_loss.data, t, 1, acc);
    balance *= (double)task->objective.count;
    if (b->targets[t] == SEQPAR_IGNORE) return balance;
    seqpar_device_read(ctx->device, &logp, b->logp.data, t, 1, acc);
    seqpar_device_read(ctx->device, &smooth, b->smooth.data, t, 1, acc);
    seqpar_device_read(ctx->device, &lse, b->lse.data, t, 1, acc);
    return balance + seqpar_sft_token_loss(logp, smooth, lse, &task->objective);
}

/* Loss of this rank's tokens, one sum a piece. */
static void piece_losses(seqpar_ctx *ctx, const model_task *task, const seqpar_llama_batch *b,
                         int64_t *leaf, double *value, int64_t *count) {
    int64_t i, t;
    for (i = 0; i < b->share->count; i++) {
        const seqpar_piece *p = &b->share->pieces[i];
        double sum = 0;
        for (t = p->local; t < p->local + p->count; t++) sum += token_loss(ctx, task, b, t);
        leaf[*count] = p->leaf;
        value[(*count)++] = sum;
    }
}

static seqpar_llama_batch_desc model_way_run(const model_way *way) {
    return (seqpar_llama_batch_desc){.layout = way->layout,
                                     .schedule = way->schedule,
                                     .heads_k_stride = way->heads_k_stride,
                                     .recompute = way->recompute,
                                     .vocab_rows = way->vocab_rows,
                                     .mlp_rows = way->mlp_rows,
                                     .ulysses_size = way->ulysses_size,
                                     .kernel = way->kernel};
}

/* Counts how often the step chooses each expert, by a forward pass of its own: the gradient of
   the load-balancing loss needs the counts of the whole step. */
static seqpar_status model_chosen(seqpar_ctx *ctx, const model_job *job, seqpar_llama *model,
                                  seqpar_optim *optim, int64_t *chosen) {
    seqpar_llama_batch_desc run = model_way_run(job->way);
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; !status && i < job->way->accumulation; i++) {
        seqpar_llama_batch b;
        int64_t first, rows;
        status = seqpar_step_rows(ctx, optim, i, &first, &rows);
        if (!status)
            status = seqpar_llama_open_batch(ctx, model, &b, job->task->batch.row + first, rows,
                                             &run);
        if (status) return status;
        status = seqpar_llama_forward(ctx, model, &b, 0);
        for (int64_t e = 0; e < model->config.experts; e++) chosen[e] += b.chosen[e];
        seqpar_llama_close_batch(ctx, model, &b);
    }
    return status ? status : seqpar_comm_sum_i64(ctx->world, chosen, model->config.experts);
}

/* Forward and backward pass of a micro-batch; in step 0 keeps logits, log-probs and losses.
   balance: as in seqpar_llama_batch. */
static seqpar_status model_micro(seqpar_ctx *ctx, const model_job *job, seqpar_llama *model,
                                 seqpar_optim *optim, int64_t step, int64_t index,
                                 const double *balance, int64_t *leaf, double *value,
                                 int64_t *count) {
    const model_task *task = job->task;
    const model_way *way = job->way;
    seqpar_llama_batch_desc run = model_way_run(way);
    seqpar_llama_batch b;
    seqpar_vocab_seeds seeds;
    seqpar_buffer seed[4];
    double *host;
    int64_t first, rows, i, n, acc = seqpar_dtype_bytes(ctx->device->accumulator);
    seqpar_status status = seqpar_step_rows(ctx, optim, index, &first, &rows);
    if (status) return status;
    status = seqpar_llama_open_batch(ctx, model, &b, task->batch.row + first, rows, &run);
    if (status) {
        seqpar_llama_close_batch(ctx, model, &b);
        return status;
    }
    n = b.tokens;
    host = calloc((size_t)(4 * n + 4), sizeof *host);
    seqpar_host_seeds parts = {host, host + n, host + 2 * n};
    status = seqpar_sft_seeds(ctx->error, &parts, b.targets, NULL, n, &task->objective);
    for (i = 0; task->entropy_seeds && i < b.share->count; i++) {
        const seqpar_piece *p = &b.share->pieces[i];
        for (int64_t t = 0; t < p->count; t++)
            host[3 * n + p->local + t] =
                task->entropy_seeds[row_base(task, first + p->row) + p->start + t * p->stride];
    }
    for (i = 0; i < 4; i++) {
        seqpar_status none = seqpar_buffer_new(ctx, &seed[i], n * acc, SEQPAR_MEM_ACTIVATIONS);
        if (!status) status = none;
        if (seed[i].data)
            seqpar_device_write(ctx->device, seed[i].data, 0, host + i * n, n,
                                ctx->device->accumulator);
    }
    seeds.dlogp = seed[0].data;
    seeds.dsmooth = seed[1].data;
    seeds.dzloss = seed[2].data;
    seeds.dentropy = task->entropy_seeds ? seed[3].data : NULL;
    if (!status) status = seqpar_llama_forward(ctx, model, &b, 1);
    b.balance = balance;
    if (!status && step == 0) {
        void *logits = ctx->device->alloc(ctx->device, (n + 1) * model->config.vocab * acc);
        status = logits ? seqpar_llama_logits(ctx, model, &b, logits)
                        : seqpar_fail(ctx->error, SEQPAR_ERR_MEMORY, "no memory for logits");
        if (!status)
            collect_rows(ctx, task, &b, first, job->result->logits, logits, model->config.vocab,
                         ctx->device->storage);
        ctx->device->free(ctx->device, logits);
    }
    if (!status) status = seqpar_llama_backward(ctx, model, &b, optim, index, &seeds);
    if (!status && step == 0) {
        collect_rows(ctx, task, &b, first, job->result->logp, b.logp.data, 1,
                     ctx->device->accumulator);
        piece_losses(ctx, task, &b, leaf, value, count);
    }
    for (i = 0; i < 4; i++) seqpar_buffer_free(ctx, &seed[i]);
    free(host);
    seqpar_llama_close_batch(ctx, model, &b);
    return status;
}

static seqpar_status model_step(seqpar_ctx *ctx, const model_job *job, seqpar_llama *model,
                                seqpar_optim *optim, int64_t step) {
    const model_task *task = job->task;
    int64_t i, count = 0, capacity = 1 + 64 * 64 * task->batch.rows;
    int64_t *leaf = calloc((size_t)capacity, sizeof *leaf);
    double *value = calloc((size_t)capacity, sizeof *value);
    double sum = 0;
    double *gradient = calloc((size_t)model->elements, sizeof *gradient);
    seqpar_status status = seqpar_step_begin(ctx, optim, task->batch.row, task->batch.rows,
                                             job->way->layout, job->way->accumulation);
    int64_t *chosen = calloc((size_t)model->config.experts + 1, sizeof *chosen);
    double *slopes = calloc((size_t)model->config.experts + 1, sizeof *slopes);
    if (!status && task->balance > 0) status = model_chosen(ctx, job, model, optim, chosen);
    seqpar_llama_balance(&model->config, slopes, chosen, task->balance);
    for (i = 0; !status && i < job->way->accumulation; i++)
        status = model_micro(ctx, job, model, optim, step, i, task->balance > 0 ? slopes : NULL,
                             leaf, value, &count);
    int64_t elements;
    void *params = seqpar_llama_trainable(model, &elements);
    if (!status) status = seqpar_step_end(ctx, optim, params, elements, task->lr);
    if (!status && step == 0) {
        status = seqpar_sum_pieces(ctx, &sum, leaf, value, count, 1);
        if (!status) status = kept_read(ctx, optim, gradient, SEQPAR_STATE_GRADIENT);
        if (!status && ctx->world->rank == 0) {
            job->result->loss = sum / (double)task->objective.count;
            job->result->norm = optim->norm;
            memcpy(job->result->gradient, gradient, (size_t)model->elements * sizeof *gradient);
        }
    }
    free(leaf);
    free(value);
    free(gradient);
    free(chosen);
    free(slopes);
    return status;
}

/* One rank's whole run. Rank 0 reads into the result, the others into arrays of their own, as
   all reads are collective. */
static seqpar_status model_rank(seqpar_ctx *ctx, const model_job *job) {
    const model_task *task = job->task;
    seqpar_llama model;
    seqpar_optim optim;
    seqpar_optim_desc desc = {job->way->optimizer,
                              job->way->zero_stage,
                              .9,
                              .95,
                              1e-8,
                              task->decay,
                              task->max_norm,
                              job->way->slice,
                              .offload = job->way->offload & (MODEL_OFFLOAD_FILES - 1),
                              .state_bits = job->way->state_bits,
                              .stochastic = job->way->stochastic,
                              .seed = 5};
    int64_t step, rank = ctx->world->rank;
    double *values = NULL;
    seqpar_status status = params_open(ctx, &model, &task->config, &desc);
    memset(&optim, 0, sizeof optim);
    if (!status)
        status = seqpar_optim_open(ctx, &optim, model.tensors, model.tensor_count, &desc);
    if (!status && !task->start) status = seqpar_llama_init(ctx, &model, task->seed);
    if (!status && task->start) status = params_write(ctx, &model, task->start);
    values = calloc((size_t)model.elements, sizeof *values);
    if (!status) status = params_read(ctx, &model, rank ? values : job->result->start);
    for (step = 0; !status && step < job->way->steps; step++)
        status = model_step(ctx, job, &model, &optim, step);
    if (!status) status = expect_ranks_agree(ctx, &model);
    if (!status) status = params_read(ctx, &model, rank ? values : job->result->params);
    free(values);
    if (!status && rank == 0) {
        job->result->last_norm = optim.norm;
        job->result->bytes_sent = ctx->world->bytes_sent + ctx->sp->bytes_sent;
    }
    if (rank < 64) {
        job->result->activations_peak[rank] = ctx->memory.peak[SEQPAR_MEM_ACTIVATIONS];
        job->result->scratch_peak[rank] = ctx->memory.peak[SEQPAR_MEM_SCRATCH];
        job->result->total_peak[rank] = ctx->memory.total_peak;
    }
    /* collective, so every rank has room for it */
    double *state = job->result->state ? calloc((size_t)(3 * model.elements) + 1, sizeof *state)
                                       : NULL;
    if (!status && state) status = kept_state(ctx, &optim, state, model.elements);
    if (!status && state && rank == 0)
        memcpy(job->result->state, state, (size_t)(3 * model.elements) * sizeof *state);
    free(state);
    seqpar_optim_close(ctx, &optim);
    seqpar_llama_close(ctx, &model);
    return status;
}

static seqpar_status model_main(seqpar_comm *world, void *user) {
    const model_job *job = user;
    seqpar_device *device = test_device(job->way->reference, job->way->threads);
    if (device && job->way->offload & MODEL_OFFLOAD_FILES) device->pool_path = "build";
    if (device && job->way->offload & MODEL_LATE) late_begin(device);
    int disturbed = job->way->inject &&
                    (job->way->inject_rank < 0 || job->way->inject_rank == world->rank);
    seqpar_inject_desc calm = {0};
    seqpar_comm *comm = job->way->inject
                            ? seqpar_comm_inject(world, disturbed ? job->way->inject : &calm)
                            : world;
    seqpar_ctx ctx;
    seqpar_status status = seqpar_ctx_open(&ctx, comm, device, job->way->sp);
    if (!status) status = model_rank(&ctx, job);
    seqpar_ctx_close(&ctx);
    if (comm != world) seqpar_comm_free(comm);
    seqpar_device_close(device);
    return status;
}

/* Room for what a run gives. */
static void model_room(const model_task *task, model_result *result) {
    seqpar_ctx ctx;
    seqpar_comm *self = seqpar_comm_self();
    seqpar_device *device = seqpar_device_reference();
    seqpar_llama model; /* only for its sizes */
    memset(result, 0, sizeof *result);
    seqpar_ctx_open(&ctx, self, device, 1);
    if (!seqpar_llama_open(&ctx, &model, &task->config)) result->elements = model.elements;
    seqpar_llama_close(&ctx, &model);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(self);
    result->tokens = task_tokens(task);
    result->vocab = task->config.vocab;
    result->logits = calloc((size_t)(result->tokens * result->vocab + 1), sizeof(double));
    result->logp = calloc((size_t)result->tokens + 1, sizeof(double));
    result->gradient = calloc((size_t)result->elements + 1, sizeof(double));
    result->params = calloc((size_t)result->elements + 1, sizeof(double));
    result->start = calloc((size_t)result->elements + 1, sizeof(double));
    result->state = calloc((size_t)(3 * result->elements) + 1, sizeof(double));
}

static void model_go(const model_task *task, const model_way *way, model_result *result) {
    model_job job = {task, way, result};
    result->status = seqpar_run_threads(way->dp * way->sp, model_main, &job, &result->error);
}

__attribute__((unused)) static void model_run(const model_task *task, const model_way *way,
                                              model_result *result) {
    model_room(task, result);
    model_go(task, way, result);
}

__attribute__((unused)) static void model_result_free(model_result *r) {
    free(r->logits);
    free(r->logp);
    free(r->gradient);
    free(r->params);
    free(r->start);
    free(r->state);
}

/* Packs documents of random length into rows; the second has one token. Token id 0 recurs.
   Masks have holes, and some documents are masked in whole. */
__attribute__((unused)) static void random_batch(seqpar_batch *batch, int64_t documents,
                                                 int64_t longest, int64_t vocab,
                                                 int64_t pack_len, int64_t cell) {
    seqpar_document *docs = calloc((size_t)documents, sizeof *docs);
    seqpar_pack_desc desc = {
        .pack_len = pack_len, .cell = cell, .vocab = vocab, .keep_masked = 1};
    seqpar_error error = {0};
    int64_t i, t;
    for (i = 0; i < documents; i++) {
        int64_t n = i == 1 ? 1 : test_integer(2, longest);
        int32_t *ids = calloc((size_t)n, sizeof *ids);
        uint8_t *mask = calloc((size_t)n, 1);
        for (t = 0; t < n; t++) {
            ids[t] = (int32_t)(t % 5 == 2 ? 0 : test_integer(0, vocab - 1));
            mask[t] = t > n / 3 && (i % 4 != 3) && test_integer(0, 5) > 0;
        }
        if (i == 0) mask[n - 1] = 1;
        docs[i].ids = ids;
        docs[i].loss_mask = mask;
        docs[i].tokens = n;
        docs[i].unit = i;
    }
    if (seqpar_pack(&error, batch, docs, documents, &desc)) {
        fprintf(stderr, "%s\n", error.text);
        exit(2);
    }
    for (i = 0; i < documents; i++) {
        free((void *)docs[i].ids);
        free((void *)docs[i].loss_mask);
    }
    free(docs);
}

/* Everything equal by memcmp. */
__attribute__((unused)) static void expect_equal_runs(const model_result *a,
                                                      const model_result *b, const char *what) {
    test_expect(!a->status, "%s: %s %s", what, seqpar_status_name(a->status), a->error.text);
    test_expect(!memcmp(a->logits, b->logits, (size_t)(a->tokens * a->vocab) * 8),
                "%s: logits differ", what);
    test_expect(!memcmp(a->logp, b->logp, (size_t)a->tokens * 8), "%s: log-probs differ", what);
    test_expect(!memcmp(&a->loss, &b->loss, 8), "%s: loss %.17g, want %.17g", what, a->loss,
                b->loss);
    test_expect(!memcmp(a->gradient, b->gradient, (size_t)a->elements * 8),
                "%s: gradients differ by %.2e", what,
                test_distance(a->gradient, b->gradient, a->elements));
    test_expect(!memcmp(&a->norm, &b->norm, 8), "%s: norm %.17g, want %.17g", what, a->norm,
                b->norm);
    test_expect(!memcmp(a->state, b->state, (size_t)(3 * a->elements) * 8),
                "%s: the optimizer's state differs by %.2e", what,
                test_distance(a->state, b->state, 3 * a->elements));
    test_expect(!memcmp(a->params, b->params, (size_t)a->elements * 8),
                "%s: parameters differ by %.2e", what,
                test_distance(a->params, b->params, a->elements));
}
#endif
