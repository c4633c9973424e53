/* SPDX-License-Identifier: MIT OR Unlicense */
/* roundings.h - how far a loss may be from what a dump's numbers give, without any mistake. It
 * is counted, number by number; u is the unit of a type's rounding, 2^-24 of float32, 2^-8 of
 * bfloat16:
 *
 *     written     a number x was rounded as it was written: u |x|. Roundings of different
 *                 numbers are independent; those of numbers of 16 bits that are equal as they
 *                 are written may all be the same. Three roots of the sum of squares, five
 *                 deviations, and not more than the sum of all.
 *     computed    log-probs are what the loss was made of, or computed from the same logits in
 *                 float32 in another order: u times logits, which stay below 64
 *     added       n numbers in float32 one after the other: three deviations are sqrt(n) u of
 *                 the sum of their sizes
 *     reported    the loss in its own type: u of it; and once more, and sqrt(K) u, where K
 *                 ranks' micro-batches were rounded before they were added in that type
 *
 * A loss that was written in float32 and has no more than 16 bits was one of 16 bits before. */
#ifndef ORACLE_ROUNDINGS_H
#define ORACLE_ROUNDINGS_H
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define UNIT_F32    0x1p-24
#define UNIT_F16    0x1p-11
#define UNIT_BF16   0x1p-8
#define NARROW      1e-6 /* units above this one are of 16 bits */
#define LOGITS_MOST 64

/* Numbers with what the loss changes by each one's rounding. */
typedef struct written {
    double squares;   /* of roundings that are independent */
    double worst;     /* their sum, if all have one sign */
    double *by_value; /* (WRITTEN_VALUES) those of 16 bits; NULL: there are none */
    double unit;      /* of these */
    int no_memory;
} written;
enum { WRITTEN_BITS = 19, WRITTEN_VALUES = 1 << WRITTEN_BITS }; /* 16 bits, of either type */

/* Bits that a number needs: 8 as in BF16, 11 in F16, 24 in F32, 53. */
static inline int bits_needed(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return !(u & ((UINT64_C(1) << 45) - 1))   ? 8
           : !(u & ((UINT64_C(1) << 42) - 1)) ? 11
           : !(u & ((UINT64_C(1) << 29) - 1)) ? 24
                                              : 53;
}

static inline double square(double x) { return x * x; }

/* The first bits of a float32 tell any number of 16 bits. */
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

/* by: what the loss changes where x does */
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

/* What is rounded where `count` numbers, which are of `size` together, are added up. */
static inline double added_rounding(double count, double size) {
    return (4 + sqrt(count)) * UNIT_F32 * size; /* 4: of each one's own making */
}

/* size: of the loss, or of its parts where these cancel; parts: ranks' micro-batches */
static inline double reported_rounding(double unit, double size, double parts) {
    return unit * size * (parts > 1 ? 2 + sqrt(parts) : 1);
}

/* The unit of the narrowest type that has the number as it is; 0: none of 16 bits. */
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

/* Squares of what the roundings of numbers make of their sum. Sorts those of 16 bits. */
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
