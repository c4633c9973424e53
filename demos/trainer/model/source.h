/* SPDX-License-Identifier: MIT OR Unlicense */
/* source.h - copies the files beside the original weights to the trained model's folder: the
 * tokenizer, the generation config, and config.json, in which only the values that training
 * changed differ. So a program that loads the original can load the trained model. */
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

/* Updates the keys of reward models. Mean and standard deviation of the scores are removed if
   the weights have changed. The head gets the name that it has in this run. */
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

/* Sets what differs from the original: the type of the weights, the architecture and the head.
   */
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

/* Writes the object and frees it. */
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

/* Copies a file of the original folder, if it exists. */
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
                           "%s, a file of the model, cannot be read; %s is complete except "
                           "for this file",
                           from, folder);
    seqpar_file_write_atomic(to, text, (int64_t)size, error);
    free(text);
    return error->status;
}

/* For a model that began with random weights and the tokenizer of a token file: writes the ids
   of BOS, EOS and PAD into config.json; -1: none. */
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

/* Writes config.json and copies the other files to `folder`, which has the weights already.
   dtype: that of the weights, such as "float32". trained: they differ from the source's. */
static inline seqpar_status demo_keep_source(const char *source, const char *folder,
                                             const seqpar_llama_config *c, const char *dtype,
                                             bool trained, seqpar_error *error) {
    if (demo_source_config(source, folder, c, dtype, trained, error)) return error->status;
    for (size_t i = 0; i < sizeof demo_source_files / sizeof *demo_source_files; i++)
        if (demo_source_copy(source, folder, demo_source_files[i], error)) break;
    return error->status;
}
#endif
