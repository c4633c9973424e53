/* SPDX-License-Identifier: MIT OR Unlicense */
/* save_model.h - writes the folder of a trained model: weights in one file or several, with the
 * dtypes and tensor names of the folder that training began with. */
#ifndef DEMO_SAVE_MODEL_H
#define DEMO_SAVE_MODEL_H

#include <dirent.h>
#include "source.h"
#include "tensors.h"

/* Metadata that marks weights as written by seqpar. Other weights are not replaced. */
static const seqpar_safetensors_pair demo_written[] = {{"format", "pt"},
                                                       {"written_by", "seqpar"}};

typedef struct {                    /* how a folder is written */
    const char *source;             /* the folder that training began with; NULL: none */
    seqpar_safetensors_dtype dtype; /* NONE: each as in source or, without it, as computed */
    int64_t shard_bytes;            /* limit of a file, unless a tensor is larger; 0: none */
    int which;                      /* DEMO_SAVES_MODEL, DEMO_SAVES_CRITIC */
    bool trained;                   /* at least one step was done */
} demo_save_form;

/* "float32" and so on; NULL: NONE. */
static inline const char *demo_dtype_name(seqpar_safetensors_dtype dtype) {
    switch (dtype) {
    case SEQPAR_SAFETENSORS_F64: return "float64";
    case SEQPAR_SAFETENSORS_F32: return "float32";
    case SEQPAR_SAFETENSORS_F16: return "float16";
    case SEQPAR_SAFETENSORS_BF16: return "bfloat16";
    default: return NULL;
    }
}

static inline seqpar_safetensors_dtype demo_dtype_named(const char *name) {
    for (int i = 0; name && i < SEQPAR_SAFETENSORS_DTYPE_COUNT; i++) {
        const char *its = demo_dtype_name((seqpar_safetensors_dtype)i);
        if (its && !strcmp(its, name)) return (seqpar_safetensors_dtype)i;
    }
    return SEQPAR_SAFETENSORS_NONE;
}

/* "5GB", "700MB", "64KB" or a number of bytes; -1: none of these. */
static inline int64_t demo_size_named(const char *text) {
    static const char *const units[] = {"", "KB", "MB", "GB", "TB"};
    char *end = NULL;
    double bytes = strtod(text, &end), unit = 1;
    for (int i = 0; end > text && i < 5; i++, unit *= 1000)
        if (!strcmp(end, units[i]) && bytes * unit >= 1 && bytes * unit <= 0x1p53)
            return (int64_t)(bytes * unit);
    return -1;
}

/* ---- types ---- */

/* The dtype of a tensor in the source; NONE if it cannot be written. */
static inline seqpar_safetensors_dtype demo_source_dtype(const demo_weights *source,
                                                         const char *name) {
    const demo_shard *shard = demo_weights_find(source, name);
    seqpar_safetensors_dtype dtype = shard ? seqpar_safetensors_find(shard->file, name)->dtype
                                           : SEQPAR_SAFETENSORS_NONE;
    return demo_dtype_name(dtype) ? dtype : SEQPAR_SAFETENSORS_NONE;
}

/* Reports that weights are rounded, and the option that keeps all bits. */
static inline void demo_say_rounded(const demo_entry *entries, int64_t count, int dtype,
                                    const char *folder) {
    int64_t size = seqpar_dtype_bytes(dtype), i = 0;
    while (i < count && seqpar_safetensors_dtype_bytes(entries[i].dtype) >= size) i++;
    if (i < count)
        fprintf(stderr,
                "notice: weights in %.300s are rounded to %s, the type of the weights of "
                "--pretrain; --save_dtype float32 keeps all bits\n",
                folder, demo_dtype_name(entries[i].dtype));
}

static inline seqpar_status demo_source_names(seqpar_ctx *ctx, const char *folder, int *names) {
    demo_weights source;
    *names = DEMO_NAMES_PLAIN;
    if (!folder) return SEQPAR_OK;
    if (demo_weights_open(&source, folder, ctx->error)) return ctx->error->status;
    *names = demo_names_of(&source);
    demo_weights_close(&source);
    return SEQPAR_OK;
}

/* Sets the dtypes in the file: form->dtype or, if that is NONE, those of the source. */
static inline seqpar_status demo_entry_dtypes(const demo_transfer *s,
                                              const demo_save_form *form, const char *folder,
                                              demo_entry *entries) {
    demo_weights source;
    int64_t count = s->model->tensor_count;
    int type = s->ctx->device->storage;
    for (int64_t i = 0; form->dtype && i < count; i++) entries[i].dtype = form->dtype;
    if (form->dtype || !form->source) return SEQPAR_OK;
    if (demo_weights_open(&source, form->source, s->ctx->error)) return s->ctx->error->status;
    for (int64_t i = 0; i < count; i++) {
        seqpar_safetensors_dtype its = demo_source_dtype(&source, entries[i].name);
        if (its) entries[i].dtype = its;
    }
    demo_weights_close(&source);
    if (!s->ctx->world->rank) demo_say_rounded(entries, count, type, folder);
    return SEQPAR_OK;
}

/* ---- several files ---- */

/* The number of entries, from `first` on, that go into one file. */
static inline int64_t demo_shard_entries(const demo_transfer *s, const demo_save_form *form,
                                         const demo_entry *entries, int64_t first) {
    int64_t bytes = 0, i = first;
    for (; i < s->model->tensor_count; i++) {
        int64_t more = entries[i].begins ? demo_entry_bytes(s, &entries[i]) : 0;
        if (form->shard_bytes && bytes && more && bytes + more > form->shard_bytes) break;
        bytes += more;
    }
    return i - first;
}

static inline int64_t demo_shards(const demo_transfer *s, const demo_save_form *form,
                                  const demo_entry *entries) {
    int64_t shards = 0;
    for (int64_t i = 0; i < s->model->tensor_count; shards++)
        i += demo_shard_entries(s, form, entries, i);
    return shards;
}

static inline void demo_shard_name(char name[64], int64_t shard, int64_t shards) {
    if (shards == 1)
        snprintf(name, 64, "model.safetensors");
    else
        snprintf(name, 64, "model-%05lld-of-%05lld.safetensors", (long long)shard + 1,
                 (long long)shards);
}

/* The index of several files, as transformers writes it. */
static inline char *demo_index_text(const demo_transfer *s, const demo_save_form *form,
                                    const demo_entry *entries, int64_t shards) {
    cJSON *json = cJSON_CreateObject(), *metadata = cJSON_AddObjectToObject(json, "metadata");
    cJSON *map = cJSON_AddObjectToObject(json, "weight_map");
    double bytes = 0;
    int64_t first = 0;
    for (int64_t shard = 0; shard < shards; shard++) {
        int64_t end = first + demo_shard_entries(s, form, entries, first);
        char name[64];
        demo_shard_name(name, shard, shards);
        for (; first < end; first++) {
            if (!entries[first].begins) continue;
            cJSON_AddStringToObject(map, entries[first].name, name);
            bytes += (double)demo_entry_bytes(s, &entries[first]);
        }
    }
    cJSON_AddNumberToObject(metadata, "total_size", bytes);
    char *text = cJSON_Print(json);
    cJSON_Delete(json);
    return text;
}

/* Is this file left from an earlier save with another number of files? */
static inline bool demo_stale_file(const char *name, int64_t shards) {
    long long shard, of;
    int end = 0;
    if (sscanf(name, "model-%5lld-of-%5lld.safetensors%n", &shard, &of, &end) == 2 && end &&
        !name[end])
        return shards == 1 || of != shards;
    return !strcmp(name, shards == 1 ? "model.safetensors.index.json" : "model.safetensors");
}

static inline void demo_remove_stale(const char *folder, int64_t shards) {
    DIR *open = opendir(folder);
    char path[1600];
    for (struct dirent *entry; open && (entry = readdir(open));) {
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (demo_stale_file(entry->d_name, shards)) unlink(path);
    }
    if (open) closedir(open);
}

static inline seqpar_status demo_write_index(const demo_transfer *s, const demo_save_form *form,
                                             const char *folder, const demo_entry *entries,
                                             int64_t shards) {
    char path[1400];
    char *text = demo_index_text(s, form, entries, shards);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", folder);
    seqpar_status status =
        text ? seqpar_file_write_atomic(path, text, (int64_t)strlen(text), s->ctx->error)
             : seqpar_fail(s->ctx->error, SEQPAR_ERR_MEMORY, "out of memory for %s", path);
    cJSON_free(text);
    return status;
}

/* Writes the new files before it removes those of an earlier save with another number of files,
   so that a complete save always exists. */
static inline seqpar_status demo_write_shards(const demo_transfer *s,
                                              const demo_save_form *form, const char *folder,
                                              const demo_entry *entries, demo_values_fn get) {
    int64_t shards = demo_shards(s, form, entries), first = 0;
    seqpar_status status = SEQPAR_OK;
    for (int64_t shard = 0; !status && shard < shards; shard++) {
        int64_t count = demo_shard_entries(s, form, entries, first);
        char path[1400], name[64];
        demo_shard_name(name, shard, shards);
        snprintf(path, sizeof path, "%s/%s", folder, name);
        status = demo_write_entries(s, path, entries + first, count, get, demo_written, 2);
        first += count;
    }
    if (status || s->ctx->world->rank) return status;
    if (shards > 1) status = demo_write_index(s, form, folder, entries, shards);
    if (!status) demo_remove_stale(folder, shards);
    return status;
}

/* ---- the folder ---- */

/* Rank 0 writes the weights and their other files into an existing folder, while the other
   ranks call demo_hand_over. average: if not NULL, the moving average is written instead, and
   the call is collective. */
static seqpar_status demo_save_folder(seqpar_ctx *ctx, const seqpar_llama *model,
                                      const char *folder, const demo_save_form *form,
                                      demo_average *average) {
    demo_transfer store = {
        .ctx = ctx, .model = model, .average = average, .which = form->which};
    demo_entry *entries;
    seqpar_status status = demo_source_names(ctx, form->source, &store.names);
    if (status) return status;
    entries = demo_entries(&store, 1, demo_no_prefix, demo_dtype(ctx->device->storage));
    status = demo_entry_dtypes(&store, form, folder, entries);
    if (!status)
        status = demo_write_shards(&store, form, folder, entries,
                                   average ? demo_average_get : demo_weights_get);
    if (!status && !ctx->world->rank)
        status = form->source ? demo_keep_source(form->source, folder, &model->config,
                                                 demo_dtype_name(entries[0].dtype),
                                                 form->trained, ctx->error)
                              : demo_save_config(folder, &model->config, ctx->error);
    free(entries);
    return status;
}

static inline bool demo_is_ours(const seqpar_safetensors_file *file) {
    const char *writer = seqpar_safetensors_metadata(file, "written_by");
    return writer && !strcmp(writer, "seqpar");
}

/* Does the folder hold adapters that seqpar did not write? */
static inline bool demo_is_foreign_adapter(const char *folder) {
    char path[DEMO_WEIGHTS_PATH];
    seqpar_safetensors_file *file = NULL;
    seqpar_error ignored = {0};
    snprintf(path, sizeof path, "%s/adapter_model.bin", folder);
    bool ours = access(path, F_OK) != 0;
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", folder);
    if (!ours || access(path, F_OK)) return !ours;
    ours = !seqpar_safetensors_open(&file, path, &ignored) && demo_is_ours(file);
    seqpar_safetensors_close(file);
    return !ours;
}

/* Does the folder hold weights that seqpar did not write? */
static inline bool demo_is_foreign_model(const char *folder) {
    char path[DEMO_WEIGHTS_PATH];
    demo_weights w;
    seqpar_error ignored = {0};
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    bool there = !access(path, F_OK);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", folder);
    there = there || !access(path, F_OK);
    if (!there) return demo_is_foreign_adapter(folder);
    if (demo_weights_open(&w, folder, &ignored)) return true;
    bool ours = demo_is_ours(w.shards[0].file);
    demo_weights_close(&w);
    return !ours;
}

/* Refuses to replace a model that seqpar did not write. */
static inline seqpar_status demo_check_foreign(const char *save_path, seqpar_error *error) {
    static const char *const below[] = {"", "/ema", "/critic", "/merged"};
    char folder[1100];
    for (int i = 0; i < 4; i++) {
        snprintf(folder, sizeof folder, "%s%s", save_path, below[i]);
        if (demo_is_foreign_model(folder))
            return seqpar_fail(error, SEQPAR_ERR_OPTION,
                               "save_path %.300s holds a model that seqpar did not write; give "
                               "another --save_path, or --overwrite to replace it",
                               folder);
    }
    return SEQPAR_OK;
}
#endif
