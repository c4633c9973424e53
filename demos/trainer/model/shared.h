/* SPDX-License-Identifier: MIT OR Unlicense */
/* shared.h - where the weights of a model are stored. Ranks of one process share one copy: all
 * ranks read it, each loads a part of it, and at zero_stage 1 and 2 the owners update it
 * (seqpar_optim_desc.params_shared). At zero_stage 3, and if a frozen model is offloaded, each
 * rank stores only what it owns. Otherwise each rank has a full copy.
 *
 * A shared copy belongs to the run, not to a rank, since a rank that fails closes its model
 * while others still read the copy. */
#ifndef DEMO_SHARED_H
#define DEMO_SHARED_H

#include <pthread.h>
#include <stdbool.h>
#include "trainer/base/memory.h"
#include "seqpar_llama.h"

typedef struct {
    bool sharded;   /* each rank stores only what it owns */
    bool offloaded; /* if sharded: what a rank owns is outside of the device's memory */
    bool four_bits; /* seqpar_llama_config.four_bits of every model; then none is sharded */
    seqpar_device *device; /* device of the shared weights; NULL: every rank has its own */
    void **arrays;         /* the weights, stb_ds array; the first rank of a group adds to it */
    int64_t bytes;         /* of all arrays */
    pthread_mutex_t lock;  /* protects arrays and bytes */
} demo_shared;

/* Allocates zeroed weights of a model, shared by the ranks or for this rank alone. offload:
   weights of a frozen model are stored outside of the device's memory. Collective over the
   world. */
static seqpar_status demo_model_open(seqpar_ctx *ctx, seqpar_llama *model,
                                     const seqpar_llama_config *config, demo_shared *shared,
                                     bool offload) {
    seqpar_llama_config kept = *config;
    kept.four_bits = shared->four_bits;
    if (shared->four_bits && offload)
        return seqpar_fail(ctx->error, SEQPAR_ERR_OPTION,
                           "--load_in_4bit does not support a model that is offloaded; leave "
                           "out --load_in_4bit or the offload");
    if (shared->sharded || offload)
        return seqpar_llama_open_sharded(ctx, model, &kept, 0, shared->offloaded || offload);
    if (!shared->device) return seqpar_llama_open(ctx, model, &kept);
    seqpar_status status = seqpar_llama_open_table(ctx, model, &kept);
    /* the 4-bit codes follow the other weights */
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

/* Do the ranks share one copy of the weights? */
static bool demo_is_shared(const seqpar_llama *model) {
    return !model->params.bytes && !model->shards;
}

/* Is the tensor stored in four bits? */
static bool demo_is_coded(const seqpar_llama *model, int64_t tensor) {
    return model->codes_at && model->codes_at[tensor] >= 0;
}

/* Does this rank write block `index` of a model's weights? Ranks divide the blocks of a shared
   copy; otherwise each rank writes all. */
static bool demo_is_mine(const seqpar_ctx *ctx, const seqpar_llama *model, int64_t index) {
    return !demo_is_shared(model) || index % ctx->world->size == ctx->world->rank;
}

/* Call it after writing weights: no rank may read a shared copy before all have written. */
static seqpar_status demo_model_written(seqpar_ctx *ctx, const seqpar_llama *model) {
    return demo_is_shared(model) ? seqpar_comm_barrier(ctx->world) : SEQPAR_OK;
}

/* Call it when all ranks have ended. */
static void demo_shared_close(demo_shared *shared) {
    for (int64_t i = 0; i < arrlen(shared->arrays); i++)
        shared->device->free(shared->device, shared->arrays[i]);
    arrfree(shared->arrays);
    if (shared->device) seqpar_device_close(shared->device);
    *shared = (demo_shared){0};
}
#endif
