/* SPDX-License-Identifier: MIT OR Unlicense */
/* gradients.h - gradients of a dump against those of another run of the same step, usually on
 * one rank. Tensors grad.NAME, whole on every rank, after all reductions and before clip. */
#ifndef ORACLE_GRADIENTS_H
#define ORACLE_GRADIENTS_H
#include "checks.h"

/* Inner products of got with want. */
typedef struct likeness {
    double got_got, got_want, want_want;
} likeness;

static inline void liken(likeness *l, const double *got, const double *want, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        l->got_got += got[i] * got[i];
        l->got_want += got[i] * want[i];
        l->want_want += want[i] * want[i];
    }
}

/* |got - factor want| / |factor want|; 0 where both are 0, NaN stays NaN. */
static inline double distance_from(const likeness *l, double factor) {
    if (l->got_got == 0 && l->want_want == 0) return 0;
    double squared = l->got_got - 2 * factor * l->got_want + factor * factor * l->want_want;
    return sqrt(squared < 0 ? 0 : squared) / (fabs(factor) * sqrt(l->want_want));
}

static inline int is_gradient(const seqpar_safetensors_tensor *t) {
    return !strncmp(t->name, "grad.", 5);
}

/* The tensor of rank r that belongs to t; -1 with d->error where there is none of its size. */
static inline int gradient_like(dump *d, int64_t r, const seqpar_safetensors_tensor *t,
                                double **values) {
    const seqpar_safetensors_tensor *own = seqpar_safetensors_find(d->ranks[r].file, t->name);
    if (own && own->count == t->count) return (*values = dump_doubles(d, r, own)) ? 0 : -1;
    seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: tensor %.100s has %lld elements, and %lld in another file",
                d->ranks[r].path, t->name, (long long)(own ? own->count : 0),
                (long long)t->count);
    return -1;
}

/* Rank r's against rank 0's: what is left of one reducer is the same on all. */
static inline int check_same(dump *d, int64_t r, const seqpar_safetensors_tensor *t,
                             const double *first, double tolerance, stage *s) {
    likeness l = {0};
    double *own = NULL, far;
    verdict *v;
    if (gradient_like(d, r, t, &own)) return -1;
    liken(&l, own, first, t->count);
    free(own);
    far = distance_from(&l, 1);
    if (far <= tolerance) return 0;
    v = stage_begin(s, VERDICT_WRONG);
    if (!isfinite(l.got_got) || !isfinite(l.want_want)) {
        verdict_say(v, "%.100s holds NaN or Inf on rank 0 or %lld", t->name, (long long)r);
        return 0;
    }
    verdict_name(v, mistake_named("never_synchronised"));
    verdict_say(v, "%.100s of rank %lld is %.3g away from that of rank 0", t->name,
                (long long)r, far);
    return 0;
}

/* What one tensor adds to the whole, and whether all ranks have the same. */
static inline int add_gradient(dump *d, dump *want, const seqpar_safetensors_tensor *t,
                               double tolerance, likeness *one, stage *s) {
    double *got = NULL, *wanted = NULL;
    int status = gradient_like(d, 0, t, &got) || gradient_like(want, 0, t, &wanted) ? -1 : 0;
    for (int64_t r = 1; !status && !s->judged && r < d->world; r++)
        status = check_same(d, r, t, got, tolerance, s);
    if (!status) liken(one, got, wanted, t->count);
    free(got);
    free(wanted);
    return status;
}

static inline void judge_factor(const dump *d, const likeness *all, double tolerance,
                                stage *s) {
    double factor = all->got_want / all->want_want;
    law l = {.got = factor,
             .want = 1,
             .sp = d->sp,
             .dp = d->world / d->sp,
             .accumulation = d->accumulation,
             .tolerance = tolerance};
    s->judged = 1;
    law_judge(&l, &s->v);
}

static inline int64_t count_like(const likeness *each, int64_t n, double factor,
                                 double tolerance) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += distance_from(&each[i], factor) <= tolerance;
    return count;
}

/* The factor that most tensors have, 1 if none has more. */
static inline double common_factor(const likeness *each, int64_t n, double tolerance) {
    double best = 1;
    int64_t most = count_like(each, n, best, tolerance);
    for (int64_t i = 0; i < n && most < n; i++) {
        double factor = each[i].got_want / each[i].want_want;
        int64_t count = count_like(each, n, factor, tolerance);
        if (count > most) best = factor;
        if (count > most) most = count;
    }
    return best;
}

/* No one factor explains all tensors: which is the first in the file without it? */
static inline void name_odd_one(const seqpar_safetensors_file *file, const likeness *each,
                                int64_t n, double tolerance, stage *s) {
    verdict *v = stage_begin(s, VERDICT_WRONG);
    double factor = common_factor(each, n, tolerance);
    int64_t like = count_like(each, n, factor, tolerance), at = 0;
    verdict_say(v,
                "%lld of %lld tensors are the wanted ones times %.6g within %g, and the rest "
                "is not; gradients in bf16 need --tolerance 0.01",
                (long long)like, (long long)n, factor, tolerance);
    for (int64_t i = 0; i < seqpar_safetensors_count(file); i++) {
        const seqpar_safetensors_tensor *t = seqpar_safetensors_at(file, i);
        double far = is_gradient(t) ? distance_from(&each[at++], factor) : 0;
        if (far <= tolerance) continue;
        verdict_say(v, "the first in the file is %.100s, %.3g away", t->name, far);
        return;
    }
}

/* 0, or -1 with the error of one of the dumps. */
static inline int check_gradients(stage *s, dump *d, dump *want, double tolerance) {
    const seqpar_safetensors_file *file = want->ranks[0].file;
    int64_t count = seqpar_safetensors_count(file), n = 0;
    likeness *each = (likeness *)calloc((size_t)count + 1, sizeof *each), all = {0};
    int status = each ? 0 : -1;
    if (!each) seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for gradients");
    for (int64_t i = 0; !status && i < count; i++) {
        const seqpar_safetensors_tensor *t = seqpar_safetensors_at(file, i);
        if (!is_gradient(t)) continue;
        status = add_gradient(d, want, t, tolerance, &each[n], s);
        all.got_got += each[n].got_got;
        all.got_want += each[n].got_want;
        all.want_want += each[n++].want_want;
    }
    if (!status && n && !s->judged) {
        double factor = all.got_want / all.want_want;
        if (!isfinite(all.want_want) || (all.want_want == 0 && all.got_got == 0))
            verdict_say(stage_begin(s, VERDICT_INSUFFICIENT),
                        all.want_want == 0 ? "all gradients are 0"
                                           : "a wanted gradient is NaN or Inf");
        else if (distance_from(&all, factor) <= tolerance)
            judge_factor(d, &all, tolerance, s);
        else
            name_odd_one(file, each, n, tolerance, s);
    }
    free(each);
    return status;
}
#endif
