/* SPDX-License-Identifier: MIT OR Unlicense */
/* signals.h - signal handling: the first signal stops training after the current step and saves
 * a checkpoint; the second one ends the process at once. */
#ifndef DEMO_SIGNALS_H
#define DEMO_SIGNALS_H
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* not a signal: a failure at rank 0, described in demo_rank.trouble */
enum { DEMO_TROUBLE = 1000 };
/* the signal that requests the stop, received by this or another process; 0: none */
static volatile sig_atomic_t demo_interrupted;
/* the signal that ended training early; 0: none */
static volatile sig_atomic_t demo_stopped;
static volatile sig_atomic_t demo_caught; /* first signal that this process received */
static struct timespec demo_caught_at;

/* Signals within a tenth of a second count as one, since a launcher may send a signal both to
   the process and to its process group. */
static void demo_on_interrupt(int signal_number) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double passed = (double)(now.tv_sec - demo_caught_at.tv_sec) +
                    1e-9 * (double)(now.tv_nsec - demo_caught_at.tv_nsec);
    if (demo_caught && passed > 0.1) {
        signal(signal_number, SIG_DFL);
        raise(signal_number);
    } else if (!demo_caught) {
        demo_caught_at = now;
        demo_caught = signal_number;
        demo_interrupted = signal_number;
    }
}

static void demo_catch(int signal_number) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = demo_on_interrupt;
    action.sa_flags = SA_RESTART;
    sigaction(signal_number, &action, NULL);
}

/* Catches SIGINT, SIGTERM and SIGHUP (closed terminal). SIGHUP stays ignored under nohup. */
static void demo_catch_all(void) {
    struct sigaction hangup;
    demo_catch(SIGINT);
    demo_catch(SIGTERM);
    if (!sigaction(SIGHUP, NULL, &hangup) && hangup.sa_handler != SIG_IGN) demo_catch(SIGHUP);
}

/* Makes writes fail with an error instead of a signal that ends the process, at the size limit
   of a file and for a pipe that nobody reads. */
static void demo_writes_may_fail(void) {
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
}
#endif
