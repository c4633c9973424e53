/* SPDX-License-Identifier: MIT OR Unlicense */
/* law.h - judges one number without a dump: compares a gradient norm or a loss with the wanted
 * one, or a loss with the mean that sums and counts give. */
#ifndef ORACLE_LAW_H
#define ORACLE_LAW_H
#include <math.h>
#include <stdint.h>
#include "verdict.h"

#ifndef LAW_GROUPS
#define LAW_GROUPS 4096
#endif
/* What `got` and `want` may be. 0: another measure of a gradient, such as a factor between two
   gradients; unlike a norm, it is never off by the root of a number of ranks. */
enum { LAW_NORM = 1, LAW_LOSS = 2 };

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
    int reads;         /* what got and want may be: LAW_NORM, LAW_LOSS or both */
    int64_t window, configured; /* micro-batches of this step, and as configured; 0: unknown */
    /* Whose number `got` is. A mistake that uses one group's sum or count may use only groups i
       with i % own_of == own; own_of 0: any group, -1: none. */
    int64_t own, own_of;
} law;

/* A number that adds `right` n times adds its rounding n times, so slack counts n times. */
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

/* Scalers of fp16 multiply the loss by a power of two, and gradients are divided by it. */
static inline void law_say_scale(verdict *v, const law *l, double ratio) {
    double power = round(log2(fabs(ratio)));
    if (!(fabs(power) >= 6) || !(fabs(fabs(ratio) / exp2(power) - 1) <= l->tolerance)) return;
    verdict_say(v, "it is 2^%.0f: a loss scale, as of fp16, that was %s gives it", power,
                power > 0 ? "not divided out" : "divided out twice");
}

/* The norm of one rank's shard has no exact factor: it is about 1 / sqrt(P) of the whole. */
static inline void law_say_unknown(verdict *v, const law *l, double ratio) {
    double shard = 1 / sqrt((double)l->sp);
    verdict_say(v, "no product of powers of sp, dp and accumulation is %.6g", ratio);
    law_say_scale(v, l, ratio);
    if (l->reads & LAW_NORM && l->sp > 1 && fabs(ratio - shard) < 0.1 * shard)
        verdict_say(v,
                    "1 / sqrt(sp) is %.4g: the norm of a part of the gradient, or of a rank's "
                    "own gradient before it is added to the others, is about that",
                    shard);
    verdict_say(v, "a factor that changes with the data is no scale: it may be a count "
                   "(--sums, --counts), a lost target, or the attention itself");
}

/* A norm that counts n copies of each gradient is sqrt(n) times the right one. A shard's norm,
   where n shards are alike, is the right one over sqrt(n). */
static inline void law_name_roots(const law *l, verdict *v) {
    static const char *const sizes[] = {"sp", "dp", "sp x dp"};
    double ranks[] = {(double)l->sp, (double)l->dp, (double)(l->sp * l->dp)};
    for (int i = 0; i < 3 && !v->count; i++) {
        int copies = law_equal(l, l->got, l->want * sqrt(ranks[i]));
        if (ranks[i] == 1 || (!copies && !law_equal(l, l->got, l->want / sqrt(ranks[i]))))
            continue;
        verdict_name(v, mistake_named(copies ? "norm_counts_copies" : "norm_of_part"));
        verdict_say(v, "%sthe root of %s: of gradient norms; no loss has such a factor",
                    copies ? "" : "1 over ", sizes[i]);
    }
}

/* Mistakes of a loss that is reported: its value is scaled, its gradient is not. */
static inline void law_name_losses(const law *l, verdict *v) {
    double sp = (double)l->sp, dp = (double)l->dp;
    double added[] = {sp, dp, sp * dp};
    for (int i = 0; i < 3; i++)
        if (added[i] > 1 && law_equal(l, l->got, l->want * added[i]))
            verdict_name(v, mistake_named("losses_added"));
    if (sp > 1 && law_equal(l, l->got, l->want / sp))
        verdict_name(v, mistake_named("shares_averaged"));
    for (int i = 0; i < MISTAKES; i++) {
        const mistake_scale *s = &mistakes[i].scale;
        if (!s->accumulation || s->sp || s->dp || l->accumulation == 1) continue;
        if (law_equal(l, l->got, l->want * law_factor(l, s))) verdict_name(v, &mistakes[i]);
    }
}

static inline void law_name_gradients(const law *l, verdict *v) {
    for (int i = 0; i < MISTAKES; i++)
        if (law_scales(&mistakes[i]) &&
            law_equal(l, l->got, l->want * law_factor(l, &mistakes[i].scale)))
            verdict_name(v, &mistakes[i]);
}

/* Says "as gradient norms: times_sp; as losses: losses_added": read as norms, `got` and `want`
   show other mistakes than read as losses. Returns whether one reading has several names. */
static inline int law_name_readings(const law *l, verdict *v) {
    char text[200] = "";
    int several = 0;
    for (int reading = LAW_NORM; reading <= LAW_LOSS; reading++) {
        verdict one = {.count = 0};
        if (l->reads && !(l->reads & reading)) continue;
        if (!l->reads && reading == LAW_LOSS) continue;
        (reading == LAW_LOSS ? law_name_losses : law_name_gradients)(l, &one);
        several |= one.count > 1;
        for (int i = 0; i < one.count; i++) {
            verdict_name(v, one.named[i]);
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s",
                     i       ? ", "
                     : *text ? reading == LAW_LOSS ? "; as losses: " : "; as gradient norms: "
                     : reading == LAW_LOSS ? "as losses: "
                                           : "as gradient norms: ",
                     one.named[i]->name);
        }
    }
    if (*text && l->reads == (LAW_NORM | LAW_LOSS))
        verdict_say(v, "%s (--norm or --loss says what they are)", text);
    return several;
}

/* Sums of a window divided by another number of micro-batches than it has. Without --window,
   numbers up to twice those of the step are tried. */
static inline void law_name_window(const law *l, verdict *v) {
    int64_t window = l->configured ? l->window : l->accumulation;
    int64_t first = l->configured ? l->configured : 1;
    int64_t last = l->configured ? l->configured : 2 * l->accumulation;
    if (!l->configured && (l->accumulation == 1 || l->accumulation > 64)) return;
    for (int64_t by = first; by <= last; by++) {
        if (by == window || !law_equal(l, l->got, l->want * (double)window / (double)by))
            continue;
        verdict_name(v, mistake_named("another_window"));
        verdict_say(v, "%lld/%lld: sums of %lld micro-batches over the number of %lld",
                    (long long)window, (long long)by, (long long)window, (long long)by);
        return;
    }
}

/* Notes that each mistake of scale would show: its factor here is not 1. */
static inline void law_try_factors(const law *l, verdict *v) {
    for (int i = 0; i < MISTAKES; i++)
        if (law_scales(&mistakes[i]) && law_factor(l, &mistakes[i].scale) != 1)
            verdict_try(v, mistakes[i].name, NULL, 1);
}

static inline void law_say_right(const law *l, verdict *v) {
    v->kind = VERDICT_RIGHT;
    if (l->sp == 1 && l->dp == 1 && l->accumulation == 1 && !l->configured) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, "with sp, dp and accumulation 1 no factor can show; give the sizes of "
                       "the run that `got` is of");
    } else if (l->reads & LAW_LOSS) {
        verdict_say(v, "if these are losses, compare gradient norms, too: the value of a loss "
                       "hides a wrong factor in its gradient");
    }
}

/* Single mistakes come first, then roots, then a window, then pairs of mistakes: the fewest
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
    if (law_equal(l, l->got, l->want)) {
        law_say_right(l, v);
        return;
    }
    v->kind = VERDICT_WRONG;
    if (law_name_readings(l, v)) law_say_apart(v, l);
    if (!v->count && l->reads & LAW_NORM) law_name_roots(l, v);
    if (!v->count || l->configured) law_name_window(l, v);
    if (!v->count && l->reads != LAW_LOSS) law_name_pairs(l, v);
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

/* Whether the mistake uses one group's sum or count. */
static inline int law_is_own(const mistake *m) {
    return m->mean == MEAN_LOCAL_COUNT || m->mean == MEAN_OWN || m->mean == MEAN_OWN_SHARE;
}

/* Whether a mistake that uses one group's sum or count may use group i. */
static inline int law_may_use(const law *l, int64_t i) {
    return l->own_of >= 0 && (!l->own_of || i % l->own_of == l->own);
}

/* Whether the mistake can be made with these groups, and is not another one under its name. */
static inline int law_can_be(const law *l, const mistake *m) {
    if (m->mean == MEAN_NAN) return law_has_empty(l);
    if (m->mean == MEAN_OF_NON_EMPTY && !law_has_empty(l)) return 0; /* as MEAN_OF_MEANS */
    if (m->mean == MEAN_OVER_ALL && !(l->all_tokens > 0)) return 0;
    return m->mean != MEAN_NONE && (!l->shares || m->mean == MEAN_OVER_GROUPS);
}

static inline int law_matches(const law *l, const mistake *m) {
    if (!law_can_be(l, m)) return 0;
    if (m->mean == MEAN_NAN) return isnan(l->got);
    if (!law_is_own(m)) return law_gives(l, m->mean, 0);
    for (int64_t i = 0; i < l->groups; i++)
        if (law_may_use(l, i) && law_gives(l, m->mean, i)) return 1;
    return 0;
}

/* Notes which mistakes would give another mean of these groups than the right one. */
static inline void law_try_means(const law *l, const char *groups, verdict *v) {
    double right = l->has_right ? l->right : law_mean(l, MEAN_NONE, 0);
    for (int i = 0; i < MISTAKES; i++) {
        const mistake *m = &mistakes[i];
        if (!law_can_be(l, m)) continue;
        for (int64_t k = 0; k < (law_is_own(m) ? l->groups : 1); k++)
            if (!law_is_own(m) || law_may_use(l, k))
                verdict_try(v, m->name, groups,
                            m->mean == MEAN_NAN ||
                                !law_equal(l, law_mean(l, m->mean, k), right));
    }
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

/* ---- a wrong divisor ---- */

/* Numbers of a step by which law_name_count explains a divisor that is not its labels. */
typedef struct law_counts {
    double labels, tokens; /* of the step; tokens: with a label or not */
    int64_t sp, dp, accumulation;
} law_counts;

/* Rounds the divisor `by` to a whole number. off: its error. 0: no whole number is that near,
   `off` is too large to tell, or it is the number of labels. */
static inline double law_whole(const law_counts *c, double by, double off) {
    if (!(by > 0.5) || !(off < 0.01) || !(fabs(by - round(by)) <= fmax(off, 1e-9 * by)))
        return 0;
    return round(by) == c->labels ? 0 : round(by);
}

static inline void law_name_count(const law_counts *c, double by, verdict *v) {
    double dp = (double)c->dp, micro = (double)c->accumulation, world = dp * (double)c->sp;
    double groups[] = {micro, dp, micro * dp, world, world * micro};
    const char *name = NULL;
    if (by == 0) return;
    for (int i = 0; i < 5 && !name; i++)
        if (by == groups[i]) name = "micro_batches_counted";
    if (!name && by == c->tokens) name = "all_tokens_counted";
    if (!name && micro > 1 && fmod(by * micro, c->labels) == 0) name = "another_window";
    if (!name && by > c->labels && by < c->tokens) name = "counted_before_mask";
    if (!name && (micro > 1 || by > c->tokens)) name = "another_window";
    if (name) verdict_name(v, mistake_named(name));
    if (name && micro > 1 && !strcmp(name, "counted_before_mask"))
        verdict_name(v, mistake_named("another_window"));
    verdict_say(v, "it is the sum of all tokens over %.0f, where %.0f tokens have a label", by,
                c->labels);
}

static inline void law_judge(const law *l, verdict *v) {
    memset(v, 0, sizeof *v);
    if (l->groups)
        law_judge_mean(l, v);
    else
        law_judge_ratio(l, v);
}
#endif
