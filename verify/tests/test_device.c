/* SPDX-License-Identifier: MIT OR Unlicense */
/* Every operation of the device table: values against slow.h or a plain loop, gradients
   against differences of the forward operation, and the fast device against the reference
   device. Sizes are odd and different, rows lie apart. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include <dlfcn.h>
#include "second/slow.h"
#include "support/nf4.h"
#include "support/test.h"

/* ---- the devices, counting what is called ---- */

enum {
#define X(op) OP_##op,
    SEQPAR_DEVICE_OPS(X)
#undef X
        OPS
};

static int64_t calls[3][OPS]; /* by storage type */
static seqpar_device original[3];

#define X(op) \
    static seqpar_status counted_##op(seqpar_device *device, const seqpar_##op##_args *args, \
                                      void *queue) { \
        calls[device->storage][OP_##op]++; \
        return original[device->storage].op(device, args, queue); \
    }
SEQPAR_DEVICE_OPS(X)
#undef X

static seqpar_device *counting(seqpar_device *device) {
    original[device->storage] = *device;
#define X(op) device->op = counted_##op;
    SEQPAR_DEVICE_OPS(X)
#undef X
    return device;
}

/* fast_threads: with three threads, the same bits */
static seqpar_device *reference, *fast, *fast_threads, *bf16, *bf16_reference;

/* ---- tensors of a test and calls on them ---- */

enum { MOST_FIELDS = 12 };
#define GAP ((double)1e30f) /* between rows: spoils what reads it, shows what writes it */

typedef struct field {
    const char *name;
    int64_t rows, width, stride;
    int sums;              /* of the accumulator type, not of the storage type */
    double *value, *after; /* before and after a call (rows, stride) */
    void *data;            /* on the device, during a call */
} field;

typedef struct bench {
    field field[MOST_FIELDS];
    int64_t count, rows, size[6];
    int mode;
    int32_t *ids; /* (rows) ids, positions or targets */
} bench;

/* an operation, what it writes (bits of field numbers), and which of that is scratch */
typedef struct pass {
    seqpar_status (*call)(seqpar_device *device, const bench *b);
    unsigned writes, scratch;
} pass;

typedef struct limits {
    double formula, derivative, cpu, bf16;
} limits;

static limits worst, limit;

static void note(double *most, double d, double most_allowed, const char *how,
                 const char *what) {
    test_expect(d <= most_allowed, "%s: %s is off by %.2e, limit %.1e", how, what, d,
                most_allowed);
    *most = fmax(*most, d);
}

static int add_field(bench *b, const char *name, int64_t rows, int64_t width, int64_t gap,
                     double spread) {
    field *f = &b->field[b->count];
    int64_t i, n = rows * (width + gap);
    *f = (field){name,
                 rows,
                 width,
                 width + gap,
                 0,
                 malloc((size_t)(n + 1) * sizeof(double)),
                 malloc((size_t)(n + 1) * sizeof(double)),
                 NULL};
    /* exact in fp32 */
    for (i = 0; i < n; i++)
        f->value[i] = i % f->stride < width ? (float)(spread * test_normal()) : GAP;
    return (int)b->count++;
}

static void add_sums(bench *b, const char *name, int64_t rows, int64_t width, int64_t gap,
                     double spread) {
    b->field[add_field(b, name, rows, width, gap, spread)].sums = 1;
}

static void add_ids(bench *b, int64_t rows, int64_t values) {
    int64_t i;
    b->rows = rows;
    b->ids = calloc((size_t)rows, sizeof *b->ids);
    for (i = 0; i < rows; i++) b->ids[i] = (int32_t)test_integer(0, values - 1);
}

static void bench_free(bench *b) {
    int64_t i;
    for (i = 0; i < b->count; i++) {
        free(b->field[i].value);
        free(b->field[i].after);
    }
    free(b->ids);
    memset(b, 0, sizeof *b);
}

static int dtype_of(const field *f, const seqpar_device *device) {
    return f->sums ? device->accumulator : device->storage;
}

static double stored_as(double x, int dtype) {
    return dtype == SEQPAR_DTYPE_F64 ? x
           : dtype == SEQPAR_DTYPE_F32
               ? (double)(float)x
               : (double)seqpar_bf16_to_float(seqpar_bf16_from_float((float)x));
}

static seqpar_mat mat(const field *f) { return (seqpar_mat){f->data, f->stride}; }

/* What lies between rows, and every field that is not written, must stay. */
static void expect_untouched(const field *f, int written, const seqpar_device *device) {
    int64_t i;
    for (i = 0; i < f->rows * f->stride; i++) {
        double stored = stored_as(f->value[i], dtype_of(f, device));
        if (i % f->stride < f->width && written) continue;
        test_expect(f->after[i] == stored, "%s: %s changed at %lld", device->name, f->name,
                    (long long)i);
    }
}

static void run(bench *b, seqpar_device *device, const pass *p) {
    int64_t i;
    seqpar_status status;
    for (i = 0; i < b->count; i++) {
        field *f = &b->field[i];
        f->data = device->alloc(device, (f->rows * f->stride + 1) *
                                            seqpar_dtype_bytes(dtype_of(f, device)));
        seqpar_device_write(device, f->data, 0, f->value, f->rows * f->stride,
                            dtype_of(f, device));
    }
    status = p->call(device, b);
    test_expect(!status, "%s: %s", device->name, seqpar_status_name(status));
    for (i = 0; i < b->count; i++) {
        field *f = &b->field[i];
        seqpar_device_read(device, f->after, f->data, 0, f->rows * f->stride,
                           dtype_of(f, device));
        device->free(device, f->data);
        if (!(p->scratch >> i & 1)) expect_untouched(f, p->writes >> i & 1, device);
    }
}

/* The rows of a field without what lies between them. */
static double *dense_copy(const field *f, const double *from) {
    double *to = malloc((size_t)(f->rows * f->width + 1) * sizeof *to);
    int64_t r;
    for (r = 0; r < f->rows; r++)
        memcpy(to + r * f->width, from + r * f->stride, (size_t)f->width * sizeof *to);
    return to;
}

static double field_distance(const field *f, const double *got, const double *want) {
    double *a = dense_copy(f, got), *b = dense_copy(f, want), d;
    int64_t i;
    /* near 0 it is the difference of numbers of size 1 */
    for (i = 0; !strcmp(f->name, "entropy") && i < f->rows * f->width; i++) {
        a[i] += 1;
        b[i] += 1;
    }
    d = test_distance(a, b, f->rows * f->width);
    free(a);
    free(b);
    return d;
}

/* The last run's field against what it should be, packed. */
static void expect_values(const bench *b, int number, const double *want) {
    const field *f = &b->field[number];
    double *got = dense_copy(f, f->after);
    note(&worst.formula, test_distance(got, want, f->rows * f->width), limit.formula, "value",
         f->name);
    free(got);
}

static double **copy_results(const bench *b) {
    double **copy = calloc((size_t)b->count, sizeof *copy);
    int64_t i;
    for (i = 0; i < b->count; i++)
        copy[i] = memcpy(malloc((size_t)(b->field[i].rows * b->field[i].stride + 1) * 8),
                         b->field[i].after,
                         (size_t)(b->field[i].rows * b->field[i].stride) * 8);
    return copy;
}

static void free_results(const bench *b, double **copy) {
    int64_t i;
    for (i = 0; i < b->count; i++) free(copy[i]);
    free(copy);
}

/* What is stored in bf16 is numbers of bf16 now. */
static void round_fields(bench *b) {
    int64_t i, n;
    for (i = 0; i < b->count; i++)
        for (n = 0; n < b->field[i].rows * b->field[i].stride && !b->field[i].sums; n++)
            b->field[i].value[n] = stored_as(b->field[i].value[n], SEQPAR_DTYPE_BF16);
}

/* A device with bf16 storage against fp64 on the same numbers: sums within fp32's rounding;
   results, relative L2, within so many roundings to bf16 (2^-8 at most each) as the
   operation's limit says. */
static void expect_bf16(const bench *from, const pass *p, seqpar_device *device) {
    bench b = *from;
    double **want;
    int64_t i;
    for (i = 0; i < b.count; i++)
        b.field[i].value = memcpy(malloc((size_t)(b.field[i].rows * b.field[i].stride + 1) * 8),
                                  b.field[i].value,
                                  (size_t)(b.field[i].rows * b.field[i].stride) * 8);
    round_fields(&b);
    run(&b, reference, p);
    want = copy_results(&b);
    run(&b, device, p);
    for (i = 0; i < b.count; i++)
        if ((p->writes & ~p->scratch) >> i & 1) {
            if (b.field[i].sums)
                test_expect(field_distance(&b.field[i], b.field[i].after, want[i]) <=
                                fmax(limit.cpu, 1e-6),
                            "%s: sums in %s are off by %.2e", device->name, b.field[i].name,
                            field_distance(&b.field[i], b.field[i].after, want[i]));
            else
                note(&worst.bf16, field_distance(&b.field[i], b.field[i].after, want[i]),
                     limit.bf16, device->name, b.field[i].name);
        }
    free_results(&b, want);
    for (i = 0; i < b.count; i++) free(b.field[i].value);
}

/* The fast device against the reference device, and three threads against one by memcmp.
   Leaves the reference's results. */
static void expect_fast(bench *b, const pass *p) {
    double **one;
    int64_t i;
    expect_bf16(b, p, bf16_reference);
    expect_bf16(b, p, bf16);
    run(b, fast_threads, p);
    one = copy_results(b);
    run(b, fast, p);
    for (i = 0; i < b->count; i++)
        test_expect(!memcmp(one[i], b->field[i].after,
                            (size_t)(b->field[i].rows * b->field[i].stride) * 8),
                    "%s depends on the number of threads", b->field[i].name);
    run(b, reference, p);
    for (i = 0; i < b->count; i++)
        if ((p->writes & ~p->scratch) >> i & 1)
            note(&worst.cpu, field_distance(&b->field[i], one[i], b->field[i].after), limit.cpu,
                 "cpu", b->field[i].name);
    free_results(b, one);
}

/* ---- derivatives: differences of fourth order of sum(seed * out) on the reference device ---- */

typedef struct chain {
    pass forward, backward;
    /* loss = sum(seed * out) unless there is `loss` */
    int out, seed;
    double (*loss)(const bench *b);
} chain;

static double inner_product(const field *x, const field *seed) {
    double sum = 0;
    int64_t r, i;
    for (r = 0; r < x->rows; r++)
        for (i = 0; i < x->width; i++)
            sum += x->after[r * x->stride + i] * seed->value[r * seed->stride + i];
    return sum;
}

static double loss_at(bench *b, const chain *c, double *x, double value) {
    double old = *x;
    *x = value;
    run(b, reference, &c->forward);
    *x = old;
    return c->loss ? c->loss(b) : inner_product(&b->field[c->out], &b->field[c->seed]);
}

static double slope(bench *b, const chain *c, double *x) {
    const double h = 1e-3, at = *x;
    double near = loss_at(b, c, x, at + h) - loss_at(b, c, x, at - h);
    return (8 * near - (loss_at(b, c, x, at + 2 * h) - loss_at(b, c, x, at - 2 * h))) /
           (12 * h);
}

/* Derivatives by field `in` against what backward leaves in field `gradient` (adds to it, if
   `added`). */
static void expect_derivative(bench *b, const chain *c, int in, int gradient, int added) {
    field *x = &b->field[in], *g = &b->field[gradient];
    double *want = malloc((size_t)(x->rows * x->width) * sizeof *want), *got;
    int64_t i, r;
    for (r = 0; r < x->rows; r++)
        for (i = 0; i < x->width; i++)
            want[r * x->width + i] = slope(b, c, &x->value[r * x->stride + i]);
    run(b, reference, &c->backward);
    got = dense_copy(g, g->after);
    for (r = 0; added && r < g->rows; r++)
        for (i = 0; i < g->width; i++) got[r * g->width + i] -= g->value[r * g->stride + i];
    note(&worst.derivative, test_distance(got, want, x->rows * x->width), limit.derivative,
         "derivative", g->name);
    free(want);
    free(got);
}

/* ---- folds: five leaves of different lengths; every kind of instruction ---- */

static const seqpar_fold_op fold_program[] = {
    {SEQPAR_FOLD_LEAF, 0},    {SEQPAR_FOLD_EXTEND, 1},  {SEQPAR_FOLD_LEAF, 2},
    {SEQPAR_FOLD_COMBINE, 0}, {SEQPAR_FOLD_STORE, 1},   {SEQPAR_FOLD_LEAF, 3},
    {SEQPAR_FOLD_STORE, 0},   {SEQPAR_FOLD_LOAD, 1},    {SEQPAR_FOLD_LEAF, 4},
    {SEQPAR_FOLD_LOAD, 0},    {SEQPAR_FOLD_COMBINE, 0}, {SEQPAR_FOLD_COMBINE, 0},
    {SEQPAR_FOLD_FINISH, 0}};
enum { FOLD_PLACES = 2, FOLD_DEPTH = 3, FOLD_LEAVES = 5 };

static seqpar_piece fold_leaves[FOLD_LEAVES];

/* Cuts `rows` into leaves: one of one row, the others uneven. */
static void cut_leaves(int64_t rows) {
    int64_t i, cut[FOLD_LEAVES + 1] = {0, 1, 1 + rows / 3, rows / 2 + 1, rows - 2, rows};
    for (i = 0; i < FOLD_LEAVES; i++) {
        fold_leaves[i].local = cut[i];
        fold_leaves[i].count = cut[i + 1] - cut[i];
    }
}

static seqpar_fold_call fold_into(const field *finish, const field *store) {
    return (seqpar_fold_call){fold_program,  sizeof fold_program / sizeof *fold_program,
                              FOLD_DEPTH,    store->data,
                              store->stride, finish->data};
}

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
    const uint64_t state = test_state; /* the other tests keep their numbers */
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (test_fibers() && sizes[i][0] * sizes[i][1] > 30000) continue;
        company c = company_open(sizes[i][0], sizes[i][1]);
        for (int accumulate = 0; accumulate < 2; accumulate++) check_company_of(&c, accumulate);
        company_close(&c);
    }
    test_state = state;
}

static void check_matmul(void) {
    /* beyond a block in every direction */
    static const int64_t sizes[][3] = {{7, 5, 11},    {1, 1, 1},       {101, 263, 307},
                                       {13, 33, 257}, {103, 331, 523}, {31, 37, 541}};
    uint64_t state = 0;
    size_t i;
    for (i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (i == 4) state = test_state; /* the other tests keep their numbers */
        if (test_fibers() && sizes[i][0] > 100) continue;
        bench b = matmul_bench(sizes[i][0], sizes[i][1], sizes[i][2]);
        chain c = {matmul_pass, {call_matmul_dx, 1 << DINPUT, 0}, Y, DY, NULL};
        check_matmul_modes(&b);
        if (i == 0) expect_derivative(&b, &c, INPUT, DINPUT, 0);
        bench_free(&b);
    }
    test_state = state;
    check_matmul_company();
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

/* A block of dq that is none of dk and dv, one the other way round, or two in another order,
   would be waited for without end. */
__attribute__((unused)) static void test_backward_blocks(void) {
    enum { BLOCKS = 2 };
    const seqpar_piece pieces[2 * BLOCKS] = {
        {.count = 1}, {.count = 1, .local = 1}, {.count = 1}, {.count = 1, .local = 1}};
    const seqpar_attn_keys keys[BLOCKS] = {
        {.stride = 1, .count = 1},
        {.k_row = 1, .v_row = 1, .start = 1, .stride = 1, .count = 1}};
    const int32_t begin[BLOCKS] = {0, 0}, end[BLOCKS] = {2, 2};
    const float x[BLOCKS] = {1, 2};
    float out[3][BLOCKS] = {{0}};
    const seqpar_fold_op both[] = {
        {SEQPAR_FOLD_LEAF, 0}, {SEQPAR_FOLD_EXTEND, 1}, {SEQPAR_FOLD_FINISH, 0}};
    const seqpar_fold_op first[] = {{SEQPAR_FOLD_LEAF, 0}, {SEQPAR_FOLD_FINISH, 0}};
    int wrong;
    for (wrong = 0; wrong < 5; wrong++) {
        seqpar_attn_task queries[BLOCKS] = {{.piece = 0, .program = both, .program_count = 3},
                                            {.piece = 1, .program = both, .program_count = 3}};
        seqpar_attn_task swapped[BLOCKS] = {queries[0], queries[1]};
        seqpar_attn_args a = {.heads = 1,
                              .kv_heads = 1,
                              .head_dim = 1,
                              .head_count = 1,
                              .q_tokens = BLOCKS,
                              .scale = 1,
                              .q_pieces = pieces,
                              .k_pieces = keys,
                              .tasks = queries,
                              .task_count = BLOCKS,
                              .depth = 2,
                              .visible_begin = begin,
                              .visible_end = end,
                              .q = x,
                              .k = x,
                              .v = x,
                              .lse = out[0],
                              .dout = x,
                              .delta = x,
                              .dq = out[0],
                              .dk = out[1],
                              .dv = out[2]};
        seqpar_attn_args dkv = a;
        seqpar_attn_backward_args args = {a, &dkv, 1};
        seqpar_device *device = seqpar_device_cpu(2);
        seqpar_error error = {0};
        seqpar_status status;
        device->error = &error;
        dkv.tasks = swapped;
        swapped[0].order = wrong == 1;
        swapped[1].order = wrong != 1;
        if (wrong == 2) {
            swapped[1].program = first;
            swapped[1].program_count = 2;
        }
        if (wrong == 3) {
            queries[1].program = first;
            queries[1].program_count = 2;
        }
        if (wrong == 4) args.queries.task_count = 1;
        if (wrong == 1) {
            swapped[0].program = first;
            swapped[0].program_count = 2;
        }
        status = device->attn_backward(device, &args, NULL);
        test_expect(status == (wrong ? SEQPAR_ERR_PLAN : SEQPAR_OK), "wrong %d: %s: %s", wrong,
                    seqpar_status_name(status), error.text);
        test_expect(!strcmp(error.text, wrong ? "dk and dv are not of the blocks of dq, or in "
                                                "another order"
                                              : ""),
                    "wrong %d: '%s'", wrong, error.text);
        seqpar_device_close(device);
    }
    test_end("attn_backward_blocks");
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

static void check_weight_grad(void) {
    /* whole blocks, of a thread's and of three */
    static const int64_t sizes[][3] = {
        {11, 5, 7}, {101, 97, 263}, {67, 3, 301}, {37, 1201, 269}};
    uint64_t state = 0;
    size_t i;
    for (i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (i == 3) state = test_state; /* the other tests keep their numbers */
        bench b = matmul_bench(sizes[i][0], sizes[i][1], sizes[i][2]);
        chain c = {matmul_pass, weight_grad_pass, Y, DY, NULL};
        expect_fast(&b, &weight_grad_pass);
        if (i == 0) expect_derivative(&b, &c, WEIGHT, DWEIGHT, 0);
        bench_free(&b);
    }
    test_state = state;
}

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

/* ---- add, fold, sumsq ---- */

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

/* ---- attention on one rank ---- */

enum { Q, K, V, DOUT, ATTENTION_OUT, LSE, DQ, DK, DV, DELTA };
enum { HEADS = 3, KV_HEADS, HEAD_DIM };

static const int64_t small_cu[][5] = {{0, 5, 6, 6, 17}, {0, 3, 8, 11, 11}},
                     large_cu[][5] = {{0, 211, 212, 293, 307}, {0, 1, 17, 18, 41}};
static seqpar_row attention_rows[2];

static void set_rows(const int64_t cu[][5], int64_t cell) {
    int64_t r;
    for (r = 0; r < 2; r++)
        attention_rows[r] = (seqpar_row){.index = 3 * r,
                                         .tokens = cu[r][4],
                                         .cell = cell + 2 * r,
                                         .docs = 4,
                                         .cu_seqlens = cu[r]};
}

static bench attention_bench(int64_t heads, int64_t kv_heads, int64_t head_dim) {
    int64_t tokens = attention_rows[0].tokens + attention_rows[1].tokens;
    int64_t wide = heads * head_dim, narrow = kv_heads * head_dim;
    bench b = {.size = {tokens, 0, 0, heads, kv_heads, head_dim}};
    add_field(&b, "q", tokens, wide, 0, 1);
    add_field(&b, "k", tokens, narrow, 0, 1);
    add_field(&b, "v", tokens, narrow, 0, 1);
    add_field(&b, "dout", tokens, wide, 0, 1);
    add_field(&b, "out", tokens, wide, 0, 1);
    add_sums(&b, "lse", tokens, heads, 0, 1);
    add_field(&b, "dq", tokens, wide, 0, 1);
    add_field(&b, "dk", tokens, narrow, 0, 1);
    add_field(&b, "dv", tokens, narrow, 0, 1);
    add_sums(&b, "delta", tokens, heads, 0, 1);
    return b;
}

static seqpar_status attend(seqpar_device *device, const bench *b, int backward) {
    seqpar_attn_desc desc = {.heads = b->size[HEADS],
                             .kv_heads = b->size[KV_HEADS],
                             .head_dim = b->size[HEAD_DIM],
                             .full = b->mode};
    const field *f = b->field;
    seqpar_attn_io io = {.q = f[Q].data,
                         .k = f[K].data,
                         .v = f[V].data,
                         .out = f[ATTENTION_OUT].data,
                         .lse = f[LSE].data,
                         .dout = f[DOUT].data,
                         .dq = f[DQ].data,
                         .dk = f[DK].data,
                         .dv = f[DV].data};
    seqpar_comm *self = seqpar_comm_self();
    seqpar_ctx ctx;
    seqpar_attn *attn = NULL;
    seqpar_status status = seqpar_ctx_open(&ctx, self, device, 1);
    if (!status) status = seqpar_attn_open(&ctx, &attn, attention_rows, 2, &desc);
    if (!status) status = seqpar_attn_forward(&ctx, attn, &io);
    if (!status && backward) status = seqpar_attn_backward(&ctx, attn, &io);
    if (attn) seqpar_attn_close(&ctx, attn);
    seqpar_ctx_close(&ctx);
    seqpar_comm_free(self);
    device->error = NULL;
    return status;
}

static seqpar_status call_attention(seqpar_device *device, const bench *b) {
    return attend(device, b, 0);
}

static seqpar_status call_attention_grad(seqpar_device *device, const bench *b) {
    return attend(device, b, 1);
}

static const pass attention_pass = {call_attention, 1 << ATTENTION_OUT | 1 << LSE, 0};
static const pass attention_grad_pass = {
    call_attention_grad, 1 << ATTENTION_OUT | 1 << LSE | 1 << DQ | 1 << DK | 1 << DV, 0};

/* out and lse of slow.h, row after row. */
static void slow_attention_of(const bench *b, double *out, double *lse) {
    int64_t heads = b->size[HEADS], kv_heads = b->size[KV_HEADS], d = b->size[HEAD_DIM];
    int64_t base = 0, r;
    for (r = 0; r < 2; base += attention_rows[r++].tokens) {
        int64_t n = attention_rows[r].tokens;
        slow_shape shape = {n, n, heads, kv_heads, d};
        bool *mask = malloc((size_t)(n * n));
        slow_mask(n, attention_rows[r].docs, attention_rows[r].cu_seqlens, !b->mode, mask);
        slow_attention_real(&shape, mask, b->field[Q].value + base * heads * d,
                            b->field[K].value + base * kv_heads * d,
                            b->field[V].value + base * kv_heads * d, out + base * heads * d,
                            lse + base * heads);
        free(mask);
    }
}

static void check_attention_values(bench *b) {
    double *out = malloc((size_t)(b->size[0] * b->size[HEADS] * (b->size[HEAD_DIM] + 1)) *
                         sizeof *out);
    double *lse = out + b->size[0] * b->size[HEADS] * b->size[HEAD_DIM];
    slow_attention_of(b, out, lse);
    expect_fast(b, &attention_pass);
    expect_values(b, ATTENTION_OUT, out);
    expect_values(b, LSE, lse);
    free(out);
}

/* Small with every derivative by field `in`, then large enough for several tiles; causal and
   full. */
static void check_attention(int in, int gradient) {
    chain c = {attention_pass, attention_grad_pass, ATTENTION_OUT, DOUT, NULL};
    int full;
    for (full = 0; full < 2; full++) {
        bench b;
        set_rows(small_cu, 6);
        b = attention_bench(6, 2, 5);
        b.mode = full;
        if (!gradient || !test_fibers()) check_attention_values(&b);
        if (gradient) expect_derivative(&b, &c, in, gradient, 0);
        bench_free(&b);
        /* the gradients are all of one pass: once full, twice causal */
        if (test_fibers() && gradient && full != (in == K)) continue;
        set_rows(large_cu, full ? 154 : 307);
        b = attention_bench(3, 3 - 2 * full, 7 + 12 * full);
        b.mode = full;
        expect_fast(&b, gradient ? &attention_grad_pass : &attention_pass);
        bench_free(&b);
    }
}

static void check_attn_forward(void) { check_attention(0, 0); }
static void check_attn_backward(void) {
    check_attention(Q, DQ);
    check_attention(K, DK);
    check_attention(V, DV);
}

static seqpar_status call_attn_delta(seqpar_device *device, const bench *b) {
    const field *f = b->field;
    seqpar_attn_delta_args a = {f[DELTA].data, f[DOUT].data,   f[ATTENTION_OUT].data,
                                b->size[0],    b->size[HEADS], b->size[HEAD_DIM]};
    return device->attn_delta(device, &a, device->queue);
}

static void check_attn_delta(void) {
    bench b;
    double *want;
    int64_t i, d = 19;
    set_rows(large_cu, 154);
    b = attention_bench(5, 1, d);
    want = calloc((size_t)(b.size[0] * 5), sizeof *want);
    for (i = 0; i < b.size[0] * 5 * d; i++)
        want[i / d] += b.field[DOUT].value[i] * b.field[ATTENTION_OUT].value[i];
    expect_fast(&b, &(pass){call_attn_delta, 1 << DELTA, 0});
    expect_values(&b, DELTA, want);
    free(want);
    bench_free(&b);
}

enum { SINKS, SINKS_LSE, SINKS_DELTA, DSINKS };
static const seqpar_piece sink_pieces[3] = {
    {.local = 2, .count = 5}, {.local = 0, .count = 2}, {.local = 7, .count = 6}};

static seqpar_status call_attn_sinks(seqpar_device *device, const bench *b) {
    const field *f = b->field;
    seqpar_attn_sinks_args a = {f[DSINKS].data,
                                f[SINKS].data,
                                f[SINKS_LSE].data,
                                f[SINKS_DELTA].data,
                                sink_pieces,
                                3,
                                5};
    return device->attn_sinks(device, &a, device->queue);
}

static void check_attn_sinks(void) {
    bench b;
    double want[15] = {0};
    int64_t i, h, t;
    memset(&b, 0, sizeof b);
    add_sums(&b, "sinks", 1, 5, 0, 1);
    add_sums(&b, "lse", 13, 5, 0, 1);
    add_sums(&b, "delta", 13, 5, 0, 1);
    add_sums(&b, "dsinks", 3, 5, 0, 1);
    for (i = 0; i < 3; i++)
        for (h = 0; h < 5; h++)
            for (t = sink_pieces[i].local; t < sink_pieces[i].local + sink_pieces[i].count; t++)
                want[i * 5 + h] -= exp(b.field[SINKS].value[h] -
                                       b.field[SINKS_LSE].value[t * 5 + h]) *
                                   b.field[SINKS_DELTA].value[t * 5 + h];
    expect_fast(&b, &(pass){call_attn_sinks, 1 << DSINKS, 0});
    expect_values(&b, DSINKS, want);
    bench_free(&b);
}

/* Partial results: a sum and one more, with their lse, and what is written in the end, into 3
   of 5 heads; mode 0 merges, 1 begins with a part, 2 ends with sinks, 3 adds. */
enum { SUM, SUM_LSE, PART, PART_LSE, MERGED, MERGED_LSE, MERGE_SINKS };
enum { MERGE_TOKENS = 11, MERGE_HEADS = 3, MERGE_DIM = 7, MERGE_ROW = MERGE_HEADS * MERGE_DIM };

static seqpar_status call_attn_merge(seqpar_device *device, const bench *b) {
    const field *f = b->field;
    int end = b->mode == 2, add = b->mode == 3;
    seqpar_attn_merge_args a = {.sum = f[SUM].data,
                                .sum_lse = add ? NULL : f[SUM_LSE].data,
                                .part = end ? NULL : f[PART].data,
                                .part_lse = end || add ? NULL : f[PART_LSE].data,
                                .out = end ? f[MERGED].data : NULL,
                                .lse = end ? f[MERGED_LSE].data : NULL,
                                .sinks = end ? f[MERGE_SINKS].data : NULL,
                                .tokens = MERGE_TOKENS,
                                .heads = MERGE_HEADS,
                                .head_dim = MERGE_DIM,
                                .out_heads = 5,
                                .begin = b->mode == 1};
    return device->attn_merge(device, &a, device->queue);
}

static void check_attn_merge(void) {
    double want[MERGE_TOKENS * MERGE_ROW], lse[MERGE_TOKENS * MERGE_HEADS];
    for (int mode = 0; mode < 4; mode++) {
        bench b;
        memset(&b, 0, sizeof b);
        add_sums(&b, "sum", MERGE_TOKENS, MERGE_ROW, 0, 1);
        add_sums(&b, "sum_lse", MERGE_TOKENS, MERGE_HEADS, 0, 2);
        add_sums(&b, "part", MERGE_TOKENS, MERGE_ROW, 0, 1);
        add_sums(&b, "part_lse", MERGE_TOKENS, MERGE_HEADS, 0, 2);
        add_field(&b, "merged", MERGE_TOKENS, MERGE_ROW, 2 * MERGE_DIM, 1);
        add_sums(&b, "merged_lse", MERGE_TOKENS, MERGE_HEADS, 2, 1);
        add_sums(&b, "sinks", 1, MERGE_HEADS, 0, 1);
        b.mode = mode;
        for (int n = 0; n < MERGE_TOKENS * MERGE_HEADS; n++) {
            double old = mode == 1 ? 0 : exp(b.field[SUM_LSE].value[n]);
            double part = mode == 2 ? 0 : exp(b.field[PART_LSE].value[n]);
            double whole = old + part;
            if (mode == 2) whole += exp(b.field[MERGE_SINKS].value[n % MERGE_HEADS]);
            if (mode == 3) old = part = whole = 1;
            lse[n] = log(whole);
            for (int i = n * MERGE_DIM; i < (n + 1) * MERGE_DIM; i++)
                want[i] = (old * b.field[SUM].value[i] + part * b.field[PART].value[i]) / whole;
        }
        expect_fast(&b, &(pass){call_attn_merge,
                                1 << SUM | (mode < 3 ? 1 << SUM_LSE : 0) |
                                    (mode == 2 ? 1 << MERGED | 1 << MERGED_LSE : 0),
                                0});
        expect_values(&b, SUM, want);
        if (mode < 3) expect_values(&b, SUM_LSE, lse);
        if (mode == 2) expect_values(&b, MERGED, want);
        if (mode == 2) expect_values(&b, MERGED_LSE, lse);
        bench_free(&b);
    }
}

/* Two key pieces of 3 and 5 tokens, kv heads 1 and 2 of 3: what other ranks made of dk, dv,
   and what waits in the store. */
enum { RETURN_DK, RETURN_DV, INBOX, RETURN_STORE };
enum {
    RETURN_HEADS = 2,
    RETURN_DIM = 7,
    RETURN_ROW = RETURN_HEADS * RETURN_DIM,
    RETURN_TOKENS = 9
};

static const int64_t return_count[2] = {3, 5}, return_local[2] = {1, 4},
                     inbox_base[2] = {0, 3 * 2 * 3 * RETURN_ROW},
                     store_base[2] = {4, 3 * 2 * 3 * RETURN_ROW + 11};

static seqpar_status call_attn_return(seqpar_device *device, const bench *b) {
    static const seqpar_fold_op first[] = {{SEQPAR_FOLD_LEAF, 0},    {SEQPAR_FOLD_LEAF, 1},
                                           {SEQPAR_FOLD_COMBINE, 0}, {SEQPAR_FOLD_STORE, 2},
                                           {SEQPAR_FOLD_LEAF, 2},    {SEQPAR_FOLD_LOAD, 2},
                                           {SEQPAR_FOLD_COMBINE, 0}, {SEQPAR_FOLD_LOAD, 0},
                                           {SEQPAR_FOLD_COMBINE, 0}, {SEQPAR_FOLD_FINISH, 0}};
    static const seqpar_fold_op second[] = {{SEQPAR_FOLD_LEAF, 0},    {SEQPAR_FOLD_EXTEND, 1},
                                            {SEQPAR_FOLD_EXTEND, 2},  {SEQPAR_FOLD_LOAD, 1},
                                            {SEQPAR_FOLD_COMBINE, 0}, {SEQPAR_FOLD_FINISH, 0}};
    seqpar_piece pieces[2] = {{.count = return_count[0], .local = return_local[0]},
                              {.count = return_count[1], .local = return_local[1]}};
    seqpar_attn_task tasks[2] = {
        {0, first, 10, store_base[0], 2 * 3 * RETURN_ROW, inbox_base[0]},
        {1, second, 6, store_base[1], 2 * 5 * RETURN_ROW, inbox_base[1]}};
    const field *f = b->field;
    seqpar_attn_args a = {.heads = 6,
                          .kv_heads = 3,
                          .head_dim = RETURN_DIM,
                          .head_begin = 1,
                          .head_count = RETURN_HEADS,
                          .q_pieces = pieces,
                          .tasks = tasks,
                          .task_count = 2,
                          .depth = 3,
                          .dk = f[RETURN_DK].data,
                          .dv = f[RETURN_DV].data,
                          .store = f[RETURN_STORE].data,
                          .inbox = f[INBOX].data};
    return device->attn_return(device, &a, device->queue);
}

/* Element (token t of the piece, head h of the range, i) of one value: for each head dk,
   then dv. */
static double returned(const double *value, int64_t count, int is_v, int64_t t, int64_t h,
                       int64_t i) {
    return value[((h * 2 + is_v) * count + t) * RETURN_DIM + i];
}

static double *plain_return(const bench *b, int is_v) {
    double *want = dense_copy(&b->field[is_v ? RETURN_DV : RETURN_DK],
                              b->field[is_v ? RETURN_DV : RETURN_DK].value);
    int64_t piece, t, h, i, n;
    for (piece = 0; piece < 2; piece++)
        for (t = 0; t < return_count[piece]; t++)
            for (h = 0; h < RETURN_HEADS; h++)
                for (i = 0; i < RETURN_DIM; i++) {
                    int64_t count = return_count[piece], size = 2 * count * RETURN_ROW;
                    double sum = returned(b->field[RETURN_STORE].value + store_base[piece] +
                                              piece * size,
                                          count, is_v, t, h, i);
                    for (n = 0; n < 3; n++)
                        sum += returned(b->field[INBOX].value + inbox_base[piece] + n * size,
                                        count, is_v, t, h, i);
                    want[((return_local[piece] + t) * 3 + 1 + h) * RETURN_DIM + i] = sum;
                }
    return want;
}

static void check_attn_return(void) {
    bench b = {0};
    int is_v;
    add_field(&b, "dk", RETURN_TOKENS, 3 * RETURN_DIM, 0, 1);
    add_field(&b, "dv", RETURN_TOKENS, 3 * RETURN_DIM, 0, 1);
    add_sums(&b, "inbox", 1, inbox_base[1] + 3 * 2 * 5 * RETURN_ROW, 0, 1);
    add_sums(&b, "store", 1, store_base[1] + 2 * 2 * 5 * RETURN_ROW, 0, 1);
    expect_fast(&b,
                &(pass){call_attn_return, 1 << RETURN_DK | 1 << RETURN_DV | 1 << RETURN_STORE,
                        1 << RETURN_STORE});
    for (is_v = 0; is_v < 2; is_v++) {
        double *want = plain_return(&b, is_v);
        expect_values(&b, is_v ? RETURN_DV : RETURN_DK, want);
        free(want);
    }
    bench_free(&b);
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

/* Beyond where exp overflows in fp32, and where neighbours lie 1/128 and 2 apart; there a
   mean in fp32 is not worth a look. No seed for the entropy: x - lse loses what lse is
   rounded by. */
static void check_head_far(void) {
    static const double above[3] = {100, 1e5, -3e7};
    enum { COLUMNS = 413 };
#ifdef TEST_CUDA
    int cases = 3;
#else
    int cases = SEQPAR__HAS_FMA ? 3 : 1; /* x log2(e) rounded is too far off there */
#endif
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

static void check_vocab_softmax(void) {
    check_head_infinite();
    check_head_golden();
    check_head_far();
    check_head_mixed();
    check_head_climb();
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

static void check_nf4_rows(void) {
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
    seqpar_quantize_args a = {.form = SEQPAR_QUANTIZE_CHANCE,
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

/* ---- the table ---- */

/* Limits: relative L2 of the fast device against the reference device, three times the worst
   of seeds 1..40 (AVX2 and FMA). vocab_softmax is worst in `smooth` of logits near 100, whose
   mean is summed in fp32; its gradient is within 4e-7. The last column: roundings to bf16 in
   a result. Attention's backward reads an out that was rounded; a rotation goes there and
   back. */
static const struct op_check {
    const char *op;
    void (*check)(void);
    double cpu, bf16;
} checks[] = {

    {"matmul", check_matmul, 1e-6, 1},
    {"weight_grad", check_weight_grad, 4e-7, 1},
    {"embedding", check_embedding, 0, 0},
    {"embedding_grad", check_embedding_grad, 1.5e-7, 1},
    {"rmsnorm", check_rmsnorm, 7e-7, 1},
    {"rmsnorm_grad", check_rmsnorm, 7e-7, 1},
    {"rope", check_rope, 2.1e-7, 2},
    {"swiglu", check_swiglu, 4.5e-7, 1},
    {"swiglu_grad", check_swiglu, 4.5e-7, 1},
    {"add", check_add, 1.2e-7, 1},
    {"fold", check_fold, 2.1e-7, 1},
    {"attn_forward", check_attn_forward, 6e-7, 1},
    {"attn_backward", check_attn_backward, 1.1e-6, 2},
    {"attn_return", check_attn_return, 1.4e-7, 1},
    {"attn_delta", check_attn_delta, 1.9e-7, 1},
    {"attn_sinks", check_attn_sinks, 6e-7, 1},
    {"attn_merge", check_attn_merge, 6e-7, 1},
    {"vocab_softmax", check_vocab_softmax, 5e-6, 1},
    {"distill", check_distill, 5e-6, 1},
    {"choose", check_choose, 5e-6, 1},
    {"nf4_rows", check_nf4_rows, 0, 1},
    {"route", check_route, 2e-7, 1},
    {"route_grad", check_route_grad, 3e-7, 1},
    {"mix", check_mix, 1.2e-7, 1},
    {"drop", check_drop, 1.2e-7, 1},
    {"dots", check_dots, 1.8e-7, 1},
    {"sample", check_sample, 0, 0},
    {"sumsq", check_sumsq, 6e-15, 1},
    {"adamw", check_adamw, 3.6e-7, 1},
    {"sgd", check_sgd, 1e-7, 1},
    {"quantize", check_quantize, 0, 0},
};

static const struct op_check *find_check(const char *op) {
    size_t i;
    for (i = 0; i < sizeof checks / sizeof *checks; i++)
        if (!strcmp(checks[i].op, op)) return &checks[i];
    return NULL;
}

static void test_op(const char *op, int number) {
    const struct op_check *c = find_check(op);
    if (test_expect(c != NULL, "device operation %s has no check", op)) {
        memset(calls, 0, sizeof calls);
        worst = (limits){0};
        limit = (limits){1e-13, 1e-7, c->cpu, c->bf16 / 256 + 1e-6};
        c->check();
        test_expect(calls[SEQPAR_DTYPE_F64][number] && calls[SEQPAR_DTYPE_F32][number] &&
                        calls[SEQPAR_DTYPE_BF16][number],
                    "the check of %s does not call it on all devices", op);
        printf("# %s: value %.1e, derivative %.1e, cpu %.1e, bf16 %.2f roundings\n", op,
               worst.formula, worst.derivative, worst.cpu, worst.bf16 * 256);
    }
    test_end("device_%s", op);
}

/* Host numbers to a device and back, in as many parts as it takes, and nothing beside them. */
static void test_transfer(seqpar_device *device, int dtype) {
    enum { BESIDE = 3 };
    static const int64_t counts[] = {0, 1, 255, 257, 65536, 65537, 150001};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        int64_t n = counts[c], all = n + 2 * BESIDE, wrong = 0;
        double *from = malloc((size_t)all * sizeof *from);
        double *to = malloc((size_t)all * sizeof *to);
        void *data = device->alloc(device, all * seqpar_dtype_bytes(dtype));
        for (int64_t i = 0; i < all; i++) from[i] = test_normal();
        device->zero(device, data, all * seqpar_dtype_bytes(dtype), NULL);
        seqpar_device_write(device, data, BESIDE, from + BESIDE, n, dtype);
        seqpar_device_read(device, to, data, 0, all, dtype);
        for (int64_t i = 0; i < all; i++)
            wrong += to[i] != (i < BESIDE || i >= n + BESIDE ? 0 : stored_as(from[i], dtype));
        test_expect(!wrong, "%s: %lld of %lld numbers are wrong", device->name,
                    (long long)wrong, (long long)n);
        device->free(device, data);
        free(from);
        free(to);
    }
    test_end("device_transfer_%s_%s", device->name,
             dtype == SEQPAR_DTYPE_F64   ? "fp64"
             : dtype == SEQPAR_DTYPE_F32 ? "fp32"
                                         : "bf16");
}

#ifndef TEST_CUDA
/* Every job is called once, whatever the number of threads, with scratch that no other
   thread has meanwhile. The first job waits until all others are done: they are all done by
   other threads, the rest of its own thread's run included. */
typedef struct jobs_at_work {
    int64_t jobs, done, shared, alone;
    int calls[101];
} jobs_at_work;

static void count_job(void *user, int64_t i, char *scratch) {
    jobs_at_work *w = user;
    time_t end = time(NULL) + 20;
    int64_t done = 0;
#pragma omp atomic
    w->calls[i]++;
    memcpy(scratch, &i, sizeof i);
#ifdef _OPENMP
    while (!i && omp_get_num_threads() > 1 && done < w->jobs - 1 && time(NULL) < end) {
#pragma omp atomic read
        done = w->done;
        sched_yield();
    }
    if (!i && omp_get_num_threads() > 1) w->alone = done < w->jobs - 1;
#endif
    if (memcmp(scratch, &i, sizeof i)) {
#pragma omp atomic
        w->shared++;
    }
#pragma omp atomic
    w->done++;
}

static void test_runs_of_jobs(void) {
    static const int64_t jobs[] = {0, 1, 2, 3, 7, 101};
    for (int threads = 1; threads <= 5; threads++) {
        seqpar_device *device = seqpar_device_cpu(threads);
        for (size_t c = 0; c < sizeof jobs / sizeof *jobs; c++) {
            jobs_at_work w = {.jobs = jobs[c]};
            int64_t wrong = 0;
            test_expect(!seqpar__parallel_runs(device, jobs[c], sizeof(int64_t), count_job, &w),
                        "it failed");
            for (int64_t i = 0; i < 101; i++) wrong += w.calls[i] != (i < jobs[c]);
            test_expect(!wrong && !w.shared && !w.alone,
                        "%d threads, %lld jobs: %lld not called once, %lld found their scratch "
                        "changed%s",
                        threads, (long long)jobs[c], (long long)wrong, (long long)w.shared,
                        w.alone ? ", nobody helped the first thread" : "");
        }
        seqpar_device_close(device);
    }
    test_end("device_runs_of_jobs");
}

/* A thread's scratch is its own to the last byte, and its jobs rise. */
enum { SCRATCH_THREADS = 4, SCRATCH_JOBS = 12 };
typedef struct scratch_work {
    int64_t bytes, wrong, fell, last[SCRATCH_THREADS];
    int calls[SCRATCH_JOBS];
} scratch_work;

static void scratch_job(void *user, int64_t i, char *scratch) {
    scratch_work *w = user;
    int64_t wrong = 0;
    int me = 0;
#ifdef _OPENMP
    me = omp_get_thread_num();
#endif
    w->calls[i]++; /* each job is one thread's */
    if (i < w->last[me]) {
#pragma omp atomic
        w->fell++;
    }
    w->last[me] = i;
    memset(scratch, (int)i + 1, (size_t)w->bytes);
    sched_yield();
    for (int64_t b = 0; b < w->bytes; b++) wrong += scratch[b] != (char)(i + 1);
    if (wrong) {
#pragma omp atomic
        w->wrong++;
    }
}

static void test_scratch(void) {
    static const int64_t bytes[] = {1, 63, 64, 65, 200, 4097, 65}; /* it may shrink again */
    for (int threads = 1; threads <= SCRATCH_THREADS; threads++) {
        seqpar_device *device = seqpar_device_cpu(threads);
        for (size_t c = 0; c < 2 * (sizeof bytes / sizeof *bytes); c++) {
            scratch_work w = {.bytes = bytes[c / 2]};
            int64_t once = 0;
            seqpar_status status = (c % 2 ? seqpar__parallel_runs : seqpar__parallel)(
                device, SCRATCH_JOBS, w.bytes, scratch_job, &w);
            for (int i = 0; i < SCRATCH_JOBS; i++) once += w.calls[i] == 1;
            test_expect(
                !status && once == SCRATCH_JOBS && !w.wrong && (c % 2 || !w.fell),
                "%d threads, %lld bytes: %lld jobs once, %lld with bytes of others, %lld "
                "out of order",
                threads, (long long)w.bytes, (long long)once, (long long)w.wrong,
                (long long)w.fell);
            test_expect((uintptr_t)device->workspace % 64 == 0, "where scratch begins");
        }
        seqpar_device_close(device);
    }
    test_end("device_scratch_of_jobs");
}

/* ---- memory of a host device, and its second pool ---- */

static void test_host_memory(void) {
    seqpar_device *d = seqpar_device_reference();
    char from[60], to[60], want[60];
    d->free(d, NULL);
    for (int64_t bytes = 0; bytes < 300; bytes += 7) {
        char *data = d->alloc(d, bytes);
        test_expect(data && (uintptr_t)data % 64 == 0, "%lld bytes", (long long)bytes);
        memset(data, 1, (size_t)bytes);
        d->free(d, data);
    }
    for (int i = 0; i < 60; i++) from[i] = (char)(i + 1), to[i] = want[i] = -1;
    for (int row = 0; row < 4; row++)
        for (int i = 0; i < 5; i++) want[row * 13 + i] = from[row * 9 + i];
    d->copy_rows(d, to, 13, from, 9, 5, 4, NULL);
    test_expect(!memcmp(to, want, sizeof to), "rows of 5 bytes");
    d->copy_rows(d, to, 13, from, 9, 0, 4, NULL);
    d->copy_rows(d, to, 13, from, 9, 5, 0, NULL);
    d->copy(d, to, from, 0, NULL);
    d->zero(d, to, 0, NULL);
    test_expect(!memcmp(to, want, sizeof to), "nothing is copied");
    d->copy(d, to + 1, to, 7, NULL); /* they may overlap */
    memmove(want + 1, want, 7);
    test_expect(!memcmp(to, want, sizeof to), "7 bytes one place on");
    d->copy(d, to, from, 1, NULL);
    d->zero(d, to + 5, 1, NULL);
    want[0] = from[0], want[5] = 0;
    test_expect(!memcmp(to, want, sizeof to), "one byte");
    seqpar_device_close(d);
    seqpar_device_close(NULL);
    test_end("device_host_memory");
}

enum { MOVES = 100, MOVED_FIRST = 8 << 20 };

/* More moves than wait at a time, of many sizes: each has a number, and all are done. */
static void test_moves(void) {
    seqpar_device *d = seqpar_device_reference();
    char *far[MOVES], from[MOVES], *large = malloc(MOVED_FIRST);
    memset(large, 1, MOVED_FIRST);
    test_expect(d->move(d, NULL, NULL, 0, NULL) == 0 && !d->moved(d, 0, NULL) && !d->mover,
                "nothing is moved");
    for (int64_t i = 0; i < MOVES; i++) {
        far[i] = d->pool_alloc(d, i ? 1 : MOVED_FIRST);
        from[i] = (char)(i + 1);
        test_expect(d->move(d, far[i], &from[i], 1, NULL) == i + 1, "move %lld", (long long)i);
        test_expect(d->move(d, NULL, NULL, 0, NULL) == i + 1, "none after move %lld",
                    (long long)i);
        if (i % 7 == 0)
            test_expect(!d->moved(d, i + 1, NULL) && *far[i] == from[i], "move %lld is late",
                        (long long)i);
    }
    test_expect(!d->moved(d, MOVES, NULL), "moved");
    d->move(d, far[0], large, MOVED_FIRST, NULL); /* the others wait for it */
    for (int64_t i = 1; i < MOVES; i++) {
        test_expect(*far[i] == (char)(i + 1), "move %lld is not done", (long long)i);
        *far[i] = 0;
        d->move(d, far[i], &from[i], 1, NULL); /* closing waits for them */
    }
    seqpar__mover_close(d);
    d->mover = NULL;
    for (int64_t i = 0; i < MOVES; i++) {
        test_expect(*far[i] == (char)(i + 1), "move %lld is lost", (long long)i);
        d->pool_free(d, far[i], 1);
    }
    free(large);
    seqpar_device_close(d);
    test_end("device_moves");
}

/* The pool in a file without a name, zeros to its last byte; a disk that is full is named. */
static void test_pool_file(void) {
    static const int64_t sizes[] = {1, SEQPAR__ZEROS_BYTES - 1, SEQPAR__ZEROS_BYTES,
                                    SEQPAR__ZEROS_BYTES + 1, 3 * SEQPAR__ZEROS_BYTES + 5};
    seqpar_device *d = seqpar_device_reference();
    char folder[] = "build/device_pool.XXXXXX";
    seqpar_error error = {0};
    struct rlimit before, few;
    d->error = &error;
    d->pool_path = mkdtemp(folder);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        char *data = d->pool_alloc(d, sizes[s]), any = 0;
        for (int64_t i = 0; data && i < sizes[s]; i++) any |= data[i];
        test_expect(data && !any, "%lld bytes: %s", (long long)sizes[s], error.text);
        if (data) data[sizes[s] - 1] = 1, d->pool_free(d, data, sizes[s]);
    }
    getrlimit(RLIMIT_FSIZE, &before);
    few = before, few.rlim_cur = 100000;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &few);
    void *none = d->pool_alloc(d, 100001), *fits = d->pool_alloc(d, 100000);
    setrlimit(RLIMIT_FSIZE, &before);
    test_expect(!none && fits && error.status == SEQPAR_ERR_MEMORY &&
                    strstr(error.text, "100001 bytes to offload cannot be written to a file in "
                                       "build/device_pool.") &&
                    strstr(error.text, ": File too large; give another folder, or none"),
                "a full disk: %s", error.text);
    if (fits) d->pool_free(d, fits, 100000);
    memset(&error, 0, sizeof error);
    test_expect(!d->pool_alloc(d, 0) && error.status == SEQPAR_ERR_MEMORY &&
                    strstr(error.text, "0 bytes to offload cannot be mapped from a file in "),
                "nothing to map: %s", error.text);
    test_expect(!rmdir(folder), "a file is left in %s", folder);
    seqpar_device_close(d);
    test_end("device_pool_file");
}
#endif

int main(int argc, char **argv) {
    test_begin(argc, argv);
    reference = counting(seqpar_device_reference());
    fast = counting(seqpar_device_cpu(1));
    fast_threads = seqpar_device_cpu(3);
    bf16 = counting(test_device_bf16(3));
    bf16_reference = seqpar_device_reference_bf16();
#define X(op) TEST(test_op(#op, OP_##op));
    SEQPAR_DEVICE_OPS(X)
#undef X
    TEST(test_transfer(reference, SEQPAR_DTYPE_F64));
    TEST(test_transfer(fast, SEQPAR_DTYPE_F32));
    TEST(test_transfer(bf16, SEQPAR_DTYPE_BF16));
    TEST(test_transfer(bf16, SEQPAR_DTYPE_F32));
    seqpar_device_close(reference);
    seqpar_device_close(fast);
    seqpar_device_close(fast_threads);
    seqpar_device_close(bf16_reference);
    seqpar_device_close(bf16);
#ifndef TEST_CUDA /* it is the CPU device's */
    TEST(test_own_product());
    TEST(test_backward_blocks());
    TEST(test_runs_of_jobs());
    TEST(test_scratch());
    TEST(test_host_memory());
    TEST(test_moves());
    TEST(test_pool_file());
#endif
    return test_summary();
}
