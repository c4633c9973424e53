/* SPDX-License-Identifier: MIT OR Unlicense */
/* summary.h - the verdict on a whole dump from those of its stages, and in a line: of one that
 * is insufficient what was right all the same, and what shows nothing. */
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

/* Attention that is wrong in no way that its own numbers tell may be told by what becomes of
   the model with it, which --model says. */
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

/* Whether a stage keeps the whole from a pass. asked: --want or --model is given. */
static inline int stage_shows_nothing(const stage *stages, int i, int asked) {
    return stages[i].judged ? stages[i].v.kind == VERDICT_INSUFFICIENT
                            : i == GRADIENTS && asked;
}

static inline int judges_more_than_places(const stage *stages) {
    for (int i = POSITIONS + 1; i < STAGES; i++)
        if (stages[i].judged) return 1;
    return 0;
}

/* A pass needs all that was judged to be right, and more than places and positions. */
static inline verdict whole_verdict(const stage *stages, int asked) {
    const stage *worst = named_by_model(stages, worst_stage(stages));
    verdict v = {.kind = VERDICT_INSUFFICIENT};
    if (worst) v = worst->v;
    if (v.kind == VERDICT_RIGHT && !judges_more_than_places(stages))
        v.kind = VERDICT_INSUFFICIENT;
    for (int i = 0; i < STAGES; i++)
        if (v.kind != VERDICT_WRONG && stage_shows_nothing(stages, i, asked))
            v.kind = VERDICT_INSUFFICIENT;
    return v;
}

/* ---- in a line ---- */

typedef struct summary {
    char text[1200];
} summary;

static inline void summary_add(summary *s, const char *format, ...) {
    size_t length = strlen(s->text);
    va_list list;
    va_start(list, format);
    vsnprintf(s->text + length, sizeof s->text - length, format, list);
    va_end(list);
}

/* "places, labels right"; 0: there is none. */
static inline int summary_add_kind(summary *s, const stage *stages, verdict_kind kind) {
    int count = 0;
    for (int i = 0; i < STAGES; i++)
        if (stages[i].judged && stages[i].v.kind == kind)
            summary_add(s, "%s%s", count++ ? ", " : *s->text ? "; " : "", stage_names[i].name);
    if (count) summary_add(s, kind == VERDICT_RIGHT ? " right" : " marginal");
    return count;
}

/* Evidence begins with numbers; why they show nothing is in its second sentence. */
static inline void summary_add_silent(summary *s, const stage *stage, int i) {
    const char *name = stage_names[i].name, *end = name + strlen(name) - 2;
    int plural = end[1] == 's' && end[0] != 's'; /* not loss */
    const char *why = stage->judged ? stage->v.line[stage->v.lines > 1] : stage_needs(stage, i);
    summary_add(s, "%s%s ", *s->text ? "; " : "", name);
    if (stage->judged)
        summary_add(s, "%s nothing: %s", plural ? "show" : "shows", why);
    else
        summary_add(s, "not judged: it takes %s", why);
}

/* "": the verdict says it all. */
static inline void summarize(summary *s, const stage *stages, const verdict *v, int asked) {
    *s->text = 0;
    if (v->kind != VERDICT_INSUFFICIENT) return;
    summary_add_kind(s, stages, VERDICT_RIGHT);
    summary_add_kind(s, stages, VERDICT_MARGINAL);
    for (int i = 0; i < STAGES; i++)
        if (stage_shows_nothing(stages, i, asked)) summary_add_silent(s, &stages[i], i);
    if (!judges_more_than_places(stages))
        summary_add(s, "%s", *s->text ? "; nothing more was judged" : "nothing was judged");
    text_mend(s->text);
}
#endif
