/* SPDX-License-Identifier: MIT OR Unlicense */
/* attention_limits.h - how far a right answer may be from the exact one. A simulated fast
 * kernel, with its rounding, measures this on the numbers of the dump.
 *
 * The simulated kernel: sums in F32 (F64 for F64); probabilities and ds rounded to the type of
 * q, k and v before they are multiplied; outputs of hops merged in F32, or one pass over all
 * keys; out and gradients rounded to their own types. These roundings go up or down at random.
 * Sums are rounded after each term or, in low precision, after four. The limit is LIMIT_TIMES
 * the largest distance over LIMIT_SEEDS seeds, once for the whole tensor (relative, L2) and
 * once for its worst row (relative to the size of the row's terms).
 *
 * With few rows this may be too small by chance. Example: a query sees one key, so its dq is 0.
 * A kernel gives the rounding error of dout . v - dout . out, one random number, which may be
 * near 0 in the simulation. So the limit has a floor: LIMIT_ROUNDINGS independent roundings of
 * the terms. One rounding is at most u = 2^-24 (F64: 2^-53) relative to the terms' size, and
 * its standard deviation is u / sqrt(3). One row in 1e9 exceeds 6 standard deviations, so a
 * row's floor is 6 u sqrt(8 / 3) = 9.8 u. The mean square of N rows has the relative standard
 * deviation sqrt(2 / N). The 8 roundings: dout . v and dout . out (their partial sums, of terms
 * of any sign, stay below the product of both lengths); out, the weight, its score, the product
 * with k or q, the sum, a merge. The error of a weight grows with its score s and with lse, by
 * u s each. With many rows the simulation shows this; with fewer than LIMIT_FEW_ROWS rows of k,
 * 2 s^2 of the largest s are added to the 8. */
#ifndef ORACLE_ATTENTION_LIMITS_H
#define ORACLE_ATTENTION_LIMITS_H
#include "dense_attention.h"

/* LIMIT_RANGE: a distance below 1 / LIMIT_RANGE of the limit for a lower precision was not made
   by rounding to that precision. */
enum {
    LIMIT_SEEDS = 4,
    LIMIT_TIMES = 3,
    LIMIT_LEVELS = 3,
    LIMIT_HOPS = 16,
    LIMIT_RANGE = 30,
    LIMIT_ROUNDINGS = 8,
    LIMIT_DEVIATIONS = 6,
    LIMIT_FEW_ROWS = 64
};

/* Lower bound for the size of a row's terms. Kernels flush F32 numbers below 2^-126 to 0, so a
   row of tiny terms is right if it is 0. */
#define LIMIT_LEAST 0x1p-100

/* How far an answer is from another. */
typedef struct attend_distance {
    double all, row; /* of the whole; of the worst row */
    int64_t worst;   /* which row that is */
    double lost;     /* size of the terms / size of the tensor: large if terms cancel */
    double rows;     /* effective number of rows: (sum of scale^2)^2 / sum of scale^4 */
} attend_distance;

typedef struct attend_limits {
    double all[ATTEND_TENSORS], row[ATTEND_TENSORS];
} attend_limits;

/* The precision of a simulated kernel. */
typedef struct attend_kernel {
    int bits;                     /* of products' factors: 8, 11, 24 or 53 */
    int half_range;               /* F16 */
    int scores;                   /* scores in that type, too */
    int in_bits[ATTEND_INPUTS];   /* of the numbers in the dump */
    int own_bits[ATTEND_TENSORS]; /* of the dumped tensors; 0: all numbers are 0 */
    int bits_of[ATTEND_TENSORS];  /* to which the kernel may round the tensor */
    int partials;                 /* bits of each hop's results; 0: those of sums */
} attend_kernel;

/* ---- distances ---- */

/* Sums of squares in a row: returns that of got - want; *size: that of want. Equal Inf or NaN
   count as no difference: only a mistake has them in want, the right answer is finite. */
static inline double attend_squares(const double *got, const double *want, int64_t n,
                                    double *size) {
    double distance = 0;
    *size = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = got[i] - want[i];
        if (isfinite(want[i])) *size += want[i] * want[i];
        if (got[i] == want[i] || (isnan(got[i]) && isnan(want[i]))) continue;
        distance += d * d;
    }
    return isfinite(distance) ? distance : INFINITY;
}

static inline double attend_ratio(double distance, double size) {
    return distance == 0 ? 0 : size > 0 ? distance / size : INFINITY;
}

/* scale: of the right answer. mistake: want has a mistake, and its terms may be larger than
   scale says; so the size of want is added. */
static inline attend_distance attend_measure(const attend *p, int tensor, const double *got,
                                             const double *want, const double *scale,
                                             int mistake) {
    int64_t n = attend_width(p, tensor);
    double distance = 0, size = 0, terms = 0, squares = 0;
    attend_distance f = {.worst = 0};
    for (int64_t i = 0; i < attend_rows(p, tensor); i++) {
        double own, d = attend_squares(got + i * n, want + i * n, n, &own), ratio;
        double of = mistake ? sqrt(scale[i] * scale[i] + 2 * own) : scale[i];
        distance += d;
        size += own;
        terms += scale[i] * scale[i];
        squares += scale[i] * scale[i] * scale[i] * scale[i];
        ratio = attend_ratio(sqrt(d), fmax(of, LIMIT_LEAST));
        if (ratio > f.row) f.worst = i;
        if (ratio > f.row) f.row = ratio;
    }
    if (!(size > 1e-30 * terms)) size = 1e-30 * terms;
    f.all = sqrt(attend_ratio(distance, size));
    f.lost = sqrt(attend_ratio(terms, size));
    f.rows = squares > 0 ? terms * terms / squares : 1;
    return f;
}

/* ---- hops ---- */

/* The hop in which `rank` attends to the keys of rank `source`. */
static inline int64_t attend_hop(const attend *p, int64_t rank, int64_t source) {
    return (rank - source + p->ranks) % p->ranks;
}

/* Sets sees (attend_way.sees) to exactly the hops from first to last. */
static inline void attend_see_hops(const attend *p, unsigned char *sees, int64_t first,
                                   int64_t last) {
    for (int64_t n = 0; n < 2 * p->ranks * p->ranks; n++) {
        int64_t hop = attend_hop(p, n / p->ranks / 2, n % p->ranks);
        sees[n] = hop >= first && hop <= last ? 3 : 0;
    }
}

/* ---- the simulated kernel ---- */

typedef struct attend_trial_run {
    attend p; /* with inputs in the kernel's type */
    attend_kernel kernel;
    attend_noise noise;
    attend_way way;
    attend_answer part, whole;
    double *delta;
    unsigned char *sees;
    int64_t hops; /* at most LIMIT_HOPS; each may join several hops of the ring */
} attend_trial_run;

static inline attend_noise attend_noise_of(const attend_kernel *k, int seed) {
    uint64_t state = (uint64_t)seed * 7919 + (uint64_t)k->bits;
    attend_noise n = {.state = state,
                      .seed = state,
                      .bits = k->bits,
                      .sums = k->bits == 53 ? 53 : 24,
                      .half_range = k->half_range,
                      .scores = k->scores,
                      .cut = {0, ~UINT64_C(0), k->bits >= 24},
                      .nearest = {0, ~UINT64_C(0), 0},
                      .exp_factor = 1,
                      .tanh_factor = 1};
    if (n.sums == 53) return n;
    n.exp_factor = 1 + (seed % 2 ? 0x1p-22 : -0x1p-22); /* GPU exp may err by 2 ulp */
    n.tanh_factor = 1 + (seed % 2 ? 1 : -1) * (k->bits < 24 ? 0x1p-11 : 0x1p-22);
    n.nearest.mask = n.cut.mask = ~((UINT64_C(1) << 29) - 1);
    n.nearest.add = UINT64_C(1) << 28;
    /* tensor cores truncate */
    n.cut.add = k->bits < 24 && seed % 2 ? 0 : n.nearest.add;
    return n;
}

static inline void attend_round_all(attend_noise *noise, double *x, int64_t n, int bits) {
    for (int64_t i = 0; i < n; i++) x[i] = attend_round(noise, x[i], bits);
}

/* Inputs of more bits than the kernel multiplies are rounded first. */
static inline int attend_round_inputs(attend_trial_run *r, const attend *p) {
    for (int t = 0; t < ATTEND_INPUTS; t++) {
        int64_t tensor = t == ATTEND_DOUT ? ATTEND_OUT
                         : t == ATTEND_Q  ? ATTEND_DQ
                         : t == ATTEND_K  ? ATTEND_DK
                                          : ATTEND_DV;
        int64_t n = attend_rows(p, (int)tensor) * attend_width(p, (int)tensor);
        if (!p->in[t]) continue;
        if (!(r->p.in[t] = attend_zeros(n))) return -1;
        memcpy(r->p.in[t], p->in[t], (size_t)n * sizeof(double));
        if (r->kernel.in_bits[t] > r->kernel.bits)
            attend_round_all(&r->noise, r->p.in[t], n, r->kernel.bits);
    }
    return 0;
}

/* Merges a hop's out and lse of one query and head into those of the hops before. */
static inline void attend_merge(attend_trial_run *r, int64_t at) {
    attend_noise *noise = &r->noise;
    double *lse = &r->whole.x[ATTEND_LSE][at], part = r->part.x[ATTEND_LSE][at], weight;
    int64_t n = r->p.out_dim;
    double *out = r->whole.x[ATTEND_OUT] + at * n, *own = r->part.x[ATTEND_OUT] + at * n;
    int bits = r->kernel.partials ? r->kernel.partials : noise->sums;
    if (part == -INFINITY) return;
    part = attend_round(noise, part, noise->sums);
    attend_round_all(noise, own, n, bits);
    weight = attend_round(noise, 1 / (1 + exp(*lse - part)), noise->sums);
    for (int64_t i = 0; i < n; i++)
        out[i] = attend_round(noise, out[i] - weight * (out[i] - own[i]), bits);
    *lse = *lse > part ? *lse + log1p(exp(part - *lse)) : part + log1p(exp(*lse - part));
    *lse = attend_round(noise, *lse, noise->sums);
}

static inline void attend_part_of_ring(attend_trial_run *r, int64_t hop) {
    int64_t first = hop * r->p.ranks / r->hops, next = (hop + 1) * r->p.ranks / r->hops;
    attend_see_hops(&r->p, r->sees, first, next - 1);
}

static inline int attend_try_forward(attend_trial_run *r) {
    int64_t rows = attend_rows(&r->p, ATTEND_LSE);
    for (int64_t i = 0; i < rows; i++) r->whole.x[ATTEND_LSE][i] = -INFINITY;
    for (int64_t hop = 0; hop < r->hops; hop++) {
        attend_part_of_ring(r, hop);
        if (attend_forward(&r->p, &r->way, &r->noise, &r->part)) return -1;
        for (int64_t i = 0; i < rows; i++) attend_merge(r, i);
    }
    attend_round_all(&r->noise, r->whole.x[ATTEND_OUT], rows * r->p.out_dim,
                     r->kernel.bits_of[ATTEND_OUT]);
    attend_round_all(&r->noise, r->whole.x[ATTEND_LSE], rows, r->kernel.bits_of[ATTEND_LSE]);
    return 0;
}

static inline void attend_add_part(attend_trial_run *r, int tensor) {
    double *whole = r->whole.x[tensor], *part = r->part.x[tensor];
    int64_t n = whole ? attend_rows(&r->p, tensor) * attend_width(&r->p, tensor) : 0;
    int bits = r->kernel.partials ? r->kernel.partials : r->noise.sums;
    for (int64_t i = 0; i < n; i++)
        whole[i] = attend_round(&r->noise, whole[i] + attend_round(&r->noise, part[i], bits),
                                bits);
}

static inline int attend_try_backward(attend_trial_run *r) {
    attend_delta(&r->p, r->whole.x[ATTEND_OUT], r->delta);
    attend_round_all(&r->noise, r->delta, attend_rows(&r->p, ATTEND_LSE), r->noise.sums);
    for (int64_t hop = 0; hop < r->hops; hop++) {
        attend_part_of_ring(r, hop);
        attend_answer_clear(&r->part, &r->p, ATTEND_DQ);
        if (attend_backward(&r->p, &r->way, &r->noise, r->whole.x[ATTEND_LSE], r->delta,
                            &r->part))
            return -1;
        for (int t = ATTEND_DQ; t < ATTEND_TENSORS; t++) attend_add_part(r, t);
    }
    for (int t = ATTEND_DQ; t < ATTEND_TENSORS; t++)
        if (r->whole.x[t])
            attend_round_all(&r->noise, r->whole.x[t],
                             attend_rows(&r->p, t) * attend_width(&r->p, t),
                             r->kernel.bits_of[t]);
    return 0;
}

static inline void attend_trial_end(attend_trial_run *r) {
    for (int t = 0; t < ATTEND_INPUTS; t++) free(r->p.in[t]);
    attend_answer_free(&r->part);
    attend_answer_free(&r->whole);
    free(r->delta);
    free(r->sees);
}

/* Runs the simulated kernel with one seed. 0, or -1: no memory. Call attend_trial_end in either
   case. */
static inline int attend_try(attend_trial_run *r, const attend *p, const attend_kernel *kernel,
                             const attend_way *way, int seed) {
    memset(r, 0, sizeof *r);
    r->p = *p;
    memset(r->p.in, 0, sizeof r->p.in);
    r->kernel = *kernel;
    r->noise = attend_noise_of(kernel, seed);
    r->hops = p->ranks < LIMIT_HOPS ? p->ranks : LIMIT_HOPS;
    if (seed % 2 && !kernel->partials) r->hops = 1; /* as after an all-gather of k and v */
    r->way = *way;
    r->way.sees = r->sees = (unsigned char *)malloc((size_t)(2 * p->ranks * p->ranks));
    r->delta = attend_zeros(attend_rows(p, ATTEND_LSE));
    if (attend_answer_new(&r->part, p, 0) || attend_answer_new(&r->whole, p, 0)) return -1;
    if (!r->sees || !r->delta || attend_round_inputs(r, p) || attend_try_forward(r)) return -1;
    return p->backward ? attend_try_backward(r) : 0;
}

/* Raises the limits of the whole and of a row to their floor: see the top of this file. */
static inline void attend_limit_floor(const attend_kernel *k, double roundings,
                                      const attend_distance *f, double *all, double *row) {
    double deviation = ldexp(1, k->bits == 53 ? -53 : -24) * sqrt(roundings / 3);
    double luck = 1 + LIMIT_DEVIATIONS * sqrt(2 / f->rows);
    *row = fmax(*row, LIMIT_DEVIATIONS * deviation);
    *all = fmax(*all, f->lost * deviation * fmin(luck, LIMIT_DEVIATIONS));
}

static inline double attend_roundings(const attend *p, const attend_answer *right) {
    double top = 0;
    if (p->key.count * p->kv_heads >= LIMIT_FEW_ROWS) return LIMIT_ROUNDINGS;
    for (int64_t i = 0; i < attend_rows(p, ATTEND_LSE); i++)
        if (isfinite(right->top[i])) top = fmax(top, fabs(right->top[i]));
    return LIMIT_ROUNDINGS + 2 * top * top;
}

static inline void attend_limit_tensor(const attend_kernel *kernel, int t, double roundings,
                                       const attend_distance *f, attend_limits *limits) {
    double unit = ldexp(1, -kernel->bits_of[t]); /* one rounding to its type is allowed */
    limits->all[t] = fmax(limits->all[t], fmax(unit, LIMIT_TIMES * f->all));
    limits->row[t] = fmax(limits->row[t], fmax(unit, LIMIT_TIMES * f->row));
    if (t != ATTEND_LSE)
        attend_limit_floor(kernel, roundings, f, &limits->all[t], &limits->row[t]);
}

/* Raises the limits of the tensors from number `from` on that p shows. way: the right one, of
   all heads or of one head in each group. 0, or -1: no memory. */
static inline int attend_limit(const attend *p, const attend_way *way,
                               const attend_answer *right, const attend_kernel *kernel,
                               int from, attend_limits *limits) {
    double roundings = attend_roundings(p, right);
    attend_distance distance[LIMIT_SEEDS][ATTEND_TENSORS];
    int failed = 0, is_large = attend_work(p) > ATTEND_LARGE && p->kv_heads < LIMIT_SEEDS;
    (void)is_large;
    SEQPAR_VERIFY_THREADS
    for (int seed = 1; seed <= LIMIT_SEEDS; seed++) {
        attend_trial_run r;
        int status = attend_try(&r, p, kernel, way, seed);
        for (int t = from; !status && t < ATTEND_TENSORS; t++)
            if (right->x[t])
                distance[seed - 1][t] = attend_measure(p, t, r.whole.x[t], right->x[t],
                                                       right->scale[t], 0);
        attend_trial_end(&r);
        failed |= status != 0;
    }
    for (int n = 0; !failed && n < LIMIT_SEEDS; n++)
        for (int t = from; t < ATTEND_TENSORS; t++)
            if (right->x[t]) attend_limit_tensor(kernel, t, roundings, &distance[n][t], limits);
    return failed ? -1 : 0;
}
#endif
