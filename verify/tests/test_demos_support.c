/* SPDX-License-Identifier: MIT OR Unlicense */
/* Tests of what the demos stand on: options, data, pairs, arith, plot, progress.
 *
 *     test_demos_support [DIRECTORY]     with a directory of real data, its files are read as well
 *
 * Prints "ok NAME" or "FAIL NAME line: what", then "N passed, N failed". */
#define STB_DS_IMPLEMENTATION
#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include "trainer/run/options.h"
#include "trainer/data/holdout.h"
#include "trainer/data/pairs.h"
#include "trainer/data/arith.h"
#include "trainer/log/plot.h"
#include "trainer/log/progress.h"

static char why[2048];    /* why the current test failed */
static char scratch[256]; /* a directory of our own, removed at the end */
static const char *real_data;

#define EXPECT(condition) \
    do { \
        if (!(condition)) \
            return snprintf(why, sizeof why, "%d: %s", __LINE__, #condition), false; \
    } while (0)
#define EXPECT_TEXT(got, want) \
    do { \
        if (strcmp((got), (want))) \
            return snprintf(why, sizeof why, "%d: got \"%.900s\", want \"%.900s\"", __LINE__, \
                            (got), (want)), \
                   false; \
    } while (0)

static bool holds(const char *text, const char *part) { return strstr(text, part) != NULL; }

static const char *in_scratch(const char *name) {
    static char paths[4][512];
    static int turn;
    char *path = paths[turn++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", scratch, name);
    return path;
}

static const char *make_file_sized(const char *name, const char *bytes, size_t size) {
    const char *path = in_scratch(name);
    demo_error error;
    if (demo_write_atomically(path, bytes, size, &error)) printf("# %s\n", error.text);
    return path;
}

static const char *make_file(const char *name, const char *text) {
    return make_file_sized(name, text, strlen(text));
}

/* Everything a printer prints, for free(). */
typedef void (*printer)(const void *subject, FILE *out);
static char *printed(printer print, const void *subject) {
    static char *text;
    static size_t size;
    FILE *out = open_memstream(&text, &size);
    print(subject, out);
    fclose(out);
    return text;
}

/* ---- options ----------------------------------------------------- */

/* A small trainer with every type of variable. */
static struct {
    int64_t max_len, warmup_steps, ring_attn_size;
    double learning_rate, betas[2];
    const char *dataset, *optim, *truncation;
    bool packing, pretrain_mode;
} config;

static const demo_binding bindings[] = {
    {"max_len", &config.max_len, DEMO_INT, "2048", "longest document in tokens",
     DEMO_AT_LEAST(1)},
    {"warmup_steps", &config.warmup_steps, DEMO_INT, "-1", "steps that warm up",
     DEMO_AT_LEAST(-1)},
    {"ring_attn_size", &config.ring_attn_size, DEMO_INT, "1", "ranks that share a sequence",
     DEMO_BETWEEN(1, 1024)},
    {"learning_rate", &config.learning_rate, DEMO_FLOAT, "5e-6", "peak learning rate",
     DEMO_ABOVE(0)},
    {"adam_betas", config.betas, DEMO_FLOATS2, "0.9,0.95", "decay of the two moments",
     DEMO_BETWEEN(0, 1)},
    {"dataset", &config.dataset, DEMO_STRING, NULL, "training data", DEMO_ANY},
    {"optim", &config.optim, DEMO_STRING, "adamw", "optimizer", DEMO_ANY},
    {"truncation", &config.truncation, DEMO_STRING, "drop", "what becomes of long documents",
     DEMO_ANY},
    {"packing_samples", &config.packing, DEMO_FLAG, NULL, "several documents in a row",
     DEMO_ANY},
    {"pretrain_mode", &config.pretrain_mode, DEMO_FLAG, NULL, "train on all of the text",
     DEMO_ANY},
};

static demo_options options;
static demo_error message;

/* Parses words separated by single spaces; they stay alive until the next call. */
static int parse(const char *line) {
    static char words[4096], *argv[512];
    int argc = 1;
    argv[0] = words;
    snprintf(words, sizeof words, "bin/trainer %s", line);
    for (char *space = words; (space = strchr(space, ' '));) {
        *space++ = 0;
        if (*space) argv[argc++] = space;
    }
    options = (demo_options){.tool = "sft",
                             .bindings = bindings,
                             .binding_count = sizeof bindings / sizeof bindings[0]};
    message.text[0] = 0;
    return demo_options_parse(&options, argc, argv, &message);
}

static bool known_kind(const char *kind) {
    return demo_list_has("flag,int,float,string,floats2,strings,optional", kind) ||
           (!strncmp(kind, "choice:", 7) && kind[7]);
}

static bool table_is_sound(void) {
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++) {
        const demo_known *known = &demo_known_options[i], *target = demo_known_target(known);
        snprintf(message.text, sizeof message.text, "%s", known->name);
        EXPECT(i == 0 || strcmp(demo_known_options[i - 1].name, known->name) < 0);
        EXPECT(demo_known_find(known->name) == known); /* no other name equal up to - and _ */
        EXPECT(known_kind(known->kind) && *known->source && *known->tools);
        EXPECT(target && strncmp(target->role, "alias:", 6) &&
               !strcmp(target->kind, known->kind));
        EXPECT(!strcmp(known->role, "real") || !strcmp(known->role, "noeffect") ||
               !strcmp(known->role, "prepared") || demo_is_role(known, "refused") ||
               target != known);
        EXPECT(!strcmp(known->role, "real") || target != known || strlen(known->note) > 8);
        EXPECT(strlen(known->name) < DEMO_NAME_LIMIT);
    }
    return true;
}

/* Calls visit for each comma-separated word of a list. */
static bool each_word(const char *list, bool (*visit)(const char *word, const void *context),
                      const void *context) {
    char word[DEMO_NAME_LIMIT];
    for (const char *at = list; *at; at += strcspn(at, ", "), at += strspn(at, ", ")) {
        size_t length = strcspn(at, ", ");
        memcpy(word, at, length);
        word[length] = 0;
        if (!visit(word, context)) return false;
    }
    return true;
}

static bool tool_is_served(const char *tool, const void *context) {
    const demo_known *known = context, *target = demo_known_target(known);
    snprintf(message.text, sizeof message.text, "--%s for %s", known->name, tool);
    EXPECT(demo_list_has("sft,dpo,rm,kto,kd,prm,ppo,generate", tool));
    /* an alias for a tool leads to something for that tool */
    EXPECT(demo_list_has(target->tools, tool));
    return true;
}

static bool tools_are_sound(void) {
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++)
        if (!each_word(demo_known_options[i].tools, tool_is_served, &demo_known_options[i]))
            return false;
    return true;
}

/* What people type: the options of OpenRLHF 0.5, 0.8 and head, of the published
 * sequence-parallel examples of 360-LLaMA-Factory and axolotl, and this project's own. Kept
 * apart from options.tsv on purpose. */
static const char names_people_type[] =
    /* shared by OpenRLHF's trainers */
    "save_path ckpt_path save_steps eval_steps logging_steps max_ckpt_num max_ckpt_mem "
    "load_checkpoint "
    "micro_train_batch_size train_batch_size max_epochs max_norm learning_rate lr_warmup_ratio "
    "lr_scheduler l2 "
    "adam_betas seed local_rank zero_stage zpg bf16 adam_offload flash_attn grad_accum_dtype "
    "overlap_comm "
    "gradient_checkpointing gradient_checkpointing_use_reentrant disable_fast_tokenizer "
    "aux_loss_coef "
    "ring_attn_size ring_head_stride packing_samples load_in_4bit lora_rank lora_alpha "
    "target_modules "
    "lora_dropout pretrain dataset prompt_data dataset_probs train_split eval_split "
    "prompt_data_probs "
    "prompt_split max_samples max_len input_template apply_chat_template "
    "tokenizer_chat_template use_wandb "
    "wandb_org wandb_group wandb_project wandb_run_name use_tensorboard "
    /* by task */
    "pretrain_mode input_key output_key multiturn beta ipo label_smoothing nll_loss_coef "
    "ref_pretrain ref_offload "
    "prompt_key chosen_key rejected_key loss margin_loss compute_fp32_loss value_head_prefix "
    "desirable_loss_weight undesirable_loss_weight label_key teacher_model teacher_offload "
    "kd_coef "
    "placeholder_token reward_tokens num_episodes rollout_batch_size micro_rollout_batch_size "
    "prompt_max_len "
    "generate_max_len ptx_coef eps_clip value_clip lambd gamma normalize_reward top_p "
    "temperature "
    "freezing_actor_steps n_samples_per_prompt save_value_network actor_learning_rate "
    "critic_learning_rate "
    "kl_target init_kl_coef use_kl_estimator_k3 reward_clip_range enable_ema "
    "advantage_estimator reward_pretrain "
    "remote_rm_url critic_pretrain pretrain_data pretrain_data_probs pretrain_split "
    "actor_init_on_gpu "
    "ref_num_nodes reward_num_nodes actor_num_nodes critic_num_nodes ref_num_gpus_per_node "
    "reward_num_gpus_per_node actor_num_gpus_per_node critic_num_gpus_per_node "
    "colocate_actor_ref "
    "colocate_critic_reward ref_reward_offload vllm_num_engines vllm_tensor_parallel_size "
    "vllm_sync_backend "
    "enable_prefix_caching enforce_eager perf eval_task micro_batch_size max_new_tokens "
    "greedy_sampling "
    "repetition_penalty best_of_n post_processor iter reward_template enable_csft csft_prompt "
    "output_path "
    "max_num_seqs tp_size "
    /* 0.8 */
    "attn_implementation save_hf_ckpt disable_ds_ckpt use_ds_universal_ckpt deepcompile "
    "full_determinism "
    "use_liger_kernel ds_tensor_parallel_size eval_dataset use_ms dataset_split min_lr_ratio "
    "eps_clip_low_high "
    "dual_clip policy_loss_type kl_estimator use_kl_loss kl_horizon entropy_loss_coef "
    "no_advantage_std_norm "
    "overlong_buffer_len overlong_penalty_factor ema_beta use_dynamic_batch "
    "rollout_max_tokens_per_gpu "
    "train_max_tokens_per_gpu vllm_enable_sleep vllm_gpu_memory_utilization "
    "enable_vllm_is_correction "
    "vllm_is_truncated_threshold async_train colocate_all_models deepspeed_enable_sleep "
    "agent_func_path "
    "eval_temperature eval_n_samples_per_prompt dynamic_filtering "
    "dynamic_filtering_reward_range "
    "vllm_generate_batch_size vllm_sync_with_ray "
    /* head */
    "train.batch_size train.micro_batch_size train.max_epochs train.seed adam.lr adam.betas "
    "adam.eps "
    "adam.weight_decay optim muon.lr muon.momentum muon.ns_steps muon.nesterov actor.optim "
    "critic.optim "
    "actor.lr_scheduler critic.lr_scheduler actor.lr_warmup_ratio critic.min_lr_ratio "
    "actor.max_norm "
    "critic.max_norm actor.adam.lr critic.adam.lr ds.zero_stage ds.param_dtype ds.adam_offload "
    "ds.ring_attn_size "
    "ds.ring_attn_head_stride ds.packing_samples ds.lora.rank ds.lora.alpha "
    "ds.lora.target_modules "
    "ds.lora.dropout model.model_name_or_path actor.model_name_or_path "
    "reward.model_name_or_path "
    "critic.model_name_or_path ref.model_name_or_path model.beta model.ipo_enable "
    "model.label_smoothing "
    "model.nll_loss_coef model.aux_loss_coef model.loss_type model.margin_loss_enable "
    "data.dataset data.input_key "
    "data.output_key data.prompt_key data.chosen_key data.rejected_key data.label_key "
    "data.max_len "
    "ckpt.output_dir ckpt.path ckpt.load_enable actor.eps_clip critic.value_clip "
    "algo.advantage.lambd "
    "algo.advantage.gamma algo.kl.init_coef algo.kl.target algo.kl.estimator algo.kl.use_loss "
    "algo.advantage.estimator algo.advantage.is_correction_enable "
    "algo.advantage.is_correction_threshold "
    "algo.advantage.is_correction_type reward.normalize_enable reward.clip_range "
    "reward.stop_properly_penalty_coef rollout.n_samples_per_prompt rollout.batch_size "
    "rollout.micro_batch_size "
    "critic.freezing_steps rollout.max_new_tokens ckpt.save_steps eval.steps eval.dataset "
    "logger.logging_steps "
    "model.gradient_checkpointing_enable "
    /* 360-LLaMA-Factory */
    "sequence_parallel_size sequence_parallel_mode cutoff_len per_device_train_batch_size "
    "gradient_accumulation_steps num_train_epochs lr_scheduler_type lr_scheduler_kwargs "
    "warmup_ratio stage "
    "do_train finetuning_type template overwrite_cache overwrite_output_dir "
    "preprocessing_num_workers output_dir "
    "plot_loss ddp_timeout deepspeed val_size dataset_dir packing neat_packing "
    "shuffle_for_sequence_parallel "
    "model_name_or_path freeze_vision_tower train_mm_proj_only image_resolution "
    "video_resolution logging_dir "
    "save_strategy use_unsloth_gc report_to pref_beta pref_ftx kto_tag "
    /* axolotl */
    "sequence_parallel_degree context_parallel_size heads_k_stride ring_attn_func "
    "sample_packing "
    "eval_sample_packing pad_to_sequence_len sequence_len num_epochs optimizer train_on_inputs "
    "group_by_length "
    "flash_attention xformers_attention warmup_steps evals_per_epoch saves_per_epoch "
    "weight_decay special_tokens "
    "base_model datasets dataset_prepared_path val_set_size min_sample_len tiled_mlp plugins "
    "tf32 "
    "activation_offloading resume_from_checkpoint early_stopping_patience load_in_8bit strict "
    "fsdp fsdp_config "
    "wandb_entity wandb_watch wandb_name wandb_log_model model_type tokenizer_type "
    "field_prompt field_chosen "
    "field_rejected field_completion field_label "
    /* ours */
    "truncation max_steps adam_eps layout schedule pack_len cell z_loss data_parallel_size "
    "world_size "
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "intermediate_size "
    "tie_word_embeddings rope_theta metrics_path device omp_threads json margin_key "
    "remote_rm_timeout "
    "remote_rm_retries remote_rm_backoff value_prefix_head stop_properly_penalty_coef "
    "precompute_ref precompute_ref_log_probs";

static bool name_is_known(const char *name, const void *context) {
    (void)context;
    snprintf(message.text, sizeof message.text, "--%s", name);
    EXPECT(demo_known_find(name) != NULL);
    return true;
}

static bool every_name_is_known(void) {
    return each_word(names_people_type, name_is_known, NULL);
}

static void sample_value(const char *kind, char *text, size_t size) {
    static const char *const samples[][2] = {{"flag", "true"},        {"int", "3"},
                                             {"float", "0.25"},       {"string", "some/path"},
                                             {"floats2", "0.5,0.75"}, {"strings", "a b c"},
                                             {"optional", "auto"}};
    for (size_t i = 0; i < sizeof samples / sizeof samples[0]; i++)
        if (!strcmp(kind, samples[i][0])) snprintf(text, size, "%s", samples[i][1]);
    if (!strncmp(kind, "choice:", 7))
        snprintf(text, size, "%.*s", (int)strcspn(kind + 7, ",="), kind + 7);
}

/* Parses one option for one tool in both spellings, bound to a variable of its type if it is
   real. */
static bool option_parses(const char *tool, const void *context) {
    const demo_known *known = context, *target = demo_known_target(known);
    union {
        bool flag;
        int64_t whole;
        double pair[2];
        const char *text;
    } variable;
    const demo_binding binding = {target->name, &variable, demo_type_of(target->kind),
                                  NULL,         "",        DEMO_ANY};
    char value[64] = "", name[DEMO_NAME_LIMIT + 2], inlined[192], program[] = "trainer";
    char end[] = "--help";
    if (demo_is_role(target, "refused")) return true; /* test_options has them */
    sample_value(known->kind, value, sizeof value);
    snprintf(name, sizeof name, "--%s", known->name);
    snprintf(inlined, sizeof inlined, "--%s=%s", known->name, value);
    char *apart[] = {program, name, value, end}, *joined[] = {program, inlined, end};
    for (int form = 0; form < 2; form++) {
        options = (demo_options){
            .tool = tool, .bindings = &binding, .binding_count = !strcmp(target->role, "real")};
        snprintf(message.text, sizeof message.text, "%s for %s", inlined, tool);
        EXPECT(demo_options_parse(&options, form ? 3 : 4, form ? joined : apart, &message) ==
               0);
        /* the value was taken, so that the last word was reached */
        EXPECT(options.help_wanted);
        EXPECT(demo_options_typed(&options, target->name));
        if (!options.binding_count) continue;
        if (binding.type == DEMO_INT) EXPECT(variable.whole == 3);
        if (binding.type == DEMO_FLAG) EXPECT(variable.flag);
        if (binding.type == DEMO_FLOAT) EXPECT(!(fabs(variable.pair[0] - 0.25) > 0));
        if (binding.type == DEMO_FLOATS2)
            EXPECT(!(fabs(variable.pair[0] - 0.5) > 0) && !(fabs(variable.pair[1] - 0.75) > 0));
        if (binding.type == DEMO_STRING) EXPECT_TEXT(variable.text, value);
    }
    return true;
}

static bool every_option_parses(void) {
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++)
        if (!each_word(demo_known_options[i].tools, option_parses, &demo_known_options[i]))
            return false;
    return true;
}

static bool defaults_come_from_the_table(void) {
    EXPECT(parse("--dataset old --packing_samples --max_len 3") == 0);
    EXPECT(parse("") == 0); /* nothing is left over from before */
    EXPECT(config.max_len == 2048 && config.warmup_steps == -1 && !config.packing &&
           !config.dataset);
    EXPECT(!(fabs(config.learning_rate - 5e-6) > 0) && !(fabs(config.betas[1] - 0.95) > 0));
    EXPECT_TEXT(config.optim, "adamw");
    EXPECT(!demo_options_typed(&options, "max_len"));
    return true;
}

static bool values_land(void) {
    EXPECT(parse("--max-len=7 --max_len 9 --adam_betas .5 .25 --dataset=a=b.jsonl "
                 "--packing_samples --warmup-steps -1") == 0);
    /* the last mention wins */
    EXPECT(config.max_len == 9 && config.packing && config.warmup_steps == -1);
    EXPECT(!(fabs(config.betas[0] - .5) > 0) && !(fabs(config.betas[1] - .25) > 0));
    EXPECT_TEXT(config.dataset, "a=b.jsonl");
    EXPECT(demo_options_typed(&options, "max_len") && !demo_options_typed(&options, "optim"));
    EXPECT(parse("--cutoff_len 5 --sequence_parallel_degree 4 --optimizer adamw_torch "
                 "--adam.betas 0.1,0.2") == 0);
    EXPECT(config.max_len == 5 && config.ring_attn_size == 4 &&
           !(fabs(config.betas[1] - .2) > 0));
    EXPECT_TEXT(config.optim, "adamw"); /* synonyms arrive as the first spelling */
    EXPECT(demo_options_typed(&options, "max-len"));
    return true;
}

static bool flags_take_an_optional_word(void) {
    EXPECT(parse("--packing_samples false --pretrain_mode True") == 0 && !config.packing &&
           config.pretrain_mode);
    EXPECT(parse("--packing_samples --pretrain_mode=off") == 0 && config.packing &&
           !config.pretrain_mode);
    EXPECT(parse("--sample_packing yes --tf32 --flash_attn fa2 --tf32 auto --max_len 3") == 0 &&
           config.packing);
    EXPECT(config.max_len == 3);
    EXPECT(parse("--flash_attn=#2 --max_len 4") == 0 && config.max_len == 4); /* none is near */
    return true;
}

static bool typos_are_named(void) {
    EXPECT(parse("--ring_atn_size 2") == -1);
    EXPECT_TEXT(
        message.text,
        "unknown option --ring_atn_size; did you mean --ring_attn_size? (--help lists all)");
    EXPECT(parse("--learning-rat 1") == -1 &&
           holds(message.text, "did you mean --learning_rate?"));
    EXPECT(parse("--sequence-paralel-size 2") == -1 &&
           holds(message.text, "did you mean --sequence_parallel_size?"));
    EXPECT(parse("--qqqqqqqqqqqqqqqq") == -1);
    EXPECT_TEXT(message.text, "unknown option --qqqqqqqqqqqqqqqq (--help lists all)");
    /* an option of another tool is no help */
    EXPECT(parse("--bta 1") == -1 && !holds(message.text, "--beta?"));
    EXPECT(demo_edit_distance("abc", "abc") == 0 && demo_edit_distance("a-c", "a_c") == 0);
    EXPECT(demo_edit_distance("kitten", "sitting") == 3 && demo_edit_distance("", "abc") == 3);
    return true;
}

static bool bad_values_are_refused(void) {
    static const char *const cases[][2] = {
        {"--max_len many",
         "--max_len is many, but it must be a whole number from 1 to 9223372036854775807"},
        {"--max_len 12x",
         "--max_len is 12x, but it must be a whole number from 1 to 9223372036854775807"},
        {"--max_len 1.5",
         "--max_len is 1.5, but it must be a whole number from 1 to 9223372036854775807"},
        {"--max_len 0",
         "--max_len is 0, but it must be a whole number from 1 to 9223372036854775807"},
        {"--max_len 99999999999999999999", "--max_len is 99999999999999999999, but it must be "
                                           "a whole number from 1 to 9223372036854775807"},
        {"--max_len=",
         "--max_len is empty, but it must be a whole number from 1 to 9223372036854775807"},
        {"--cutoff_len -4",
         "--cutoff_len is -4, but it must be a whole number from 1 to 9223372036854775807"},
        {"--ring_attn_size 2000",
         "--ring_attn_size is 2000, but it must be a whole number from 1 to 1024"},
        {"--learning_rate 0", "--learning_rate is 0, but it must be a finite number above 0"},
        {"--learning_rate nan",
         "--learning_rate is nan, but it must be a finite number above 0"},
        {"--learning_rate inf",
         "--learning_rate is inf, but it must be a finite number above 0"},
        {"--adam_betas 0.9", "--adam_betas is 0.9, but it must be two numbers from 0 to 1"},
        {"--adam_betas 0.9 1.5",
         "--adam_betas is 0.9,1.5, but it must be two numbers from 0 to 1"},
        {"--truncation shorten",
         "--truncation is shorten, but it must be one of drop, cut, cut_both"},
        {"--truncation dropped",
         "--truncation is dropped, but it must be one of drop, cut, cut_both"},
        {"--optim muon", "--optim is muon, but it must be one of adamw, adamw_8bit, sgd"},
        {"--packing_samples=maybe", "--packing_samples is maybe, but it must be true or false"},
        {"--zpg two", "--zpg is two, but it must be a whole number"}, /* even where nothing
                                                                         depends on it */
        {"--mix_strategy interleave_under",
         "--mix_strategy interleave_under is not done here: sets "
         "are read one after the other, or drawn by --dataset_probs "
         "until one is used up; leave it out, or give the weights"},
        {"--max_len", "--max_len needs a value (a whole number), but nothing follows"},
        {"--dataset --max_len 4", "--dataset needs a value (text), but --max_len follows"},
        {"--truncation",
         "--truncation needs a value (one of drop, cut, cut_both), but nothing follows"},
        {"data.jsonl", "stray word data.jsonl; options start with -- (--help lists all)"},
        {"--packing_samples 3", "stray word 3; options start with -- (--help lists all)"},
        {"--flash_attn #fast", "'#fast' is a comment that the shell has handed over; remove it "
                               "from the command"},
        {"--packing_samples # rows",
         "'#' is a comment that the shell has handed over; remove it from the command"},
        {"--flash_attn \t --max_len 3",
         "a word is a blank: something stands behind a backslash at the end of a line, so that "
         "the lines below it are not read; remove it"},
        {"--beta 0.1", "--beta is an option of dpo,kto; this is sft"},
        {"--prompt_data x", "--prompt_data is an option of ppo; this is sft, give --dataset"},
        {"--kd_coef 1", "--kd_coef is an option of kd; this is sft"},
        {"--best_of_n 3", "--best_of_n is an option of generate; this is sft"},
        {"--seed 3", "--seed is known, but this program does not serve it yet"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        EXPECT(parse(cases[i][0]) == -1);
        EXPECT_TEXT(message.text, cases[i][1]);
    }
    return true;
}

static void print_ignored(const void *subject, FILE *out) {
    demo_options_print_ignored(subject, out);
}

static bool options_without_effect_are_told(void) {
    EXPECT(parse("--max_len 4") == 0);
    char *text = printed(print_ignored, &options);
    EXPECT_TEXT(text, "");
    free(text);
    EXPECT(parse("--zpg 2 --max_len 4 --zpg 4") == 0);
    text = printed(print_ignored, &options);
    EXPECT_TEXT(text,
                "no effect here: --zpg (one process on CPU threads; no DeepSpeed engine)\n");
    free(text);
    EXPECT(parse("--ds.zpg 8 --flash_attn --use_wandb key --fsdp full") == 0);
    text = printed(print_ignored, &options);
    EXPECT(holds(text, "--ds.zpg (one process on CPU threads; no DeepSpeed engine)") &&
           holds(text, "; --use_wandb ("));
    EXPECT(strchr(text, '\n') == text + strlen(text) - 1); /* one line */
    free(text);
    return true;
}

static bool too_many_words_are_refused(void) {
    static char line[4096] = "--deepspeed ";
    for (int i = 0; i < 400; i++) strcat(line, "abcdefgh");
    EXPECT(parse(line) == -1 && holds(message.text, "... is not done here: such a file"));
    static char word[9000], program[] = "trainer", name[] = "--target_modules", more[] = "x";
    memset(word, 'a', sizeof word - 1);
    char *argv[] = {program, name, word, more};
    EXPECT(demo_options_parse(&options, 4, argv, &message) == -1);
    EXPECT_TEXT(message.text, "--target_modules needs a value (text), but x follows");
    return true;
}

static void print_help(const void *subject, FILE *out) { demo_options_help(subject, out); }

/* The column where the default stands must be the same in every line that has one. */
static bool help_is_aligned(const char *text) {
    long column = 0;
    int lines = 0;
    for (const char *line = text;
         (line = strstr(line, "\n  --")) && line < strstr(text, "other names");
         line++, lines++) {
        long here = (long)strcspn(line, "[");
        EXPECT(!column || here == column);
        column = here;
    }
    EXPECT(lines == options.binding_count);
    return true;
}

static bool help_shows_everything(void) {
    EXPECT(parse("-h --max_len broken") == 0 && options.help_wanted);
    EXPECT(parse("--help") == 0 && options.help_wanted);
    char *text = printed(print_help, &options);
    EXPECT(holds(text, "usage: trainer "));
    EXPECT(holds(text, "--max_len                  N    [2048] longest document in tokens\n"));
    EXPECT(holds(text, "[drop] what becomes of long documents; one of drop, cut, cut_both\n"));
    EXPECT(holds(text, "--cutoff_len                           = --max_len\n"));
    EXPECT(holds(text, "--zpg                                  one process on CPU threads; no "
                       "DeepSpeed engine\n"));
    EXPECT(!holds(text, "--kl_horizon")); /* of another tool */
    EXPECT(help_is_aligned(text));
    free(text);
    return true;
}

static bool bindings_are_held_against_the_table(void) {
    static int64_t whole;
    static const demo_binding strange[] = {
        {"max_len", &whole, DEMO_FLOAT, NULL, "", DEMO_ANY},
        {"deepspeed", &whole, DEMO_STRING, NULL, "", DEMO_ANY},
        {"beta", &whole, DEMO_FLOAT, NULL, "", DEMO_ANY}};
    demo_options one = {.tool = "sft", .bindings = strange, .binding_count = 1};
    char program[] = "trainer", *argv[] = {program};
    EXPECT(demo_options_parse(&one, 1, argv, &message) == -1);
    EXPECT_TEXT(message.text, "--max_len is not in options.tsv with the type it is bound as");
    one.bindings++;
    EXPECT(demo_options_check(&one, &message) == -1 &&
           holds(message.text, "is bound, but not real"));
    one.bindings++;
    EXPECT(demo_options_check(&one, &message) == -1 && holds(message.text, "not real for sft"));
    EXPECT(parse("") == 0 && demo_options_check(&options, &message) == -1);
    EXPECT(holds(message.text, "is not bound, but real for sft in options.tsv"));
    return true;
}

static bool foreign_names_place_tokens(void) {
    static const char *const cases[][3] = {{"zigzag-ring", "zigzag", "ring"},
                                           {"batch_ring", "contiguous", "ring"},
                                           {"batch_stripe", "stripe", "ring"},
                                           {"varlen_zigzag", "zigzag-doc", "ring"},
                                           {"varlen_llama3", "contiguous", "llama3"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *layout = NULL, *schedule = NULL;
        EXPECT(demo_placement_settle(&layout, &schedule, cases[i][0], &message) == 0);
        EXPECT_TEXT(layout, cases[i][1]);
        EXPECT_TEXT(schedule, cases[i][2]);
    }
    const char *layout = "contiguous", *schedule = NULL;
    EXPECT(demo_placement_settle(&layout, &schedule, NULL, &message) == 0 && !schedule);
    EXPECT(demo_placement_settle(&layout, &schedule, "batch_zigzag", &message) == -1);
    EXPECT(holds(message.text,
                 "batch_zigzag means --layout zigzag --schedule ring, but another "
                 "option says contiguous"));
    return true;
}

/* ---- data -------------------------------------------------------- */

static demo_dataset set;

static int load(const char *path, demo_data_options how) {
    demo_data_free(&set);
    message.text[0] = 0;
    return demo_data_load(&set, path, &how, &message);
}

/* A document as text: bytes as they are, special tokens as B and E in brackets, supervised
 * tokens after a bar each time supervision begins and before one when it ends: "[B]ab|c[E]". */
static const char *shown_document(const demo_document *document) {
    static char text[512];
    size_t used = 0;
    for (int64_t t = 0; t < document->tokens && used < sizeof text - 8; t++) {
        int32_t id = document->ids[t];
        if (t && document->loss_mask[t] != document->loss_mask[t - 1]) text[used++] = '|';
        if (id < 256)
            text[used++] = (char)id;
        else
            used += (size_t)snprintf(text + used, 8, "[%s]",
                                     id == DEMO_BOS   ? "B"
                                     : id == DEMO_EOS ? "E"
                                                      : "?");
    }
    text[used] = 0;
    return text;
}

static const char *shown(int64_t i) { return shown_document(&set.documents[i]); }

static const demo_data_options ask = {
    .input_key = "q", .output_key = "a", .input_template = "Q {}? "};

static bool text_is_masked(void) {
    const char *path = make_file("a.jsonl", "{\"q\": \"ab\", \"a\": \"cd\"}\n");
    EXPECT(load(path, ask) == 0 && arrlen(set.documents) == 1);
    EXPECT_TEXT(shown(0), "[B]Q ab? |cd[E]");
    const demo_document *document = &set.documents[0];
    EXPECT(document->tokens == 10 && set.tokens == 10 && set.supervised_tokens == 3);
    EXPECT(document->ids[0] == 256 && document->ids[1] == 'Q' && document->ids[9] == 257);
    EXPECT(load(path, (demo_data_options){.input_key = "q", .output_key = "a"}) == 0);
    EXPECT_TEXT(shown(0), "[B]ab|cd[E]");
    /* without output_key the text itself */
    EXPECT(load(path, (demo_data_options){.input_key = "q"}) == 0);
    EXPECT_TEXT(shown(0), "[B]|ab[E]");
    EXPECT(load(path, (demo_data_options){
                          .input_key = "q", .output_key = "a", .pretrain_mode = true}) == 0);
    EXPECT_TEXT(shown(0), "[B]|ab");
    EXPECT(load(path, (demo_data_options){
                          .input_key = "q", .output_key = "a", .train_on_inputs = true}) == 0);
    EXPECT_TEXT(shown(0), "[B]|abcd[E]");
    EXPECT(load(path, (demo_data_options){
                          .input_key = "q", .output_key = "a", .input_template = "-{}:"}) == 0);
    EXPECT_TEXT(shown(0), "[B]-ab:|cd[E]");
    return true;
}

static bool line_ends_and_marks_do_not_matter(void) {
    EXPECT(load(make_file("b.jsonl", "\xEF\xBB\xBF{\"q\": \"a\", \"a\": \"b\"}\r\n\r\n  "
                                     "\n{\"q\": \"c\", \"a\": \"d\"}"),
                ask) == 0);
    EXPECT(arrlen(set.documents) == 2 && set.counts.read == 2);
    EXPECT_TEXT(shown(0), "[B]Q a? |b[E]");
    EXPECT_TEXT(shown(1), "[B]Q c? |d[E]");
    return true;
}

static bool text_is_utf8(void) {
    EXPECT(load(make_file("u.jsonl", "{\"q\": \"\\u00e9\\n\", \"a\": \"\xE2\x82\xAC\"}\n"),
                ask) == 0);
    EXPECT_TEXT(shown(0), "[B]Q \xC3\xA9\n? |\xE2\x82\xAC[E]");
    return true;
}

static bool ids_carry_their_own_mask(void) {
    EXPECT(
        load(make_file("i.jsonl",
                       "{\"input_ids\": [65, 66, 67, 68], \"labels\": [-100, -100, 67, 68]}\n"
                       "{\"input_ids\": [65, 66, 67], \"loss_mask\": [1, 0, 1]}\n"
                       "{\"input_ids\": [65, 66, 67], \"loss_mask\": [true, true, false]}\n"
                       "{\"input_ids\": [256, 65, 257]}\n"),
             ask) == 0);
    EXPECT_TEXT(shown(0), "AB|CD");
    EXPECT_TEXT(shown(1), "AB|C"); /* nothing predicts a first token */
    EXPECT_TEXT(shown(2), "A|B|C");
    EXPECT_TEXT(shown(3), "[B]|A[E]");
    EXPECT(set.supervised_tokens == 2 + 1 + 1 + 2);
    return true;
}

static bool long_documents_are_dropped_or_cut(void) {
    const char *path = make_file("long.jsonl",
                                 "{\"q\": \"ab\", \"a\": \"cdefgh\"}\n" /* [B] 2 + 6 [E] = 10
                                                                           tokens */
                                 "{\"q\": \"ab\", \"a\": \"c\"}\n"      /* 5 */
                                 "{\"q\": \"abcdefg\", \"a\": \"c\"}\n" /* 10, of which 8 are
                                                                           prompt */
                                 "{\"input_ids\": [1, 2, 3, 4, 5, 6, 7, 8, 9]}\n");
    demo_data_options how = {.input_key = "q", .output_key = "a", .max_len = 7};
    EXPECT(load(path, how) == 0 && set.counts.read == 4 && set.counts.dropped_long == 3 &&
           arrlen(set.documents) == 1);
    EXPECT_TEXT(shown(0), "[B]ab|c[E]");
    how.long_documents = DEMO_LONG_CUT;
    EXPECT(load(path, how) == 0 && set.counts.dropped_long == 1 && set.counts.cut == 2 &&
           arrlen(set.documents) == 3);
    EXPECT_TEXT(shown(0), "[B]ab|cde[E]");
    EXPECT(set.documents[0].tokens == 7 && arrlen(set.documents[0].ids) == 7);
    /* ids are cut as they are */
    EXPECT(set.documents[2].tokens == 7 && set.documents[2].ids[6] == 7);
    how.max_len = 10; /* a prompt of eight tokens leaves less than the three that it must */
    EXPECT(load(path, how) == 0 && set.counts.cut == 0 && set.counts.dropped_long == 1);
    how.max_len = 11;
    EXPECT(load(path, how) == 0 && set.counts.cut == 0 && set.counts.dropped_long == 0);
    how.long_documents = DEMO_LONG_CUT_BOTH;
    how.max_len = 7;
    EXPECT(load(path, how) == 0 && set.counts.cut == 3 && set.counts.dropped_long == 0);
    EXPECT_TEXT(shown(0), "[B]ab|cdef");
    EXPECT_TEXT(shown(2), "[B]abcd|c[E]");
    EXPECT(set.documents[2].loss_mask[4] == 0 && set.documents[2].loss_mask[5] == 1);
    EXPECT(set.documents[3].tokens == 7 && set.documents[3].ids[6] == 7);
    how.long_documents = DEMO_LONG_CUT;
    how.pretrain_mode = true;
    how.max_len = 3;
    EXPECT(load(path, how) == 0 && set.counts.cut == 2);
    EXPECT_TEXT(shown(2), "[B]|ab"); /* no EOS is forced on plain text */
    return true;
}

static bool empty_and_masked_documents_are_counted(void) {
    EXPECT(load(make_file("z.jsonl", "{\"q\": \"a\", \"a\": \"\"}\n{\"input_ids\": "
                                     "[]}\n{\"q\": \"\", \"a\": \"b\"}\n"
                                     "{\"input_ids\": [5, 6], \"labels\": [5, -100]}\n{\"q\": "
                                     "\"a\", \"a\": \"b\"}\n"),
                (demo_data_options){.input_key = "q", .output_key = "a"}) == 0);
    EXPECT(set.counts.read == 5 && set.counts.zero_length == 3 && set.counts.fully_masked == 1);
    EXPECT(arrlen(set.documents) == 2 && set.supervised_tokens == 2);
    char summary[256];
    demo_data_summary(&set, summary, sizeof summary);
    EXPECT_TEXT(summary, "5 read, 2 kept with 6 tokens, 2 of them supervised; 0 too long, 3 "
                         "empty, 0 cut, 1 masked whole");
    return true;
}

static bool streams_are_cut_into_documents(void) {
    const char *path = make_file("s.txt", "\xEF\xBB\xBFthe quick\r\nfox");
    EXPECT(load(path, (demo_data_options){.pretrain_mode = true, .max_len = 6}) == 0);
    EXPECT(arrlen(set.documents) == 3 && set.counts.read == 3 && set.tokens == 14 &&
           set.supervised_tokens == 14 - 3);
    EXPECT_TEXT(shown(0), "t|he qu");
    EXPECT_TEXT(shown(1), "i|ck\r\nf");
    EXPECT_TEXT(shown(2), "o|x");
    EXPECT(load(path, (demo_data_options){.max_len = 6}) == -1 &&
           holds(message.text, "s.txt: plain text needs --pretrain_mode"));
    EXPECT(load(path, (demo_data_options){.pretrain_mode = true}) == -1 &&
           holds(message.text, "set it to 2 or more"));
    return true;
}

/* Texts of two files: ended, cut without an end, and side by side, as LLaMA-Factory's stage pt. */
static bool texts_end_and_are_joined_as_in_stage_pt(void) {
    char both[1100];
    const char *one = make_file("p.jsonl",
                                "{\"t\": \"abc\"}\n{\"t\": \"\"}\n{\"t\": \"defgh\"}\n");
    const char *two = make_file("r.jsonl", "{\"t\": \"ij\"}\n{\"t\": \"k\"}\n");
    demo_data_options how = {.input_key = "t",
                             .pretrain_mode = true,
                             .pretrain_eos = true,
                             .max_len = 5,
                             .long_documents = DEMO_LONG_CUT_BOTH};
    snprintf(both, sizeof both, "%s,%s", one, two);
    EXPECT(load(both, how) == 0 && arrlen(set.documents) == 4 && set.counts.zero_length == 1);
    EXPECT_TEXT(shown(0), "[B]|abc[E]");
    EXPECT_TEXT(shown(1), "[B]|defg");
    EXPECT_TEXT(shown(2), "[B]|ij[E]");
    how.long_documents = DEMO_LONG_CUT;
    EXPECT(load(both, how) == 0);
    EXPECT_TEXT(shown(1), "[B]|defg");
    how.pretrain_blocks = true;
    EXPECT(load(both, how) == 0 && arrlen(set.documents) == 3 && set.counts.read == 5);
    EXPECT(set.tokens == 15 && set.supervised_tokens == 12 && set.counts.zero_length == 1);
    EXPECT_TEXT(shown(0), "a|bc[E]d");
    EXPECT_TEXT(shown(1), "e|fgh[E]");
    EXPECT_TEXT(shown(2), "i|j[E]k[E]");
    how.max_samples = 2; /* a part of each file: abc, and ij */
    EXPECT(load(both, how) == 0 && arrlen(set.documents) == 1 && set.counts.read == 2);
    how.max_len = 16;
    EXPECT(load(both, how) == -1 && holds(message.text, "0 kept"));
    EXPECT(load(make_file("s.txt", "one\n"), how) == -1 &&
           holds(message.text, "s.txt: is one text without an end"));
    EXPECT(load(make_file("i.jsonl", "{\"input_ids\": [1, 2]}\n"), how) == -1 &&
           holds(message.text, "i.jsonl:1: \"input_ids\" are tokens already"));
    return true;
}

/* numpy 2.4.6: numpy.random.default_rng(seed).permutation(23) */
static bool permutations_are_those_of_numpy(void) {
    static const struct {
        uint64_t seed;
        int64_t order[23];
    } known[] = {
        {42,
         {18, 10, 17, 22, 16, 15, 7, 6, 9, 3, 0, 19, 12, 5, 11, 14, 21, 2, 4, 20, 1, 13, 8}},
        {7, {15, 4, 18, 3, 14, 12, 10, 0, 19, 17, 8, 7, 1, 21, 13, 6, 16, 5, 22, 20, 2, 9, 11}},
        {(1ull << 32) + 5,
         {2, 4, 6, 20, 5, 18, 14, 19, 22, 15, 9, 12, 8, 10, 16, 7, 11, 13, 0, 1, 21, 3, 17}}};
    int64_t order[23];
    for (int i = 0; i < 3; i++) {
        demo_permutation(order, 23, known[i].seed);
        EXPECT(!memcmp(order, known[i].order, sizeof order));
    }
    demo_permutation(order, 1, 3);
    EXPECT(order[0] == 0 && demo_held_count(0.2, 23) == 5 && demo_held_count(7, 23) == 7);
    EXPECT(demo_held_count(1e-9, 23) == 1);
    static const double none[] = {1, 2.5, -1, NAN, INFINITY, 1e10};
    for (int i = 0; i < 6; i++)
        EXPECT(demo_held_size_wrong("val_size", none[i], &message) == -1 &&
               holds(message.text, "a fraction below 1, or a whole number of at least 2"));
    EXPECT(!demo_held_size_wrong("val_size", 0, &message) &&
           !demo_held_size_wrong("val_size", 0.999, &message) &&
           !demo_held_size_wrong("val_size", 2, &message));
    return true;
}

static bool samples_and_files_are_limited_and_joined(void) {
    char both[1100];
    const char *one = make_file("1.jsonl",
                                "{\"q\": \"a\", \"a\": \"1\"}\n{\"q\": \"b\", \"a\": \"2\"}\n");
    const char *two = make_file("2.jsonl", "{\"q\": \"c\", \"a\": \"3\"}\nnot JSON\n");
    snprintf(both, sizeof both, "%s,%s", one, two);
    demo_data_options how = ask;
    how.max_samples = 2; /* a half of each; the broken line is never reached */
    EXPECT(load(both, how) == 0 && arrlen(set.documents) == 2);
    EXPECT_TEXT(shown(0), "[B]Q a? |1[E]");
    EXPECT_TEXT(shown(1), "[B]Q c? |3[E]");
    how.probs = "1,0"; /* until the first is used up */
    how.max_samples = 9;
    EXPECT(load(both, how) == 0 && arrlen(set.documents) == 2);
    EXPECT_TEXT(shown(1), "[B]Q b? |2[E]");
    how.probs = "1";
    EXPECT(load(both, how) == -1 &&
           holds(message.text, "1 weights (1) are given for 2 data sets"));
    how.probs = NULL;
    how.max_samples = 1;
    EXPECT(load(both, how) == 0 && arrlen(set.documents) == 1);
    how.max_samples = 0;
    EXPECT(load(both, how) == -1 && holds(message.text, "2.jsonl:2: broken JSON") &&
           !set.documents);
    return true;
}

static bool broken_data_is_named(void) {
    static const char *const cases[][2] = {
        {"", "x.jsonl: the file is empty; give one with at least one record"},
        {"\xEF\xBB\xBF", "x.jsonl: the file is empty; give one with at least one record"},
        {"\n\r\n", "x.jsonl: only empty lines; one JSON object per line is needed"},
        {"{\"q\": \"a\", \"a\": \"b\"}\n\n{\"q\": \"a\", \"a\": }\n",
         "x.jsonl:3: broken JSON at column 17; one whole object"},
        {"{\"q\": \"a\", \"a\": \"b\"} {}\n", "x.jsonl:1: broken JSON at column 22"},
        {"[1]\n", "x.jsonl:1: the line is a list, but an object {...} is needed"},
        {"[{\"q\": \"a\", \"a\": \"b\"},\n 5]",
         "x.jsonl:2: the line is a number, but an object {...} is needed"},
        {"[{\"q\": \"a\", \"a\": \"b\"}] {}",
         "x.jsonl: broken JSON at column 24; a list of objects"},
        {"[{\"q\": {\"a\": 1, \"a\": 2}}]", "x.jsonl:1: key \"a\" stands there twice"},
        {"{\"q\": \"a\", \"a\": \"b\"}\n{\"q\": \"\xC3\xA9\", \"a\": \"\xFF\"}",
         "x.jsonl:2: byte 18 is no UTF-8; write the file anew as UTF-8"},
        {"{\"q\": \"\xC0\xAF\", \"a\": \"b\"}", "x.jsonl:1: byte 7 is no UTF-8"},
        {"{\"q\": \"\xED\xA0\x80\", \"a\": \"b\"}", "x.jsonl:1: byte 7 is no UTF-8"},
        {"{\"q\": \"\xF4\x90\x80\x80\", \"a\": \"b\"}", "x.jsonl:1: byte 7 is no UTF-8"},
        {"{\"q\": \"\xE2\x82", "x.jsonl:1: byte 7 is no UTF-8"},
        {"\n{\"q\": \"a\", \"b\": 1, \"c\": 2}\n",
         "x.jsonl:2: no key \"a\"; set --output_key to one of those present: \"q\", \"b\", "
         "\"c\""},
        {"{}\n", "x.jsonl:1: no key \"q\"; set --input_key to one of those present: none"},
        {"{\"q\": 3, \"a\": \"b\"}\n", "x.jsonl:1: \"q\" is a number, but text is needed"},
        {"{\"q\": \"a\", \"a\": null}\n", "x.jsonl:1: \"a\" is null, but text is needed"},
        {"{\"q\": [{\"role\": \"user\"}], \"a\": \"b\"}\n",
         "x.jsonl:1: \"q\" is a list, but text is needed; demos/prepare.py makes a token file of "
         "lists of messages"},
        {"{\"q\": \"a\\u0000b\", \"a\": \"b\"}\n",
         "x.jsonl:1: the line holds a zero character"},
        {"{\"\\u0000\": 1, \"q\": \"a\", \"a\": \"b\"}\n", /* within the first bytes */
         "x.jsonl:1: the line holds a zero character"},
        {"{\"input_ids\": \"abc\"}\n",
         "x.jsonl:1: \"input_ids\" is text, but a list is needed"},
        {"{\"input_ids\": [1], \"labels\": 1}\n",
         "x.jsonl:1: \"labels\" is a number, but a list is needed"},
        {"{\"input_ids\": [1, 2, 259]}\n",
         "x.jsonl:1: input_ids[2] is 259, but it must be a whole number from 0 to 258"},
        {"{\"input_ids\": [1, -2]}\n",
         "x.jsonl:1: input_ids[1] is -2, but it must be a whole number from 0 to 258"},
        {"{\"input_ids\": [1, 2.0000000001]}\n",
         "input_ids[1] is 2.0000000001, but it must be"},
        {"{\"input_ids\": [1.5]}\n",
         "x.jsonl:1: input_ids[0] is 1.5, but it must be a whole number from 0 to 258"},
        {"{\"input_ids\": [1, \"2\"]}\n",
         "x.jsonl:1: input_ids[1] is text, but a number is needed"},
        {"{\"input_ids\": [1, 2, 3], \"labels\": [1, 2]}\n",
         "x.jsonl:1: 2 labels for 3 input_ids; give one for each token"},
        {"{\"input_ids\": [1, 2], \"loss_mask\": [1]}\n",
         "x.jsonl:1: 1 loss_mask for 2 input_ids; give one for each token"},
        {"{\"input_ids\": [1, 2], \"loss_mask\": [1, 2]}\n",
         "x.jsonl:1: loss_mask[1] is 2, but it must be a whole number from 0 to 1"},
        {"{\"input_ids\": [1, 2, 3], \"labels\": [2, 3, -100]}\n",
         "labels[0] is 2 but input_ids[0] is 1; a label repeats"},
        {"{\"input_ids\": [1, 2], \"labels\": [1, -100]}\n",
         "no supervised token in the whole set (1 read, 1 kept with 2 tokens, 0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        EXPECT(load(make_file("x.jsonl", cases[i][0]), ask) == -1);
        if (!holds(message.text, cases[i][1])) EXPECT_TEXT(message.text, cases[i][1]);
        EXPECT(!set.documents);
    }
    return true;
}

/* A list of records, gzip in one part or two, and keys inside objects: the same documents. */
static bool other_files_hold_the_same(void) {
    static const char *const shapes[] = {
        "{\"q\": \"a\", \"a\": \"b\"}\n{\"q\": \"c\", \"a\": \"d\"}\n",
        "\xEF\xBB\xBF [\n {\"q\": \"a\", \"a\": \"b\"},\n {\"q\": \"c\", \"a\": \"d\"}\n]\n"};
    char path[600];
    for (int i = 0; i < 4; i++) {
        const char *made = make_file(i % 2 ? "l.jsonl" : "l.json", shapes[i % 2]);
        if (i > 1) {
            snprintf(path, sizeof path, "%s.gz", made);
            remove(path);
            size_t half = strlen(shapes[i % 2]) / 2;
            for (int part = 0; part < i - 1; part++) { /* as cat a.gz b.gz */
                gzFile file = gzopen(path, "ab");
                const char *from = shapes[i % 2] + (part ? half : 0);
                gzwrite(file, from, (unsigned)(i == 2 || part ? strlen(from) : half));
                gzclose(file);
            }
            made = path;
        }
        EXPECT(load(made, ask) == 0 && arrlen(set.documents) == 2);
        EXPECT_TEXT(shown(0), "[B]Q a? |b[E]");
        EXPECT_TEXT(shown(1), "[B]Q c? |d[E]");
    }
    EXPECT(load(make_file("b.jsonl.gz", "none"), ask) == -1 &&
           holds(message.text, "b.jsonl.gz: cannot be read: it is no whole gzip file"));
    demo_data_options deep = ask;
    deep.input_key = "x.y.q";
    deep.output_key = "z.a";
    EXPECT(load(make_file("k.jsonl", "{\"x\": {\"y\": {\"q\": \"a\"}}, \"z.a\": \"b\"}"),
                deep) == 0);
    EXPECT_TEXT(shown(0), "[B]Q a? |b[E]");
    EXPECT(load(make_file("k.jsonl", "{\"x\": {\"y\": 1}}"), deep) == -1 &&
           holds(message.text,
                 "no key \"x.y.q\"; set --input_key to one of those present: \"x\""));
    return true;
}

/* Alpaca's prompt is two texts: one alone is taken only by its name. */
static bool half_a_prompt_is_refused(void) {
    const char *path = make_file(
        "h.jsonl", "{\"instruction\": \"a\", \"input\": \"b\", \"output\": \"c\"}");
    demo_data_options how = {.output_key = "output"};
    EXPECT(load(path, how) == -1 &&
           holds(message.text, "h.jsonl:1: \"instruction\" stands beside \"input\""));
    how.input_key = "input";
    EXPECT(load(path, how) == 0);
    EXPECT_TEXT(shown(0), "[B]b|c[E]");
    return true;
}

/* The sentence of a failed load, behind the path and what follows it. */
static bool load_says(const char *path, demo_data_options how, const char *sentence) {
    char whole[1200];
    EXPECT(load(path, how) == -1 && !set.documents);
    snprintf(whole, sizeof whole, "%s%s", path, sentence);
    EXPECT_TEXT(message.text, whole);
    return true;
}

/* Text for a model whose folder says that bytes are no tokens of it. */
static bool text_of_other_models_is_refused(void) {
    static const char *const records[] = {
        "{\"q\": \"a\", \"a\": \"b\"}", "{\"q\": [1], \"a\": \"b\"}",
        "{\"q\": {\"b\": 1}, \"a\": \"b\"}",
        "{\"instruction\": \"i\", \"input\": \"x\", \"a\": \"b\"}",
        "{\"instruction\": \"i\", \"output\": \"x\", \"a\": \"b\"}"};
#define MAKES "; lists of messages become a token file, give that: type this"
#define JOINED \
    ": set the key of the prompt, or let demos/prepare.py join such a record's " \
    "instruction and input"
    static const struct {
        int record;
        const char *prepare, *sentence;
    } cases[] = {
        {1, "type this", "\"q\" is a list, but text is needed" MAKES " --apply_chat_template"},
        {2, "type this",
         "\"q\" is an object, but text is needed" MAKES " --apply_chat_template"},
        {1, "type this --apply_chat_template",
         "\"q\" is a list, but text is needed" MAKES " --apply_chat_template"},
        {3, "type this", "\"instruction\" stands beside \"input\"" JOINED ": type this"},
        {4, "type this", "\"instruction\" stands beside \"output\"" JOINED ": type this"},
        {4, NULL, "\"instruction\" stands beside \"output\"" JOINED}};
#undef MAKES
#undef JOINED
    char sentence[600];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *path = make_file("o.jsonl", records[cases[i].record]);
        demo_data_options how = {.input_key = cases[i].record < 3 ? "q" : NULL,
                                 .output_key = "a",
                                 .folder = scratch,
                                 .prepare = cases[i].prepare};
        snprintf(sentence, sizeof sentence, ":1: %s", cases[i].sentence);
        if (!load_says(path, how, sentence)) return false;
    }
    const int64_t end = 7;
    demo_data_options how = ask;
    how.folder = scratch;
    how.end = &end;
    snprintf(
        sentence, sizeof sentence,
        ":1: is text, whose bytes become tokens and which ends in 257, but \"eos_token_id\" "
        "of %s/config.json is 7; set it to 257, or give input_ids",
        scratch);
    if (!load_says(make_file("o.jsonl", records[0]), how, sentence)) return false;
    how.end = NULL;
    how.vocab_size = 258;
    if (!load_says(make_file("o.jsonl", records[0]), how,
                   ":1: text needs a vocabulary of 259, but the model has 258; give input_ids"))
        return false;
    how.vocab_size = 259;
    EXPECT(load(make_file("o.jsonl", records[0]), how) == 0);
    return true;
}

/* Where the folder has a template for chats, the hint says so; not for text that has another. */
static bool chat_templates_are_hinted_at(void) {
    static const char hint[] = " (add --apply_chat_template for the model's chat template)";
    static const struct {
        const char *file, *holds, *prepare;
        bool plain, hinted;
    } cases[] = {{"none", "", "type this", false, false},
                 {"chat_template.jinja", "", "type this", false, true},
                 {"chat_template.json", "", "type this", false, true},
                 {"tokenizer_config.json", "{\"chat_template\": 1}", "type this", false, true},
                 {"tokenizer_config.json", "{\"other\": 1}", "type this", false, false},
                 {"chat_template.jinja", "", "type this", true, false},
                 {"chat_template.jinja", "", "type --kind steps", false, false},
                 {"chat_template.jinja", "", "type --apply_chat_template", false, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char sentence[600];
        demo_data_options how = {.input_key = "q",
                                 .folder = scratch,
                                 .prepare = cases[i].prepare,
                                 .pretrain_mode = cases[i].plain};
        const char *made = make_file(cases[i].file, cases[i].holds);
        snprintf(
            sentence, sizeof sentence,
            ":1: is text, and %s has a tokenizer, which is not built in; make tokens of it and "
            "give those%s: %s",
            scratch, cases[i].hinted ? hint : "", cases[i].prepare);
        bool said = load_says(make_file("t.jsonl", "{\"q\": \"a\"}"), how, sentence);
        EXPECT(demo_folder_has(scratch, cases[i].file) && !remove(made) &&
               !demo_folder_has(scratch, cases[i].file));
        if (!said) return false;
    }
    return true;
}

/* Options are named as whoever asks for the data calls them; of many keys the first are shown. */
static bool messages_have_names(void) {
    static char line[2000], shown_keys[1200], sentence[1600];
    demo_data_options how = {
        .input_key = "q", .output_key = "zz", .output_option = "label_key"};
    const char *path = make_file("n.jsonl", "{\"q\": \"a\", \"b\": \"\"}");
    if (!load_says(path, how,
                   ":1: no key \"zz\"; set --label_key to one of those present: \"q\", \"b\""))
        return false;
    how.output_option = NULL;
    if (!load_says(path, how,
                   ":1: no key \"zz\"; set --output_key to one of those present: \"q\", \"b\""))
        return false;
    how.output_key = "b";
    for (int named = 0; named < 2; named++) {
        how.output_option = named ? "some_key" : NULL;
        how.length_option = named ? "some_len" : NULL;
        snprintf(
            sentence, sizeof sentence,
            ": no supervised token in the whole set (1 read, 0 kept with 0 tokens, 0 of them "
            "supervised; 0 too long, 1 empty, 0 cut, 0 masked whole); check --%s and --%s",
            named ? "some_key" : "output_key", named ? "some_len" : "max_len");
        if (!load_says(path, how, sentence)) return false;
    }
    size_t used = 0, seen = 0;
    for (int key = 0; key < 9; key++) {
        used += (size_t)snprintf(line + used, sizeof line - used, "%s\"%0100d\": 1",
                                 key ? ", " : "{", key);
        seen += (size_t)snprintf(shown_keys + seen, sizeof shown_keys - seen, "%s\"%0100d\"",
                                 key ? ", " : "", key);
    }
    snprintf(line + used, sizeof line - used, "}");
    snprintf(sentence, sizeof sentence,
             ":1: no key \"q\"; set --input_key to one of those present: %.255s", shown_keys);
    return load_says(make_file("n.jsonl", line), how, sentence);
}

/* Positions count from the first token that is none of padding. */
static bool positions_count_from_zero(void) {
    static const struct {
        const char *positions;
        int place; /* of the wrong one; -1: none is */
        const char *value;
    } cases[] = {{"[0, 1, 2]", -1, ""},
                 {"[1, 2, 3]", 0, "1"},
                 {"[0, 2, 2]", 1, "2"},
                 {"[0, 1, 0]", 2, "0"}};
    char line[400], sentence[300];
    for (int padded = 0; padded < 2; padded++)
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            char *all = strdup(cases[i].positions);
            all[strlen(all) - 1] = 0;
            snprintf(
                line, sizeof line,
                padded ? "{\"input_ids\": [7, 65, 66, 67, 7], \"attention_mask\": [0, 1, 1, 1, "
                         "0], \"position_ids\": [9, %s, 9]}"
                       : "{\"input_ids\": [65, 66, 67], \"position_ids\": [%s]}",
                all + 1);
            free(all);
            const char *path = make_file("p.jsonl", line);
            snprintf(
                sentence, sizeof sentence,
                ":1: position_ids[%d] is %s, but the tokens of a document count from 0; give "
                "each document a record of its own",
                cases[i].place + padded, cases[i].value);
            if (cases[i].place >= 0 && !load_says(path, ask, sentence)) return false;
            if (cases[i].place >= 0) continue;
            EXPECT(load(path, ask) == 0);
            EXPECT_TEXT(shown(0), "A|BC");
        }
    return load_says(make_file("p.jsonl", "{\"input_ids\": [65, 66], \"position_ids\": [0]}"),
                     ask, ":1: 1 position_ids for 2 input_ids; give one for each token") &&
           load_says(make_file("p.jsonl", "{\"input_ids\": [65, 66], \"position_ids\": 0}"),
                     ask, ":1: \"position_ids\" is a number, but a list is needed");
}

/* Every length that a record is cut to, and arrays that are as long as it says. */
static bool records_are_cut_to_any_length(void) {
    for (int ends = 0; ends < 2; ends++)
        for (int64_t most = 0; most < 8; most++) {
            demo_record record = {.ends_in_eos = ends};
            demo_document *d = &record.document;
            for (int32_t t = 0; t < 5; t++) {
                demo_push(d, 70 + t, t == 3);
                arrput(d->targets, t);
                arrput(d->shares, 1);
            }
            demo_record_cut(&record, most);
            int64_t kept = most && most < 5 ? most : 5;
            bool cut = kept < 5 && ends;
            EXPECT(d->tokens == kept && arrlen(d->ids) == kept &&
                   arrlen(d->loss_mask) == kept && arrlen(d->targets) == kept &&
                   arrlen(d->shares) == kept);
            EXPECT(d->ids[kept - 1] == (cut ? DEMO_EOS : 70 + kept - 1));
            EXPECT(d->loss_mask[kept - 1] == (cut ? kept > 1 : kept == 4));
            EXPECT(demo_supervised(d) == (kept > 3) + (cut && kept > 1 && kept < 4));
            d->loss_mask[0] = 1; /* as a target of a process reward model may have */
            EXPECT(demo_supervised(d) == (kept > 3) + (cut && kept > 1 && kept < 4) + 1);
            demo_document_free(d);
        }
    demo_data_options both = {.input_key = "q",
                              .output_key = "a",
                              .max_len = 6,
                              .long_documents = DEMO_LONG_CUT_BOTH};
    EXPECT(load(make_file("c.jsonl", "{\"q\": \"abcdefgh\", \"a\": \"ijklmnop\"}\n"
                                     "{\"q\": \"a\", \"a\": \"ijklmnop\"}\n"
                                     "{\"q\": \"ab\", \"a\": \"cd\"}\n"),
                both) == 0);
    for (int i = 0; i < 3; i++)
        EXPECT(arrlen(set.documents[i].ids) == set.documents[i].tokens &&
               arrlen(set.documents[i].loss_mask) == set.documents[i].tokens &&
               set.documents[i].tokens == 6);
    return true;
}

/* Texts that are compared by their last number must have one, in the response. */
static bool answers_have_numbers(void) {
    static const char wrong[] =
        ":%d: the right answer holds no number, but texts are compared with "
        "its last one; set --%s to a key whose text holds one, or remove "
        "the line";
    static const struct {
        const char *lines;
        int line; /* that is refused; 0: none is */
    } cases[] = {{"{\"q\": \"a\", \"a\": \"is 0\"}", 0},
                 {"{\"q\": \"a\", \"a\": \"9.\"}\n{\"q\": \"7\", \"a\": \"none\"}", 2},
                 {"{\"q\": \"a\", \"a\": \"/:\"}", 1},
                 {"{\"q\": \"a\", \"a\": \"\"}\n{\"q\": \"a\", \"a\": \"1\"}", 0},
                 {"{\"input_ids\": [65, 305, 48], \"loss_mask\": [0, 1, 0]}", 1},
                 {"{\"input_ids\": [65, 66, 48], \"loss_mask\": [0, 0, 1]}", 0}};
    demo_data_options how = {
        .input_key = "q", .output_key = "a", .number = true, .vocab_size = 400};
    char sentence[300];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *path = make_file("n.jsonl", cases[i].lines);
        how.output_option = i % 2 ? "label_key" : NULL;
        snprintf(sentence, sizeof sentence, wrong, cases[i].line,
                 i % 2 ? "label_key" : "output_key");
        if (cases[i].line && !load_says(path, how, sentence)) return false;
        if (!cases[i].line) EXPECT(load(path, how) == 0);
        how.number = false;
        EXPECT(load(path, how) == 0);
        how.number = true;
    }
    return true;
}

/* Characters of UTF-8 and what looks like them: each place of each length. */
static bool characters_are_whole(void) {
    static const struct {
        const char *text;
        int wrong; /* byte; -1: none is */
    } cases[] = {{"\xFF{}", 0},
                 {"\"\xC2\x80\"", -1},
                 {"\"\xC1\xBF\"", 1},
                 {"\"\xC2\x7F\"", 1},
                 {"\"\xC2\xC0\"", 1},
                 {"\"\xDF\xBF\"", -1},
                 {"\"\xE0\x9F\xBF\"", 1},
                 {"\"\xE0\xA0\x80\"", -1},
                 {"\"\xE2\x82x\"", 1},
                 {"\"\xE2\x82\xC0\"", 1},
                 {"\"\xED\x9F\xBF\"", -1},
                 {"\"\xEE\x80\x80\"", -1},
                 {"\"\xEF\xBF\xBF\"", -1},
                 {"\"\xF0\x8F\xBF\xBF\"", 1},
                 {"\"\xF0\x90\x80\x80\"", -1},
                 {"\"\xF0\x9F\x98x\"", 1},
                 {"\"\xF0\x9Fx\x98\"", 1},
                 {"\"\xF0\x9F\x98\x7F\"", 1},
                 {"\"\xF4\x8F\xBF\xBF\"", -1},
                 {"\"\xF5\x80\x80\x80\"", 1},
                 {"\"\xF3\xBF\xBF\xBF\"", -1}};
    char sentence[200];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *path = make_file("u.txt", cases[i].text);
        demo_data_options how = {.pretrain_mode = true, .max_len = 9};
        snprintf(sentence, sizeof sentence,
                 ": byte %d is no UTF-8; write the file anew as UTF-8", cases[i].wrong);
        if (cases[i].wrong >= 0 && !load_says(path, how, sentence)) return false;
        if (cases[i].wrong < 0) EXPECT(load(path, how) == 0);
    }
    return true;
}

/* The shortest piece; texts that fill their pieces; and several streams. */
static bool streams_fill_their_pieces(void) {
    char both[1100];
    demo_data_options how = {.pretrain_mode = true, .max_len = 2};
    const char *one = make_file("one.txt", "abcdef"), *two = make_file("two.txt", "ghi");
    EXPECT(load(one, how) == 0 && arrlen(set.documents) == 3 && set.counts.read == 3 &&
           !set.counts.zero_length);
    how.max_len = 3;
    EXPECT(load(one, how) == 0 && arrlen(set.documents) == 2 && set.counts.read == 2);
    for (how.max_len = 0; how.max_len < 2; how.max_len++)
        if (!load_says(one, how,
                       ": plain text is cut every --max_len tokens; set it to 2 or more"))
            return false;
    how.max_len = 4;
    snprintf(both, sizeof both, "%s,%s", one, two);
    EXPECT(load(both, how) == 0 && arrlen(set.documents) == 3 &&
           set.documents[2].ids[0] == 'g');
    how.max_samples = 2;
    EXPECT(load(both, how) == 0 && arrlen(set.documents) == 2 && set.counts.read == 2);
    how.probs = "1,1";
    EXPECT(load(both, how) == -1);
    EXPECT_TEXT(message.text,
                "plain text has no records that weights could draw; leave them out");
    return true;
}

/* A backslash that is one is no zero character; nor is what a number begins with. */
static bool backslashes_are_text(void) {
    static const struct {
        const char *line;
        bool taken;
    } cases[] = {{"{\"q\": \"a\\\\u0000b\", \"a\": \"c\"}", true},
                 {"{\"q\": \"a\\\\\\u0000b\", \"a\": \"c\"}", false},
                 {"{\"q\": \"a\\u0001b\", \"a\": \"c\"}", true},
                 {"{\"q\": \"a\", \"a\": \"\\u0000\"}", false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        EXPECT(!load(make_file("s.jsonl", cases[i].line), ask) == cases[i].taken &&
               (cases[i].taken || holds(message.text, "s.jsonl:1: the line holds a zero")));
    return true;
}

/* Of a folder every file of the train split is read, in the order of names; a file is named without
   a line where it is wrong as a whole, whatever was read before it. */
static bool folders_are_read_in_order(void) {
    static const char *const first[] = {"{\"q\": \"a\", \"a\": \"1\"}\n",
                                        "\xEF\xBB\xBF[{\"q\": \"a\", \"a\": \"1\"}]"};
    char folder[600], path[2][700], more[1400];
    snprintf(folder, sizeof folder, "%s/split", scratch);
    EXPECT(!mkdir(folder, 0700));
    snprintf(path[0], sizeof path[0], "%s/train-0.json", folder);
    snprintf(path[1], sizeof path[1], "%s/train-1.jsonl", folder);
    bool good = true;
    for (int list = 0; list < 2 && good; list++) {
        demo_error error;
        const char *second = "\xEF\xBB\xBF{\"q\": \"b\", \"a\": \"2\"}";
        demo_write_atomically(path[0], first[list], strlen(first[list]), &error);
        demo_write_atomically(path[1], second, strlen(second), &error);
        for (int mixed = 0; mixed < 2 && good; mixed++) {
            demo_data_options how = ask;
            how.probs = mixed ? "1" : NULL;
            good = load(folder, how) == 0 && arrlen(set.documents) == 2 &&
                   !strcmp(shown(0), "[B]Q a? |1[E]") && !strcmp(shown(1), "[B]Q b? |2[E]");
        }
        snprintf(more, sizeof more, ": the file is empty; give one with at least one record");
        demo_write_atomically(path[1], "", 0, &error);
        char whole[2200];
        snprintf(whole, sizeof whole, "%s%s", path[1], more);
        for (int mixed = 0; mixed < 2 && good; mixed++) {
            demo_data_options how = ask;
            how.probs = mixed ? "1" : NULL;
            good = load(folder, how) == -1 && !strcmp(message.text, whole);
        }
    }
    remove(path[0]), remove(path[1]), rmdir(folder);
    EXPECT(good);
    /* one character behind the last line is a line, too */
    EXPECT(load(make_file("last.jsonl", "{\"q\": \"a\", \"a\": \"1\"}\nx"), ask) == -1 &&
           holds(message.text, "last.jsonl:2: broken JSON at column 1; one whole object"));
    return true;
}

/* What is packed comes out whole, whatever its size, and with a zero behind it. */
static bool gzip_holds_any_size(void) {
    static const size_t sizes[] = {0, 1, 65535, 65536, 65537, 131072, 300000};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const char *why_not = NULL, *path = in_scratch("any.gz");
        size_t packed, whole, size = sizes[i];
        char *text = (char *)malloc(size + 1);
        uint32_t state = 7;
        for (size_t k = 0; k < size; k++) /* what is far behind comes again */
            text[k] = k < 30000 ? (char)((state = state * 1664525u + 1013904223u) >> 24)
                                : text[k - 30000];
        gzFile file = gzopen(path, "wb");
        gzwrite(file, text, (unsigned)size);
        gzclose(file);
        char *bytes = demo_read_file(path, &packed);
        char *got = demo_unzipped(bytes, packed, &whole, &why_not);
        EXPECT(got && whole == size && !memcmp(got, text, size) && !got[size]);
        free(got);
        EXPECT(!demo_unzipped(bytes, packed - 1, &whole, &why_not));
        EXPECT_TEXT(why_not, "it is no whole gzip file");
        free(bytes);
        free(text);
    }
    return true;
}

static bool endings_are_whole(void) {
    static const struct {
        const char *name;
        bool data, jsonl;
    } cases[] = {
        {"x.jsonl", true, true},   {"x.json", true, true},     {"x.jsonl.gz", true, true},
        {"x.json.gz", true, true}, {"x.parquet", true, false}, {"x.txt", false, false},
        {"xjsonl", false, false},  {"x.jsonl ", false, false}, {".json", true, true},
        {"x.gz", false, false},    {"", false, false}};
    char text[] = ".jsonl";
    EXPECT(demo_ends_with(text, ".jsonl") && !demo_ends_with(text + 1, ".jsonl"));
    EXPECT(demo_name_ends(text, ".jsonl") && !demo_name_ends(text + 1, ".jsonl"));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        EXPECT(demo_is_jsonl(cases[i].name) == cases[i].jsonl);
        EXPECT(demo_data_name(cases[i].name) == cases[i].data);
    }
    EXPECT(load(".jsonl", ask) == -1 && holds(message.text, ".jsonl: cannot be read: No such"));
    return true;
}

/* Into as little room as there is. */
static bool summaries_fit(void) {
    char whole[256], text[256];
    EXPECT(load(make_file("f.jsonl", "{\"q\": \"a\", \"a\": \"1\"}\n"), ask) == 0);
    demo_data_summary(&set, whole, sizeof whole);
    for (size_t size = 1; size <= strlen(whole) + 1; size++) {
        memset(text, '#', sizeof text);
        demo_data_summary(&set, text, size);
        EXPECT(strlen(text) == size - 1 && !strncmp(text, whole, size - 1) &&
               text[size] == '#' && text[sizeof text - 1] == '#');
    }
    return true;
}

/* FNV-1a by its own examples; and every number of a set counts. */
static bool digests_see_everything(void) {
    EXPECT(demo_digest(DEMO_DIGEST_EMPTY, "", 0) == UINT64_C(0xcbf29ce484222325));
    EXPECT(demo_digest(DEMO_DIGEST_EMPTY, "a", 1) == UINT64_C(0xaf63dc4c8601ec8c));
    EXPECT(demo_digest(DEMO_DIGEST_EMPTY, "foobar", 6) == UINT64_C(0x85944171f73967e8));
    EXPECT(demo_digest(demo_digest(DEMO_DIGEST_EMPTY, "foo", 3), "bar", 3) ==
           UINT64_C(0x85944171f73967e8));
    EXPECT(demo_digest_number(DEMO_DIGEST_EMPTY, 0x61) ==
           demo_digest(DEMO_DIGEST_EMPTY, "a\0\0\0\0\0\0\0", 8));
    uint64_t seen[16];
    for (int way = 0; way < 16; way++) {
        demo_dataset some = {0};
        for (int i = 0; i < 2; i++) {
            demo_document d = {0};
            for (int32_t t = 0; t < 3; t++) demo_push(&d, 5 + t, t == 1);
            if (i) d.ids[way == 1 ? 0 : 2] += way == 1 || way == 2;
            if (!i) d.ids[2] += way == 3;
            d.loss_mask[way == 4 ? 0 : 2] += (way == 4 && i) || (way == 5 && !i) ||
                                             (way == 6 && i);
            if (way == 7 && i) d.tokens = 2;
            if (way == 8 && !i) d.tokens = 2;
            for (int32_t t = 0; t < 3 && way > 8; t++) {
                arrput(d.targets, t + (way == 10 && i && t == 2) + (way == 11 && !i && !t));
                arrput(d.shares,
                       (float)(t + (way == 12 && i && t == 2) + (way == 13 && !i && !t)));
            }
            arrput(some.documents, d);
        }
        if (way == 14) demo_document_free(&some.documents[1]), arrsetlen(some.documents, 1);
        if (way == 15) arrput(some.documents, (demo_document){0});
        seen[way] = demo_digest_documents(&some);
        for (int before = 0; before < way; before++) EXPECT(seen[before] != seen[way]);
        demo_data_free(&some);
    }
    return true;
}

static bool files_that_cannot_be_read_are_named(void) {
    EXPECT(load("no/such/file.jsonl", ask) == -1);
    EXPECT_TEXT(message.text,
                "no/such/file.jsonl: cannot be read: No such file or directory; give "
                "the path of a .jsonl or .txt file");
    EXPECT(load("data.parquet", ask) == -1 &&
           holds(message.text, "data.parquet: the name ends in neither .jsonl nor .txt"));
    EXPECT(load("", ask) == -1 && load(NULL, ask) == -1);
    const char *zeros = make_file_sized("zeros.jsonl", "{\"q\": \"a\0b\", \"a\": \"c\"}\n", 23);
    EXPECT(load(zeros, ask) == -1 && holds(message.text, "zeros.jsonl:1: "));
    demo_data_options small = ask;
    small.vocab_size = 100;
    EXPECT(load(make_file("v.jsonl", "{\"q\": \"a\", \"a\": \"b\"}\n"), small) == -1);
    EXPECT(holds(message.text,
                 "v.jsonl:1: text needs a vocabulary of 259, but the model has 100"));
    return true;
}

static bool templates_are_checked(void) {
    EXPECT(demo_template_checked("User: {}\n", message.text, sizeof message.text) &&
           !*message.text);
    EXPECT(!demo_template_checked("User:", message.text, sizeof message.text) &&
           holds(message.text, "has no {}"));
    EXPECT(demo_template_checked("User: {}\\n", message.text, sizeof message.text) &&
           holds(message.text, "backslash"));
    EXPECT(!demo_template_checked(NULL, message.text, sizeof message.text) && !*message.text);
    demo_data_options holeless = ask;
    holeless.input_template = "no hole";
    EXPECT(load(make_file("h.jsonl", "{\"q\": \"a\", \"a\": \"b\"}\n"), holeless) == -1 &&
           holds(message.text, "has no {}"));
    return true;
}

static bool writing_is_all_or_nothing(void) {
    size_t size = 0;
    const char *path = make_file("whole", "old");
    EXPECT(demo_write_atomically(path, "new text", 8, &message) == 0);
    char *text = demo_read_file(path, &size);
    EXPECT(text && size == 8 && !strcmp(text, "new text"));
    free(text);
    EXPECT(demo_write_atomically(in_scratch("no/folder"), "x", 1, &message) == -1);
    EXPECT(
        holds(message.text,
              "no/folder: No such file or directory; choose another path or make its folder"));
    /* a folder is not replaced */
    EXPECT(demo_write_atomically(scratch, "x", 1, &message) == -1);
    char left[320];
    snprintf(left, sizeof left, "%s.%ld.tmp", scratch, (long)getpid());
    EXPECT(access(left, F_OK) != 0);
    return true;
}

/* What arrives in a pipe whose reader begins late. */
typedef struct {
    int descriptor;
    size_t bytes;
} late_reader;

static void *read_late(void *reader) {
    late_reader *r = (late_reader *)reader;
    struct pollfd more = {.fd = r->descriptor, .events = POLLIN};
    char part[4096];
    usleep(20000);
    for (ssize_t got = 1; got > 0; r->bytes += (size_t)(got > 0 ? got : 0))
        got = poll(&more, 1, 5000) > 0 ? read(r->descriptor, part, sizeof part) : 0;
    return NULL;
}

/* More than a pipe holds: writing waits for the reader. */
static bool a_pipe_takes_its_time(void) {
    static char text[200003];
    const char *path = in_scratch("pipe");
    late_reader reader = {0};
    pthread_t thread;
    EXPECT(mkfifo(path, 0600) == 0);
    EXPECT(!demo_open_output(path, 0) && errno == ENXIO); /* nobody reads it */
    reader.descriptor = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    EXPECT(reader.descriptor >= 0);
    FILE *file = demo_open_output(path, 1);
    EXPECT(file && !pthread_create(&thread, NULL, read_late, &reader));
    size_t written = fwrite(text, 1, sizeof text, file);
    bool closed = !fclose(file);
    pthread_join(thread, NULL);
    close(reader.descriptor);
    EXPECT(closed && written == sizeof text && reader.bytes == sizeof text);
    return true;
}

/* ---- pairs ------------------------------------------------------- */

static demo_pair_set pairs;
static demo_labelled_set labelled;

static int load_pairs(const char *path, demo_pair_options how) {
    demo_pairs_free(&pairs);
    message.text[0] = 0;
    return demo_pairs_load(&pairs, path, &how, &message);
}

static int load_labelled(const char *path, demo_labelled_options how) {
    demo_labelled_free(&labelled);
    message.text[0] = 0;
    return demo_labelled_load(&labelled, path, &how, &message);
}

#define EXPECT_PAIR(i, want_chosen, want_rejected) \
    do { \
        EXPECT((i) < arrlen(pairs.pairs)); \
        EXPECT_TEXT(shown_document(&pairs.pairs[i].chosen), want_chosen); \
        EXPECT_TEXT(shown_document(&pairs.pairs[i].rejected), want_rejected); \
    } while (0)

static const demo_pair_options prompted = {
    .prompt_key = "p", .chosen_key = "c", .rejected_key = "r"};

static bool pairs_share_a_prompt(void) {
    const char *path = make_file("p.jsonl",
                                 "{\"p\": \"ab\", \"c\": \"cd\", \"r\": \"e\", \"margin\": 0.5,"
                                 " \"m\": -2}\n");
    demo_pair_options how = prompted;
    EXPECT(load_pairs(path, how) == 0 && arrlen(pairs.pairs) == 1 && pairs.tokens == 6 + 5);
    EXPECT_PAIR(0, "[B]ab|cd[E]", "[B]ab|e[E]");
    EXPECT(pairs.supervised_tokens == 3 + 2 && pairs.pairs[0].margin == 0);
    how.margins = true;
    EXPECT(load_pairs(path, how) == 0 && pairs.pairs[0].margin == 0.5);
    how.margin_key = "m";
    how.data.input_template = "Q: {}\n";
    EXPECT(load_pairs(path, how) == 0 && pairs.pairs[0].margin == -2);
    EXPECT_PAIR(0, "[B]Q: ab\n|cd[E]", "[B]Q: ab\n|e[E]");
    EXPECT(load_pairs(
               make_file(
                   "d.jsonl",
                   "{\"prompt\": \"\", \"chosen\": \"\\u20ac\", \"rejected\": \"\xC3\xA9\"}"),
               (demo_pair_options){.prompt_key = "prompt"}) == 0);
    EXPECT_PAIR(0, "[B]|\xE2\x82\xAC[E]", "[B]|\xC3\xA9[E]");
    return true;
}

/* What two whole texts begin with is the prompt, up to the last turn of the assistant or the first
   word that differs; the shorter text keeps a word as response. */
static bool prompts_are_found_in_whole_texts(void) {
    static const char *const cases[][4] = {
        {"Q: 1+1? A: 2", "Q: 1+1? A: 3", "[B]Q: 1+1? A:| 2[E]", "[B]Q: 1+1? A:| 3[E]"},
        {"Q\\nyes", "Q\\nno", "[B]Q\n|yes[E]", "[B]Q\n|no[E]"},
        {"x", "y", "[B]|x[E]", "[B]|y[E]"},
        {" x", " y", "[B]| x[E]", "[B]| y[E]"},
        {"  x", "  y", "[B] | x[E]", "[B] | y[E]"},
        {"a\xC3\xA9", "a\xC3\xA8", "[B]|a\xC3\xA9[E]", "[B]|a\xC3\xA8[E]"},
        {"a.\xC3\xA9", "a.\xC3\xA8", "[B]a.|\xC3\xA9[E]", "[B]a.|\xC3\xA8[E]"},
        {"\xE2\x82\xAC", "\xE2\x82\xAB", "[B]|\xE2\x82\xAC[E]", "[B]|\xE2\x82\xAB[E]"},
        {"\xF0\x9F\x98\x80!", "\xF0\x9F\x98\x81!", "[B]|\xF0\x9F\x98\x80![E]",
         "[B]|\xF0\x9F\x98\x81![E]"},
        {"a \xC3\xA9", "a \xC3\xA8", "[B]a| \xC3\xA9[E]", "[B]a| \xC3\xA8[E]"},
        {"abc", "ab", "[B]|abc[E]", "[B]|ab[E]"},
        {"a b", "a bc", "[B]a| b[E]", "[B]a| bc[E]"},
        {"a\xC3\xA9", "a\xC3\xA9z", "[B]|a\xC3\xA9[E]", "[B]|a\xC3\xA9z[E]"},
        {"same", "same", "[B]|same[E]", "[B]|same[E]"},
        {"the cat", "the car", "[B]the| cat[E]", "[B]the| car[E]"},
        {"so don't", "so don", "[B]so| don't[E]", "[B]so| don[E]"},
        {"1,24", "1,25", "[B]1,|24[E]", "[B]1,|25[E]"},
        {"Human: q\\nAssistant: the cat", "Human: q\\nAssistant: the car",
         "[B]Human: q\nAssistant:| the cat[E]", "[B]Human: q\nAssistant:| the car[E]"},
        {"Human: q\\nAssistant: a", "Human: q\\nAssistant: a\\nHuman: r\\nAssistant: b",
         "[B]Human: q\nAssistant:| a[E]",
         "[B]Human: q\nAssistant:| a\nHuman: r\nAssistant: b[E]"},
        {"Human: q\\nAssistant: a\\nHuman: r\\nAssistant: b",
         "Human: q\\nAssistant: a\\nHuman: s\\nAssistant: bc",
         "[B]Human: q\nAssistant: a\n|Human: r\nAssistant: b[E]",
         "[B]Human: q\nAssistant: a\n|Human: s\nAssistant: bc[E]"},
        {"an Assistant: said this", "an Assistant: said that", "[B]an Assistant: said| this[E]",
         "[B]an Assistant: said| that[E]"},
        {"z", "z", "[B]|z[E]", "[B]|z[E]"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char line[256];
        snprintf(line, sizeof line, "{\"chosen\": \"%s\", \"rejected\": \"%s\"}\n", cases[i][0],
                 cases[i][1]);
        EXPECT(load_pairs(make_file("w.jsonl", line),
                          (demo_pair_options){.data.input_template = "not {} used"}) == 0);
        EXPECT_PAIR(0, cases[i][2], cases[i][3]);
        EXPECT(pairs.counts.identical == !strcmp(cases[i][0], cases[i][1]) &&
               !pairs.counts.two_prompts);
    }
    return true;
}

static bool pair_ids_are_taken_as_they_are(void) {
    EXPECT(load_pairs(
               make_file(
                   "i.jsonl",
                   "{\"prompt_ids\": [0, 65], \"chosen_ids\": [0], \"rejected_ids\": [66, 0]}\n"
                   "{\"prompt_ids\": [], \"chosen_ids\": [1, 2], \"rejected_ids\": [1, 2, 4]}\n"
                   "{\"prompt_ids\": [258], \"chosen_ids\": [258], \"rejected_ids\": [0],"
                   " \"margin\": 3, \"prompt\": 7}\n"),
               (demo_pair_options){.margins = true}) == 0);
    const demo_pair *pair = pairs.pairs;
    EXPECT(arrlen(pairs.pairs) == 3 && pairs.tokens == 3 + 4 + 2 + 3 + 2 + 2 &&
           pairs.supervised_tokens == 3 + 3 + 2);
    EXPECT(pair[0].chosen.tokens == 3 && pair[0].chosen.ids[0] == 0 &&
           pair[0].chosen.ids[2] == 0);
    EXPECT(!pair[0].chosen.loss_mask[1] && pair[0].chosen.loss_mask[2] &&
           pair[0].rejected.loss_mask[3]);
    /* nothing predicts a first token */
    EXPECT(!pair[1].chosen.loss_mask[0] && pair[1].chosen.loss_mask[1]);
    EXPECT(pair[2].margin == 3 && pairs.counts.without_margin == 2);
    EXPECT(!pairs.counts.two_prompts && !pairs.counts.identical);
    return true;
}

/* The same pair without padding, padded left, right, on both sides, and with loss_mask in
   the place of labels. */
static const char padded_pairs[] =
    "{\"chosen_input_ids\": [65, 0, 67], \"chosen_labels\": [-100, 0, 67],"
    " \"rejected_input_ids\": [65, 68], \"rejected_labels\": [-100, 68]}\n"
    "{\"chosen_input_ids\": [5, 65, 0, 67], \"chosen_labels\": [-100, -100, 0, 67],"
    " \"chosen_attention_mask\": [0, 1, 1, 1], \"rejected_input_ids\": [999, -1, 65, 68],"
    " \"rejected_labels\": [-100, -100, -100, 68], \"rejected_attention_mask\": [0, 0, 1, 1]}\n"
    "{\"chosen_input_ids\": [65, 0, 67, 5], \"chosen_labels\": [-100, 0, 67, -100],"
    " \"chosen_attention_mask\": [1, 1, 1, 0], \"rejected_input_ids\": [65, 68, 0, 0],"
    " \"rejected_labels\": [-100, 68, -100, -100], \"rejected_attention_mask\": [true, true, "
    "false, false]}\n"
    "{\"chosen_input_ids\": [0, 65, 0, 67, 0], \"chosen_labels\": [-100, -100, 0, 67, -100],"
    " \"chosen_attention_mask\": [0, 1, 1, 1, 0], \"rejected_input_ids\": [65, 68],"
    " \"rejected_labels\": [-100, 68], \"rejected_attention_mask\": [1, 1]}\n"
    "{\"chosen_input_ids\": [9, 65, 0, 67], \"chosen_loss_mask\": [false, 0, 1, 1],"
    " \"chosen_attention_mask\": [0, 1, 1, 1], \"rejected_input_ids\": [65, 68, 9],"
    " \"rejected_loss_mask\": [0, 1, 0], \"rejected_attention_mask\": [1, 1, 0]}\n";

static bool padding_makes_no_difference(void) {
    EXPECT(load_pairs(make_file("pad.jsonl", padded_pairs),
                      (demo_pair_options){.data.max_len = 3}) == 0);
    EXPECT(arrlen(pairs.pairs) == 5 && pairs.tokens == 5 * (3 + 2) &&
           pairs.supervised_tokens == 5 * (2 + 1));
    for (int i = 0; i < 5; i++) {
        EXPECT(demo_same_document(&pairs.pairs[i].chosen, &pairs.pairs[0].chosen));
        EXPECT(demo_same_document(&pairs.pairs[i].rejected, &pairs.pairs[0].rejected));
    }
    EXPECT(!pairs.counts.two_prompts && !pairs.counts.identical && !pairs.counts.dropped_long);
    EXPECT(
        load(make_file(
                 "one.jsonl",
                 "{\"input_ids\": [7, 65, 66, 7], \"labels\": [-100, -100, 66, -100],"
                 " \"attention_mask\": [0, 1, 1, 0]}\n"
                 "{\"input_ids\": [7, 7], \"attention_mask\": [0, 0], \"loss_mask\": [0, 0]}\n"
                 "{\"input_ids\": [65, 66], \"labels\": [-100, 66]}\n"),
             ask) == 0);
    EXPECT_TEXT(shown(0), "A|B");
    EXPECT_TEXT(shown(1), "A|B");
    EXPECT(set.counts.zero_length == 1);
    return true;
}

static bool long_pairs_are_dropped_or_cut_whole(void) {
    const char *path = make_file("l.jsonl",
                                 "{\"p\": \"ab\", \"c\": \"cdefgh\", \"r\": \"x\"}\n" /* 10 and
                                                                                         5
                                                                                         tokens
                                                                                       */
                                 "{\"p\": \"ab\", \"c\": \"y\", \"r\": \"z\"}\n" /* 5 and 5 */
                                 "{\"p\": \"abcdefg\", \"c\": \"y\", \"r\": \"zz\"}\n" /* 10 and
                                                                                          11 */
                                 "{\"prompt_ids\": [1, 2, 3, 4, 5, 6], \"chosen_ids\": [7, 8],"
                                 " \"rejected_ids\": [7, 9]}\n"); /* 8 and 8, equal when cut to
                                                                     7 */
    demo_pair_options how = prompted;
    how.data.max_len = 7;
    EXPECT(load_pairs(path, how) == 0 && arrlen(pairs.pairs) == 1 &&
           pairs.counts.dropped_long == 3);
    EXPECT_PAIR(0, "[B]ab|y[E]", "[B]ab|z[E]");
    how.data.long_documents = DEMO_LONG_CUT;
    EXPECT(load_pairs(path, how) == 0 && arrlen(pairs.pairs) == 3 &&
           pairs.counts.dropped_long == 1);
    EXPECT_PAIR(0, "[B]ab|cde[E]", "[B]ab|x[E]");
    EXPECT(pairs.counts.cut == 2 && pairs.counts.identical == 1 &&
           pairs.pairs[2].chosen.ids[6] == 7);
    how.data.max_len =
        10; /* a prompt of eight tokens leaves less than the three that it must */
    EXPECT(load_pairs(path, how) == 0 && pairs.counts.dropped_long == 1 && !pairs.counts.cut);
    how.data.max_len = 11;
    EXPECT(load_pairs(path, how) == 0 && !pairs.counts.dropped_long && !pairs.counts.cut);
    EXPECT_PAIR(2, "[B]abcdefg|y[E]", "[B]abcdefg|zz[E]");
    how.data.max_len = 7; /* a reward model's is cut all the same */
    how.data.long_prompts = true;
    EXPECT(load_pairs(path, how) == 0 && !pairs.counts.dropped_long && pairs.counts.cut == 3);
    EXPECT_PAIR(2, "[B]abcde|[E]", "[B]abcde|[E]");
    how.data.long_prompts = false;
    how.data.long_documents = DEMO_LONG_CUT_BOTH; /* both by the longer response */
    how.data.max_len = 8;
    EXPECT(load_pairs(path, how) == 0 && !pairs.counts.dropped_long && pairs.counts.cut == 2);
    EXPECT_PAIR(0, "[B]ab|cdefg", "[B]ab|x[E]");
    EXPECT_PAIR(2, "[B]abcd|y[E]", "[B]abcd|zz[E]");
    how.data.long_documents = DEMO_LONG_CUT;
    const char *mirrored = make_file("r.jsonl",
                                     "{\"p\": \"ab\", \"c\": \"x\", \"r\": \"cdefgh\"}");
    how.data.max_len = 7;
    EXPECT(load_pairs(mirrored, how) == 0 && pairs.counts.cut == 1);
    EXPECT_PAIR(0, "[B]ab|x[E]", "[B]ab|cde[E]");
    how.data.long_documents = DEMO_LONG_DROP;
    EXPECT(load_pairs(mirrored, how) == -1 && holds(message.text, "1 too long, 0 cut"));
    how.data.max_len = 3;
    how.data.long_documents = DEMO_LONG_CUT;
    EXPECT(load_pairs(path, how) == -1 &&
           holds(message.text, "l.jsonl: no pair is left (4 pairs read, 0 kept"));
    EXPECT(holds(message.text, "4 too long, 0 cut, 0 identical); raise --max_len") &&
           !pairs.pairs);
    return true;
}

/* Every length of prompt, response and limit: what is kept is within the limit, supervised
   and ends in EOS. */
static bool pairs_of_every_size_are_sound(void) {
    for (int prompt = 0; prompt < 6; prompt++)
        for (int response = 1; response < 6; response++)
            for (int limit = 1; limit < 16; limit++) {
                char line[128];
                snprintf(line, sizeof line,
                         "{\"p\": \"%.*s\", \"c\": \"%.*s\", \"r\": \"x\"}\n"
                         "{\"p\": \"\", \"c\": \"y\", \"r\": \"x\"}",
                         prompt, "pppppp", response, "cccccc");
                demo_pair_options how = prompted;
                how.data.max_len = limit;
                how.data.long_documents = DEMO_LONG_CUT;
                int failed = load_pairs(make_file("s.jsonl", line), how);
                bool fits = prompt + 3 < limit, cut = fits && prompt + response + 2 > limit;
                EXPECT(failed == (limit < 4 ? -1 : 0));
                if (failed) continue;
                EXPECT(arrlen(pairs.pairs) == 1 + fits && pairs.counts.cut == cut &&
                       pairs.counts.read == 2);
                const demo_document *chosen = &pairs.pairs[0].chosen;
                EXPECT(chosen->tokens <= limit && arrlen(chosen->ids) == chosen->tokens);
                EXPECT(demo_supervised(chosen) >= 2 &&
                       chosen->ids[chosen->tokens - 1] == DEMO_EOS);
                EXPECT(!fits || chosen->ids[prompt + 1] == 'c');
            }
    return true;
}

static bool pairs_are_counted(void) {
    char summary[320], both[1100];
    const char *one = make_file(
        "1.jsonl", "{\"p\": \"a\", \"c\": \"b\", \"r\": \"b\", \"margin\": 1}\n\n"
                   "{\"p\": \"a\", \"c\": \"b\", \"r\": \"c\", \"margin\": null}\r\n");
    const char *two = make_file(
        "2.jsonl",
        "{\"chosen_input_ids\": [1, 2, 3], \"chosen_labels\": [-100, -100, 3],"
        " \"rejected_input_ids\": [1, 4, 5], \"rejected_labels\": [-100, -100, 5]}\n");
    snprintf(both, sizeof both, "%s,%s", one, two);
    demo_pair_options how = prompted;
    how.data.max_samples = 3;
    how.margins = true;
    EXPECT(load_pairs(both, how) == 0);
    demo_pairs_summary(&pairs, summary, sizeof summary);
    EXPECT_TEXT(summary, "3 pairs read, 3 kept with 22 tokens, 10 of them supervised; 0 too "
                         "long, 0 cut, 1 identical,"
                         " 2 without margin, 1 with two prompts");
    how.margins = false;
    EXPECT(load_pairs(
               make_file(
                   "3.jsonl",
                   "{\"chosen_input_ids\": [1, 2, 3], \"chosen_labels\": [-100, 2, 3],"
                   " \"rejected_input_ids\": [1, 2, 5], \"rejected_labels\": [-100, -100, 5]}"),
               how) == 0 &&
           pairs.counts.two_prompts == 1);
    EXPECT(load_pairs(one, how) == 0);
    demo_pairs_summary(&pairs, summary, sizeof summary);
    EXPECT_TEXT(summary, "2 pairs read, 2 kept with 16 tokens, 8 of them supervised; 0 too "
                         "long, 0 cut, 1 identical");
    how.data.max_samples = 0;
    make_file("2.jsonl", "{\"p\": \"a\", \"c\": \"b\", \"r\": \"c\"}\nnot JSON\n");
    EXPECT(load_pairs(both, how) == -1 && holds(message.text, "2.jsonl:2: broken JSON"));
    EXPECT(!pairs.pairs && !pairs.counts.read && !pairs.tokens); /* nothing half read */
    return true;
}

static bool broken_pairs_are_named(void) {
    static const char *const cases[][2] = {
        {"", "x.jsonl: the file is empty; give one with at least one record"},
        {"\n \n", "x.jsonl: only empty lines"},
        {"{\"p\": \"a\", \"c\": \"b\", \"r\": \"d\"}\n[1]",
         "x.jsonl:2: the line is a list, but an object"},
        {"{\"c\": \"b\", \"r\": \"d\"}",
         "x.jsonl:1: no key \"p\"; set --prompt_key to one of those present: \"c\", \"r\""},
        {"{\"p\": \"a\", \"chosen\": \"b\"}",
         "x.jsonl:1: no key \"c\"; set --chosen_key to one of those"},
        {"{\"p\": \"a\", \"c\": \"b\"}",
         "x.jsonl:1: no key \"r\"; set --rejected_key to one of those"},
        {"{\"p\": 1, \"c\": \"b\", \"r\": \"d\"}",
         "x.jsonl:1: \"p\" is a number, but text is needed"},
        {"{\"p\": \"a\", \"c\": [{}], \"r\": \"d\"}",
         "x.jsonl:1: \"c\" is a list, but text is needed; demos/prepare.py makes a token file"},
        {"{\"p\": \"a\", \"c\": \"b\", \"r\": null}",
         "x.jsonl:1: \"r\" is null, but text is needed"},
        {"{\"p\": \"a\", \"c\": \"\", \"r\": \"d\"}",
         "x.jsonl:1: \"c\" is empty, but a response needs a token; fill it or remove the line"},
        {"\n{\"p\": \"a\", \"c\": \"b\", \"r\": \"\"}",
         "x.jsonl:2: \"r\" is empty, but a response needs a token"},
        {"{\"p\": \"a\", \"c\": \"b\\u0000\", \"r\": \"d\"}",
         "x.jsonl:1: the line holds a zero character"},
        {"{\"p\": \"a\", \"c\": \"b\", \"r\": \"d\", \"margin\": \"1\"}",
         "x.jsonl:1: \"margin\" is text, but a number is needed; or set --margin_key"},
        {"{\"p\": \"a\", \"c\": \"b\", \"r\": \"d\", \"margin\": 1e999}",
         "x.jsonl:1: \"margin\" is inf, but a finite"},
        {"{\"p\": \"a\", \"c\": \"b\", \"r\": \"d\"}",
         "x.jsonl: margins are asked for, but no pair has a \"margin\"; set --margin_key"},
        {"{\"prompt_ids\": [1], \"chosen_ids\": [2]}",
         "x.jsonl:1: no key \"rejected_ids\"; a pair of ids is \"prompt_ids\", \"chosen_ids\" "
         "and \"rejected_ids\""},
        {"{\"chosen_ids\": [1], \"rejected_ids\": [2]}",
         "x.jsonl:1: no key \"prompt_ids\"; a pair of ids is"},
        {"{\"prompt_ids\": 1, \"chosen_ids\": [2]}",
         "x.jsonl:1: \"prompt_ids\" is a number, but a list is needed"},
        {"{\"prompt_ids\": [1], \"chosen_ids\": [2], \"rejected_ids\": [259]}",
         "x.jsonl:1: rejected_ids[0] is 259, but it must be a whole number from 0 to 258"},
        {"{\"prompt_ids\": [1, -1], \"chosen_ids\": [2], \"rejected_ids\": [2]}",
         "x.jsonl:1: prompt_ids[1] is -1, but it must be a whole number from 0 to 258"},
        {"{\"prompt_ids\": [1], \"chosen_ids\": [], \"rejected_ids\": [2]}",
         "x.jsonl:1: \"chosen_ids\" leaves no response token in a document of 1; give one or "
         "remove the line"},
        {"{\"prompt_ids\": [], \"chosen_ids\": [1, 2], \"rejected_ids\": [2]}",
         "x.jsonl:1: \"rejected_ids\" leaves no response token in a document of 1"},
        {"{\"prompt_ids\": [1], \"chosen_input_ids\": [2]}",
         "x.jsonl:1: ids in two forms, chosen_ids and chosen_input_ids; leave out one of them"},
        {"{\"chosen_input_ids\": [1, 2], \"chosen_labels\": [-100, 2]}",
         "x.jsonl:1: no key \"rejected_input_ids\"; both halves of a pair are needed"},
        {"{\"chosen_input_ids\": [1, 2], \"rejected_input_ids\": [1, 3]}",
         "x.jsonl:1: no key \"chosen_labels\"; add it, with -100 for the tokens of "
         "\"chosen_input_ids\" that are the"},
        {"{\"chosen_input_ids\": [1, 2], \"chosen_labels\": [2, -100]}",
         "x.jsonl:1: chosen_labels[0] is 2 but chosen_input_ids[0] is 1; a label repeats the "
         "id at its own place"},
        {"{\"chosen_input_ids\": [1, 2], \"chosen_labels\": [-100]}",
         "x.jsonl:1: 1 chosen_labels for 2 chosen_input_ids; give one for each token"},
        {"{\"chosen_input_ids\": [1, 2], \"chosen_labels\": [-100, -100]}",
         "x.jsonl:1: \"chosen_input_ids\" leaves no response token in a document of 2"},
        {"{\"chosen_input_ids\": [1, 2], \"chosen_labels\": [-100, 2], "
         "\"chosen_attention_mask\": [1]}",
         "x.jsonl:1: 1 chosen_attention_mask for 2 chosen_input_ids; give one for each token"},
        {"{\"chosen_input_ids\": [1, 2], \"chosen_labels\": [-100, 2], "
         "\"chosen_attention_mask\": \"11\"}",
         "x.jsonl:1: \"chosen_attention_mask\" is text, but a list is needed"},
        {"{\"chosen_input_ids\": [1, 2], \"chosen_labels\": [-100, 2], "
         "\"chosen_attention_mask\": [1, 2]}",
         "x.jsonl:1: chosen_attention_mask[1] is 2, but it must be a whole number from 0 to 1"},
        {"{\"chosen_input_ids\": [1, 2, 3], \"chosen_labels\": [-100, -100, 3], "
         "\"chosen_attention_mask\": [1, 0, 1]}",
         "x.jsonl:1: chosen_attention_mask[1] is 0 and chosen_attention_mask[2] is 1; zeros "
         "may stand only at the"},
        {"{\"chosen_input_ids\": [1, 2, 3], \"chosen_labels\": [-100, 2, 3], "
         "\"chosen_attention_mask\": [1, 1, 0]}",
         "x.jsonl:1: chosen_labels[2] supervises padding, for chosen_attention_mask[2] is 0; "
         "make it -100"},
        {"{\"chosen_input_ids\": [1, 2, 3], \"chosen_loss_mask\": [1, 1, 1], "
         "\"chosen_attention_mask\": [0, 1, 1]}",
         "x.jsonl:1: chosen_loss_mask[0] supervises padding, for chosen_attention_mask[0] is "
         "0; make it 0"},
        {"{\"chosen_input_ids\": [1, 2], \"chosen_labels\": [-100, -100], "
         "\"chosen_attention_mask\": [0, 0]}",
         "x.jsonl:1: \"chosen_input_ids\" leaves no response token in a document of 0"},
    };
    demo_pair_options how = prompted;
    how.margins = true;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        EXPECT(load_pairs(make_file("x.jsonl", cases[i][0]), how) == -1);
        if (!holds(message.text, cases[i][1])) EXPECT_TEXT(message.text, cases[i][1]);
        EXPECT(!pairs.pairs && !pairs.counts.read);
    }
    EXPECT(load_pairs(make_file("x.txt", "text"), how) == -1 &&
           holds(message.text, "x.txt: plain text holds no records"));
    EXPECT(load_pairs("none.jsonl", how) == -1 &&
           holds(message.text, "none.jsonl: cannot be read: No such file"));
    how.data.vocab_size = 100;
    EXPECT(load_pairs(make_file("v.jsonl", "{\"p\": \"a\", \"c\": \"b\", \"r\": \"d\"}"),
                      how) == -1);
    EXPECT(holds(message.text,
                 "v.jsonl:1: text needs a vocabulary of 259, but the model has 100"));
    how.data.input_template = "no hole";
    EXPECT(load_pairs("v.jsonl", how) == -1 &&
           holds(message.text, "input_template has no {} for the prompt: no hole"));
    return true;
}

/* ---- labelled responses ------------------------------------------ */

static const demo_labelled_options judged = {.data = {.input_key = "q", .output_key = "a"},
                                             .label_key = "l"};

static bool labels_are_read_in_every_spelling(void) {
    static const char *const labels[] = {"true",  "1", "\"1\"", "1.0",
                                         "false", "0", "\"0\"", "-0"};
    for (int i = 0; i < 8; i++) {
        char line[256];
        snprintf(line, sizeof line,
                 "{\"q\": \"ab\", \"a\": \"c\", \"l\": %s}\n"
                 "{\"input_ids\": [0, 65, 0], \"labels\": [-100, -100, 0], \"l\": %s}",
                 labels[i], labels[i]);
        EXPECT(load_labelled(make_file("k.jsonl", line), judged) == 0 &&
               arrlen(labelled.records) == 2);
        EXPECT(labelled.records[0].desirable == (i < 4) &&
               labelled.records[1].desirable == (i < 4));
        EXPECT(labelled.counts.desirable == (i < 4 ? 2 : 0) &&
               labelled.counts.undesirable == (i < 4 ? 0 : 2));
        EXPECT_TEXT(shown_document(&labelled.records[0].document), "[B]ab|c[E]");
        EXPECT(labelled.records[0].prompt_tokens == 3 &&
               labelled.records[1].prompt_tokens == 2);
        EXPECT(labelled.records[1].document.ids[2] == 0 &&
               labelled.records[1].document.loss_mask[2] == 1);
    }
    EXPECT(load_labelled(
               make_file("d.jsonl",
                         "{\"input\": \"\xC3\xA9\", \"output\": \"b\", \"label\": true}"),
               (demo_labelled_options){.data.input_template = "<{}>"}) == 0);
    EXPECT_TEXT(shown_document(&labelled.records[0].document), "[B]<\xC3\xA9>|b[E]");
    return true;
}

static bool labelled_responses_are_counted(void) {
    char summary[320];
    const char *path = make_file(
        "c.jsonl", "{\"q\": \"ab\", \"a\": \"cdef\", \"l\": 1}\n"
                   "{\"q\": \"abcd\", \"a\": \"c\", \"l\": 0}\n"
                   "{\"q\": \"\", \"a\": \"c\", \"l\": 0}\n"
                   "{\"input_ids\": [9, 1, 2, 9], \"labels\": [-100, -100, 2, -100],"
                   " \"attention_mask\": [0, 1, 1, 0], \"l\": true}\n");
    demo_labelled_options how = judged;
    how.data.max_len = 6;
    EXPECT(load_labelled(path, how) == 0);
    demo_labelled_summary(&labelled, summary, sizeof summary);
    EXPECT_TEXT(summary, "4 read, 2 kept with 5 tokens, 3 of them supervised; 1 desirable, 1 "
                         "undesirable; 2 too long, 0 cut");
    EXPECT(labelled.records[1].document.tokens == 2 &&
           labelled.records[1].document.ids[0] == 1);
    how.data.long_documents = DEMO_LONG_CUT;
    EXPECT(load_labelled(path, how) == 0);
    demo_labelled_summary(&labelled, summary, sizeof summary);
    EXPECT_TEXT(summary, "4 read, 3 kept with 11 tokens, 6 of them supervised; 2 desirable, 1 "
                         "undesirable; 1 too long, 1 cut");
    EXPECT_TEXT(shown_document(&labelled.records[0].document), "[B]ab|cd[E]");
    how.data.max_len = 1;
    EXPECT(load_labelled(path, how) == -1 &&
           holds(message.text, "c.jsonl: no response is left (4 read, 0 kept"));
    how.data.max_len = 0;
    how.data.max_samples = 3;
    EXPECT(load_labelled(path, how) == 0 && arrlen(labelled.records) == 3 &&
           labelled.counts.read == 3);
    return true;
}

static bool broken_labels_are_named(void) {
    static const char *const cases[][2] = {
        {"{\"q\": \"a\", \"a\": \"b\"}",
         "x.jsonl:1: no key \"l\"; set --label_key to one of those present: \"q\", \"a\""},
        {"{\"a\": \"b\", \"l\": 1}", "x.jsonl:1: no key \"q\"; set --input_key to one of"},
        {"{\"q\": \"b\", \"l\": 1}", "x.jsonl:1: no key \"a\"; set --output_key to one of"},
        {"{\"q\": \"a\", \"a\": 3, \"l\": 1}",
         "x.jsonl:1: \"a\" is a number, but text is needed"},
        {"{\"q\": \"a\", \"a\": \"\", \"l\": 1}",
         "x.jsonl:1: \"a\" is empty, but a response needs a token"},
        {"{\"q\": \"a\", \"a\": \"b\", \"l\": 2}",
         "x.jsonl:1: \"l\" is 2, but it must be true or false, 1 or 0"},
        {"{\"q\": \"a\", \"a\": \"b\", \"l\": -1}",
         "x.jsonl:1: \"l\" is -1, but it must be true or false"},
        {"{\"q\": \"a\", \"a\": \"b\", \"l\": 0.5}",
         "x.jsonl:1: \"l\" is 0.5, but it must be true or false"},
        {"{\"q\": \"a\", \"a\": \"b\", \"l\": \"good\"}",
         "x.jsonl:1: \"l\" is \"good\", but it must be true or false"},
        {"{\"q\": \"a\", \"a\": \"b\", \"l\": \"\"}",
         "x.jsonl:1: \"l\" is \"\", but it must be true or false"},
        {"{\"q\": \"a\", \"a\": \"b\", \"l\": null}",
         "x.jsonl:1: \"l\" is null, but it must be true or false"},
        {"{\"q\": \"a\", \"a\": \"b\", \"l\": [1]}",
         "x.jsonl:1: \"l\" is a list, but it must be true or false"},
        {"{\"q\": \"a\", \"a\": \"b\", \"l\": 1}\n{\"input_ids\": [1, 2], \"l\": 1}",
         "x.jsonl:2: no key \"labels\"; add it, with -100 for the tokens of \"input_ids\" that "
         "are the prompt"},
        {"{\"input_ids\": [1, 2], \"labels\": [-100, -100], \"l\": 1}",
         "x.jsonl:1: \"input_ids\" leaves no response token in a document of 2"},
        {"{\"input_ids\": [1], \"labels\": [1], \"l\": 1}",
         "x.jsonl:1: \"input_ids\" leaves no response token"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        EXPECT(load_labelled(make_file("x.jsonl", cases[i][0]), judged) == -1);
        if (!holds(message.text, cases[i][1])) EXPECT_TEXT(message.text, cases[i][1]);
        EXPECT(!labelled.records && !labelled.counts.read);
    }
    return true;
}

/* Loads three records and pairs them up in the order 2, 0, 1. */
static bool mismatches_are(const char *lines, int64_t max_len, const char *const want[3]) {
    static const int64_t step[] = {2, 0, 1};
    demo_document documents[3];
    demo_labelled_options how = judged;
    how.data.max_len = max_len;
    how.data.long_documents = DEMO_LONG_CUT;
    EXPECT(load_labelled(make_file("m.jsonl", lines), how) == 0 &&
           arrlen(labelled.records) == 3);
    EXPECT(demo_mismatched_step(documents, &labelled, step, 3, &how.data, &message) == 0);
    for (int i = 0; i < 3; i++) {
        EXPECT_TEXT(shown_document(&documents[i]), want[i]);
        EXPECT(arrlen(documents[i].ids) == documents[i].tokens);
        EXPECT(arrlen(documents[i].loss_mask) == documents[i].tokens);
        demo_document_free(&documents[i]);
    }
    return true;
}

static bool prompts_meet_the_next_response(void) {
    static const char lines[] =
        "{\"q\": \"a\", \"a\": \"1\", \"l\": 1}\n{\"q\": \"bb\", \"a\": \"22\", \"l\": 0}\n"
        "{\"q\": \"cccc\", \"a\": \"3\", \"l\": 0}\n";
    static const char *const whole[] = {"[B]cccc|1[E]", "[B]a|22[E]", "[B]bb|3[E]"};
    static const char *const tight[] = {"[B]cccc|1[E]", "[B]a|2222[E]", "[B]bb|3[E]"};
    static const char ids[] =
        "{\"input_ids\": [65, 66], \"labels\": [-100, 66], \"l\": 1}\n"
        "{\"input_ids\": [65, 66, 67, 68], \"labels\": [-100, 66, -100, 68], \"l\": 1}\n"
        "{\"input_ids\": [88, 89, 90], \"labels\": [-100, -100, 90], \"l\": 0}\n";
    static const char *const mixed[] = {"XY|B", "A|B|C|D", "A|Z"};
    static const char longer[] =
        "{\"q\": \"a\", \"a\": \"1\", \"l\": 1}\n{\"q\": \"bb\", \"a\": \"2222\", \"l\": 0}\n"
        "{\"q\": \"cccc\", \"a\": \"3\", \"l\": 0}\n";
    static const char swapped[] = "{\"q\": \"a\", \"a\": \"11111\", \"l\": 1}\n"
                                  "{\"q\": \"bb\", \"a\": \"2\", \"l\": 0}\n"
                                  "{\"q\": \"cccc\", \"a\": \"3\", \"l\": 0}\n";
    /* the first has room for two */
    static const char *const cut[] = {"[B]cccc|11[E]", "[B]a|2[E]", "[B]bb|3[E]"};
    EXPECT(mismatches_are(lines, 0, whole) && mismatches_are(longer, 8, tight) &&
           mismatches_are(ids, 0, mixed));
    EXPECT(mismatches_are(swapped, 8, cut));
    demo_document alone;
    int64_t first = 0;
    EXPECT(demo_mismatched_step(&alone, &labelled, &first, 1, &judged.data, &message) == -1);
    EXPECT_TEXT(message.text,
                "a step of 1 document has no other response to pair its prompt with, "
                "as the KL term needs; set"
                " --train_batch_size to 2 or more");
    return true;
}

/* ---- arith ------------------------------------------------------- */

static bool stories_depend_on_seed_and_index_alone(void) {
    char q[2][DEMO_ARITH_TEXT], a[2][DEMO_ARITH_TEXT];
    size_t sizes[2];
    const char *whole = in_scratch("whole.jsonl"), *part = in_scratch("part.jsonl");
    EXPECT(demo_arith_write(whole, 7, 0, 50, 0, &message) == 0);
    EXPECT(demo_arith_write(part, 7, 30, 20, 0, &message) == 0);
    char *all = demo_read_file(whole, &sizes[0]), *tail = demo_read_file(part, &sizes[1]);
    EXPECT(all && tail && sizes[1] < sizes[0] && !strcmp(all + sizes[0] - sizes[1], tail));
    free(all);
    free(tail);
    int alike = 0;
    for (uint64_t i = 0; i < 200; i++) {
        demo_arith_item(q[0], a[0], 1, i);
        demo_arith_item(q[1], a[1], 2, i);
        alike += !strcmp(q[0], q[1]);
        demo_arith_item(q[1], a[1], 1, i);
        EXPECT(!strcmp(q[0], q[1]) && !strcmp(a[0], a[1]));
    }
    EXPECT(alike < 5); /* another seed, other stories */
    demo_arith_item(q[0], a[0], 1, 0);
    EXPECT_TEXT(a[0], "7 - 2 = 5. The answer is 5."); /* the same on every machine */
    return true;
}

/* Recomputes every equation of an answer; each must go on from the result before. */
static bool answer_adds_up(const char *answer, int claimed) {
    int left, right, result, used, before = -1;
    char step;
    while (sscanf(answer, "%d %c %d = %d. %n", &left, &step, &right, &result, &used) == 4) {
        EXPECT(demo_step(step, left, right) == result && (before < 0 || before == left) &&
               result > 0);
        before = result;
        answer += used;
    }
    EXPECT(sscanf(answer, "The answer is %d.%n", &result, &used) == 1 && !answer[used]);
    EXPECT(before == result && result == claimed && result < 100);
    return true;
}

static bool answers_are_right(void) {
    char question[DEMO_ARITH_TEXT], answer[DEMO_ARITH_TEXT];
    bool steps[128] = {false};
    for (uint64_t i = 0; i < 5000; i++) {
        int value = demo_arith_item(question, answer, 3, i);
        size_t length = strlen(question) + strlen(answer);
        snprintf(message.text, sizeof message.text, "%s %s", question, answer);
        EXPECT(answer_adds_up(answer, value));
        char one[8], other[8];
        EXPECT(sscanf(question, "%7s and %7s read", one, other) < 2 || strcmp(one, other));
        EXPECT(length >= 80 && length <= 200 && !strpbrk(message.text, "\"\\$"));
        for (const char *c = answer; *c; c++) steps[(unsigned char)*c] = true;
    }
    EXPECT(steps['+'] && steps['-'] && steps['*']);
    return true;
}

/* A table of "which byte after which", counted on 2,000 stories, already says most: its nats
 * per answer byte on others, against ln 259 of a model that knows nothing. */
static bool answers_are_learnable(void) {
    static double pairs[256][256], totals[256];
    double nats = 0, bytes = 0;
    char question[DEMO_ARITH_TEXT], answer[DEMO_ARITH_TEXT];
    for (uint64_t i = 0; i < 2400; i++) {
        demo_arith_item(question, answer, 5, i);
        unsigned char before = (unsigned char)question[strlen(question) - 1];
        for (const char *c = answer; *c; before = (unsigned char)*c++) {
            unsigned char now = (unsigned char)*c;
            if (i < 2000)
                pairs[before][now]++, totals[before]++;
            else
                nats -= log((pairs[before][now] + 0.01) / (totals[before] + 2.59)), bytes++;
        }
    }
    EXPECT(nats / bytes < 0.3 * log(DEMO_VOCAB));
    return true;
}

/* As Python's random.Random(42).random() picks by running sums 1, 3 and 4, until a set that is picked
   is used up; and shares of a limit, from the beginnings. */
static bool sets_are_mixed_by_the_rule(void) {
    static const int64_t there[] = {5, 3, 9}, fewer[] = {5, 2, 9};
    static const int32_t drawn_of[] = {1, 0, 1, 0, 1};
    static const int shares[][4] = {{0, 0, 0, 0},  {1, 0, 0, 1},  {3, 0, 1, 2},
                                    {6, 1, 1, 4},  {9, 2, 2, 5},  {12, 3, 2, 7},
                                    {16, 4, 3, 9}, {17, 5, 3, 9}, {18, 5, 3, 9}};
    double ends[3];
    EXPECT(!demo_mix_weights(ends, 3, "1,2,1", &message) && ends[0] == 1 && ends[1] == 3 &&
           ends[2] == 4);
    for (int64_t limit = 0; limit < 8; limit++) {
        int32_t *order = demo_mix_drawn(there, 3, ends, 42, limit);
        int64_t want = limit < 5 ? limit : 5;
        EXPECT(arrlen(order) == want &&
               (!want || !memcmp(order, drawn_of, (size_t)want * sizeof *order)));
        arrfree(order);
    }
    int32_t *order = demo_mix_drawn(fewer, 3, ends, 42, 9);
    EXPECT(arrlen(order) == 4);
    arrfree(order);
    for (size_t i = 0; i < sizeof shares / sizeof shares[0]; i++) {
        int counts[3] = {0};
        order = demo_mix_shared(there, 3, shares[i][0]);
        for (int64_t k = 0; k < arrlen(order); k++) {
            counts[order[k]]++;
            EXPECT(!k || order[k - 1] <= order[k]);
        }
        for (int set = 0; set < 3; set++) EXPECT(counts[set] == shares[i][1 + set]);
        arrfree(order);
    }
    static const int64_t none[] = {0, 0};
    EXPECT(!demo_mix_shared(none, 2, 5));
    return true;
}

/* The files of a folder: its train split, by names and by a folder of that name; all of them where no
   name is that of a split. */
static bool folders_have_a_train_split(void) {
    static const struct {
        const char *files, *found; /* NULL: nothing is */
    } cases[] = {
        {"b.jsonl a.json notes.txt", "a.json b.jsonl"},
        {"train.jsonl other.json", "train.jsonl"},
        {"train-1.jsonl train-0.json.gz training.jsonl trainer.json",
         "train-0.json.gz train-1.jsonl"},
        {"train_2.jsonl test.jsonl", "train_2.jsonl"},
        {"a.json test.jsonl", NULL},
        {"a.json validation.jsonl", NULL},
        {"a.json dev.jsonl", NULL},
        {"a.json eval.jsonl", NULL},
        {"a.json latest.jsonl", "a.json latest.jsonl"},
        {"train.txt a.json", "a.json"},
        {"train/b.json train/a.jsonl train/c.txt z.json", "train/a.jsonl train/b.json"},
        {"train/b.json train.json", "train.json train/b.json"},
        {"notes.txt", NULL}};
    char folder[600], inside[700], path[800], list[200], sentence[900];
    snprintf(folder, sizeof folder, "%s/set", scratch);
    snprintf(inside, sizeof inside, "%s/train", folder);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int named = 0; named < 2; named++) {
            char found[400] = "";
            mkdir(folder, 0700), mkdir(inside, 0700);
            snprintf(list, sizeof list, "%s", cases[i].files);
            for (char *file = strtok(list, " "); file; file = strtok(NULL, " ")) {
                snprintf(path, sizeof path, "%s/%s", folder, file);
                fclose(fopen(path, "wb"));
            }
            snprintf(path, sizeof path, "%s%s", named ? "json@" : "", folder);
            char **paths = demo_set_files(path, &message);
            for (int64_t k = 0; k < arrlen(paths); k++) {
                if (k) strcat(found, " ");
                strcat(found, paths[k] + strlen(folder) + 1);
            }
            demo_paths_free(paths);
            snprintf(list, sizeof list, "%s", cases[i].files);
            for (char *file = strtok(list, " "); file; file = strtok(NULL, " ")) {
                snprintf(path, sizeof path, "%s/%s", folder, file);
                remove(path);
            }
            EXPECT(!rmdir(inside) && !rmdir(folder));
            EXPECT_TEXT(found, cases[i].found ? cases[i].found : "");
            snprintf(sentence, sizeof sentence,
                     "%s has no data of a train split (train.jsonl, train-*.jsonl, "
                     "train/*.jsonl); name the file",
                     folder);
            if (!cases[i].found) EXPECT_TEXT(message.text, sentence);
        }
    EXPECT(!demo_set_files("parquet@there", &message));
    EXPECT_TEXT(message.text,
                "parquet@there: only json@FOLDER is read here; demos/prepare.py also "
                "reads parquet@FOLDER");
    char **paths = demo_set_files("json@a.jsonl", &message);
    EXPECT(arrlen(paths) == 1);
    EXPECT_TEXT(paths[0], "a.jsonl");
    demo_paths_free(paths);
    return true;
}

/* Why a file is not read, and how large one may be. */
static bool files_say_why(void) {
    const char *why_not, *path = make_file("five", "12345");
    size_t size = 9;
    char *text = demo_read_whole(path, 5, &size, &why_not);
    EXPECT(text && size == 5 && !text[5] && !why_not);
    free(text);
    EXPECT(!demo_read_whole(path, 4, &size, &why_not));
    EXPECT_TEXT(why_not, "it is far too large for such a file");
    EXPECT(!demo_read_whole(scratch, 9, &size, &why_not));
    EXPECT_TEXT(why_not, "it is a folder, not a file");
    EXPECT(!demo_read_whole("/dev/null", 9, &size, &why_not));
    EXPECT_TEXT(why_not,
                "it is a pipe, socket or device, not a regular file; write its contents "
                "to a file first");
    EXPECT(!demo_read_whole("no/such", 9, &size, &why_not));
    EXPECT_TEXT(why_not, "No such file or directory");
    for (size_t length = 65534; length < 65539; length++) { /* around the first room */
        char *bytes = (char *)malloc(length);
        memset(bytes, 'x', length);
        text = demo_read_file(make_file_sized("large", bytes, length), &size);
        EXPECT(text && size == length && !memcmp(text, bytes, length) && !text[length]);
        free(text);
        free(bytes);
    }
    static char name[5000];
    memset(name, 'n', sizeof name - 1);
    EXPECT(demo_write_atomically(name, "x", 1, &message) == -1 &&
           holds(message.text, ": File name too long; choose another path or make its folder"));
    EXPECT(demo_write_atomically("no/such", "x", 1, &message) == -1);
    EXPECT_TEXT(message.text, "cannot write no/such: No such file or directory; choose another "
                              "path or make its folder");
    EXPECT(demo_write_atomically("/dev/null", "x", 1, &message) == -1);
    EXPECT_TEXT(message.text,
                "cannot write /dev/null: it is there and is no regular file; choose "
                "another path");
    return true;
}

/* A key that stands twice, wherever; the same key in two objects is none. */
static bool keys_stand_once(void) {
    static const struct {
        const char *json, *twice;
    } cases[] = {{"{\"a\": 1, \"b\": 2}", NULL},
                 {"{\"a\": 1, \"a\": 2}", "a"},
                 {"{\"c\": 1, \"b\": 1, \"a\": 2, \"b\": 3}", "b"},
                 {"{\"a\": {\"a\": 1}, \"b\": {\"a\": 1}}", NULL},
                 {"{\"a\": [{\"x\": 1}, {\"x\": 1, \"y\": 1, \"x\": 2}]}", "x"},
                 {"[\"a\", \"a\"]", NULL},
                 {"{}", NULL},
                 {"{\"z\": {\"q\": {\"q\": 0, \"r\": 0, \"q\": 1}}, \"y\": 1}", "q"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cJSON *json = cJSON_Parse(cases[i].json);
        const char *twice = demo_json_twice(json);
        EXPECT_TEXT(twice ? twice : "none", cases[i].twice ? cases[i].twice : "none");
        cJSON_Delete(json);
    }
    return true;
}

/* Items of a seed are what they were: a set that is made anew is the same one. */
static bool stories_are_what_they_were(void) {
    static const char want[] =
        "{\"question\": \"Tom and Mia read 5 pages a day. How many pages has Tom read after 6 "
        "days?\", \"answer\": \"6 * 5 = 30. The answer is 34.\", \"wrong\": \"6 * 5 = 30. The "
        "answer is 34.\"}\n"
        "{\"question\": \"Noa has 9 beads, gives 6 to Ana and gets 9 back. How many beads does Noa "
        "have?\", \"answer\": \"9 - 6 = 3. 3 + 9 = 12. The answer is 12.\", \"wrong\": \"9 - 6 = 3. "
        "3 + 9 = 12. The answer is 17.\"}\n"
        "{\"question\": \"Zoe fills 3 bags with 2 books each. How many books are in the bags?\", "
        "\"answer\": \"3 * 2 = 6. The answer is 6.\", \"wrong\": \"3 * 2 = 6. The answer is 7.\"}\n"
        "{\"question\": \"Ben fills 2 bags with 3 pens each. How many pens are in the bags?\", "
        "\"answer\": \"2 * 3 = 6. The answer is 8.\", \"wrong\": \"2 * 3 = 6. The answer is 8.\"}\n"
        "{\"question\": \"Mia has 8 shells and gives 7 to Jon. How many shells does Mia have "
        "left?\", \"answer\": \"8 - 7 = 1. The answer is 1.\", \"wrong\": \"8 - 7 = 1. The answer "
        "is 4.\"}\n";
    const char *path = in_scratch("stories.jsonl");
    size_t size;
    EXPECT(!demo_arith_write(path, 7, 3, 5, 30, &message));
    char *text = demo_read_file(path, &size);
    EXPECT_TEXT(text, want);
    free(text);
    for (int careless = 0; careless <= 100; careless += 50) { /* of 100 answers */
        int wrong = 0;
        for (uint64_t i = 0; i < 400; i++)
            wrong += demo_arith_careless(7, i, (uint64_t)careless);
        EXPECT(careless == 50 ? wrong > 160 && wrong < 240 : wrong == 4 * careless);
    }
    return true;
}

static bool stories_load(void) {
    const char *path = in_scratch("arith.jsonl");
    EXPECT(demo_arith_write(path, 1, 0, 300, 0, &message) == 0);
    demo_data_options how = {.input_key = "question",
                             .output_key = "answer",
                             .input_template = "{}\n",
                             .max_len = 200};
    EXPECT(load(path, how) == 0 && arrlen(set.documents) == 300 && !set.counts.fully_masked);
    EXPECT(demo_arith_write(in_scratch("no/such/folder"), 1, 0, 3, 0, &message) == -1 &&
           *message.text);
    return true;
}

/* ---- plot -------------------------------------------------------- */

/* A reader of XML just able to say no: tags must nest, attributes be quoted, text hold no
   bare mark. */
static bool is_well_formed(const char *xml) {
    char open[16][24];
    int depth = 0, roots = 0;
    for (const char *at = xml; *at;) {
        if (*at != '<') {
            EXPECT(*at != '>' && (*at != '&' || !strncmp(at, "&lt;", 4) ||
                                  !strncmp(at, "&gt;", 4) || !strncmp(at, "&amp;", 5)));
            EXPECT(depth > 0 || isspace((unsigned char)*at));
            at++;
            continue;
        }
        bool closing = at[1] == '/';
        const char *name = at + 1 + closing;
        int length = (int)strcspn(name, " />");
        bool quoted = false;
        for (at = name; *at && (quoted || *at != '>'); at++) quoted ^= *at == '"';
        EXPECT(*at == '>' && !quoted && length < 24 && depth < 16);
        if (closing) {
            EXPECT(depth > 0 && (int)strlen(open[depth - 1]) == length &&
                   !strncmp(open[depth - 1], name, (size_t)length));
            depth--;
        } else if (at[-1] != '/') {
            roots += depth == 0;
            snprintf(open[depth++], sizeof open[0], "%.*s", length, name);
        }
        at++;
    }
    EXPECT(depth == 0 && roots == 1);
    return true;
}

static int count_of(const char *text, const char *part) {
    int count = 0;
    for (; (text = strstr(text, part)); text++) count++;
    return count;
}

static char *drawn(const demo_plot *plot) {
    size_t size;
    const char *path = in_scratch("plot.svg");
    return demo_plot_write(path, plot, &message) ? NULL : demo_read_file(path, &size);
}

static bool plots_are_well_formed(void) {
    double y[50], z[50];
    for (int i = 0; i < 50; i++) y[i] = 5.0 / (i + 1), z[i] = i % 20 == 9 ? NAN : y[i] + 1;
    demo_series series[] = {{"P = 1", NULL, y, 50}, {"<P> & \"4\"", NULL, z, 50}};
    demo_plot plot = {.title = "loss < 1 & falling",
                      .x_label = "step",
                      .y_label = "nats",
                      .series = series,
                      .series_count = 2};
    char *svg = drawn(&plot);
    EXPECT(svg && is_well_formed(svg));
    EXPECT(count_of(svg, "<polyline") == 1 + 3 && holds(svg, "loss &lt; 1 &amp; falling") &&
           holds(svg, "&lt;P&gt; &amp;"));
    EXPECT(!holds(svg, "nan") && !holds(svg, "inf") && !holds(svg, "(null)"));
    free(svg);
    plot.log_y = true;
    y[7] = 0; /* has no logarithm: a gap */
    svg = drawn(&plot);
    EXPECT(svg && is_well_formed(svg) && count_of(svg, "<polyline") == 2 + 3 &&
           !holds(svg, "nan") && !holds(svg, "inf"));
    free(svg);
    return true;
}

static bool odd_plots_are_drawn_or_refused(void) {
    double y[] = {3, 3, 3}, bad[] = {NAN, HUGE_VAL, -1};
    demo_series flat = {"flat", NULL, y, 3}, dot = {"dot", NULL, y, 1},
                none = {"none", NULL, bad, 3};
    demo_plot plot = {.series = &flat, .series_count = 1};
    char *svg = drawn(&plot);
    EXPECT(svg && is_well_formed(svg) && !holds(svg, "nan"));
    free(svg);
    plot.series = &dot;
    svg = drawn(&plot);
    EXPECT(svg && is_well_formed(svg) && count_of(svg, "<circle") == 1);
    free(svg);
    plot.series = &none;
    plot.log_y = true;
    EXPECT(!drawn(&plot) && holds(message.text, "no finite point above 0 to plot"));
    plot.series = &flat;
    plot.width = 100;
    EXPECT(!drawn(&plot) && holds(message.text, "100 x 480 pixels are too few"));
    return true;
}

static bool ticks_are_round(void) {
    double ticks[64];
    char label[32];
    int count = demo_ticks_linear(ticks, 0.13, 0.97, 5);
    EXPECT(count == 4 && !(fabs(ticks[0] - 0.2) > 1e-12) && !(fabs(ticks[3] - 0.8) > 1e-12));
    count = demo_ticks_log(ticks, -7.2, -0.5);
    EXPECT(count == 7 && !(fabs(ticks[0] + 7) > 1e-12) && !(fabs(ticks[6] + 1) > 1e-12));
    demo_tick_label(label, sizeof label, 1e-7);
    EXPECT_TEXT(label, "1e-7");
    demo_tick_label(label, sizeof label, 0.1 * 3);
    EXPECT_TEXT(label, "0.3");
    demo_tick_label(label, sizeof label, 20000);
    EXPECT_TEXT(label, "20000");
    for (double low = -3; low < 3; low += 0.37)
        for (double high = low + 1e-3; high<low + 40; high *= high> 0 ? 3 : -1) {
            count = demo_ticks_log(ticks, low, high);
            EXPECT(count < 25);
            for (int i = 0; i < count; i++)
                EXPECT(ticks[i] >= low - 1e-6 && ticks[i] <= high + 1e-6);
            if (high < 1e-3) high = 1e-3;
        }
    return true;
}

/* A small plot, by its numbers: 211 pixels for 1 to 9, 92 for 0.125 to 8.375; or for the logarithms
   of 0.5 to 8 and a twentieth more on both sides. */
static bool plots_are_drawn_to_scale(void) {
    static const double x[] = {2, 3, 5, 9}, y[] = {0.5, 2, NAN, 8}, z[] = {4, 4, 1, 4};
    static const demo_series series[] = {{"P = 1", x, y, 4}, {"second", NULL, z, 4}};
    static const char *const parts[2][14] = {
        {"<line x1=\"78.0\" y1=\"46.0\" x2=\"78.0\" y2=\"138.0\" stroke=\"#e6e6e6\" "
         "stroke-width=\"1.0\"/>\n<text x=\"78.0\" y=\"158.0\" text-anchor=\"middle\">1</text>\n",
         "<text x=\"289.0\" y=\"158.0\" text-anchor=\"middle\">9</text>\n<line x1=\"78.0\" "
         "y1=\"128.2\" x2=\"289.0\" y2=\"128.2\" stroke=\"#e6e6e6\" stroke-width=\"1.0\"/>\n<text "
         "x=\"69.0\" y=\"133.2\" text-anchor=\"end\">1</text>\n",
         "<text x=\"69.0\" y=\"55.2\" text-anchor=\"end\">8</text>\n<line x1=\"78.0\" y1=\"138.0\" "
         "x2=\"289.0\" y2=\"138.0\" stroke=\"#444\" stroke-width=\"1.2\"/>\n<line x1=\"78.0\" "
         "y1=\"46.0\" x2=\"78.0\" y2=\"138.0\" stroke=\"#444\" stroke-width=\"1.2\"/>\n",
         "stroke=\"#0072B2\" stroke-width=\"4.0\" stroke-linejoin=\"round\" points=\"104.38,133.82 "
         "130.75,117.09\"/>\n<circle cx=\"289.00\" cy=\"50.18\" r=\"3.0\" fill=\"#0072B2\"/>\n",
         "stroke=\"#D55E00\" stroke-width=\"1.6\" stroke-linejoin=\"round\" points=\"78.00,94.79 "
         "104.38,94.79 130.75,128.24 157.12,94.79\"/>\n",
         "<text x=\"200.0\" y=\"28.0\" text-anchor=\"middle\" font-size=\"18\" "
         "font-weight=\"bold\">t</text>\n<text x=\"183.5\" y=\"186.0\" "
         "text-anchor=\"middle\">x</text>\n<text x=\"18.0\" y=\"92.0\" text-anchor=\"middle\" "
         "transform=\"rotate(-90 18 92.0)\">y</text>\n",
         "<line x1=\"305.0\" y1=\"58.0\" x2=\"331.0\" y2=\"58.0\" stroke=\"#0072B2\" "
         "stroke-width=\"4.0\"/>\n<text x=\"339.0\" y=\"63.0\" >P = 1</text>\n",
         "<line x1=\"305.0\" y1=\"80.0\" x2=\"331.0\" y2=\"80.0\" stroke=\"#D55E00\" "
         "stroke-width=\"1.6\"/>\n<text x=\"339.0\" y=\"85.0\" >second</text>\n</svg>\n",
         "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"400\" height=\"200\" viewBox=\"0 0 400 "
         "200\" ",
         "<rect width=\"400\" height=\"200\" fill=\"white\"/>\n"},
        {"<text x=\"78.0\" y=\"158.0\" text-anchor=\"middle\">2</text>\n",
         "<line x1=\"78.0\" y1=\"133.8\" x2=\"297.5\" y2=\"133.8\" stroke=\"#e6e6e6\" "
         "stroke-width=\"1.0\"/>\n<text x=\"69.0\" y=\"138.8\" text-anchor=\"end\">0.5</text>\n",
         "<text x=\"69.0\" y=\"117.9\" text-anchor=\"end\">1</text>\n",
         "<text x=\"69.0\" y=\"97.0\" text-anchor=\"end\">2</text>\n",
         "<text x=\"69.0\" y=\"69.4\" text-anchor=\"end\">5</text>\n<line x1=\"78.0\" y1=\"138.0\"",
         "stroke-width=\"1.6\" stroke-linejoin=\"round\" points=\"78.00,133.82 "
         "109.36,92.00\"/>\n<circle cx=\"297.50\" cy=\"50.18\" r=\"1.8\" fill=\"#0072B2\"/>\n"}};
    for (int log = 0; log < 2; log++) {
        const demo_plot plot = {.title = "t",
                                .x_label = "x",
                                .y_label = "y",
                                .series = series,
                                .series_count = log ? 1 : 2,
                                .log_y = log,
                                .width = 400,
                                .height = 200};
        char *svg = drawn(&plot);
        EXPECT(svg && count_of(svg, "#e6e6e6") == (log ? 8 + 4 : 9 + 8));
        for (int i = 0; parts[log][i]; i++)
            if (!holds(svg, parts[log][i])) EXPECT_TEXT(svg, parts[log][i]);
        free(svg);
    }
    return true;
}

/* Rooms that just hold a plot, and by one pixel do not; colours and strokes of many series. */
static bool plots_have_least_sizes(void) {
    static const double y[] = {1, 2};
    static const demo_series one = {"name", NULL, y, 2};
    demo_plot plot = {.series = &one, .series_count = 1};
    for (int wide = 251; wide < 254; wide++)
        for (int high = 167; high < 170; high++) {
            char sentence[600];
            plot.width = wide, plot.height = high;
            char *svg = drawn(&plot);
            EXPECT(!svg == (wide < 252 || high < 168));
            snprintf(sentence, sizeof sentence, ": %d x %d pixels are too few for the curves",
                     wide, high);
            EXPECT(svg || holds(message.text, sentence));
            free(svg);
        }
    EXPECT_TEXT(demo_series_color(0), "#0072B2");
    EXPECT_TEXT(demo_series_color(6), "#000000");
    EXPECT_TEXT(demo_series_color(7), "#0072B2");
    static const double strokes[] = {7, 6.4, 4, 1.6};
    for (int i = 0; i < 4; i++)
        EXPECT(fabs(demo_series_stroke(i, 4) - (i ? strokes[i] : 7)) < 1e-12);
    double low = 4, high = 4;
    demo_widen(&low, &high, 0.5);
    EXPECT(fabs(low - 3.6) < 1e-12 && fabs(high - 4.4) < 1e-12);
    low = high = 0;
    demo_widen(&low, &high, 0.5);
    EXPECT(low == -1 && high == 1);
    low = high = -2;
    demo_widen(&low, &high, 0.5);
    EXPECT(fabs(low + 2.2) < 1e-12 && fabs(high + 1.8) < 1e-12);
    low = 1, high = 3;
    demo_widen(&low, &high, 0.25);
    EXPECT(low == 0.5 && high == 3.5);
    return true;
}

/* Steps are the nearest of 1, 2 and 5; labels are short from a thousandth to a million. */
static bool steps_and_labels_are_round(void) {
    static const double steps[][2] = {{1, 1},        {1.49, 1}, {1.5, 2},  {3.49, 2},
                                      {3.5, 5},      {7.49, 5}, {7.5, 10}, {9.9, 10},
                                      {0.016, 0.02}, {340, 200}};
    static const struct {
        double value;
        const char *label;
    } labels[] = {{0, "0"},           {0.001, "0.001"},  {0.0009, "9e-4"},     {-0.25, "-0.25"},
                  {999999, "999999"}, {1000000, "1e6"},  {-2500000, "-2.5e6"}, {0.1 * 3, "0.3"},
                  {1e-12, "1e-12"},   {100000, "100000"}};
    char label[32];
    double ticks[64];
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++)
        EXPECT(fabs(demo_nice_step(steps[i][0]) / steps[i][1] - 1) < 1e-12);
    for (size_t i = 0; i < sizeof labels / sizeof labels[0]; i++) {
        demo_tick_label(label, sizeof label, labels[i].value);
        EXPECT_TEXT(label, labels[i].label);
    }
    EXPECT(demo_ticks_linear(ticks, 0, 1, 5) == 6 && ticks[0] == 0 &&
           fabs(ticks[5] - 1) < 1e-12);
    EXPECT(demo_ticks_linear(ticks, -0.1, 0.1, 2) == 3 && !signbit(ticks[1]));
    EXPECT(demo_ticks_linear(ticks, 0, 1000, 1000) == 64); /* as many as there is room for */
    /* decades, between them 2 and 5 up to two and a half; every other one of many */
    EXPECT(demo_ticks_log(ticks, 0, 2.5) == 8 && fabs(ticks[7] - 2 - log10(2)) < 1e-12);
    EXPECT(demo_ticks_log(ticks, 0, 2.51) == 3 && fabs(ticks[2] - 2) < 1e-12);
    EXPECT(demo_ticks_log(ticks, 0, 1) == 4 && fabs(ticks[1] - log10(2)) < 1e-12 &&
           fabs(ticks[2] - log10(5)) < 1e-12);
    EXPECT(demo_ticks_log(ticks, 0, 8) == 9 && demo_ticks_log(ticks, -1, 16) == 9 &&
           fabs(ticks[8] - 16) < 1e-12);
    return true;
}

/* ---- progress ---------------------------------------------------- */

/* What is counted and shown has other names where a trainer says so; edges of every unit. */
static bool progress_has_names_and_units(void) {
    static const struct {
        double value;
        const char *duration, *count;
    } cases[] = {{-3, "0:00", "-3"},
                 {0.49, "0:00", "0"},
                 {59.5, "1:00", "60"},
                 {3599.4, "59:59", "3599"},
                 {3599.5, "1:00:00", "3600"},
                 {9999, "2:46:39", "9999"},
                 {10000, "2:46:40", "10.0k"},
                 {999949, "277:45:49", "999.9k"},
                 {1000000, "277:46:40", "1.00M"}};
    char text[DEMO_LINE_LIMIT];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        demo_duration_text(text, sizeof text, cases[i].value);
        EXPECT_TEXT(text, cases[i].duration);
        demo_count_text(text, sizeof text, cases[i].value);
        EXPECT_TEXT(text, cases[i].count);
    }
    demo_progress progress = {.total = 9,
                              .resumed = 3,
                              .step = 5,
                              .tokens = 400,
                              .loss = 0.5,
                              .round = "rollout",
                              .value = "reward"};
    demo_progress_text(&progress, 4, 200, text);
    EXPECT_TEXT(text, "rollout 5/9  reward 0.5000  100 tokens/s  0:08 left");
    demo_progress_text(&progress, 0, 200, text);
    EXPECT_TEXT(text, "rollout 5/9  reward 0.5000");
    progress.terminal = true; /* a bar in what is left: 8 to 40 wide */
    demo_progress_text(&progress, 4, 64, text);
    EXPECT_TEXT(text, "[####....]  rollout 5/9  reward 0.5000  100 tokens/s  0:08 left");
    demo_progress_text(&progress, 4, 63, text);
    EXPECT_TEXT(text, "rollout 5/9  reward 0.5000  100 tokens/s  0:08 left");
    progress.step = 12; /* beyond the end */
    demo_progress_text(&progress, 4, 200, text);
    EXPECT_TEXT(text,
                "[########################################]  rollout 12/9  reward 0.5000  "
                "100 tokens/s  0:00 left");
    progress.total = 0;
    demo_progress_text(&progress, 0, 200, text);
    EXPECT_TEXT(text,
                "[........................................]  rollout 12/0  reward 0.5000");
    return true;
}

/* Without a terminal: every so many steps and the last; 0: the last. Tokens are those of all. */
static bool progress_is_due(void) {
    for (int every = 0; every < 4; every++) {
        size_t size;
        const char *path = in_scratch("due");
        demo_progress progress;
        demo_progress_begin(&progress, 2, 7, every);
        EXPECT(progress.step == 2 && progress.resumed == 2 && progress.out == stderr &&
               progress.logging_steps == every && progress.total == 7);
        progress.out = fopen(path, "wb");
        progress.terminal = false;
        for (int step = 3; step <= 7; step++)
            demo_progress_step(&progress, step, step, 10 * step);
        demo_progress_end(&progress);
        fclose(progress.out);
        EXPECT(progress.tokens == 250 && progress.step == 7);
        char *text = demo_read_file(path, &size);
        static const int lines[] = {1, 5, 3, 3};
        EXPECT(count_of(text, "\n") == lines[every] && holds(text, "step 7/7  loss 7.0000"));
        EXPECT(holds(text, "step 6/7") == (every > 0) &&
               holds(text, "step 4/7") == (every == 1 || every == 2));
        free(text);
    }
    return true;
}

static bool progress_fits_the_window(void) {
    char text[DEMO_LINE_LIMIT];
    demo_progress progress = {
        .terminal = true, .total = 1000, .step = 250, .tokens = 2500000, .loss = 1.25};
    for (int columns = 0; columns < 400; columns++) {
        demo_progress_text(&progress, 100, columns, text);
        EXPECT((int)strlen(text) < (columns > 1 ? columns : 1));
        EXPECT(!strchr(text, '\n'));
    }
    demo_progress_text(&progress, 100, 80, text);
    EXPECT_TEXT(
        text,
        "[#####.................]  step 250/1000  loss 1.2500  25.0k tokens/s  5:00 left");
    demo_progress_text(&progress, 100, 30, text);
    EXPECT_TEXT(text, "step 250/1000  loss 1.2500");
    /* nothing done by this process yet: no rate, no guess */
    progress.step = progress.resumed = 10;
    demo_progress_text(&progress, 100, 30, text);
    EXPECT_TEXT(text, "[.............]  step 10/1000");
    return true;
}

static bool durations_and_counts_are_readable(void) {
    static const struct {
        double value;
        const char *duration, *count;
    } cases[] = {{0, "0:00", "0"},
                 {41.4, "0:41", "41"},
                 {725, "12:05", "725"},
                 {11279, "3:07:59", "11.3k"},
                 {4560000, "1266:40:00", "4.56M"}};
    char text[32];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        demo_duration_text(text, sizeof text, cases[i].value);
        EXPECT_TEXT(text, cases[i].duration);
        demo_count_text(text, sizeof text, cases[i].value);
        EXPECT_TEXT(text, cases[i].count);
    }
    return true;
}

/* Runs 30 steps with output into a file and returns what was written. */
static char *progress_of_a_run(bool terminal) {
    size_t size;
    const char *path = in_scratch("progress");
    demo_progress progress;
    demo_progress_begin(&progress, 0, 30, 10);
    progress.out = fopen(path, "wb");
    progress.terminal = terminal;
    progress.began -= 1; /* as if a second had passed */
    for (int step = 1; step <= 30; step++) demo_progress_step(&progress, step, 3.0 / step, 100);
    demo_progress_say(&progress, "saved %d", 30);
    demo_progress_end(&progress);
    fclose(progress.out);
    return demo_read_file(path, &size);
}

static bool progress_is_lines_without_a_terminal(void) {
    char *text = progress_of_a_run(false);
    EXPECT(text && count_of(text, "\n") == 4 && !strpbrk(text, "\r\033"));
    EXPECT(holds(text, "step 10/30  loss 0.3000  ") &&
           holds(text, "\nstep 30/30  loss 0.1000  ") && holds(text, "\nsaved 30\n"));
    free(text);
    return true;
}

static bool progress_is_redrawn_on_a_terminal(void) {
    char *text = progress_of_a_run(true);
    EXPECT(text && !strncmp(text, "\r", 1) && count_of(text, "\033[K") == count_of(text, "\r"));
    /* first, last and the note's; not each of 30 */
    EXPECT(count_of(text, "\r") >= 2 + 1 && count_of(text, "\r") < 30);
    EXPECT(count_of(text, "\n") == 1 && holds(text, "\033[Ksaved 30\n"));
    free(text);
    return true;
}

/* ---- real data --------------------------------------------------- */

static const char *real_path(const char *name) {
    static char path[1024];
    snprintf(path, sizeof path, "%s/%s", real_data ? real_data : ".", name);
    return real_data && !access(path, R_OK) ? path : NULL;
}

static bool real_questions_load(void) {
    static const struct {
        const char *name, *in, *out;
        int64_t rows;
    } files[] = {
        {"gsm8k_train.jsonl", "question", "answer", 7473},
        {"gsm8k_test.jsonl", "question", "answer", 1319},
        {"gsm8k_preferences.jsonl", "prompt", "chosen", 3275},
        {"gsm8k_labeled.jsonl", "prompt", "completion", 5276},
    };
    for (int i = 0; i < 4; i++) {
        demo_data_options how = {.input_key = files[i].in,
                                 .output_key = files[i].out,
                                 .input_template = "User: {}\nAssistant: "};
        const char *path = real_path(files[i].name);
        if (!path) continue;
        snprintf(message.text, sizeof message.text, "%s", path);
        EXPECT(load(path, how) == 0);
        EXPECT(set.counts.read == files[i].rows &&
               arrlen(set.documents) + set.counts.zero_length == set.counts.read);
        how.max_len = 512;
        int64_t whole = set.tokens;
        EXPECT(load(path, how) == 0 && set.counts.dropped_long > 0 && set.tokens < whole);
        how.long_documents = DEMO_LONG_CUT;
        EXPECT(load(path, how) == 0 && set.counts.cut > 0 &&
               set.counts.cut + set.counts.dropped_long > 0);
        for (int64_t d = 0; d < arrlen(set.documents); d++) {
            const demo_document *document = &set.documents[d];
            EXPECT(document->tokens <= 512 && document->ids[0] == DEMO_BOS &&
                   document->ids[document->tokens - 1] == DEMO_EOS);
        }
    }
    return true;
}

/* Counts from another reader of the same files: Python's json, and prepare.py's search for the
   prompt, on characters. */
static bool real_pairs_load(void) {
    demo_pair_options how = {.prompt_key = "prompt",
                             .data.input_template = "User: {}\nAssistant: "};
    const char *path = real_path("gsm8k_preferences.jsonl");
    EXPECT(load_pairs(path, how) == 0 && pairs.counts.read == 3275 &&
           arrlen(pairs.pairs) == 3275);
    EXPECT(pairs.tokens == 3901497 && pairs.supervised_tokens == 2096829 &&
           pairs.counts.identical == 0);
    how.data.max_len = 512;
    EXPECT(load_pairs(path, how) == 0 && arrlen(pairs.pairs) == 970 &&
           pairs.counts.dropped_long == 3275 - 970);
    how.data.long_documents = DEMO_LONG_CUT;
    EXPECT(load_pairs(path, how) == 0 && arrlen(pairs.pairs) == 3178 &&
           pairs.counts.cut == 2208);
    EXPECT(load_pairs(path, (demo_pair_options){0}) == 0 && arrlen(pairs.pairs) == 3275);
    EXPECT(pairs.tokens == 2103379 && pairs.supervised_tokens == 2063093);
    return true;
}

static bool real_labels_load(void) {
    demo_labelled_options how = {.data = {.input_key = "prompt", .output_key = "completion"}};
    const char *path = real_path("gsm8k_labeled.jsonl");
    EXPECT(load_labelled(path, how) == 0 && labelled.counts.read == 5276 &&
           arrlen(labelled.records) == 5276);
    EXPECT(labelled.counts.desirable == 2001 && labelled.counts.undesirable == 3275);
    EXPECT(labelled.tokens == 2762218 && labelled.supervised_tokens == 1490734);
    how.data.max_len = 512;
    EXPECT(load_labelled(path, how) == 0 && arrlen(labelled.records) == 2902);
    for (int64_t i = 1; i < arrlen(labelled.records); i++) {
        demo_document document = demo_mismatched(&labelled.records[i - 1], &labelled.records[i],
                                                 &how.data);
        EXPECT(document.tokens <= 512 && demo_supervised(&document) >= 2);
        EXPECT(document.ids[0] == DEMO_BOS && document.ids[document.tokens - 1] == DEMO_EOS);
        demo_document_free(&document);
    }
    return true;
}

static bool real_text_loads(void) {
    EXPECT(load(real_path("tinyshakespeare.txt"),
                (demo_data_options){.pretrain_mode = true, .max_len = 1000}) == 0);
    EXPECT(set.tokens == 1115394 && arrlen(set.documents) == 1116 &&
           set.documents[1115].tokens == 394);
    return true;
}

/* ------------------------------------------------------------------ */

#define TEST(name) \
    { #name, name, NULL }
#define TEST_ON(name, file) \
    { #name, name, file }
static const struct {
    const char *name;
    bool (*run)(void);
    const char *file; /* of real data, without which the test does not run */
} tests[] = {

    TEST(table_is_sound),
    TEST(tools_are_sound),
    TEST(every_name_is_known),
    TEST(every_option_parses),
    TEST(defaults_come_from_the_table),
    TEST(values_land),
    TEST(flags_take_an_optional_word),
    TEST(typos_are_named),
    TEST(bad_values_are_refused),
    TEST(options_without_effect_are_told),
    TEST(too_many_words_are_refused),
    TEST(help_shows_everything),
    TEST(bindings_are_held_against_the_table),
    TEST(foreign_names_place_tokens),
    TEST(text_is_masked),
    TEST(line_ends_and_marks_do_not_matter),
    TEST(text_is_utf8),
    TEST(ids_carry_their_own_mask),
    TEST(long_documents_are_dropped_or_cut),
    TEST(empty_and_masked_documents_are_counted),
    TEST(streams_are_cut_into_documents),
    TEST(texts_end_and_are_joined_as_in_stage_pt),
    TEST(permutations_are_those_of_numpy),
    TEST(samples_and_files_are_limited_and_joined),
    TEST(broken_data_is_named),
    TEST(other_files_hold_the_same),
    TEST(half_a_prompt_is_refused),
    TEST(text_of_other_models_is_refused),
    TEST(chat_templates_are_hinted_at),
    TEST(messages_have_names),
    TEST(positions_count_from_zero),
    TEST(records_are_cut_to_any_length),
    TEST(answers_have_numbers),
    TEST(characters_are_whole),
    TEST(streams_fill_their_pieces),
    TEST(backslashes_are_text),
    TEST(folders_are_read_in_order),
    TEST(gzip_holds_any_size),
    TEST(endings_are_whole),
    TEST(summaries_fit),
    TEST(digests_see_everything),
    TEST(files_that_cannot_be_read_are_named),
    TEST(templates_are_checked),
    TEST(writing_is_all_or_nothing),
    TEST(a_pipe_takes_its_time),
    TEST(pairs_share_a_prompt),
    TEST(prompts_are_found_in_whole_texts),
    TEST(pair_ids_are_taken_as_they_are),
    TEST(padding_makes_no_difference),
    TEST(long_pairs_are_dropped_or_cut_whole),
    TEST(pairs_of_every_size_are_sound),
    TEST(pairs_are_counted),
    TEST(broken_pairs_are_named),
    TEST(labels_are_read_in_every_spelling),
    TEST(labelled_responses_are_counted),
    TEST(broken_labels_are_named),
    TEST(prompts_meet_the_next_response),
    TEST(stories_depend_on_seed_and_index_alone),
    TEST(answers_are_right),
    TEST(answers_are_learnable),
    TEST(sets_are_mixed_by_the_rule),
    TEST(folders_have_a_train_split),
    TEST(files_say_why),
    TEST(keys_stand_once),
    TEST(stories_are_what_they_were),
    TEST(stories_load),
    TEST(plots_are_well_formed),
    TEST(odd_plots_are_drawn_or_refused),
    TEST(ticks_are_round),
    TEST(plots_are_drawn_to_scale),
    TEST(plots_have_least_sizes),
    TEST(steps_and_labels_are_round),
    TEST(progress_has_names_and_units),
    TEST(progress_is_due),
    TEST(progress_fits_the_window),
    TEST(durations_and_counts_are_readable),
    TEST(progress_is_lines_without_a_terminal),
    TEST(progress_is_redrawn_on_a_terminal),
    TEST_ON(real_questions_load, "gsm8k_train.jsonl"),
    TEST_ON(real_pairs_load, "gsm8k_preferences.jsonl"),
    TEST_ON(real_labels_load, "gsm8k_labeled.jsonl"),
    TEST_ON(real_text_loads, "tinyshakespeare.txt"),
};

static void say_what_is_skipped(void) {
    static const char *const names[] = {"gsm8k_train.jsonl", "gsm8k_test.jsonl",
                                        "gsm8k_preferences.jsonl", "gsm8k_labeled.jsonl",
                                        "tinyshakespeare.txt"};
    if (!real_data) printf("# skipped: checks on real files; no data directory was given\n");
    for (int i = 0; real_data && i < 5; i++)
        if (!real_path(names[i])) printf("# skipped: %s is not in %s\n", names[i], real_data);
}

static void remove_scratch(void) {
    DIR *folder = opendir(scratch);
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        if (entry->d_name[0] != '.') remove(in_scratch(entry->d_name));
    if (folder) closedir(folder);
    if (rmdir(scratch)) printf("# left behind: %s\n", scratch);
}

int main(int argc, char **argv) {
    int passed = 0, failed = 0, count = (int)(sizeof tests / sizeof tests[0]);
    const char *temporary = getenv("TMPDIR");
    setvbuf(stdout, NULL, _IOLBF, 0); /* a crash must not swallow what was said before it */
    real_data = argc > 1 ? argv[1] : NULL;
    snprintf(scratch, sizeof scratch, "%s/demos-XXXXXX", temporary ? temporary : P_tmpdir);
    if (!mkdtemp(scratch))
        return fprintf(stderr, "cannot make %s; set TMPDIR to a writable folder\n", scratch), 2;
    say_what_is_skipped();
    for (int i = 0; i < count; i++) {
        if (tests[i].file && !real_path(tests[i].file)) continue;
        message.text[0] = 0;
        bool ok = tests[i].run();
        if (ok)
            printf("ok %s\n", tests[i].name);
        else
            printf("FAIL %s %s   (last message: %s)\n", tests[i].name, why, message.text);
        *(ok ? &passed : &failed) += 1;
    }
    demo_data_free(&set);
    demo_pairs_free(&pairs);
    demo_labelled_free(&labelled);
    remove_scratch();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
