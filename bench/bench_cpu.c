/* SPDX-License-Identifier: MIT OR Unlicense */
/* Speed of the fast CPU device on one thread, as a share of what this machine can do and
   beside other people's: products and attention. Every case is checked before it is timed.
   Prints a table and writes the same to build/bench/cpu.json. */
#define SEQPAR_CHECK_IMPLEMENTATION
#include "bench.h"
#include "seqpar_check.h"
#include "attention.h"

/* ---- the machine ---- */

enum { CHAINS = 12, TURNS = 20000 }; /* enough independent sums to hide the latency of one */
static volatile float peak_sink;
static double peak;

/* x = x a + b over and over in registers: the compiler makes it one fused instruction where
   there is one. */
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

/* The best seen so far; asked for before every case, since a neighbour on the same core can
   halve it for a while. */
static void find_peak(void) {
    double flops = 2.0 * CHAINS * TURNS * (VECTOR / 4) / measure(peak_loop, NULL).best;
    if (flops > peak) peak = flops;
}

/* ---- peers: processes that print the seconds of the same work, one thread, processor time
   ---- */

#if defined(__AVX512F__)
#define CORE_TYPE "SkylakeX"
#elif defined(__AVX2__)
#define CORE_TYPE "Haswell"
#else
#define CORE_TYPE "Prescott"
#endif

/* OpenBLAS may not know a new processor, so it is asked as it comes and with its core type
   forced. */
static const char *const blas_names[] = {"OpenBLAS", "OpenBLAS " CORE_TYPE, "oneDNN", "MKL"};
static const char *const blas_commands[] = {
    "build/peer_blas openblas", "OPENBLAS_CORETYPE=" CORE_TYPE " build/peer_blas openblas",
    "build/peer_blas onednn", "build/peer_blas mkl"};
enum { LIBRARIES = 4, PEERS };
static char peer_names[PEERS][40];

/* NaN where one is not installed; fastest -1: none is */
typedef struct peer {
    double seconds[PEERS];
    int fastest;
} peer;

/* The first two numbers that the command prints. */
static void peer_run(const char *command, double number[2]) {
    FILE *out = popen(command, "r");
    int read = out ? fscanf(out, "%lf %lf", &number[0], &number[1]) : 0;
    if ((out && pclose(out)) || read != 2) number[0] = number[1] = NAN;
}

/* Product, or attention's passes: the libraries one after the other, for attention PyTorch
   after them. Nobody is asked where times mean nothing. */
static void ask_peers(peer p[2], const char *work, int attention, int64_t a, int64_t b,
                      int64_t c) {
    char command[240];
    int i, pass;
    for (i = 0; i < PEERS; i++) {
        double number[2] = {NAN, NAN};
        if (i < LIBRARIES)
            snprintf(command, sizeof command, "%s %s %lld %lld %lld 0.2 2>/dev/null",
                     blas_commands[i], work, (long long)a, (long long)b, (long long)c);
        else
            snprintf(command, sizeof command,
                     "%s bench/peer_torch.py %lld %lld %lld 0.3 2>/dev/null",
                     getenv("PYTHON") ? getenv("PYTHON") : "python3", (long long)a,
                     (long long)b, (long long)c);
        if (!tiny && (i < LIBRARIES || attention)) peer_run(command, number);
        for (pass = 0; pass < 2; pass++) p[pass].seconds[i] = number[pass];
    }
    for (pass = 0; pass < 2; pass++)
        for (p[pass].fastest = -1, i = 0; i < PEERS; i++)
            if (p[pass].seconds[i] == p[pass].seconds[i] &&
                (p[pass].fastest < 0 || p[pass].seconds[i] < p[pass].seconds[p[pass].fastest]))
                p[pass].fastest = i;
}

/* ---- one line of the table ---- */

static void add_line(report *r, const char *name, const char *shape, double flops, timing t,
                     const peer *p, double error, double limit) {
    double best = flops / t.best / 1e9, median = flops / t.median / 1e9;
    int right = error <= limit, i, at = p ? p->fastest : -1; /* a NaN is not */
    char ratio[16] = "-", others[400] = "", text[32];
    if (at >= 0) snprintf(ratio, sizeof ratio, "%.2f", p->seconds[at] / t.best);
    for (i = 0; p && i < PEERS; i++)
        snprintf(others + strlen(others), sizeof others - strlen(others),
                 ", \"%s_over_ours\": %s", peer_names[i],
                 number_or_null(text, sizeof text, p->seconds[i] / t.best));
    if (!r->lines)
        printf("%-18s %-26s %10s %10s %9s %9s %9s  %-19s %8s\n", "case", "shape", "best ms",
               "median ms", "GF/s", "of peak", "peer/ours", "fastest peer", "error");
    printf("%-18s %-26s %10.3f %10.3f %9.1f %8.1f%% %9s  %-19s %8.1e%s\n", name, shape,
           t.best * 1e3, t.median * 1e3, best, 100 * best * 1e9 / peak, ratio,
           at < 0 ? "-" : peer_names[at], error, right ? "" : "  WRONG");
    report_case(
        r, right,
        "\"case\": \"%s\", \"shape\": \"%s\", \"best_ms\": %.6f, \"median_ms\": %.6f, "
        "\"gflops\": %.3f, \"gflops_median\": %.3f, \"share_of_peak\": %.4f%s, \"error\": %.3e",
        name, shape, t.best * 1e3, t.median * 1e3, best, median, best * 1e9 / peak, others,
        right ? error : -1.0);
}

/* ---- products ---- */

enum { CHECKED = 48 };
typedef struct product {
    seqpar_device *device;
    seqpar_matmul_args args;
    float *y, *x, *w;
} product;

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
            for (i = 0; i < a->in; i++)
                sum += (double)p->x[row * a->in + i] *
                       (a->transposed ? p->w[i * a->out + o] : p->w[o * a->in + i]);
            compare(&d, p->y[row * a->out + o], sum);
        }
    }
    return relative(&d);
}

static void bench_product(report *r, seqpar_device *device, int64_t rows, int64_t in,
                          int64_t out, int transposed) {
    product p = {.device = device,
                 .x = random_floats(rows * in, 1),
                 .w = random_floats(in * out, 2),
                 .y = random_floats(rows * out, 3)};
    char shape[64];
    double error;
    peer others[2];
    timing t;
    p.args = (seqpar_matmul_args){
        {p.y, out}, {p.x, in}, {p.w, transposed ? out : in}, rows, out, in, transposed, 0};
    find_peak();
    product_call(&p);
    error = product_error(&p);
    snprintf(shape, sizeof shape, "%lldx%lldx%lld", (long long)rows, (long long)in,
             (long long)out);
    t = measure(product_call, &p);
    if (!transposed) ask_peers(others, "product", 0, rows, out, in);
    add_line(r, transposed ? "product x.W" : "product x.W^T", shape,
             2.0 * (double)rows * (double)in * (double)out, measure_again(t, product_call, &p),
             transposed ? NULL : others, error, 1e-5);
    free(p.x);
    free(p.w);
    free(p.y);
}

/* ---- attention ---- */

/* The farthest of some tensors from those of the reference device, which computes in fp64 by
   naive loops. */
static double attention_error(const attention *a, const attention *reference, int first,
                              int last) {
    double worst = 0;
    int i;
    for (i = first; i <= last; i++) {
        int64_t count = a->row.tokens * tensor_width(&a->desc, i), n;
        double *got = malloc((size_t)count * sizeof *got);
        double *want = malloc((size_t)count * sizeof *want), e;
        distance d = {0, 0};
        seqpar_device_read(a->device, got, a->x[i], 0, count, a->device->storage);
        seqpar_device_read(reference->device, want, reference->x[i], 0, count,
                           reference->device->storage);
        for (n = 0; n < count; n++) compare(&d, got[n], want[n]);
        e = relative(&d);
        if (!(e <= 1e-5)) fprintf(stderr, "%s is %.2e off\n", tensor_names[i], e);
        if (worst == worst && !(e <= worst)) worst = e; /* a NaN stays */
        free(got);
        free(want);
    }
    return worst;
}

static void bench_attention(report *r, int64_t tokens, seqpar_attn_desc desc) {
    attention fast, slow;
    seqpar_attn_cost cost;
    char shape[64];
    double error[2];
    peer others[2];
    timing t[2];
    seqpar_comm *own = seqpar_comm_self(), *other = seqpar_comm_self(); /* a device each */
    find_peak();
    attention_open(&fast, own, seqpar_device_cpu(1), tokens, CHUNK, desc);
    attention_open(&slow, other, seqpar_device_reference(), tokens, CHUNK, desc);
    forward_call(&fast);
    backward_call(&fast);
    forward_call(&slow);
    backward_call(&slow);
    error[0] = attention_error(&fast, &slow, OUT, LSE);
    error[1] = attention_error(&fast, &slow, DQ, DV);
    seqpar_attn_cost_of(&fast.ctx, fast.attn, &cost, NULL);
    snprintf(shape, sizeof shape, "S=%lld d=%lld %lld/%lld %s", (long long)tokens,
             (long long)desc.head_dim, (long long)desc.heads, (long long)desc.kv_heads,
             desc.full ? "full" : "causal");
    t[0] = measure(forward_call, &fast);
    t[1] = measure(backward_call, &fast);
    if (desc.heads == 1) ask_peers(others, "attention", 1, tokens, desc.head_dim, !desc.full);
    add_line(r, "attention forward", shape, (double)cost.forward_flops,
             measure_again(t[0], forward_call, &fast), desc.heads == 1 ? &others[0] : NULL,
             error[0], 1e-5);
    add_line(r, "attention backward", shape, (double)cost.backward_flops,
             measure_again(t[1], backward_call, &fast), desc.heads == 1 ? &others[1] : NULL,
             error[1], 1e-5);
    attention_close(&fast);
    attention_close(&slow);
    seqpar_comm_free(own);
    seqpar_comm_free(other);
}

/* Which peers are there, said once; their names for products are those of what attention is
   put together from. */
static void name_peers(void) {
    peer p[2];
    int i;
    for (i = 0; i < PEERS; i++)
        snprintf(peer_names[i], sizeof peer_names[i], "%s",
                 i < LIBRARIES ? blas_names[i] : "PyTorch");
    ask_peers(p, "product", 0, 32, 32, 32);
    printf("peers:");
    for (i = 0; i < LIBRARIES; i++)
        printf(" %s %s,", peer_names[i], p[0].seconds[i] > 0 ? "installed" : "missing");
    ask_peers(p, "attention", 1, 64, 16, 1);
    printf(" PyTorch %s\n", p[0].seconds[LIBRARIES] > 0 ? "installed" : "missing");
    printf("attention: the name of a library stands for the structure of PyTorch's kernel "
           "(blocks of scores written out, running softmax) over its products; PyTorch for "
           "scaled_dot_product_attention itself\n");
}

/* bench_cpu [long]: also a long document, whose check alone takes minutes */
int main(int argc, char **argv) {
    static const int64_t products[][3] = {{256, 256, 256},
                                          {512, 512, 512},
                                          {1024, 1024, 1024},
                                          {2048, 2048, 2048},
                                          {8192, 128, 384}};
    static const int64_t lengths[] = {768, 2304, 6144};
    int left = take_tiny(argc, argv), with_long = left > 1 && !strcmp(argv[1], "long");
    int64_t lengths_run = size_or_tiny(take_arguments(left, argv, with_long) > 1 ? 3 : 2, 1);
    int64_t products_run = size_or_tiny(sizeof products / sizeof *products, 1);
    seqpar_device *device = seqpar_device_cpu(1);
    report r;
    int64_t i, dim, full, length;
    report_open(&r, "cpu",
                "\"device\": \"%s\", \"threads\": 1, \"vector_bytes\": %d, \"runs\": %d, "
                "\"clock\": \"thread processor time\",",
                device->name, VECTOR, RUNS);
    find_peak();
    printf("fused multiply-add in registers: %.1f GF/s on one thread, vectors of %d bytes; "
           "best and median of %d runs\n",
           peak / 1e9, VECTOR, RUNS);
    name_peers();
    printf("FLOPs of a backward pass: 10/4 of forward\n\n");
    for (i = 0; i < products_run; i++)
        bench_product(&r, device, products[i][0], products[i][1], products[i][2], 0);
    for (i = 0; i < products_run; i++)
        bench_product(&r, device, products[i][0], products[i][1], products[i][2], 1);
    for (length = 0; length < lengths_run; length++)
        for (dim = 64; dim <= 128; dim *= 2)
            for (full = 0; full < 2; full++)
                bench_attention(
                    &r, lengths[length],
                    (seqpar_attn_desc){
                        .heads = 1, .kv_heads = 1, .head_dim = dim, .full = (int)full});
    for (dim = 64; dim <= 128; dim *= 2)
        bench_attention(&r, 768,
                        (seqpar_attn_desc){.heads = 8, .kv_heads = 2, .head_dim = dim});
    seqpar_device_close(device);
    return report_close(&r);
}
