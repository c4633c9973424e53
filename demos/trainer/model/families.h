/* SPDX-License-Identifier: MIT OR Unlicense */
/* families.h - the supported model families of Hugging Face. Each has a row in demo_families:
 * what its config.json may contain, and the defaults of missing keys, which are those of
 * transformers. */
#ifndef DEMO_FAMILIES_H
#define DEMO_FAMILIES_H

#include <stdbool.h>
#include <stdint.h>

/* ---- keys of config.json ---- */

static const char demo_read_key[] = "read", demo_any_value[] = "any";
/* value: "read" if the key is used; "any" if the results do not depend on it; else the only
   value besides null that is accepted */
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
    {"attention_dropout", demo_read_key},
    {"pretraining_tp", demo_any_value}, /* splits matmuls; only the order of sums changes */
    {"use_mrope", "false"},
    {"use_sliding_window", "false"},
    {"rope_interleaved", "false"},
    {"partial_rotary_factor", "1"},
    {"is_llama_config", "true"},
    {"num_labels", "1"},
    {"quantization_config", "null"},
    {"auto_map", demo_any_value}, /* names code of the same model */
    {"_attn_implementation_autoset", demo_any_value},
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
    {"unk_token_id", demo_any_value},
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
    /* sampling parameters, which are options here */
    {"max_length", demo_any_value},
    {"min_length", demo_any_value},
    {"do_sample", demo_any_value},
    {"temperature", demo_any_value},
    {"top_k", demo_any_value},
    {"top_p", demo_any_value},
    {"repetition_penalty", demo_any_value},
    {"num_beams", demo_any_value},
    {"unsloth_fixed", demo_any_value},
    {"unsloth_version", demo_any_value},
    {"mean", demo_any_value},
    {"std", demo_any_value},
    {"value_head_prefix", demo_any_value}, /* of reward models; an option names
                                              the head */
};

/* The keys of each rope_type, indexed by SEQPAR_ROPE_... */
enum { DEMO_ROPE_KEYS = 14 };
static const struct {
    const char *name;
    demo_config_key keys[DEMO_ROPE_KEYS]; /* NULL ends them */
} demo_ropes[] = {
/* clang-format off */
#define DEMO_EVERY_ROPE \
    {"rope_theta", demo_read_key}, {"rope_type", demo_read_key}, {"type", demo_read_key}, \
        {"partial_rotary_factor", "1"}, {"attn_factor", "1"}
    /* clang-format on */
    {"default", {DEMO_EVERY_ROPE}},
    {"linear", {DEMO_EVERY_ROPE, {"factor", demo_read_key}}},
    {"dynamic",
     {DEMO_EVERY_ROPE,
      {"factor", demo_read_key},
      {"original_max_position_embeddings", demo_any_value}}},
    {"llama3",
     {DEMO_EVERY_ROPE,
      {"factor", demo_read_key},
      {"low_freq_factor", demo_read_key},
      {"high_freq_factor", demo_read_key},
      {"original_max_position_embeddings", demo_read_key}}},
    {"yarn",
     {DEMO_EVERY_ROPE,
      {"factor", demo_read_key},
      {"beta_fast", demo_read_key},
      {"beta_slow", demo_read_key},
      {"attention_factor", demo_read_key},
      {"mscale", demo_read_key},
      {"mscale_all_dim", demo_read_key},
      {"truncate", demo_read_key},
      {"original_max_position_embeddings", demo_read_key}}}};
#undef DEMO_EVERY_ROPE
enum { DEMO_ROPES = sizeof demo_ropes / sizeof *demo_ropes };

/* ---- families of models ---- */

/* what "sliding_window" does */
enum {
    DEMO_WINDOW_NONE,  /* nothing: it must be null, or switched off */
    DEMO_WINDOW_ALL,   /* applies to all layers */
    DEMO_WINDOW_LAYERS /* applies to layers of layer_types, or from max_window_layers on */
};

/* which keys of config.json describe the experts */
enum { DEMO_EXPERTS_NONE, DEMO_EXPERTS_MIXTRAL, DEMO_EXPERTS_QWEN };

enum { DEMO_FAMILY_KEYS = 12 };
typedef struct {
    const char *type, *causal, *sequence;
    double theta;     /* default of rope_theta */
    int64_t head_dim; /* default; 0: hidden_size / num_attention_heads */
    bool tied;        /* default of tie_word_embeddings */
    /* num_key_value_heads is required: no default can be assumed */
    bool kv_heads;
    bool qkv_bias, qk_norm, no_rope;
    int window, experts;
    bool plain_rope; /* rope_type must be default: transformers treats yarn as longrope there */
    demo_config_key keys[DEMO_FAMILY_KEYS]; /* override demo_config_keys; NULL ends them */
} demo_family;

/* clang-format off */
#define DEMO_LAYER_KEYS \
    {"use_sliding_window", demo_read_key}, {"max_window_layers", demo_read_key}, \
        {"layer_types", demo_read_key}
/* clang-format on */
#define DEMO_NAMED(type_name, name) \
    .type = type_name, .causal = name "ForCausalLM", \
    .sequence = name "ForSequenceClassification"
static const demo_family demo_families[] = {
    {DEMO_NAMED("llama", "Llama"), .theta = 1e4,
     .keys = {{"attention_bias", demo_read_key}, {"mlp_bias", demo_read_key}}},
    {DEMO_NAMED("mistral", "Mistral"), .theta = 1e4, .kv_heads = true,
     .window = DEMO_WINDOW_ALL},
    {DEMO_NAMED("qwen2", "Qwen2"), .theta = 1e4, .kv_heads = true, .qkv_bias = true,
     .window = DEMO_WINDOW_LAYERS, .keys = {DEMO_LAYER_KEYS}},
    {DEMO_NAMED("qwen3", "Qwen3"), .theta = 1e4, .head_dim = 128, .kv_heads = true,
     .qk_norm = true, .window = DEMO_WINDOW_LAYERS,
     .keys = {DEMO_LAYER_KEYS, {"attention_bias", demo_read_key}}},
    {DEMO_NAMED("smollm3", "SmolLM3"), .theta = 2e6, .tied = true, .kv_heads = true,
     .no_rope = true,
     .keys = {{"attention_bias", demo_read_key},
              {"mlp_bias", demo_read_key},
              {"layer_types", demo_read_key},
              {"no_rope_layers", demo_read_key},
              {"no_rope_layer_interval", demo_read_key}}},
    {DEMO_NAMED("phi3", "Phi3"), .theta = 1e4, .window = DEMO_WINDOW_ALL, .plain_rope = true,
     .keys = {{"embd_pdrop", "0"},
              {"resid_pdrop", "0"},
              {"original_max_position_embeddings", demo_any_value}}},
    {DEMO_NAMED("mixtral", "Mixtral"), .theta = 1e6, .kv_heads = true,
     .window = DEMO_WINDOW_ALL, .experts = DEMO_EXPERTS_MIXTRAL,
     .keys = {{"num_local_experts", demo_read_key},
              {"num_experts_per_tok", demo_read_key},
              {"router_jitter_noise", "0"},
              {"output_router_logits", demo_any_value},
              {"router_aux_loss_coef", demo_any_value}}},
    {DEMO_NAMED("qwen3_moe", "Qwen3Moe"), .theta = 1e4, .kv_heads = true, .qk_norm = true,
     .experts = DEMO_EXPERTS_QWEN,
     .keys = {{"attention_bias", demo_read_key},
              {"num_experts", demo_read_key},
              {"num_local_experts", demo_read_key},
              {"num_experts_per_tok", demo_read_key},
              {"moe_intermediate_size", demo_read_key},
              {"decoder_sparse_step", demo_read_key},
              {"norm_topk_prob", demo_read_key},
              {"mlp_only_layers", "[]"},
              {"output_router_logits", demo_any_value},
              {"router_aux_loss_coef", demo_any_value}}},
};
#undef DEMO_LAYER_KEYS
#undef DEMO_NAMED
enum { DEMO_FAMILIES = sizeof demo_families / sizeof *demo_families };
#endif
