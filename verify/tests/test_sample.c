/* SPDX-License-Identifier: MIT OR Unlicense */
/* Sampled text: greedy against the whole model's logits, the same text in any company, the
   distribution of what is drawn against probabilities by a naive sort, ends of texts, and
   what is refused. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "seqpar_llama.h"
#include "support/test.h"

#define COUNT(list) ((int64_t)(sizeof(list) / sizeof *(list)))

static int64_t test_min(int64_t a, int64_t b) { return a < b ? a : b; }

static const seqpar_llama_config grouped = {.layers = 2,
                                            .hidden = 24,
                                            .heads = 6,
                                            .kv_heads = 2,
                                            .head_dim = 10,
                                            .intermediate = 37,
                                            .vocab = 53};
static const seqpar_llama_config tied = {.layers = 3,
                                         .hidden = 32,
                                         .heads = 2,
                                         .kv_heads = 2,
                                         .head_dim = 32,
                                         .intermediate = 64,
                                         .vocab = 40,
                                         .tied = 1,
                                         .window = 5};
/* all that families have beyond a plain Llama */
static const seqpar_llama_config parts = {.layers = 3,
                                          .hidden = 24,
                                          .heads = 6,
                                          .kv_heads = 3,
                                          .head_dim = 14,
                                          .intermediate = 37,
                                          .vocab = 47,
                                          .window = 6,
                                          .window_from = 1,
                                          .no_rope_every = 2,
                                          .qkv_bias = 1,
                                          .o_bias = 1,
                                          .mlp_bias = 1,
                                          .qk_norm = 1};
static const seqpar_llama_config routed = {.layers = 3,
                                           .hidden = 24,
                                           .heads = 6,
                                           .kv_heads = 3,
                                           .head_dim = 14,
                                           .intermediate = 19,
                                           .vocab = 47,
                                           .experts = 5,
                                           .experts_per_token = 2,
                                           .expert_intermediate = 23,
                                           .sparse_every = 2};
static const seqpar_llama_sample_desc plain = {
    .max_new_tokens = 12, .temperature = 1, .top_p = 1, .seed = 5};

/* ---- one rank with a model ---- */

typedef struct place {
    seqpar_comm *self;
    seqpar_device *device;
    seqpar_ctx ctx;
    seqpar_llama model;
} place;

/* Weights three times as far apart as init's, so that texts are not all alike. */
static void spread_weights(seqpar_ctx *ctx, seqpar_llama *m, uint64_t seed) {
    int64_t i, n;
    seqpar_llama_init(ctx, m, seed);
    for (i = 0; i < m->tensor_count; i++)
        for (n = 0; n < m->tensors[i].rows * m->tensors[i].cols; n++) {
            double x;
            seqpar_device_read(ctx->device, &x, m->params.data, m->tensors[i].offset + n, 1,
                               ctx->device->storage);
            /* biases begin as 0 */
            x = m->tensors[i].decay ? 3 * x : x + 0.3 * cos((double)(7 * i + n));
            seqpar_device_write(ctx->device, m->params.data, m->tensors[i].offset + n, &x, 1,
                                ctx->device->storage);
        }
}

static void place_open(place *p, int reference, const seqpar_llama_config *config) {
    p->self = seqpar_comm_self();
    p->device = reference ? seqpar_device_reference() : seqpar_device_cpu(1);
    if (seqpar_ctx_open(&p->ctx, p->self, p->device, 1) ||
        seqpar_llama_open(&p->ctx, &p->model, config)) {
        fprintf(stderr, "%s\n", p->self->error->text);
        exit(2);
    }
    spread_weights(&p->ctx, &p->model, 11);
}

static void place_close(place *p) {
    test_expect(p->ctx.memory.now[SEQPAR_MEM_ACTIVATIONS] == 0 &&
                    p->ctx.memory.now[SEQPAR_MEM_SCRATCH] == 0,
                "device memory is left over");
    seqpar_llama_close(&p->ctx, &p->model);
    seqpar_ctx_close(&p->ctx);
    seqpar_device_close(p->device);
    seqpar_comm_free(p->self);
}

/* Logits (tokens, vocab) of the training forward pass */
static double *whole_logits(place *p, const int32_t *ids, int64_t tokens) {
    int64_t cu[2] = {0, tokens}, i, vocab = p->model.config.vocab;
    int32_t *targets = malloc((size_t)tokens * 4), *positions = malloc((size_t)tokens * 4);
    seqpar_row row = {.tokens = tokens,
                      .cell = 0,
                      .docs = 1,
                      .cu_seqlens = cu,
                      .ids = (int32_t *)ids,
                      .targets = targets,
                      .position_ids = positions};
    seqpar_llama_batch_desc how = {0};
    seqpar_llama_batch b;
    double *logits = malloc((size_t)(tokens * vocab) * sizeof *logits);
    void *data = p->device->alloc(p->device, tokens * vocab * 8);
    for (i = 0; i < tokens; i++) {
        targets[i] = SEQPAR_IGNORE;
        positions[i] = (int32_t)i;
    }
    if (seqpar_llama_open_batch(&p->ctx, &p->model, &b, &row, 1, &how) ||
        seqpar_llama_forward(&p->ctx, &p->model, &b, 0) ||
        seqpar_llama_logits(&p->ctx, &p->model, &b, data)) {
        fprintf(stderr, "%s\n", p->self->error->text);
        exit(2);
    }
    seqpar_device_read(p->device, logits, data, 0, tokens * vocab, p->device->storage);
    seqpar_llama_close_batch(&p->ctx, &p->model, &b);
    p->device->free(p->device, data);
    free(targets);
    free(positions);
    return logits;
}

static int64_t largest(const double *x, int64_t count) {
    int64_t i, best = 0;
    for (i = 1; i < count; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* ---- prompts ---- */

enum { PROMPTS = 19 };
typedef struct prompt_set {
    seqpar_llama_prompt prompt[PROMPTS];
    int32_t ids[PROMPTS][320];
} prompt_set;

/* Of one token, of id 0 alone, as long as an attention task and longer, and short ones. */
static void make_prompts(prompt_set *s, int64_t vocab, int with_long) {
    static const int64_t lengths[PROMPTS] = {1,   1,  7,  128, 2,  129, 300, 3,  5, 1,
                                             257, 12, 33, 300, 17, 300, 4,   64, 2};
    int64_t i, t;
    for (i = 0; i < PROMPTS; i++) {
        int64_t tokens = with_long || lengths[i] < 40 ? lengths[i] : lengths[i] % 13 + 1;
        for (t = 0; t < tokens; t++)
            s->ids[i][t] = (int32_t)(i == 1 || t % 5 == 3 ? 0 : test_integer(0, vocab - 1));
        s->prompt[i] = (seqpar_llama_prompt){s->ids[i], tokens, 100 + i};
    }
}

static void expect_text(const seqpar_llama_text *got, const seqpar_llama_text *want, int64_t i,
                        const char *what) {
    test_expect(got->count == want->count && got->stopped == want->stopped &&
                    !memcmp(got->ids, want->ids, (size_t)want->count * 4),
                "%s: text %lld differs (%lld and %lld tokens)", what, (long long)i,
                (long long)got->count, (long long)want->count);
}

static int generate(place *p, seqpar_llama_text *texts, const seqpar_llama_prompt *prompts,
                    int64_t count, const seqpar_llama_sample_desc *desc) {
    seqpar_status status = seqpar_llama_generate(&p->ctx, &p->model, texts, prompts, count,
                                                 desc);
    return test_expect(!status, "%s: %s", seqpar_status_name(status), p->self->error->text);
}

/* ---- greedy ---- */

static void check_greedy_text(place *p, const seqpar_llama_prompt *prompt,
                              const seqpar_llama_text *text) {
    int32_t ids[400];
    int64_t n, vocab = p->model.config.vocab;
    memcpy(ids, prompt->ids, (size_t)prompt->tokens * 4);
    for (n = 0; n < text->count; n++) {
        double *logits = whole_logits(p, ids, prompt->tokens + n);
        int64_t best = largest(logits + (prompt->tokens + n - 1) * vocab, vocab);
        test_expect(best == text->ids[n],
                    "prompt of %lld tokens, token %lld is %d, the logits say %lld",
                    (long long)prompt->tokens, (long long)n, (int)text->ids[n],
                    (long long)best);
        ids[prompt->tokens + n] = text->ids[n];
        free(logits);
    }
}

static void test_greedy(int reference, const seqpar_llama_config *config, const char *name) {
    seqpar_llama_sample_desc desc = plain;
    seqpar_llama_text text[PROMPTS];
    prompt_set set;
    place p;
    int64_t i, distinct = 0;
    desc.temperature = 0;
    place_open(&p, reference, config);
    make_prompts(&set, config->vocab, 1);
    if (generate(&p, text, set.prompt, PROMPTS, &desc)) {
        for (i = 0; i < PROMPTS; i++) {
            test_expect(text[i].count == desc.max_new_tokens && !text[i].stopped,
                        "text %lld has %lld tokens", (long long)i, (long long)text[i].count);
            if (!reference || set.prompt[i].tokens < 150)
                check_greedy_text(&p, &set.prompt[i], &text[i]);
            distinct += text[i].ids[0] != text[0].ids[0] || text[i].ids[3] != text[0].ids[3];
        }
        test_expect(distinct > 5, "all texts are alike");
        seqpar_llama_texts_free(text, PROMPTS);
    }
    place_close(&p);
    test_end("sample_greedy_%s_%s", reference ? "fp64" : "cpu", name);
}

/* ---- company ---- */

typedef struct rollout { /* prompts dealt to the ranks in turn */
    int reference;
    int64_t world, sp, threads;
    const seqpar_llama_config *config;
    const prompt_set *set;
    seqpar_llama_sample_desc desc;
    seqpar_llama_text text[PROMPTS];
} rollout;

static seqpar_status rollout_rank(seqpar_comm *world, void *user) {
    rollout *r = user;
    seqpar_device *device = r->reference ? seqpar_device_reference()
                                         : seqpar_device_cpu(r->threads);
    seqpar_llama_prompt prompt[PROMPTS];
    seqpar_llama_text text[PROMPTS];
    seqpar_llama model;
    seqpar_ctx ctx;
    int64_t i, count = 0;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, r->sp);
    if (!status) status = seqpar_llama_open(&ctx, &model, r->config);
    if (!status) spread_weights(&ctx, &model, 11);
    for (i = world->rank; i < PROMPTS; i += world->size) prompt[count++] = r->set->prompt[i];
    if (!status) status = seqpar_llama_generate(&ctx, &model, text, prompt, count, &r->desc);
    for (i = 0; !status && i < count; i++) r->text[world->rank + i * world->size] = text[i];
    seqpar_llama_close(&ctx, &model);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static int roll(rollout *r) {
    seqpar_error error;
    memset(r->text, 0, sizeof r->text);
    return test_expect(!seqpar_run_threads(r->world, rollout_rank, r, &error), "%lld ranks: %s",
                       (long long)r->world, error.text);
}

static void test_company(int reference, const seqpar_llama_config *config, double temperature) {
    static const int64_t batches[] = {1, 2, 5, 16};
    rollout one = {.reference = reference,
                   .world = 1,
                   .sp = 1,
                   .threads = 1,
                   .config = config,
                   .desc = plain};
    prompt_set set;
    int64_t dp, sp, i, k;
    make_prompts(&set, config->vocab, !reference);
    one.set = &set;
    one.desc.temperature = temperature;
    one.desc.top_p = .9;
    one.desc.stops = (int32_t[]){3, 7};
    one.desc.stop_count = 2;
    one.desc.batch = 3;
    if (!roll(&one)) {
        test_end("sample_company");
        return;
    }
    for (dp = 1; dp <= 4; dp++)
        for (sp = 1; sp <= 4; sp++)
            for (k = 0; k < COUNT(batches); k++) {
                char what[80];
                rollout r = one;
                /* every limit on one rank and on 2 x 2 */
                if (dp * sp > 1 && k != (dp + sp) % COUNT(batches) && !(dp == 2 && sp == 2))
                    continue;
                r.world = dp * sp;
                r.sp = sp;
                r.desc.batch = batches[k];
                r.threads = dp == 1 ? 1 + sp % 2 : 1;
                snprintf(what, sizeof what, "D=%lld P=%lld batch %lld", (long long)dp,
                         (long long)sp, (long long)batches[k]);
                if (roll(&r))
                    for (i = 0; i < PROMPTS; i++)
                        expect_text(&r.text[i], &one.text[i], i, what);
                seqpar_llama_texts_free(r.text, PROMPTS);
            }
    seqpar_llama_texts_free(one.text, PROMPTS);
    test_end("sample_same_text_in_any_company_%s_%s_T%g", reference ? "fp64" : "cpu",
             config == &parts    ? "parts"
             : config == &routed ? "routed"
             : config == &tied   ? "tied"
                                 : "grouped",
             temperature);
}

/* What a text hangs on: seed, number and prompt, and nothing else. */
static void test_keys(void) {
    seqpar_llama_sample_desc desc = plain;
    seqpar_llama_text text[4], again[4];
    int32_t ids[] = {4, 0, 9};
    seqpar_llama_prompt prompt[4] = {{ids, 3, 0}, {ids, 3, 1}, {ids, 3, 0}, {ids, 2, 0}};
    place p;
    place_open(&p, 0, &grouped);
    if (generate(&p, text, prompt, 4, &desc)) {
        expect_text(&text[2], &text[0], 2, "same number");
        test_expect(memcmp(text[0].ids, text[1].ids, 12 * 4),
                    "number 0 and 1 have the same text");
        test_expect(memcmp(text[0].ids, text[3].ids, 12 * 4), "two prompts have the same text");
        desc.seed++;
        if (generate(&p, again, prompt, 4, &desc))
            test_expect(memcmp(text[0].ids, again[0].ids, 12 * 4),
                        "two seeds give the same text");
        seqpar_llama_texts_free(again, 4);
        seqpar_llama_texts_free(text, 4);
    }
    place_close(&p);
    test_end("sample_seed_and_number");
}

/* ---- distribution ---- */

typedef struct ranked {
    double p;
    int64_t id;
} ranked;

static int likelier(const void *a, const void *b) {
    const ranked *x = a, *y = b;
    return x->p > y->p ? -1 : x->p < y->p ? 1 : x->id < y->id ? -1 : 1;
}

/* p (vocab): softmax, sort, cut, divide. */
static void naive_probabilities(double *p, const double *logits, int64_t vocab,
                                const seqpar_llama_sample_desc *d) {
    ranked *r = calloc((size_t)vocab, sizeof *r);
    double sum = 0, reached = 0, kept = 0;
    int64_t i, limit = d->top_k > 0 && d->top_k < vocab ? d->top_k : vocab, left;
    for (i = 0; i < vocab; i++)
        r[i] = (ranked){exp((logits[i] - logits[largest(logits, vocab)]) / d->temperature), i};
    qsort(r, (size_t)vocab, sizeof *r, likelier);
    for (i = 0; i < limit; i++) sum += r[i].p;
    for (left = 0; left < limit && (left == 0 || reached < d->top_p * sum); left++)
        reached += r[left].p;
    if (d->top_p == 1) left = limit;
    for (i = 0; i < left; i++) kept += r[i].p;
    for (i = 0; i < vocab; i++) p[r[i].id] = i < left ? r[i].p / kept : 0;
    free(r);
}

enum { DRAWS = 20000 };
static void count_draws(place *p, int64_t *counts, const int32_t *ids, int64_t tokens,
                        const seqpar_llama_sample_desc *desc) {
    seqpar_llama_prompt *prompt = calloc(DRAWS, sizeof *prompt);
    seqpar_llama_text *text = calloc(DRAWS, sizeof *text);
    int64_t i;
    for (i = 0; i < DRAWS; i++) prompt[i] = (seqpar_llama_prompt){ids, tokens, i};
    if (generate(p, text, prompt, DRAWS, desc))
        for (i = 0; i < DRAWS; i++) counts[text[i].ids[0]]++;
    seqpar_llama_texts_free(text, DRAWS);
    free(prompt);
    free(text);
}

static void expect_distribution(const int64_t *counts, const double *p, int64_t vocab) {
    double chi = 0, rest = 0, rest_count = 0, freedom = -1;
    int64_t i;
    for (i = 0; i < vocab; i++) {
        double want = p[i] * DRAWS, d = (double)counts[i] - want;
        if (p[i] == 0) {
            test_expect(counts[i] == 0, "token %lld lies outside and came %lld times",
                        (long long)i, (long long)counts[i]);
            continue;
        }
        if (want < 5) {
            rest += want;
            rest_count += (double)counts[i];
            continue;
        }
        chi += d * d / want;
        freedom++;
    }
    if (rest >= 5) {
        chi += (rest_count - rest) * (rest_count - rest) / rest;
        freedom++;
    }
    test_expect(chi <= freedom + 4 * sqrt(2 * freedom) + 1,
                "chi-square is %g for %g degrees of freedom", chi, freedom);
}

static void test_distribution(const char *name, double temperature, int64_t top_k,
                              double top_p) {
    seqpar_llama_sample_desc desc = {.max_new_tokens = 1,
                                     .batch = 250,
                                     .temperature = temperature,
                                     .top_p = top_p,
                                     .top_k = top_k,
                                     .seed = 77};
    int32_t ids[] = {5, 0, 31};
    int64_t counts[64] = {0};
    double want[64], *logits;
    place p;
    place_open(&p, 0, &grouped);
    logits = whole_logits(&p, ids, 3);
    naive_probabilities(want, logits + 2 * 53, 53, &desc);
    count_draws(&p, counts, ids, 3, &desc);
    if (temperature > 1e-6)
        expect_distribution(counts, want, 53);
    else
        test_expect(counts[largest(logits + 2 * 53, 53)] == DRAWS,
                    "next to no temperature is not greedy");
    free(logits);
    place_close(&p);
    test_end("sample_distribution_%s", name);
}

/* All logits are 0: of equals the lowest ids come first. */
static void test_ties(void) {
    seqpar_llama_sample_desc desc = {
        .max_new_tokens = 1, .batch = 250, .temperature = 1, .top_p = 1, .seed = 3};
    int32_t ids[] = {1};
    static const struct {
        double temperature, top_p;
        int64_t top_k, kept;
    } cases[] = {{1, 1, 3, 3},  {1, .5, 0, 20}, {1, .51, 0, 21}, {2, .5, 4, 2},
                 {2, .6, 4, 3}, {1, 1, 0, 40},  {0, 1, 0, 1}};
    int64_t c, i;
    place p;
    place_open(&p, 0, &tied);
    p.device->zero(p.device, p.model.params.data, p.model.params.bytes, NULL);
    for (c = 0; c < COUNT(cases); c++) {
        int64_t counts[64] = {0};
        desc.temperature = cases[c].temperature;
        desc.top_p = cases[c].top_p;
        desc.top_k = cases[c].top_k;
        count_draws(&p, counts, ids, 1, &desc);
        for (i = 0; i < 40; i++)
            test_expect((counts[i] > 0) == (i < cases[c].kept),
                        "top_k %lld, top_p %g: token %lld came %lld times",
                        (long long)cases[c].top_k, cases[c].top_p, (long long)i,
                        (long long)counts[i]);
    }
    place_close(&p);
    test_end("sample_ties_go_to_the_lower_id");
}

/* ---- ends ---- */

static int64_t first_of(const seqpar_llama_text *t, int32_t id) {
    int64_t i;
    for (i = 0; i < t->count; i++)
        if (t->ids[i] == id) return i;
    return t->count;
}

static void expect_prefix(const seqpar_llama_text *got, const seqpar_llama_text *whole,
                          int64_t count, int stopped, const char *what) {
    test_expect(got->count == count && got->stopped == stopped,
                "%s: %lld tokens, stopped %d; want %lld, %d", what, (long long)got->count,
                got->stopped, (long long)count, stopped);
    test_expect(count <= whole->count &&
                    !memcmp(got->ids, whole->ids, (size_t)test_min(count, got->count) * 4),
                "%s: the text is another", what);
}

/* Stops at a token of a text, which is the first, the second or the last of three; the others
   are no token of any text but by chance. */
static void expect_stops(place *p, const prompt_set *set, const seqpar_llama_text *whole,
                         seqpar_llama_sample_desc desc) {
    seqpar_llama_text text[PROMPTS];
    for (int64_t hit = 0; hit < 3; hit++) {
        int32_t stops[3] = {0, 0, 0};
        stops[hit] = whole[2].ids[4];
        desc.stops = stops;
        desc.stop_count = 3;
        if (generate(p, text, set->prompt, PROMPTS, &desc))
            for (int64_t i = 0; i < PROMPTS; i++) {
                int64_t at = test_min(first_of(&whole[i], stops[hit]), first_of(&whole[i], 0));
                expect_prefix(&text[i], &whole[i], test_min(at + 1, 12), at < 12, "stop ids");
            }
        seqpar_llama_texts_free(text, PROMPTS);
    }
}

static void test_ends(void) {
    seqpar_llama_sample_desc desc = plain;
    seqpar_llama_text whole[PROMPTS], text[PROMPTS];
    prompt_set set;
    place p;
    int64_t i;
    place_open(&p, 0, &tied);
    make_prompts(&set, 40, 0);
    desc.batch = 4;
    if (generate(&p, whole, set.prompt, PROMPTS, &desc)) {
        expect_stops(&p, &set, whole, desc);
        for (desc.max_new_tokens = 1; desc.max_new_tokens <= 5; desc.max_new_tokens += 4) {
            if (generate(&p, text, set.prompt, PROMPTS, &desc))
                for (i = 0; i < PROMPTS; i++)
                    expect_prefix(&text[i], &whole[i], desc.max_new_tokens, 0,
                                  "max_new_tokens");
            seqpar_llama_texts_free(text, PROMPTS);
        }
        desc.max_new_tokens = 12;
        desc.max_tokens = 36;
        if (generate(&p, text, set.prompt, PROMPTS, &desc))
            for (i = 0; i < PROMPTS; i++)
                expect_prefix(&text[i], &whole[i], test_min(12, 36 - set.prompt[i].tokens), 0,
                              "max_tokens");
        seqpar_llama_texts_free(text, PROMPTS);
        seqpar_llama_texts_free(whole, PROMPTS);
    }
    test_expect(generate(&p, text, NULL, 0, &desc), "no prompts");
    place_close(&p);
    test_end("sample_ends_by_stop_id_and_length");
}

/* ---- refusals ---- */

typedef struct refusal {
    const char *name;
    seqpar_status status;
    const char *word;
    seqpar_llama_sample_desc desc;
    int64_t tokens, id, count;
    int score;
} refusal;

static void check_refusal(const refusal *r) {
    static const int32_t bad_stop[] = {3, 53};
    seqpar_llama_config config = grouped;
    seqpar_llama_sample_desc desc = r->desc;
    int32_t ids[8] = {1, 2, 0, (int32_t)r->id, 4, 5, 6, 7};
    seqpar_llama_prompt prompt[2] = {
        {ids, 3, 8}, {r->tokens == -9 ? NULL : ids, r->tokens == -9 ? 4 : r->tokens, 9}};
    seqpar_llama_text text[2];
    seqpar_status status;
    place p;
    if (r->score) config.score = "score";
    if (desc.stop_count == 2) desc.stops = bad_stop;
    place_open(&p, 0, &config);
    status = seqpar_llama_generate(&p.ctx, &p.model, text, prompt, r->count, &desc);
    test_expect(status == r->status && p.self->error->status == status, "%s: %s",
                seqpar_status_name(status), p.self->error->text);
    test_expect(strstr(p.self->error->text, r->word) != NULL, "'%s' is not in: %s", r->word,
                p.self->error->text);
    place_close(&p);
    test_end("sample_refuses_%s", r->name);
}

static void test_refusals(void) {
    static const refusal table[] = {
        {"temperature_negative",
         SEQPAR_ERR_OPTION,
         "temperature is -0.1",
         {4, 0, 0, -.1, 1},
         4,
         1,
         2,
         0},
        {"temperature_nan", SEQPAR_ERR_OPTION, "temperature is", {4, 0, 0, NAN, 1}, 4, 1, 2, 0},
        {"temperature_infinite",
         SEQPAR_ERR_OPTION,
         "temperature is inf",
         {4, 0, 0, HUGE_VAL, 1},
         4,
         1,
         2,
         0},
        {"top_p_zero", SEQPAR_ERR_OPTION, "top_p is 0;", {4, 0, 0, 1, 0}, 4, 1, 2, 0},
        {"top_p_above_one", SEQPAR_ERR_OPTION, "top_p is 1.01", {4, 0, 0, 1, 1.01}, 4, 1, 2, 0},
        {"top_p_nan", SEQPAR_ERR_OPTION, "top_p is", {4, 0, 0, 0, NAN}, 4, 1, 2, 0},
        {"top_k_negative", SEQPAR_ERR_OPTION, "top_k is -1", {4, 0, 0, 1, 1, -1}, 4, 1, 2, 0},
        {"batch_negative", SEQPAR_ERR_OPTION, "batch -2", {4, 0, -2, 1, 1}, 4, 1, 2, 0},
        {"max_tokens_negative",
         SEQPAR_ERR_OPTION,
         "max_tokens -3",
         {4, -3, 0, 1, 1},
         4,
         1,
         2,
         0},
        {"stops_missing",
         SEQPAR_ERR_OPTION,
         "stop ids at NULL",
         {4, 0, 0, 1, 1, 0, NULL, 1},
         4,
         1,
         2,
         0},
        {"stop_id", SEQPAR_ERR_TOKEN_ID, "stop id 53", {4, 0, 0, 1, 1, 0, NULL, 2}, 4, 1, 2, 0},
        {"no_new_tokens", SEQPAR_ERR_SIZE, "max_new_tokens 0", {0, 0, 0, 1, 1}, 4, 1, 2, 0},
        {"count_negative", SEQPAR_ERR_SIZE, "-1 prompts", {4, 0, 0, 1, 1}, 4, 1, -1, 0},
        {"empty_prompt",
         SEQPAR_ERR_DOCUMENT_TOKENS,
         "prompt 1 has 0 tokens",
         {4, 0, 0, 1, 1},
         0,
         1,
         2,
         0},
        {"prompt_without_ids",
         SEQPAR_ERR_DOCUMENT_TOKENS,
         "prompt 1 has 4 tokens at NULL",
         {4, 0, 0, 1, 1},
         -9,
         1,
         2,
         0},
        {"long_prompt",
         SEQPAR_ERR_OPTION,
         "prompt 1 has 5 tokens and max_tokens is 5",
         {4, 5, 0, 1, 1},
         5,
         1,
         2,
         0},
        {"more_than_positions",
         SEQPAR_ERR_OPTION,
         "positions end at",
         {INT64_C(2147483647), 0, 0, 1, 1},
         5,
         1,
         2,
         0},
        {"id_too_large",
         SEQPAR_ERR_TOKEN_ID,
         "prompt 1, token 3 has id 53",
         {4, 0, 0, 1, 1},
         5,
         53,
         2,
         0},
        {"id_negative",
         SEQPAR_ERR_TOKEN_ID,
         "prompt 1, token 3 has id -1",
         {4, 0, 0, 1, 1},
         5,
         -1,
         2,
         0},
        {"score_model",
         SEQPAR_ERR_OPTION,
         "the model ends in 'score'",
         {4, 0, 0, 1, 1},
         4,
         1,
         2,
         1},
    };
    int64_t i;
    for (i = 0; i < COUNT(table); i++) check_refusal(&table[i]);
}

/* A NaN in the row of one id: whoever comes across the token ends with its place, and no
   text is left. */
static void test_not_finite(void) {
    seqpar_llama_sample_desc desc = plain;
    int32_t ids[] = {1, 2, 3, 17};
    seqpar_llama_prompt prompt[2] = {{ids, 2, 40}, {ids, 4, 41}};
    seqpar_llama_text text[2];
    double nan = NAN;
    seqpar_status status;
    place p;
    place_open(&p, 0, &grouped);
    seqpar_device_write(p.device, p.model.params.data, p.model.tensors[0].offset + 17 * 24,
                        &nan, 1, p.device->storage);
    status = seqpar_llama_generate(&p.ctx, &p.model, text, prompt, 2, &desc);
    test_expect(status == SEQPAR_ERR_NOT_FINITE, "%s", seqpar_status_name(status));
    test_expect(strstr(p.self->error->text, "prompt 1 (number 41): at position 4 ") != NULL,
                "%s", p.self->error->text);
    test_expect(!text[0].ids && !text[1].ids && !text[0].count, "texts are left");
    place_close(&p);
    test_end("sample_names_a_logit_that_is_not_finite");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_greedy(1, &grouped, "grouped"));
    TEST(test_greedy(1, &tied, "tied"));
    TEST(test_greedy(0, &grouped, "grouped"));
    TEST(test_greedy(0, &tied, "tied"));
    TEST(test_greedy(1, &parts, "parts"));
    TEST(test_greedy(0, &parts, "parts"));
    TEST(test_company(0, &parts, 1));
    TEST(test_greedy(1, &routed, "routed"));
    TEST(test_greedy(0, &routed, "routed"));
    TEST(test_company(0, &routed, 1));
    TEST(test_company(0, &grouped, 1));
    TEST(test_company(0, &tied, 1.3));
    TEST(test_company(0, &grouped, 0));
    TEST(test_company(1, &grouped, 1));
    TEST(test_keys());
    TEST(test_distribution("temperature_1", 1, 0, 1));
    TEST(test_distribution("temperature_half", .5, 0, 1));
    TEST(test_distribution("top_k", 2.5, 5, 1));
    TEST(test_distribution("top_k_all", 2, 53, 1));
    TEST(test_distribution("top_k_above_vocab", 2, 99, 1));
    TEST(test_distribution("top_p", 3, 0, .7));
    TEST(test_distribution("top_k_then_top_p", 3, 12, .8));
    TEST(test_distribution("next_to_no_temperature", 1e-300, 0, 1));
    TEST(test_ties());
    TEST(test_ends());
    TEST(test_refusals());
    TEST(test_not_finite());
    return test_summary();
}
