/* SPDX-License-Identifier: MIT OR Unlicense */
/* truth.h - a dump against the step as the reference computes it: log-probs, and gradients.
 *
 * How far a right one may be off is measured: the same step on a device that rounds weights,
 * activations and gradients to bf16 with sums in fp32. Rounding errors grow as the unit of the
 * numbers does, so those of another type are this distance times the ratio of units; four times
 * that is the limit. */
#ifndef ORACLE_TRUTH_H
#define ORACLE_TRUTH_H
#include <time.h>
#include "second.h"
#include "seeds.h"
#include "step.h"

typedef struct truth {
    reference exact, rounded; /* fp64, bf16 */
    dump *d;
    double ratio;       /* of units, to bf16 */
    const char *unit;   /* what it is called */
    double budget;      /* seconds */
    double *got;        /* (elements) of grad. tensors */
    char *have;         /* (tensors) which are there */
    double logp_limit, gradient_limit;
    int logp_is_right, is_void;
    char second[200]; /* what slow.h says of the reference */
    details *more;    /* NULL: nothing is kept */
    struct timespec begin;
} truth;

static const reference_way right_way = {.name = NULL};
static const reference_way wrong_ways[] = {
    {.name = "positions_local", .positions = POSITIONS_LOCAL},
    {.name = "positions_run_on", .positions = POSITIONS_RUN_ON},
    {.name = "documents_ignored", .mask = MASK_WHOLE_ROW},
    {.name = "documents_ignored", .mask = MASK_WHOLE_ROW, .positions = POSITIONS_RUN_ON},
    {.name = "looks_ahead", .mask = MASK_NOT_CAUSAL},
    {.name = "own_tokens_only", .mask = MASK_OWN_TOKENS},
    {.name = "own_tokens_only", .mask = MASK_OWN_TOKENS, .positions = POSITIONS_LOCAL},
    {.name = "causal_by_local_row", .mask = MASK_LOCAL_ROWS},
    {.name = "hop_lost", .mask = MASK_WITHOUT_LAST_HOP},
    {.name = "dkv_not_returned", .backward = BACKWARD_DKV_STAYS},
    {.name = "dq_of_one_hop", .backward = BACKWARD_DQ_STAYS},
    {.name = "delta_missing", .backward = BACKWARD_NO_DELTA},
    {.name = "delta_of_hop", .backward = BACKWARD_DELTA_OF_HOP}};
enum { WRONG_WAYS = sizeof wrong_ways / sizeof *wrong_ways };

/* With two ranks, the last hop is all of the others. */
static inline int way_has_meaning(const dump *d, const reference_way *way) {
    return way->mask != MASK_WITHOUT_LAST_HOP || d->sp > 2;
}

static inline double seconds_since(const struct timespec *begin) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - begin->tv_sec) + 1e-9 * (double)(now.tv_nsec - begin->tv_nsec);
}

static inline int out_of_time(const truth *t) { return seconds_since(&t->begin) > t->budget; }

/* ---- the limit ---- */

/* The coarsest type among the dump's parameters, gradients and log-probs, unless it is said. */
static inline void truth_unit(truth *t) {
    static const struct {
        seqpar_safetensors_dtype dtype;
        const char *name;
        double ratio;
    } units[] = {{SEQPAR_SAFETENSORS_F64, "float64", 0x1p-44},
                 {SEQPAR_SAFETENSORS_F32, "float32", 0x1p-15},
                 {SEQPAR_SAFETENSORS_NONE, "tf32", 0x1p-2},
                 {SEQPAR_SAFETENSORS_F16, "float16", 0x1p-3},
                 {SEQPAR_SAFETENSORS_BF16, "bfloat16", 1}};
    int found = t->d->facts.dtype ? (int)t->d->facts.dtype - 1 : 0;
    const seqpar_safetensors_file *file = t->d->ranks[0].file;
    for (int64_t i = 0; !t->d->facts.dtype && i < seqpar_safetensors_count(file); i++) {
        const seqpar_safetensors_tensor *x = seqpar_safetensors_at(file, i);
        int matters = after_prefix(x->name, "grad.") || after_prefix(x->name, "param.") ||
                      strstr(x->name, ".logp");
        for (int k = 0; matters && k < 5; k++)
            if (units[k].dtype == x->dtype && k > found) found = k;
    }
    t->ratio = units[found].ratio;
    t->unit = units[found].name;
}

/* Of supervised tokens of all rows. */
static inline likeness compare_logp(const reference *f, double *const *wanted, int of_dump) {
    likeness l = {0};
    for (int64_t i = 0; i < f->count; i++)
        for (int64_t t = 0; t < row_end(&f->rows[i]); t++)
            if (f->rows[i].labels[t] != DUMP_IGNORE)
                liken(&l, of_dump ? &f->rows[i].logp[t] : &f->logp[i][t], &wanted[i][t], 1);
    return l;
}

static inline double limit_of(const truth *t, double noise) {
    double limit = 4 * noise * t->ratio;
    return limit > 1e-7 ? limit : 1e-7; /* inner products see half of the digits */
}

/* ---- log-probs ---- */

static inline int has_logp(const reference *f) {
    for (int64_t i = 0; i < f->count; i++)
        if (!f->rows[i].logp) return 0;
    return 1;
}

/* The token whose log-prob is farthest off. */
static inline void say_worst_logp(verdict *v, const reference *f) {
    int64_t row = 0, token = -1;
    double worst = -1;
    char place[160];
    for (int64_t i = 0; i < f->count; i++)
        for (int64_t t = 0; t < row_end(&f->rows[i]); t++) {
            double far = fabs(f->rows[i].logp[t] - f->logp[i][t]);
            if (f->rows[i].labels[t] == DUMP_IGNORE || far <= worst || worst != worst) continue;
            worst = far;
            row = i;
            token = t;
        }
    if (token < 0) return;
    verdict_say(v, "the farthest is at %s, row %lld of the step: %.9g, right %.9g",
                place_text(place, sizeof place, &f->rows[row], token), (long long)row,
                f->rows[row].logp[token], f->logp[row][token]);
}

/* Ways that give the log-probs of the dump and not the right ones. */
static inline int name_logp_ways(truth *t, verdict *v, double *const *right) {
    for (int i = 0; i < WRONG_WAYS; i++) {
        likeness l, other;
        if (wrong_ways[i].backward || !way_has_meaning(t->d, &wrong_ways[i])) continue;
        if (out_of_time(t)) {
            verdict_say(v, "not tried within --budget %g: %s and what follows", t->budget,
                        wrong_ways[i].name);
            return 0;
        }
        if (reference_logp(&t->exact, &wrong_ways[i])) return -1;
        l = compare_logp(&t->exact, t->exact.logp, 1);
        other = compare_logp(&t->exact, right, 0);
        if (distance_from(&l, 1) <= t->logp_limit && distance_from(&other, 1) > t->logp_limit)
            verdict_name(v, mistake_named(wrong_ways[i].name));
    }
    return 0;
}

static inline double **copy_logp(const reference *f) {
    double **copy = (double **)calloc((size_t)f->count + 1, sizeof *copy);
    for (int64_t i = 0; copy && i < f->count; i++) {
        size_t bytes = ((size_t)f->rows[i].tokens + 1) * sizeof **copy;
        if (!(copy[i] = (double *)malloc(bytes))) return NULL; /* the program ends then */
        memcpy(copy[i], f->logp[i], bytes);
    }
    return copy;
}

static inline void free_logp(double **logp, int64_t count) {
    for (int64_t i = 0; logp && i < count; i++) free(logp[i]);
    free(logp);
}

static inline int judge_logp(truth *t, stage *s, double *const *right) {
    likeness l = compare_logp(&t->exact, right, 1);
    double far = distance_from(&l, 1);
    int status;
    verdict *v = stage_begin(s, VERDICT_RIGHT);
    verdict_say(v, "%.3g away from those of the model in fp64; limit %.3g, from %s", far,
                t->logp_limit, t->unit);
    t->logp_is_right = far <= t->logp_limit;
    if (l.want_want == 0) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, "no token has a label");
    }
    if (t->logp_is_right) return 0;
    v->kind = VERDICT_WRONG;
    say_worst_logp(v, &t->exact);
    bar_begin("mistakes in log-probs", WRONG_WAYS * t->exact.count);
    status = name_logp_ways(t, v, right);
    bar_end();
    if (status) return -1;
    if (!v->count && far <= 1.5 * t->logp_limit) v->kind = VERDICT_MARGINAL;
    return 0;
}

/* ---- gradients ---- */

/* All grad. tensors that the model has, put together. */
static inline int truth_gradients(truth *t, stage *s, double tolerance) {
    const seqpar_llama *m = &t->exact.model;
    t->got = (double *)calloc((size_t)m->elements + 1, sizeof *t->got);
    t->have = (char *)calloc((size_t)m->tensor_count + 1, 1);
    if (!t->got || !t->have)
        return seqpar_fail(&t->d->error, SEQPAR_ERR_MEMORY, "no memory for gradients"), -1;
    for (int64_t i = 0; i < m->tensor_count; i++) {
        int64_t count = m->tensors[i].rows * m->tensors[i].cols;
        tensor_name name;
        whole w;
        int status = whole_read(t->d, tensor_of(&name, "grad.", m->tensors[i].name), 0,
                                t->d->world, &w);
        if (!status && w.values && w.count != count) {
            seqpar_fail(&t->d->error, SEQPAR_ERR_FILE_FORMAT,
                        "%.300s: tensor %.100s has %lld elements; the model has %lld",
                        t->d->ranks[0].path, name.text, (long long)w.count, (long long)count);
            status = -1;
        }
        t->have[i] = !status && w.values;
        if (t->have[i]) memcpy(t->got + m->tensors[i].offset, w.values, (size_t)count * 8);
        if (t->have[i]) judge_copies(s, &w, name.text, tolerance);
        whole_free(&w);
        if (status) return -1;
    }
    return 0;
}

/* Tensor by tensor, of those that the dump has. */
static inline int compare_gradients(const truth *t, const double *got, const double *wanted,
                                    gradient_check *c) {
    const seqpar_llama *m = &t->exact.model;
    c->n = 0;
    c->all = (likeness){0};
    for (int64_t i = 0; i < m->tensor_count; i++) {
        gradient_pair *one;
        if (!t->have[i]) continue;
        if (gradient_room(c)) return -1;
        one = &c->each[c->n++];
        memset(one, 0, sizeof *one);
        snprintf(one->name, sizeof one->name, "grad.%s", m->tensors[i].name);
        one->count = m->tensors[i].rows * m->tensors[i].cols;
        liken(&one->like, got + m->tensors[i].offset, wanted + m->tensors[i].offset,
              one->count);
        likeness_add(&c->all, &one->like);
    }
    return 0;
}

static inline double best_factor(const likeness *l) { return l->got_want / l->want_want; }

/* One way of the step: its gradient against the dump's, with any factor. */
static inline int try_gradient(truth *t, verdict *v, gradient_check *c, const double *right,
                               const reference_way *way, double *const *seeds,
                               const char *name) {
    likeness from_right;
    double factor;
    if (reference_gradient(&t->exact, way, seeds) ||
        compare_gradients(t, t->exact.gradient, right, c))
        return -1;
    from_right = c->all;
    if (compare_gradients(t, t->got, t->exact.gradient, c)) return -1;
    factor = best_factor(&c->all);
    if (distance_from(&c->all, factor) > t->gradient_limit || c->all.want_want == 0 ||
        distance_from(&from_right, best_factor(&from_right)) <= 2 * t->gradient_limit)
        return 0;
    verdict_name(v, mistake_named(name));
    c->way_factor = factor;
    if (fabs(factor - 1) > t->gradient_limit)
        verdict_say(v, "they are those of %s times %.6g", name, factor);
    return 0;
}

/* Ways that give the gradient of the dump, up to a factor, and not the right one. */
static inline int name_gradient_ways(truth *t, verdict *v, gradient_check *c,
                                     const double *right, const seed_set *seeds) {
    for (int i = 1; i < seed_ways(t->d) + WRONG_WAYS; i++) {
        int of_seeds = i < seed_ways(t->d), k = i - seed_ways(t->d);
        const char *name = of_seeds ? seed_way_name(t->d, i) : wrong_ways[k].name;
        int status = 0;
        if (!of_seeds && !wrong_ways[k].backward && t->logp_is_right) continue;
        if (!of_seeds && !way_has_meaning(t->d, &wrong_ways[k])) continue;
        if (out_of_time(t)) {
            verdict_say(v, "not tried within --budget %g: %s and what follows", t->budget,
                        name);
            return 0;
        }
        if (of_seeds && !seed_set_make(seeds, i)) continue; /* has no meaning here */
        if (!of_seeds) seed_set_make(seeds, SEEDS_RIGHT);
        status = try_gradient(t, v, c, right, of_seeds ? &right_way : &wrong_ways[k],
                              seeds->of, name);
        if (status) return -1;
    }
    return 0;
}

static inline int judge_truth_gradient(truth *t, stage *s, const double *right,
                                       const seed_set *seeds) {
    gradient_check c = {.d = t->d, .s = s, .tolerance = t->gradient_limit};
    int status = compare_gradients(t, t->got, right, &c) || details_keep(t->more, &c) ? -1 : 0;
    double factor = best_factor(&c.all);
    if (!status && c.n && !s->judged) {
        if (!isfinite(c.all.want_want) || (c.all.want_want == 0 && c.all.got_got == 0))
            verdict_say(stage_begin(s, VERDICT_INSUFFICIENT),
                        "all gradients are 0, or one of the reference is NaN or Inf");
        else if (distance_from(&c.all, factor) <= c.tolerance)
            judge_factor(&c);
        else {
            verdict factors;
            judge_factors(&c);
            factors = s->v;
            s->v.count = s->v.all = 0;
            bar_begin("mistakes in gradients",
                      (seed_ways(t->d) + WRONG_WAYS - 1) * t->exact.count);
            status = name_gradient_ways(t, &s->v, &c, right, seeds);
            bar_end();
            if (s->v.count == 1) name_way_factor(&c, &s->v);
            if (!s->v.count) names_take(&s->v, &factors);
        }
        verdict_say(&s->v, "%s", t->second);
        verdict_say(&s->v, "wanted are those of the model in fp64; limit %.3g, from %s",
                    t->gradient_limit, t->unit);
    }
    free(c.each);
    return status;
}

/* ---- all of it ---- */

/* Log-probs and gradient of both, for the limits. right: (elements) the gradient in fp64. */
static inline int truth_limits(truth *t, double **right_logp, double *right,
                               const seed_set *seeds) {
    gradient_check c = {.d = t->d};
    likeness l;
    int status;
    if (reference_logp(&t->rounded, &right_way)) return -1;
    l = compare_logp(&t->rounded, right_logp, 0);
    t->logp_limit = limit_of(t, distance_from(&l, 1));
    if (!seed_set_make(seeds, SEEDS_RIGHT)) return 1;
    if (reference_gradient(&t->exact, &right_way, seeds->of)) return -1;
    memcpy(right, t->exact.gradient, (size_t)t->exact.model.elements * sizeof *right);
    t->is_void = !second_agrees(&t->exact, right_logp, seeds->of, right, t->second,
                                sizeof t->second);
    if (reference_gradient(&t->rounded, &right_way, seeds->of)) return -1;
    memset(t->have, 1, (size_t)t->exact.model.tensor_count);
    status = compare_gradients(t, t->rounded.gradient, right, &c);
    t->gradient_limit = limit_of(t, distance_from(&c.all, 1));
    free(c.each);
    return status;
}

static inline int truth_judge(truth *t, stage *stages, double tolerance) {
    double **logp, *right;
    seed_set seeds = {.f = &t->exact};
    int status;
    bar_begin("the model in fp64", t->exact.count);
    status = reference_logp(&t->exact, &right_way);
    bar_end();
    if (status) return -1;
    logp = copy_logp(&t->exact);
    right = (double *)calloc((size_t)t->exact.model.elements + 1, sizeof *right);
    status = logp && right ? seed_set_open(&seeds, logp) : -1;
    if (status && !t->d->error.status)
        seqpar_fail(&t->d->error, SEQPAR_ERR_MEMORY, "no memory for the reference");
    if (!status) status = truth_gradients(t, &stages[GRADIENTS], tolerance);
    if (!status) {
        char *have = t->have;
        t->have = (char *)calloc((size_t)t->exact.model.tensor_count + 1, 1);
        bar_begin("the model in fp64, and its rounding", 3 * t->exact.count);
        status = t->have ? truth_limits(t, logp, right, &seeds) : -1;
        bar_end();
        free(t->have);
        t->have = have;
    }
    if (status >= 0 && has_logp(&t->exact))
        if (judge_logp(t, &stages[LOG_PROBS], logp)) status = -1;
    if (!status) status = judge_truth_gradient(t, &stages[GRADIENTS], right, &seeds);
    seed_set_close(&seeds);
    if (t->more && status >= 0 && has_logp(&t->exact)) {
        t->more->logp = logp;
        t->more->rows = t->exact.count;
        t->more->logp_limit = t->logp_limit;
        logp = NULL;
    }
    free_logp(logp, t->exact.count);
    free(right);
    return status < 0 ? -1 : 0;
}

/* Stages LOG_PROBS and GRADIENTS against the model in `folder`; more: NULL, or takes what they
   were judged by. 0; 1: slow.h disagrees with the reference, so there is no verdict; or -1 with
   d->error. */
static inline int check_truth(stage *stages, dump *d, const char *folder, double tolerance,
                              double budget, details *more) {
    truth t = {.d = d, .budget = budget, .more = more};
    int status;
    clock_gettime(CLOCK_MONOTONIC, &t.begin);
    truth_unit(&t);
    status = reference_open(&t.exact, d, folder, seqpar_device_reference());
    if (!status) status = reference_open(&t.rounded, d, folder, seqpar_device_reference_bf16());
    if (!status) status = truth_judge(&t, stages, tolerance);
    reference_close(&t.exact);
    if (t.rounded.d) reference_close(&t.rounded);
    free(t.got);
    free(t.have);
    if (t.is_void) seqpar_fail(&d->error, SEQPAR_ERR_ARITHMETIC, "%s", t.second);
    return status < 0 ? -1 : t.is_void;
}
#endif
