/* SPDX-License-Identifier: MIT OR Unlicense */
/* roundings.h - how far rounding alone may move a right loss from what a dump's numbers give.
 * The limit is derived from the numbers; u is the unit roundoff of a type, 2^-24 for float32,
 * 2^-8 for bfloat16:
 *
 *     written     writing a number x rounds it by at most u |x|. Roundings of different numbers
 *                 are independent; equal numbers of 16 bits may all be rounded alike. The
 *                 limit is 3 sqrt(sum of squares), five standard deviations, and at most the
 *                 sum of all.
 *     computed    log-probs in the dump may be computed again from the same logits, in float32
 *                 in another order: u times a logit, which is taken to stay below 64
 *     added       n numbers are added in float32 one after the other: three standard deviations
 *                 are sqrt(n) u times the sum of their absolute values
 *     reported    the loss is rounded to its own type: u of it. If the losses of K ranks'
 *                 micro-batches were rounded and added in that type: (2 + sqrt(K)) u of it
 *
 * A loss in float32 whose value fits a type of 16 bits is taken to be rounded to that type. */
#ifndef ORACLE_ROUNDINGS_H
#define ORACLE_ROUNDINGS_H
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define UNIT_F32    0x1p-24
#define UNIT_F16    0x1p-11
#define UNIT_BF16   0x1p-8
#define NARROW      1e-6 /* types of 16 bits have a unit above this */
#define LOGITS_MOST 64

/* How much the roundings of written numbers change the loss, added up. */
typedef struct written {
    double squares;   /* sum over numbers of over 16 bits: independent roundings */
    double worst;     /* sum over all numbers, if all changes have one sign */
    double *by_value; /* (WRITTEN_VALUES) derivatives by numbers of 16 bits; NULL: none */
    double unit;      /* the largest one of numbers in by_value */
    int no_memory;
} written;
enum { WRITTEN_BITS = 19, WRITTEN_VALUES = 1 << WRITTEN_BITS }; /* see written_key */

/* Bits of the significand that x needs: 8 (BF16), 11 (F16), 24 (F32) or 53 (F64). */
static inline int bits_needed(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return !(u & ((UINT64_C(1) << 45) - 1))   ? 8
           : !(u & ((UINT64_C(1) << 42) - 1)) ? 11
           : !(u & ((UINT64_C(1) << 29) - 1)) ? 24
                                              : 53;
}

static inline double square(double x) { return x * x; }

/* Index in by_value. Sign, exponent and 10 bits of a float32 hold any BF16 or F16 value. */
static inline uint32_t written_key(double x) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits >> (32 - WRITTEN_BITS);
}

static inline double written_value(uint32_t key) {
    uint32_t bits = key << (32 - WRITTEN_BITS);
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* by: the derivative of the loss by x. Derivatives by equal numbers of 16 bits are added before
   squaring, because those are rounded alike. */
static inline void written_add(written *w, double unit, double x, double by) {
    w->worst += fabs(by * unit * x);
    if (unit > NARROW && !w->by_value && !w->no_memory) {
        w->by_value = (double *)calloc(WRITTEN_VALUES, sizeof *w->by_value);
        w->no_memory = !w->by_value;
    }
    if (unit > NARROW && w->by_value) {
        w->by_value[written_key(x)] += by;
        w->unit = fmax(w->unit, unit);
    } else {
        w->squares += square(by * unit * x);
    }
}

static inline double written_rounding(const written *w) {
    double squares = w->squares;
    for (uint32_t key = 0; w->by_value && key < WRITTEN_VALUES; key++)
        if (w->by_value[key] != 0)
            squares += square(w->by_value[key] * w->unit * written_value(key));
    return fmin(3 * sqrt(squares), w->worst);
}

static inline void written_free(written *w) { free(w->by_value); }

/* Rounding of a sum of `count` numbers in float32; size: the sum of their absolute values. */
static inline double added_rounding(double count, double size) {
    return (4 + sqrt(count)) * UNIT_F32 * size; /* 4: computing each number rounds, too */
}

/* size: |loss|, or the sum of its parts' absolute values if they cancel; parts: how many */
static inline double reported_rounding(double unit, double size, double parts) {
    return unit * size * (parts > 1 ? 2 + sqrt(parts) : 1);
}

/* The unit of the coarsest type of 16 bits that holds x exactly; 0: no such type does. */
static inline double narrow_unit(double x) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (f != x || !isfinite(x)) return 0;
    return !(bits & 0xffff) ? UNIT_BF16 : !(bits & 0x1fff) ? UNIT_F16 : 0;
}

static inline int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sum of squares of the changes that roundings of the numbers make to their sum. Sorts numbers
   of 16 bits: equal ones are rounded alike, so their changes are added before squaring. */
static inline double sum_squares(double *x, int64_t count, double unit) {
    double squares = 0;
    if (unit > NARROW) qsort(x, (size_t)count, sizeof *x, compare_doubles);
    for (int64_t i = 0, n; i < count; i += n) {
        for (n = 1; unit > NARROW && i + n < count && x[i + n] == x[i];) n++;
        squares += square((double)n * unit * x[i]);
    }
    return squares;
}
#endif
