/* SPDX-License-Identifier: MIT OR Unlicense */
/* answers.h - the right loss of a step, the losses that known mistakes give, and the verdict on
 * the loss that a rank reports. */
#ifndef ORACLE_ANSWERS_H
#define ORACLE_ANSWERS_H
#include "oracle/verdict/tell_apart.h"
#include "oracle/dump/metadata.h"
#include "oracle/verdict/law.h"

enum { ANSWERS = 64, ACCEPTED = 4 };
typedef struct answer {
    double loss;            /* NaN: the mistake cannot be made here */
    const char *name, *how; /* how: which form of the mistake; NULL: it has one form */
} answer;

typedef struct answers {
    double right, slack; /* slack: absolute, from roundings (roundings.h) */
    double size, parts;  /* sums of absolute values, as terms of `right` may cancel: size over
                            tokens or documents, parts over ranks' micro-batches */
    int low_precision;   /* some inputs, or the reported loss, have 16 bits */
    char what[80];       /* what `right` is computed from, for messages */
    answer other[ANSWERS], accepted[ACCEPTED]; /* accepted: no mistakes, see their `how` */
    int count, accepted_count;
    int made;            /* entries of `other` before those that only scale `right` */
    const char *lacks;   /* why no loss can be judged; NULL: it can */
    const char *vacuous; /* why a right loss would prove nothing; NULL: it proves something */
    const char *unknown; /* completes "no known ... gives that number"; NULL: "mistake" */
    const char *hint;    /* added to the verdict on a wrong loss; NULL: nothing */
    const char *design;  /* what depends on the number of ranks by design; NULL: nothing */
} answers;

static inline void answers_add(answers *a, const char *name, double loss, const char *how) {
    if (a->count < ANSWERS) a->other[a->count++] = (answer){loss, name, how};
}

static inline void answers_accept(answers *a, double loss, const char *how) {
    if (a->accepted_count < ACCEPTED)
        a->accepted[a->accepted_count++] = (answer){loss, NULL, how};
}

/* Adds the mistakes that any loss may suffer when ranks combine their losses into one. */
static inline void answers_add_reports(answers *a, const dump_facts *f) {
    double sp = f->sp > 1 ? (double)f->sp : NAN; /* one rank averages and adds nothing */
    double dp = f->world > f->sp ? (double)(f->world / f->sp) : NAN;
    a->made = a->count;
    answers_add(a, "shares_averaged", a->right / sp, "over the ranks of a sequence");
    answers_add(a, "losses_added", a->right * sp, "over the ranks of a sequence");
    answers_add(a, "losses_added", a->right * dp, "over replicas");
    answers_add(a, "losses_added", a->right * sp * dp, "over all ranks");
}

/* Whether a mistake's loss differs from `right` by more than the limit. */
static inline int answer_shows(const law *l, double loss, double right) {
    return isfinite(loss) && !law_equal(l, loss, right);
}

/* Whether any form of the mistake would show. name NULL: of any mistake that does not only
   scale `right`. */
static inline int answers_show(const answers *a, const law *l, const char *name) {
    for (int i = 0; i < (name ? a->count : a->made); i++)
        if ((!name || !strcmp(a->other[i].name, name)) &&
            answer_shows(l, a->other[i].loss, a->right))
            return 1;
    return 0;
}

/* Notes which mistakes would give another loss. */
static inline void answers_try(const answers *a, const law *l, verdict *v) {
    for (int i = 0; i < a->count; i++)
        if (!isnan(a->other[i].loss))
            verdict_try(v, a->other[i].name, a->other[i].how,
                        !law_equal(l, a->other[i].loss, a->right));
}

static inline void answers_name(const answers *a, const law *l, verdict *v) {
    for (int i = 0; i < a->count; i++) {
        const answer *one = &a->other[i];
        int named = v->count;
        if (!law_equal(l, l->got, one->loss) || !answer_shows(l, one->loss, a->right)) continue;
        verdict_name(v, mistake_named(one->name));
        if (v->count > named && one->how) verdict_say(v, "%s: %s", one->name, one->how);
    }
}

/* The first accepted answer that equals the reported loss; NULL: none. */
static inline const answer *answers_accepted(const answers *a, const law *l) {
    for (int i = 0; i < a->accepted_count; i++)
        if (law_equal(l, l->got, a->accepted[i].loss)) return &a->accepted[i];
    return NULL;
}

static inline void answers_say(const answers *a, const law *l, verdict *v) {
    char widened[40] = "";
    if (l->tolerance > 0) snprintf(widened, sizeof widened, ", and tolerance %g", l->tolerance);
    verdict_say(v, "got %.9g; %s give %.9g (within %.3g: rounding%s%s)", l->got, a->what,
                a->right, law_limit(l, a->right), a->low_precision ? " to 16 bits" : "",
                widened);
}

/* Whether log-probs from a second forward pass, in other kernels, explain the difference. No
   limit can be derived for these, so such a loss is neither right nor wrong. */
static inline int answers_anew(const answers *a, const law *l) {
    return fabs(l->got - a->right) <= 1e-3 * a->size;
}

/* Sets the verdict: right, insufficient or wrong. The caller names a wrong loss's mistakes. */
static inline void answers_judge(const answers *a, const law *l, verdict *v) {
    const answer *accepted = answers_accepted(a, l);
    int right = law_equal(l, l->got, a->right);
    memset(v, 0, sizeof *v);
    answers_say(a, l, v);
    if (a->design) verdict_say(v, "%s", a->design);
    v->kind = right || accepted ? VERDICT_RIGHT : VERDICT_WRONG;
    if (a->lacks) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, "%s", a->lacks);
    } else if (!isfinite(a->right)) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, "a number that it is made of is NaN or Inf already, or nothing is "
                       "counted");
    } else if (v->kind == VERDICT_RIGHT && a->vacuous) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, "%s", a->vacuous);
        if (a->low_precision)
            verdict_say(v, "numbers of 16 bits hide it, too: write the loss in float32, and "
                           "log-probs");
    } else if (v->kind == VERDICT_RIGHT) {
        if (!right) verdict_say(v, "%s", accepted->how);
        answers_try(a, l, v);
    }
}

/* Completes the verdict on a wrong loss, after all mistakes have been tried. */
static inline void answers_end(const answers *a, const law *l, verdict *v) {
    if (v->kind != VERDICT_WRONG) return;
    apart_say(v);
    if (!v->count && (law_marginal(l, a->right) || answers_anew(a, l)))
        v->kind = VERDICT_MARGINAL;
    if (!v->count)
        verdict_say(v,
                    "no known %s gives that number; log-probs that were computed anew for "
                    "the dump, and not those of the loss, need --tolerance 0.01",
                    a->unknown ? a->unknown : "mistake");
    if (v->kind == VERDICT_WRONG && a->hint) verdict_say(v, "%s", a->hint);
}
#endif
