/* SPDX-License-Identifier: MIT OR Unlicense */
/* A user's attention kernel for seqpar_attn_desc.kernel: this rank's queries against the keys
   of one source, pair by pair in double. It can fail on purpose. */
#ifndef OWN_ATTENTION_H
#define OWN_ATTENTION_H
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "seqpar.h"

typedef struct own_attention {
    int storage, sums; /* types: of q, k, v; of out, lse and gradients */
    int harm, calls;   /* STEP_..; counted */
} own_attention;

enum { STEP_FAILS = 1, STEP_FAILS_BACKWARD, STEP_NAN, STEP_INFINITE };

static double typed(const void *x, int64_t i, int type) {
    return type == SEQPAR_DTYPE_F64   ? ((const double *)x)[i]
           : type == SEQPAR_DTYPE_F32 ? (double)((const float *)x)[i]
                                      : (double)seqpar_bf16_to_float(((const uint16_t *)x)[i]);
}

static void typed_set(void *x, int64_t i, int type, double value) {
    if (type == SEQPAR_DTYPE_F64)
        ((double *)x)[i] = value;
    else
        ((float *)x)[i] = (float)value;
}

static double typed_dot(const void *a, int64_t at, const void *b, int64_t from, int64_t d,
                        int type) {
    double sum = 0;
    for (int64_t i = 0; i < d; i++) sum += typed(a, at + i, type) * typed(b, from + i, type);
    return sum;
}

/* One query and key of a head, and the sums that their results are added to. */
typedef struct own_pair {
    const own_attention *own;
    const seqpar_attn_source *a;
    int64_t head, kv, query, key; /* query and key: rows */
    double score, slope;
    double *sum, *total; /* forward: of out; of exp */
    double *dq, *dk, *dv;
} own_pair;

/* Calls `pair` for every (query, key) that a head's queries see. */
static void each_pair(own_pair *p, void (*pair)(own_pair *p)) {
    const seqpar_attn_source *a = p->a;
    int64_t d = a->head_dim;
    for (int64_t i = 0; i < a->q_piece_count; i++)
        for (int64_t j = 0; j < a->k_piece_count; j++) {
            const seqpar_piece *q = &a->q_pieces[i], *k = &a->k_pieces[j];
            for (int64_t n = 0; q->row == k->row && n < q->count * k->count; n++) {
                int64_t at = k->start + n % k->count * k->stride;
                double s;
                p->query = q->local + n / k->count;
                p->key = k->local + n % k->count;
                if (at < a->visible_begin[p->query] || at >= a->visible_end[p->query]) continue;
                s = a->scale * typed_dot(a->q, p->query * a->q_stride + p->head * d, a->k,
                                         p->key * a->k_stride + p->kv * d, d, p->own->storage);
                p->score = a->softcap > 0 ? a->softcap * tanh(s / a->softcap) : s;
                p->slope = a->softcap > 0 ? 1 - p->score / a->softcap * (p->score / a->softcap)
                                          : 1;
                pair(p);
            }
        }
}

static void pair_forward(own_pair *p) {
    double e = exp(p->score);
    p->total[p->query] += e;
    for (int64_t i = 0; i < p->a->head_dim; i++)
        p->sum[p->query * p->a->head_dim + i] +=
            e * typed(p->a->v, p->key * p->a->v_stride + p->kv * p->a->head_dim + i,
                      p->own->storage);
}

static void pair_backward(own_pair *p) {
    const seqpar_attn_source *a = p->a;
    int64_t d = a->head_dim, at = p->query * a->lse_stride + p->head, type = p->own->storage;
    int64_t q = p->query * a->q_stride + p->head * d, k = p->key * a->k_stride + p->kv * d;
    int64_t v = p->key * a->v_stride + p->kv * d, o = p->query * a->dout_stride + p->head * d;
    double w = exp(p->score - typed(a->lse, at, p->own->sums));
    double dw = typed_dot(a->dout, o, a->v, v, d, (int)type) -
                typed(a->delta, at, p->own->sums);
    for (int64_t i = 0; i < d; i++) {
        double ds = w * dw * p->slope * a->scale;
        p->dq[(p->query * a->heads + p->head) * d + i] += ds * typed(a->k, k + i, (int)type);
        p->dk[(p->key * a->kv_heads + p->kv) * d + i] += ds * typed(a->q, q + i, (int)type);
        p->dv[(p->key * a->kv_heads + p->kv) * d + i] += w * typed(a->dout, o + i, (int)type);
    }
}

static int step_forward(void *user, const seqpar_attn_source *a, void *out, void *lse,
                        void *queue) {
    own_attention *own = user;
    int64_t d = a->head_dim;
    double *sum = calloc((size_t)(a->q_tokens * (d + 1) + 1), sizeof *sum);
    (void)queue;
    __atomic_fetch_add(&own->calls, 1, __ATOMIC_SEQ_CST);
    for (int64_t h = 0; h < a->heads; h++) {
        own_pair p = {.own = own,
                      .a = a,
                      .head = h,
                      .kv = h / (a->heads / a->kv_heads),
                      .sum = sum,
                      .total = sum + a->q_tokens * d};
        memset(sum, 0, (size_t)(a->q_tokens * (d + 1)) * sizeof *sum);
        each_pair(&p, pair_forward);
        for (int64_t t = 0; t < a->q_tokens; t++) {
            typed_set(lse, t * a->heads + h, own->sums, log(p.total[t]));
            for (int64_t i = 0; i < d; i++) /* of a query that sees nothing it is a NaN */
                typed_set(out, (t * a->heads + h) * d + i, own->sums,
                          sum[t * d + i] / p.total[t]);
        }
    }
    free(sum);
    if (own->harm >= STEP_NAN && a->source == 1)
        typed_set(lse, 0, own->sums, own->harm == STEP_NAN ? NAN : HUGE_VAL);
    return own->harm == STEP_FAILS && a->source == 1 ? 77 : 0;
}

static int step_backward(void *user, const seqpar_attn_source *a, void *dq, void *dk, void *dv,
                         void *queue) {
    own_attention *own = user;
    int64_t wide = a->q_tokens * a->heads * a->head_dim;
    int64_t narrow = a->k_tokens * a->kv_heads * a->head_dim;
    double *x = calloc((size_t)(wide + 2 * narrow + 1), sizeof *x);
    (void)queue;
    for (int64_t h = 0; h < a->heads; h++) {
        own_pair p = {.own = own,
                      .a = a,
                      .head = h,
                      .kv = h / (a->heads / a->kv_heads),
                      .dq = x,
                      .dk = x + wide,
                      .dv = x + wide + narrow};
        each_pair(&p, pair_backward);
    }
    for (int64_t i = 0; i < wide; i++) typed_set(dq, i, own->sums, x[i]);
    for (int64_t i = 0; i < narrow; i++) typed_set(dk, i, own->sums, x[wide + i]);
    for (int64_t i = 0; i < narrow; i++) typed_set(dv, i, own->sums, x[wide + narrow + i]);
    free(x);
    return own->harm == STEP_FAILS_BACKWARD && a->source == 1 ? 78 : 0;
}
#endif
