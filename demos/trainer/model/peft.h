/* SPDX-License-Identifier: MIT OR Unlicense */
/* peft.h - reads adapter_config.json of an adapter's folder, as PEFT writes it. A key that
 * changes what the adapters compute is either supported or refused by name. */
#ifndef DEMO_PEFT_H
#define DEMO_PEFT_H
#include <cjson/cJSON.h>
#include "trainer/base/error.h"
#include "trainer/base/lists.h"
#include "model_folder.h"

/* Name i belongs to bit i of SEQPAR_ADAPT_.. */
static const char *const demo_lora_names[] = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                              "gate_proj", "up_proj", "down_proj"};
enum { DEMO_LORA_NAMES = 7, DEMO_LORA_TEXT = 64 };

typedef struct {
    int64_t rank, alpha;
    double dropout;
    bool rooted; /* use_rslora: scaled by alpha / sqrt(rank) */
    int targets; /* bits of SEQPAR_ADAPT_.. */
} demo_peft;

/* The bits of SEQPAR_ADAPT_.. that a word names; 0: none. */
static inline int demo_lora_bits(const char *word, size_t length) {
    static const char *const all[] = {"all-linear", "all"};
    for (int i = 0; i < 2; i++)
        if (strlen(all[i]) == length && !strncmp(word, all[i], length)) return SEQPAR_ADAPT_ALL;
    for (int i = 0; i < DEMO_LORA_NAMES; i++)
        if (strlen(demo_lora_names[i]) == length && !strncmp(word, demo_lora_names[i], length))
            return 1 << i;
    return 0;
}

/* Writes the names of the targets, such as "q_proj,v_proj". */
static inline void demo_lora_text(char text[DEMO_LORA_TEXT], int targets) {
    *text = 0;
    for (int i = 0; i < DEMO_LORA_NAMES; i++)
        if (targets >> i & 1)
            snprintf(text + strlen(text), DEMO_LORA_TEXT - strlen(text), "%s%s",
                     *text ? "," : "", demo_lora_names[i]);
}

/* Accepted keys: those that are read, and those that do not change what the adapters
   compute. */
static const char demo_peft_keys[] =
    "peft_type,r,lora_alpha,lora_dropout,use_rslora,target_modules,modules_to_save,"
    "auto_mapping,base_model_name_or_path,revision,peft_version,task_type,inference_mode,"
    "init_lora_weights,layers_pattern,megatron_core,qalora_group_size,loftq_config,eva_config,corda_config,"
    "runtime_config";

/* Is the value one that switches a key off: false, null, "", [], {}, or "none" (for bias)? */
static bool demo_peft_empty(const cJSON *value) {
    return cJSON_IsFalse(value) || cJSON_IsNull(value) ||
           ((cJSON_IsArray(value) || cJSON_IsObject(value)) && !value->child) ||
           (cJSON_IsString(value) &&
            (!*value->valuestring || !strcmp(value->valuestring, "none")));
}

static int demo_peft_number(const cJSON *json, const char *path, const char *key, double low,
                            double high, double *number, demo_error *error) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(json, key);
    *number = value ? value->valuedouble : NAN;
    if (cJSON_IsNumber(value) && *number >= low && *number <= high) return 0;
    return demo_fail(error, "%.300s: %s is %s%.9g, but must be a number from %.10g to %.10g",
                     path, key, cJSON_IsNumber(value) ? "" : "no number, ", *number, low, high);
}

/* Reads target_modules, a name or a list of names, into bits of SEQPAR_ADAPT_.. */
static int demo_peft_targets(const cJSON *json, const char *path, int *targets,
                             demo_error *error) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(json, "target_modules"), *word;
    *targets = 0;
    if (cJSON_IsString(list))
        *targets = demo_lora_bits(list->valuestring, strlen(list->valuestring));
    for (word = cJSON_IsArray(list) ? list->child : NULL; word; word = word->next) {
        const char *text = cJSON_IsString(word) ? word->valuestring : "";
        int bits = demo_lora_bits(text, strlen(text));
        if (!bits)
            return demo_fail(error,
                             "%.300s: target_modules has %.60s, but no layer has a "
                             "module of that name; give another adapter",
                             path, text);
        *targets |= bits;
    }
    return *targets ? 0
                    : demo_fail(error,
                                "%.300s: target_modules names no module; give "
                                "another adapter",
                                path);
}

/* Refuses modules_to_save other than the head "score". */
static int demo_peft_saved(const cJSON *json, const char *path, demo_error *error) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(json, "modules_to_save"), *word;
    for (word = cJSON_IsArray(list) ? list->child : NULL; word; word = word->next)
        if (!cJSON_IsString(word) || strcmp(word->valuestring, "score"))
            return demo_fail(
                error,
                "%.300s: modules_to_save has %.60s, but only score is supported; give "
                "another adapter",
                path, cJSON_IsString(word) ? word->valuestring : "a value that is not text");
    return 0;
}

/* Fills *p from adapter_config.json. Refuses a key that is set but not supported. */
static int demo_peft_take(const cJSON *json, const char *path, demo_peft *p,
                          demo_error *error) {
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(json, "peft_type"), *key;
    double rank, alpha;
    if (!cJSON_IsString(type) || strcmp(type->valuestring, "LORA"))
        return demo_fail(error,
                         "%.300s: peft_type is %.60s, but only LORA is supported; "
                         "give another adapter",
                         path, cJSON_IsString(type) ? type->valuestring : "missing");
    for (key = json->child; key; key = key->next)
        if (!demo_list_has(demo_peft_keys, key->string) && !demo_peft_empty(key))
            return demo_fail(error,
                             "%.300s: %.60s is set, which is not supported; give "
                             "another adapter",
                             path, key->string);
    if (demo_peft_number(json, path, "r", 1, SEQPAR_MAX_WIDTH, &rank, error) ||
        demo_peft_number(json, path, "lora_alpha", 1, INT32_MAX, &alpha, error) ||
        demo_peft_number(json, path, "lora_dropout", 0, 0.99, &p->dropout, error) ||
        demo_peft_targets(json, path, &p->targets, error) || demo_peft_saved(json, path, error))
        return -1;
    p->rank = (int64_t)rank;
    p->alpha = (int64_t)alpha;
    p->rooted = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(json, "use_rslora"));
    if ((double)p->rank == rank && (double)p->alpha == alpha) return 0;
    return demo_fail(error,
                     "%.300s: r is %g and lora_alpha %g, but both must be whole "
                     "numbers; give another adapter",
                     path, rank, alpha);
}

/* Reads adapter_config.json of a folder. Returns 0, or -1 with one sentence. */
static inline int demo_peft_read(const char *folder, demo_peft *p, demo_error *error) {
    char path[1100];
    size_t size;
    const char *why;
    snprintf(path, sizeof path, "%.1000s/adapter_config.json", folder);
    char *text = demo_read_whole(path, DEMO_CONFIG_BYTES, &size, &why);
    if (!text)
        return demo_fail(error, "%.300s cannot be read: %s; give the folder of an adapter",
                         path, why);
    cJSON *json = cJSON_ParseWithLength(text, size);
    int status = cJSON_IsObject(json) ? demo_peft_take(json, path, p, error)
                                      : demo_fail(error, "%.300s: no JSON object {...}", path);
    cJSON_Delete(json);
    free(text);
    return status;
}
#endif
