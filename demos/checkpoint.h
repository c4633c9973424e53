/* SPDX-License-Identifier: MIT OR Unlicense */
/* checkpoint.h - models and training states as folders: model.safetensors, config.json, optimizer.safetensors.
 *
 * A checkpoint is written as CKPT/global_stepN.tmp and renamed when it is whole; CKPT/latest names the newest one and is
 * replaced last. So there is always one good checkpoint, whatever happens while the next is written. The files hold whole
 * tensors and whole moments: any D, P and ZeRO stage can read what any other wrote. */
#ifndef DEMO_CHECKPOINT_H
#define DEMO_CHECKPOINT_H

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>
#include "average.h"
#include "model_folder.h"

typedef struct { /* where training stands */
    int64_t step;      /* optimizer steps done */
    int64_t seed, train_batch_size, documents;
    int64_t extra[2];  /* whatever the trainer wants to find again */
    const demo_average *average; /* the weights' moving average; NULL: none */
} demo_state;

static seqpar_safetensors_dtype demo_dtype(int dtype) {
    return dtype == SEQPAR_F64 ? SEQPAR_SAFETENSORS_F64 : dtype == SEQPAR_F32 ? SEQPAR_SAFETENSORS_F32 : SEQPAR_SAFETENSORS_BF16;
}

/* ---- folders ---- */

static seqpar_status demo_make_folder(const char *path, seqpar_error *error) {
    char part[1024];
    snprintf(part, sizeof part, "%s", path);
    for (char *slash = part + 1;; slash++) {
        if (*slash && *slash != '/') continue;
        char kept = *slash;
        *slash = 0;
        if (mkdir(part, 0777) && errno != EEXIST)
            return seqpar_fail(error, SEQPAR_ERR_FILE_OPEN, "cannot make folder %s: %s", part, strerror(errno));
        *slash = kept;
        if (!kept) break;
    }
    struct stat kind;
    if (stat(part, &kind) || !S_ISDIR(kind.st_mode)) return seqpar_fail(error, SEQPAR_ERR_FILE_OPEN, "%s is there but is no folder; give another", part);
    if (access(part, W_OK | X_OK)) return seqpar_fail(error, SEQPAR_ERR_FILE_OPEN, "cannot write into %s: %s", part, strerror(errno));
    return SEQPAR_OK;
}

static void demo_remove_folder(const char *path) {
    DIR *folder = opendir(path);
    char file[1280];
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        if (entry->d_name[0] != '.') unlink(file);
    }
    if (folder) closedir(folder);
    rmdir(path);
}

static char *demo_read_text(const char *path, seqpar_error *error) {
    const char *why;
    size_t size;
    char *text = demo_read_whole(path, 1 << 20, &size, &why);
    if (!text) seqpar_fail(error, SEQPAR_ERR_FILE_OPEN, "cannot read %s: %s", path, why);
    return text;
}

/* ---- tensors ---- */

static seqpar_safetensors_tensor demo_tensor(const seqpar_tensor *t, const char *name, seqpar_safetensors_dtype dtype) {
    seqpar_safetensors_tensor s = {.name = name, .dtype = dtype, .dims = t->decay ? 2 : 1}; /* gains are vectors */
    s.shape[0] = t->decay ? t->rows : t->cols;
    s.shape[1] = t->cols;
    return s;
}

/* What diverged never takes the place of what was good. */
static seqpar_status demo_finite(seqpar_ctx *ctx, const char *name, const double *values, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(values[i])) return seqpar_fail(ctx->error, SEQPAR_ERR_NOT_FINITE, "%s holds %g: training has diverged and nothing is saved; go on from the last checkpoint with a lower learning rate", name, values[i]);
    return SEQPAR_OK;
}

/* Files are written and read a block of a tensor at a time: nobody holds a second copy of the model. A source fills values
   (part->count), a sink takes them; part->state is the number of the file's prefix. */
enum { DEMO_VALUES = 1 << 17 };
typedef struct { seqpar_ctx *ctx; const seqpar_llama *model; seqpar_optim *optim; demo_average *average; const int *state; } demo_transfer;
typedef seqpar_status (*demo_values_fn)(const demo_transfer *store, double *values, const seqpar_optim_part *part);

static seqpar_status demo_weights_get(const demo_transfer *s, double *values, const seqpar_optim_part *part) {
    seqpar_device_read(s->ctx->device, values, s->model->params.data, s->model->tensors[part->tensor].offset + part->first, part->count, s->ctx->device->storage);
    return SEQPAR_OK;
}
static seqpar_status demo_weights_put(const demo_transfer *s, double *values, const seqpar_optim_part *part) {
    seqpar_device_write(s->ctx->device, s->model->params.data, s->model->tensors[part->tensor].offset + part->first, values, part->count, s->ctx->device->storage);
    return SEQPAR_OK;
}
static seqpar_status demo_average_get(const demo_transfer *s, double *values, const seqpar_optim_part *part) {
    return demo_average_read(s->ctx, s->model, s->average, values, s->model->tensors[part->tensor].offset + part->first, part->count);
}
static seqpar_status demo_average_put(const demo_transfer *s, double *values, const seqpar_optim_part *part) {
    demo_average_write(s->average, values, s->model->tensors[part->tensor].offset + part->first, part->count);
    return SEQPAR_OK;
}
static seqpar_status demo_optimizer_get(const demo_transfer *s, double *values, const seqpar_optim_part *part) {
    seqpar_optim_part kept = *part;
    kept.state = s->state[part->state];
    return seqpar_optim_read(s->ctx, s->optim, values, &kept);
}
static seqpar_status demo_optimizer_put(const demo_transfer *s, double *values, const seqpar_optim_part *part) {
    seqpar_optim_part kept = *part;
    kept.state = s->state[part->state];
    return seqpar_optim_write(s->ctx, s->optim, values, &kept);
}

/* The next block of a tensor. */
static seqpar_optim_part demo_block(const seqpar_tensor *t, int state, int64_t tensor, int64_t first) {
    int64_t left = t->rows * t->cols - first;
    return (seqpar_optim_part){state, tensor, first, left < DEMO_VALUES ? left : DEMO_VALUES};
}

/* Doubles that are exact in the stored type, as that; bytes (count). */
static void demo_narrow(char *bytes, const double *values, int64_t count, int dtype) {
    int64_t size = seqpar_dtype_bytes(dtype);
    for (int64_t i = 0; i < count; i++) {
        float x = (float)values[i];
        uint16_t half = seqpar_bf16_from_float(x);
        memcpy(bytes + i * size, dtype == SEQPAR_F64 ? (const void *)&values[i] : dtype == SEQPAR_F32 ? (const void *)&x : &half, (size_t)size);
    }
}

/* One tensor, from its source into the file (writer NULL: another rank's). values (2, DEMO_VALUES) is scratch. */
static seqpar_status demo_append(const demo_transfer *s, seqpar_safetensors_writer *writer, const char *name, int state, int64_t tensor, int dtype, demo_values_fn get, double *values) {
    const seqpar_tensor *t = &s->model->tensors[tensor];
    seqpar_status status = SEQPAR_OK;
    for (int64_t first = 0; !status && first < t->rows * t->cols; first += DEMO_VALUES) {
        seqpar_optim_part part = demo_block(t, state, tensor, first);
        status = get(s, values, &part);
        if (!status && writer) status = demo_finite(s->ctx, name, values, part.count);
        if (status || !writer) continue;
        demo_narrow((char *)(values + DEMO_VALUES), values, part.count, dtype);
        status = seqpar_safetensors_append(writer, name, values + DEMO_VALUES, part.count * seqpar_dtype_bytes(dtype), s->ctx->error);
    }
    return status;
}

/* Rank 0 writes `parts` times the model's tensors, each time with another prefix. Collective where the source is. */
static seqpar_status demo_save_tensors(const demo_transfer *s, const char *path, int parts, const char *const *prefix, demo_values_fn get,
                                       int dtype, const seqpar_safetensors_pair *metadata, int64_t metadata_count) {
    int64_t count = parts * s->model->tensor_count;
    seqpar_safetensors_tensor *list = (seqpar_safetensors_tensor *)calloc((size_t)count, sizeof *list);
    char (*names)[128] = (char (*)[128])calloc((size_t)count, sizeof *names);
    double *values = (double *)malloc(2 * DEMO_VALUES * sizeof *values);
    seqpar_status status = list && names && values ? SEQPAR_OK : seqpar_fail(s->ctx->error, SEQPAR_ERR_MEMORY, "out of memory while %s is saved", path);
    for (int64_t i = 0; !status && i < count; i++) {
        const seqpar_tensor *t = &s->model->tensors[i % s->model->tensor_count];
        snprintf(names[i], sizeof names[i], "%s%s", prefix[i / s->model->tensor_count], t->name);
        list[i] = demo_tensor(t, names[i], demo_dtype(dtype));
    }
    seqpar_safetensors_desc desc = {.path = path, .tensors = list, .count = count, .metadata = metadata, .metadata_count = metadata_count};
    seqpar_safetensors_writer *writer = NULL;
    if (!status && s->ctx->world->rank == 0) status = seqpar_safetensors_create(&writer, &desc, s->ctx->error);
    for (int64_t i = 0; !status && i < count; i++) status = demo_append(s, writer, names[i], (int)(i / s->model->tensor_count), i % s->model->tensor_count, dtype, get, values);
    if (status || !writer) seqpar_safetensors_abort(writer); else status = seqpar_safetensors_finish(writer, s->ctx->error);
    free(list);
    free(names);
    free(values);
    return status;
}

/* One tensor, from the file into its sink; without one it is only looked at. */
static seqpar_status demo_load_tensor(const demo_transfer *s, seqpar_safetensors_file *file, const char *prefix, int state, int64_t tensor, demo_values_fn put, double *values) {
    const seqpar_tensor *t = &s->model->tensors[tensor];
    char name[128];
    snprintf(name, sizeof name, "%s%s", prefix, t->name);
    seqpar_safetensors_tensor wanted = demo_tensor(t, name, SEQPAR_SAFETENSORS_NONE);
    if (s->model->config.score && tensor == s->model->tensor_count - 1 && !seqpar_safetensors_find(file, name)) return SEQPAR_OK; /* the head is new */
    seqpar_status status = seqpar_safetensors_expect(file, &wanted, s->ctx->error);
    for (int64_t first = 0; !status && put && first < t->rows * t->cols; first += DEMO_VALUES) {
        seqpar_optim_part part = demo_block(t, state, tensor, first);
        seqpar_safetensors_part wanted_part = {.name = name, .first = first, .count = part.count, .finite = 1};
        status = seqpar_safetensors_read_f64(file, values, &wanted_part, s->ctx->error);
        if (!status) status = put(s, values, &part);
    }
    return status;
}

/* All names and shapes are looked at before the first number goes anywhere. */
static seqpar_status demo_load_tensors(const demo_transfer *s, const char *path, int parts, const char *const *prefix, demo_values_fn put) {
    seqpar_safetensors_file *file = NULL;
    double *values = (double *)malloc(DEMO_VALUES * sizeof *values);
    seqpar_status status = values ? seqpar_safetensors_open(&file, path, s->ctx->error) : seqpar_fail(s->ctx->error, SEQPAR_ERR_MEMORY, "out of memory while %s is read", path);
    for (int reads = 0; reads < 2; reads++)
        for (int64_t i = 0; !status && i < parts * s->model->tensor_count; i++)
            status = demo_load_tensor(s, file, prefix[i / s->model->tensor_count], (int)(i / s->model->tensor_count), i % s->model->tensor_count, reads ? put : NULL, values);
    seqpar_safetensors_close(file);
    free(values);
    return status;
}

static const char *const demo_no_prefix[] = {""};

/* Weights of a folder into the model; refuses NaN and infinity, missing tensors and other shapes. A score head that the
   folder does not have stays as it is. */
static seqpar_status demo_load_weights(seqpar_ctx *ctx, seqpar_llama *model, const char *folder) {
    char path[4352];
    demo_transfer store = {.ctx = ctx, .model = model};
    if (demo_check_weights(model, folder, ctx->error)) return ctx->error->status;
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    return demo_load_tensors(&store, path, 1, demo_no_prefix, demo_weights_put);
}

/* Rank 0 writes model.safetensors and config.json into an existing folder; with `average` (collective) that as the weights. */
static seqpar_status demo_save_folder(seqpar_ctx *ctx, const seqpar_llama *model, const char *folder, demo_average *average) {
    char path[1280];
    demo_transfer store = {.ctx = ctx, .model = model, .average = average};
    const seqpar_safetensors_pair format = {"format", "pt"};
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    seqpar_status status = demo_save_tensors(&store, path, 1, demo_no_prefix, average ? demo_average_get : demo_weights_get, ctx->device->storage, &format, 1);
    return status || ctx->world->rank ? status : demo_save_config(folder, &model->config, ctx->error);
}
static seqpar_status demo_save_model(seqpar_ctx *ctx, const seqpar_llama *model, const char *folder) { return demo_save_folder(ctx, model, folder, NULL); }

/* The moving average in fp64, for going on with it. Collective. */
static seqpar_status demo_save_average(seqpar_ctx *ctx, const seqpar_llama *model, const char *folder, const demo_average *average) {
    char path[1280];
    demo_transfer store = {.ctx = ctx, .model = model, .average = (demo_average *)average};
    snprintf(path, sizeof path, "%s/average.safetensors", folder);
    return demo_save_tensors(&store, path, 1, demo_no_prefix, demo_average_get, SEQPAR_F64, NULL, 0);
}

/* ---- checkpoints ---- */

/* What the optimizer keeps of every element, under which prefix: state (DEMO_STATES) and prefix (DEMO_STATES) of those that this one
   keeps; returns how many. */
enum { DEMO_STATES = 3 };
static int demo_kept_states(const seqpar_ctx *ctx, const seqpar_optim *optim, int *state, const char **prefix) {
    static const char *const prefixes[DEMO_STATES] = {"exp_avg.", "exp_avg_sq.", "master."};
    static const int states[DEMO_STATES] = {SEQPAR_STATE_M, SEQPAR_STATE_V, SEQPAR_STATE_MASTER};
    int count = 0;
    for (int i = 0; i < DEMO_STATES; i++) if (seqpar_optim_keeps(ctx, optim, states[i])) { state[count] = states[i]; prefix[count++] = prefixes[i]; }
    return count;
}

/* Collective. */
static seqpar_status demo_save_optimizer(seqpar_ctx *ctx, const seqpar_llama *model, seqpar_optim *optim, const char *folder, const demo_state *state) {
    enum { NUMBERS = 7 };
    char path[1280], number[NUMBERS][32];
    const int64_t values[] = {state->step, state->seed, state->train_batch_size, state->documents, optim->t, state->extra[0], state->extra[1]};
    static const char *const keys[] = {"step", "seed", "train_batch_size", "documents", "optimizer_t", "extra", "extra_1"};
    seqpar_safetensors_pair metadata[NUMBERS];
    const char *prefix[DEMO_STATES];
    int states[DEMO_STATES], count = demo_kept_states(ctx, optim, states, prefix);
    demo_transfer store = {.ctx = ctx, .model = model, .optim = optim, .state = states};
    for (int i = 0; i < NUMBERS; i++) {
        snprintf(number[i], sizeof number[i], "%lld", (long long)values[i]);
        metadata[i] = (seqpar_safetensors_pair){keys[i], number[i]};
    }
    snprintf(path, sizeof path, "%s/optimizer.safetensors", folder);
    return demo_save_tensors(&store, path, count, prefix, demo_optimizer_get, ctx->device->accumulator, metadata, NUMBERS);
}

/* Removes the oldest checkpoints until at most `keep` are left. */
static void demo_forget_checkpoints(const char *root, int64_t keep) {
    for (;;) {
        DIR *folder = opendir(root);
        int64_t count = 0, oldest = INT64_MAX;
        for (struct dirent *entry; folder && (entry = readdir(folder));) {
            long long step;
            char rest;
            if (sscanf(entry->d_name, "global_step%lld%c", &step, &rest) != 1) continue;
            count++;
            if (step < oldest) oldest = step;
        }
        if (folder) closedir(folder);
        if (keep <= 0 || count <= keep) return;
        char path[1280];
        snprintf(path, sizeof path, "%s/global_step%lld", root, (long long)oldest);
        demo_remove_folder(path);
    }
}

/* Collective: everybody hands over their part of the state, rank 0 writes. */
static seqpar_status demo_save_checkpoint(seqpar_ctx *ctx, const seqpar_llama *model, seqpar_optim *optim, const char *root, const demo_state *state, int64_t keep) {
    char temporary[1100], final[1100], latest[1100], name[64];
    snprintf(name, sizeof name, "global_step%lld", (long long)state->step);
    snprintf(final, sizeof final, "%s/%s", root, name);
    snprintf(temporary, sizeof temporary, "%s.tmp", final);
    snprintf(latest, sizeof latest, "%s/latest", root);
    int writes = ctx->world->rank == 0;
    if (writes) demo_remove_folder(temporary);
    seqpar_status status = writes ? demo_make_folder(temporary, ctx->error) : SEQPAR_OK;
    if (!status && writes) status = demo_save_model(ctx, model, temporary);
    if (!status) status = demo_save_optimizer(ctx, model, optim, temporary, state);
    if (!status && state->average) status = demo_save_average(ctx, model, temporary, state->average);
    if (!writes) return status;
    if (!status) {
        demo_remove_folder(final);
        if (rename(temporary, final)) status = seqpar_fail(ctx->error, SEQPAR_ERR_FILE_WRITE, "cannot rename %s: %s", temporary, strerror(errno));
    }
    if (!status) status = seqpar_file_write_atomic(latest, name, (int64_t)strlen(name), ctx->error);
    if (status) demo_remove_folder(temporary);
    else demo_forget_checkpoints(root, keep);
    return status;
}

static int64_t demo_metadata_number(const seqpar_safetensors_file *file, const char *key) {
    const char *text = seqpar_safetensors_metadata(file, key);
    return text ? strtoll(text, NULL, 10) : -1;
}

/* The folder of the newest checkpoint under root. */
static seqpar_status demo_newest_checkpoint(const char *root, char *folder, size_t size, seqpar_error *error) {
    char latest[1100];
    snprintf(latest, sizeof latest, "%s/latest", root);
    char *name = demo_read_text(latest, error);
    if (!name) return error->status;
    snprintf(folder, size, "%s/%.64s", root, name);
    free(name);
    return SEQPAR_OK;
}

/* Its moving average; without a share none is kept, so there should be none. */
static seqpar_status demo_load_average(seqpar_ctx *ctx, const seqpar_llama *model, const char *root, demo_average *average) {
    char folder[1280], path[1400];
    demo_transfer store = {.ctx = ctx, .model = model, .average = average};
    seqpar_status status = demo_newest_checkpoint(root, folder, sizeof folder, ctx->error);
    snprintf(path, sizeof path, "%s/average.safetensors", folder);
    int there = !status && !access(path, F_OK), kept = average->share != NULL;
    if (!status && there != kept)
        return seqpar_fail(ctx->error, SEQPAR_ERR_OPTION, "the checkpoint %s was written with%s a moving average of the weights; go on with%s --enable_ema", folder, there ? "" : "out", there ? "" : "out");
    return status || !kept ? status : demo_load_tensors(&store, path, 1, demo_no_prefix, demo_average_put);
}

/* Every rank reads the newest checkpoint under root. */
static seqpar_status demo_load_checkpoint(seqpar_ctx *ctx, seqpar_llama *model, seqpar_optim *optim, const char *root, demo_state *state) {
    char folder[1280], path[1400];
    seqpar_status status = demo_newest_checkpoint(root, folder, sizeof folder, ctx->error);
    if (status) return status;
    snprintf(path, sizeof path, "%s/optimizer.safetensors", folder);
    status = demo_load_weights(ctx, model, folder);
    const char *prefix[DEMO_STATES];
    int states[DEMO_STATES], count = demo_kept_states(ctx, optim, states, prefix);
    demo_transfer store = {.ctx = ctx, .model = model, .optim = optim, .state = states};
    seqpar_safetensors_file *file = NULL;
    if (!status) status = demo_load_tensors(&store, path, count, prefix, demo_optimizer_put);
    if (!status) status = seqpar_safetensors_open(&file, path, ctx->error);
    if (!status && !seqpar_optim_keeps(ctx, optim, SEQPAR_STATE_MASTER) && seqpar_safetensors_find(file, "master.model.norm.weight"))
        status = seqpar_fail(ctx->error, SEQPAR_ERR_OPTION, "%s was written in bf16, with master parameters that this device does not keep; go on with --param_dtype bf16", path);
    if (!status) {
        *state = (demo_state){demo_metadata_number(file, "step"), demo_metadata_number(file, "seed"), demo_metadata_number(file, "train_batch_size"), demo_metadata_number(file, "documents"), {demo_metadata_number(file, "extra"), demo_metadata_number(file, "extra_1")}, NULL};
        if (state->step < 0) status = seqpar_fail(ctx->error, SEQPAR_ERR_FILE_FORMAT, "%s does not say at which step it was written", path);
        else optim->t = demo_metadata_number(file, "optimizer_t");
    }
    seqpar_safetensors_close(file);
    return status;
}
#endif
