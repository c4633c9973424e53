/* SPDX-License-Identifier: MIT OR Unlicense */
/* train_step.h - one optimizer step with its log, the end of a checkpoint, and the
 * evaluation. */
#ifndef DEMO_TRAIN_STEP_H
#define DEMO_TRAIN_STEP_H
#include "resume.h"
#include "signals.h"
#include "trainer/data/window.h"
#include "trainer/base/escape.h"

/* ---- one step ---- */

static double demo_learning_rate(const demo_job *job, int64_t step) {
    return job->config.learning_rate * seqpar_lr_factor(job->lr_kind, step, job->warmup,
                                                        job->total_steps,
                                                        job->config.min_lr_ratio);
}

/* Rank 0 passes a report to the progress line and to all logs. If a log fails, training
   stops. */
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

/* Rank 0 reports the metrics of an optimizer step. */
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
    /* last, because the number of rows depends on the number of ranks, and so does the speed */
    demo_report_add(&report, "rows", (double)batch->rows, DEMO_WHOLE);
    demo_log(r, &report);
}

/* Prints a notice, once, if some ranks are idle in the first micro-batch, or wait for the
   busiest rank. */
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
        snprintf(fix, sizeof fix, "give --cell %lld to balance them", (long long)b.better_cell);
    if (b.idle)
        snprintf(idle, sizeof idle, ", and %lld ha%s none", (long long)b.idle,
                 b.idle == 1 ? "s" : "ve");
    demo_progress_say(&r->progress,
                      "notice: of %lld sequence-parallel ranks the busiest has %lld tokens "
                      "of the first micro-batch, but the mean is %lld%s; %s",
                      (long long)ranks, (long long)b.most, (long long)(b.tokens / ranks), idle,
                      fix);
}

/* Computes all micro-batches of an open window, and makes the optimizer step. */
static seqpar_status demo_step_window(demo_rank *r, demo_window *w, double lr, double *means) {
    const demo_job *job = r->job;
    const seqpar_llama_batch_desc run = demo_batch_desc_of(r, 0);
    const demo_objective *o = job->objective;
    int64_t accumulation = w->batch.micro_batches, first, count;
    double weight;
    seqpar_status status = o->before ? o->before(r, w) : SEQPAR_OK;
    if (!status)
        status = seqpar_step_begin(&r->ctx, &r->optim, w->batch.row, w->batch.rows, job->layout,
                                   accumulation);
    if (!status && demo_experts_balanced(&r->model, job->config.aux_loss_coef))
        status = demo_experts_begin(&r->ctx, &r->experts, &r->model, &r->optim, w->batch.row,
                                    accumulation, &run, job->config.aux_loss_coef);
    for (int64_t i = 0; !status && i < accumulation; i++) {
        status = seqpar_step_rows(&r->ctx, &r->optim, i, &first, &count);
        if (!status) status = o->rows(r, w, first, count, i);
    }
    if (!status) status = o->total(r, w, means, &weight);
    if (!status && r->experts.on) status = demo_experts_end(&r->ctx, &r->experts);
    int64_t elements;
    void *params = seqpar_llama_trainable(&r->model, &elements);
    return status ? status : seqpar_step_end(&r->ctx, &r->optim, params, elements, lr);
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

/* Ends a checkpoint after all ranks have written: rank 0 gives it its final name. status:
   result of writing. */
static seqpar_status demo_checkpoint_named(demo_rank *r, seqpar_status status) {
    const demo_config *c = &r->job->config;
    char shown[1024];
    if (!status && r->saving.shards) status = demo_gather_sums(r->ctx.world, &r->sums);
    /* all groups must have written */
    if (!status && r->own_world) status = seqpar_comm_barrier(r->world);
    if (!r->world->rank)
        status = demo_end_checkpoint(status, c->ckpt_path, &r->saving, r->ctx.error);
    arrfree(r->sums);
    if (status || r->world->rank) return status;
    demo_forget_checkpoints(c->ckpt_path, r->job->run.id, c->max_ckpt_num, r->saving.step);
    demo_progress_say(&r->progress, "step %lld: checkpoint in %s", (long long)r->saving.step,
                      demo_escape(shown, sizeof shown, c->ckpt_path));
    return SEQPAR_OK;
}

/* Ends a background checkpoint, if there is one, once all ranks have written. wait: waits for
   them. */
static seqpar_status demo_checkpoint_written(demo_rank *r, bool wait) {
    int64_t missing = !demo_async_written(&r->async), failed;
    if (!r->async.under_way) return SEQPAR_OK; /* under_way is the same on all ranks */
    seqpar_status status = wait ? SEQPAR_OK : seqpar_comm_max_i64(r->world, &missing, 1);
    if (status || (missing && !wait)) return status;
    status = demo_async_end(&r->async, &r->sums, r->ctx.error);
    failed = status != SEQPAR_OK;
    /* if a rank failed, the run ends, and the checkpoint does not get its name */
    if (!status) status = seqpar_comm_max_i64(r->world, &failed, 1);
    return demo_checkpoint_named(r, status);
}

/* Refuses a token file that was modified after it was mapped. */
static seqpar_status demo_data_kept(demo_rank *r) {
    const demo_dataset *sets[] = {&r->job->train, &r->job->eval};
    for (int i = 0; i < 2; i++)
        if (demo_token_file_changed(sets[i]->file))
            return seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_READ,
                               "%.300s changed while it was being %s; restore the file and "
                               "go on with --%s",
                               i ? r->job->config.eval_dataset : r->job->config.dataset,
                               r->job->objective->generates ? "read" : "trained on",
                               r->job->objective->generates ? "resume" : "load_checkpoint");
    return SEQPAR_OK;
}

/* Has any rank received a signal to stop? All ranks get the same answer. */
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

/* ---- evaluation: the weighted mean over windows ---- */

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

/* Averages over windows incrementally: if all windows have the same value, the mean is exactly
   that value. */
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
#endif
