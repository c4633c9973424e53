/* SPDX-License-Identifier: MIT OR Unlicense */
/* source.h - what a folder that training began with has beside its weights, for the folder of
 * what was trained: config.json as its makers wrote it but for what training changed, the
 * tokenizer, how text is to be sampled. So whoever could load the one can load the other. */
#ifndef DEMO_SOURCE_H
#define DEMO_SOURCE_H

#include "model_folder.h"

static const char *const demo_source_files[] = {"tokenizer.json",
                                                "tokenizer.model",
                                                "tokenizer_config.json",
                                                "vocab.json",
                                                "merges.txt",
                                                "added_tokens.json",
                                                "chat_template.json",
                                                "chat_template.jinja",
                                                "special_tokens_map.json",
                                                "generation_config.json"};

static inline void demo_source_set(cJSON *config, const char *key, cJSON *value) {
    if (cJSON_GetObjectItemCaseSensitive(config, key))
        cJSON_ReplaceItemInObjectCaseSensitive(config, key, value);
    else
        cJSON_AddItemToObject(config, key, value);
}

/* What a reward model's config says of its scores, which no longer holds once the weights have
   changed; and the name that the head has there, which need not be its name here. */
static inline void demo_source_score(cJSON *config, const seqpar_llama_config *c,
                                     bool trained) {
    static const char head[] = "value_head_prefix";
    if (trained || !c->score) {
        cJSON_DeleteItemFromObjectCaseSensitive(config, "mean");
        cJSON_DeleteItemFromObjectCaseSensitive(config, "std");
    }
    if (!c->score) {
        cJSON_DeleteItemFromObjectCaseSensitive(config, "num_labels");
        cJSON_DeleteItemFromObjectCaseSensitive(config, head);
        return;
    }
    demo_source_set(config, "num_labels", cJSON_CreateNumber(1));
    if (cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(config, "id2label")) != 1) {
        cJSON_DeleteItemFromObjectCaseSensitive(config, "id2label");
        cJSON_DeleteItemFromObjectCaseSensitive(config, "label2id");
    }
    if (cJSON_GetObjectItemCaseSensitive(config, head))
        demo_source_set(config, head, cJSON_CreateString(c->score));
}

/* What is otherwise than there: the type of numbers, and what the model gives. */
static inline void demo_source_change(cJSON *config, const seqpar_llama_config *c,
                                      const char *dtype, bool trained) {
    const demo_family *family = demo_family_of(
        config); /* NULL, if the file was changed meanwhile */
    const char *key = cJSON_GetObjectItemCaseSensitive(config, "dtype") ? "dtype"
                                                                        : "torch_dtype";
    if (family) {
        const char *name = c->score ? family->sequence : family->causal;
        demo_source_set(config, "architectures", cJSON_CreateStringArray(&name, 1));
    }
    demo_source_set(config, key, cJSON_CreateString(dtype));
    demo_source_score(config, c, trained);
}

/* Takes the object over. */
static inline seqpar_status demo_source_write(cJSON *json, const char *path,
                                              seqpar_error *error) {
    char *text = cJSON_Print(json);
    cJSON_Delete(json);
    if (!text)
        seqpar_fail(error, SEQPAR_ERR_MEMORY, "out of memory for %s", path);
    else
        seqpar_file_write_atomic(path, text, (int64_t)strlen(text), error);
    cJSON_free(text);
    return error->status;
}

static inline seqpar_status demo_source_config(const char *source, const char *folder,
                                               const seqpar_llama_config *c, const char *dtype,
                                               bool trained, seqpar_error *error) {
    char path[4352];
    cJSON *json = demo_config_open(source, path, sizeof path, error);
    if (!json) return error->status;
    demo_source_change(json, c, dtype, trained);
    snprintf(path, sizeof path, "%s/config.json", folder);
    return demo_source_write(json, path, error);
}

static inline seqpar_status demo_source_copy(const char *source, const char *folder,
                                             const char *name, seqpar_error *error) {
    char from[4352], to[4352];
    size_t size;
    char *text;
    snprintf(from, sizeof from, "%s/%s", source, name);
    snprintf(to, sizeof to, "%s/%s", folder, name);
    if (access(from, F_OK)) return SEQPAR_OK;
    if (!(text = demo_read_file(from, &size)))
        return seqpar_fail(error, SEQPAR_ERR_FILE_OPEN,
                           "%s cannot be read, which belongs to the model; %s has all but it",
                           from, folder);
    seqpar_file_write_atomic(to, text, (int64_t)size, error);
    free(text);
    return error->status;
}

/* A model that began from nothing, but with the tokenizer of a token file: which ids it was
   taught as BOS, EOS and PAD; -1: none. */
static inline seqpar_status demo_source_ids(const char *folder, int32_t bos, int32_t eos,
                                            int32_t pad, seqpar_error *error) {
    const struct {
        const char *key;
        int32_t id;
    } ids[] = {{"bos_token_id", bos}, {"eos_token_id", eos}, {"pad_token_id", pad}};
    char path[4352];
    cJSON *json = demo_config_open(folder, path, sizeof path, error);
    if (!json) return error->status;
    for (int i = 0; i < 3; i++)
        demo_source_set(json, ids[i].key,
                        ids[i].id < 0 ? cJSON_CreateNull() : cJSON_CreateNumber(ids[i].id));
    return demo_source_write(json, path, error);
}

/* For weights of that model, whose dtype is "float32" and so on, which stand in `folder`
   already. trained: they are no longer the source's. */
static inline seqpar_status demo_keep_source(const char *source, const char *folder,
                                             const seqpar_llama_config *c, const char *dtype,
                                             bool trained, seqpar_error *error) {
    if (demo_source_config(source, folder, c, dtype, trained, error)) return error->status;
    for (size_t i = 0; i < sizeof demo_source_files / sizeof *demo_source_files; i++)
        if (demo_source_copy(source, folder, demo_source_files[i], error)) break;
    return error->status;
}
#endif
