/* SPDX-License-Identifier: MIT OR Unlicense */
/* reference_tensors.h - reads a dump's parameters for the reference, and compares them with
 * those of a folder. */
#ifndef ORACLE_REFERENCE_TENSORS_H
#define ORACLE_REFERENCE_TENSORS_H
#include "oracle/dump/param_ranges.h"
#include "reference_attention.h"

/* ---- the model ---- */

/* Reads a parameter from the dump, where it may be some rows of a larger tensor, as in a fused
   qkv_proj. w->values NULL: the dump has none. 0, or -1 with d->error. */
static inline int reference_part(const reference *f, const char *prefix, int64_t tensor,
                                 tensor_name *name, whole *w) {
    const seqpar_tensor *t = &f->model.tensors[tensor];
    demo_tensor_location place = {.rows = t->rows};
    memset(w, 0, sizeof *w);
    for (int names = 0; names < DEMO_NAMES && !w->values; names++) {
        place = demo_tensor_location_of(&f->model, tensor, names);
        if (whole_read(f->d, tensor_of(name, prefix, place.name), 0, f->d->world, w)) return -1;
    }
    if (!w->values) return 0;
    if (w->count != place.rows * t->cols) {
        seqpar_fail(&f->d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor %.100s has %lld elements, but %lld in the model; give "
                    "--model the model that was trained",
                    f->d->ranks[0].path, name->text, (long long)w->count,
                    (long long)(place.rows * t->cols));
        return -1;
    }
    w->count = t->rows * t->cols;
    memmove(w->values, w->values + place.first * t->cols, (size_t)w->count * sizeof *w->values);
    return 0;
}

/* The relative rounding error of the tensor's type in the file; 0: the file has no such
   tensor. */
static inline double reference_rounding(const seqpar_safetensors_file *file, const char *name) {
    const seqpar_safetensors_tensor *t = seqpar_safetensors_find(file, name);
    return t ? dtype_rounding(t->dtype) : 0;
}

/* The first element that differs by more than rounding explains; count: none. Types of 16 bits
   may be off by 0x1p-24 more: float16 has no smaller number but 0. */
static inline int64_t reference_differs(const double *own, const double *other, int64_t count,
                                        double rounding) {
    int64_t i = 0;
    while (i < count && fabs(own[i] - other[i]) <=
                            2 * rounding * fabs(other[i]) + (rounding > 0x1p-25 ? 0x1p-24 : 0))
        i++;
    return i;
}

/* Refuses the option's folder if its weights differ from those that the dump has from before
   the step: by a reference with other weights, any dump would be wrong. */
static inline int reference_compare(reference *f, const char *option_name, const char *folder,
                                    const char *name, const whole *own, const whole *other,
                                    double rounding) {
    for (int64_t r = 0; r < f->d->world; r++)
        rounding = fmax(rounding, reference_rounding(f->d->ranks[r].file, name));
    int64_t i = reference_differs(own->values, other->values, other->count, rounding);
    if (i == other->count) return 0;
    seqpar_fail(&f->d->error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: element %lld of %.100s is %.9g, and %.9g in %.300s; give %s what the "
                "step began with",
                f->d->ranks[0].path, (long long)i, name, own->values[i], other->values[i],
                folder, option_name);
    return -1;
}

/* Copies seqpar.h's error to d->error. Returns -1. */
static inline int reference_failed(reference *f) {
    if (f->ctx.error && f->ctx.error->status && !f->d->error.status)
        f->d->error = *f->ctx.error;
    return -1;
}
#endif
