/* SPDX-License-Identifier: MIT OR Unlicense */
/* Sampler = trainer: the log-prob that comes with a sampled token has the bits of the one that
   training computes for it, whatever the text is packed with and however many ranks hold it. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "seqpar_llama.h"
#include "layouts.h"
#include "test.h"

#define COUNT(list) ((int64_t)(sizeof(list) / sizeof *(list)))

static const struct {
    const char *name;
    seqpar_llama_config config;
} models[] = {
    {"grouped",
     {.layers = 2,
      .hidden = 24,
      .heads = 6,
      .kv_heads = 2,
      .head_dim = 10,
      .intermediate = 37,
      .vocab = 53}},
    {"tied_window",
     {.layers = 3,
      .hidden = 32,
      .heads = 2,
      .kv_heads = 2,
      .head_dim = 32,
      .intermediate = 64,
      .vocab = 40,
      .tied = 1,
      .window = 5}},
    {"window_from_1",
     {.layers = 3,
      .hidden = 32,
      .heads = 4,
      .kv_heads = 2,
      .head_dim = 16,
      .intermediate = 64,
      .vocab = 301,
      .window = 150,
      .window_from = 1}},
    {"parts",
     {.layers = 3,
      .hidden = 24,
      .heads = 6,
      .kv_heads = 3,
      .head_dim = 14,
      .intermediate = 37,
      .vocab = 47,
      .window = 100,
      .window_from = 1,
      .no_rope_every = 2,
      .qkv_bias = 1,
      .o_bias = 1,
      .mlp_bias = 1,
      .qk_norm = 1}},
    {"experts",
     {.layers = 3,
      .hidden = 24,
      .heads = 6,
      .kv_heads = 3,
      .head_dim = 14,
      .intermediate = 19,
      .vocab = 47,
      .experts = 5,
      .experts_per_token = 2,
      .expert_intermediate = 23,
      .sparse_every = 2}},
    {"long_vocabulary",
     {.layers = 1,
      .hidden = 48,
      .heads = 3,
      .kv_heads = 1,
      .head_dim = 16,
      .intermediate = 80,
      .vocab = 1009,
      .qk_norm = 1}},
};

enum { TEXTS = 7, MOST = 330 };
enum { SLOW, FAST, SLOW_BF16, FAST_BF16, DEVICES };
static const char *const device_names[] = {"fp64", "fp32", "bf16_by_fp64", "bf16"};

/* Prompts, what was sampled after them, and the same texts in training. */
typedef struct world {
    seqpar_llama_config config;
    int device;
    seqpar_llama_sample_desc sample;
    int64_t count, prompt_tokens[TEXTS];
    int32_t *prompt[TEXTS];
    seqpar_llama_text text[TEXTS];
    /* training: the texts in order, so many documents in each row */
    int64_t row_docs[TEXTS], rows, ranks;
    int layout, schedule, numbered;
    double *logp[TEXTS];
    _Atomic int64_t found; /* log-probs that training has */
} world;

static seqpar_device *device_of(int kind, int64_t threads) {
    switch (kind) {
    case SLOW: return seqpar_device_reference();
    case FAST: return seqpar_device_cpu(threads);
    case SLOW_BF16: return seqpar_device_reference_bf16();
    default: return seqpar_device_cpu_bf16(threads);
    }
}

/* Weights three times as far apart as init's, so that texts are not all alike; biases are not 0. */
static void spread_weights(seqpar_ctx *ctx, seqpar_llama *m) {
    seqpar_llama_init(ctx, m, 11);
    for (int64_t i = 0; i < m->tensor_count; i++)
        for (int64_t n = 0; n < m->tensors[i].rows * m->tensors[i].cols; n++) {
            int64_t at = m->tensors[i].offset + n;
            double x;
            seqpar_device_read(ctx->device, &x, m->params.data, at, 1, ctx->device->storage);
            x = m->tensors[i].decay ? 3 * x : x + 0.3 * cos((double)(7 * i + n));
            seqpar_device_write(ctx->device, m->params.data, at, &x, 1, ctx->device->storage);
        }
}

/* A rank with a model; what follows a failed open is not tried. */
typedef struct place {
    seqpar_device *device;
    seqpar_ctx ctx;
    seqpar_llama model;
} place;

static seqpar_status place_open(place *p, seqpar_comm *comm, const world *w, int64_t threads) {
    p->device = device_of(w->device, threads);
    seqpar_status status = seqpar_ctx_open(&p->ctx, comm, p->device, comm->size);
    if (!status) status = seqpar_llama_open(&p->ctx, &p->model, &w->config);
    if (!status) spread_weights(&p->ctx, &p->model);
    return status;
}

static void place_close(place *p) {
    seqpar_llama_close(&p->ctx, &p->model);
    seqpar_ctx_close(&p->ctx);
    seqpar_device_close(p->device);
}

static seqpar_status sample_rank(seqpar_comm *comm, void *user) {
    world *w = user;
    seqpar_llama_prompt prompts[TEXTS];
    place p;
    seqpar_status status = place_open(&p, comm, w, 2);
    for (int64_t i = 0; i < w->count; i++)
        prompts[i] = (seqpar_llama_prompt){w->prompt[i], w->prompt_tokens[i], 100 + i};
    if (!status)
        status = seqpar_llama_generate(&p.ctx, &p.model, w->text, prompts, w->count,
                                       &w->sample);
    place_close(&p);
    return status;
}

/* ---- training on the texts ---- */

static int64_t text_tokens(const world *w, int64_t i) {
    return w->prompt_tokens[i] + w->text[i].count;
}

static int32_t text_id(const world *w, int64_t i, int64_t t) {
    return t < w->prompt_tokens[i] ? w->prompt[i][t] : w->text[i].ids[t - w->prompt_tokens[i]];
}

static void row_fill(const world *w, seqpar_row *row, int64_t first) {
    int64_t *cu = (int64_t *)row->cu_seqlens, *source = (int64_t *)row->doc_source, at = 0;
    for (int64_t d = 0; d < row->docs; d++, cu[d] = at) {
        int64_t tokens = text_tokens(w, first + d);
        source[d] = 5 * (first + d) + 3; /* numbers rise, and leave some out */
        for (int64_t t = 0; t < tokens; t++, at++) {
            ((int32_t *)row->ids)[at] = text_id(w, first + d, t);
            ((int32_t *)row->position_ids)[at] = (int32_t)t;
            ((int32_t *)row->targets)[at] = t + 1 < tokens ? text_id(w, first + d, t + 1)
                                                           : SEQPAR_IGNORE;
        }
    }
    if (!w->numbered) row->doc_source = NULL;
}

/* The rows of the world; all that they point to lies in *room, to be freed. */
static void rows_new(const world *w, seqpar_row *rows, void **room) {
    int64_t total = 0, first = 0;
    for (int64_t i = 0; i < w->count; i++) total += text_tokens(w, i);
    int64_t *numbers = *room = calloc((size_t)(3 * TEXTS + 2 * total + 2), 8);
    int32_t *ids = (int32_t *)(numbers + 3 * TEXTS);
    for (int64_t r = 0; r < w->rows; first += w->row_docs[r++]) {
        seqpar_row *row = &rows[r];
        *row = (seqpar_row){.index = r, .cell = w->sample.cell, .docs = w->row_docs[r]};
        for (int64_t d = 0; d < row->docs; d++) row->tokens += text_tokens(w, first + d);
        row->cu_seqlens = numbers;
        row->doc_source = numbers + row->docs + 1;
        numbers += 2 * row->docs + 1;
        row->ids = ids;
        row->position_ids = ids + row->tokens;
        row->targets = ids + 2 * row->tokens;
        ids += 3 * row->tokens;
        row_fill(w, row, first);
    }
}

/* The log-probs that this rank has of row r, whose first text is number `first`. */
static void take_logp(world *w, const seqpar_row *rows, int64_t r, int64_t first,
                      const seqpar_share *share, const double *local) {
    double *row = calloc((size_t)rows[r].tokens + 1, sizeof *row);
    for (int64_t t = 0; t < rows[r].tokens; t++) row[t] = NAN;
    seqpar_gather(row, local, share, r, sizeof *row);
    for (int64_t d = 0; d < rows[r].docs; d++)
        for (int64_t i = 0; i < w->text[first + d].count; i++) {
            double x = row[rows[r].cu_seqlens[d] + w->prompt_tokens[first + d] + i - 1];
            if (x != x) continue;
            w->logp[first + d][i] = x;
            w->found++;
        }
    free(row);
}

static seqpar_status train_rank(seqpar_comm *comm, void *user) {
    world *w = user;
    double temperature = w->sample.temperature ? w->sample.temperature : 1;
    seqpar_llama_run how = {
        .layout = w->layout, .schedule = w->schedule, .temperature = temperature};
    seqpar_row rows[TEXTS];
    seqpar_llama_batch b = {0};
    void *room;
    place p;
    seqpar_status status = place_open(&p, comm, w, 1);
    rows_new(w, rows, &room);
    if (!status) status = seqpar_llama_open_batch(&p.ctx, &p.model, &b, rows, w->rows, &how);
    if (!status) status = seqpar_llama_forward(&p.ctx, &p.model, &b, 0);
    if (!status) status = seqpar_llama_values(&p.ctx, &p.model, &b);
    double *local = calloc((size_t)b.tokens + 1, sizeof *local);
    if (!status)
        seqpar_device_read(p.device, local, b.logp.data, 0, b.tokens, p.device->accumulator);
    for (int64_t r = 0, first = 0; !status && r < w->rows; first += w->row_docs[r++])
        take_logp(w, rows, r, first, b.share, local);
    seqpar_llama_close_batch(&p.ctx, &p.model, &b);
    place_close(&p);
    free(local);
    free(room);
    return status;
}

/* ---- both ---- */

/* Samples; 1: it went well. */
static int sampled(world *w) {
    seqpar_error error;
    for (int64_t i = 0; i < w->count; i++)
        for (int64_t t = 0; t < w->prompt_tokens[i]; t++)
            w->prompt[i][t] = (int32_t)test_integer(0, w->config.vocab - 1);
    int ok = test_expect(!seqpar_run_threads(1, sample_rank, w, &error), "%s", error.text);
    for (int64_t i = 0; ok && i < w->count; i++)
        w->logp[i] = malloc((size_t)w->text[i].count * sizeof *w->logp[i]);
    return ok;
}

/* Trains one pass over the texts and compares; returns how many log-probs were compared. */
static int64_t expect_same(world *w) {
    seqpar_error error;
    int64_t all = 0, differ = 0;
    double worst = 0;
    w->found = 0;
    for (int64_t i = 0; i < w->count; i++)
        memset(w->logp[i], 0xff, (size_t)w->text[i].count * sizeof *w->logp[i]);
    if (!test_expect(!seqpar_run_threads(w->ranks, train_rank, w, &error), "%s", error.text))
        return 0;
    for (int64_t i = 0; i < w->count; i++)
        for (int64_t t = 0; t < w->text[i].count; t++, all++) {
            double a = w->text[i].logp[t], b = w->logp[i][t];
            differ += memcmp(&a, &b, sizeof a) != 0;
            if (!(fabs(a - b) <= worst)) worst = fabs(a - b);
        }
    test_expect(!differ && w->found == all,
                "%s, cells of %lld, %lld ranks, %s, %s, %lld rows: %lld of %lld log-probs "
                "differ, worst %g; training has %lld",
                device_names[w->device], (long long)w->sample.cell, (long long)w->ranks,
                seqpar_layout_name(w->layout), seqpar_schedule_name(w->schedule),
                (long long)w->rows, (long long)differ, (long long)all, worst,
                (long long)w->found);
    return all;
}

static void world_free(world *w) {
    seqpar_llama_texts_free(w->text, w->count);
    for (int64_t i = 0; i < w->count; i++) {
        free(w->prompt[i]);
        free(w->logp[i]);
    }
}

/* Rows of one text and more, in order. */
static void draw_rows(world *w) {
    int64_t left = w->count;
    for (w->rows = 0; left; left -= w->row_docs[w->rows++])
        w->row_docs[w->rows] = test_integer(1, left);
}

static void draw_training(world *w) {
    static const int64_t ranks[] = {1, 2, 3, 4, 5, 8};
    draw_rows(w);
    w->ranks = ranks[test_integer(0, 5)];
    w->layout = layout_of_grid(test_integer(0, 9));
    w->schedule = (int)test_integer(0, SEQPAR_SCHEDULE_COUNT - 1);
    w->numbered = (int)test_integer(0, 1);
}

/* Prompts of one token, of whole cells, and of one more and one less; short ones where every
   token is a cell. */
static void draw_prompts(world *w) {
    static const int64_t tokens[] = {1, 7, 3, 127, 128, 129, 300, 257, 40};
    int64_t some = w->sample.cell == 1 ? 3 : COUNT(tokens);
    w->count = test_integer(2, TEXTS);
    for (int64_t i = 0; i < w->count; i++) {
        w->prompt_tokens[i] = tokens[test_integer(0, some - 1)];
        w->prompt[i] = malloc(MOST * sizeof *w->prompt[i]);
    }
}

static void test_worlds(int model, int device) {
    static const double temperatures[] = {1, 0.7, 0, 1.9};
    static const int64_t cells[] = {0, 0, 1, 16, 100}, batches[] = {0, 1, 3};
    const int slow = device == SLOW || device == SLOW_BF16;
    const int turns = getenv("TEST_ALL") ? 12 : slow ? 1 : 2;
    int64_t compared = 0;
    for (int turn = 0; turn < turns; turn++) {
        world w = {.config = models[model].config, .device = device};
        w.sample = (seqpar_llama_sample_desc){.max_new_tokens = slow ? 20 : 150,
                                              .temperature = temperatures[test_integer(0, 3)],
                                              .top_p = test_integer(0, 1) ? 1 : 0.6,
                                              .top_k = test_integer(0, 1) * 5,
                                              .seed = (uint64_t)turn,
                                              .batch = batches[test_integer(0, 2)],
                                              .cell = cells[test_integer(0, 4)]};
        if (w.sample.cell == 1) w.sample.max_new_tokens = 9;
        draw_prompts(&w);
        for (int way = 0, ok = sampled(&w); ok && way < 3; way++) {
            draw_training(&w);
            compared += expect_same(&w);
        }
        world_free(&w);
    }
    test_expect(compared > 50, "only %lld log-probs", (long long)compared);
    test_end("sampled_%s_%s", models[model].name, device_names[device]);
}

/* Cells grow at token 16,384, and their leaves leave numbers out from there on. */
static void test_long(void) {
    world w = {.device = FAST, .count = 2, .prompt_tokens = {16370, 5}, .numbered = 1};
    w.config = (seqpar_llama_config){.layers = 1,
                                     .hidden = 8,
                                     .heads = 1,
                                     .kv_heads = 1,
                                     .head_dim = 8,
                                     .intermediate = 8,
                                     .vocab = 31};
    w.sample = (seqpar_llama_sample_desc){
        .max_new_tokens = 600, .temperature = 1, .top_p = 1, .seed = 7};
    for (int64_t i = 0; i < w.count; i++)
        w.prompt[i] = malloc((size_t)w.prompt_tokens[i] * sizeof *w.prompt[i]);
    if (sampled(&w)) {
        w.rows = 1;
        w.row_docs[0] = 2;
        w.ranks = 1;
        test_expect(expect_same(&w) == 1200, "fewer texts");
        w.ranks = 3;
        w.layout = SEQPAR_LAYOUT_ZIGZAG;
        test_expect(expect_same(&w) == 1200, "fewer texts");
    }
    world_free(&w);
    test_end("sampled_beyond_16384_tokens");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    for (int device = 0; device < DEVICES; device++)
        for (int model = 0; model < COUNT(models); model++) TEST(test_worlds(model, device));
    TEST(test_long());
    return test_summary();
}
