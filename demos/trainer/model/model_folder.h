/* SPDX-License-Identifier: MIT OR Unlicense */
/* model_folder.h - model folders of Hugging Face: config.json, and the tensors of
 * model.safetensors.
 *
 * A key of config.json that is not in the tables of families.h is refused by name: it may
 * change how the model is computed, and training would be wrong without an error. Unknown
 * tensors are refused for the same reason. */
#ifndef DEMO_MODEL_FOLDER_H
#define DEMO_MODEL_FOLDER_H

#include <math.h>
#include <stdbool.h>
#include <cjson/cJSON.h>
#include "families.h"
#include "trainer/base/files.h"
#include "trainer/base/memory.h"
#include "seqpar_llama.h"
#include "seqpar_safetensors.h"
#include "weights.h"

#ifndef DEMO_CONFIG_BYTES
#define DEMO_CONFIG_BYTES (1 << 20) /* a thousand labels are 50 KB */
#endif

/* ---- config.json: Hugging Face's names ---- */

/* Writes rope_scaling as transformers 4 does; transformers 5 reads it, too. For the dynamic
   type, max_position_embeddings is the length up to which the frequencies are not scaled. */
static inline void demo_rope_text(char *text, size_t size, const seqpar_llama_rope *r) {
    static const char *const bounds[][2] = {{"low_freq_factor", "high_freq_factor"},
                                            {"beta_slow", "beta_fast"}};
    const char *const *bound = bounds[r->type == SEQPAR_ROPE_YARN];
    int used = snprintf(text, size,
                        "  \"rope_scaling\": {\"rope_type\": \"%s\", \"factor\": %.17g",
                        demo_ropes[r->type].name, r->factor);
    if (r->type >= SEQPAR_ROPE_LLAMA3)
        used += snprintf(text + used, size - (size_t)used,
                         ", \"%s\": %.17g, \"%s\": %.17g, "
                         "\"original_max_position_embeddings\": %.0f",
                         bound[0], r->low, bound[1], r->high, r->first_positions);
    if (r->type == SEQPAR_ROPE_YARN && r->attention_factor > 0)
        used += snprintf(text + used, size - (size_t)used, ", \"attention_factor\": %.17g",
                         r->attention_factor);
    if (r->exact) used += snprintf(text + used, size - (size_t)used, ", \"truncate\": false");
    used += snprintf(text + used, size - (size_t)used, "},\n");
    if (r->type == SEQPAR_ROPE_DYNAMIC)
        snprintf(text + used, size - (size_t)used, "  \"max_position_embeddings\": %.0f,\n",
                 r->first_positions);
}

/* of: prefix of key names in messages, "rope_parameters." inside that object, else "" */
typedef struct {
    const cJSON *json;
    const char *path, *of;
    seqpar_error *error;
} demo_config_reader;

/* A value as JSON text for messages, truncated to 60 bytes. */
static const char *demo_config_shown(char shown[64], const cJSON *item) {
    char *text = cJSON_PrintUnformatted(item);
    snprintf(shown, 64, "%.60s", text ? text : "?");
    cJSON_free(text);
    return shown;
}

/* The value of a key; NULL if the key is missing or null. */
static const cJSON *demo_config_item(const demo_config_reader *r, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(r->json, key);
    return cJSON_IsNull(item) ? NULL : item;
}

/* A whole number from 1 to `most`. If the key is missing: `otherwise`, or an error if that is
   0. */
static int64_t demo_config_number(const demo_config_reader *r, const char *key, int64_t most,
                                  int64_t otherwise) {
    const cJSON *item = demo_config_item(r, key);
    double x = cJSON_IsNumber(item) ? item->valuedouble : 0;
    char shown[64];
    if (!item && otherwise) return otherwise;
    if (x >= 1 && x <= (double)most && x == floor(x)) return (int64_t)x;
    if (!item)
        seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                    "%s: \"%s\" is missing; give the whole config.json of a model", r->path,
                    key);
    else
        seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                    "%s: \"%s\" is %s, but it must be a whole number from 1 to %lld", r->path,
                    key, demo_config_shown(shown, item), (long long)most);
    return 1;
}

static double demo_config_real(const demo_config_reader *r, const char *key, double otherwise) {
    const cJSON *item = demo_config_item(r, key);
    char shown[64];
    if (!item) return otherwise;
    if (!cJSON_IsNumber(item) || !(item->valuedouble > 0) || !(item->valuedouble <= 1e300))
        seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                    "%s: \"%s%s\" is %s, but it must be a number above 0, up to 1e300", r->path,
                    r->of, key, demo_config_shown(shown, item));
    return item->valuedouble;
}

/* A required number above 0. If it is missing, sets the error and returns 1. */
static double demo_config_typed(const demo_config_reader *r, const char *key) {
    double x = demo_config_real(r, key, 0);
    if (x > 0 || r->error->status) return x;
    seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                "%s: \"%s%s\" is missing; give a number above 0", r->path, r->of, key);
    return 1;
}

/* A fraction in [0, 1); 0 if the key is missing. */
static double demo_config_share(const demo_config_reader *r, const char *key) {
    const cJSON *item = demo_config_item(r, key);
    char shown[64];
    if (!item) return 0;
    if (cJSON_IsNumber(item) && item->valuedouble >= 0 && item->valuedouble < 1)
        return item->valuedouble;
    seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                "%s: \"%s\" is %s, but it must be a number from 0 on, below 1", r->path, key,
                demo_config_shown(shown, item));
    return 0;
}

static int demo_config_truth(const demo_config_reader *r, const char *key) {
    const cJSON *item = demo_config_item(r, key);
    char shown[64];
    if (item && !cJSON_IsBool(item))
        seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                    "%s: \"%s\" is %s, but it must be true or false", r->path, key,
                    demo_config_shown(shown, item));
    return cJSON_IsTrue(item);
}

static bool demo_config_allows(const char *value, const cJSON *item) {
    if (value == demo_read_key || value == demo_any_value || cJSON_IsNull(item)) return true;
    cJSON *wanted = cJSON_Parse(value);
    bool same = cJSON_Compare(wanted, item, true);
    cJSON_Delete(wanted);
    return same;
}

/* The rule for a key. A rule of the family overrides the common one. `family` may be NULL; a
   NULL key ends its rules. */
static const demo_config_key *demo_config_rule(const char *key, const demo_config_key *family,
                                               const demo_config_key *keys, int count) {
    for (int i = 0; family && i < DEMO_FAMILY_KEYS && family[i].key; i++)
        if (!strcmp(family[i].key, key)) return &family[i];
    for (int i = 0; i < count; i++)
        if (!strcmp(keys[i].key, key)) return &keys[i];
    return NULL;
}

/* Refuses a key that is unknown or occurs twice, or whose value is not supported. */
static void demo_config_known(const demo_config_reader *r, const demo_config_key *family,
                              const demo_config_key *keys, int count) {
    char shown[64];
    for (const cJSON *item = r->json ? r->json->child : NULL; item; item = item->next) {
        const demo_config_key *rule = demo_config_rule(item->string, family, keys, count);
        if (!rule)
            seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                        "%s: key \"%s%s\" (%s) is unknown and may change what the model "
                        "computes; take a model of another family, or remove the key if it "
                        "does not change the results",
                        r->path, r->of, item->string, demo_config_shown(shown, item));
        else if (cJSON_GetObjectItemCaseSensitive(r->json, item->string) != item)
            seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                        "%s: key \"%s%s\" occurs twice; remove one of them", r->path, r->of,
                        item->string);
        else if (!demo_config_allows(rule->value, item))
            seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                        "%s: \"%s%s\" is %s, but only %s is supported; take another model",
                        r->path, r->of, item->string, demo_config_shown(shown, item),
                        rule->value);
        if (r->error->status) return;
    }
}

/* The rope_type of an object: SEQPAR_ROPE_.. */
static int demo_rope_type(const demo_config_reader *r) {
    const cJSON *item = demo_config_item(r, "rope_type"), *old = demo_config_item(r, "type");
    char shown[64];
    int type = 0;
    if (item && old && !cJSON_Compare(item, old, true))
        seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                    "%s: \"%srope_type\" and \"%stype\" are different; remove one of them",
                    r->path, r->of, r->of);
    if (!item) item = old;
    if (!item) return SEQPAR_ROPE_DEFAULT;
    while (type < DEMO_ROPES &&
           !(cJSON_IsString(item) && !strcmp(item->valuestring, demo_ropes[type].name)))
        type++;
    if (type < DEMO_ROPES) return type;
    seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                "%s: \"%srope_type\" is %s, but only default, linear, dynamic, llama3 and "
                "yarn are supported; take another model",
                r->path, r->of, demo_config_shown(shown, item));
    return SEQPAR_ROPE_DEFAULT;
}

/* YaRN's get_mscale, a factor on cosine and sine; `weight` is mscale or mscale_all_dim. */
static double demo_rope_scale(double factor, double weight) {
    return factor > 1 ? 0.1 * weight * log(factor) + 1 : 1;
}

static void demo_rope_yarn(const demo_config_reader *r, seqpar_llama_rope *rope) {
    const cJSON *truncated = demo_config_item(r, "truncate");
    double above = demo_config_real(r, "mscale", 0);
    double below = demo_config_real(r, "mscale_all_dim", 0);
    rope->low = demo_config_real(r, "beta_slow", 1);
    rope->high = demo_config_real(r, "beta_fast", 32);
    rope->exact = truncated && !demo_config_truth(r, "truncate");
    rope->attention_factor = demo_config_real(r, "attention_factor", 0);
    if (rope->attention_factor > 0 || !(above > 0 && below > 0)) return;
    rope->attention_factor = demo_rope_scale(rope->factor, above) /
                             demo_rope_scale(rope->factor, below);
}

/* Reads a scaled rotary embedding. r reads the object with rope_type; `of` reads config.json
   itself, for max_position_embeddings. */
static void demo_rope_read(const demo_config_reader *r, const demo_config_reader *of,
                           seqpar_llama_rope *rope) {
    int count = 0;
    rope->type = demo_rope_type(r);
    while (count < DEMO_ROPE_KEYS && demo_ropes[rope->type].keys[count].key) count++;
    demo_config_known(r, NULL, demo_ropes[rope->type].keys, count);
    if (r->error->status || rope->type == SEQPAR_ROPE_DEFAULT) return;
    rope->factor = demo_config_typed(r, "factor");
    if (rope->type == SEQPAR_ROPE_DYNAMIC)
        rope->first_positions = demo_config_typed(of, "max_position_embeddings");
    if (rope->type == SEQPAR_ROPE_LLAMA3) {
        rope->low = demo_config_typed(r, "low_freq_factor");
        rope->high = demo_config_typed(r, "high_freq_factor");
    }
    if (rope->type == SEQPAR_ROPE_YARN) demo_rope_yarn(r, rope);
    if (rope->type >= SEQPAR_ROPE_LLAMA3)
        rope->first_positions = demo_config_typed(r, "original_max_position_embeddings");
}

/* Reads the rotary embedding. transformers 4 has "rope_theta" and "rope_scaling", which may be
   null; transformers 5 has "rope_parameters" with both. */
static void demo_config_rope(const demo_config_reader *r, const demo_family *family,
                             seqpar_llama_config *c) {
    static const char *const sections[] = {"rope_scaling", "rope_parameters"};
    double theta = demo_config_real(r, "rope_theta", 0);
    seqpar_llama_rope ropes[2] = {{0}};
    char shown[64], of[32];
    for (int i = 0; i < 2; i++) {
        demo_config_reader inner = {demo_config_item(r, sections[i]), r->path, of, r->error};
        snprintf(of, sizeof of, "%s.", sections[i]);
        if (!inner.json) continue;
        if (!cJSON_IsObject(inner.json))
            seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                        "%s: \"%s\" is %s, but it must be null or an object with a rope_type",
                        r->path, sections[i], demo_config_shown(shown, inner.json));
        else
            demo_rope_read(&inner, r, &ropes[i]);
        double its = demo_config_real(&inner, "rope_theta", theta);
        if (theta > 0 && (its < theta || its > theta))
            seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                        "%s: rope_theta is %g and %srope_theta %g; remove one of them", r->path,
                        theta, of, its);
        theta = its;
    }
    if (ropes[0].type && ropes[1].type)
        seqpar_fail(
            r->error, SEQPAR_ERR_FILE_FORMAT,
            "%s: \"rope_scaling\" and \"rope_parameters\" both scale; remove one of them",
            r->path);
    c->rope = ropes[ropes[1].type != SEQPAR_ROPE_DEFAULT];
    c->rope_theta = theta > 0 ? theta : family->theta;
    if (family->plain_rope && c->rope.type)
        seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                    "%s: a model of type %s has rope_type \"%s\", but only default is "
                    "supported; take another model",
                    r->path, family->type, demo_ropes[c->rope.type].name);
}

/* The family by model_type; NULL: it is not supported. */
static const demo_family *demo_family_of(const cJSON *json) {
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(json, "model_type");
    for (int i = 0; cJSON_IsString(type) && i < DEMO_FAMILIES; i++)
        if (!strcmp(type->valuestring, demo_families[i].type)) return &demo_families[i];
    return NULL;
}

/* The family by model_type, which architectures must match. On an error, the first family. */
static const demo_family *demo_config_family(const demo_config_reader *r) {
    const cJSON *type = demo_config_item(r, "model_type"),
                *list = demo_config_item(r, "architectures"),
                *first = cJSON_IsArray(list) ? list->child : NULL;
    const char *name = cJSON_IsString(first) && !first->next ? first->valuestring : "";
    char shown[64], types[256] = "";
    const demo_family *family = demo_family_of(r->json);
    for (int i = 0; i < DEMO_FAMILIES; i++)
        snprintf(types + strlen(types), sizeof types - strlen(types), "%s%s", i ? ", " : "",
                 demo_families[i].type);
    if (!family)
        seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                    "%s: \"model_type\" is %s, but only these are supported: %s", r->path,
                    type ? demo_config_shown(shown, type) : "missing", types);
    else if (list && strcmp(name, family->causal) && strcmp(name, family->sequence))
        seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                    "%s: \"architectures\" is %s, but only [\"%s\"] or [\"%s\"] are supported",
                    r->path, demo_config_shown(shown, list), family->causal, family->sequence);
    return family ? family : &demo_families[0];
}

/* ---- layers that differ: sliding windows, no rotary embedding, experts ---- */

static bool demo_config_is(const cJSON *item, const char *text) {
    return cJSON_IsString(item) && !strcmp(item->valuestring, text);
}

/* The first layer with a sliding window by "layer_types": `layers` if no layer has one, -1 if
   the key is missing. */
static int64_t demo_config_layer_types(const demo_config_reader *r, int64_t layers) {
    const cJSON *list = demo_config_item(r, "layer_types");
    int64_t from = 0, i = 0;
    if (!list) return -1;
    for (const cJSON *item = list->child; item; item = item->next, i++)
        if (from == i && demo_config_is(item, "full_attention"))
            from++;
        else if (!demo_config_is(item, "sliding_attention"))
            i = layers; /* full_attention after sliding_attention, or another type: refused */
    if (cJSON_IsArray(list) && i == layers) return from;
    seqpar_fail(
        r->error, SEQPAR_ERR_FILE_FORMAT,
        "%s: \"layer_types\" must name %lld layers, first those with full_attention, then "
        "those with sliding_attention; take another model",
        r->path, (long long)layers);
    return layers;
}

/* The first layer with a sliding window by max_window_layers, which may be 0. */
static int64_t demo_config_window_from(const demo_config_reader *r) {
    const cJSON *first = demo_config_item(r, "max_window_layers");
    if (cJSON_IsNumber(first) && fabs(first->valuedouble) < 0.5) return 0;
    return demo_config_number(r, "max_window_layers", SEQPAR_MAX_LAYERS, 0);
}

/* Refuses a sliding_window that contradicts the family or use_sliding_window. */
static void demo_config_no_window(const demo_config_reader *r, const demo_family *family,
                                  const char *why) {
    char shown[64];
    seqpar_fail(
        r->error, SEQPAR_ERR_FILE_FORMAT,
        "%s: \"sliding_window\" is %s, but a model of type %s %s; remove it, or take a Mistral",
        r->path, demo_config_shown(shown, demo_config_item(r, "sliding_window")), family->type,
        why);
}

static void demo_config_window_all(const demo_config_reader *r, const demo_family *family,
                                   seqpar_llama_config *c) {
    if (cJSON_IsFalse(demo_config_item(r, "use_sliding_window")) &&
        demo_config_item(r, "sliding_window"))
        demo_config_no_window(r, family, "uses it even where \"use_sliding_window\" is false");
    else if (!cJSON_GetObjectItemCaseSensitive(r->json, "sliding_window"))
        seqpar_fail(
            r->error, SEQPAR_ERR_FILE_FORMAT,
            "%s: \"sliding_window\" is missing, but a model of type %s needs it; write a "
            "number of tokens, or null",
            r->path, family->type);
    else if (demo_config_item(r, "sliding_window"))
        c->window = demo_config_number(r, "sliding_window", SEQPAR_MAX_TOKENS, 0);
}

/* Reads the sliding window of a family in which the last layers have one. */
static void demo_config_window_layers(const demo_config_reader *r, seqpar_llama_config *c) {
    int64_t listed = demo_config_layer_types(r, c->layers);
    bool on = demo_config_truth(r, "use_sliding_window") &&
              demo_config_item(r, "sliding_window");
    int64_t from = listed >= 0 ? listed : on ? demo_config_window_from(r) : c->layers;
    if (from >= c->layers) return;
    if (on) {
        c->window = demo_config_number(r, "sliding_window", SEQPAR_MAX_TOKENS, 0);
        c->window_from = from;
        return;
    }
    seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                "%s: \"layer_types\" has sliding_attention, but \"use_sliding_window\" or "
                "\"sliding_window\" says that there is none; correct one of them",
                r->path);
}

/* Reads the sliding window in the way of the family. */
static void demo_config_window(const demo_config_reader *r, const demo_family *family,
                               seqpar_llama_config *c) {
    bool off = cJSON_IsFalse(demo_config_item(r, "use_sliding_window"));
    if (family->window == DEMO_WINDOW_ALL) demo_config_window_all(r, family, c);
    if (family->window == DEMO_WINDOW_LAYERS) demo_config_window_layers(r, c);
    if (family->window != DEMO_WINDOW_NONE) return;
    if (demo_config_item(r, "sliding_window") && !off)
        demo_config_no_window(r, family, "does not have");
    else if (demo_config_layer_types(r, c->layers) >= 0 &&
             demo_config_layer_types(r, c->layers) < c->layers)
        seqpar_fail(
            r->error, SEQPAR_ERR_FILE_FORMAT,
            "%s: \"layer_types\" has sliding_attention, which is not supported for type %s; "
            "take a model with full_attention only",
            r->path, family->type);
}

/* Returns n if every n-th layer has no rotary embedding, 0 if all layers have one.
   no_rope_layers has a 1 for a layer with rotary embedding; without that key n is
   no_rope_layer_interval. */
static int64_t demo_config_no_rope(const demo_config_reader *r, int64_t layers) {
    const cJSON *list = demo_config_item(r, "no_rope_layers"), *item;
    int64_t every = demo_config_number(r, "no_rope_layer_interval", SEQPAR_MAX_LAYERS, 4);
    int64_t i = 0;
    if (list) every = layers + 1;
    item = cJSON_IsArray(list) ? list->child : NULL;
    for (; item && i < layers; item = item->next, i++) {
        bool rotates = cJSON_IsNumber(item) && item->valuedouble > 0;
        if (!rotates && every > layers) every = i + 1;
        if (rotates == ((i + 1) % every != 0)) continue;
        break;
    }
    if (list && i < layers)
        seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                    "%s: \"no_rope_layers\" must be %lld numbers: 0 for every n-th layer, 1 "
                    "for all others; take another model",
                    r->path, (long long)layers);
    return every > layers ? 0 : every;
}

/* Reads the number and the sizes of the experts, by the keys of the family. */
static void demo_config_experts(const demo_config_reader *r, const demo_family *family,
                                seqpar_llama_config *c) {
    const char *many = demo_config_item(r, "num_experts") ? "num_experts" : "num_local_experts";
    int64_t every;
    if (family->experts == DEMO_EXPERTS_NONE) return;
    c->experts = demo_config_number(r, many, SEQPAR_MAX_WIDTH, 0);
    c->experts_per_token = demo_config_number(r, "num_experts_per_tok", c->experts, 0);
    c->expert_intermediate = c->intermediate;
    c->topk_norm = 1;
    if (family->experts == DEMO_EXPERTS_MIXTRAL) return;
    c->expert_intermediate = demo_config_number(r, "moe_intermediate_size", SEQPAR_MAX_WIDTH,
                                                0);
    c->topk_norm = demo_config_truth(r, "norm_topk_prob");
    every = demo_config_number(r, "decoder_sparse_step", SEQPAR_MAX_LAYERS, 1);
    c->sparse_every = every > 1 ? every : 0;
}

static void demo_config_parts(const demo_config_reader *r, const demo_family *family,
                              seqpar_llama_config *c) {
    int bias = demo_config_truth(r, "attention_bias");
    c->qkv_bias = family->qkv_bias || bias;
    c->o_bias = bias;
    c->mlp_bias = demo_config_truth(r, "mlp_bias");
    c->attention_dropout = demo_config_share(r, "attention_dropout");
    c->qk_norm = family->qk_norm;
    if (family->no_rope) c->no_rope_every = demo_config_no_rope(r, c->layers);
    demo_config_window(r, family, c);
    demo_config_experts(r, family, c);
    demo_config_rope(r, family, c);
}

static bool demo_config_tied(const demo_config_reader *r, const demo_family *family) {
    return demo_config_item(r, "tie_word_embeddings")
               ? demo_config_truth(r, "tie_word_embeddings")
               : family->tied;
}

/* transformers gives a classifier one score for each name in id2label, whatever num_labels is.
   */
static void demo_config_labels(const demo_config_reader *r, const demo_family *family) {
    const cJSON *names = demo_config_item(r, "id2label"),
                *list = demo_config_item(r, "architectures");
    int count = cJSON_GetArraySize(names);
    if (!cJSON_IsObject(names) || count == 1 || !cJSON_IsArray(list) || !list->child ||
        !demo_config_is(list->child, family->sequence))
        return;
    seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                "%s: \"id2label\" names %d labels, but a reward model has one; give one name, "
                "or remove the key",
                r->path, count);
}

/* Sets all of c. A missing key gets the default of the family. */
static void demo_config_read(const demo_config_reader *r, seqpar_llama_config *c) {
    const demo_family *family = demo_config_family(r);
    bool said = cJSON_GetObjectItemCaseSensitive(r->json, "num_key_value_heads") != NULL;
    *c = (seqpar_llama_config){0};
    demo_config_known(r, family->keys, demo_config_keys,
                      (int)(sizeof demo_config_keys / sizeof *demo_config_keys));
    c->layers = demo_config_number(r, "num_hidden_layers", SEQPAR_MAX_LAYERS, 0);
    c->hidden = demo_config_number(r, "hidden_size", SEQPAR_MAX_WIDTH, 0);
    c->heads = demo_config_number(r, "num_attention_heads", SEQPAR_MAX_WIDTH, 0);
    c->kv_heads = demo_config_number(r, "num_key_value_heads", SEQPAR_MAX_WIDTH,
                                     said || !family->kv_heads ? c->heads : 0);
    c->head_dim = demo_config_number(
        r, "head_dim", SEQPAR_MAX_WIDTH,
        family->head_dim ? family->head_dim : c->hidden / c->heads + !(c->hidden / c->heads));
    c->intermediate = demo_config_number(r, "intermediate_size", SEQPAR_MAX_WIDTH, 0);
    c->vocab = demo_config_number(r, "vocab_size", SEQPAR_MAX_VOCAB, 0);
    c->rms_eps = demo_config_typed(r, "rms_norm_eps");
    c->tied = demo_config_tied(r, family);
    demo_config_labels(r, family);
    demo_config_parts(r, family, c);
}

/* Returns the object in a folder's config.json, which the caller frees by cJSON_Delete; NULL:
   the error is set. path (room) becomes the path of the file. */
static cJSON *demo_config_open(const char *folder, char *path, size_t room,
                               seqpar_error *error) {
    const char *why;
    size_t size;
    snprintf(path, room, "%s/config.json", folder);
    char *text = demo_read_whole(path, DEMO_CONFIG_BYTES, &size, &why);
    if (!text) {
        if (!demo_weights_adapter(folder, error))
            seqpar_fail(error, SEQPAR_ERR_FILE_OPEN,
                        "%s cannot be read: %s; give the folder of a model", path, why);
        return NULL;
    }
    const char *end = text;
    cJSON *json = cJSON_ParseWithLengthOpts(text, size, &end, false);
    if (json && (!cJSON_IsObject(json) || end + strspn(end, " \t\r\n") < text + size)) {
        cJSON_Delete(json);
        json = NULL;
    }
    if (!json)
        seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                    "%s: not a JSON object {...} from byte %lld of %lld on; give the "
                    "config.json of a model",
                    path, (long long)(end - text), (long long)size);
    free(text);
    return json;
}

/* ---- writing config.json ---- */

/* The fields of a config that decide how the model is computed, as numbers, and their names for
   messages. They are compared between models and are part of a model's digest, so every field
   must be among them. Exceptions: the name of the head, and four_bits, which no config.json has
   and which changes the weights in the digest anyway. */
enum { DEMO_MODEL_NUMBERS = 30 };
typedef char demo_model_numbers_lack_a_field[sizeof(seqpar_llama_config) == 240 ? 1 : -1];
/* clang-format off */
static const char *const demo_model_names[DEMO_MODEL_NUMBERS] = {
    "num_hidden_layers",      "hidden_size",      "num_attention_heads",
    "num_key_value_heads",    "head_dim",         "intermediate_size",
    "vocab_size",             "tie_word_embeddings", "rope_theta",
    "rms_norm_eps",           "rope_type",        "rope factor",
    "rope's first positions", "rope's lower bound", "rope's upper bound",
    "rope's attention_factor", "rope's exact bounds", "sliding_window",
    "max_window_layers",      "no_rope_layer_interval", "biases of q, k and v",
    "biases of o",            "mlp_bias",         "norms of q and k",
    "num_experts",            "num_experts_per_tok", "moe_intermediate_size",
    "decoder_sparse_step",    "norm_topk_prob",   "attention_dropout"};
/* clang-format on */

/* Writes the fields of a config as numbers, in the order of demo_model_names. */
static inline void demo_model_numbers(const seqpar_llama_config *c, double *to) {
    const seqpar_llama_rope *r = &c->rope;
    /* clang-format off */
    const double numbers[DEMO_MODEL_NUMBERS] = {
        (double)c->layers,      (double)c->hidden,        (double)c->heads,
        (double)c->kv_heads,    (double)c->head_dim,      (double)c->intermediate,
        (double)c->vocab,       (double)c->tied,          c->rope_theta,
        c->rms_eps,             (double)r->type,          r->factor,
        r->first_positions,     r->low,                   r->high,
        r->attention_factor,    (double)r->exact,         (double)c->window,
        (double)c->window_from, (double)c->no_rope_every, (double)c->qkv_bias,
        (double)c->o_bias,      (double)c->mlp_bias,      (double)c->qk_norm,
        (double)c->experts,     (double)c->experts_per_token,
        (double)c->expert_intermediate, (double)c->sparse_every, (double)c->topk_norm,
        c->attention_dropout};
    /* clang-format on */
    memcpy(to, numbers, sizeof numbers);
}

/* Writes the JSON lines of the experts' keys. */
static inline void demo_experts_text(char *text, size_t size, const demo_family *family,
                                     const seqpar_llama_config *c) {
    int used;
    if (!c->experts || !family->experts) return;
    used = snprintf(text, size,
                    "  \"num_local_experts\": %lld,\n  \"num_experts_per_tok\": %lld,\n",
                    (long long)c->experts, (long long)c->experts_per_token);
    if (family->experts == DEMO_EXPERTS_QWEN)
        snprintf(text + used, size - (size_t)used,
                 "  \"moe_intermediate_size\": %lld,\n  \"decoder_sparse_step\": %lld,\n  "
                 "\"norm_topk_prob\": %s,\n",
                 (long long)c->expert_intermediate,
                 (long long)(c->sparse_every ? c->sparse_every : 1),
                 c->topk_norm ? "true" : "false");
}

/* Writes the JSON lines of the keys that only some models have. */
static inline void demo_parts_text(char *text, size_t size, const demo_family *family,
                                   const seqpar_llama_config *c) {
    int used = 0;
    *text = 0;
    if (c->score) used = snprintf(text, size, "  \"num_labels\": 1,\n");
    if (c->window || family->window == DEMO_WINDOW_ALL)
        used += snprintf(text + used, size - (size_t)used,
                         c->window ? "  \"sliding_window\": %lld,\n"
                                   : "  \"sliding_window\": null,\n",
                         (long long)c->window);
    if (c->window && family->window == DEMO_WINDOW_LAYERS)
        used += snprintf(text + used, size - (size_t)used,
                         "  \"use_sliding_window\": true,\n  \"max_window_layers\": %lld,\n",
                         (long long)c->window_from);
    if (family->no_rope)
        used += snprintf(text + used, size - (size_t)used,
                         "  \"no_rope_layer_interval\": %lld,\n",
                         (long long)(c->no_rope_every ? c->no_rope_every : c->layers + 1));
    if (c->o_bias)
        used += snprintf(text + used, size - (size_t)used, "  \"attention_bias\": true,\n");
    if (c->attention_dropout > 0)
        used += snprintf(text + used, size - (size_t)used, "  \"attention_dropout\": %.17g,\n",
                         c->attention_dropout);
    if (c->mlp_bias)
        used += snprintf(text + used, size - (size_t)used, "  \"mlp_bias\": true,\n");
    demo_experts_text(text + used, size - (size_t)used, family, c);
}

/* Writes the config.json of a model of that family as text; returns its length in bytes. */
static inline int demo_config_text(char *text, size_t size, const demo_family *family,
                                   const seqpar_llama_config *c) {
    char parts[768], rope[512] = "";
    demo_parts_text(parts, sizeof parts, family, c);
    if (c->rope.type) demo_rope_text(rope, sizeof rope, &c->rope);
    return snprintf(
        text, size,
        "{\n  \"architectures\": [\"%s\"],\n%s  \"model_type\": \"%s\",\n  \"hidden_act\": "
        "\"silu\",\n"
        "  \"num_hidden_layers\": %lld,\n  \"hidden_size\": %lld,\n  \"num_attention_heads\": "
        "%lld,\n"
        "  \"num_key_value_heads\": %lld,\n  \"head_dim\": %lld,\n  \"intermediate_size\": "
        "%lld,\n  \"vocab_size\": %lld,\n"
        "  \"rope_theta\": %.17g,\n%s"
        "  \"rms_norm_eps\": %.17g,\n  \"tie_word_embeddings\": %s,\n"
        "  \"bos_token_id\": 256,\n  \"eos_token_id\": 257,\n  \"pad_token_id\": 258\n}\n",
        c->score ? family->sequence : family->causal, parts, family->type, (long long)c->layers,
        (long long)c->hidden, (long long)c->heads, (long long)c->kv_heads,
        (long long)c->head_dim, (long long)c->intermediate, (long long)c->vocab, c->rope_theta,
        rope, c->rms_eps, c->tied ? "true" : "false");
}

/* Does reading this config.json give the model c? */
static inline bool demo_config_says(const char *text, const seqpar_llama_config *c) {
    cJSON *json = cJSON_Parse(text);
    seqpar_error why = {0};
    seqpar_llama_config read;
    demo_config_reader r = {json, "", "", &why};
    double numbers[2][DEMO_MODEL_NUMBERS];
    if (!json) return false;
    demo_config_read(&r, &read);
    cJSON_Delete(json);
    demo_model_numbers(c, numbers[0]);
    demo_model_numbers(&read, numbers[1]);
    return !why.status && !memcmp(numbers[0], numbers[1], sizeof numbers[0]);
}

/* Writes the config.json of the first family that can describe this model. */
static inline seqpar_status demo_save_config(const char *folder, const seqpar_llama_config *c,
                                             seqpar_error *error) {
    char path[4352], text[3072];
    seqpar_llama_config full = *c;
    if (full.rope_theta <= 0) full.rope_theta = 10000.0; /* the default of seqpar_llama_open */
    if (full.rms_eps <= 0) full.rms_eps = 1e-5;
    snprintf(path, sizeof path, "%s/config.json", folder);
    for (int i = 0; i < DEMO_FAMILIES; i++) {
        int size = demo_config_text(text, sizeof text, &demo_families[i], &full);
        if (demo_config_says(text, &full))
            return seqpar_file_write_atomic(path, text, size, error);
    }
    return seqpar_fail(error, SEQPAR_ERR_OPTION,
                       "%s is not written: no known family of models computes what this "
                       "model does",
                       path);
}

static seqpar_status demo_load_config(const char *folder, seqpar_llama_config *c,
                                      seqpar_error *error) {
    char path[4352];
    cJSON *json = demo_config_open(folder, path, sizeof path, error);
    demo_config_reader r = {json, path, "", error};
    if (json) demo_config_read(&r, c);
    cJSON_Delete(json);
    return error->status;
}

/* max_position_embeddings, the longest text that the model is meant for, in tokens; 0 if the
   key is missing. Longer texts do not fail, but have positions that the model has not seen. */
static inline int64_t demo_config_positions(const char *folder) {
    char path[4352];
    seqpar_error ignored = {0};
    cJSON *json = demo_config_open(folder, path, sizeof path, &ignored);
    const cJSON *most = cJSON_GetObjectItemCaseSensitive(json, "max_position_embeddings");
    double positions = cJSON_IsNumber(most) && most->valuedouble >= 1 &&
                               most->valuedouble < 9e15
                           ? most->valuedouble
                           : 0;
    cJSON_Delete(json);
    return (int64_t)positions;
}

/* The id of the padding token + 1, for seqpar_llama_batch_desc.untaught; 0 if pad_token_id is
   missing or out of range. transformers passes it to torch as padding_idx: it adds nothing to
   the gradient of the embedding, and a negative id counts from the last row. */
static inline int64_t demo_untaught(const char *folder, int64_t vocab) {
    char path[4352];
    seqpar_error ignored = {0};
    cJSON *json = folder ? demo_config_open(folder, path, sizeof path, &ignored) : NULL;
    const cJSON *pad = cJSON_GetObjectItemCaseSensitive(json, "pad_token_id");
    int64_t id = cJSON_IsNumber(pad) ? pad->valueint : vocab;
    cJSON_Delete(json);
    if (id < 0) id += vocab;
    return id >= 0 && id < vocab ? id + 1 : 0;
}

/* Does eos_token_id, a number or a list of numbers, lack `id`? False if the key is missing.
   *said becomes the first number, if there is one. */
static inline bool demo_config_ends_otherwise(const char *folder, int32_t id, int64_t *said) {
    char path[4352];
    seqpar_error ignored = {0};
    cJSON *json = demo_config_open(folder, path, sizeof path, &ignored);
    const cJSON *ends = cJSON_GetObjectItemCaseSensitive(json, "eos_token_id");
    const cJSON *first = cJSON_IsArray(ends) ? ends->child : ends, *at = first;
    bool other = cJSON_IsNumber(first);
    if (other) *said = (int64_t)first->valuedouble;
    for (; cJSON_IsNumber(at) && other; at = cJSON_IsArray(ends) ? at->next : NULL)
        other = at->valueint != id;
    cJSON_Delete(json);
    return other;
}

/* ---- weights: tensors that the model does not have are refused ---- */

/* Old files hold the inverse frequencies of rotary embeddings, which are computed here, not
   read. */
static bool demo_is_inv_freq(const char *name) {
    static const char end[] = ".rotary_emb.inv_freq";
    size_t length = strlen(name), tail = sizeof end - 1;
    return length > tail && !strcmp(name + length - tail, end);
}

#ifndef DEMO_TABLE_PART
#define DEMO_TABLE_PART 4096 /* elements in a block */
#endif
/* Refuses a head that is in the file and differs from the embedding, although both are tied. */
static seqpar_status demo_same_table(const demo_weights *w, const char *path,
                                     seqpar_error *error) {
    static const char *const names[] = {"lm_head.weight", "model.embed_tokens.weight"};
    seqpar_safetensors_file *const files[] = {demo_weights_file(w, names[0]),
                                              demo_weights_file(w, names[1])};
    const seqpar_safetensors_tensor *head = seqpar_safetensors_find(files[0], names[0]);
    const seqpar_safetensors_tensor *table = seqpar_safetensors_find(files[1], names[1]);
    seqpar_status status =
        head && table && head->count == table->count
            ? SEQPAR_OK
            : seqpar_fail(error, SEQPAR_ERR_FILE_TENSOR,
                          "%s: tensor \"%s\" has another shape than \"%s\", but config.json "
                          "says that they are tied; set tie_word_embeddings to false",
                          path, names[0], names[1]);
    for (int64_t at = 0; !status && at < head->count; at += DEMO_TABLE_PART) {
        double values[2][DEMO_TABLE_PART];
        seqpar_safetensors_part part = {
            NULL, at,
            head->count - at < DEMO_TABLE_PART ? head->count - at : (int64_t)DEMO_TABLE_PART,
            1};
        for (int i = 0; !status && i < 2; i++) {
            part.name = names[i];
            status = seqpar_safetensors_read_f64(files[i], values[i], &part, error);
        }
        if (!status && memcmp(values[0], values[1], (size_t)part.count * sizeof(double)))
            status = seqpar_fail(
                error, SEQPAR_ERR_FILE_TENSOR,
                "%s: tensor \"%s\" is not equal to \"%s\", but config.json says that they are "
                "tied; set tie_word_embeddings to false, or remove the tensor",
                path, names[0], names[1]);
    }
    return status;
}

/* Where a tensor of the model is in the files: from row `first` of a tensor with `rows`. */
typedef struct {
    char name[128];
    int64_t first, rows;
} demo_tensor_location;

/* A tensor whose name ends in `end` here has a name that ends in `there` in the files. Tensors
   with the same name there are one tensor in the files, their rows concatenated in the model's
   order. */
typedef struct {
    const char *end, *there;
} demo_name_rule;
static const demo_name_rule demo_name_rules[DEMO_NAMES][6] = {
    {{NULL, NULL}}, /* in the order of DEMO_NAMES_.. */
    {{".q_proj.weight", ".qkv_proj.weight"},
     {".k_proj.weight", ".qkv_proj.weight"},
     {".v_proj.weight", ".qkv_proj.weight"},
     {".mlp.gate_proj.weight", ".mlp.gate_up_proj.weight"},
     {".mlp.up_proj.weight", ".mlp.gate_up_proj.weight"}},
    {{".mlp.gate.weight", ".block_sparse_moe.gate.weight"},
     {".gate_proj.weight", ".w1.weight"},
     {".up_proj.weight", ".w3.weight"},
     {".down_proj.weight", ".w2.weight"}},
    {{".gate_proj.weight", ".gate_up_proj"},
     {".up_proj.weight", ".gate_up_proj"},
     {".down_proj.weight", ".down_proj"}}};

/* Renames a tensor of an expert: Mixtral names the list of experts differently, and stacked
   files have no expert number. */
static inline void demo_expert_name(char name[128], const char *part, int names) {
    const char *at = strstr(part, ".mlp.experts."), *number, *rest;
    snprintf(name, 128, "%s", part);
    if (!at || (names != DEMO_NAMES_MIXTRAL && names != DEMO_NAMES_STACKED)) return;
    number = at + strlen(".mlp.experts.");
    rest = number + strspn(number, "0123456789");
    snprintf(name, 128, "%.*s%s%.*s%s", (int)(at - part), part,
             names == DEMO_NAMES_MIXTRAL ? ".block_sparse_moe.experts." : ".mlp.experts",
             names == DEMO_NAMES_MIXTRAL ? (int)(rest - number) : 0, number, rest);
}

/* The name that the tensor `part` has in files with this naming (DEMO_NAMES_..). */
static inline void demo_file_name(char name[128], const char *part, int names) {
    bool routed = names == DEMO_NAMES_MIXTRAL || names == DEMO_NAMES_STACKED;
    size_t length;
    demo_expert_name(name, part, names);
    length = strlen(name);
    for (const demo_name_rule *rule = demo_name_rules[names]; rule->end; rule++) {
        size_t end = strlen(rule->end);
        if (length <= end || strcmp(name + length - end, rule->end)) continue;
        /* in a model with experts, the MLP of a dense layer is not renamed */
        if (routed && !strstr(part, ".mlp.experts.") && strcmp(rule->end, ".mlp.gate.weight"))
            continue;
        snprintf(name + length - end, 128 - (length - end), "%s", rule->there);
        return;
    }
}

/* Finds where a tensor is in files with this naming. In a tensor of several parts, its rows
   follow those of the earlier parts. */
static inline demo_tensor_location demo_tensor_location_of(const seqpar_llama *model,
                                                           int64_t tensor, int names) {
    const seqpar_tensor *t = &model->tensors[tensor];
    demo_tensor_location at = {.rows = t->rows};
    demo_file_name(at.name, t->name, names);
    if (names != DEMO_NAMES_FUSED && names != DEMO_NAMES_STACKED) return at;
    at.rows = 0;
    for (int64_t i = 0; i < model->tensor_count; i++) {
        char whole[128];
        if (model->tensors[i].group != t->group) continue;
        demo_file_name(whole, model->tensors[i].name, names);
        if (strcmp(whole, at.name)) continue;
        if (i < tensor) at.first += model->tensors[i].rows;
        at.rows += model->tensors[i].rows;
    }
    return at;
}

typedef struct {
    char text[128];
} demo_name;

static inline int demo_name_order(const void *a, const void *b) {
    return strcmp(((const demo_name *)a)->text, ((const demo_name *)b)->text);
}

/* The names of the model's tensors in files with this naming, sorted; the caller frees them. */
static inline demo_name *demo_part_names(const seqpar_llama *model, int names) {
    demo_name *parts = (demo_name *)demo_alloc(model->tensor_count, sizeof *parts);
    for (int64_t i = 0; i < model->tensor_count; i++)
        demo_file_name(parts[i].text, model->tensors[i].name, names);
    qsort(parts, (size_t)model->tensor_count, sizeof *parts, demo_name_order);
    return parts;
}

static inline bool demo_is_part(const demo_name *parts, int64_t count, const char *name) {
    demo_name wanted;
    snprintf(wanted.text, sizeof wanted.text, "%s", name);
    return strlen(name) < sizeof wanted.text &&
           bsearch(&wanted, parts, (size_t)count, sizeof *parts, demo_name_order);
}

/* Detects the naming of the files by a substring that only one naming has. */
static inline int demo_names_of(const demo_weights *w) {
    for (int64_t s = 0; s < w->count; s++)
        for (int64_t i = 0; i < seqpar_safetensors_count(w->shards[s].file); i++) {
            const char *name = seqpar_safetensors_at(w->shards[s].file, i)->name;
            if (strstr(name, ".qkv_proj.")) return DEMO_NAMES_FUSED;
            if (strstr(name, ".block_sparse_moe.")) return DEMO_NAMES_MIXTRAL;
        }
    return DEMO_NAMES_PLAIN;
}

/* Refuses a file with tensors that this model would leave unread. */
static seqpar_status demo_refuse_foreign(const seqpar_llama *model, const demo_name *parts,
                                         const demo_weights *w, const demo_shard *shard,
                                         seqpar_error *error) {
    for (int64_t i = 0; i < seqpar_safetensors_count(shard->file); i++) {
        const char *name = seqpar_safetensors_at(shard->file, i)->name;
        if (demo_is_part(parts, model->tensor_count, name) || demo_is_inv_freq(name)) continue;
        bool head = !strcmp(name, "lm_head.weight");
        if (head && model->config.score) continue; /* a score head takes its place */
        if (head && model->config.tied) {
            seqpar_status status = demo_same_table(w, shard->path, error);
            if (status) return status;
            continue;
        }
        return seqpar_fail(
            error, SEQPAR_ERR_FILE_TENSOR,
            "%s: tensor \"%s\" is not a tensor of the model that config.json describes; take "
            "the config.json that belongs to these weights%s",
            shard->path, name,
            model->config.score ? ", or name the head by --value_head_prefix" : "");
    }
    return SEQPAR_OK;
}

/* Refuses a reward model's folder without its score head: a newly initialized head would give
   random scores. */
static inline seqpar_status demo_head_there(const seqpar_llama *model, const char *folder,
                                            seqpar_error *error) {
    const char *head = model->tensors[model->tensor_count - 1].name;
    demo_weights w;
    seqpar_status status = demo_weights_open(&w, folder, error);
    if (!status && !demo_weights_find(&w, head))
        status = seqpar_fail(
            error, SEQPAR_ERR_FILE_TENSOR,
            "%s: there is no tensor \"%s\", so this is no reward model; give a folder that "
            "train_rm wrote, or name the head by --value_head_prefix",
            w.count > 1 ? w.index : w.shards[0].path, head);
    if (w.count) demo_weights_close(&w);
    return status;
}

/* Opens a folder's weights; a tensor that the model does not have is refused. On success the
   caller calls demo_weights_close. */
static seqpar_status demo_model_weights(demo_weights *w, const seqpar_llama *model,
                                        const char *folder, seqpar_error *error) {
    seqpar_status status = demo_weights_open(w, folder, error);
    if (status) return status;
    demo_name *parts = demo_part_names(model, demo_names_of(w));
    for (int64_t i = 0; !status && i < w->count; i++)
        status = demo_refuse_foreign(model, parts, w, &w->shards[i], error);
    free(parts);
    if (status) demo_weights_close(w);
    return status;
}
#endif
