/* SPDX-License-Identifier: MIT OR Unlicense */
/* absolute.h - writes small models and texts to files, runs a trainer on them by a user's
 * options, and computes the same numbers by slow.h. Everything is computed in fp64 (--device
 * reference), so that a mistake of any size shows. */
#ifndef ABSOLUTE_H
#define ABSOLUTE_H
#include "seqpar_safetensors.h"
#include "trainer/ppo/ppo.h"
#include "trainer/objective/kto.h"
#include "trainer/objective/sft.h"
#include "test.h"
#include "kept.h"
#include "second/slow_loss.h"

#define FOLDER "build/absolute"
enum { MOST_TENSORS = 64, MOST_TOKENS = 40, DOCUMENTS = 6, MOST_STEPS = 8, WORDS = 96 };

/* ---- models ---- */

/* In slow.h's order. A score head is row 0 of lm_head.weight, whose other rows are 0. */
typedef struct model {
    slow_config config;
    const char *head;                                    /* of scores; NULL: logits */
    slow_tensor table[MOST_TENSORS], file[MOST_TENSORS]; /* file: by the names of its family */
    int64_t tensors, count;
    double *p;
} model;

static bool is_head(const model *m, int64_t i) {
    return m->head && !strcmp(m->table[i].name, "lm_head.weight");
}

/* Gains are near 1; all is exact in fp32, as the files are. */
static void model_fill(model *m, uint64_t seed) {
    test_state = seed * 7919 + 5;
    for (int64_t i = 0; i < m->tensors; i++) {
        const slow_tensor *t = &m->table[i];
        bool gain = strstr(t->name, "norm.weight") != NULL;
        for (int64_t k = 0; k < t->rows * t->cols; k++)
            m->p[t->offset + k] = (float)((gain ? 1 : 0) + (gain ? 0.2 : 0.5) * test_normal());
        for (int64_t k = t->cols; is_head(m, i) && k < t->rows * t->cols; k++)
            m->p[t->offset + k] = 0;
    }
}

static model model_new(slow_config config, const char *head, uint64_t seed) {
    model m = {.config = config, .head = head, .tensors = slow_tensors(&config)};
    if (m.tensors > MOST_TENSORS) exit(2);
    m.count = slow_parameters(&config, m.table);
    config.mixtral_names = config.experts > 0;
    slow_parameters(&config, m.file);
    m.p = (double *)demo_alloc(m.count, sizeof *m.p);
    model_fill(&m, seed);
    return m;
}

static FILE *file_of(const char *folder, const char *name) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    if (!file) exit(fprintf(stderr, "no file %s\n", path));
    return file;
}

static const char *family_of(const model *m) {
    return m->config.experts ? "Mixtral" : m->config.qkv_bias ? "Qwen2" : "Llama";
}

/* more: further keys of config.json, each with a comma behind it. */
static void config_write(const model *m, const char *folder, const char *more) {
    static const char *const types[][2] = {
        {"Llama", "llama"}, {"Qwen2", "qwen2"}, {"Mixtral", "mixtral"}};
    const slow_config *c = &m->config;
    const char *family = family_of(m), *type = "";
    FILE *file = file_of(folder, "config.json");
    for (int i = 0; i < 3; i++)
        if (!strcmp(types[i][0], family)) type = types[i][1];
    fprintf(
        file,
        "{\"architectures\": [\"%sFor%s\"], \"model_type\": \"%s\", \"hidden_act\": \"silu\", "
        "\"num_hidden_layers\": %d, \"hidden_size\": %d, \"num_attention_heads\": %d, "
        "\"num_key_value_heads\": %d, %s\"intermediate_size\": %d, \"vocab_size\": %d, "
        "\"rope_theta\": %.17g, \"rms_norm_eps\": %.17g, ",
        family, m->head ? "SequenceClassification" : "CausalLM", type, (int)c->layers,
        (int)c->hidden, (int)c->heads, (int)c->kv_heads, c->qkv_bias ? "" : "\"head_dim\": 4, ",
        (int)c->intermediate, (int)c->vocab, c->rope_theta, c->rms_eps);
    if (c->experts)
        fprintf(
            file,
            "\"sliding_window\": null, \"num_local_experts\": %d, \"num_experts_per_tok\": %d, ",
            (int)c->experts, (int)c->experts_per_token);
    fprintf(file,
            "%s\"tie_word_embeddings\": %s, \"bos_token_id\": 256, \"eos_token_id\": 257, "
            "\"pad_token_id\": %d}\n",
            more, c->tied ? "true" : "false", c->untaught ? (int)c->untaught - 1 : DEMO_PAD);
    fclose(file);
}

static int64_t rows_written(const model *m, int64_t i) {
    return is_head(m, i) ? 1 : m->table[i].rows;
}

static void name_of(const model *m, const slow_tensor *table, int64_t i, char name[128]) {
    if (is_head(m, i))
        snprintf(name, 128, "%s.weight", m->head);
    else
        snprintf(name, 128, "%s", table[i].name);
}

/* model.safetensors by hand: a length, a header, the numbers. */
static void tensors_write(const model *m, const char *folder) {
    static char header[1 << 14];
    int64_t used = 0, at = 0;
    FILE *file = file_of(folder, "model.safetensors");
    for (int64_t i = 0; i < m->tensors; i++) {
        const slow_tensor *t = &m->table[i];
        int64_t rows = rows_written(m, i), bytes = 4 * rows * t->cols;
        char name[128], shape[64];
        bool flat = t->rows == 1;
        name_of(m, m->file, i, name);
        snprintf(shape, sizeof shape, flat ? "%lld" : "%lld, %lld",
                 (long long)(flat ? t->cols : rows), (long long)t->cols);
        used += snprintf(
            header + used, sizeof header - (size_t)used,
            "%s\"%s\": {\"dtype\": \"F32\", \"shape\": [%s], \"data_offsets\": [%lld, %lld]}",
            i ? ", " : "{", name, shape, (long long)at, (long long)(at + bytes));
        at += bytes;
    }
    used += snprintf(header + used, sizeof header - (size_t)used, "}");
    while (used % 8) header[used++] = ' ';
    fwrite(&used, 8, 1, file);
    fwrite(header, 1, (size_t)used, file);
    for (int64_t i = 0; i < m->tensors; i++)
        for (int64_t k = 0; k < rows_written(m, i) * m->table[i].cols; k++) {
            float x = (float)m->p[m->table[i].offset + k];
            fwrite(&x, 4, 1, file);
        }
    fclose(file);
}

static void model_write(const model *m, const char *folder, const char *more) {
    seqpar_error error = {0};
    if (demo_make_folder(folder, &error)) exit(fprintf(stderr, "%s\n", error.text));
    config_write(m, folder, more);
    tensors_write(m, folder);
}

/* Where the library has each number of slow.h's; -1: it has none. */
static int64_t library_place(const model *m, const seqpar_llama *l, int64_t i, int64_t k) {
    char name[128];
    name_of(m, m->table, i, name);
    if (k >= rows_written(m, i) * m->table[i].cols) return -1;
    for (int64_t j = 0; j < l->tensor_count; j++)
        if (!strcmp(l->tensors[j].name, name)) return l->tensors[j].offset + k;
    exit(printf("FAIL the library has no tensor %s\n", name));
}

/* From the library's order to slow.h's. */
static void model_take(const model *m, const seqpar_llama *l, const double *from, double *to) {
    for (int64_t i = 0; i < m->tensors; i++)
        for (int64_t k = 0; k < m->table[i].rows * m->table[i].cols; k++) {
            int64_t at = library_place(m, l, i, k);
            to[m->table[i].offset + k] = at < 0 ? 0 : from[at];
        }
}

/* ---- texts ---- */

typedef struct text {
    int32_t ids[MOST_TOKENS];
    int64_t prompt, tokens; /* what is before `prompt` is given */
} text;

static text text_new(int64_t number, int64_t vocab, int64_t prompt, int64_t tokens) {
    text t = {.prompt = prompt, .tokens = tokens};
    for (int64_t k = 0; k < tokens; k++)
        t.ids[k] = (int32_t)((k % 5 == 2 ? 0 : 3 * k + 7 * number + k * number) % vocab);
    return t;
}

static void text_print(FILE *file, const char *side, const text *t, bool labels) {
    fprintf(file, "\"%sinput_ids\": [", side);
    for (int64_t k = 0; k < t->tokens; k++) fprintf(file, "%s%d", k ? ", " : "", t->ids[k]);
    fprintf(file, "]");
    if (!labels) return;
    fprintf(file, ", \"%slabels\": [", side);
    for (int64_t k = 0; k < t->tokens; k++)
        fprintf(file, "%s%d", k ? ", " : "", k < t->prompt ? -100 : t->ids[k]);
    fprintf(file, "]");
}

/* Token k + 1 is what position k predicts. */
static void text_targets(const text *t, int32_t *targets) {
    for (int64_t k = 0; k < t->tokens; k++)
        targets[k] = k + 1 < t->tokens && k + 1 >= t->prompt ? t->ids[k + 1] : SLOW_IGNORED;
}

static int64_t text_supervised(const text *t) {
    return t->tokens - (t->prompt > 1 ? t->prompt : 1);
}

/* Log-prob and entropy of each token of a text at a temperature, and a score model's score.
   Outputs may be NULL. The routers' choices and probabilities are added to `routing`. */
static void text_routed(const slow_config *c, const slow_complex *p, const text *t,
                        double temperature, slow_complex *logp, slow_complex *entropy,
                        slow_complex *score, slow_routing *routing) {
    int64_t ends[2] = {0, t->tokens};
    int32_t targets[MOST_TOKENS];
    slow_row row = {.tokens = t->tokens, .docs = 1, .cu_seqlens = ends, .ids = t->ids};
    slow_complex *logits = slow_array(t->tokens * c->vocab);
    text_targets(t, targets);
    slow_forward(c, p, &row, routing, logits);
    if (logp)
        slow_logps(t->tokens, c->vocab, temperature, logits, targets, logp, entropy, NULL);
    for (int64_t k = 0; score && k < t->tokens; k++) score[k] = logits[k * c->vocab];
    free(logits);
}

static void text_values(const slow_config *c, const slow_complex *p, const text *t,
                        double temperature, slow_complex *logp, slow_complex *entropy,
                        slow_complex *score) {
    text_routed(c, p, t, temperature, logp, entropy, score, NULL);
}

/* Sum of a text's log-probs. */
static slow_complex text_logp(const slow_config *c, const slow_complex *p, const text *t) {
    slow_complex logp[MOST_TOKENS], sum = 0;
    text_values(c, p, t, 1, logp, NULL, NULL);
    for (int64_t k = t->prompt - 1; k + 1 < t->tokens; k++) sum += logp[k];
    return sum;
}

/* The same for real parameters, by which nothing is differentiated. */
static double text_logp_of(const model *m, const double *p, const text *t) {
    slow_complex *z = slow_promote(m->count, p);
    double sum = creal(text_logp(&m->config, z, t));
    free(z);
    return sum;
}

/* A score model's number for a text is that of its last token. */
static slow_complex text_score(const slow_config *c, const slow_complex *p, const text *t) {
    slow_complex score[MOST_TOKENS];
    text_values(c, p, t, 1, NULL, NULL, score);
    return score[t->tokens - 1];
}

static double text_score_of(const model *m, const double *p, const text *t) {
    slow_complex *z = slow_promote(m->count, p);
    double score = creal(text_score(&m->config, z, t));
    free(z);
    return score;
}

/* ---- a trainer at work ---- */

enum { SFT, DPO, RM, KTO, PPO, TOOLS };
typedef struct step_seen {
    double *params, *critic, *average; /* in slow.h's order, after it */
    double loss, norm, rate, means[DEMO_COLUMNS];
} step_seen;

/* What a rollout brought: the texts, in order, and the trainer's own numbers for them. */
typedef struct rollout_seen {
    text *texts;
    int64_t count;
    double *score, *entry; /* (count), (tokens of all texts, ENTRY) */
    double policy[UPDATE_COLUMNS], value[UPDATE_COLUMNS], coef;
    double balance, critic_balance; /* losses of their experts */
} rollout_seen;

typedef struct run {
    demo_job job;
    demo_preference_config preference;
    demo_kto_config kto;
    demo_ppo_config ppo;
    demo_options options;
    char line[4096], *words[WORDS];
    demo_error error;
    const model *model, *critic;
    double *start;
    step_seen step[MOST_STEPS];
    int64_t steps, *order; /* documents of step 0, in order */
    rollout_seen rollout;
    demo_dataset texts; /* of the rollout, borrowed */
} run;

static const char *const tool_names[TOOLS] = {"sft", "dpo", "rm", "kto", "ppo"};

/* Options that a trainer was run with, as "sft weight_decay", stb_ds array: walk_options wants to know. */
static char **given;

static void given_add(int tool, const char *word) {
    char text[128];
    snprintf(text, sizeof text, "%s %s", tool_names[tool], word + 2);
    arrput(given, strdup(text));
}

static bool is_given(int tool, const char *name) {
    char text[128];
    snprintf(text, sizeof text, "%s %s", tool_names[tool], name);
    for (int64_t i = 0; i < arrlen(given); i++)
        if (!strcmp(given[i], text)) return true;
    return false;
}

/* Parses options as the trainer's own command line does. Options in front of them keep a run
   short and comparable: no logs, the reference device and no warm-up unless `options` says
   otherwise. */
static int run_parse(run *x, int tool, const char *options) {
    static const demo_objective *const objectives[TOOLS] = {&demo_sft, &demo_dpo, &demo_rm,
                                                            &demo_kto, &demo_ppo_objective};
    static demo_binding bindings[256];
    void *const own[TOOLS] = {NULL, &x->preference, &x->preference, &x->kto, &x->ppo};
    const demo_binding sft[] = {DEMO_TRAINER_BINDINGS(x->job.config),
                                DEMO_SFT_BINDINGS(x->job.config)},
                       dpo[] = {DEMO_TRAINER_BINDINGS(x->job.config),
                                DEMO_DPO_BINDINGS(x->preference)},
                       rm[] = {DEMO_TRAINER_BINDINGS(x->job.config),
                               DEMO_RM_BINDINGS(x->preference)},
                       kto[] = {DEMO_TRAINER_BINDINGS(x->job.config),
                                DEMO_KTO_BINDINGS(x->kto)},
                       ppo[] = {DEMO_TRAINER_BINDINGS(x->job.config),
                                DEMO_PPO_BINDINGS(x->job.config, x->ppo)};
    const demo_binding *const all[TOOLS] = {sft, dpo, rm, kto, ppo};
    const size_t sizes[TOOLS] = {sizeof sft, sizeof dpo, sizeof rm, sizeof kto, sizeof ppo};
    int argc = 0;
    memcpy(bindings, all[tool], sizes[tool]);
    int count = (int)(sizes[tool] / sizeof *bindings);
    snprintf(x->line, sizeof x->line,
             "train --omp_threads 1 --save_path " FOLDER "/none --ckpt_path " FOLDER
             "/none --logging_steps 1000000 %s%s%s",
             strstr(options, "--device") ? "" : "--device reference ",
             strstr(options, "--lr_warmup_ratio") ? "" : "--lr_warmup_ratio 0 ", options);
    for (char *at = strtok(x->line, " "); at && argc < WORDS; at = strtok(NULL, " "))
        x->words[argc++] = at;
    for (int i = 1; i < argc; i++)
        if (!strncmp(x->words[i], "--", 2)) given_add(tool, x->words[i]);
    x->options = (demo_options){
        .tool = tool_names[tool], .bindings = bindings, .binding_count = count};
    x->job.objective = objectives[tool];
    x->job.options = own[tool];
    if (tool == RM) x->job.score = &x->preference.value_head_prefix;
    x->job.bindings = bindings;
    x->job.binding_count = count;
    x->job.parsed = &x->options;
    return demo_options_parse(&x->options, argc, x->words, &x->error);
}

static seqpar_status params_of(demo_rank *r, const seqpar_llama *from, const model *m,
                               double **to) {
    double *all = (double *)demo_alloc(from->elements, sizeof *all);
    seqpar_status status = params_read(&r->ctx, from, all);
    if (r->world->rank == 0) {
        *to = (double *)demo_alloc(m->count, sizeof **to);
        model_take(m, from, all, *to);
    }
    free(all);
    return status;
}

static seqpar_status average_of(demo_rank *r, const model *m, double **to) {
    double *all = (double *)demo_alloc(r->model.elements, sizeof *all);
    seqpar_status status = SEQPAR_OK;
    if (r->average.share)
        status = demo_average_read(&r->ctx, &r->model, &r->average, all, 0, r->model.elements);
    if (r->average.share && r->world->rank == 0) {
        *to = (double *)demo_alloc(m->count, sizeof **to);
        model_take(m, &r->model, all, *to);
    }
    free(all);
    return status;
}

static text text_of(const demo_rollout *o, int64_t i) {
    const demo_document *d = &o->set.documents[i];
    text t = {.prompt = o->prompt[i], .tokens = d->tokens};
    if (d->tokens > MOST_TOKENS) exit(printf("FAIL a text has %d tokens\n", (int)d->tokens));
    memcpy(t.ids, d->ids, (size_t)d->tokens * sizeof *t.ids);
    return t;
}

static void rollout_keep(run *x, const demo_rank *r, const demo_ppo *p) {
    const demo_rollout *o = &p->rollout;
    rollout_seen *s = &x->rollout;
    s->count = o->texts;
    s->texts = (text *)demo_alloc(o->texts, sizeof *s->texts);
    s->score = (double *)demo_alloc(o->texts, sizeof *s->score);
    s->entry = (double *)demo_alloc(o->entries * ENTRY, sizeof *s->entry);
    for (int64_t i = 0; i < o->texts; i++) s->texts[i] = text_of(o, i);
    memcpy(s->score, o->score, (size_t)o->texts * sizeof *s->score);
    memcpy(s->entry, o->entry, (size_t)(o->entries * ENTRY) * sizeof *s->entry);
    memcpy(s->policy, p->policy, sizeof s->policy);
    memcpy(s->value, p->value, sizeof s->value);
    s->coef = p->kl.coef;
    s->balance = r->experts.loss;
    s->critic_balance = p->critic_experts.loss;
}

static seqpar_status run_keep(demo_rank *r, run *x, step_seen *s) {
    demo_ppo *p = x->job.objective == &demo_ppo_objective ? demo_ppo_of(r) : NULL;
    seqpar_status status = params_of(r, &r->model, x->model, &s->params);
    if (!status && p && x->critic) status = params_of(r, &p->critic, x->critic, &s->critic);
    if (!status) status = average_of(r, x->model, &s->average);
    if (r->world->rank) return status;
    s->norm = r->optim.norm;
    s->loss = arrlen(r->losses) ? arrlast(r->losses) : 0;
    return status;
}

static seqpar_status run_steps(demo_rank *r, run *x) {
    bool ppo = x->job.objective == &demo_ppo_objective;
    seqpar_status status = SEQPAR_OK;
    if (r->world->rank == 0 && !ppo) x->order = demo_step_documents(r, 0);
    for (int64_t i = 0; !status && i < MOST_STEPS && r->step < r->job->last_step; i++) {
        double rate = demo_learning_rate(r->job, r->step);
        status = ppo ? demo_ppo_rollout(r, i) : demo_step(r);
        if (ppo && !status && r->world->rank == 0 && !i) rollout_keep(x, r, demo_ppo_of(r));
        if (r->world->rank == 0) x->step[x->steps = i].rate = rate;
        if (!status) status = run_keep(r, x, &x->step[i]);
    }
    if (r->world->rank == 0) x->steps++;
    return status;
}

static seqpar_status run_main(seqpar_comm *world, void *user) {
    run *x = (run *)user;
    demo_rank r;
    memset(&r, 0, sizeof r);
    r.job = &x->job;
    seqpar_status status = demo_rank_open(&r, world);
    demo_progress_begin(&r.progress, 0, 1 << 30, 0); /* no lines of progress */
    if (!status) status = params_of(&r, &r.model, x->model, &x->start);
    if (!status) status = run_steps(&r, x);
    demo_rank_close(&r);
    return status;
}

/* A whole run by a user's options: whether it came to its end. critic: of PPO, or NULL. */
static bool run_with(run *x, int tool, const model *m, const model *critic,
                     const char *options) {
    seqpar_error error = {0};
    memset(x, 0, sizeof *x);
    x->model = m;
    x->critic = critic;
    if (!test_expect(!run_parse(x, tool, options) && !demo_job_open(&x->job, &x->error), "%s",
                     x->error.text))
        return false;
    seqpar_status status = demo_run_with(&x->job, seqpar_run_threads, run_main, x, &error);
    return test_expect(!status && x->steps > 0, "%s", error.text);
}

static void run_free(run *x) {
    demo_job_close(&x->job);
    for (int64_t i = 0; i < x->steps; i++) {
        free(x->step[i].params);
        free(x->step[i].critic);
        free(x->step[i].average);
    }
    free(x->start);
    arrfree(x->order);
    free(x->rollout.texts);
    free(x->rollout.score);
    free(x->rollout.entry);
}

/* ---- comparing ---- */

static bool near(double got, double want, double tolerance) {
    return fabs(got - want) <= tolerance * (fabs(want) + 1e-3);
}

/* Compares the gradient at `before`, which a step of SGD shows as (before - after) / rate, with
   slow.h's: along its own direction and along three random ones. The limit is relative to the
   gradient's norm. */
static void expect_gradient(const model *m, slow_scalar *f, const void *context,
                            const double *before, const double *after, double rate,
                            double tolerance) {
    double *g = (double *)demo_alloc(2 * m->count, sizeof *g), *way = g + m->count, size = 0;
    for (int64_t k = 0; k < m->count; k++) g[k] = (before[k] - after[k]) / rate;
    size = slow_norm(m->count, g);
    test_expect(size > 1e-6, "nothing was learnt: the gradient's norm is %g", size);
    for (int turn = 0; turn < 4; turn++) {
        double want, got = 0;
        for (int64_t k = 0; k < m->count; k++) way[k] = turn ? test_normal() : g[k] / size;
        want = slow_directional_of(f, context, m->count, before, way);
        /* g is 0 where the library has no parameter: in the padding of a score head */
        for (int64_t k = 0; k < m->count; k++) got += way[k] * g[k];
        test_expect(fabs(got - want) <= tolerance * size * (turn ? 30 : 1),
                    "the gradient along direction %d is %.12g, not %.12g", turn, got, want);
    }
    free(g);
}

static void expect_params(const model *m, const double *got, const double *want,
                          double tolerance, const char *what) {
    for (int64_t i = 0; i < m->tensors; i++) {
        const slow_tensor *t = &m->table[i];
        double off = test_distance(got + t->offset, want + t->offset, t->rows * t->cols);
        test_expect(off <= tolerance, "%s: %s is off by %.3g", what, t->name, off);
    }
}
#endif
