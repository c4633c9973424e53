/* SPDX-License-Identifier: MIT OR Unlicense */
/* What the benchmarks share: clocks, the best of many runs, numbers to compute with, a table
   that is also written as JSON, and --tiny. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ---- for a check ---- */

/* --tiny: small cases, each timed once. Results are compared as ever; times mean nothing. */
static int tiny;
static inline int64_t size_or_tiny(int64_t size, int64_t small) { return tiny ? small : size; }

/* Takes --tiny out of the arguments, which begin with the program's name; says how many are
   left. */
static inline int take_tiny(int count, char **arguments) {
    int left = 0;
    for (int i = 0; i < count; i++)
        if (i && !strcmp(arguments[i], "--tiny"))
            tiny = 1;
        else
            arguments[left++] = arguments[i];
    return left;
}

/* For a program that takes no more than `most` arguments besides --tiny. */
static inline int take_arguments(int count, char **arguments, int most) {
    int left = take_tiny(count, arguments);
    if (left - 1 > most) {
        fprintf(stderr, "%s: what is '%.60s'? there is --tiny; bench/README.md says more\n",
                arguments[0], arguments[most + 1]);
        exit(2);
    }
    return left;
}

/* ---- time ---- */

enum { RUNS = 9 };
static const double least_seconds = 0.01; /* short cases are repeated within a run */

/* seconds of one call */
typedef struct timing {
    double best, median;
} timing;

typedef void (*call_fn)(void *user);

static double clock_seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Processor time of this thread, where it does all the work: what else runs on the machine
   takes no part in it. Where others help, it has to be CLOCK_MONOTONIC. */
static clockid_t work_clock = CLOCK_THREAD_CPUTIME_ID;
static inline double now(void) { return clock_seconds(work_clock); }

static inline int rising(const void *a, const void *b) {
    return *(const double *)a < *(const double *)b ? -1
                                                   : *(const double *)a > *(const double *)b;
}

static inline double seconds_of(call_fn call, void *user, int64_t times) {
    double began = now();
    int64_t i;
    for (i = 0; i < times; i++) call(user);
    return (now() - began) / (double)times;
}

static inline timing measure(call_fn call, void *user) {
    double each[RUNS], once = seconds_of(call, user, 1);
    int64_t times = once < least_seconds ? (int64_t)(least_seconds / once) + 1 : 1;
    if (tiny) return (timing){once, once};
    for (int i = 0; i < RUNS; i++) each[i] = seconds_of(call, user, times);
    qsort(each, RUNS, sizeof *each, rising);
    return (timing){each[0], each[RUNS / 2]};
}

/* Runs a case again after what it is compared with, so that neither has the quieter machine. */
static inline timing measure_again(timing first, call_fn call, void *user) {
    timing second = measure(call, user);
    return second.best < first.best ? second : first;
}

/* ---- numbers, and how far apart they are ---- */

#if defined(__AVX512F__)
enum { VECTOR = 64 };
#elif defined(__AVX__)
enum { VECTOR = 32 };
#else
enum { VECTOR = 16 };
#endif
typedef float vector __attribute__((vector_size(VECTOR)));

/* finaliser of splitmix64 */
static inline uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static inline void fill_random(float *x, int64_t count, uint64_t stream, double low,
                               double high) {
    uint64_t state = mixed(stream + 1);
    int64_t i;
    for (i = 0; i < count; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        x[i] = (float)(low + (high - low) * (double)(state >> 40) / 16777216.0);
    }
}

static inline float *random_floats(int64_t count, uint64_t stream) {
    float *x = malloc((size_t)count * sizeof *x);
    if (x) fill_random(x, count, stream, -1, 1);
    return x;
}

/* Relative L2 distance; NaN stays NaN. */
typedef struct distance {
    double difference, size;
} distance;

static inline void compare(distance *d, double got, double want) {
    d->difference += (got - want) * (got - want);
    d->size += want * want;
}

static inline double relative(const distance *d) { return sqrt(d->difference / d->size); }

/* ---- the table ---- */

typedef struct report {
    FILE *json;
    char path[64];
    int lines, wrong;
} report;

/* Begins build/bench/NAME.json with the fields given (text, with a comma at its end). */
static inline void report_open(report *r, const char *name, const char *fields, ...) {
    va_list list;
    memset(r, 0, sizeof *r);
    mkdir("build", 0777);
    mkdir("build/bench", 0777);
    snprintf(r->path, sizeof r->path, "build/bench/%s%s.json", tiny ? "tiny_" : "", name);
    r->json = fopen(r->path, "w");
    if (!r->json) {
        perror(r->path);
        exit(1);
    }
    fprintf(r->json, "{\n  ");
    va_start(list, fields);
    vfprintf(r->json, fields, list);
    va_end(list);
    fprintf(r->json, "\n  \"cases\": [");
}

/* One case: its fields in JSON, as text. */
static inline void report_case(report *r, int right, const char *fields, ...) {
    va_list list;
    fprintf(r->json, "%s\n    {", r->lines++ ? "," : "");
    va_start(list, fields);
    vfprintf(r->json, fields, list);
    va_end(list);
    fprintf(r->json, ", \"correct\": %s}", right ? "true" : "false");
    r->wrong += !right;
    fflush(stdout);
}

static inline int report_close(report *r) {
    fprintf(r->json, "\n  ]\n}\n");
    if (fclose(r->json)) {
        perror(r->path);
        return 1;
    }
    printf("\n%d of %d cases are correct; the numbers are in %s\n\n", r->lines - r->wrong,
           r->lines, r->path);
    return r->wrong != 0;
}

/* JSON knows no NaN. */
static inline const char *number_or_null(char *text, size_t size, double x) {
    if (x == x)
        snprintf(text, size, "%.6g", x);
    else
        snprintf(text, size, "null");
    return text;
}
