/* SPDX-License-Identifier: MIT OR Unlicense */
/* The plain arithmetic of train_ppo: texts and answers of reward servers, what lengths cost,
 * which groups are kept, the stream of prompts, the derivatives of every loss by finite
 * differences; what is counted of held-out prompts, and what is freed. */
#pragma GCC diagnostic ignored "-Wunused-function" /* of a whole trainer a few functions are \
                                                      called */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include <malloc.h>
#include "seqpar_safetensors.h"
#include "trainer/ppo/ppo.h"
#include "support/test.h"
#include "trainer/base/escape.h"

/* of the library, which counts it under SEQPAR_COUNT_WORK */
extern __thread int64_t seqpar__work;

/* ---- what goes to a server and what comes back ---- */

static void test_texts(void) {
    static const struct {
        int32_t ids[8];
        int count;
        const char *want;
    } cases[] = {
        {{DEMO_BOS, 'a', 'b', DEMO_EOS, DEMO_PAD}, 5, "ab"},
        {{0}, 0, ""},
        {{0xC3, 0xA4}, 2, "\xC3\xA4"},
        {{0xC3, DEMO_EOS, 0xA4}, 3, "\xC3\xA4"},       /* special ids are left out before */
        {{0xC3}, 1, "\xEF\xBF\xBD"},                   /* broken off */
        {{0xA4, 'x'}, 2, "\xEF\xBF\xBDx"},             /* a continuation alone */
        {{0xC0, 0xAF}, 2, "\xEF\xBF\xBD\xEF\xBF\xBD"}, /* overlong */
        {{0xE0, 0x80, 0x80}, 3, "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
        {{0xED, 0xA0, 0x80}, 3, "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"}, /* a surrogate */
        {{0xE2, 0x82, 0xAC}, 3, "\xE2\x82\xAC"},
        {{0xF0, 0x9F, 0x98, 0x80}, 4, "\xF0\x9F\x98\x80"},
        {{0xF4, 0x90, 0x80, 0x80},
         4,
         "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"}, /* beyond
                                                                                              the
                                                                                              last
                                                                                              character
                                                                                            */
        {{0xFF, 0}, 2, "\xEF\xBF\xBD\xEF\xBF\xBD"},
        {{'a', 0, 'b'},
         3,
         "a\xEF\xBF\xBD"
         "b"}, /* zero would end the text */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const demo_words bytes = demo_words_of(NULL);
        char *got = demo_tokens_as_text(&bytes, cases[i].ids, cases[i].count);
        test_expect(!strcmp(got, cases[i].want), "case %d is '%s', not '%s'", (int)i, got,
                    cases[i].want);
        free(got);
    }
    test_end("server_texts");
}

/* By the words of a token file: a character may be several of them; special ones, and ids
   that the tokenizer does not have, are left out. */
static void test_words(void) {
    static const uint64_t offsets[] = {0, 3, 4, 6, 10};
    static const uint8_t flags[] = {0, 0, 0, 1};
    static const unsigned char map[64] = " 12\xE2\x82\xAC</s>";
    const demo_token_section where[] = {{.begin = 64, .bytes = sizeof offsets}, {.bytes = 10}};
    const demo_token_head head = {.words = 4};
    unsigned char *whole = (unsigned char *)demo_alloc(1, 64 + sizeof offsets);
    demo_token_file file = {.map = whole, .head = &head, .flags = flags};
    memcpy(whole, map, 64);
    memcpy(whole + 64, offsets, sizeof offsets);
    file.section[DEMO_WORD_OFFSETS] = &where[0];
    file.section[DEMO_WORDS] = &where[1];
    const demo_words words = {.file = &file};
    static const int32_t ids[] = {0, 1, 2, 3, 4, 1, 0, 3};
    char *text = demo_tokens_as_text(&words, ids, 8);
    test_expect(!strcmp(text, " 12\xE2\x82\xAC\xEF\xBF\xBD 12"), "'%s'", text);
    free(text);
    free(whole);
    test_end("server_words");
}

static void test_question(void) {
    char *query[] = {"2 + 3 = \"5\"\n", "b"}, *prompt[] = {"2 + 3 =", ""}, *label[] = {"5", ""};
    demo_reward_question question = {query, prompt, label, 2};
    char *text = demo_question_json(&question);
    test_expect(!strcmp(text, "{\"query\":[\"2 + 3 = \\\"5\\\"\\n\",\"b\"],\"prompts\":[\"2 + "
                              "3 =\",\"\"],\"labels\":[\"5\",\"\"]}"),
                "%s", text);
    cJSON_free(text);
    test_end("server_question");
}

static void test_answers(void) {
    static const struct {
        const char *answer, *wrong;
    } cases[] = {
        {"{\"rewards\": [1, -2.5e0]}", NULL},
        {" {\"logs\": {}, \"rewards\": [0, 0], \"x\": null}\n", NULL},
        {"{\"rewards\": [1]}", "1 rewards for 2 texts"},
        {"{\"rewards\": [1, 2, 3]}", "3 rewards for 2 texts"},
        {"{\"rewards\": []}", "0 rewards"},
        {"{\"rewards\": [1, null]}", "rewards[1] is null"},
        {"{\"rewards\": [\"1\", 2]}", "rewards[0] is text"},
        {"{\"rewards\": [1, [2]]}", "rewards[1] is a list"},
        {"{\"rewards\": [1, true]}", "rewards[1] is true or false"},
        {"{\"rewards\": [1, NaN]}", "not JSON from byte 16"},
        {"{\"rewards\": [1, -1e999]}", "rewards[1] is -inf"},
        {"{\"rewards\": 1}", "\"rewards\" is a number"},
        {"[1, 2]", "\"rewards\" is missing"},
        {"7", "\"rewards\" is missing"},
        {"", "(empty)"},
        {"<html>", "not JSON from byte 0"},
        {"{\"rewards\": [1, 2]", "not JSON from byte"},
        {"{\"rewards\": [1, 2]} \n", NULL},
        {"{\"rewards\": [1, 2]} x", "not JSON from byte 20 of 21 on: x; "},
        {"{\"rewards\": [1, 2], \"rewards\": [1, 2]}", "has the key \"rewards\" twice"},
        {"{\"rewards\": [1e100, -1e100]}", NULL},
        {"{\"rewards\": [1.1e100, 1]}", "rewards[0] is 1.1e+100"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double rewards[2] = {10, 10};
        demo_error error = {""};
        int failed = demo_answer_read(cases[i].answer, strlen(cases[i].answer), "http://x",
                                      rewards, 2, &error);
        test_expect(!!failed == !!cases[i].wrong &&
                        (!failed || strstr(error.text, cases[i].wrong)),
                    "%s gives '%s'", cases[i].answer, error.text);
        test_expect(!failed || !strncmp(error.text, "reward server http://x: ", 24),
                    "%s does not name the server: %s", cases[i].answer, error.text);
        if (!i)
            test_expect(rewards[0] == 11 && rewards[1] == 7.5, "rewards %g %g are not added",
                        rewards[0], rewards[1]);
    }
    test_end("server_answers");
}

static void test_addresses(void) {
#define PORT "whose port is no number from 1 to 65535"
#define NONE "which does not begin with http:// or https://; Python files"
    static const struct {
        const char *urls, *wrong; /* of the message; NULL: they are right */
    } cases[] = {{"http://a", NULL},
                 {"https://a/b?c,http://d:1/", NULL},
                 {"http://a:65535", NULL},
                 {"", "'', " NONE},
                 {"a", "'a', " NONE},
                 {"http://a,", "'', " NONE},
                 {"http://a,b.py", "'b.py', " NONE},
                 {"file:///x", "'file:///x', " NONE},
                 {",http://a", "'', " NONE},
                 {"http://a:0,http://b", "'http://a:0', " PORT},
                 {"http://a,http://me:key@b:65536", "'http://b:65536', " PORT},
                 {"http://a:x", "'http://a:x', " PORT},
                 {"http://a b", "'http://a b', which is no URL; give http://HOST:PORT/PATH"}};
#undef PORT
#undef NONE
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        demo_reward_servers servers = {.urls = cases[i].urls};
        demo_error error = {""};
        char begins[300];
        int wrong = demo_servers_check(&servers, &error);
        snprintf(begins, sizeof begins, "remote_rm_url holds %s",
                 cases[i].wrong ? cases[i].wrong : "");
        test_expect(!wrong == !cases[i].wrong &&
                        (!wrong || !strncmp(error.text, begins, strlen(begins))),
                    "'%s': %s", cases[i].urls, error.text);
    }
    test_end("server_addresses");
}

/* ---- rewards ---- */

static void test_last_number(void) {
    static const struct {
        const char *text, *number;
    } cases[] = {{"The answer is 42.", "42"},
                 {"7", "7"},
                 {"3 + 4 = 7. no", "7"},
                 {"none", ""},
                 {"", ""},
                 {"12a", "12"},
                 {"0012", "0012"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t length;
        const char *begin = demo_last_number(cases[i].text, &length);
        test_expect(length == (int64_t)strlen(cases[i].number) &&
                        !strncmp(begin, cases[i].number, (size_t)length),
                    "'%s': %lld digits from %d on", cases[i].text, (long long)length,
                    (int)(begin - cases[i].text));
    }
    static const struct {
        const char *text, *answer;
        int same;
    } pairs[] = {{"so 42", "is 42.", 1}, {"42", "is 42", 1},   {"so 43", "is 42", 0},
                 {"so 42", "is 4", 0},   {"so 4", "is 42", 0}, {"none", "none", 0},
                 {"", "7", 0},           {"42 7", "7 42", 0}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        test_expect(!demo_same_number(pairs[i].text, pairs[i].answer) == !pairs[i].same,
                    "'%s' and '%s'", pairs[i].text, pairs[i].answer);
    test_end("rule_last_number");
}

static void test_lengths(void) {
    static const struct {
        double buffer, factor, coef, score;
        int64_t tokens;
        bool cut;
        double want;
    } cases[] = {{0, 1, 1, 3, 100, true, 3},       {0, 1, 1, 3, 100, false, 3},
                 {20, 2, 1, 3, 80, false, 3},      {20, 2, 1, 3, 85, false, 2.5},
                 {20, 2, 1, 3, 100, false, 1},     {20, 2, 1, 3, 1, false, 3},
                 {100, 1, 1, 0, 25, false, -0.25}, {2.5, 1, 1, 0, 99, false, -0.6},
                 {0, 1, 0.5, 3, 100, true, 1.5},   {0, 1, 0.5, 3, 100, false, 3},
                 {0, 1, 0, 3, 100, true, 0},       {0, 1, -2, 3, 100, true, -2},
                 {0, 1, -2, 3, 100, false, 3},     {20, 2, 0.5, 3, 100, true, 0.5},
                 {0.5, 2, 1, 3, 100, false, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        demo_ppo_config c = {.generate_max_len = 100,
                             .overlong_buffer_len = cases[i].buffer,
                             .overlong_penalty_factor = cases[i].factor,
                             .stop_properly_penalty_coef = cases[i].coef};
        double got = demo_length_penalty(&c, cases[i].score, cases[i].tokens, cases[i].cut);
        test_expect(fabs(got - cases[i].want) < 1e-12, "case %d gives %g, not %g", (int)i, got,
                    cases[i].want);
    }
    test_end("reward_lengths");
}

static void test_groups(void) {
    static const struct {
        double scores[4], range[2];
        bool kept;
    } cases[] = {{{0, 0, 0, 0}, {0, 1}, false},
                 {{1, 1, 1, 1}, {0, 1}, false},
                 {{0, 0, 1, 0}, {0, 1}, true},
                 {{1, 1, 0, 1}, {0, 1}, true},
                 {{0.1, 0.1, 0.1, 0.1}, {0.1, 1}, false},
                 {{-1, 3, 0, 0}, {0, 1}, true},
                 {{2, 2, 2, 2}, {-1, 3}, true},
                 {{1.5e-6, 1.5e-6, 1.5e-6, 1.5e-6}, {0, 1}, true},
                 {{5e-7, 5e-7, 5e-7, 5e-7}, {0, 1}, false},
                 {{1 - 1.5e-6, 1 - 1.5e-6, 1 - 1.5e-6, 1 - 1.5e-6}, {0, 1}, true},
                 {{1 - 5e-7, 1 - 5e-7, 1 - 5e-7, 1 - 5e-7}, {0, 1}, false},
                 {{0.5, 0.5, 0.5, 0.5}, {0, 0.5 + 1e-6}, false}, /* at the bound to the bit */
                 {{0.5, 0.5, 0.5, 0.5}, {0.5 - 1e-6, 1}, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        test_expect(demo_group_selected(cases[i].scores, 4, cases[i].range) == cases[i].kept,
                    "case %d", (int)i);
    test_end("groups_kept");
}

/* ---- the stream of prompts ---- */

static void test_stream(void) {
    enum { SET = 23, BATCH = 5, SPAN = 20, PASSES = 4 };
    int64_t *all = demo_stream(SET, BATCH, 3, 0, PASSES * SPAN), changed = 0;
    for (int64_t pass = 0; pass < PASSES; pass++) {
        int seen[SET] = {0};
        for (int64_t i = 0; i < SPAN; i++)
            test_expect(all[pass * SPAN + i] >= 0 && all[pass * SPAN + i] < SET &&
                            !seen[all[pass * SPAN + i]]++,
                        "pass %lld, place %lld", (long long)pass, (long long)i);
        for (int64_t i = 0; pass && i < SPAN; i++) changed += all[i] != all[pass * SPAN + i];
    }
    test_expect(changed > SPAN, "the passes are alike");
    for (int64_t first = 0; first < PASSES * SPAN - 7; first += 3) { /* however it is cut */
        int64_t *part = demo_stream(SET, BATCH, 3, first, 7);
        test_expect(!memcmp(part, all + first, 7 * sizeof *part), "places %lld to %lld",
                    (long long)first, (long long)first + 6);
        free(part);
    }
    free(all);
    test_end("stream");
}

/* ---- derivatives ---- */

static double apart(double a, double b) { return fabs(a - b) / (1.0 + fabs(b)); }

/* Training's documents: those of the epoch's shuffle, which is made once an epoch and not
   once a step. */
static void test_step_documents(void) {
    enum { UNITS = 41, PAIRS = 2, EPOCHS = 3 };
    int64_t usable[UNITS], order[UNITS], step, i;
    demo_objective objective = {.documents_per_unit = PAIRS};
    demo_job job = {.objective = &objective, .usable = usable, .usable_count = UNITS};
    demo_rank r = {.job = &job};
    job.config.train_batch_size = 4;
    job.config.seed = 11;
    for (i = 0; i < UNITS; i++) usable[i] = 3 * i + 1;
    seqpar__work = 0;
    for (step = 0; step < EPOCHS * 10; step++) {
        int64_t *which = demo_step_documents(&r, step);
        test_expect(seqpar__work <= (1 + step / 10) * UNITS,
                    "%lld places shuffled by step %lld", (long long)seqpar__work,
                    (long long)step);
        i = seqpar__work;
        seqpar_shuffle(order, UNITS, 11, (uint64_t)(step / 10));
        seqpar__work = i;
        test_expect(arrlen(which) == 4 * PAIRS, "%lld documents", (long long)arrlen(which));
        for (i = 0; i < arrlen(which); i++)
            test_expect(which[i] ==
                            usable[order[step % 10 * 4 + i / PAIRS]] * PAIRS + i % PAIRS,
                        "step %lld, place %lld", (long long)step, (long long)i);
        arrfree(which);
    }
    free(r.order);
    test_end("step_documents");
}

static void test_gspo(void) {
    const seqpar_policy_desc clip = {0.2, 0.3, 3.0};
    double entries[9 * ENTRY] = {0}, clipped = 0;
    for (int n = 1; n <= 9; n++)
        for (int trial = 0; trial < 200; trial++) {
            double change = 2.0 * test_normal(), h = 1e-5 * n;
            for (int t = 0; t < n; t++)
                entries[t * ENTRY + ADVANTAGE] = trial % 2 ? test_normal() : 0.7 - (trial % 4);
            demo_text_loss at = demo_gspo_loss(entries, n, change, &clip),
                           up = demo_gspo_loss(entries, n, change + h, &clip),
                           down = demo_gspo_loss(entries, n, change - h, &clip);
            double ratio = exp(change / n), edges[] = {0.8, 1.3, 3.0};
            bool near = false; /* a kink */
            for (int k = 0; k < 3; k++) near = near || fabs(ratio - edges[k]) < 1e-3;
            test_expect(near || apart((up.loss - down.loss) / (2 * h) * n, at.slope) < 1e-6,
                        "n %d, change %g: slope %g, differences give %g", n, change, at.slope,
                        (up.loss - down.loss) / (2 * h) * n);
            if (trial % 2 == 0) { /* one advantage: the formula of the paper */
                seqpar_policy_result p = seqpar_policy_loss(change / n, 0, entries[ADVANTAGE],
                                                            &clip);
                test_expect(apart(at.loss, p.loss) < 1e-14 && apart(at.slope, p.dlogp) < 1e-14,
                            "n %d: loss %g, not %g", n, at.loss, p.loss);
            }
            clipped += at.clipped;
        }
    test_expect(clipped > 0, "nothing was clipped");
    test_end("gspo_derivative");
}

/* A rollout of two texts, a window of them and one pretraining document, and an update of it
   without ranks. */
typedef struct {
    demo_ppo_config options;
    demo_job job;
    demo_rank rank;
    demo_ppo own;
    seqpar_llama model;
    demo_window window;
    demo_update update;
    int64_t first[2], prompt[2];
    double entry[5 * ENTRY];
} fixture;

static void fixture_new(fixture *f, bool critic) {
    memset(f, 0, sizeof *f);
    f->options = (demo_ppo_config){.kl_estimator = "k3",
                                   .policy_loss_type = "ppo",
                                   .use_kl_loss = true,
                                   .entropy_loss_coef = 0.3,
                                   .eps_clip = 0.2,
                                   .eps_clip_low_high = {0.1, 0.4},
                                   .value_clip = 0.5,
                                   .ptx_coef = 0.7};
    f->job.options = &f->options;
    f->rank.job = &f->job;
    f->rank.own = &f->own;
    f->own.kl.coef = 0.2;
    f->own.rollout = (demo_rollout){
        .prompt = f->prompt, .first = f->first, .texts = 2, .entries = 5, .entry = f->entry};
    f->first[1] = 2;
    for (int i = 0; i < 5 * ENTRY; i++) f->entry[i] = 0.5 * test_normal();
    if (critic) f->model.config.score = "score";
    for (int64_t i = 0; i < 3; i++) arrput(f->window.which, i);
    f->window.batch.counts.supervised = 5 + 4;
    f->update = (demo_update){.r = &f->rank, .w = &f->window, .model = &f->model};
    demo_update_counts(&f->update);
}

/* Sum of the columns that the step's gradient is of. */
static double fixture_loss(const fixture *f, demo_prediction place, double x, double entropy) {
    double columns[UPDATE_COLUMNS] = {0}, seed[2] = {0};
    demo_token_seed(&f->update, place, x, entropy, columns, seed);
    return columns[LOSS_OF] + f->options.ptx_coef * columns[PRETRAINING_LOSS];
}

static void fixture_differences(const fixture *f, demo_prediction place, double x,
                                double entropy, const char *what) {
    const double h = 1e-6;
    double columns[UPDATE_COLUMNS] = {0}, seed[2] = {0};
    demo_token_seed(&f->update, place, x, entropy, columns, seed);
    double by_x = (fixture_loss(f, place, x + h, entropy) -
                   fixture_loss(f, place, x - h, entropy)) /
                  (2 * h);
    double by_entropy = (fixture_loss(f, place, x, entropy + h) -
                         fixture_loss(f, place, x, entropy - h)) /
                        (2 * h);
    test_expect(apart(seed[0], by_x) < 1e-6, "%s: seed %g, differences give %g", what, seed[0],
                by_x);
    test_expect(apart(seed[1], by_entropy) < 1e-6,
                "%s: seed of the entropy %g, differences give %g", what, seed[1], by_entropy);
}

static void test_seeds(void) {
    fixture f;
    for (int trial = 0; trial < 100; trial++) {
        fixture_new(&f, trial % 2);
        test_expect(f.update.aggregate.tokens == 5 && f.update.aggregate.documents == 2 &&
                        f.update.pretraining == 4,
                    "counts %lld, %lld, %lld", (long long)f.update.aggregate.tokens,
                    (long long)f.update.aggregate.documents, (long long)f.update.pretraining);
        for (int64_t entry = 0; entry < 5; entry++)
            fixture_differences(&f, (demo_prediction){entry >= 2, entry}, 0.5 * test_normal(),
                                1.5, trial % 2 ? "value" : "policy");
        fixture_differences(&f, (demo_prediction){2, 0}, -1.5, 0.5, "pretraining");
        fixture_differences(&f, (demo_prediction){-1, -1}, -1.5, 0.5, "prompt");
        arrfree(f.window.which);
    }
    test_end("seeds_derivative");
}

/* GSPO's tokens share one loss: the text's, and its texts count alike whatever their
   lengths. */
static void test_gspo_weights(void) {
    fixture f;
    double sum = 0;
    fixture_new(&f, false);
    f.options.policy_loss_type = "gspo";
    f.options.entropy_loss_coef = 0;
    f.options.use_kl_loss = false;
    demo_update_counts(&f.update);
    test_expect(f.update.text != NULL, "no losses of texts");
    f.update.text[0] = (demo_text_loss){3, 5, 0};
    f.update.text[1] = (demo_text_loss){7, 11, 1};
    for (int64_t entry = 0; entry < 5; entry++) {
        double columns[UPDATE_COLUMNS] = {0}, seed[2] = {0};
        demo_token_seed(&f.update, (demo_prediction){entry >= 2, entry}, -1, 2, columns, seed);
        sum += columns[LOSS_OF];
        test_expect(apart(seed[0], entry >= 2 ? 11.0 / (2 * 3) : 5.0 / (2 * 2)) < 1e-15,
                    "entry %lld: seed %g", (long long)entry, seed[0]);
    }
    test_expect(apart(sum, (3.0 + 7.0) / 2) < 1e-15, "loss %g is not the mean over texts", sum);
    free(f.update.text);
    arrfree(f.window.which);
    test_end("gspo_weights");
}

/* ---- advantages ---- */

static bool alike(const double *a, const double *b, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!(apart(a[i], b[i]) < 1e-12)) return false;
    return true;
}

/* Moved by the share of its target that the KL is off, by at most a fifth. */
static void test_kl_controller(void) {
    static const double cases[][4] = {
        /* target, KL, texts, factor */
        {0, 3, 10, 1},    {-1, 3, 10, 1},  {2, 2.2, 10, 1.025}, {2, 1.8, 10, 0.975},
        {2, 9, 10, 1.05}, {2, 0, 20, 0.9}, {0.5, 0.5, 10, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kl_controller c = {0.5, cases[i][0], 40};
        kl_controller_update(&c, cases[i][1], (int64_t)cases[i][2]);
        test_expect(apart(c.coef, 0.5 * cases[i][3]) < 1e-14 && c.horizon == 40,
                    "case %d: %.17g", (int)i, c.coef);
    }
    test_end("kl_controller");
}

static void test_shaped(void) {
    static const double kl[] = {1, 2, 4, 9};
    static const struct {
        double coef, score;
        int64_t count;
        double want[4];
    } cases[] = {{0.5, 3, 3, {-0.5, -1, 1, 7}},   {0.5, 11, 3, {-0.5, -1, 3, 7}},
                 {0.5, -7, 3, {-0.5, -1, -4, 7}}, {0, 3, 3, {0, 0, 3, 7}},
                 {-1, 3, 2, {0, 3, 7, 7}},        {0.5, 3, 1, {2.5, 7, 7, 7}},
                 {0.5, 3, 0, {7, 7, 7, 7}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double rewards[4] = {7, 7, 7, 7};
        const reward_shape shape = {cases[i].coef, -2, 5};
        shaped_rewards(rewards, kl, cases[i].count, cases[i].score, &shape);
        test_expect(alike(rewards, cases[i].want, 4), "case %d: %g %g %g %g", (int)i,
                    rewards[0], rewards[1], rewards[2], rewards[3]);
    }
    test_end("shaped_rewards");
}

/* By hand: gamma 1/2, lambda 1/4; without values lambda is 1. */
static void test_gae(void) {
    static const double rewards[] = {1, 2, 4}, values[] = {10, 20, 40};
    static const double want[2][2][3] = {{{0.6875, -2.5, -36}, {10.6875, 17.5, 4}},
                                         {{3, 4, 4}, {3, 4, 4}}};
    const gae_desc d = {0.5, 0.25};
    for (int without = 0; without < 2; without++) {
        double advantages[3], returns[3];
        gae(advantages, returns, rewards, without ? NULL : values, 3, &d);
        test_expect(alike(advantages, want[without][0], 3) &&
                        alike(returns, want[without][1], 3),
                    "%s values: %g %g %g", without ? "without" : "with", advantages[0],
                    advantages[1], advantages[2]);
    }
    test_end("gae");
}

static void test_compared(void) {
    static const double rewards[] = {1, 2, 6};
    static const int kinds[] = {ADVANTAGE_GRPO, ADVANTAGE_MEAN, ADVANTAGE_RLOO};
    const double scale[] = {1 / (sqrt(7) + 0.5), 1, 1.5};
    for (int k = 0; k < 3; k++) {
        seqpar_error error = {0};
        double got[3] = {0}, want[] = {-2 * scale[k], -1 * scale[k], 3 * scale[k]};
        test_expect(!group_advantages(&error, got, rewards, 3, kinds[k], 0.5) &&
                        alike(got, want, 3),
                    "kind %d: %g %g %g", k, got[0], got[1], got[2]);
        test_expect(!group_advantages(&error, got, rewards, 2, kinds[k], 0.5), "a pair");
        test_expect(group_advantages(&error, got, rewards, 1, kinds[k], 0.5) ==
                            SEQPAR_ERR_OPTION &&
                        !strcmp(error.text, "a group has 1 responses, but the advantage "
                                            "compares at least 2; raise n_samples_per_prompt"),
                    "%s", error.text);
    }
    test_end("group_advantages");
}

/* By the deviation of all of them, or of one less; one that is nearly 0 is bounded. */
static void test_whitened(void) {
    static const double x[2][3] = {{1, 2, 6}, {0, 1e-5, 5e-6}};
    static const int how[] = {WHITEN_POPULATION, WHITEN_UNBIASED, WHITEN_MEAN_ONLY};
    const double scale[2][3] = {{1 / sqrt(14.0 / 3), 1 / sqrt(7 + 1e-8), 1},
                                {1e4, 1 / sqrt(2.5e-11 + 1e-8), 1}};
    for (int set = 0; set < 2; set++)
        for (int k = 0; k < 3; k++) {
            double got[3], mean = (x[set][0] + x[set][1] + x[set][2]) / 3;
            memcpy(got, x[set], sizeof got);
            whiten(got, 3, how[k]);
            for (int i = 0; i < 3; i++)
                test_expect(fabs(got[i] - (x[set][i] - mean) * scale[set][k]) < 1e-12,
                            "set %d, way %d: %.17g", set, k, got[i]);
        }
    test_end("whitened");
}

/* The two sides of the clip: each as it was asked for, or else eps_clip. */
static void test_clip(void) {
    static const double cases[][4] = {
        {0, 0, 0.25, 0.25}, {0.1, 0, 0.1, 0.25}, {0, 0.5, 0.25, 0.5}, {0.1, 0.5, 0.1, 0.5}};
    for (int i = 0; i < 4; i++) {
        demo_ppo_config ppo = {.policy_loss_type = "ppo",
                               .eps_clip = 0.25,
                               .eps_clip_low_high = {cases[i][0], cases[i][1]},
                               .dual_clip = 3};
        demo_job job = {.options = &ppo};
        seqpar_policy_desc clip = demo_clip(&job);
        test_expect(clip.clip_low == cases[i][2] && clip.clip_high == cases[i][3] &&
                        clip.dual_clip == 3,
                    "case %d: %g, %g, %g", i, clip.clip_low, clip.clip_high, clip.dual_clip);
    }
    test_end("clip_sides");
}

/* A token's loss is of its own old log-prob, reference and advantage. */
static void test_token_losses(void) {
    fixture f;
    fixture_new(&f, false);
    for (int64_t entry = 0; entry < 5; entry++) {
        const double *e = f.entry + entry * ENTRY;
        const seqpar_policy_desc clip = {.clip_low = 0.1, .clip_high = 0.4};
        double columns[UPDATE_COLUMNS] = {0}, seed[2] = {0}, x = e[OLD_LOGP] + 0.05, slope;
        demo_token_seed(&f.update, (demo_prediction){entry >= 2, entry}, x, 1.5, columns, seed);
        seqpar_policy_result p = seqpar_policy_loss(x, e[OLD_LOGP], e[ADVANTAGE], &clip);
        double kl = seqpar_kl(x, e[REF_LOGP_OF], 2, &slope);
        test_expect(apart(columns[LOSS_OF], (p.loss + 0.2 * kl - 0.3 * 1.5) / 5) < 1e-12 &&
                        apart(columns[KL_OF], kl / 5) < 1e-12 &&
                        apart(columns[ENTROPY_OF], 1.5 / 5) < 1e-12 &&
                        apart(columns[CLIPPED], (double)p.clipped / 5) < 1e-12 &&
                        apart(seed[0], (p.dlogp + 0.2 * slope) / 5) < 1e-12 &&
                        columns[ACTOR_TOKENS] == 1 && !columns[RATIO_ONE] && !columns[KL_ZERO],
                    "entry %lld: %g", (long long)entry, columns[LOSS_OF]);
        for (int same = 0; same < 2; same++) {
            demo_token_seed(&f.update, (demo_prediction){entry >= 2, entry},
                            e[same ? REF_LOGP_OF : OLD_LOGP], 1.5, columns, seed);
            test_expect(columns[RATIO_ONE] == !same && columns[KL_ZERO] == same, "entry %lld",
                        (long long)entry);
        }
    }
    arrfree(f.window.which);
    fixture_new(&f, true); /* a critic has no ratio of texts */
    f.options.policy_loss_type = "gspo";
    demo_update_counts(&f.update);
    test_expect(!f.update.text && f.update.aggregate.kind == SEQPAR_AGGREGATE_TOKEN_MEAN,
                "a critic learns by texts");
    for (int64_t entry = 0; entry < 5; entry++) {
        const double *e = f.entry + entry * ENTRY;
        double columns[UPDATE_COLUMNS] = {0}, seed[2] = {0};
        demo_token_seed(&f.update, (demo_prediction){entry >= 2, entry}, 0.75, 9, columns,
                        seed);
        seqpar_value_result v = seqpar_value_loss(0.75, e[VALUE], e[RETURN], 0.5);
        test_expect(apart(columns[LOSS_OF], v.loss / 5) < 1e-12 &&
                        apart(columns[CLIPPED], (double)v.clipped / 5) < 1e-12 &&
                        apart(seed[0], v.dvalue / 5) < 1e-12 && !columns[ACTOR_TOKENS],
                    "value of entry %lld", (long long)entry);
    }
    arrfree(f.window.which);
    test_end("token_losses");
}

/* Texts of a token file's prompts, by their place in it; whose words are those of training. */
static void test_file_texts(void) {
    static const uint64_t prompts[] = {0, 1, 3}, answers[] = {0, 1, 3}, words[] = {0, 1, 3};
    static const uint8_t flags[] = {0, 0};
    static unsigned char map[200];
    demo_token_section at[6];
    const demo_token_head head = {.words = 2};
    demo_token_file file = {.map = map, .head = &head, .flags = flags};
    static const struct {
        int name;
        const void *bytes;
        size_t size;
    } parts[] = {{DEMO_PROMPT_OFFSETS, prompts, sizeof prompts},
                 {DEMO_ANSWER_OFFSETS, answers, sizeof answers},
                 {DEMO_WORD_OFFSETS, words, sizeof words},
                 {DEMO_PROMPT_TEXT, "pqr", 3},
                 {DEMO_ANSWER_TEXT, "1xy", 3},
                 {DEMO_WORDS, "7ab", 3}};
    uint64_t used = 0;
    for (int i = 0; i < 6; i++) {
        at[i] = (demo_token_section){.begin = used, .bytes = parts[i].size};
        memcpy(map + used, parts[i].bytes, parts[i].size);
        file.section[parts[i].name] = &at[i];
        used += parts[i].size;
    }
    int32_t ids[] = {1, 0};
    demo_document documents[] = {{.ids = ids, .tokens = 2}, {.ids = ids, .tokens = 2}};
    demo_ppo_config ppo = {.label_key = "label"};
    demo_job job = {.options = &ppo};
    demo_rank r = {.job = &job};
    demo_error error = {""};
    job.train = (demo_dataset){.documents = documents, .file = &file};
    for (int i = 0; i < 2; i++) {
        char *prompt = demo_prompt_text(&r, &job.train, &documents[i]),
             *answer = demo_answer_text(&r, &job.train, &documents[i]),
             *query = demo_query_text(&r, prompt, ids, 2);
        test_expect(!strcmp(prompt, i ? "qr" : "p") && !strcmp(answer, i ? "xy" : "1") &&
                        !strcmp(query, i ? "qrab7" : "pab7"),
                    "prompt %d: '%s', '%s', '%s'", i, prompt, answer, query);
        test_expect(!demo_sampled_right(&r, ids, 2, &job.train, &documents[i]), "%d is right",
                    i);
        free(prompt), free(answer), free(query);
    }
    demo_dataset first = {.file = &file};
    arrput(first.documents, documents[0]);
    test_expect(!demo_answers_there(&first, "there", &error), "%s", error.text);
    arrput(first.documents, documents[1]);
    test_expect(demo_answers_there(&first, "there", &error) &&
                    !strcmp(error.text,
                            "there: the right answer 2, 'xy', has no number, but responses "
                            "are compared with its last number; make the file again with a "
                            "--label_key whose text has a number"),
                "%s", error.text);
    arrfree(first.documents);
    int32_t bytes[] = {DEMO_BOS, 'q', '4', '2', DEMO_EOS};
    uint8_t mask[] = {0, 0, 1, 1, 1};
    demo_document own = {.ids = bytes, .loss_mask = mask, .tokens = 5};
    job.train = (demo_dataset){.documents = &own};
    char *prompt = demo_prompt_text(&r, &job.train, &own),
         *answer = demo_answer_text(&r, &job.train, &own);
    test_expect(!strcmp(prompt, "q") && !strcmp(answer, "42"), "'%s', '%s'", prompt, answer);
    free(prompt), free(answer);
    test_end("file_texts");
}

/* ---- a rollout of four texts for two prompts, of 1, 2, 3 and 1 tokens ---- */

enum { FOUR = 4, OF_FOUR = 7 };
static const int64_t four_tokens[FOUR] = {1, 2, 3, 1}, four_first[FOUR] = {0, 1, 3, 6};

typedef struct {
    demo_ppo_config options;
    demo_objective objective;
    demo_options parsed;
    demo_job job;
    seqpar_comm world;
    seqpar_error error;
    demo_shared shared;
    demo_rank rank;
    demo_ppo own;
} four;

static const demo_document four_source[FOUR];

/* Prompts '(' and '[[', of texts that are letters. */
static void four_new(four *f) {
    static const double score[FOUR] = {1, 4, -2, 0.5};
    demo_rollout *o = &f->own.rollout;
    memset(f, 0, sizeof *f);
    f->options = (demo_ppo_config){.kl_estimator = "k1",
                                   .advantage_estimator = "reinforce",
                                   .n_samples_per_prompt = 2,
                                   .gamma = 0.5,
                                   .lambd = 0.25,
                                   .reward_clip_range = {-1.5, 3}};
    f->objective = (demo_objective){.column = {"reward"}, .columns = 1};
    f->job.options = &f->options;
    f->job.objective = &f->objective;
    f->job.shared = &f->shared;
    f->world.error = &f->error;
    f->world.size = 1;
    f->rank = (demo_rank){.job = &f->job, .own = &f->own, .world = &f->world};
    f->rank.ctx.error = &f->error;
    f->own.kl.coef = 0.2;
    demo_rollout_new(o, FOUR);
    for (int i = 0; i < FOUR; i++) {
        demo_document d = {0};
        double logp[3] = {-1 - i, -2 - i, -3 - i};
        for (int t = 0; t < 1 + i / 2; t++) demo_push(&d, i < 2 ? '(' : '[', false);
        for (int64_t t = 0; t < four_tokens[i]; t++)
            demo_push(&d, (int32_t)('a' + 3 * i + t), true);
        demo_rollout_take(o, d, logp, 1 + i / 2, &four_source[i], score[i]);
    }
    o->entry = (double *)demo_alloc(o->entries * ENTRY + 1, sizeof *o->entry);
    for (int64_t i = 0; i < o->entries; i++) {
        o->entry[i * ENTRY + OLD_LOGP] = -1.25 - 0.25 * (double)i;
        o->entry[i * ENTRY + REF_LOGP_OF] = -1.5 + 0.125 * (double)(i * i % 5);
        o->entry[i * ENTRY + VALUE] = 0.5 * (double)(i % 3);
    }
}

static void four_free(four *f) {
    demo_rollout_free(&f->own.rollout);
    arrfree(f->rank.losses);
    arrfree(f->rank.steps);
}

static void test_taken(void) {
    static const double sampled[OF_FOUR] = {-1, -2, -3, -3, -4, -5, -4};
    four f;
    four_new(&f);
    const demo_rollout *o = &f.own.rollout;
    test_expect(o->texts == FOUR && o->entries == OF_FOUR && arrlen(o->sampled) == OF_FOUR &&
                    !memcmp(o->sampled, sampled, sizeof sampled),
                "%lld texts, %lld entries", (long long)o->texts, (long long)o->entries);
    for (int i = 0; i < FOUR; i++)
        test_expect(o->first[i] == four_first[i] && demo_text_tokens(o, i) == four_tokens[i] &&
                        o->prompt[i] == 1 + i / 2,
                    "text %d", i);
    demo_take_sampled(&f.own.rollout);
    for (int i = 0; i < OF_FOUR; i++)
        test_expect(o->entry[i * ENTRY + OLD_LOGP] == sampled[i], "entry %d", i);
    /* groups 1 and 4, and -2 and 0.5: the first alone has a mean inside */
    static const double range[] = {-0.75, 3};
    demo_rollout kept = {0};
    demo_rollout_new(&kept, FOUR);
    demo_keep_groups(&kept, &f.own.rollout, 2, range);
    test_expect(kept.texts == 2 && kept.entries == 3 && kept.score[1] == 4 &&
                    kept.first[1] == 1 && kept.prompt[1] == 1 && kept.sampled[2] == -3 &&
                    kept.set.documents[1].ids[1] == 'd' && kept.source[1] == &four_source[1] &&
                    !o->set.documents[0].ids && o->set.documents[2].ids,
                "%lld texts are kept", (long long)kept.texts);
    demo_rollout_free(&kept);
    four_free(&f);
    test_end("rollout_taken");
}

/* As the estimators are written down, from the rollout's numbers. */
static void advantages_of(const four *f, int estimator, double *advantage, double *back) {
    const demo_rollout *o = &f->own.rollout;
    double sum = 0, square = 0;
    for (int i = 0; i < FOUR; i++) {
        double other = o->score[i ^ 1], own = o->score[i], mean = (own + other) / 2;
        double scalar = estimator < 2    ? own
                        : estimator == 3 ? own - other
                        : estimator == 4 ? (own - mean) / (fabs(own - other) / sqrt(2) + 1e-9)
                                         : own - mean;
        double gamma = estimator < 2 ? 0.5 : 1, lambda = estimator ? 1 : 0.25, next = 0,
               past = 0;
        for (int64_t t = four_tokens[i] - 1; t >= 0; t--) {
            const double *e = o->entry + (four_first[i] + t) * ENTRY;
            double coef = f->options.use_kl_loss ? 0 : 0.2, value = estimator ? 0 : e[VALUE];
            double reward = -coef * (e[OLD_LOGP] - e[REF_LOGP_OF]);
            if (t + 1 == four_tokens[i]) reward += fmin(3, fmax(-1.5, scalar));
            next = reward + gamma * past - value + gamma * lambda * next;
            past = value;
            advantage[four_first[i] + t] = next;
            back[four_first[i] + t] = next + value;
        }
    }
    if (estimator > 2) return;
    for (int i = 0; i < OF_FOUR; i++) sum += advantage[i] / OF_FOUR;
    for (int i = 0; i < OF_FOUR; i++) square += pow(advantage[i] - sum, 2) / OF_FOUR;
    for (int i = 0; i < OF_FOUR; i++)
        advantage[i] = (advantage[i] - sum) /
                       (f->options.no_advantage_std_norm ? 1 : sqrt(square));
}

static void test_estimators(void) {
    static const char *const names[] = {"gae",  "reinforce",  "reinforce_baseline",
                                        "rloo", "group_norm", "dr_grpo"};
    for (int way = 0; way < 24; way++) {
        double advantage[OF_FOUR], back[OF_FOUR];
        four f;
        four_new(&f);
        f.options.advantage_estimator = names[way / 4];
        f.options.use_kl_loss = way % 4 / 2;
        f.options.no_advantage_std_norm = way % 2;
        f.own.has_critic = way / 4 == 0;
        test_expect(!demo_advantages(&f.rank), "%s", f.error.text);
        advantages_of(&f, way / 4, advantage, back);
        for (int i = 0; i < OF_FOUR; i++) {
            const double *e = f.own.rollout.entry + i * ENTRY;
            test_expect(apart(e[ADVANTAGE], advantage[i]) < 1e-9 &&
                            apart(e[RETURN], back[i]) < 1e-9,
                        "%s, way %d: entry %d has %g, %g, not %g, %g", names[way / 4], way % 4,
                        i, e[ADVANTAGE], e[RETURN], advantage[i], back[i]);
        }
        for (int i = 0; i < FOUR; i++) {
            double kl = 0;
            for (int64_t t = four_first[i]; t < four_first[i] + four_tokens[i]; t++)
                kl += (f.own.rollout.entry[t * ENTRY + OLD_LOGP] -
                       f.own.rollout.entry[t * ENTRY + REF_LOGP_OF]) /
                      (double)four_tokens[i];
            test_expect(apart(f.own.rollout.kl[i], kl) < 1e-12, "KL of text %d", i);
        }
        four_free(&f);
    }
    test_end("estimators");
}

/* Whose token a position predicts: texts behind their prompts, and a pretraining document. */
static void test_places(void) {
    enum { NOT = SEQPAR_IGNORE };
    static const int64_t want[11] = {-1, -1, 3, -1, 7, -1, -1, 0, 1, 2, -1};
    int64_t prompt[] = {2, 3}, first[] = {0, 3}, which[] = {0, 1, 7};
    int32_t targets[11] = {5, 5, 5, NOT, 5, NOT, 5, 5, 5, 5, NOT};
    int64_t bounds[] = {0, 4, 6, 11}, source[] = {1, 2, 0};
    demo_rollout o = {.prompt = prompt, .first = first, .texts = 2, .entries = 4};
    demo_window w = {.which = which};
    seqpar_row row = {.docs = 3};
    row.targets = targets;
    row.cu_seqlens = bounds;
    row.doc_source = source;
    for (int64_t i = 0; i < 11; i++) {
        demo_prediction place = demo_prediction_of(&o, &w, &row, i);
        int64_t got = place.text == 7 ? 7 : place.text < 0 ? -1 : place.entry;
        test_expect(got == want[i] && (got < 0 || got == 7 || place.text == (got == 3 ? 1 : 0)),
                    "position %lld: text %lld, entry %lld", (long long)i, (long long)place.text,
                    (long long)place.entry);
    }
    test_end("places");
}

/* What a critic is told of its learning rate, and what it takes of the actor's. */
static void test_critic_rate(void) {
    static const struct {
        const char *scheduler;
        double warms, least, want; /* at step 6 of 20 */
    } cases[] = {{NULL, -1, -1, 14.0 / 16},
                 {NULL, 0.5, -1, 6.0 / 10},
                 {"constant", -1, -1, 1},
                 {"constant", 0.5, -1, 1},
                 {"constant_with_warmup", 0.5, -1, 0.6},
                 {"constant_with_warmup", 0.31, -1, 6.0 / 7},
                 {"constant_with_warmup", -1, -1, 1},
                 {"cosine", 0, -1, 0.79389262614623657},
                 {"cosine_with_min_lr", 0, -1, 0.3 + 0.7 * 0.79389262614623657},
                 {"cosine_with_min_lr", 0, 0.6, 0.6 + 0.4 * 0.79389262614623657},
                 {"cosine_with_min_lr", 0, 0, 0.79389262614623657}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        demo_job job = {.warmup = 4, .total_steps = 20, .lr_kind = SEQPAR_LR_LINEAR};
        demo_ppo_config ppo = {.critic_learning_rate = 0.5};
        demo_rank r = {.job = &job, .step = 6};
        job.options = &ppo;
        job.config.min_lr_ratio = 0.3;
        ppo.critic.lr_scheduler = cases[i].scheduler;
        ppo.critic.lr_warmup_ratio = cases[i].warms;
        ppo.critic.min_lr_ratio = cases[i].least;
        double got = demo_critic_rate(&r);
        test_expect(apart(got, 0.5 * cases[i].want) < 1e-14, "case %d: %.17g", (int)i, got);
    }
    test_end("critic_rate");
}

/* Who has a group of ranks, and how many: by what is asked for of each role. */
static void test_roles(void) {
    static const struct {
        int64_t nodes[DEMO_ROLES], per_node[DEMO_ROLES];
        bool actor_ref, critic_reward, all, critic, reward;
        int group[DEMO_ROLES];
        int groups;
        int64_t ranks[DEMO_ROLES];
        const char *names; /* of the groups */
    } cases[] = {{{1},
                  {0},
                  0,
                  0,
                  0,
                  1,
                  1,
                  {0, 0, 0, 0, -1},
                  1,
                  {0},
                  "actor + reference + critic + reward"},
                 {{1}, {2}, 0, 0, 0, 0, 0, {0, 0, -1, -1, -1}, 1, {2}, "actor + reference"},
                 {{1, 2, 3, 4, 5},
                  {2, 3, 5, 7, 11},
                  0,
                  0,
                  0,
                  1,
                  1,
                  {0, 1, 2, 3, 4},
                  5,
                  {2, 6, 15, 28, 55},
                  "actor, reference, critic, reward, generator"},
                 {{1, 2, 3, 4, 5},
                  {2, 3, 5, 7, 11},
                  1,
                  0,
                  0,
                  1,
                  1,
                  {0, 0, 1, 2, 3},
                  4,
                  {2, 15, 28, 55},
                  "actor + reference, critic, reward, generator"},
                 {{1, 2, 3, 4, 5},
                  {2, 3, 5, 7, 11},
                  0,
                  1,
                  0,
                  1,
                  1,
                  {0, 1, 2, 2, 3},
                  4,
                  {2, 6, 15, 55},
                  "actor, reference, critic + reward, generator"},
                 {{1, 2, 3, 4, 5},
                  {2, 3, 5, 7, 11},
                  0,
                  1,
                  0,
                  0,
                  1,
                  {0, 1, -1, 2, 3},
                  4,
                  {2, 6, 28, 55},
                  "actor, reference, reward, generator"},
                 {{1, 2, 3, 4, 5},
                  {2, 3, 5, 7, 11},
                  0,
                  0,
                  1,
                  1,
                  1,
                  {0, 0, 0, 0, -1},
                  1,
                  {2},
                  "actor + reference + critic + reward"},
                 {{1, 1, 3, 1, 0},
                  {2, 0, 5, 0, 1},
                  0,
                  0,
                  0,
                  1,
                  1,
                  {0, 0, 1, 1, -1},
                  2,
                  {2, 15},
                  "actor + reference, critic + reward"},
                 {{1, 1, 3, 1, 1},
                  {2, 0, 0, 0, 6},
                  0,
                  0,
                  0,
                  0,
                  1,
                  {0, 0, -1, 0, 1},
                  2,
                  {2, 6},
                  "actor + reference + reward, generator"},
                 {{1, 1, 1, 1, 2},
                  {0, 0, 0, 0, 3},
                  0,
                  0,
                  0,
                  1,
                  0,
                  {0, 0, 0, -1, 1},
                  2,
                  {0, 6},
                  "actor + reference + critic, generator"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        demo_ppo_config ppo = {.roles = {.actor_ref = cases[i].actor_ref,
                                         .critic_reward = cases[i].critic_reward,
                                         .all = cases[i].all}};
        demo_job job = {.options = &ppo};
        char names[256] = "", name[64];
        memcpy(ppo.roles.nodes, cases[i].nodes, sizeof ppo.roles.nodes);
        memcpy(ppo.roles.per_node, cases[i].per_node, sizeof ppo.roles.per_node);
        demo_roles_lay(&ppo.roles, cases[i].critic, cases[i].reward);
        test_expect(ppo.roles.groups == cases[i].groups &&
                        !memcmp(ppo.roles.group, cases[i].group, sizeof ppo.roles.group) &&
                        !memcmp(ppo.roles.ranks, cases[i].ranks,
                                (size_t)cases[i].groups * sizeof *ppo.roles.ranks),
                    "case %d: %d groups", (int)i, ppo.roles.groups);
        for (int g = 0; g < ppo.roles.groups; g++) {
            size_t used = strlen(names);
            demo_ppo_group_name(&job, g, name);
            snprintf(names + used, sizeof names - used, "%s%s", g ? ", " : "", name);
        }
        test_expect(!strcmp(names, cases[i].names), "case %d: %s", (int)i, names);
    }
    test_end("roles");
}

/* Which ranks a role has, and who generates. */
static void test_role_group(void) {
    demo_ppo_config ppo = {.roles = {.group = {0, 0, 1, 1, 2}}};
    demo_job job = {.options = &ppo, .groups = 3, .group_ranks = {2, 3, 5}};
    seqpar_comm world = {.size = 10};
    demo_rank r = {.job = &job, .world = &world, .group = 1};
    static const int64_t want[DEMO_ROLES][2] = {{0, 2}, {0, 2}, {2, 3}, {2, 3}, {5, 5}};
    int64_t first, count;
    for (int role = 0; role < DEMO_ROLES; role++) {
        demo_role_group(&r, role, &first, &count);
        test_expect(first == want[role][0] && count == want[role][1] &&
                        demo_has_role(&r, role) == (role == DEMO_CRITIC || role == DEMO_REWARD),
                    "role %d: ranks %lld and %lld", role, (long long)first, (long long)count);
    }
    test_expect(demo_who_generates(&r) == DEMO_GENERATOR, "the actor generates");
    job.groups = 2; /* as few as there can be */
    demo_role_group(&r, DEMO_CRITIC, &first, &count);
    test_expect(first == 2 && count == 3, "of two: ranks %lld and %lld", (long long)first,
                (long long)count);
    job.groups = 0; /* no groups: all ranks, whatever the role */
    demo_role_group(&r, DEMO_ACTOR, &first, &count);
    test_expect(first == 0 && count == 10, "ranks %lld and %lld", (long long)first,
                (long long)count);
    for (int none = -1; none < 1; none++) {
        ppo.roles.group[DEMO_GENERATOR] = none;
        test_expect(demo_who_generates(&r) == DEMO_ACTOR, "group %d generates", none);
    }
    test_end("role_group");
}

/* Where a prompt ends: at the label, at the EOS, or nowhere before the file's document does. */
static void test_prompt_tokens(void) {
    demo_ppo_config ppo = {0};
    demo_job job = {.options = &ppo};
    demo_rank r = {.job = &job};
    demo_token_file file = {0};
    int32_t ids[] = {DEMO_BOS, 'a', 'b', DEMO_EOS};
    uint8_t mask[] = {0, 0, 1, 1}, none[] = {0, 0, 0, 0};
    demo_document d = {.ids = ids, .loss_mask = mask, .tokens = 4};
    test_expect(demo_prompt_tokens(&r, &d) == 3, "with an EOS");
    d.tokens = 3;
    test_expect(demo_prompt_tokens(&r, &d) == 3, "without an EOS");
    ppo.label_key = "label";
    test_expect(demo_prompt_tokens(&r, &d) == 2, "before a label");
    d.loss_mask = none;
    test_expect(demo_prompt_tokens(&r, &d) == 3, "without a label");
    job.train.file = &file;
    d.loss_mask = mask, d.tokens = 4;
    test_expect(demo_prompt_tokens(&r, &d) == 4, "of a token file");
    test_end("prompt_tokens");
}

/* ---- what is said of rollouts ---- */

/* What a function prints to stderr, for free(). */
static char *text_said;
static size_t said_size;
static FILE *said_before;
static void said_begin(void) {
    said_before = stderr;
    text_said = NULL;
    stderr = open_memstream(&text_said, &said_size);
}
static const char *said_end(void) {
    fclose(stderr);
    stderr = said_before;
    return text_said;
}

/* Figures by their names, in their order: "reward 0.875, ...". */
static void figures_text(const demo_report *report, char *text, size_t size) {
    size_t used = 0;
    char number[32];
    *text = 0;
    for (int i = 0; i < report->count && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s %s", i ? ", " : "",
                                 report->figure[i].name,
                                 demo_figure_text(number, &report->figure[i]));
}

static void test_figures(void) {
    static const char always[] =
        "rollout 9, step 12, reward 0.875, return 1.75, kl 0.75, kl_coef 0.20000000000000001, "
        "response_length 1.75, policy_loss 0.5, clipfrac 1.5, entropy 2.5, critic_loss 10.5, "
        "grad_norm 6.5, ";
    static const char seconds[] =
        "generate_seconds 1.250, score_seconds 2.250, train_seconds 3.250, ";
    static const char *const more[] = {"aux_loss 7.5, critic_aux_loss 0.25, ptx_loss 4.5, "
                                       "prompts_drawn 21, ",
                                       ""};
    for (int without = 0; without < 2; without++) {
        char got[1024], want[1024];
        four f;
        four_new(&f);
        demo_report report = {.phase = "train", .round = 9};
        for (int i = 0; i < FOUR; i++) f.own.rollout.kl[i] = 0.5 * i;
        for (int i = 0; i < OF_FOUR; i++) f.own.rollout.entry[i * ENTRY + REWARD] = 1;
        for (int c = 0; c < UPDATE_COLUMNS; c++)
            f.own.policy[c] = c + 0.5, f.own.value[c] = c + 10.5;
        for (int i = 0; i < 4; i++) f.own.seconds[i] = 1.25 + i;
        f.own.drawn = 21;
        f.rank.step = 12;
        f.rank.optim.norm = 6.5;
        f.rank.experts.loss = 7.5;
        f.rank.model.config.experts = 4;
        f.job.config.aux_loss_coef = without ? 0 : 0.1;
        f.own.critic_experts.loss = without ? 0 : 0.25;
        f.options.pretrain_data = without ? NULL : "more";
        f.options.dynamic_filtering = !without;
        f.options.roles.group[DEMO_GENERATOR] = without ? -1 : 1;
        f.rank.ctx.memory.total_peak = 1000;
        f.shared.bytes = 7;
        demo_rollout_figures(&f.rank, &report);
        figures_text(&report, got, sizeof got);
        snprintf(want, sizeof want, "%s%s%s%speak_bytes 1007", always, more[without], seconds,
                 without ? "" : "hand_over_seconds 4.250, ");
        test_expect(!strcmp(got, want), "%s", got);
        f.world.rank = 1;
        test_expect(demo_peak_bytes(&f.rank) == 1000, "shared bytes are counted twice");
        f.world.rank = 0;
        said_begin();
        demo_rollout_say(&f.rank, &report);
        test_expect(!strcmp(said_end(),
                            "rollout 9: reward 0.8750, KL 0.7500, length 1.8, generate 1.2 s, "
                            "score 2.2 s, train 3.2 s; text 0 (1.00): a\n"),
                    "%s", text_said);
        free(text_said);
        four_free(&f);
    }
    test_end("rollout_figures");
}

/* The first prompts' texts, as many as were asked for and are there. */
static void test_samples(void) {
    static const char lines[] = "rollout 9, prompt 1: (\n"
                                "    1.0000: a\n"
                                "    4.0000: de\n"
                                "rollout 9, prompt 2: [[\n"
                                "    -2.0000: ghi\n"
                                "    0.5000: j\n";
    four f;
    four_new(&f);
    for (int asked = 0; asked < 4; asked++) {
        demo_report report = {.round = 9};
        f.options.log_samples = asked;
        demo_sample *samples = demo_samples_of(&f.rank, &report.sample_count);
        size_t want = asked == 0   ? 0
                      : asked == 1 ? (size_t)(strstr(lines + 1, "rollout") - lines)
                                   : strlen(lines);
        report.samples = samples;
        said_begin();
        demo_samples_print(stderr, &report, 2);
        test_expect(said_end() && strlen(text_said) == want && !strncmp(text_said, lines, want),
                    "%d prompts: %s", asked, text_said);
        free(text_said);
        demo_samples_free(samples, report.sample_count);
    }
    four_free(&f);
    said_begin();
    demo_text_print(stderr, "\001\002\n\t\033");
    char shown[100];
    test_expect(!strcmp(said_end(), demo_escape(shown, sizeof shown, "\001\002\n\t\033")) &&
                    strlen(text_said) >= 10,
                "%s", text_said);
    free(text_said);
    test_end("rollout_samples");
}

/* Right answers to held-out prompts, of one text a prompt and of several. */
static void test_right_said(void) {
    static const struct {
        int64_t n, right[2];
        double exact;
        const char *line, *said;
    } cases[] = {
        {1,
         {3, 3},
         0.375,
         "{\"rollout\": 5, \"eval_exact\": 0.375, \"eval_pass\": 0.375, \"eval_prompts\": 8}\n",
         "after 5 rollouts: 3 of 8 held-out prompts answered correctly (37.5 %)\n"},
        {4,
         {20, 6},
         0.625,
         "{\"rollout\": 5, \"eval_exact\": 0.625, \"eval_pass\": 0.75, \"eval_prompts\": 8}\n",
         "after 5 rollouts: 20 of 32 texts for held-out prompts are correct (62.5 %), 6 of 8 "
         "prompts have a correct one\n"}};
    for (int i = 0; i < 2; i++) {
        four f;
        four_new(&f);
        arrsetlen(f.job.eval.documents, 8);
        char *line = NULL;
        size_t length = 0;
        said_begin();
        f.rank.progress.out = stderr;
        f.rank.logs.file[DEMO_METRICS] = open_memstream(&line, &length);
        demo_say_right(&f.rank, 5, cases[i].right, cases[i].n);
        fclose(f.rank.logs.file[DEMO_METRICS]);
        f.rank.logs.file[DEMO_METRICS] = NULL;
        test_expect(!strcmp(said_end(), cases[i].said), "%s", text_said);
        free(text_said);
        test_expect(!strcmp(line, cases[i].line), "%s", line);
        free(line);
        test_expect(f.rank.eval_means[0] == cases[i].exact && !f.rank.losses, "%g",
                    f.rank.eval_means[0]);
        f.world.rank = 1;
        f.rank.eval_means[0] = 0;
        demo_say_right(&f.rank, 5, cases[i].right, cases[i].n); /* says nothing, and knows */
        test_expect(f.rank.eval_means[0] == cases[i].exact, "rank 1: %g", f.rank.eval_means[0]);
        arrfree(f.job.eval.documents);
        four_free(&f);
    }
    test_end("right_said");
}

/* Steps and rollouts of a run, and where it ends. */
static void test_counted(void) {
    static const struct {
        int64_t batch, max_steps;
        bool filters;
        int64_t rounds, total, last, units, every; /* wanted */
        const char *said;
    } cases[] = {
        {4, -1, false, 12, 72, 72, 5, 4, ""},
        {4, -1, true, 12, 72, 72, 23, 4, ""},
        {4, 71, false, 12, 71, 72, 5, 4,
         "notice: a rollout is trained on in 6 steps, so training ends after step 72, not "
         "71\n"},
        {4, 72, false, 12, 72, 72, 5, 4, ""},
        {4, 12, false, 2, 12, 12, 5, 4, ""},
        {4, 13, false, 3, 13, 18, 5, 4,
         "notice: a rollout is trained on in 6 steps, so training ends after step 18, not "
         "13\n"},
        {4, 0, false, 0, 0, 0, 5, 4, ""},
        {99, -1, false, 12, 24, 24, 5, 4, ""}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        four f;
        four_new(&f);
        f.objective.walk = demo_ppo_walk;
        f.options.rollout_batch_size = 5;
        f.options.n_samples_per_prompt = 3;
        f.options.num_episodes = 3;
        f.options.dynamic_filtering = cases[i].filters;
        f.job.usable_count = 23;
        f.job.config.max_epochs = 2;
        f.job.config.train_batch_size = cases[i].batch;
        f.job.config.max_steps = cases[i].max_steps;
        f.job.config.eval_asked = -1;
        said_begin();
        demo_ppo_count(&f.job);
        test_expect(!strcmp(said_end(), cases[i].said), "case %d: %s", (int)i, text_said);
        free(text_said);
        test_expect(f.job.rounds == cases[i].rounds && f.job.total_steps == cases[i].total &&
                        f.job.last_step == cases[i].last &&
                        f.job.epoch_units == cases[i].units &&
                        f.job.eval_every == cases[i].every &&
                        f.job.round_steps == (cases[i].batch > 15 ? 2 : 6),
                    "case %d: %lld rollouts, %lld steps to %lld, %lld prompts an epoch", (int)i,
                    (long long)f.job.rounds, (long long)f.job.total_steps,
                    (long long)f.job.last_step, (long long)f.job.epoch_units);
        f.job.rank = 1; /* one process speaks */
        said_begin();
        demo_ppo_count(&f.job);
        test_expect(!*said_end(), "rank 1 says %s", text_said);
        free(text_said);
        four_free(&f);
    }
    test_end("rollouts_counted");
}

/* What a checkpoint says of the rollouts: numbers that cannot be are refused. */
static void test_rollouts_loaded(void) {
    static const struct {
        int64_t drawn;
        double coef;
        bool taken;
    } cases[] = {{10, 0.5, true},
                 {9, 0.5, false},
                 {INT64_MAX / 4 / 3, 0.5, true},
                 {INT64_MAX / 4 / 3 + 1, 0.5, false},
                 {10, 0, true},
                 {10, 1e300, true},
                 {10, 2e300, false},
                 {10, -0.1, false},
                 {10, NAN, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        four f;
        four_new(&f);
        demo_state state = {.step = 13};
        f.options.rollout_batch_size = 5;
        f.options.n_samples_per_prompt = 3;
        f.options.roles.group[DEMO_CRITIC] = -1;
        f.job.config.max_epochs = 2;
        f.job.config.train_batch_size = 4;
        f.job.config.ckpt_path = "there";
        memcpy(&state.extra[0], &cases[i].coef, sizeof state.extra[0]);
        state.extra[1] = cases[i].drawn;
        seqpar_status status = demo_ppo_load_state(&f.rank, &state);
        test_expect(!status == cases[i].taken && (status || (f.own.kl.coef == cases[i].coef &&
                                                             f.own.drawn == cases[i].drawn)),
                    "case %d: %s", (int)i, f.error.text);
        if (i == 1)
            test_expect(
                !strcmp(f.error.text,
                        "the checkpoint in there says that 9 prompts were drawn and the KL "
                        "coefficient is 0.5, which is impossible; take another"),
                "%s", f.error.text);
        four_free(&f);
    }
    test_end("rollouts_loaded");
}

/* Filtering that has used up the prompts: an end, and a failure where nothing was learnt. */
static void test_used_up(void) {
    four f;
    four_new(&f);
    f.options.dynamic_filtering_reward_range[0] = 0.25;
    f.options.dynamic_filtering_reward_range[1] = 0.75;
    f.options.rollout_batch_size = 3;
    f.own.drawn = 40;
    f.job.rounds = 9;
    test_expect(demo_say_used_up(&f.rank, 7) == SEQPAR_ERR_OPTION &&
                    !strcmp(f.error.text,
                            "dynamic_filtering kept 2 of 40 prompts, a rollout needs 3; widen "
                            "dynamic_filtering_reward_range (0.25, 0.75), lower "
                            "rollout_batch_size or give more prompts"),
                "%s", f.error.text);
    f.rank.step = 1;
    for (f.world.rank = 0; f.world.rank < 2; f.world.rank++) {
        said_begin();
        f.rank.progress.out = stderr;
        test_expect(!demo_say_used_up(&f.rank, 7), "a failure behind the first step");
        test_expect(
            !strcmp(said_end(), f.world.rank
                                    ? ""
                                    : "notice: all 40 prompts are used up after 7 of 9 "
                                      "rollouts; the 2 left with mean rewards inside (0.25, "
                                      "0.75) are too few for another\n"),
            "rank %d: %s", (int)f.world.rank, text_said);
        free(text_said);
    }
    four_free(&f);
    test_end("used_up");
}

/* Rewards as large as sums over texts hold, and no larger. */
static void test_rewards_fit(void) {
    static const struct {
        double score;
        bool fits;
    } cases[] = {
        {1e100, true}, {-1e100, true}, {1.1e100, false}, {-INFINITY, false}, {NAN, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int place = 0; place < FOUR; place += FOUR - 1) {
            char begins[64];
            four f;
            four_new(&f);
            f.own.rollout.score[place] = cases[i].score;
            snprintf(begins, sizeof begins, "text %d of the rollout has a reward of %g, ",
                     place, cases[i].score);
            seqpar_status status = demo_rewards_fit(&f.rank);
            test_expect(!status == cases[i].fits &&
                            (!status || !strncmp(f.error.text, begins, strlen(begins))),
                        "%g: %s", cases[i].score, f.error.text);
            four_free(&f);
        }
    test_end("rewards_fit");
}

/* ---- reward servers: which answers are worth another try ---- */

static void test_tries(void) {
    static const struct {
        CURLcode code;
        long status;
        bool again, foreign;
    } cases[] = {{CURLE_OK, 200, false, false},
                 {CURLE_OK, 407, false, false},
                 {CURLE_OK, 408, true, false},
                 {CURLE_OK, 409, false, false},
                 {CURLE_OK, 428, false, false},
                 {CURLE_OK, 429, true, false},
                 {CURLE_OK, 430, false, false},
                 {CURLE_OK, 499, false, false},
                 {CURLE_OK, 500, true, false},
                 {CURLE_OK, 503, true, false},
                 {CURLE_COULDNT_CONNECT, 0, true, false},
                 {CURLE_OPERATION_TIMEDOUT, 200, true, false},
                 {CURLE_WRITE_ERROR, 500, false, false},
                 {CURLE_UNSUPPORTED_PROTOCOL, 500, false, true},
                 {CURLE_WEIRD_SERVER_REPLY, 0, false, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const demo_answer answer = {.code = cases[i].code, .status = cases[i].status};
        test_expect(demo_answer_may_improve(&answer) == cases[i].again &&
                        demo_answer_foreign(&answer) == cases[i].foreign,
                    "case %d", (int)i);
    }
    static const demo_reward_servers servers = {.retries = 4};
    const demo_answer busy = {.code = CURLE_OK, .status = 503},
                      silent = {.code = CURLE_COULDNT_CONNECT};
    said_begin();
    demo_wait_say(&servers, "http://me:key@a:1/b,http://c", &busy, 1, 0.5);
    demo_wait_say(&servers, "http://a", &silent, 4, 8);
    test_expect(strstr(said_end(), "reward server http://a:1/b: HTTP status 503; try 2 of 5 in "
                                   "0.5 s\nreward server http://a: ") == text_said &&
                    strstr(text_said, "; try 5 of 5 in 8 s\n"),
                "%s", text_said);
    free(text_said);
    test_end("server_tries");
}

/* What arrives in parts is one text, up to a limit that nothing may pass. */
static void test_arrives(void) {
    demo_answer answer = {0};
    char part[] = "abc", rest[] = "defgh";
    test_expect(demo_answer_write(part, 1, 3, &answer) == 3 &&
                    demo_answer_write(rest, 1, 5, &answer) == 5 && answer.size == 8 &&
                    !strcmp(answer.bytes, "abcdefgh"),
                "%s", answer.bytes);
    answer.size = DEMO_ANSWER_LIMIT - 3;
    test_expect(demo_answer_write(part, 1, 3, &answer) == 3 &&
                    answer.size == DEMO_ANSWER_LIMIT && !answer.bytes[answer.size],
                "as much as there may be");
    answer.size = DEMO_ANSWER_LIMIT - 2;
    test_expect(!demo_answer_write(part, 1, 3, &answer), "more than there may be");
    free(answer.bytes);
    test_end("server_arrives");
}

/* An address without what is nobody else's business. */
static void test_shown(void) {
    static const char *const cases[][2] = {{"http://a", "http://a"},
                                           {"http://a,http://b", "http://a"},
                                           {"http://me@a/x", "http://a/x"},
                                           {"http://me:key@a:1/x@y?z@", "http://a:1/x@y?z@"},
                                           {"http://a?b@c", "http://a?b@c"},
                                           {"http://a#b@c", "http://a#b@c"},
                                           {"http://a,http://me@b", "http://a"},
                                           {"http://me@k@a", "http://a"},
                                           {"a.py,http://me@b", "a.py"},
                                           {"me@a", "me@a"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[100], small[12];
        test_expect(!strcmp(demo_url_shown(text, sizeof text, cases[i][0]), cases[i][1]),
                    "%s is %s", cases[i][0], text);
        demo_url_shown(small, sizeof small, cases[i][0]);
        test_expect(!strncmp(small, cases[i][1], strlen(small)), "%s", small);
    }
    test_end("server_shown");
}

/* ---- evaluation ---- */

/* Right texts, and prompts with at least one: of three texts a prompt. */
static void test_counted_right(void) {
    enum { PROMPTS = 5, TEXTS = 3, LONGEST = 2 };
    static const char answers[] = "31415", said[] = "323000444212999";
    static demo_job job;
    demo_ppo_config ppo = {.label_key = "label", .eval_n_samples_per_prompt = TEXTS};
    demo_rank r = {.job = &job};
    demo_texts texts = demo_texts_new(PROMPTS * TEXTS, LONGEST);
    int64_t right[2] = {0};
    job.options = &ppo;
    for (int i = 0; i < PROMPTS; i++) {
        demo_document d = {.tokens = 2};
        arrput(d.ids, '?');
        arrput(d.ids, answers[i]);
        arrput(d.loss_mask, 0);
        arrput(d.loss_mask, 1);
        arrput(job.eval.documents, d);
    }
    for (int i = 0; i < PROMPTS * TEXTS; i++) {
        int32_t *ids = &texts.ids[i * (LONGEST + 1)];
        ids[0] = 1 + i % 2; /* behind a text of one token stands another number */
        ids[1] = said[i];
        ids[2] = i % 2 ? ' ' : '7';
    }
    demo_count_right(&r, &texts, right);
    test_expect(right[0] == 2 + 3 + 1 && right[1] == 3, "%lld texts, %lld prompts",
                (long long)right[0], (long long)right[1]);
    demo_data_free(&job.eval);
    demo_texts_free(&texts);
    test_end("counted_right");
}

/* The digest of the training set has what is learnt besides; where nothing is, and of the set
   for evaluation, it is the set's alone. */
static void test_digests(void) {
    static demo_job job;
    demo_ppo_config ppo = {0};
    demo_document d = {.tokens = 1};
    arrput(d.ids, 5);
    arrput(d.loss_mask, 1);
    job.options = &ppo;
    for (int more = 0; more < 2; more++) {
        uint64_t train = demo_ppo_digest(&job, &job.train, 17);
        test_expect((train != 17) == more && demo_ppo_digest(&job, &job.eval, 17) == 17,
                    "%d documents besides: %llx", more, (unsigned long long)train);
        if (!more) arrput(ppo.pretraining.documents, d);
    }
    demo_data_free(&ppo.pretraining);
    test_end("digests");
}

/* ---- what is freed ---- */

/* Nothing is left of a rank's own arrays: each is large enough to be a mapping of its own. */
static void test_closed(void) {
    enum { LARGE = 40009 };
    demo_rank r = {0};
    mallopt(M_MMAP_THRESHOLD, 1 << 16);
    size_t before = mallinfo2().hblks;
    demo_ppo *p = (demo_ppo *)calloc(1, sizeof *p);
    r.own = p;
    for (int i = 0; i < ENTRY; i++) {
        arrsetlen(p->place[i], LARGE + i);
        arrsetlen(p->seen[i], LARGE + 2 * i);
    }
    arrsetlen(p->mixed.documents, LARGE);
    demo_ppo_close(&r);
    test_expect(!r.own && mallinfo2().hblks == before, "%d of %d arrays are left",
                (int)(mallinfo2().hblks - before), 2 * ENTRY + 1);
    test_end("closed");
}

/* What is freed is empty, and may be freed again. */
static void test_freed_twice(void) {
    demo_experts experts = {.on = true, .loss = 3};
    demo_rollout rollout = {.texts = 3, .entries = 5};
    demo_pair_set pairs = {0};
    demo_labelled_set labelled = {0};
    experts.chosen = (int64_t *)calloc(3, sizeof *experts.chosen);
    experts.slopes = (double *)calloc(3, sizeof *experts.slopes);
    arrput(experts.leaf, 7);
    arrput(experts.value, 0.5);
    rollout.prompt = (int64_t *)calloc(6, sizeof *rollout.prompt);
    rollout.score = (double *)calloc(3, sizeof *rollout.score);
    rollout.entry = (double *)calloc(5 * ENTRY, sizeof *rollout.entry);
    arrput(rollout.sampled, 0.25);
    arrput(rollout.set.documents, (demo_document){0});
    arrput(pairs.pairs, (demo_pair){0});
    arrput(labelled.records, (demo_labelled){0});
    for (int i = 0; i < 2; i++) {
        demo_experts_free(&experts);
        demo_rollout_free(&rollout);
        demo_pairs_free(&pairs);
        demo_labelled_free(&labelled);
        bool empty = !experts.on && !experts.chosen && !experts.slopes && !experts.leaf &&
                     !experts.value && !rollout.texts && !rollout.entries && !rollout.prompt &&
                     !rollout.score && !rollout.entry && !rollout.sampled &&
                     !rollout.set.documents && !pairs.pairs && !labelled.records;
        test_expect(empty, "something is left");
        if (!empty) break; /* freeing it again would end the program */
    }
    test_end("freed_twice");
}

/* ---- every option of ppo in options.tsv is bound, and those of its own are real there ---- */

static void test_bindings(void) {
    static demo_ppo_config ppo;
    static demo_config config;
    const demo_binding bindings[] = {DEMO_TRAINER_BINDINGS(config),
                                     DEMO_PPO_BINDINGS(config, ppo)},
                       own[] = {DEMO_PPO_BINDINGS(config, ppo)};
    demo_options options = {.tool = "ppo",
                            .bindings = bindings,
                            .binding_count = (int)(sizeof bindings / sizeof *bindings)};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        const demo_known *known = demo_known_find(own[i].name);
        test_expect(known && !strcmp(known->role, "real") && demo_list_has(known->tools, "ppo"),
                    "--%s is bound, but not real for ppo", own[i].name);
    }
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++) {
        const demo_known *known = &demo_known_options[i];
        bool acts = !strcmp(known->role, "real") && demo_list_has(known->tools, "ppo");
        test_expect(!acts || demo_binding_find(&options, known->name), "--%s is not bound",
                    known->name);
    }
    test_end("options_bound");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_texts());
    TEST(test_words());
    TEST(test_question());
    TEST(test_answers());
    TEST(test_addresses());
    TEST(test_last_number());
    TEST(test_lengths());
    TEST(test_groups());
    TEST(test_stream());
    TEST(test_step_documents());
    TEST(test_gspo());
    TEST(test_seeds());
    TEST(test_gspo_weights());
    TEST(test_kl_controller());
    TEST(test_shaped());
    TEST(test_gae());
    TEST(test_compared());
    TEST(test_whitened());
    TEST(test_taken());
    TEST(test_clip());
    TEST(test_token_losses());
    TEST(test_file_texts());
    TEST(test_estimators());
    TEST(test_places());
    TEST(test_critic_rate());
    TEST(test_roles());
    TEST(test_role_group());
    TEST(test_prompt_tokens());
    TEST(test_figures());
    TEST(test_samples());
    TEST(test_right_said());
    TEST(test_counted());
    TEST(test_rollouts_loaded());
    TEST(test_used_up());
    TEST(test_rewards_fit());
    TEST(test_tries());
    TEST(test_arrives());
    TEST(test_shown());
    TEST(test_counted_right());
    TEST(test_digests());
    TEST(test_closed());
    TEST(test_freed_twice());
    TEST(test_bindings());
    return test_summary();
}
