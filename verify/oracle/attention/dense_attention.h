/* SPDX-License-Identifier: MIT OR Unlicense */
/* dense_attention.h - recomputes attention from q, k and v, densely and in double: right, with
 * a mistake, or with the rounding of a fast kernel.
 *
 *     s_ij = scale q_i . k_j, capped    p_ij = exp(s_ij - lse_i)    out_i = sum_j p_ij v_j
 *     delta_i = dout_i . out_i          ds_ij = scale p_ij (dout_i . v_j - delta_i)
 *     dq_i = sum_j ds_ij k_j    dk_j = sum_i ds_ij q_i    dv_j = sum_i p_ij dout_i
 *
 * Queries and keys are ordered by rank, then by local row (a row of the rank's share). Work
 * goes by pairs of blocks, one of queries and one of keys. A block lies within one half of one
 * rank's rows, so a mask by ranks and halves (attend_way.sees) holds for whole blocks. */
#ifndef ORACLE_DENSE_ATTENTION_H
#define ORACLE_DENSE_ATTENTION_H
#include "oracle/report/progress.h"
#include "oracle/dump/rows.h"

/* Runs the next loop in parallel if is_large; `failed` is or-ed. Small loops use one thread:
   OpenMP threads wait by spinning, which on a busy machine costs more than a small loop. */
#ifdef _OPENMP
#define SEQPAR_VERIFY_THREADS \
    _Pragma("omp parallel for schedule(dynamic, 1) reduction(| : failed) if (is_large)")
#else
#define SEQPAR_VERIFY_THREADS
#endif

enum { ATTEND_OUT, ATTEND_LSE, ATTEND_DQ, ATTEND_DK, ATTEND_DV, ATTEND_TENSORS };
enum { ATTEND_Q, ATTEND_K, ATTEND_V, ATTEND_DOUT, ATTEND_INPUTS };
/* Most queries, and most keys, in a block. */
#ifndef ATTEND_QUERIES
#define ATTEND_QUERIES 16
#endif
#ifndef ATTEND_KEYS
#define ATTEND_KEYS 64
#endif

typedef struct attend_block {
    int64_t begin, count;
    int64_t rank, half; /* rank: counted from first_rank; half: 0 or 1, of its rows */
} attend_block;

typedef struct attend_side {
    int64_t count, *token; /* (count) */
    attend_block *block;
    int64_t blocks;
} attend_side;

/* One sequence, or a part of it: some heads, some queries; all keys. */
typedef struct attend {
    const dump_row *row;
    int64_t end; /* of the last document */
    int64_t ranks, first_rank;
    int64_t *held; /* (ranks) number of rows on each */
    attend_side query, key;
    int64_t kv_heads, group; /* kv heads that are loaded; query heads per kv head */
    int64_t *kv_head;        /* (kv_heads) their numbers in the dump */
    int all_heads;           /* all kv heads of the dump are loaded */
    int64_t heads;           /* kv_heads * group */
    int64_t dim, out_dim;    /* of q and k, of v and out */
    double *in[ATTEND_INPUTS];
    double *got[ATTEND_TENSORS]; /* as dumped; NULL: not dumped, or not compared */
    int backward;                /* the dump has dout and a gradient */
    double scale, softcap;
    int64_t window;
} attend;

/* Recomputed tensors. Rows of out, lse and dq: (queries, heads); of dk and dv: (keys,
   kv_heads). scale: of each row, the size of the terms that are rounded and summed; NULL: not
   needed. */
typedef struct attend_answer {
    double *x[ATTEND_TENSORS], *scale[ATTEND_TENSORS];
    double *top; /* (queries, heads) the largest score */
} attend_answer;

/* Flags of a wrong mask. 0 is the right one: causal, within the document, by global positions
   (indices of tokens in the whole row). */
enum {
    SEES_ANY_DOCUMENT = 1,
    SEES_AHEAD = 2,
    SEES_BY_LOCAL_ROW = 4, /* causality and window compare local rows, not positions */
    SEES_LOCAL_WINDOW = 8, /* only the window compares local rows */
    SEES_LOCAL_BOUND = 16  /* no key of a later local row, in addition to the other rules */
};

/* Whose keys and values each hop uses by mistake: the query's rank's, or those of the previous
   or the next hop. */
enum { OWN_KV = 1, OF_HOP_BEFORE, OF_HOP_AFTER };

/* Wrong kv heads for query head h: h mod kv_heads; or, if Ulysses puts h on rank r: r mod
   kv_heads, or counted from 0 on each rank. */
enum { IN_TURN = 1, IN_TURN_BY_RANK, FROM_0_ON_RANK };

/* How attention is computed: right (attend_right_way) or with a mistake. */
typedef struct attend_way {
    int sight;             /* SEES_... */
    double scale, softcap; /* softcap 0: none */
    int64_t window;        /* 0: none */
    /* (2 ranks, ranks) which keys of a rank each half of a rank's queries sees: 1 the first
       half, 2 the second, 3 both; NULL: all */
    const unsigned char *sees;
    const int64_t *places; /* (tokens) positions for the mask; NULL: the right ones */
    const int64_t *query_rows, *key_rows; /* (tokens) what SEES_..LOCAL.. compares; NULL: local
                                             rows */
    int ahead;         /* 1: a query sees the next token, too; -1: not even its own token */
    int own_kv;        /* OWN_KV or OF_HOP_...; 0: each hop uses the right keys */
    int in_turn;       /* IN_TURN, ...; 0: query head h uses kv head h / group */
    int64_t only_head; /* the one query head of each group that is computed; -1: all */
} attend_way;

/* Rounds a sum: adds `add` to its bits and clears those that are not in mask. */
typedef struct attend_cut {
    uint64_t add, mask;
    int each; /* 1: after each term; 0: after four, as tensor cores add several at a time */
} attend_cut;

/* How a simulated kernel rounds. */
typedef struct attend_noise {
    uint64_t state;     /* of random numbers */
    uint64_t seed;      /* the initial state */
    int bits;           /* of factors in matrix products: probabilities, ds */
    int sums;           /* bits of sums and of results between hops */
    int half_range;     /* F16: subnormal numbers have fewer bits */
    int scores;         /* scores and dp have `bits`, too */
    attend_cut cut;     /* of sums of products */
    attend_cut nearest; /* of the sum of exponentials */
    double exp_factor, tanh_factor;
} attend_noise;

/* ---- rounding ---- */

static inline uint64_t attend_random(uint64_t *state) {
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static inline double attend_cut_sum(double x, attend_cut cut) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    u = (u + cut.add) & cut.mask;
    memcpy(&x, &u, sizeof u);
    return x;
}

/* Stochastic rounding to `bits` bits: the error is at most twice that of rounding to nearest
   and has no preferred direction. With 53 bits x stays or goes one unit away from 0. */
static inline double attend_round(attend_noise *noise, double x, int bits) {
    uint64_t random, low;
    if (!noise) return x;
    random = attend_random(&noise->state);
    if (noise->half_range && bits == 11 && fabs(x) < 0x1p-14)
        return floor(x * 0x1p24 + (double)(random >> 11) * 0x1p-53) * 0x1p-24;
    low = bits < 53 ? (UINT64_C(1) << (53 - bits)) - 1 : 0;
    return attend_cut_sum(x, (attend_cut){low ? random & low : random & 1, ~low, 0});
}

/* ---- products ---- */

enum { ATTEND_EXP = 32 }; /* what a pair's mask, exp and rounding cost, in multiplications */

static inline void attend_add_row(double *restrict c, const double *f, const double *const *b,
                                  int64_t n, attend_cut cut) {
    const double *b0 = b[0], *b1 = b[1], *b2 = b[2], *b3 = b[3];
    for (int64_t j = 0; j < n; j++)
        c[j] = attend_cut_sum(
            c[j] + (f[0] * b0[j] + f[1] * b1[j] + f[2] * b2[j] + f[3] * b3[j]), cut);
}

static inline void attend_add_each(double *restrict c, const double *f, const double *const *b,
                                   int64_t n, attend_cut cut) {
    const double *b0 = b[0], *b1 = b[1], *b2 = b[2], *b3 = b[3];
    for (int64_t j = 0; j < n; j++) {
        double sum = attend_cut_sum(c[j] + f[0] * b0[j], cut);
        sum = attend_cut_sum(sum + f[1] * b1[j], cut);
        sum = attend_cut_sum(sum + f[2] * b2[j], cut);
        c[j] = attend_cut_sum(sum + f[3] * b3[j], cut);
    }
}

static inline void attend_add_rows(double *restrict c, double *restrict d, const double *f,
                                   const double *const *b, int64_t n, attend_cut cut) {
    const double *b0 = b[0], *b1 = b[1], *b2 = b[2], *b3 = b[3];
    for (int64_t j = 0; j < n; j++) {
        c[j] = attend_cut_sum(
            c[j] + (f[0] * b0[j] + f[1] * b1[j] + f[2] * b2[j] + f[3] * b3[j]), cut);
        d[j] = attend_cut_sum(
            d[j] + (f[4] * b0[j] + f[5] * b1[j] + f[6] * b2[j] + f[7] * b3[j]), cut);
    }
}

/* Element (i, j) is x[i * row + j * column]. */
typedef struct attend_matrix {
    const double *x;
    int64_t row, column; /* strides */
} attend_matrix;

/* c (m, n) += a (m, k) b (k, n), four terms at a time. Column strides of b and c: 1; row stride
   of c: `row`. */
static inline void attend_product(double *c, int64_t row, attend_matrix a, attend_matrix b,
                                  int64_t m, int64_t n, int64_t k, attend_cut cut) {
    for (int64_t l = 0; l < k; l += 4) {
        const double *rows[4];
        for (int u = 0; u < 4; u++) rows[u] = b.x + (l + u < k ? l + u : k - 1) * b.row;
        for (int64_t i = 0; i < m; i += 2) {
            double f[8];
            for (int u = 0; u < 8; u++)
                f[u] = i + u / 4 < m && l + u % 4 < k
                           ? a.x[(i + u / 4) * a.row + (l + u % 4) * a.column]
                           : 0;
            if (cut.each)
                for (int64_t r = i; r < m && r < i + 2; r++)
                    attend_add_each(c + r * row, f + 4 * (r - i), rows, n, cut);
            else if (i + 1 < m)
                attend_add_rows(c + i * row, c + (i + 1) * row, f, rows, n, cut);
            else
                attend_add_row(c + i * row, f, rows, n, cut);
        }
    }
}

enum { ATTEND_TILE_ROWS = 4, ATTEND_LANES = 4, ATTEND_TILE = 2 * ATTEND_LANES };
typedef double attend_lanes
    __attribute__((vector_size(ATTEND_LANES * sizeof(double)), aligned(8), may_alias));

/* c (4, 8) += a b with sums in registers. noinline: else compilers interchange the loops. */
static __attribute__((noinline, unused)) void attend_tile(double *restrict c, int64_t row,
                                                          attend_matrix a, attend_matrix b,
                                                          int64_t k) {
    attend_lanes sum[ATTEND_TILE_ROWS][2] = {{{0}}};
    for (int64_t l = 0; l < k; l++) {
        const attend_lanes *x = (const attend_lanes *)(b.x + l * b.row);
        for (int r = 0; r < ATTEND_TILE_ROWS; r++) {
            double f = a.x[r * a.row + l * a.column];
            sum[r][0] += f * x[0];
            sum[r][1] += f * x[1];
        }
    }
    for (int r = 0; r < ATTEND_TILE_ROWS; r++) {
        attend_lanes *to = (attend_lanes *)(c + r * row);
        to[0] += sum[r][0];
        to[1] += sum[r][1];
    }
}

/* As attend_product, but without rounding: full tiles first, then the remaining edges. */
static inline void attend_product_exact(double *c, int64_t row, attend_matrix a,
                                        attend_matrix b, int64_t m, int64_t n, int64_t k) {
    const attend_cut none = {0, ~UINT64_C(0), 0};
    int64_t rows = m - m % ATTEND_TILE_ROWS, columns = n - n % ATTEND_TILE;
    attend_matrix below = {a.x + rows * a.row, a.row, a.column};
    attend_matrix beside = {b.x + columns, b.row, 1};
    for (int64_t j = 0; j < columns; j += ATTEND_TILE)
        for (int64_t i = 0; i < rows; i += ATTEND_TILE_ROWS)
            attend_tile(c + i * row + j, row, (attend_matrix){a.x + i * a.row, a.row, a.column},
                        (attend_matrix){b.x + j, b.row, 1}, k);
    if (rows < m) attend_product(c + rows * row, row, below, b, m - rows, columns, k, none);
    if (columns < n) attend_product(c + columns, row, a, beside, m, n - columns, k, none);
}

/* The same; with noise, sums are rounded as in a kernel and run from the last term to the
   first, as kernels add in different orders. */
static inline void attend_sum(attend_noise *noise, double *c, int64_t row, attend_matrix a,
                              attend_matrix b, int64_t m, int64_t n, int64_t k) {
    if (!noise) {
        attend_product_exact(c, row, a, b, m, n, k);
        return;
    }
    a.x += (k - 1) * a.column;
    b.x += (k - 1) * b.row;
    a.column = -a.column;
    b.row = -b.row;
    attend_product(c, row, a, b, m, n, k, noise->cut);
}

static inline double attend_dot(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* ---- answers ---- */

static inline int64_t attend_rows(const attend *p, int tensor) {
    return tensor < ATTEND_DK ? p->query.count * p->heads : p->key.count * p->kv_heads;
}

static inline int64_t attend_width(const attend *p, int tensor) {
    return tensor == ATTEND_LSE                          ? 1
           : tensor == ATTEND_OUT || tensor == ATTEND_DV ? p->out_dim
                                                         : p->dim;
}

/* Whether this part of the sequence determines the tensor: dk and dv need all queries. */
static inline int attend_shows(const attend *p, int tensor) {
    return tensor < ATTEND_DQ ||
           (p->backward && (tensor == ATTEND_DQ || p->query.count == p->key.count));
}

static inline void attend_answer_free(attend_answer *a) {
    for (int t = 0; t < ATTEND_TENSORS; t++) {
        free(a->x[t]);
        free(a->scale[t]);
    }
    free(a->top);
}

static inline double *attend_zeros(int64_t count) {
    return (double *)calloc((size_t)count + 1, sizeof(double));
}

/* Allocates the tensors that p shows. 0, or -1: no memory. Call attend_answer_free in either
   case. */
static inline int attend_answer_new(attend_answer *a, const attend *p, int scales) {
    int status = 0;
    memset(a, 0, sizeof *a);
    for (int t = 0; t < ATTEND_TENSORS; t++) {
        if (!attend_shows(p, t)) continue;
        a->x[t] = attend_zeros(attend_rows(p, t) * attend_width(p, t));
        if (scales) a->scale[t] = attend_zeros(attend_rows(p, t));
        if (!a->x[t] || (scales && !a->scale[t])) status = -1;
    }
    a->top = attend_zeros(attend_rows(p, ATTEND_LSE));
    return a->top ? status : -1;
}

static inline void attend_answer_clear(attend_answer *a, const attend *p, int from) {
    for (int t = from; t < ATTEND_TENSORS; t++)
        if (a->x[t])
            memset(a->x[t], 0,
                   (size_t)(attend_rows(p, t) * attend_width(p, t)) * sizeof(double));
}

/* ---- the mask ---- */

/* What a query sees: keys with position in [lo, hi) and local row in [local_lo, local_hi). */
typedef struct attend_sight {
    int32_t lo, hi, local_lo, local_hi;
} attend_sight;

static inline void attend_document(const attend *p, int64_t place, int64_t *begin,
                                   int64_t *end) {
    const dump_row *row = p->row;
    int64_t low = 0, high = row->docs - 1;
    *begin = 0;
    *end = p->end;
    while (low < high) {
        int64_t mid = (low + high) / 2;
        if (row->cu_seqlens[mid + 1] <= place)
            low = mid + 1;
        else
            high = mid;
    }
    if (!row->docs) return;
    *begin = row->cu_seqlens[low];
    *end = row->cu_seqlens[low + 1];
}

static inline attend_sight attend_sight_of(const attend *p, const attend_way *w,
                                           int64_t token) {
    int64_t place = w->places ? w->places[token] : token, begin, end, low;
    int32_t local = (int32_t)(w->query_rows ? w->query_rows : p->row->local)[token];
    int64_t rank = p->row->rank[token] - p->first_rank;
    attend_sight s = {.local_hi = INT32_MAX};
    attend_document(p, place, &begin, &end);
    if (w->sight & SEES_ANY_DOCUMENT) begin = 0;
    if (w->sight & SEES_ANY_DOCUMENT) end = p->end;
    low = w->window && place - w->window + 1 > begin ? place - w->window + 1 : begin;
    s.lo = (int32_t)(w->sight & (SEES_BY_LOCAL_ROW | SEES_LOCAL_WINDOW) ? begin : low);
    s.hi = (int32_t)(w->sight & (SEES_BY_LOCAL_ROW | SEES_AHEAD) ? end : place + 1 + w->ahead);
    if (s.hi > end) s.hi = (int32_t)end;
    if (w->window && w->sight & (SEES_BY_LOCAL_ROW | SEES_LOCAL_WINDOW) && local >= w->window)
        s.local_lo = (int32_t)(local - w->window + 1);
    if (w->sight & (SEES_BY_LOCAL_ROW | SEES_LOCAL_BOUND)) s.local_hi = local + 1;
    if (w->own_kv == OWN_KV && p->held[rank] < s.local_hi) s.local_hi = (int32_t)p->held[rank];
    return s;
}

/* ---- a pass over all pairs ---- */

typedef struct attend_pass {
    const attend *p;
    const attend_way *w;
    attend_noise *noise; /* NULL: none */
    attend_answer *to;
    const double *lse, *delta;   /* (queries, heads) for the backward pass; NULL: forward */
    attend_sight *sights;        /* (queries) */
    int32_t *places, *locals;    /* (keys) */
    int32_t *first, *last;       /* (key blocks) the least and the greatest position */
    double *k, *v;               /* of kv head `kv`: (keys, dim), (keys, out_dim) */
    double *k_turned, *v_turned; /* transposed block by block: (dim, keys of the block) */
    double *kk, *vv;             /* (keys) |k|^2, |v|^2 */
    double *score;               /* (ATTEND_QUERIES, keys) */
    double *dp, *slope;          /* (ATTEND_QUERIES, ATTEND_KEYS) */
    int64_t kv;                  /* the current kv head */
    int32_t lo, hi;              /* range of positions that the current query block sees */
} attend_pass;

static inline void attend_pass_end(attend_pass *s) {
    void *const all[] = {s->sights, s->places, s->locals,   s->first,    s->last,
                         s->k,      s->v,      s->k_turned, s->v_turned, s->kk,
                         s->vv,     s->score,  s->dp,       s->slope};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static inline void attend_see(attend_pass *s) {
    const attend *p = s->p;
    for (int64_t i = 0; i < p->query.count; i++)
        s->sights[i] = attend_sight_of(p, s->w, p->query.token[i]);
    for (int64_t j = 0; j < p->key.count; j++) {
        int64_t token = p->key.token[j];
        s->places[j] = (int32_t)(s->w->places ? s->w->places[token] : token);
        s->locals[j] = (int32_t)(s->w->key_rows ? s->w->key_rows : p->row->local)[token];
    }
    for (int64_t b = 0; b < p->key.blocks; b++) {
        const attend_block *block = &p->key.block[b];
        s->first[b] = s->last[b] = s->places[block->begin];
        for (int64_t j = block->begin; j < block->begin + block->count; j++) {
            if (s->places[j] < s->first[b]) s->first[b] = s->places[j];
            if (s->places[j] > s->last[b]) s->last[b] = s->places[j];
        }
    }
}

/* 0, or -1: no memory. Call attend_pass_end in either case. */
static inline int attend_pass_begin(attend_pass *s) {
    const attend *p = s->p;
    size_t keys = (size_t)p->key.count + 1, blocks = (size_t)p->key.blocks + 1;
    s->sights = (attend_sight *)calloc((size_t)p->query.count + 1, sizeof *s->sights);
    s->places = (int32_t *)calloc(keys, sizeof *s->places);
    s->locals = (int32_t *)calloc(keys, sizeof *s->locals);
    s->first = (int32_t *)calloc(blocks, sizeof *s->first);
    s->last = (int32_t *)calloc(blocks, sizeof *s->last);
    s->k = attend_zeros(p->key.count * p->dim);
    s->v = attend_zeros(p->key.count * p->out_dim);
    s->k_turned = attend_zeros(p->key.count * p->dim);
    s->v_turned = attend_zeros(p->key.count * p->out_dim);
    s->kk = attend_zeros(p->key.count);
    s->vv = attend_zeros(p->key.count);
    s->score = attend_zeros(p->key.count * (s->lse ? 0 : ATTEND_QUERIES));
    s->dp = attend_zeros(ATTEND_QUERIES * ATTEND_KEYS);
    s->slope = attend_zeros(ATTEND_QUERIES * ATTEND_KEYS);
    if (!s->sights || !s->places || !s->locals || !s->first || !s->last || !s->k || !s->v ||
        !s->k_turned || !s->v_turned || !s->kk || !s->vv || !s->score || !s->dp || !s->slope)
        return -1;
    attend_see(s);
    return 0;
}

/* Index among the keys of this rank's row `local`; -1: the rank has no such row. */
static inline int64_t attend_own_row(const attend *p, int64_t rank, int32_t local) {
    int64_t low = 0, high = p->key.count;
    while (low < high) { /* keys are sorted by rank, then by local row */
        int64_t mid = (low + high) / 2, token = p->key.token[mid];
        int64_t r = p->row->rank[token] - p->first_rank;
        if (r < rank || (r == rank && p->row->local[token] < local))
            low = mid + 1;
        else
            high = mid;
    }
    if (low == p->key.count || p->row->local[p->key.token[low]] != local) return -1;
    return p->row->rank[p->key.token[low]] - p->first_rank == rank ? low : -1;
}

static inline void attend_turn(double *to, const double *from, const attend_side *side,
                               int64_t dim) {
    for (int64_t b = 0; b < side->blocks; b++) {
        const attend_block *block = &side->block[b];
        double *turned = to + block->begin * dim;
        for (int64_t j = 0; j < block->count; j++)
            for (int64_t i = 0; i < dim; i++)
                turned[i * block->count + j] = from[(block->begin + j) * dim + i];
    }
}

/* The rank whose keys the queries of `rank` use, by mistake, in place of those of `source`. */
static inline int64_t attend_source(const attend_pass *s, int64_t rank, int64_t source) {
    int64_t by = s->w->own_kv == OF_HOP_BEFORE ? 1 : s->p->ranks - 1;
    return s->w->own_kv == OWN_KV || rank == source ? rank : (source + by) % s->p->ranks;
}

/* Copies keys and values of one kv head: those that queries of `rank` use by mistake; rank -1:
   the right ones. */
static inline void attend_pack(attend_pass *s, int64_t kv, int64_t rank) {
    const attend *p = s->p;
    s->kv = kv;
    for (int64_t j = 0; j < p->key.count; j++) {
        int64_t source = p->row->rank[p->key.token[j]] - p->first_rank;
        int64_t own = rank < 0
                          ? j
                          : attend_own_row(p, attend_source(s, rank, source), s->locals[j]);
        int64_t at = (own < 0 ? j : own) * p->kv_heads + kv;
        memcpy(s->k + j * p->dim, p->in[ATTEND_K] + at * p->dim, (size_t)p->dim * sizeof *s->k);
        memcpy(s->v + j * p->out_dim, p->in[ATTEND_V] + at * p->out_dim,
               (size_t)p->out_dim * sizeof *s->v);
        s->kk[j] = attend_dot(s->k + j * p->dim, s->k + j * p->dim, p->dim);
        s->vv[j] = attend_dot(s->v + j * p->out_dim, s->v + j * p->out_dim, p->out_dim);
    }
    attend_turn(s->k_turned, s->k, &p->key, p->dim);
    attend_turn(s->v_turned, s->v, &p->key, p->out_dim);
}

static inline void attend_block_sight(attend_pass *s, const attend_block *queries) {
    s->lo = INT32_MAX;
    s->hi = 0;
    for (int64_t i = queries->begin; i < queries->begin + queries->count; i++) {
        if (s->sights[i].lo < s->lo) s->lo = s->sights[i].lo;
        if (s->sights[i].hi > s->hi) s->hi = s->sights[i].hi;
    }
}

/* Whether the two blocks need work. 0: no query sees a key; 1: some may. */
static inline int attend_meet(const attend_pass *s, const attend_block *queries, int64_t b) {
    const attend_block *keys = &s->p->key.block[b];
    int64_t of = (2 * queries->rank + queries->half) * s->p->ranks + keys->rank;
    if (s->w->sees && !(s->w->sees[of] & (1 << keys->half))) return 0;
    return s->first[b] < s->hi && s->last[b] >= s->lo;
}

static inline int attend_sees(const attend_pass *s, int64_t query, int64_t key) {
    attend_sight a = s->sights[query];
    int32_t place = s->places[key], local = s->locals[key];
    return (place >= a.lo) & (place < a.hi) & (local >= a.local_lo) & (local < a.local_hi);
}

/* Rounds a score. In low precision the random number depends on the pair alone, so that both
   passes get the same score. */
static inline double attend_round_score(attend_noise *noise, double x, int64_t pair) {
    attend_noise own;
    if (!noise || !noise->scores) return attend_round(noise, x, noise ? noise->sums : 53);
    own = *noise;
    own.state = noise->seed + (uint64_t)pair * UINT64_C(0xd1342543de82ef95);
    return attend_round(&own, x, noise->bits);
}

static inline double attend_capped(attend_pass *s, double x, int64_t pair, double *slope) {
    double bend;
    x = attend_round_score(s->noise, x, pair);
    *slope = 1;
    if (!(s->w->softcap > 0)) return x;
    bend = tanh(x / s->w->softcap);
    if (s->noise && s->noise->sums < 53)
        bend = attend_round(s->noise, bend * s->noise->tanh_factor,
                            s->noise->bits < 24 ? 11 : 24);
    *slope = 1 - bend * bend;
    return s->w->softcap * bend;
}

/* Scores of a query block and a key block, -Inf where the mask hides the key. `to` has row
   stride `row`. slope: derivative of the softcap. */
static inline void attend_scores(attend_pass *s, const attend_block *queries, int64_t head,
                                 const attend_block *keys, double *to, int64_t row,
                                 double *slope) {
    const attend *p = s->p;
    attend_matrix q = {p->in[ATTEND_Q] + (queries->begin * p->heads + head) * p->dim,
                       p->heads * p->dim, 1};
    attend_matrix k = {s->k_turned + keys->begin * p->dim, keys->count, 1};
    for (int64_t i = 0; i < queries->count; i++)
        memset(to + i * row, 0, (size_t)keys->count * sizeof *to);
    attend_sum(s->noise, to, row, q, k, queries->count, keys->count, p->dim);
    for (int64_t i = 0; i < queries->count; i++)
        for (int64_t j = 0; j < keys->count; j++) {
            double *x = &to[i * row + j];
            int64_t pair = ((queries->begin + i) * p->heads + head) * p->key.count;
            *x = attend_sees(s, queries->begin + i, keys->begin + j)
                     ? attend_capped(s, s->w->scale * *x, pair + keys->begin + j,
                                     &slope[i * ATTEND_KEYS + j])
                     : -INFINITY;
        }
}

/* ---- forward ---- */

static inline double attend_largest(const double *x, int64_t n, double top) {
    for (int64_t j = 0; j < n; j++)
        if (!(x[j] <= top)) top = x[j];
    return top;
}

/* Replaces each x by exp(x - top). Returns `sum` plus all of them. */
static inline double attend_exp(attend_pass *s, double *x, int64_t n, double top, double sum) {
    for (int64_t j = 0; j < n; j++) {
        x[j] = x[j] == -INFINITY ? 0 : exp(x[j] - top);
        if (s->noise) x[j] *= s->noise->exp_factor;
        sum += x[j];
        if (s->noise) sum = attend_cut_sum(sum, s->noise->nearest);
    }
    return sum;
}

/* Divides x by sum, which gives probabilities p. Returns the sum of p^2 |v|^2. */
static inline double attend_divide(attend_pass *s, double *x, const double *vv, int64_t n,
                                   double sum) {
    double squares = 0;
    for (int64_t j = 0; j < n; j++) {
        x[j] /= sum;
        squares += x[j] * x[j] * vv[j];
        if (s->noise) x[j] = attend_round(s->noise, x[j], s->noise->bits);
    }
    return squares;
}

/* Softmax of one query. row: its scores, then probabilities, in the key blocks that its block
   meets. */
static inline void attend_softmax(attend_pass *s, const attend_block *queries, double *row,
                                  int64_t at) {
    const attend_side *key = &s->p->key;
    double top = -INFINITY, sum = 0, squares = 0;
    for (int64_t b = 0; b < key->blocks; b++)
        if (attend_meet(s, queries, b))
            top = attend_largest(row + key->block[b].begin, key->block[b].count, top);
    for (int64_t b = 0; b < key->blocks && top > -INFINITY; b++)
        if (attend_meet(s, queries, b))
            sum = attend_exp(s, row + key->block[b].begin, key->block[b].count, top, sum);
    for (int64_t b = 0; b < key->blocks; b++) {
        const attend_block *block = &key->block[b];
        if (!attend_meet(s, queries, b)) continue;
        if (top == -INFINITY)
            memset(row + block->begin, 0, (size_t)block->count * sizeof *row);
        else
            squares += attend_divide(s, row + block->begin, s->vv + block->begin, block->count,
                                     sum);
    }
    s->to->top[at] = top;
    s->to->x[ATTEND_LSE][at] = top > -INFINITY ? top + log(sum) : -INFINITY;
    if (s->to->scale[ATTEND_OUT]) s->to->scale[ATTEND_OUT][at] = squares;
}

static inline void attend_forward_block(attend_pass *s, const attend_block *queries,
                                        int64_t head) {
    const attend *p = s->p;
    double *out = s->to->x[ATTEND_OUT] + (queries->begin * p->heads + head) * p->out_dim;
    for (int64_t b = 0; b < p->key.blocks; b++)
        if (attend_meet(s, queries, b))
            attend_scores(s, queries, head, &p->key.block[b], s->score + p->key.block[b].begin,
                          p->key.count, s->slope);
    for (int64_t i = 0; i < queries->count; i++)
        attend_softmax(s, queries, s->score + i * p->key.count,
                       (queries->begin + i) * p->heads + head);
    for (int64_t i = 0; i < queries->count; i++)
        memset(out + i * p->heads * p->out_dim, 0, (size_t)p->out_dim * sizeof *out);
    for (int64_t b = 0; b < p->key.blocks; b++) {
        const attend_block *keys = &p->key.block[b];
        attend_matrix weights = {s->score + keys->begin, p->key.count, 1};
        attend_matrix values = {s->v + keys->begin * p->out_dim, p->out_dim, 1};
        if (attend_meet(s, queries, b))
            attend_sum(s->noise, out, p->heads * p->out_dim, weights, values, queries->count,
                       p->out_dim, keys->count);
    }
}

/* ---- backward ---- */

/* Replaces, in a pair of blocks, scores in weights by probabilities and dp in x by ds. */
static inline void attend_slopes(attend_pass *s, const attend_block *queries, int64_t head,
                                 int64_t keys, double *weights, double *x) {
    attend_noise *noise = s->noise;
    for (int64_t i = 0; i < queries->count; i++) {
        int64_t at = (queries->begin + i) * s->p->heads + head;
        for (int64_t n = i * ATTEND_KEYS; n < i * ATTEND_KEYS + keys; n++) {
            double w = weights[n] == -INFINITY ? 0 : exp(weights[n] - s->lse[at]);
            double dp = x[n];
            if (noise) w *= noise->exp_factor;
            if (noise && noise->scores) dp = attend_round(noise, dp, noise->bits);
            x[n] = w == 0 ? 0 : s->w->scale * w * (dp - s->delta[at]) * s->slope[n];
            if (noise) x[n] = attend_round(noise, x[n], noise->bits);
            weights[n] = noise ? attend_round(noise, w, noise->bits) : w;
        }
    }
}

/* Adds the squared sizes of the terms of dq, dk and dv. In ds, dout . v counts as |dout| |v|
   and delta as |dout| |out|, their upper bounds. */
static inline void attend_add_scales(attend_pass *s, const attend_block *queries, int64_t head,
                                     const attend_block *keys, const double *weights) {
    const attend *p = s->p;
    double **scale = s->to->scale, *out = s->to->x[ATTEND_OUT];
    for (int64_t i = 0; i < queries->count; i++) {
        int64_t at = (queries->begin + i) * p->heads + head;
        const double *dout = p->in[ATTEND_DOUT] + at * p->out_dim;
        const double *q = p->in[ATTEND_Q] + at * p->dim;
        double dd = attend_dot(dout, dout, p->out_dim), qq = attend_dot(q, q, p->dim);
        double oo = attend_dot(out + at * p->out_dim, out + at * p->out_dim, p->out_dim);
        double own = dd * s->w->scale * s->w->scale;
        for (int64_t j = 0; j < keys->count; j++) {
            double ww = weights[i * ATTEND_KEYS + j] * weights[i * ATTEND_KEYS + j];
            int64_t key = keys->begin + j, to = key * p->kv_heads + s->kv;
            scale[ATTEND_DQ][at] += own * ww * (s->vv[key] + oo) * s->kk[key];
            if (!scale[ATTEND_DK]) continue;
            scale[ATTEND_DK][to] += own * ww * (s->vv[key] + oo) * qq;
            scale[ATTEND_DV][to] += ww * dd;
        }
    }
}

/* Adds one pair of blocks to dq, dk and dv. Scores are recomputed: those of all pairs, kept
   from the forward pass, would take too much memory. */
static inline void attend_backward_pair(attend_pass *s, const attend_block *queries,
                                        int64_t head, const attend_block *keys) {
    const attend *p = s->p;
    int64_t n = queries->count, at = queries->begin * p->heads + head;
    double weights[ATTEND_QUERIES * ATTEND_KEYS], *x = s->dp;
    attend_matrix dout = {p->in[ATTEND_DOUT] + at * p->out_dim, p->heads * p->out_dim, 1};
    attend_matrix q = {p->in[ATTEND_Q] + at * p->dim, p->heads * p->dim, 1};
    attend_matrix v = {s->v_turned + keys->begin * p->out_dim, keys->count, 1};
    attend_matrix k = {s->k + keys->begin * p->dim, p->dim, 1};
    attend_matrix ds = {x, ATTEND_KEYS, 1}, ds_turned = {x, 1, ATTEND_KEYS};
    attend_matrix w_turned = {weights, 1, ATTEND_KEYS};
    int64_t to = keys->begin * p->kv_heads + s->kv;
    attend_scores(s, queries, head, keys, weights, ATTEND_KEYS, s->slope);
    memset(x, 0, ATTEND_QUERIES * ATTEND_KEYS * sizeof *x);
    attend_sum(s->noise, x, ATTEND_KEYS, dout, v, n, keys->count, p->out_dim);
    attend_slopes(s, queries, head, keys->count, weights, x);
    if (s->to->scale[ATTEND_DQ]) attend_add_scales(s, queries, head, keys, weights);
    attend_sum(s->noise, s->to->x[ATTEND_DQ] + at * p->dim, p->heads * p->dim, ds, k, n, p->dim,
               keys->count);
    if (!s->to->x[ATTEND_DK]) return;
    attend_sum(s->noise, s->to->x[ATTEND_DK] + to * p->dim, p->kv_heads * p->dim, ds_turned, q,
               keys->count, p->dim, n);
    attend_sum(s->noise, s->to->x[ATTEND_DV] + to * p->out_dim, p->kv_heads * p->out_dim,
               w_turned, dout, keys->count, p->out_dim, n);
}

static inline void attend_backward_block(attend_pass *s, const attend_block *queries,
                                         int64_t head) {
    for (int64_t b = 0; b < s->p->key.blocks; b++)
        if (attend_meet(s, queries, b))
            attend_backward_pair(s, queries, head, &s->p->key.block[b]);
}

/* ---- all heads ---- */

static inline int64_t attend_kv_of(const attend *p, const attend_way *w, int64_t head) {
    int64_t of_rank = p->heads / p->ranks; /* used only where the division is exact */
    switch (w->in_turn) {
    case IN_TURN: return head % p->kv_heads;
    case IN_TURN_BY_RANK: return head / of_rank % p->kv_heads;
    case FROM_0_ON_RANK: return head % of_rank / p->group;
    default: return head / p->group;
    }
}

static inline void attend_head(attend_pass *s, int64_t head, int64_t rank) {
    const attend *p = s->p;
    if (attend_kv_of(p, s->w, head) != s->kv) return;
    if (s->w->only_head >= 0 && head % p->group != s->w->only_head) return;
    for (int64_t b = 0; b < p->query.blocks; b++) {
        const attend_block *queries = &p->query.block[b];
        if (rank >= 0 && queries->rank != rank) continue;
        attend_block_sight(s, queries);
        if (s->lse)
            attend_backward_block(s, queries, head);
        else
            attend_forward_block(s, queries, head);
    }
}

/* One kv head. It has its own random numbers, so results do not depend on the threads. */
static inline int attend_run_kv(const attend_pass *all, int64_t kv, uint64_t state) {
    attend_pass s = *all;
    attend_noise noise;
    int status;
    if (all->noise) {
        noise = *all->noise;
        noise.state = state + (uint64_t)kv * UINT64_C(0xd1342543de82ef95);
        s.noise = &noise;
    }
    status = attend_pass_begin(&s);
    for (int64_t rank = s.w->own_kv ? 0 : -1; rank < (s.w->own_kv ? s.p->ranks : 0); rank++) {
        if (status) break;
        attend_pack(&s, kv, rank);
        for (int64_t h = 0; h < s.p->heads; h++) attend_head(&s, h, rank);
    }
    attend_pass_end(&s);
    return status;
}

#ifndef ATTEND_LARGE
#define ATTEND_LARGE 60000000 /* attend_work of about 30 ms */
#endif
static inline double attend_work(const attend *p) {
    return (double)p->query.count * (double)p->key.count * (double)(p->heads * p->dim);
}

static inline int attend_run(attend_pass *s) {
    uint64_t state = s->noise ? attend_random(&s->noise->state) : 0;
    int failed = 0, is_large = attend_work(s->p) > ATTEND_LARGE;
    (void)is_large;
    SEQPAR_VERIFY_THREADS
    for (int64_t kv = 0; kv < s->p->kv_heads; kv++) failed |= attend_run_kv(s, kv, state) != 0;
    return failed ? -1 : 0;
}

static inline void attend_forward_scales(const attend *p, attend_answer *to) {
    for (int64_t i = 0; i < attend_rows(p, ATTEND_OUT); i++) {
        const double *out = to->x[ATTEND_OUT] + i * p->out_dim;
        double squares = to->scale[ATTEND_OUT][i] + attend_dot(out, out, p->out_dim);
        to->scale[ATTEND_OUT][i] = sqrt(squares);
        to->scale[ATTEND_LSE][i] = 1 + fabs(to->top[i]);
    }
}

/* out, lse and top. 0, or -1: no memory. */
static inline int attend_forward(const attend *p, const attend_way *w, attend_noise *noise,
                                 attend_answer *to) {
    attend_pass s = {.p = p, .w = w, .noise = noise, .to = to};
    int status = attend_run(&s);
    bar_touch();
    if (!status && to->scale[ATTEND_OUT]) attend_forward_scales(p, to);
    return status;
}

/* Adds to dq, dk and dv, from lse and delta (queries, heads). */
static inline int attend_backward(const attend *p, const attend_way *w, attend_noise *noise,
                                  const double *lse, const double *delta, attend_answer *to) {
    attend_pass s = {.p = p, .w = w, .noise = noise, .to = to, .lse = lse, .delta = delta};
    int status = attend_run(&s);
    bar_touch();
    for (int t = ATTEND_DQ; !status && t < ATTEND_TENSORS; t++)
        for (int64_t i = 0; to->scale[t] && i < attend_rows(p, t); i++)
            to->scale[t][i] = sqrt(to->scale[t][i]);
    return status;
}

/* dout . out of each query and head */
static inline void attend_delta(const attend *p, const double *out, double *delta) {
    for (int64_t i = 0; i < attend_rows(p, ATTEND_OUT); i++)
        delta[i] = attend_dot(out + i * p->out_dim, p->in[ATTEND_DOUT] + i * p->out_dim,
                              p->out_dim);
}

static inline attend_way attend_right_way(const attend *p) {
    return (attend_way){
        .scale = p->scale, .softcap = p->softcap, .window = p->window, .only_head = -1};
}

/* Backward pass from the out and lse in `to`. */
static inline int attend_gradients(const attend *p, const attend_way *w, attend_answer *to,
                                   double *delta) {
    attend_answer_clear(to, p, ATTEND_DQ);
    attend_delta(p, to->x[ATTEND_OUT], delta);
    return attend_backward(p, w, NULL, to->x[ATTEND_LSE], delta, to);
}

/* Forward and, where there is dout, backward. */
static inline int attend_both(const attend *p, const attend_way *w, attend_answer *to,
                              double *delta) {
    if (attend_forward(p, w, NULL, to)) return -1;
    return p->backward ? attend_gradients(p, w, to, delta) : 0;
}
#endif
