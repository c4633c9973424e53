/* SPDX-License-Identifier: MIT OR Unlicense */
/* Adapters (LoRA): their step has the bits of one rank however it is split; their gradients are
   what the chain rule gives of a whole model with merged weights; new ones change nothing. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "support/drawn_way.h"
#include "support/layouts.h"

enum { PAIRS = 6, LONGEST = 31, PACK_LEN = 70 };
static const seqpar_adapter_desc everywhere = {3, 1.25, SEQPAR_ADAPT_ALL};
static const objective_way alone = {
    .dp = 1, .sp = 1, .accumulation = 1, .threads = 1, .optimizer = SEQPAR_OPTIM_ADAMW};

static void task_open(objective_task *t, int kind, const seqpar_adapter_desc *adapter) {
    objective_task_open(t, kind, PAIRS, LONGEST, PACK_LEN, 5);
    t->adapter = *adapter;
}

static void task_close(objective_task *t) {
    free((void *)t->start);
    objective_task_close(t);
}

static void same(const double *got, const double *want, int64_t n, const char *of,
                 const char *what) {
    int64_t i = 0;
    if (!memcmp(got, want, (size_t)n * sizeof *got)) return;
    while (i < n - 1 && !memcmp(&got[i], &want[i], sizeof *got)) i++;
    test_expect(0, "%s: %s %lld is %.17g, not %.17g", what, of, (long long)i, got[i], want[i]);
}

static void expect_same_step(const objective_result *got, const objective_result *want,
                             const char *what) {
    if (!test_expect(!got->status, "%s: %s", what, got->error.text)) return;
    same(&got->loss, &want->loss, 1, "loss", what);
    same(&got->norm, &want->norm, 1, "norm", what);
    same(got->gradient, want->gradient, want->elements, "gradient", what);
    same(got->params, want->params, want->elements, "parameter", what);
    same(got->state, want->state, 3 * want->elements, "state", what);
    same(got->logits, want->logits, want->tokens * want->width, "logit", what);
}

/* All of them: 2,592, and a score. */
static void expect_learnt(const objective_task *t, const objective_result *r) {
    int64_t moved = 0, values = 2592 + (t->config.score ? t->config.hidden : 0);
    for (int64_t i = 0; i < r->elements; i++) moved += r->params[i] != r->start[i];
    test_expect(!r->status && r->norm > 0 && moved >= values && moved <= r->elements,
                "%s, norm %g, %lld of %lld", r->error.text, r->norm, (long long)moved,
                (long long)values);
}

static objective_way way_drawn(int device) {
    objective_way way = objective_way_drawn(device);
    way.mlp_rows = (int64_t[]){0, 1, 6, 31}[test_integer(0, 3)];
    way.slice = (int64_t[]){0, 1, 1024}[test_integer(0, 2)];
    return way;
}

/* four_bits: of a model that is kept in them, whose bits are those of one with these values. */
static void test_ways(int device, int kind, const seqpar_adapter_desc *desc, int four_bits,
                      int ways) {
    objective_task t;
    objective_result one, other;
    objective_way way = alone;
    task_open(&t, kind, desc);
    t.start = objective_adapters(&t);
    way.reference_device = device;
    t.rounded = four_bits;
    objective_run(&t, &way, &one);
    expect_learnt(&t, &one);
    t.rounded = 0;
    t.config.four_bits = four_bits;
    for (int i = 0; i < ways; i++) {
        objective_way w = way_drawn(device);
        char what[120];
        snprintf(what, sizeof what,
                 "D=%lld P=%lld A=%lld %s %s zero=%d recompute=%d mlp_rows=%lld slice=%lld",
                 (long long)w.dp, (long long)w.sp, (long long)w.accumulation,
                 seqpar_layout_name(w.layout), seqpar_schedule_name(w.schedule), w.zero_stage,
                 w.recompute, (long long)w.mlp_rows, (long long)w.slice);
        objective_run(&t, &w, &other);
        expect_same_step(&other, &one, what);
        objective_result_free(&other);
    }
    objective_result_free(&one);
    task_close(&t);
    test_end("adapters_%s_%s%s%s", (const char *[]){"fp32", "fp64", "bf16"}[device],
             objective_name(kind), desc->dropout > 0 ? "_dropout" : "",
             four_bits ? "_four_bits" : "");
}

/* ---- by the chain rule ---- */

/* The tables of a task's model and adapters. */
typedef struct tables {
    seqpar_comm *self;
    seqpar_device *device;
    seqpar_ctx ctx;
    seqpar_llama model, adapters;
} tables;

static void tables_open(tables *x, const objective_task *t) {
    memset(x, 0, sizeof *x);
    x->self = seqpar_comm_self();
    x->device = seqpar_device_reference();
    seqpar_ctx_open(&x->ctx, x->self, x->device, 1);
    seqpar_llama_open(&x->ctx, &x->model, &t->config);
    seqpar_llama_open_adapters(&x->ctx, &x->adapters, &x->model, &t->adapter, 0, 0);
}

static void tables_close(tables *x) {
    seqpar_llama_close(&x->ctx, &x->adapters);
    seqpar_llama_close(&x->ctx, &x->model);
    seqpar_ctx_close(&x->ctx);
    seqpar_device_close(x->device);
    seqpar_comm_free(x->self);
}

/* The model's tensor that A, number `a`, is of: by its name alone. */
static const seqpar_tensor *adapted(const tables *x, int64_t a) {
    const char *name = x->adapters.tensors[a].name + strlen("base_model.model.");
    size_t length = (size_t)(strstr(name, "lora_A") - name);
    for (int64_t i = 0; i < x->model.tensor_count; i++)
        if (!strncmp(x->model.tensors[i].name, name, length) &&
            !strcmp(x->model.tensors[i].name + length, "weight"))
            return &x->model.tensors[i];
    return NULL;
}

/* w (of the model) += scale B A. */
static void merge(const tables *x, double *w, const double *adapters) {
    const seqpar_tensor *all = x->adapters.tensors;
    int64_t rank = x->adapters.adapter.rank;
    for (int64_t n = 0; n < x->adapters.tensor_count / 2 * 2; n += 2) {
        const seqpar_tensor *t = adapted(x, n);
        const double *a = adapters + all[n].offset, *b = adapters + all[n + 1].offset;
        for (int64_t i = 0; i < t->rows; i++)
            for (int64_t j = 0; j < t->cols; j++)
                for (int64_t k = 0; k < rank; k++)
                    w[t->offset + i * t->cols + j] += x->adapters.adapter.scale *
                                                      b[i * rank + k] * a[k * t->cols + j];
    }
}

/* The adapters' gradient from that of merged weights: dA = scale B^T dW, dB = scale dW A^T. */
static void chain(const tables *x, double *gradient, const double *dw, const double *adapters) {
    const seqpar_tensor *all = x->adapters.tensors;
    int64_t rank = x->adapters.adapter.rank;
    double scale = x->adapters.adapter.scale;
    for (int64_t n = 0; n < x->adapters.tensor_count / 2 * 2; n += 2) {
        const seqpar_tensor *t = adapted(x, n);
        for (int64_t i = 0; i < t->rows; i++)
            for (int64_t j = 0; j < t->cols; j++)
                for (int64_t k = 0; k < rank; k++) {
                    double d = scale * dw[t->offset + i * t->cols + j];
                    int64_t a = all[n].offset + k * t->cols + j;
                    int64_t b = all[n + 1].offset + i * rank + k;
                    gradient[a] += d * adapters[b];
                    gradient[b] += d * adapters[a];
                }
    }
}

static void test_chain(int kind, const char *name, void (*change)(seqpar_llama_config *),
                       const seqpar_adapter_desc *desc) {
    objective_task t, plain;
    objective_result got, base, merged;
    objective_way way = alone;
    tables x;
    way.reference_device = 1;
    task_open(&t, kind, desc);
    if (change) change(&t.config);
    t.start = objective_adapters(&t);
    plain = t;
    plain.adapter.rank = 0;
    plain.start = NULL;
    plain.same_reference = 1;
    tables_open(&x, &t);
    objective_run(&t, &way, &got);
    objective_run(&plain, &way, &base);
    double *want = calloc((size_t)got.elements, sizeof *want);
    merge(&x, base.start, t.start);
    if (t.config.score) { /* which learns as it is */
        const seqpar_tensor *own = &x.adapters.tensors[x.adapters.tensor_count - 1];
        const seqpar_tensor *of = &x.model.tensors[x.model.tensor_count - 1];
        memcpy(base.start + of->offset, t.start + own->offset, (size_t)of->cols * sizeof *want);
    }
    plain.start = base.start;
    objective_run(&plain, &way, &merged);
    chain(&x, want, merged.gradient, t.start);
    if (t.config.score)
        memcpy(want + x.adapters.tensors[x.adapters.tensor_count - 1].offset,
               merged.gradient + x.model.tensors[x.model.tensor_count - 1].offset,
               (size_t)t.config.hidden * sizeof *want);
    double off = test_distance(got.gradient, want, got.elements);
    double logits = test_distance(got.logits, merged.logits, got.tokens * got.width);
    test_expect(!got.status && !merged.status && got.norm > 0, "%s%s", got.error.text,
                merged.error.text);
    test_expect(off <= 1e-12, "the gradient is off by %.1e", off);
    test_expect(logits <= 1e-13 && fabs(got.loss - merged.loss) <= 1e-13 * fabs(merged.loss),
                "logits are off by %.1e, the loss by %.1e", logits, got.loss - merged.loss);
    objective_result_free(&got);
    objective_result_free(&base);
    objective_result_free(&merged);
    tables_close(&x);
    free(want);
    task_close(&t);
    test_end("adapters_chain_%s: off by %.1e", name, off);
}

static void with_parts(seqpar_llama_config *c) {
    c->qkv_bias = c->o_bias = c->mlp_bias = c->qk_norm = c->tied = 1;
    c->window = 11;
}

static void with_experts(seqpar_llama_config *c) {
    c->experts = 5;
    c->experts_per_token = 2;
    c->expert_intermediate = 11;
}

/* ---- dropout ---- */

static const seqpar_adapter_desc dropping = {3, 1.25, SEQPAR_ADAPT_ALL, 0.3};

/* Another world drops the same, and the gradient is the loss's slope. */
static void test_slope(void) {
    objective_task t;
    objective_result at, side[2];
    objective_way way = alone;
    double slope = 0, step = 1e-6;
    way.reference_device = 1;
    task_open(&t, OBJECTIVE_SFT, &dropping);
    double *start = objective_adapters(&t);
    t.start = start;
    objective_run(&t, &way, &at);
    for (int k = 0; k < 2; k++) {
        double *moved = malloc((size_t)at.elements * sizeof *moved);
        for (int64_t i = 0; i < at.elements; i++)
            moved[i] = start[i] + (k ? step : -step) * sin((double)(3 * i + 1));
        t.start = moved;
        objective_run(&t, &way, &side[k]);
        free(moved);
    }
    for (int64_t i = 0; i < at.elements; i++)
        slope += at.gradient[i] * sin((double)(3 * i + 1));
    double found = (side[1].loss - side[0].loss) / (2 * step);
    test_expect(!at.status && fabs(found - slope) <= 1e-7 * at.norm,
                "%s: slope %.12g, by the loss %.12g, norm %g", at.error.text, slope, found,
                at.norm);
    for (int k = 0; k < 2; k++) objective_result_free(&side[k]);
    objective_result_free(&at);
    t.start = start;
    task_close(&t);
    test_end("adapters_dropout_slope: off by %.1e", fabs(found - slope));
}

/* What the device was asked to drop. */
enum { DROPS = 64 };
static struct {
    int64_t count, tokens, wrong;
    uint64_t stream[DROPS], seed;
    double dropout;
    seqpar_status (*drop)(seqpar_device *device, const seqpar_drop_args *a, void *queue);
} dropped;

static seqpar_status note_drop(seqpar_device *device, const seqpar_drop_args *a, void *queue) {
    static const int64_t lengths[] = {5, 1, 9};
    int64_t t = 0;
    if (dropped.count < DROPS) dropped.stream[dropped.count++] = a->stream;
    dropped.tokens = a->rows;
    dropped.seed = a->seed;
    dropped.dropout = a->dropout;
    for (int64_t d = 0; d < 3; d++)
        for (int64_t k = 0; k < lengths[d]; k++, t++)
            dropped.wrong += a->document[t] != 40 + 3 * d || a->position[t] != k;
    return dropped.drop(device, a, queue);
}

/* Every matrix of every layer has draws of its own, by document and position in it. */
static void test_draws(int on) {
    static const int64_t cu_seqlens[] = {0, 5, 6, 15}, source[] = {40, 43, 46};
    int32_t ids[15] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5, 4, 3}, positions[15] = {0};
    seqpar_row row = {.tokens = 15,
                      .docs = 3,
                      .cu_seqlens = cu_seqlens,
                      .doc_source = source,
                      .ids = ids,
                      .targets = ids,
                      .position_ids = positions};
    seqpar_llama_batch_desc run = {.dropout = on, .dropout_seed = 9, .dropout_step = 2};
    seqpar_llama_batch b = {0};
    objective_task t;
    tables x;
    int64_t alike = 0;
    task_open(&t, OBJECTIVE_SFT, &dropping);
    tables_open(&x, &t);
    memset(&dropped, 0, sizeof dropped);
    dropped.drop = x.device->drop;
    x.device->drop = note_drop;
    x.model.adapters = &x.adapters;
    seqpar_status status = seqpar_llama_open_batch(&x.ctx, &x.model, &b, &row, 1, &run);
    if (!status) status = seqpar_llama_forward(&x.ctx, &x.model, &b, 1);
    for (int64_t i = 0; i < dropped.count; i++)
        for (int64_t k = 0; k < i; k++) alike += dropped.stream[i] == dropped.stream[k];
    test_expect(
        !status && dropped.count == (on ? 7 * t.config.layers : 0) && !alike &&
            !dropped.wrong &&
            (!on || (dropped.tokens == 15 && dropped.seed == 9 && dropped.dropout == 0.3)),
        "status %d, %lld draws, %lld alike, %lld of other tokens", status,
        (long long)dropped.count, (long long)alike, (long long)dropped.wrong);
    seqpar_llama_close_batch(&x.ctx, &x.model, &b);
    tables_close(&x);
    objective_task_close(&t);
    test_end("adapters_dropout_draws%s", on ? "" : "_none");
}

/* ---- merged ---- */

static void logits_of(tables *x, const seqpar_row *row, double *logits) {
    const seqpar_llama_batch_desc run = {0};
    seqpar_llama_batch b = {0};
    seqpar_status status = seqpar_llama_open_batch(&x->ctx, &x->model, &b, row, 1, &run);
    if (!status) status = seqpar_llama_forward(&x->ctx, &x->model, &b, 0);
    if (!status) status = seqpar_llama_logits(&x->ctx, &x->model, &b, logits);
    test_expect(!status, "status %d", status);
    seqpar_llama_close_batch(&x->ctx, &x->model, &b);
}

/* More rows in a matrix than are merged at a time. */
static void test_merged(void) {
    enum { N = 9 };
    static const int64_t cu_seqlens[] = {0, N};
    int32_t ids[N] = {3, 1, 4, 1, 5, 9, 2, 6, 5}, positions[N] = {0, 1, 2, 3, 4, 5, 6, 7, 8};
    const seqpar_row row = {.tokens = N,
                            .docs = 1,
                            .cu_seqlens = cu_seqlens,
                            .ids = ids,
                            .targets = ids,
                            .position_ids = positions};
    objective_task t;
    tables x;
    task_open(&t, OBJECTIVE_SFT, &everywhere);
    t.config.intermediate = 131;
    tables_open(&x, &t);
    seqpar_llama_init(&x.ctx, &x.model, 5);
    for (int64_t i = 0; i < x.adapters.elements; i++)
        ((double *)x.adapters.params.data)[i] = 0.2 * sin((double)(7 * i + 1));
    int64_t n = N * t.config.vocab;
    double *logits = calloc((size_t)(3 * n), sizeof *logits);
    logits_of(&x, &row, logits);
    x.model.adapters = &x.adapters;
    logits_of(&x, &row, logits + n);
    seqpar_status status = seqpar_llama_merge(&x.ctx, &x.model);
    test_expect(!status && !x.model.adapters, "status %d", status);
    logits_of(&x, &row, logits + 2 * n);
    double off = test_distance(logits + 2 * n, logits + n, n);
    test_expect(off <= 1e-13 && test_distance(logits, logits + n, n) > 0.01,
                "off by %.1e, without them by %.1e", off, test_distance(logits, logits + n, n));
    free(logits);
    tables_close(&x);
    objective_task_close(&t);
    test_end("adapters_merged: off by %.1e", off);
}

/* ---- new ones ---- */

/* B is 0: the model is as it was, its first DPO loss ln 2, and of the gradient A's is 0. */
static void test_new(void) {
    objective_task t, plain;
    objective_result got, want;
    int64_t moved = 0;
    task_open(&t, OBJECTIVE_DPO, &everywhere);
    plain = t;
    plain.adapter.rank = 0;
    plain.same_reference = 1;
    objective_run(&t, &alone, &got);
    objective_run(&plain, &alone, &want);
    test_expect(!got.status && !want.status, "%s%s", got.error.text, want.error.text);
    for (int64_t i = 0; i < got.tokens * got.width; i++)
        moved += got.logits[i] != want.logits[i];
    test_expect(!moved, "%lld logits differ", (long long)moved);
    test_expect(got.loss == want.loss && got.loss == log(2.0), "first loss %.18f", got.loss);
    test_expect(got.norm > 0, "norm %g", got.norm);
    objective_result_free(&got);
    objective_result_free(&want);
    objective_task_close(&t);
    test_end("adapters_new");
}

/* ---- four bits ---- */

/* Bytes by the formula, gains and tables as they were, matrices near what was written; in whatever
   parts. */
static void test_codes(void) {
    seqpar_comm *self = seqpar_comm_self();
    seqpar_device *device = seqpar_device_cpu(1);
    objective_task t;
    seqpar_llama model[2];
    seqpar_ctx ctx;
    int64_t bytes = 0, values = 0;
    task_open(&t, OBJECTIVE_SFT, &everywhere);
    t.config.qkv_bias = t.config.qk_norm = 1;
    seqpar_llama_config coded = t.config;
    coded.four_bits = 1;
    seqpar_status status = seqpar_ctx_open(&ctx, self, device, 1);
    if (!status) status = seqpar_llama_open(&ctx, &model[0], &t.config);
    if (!status) status = seqpar_llama_open(&ctx, &model[1], &coded);
    for (int i = 0; !status && i < 2; i++) seqpar_llama_init(&ctx, &model[i], 7);
    for (int64_t i = 0; !status && i < model[0].tensor_count; i++) {
        const seqpar_tensor *is = &model[0].tensors[i];
        int64_t n = is->rows * is->cols, matrix = is->rows > 1 && strstr(is->name, ".layers.");
        double *x = calloc((size_t)(2 * n), sizeof *x), far = 0, most = 0;
        status = seqpar_llama_read(&ctx, &model[0], x, i, 0, n);
        for (int64_t k = 0, part; !status && k < n; k += part) {
            part = n - k < 37 ? n - k : 37;
            status = seqpar_llama_read(&ctx, &model[1], x + n + k, i, k, part);
        }
        for (int64_t k = 0; k < n; k++) {
            far = fmax(far, fabs(x[k] - x[n + k]));
            most = fmax(most, fabs(x[k]));
        }
        bytes += matrix ? seqpar_nf4_bytes(n) : 0;
        values += matrix ? n : 0;
        test_expect(matrix ? far > 0 && far < 0.2 * most : far == 0, "%s is off by %g of %g",
                    is->name, far, most);
        free(x);
    }
    test_expect(!status && model[1].code_bytes == bytes && model[1].codes.bytes == bytes &&
                    model[1].elements < model[0].elements - values,
                "status %d, %lld bytes of %lld values, %lld and %lld elements", status,
                (long long)model[1].code_bytes, (long long)values, (long long)model[1].elements,
                (long long)model[0].elements);
    static const int64_t exact[][2] = {
        {1, 12},       {64, 44},      {65, 44}, /* elements, bytes */
        {16384, 8456}, {16385, 8464}, {32768, 16908}};
    for (size_t i = 0; i < sizeof exact / sizeof *exact; i++)
        test_expect(seqpar_nf4_bytes(exact[i][0]) == exact[i][1],
                    "%lld elements have %lld bytes", (long long)exact[i][0],
                    (long long)seqpar_nf4_bytes(exact[i][0]));
    test_expect((double)seqpar_nf4_bytes(1 << 24) < 0.5161 * (1 << 24), "%lld bytes",
                (long long)seqpar_nf4_bytes(1 << 24));
    for (int i = 0; i < 2; i++) seqpar_llama_close(&ctx, &model[i]);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(self);
    objective_task_close(&t);
    test_end("adapters_codes: %lld bytes of %lld values", (long long)bytes, (long long)values);
}

int main(int argc, char **argv) {
    static const seqpar_adapter_desc attention = {1, 2, 15}, some = {5, 0.5, 1 + 4 + 64};
    test_begin(argc, argv);
    TEST(test_new());
    TEST(test_chain(OBJECTIVE_SFT, "sft", NULL, &everywhere));
    TEST(test_chain(OBJECTIVE_SFT, "parts", with_parts, &everywhere));
    TEST(test_chain(OBJECTIVE_SFT, "experts", with_experts, &attention));
    TEST(test_chain(OBJECTIVE_RM, "rm", NULL, &some));
    TEST(test_chain(OBJECTIVE_VALUE, "value", with_parts, &some));
    TEST(test_merged());
    TEST(test_slope());
    TEST(test_draws(1));
    TEST(test_draws(0));
    for (int kind = 0; kind < OBJECTIVES; kind++) TEST(test_ways(0, kind, &everywhere, 0, 2));
    TEST(test_ways(0, OBJECTIVE_SFT, &everywhere, 0, 12));
    TEST(test_ways(1, OBJECTIVE_DPO, &everywhere, 0, 6));
    TEST(test_ways(2, OBJECTIVE_RM, &everywhere, 0, 6));
    TEST(test_ways(0, OBJECTIVE_SFT, &dropping, 0, 6));
    TEST(test_ways(2, OBJECTIVE_DPO, &dropping, 0, 4));
    TEST(test_codes());
    for (int kind = 0; kind < OBJECTIVES; kind++) TEST(test_ways(0, kind, &everywhere, 1, 1));
    TEST(test_ways(0, OBJECTIVE_SFT, &everywhere, 1, 8));
    TEST(test_ways(1, OBJECTIVE_DPO, &everywhere, 1, 4));
    TEST(test_ways(2, OBJECTIVE_RM, &everywhere, 1, 4));
    TEST(test_ways(2, OBJECTIVE_KTO, &dropping, 1, 4));
    return test_summary();
}
