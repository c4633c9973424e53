/* SPDX-License-Identifier: MIT OR Unlicense */
/* The device table as a whole: that a suite checks each of its operations (test_device_*.c),
   numbers to a device and back; and of the CPU device, jobs on threads with their scratch,
   memory, and the pool that is offloaded to. */
#define SEQPAR_IMPLEMENTATION
#include "support/device_ops.h"

/* An operation that is new needs a line of a list of device_ops.h, and a check in that
   suite. */
static void test_every_operation(void) {
    static const char *const names[] = {
#define X(op) #op,
        SEQPAR_DEVICE_OPS(X)
#undef X
    };
    int suites[OPS] = {0};
#define X(op) suites[OP_##op]++;
    MATMUL_OPS(X)
    ROW_OPS(X)
    EXPERT_OPS(X)
    ATTENTION_OPS(X)
    VOCAB_OPS(X)
    UPDATE_OPS(X)
#undef X
    for (int i = 0; i < OPS; i++)
        test_expect(suites[i] == 1, "%s is in %d lists of support/device_ops.h, not in one",
                    names[i], suites[i]);
    test_end("device_every_operation");
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
    device_open(NULL, 0);
    TEST(test_every_operation());
    TEST(test_transfer(reference, SEQPAR_DTYPE_F64));
    TEST(test_transfer(fast, SEQPAR_DTYPE_F32));
    TEST(test_transfer(bf16, SEQPAR_DTYPE_BF16));
    TEST(test_transfer(bf16, SEQPAR_DTYPE_F32));
    device_close();
#ifndef TEST_CUDA /* it is the CPU device's */
    TEST(test_runs_of_jobs());
    TEST(test_scratch());
    TEST(test_host_memory());
    TEST(test_moves());
    TEST(test_pool_file());
#endif
    return test_summary();
}
