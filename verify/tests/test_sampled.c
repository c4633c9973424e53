/* SPDX-License-Identifier: MIT OR Unlicense */
/* Sampler = trainer: the log-prob that comes with a sampled token has the bits of the one that
   training computes for it, whatever the text is packed with and however many ranks hold it. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "seqpar_llama.h"
#include "support/layouts.h"
#include "support/sampled_world.h"
#include "support/test.h"

#define COUNT(list) ((int64_t)(sizeof(list) / sizeof *(list)))

static const struct {
    const char *name;
    seqpar_llama_config config;
    seqpar_adapter_desc adapter;
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
    {"adapters",
     {.layers = 2,
      .hidden = 24,
      .heads = 6,
      .kv_heads = 2,
      .head_dim = 10,
      .intermediate = 37,
      .vocab = 53,
      .window = 90,
      .qkv_bias = 1},
     {3, 0.75, SEQPAR_ADAPT_ALL}},
};

enum { MOST = 330 };

typedef struct kind {
    const char *name;
    int slow;
    seqpar_device *(*device)(int64_t threads);
} kind;

static seqpar_device *reference(int64_t threads) {
    return threads > 0 ? seqpar_device_reference() : NULL;
}
static seqpar_device *reference_bf16(int64_t threads) {
    return threads > 0 ? seqpar_device_reference_bf16() : NULL;
}

static const kind kinds[] = {{"fp64", 1, reference},
                             {"fp32", 0, seqpar_device_cpu},
                             {"bf16_by_fp64", 1, reference_bf16},
                             {"bf16", 0, seqpar_device_cpu_bf16}};

/* ---- both ---- */

/* Samples; 1: it went well. */
static int sampled(world *w) {
    seqpar_error error = {0};
    for (int64_t i = 0; i < w->count; i++)
        for (int64_t t = 0; t < w->prompt_tokens[i]; t++)
            w->prompt[i][t] = (int32_t)test_integer(0, w->config.vocab - 1);
    return test_expect(world_sample(w, &error), "%s", error.text);
}

/* Returns how many log-probs were compared. */
static int64_t expect_same(world *w) {
    seqpar_error error = {0};
    comparison c;
    if (!test_expect(world_compare(w, &c, &error), "%s", error.text)) return 0;
    test_expect(!c.differ && !c.missing,
                "cells of %lld, %lld ranks, %s, %s, %lld rows: %lld of %lld log-probs differ, "
                "worst %g; training lacks %lld",
                (long long)w->sample.cell, (long long)w->ranks, seqpar_layout_name(w->layout),
                seqpar_schedule_name(w->schedule), (long long)w->rows, (long long)c.differ,
                (long long)c.all, c.worst, (long long)c.missing);
    return c.all;
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

static void test_worlds(int model, const kind *k) {
    static const double temperatures[] = {1, 0.7, 0, 1.9};
    static const int64_t cells[] = {0, 0, 1, 16, 100}, batches[] = {0, 1, 3};
    const int turns = getenv("TEST_ALL") ? 12 : k->slow ? 1 : 2;
    int64_t compared = 0;
    for (int turn = 0; turn < turns; turn++) {
        world w = {.config = models[model].config,
                   .adapter = models[model].adapter,
                   .device = k->device};
        w.sample = (seqpar_llama_sample_desc){.max_new_tokens = k->slow ? 20 : 150,
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
    test_end("sampled_%s_%s", models[model].name, k->name);
}

/* Cells grow at token 16,384, and their leaves leave numbers out from there on. */
static void test_long(void) {
    world w = {
        .device = seqpar_device_cpu, .count = 2, .prompt_tokens = {16370, 5}, .numbered = 1};
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
    for (int64_t k = 0; k < COUNT(kinds); k++)
        for (int model = 0; model < COUNT(models); model++) TEST(test_worlds(model, &kinds[k]));
    TEST(test_long());
    return test_summary();
}
