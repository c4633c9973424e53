/* SPDX-License-Identifier: MIT OR Unlicense */
/* run_attention.h - operations on attention: forward, gradient, and merging of partial results.
 * Dense attention in fp64, one key-value head at a time. */
#ifndef ORACLE_RUN_ATTENTION_H
#define ORACLE_RUN_ATTENTION_H
#include "run.h"

/* Attention of one row. x: results in the order of dense_attention.h, each (tokens, heads or
   kv_heads, dim). */
typedef struct run_attend {
    run *r;
    attention a;
    double *x[ATTEND_TENSORS]; /* NULL: not wanted */
} run_attend;

static inline int run_attend_heads(const run_attend *w, int tensor) {
    return (int)w->a.shape[tensor < ATTEND_DK ? ATTEND_Q : ATTEND_K].heads;
}

static inline int64_t run_attend_dim(const run_attend *w, int tensor) {
    return tensor == ATTEND_LSE                          ? 1
           : tensor == ATTEND_OUT || tensor == ATTEND_DV ? w->a.shape[ATTEND_V].dim
                                                         : w->a.shape[ATTEND_Q].dim;
}

/* Copies the results of kv head `kv` and its query heads into w->x, at their tokens. */
static inline void run_attend_take(run_attend *w, const attend *p, const attend_answer *answer,
                                   int64_t kv) {
    for (int t = 0; t < ATTEND_TENSORS; t++) {
        const attend_side *side = t < ATTEND_DK ? &p->query : &p->key;
        int64_t per = t < ATTEND_DK ? p->group : 1, size = per * run_attend_dim(w, t);
        int64_t heads = run_attend_heads(w, t);
        for (int64_t i = 0; w->x[t] && i < side->count; i++)
            memcpy(w->x[t] + side->token[i] * heads * run_attend_dim(w, t) + kv * size,
                   answer->x[t] + i * size, (size_t)size * sizeof(double));
    }
}

static inline int run_attend_read(run_attend *w, attend *p, int gradient) {
    p->backward = gradient;
    for (int i = 0; i < ATTEND_INPUTS; i++) {
        if (i == ATTEND_DOUT && !gradient) continue;
        if (!(p->in[i] = attention_read(&w->a, p, i))) return -1;
    }
    if (attention_finite(p)) return 0;
    return attention_refuse(&w->a, w->a.dp * w->r->d.sp, ATTEND_Q,
                            "or k, v or dout of this micro-batch has NaN or Inf; dump a step "
                            "with finite values");
}

/* One kv head and the query heads that use it. 0, or -1 with the error. */
static inline int run_attend_head(run_attend *w, int64_t kv, int gradient) {
    attend p;
    attend_answer answer = {.top = NULL};
    double *delta = NULL;
    int status = attention_place_part(&w->a, &p, kv, 1, NULL) ||
                 run_attend_read(w, &p, gradient);
    if (!status) {
        attend_way way = attend_right_way(&p);
        delta = attend_zeros(attend_rows(&p, ATTEND_OUT));
        status = !delta || attend_answer_new(&answer, &p, 0) ||
                 attend_both(&p, &way, &answer, delta);
        if (status) attention_no_memory(&w->a);
    }
    if (!status) run_attend_take(w, &p, &answer, kv);
    attend_answer_free(&answer);
    attention_free(&p);
    free(delta);
    return status ? -1 : 0;
}

static inline int run_attend_alloc(run_attend *w, int gradient) {
    for (int t = gradient ? ATTEND_DQ : ATTEND_OUT; t < (gradient ? ATTEND_TENSORS : ATTEND_DQ);
         t++) {
        w->x[t] = attend_zeros(w->a.row->tokens * run_attend_heads(w, t) *
                               run_attend_dim(w, t));
        if (!w->x[t]) return attention_no_memory(&w->a);
    }
    return 0;
}

/* Finds the inputs and checks that their shapes agree. 0, or -1 with the error. */
static inline int run_attend_shapes(run_attend *w, int gradient) {
    for (int i = 0; i < (gradient ? ATTEND_INPUTS : ATTEND_DOUT); i++) {
        if (attention_find(&w->a, i)) return -1;
        if (w->a.shape[i].have) continue;
        return attention_refuse(&w->a, w->a.dp * w->r->d.sp, i,
                                "has no token of the sequence; dump a row with tokens");
    }
    return attention_agree(&w->a);
}

static inline int run_attend_put(run_attend *w) {
    int status = 0;
    for (int t = 0; !status && t < ATTEND_TENSORS; t++)
        if (w->x[t])
            status = run_put_row(
                w->r, w->a.row, w->a.dp, w->a.micro, attention_tensors[ATTEND_INPUTS + t].name,
                w->x[t], t == ATTEND_LSE ? 2 : 3, run_attend_heads(w, t), run_attend_dim(w, t));
    return status;
}

static inline int run_attend_row(run *r, int64_t n, int gradient) {
    run_attend *w = (run_attend *)calloc(1, sizeof *w); /* large */
    int status;
    if (!w) return run_no_memory(r);
    w->r = r;
    w->a.d = &r->d;
    w->a.row = &r->rows[n];
    w->a.dp = n / r->d.accumulation;
    w->a.micro = n % r->d.accumulation;
    status = run_attend_shapes(w, gradient) || run_attend_alloc(w, gradient);
    for (int64_t kv = 0; !status && kv < w->a.shape[ATTEND_K].heads; kv++)
        status = run_attend_head(w, kv, gradient);
    if (!status) status = run_attend_put(w);
    for (int t = 0; t < ATTEND_TENSORS; t++) free(w->x[t]);
    free(w);
    return status ? -1 : 0;
}

static inline int run_attention(run *r) {
    int status = 0;
    for (int64_t n = 0; !status && n < r->row_count; n++) status = run_attend_row(r, n, 0);
    return status;
}

static inline int run_attention_gradient(run *r) {
    int status = 0;
    for (int64_t n = 0; !status && n < r->row_count; n++) status = run_attend_row(r, n, 1);
    return status;
}

/* ---- merge ---- */

/* Partial results of one rank's attention: part_out (parts, n, heads, dim), part_lse (parts, n,
   heads), and the merged out and lse. */
typedef struct merging {
    int64_t parts, n, heads, dim;
    double *part_out, *part_lse, *out, *lse;
} merging;

static inline void merging_free(merging *m) {
    free(m->part_out);
    free(m->part_lse);
    free(m->out);
    free(m->lse);
}

/* Merges one query of one head; at: its index in lse. A part without a key has lse -Inf. */
static inline void merge_query(const merging *m, int64_t at) {
    int64_t queries = m->n * m->heads;
    double top = -INFINITY, sum = 0;
    for (int64_t p = 0; p < m->parts; p++) top = fmax(top, m->part_lse[p * queries + at]);
    m->lse[at] = top;
    if (top == -INFINITY) return; /* out stays 0 */
    for (int64_t p = 0; p < m->parts; p++) sum += exp(m->part_lse[p * queries + at] - top);
    m->lse[at] = top + log(sum);
    for (int64_t p = 0; p < m->parts; p++) {
        double weight = exp(m->part_lse[p * queries + at] - top) / sum;
        for (int64_t i = 0; weight > 0 && i < m->dim; i++)
            m->out[at * m->dim + i] += weight * m->part_out[(p * queries + at) * m->dim + i];
    }
}

static inline int merge_shapes(run *r, int64_t rank, const seqpar_safetensors_tensor *out,
                               const seqpar_safetensors_tensor *lse, merging *m) {
    int same = out->dims == 4 && lse->dims == 3;
    for (int i = 0; same && i < 3; i++) same = out->shape[i] == lse->shape[i];
    *m = (merging){out->shape[0], out->shape[1], out->shape[2], out->shape[3]};
    if (same && m->parts > 0) return 0;
    seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: tensors %s and %s have shapes that do not match; write (parts, n, "
                "heads, head_dim) and (parts, n, heads) with equal parts, n and heads",
                r->d.ranks[rank].path, out->name, lse->name);
    return -1;
}

static inline int merge_nan(run *r, int64_t rank, const seqpar_safetensors_tensor *lse,
                            const merging *m) {
    for (int64_t i = 0; i < lse->count; i++)
        if (isnan(m->part_lse[i]) || m->part_lse[i] == INFINITY) {
            seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                        "%.300s: tensor %s has %g at element %lld; write natural logarithms, "
                        "-Inf where a part has no key",
                        r->d.ranks[rank].path, lse->name, m->part_lse[i], (long long)i);
            return -1;
        }
    return 0;
}

static inline int merge_put(run *r, int64_t rank, int64_t micro, merging *m) {
    run_name name;
    seqpar_safetensors_tensor t = run_tensor_of(&name, micro, "out", 3, m->n, m->heads, m->dim);
    double *out = m->out, *lse = m->lse;
    m->out = m->lse = NULL; /* run_put frees them */
    if (run_put(r, rank, &t, out, 0)) return free(lse), -1;
    t = run_tensor_of(&name, micro, "lse", 2, m->n, m->heads, 1);
    return run_put(r, rank, &t, lse, 1);
}

static inline int merge_rank(run *r, int64_t rank, int64_t micro) {
    const seqpar_safetensors_tensor *out = dump_find(&r->d, rank, micro, "part_out");
    const seqpar_safetensors_tensor *lse = dump_find(&r->d, rank, micro, "part_lse");
    merging m = {.parts = 0};
    int status;
    if (!out && !lse) return 0; /* a rank without tokens */
    if (!out || !lse) {
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor %lld.%s is missing; write both of part_out and part_lse",
                    r->d.ranks[rank].path, (long long)micro, out ? "part_lse" : "part_out");
        return -1;
    }
    if (merge_shapes(r, rank, out, lse, &m)) return -1;
    m.part_out = dump_doubles(&r->d, rank, out);
    m.part_lse = m.part_out ? dump_doubles(&r->d, rank, lse) : NULL;
    m.out = attend_zeros(m.n * m.heads * m.dim);
    m.lse = attend_zeros(m.n * m.heads);
    status = !m.part_lse || merge_nan(r, rank, lse, &m);
    if (!status && (!m.out || !m.lse)) status = run_no_memory(r);
    for (int64_t i = 0; !status && i < m.n * m.heads; i++) merge_query(&m, i);
    if (!status) status = merge_put(r, rank, micro, &m);
    merging_free(&m);
    return status ? -1 : 0;
}

static inline int run_merge(run *r) {
    int status = 0;
    for (int64_t rank = 0; !status && rank < r->d.world; rank++)
        for (int64_t micro = 0; !status && micro < r->d.accumulation; micro++)
            status = merge_rank(r, rank, micro);
    return status;
}
#endif
