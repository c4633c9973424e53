/* SPDX-License-Identifier: MIT OR Unlicense */
/* Every option that changes weights, by absolute numbers: the trainers take steps in fp64, and slow.h and slow_loss.h say
   what these must be. What is equal on all ranks, and wrong, is seen here. absolute.tsv names the test of each option. */
#pragma GCC diagnostic ignored \
    "-Wunused-function" /* of whole trainers a few functions are called */
#pragma GCC diagnostic ignored \
    "-Woverride-init" /* a test names what differs from the defaults */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "support/absolute.h"

#define SGD "--optim sgd --max_norm 0 --learning_rate 1 --lr_scheduler constant "
/* The same step, otherwise. */
#define SPLIT "--world_size 2 --gradient_accumulation_steps 3 --micro_train_batch_size 1"
#define PACKED \
    "--data_parallel_size 2 --packing_samples --max_len 20 --pack_len 40 --micro_train_batch_size 1"
static const double exact =
    1e-11; /* measured: all tests pass with 1e-12, some fail with 1e-13 */
static const double along = 1e-10; /* of several steps; they pass with 1e-13 */

static const slow_config small = {.layers = 1,
                                  .hidden = 6,
                                  .heads = 2,
                                  .kv_heads = 1,
                                  .head_dim = 4,
                                  .intermediate = 5,
                                  .vocab = 13,
                                  .rope_theta = 10000,
                                  .rms_eps = 1e-5};

/* ---- supervised fine-tuning ---- */

static text sft_text(int64_t i) { return text_new(i, small.vocab, 2 + i % 3, 5 + (i * 5) % 7); }

static void texts_write(const char *name, int64_t count, text (*text_of)(int64_t i),
                        bool labels) {
    FILE *file = file_of(FOLDER, name);
    for (int64_t i = 0; i < count; i++) {
        text t = text_of(i);
        fprintf(file, "{");
        text_print(file, "", &t, labels);
        fprintf(file, "}\n");
    }
    fclose(file);
}

static void sft_write(void) { texts_write("sft.jsonl", DOCUMENTS, sft_text, true); }

/* order: which documents, NULL: all. texts: others than sft_text's. */
typedef struct sft_loss {
    const model *model;
    slow_objective objective;
    int64_t count;
    const int64_t *order;
    const text *texts;
} sft_loss;

/* One row a document. */
static slow_complex sft_value(const slow_complex *p, const void *context) {
    const sft_loss *s = (const sft_loss *)context;
    slow_row row[DOCUMENTS];
    int64_t ends[DOCUMENTS][2];
    text texts[DOCUMENTS];
    int32_t targets[DOCUMENTS][MOST_TOKENS];
    int64_t count = s->order ? s->count : DOCUMENTS;
    slow_problem problem = {&s->model->config, count, row, s->objective};
    problem.objective.count = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t which = s->order ? s->order[i] : i;
        texts[i] = s->texts ? s->texts[which] : sft_text(which);
        text_targets(&texts[i], targets[i]);
        ends[i][0] = 0;
        ends[i][1] = texts[i].tokens;
        row[i] = (slow_row){.tokens = texts[i].tokens,
                            .docs = 1,
                            .cu_seqlens = ends[i],
                            .ids = texts[i].ids,
                            .targets = targets[i]};
        problem.objective.count += (double)text_supervised(&texts[i]);
    }
    return slow_loss_complex(p, &problem);
}

/* far: how far fp64 is from what computes. */
typedef struct sft_case {
    const char *options;
    slow_config config;
    slow_objective objective;
    int64_t count; /* documents of the step */
    double far;
    const text *texts;
} sft_case;

static void sft_compare(const sft_case *c, run *x, const model *m, const double *before) {
    sft_loss loss = {m, c->objective, c->count, x->order, c->texts};
    double far = c->far > 0 ? c->far : exact;
    loss.objective.balance = 0; /* is shown apart */
    double want = slow_value_of(sft_value, &loss, m->count, before);
    test_expect(near(x->step[0].loss, want, far), "the loss is %.12g, not %.12g",
                x->step[0].loss, want);
    loss.objective.balance = c->objective.balance;
    expect_gradient(m, sft_value, &loss, before, x->step[0].params, 1, far);
}

static void test_sft(sft_case c) {
    model m = model_new(c.config, NULL, 1);
    char line[1024];
    run x;
    if (!c.count) c.count = DOCUMENTS;
    model_write(&m, FOLDER "/model", "");
    snprintf(line, sizeof line,
             SGD "--dataset " FOLDER "/sft.jsonl --pretrain " FOLDER
                 "/model --train_batch_size %d --max_steps 1 %s",
             (int)c.count, c.options);
    if (run_with(&x, SFT, &m, NULL, line)) {
        expect_params(&m, x.start, m.p, 0, "as they are read");
        sft_compare(&c, &x, &m, m.p);
    }
    run_free(&x);
    free(m.p);
    test_end("absolute_sft %s", c.options);
}

/* A model without a folder, as options say what it is like. */
static void test_fresh(sft_case c) {
    model m = model_new(c.config, NULL, 1);
    char line[1024];
    run x;
    c.count = DOCUMENTS;
    snprintf(line, sizeof line,
             SGD "--dataset " FOLDER "/sft.jsonl --train_batch_size %d "
                 "--max_steps 1 %s",
             DOCUMENTS, c.options);
    if (run_with(&x, SFT, &m, NULL, line)) sft_compare(&c, &x, &m, x.start);
    run_free(&x);
    free(m.p);
    test_end("absolute_fresh %s", c.options);
}

/* Texts as records of a question and an answer, and what a model is to learn of them: before, question, behind, answer,
   end. */
static const char *const question[] = {"ab", "cde", "f"}, *const answer[] = {"xyz", "uvwt",
                                                                             "rst"};

static text words_text(int64_t i, const char *before, const char *behind, int64_t longest,
                       bool answers, bool all) {
    char line[64];
    text t = {.ids = {DEMO_BOS}};
    t.prompt = 1 + snprintf(line, sizeof line, "%s%s%s", before, question[i], behind);
    t.tokens = t.prompt + snprintf(line + t.prompt - 1, 16, "%s", answers ? answer[i] : "");
    for (int64_t k = 1; k < t.tokens; k++) t.ids[k] = (unsigned char)line[k - 1];
    if (answers) t.ids[t.tokens++] = DEMO_EOS;
    if (t.tokens > longest) {
        t.tokens = longest;
        if (answers) t.ids[longest - 1] = DEMO_EOS;
    }
    if (all) t.prompt = 1;
    return t;
}

static void words_write(void) {
    FILE *file = file_of(FOLDER, "words.jsonl");
    for (int i = 0; i < 3; i++)
        fprintf(file, "{\"input\": \"%s\", \"q\": \"%s\", \"a\": \"%s\"}\n", question[i],
                question[i], answer[i]);
    fclose(file);
}

static void test_words(const char *options, const char *before, const char *behind,
                       int64_t longest, bool answers, bool all) {
    slow_config config = small;
    text texts[3];
    char line[1024];
    run x;
    config.vocab = DEMO_VOCAB;
    model m = model_new(config, NULL, 1);
    for (int64_t i = 0; i < 3; i++)
        texts[i] = words_text(i, before, behind, longest, answers, all);
    sft_case c = {options, config, {0}, 3, .texts = texts};
    words_write();
    model_write(&m, FOLDER "/words", "");
    snprintf(line, sizeof line,
             SGD "--dataset " FOLDER "/words.jsonl --pretrain " FOLDER
                 "/words --train_batch_size 3 --max_steps 1 %s",
             options);
    if (run_with(&x, SFT, &m, NULL, line)) sft_compare(&c, &x, &m, m.p);
    run_free(&x);
    free(m.p);
    test_end("absolute_words %s", options);
}

static void test_words_all(void) {
    TEST(test_words("--output_key a", "User: ", "\nAssistant: ", 40, true, false));
    TEST(test_words("--output_key a --input_key q --input_template Q:{};", "Q:", ";", 40, true,
                    false));
    TEST(test_words("--output_key a --input_template Q:{}; --train_on_inputs", "Q:", ";", 40,
                    true, true));
    TEST(test_words("--output_key a --input_template Q:{}; --max_len 10 --truncation cut",
                    "Q:", ";", 10, true, false));
    TEST(test_words("--pretrain_mode", "", "", 40, false, true));
}

static void test_sft_all(void) {
    const slow_config mixtral = {.layers = 2,
                                 .hidden = 6,
                                 .heads = 2,
                                 .kv_heads = 1,
                                 .head_dim = 4,
                                 .intermediate = 5,
                                 .vocab = 13,
                                 .rope_theta = 10000,
                                 .rms_eps = 1e-5,
                                 .experts = 3,
                                 .experts_per_token = 2,
                                 .expert_intermediate = 5,
                                 .topk_norm = true};
    const slow_config fresh = {.layers = 2,
                               .hidden = 12,
                               .heads = 4,
                               .kv_heads = 2,
                               .head_dim = 6,
                               .intermediate = 7,
                               .vocab = DEMO_VOCAB,
                               .rope_theta = 500,
                               .rms_eps = 1e-5};
    const slow_config tied = {.layers = 1,
                              .hidden = 8,
                              .heads = 2,
                              .kv_heads = 1,
                              .head_dim = 4,
                              .intermediate = 24,
                              .vocab = DEMO_VOCAB,
                              .rope_theta = 10000,
                              .rms_eps = 1e-5,
                              .tied = true};
    TEST(test_sft((sft_case){"", small}));
    TEST(test_sft((sft_case){"--label_smoothing 0.1", small, {.smoothing = 0.1}}));
    TEST(test_sft((sft_case){"--z_loss 0.1", small, {.zloss = 0.1}}));
    TEST(test_sft((sft_case){
        "--label_smoothing 0.1 --z_loss 0.3", small, {.smoothing = 0.1, .zloss = 0.3}}));
    TEST(test_sft((sft_case){"--micro_train_batch_size 1", small}));
    TEST(test_sft(
        (sft_case){"--gradient_accumulation_steps 2 --micro_train_batch_size 3", small}));
    TEST(test_sft((sft_case){
        "--packing_samples --max_len 20 --pack_len 24 --micro_train_batch_size 1", small}));
    TEST(test_sft((sft_case){"--data_parallel_size 2", small}));
    TEST(test_sft((sft_case){"--world_size 2 --micro_train_batch_size 1", small}));
    TEST(test_sft((sft_case){"--seed 7", small, {0}, 4}));
    TEST(test_sft((sft_case){"--seed 8", small, {0}, 1}));
    TEST(test_sft((sft_case){"--aux_loss_coef 0", mixtral}));
    TEST(test_sft((sft_case){
        "--aux_loss_coef 0.3 --micro_train_batch_size 1", mixtral, {.balance = 0.3}}));
    TEST(test_sft((sft_case){"--device cpu", small, .far = 1e-4}));
    slow_config padded = small, padded_tied = tied;
    padded.untaught = 4;
    padded_tied.vocab = small.vocab;
    padded_tied.untaught = 4;
    TEST(test_sft((sft_case){"--loss_definition trl", padded}));
    TEST(test_sft((sft_case){"--loss_definition openrlhf " SPLIT, padded}));
    TEST(test_sft((sft_case){"--loss_definition llamafactory", padded_tied}));
    TEST(test_fresh((sft_case){
        "--num_hidden_layers 2 --hidden_size 12 --num_attention_heads 4 "
        "--num_key_value_heads 2 --head_dim 6 --intermediate_size 7 --rope_theta 500",
        fresh}));
    TEST(test_fresh((sft_case){"--num_hidden_layers 1 --hidden_size 8 --num_attention_heads 2 "
                               "--num_key_value_heads 1 --tie_word_embeddings",
                               tied}));
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
    slow_pair_loss *loss; /* NULL: kto_pair */
    slow_preference how;
    double nll;
    bool margins;
    bool nll_tokens; /* one mean over all chosen tokens */
} pair_loss;

/* Each response against the other kind's mean log-ratio, through which the gradient goes. */
static slow_complex kto_pairs(const slow_preference *how, const slow_pair *x) {
    slow_complex chosen = 0, rejected = 0, sum = 0;
    for (int64_t i = 0; i < DOCUMENTS; i++) {
        chosen += slow_chosen(how, &x[i]) / DOCUMENTS;
        rejected += slow_rejected(how, &x[i]) / DOCUMENTS;
    }
    chosen = slow_clamp(chosen, 0, HUGE_VAL);
    rejected = slow_clamp(rejected, 0, HUGE_VAL);
    for (int64_t i = 0; i < DOCUMENTS; i++)
        sum += slow_sigmoid(-how->beta * (slow_chosen(how, &x[i]) - rejected)) +
               slow_sigmoid(-how->beta * (chosen - slow_rejected(how, &x[i])));
    return sum / (2 * DOCUMENTS);
}

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
    if (!l->loss) return kto_pairs(&l->how, pairs);
    if (!l->nll_tokens) return slow_preference_mean(l->loss, &l->how, l->nll, DOCUMENTS, pairs);
    return slow_preference_mean(l->loss, &l->how, 0, DOCUMENTS, pairs) +
           l->nll * slow_chosen_nll_tokens(DOCUMENTS, pairs);
}

/* The reference is the model itself, or another. */
static void test_dpo(const char *options, slow_pair_loss *value, slow_preference how,
                     double nll, bool other) {
    model m = model_new(small, NULL, 1), reference = model_new(small, NULL, other ? 2 : 1);
    pair_loss loss = {&m, &reference, value, how, nll, false, strstr(options, "trl") != NULL};
    char line[1024];
    run x;
    model_write(&m, FOLDER "/model", "");
    model_write(&reference, FOLDER "/other", "");
    snprintf(line, sizeof line,
             SGD "--dataset " FOLDER "/pairs.jsonl --pretrain " FOLDER
                 "/model --train_batch_size %d --max_steps 1 %s%s",
             DOCUMENTS, other ? "--ref_pretrain " FOLDER "/other " : "", options);
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
    TEST(test_dpo("--beta 0.37 " SPLIT, slow_dpo_sigmoid, HOW(), 0, true));
    TEST(test_dpo("--beta 0.37 " PACKED, slow_dpo_sigmoid, HOW(), 0, true));
    TEST(test_dpo("--beta 0.37 --ipo", slow_ipo, HOW(), 0, true));
    TEST(test_dpo("--beta 0.37 --pref_loss ipo", slow_ipo, HOW(), 0, true));
    TEST(test_dpo("--beta 0.37 --pref_loss hinge", slow_dpo_hinge, HOW(), 0, true));
    TEST(test_dpo("--beta 0.37 --pref_loss simpo --simpo_gamma 0.9", slow_simpo,
                  HOW(.gamma = 0.9), 0, false));
    TEST(test_dpo("--beta 0.37 --pref_loss simpo --label_smoothing 0.15", slow_simpo,
                  HOW(.gamma = 0.5, .label_smoothing = 0.15), 0, false));
    TEST(test_dpo("--beta 0.37 --pref_loss robust --label_smoothing 0.2", slow_dpo_robust,
                  HOW(.label_smoothing = 0.2), 0, true));
    TEST(test_dpo("--beta 0.37 --pref_loss kto_pair", NULL, HOW(), 0, true));
    TEST(test_dpo("--beta 0.37 --pref_loss kto_pair " SPLIT, NULL, HOW(), 0, true));
    TEST(test_dpo("--beta 0.37 --pref_loss kto_pair " PACKED, NULL, HOW(), 0, false));
#define BY "--beta 0.37 --loss_definition "
    TEST(test_dpo(BY "openrlhf --ipo", slow_ipo, HOW(), 0, true));
    TEST(test_dpo(BY "trl --ipo", slow_ipo_mean, HOW(), 0, true));
    TEST(test_dpo(BY "llamafactory --pref_loss ipo " SPLIT, slow_ipo_mean, HOW(), 0, true));
    TEST(test_dpo(BY "openrlhf --nll_loss_coef 0.7", slow_dpo_sigmoid, HOW(), 0.7, true));
    TEST(test_dpo(BY "llamafactory --nll_loss_coef 0.7", slow_dpo_sigmoid, HOW(), 0.7, true));
    TEST(test_dpo(BY "trl --nll_loss_coef 0.7", slow_dpo_sigmoid, HOW(), 0.7, true));
    TEST(test_dpo(BY "trl --nll_loss_coef 0.7 " SPLIT, slow_dpo_sigmoid, HOW(), 0.7, true));
}

/* ---- reward models ---- */

static slow_complex rm_value(const slow_complex *p, const void *context) {
    const pair_loss *l = (const pair_loss *)context;
    slow_complex chosen[DOCUMENTS], rejected[DOCUMENTS], sum = 0;
    for (int64_t i = 0; i < DOCUMENTS; i++) {
        text w = pair_side(i, 0), r = pair_side(i, 1);
        chosen[i] = text_score(&small, p, &w);
        rejected[i] = text_score(&small, p, &r);
        sum += slow_rm_sigmoid(chosen[i], rejected[i], l->margins ? pair_margin(i) : 0) /
               DOCUMENTS;
    }
    return sum;
}

static void test_rm(const char *options, const char *head, bool margins) {
    model m = model_new(small, head, 3);
    pair_loss loss = {.model = &m, .margins = margins};
    char line[1024];
    run x;
    model_write(&m, FOLDER "/score", "");
    snprintf(line, sizeof line,
             SGD "--dataset " FOLDER "/pairs.jsonl --pretrain " FOLDER
                 "/score --train_batch_size %d --max_steps 1 %s",
             DOCUMENTS, options);
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
    snprintf(line, sizeof line,
             SGD "--dataset " FOLDER "/kto.jsonl --pretrain " FOLDER
                 "/model --ref_pretrain " FOLDER
                 "/other --train_batch_size %d --max_steps 1 %s",
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

/* live: elements that the loss hangs on at all; NULL: all. */
typedef struct path {
    double *p, *g, *m, *v, *average;
    const bool *live;
} path;

static void path_open(path *t, const model *m) {
    t->p = (double *)demo_alloc(5 * m->count, sizeof *t->p);
    t->g = t->p + m->count;
    t->m = t->g + m->count;
    t->v = t->m + m->count;
    t->average = t->v + m->count;
    memcpy(t->p, m->p, (size_t)m->count * sizeof *t->p);
    memcpy(t->average, m->p, (size_t)m->count * sizeof *t->p);
}

/* Of the elements that are live, each by its own direction. */
static void path_gradient(const path *t, const model *m, slow_scalar *f, const void *context) {
    slow_complex *z = slow_promote(m->count, t->p);
    for (int64_t k = 0; k < m->count; k++) {
        t->g[k] = 0;
        if (t->live && !t->live[k]) continue;
        z[k] = t->p[k] + SLOW_STEP * I;
        t->g[k] = cimag(f(z, context)) / SLOW_STEP;
        z[k] = t->p[k];
    }
    free(z);
}

/* Step s = 0, 1, ...; returns the gradient's norm. */
static double path_step(path *t, const model *m, const way *w, slow_scalar *f,
                        const void *context, int64_t s) {
    double rate = w->rate * slow_schedule_factor(&w->schedule, s);
    path_gradient(t, m, f, context);
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
    path t = {0};
    path_open(&t, m);
    test_expect(x->steps == w->steps, "%d steps, not %d", (int)x->steps, (int)w->steps);
    for (int64_t s = 0; s < w->steps && s < x->steps && !test_why[0]; s++) {
        const step_seen *seen = &x->step[s];
        double loss = slow_value_of(f, context, m->count, t.p);
        double norm = path_step(&t, m, w, f, context, s);
        test_expect(near(seen->loss, loss, along), "the loss is %.12g, not %.12g", seen->loss,
                    loss);
        test_expect(near(seen->norm, norm, along), "the norm is %.12g, not %.12g", seen->norm,
                    norm);
        test_expect(near(seen->rate, w->rate * slow_schedule_factor(&w->schedule, s), exact),
                    "step %d has the learning rate %.12g", (int)s, seen->rate);
        expect_params(m, seen->params, t.p, along, "after a step");
        test_expect((w->ema_beta > 0) == (seen->average != NULL), "an average is there or not");
        if (seen->average) expect_params(m, seen->average, t.average, along, "the average");
    }
    free(t.p);
}

static void test_way(const char *options, way w) {
    /* biases, too */
    static const slow_config with_bias = {.layers = 1,
                                          .hidden = 8,
                                          .heads = 2,
                                          .kv_heads = 1,
                                          .head_dim = 4,
                                          .intermediate = 5,
                                          .vocab = 13,
                                          .rope_theta = 10000,
                                          .rms_eps = 1e-5,
                                          .qkv_bias = true};
    model m = model_new(with_bias, NULL, 1);
    sft_loss loss = {.model = &m};
    char line[1024];
    run x;
    model_write(&m, FOLDER "/bias", "");
    snprintf(line, sizeof line,
             "--dataset " FOLDER "/sft.jsonl --pretrain " FOLDER
             "/bias --train_batch_size %d --max_epochs %d --learning_rate %.17g %s",
             DOCUMENTS, (int)w.schedule.total, w.rate, options);
    if (run_with(&x, SFT, &m, NULL, line)) expect_path(&x, &m, &w, sft_value, &loss);
    run_free(&x);
    free(m.p);
    test_end("absolute_way %s", options);
}

/* A score head is a matrix of one row: it has weight decay, a gain has none. fresh: it comes from the seed. */
static void test_score_way(const char *options, way w, bool fresh) {
    model m = model_new(small, "score", 3);
    pair_loss loss = {.model = &m};
    char line[1024];
    run x;
    m.head = fresh ? NULL : m.head;
    model_write(&m, FOLDER "/score", "");
    m.head = "score";
    snprintf(line, sizeof line,
             "--dataset " FOLDER "/pairs.jsonl --pretrain " FOLDER
             "/score --train_batch_size %d --max_epochs %d --learning_rate %.17g %s",
             DOCUMENTS, (int)w.schedule.total, w.rate, options);
    if (run_with(&x, RM, &m, NULL, line)) {
        if (fresh) memcpy(m.p, x.start, (size_t)m.count * sizeof *m.p);
        expect_path(&x, &m, &w, rm_value, &loss);
    }
    run_free(&x);
    free(m.p);
    test_end("absolute_score_way %s%s", options, fresh ? ", a fresh head" : "");
}

static void test_pair_way(const char *options, way w) {
    model m = model_new(small, NULL, 1), reference = model_new(small, NULL, 2);
    pair_loss loss = {&m, &reference, slow_dpo_sigmoid, {.beta = .37}, 0, false};
    char line[1024];
    run x;
    model_write(&m, FOLDER "/model", "");
    model_write(&reference, FOLDER "/other", "");
    snprintf(line, sizeof line,
             "--dataset " FOLDER "/pairs.jsonl --pretrain " FOLDER
             "/model --ref_pretrain " FOLDER
             "/other --beta 0.37 --train_batch_size %d --max_epochs %d "
             "--learning_rate %.17g %s",
             DOCUMENTS, (int)w.schedule.total, w.rate, options);
    if (run_with(&x, DPO, &m, NULL, line)) expect_path(&x, &m, &w, dpo_value, &loss);
    run_free(&x);
    free(reference.p);
    free(m.p);
    test_end("absolute_pair_way %s", options);
}

#define ALL_OF_ADAM \
    "--adam_betas 0.7,0.8 --adam_eps 0.05 --l2 3 --max_norm 0.3 --lr_scheduler cosine_with_min_lr " \
    "--warmup_steps 1 --min_lr_ratio 0.3 --enable_ema --ema_beta 0.7"
static void test_ways(void) {
#define WAY(kind_, total_, ...) \
    ((way){.adamw = {.9, .95, 1e-8, 0}, \
           .schedule = {.kind = kind_, .total = total_, .min_lr_rate = .1}, \
           .rate = 0.01, \
           .max_norm = 1, \
           .steps = total_, \
           __VA_ARGS__})
    TEST(test_way("--lr_scheduler constant", WAY(SLOW_CONSTANT, 3)));
    TEST(test_way("--lr_scheduler constant --adam_betas 0.7,0.8 --adam_eps 0.05",
                  WAY(SLOW_CONSTANT, 3, .adamw = {.7, .8, .05, 0})));
    TEST(test_way("--lr_scheduler constant --l2 3",
                  WAY(SLOW_CONSTANT, 3, .adamw = {.9, .95, 1e-8, 3})));
    TEST(test_way("--lr_scheduler constant --max_norm 0.3 --adam_eps 0.05",
                  WAY(SLOW_CONSTANT, 2, .adamw = {.9, .95, .05, 0}, .max_norm = .3)));
    TEST(test_way("--lr_scheduler constant --max_norm 0 --adam_eps 0.05",
                  WAY(SLOW_CONSTANT, 2, .adamw = {.9, .95, .05, 0}, .max_norm = 0)));
    TEST(test_way("--lr_scheduler constant --optim sgd --max_norm 0.3 --l2 0.5",
                  WAY(SLOW_CONSTANT, 3, .adamw = {0, 0, 0, .5}, .sgd = true, .max_norm = .3)));
    TEST(test_way("--lr_scheduler constant --enable_ema --ema_beta 0.7",
                  WAY(SLOW_CONSTANT, 3, .ema_beta = .7)));
    TEST(test_way("--lr_scheduler constant --enable_ema",
                  WAY(SLOW_CONSTANT, 2, .ema_beta = .992)));
    TEST(test_way("--lr_scheduler linear --warmup_steps 1",
                  WAY(SLOW_LINEAR, 5, .schedule = {SLOW_LINEAR, 1, 5, 0})));
    TEST(test_way("--lr_scheduler cosine", WAY(SLOW_COSINE, 5)));
    TEST(test_way("--lr_scheduler cosine_with_min_lr --min_lr_ratio 0.3 --lr_warmup_ratio 0.3",
                  WAY(SLOW_COSINE, 5, .schedule = {SLOW_COSINE_WITH_MIN_LR, 2, 5, .3})));
    TEST(test_score_way("--lr_scheduler constant --l2 3",
                        WAY(SLOW_CONSTANT, 2, .adamw = {.9, .95, 1e-8, 3}), false));
    TEST(test_score_way("--lr_scheduler constant --l2 3",
                        WAY(SLOW_CONSTANT, 2, .adamw = {.9, .95, 1e-8, 3}), true));
    way all = WAY(SLOW_COSINE, 3, .adamw = {.7, .8, .05, 3},
                  .schedule = {SLOW_COSINE_WITH_MIN_LR, 1, 3, .3}, .max_norm = .3,
                  .ema_beta = .7);
    TEST(test_way(ALL_OF_ADAM, all));
    TEST(test_pair_way(ALL_OF_ADAM, all));
    TEST(test_score_way(ALL_OF_ADAM, all, false));
    TEST(test_way(
        "--max_steps 2",
        WAY(SLOW_COSINE, 4, .schedule = {SLOW_COSINE_WITH_MIN_LR, 0, 2, .1}, .steps = 2)));
}

/* ---- PPO and its relatives: one or two updates on one rollout ---- */

enum {
    PROMPTS = 4,
    SAMPLES = 2,
    TEXTS = PROMPTS * SAMPLES,
    LONGEST = 5,
    PTX = 3,
    TOKENS_MOST = TEXTS * LONGEST
};

/* Words are bytes here, with room for the id that ends a text, which is a frequent one. */
static slow_config tall = {.layers = 1,
                           .hidden = 6,
                           .heads = 2,
                           .kv_heads = 1,
                           .head_dim = 4,
                           .intermediate = 5,
                           .vocab = DEMO_VOCAB,
                           .rope_theta = 10000,
                           .rms_eps = 1e-5};

/* With experts: the actor has these, the critic others. */
static slow_config tall_experts(int64_t experts, int64_t chosen) {
    slow_config c = tall;
    c.layers = 2;
    c.experts = experts;
    c.experts_per_token = chosen;
    c.expert_intermediate = c.intermediate;
    c.topk_norm = true;
    return c;
}

static text prompt_text(int64_t i) { return text_new(11 * i + 2, small.vocab, 1, 3 + i % 3); }
static text ptx_text(int64_t i) { return text_new(17 * i + 4, small.vocab, 1, 7 + 2 * i); }

static void prompts_write(void) {
    texts_write("prompts.jsonl", PROMPTS, prompt_text, false);
    texts_write("ptx.jsonl", PTX, ptx_text, false);
}

typedef struct ppo_case {
    const char *options, *estimator; /* NULL: gae */
    int updates;                     /* 0: 1 */
    slow_ppo clip;
    double rate, gamma, lambda, coef, entropy, ptx, value_clip, temperature, low, high, mean,
        std;
    double later; /* learning rates of the second update by those of the first */
    double target, horizon, buffer, penalty, stop;
    slow_complex (*kl)(slow_complex);
    bool kl_loss, mean_only, gspo;
    double eps, kl_limit; /* of a group's deviation; of a token's KL */
    bool unbiased;        /* whitening */
    int over;             /* SEQPAR_AGGREGATE_ of the policy loss, without gspo */
    bool added_by_tokens; /* KL and entropy, whatever that is */
    bool actor_experts, critic_experts;
    double balance;
} ppo_case;

static const ppo_case ppo_usual = {.estimator = "gae",
                                   .updates = 1,
                                   .rate = 2,
                                   .clip = {.2, .2, 0, HUGE_VAL},
                                   .gamma = 1,
                                   .lambda = .95,
                                   .coef = .01,
                                   .value_clip = .2,
                                   .temperature = 1,
                                   .low = -10,
                                   .high = 10,
                                   .std = 1,
                                   .later = 1,
                                   .horizon = 10000,
                                   .stop = 1,
                                   .eps = 1e-9,
                                   .kl_limit = HUGE_VAL,
                                   .kl = slow_k1};

/* All that is known of a rollout, token by token of what was sampled. */
typedef struct experience {
    const ppo_case *how;
    const rollout_seen *rollout;
    const slow_config *actor, *critic;
    int64_t ends[TEXTS + 1];
    slow_sequences sequences;
    double old[TOKENS_MOST], ref[TOKENS_MOST], value[TOKENS_MOST], kl[TOKENS_MOST];
    double reward[TOKENS_MOST], advantage[TOKENS_MOST], back[TOKENS_MOST], score[TEXTS];
    double
        loss[4]; /* of the last evaluation: all but the pretraining, entropy, KL, pretraining */
    double balance, critic_balance; /* beside it */
} experience;

/* Of the tokens that were sampled, what a model says at the place that predicts each. */
static void sampled_values(const model *m, const double *p, const experience *e, double *logp,
                           double *score) {
    slow_complex *z = slow_promote(m->count, p), of[2][MOST_TOKENS];
    for (int64_t i = 0; i < TEXTS; i++) {
        const text *t = &e->rollout->texts[i];
        text_values(&m->config, z, t, e->how->temperature, of[0], NULL, of[1]);
        for (int64_t k = e->ends[i]; k < e->ends[i + 1]; k++) {
            int64_t at = t->prompt - 1 + k - e->ends[i];
            if (logp) logp[k] = creal(of[0][at]);
            if (score) score[k] = creal(of[1][at]);
        }
    }
    free(z);
}

static bool is_one_of(const char *name, const char *list) { return demo_list_has(list, name); }

static void experience_advantages(experience *e) {
    const ppo_case *how = e->how;
    const char *name = how->estimator;
    double shaped[TEXTS], gamma = is_one_of(name, "gae,reinforce") ? how->gamma : 1;
    memcpy(shaped, e->score, sizeof shaped);
    if (is_one_of(name, "reinforce_baseline,dr_grpo"))
        slow_group_baseline(PROMPTS, SAMPLES, e->score, shaped);
    if (is_one_of(name, "rloo")) slow_rloo(PROMPTS, SAMPLES, e->score, shaped);
    if (is_one_of(name, "group_norm"))
        slow_group_norm(PROMPTS, SAMPLES, how->eps, e->score, shaped);
    slow_shaped_rewards(&e->sequences, how->kl_loss ? 0 : how->coef, e->kl, shaped, how->low,
                        how->high, e->reward);
    if (is_one_of(name, "gae"))
        slow_gae(&e->sequences, gamma, how->lambda, e->reward, e->value, e->advantage, e->back);
    else
        slow_reward_to_go(&e->sequences, gamma, e->reward, e->advantage);
    if (!is_one_of(name, "gae,reinforce,reinforce_baseline")) return;
    int64_t n = e->ends[TEXTS];
    double mean = slow_masked_mean(n, NULL, e->advantage);
    for (int64_t k = 0; how->mean_only && k < n; k++) e->advantage[k] -= mean;
    if (how->unbiased) slow_whiten_unbiased(n, NULL, true, e->advantage, e->advantage);
    if (!how->mean_only && !how->unbiased) slow_whiten(n, NULL, e->advantage, e->advantage);
}

/* A long text costs, and one that was cut off keeps a share, or has the number itself. */
static double length_cost(const ppo_case *how, double score, const text *t) {
    double cost = how->buffer > 0 ? slow_overlong_penalty((double)(t->tokens - t->prompt),
                                                          LONGEST, how->buffer, how->penalty)
                                  : 0;
    bool ended = t->ids[t->tokens - 1] == DEMO_EOS;
    score += cost;
    return ended ? score : how->stop < 0 ? how->stop : how->stop * score;
}

static void experience_make(experience *e, const ppo_case *how, const rollout_seen *rollout,
                            const model *actor, const model *reference, const model *critic,
                            const model *reward) {
    *e = (experience){
        .how = how, .rollout = rollout, .actor = &actor->config, .critic = &critic->config};
    for (int64_t i = 0; i < TEXTS; i++) {
        const text *t = &rollout->texts[i];
        e->ends[i + 1] = e->ends[i] + t->tokens - t->prompt;
        e->score[i] = slow_normalize_reward(text_score_of(reward, reward->p, t), how->mean,
                                            how->std, HUGE_VAL);
        e->score[i] = length_cost(how, e->score[i], t);
    }
    e->sequences = (slow_sequences){TEXTS, e->ends, NULL};
    sampled_values(actor, actor->p, e, e->old, NULL);
    sampled_values(reference, reference->p, e, e->ref, NULL);
    sampled_values(critic, critic->p, e, NULL, e->value);
    for (int64_t k = 0; k < e->ends[TEXTS]; k++)
        e->kl[k] = creal(slow_kl(how->kl, how->kl_limit, e->old[k], e->ref[k]));
    experience_advantages(e);
}

static slow_complex ptx_value(const slow_complex *p) {
    slow_complex sum = 0;
    double tokens = 0;
    for (int64_t i = 0; i < PTX; i++) {
        text t = ptx_text(i);
        sum -= text_logp(&tall, p, &t);
        tokens += (double)text_supervised(&t);
    }
    return sum / tokens;
}

/* Of a step's routers, times the coefficient; *shown is what the trainer says of it. */
static slow_complex balance_value(const experience *e, const slow_config *c,
                                  slow_routing *routing, double *shown) {
    slow_complex loss = c->experts ? e->how->balance * slow_balance(c->experts, routing) : 0;
    slow_routing_close(routing);
    *shown = creal(loss);
    return loss;
}

static slow_complex actor_value(const slow_complex *p, const void *context) {
    experience *e = (experience *)context;
    const ppo_case *how = e->how;
    slow_complex logp[TOKENS_MOST], policy = 0, entropy = 0, kl = 0, ptx = 0;
    double first[TEXTS];
    slow_routing routing = slow_routing_open(e->actor->experts);
    for (int64_t i = 0; i < TEXTS; i++) {
        const text *t = &e->rollout->texts[i];
        /* GSPO's means are over texts, with all that is added */
        double own = (double)(e->ends[i + 1] - e->ends[i]), all = (double)e->ends[TEXTS];
        double n = how->gspo                                         ? TEXTS * own
                   : how->over == SEQPAR_AGGREGATE_SEQUENCE_MEAN     ? TEXTS * (own + 1e-8)
                   : how->over == SEQPAR_AGGREGATE_SEQUENCE_SUM_NORM ? TEXTS * LONGEST
                                                                     : all;
        double added = how->added_by_tokens ? all : n;
        slow_complex of[2][MOST_TOKENS];
        text_routed(e->actor, p, t, how->temperature, of[0], of[1], NULL, &routing);
        first[i] = e->advantage[e->ends[i]];
        for (int64_t k = e->ends[i]; k < e->ends[i + 1]; k++) {
            int64_t at = t->prompt - 1 + k - e->ends[i];
            logp[k] = of[0][at];
            policy += slow_ppo_policy(&how->clip, logp[k], e->old[k], e->advantage[k]) / n;
            entropy += of[1][at] / added;
            kl += slow_kl(how->kl, how->kl_limit, logp[k], e->ref[k]) / added;
        }
    }
    if (how->gspo) policy = slow_gspo(&how->clip, &e->sequences, logp, e->old, first);
    if (how->ptx > 0) ptx = ptx_value(p);
    const slow_actor all = {how->kl_loss ? how->coef : 0, how->entropy, how->ptx};
    slow_complex loss = slow_actor_loss(&all, policy, kl, entropy, ptx);
    const slow_complex parts[] = {loss - how->ptx * ptx, entropy, kl, ptx};
    for (int i = 0; i < 4; i++) e->loss[i] = creal(parts[i]);
    return loss + balance_value(e, e->actor, &routing, &e->balance);
}

static slow_complex critic_value(const slow_complex *p, const void *context) {
    experience *e = (experience *)context;
    slow_complex loss = 0;
    slow_routing routing = slow_routing_open(e->critic->experts);
    for (int64_t i = 0; i < TEXTS; i++) {
        const text *t = &e->rollout->texts[i];
        slow_complex value[MOST_TOKENS];
        text_routed(e->critic, p, t, 1, NULL, NULL, value, &routing);
        for (int64_t k = e->ends[i]; k < e->ends[i + 1]; k++)
            loss += slow_value_loss(e->how->value_clip, value[t->prompt - 1 + k - e->ends[i]],
                                    e->value[k], e->back[k]) /
                    (double)e->ends[TEXTS];
    }
    return loss + balance_value(e, e->critic, &routing, &e->critic_balance);
}

static void ppo_line(char line[2048], const char *options, int updates) {
    snprintf(line, 2048,
             "--optim sgd --max_norm 0 --lr_scheduler constant --prompt_data " FOLDER
             "/prompts.jsonl --pretrain " FOLDER "/actor --ref_pretrain " FOLDER
             "/other --reward_pretrain " FOLDER "/reward --critic_pretrain " FOLDER
             "/critic --rollout_batch_size %d --n_samples_per_prompt %d --train_batch_size %d "
             "%s--generate_max_len %d --prompt_max_len 9 --max_epochs %d "
             "--actor_learning_rate %d --critic_learning_rate %d %s",
             PROMPTS, SAMPLES, TEXTS,
             strstr(options, "--micro") ? "" : "--micro_train_batch_size 3 ", LONGEST, updates,
             2, 1, options);
}

typedef struct ppo_models {
    model actor, reference, critic, reward;
} ppo_models;

static void ppo_models_write(ppo_models *m, const ppo_case *c, const char *moments) {
    m->actor = model_new(c->actor_experts ? tall_experts(3, 2) : tall, NULL, 1);
    m->reference = model_new(tall, NULL, 2);
    m->critic = model_new(c->critic_experts ? tall_experts(5, 3) : tall, "score", 3);
    m->reward = model_new(tall, "score", 4);
    /* the row of lm_head.weight, which is last */
    double *end = m->actor.p + m->actor.count + (DEMO_EOS - DEMO_VOCAB) * tall.hidden;
    for (int64_t k = 0; k < tall.hidden; k++) end[k] *= 2;
    model_write(&m->actor, FOLDER "/actor", "");
    model_write(&m->reference, FOLDER "/other", "");
    model_write(&m->critic, FOLDER "/critic", "");
    model_write(&m->reward, FOLDER "/reward", moments);
}

static void ppo_models_free(ppo_models *m) {
    free(m->actor.p);
    free(m->reference.p);
    free(m->critic.p);
    free(m->reward.p);
}

/* The trainer's own column of the rollout against what is worked out apart. */
static void expect_column(const experience *e, int column, const double *want,
                          const char *what) {
    for (int64_t k = 0; k < e->ends[TEXTS]; k++)
        test_expect(near(e->rollout->entry[k * ENTRY + column], want[k], exact),
                    "%s of token %d is %.12g, not %.12g", what, (int)k,
                    e->rollout->entry[k * ENTRY + column], want[k]);
}

static void expect_rollout(const experience *e) {
    for (int64_t i = 0; i < TEXTS; i++)
        test_expect(near(e->rollout->score[i], e->score[i], exact),
                    "reward %d is %.12g, not %.12g", (int)i, e->rollout->score[i], e->score[i]);
    expect_column(e, OLD_LOGP, e->old, "log-prob");
    expect_column(e, REF_LOGP_OF, e->ref, "the reference's log-prob");
    expect_column(e, KL, e->kl, "KL");
    expect_column(e, REWARD, e->reward, "reward");
    expect_column(e, ADVANTAGE, e->advantage, "advantage");
    double seen = slow_mean(e->ends[TEXTS], e->kl);
    double coef = e->how->target > 0 ? slow_adaptive_kl(e->how->coef, seen, e->how->target,
                                                        TEXTS, e->how->horizon)
                                     : slow_fixed_kl(e->how->coef, seen);
    test_expect(near(e->rollout->coef, coef, exact), "the next coefficient is %.12g, not %.12g",
                e->rollout->coef, coef);
    if (!is_one_of(e->how->estimator, "gae")) return;
    expect_column(e, VALUE, e->value, "value");
    expect_column(e, RETURN, e->back, "return");
}

/* The last update of x, from where `before` stood. */
static void expect_update(experience *e, const ppo_models *m, const run *x, const double *actor,
                          const double *critic, double factor) {
    const rollout_seen *seen = &x->rollout;
    static const int columns[] = {LOSS_OF, ENTROPY_OF, KL_OF, PRETRAINING_LOSS};
    slow_value_of(actor_value, e, m->actor.count, actor);
    for (int i = 0; i < 4; i++)
        test_expect(near(seen->policy[columns[i]], e->loss[i], exact),
                    "figure %d of the actor is %.12g, not %.12g", i, seen->policy[columns[i]],
                    e->loss[i]);
    expect_gradient(&m->actor, actor_value, e, actor, x->step[0].params, e->how->rate * factor,
                    exact);
    test_expect(near(seen->balance, e->balance, exact),
                "the actor's balance loss is %.12g, not %.12g", seen->balance, e->balance);
    if (!is_one_of(e->how->estimator, "gae")) return;
    double value = slow_value_of(critic_value, e, m->critic.count, critic) - e->critic_balance;
    test_expect(near(seen->value[LOSS_OF], value, exact),
                "the critic's loss is %.12g, not %.12g", seen->value[LOSS_OF], value);
    test_expect(near(seen->critic_balance, e->critic_balance, exact),
                "the critic's balance loss is %.12g, not %.12g", seen->critic_balance,
                e->critic_balance);
    expect_gradient(&m->critic, critic_value, e, critic, x->step[0].critic, factor, exact);
}

/* The second update is where ratios are not 1: a run of one says where it begins. */
static void test_ppo(ppo_case c) {
    char line[2048], moments[128];
    bool gae = is_one_of(c.estimator, "gae");
    ppo_models m;
    experience e;
    run first, second;
    snprintf(moments, sizeof moments, "\"mean\": %.17g, \"std\": %.17g, ", c.mean, c.std);
    ppo_models_write(&m, &c, c.std < 1 || c.std > 1 ? moments : "");
    ppo_line(line, c.options, 1);
    if (run_with(&first, PPO, &m.actor, gae ? &m.critic : NULL, line)) {
        experience_make(&e, &c, &first.rollout, &m.actor, &m.reference, &m.critic, &m.reward);
        expect_rollout(&e);
        expect_update(&e, &m, &first, m.actor.p, m.critic.p, 1);
    }
    ppo_line(line, c.options, 2);
    if (!test_why[0] && c.updates > 1 &&
        run_with(&second, PPO, &m.actor, gae ? &m.critic : NULL, line)) {
        e.rollout = &second.rollout;
        expect_rollout(&e);
        expect_update(&e, &m, &second, first.step[0].params, first.step[0].critic, c.later);
        run_free(&second);
    }
    run_free(&first);
    ppo_models_free(&m);
    test_end("absolute_ppo %s", c.options);
}

/* The critic goes a way of its own, the actor another. */
static void test_critic(const char *options, way w) {
    char line[2048], all[1024];
    ppo_models m;
    experience e;
    run x;
    path t = {0};
    ppo_models_write(&m, &ppo_usual, "");
    bool *live = (bool *)demo_alloc(m.critic.count, sizeof *live);
    snprintf(all, sizeof all,
             "--optim adamw --max_norm 1 --adam_betas 0.9,0.95 --critic_learning_rate %.17g %s",
             w.rate, options);
    ppo_line(line, all, (int)w.steps);
    if (run_with(&x, PPO, &m.actor, &m.critic, line)) {
        ppo_case usual = ppo_usual;
        experience_make(&e, &usual, &x.rollout, &m.actor, &m.reference, &m.critic, &m.reward);
        for (int64_t k = 0; k < m.critic.count; k++)
            live[k] = k >= tall.vocab * tall.hidden &&
                      k < m.critic.count - (tall.vocab - 1) * tall.hidden;
        for (int64_t i = 0; i < TEXTS; i++)
            for (int64_t k = 0; k < e.rollout->texts[i].tokens; k++)
                memset(live + e.rollout->texts[i].ids[k] * tall.hidden, 1, (size_t)tall.hidden);
        path_open(&t, &m.critic);
        t.live = live;
        for (int64_t s = 0; s < w.steps; s++) path_step(&t, &m.critic, &w, critic_value, &e, s);
        expect_params(&m.critic, x.step[0].critic, t.p, along, "the critic");
        free(t.p);
    }
    free(live);
    run_free(&x);
    ppo_models_free(&m);
    test_end("absolute_critic %s", options);
}

/* The actor stands still in so many rollouts, all updates of each. */
static void test_freezing(int rollouts, int episodes, bool learns) {
    char line[2048], all[256];
    ppo_models m;
    run x;
    ppo_models_write(&m, &ppo_usual, "");
    snprintf(all, sizeof all, "--freezing_actor_steps %d --num_episodes %d", rollouts,
             episodes);
    ppo_line(line, all, 2);
    if (run_with(&x, PPO, &m.actor, &m.critic, line)) {
        test_expect(x.steps == episodes, "%d rollouts, not %d", (int)x.steps, episodes);
        double moved = test_distance(x.step[episodes - 1].params, m.actor.p, m.actor.count);
        double critic = test_distance(x.step[0].critic, m.critic.p, m.critic.count);
        test_expect(learns == (moved > 0), "the actor moved by %g", moved);
        test_expect(critic > 0, "the critic stood still");
        double before = episodes > 1 ? test_distance(x.step[0].params, m.actor.p, m.actor.count)
                                     : 0;
        test_expect(!(before > 0), "in the first rollout it moved by %g", before);
    }
    run_free(&x);
    ppo_models_free(&m);
    test_end("absolute_freezing %s", all);
}

static void test_ppo_all(void) {
    ppo_case u = ppo_usual;
#define CASE(options_, change) (u = ppo_usual, u.options = options_, change, test_ppo(u))
    TEST(CASE("", u.updates = 2));
#define PPO_SPLIT "--world_size 2 --gradient_accumulation_steps 2 --micro_train_batch_size 2"
    TEST(CASE(PPO_SPLIT, u.updates = 2));
    TEST(CASE("--data_parallel_size 2 --packing_samples --pack_len 30", u.updates = 2));
    TEST(CASE("--gamma 0.8 --lambd 0.6", (u.gamma = .8, u.lambda = .6)));
    TEST(CASE("--init_kl_coef 0.3", u.coef = .3));
    TEST(CASE("--init_kl_coef 0.3 --kl_estimator k2", (u.coef = .3, u.kl = slow_k2)));
    TEST(CASE("--init_kl_coef 0.3 --kl_estimator k3", (u.coef = .3, u.kl = slow_k3)));
    TEST(CASE("--init_kl_coef 0.3 --use_kl_estimator_k3", (u.coef = .3, u.kl = slow_k3)));
    TEST(CASE("--init_kl_coef 0.3 --use_kl_loss",
              (u.coef = .3, u.kl_loss = true, u.updates = 2)));
    TEST(CASE("--init_kl_coef 0.3 --use_kl_loss --kl_estimator k2",
              (u.coef = .3, u.kl_loss = true, u.kl = slow_k2, u.updates = 2)));
    TEST(CASE("--entropy_loss_coef 0.2", (u.entropy = .2, u.updates = 2)));
    TEST(CASE("--eps_clip 0.05", (u.clip.clip_low = u.clip.clip_high = .05, u.updates = 2)));
    TEST(CASE("--eps_clip_low_high 0.03,0.09",
              (u.clip.clip_low = .03, u.clip.clip_high = .09, u.updates = 2)));
    TEST(CASE("--dual_clip 1.1 --actor_learning_rate 4",
              (u.clip.dual_clip = 1.1, u.rate = 4, u.updates = 2)));
    TEST(CASE("--value_clip 0.05", (u.value_clip = .05, u.updates = 2)));
    TEST(CASE("--temperature 0.7", (u.temperature = .7, u.updates = 2)));
    TEST(CASE("--reward_clip_range -0.1,0.2", (u.low = -.1, u.high = .2)));
    TEST(CASE("--init_kl_coef 0.3 --kl_target 1.9 --kl_horizon 50",
              (u.coef = .3, u.target = 1.9, u.horizon = 50)));
    TEST(CASE("--init_kl_coef 0.3 --kl_target 100", (u.coef = .3, u.target = 100)));
    TEST(CASE("--overlong_buffer_len 3 --overlong_penalty_factor 0.5",
              (u.buffer = 3, u.penalty = .5)));
    TEST(CASE("--overlong_buffer_len 2", (u.buffer = 2, u.penalty = 1)));
    TEST(CASE("--reward.stop_properly_penalty_coef 0.3", u.stop = .3));
    TEST(CASE("--reward.stop_properly_penalty_coef -0.4", u.stop = -.4));
    TEST(CASE("--lr_scheduler linear", (u.later = .5, u.updates = 2)));
    TEST(CASE("--lr_scheduler cosine_with_min_lr --min_lr_ratio 0.3",
              (u.later = .3 + .7 * .5, u.updates = 2)));
    TEST(CASE("--no_advantage_std_norm", u.mean_only = true));
    TEST(CASE("--normalize_reward", (u.mean = .3, u.std = 2.5)));
    TEST(CASE("--advantage_estimator reinforce --gamma 0.8",
              (u.estimator = "reinforce", u.gamma = .8)));
    TEST(CASE("--advantage_estimator rloo", u.estimator = "rloo"));
    TEST(CASE("--advantage_estimator reinforce_baseline", u.estimator = "reinforce_baseline"));
    TEST(CASE("--advantage_estimator group_norm", u.estimator = "group_norm"));
    TEST(CASE("--advantage_estimator dr_grpo", u.estimator = "dr_grpo"));
    TEST(CASE("--advantage_estimator group_norm --policy_loss_type gspo --init_kl_coef 0",
              (u.estimator = "group_norm", u.coef = 0, u.gspo = true, u.updates = 2)));
#define TRL "--loss_definition trl --advantage_estimator "
    TEST(CASE(TRL "group_norm", (u.estimator = "group_norm", u.eps = 1e-4, u.updates = 2)));
    TEST(CASE(TRL "dr_grpo --init_kl_coef 0.3 --use_kl_loss --kl_estimator k3",
              (u.estimator = "dr_grpo", u.over = SEQPAR_AGGREGATE_SEQUENCE_SUM_NORM,
               u.coef = .3, u.kl = slow_k3, u.kl_loss = true, u.updates = 2)));
    TEST(CASE(TRL "gae", (u.unbiased = true, u.updates = 2)));
    tall.untaught = prompt_text(0).ids[0] + 1; /* of actor and critic */
    TEST(CASE(TRL "gae --gamma 1", (u.unbiased = true, u.updates = 2)));
    tall.untaught = 0;
    TEST(CASE("--loss_definition llamafactory " PPO_SPLIT, (u.unbiased = true, u.updates = 2)));
    TEST(CASE("--loss_definition openrlhf --loss_agg_mode seq-mean-token-mean --init_kl_coef "
              "0.3 --use_kl_loss --entropy_loss_coef 0.2",
              (u.over = SEQPAR_AGGREGATE_SEQUENCE_MEAN, u.coef = .3, u.kl_loss = true,
               u.entropy = .2, u.kl_limit = 10, u.added_by_tokens = true, u.updates = 2)));
#define MIXTRALS (u.actor_experts = u.critic_experts = true)
    TEST(CASE("--aux_loss_coef 0", MIXTRALS));
    TEST(CASE("--aux_loss_coef 0.3", (MIXTRALS, u.balance = .3, u.updates = 2)));
    TEST(CASE("--aux_loss_coef 0.7 " PPO_SPLIT,
              (u.critic_experts = true, u.balance = .7, u.updates = 2)));
    TEST(CASE("--aux_loss_coef 0.7 --data_parallel_size 2 --micro_train_batch_size 1",
              (MIXTRALS, u.balance = .7, u.updates = 2)));
    TEST(test_freezing(0, 1, true));
    TEST(test_freezing(1, 1, false));
    TEST(test_freezing(1, 2, true));
    TEST(test_freezing(2, 2, false));
    TEST(test_critic("", WAY(SLOW_CONSTANT, 3)));
    TEST(test_critic(
        "--critic.adam.betas 0.7,0.8 --critic.adam.eps 0.05 --critic.adam.weight_decay 3 --critic.max_norm 0.3",
        WAY(SLOW_CONSTANT, 2, .adamw = {.7, .8, .05, 3}, .max_norm = .3)));
    TEST(test_critic(
        "--critic.optim sgd --critic.lr_scheduler linear --critic.lr_warmup_ratio 0.3",
        WAY(SLOW_LINEAR, 3, .schedule = {SLOW_LINEAR, 1, 3, 0}, .sgd = true)));
    TEST(test_critic("--critic.lr_scheduler cosine_with_min_lr --critic.min_lr_ratio 0.4",
                     WAY(SLOW_COSINE, 3, .schedule = {SLOW_COSINE_WITH_MIN_LR, 0, 3, .4})));
    TEST(CASE("--pretrain_data " FOLDER "/ptx.jsonl --ptx_coef 0.4",
              (u.ptx = .4, u.updates = 2)));
    TEST(CASE("--pretrain_data " FOLDER "/ptx.jsonl --packing_samples --pack_len 48",
              (u.ptx = .05, u.updates = 2)));
}

/* ---- types: what is rounded ---- */

/* To the nearest bf16, and of two to the even one; moved by so many of its steps away from 0. */
static double bf16_of(double x, int steps) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    bits += 0x7FFF + (bits >> 16 & 1);
    bits = ((bits >> 16) + (uint32_t)steps) << 16;
    memcpy(&f, &bits, 4);
    return f;
}

static bool type_run(run *x, const model *m, const char *options) {
    char line[1024];
    model_write(m, FOLDER "/model", "");
    snprintf(line, sizeof line,
             "--lr_scheduler constant --dataset " FOLDER "/sft.jsonl --pretrain " FOLDER
             "/model --train_batch_size %d %s",
             DOCUMENTS, options);
    return run_with(x, SFT, m, NULL, line);
}

/* Weights are rounded as they are read; sums are not. */
static void test_bf16(const char *options) {
    model m = model_new(small, NULL, 1);
    sft_loss loss = {.model = &m};
    char all[256];
    run x;
    snprintf(all, sizeof all, SGD "--max_epochs 1 %s", options);
    if (type_run(&x, &m, all)) {
        for (int64_t k = 0; k < m.count; k++) m.p[k] = bf16_of(m.p[k], 0);
        expect_params(&m, x.start, m.p, 0, "as they are read");
        double want = slow_value_of(sft_value, &loss, m.count, m.p);
        test_expect(near(x.step[0].loss, want, 0.02), "the loss is %.12g, not %.12g",
                    x.step[0].loss, want);
        double *g = (double *)demo_alloc(m.count, sizeof *g);
        slow_gradient_of(sft_value, &loss, m.count, m.p, g);
        double norm = slow_norm(m.count, g);
        test_expect(near(x.step[0].norm, norm, 0.05), "the norm is %.12g, not %.12g",
                    x.step[0].norm, norm);
        for (int64_t k = 0; k < m.count; k++) {
            double after = x.step[0].params[k];
            test_expect(!(after < bf16_of(after, 0)) && !(after > bf16_of(after, 0)),
                        "a weight is %.9g", after);
            /* a step of bf16 is 2^-8 to 2^-7 of a number */
            test_expect(fabs(after - (m.p[k] - g[k])) <= ldexp(fabs(after), -8) + 0.05 * norm,
                        "a weight is %.9g, not %.9g", after, m.p[k] - g[k]);
        }
        free(g);
    }
    run_free(&x);
    free(m.p);
    test_end("absolute_bf16 %s", options);
}

/* Updates are parts of a step of bf16: a weight stays, or goes one step the gradient's way, so often that all come as far
   as without rounding. */
static void test_chance(void) {
    model m = model_new(small, NULL, 1);
    sft_loss loss = {.model = &m};
    double far = 0, want = 0, variance = 0, rate = 0.01;
    int64_t moved = 0;
    run x;
    if (type_run(
            &x, &m,
            "--param_dtype bf16 --stochastic_rounding --optim sgd --max_norm 0 --learning_rate 0.01 --max_epochs 1")) {
        double *g = (double *)demo_alloc(m.count, sizeof *g);
        slow_gradient_of(sft_value, &loss, m.count, x.start, g);
        for (int64_t k = 0; k < m.count; k++) {
            double before = x.start[k], after = x.step[0].params[k];
            double step = bf16_of(before, (before > 0) == (g[k] < 0) ? 1 : -1) - before;
            double share = rate * fabs(g[k]) / fabs(step);
            if (share > 0.9 || !(fabs(before) > 0.01) || !(fabs(g[k]) > 1e-3)) continue;
            moved += fabs(after - before) > 0;
            test_expect(!(fabs(after - before) > 0) || near(after - before, step, 1e-6),
                        "a weight %g goes to %g; a step of bf16 is %g", before, after, step);
            far += (after - before) / step;
            want += share;
            variance += share * (1 - share);
        }
        test_expect(moved > 10 && want > 10, "%d weights have moved", (int)moved);
        test_expect(fabs(far - want) <= 4 * sqrt(variance) + 0.05 * want,
                    "%g steps of bf16 are gone, not %g +- %g", far, want, sqrt(variance));
        free(g);
    }
    run_free(&x);
    free(m.p);
    test_end("absolute_chance: %g steps of bf16 of %g", far, want);
}

/* Moments in 8 bits: the first step is AdamW's, which keeps none; later ones are near. */
static void test_eight(void) {
    model m = model_new(small, NULL, 1);
    sft_loss loss = {.model = &m};
    way w = {.adamw = {.9, .95, 1e-8, 0},
             .schedule = {SLOW_CONSTANT, 0, 3, 0},
             .rate = .01,
             .max_norm = 1,
             .steps = 3};
    double off[3] = {0}, size = 0;
    path t = {0};
    run x;
    path_open(&t, &m);
    if (type_run(&x, &m,
                 "--optim adamw_8bit --max_norm 1 --learning_rate 0.01 --max_epochs 3")) {
        for (int64_t s = 0; s < 3; s++) {
            path_step(&t, &m, &w, sft_value, &loss, s);
            for (int64_t k = size = 0; k < m.count; k++) {
                off[s] += pow(x.step[s].params[k] - t.p[k], 2);
                size += pow(t.p[k] - m.p[k], 2);
            }
            off[s] = sqrt(off[s] / size);
        }
        test_expect(off[0] <= along, "the first step is off by %g", off[0]);
        test_expect(off[1] > 1e-6 && off[1] < 0.1 && off[2] < 0.1,
                    "later steps are off by %g and %g", off[1], off[2]);
    }
    run_free(&x);
    free(t.p);
    free(m.p);
    test_end("absolute_eight: off by %.2g, %.2g, %.2g", off[0], off[1], off[2]);
}

/* ---- how many ranks are started ---- */

/* Each of two numbers alone may be wrong. */
static void test_world(void) {
    static const struct {
        int world, ring, dp; /* 0: is not said */
        int ranks;           /* 0: is refused */
    } cases[] = {{8, 2, 4, 8}, {8, 2, 2, 0}, {8, 2, 0, 8}, {7, 2, 0, 0},
                 {9, 2, 4, 0}, {2, 2, 0, 2}, {1, 2, 0, 0}, {6, 3, 1, 0},
                 {3, 3, 1, 3}, {4, 1, 5, 0}, {0, 3, 2, 6}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char line[256], said[256];
        int world = cases[i].world, ring = cases[i].ring, dp = cases[i].dp;
        run x;
        memset(&x, 0, sizeof x);
        snprintf(line, sizeof line,
                 "--ring_attn_size %d --world_size %d --data_parallel_size %d", ring, world,
                 dp);
        if (dp)
            snprintf(
                said, sizeof said,
                "world_size %d is not data_parallel_size %d x ring_attn_size %d; change one "
                "of them",
                world, dp, ring);
        else
            snprintf(said, sizeof said,
                     "world_size %d is no multiple of ring_attn_size %d; change one of them",
                     world, ring);
        test_expect(!run_parse(&x, SFT, line), "%s", x.error.text);
        int wrong = demo_job_world(&x.job, &x.error);
        test_expect(!!wrong == !cases[i].ranks, "%s is %s", line,
                    wrong ? x.error.text : "taken");
        test_expect(wrong || x.job.ranks == cases[i].ranks, "%s: %d ranks", line,
                    (int)x.job.ranks);
        test_expect(!wrong || !strcmp(x.error.text, said), "%s, not: %s", x.error.text, said);
    }
    test_end("absolute_world");
}

/* ---- what is read ---- */

/* The first number of a file, and the last, is NaN or infinite. */
static void test_not_finite(void) {
    static const double poison[] = {NAN, HUGE_VAL, -HUGE_VAL};
    for (int i = 0; i < 6; i++) {
        model m = model_new(small, NULL, 1);
        seqpar_safetensors_file *file = NULL;
        seqpar_error error = {0};
        float back[512];
        const slow_tensor *t = &m.table[m.tensors - 1]; /* lm_head.weight */
        int64_t count = t->rows * t->cols, at = i % 2 ? count - 1 : 0;
        seqpar_safetensors_part part = {"lm_head.weight", 0, count, 1};
        m.p[t->offset + at] = poison[i / 2];
        model_write(&m, FOLDER "/poison", "");
        seqpar_status status = seqpar_safetensors_open(
            &file, FOLDER "/poison/model.safetensors", &error);
        if (!status) status = seqpar_safetensors_read(file, back, &part, &error);
        char said[64];
        snprintf(said, sizeof said, "element %d of %d is NaN or Inf", (int)at, (int)count);
        test_expect(status == SEQPAR_ERR_NOT_FINITE && strstr(error.text, said),
                    "a number %d is %g: %s", (int)at, poison[i / 2], error.text);
        seqpar_safetensors_close(file);
        free(m.p);
    }
    test_end("absolute_not_finite");
}

/* ---- the table of options ---- */

/* Trainers that run here, and those that do not. */
enum { WALKED = TOOLS + 2 };
static const char *walked_name(int tool) {
    static const char *const others[WALKED - TOOLS] = {"kd", "prm"};
    return tool < TOOLS ? tool_names[tool] : others[tool - TOOLS];
}

/* What absolute.tsv says of an option of a trainer, or NULL; * is every option. */
static const char *reason_of(int tool, const char *name, char **lines) {
    for (int64_t i = 0; i < arrlen(lines); i++) {
        const char *tools = strchr(lines[i], '\t');
        size_t n = tools ? (size_t)(tools - lines[i]) : 0;
        bool any = n == 1 && *lines[i] == '*';
        if (!n || (!any && (strlen(name) != n || strncmp(name, lines[i], n)))) continue;
        const char *why = strchr(tools + 1, '\t');
        char list[64];
        snprintf(list, sizeof list, "%.*s", (int)(why ? why - tools - 1 : 0), tools + 1);
        if (why && strlen(why + 1) > 15 && demo_list_has(list, walked_name(tool)))
            return why + 1;
    }
    return NULL;
}

static char **reasons_read(void) {
    static char line[1024];
    char **lines = NULL;
    FILE *file = fopen("verify/tests/absolute.tsv", "rb");
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (*line && *line != '#') arrput(lines, strdup(line));
    }
    if (file) fclose(file);
    return lines;
}

/* By its own name or another one. */
static bool is_seen(int tool, const demo_known *known) {
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++)
        if (demo_known_target(&demo_known_options[i]) == known &&
            is_given(tool, demo_known_options[i].name))
            return true;
    return false;
}

/* Every option that changes weights has been seen here with numbers, or has a reason: one of the two. */
static void walk_options(void) {
    char **lines = reasons_read();
    int64_t used = 0, seen = 0, missing = 0;
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++)
        for (int tool = 0; tool < WALKED; tool++) {
            const demo_known *known = &demo_known_options[i];
            if (strcmp(known->role, "real") || !demo_list_has(known->tools, walked_name(tool)))
                continue;
            if (!demo_list_has("weights,text", known->there)) continue;
            bool here = tool < TOOLS && is_seen(tool, known);
            const char *why = reason_of(tool, known->name, lines);
            used += why != NULL;
            seen += here;
            missing += !here && !why;
            if (!here && !why)
                printf("# %s --%s has no number and no reason\n", walked_name(tool),
                       known->name);
            test_expect(here || why,
                        "train_%s --%s has no test with numbers, and absolute.tsv no reason",
                        walked_name(tool), known->name);
            test_expect(!here || !why, "train_%s --%s has a test; absolute.tsv says: %s",
                        walked_name(tool), known->name, why);
        }
    test_expect(seen > 100, "%d options are seen", (int)seen);
    for (int64_t i = 0; i < arrlen(lines); i++) free(lines[i]);
    arrfree(lines);
    test_end("absolute_options: %d with numbers, %d with a reason, %d without", (int)seen,
             (int)used, (int)missing);
}

int main(int argc, char **argv) {
    seqpar_error error = {0};
    test_begin(argc, argv);
    if (demo_make_folder(FOLDER, &error)) return fprintf(stderr, "%s\n", error.text), 2;
    sft_write();
    pairs_write();
    kto_write();
    prompts_write();
    TEST(test_world());
    test_words_all();
    TEST(test_not_finite());
    test_sft_all();
    test_dpo_all();
    test_ways();
    TEST(test_rm("", "score", false));
    TEST(test_rm("--value_head_prefix value_head", "value_head", false));
    TEST(test_rm(SPLIT, "score", false));
    TEST(test_rm(PACKED, "score", false));
    TEST(test_rm("--loss logexp", "score", false));
    TEST(test_rm("--margin_loss --margin_key far", "score", true));
    TEST(test_kto("--beta 0.2", (slow_kto){0.2, 1, 1}, 2));
    TEST(test_kto("--beta 0.2", (slow_kto){0.2, 1, 1}, 5));
    TEST(test_kto("--beta 0.2 " SPLIT, (slow_kto){0.2, 1, 1}, 2));
    TEST(test_kto("--beta 0.2 " PACKED, (slow_kto){0.2, 1, 1}, 2));
    TEST(test_kto("--beta 0.2 --desirable_loss_weight 1.7", (slow_kto){0.2, 1.7, 1}, 2));
    TEST(test_kto("--beta 0.2 --undesirable_loss_weight 0.6", (slow_kto){0.2, 1, 0.6}, 5));
    test_ppo_all();
    TEST(test_bf16("--param_dtype bf16"));
    TEST(test_bf16("--bf16 true"));
    TEST(test_chance());
    TEST(test_eight());
    if (!getenv("TEST_ONLY")) TEST(walk_options());
    return test_summary();
}
