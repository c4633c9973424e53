/* SPDX-License-Identifier: MIT OR Unlicense */
/* The layers that are no product, on one thread and on all cores, against what memory and
   arithmetic of this machine allow: RMSNorm, RoPE, SwiGLU, the row pass of the loss, AdamW.
   Every result is checked against a naive loop in fp64 before it is timed.

   Stream is a loop over the same memory that reads and writes what the layer does and computes
   next to nothing; `of fastest` is against the best of all these loops, each by itself, whose
   mix of reads and writes may suit the memory better. Bytes are those that must travel: what is
   read, what is written, and once more what is written without having been read, since an
   ordinary store fetches its line first. Layers and stream loops are counted alike; neither
   uses stores that pass the cache by.

   The second bound is of the exp, division and square root that the layer cannot do without,
   done in registers. A layer cannot be faster than the slower of the two bounds: `of bound`, to
   be compared with `wanted` where data lie in memory.

       bench_layers [NAME]        all layers, or those whose name has NAME in it */
#include "bench.h"

enum {
    ARRAYS = 5,
    WIDTH = 1024,
    HIDDEN = 2816,
    VOCAB = 32000,
    HEADS = 16,
    HEAD_DIM = 64,
    POSITIONS = 4096,
    LEAF = 128
};

static const double eps = 1e-5;
static seqpar_device *device;
static int threads; /* of the device, and of the loops it is compared with */

/* ---- the machine ---- */

typedef struct stream {
    float *a, *b, *c;
    int64_t count;
} stream;

#define STREAM_LOOP(name, ...) \
    static void name(void *user) { \
        stream *s = user; \
        vector k = (vector){0} + 0.999f; \
        int64_t i; \
        (void)k; \
        _Pragma("GCC unroll 4") for (i = 0; i + VECTOR / 4 <= s->count; i += VECTOR / 4) { \
            vector *a = (vector *)(s->a + i), *b = (vector *)(s->b + i), \
                   *c = (vector *)(s->c + i); \
            (void)b; \
            (void)c; \
            __VA_ARGS__; \
        } \
    }
STREAM_LOOP(copy_loop, *a = *b)
STREAM_LOOP(triad_loop, *a = *b * k + *c)
STREAM_LOOP(scale_loop, *a = *a * k)
STREAM_LOOP(update_loop, *a = *b * k + *a)
STREAM_LOOP(gather_loop, *a = *b * k + *a + *c)

static volatile float sink;
static void read_loop(void *user) {
    stream *s = user;
    vector top[4] = {{0}};
    int64_t i;
    int j;
    for (i = 0; i + VECTOR <= s->count; i += VECTOR)
        for (j = 0; j < 4; j++) top[j] += ((vector *)(s->a + i))[j];
    sink = (top[0] + top[1] + top[2] + top[3])[0];
}

enum { READ, SCALE, COPY, UPDATE, TRIAD, GATHER, STREAMS };
typedef struct stream_kind {
    const char *name;
    call_fn call;
    int arrays;
    double bytes;
} stream_kind;

static const stream_kind stream_kinds[STREAMS] = {
    {"read", read_loop, 1, 4},    {"scale", scale_loop, 1, 8},
    {"copy", copy_loop, 2, 12},   {"update", update_loop, 2, 12},
    {"triad", triad_loop, 3, 16}, {"gather", gather_loop, 3, 16}};

typedef struct share {
    const stream *whole;
    call_fn call;
} share;

static void share_job(void *user, int64_t i, char *scratch) {
    const share *work = user;
    int64_t each = work->whole->count / threads / 64 * 64, at = i * each;
    stream s = {work->whole->a + at, work->whole->b + at, work->whole->c + at,
                i + 1 < threads ? each : work->whole->count - at};
    (void)scratch;
    work->call(&s);
}

static void share_call(void *user) {
    seqpar__parallel_runs(device, threads, 0, share_job, user);
}

static stream stream_over(float *pool, int64_t count, const stream_kind *k) {
    int64_t each = count / k->arrays / 64 * 64;
    return (stream){pool, pool + each, pool + (k->arrays > 2 ? 2 * each : 0), each};
}

/* Bytes per second of the fastest of all loops. */
static double fastest_stream(float *pool, int64_t count) {
    double best = 0;
    size_t i;
    for (i = 0; i < STREAMS; i++) {
        stream s = stream_over(pool, count, &stream_kinds[i]);
        share work = {&s, stream_kinds[i].call};
        best = fmax(best,
                    stream_kinds[i].bytes * (double)s.count / measure(share_call, &work).best);
    }
    return best;
}

enum { EXP, DIV, ROOT, COSTLY, CHAINS = 16, TURNS = 4096 };
static double costly_seconds[COSTLY]; /* of one element, on one thread */

#define COSTLY_LOOP(name, ...) \
    static void name(void *user) { \
        seqpar__v x[CHAINS], one = seqpar__vsplat(1.25f); \
        int i, j; \
        float out[SEQPAR__VL]; \
        (void)user; \
        for (i = 0; i < CHAINS; i++) x[i] = seqpar__vsplat(1.0f + 0.125f * (float)i); \
        for (j = 0; j < TURNS; j++) { \
            _Pragma("GCC unroll 16") for (i = 0; i < CHAINS; i++) x[i] = __VA_ARGS__; \
        } \
        for (i = 1; i < CHAINS; i++) x[0] = seqpar__vmax(x[0], x[i]); \
        seqpar__vstore(out, x[0]); \
        (void)one; \
        sink = out[0]; \
    }
COSTLY_LOOP(exp_loop, seqpar__vexp2(x[i]))
COSTLY_LOOP(div_loop, one / x[i])
COSTLY_LOOP(root_loop, seqpar__vsqrt(x[i]))

static void find_costly(void) {
    static const call_fn loops[COSTLY] = {exp_loop, div_loop, root_loop};
    clockid_t clock = work_clock;
    int i;
    work_clock = CLOCK_THREAD_CPUTIME_ID;
    for (i = 0; i < COSTLY; i++) {
        double s = measure(loops[i], NULL).best / ((double)CHAINS * TURNS * SEQPAR__VL);
        if (costly_seconds[i] == 0 || s < costly_seconds[i]) costly_seconds[i] = s;
    }
    work_clock = clock;
}

/* How many cores arithmetic finds here just now: fewer than there are threads while the host
   of a virtual machine gives them to others. A layer then looks slow beside a loop that one
   core is enough for. */
enum { CORE_JOBS = 16 };
static void core_job(void *user, int64_t i, char *scratch) {
    (void)i;
    (void)scratch;
    exp_loop(user);
}

static void cores_call(void *user) {
    seqpar__parallel(device, CORE_JOBS * threads, 0, core_job, user);
}

static double cores_here(void) {
    return CORE_JOBS * threads * costly_seconds[EXP] * CHAINS * TURNS * SEQPAR__VL /
           seconds_of(cores_call, NULL, 1);
}

/* ---- a layer at work ---- */

typedef struct layer {
    const struct layer_kind *kind;
    /* floats of all its arrays, which lie one after the other */
    int64_t rows, width, count;
    /* what it works on, and what that was before the first call */
    float *x[ARRAYS], *old[ARRAYS];
    float *gain, *dgain, *rstd, *cosine, *sine, *logp, *entropy, *seeds;
    int32_t *positions;
    seqpar_piece *leaves;
    seqpar_fold fold;
} layer;

typedef struct layer_kind {
    const char *name;
    int arrays; /* of rows x width floats */
    int64_t width;
    /* range of the numbers while time is taken; a layer in place runs on its own results */
    double low, high;
    int stream;   /* the loop that reads and writes likewise */
    double bytes; /* that must travel, of one element */
    double costly[COSTLY];
    double limit, wanted;
    call_fn call;
    double (*error)(const layer *l);
} layer_kind;

static seqpar_mat mat(const layer *l, int n) { return (seqpar_mat){l->x[n], l->width}; }

static void norm_call(void *user) {
    layer *l = user;
    seqpar_rmsnorm_args a = {mat(l, 1), mat(l, 0), l->rstd, l->gain, l->rows, l->width, eps};
    device->rmsnorm(device, &a, NULL);
}

static double rstd_of(const layer *l, const float *x) {
    double sum = 0;
    int64_t i;
    for (i = 0; i < l->width; i++) sum += (double)x[i] * x[i];
    return 1 / sqrt(sum / (double)l->width + eps);
}

static double norm_error(const layer *l) {
    distance d = {0, 0};
    int64_t t, i;
    for (t = 0; t < l->rows; t++) {
        const float *x = l->old[0] + t * l->width;
        double r = rstd_of(l, x);
        for (i = 0; i < l->width; i++)
            compare(&d, l->x[1][t * l->width + i], x[i] * r * l->gain[i]);
    }
    return relative(&d);
}

/* x[0] dx, x[1] x, x[2] dy */
static void norm_grad_call(void *user) {
    layer *l = user;
    seqpar_rmsnorm_grad_args a = {
        {l->fold.program, l->fold.program_count, l->fold.depth_high, NULL, 0, l->dgain},
        l->leaves,
        mat(l, 0),
        mat(l, 2),
        mat(l, 1),
        l->rstd,
        l->gain,
        l->rows,
        l->width};
    device->rmsnorm_grad(device, &a, NULL);
}

static double norm_grad_error(const layer *l) {
    distance d = {0, 0}, dg = {0, 0};
    double *dgain = calloc((size_t)l->width, sizeof *dgain), e;
    int64_t t, i;
    for (t = 0; t < l->rows; t++) {
        const float *dx = l->old[0] + t * l->width, *x = l->old[1] + t * l->width;
        const float *dy = l->old[2] + t * l->width;
        double r = rstd_of(l, x), dot = 0;
        for (i = 0; i < l->width; i++) dot += (double)dy[i] * l->gain[i] * x[i];
        for (i = 0; i < l->width; i++) {
            compare(&d, l->x[0][t * l->width + i],
                    dx[i] + r * l->gain[i] * dy[i] - x[i] * r * r * r * dot / (double)l->width);
            dgain[i] += dy[i] * x[i] * r;
        }
    }
    for (i = 0; i < l->width; i++) compare(&dg, l->dgain[i], dgain[i]);
    e = relative(&dg) > relative(&d) ? relative(&dg) : relative(&d);
    free(dgain);
    return e;
}

static void rope_call(void *user) {
    layer *l = user;
    seqpar_rope_args a = {mat(l, 0), l->cosine, l->sine,  l->positions,
                          l->rows,   HEADS,     HEAD_DIM, 0};
    device->rope(device, &a, NULL);
}

static double rope_error(const layer *l) {
    enum { HALF = HEAD_DIM / 2 };
    distance d = {0, 0};
    int64_t t, h, i;
    for (t = 0; t < l->rows; t++)
        for (h = 0; h < HEADS; h++)
            for (i = 0; i < HALF; i++) {
                int64_t at = t * l->width + h * HEAD_DIM + i;
                double c = l->cosine[l->positions[t] * HALF + i];
                double s = l->sine[l->positions[t] * HALF + i], p = l->old[0][at];
                double q = l->old[0][at + HALF];
                compare(&d, l->x[0][at], p * c - q * s);
                compare(&d, l->x[0][at + HALF], q * c + p * s);
            }
    return relative(&d);
}

/* x[0] gate, x[1] up, x[2] y or dy */
static void swiglu_call(void *user) {
    layer *l = user;
    seqpar_swiglu_args a = {mat(l, 2), mat(l, 0), mat(l, 1), l->rows, l->width};
    device->swiglu(device, &a, NULL);
}

static double swiglu_error(const layer *l) {
    distance d = {0, 0};
    int64_t i;
    for (i = 0; i < l->rows * l->width; i++)
        compare(&d, l->x[2][i], l->old[0][i] / (1 + exp(-(double)l->old[0][i])) * l->old[1][i]);
    return relative(&d);
}

static void swiglu_grad_call(void *user) {
    layer *l = user;
    seqpar_swiglu_grad_args a = {mat(l, 2), mat(l, 0), mat(l, 1), l->rows, l->width};
    device->swiglu_grad(device, &a, NULL);
}

static double swiglu_grad_error(const layer *l) {
    distance d = {0, 0};
    int64_t i;
    for (i = 0; i < l->rows * l->width; i++) {
        double g = l->old[0][i], u = l->old[1][i], dy = l->old[2][i], s = 1 / (1 + exp(-g));
        compare(&d, l->x[0][i], dy * u * s * (1 + g * (1 - s)));
        compare(&d, l->x[1][i], dy * g * s);
    }
    return relative(&d);
}

static void head(layer *l, int gradient, int entropy) {
    seqpar_vocab_softmax_args a = {.logits = mat(l, 0),
                                   .rows = l->rows,
                                   .vocab = l->width,
                                   .targets = l->positions,
                                   .logp = l->logp,
                                   .entropy = entropy ? l->entropy : NULL,
                                   .dlogp = l->seeds,
                                   .gradient = gradient};
    device->vocab_softmax(device, &a, NULL);
}

static void head_call(void *user) { head(user, 0, 0); }
static void head_entropy_call(void *user) { head(user, 0, 1); }
static void head_grad_call(void *user) { head(user, 1, 0); }
static double head_distance(const layer *l, int gradient, int entropy) {
    distance d = {0, 0}, dx = {0, 0};
    int64_t t, j;
    for (t = 0; t < l->rows; t++) {
        const float *x = l->old[0] + t * l->width;
        double top = x[0], sum = 0, moment = 0, lse;
        for (j = 0; j < l->width; j++) top = x[j] > top ? x[j] : top;
        for (j = 0; j < l->width; j++) {
            double p = exp(x[j] - top);
            sum += p;
            moment += p * (x[j] - top);
        }
        lse = top + log(sum);
        compare(&d, l->logp[t], x[l->positions[t]] - lse);
        if (entropy) compare(&d, l->entropy[t], log(sum) - moment / sum);
        for (j = 0; gradient && j < l->width; j++)
            compare(&dx, l->x[0][t * l->width + j],
                    l->seeds[t] * ((j == l->positions[t]) - exp(x[j] - lse)));
    }
    return gradient && !(relative(&dx) < relative(&d)) ? relative(&dx) : relative(&d);
}

static double head_error(const layer *l) { return head_distance(l, 0, 0); }
static double head_entropy_error(const layer *l) { return head_distance(l, 0, 1); }
static double head_grad_error(const layer *l) { return head_distance(l, 1, 0); }

/* x[0] p, x[1] m, x[2] v, x[3] g */
static const seqpar_adamw_args adamw_step = {
    .t = 3, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .decay = 0.1, .clip = 0.5};
static void adamw_call(void *user) {
    layer *l = user;
    seqpar_adamw_args a = adamw_step;
    a.p = l->x[0];
    a.m = l->x[1];
    a.v = l->x[2];
    a.g = l->x[3];
    a.count = l->rows * l->width;
    device->adamw(device, &a, NULL);
}

static double adamw_error(const layer *l) {
    const seqpar_adamw_args *a = &adamw_step;
    distance d[3] = {{0, 0}};
    double worst = 0;
    int64_t i;
    for (i = 0; i < l->rows * l->width; i++) {
        double g = l->old[3][i] * a->clip;
        double m = a->beta1 * l->old[1][i] + (1 - a->beta1) * g;
        double v = a->beta2 * l->old[2][i] + (1 - a->beta2) * g * g;
        double step = a->lr / (1 - pow(a->beta1, (double)a->t));
        double root = sqrt(v) / sqrt(1 - pow(a->beta2, (double)a->t));
        compare(&d[0], l->x[0][i],
                l->old[0][i] * (1 - a->lr * a->decay) - step * m / (root + a->eps));
        compare(&d[1], l->x[1][i], m);
        compare(&d[2], l->x[2][i], v);
    }
    for (i = 0; i < 3; i++)
        if (!(relative(&d[i]) <= worst)) worst = relative(&d[i]);
    return worst;
}

/* Far out, gate and up of SwiGLU's gradient change places for ever when dy is 1: numbers
   stay sound however often it runs. */
static const layer_kind kinds[] = {
    {"rmsnorm", 2, WIDTH, -1, 1, COPY, 12, {0, 0, 0}, 1e-6, 0.8, norm_call, norm_error},
    {"rmsnorm gradient",
     3,
     WIDTH,
     -1,
     1,
     GATHER,
     16,
     {0, 0, 0},
     1e-5,
     0.8,
     norm_grad_call,
     norm_grad_error},
    {"rope", 1, HEADS *HEAD_DIM, -1, 1, SCALE, 8, {0, 0, 0}, 1e-6, 0.8, rope_call, rope_error},
    {"swiglu", 3, HIDDEN, -1, 1, TRIAD, 16, {1, 1, 0}, 1e-6, 0.8, swiglu_call, swiglu_error},
    {"swiglu gradient",
     3,
     HIDDEN,
     20,
     40,
     UPDATE,
     20,
     {1, 1, 0},
     1e-6,
     0.8,
     swiglu_grad_call,
     swiglu_grad_error},
    {"loss, values", 1, VOCAB, -1, 1, READ, 4, {1, 0, 0}, 1e-6, 0.8, head_call, head_error},
    {"loss, entropy",
     1,
     VOCAB,
     -1,
     1,
     READ,
     4,
     {1, 0, 0},
     1e-6,
     0.8,
     head_entropy_call,
     head_entropy_error},
    {"loss, gradient",
     1,
     VOCAB,
     -1,
     1,
     SCALE,
     8,
     {1, 0, 0},
     1e-5,
     0.8,
     head_grad_call,
     head_grad_error},
    {"adamw", 4, WIDTH, -1, 1, UPDATE, 28, {0, 1, 1}, 1e-6, 0.9, adamw_call, adamw_error},
};

static void *floats(int64_t count) {
    return device->alloc(device, (count + 64) * (int64_t)sizeof(float));
}

/* v of AdamW must not be negative. */
static void fill_layer(layer *l, double low, double high) {
    int i;
    for (i = 0; i < l->kind->arrays; i++)
        fill_random(l->x[i], l->rows * l->width, (uint64_t)i,
                    l->kind->call == adamw_call && i == 2 ? 0 : low, high);
}

static void make_fold(layer *l) {
    int64_t count = (l->rows + LEAF - 1) / LEAF, i;
    int64_t *numbers = malloc((size_t)count * sizeof *numbers);
    l->leaves = calloc((size_t)count, sizeof *l->leaves);
    for (i = 0; i < count; i++) {
        numbers[i] = i;
        l->leaves[i] = (seqpar_piece){
            .leaf = i, .local = i * LEAF, .count = i + 1 < count ? LEAF : l->rows - i * LEAF};
    }
    seqpar_fold_init(&l->fold, numbers, count);
    for (i = 0; i < count; i++)
        seqpar_fold_push(&l->fold, (seqpar_node){.index = i}, SEQPAR_FOLD_LEAF, (int32_t)i);
    free(numbers);
}

static void layer_open(layer *l, const layer_kind *kind, int64_t footprint,
                       float *const *pool) {
    int64_t count, t;
    memset(l, 0, sizeof *l);
    l->kind = kind;
    l->width = kind->width;
    l->rows = SEQPAR__MAX(footprint / 4 / kind->arrays / l->width, 1);
    count = l->rows * l->width;
    l->count = count * kind->arrays;
    for (t = 0; t < kind->arrays; t++) {
        l->x[t] = pool[0] + t * count;
        l->old[t] = pool[1] + t * count;
    }
    l->gain = floats(l->width);
    l->dgain = floats(l->width);
    l->cosine = floats(POSITIONS * HEAD_DIM / 2);
    l->sine = floats(POSITIONS * HEAD_DIM / 2);
    l->rstd = floats(l->rows);
    l->logp = floats(l->rows);
    l->entropy = floats(l->rows);
    l->seeds = floats(l->rows);
    l->positions = floats(l->rows);
    fill_random(l->gain, l->width, 20, 0.5, 1.5);
    fill_random(l->seeds, l->rows, 21, -1, 1);
    for (t = 0; t < POSITIONS * HEAD_DIM / 2; t++) {
        double angle = (double)(t / (HEAD_DIM / 2)) *
                       pow(10000, -2.0 * (double)(t % (HEAD_DIM / 2)) / HEAD_DIM);
        l->cosine[t] = (float)cos(angle);
        l->sine[t] = (float)sin(angle);
    }
    /* the loss takes them for targets */
    for (t = 0; t < l->rows; t++)
        l->positions[t] = (int32_t)(kind->width == VOCAB ? t * 7919 % VOCAB : t % POSITIONS);
    make_fold(l);
    fill_layer(l, -1, 1);
    if (kind->call == norm_grad_call)
        for (t = 0; t < l->rows; t++) l->rstd[t] = (float)rstd_of(l, l->x[1] + t * l->width);
    memcpy(l->old[0], l->x[0], (size_t)l->count * sizeof(float));
}

static void layer_close(layer *l) {
    float *all[] = {l->gain,    l->dgain, l->cosine,
                    l->sine,    l->rstd,  l->logp,
                    l->entropy, l->seeds, (float *)l->positions};
    size_t i;
    for (i = 0; i < sizeof all / sizeof *all; i++) device->free(device, all[i]);
    seqpar_fold_free(&l->fold);
    free(l->leaves);
}

/* Its numbers as they were. By all threads: one that had to be woken would slow what comes
   next. */
static void restore_job(void *user, int64_t i, char *scratch) {
    const layer *l = user;
    int64_t each = l->count / threads, at = i * each;
    (void)scratch;
    memcpy(l->x[0] + at, l->old[0] + at,
           (size_t)(i + 1 < threads ? each : l->count - at) * sizeof(float));
}

static void restore(layer *l) { seqpar__parallel_runs(device, threads, 0, restore_job, l); }

/* The layer and its loop turn about, both on the numbers and in the memory of the layer:
   they meet the same machine and the same pages, whoever else is on it. */
enum { TURNS_ABOUT = 15 };
/* medians; ratio: bytes per second over bytes per second */
typedef struct turns {
    timing layer, stream;
    double ratio, cores;
} turns;

static turns turn_about(layer *l, const share *work, double bytes, double stream_bytes) {
    double each[2][TURNS_ABOUT], ratio[TURNS_ABOUT], cores[TURNS_ABOUT];
    double once = seconds_of(l->kind->call, l, 1);
    int64_t times = once < least_seconds && !tiny ? (int64_t)(least_seconds / once) + 1 : 1;
    int i, about = tiny ? 1 : TURNS_ABOUT;
    for (i = 0; i < about; i++) {
        each[0][i] = seconds_of(share_call, (void *)work, times);
        restore(l);
        each[1][i] = seconds_of(l->kind->call, l, times);
        cores[i] = cores_here();
        restore(l);
        ratio[i] = bytes / each[1][i] / (stream_bytes / each[0][i]);
    }
    for (i = 0; i < 2; i++) qsort(each[i], about, sizeof *each[i], rising);
    qsort(ratio, about, sizeof *ratio, rising);
    qsort(cores, about, sizeof *cores, rising);
    return (turns){{each[1][0], each[1][about / 2]},
                   {each[0][0], each[0][about / 2]},
                   ratio[about / 2],
                   cores[about / 2]};
}

static void bench_layer(report *r, const layer_kind *kind, int64_t footprint, const char *where,
                        float *const *pool) {
    const stream_kind *k = &stream_kinds[kind->stream];
    layer l;
    char shape[48];
    double error, rate, fastest, bytes, arithmetic = 0, bound;
    stream s;
    share work;
    turns t;
    int i, right;
    layer_open(&l, kind, footprint, pool);
    kind->call(&l);
    error = kind->error(&l);
    right = error <= kind->limit; /* a NaN is not */
    if (kind->low > 0)
        for (i = 0; i < kind->arrays; i++)
            fill_random(l.old[i], l.rows * l.width, (uint64_t)i, i == 2 ? 1 : kind->low,
                        i == 2 ? 1 : kind->high);
    restore(&l);
    s = stream_over(l.x[0], l.count, k);
    work = (share){&s, k->call};
    bytes = kind->bytes * (double)(l.rows * l.width);
    t = turn_about(&l, &work, bytes, k->bytes * (double)s.count);
    fastest = fastest_stream(l.x[0], l.count);
    find_costly();
    for (i = 0; i < COSTLY; i++)
        arithmetic += kind->costly[i] * costly_seconds[i] * (double)(l.rows * l.width) /
                      threads;
    rate = k->bytes * (double)s.count / t.stream.median;
    bound = fmax(t.ratio, arithmetic / t.layer.best);
    snprintf(shape, sizeof shape, "%lldx%lld", (long long)l.rows, (long long)l.width);
    printf("%-17s %-7s %7d %-12s %6.2f %10.4f %10.4f %8.1f %8.1f %-6s %9.2f %10.2f %10.2f "
           "%9.2f %7.2f %9.1e%s\n",
           kind->name, where, threads, shape, t.cores, t.layer.best * 1e3, t.layer.median * 1e3,
           bytes / t.layer.median / 1e9, rate / 1e9, k->name, t.ratio,
           bytes / fastest / t.layer.best, arithmetic / t.layer.best, bound, kind->wanted,
           error, right ? "" : "  WRONG");
    report_case(r, right,
                "\"case\": \"%s\", \"where\": \"%s\", \"threads\": %d, \"shape\": \"%s\", "
                "\"cores\": %.3f, \"best_ms\": %.6f, \"median_ms\": %.6f, \"gb_per_s\": %.3f, "
                "\"stream_gb_per_s\": %.3f, \"stream\": \"%s\", \"of_stream\": %.4f, "
                "\"of_fastest_stream\": %.4f, \"of_arithmetic\": %.4f, \"of_bound\": %.4f, "
                "\"wanted\": %.2f, \"error\": %.3e",
                kind->name, where, threads, shape, t.cores, t.layer.best * 1e3,
                t.layer.median * 1e3, bytes / t.layer.median / 1e9, rate / 1e9, k->name,
                t.ratio, bytes / fastest / t.layer.best, arithmetic / t.layer.best, bound,
                kind->wanted, right ? error : -1.0);
    layer_close(&l);
}

static void bench_place(report *r, const char *name, int64_t bytes, const char *where,
                        int count) {
    float *pool[2]; /* of all layers: new memory is slower than used memory for a while */
    size_t i;
    threads = count;
    work_clock = threads > 1 ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID;
    device = seqpar_device_cpu(threads);
    for (i = 0; i < 2; i++) {
        pool[i] = floats(SEQPAR__MAX(bytes / 4, ARRAYS * VOCAB));
        memset(pool[i], 0, (size_t)bytes);
    }
    for (i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strstr(kinds[i].name, name)) bench_layer(r, &kinds[i], bytes, where, pool);
    for (i = 0; i < 2; i++) device->free(device, pool[i]);
    seqpar_device_close(device);
}

int main(int argc, char **argv) {
    const char *name = take_arguments(argc, argv, 1) > 1 ? argv[1] : "";
    int cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    size_t i, known = 0;
    report r;
    for (i = 0; i < sizeof kinds / sizeof *kinds; i++)
        known += strstr(kinds[i].name, name) != NULL;
    if (!known) {
        fprintf(stderr, "bench_layers: no layer has '%s' in its name; there are", name);
        for (i = 0; i < sizeof kinds / sizeof *kinds; i++)
            fprintf(stderr, "%s %s", i ? ";" : "", kinds[i].name);
        fprintf(stderr, "\n");
        return 2;
    }
    report_open(&r, "layers",
                "\"device\": \"cpu\", \"vector_bytes\": %d, \"runs\": %d, \"clock\": \"of one "
                "thread its processor time, of several the wall\",",
                VECTOR, TURNS_ABOUT);
    find_costly();
    printf("layers; best and median of %d turns. In registers of one core: %.2f G exp/s, %.2f "
           "G divisions/s, %.2f G roots/s\n",
           TURNS_ABOUT, 1e-9 / costly_seconds[EXP], 1e-9 / costly_seconds[DIV],
           1e-9 / costly_seconds[ROOT]);
    printf("GB/s: bytes read, written, and fetched because they are written, medians; stream: "
           "a loop on as many threads that reads and writes likewise, counted alike;\nof "
           "stream: the median over turns in which both run one after the other; cores: how "
           "many of them arithmetic found in these turns\n\n");
    printf("%-17s %-7s %7s %-12s %6s %10s %10s %8s %8s %-6s %9s %10s %10s %9s %7s %9s\n",
           "case", "data in", "threads", "shape", "cores", "best ms", "median ms", "GB/s",
           "stream", "", "of stream", "of fastest", "of arithm.", "of bound", "wanted",
           "error");
    if (tiny) bench_place(&r, name, 384 << 10, "cache", 2);
    if (!tiny && cores > 1) bench_place(&r, name, 192 << 20, "memory", cores);
    if (!tiny) bench_place(&r, name, 192 << 20, "memory", 1);
    bench_place(&r, name, 384 << 10, "cache", 1);
    return report_close(&r);
}
