/* SPDX-License-Identifier: MIT OR Unlicense */
/* progress.h - a progress bar in one line on stderr, if stderr is a terminal and the program
 * has worked for a second. It is wiped when the work ends. Of nested work only the outermost is
 * shown. */
#ifndef ORACLE_PROGRESS_H
#define ORACLE_PROGRESS_H
#include "trainer/log/progress.h" /* the trainers' */

static struct {
    const char *stage;
    int64_t done, total;
    double first, began, drawn; /* times: first work began, this began, last drawn; 0: never */
    int depth, shown;
} bar;

static inline void bar_text(char *text, int columns, double elapsed) {
    char time[24], line[120], drawing[DEMO_BAR_LIMIT + 1];
    double share = (double)bar.done / (double)(bar.total > 0 ? bar.total : 1);
    double left = share > 0 ? elapsed / share - elapsed : elapsed;
    int used, width;
    demo_duration_text(time, sizeof time, left);
    used = snprintf(line, sizeof line, "%.40s  %lld/%lld  %d %%  %s %s", bar.stage,
                    (long long)bar.done, (long long)bar.total, (int)(100 * share), time,
                    share > 0 ? "left" : "so far");
    width = columns - 1 - used - 4 < DEMO_BAR_LIMIT ? columns - 1 - used - 4 : DEMO_BAR_LIMIT;
    if (width < DEMO_BAR_LEAST) {
        snprintf(text, DEMO_LINE_LIMIT, "%.*s", columns > 1 ? columns - 1 : 0, line);
        return;
    }
    demo_bar_text(drawing, width, share);
    snprintf(text, DEMO_LINE_LIMIT, "[%s]  %s", drawing, line);
}

static inline void bar_wipe(void) {
    if (bar.shown) fputs("\r\033[K", stderr);
    if (bar.shown) fflush(stderr);
    bar.shown = 0;
}

static inline void bar_draw(void) {
    char text[DEMO_LINE_LIMIT];
    double now = demo_seconds();
    if (now - bar.first < 1 || now - bar.drawn < 0.1) return;
    bar_text(text, demo_columns(stderr), now - bar.began);
    fprintf(stderr, "\r%s\033[K", text);
    fflush(stderr);
    bar.drawn = now;
    bar.shown = 1;
}

/* Draws the bar if it is time to. Threads may call it. */
static inline void bar_touch(void) {
    if (!bar.depth || !isatty(STDERR_FILENO)) return;
#ifdef _OPENMP
#pragma omp critical(oracle_bar)
#endif
    bar_draw();
}

static inline void bar_begin(const char *stage, int64_t total) {
    if (bar.depth++) return;
    bar.stage = stage;
    bar.done = 0;
    bar.total = total;
    bar.began = demo_seconds();
    if (bar.first == 0) bar.first = bar.began;
}

/* Adds to what is done of the outermost work; within nested work, adds nothing. */
static inline void bar_step(int64_t more) {
    if (bar.depth == 1) bar.done = bar.done + more < bar.total ? bar.done + more : bar.total;
    bar_touch();
}

static inline void bar_end(void) {
    if (!--bar.depth) bar_wipe();
}
#endif
