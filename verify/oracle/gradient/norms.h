/* SPDX-License-Identifier: MIT OR Unlicense */
/* norms.h - norms of a gradient: the right one, sqrt(sum of squares of all parameters, each
 * element once), and those of known mistakes, which a trainer may log or clip by. */
#ifndef ORACLE_NORMS_H
#define ORACLE_NORMS_H
#include "gradients.h"

/* A parameter's part of the norm. */
typedef struct param_square {
    char name[120];
    double square;
} param_square;

/* all, held and local are sums of squares. */
typedef struct step_norms {
    dump *d;
    double tolerance;
    double all;    /* each element of the whole gradient once */
    double fourth; /* of their fourth powers */
    double unit;   /* the coarsest rounding of a grad. tensor */
    double *held;  /* (world) of what a rank's grad. tensors hold */
    double *local; /* (world) of its local. tensors */
    double *shown; /* (world) the norm that it reports; NaN: none */
    likeness sum;  /* of the whole gradient with the sum of all local ones */
    int64_t parameters, locals;
    param_square *each; /* stb_ds: of every parameter */
    stage *copies;      /* whether ranks' copies of a gradient are equal */
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
        param_square one = {.square = sum_of_squares(grad.values, grad.count)};
        snprintf(one.name, sizeof one.name, "%s", parameter);
        arrput(n->each, one);
        n->all += one.square;
        n->fourth += sum_of_fourths(grad.values, grad.count);
        judge_copies(n->copies, &grad, name.text, gradient_limit(n->d, n->tolerance));
        status = add_held(n, name.text) ||
                 add_local_norms(n, tensor_of(&name, "local.", parameter), &grad);
    }
    whole_free(&grad);
    return status ? -1 : 0;
}

/* ---- norm ---- */

/* The norm that rank r reports if it makes the mistake; NaN: that is impossible here. */
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

/* The sum of squares over all elements that these ranks hold. Copies make it exceed n->all. */
static inline double squares_over(const step_norms *n, int over, int64_t r) {
    double sum = 0;
    for (int64_t q = 0; q < n->d->world; q++)
        if (is_added(n->d, over, r, q)) sum += n->held[q];
    return sum;
}

static inline int are_copies(const step_norms *n, int over, int64_t r) {
    return squares_over(n, over, r) > n->all * (1 + 1e-9); /* the order of addition differs */
}

/* The sum of the ranks' norms. NaN: one rank only, or fewer than all ranks, of which some hold
   copies. */
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

/* The norm over all copies that these ranks hold. NaN: they hold no copies. */
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

/* Every rank already has the square of the whole norm, and ranks sum it once more. NaN: it is
   one rank. */
static inline double again_over(const step_norms *n, int over) {
    double ranks = (double)added_ranks(n->d, over);
    return ranks > 1 ? sqrt(n->all * ranks) : NAN;
}
static inline double again_over_all(const step_norms *n, int64_t r) {
    return (void)r, again_over(n, OVER_ALL);
}
static inline double again_over_sequence(const step_norms *n, int64_t r) {
    return (void)r, again_over(n, OVER_SEQUENCE);
}
static inline double again_over_replicas(const step_norms *n, int64_t r) {
    return (void)r, again_over(n, OVER_REPLICAS);
}
static inline double norm_clipped(const step_norms *n, int64_t r) {
    double most = n->d->facts.max_norm;
    return (void)r, most > 0 ? fmin(most, sqrt(n->all)) : NAN;
}

static const struct {
    const char *name, *how; /* how: which form; NULL: there is one */
    wrong_norm of;
} wrong_norms[] = {{"norm_of_part", "of the rank's shard", norm_of_shard},
                   {"norm_of_part", "of the rank's local gradient", norm_of_local},
                   {"norms_added", "over all ranks", norms_added_over_all},
                   {"norms_added", "over a sequence", norms_added_over_sequence},
                   {"norms_added", "over replicas", norms_added_over_replicas},
                   {"norms_added", "of local gradients", norms_of_locals_added},
                   {"norm_counts_copies", "of shards on all ranks", copies_over_all},
                   {"norm_counts_copies", "of shards in a sequence", copies_over_sequence},
                   {"norm_counts_copies", "of shards on replicas", copies_over_replicas},
                   {"norm_counts_copies", "on all ranks", again_over_all},
                   {"norm_counts_copies", "in a sequence", again_over_sequence},
                   {"norm_counts_copies", "on replicas", again_over_replicas},
                   {"norm_after_clip", NULL, norm_clipped}};

/* The largest relative error of a norm by rounding. An element's error is about unit |g|, of
   random sign: the sum of squares deviates by 2 unit sqrt(sum of g^4), the root by half of that
   relatively, and chance does not reach 8 deviations. Pairwise F32 sums of up to 2^32 elements
   add 32 roundings of 2^-24. rounding: of the type of the reported norm */
static inline double norm_exactness(const step_norms *n, double rounding) {
    return 8 * n->unit * sqrt(n->fourth) / n->all + 2 * rounding + 0x1p-19;
}

/* Names the mistakes that give l->got within l's tolerance. Returns how many it adds. */
static inline int name_norms(const step_norms *n, int64_t r, const law *l, verdict *v) {
    int named = v->count;
    for (size_t i = 0; i < sizeof wrong_norms / sizeof *wrong_norms; i++) {
        double other = wrong_norms[i].of(n, r);
        if (law_equal(l, l->got, other) && !law_equal(l, sqrt(n->all), other))
            verdict_name(v, mistake_named(wrong_norms[i].name));
    }
    return v->count - named;
}

/* Notes which mistakes would give rank r another norm. */
static inline void try_norms(const step_norms *n, int64_t r, const law *l, verdict *v) {
    for (size_t i = 0; i < sizeof wrong_norms / sizeof *wrong_norms; i++) {
        double other = wrong_norms[i].of(n, r);
        if (!isnan(other))
            verdict_try(v, wrong_norms[i].name, wrong_norms[i].how,
                        !law_equal(l, sqrt(n->all), other));
    }
}

/* If P shards have nearly equal norms, the sum of these is nearly sqrt(P) times the right norm,
   which another mistake gives. So if mistakes fit within rounding, only these are named. */
static inline void name_nearest_norms(const step_norms *n, int64_t r, const law *l,
                                      double rounding, verdict *v) {
    law exact = *l;
    exact.tolerance = norm_exactness(n, rounding);
    if (exact.tolerance < l->tolerance && name_norms(n, r, &exact, v)) return;
    if (name_norms(n, r, l, v) > 1)
        verdict_say(v, "these are too near to each other here; a step whose shards have norms "
                       "that differ more tells them apart, and a norm in F32 or F64");
}

/* ---- one parameter, or one kind of them, counted otherwise ---- */

/* The sum of squares of the parameters whose name is `part` or has it as a component. *count:
   how many. */
static inline double squares_of(const step_norms *n, const char *part, size_t length,
                                int64_t *count) {
    double sum = 0;
    *count = 0;
    for (int64_t i = 0; i < arrlen(n->each); i++) {
        int whole = strlen(n->each[i].name) == length &&
                    !strncmp(n->each[i].name, part, length);
        if (!whole && !has_part(n->each[i].name, part, length)) continue;
        sum += n->each[i].square;
        ++*count;
    }
    return sum;
}

/* Names the mistake if the reported norm leaves out these squares, or counts them sp, dp or
   world times. Returns 1 if it does. */
static inline int name_squares(const step_norms *n, const law *l, const char *part,
                               size_t length, verdict *v) {
    double times[] = {0, (double)n->d->sp, (double)(n->d->world / n->d->sp),
                      (double)n->d->world};
    int64_t count;
    double square = squares_of(n, part, length, &count);
    if (count == arrlen(n->each) || !(square > 0)) return 0;
    for (int i = 0; i < 4; i++) {
        double other = sqrt(n->all + (times[i] - 1) * square);
        if (times[i] == 1 || !law_equal(l, l->got, other) || law_equal(l, sqrt(n->all), other))
            continue;
        verdict_name(v, mistake_named(i ? "norm_counts_copies" : "norm_of_part"));
        if (i)
            verdict_say(v, "the squares of %s%.*s count %.0f times", count > 1 ? "all of " : "",
                        (int)length, part, times[i]);
        else
            verdict_say(v, "the squares of %s%.*s are left out", count > 1 ? "all of " : "",
                        (int)length, part);
        return 1;
    }
    return 0;
}

/* Tries each parameter, then each component of names. These are many candidates, so a norm must
   match within rounding. */
static inline void name_parameters(const step_norms *n, const law *l, double rounding,
                                   verdict *v) {
    law exact = *l;
    exact.tolerance = norm_exactness(n, rounding);
    for (int64_t i = 0; i < arrlen(n->each); i++)
        if (name_squares(n, &exact, n->each[i].name, strlen(n->each[i].name), v)) return;
    for (int64_t i = 0; i < arrlen(n->each); i++)
        for (const char *part = n->each[i].name; *part;) {
            size_t length = strcspn(part, ".");
            if (name_squares(n, &exact, part, length, v)) return;
            part += length + (part[length] == '.');
        }
}

static inline void judge_norm(const step_norms *n, int64_t r, double got, double rounding,
                              stage *s) {
    double right = sqrt(n->all);
    law l = {.got = got, .tolerance = n->tolerance + 2 * rounding};
    verdict *v = stage_begin(s, law_equal(&l, got, right) ? VERDICT_RIGHT : VERDICT_WRONG);
    verdict_say(v,
                "got %.9g as rank %lld reports it; the gradients of %lld parameters have "
                "%.9g (tolerance %g)",
                got, (long long)r, (long long)n->parameters, right, l.tolerance);
    if (n->d->world == 1 || n->all == 0 || !isfinite(n->all)) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, n->d->world == 1 ? "one rank has nothing to put together"
                                        : "all gradients are 0, or one is NaN or Inf");
    }
    if (v->kind == VERDICT_RIGHT) try_norms(n, r, &l, v);
    if (v->kind != VERDICT_WRONG) return;
    name_nearest_norms(n, r, &l, rounding, v);
    if (!v->count) name_parameters(n, &l, rounding, v);
    if (!v->count && fabs(got - right) <= 1.5 * l.tolerance * right)
        v->kind = VERDICT_MARGINAL;
    else if (!v->count && got > right)
        verdict_say(v, "a larger one may be of parameters that the dump lacks, or of "
                       "what stands in the padding of a shard");
}

static inline int check_norm(stage *s, const step_norms *n) {
    if (!n->parameters) return 0;
    for (int64_t r = 0; r < n->d->world; r++) {
        const seqpar_safetensors_tensor *t = seqpar_safetensors_find(n->d->ranks[r].file,
                                                                     "norm");
        double *norm = t && t->count == 1 ? dump_doubles(n->d, r, t) : NULL;
        stage one = {.judged = 0};
        if (n->d->error.status) return -1;
        n->shown[r] = norm ? *norm : NAN;
        if (norm) judge_norm(n, r, *norm, dtype_rounding(t->dtype), &one);
        stage_add(s, &one);
        free(norm);
    }
    return 0;
}
#endif
