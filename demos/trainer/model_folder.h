/* SPDX-License-Identifier: MIT OR Unlicense */
/* model_folder.h - model folders in Hugging Face's form: config.json, and which tensors belong
 * into model.safetensors.
 *
 * What is read here is a plain Llama. Every key of config.json stands in the table below, or is
 * refused by name: a model that is computed otherwise than its makers meant would train without
 * a word. The same goes for every tensor. */
#ifndef DEMO_MODEL_FOLDER_H
#define DEMO_MODEL_FOLDER_H

#include <math.h>
#include <stdbool.h>
#include <cjson/cJSON.h>
#include "files.h"
#include "memory.h"
#include "seqpar_llama.h"
#include "seqpar_safetensors.h"
#include "weights.h"

enum { DEMO_CONFIG_BYTES = 1 << 20 }; /* a thousand labels are 50 KB */

/* ---- which keys there are ---- */

static const char demo_read_key[] = "read", demo_any_value[] = "any";
/* value: read; any, since the numbers do not hang on it; or the one it may have beside null */
typedef struct {
    const char *key, *value;
} demo_config_key;

static const demo_config_key demo_config_keys[] = {
    {"architectures", demo_read_key},
    {"model_type", demo_read_key},
    {"num_hidden_layers", demo_read_key},
    {"hidden_size", demo_read_key},
    {"num_attention_heads", demo_read_key},
    {"num_key_value_heads", demo_read_key},
    {"head_dim", demo_read_key},
    {"intermediate_size", demo_read_key},
    {"vocab_size", demo_read_key},
    {"rms_norm_eps", demo_read_key},
    {"rope_theta", demo_read_key},
    {"rope_parameters", demo_read_key},
    {"rope_scaling", demo_read_key},
    {"tie_word_embeddings", demo_read_key},
    {"sliding_window", demo_read_key},
    {"hidden_act", "\"silu\""},
    {"attention_bias", "false"},
    {"mlp_bias", "false"},
    {"attention_dropout", "0"},
    {"pretraining_tp", "1"},
    {"use_sliding_window", "false"},
    {"rope_interleaved", "false"},
    {"partial_rotary_factor", "1"},
    {"is_llama_config", "true"},
    {"num_labels", "1"},
    {"quantization_config", "null"},
    {"auto_map", "null"},
    {"layer_types", "null"},
    {"is_decoder", demo_any_value},
    {"is_encoder_decoder", "false"},
    {"max_position_embeddings", demo_any_value},
    {"max_window_layers", demo_any_value},
    {"initializer_range", demo_any_value},
    {"use_cache", demo_any_value},
    {"bos_token_id", demo_any_value},
    {"eos_token_id", demo_any_value},
    {"pad_token_id", demo_any_value},
    {"id2label", demo_any_value},
    {"label2id", demo_any_value},
    {"problem_type", demo_any_value},
    {"transformers_version", demo_any_value},
    {"torch_dtype", demo_any_value},
    {"dtype", demo_any_value},
    {"_name_or_path", demo_any_value},
    {"return_dict", demo_any_value},
    {"output_hidden_states", demo_any_value},
    {"output_attentions", demo_any_value},
    {"torchscript", demo_any_value},
    {"transformers.js_config", demo_any_value},
    {"unsloth_fixed", demo_any_value},
    {"unsloth_version", demo_any_value},
    {"mean", demo_any_value},
    {"std", demo_any_value},
    {"value_head_prefix", demo_any_value}, /* of reward models; what the head is called is an
                                              option */
};

/* Those of each rope_type: SEQPAR_ROPE_.. is its place. */
static const struct {
    const char *name;
    demo_config_key keys[12]; /* NULL ends them */
} demo_ropes[] = {
#define DEMO_ROPE_KEYS \
    {"rope_theta", demo_read_key}, {"rope_type", demo_read_key}, {"type", demo_read_key}, \
        {"partial_rotary_factor", "1"}
    {"default", {DEMO_ROPE_KEYS}},
    {"linear", {DEMO_ROPE_KEYS, {"factor", demo_read_key}}},
    {"dynamic",
     {DEMO_ROPE_KEYS,
      {"factor", demo_read_key},
      {"original_max_position_embeddings", demo_any_value}}},
    {"llama3",
     {DEMO_ROPE_KEYS,
      {"factor", demo_read_key},
      {"low_freq_factor", demo_read_key},
      {"high_freq_factor", demo_read_key},
      {"original_max_position_embeddings", demo_read_key}}},
    {"yarn",
     {DEMO_ROPE_KEYS,
      {"factor", demo_read_key},
      {"beta_fast", demo_read_key},
      {"beta_slow", demo_read_key},
      {"attention_factor", demo_read_key},
      {"mscale", demo_read_key},
      {"mscale_all_dim", demo_read_key},
      {"truncate", demo_read_key},
      {"original_max_position_embeddings", demo_read_key}}}};
#undef DEMO_ROPE_KEYS
enum { DEMO_ROPES = sizeof demo_ropes / sizeof *demo_ropes };

/* ---- which models there are ---- */

static const struct {
    const char *type, *causal, *sequence;
    int windows; /* sliding_window acts */
} demo_families[] = {
    {"llama", "LlamaForCausalLM", "LlamaForSequenceClassification", 0},
    {"mistral", "MistralForCausalLM", "MistralForSequenceClassification", 1}};
enum { DEMO_FAMILIES = sizeof demo_families / sizeof *demo_families };

/* ---- config.json: Hugging Face's names ---- */

/* As transformers 4 writes it and 5 reads it. max_position_embeddings: where dynamic ends. */
static inline void demo_rope_text(char *text, size_t size, const seqpar_llama_rope *r) {
    static const char *const bounds[][2] = {{"low_freq_factor", "high_freq_factor"},
                                            {"beta_slow", "beta_fast"}};
    const char *const *bound = bounds[r->type == SEQPAR_ROPE_YARN];
    int used = snprintf(text, size, "  \"rope_scaling\": {\"rope_type\": \"%s\", \"factor\": %.17g",
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

static inline seqpar_status demo_save_config(const char *folder, const seqpar_llama_config *c,
                                      seqpar_error *error) {
    char path[4352], text[2048], rope[512] = "", window[64] = "";
    int family = c->window > 0; /* the first that computes as this one does */
    if (c->window)
        snprintf(window, sizeof window, "  \"sliding_window\": %lld,\n", (long long)c->window);
    if (c->rope.type) demo_rope_text(rope, sizeof rope, &c->rope);
    snprintf(path, sizeof path, "%s/config.json", folder);
    int size = snprintf(
        text, sizeof text,
        "{\n  \"architectures\": [\"%s\"],\n%s%s  \"model_type\": \"%s\",\n  \"hidden_act\": "
        "\"silu\",\n"
        "  \"num_hidden_layers\": %lld,\n  \"hidden_size\": %lld,\n  \"num_attention_heads\": "
        "%lld,\n"
        "  \"num_key_value_heads\": %lld,\n  \"head_dim\": %lld,\n  \"intermediate_size\": "
        "%lld,\n  \"vocab_size\": %lld,\n"
        "  \"rope_theta\": %.17g,\n%s"
        "  \"rms_norm_eps\": %.17g,\n  \"tie_word_embeddings\": %s,\n"
        "  \"bos_token_id\": 256,\n  \"eos_token_id\": 257,\n  \"pad_token_id\": 258\n}\n",
        c->score ? demo_families[family].sequence : demo_families[family].causal,
        c->score ? "  \"num_labels\": 1,\n" : "", window, demo_families[family].type,
        (long long)c->layers, (long long)c->hidden,
        (long long)c->heads, (long long)c->kv_heads, (long long)c->head_dim,
        (long long)c->intermediate, (long long)c->vocab, c->rope_theta, rope, c->rms_eps,
        c->tied ? "true" : "false");
    return seqpar_file_write_atomic(path, text, size, error);
}

/* of: "rope_parameters." inside that object */
typedef struct {
    const cJSON *json;
    const char *path, *of;
    seqpar_error *error;
} demo_config_reader;

/* A value as it stands in the file, for a sentence. */
static const char *demo_config_shown(char shown[64], const cJSON *item) {
    char *text = cJSON_PrintUnformatted(item);
    snprintf(shown, 64, "%.60s", text ? text : "?");
    cJSON_free(text);
    return shown;
}

/* What stands under a key; NULL where it is missing or null. */
static const cJSON *demo_config_item(const demo_config_reader *r, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(r->json, key);
    return cJSON_IsNull(item) ? NULL : item;
}

/* A positive whole number up to `most`; `otherwise`, unless that is 0, where there is none. */
static int64_t demo_config_number(const demo_config_reader *r, const char *key, int64_t most,
                                  int64_t otherwise) {
    const cJSON *item = demo_config_item(r, key);
    double x = cJSON_IsNumber(item) ? item->valuedouble : 0;
    char shown[64];
    if (!item && otherwise) return otherwise;
    if (x >= 1 && x <= (double)most && x == floor(x)) return (int64_t)x;
    if (!item)
        seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                    "%s: \"%s\" is missing; it must be the config.json of a Llama model",
                    r->path, key);
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

/* Every key is one of the table and stands once, with a value that is understood. */
static void demo_config_known(const demo_config_reader *r, const demo_config_key *keys,
                              int count) {
    char shown[64];
    for (const cJSON *item = r->json ? r->json->child : NULL; item; item = item->next) {
        int i = 0;
        while (i < count && strcmp(keys[i].key, item->string)) i++;
        if (i == count)
            seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                        "%s: key \"%s%s\" (%s) is not known here, so the model may be computed "
                        "otherwise than it is meant; take a plain Llama model, or remove the "
                        "key if the numbers do not hang on it",
                        r->path, r->of, item->string, demo_config_shown(shown, item));
        else if (cJSON_GetObjectItemCaseSensitive(r->json, item->string) != item)
            seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                        "%s: key \"%s%s\" stands there twice; remove one of them", r->path,
                        r->of, item->string);
        else if (!demo_config_allows(keys[i].value, item))
            seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                        "%s: \"%s%s\" is %s, but only %s can be computed here; take a plain "
                        "Llama model",
                        r->path, r->of, item->string, demo_config_shown(shown, item),
                        keys[i].value);
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
                    "%s: \"%srope_type\" and \"%stype\" are two; remove one of them", r->path,
                    r->of, r->of);
    if (!item) item = old;
    if (!item) return SEQPAR_ROPE_DEFAULT;
    while (type < DEMO_ROPES &&
           !(cJSON_IsString(item) && !strcmp(item->valuestring, demo_ropes[type].name)))
        type++;
    if (type < DEMO_ROPES) return type;
    seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                "%s: \"%srope_type\" is %s, but only default, linear, dynamic, llama3 and yarn "
                "can be computed here",
                r->path, r->of, demo_config_shown(shown, item));
    return SEQPAR_ROPE_DEFAULT;
}

/* A number that has to be there; 1 with the error. */
static double demo_rope_number(const demo_config_reader *r, const char *key) {
    double x = demo_config_real(r, key, 0);
    if (x > 0 || r->error->status) return x;
    seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT, "%s: \"%s%s\" is missing; give a number above 0",
                r->path, r->of, key);
    return 1;
}

/* What YaRN multiplies cosine and sine by, with a weight of its own. */
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
    rope->attention_factor =
        demo_rope_scale(rope->factor, above) / demo_rope_scale(rope->factor, below);
}

/* of: config.json itself, which has max_position_embeddings */
static void demo_rope_read(const demo_config_reader *r, const demo_config_reader *of,
                           seqpar_llama_rope *rope) {
    int count = 0;
    rope->type = demo_rope_type(r);
    while (count < 12 && demo_ropes[rope->type].keys[count].key) count++;
    demo_config_known(r, demo_ropes[rope->type].keys, count);
    if (r->error->status || rope->type == SEQPAR_ROPE_DEFAULT) return;
    rope->factor = demo_rope_number(r, "factor");
    if (rope->type == SEQPAR_ROPE_DYNAMIC)
        rope->first_positions = demo_rope_number(of, "max_position_embeddings");
    if (rope->type == SEQPAR_ROPE_LLAMA3) {
        rope->low = demo_rope_number(r, "low_freq_factor");
        rope->high = demo_rope_number(r, "high_freq_factor");
    }
    if (rope->type == SEQPAR_ROPE_YARN) demo_rope_yarn(r, rope);
    if (rope->type >= SEQPAR_ROPE_LLAMA3)
        rope->first_positions = demo_rope_number(r, "original_max_position_embeddings");
}

/* transformers 4 has "rope_theta" and "rope_scaling", which may be null; transformers 5 has
   "rope_parameters" with both. */
static void demo_config_rope(const demo_config_reader *r, seqpar_llama_config *c) {
    static const char *const places[] = {"rope_scaling", "rope_parameters"};
    double theta = demo_config_real(r, "rope_theta", 0);
    seqpar_llama_rope ropes[2] = {{0}};
    char shown[64], of[32];
    for (int i = 0; i < 2; i++) {
        demo_config_reader inner = {demo_config_item(r, places[i]), r->path, of, r->error};
        snprintf(of, sizeof of, "%s.", places[i]);
        if (!inner.json) continue;
        if (!cJSON_IsObject(inner.json))
            seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                        "%s: \"%s\" is %s, but it must be null or an object with a rope_type",
                        r->path, places[i], demo_config_shown(shown, inner.json));
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
        seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                    "%s: \"rope_scaling\" and \"rope_parameters\" both scale; remove one of them",
                    r->path);
    c->rope = ropes[ropes[1].type != SEQPAR_ROPE_DEFAULT];
    c->rope_theta = theta > 0 ? theta : 10000.0;
}

/* The family by its model_type; DEMO_FAMILIES: none of these. */
static int demo_family(const cJSON *json) {
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(json, "model_type");
    int family = 0;
    while (family < DEMO_FAMILIES && !(cJSON_IsString(type) &&
                                       !strcmp(type->valuestring, demo_families[family].type)))
        family++;
    return family;
}

/* What the makers call the model. */
static int demo_config_kind(const demo_config_reader *r) {
    const cJSON *type = demo_config_item(r, "model_type"),
                *list = demo_config_item(r, "architectures"),
                *first = cJSON_IsArray(list) ? list->child : NULL;
    const char *name = cJSON_IsString(first) && !first->next ? first->valuestring : "";
    char shown[64];
    int family = demo_family(r->json);
    if (family == DEMO_FAMILIES) {
        seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                    "%s: \"model_type\" is %s, but only \"llama\" and \"mistral\" can be "
                    "computed here; take a plain Llama model",
                    r->path, type ? demo_config_shown(shown, type) : "missing");
        return 0;
    }
    if (list && strcmp(name, demo_families[family].causal) &&
        strcmp(name, demo_families[family].sequence))
        seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                    "%s: \"architectures\" is %s, but only [\"%s\"] or [\"%s\"] can be computed "
                    "here",
                    r->path, demo_config_shown(shown, list), demo_families[family].causal,
                    demo_families[family].sequence);
    return family;
}

/* sliding_window: of Mistral it acts, of Llama it would not, which nobody means. */
static int64_t demo_config_window(const demo_config_reader *r, int family) {
    const cJSON *window = demo_config_item(r, "sliding_window");
    int unused = cJSON_IsFalse(demo_config_item(r, "use_sliding_window"));
    char shown[64];
    if (!window || (unused && !demo_families[family].windows)) return 0;
    if (demo_families[family].windows && !unused)
        return demo_config_number(r, "sliding_window", SEQPAR_MAX_TOKENS, 0);
    seqpar_fail(r->error, SEQPAR_ERR_FILE_FORMAT,
                "%s: \"sliding_window\" is %s, which a model of type %s %s; remove it, or take a "
                "Mistral",
                r->path, demo_config_shown(shown, window), demo_families[family].type,
                unused ? "has whatever \"use_sliding_window\" says" : "does not have");
    return 0;
}

static void demo_config_read(const demo_config_reader *r, seqpar_llama_config *c) {
    int family = demo_config_kind(r);
    demo_config_known(r, demo_config_keys,
                      (int)(sizeof demo_config_keys / sizeof *demo_config_keys));
    c->window = demo_config_window(r, family);
    c->layers = demo_config_number(r, "num_hidden_layers", SEQPAR_MAX_LAYERS, 0);
    c->hidden = demo_config_number(r, "hidden_size", SEQPAR_MAX_WIDTH, 0);
    c->heads = demo_config_number(r, "num_attention_heads", SEQPAR_MAX_WIDTH, 0);
    c->kv_heads = demo_config_number(r, "num_key_value_heads", SEQPAR_MAX_WIDTH, c->heads);
    c->head_dim = demo_config_number(r, "head_dim", SEQPAR_MAX_WIDTH,
                                     c->hidden / c->heads + !(c->hidden / c->heads));
    c->intermediate = demo_config_number(r, "intermediate_size", SEQPAR_MAX_WIDTH, 0);
    c->vocab = demo_config_number(r, "vocab_size", SEQPAR_MAX_VOCAB, 0);
    c->rms_eps = demo_config_real(r, "rms_norm_eps", 1e-6);
    c->tied = demo_config_truth(r, "tie_word_embeddings");
    demo_config_rope(r, c);
}

/* The object in a folder's config.json, for cJSON_Delete; NULL with the error set. path
   (size) becomes the file's. */
static cJSON *demo_config_open(const char *folder, char *path, size_t room,
                               seqpar_error *error) {
    const char *why;
    size_t size;
    snprintf(path, room, "%s/config.json", folder);
    char *text = demo_read_whole(path, DEMO_CONFIG_BYTES, &size, &why);
    if (!text) {
        seqpar_fail(error, SEQPAR_ERR_FILE_OPEN,
                    "%s cannot be read: %s; give a folder with a Llama model", path, why);
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
                    "%s: no JSON object {...} from byte %lld of %lld on; it must be the "
                    "config.json of a Llama model",
                    path, (long long)(end - text), (long long)size);
    free(text);
    return json;
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

/* The longest text its makers meant it for, 0 where that is not said: beyond it positions
   are new to the model, but nothing fails. */
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

/* ---- weights: no tensor that the model does not take ---- */

/* Old files hold what rotary embeddings are computed from: that is made anew. */
static bool demo_is_inv_freq(const char *name) {
    static const char end[] = ".rotary_emb.inv_freq";
    size_t length = strlen(name), tail = sizeof end - 1;
    return length > tail && !strcmp(name + length - tail, end);
}

/* A tied head that is in the file all the same must be the embedding. */
static seqpar_status demo_same_table(const demo_weights *w, const char *path,
                                     seqpar_error *error) {
    enum { PIECE = 4096 };
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
    for (int64_t at = 0; !status && at < head->count; at += PIECE) {
        double values[2][PIECE];
        seqpar_safetensors_part part = {
            NULL, at, head->count - at < PIECE ? head->count - at : (int64_t)PIECE, 1};
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

/* Refuses a file with tensors that this model would leave unread. */
static seqpar_status demo_refuse_foreign(const seqpar_llama *model, const demo_weights *w,
                                         const demo_shard *shard, seqpar_error *error) {
    for (int64_t i = 0; i < seqpar_safetensors_count(shard->file); i++) {
        const char *name = seqpar_safetensors_at(shard->file, i)->name;
        int64_t k = 0;
        while (k < model->tensor_count && strcmp(model->tensors[k].name, name)) k++;
        if (k < model->tensor_count || demo_is_inv_freq(name)) continue;
        bool head = !strcmp(name, "lm_head.weight");
        if (head && model->config.score) continue; /* a score head takes its place */
        if (head && model->config.tied) {
            seqpar_status status = demo_same_table(w, shard->path, error);
            if (status) return status;
            continue;
        }
        return seqpar_fail(
            error, SEQPAR_ERR_FILE_TENSOR,
            "%s: tensor \"%s\" is no part of this model and would be left unread; take a plain "
            "Llama model%s",
            shard->path, name,
            model->config.score ? ", or name the head by --value_head_prefix" : "");
    }
    return SEQPAR_OK;
}

/* A model that gives rewards has learnt to: a new head would give noise. */
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

/* The weights of a folder, for this model and no other. To be closed if they are opened. */
static seqpar_status demo_model_weights(demo_weights *w, const seqpar_llama *model,
                                        const char *folder, seqpar_error *error) {
    seqpar_status status = demo_weights_open(w, folder, error);
    for (int64_t i = 0; !status && i < w->count; i++)
        status = demo_refuse_foreign(model, w, &w->shards[i], error);
    if (status && w->count) demo_weights_close(w);
    return status;
}
#endif
