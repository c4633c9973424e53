/* SPDX-License-Identifier: MIT OR Unlicense */
/* report.h - the metrics, here called figures, of a step, a rollout or an evaluation. The
 * progress line and all logs are written from a report. A figure's name is its key in
 * --metrics_path; in TensorBoard and Weights & Biases some figures have OpenRLHF's names. */
#ifndef DEMO_REPORT_H
#define DEMO_REPORT_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* How a figure is written in a line of JSON. DEMO_PLACE: the number of the report's step or
   rollout, which is not a measured value. */
typedef enum { DEMO_EXACT, DEMO_WHOLE, DEMO_TENTHS, DEMO_THOUSANDTHS, DEMO_PLACE } demo_form;

typedef struct {
    const char *name;
    double value;
    demo_form form;
} demo_figure;

typedef struct { /* a prompt, its generated text, and the reward */
    char *prompt, *text;
    double reward;
} demo_sample;

enum { DEMO_FIGURES = 32 };

typedef struct {
    const char *phase; /* "train" or "eval" */
    int64_t step;      /* optimizer steps done */
    int64_t round;     /* number of the step or rollout that the progress line shows */
    int64_t tokens;
    double seconds;
    int count;
    demo_figure figure[DEMO_FIGURES];
    const demo_sample *samples;
    int64_t sample_count;
} demo_report;

static inline void demo_report_add(demo_report *r, const char *name, double value,
                                   demo_form form) {
    if (r->count < DEMO_FIGURES) r->figure[r->count++] = (demo_figure){name, value, form};
}

static inline bool demo_report_evaluates(const demo_report *r) {
    return !strcmp(r->phase, "eval");
}

/* A figure's value; NaN: the report has no figure of this name. */
static inline double demo_report_value(const demo_report *r, const char *name) {
    for (int i = 0; i < r->count; i++)
        if (!strcmp(r->figure[i].name, name)) return r->figure[i].value;
    return NAN;
}

/* The figure's name in TensorBoard and Weights & Biases, such as "train/loss". */
static inline const char *demo_report_tag(char tag[64], const demo_report *r,
                                          const char *name) {
    static const char *const openrlhf[][2] = {{"learning_rate", "lr"},
                                              {"accuracy", "acc"},
                                              {"rejected_reward", "reject_reward"},
                                              {"clipfrac", "ppo_clip_ratio"}};
    for (size_t i = 0; i < sizeof openrlhf / sizeof *openrlhf; i++)
        if (!strcmp(name, openrlhf[i][0])) name = openrlhf[i][1];
    snprintf(tag, 64, "%s/%s", r->phase, name);
    return tag;
}

/* JSON has no NaN and no infinity: they become null. */
static inline const char *demo_json_number(char text[32], double value) {
    snprintf(text, 32, isfinite(value) ? "%.17g" : "null", value);
    return text;
}

static inline const char *demo_figure_text(char text[32], const demo_figure *f) {
    if (f->form == DEMO_EXACT || !isfinite(f->value)) return demo_json_number(text, f->value);
    if (f->form == DEMO_WHOLE || f->form == DEMO_PLACE)
        snprintf(text, 32, "%lld", (long long)f->value);
    else
        snprintf(text, 32, f->form == DEMO_TENTHS ? "%.1f" : "%.3f", f->value);
    return text;
}
#endif
