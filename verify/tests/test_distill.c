/* SPDX-License-Identifier: MIT OR Unlicense */
/* Knowledge distillation: loss and gradient by the definition, from both models' logits; a student
   that is its teacher learns nothing; any number of ranks gives the bits of one. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "support/drawn_way.h"
#include "support/layouts.h"

enum { PAIRS = 5, LONGEST = 29, PACK_LEN = 70 };
static const objective_way alone = {
    .dp = 1, .sp = 1, .accumulation = 1, .threads = 1, .optimizer = SEQPAR_OPTIM_ADAMW};

static void task_open(objective_task *t, int reverse, double coefficient, double temperature) {
    objective_task_open(t, OBJECTIVE_KD, PAIRS, LONGEST, PACK_LEN, 5);
    t->reverse = reverse;
    t->kd_coef = coefficient;
    t->temperature = temperature;
}

/* ---- by the definition ---- */

static void log_softmax(double *log_p, const double *x, int64_t n, double temperature) {
    double sum = 0;
    for (int64_t j = 0; j < n; j++) sum += exp(x[j] / temperature);
    for (int64_t j = 0; j < n; j++) log_p[j] = x[j] / temperature - log(sum);
}

/* Of one token: (1 - c) of cross-entropy with the target, c of the distance from the teacher and its
   entropy. */
static double token_loss(const objective_task *t, const double *student, const double *teacher,
                         int32_t target) {
    int64_t n = t->config.vocab;
    double temperature = t->temperature > 0 ? t->temperature : 1, far = 0;
    double *p = calloc((size_t)(2 * n), sizeof *p), *q = p + n, loss;
    log_softmax(p, student, n, temperature);
    log_softmax(q, teacher, n, temperature);
    for (int64_t j = 0; j < n; j++)
        far += (t->reverse ? exp(p[j]) * (p[j] - q[j]) : exp(q[j]) * (q[j] - p[j])) -
               exp(q[j]) * q[j];
    loss = -(1 - t->kd_coef) * p[target] + t->kd_coef * far;
    free(p);
    return loss;
}

/* The teacher's logits: those of a model that is drawn like it. */
static double *teacher_logits(const objective_task *t, const objective_way *way) {
    objective_task plain = *t;
    objective_result r;
    plain.kind = OBJECTIVE_SFT;
    plain.config = t->teacher;
    plain.seed = t->seed + 2;
    plain.start = NULL;
    objective_run(&plain, way, &r);
    test_expect(!r.status, "%s", r.error.text);
    double *logits = r.logits;
    r.logits = NULL;
    objective_result_free(&r);
    return logits;
}

static double loss_of(const objective_task *t, const double *student, const double *teacher) {
    int64_t n = t->config.vocab, base = 0, count = 0;
    double sum = 0;
    for (int64_t r = 0; r < t->batch.rows; base += t->batch.row[r++].tokens)
        for (int64_t i = 0; i < t->batch.row[r].tokens; i++) {
            int32_t target = t->batch.row[r].targets[i];
            if (target == SEQPAR_IGNORE) continue;
            sum += token_loss(t, student + (base + i) * n, teacher + (base + i) * n, target);
            count++;
        }
    return sum / (double)count;
}

/* The loss at so many steps along a direction. */
static double loss_at(const objective_task *t, const objective_result *at,
                      const double *teacher, const objective_way *way, double steps) {
    objective_task moved = *t;
    objective_result r;
    double *start = calloc((size_t)at->elements, sizeof *start), loss;
    for (int64_t i = 0; i < at->elements; i++)
        start[i] = at->start[i] + steps * sin((double)(3 * i + 1));
    moved.start = start;
    objective_run(&moved, way, &r);
    loss = loss_of(t, r.logits, teacher);
    objective_result_free(&r);
    free(start);
    return loss;
}

/* The slope there, from four losses: off by the fifth derivative. */
static double slope_of(const objective_task *t, const objective_result *at,
                       const double *teacher, const objective_way *way) {
    double h = 1e-5, near = loss_at(t, at, teacher, way, h) - loss_at(t, at, teacher, way, -h);
    double far = loss_at(t, at, teacher, way, 2 * h) - loss_at(t, at, teacher, way, -2 * h);
    return (8 * near - far) / (12 * h);
}

static void test_truth(int reverse, double coefficient, double temperature) {
    objective_task t;
    objective_result r;
    objective_way way = alone;
    double own = 0;
    way.reference_device = 1;
    task_open(&t, reverse, coefficient, temperature);
    objective_run(&t, &way, &r);
    double *teacher = teacher_logits(&t, &way), want = loss_of(&t, r.logits, teacher);
    double slope = slope_of(&t, &r, teacher, &way);
    for (int64_t i = 0; i < r.elements; i++) own += r.gradient[i] * sin((double)(3 * i + 1));
    test_expect(!r.status && fabs(r.loss - want) <= 1e-13 * fabs(want), "%s: %.17g, not %.17g",
                r.error.text, r.loss, want);
    test_expect(fabs(own - slope) <= 1e-9 * r.norm, "the slope is %.12g, by losses %.12g; %g",
                own, slope, r.norm);
    free(teacher);
    objective_result_free(&r);
    objective_task_close(&t);
    test_end("distill_truth reverse %d, coefficient %g, temperature %g: off by %.0e", reverse,
             coefficient, temperature, fabs(own - slope));
}

/* ---- a student that is its teacher ---- */

static void test_same(int device, int reverse) {
    objective_task t, drawn;
    objective_result r, of;
    objective_way way = alone;
    int64_t moved = 0;
    way.reference_device = device;
    task_open(&t, reverse, 1, 0);
    t.teacher = t.config;
    drawn = t;
    drawn.kind = OBJECTIVE_SFT;
    drawn.seed = t.seed + 2;
    objective_run(&drawn, &way, &of);
    t.start = of.start;
    objective_run(&t, &way, &r);
    for (int64_t i = 0; i < r.elements; i++) moved += r.gradient[i] != 0;
    test_expect(!r.status && r.columns[1] == 0 && r.loss == r.columns[2] && r.norm == 0 &&
                    !moved,
                "%s: %g away, loss %g with the teacher's entropy %g, norm %g", r.error.text,
                r.columns[1], r.loss, r.columns[2], r.norm);
    objective_result_free(&of);
    objective_result_free(&r);
    objective_task_close(&t);
    test_end("distill_same_%s reverse %d", (const char *[]){"fp32", "fp64", "bf16"}[device],
             reverse);
}

/* ---- any ranks ---- */

static objective_way way_drawn(int device) {
    objective_way way = objective_way_drawn(device);
    way.offload = test_integer(0, 1) ? SEQPAR_OFFLOAD_STATE : 0;
    way.vocab_rows = (int64_t[]){0, 7, 64}[test_integer(0, 2)];
    return way;
}

static int same(const double *a, const double *b, int64_t n) {
    return !memcmp(a, b, (size_t)n * sizeof *a);
}

static void test_ways(int device, int reverse, const seqpar_adapter_desc *adapter, int ways) {
    objective_task t;
    objective_result one, r;
    objective_way way = alone;
    way.reference_device = device;
    task_open(&t, reverse, 0.4, 0);
    if (adapter) t.adapter = *adapter;
    double *start = adapter ? objective_adapters(&t) : NULL;
    t.start = start;
    objective_run(&t, &way, &one);
    test_expect(!one.status && one.norm > 0 && one.columns[1] > 0, "%s, norm %g, %g away",
                one.error.text, one.norm, one.columns[1]);
    for (int i = 0; i < ways; i++) {
        objective_way w = way_drawn(device);
        objective_run(&t, &w, &r);
        test_expect(
            !r.status && same(r.columns, one.columns, OBJECTIVE_COLUMNS) &&
                same(r.gradient, one.gradient, one.elements) &&
                same(r.params, one.params, one.elements),
            "%s: D=%lld P=%lld A=%lld %s %s zero %d, rows of %lld: loss %.17g, not %.17g",
            r.error.text, (long long)w.dp, (long long)w.sp, (long long)w.accumulation,
            seqpar_layout_name(w.layout), seqpar_schedule_name(w.schedule), w.zero_stage,
            (long long)w.vocab_rows, r.loss, one.loss);
        objective_result_free(&r);
    }
    objective_result_free(&one);
    objective_task_close(&t);
    free(start);
    test_end("distill_%s reverse %d%s", (const char *[]){"fp32", "fp64", "bf16"}[device],
             reverse, adapter ? ", adapters" : "");
}

/* ---- memory ---- */

/* Logits of both are there for rows_max tokens at a time, and never whole. */
static void test_pieces(void) {
    enum { TOKENS = 301, WIDTH = 12, WIDE = 20, VOCAB = 97, ROWS = 32 };
    static float hidden[TOKENS * WIDE], table[VOCAB * WIDE], dhidden[TOKENS * WIDTH];
    static float logp[TOKENS], kl[TOKENS], seeds[TOKENS];
    static int32_t targets[TOKENS];
    seqpar_vocab_teacher teacher = {hidden, table, WIDE, 0, kl, NULL, seeds};
    seqpar_vocab_io io = {.hidden = hidden,
                          .table = table,
                          .targets = targets,
                          .tokens = TOKENS,
                          .values = {.logp = logp},
                          .seeds = {.dlogp = seeds},
                          .dhidden = dhidden,
                          .frozen = 1,
                          .teacher = &teacher};
    const seqpar_vocab_desc desc = {.hidden = WIDTH, .vocab = VOCAB, .rows_max = ROWS};
    seqpar_comm *self = seqpar_comm_self();
    for (int backward = 0; backward < 2; backward++) {
        seqpar_device *device = seqpar_device_cpu(1);
        seqpar_ctx ctx;
        seqpar_status status = seqpar_ctx_open(&ctx, self, device, 1);
        if (!status)
            status = backward ? seqpar_vocab_backward(&ctx, &io, NULL, NULL, &desc)
                              : seqpar_vocab_forward(&ctx, &io, &desc);
        int64_t most = ctx.memory.peak[SEQPAR_MEM_SCRATCH];
        test_expect(!status && most == 2 * ROWS * VOCAB * 4 && !ctx.memory.total,
                    "%s: %lld bytes, not those of %d tokens of both", self->error->text,
                    (long long)most, ROWS);
        seqpar_ctx_close(&ctx);
        seqpar_device_close(device);
    }
    seqpar_comm_free(self);
    test_end("distill_pieces");
}

int main(int argc, char **argv) {
    static const seqpar_adapter_desc adapter = {3, 1.25, SEQPAR_ADAPT_ALL};
    test_begin(argc, argv);
    for (int reverse = 0; reverse < 2; reverse++) {
        TEST(test_truth(reverse, 0.4, 0));
        TEST(test_truth(reverse, 1, 1.7));
        for (int device = 0; device < 3; device++) TEST(test_same(device, reverse));
    }
    TEST(test_pieces());
    TEST(test_ways(0, 0, NULL, 8));
    TEST(test_ways(0, 1, NULL, 5));
    TEST(test_ways(1, 0, NULL, 4));
    TEST(test_ways(2, 1, NULL, 4));
    TEST(test_ways(0, 0, &adapter, 4));
    return test_summary();
}
