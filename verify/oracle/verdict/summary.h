/* SPDX-License-Identifier: MIT OR Unlicense */
/* summary.h - the verdict on a whole dump from its stages' verdicts, and one line that says
 * what was judged and what was not. */
#ifndef ORACLE_SUMMARY_H
#define ORACLE_SUMMARY_H
#include "checks.h"

static inline const stage *worst_stage(const stage *stages) {
    const stage *worst = NULL;
    for (int i = 0; i < STAGES; i++)
        if (stages[i].judged &&
            (!worst || verdict_weight(stages[i].v.kind) > verdict_weight(worst->v.kind)))
            worst = &stages[i];
    return worst;
}

/* If attention is the worst stage but names no mistake, returns a stage that does: with
   --model, log-probs and gradients are also compared with models that make such a mistake. */
static inline const stage *named_by_model(const stage *stages, const stage *worst) {
    for (int i = LOG_PROBS; i <= GRADIENTS && worst == &stages[ATTENTION]; i++) {
        const verdict *v = &stages[i].v;
        int of_model = (i == LOG_PROBS || i == GRADIENTS) && stages[i].judged;
        if (!worst->v.count && of_model && v->kind == VERDICT_WRONG && v->count &&
            !strcmp((*v->named)->family, "attention"))
            return &stages[i];
    }
    return worst;
}

/* Sets of stages, as bits. */
static inline int stage_bit(int i) { return 1 << i; }

/* Whether a stage alone makes the whole verdict insufficient. required: bits of the stages that
   must be judged. */
static inline int stage_shows_nothing(const stage *stages, int i, int required) {
    return stages[i].judged ? stages[i].v.kind == VERDICT_INSUFFICIENT
                            : (required & stage_bit(i)) != 0;
}

static inline int judges_more_than_places(const stage *stages) {
    for (int i = POSITIONS + 1; i < STAGES; i++)
        if (stages[i].judged) return 1;
    return 0;
}

/* Whether a right stage leaves the mistake open. What a reduction leaves open, right gradients
   exclude: they are what it gives. */
static inline int is_left_open(const stage *stages, const mistake *m) {
    const stage *g = &stages[GRADIENTS];
    int exclude = g->judged && g->v.kind == VERDICT_RIGHT;
    for (int i = 0; i < STAGES; i++)
        if (stages[i].judged && verdict_hides(&stages[i].v, m) && !(i == REDUCTION && exclude))
            return 1;
    return 0;
}

static inline int count_left_open(const stage *stages) {
    int count = 0;
    for (int i = 0; i < MISTAKES; i++) count += is_left_open(stages, &mistakes[i]);
    return count;
}

static inline int verdict_names(const verdict *v, const mistake *m) {
    int i = 0;
    while (i < v->count && v->named[i] != m) i++;
    return i < v->count;
}

/* Of several names, each of which explains its stage, those that explain the other wrong stages
   with names as well are kept. Only a shared mean removes names: of other mistakes, a stage that
   does not name one may be unable to. */
static inline void keep_common_names(verdict *v, const stage *stages) {
    for (int i = 0; i < STAGES && v->count > 1 && !v->all; i++) {
        const verdict *other = &stages[i].v;
        int common = 0;
        if (!stages[i].judged || other->kind != VERDICT_WRONG || other->all) continue;
        for (int k = 0; k < v->count; k++)
            common += v->named[k]->mean != MEAN_NONE && verdict_names(other, v->named[k]);
        for (int k = v->count - 1; common && k >= 0; k--)
            if (!verdict_names(other, v->named[k]))
                memmove(&v->named[k], &v->named[k + 1],
                        (size_t)(--v->count - k) * sizeof *v->named);
    }
}

/* To pass, every judged stage must be right, and one besides places and positions be judged.
   all: and no known mistake may give the same numbers. */
static inline verdict whole_verdict(const stage *stages, int required, int all) {
    const stage *worst = named_by_model(stages, worst_stage(stages));
    verdict v = {.kind = VERDICT_INSUFFICIENT};
    if (worst) v = worst->v;
    if (v.kind == VERDICT_WRONG) keep_common_names(&v, stages);
    if (v.kind == VERDICT_RIGHT && !judges_more_than_places(stages))
        v.kind = VERDICT_INSUFFICIENT;
    for (int i = 0; i < STAGES; i++)
        if (v.kind != VERDICT_WRONG && stage_shows_nothing(stages, i, required))
            v.kind = VERDICT_INSUFFICIENT;
    if (all && v.kind != VERDICT_WRONG && count_left_open(stages))
        v.kind = VERDICT_INSUFFICIENT;
    return v;
}

/* ---- the line ---- */

typedef struct summary {
    char text[1600];
} summary;

static inline void summary_add(summary *s, const char *format, ...) {
    size_t length = strlen(s->text);
    va_list list;
    va_start(list, format);
    vsnprintf(s->text + length, sizeof s->text - length, format, list);
    va_end(list);
}

/* "places, labels"; returns how many. */
static inline int summary_add_kind(summary *s, const stage *stages, verdict_kind kind) {
    int count = 0;
    for (int i = 0; i < STAGES; i++)
        if (stages[i].judged && stages[i].v.kind == kind)
            summary_add(s, "%s%s", count++ ? ", " : *s->text ? "; " : "", stage_names[i].name);
    return count;
}

/* Whether the stage's name is a plural in s, for the verb behind it. */
static inline int stage_is_plural(int i) {
    const char *name = stage_names[i].name, *end = name + strlen(name) - 2;
    return end[1] == 's' && end[0] != 's'; /* not loss */
}

/* Says why a stage shows nothing: in evidence, the first sentence gives numbers, the second the
   reason. */
static inline void summary_add_silent(summary *s, const stage *stage, int i) {
    const char *why = stage->judged ? stage->v.line[stage->v.lines > 1] : stage_needs(stage, i);
    summary_add(s, "%s%s ", *s->text ? "; " : "", stage_names[i].name);
    if (stage->judged)
        summary_add(s, "%s nothing: %s", stage_is_plural(i) ? "show" : "shows", why);
    else if (stage->foreign)
        summary_add(s, "not judged: the dump's objective has no such stage");
    else
        summary_add(s, "not judged: it takes %s", why);
}

/* Only gradients change the model, so a verdict without them says so. hint: options to give. */
static inline void summary_add_gradients(summary *s, const stage *stages, const char *hint) {
    const stage *g = &stages[GRADIENTS];
    if (g->judged) return;
    summary_add(s, "%sgradients of parameters were NOT judged: ", *s->text ? "; " : "");
    if (*g->lacks)
        summary_add(s, "it takes %s", g->lacks);
    else
        summary_add(s, "give %s", hint);
}

/* What was judged, and which of it is marginal. */
static inline void summary_add_judged(summary *s, const stage *stages, verdict_kind kind) {
    if (kind != VERDICT_RIGHT && summary_add_kind(s, stages, VERDICT_MARGINAL))
        summary_add(s, " marginal");
    if (summary_add_kind(s, stages, VERDICT_RIGHT) && kind != VERDICT_RIGHT)
        summary_add(s, " right");
    if (kind != VERDICT_INSUFFICIENT)
        summary_add(s, " (%d of %d stages)", stages_judged(stages), stages_listed(stages));
}

/* "2 known mistakes give the same here: a, b" */
static inline void summary_add_open(summary *s, const stage *stages) {
    int count = count_left_open(stages), said = 0;
    if (!count) return;
    summary_add(s, "; %d known mistake%s the same here: ", count,
                count == 1 ? " gives" : "s give");
    for (int i = 0; i < MISTAKES && said < 6; i++)
        if (is_left_open(stages, &mistakes[i]))
            summary_add(s, "%s%s", said++ ? ", " : "", mistakes[i].name);
    if (said < count) summary_add(s, " and %d more", count - said);
}

/* "" for a wrong verdict: its own headline is printed instead. */
static inline void summarize(summary *s, const stage *stages, const verdict *v, int required,
                             const char *hint) {
    *s->text = 0;
    if (v->kind == VERDICT_WRONG) return;
    summary_add_judged(s, stages, v->kind);
    for (int i = 0; i < STAGES; i++)
        if (stage_shows_nothing(stages, i, required)) summary_add_silent(s, &stages[i], i);
    if (!judges_more_than_places(stages))
        summary_add(s, "%s", *s->text ? "; nothing more was judged" : "nothing was judged");
    else if (!(required & stage_bit(GRADIENTS)))
        summary_add_gradients(s, stages, hint);
    if (judges_more_than_places(stages)) summary_add_open(s, stages);
    text_mend(s->text);
}
#endif
