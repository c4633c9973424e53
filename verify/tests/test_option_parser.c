/* SPDX-License-Identifier: MIT OR Unlicense */
/* The table of options, and what a trainer makes of the words of its command line: names of
   other tools, values, defaults, help, and sentences about what is wrong. */
#define STB_DS_IMPLEMENTATION
#include "trainer/run/options.h"
#include "support/trainer_cases.h"

/* ---- a small trainer ---- */

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

/* ---- the table ---- */

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

/* ---- values ---- */

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
         "--mix_strategy interleave_under is not supported: sets are read one after the "
         "other, or drawn by --dataset_probs until one is used up; leave it out, or give the "
         "weights"},
        {"--max_len", "--max_len needs a value (a whole number), but nothing follows"},
        {"--dataset --max_len 4", "--dataset needs a value (text), but --max_len follows"},
        {"--truncation",
         "--truncation needs a value (one of drop, cut, cut_both), but nothing follows"},
        {"data.jsonl", "stray word data.jsonl; options start with -- (--help lists all)"},
        {"--packing_samples 3", "stray word 3; options start with -- (--help lists all)"},
        {"--flash_attn #fast", "'#fast' is a comment that the shell passed on; remove it "
                               "from the command"},
        {"--packing_samples # rows",
         "'#' is a comment that the shell passed on; remove it from the command"},
        {"--flash_attn \t --max_len 3",
         "a word is a space: a backslash at the end of a line has a space after it, so the "
         "shell did not pass on the lines below; remove everything after the backslash"},
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
    EXPECT(parse(line) == -1 && holds(message.text, "... is not supported: a DeepSpeed file"));
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

static const trainer_case cases[] = {
    CASE(table_is_sound),
    CASE(tools_are_sound),
    CASE(every_name_is_known),
    CASE(every_option_parses),
    CASE(defaults_come_from_the_table),
    CASE(values_land),
    CASE(flags_take_an_optional_word),
    CASE(typos_are_named),
    CASE(bad_values_are_refused),
    CASE(options_without_effect_are_told),
    CASE(too_many_words_are_refused),
    CASE(help_shows_everything),
    CASE(bindings_are_held_against_the_table),
    CASE(foreign_names_place_tokens),
};

int main(int argc, char **argv) {
    test_begin(argc, argv);
    trainer_cases(cases, sizeof cases / sizeof *cases);
    return test_summary();
}
