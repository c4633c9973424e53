/* SPDX-License-Identifier: MIT OR Unlicense */
/* step.h - what becomes of the gradient: its norm, clip, and the optimizer's step.
 *
 *     norm  = sqrt(sum of squares of all parameters' gradients, each element once)
 *     g     = gradient * min(1, max_norm / (norm + 1e-6))
 *     AdamW:  p (1 - lr weight_decay) - lr m' / (sqrt(v') + eps), where
 *             m' = (beta1 m + (1 - beta1) g) / (1 - beta1^t), v' from g^2 likewise
 *     SGD:    p - lr (g + weight_decay p)
 *
 * Steps are compared as after - param: compared as after, a large parameter would mask an error
 * of a small step. */
#ifndef ORACLE_STEP_H
#define ORACLE_STEP_H
#include "step_ways.h"
#include "swapped_ranges.h"

/* Do the steps of all ranks match the way? NaN does not. */
static inline int way_matches(const step_check *c, int way) {
    for (int64_t r = 0; r < c->n->d->world; r++)
        if (!(c->of[r].distance[way] <= step_limit(c, &c->of[r]))) return 0;
    return 1;
}

/* Does the way's step differ from the right one by more than rounding can hide? */
static inline int way_shows(const step_check *c, int way) {
    for (int64_t r = 0; r < c->n->d->world; r++)
        if (c->of[r].from_right[way] > 4 * step_limit(c, &c->of[r])) return 1;
    return 0;
}

static inline void step_total(const step_check *c, step_match *total) {
    double *sum = (double *)total;
    memset(total, 0, sizeof *total);
    for (int64_t r = 0; r < c->n->d->world; r++)
        for (size_t i = 0; i < sizeof *total / sizeof *sum; i++)
            sum[i] += ((const double *)&c->of[r])[i];
}

/* If rounding hides the right step, the actual step shows nothing. But it is wrong if it is over
   twice as far off as rounding and tolerance allow together. */
static inline int step_shows_nothing(const step_check *c, const step_match *m, verdict *v) {
    const char *why = m->step.got_got == 0 && m->step.want_want > 0
                          ? "no parameter moved, as after an overflow of fp16; dump a step "
                            "that was made"
                      : m->step.want_want == 0 ? "no step is to be made: gradients or lr are 0"
                      : m->step.want_want < 9 * m->rounding &&
                              m->distance[0] <= 4 * step_limit(c, m)
                          ? "the step is lost in the rounding of parameters; dump the fp32 "
                            "ones that the optimizer keeps"
                          : NULL;
    if (why) v->kind = VERDICT_INSUFFICIENT;
    if (why) verdict_say(v, "%s", why);
    return why != NULL;
}

/* Whether the mistake can be made in this step: the optimizer has what it is about, and the
   dump says what it takes. */
static inline int way_can_be(const step_check *c, int i) {
    const step_way *way = &step_ways[i];
    if (!way->name || isnan(c->of[0].from_right[i])) return 0;
    if (way->decay == DECAY_VECTORS && !c->vectors) return 0; /* one group */
    return c->n->d->facts.optimizer == DUMP_ADAMW || way->clip || way->decay;
}

/* Notes which mistakes would change this step. */
static inline void try_ways(const step_check *c, verdict *v) {
    for (int i = 1; i < STEP_WAYS; i++)
        if (way_can_be(c, i))
            verdict_try(v, step_ways[i].name, step_ways[i].how, way_shows(c, i));
}

/* Bias corrections make the update proportional to this, where eps is small. */
static inline double step_correction(const dump_facts *f, double t) {
    return sqrt(1 - pow(f->beta2, t)) / (1 - pow(f->beta1, t));
}

/* Whether the actual update is by another factor than those bias corrections give. In bf16 noise
   is large, and lets several factors match; their mean over many elements is exact. */
static inline int way_is_another_factor(const step_check *c, const step_way *way) {
    const dump_facts *f = &c->n->d->facts;
    step_match m;
    step_total(c, &m);
    double x = likeness_factor(&m.update), t = (double)f->step;
    double off = 0.02 + sqrt(m.rounding / (m.update.want_want * m.elements));
    return !(fabs(x * step_correction(f, t) / step_correction(f, t + way->later) - 1) < off);
}

/* The distance of all ranks' steps from the way; Inf: they do not match, or are hardly nearer
   to the way than to the right step. */
static inline double way_distance(const step_check *c, int way) {
    double away = 0, right = 0;
    if (step_ways[way].decay == DECAY_VECTORS && !c->vectors) return INFINITY; /* one group */
    for (int64_t r = 0; r < c->n->d->world; r++) {
        away += c->of[r].distance[way];
        right += c->of[r].distance[0];
    }
    if (step_ways[way].later && away > 1e-6 * right &&
        way_is_another_factor(c, &step_ways[way]))
        return INFINITY;
    return way_matches(c, way) && 4 * away < right ? sqrt(away) : INFINITY;
}

static inline void say_step_number(const dump_facts *f, int64_t t, verdict *v) {
    verdict_say(v, "bias corrections of step %lld give it, where step is %lld", (long long)t,
                (long long)f->step);
}

/* Names the matching ways that are at most four times as far away as the nearest: noise of many
   elements does not point towards another way. */
static inline void name_ways(const step_check *c, verdict *v) {
    double least = INFINITY;
    for (int i = 1; i < WAY_REPORTED; i++)
        if (way_distance(c, i) < least) least = way_distance(c, i);
    for (int i = 1; i < WAY_REPORTED; i++)
        if (isfinite(least) && way_distance(c, i) <= 4 * least) {
            verdict_name(v, mistake_named(step_ways[i].name));
            if (step_ways[i].later)
                say_step_number(&c->n->d->facts, c->n->d->facts.step + step_ways[i].later, v);
        }
    if (!v->count && isfinite(way_distance(c, WAY_REPORTED)))
        verdict_say(v, "with the norm that ranks report in the clip the step is right: see "
                       "what is wrong with that norm");
}

static inline int rank_is_unmoved(const step_match *m) {
    return m->step.got_got == 0 && m->step.want_want > 9 * m->rounding;
}

/* Names ranks that did not move at all, if all others made the right step. 1: named. */
static inline int name_unmoved_ranks(const step_check *c, verdict *v) {
    int64_t first = -1, count = 0;
    for (int64_t r = 0; r < c->n->d->world; r++) {
        int unmoved = rank_is_unmoved(&c->of[r]);
        if (unmoved && !count++) first = r;
        if (!unmoved && !(c->of[r].distance[0] <= step_limit(c, &c->of[r]))) return 0;
    }
    if (!count) return 0;
    verdict_name(v, mistake_named("shard_not_updated"));
    verdict_say(v,
                "%lld ranks did not move at all, the first is rank %lld; all others made "
                "the right step",
                (long long)count, (long long)first);
    return 1;
}

/* The factor of the actual step to the right one; NaN: no one factor fits all ranks. A wrong lr
   gives one, because decay and update are both proportional to lr. */
static inline double step_factor(const step_check *c, const step_match *total) {
    double x = likeness_factor(&total->step);
    for (int64_t r = 0; r < c->n->d->world; r++) {
        const step_match *m = &c->of[r];
        if (!(likeness_squared(&m->step, x) <= (x * x > 1 ? x * x : 1) * step_limit(c, m)))
            return NAN;
    }
    return x;
}

static inline void name_factor(const step_check *c, const step_match *total, verdict *v) {
    const dump_facts *f = &c->n->d->facts;
    double x = step_factor(c, total), clip = clip_factor(f->max_norm, sqrt(c->n->all));
    if (!(x > 0) || total->step.want_want < 9 * total->rounding) return;
    if (c->per_parameter)
        verdict_say(v, "it is %.6g times the right step, as with %.6g times each lr", x, x);
    else
        verdict_say(v, "it is %.6g times the right step, as with lr %.6g", x, x * f->lr);
    if (f->optimizer == DUMP_ADAMW || clip == 1)
        verdict_name(v, mistake_named("another_lr"));
    else
        verdict_say(v, "or with a clip by a norm of %.6g, where it is %.6g",
                    f->max_norm / (x * clip), sqrt(c->n->all));
}

/* ---- numbers that give the step, where no mistake does ---- */

/* Whether a number gives the step: within the limits of all ranks, and four times nearer than
   the right one. squared: the square of its distance */
static inline int number_gives(const step_check *c, const step_match *total, double squared) {
    double limit = 0;
    for (int64_t r = 0; r < c->n->d->world; r++) limit += step_limit(c, &c->of[r]);
    return squared <= limit && 16 * squared < total->distance[0];
}

/* Another weight decay gives the step, or none on some parameters. */
static inline void name_decay(const step_check *c, const step_match *m, verdict *v) {
    const dump_facts *f = &c->n->d->facts;
    double x = likeness_factor(&m->decay); /* -lr weight_decay */
    if (!c->per_parameter && number_gives(c, m, likeness_squared(&m->decay, x)) &&
        -x * f->lr > 0) {
        verdict_name(v, mistake_named("another_decay"));
        verdict_say(v, "weight decay %.6g gives it, where it is %.6g", -x / f->lr,
                    f->weight_decay);
    } else if (c->undecayed_ranges && c->right_ranges && !c->wrong_ranges) {
        verdict_name(v, mistake_named("another_decay"));
        verdict_say(v,
                    "decay acts on all parameters but %s; if that is meant, write "
                    "weight_decay.NAME 0 for each into the metadata",
                    c->undecayed);
    }
}

/* The number of steps whose bias corrections give the update; 0: none below 1000 does. */
static inline int step_number_of(const dump_facts *f, double factor) {
    int best = 0;
    double nearest = 1e-4;
    for (int t = 1; t < 1000; t++) {
        double off = fabs(step_correction(f, t) / step_correction(f, (double)f->step) / factor -
                          1);
        if (t == f->step || !(off < nearest)) continue;
        best = t;
        nearest = off;
    }
    return best;
}

static inline void name_step_number(const step_check *c, const step_match *m, verdict *v) {
    const dump_facts *f = &c->n->d->facts;
    double x = likeness_factor(&m->update);
    int t = x > 0 ? step_number_of(f, x) : 0;
    if (f->optimizer != DUMP_ADAMW || !t ||
        !number_gives(c, m, likeness_squared(&m->update, x)))
        return;
    verdict_name(v, mistake_named("another_step_number"));
    say_step_number(f, t, v);
}

static inline void judge_step(const step_check *c, stage *s) {
    verdict *v = stage_begin(s, VERDICT_WRONG);
    step_match total;
    step_total(c, &total);
    verdict_say(v,
                "%lld parameters moved by %.6g; %s would move them by %.6g, and the two are "
                "%.3g apart (tolerance %g of it, and %.3g for rounding)",
                (long long)c->parameters, sqrt(total.step.got_got),
                c->n->d->facts.optimizer == DUMP_SGD ? "SGD" : "AdamW",
                sqrt(total.step.want_want), sqrt(total.distance[0]), c->n->tolerance,
                sqrt(total.rounding));
    if (step_shows_nothing(c, &total, v)) return;
    if (way_matches(c, 0)) {
        v->kind = VERDICT_RIGHT;
        try_ways(c, v);
        return;
    }
    name_ways(c, v);
    if (!v->count && !name_unmoved_ranks(c, v)) {
        name_factor(c, &total, v);
        name_step_number(c, &total, v);
        if (!v->count) name_decay(c, &total, v);
    }
    if (*c->first) verdict_say(v, "the first parameter with another step is %s", c->first);
}

/* vectors_skip_decay: biases and norms do not decay. 0, or -1 with d->error. */
static inline int try_step(stage *s, step_check *c, int vectors_skip_decay) {
    dump *d = c->n->d;
    c->vectors_skip_decay = vectors_skip_decay;
    c->parameters = c->vectors = c->right_ranges = c->undecayed_ranges = c->wrong_ranges = 0;
    *c->first = *c->undecayed = 0;
    memset(c->of, 0, (size_t)d->world * sizeof *c->of);
    for (int64_t i = 0; i < d->world * STEP_WAYS; i++) {
        const step_way *way = &step_ways[i % STEP_WAYS];
        c->numbers[i] = way_begin(&d->facts, way, way_clip(c->n, way, i / STEP_WAYS));
    }
    if (each_parameter(d, "after.", add_step, c)) return -1;
    if (c->parameters) judge_step(c, s);
    if (c->parameters && vectors_skip_decay)
        verdict_say(&s->v,
                    "no decay acts on the %lld biases and norms, as most frameworks "
                    "have it",
                    (long long)c->vectors);
    return 0;
}

/* Most frameworks do not decay biases and norms. This is tried only if the step is wrong with
   decay on all parameters. */
static inline int try_steps(stage *s, step_check *c) {
    stage other = {.judged = 0};
    if (try_step(s, c, 0)) return -1;
    if (!s->judged || s->v.kind != VERDICT_WRONG || !c->vectors ||
        c->n->d->facts.weight_decay == 0)
        return 0;
    if (try_step(&other, c, 1)) return -1;
    if (other.v.kind == VERDICT_RIGHT || (other.v.count && !s->v.count)) *s = other;
    return 0;
}

static inline int try_all(stage *s, step_check *c) {
    if (try_steps(s, c)) return -1;
    return s->judged && s->v.kind == VERDICT_WRONG && !s->v.count ? check_swaps(&s->v, c) : 0;
}

static inline int check_step(stage *s, const step_norms *n) {
    step_check c = {.n = n};
    int status = 0;
    if (n->d->facts.optimizer == DUMP_NO_OPTIMIZER || n->d->facts.lr == 0) return 0;
    if (settings_are_of_parameters(n->d)) return -1;
    c.of = (step_match *)calloc((size_t)n->d->world, sizeof *c.of);
    c.numbers = (way_numbers *)calloc((size_t)(n->d->world * STEP_WAYS), sizeof *c.numbers);
    if (!c.of || !c.numbers)
        status = (seqpar_fail(&n->d->error, SEQPAR_ERR_MEMORY, "no memory"), -1);
    if (!status) status = try_all(s, &c);
    free(c.of);
    free(c.numbers);
    return status;
}

/* Stages REDUCTION, NORM and STEP, and whether copies of a gradient are equal. 0, or -1 with
   d->error. */
static inline int check_steps(stage *stages, dump *d, double tolerance) {
    stage copies = {.judged = 0};
    step_norms n = {.d = d, .tolerance = tolerance, .copies = &copies};
    int status = 0;
    double *clip;
    n.held = (double *)calloc((size_t)d->world * 4, sizeof *n.held);
    n.local = n.held ? n.held + d->world : NULL;
    n.shown = n.held ? n.local + d->world : NULL;
    clip = n.held ? n.shown + d->world : NULL;
    if (!n.held) status = (seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory"), -1);
    if (!status) status = each_parameter(d, "grad.", add_norms, &n);
    for (int64_t r = 0; !status && r < d->world; r++) {
        n.shown[r] = NAN; /* until check_norm has read it */
        clip[r] = clip_factor(d->facts.max_norm, sqrt(n.local[r]));
    }
    if (!status) status = check_reduction(&stages[REDUCTION], d, tolerance, clip);
    stage_add(&stages[REDUCTION], &copies);
    if (!status) status = check_norm(&stages[NORM], &n);
    if (!status) status = check_step(&stages[STEP], &n);
    arrfree(n.each);
    free(n.held);
    return status;
}
#endif
