/* SPDX-License-Identifier: MIT OR Unlicense */
/* rank.h - what a rank opens: device, context, model, optimizer, and the checkpoint that it
 * resumes from. */
#ifndef DEMO_RANK_H
#define DEMO_RANK_H
#include "resume.h"
#include "trainer/model/shared.h"
#include "train_step.h"

#ifdef DEMO_RUN_RANKS /* if defined, replaces seqpar_run_threads, to run ranks as processes */
#define DEMO_RANKS_ARE_THREADS 0
#else
#define DEMO_RUN_RANKS         seqpar_run_threads
#define DEMO_RANKS_ARE_THREADS 1
#endif

/* ---- the run ---- */

/* Opens the device of a rank. NULL if there is no memory or no GPU; in the latter case with a
   message. Processes on one machine use one GPU each, the same as the transport. */
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

/* Do the ranks share one copy of the weights? Threads on a CPU do if each weight is updated
   only by its owner, or if weights are frozen. On a GPU each rank has a copy. With zero_stage 3
   no rank holds all weights, unless they are quantized to 4 bits. */
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

/* Runs the ranks of the job with `run`, a function like seqpar_run_threads. */
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

/* Is this rank in the first group, which trains r->model? */
static bool demo_trains_model(const demo_rank *r) { return r->group == 0; }

/* Saves a checkpoint, unless this step already has one. With --async_save it is written in the
   background, and demo_checkpoint_written gives it its final name later. */
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
    if (!status && r->own_world) /* no group may write before the folder exists */
        status = seqpar_comm_barrier(r->world);
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

/* Loads the checkpoint to resume from. Refuses one that was trained against another frozen
   model. */
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

/* Refuses options or files that differ between ranks. Ranks that are processes can be started
   with different ones; they would deadlock, or train with a mix of both. */
static seqpar_status demo_ranks_agree(const demo_job *job, seqpar_comm *world) {
    int64_t count = arrlen(job->told);
    int64_t *own = (int64_t *)demo_alloc(count * (world->size + 1) + world->size, sizeof *own);
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

/* Bytes of the weights that all ranks share; rank 0 counts them. */
static int64_t demo_shared_bytes(const demo_rank *r) {
    return r->world->rank == 0 ? r->job->shared->bytes : 0;
}

/* The peak of bytes that this rank has allocated. */
static int64_t demo_peak_bytes(const demo_rank *r) {
    return r->ctx.memory.total_peak + demo_shared_bytes(r);
}

static int demo_optim_kind(const char *name) {
    return !strcmp(name, "sgd") ? SEQPAR_OPTIM_SGD : SEQPAR_OPTIM_ADAMW;
}

static int demo_optim_bits(const char *name) { return !strcmp(name, "adamw_8bit") ? 8 : 0; }

/* Finds the group of this rank and opens its communicator. */
static seqpar_status demo_group_open(demo_rank *r, seqpar_comm *world) {
    int64_t past = 0;
    r->world = world;
    if (r->job->groups < 2) return SEQPAR_OK;
    while (world->rank >= (past += r->job->group_ranks[r->group])) r->group++;
    return seqpar_comm_split(world, r->group, world->rank, &r->own_world);
}

/* Opens the trained model (and its adapters, if those are trained) with optimizer and moving
   average. */
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

/* Opens everything that a rank needs for training, and loads the checkpoint to resume from. */
static seqpar_status demo_rank_open(demo_rank *r, seqpar_comm *world) {
    const demo_config *c = &r->job->config;
    /* false: only adapters are trained, and weights are frozen */
    bool whole = !r->job->adapter.rank;
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
    /* must come first: ranks with different options could disagree about the sizes of groups */
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
#endif
