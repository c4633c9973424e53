/* SPDX-License-Identifier: MIT OR Unlicense */
/* law.h - judges one number without a dump: a gradient norm or a loss by the wanted one, or a
 * loss by the sums and counts that it is made of. */
#ifndef ORACLE_LAW_H
#define ORACLE_LAW_H
#include <math.h>
#include <stdint.h>
#include "verdict.h"

#ifndef LAW_GROUPS
#define LAW_GROUPS 4096
#endif
typedef struct law {
    double got, want;
    int64_t sp, dp, accumulation;
    /* sums and counts of `groups` ranks or micro-batches; groups 0: `want` is used instead */
    double sums[LAW_GROUPS], counts[LAW_GROUPS];
    int64_t groups;
    double all_tokens; /* supervised or not; 0: unknown */
    double tolerance;  /* relative */
    double slack;      /* absolute part of the limit: the rounding of `right` */
    double right;      /* the number that slack belongs to; 0: slack fits any number */
    int has_right;     /* `right` is used, not the sum of all sums over that of all counts */
    double copies;     /* how often a mistake may add `right` and its rounding; 0: never */
    double noise;      /* relative error of a factor, if below tolerance; 0: tolerance */
    int shares;        /* sums are shares of one mean: groups have no means of their own */
    int may_be_norms;  /* got and want may be roots of sums of squares */
    /* Whose number `got` is. A mistake that uses one group's sum or count may use only groups i
       with i % own_of == own; own_of 0: any group, -1: none. */
    int64_t own, own_of;
} law;

/* A number that is `right` several times has its rounding as often. */
static inline double law_limit(const law *l, double want) {
    double times = l->right != 0 ? fmin(fabs(want / l->right), l->copies) : 1;
    return l->tolerance * fabs(want) + l->slack * fmax(times, 1);
}

static inline int law_equal(const law *l, double got, double want) {
    return isfinite(want) && fabs(got - want) <= law_limit(l, want);
}

/* Within 1.5 limits; called for numbers beyond the limit. */
static inline int law_marginal(const law *l, double want) {
    return fabs(l->got - want) <= 1.5 * law_limit(l, want);
}

/* ---- a factor between two numbers ---- */

static inline double law_factor(const law *l, const mistake_scale *s) {
    return pow((double)l->sp, s->sp) * pow((double)l->dp, s->dp) *
           pow((double)l->accumulation, s->accumulation);
}

static inline int law_scales(const mistake *m) {
    return m->scale.sp || m->scale.dp || m->scale.accumulation;
}

/* Says which sizes tell the named mistakes apart: their factors are equal here. */
static inline void law_say_apart(verdict *v, const law *l) {
    verdict_say(v,
                "these give the same factor at sp %lld, dp %lld, accumulation %lld; run once "
                "more with sizes whose products all differ, such as 2, 3 and 5",
                (long long)l->sp, (long long)l->dp, (long long)l->accumulation);
}

/* Whether two mistakes, in different sizes (sp, dp, accumulation), give the factor together.
   There are many pairs, so the tolerance is `noise` if that is smaller. */
static inline int law_is_pair(const law *l, const mistake *a, const mistake *b) {
    law exact = *l;
    int same = (a->scale.sp && b->scale.sp) || (a->scale.dp && b->scale.dp) ||
               (a->scale.accumulation && b->scale.accumulation);
    double first = law_factor(l, &a->scale), second = law_factor(l, &b->scale);
    if (l->noise > 0 && l->noise < l->tolerance) exact.tolerance = l->noise;
    return law_scales(a) && law_scales(b) && !same && first != 1 && second != 1 &&
           law_equal(&exact, l->got, l->want * first * second);
}

/* Names the pair that gives the factor. If several pairs do, it lists them and names none. */
static inline void law_name_pairs(const law *l, verdict *v) {
    const mistake *of[2] = {NULL, NULL};
    char text[280] = "";
    int pairs = 0;
    for (int i = 0; i < MISTAKES; i++)
        for (int k = i + 1; k < MISTAKES; k++) {
            if (!law_is_pair(l, &mistakes[i], &mistakes[k])) continue;
            of[0] = &mistakes[i];
            of[1] = &mistakes[k];
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s and %s",
                     pairs++ ? "; " : "", of[0]->name, of[1]->name);
        }
    if (!pairs) return;
    verdict_say(v,
                pairs == 1 ? "no one mistake gives it; these two together do: %.280s"
                           : "no one mistake gives it; one of these pairs does, and other "
                             "sizes tell which: %.200s",
                text);
    v->all = pairs == 1;
    for (int i = 0; i < 2 && pairs == 1; i++) verdict_name(v, of[i]);
}

/* The norm of one rank's shard has no exact factor: it is about 1 / sqrt(P) of the whole. */
static inline void law_say_unknown(verdict *v, const law *l, double ratio) {
    double shard = 1 / sqrt((double)l->sp);
    verdict_say(v, "no product of powers of sp, dp and accumulation is %.6g", ratio);
    if (l->sp > 1 && fabs(ratio - shard) < 0.1 * shard)
        verdict_say(v,
                    "1 / sqrt(sp) is %.4g: the norm of a part of the gradient, or of a rank's "
                    "own gradient before it is added to the others, is about that",
                    shard);
    verdict_say(v, "a factor that changes with the data is no scale: it may be a count "
                   "(--sums, --counts), a lost target, or the attention itself");
}

/* A norm that counts n copies of each gradient is sqrt(n) times the right one. */
static inline void law_name_copies(const law *l, verdict *v) {
    double copies[] = {(double)l->sp, (double)l->dp, (double)(l->sp * l->dp)};
    for (int i = 0; i < 3 && !v->count; i++) {
        if (copies[i] == 1 || !law_equal(l, l->got, l->want * sqrt(copies[i]))) continue;
        verdict_name(v, mistake_named("norm_counts_copies"));
        verdict_say(v, "the root of %s: of gradient norms; no loss has such a factor",
                    i == 0   ? "sp"
                    : i == 1 ? "dp"
                             : "sp x dp");
    }
}

/* Single mistakes come first, then copies in a norm, then pairs of mistakes: the fewest
   mistakes are the likeliest. */
static inline void law_judge_ratio(const law *l, verdict *v) {
    double ratio = l->got / l->want;
    verdict_say(v,
                "got %.9g, wanted %.9g: a factor of %.6g; sp %lld, dp %lld, accumulation "
                "%lld, tolerance %g",
                l->got, l->want, ratio, (long long)l->sp, (long long)l->dp,
                (long long)l->accumulation, l->tolerance);
    if (isnan(l->want) || isinf(l->want) || l->want == 0) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, "the wanted number is %g, with which nothing can be compared", l->want);
        return;
    }
    if (l->sp == 1 && l->dp == 1 && l->accumulation == 1) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, "with sp, dp and accumulation 1 no factor can show; give the sizes of "
                       "the run that `got` is of");
        return;
    }
    if (law_equal(l, l->got, l->want)) {
        v->kind = VERDICT_RIGHT;
        verdict_say(v, "if these are losses, compare gradient norms, too: the value of a loss "
                       "hides a wrong factor in its gradient");
        return;
    }
    v->kind = VERDICT_WRONG;
    for (int i = 0; i < MISTAKES; i++)
        if (law_scales(&mistakes[i]) &&
            law_equal(l, l->got, l->want * law_factor(l, &mistakes[i].scale)))
            verdict_name(v, &mistakes[i]);
    if (v->count > 1) law_say_apart(v, l);
    if (!v->count && l->may_be_norms) law_name_copies(l, v);
    if (!v->count) law_name_pairs(l, v);
    if (v->count) return;
    if (law_marginal(l, l->want))
        v->kind = VERDICT_MARGINAL;
    else
        law_say_unknown(v, l, ratio);
}

/* ---- a mean of sums and counts ---- */

static inline double law_total(const double *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i];
    return sum;
}

/* The loss that a mistake makes of sums and counts; which: the group, if it uses only one's. */
static inline double law_mean(const law *l, mistake_mean mean, int64_t which) {
    double sum = law_total(l->sums, l->groups), count = law_total(l->counts, l->groups);
    double means = 0, filled = 0;
    for (int64_t i = 0; i < l->groups; i++)
        if (l->counts[i] > 0) {
            means += l->sums[i] / l->counts[i];
            filled++;
        }
    switch (mean) {
    case MEAN_OF_MEANS: return means / (double)l->groups;
    case MEAN_OF_NON_EMPTY: return means / filled;
    case MEAN_LOCAL_COUNT: return sum / l->counts[which];
    case MEAN_OWN: return l->sums[which] / l->counts[which];
    case MEAN_OWN_SHARE: return l->sums[which] / count;
    case MEAN_SUM_OF_MEANS: return means;
    case MEAN_OVER_GROUPS: return sum / count / (double)l->groups;
    case MEAN_OVER_ALL: return l->all_tokens > 0 ? sum / l->all_tokens : NAN;
    default: return sum / count;
    }
}

static inline int law_has_empty(const law *l) {
    for (int64_t i = 0; i < l->groups; i++)
        if (l->counts[i] == 0) return 1;
    return 0;
}

/* Whether the mistake gives `got`, and its number is not the right one. */
static inline int law_gives(const law *l, mistake_mean mean, int64_t which) {
    double x = law_mean(l, mean, which);
    double right = l->has_right ? l->right : law_mean(l, MEAN_NONE, 0);
    return law_equal(l, l->got, x) && !law_equal(l, x, right);
}

static inline int law_matches(const law *l, const mistake *m) {
    int own = m->mean == MEAN_LOCAL_COUNT || m->mean == MEAN_OWN || m->mean == MEAN_OWN_SHARE;
    if (m->mean == MEAN_NAN) return isnan(l->got) && law_has_empty(l);
    if (m->mean == MEAN_OF_NON_EMPTY && !law_has_empty(l)) return 0; /* as MEAN_OF_MEANS */
    if (m->mean == MEAN_NONE || (l->shares && m->mean != MEAN_OVER_GROUPS)) return 0;
    if (!own) return law_gives(l, m->mean, 0);
    for (int64_t i = 0; l->own_of >= 0 && i < l->groups; i++)
        if ((!l->own_of || i % l->own_of == l->own) && law_gives(l, m->mean, i)) return 1;
    return 0;
}

/* Equal counts, or equal means, hide most mistakes: then a right number says little. */
static inline int law_is_vacuous(const law *l) {
    double right = law_mean(l, MEAN_NONE, 0);
    return l->groups == 1 || law_equal(l, law_mean(l, MEAN_OF_MEANS, 0), right);
}

static inline void law_name_means(const law *l, verdict *v) {
    for (int i = 0; i < MISTAKES; i++)
        if (law_matches(l, &mistakes[i])) verdict_name(v, &mistakes[i]);
}

/* A right number is evidence only where the mean of means is another one. */
static inline void law_judge_mean(const law *l, verdict *v) {
    double right = law_mean(l, MEAN_NONE, 0);
    verdict_say(v, "got %.9g; the sums %.9g over the counts %.9g are %.9g (tolerance %g)",
                l->got, law_total(l->sums, l->groups), law_total(l->counts, l->groups), right,
                l->tolerance);
    if (law_total(l->counts, l->groups) == 0) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, "no token is counted, so there is no mean");
        return;
    }
    if (!isfinite(right)) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, "a sum is NaN or Inf already, so no mean can be right");
        return;
    }
    if (law_equal(l, l->got, right)) {
        v->kind = law_is_vacuous(l) ? VERDICT_INSUFFICIENT : VERDICT_RIGHT;
        if (v->kind == VERDICT_INSUFFICIENT)
            verdict_say(v, "a mean of means is the same here; give a step whose ranks or "
                           "micro-batches have unequal counts and losses");
        return;
    }
    v->kind = VERDICT_WRONG;
    law_name_means(l, v);
    if (v->count > 1)
        verdict_say(v, "these are equal here; a step with other counts tells them apart");
    if (v->count) return;
    if (law_marginal(l, right))
        v->kind = VERDICT_MARGINAL;
    else
        verdict_say(v, "no known way to divide these sums gives that number; numbers in bf16 "
                       "need --tolerance 0.01");
}

static inline void law_judge(const law *l, verdict *v) {
    memset(v, 0, sizeof *v);
    if (l->groups)
        law_judge_mean(l, v);
    else
        law_judge_ratio(l, v);
}
#endif
