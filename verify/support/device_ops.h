/* SPDX-License-Identifier: MIT OR Unlicense */
/* Operations of the device table, one at a time: values against slow.h or a plain loop,
   gradients against differences of the forward operation, and the fast device against the
   reference device. Sizes are odd and different, rows lie apart. */
#ifndef DEVICE_OPS_H
#define DEVICE_OPS_H
#include "seqpar.h"
#include "second/slow.h"
#include "test.h"

/* ---- the suites: each operation is checked by one, which test_device.c counts ---- */

#define MATMUL_OPS(X) X(matmul) X(weight_grad)
#define ROW_OPS(X) \
    X(embedding) \
    X(embedding_grad) \
    X(rmsnorm) X(rmsnorm_grad) X(rope) X(swiglu) X(swiglu_grad) X(add) X(fold) X(drop)
#define EXPERT_OPS(X) X(route) X(route_grad) X(mix) X(dots)
#define ATTENTION_OPS(X) \
    X(attn_forward) X(attn_backward) X(attn_return) X(attn_delta) X(attn_sinks) X(attn_merge)
#define VOCAB_OPS(X)  X(vocab_softmax) X(distill) X(choose) X(sample)
#define UPDATE_OPS(X) X(sumsq) X(adamw) X(sgd) X(quantize) X(nf4_rows)

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

static inline seqpar_device *counting(seqpar_device *device) {
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

static inline void note(double *most, double d, double most_allowed, const char *how,
                        const char *what) {
    test_expect(d <= most_allowed, "%s: %s is off by %.2e, limit %.1e", how, what, d,
                most_allowed);
    *most = fmax(*most, d);
}

static inline int add_field(bench *b, const char *name, int64_t rows, int64_t width,
                            int64_t gap, double spread) {
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

static inline void add_sums(bench *b, const char *name, int64_t rows, int64_t width,
                            int64_t gap, double spread) {
    b->field[add_field(b, name, rows, width, gap, spread)].sums = 1;
}

static inline void add_ids(bench *b, int64_t rows, int64_t values) {
    int64_t i;
    b->rows = rows;
    b->ids = calloc((size_t)rows, sizeof *b->ids);
    for (i = 0; i < rows; i++) b->ids[i] = (int32_t)test_integer(0, values - 1);
}

static inline void bench_free(bench *b) {
    int64_t i;
    for (i = 0; i < b->count; i++) {
        free(b->field[i].value);
        free(b->field[i].after);
    }
    free(b->ids);
    memset(b, 0, sizeof *b);
}

static inline int dtype_of(const field *f, const seqpar_device *device) {
    return f->sums ? device->accumulator : device->storage;
}

static inline double stored_as(double x, int dtype) {
    return dtype == SEQPAR_DTYPE_F64 ? x
           : dtype == SEQPAR_DTYPE_F32
               ? (double)(float)x
               : (double)seqpar_bf16_to_float(seqpar_bf16_from_float((float)x));
}

static inline seqpar_mat mat(const field *f) { return (seqpar_mat){f->data, f->stride}; }

/* What lies between rows, and every field that is not written, must stay. */
static inline void expect_untouched(const field *f, int written, const seqpar_device *device) {
    int64_t i;
    for (i = 0; i < f->rows * f->stride; i++) {
        double stored = stored_as(f->value[i], dtype_of(f, device));
        if (i % f->stride < f->width && written) continue;
        test_expect(f->after[i] == stored, "%s: %s changed at %lld", device->name, f->name,
                    (long long)i);
    }
}

static inline void run(bench *b, seqpar_device *device, const pass *p) {
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
static inline double *dense_copy(const field *f, const double *from) {
    double *to = malloc((size_t)(f->rows * f->width + 1) * sizeof *to);
    int64_t r;
    for (r = 0; r < f->rows; r++)
        memcpy(to + r * f->width, from + r * f->stride, (size_t)f->width * sizeof *to);
    return to;
}

static inline double field_distance(const field *f, const double *got, const double *want) {
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
static inline void expect_values(const bench *b, int number, const double *want) {
    const field *f = &b->field[number];
    double *got = dense_copy(f, f->after);
    note(&worst.formula, test_distance(got, want, f->rows * f->width), limit.formula, "value",
         f->name);
    free(got);
}

static inline double **copy_results(const bench *b) {
    double **copy = calloc(sizeof b->field / sizeof *b->field, sizeof *copy);
    for (int64_t i = 0; i < b->count; i++) {
        size_t elements = (size_t)b->field[i].rows * (size_t)b->field[i].stride;
        copy[i] = calloc(elements + 1, sizeof **copy);
        memcpy(copy[i], b->field[i].after, elements * sizeof **copy);
    }
    return copy;
}

static inline void free_results(const bench *b, double **copy) {
    int64_t i;
    for (i = 0; i < b->count; i++) free(copy[i]);
    free(copy);
}

/* What is stored in bf16 is numbers of bf16 now. */
static inline void round_fields(bench *b) {
    int64_t i, n;
    for (i = 0; i < b->count; i++)
        for (n = 0; n < b->field[i].rows * b->field[i].stride && !b->field[i].sums; n++)
            b->field[i].value[n] = stored_as(b->field[i].value[n], SEQPAR_DTYPE_BF16);
}

/* A device with bf16 storage against fp64 on the same numbers: sums within fp32's rounding;
   results, relative L2, within so many roundings to bf16 (2^-8 at most each) as the
   operation's limit says. */
static inline void expect_bf16(const bench *from, const pass *p, seqpar_device *device) {
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
static inline void expect_fast(bench *b, const pass *p) {
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

static inline double inner_product(const field *x, const field *seed) {
    double sum = 0;
    int64_t r, i;
    for (r = 0; r < x->rows; r++)
        for (i = 0; i < x->width; i++)
            sum += x->after[r * x->stride + i] * seed->value[r * seed->stride + i];
    return sum;
}

static inline double loss_at(bench *b, const chain *c, double *x, double value) {
    double old = *x;
    *x = value;
    run(b, reference, &c->forward);
    *x = old;
    return c->loss ? c->loss(b) : inner_product(&b->field[c->out], &b->field[c->seed]);
}

static inline double slope(bench *b, const chain *c, double *x) {
    const double h = 1e-3, at = *x;
    double near = loss_at(b, c, x, at + h) - loss_at(b, c, x, at - h);
    return (8 * near - (loss_at(b, c, x, at + 2 * h) - loss_at(b, c, x, at - 2 * h))) /
           (12 * h);
}

/* Derivatives by field `in` against what backward leaves in field `gradient` (adds to it, if
   `added`). */
static inline void expect_derivative(bench *b, const chain *c, int in, int gradient,
                                     int added) {
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
static inline void cut_leaves(int64_t rows) {
    int64_t i, cut[FOLD_LEAVES + 1] = {0, 1, 1 + rows / 3, rows / 2 + 1, rows - 2, rows};
    for (i = 0; i < FOLD_LEAVES; i++) {
        fold_leaves[i].local = cut[i];
        fold_leaves[i].count = cut[i + 1] - cut[i];
    }
}

static inline seqpar_fold_call fold_into(const field *finish, const field *store) {
    return (seqpar_fold_call){fold_program,  sizeof fold_program / sizeof *fold_program,
                              FOLD_DEPTH,    store->data,
                              store->stride, finish->data};
}

/* ---- a check of each operation ---- */

/* Limits: relative L2 of the fast device against the reference device, three times the worst
   of seeds 1..40 (AVX2 and FMA). bf16: roundings to bf16 in a result. */
typedef struct op_check {
    const char *op;
    void (*check)(void);
    double cpu, bf16;
} op_check;

static const op_check *op_checks; /* of the suite */
static size_t op_check_count;

static inline const op_check *find_check(const char *op) {
    for (size_t i = 0; i < op_check_count; i++)
        if (!strcmp(op_checks[i].op, op)) return &op_checks[i];
    return NULL;
}

static inline void test_op(const char *op, int number) {
    const op_check *c = find_check(op);
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

static inline void device_open(const op_check *checks, size_t count) {
    op_checks = checks;
    op_check_count = count;
    reference = counting(seqpar_device_reference());
    fast = counting(seqpar_device_cpu(1));
    fast_threads = seqpar_device_cpu(3);
    bf16 = counting(test_device_bf16(3));
    bf16_reference = seqpar_device_reference_bf16();
}

static inline void device_close(void) {
    seqpar_device *const opened[] = {reference, fast, fast_threads, bf16_reference, bf16};
    for (int i = 0; i < 5; i++) seqpar_device_close(opened[i]);
}
#endif
