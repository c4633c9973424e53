/* SPDX-License-Identifier: MIT OR Unlicense */
/* async_save.h - writes the shards of a checkpoint while training continues (--async_save):
 * each rank copies the values it owns, and a background thread writes the copy. The checkpoint
 * gets its final name when all ranks have written their files. */
#ifndef DEMO_ASYNC_SAVE_H
#define DEMO_ASYNC_SAVE_H

#include <pthread.h>
#include "trainer/model/shards.h"

typedef struct { /* one file: the spans of tensors in it, and their bytes, concatenated */
    char path[1400];
    demo_shard_span *spans; /* stb_ds array */
    seqpar_safetensors_dtype weights, state;
    char *bytes;
    demo_sum sum; /* set when the file is written */
    char run[DEMO_RUN_ID];
    int64_t step;
} demo_shard_copy;

typedef struct {
    demo_shard_copy *files; /* stb_ds array */
    bool under_way;
    pthread_t thread;
    int written;        /* the thread sets it when it is done */
    seqpar_error error; /* error of the thread */
} demo_async;

static int64_t demo_copy_bytes(const demo_shard_copy *copy, const demo_shard_span *span) {
    return span->count *
           seqpar_safetensors_dtype_bytes(span->kind ? copy->state : copy->weights);
}

/* Copies the values that demo_write_shard would write, so that the next step cannot change
   them. */
static seqpar_status demo_copy_shard(const demo_transfer *s, demo_async *async,
                                     const char *folder, int kinds, const char *const *prefix) {
    demo_shard_copy copy = {.spans = demo_owned_spans(s, kinds, prefix),
                            .weights = demo_dtype(s->ctx->device->storage),
                            .state = demo_dtype(s->ctx->device->accumulator)};
    double *values = (double *)demo_alloc(DEMO_VALUES, sizeof *values);
    int64_t bytes = 0;
    seqpar_status status = SEQPAR_OK;
    copy.step = s->step;
    snprintf(copy.run, sizeof copy.run, "%s", s->run);
    demo_shard_path(copy.path, sizeof copy.path, folder, s->ctx->world->rank,
                    s->ctx->world->size);
    for (int64_t i = 0; i < arrlen(copy.spans); i++)
        bytes += demo_copy_bytes(&copy, &copy.spans[i]);
    copy.bytes = (char *)demo_alloc(bytes + 1, 1);
    char *to = copy.bytes;
    for (int64_t i = 0; !status && i < arrlen(copy.spans); i++) {
        const demo_shard_span *span = &copy.spans[i];
        seqpar_safetensors_dtype dtype = span->kind ? copy.state : copy.weights;
        for (int64_t done = 0, n; !status && done < span->count; done += n) {
            n = span->count - done < DEMO_VALUES ? span->count - done : (int64_t)DEMO_VALUES;
            status = demo_owned_values(s, span, span->first + done, n, values);
            if (!status) status = demo_finite(s->ctx, span->name, values, n);
            if (!status) demo_narrow(to, values, n, dtype);
            to += n * seqpar_safetensors_dtype_bytes(dtype);
        }
    }
    arrput(async->files, copy);
    free(values);
    return status;
}

/* Writes one copied file. Runs in the background thread. */
static seqpar_status demo_write_copy(demo_shard_copy *copy, seqpar_error *error) {
    int64_t count = arrlen(copy->spans);
    seqpar_safetensors_tensor *list = demo_shard_list(copy->spans, copy->weights, copy->state);
    demo_shard_mark mark;
    seqpar_safetensors_desc desc = {.path = copy->path,
                                    .tensors = list,
                                    .count = count,
                                    .metadata = mark.pair,
                                    .metadata_count = DEMO_MARKS};
    seqpar_safetensors_writer *writer = NULL;
    const char *from = copy->bytes;
    demo_shard_marked(&mark, copy->run, copy->step);
    seqpar_status status = seqpar_safetensors_create(&writer, &desc, error);
    for (int64_t i = 0; !status && i < count; from += demo_copy_bytes(copy, &copy->spans[i++]))
        status = seqpar_safetensors_append(writer, copy->spans[i].name, from,
                                           demo_copy_bytes(copy, &copy->spans[i]), error);
    if (status)
        seqpar_safetensors_abort(writer);
    else
        status = seqpar_safetensors_finish(writer, error);
    free(list);
    return status ? status : demo_shard_sum(&copy->sum, copy->path, error);
}

static void *demo_async_main(void *user) {
    demo_async *async = (demo_async *)user;
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; !status && i < arrlen(async->files); i++)
        status = demo_write_copy(&async->files[i], &async->error);
    __atomic_store_n(&async->written, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void demo_async_forget(demo_async *async) {
    for (int64_t i = 0; i < arrlen(async->files); i++) {
        arrfree(async->files[i].spans);
        free(async->files[i].bytes);
    }
    arrfree(async->files);
    *async = (demo_async){0};
}

static seqpar_status demo_async_begin(demo_async *async, seqpar_error *error) {
    async->written = 0;
    async->error = (seqpar_error){0};
    int code = pthread_create(&async->thread, NULL, demo_async_main, async);
    async->under_way = !code;
    return code ? seqpar_fail(error, SEQPAR_ERR_MEMORY,
                              "cannot start the thread of --async_save: %s; leave it out",
                              strerror(code))
                : SEQPAR_OK;
}

/* Has the thread ended? True if none was started. */
static bool demo_async_written(demo_async *async) {
    return !async->under_way || __atomic_load_n(&async->written, __ATOMIC_ACQUIRE);
}

/* Waits for the thread and returns its status. Appends the checksums of its files to sums, an
   stb_ds array. */
static seqpar_status demo_async_end(demo_async *async, demo_sum **sums, seqpar_error *error) {
    seqpar_status status = SEQPAR_OK;
    if (async->under_way) pthread_join(async->thread, NULL);
    if (async->error.status)
        status = seqpar_fail(error, async->error.status, "%s", async->error.text);
    for (int64_t i = 0; !status && i < arrlen(async->files); i++)
        arrput(*sums, async->files[i].sum);
    demo_async_forget(async);
    return status;
}
#endif
