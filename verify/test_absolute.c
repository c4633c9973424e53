/* SPDX-License-Identifier: MIT OR Unlicense */
/* Every option that changes weights, by absolute numbers: the trainers take steps in fp64, and slow.h and slow_loss.h say
   what these must be. What is equal on all ranks, and wrong, is seen here. absolute.tsv names the test of each option. */
#pragma GCC diagnostic ignored "-Wunused-function" /* of whole trainers a few functions are called */
#pragma GCC diagnostic ignored "-Woverride-init" /* a test names what differs from the defaults */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "absolute.h"

#define SGD "--optim sgd --max_norm 0 --learning_rate 1 --lr_scheduler constant "
static const double exact = 1e-10; /* measured: TODO */
static const double along = 1e-8;  /* of several steps; measured: TODO */

static const slow_config small = {.layers = 1, .hidden = 6, .heads = 2, .kv_heads = 1, .head_dim = 4,
                                  .intermediate = 5, .vocab = 13, .rope_theta = 10000, .rms_eps = 1e-5};

/* ---- supervised fine-tuning ---- */

static text sft_text(int64_t i) { return text_new(i, small.vocab, 2 + i % 3, 5 + (i * 5) % 7); }

static void sft_write(void) {
    FILE *file = file_of(FOLDER, "sft.jsonl");
    for (int64_t i = 0; i < DOCUMENTS; i++) {
        text t = sft_text(i);
        fprintf(file, "{");
        text_print(file, "", &t, true);
        fprintf(file, "}\n");
    }
    fclose(file);
}

typedef struct sft_loss {
    const model *model;
    slow_objective objective;
} sft_loss;

/* One row a document. */
static slow_complex sft_value(const slow_complex *p, const void *context) {
    const sft_loss *s = (const sft_loss *)context;
    slow_row row[DOCUMENTS];
    int64_t ends[DOCUMENTS][2];
    text texts[DOCUMENTS];
    int32_t targets[DOCUMENTS][MOST_TOKENS];
    slow_problem problem = {&s->model->config, DOCUMENTS, row, s->objective};
    problem.objective.count = 0;
    for (int64_t i = 0; i < DOCUMENTS; i++) {
        texts[i] = sft_text(i);
        text_targets(&texts[i], targets[i]);
        ends[i][0] = 0;
        ends[i][1] = texts[i].tokens;
        row[i] = (slow_row){.tokens = texts[i].tokens, .docs = 1, .cu_seqlens = ends[i],
                            .ids = texts[i].ids, .targets = targets[i]};
        problem.objective.count += (double)text_supervised(&texts[i]);
    }
    return slow_loss_complex(p, &problem);
}

static void test_sft(const char *options, double smoothing, double zloss) {
    model m = model_new(small, NULL, 1);
    sft_loss loss = {&m, {.smoothing = smoothing, .zloss = zloss}};
    char line[1024];
    run x;
    model_write(&m, FOLDER "/model", "");
    snprintf(line, sizeof line, SGD "--dataset " FOLDER "/sft.jsonl --pretrain " FOLDER
             "/model --train_batch_size %d --max_steps 1 %s", DOCUMENTS, options);
    if (run_with(&x, SFT, &m, NULL, line)) {
        double want = slow_value_of(sft_value, &loss, m.count, m.p);
        expect_params(&m, x.start, m.p, 0, "as they are read");
        test_expect(near(x.step[0].loss, want, exact), "the loss is %.12g, not %.12g", x.step[0].loss, want);
        expect_gradient(&m, sft_value, &loss, m.p, x.step[0].params, 1, exact);
    }
    run_free(&x);
    free(m.p);
    test_end("absolute_sft %s", options);
}

/* ---- preferences: DPO and its relatives ---- */

static text pair_text(int64_t i, int rejected) {
    return text_new(i + (rejected ? 31 : 0), small.vocab, 3, 6 + (i * 5 + 3 * rejected) % 7);
}

/* Both begin with the prompt of the chosen one. */
static text pair_side(int64_t i, int rejected) {
    text t = pair_text(i, rejected), chosen = pair_text(i, 0);
    memcpy(t.ids, chosen.ids, (size_t)t.prompt * sizeof *t.ids);
    return t;
}

static double pair_margin(int64_t i) { return 0.25 * (double)i - 0.3; }

static void pairs_write(void) {
    FILE *file = file_of(FOLDER, "pairs.jsonl");
    for (int64_t i = 0; i < DOCUMENTS; i++) {
        text chosen = pair_side(i, 0), rejected = pair_side(i, 1);
        fprintf(file, "{");
        text_print(file, "chosen_", &chosen, true);
        fprintf(file, ", ");
        text_print(file, "rejected_", &rejected, true);
        fprintf(file, ", \"far\": %.17g}\n", pair_margin(i));
    }
    fclose(file);
}

typedef struct pair_loss {
    const model *model, *reference;
    slow_pair_loss *loss;
    slow_preference how;
    double nll;
    bool margins;
} pair_loss;

static slow_complex dpo_value(const slow_complex *p, const void *context) {
    const pair_loss *l = (const pair_loss *)context;
    slow_pair pairs[DOCUMENTS];
    for (int64_t i = 0; i < DOCUMENTS; i++) {
        text w = pair_side(i, 0), r = pair_side(i, 1);
        pairs[i] = (slow_pair){text_logp(&small, p, &w),
                               text_logp(&small, p, &r),
                               text_logp_of(l->reference, l->reference->p, &w),
                               text_logp_of(l->reference, l->reference->p, &r),
                               (double)text_supervised(&w),
                               (double)text_supervised(&r)};
    }
    return slow_preference_mean(l->loss, &l->how, l->nll, DOCUMENTS, pairs);
}

/* The reference is the model itself, or another. */
static void test_dpo(const char *options, slow_pair_loss *value, slow_preference how, double nll,
                     bool other) {
    model m = model_new(small, NULL, 1), reference = model_new(small, NULL, other ? 2 : 1);
    pair_loss loss = {&m, &reference, value, how, nll, false};
    char line[1024];
    run x;
    model_write(&m, FOLDER "/model", "");
    model_write(&reference, FOLDER "/other", "");
    snprintf(line, sizeof line, SGD "--dataset " FOLDER "/pairs.jsonl --pretrain " FOLDER
             "/model --train_batch_size %d --max_steps 1 %s%s", DOCUMENTS,
             other ? "--ref_pretrain " FOLDER "/other " : "", options);
    if (run_with(&x, DPO, &m, NULL, line)) {
        double want = slow_value_of(dpo_value, &loss, m.count, m.p);
        test_expect(near(x.step[0].loss, want, exact), "the loss is %.12g, not %.12g",
                    x.step[0].loss, want);
        expect_gradient(&m, dpo_value, &loss, m.p, x.step[0].params, 1, exact);
    }
    run_free(&x);
    free(reference.p);
    free(m.p);
    test_end("absolute_dpo %s%s", options, other ? " --ref_pretrain" : "");
}

static void test_dpo_all(void) {
    static const double beta = 0.37;
#define HOW(...) ((slow_preference){.beta = beta, __VA_ARGS__})
    TEST(test_dpo("--beta 0.37", slow_dpo_sigmoid, HOW(), 0, false));
    TEST(test_dpo("--beta 0.37", slow_dpo_sigmoid, HOW(), 0, true));
    TEST(test_dpo("--beta 0.37 --label_smoothing 0.2", slow_dpo_sigmoid,
                  HOW(.label_smoothing = 0.2), 0, true));
    TEST(test_dpo("--beta 0.37 --nll_loss_coef 0.7", slow_dpo_sigmoid, HOW(), 0.7, true));
    TEST(test_dpo("--beta 0.37 --ipo", slow_ipo, HOW(), 0, true));
    TEST(test_dpo("--beta 0.37 --pref_loss ipo", slow_ipo, HOW(), 0, true));
    TEST(test_dpo("--beta 0.37 --pref_loss hinge", slow_dpo_hinge, HOW(), 0, true));
    TEST(test_dpo("--beta 0.37 --pref_loss simpo --simpo_gamma 0.9", slow_simpo,
                  HOW(.gamma = 0.9), 0, false));
    TEST(test_dpo("--beta 0.37 --pref_loss simpo --label_smoothing 0.15", slow_simpo,
                  HOW(.gamma = 0.5, .label_smoothing = 0.15), 0, false));
}

/* ---- reward models ---- */

static slow_complex rm_value(const slow_complex *p, const void *context) {
    const pair_loss *l = (const pair_loss *)context;
    slow_complex chosen[DOCUMENTS], rejected[DOCUMENTS], sum = 0;
    for (int64_t i = 0; i < DOCUMENTS; i++) {
        text w = pair_side(i, 0), r = pair_side(i, 1);
        chosen[i] = text_score(&small, p, &w);
        rejected[i] = text_score(&small, p, &r);
        sum += slow_rm_sigmoid(chosen[i], rejected[i], l->margins ? pair_margin(i) : 0) / DOCUMENTS;
    }
    return sum;
}

static void test_rm(const char *options, const char *head, bool margins) {
    model m = model_new(small, head, 3);
    pair_loss loss = {.model = &m, .margins = margins};
    char line[1024];
    run x;
    model_write(&m, FOLDER "/score", "");
    snprintf(line, sizeof line, SGD "--dataset " FOLDER "/pairs.jsonl --pretrain " FOLDER
             "/score --train_batch_size %d --max_steps 1 %s", DOCUMENTS, options);
    if (run_with(&x, RM, &m, NULL, line)) {
        double want = slow_value_of(rm_value, &loss, m.count, m.p);
        expect_params(&m, x.start, m.p, 0, "as they are read");
        test_expect(near(x.step[0].loss, want, exact), "the loss is %.12g, not %.12g",
                    x.step[0].loss, want);
        expect_gradient(&m, rm_value, &loss, m.p, x.step[0].params, 1, exact);
    }
    run_free(&x);
    free(m.p);
    test_end("absolute_rm %s", options);
}

/* ---- KTO ---- */

static bool kto_liked(int64_t i) { return i % 3 != 1; }

static void kto_write(void) {
    FILE *file = file_of(FOLDER, "kto.jsonl");
    for (int64_t i = 0; i < DOCUMENTS; i++) {
        text t = sft_text(i);
        fprintf(file, "{");
        text_print(file, "", &t, true);
        fprintf(file, ", \"label\": %s}\n", kto_liked(i) ? "true" : "false");
    }
    fclose(file);
}

typedef struct kto_loss {
    const model *reference;
    slow_kto how;
    double kl;
} kto_loss;

static slow_complex kto_value(const slow_complex *p, const void *context) {
    const kto_loss *l = (const kto_loss *)context;
    slow_complex logp[DOCUMENTS];
    double ref[DOCUMENTS];
    bool liked[DOCUMENTS];
    for (int64_t i = 0; i < DOCUMENTS; i++) {
        text t = sft_text(i);
        logp[i] = text_logp(&small, p, &t);
        ref[i] = text_logp_of(l->reference, l->reference->p, &t);
        liked[i] = kto_liked(i);
    }
    return slow_kto_loss(&l->how, DOCUMENTS, liked, l->kl, logp, ref);
}

/* Every prompt of the step with the response of the next. */
static double kto_kl(const model *m, const model *reference, const int64_t *order) {
    double logp[DOCUMENTS], ref[DOCUMENTS];
    for (int64_t i = 0; i < DOCUMENTS; i++) {
        text t = sft_text(order[i]), next = sft_text(order[(i + 1) % DOCUMENTS]);
        int64_t response = next.tokens - next.prompt;
        memcpy(t.ids + t.prompt, next.ids + next.prompt, (size_t)response * sizeof *t.ids);
        t.tokens = t.prompt + response;
        logp[i] = text_logp_of(m, m->p, &t);
        ref[i] = text_logp_of(reference, reference->p, &t);
    }
    return slow_kto_kl(DOCUMENTS, logp, ref);
}

/* second: the seed of the reference. */
static void test_kto(const char *options, slow_kto how, uint64_t second) {
    model m = model_new(small, NULL, 1), reference = model_new(small, NULL, second);
    kto_loss loss = {&reference, how, 0};
    char line[1024];
    run x;
    model_write(&m, FOLDER "/model", "");
    model_write(&reference, FOLDER "/other", "");
    snprintf(line, sizeof line, SGD "--dataset " FOLDER "/kto.jsonl --pretrain " FOLDER
             "/model --ref_pretrain " FOLDER "/other --train_batch_size %d --max_steps 1 %s",
             DOCUMENTS, options);
    if (run_with(&x, KTO, &m, NULL, line)) {
        loss.kl = kto_kl(&m, &reference, x.order);
        double want = slow_value_of(kto_value, &loss, m.count, m.p);
        test_expect(near(x.step[0].loss, want, exact), "the loss is %.12g, not %.12g",
                    x.step[0].loss, want);
        expect_gradient(&m, kto_value, &loss, m.p, x.step[0].params, 1, exact);
    }
    run_free(&x);
    free(reference.p);
    free(m.p);
    test_end("absolute_kto %s, KL %.3g", options, loss.kl);
}

/* ---- optimizer, schedule, average: a whole trajectory apart ---- */

typedef struct way { /* how the weights go, apart */
    slow_adamw adamw;
    slow_schedule schedule;
    double rate, max_norm, ema_beta; /* ema_beta 0: no average */
    bool sgd;
    int64_t steps;
} way;

/* Gains and biases have no weight decay; all else has, a score head too. */
static bool has_decay(const char *name) {
    return !strstr(name, "norm.weight") && !strstr(name, ".bias");
}

typedef struct path {
    double *p, *g, *m, *v, *average;
} path;

static void path_open(path *t, const model *m) {
    t->p = (double *)demo_room(5 * m->count, sizeof *t->p);
    t->g = t->p + m->count;
    t->m = t->g + m->count;
    t->v = t->m + m->count;
    t->average = t->v + m->count;
    memcpy(t->p, m->p, (size_t)m->count * sizeof *t->p);
    memcpy(t->average, m->p, (size_t)m->count * sizeof *t->p);
}

/* Step s = 0, 1, ...; returns the gradient's norm. */
static double path_step(path *t, const model *m, const way *w, slow_scalar *f,
                        const void *context, int64_t s) {
    double rate = w->rate * slow_schedule_factor(&w->schedule, s);
    slow_gradient_of(f, context, m->count, t->p, t->g);
    double norm = w->max_norm > 0 ? slow_clip(m->count, w->max_norm, t->g)
                                  : slow_norm(m->count, t->g);
    for (int64_t i = 0; i < m->tensors; i++) {
        slow_adamw a = w->adamw;
        int64_t at = m->table[i].offset, n = m->table[i].rows * m->table[i].cols;
        if (!has_decay(m->table[i].name)) a.weight_decay = 0;
        if (w->sgd)
            slow_sgd_step(rate, 0, a.weight_decay, n, t->g + at, t->m + at, t->p + at);
        else
            slow_adamw_step(&a, rate, s + 1, n, t->g + at, t->m + at, t->v + at, t->p + at);
    }
    slow_ema(w->ema_beta, m->count, t->p, t->average);
    return norm;
}

static void expect_path(const run *x, const model *m, const way *w, slow_scalar *f,
                        const void *context) {
    path t;
    path_open(&t, m);
    test_expect(x->steps == w->steps, "%d steps, not %d", (int)x->steps, (int)w->steps);
    for (int64_t s = 0; s < w->steps && s < x->steps && !test_why[0]; s++) {
        const step_seen *seen = &x->step[s];
        double loss = slow_value_of(f, context, m->count, t.p);
        double norm = path_step(&t, m, w, f, context, s);
        test_expect(near(seen->loss, loss, along), "the loss is %.12g, not %.12g", seen->loss, loss);
        test_expect(near(seen->norm, norm, along), "the norm is %.12g, not %.12g", seen->norm, norm);
        test_expect(near(seen->rate, w->rate * slow_schedule_factor(&w->schedule, s), exact),
                    "step %d has the learning rate %.12g", (int)s, seen->rate);
        expect_params(m, seen->params, t.p, along, "after a step");
        test_expect((w->ema_beta > 0) == (seen->average != NULL), "an average is there or not");
        if (seen->average) expect_params(m, seen->average, t.average, along, "the average");
    }
    free(t.p);
}

static const slow_config with_bias = {.layers = 1, .hidden = 6, .heads = 2, .kv_heads = 1,
                                      .head_dim = 3, .intermediate = 5, .vocab = 13,
                                      .rope_theta = 10000, .rms_eps = 1e-5, .qkv_bias = true};

static void test_way(const char *options, way w) {
    model m = model_new(small, NULL, 1);
    sft_loss loss = {&m, {0}};
    char line[1024];
    run x;
    model_write(&m, FOLDER "/model", "");
    snprintf(line, sizeof line, "--dataset " FOLDER "/sft.jsonl --pretrain " FOLDER
             "/model --train_batch_size %d --max_epochs %d --learning_rate %.17g %s", DOCUMENTS,
             (int)w.schedule.total, w.rate, options);
    if (run_with(&x, SFT, &m, NULL, line)) expect_path(&x, &m, &w, sft_value, &loss);
    run_free(&x);
    free(m.p);
    test_end("absolute_way %s", options);
}

static void test_ways(void) {
#define WAY(kind_, total_, ...) \
    ((way){.adamw = {.9, .95, 1e-8, 0}, .schedule = {.kind = kind_, .total = total_, .min_lr_rate = .1}, \
           .rate = 0.01, .max_norm = 1, .steps = total_, __VA_ARGS__})
    TEST(test_way("--lr_scheduler constant", WAY(SLOW_CONSTANT, 3)));
    TEST(test_way("--lr_scheduler constant --adam_betas 0.7,0.8 --adam_eps 0.05",
                  WAY(SLOW_CONSTANT, 3, .adamw = {.7, .8, .05, 0})));
    TEST(test_way("--lr_scheduler constant --l2 3", WAY(SLOW_CONSTANT, 3, .adamw = {.9, .95, 1e-8, 3})));
    TEST(test_way("--lr_scheduler constant --max_norm 0.3 --adam_eps 0.05",
                  WAY(SLOW_CONSTANT, 2, .adamw = {.9, .95, .05, 0}, .max_norm = .3)));
    TEST(test_way("--lr_scheduler constant --max_norm 0 --adam_eps 0.05",
                  WAY(SLOW_CONSTANT, 2, .adamw = {.9, .95, .05, 0}, .max_norm = 0)));
    TEST(test_way("--lr_scheduler constant --optim sgd --max_norm 0.3 --l2 0.5",
                  WAY(SLOW_CONSTANT, 3, .adamw = {0, 0, 0, .5}, .sgd = true, .max_norm = .3)));
    TEST(test_way("--lr_scheduler constant --enable_ema --ema_beta 0.7",
                  WAY(SLOW_CONSTANT, 3, .ema_beta = .7)));
    TEST(test_way("--lr_scheduler constant --enable_ema", WAY(SLOW_CONSTANT, 2, .ema_beta = .992)));
    TEST(test_way("--lr_scheduler linear --warmup_steps 1",
                  WAY(SLOW_LINEAR, 5, .schedule = {SLOW_LINEAR, 1, 5, 0})));
    TEST(test_way("--lr_scheduler cosine", WAY(SLOW_COSINE, 5)));
    TEST(test_way("--lr_scheduler cosine_with_min_lr --min_lr_ratio 0.3 --lr_warmup_ratio 0.3",
                  WAY(SLOW_COSINE, 5, .schedule = {SLOW_COSINE_WITH_MIN_LR, 2, 5, .3})));
    TEST(test_way("--max_steps 2", WAY(SLOW_COSINE, 4, .schedule = {SLOW_COSINE_WITH_MIN_LR, 0, 2, .1}, .steps = 2)));
}

int main(int argc, char **argv) {
    seqpar_error error = {0};
    test_begin(argc, argv);
    if (demo_make_folder(FOLDER, &error)) return fprintf(stderr, "%s\n", error.text), 2;
    sft_write();
    pairs_write();
    kto_write();
    TEST(test_sft("", 0, 0));
    TEST(test_sft("--label_smoothing 0.1", 0.1, 0));
    TEST(test_sft("--z_loss 0.1", 0, 0.1));
    TEST(test_sft("--label_smoothing 0.1 --z_loss 0.3", 0.1, 0.3));
    test_dpo_all();
    test_ways();
    TEST(test_rm("", "score", false));
    TEST(test_rm("--value_head_prefix value_head", "value_head", false));
    TEST(test_rm("--loss logexp", "score", false));
    TEST(test_rm("--margin_loss --margin_key far", "score", true));
    TEST(test_kto("--beta 0.2", (slow_kto){0.2, 1, 1}, 2));
    TEST(test_kto("--beta 0.2", (slow_kto){0.2, 1, 1}, 5));
    TEST(test_kto("--beta 0.2 --desirable_loss_weight 1.7", (slow_kto){0.2, 1.7, 1}, 2));
    TEST(test_kto("--beta 0.2 --undesirable_loss_weight 0.6", (slow_kto){0.2, 1, 0.6}, 5));
    return test_summary();
}
