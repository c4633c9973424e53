/* SPDX-License-Identifier: MIT OR Unlicense */
/* weights.h - the weights of a model folder: model.safetensors, or several files that
 * model.safetensors.index.json names. */
#ifndef DEMO_WEIGHTS_H
#define DEMO_WEIGHTS_H

#include <stdbool.h>
#include <cjson/cJSON.h>
#include "trainer/base/files.h"
#include "trainer/base/json.h"
#include "seqpar_safetensors.h"

#ifndef DEMO_INDEX_BYTES
#define DEMO_INDEX_BYTES (1 << 26)
#endif
#ifndef DEMO_INDEX_TENSORS
#define DEMO_INDEX_TENSORS (1 << 16)
#endif
enum { DEMO_WEIGHTS_PATH = 4608 };

/* how tensors are named in files */
enum {
    DEMO_NAMES_PLAIN,
    DEMO_NAMES_FUSED,   /* Phi-3: some tensors of a layer are fused into one */
    DEMO_NAMES_MIXTRAL, /* experts have w1, w2 and w3 */
    DEMO_NAMES_STACKED, /* transformers 5 in memory: a layer's experts are one tensor */
    DEMO_NAMES
};

typedef struct {
    seqpar_safetensors_file *file;
    char path[DEMO_WEIGHTS_PATH];
} demo_shard;

typedef struct {
    demo_shard *shards; /* (count) */
    int64_t count;
    const char *folder;
    char index[DEMO_WEIGHTS_PATH]; /* "": there is none */
} demo_weights;

static inline void demo_weights_close(demo_weights *w) {
    for (int64_t i = 0; i < w->count; i++) seqpar_safetensors_close(w->shards[i].file);
    free(w->shards);
    memset(w, 0, sizeof *w);
}

/* The shard that has a tensor; NULL: none. */
static inline const demo_shard *demo_weights_find(const demo_weights *w, const char *name) {
    for (int64_t i = 0; i < w->count; i++)
        if (seqpar_safetensors_find(w->shards[i].file, name)) return &w->shards[i];
    return NULL;
}

/* The file that has a tensor. If none has it, the first file, which then reports it as
   missing. */
static inline seqpar_safetensors_file *demo_weights_file(const demo_weights *w,
                                                         const char *name) {
    const demo_shard *shard = demo_weights_find(w, name);
    return shard ? shard->file : w->shards[0].file;
}

static inline seqpar_status demo_weights_reserve(demo_weights *w, int64_t most,
                                                 seqpar_error *error) {
    w->shards = (demo_shard *)calloc((size_t)most + 1, sizeof *w->shards);
    return w->shards ? SEQPAR_OK
                     : seqpar_fail(error, SEQPAR_ERR_MEMORY, "out of memory for weights");
}

static inline seqpar_status demo_weights_add(demo_weights *w, const char *path,
                                             seqpar_error *error) {
    demo_shard *shard = &w->shards[w->count];
    seqpar_status status;
    snprintf(shard->path, sizeof shard->path, "%s", path);
    status = seqpar_safetensors_open(&shard->file, path, error);
    if (!status) w->count++;
    return status;
}

/* Opens one file. On success the caller calls demo_weights_close. */
static inline seqpar_status demo_weights_open_file(demo_weights *w, const char *path,
                                                   seqpar_error *error) {
    memset(w, 0, sizeof *w);
    if (demo_weights_reserve(w, 1, error) || demo_weights_add(w, path, error))
        demo_weights_close(w);
    return error->status;
}

/* ---- several files ---- */

/* Checks an entry of weight_map: the file must hold the tensor. Opens the file if no entry
   before named it. */
static inline seqpar_status demo_weights_entry(demo_weights *w, const cJSON *entry,
                                               seqpar_error *error) {
    const char *name = cJSON_IsString(entry) ? entry->valuestring : "";
    char path[DEMO_WEIGHTS_PATH];
    int64_t i = 0;
    if (!*name || strchr(name, '/') || strlen(name) > 255)
        return seqpar_fail(
            error, SEQPAR_ERR_FILE_FORMAT,
            "%s: weight_map says that tensor \"%.100s\" is in '%.100s', but it must name a "
            "file in the same folder; correct it",
            w->index, entry->string, name);
    snprintf(path, sizeof path, "%s/%s", w->folder, name);
    while (i < w->count && strcmp(w->shards[i].path, path)) i++;
    if (i == w->count && demo_weights_add(w, path, error)) return error->status;
    if (!seqpar_safetensors_find(w->shards[i].file, entry->string))
        return seqpar_fail(error, SEQPAR_ERR_FILE_TENSOR,
                           "%s: weight_map says that tensor \"%.100s\" is in %.100s, which "
                           "does not have it; download both again",
                           w->index, entry->string, name);
    return SEQPAR_OK;
}

/* Checks that the files hold exactly the tensors of weight_map, each once. */
static inline seqpar_status demo_weights_listed(const demo_weights *w, const cJSON *map,
                                                seqpar_error *error) {
    int64_t tensors = 0, listed = cJSON_GetArraySize(map);
    for (int64_t i = 0; i < w->count; i++)
        tensors += seqpar_safetensors_count(w->shards[i].file);
    if (tensors == listed) return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_FILE_TENSOR,
                       "%s lists %lld tensors, but the files that it names have %lld; "
                       "download all of them again",
                       w->index, (long long)listed, (long long)tensors);
}

static inline seqpar_status demo_weights_map(demo_weights *w, const cJSON *map,
                                             seqpar_error *error) {
    int count = cJSON_GetArraySize(map);
    if (!cJSON_IsObject(map) || !count || count > DEMO_INDEX_TENSORS || demo_json_twice(map))
        return seqpar_fail(
            error, SEQPAR_ERR_FILE_FORMAT,
            "%s: no object \"weight_map\" of up to %d tensors, each once with its file; "
            "download it again",
            w->index, DEMO_INDEX_TENSORS);
    if (demo_weights_reserve(w, count, error)) return error->status;
    for (const cJSON *entry = map->child; entry; entry = entry->next)
        if (demo_weights_entry(w, entry, error)) return error->status;
    return demo_weights_listed(w, map, error);
}

/* Opens the files that model.safetensors.index.json names. */
static inline seqpar_status demo_weights_index(demo_weights *w, seqpar_error *error) {
    const char *why;
    size_t size;
    char *text = demo_read_whole(w->index, DEMO_INDEX_BYTES, &size, &why);
    cJSON *json = text ? cJSON_ParseWithLength(text, size) : NULL;
    if (!text)
        seqpar_fail(error, SEQPAR_ERR_FILE_OPEN, "%s cannot be read: %s", w->index, why);
    else if (!json)
        seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT, "%s: no JSON object {...}", w->index);
    else
        demo_weights_map(w, cJSON_GetObjectItemCaseSensitive(json, "weight_map"), error);
    cJSON_Delete(json);
    free(text);
    return error->status;
}

/* Refuses the folder of an adapter, even with whole weights beside it: transformers would add
   the adapter to them. */
static inline seqpar_status demo_weights_adapter(const char *folder, seqpar_error *error) {
    char path[DEMO_WEIGHTS_PATH];
    snprintf(path, sizeof path, "%s/adapter_config.json", folder);
    if (access(path, F_OK)) return SEQPAR_OK;
    return seqpar_fail(
        error, SEQPAR_ERR_FILE_OPEN,
        "%s is an adapter, not a whole model; merge it into its model with peft's "
        "merge_and_unload and save the result, or by --save_merged",
        path);
}

/* Refuses weights in a format that is not supported. */
static inline seqpar_status demo_weights_form(const char *folder, seqpar_error *error) {
    static const char *const forms[][2] = {
        {"pytorch_model.bin",
         "is a model in PyTorch's pickle format, which is not supported; load it with "
         "transformers and save it with save_pretrained(...)"},
        {"pytorch_model.bin.index.json",
         "is a model in PyTorch's pickle format, which is not supported; load it with "
         "transformers and save it with save_pretrained(...)"},
    };
    char other[DEMO_WEIGHTS_PATH];
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        snprintf(other, sizeof other, "%s/%s", folder, forms[i][0]);
        if (!access(other, F_OK))
            return seqpar_fail(error, SEQPAR_ERR_FILE_OPEN, "%s %s", other, forms[i][1]);
    }
    return SEQPAR_OK;
}

/* Opens model.safetensors, or else the files that its index names. `folder` must stay valid
   until demo_weights_close, which the caller calls on success. */
static inline seqpar_status demo_weights_open(demo_weights *w, const char *folder,
                                              seqpar_error *error) {
    char path[DEMO_WEIGHTS_PATH];
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    memset(w, 0, sizeof *w);
    w->folder = folder;
    if (demo_weights_adapter(folder, error)) return error->status;
    snprintf(w->index, sizeof w->index, "%s.index.json", path);
    if (!access(path, F_OK) || access(w->index, F_OK)) {
        if (!access(path, F_OK) || !demo_weights_form(folder, error))
            demo_weights_open_file(w, path, error);
        w->folder = folder;
    } else if (demo_weights_index(w, error)) {
        demo_weights_close(w);
    }
    return error->status;
}
#endif
