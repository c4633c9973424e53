/* SPDX-License-Identifier: MIT OR Unlicense */
/* shared.h - where a model's weights are. Ranks of one process have them once: all read them, at
 * zero_stage 1 and 2 their owners update them (seqpar_optim_desc.params_shared), and each rank
 * loads a part. At zero_stage 3, and where a frozen model is offloaded, each rank has what it owns
 * alone. Else every rank has them all.
 *
 * Shared ones belong to the run, not to a rank: a rank that fails closes while others still read. */
#ifndef DEMO_SHARED_H
#define DEMO_SHARED_H

#include <pthread.h>
#include <stdbool.h>
#include "memory.h"
#include "seqpar_llama.h"

typedef struct {
    bool sharded;   /* at their owners alone, and */
    bool offloaded; /* outside of the device's memory */
    bool four_bits; /* seqpar_llama_config.four_bits of every model, which is whole then */
    seqpar_device *device; /* whose memory it is; NULL: every rank has its own weights */
    void **arrays;         /* stb_ds array; the first rank of a group adds to it */
    int64_t bytes;         /* of all */
    pthread_mutex_t lock;  /* of these two */
} demo_shared;

/* Room for a model's weights, zero: shared's, or the rank's. offload: of a frozen one. Collective
   over the world. */
static seqpar_status demo_model_open(seqpar_ctx *ctx, seqpar_llama *model,
                                     const seqpar_llama_config *config, demo_shared *shared,
                                     bool offload) {
    seqpar_llama_config kept = *config;
    kept.four_bits = shared->four_bits;
    if (shared->four_bits && offload)
        return seqpar_fail(ctx->error, SEQPAR_ERR_OPTION,
                           "a model that is kept outside of the device's memory is not in four "
                           "bits; leave out --load_in_4bit or the offload");
    if (shared->sharded || offload)
        return seqpar_llama_open_sharded(ctx, model, &kept, 0, shared->offloaded || offload);
    if (!shared->device) return seqpar_llama_open(ctx, model, &kept);
    seqpar_status status = seqpar_llama_open_table(ctx, model, &kept);
    /* codes behind the others */
    int64_t others = model->elements * seqpar_dtype_bytes(ctx->device->storage);
    int64_t bytes = others + model->code_bytes;
    void *params = NULL;
    if (!status && ctx->world->rank == 0) {
        params = shared->device->alloc(shared->device, bytes);
        if (!params)
            return seqpar_fail(ctx->error, SEQPAR_ERR_MEMORY,
                               "out of memory: %lld bytes of weights", (long long)bytes);
        shared->device->zero(shared->device, params, bytes, NULL);
        pthread_mutex_lock(&shared->lock);
        shared->bytes += bytes;
        arrput(shared->arrays, params);
        pthread_mutex_unlock(&shared->lock);
    }
    if (!status) status = seqpar_comm_broadcast(ctx->world, &params, sizeof params, 0);
    model->params.data = params;
    if (model->code_bytes) model->codes.data = (char *)params + others;
    return status;
}

/* Every rank has them where others do not see it. */
static bool demo_is_shared(const seqpar_llama *model) {
    return !model->params.bytes && !model->shards;
}

/* Whether a tensor is in four bits. */
static bool demo_is_coded(const seqpar_llama *model, int64_t tensor) {
    return model->codes_at && model->codes_at[tensor] >= 0;
}

/* Of what ranks write to a model: whether this one writes block `index`. */
static bool demo_is_mine(const seqpar_ctx *ctx, const seqpar_llama *model, int64_t index) {
    return !demo_is_shared(model) || index % ctx->world->size == ctx->world->rank;
}

/* Behind that: nobody reads before all have written. */
static seqpar_status demo_model_written(seqpar_ctx *ctx, const seqpar_llama *model) {
    return demo_is_shared(model) ? seqpar_comm_barrier(ctx->world) : SEQPAR_OK;
}

/* Once all ranks are gone. */
static void demo_shared_close(demo_shared *shared) {
    for (int64_t i = 0; i < arrlen(shared->arrays); i++)
        shared->device->free(shared->device, shared->arrays[i]);
    arrfree(shared->arrays);
    if (shared->device) seqpar_device_close(shared->device);
    *shared = (demo_shared){0};
}
#endif
