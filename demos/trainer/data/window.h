/* SPDX-License-Identifier: MIT OR Unlicense */
/* window.h - packs a window of documents, those of a step or of a part of an evaluation, into
 * rows of micro-batches, and handles the values and gradient seeds of their tokens. */
#ifndef DEMO_WINDOW_H
#define DEMO_WINDOW_H
#include "trainer/run/job_open.h"

/* ---- rows of a step ---- */

/* Returns the documents of a step, as indices into the set, the same on all ranks. The set is
   shuffled once an epoch. */
static int64_t *demo_step_documents(demo_rank *r, int64_t step) {
    const demo_job *job = r->job;
    int64_t batch = job->config.train_batch_size, per_epoch = job->usable_count / batch;
    int64_t per_unit = job->objective->documents_per_unit;
    int64_t *which = NULL;
    if (!r->order || r->order_epoch != step / per_epoch) {
        if (!r->order) r->order = (int64_t *)demo_alloc(job->usable_count, sizeof *r->order);
        r->order_epoch = step / per_epoch;
        seqpar_shuffle(r->order, job->usable_count, (uint64_t)job->config.seed,
                       (uint64_t)r->order_epoch);
    }
    for (int64_t i = 0; i < batch; i++)
        for (int64_t k = 0; k < per_unit; k++)
            arrput(which, job->usable[r->order[step % per_epoch * batch + i]] * per_unit + k);
    return which;
}

/* An evaluation takes its documents in file order, in windows of four batches. If one unit is
   left over, it joins the last window. */
static int64_t demo_eval_most(const demo_job *job) {
    return job->config.train_batch_size * 4 * job->objective->documents_per_unit;
}

static int64_t demo_eval_windows(const demo_job *job) {
    int64_t documents = arrlen(job->eval.documents), most = demo_eval_most(job);
    int64_t windows = (documents + most - 1) / most;
    return windows > 1 && documents - (windows - 1) * most == job->objective->documents_per_unit
               ? windows - 1
               : windows;
}

static int64_t *demo_eval_documents(const demo_job *job, int64_t window) {
    int64_t first = window * demo_eval_most(job);
    int64_t end = window + 1 < demo_eval_windows(job) ? first + demo_eval_most(job)
                                                      : arrlen(job->eval.documents);
    int64_t *which = NULL;
    for (int64_t i = first; i < end; i++) arrput(which, i);
    return which;
}

/* Packs into gradient_accumulation_steps micro-batches or, if that is 0, into micro-batches of
   about micro_train_batch_size rows. */
static seqpar_pack_desc demo_pack_desc(const demo_rank *r, int keep_masked) {
    const demo_job *job = r->job;
    seqpar_pack_desc desc = {.pack_len = job->config.pack_len,
                             .cell = job->config.cell,
                             .order = job->config.packing_samples ? SEQPAR_PACK_IN_ORDER
                                                                  : SEQPAR_PACK_UNIT_PER_ROW,
                             .dp_size = r->ctx.dp_size,
                             .micro_batches = job->config.gradient_accumulation_steps,
                             .micro_rows = job->config.micro_train_batch_size,
                             .keep_masked = keep_masked,
                             .vocab = job->model.vocab};
    return desc;
}

static seqpar_llama_batch_desc demo_batch_desc(const demo_job *job) {
    seqpar_llama_batch_desc run = {.layout = job->layout,
                                   .schedule = job->schedule,
                                   .heads_k_stride = job->config.ring_head_stride,
                                   .recompute = !job->config.gradient_checkpointing ? 0
                                                : job->config.activations_away      ? 2
                                                                                    : 1,
                                   .mlp_rows = job->config.tiled_mlp ? job->model.hidden : 0,
                                   .ulysses_size = job->config.ulysses_size,
                                   .relaxed = job->config.relaxed_attention,
                                   .temperature = job->temperature,
                                   .untaught = job->untaught};
    return run;
}

/* The same with the attention dropout of config.json in a training pass (micro >= 0), as in
   torch's training mode. */
static seqpar_llama_batch_desc demo_batch_desc_of(const demo_rank *r, int64_t micro) {
    seqpar_llama_batch_desc run = demo_batch_desc(r->job);
    run.dropout = micro >= 0;
    run.dropout_seed = (uint64_t)r->job->config.seed;
    run.dropout_step = r->step;
    return run;
}

/* ---- a window of documents ---- */

/* Packs the documents of w->which, in which the documents of a unit are adjacent. */
static seqpar_status demo_window_open(demo_rank *r, demo_window *w, int64_t per_unit,
                                      int keep_masked) {
    int64_t count = arrlen(w->which);
    seqpar_pack_desc pack = demo_pack_desc(r, keep_masked);
    seqpar_document *documents = (seqpar_document *)demo_alloc(count + 1, sizeof *documents);
    for (int64_t i = 0; i < count; i++) {
        const demo_document *d = &w->set->documents[w->which[i]];
        documents[i] = (seqpar_document){.ids = d->ids,
                                         .loss_mask = d->targets ? NULL : d->loss_mask,
                                         .tokens = d->tokens,
                                         .unit = i / per_unit,
                                         .targets = d->targets};
    }
    seqpar_status status = seqpar_pack(r->ctx.error, &w->batch, documents, count, &pack);
    w->units = count / per_unit;
    free(documents);
    return status;
}

static void demo_window_close(demo_window *w) {
    seqpar_batch_free(&w->batch);
    seqpar_segments_free(&w->seen);
    arrfree(w->which);
    arrfree(w->leaf);
    arrfree(w->value);
}

typedef seqpar_status (*demo_rows_fn)(demo_rank *r, demo_window *w, int64_t first,
                                      int64_t count, int64_t micro);

/* Runs `rows` on all rows of a window, without gradients, about `micro` rows at a time. Every
   data-parallel rank makes the same number of calls, some perhaps without rows, since all ranks
   take part in gathering sharded weights. */
static seqpar_status demo_window_values(demo_rank *r, demo_window *w, demo_rows_fn rows) {
    int64_t micro = r->job->micro_values ? r->job->micro_values
                                         : r->job->config.micro_train_batch_size;
    int64_t count = w->batch.rows, ranks = r->ctx.dp_size;
    int64_t turns = ((count + ranks - 1) / ranks + micro - 1) / micro;
    seqpar_status status = SEQPAR_OK;
    for (int64_t turn = 0; !status && turn < turns; turn++) {
        const seqpar_part part = {turns, ranks, turn, r->ctx.dp_rank};
        int64_t first, own;
        status = seqpar_part_rows(r->ctx.error, &first, &own, w->batch.row, count, &part);
        if (!status) status = rows(r, w, first, own, -1);
    }
    return status;
}

/* The dtype of a token's value (log-prob or score), and of its gradient seed. */
__attribute__((unused)) static int demo_value_dtype(const demo_rank *r,
                                                    const seqpar_llama *model) {
    return model->config.score ? r->device->storage : r->device->accumulator;
}

/* Gradient seeds of the tokens of this rank, on the device. */
typedef struct {
    seqpar_buffer part[3];
} demo_seeds;

static seqpar_status demo_seeds_write(demo_rank *r, demo_seeds *seeds, int parts,
                                      const double *host, int64_t tokens, int dtype) {
    seqpar_status status = SEQPAR_OK;
    for (int i = 0; !status && i < parts; i++) {
        status = seqpar_buffer_new(&r->ctx, &seeds->part[i], tokens * seqpar_dtype_bytes(dtype),
                                   SEQPAR_MEM_ACTIVATIONS);
        if (!status && tokens)
            seqpar_device_write(r->device, seeds->part[i].data, 0, host + i * tokens, tokens,
                                dtype);
    }
    return status;
}

static void demo_seeds_free(demo_rank *r, demo_seeds *seeds) {
    for (int i = 0; i < 3; i++) seqpar_buffer_free(&r->ctx, &seeds->part[i]);
}

/* For objectives over tokens: stores the sums of a piece, loss first, and its leaf number, for
   seqpar_sum_pieces at the end of the step. Refuses a loss that is not finite. */
static inline seqpar_status demo_piece_seen(demo_rank *r, demo_window *w,
                                            const seqpar_row *rows, const seqpar_piece *p,
                                            const double *sums) {
    arrput(w->leaf, p->leaf);
    for (int c = 0; c < r->job->objective->columns; c++) arrput(w->value, sums[c]);
    if (fabs(sums[0]) <= 1e300) return SEQPAR_OK;
    return seqpar_fail(r->ctx.error, SEQPAR_ERR_NOT_FINITE,
                       "step %lld: the loss of row %lld on rank %lld is %g; lower the learning "
                       "rate or look at the data of this step",
                       (long long)r->step + 1, (long long)rows[p->row].index,
                       (long long)r->ctx.world->rank, sums[0]);
}

/* Means over the supervised tokens of the step. */
static inline seqpar_status demo_tokens_total(demo_rank *r, demo_window *w, double *means,
                                              double *weight) {
    int columns = r->job->objective->columns;
    *weight = (double)w->batch.counts.supervised;
    seqpar_status status = seqpar_sum_pieces(&r->ctx, means, w->leaf, w->value, arrlen(w->leaf),
                                             columns);
    /* a window of an evaluation may have no supervised token */
    for (int c = 0; c<columns && * weight> 0; c++) means[c] /= *weight;
    return status;
}
#endif
