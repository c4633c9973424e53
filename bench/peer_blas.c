/* SPDX-License-Identifier: MIT OR Unlicense */
/* peer_blas.c - seconds that OpenBLAS takes for y (rows, out) = x (rows, in) . W^T, one thread, for bench_cpu to compare with.
 *
 *     [OPENBLAS_CORETYPE=SkylakeX] peer_blas ROWS OUT IN SECONDS      prints the best seconds and the relative error
 *
 * The library is looked up at run time: without it the exit code is 3, and the table says so. A process of its own, because
 * the core type is read when the library is loaded. */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef void (*sgemm_fn)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc);
enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static float *numbers(long count, unsigned seed) {
    float *x = aligned_alloc(64, ((size_t)count * sizeof *x + 63) / 64 * 64);
    for (long i = 0; i < count; i++) { seed = seed * 1664525u + 1013904223u; x[i] = (float)(seed >> 8) / (1 << 24) - 0.5f; }
    return x;
}

/* Relative L2 error over every 97th element, in fp64. */
static double error_of(const float *y, const float *x, const float *w, long rows, long out, long in) {
    double diff = 0, size = 0;
    for (long e = 0; e < rows * out; e += 97) {
        double sum = 0;
        for (long k = 0; k < in; k++) sum += (double)x[e / out * in + k] * (double)w[e % out * in + k];
        diff += (y[e] - sum) * (y[e] - sum);
        size += sum * sum;
    }
    return sqrt(diff / size);
}

int main(int argc, char **argv) {
    void *library = dlopen("libopenblas.so.0", RTLD_NOW);
    if (!library) library = dlopen("libopenblas.so", RTLD_NOW);
    sgemm_fn sgemm = library ? (sgemm_fn)dlsym(library, "cblas_sgemm") : NULL;
    void (*threads)(int) = library ? (void (*)(int))dlsym(library, "openblas_set_num_threads") : NULL;
    if (!sgemm) return 3;
    if (argc != 5) return fprintf(stderr, "usage: peer_blas ROWS OUT IN SECONDS\n"), 2;
    if (threads) threads(1);
    long rows = atol(argv[1]), out = atol(argv[2]), in = atol(argv[3]);
    float *x = numbers(rows * in, 1), *w = numbers(out * in, 2), *y = numbers(rows * out, 3);
    double best = HUGE_VAL, end = now() + atof(argv[4]);
    do {
        double began = now();
        sgemm(ROW_MAJOR, NO_TRANS, TRANS, (int)rows, (int)out, (int)in, 1.0f, x, (int)in, w, (int)in, 0.0f, y, (int)out);
        double took = now() - began;
        if (took < best) best = took;
    } while (now() < end);
    printf("%.9f %.2e\n", best, error_of(y, x, w, rows, out, in));
    return 0;
}
