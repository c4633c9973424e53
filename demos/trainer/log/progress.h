/* SPDX-License-Identifier: MIT OR Unlicense */
/* progress.h - the progress of a run: a bar that is redrawn in place on a terminal, otherwise a
 * line every logging_steps steps.
 *
 *     demo_progress progress;
 *     demo_progress_begin(&progress, 0, total_steps, logging_steps);
 *     for each step: demo_progress_step(&progress, step, loss, tokens_of_this_step);
 *     demo_progress_end(&progress);
 *
 * Everything goes to stderr, so that stdout can be piped. A redraw is one write that overwrites
 * the old line and then erases the rest, at most ten times a second, so that nothing flickers.
 * The line is always shorter than the window is wide. */
#ifndef DEMO_PROGRESS_H
#define DEMO_PROGRESS_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <sys/ioctl.h>

enum { DEMO_PARTS_LIMIT = 200, DEMO_BAR_LIMIT = 40, DEMO_BAR_LEAST = 8, DEMO_LINE_LIMIT = 256 };

typedef struct {
    FILE *out;
    bool terminal;
    int64_t total;   /* steps of the whole run */
    int64_t resumed; /* steps done before this process began */
    /* without a terminal: a line every so many steps; 0: only the last */
    int64_t logging_steps;
    int64_t step, tokens; /* so far; tokens of this process only */
    double loss;
    const char *round, *value; /* names of the counter and of the value; NULL: step, loss */
    double began, drawn;       /* seconds on the monotonic clock */
} demo_progress;

static inline double demo_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* 0:41, 12:05 or 3:07:59 */
static inline void demo_duration_text(char *text, size_t size, double seconds) {
    long long whole = seconds > 0 ? (long long)(seconds + 0.5) : 0;
    if (whole < 3600)
        snprintf(text, size, "%lld:%02lld", whole / 60, whole % 60);
    else
        snprintf(text, size, "%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
}

/* 950, 12.3k or 4.56M */
static inline void demo_count_text(char *text, size_t size, double count) {
    if (count < 1e4)
        snprintf(text, size, "%.0f", count);
    else if (count < 1e6)
        snprintf(text, size, "%.1fk", count / 1e3);
    else
        snprintf(text, size, "%.2fM", count / 1e6);
}

/* The parts of the line, most important first. Rate and time are unknown until a step has
   taken time. */
static inline int demo_progress_parts(const demo_progress *progress, double elapsed,
                                      char parts[4][48]) {
    char number[24];
    int64_t steps = progress->step - progress->resumed;
    snprintf(parts[0], 48, "%s %lld/%lld", progress->round ? progress->round : "step",
             (long long)progress->step, (long long)progress->total);
    snprintf(parts[1], 48, "%s %.4f", progress->value ? progress->value : "loss",
             progress->loss);
    if (steps < 1 || !(elapsed > 0)) return steps < 1 ? 1 : 2;
    demo_count_text(number, sizeof number, (double)progress->tokens / elapsed);
    snprintf(parts[2], 48, "%s tokens/s", number);
    demo_duration_text(number, sizeof number,
                       elapsed / (double)steps * (double)(progress->total - progress->step));
    snprintf(parts[3], 48, "%s left", number);
    return 4;
}

static inline void demo_bar_text(char *text, int width, double share) {
    int full = (int)(share * width);
    for (int i = 0; i < width; i++) text[i] = i < full ? '#' : '.';
    text[width] = 0;
}

/* The line for a window of `columns` columns: as many parts as fit, and a bar in the remaining
   columns. */
static inline void demo_progress_text(const demo_progress *progress, double elapsed,
                                      int columns, char *text) {
    char parts[4][48], line[DEMO_PARTS_LIMIT] = "", bar[DEMO_BAR_LIMIT + 1];
    int count = demo_progress_parts(progress, elapsed, parts), used = 0;
    int room = columns - 1; /* text in the last column would wrap */
    for (int i = 0; i < count && used + (int)strlen(parts[i]) + (i ? 2 : 0) <= room; i++)
        used += snprintf(line + used, sizeof line - (size_t)used, "%s%s", i ? "  " : "",
                         parts[i]);
    int width = room - used - 4 < DEMO_BAR_LIMIT ? room - used - 4 : DEMO_BAR_LIMIT;
    double share = progress->total > 0 ? (double)progress->step / (double)progress->total : 0;
    demo_bar_text(bar, width < 0 ? 0 : width, share < 1 ? share : 1);
    if (progress->terminal && used && width >= DEMO_BAR_LEAST)
        snprintf(text, DEMO_LINE_LIMIT, "[%s]  %s", bar, line);
    else
        snprintf(text, DEMO_LINE_LIMIT, "%s", line);
}

static inline int demo_columns(FILE *out) {
    struct winsize window = {0};
    return !ioctl(fileno(out), TIOCGWINSZ, &window) && window.ws_col ? window.ws_col : 80;
}

static inline void demo_progress_draw(demo_progress *progress, double now) {
    char line[DEMO_LINE_LIMIT], drawing[DEMO_LINE_LIMIT + 8];
    int columns = progress->terminal ? demo_columns(progress->out) : DEMO_LINE_LIMIT;
    demo_progress_text(progress, now - progress->began, columns, line);
    int length = snprintf(drawing, sizeof drawing, progress->terminal ? "\r%s\033[K" : "%s\n",
                          line);
    fwrite(drawing, 1, (size_t)length, progress->out);
    fflush(progress->out);
    progress->drawn = now;
}

/* Starts the clock. resumed: steps done before this process, from the checkpoint. */
static inline void demo_progress_begin(demo_progress *progress, int64_t resumed, int64_t total,
                                       int64_t logging_steps) {
    *progress = (demo_progress){.out = stderr,
                                .terminal = isatty(STDERR_FILENO) != 0,
                                .total = total,
                                .resumed = resumed,
                                .logging_steps = logging_steps,
                                .step = resumed,
                                .began = demo_seconds()};
}

/* Reports that step (counted from 1) is done, with its loss and its number of tokens. */
static inline void demo_progress_step(demo_progress *progress, int64_t step, double loss,
                                      int64_t tokens) {
    double now = demo_seconds();
    progress->step = step;
    progress->loss = loss;
    progress->tokens += tokens;
    bool last = step == progress->total;
    bool due = progress->terminal
                   ? now - progress->drawn >= 0.1
                   : progress->logging_steps > 0 && step % progress->logging_steps == 0;
    if (due || last) demo_progress_draw(progress, now);
}

/* Prints a line above the bar. */
__attribute__((format(printf, 2, 3))) static inline void demo_progress_say(
    demo_progress *progress, const char *format, ...) {
    va_list arguments;
    if (progress->terminal) fputs("\r\033[K", progress->out);
    va_start(arguments, format);
    vfprintf(progress->out, format, arguments);
    va_end(arguments);
    fputc('\n', progress->out);
    progress->drawn = 0; /* the next step redraws the bar */
}

/* Moves the cursor from the bar to a new line. */
static inline void demo_progress_end(demo_progress *progress) {
    if (progress->terminal && progress->drawn > 0) fputc('\n', progress->out);
    fflush(progress->out);
}

#endif
