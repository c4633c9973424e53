/* SPDX-License-Identifier: MIT OR Unlicense */
/* Products of matrices and gradients of weights on a device, as support/device_ops.h says;
   the same bits for a row in any company; and a product of the user's in the place of ours. */
#define SEQPAR_IMPLEMENTATION
#include "support/device_ops.h"
#include <dlfcn.h>

/* ---- matmul, weight_grad ---- */

enum { Y, INPUT, WEIGHT, DY, DINPUT, DWEIGHT, STORE };
enum { ROWS, OUT, IN };
enum { TRANSPOSED = 1, ACCUMULATE = 2 };

static bench matmul_bench(int64_t rows, int64_t out, int64_t in) {
    bench b = {.size = {rows, out, in}};
    add_field(&b, "y", rows, out, 3, 1);
    add_field(&b, "x", rows, in, 2, 1);
    add_field(&b, "w", out, in, 5, 1);
    add_field(&b, "dy", rows, out, 4, 1);
    add_field(&b, "dx", rows, in, 1, 1);
    add_sums(&b, "dw", out, in, 0, 1);
    add_sums(&b, "store", FOLD_PLACES, out * in, 7, 1);
    cut_leaves(rows);
    return b;
}

static seqpar_status call_matmul(seqpar_device *device, const bench *b) {
    const field *f = b->field;
    seqpar_matmul_args a = {mat(&f[Y]),
                            mat(&f[INPUT]),
                            mat(&f[WEIGHT]),
                            b->size[ROWS],
                            b->size[OUT],
                            b->size[IN],
                            0,
                            b->mode & ACCUMULATE};
    seqpar_matmul_args back = {
        mat(&f[DINPUT]), mat(&f[DY]), mat(&f[WEIGHT]),     b->size[ROWS], b->size[IN],
        b->size[OUT],    1,           b->mode & ACCUMULATE};
    return device->matmul(device, b->mode & TRANSPOSED ? &back : &a, device->queue);
}

static seqpar_status call_weight_grad(seqpar_device *device, const bench *b) {
    const field *f = b->field;
    seqpar_weight_grad_args a = {fold_into(&f[DWEIGHT], &f[STORE]),
                                 fold_leaves,
                                 mat(&f[DY]),
                                 mat(&f[INPUT]),
                                 b->size[OUT],
                                 b->size[IN]};
    return device->weight_grad(device, &a, device->queue);
}

static const pass matmul_pass = {call_matmul, 1 << Y, 0},
                  matmul_back_pass = {call_matmul, 1 << DINPUT, 0};
static const pass weight_grad_pass = {call_weight_grad, 1 << DWEIGHT | 1 << STORE, 1 << STORE};

/* y = x w^T or dx = dy w by slow.h's linear layer or a loop, from the old values if they are
   added to. */
static double *plain_product(const bench *b, int transposed) {
    const field *f = b->field, *y = &f[transposed ? DINPUT : Y],
                *x = &f[transposed ? DY : INPUT], *w = &f[WEIGHT];
    double *want = dense_copy(y, y->value);
    int64_t r, o, i;
    for (r = 0; r < y->rows; r++)
        for (o = 0; o < y->width; o++) {
            double sum = b->mode & ACCUMULATE ? want[r * y->width + o] : 0;
            for (i = 0; i < x->width; i++)
                sum += x->value[r * x->stride + i] *
                       w->value[transposed ? i * w->stride + o : o * w->stride + i];
            want[r * y->width + o] = sum;
        }
    return want;
}

static void check_matmul_modes(bench *b) {
    for (b->mode = 0; b->mode < 4; b->mode++) {
        int transposed = b->mode & TRANSPOSED;
        double *want = plain_product(b, transposed);
        expect_fast(b, transposed ? &matmul_back_pass : &matmul_pass);
        expect_values(b, transposed ? DINPUT : Y, want);
        free(want);
    }
    b->mode = 0;
}

static seqpar_status call_matmul_dx(seqpar_device *device, const bench *b) {
    bench back = *b;
    back.mode = TRANSPOSED;
    return call_matmul(device, &back);
}

/* A row has the same bits alone, and in the company of any number of others; few rows are
   computed in other ways than many. */
enum { ALL = 80 }; /* rows */
typedef struct company {
    int64_t out, in;
    float *start, *all, *few;  /* (ALL, out), on the host */
    void *x, *w, *y, *y_start; /* on the device */
} company;

static void *random_on_device(int64_t count, float *host) {
    float *x = host ? host : malloc((size_t)count * sizeof *x);
    void *data = fast->alloc(fast, count * (int64_t)sizeof *x);
    for (int64_t n = 0; n < count; n++) x[n] = (float)test_normal();
    fast->copy(fast, data, x, count * (int64_t)sizeof *x, NULL);
    if (!host) free(x);
    return data;
}

static company company_open(int64_t out, int64_t in) {
    company c = {.out = out, .in = in};
    size_t bytes = (size_t)(ALL * out) * sizeof *c.all;
    c.start = malloc(bytes);
    c.all = malloc(bytes);
    c.few = malloc(bytes);
    c.x = random_on_device(ALL * in, NULL);
    c.w = random_on_device(out * in, NULL);
    c.y_start = random_on_device(ALL * out, c.start);
    c.y = fast->alloc(fast, (int64_t)bytes);
    return c;
}

static void company_close(company *c) {
    void *on_device[] = {c->x, c->w, c->y, c->y_start};
    for (int i = 0; i < 4; i++) fast->free(fast, on_device[i]);
    free(c->start);
    free(c->all);
    free(c->few);
}

/* Rows first .. first + rows of the product, from y as it was, into got. */
static void company_rows(company *c, seqpar_device *device, int accumulate, int64_t first,
                         int64_t rows, float *got) {
    int64_t bytes = rows * c->out * (int64_t)sizeof *got;
    seqpar_matmul_args a = {{c->y, c->out},
                            {(float *)c->x + first * c->in, c->in},
                            {c->w, c->in},
                            rows,
                            c->out,
                            c->in,
                            0,
                            accumulate};
    fast->copy(fast, c->y, (float *)c->y_start + first * c->out, bytes, NULL);
    test_expect(!device->matmul(device, &a, NULL), "the product fails");
    fast->copy(fast, got, c->y, bytes, NULL);
}

static void check_company_of(company *c, int accumulate) {
    static const int64_t rows[] = {1, 2, 3, 5, 8, 15, 16, 17, 24, 40, 73};
    company_rows(c, fast, accumulate, 0, ALL, c->all);
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++)
        for (int at = 0; at < 2; at++) {
            int64_t first = at ? ALL - rows[k] : 0;
            company_rows(c, at ? fast_threads : fast, accumulate, first, rows[k], c->few);
            test_expect(!memcmp(c->few, c->all + first * c->out,
                                (size_t)(rows[k] * c->out) * sizeof *c->few),
                        "%lld rows of %lld x %lld differ from the same among %d",
                        (long long)rows[k], (long long)c->out, (long long)c->in, ALL);
        }
}

static void check_matmul_company(void) {
    static const int64_t sizes[][2] = {{16, 64}, {15, 63},   {97, 36},  {130, 301},
                                       {1, 8},   {331, 521}, {41, 530}, {4099, 9}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (test_fibers() && sizes[i][0] * sizes[i][1] > 30000) continue;
        company c = company_open(sizes[i][0], sizes[i][1]);
        for (int accumulate = 0; accumulate < 2; accumulate++) check_company_of(&c, accumulate);
        company_close(&c);
    }
}

static void check_matmul(void) {
    /* beyond a block in every direction */
    static const int64_t sizes[][3] = {{7, 5, 11},    {1, 1, 1},       {101, 263, 307},
                                       {13, 33, 257}, {103, 331, 523}, {31, 37, 541}};
    size_t i;
    for (i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (test_fibers() && sizes[i][0] > 100) continue;
        bench b = matmul_bench(sizes[i][0], sizes[i][1], sizes[i][2]);
        chain c = {matmul_pass, {call_matmul_dx, 1 << DINPUT, 0}, Y, DY, NULL};
        check_matmul_modes(&b);
        if (i == 0) expect_derivative(&b, &c, INPUT, DINPUT, 0);
        bench_free(&b);
    }
    check_matmul_company();
}

static void check_weight_grad(void) {
    /* whole blocks, of a thread's and of three */
    static const int64_t sizes[][3] = {
        {11, 5, 7}, {101, 97, 263}, {67, 3, 301}, {37, 1201, 269}};
    size_t i;
    for (i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        bench b = matmul_bench(sizes[i][0], sizes[i][1], sizes[i][2]);
        chain c = {matmul_pass, weight_grad_pass, Y, DY, NULL};
        expect_fast(&b, &weight_grad_pass);
        if (i == 0) expect_derivative(&b, &c, WEIGHT, DWEIGHT, 0);
        bench_free(&b);
    }
}

/* ---- an own product in the place of ours ---- */

static int64_t sgemm_rows;
static void naive_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                        const float *a, int lda, const float *b, int ldb, float beta, float *c,
                        int ldc) {
    int i, j, x;
    sgemm_rows += order == 101 && trans_a == 111 ? m : 0;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) {
            double sum = 0;
            for (x = 0; x < k; x++)
                sum += (double)a[i * lda + x] *
                       (double)(trans_b == 112 ? b[j * ldb + x] : b[x * ldb + j]);
            c[i * ldc + j] = (float)((double)alpha * sum +
                                     (beta == 0 ? 0.0 : (double)(beta * c[i * ldc + j])));
        }
}

static void expect_own_product(seqpar_sgemm sgemm, const char *what) {
    seqpar_device *device = seqpar_device_cpu(1);
    bench b = matmul_bench(37, 29, 53);
    seqpar_device_user_product(device, sgemm);
    for (b.mode = 0; b.mode < 4; b.mode++) {
        int transposed = b.mode & TRANSPOSED;
        double *want = plain_product(&b, transposed), d;
        const field *f = &b.field[transposed ? DINPUT : Y];
        double *got;
        run(&b, device, transposed ? &matmul_back_pass : &matmul_pass);
        got = dense_copy(f, f->after);
        d = test_distance(got, want, f->rows * f->width);
        test_expect(d <= 1e-6, "%s, mode %d: %.2e off", what, b.mode, d);
        free(got);
        free(want);
    }
    bench_free(&b);
    seqpar_device_close(device);
    test_end("own_product_%s", what);
}

/* By a loop, by OpenBLAS where it is installed, and refused where it cannot serve. */
__attribute__((unused)) static void test_own_product(void) {
    void *library = dlopen("libopenblas.so.0", RTLD_NOW);
    void *found = library ? dlsym(library, "cblas_sgemm") : NULL;
    seqpar_device *wide = seqpar_device_reference();
    bench b = matmul_bench(3, 5, 7);
    seqpar_sgemm sgemm;
    seqpar_error error = {0};
    expect_own_product(naive_sgemm, "naive");
    test_expect(sgemm_rows == 4 * 37, "called with %lld rows", (long long)sgemm_rows);
    memcpy(&sgemm, &found, sizeof sgemm);
    if (found)
        expect_own_product(sgemm, "openblas");
    else
        test_skip("own_product_openblas", "libopenblas.so.0 is not installed");
    wide->error = &error;
    seqpar_device_user_product(wide, naive_sgemm);
    test_expect(call_matmul(wide, &b) == SEQPAR_ERR_KERNEL && strstr(error.text, "reference"),
                "fp64: %s", error.text);
    bench_free(&b);
    seqpar_device_close(wide);
    test_end("own_product_refused");
}

static const op_check checks[] = {
    {"matmul", check_matmul, 1e-6, 1},
    {"weight_grad", check_weight_grad, 4e-7, 1},
};

int main(int argc, char **argv) {
    test_begin(argc, argv);
    device_open(checks, sizeof checks / sizeof *checks);
#define X(op) TEST(test_op(#op, OP_##op));
    MATMUL_OPS(X)
#undef X
    device_close();
#ifndef TEST_CUDA /* it is the CPU device's */
    TEST(test_own_product());
#endif
    return test_summary();
}
