/* SPDX-License-Identifier: MIT OR Unlicense */
/* trainer.h - what the trainers share: the step loop, evaluation, logs, checkpoints.
 *
 * A step is an optimizer step over train_batch_size documents, drawn by a shuffle that belongs
 * to (seed, epoch), packed into rows, and split over data-parallel ranks, micro-batches and
 * sequence-parallel ranks. None of these splits changes a bit of the result. */
#ifndef DEMO_TRAINER_H
#define DEMO_TRAINER_H

#include <signal.h>
#include "plot.h"
#include "resume.h"
#ifdef DEMO_RUN_RANKS /* a function like this one, whose ranks are processes */
#define DEMO_RANKS_ARE_THREADS 0
#else
#define DEMO_RUN_RANKS         seqpar_run_threads
#define DEMO_RANKS_ARE_THREADS 1
#endif

/* ---- signals: the first stops after the step at hand, with a checkpoint; the second ends at once ---- */

enum { DEMO_TROUBLE = 1000 }; /* is no signal: something failed at rank 0, demo_rank.trouble */
/* by this signal, which may have come to another process */
static volatile sig_atomic_t demo_interrupted;
/* training ended before its time, by this signal */
static volatile sig_atomic_t demo_stopped;
static volatile sig_atomic_t demo_caught; /* the first that came here */
static struct timespec demo_caught_at;

/* Who starts programs may send a signal to the process and to its group: within a tenth of a
   second that is one. */
static void demo_on_interrupt(int signal_number) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double passed = (double)(now.tv_sec - demo_caught_at.tv_sec) +
                    1e-9 * (double)(now.tv_nsec - demo_caught_at.tv_nsec);
    if (demo_caught && passed > 0.1) {
        signal(signal_number, SIG_DFL);
        raise(signal_number);
    } else if (!demo_caught) {
        demo_caught_at = now;
        demo_caught = signal_number;
        demo_interrupted = signal_number;
    }
}

static void demo_catch(int signal_number) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = demo_on_interrupt;
    action.sa_flags = SA_RESTART;
    sigaction(signal_number, &action, NULL);
}

/* SIGHUP comes when a terminal is closed; nohup has it ignored. */
static void demo_catch_all(void) {
    struct sigaction hangup;
    demo_catch(SIGINT);
    demo_catch(SIGTERM);
    if (!sigaction(SIGHUP, NULL, &hangup) && hangup.sa_handler != SIG_IGN) demo_catch(SIGHUP);
}

/* Writing into a full disk, a file at its limit or a pipe that nobody reads is to fail with
   a sentence. */
static void demo_writes_may_fail(void) {
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
}

/* ---- rows of a step ---- */

/* Documents of step `step`, places in the set: the same on all ranks. A whole set is
   shuffled once an epoch, not once a step. */
static int64_t *demo_step_documents(demo_rank *r, int64_t step) {
    const demo_job *job = r->job;
    int64_t batch = job->config.train_batch_size, per_epoch = job->usable_count / batch;
    int64_t per_unit = job->objective->documents_per_unit;
    int64_t *which = NULL;
    if (!r->order || r->order_epoch != step / per_epoch) {
        if (!r->order) r->order = (int64_t *)demo_room(job->usable_count, sizeof *r->order);
        r->order_epoch = step / per_epoch;
        seqpar_shuffle(r->order, job->usable_count, (uint64_t)job->config.seed,
                       (uint64_t)r->order_epoch);
    }
    for (int64_t i = 0; i < batch; i++)
        for (int64_t k = 0; k < per_unit; k++)
            arrput(which, job->usable[r->order[step % per_epoch * batch + i]] * per_unit + k);
    return which;
}

/* An evaluation takes its documents in file order, four steps' worth at a time; a single
   unit left over joins those before it. */
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

/* For as many micro-batches as were asked for, or of about so many rows. */
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

static seqpar_llama_run demo_run_desc(const demo_job *job) {
    seqpar_llama_run run = {.layout = job->layout,
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

/* Of a step's rows, micro >= 0, which the model learns from: attention drops what its config.json
   says, as torch does where a model is in training mode. */
static seqpar_llama_run demo_run_of(const demo_rank *r, int64_t micro) {
    seqpar_llama_run run = demo_run_desc(r->job);
    run.dropout = micro >= 0;
    run.dropout_seed = (uint64_t)r->job->config.seed;
    run.dropout_step = r->step;
    return run;
}

/* ---- a window of documents ---- */

/* Packs the documents named by `which`, units being neighbours. */
static seqpar_status demo_window_open(demo_rank *r, demo_window *w, int64_t per_unit,
                                      int keep_masked) {
    int64_t count = arrlen(w->which);
    seqpar_pack_desc pack = demo_pack_desc(r, keep_masked);
    seqpar_document *documents = (seqpar_document *)demo_room(count + 1, sizeof *documents);
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

/* All rows of a window without gradients, about `micro` at a time: a part of them for every
   data-parallel rank and turn, some perhaps without a row. All have as many turns: weights that
   are at their owners are gathered by all. */
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

/* Of the values of one token (log-prob or score), and of the seed that goes back. */
__attribute__((unused)) static int demo_value_dtype(const demo_rank *r,
                                                    const seqpar_llama *model) {
    return model->config.score ? r->device->storage : r->device->accumulator;
}

/* Seeds of the local tokens on the device. */
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

/* A piece's sums of an objective whose unit is a token, its loss first: leaves of the step's sums. */
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

/* Means over the step's targets. */
static inline seqpar_status demo_tokens_total(demo_rank *r, demo_window *w, double *means,
                                              double *weight) {
    int columns = r->job->objective->columns;
    *weight = (double)w->batch.counts.supervised;
    seqpar_status status = seqpar_sum_pieces(&r->ctx, means, w->leaf, w->value, arrlen(w->leaf),
                                             columns);
    /* a window of an evaluation may have no target at all */
    for (int c = 0; c<columns && * weight> 0; c++) means[c] /= *weight;
    return status;
}

/* ---- one step ---- */

static double demo_learning_rate(const demo_job *job, int64_t step) {
    return job->config.learning_rate * seqpar_lr_factor(job->lr_kind, step, job->warmup,
                                                        job->total_steps,
                                                        job->config.min_lr_ratio);
}

/* To everything that shows reports. One that cannot be kept ends the run. Rank 0. */
static void demo_log(demo_rank *r, const demo_report *report) {
    double value = demo_report_value(report, r->job->objective->column[0]);
    if (!demo_report_evaluates(report)) {
        arrput(r->losses, value);
        arrput(r->steps, (double)report->round);
        r->norm_last = r->optim.norm;
        r->tokens += report->tokens;
        r->seconds += report->seconds;
        demo_progress_step(&r->progress, report->round, value, report->tokens);
    }
    if (!demo_logs_write(&r->logs, report)) return;
    (void)seqpar_fail(&r->trouble, SEQPAR_ERR_FILE_WRITE, "%s", r->logs.why.text);
    demo_interrupted = DEMO_TROUBLE;
}

static void demo_log_step(demo_rank *r, const double *means, double lr,
                          const seqpar_batch *batch, double seconds) {
    const seqpar_pack_counts *n = &batch->counts;
    const demo_objective *o = r->job->objective;
    demo_report report = {.phase = "train",
                          .step = r->step,
                          .round = r->step,
                          .tokens = n->tokens,
                          .seconds = seconds};
    if (r->world->rank) return;
    demo_report_add(&report, "step", (double)r->step, DEMO_PLACE);
    for (int i = 0; i < o->columns; i++)
        demo_report_add(&report, o->column[i], means[i], DEMO_EXACT);
    if (r->experts.on) demo_report_add(&report, "aux_loss", r->experts.loss, DEMO_EXACT);
    demo_report_add(&report, "grad_norm", r->optim.norm, DEMO_EXACT);
    demo_report_add(&report, "learning_rate", lr, DEMO_EXACT);
    demo_report_add(&report, "tokens", (double)n->tokens, DEMO_WHOLE);
    demo_report_add(&report, "supervised_tokens", (double)n->supervised, DEMO_WHOLE);
    demo_report_add(&report, "tokens_per_second", (double)n->tokens / seconds, DEMO_TENTHS);
    /* last, since they hang on the ranks, as the speed does */
    demo_report_add(&report, "rows", (double)batch->rows, DEMO_WHOLE);
    demo_log(r, &report);
}

/* Said once: ranks that stand idle, or wait for the busiest, in the first micro-batch. */
static void demo_notice_balance(demo_rank *r, const seqpar_batch *batch) {
    int64_t ranks = r->ctx.sp_size;
    const seqpar_part part = {batch->micro_batches, r->ctx.dp_size, 0, 0};
    int64_t first, rows;
    seqpar_balance b;
    char idle[48] = "";
    char fix[128] = "use longer rows (--packing_samples, --pack_len) or fewer ranks";
    if (seqpar_part_rows(NULL, &first, &rows, batch->row, batch->rows, &part) ||
        seqpar_split_balance(NULL, &b, batch->row + first, rows, r->job->layout, ranks) ||
        !seqpar_balance_poor(&b, ranks))
        return;
    if (b.better_cell)
        snprintf(fix, sizeof fix, "--cell %lld would even it out", (long long)b.better_cell);
    if (b.idle)
        snprintf(idle, sizeof idle, ", and %lld ha%s none", (long long)b.idle,
                 b.idle == 1 ? "s" : "ve");
    demo_progress_say(&r->progress,
                      "notice: the busiest of %lld sequence-parallel ranks has %lld tokens of "
                      "the first micro-batch, the mean is %lld%s; %s",
                      (long long)ranks, (long long)b.most, (long long)(b.tokens / ranks), idle,
                      fix);
}

/* The optimizer's step over a window that is open. */
static seqpar_status demo_step_window(demo_rank *r, demo_window *w, double lr, double *means) {
    const demo_job *job = r->job;
    const seqpar_llama_run run = demo_run_of(r, 0);
    const demo_objective *o = job->objective;
    int64_t accumulation = w->batch.micro_batches, first, count;
    double weight;
    seqpar_status status = o->before ? o->before(r, w) : SEQPAR_OK;
    if (!status)
        status = seqpar_step_begin(&r->ctx, &r->optim, w->batch.row, w->batch.rows, job->layout,
                                   accumulation);
    if (!status)
        status = demo_experts_begin(&r->ctx, &r->experts, &r->model, &r->optim, w->batch.row,
                                    accumulation, &run, job->config.aux_loss_coef);
    for (int64_t i = 0; !status && i < accumulation; i++) {
        status = seqpar_step_rows(&r->ctx, &r->optim, i, &first, &count);
        if (!status) status = o->rows(r, w, first, count, i);
    }
    if (!status) status = o->total(r, w, means, &weight);
    if (!status) status = demo_experts_end(&r->ctx, &r->experts);
    return status ? status : seqpar_llama_step_end(&r->ctx, &r->model, &r->optim, lr);
}

static seqpar_status demo_step(demo_rank *r) {
    const demo_job *job = r->job;
    demo_window w = {.set = &job->train, .which = demo_step_documents(r, r->step)};
    double means[DEMO_COLUMNS] = {0}, lr = demo_learning_rate(job, r->step);
    double began = demo_seconds();
    seqpar_status status = demo_window_open(r, &w, job->objective->documents_per_unit, 0);
    if (!status && r->world->rank == 0 && !arrlen(r->losses)) demo_notice_balance(r, &w.batch);
    if (!status) status = demo_step_window(r, &w, lr, means);
    if (!status) status = demo_average_step(&r->ctx, demo_learner(r), &r->average);
    if (!status) {
        r->step++;
        demo_log_step(r, means, lr, &w.batch, demo_seconds() - began);
    }
    demo_window_close(&w);
    return status;
}

/* Its parts are written, or could not be: rank 0 gives it its name. */
static seqpar_status demo_checkpoint_named(demo_rank *r, seqpar_status status) {
    const demo_config *c = &r->job->config;
    char shown[1024];
    if (!status && r->saving.shards) status = demo_gather_sums(r->ctx.world, &r->sums);
    /* all groups have written their parts */
    if (!status && r->own_world) status = seqpar_comm_barrier(r->world);
    if (!r->world->rank)
        status = demo_end_checkpoint(status, c->ckpt_path, &r->saving, r->ctx.error);
    arrfree(r->sums);
    if (status || r->world->rank) return status;
    demo_forget_checkpoints(c->ckpt_path, r->job->run.id, c->max_ckpt_num, r->saving.step);
    demo_progress_say(&r->progress, "step %lld: checkpoint in %s", (long long)r->saving.step,
                      seqpar_escape(shown, sizeof shown, c->ckpt_path));
    return SEQPAR_OK;
}

/* One that is under way is finished once all ranks have written their part; wait: now. */
static seqpar_status demo_checkpoint_written(demo_rank *r, bool wait) {
    int64_t missing = !demo_async_written(&r->async), failed;
    if (!r->async.under_way) return SEQPAR_OK; /* on no rank */
    seqpar_status status = wait ? SEQPAR_OK : seqpar_comm_max_i64(r->world, &missing, 1);
    if (status || (missing && !wait)) return status;
    status = demo_async_end(&r->async, &r->sums, r->ctx.error);
    failed = status != SEQPAR_OK;
    /* whoever failed ends all; nobody names it before all have said that they did not */
    if (!status) status = seqpar_comm_max_i64(r->world, &failed, 1);
    return demo_checkpoint_named(r, status);
}

/* Token files are used in place, as long as training lasts. */
static seqpar_status demo_data_kept(demo_rank *r) {
    const demo_dataset *sets[] = {&r->job->train, &r->job->eval};
    for (int i = 0; i < 2; i++)
        if (demo_token_file_changed(sets[i]->file))
            return seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_READ,
                               "%.300s was written to while it is %s; put the file as it was "
                               "there again and go on with --%s",
                               i ? r->job->config.eval_dataset : r->job->config.dataset,
                               r->job->objective->generates ? "read" : "trained on",
                               r->job->objective->generates ? "resume" : "load_checkpoint");
    return SEQPAR_OK;
}

/* Did anybody press Ctrl-C? Everybody must answer alike, also where one process alone was
   told. */
static seqpar_status demo_stop_wanted(demo_rank *r, int *stop) {
    int64_t flag = demo_interrupted;
    seqpar_status status = demo_data_kept(r);
    if (!status) status = seqpar_comm_max_i64(r->world, &flag, 1);
    if (!status) status = demo_checkpoint_written(r, false);
    *stop = flag != 0;
    if (*stop) demo_interrupted = (sig_atomic_t)flag;
    if (*stop) demo_stopped = (sig_atomic_t)flag;
    return status;
}

/* ---- evaluation: the mean over the whole set, in windows; equal means stay what they are ---- */

static void demo_say_evaluation(demo_rank *r, double weight) {
    const demo_objective *o = r->job->objective;
    demo_report report = {.phase = "eval", .step = r->step};
    if (r->world->rank) return;
    demo_progress_say(&r->progress, "step %lld: evaluation loss %.6f%s over %.0f %s",
                      (long long)r->step, r->eval_means[0], o->measure, weight, o->weight);
    for (int i = 1; i < o->columns; i++)
        demo_progress_say(&r->progress, "           %s %.6f", o->column[i], r->eval_means[i]);
    demo_report_add(&report, "step", (double)r->step, DEMO_PLACE);
    for (int i = 0; i < o->columns; i++)
        demo_report_add(&report, o->column[i], r->eval_means[i], DEMO_EXACT);
    demo_report_add(&report, o->weight, weight, DEMO_WHOLE);
    demo_log(r, &report);
}

static seqpar_status demo_evaluate(demo_rank *r, int *stop) {
    const demo_job *job = r->job;
    const demo_objective *o = job->objective;
    double weight = 0, all = 0, means[DEMO_COLUMNS];
    seqpar_status status = SEQPAR_OK;
    memset(r->eval_means, 0, sizeof r->eval_means);
    for (int64_t i = 0; !status && !*stop && i < demo_eval_windows(job); i++) {
        demo_window w = {.set = &job->eval, .which = demo_eval_documents(job, i)};
        status = demo_window_open(r, &w, o->documents_per_unit, 1);
        if (!status && o->before) status = o->before(r, &w);
        if (!status) status = demo_window_values(r, &w, o->rows);
        if (!status) status = o->total(r, &w, means, &weight);
        all += weight;
        for (int i = 0; !status && weight > 0 && i < o->columns; i++)
            r->eval_means[i] += (means[i] - r->eval_means[i]) * (weight / all);
        demo_window_close(&w);
        if (!status) status = demo_stop_wanted(r, stop);
    }
    if (!status && !*stop && !job->eval_scores) demo_say_evaluation(r, all);
    return status;
}

/* ---- the run ---- */

/* NULL: no memory, or no GPU, which *error then says. Processes of one machine have a GPU
   each, the one the transport takes. */
static seqpar_device *demo_device(const demo_job *job, seqpar_error *error) {
    const demo_config *c = &job->config;
    int naive = !strcmp(c->device, "reference") && !demo_wants_bf16(c);
    if (c->dry_run)
        return demo_plan_device_new(demo_wants_bf16(c) ? SEQPAR_DTYPE_BF16
                                    : naive            ? SEQPAR_DTYPE_F64
                                                       : SEQPAR_DTYPE_F32,
                                    naive ? SEQPAR_DTYPE_F64 : SEQPAR_DTYPE_F32);
#ifdef DEMO_CUDA
    seqpar_cuda_desc cuda = {.ordinal = job->processes ? demo_local_rank() : 0,
                             .storage = demo_wants_bf16(c) ? SEQPAR_DTYPE_BF16
                                                           : SEQPAR_DTYPE_F32,
                             .cublas = c->cublas};
    if (!strcmp(c->device, "cuda")) return seqpar_device_cuda(error, &cuda);
#endif
    (void)error;
    if (strcmp(c->device, "reference"))
        return demo_wants_bf16(c) ? seqpar_device_cpu_bf16(c->omp_threads)
                                  : seqpar_device_cpu(c->omp_threads);
    return demo_wants_bf16(c) ? seqpar_device_reference_bf16() : seqpar_device_reference();
}

/* Threads share weights that owners update, or nobody does; those on a GPU are left to each. At
   zero_stage 3 nobody has them whole. */
static bool demo_shares_weights(const demo_job *job) {
    const demo_config *c = &job->config;
    bool frozen = job->adapter.rank || job->objective->generates;
    return DEMO_RANKS_ARE_THREADS && !job->processes && job->ranks > 1 &&
           (c->zero_stage > 0 || frozen) && (c->zero_stage < 3 || c->load_in_4bit) &&
           strcmp(c->device, "cuda");
}

static demo_shared demo_shared_of(const demo_config *c) {
    return (demo_shared){.sharded = c->zero_stage == 3 && !c->load_in_4bit,
                         .offloaded = c->param_offload,
                         .four_bits = c->load_in_4bit,
                         .lock = PTHREAD_MUTEX_INITIALIZER};
}

/* Runs the job's ranks by `run`, a function like seqpar_run_threads. */
typedef seqpar_status (*demo_run_fn)(int64_t ranks, seqpar_rank_fn fn, void *user,
                                     seqpar_error *error);
static seqpar_status demo_run_with(demo_job *job, demo_run_fn run, seqpar_rank_fn main,
                                   void *user, seqpar_error *error) {
    demo_shared shared = demo_shared_of(&job->config);
    if (demo_shares_weights(job)) shared.device = demo_device(job, error);
    job->shared = &shared;
    seqpar_status status = run(job->ranks, main, user, error);
    job->shared = NULL;
    demo_shared_close(&shared);
    return status;
}

/* The model that is named so is the first group's. */
static bool demo_trains_model(const demo_rank *r) { return r->group == 0; }

static seqpar_status demo_checkpoint(demo_rank *r) {
    const demo_config *c = &r->job->config;
    demo_state state = {.step = r->step,
                        .seed = c->seed,
                        .train_batch_size = c->train_batch_size,
                        .documents = r->job->usable_count,
                        .shards = c->sharded_checkpoint || c->async_save ? r->ctx.world->size
                                                                         : 0,
                        .sums = &r->sums,
                        .async = c->async_save ? &r->async : NULL,
                        .reference = r->reference[DEMO_REFERENCE]};
    seqpar_safetensors_pair *notes = NULL;
    char folder[1110];
    if (r->saved == r->step) return SEQPAR_OK;
    seqpar_status status = demo_checkpoint_written(r, true);
    if (status) return status;
    memcpy(state.run, r->run, sizeof state.run);
    for (int64_t i = 0; i < arrlen(r->job->notes); i++)
        arrput(notes,
               ((seqpar_safetensors_pair){r->job->notes[i].key, r->job->notes[i].value}));
    state.notes = notes;
    state.note_count = arrlen(notes);
    demo_checkpoint_temporary(folder, sizeof folder, c->ckpt_path, r->step);
    if (!r->world->rank) status = demo_begin_checkpoint(c->ckpt_path, &state, r->ctx.error);
    if (!status && r->own_world)
        status = seqpar_comm_barrier(r->world); /* the folder is there */
    if (!status && r->job->objective->save) status = r->job->objective->save(r, &state, folder);
    if (r->average.share) state.average = &r->average;
    if (!status && demo_trains_model(r))
        status = demo_save_checkpoint(&r->ctx, demo_learner(r), &r->optim, folder, &state);
    if (!status && state.average)
        status = demo_save_average(&r->ctx, demo_learner(r), folder, state.average);
    arrfree(notes);
    r->saved = r->step;
    r->saving = state;
    if (!status && state.async) return demo_async_begin(&r->async, r->ctx.error);
    return demo_checkpoint_named(r, status);
}

static seqpar_status demo_resume(demo_rank *r) {
    const demo_config *c = &r->job->config;
    demo_state state = {0};
    char folder[1100];
    demo_checkpoint_path(folder, sizeof folder, c->ckpt_path, r->job->run.from);
    seqpar_status status = demo_trains_model(r)
                               ? demo_load_checkpoint(&r->ctx, demo_learner(r), &r->optim,
                                                      folder, r->job->run.from, &state)
                               : demo_look_at_state(&state, folder, r->job->run.from,
                                                    r->ctx.error);
    if (!status && demo_trains_model(r))
        status = demo_load_average(&r->ctx, demo_learner(r), folder, &r->average);
    if (status) return status;
    if (r->reference[DEMO_REFERENCE] && state.reference &&
        state.reference != r->reference[DEMO_REFERENCE] &&
        state.reference != r->reference[DEMO_REFERENCE_OLD])
        return seqpar_fail(
            r->ctx.error, SEQPAR_ERR_OPTION,
            r->job->objective->frozen
                ? "the checkpoint in %.300s is of another %s; give the same --teacher_model, and "
                  "--pretrain of adapters, to go on"
            : r->job->adapter.rank
                ? "the adapters in %.300s are of another model, or learnt against "
                  "another reference; give the same --pretrain or --ref_pretrain%s "
                  "to go on"
                : "the checkpoint in %.300s was trained against another reference "
                  "model; give the same --pretrain or --ref_pretrain%s to go on",
            c->ckpt_path,
            r->job->objective->frozen                         ? r->job->objective->frozen
            : r->job->adapter.rank && r->job->objective->walk ? ", and --critic_pretrain,"
                                                              : "");
    r->saved = r->step = state.step;
    return r->job->objective->load_state ? r->job->objective->load_state(r, &state) : SEQPAR_OK;
}

/* Ranks that are processes may have been started with different options or files: they would
   wait for each other, or train something that nobody asked for. */
static seqpar_status demo_ranks_agree(const demo_job *job, seqpar_comm *world) {
    int64_t count = arrlen(job->told);
    int64_t *own = (int64_t *)demo_room(count * (world->size + 1) + world->size, sizeof *own);
    int64_t *all = own + count, *bytes = all + count * world->size;
    for (int64_t i = 0; i < count; i++) own[i] = job->told[i].digest;
    for (int64_t p = 0; p < world->size; p++) bytes[p] = count * 8;
    seqpar_status status = seqpar_comm_all_gather(world, all, own, bytes, "options");
    for (int64_t i = 0; !status && i < count * world->size; i++)
        if (all[i] != all[i % count])
            status = seqpar_fail(world->error, SEQPAR_ERR_OPTION,
                                 "%s%s of rank %lld is not that of rank 0; start all ranks "
                                 "with the same options and files",
                                 job->told[i % count].dashes, job->told[i % count].name,
                                 (long long)(i / count));
    free(own);
    return status;
}

/* Of weights that all ranks share, which rank 0 has in its count. */
static int64_t demo_shared_bytes(const demo_rank *r) {
    return r->world->rank == 0 ? r->job->shared->bytes : 0;
}

/* The most that a rank has had at one time. */
static int64_t demo_peak_bytes(const demo_rank *r) {
    return r->ctx.memory.total_peak + demo_shared_bytes(r);
}

static int demo_optim_kind(const char *name) {
    return !strcmp(name, "sgd") ? SEQPAR_OPTIM_SGD : SEQPAR_OPTIM_ADAMW;
}

static int demo_optim_bits(const char *name) { return !strcmp(name, "adamw_8bit") ? 8 : 0; }

/* The group of this rank, and its world. */
static seqpar_status demo_group_open(demo_rank *r, seqpar_comm *world) {
    int64_t past = 0;
    r->world = world;
    if (r->job->groups < 2) return SEQPAR_OK;
    while (world->rank >= (past += r->job->group_ranks[r->group])) r->group++;
    return seqpar_comm_split(world, r->group, world->rank, &r->own_world);
}

/* The model that is trained or whose adapters are, their optimizer and their average. */
static seqpar_status demo_trained_open(demo_rank *r, const seqpar_optim_desc *optim) {
    const demo_config *c = &r->job->config;
    const seqpar_llama *learner = demo_learner(r);
    seqpar_status status = demo_model_open(&r->ctx, &r->model, &r->job->model, r->job->shared,
                                           false);
    if (!status && r->job->adapter.rank)
        status = seqpar_llama_open_adapters(&r->ctx, &r->adapters, &r->model, &r->job->adapter,
                                            c->zero_stage == 3, 0);
    if (!status && !r->job->objective->generates)
        status = seqpar_optim_open(&r->ctx, &r->optim, learner->tensors, learner->tensor_count,
                                   optim);
    if (!status) status = demo_begin_model(&r->ctx, &r->model, c->pretrain, c->seed);
    if (!status && r->job->adapter.rank)
        status = demo_lora_begin(r, &r->model, &r->adapters, DEMO_OF_MODEL);
    return status || !c->enable_ema
               ? status
               : demo_average_open(&r->ctx, learner, &r->average, c->ema_beta);
}

static seqpar_status demo_rank_open(demo_rank *r, seqpar_comm *world) {
    const demo_config *c = &r->job->config;
    bool whole = !r->job->adapter.rank; /* else the weights are frozen, wherever they lie */
    seqpar_optim_desc optim = {
        .kind = demo_optim_kind(c->optim),
        .zero_stage = (int)c->zero_stage,
        .beta1 = c->adam_betas[0],
        .beta2 = c->adam_betas[1],
        .eps = c->adam_eps,
        .decay = c->l2,
        .max_norm = c->max_norm,
        .params_shared = whole && r->job->shared->device != NULL,
        .offload = (c->adam_offload ? SEQPAR_OFFLOAD_STATE : 0) |
                   (whole && c->param_offload ? SEQPAR_OFFLOAD_PARAMS : 0),
        .state_bits = demo_optim_bits(c->optim),
        .stochastic = c->stochastic_rounding,
        .seed = (uint64_t)c->seed};
    /* before a group is made of different numbers of ranks */
    seqpar_status status = demo_ranks_agree(r->job, world);
    r->world = world;
    r->ctx.error = world->error;
    if (status) return status;
    r->device = demo_device(r->job, world->error);
    if (r->device) r->device->pool_path = c->offload_path;
    memcpy(r->run, r->job->run.id, sizeof r->run);
    status = seqpar_comm_broadcast(world, r->run, sizeof r->run, 0);
    if (!status) status = demo_group_open(r, world);
    if (!status)
        status = seqpar_ctx_open(&r->ctx, r->own_world ? r->own_world : world, r->device,
                                 c->ring_attn_size);
    r->optim.desc = optim;
    if (!status && demo_trains_model(r)) status = demo_trained_open(r, &optim);
    if (!status && r->job->objective->open) status = r->job->objective->open(r);
    r->saved = DEMO_NOTHING_SAVED;
    if (!status && r->job->run.from != DEMO_NOTHING_SAVED) status = demo_resume(r);
    if (!status && world->rank == 0 && demo_logs_open(&r->logs, &r->job->logs))
        status = seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_OPEN, "%s", r->logs.why.text);
    return status;
}

/* In the form of the folder that the model began with; without one, with the ids of a token
   file. */
static seqpar_status demo_save_model(demo_rank *r, const seqpar_llama *model,
                                     const char *folder, demo_average *average) {
    const demo_config *c = &r->job->config;
    bool critic = r->critic && (model == r->critic || model == r->critic->adapters);
    const char *source = critic ? r->critic_source : c->pretrain;
    if (model->adapter.rank) return demo_save_adapters(r, model, source, folder, average);
    demo_save_form form = {.source = source,
                           .dtype = demo_dtype_named(c->save_dtype),
                           .shard_bytes = demo_size_named(c->max_shard_size),
                           .which = critic ? DEMO_SAVES_CRITIC : DEMO_SAVES_MODEL,
                           .trained = r->step > 0};
    const demo_token_file *f = form.source ? NULL : r->job->train.file;
    seqpar_status status = demo_save_folder(&r->ctx, model, folder, &form, average);
    return status || !f || r->ctx.world->rank
               ? status
               : demo_source_ids(folder, f->head->bos, f->head->eos, f->head->pad,
                                 r->ctx.error);
}

/* Collective: the average as a model folder of its own. */
static seqpar_status demo_average_save(demo_rank *r) {
    char folder[1280];
    if (!r->average.share) return SEQPAR_OK;
    snprintf(folder, sizeof folder, "%s/ema", r->job->config.save_path);
    seqpar_status status = r->ctx.world->rank == 0 ? demo_make_folder(folder, r->ctx.error)
                                                   : SEQPAR_OK;
    return status ? status : demo_save_model(r, demo_learner(r), folder, &r->average);
}

/* Rank 0 writes the whole model into a folder beside its adapters'. */
static seqpar_status demo_write_merged(demo_rank *r, const seqpar_llama *model) {
    char folder[1280];
    bool critic = model == r->critic;
    snprintf(folder, sizeof folder, "%s%s/merged", r->job->config.save_path,
             critic ? "/critic" : "");
    seqpar_status status = demo_make_folder(folder, r->ctx.error);
    if (!status) status = demo_save_model(r, model, folder, NULL);
    return status || critic || !r->job->objective->saved ? status
                                                         : r->job->objective->saved(r, folder);
}

/* The last that is done with a model: its weights are others behind it. Collective over its
   ranks. */
static seqpar_status demo_merge_and_save(demo_rank *r, seqpar_llama *model) {
    const seqpar_llama *models[DEMO_SAVED_MODELS] = {NULL, NULL};
    models[model == r->critic ? DEMO_SAVES_CRITIC : DEMO_SAVES_MODEL] = model;
    seqpar_status status = demo_lora_merge(r, model);
    if (!status && r->ctx.world->rank) return demo_hand_over(&r->ctx, models, model);
    if (!status) status = demo_write_merged(r, model);
    return demo_handed_over(&r->ctx, model, status);
}

static seqpar_status demo_merged_save(demo_rank *r) {
    seqpar_status status = SEQPAR_OK;
    if (!r->job->config.save_merged) return SEQPAR_OK;
    if (demo_trains_model(r)) status = demo_merge_and_save(r, &r->model);
    return status || !r->critic || !r->saves_critic ? status
                                                    : demo_merge_and_save(r, r->critic);
}

static seqpar_status demo_draw_loss(demo_rank *r) {
    char path[1280];
    demo_error why;
    demo_series series = {
        .name = "training loss", .x = r->steps, .y = r->losses, .points = arrlen(r->losses)};
    demo_plot plot = {.title = "Training loss",
                      .x_label = "optimizer step",
                      .y_label = r->job->objective->measure[0] ? "loss, nats a token" : "loss",
                      .series = &series,
                      .series_count = 1};
    snprintf(path, sizeof path, "%s/training_loss.svg", r->job->config.save_path);
    return demo_plot_write(path, &plot, &why)
               ? seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_WRITE, "%s", why.text)
               : SEQPAR_OK;
}

/* The final model, by rank 0. Where it cannot be written, a checkpoint keeps it. */
static seqpar_status demo_finish(demo_rank *r, seqpar_status (*write)(demo_rank *r),
                                 int *stop) {
    seqpar_error *error = r->ctx.error;
    const seqpar_llama *const models[DEMO_SAVED_MODELS] = {demo_learner(r),
                                                           demo_learner_of(r->critic)};
    const seqpar_llama *first = demo_trains_model(r) || !r->critic ? models[0] : models[1];
    int64_t failed = 0;
    r->ctx.error = &r->trouble;
    if (r->ctx.world->rank == 0) failed = write(r) != SEQPAR_OK;
    r->ctx.error = error;
    seqpar_status status = r->ctx.world->rank ? demo_hand_over(&r->ctx, models, first)
                                              : demo_handed_over(&r->ctx, first, SEQPAR_OK);
    if (!status) status = seqpar_comm_max_i64(r->world, &failed, 1);
    *stop = failed != 0;
    return !status && failed && r->step ? demo_checkpoint(r) : status;
}

static seqpar_status demo_write_model(demo_rank *r) {
    /* it may have gone since */
    seqpar_status status = demo_make_folder(r->job->config.save_path, r->ctx.error);
    const char *folder = r->job->config.save_path;
    if (!status) status = demo_save_model(r, demo_learner(r), folder, NULL);
    if (!status && r->job->objective->saved && !r->job->adapter.rank)
        status = r->job->objective->saved(r, folder);
    return status || !r->job->config.plot_loss ? status : demo_draw_loss(r);
}

static seqpar_status demo_train(demo_rank *r) {
    const demo_config *c = &r->job->config;
    int stop = 0;
    seqpar_status status = demo_stop_wanted(r, &stop);
    /* nothing is left to train, or a run may have been killed before it evaluated */
    if (!status && !stop && demo_evaluation_due(r->job, r->step))
        status = demo_evaluate(r, &stop);
    while (!status && !stop && r->step < r->job->total_steps) {
        status = demo_step(r);
        if (!status) status = demo_stop_wanted(r, &stop);
        int due = c->save_steps > 0 && r->step % c->save_steps == 0;
        if (!status && (due || stop)) status = demo_checkpoint(r);
        bool evaluate = !stop && demo_evaluation_due(r->job, r->step);
        if (!status && evaluate) status = demo_evaluate(r, &stop);
        if (!status && evaluate && stop) status = demo_checkpoint(r);
    }
    if (!status && !stop) status = demo_finish(r, demo_write_model, &stop);
    r->stopped = stop;
    return status;
}

/* What was trained, and where it is. */
static void demo_say_place_of(const demo_rank *r, char *text, size_t size) {
    char shown[1024];
    seqpar_escape(shown, sizeof shown, r->job->config.save_path);
    if (r->job->adapter.rank)
        snprintf(text, size, "adapters (%lld values beside %lld) in %s",
                 (long long)demo_values_of(&r->adapters), (long long)demo_values_of(&r->model),
                 shown);
    else
        snprintf(text, size, "model in %s", shown);
}

static seqpar_status demo_say_totals(demo_rank *r) {
    const demo_objective *o = r->job->objective;
    bool trained = arrlen(r->losses) > 0;
    double first = trained ? r->losses[0] : NAN, last = trained ? arrlast(r->losses) : NAN;
    const char *evaluates = o->evaluates ? o->evaluates : o->column[0];
    char number[4][32];
    double speed = r->seconds > 0 ? (double)r->tokens / r->seconds : 0.0;
    bool evaluated = arrlen(r->job->eval.documents) > 0 && !r->job->eval_scores;
    char where[1200];
    demo_progress_end(&r->progress);
    if (r->stopped) {
        const char *how = r->trouble.status ? "stopped" : "interrupted";
        if (r->step)
            fprintf(stderr, "%s after step %lld; go on with --load_checkpoint\n", how,
                    (long long)r->step);
        else
            fprintf(stderr, "%s before the first step\n", how);
        return SEQPAR_OK;
    }
    if (r->job->config.json) {
        printf("{\"steps\": %lld, \"%s_first\": %s, \"%s_last\": %s, \"grad_norm\": %s, "
               "\"tokens_per_second\": %.1f",
               (long long)r->step, o->column[0], demo_json_number(number[0], first),
               o->column[0], demo_json_number(number[1], last),
               demo_json_number(number[2], trained ? r->norm_last : NAN), speed);
        if (evaluated)
            printf(", \"eval_%s\": %s", evaluates,
                   demo_json_number(number[3], r->eval_means[0]));
        printf("}\n");
    } else {
        demo_say_place_of(r, where, sizeof where);
        if (trained)
            printf("%s %.6f -> %.6f, gradient norm %.6f, %.0f tokens/s, %s\n", o->column[0],
                   first, last, r->norm_last, speed, where);
        else
            printf("nothing to train: step %lld of %lld is done, %s\n", (long long)r->step,
                   (long long)r->job->last_step, where);
        if (evaluated)
            printf("evaluation %s %.6f%s\n", evaluates, r->eval_means[0], o->measure);
    }
    if (!fflush(stdout) && !ferror(stdout)) return SEQPAR_OK;
    return seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_WRITE,
                       "cannot write the closing figures: %s; the model is in %.300s",
                       strerror(errno), r->job->config.save_path);
}

static seqpar_status demo_rank_logs_close(demo_rank *r) {
    return demo_logs_close(&r->logs)
               ? seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_WRITE, "%s", r->logs.why.text)
               : SEQPAR_OK;
}

static void demo_rank_close(demo_rank *r) {
    seqpar_error ignored = {0};
    (void)demo_async_end(&r->async, &r->sums, &ignored);
    arrfree(r->sums);
    (void)demo_logs_close(&r->logs);
    arrfree(r->losses);
    arrfree(r->steps);
    free(r->order);
    if (r->job->objective->close) r->job->objective->close(r);
    demo_average_close(&r->average);
    demo_experts_free(&r->experts);
    seqpar_optim_close(&r->ctx, &r->optim);
    seqpar_llama_close(&r->ctx, &r->adapters);
    seqpar_llama_close(&r->ctx, &r->model);
    seqpar_ctx_close(&r->ctx);
    seqpar_comm_free(r->own_world);
    seqpar_device_close(r->device);
}

static seqpar_status demo_rank_main(seqpar_comm *world, void *user) {
    demo_rank r;
    memset(&r, 0, sizeof r);
    r.job = (const demo_job *)user;
    seqpar_status status = demo_rank_open(&r, world);
    if (world->rank == 0)
        demo_progress_begin(
            &r.progress, r.step * r.job->rounds / (r.job->last_step > 0 ? r.job->last_step : 1),
            r.job->rounds, r.job->config.logging_steps);
    if (!status) demo_lora_say(&r);
    r.progress.round = r.job->objective->round;
    r.progress.value = r.job->objective->column[0];
    if (!status)
        status = r.job->objective->train ? r.job->objective->train(&r) : demo_train(&r);
    if (!status) status = demo_checkpoint_written(&r, true);
    if (!status && !r.stopped) status = demo_average_save(&r);
    if (!status && !r.stopped) status = demo_merged_save(&r);
    /* a run that was killed while it did */
    if (!status && world->rank == 0 && r.saved != DEMO_NOTHING_SAVED)
        demo_forget_checkpoints(r.job->config.ckpt_path, r.job->run.id,
                                r.job->config.max_ckpt_num, r.saved);
    if (!status) status = demo_rank_logs_close(&r);
    if (!status && world->rank == 0 && !r.job->objective->generates)
        status = demo_say_totals(&r);
    /* the cause, also where its checkpoint could not be written either */
    if (r.trouble.status) {
        if (status)
            demo_progress_say(&r.progress, "notice: nor could a checkpoint be written: %s",
                              world->error->text);
        *world->error = (seqpar_error){0};
        status = seqpar_fail(world->error, r.trouble.status, "%s", r.trouble.text);
    }
    if (status && world->rank == 0) demo_progress_end(&r.progress);
    demo_rank_close(&r);
    return status;
}

/* OpenMP threads that spin while they wait take the cores from the other ranks, and threads that
   sleep are slow to wake, above all beside other work. So they sleep where there are more of them
   than cores alone. The runtime reads this when it is loaded, so the program starts itself once
   more. */
static void demo_wait_passively(char **argv) {
    if (getenv("OMP_WAIT_POLICY")) return;
    setenv("OMP_WAIT_POLICY", "passive", 1);
    execv("/proc/self/exe", argv);
}

/* Ranks that are processes of one host do not know how many threads the others have. */
static bool demo_are_processes(void) {
    const char *name = "";
    return demo_launched(&name) > 1 || demo_environment("WORLD_SIZE", 0) > 1;
}

/* Without --omp_threads there are as many as cores. */
static bool demo_threads_crowd(const demo_config *c) {
    int64_t dp = c->data_parallel_size > 1 ? c->data_parallel_size : 1;
    double threads = (double)c->omp_threads * (double)dp * (double)c->ring_attn_size;
    return c->omp_threads > 1 && threads > (double)sysconf(_SC_NPROCESSORS_ONLN);
}

static void demo_job_close(demo_job *job) {
    demo_run_close(&job->run);
    arrfree(job->notes);
    demo_data_free(&job->train);
    demo_data_free(&job->eval);
    free(job->usable);
    arrfree(job->told);
}

/* Behind the line of the ranks, which is of the first group. */
static void demo_groups_say(const demo_job *job) {
    char name[64], first[64] = "";
    for (int g = 0; job->groups > 1 && g < job->groups; g++) {
        job->objective->group_name(job, g, name);
        if (!g) snprintf(first, sizeof first, "%s", name);
        fprintf(stderr, "%s %s on %lld", g ? "," : "groups:", name,
                (long long)job->group_ranks[g]);
    }
    if (job->groups > 1) fprintf(stderr, " ranks; the line above is of %s\n", first);
}

static void demo_job_notices(const demo_job *job) {
    const demo_config *c = &job->config;
    char warning[512], shown[512];
    int64_t positions;
    demo_template_checked(c->input_template, warning, sizeof warning);
    if (*warning) fprintf(stderr, "notice: %s\n", seqpar_escape(shown, sizeof shown, warning));
    if (c->pretrain && (positions = demo_config_positions(c->pretrain)) &&
        positions < c->max_len)
        fprintf(stderr,
                "notice: the model was made for texts of %lld tokens "
                "(max_position_embeddings), --max_len is %lld\n",
                (long long)positions, (long long)c->max_len);
    if (c->pretrain && job->train.file && !demo_folder_has(c->pretrain, "tokenizer.json"))
        fprintf(
            stderr,
            "notice: %s has no tokenizer.json, so nothing says whether its tokens are those "
            "of the token file\n",
            seqpar_escape(shown, sizeof shown, c->pretrain));
    if (c->load_checkpoint && job->run.from == DEMO_NOTHING_SAVED)
        fprintf(stderr,
                "notice: nothing is saved in %s yet; training starts from the beginning\n",
                seqpar_escape(shown, sizeof shown, c->ckpt_path));
    if (job->run.from != DEMO_NOTHING_SAVED && job->run.from == job->last_step)
        fprintf(stderr,
                "notice: nothing is left to train, step %lld of %lld is done; the model is "
                "written once more\n",
                (long long)job->run.from, (long long)job->last_step);
    if (job->objective->needs_model && !c->pretrain && job->run.from == DEMO_NOTHING_SAVED)
        fprintf(stderr, "notice: without --pretrain a model with random weights is trained; "
                        "give the folder of one that was trained before\n");
}

static void demo_job_say(const demo_job *job) {
    const demo_config *c = &job->config;
    char shown[512];
    if (job->rank) return; /* one process speaks */
    demo_job_notices(job);
    fprintf(stderr, "data: %s\n", job->train.summary);
    snprintf(shown, sizeof shown,
             job->model.attention_dropout > 0 ? ", attention_dropout %g" : "",
             job->model.attention_dropout);
    fprintf(
        stderr,
        "model: %lld layers, hidden %lld, %lld heads over %lld kv heads, vocab %lld%s; %s%s\n",
        (long long)job->model.layers, (long long)job->model.hidden, (long long)job->model.heads,
        (long long)job->model.kv_heads, (long long)job->model.vocab, shown, c->device,
        demo_wants_bf16(c) ? " in bf16" : "");
    if (job->objective->say) {
        job->objective->say(job);
        return;
    }
    fprintf(stderr,
            "ranks: %lld data-parallel x %lld sequence-parallel (%s, %s), %sZeRO %lld, %lld "
            "steps of %lld %s\n",
            (long long)job->dp, (long long)c->ring_attn_size, seqpar_layout_name(job->layout),
            seqpar_schedule_name(job->schedule),
            job->processes ? "a process each, over " DEMO_PROCESSES_OVER ", " : "",
            (long long)c->zero_stage, (long long)job->total_steps,
            (long long)c->train_batch_size, job->objective->unit);
    demo_groups_say(job);
    demo_settled_say(job);
}

#if defined DEMO_NCCL || defined DEMO_MPI
/* Launchers end processes by SIGTERM. While a process still waits for the others, a signal
   ends it at once. */
static seqpar_status demo_process_main(seqpar_comm *world, void *user) {
    demo_catch_all();
    return demo_rank_main(world, user);
}

#ifdef DEMO_MPI
static seqpar_status demo_run_process(demo_job *job, seqpar_error *error) {
    seqpar_mpi_limit(job->world, (double)job->config.ddp_timeout);
    seqpar_status status = seqpar_mpi_end(job->world, demo_process_main(job->world, job));
    job->world = NULL;
    *error = job->world_error;
    return status;
}
#else
static seqpar_status demo_run_process(demo_job *job, seqpar_error *error) {
    seqpar_nccl_desc desc = job->nccl;
    desc.limit_s = (double)job->config.ddp_timeout;
    return seqpar_nccl_run(&desc, demo_process_main, job, error);
}
#endif

/* All processes hear of the world's first failure: rank 0 says it, and the rank it happened
   on. */
static seqpar_status demo_process_run(demo_job *job) {
    demo_shared none = demo_shared_of(&job->config);
    seqpar_error error;
    job->shared = &none;
    seqpar_status status = demo_run_process(job, &error);
    job->shared = NULL;
    if (status && (!job->rank || error.rank == job->rank))
        fprintf(stderr, "error: %s (%s, rank %lld)\n", error.text, seqpar_status_name(status),
                (long long)error.rank);
    return status;
}
#endif

/* A process that has not trained leaves the others. */
static void demo_leave(demo_job *job) {
#ifdef DEMO_MPI
    if (job->world) seqpar_mpi_end(job->world, SEQPAR_OK);
#endif
    job->world = NULL;
}

/* A line for each sentence. */
static void demo_errors_say(const char *text) {
    static char shown[4 * sizeof(demo_error)];
    demo_error one;
    for (size_t length; *text; text += length + !!text[length]) {
        length = strcspn(text, (const char[]){DEMO_ERROR_NEXT, 0});
        snprintf(one.text, sizeof one.text, "%.*s", (int)length, text);
        fprintf(stderr, "error: %s\n", seqpar_escape(shown, sizeof shown, one.text));
    }
}

/* A job that never began. Processes that hold together say it once, and all end. Returns the
   exit code. */
static int demo_never_began(demo_job *job, const char *text) {
    bool mine = true;
#ifdef DEMO_MPI
    if (job->world) {
        seqpar_fail(job->world->error, SEQPAR_ERR_OPTION, "%s", text);
        seqpar_mpi_end(job->world, SEQPAR_ERR_OPTION);
        mine = job->world_error.rank == job->rank;
        job->world = NULL;
    }
#endif
    demo_job_close(job);
    if (mine) demo_errors_say(text);
    return 2;
}

static seqpar_status demo_ranks_run(demo_job *job) {
    seqpar_error error;
#if defined DEMO_NCCL || defined DEMO_MPI
    if (job->processes) return demo_process_run(job);
#endif
    demo_catch_all();
    seqpar_status status = demo_run_with(job, DEMO_RUN_RANKS, demo_rank_main, job, &error);
    if (status) fprintf(stderr, "error: %s (%s)\n", error.text, seqpar_status_name(status));
    return status;
}

/* Runs the job on its ranks. Returns the exit code. */
static int demo_job_run(demo_job *job) {
    seqpar_status status = demo_ranks_run(job);
    return status ? 1 : demo_stopped ? 128 + demo_stopped : 0;
}

#include "dry_run.h"

/* Where standard input, output or error is closed, the next file that is opened would take
   its number, and messages go into it. */
static void demo_standard_streams(void) {
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) _exit(2);
}

/* A folder says what its model is like: an option that says otherwise would not be followed. */
static int demo_shape_agrees(const demo_job *job, const demo_options *options,
                             demo_error *error) {
    const demo_config *c = &job->config;
    const seqpar_llama_config *m = &job->model;
    const struct {
        const char *name;
        double told, there;
    } shape[] = {{"hidden_size", (double)c->hidden_size, (double)m->hidden},
                 {"num_hidden_layers", (double)c->num_hidden_layers, (double)m->layers},
                 {"num_attention_heads", (double)c->num_attention_heads, (double)m->heads},
                 {"num_key_value_heads", (double)c->num_key_value_heads, (double)m->kv_heads},
                 {"head_dim", (double)c->head_dim, (double)m->head_dim},
                 {"intermediate_size", (double)c->intermediate_size, (double)m->intermediate},
                 {"tie_word_embeddings", (double)c->tie_word_embeddings, (double)m->tied},
                 {"rope_theta", c->rope_theta, m->rope_theta}};
    for (size_t i = 0; c->pretrain && i < sizeof shape / sizeof *shape; i++)
        if (demo_options_given(options, shape[i].name) &&
            (shape[i].told < shape[i].there || shape[i].told > shape[i].there))
            return demo_fail(
                error, "--%s is %.15g, but the model in --pretrain %s has %.15g; leave it out",
                shape[i].name, shape[i].told, c->pretrain, shape[i].there);
    return 0;
}

/* What would be refused before data is read is refused here: tokens may take hours. */
static int demo_print_prepare(demo_job *job) {
    demo_error error;
    if (demo_paths_fit(job->bindings, job->binding_count, &error) ||
        demo_job_settle(job, &error) || demo_shape_agrees(job, job->parsed, &error))
        return demo_never_began(job, error.text);
    if (!job->rank) demo_prepare_print_all(job);
    demo_leave(job);
    demo_job_close(job);
    return demo_print_failed("which data becomes tokens");
}

static bool demo_sentence_names(const char *sentence, const char *option) {
    char dashes[DEMO_NAME_LIMIT + 4];
    snprintf(dashes, sizeof dashes, "--%s", option);
    return strstr(sentence, dashes) != NULL;
}

/* Is the sentence about an option whose value is refused already? It has its default there. */
static bool demo_sentence_hangs(const demo_options *options, const char *sentence) {
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++) {
        const demo_known *known = &demo_known_options[i];
        if (options->refused[i] &&
            (demo_sentence_names(sentence, known->name) ||
             demo_sentence_names(sentence, demo_known_target(known)->name)))
            return true;
    }
    return false;
}

/* Beside words that are wrong: what else is, so that it needs no second try. */
static void demo_settle_besides(demo_job *job, const demo_options *options, demo_error *error) {
    demo_error more = {""}, one = {""};
    if (!demo_job_settle(job, &more)) return;
    for (char *at = more.text, *next; at; at = next) {
        next = strchr(at, DEMO_ERROR_NEXT);
        if (next) *next++ = 0;
        snprintf(one.text, sizeof one.text, "%s", at);
        if (!demo_sentence_hangs(options, at)) demo_fail_too(error, &one);
    }
}

/* A trainer's main: from the command line to the exit code. */
__attribute__((unused)) static int demo_main(demo_job *job, const char *tool,
                                             const demo_binding *bindings, int count, int argc,
                                             char **argv) {
    demo_options options = {.tool = tool, .bindings = bindings, .binding_count = count};
    demo_error error;
    char ckpt_path[DEMO_PATH_LIMIT + 64];
    cJSON_Hooks memory = {demo_json_room, free};
    demo_standard_streams();
    demo_writes_may_fail();
    if (demo_are_processes()) demo_wait_passively(argv);
    cJSON_InitHooks(&memory);
    job->bindings = bindings;
    job->binding_count = count;
    job->parsed = &options;
    int wrong = 0;
#ifdef DEMO_MPI /* at once: then even a typing error is said by one for all */
    wrong = demo_find_processes(job, &error);
#endif
    if (!wrong) wrong = demo_options_parse(&options, argc, argv, &error);
    if (!wrong && !job->world && demo_threads_crowd(&job->config)) demo_wait_passively(argv);
    if (!wrong && options.help_wanted) {
        if (!job->rank) demo_options_help(&options, stdout);
        demo_leave(job);
        return demo_print_failed("the options");
    }
    if (!wrong) {
        snprintf(ckpt_path, sizeof ckpt_path, "%s/checkpoints_%s", job->config.save_path, tool);
        if (!job->config.ckpt_path) job->config.ckpt_path = ckpt_path;
        if (job->config.print_prepare) return demo_print_prepare(job);
        wrong = demo_paths_fit(bindings, count, &error) || demo_job_open(job, &error) ||
                demo_shape_agrees(job, &options, &error) ||
                (job->objective->begin ? job->objective->begin(job, &error)
                                       : demo_job_begin(job, bindings, count, tool, &error));
        if (!job->rank) demo_options_print_ignored(&options, stderr);
    } else if (options.program) /* the words were read */
        demo_settle_besides(job, &options, &error);
    if (wrong) return demo_never_began(job, error.text);
    demo_job_say(job);
    int code = job->config.dry_run ? demo_dry_run(job, tool) : demo_job_run(job);
    demo_leave(job);
    demo_job_close(job);
    return code;
}
#endif
