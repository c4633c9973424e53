/* SPDX-License-Identifier: MIT OR Unlicense */
/* param_ranges.h - assembles a tensor of a parameter from the ranges that ranks hold. */
#ifndef ORACLE_PARAM_RANGES_H
#define ORACLE_PARAM_RANGES_H
#include "dump.h"

/* The range of a flattened tensor that a file has. */
typedef struct part {
    int64_t offset, count, total;
} part;

/* 0, or -1 with d->error. */
static inline int part_of(dump *d, int64_t rank, const seqpar_safetensors_tensor *t, part *p) {
    char key[512], *rest = NULL;
    const char *text;
    long long offset = 0, total = t->count;
    snprintf(key, sizeof key, "part.%s", t->name);
    text = seqpar_safetensors_metadata(d->ranks[rank].file, key);
    if (text) offset = strtoll(text, &rest, 10);
    if (text && *rest == ' ') total = strtoll(rest + 1, &rest, 10);
    if ((text && (rest == text || *rest)) || offset < 0 || total < t->count ||
        offset > total - t->count) {
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: metadata %.100s is '%.40s', and its tensor has %lld elements; "
                    "write OFFSET TOTAL: where its first element is in the whole parameter, "
                    "and how many elements that has",
                    d->ranks[rank].path, key, text ? text : "missing", (long long)t->count);
        return -1;
    }
    *p = (part){offset, t->count, total};
    return 0;
}

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

static inline void likeness_add(likeness *l, const likeness *more) {
    l->got_got += more->got_got;
    l->got_want += more->got_want;
    l->want_want += more->want_want;
}

/* The factor that brings factor want nearest to got; NaN where want is 0. */
static inline double likeness_factor(const likeness *l) { return l->got_want / l->want_want; }

/* |got - factor want|^2, but for rounding, which can make it less than 0. */
static inline double likeness_squared(const likeness *l, double factor) {
    return l->got_got - 2 * factor * l->got_want + factor * factor * l->want_want;
}

/* |got - factor want| / |factor want|; 0 where both are 0, NaN stays NaN. */
static inline double distance_from(const likeness *l, double factor) {
    if (l->got_got == 0 && l->want_want == 0) return 0;
    double squared = likeness_squared(l, factor);
    return sqrt(squared < 0 ? 0 : squared) / (fabs(factor) * sqrt(l->want_want));
}

/* An assembled tensor. If several ranks hold an element, the value of the first one is used. */
typedef struct whole {
    double *values; /* (count); NULL: no rank has it */
    int64_t count;
    int64_t copy;    /* the rank whose copy differs most from values; -1: none differs */
    double distance; /* of that copy, relative; NaN: the copy or values have NaN or Inf */
    char *have;      /* (count) whether the element is set already */
} whole;

static inline void whole_free(whole *w) {
    free(w->values);
    free(w->have);
    *w = (whole){.copy = -1};
}

static inline int whole_alloc(dump *d, whole *w, int64_t count) {
    w->count = count;
    w->values = (double *)calloc((size_t)count + 1, sizeof *w->values);
    w->have = (char *)calloc((size_t)count + 1, 1);
    if (w->values && w->have) return 0;
    seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for a tensor of %lld elements",
                (long long)count);
    return -1;
}

static inline void whole_add(whole *w, int64_t rank, const part *p, const double *own) {
    likeness copy = {0};
    double distance;
    for (int64_t i = 0; i < p->count; i++) {
        if (w->have[p->offset + i])
            liken(&copy, &own[i], &w->values[p->offset + i], 1);
        else
            w->values[p->offset + i] = own[i];
        w->have[p->offset + i] = 1;
    }
    distance = distance_from(&copy, 1);
    if (isnan(w->distance) || distance <= w->distance) return;
    w->distance = distance;
    w->copy = rank;
}

static inline int whole_is_gapless(dump *d, const whole *w, int64_t rank, const char *name) {
    const char *gap = w->values ? (const char *)memchr(w->have, 0, (size_t)w->count) : NULL;
    if (!gap) return 0;
    seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: element %lld of tensor %.100s, which has %lld, is in no file; dump "
                "the ranges of all ranks",
                d->ranks[rank].path, (long long)(gap - w->have), name, (long long)w->count);
    return -1;
}

/* Assembles the tensor from ranks first to last - 1. 0, or -1 with d->error. The caller frees w
   in either case. */
static inline int whole_read(dump *d, const char *name, int64_t first, int64_t last, whole *w) {
    int status = 0;
    *w = (whole){.copy = -1};
    for (int64_t r = first; !status && r < last; r++) {
        const seqpar_safetensors_tensor *t =
            d->ranks ? seqpar_safetensors_find(d->ranks[r].file, name) : NULL;
        double *own = NULL;
        part p;
        if (!t) continue;
        status = part_of(d, r, t, &p);
        if (!status && !w->values) status = whole_alloc(d, w, p.total);
        if (!status && w->count != p.total) {
            seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                        "%.300s: tensor %.100s has %lld elements in all, and %lld in another "
                        "file; write the same total on every rank",
                        d->ranks[r].path, name, (long long)p.total, (long long)w->count);
            status = -1;
        }
        if (!status) status = (own = dump_doubles(d, r, t)) ? 0 : -1;
        if (!status) whole_add(w, r, &p, own);
        free(own);
    }
    return status ? status : whole_is_gapless(d, w, first, name);
}

/* ---- how exact numbers are ---- */

/* The relative rounding of a stored type: half of the unit in roundings.h; 0: an integer. */
static inline double dtype_rounding(seqpar_safetensors_dtype dtype) {
    return dtype == SEQPAR_SAFETENSORS_BF16  ? 0x1p-9
           : dtype == SEQPAR_SAFETENSORS_F16 ? 0x1p-12
           : dtype == SEQPAR_SAFETENSORS_F32 ? 0x1p-25
           : dtype == SEQPAR_SAFETENSORS_F64 ? 0x1p-54
                                             : 0;
}

/* The rounding of metadata dtype, or, if that is "tensors", of the coarsest tensor. */
static inline double dump_rounding(const dump *d) {
    static const double said[] = {0, 0x1p-54, 0x1p-25, 0x1p-12, 0x1p-12, 0x1p-9};
    double most = said[d->facts.dtype];
    for (int64_t r = 0; most == 0 && r < d->world; r++)
        for (int64_t i = 0; i < seqpar_safetensors_count(d->ranks[r].file); i++) {
            const seqpar_safetensors_tensor *t = seqpar_safetensors_at(d->ranks[r].file, i);
            double own = dtype_rounding(t->dtype);
            if (own > most) most = own;
        }
    return most;
}

/* Right gradients differ if they are summed in different orders: in bf16 by up to 3.4 roundings
   with two layers, by more in deeper models. --model measures it for the dump's model. */
enum { GRADIENT_ROUNDINGS = 16 };
static inline double gradient_limit(const dump *d, double tolerance) {
    double limit = GRADIENT_ROUNDINGS * dump_rounding(d);
    return limit > tolerance ? limit : tolerance;
}

/* ---- all parameters ---- */

static inline const char *after_prefix(const char *name, const char *prefix) {
    size_t length = strlen(prefix);
    return strncmp(name, prefix, length) ? NULL : name + length;
}

/* Calls visit once for every parameter that has a tensor `prefix` on some rank. Stops at the
   first return value that is not 0, and returns it. */
typedef int (*parameter_visit)(void *user, const char *parameter);
static inline int each_parameter(const dump *d, const char *prefix, parameter_visit visit,
                                 void *user) {
    for (int64_t r = 0; r < d->world; r++)
        for (int64_t i = 0; i < seqpar_safetensors_count(d->ranks[r].file); i++) {
            const char *name = seqpar_safetensors_at(d->ranks[r].file, i)->name;
            int seen = 0, status;
            if (!after_prefix(name, prefix)) continue;
            for (int64_t q = 0; q < r && !seen; q++)
                seen = seqpar_safetensors_find(d->ranks[q].file, name) != NULL;
            status = seen ? 0 : visit(user, after_prefix(name, prefix));
            if (status) return status;
        }
    return 0;
}

/* "grad." and "layers.0.w" -> "grad.layers.0.w" */
typedef struct tensor_name {
    char text[512];
} tensor_name;
static inline const char *tensor_of(tensor_name *to, const char *prefix,
                                    const char *parameter) {
    snprintf(to->text, sizeof to->text, "%s%s", prefix, parameter);
    return to->text;
}
#endif
