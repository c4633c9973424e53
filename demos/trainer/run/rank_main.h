/* SPDX-License-Identifier: MIT OR Unlicense */
/* rank_main.h - the main function of a rank: it opens everything, trains, saves and closes. */
#ifndef DEMO_RANK_MAIN_H
#define DEMO_RANK_MAIN_H
#include "trainer/model/save_trained.h"
#include "trainer/base/escape.h"

static seqpar_status demo_write_model(demo_rank *r) {
    /* the folder may have been removed during training */
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
    /* an evaluation is due now if no steps are left, or if the previous run was killed before
       it */
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

/* Describes the trained model and its folder, for the last line. */
static void demo_say_trained(const demo_rank *r, char *text, size_t size) {
    char shown[1024];
    demo_escape(shown, sizeof shown, r->job->config.save_path);
    if (r->job->adapter.rank)
        snprintf(text, size, "adapters (%lld parameters, %lld frozen) in %s",
                 (long long)demo_values_of(&r->adapters), (long long)demo_values_of(&r->model),
                 shown);
    else
        snprintf(text, size, "model in %s", shown);
}

/* Prints the summary of the run: losses, evaluation, speed, and the folder of the model. */
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
        demo_say_trained(r, where, sizeof where);
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
                       "cannot write the final summary: %s; the model is in %.300s",
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
    /* the previous run may have been killed while it removed old checkpoints */
    if (!status && world->rank == 0 && r.saved != DEMO_NOTHING_SAVED)
        demo_forget_checkpoints(r.job->config.ckpt_path, r.job->run.id,
                                r.job->config.max_ckpt_num, r.saved);
    if (!status) status = demo_rank_logs_close(&r);
    if (!status && world->rank == 0 && !r.job->objective->generates)
        status = demo_say_totals(&r);
    /* report the cause that ended training, even if the checkpoint after it failed, too */
    if (r.trouble.status) {
        if (status)
            demo_progress_say(&r.progress,
                              "notice: a checkpoint could not be written "
                              "either: %s",
                              world->error->text);
        *world->error = (seqpar_error){0};
        status = seqpar_fail(world->error, r.trouble.status, "%s", r.trouble.text);
    }
    if (status && world->rank == 0) demo_progress_end(&r.progress);
    demo_rank_close(&r);
    return status;
}
#endif
