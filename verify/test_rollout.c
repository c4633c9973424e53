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
#include "ppo.h"
#include "test.h"

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
    unsigned char *whole = (unsigned char *)demo_room(1, 64 + sizeof offsets);
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
    } cases[] = {{"{\"rewards\": [1, -2.5e0]}", NULL},
                 {" {\"logs\": {}, \"rewards\": [0, 0], \"x\": null}\n", NULL},
                 {"{\"rewards\": [1]}", "1 rewards for 2 texts"},
                 {"{\"rewards\": [1, 2, 3]}", "3 rewards for 2 texts"},
                 {"{\"rewards\": []}", "0 rewards"},
                 {"{\"rewards\": [1, null]}", "rewards[1] is null"},
                 {"{\"rewards\": [\"1\", 2]}", "rewards[0] is text"},
                 {"{\"rewards\": [1, [2]]}", "rewards[1] is a list"},
                 {"{\"rewards\": [1, true]}", "rewards[1] is true or false"},
                 {"{\"rewards\": [1, NaN]}", "no JSON from byte 16"},
                 {"{\"rewards\": [1, -1e999]}", "rewards[1] is -inf"},
                 {"{\"rewards\": 1}", "\"rewards\" is a number"},
                 {"[1, 2]", "\"rewards\" is missing"},
                 {"7", "\"rewards\" is missing"},
                 {"", "(empty)"},
                 {"<html>", "no JSON from byte 0"},
                 {"{\"rewards\": [1, 2]", "no JSON from byte"}};
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
    static const struct {
        const char *urls;
        int wrong;
    } cases[] = {{"http://a", 0},  {"https://a/b?c,http://d:1/", 0},
                 {"", 1},          {"a", 1},
                 {"http://a,", 1}, {"http://a,b.py", 1},
                 {"file:///x", 1}, {",http://a", 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        demo_reward_servers servers = {.urls = cases[i].urls};
        demo_error error = {""};
        test_expect(!!demo_servers_check(&servers, &error) == cases[i].wrong &&
                        !!*error.text == cases[i].wrong,
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
                 {0, 1, -2, 3, 100, false, 3},     {20, 2, 0.5, 3, 100, true, 0.5}};
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
                 {{2, 2, 2, 2}, {-1, 3}, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        test_expect(demo_group_kept(cases[i].scores, 4, cases[i].range) == cases[i].kept,
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
static double fixture_loss(const fixture *f, demo_place place, double x, double entropy) {
    double columns[UPDATE_COLUMNS] = {0}, seed[2] = {0};
    demo_token_seed(&f->update, place, x, entropy, columns, seed);
    return columns[LOSS_OF] + f->options.ptx_coef * columns[PRETRAINING_LOSS];
}

static void fixture_differences(const fixture *f, demo_place place, double x, double entropy,
                                const char *what) {
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
            fixture_differences(&f, (demo_place){entry >= 2, entry}, 0.5 * test_normal(), 1.5,
                                trial % 2 ? "value" : "policy");
        fixture_differences(&f, (demo_place){2, 0}, -1.5, 0.5, "pretraining");
        fixture_differences(&f, (demo_place){-1, -1}, -1.5, 0.5, "prompt");
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
        demo_token_seed(&f.update, (demo_place){entry >= 2, entry}, -1, 2, columns, seed);
        sum += columns[LOSS_OF];
        test_expect(apart(seed[0], entry >= 2 ? 11.0 / (2 * 3) : 5.0 / (2 * 2)) < 1e-15,
                    "entry %lld: seed %g", (long long)entry, seed[0]);
    }
    test_expect(apart(sum, (3.0 + 7.0) / 2) < 1e-15, "loss %g is not the mean over texts", sum);
    free(f.update.text);
    arrfree(f.window.which);
    test_end("gspo_weights");
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
    test_state += test_seed;
    test_texts();
    test_words();
    test_question();
    test_answers();
    test_addresses();
    test_last_number();
    test_lengths();
    test_groups();
    test_stream();
    test_step_documents();
    test_gspo();
    test_seeds();
    test_gspo_weights();
    test_counted_right();
    test_digests();
    test_closed();
    test_freed_twice();
    test_bindings();
    return test_summary();
}
