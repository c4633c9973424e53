/* SPDX-License-Identifier: MIT OR Unlicense */
/* Operations of a mixture of experts on a device, as support/device_ops.h says: who is
   chosen, with what weight, and sums of what they give. */
#define SEQPAR_IMPLEMENTATION
#include "support/device_ops.h"

/* ---- route, route_grad, mix, dots ---- */

enum {
    ROUTE_LOGITS = 1,
    ROUTE_WEIGHTS,
    ROUTE_DWEIGHTS,
    DLOGITS,
    ROUTE_LOSS,
    MOST_EXPERTS = 64
};

/* size: rows, experts, chosen; mode: normed */
static bench route_bench(int64_t rows, int64_t experts, int64_t chosen, int normed) {
    bench b = {.size = {rows, experts, chosen}, .mode = normed};
    add_sums(&b, "probs", rows, experts, 0, 1);
    add_field(&b, "logits", rows, experts, 3, 1);
    add_sums(&b, "weights", rows, chosen, 0, 1);
    add_sums(&b, "dweights", rows, chosen, 0, 1);
    add_field(&b, "dlogits", rows, experts, 2, 1);
    add_sums(&b, "loss", rows, 1, 0, 1);
    add_ids(&b, rows * chosen, experts);
    /* rows of equal logits, and of two */
    for (int64_t e = 0; e < experts; e++) b.field[ROUTE_LOGITS].value[e] = 0.5;
    b.field[ROUTE_LOGITS].value[b.field[ROUTE_LOGITS].stride + 2] =
        b.field[ROUTE_LOGITS].value[b.field[ROUTE_LOGITS].stride + 4] = 2.5;
    return b;
}

static double balance_of(int64_t e) { return 0.1 * (double)(e * e % 7) - 0.2; }

static seqpar_status call_route(seqpar_device *device, const bench *b) {
    const field *f = b->field;
    seqpar_route_args a = {
        mat(&f[ROUTE_LOGITS]), b->size[0], b->size[1], b->size[2], b->mode, f[0].data,
        f[ROUTE_WEIGHTS].data, b->ids};
    return device->route(device, &a, device->queue);
}

static seqpar_status call_route_grad(seqpar_device *device, const bench *b) {
    const field *f = b->field;
    double balance[MOST_EXPERTS];
    seqpar_route_grad_args a = {mat(&f[DLOGITS]),
                                b->size[0],
                                b->size[1],
                                b->size[2],
                                b->mode,
                                f[0].data,
                                f[ROUTE_WEIGHTS].data,
                                f[ROUTE_DWEIGHTS].data,
                                b->ids,
                                balance,
                                f[ROUTE_LOSS].data};
    seqpar_status status = call_route(device, b);
    for (int64_t e = 0; e < b->size[1]; e++) balance[e] = balance_of(e);
    return status ? status : device->route_grad(device, &a, device->queue);
}

static const pass route_pass = {call_route, 1 | 1 << ROUTE_WEIGHTS, 0},
                  route_grad_pass = {call_route_grad,
                                     1 | 1 << ROUTE_WEIGHTS | 1 << DLOGITS | 1 << ROUTE_LOSS,
                                     0};

/* NaN is not equal to itself: the logits count as scratch */
static const pass route_nan_pass = {call_route, 1 | 1 << ROUTE_WEIGHTS | 1 << ROUTE_LOGITS,
                                    1 << ROUTE_LOGITS};

static double route_loss(const bench *b) {
    double sum = inner_product(&b->field[ROUTE_WEIGHTS], &b->field[ROUTE_DWEIGHTS]);
    for (int64_t i = 0; i < b->size[0] * b->size[1]; i++)
        sum += balance_of(i % b->size[1]) * b->field[0].after[i];
    return sum;
}

/* By counting how many come before each expert; ids are those of the last run. */
static void expect_route(const bench *b) {
    int64_t experts = b->size[1], chosen = b->size[2];
    double *p = dense_copy(&b->field[ROUTE_LOGITS], b->field[ROUTE_LOGITS].value);
    double *w = calloc((size_t)(b->size[0] * chosen), sizeof *w);
    for (int64_t t = 0; t < b->size[0]; t++) {
        double *x = p + t * experts, sum = 0, kept = 0;
        for (int64_t e = 0; e < experts; e++) sum += exp(x[e]);
        for (int64_t e = 0; e < experts; e++) {
            int64_t place = 0;
            for (int64_t o = 0; o < experts; o++)
                place += x[o] > x[e] || (x[o] == x[e] && o < e);
            if (place >= chosen) continue;
            test_expect(b->ids[t * chosen + place] == e, "row %lld, choice %lld: %d, not %lld",
                        (long long)t, (long long)place, b->ids[t * chosen + place],
                        (long long)e);
            w[t * chosen + place] = exp(x[e]) / sum;
            kept += exp(x[e]) / sum;
        }
        for (int64_t e = 0; e < experts; e++) x[e] = exp(x[e]) / sum;
        for (int64_t j = 0; b->mode && j < chosen; j++) w[t * chosen + j] /= kept;
    }
    expect_values(b, 0, p);
    expect_values(b, ROUTE_WEIGHTS, w);
    free(p);
    free(w);
}

static void check_route(void) {
    static const int64_t sizes[][3] = {{7, 5, 2}, {67, 37, 3}, {41, 8, 8}, {3, 6, 1}};
    for (int i = 0; i < 8; i++) {
        const int64_t *s = sizes[i / 2];
        bench b = route_bench(s[0], s[1], s[2], i % 2);
        expect_fast(&b, &route_pass);
        expect_route(&b);
        b.field[ROUTE_LOGITS].value[0] = NAN; /* numbers that can be used all the same */
        run(&b, fast, &route_nan_pass);
        for (int64_t j = 0; j < s[2]; j++)
            test_expect(b.ids[j] >= 0 && b.ids[j] < s[1], "a row with NaN chose %d", b.ids[j]);
        bench_free(&b);
    }
}

static void check_route_grad(void) {
    for (int normed = 0; normed < 2; normed++) {
        bench b = route_bench(5, 7, 3, normed), large = route_bench(67, 37, 4, normed);
        chain c = {route_pass, route_grad_pass, 0, 0, route_loss};
        /* a step of a difference must choose as before */
        for (int64_t i = 0; i < 2 * b.field[ROUTE_LOGITS].stride; i++)
            b.field[ROUTE_LOGITS].value[i] = 0.1 * (double)(i * i % 11);
        expect_fast(&b, &route_grad_pass);
        expect_fast(&large, &route_grad_pass);
        expect_derivative(&b, &c, ROUTE_LOGITS, DLOGITS, 0);
        bench_free(&b);
        bench_free(&large);
    }
}

enum { MIX_X = 1, MIX_WEIGHTS, MIX_ROWS = 29, MIX_SOURCES = 43, MIX_TERMS = 3, MIX_WIDTH = 13 };
enum { MIX_ACCUMULATE = 1, MIX_WEIGHTED = 2, MIX_AT = 4, MIX_IN_PLACE = 8 };

static int64_t mix_terms(const bench *b) { return b->mode & MIX_IN_PLACE ? 1 : MIX_TERMS; }

/* the weight of pair j of the first field's rows */
static int32_t mix_at(int64_t j) { return (int32_t)(j * 5 % (MIX_ROWS * MIX_TERMS)); }

static seqpar_status call_mix(seqpar_device *device, const bench *b) {
    const field *f = b->field;
    int32_t at[MIX_ROWS * MIX_TERMS], from[MIX_ROWS * MIX_TERMS];
    int in_place = b->mode & MIX_IN_PLACE;
    for (int64_t j = 0; j < MIX_ROWS * MIX_TERMS; j++) {
        at[j] = mix_at(j);
        from[j] = in_place ? (int32_t)j : b->ids[j];
    }
    seqpar_mix_args a = {mat(&f[0]),
                         mat(&f[in_place ? 0 : MIX_X]),
                         MIX_ROWS,
                         mix_terms(b),
                         MIX_WIDTH,
                         from,
                         b->mode & MIX_AT ? at : NULL,
                         b->mode & MIX_WEIGHTED ? f[MIX_WEIGHTS].data : NULL,
                         b->mode & MIX_ACCUMULATE};
    return device->mix(device, &a, device->queue);
}

static const pass mix_pass = {call_mix, 1, 0};

static void expect_mix(const bench *b) {
    int in_place = b->mode & MIX_IN_PLACE;
    double *want = dense_copy(&b->field[0], b->field[0].value);
    for (int64_t t = 0; t < MIX_ROWS; t++)
        for (int64_t i = 0; i < MIX_WIDTH; i++) {
            double sum = b->mode & MIX_ACCUMULATE ? want[t * MIX_WIDTH + i] : 0;
            for (int64_t j = t * mix_terms(b); j < (t + 1) * mix_terms(b); j++) {
                const field *x = &b->field[in_place ? 0 : MIX_X];
                double weight =
                    b->mode & MIX_WEIGHTED
                        ? b->field[MIX_WEIGHTS].value[b->mode & MIX_AT ? mix_at(j) : j]
                        : 1;
                sum += weight * x->value[(in_place ? t : b->ids[j]) * x->stride + i];
            }
            want[t * MIX_WIDTH + i] = sum;
        }
    expect_values(b, 0, want);
    free(want);
}

static void check_mix(void) {
    for (int mode = 0; mode < 16; mode++) {
        bench b = {.mode = mode};
        if (mode & MIX_IN_PLACE && mode & MIX_ACCUMULATE) continue;
        add_field(&b, "y", MIX_ROWS, MIX_WIDTH, 3, 1);
        add_field(&b, "x", MIX_SOURCES, MIX_WIDTH, 2, 1);
        add_sums(&b, "weights", MIX_ROWS * MIX_TERMS, 1, 0, 1);
        add_ids(&b, MIX_ROWS * MIX_TERMS, MIX_SOURCES);
        expect_fast(&b, &mix_pass);
        expect_mix(&b);
        bench_free(&b);
    }
}

/* ---- dots ---- */

static seqpar_status call_dots(seqpar_device *device, const bench *b) {
    seqpar_dots_args a = {mat(&b->field[1]), mat(&b->field[2]), b->size[0], b->size[1], b->ids,
                          b->field[0].data};
    return device->dots(device, &a, device->queue);
}

static const pass dots_pass = {call_dots, 1, 0};

static void check_dots(void) {
    bench b = {.size = {31, 77}};
    double want[31];
    add_sums(&b, "out", 31, 1, 0, 1);
    add_field(&b, "a", 31, 77, 3, 1);
    add_field(&b, "b", 31, 77, 2, 1);
    add_ids(&b, 31, 31);
    for (int64_t t = 0; t < 31; t++) {
        b.ids[t] = (int32_t)(t * 11 % 31);
        want[b.ids[t]] = 0;
        for (int64_t i = 0; i < 77; i++)
            want[b.ids[t]] += b.field[1].value[t * b.field[1].stride + i] *
                              b.field[2].value[t * b.field[2].stride + i];
    }
    expect_fast(&b, &dots_pass);
    expect_values(&b, 0, want);
    bench_free(&b);
}

static const op_check checks[] = {
    {"route", check_route, 2e-7, 1},
    {"route_grad", check_route_grad, 3e-7, 1},
    {"mix", check_mix, 1.2e-7, 1},
    {"dots", check_dots, 1.8e-7, 1},
};

int main(int argc, char **argv) {
    test_begin(argc, argv);
    device_open(checks, sizeof checks / sizeof *checks);
#define X(op) TEST(test_op(#op, OP_##op));
    EXPERT_OPS(X)
#undef X
    device_close();
    return test_summary();
}
