/* SPDX-License-Identifier: MIT OR Unlicense */
/* Operations on logits on a device, as support/device_ops.h says: log-probs and their gradient,
   distillation, choices among a few tokens, and sampling. */
#define SEQPAR_IMPLEMENTATION
#include "support/device_ops.h"

/* ---- sample ---- */

enum { SAMPLED_ROWS = 4 };
typedef struct choice {
    double temperature, top_p;
    int64_t top_k;
} choice;

static choice choosing;
static double chances[SAMPLED_ROWS];
static int32_t chosen[SAMPLED_ROWS]; /* sample answers on the host */

static seqpar_status call_sample(seqpar_device *device, const bench *b) {
    seqpar_sample_args a = {.logits = mat(&b->field[0]),
                            .rows = b->size[0],
                            .vocab = b->size[1],
                            .top_k = choosing.top_k,
                            .temperature = choosing.temperature,
                            .top_p = choosing.top_p,
                            .u = choosing.temperature > 0 ? chances : NULL,
                            .ids = chosen};
    memset(chosen, 0x55, sizeof chosen);
    return device->sample(device, &a, device->queue);
}

static const double *sorted_by;
static int likelier(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return sorted_by[x] != sorted_by[y] ? (sorted_by[x] < sorted_by[y] ? 1 : -1)
                                        : (x > y) - (x < y);
}

/* The same by sorting, cutting off and walking along. */
static int32_t sample_by_hand(const double *x, int64_t vocab, choice c, double u) {
    int32_t *order = malloc((size_t)vocab * sizeof *order), id;
    int64_t left = vocab, i;
    int all = (c.top_k == 0 || c.top_k >= vocab) && c.top_p >= 1;
    double sum = 0, walked = 0, best;
    for (i = 0; i < vocab; i++) order[i] = (int32_t)i;
    sorted_by = x;
    qsort(order, (size_t)vocab, sizeof *order, likelier);
    best = x[order[0]];
    id = order[0];
    if (all)
        for (i = 0; i < vocab; i++) order[i] = (int32_t)i;
    if (c.top_k > 0 && c.top_k < vocab) left = c.top_k;
    for (i = 0; c.temperature > 0 && i < left; i++)
        sum += exp((x[order[i]] - best) / c.temperature);
    for (i = 0; c.temperature > 0 && c.top_p < 1 && i < left && walked < c.top_p * sum; i++)
        walked += exp((x[order[i]] - best) / c.temperature);
    if (c.temperature > 0 && c.top_p < 1) {
        left = i;
        sum = walked;
    }
    for (i = 0, walked = 0; c.temperature > 0 && i < left; i++) {
        id = order[i];
        if ((walked += exp((x[id] - best) / c.temperature)) > u * sum) break;
    }
    free(order);
    return id;
}

static void expect_samples(bench *b, seqpar_device *device, const double *stored) {
    int64_t vocab = b->size[1], t;
    run(b, device, &(pass){call_sample, 0, 0});
    for (t = 0; t < b->size[0]; t++) {
        int32_t want = sample_by_hand(stored + t * b->field[0].stride, vocab, choosing,
                                      chances[t]);
        test_expect(chosen[t] == want,
                    "%s: row %lld of %lld: temperature %g, top_k %lld, top_p %g, u %.17g: "
                    "token %d, not %d",
                    device->name, (long long)t, (long long)vocab, choosing.temperature,
                    (long long)choosing.top_k, choosing.top_p, chances[t], (int)chosen[t],
                    (int)want);
    }
}

/* coarse: logits that bf16 holds, with many equal ones; else such that no two are. */
static void check_sample_size(int64_t vocab, int coarse) {
    static const double temperatures[] = {0, 0.3, 1, 2.5}, top_ps[] = {1, 0.97, 0.5, 1e-9};
    const int64_t top_ks[] = {0, 1, 5, vocab - 1, vocab + 3};
    bench b = {.size = {SAMPLED_ROWS, vocab}};
    add_field(&b, "logits", SAMPLED_ROWS, vocab, 3, 2);
    for (int64_t i = 0; i < SAMPLED_ROWS * b.field[0].stride; i++)
        if (coarse && i % b.field[0].stride < vocab)
            b.field[0].value[i] = round(4 * b.field[0].value[i]) / 4;
    for (int which = 0; which < 4 * 4 * 5; which++) {
        choosing = (choice){temperatures[which % 4], top_ps[which / 4 % 4], top_ks[which / 16]};
        /* of the combinations, where they take long */
        int64_t every = test_fibers() ? 7 : vocab <= 100 ? 1 : 3;
        if (choosing.top_k < 0 || which % every != vocab % every) continue;
        for (int t = 0; t < SAMPLED_ROWS; t++)
            chances[t] = t == 0   ? 0x1p-40
                         : t == 1 ? 1 - 0x1p-30
                                  : (test_integer(0, (1 << 30) - 1) + 0.5) / (1 << 30);
        expect_samples(&b, reference, b.field[0].value);
        expect_samples(&b, fast, b.field[0].value);
        if (coarse) expect_samples(&b, bf16, b.field[0].value);
    }
    bench_free(&b);
}

static void expect_not_finite(double value, int64_t at) { /* of two, the first */
    enum { WIDTH = 300 };
    bench b = {.size = {1, WIDTH}};
    seqpar_device *const devices[] = {reference, fast, bf16};
    add_field(&b, "logits", 1, WIDTH, 0, 1);
    b.field[0].value[WIDTH - 1] = NAN;
    b.field[0].value[at] = value;
    choosing = (choice){1, 0.9, 7};
    for (int d = 0; d < 3; d++) {
        seqpar_sample_args a = {.rows = 1,
                                .vocab = WIDTH,
                                .top_k = 7,
                                .temperature = 1,
                                .top_p = 0.9,
                                .u = chances,
                                .ids = chosen};
        a.logits = (seqpar_mat){devices[d]->alloc(devices[d], WIDTH * 8), WIDTH};
        seqpar_device_write(devices[d], a.logits.data, 0, b.field[0].value, WIDTH,
                            devices[d]->storage);
        seqpar_status status = devices[d]->sample(devices[d], &a, devices[d]->queue);
        test_expect(!status && chosen[0] == -1 - at, "%s: %g at %lld gives %d",
                    devices[d]->name, value, (long long)at, (int)chosen[0]);
        devices[d]->free(devices[d], a.logits.data);
    }
    bench_free(&b);
}

/* Half of four equals is two of them, whatever the sign of their zeros. */
static void check_sample_equals(void) {
    static const double zeros[] = {0, -0.0, 0, -0.0};
    bench b = {.size = {1, 4}};
    add_field(&b, "logits", 1, 4, 0, 1);
    memcpy(b.field[0].value, zeros, sizeof zeros);
    chances[0] = 0.75;
    for (int which = 0; which < 2; which++) {
        choosing = which ? (choice){1, 1, 2} : (choice){1, 0.5, 0};
        expect_samples(&b, reference, zeros);
        test_expect(chosen[0] == 1, "three quarters into two equals is token %d",
                    (int)chosen[0]);
        expect_samples(&b, fast, zeros);
        expect_samples(&b, bf16, zeros);
    }
    bench_free(&b);
}

static void check_sample(void) {
    static const int64_t vocabs[] = {1, 2, 97, 128, 301, 1021};
    for (size_t i = 0; i < sizeof vocabs / sizeof *vocabs; i++)
        for (int coarse = 0; coarse < 2; coarse++) check_sample_size(vocabs[i], coarse);
    check_sample_equals();
    expect_not_finite(NAN, 131);
    expect_not_finite(INFINITY, 0);
    expect_not_finite(-INFINITY, 299);
}

/* ---- vocab_softmax ---- */

enum { LOGITS, LOGP, ENTROPY, HEAD_LSE, SMOOTH, DLOGP, DENTROPY, DSMOOTH, DZLOSS };
/* mode: which seeds are given, and whether the gradient is wanted */
enum { ALL_SEEDS = 15, GRADIENT = 16 };

static bench head_bench(int64_t rows, int64_t vocab) {
    static const char *const names[] = {"logp",  "entropy",  "lse",     "smooth",
                                        "dlogp", "dentropy", "dsmooth", "dzloss"};
    bench b = {.size = {rows, vocab}};
    int64_t i;
    add_field(&b, "logits", rows, vocab, 3, 2);
    for (i = 0; i < 8; i++) add_sums(&b, names[i], rows, 1, 0, 1);
    add_ids(&b, rows, vocab);
    for (i = 2; i < rows; i += 4) b.ids[i] = SEQPAR_IGNORE;
    b.ids[0] = (int32_t)vocab - 1;
    b.ids[rows - 1] = 0;
    return b;
}

static void *given(const bench *b, int number, int wanted) {
    return wanted ? b->field[number].data : NULL;
}

static seqpar_status call_head(seqpar_device *device, const bench *b) {
    seqpar_vocab_softmax_args a = {.logits = mat(&b->field[LOGITS]),
                                   .rows = b->size[0],
                                   .vocab = b->size[1],
                                   .targets = b->ids,
                                   .gradient = b->mode & GRADIENT,
                                   .logp = given(b, LOGP, 1),
                                   .entropy = given(b, ENTROPY, 1),
                                   .lse = given(b, HEAD_LSE, 1),
                                   .smooth = given(b, SMOOTH, 1),
                                   .dlogp = given(b, DLOGP, b->mode & 1),
                                   .dentropy = given(b, DENTROPY, b->mode & 2),
                                   .dsmooth = given(b, DSMOOTH, b->mode & 4),
                                   .dzloss = given(b, DZLOSS, b->mode & 8)};
    return device->vocab_softmax(device, &a, device->queue);
}

/* The gradient alone: no outputs are given. */
static seqpar_status call_head_grad(seqpar_device *device, const bench *b) {
    seqpar_vocab_softmax_args a = {.logits = mat(&b->field[LOGITS]),
                                   .rows = b->size[0],
                                   .vocab = b->size[1],
                                   .targets = b->ids,
                                   .gradient = 1};
    a.dlogp = given(b, DLOGP, b->mode & 1);
    a.dentropy = given(b, DENTROPY, b->mode & 2);
    a.dsmooth = given(b, DSMOOTH, b->mode & 4);
    a.dzloss = given(b, DZLOSS, b->mode & 8);
    return device->vocab_softmax(device, &a, device->queue);
}

enum { HEAD_OUTPUTS = 1 << LOGP | 1 << ENTROPY | 1 << HEAD_LSE | 1 << SMOOTH };
static const pass head_pass = {call_head, HEAD_OUTPUTS, 0},
                  head_far_pass = {call_head, HEAD_OUTPUTS, 1 << SMOOTH},
                  head_both_pass = {call_head, HEAD_OUTPUTS | 1 << LOGITS, 0},
                  head_grad_pass = {call_head_grad, 1 << LOGITS, 0};

/* What the seeds of the mode make of the outputs; ignored rows have an entropy only. */
static double head_loss(const bench *b) {
    const field *f = b->field;
    double loss = 0;
    int64_t t;
    for (t = 0; t < b->size[0]; t++) {
        int live = b->ids[t] != SEQPAR_IGNORE;
        if (b->mode & 1 && live) loss += f[DLOGP].value[t] * f[LOGP].after[t];
        if (b->mode & 2) loss += f[DENTROPY].value[t] * f[ENTROPY].after[t];
        if (b->mode & 4 && live) loss += f[DSMOOTH].value[t] * f[SMOOTH].after[t];
        if (b->mode & 8 && live)
            loss += f[DZLOSS].value[t] * f[HEAD_LSE].after[t] * f[HEAD_LSE].after[t];
    }
    return loss;
}

static void check_head_values(bench *b) {
    int64_t rows = b->size[0], vocab = b->size[1], t;
    double *want = malloc((size_t)(4 * rows) * sizeof *want);
    double *logits = dense_copy(&b->field[LOGITS], b->field[LOGITS].value);
    slow_complex *z = slow_promote(rows * vocab, logits);
    for (t = 0; t < rows; t++) {
        slow_token y = slow_token_of(vocab, z + t * vocab, b->ids[t]);
        want[t] = creal(y.logp);
        want[rows + t] = creal(y.entropy);
        want[2 * rows + t] = creal(y.lse);
        want[3 * rows + t] = creal(y.lse - y.mean);
    }
    b->mode = 0;
    expect_fast(b, &head_pass);
    for (t = 0; t < 4; t++) expect_values(b, LOGP + (int)t, want + t * rows);
    free(want);
    free(logits);
    free(z);
}

static void check_head_size(int64_t rows, int64_t vocab, int derivative) {
    bench b = head_bench(rows, vocab);
    chain c = {head_pass, head_grad_pass, 0, 0, head_loss};
    int seed;
    check_head_values(&b);
    for (seed = 0; seed < 5; seed++) {
        b.mode = seed < 4 ? 1 << seed : ALL_SEEDS;
        expect_fast(&b, &head_grad_pass);
        if (derivative) expect_derivative(&b, &c, LOGITS, LOGITS, 0);
    }
    b.mode = ALL_SEEDS | GRADIENT;
    expect_fast(&b, &head_both_pass);
    bench_free(&b);
}

/* Numbers from elsewhere: logits (1, -.5, 2, .25), target 2. */
static void expect_golden_gradient(bench *b, int mode, const double seeds[4],
                                   const double want[4]) {
    int i;
    for (i = 0; i < 4; i++) b->field[DLOGP + i].value[0] = seeds[i];
    b->mode = mode;
    run(b, reference, &head_grad_pass);
    expect_values(b, LOGITS, want);
    run(b, fast, &head_grad_pass);
    note(&worst.cpu, test_distance(b->field[LOGITS].after, want, 4), limit.cpu, "cpu",
         "golden gradient");
}

static void check_head_golden(void) {
    static const double logits[4] = {1, -.5, 2, .25}, logp[1] = {-0.484731134701968};
    static const double entropy[1] = {1.02496369175712};
    bench b = head_bench(1, 4);
    memcpy(b.field[LOGITS].value, logits, sizeof logits);
    b.ids[0] = 2;
    run(&b, reference, &head_pass);
    expect_values(&b, LOGP, logp);
    expect_values(&b, ENTROPY, entropy);
    expect_golden_gradient(&b, 1, (double[]){-1, 0, 0, 0},
                           (double[]){0.226563247483296, 0.0505530936946962, -0.384137241369486,
                                      0.107020900191494});
    expect_golden_gradient(&b, ALL_SEEDS, (double[]){-0.9, 0, 0.1, 0.01},
                           (double[]){0.212822222583315, 0.0280653106118706, -0.278532173948033,
                                      0.0873392634468868});
    expect_golden_gradient(&b, 2, (double[]){0, 1, 0, 0},
                           (double[]){0.104166404960676, 0.0990723071630062, -0.332709112890002,
                                      0.12947040076632});
    bench_free(&b);
}

/* Does the device round a product and a sum once? The CPU device: as SEQPAR__FMA of
   seqpar.h. */
#if defined(TEST_CUDA) || \
    (!defined(SEQPAR_NO_FMA) && \
     (defined(__FMA__) || defined(__aarch64__) || defined(__ARM_FEATURE_FMA)))
enum { FUSED = 1 };
#else
enum { FUSED = 0 };
#endif

/* Beyond where exp overflows in fp32, and where neighbours lie 1/128 and 2 apart; there a
   mean in fp32 is not worth a look. No seed for the entropy: x - lse loses what lse is
   rounded by. */
static void check_head_far(void) {
    static const double above[3] = {100, 1e5, -3e7};
    enum { COLUMNS = 413 };
    int cases = FUSED ? 3 : 1; /* x log2(e) rounded is too far off without */
    for (int c = 0; c < cases; c++) {
        bench b = head_bench(7, COLUMNS);
        field *logits = &b.field[LOGITS];
        for (int64_t t = 0; t < 7; t++)
            for (int64_t j = 0; j < COLUMNS; j++)
                logits->value[t * logits->stride + j] =
                    (float)(logits->value[t * logits->stride + j] + above[c]);
        if (!c) check_head_values(&b);
        expect_fast(&b, &head_far_pass);
        b.mode = 1;
        expect_fast(&b, &head_grad_pass);
        bench_free(&b);
    }
}

/* Seeds of the entropy in some rows only: a row is made a gradient after the next one's
   exponentials, or at once. */
static void check_head_mixed(void) {
    bench b = head_bench(37, 521);
    for (int64_t t = 0; t < 37; t++)
        if (t * t % 7 < 3) b.field[DENTROPY].value[t] = 0;
    b.mode = ALL_SEEDS | GRADIENT;
    expect_fast(&b, &head_both_pass);
    bench_free(&b);
}

static void copy_after(double *to, const bench *b, int number) {
    memcpy(to, b->field[number].after, (size_t)b->size[0] * sizeof *to);
}

/* Many blocks of the fast device, of which later ones are above what the first lets expect:
   by little, by much, by more than exp in fp32 can bear, again and again. Values have the
   same bits whether a gradient is wanted with them or not. */
static void check_head_climb(void) {
    static const double above[][4] = {{0, 0, 0, 0},   {0, 20, 40, 160},  {0, 0, 200, 0},
                                      {0, 100, 0, 0}, {-1e4, 0, -50, 1}, {0, 6, 0, 9},
                                      {90, 60, 30, 0}};
    enum { STEP = 613, COLUMNS = 3 * STEP + 101, ROWS = sizeof above / sizeof *above };
    bench b = head_bench(ROWS, COLUMNS);
    field *logits = &b.field[LOGITS];
    double alone[ROWS], beside[ROWS];
    int64_t t, j;
    int seed;
    for (t = 0; t < ROWS; t++)
        for (j = 0; j < COLUMNS; j++)
            logits->value[t * logits->stride + j] =
                (float)(logits->value[t * logits->stride + j] + above[t][j / STEP]);
    logits->value[COLUMNS - 1] = 130; /* the last alone */
    check_head_values(&b);
    for (seed = 0; seed < 4; seed++) {
        b.mode = 1 << seed;
        /* that of the entropy loses what lse is rounded by */
        if (b.mode != 2) expect_fast(&b, &head_grad_pass);
        run(&b, fast, &head_pass);
        copy_after(alone, &b, LOGP);
        b.mode |= GRADIENT;
        run(&b, fast, &head_both_pass);
        copy_after(beside, &b, LOGP);
        if (memcmp(alone, beside, sizeof alone))
            note(&worst.cpu, INFINITY, limit.cpu, "cpu",
                 "log-probs, which have other bits beside a gradient");
    }
    bench_free(&b);
}

/* Logits that nobody may choose fill the first block; one that is no number, or infinite,
   stands in a late one. */
static void expect_head_infinite(seqpar_device *device, int mode) {
    enum { COLUMNS = 2 * 2048 + 77, ROWS = 3 };
    bench b = head_bench(ROWS, COLUMNS);
    field *logits = &b.field[LOGITS];
    const double *logp = b.field[LOGP].after;
    double wanted[ROWS];
    int64_t t, j;
    for (t = 0; t < ROWS; t++) b.ids[t] = 3001;
    for (t = 0; t < ROWS; t++)
        for (j = 0; j < 2048; j++) logits->value[t * logits->stride + j] = -1e4;
    run(&b, device, &head_pass);
    copy_after(wanted, &b, LOGP);
    for (t = 0; t < ROWS; t++)
        for (j = 0; j < 2048; j++) logits->value[t * logits->stride + j] = -INFINITY;
    logits->value[logits->stride + 3000] = NAN;
    logits->value[2 * logits->stride + 4097] = INFINITY;
    b.mode = mode | GRADIENT;
    run(&b, device, &head_both_pass);
    test_expect(logp[0] == wanted[0],
                "%s: log-prob %g beside a block of -inf, %g beside one of -1e4", device->name,
                logp[0], wanted[0]);
    test_expect(isfinite(b.field[ENTROPY].after[0]), "%s: entropy %g beside logits of -inf",
                device->name, b.field[ENTROPY].after[0]);
    for (j = 0; j < 2048; j++)
        test_expect(logits->after[j] == 0, "%s: gradient %g of a logit of -inf", device->name,
                    logits->after[j]);
    for (j = 2048; j < COLUMNS; j++)
        test_expect(isfinite(logits->after[j]), "%s: gradient %g beside logits of -inf",
                    device->name, logits->after[j]);
    for (t = 1; t < ROWS; t++)
        test_expect(!isfinite(logp[t]), "%s: log-prob %g in a row with a logit of %s",
                    device->name, logp[t], t == 1 ? "NaN" : "infinity");
    bench_free(&b);
}

static void check_head_infinite(void) {
    int mode;
    for (mode = 1; mode <= 2; mode++) { /* seeds of the log-prob, and of the entropy */
        expect_head_infinite(reference, mode);
        expect_head_infinite(fast, mode);
    }
}

/* In row t two columns of the third block are far above all others, both t modulo 64: each
   of the 64 sums has to find its own. Two, so that there is an entropy. */
static void check_head_high(void) {
    enum { LANES = 64, BLOCK = 512, COLUMNS = 4 * BLOCK + 101 };
    bench b = head_bench(LANES, COLUMNS);
    for (int64_t t = 0; t < 2 * LANES; t++)
        b.field[LOGITS].value[t % LANES * b.field[LOGITS].stride + 2 * BLOCK + t] += 128;
    check_head_values(&b);
    bench_free(&b);
}

static void check_vocab_softmax(void) {
    check_head_infinite();
    check_head_golden();
    check_head_far();
    check_head_mixed();
    check_head_climb();
    check_head_high();
    check_head_size(7, 11, 1);
    check_head_size(5, 37, 1);
    check_head_size(67, 1009, 0);
}

/* ---- distill ---- */

enum { STUDENT, TEACHER, KL, TEACHER_ENTROPY, DKL };
enum { REVERSE = 1, WARM = 2 }; /* mode; WARM: of logits times 0.625 */

static bench distill_bench(int64_t rows, int64_t vocab, int mode) {
    bench b = {.size = {rows, vocab}, .mode = mode};
    add_field(&b, "logits", rows, vocab, 3, 2);
    add_field(&b, "teacher", rows, vocab, 5, 3);
    add_sums(&b, "kl", rows, 1, 0, 1);
    add_sums(&b, "entropy", rows, 1, 0, 1);
    add_sums(&b, "dkl", rows, 1, 0, 1);
    return b;
}

static seqpar_status call_distill_as(seqpar_device *device, const bench *b, int gradient) {
    seqpar_distill_args a = {.logits = mat(&b->field[STUDENT]),
                             .teacher = mat(&b->field[TEACHER]),
                             .rows = b->size[0],
                             .vocab = b->size[1],
                             .kl = b->field[KL].data,
                             .entropy = b->field[TEACHER_ENTROPY].data,
                             .dkl = b->field[DKL].data,
                             .scale = b->mode & WARM ? 0.625 : 0,
                             .reverse = b->mode & REVERSE,
                             .gradient = gradient};
    return device->distill(device, &a, device->queue);
}

static seqpar_status call_distill(seqpar_device *device, const bench *b) {
    return call_distill_as(device, b, 0);
}

static seqpar_status call_distill_grad(seqpar_device *device, const bench *b) {
    return call_distill_as(device, b, 1);
}

static const pass distill_pass = {call_distill, 1 << KL | 1 << TEACHER_ENTROPY, 0},
                  distill_grad_pass = {call_distill_grad,
                                       1 << KL | 1 << TEACHER_ENTROPY | 1 << TEACHER, 0};

/* a NaN that stays as it is differs from itself */
static const pass distill_nan_pass = {
    call_distill, 1 << KL | 1 << TEACHER_ENTROPY | 1 << STUDENT | 1 << TEACHER, 0};

/* By the definition: kl, the teacher's entropy, and dkl times the slope by logit j. */
static void distill_row(const bench *b, int64_t t, double *kl, double *entropy, double *slope) {
    const field *x = &b->field[STUDENT], *z = &b->field[TEACHER];
    int64_t n = b->size[1];
    double scale = b->mode & WARM ? 0.625 : 1, lse[2] = {0, 0}, *p = calloc((size_t)(4 * n), 8);
    double *q = p + n, *log_p = q + n, *log_q = log_p + n;
    for (int64_t j = 0; j < n; j++) {
        lse[0] += exp(log_p[j] = scale * x->value[t * x->stride + j]);
        lse[1] += exp(log_q[j] = scale * z->value[t * z->stride + j]);
    }
    *kl = *entropy = 0;
    for (int64_t j = 0; j < n; j++) {
        p[j] = exp(log_p[j] -= log(lse[0]));
        q[j] = exp(log_q[j] -= log(lse[1]));
        *kl += b->mode & REVERSE ? p[j] * (log_p[j] - log_q[j]) : q[j] * (log_q[j] - log_p[j]);
        *entropy -= q[j] * log_q[j];
    }
    for (int64_t j = 0; j < n; j++)
        slope[j] = scale * b->field[DKL].value[t] *
                   (b->mode & REVERSE ? p[j] * (log_p[j] - log_q[j] - *kl) : p[j] - q[j]);
    free(p);
}

static void check_distill_size(int64_t rows, int64_t vocab, int mode) {
    bench b = distill_bench(rows, vocab, mode);
    double *kl = calloc((size_t)(rows * (vocab + 2)), sizeof *kl), *entropy = kl + rows;
    for (int64_t t = 0; t < rows; t++)
        distill_row(&b, t, &kl[t], &entropy[t], entropy + rows + t * vocab);
    expect_fast(&b, &distill_pass);
    expect_values(&b, KL, kl);
    expect_values(&b, TEACHER_ENTROPY, entropy);
    expect_fast(&b, &distill_grad_pass);
    expect_values(&b, TEACHER, entropy + rows);
    free(kl);
    bench_free(&b);
}

/* A student that is its teacher is nowhere away from it, whatever is -inf in both. */
static void expect_distill_same(seqpar_device *device, int mode) {
    bench b = distill_bench(3, 131, mode);
    field *x = &b.field[STUDENT], *z = &b.field[TEACHER];
    for (int64_t t = 0; t < 3; t++)
        for (int64_t j = 0; j < 131; j++) {
            if (t == 1 && j % 3 == 0) x->value[t * x->stride + j] = -INFINITY;
            z->value[t * z->stride + j] = x->value[t * x->stride + j];
        }
    run(&b, device, &distill_grad_pass);
    for (int64_t t = 0; t < 3; t++) {
        double far = 0;
        for (int64_t j = 0; j < 131; j++) far += fabs(z->after[t * z->stride + j]);
        test_expect(b.field[KL].after[t] == 0 && far == 0,
                    "%s, mode %d: a student is %g from itself, with slopes %g", device->name,
                    mode, b.field[KL].after[t], far);
    }
    bench_free(&b);
}

/* What one of them excludes: of no weight where it is the weight's, and else infinite. */
static void expect_distill_excluded(seqpar_device *device, int mode) {
    bench b = distill_bench(2, 67, mode);
    field *out = &b.field[mode & REVERSE ? STUDENT : TEACHER];
    field *other = &b.field[mode & REVERSE ? TEACHER : STUDENT];
    out->value[5] = -INFINITY;
    other->value[other->stride + 7] = -INFINITY;
    run(&b, device, &distill_grad_pass);
    test_expect(isfinite(b.field[KL].after[0]), "%s, mode %d: %g where a weight is 0",
                device->name, mode, b.field[KL].after[0]);
    for (int64_t j = 0; j < 67; j++)
        test_expect(isfinite(b.field[TEACHER].after[j]), "%s, mode %d: slope %g of logit %lld",
                    device->name, mode, b.field[TEACHER].after[j], (long long)j);
    test_expect(b.field[KL].after[1] > 1e30, "%s, mode %d: %g where a probability is 0",
                device->name, mode, b.field[KL].after[1]);
    bench_free(&b);
}

/* NaN stays one, wherever it stands. */
static void expect_distill_nan(seqpar_device *device, int number) {
    for (int64_t j = 0; j < 131; j += 13) {
        bench b = distill_bench(2, 131, 0);
        b.field[number].value[b.field[number].stride + j] = NAN;
        run(&b, device, &distill_nan_pass);
        test_expect(isfinite(b.field[KL].after[0]) && isnan(b.field[KL].after[1]),
                    "%s: %g beside a NaN in %s, element %lld, and %g with it", device->name,
                    b.field[KL].after[0], b.field[number].name, (long long)j,
                    b.field[KL].after[1]);
        bench_free(&b);
    }
}

static void check_distill(void) {
    for (int mode = 0; mode < 4; mode++) {
        check_distill_size(7, 11, mode);
        check_distill_size(5, 37, mode);
        check_distill_size(67, 1009, mode);
        for (int i = 0; i < 2; i++) {
            expect_distill_same(i ? fast : reference, mode);
            expect_distill_excluded(i ? fast : reference, mode);
        }
    }
    for (int i = 0; i < 4; i++) expect_distill_nan(i / 2 ? fast : reference, i % 2);
}

/* ---- choose ---- */

enum { CHOOSE_LOGITS, LOGQ, DLOGQ };
enum { COLD = 1 }; /* mode: of logits times 1.75 */

/* ids of the choices: the first, the last, and others in no order */
static void choose_ids(const bench *b, int32_t *ids) {
    int64_t vocab = b->size[1], count = b->size[2];
    for (int64_t k = 0; k < count; k++)
        ids[k] = (int32_t)(k == 1 ? 0 : k == 0 ? vocab - 1 : (5 * k) % (vocab - 1));
}

static bench choose_bench(int64_t rows, int64_t vocab, int64_t count, int mode) {
    bench b = {.size = {rows, vocab, count}, .mode = mode};
    add_field(&b, "logits", rows, vocab, 3, 2);
    add_sums(&b, "logq", rows, count, 0, 1);
    add_sums(&b, "dlogq", rows, count, 0, 1);
    return b;
}

static seqpar_status call_choose_as(seqpar_device *device, const bench *b, int gradient) {
    seqpar_choose_args a = {.logits = mat(&b->field[CHOOSE_LOGITS]),
                            .rows = b->size[0],
                            .vocab = b->size[1],
                            .count = b->size[2],
                            .logq = b->field[LOGQ].data,
                            .dlogq = b->field[DLOGQ].data,
                            .scale = b->mode & COLD ? 1.75 : 0,
                            .gradient = gradient};
    choose_ids(b, a.ids);
    return device->choose(device, &a, device->queue);
}

static seqpar_status call_choose(seqpar_device *device, const bench *b) {
    return call_choose_as(device, b, 0);
}

static seqpar_status call_choose_grad(seqpar_device *device, const bench *b) {
    return call_choose_as(device, b, 1);
}

static const pass choose_pass = {call_choose, 1 << LOGQ, 0},
                  choose_grad_pass = {call_choose_grad, 1 << LOGQ | 1 << CHOOSE_LOGITS, 0};

/* By the definition: logq (count), and the slopes by all logits (vocab). */
static void choose_row(const bench *b, int64_t t, double *logq, double *slope) {
    const field *x = &b->field[CHOOSE_LOGITS], *d = &b->field[DLOGQ];
    double scale = b->mode & COLD ? 1.75 : 1, sum = 0, seeds = 0;
    int32_t ids[SEQPAR_MAX_CHOICES];
    int64_t count = b->size[2];
    choose_ids(b, ids);
    for (int64_t k = 0; k < count; k++) {
        sum += exp(logq[k] = scale * x->value[t * x->stride + ids[k]]);
        seeds += d->value[t * d->stride + k];
    }
    for (int64_t k = 0; k < count; k++) {
        logq[k] -= log(sum);
        slope[ids[k]] = scale * (d->value[t * d->stride + k] - exp(logq[k]) * seeds);
    }
}

static void check_choose_size(int64_t rows, int64_t vocab, int64_t count, int mode) {
    bench b = choose_bench(rows, vocab, count, mode);
    double *logq = calloc((size_t)(rows * (count + vocab)), sizeof *logq);
    for (int64_t t = 0; t < rows; t++)
        choose_row(&b, t, logq + t * count, logq + rows * count + t * vocab);
    expect_fast(&b, &choose_pass);
    expect_values(&b, LOGQ, logq);
    expect_fast(&b, &choose_grad_pass);
    expect_values(&b, CHOOSE_LOGITS, logq + rows * count);
    free(logq);
    bench_free(&b);
}

/* NaN in a choice stays one; elsewhere it is not read, and a gradient leaves 0 there. */
static void expect_choose_nan(seqpar_device *device) {
    bench b = choose_bench(3, 67, 2, 0);
    field *x = &b.field[CHOOSE_LOGITS];
    x->value[x->stride] = x->value[2 * x->stride + 33] = NAN;
    run(&b, device, &choose_grad_pass);
    test_expect(isfinite(b.field[LOGQ].after[0]) && isnan(b.field[LOGQ].after[2]) &&
                    isnan(b.field[LOGQ].after[3]) && isfinite(b.field[LOGQ].after[4]),
                "%s: log-probs %g, %g, %g, %g", device->name, b.field[LOGQ].after[0],
                b.field[LOGQ].after[2], b.field[LOGQ].after[3], b.field[LOGQ].after[4]);
    test_expect(x->after[2 * x->stride + 33] == 0, "%s: slope %g of a logit that is no choice",
                device->name, x->after[2 * x->stride + 33]);
    bench_free(&b);
}

static void check_choose(void) {
    for (int mode = 0; mode < 2; mode++) {
        check_choose_size(7, 11, 2, mode);
        check_choose_size(5, 37, 5, mode);
        check_choose_size(67, 1009, SEQPAR_MAX_CHOICES, mode);
    }
    for (int i = 0; i < 2; i++) expect_choose_nan(i ? fast : reference);
}

/* vocab_softmax is worst in `smooth` of logits near 100, whose mean is summed in fp32; its
   gradient is within 4e-7. */
static const op_check checks[] = {
    {"vocab_softmax", check_vocab_softmax, 5e-6, 1},
    {"distill", check_distill, 5e-6, 1},
    {"choose", check_choose, 5e-6, 1},
    {"sample", check_sample, 0, 0},
};

int main(int argc, char **argv) {
    test_begin(argc, argv);
    device_open(checks, sizeof checks / sizeof *checks);
#define X(op) TEST(test_op(#op, OP_##op));
    VOCAB_OPS(X)
#undef X
    device_close();
    return test_summary();
}
