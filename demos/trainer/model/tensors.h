/* SPDX-License-Identifier: MIT OR Unlicense */
/* tensors.h - writes a model's tensors to files and reads them, a block of a tensor at a time,
 * so that no rank holds a second copy of the model. */
#ifndef DEMO_TENSORS_H
#define DEMO_TENSORS_H

#include <math.h>
#include "average.h"
#include "model_folder.h"
#include "shared.h"

static seqpar_safetensors_dtype demo_dtype(int dtype) {
    return dtype == SEQPAR_DTYPE_F64   ? SEQPAR_SAFETENSORS_F64
           : dtype == SEQPAR_DTYPE_F32 ? SEQPAR_SAFETENSORS_F32
                                       : SEQPAR_SAFETENSORS_BF16;
}

static seqpar_safetensors_tensor demo_tensor(const seqpar_tensor *t, const char *name,
                                             int64_t rows, seqpar_safetensors_dtype dtype) {
    /* norm weights and biases are vectors */
    seqpar_safetensors_tensor s = {.name = name, .dtype = dtype, .dims = t->decay ? 2 : 1};
    s.shape[0] = t->decay ? rows : t->cols;
    s.shape[1] = t->cols;
    return s;
}

/* Refuses values that are not finite: a diverged model must not replace a good one. */
static seqpar_status demo_finite(seqpar_ctx *ctx, const char *name, const double *values,
                                 int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(values[i]))
            return seqpar_fail(ctx->error, SEQPAR_ERR_NOT_FINITE,
                               "%s holds %g: training has diverged and nothing is saved; go on "
                               "from the last checkpoint with a lower learning rate",
                               name, values[i]);
    return SEQPAR_OK;
}

/* The largest number of values in a block. */
#ifndef DEMO_VALUES
#define DEMO_VALUES (1 << 17)
#endif
typedef struct {
    seqpar_ctx *ctx;
    const seqpar_llama *model;
    seqpar_optim *optim;
    demo_average *average;
    const int *state;
    int names;       /* DEMO_NAMES_.. of what is written */
    int which;       /* of a trainer's models: DEMO_SAVES_MODEL, DEMO_SAVES_CRITIC */
    const char *run; /* of a checkpoint */
    int64_t step;
} demo_transfer;

/* Fills values (part->count) for a file; part->state is the index of the tensor's prefix. */
typedef seqpar_status (*demo_values_fn)(const demo_transfer *store, double *values,
                                        const seqpar_optim_part *part);

/* If weights are sharded, rank 0 broadcasts which block it needs, and the others take part in
   gathering it. At the end rank 0 broadcasts that it is done, also if it failed. */
enum { DEMO_SAVES_MODEL, DEMO_SAVES_CRITIC, DEMO_SAVED_MODELS };
typedef struct {
    int64_t which, done;
    seqpar_optim_part part;
} demo_block_wanted;

/* The other ranks run this while rank 0 writes: they take part in gathering each block that
   rank 0 needs. first: a model of which this rank has a share. */
static seqpar_status demo_hand_over(seqpar_ctx *ctx,
                                    const seqpar_llama *const models[DEMO_SAVED_MODELS],
                                    const seqpar_llama *first) {
    double *values = NULL;
    seqpar_status status = SEQPAR_OK;
    demo_block_wanted w = {0};
    if (!first->shards) return SEQPAR_OK;
    values = (double *)demo_alloc(DEMO_VALUES, sizeof *values);
    while (!status && !w.done) {
        status = seqpar_comm_broadcast(ctx->world, &w, sizeof w, 0);
        if (!status && !w.done)
            status = seqpar_llama_read(ctx, models[w.which], values, w.part.tensor,
                                       w.part.first, w.part.count);
    }
    free(values);
    return status;
}

/* Rank 0 tells the others that it is done. Returns status or, if that is OK, the broadcast's.
   */
static seqpar_status demo_handed_over(seqpar_ctx *ctx, const seqpar_llama *model,
                                      seqpar_status status) {
    demo_block_wanted w = {.done = 1};
    seqpar_status told = model->shards ? seqpar_comm_broadcast(ctx->world, &w, sizeof w, 0)
                                       : SEQPAR_OK;
    return status ? status : told;
}

static seqpar_status demo_weights_get(const demo_transfer *s, double *values,
                                      const seqpar_optim_part *part) {
    demo_block_wanted w = {.which = s->which, .part = *part};
    seqpar_status status = s->model->shards
                               ? seqpar_comm_broadcast(s->ctx->world, &w, sizeof w, 0)
                               : SEQPAR_OK;
    return status ? status
                  : seqpar_llama_read(s->ctx, s->model, values, part->tensor, part->first,
                                      part->count);
}

static seqpar_status demo_average_get(const demo_transfer *s, double *values,
                                      const seqpar_optim_part *part) {
    return demo_average_read(s->ctx, s->model, s->average, values,
                             s->model->tensors[part->tensor].offset + part->first, part->count);
}

static seqpar_status demo_optimizer_get(const demo_transfer *s, double *values,
                                        const seqpar_optim_part *part) {
    seqpar_optim_part kept = *part;
    kept.state = s->state[part->state];
    return seqpar_optim_read(s->ctx, s->optim, values, &kept);
}

/* A sink loads a block of the file, `from`, into the model or its state; values (part->count)
   is scratch memory. */
typedef seqpar_status (*demo_sink_fn)(const demo_transfer *s, const seqpar_optim_part *part,
                                      seqpar_safetensors_file *file,
                                      const seqpar_safetensors_part *from, double *values);

/* Loads a block of weights. fp32 and fp64 weights in host memory are read in place, without
   scratch memory. */
static seqpar_status demo_weights_put(const demo_transfer *s, const seqpar_optim_part *part,
                                      seqpar_safetensors_file *file,
                                      const seqpar_safetensors_part *from, double *values) {
    const seqpar_device *d = s->ctx->device;
    int64_t element = s->model->tensors[part->tensor].offset + part->first;
    /* one rank writes all of a 4-bit tensor */
    bool coded = demo_is_coded(s->model, part->tensor);
    bool here = !s->ctx->queue && !s->model->shards && !coded;
    void *to = here ? (char *)s->model->params.data + element * seqpar_dtype_bytes(d->storage)
                    : NULL;
    if (!demo_is_mine(s->ctx, s->model,
                      part->tensor + (coded ? 0 : part->first / DEMO_VALUES)) ||
        !seqpar_llama_owns(s->ctx, s->model, part->tensor, part->first, part->count))
        return SEQPAR_OK;
    if (here && d->storage == SEQPAR_DTYPE_F32)
        return seqpar_safetensors_read_f32(file, (float *)to, from, s->ctx->error);
    if (here && d->storage == SEQPAR_DTYPE_F64)
        return seqpar_safetensors_read_f64(file, (double *)to, from, s->ctx->error);
    seqpar_status status = seqpar_safetensors_read_f64(file, values, from, s->ctx->error);
    return status ? status
                  : seqpar_llama_write(s->ctx, (seqpar_llama *)s->model, values, part->tensor,
                                       part->first, part->count);
}

static seqpar_status demo_average_put(const demo_transfer *s, const seqpar_optim_part *part,
                                      seqpar_safetensors_file *file,
                                      const seqpar_safetensors_part *from, double *values) {
    seqpar_status status = seqpar_safetensors_read_f64(file, values, from, s->ctx->error);
    if (!status)
        demo_average_write(s->average, values,
                           s->model->tensors[part->tensor].offset + part->first, part->count);
    return status;
}

static seqpar_status demo_optimizer_take(const demo_transfer *s, const seqpar_optim_part *part,
                                         const double *values) {
    for (int64_t i = 0; part->state == SEQPAR_STATE_V && i < part->count; i++)
        if (values[i] < 0)
            return seqpar_fail(s->ctx->error, SEQPAR_ERR_FILE_FORMAT,
                               "element %lld of exp_avg_sq.%s is %g, but a second moment is "
                               "never negative; the checkpoint is damaged, take another",
                               (long long)(part->first + i),
                               s->model->tensors[part->tensor].name, values[i]);
    return seqpar_optim_write(s->ctx, s->optim, values, part);
}

static seqpar_status demo_optimizer_put(const demo_transfer *s, const seqpar_optim_part *part,
                                        seqpar_safetensors_file *file,
                                        const seqpar_safetensors_part *from, double *values) {
    seqpar_optim_part kept = *part;
    kept.state = s->state[part->state];
    seqpar_status status = seqpar_safetensors_read_f64(file, values, from, s->ctx->error);
    return status ? status : demo_optimizer_take(s, &kept, values);
}

/* The block of a tensor that begins at element `first`. */
static seqpar_optim_part demo_block(const seqpar_tensor *t, int state, int64_t tensor,
                                    int64_t first) {
    int64_t left = t->rows * t->cols - first;
    return (seqpar_optim_part){state, tensor, first, left < DEMO_VALUES ? left : DEMO_VALUES};
}

/* ---- writing ---- */

/* A tensor of the model that goes into a file, perhaps as a part of a larger tensor, whose
   parts are adjacent entries. */
typedef struct {
    char name[160];
    int64_t tensor, rows; /* rows: of the tensor in the file */
    int state;
    bool begins; /* it is the first or only part of a tensor in the file */
    seqpar_safetensors_dtype dtype;
} demo_entry;

static int64_t demo_entry_bytes(const demo_transfer *s, const demo_entry *e) {
    return e->rows * s->model->tensors[e->tensor].cols *
           seqpar_safetensors_dtype_bytes(e->dtype);
}

/* Entries (parts, tensors): all tensors of the model, once with each prefix. The caller frees
   them. */
static demo_entry *demo_entries(const demo_transfer *s, int parts, const char *const *prefix,
                                seqpar_safetensors_dtype dtype) {
    int64_t tensors = s->model->tensor_count;
    demo_entry *entries = (demo_entry *)demo_alloc(parts * tensors, sizeof *entries);
    for (int64_t i = 0; i < parts * tensors; i++) {
        demo_tensor_location place = demo_tensor_location_of(s->model, i % tensors, s->names);
        entries[i] = (demo_entry){.tensor = i % tensors,
                                  .rows = place.rows,
                                  .state = (int)(i / tensors),
                                  .begins = !place.first,
                                  .dtype = dtype};
        snprintf(entries[i].name, sizeof entries[i].name, "%s%s", prefix[i / tensors],
                 place.name);
    }
    return entries;
}

/* Refuses values that are too large for float16, where they would become infinite. */
static seqpar_status demo_fits(seqpar_ctx *ctx, const demo_entry *e, const double *values,
                               int64_t count) {
    for (int64_t i = 0; e->dtype == SEQPAR_SAFETENSORS_F16 && i < count; i++)
        if (fabs(values[i]) >= 65520)
            return seqpar_fail(ctx->error, SEQPAR_ERR_NOT_FINITE,
                               "%s holds %g, which float16 cannot hold; give --save_dtype "
                               "bfloat16 or float32",
                               e->name, values[i]);
    return SEQPAR_OK;
}

/* Converts values to the dtype of the file: bytes (count). */
static void demo_narrow(char *bytes, const double *values, int64_t count,
                        seqpar_safetensors_dtype dtype) {
    float *floats = (float *)bytes;
    uint16_t *halves = (uint16_t *)bytes;
    if (dtype == SEQPAR_SAFETENSORS_F64) memcpy(bytes, values, (size_t)count * sizeof *values);
    for (int64_t i = 0; dtype == SEQPAR_SAFETENSORS_F32 && i < count; i++)
        floats[i] = (float)values[i];
    for (int64_t i = 0; dtype == SEQPAR_SAFETENSORS_BF16 && i < count; i++)
        halves[i] = seqpar_bf16_from_float((float)values[i]);
    for (int64_t i = 0; dtype == SEQPAR_SAFETENSORS_F16 && i < count; i++)
        halves[i] = seqpar_safetensors_f32_to_f16((float)values[i]);
}

/* Writes one tensor. writer NULL: another rank writes, and this one only takes part in `get`.
   values (2, DEMO_VALUES) is scratch. */
static seqpar_status demo_append(const demo_transfer *s, seqpar_safetensors_writer *writer,
                                 const demo_entry *e, demo_values_fn get, double *values) {
    const seqpar_tensor *t = &s->model->tensors[e->tensor];
    seqpar_status status = SEQPAR_OK;
    for (int64_t first = 0; !status && first < t->rows * t->cols; first += DEMO_VALUES) {
        seqpar_optim_part part = demo_block(t, e->state, e->tensor, first);
        status = get(s, values, &part);
        if (!status && writer) status = demo_finite(s->ctx, e->name, values, part.count);
        if (!status && writer) status = demo_fits(s->ctx, e, values, part.count);
        if (status || !writer) continue;
        demo_narrow((char *)(values + DEMO_VALUES), values, part.count, e->dtype);
        status = seqpar_safetensors_append(
            writer, e->name, values + DEMO_VALUES,
            part.count * seqpar_safetensors_dtype_bytes(e->dtype), s->ctx->error);
    }
    return status;
}

/* Rank 0 writes a file of `count` entries, the first of which begins a tensor. Collective if
   `get` is. */
static seqpar_status demo_write_entries(const demo_transfer *s, const char *path,
                                        const demo_entry *entries, int64_t count,
                                        demo_values_fn get,
                                        const seqpar_safetensors_pair *metadata,
                                        int64_t metadata_count) {
    seqpar_safetensors_tensor *list = (seqpar_safetensors_tensor *)demo_alloc(count,
                                                                              sizeof *list);
    double *values = (double *)demo_alloc(2 * DEMO_VALUES, sizeof *values);
    seqpar_safetensors_desc desc = {
        .path = path, .tensors = list, .metadata = metadata, .metadata_count = metadata_count};
    seqpar_safetensors_writer *writer = NULL;
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; i < count; i++)
        if (entries[i].begins)
            list[desc.count++] = demo_tensor(&s->model->tensors[entries[i].tensor],
                                             entries[i].name, entries[i].rows,
                                             entries[i].dtype);
    if (s->ctx->world->rank == 0)
        status = seqpar_safetensors_create(&writer, &desc, s->ctx->error);
    for (int64_t i = 0; !status && i < count; i++)
        status = demo_append(s, writer, &entries[i], get, values);
    if (status || !writer)
        seqpar_safetensors_abort(writer);
    else
        status = seqpar_safetensors_finish(writer, s->ctx->error);
    free(list);
    free(values);
    return status;
}

/* Writes all tensors of the model, once with each prefix, into one file. */
static seqpar_status demo_save_tensors(const demo_transfer *s, const char *path, int parts,
                                       const char *const *prefix, demo_values_fn get, int dtype,
                                       const seqpar_safetensors_pair *metadata,
                                       int64_t metadata_count) {
    demo_entry *entries = demo_entries(s, parts, prefix, demo_dtype(dtype));
    seqpar_status status = demo_write_entries(s, path, entries, parts * s->model->tensor_count,
                                              get, metadata, metadata_count);
    free(entries);
    return status;
}

/* ---- reading ---- */

/* Reads one tensor and passes its blocks to `put`. put NULL: only checks name and shape. */
static seqpar_status demo_load_tensor(const demo_transfer *s, const demo_weights *from,
                                      const char *prefix, int names, int state, int64_t tensor,
                                      demo_sink_fn put, double *values) {
    const seqpar_tensor *t = &s->model->tensors[tensor];
    seqpar_safetensors_file *file;
    demo_tensor_location place = demo_tensor_location_of(s->model, tensor, names);
    char name[160];
    snprintf(name, sizeof name, "%s%s", prefix, place.name);
    file = demo_weights_file(from, name);
    seqpar_safetensors_tensor wanted = demo_tensor(t, name, place.rows,
                                                   SEQPAR_SAFETENSORS_NONE);
    /* the file has no score head: keep the new one */
    if (s->model->config.score && tensor == s->model->tensor_count - 1 &&
        !seqpar_safetensors_find(file, name))
        return SEQPAR_OK;
    seqpar_status status = seqpar_safetensors_expect(file, &wanted, s->ctx->error);
    for (int64_t first = 0; !status && put && first < t->rows * t->cols; first += DEMO_VALUES) {
        seqpar_optim_part part = demo_block(t, state, tensor, first);
        seqpar_safetensors_part wanted_part = {.name = name,
                                               .first = place.first * t->cols + first,
                                               .count = part.count,
                                               .finite = 1};
        status = put(s, &part, file, &wanted_part, values);
    }
    return status;
}

/* Checks all names and shapes before it reads the first value. Closes the files. */
static seqpar_status demo_load_tensors(const demo_transfer *s, demo_weights *from, int parts,
                                       const char *const *prefix, demo_sink_fn put) {
    double *values = (double *)malloc(DEMO_VALUES * sizeof *values);
    int names = demo_names_of(from);
    seqpar_status status = values ? SEQPAR_OK
                                  : seqpar_fail(s->ctx->error, SEQPAR_ERR_MEMORY,
                                                "out of memory while %s is read",
                                                from->shards[0].path);
    for (int reads = 0; reads < (demo_is_planned(s->ctx->device) ? 1 : 2); reads++)
        for (int64_t i = 0; !status && i < parts * s->model->tensor_count; i++)
            status = demo_load_tensor(s, from, prefix[i / s->model->tensor_count], names,
                                      (int)(i / s->model->tensor_count),
                                      i % s->model->tensor_count, reads ? put : NULL, values);
    demo_weights_close(from);
    free(values);
    return status;
}

static seqpar_status demo_load_file(const demo_transfer *s, const char *path, int parts,
                                    const char *const *prefix, demo_sink_fn put) {
    demo_weights from;
    seqpar_status status = demo_weights_open_file(&from, path, s->ctx->error);
    return status ? status : demo_load_tensors(s, &from, parts, prefix, put);
}

static const char *const demo_no_prefix[] = {""};

/* Loads the weights of a folder; refuses NaN and infinity, missing tensors and wrong shapes. A
   score head that the folder lacks stays as it is. */
static seqpar_status demo_load_weights(seqpar_ctx *ctx, seqpar_llama *model,
                                       const char *folder) {
    demo_transfer store = {.ctx = ctx, .model = model};
    demo_weights from;
    if (demo_model_weights(&from, model, folder, ctx->error)) return ctx->error->status;
    seqpar_status status = demo_load_tensors(&store, &from, 1, demo_no_prefix,
                                             demo_weights_put);
    return status ? status : demo_model_written(ctx, model);
}

/* Sets the weights that training begins with: those of the folder. A score head that the folder
   lacks is drawn from the seed; without a folder, all weights are. */
static seqpar_status demo_begin_model(seqpar_ctx *ctx, seqpar_llama *model, const char *folder,
                                      int64_t seed) {
    if (!folder && demo_is_planned(ctx->device)) return SEQPAR_OK;
    int64_t first = folder ? model->tensor_count - (model->config.score != NULL) : 0;
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = first; !status && i < model->tensor_count; i++)
        if (demo_is_mine(ctx, model, i))
            status = seqpar_llama_init_tensor(ctx, model, i, (uint64_t)seed);
    /* if the folder has a head, it replaces the drawn one */
    if (!status) status = demo_model_written(ctx, model);
    return status || !folder ? status : demo_load_weights(ctx, model, folder);
}

/* ---- the digest of a model ---- */

/* Digest of the fields of a config that 0.2.0 had. */
static uint64_t demo_digest_shape(const seqpar_llama_config *c) {
    const int64_t numbers[] = {c->layers,   c->hidden,       c->heads, c->kv_heads,
                               c->head_dim, c->intermediate, c->vocab, c->tied};
    const double reals[] = {c->rope_theta, c->rms_eps};
    const double rope[] = {(double)c->rope.type,  c->rope.factor,   c->rope.first_positions,
                           c->rope.low,           c->rope.high,     c->rope.attention_factor,
                           (double)c->rope.exact, (double)c->window};
    uint64_t digest = demo_digest(demo_digest(DEMO_DIGEST_EMPTY, numbers, sizeof numbers),
                                  reals, sizeof reals);
    return c->rope.type || c->window ? demo_digest(digest, rope, sizeof rope) : digest;
}

#ifndef DEMO_DIGEST_PART
#define DEMO_DIGEST_PART 4096 /* elements in a block */
#endif
/* Digest of config and weights; old: as in checkpoints of 0.2.0. Collective if the weights are
   sharded. */
static seqpar_status demo_digest_model(seqpar_ctx *ctx, const seqpar_llama *model,
                                       uint64_t *result, uint64_t *old) {
    double config[DEMO_MODEL_NUMBERS];
    uint64_t digest = demo_digest_shape(&model->config);
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; !status && i < model->tensor_count; i++) {
        const seqpar_tensor *t = &model->tensors[i];
        double values[DEMO_DIGEST_PART];
        for (int64_t first = 0, count, all = t->rows * t->cols; !status && first < all;
             first += count) {
            count = all - first < DEMO_DIGEST_PART ? all - first : DEMO_DIGEST_PART;
            status = seqpar_llama_read(ctx, model, values, i, first, count);
            digest = demo_digest(digest, values, count * (int64_t)sizeof *values);
        }
    }
    demo_model_numbers(&model->config, config);
    *old = digest;
    *result = demo_digest(digest, config, sizeof config);
    return status;
}
#endif
