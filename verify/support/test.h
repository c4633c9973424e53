/* SPDX-License-Identifier: MIT OR Unlicense */
/* What every suite shares: one line a test, a seed that can be given back, comparisons that
   a NaN cannot pass. */
#ifndef TEST_H
#define TEST_H

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include "stand_in/on_cuda.h"

static int test_passed, test_failed, test_skipped;
static uint64_t test_seed = 1;
static const char *test_program = "test";
static char test_why[768];    /* first reason the running test is wrong */
static const char *test_text; /* the running test, as main calls it */
#ifdef TEST_FAULTS
int seqpar__fault; /* the number of the mistake that is on (verify/faults.tsv) */
#endif

__attribute__((unused)) static void test_begin(int argc, char **argv) {
    int i;
    test_program = argv[0];
    for (i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], "--seed")) test_seed = (uint64_t)strtoull(argv[i + 1], NULL, 10);
#ifdef TEST_FAULTS
    if (getenv("SEQPAR_FAULT")) seqpar__fault = atoi(getenv("SEQPAR_FAULT"));
#endif
    setvbuf(stdout, NULL, _IOLBF, 0); /* a killed suite has printed the tests that it ended */
    printf("# %s --seed %llu\n", test_program, (unsigned long long)test_seed);
}

/* `text` begins with the first of the texts joined by + in `list`; blanks do not count. */
static int test_listed(const char *text, const char *list) {
    for (; *list && *list != '+'; list++) {
        if (*list == ' ') continue;
        while (*text == ' ') text++;
        if (*text++ != *list) return 0;
    }
    return 1;
}

/* Which of the texts of TEST_ONLY named a test. */
static char test_named[256];

/* Is the test one of those of TEST_ONLY, which may be NULL: all are? */
static int test_among(const char *text, const char *only) {
    int found = !only;
    for (size_t i = 0; only; i++) {
        if (test_listed(text, only)) found = test_named[i % sizeof test_named] = 1;
        only = strchr(only, '+');
        if (only) only++;
    }
    return found;
}

/* Says which texts of TEST_ONLY named none of the tests, and how many they are. */
static int test_absent(void) {
    const char *only = getenv("TEST_ONLY");
    int absent = 0;
    for (size_t i = 0; only; i++) {
        if (!test_named[i % sizeof test_named]) {
            printf("FAIL %.*s: TEST_ONLY names it, but no test here begins so\n",
                   (int)strcspn(only, "+"), only);
            absent++;
        }
        only = strchr(only, '+');
        if (only) only++;
    }
    return absent;
}

static uint64_t test_state = 88172645463325252u;

/* Begins the test of this text, if it is wanted: its random numbers are those of the seed,
   the text and `turn`. For tests in a table, whose texts are their names; TEST is for those
   that main calls. */
__attribute__((unused)) static int test_wanted(const char *text, uint64_t turn) {
    const char *only = getenv("TEST_ONLY");
    test_text = text;
    test_state = UINT64_C(88172645463325252) + test_seed + (turn << 32);
    for (; *text; text++) test_state = test_state * 31 + (unsigned char)*text;
    return test_among(test_text, only);
}

/* One test of a suite's main. Its random numbers come from the seed, its text and how often it
   ran before: with TEST_ONLY="test_grids(1)+test_truth" (texts, or how they begin) it is the
   same test without the others. */
#define TEST(call) \
    do { \
        static uint64_t turn; \
        if (test_wanted(#call, turn++)) call; \
    } while (0)

/* What ends a suite that hangs, and what it says then. Every rank may set it. */
static struct {
    _Atomic unsigned seconds;
    /* seconds of the processor when it was set, and when it was looked at */
    _Atomic double began, cpu;
    _Atomic long kept; /* how often a thread was taken off its core */
    const char *text;
} test_hang;

static double test_cpu_seconds(const struct rusage *u) {
    return (double)(u->ru_utime.tv_sec + u->ru_stime.tv_sec) +
           1e-6 * (double)(u->ru_utime.tv_usec + u->ru_stime.tv_usec);
}

static void test_look_for_hang(int number) {
    ssize_t written;
    struct rusage u;
    const int before = errno; /* of what it interrupts */
    double cpu, most = (double)test_hang.seconds * (double)sysconf(_SC_NPROCESSORS_ONLN);
    const char *text = test_hang.text ? test_hang.text : "FAIL: it hangs, or has no end\n";
    getrusage(RUSAGE_SELF, &u);
    cpu = test_cpu_seconds(&u);
    if (cpu - test_hang.began > most ||
        (cpu - test_hang.cpu < 0.01 * test_hang.seconds && u.ru_nivcsw == test_hang.kept)) {
        written = write(1, text, strlen(text));
        signal(number, SIG_DFL);
        raise(number);
        (void)written;
        return;
    }
    test_hang.cpu = cpu;
    test_hang.kept = u.ru_nivcsw;
    alarm(test_hang.seconds);
    errno = before;
}

/* Ends the process by SIGALRM if, for so many seconds, it used no CPU time and was not
   preempted, or if it has used as much CPU time as all cores have in that time. A slow or busy
   machine is no failure, so wall time alone does not count. 0: no limit. */
__attribute__((unused)) static void test_limit(unsigned seconds) {
    struct sigaction look = {.sa_handler = test_look_for_hang, .sa_flags = SA_RESTART};
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    test_hang.seconds = seconds;
    test_hang.began = test_hang.cpu = test_cpu_seconds(&u);
    test_hang.kept = u.ru_nivcsw;
    sigaction(SIGALRM, &look, NULL);
    alarm(seconds);
}

/* Remembers the first failed condition of a test. */
__attribute__((unused, format(printf, 2, 3))) static int test_expect(int condition,
                                                                     const char *format, ...) {
    va_list args;
    if (condition || test_why[0]) return condition;
    va_start(args, format);
    vsnprintf(test_why, sizeof test_why, format, args);
    va_end(args);
    /* the message was an error's text, and there was no error */
    if (!test_why[0])
        snprintf(test_why, sizeof test_why, "something that should fail does not");
    return 0;
}

/* Prints the verdict of everything expected since the last call. */
__attribute__((unused, format(printf, 1, 2))) static void test_end(const char *format, ...) {
    char name[256];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    if (test_why[0]) {
        printf("FAIL %s: %s\n     replay: ", name, test_why);
        if (test_text) printf("TEST_ONLY='%s' ", test_text);
        printf("%s --seed %llu\n", test_program, (unsigned long long)test_seed);
    } else {
        printf("ok %s\n", name);
    }
    if (test_why[0])
        test_failed++;
    else
        test_passed++;
    if (test_why[0] && getenv("TEST_FIRST")) exit(1);
    test_why[0] = 0;
}

__attribute__((unused)) static void test_skip(const char *name, const char *reason) {
    printf("skip %s: %s\n", name, reason);
    test_skipped++;
}

__attribute__((unused)) static int test_summary(void) {
    int absent = test_absent();
    printf("%d passed, %d failed", test_passed, test_failed + absent);
    if (test_skipped) printf(", %d skipped", test_skipped);
    printf("\n");
    if (absent || (!test_passed && !test_failed)) return 2; /* what was asked for did not run */
    return test_failed ? 1 : 0;
}

/* Relative L2 distance; NaN or infinity anywhere gives infinity. */
__attribute__((unused)) static double test_distance(const double *got, const double *want,
                                                    int64_t count) {
    double diff = 0, size = 0;
    int64_t i;
    for (i = 0; i < count; i++) {
        double d = got[i] - want[i];
        if (!(fabs(got[i]) <= 1e300)) return HUGE_VAL;
        diff += d * d;
        size += want[i] * want[i];
    }
    return size > 0 ? sqrt(diff / size) : sqrt(diff);
}

/* splitmix64: the tests' own random numbers */
__attribute__((unused)) static uint64_t test_random(void) {
    uint64_t z = (test_state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

__attribute__((unused)) static int64_t test_integer(int64_t low, int64_t high) {
    return low + (int64_t)(test_random() % (uint64_t)(high - low + 1));
}

__attribute__((unused)) static double test_normal(void) {
    double u = ((double)(test_random() >> 11) + 0.5) / 9007199254740992.0;
    double v = (double)(test_random() >> 11) / 9007199254740992.0;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}
#endif
