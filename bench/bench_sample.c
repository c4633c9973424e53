/* SPDX-License-Identifier: MIT OR Unlicense */
/* Tokens per second of seqpar_llama_generate on one thread: a model whose weights lie far
   outside the cache grows 1 text, and 16 at a time. One text can be no faster than its
   weights are read, many no faster than products are computed.
   Of stream: bytes of weights per second over what a loop of additions reads of the same
   weights. Of product: 2 x weights x tokens per second over the best large product of the
   same device. Before anything is timed, texts are compared with the likeliest tokens of the
   training forward pass, and those of all batches with each other.

       bench_sample [LAYERS]      4 layers of hidden 2048 (1 GiB)

   Wanted: 60 % of stream for one text, for 16 the lesser of 40 % of product and 5 times the
   tokens per second of one. */
#include "bench.h"
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "seqpar_llama.h"

enum { TEXTS = 16, PROMPT = 16, STEPS = 32 };
static int repeats = 5;
static int64_t side = 2048; /* of the large product */
static const double least_stream = .6, least_product = .4, least_gain = 5;

typedef struct bench {
    seqpar_comm *self;
    seqpar_device *device;
    seqpar_ctx ctx;
    seqpar_llama model;
    int32_t ids[TEXTS][PROMPT];
    seqpar_llama_prompt prompt[TEXTS];
    double weights;
} bench;

static void give_up(const bench *b) {
    fprintf(stderr, "%s\n", b->self->error->text);
    exit(1);
}

static void bench_open(bench *b, int64_t layers) {
    seqpar_llama_config config = {.layers = layers,
                                  .hidden = size_or_tiny(2048, 128),
                                  .heads = 16,
                                  .kv_heads = 4,
                                  .head_dim = size_or_tiny(128, 8),
                                  .intermediate = size_or_tiny(6144, 384),
                                  .vocab = size_or_tiny(32000, 500),
                                  .tied = 1};
    int64_t i, t;
    b->self = seqpar_comm_self();
    b->device = seqpar_device_cpu(1);
    if (seqpar_ctx_open(&b->ctx, b->self, b->device, 1) ||
        seqpar_llama_open(&b->ctx, &b->model, &config))
        give_up(b);
    for (i = 0; i < b->model.tensor_count; i++) { /* uniform, as far apart as init's */
        const seqpar_tensor *tensor = &b->model.tensors[i];
        double reach = tensor->decay ? sqrt(3.0 / (double)tensor->cols) : 0;
        fill_random((float *)b->model.params.data + tensor->offset, tensor->rows * tensor->cols,
                    (uint64_t)i, tensor->decay ? -reach : 1, tensor->decay ? reach : 1);
    }
    b->weights = (double)b->model.values; /* tied: the table is read twice */
    for (i = 0; i < TEXTS; i++) {
        for (t = 0; t < PROMPT; t++)
            b->ids[i][t] = (int32_t)(seqpar_random_uniform(3, (uint64_t)i, (uint64_t)t) *
                                     (double)config.vocab);
        b->prompt[i] = (seqpar_llama_prompt){b->ids[i], PROMPT, i};
    }
}

static void generate(bench *b, seqpar_llama_text *text, int64_t texts, int64_t batch,
                     int64_t tokens, double temperature) {
    seqpar_llama_sample_desc desc = {.max_new_tokens = tokens,
                                     .batch = batch,
                                     .temperature = temperature,
                                     .top_p = .95,
                                     .top_k = 50,
                                     .seed = 1};
    if (seqpar_llama_generate(&b->ctx, &b->model, text, b->prompt, texts, &desc)) give_up(b);
}

/* ---- correctness ---- */

/* Whether the likeliest token at every place of the text is the one that was taken. */
static int greedy_is_right(bench *b, const seqpar_llama_text *text) {
    int32_t ids[PROMPT + STEPS], targets[PROMPT + STEPS], positions[PROMPT + STEPS];
    int64_t tokens = PROMPT + text->count - 1, cu[2] = {0, tokens}, i, k, right = 0;
    int64_t vocab = b->model.config.vocab;
    seqpar_row row = {.tokens = tokens,
                      .cell = 0,
                      .docs = 1,
                      .cu_seqlens = cu,
                      .ids = ids,
                      .targets = targets,
                      .position_ids = positions};
    seqpar_llama_batch_desc how = {0};
    seqpar_llama_batch batch;
    float *logits = b->device->alloc(b->device, tokens * vocab * 4);
    for (i = 0; i < tokens; i++) {
        ids[i] = i < PROMPT ? b->ids[0][i] : text->ids[i - PROMPT];
        targets[i] = SEQPAR_IGNORE;
        positions[i] = (int32_t)i;
    }
    if (seqpar_llama_open_batch(&b->ctx, &b->model, &batch, &row, 1, &how) ||
        seqpar_llama_forward(&b->ctx, &b->model, &batch, 0) ||
        seqpar_llama_logits(&b->ctx, &b->model, &batch, logits))
        give_up(b);
    for (i = 0; i < text->count; i++) {
        const float *x = logits + (PROMPT - 1 + i) * vocab;
        int64_t best = 0;
        for (k = 1; k < vocab; k++)
            if (x[k] > x[best]) best = k;
        right += best == text->ids[i];
    }
    seqpar_llama_close_batch(&b->ctx, &b->model, &batch);
    b->device->free(b->device, logits);
    return right == text->count;
}

static int same_texts(const seqpar_llama_text *a, const seqpar_llama_text *b, int64_t count) {
    int64_t i;
    for (i = 0; i < count; i++)
        if (a[i].count != b[i].count || memcmp(a[i].ids, b[i].ids, (size_t)a[i].count * 4))
            return 0;
    return 1;
}

static int is_right(bench *b) {
    seqpar_llama_text one[TEXTS], all[TEXTS];
    int right;
    generate(b, one, 1, 1, 6, 0);
    right = greedy_is_right(b, one);
    seqpar_llama_texts_free(one, 1);
    generate(b, one, 2, 1, 4, .8);
    generate(b, all, TEXTS, TEXTS, 4, .8);
    right = right && same_texts(one, all, 2);
    seqpar_llama_texts_free(one, 2);
    seqpar_llama_texts_free(all, TEXTS);
    return right;
}

/* ---- bounds ---- */

static volatile float sink;
static void read_loop(void *user) {
    const bench *b = user;
    const vector *x = b->model.params.data;
    vector sum[8] = {{0}};
    int64_t i, k;
    for (i = 0; i + 8 <= b->model.elements * 4 / VECTOR; i += 8) {
#pragma GCC unroll 8
        for (k = 0; k < 8; k++) sum[k] += x[i + k];
    }
    for (k = 1; k < 8; k++) sum[0] += sum[k];
    sink = sum[0][0];
}

typedef struct square {
    seqpar_device *device;
    seqpar_matmul_args args;
} square;

static void square_call(void *user) {
    square *s = user;
    s->device->matmul(s->device, &s->args, NULL);
}

static double product_peak(seqpar_device *device) {
    float *x = random_floats(side * side, 1), *w = random_floats(side * side, 2);
    float *y = random_floats(side * side, 3);
    square s = {device, {{y, side}, {x, side}, {w, side}, side, side, side, 0, 0}};
    double best = HUGE_VAL;
    int i;
    for (i = 0; i < repeats; i++) best = fmin(best, seconds_of(square_call, &s, 1));
    free(x);
    free(w);
    free(y);
    return 2.0 * (double)(side * side * side) / best;
}

/* ---- speed ---- */

/* of one step, after the prompts */
typedef struct rate {
    double stream, seconds;
} rate;

static double seconds_to(bench *b, int64_t texts, int64_t tokens) {
    seqpar_llama_text text[TEXTS];
    double began = now(), took;
    generate(b, text, texts, texts, tokens, .8);
    took = now() - began;
    seqpar_llama_texts_free(text, texts);
    return took;
}

/* What the steps take is the best of all less the best of prompts and first token: a
   difference of neighbours would gain by noise. */
static void measure_steps(bench *b, int64_t texts, rate *r) {
    double first = HUGE_VAL, all = HUGE_VAL, read = HUGE_VAL;
    int i;
    for (i = 0; i < repeats; i++) {
        first = fmin(first, seconds_to(b, texts, 1));
        all = fmin(all, seconds_to(b, texts, 1 + STEPS));
        read = fmin(read, seconds_of(read_loop, b, 1));
    }
    r->seconds = (all - first) / STEPS;
    r->stream = (double)b->model.params.bytes / read;
}

int main(int argc, char **argv) {
    static bench b;
    report r;
    rate rates[2];
    double product, wanted, tokens[2];
    int k, right;
    int64_t layers = take_arguments(argc, argv, 1) > 1 && !tiny ? atoll(argv[1]) : 4;
    if (layers < 1) {
        fprintf(stderr, "%s: '%.60s' is no number of layers; give 1 or more\n", argv[0],
                argv[1]);
        return 2;
    }
    if (tiny) repeats = 1, side = 128;
    bench_open(&b, layers);
    right = is_right(&b);
    product = product_peak(b.device);
    for (k = 0; k < 2; k++) measure_steps(&b, k ? TEXTS : 1, &rates[k]);
    rates[0].stream = rates[1].stream = fmax(rates[0].stream, rates[1].stream);
    report_open(&r, "sample",
                "\"device\": \"%s\", \"threads\": 1, \"weights_mib\": %.0f, \"stream_gbs\": "
                "%.2f, \"product_gflops\": %.1f,",
                b.device->name, (double)b.model.params.bytes / 1048576, rates[0].stream / 1e9,
                product / 1e9);
    printf("sampled text, one thread: %.0f MiB of weights, read at %.1f GB/s; products %.1f "
           "GF/s; prompts of %d tokens\n\n",
           (double)b.model.params.bytes / 1048576, rates[0].stream / 1e9, product / 1e9,
           PROMPT);
    printf("%8s %12s %12s %12s %12s %12s\n", "texts", "ms a step", "tokens/s", "of stream",
           "of product", "wanted");
    for (k = 0; k < 2; k++) {
        double stream = 4 * b.weights / rates[k].seconds / rates[k].stream, share;
        tokens[k] = (k ? TEXTS : 1) / rates[k].seconds;
        share = 2 * b.weights * tokens[k] / product;
        wanted = k ? fmin(least_product * product / (2 * b.weights), least_gain * tokens[0])
                   : least_stream * rates[0].stream / (4 * b.weights);
        printf("%8d %12.1f %12.2f %11.1f%% %11.1f%% %12.2f%s%s\n", k ? TEXTS : 1,
               rates[k].seconds * 1e3, tokens[k], 100 * stream, 100 * share, wanted,
               tokens[k] < wanted ? "  missed" : "", right ? "" : "  WRONG");
        report_case(&r, right,
                    "\"texts\": %d, \"tokens_per_second\": %.3f, \"share_of_stream\": %.4f, "
                    "\"share_of_product\": %.4f, \"wanted\": %.3f",
                    k ? TEXTS : 1, tokens[k], stream, share, wanted);
    }
    seqpar_llama_close(&b.ctx, &b.model);
    seqpar_ctx_close(&b.ctx);
    seqpar_device_close(b.device);
    seqpar_comm_free(b.self);
    return report_close(&r);
}
