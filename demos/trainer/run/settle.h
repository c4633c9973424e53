/* SPDX-License-Identifier: MIT OR Unlicense */
/* settle.h - settles what a command line means where programs differ: batch sizes that follow
 * from each other, learning rates for a pretrained model, layouts, truncation, intervals of
 * evaluations. An option that the user typed is followed or refused, never changed. Functions
 * return 0, or -1 with a message. */
#ifndef DEMO_SETTLE_H
#define DEMO_SETTLE_H
#include "job.h"
#include "trainer/base/escape.h"

/* Did the user type this option? False if no command line was read. */
static bool demo_job_typed(const demo_job *job, const char *name) {
    return job->parsed && demo_options_typed(job->parsed, name);
}

/* The name of the option as the user typed it, for messages. */
static const char *demo_job_spelled(const demo_job *job, const char *name) {
    const demo_known *spelling = job->parsed ? demo_options_spelling(job->parsed, name) : NULL;
    return spelling ? spelling->name : name;
}

/* The program whose meaning an option has: DEMO_FROM_.. */
static int demo_job_from(const demo_job *job, const char *name) {
    return job->parsed ? demo_options_from(job->parsed, job->config.from, name)
                       : DEMO_FROM_NONE;
}

/* ---- the program whose definition of the loss is used (definitions.h) ---- */

/* The default of --loss_definition is the program of --from. For axolotl it is TRL, whose
   classes axolotl uses. */
static void demo_settle_definition(demo_job *job) {
    demo_config *c = &job->config;
    if (!c->loss_definition && c->from)
        c->loss_definition = strcmp(c->from, "axolotl") ? c->from : "trl";
    if (!c->loss_definition) c->loss_definition = "seqpar";
}

static const demo_definition *demo_definition_of(const demo_job *job) {
    return demo_defined(job->config.loss_definition);
}

static void demo_definition_say(const demo_job *job) {
    const demo_definition *by = demo_definition_of(job);
    char text[512];
    snprintf(text, sizeof text, "%s", job->parsed ? job->parsed->tool : "as here");
    if (by == &demo_definitions[DEMO_DEFINED_HERE]) return;
    if (job->objective->loss_text) job->objective->loss_text(job, text, sizeof text);
    fprintf(stderr, "loss: %s (%s)\n", text, by->name);
    if (job->untaught)
        fprintf(
            stderr,
            "loss: the embedding of token %lld, the pad_token_id of --pretrain (%s), gets no "
            "gradient from inputs\n",
            (long long)job->untaught - 1, by->name);
}

/* ---- the batch: units of a step = rows per micro-batch x replicas x micro-batches ---- */

/* The default number of rows of a micro-batch. In OpenRLHF the user gives the documents of a
   step; in the other programs, the rows of a micro-batch and the number of micro-batches. */
static int64_t demo_batch_rows(int from, int64_t otherwise) {
    return from == DEMO_FROM_LLAMAFACTORY ? 8 : from == DEMO_FROM_AXOLOTL ? 1 : otherwise;
}

static int demo_batch_contradicts(const demo_job *job, double product, demo_error *error) {
    const demo_config *c = &job->config;
    return demo_fail(error,
                     "--%s %lld is not --%s %lld x %lld data-parallel ranks x "
                     "--gradient_accumulation_steps %lld = %.15g; leave one of them out, or "
                     "change it",
                     demo_job_spelled(job, "train_batch_size"), (long long)c->train_batch_size,
                     demo_job_spelled(job, "micro_train_batch_size"),
                     (long long)c->micro_train_batch_size, (long long)job->dp,
                     (long long)c->gradient_accumulation_steps, product);
}

/* Prints that gradient_accumulation_steps is not used: with packing, the number of rows that a
   step fills decides the number of micro-batches. Micro-batches change no sum. */
static void demo_accumulation_say(const demo_job *job) {
    fprintf(
        stderr,
        "notice: --%s %lld is not used: packed, the %s of a step fill as many micro-batches "
        "of at most %lld rows as they need\n",
        demo_job_spelled(job, "gradient_accumulation_steps"),
        (long long)job->config.gradient_accumulation_steps, job->objective->unit,
        (long long)job->config.micro_train_batch_size);
}

/* Derives the documents of a step if they are not given. */
static int demo_settle_batch(demo_job *job, demo_error *error) {
    demo_config *c = &job->config;
    int from = demo_job_from(job, "micro_train_batch_size");
    bool counts_rows = from == DEMO_FROM_LLAMAFACTORY || from == DEMO_FROM_AXOLOTL;
    bool train = demo_job_typed(job, "train_batch_size");
    bool micro = demo_job_typed(job, "micro_train_batch_size");
    bool steps = c->gradient_accumulation_steps > 0;
    if (job->objective->generates) return 0;
    if (train && steps && c->packing_samples && counts_rows) {
        if (!job->rank) demo_accumulation_say(job);
        c->gradient_accumulation_steps = 0;
        return 0;
    }
    if (!train && !counts_rows && !(micro && steps)) return 0;
    if (train && !(micro && steps)) return 0;
    if (!micro && !train)
        c->micro_train_batch_size = demo_batch_rows(from, c->micro_train_batch_size);
    if (!steps) c->gradient_accumulation_steps = 1;
    double product = (double)c->micro_train_batch_size * (double)job->dp *
                     (double)c->gradient_accumulation_steps;
    if (train)
        return product < (double)c->train_batch_size || product > (double)c->train_batch_size
                   ? demo_batch_contradicts(job, product, error)
                   : 0;
    if (c->packing_samples && counts_rows)
        return demo_fail(error,
                         "with --%s, %s counts packed rows, but a step here is a number of "
                         "%s; add --train_batch_size, the number of %s of a step",
                         demo_job_spelled(job, "packing_samples"), demo_from_name[from],
                         job->objective->unit, job->objective->unit);
    if (product > DEMO_MOST)
        return demo_fail(error,
                         "--%s %lld x %lld data-parallel ranks x "
                         "--gradient_accumulation_steps %lld are more than the limit of %.0f "
                         "per step; lower one of them",
                         demo_job_spelled(job, "micro_train_batch_size"),
                         (long long)c->micro_train_batch_size, (long long)job->dp,
                         (long long)c->gradient_accumulation_steps, DEMO_MOST);
    c->train_batch_size = (int64_t)product;
    return 0;
}

static const char *demo_plural(int64_t count) { return count == 1 ? "" : "s"; }

/* Prints the batch size. Without packing each unit has its own row. With packing units share
   rows, so the number of rows is unknown before packing. */
static void demo_batch_say(const demo_job *job) {
    const demo_config *c = &job->config;
    int64_t batch = c->train_batch_size, steps = c->gradient_accumulation_steps;
    int64_t share = (batch + job->dp - 1) / job->dp, rows = c->micro_train_batch_size;
    if (steps) rows = (share + steps - 1) / steps;
    if (rows > share) rows = share;
    if (!steps) steps = (share + rows - 1) / rows;
    fprintf(stderr, "batch: %lld %s a step", (long long)batch, job->objective->unit);
    if (c->packing_samples && !c->gradient_accumulation_steps)
        fprintf(stderr,
                ", packed into rows of %lld tokens; a micro-batch has about %lld row%s on "
                "each of %lld replica%s\n",
                (long long)c->pack_len, (long long)c->micro_train_batch_size,
                demo_plural(c->micro_train_batch_size), (long long)job->dp,
                demo_plural(job->dp));
    else if (c->packing_samples)
        fprintf(stderr,
                ", packed into rows of %lld tokens on %lld replica%s, in %lld micro-batch%s\n",
                (long long)c->pack_len, (long long)job->dp, demo_plural(job->dp),
                (long long)steps, steps == 1 ? "" : "es");
    else
        fprintf(stderr, " = %s%lld row%s x %lld replica%s x %lld micro-batch%s\n",
                job->dp * steps > 1 ? "about " : "", (long long)rows, demo_plural(rows),
                (long long)job->dp, demo_plural(job->dp), (long long)steps,
                steps == 1 ? "" : "es");
    if (job->asked_batch > batch)
        fprintf(stderr,
                "notice: a batch of %lld %s is more than the data has; every step takes all "
                "%lld\n",
                (long long)job->asked_batch, job->objective->unit, (long long)batch);
}

/* ---- learning rates: defaults differ between pretrained and random weights ---- */

typedef struct {
    const char *tool, *option;
    double rate;
} demo_rate;
/* The defaults of OpenRLHF. LLaMA-Factory uses the default of transformers for all trainers;
   axolotl has no default. */
static const demo_rate demo_default_rates[] = {
    {"sft", "learning_rate", 5e-6},       {"dpo", "learning_rate", 1e-5},
    {"kto", "learning_rate", 1e-5},       {"rm", "learning_rate", 9e-6},
    {"kd", "learning_rate", 5e-6},        {"prm", "learning_rate", 1e-6},
    {"ppo", "actor_learning_rate", 1e-6}, {"ppo", "critic_learning_rate", 9e-6}};
enum { DEMO_GIVEN_RATES = (int)(sizeof demo_default_rates / sizeof *demo_default_rates) };

static double *demo_rate_of(const demo_job *job, const char *option) {
    const demo_binding *b = demo_binding_of(job->bindings, job->binding_count, option);
    return b ? (double *)b->variable : NULL;
}

static int demo_settle_rates(demo_job *job, demo_error *error) {
    int from = demo_job_from(job, "pretrain");
    for (int i = 0; job->parsed && job->config.pretrain && i < DEMO_GIVEN_RATES; i++) {
        const demo_rate *r = &demo_default_rates[i];
        if (strcmp(r->tool, job->parsed->tool) || demo_job_typed(job, r->option)) continue;
        if (from == DEMO_FROM_AXOLOTL)
            return demo_fail(error,
                             "axolotl has no default learning rate, and this command line "
                             "has axolotl's options; give --%s",
                             r->option);
        *demo_rate_of(job, r->option) = from == DEMO_FROM_LLAMAFACTORY ? 5e-5 : r->rate;
    }
    return 0;
}

/* Returns one of SEQPAR_LR_...; -1 if the name is no schedule. */
static int demo_lr_kind(const char *name) {
    static const char *const kinds[] = {"constant", "linear", "cosine", "cosine_with_min_lr"};
    return demo_pick(strcmp(name, "constant_with_warmup") ? name : "constant", kinds, 4);
}

/* Applies defaults of transformers, which LLaMA-Factory uses, and axolotl for the most part. */
static void demo_settle_transformers(demo_job *job, const char *schedule, int64_t longest) {
    demo_config *c = &job->config;
    if (!demo_job_typed(job, "lr_scheduler")) c->lr_scheduler = schedule;
    if (!demo_job_typed(job, "adam_betas")) c->adam_betas[0] = 0.9, c->adam_betas[1] = 0.999;
    if (!demo_job_typed(job, "max_len")) c->max_len = longest;
}

static void demo_settle_llamafactory(demo_job *job) {
    demo_config *c = &job->config;
    demo_settle_transformers(job, "linear", 2048);
    if (!demo_job_typed(job, "lr_warmup_ratio")) c->lr_warmup_ratio = 0;
    /* max_epochs of PPO counts passes over a rollout */
    if (!demo_job_typed(job, "max_epochs") && strcmp(job->parsed->tool, "ppo"))
        c->max_epochs = 3;
}

/* Sets the schedule. A constant rate does not warm up, as in transformers; constant_with_warmup
   does. */
static int demo_settle_schedule(demo_job *job, demo_error *error) {
    demo_config *c = &job->config;
    int from = demo_job_from(job, "pretrain");
    if (from == DEMO_FROM_LLAMAFACTORY) demo_settle_llamafactory(job);
    if (from == DEMO_FROM_AXOLOTL) demo_settle_transformers(job, "cosine", 512);
    if (strcmp(c->lr_scheduler, "constant")) return 0;
    if (c->warmup_steps > 0 || (c->warmup_steps < 0 && demo_job_typed(job, "lr_warmup_ratio") &&
                                c->lr_warmup_ratio > 0))
        return demo_fail(error, "lr_scheduler constant does not warm up; give --lr_scheduler "
                                "constant_with_warmup, or leave the warm-up out");
    c->lr_warmup_ratio = 0;
    return 0;
}

/* The origin of a learning rate, for the line that prints it. */
static const char *demo_rate_source(const demo_job *job, const char *option) {
    if (demo_job_typed(job, option)) return "";
    if (!job->config.pretrain) return " (for a new model)";
    return demo_job_from(job, "pretrain") == DEMO_FROM_LLAMAFACTORY
               ? " (llamafactory's default with --pretrain)"
               : " (openrlhf's default with --pretrain)";
}

static void demo_rates_say(const demo_job *job) {
    static const char *const names[] = {"learning_rate", "actor_learning_rate",
                                        "critic_learning_rate"};
    bool any = false;
    for (int i = 0; job->parsed && i < 3; i++) {
        const double *rate = demo_list_has(demo_known_find(names[i])->tools, job->parsed->tool)
                                 ? demo_rate_of(job, names[i])
                                 : NULL;
        if (!rate) continue;
        fprintf(stderr, "%s%s %g%s",
                any ? ", " : "learning rate: ", i ? (i == 1 ? "actor" : "critic") : "at most",
                *rate, demo_rate_source(job, names[i]));
        any = true;
    }
    if (any)
        fprintf(stderr, ", %s, %lld of %lld steps warm up\n", job->config.lr_scheduler,
                (long long)job->warmup, (long long)job->total_steps);
}

/* Prints a notice if the only remaining step has learning rate 0, since a schedule with warmup
   may start with factor 0. */
static void demo_rates_notice(const demo_job *job) {
    int64_t from = job->run.from == DEMO_NOTHING_SAVED ? 0 : job->run.from;
    if (job->total_steps - from != 1 || job->last_step > job->total_steps ||
        seqpar_lr_factor(job->lr_kind, from, job->warmup, job->total_steps,
                         job->config.min_lr_ratio) > 0)
        return;
    fprintf(stderr,
            "notice: the only step has learning rate 0 (%lld of %lld steps warm up), so no "
            "weight changes; give --warmup_steps 0 or more steps\n",
            (long long)job->warmup, (long long)job->total_steps);
}

/* ---- layout and schedule, under the names of this project or of other programs ---- */

static bool demo_placement_named(const demo_config *c) {
    return c->schedule || c->ring_attn_func || c->sequence_parallel_mode;
}

/* Sets the default schedule of the program. That of OpenRLHF gathers ring_head_stride heads at
   a time; that of axolotl depends on packing. */
static void demo_placement_default(demo_job *job) {
    demo_config *c = &job->config;
    bool strides = demo_job_typed(job, "ring_head_stride");
    bool axolotl = demo_job_from(job, "ring_attn_size") == DEMO_FROM_AXOLOTL;
    if (c->ring_attn_size < 2 || demo_placement_named(c) || !(strides || axolotl)) return;
    c->schedule = strides || c->packing_samples ? "llama3" : "ring";
    if (!c->layout) c->layout = "contiguous";
}

static int demo_stride_suits(const demo_job *job, demo_error *error) {
    const demo_config *c = &job->config;
    if (c->ring_head_stride < 2 || c->ring_attn_size < 2 || !strcmp(c->schedule, "llama3"))
        return 0;
    return demo_fail(error,
                     "--%s %lld needs --schedule llama3, but the schedule is %s; leave it "
                     "out, or give --schedule llama3",
                     demo_job_spelled(job, "ring_head_stride"), (long long)c->ring_head_stride,
                     c->schedule);
}

/* Refuses axolotl's batch_ functions with packing. With them a token also attends to earlier
   documents in its row; here it never does. */
static int demo_batch_function_suits(const demo_job *job, demo_error *error) {
    const char *name = job->config.ring_attn_func;
    if (!name || strncmp(name, "batch_", 6) || !job->config.packing_samples) return 0;
    return demo_fail(error,
                     "--ring_attn_func %s with --%s: in axolotl tokens then attend to "
                     "earlier documents of their row, which is not supported; give "
                     "varlen_llama3, or leave one of the two out",
                     name, demo_job_spelled(job, "packing_samples"));
}

/* Checks the degrees of 360-LLaMA-Factory's usp, whose product must be
   sequence_parallel_size. */
static int demo_grid_suits(const demo_job *job, demo_error *error) {
    const demo_config *c = &job->config;
    const char *mode = c->sequence_parallel_mode;
    int64_t members = c->ulysses_size, ring = c->sequence_parallel_ring_degree;
    if (mode && !strcmp(mode, "usp") && c->ring_attn_size > 1 && !members && !ring)
        return demo_fail(
            error,
            "--sequence_parallel_mode usp needs the ranks of both: give "
            "--sequence_parallel_ulysses_degree and --sequence_parallel_ring_degree, "
            "whose product is --%s %lld",
            demo_job_spelled(job, "ring_attn_size"), (long long)c->ring_attn_size);
    if (!ring || members * ring == c->ring_attn_size) return 0;
    if (members)
        return demo_fail(error,
                         "--sequence_parallel_ring_degree %lld x --%s %lld is not --%s %lld; "
                         "change one of them",
                         (long long)ring, demo_job_spelled(job, "ulysses_size"),
                         (long long)members, demo_job_spelled(job, "ring_attn_size"),
                         (long long)c->ring_attn_size);
    if (c->ring_attn_size % ring)
        return demo_fail(
            error,
            "--sequence_parallel_ring_degree %lld does not divide --%s %lld; change "
            "one of them",
            (long long)ring, demo_job_spelled(job, "ring_attn_size"),
            (long long)c->ring_attn_size);
    return 0;
}

/* If only the ring degree is given, sets the Ulysses degree to the number of sequence-parallel
   ranks divided by it. */
static void demo_grid_settle(demo_job *job) {
    demo_config *c = &job->config;
    if (c->sequence_parallel_ring_degree && !c->ulysses_size)
        c->ulysses_size = c->ring_attn_size / c->sequence_parallel_ring_degree;
}

/* Chooses layout and schedule, by default zigzag and ring. Refuses contradictions. */
static int demo_pick_attention(demo_job *job, demo_error *error) {
    demo_config *c = &job->config;
    if (demo_batch_function_suits(job, error)) return -1;
    if (demo_placement_settle(&c->layout, &c->schedule, c->ring_attn_func, error)) return -1;
    if (demo_placement_settle(&c->layout, &c->schedule, c->sequence_parallel_mode, error))
        return -1;
    demo_placement_default(job);
    if (demo_grid_suits(job, error)) return -1;
    if (!c->layout) c->layout = "zigzag";
    if (!c->schedule) c->schedule = "ring";
    demo_grid_settle(job);
    job->layout = demo_pick_named(c->layout, seqpar_layout_name, SEQPAR_LAYOUT_COUNT);
    job->schedule = demo_pick_named(c->schedule, seqpar_schedule_name, SEQPAR_SCHEDULE_COUNT);
    return demo_stride_suits(job, error);
}

/* Checks that ring_head_stride, which all models of a run share, divides the number of kv heads
   of this one. option: the option that names the folder of the model. */
static int demo_stride_divides(const demo_job *job, const char *option, const char *folder,
                               const seqpar_llama_config *model, demo_error *error) {
    const demo_config *c = &job->config;
    if (job->schedule != SEQPAR_SCHEDULE_LLAMA3 || c->ring_attn_size < 2 ||
        model->kv_heads % c->ring_head_stride == 0)
        return 0;
    return demo_fail(
        error,
        "heads_k_stride %lld (--%s) does not divide the %lld kv heads of the model "
        "in --%s %.300s; give a stride that divides those of all models",
        (long long)c->ring_head_stride, demo_job_spelled(job, "ring_head_stride"),
        (long long)model->kv_heads, option, folder);
}

/* ---- activation offloading, with the values of axolotl ---- */

/* Checks --activation_offloading. It also switches gradient checkpointing on. */
static int demo_settle_activations(demo_job *job, demo_error *error) {
    /* how activations are moved */
    static const char *const words[] = {"legacy", "hidden_states", "disk"};
    demo_config *c = &job->config;
    const char *text = c->activation_offloading;
    if (!text || demo_truth(text) == 0) return 0;
    if (demo_truth(text) < 0 && demo_pick(text, words, 3) < 0)
        return demo_fail(
            error,
            "--activation_offloading is %.60s, but it must be true, false, legacy, "
            "hidden_states or disk",
            text);
    if (!strcmp(text, "disk") && !c->offload_path)
        return demo_fail(error, "--activation_offloading disk needs a folder; add "
                                "--offload_path FOLDER");
    c->activations_away = c->gradient_checkpointing = true;
    return 0;
}

/* ---- data types ---- */

/* --bf16 selects bf16 weights, with master weights in fp32. */
static int demo_settle_types(demo_job *job, demo_error *error) {
    demo_config *c = &job->config;
    bool on = c->bf16 && (demo_truth(c->bf16) == 1 || !strcasecmp(c->bf16, "auto"));
    if (c->bf16 && !demo_truth(c->bf16) && demo_job_typed(job, "param_dtype") &&
        !strcmp(c->param_dtype, "bf16"))
        return demo_fail(error,
                         "--bf16 %.60s and --param_dtype bf16 contradict each other; leave "
                         "one of them out",
                         c->bf16);
    if (!c->bf16 || demo_truth(c->bf16) == 0) return 0;
    if (!on)
        return demo_fail(error,
                         "--bf16 is %.60s, but it must be true, false or auto: weights in "
                         "bf16 have fp32 master weights (none with --stochastic_rounding)",
                         c->bf16);
    if (demo_job_typed(job, "param_dtype") && strcmp(c->param_dtype, "bf16"))
        return demo_fail(error,
                         "--bf16 and --param_dtype %s contradict each other; leave one of "
                         "them out",
                         c->param_dtype);
    c->param_dtype = "bf16";
    return 0;
}

/* ---- long documents ---- */

/* Indexed by DEMO_LONG_... */
static const char *const demo_long_words[] = {"drop", "cut", "cut_both"};
enum { DEMO_LONG_WORDS = 3 };

/* Sets how long documents are shortened: OpenRLHF cuts off the end, LLaMA-Factory cuts prompt
   and response, axolotl drops the document. */
static void demo_settle_truncation(demo_job *job) {
    static const int by_program[DEMO_FROMS] = {DEMO_LONG_CUT, DEMO_LONG_CUT, DEMO_LONG_CUT_BOTH,
                                               DEMO_LONG_DROP};
    demo_config *c = &job->config;
    c->long_documents = c->truncation
                            ? demo_pick(c->truncation, demo_long_words, DEMO_LONG_WORDS)
                            : by_program[demo_job_from(job, "max_len")];
}

/* The sampling weights of the training datasets. Evaluation datasets are concatenated and have
   none. */
static const char *demo_set_probs(const demo_job *job, const demo_dataset *set) {
    return set == &job->train ? job->config.dataset_probs : NULL;
}

/* ---- evaluation ---- */

/* Without evaluation data, OpenRLHF evaluates a reward model on some of its training data. */
static bool demo_evaluates_trained(const demo_job *job) {
    return job->score && demo_job_from(job, "eval_dataset") == DEMO_FROM_OPENRLHF;
}

/* The option that gives the evaluation data; NULL if there is none. */
static const char *demo_evaluates_on(const demo_job *job) {
    return job->config.eval_dataset      ? "eval_dataset"
           : job->config.val_size > 0    ? demo_job_spelled(job, "val_size")
           : demo_evaluates_trained(job) ? "dataset"
                                         : NULL;
}

static int demo_val_size_wrong(const demo_job *job, demo_error *error) {
    const demo_config *c = &job->config;
    const char *option = demo_job_spelled(job, "val_size");
    if (demo_held_size_wrong(option, c->val_size, error)) return -1;
    if (c->val_size > 0 && job->objective->walk)
        return demo_fail(error,
                         "--%s is not for PPO, whose evaluation counts right answers to "
                         "prompts; give --eval_dataset",
                         option);
    if (c->val_size > 0 && c->eval_dataset)
        return demo_fail(error,
                         "--eval_dataset and --%s both say what to evaluate on; leave one of "
                         "them out",
                         option);
    return 0;
}

/* Refuses evaluation options that contradict each other or the data. `on` is "dataset" if a
   reward model is evaluated on its training data. No option asks for that, so it does not
   contradict --eval_strategy no. */
static int demo_evaluation_wrong(const demo_job *job, demo_error *error) {
    const demo_config *c = &job->config;
    const char *on = demo_evaluates_on(job);
    bool typed = c->eval_asked > 0, each = c->evals_per_epoch > 0, every = typed || each;
    bool none = !strcmp(c->eval_strategy, "no");
    const char *option = each ? "evals_per_epoch" : demo_job_spelled(job, "eval_steps");
    double asked = each ? (double)c->evals_per_epoch : c->eval_asked;
    if (typed && !on)
        return demo_fail(error,
                         "--%s is %.15g, but there is nothing to evaluate on; give "
                         "--eval_dataset, or leave it out",
                         demo_job_spelled(job, "eval_steps"), c->eval_asked);
    if (none && ((every && on) || (on && strcmp(on, "dataset"))))
        return demo_fail(error, "--eval_strategy no contradicts --%s; leave one of them out",
                         every ? option : on);
    if (!none && !on)
        return demo_fail(error,
                         "--eval_strategy is %s, but there is nothing to evaluate on; give "
                         "--eval_dataset",
                         c->eval_strategy);
    if (!strcmp(c->eval_strategy, "steps") && !every)
        return demo_fail(error, "--eval_strategy steps needs a number of steps; give "
                                "--eval_steps");
    if (!strcmp(c->eval_strategy, "epoch") && on && every)
        return demo_fail(error,
                         "--eval_strategy epoch contradicts --%s %.15g; leave one of them out",
                         option, asked);
    return 0;
}

/* Checks an interval: a number of steps or a fraction of all steps, as in transformers, or a
   number of times per epoch, as in axolotl. */
static int demo_often_wrong(const demo_job *job, const char *steps, double asked,
                            const char *per_epoch, demo_error *error) {
    if (asked < 0 ? asked > -1 : asked > 1 && asked > floor(asked))
        return demo_fail(error,
                         "--%s is %.15g; give a whole number of steps, a fraction of all "
                         "steps below 1, or -1",
                         demo_job_spelled(job, steps), asked);
    if (demo_job_typed(job, steps) && demo_job_typed(job, per_epoch))
        return demo_fail(error, "--%s and --%s both set the interval; leave one of them out",
                         demo_job_spelled(job, steps), per_epoch);
    return 0;
}

/* The number of passes over the data. For PPO this is not max_epochs, which counts passes over
   a rollout. */
static double demo_job_epochs(const demo_job *job) {
    const demo_binding *b = job->objective->walk
                                ? demo_binding_of(job->bindings, job->binding_count,
                                                  "num_episodes")
                                : NULL;
    return b ? (double)*(const int64_t *)b->variable : job->config.max_epochs;
}

/* Converts an interval to rounds (steps or rollouts), of which the run has `all`. asked:
   rounds, a fraction of all, or -1. per_epoch: times per epoch, which replaces asked unless it
   is 0. */
static int64_t demo_often(const demo_job *job, double asked, int64_t per_epoch, int64_t all) {
    double times = (double)per_epoch * demo_job_epochs(job);
    if (per_epoch) asked = times > 1 ? 1 / times : -1;
    return asked > 0 && asked < 1 ? (int64_t)ceil(asked * (double)all) : (int64_t)asked;
}

/* Sets save_steps and eval_steps. Call it when the number of rounds (steps or, in PPO,
   rollouts) is known. */
static void demo_settle_often(demo_job *job, int64_t rounds) {
    demo_config *c = &job->config;
    c->save_steps = demo_often(job, c->save_asked, c->saves_per_epoch, rounds);
    c->eval_steps = demo_often(job, c->eval_asked, c->evals_per_epoch, rounds);
}

/* Checks the intervals of evaluations and checkpoints, and sets the default of
   eval_strategy. */
static int demo_settle_evaluation(demo_job *job, demo_error *error) {
    demo_config *c = &job->config;
    bool on = demo_evaluates_on(job) != NULL;
    if (demo_val_size_wrong(job, error) ||
        demo_often_wrong(job, "eval_steps", c->eval_asked, "evals_per_epoch", error) ||
        demo_often_wrong(job, "save_steps", c->save_asked, "saves_per_epoch", error))
        return -1;
    if (!c->eval_strategy)
        c->eval_strategy = c->eval_asked > 0          ? "steps"
                           : on && c->evals_per_epoch ? "steps"
                           : on                       ? "epoch"
                                                      : "no";
    job->eval_trained = job->score && !c->eval_dataset && !(c->val_size > 0);
    job->eval_scores = job->eval_trained && !strcmp(c->eval_strategy, "no");
    return demo_evaluation_wrong(job, error);
}

/* Refuses a save_path that contains a model, as LLaMA-Factory does, unless --overwrite is
   given. */
static int demo_settle_output(demo_job *job, demo_error *error) {
    static const char *const names[] = {
        "model.safetensors",         "model.safetensors.index.json",
        "pytorch_model.bin",         "pytorch_model.bin.index.json",
        "adapter_model.safetensors", "adapter_model.bin"};
    const demo_config *c = &job->config;
    const char *option = demo_job_spelled(job, "overwrite");
    char path[DEMO_PATH_LIMIT + 64];
    bool careful = !strcmp(option, "overwrite_output_dir") ||
                   demo_job_from(job, "overwrite") == DEMO_FROM_LLAMAFACTORY;
    if (c->overwrite || c->load_checkpoint || !careful || job->rank) return 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", c->save_path, names[i]);
        if (!access(path, F_OK))
            return demo_fail(error,
                             "--%s %.300s holds a model already (%s), which LLaMA-Factory "
                             "does not replace by default; give another, or "
                             "--overwrite_output_dir true",
                             demo_job_spelled(job, "save_path"), c->save_path, names[i]);
    }
    return 0;
}

/* The number of rounds (steps or rollouts) between evaluations; 0: only at the end. */
static int64_t demo_eval_every(const demo_job *job, int64_t epoch) {
    int64_t steps = job->config.eval_steps;
    return job->eval_scores ? 0 : steps > 0 ? steps : steps < 0 ? epoch : 0;
}

/* Prints which part of the training data is used for evaluation. */
static void demo_part_say(const demo_job *job) {
    const demo_objective *o = job->objective;
    long long some = (long long)(arrlen(job->eval.documents) / o->documents_per_unit);
    long long all = (long long)job->eval_of;
    if (job->eval_trained)
        fprintf(stderr,
                "evaluation: the first %lld of %lld %s, which are trained on, too, as OpenRLHF "
                "does, ",
                some, all, o->unit);
    else
        fprintf(stderr,
                "evaluation: %lld of %lld %s by --seed %lld, which are not trained on, ", some,
                all, o->unit, (long long)job->config.seed);
}

static void demo_evaluation_say(const demo_job *job) {
    const demo_objective *o = job->objective;
    const char *round = o->round ? o->round : "step";
    char shown[1024];
    if (!job->config.eval_dataset && !job->eval_of) {
        fprintf(stderr, "evaluation: none, as there is no --eval_dataset\n");
        return;
    }
    if (job->eval_scores) {
        fprintf(
            stderr,
            "evaluation: none, as there is no --eval_dataset; mean and deviation of the "
            "scores, for config.json, are measured after training on the first %lld of %lld "
            "%s\n",
            (long long)(arrlen(job->eval.documents) / o->documents_per_unit),
            (long long)job->eval_of, o->unit);
        return;
    }
    if (job->eval_of)
        demo_part_say(job);
    else
        fprintf(stderr, "evaluation: %s, %lld %s, ",
                demo_escape(shown, sizeof shown, job->config.eval_dataset),
                (long long)(arrlen(job->eval.documents) / o->documents_per_unit),
                o->walk ? "prompts" : o->unit);
    if (job->eval_every > 0)
        fprintf(stderr, "every %lld %s%s%s and at the end\n", (long long)job->eval_every, round,
                demo_plural(job->eval_every), job->config.eval_steps < 0 ? " (an epoch)" : "");
    else
        fprintf(stderr, "at the end\n");
}

/* ---- notices ---- */

/* Prints a notice about the documents that an epoch leaves out because they do not fill a last
   step. The shuffle decides which. */
static void demo_left_over_notice(const demo_job *job) {
    int64_t epoch = job->usable_count / job->epoch_units;
    int64_t left = job->usable_count % job->epoch_units;
    if (!left || job->last_step < epoch * job->round_steps) return;
    fprintf(stderr,
            "notice: %lld %s are not a multiple of %lld: each epoch leaves out %lld of them\n",
            (long long)job->usable_count,
            job->objective->walk ? "prompts" : job->objective->unit,
            (long long)job->epoch_units, (long long)left);
}

static bool demo_job_on(const demo_job *job, const char *name) {
    return demo_option_on(job->bindings, job->binding_count, name);
}

/* Reads the config of a second trained model (PPO's critic); false if there is none. */
static bool demo_beside(const demo_job *job, char folder[DEMO_PATH_LIMIT + 1],
                        seqpar_llama_config *config) {
    seqpar_error why = {0};
    *config = job->model;
    return job->objective->beside && job->objective->beside(job, folder) &&
           !demo_load_config(folder, config, &why);
}

static bool demo_experts_learn(const demo_job *job) {
    char folder[DEMO_PATH_LIMIT + 1];
    seqpar_llama_config beside;
    return job->model.experts || (demo_beside(job, folder, &beside) && beside.experts);
}

/* Prints notices about options without effect in this run. */
static void demo_idle_notice(const demo_job *job) {
    const demo_config *c = &job->config;
    if (c->offload_path && !c->adam_offload && !c->param_offload && !c->activations_away &&
        !demo_job_on(job, "ref_offload") && !demo_job_on(job, "ref_reward_offload"))
        fprintf(stderr, "notice: nothing is offloaded, so --offload_path is not used; add "
                        "--adam_offload, --param_offload, --activation_offloading or "
                        "--ref_offload\n");
    if (c->tiled_mlp && job->model.experts)
        fprintf(stderr,
                "notice: --tiled_mlp does not support models with experts and is not used\n");
    if (c->aux_loss_coef > 0 && !demo_experts_learn(job))
        fprintf(stderr, "notice: the model has no experts, so --aux_loss_coef adds nothing\n");
}

static void demo_settled_say(const demo_job *job) {
    demo_definition_say(job);
    demo_batch_say(job);
    demo_rates_say(job);
    demo_evaluation_say(job);
    demo_rates_notice(job);
    demo_left_over_notice(job);
    demo_idle_notice(job);
}
#endif
