/* SPDX-License-Identifier: MIT OR Unlicense */
/* shards.h - saves a model and its optimizer in one file per rank (--sharded_checkpoint). Each
 * rank writes the elements that it owns, and does not wait for data of other ranks. A tensor in
 * a file is a range of elements of a model's tensor. Its name is prefix, name of the model's
 * tensor, "@" and the index of its first element. Any number of ranks at any ZeRO stage can
 * read the files. */
#ifndef DEMO_SHARDS_H
#define DEMO_SHARDS_H

#include "trainer/run/manifest.h"
#include "trainer/run/options.h"
#include "tensors.h"

enum { DEMO_SHARD_KINDS = 4, DEMO_SHARD_NAME = 200, DEMO_RUN_ID = 17 };
/* Kind 0 is the weights. Kind k > 0 is optimizer state: state[k - 1] of demo_transfer. */
static const char *const demo_shard_weights = "model.";

/* A span: elements [first, first + count) of a tensor, stored in one shard. */
typedef struct {
    int kind; /* 0: weights; from 1 on: optimizer state */
    int64_t tensor, first, count, file;
    char name[DEMO_SHARD_NAME];
} demo_shard_span;

static inline void demo_shard_path(char *path, size_t size, const char *folder, int64_t shard,
                                   int64_t shards) {
    snprintf(path, size, "%s/shard-%05lld-of-%05lld.safetensors", folder, (long long)shard + 1,
             (long long)shards);
}

/* Does the name begin with that of a shard? *behind: the rest of the name. */
static inline bool demo_is_shard(const char *name, const char **behind) {
    long long shard, of;
    int end = 0;
    if (sscanf(name, "shard-%5lld-of-%5lld.safetensors%n", &shard, &of, &end) != 2 || !end)
        return false;
    *behind = name + end;
    return true;
}

/* ---- run and step of a shard ---- */

/* Metadata of every shard: its run and its step. Shards of 0.2.0 have neither. */
enum { DEMO_MARKS = 2 };
typedef struct {
    seqpar_safetensors_pair pair[DEMO_MARKS];
    char step[32];
} demo_shard_mark;

static void demo_shard_marked(demo_shard_mark *mark, const char *run, int64_t step) {
    snprintf(mark->step, sizeof mark->step, "%lld", (long long)step);
    mark->pair[0] = (seqpar_safetensors_pair){"run", run};
    mark->pair[1] = (seqpar_safetensors_pair){"step", mark->step};
}

/* Refuses a shard of another checkpoint, which has the same tensors with other values. run "":
   the run is unknown, and all shards must agree with the first. */
static seqpar_status demo_shard_fits(const seqpar_safetensors_file *file,
                                     const seqpar_safetensors_file *first, const char *path,
                                     const char *run, int64_t step, seqpar_error *error) {
    demo_shard_mark mark;
    demo_shard_marked(&mark, run, step);
    for (int i = 0; i < DEMO_MARKS; i++) {
        const char *key = mark.pair[i].key, *wanted = mark.pair[i].value;
        const char *its = seqpar_safetensors_metadata(file, key);
        const char *one = seqpar_safetensors_metadata(first, key);
        if (!*wanted) wanted = one;
        if (!its != !one || (its && strcmp(its, wanted)))
            return seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                               "%.300s belongs to %s %.40s, but the checkpoint to %s %.40s; "
                               "restore the checkpoint's file, or take another checkpoint",
                               path, key, its ? its : "unknown", key,
                               wanted ? wanted : "unknown");
    }
    return SEQPAR_OK;
}

/* ---- writing ---- */

/* The spans that this rank owns, kind by kind: an stb_ds array. */
static demo_shard_span *demo_owned_spans(const demo_transfer *s, int kinds,
                                         const char *const *prefix) {
    demo_shard_span *spans = NULL;
    for (int kind = 0; kind < kinds; kind++)
        for (int64_t i = 0; i < s->model->tensor_count; i++) {
            demo_shard_span span = {.kind = kind, .tensor = i};
            for (int64_t from = 0; seqpar_blocks_own(s->ctx, &s->optim->blocks, i, from,
                                                     &span.first, &span.count);
                 from = span.first + span.count) {
                snprintf(span.name, sizeof span.name, "%s%s@%lld", prefix[kind],
                         s->model->tensors[i].name, (long long)span.first);
                arrput(spans, span);
            }
        }
    return spans;
}

static seqpar_status demo_owned_values(const demo_transfer *s, const demo_shard_span *span,
                                       int64_t first, int64_t count, double *values) {
    seqpar_optim_part part = {span->kind ? s->state[span->kind - 1] : 0, span->tensor, first,
                              count};
    if (span->kind) return seqpar_optim_read_own(s->ctx, s->optim, values, &part);
    if (s->model->shards)
        return seqpar_shards_read_own(s->ctx, s->model->shards, values, span->tensor, first,
                                      count);
    return seqpar_llama_read(s->ctx, s->model, values, span->tensor, first, count);
}

/* Writes a span a block at a time. Values that are not finite are refused. */
static seqpar_status demo_write_span(const demo_transfer *s, seqpar_safetensors_writer *writer,
                                     const demo_shard_span *span, double *values) {
    seqpar_safetensors_dtype dtype = demo_dtype(span->kind ? s->ctx->device->accumulator
                                                           : s->ctx->device->storage);
    seqpar_status status = SEQPAR_OK;
    for (int64_t done = 0, n; !status && done < span->count; done += n) {
        n = span->count - done < DEMO_VALUES ? span->count - done : (int64_t)DEMO_VALUES;
        status = demo_owned_values(s, span, span->first + done, n, values);
        if (!status) status = demo_finite(s->ctx, span->name, values, n);
        if (status) break;
        demo_narrow((char *)(values + DEMO_VALUES), values, n, dtype);
        status = seqpar_safetensors_append(writer, span->name, values + DEMO_VALUES,
                                           n * seqpar_safetensors_dtype_bytes(dtype),
                                           s->ctx->error);
    }
    return status;
}

/* The spans as a file's list of tensors; the caller calls free(). */
static seqpar_safetensors_tensor *demo_shard_list(const demo_shard_span *spans,
                                                  seqpar_safetensors_dtype weights,
                                                  seqpar_safetensors_dtype state) {
    seqpar_safetensors_tensor *list = (seqpar_safetensors_tensor *)demo_alloc(arrlen(spans) + 1,
                                                                              sizeof *list);
    for (int64_t i = 0; i < arrlen(spans); i++)
        list[i] = (seqpar_safetensors_tensor){.name = spans[i].name,
                                              .dtype = spans[i].kind ? state : weights,
                                              .dims = 1,
                                              .shape = {spans[i].count}};
    return list;
}

/* Size and CRC-32 of a shard that has been written. */
static seqpar_status demo_shard_sum(demo_sum *sum, const char *path, seqpar_error *error) {
    uint32_t crc;
    snprintf(sum->path, sizeof sum->path, "%s", path);
    if (!demo_file_sum(path, &sum->bytes, &crc))
        return seqpar_fail(error, SEQPAR_ERR_FILE_READ,
                           "cannot read what was written to %.300s: %s", path, strerror(errno));
    sum->crc = crc;
    return SEQPAR_OK;
}

/* Gathers size and CRC-32 of the shards of all ranks. Every rank wrote one shard into each of
   the same folders. */
static seqpar_status demo_gather_sums(seqpar_comm *world, demo_sum **sums) {
    int64_t count = arrlen(*sums),
            *numbers = (int64_t *)demo_alloc(2 * count * world->size + 1, 8);
    demo_sum *all = NULL;
    for (int64_t i = 0; i < count; i++) {
        int64_t *own = numbers + 2 * (i * world->size + world->rank);
        own[0] = (*sums)[i].bytes, own[1] = (*sums)[i].crc;
    }
    seqpar_status status = seqpar_comm_sum_i64(world, numbers, 2 * count * world->size);
    for (int64_t i = 0; i < count * world->size; i++) {
        demo_sum sum = {.bytes = numbers[2 * i], .crc = numbers[2 * i + 1]};
        const char *path = (*sums)[i / world->size].path;
        char folder[1280];
        snprintf(folder, sizeof folder, "%.*s", (int)(strrchr(path, '/') - path), path);
        demo_shard_path(sum.path, sizeof sum.path, folder, i % world->size, world->size);
        arrput(all, sum);
    }
    arrfree(*sums);
    *sums = all;
    free(numbers);
    return status;
}

/* Writes this rank's shard. prefix (kinds): prefixes of tensor names, that of weights first. */
static seqpar_status demo_write_shard(const demo_transfer *s, const char *folder, int kinds,
                                      const char *const *prefix, demo_sum *sum) {
    char path[1400];
    demo_shard_span *spans = demo_owned_spans(s, kinds, prefix);
    seqpar_safetensors_tensor *list = demo_shard_list(
        spans, demo_dtype(s->ctx->device->storage), demo_dtype(s->ctx->device->accumulator));
    double *values = (double *)demo_alloc(2 * DEMO_VALUES, sizeof *values);
    demo_shard_mark mark;
    seqpar_safetensors_desc desc = {.path = path,
                                    .tensors = list,
                                    .count = arrlen(spans),
                                    .metadata = mark.pair,
                                    .metadata_count = DEMO_MARKS};
    seqpar_safetensors_writer *writer = NULL;
    demo_shard_marked(&mark, s->run, s->step);
    demo_shard_path(path, sizeof path, folder, s->ctx->world->rank, s->ctx->world->size);
    seqpar_status status = seqpar_safetensors_create(&writer, &desc, s->ctx->error);
    for (int64_t i = 0; !status && i < arrlen(spans); i++)
        status = demo_write_span(s, writer, &spans[i], values);
    if (status)
        seqpar_safetensors_abort(writer);
    else
        status = seqpar_safetensors_finish(writer, s->ctx->error);
    arrfree(spans);
    free(list);
    free(values);
    return status ? status : demo_shard_sum(sum, path, s->ctx->error);
}

/* ---- reading ---- */

typedef struct {
    seqpar_safetensors_file **files; /* stb_ds arrays */
    demo_shard_span *spans;
} demo_shards_in;

static inline int demo_by_place(const void *x, const void *y) {
    const demo_shard_span *a = (const demo_shard_span *)x, *b = (const demo_shard_span *)y;
    if (a->kind != b->kind) return a->kind < b->kind ? -1 : 1;
    if (a->tensor != b->tensor) return a->tensor < b->tensor ? -1 : 1;
    return (a->first > b->first) - (a->first < b->first);
}

/* Parses the name of a file's tensor into its span; false: the model and its optimizer have no
   such tensor. */
static bool demo_parse_span(const demo_transfer *s, const seqpar_safetensors_tensor *t,
                            int kinds, const char *const *prefix, demo_shard_span *span) {
    const char *at = strrchr(t->name, '@');
    *span = (demo_shard_span){.count = t->shape[0]};
    if (!at || t->dims != 1 || !demo_read_int(at + 1, &span->first) || span->first < 0)
        return false;
    snprintf(span->name, sizeof span->name, "%s", t->name);
    for (; span->kind < kinds; span->kind++) {
        size_t length = strlen(prefix[span->kind]);
        if (strncmp(t->name, prefix[span->kind], length)) continue;
        for (span->tensor = 0; span->tensor < s->model->tensor_count; span->tensor++) {
            const char *name = s->model->tensors[span->tensor].name;
            if (strlen(name) == (size_t)(at - t->name) - length &&
                !strncmp(name, t->name + length, strlen(name)))
                return true;
        }
    }
    return false;
}

/* Opens all shards and sorts their spans by kind, tensor and first element. */
static seqpar_status demo_shards_open(const demo_transfer *s, demo_shards_in *in,
                                      const char *folder, int64_t shards, int kinds,
                                      const char *const *prefix) {
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; !status && i < shards; i++) {
        char path[1400];
        seqpar_safetensors_file *file = NULL;
        demo_shard_path(path, sizeof path, folder, i, shards);
        status = seqpar_safetensors_open(&file, path, s->ctx->error);
        if (status) break;
        arrput(in->files, file);
        status = demo_shard_fits(file, in->files[0], path, s->run, s->step, s->ctx->error);
        for (int64_t k = 0; !status && k < seqpar_safetensors_count(file); k++) {
            demo_shard_span span;
            const seqpar_safetensors_tensor *t = seqpar_safetensors_at(file, k);
            if (!demo_parse_span(s, t, kinds, prefix, &span))
                status = seqpar_fail(s->ctx->error, SEQPAR_ERR_FILE_TENSOR,
                                     "%.300s: neither this model nor its optimizer has "
                                     "%.100s; go on with the same model and options",
                                     path, t->name);
            span.file = i;
            arrput(in->spans, span);
        }
    }
    if (!status) qsort(in->spans, (size_t)arrlen(in->spans), sizeof *in->spans, demo_by_place);
    return status;
}

static void demo_shards_close(demo_shards_in *in) {
    for (int64_t i = 0; i < arrlen(in->files); i++) seqpar_safetensors_close(in->files[i]);
    arrfree(in->files);
    arrfree(in->spans);
}

/* Checks that the spans hold every element of every tensor exactly once. */
static seqpar_status demo_shards_check(const demo_transfer *s, const demo_shards_in *in,
                                       const char *folder, int kinds,
                                       const char *const *prefix) {
    int64_t at = 0;
    for (int kind = 0; kind < kinds; kind++)
        for (int64_t i = 0; i < s->model->tensor_count; i++) {
            const seqpar_tensor *t = &s->model->tensors[i];
            int64_t end = 0;
            for (; at < arrlen(in->spans) && in->spans[at].kind == kind &&
                   in->spans[at].tensor == i && in->spans[at].first == end;
                 at++)
                end += in->spans[at].count;
            if (end != t->rows * t->cols)
                return seqpar_fail(
                    s->ctx->error, SEQPAR_ERR_FILE_TENSOR,
                    "the shards in %.300s have %s%.100s only up to its element %lld of %lld; "
                    "they are of another model, or one of them is missing; take another "
                    "checkpoint",
                    folder, prefix[kind], t->name, (long long)end,
                    (long long)(t->rows * t->cols));
        }
    return SEQPAR_OK;
}

/* Does this rank store any of these elements? */
static bool demo_stores_span(const demo_transfer *s, const demo_shard_span *span, int64_t first,
                             int64_t count) {
    int64_t own, n;
    if (!span->kind)
        return demo_is_mine(s->ctx, s->model, span->tensor + first / DEMO_VALUES) &&
               seqpar_llama_owns(s->ctx, s->model, span->tensor, first, count);
    return s->optim->desc.zero_stage == 0 ||
           (seqpar_blocks_own(s->ctx, &s->optim->blocks, span->tensor, first, &own, &n) &&
            own < first + count);
}

/* Reads the blocks of a span of which this rank stores a part. */
static seqpar_status demo_read_span(const demo_transfer *s, seqpar_safetensors_file *file,
                                    const demo_shard_span *span, double *values) {
    seqpar_status status = SEQPAR_OK;
    for (int64_t done = 0, n; !status && done < span->count; done += n) {
        seqpar_optim_part part = {span->kind ? s->state[span->kind - 1] : 0, span->tensor,
                                  span->first + done, 0};
        seqpar_safetensors_part from = {.name = span->name, .first = done, .finite = 1};
        n = span->count - done < DEMO_VALUES ? span->count - done : (int64_t)DEMO_VALUES;
        part.count = from.count = n;
        if (!demo_stores_span(s, span, part.first, n)) continue;
        status = seqpar_safetensors_read_f64(file, values, &from, s->ctx->error);
        if (status) break;
        status = span->kind ? demo_optimizer_take(s, &part, values)
                            : seqpar_llama_write(s->ctx, (seqpar_llama *)s->model, values,
                                                 part.tensor, part.first, n);
    }
    return status;
}

/* Every rank reads the elements that it stores. */
static seqpar_status demo_load_shards(const demo_transfer *s, const char *folder,
                                      int64_t shards, int kinds, const char *const *prefix) {
    demo_shards_in in = {0};
    double *values = (double *)demo_alloc(DEMO_VALUES, sizeof *values);
    seqpar_status status = demo_shards_open(s, &in, folder, shards, kinds, prefix);
    if (!status) status = demo_shards_check(s, &in, folder, kinds, prefix);
    for (int64_t i = 0; !status && i < arrlen(in.spans); i++)
        status = demo_read_span(s, in.files[in.spans[i].file], &in.spans[i], values);
    if (!status) status = demo_model_written(s->ctx, s->model);
    demo_shards_close(&in);
    free(values);
    return status;
}
#endif
