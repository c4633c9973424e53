/* SPDX-License-Identifier: MIT OR Unlicense */
/* save_trained.h - writes the trained model, its moving average and its merged form at the end
 * of a run. */
#ifndef DEMO_SAVE_TRAINED_H
#define DEMO_SAVE_TRAINED_H
#include "trainer/log/plot.h"
#include "trainer/run/rank.h"

/* Writes a model in the form of the folder that it was loaded from. If there is none,
   config.json gets the ids of BOS, EOS and PAD of the token file. */
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

/* Writes the moving average into the subfolder "ema". Collective. */
static seqpar_status demo_average_save(demo_rank *r) {
    char folder[1280];
    if (!r->average.share) return SEQPAR_OK;
    snprintf(folder, sizeof folder, "%s/ema", r->job->config.save_path);
    seqpar_status status = r->ctx.world->rank == 0 ? demo_make_folder(folder, r->ctx.error)
                                                   : SEQPAR_OK;
    return status ? status : demo_save_model(r, demo_learner(r), folder, &r->average);
}

/* Rank 0 writes the merged model into the subfolder "merged" of its adapters' folder. */
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

/* Merges the adapters into the weights and writes the model. This changes the weights, so it
   must be the last use of the model. Collective over its ranks. */
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

/* Plots the training loss of all steps into training_loss.svg. */
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

/* Rank 0 writes the final model. If that fails, a checkpoint is written instead and *stop is
   set. */
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
#endif
