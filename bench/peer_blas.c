/* SPDX-License-Identifier: MIT OR Unlicense */
/* peer_blas.c - seconds that other people's matrix products take, one thread, for bench_cpu to
   compare with.
 *
 *     peer_blas LIBRARY product ROWS OUT IN SECONDS             y (rows, out) = x (rows, in) . W^T
 *     peer_blas LIBRARY attention TOKENS DIM CAUSAL SECONDS     forward and backward
 *
 * prints the best seconds (of both passes for attention) and the relative error. LIBRARY:
 * openblas, onednn or mkl, looked up at run time; where it is missing the exit code is 3, and
 * the table says so. SEQPAR_MKL names MKL's libmkl_rt, if it lies elsewhere. A process of its
 * own, because the core type of OpenBLAS is read when the library is loaded.
 *
 * Attention has the structure of PyTorch's fused CPU kernel (blocks of 256 queries and 512
 * keys, scores of a block written out, running softmax; backward by five products) over the
 * library's products: a stand-in where PyTorch is not installed. */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void (*cblas_fn)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                         const float *a, int lda, const float *b, int ldb, float beta, float *c,
                         int ldc);
typedef int (*onednn_fn)(char trans_a, char trans_b, long m, long n, long k, float alpha,
                         const float *a, long lda, const float *b, long ldb, float beta,
                         float *c, long ldc);
enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };
static cblas_fn cblas;
static onednn_fn onednn;

/* c (m, n) = or += a . b by rows; with trans_a a is (k, m), with trans_b b is (n, k) */
static void gemm(int trans_a, int trans_b, long m, long n, long k, const float *a, long lda,
                 const float *b, long ldb, float beta, float *c, long ldc) {
    if (onednn)
        onednn(trans_a ? 'T' : 'N', trans_b ? 'T' : 'N', m, n, k, 1.0f, a, lda, b, ldb, beta, c,
               ldc);
    else
        cblas(ROW_MAJOR, trans_a ? TRANS : NO_TRANS, trans_b ? TRANS : NO_TRANS, (int)m, (int)n,
              (int)k, 1.0f, a, (int)lda, b, (int)ldb, beta, c, (int)ldc);
}

static int load(const char *name) {
    static const char *const files[][6] = {
        {"openblas", "libopenblas.so.0", "libopenblas.so"},
        {"onednn", "libdnnl.so.3", "libdnnl.so.2", "libdnnl.so"},
        {"mkl", "libmkl_rt.so.3", "libmkl_rt.so.2", "libmkl_rt.so"}};
    void *library = NULL;
    setenv("OMP_NUM_THREADS", "1", 1);
    setenv("MKL_NUM_THREADS", "1", 1);
    setenv("OPENBLAS_NUM_THREADS", "1", 1);
    setenv("MKL_THREADING_LAYER", "SEQUENTIAL", 1);
    for (int i = 0; i < 3; i++) {
        if (strcmp(name, files[i][0])) continue;
        if (i == 2 && getenv("SEQPAR_MKL"))
            library = dlopen(getenv("SEQPAR_MKL"), RTLD_NOW | RTLD_GLOBAL);
        for (int f = 1; !library && files[i][f]; f++)
            library = dlopen(files[i][f], RTLD_NOW | RTLD_GLOBAL);
        if (library && i == 1)
            onednn = (onednn_fn)dlsym(library, "dnnl_sgemm");
        else if (library)
            cblas = (cblas_fn)dlsym(library, "cblas_sgemm");
    }
    return cblas || onednn;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static float *numbers(long count, unsigned seed) {
    float *x = aligned_alloc(64, ((size_t)count * sizeof *x + 63) / 64 * 64);
    for (long i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / (1 << 24) - 0.5f;
    }
    return x;
}

/* ---- product ---- */

static struct {
    long rows, out, in;
    float *x, *w, *y;
} p;

static void product(void) {
    gemm(0, 1, p.rows, p.out, p.in, p.x, p.in, p.w, p.in, 0.0f, p.y, p.out);
}

/* Relative L2 error over every 97th element, in fp64. */
static double product_error(void) {
    double diff = 0, size = 0;
    for (long e = 0; e < p.rows * p.out; e += 97) {
        double sum = 0;
        for (long k = 0; k < p.in; k++)
            sum += (double)p.x[e / p.out * p.in + k] * (double)p.w[e % p.out * p.in + k];
        diff += (p.y[e] - sum) * (p.y[e] - sum);
        size += sum * sum;
    }
    return sqrt(diff / size);
}

/* ---- attention ---- */

enum { QB = 256, KB = 512 };
static struct {
    long tokens, dim;
    int causal;
    float *q, *k, *v, *dout, *out, *lse, *dq, *dk, *dv, *s, *ds;
} a;

/* How many of its keys a query sees in the block that begins at key j. */
static long seen(long query, long j, long n) {
    return !a.causal || query >= j + n ? n : query < j ? 0 : query - j + 1;
}

/* e^x for x <= 0 to about 2e-7, in a form that loops over it become vectors. */
static inline float exponential(float x) {
    float t = (x > -87.0f ? x : -87.0f) * 1.44269504f, whole = t + 12582912.0f - 12582912.0f;
    float f = t - whole, p = 1.54035304e-4f;
    int bits = ((int)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    p = p * f + 1.33335581e-3f;
    p = p * f + 9.61812911e-3f;
    p = p * f + 5.55041087e-2f;
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147181e-1f;
    return (p * f + 1.0f) * power;
}

static float highest(const float *x, long n, float top) {
#pragma omp simd reduction(max : top)
    for (long c = 0; c < n; c++) top = x[c] > top ? x[c] : top;
    return top;
}

static float exponentials(float *x, long n, float scale, float top) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long c = 0; c < n; c++) {
        x[c] = exponential(x[c] * scale - top);
        sum += x[c];
    }
    return sum;
}

static void forward(void) {
    float top[QB], sum[QB], scale = 1 / sqrtf((float)a.dim);
    for (long i = 0; i < a.tokens; i += QB) {
        long m = a.tokens - i < QB ? a.tokens - i : QB, keys = a.causal ? i + m : a.tokens;
        for (long r = 0; r < m; r++) {
            top[r] = -1e30f;
            sum[r] = 0;
        }
        for (long j = 0; j < keys; j += KB) {
            long n = keys - j < KB ? keys - j : KB;
            gemm(0, 1, m, n, a.dim, a.q + i * a.dim, a.dim, a.k + j * a.dim, a.dim, 0.0f, a.s,
                 n);
            for (long r = 0; r < m; r++) {
                float *x = a.s + r * n, *o = a.out + (i + r) * a.dim, old = top[r], keep;
                long live = seen(i + r, j, n);
                top[r] = live ? fmaxf(old, scale * highest(x, live, x[0])) : old;
                keep = expf(old - top[r]);
                sum[r] = sum[r] * keep + exponentials(x, live, scale, top[r]);
                memset(x + live, 0, (size_t)(n - live) * sizeof *x);
                for (long c = 0; j && c < a.dim; c++) o[c] *= keep;
            }
            gemm(0, 0, m, a.dim, n, a.s, n, a.v + j * a.dim, a.dim, j ? 1.0f : 0.0f,
                 a.out + i * a.dim, a.dim);
        }
        for (long r = 0; r < m; r++) {
            a.lse[i + r] = top[r] + logf(sum[r]);
            for (long c = 0; c < a.dim; c++) a.out[(i + r) * a.dim + c] /= sum[r];
        }
    }
}

static void backward(void) {
    float scale = 1 / sqrtf((float)a.dim), delta[QB];
    memset(a.dq, 0, (size_t)(a.tokens * a.dim) * sizeof *a.dq);
    memset(a.dk, 0, (size_t)(a.tokens * a.dim) * sizeof *a.dk);
    memset(a.dv, 0, (size_t)(a.tokens * a.dim) * sizeof *a.dv);
    for (long i = 0; i < a.tokens; i += QB) {
        long m = a.tokens - i < QB ? a.tokens - i : QB, keys = a.causal ? i + m : a.tokens;
        for (long r = 0; r < m; r++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (long c = 0; c < a.dim; c++)
                sum += a.dout[(i + r) * a.dim + c] * a.out[(i + r) * a.dim + c];
            delta[r] = sum;
        }
        for (long j = 0; j < keys; j += KB) {
            long n = keys - j < KB ? keys - j : KB, at = i * a.dim, to = j * a.dim;
            gemm(0, 1, m, n, a.dim, a.q + at, a.dim, a.k + to, a.dim, 0.0f, a.s, n);
            gemm(0, 1, m, n, a.dim, a.dout + at, a.dim, a.v + to, a.dim, 0.0f, a.ds, n);
            for (long r = 0; r < m; r++) {
                float *x = a.s + r * n, *d = a.ds + r * n;
                long live = seen(i + r, j, n);
                exponentials(x, live, scale, a.lse[i + r]);
                for (long c = 0; c < live; c++) d[c] = x[c] * (d[c] - delta[r]) * scale;
                memset(x + live, 0, (size_t)(n - live) * sizeof *x);
                memset(d + live, 0, (size_t)(n - live) * sizeof *d);
            }
            gemm(1, 0, n, a.dim, m, a.s, n, a.dout + at, a.dim, 1.0f, a.dv + to, a.dim);
            gemm(0, 0, m, a.dim, n, a.ds, n, a.k + to, a.dim, 1.0f, a.dq + at, a.dim);
            gemm(1, 0, n, a.dim, m, a.ds, n, a.q + at, a.dim, 1.0f, a.dk + to, a.dim);
        }
    }
}

/* Some rows of out and of dq in fp64. */
static double attention_error(void) {
    double diff[2] = {0, 0}, size[2] = {0, 0}, *w = malloc((size_t)a.tokens * sizeof *w);
    for (long i = 3; i < a.tokens; i += a.tokens / 7) {
        long keys = a.causal ? i + 1 : a.tokens;
        double sum = 0, mean = 0;
        for (long j = 0; j < keys; j++) {
            double s = 0;
            for (long c = 0; c < a.dim; c++)
                s += (double)a.q[i * a.dim + c] * a.k[j * a.dim + c];
            sum += w[j] = exp(s / sqrt((double)a.dim));
        }
        for (long c = 0; c < a.dim; c++) {
            double o = 0;
            for (long j = 0; j < keys; j++) o += w[j] / sum * a.v[j * a.dim + c];
            diff[0] += (a.out[i * a.dim + c] - o) * (a.out[i * a.dim + c] - o);
            size[0] += o * o;
            mean += o * a.dout[i * a.dim + c];
        }
        for (long j = 0; j < keys; j++) {
            double dp = 0;
            for (long c = 0; c < a.dim; c++)
                dp += (double)a.dout[i * a.dim + c] * a.v[j * a.dim + c];
            w[j] = w[j] / sum * (dp - mean) / sqrt((double)a.dim);
        }
        for (long c = 0; c < a.dim; c++) {
            double g = 0;
            for (long j = 0; j < keys; j++) g += w[j] * a.k[j * a.dim + c];
            diff[1] += (a.dq[i * a.dim + c] - g) * (a.dq[i * a.dim + c] - g);
            size[1] += g * g;
        }
    }
    free(w);
    return fmax(sqrt(diff[0] / size[0]), sqrt(diff[1] / size[1]));
}

/* ---- */

static double best(void (*call)(void), double seconds) {
    double least = HUGE_VAL, end, took;
    call(); /* what is done once only */
    end = now() + seconds;
    do {
        double began = now();
        call();
        took = now() - began;
        if (took < least) least = took;
    } while (now() < end);
    return least;
}

int main(int argc, char **argv) {
    double error, seconds[2] = {0, 0};
    if (argc != 7)
        return fprintf(stderr,
                       "usage: peer_blas openblas|onednn|mkl product|attention .. SECONDS\n"),
               2;
    if (!load(argv[1])) return 3;
    if (!strcmp(argv[2], "product")) {
        p.rows = atol(argv[3]);
        p.out = atol(argv[4]);
        p.in = atol(argv[5]);
        p.x = numbers(p.rows * p.in, 1);
        p.w = numbers(p.out * p.in, 2);
        p.y = numbers(p.rows * p.out, 3);
        seconds[0] = best(product, atof(argv[6]));
        error = product_error();
    } else {
        float **all[] = {&a.q, &a.k, &a.v, &a.dout, &a.out, &a.dq, &a.dk, &a.dv};
        a.tokens = atol(argv[3]);
        a.dim = atol(argv[4]);
        a.causal = atoi(argv[5]);
        for (unsigned i = 0; i < 8; i++) *all[i] = numbers(a.tokens * a.dim, i + 1);
        a.lse = numbers(a.tokens, 9);
        a.s = numbers(QB * KB, 10);
        a.ds = numbers(QB * KB, 11);
        seconds[0] = best(forward, atof(argv[6]));
        seconds[1] = best(backward, atof(argv[6]));
        error = attention_error();
    }
    printf("%.9f %.9f %.2e\n", seconds[0], seconds[1], error);
    return !(error < 1e-4);
}
