/* SPDX-License-Identifier: MIT OR Unlicense */
/* The whole table of options: what each line changes where it comes from, and that it is done,
   said or refused here. What a command line means by its program: batches, learning rates,
   placement, long documents, mixed sets. Which files, sets and models belong together. */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "trainer/ppo/ppo.h"
#include "trainer/ppo/generate.h"
#include "trainer/objective/kd.h"
#include "trainer/objective/kto.h"
#include "trainer/objective/prm.h"
#include "trainer/objective/sft.h"
#include "support/test.h"

enum { SFT, DPO, RM, KTO, KD, PRM, PPO, GENERATE, TOOLS, WORDS = 64 };
static const char *const tool_name[TOOLS] = {"sft", "dpo", "rm",  "kto",
                                             "kd",  "prm", "ppo", "generate"};

static struct {
    demo_job job;
    demo_preference_config preference;
    demo_kto_config kto;
    demo_kd_config kd;
    demo_prm_config prm;
    demo_ppo_config ppo;
    demo_generate_config generate;
    demo_options options;
    char line[2048], *words[WORDS];
    demo_error error;
} x;

/* A job by the options of a user, up to what is read. */
static int parse(int tool, const char *line) {
    static const demo_objective *const objectives[TOOLS] = {&demo_sft,
                                                            &demo_dpo,
                                                            &demo_rm,
                                                            &demo_kto,
                                                            &demo_kd,
                                                            &demo_prm,
                                                            &demo_ppo_objective,
                                                            &demo_generate_objective};
    void *const own[TOOLS] = {NULL,  &x.preference, &x.preference, &x.kto,
                              &x.kd, &x.prm,        &x.ppo,        &x.generate};
    static const demo_binding
        sft[] = {DEMO_TRAINER_BINDINGS(x.job.config), DEMO_SFT_BINDINGS(x.job.config)},
        dpo[] = {DEMO_TRAINER_BINDINGS(x.job.config), DEMO_DPO_BINDINGS(x.preference)},
        rm[] = {DEMO_TRAINER_BINDINGS(x.job.config), DEMO_RM_BINDINGS(x.preference)},
        kto[] = {DEMO_TRAINER_BINDINGS(x.job.config), DEMO_KTO_BINDINGS(x.kto)},
        kd[] = {DEMO_TRAINER_BINDINGS(x.job.config), DEMO_TEXT_BINDINGS(x.job.config),
                DEMO_KD_BINDINGS(x.kd)},
        prm[] = {DEMO_SHARED_BINDINGS(x.job.config), DEMO_PRM_BINDINGS(x.prm)},
        ppo[] = {DEMO_TRAINER_BINDINGS(x.job.config), DEMO_PPO_BINDINGS(x.job.config, x.ppo)},
        all[] = {DEMO_GENERATE_BINDINGS(x.job.config, x.generate, x.generate.ppo),
                 DEMO_TRAINER_BINDINGS(x.job.config)};
    static demo_binding generate[sizeof all / sizeof *all];
    static const demo_binding *const bindings[TOOLS] = {sft, dpo, rm,  kto,
                                                        kd,  prm, ppo, generate};
    const int counts[TOOLS] = {
        (int)(sizeof sft / sizeof *sft),
        (int)(sizeof dpo / sizeof *dpo),
        (int)(sizeof rm / sizeof *rm),
        (int)(sizeof kto / sizeof *kto),
        (int)(sizeof kd / sizeof *kd),
        (int)(sizeof prm / sizeof *prm),
        (int)(sizeof ppo / sizeof *ppo),
        demo_bindings_of(generate, all, (int)(sizeof all / sizeof *all), "generate")};
    int argc = 0;
    memset(&x, 0, sizeof x);
    demo_bindings_of(generate, all, (int)(sizeof all / sizeof *all), "generate");
    snprintf(x.line, sizeof x.line, "train %s", line);
    for (char *at = strtok(x.line, " "); at && argc < WORDS; at = strtok(NULL, " "))
        x.words[argc++] = at;
    x.options = (demo_options){
        .tool = tool_name[tool], .bindings = bindings[tool], .binding_count = counts[tool]};
    x.job = (demo_job){.objective = objectives[tool],
                       .options = own[tool],
                       .bindings = bindings[tool],
                       .binding_count = counts[tool],
                       .parsed = &x.options};
    return demo_options_parse(&x.options, argc, x.words, &x.error);
}

static int settle(int tool, const char *line) {
    char whole[1900];
    snprintf(whole, sizeof whole, "--omp_threads 1 %s", line);
    if (parse(tool, whole)) return -1;
    demo_settle_truncation(&x.job);
    return demo_settle_types(&x.job, &x.error) || demo_settle_rates(&x.job, &x.error) ||
                   demo_settle_schedule(&x.job, &x.error) ||
                   demo_settle_evaluation(&x.job, &x.error) ||
                   demo_pick_attention(&x.job, &x.error) || demo_job_world(&x.job, &x.error) ||
                   demo_settle_batch(&x.job, &x.error)
               ? -1
               : 0;
}

/* ---- the table ---- */

/* What a line of each kind may change where it comes from. */
static int may_change(const demo_known *known) {
    if (strncmp(known->role, "alias:", 6) == 0) return !*known->there;
    return demo_list_has(!strcmp(known->role, "noeffect")
                             ? "files,speed,shown,vision,always"
                             : "weights,text,metrics,files,speed,shown",
                         known->there);
}

static void value_of(const char *kind, char *text, size_t size) {
    static const char *const values[][2] = {{"flag", "true"},     {"int", "7"},
                                            {"float", "0.7"},     {"string", "somewhere"},
                                            {"floats2", "0.6,7"}, {"strings", "q_proj"},
                                            {"optional", "true"}};
    *text = 0;
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        if (!strcmp(kind, values[i][0])) snprintf(text, size, "%s", values[i][1]);
    if (!strncmp(kind, "choice:", 7))
        snprintf(text, size, "%.*s", (int)strcspn(kind + 7, ",="), kind + 7);
}

/* Refused by its name and value, but for the values that ask for nothing. */
static void refused(int tool, const demo_known *known, const demo_known *target) {
    char value[64], line[256], begins[256], neutral[96];
    value_of(known->kind, value, sizeof value);
    if (!strcmp(target->role, "refused:true")) snprintf(value, sizeof value, "false");
    if (!strcmp(target->name, "stage")) snprintf(value, sizeof value, "pt");
    snprintf(line, sizeof line, "--%s %s", known->name, value);
    snprintf(begins, sizeof begins, "--%s %s is not supported: ", known->name, value);
    test_expect(parse(tool, line) && !strncmp(x.error.text, begins, strlen(begins)) &&
                    !strcmp(x.error.text + strlen(begins), target->note),
                "%s: %s", line, x.error.text);
    test_expect(strchr(target->note, ';') && strlen(strchr(target->note, ';')) > 6,
                "--%s says not what to do: %s", target->name, target->note);
    const char *at = strchr(target->role, ':');
    for (at = at ? at + 1 : ""; *at; at += strcspn(at, ","), at += *at == ',') {
        snprintf(neutral, sizeof neutral, "%.*s", (int)strcspn(at, ","), at);
        snprintf(line, sizeof line, "--%s %s", known->name,
                 strcmp(neutral, "@tool") ? neutral : tool_name[tool]);
        test_expect(!parse(tool, line), "%s: %s", line, x.error.text);
    }
}

static void accepted(int tool, const demo_known *known, const demo_known *target) {
    char value[64], line[256];
    value_of(known->kind, value, sizeof value);
    snprintf(line, sizeof line, "--%s %s", known->name, value);
    test_expect(!parse(tool, line), "%s: %s", line, x.error.text);
    test_expect(strlen(target->note) > 8, "--%s is not explained", target->name);
}

static void test_table(int tool) {
    demo_error error;
    parse(tool, "");
    test_expect(!demo_options_check(&x.options, &error) || strstr(error.text, "dataset") ||
                    strstr(error.text, "learning_rate") || !strcmp(tool_name[tool], "ppo"),
                "%s", error.text);
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++) {
        const demo_known *known = &demo_known_options[i], *target = demo_known_target(known);
        test_expect(may_change(known), "--%s changes '%s' there, and is %s", known->name,
                    known->there, known->role);
        if (!demo_list_has(known->tools, tool_name[tool])) continue;
        if (demo_is_role(target, "refused")) refused(tool, known, target);
        if (demo_is_role(target, "noeffect") || demo_is_role(target, "prepared"))
            accepted(tool, known, target);
        if (demo_is_role(target, "real"))
            test_expect(demo_binding_find(&x.options, target->name) != NULL,
                        "--%s is not bound", target->name);
    }
    test_end("options_table %s", tool_name[tool]);
}

/* --help lists what can be typed, and nothing that is refused as another trainer's. */
static void test_help(int tool) {
    char *text = NULL;
    size_t size = 0;
    parse(tool, "");
    x.options.program = "train";
    FILE *out = open_memstream(&text, &size);
    demo_options_help(&x.options, out);
    fclose(out);
    for (const char *at = text; (at = strstr(at, "\n  --")); at++) {
        char name[DEMO_NAME_LIMIT];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(at + 5, " "), at + 5);
        const demo_known *known = demo_known_find(name);
        test_expect(known && demo_list_has(known->tools, tool_name[tool]),
                    "--%s is listed, but not an option of %s", name, tool_name[tool]);
    }
    free(text);
    test_end("options_help %s", tool_name[tool]);
}

/* ---- batches ---- */

static void test_batch(void) {
    static const struct {
        int tool;
        const char *line;
        int64_t documents; /* 0: refused */
    } cases[] = {
        /* the published commands */
        {SFT,
         "--per_device_train_batch_size 1 --gradient_accumulation_steps 2 "
         "--sequence_parallel_size 4",
         2},
        {SFT, "--micro_batch_size 2 --sequence_parallel_degree 4 --world_size 8", 4},
        {SFT, "--train_batch_size 256 --micro_train_batch_size 8 --ring_attn_size 2", 256},
        {DPO, "--train_batch_size 256 --micro_train_batch_size 1 --ring_attn_size 2", 256},
        /* derived */
        {SFT, "", 32},
        {SFT, "--micro_train_batch_size 8", 32},
        {SFT, "--micro_train_batch_size 8 --gradient_accumulation_steps 3", 24},
        {SFT,
         "--micro_train_batch_size 8 --gradient_accumulation_steps 3 --data_parallel_size 2",
         48},
        {SFT, "--per_device_train_batch_size 3 --data_parallel_size 5", 15},
        {SFT, "--cutoff_len 10", 8},
        {SFT, "--from llamafactory", 8},
        {SFT, "--from axolotl --gradient_accumulation_steps 4", 4},
        {SFT, "--from openrlhf --per_device_train_batch_size 3", 32},
        {SFT, "--per_device_train_batch_size 3 --train_batch_size 12", 12},
        {SFT, "--train_batch_size 12 --gradient_accumulation_steps 5", 12},
        {PPO, "--micro_train_batch_size 4 --gradient_accumulation_steps 2", 8},
        /* contradictions */
        {SFT,
         "--train_batch_size 12 --micro_train_batch_size 2 --gradient_accumulation_steps 3", 0},
        {SFT,
         "--train_batch_size 6 --micro_train_batch_size 2 --gradient_accumulation_steps 3 "
         "--data_parallel_size 2",
         0},
        {SFT,
         "--train_batch_size 12 --micro_train_batch_size 2 --gradient_accumulation_steps 3 "
         "--data_parallel_size 2",
         12},
        /* packed rows are no documents */
        {SFT, "--micro_batch_size 2 --sample_packing", 0},
        {SFT, "--micro_batch_size 2 --sample_packing --train_batch_size 9", 9},
        {SFT,
         "--micro_batch_size 2 --sample_packing --train_batch_size 9 "
         "--gradient_accumulation_steps 4",
         9},
        {SFT, "--micro_train_batch_size 2 --packing_samples", 32},
        {SFT, "--micro_train_batch_size 2000000000 --gradient_accumulation_steps 2000000000",
         0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int wrong = settle(cases[i].tool, cases[i].line);
        test_expect(wrong ? !cases[i].documents
                          : x.job.config.train_batch_size == cases[i].documents,
                    "%s: %lld documents a step, wanted are %lld%s%s", cases[i].line,
                    (long long)x.job.config.train_batch_size, (long long)cases[i].documents,
                    wrong ? "; " : "", x.error.text);
    }
    test_expect(settle(SFT, "--train_batch_size 12 --per_device_train_batch_size 2 "
                            "--gradient_accumulation_steps 3") &&
                    !strcmp(x.error.text,
                            "--train_batch_size 12 is not --per_device_train_batch_size 2 x 1 "
                            "data-parallel ranks x --gradient_accumulation_steps 3 = 6; leave "
                            "one of them out, or change it"),
                "says %s", x.error.text);
    test_end("options_batch");
}

/* What is said of a batch. */
static void test_batch_said(void) {
    static const char *const cases[][2] = {
        {"--per_device_train_batch_size 1 --gradient_accumulation_steps 2 "
         "--sequence_parallel_size 4",
         "batch: 2 documents a step = about 1 row x 1 replica x 2 micro-batches\n"},
        {"--micro_batch_size 2 --sequence_parallel_degree 4 --world_size 8",
         "batch: 4 documents a step = about 2 rows x 2 replicas x 1 micro-batch\n"},
        {"--train_batch_size 7 --micro_train_batch_size 2",
         "batch: 7 documents a step = about 2 rows x 1 replica x 4 micro-batches\n"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = NULL;
        size_t size = 0;
        FILE *errors = stderr;
        test_expect(!settle(SFT, cases[i][0]), "%s", x.error.text);
        stderr = open_memstream(&text, &size);
        demo_batch_say(&x.job);
        fclose(stderr);
        stderr = errors;
        test_expect(!strcmp(text, cases[i][1]), "%s: %s", cases[i][0], text);
        free(text);
    }
    test_end("options_batch_said");
}

/* ---- learning rates ---- */

static void test_rates(void) {
    static const struct {
        int tool;
        const char *line;
        double rate; /* 0: refused */
    } cases[] = {{SFT, "", 2e-3},
                 {SFT, "--pretrain m", 5e-6},
                 {DPO, "--pretrain m", 1e-5},
                 {KTO, "--pretrain m", 1e-5},
                 {RM, "--pretrain m", 9e-6},
                 {SFT, "--pretrain m --learning_rate 3e-4", 3e-4},
                 {SFT, "--model_name_or_path m", 5e-5},
                 {DPO, "--pretrain m --from llamafactory", 5e-5},
                 {SFT, "--model_name_or_path m --from openrlhf", 5e-6},
                 {SFT, "--base_model m", 0},
                 {SFT, "--base_model m --learning_rate 1e-4", 1e-4},
                 {SFT, "--model.model_name_or_path m", 5e-6}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int wrong = settle(cases[i].tool, cases[i].line);
        test_expect(wrong ? cases[i].rate < 1e-30
                          : fabs(x.job.config.learning_rate - cases[i].rate) < 1e-12,
                    "%s %s: %g, wanted is %g%s%s", tool_name[cases[i].tool], cases[i].line,
                    x.job.config.learning_rate, cases[i].rate, wrong ? "; " : "", x.error.text);
    }
    test_expect(!settle(PPO, "--pretrain m") &&
                    fabs(x.ppo.actor_learning_rate - 1e-6) < 1e-15 &&
                    fabs(x.ppo.critic_learning_rate - 9e-6) < 1e-15,
                "actor %g, critic %g", x.ppo.actor_learning_rate, x.ppo.critic_learning_rate);
    test_end("options_rates");
}

static void test_defaults(void) {
    static const struct {
        const char *line, *schedule;
        double warms, second;
        int64_t longest;
    } cases[] = {{"", "cosine_with_min_lr", 0.03, 0.95, 1024},
                 {"--from llamafactory", "linear", 0, 0.999, 2048},
                 {"--cutoff_len 77 --lr_scheduler_type cosine", "cosine", 0, 0.999, 77},
                 {"--from axolotl", "cosine", 0.03, 0.999, 512},
                 {"--sequence_len 77 --adam_betas 0.9 0.97 --lr_scheduler linear", "linear",
                  0.03, 0.97, 77}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int wrong = settle(SFT, cases[i].line);
        const demo_config *c = &x.job.config;
        test_expect(!wrong && !strcmp(c->lr_scheduler, cases[i].schedule) &&
                        fabs(c->lr_warmup_ratio - cases[i].warms) < 1e-15 &&
                        fabs(c->adam_betas[1] - cases[i].second) < 1e-15 &&
                        c->max_len == cases[i].longest,
                    "%s: %s, %g, %g, %lld%s", cases[i].line, c->lr_scheduler,
                    c->lr_warmup_ratio, c->adam_betas[1], (long long)c->max_len,
                    wrong ? x.error.text : "");
    }
    test_end("options_defaults");
}

/* ---- placement, types, evaluation, long documents ---- */

/* Every ring_attn_func, and what axolotl takes where it is not told. */
#define AXOLOTL "--from axolotl --sequence_parallel_degree 4 "
#define PACKED  AXOLOTL "--sample_packing --train_batch_size 4 "
#define LF_SP   "--sequence_parallel_size 6 --sequence_parallel_mode "

static void test_placement(void) {
    static const char *const cases[][3] = {
        {"--ring_attn_size 2", "zigzag", "ring"},
        {"--ring_attn_size 2 --ring_head_stride 2", "contiguous", "llama3"},
        {"--ring_attn_size 2 --ring_head_stride 1", "contiguous", "llama3"},
        {"--ring_attn_size 1 --ring_head_stride 2", "zigzag", "ring"},
        {"--sequence_parallel_degree 4 --heads_k_stride 1", "contiguous", "llama3"},
        {"--sequence_parallel_degree 4", "contiguous", "ring"},
        {"--sequence_parallel_degree 4 --sample_packing --train_batch_size 4", "contiguous",
         "llama3"},
        {"--sequence_parallel_degree 4 --ring_attn_func batch_zigzag", "zigzag", "ring"},
        {AXOLOTL, "contiguous", "ring"},
        {AXOLOTL "--ring_attn_func batch_ring", "contiguous", "ring"},
        {AXOLOTL "--ring_attn_func batch_zigzag", "zigzag", "ring"},
        {AXOLOTL "--ring_attn_func batch_stripe", "stripe", "ring"},
        {AXOLOTL "--ring_attn_func varlen_llama3", "contiguous", "llama3"},
        {PACKED, "contiguous", "llama3"},
        {PACKED "--ring_attn_func varlen_llama3", "contiguous", "llama3"},
        {PACKED "--ring_attn_func varlen_ring", "contiguous", "ring"},
        {PACKED "--ring_attn_func varlen_zigzag", "zigzag-doc", "ring"},
        {PACKED "--ring_attn_func batch_ring", NULL, "batch_ring with --sample_packing"},
        {PACKED "--ring_attn_func batch_zigzag", NULL, "batch_zigzag with --sample_packing"},
        {PACKED "--ring_attn_func batch_stripe", NULL, "batch_stripe with --sample_packing"},
        {PACKED "--ring_attn_func batch_ring --layout zigzag", NULL, "with --sample_packing"},
        {AXOLOTL "--ring_attn_func batch_ring --layout zigzag", NULL,
         "batch_ring means --layout contiguous --schedule ring, but"},
        {AXOLOTL "--ring_attn_func llama3", NULL,
         "must be one of batch_ring, batch_zigzag, batch_stripe, varlen_ring, varlen_zigzag"},
        {"--ring_attn_size 4 --ring_head_stride 2 --layout zigzag", "zigzag", "llama3"},
        {"--ring_attn_size 4 --ring_head_stride 2 --schedule ring", NULL,
         "needs --schedule llama3, but"},
        {"--sequence_parallel_size 4 --sequence_parallel_mode zigzag-ring", "zigzag", "ring"},
        {"--sequence_parallel_size 4 --sequence_parallel_mode llama3", "contiguous", "llama3"},
        {LF_SP "ulysses", "contiguous", "ulysses"},
        {LF_SP "ulysses --schedule ring", NULL, "ulysses means --layout contiguous"},
        {LF_SP "usp", NULL, "usp needs the ranks of both"},
        {LF_SP "usp --sequence_parallel_ulysses_degree 3", "zigzag", "ulysses"},
        {LF_SP "usp --sequence_parallel_ring_degree 3", "zigzag", "ulysses"},
        {LF_SP "usp --sequence_parallel_ring_degree 4", NULL,
         "--sequence_parallel_ring_degree 4 does not divide --sequence_parallel_size 6"},
        {LF_SP "usp --sequence_parallel_ring_degree 3 --sequence_parallel_ulysses_degree 3",
         NULL, "ring_degree 3 x --sequence_parallel_ulysses_degree 3 is not --sequence_par"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int wrong = settle(SFT, cases[i][0]);
        test_expect(wrong ? !cases[i][1] && strstr(x.error.text, cases[i][2]) != NULL
                          : cases[i][1] && !strcmp(x.job.config.layout, cases[i][1]) &&
                                !strcmp(x.job.config.schedule, cases[i][2]),
                    "%s: %s", cases[i][0], wrong ? x.error.text : x.job.config.schedule);
    }
    test_end("options_placement");
}

static void test_meanings(void) {
    static const struct {
        const char *line, *refusal; /* NULL: none */
    } cases[] = {
        {"--bf16", NULL},
        {"--bf16 auto", NULL},
        {"--bf16 full", "--bf16 is full, but it must be true, false or auto"},
        {"--bf16 --param_dtype auto", "--bf16 and --param_dtype auto contradict"},
        {"--eval_steps 5", "--eval_steps is 5, but there is nothing to evaluate on"},
        {"--eval_steps -1", NULL},
        {"--eval_strategy epoch", "--eval_strategy is epoch, but there is nothing"},
        {"--eval_strategy steps --eval_dataset e",
         "--eval_strategy steps needs a number of steps"},
        {"--eval_strategy no --eval_dataset e", "--eval_strategy no contradicts"},
        {"--eval_strategy epoch --eval_dataset e --eval_steps 3", "epoch contradicts"},
        {"--eval_strategy steps --eval_dataset e --eval_steps 3", NULL},
        {"--eval_dataset e --eval_steps 0.25 --save_steps 0.5", NULL},
        {"--eval_steps 0.25", "--eval_steps is 0.25, but there is nothing to evaluate on"},
        {"--eval_dataset e --eval_steps 2.5", "--eval_steps is 2.5; give a whole number of "
                                              "steps, a fraction"},
        {"--save_steps -0.5", "--save_steps is -0.5; give a whole number of steps, a "
                              "fraction of all steps"},
        {"--ckpt.save_steps 1.5", "--ckpt.save_steps is 1.5; give a whole number of steps"},
        {"--evals_per_epoch 4", NULL}, /* axolotl's examples have it beside val_set_size 0 */
        {"--evals_per_epoch 4 --eval_dataset e", NULL},
        {"--evals_per_epoch 4 --eval_dataset e --eval_steps 2", "both set the interval"},
        {"--evals_per_epoch 4 --eval_dataset e --eval_strategy epoch",
         "--eval_strategy epoch contradicts --evals_per_epoch 4"},
        {"--saves_per_epoch 2 --save_steps 5", "--save_steps and --saves_per_epoch both"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int wrong = settle(SFT, cases[i].line);
        test_expect(wrong ? cases[i].refusal && strstr(x.error.text, cases[i].refusal) != NULL
                          : !cases[i].refusal,
                    "%s: %s", cases[i].line, wrong ? x.error.text : "accepted");
    }
    settle(SFT, "--bf16");
    test_expect(demo_wants_bf16(&x.job.config), "--bf16 does nothing");
    settle(SFT, "--bf16 false");
    test_expect(!demo_wants_bf16(&x.job.config), "--bf16 false does something");
    test_end("options_meanings");
}

/* How many steps there are from one to the next: transformers rounds a share up, axolotl's
   numbers an epoch are shares; no more than one an epoch is once an epoch. */
static void test_often(void) {
    static const struct {
        const char *line;
        int64_t all, evaluations, saves;
    } cases[] = {{"", 100, -1, -1},
                 {"--eval_steps 3 --save_steps 7", 100, 3, 7},
                 {"--eval_steps 0.25 --save_steps 0.5", 10, 3, 5},
                 {"--eval_steps 1 --save_steps 0", 10, 1, 0},
                 {"--evals_per_epoch 4 --saves_per_epoch 2 --max_epochs 3", 100, 9, 17},
                 {"--evals_per_epoch 1 --saves_per_epoch 2", 7, -1, 4},
                 {"--evals_per_epoch 1 --num_epochs 2", 7, 4, -1}};
    char line[400];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(line, sizeof line, "--eval_dataset e %s", cases[i].line);
        int wrong = settle(SFT, line);
        demo_settle_often(&x.job, cases[i].all);
        test_expect(!wrong && x.job.config.eval_steps == cases[i].evaluations &&
                        x.job.config.save_steps == cases[i].saves,
                    "%s: %lld, %lld %s", line, (long long)x.job.config.eval_steps,
                    (long long)x.job.config.save_steps, wrong ? x.error.text : "");
    }
    test_end("options_often");
}

/* Tokens of a packed row, of documents (or pairs) of at most so many. */
static void test_rows(void) {
    static const struct {
        const char *line;
        int64_t longest, row;
    } cases[] = {{"--packing_samples", 512, 2048},
                 {"--packing_samples", 2047, 2048},
                 {"--packing_samples", 2049, 2049},
                 {"--packing_samples", 4096, 4096},
                 {"", 512, 512},
                 {"--packing_samples --from openrlhf", 512, 2048},
                 {"--sample_packing --train_batch_size 4", 512, 512},
                 {"--neat_packing --train_batch_size 4", 511, 511},
                 {"--packing_samples --from axolotl --train_batch_size 4", 512, 512},
                 {"--packing --train_batch_size 4", 1024, 1024}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int wrong = settle(SFT, cases[i].line);
        int64_t row = demo_row_tokens(&x.job, cases[i].longest);
        test_expect(!wrong && row == cases[i].row, "%s: %lld %s", cases[i].line, (long long)row,
                    wrong ? x.error.text : "");
    }
    test_end("options_rows");
}

/* Every word that is wrong has its sentence, in their order; values behind one are its own. */
static void test_all_wrong(void) {
    int wrong = parse(
        SFT, "--max_len x --seed 7 stray word --load_in_8bit --zero_stage 9 --no_name a b");
    const char *at = x.error.text;
    static const char *const begins[] = {"--max_len is x", "stray word stray",
                                         "--load_in_8bit true is", "--zero_stage is 9",
                                         "unknown option --no_name"};
    for (int i = 0; i < 5; i++, at = at ? at + 1 : NULL) {
        test_expect(at && !strncmp(at, begins[i], strlen(begins[i])), "%s: not %s",
                    at ? at : "no more", begins[i]);
        at = at ? strchr(at, DEMO_ERROR_NEXT) : NULL;
    }
    test_expect(wrong && !at && x.job.config.seed == 7, "more than five: %s", x.error.text);
    test_end("options_all_wrong");
}

static void test_twice(void) {
    test_expect(!parse(SFT, "--seed 7 --seed 9 --max_len 9 --max_len 9"), "%s", x.error.text);
    const demo_options *o = x.job.parsed;
    int64_t seed = demo_known_find("seed") - demo_known_options;
    test_expect(x.job.config.seed == 9 && o->before[seed] && !strcmp(o->before[seed], "7"),
                "the first value is forgotten");
    test_end("options_twice");
}

static void test_long_documents(void) {
    static const struct {
        const char *line;
        int how;
    } cases[] = {{"", DEMO_LONG_CUT},
                 {"--max_len 9", DEMO_LONG_CUT},
                 {"--data.max_len 9", DEMO_LONG_CUT},
                 {"--cutoff_len 9", DEMO_LONG_CUT_BOTH},
                 {"--sequence_len 9", DEMO_LONG_DROP},
                 {"--max_len 9 --from llamafactory", DEMO_LONG_CUT_BOTH},
                 {"--cutoff_len 9 --truncation drop", DEMO_LONG_DROP},
                 {"--sequence_len 9 --truncation cut", DEMO_LONG_CUT}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_expect(!settle(SFT, cases[i].line), "%s", x.error.text);
        test_expect(x.job.config.long_documents == cases[i].how, "%s: %s", cases[i].line,
                    demo_long_words[x.job.config.long_documents]);
    }
    test_end("options_long_documents");
}

/* ---- whose definition of the loss ---- */

/* By the trainer's own check before data is read. */
static int prepare(int tool, const char *line) {
    return parse(tool, line)
               ? -1
               : (demo_settle_definition(&x.job),
                  x.job.objective->prepare ? x.job.objective->prepare(&x.job, &x.error) : 0);
}

static void test_definitions(void) {
    static const struct {
        const char *line, *name;
    } cases[] = {{"", "seqpar"},
                 {"--from openrlhf", "openrlhf"},
                 {"--from 360lf", "llamafactory"},
                 {"--from axolotl", "trl"},
                 {"--from axolotl --loss_definition llamafactory", "llamafactory"},
                 {"--from openrlhf --loss_definition seqpar", "seqpar"},
                 {"--cutoff_len 9", "seqpar"},
                 {"--loss_definition trl", "trl"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_expect(!prepare(SFT, cases[i].line), "%s", x.error.text);
        test_expect(!strcmp(x.job.config.loss_definition, cases[i].name), "%s: %s",
                    cases[i].line, x.job.config.loss_definition);
    }
    test_end("options_definitions");
}

#define GROUPS "--prompt_data p --reward_pretrain r --n_samples_per_prompt 2 "
static void test_definitions_refuse(void) {
    static const struct {
        int tool;
        const char *line, *refusal; /* NULL: none */
    } cases[] = {
        {DPO, "--loss_definition trl --pref_loss kto_pair",
         "--pref_loss kto_pair is not defined by TRL 1.16.0"},
        {DPO, "--pref_loss kto_pair --nll_loss_coef 1",
         "--nll_loss_coef is not defined for kto_pair"},
        {DPO, "--pref_loss kto_pair --label_smoothing 0.1",
         "--label_smoothing is not defined for kto_pair"},
        {DPO, "--loss_definition openrlhf --pref_loss kto_pair", NULL},
        {DPO, "--loss_definition llamafactory --pref_loss kto_pair", NULL},
        {DPO, "--loss_definition openrlhf --pref_loss hinge",
         "--pref_loss hinge is not defined"},
        {DPO, "--from openrlhf --pref_loss simpo", "--pref_loss simpo is not defined"},
        {DPO, "--loss_definition llamafactory --pref_loss robust",
         "--pref_loss robust is not defined"},
        {DPO, "--loss_definition trl --label_smoothing 0.1", "only for simpo,robust"},
        {DPO, "--loss_definition trl --pref_loss robust --label_smoothing 0.1", NULL},
        {DPO, "--loss_definition openrlhf --label_smoothing 0.1", NULL},
        {DPO, "--loss_definition openrlhf --ipo --label_smoothing 0.1",
         "is not defined for ipo"},
        {DPO, "--loss_definition llamafactory --pref_loss simpo --label_smoothing 0.1",
         "--label_smoothing is not defined for simpo"},
        {DPO, "--loss_definition trl --pref_loss simpo --nll_loss_coef 1",
         "--nll_loss_coef is not defined for simpo"},
        {DPO, "--loss_definition trl --ipo --nll_loss_coef 1", NULL},
        {RM, "--loss_definition trl --loss logexp", "--loss logexp is not defined by TRL"},
        {RM, "--loss_definition llamafactory --margin_loss",
         "--margin_loss true is not defined"},
        {RM, "--loss_definition trl --margin_loss", NULL},
        {PPO, GROUPS "--loss_definition llamafactory --advantage_estimator rloo",
         "--advantage_estimator rloo is not defined by LLaMA-Factory 0.9.5"},
        {PPO, GROUPS "--loss_definition trl --advantage_estimator rloo", "rloo is not defined"},
        {PPO, GROUPS "--loss_definition trl --advantage_estimator group_norm --dual_clip 3",
         NULL},
        {PPO, GROUPS "--loss_definition trl --dual_clip 3", "which has no critic"},
        {PPO, GROUPS "--loss_definition llamafactory --dual_clip 3",
         "--dual_clip above 0 is not defined"},
        {PPO, GROUPS "--loss_definition llamafactory --policy_loss_type gspo",
         "gspo is not defined"},
        {PPO, GROUPS "--loss_definition llamafactory --loss_agg_mode grpo",
         "--loss_agg_mode seq-mean-token-mean is not defined"},
        {PPO, GROUPS "--loss_definition openrlhf --loss_agg_mode dr_grpo",
         "--loss_agg_mode seq-mean-token-sum-norm is not defined"},
        {PPO, GROUPS "--loss_definition openrlhf --policy_loss_type gspo --loss_agg_mode dapo",
         "--loss_agg_mode token-mean is not defined for gspo"},
        {PPO, GROUPS "--loss_definition trl --no_advantage_std_norm",
         "std_norm true is not defined"},
        {PPO, GROUPS "--loss_definition openrlhf --no_advantage_std_norm", NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int wrong = prepare(cases[i].tool, cases[i].line);
        test_expect(wrong ? cases[i].refusal && strstr(x.error.text, cases[i].refusal) != NULL
                          : !cases[i].refusal,
                    "%s: %s", cases[i].line, wrong ? x.error.text : "accepted");
    }
    test_end("options_definitions_refuse");
}

/* A launcher's numbers: what is none is no number, and nothing is what was to be taken then. */
static void test_environment(void) {
    static const struct {
        const char *value;
        int64_t want;
    } cases[] = {{NULL, 7}, {"", 7}, {"0", 0}, {"12", 12}, {"x", -1}, {"3x", -1}, {"-4", -4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (cases[i].value)
            setenv("SEQPAR_TEST_SIZE", cases[i].value, 1);
        else
            unsetenv("SEQPAR_TEST_SIZE");
        test_expect(demo_environment("SEQPAR_TEST_SIZE", 7) == cases[i].want, "'%s' is %lld",
                    cases[i].value ? cases[i].value : "nothing",
                    (long long)demo_environment("SEQPAR_TEST_SIZE", 7));
    }
    unsetenv("SEQPAR_TEST_SIZE");
    test_end("options_environment");
}

/* LLaMA-Factory's infer_seqlen: (prompt, response, cutoff) and what is kept of both. */
static void test_shares(void) {
    static const int64_t cases[][5] = {
        {10, 10, 30, 10, 10}, {100, 4, 30, 26, 4},  {4, 100, 30, 4, 26},   {60, 40, 50, 30, 20},
        {40, 60, 50, 20, 30}, {15, 15, 30, 15, 15}, {14, 100, 30, 14, 16}, {15, 100, 30, 4, 26},
        {0, 100, 30, 0, 30},  {100, 15, 30, 27, 3}, {100, 14, 30, 16, 14}, {7, 3, 1000, 7, 3}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int64_t *c = cases[i];
        int64_t share = demo_response_share(c[0], c[1], c[2]);
        int64_t prompt = c[0] < c[2] - share ? c[0] : c[2] - share;
        test_expect(prompt == c[3] && share == c[4], "%lld and %lld in %lld: %lld and %lld",
                    (long long)c[0], (long long)c[1], (long long)c[2], (long long)prompt,
                    (long long)share);
    }
    test_end("options_cut_both");
}

/* ---- mixing ---- */

static void test_mixing(void) {
    demo_twister t;
    double ends[2];
    demo_error error;
    static const double drawn[] = {0.6394267984578837, 0.025010755222666936,
                                   0.27502931836911926, 0.22321073814882275};
    demo_twister_begin(&t, 42); /* as Python's random.Random(42) */
    for (int i = 0; i < 4; i++)
        test_expect(!(fabs(demo_twister_number(&t) - drawn[i]) > 0), "draw %d differs", i);
    demo_twister_begin(&t, (UINT64_C(1) << 40) + 7);
    test_expect(!(fabs(demo_twister_number(&t) - 0.6137037779936511) > 0), "a long seed");
    demo_twister_begin(&t, 0);
    test_expect(!(fabs(demo_twister_number(&t) - 0.8444218515250481) > 0), "seed 0");
    static const int64_t there[] = {50, 150};
    int32_t *order = demo_mix_shared(there, 2, 80), second = 0;
    for (int64_t i = 0; i < arrlen(order); i++) second += order[i];
    test_expect(arrlen(order) == 80 && second == 60, "%lld records, %d of the second set",
                (long long)arrlen(order), second);
    arrfree(order);
    order = demo_mix_shared(there, 2, 1000);
    test_expect(arrlen(order) == 200, "%lld of 200 records", (long long)arrlen(order));
    arrfree(order);
    test_expect(!demo_mix_weights(ends, 2, "0.25,0.75", &error) && !(fabs(ends[1] - 1) > 0),
                "%s", error.text);
    test_expect(demo_mix_weights(ends, 2, "1", &error) &&
                    demo_mix_weights(ends, 2, "0,0", &error) &&
                    demo_mix_weights(ends, 2, "1,x", &error) &&
                    demo_mix_weights(ends, 2, "1,-1", &error) &&
                    demo_mix_weights(ends, 2, "1,1,1", &error),
                "odd weights are taken");
    test_end("options_mixing");
}

/* ---- what belongs together ---- */

#define FOLDER "build/test_options.d"

/* Files that are not there yet: one and the same, however the way to their folder is spelled. */
static void test_same_file(void) {
    static const struct {
        const char *a, *b;
        bool same;
    } cases[] = {{"/there", "/link", true},
                 {"/there/new.x", "/there/../there/./new.x", true},
                 {"/there/new.x", "/link/new.x", true},
                 {"/there/deep/new.x", "/link/deep/new.x", true},
                 {"/there/new.x", "/there//new.x", true},
                 {"/there/new.x", "/there/new.y", false},
                 {"/there/new.x", "/new.x", false},
                 {"/there/deep/new.x", "/there/new.x", false}};
    seqpar_error error = {0};
    char a[80], b[80];
    test_expect(!demo_make_folder(FOLDER "/there", &error), "%s", error.text);
    unlink(FOLDER "/link");
    test_expect(!symlink("there", FOLDER "/link"), "no link: %s", strerror(errno));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(a, sizeof a, FOLDER "%s", cases[i].a);
        snprintf(b, sizeof b, FOLDER "%s", cases[i].b);
        test_expect(demo_same_file(a, b) == cases[i].same &&
                        demo_same_file(b, a) == cases[i].same,
                    "%s and %s are%s the same", a, b, cases[i].same ? " not" : "");
    }
    test_end("options_same_file");
}

/* Two sets: tokens of one tokenizer, or both without a token file. */
static void test_sets_agree(void) {
    enum { NONE, FIRST, LIKE_FIRST, LONGER, OTHER_SUM };
    static const struct {
        int train, other;
        bool taken;
    } cases[] = {{NONE, NONE, true},        {FIRST, LIKE_FIRST, true}, {FIRST, LONGER, false},
                 {FIRST, OTHER_SUM, false}, {NONE, FIRST, false},      {FIRST, NONE, false}};
    demo_token_head heads[] = {{.tokenizer_bytes = 0},
                               {.tokenizer_bytes = 57, .tokenizer_crc = 7},
                               {.tokenizer_bytes = 57, .tokenizer_crc = 7},
                               {.tokenizer_bytes = 58, .tokenizer_crc = 7},
                               {.tokenizer_bytes = 57, .tokenizer_crc = 8}};
    static demo_job job;
    demo_error error;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        demo_token_file a = {.head = &heads[cases[i].train]},
                        b = {.head = &heads[cases[i].other]};
        demo_dataset other = {.file = cases[i].other ? &b : NULL};
        job.train.file = cases[i].train ? &a : NULL;
        job.config.dataset = "one";
        test_expect(!demo_sets_agree(&job, &other, "two", &error), "an empty set is refused");
        arrput(other.documents, (demo_document){0});
        error.text[0] = 0;
        bool taken = !demo_sets_agree(&job, &other, "two", &error);
        test_expect(taken == cases[i].taken &&
                        (taken || !strncmp(error.text, "one and two are not tokens of", 29)),
                    "case %d: %s", (int)i, taken ? "taken" : error.text);
        arrfree(other.documents);
    }
    test_end("options_sets_agree");
}

/* What YaRN scales by, as transformers has it: both weights, or the factor's own. */
static void test_yarn(void) {
    const double both = (0.07 * log(8) + 1) / (0.13 * log(8) + 1);
    const struct {
        const char *json;
        double factor; /* 0: the factor's own */
    } cases[] = {
        {"{}", 0},
        {"{\"mscale\": 0.7}", 0},
        {"{\"mscale_all_dim\": 1.3}", 0},
        {"{\"mscale\": 0.7, \"mscale_all_dim\": 1.3}", both},
        {"{\"attention_factor\": 1.7, \"mscale\": 0.7, \"mscale_all_dim\": 1.3}", 1.7}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        seqpar_error error = {0};
        seqpar_llama_rope rope = {.factor = 8};
        cJSON *json = cJSON_Parse(cases[i].json);
        demo_config_reader reader = {json, "config.json", "", &error};
        demo_rope_yarn(&reader, &rope);
        test_expect(!error.status && fabs(rope.attention_factor - cases[i].factor) < 1e-12,
                    "%s: %.17g, not %.17g %s", cases[i].json, rope.attention_factor,
                    cases[i].factor, error.text);
        cJSON_Delete(json);
    }
    test_end("options_yarn");
}

/* ---- what is said of a job ---- */

static char *text_said;
static size_t said_size;
static FILE *said_before;
static void said_begin(void) {
    said_before = stderr;
    stderr = open_memstream(&text_said, &said_size);
}
/* That what was printed since is this. */
static void said_is(const char *want, const char *what) {
    fclose(stderr);
    stderr = said_before;
    test_expect(!strcmp(text_said, want), "%s: '%s', not '%s'", what, text_said, want);
    free(text_said);
}

static void test_packed_said(void) {
    static const struct {
        const char *line;
        int64_t asked;
        const char *said;
    } cases[] = {
        {"--packing_samples --micro_train_batch_size 1 --train_batch_size 9", 9,
         "batch: 9 documents a step, packed into rows of 77 tokens; a micro-batch has about 1 row "
         "on each of 1 replica\n"},
        {"--packing_samples --micro_train_batch_size 3 --data_parallel_size 2 --train_batch_size 9",
         10,
         "batch: 9 documents a step, packed into rows of 77 tokens; a micro-batch has about "
         "3 rows on each of 2 replicas\n"
         "notice: a batch of 10 documents is more than the data has; every step takes all 9\n"},
        {"--packing_samples --gradient_accumulation_steps 1 --train_batch_size 9", 0,
         "batch: 9 documents a step, packed into rows of 77 tokens on 1 replica, in 1 "
         "micro-batch\n"},
        {"--packing_samples --gradient_accumulation_steps 4 --data_parallel_size 3 "
         "--train_batch_size 9",
         0,
         "batch: 9 documents a step, packed into rows of 77 tokens on 3 replicas, in 4 "
         "micro-batches\n"},
        {"--micro_train_batch_size 5 --train_batch_size 4", 0,
         "batch: 4 documents a step = 4 rows x 1 replica x 1 micro-batch\n"},
        {"--micro_train_batch_size 2 --train_batch_size 5 --gradient_accumulation_steps 2", 0,
         ""},
        {"--train_batch_size 5 --gradient_accumulation_steps 2", 0,
         "batch: 5 documents a step = about 3 rows x 1 replica x 2 micro-batches\n"},
        {"--micro_train_batch_size 3 --train_batch_size 10 --data_parallel_size 2", 0,
         "batch: 10 documents a step = about 3 rows x 2 replicas x 2 micro-batches\n"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int wrong = settle(SFT, cases[i].line);
        test_expect(!wrong == (*cases[i].said != 0), "%s: %s", cases[i].line, x.error.text);
        if (wrong) continue;
        x.job.config.pack_len = 77;
        x.job.asked_batch = cases[i].asked;
        said_begin();
        demo_batch_say(&x.job);
        said_is(cases[i].said, cases[i].line);
    }
    test_end("options_packed_said");
}

static void test_rates_said(void) {
    static const struct {
        int tool;
        const char *line, *said;
    } cases[] = {
        {SFT, "", "learning rate: at most 0.002 (for a new model), "},
        {SFT, "--learning_rate 0.25", "learning rate: at most 0.25, "},
        {SFT, "--pretrain m",
         "learning rate: at most 5e-06 (openrlhf's default with --pretrain), "},
        {SFT, "--model_name_or_path m",
         "learning rate: at most 5e-05 (llamafactory's default with --pretrain), "},
        {PPO, "--pretrain m --critic_learning_rate 0.5",
         "learning rate: actor 1e-06 (openrlhf's default with --pretrain), critic 0.5, "}};
    char want[300];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_expect(!settle(cases[i].tool, cases[i].line), "%s", x.error.text);
        x.job.warmup = 3, x.job.total_steps = 17;
        snprintf(want, sizeof want, "%s%s, 3 of 17 steps warm up\n", cases[i].said,
                 x.job.config.lr_scheduler);
        said_begin();
        demo_rates_say(&x.job);
        said_is(want, cases[i].line);
    }
    test_end("options_rates_said");
}

/* The only step that is left, where its learning rate is 0. */
static void test_rates_noticed(void) {
    static const struct {
        int64_t from, total, last, warmup;
        int kind;
        bool noticed;
    } cases[] = {{DEMO_NOTHING_SAVED, 1, 1, 1, SEQPAR_LR_LINEAR, true},
                 {DEMO_NOTHING_SAVED, 1, 1, 0, SEQPAR_LR_LINEAR, false},
                 {DEMO_NOTHING_SAVED, 2, 2, 2, SEQPAR_LR_LINEAR, false},
                 {DEMO_NOTHING_SAVED, 1, 2, 1, SEQPAR_LR_LINEAR, false},
                 {0, 1, 1, 1, SEQPAR_LR_LINEAR, true},
                 {1, 2, 2, 2, SEQPAR_LR_LINEAR, false},
                 {1, 1, 1, 1, SEQPAR_LR_LINEAR, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static demo_job job;
        job.run.from = cases[i].from;
        job.total_steps = cases[i].total;
        job.last_step = cases[i].last;
        job.warmup = cases[i].warmup;
        job.lr_kind = cases[i].kind;
        said_begin();
        demo_rates_notice(&job);
        said_is(cases[i].noticed
                    ? "notice: the only step has learning rate 0 (1 of 1 steps warm up), so no "
                      "weight changes; give --warmup_steps 0 or more steps\n"
                    : "",
                "rates");
    }
    test_end("options_rates_noticed");
}

/* What is evaluated on, and how often. */
static void test_evaluation_said(void) {
    static const struct {
        int64_t documents, of, every, steps;
        const char *dataset, *said;
        bool trained, scores, rounds;
    } cases[] = {
        {0, 0, 3, 3, NULL, "evaluation: none, as there is no --eval_dataset\n", 0, 0, 0},
        {6, 0, 3, 3, "e", "evaluation: e, 3 pairs, every 3 steps and at the end\n", 0, 0, 0},
        {6, 0, 1, -1, "e", "evaluation: e, 3 pairs, every 1 step (an epoch) and at the end\n",
         0, 0, 0},
        {6, 0, 2, 2, "e", "evaluation: e, 3 prompts, every 2 rollouts and at the end\n", 0, 0,
         1},
        {6, 0, 0, 0, "e\n", "evaluation: e\\n, 3 pairs, at the end\n", 0, 0, 0},
        {8, 40, 0, 0, NULL,
         "evaluation: 4 of 40 pairs by --seed 9, which are not trained on, at the end\n", 0, 0,
         0},
        {8, 40, 2, -1, NULL,
         "evaluation: the first 4 of 40 pairs, which are trained on, too, as OpenRLHF does, every 2 "
         "steps (an epoch) and at the end\n",
         1, 0, 0},
        {8, 40, 2, -1, NULL,
         "evaluation: none, as there is no --eval_dataset; mean and deviation of the scores, "
         "for config.json, are measured after training on the first 4 of 40 pairs\n",
         1, 1, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static demo_job job;
        demo_objective objective = {.unit = "pairs",
                                    .documents_per_unit = 2,
                                    .round = cases[i].rounds ? "rollout" : NULL,
                                    .walk = cases[i].rounds ? demo_ppo_walk : NULL};
        job.objective = &objective;
        job.config.eval_dataset = cases[i].dataset;
        job.config.seed = 9;
        job.config.eval_steps = cases[i].steps;
        job.eval_of = cases[i].of;
        job.eval_every = cases[i].every;
        job.eval_trained = cases[i].trained;
        job.eval_scores = cases[i].scores;
        arrsetlen(job.eval.documents, (size_t)cases[i].documents);
        said_begin();
        demo_evaluation_say(&job);
        said_is(cases[i].said, "evaluation");
    }
    test_end("options_evaluation_said");
}

/* Documents that no step of an epoch has, where an epoch is gone through. */
static void test_left_over_said(void) {
    static const struct {
        int64_t units, usable, steps, last;
        bool prompts, said;
    } cases[] = {{16, 50, 1, 3, false, true},  {16, 50, 1, 2, false, false},
                 {16, 48, 1, 9, false, false}, {16, 50, 2, 6, true, true},
                 {16, 50, 2, 5, true, false},  {50, 50, 1, 9, false, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static demo_job job;
        demo_objective objective = {.unit = "pairs",
                                    .walk = cases[i].prompts ? demo_ppo_walk : NULL};
        char want[200] = "";
        job.objective = &objective;
        job.usable_count = cases[i].usable;
        job.epoch_units = cases[i].units;
        job.round_steps = cases[i].steps;
        job.last_step = cases[i].last;
        if (cases[i].said)
            snprintf(
                want, sizeof want,
                "notice: 50 %s are not a multiple of 16: each epoch leaves out 2 of them\n",
                cases[i].prompts ? "prompts" : "pairs");
        said_begin();
        demo_left_over_notice(&job);
        said_is(want, "left over");
    }
    test_end("options_left_over_said");
}

/* Options that nothing uses: each of what would. */
static void test_idle_said(void) {
#define OFFLOAD \
    "notice: nothing is offloaded, so --offload_path is not used; add --adam_offload, " \
    "--param_offload, --activation_offloading or --ref_offload\n"
#define TILED "notice: --tiled_mlp does not support models with experts and is not used\n"
#define AUX   "notice: the model has no experts, so --aux_loss_coef adds nothing\n"
    static const struct {
        int tool;
        const char *line;
        int64_t experts;
        bool away;
        const char *said;
    } cases[] = {
        {SFT, "", 0, false, ""},
        {SFT, "--offload_path .", 0, false, OFFLOAD},
        {SFT, "--offload_path . --adam_offload", 0, false, ""},
        {SFT, "--offload_path . --param_offload", 0, false, ""},
        {SFT, "--offload_path .", 0, true, ""},
        {DPO, "--offload_path . --ref_offload", 0, false, ""},
        {DPO, "--offload_path .", 0, false, OFFLOAD},
        {PPO, "--offload_path . --ref_reward_offload", 0, false, ""},
        {SFT, "--tiled_mlp", 0, false, ""},
        {SFT, "--tiled_mlp", 4, false, TILED},
        {SFT, "--aux_loss_coef 0.1", 0, false, AUX},
        {SFT, "--aux_loss_coef 0.1", 4, false, ""},
        {SFT, "--aux_loss_coef 0.1 --tiled_mlp --offload_path .", 0, false, OFFLOAD AUX}};
#undef OFFLOAD
#undef TILED
#undef AUX
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_expect(!parse(cases[i].tool, cases[i].line), "%s", x.error.text);
        x.job.model.experts = cases[i].experts;
        x.job.config.activations_away = cases[i].away;
        said_begin();
        demo_idle_notice(&x.job);
        said_is(cases[i].said, cases[i].line);
    }
    test_end("options_idle_said");
}

/* ---- what a token file was made with ---- */

static void test_settled(void) {
#define MADE \
    "{\"train_on\": \"all\", \"apply_chat_template\": false, \"dataset_probs\": [0.25, 0.75], " \
    "\"csft_prompt\": \"5.00\", \"input_key\": \"q\", \"input_template\": \"{}\"}"
#define CHAT \
    "{\"train_on\": \"last\", \"apply_chat_template\": true, \"tokenizer_chat_template\": null, " \
    "\"csft_prompt\": null, \"output_key\": null, \"input_template\": \"{}\", \"dataset_info\": " \
    "\"d.json\"}"
#define TURNS \
    "{\"train_on\": \"assistant\", \"apply_chat_template\": true, \"tokenizer_chat_template\": " \
    "\"t\", \"output_key\": null}"
    static const struct {
        const char *made, *name, *text, *there; /* NULL: alike */
    } cases[] = {
        {MADE, "train_on_inputs", "true", NULL},
        {MADE, "train_on_inputs", "false", "all"},
        {CHAT, "train_on_inputs", "true", "last"},
        {CHAT, "train_on_inputs", "false", NULL},
        {"{}", "train_on_inputs", "true", NULL},
        {MADE, "mask_history", "true", "all"},
        {MADE, "mask_history", "false", NULL},
        {CHAT, "mask_history", "true", NULL},
        {CHAT, "mask_history", "false", "last"},
        {"{}", "mask_history", "true", NULL},
        {MADE, "enable_csft", "true", NULL},
        {MADE, "enable_csft", "false", "5.00"},
        {CHAT, "enable_csft", "true", "prompts without a reward to ask for (--csft_prompt)"},
        {CHAT, "enable_csft", "false", NULL},
        {"{}", "enable_csft", "true", "prompts without a reward to ask for (--csft_prompt)"},
        {MADE, "dataset_probs", "0.25,0.75", NULL},
        {MADE, "dataset_probs", "0.25,0.5", "several weights"},
        {MADE, "prompt_data_probs", "0.5,0.75", "several weights"},
        {MADE, "dataset_probs", "0.25", "several weights"},
        {MADE, "dataset_probs", "0.25,0.75,1", "several weights"},
        {CHAT, "dataset_probs", "1,1", NULL},
        {MADE, "chat_template", "tokenizer_default", "another one"},
        {CHAT, "chat_template", "tokenizer_default", NULL},
        {CHAT, "chat_template", "chatml", "the template of the model's folder"},
        {TURNS, "chat_template", "tokenizer_default", "another one"},
        {MADE, "multiturn", "true", "options that are not for lists of messages"},
        {MADE, "multiturn", "false", NULL},
        {CHAT, "multiturn", "true", "options that are not for lists of messages"},
        {TURNS, "multiturn", "true", NULL},
        {MADE, "input_template", "{}", NULL},
        {MADE, "input_template", "Q {}", "{}"},
        {CHAT, "input_template", "{}", "a chat template"},
        {MADE, "input_key", "q", NULL},
        {MADE, "input_key", "p", "q"},
        {MADE, "output_key", "a", NULL},
        {CHAT, "output_key", "a", "none"},
        {CHAT, "eval_dataset_info", "d.json", NULL},
        {CHAT, "dataset_info", "e.json", "d.json"}};
#undef MADE
#undef CHAT
#undef TURNS
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cJSON *made = cJSON_Parse(cases[i].made);
        const char *there = NULL;
        bool alike = demo_settled_alike(made, cases[i].name, cases[i].text, &there);
        test_expect(made && alike == !cases[i].there &&
                        (alike || (there && !strcmp(there, cases[i].there))),
                    "--%s %s of case %d: %s", cases[i].name, cases[i].text, (int)i,
                    alike ? "alike" : there);
        cJSON_Delete(made);
    }
    cJSON *one = cJSON_Parse("{\"dataset_probs\": null}");
    test_expect(demo_same_weights(one, "0.7") && !demo_same_weights(one, "0.7,0.3"),
                "weights of one set");
    cJSON_Delete(one);
    static demo_job job;
    test_expect(demo_settled_of(&job, &job.train, "dataset_probs") &&
                    demo_settled_of(&job, &job.train, "dataset_info") &&
                    !demo_settled_of(&job, &job.train, "eval_dataset_info") &&
                    !demo_settled_of(&job, &job.eval, "prompt_data_probs") &&
                    !demo_settled_of(&job, &job.eval, "dataset_info") &&
                    demo_settled_of(&job, &job.eval, "eval_dataset_info") &&
                    demo_settled_of(&job, &job.eval, "input_key"),
                "which set an option is about");
    test_end("options_settled");
}

/* ---- evaluation in windows ---- */

/* Four steps' worth at a time, in the order of the file; one unit alone goes with those before it. */
static void test_windows(void) {
    static const int64_t cases[][4] = {/* documents, batch, documents a unit, windows */
                                       {0, 2, 1, 0},  {1, 2, 1, 1},  {8, 2, 1, 1},
                                       {9, 2, 1, 1},  {10, 2, 1, 2}, {16, 2, 1, 2},
                                       {17, 2, 1, 2}, {18, 2, 1, 3}, {16, 2, 2, 1},
                                       {18, 2, 2, 1}, {20, 2, 2, 2}, {2, 1, 2, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static demo_job job;
        demo_objective objective = {.documents_per_unit = (int)cases[i][2]};
        int64_t next = 0;
        job.objective = &objective;
        job.config.train_batch_size = cases[i][1];
        arrsetlen(job.eval.documents, (size_t)cases[i][0]);
        test_expect(demo_eval_windows(&job) == cases[i][3], "case %d: %lld windows", (int)i,
                    (long long)demo_eval_windows(&job));
        for (int64_t w = 0; w < demo_eval_windows(&job); w++) {
            int64_t *which = demo_eval_documents(&job, w);
            test_expect(w + 1 == cases[i][3] || arrlen(which) == 4 * cases[i][1] * cases[i][2],
                        "case %d: window %lld has %lld", (int)i, (long long)w,
                        (long long)arrlen(which));
            for (int64_t k = 0; k < arrlen(which); k++)
                test_expect(which[k] == next++, "case %d: document %lld", (int)i,
                            (long long)which[k]);
            arrfree(which);
        }
        test_expect(next == cases[i][0], "case %d: %lld documents", (int)i, (long long)next);
    }
    test_end("options_windows");
}

/* Lines of a log that a run which goes on from a checkpoint keeps. */
static void test_lines_kept(void) {
    static const char lines[] = "{\"step\": 1}\n{\"step\": 2}\n{\"eval_x\": 1}\n{\"step\": 2, "
                                "\"eval_y\": 2}\n{\"step\": 3}\n{\"st";
    static const struct {
        int64_t step;
        bool again;
        size_t kept; /* lines */
    } cases[] = {{0, false, 0}, {1, false, 1}, {2, false, 4}, {2, true, 2},
                 {3, false, 5}, {3, true, 5},  {9, false, 5}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        FILE *file = fmemopen((void *)lines, sizeof lines - 1, "rb");
        const demo_line_keys keys = {"\"step\": ", cases[i].again ? "\"eval_" : NULL};
        int64_t end = demo_lines_end(file, &keys, cases[i].step, NULL, NULL);
        size_t kept = 0;
        for (int64_t k = 0; k < end; k++) kept += lines[k] == '\n';
        test_expect(kept == cases[i].kept && (!end || lines[end - 1] == '\n'),
                    "case %d: %d lines", (int)i, (int)kept);
        fclose(file);
    }
    test_end("options_lines_kept");
}

/* ---- training data made of texts ---- */

#define LINE(input, output, reward, stopped) \
    "{\"input\":\"" input "\",\"output\":\"" output "\",\"reward\":" reward \
    ",\"stopped\":" stopped "}\n"
static const char texts_made[] = LINE("p", "a", "1", "true") LINE("p", "b", "3", "false")
    LINE("q", "", "9", "true") LINE("q", "c", "2", "true") LINE("p", "d", "3", "true")
        LINE("p", "e", "1", "true");
#undef LINE

static void test_recipes(void) {
    static const struct {
        demo_recipe recipe;
        const char *made;
        int64_t inputs, lines, even, empty;
    } cases[] = {{{DEMO_RECIPE_NONE, NULL, false}, texts_made, 2, 6, 0, 0},
                 {{DEMO_RECIPE_RS, NULL, false},
                  "{\"input\":\"p\",\"output\":\"b\",\"reward\":3}\n"
                  "{\"input\":\"q\",\"output\":\"c\",\"reward\":2}\n",
                  2,
                  2,
                  1,
                  1},
                 {{DEMO_RECIPE_DPO, NULL, false},
                  "{\"prompt\":\"p\",\"chosen\":\"b\",\"chosen_reward\":3,\"rejected\":\"a\","
                  "\"rejected_reward\":1}\n"
                  "{\"prompt\":\"q\",\"chosen\":\"c\",\"chosen_reward\":2,\"rejected\":\"c\","
                  "\"rejected_reward\":2}\n",
                  2,
                  2,
                  1,
                  1},
                 {{DEMO_RECIPE_CSFT, "{reward}: {input}; {input}", false},
                  "{\"input\":\"1.00: p; p\",\"output\":\"a\",\"reward\":1}\n"
                  "{\"input\":\"3.00: p; p\",\"output\":\"b\",\"reward\":3}\n"
                  "{\"input\":\"2.00: q; q\",\"output\":\"c\",\"reward\":2}\n"
                  "{\"input\":\"3.00: p; p\",\"output\":\"d\",\"reward\":3}\n"
                  "{\"input\":\"1.00: p; p\",\"output\":\"e\",\"reward\":1}\n",
                  2,
                  5,
                  0,
                  1}};
    demo_error error = {""};
    seqpar_error folder_error = {0};
    size_t size;
    test_expect(!demo_make_folder(FOLDER, &folder_error), "%s", folder_error.text);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        demo_generated g = {.path = FOLDER "/made.jsonl", .part = FOLDER "/made.jsonl.part"};
        demo_recipe_counts counts = {0};
        test_expect(!demo_write_atomically(g.part, texts_made, strlen(texts_made), &error),
                    "%s", error.text);
        g.file = fopen(g.part, "r+b");
        g.texts = 6;
        test_expect(!demo_recipe_end(&g, &cases[i].recipe, &counts, &error), "%s", error.text);
        char *made = demo_read_file(g.path, &size);
        test_expect(made && !strcmp(made, cases[i].made), "case %d: %s", (int)i, made);
        test_expect(counts.texts == 6 && counts.inputs == cases[i].inputs &&
                        counts.lines == cases[i].lines && counts.even == cases[i].even &&
                        counts.empty == cases[i].empty && counts.cut == 1 &&
                        fabs(counts.mean - 19.0 / 6) < 1e-12 &&
                        fabs(counts.deviation - sqrt((105 - 361.0 / 6) / 5)) < 1e-12,
                    "case %d: %lld inputs, %lld lines, deviation %g", (int)i,
                    (long long)counts.inputs, (long long)counts.lines, counts.deviation);
        test_expect(access(g.part, F_OK) != 0, "the part is left");
        free(made);
        fclose(g.file);
    }
    static const char *const replaced[][4] = {{"a{x}b{x}", "{x}", "longer", "alongerblonger"},
                                              {"{x}", "{x}", "", ""},
                                              {"none", "{x}", "y", "none"},
                                              {"{x}{x}", "{x}", "{x}", "{x}{x}"}};
    for (int i = 0; i < 4; i++) {
        char *made = demo_replaced(replaced[i][0], replaced[i][1], replaced[i][2]);
        test_expect(!strcmp(made, replaced[i][3]), "%s", made);
        free(made);
    }
    test_expect(!strcmp(demo_csft_template("Q {}", " \t5.00 x\n"), "Q {}5.00 x ") &&
                    !strcmp(demo_csft_template("{}", "  "), "{} "),
                "a prompt with a reward");
    test_end("options_recipes");
}

/* ---- names and numbers of files ---- */

static void test_sizes_named(void) {
    static const struct {
        const char *text;
        int64_t bytes; /* -1: it is no size */
    } sizes[] = {{"1", 1},
                 {"700MB", 700000000},
                 {"1.5KB", 1500},
                 {"5GB", 5000000000},
                 {"2TB", 2000000000000},
                 {"0", -1},
                 {"0.5", -1},
                 {"0.001KB", 1},
                 {"KB", -1},
                 {"", -1},
                 {"7kb", -1},
                 {"7 KB", -1},
                 {"-1KB", -1},
                 {"9007199254740992", INT64_C(9007199254740992)},
                 {"9007199254740994", -1},
                 {"10000TB", -1},
                 {"nan", -1}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        test_expect(demo_size_named(sizes[i].text) == sizes[i].bytes, "%s is %lld",
                    sizes[i].text, (long long)demo_size_named(sizes[i].text));
    static const struct {
        const char *name;
        seqpar_safetensors_dtype dtype;
    } types[] = {{"float64", SEQPAR_SAFETENSORS_F64}, {"float32", SEQPAR_SAFETENSORS_F32},
                 {"float16", SEQPAR_SAFETENSORS_F16}, {"bfloat16", SEQPAR_SAFETENSORS_BF16},
                 {"auto", SEQPAR_SAFETENSORS_NONE},   {NULL, SEQPAR_SAFETENSORS_NONE}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        test_expect(demo_dtype_named(types[i].name) == types[i].dtype, "type %d", (int)i);
        if (types[i].dtype != SEQPAR_SAFETENSORS_NONE)
            test_expect(!strcmp(demo_dtype_name(types[i].dtype), types[i].name), "%s",
                        types[i].name);
    }
    test_end("options_sizes_named");
}

/* Files of a model that another number of shards has left; checkpoints, and what is left of them. */
static void test_names_known(void) {
    static const struct {
        const char *name;
        int64_t shards;
        bool stale;
    } files[] = {{"model.safetensors", 1, false},
                 {"model.safetensors", 2, true},
                 {"model.safetensors.index.json", 1, true},
                 {"model.safetensors.index.json", 2, false},
                 {"model-00001-of-00002.safetensors", 2, false},
                 {"model-00001-of-00002.safetensors", 3, true},
                 {"model-00001-of-00002.safetensors", 1, true},
                 {"model-00001-of-00001.safetensors", 1, true},
                 {"model-00001-of-00003.safetensors.tmp", 2, false},
                 {"model-x-of-00003.safetensors", 2, false},
                 {"config.json", 2, false}};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        test_expect(demo_stale_file(files[i].name, files[i].shards) == files[i].stale,
                    "%s of %lld", files[i].name, (long long)files[i].shards);
    char name[64];
    demo_shard_name(name, 0, 1);
    test_expect(!strcmp(name, "model.safetensors"), "%s", name);
    demo_shard_name(name, 1, 12);
    test_expect(!strcmp(name, "model-00002-of-00012.safetensors"), "%s", name);
    static const struct {
        const char *name;
        int64_t step;
    } steps[] = {{"global_step0", 0},   {"global_step12", 12}, {"global_step012", -1},
                 {"global_step", -1},   {"global_step-3", -1}, {"global_step7x", -1},
                 {"global_stepp7", -1}, {"lobal_step7", -1},   {"global_step+7", -1}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        test_expect(demo_checkpoint_step(steps[i].name) == steps[i].step, "%s is %lld",
                    steps[i].name, (long long)demo_checkpoint_step(steps[i].name));
    static const struct {
        const char *end;
        bool left;
    } ends[] = {{".tmp.7", true}, {".tmp.7.12", true}, {".tmp.", false},  {".tmp.7a", false},
                {".tmp", false},  {"", false},         {"x.tmp.7", false}};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        test_expect(demo_left_over(ends[i].end) == ends[i].left, "%s", ends[i].end);
    test_expect(demo_is_run("0123456789abcdef") && !demo_is_run("0123456789abcde") &&
                    !demo_is_run("0123456789abcdef0") && !demo_is_run("0123456789abcdeg") &&
                    !demo_is_run("0123456789ABCDEF"),
                "names of runs");
    test_end("options_names_known");
}

/* A resumed run says nothing of other options that change no number. It tells those that change
   roundings. */
static void test_free_options(void) {
    static const char told[] = "cublas,relaxed_attention,recompute_old_logp";
    char names[sizeof demo_free_options];
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++) {
        const demo_known *o = &demo_known_options[i];
        if (strcmp(o->role, "real") || !strcmp(o->kind, "string") ||
            !strcmp(o->tools, "generate") || !demo_list_has("shown,files,speed", o->there))
            continue;
        test_expect(demo_list_has(demo_free_options, o->name) != demo_list_has(told, o->name),
                    "--%s changes no number: does demo_free_options have it?", o->name);
    }
    snprintf(names, sizeof names, "%s", demo_free_options);
    for (char *name = strtok(names, ","); name; name = strtok(NULL, ","))
        test_expect(demo_known_find(name) != NULL, "no option is called %s", name);
    test_end("options_free");
}

/* Words as a shell reads them back. */
static void test_shell_words(void) {
    static const char *const cases[][2] = {
        {"plain", " plain"},    {"a/b_c.d,e:f@g%h+i=j-9Z", " a/b_c.d,e:f@g%h+i=j-9Z"},
        {"", " $''"},           {"two words", " $'two words'"},
        {"it's", " $'it\\'s'"}, {"a\\b", " $'a\\\\b'"},
        {"a\nb", " $'a\\nb'"},  {"{}", " $'{}'"},
        {"$x", " $'$x'"}};
    char text[64];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        demo_shell_word(text, sizeof text, cases[i][0]);
        test_expect(!strcmp(text, cases[i][1]), "'%s' is '%s'", cases[i][0], text);
    }
    char one[] = "--a", two[] = "it's", three[] = "''''''''''", *words[] = {one, two, three};
    char *line = demo_shell_line("begin", words, 3);
    test_expect(!strcmp(line, "begin --a $'it\\'s' $'\\'\\'\\'\\'\\'\\'\\'\\'\\'\\''"), "%s",
                line);
    free(line);
    line = demo_shell_line("begin", words, 0);
    test_expect(!strcmp(line, "begin"), "%s", line);
    free(line);
    test_end("options_shell_words");
}

/* Rounds behind which there is an evaluation. */
static void test_evaluations_due(void) {
    static const struct {
        int64_t documents, rounds, every;
        const char *due; /* of rounds 0 to 7 */
    } cases[] = {{1, 7, 3, "00010011"}, {1, 7, 0, "00000001"}, {0, 7, 3, "00000000"},
                 {1, 0, 3, "10010010"}, {1, 6, 6, "00000010"}, {1, 7, -1, "00000001"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static demo_job job;
        job.rounds = cases[i].rounds;
        job.eval_every = cases[i].every;
        arrsetlen(job.eval.documents, (size_t)cases[i].documents);
        for (int64_t done = 0; done < 8; done++)
            test_expect(demo_evaluation_due(&job, done) == (cases[i].due[done] == '1'),
                        "case %d: round %lld", (int)i, (long long)done);
    }
    test_end("options_evaluations_due");
}

/* What two stretches share, and where that begins. */
static void test_parts_shared(void) {
    static const int64_t cases[][6] = {
        /* begin, end, first, count; shared, at */
        {0, 10, 0, 10, 10, 0}, {3, 7, 0, 10, 4, 3}, {0, 10, 3, 4, 4, 3},
        {0, 5, 3, 4, 2, 3},    {5, 9, 3, 4, 2, 5},  {0, 3, 3, 4, 0, 3},
        {7, 9, 3, 4, 0, 7},    {0, 2, 3, 4, 0, 3},  {4, 4, 3, 4, 0, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int64_t *c = cases[i];
        int64_t at, shared = demo_average_part(c[0], c[1], c[2], c[3], &at);
        test_expect(shared == c[4] && at == c[5], "case %d: %lld from %lld", (int)i,
                    (long long)shared, (long long)at);
    }
    double share[4] = {0};
    static const double values[] = {1, 2, 3, 4, 5};
    demo_average average = {.share = share, .begin = 6, .count = 4};
    demo_average_write(&average, values, 4, 5); /* 4 to 9, of which 6 to 9 are here */
    test_expect(share[0] == 3 && share[1] == 4 && share[2] == 5 && share[3] == 0, "%g %g %g %g",
                share[0], share[1], share[2], share[3]);
    demo_average_write(&average, values, 9, 5);
    test_expect(share[2] == 5 && share[3] == 1, "%g %g", share[2], share[3]);
    test_end("options_parts_shared");
}

/* A value as it would be typed: as few digits as give the same number. */
static void test_values_told(void) {
    static const struct {
        double value;
        const char *text;
    } numbers[] = {{0.1, "0.1"},    {1.0 / 3, "0.3333333333333333"},
                   {5e-6, "5e-06"}, {1234567, "1234567"},
                   {0, "0"},        {0.1 + 0.2, "0.30000000000000004"}};
    char text[64];
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        demo_number_text(text, sizeof text, numbers[i].value);
        test_expect(!strcmp(text, numbers[i].text), "%s, not %s", text, numbers[i].text);
    }
    bool on = true;
    int64_t whole = -7;
    double pair[] = {0.9, 0.95};
    const char *word = "cosine", *none = NULL;
    const struct {
        demo_binding binding;
        const char *text;
        bool kept; /* by a checkpoint: not paths and other free texts */
    } values[] = {{{"packing_samples", &on, DEMO_FLAG}, "true", true},
                  {{"seed", &whole, DEMO_INT}, "-7", true},
                  {{"l2", pair, DEMO_FLOAT}, "0.9", true},
                  {{"adam_betas", pair, DEMO_FLOATS2}, "0.9,0.95", true},
                  {{"lr_scheduler", &word, DEMO_STRING}, "cosine", true},
                  {{"lr_scheduler", &none, DEMO_STRING}, "none", true},
                  {{"dataset", &word, DEMO_STRING}, "cosine", false}};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        bool kept = demo_option_text(&values[i].binding, text, sizeof text);
        test_expect(!strcmp(text, values[i].text) && kept == values[i].kept, "--%s is %s",
                    values[i].binding.name, text);
    }
    test_end("options_values_told");
}

/* ---- marks of process reward models ---- */

static void test_marks(void) {
    static const struct {
        const char *text;
        int64_t count; /* -1: refused, with this sentence */
        const char *wrong;
    } cases[] = {{NULL, 0, ""},
                 {"+ -", 2, ""},
                 {"  +   -  ", 2, ""},
                 {"a b c d e f g h i j k l m n o p", 16, ""},
                 {"a b c d e f g h i j k l m n o p q", -1,
                  "--reward_tokens are more than 16; give 2 to 16"},
                 {"+", -1, "--reward_tokens + is only one token; give 2 to 16"},
                 {"", -1, "--reward_tokens  is only one token; give 2 to 16"},
                 {"+ - +", -1, "--reward_tokens names \"+\" twice; name each once"},
                 {"+ ab", -1,
                  "--reward_tokens: \"ab\" is 2 tokens, as without a tokenizer each byte is "
                  "a token; give one ASCII character"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        demo_marks marks = {{0}, 9};
        demo_error error = {""};
        int wrong = demo_byte_marks(cases[i].text, &marks, &error);
        test_expect(wrong ? cases[i].count < 0 && !strcmp(error.text, cases[i].wrong)
                          : marks.count == cases[i].count,
                    "case %d: %s", (int)i, wrong ? error.text : "taken");
    }
    demo_marks a = {{'+', '-'}, 2}, b = {{'+', '-'}, 2}, c = {{'+', '?'}, 2},
               d = {{'+', '-', 0}, 3};
    test_expect(demo_same_marks(&a, &b) && !demo_same_marks(&a, &c) && !demo_same_marks(&a, &d),
                "which are the same");
    test_expect(demo_mark_of(&a, '+') == 0 && demo_mark_of(&a, '-') == 1 &&
                    demo_mark_of(&a, '?') == -1 && demo_mark_of(&d, 0) == 2 &&
                    demo_mark_of(&a, 0) == -1,
                "their numbers");
    test_end("options_marks");
}

/* Labels of steps: what each becomes, and the whole sentence of each that is wrong. */
static void test_steps(void) {
    static const struct {
        const char *line;
        const char *want; /* ids with target and share of each that has one; or a sentence */
    } cases[] = {
        {"{\"t\": \"a#b#\", \"l\": [\"+\", \"-\"]}", "a #:+1 b #:-1"},
        {"{\"t\": \"a#b#\", \"l\": [0.25, true]}", "a #:+0.25 b #:+1"},
        {"{\"t\": \"#\", \"l\": [0]}", "#:+0"},
        {"{\"t\": \"a#\", \"l\": [\"+\", \"-\"]}",
         "2 labels in \"l\" for 1 placeholders \"#\"; give one for each"},
        {"{\"t\": \"ab\", \"l\": [\"+\"]}",
         "the text has no placeholder \"#\", so no step has a label; put it after each step, "
         "or name another by --placeholder_token"},
        {"{\"t\": \"a#\", \"l\": [\"?\"]}", "l[0] is \"?\", which is none of --reward_tokens"},
        {"{\"t\": \"a##\", \"l\": [\"+\", \"+-\"]}",
         "l[1] is \"+-\", which is 2 tokens, as without a tokenizer each byte is a token; "
         "give one ASCII character"},
        {"{\"t\": \"a#\", \"l\": [null]}", "l[0] is null, but a token or a number is needed"},
        {"{\"t\": \"a##\", \"l\": [1, 1.25]}",
         "l[1] is 1.25, but a soft label must be from 0 to 1"},
        {"{\"t\": \"a#\", \"l\": [-0.25]}", "l[0] is -0.25, but a soft label must be from 0 "
                                            "to 1"},
        {"{\"t\": \"a#\", \"l\": \"+\"}",
         "\"l\" is text, but a list is needed, a label for each step"},
        {"{\"input_ids\": [65, 35, 66], \"labels\": [-100, 43, -100]}", "A #:+1 B"},
        {"{\"input_ids\": [65, 35], \"labels\": [45, 43]}", "A:-1 #:+1"},
        {"{\"input_ids\": [9, 35, 9], \"labels\": [-100, 43, -100], \"attention_mask\": [0, 1, 0]}",
         "#:+1"},
        {"{\"input_ids\": [65, 35], \"labels\": [-100, 44]}",
         "labels[1] is 44, which is none of --reward_tokens"},
        {"{\"input_ids\": [65, 35], \"labels\": [-99, 43]}",
         "labels[0] is -99; give an id, or -100"},
        {"{\"input_ids\": [65, 35], \"labels\": [-100, -100]}",
         "\"labels\" are -100 everywhere; label a step, or remove the line"},
        {"{\"input_ids\": [65, 35]}", "no key \"labels\"; add it, with -100 for all tokens but "
                                      "those that have a label"}};
    const demo_step_options how = {.data = {.input_key = "t"},
                                   .label_key = "l",
                                   .placeholder = '#',
                                   .marks = {{'+', '-'}, 2}};
    demo_error error = {""};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *path = FOLDER "/steps.jsonl";
        demo_dataset set;
        char got[600] = "", want[600];
        demo_write_atomically(path, cases[i].line, strlen(cases[i].line), &error);
        error.text[0] = 0;
        int wrong = demo_steps_load(&set, path, &how, &error);
        for (int64_t t = 0; !wrong && t < set.documents[0].tokens; t++) {
            const demo_document *d = &set.documents[0];
            size_t used = strlen(got);
            used += (size_t)snprintf(got + used, sizeof got - used, "%s%c", t ? " " : "",
                                     (char)d->ids[t]);
            if (d->loss_mask[t])
                snprintf(got + used, sizeof got - used, ":%c%g", (char)d->targets[t],
                         (double)d->shares[t]);
        }
        snprintf(want, sizeof want, "%s%s", wrong ? FOLDER "/steps.jsonl:1: " : "",
                 cases[i].want);
        test_expect(!strcmp(wrong ? error.text : got, want), "case %d: %s", (int)i,
                    wrong ? error.text : got);
        demo_data_free(&set);
    }
    test_end("options_steps");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    for (int tool = 0; tool < TOOLS; tool++) TEST(test_table(tool));
    for (int tool = 0; tool < TOOLS; tool++) TEST(test_help(tool));
    TEST(test_batch());
    TEST(test_batch_said());
    TEST(test_rates());
    TEST(test_defaults());
    TEST(test_placement());
    TEST(test_meanings());
    TEST(test_often());
    TEST(test_rows());
    TEST(test_all_wrong());
    TEST(test_twice());
    TEST(test_long_documents());
    TEST(test_definitions());
    TEST(test_definitions_refuse());
    TEST(test_environment());
    TEST(test_shares());
    TEST(test_mixing());
    TEST(test_same_file());
    TEST(test_sets_agree());
    TEST(test_yarn());
    TEST(test_packed_said());
    TEST(test_rates_said());
    TEST(test_rates_noticed());
    TEST(test_evaluation_said());
    TEST(test_left_over_said());
    TEST(test_idle_said());
    TEST(test_settled());
    TEST(test_windows());
    TEST(test_lines_kept());
    TEST(test_recipes());
    TEST(test_sizes_named());
    TEST(test_names_known());
    TEST(test_free_options());
    TEST(test_shell_words());
    TEST(test_evaluations_due());
    TEST(test_parts_shared());
    TEST(test_values_told());
    TEST(test_marks());
    TEST(test_steps());
    return test_summary();
}
