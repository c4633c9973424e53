/* SPDX-License-Identifier: MIT OR Unlicense */
/* signals.h - a signal: the first stops after the step at hand, with a checkpoint; the second ends
 * at once. */
#ifndef DEMO_SIGNALS_H
#define DEMO_SIGNALS_H
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- signals: the first stops after the step at hand, with a checkpoint; the second ends at once ---- */

enum { DEMO_TROUBLE = 1000 }; /* not a signal: something failed at rank 0, demo_rank.trouble */
/* the signal that asks to stop, which another process may have received; 0: none */
static volatile sig_atomic_t demo_interrupted;
/* the signal by which training ended early; 0: none */
static volatile sig_atomic_t demo_stopped;
static volatile sig_atomic_t demo_caught; /* the first signal of this process */
static struct timespec demo_caught_at;

/* A launcher may send a signal both to the process and to its group, so signals within a tenth
   of a second count as one. */
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

/* SIGHUP comes when a terminal is closed; nohup has it ignored. */
static void demo_catch_all(void) {
    struct sigaction hangup;
    demo_catch(SIGINT);
    demo_catch(SIGTERM);
    if (!sigaction(SIGHUP, NULL, &hangup) && hangup.sa_handler != SIG_IGN) demo_catch(SIGHUP);
}

/* Writing to a file at its size limit, or to a pipe that nobody reads, must fail with an error
   message and not end the process by a signal. */
static void demo_writes_may_fail(void) {
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
}
#endif
