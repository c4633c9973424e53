/* SPDX-License-Identifier: MIT OR Unlicense */
/* Operations on rows of a device, as support/device_ops.h says: embedding, norm, rotation,
   SwiGLU, sums and dropout. */
#define SEQPAR_IMPLEMENTATION
#include "support/device_ops.h"

/* ---- embedding, embedding_grad ---- */

enum { TABLE = 1, DX, DTABLE, EMBEDDING_STORE };

static bench embedding_bench(int64_t rows, int64_t vocab, int64_t width) {
    bench b = {.size = {rows, vocab, width}};
    add_field(&b, "x", rows, width, 3, 1);
    add_field(&b, "table", vocab, width, 2, 1);
    add_field(&b, "dx", rows, width, 4, 1);
    add_sums(&b, "dtable", vocab, width, 0, 1);
    add_sums(&b, "store", FOLD_PLACES, vocab * width, 5, 1);
    add_ids(&b, rows, vocab);
    b.ids[0] = b.ids[rows - 1] = 0; /* one id in several leaves, and the last of the table */
    b.ids[1] = (int32_t)vocab - 1;
    cut_leaves(rows);
    return b;
}

static seqpar_status call_embedding(seqpar_device *device, const bench *b) {
    seqpar_embedding_args a = {mat(&b->field[0]), mat(&b->field[TABLE]), b->ids, b->size[0],
                               b->size[2]};
    return device->embedding(device, &a, device->queue);
}

static seqpar_status call_embedding_grad(seqpar_device *device, const bench *b) {
    const field *f = b->field;
    seqpar_embedding_grad_args a = {fold_into(&f[DTABLE], &f[EMBEDDING_STORE]),
                                    fold_leaves,
                                    mat(&f[DX]),
                                    b->ids,
                                    b->size[1],
                                    b->size[2]};
    return device->embedding_grad(device, &a, device->queue);
}

static const pass embedding_pass = {call_embedding, 1, 0};
static const pass embedding_grad_pass = {
    call_embedding_grad, 1 << DTABLE | 1 << EMBEDDING_STORE, 1 << EMBEDDING_STORE};

static void check_embedding(void) {
    bench b = embedding_bench(37, 71, 13);
    double *want = dense_copy(&b.field[0], b.field[0].value);
    int64_t r;
    for (r = 0; r < 37; r++)
        memcpy(want + r * 13, b.field[TABLE].value + b.ids[r] * b.field[TABLE].stride,
               13 * sizeof *want);
    expect_fast(&b, &embedding_pass);
    expect_values(&b, 0, want);
    free(want);
    bench_free(&b);
}

static void check_embedding_grad(void) {
    static const int64_t sizes[][3] = {{11, 7, 5}, {103, 71, 13}};
    size_t i;
    for (i = 0; i < 2; i++) {
        bench b = embedding_bench(sizes[i][0], sizes[i][1], sizes[i][2]);
        chain c = {embedding_pass, embedding_grad_pass, 0, DX, NULL};
        expect_fast(&b, &embedding_grad_pass);
        if (i == 0) expect_derivative(&b, &c, TABLE, DTABLE, 0);
        bench_free(&b);
    }
}

/* ---- rmsnorm, rmsnorm_grad ---- */

enum { NORM_X = 1, RSTD, GAIN, NORM_DY, NORM_DX, DGAIN, NORM_STORE };

static bench rmsnorm_bench(int64_t rows, int64_t width) {
    bench b = {.size = {rows, width}};
    int64_t i;
    add_field(&b, "y", rows, width, 3, 1);
    add_field(&b, "x", rows, width, 2, 1);
    add_sums(&b, "rstd", rows, 1, 0, 1);
    add_field(&b, "gain", 1, width, 0, 1);
    add_field(&b, "dy", rows, width, 4, 1);
    add_field(&b, "dx", rows, width, 1, 1);
    add_sums(&b, "dgain", 1, width, 0, 1);
    add_sums(&b, "store", FOLD_PLACES, width, 5, 1);
    for (i = 0; i < width; i++) b.field[NORM_X].value[i] *= 0.25; /* a row where eps counts */
    cut_leaves(rows);
    return b;
}

static seqpar_status call_rmsnorm(seqpar_device *device, const bench *b) {
    const field *f = b->field;
    seqpar_rmsnorm_args a = {mat(&f[0]),   mat(&f[NORM_X]), b->mode ? NULL : f[RSTD].data,
                             f[GAIN].data, b->size[0],      b->size[1],
                             1e-3};
    return device->rmsnorm(device, &a, device->queue);
}

/* The gradient from the device's own rstd. */
static seqpar_status call_rmsnorm_grad(seqpar_device *device, const bench *b) {
    const field *f = b->field;
    seqpar_rmsnorm_grad_args a = {fold_into(&f[DGAIN], &f[NORM_STORE]),
                                  fold_leaves,
                                  mat(&f[NORM_DX]),
                                  mat(&f[NORM_DY]),
                                  mat(&f[NORM_X]),
                                  f[RSTD].data,
                                  f[GAIN].data,
                                  b->size[0],
                                  b->size[1]};
    seqpar_status status = call_rmsnorm(device, b);
    return status ? status : device->rmsnorm_grad(device, &a, device->queue);
}

static const pass rmsnorm_pass = {call_rmsnorm, 1 | 1 << RSTD, 0},
                  rmsnorm_no_rstd_pass = {call_rmsnorm, 1, 0};
static const pass rmsnorm_grad_pass = {
    call_rmsnorm_grad, 1 | 1 << RSTD | 1 << NORM_DX | 1 << DGAIN | 1 << NORM_STORE,
    1 << NORM_STORE};

static double *slow_norm_of(const bench *b) {
    const field *x = &b->field[NORM_X];
    int64_t n = x->rows * x->width;
    double *dense = dense_copy(x, x->value);
    slow_complex *z = slow_promote(n, dense),
                 *gain = slow_promote(x->width, b->field[GAIN].value);
    slow_rmsnorm(x->rows, x->width, 1e-3, z, gain, z);
    slow_real_parts(n, z, dense);
    free(z);
    free(gain);
    return dense;
}

static void check_rmsnorm_size(int64_t rows, int64_t width, int derivative) {
    bench b = rmsnorm_bench(rows, width);
    chain c = {rmsnorm_pass, rmsnorm_grad_pass, 0, NORM_DY, NULL};
    double *want = slow_norm_of(&b);
    expect_fast(&b, &rmsnorm_pass);
    expect_values(&b, 0, want);
    b.mode = 1;
    expect_fast(&b, &rmsnorm_no_rstd_pass);
    expect_values(&b, 0, want);
    b.mode = 0;
    expect_fast(&b, &rmsnorm_grad_pass);
    if (derivative) expect_derivative(&b, &c, NORM_X, NORM_DX, 1);
    if (derivative) expect_derivative(&b, &c, GAIN, DGAIN, 0);
    free(want);
    bench_free(&b);
}

static void check_rmsnorm(void) {
    check_rmsnorm_size(7, 5, 1);
    check_rmsnorm_size(11, 19, 1);
    check_rmsnorm_size(67, 307, 0);
}

/* ---- rope: its gradient is the way back ---- */

enum { ROPE_SEED = 1, COSINE, SINE };
enum { ROPE_POSITIONS = 41 };

static bench rope_bench(int64_t rows, int64_t heads, int64_t head_dim) {
    bench b = {.size = {rows, heads, head_dim}};
    int64_t half = head_dim / 2, p, i;
    add_field(&b, "x", rows, heads * head_dim, 3, 1);
    add_field(&b, "dy", rows, heads * head_dim, 3, 1);
    add_sums(&b, "cosine", ROPE_POSITIONS, half, 0, 1);
    add_sums(&b, "sine", ROPE_POSITIONS, half, 0, 1);
    for (p = 0; p < ROPE_POSITIONS; p++)
        for (i = 0; i < half; i++) {
            double angle = (double)p * pow(10000, -2.0 * (double)i / (double)head_dim);
            b.field[COSINE].value[p * half + i] = cos(angle);
            b.field[SINE].value[p * half + i] = sin(angle);
        }
    add_ids(&b, rows, ROPE_POSITIONS);
    return b;
}

static seqpar_status rotate(seqpar_device *device, const bench *b, int number, int inverse) {
    const field *f = b->field;
    seqpar_rope_args a = {mat(&f[number]), f[COSINE].data, f[SINE].data, b->ids,
                          b->size[0],      b->size[1],     b->size[2],   inverse};
    return device->rope(device, &a, device->queue);
}

static seqpar_status call_rope(seqpar_device *device, const bench *b) {
    return rotate(device, b, 0, 0);
}

static seqpar_status call_rope_back(seqpar_device *device, const bench *b) {
    return rotate(device, b, ROPE_SEED, 1);
}

static seqpar_status call_rope_there_and_back(seqpar_device *device, const bench *b) {
    seqpar_status status = rotate(device, b, 0, 0);
    return status ? status : rotate(device, b, 0, 1);
}

static const pass rope_pass = {call_rope, 1, 0},
                  rope_back_pass = {call_rope_back, 1 << ROPE_SEED, 0},
                  rope_there_and_back_pass = {call_rope_there_and_back, 1, 0};

static double *slow_rotated(const bench *b) {
    const field *x = &b->field[0];
    double *dense = dense_copy(x, x->value);
    slow_complex *z = slow_promote(x->rows * x->width, dense);
    slow_config config = {.head_dim = b->size[2], .rope_theta = 10000};
    int64_t r, h;
    for (r = 0; r < x->rows; r++)
        for (h = 0; h < b->size[1]; h++)
            slow_rope(&config, b->ids[r], z + r * x->width + h * config.head_dim);
    slow_real_parts(x->rows * x->width, z, dense);
    free(z);
    return dense;
}

static void check_rope_size(int64_t rows, int64_t heads, int64_t head_dim, int derivative) {
    bench b = rope_bench(rows, heads, head_dim);
    chain c = {rope_pass, rope_back_pass, 0, ROPE_SEED, NULL};
    double *want = slow_rotated(&b), *start = dense_copy(&b.field[0], b.field[0].value);
    expect_fast(&b, &rope_pass);
    expect_values(&b, 0, want);
    expect_fast(&b, &rope_there_and_back_pass);
    expect_values(&b, 0, start);
    expect_fast(&b, &rope_back_pass);
    if (derivative) expect_derivative(&b, &c, 0, ROPE_SEED, 0);
    free(want);
    free(start);
    bench_free(&b);
}

static void check_rope(void) {
    check_rope_size(5, 3, 10, 1);
    check_rope_size(67, 7, 22, 0);
}

/* ---- swiglu, swiglu_grad ---- */

enum { GATE = 1, UP, SWIGLU_SEED };

static bench swiglu_bench(int64_t rows, int64_t width) {
    static const double far[] = {-100, 90, 0, 30, -20, -88.5};
    bench b = {.size = {rows, width}};
    int64_t i;
    add_field(&b, "y", rows, width, 3, 1);
    add_field(&b, "gate", rows, width, 2, 2);
    add_field(&b, "up", rows, width, 4, 1);
    add_field(&b, "dy", rows, width, 1, 1);
    for (i = 0; i < 6; i++) b.field[GATE].value[i] = far[i];
    return b;
}

static seqpar_status call_swiglu(seqpar_device *device, const bench *b) {
    seqpar_swiglu_args a = {mat(&b->field[0]), mat(&b->field[GATE]), mat(&b->field[UP]),
                            b->size[0], b->size[1]};
    return device->swiglu(device, &a, device->queue);
}

static seqpar_status call_swiglu_grad(seqpar_device *device, const bench *b) {
    seqpar_swiglu_args a = {mat(&b->field[SWIGLU_SEED]), mat(&b->field[GATE]),
                            mat(&b->field[UP]), b->size[0], b->size[1]};
    return device->swiglu_grad(device, &a, device->queue);
}

static const pass swiglu_pass = {call_swiglu, 1, 0},
                  swiglu_grad_pass = {call_swiglu_grad, 1 << GATE | 1 << UP, 0};

static void check_swiglu_size(int64_t rows, int64_t width, int derivative) {
    bench b = swiglu_bench(rows, width);
    chain c = {swiglu_pass, swiglu_grad_pass, 0, SWIGLU_SEED, NULL};
    double *want = dense_copy(&b.field[GATE], b.field[GATE].value);
    double *up = dense_copy(&b.field[UP], b.field[UP].value);
    int64_t i;
    for (i = 0; i < rows * width; i++) want[i] = creal(slow_silu(want[i])) * up[i];
    expect_fast(&b, &swiglu_pass);
    expect_values(&b, 0, want);
    expect_fast(&b, &swiglu_grad_pass);
    if (derivative) expect_derivative(&b, &c, GATE, GATE, 0);
    if (derivative) expect_derivative(&b, &c, UP, UP, 0);
    free(want);
    free(up);
    bench_free(&b);
}

static void check_swiglu(void) {
    check_swiglu_size(7, 11, 1);
    check_swiglu_size(67, 109, 0);
}

/* ---- add, fold ---- */

static seqpar_status call_add(seqpar_device *device, const bench *b) {
    const field *f = b->field;
    /* y may be a */
    seqpar_add_args a = {f[b->mode ? 1 : 0].data, f[1].data, f[2].data, f[0].width, f[0].sums};
    return device->add(device, &a, device->queue);
}

static void check_add_size(int64_t count, int sums) {
    bench b = {0};
    double *want = malloc((size_t)count * sizeof *want);
    int64_t i;
    add_field(&b, "y", 1, count, 0, 1);
    add_field(&b, "a", 1, count, 0, 1);
    add_field(&b, "b", 1, count, 0, 1);
    for (i = 0; i < 3; i++) b.field[i].sums = sums;
    for (i = 0; i < count; i++) want[i] = b.field[1].value[i] + b.field[2].value[i];
    for (b.mode = 0; b.mode < 2; b.mode++) {
        expect_fast(&b, &(pass){call_add, b.mode ? 1 << 1 : 1 << 0, 0});
        expect_values(&b, b.mode, want);
    }
    free(want);
    bench_free(&b);
}

static void check_add(void) {
    check_add_size(13, 0);
    check_add_size(65537, 1);
}

static seqpar_status call_fold(seqpar_device *device, const bench *b) {
    static const seqpar_fold_op program[] = {
        {SEQPAR_FOLD_LEAF, 0},    {SEQPAR_FOLD_LEAF, 3},    {SEQPAR_FOLD_COMBINE, 0},
        {SEQPAR_FOLD_STORE, 1},   {SEQPAR_FOLD_LEAF, 1},    {SEQPAR_FOLD_LOAD, 0},
        {SEQPAR_FOLD_COMBINE, 0}, {SEQPAR_FOLD_LEAF, 2},    {SEQPAR_FOLD_LOAD, 1},
        {SEQPAR_FOLD_COMBINE, 0}, {SEQPAR_FOLD_COMBINE, 0}, {SEQPAR_FOLD_FINISH, 0}};
    const field *f = b->field;
    seqpar_fold_args a = {{program, sizeof program / sizeof *program, FOLD_DEPTH, f[2].data,
                           f[2].stride, f[0].data},
                          f[1].data,
                          f[1].stride,
                          f[0].width};
    return device->fold(device, &a, device->queue);
}

/* All leaves and what lay in place 0 before. */
static void check_fold_size(int64_t count) {
    bench b = {0};
    const field *f = b.field;
    double *want = malloc((size_t)count * sizeof *want);
    int64_t i;
    add_sums(&b, "finish", 1, count, 0, 1);
    add_sums(&b, "leaves", 4, count, 3, 1);
    add_sums(&b, "store", FOLD_PLACES, count, 5, 1);
    for (i = 0; i < count; i++)
        want[i] = f[1].value[i] + f[1].value[f[1].stride + i] +
                  f[1].value[2 * f[1].stride + i] + f[1].value[3 * f[1].stride + i] +
                  f[2].value[i];
    expect_fast(&b, &(pass){call_fold, 1 | 1 << 2, 1 << 2});
    expect_values(&b, 0, want);
    free(want);
    bench_free(&b);
}

static void check_fold(void) {
    check_fold_size(17);
    check_fold_size(5003);
}

/* ---- drop ---- */

enum { DROP_ROWS = 23, DROP_WIDTH = 37, DROP_ACCUMULATE = 1, DROP_IN_PLACE = 2, DROP_NONE = 4 };

static double drop_rate(const bench *b) { return b->mode & DROP_NONE ? 0 : 0.3; }

/* numbers beyond 24 bits of document and of 2^16 in position */
static int64_t drop_document(int64_t t) { return t / 5 * 8388617; }
static int32_t drop_position(int64_t t) { return (int32_t)(t % 5 * 70001); }

static seqpar_status call_drop(seqpar_device *device, const bench *b) {
    const field *f = b->field;
    int64_t document[DROP_ROWS];
    int32_t position[DROP_ROWS];
    for (int64_t t = 0; t < DROP_ROWS; t++) {
        document[t] = drop_document(t);
        position[t] = drop_position(t);
    }
    seqpar_drop_args a = {mat(&f[0]),   mat(&f[b->mode & DROP_IN_PLACE ? 0 : 1]),
                          DROP_ROWS,    DROP_WIDTH,
                          document,     position,
                          drop_rate(b), 77,
                          ~UINT64_C(5), b->mode & DROP_ACCUMULATE};
    return device->drop(device, &a, device->queue);
}

static const pass drop_pass = {call_drop, 1, 0};

static void expect_drop(const bench *b) {
    const field *x = &b->field[b->mode & DROP_IN_PLACE ? 0 : 1];
    double *want = dense_copy(&b->field[0], b->field[0].value);
    seqpar_dropout from = {drop_rate(b), 77, ~UINT64_C(5)};
    int64_t dropped = 0;
    for (int64_t t = 0; t < DROP_ROWS; t++)
        for (int64_t i = 0; i < DROP_WIDTH; i++) {
            double z = seqpar_attn_dropout(&from, drop_document(t), 0, drop_position(t), i);
            double *y = &want[t * DROP_WIDTH + i];
            *y = (b->mode & DROP_ACCUMULATE ? *y : 0) + z * x->value[t * x->stride + i];
            dropped += z == 0;
        }
    test_expect(drop_rate(b) == 0
                    ? !dropped
                    : llabs(dropped - (int64_t)(0.3 * DROP_ROWS * DROP_WIDTH)) < 60,
                "%lld are dropped", (long long)dropped);
    expect_values(b, 0, want);
    free(want);
}

static void check_drop(void) {
    for (int mode = 0; mode < 8; mode++) {
        bench b = {.mode = mode};
        add_field(&b, "y", DROP_ROWS, DROP_WIDTH, 3, 1);
        add_field(&b, "x", DROP_ROWS, DROP_WIDTH, 2, 1);
        expect_fast(&b, &drop_pass);
        expect_drop(&b);
        bench_free(&b);
    }
}

/* A rotation goes there and back: two roundings to bf16. */
static const op_check checks[] = {
    {"embedding", check_embedding, 0, 0},
    {"embedding_grad", check_embedding_grad, 1.5e-7, 1},
    {"rmsnorm", check_rmsnorm, 7e-7, 1},
    {"rmsnorm_grad", check_rmsnorm, 7e-7, 1},
    {"rope", check_rope, 2.1e-7, 2},
    {"swiglu", check_swiglu, 4.5e-7, 1},
    {"swiglu_grad", check_swiglu, 4.5e-7, 1},
    {"add", check_add, 1.2e-7, 1},
    {"fold", check_fold, 2.1e-7, 1},
    {"drop", check_drop, 1.2e-7, 1},
};

int main(int argc, char **argv) {
    test_begin(argc, argv);
    device_open(checks, sizeof checks / sizeof *checks);
#define X(op) TEST(test_op(#op, OP_##op));
    ROW_OPS(X)
#undef X
    device_close();
    return test_summary();
}
