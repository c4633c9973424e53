/* SPDX-License-Identifier: MIT OR Unlicense */
/* reference_attention.h - the attention of the recomputed step (reference.h), one kv head with
 * its query heads at a time, by dense_attention.h. It also computes each mistake, in every form
 * seen in frameworks: a wrong mask, wrong keys, wrongly merged hops, a wrong backward pass. The
 * dump says which rank holds which token, so the same code serves all layouts, and ring,
 * all-gather and all-to-all alike. */
#ifndef ORACLE_REFERENCE_ATTENTION_H
#define ORACLE_REFERENCE_ATTENTION_H
#include "trainer/model/model_folder.h"
#include "oracle/verdict/checks.h"
#include "oracle/dump/param_ranges.h"
#include "oracle/loss/tokens.h"
#include "support/kept.h"

/* How the hops' partial outs are merged. */
typedef enum reference_merge {
    MERGE_RIGHT,
    MERGE_SUM_OVER_P,   /* the sum of outs over the number of ranks */
    MERGE_MEAN_OF_SEEN, /* the mean of the outs of hops that saw a key */
    MERGE_BY_TWOS,      /* (out + part) / 2, hop after hop */
    MERGE_SWAPPED,      /* the merged out and a hop's out have each other's weight */
    MERGE_UNSCALED      /* weighted by sums of exp, each relative to its hop's own maximum */
} reference_merge;

typedef enum reference_backward {
    BACKWARD_RIGHT,
    BACKWARD_DKV_STAYS,    /* dk, dv from the rank's own queries alone */
    BACKWARD_DKV_SHIFTED,  /* dk, dv of the next rank: the last hop, to the owner, is missing */
    BACKWARD_DQ_STAYS,     /* dq from the rank's own keys alone */
    BACKWARD_NO_DELTA,     /* out . dout is not subtracted */
    BACKWARD_DELTA_OF_HOP, /* each hop uses its own out */
    BACKWARD_BOTH_OF_HOP,  /* each hop uses its own out and lse */
    BACKWARD_LSE_OF_HOP,   /* each hop uses its own lse */
    BACKWARD_LSE_OF_LAST,  /* all hops use the lse of the query's last hop with a key */
    BACKWARD_OF_AVERAGE,   /* the gradient that autograd gives of MERGE_SUM_OVER_P */
    BACKWARD_SWAPPED,      /* dk and dv are swapped */
    BACKWARD_UNSCALED,     /* dq and dk lack the scale */
    BACKWARD_GROUP_MEAN,   /* dk, dv are means over the query heads of a group */
    BACKWARD_GROUP_FIRST   /* dk, dv are those of the group's first query head */
} reference_backward;

typedef enum reference_positions {
    POSITIONS_RIGHT,
    POSITIONS_RUN_ON,
    POSITIONS_LOCAL,
    POSITIONS_LOCAL_DOCUMENT /* the rank's own tokens of the document are counted */
} reference_positions;

enum { SCALE_RIGHT, SCALE_OF_DIM, SCALE_ONE };
enum { UNROTATED_KEYS = 1, UNROTATED_QUERIES = 2 };
enum { PASSES_BOTH, PASS_FORWARD, PASS_BACKWARD }; /* which pass is wrong */
enum { HEADS_RIGHT, HEADS_DEALT, HEADS_COLLECTED };
/* The row numbers that SEES_BY_LOCAL_ROW compares. OF_RANKS: both within their rank, as in a
   ring. OF_GATHERED_KEYS: the query's within its rank, the key's among all gathered keys.
   OF_ALL: both among the tokens of all ranks, as after an all-to-all of heads. */
enum { ROWS_OF_RANKS, ROWS_OF_GATHERED_KEYS, ROWS_OF_ALL };
enum { HOP_LAST = -1 };

/* How the step is computed: with a mistake, or correctly if all are 0. */
typedef struct reference_way {
    const char *name, *form; /* of the mistake; form NULL: the plain one */
    reference_positions positions;
    int sight, rows;  /* SEES_... of dense_attention.h, ROWS_... */
    attend_seen seen; /* which halves of ranks' keys are seen; NULL: both */
    int hop;          /* the lost hop; 0: none */
    int layout;       /* the layout that is assumed, TAKEN_... + 1; 0: the dump's */
    int own_kv, in_turn, scale, no_window, no_softcap;
    int unrotated;     /* UNROTATED_...: these lack the rotary embedding */
    int heads, tokens; /* out's order is wrong: HEADS_...; 1: its rows lie in rank order */
    reference_merge merge;
    reference_backward backward;
    int passes;
} reference_way;

/* Copies of layer 0's attention tensors: (tokens, heads or kv_heads, head_dim), lse
   (tokens, heads). */
typedef struct reference_tape {
    double *q, *k, *v, *out, *lse, *dout, *dq, *dk, *dv;
} reference_tape;

typedef struct reference {
    dump *d;
    seqpar_comm *comm;
    seqpar_device *device;
    seqpar_ctx ctx;
    seqpar_llama model;
    seqpar_llama adapters; /* of --adapter: names and offsets alone */
    double *adapter;       /* (adapters.elements) their values */
    seqpar_optim optim;
    int ctx_open, model_open, adapters_open, optim_open;
    int64_t count;
    dump_row *rows; /* (count) by replica, then by micro-batch */
    /* results of the last run */
    double **logp;    /* (count) by token; of RM, values */
    double *whole;    /* (model.elements) the gradient of all weights */
    double *gradient; /* of the trained tensors: whole, or (adapters.elements) */
    const reference_way *way;
    /* (count) by token, borrowed: minus its weight in the loss, which SFT's and PPO's terms
       (tokens.h) are made of; NULL: the loss has no terms */
    double *const *weights;
    double without[TERMS]; /* 1: the term is left out */
    int64_t row;           /* the row that is computed now */
    reference_tape *tapes; /* (count), or NULL: no copies are made */
    int64_t calls;         /* of attention in this pass */
    char head[80];         /* of RM: the head's name without .weight */
    int64_t untaught;      /* as in seqpar_llama_batch_desc */
} reference;

static inline int reference_no_memory(reference *f) {
    seqpar_fail(&f->d->error, SEQPAR_ERR_MEMORY, "no memory for the reference");
    return -1;
}

/* ---- numbers of the device ---- */

static inline double reference_number(const void *x, int64_t i, int type) {
    return type == SEQPAR_DTYPE_F64   ? ((const double *)x)[i]
           : type == SEQPAR_DTYPE_F32 ? (double)((const float *)x)[i]
                                      : (double)seqpar_bf16_to_float(((const uint16_t *)x)[i]);
}

static inline void reference_set(void *x, int64_t i, int type, double value) {
    if (type == SEQPAR_DTYPE_F64)
        ((double *)x)[i] = value;
    else
        ((float *)x)[i] = (float)value;
}

static inline double dot_product(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* ---- one kv head and its query heads ---- */

/* What all heads of a call share. */
typedef struct reference_call {
    const reference *f;
    const seqpar_attn_source *a;
    attend p;        /* the row; each head allocates its own arrays */
    int64_t *places; /* (tokens) where the assumed layout has them; NULL: no such mistake */
    int64_t *back;   /* (tokens) each token's row of out; NULL: row t is token t's */
    int wrong;       /* whether the way's mistake is in this pass */
    int status;
} reference_call;

typedef struct reference_head {
    const reference_call *c;
    attend p;
    attend_way way;
    attend_answer whole, part;
    double *lse, *delta; /* (queries, heads) */
    unsigned char *sees;
    int64_t kv;
} reference_head;

static inline int64_t query_head(const reference_head *h, int64_t g) {
    const seqpar_attn_source *a = h->c->a;
    return h->way.in_turn ? g * a->kv_heads + h->kv : h->kv * h->p.group + g;
}

/* The head of out that holds this query head's result. */
static inline int64_t out_head(const reference_head *h, int64_t head) {
    int64_t ranks = h->p.ranks, each = h->c->a->heads / ranks, how = h->c->f->way->heads;
    if (how == HEADS_RIGHT || !h->c->wrong || h->c->a->heads % ranks) return head;
    return how == HEADS_DEALT ? head % ranks * each + head / ranks
                              : head % each * ranks + head / each;
}

static inline int64_t out_token(const reference_head *h, int64_t token) {
    return h->c->back ? h->c->back[token] : token;
}

static inline void take_row(double *to, const void *from, int64_t at, int64_t n, int type) {
    for (int64_t i = 0; i < n; i++) to[i] = reference_number(from, at + i, type);
}

static inline int head_arrays(reference_head *h) {
    attend *p = &h->p;
    int64_t queries = p->query.count * p->heads, keys = p->key.count;
    int status = 0;
    p->in[ATTEND_Q] = attend_zeros(queries * p->dim);
    p->in[ATTEND_K] = attend_zeros(keys * p->dim);
    p->in[ATTEND_V] = attend_zeros(keys * p->dim);
    p->in[ATTEND_DOUT] = attend_zeros(queries * p->dim);
    h->lse = attend_zeros(queries);
    h->delta = attend_zeros(queries);
    h->sees = (unsigned char *)malloc((size_t)(2 * p->ranks * p->ranks));
    status = attend_answer_new(&h->whole, p, 0) | attend_answer_new(&h->part, p, 0);
    for (int i = 0; i < ATTEND_INPUTS; i++) status |= p->in[i] ? 0 : -1;
    return h->lse && h->delta && h->sees ? status : -1;
}

static inline void head_free(reference_head *h) {
    for (int i = 0; i < ATTEND_INPUTS; i++) free(h->p.in[i]);
    attend_answer_free(&h->whole);
    attend_answer_free(&h->part);
    free(h->lse);
    free(h->delta);
    free(h->sees);
}

/* Takes the rotary embedding off x (dim); grad 1: of its gradient, which is turned forwards. */
static inline void unrotate(const reference_head *h, double *x, int64_t token, int grad) {
    const seqpar_llama *m = &h->c->f->model;
    int64_t half = h->p.dim / 2, at = position_right(h->p.row, token) * half;
    int type = h->c->f->device->accumulator;
    for (int64_t i = 0; i < half; i++) {
        double c = reference_number(m->cosine.data, at + i, type);
        double s = reference_number(m->sine.data, at + i, type), size = c * c + s * s;
        double p = x[i], q = x[half + i];
        if (grad) s = -s;
        x[i] = (p * c + q * s) / size;
        x[half + i] = (q * c - p * s) / size;
    }
}

/* A mistake: keys or queries that nobody rotated. grad 1: turns the gradients of these into
   those of the rotated ones, which the model's backward pass takes. */
static inline void unrotate_all(const reference_head *h, int grad) {
    const attend *p = &h->p;
    int what = h->c->wrong ? h->c->f->way->unrotated : 0;
    double *k = grad ? h->whole.x[ATTEND_DK] : p->in[ATTEND_K];
    double *q = grad ? h->whole.x[ATTEND_DQ] : p->in[ATTEND_Q];
    for (int64_t j = 0; what & UNROTATED_KEYS && j < p->key.count; j++)
        unrotate(h, k + j * p->dim, p->key.token[j], grad);
    for (int64_t n = 0; what & UNROTATED_QUERIES && n < p->query.count * p->heads; n++)
        unrotate(h, q + n * p->dim, p->query.token[n / p->heads], grad);
}

/* Reads the head's q, k and v and, for the backward pass, dout, lse and delta, as doubles in
   the order of p's queries and keys. */
static inline void head_inputs(reference_head *h) {
    const seqpar_attn_source *a = h->c->a;
    attend *p = &h->p;
    int storage = h->c->f->device->storage, sums = h->c->f->device->accumulator;
    int64_t d = p->dim;
    for (int64_t j = 0; j < p->key.count; j++) {
        int64_t t = p->key.token[j];
        take_row(p->in[ATTEND_K] + j * d, a->k, t * a->k_stride + h->kv * d, d, storage);
        take_row(p->in[ATTEND_V] + j * d, a->v, t * a->v_stride + h->kv * d, d, storage);
    }
    for (int64_t n = 0; n < p->query.count * p->heads; n++) {
        int64_t t = p->query.token[n / p->heads], head = query_head(h, n % p->heads);
        int64_t row = out_token(h, t), slot = out_head(h, head);
        take_row(p->in[ATTEND_Q] + n * d, a->q, t * a->q_stride + head * d, d, storage);
        if (!p->backward) continue;
        take_row(p->in[ATTEND_DOUT] + n * d, a->dout, row * a->dout_stride + slot * d, d,
                 storage);
        h->lse[n] = reference_number(a->lse, row * a->lse_stride + slot, sums);
        h->delta[n] = reference_number(a->delta, row * a->lse_stride + slot, sums);
    }
    unrotate_all(h, 0);
}

/* ---- who sees whom ---- */

static inline int64_t hop_from(const attend *p, int64_t rank, int64_t source) {
    return (rank - source + p->ranks) % p->ranks;
}

/* Every rank sees all keys but those of `hop`, or with `alone` those of `hop` only. */
static inline void see_hops(const attend *p, unsigned char *sees, int64_t hop, int alone) {
    for (int64_t n = 0; n < 2 * p->ranks * p->ranks; n++)
        sees[n] = (hop_from(p, n / p->ranks / 2, n % p->ranks) == hop) == alone ? 3 : 0;
}

static inline void way_sights(reference_head *h) {
    const reference_way *w = h->c->f->way;
    const attend *p = &h->p;
    h->way = attend_right_way(p);
    if (!h->c->wrong) return;
    h->way.sight = w->sight;
    if (w->rows) h->way.key_rows = p->row->gathered;
    if (w->rows == ROWS_OF_ALL) h->way.query_rows = p->row->gathered;
    h->way.own_kv = w->own_kv;
    h->way.in_turn = w->in_turn;
    h->way.places = h->c->places;
    if (w->no_window) h->way.window = 0;
    if (w->no_softcap) h->way.softcap = 0;
    if (w->scale) h->way.scale = w->scale == SCALE_ONE ? 1 : 1 / sqrt((double)p->dim);
    if (w->seen || w->hop) h->way.sees = h->sees;
    if (w->hop) see_hops(p, h->sees, w->hop == HOP_LAST ? p->ranks - 1 : w->hop, 0);
    for (int64_t n = 0; w->seen && n < 2 * p->ranks * p->ranks; n++)
        h->sees[n] = w->seen(n / p->ranks % 2, n / p->ranks / 2, n % p->ranks);
}

/* One hop's out and lse, to h->part. *w: the way that sees this hop's keys alone. */
static inline int one_hop(reference_head *h, attend_way *w, int64_t hop) {
    *w = h->way;
    w->sees = h->sees;
    see_hops(&h->p, h->sees, hop, 1);
    return attend_forward(&h->p, w, NULL, &h->part);
}

/* ---- forward ---- */

static inline void merge_one(reference_head *h, reference_merge merge, int64_t n, double *met) {
    int64_t d = h->p.out_dim;
    double lse = h->part.x[ATTEND_LSE][n];
    double weight = merge == MERGE_UNSCALED  ? exp(lse - h->part.top[n])
                    : merge == MERGE_SWAPPED ? exp(lse - h->whole.x[ATTEND_LSE][n])
                                             : 1;
    double sum = *met + weight;
    double *out = h->whole.x[ATTEND_OUT] + n * d, *part = h->part.x[ATTEND_OUT] + n * d;
    if (lse == -INFINITY) return;
    for (int64_t i = 0; i < d; i++)
        if (merge == MERGE_BY_TWOS)
            out[i] = *met > 0 ? (out[i] + part[i]) / 2 : part[i];
        else if (merge == MERGE_SWAPPED)
            out[i] = *met > 0 ? (weight * out[i] + *met * part[i]) / sum : part[i];
        else
            out[i] += weight * part[i];
    *met = sum;
}

/* Merges all hops' outs wrongly, to h->whole; lse stays right. */
static inline int merge_hops(reference_head *h, reference_merge merge) {
    int64_t rows = attend_rows(&h->p, ATTEND_OUT), d = h->p.out_dim;
    double *met = attend_zeros(rows);
    attend_way w;
    int status = met ? attend_forward(&h->p, &h->way, NULL, &h->whole) : -1;
    memset(h->whole.x[ATTEND_OUT], 0, (size_t)(rows * d) * sizeof(double));
    for (int64_t hop = 0; !status && hop < h->p.ranks; hop++) {
        status = one_hop(h, &w, hop);
        for (int64_t n = 0; !status && n < rows; n++) merge_one(h, merge, n, &met[n]);
    }
    int is_merged = merge == MERGE_BY_TWOS || merge == MERGE_SWAPPED;
    for (int64_t i = 0; !status && !is_merged && i < rows * d; i++)
        h->whole.x[ATTEND_OUT][i] /= merge == MERGE_SUM_OVER_P ? (double)h->p.ranks
                                     : met[i / d] > 0          ? met[i / d]
                                                               : 1;
    free(met);
    return status;
}

static inline void give_out(const reference_head *h, void *out, void *lse) {
    const seqpar_attn_source *a = h->c->a;
    int64_t d = h->p.out_dim;
    int sums = h->c->f->device->accumulator;
    for (int64_t n = 0; n < attend_rows(&h->p, ATTEND_OUT); n++) {
        int64_t row = out_token(h, h->p.query.token[n / h->p.heads]);
        int64_t slot = row * a->heads + out_head(h, query_head(h, n % h->p.heads));
        for (int64_t i = 0; i < d; i++)
            reference_set(out, slot * d + i, sums, h->whole.x[ATTEND_OUT][n * d + i]);
        reference_set(lse, slot, sums, h->whole.x[ATTEND_LSE][n]);
    }
}

static inline int head_forward(reference_head *h, void *out, void *lse) {
    reference_merge merge = h->c->wrong ? h->c->f->way->merge : MERGE_RIGHT;
    int status = merge && h->p.ranks > 1 ? merge_hops(h, merge)
                                         : attend_forward(&h->p, &h->way, NULL, &h->whole);
    if (!status) give_out(h, out, lse);
    return status;
}

/* ---- backward ---- */

/* The backward pass hop by hop: over the hop's keys, with the hop's own lse or delta. */
static inline int backward_by_hops(reference_head *h, reference_backward how) {
    int64_t rows = attend_rows(&h->p, ATTEND_LSE);
    double *delta = attend_zeros(rows), *lse = attend_zeros(rows);
    int status = delta && lse ? 0 : -1;
    for (int64_t hop = 0; !status && hop < h->p.ranks; hop++) {
        attend_way w;
        if ((status = one_hop(h, &w, hop)) != 0) break;
        attend_delta(&h->p, h->part.x[ATTEND_OUT], delta);
        for (int64_t n = 0; n < rows; n++) {
            lse[n] = how == BACKWARD_DELTA_OF_HOP ? h->lse[n] : h->part.x[ATTEND_LSE][n];
            if (how == BACKWARD_OF_AVERAGE) lse[n] += log((double)h->p.ranks);
            if (how == BACKWARD_LSE_OF_HOP) delta[n] = h->delta[n];
        }
        status = attend_backward(&h->p, &w, NULL, lse, delta, &h->whole);
    }
    free(delta);
    free(lse);
    return status;
}

static inline int backward_lse_of_last(reference_head *h) {
    int64_t rows = attend_rows(&h->p, ATTEND_LSE);
    for (int64_t hop = 0; hop < h->p.ranks; hop++) {
        attend_way w;
        if (one_hop(h, &w, hop)) return -1;
        for (int64_t n = 0; n < rows; n++)
            if (h->part.x[ATTEND_LSE][n] > -INFINITY) h->lse[n] = h->part.x[ATTEND_LSE][n];
    }
    return attend_backward(&h->p, &h->way, NULL, h->lse, h->delta, &h->whole);
}

/* Replaces dk and dv (of_keys), or dq, by those of a pass over each rank's own keys alone. */
static inline int backward_stays(reference_head *h, int of_keys) {
    attend_way w = h->way;
    w.sees = h->sees;
    see_hops(&h->p, h->sees, 0, 1);
    attend_answer_clear(&h->part, &h->p, ATTEND_DQ);
    if (attend_backward(&h->p, &w, NULL, h->lse, h->delta, &h->part)) return -1;
    for (int t = ATTEND_DQ; t < ATTEND_TENSORS; t++) {
        double *own = h->part.x[t];
        if ((t != ATTEND_DQ) != of_keys) continue;
        h->part.x[t] = h->whole.x[t];
        h->whole.x[t] = own;
    }
    return 0;
}

static inline void backward_shift(reference_head *h) {
    const attend *p = &h->p;
    size_t bytes = (size_t)p->dim * sizeof(double);
    for (int t = ATTEND_DK; t <= ATTEND_DV; t++) {
        double *from = h->whole.x[t], *to = h->part.x[t];
        for (int64_t j = 0; j < p->key.count; j++) {
            int64_t token = p->key.token[j], rank = p->row->rank[token] - p->first_rank;
            int64_t row = attend_own_row(p, (rank + 1) % p->ranks,
                                         (int32_t)p->row->local[token]);
            memcpy(to + j * p->dim, from + (row < 0 ? j : row) * p->dim, bytes);
        }
        h->part.x[t] = from;
        h->whole.x[t] = to;
    }
}

static inline void multiply(double *x, int64_t n, double factor) {
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

/* Turns the right gradients, in h->whole, into wrong ones. */
static inline int backward_turn(reference_head *h, reference_backward how) {
    double *dk = h->whole.x[ATTEND_DK];
    int64_t keys = h->p.key.count * h->p.dim, queries = attend_rows(&h->p, ATTEND_DQ);
    if (how == BACKWARD_DKV_STAYS || how == BACKWARD_DQ_STAYS)
        return backward_stays(h, how == BACKWARD_DKV_STAYS);
    if (how == BACKWARD_DKV_SHIFTED) backward_shift(h);
    if (how == BACKWARD_SWAPPED) {
        h->whole.x[ATTEND_DK] = h->whole.x[ATTEND_DV];
        h->whole.x[ATTEND_DV] = dk;
    }
    if (how == BACKWARD_UNSCALED) {
        multiply(h->whole.x[ATTEND_DQ], queries * h->p.dim, 1 / h->p.scale);
        multiply(dk, keys, 1 / h->p.scale);
    }
    if (how == BACKWARD_GROUP_MEAN) {
        multiply(dk, keys, 1 / (double)h->p.group);
        multiply(h->whole.x[ATTEND_DV], keys, 1 / (double)h->p.group);
    }
    return 0;
}

/* dk and dv of the group's first query head, dq of all. */
static inline int backward_of_first(reference_head *h) {
    attend_way w = h->way;
    double *dq = h->whole.x[ATTEND_DQ];
    w.only_head = 0;
    if (attend_backward(&h->p, &h->way, NULL, h->lse, h->delta, &h->whole)) return -1;
    h->whole.x[ATTEND_DQ] = h->part.x[ATTEND_DQ];
    h->part.x[ATTEND_DQ] = dq;
    attend_answer_clear(&h->whole, &h->p, ATTEND_DQ);
    if (attend_backward(&h->p, &w, NULL, h->lse, h->delta, &h->whole)) return -1;
    h->part.x[ATTEND_DQ] = h->whole.x[ATTEND_DQ];
    h->whole.x[ATTEND_DQ] = dq;
    return 0;
}

static inline int run_backward(reference_head *h) {
    reference_backward how = h->c->f->way->backward;
    int64_t rows = attend_rows(&h->p, ATTEND_LSE);
    if (how == BACKWARD_NO_DELTA) memset(h->delta, 0, (size_t)rows * sizeof *h->delta);
    if (how == BACKWARD_LSE_OF_LAST) return backward_lse_of_last(h);
    if (how == BACKWARD_GROUP_FIRST) return backward_of_first(h);
    if (how >= BACKWARD_DELTA_OF_HOP && how <= BACKWARD_OF_AVERAGE)
        return backward_by_hops(h, how);
    if (attend_backward(&h->p, &h->way, NULL, h->lse, h->delta, &h->whole)) return -1;
    return backward_turn(h, how);
}

static inline void give_gradients(const reference_head *h, void *dq, void *dk, void *dv) {
    const seqpar_attn_source *a = h->c->a;
    int64_t d = h->p.dim;
    int sums = h->c->f->device->accumulator;
    for (int64_t n = 0; n < attend_rows(&h->p, ATTEND_DQ); n++) {
        int64_t t = h->p.query.token[n / h->p.heads];
        int64_t at = (t * a->heads + query_head(h, n % h->p.heads)) * d;
        for (int64_t i = 0; i < d; i++)
            reference_set(dq, at + i, sums, h->whole.x[ATTEND_DQ][n * d + i]);
    }
    for (int64_t n = 0; n < h->p.key.count * d; n++) {
        int64_t at = (h->p.key.token[n / d] * a->kv_heads + h->kv) * d + n % d;
        reference_set(dk, at, sums, h->whole.x[ATTEND_DK][n]);
        reference_set(dv, at, sums, h->whole.x[ATTEND_DV][n]);
    }
}

/* ---- all heads ---- */

/* Sets c->places if the mistake is an assumed layout that can split this row. 0, or -1: no
   memory. */
static inline int call_layout(reference_call *c) {
    const attend *p = &c->p;
    int layout = c->f->way->layout - 1;
    if (!c->wrong || layout < 0 || !attend_may_be_taken(p, layout)) return 0;
    if (!(c->places = (int64_t *)calloc((size_t)p->row->tokens + 1, sizeof *c->places)))
        return -1;
    for (int64_t t = 0; t < p->end; t++) {
        int64_t rank = p->row->rank[t] - p->first_rank, local = p->row->local[t];
        c->places[t] = layout < TAKEN_CONTIGUOUS_EACH
                           ? attend_taken(layout, rank, p->ranks, p->held[rank], local)
                           : attend_taken_each(p, layout - TAKEN_CONTIGUOUS_EACH, rank, local);
    }
    return 0;
}

/* Sets c->back if the mistake is that out has its rows in rank order. 0, or -1: no memory. */
static inline int call_order(reference_call *c) {
    int64_t n = 0;
    if (!c->wrong || !c->f->way->tokens) return 0;
    c->back = (int64_t *)calloc((size_t)c->p.row->tokens + 1, sizeof *c->back);
    if (!c->back) return -1;
    for (; n < c->p.query.count; n++) c->back[c->p.query.token[n]] = n;
    return 0;
}

/* seqpar.h runs on one rank here: the sequence's ranks, documents and options are the dump's.
   The window is the model's if only some of its layers have one. 0, or not 0: no memory. */
static inline int call_begin(reference_call *c, const reference *f, const seqpar_attn_source *a,
                             int backward) {
    const dump_row *row = &f->rows[f->row];
    const dump_facts *facts = &f->d->facts;
    attend *p = &c->p;
    *c = (reference_call){.f = f, .a = a};
    c->wrong = f->way->passes == PASSES_BOTH ||
               (f->way->passes == PASS_BACKWARD) == (backward != 0);
    *p = (attend){.row = row,
                  .end = row_end(row),
                  .ranks = f->d->sp,
                  .first_rank = f->row / f->d->accumulation * f->d->sp,
                  .kv_heads = 1,
                  .group = a->heads / a->kv_heads,
                  .dim = a->head_dim,
                  .out_dim = a->head_dim,
                  .backward = backward,
                  .scale = facts->softmax_scale > 0 ? facts->softmax_scale : a->scale,
                  .softcap = facts->softcap,
                  .window = f->model.config.window_from ? a->window : facts->window};
    p->heads = p->group;
    p->held = (int64_t *)calloc((size_t)p->ranks, sizeof *p->held);
    for (int64_t t = 0; p->held && t < row->tokens; t++)
        p->held[row->rank[t] - p->first_rank]++;
    if (!p->held || attention_side(p, &p->query, ATTEND_QUERIES, NULL)) return -1;
    return attention_side(p, &p->key, ATTEND_KEYS, NULL) || call_layout(c) || call_order(c);
}

static inline void call_end(reference_call *c) {
    free(c->places);
    free(c->back);
    free(c->p.held);
    free(c->p.query.token);
    free(c->p.query.block);
    free(c->p.key.token);
    free(c->p.key.block);
}

static inline int head_begin(reference_head *h, const reference_call *c, int64_t kv) {
    *h = (reference_head){.c = c, .p = c->p, .kv = kv};
    if (head_arrays(h)) return -1;
    way_sights(h);
    head_inputs(h);
    return 0;
}

static inline int one_head(const reference_call *c, int64_t kv, void *const *to) {
    reference_head h;
    int status = head_begin(&h, c, kv);
    if (!status) status = c->p.backward ? run_backward(&h) : head_forward(&h, to[0], to[1]);
    if (!status && c->p.backward) unrotate_all(&h, 1);
    if (!status && c->p.backward) give_gradients(&h, to[0], to[1], to[2]);
    head_free(&h);
    return status;
}

static inline int all_heads(const reference *f, const seqpar_attn_source *a, int backward,
                            void *const *to) {
    reference_call c;
    int status = call_begin(&c, f, a, backward) ? -1 : 0;
    double work = (double)a->q_tokens * (double)a->q_tokens * (double)(a->heads * a->head_dim);
    /* starting and joining threads costs more than a small call takes */
#pragma omp parallel for schedule(dynamic) reduction(| : status) if (work > ATTEND_LARGE)
    for (int64_t kv = 0; kv < a->kv_heads; kv++)
        if (!status) status |= one_head(&c, kv, to) ? 1 : 0;
    call_end(&c);
    return status;
}

/* ---- copies of layer 0 ---- */

/* A copy of `rows` rows, `width` elements each, `stride` apart; NULL: no memory. */
static inline void keep(double **to, const void *from, int64_t rows, int64_t width,
                        int64_t stride, int type) {
    double *copy = (double *)malloc(((size_t)(rows * width) + 1) * sizeof *copy);
    for (int64_t i = 0; copy && i < rows * width; i++)
        copy[i] = reference_number(from, i / width * stride + i % width, type);
    free(*to);
    *to = copy;
}

static inline void keep_forward(const reference *f, const seqpar_attn_source *a,
                                const void *out, const void *lse) {
    reference_tape *tape = &f->tapes[f->row];
    int64_t n = a->q_tokens, wide = a->heads * a->head_dim, kv = a->kv_heads * a->head_dim;
    int storage = f->device->storage, sums = f->device->accumulator;
    keep(&tape->q, a->q, n, wide, a->q_stride, storage);
    keep(&tape->k, a->k, n, kv, a->k_stride, storage);
    keep(&tape->v, a->v, n, kv, a->v_stride, storage);
    keep(&tape->out, out, n, wide, wide, sums);
    keep(&tape->lse, lse, n, a->heads, a->heads, sums);
}

static inline void keep_backward(const reference *f, const seqpar_attn_source *a,
                                 const void *dq, const void *dk, const void *dv) {
    reference_tape *tape = &f->tapes[f->row];
    int64_t n = a->q_tokens, wide = a->heads * a->head_dim, kv = a->kv_heads * a->head_dim;
    int sums = f->device->accumulator;
    keep(&tape->dout, a->dout, n, wide, a->dout_stride, f->device->storage);
    keep(&tape->dq, dq, n, wide, wide, sums);
    keep(&tape->dk, dk, n, kv, kv, sums);
    keep(&tape->dv, dv, n, kv, kv, sums);
}

static inline void tape_free(reference_tape *t) {
    double *all[] = {t->q, t->k, t->v, t->out, t->lse, t->dout, t->dq, t->dk, t->dv};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* The functions of seqpar_attn_kernel. The batch is one row on one rank, so each call's source
   has all keys. They fail for want of memory alone, of which seqpar.h would not know. */
static inline int reference_forward(void *user, const seqpar_attn_source *a, void *out,
                                    void *lse, void *queue) {
    reference *f = (reference *)user;
    void *const to[] = {out, lse};
    int status = all_heads(f, a, 0, to);
    if (status) reference_no_memory(f);
    if (!status && f->tapes && !f->calls++) keep_forward(f, a, out, lse);
    return (void)queue, status;
}

static inline int reference_gradients(void *user, const seqpar_attn_source *a, void *dq,
                                      void *dk, void *dv, void *queue) {
    reference *f = (reference *)user;
    void *const to[] = {dq, dk, dv};
    int status = all_heads(f, a, 1, to);
    if (status) reference_no_memory(f);
    if (!status && f->tapes) keep_backward(f, a, dq, dk, dv); /* layer 0 is last: it stays */
    return (void)queue, status;
}
#endif
