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
#include "gradients.h"

/* Sums of squares. */
typedef struct step_norms {
    dump *d;
    double tolerance;
    double all;    /* each element of the whole gradient once */
    double fourth; /* of their fourth powers */
    double unit;   /* the coarsest rounding of a grad. tensor */
    double *held;  /* (world) of what a rank's grad. tensors hold */
    double *local; /* (world) of its local. tensors */
    likeness sum;  /* of the whole gradient with the sum of all local ones */
    int64_t parameters, locals;
    stage *copies; /* what ranks' copies of a gradient show */
} step_norms;

static inline double sum_of_squares(const double *x, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += x[i] * x[i];
    return sum;
}

static inline double sum_of_fourths(const double *x, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += x[i] * x[i] * x[i] * x[i];
    return sum;
}

static inline int add_held(step_norms *n, const char *name) {
    for (int64_t r = 0; r < n->d->world; r++) {
        const seqpar_safetensors_tensor *t = seqpar_safetensors_find(n->d->ranks[r].file, name);
        double *own = t ? dump_doubles(n->d, r, t) : NULL;
        if (t && !own) return -1;
        if (t) n->held[r] += sum_of_squares(own, t->count);
        if (t && dtype_rounding(t->dtype) > n->unit) n->unit = dtype_rounding(t->dtype);
        free(own);
    }
    return 0;
}

static inline int add_local_norms(step_norms *n, const char *name, const whole *grad) {
    local_sums sums = {0};
    int found = local_sums_read(n->d, name, NULL, &sums);
    if (found > 0 && sums.count == grad->count) {
        n->locals++;
        liken(&n->sum, grad->values, sums.sum[0], grad->count);
        for (int64_t r = 0; r < n->d->world; r++)
            n->local[r] += sum_of_squares(sums.sum[sum_of(n->d, ADDED_OWN, r)], sums.count);
    }
    local_sums_free(n->d, &sums);
    return found < 0 ? -1 : 0;
}

static inline int add_norms(void *user, const char *parameter) {
    step_norms *n = (step_norms *)user;
    tensor_name name;
    whole grad;
    int status = whole_read(n->d, tensor_of(&name, "grad.", parameter), 0, n->d->world, &grad);
    if (!status) {
        n->parameters++;
        n->all += sum_of_squares(grad.values, grad.count);
        n->fourth += sum_of_fourths(grad.values, grad.count);
        judge_copies(n->copies, &grad, name.text, gradient_limit(n->d, n->tolerance));
        status = add_held(n, name.text) ||
                 add_local_norms(n, tensor_of(&name, "local.", parameter), &grad);
    }
    whole_free(&grad);
    return status ? -1 : 0;
}

/* ---- norm ---- */

/* What rank r shows if it makes that mistake; NaN: it cannot. */
typedef double (*wrong_norm)(const step_norms *n, int64_t r);

static inline double norm_of_shard(const step_norms *n, int64_t r) {
    return n->held[r] < n->all ? sqrt(n->held[r]) : NAN;
}
static inline double norm_of_local(const step_norms *n, int64_t r) {
    return n->locals == n->parameters ? sqrt(n->local[r]) : NAN;
}

/* Ranks over which something may be added up. */
enum { OVER_ALL, OVER_SEQUENCE, OVER_REPLICAS };
static inline int is_added(const dump *d, int over, int64_t r, int64_t q) {
    return over == OVER_ALL        ? 1
           : over == OVER_SEQUENCE ? r / d->sp == q / d->sp
                                   : r % d->sp == q % d->sp;
}

static inline int64_t added_ranks(const dump *d, int over) {
    return over == OVER_ALL ? d->world : over == OVER_SEQUENCE ? d->sp : d->world / d->sp;
}

/* Squares of what they hold: more than the whole's where some hold copies. */
static inline double squares_over(const step_norms *n, int over, int64_t r) {
    double sum = 0;
    for (int64_t q = 0; q < n->d->world; q++)
        if (is_added(n->d, over, r, q)) sum += n->held[q];
    return sum;
}

static inline int are_copies(const step_norms *n, int over, int64_t r) {
    return squares_over(n, over, r) > n->all * (1 + 1e-9); /* sums in another order */
}

/* Norms of what ranks hold: of all, shards or copies; of fewer, their shards of one copy. */
static inline double norms_added_over(const step_norms *n, int over, int64_t r) {
    double sum = 0;
    if (added_ranks(n->d, over) == 1 || (over != OVER_ALL && are_copies(n, over, r)))
        return NAN;
    for (int64_t q = 0; q < n->d->world; q++)
        if (is_added(n->d, over, r, q)) sum += sqrt(n->held[q]);
    return sum;
}
static inline double norms_added_over_all(const step_norms *n, int64_t r) {
    return norms_added_over(n, OVER_ALL, r);
}
static inline double norms_added_over_sequence(const step_norms *n, int64_t r) {
    return norms_added_over(n, OVER_SEQUENCE, r);
}
static inline double norms_added_over_replicas(const step_norms *n, int64_t r) {
    return norms_added_over(n, OVER_REPLICAS, r);
}
static inline double norms_of_locals_added(const step_norms *n, int64_t r) {
    double sum = 0;
    for (int64_t q = 0; q < n->d->world; q++) sum += norm_of_local(n, q);
    return (void)r, sum;
}

/* NaN: they hold no copies. */
static inline double copies_over(const step_norms *n, int over, int64_t r) {
    return are_copies(n, over, r) ? sqrt(squares_over(n, over, r)) : NAN;
}
static inline double copies_over_all(const step_norms *n, int64_t r) {
    return copies_over(n, OVER_ALL, r);
}
static inline double copies_over_sequence(const step_norms *n, int64_t r) {
    return copies_over(n, OVER_SEQUENCE, r);
}
static inline double copies_over_replicas(const step_norms *n, int64_t r) {
    return copies_over(n, OVER_REPLICAS, r);
}

/* The square of the whole, which all ranks have already, added up once more. */
static inline double again_over_all(const step_norms *n, int64_t r) {
    return (void)r, sqrt(n->all * (double)n->d->world);
}
static inline double again_over_sequence(const step_norms *n, int64_t r) {
    return (void)r, sqrt(n->all * (double)n->d->sp);
}
static inline double again_over_replicas(const step_norms *n, int64_t r) {
    return (void)r, sqrt(n->all * (double)(n->d->world / n->d->sp));
}
static inline double norm_clipped(const step_norms *n, int64_t r) {
    double most = n->d->facts.max_norm;
    return (void)r, most > 0 && sqrt(n->all) > most ? most : NAN;
}

static const struct {
    const char *name;
    wrong_norm of;
} wrong_norms[] = {{"norm_of_part", norm_of_shard},
                   {"norm_of_part", norm_of_local},
                   {"norms_added", norms_added_over_all},
                   {"norms_added", norms_added_over_sequence},
                   {"norms_added", norms_added_over_replicas},
                   {"norms_added", norms_of_locals_added},
                   {"norm_counts_copies", copies_over_all},
                   {"norm_counts_copies", copies_over_sequence},
                   {"norm_counts_copies", copies_over_replicas},
                   {"norm_counts_copies", again_over_all},
                   {"norm_counts_copies", again_over_sequence},
                   {"norm_counts_copies", again_over_replicas},
                   {"norm_after_clip", norm_clipped}};

/* How far rounding takes a norm, relatively. Each element's error is of about its own rounding
   and of either sign: of the sum of squares 2 unit sqrt(sum of g^4), of the root half of that,
   and chance makes no 8 of it. Sums in F32 by pairs of at most 2^32 elements: 32 roundings of
   2^-24. rounding: of the number's own type */
static inline double norm_exactness(const step_norms *n, double rounding) {
    return 8 * n->unit * sqrt(n->fourth) / n->all + 2 * rounding + 0x1p-19;
}

/* All that give the number within l's tolerance; how many. */
static inline int name_norms(const step_norms *n, int64_t r, const law *l, verdict *v) {
    int named = v->count;
    for (size_t i = 0; i < sizeof wrong_norms / sizeof *wrong_norms; i++) {
        double other = wrong_norms[i].of(n, r);
        if (law_equal(l, l->got, other) && !law_equal(l, sqrt(n->all), other))
            verdict_name(v, mistake_named(wrong_norms[i].name));
    }
    return v->count - named;
}

/* Shards of nearly equal norms: sqrt(P) times the norm is nearly the sum of theirs. What is as
   near as rounding allows stands before what is within the tolerance alone. */
static inline void name_nearest_norms(const step_norms *n, int64_t r, const law *l,
                                      double rounding, verdict *v) {
    law exact = *l;
    exact.tolerance = norm_exactness(n, rounding);
    if (exact.tolerance < l->tolerance && name_norms(n, r, &exact, v)) return;
    if (name_norms(n, r, l, v) > 1)
        verdict_say(v, "these are too near to each other here; a step whose shards have norms "
                       "that differ more tells them apart, and a norm in F32 or F64");
}

static inline void judge_norm(const step_norms *n, int64_t r, double got, double rounding,
                              stage *s) {
    double right = sqrt(n->all);
    law l = {.got = got, .tolerance = n->tolerance + 2 * rounding};
    verdict *v = stage_begin(s, law_equal(&l, got, right) ? VERDICT_RIGHT : VERDICT_WRONG);
    verdict_say(v, "got %.9g as rank %lld reports it; the gradients of %lld parameters have "
                   "%.9g (tolerance %g)",
                got, (long long)r, (long long)n->parameters, right, l.tolerance);
    if (n->d->world == 1 || n->all == 0 || !isfinite(n->all)) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, n->d->world == 1 ? "one rank has nothing to put together"
                                        : "all gradients are 0, or one is NaN or Inf");
    }
    if (v->kind != VERDICT_WRONG) return;
    name_nearest_norms(n, r, &l, rounding, v);
    if (!v->count && fabs(got - right) <= 1.5 * l.tolerance * right)
        v->kind = VERDICT_MARGINAL;
    else if (!v->count && got > right)
        verdict_say(v, "a larger one may be of parameters that the dump lacks, or of "
                       "what stands in the padding of a shard");
}

static inline int check_norm(stage *s, const step_norms *n) {
    if (!n->parameters) return 0;
    for (int64_t r = 0; r < n->d->world; r++) {
        const seqpar_safetensors_tensor *t =
            seqpar_safetensors_find(n->d->ranks[r].file, "norm");
        double *norm = t && t->count == 1 ? dump_doubles(n->d, r, t) : NULL;
        stage one = {.judged = 0};
        if (n->d->error.status) return -1;
        if (norm) judge_norm(n, r, *norm, dtype_rounding(t->dtype), &one);
        stage_add(s, &one);
        free(norm);
    }
    return 0;
}

/* ---- the optimizer's step ---- */

enum { CLIP_RIGHT, CLIP_NOT, CLIP_OWN, CLIP_BEFORE };
typedef struct step_way {
    const char *name; /* of the mistake; NULL: the right way */
    int clip, no_bias_correction, decay_coupled, decay_after, eps_inside, by_micro_batches;
} step_way;
static const step_way step_ways[] = {
    {.name = NULL},
    {.name = "not_clipped", .clip = CLIP_NOT},
    {.name = "clip_by_own_norm", .clip = CLIP_OWN},
    {.name = "clip_before_reduction", .clip = CLIP_BEFORE},
    {.name = "bias_correction_missing", .no_bias_correction = 1},
    {.name = "decay_coupled", .decay_coupled = 1},
    {.name = "decay_after_step", .decay_after = 1},
    {.name = "eps_inside_root", .eps_inside = 1},
    {.name = "steps_counted_by_micro_batches", .by_micro_batches = 1}};
enum { STEP_WAYS = sizeof step_ways / sizeof *step_ways };

/* Squares of one rank's steps: what a way is away from the one that was made, and from the
   right one. */
typedef struct step_match {
    double away[STEP_WAYS], from_right[STEP_WAYS];
    double wanted, moved, rounding;
} step_match;

typedef struct step_check {
    const step_norms *n;
    step_match *of; /* (world) */
    int64_t parameters;
    char first[128]; /* parameter whose step is not the right one */
} step_check;

/* One parameter, whole; local clipped rank by rank and added up, NULL: not known. */
typedef struct step_inputs {
    whole param, grad, m, v;
    double *clipped;
} step_inputs;

/* What the gradient is multiplied by before the step; NaN: the dump does not say. */
static inline double way_clip(const step_norms *n, const step_way *way, int64_t rank) {
    double max_norm = n->d->facts.max_norm;
    double own = isnan(norm_of_shard(n, rank)) ? norm_of_local(n, rank)
                                               : norm_of_shard(n, rank);
    return way->clip == CLIP_RIGHT ? clip_factor(max_norm, sqrt(n->all))
           : way->clip == CLIP_OWN ? isnan(own) ? NAN : clip_factor(max_norm, own)
                                   : 1;
}

/* after - param of one element */
static inline double way_step(const dump_facts *f, const step_way *way, double p, double g,
                              double m, double v) {
    double t = (double)(f->step * (way->by_micro_batches ? f->accumulation : 1));
    double decay = f->lr * f->weight_decay, mean, square, u;
    if (f->optimizer == DUMP_SGD) return -f->lr * (g + f->weight_decay * p);
    if (way->decay_coupled) g += f->weight_decay * p;
    mean = f->beta1 * m + (1 - f->beta1) * g;
    square = f->beta2 * v + (1 - f->beta2) * g * g;
    if (!way->no_bias_correction) mean /= 1 - pow(f->beta1, t);
    if (!way->no_bias_correction) square /= 1 - pow(f->beta2, t);
    u = f->lr * mean / (way->eps_inside ? sqrt(square + f->eps) : sqrt(square) + f->eps);
    if (way->decay_coupled) return -u;
    return way->decay_after ? (p - u) * (1 - decay) - p : -decay * p - u;
}

static inline void match_element(const step_check *c, step_match *to, int64_t rank,
                                 const step_inputs *in, int64_t at, double after, double u) {
    double p = in->param.values[at], right = 0;
    double m = in->m.values ? in->m.values[at] : 0, v = in->v.values ? in->v.values[at] : 0;
    for (int i = 0; i < STEP_WAYS; i++) {
        const step_way *way = &step_ways[i];
        double g = way->clip == CLIP_BEFORE ? in->clipped ? in->clipped[at] : NAN
                                            : in->grad.values[at];
        double step = way_step(&c->n->d->facts, way, p, g * way_clip(c->n, way, rank), m, v);
        if (!i) right = step;
        to->away[i] += (after - p - step) * (after - p - step);
        to->from_right[i] += (step - right) * (step - right);
    }
    to->wanted += right * right;
    to->moved += (after - p) * (after - p);
    to->rounding += 2 * u * u * (after * after + p * p);
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

static inline int step_inputs_read(const step_norms *n, const char *parameter,
                                   step_inputs *in) {
    dump *d = n->d;
    tensor_name name;
    memset(in, 0, sizeof *in);
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
        for (int64_t r = 0; !status && r < c->n->d->world; r++)
            status = match_rank(c, r, parameter, &in);
    }
    whole_free(&in.param);
    whole_free(&in.grad);
    whole_free(&in.m);
    whole_free(&in.v);
    free(in.clipped);
    return status;
}

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

/* Mistakes that would make the same step here. */
static inline void say_hidden_ways(const step_check *c, verdict *v) {
    char text[280] = "";
    for (int i = 1; i < STEP_WAYS; i++)
        if (!way_shows(c, i) && (c->n->d->facts.optimizer == DUMP_ADAMW || step_ways[i].clip))
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s",
                     *text ? ", " : "", step_ways[i].name);
    if (*text) verdict_say(v, "would not show in this step: %.280s", text);
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
    for (int i = 1; i < STEP_WAYS; i++)
        if (way_shows(c, i) && way_fits(c, i))
            verdict_name(v, mistake_named(step_ways[i].name));
    if (*c->first) verdict_say(v, "the first parameter with another step is %s", c->first);
}

static inline int check_step(stage *s, const step_norms *n) {
    step_check c = {.n = n};
    int status = 0;
    if (n->d->facts.optimizer == DUMP_NO_OPTIMIZER || n->d->facts.lr == 0) return 0;
    c.of = (step_match *)calloc((size_t)n->d->world, sizeof *c.of);
    if (!c.of) status = (seqpar_fail(&n->d->error, SEQPAR_ERR_MEMORY, "no memory"), -1);
    if (!status) status = each_parameter(n->d, "after.", add_step, &c);
    if (!status && c.parameters) judge_step(&c, s);
    free(c.of);
    return status;
}

/* Stages REDUCTION, NORM and STEP, and what copies of a gradient show. 0, or -1 with
   d->error. */
static inline int check_steps(stage *stages, dump *d, double tolerance) {
    stage copies = {.judged = 0};
    step_norms n = {.d = d, .tolerance = tolerance, .copies = &copies};
    int status = 0;
    double *clip;
    n.held = (double *)calloc((size_t)d->world * 3, sizeof *n.held);
    n.local = n.held ? n.held + d->world : NULL;
    clip = n.held ? n.local + d->world : NULL;
    if (!n.held) status = (seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory"), -1);
    if (!status) status = each_parameter(d, "grad.", add_norms, &n);
    for (int64_t r = 0; !status && r < d->world; r++)
        clip[r] = clip_factor(d->facts.max_norm, sqrt(n.local[r]));
    if (!status) status = check_reduction(&stages[REDUCTION], d, tolerance, clip);
    stage_add(&stages[REDUCTION], &copies);
    if (!status) status = check_norm(&stages[NORM], &n);
    if (!status) status = check_step(&stages[STEP], &n);
    free(n.held);
    return status;
}
#endif
