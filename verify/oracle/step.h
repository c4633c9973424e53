/* SPDX-License-Identifier: MIT OR Unlicense */
/* step.h - what becomes of the gradient: its norm, clip, and the optimizer's step.
 *
 *     norm  = sqrt(sum of squares of all parameters' gradients, each element once)
 *     g     = gradient * min(1, max_norm / (norm + 1e-6))
 *     AdamW:  p (1 - lr weight_decay) - lr m' / (sqrt(v') + eps), where
 *             m' = (beta1 m + (1 - beta1) g) / (1 - beta1^t), v' from g^2 likewise
 *     SGD:    p - lr (g + weight_decay p)
 *
 * Steps are compared as after - param, so that a small one does not hide behind a large
 * parameter. */
#ifndef ORACLE_STEP_H
#define ORACLE_STEP_H
#include "norms.h"

/* ---- the optimizer's step ---- */

enum { CLIP_RIGHT, CLIP_NOT, CLIP_BY, CLIP_BEFORE }; /* BY: by the way's own norm */
enum { DECAY_ALL, DECAY_NONE, DECAY_VECTORS };
enum { MOMENTS_RIGHT, MOMENTS_LOST, MOMENTS_KEPT_WHOLE, MOMENTS_ADDED };
typedef struct step_way {
    const char *name; /* of the mistake; NULL: none that has a name */
    int clip;
    wrong_norm norm;
    int no_bias_correction, decay_coupled, decay_after, decay, eps_inside, by_micro_batches;
    int moments, first; /* first: t is 1 */
} step_way;

static inline double norm_of_own(const step_norms *n, int64_t r) {
    double shard = norm_of_shard(n, r);
    return isnan(shard) ? norm_of_local(n, r) : shard;
}
static inline double norm_as_reported(const step_norms *n, int64_t r) { return n->shown[r]; }

static const step_way step_ways[] = {
    {.name = NULL},
    {.name = "not_clipped", .clip = CLIP_NOT},
    {.name = "clip_by_own_norm", .clip = CLIP_BY, .norm = norm_of_own},
    {.name = "clip_before_reduction", .clip = CLIP_BEFORE},
    {.name = "norms_added", .clip = CLIP_BY, .norm = norms_added_over_all},
    {.name = "norms_added", .clip = CLIP_BY, .norm = norms_added_over_sequence},
    {.name = "norms_added", .clip = CLIP_BY, .norm = norms_added_over_replicas},
    {.name = "norms_added", .clip = CLIP_BY, .norm = norms_of_locals_added},
    {.name = "norm_counts_copies", .clip = CLIP_BY, .norm = again_over_all},
    {.name = "norm_counts_copies", .clip = CLIP_BY, .norm = again_over_sequence},
    {.name = "norm_counts_copies", .clip = CLIP_BY, .norm = again_over_replicas},
    {.name = "bias_correction_missing", .no_bias_correction = 1},
    {.name = "decay_coupled", .decay_coupled = 1},
    {.name = "decay_after_step", .decay_after = 1},
    {.name = "decay_missing", .decay = DECAY_NONE},
    {.name = "decay_groups_swapped", .decay = DECAY_VECTORS},
    {.name = "moments_lost", .moments = MOMENTS_LOST},
    {.name = "moments_lost", .moments = MOMENTS_LOST, .first = 1},
    {.name = "moments_not_scaled", .moments = MOMENTS_KEPT_WHOLE},
    {.name = "moments_not_scaled", .moments = MOMENTS_ADDED},
    {.name = "eps_inside_root", .eps_inside = 1},
    {.name = "steps_counted_by_micro_batches", .by_micro_batches = 1},
    {.name = NULL, .clip = CLIP_BY, .norm = norm_as_reported}};
enum { STEP_WAYS = sizeof step_ways / sizeof *step_ways, WAY_REPORTED = STEP_WAYS - 1 };

/* Whether it can be made without ranks' own gradients and names of parameters. */
static inline int way_is_plain(const step_way *way) {
    return way->clip <= CLIP_NOT && way->decay != DECAY_VECTORS;
}

/* What is the same for all elements of a rank; NaN: the dump does not say. */
typedef struct way_numbers {
    double clip, mean, square; /* 1 / (1 - beta^t) */
} way_numbers;

static inline way_numbers way_begin(const dump_facts *f, const step_way *way, double clip) {
    double t = way->first ? 1 : (double)f->step;
    way_numbers w = {clip, 1, 1};
    if (way->by_micro_batches) t *= (double)f->accumulation;
    if (way->no_bias_correction) return w;
    w.mean = 1 / (1 - pow(f->beta1, t));
    w.square = 1 / (1 - pow(f->beta2, t));
    return w;
}

/* Of the whole model's biases and norms: most frameworks let no decay act on them. */
static inline int is_vector(const char *parameter) {
    return strstr(parameter, "bias") || strstr(parameter, "norm") || strstr(parameter, "ln_");
}

/* One element before the step. */
typedef struct element {
    double p, g, m, v;
    int vector;
} element;

static inline void way_moments(const dump_facts *f, const step_way *way, double g, element *e) {
    double of_old = way->moments == MOMENTS_KEPT_WHOLE, of_new = way->moments == MOMENTS_ADDED;
    if (way->moments == MOMENTS_LOST) e->m = e->v = 0;
    e->m = (of_old > 0 ? 1 : f->beta1) * e->m + (of_new > 0 ? 1 : 1 - f->beta1) * g;
    e->v = (of_old > 0 ? 1 : f->beta2) * e->v + (of_new > 0 ? 1 : 1 - f->beta2) * g * g;
}

/* after - param of one element */
static inline double way_step(const dump_facts *f, const step_way *way, const way_numbers *w,
                              element e) {
    int spared = way->decay == DECAY_NONE || (way->decay == DECAY_VECTORS && !e.vector);
    double weight_decay = spared ? 0 : f->weight_decay, decay = f->lr * weight_decay;
    double g = e.g * w->clip, square, u;
    if (f->optimizer == DUMP_SGD) return -f->lr * (g + weight_decay * e.p);
    if (way->decay_coupled) g += weight_decay * e.p;
    way_moments(f, way, g, &e);
    square = e.v * w->square;
    u = f->lr * e.m * w->mean /
        (way->eps_inside ? sqrt(square + f->eps) : sqrt(square) + f->eps);
    if (way->decay_coupled) return -u;
    return way->decay_after ? (e.p - u) * (1 - decay) - e.p : -decay * e.p - u;
}

/* Squares of one rank's steps: what a way is away from the one that was made, and from the
   right one. */
typedef struct step_match {
    double away[STEP_WAYS], from_right[STEP_WAYS];
    double wanted, moved, along, rounding; /* along: product of the right step and the made */
} step_match;

typedef struct step_check {
    const step_norms *n;
    step_match *of;        /* (world) */
    way_numbers *numbers;  /* (world, STEP_WAYS) */
    dump_facts of_vectors; /* as they hold for biases and norms, which may not decay */
    int64_t parameters, vectors;
    char first[128]; /* parameter whose step is not the right one */
} step_check;

/* One parameter, whole; local clipped rank by rank and added up, NULL: not known. */
typedef struct step_inputs {
    whole param, grad, m, v;
    double *clipped;
    int vector;
} step_inputs;

/* What the gradient is multiplied by before the step; NaN: the dump does not say. */
static inline double way_clip(const step_norms *n, const step_way *way, int64_t rank) {
    double norm = way->clip == CLIP_BY ? way->norm(n, rank) : sqrt(n->all);
    return way->clip == CLIP_NOT || way->clip == CLIP_BEFORE ? 1
           : isnan(norm)                                     ? NAN
                         : clip_factor(n->d->facts.max_norm, norm);
}

static inline element element_at(const step_inputs *in, int64_t at) {
    return (element){in->param.values[at], in->grad.values[at],
                     in->m.values ? in->m.values[at] : 0, in->v.values ? in->v.values[at] : 0,
                     in->vector};
}

static inline void match_element(const step_check *c, step_match *to, int64_t rank,
                                 const step_inputs *in, int64_t at, double after, double u) {
    const way_numbers *numbers = &c->numbers[rank * STEP_WAYS];
    const dump_facts *f = in->vector ? &c->of_vectors : &c->n->d->facts;
    element e = element_at(in, at), clipped = e;
    double moved = after - e.p, right = 0;
    clipped.g = in->clipped ? in->clipped[at] : NAN;
    for (int i = 0; i < STEP_WAYS; i++) {
        int before = step_ways[i].clip == CLIP_BEFORE;
        double step = way_step(f, &step_ways[i], &numbers[i], before ? clipped : e);
        if (!i) right = step;
        to->away[i] += (moved - step) * (moved - step);
        to->from_right[i] += (step - right) * (step - right);
    }
    to->wanted += right * right;
    to->moved += moved * moved;
    to->along += moved * right;
    to->rounding += 2 * u * u * (after * after + e.p * e.p);
}

/* Each rank's local gradient clipped by its own norm, and what the reducer makes of it. */
static inline int clip_locals(const step_norms *n, const char *parameter, step_inputs *in) {
    tensor_name name;
    local_sums l = {0};
    int found = local_sums_read(n->d, tensor_of(&name, "local.", parameter), NULL, &l);
    double reducer = n->sum.got_want / n->sum.want_want;
    if (found > 0 && l.count == in->grad.count)
        in->clipped = (double *)calloc((size_t)l.count + 1, sizeof *in->clipped);
    for (int64_t r = 0; in->clipped && r < n->d->world; r++) {
        /* in units of the reduced gradient, where max_norm is meant */
        double clip = clip_factor(n->d->facts.max_norm, sqrt(n->local[r]));
        for (int64_t i = 0; i < l.count; i++)
            in->clipped[i] += reducer * clip * l.sum[sum_of(n->d, ADDED_OWN, r)][i];
    }
    local_sums_free(n->d, &l);
    return found < 0 ? -1 : 0;
}

static inline int step_sizes_differ(dump *d, const char *parameter, const step_inputs *in) {
    const whole *all[] = {&in->param, &in->m, &in->v};
    for (int i = 0; i < 3; i++)
        if (in->grad.values && all[i]->values && all[i]->count != in->grad.count) {
            seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                        "%.300s: parameter %.100s has %lld elements in one of param., m. and "
                        "v. and %lld in grad.",
                        d->ranks[0].path, parameter, (long long)all[i]->count,
                        (long long)in->grad.count);
            return -1;
        }
    return 0;
}

static inline void step_inputs_free(step_inputs *in) {
    whole_free(&in->param);
    whole_free(&in->grad);
    whole_free(&in->m);
    whole_free(&in->v);
    free(in->clipped);
}

static inline int step_inputs_read(const step_norms *n, const char *parameter,
                                   step_inputs *in) {
    dump *d = n->d;
    tensor_name name;
    memset(in, 0, sizeof *in);
    in->vector = is_vector(parameter) != 0;
    return whole_read(d, tensor_of(&name, "param.", parameter), 0, d->world, &in->param) ||
                   whole_read(d, tensor_of(&name, "grad.", parameter), 0, d->world,
                              &in->grad) ||
                   whole_read(d, tensor_of(&name, "m.", parameter), 0, d->world, &in->m) ||
                   whole_read(d, tensor_of(&name, "v.", parameter), 0, d->world, &in->v) ||
                   step_sizes_differ(d, parameter, in) ||
                   (in->grad.values && clip_locals(n, parameter, in))
               ? -1
               : 0;
}

/* Gradients of 16 bits may have been rounded for the dump alone. */
static inline double step_limit(const step_check *c, const step_match *m) {
    double limit = 4 * dump_rounding(c->n->d);
    if (limit < c->n->tolerance) limit = c->n->tolerance;
    return m->rounding + limit * limit * m->wanted;
}

/* One rank's range of after. */
static inline int match_rank(step_check *c, int64_t rank, const char *parameter,
                             const step_inputs *in) {
    dump *d = c->n->d;
    tensor_name name;
    const seqpar_safetensors_tensor *t = seqpar_safetensors_find(
        d->ranks[rank].file, tensor_of(&name, "after.", parameter));
    step_match one = {.wanted = 0};
    double *after, *sum = (double *)&one, *all = (double *)&c->of[rank];
    part p;
    if (!t) return 0;
    if (part_of(d, rank, t, &p)) return -1;
    if (p.total != in->grad.count) {
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor %.100s has %lld elements in all, and its grad. one %lld",
                    d->ranks[rank].path, name.text, (long long)p.total,
                    (long long)in->grad.count);
        return -1;
    }
    if (!(after = dump_doubles(d, rank, t))) return -1;
    for (int64_t i = 0; i < p.count; i++)
        match_element(c, &one, rank, in, p.offset + i, after[i], dtype_rounding(t->dtype));
    free(after);
    if (!*c->first && !(one.away[0] <= step_limit(c, &one)))
        snprintf(c->first, sizeof c->first, "%s", parameter);
    for (size_t i = 0; i < sizeof one / sizeof *sum; i++) all[i] += sum[i];
    return 0;
}

static inline int add_step(void *user, const char *parameter) {
    step_check *c = (step_check *)user;
    step_inputs in;
    int status = step_inputs_read(c->n, parameter, &in);
    if (!status && in.param.values && in.grad.values) {
        c->parameters++;
        c->vectors += in.vector;
        for (int64_t r = 0; !status && r < c->n->d->world; r++)
            status = match_rank(c, r, parameter, &in);
    }
    step_inputs_free(&in);
    return status;
}

#include "swaps.h" /* which takes ways and matches from above */

/* Whether all ranks' steps are made so; NaN is not. */
static inline int way_fits(const step_check *c, int way) {
    for (int64_t r = 0; r < c->n->d->world; r++)
        if (!(c->of[r].away[way] <= step_limit(c, &c->of[r]))) return 0;
    return 1;
}

/* Whether that way makes another step than the right one, beyond what rounding hides. */
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

/* A right step that is lost in rounding shows nothing; one that is twice as far off as rounding
   and tolerance allow together is wrong, however small the right one is. */
static inline int step_shows_nothing(const step_check *c, const step_match *m, verdict *v) {
    const char *why = m->moved == 0 && m->wanted > 0
                          ? "no parameter moved, as after an overflow of fp16; dump a step "
                            "that was made"
                      : m->wanted == 0 ? "no step is to be made: gradients or lr are 0"
                      : m->wanted < 9 * m->rounding && m->away[0] <= 4 * step_limit(c, m)
                          ? "the step is lost in the rounding of parameters; dump the fp32 "
                            "ones that the optimizer keeps"
                          : NULL;
    if (why) v->kind = VERDICT_INSUFFICIENT;
    if (why) verdict_say(v, "%s", why);
    return why != NULL;
}

/* Whether any form of the way's mistake shows. */
static inline int mistake_shows(const step_check *c, int way) {
    for (int i = 1; i < STEP_WAYS; i++)
        if (step_ways[i].name && !strcmp(step_ways[i].name, step_ways[way].name) &&
            way_shows(c, i))
            return 1;
    return 0;
}

/* Mistakes that would make the same step here. */
static inline void say_hidden_ways(const step_check *c, verdict *v) {
    char text[290] = "";
    for (int i = 1; i < STEP_WAYS; i++) {
        const char *name = step_ways[i].name, *last = step_ways[i - 1].name;
        if (!name || (last && !strcmp(name, last))) continue; /* another form of it */
        if (mistake_shows(c, i) || strlen(text) + strlen(name) + 3 > sizeof text) continue;
        if (c->n->d->facts.optimizer == DUMP_ADAMW || step_ways[i].clip || step_ways[i].decay)
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", *text ? ", " : "",
                     name);
    }
    if (*text) verdict_say(v, "would not show in this step: %.290s", text);
}

/* How far all ranks together are from that way; Inf: it does not explain them, or hardly
   better than the right one. */
static inline double way_distance(const step_check *c, int way) {
    double away = 0, right = 0;
    if (step_ways[way].decay == DECAY_VECTORS && !c->vectors) return INFINITY; /* no groups */
    for (int64_t r = 0; r < c->n->d->world; r++) {
        away += c->of[r].away[way];
        right += c->of[r].away[0];
    }
    return way_fits(c, way) && 4 * away < right ? sqrt(away) : INFINITY;
}

/* Of ways that all explain the step, those that are not four times as far as the nearest: noise
   of many elements does not turn towards another way. */
static inline void name_ways(const step_check *c, verdict *v) {
    double least = INFINITY;
    for (int i = 1; i < WAY_REPORTED; i++)
        if (way_distance(c, i) < least) least = way_distance(c, i);
    for (int i = 1; i < WAY_REPORTED; i++)
        if (isfinite(least) && way_distance(c, i) <= 4 * least)
            verdict_name(v, mistake_named(step_ways[i].name));
    if (!v->count && isfinite(way_distance(c, WAY_REPORTED)))
        verdict_say(v, "with the norm that ranks report in the clip the step is right: see "
                       "what is wrong with that norm");
}

static inline int rank_is_unmoved(const step_match *m) {
    return m->moved == 0 && m->wanted > 9 * m->rounding;
}

/* Ranks that are where they were, while all others made the right step: 1, if so. */
static inline int name_unmoved_ranks(const step_check *c, verdict *v) {
    int64_t first = -1, count = 0;
    for (int64_t r = 0; r < c->n->d->world; r++) {
        int unmoved = rank_is_unmoved(&c->of[r]);
        if (unmoved && !count++) first = r;
        if (!unmoved && !(c->of[r].away[0] <= step_limit(c, &c->of[r]))) return 0;
    }
    if (!count) return 0;
    verdict_name(v, mistake_named("shard_not_updated"));
    verdict_say(v,
                "%lld ranks did not move at all, the first is rank %lld; all others made "
                "the right step",
                (long long)count, (long long)first);
    return 1;
}

/* The factor between the right step and the one that was made, the same on all ranks; NaN:
   there is none. Decay and step are both lr times something. */
static inline double step_factor(const step_check *c, const step_match *total) {
    double x = total->along / total->wanted;
    for (int64_t r = 0; r < c->n->d->world; r++) {
        const step_match *m = &c->of[r];
        double squared = m->moved - 2 * x * m->along + x * x * m->wanted;
        if (!(squared <= (x * x > 1 ? x * x : 1) * step_limit(c, m))) return NAN;
    }
    return x;
}

static inline void name_factor(const step_check *c, const step_match *total, verdict *v) {
    const dump_facts *f = &c->n->d->facts;
    double x = step_factor(c, total), clip = clip_factor(f->max_norm, sqrt(c->n->all));
    if (!(x > 0) || total->wanted < 9 * total->rounding) return;
    verdict_say(v, "it is %.6g times the right step, as with lr %.6g", x, x * f->lr);
    if (f->optimizer == DUMP_ADAMW || clip == 1)
        verdict_name(v, mistake_named("another_lr"));
    else
        verdict_say(v, "or with a clip by a norm of %.6g, where it is %.6g",
                    f->max_norm / (x * clip), sqrt(c->n->all));
}

static inline void judge_step(const step_check *c, stage *s) {
    verdict *v = stage_begin(s, VERDICT_WRONG);
    step_match total;
    step_total(c, &total);
    verdict_say(v,
                "%lld parameters moved by %.6g; %s would move them by %.6g, and the two are "
                "%.3g apart (tolerance %g of it, and %.3g for rounding)",
                (long long)c->parameters, sqrt(total.moved),
                c->n->d->facts.optimizer == DUMP_SGD ? "SGD" : "AdamW", sqrt(total.wanted),
                sqrt(total.away[0]), c->n->tolerance, sqrt(total.rounding));
    if (step_shows_nothing(c, &total, v)) return;
    if (way_fits(c, 0)) {
        v->kind = VERDICT_RIGHT;
        say_hidden_ways(c, v);
        return;
    }
    name_ways(c, v);
    if (!v->count && !name_unmoved_ranks(c, v)) name_factor(c, &total, v);
    if (*c->first) verdict_say(v, "the first parameter with another step is %s", c->first);
}

/* spare: biases and norms do not decay. 0, or -1 with d->error. */
static inline int try_step(stage *s, step_check *c, int spare) {
    dump *d = c->n->d;
    c->of_vectors = d->facts;
    if (spare) c->of_vectors.weight_decay = 0;
    c->parameters = c->vectors = 0;
    *c->first = 0;
    memset(c->of, 0, (size_t)d->world * sizeof *c->of);
    for (int64_t i = 0; i < d->world * STEP_WAYS; i++) {
        const step_way *way = &step_ways[i % STEP_WAYS];
        c->numbers[i] = way_begin(&d->facts, way, way_clip(c->n, way, i / STEP_WAYS));
    }
    if (each_parameter(d, "after.", add_step, c)) return -1;
    if (c->parameters) judge_step(c, s);
    if (c->parameters && spare)
        verdict_say(&s->v,
                    "no decay acts on the %lld biases and norms, as most frameworks "
                    "have it",
                    (long long)c->vectors);
    return 0;
}

/* Most frameworks let biases and norms alone: that is asked where nothing else is right. */
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
    c.of = (step_match *)calloc((size_t)n->d->world, sizeof *c.of);
    c.numbers = (way_numbers *)calloc((size_t)(n->d->world * STEP_WAYS), sizeof *c.numbers);
    if (!c.of || !c.numbers)
        status = (seqpar_fail(&n->d->error, SEQPAR_ERR_MEMORY, "no memory"), -1);
    if (!status) status = try_all(s, &c);
    free(c.of);
    free(c.numbers);
    return status;
}

/* Stages REDUCTION, NORM and STEP, and what copies of a gradient show. 0, or -1 with
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
    free(n.held);
    return status;
}
#endif
