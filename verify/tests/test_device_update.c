/* SPDX-License-Identifier: MIT OR Unlicense */
/* Operations of the optimizer on a device, as support/device_ops.h says: norms, updates, and
   numbers in fewer bits. */
#define SEQPAR_IMPLEMENTATION
#include "support/device_ops.h"
#include "support/nf4.h"

/* ---- sumsq ---- */

static double sums[8]; /* sumsq answers on the host */

static seqpar_status call_sumsq(seqpar_device *device, const bench *b) {
    seqpar_sumsq_args a = {sums, b->field[0].data, b->size[0], b->size[1]};
    return device->sumsq(device, &a, device->queue);
}

static void check_sumsq_size(int64_t blocks, int64_t block_size) {
    bench b = {.size = {blocks, block_size}};
    double want[8] = {0}, with_threads[8];
    int64_t i;
    add_sums(&b, "x", blocks, block_size, 0, 1);
    for (i = 0; i < blocks * block_size; i++)
        want[i / block_size] += b.field[0].value[i] * b.field[0].value[i];
    run(&b, reference, &(pass){call_sumsq, 0, 0});
    note(&worst.formula, test_distance(sums, want, blocks), limit.formula, "value",
         "sum of squares");
    run(&b, bf16, &(pass){call_sumsq, 0, 0});
    note(&worst.cpu, test_distance(sums, want, blocks), limit.cpu, bf16->name,
         "sum of squares");
    run(&b, fast_threads, &(pass){call_sumsq, 0, 0});
    memcpy(with_threads, sums, sizeof sums);
    run(&b, fast, &(pass){call_sumsq, 0, 0});
    test_expect(!memcmp(with_threads, sums, sizeof sums),
                "the sum of squares depends on the number of threads");
    note(&worst.cpu, test_distance(sums, want, blocks), limit.cpu, "cpu", "sum of squares");
    bench_free(&b);
}

static void check_sumsq(void) {
    check_sumsq_size(0, 7);
    check_sumsq_size(3, 7);
    check_sumsq_size(5, 1021);
}

/* ---- nf4_rows: matrices in four bits ---- */

enum { NF4_OUT };
static bench nf4_bench(int64_t rows, int64_t cols, int64_t row, int64_t col, int64_t width) {
    bench b = {.size = {rows, cols, row, col, width}};
    add_field(&b, "out", rows, cols, 3, 0);
    return b;
}

static void
    *nf4_device_bytes; /* the matrix of a bench, in the memory of the device that is asked */
static int64_t nf4_elements;

static seqpar_status call_unpack(seqpar_device *device, const bench *b) {
    int64_t size = seqpar_nf4_bytes(nf4_elements);
    void *there = device->alloc(device, size);
    seqpar_nf4_rows_args a = {.out = mat(&b->field[NF4_OUT]),
                              .rows = b->size[0],
                              .cols = b->size[1],
                              .row = b->size[2],
                              .col = b->size[3],
                              .width = b->size[4],
                              .from = seqpar_nf4_at(there, nf4_elements)};
    device->copy(device, there, nf4_device_bytes, size, device->queue);
    seqpar_status status = device->nf4_rows(device, &a, device->queue);
    if (!status) status = seqpar_device_settle(device, device->queue);
    device->free(device, there);
    return status;
}

static const pass unpack_pass = {call_unpack, 1 << NF4_OUT, 0};

/* Of the whole matrix by the reference, which test_numerics holds against bitsandbytes: near x, to a
   sixth of the largest of 64 neighbours and what 8 bits leave of that. */
static double *unpack_whole(const float *x) {
    double *whole = calloc((size_t)nf4_elements, sizeof *whole);
    int64_t bytes = nf4_elements * seqpar_dtype_bytes(reference->storage);
    void *out = reference->alloc(reference, bytes);
    const seqpar_nf4_rows_args a = {.out = {out, nf4_elements},
                                    .rows = 1,
                                    .cols = nf4_elements,
                                    .width = nf4_elements,
                                    .from = seqpar_nf4_at(nf4_device_bytes, nf4_elements)};
    test_expect(!reference->nf4_rows(reference, &a, NULL), "the reference fails");
    seqpar_device_read(reference, whole, out, 0, nf4_elements, reference->storage);
    reference->free(reference, out);
    for (int64_t begin = 0; begin < nf4_elements; begin += 64) {
        double most = 0;
        for (int64_t n = begin; n < begin + 64 && n < nf4_elements; n++)
            most = fmax(most, fabs((double)x[n]));
        for (int64_t n = begin; n < begin + 64 && n < nf4_elements; n++)
            test_expect(fabs(whole[n] - (double)x[n]) <= 0.2 * most + 1e-6,
                        "value %lld is %g, not %g", (long long)n, whole[n], (double)x[n]);
    }
    return whole;
}

/* A part of a matrix of `width` columns. */
static void check_unpack_part(const double *whole, int64_t row, int64_t rows, int64_t col,
                              int64_t cols, int64_t width) {
    bench b = nf4_bench(rows, cols, row, col, width);
    double *want = calloc((size_t)(rows * cols), sizeof *want);
    for (int64_t t = 0; t < rows; t++)
        for (int64_t j = 0; j < cols; j++)
            want[t * cols + j] = whole[(row + t) * width + col + j];
    expect_fast(&b, &unpack_pass);
    expect_values(&b, NF4_OUT, want);
    free(want);
    bench_free(&b);
}

static void check_unpack_size(int64_t rows, int64_t cols, int kind) {
    float *x = calloc((size_t)(rows * cols), sizeof *x);
    seqpar_error error = {0};
    nf4_elements = rows * cols;
    nf4_device_bytes = malloc((size_t)seqpar_nf4_bytes(nf4_elements));
    for (int64_t n = 0; n < nf4_elements; n++) x[n] = nf4_value((uint32_t)n, (uint32_t)kind);
    test_expect(!seqpar_nf4_quantize(&error, nf4_device_bytes, x, nf4_elements), "%s",
                error.text);
    double *whole = unpack_whole(x);
    int64_t half = nf4_elements / 2;
    check_unpack_part(whole, 0, rows, 0, cols, cols);
    check_unpack_part(whole, rows / 2, rows - rows / 2, cols / 3, cols - cols / 3, cols);
    check_unpack_part(whole, 0, 1, half, nf4_elements - half, nf4_elements);
    free(whole);
    free(nf4_device_bytes);
    free(x);
}

/* All 256 values of a scale's byte: of decade e the centres of 2^e equal parts of 0.1 to 1, times
   10^(e - 6), both signs, 0 and 1. */
static double nf4_scale(int byte) {
    int n = byte < 127 ? 126 - byte : byte - 128, e = 0;
    if (byte == 127 || byte == 255) return byte == 255;
    while (n >= (2 << e) - 1) e++;
    double x = (0.1 + 0.9 * (n - (1 << e) + 1.5) / (1 << e)) * pow(10, e - 6);
    return byte < 127 ? -x : x;
}

/* A group for each byte; every element is the largest level, 1. */
static void check_nf4_scales(void) {
    nf4_elements = 256 * SEQPAR_NF4_GROUP;
    nf4_device_bytes = malloc((size_t)seqpar_nf4_bytes(nf4_elements));
    memset(nf4_device_bytes, 0xff, (size_t)seqpar_nf4_bytes(nf4_elements));
    seqpar_nf4 m = seqpar_nf4_at(nf4_device_bytes, nf4_elements);
    *(float *)m.steps = 1;
    *(float *)m.offset = 0;
    for (int byte = 0; byte < 256; byte++) ((uint8_t *)m.scales)[byte] = (uint8_t)byte;
    float *x = calloc((size_t)nf4_elements, sizeof *x);
    for (int64_t n = 0; n < nf4_elements; n++) x[n] = (float)nf4_scale((int)(n / 64));
    double *whole = unpack_whole(x);
    for (int byte = 0; byte < 256; byte++) {
        double want = nf4_scale(byte), got = whole[byte * SEQPAR_NF4_GROUP];
        test_expect(fabs(got - want) <= 1e-6 * fabs(want), "scale %d is %.9g, not %.9g", byte,
                    got, want);
    }
    check_unpack_part(whole, 0, 256, 0, SEQPAR_NF4_GROUP, SEQPAR_NF4_GROUP);
    free(whole);
    free(x);
    free(nf4_device_bytes);
}

static void check_nf4_rows(void) {
    check_nf4_scales();
    for (int kind = 0; kind < 3; kind++) {
        check_unpack_size(1, 1, kind);
        check_unpack_size(7, 11, kind);
        check_unpack_size(37, 61, kind);
        check_unpack_size(67, 1009, kind);
    }
}

/* ---- updates ---- */

enum { PARAMETER, MOMENT, VARIANCE, UPDATE_G, WORKING };

static seqpar_update_args update_args(const bench *b) {
    const field *f = b->field;
    return (seqpar_update_args){f[PARAMETER].data,
                                f[MOMENT].data,
                                f[VARIANCE].data,
                                f[UPDATE_G].data,
                                b->size[0],
                                b->size[1],
                                0.01,
                                0.9,
                                0.95,
                                1e-8,
                                0.1,
                                0.375,
                                b->mode ? f[WORKING].data : NULL};
}

static seqpar_status call_adamw(seqpar_device *device, const bench *b) {
    seqpar_update_args a = update_args(b);
    return device->adamw(device, &a, device->queue);
}

static seqpar_status call_sgd(seqpar_device *device, const bench *b) {
    seqpar_update_args a = update_args(b);
    a.m = a.v = NULL;
    return device->sgd(device, &a, device->queue);
}

static bench update_bench(int64_t count, int64_t t) {
    bench b = {.size = {count, t}};
    int64_t i;
    add_sums(&b, "p", 1, count, 3, 0.05);
    add_sums(&b, "m", 1, count, 3, t > 1);
    add_sums(&b, "v", 1, count, 3, t > 1);
    add_sums(&b, "g", 1, count, 3, 1);
    add_field(&b, "working", 1, count, 3, 0.05);
    for (i = 0; i < count; i++) b.field[VARIANCE].value[i] = fabs(b.field[VARIANCE].value[i]);
    return b;
}

static void check_update(int64_t count, int64_t t, int sgd) {
    bench b = update_bench(count, t);
    double *p = dense_copy(&b.field[0], b.field[0].value);
    double *m = dense_copy(&b.field[1], b.field[1].value);
    double *v = dense_copy(&b.field[2], b.field[2].value);
    double *g = dense_copy(&b.field[3], b.field[3].value);
    int64_t i;
    for (i = 0; i < count; i++) g[i] *= 0.375;
    if (sgd)
        slow_sgd_step(0.01, 0, 0.1, count, g, m, p);
    else
        slow_adamw_step(&(slow_adamw){0.9, 0.95, 1e-8, 0.1}, 0.01, t, count, g, m, v, p);
    expect_fast(&b, &(pass){sgd ? call_sgd : call_adamw, sgd ? 1 : 7, 0});
    expect_values(&b, PARAMETER, p);
    if (!sgd) {
        expect_values(&b, MOMENT, m);
        expect_values(&b, VARIANCE, v);
    }
    free(p);
    free(m);
    free(v);
    free(g);
    bench_free(&b);
}

/* Master parameters: p begins as the weights of the first step, goes on from itself, and the
   weights are p rounded. */
static void check_masters(seqpar_device *device, int64_t t, int sgd) {
    bench b = update_bench(1031, t);
    field *f = b.field;
    double *p, m[1031], v[1031], g[1031], d;
    int64_t i;
    b.mode = 1;
    round_fields(&b);
    p = dense_copy(&f[t == 1 ? WORKING : PARAMETER], f[t == 1 ? WORKING : PARAMETER].value);
    for (i = 0; i < 1031; i++) {
        m[i] = f[MOMENT].value[i];
        v[i] = f[VARIANCE].value[i];
        g[i] = f[UPDATE_G].value[i] * 0.375;
    }
    if (sgd)
        slow_sgd_step(0.01, 0, 0.1, 1031, g, m, p);
    else
        slow_adamw_step(&(slow_adamw){0.9, 0.95, 1e-8, 0.1}, 0.01, t, 1031, g, m, v, p);
    run(&b, device, &(pass){sgd ? call_sgd : call_adamw, (sgd ? 1 : 7) | 1 << WORKING, 0});
    d = test_distance(f[PARAMETER].after, p, 1031);
    test_expect(d <= 4e-7, "%s, step %lld: the masters are off by %.2e", device->name,
                (long long)t, d);
    for (i = 0; i < 1031; i++)
        test_expect(f[WORKING].after[i] == stored_as(f[PARAMETER].after[i], SEQPAR_DTYPE_BF16),
                    "%s: weight %lld is %.9g, its master %.9g", device->name, (long long)i,
                    f[WORKING].after[i], f[PARAMETER].after[i]);
    free(p);
    bench_free(&b);
}

static void check_all_masters(int sgd) {
    int64_t t;
    for (t = 1; t <= 5; t += 4) {
        check_masters(bf16_reference, t, sgd);
        check_masters(bf16, t, sgd);
    }
}

static void check_adamw(void) {
    check_all_masters(0);
    check_update(37, 1, 0);
    check_update(16411, 7, 0);
    check_update(1, 1000, 0);
}

static void check_sgd(void) {
    check_all_masters(1);
    check_update(37, 1, 1);
    check_update(16411, 7, 1);
}

/* ---- numbers in fewer bits ---- */

enum { PACKED = 3 * SEQPAR_QUANTIZE_GROUP + 77 };

/* On a device: x (PACKED) to bytes and back, and to bytes again. */
typedef struct packing {
    double x[PACKED], back[PACKED], scales[4];
    uint8_t bytes[2][PACKED];
} packing;

static void pack_there_and_back(seqpar_device *device, packing *p, int form) {
    int acc = device->accumulator;
    void *x = device->alloc(device, PACKED * 8), *bytes = device->alloc(device, PACKED);
    void *scales = device->alloc(device, 4 * 8);
    seqpar_quantize_args a = {
        .form = form, .x = x, .codes = bytes, .scales = scales, .count = PACKED};
    seqpar_device_write(device, x, 0, p->x, PACKED, acc);
    for (int again = 0; again < 2; again++) {
        a.back = 0;
        test_expect(!device->quantize(device, &a, device->queue), "%s refuses", device->name);
        device->copy(device, p->bytes[again], bytes, PACKED, NULL);
        a.back = 1;
        test_expect(!device->quantize(device, &a, device->queue), "%s refuses", device->name);
    }
    seqpar_device_read(device, p->back, x, 0, PACKED, acc);
    seqpar_device_read(device, p->scales, scales, 0, 4, acc);
    device->free(device, x);
    device->free(device, bytes);
    device->free(device, scales);
}

static void check_packing(seqpar_device *device, int form) {
    static packing p, fp32;
    int positive = form == SEQPAR_QUANTIZE_POSITIVE;
    for (int i = 0; i < PACKED; i++) { /* a group of zeros, tiny ones, and some of each */
        double spread = i % 5 ? exp(-0.012 * (double)test_integer(0, 1000)) : 0;
        p.x[i] = (float)(i / SEQPAR_QUANTIZE_GROUP == 1 ? 0 : test_normal() * spread);
        if (i / SEQPAR_QUANTIZE_GROUP == 2) p.x[i] *= 1e-39;
        if (positive) p.x[i] = fabs(p.x[i]);
        p.x[i] = stored_as(p.x[i], SEQPAR_DTYPE_F32);
    }
    pack_there_and_back(device, &p, form);
    for (int i = 0; i < PACKED; i++) {
        double top = 0, y;
        int group = i / SEQPAR_QUANTIZE_GROUP;
        for (int k = group * SEQPAR_QUANTIZE_GROUP;
             k < PACKED && k / SEQPAR_QUANTIZE_GROUP == group; k++)
            top = fmax(top, fabs(p.x[k]));
        y = top > 0 ? fabs(p.x[i]) / top : 0;
        double code = positive ? 255 * sqrt(sqrt(y)) : 127 * sqrt(y) * (p.x[i] < 0 ? -1 : 1);
        double got = positive ? p.bytes[0][i] : (int8_t)p.bytes[0][i];
        if (positive && p.x[i] > 0) code = fmax(code, 1);
        test_expect(fabs(got - code) <= 0.5 + 1e-4, "%s: number %d, %g, is code %g, not %g",
                    device->name, i, p.x[i], got, code);
        double value = got / (positive ? 255 : 127);
        value = (positive ? value * value * value * value : value * fabs(value)) * top;
        test_expect(fabs(p.back[i] - value) <= 1e-6 * fabs(value) + 2e-45,
                    "%s: code %g becomes %g, not %g", device->name, got, p.back[i], value);
        test_expect(p.scales[group] == top, "%s: the scale is %g, not %g", device->name,
                    p.scales[group], top);
    }
    test_expect(!memcmp(p.bytes[0], p.bytes[1], PACKED), "%s: packed again it differs",
                device->name);
    if (device->accumulator != SEQPAR_DTYPE_F32) return;
    memcpy(fp32.x, p.x, sizeof p.x);
    pack_there_and_back(bf16_reference, &fp32, form);
    test_expect(!memcmp(fp32.bytes, p.bytes, sizeof p.bytes) &&
                    !memcmp(fp32.back, p.back, sizeof p.back),
                "%s has other bits than another device", device->name);
}

/* Each number becomes one of its neighbours, by the draw that is its own, and is kept in the
   mean; what is bf16 already stays. */
static void check_chance(seqpar_device *device) {
    enum { N = 41, DRAWS = 400, FIRST = 13 };
    double x[N], got[N], mean[N] = {0};
    int type = device->storage, half = type == SEQPAR_DTYPE_BF16;
    void *wide = device->alloc(device, N * 8), *narrow = device->alloc(device, N * 8);
    seqpar_quantize_args a = {.form = SEQPAR_QUANTIZE_STOCHASTIC,
                              .x = wide,
                              .codes = narrow,
                              .count = N,
                              .first = FIRST,
                              .seed = 7};
    for (int i = 0; i < N; i++) x[i] = (float)(i % 8 ? test_normal() * 100 : i - 20);
    for (int draw = 0; draw < DRAWS; draw++) {
        a.stream = (uint64_t)draw;
        a.back = 0;
        seqpar_device_write(device, wide, 0, x, N, device->accumulator);
        test_expect(!device->quantize(device, &a, device->queue), "%s refuses", device->name);
        a.back = 1;
        test_expect(!device->quantize(device, &a, device->queue), "%s refuses", device->name);
        seqpar_device_read(device, got, wide, 0, N, device->accumulator);
        for (int i = 0; i < N; i++) {
            uint32_t r[4], bits;
            float value = (float)x[i];
            seqpar_random(r, 7, (uint64_t)draw, (uint64_t)(FIRST + i) / 8);
            memcpy(&bits, &value, 4);
            bits += r[(FIRST + i) % 8 / 2] >> 16 * ((FIRST + i) % 2) & 0xffff;
            bits &= 0xffff0000u;
            memcpy(&value, &bits, 4);
            test_expect(got[i] == (half ? (double)value : x[i]), "%s: %g becomes %g, not %g",
                        device->name, x[i], got[i], (double)value);
            mean[i] += got[i] / DRAWS;
        }
    }
    for (int i = 0; i < N; i++) /* five times the deviation of a mean of draws 2^-7 x apart */
        test_expect(fabs(mean[i] - x[i]) <= fabs(x[i]) / 128 * 0.5 / sqrt(DRAWS) * 5,
                    "%s: %g is %g in the mean", device->name, x[i], mean[i]);
    device->free(device, wide);
    device->free(device, narrow);
}

/* A number that is none is not lost: its group becomes none. */
static void check_packed_nan(seqpar_device *device, double odd) {
    static packing p;
    for (int i = 0; i < PACKED; i++) p.x[i] = i % 7 - 3;
    p.x[SEQPAR_QUANTIZE_GROUP + 5] = odd;
    pack_there_and_back(device, &p, SEQPAR_QUANTIZE_SIGNED);
    for (int i = 0; i < PACKED; i++)
        test_expect((p.back[i] != p.back[i]) == (i / SEQPAR_QUANTIZE_GROUP == 1),
                    "%s: beside %g number %d becomes %g", device->name, odd, i, p.back[i]);
}

static void check_quantize(void) {
    seqpar_device *const devices[] = {reference, fast, fast_threads, bf16_reference, bf16};
    for (int i = 0; i < 5; i++) {
        check_packing(devices[i], SEQPAR_QUANTIZE_SIGNED);
        check_packing(devices[i], SEQPAR_QUANTIZE_POSITIVE);
        check_chance(devices[i]);
        check_packed_nan(devices[i], NAN);
        check_packed_nan(devices[i], INFINITY);
    }
}

static const op_check checks[] = {
    {"sumsq", check_sumsq, 6e-15, 1},   {"adamw", check_adamw, 3.6e-7, 1},
    {"sgd", check_sgd, 1e-7, 1},        {"quantize", check_quantize, 0, 0},
    {"nf4_rows", check_nf4_rows, 0, 1},
};

int main(int argc, char **argv) {
    test_begin(argc, argv);
    device_open(checks, sizeof checks / sizeof *checks);
#define X(op) TEST(test_op(#op, OP_##op));
    UPDATE_OPS(X)
#undef X
    device_close();
    return test_summary();
}
