/* SPDX-License-Identifier: MIT OR Unlicense */
/* One optimizer step is one optimizer step: every way of splitting it gives the bits of one rank. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "run_model.h"

static void make_task(model_task *task, int tied) {
    seqpar_llama_config config = {.layers = 2, .hidden = 24, .heads = 6, .kv_heads = 2, .head_dim = 10, .intermediate = 37, .vocab = 53, .tied = tied};
    memset(task, 0, sizeof *task);
    task->config = config;
    random_batch(&task->batch, 31, 40, 53, 61, 0);
    task->objective.count = task->batch.counts.supervised;
    task->objective.label_smoothing = tied ? 0.1 : 0;
    task->objective.z_loss = tied ? 0.01 : 0;
    task->seed = 7;
    task->lr = 0.01;
    task->max_norm = 0.3;
    task->decay = 0.1;
}

static const model_way plain = {.dp = 1, .sp = 1, .accumulation = 1, .threads = 1, .steps = 3};

static void expect_moved(const model_result *r) {
    test_expect(memcmp(r->start, r->params, (size_t)r->elements * 8) != 0, "the parameters did not change");
    test_expect(r->norm > 0.3, "the clip did not act (norm %g)", r->norm);
}

/* Shapes in turn, all other options drawn at random: every pair of option values comes up. */
static void test_ways(int reference, int tied, int64_t ways) {
    static const int64_t shapes[][2] = {{1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 5}, {1, 8}, {2, 2}, {4, 1}, {2, 3}, {3, 1}, {5, 1}};
    model_task task;
    model_result one, other;
    model_way base = plain;
    int64_t i;
    make_task(&task, tied);
    test_expect(task.batch.rows >= 8, "only %lld rows", (long long)task.batch.rows);
    base.reference = reference;
    model_run(&task, &base, &one);
    test_expect(!one.status, "%s", one.error.text);
    expect_moved(&one);
    for (i = 0; i < ways; i++) {
        int64_t shape = i % (int64_t)(sizeof shapes / sizeof *shapes);
        model_way w = base;
        char what[160];
        w.dp = shapes[shape][0];
        w.sp = shapes[shape][1];
        w.accumulation = (int64_t[]){1, 2, 4, 3}[test_integer(0, 3)];
        w.layout = (int)test_integer(SEQPAR_CONTIGUOUS, SEQPAR_ZIGZAG);
        w.schedule = (int)test_integer(SEQPAR_RING, SEQPAR_ULYSSES);
        w.ulysses_size = w.sp % 2 == 0 && test_integer(0, 1) ? 2 : 0; /* of two kv heads */
        w.heads_k_stride = w.ulysses_size ? 1 : test_integer(1, 2);
        w.zero_stage = (int)test_integer(0, 2);
        w.recompute = (int)test_integer(0, 1);
        w.threads = test_integer(1, 2);
        w.head_rows = (int64_t[]){0, 1, 7, 64}[test_integer(0, 3)];
        model_run(&task, &w, &other);
        snprintf(what, sizeof what, "D=%lld P=%lld A=%lld %s %s U=%lld zero=%d recompute=%d threads=%lld head_rows=%lld", (long long)w.dp, (long long)w.sp, (long long)w.accumulation,
                 seqpar_layout_name(w.layout), seqpar_schedule_name(w.schedule), (long long)w.ulysses_size, w.zero_stage, w.recompute, (long long)w.threads, (long long)w.head_rows);
        expect_equal_runs(&other, &one, what);
        test_end("bits_%s_%s %s", (const char *[]){"fp32", "fp64", "bf16"}[reference], tied ? "tied" : "untied", what);
        model_result_free(&other);
    }
    model_result_free(&one);
    seqpar_batch_free(&task.batch);
}

/* With bf16 storage the weights are master parameters in fp32, rounded. Steps too small to be seen in most weights add up in
   the masters, whose gradient hardly changes meanwhile. */
static void test_masters(void) {
    model_task task;
    model_result r;
    model_way way = plain;
    double *moved, *want, d;
    int64_t i, still = 0, count;
    make_task(&task, 0);
    task.max_norm = task.decay = 0;
    task.lr = 1e-4;
    way.optimizer = SEQPAR_SGD;
    way.reference = 2;
    model_run(&task, &way, &r);
    test_expect(!r.status, "%s", r.error.text);
    count = r.elements;
    moved = calloc((size_t)(2 * count), sizeof *moved);
    want = moved + count;
    for (i = 0; i < count; i++) {
        double master = r.state[2 * count + i];
        moved[i] = master - r.start[i];
        want[i] = -3 * task.lr * r.gradient[i];
        still += r.params[i] == r.start[i] && r.gradient[i] != 0;
        test_expect(r.params[i] == (double)seqpar_bf16_to_float(seqpar_bf16_from_float((float)master)), "weight %lld is %.9g, its master %.9g", (long long)i, r.params[i], master);
    }
    d = test_distance(moved, want, count);
    test_expect(d <= 0.02 && still > count / 2, "three steps of %lld weights: the masters are off by %.2e, %lld weights stand still", (long long)count, d, (long long)still);
    free(moved);
    model_result_free(&r);
    seqpar_batch_free(&task.batch);
    test_end("masters: off by %.1e, %lld of %lld weights stand still", d, (long long)still, (long long)count);
}

/* What bf16 costs: a step's gradient against fp64 on the same weights. */
static void test_cost(void) {
    model_task task;
    model_result rounded, exact;
    model_way way = plain;
    make_task(&task, 0);
    way.steps = 1;
    way.reference = 2;
    model_run(&task, &way, &rounded);
    task.start = rounded.start;
    way.reference = 1;
    model_run(&task, &way, &exact);
    double d = test_distance(rounded.gradient, exact.gradient, exact.elements), loss = fabs(rounded.loss - exact.loss) / exact.loss;
    test_expect(!rounded.status && !exact.status && d <= 3e-2 && d >= 1e-4 && loss <= 1e-3, "the gradient is %.2e off, the loss %.2e", d, loss);
    model_result_free(&rounded);
    model_result_free(&exact);
    seqpar_batch_free(&task.batch);
    test_end("bf16_cost: gradient off by %.1e, loss by %.1e", d, loss);
}

/* T14: the gradient-scale law. A plain SGD step, where no optimizer hides a factor, for every D x P = 8. */
static void test_law(void) {
    model_task task;
    model_result one, other;
    model_way base = plain, w;
    int64_t dp;
    make_task(&task, 0);
    task.max_norm = 0;
    task.decay = 0;
    task.lr = 1;
    base.optimizer = SEQPAR_SGD;
    base.steps = 1;
    model_run(&task, &base, &one);
    for (dp = 1; dp <= 8; dp *= 2) {
        char what[64];
        w = base;
        w.dp = dp;
        w.sp = 8 / dp;
        w.layout = SEQPAR_ZIGZAG;
        model_run(&task, &w, &other);
        snprintf(what, sizeof what, "SGD, D=%lld P=%lld", (long long)dp, (long long)w.sp);
        expect_equal_runs(&other, &one, what);
        test_end("law %s", what);
        model_result_free(&other);
    }
    model_result_free(&one);
    seqpar_batch_free(&task.batch);
}

int main(int argc, char **argv) {
    const char *fewer = getenv("TEST_WAYS"); /* sanitizers are slow */
    int64_t ways = fewer ? atoll(fewer) : 0;
    test_begin(argc, argv);
    test_state += test_seed;
    test_masters();
    test_cost();
    test_law();
    test_ways(0, 0, ways ? ways : 44);
    test_ways(0, 1, ways ? ways : 33);
    test_ways(1, 1, ways ? 1 : 11);
    test_ways(2, 0, ways ? 1 : 22);
    test_ways(2, 1, ways ? 2 : 11);
    return test_summary();
}
