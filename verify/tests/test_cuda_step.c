/* SPDX-License-Identifier: MIT OR Unlicense */
/* The CUDA device through whole optimizer steps: on several ranks the bits of one; and with
   every call of the CUDA run time failing in turn (without a GPU: cuda_on_cpu.h), a named
   error and nothing left behind. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "seqpar_llama.h"
#include "support/test.h"
#include "support/run_objective.h"

extern int64_t cuda_on_cpu_fail_at __attribute__((weak)),
    cuda_on_cpu_calls __attribute__((weak)), cuda_on_cpu_allocated __attribute__((weak)),
    cuda_on_cpu_launches __attribute__((weak)), cuda_on_cpu_full_at __attribute__((weak)),
    cuda_on_cpu_allocations __attribute__((weak));

static void test_steps(int kind, int device, int64_t ranks, int layout, int schedule) {
    objective_task t;
    objective_way alone = {.dp = 1,
                           .sp = 1,
                           .accumulation = 1,
                           .layout = SEQPAR_LAYOUT_ZIGZAG,
                           .reference_device = device},
                  way = {.dp = 1,
                         .sp = ranks,
                         .accumulation = 1,
                         .layout = layout,
                         .schedule = schedule,
                         .reference_device = device};
    objective_result one, r;
    objective_task_open(&t, kind, 2, 9, 20, 5); /* small: every thread of a kernel is a fiber */
    objective_run(&t, &alone, &one);
    objective_run(&t, &way, &r);
    if (test_expect(!one.status && !r.status, "%s%s", one.error.text, r.error.text)) {
        test_expect(one.norm > 0 && one.norm == r.norm && one.loss == r.loss,
                    "loss %.17g and %.17g, norm %.17g and %.17g", one.loss, r.loss, one.norm,
                    r.norm);
        test_expect(
            !memcmp(one.gradient, r.gradient, (size_t)one.elements * sizeof *one.gradient),
            "the gradient differs");
        test_expect(
            !memcmp(one.params, r.params, (size_t)one.elements * sizeof *one.params) &&
                memcmp(one.params, one.start, (size_t)one.elements * sizeof *one.params),
            "the parameters differ, or did not move");
        test_expect(!memcmp(one.state, r.state, (size_t)(3 * one.elements) * sizeof *one.state),
                    "moments or masters differ");
        for (int64_t i = 0; device == 2 && i < one.elements; i++)
            test_expect(one.params[i] == (double)seqpar_bf16_to_float(seqpar_bf16_from_float(
                                             (float)one.state[2 * one.elements + i])),
                        "weight %lld is %.9g, its master %.9g", (long long)i, one.params[i],
                        one.state[2 * one.elements + i]);
    }
    test_end("cuda_step_%s_%s_%s_%s_P%lld", device == 2 ? "bf16" : "fp32", objective_name(kind),
             seqpar_layout_name(layout), seqpar_schedule_name(schedule), (long long)ranks);
    objective_result_free(&one);
    objective_result_free(&r);
    objective_task_close(&t);
}

/* With bf16 storage two devices round in the same places, but for what tensor cores are
   given: a step is about as far from fp64 as that of the reference device in bf16. */
static void test_near(void) {
    objective_task t;
    objective_way cuda = {.dp = 1, .sp = 1, .accumulation = 1, .reference_device = 2},
                  wide = cuda, naive = cuda;
    objective_result got, want, other;
    objective_task_open(&t, OBJECTIVE_SFT, 3, 20, 40, 5);
    objective_run(&t, &cuda, &got);
    t.start = got.start; /* the same numbers */
    wide.reference_device = 1;
    objective_run(&t, &wide, &want);
    naive.reference_device = 3;
    objective_run(&t, &naive, &other);
    double d = test_distance(got.gradient, want.gradient, got.elements);
    double as_good = test_distance(other.gradient, want.gradient, got.elements);
    test_expect(!got.status && !want.status && !other.status, "%s%s%s", got.error.text,
                want.error.text, other.error.text);
    test_expect(d <= 1.5 * as_good && d >= 1e-4 &&
                    fabs(got.loss - want.loss) <= want.loss / 256 &&
                    fabs(got.norm - want.norm) <= want.norm / 64,
                "loss %.9g, in fp64 %.9g; norm %.9g, %.9g; the gradient is off by %.2e, that "
                "of the reference in bf16 by %.2e",
                got.loss, want.loss, got.norm, want.norm, d, as_good);
    test_end("cuda_step_bf16: gradient off by %.2e, that of the reference in bf16 by %.2e", d,
             as_good);
    objective_result_free(&other);
    objective_result_free(&got);
    objective_result_free(&want);
    objective_task_close(&t);
}

/* Attention-free operations suffice to meet every kind of call: memory, lists, copies,
   scratch, kernels, waiting. */
static seqpar_status small_work(seqpar_error *error) {
    enum { N = 5, WIDTH = 7 };
    static const int32_t ids[N] = {0, 3, 1, 3, 2};
    seqpar_device *d = seqpar_device_cuda(error, NULL);
    double table[4 * WIDTH], x[N * WIDTH];
    if (!d) return error->status;
    for (int i = 0; i < 4 * WIDTH; i++) table[i] = i;
    void *from = d->alloc(d, sizeof table), *to = d->alloc(d, sizeof x);
    seqpar_embedding_args a = {
        .x = {to, WIDTH}, .table = {from, WIDTH}, .ids = ids, .rows = N, .width = WIDTH};
    int32_t best[N] = {0};
    const seqpar_sample_args choice = {
        .logits = {to, WIDTH}, .rows = N, .vocab = WIDTH, .top_p = 1, .ids = best};
    seqpar_status status = from && to ? SEQPAR_OK : SEQPAR_ERR_MEMORY;
    if (!status) seqpar_device_write(d, from, 0, table, 4 * WIDTH, d->storage);
    if (!status) status = d->embedding(d, &a, NULL);
    if (!status) status = d->sample(d, &choice, NULL);
    if (!status) seqpar_device_read(d, x, to, 0, N * WIDTH, d->storage);
    if (!status && !error->status)
        test_expect(x[WIDTH] == 3 * WIDTH && best[1] == WIDTH - 1,
                    "row 1 begins with %g, and %d is its largest", x[WIDTH], best[1]);
    d->free(d, from);
    d->free(d, to);
    seqpar_device_close(d);
    return status ? status : error->status;
}

static void test_failures(void) {
    int64_t calls, n;
    seqpar_error error = {0};
    if (!&cuda_on_cpu_fail_at) {
        test_skip("cuda_failures", "a GPU does not fail on demand");
        return;
    }
    cuda_on_cpu_calls = 0;
    test_expect(!small_work(&error), "%s", error.text);
    calls = cuda_on_cpu_calls;
    for (n = 1; n < calls; n++) { /* the last is the waiting of close, on which nothing hangs */
        memset(&error, 0, sizeof error);
        cuda_on_cpu_calls = 0;
        cuda_on_cpu_fail_at = n;
        test_expect(small_work(&error) && error.status && strlen(error.text) > 20,
                    "call %lld of %lld fails: status %d, '%s'", (long long)n, (long long)calls,
                    error.status, error.text);
        test_expect(cuda_on_cpu_allocated == 0, "after call %lld failed %lld bytes are left",
                    (long long)n, (long long)cuda_on_cpu_allocated);
    }
    cuda_on_cpu_fail_at = 0;
    test_end("cuda_failures: each of %lld calls is named and leaves nothing", (long long)calls);
}

/* A step in which one call fails: it says so, or does without it, and nothing is left. every: of the
   calls that *count counts one in so many. */
static void expect_failures(objective_task *t, const objective_way *way, int64_t *count,
                            int64_t *failing, int64_t every) {
    objective_result whole, result;
    objective_job job = {t, way, &result};
    int64_t ranks = way->dp * way->sp, calls, opening, without = 0;
    seqpar_error error;
    *count = 0;
    seqpar_device_close(test_cuda(0)); /* test_failures has these */
    opening = *count;
    objective_run(t, way, &whole);
    objective_run(t, way, &result);
    *count = 0;
    test_expect(!seqpar_run_threads(ranks, objective_main, &job, &error), "%s", error.text);
    calls = *count;
    for (int64_t n = opening + 1; n <= calls && !test_why[0]; n += every) {
        memset(&error, 0, sizeof error);
        *count = 0;
        *failing = n;
        seqpar_status status = seqpar_run_threads(ranks, objective_main, &job, &error);
        without += !status;
        if (count == &cuda_on_cpu_allocations && status)
            test_expect(status == SEQPAR_ERR_MEMORY, "allocation %lld: %s", (long long)n,
                        error.text);
        test_expect(status ? strlen(error.text) > 20
                           : !memcmp(result.params, whole.params,
                                     (size_t)whole.elements * sizeof *whole.params),
                    "call %lld of %lld fails: status %d, '%s'", (long long)n, (long long)calls,
                    status, error.text);
        test_expect(cuda_on_cpu_allocated == 0, "after call %lld failed %lld bytes are left",
                    (long long)n, (long long)cuda_on_cpu_allocated);
    }
    *failing = 0;
    printf("#   %lld calls, one in %lld fails; %lld can be done without\n", (long long)calls,
           (long long)every, (long long)without);
    objective_result_free(&whole);
    objective_result_free(&result);
}

static void test_step_failures(void) {
    const objective_way ways[] = {
        {.dp = 1, .sp = 1, .accumulation = 1, .zero_stage = 3, .offload = 3, .recompute = 2},
        {.dp = 1, .sp = 1, .accumulation = 1, .reference_device = 2, .state_bits = 8}};
    if (!&cuda_on_cpu_fail_at) {
        test_skip("cuda_step_failures", "a GPU does not fail on demand");
        return;
    }
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        objective_task t;
        objective_task_open(&t, OBJECTIVE_SFT, 2, 5, 10, 5);
        t.lean = 1;
        expect_failures(&t, &ways[i], &cuda_on_cpu_allocations, &cuda_on_cpu_full_at, 1);
        expect_failures(&t, &ways[i], &cuda_on_cpu_calls, &cuda_on_cpu_fail_at, 23);
        objective_task_close(&t);
        test_end("cuda_step_failures %s", i ? "bf16, 8 bits" : "offloaded");
    }
}

static void test_refused(void) {
    seqpar_error error = {0};
    seqpar_cuda_desc desc = {.ordinal = 99};
    test_expect(!seqpar_device_cuda(&error, &desc) && error.status == SEQPAR_ERR_DEVICE &&
                    strstr(error.text, "no CUDA device 99"),
                "%s", error.text);
    memset(&error, 0, sizeof error);
    desc = (seqpar_cuda_desc){.storage = 7};
    test_expect(!seqpar_device_cuda(&error, &desc) && error.status == SEQPAR_ERR_OPTION &&
                    strstr(error.text, "fp32 or bf16"),
                "%s", error.text);
    if (&cuda_on_cpu_fail_at) {
        memset(&error, 0, sizeof error);
        setenv("CUDA_ON_CPU_NO_DEVICE", "1", 1);
        test_expect(!seqpar_device_cuda(&error, NULL) && strstr(error.text, "no CUDA device"),
                    "%s", error.text);
        unsetenv("CUDA_ON_CPU_NO_DEVICE");
        memset(&error, 0, sizeof error);
        setenv("CUDA_ON_CPU_MAJOR", "7", 1);
        test_expect(!seqpar_device_cuda(&error, NULL) && error.status == SEQPAR_ERR_DEVICE &&
                        strstr(error.text, "compute capability 7; 8 or more is needed"),
                    "%s", error.text);
        unsetenv("CUDA_ON_CPU_MAJOR");
    }
    memset(&error, 0, sizeof error);
    seqpar_device *d = seqpar_device_cuda(&error, NULL);
    void *data = d->alloc(d, INT64_C(1) << 50); /* more than any GPU has, on the stand-in too */
    test_expect(!data && error.status == SEQPAR_ERR_MEMORY &&
                    strstr(error.text, "1125899906842624 bytes are needed") &&
                    strstr(error.text, "are free"),
                "%s", error.text);
    seqpar_device_close(d);
    test_end("cuda_refused");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    seqpar_device_close(test_cuda(1)); /* where there is no GPU this says so */
    TEST(test_refused());
    TEST(test_failures());
    TEST(test_step_failures());
    /* on the stand-in every two features meet in smaller steps: test_cuda_steps.c */
    if (test_fibers()) return test_summary();
    for (int device = 0; device <= 2; device += 2) {
        TEST(test_steps(OBJECTIVE_SFT, device, 2, SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_RING));
        TEST(test_steps(OBJECTIVE_DPO, device, 3, SEQPAR_LAYOUT_CONTIGUOUS,
                        SEQPAR_SCHEDULE_LLAMA3));
    }
    TEST(test_steps(OBJECTIVE_RM, 2, 2, SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_RING));
    TEST(test_near());
    return test_summary();
}
