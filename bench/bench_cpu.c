/* SPDX-License-Identifier: MIT OR Unlicense */
/* Speed of the fast CPU device on one thread, as a share of what this machine can do: products and attention. Every case is
   checked before it is timed. Prints a table and writes the same to build/bench/cpu.json. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include <sys/stat.h>
#include <time.h>

enum { RUNS = 9, CHECKED = 48 };
static const double least_seconds = 0.01; /* short cases are repeated within a run */

typedef struct timing { double best, median; } timing; /* seconds of one call */
typedef struct report { FILE *json; double peak; int lines, wrong; } report;
typedef void (*call_fn)(void *user);

/* Processor time of this thread, which does all the work: what else runs on the machine takes no part in it. */
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int rising(const void *a, const void *b) { return *(const double *)a < *(const double *)b ? -1 : *(const double *)a > *(const double *)b; }

static double seconds_of(call_fn call, void *user, int64_t times) {
    double began = now();
    int64_t i;
    for (i = 0; i < times; i++) call(user);
    return (now() - began) / (double)times;
}

static timing measure(call_fn call, void *user) {
    double each[RUNS], once = seconds_of(call, user, 1);
    int64_t times = once < least_seconds ? (int64_t)(least_seconds / once) + 1 : 1;
    int i;
    for (i = 0; i < RUNS; i++) each[i] = seconds_of(call, user, times);
    qsort(each, RUNS, sizeof *each, rising);
    return (timing){each[0], each[RUNS / 2]};
}

/* ---- the machine ---- */

#if defined(__AVX512F__)
enum { VECTOR = 64 };
#elif defined(__AVX__)
enum { VECTOR = 32 };
#else
enum { VECTOR = 16 };
#endif
typedef float vector __attribute__((vector_size(VECTOR)));
enum { CHAINS = 12, TURNS = 20000 }; /* enough independent sums to hide the latency of one */
static volatile float peak_sink;

/* x = x a + b over and over in registers: the compiler makes it one fused instruction where there is one. */
static void peak_loop(void *user) {
    vector x[CHAINS], a = {0}, b = {0};
    int i, j;
    (void)user;
    for (i = 0; i < CHAINS; i++) x[i] = (vector){0} + (float)i;
    a += 0.999f;
    b += 1e-3f;
    for (j = 0; j < TURNS; j++) {
        #pragma GCC unroll 12
        for (i = 0; i < CHAINS; i++) x[i] = x[i] * a + b;
        __asm__ volatile("" : "+x"(a), "+x"(b)); /* a turn is not to be worked out beforehand */
    }
    for (i = 1; i < CHAINS; i++) x[0] += x[i];
    peak_sink = x[0][0];
}

/* The best seen so far; asked for before every case, since a neighbour on the same core can halve it for a while. */
static void find_peak(report *r) {
    double flops = 2.0 * CHAINS * TURNS * (VECTOR / 4) / measure(peak_loop, NULL).best;
    if (flops > r->peak) r->peak = flops;
}

/* ---- peers: processes that print the seconds of the same work, one thread, processor time ---- */

#if defined(__AVX512F__)
#define CORE_TYPE "SkylakeX"
#elif defined(__AVX2__)
#define CORE_TYPE "Haswell"
#else
#define CORE_TYPE "Prescott"
#endif

/* Number `field` of what the command prints; NaN where the peer is not installed. */
static double peer_seconds(const char *command, int field) {
    double number[2] = {NAN, NAN};
    FILE *out = popen(command, "r");
    int read = out ? fscanf(out, "%lf %lf", &number[0], &number[1]) : 0;
    if (out && pclose(out)) read = 0;
    return read == 2 ? number[field] : NAN;
}

/* OpenBLAS as it comes and with its core type forced (it may not know a new processor): the faster of the two. */
static double blas_seconds(int64_t rows, int64_t out, int64_t in) {
    char command[160];
    double plain, forced;
    snprintf(command, sizeof command, "build/peer_blas %lld %lld %lld 0.2 2>/dev/null", (long long)rows, (long long)out, (long long)in);
    plain = peer_seconds(command, 0);
    snprintf(command, sizeof command, "OPENBLAS_CORETYPE=" CORE_TYPE " build/peer_blas %lld %lld %lld 0.2 2>/dev/null", (long long)rows, (long long)out, (long long)in);
    forced = peer_seconds(command, 0);
    return forced < plain ? forced : plain;
}

static double torch_seconds(int64_t tokens, int64_t dim, int causal, int backward) {
    char command[200];
    snprintf(command, sizeof command, "%s bench/peer_torch.py %lld %lld %d 0.3 2>/dev/null", getenv("PYTHON") ? getenv("PYTHON") : "python3", (long long)tokens, (long long)dim, causal);
    return peer_seconds(command, backward);
}

/* ---- one line of the table ---- */

/* Runs the case again after its peer, so that neither has the quieter machine. */
static timing measure_again(timing first, call_fn call, void *user) {
    timing second = measure(call, user);
    return second.best < first.best ? second : first;
}

static void add_line(report *r, const char *name, const char *shape, double flops, timing t, double peer, double error, double limit) {
    char ratio[16] = "-";
    if (peer == peer) snprintf(ratio, sizeof ratio, "%.2f", peer / t.best);
    double best = flops / t.best / 1e9, median = flops / t.median / 1e9;
    int right = error <= limit; /* a NaN is not */
    if (!r->lines++) printf("%-18s %-26s %10s %10s %9s %9s %9s %9s\n", "case", "shape", "best ms", "median ms", "GF/s", "of peak", "peer/ours", "error");
    printf("%-18s %-26s %10.3f %10.3f %9.1f %8.1f%% %9s %9.1e%s\n", name, shape, t.best * 1e3, t.median * 1e3, best, 100 * best * 1e9 / r->peak, ratio, error, right ? "" : "  WRONG");
    fprintf(r->json, "%s\n    {\"case\": \"%s\", \"shape\": \"%s\", \"best_ms\": %.6f, \"median_ms\": %.6f, \"gflops\": %.3f, \"gflops_median\": %.3f, \"share_of_peak\": %.4f, \"peer_over_ours\": %.4f, \"error\": %.3e, \"correct\": %s}",
            r->lines > 1 ? "," : "", name, shape, t.best * 1e3, t.median * 1e3, best, median, best * 1e9 / r->peak, peer == peer ? peer / t.best : 0.0, right ? error : -1.0, right ? "true" : "false");
    r->wrong += !right;
    fflush(stdout);
}

static float *random_floats(int64_t count, uint64_t stream) {
    float *x = malloc((size_t)count * sizeof *x);
    int64_t i;
    for (i = 0; i < count; i++) x[i] = (float)(2 * seqpar_random_uniform(1, stream, (uint64_t)i) - 1);
    return x;
}

/* Relative L2 distance; NaN stays NaN. */
typedef struct distance { double difference, size; } distance;
static void compare(distance *d, double got, double want) {
    d->difference += (got - want) * (got - want);
    d->size += want * want;
}
static double relative(const distance *d) { return sqrt(d->difference / d->size); }

/* ---- products ---- */

typedef struct product { seqpar_device *device; seqpar_matmul_args args; float *y, *x, *w; } product;
static void product_call(void *user) {
    product *p = user;
    p->device->matmul(p->device, &p->args, NULL);
}

/* Some rows, first and last among them, by a double loop. */
static double product_error(const product *p) {
    const seqpar_matmul_args *a = &p->args;
    distance d = {0, 0};
    int64_t n, o, i;
    for (n = 0; n < CHECKED; n++) {
        int64_t row = n * (a->rows - 1) / (CHECKED - 1);
        for (o = 0; o < a->out; o++) {
            double sum = 0;
            for (i = 0; i < a->in; i++) sum += (double)p->x[row * a->in + i] * (a->transposed ? p->w[i * a->out + o] : p->w[o * a->in + i]);
            compare(&d, p->y[row * a->out + o], sum);
        }
    }
    return relative(&d);
}

static void bench_product(report *r, seqpar_device *device, int64_t rows, int64_t in, int64_t out, int transposed) {
    product p = {.device = device, .x = random_floats(rows * in, 1), .w = random_floats(in * out, 2), .y = random_floats(rows * out, 3)};
    char shape[64];
    double error, peer;
    timing t;
    p.args = (seqpar_matmul_args){{p.y, out}, {p.x, in}, {p.w, transposed ? out : in}, rows, out, in, transposed, 0};
    find_peak(r);
    product_call(&p);
    error = product_error(&p);
    snprintf(shape, sizeof shape, "%lldx%lldx%lld", (long long)rows, (long long)in, (long long)out);
    t = measure(product_call, &p);
    peer = transposed ? NAN : blas_seconds(rows, out, in);
    add_line(r, transposed ? "product x.W" : "product x.W^T", shape, 2.0 * (double)rows * (double)in * (double)out, measure_again(t, product_call, &p), peer, error, 1e-5);
    free(p.x); free(p.w); free(p.y);
}

/* ---- attention: one document, chunks of 128 ---- */

enum { CHUNK = 128 };
typedef struct attention { seqpar_ctx ctx; seqpar_comm *self; seqpar_device *device; seqpar_attn *attn; seqpar_row row; int64_t cu[2], tokens; seqpar_attn_desc desc; void *x[9]; seqpar_attn_io io; } attention;
static const char *const tensor_names[9] = {"q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv"};

static void forward_call(void *user) {
    attention *a = user;
    seqpar_attn_forward(&a->ctx, a->attn, &a->io);
}
static void backward_call(void *user) {
    attention *a = user;
    seqpar_attn_backward(&a->ctx, a->attn, &a->io);
}

static int64_t tensor_size(const attention *a, int tensor) {
    int of_keys = tensor == 1 || tensor == 2 || tensor >= 7;
    return a->tokens * (of_keys ? a->desc.kv_heads : a->desc.heads) * (tensor == 5 ? 1 : a->desc.head_dim);
}

static void attention_open(attention *a, seqpar_device *device, int64_t tokens, seqpar_attn_desc desc) {
    int i;
    memset(a, 0, sizeof *a);
    a->tokens = tokens;
    a->desc = desc;
    a->cu[1] = tokens;
    a->row = (seqpar_row){.tokens = tokens, .padded = tokens, .chunks = tokens / CHUNK, .docs = 1, .cu_seqlens = a->cu};
    a->self = seqpar_comm_self();
    a->device = device;
    if (seqpar_ctx_open(&a->ctx, a->self, device, 1) || seqpar_attn_open(&a->ctx, &a->attn, &a->row, 1, &desc)) { fprintf(stderr, "%s\n", a->self->error->text); exit(1); }
    for (i = 0; i < 9; i++) {
        float *values = random_floats(tensor_size(a, i), (uint64_t)i + 10);
        int64_t n;
        a->x[i] = device->alloc(device, tensor_size(a, i) * seqpar_dtype_bytes(device->storage));
        for (n = 0; n < tensor_size(a, i); n++) { double x = values[n]; seqpar_device_write(device, a->x[i], n, &x, 1); }
        free(values);
    }
    a->io = (seqpar_attn_io){.q = a->x[0], .k = a->x[1], .v = a->x[2], .out = a->x[4], .lse = a->x[5], .dout = a->x[3], .dq = a->x[6], .dk = a->x[7], .dv = a->x[8]};
}

static void attention_close(attention *a) {
    int i;
    for (i = 0; i < 9; i++) a->device->free(a->device, a->x[i]);
    seqpar_attn_close(&a->ctx, a->attn);
    seqpar_ctx_close(&a->ctx);
    seqpar_comm_free(a->self);
    seqpar_device_close(a->device);
}

/* The farthest of some tensors from those of the reference device, which computes in fp64 by naive loops. */
static double attention_error(const attention *a, const attention *reference, int first, int last) {
    double worst = 0;
    int i;
    for (i = first; i <= last; i++) {
        int64_t count = tensor_size(a, i), n;
        double *got = malloc((size_t)count * sizeof *got), *want = malloc((size_t)count * sizeof *want), e;
        distance d = {0, 0};
        seqpar_device_read(a->device, got, a->x[i], 0, count);
        seqpar_device_read(reference->device, want, reference->x[i], 0, count);
        for (n = 0; n < count; n++) compare(&d, got[n], want[n]);
        e = relative(&d);
        if (!(e <= 1e-5)) fprintf(stderr, "%s is %.2e off\n", tensor_names[i], e);
        if (!(e <= worst)) worst = e;
        free(got);
        free(want);
    }
    return worst;
}

static void bench_attention(report *r, int64_t tokens, seqpar_attn_desc desc) {
    attention fast, slow;
    seqpar_attn_cost cost;
    char shape[64];
    double error[2], peer[2] = {NAN, NAN};
    timing t[2];
    int i;
    find_peak(r);
    attention_open(&fast, seqpar_device_cpu(1), tokens, desc);
    attention_open(&slow, seqpar_device_reference(), tokens, desc);
    forward_call(&fast); backward_call(&fast);
    forward_call(&slow); backward_call(&slow);
    error[0] = attention_error(&fast, &slow, 4, 5);
    error[1] = attention_error(&fast, &slow, 6, 8);
    seqpar_attn_cost_of(&fast.ctx, fast.attn, &cost, NULL);
    snprintf(shape, sizeof shape, "S=%lld d=%lld %lld/%lld %s", (long long)tokens, (long long)desc.head_dim, (long long)desc.heads, (long long)desc.kv_heads, desc.full ? "full" : "causal");
    t[0] = measure(forward_call, &fast);
    t[1] = measure(backward_call, &fast);
    if (desc.heads == 1) for (i = 0; i < 2; i++) peer[i] = torch_seconds(tokens, desc.head_dim, !desc.full, i);
    add_line(r, "attention forward", shape, (double)cost.forward_flops, measure_again(t[0], forward_call, &fast), peer[0], error[0], 1e-5);
    add_line(r, "attention backward", shape, (double)cost.backward_flops, measure_again(t[1], backward_call, &fast), peer[1], error[1], 1e-5);
    attention_close(&fast);
    attention_close(&slow);
}

/* bench_cpu long: also a long document, whose check alone takes minutes */
int main(int argc, char **argv) {
    static const int64_t products[][3] = {{256, 256, 256}, {512, 512, 512}, {1024, 1024, 1024}, {2048, 2048, 2048}, {8192, 128, 384}};
    static const int64_t lengths[] = {768, 2304, 6144};
    int64_t dim, full, length, longest = argc > 1 && !strcmp(argv[1], "long") ? 3 : 2;
    seqpar_device *device = seqpar_device_cpu(1);
    report r = {0};
    size_t i;
    mkdir("build", 0777);
    mkdir("build/bench", 0777);
    r.json = fopen("build/bench/cpu.json", "w");
    if (!r.json) { perror("build/bench/cpu.json"); return 1; }
    find_peak(&r);
    printf("fused multiply-add in registers: %.1f GF/s on one thread, vectors of %d bytes; best and median of %d runs\n", r.peak / 1e9, VECTOR, RUNS);
    printf("peers: OpenBLAS for products (%s), PyTorch's scaled_dot_product_attention for attention (%s); FLOPs of a backward pass: 14/4 of forward, as computed here (10/4 is the usual count)\n\n",
           blas_seconds(32, 32, 32) > 0 ? "the faster of its core types" : "not installed", torch_seconds(32, 16, 1, 0) > 0 ? "installed" : "not installed");
    fprintf(r.json, "{\n  \"device\": \"%s\", \"threads\": 1, \"vector_bytes\": %d, \"runs\": %d, \"clock\": \"thread processor time\",\n  \"cases\": [", device->name, VECTOR, RUNS);
    for (i = 0; i < sizeof products / sizeof *products; i++) bench_product(&r, device, products[i][0], products[i][1], products[i][2], 0);
    for (i = 0; i < sizeof products / sizeof *products; i++) bench_product(&r, device, products[i][0], products[i][1], products[i][2], 1);
    for (length = 0; length < longest; length++)
        for (dim = 64; dim <= 128; dim *= 2)
            for (full = 0; full < 2; full++) bench_attention(&r, lengths[length], (seqpar_attn_desc){.heads = 1, .kv_heads = 1, .head_dim = dim, .full = (int)full});
    for (dim = 64; dim <= 128; dim *= 2) bench_attention(&r, 768, (seqpar_attn_desc){.heads = 8, .kv_heads = 2, .head_dim = dim});
    fprintf(r.json, "\n  ],\n  \"peak_gflops\": %.3f\n}\n", r.peak / 1e9);
    seqpar_device_close(device);
    if (fclose(r.json)) { perror("build/bench/cpu.json"); return 1; }
    printf("\n%d of %d cases are correct; the numbers are in build/bench/cpu.json\n", r.lines - r.wrong, r.lines);
    return r.wrong != 0;
}
