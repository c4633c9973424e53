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
#include "model_folder.h"

typedef struct { /* where training stands */
    int64_t step;      /* optimizer steps done */
    int64_t seed, train_batch_size, documents;
    int64_t extra[2];  /* whatever the trainer wants to find again */
    double *average;   /* (elements) the weights' moving average; NULL: none */
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

/* One piece of a file: the tensors of the model under a prefix, from doubles that are exact in the stored type. */
static seqpar_status demo_append(seqpar_ctx *ctx, seqpar_safetensors_writer *writer, const seqpar_llama *model, const char *prefix, const double *values, int dtype) {
    char name[128];
    for (int64_t i = 0; i < model->tensor_count; i++) {
        const seqpar_tensor *t = &model->tensors[i];
        int64_t count = t->rows * t->cols, size = seqpar_dtype_bytes(dtype);
        snprintf(name, sizeof name, "%s%s", prefix, t->name);
        if (demo_finite(ctx, name, values + t->offset, count)) return ctx->error->status;
        char *bytes = (char *)malloc((size_t)(count * size));
        if (!bytes) return seqpar_fail(ctx->error, SEQPAR_ERR_MEMORY, "out of memory while %s is saved", name);
        for (int64_t k = 0; k < count; k++) {
            float x = (float)values[t->offset + k];
            uint16_t half = seqpar_bf16_from_float(x);
            memcpy(bytes + k * size, dtype == SEQPAR_F64 ? (const void *)&values[t->offset + k] : dtype == SEQPAR_F32 ? (const void *)&x : &half, (size_t)size);
        }
        seqpar_status status = seqpar_safetensors_append(writer, name, bytes, count * size, ctx->error);
        free(bytes);
        if (status) return status;
    }
    return SEQPAR_OK;
}

/* Writes `parts` value arrays of the model (params; or m, v and masters) with one prefix each. */
static seqpar_status demo_save_tensors(seqpar_ctx *ctx, const seqpar_llama *model, const char *path, int parts, const char *const *prefix,
                                       const double *const *values, int dtype, const seqpar_safetensors_pair *metadata, int64_t metadata_count) {
    int64_t count = parts * model->tensor_count;
    seqpar_safetensors_tensor *list = (seqpar_safetensors_tensor *)calloc((size_t)count, sizeof *list);
    char (*names)[128] = (char (*)[128])calloc((size_t)count, sizeof *names);
    for (int64_t i = 0; i < count; i++) {
        const seqpar_tensor *t = &model->tensors[i % model->tensor_count];
        snprintf(names[i], sizeof names[i], "%s%s", prefix[i / model->tensor_count], t->name);
        list[i] = demo_tensor(t, names[i], demo_dtype(dtype));
    }
    seqpar_safetensors_desc desc = {.path = path, .tensors = list, .count = count, .metadata = metadata, .metadata_count = metadata_count};
    seqpar_safetensors_writer *writer = NULL;
    seqpar_status status = seqpar_safetensors_create(&writer, &desc, ctx->error);
    for (int p = 0; !status && p < parts; p++) status = demo_append(ctx, writer, model, prefix[p], values[p], dtype);
    if (status) seqpar_safetensors_abort(writer); else status = seqpar_safetensors_finish(writer, ctx->error);
    free(list);
    free(names);
    return status;
}

static seqpar_status demo_load_tensors(seqpar_ctx *ctx, const seqpar_llama *model, const char *path, const char *prefix, double *values) {
    seqpar_safetensors_file *file = NULL;
    seqpar_status status = seqpar_safetensors_open(&file, path, ctx->error);
    for (int64_t i = 0; !status && i < model->tensor_count; i++) {
        const seqpar_tensor *t = &model->tensors[i];
        char name[128];
        snprintf(name, sizeof name, "%s%s", prefix, t->name);
        seqpar_safetensors_tensor wanted = demo_tensor(t, name, SEQPAR_SAFETENSORS_NONE);
        seqpar_safetensors_part part = {.name = name, .count = t->rows * t->cols, .finite = 1};
        if (model->config.score && i == model->tensor_count - 1 && !seqpar_safetensors_find(file, name)) continue; /* a language model's weights: the head is new */
        status = seqpar_safetensors_expect(file, &wanted, ctx->error);
        if (!status) status = seqpar_safetensors_read_f64(file, values + t->offset, &part, ctx->error);
    }
    seqpar_safetensors_close(file);
    return status;
}

/* Weights of a folder into the model; refuses NaN and infinity, missing tensors and other shapes. A score head that the
   folder does not have stays as it is. */
static seqpar_status demo_load_weights(seqpar_ctx *ctx, seqpar_llama *model, const char *folder) {
    char path[4352];
    if (demo_check_weights(model, folder, ctx->error)) return ctx->error->status;
    double *values = (double *)calloc((size_t)model->elements, sizeof *values);
    if (!values) return seqpar_fail(ctx->error, SEQPAR_ERR_MEMORY, "out of memory while weights are read");
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    seqpar_device_read(ctx->device, values, model->params.data, 0, model->elements, ctx->device->storage);
    seqpar_status status = demo_load_tensors(ctx, model, path, "", values);
    if (!status) seqpar_device_write(ctx->device, model->params.data, 0, values, model->elements, ctx->device->storage);
    free(values);
    return status;
}

/* Rank 0 writes model.safetensors and config.json into an existing folder; values (elements) as the model's weights. */
static seqpar_status demo_save_values(seqpar_ctx *ctx, const seqpar_llama *model, const char *folder, const double *values) {
    char path[1280];
    const char *prefix = "";
    const seqpar_safetensors_pair format = {"format", "pt"};
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    seqpar_status status = demo_save_tensors(ctx, model, path, 1, &prefix, &values, ctx->device->storage, &format, 1);
    return status ? status : demo_save_config(folder, &model->config, ctx->error);
}
static seqpar_status demo_save_model(seqpar_ctx *ctx, const seqpar_llama *model, const char *folder) {
    double *values = (double *)calloc((size_t)model->elements, sizeof *values);
    if (!values) return seqpar_fail(ctx->error, SEQPAR_ERR_MEMORY, "out of memory while weights are saved");
    seqpar_device_read(ctx->device, values, model->params.data, 0, model->elements, ctx->device->storage);
    seqpar_status status = demo_save_values(ctx, model, folder, values);
    free(values);
    return status;
}

/* The moving average in fp64, for going on with it. */
static seqpar_status demo_save_average(seqpar_ctx *ctx, const seqpar_llama *model, const char *folder, const double *values) {
    char path[1280];
    seqpar_safetensors_tensor *list = (seqpar_safetensors_tensor *)calloc((size_t)model->tensor_count, sizeof *list);
    const void **data = (const void **)calloc((size_t)model->tensor_count, sizeof *data);
    for (int64_t i = 0; i < model->tensor_count; i++) {
        list[i] = demo_tensor(&model->tensors[i], model->tensors[i].name, SEQPAR_SAFETENSORS_F64);
        data[i] = values + model->tensors[i].offset;
    }
    snprintf(path, sizeof path, "%s/average.safetensors", folder);
    seqpar_safetensors_desc desc = {.path = path, .tensors = list, .count = model->tensor_count};
    seqpar_status status = seqpar_safetensors_save(&desc, data, ctx->error);
    free(list);
    free(data);
    return status;
}

/* ---- checkpoints ---- */

/* What the optimizer keeps of every element, and under which prefix; NULL: this one does not. */
enum { DEMO_STATES = 3 };
static const char *const demo_state_prefix[DEMO_STATES] = {"exp_avg.", "exp_avg_sq.", "master."};
static int demo_keeps(const seqpar_ctx *ctx, const seqpar_optim *optim, int state) {
    return state == 2 ? ctx->device->storage != ctx->device->accumulator : optim->desc.kind != SEQPAR_SGD;
}

static seqpar_status demo_save_optimizer(seqpar_ctx *ctx, const seqpar_llama *model, const seqpar_optim *optim, const char *folder,
                                         const demo_state *state, const double *const *kept) {
    enum { NUMBERS = 7 };
    char path[1280], number[NUMBERS][32];
    const int64_t values[] = {state->step, state->seed, state->train_batch_size, state->documents, optim->t, state->extra[0], state->extra[1]};
    static const char *const keys[] = {"step", "seed", "train_batch_size", "documents", "optimizer_t", "extra", "extra_1"};
    seqpar_safetensors_pair metadata[NUMBERS];
    const char *prefix[DEMO_STATES];
    const double *parts[DEMO_STATES];
    int count = 0;
    for (int i = 0; i < DEMO_STATES; i++) if (demo_keeps(ctx, optim, i)) { prefix[count] = demo_state_prefix[i]; parts[count++] = kept[i]; }
    for (int i = 0; i < NUMBERS; i++) {
        snprintf(number[i], sizeof number[i], "%lld", (long long)values[i]);
        metadata[i] = (seqpar_safetensors_pair){keys[i], number[i]};
    }
    snprintf(path, sizeof path, "%s/optimizer.safetensors", folder);
    return demo_save_tensors(ctx, model, path, count, prefix, parts, ctx->device->accumulator, metadata, NUMBERS);
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

static seqpar_status demo_write_checkpoint(seqpar_ctx *ctx, const seqpar_llama *model, const seqpar_optim *optim, const char *root,
                                           const demo_state *state, const double *const *kept, int64_t keep) {
    char temporary[1100], final[1100], latest[1100], name[64];
    snprintf(name, sizeof name, "global_step%lld", (long long)state->step);
    snprintf(final, sizeof final, "%s/%s", root, name);
    snprintf(temporary, sizeof temporary, "%s.tmp", final);
    snprintf(latest, sizeof latest, "%s/latest", root);
    demo_remove_folder(temporary);
    seqpar_status status = demo_make_folder(temporary, ctx->error);
    if (!status) status = demo_save_model(ctx, model, temporary);
    if (!status) status = demo_save_optimizer(ctx, model, optim, temporary, state, kept);
    if (!status && state->average) status = demo_save_average(ctx, model, temporary, state->average);
    if (!status) {
        demo_remove_folder(final);
        if (rename(temporary, final)) status = seqpar_fail(ctx->error, SEQPAR_ERR_FILE_WRITE, "cannot rename %s: %s", temporary, strerror(errno));
    }
    if (!status) status = seqpar_file_write_atomic(latest, name, (int64_t)strlen(name), ctx->error);
    if (status) demo_remove_folder(temporary);
    else demo_forget_checkpoints(root, keep);
    return status;
}

/* Collective: everybody hands over their part of the state, rank 0 writes. */
static seqpar_status demo_save_checkpoint(seqpar_ctx *ctx, const seqpar_llama *model, seqpar_optim *optim, const char *root, const demo_state *state, int64_t keep) {
    double *m = (double *)calloc((size_t)model->elements * DEMO_STATES, sizeof *m), *const kept[DEMO_STATES] = {m, m + model->elements, m + 2 * model->elements};
    seqpar_status status = m ? seqpar_optim_save(ctx, optim, kept[0], kept[1], kept[2]) : seqpar_fail(ctx->error, SEQPAR_ERR_MEMORY, "out of memory for a checkpoint");
    if (!status && ctx->world->rank == 0) status = demo_write_checkpoint(ctx, model, optim, root, state, (const double *const *)kept, keep);
    free(m);
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

/* Its moving average (elements); NULL: none is kept, so there should be none. */
static seqpar_status demo_load_average(seqpar_ctx *ctx, const seqpar_llama *model, const char *root, double *average) {
    char folder[1280], path[1400];
    seqpar_status status = demo_newest_checkpoint(root, folder, sizeof folder, ctx->error);
    snprintf(path, sizeof path, "%s/average.safetensors", folder);
    int there = !status && !access(path, F_OK);
    if (!status && there != (average != NULL))
        return seqpar_fail(ctx->error, SEQPAR_ERR_OPTION, "the checkpoint %s was written with%s a moving average of the weights; go on with%s --enable_ema", folder, there ? "" : "out", there ? "" : "out");
    return status || !average ? status : demo_load_tensors(ctx, model, path, "", average);
}

/* Every rank reads the newest checkpoint under root. */
static seqpar_status demo_load_checkpoint(seqpar_ctx *ctx, seqpar_llama *model, seqpar_optim *optim, const char *root, demo_state *state) {
    char folder[1280], path[1400];
    seqpar_status status = demo_newest_checkpoint(root, folder, sizeof folder, ctx->error);
    if (status) return status;
    snprintf(path, sizeof path, "%s/optimizer.safetensors", folder);
    status = demo_load_weights(ctx, model, folder);
    double *m = (double *)calloc((size_t)model->elements * DEMO_STATES, sizeof *m), *const kept[DEMO_STATES] = {m, m + model->elements, m + 2 * model->elements};
    seqpar_safetensors_file *file = NULL;
    for (int i = 0; !status && i < DEMO_STATES; i++) if (demo_keeps(ctx, optim, i)) status = demo_load_tensors(ctx, model, path, demo_state_prefix[i], kept[i]);
    if (!status) status = seqpar_safetensors_open(&file, path, ctx->error);
    if (!status && !demo_keeps(ctx, optim, 2) && seqpar_safetensors_find(file, "master.model.norm.weight"))
        status = seqpar_fail(ctx->error, SEQPAR_ERR_OPTION, "%s was written in bf16, with master parameters that this device does not keep; go on with --param_dtype bf16", path);
    if (!status) {
        *state = (demo_state){demo_metadata_number(file, "step"), demo_metadata_number(file, "seed"), demo_metadata_number(file, "train_batch_size"), demo_metadata_number(file, "documents"), {demo_metadata_number(file, "extra"), demo_metadata_number(file, "extra_1")}, NULL};
        if (state->step < 0) status = seqpar_fail(ctx->error, SEQPAR_ERR_FILE_FORMAT, "%s does not say at which step it was written", path);
        else status = seqpar_optim_load(ctx, optim, kept[0], kept[1], kept[2], demo_metadata_number(file, "optimizer_t"));
    }
    seqpar_safetensors_close(file);
    free(m);
    return status;
}
#endif
