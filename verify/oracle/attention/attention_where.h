/* SPDX-License-Identifier: MIT OR Unlicense */
/* attention_where.h - what the wrong rows of a tensor have in common: heads, ranks, documents,
 * halves of ranks, ranks that they see or are seen by. For errors of no known mistake. */
#ifndef ORACLE_ATTENTION_WHERE_H
#define ORACLE_ATTENTION_WHERE_H
#include <stdarg.h>
#include "dense_attention.h"

#ifndef WHERE_RANKS
#define WHERE_RANKS 64 /* bits of a mask */
#endif
enum { WHERE_RUNS = 3 }; /* at most so many runs are listed */
#ifndef WHERE_PAIRS
#define WHERE_PAIRS 4e9 /* pairs of query and key: no masks for more */
#endif

/* Of the rows or tokens with one property: how many are wrong, and how many there are. */
typedef struct attend_tally {
    int64_t off, all;
} attend_tally;

typedef struct attend_where_rows {
    const attend *p;
    const attend_side *side;
    const unsigned char *off; /* (rows) */
    int64_t heads, per;       /* rows per token; rows per token and loaded kv head */
    int64_t count;            /* wrong rows */
    int keys;                 /* 1: a row belongs to a key (dk, dv); 0: to a query */
    char *text;
    size_t size;
} attend_where_rows;

/* Nothing is added where the text is full. */
static inline void attend_append(attend_where_rows *w, const char *format, ...) {
    size_t used = strlen(w->text);
    va_list list;
    va_start(list, format);
    vsnprintf(w->text + used, w->size - used, format, list);
    va_end(list);
}

static inline int64_t attend_rank_of(const attend *p, int64_t token) {
    return p->row->rank[token] - p->first_rank;
}

static inline int64_t attend_document_of(const attend *p, int64_t token) {
    int64_t d = 0, high = p->row->docs - 1;
    while (d < high) {
        int64_t mid = (d + high) / 2;
        if (p->row->cu_seqlens[mid + 1] <= token)
            d = mid + 1;
        else
            high = mid;
    }
    return d;
}

/* ---- runs of numbers ---- */

/* Appends "; only heads 4..7 9" if some heads have no wrong row, and those with wrong rows form
   at most WHERE_RUNS runs. number: numbers to print; NULL: the indices. */
static inline void attend_say_runs(attend_where_rows *w, const attend_tally *t, int64_t n,
                                   const char *what, const int64_t *number) {
    int64_t runs = 0, clean = 0, end = 0;
    int said = 0;
    for (int64_t i = 0; i < n; i++) {
        runs += t[i].off && (!i || !t[i - 1].off);
        clean += t[i].all && !t[i].off;
    }
    if (!clean || runs > WHERE_RUNS) return;
    attend_append(w, "; only %s", what);
    for (int64_t i = 0; i < n; i = end) {
        end = i + 1;
        if (!t[i].off) continue;
        while (end < n && t[end].off) end++;
        attend_append(w, said++ ? ", %lld" : " %lld", (long long)(number ? number[i] : i));
        if (end > i + 1)
            attend_append(w, "..%lld", (long long)(number ? number[end - 1] : end - 1));
    }
}

static inline void attend_where_heads(attend_where_rows *w) {
    attend_tally *t = (attend_tally *)calloc((size_t)w->heads, sizeof *t);
    int64_t *number = (int64_t *)calloc((size_t)w->heads, sizeof *number);
    for (int64_t i = 0; t && i < w->side->count * w->heads; i++) {
        t[i % w->heads].all++;
        t[i % w->heads].off += w->off[i];
    }
    for (int64_t h = 0; number && h < w->heads; h++)
        number[h] = w->p->kv_head[h / w->per] * w->per + h % w->per;
    if (t && number) attend_say_runs(w, t, w->heads, w->keys ? "kv heads" : "heads", number);
    free(t);
    free(number);
}

/* ---- tokens by ranks, documents, halves ---- */

/* How many rows of a token are wrong. */
static inline int64_t attend_token_off(const attend_where_rows *w, int64_t i) {
    int64_t off = 0;
    for (int64_t h = 0; h < w->heads; h++) off += w->off[i * w->heads + h];
    return off;
}

typedef int64_t (*attend_property)(const attend *p, int64_t token);
static inline int64_t attend_half_of(const attend *p, int64_t token) {
    return 2 * p->row->local[token] >= p->held[attend_rank_of(p, token)];
}

static inline void attend_where_property(attend_where_rows *w, attend_property of, int64_t n,
                                         const char *what) {
    attend_tally *t = (attend_tally *)calloc((size_t)n + 1, sizeof *t);
    for (int64_t i = 0; t && i < w->side->count; i++) {
        int64_t at = of(w->p, w->side->token[i]);
        t[at].all++;
        t[at].off += attend_token_off(w, i) > 0;
    }
    if (t) attend_say_runs(w, t, n, what, NULL);
    free(t);
}

/* Whether only documents that several ranks hold have wrong rows; appends that. */
static inline int attend_where_cut(attend_where_rows *w) {
    const attend *p = w->p;
    int64_t docs = p->row->docs;
    unsigned char *cut = (unsigned char *)calloc((size_t)docs + 1, 1);
    int64_t whole = 0, wrong_whole = 0;
    for (int64_t d = 0; cut && d < docs; d++)
        for (int64_t u = p->row->cu_seqlens[d]; u + 1 < p->row->cu_seqlens[d + 1]; u++)
            cut[d] |= p->row->rank[u] != p->row->rank[u + 1];
    for (int64_t i = 0; cut && i < w->side->count; i++) {
        int64_t d = attend_document_of(p, w->side->token[i]);
        whole += !cut[d];
        wrong_whole += !cut[d] && attend_token_off(w, i);
    }
    free(cut);
    if (!whole || wrong_whole) return 0;
    attend_append(w, "; only documents that are cut");
    return 1;
}

/* ---- by ranks that a token sees or is seen by ---- */

/* For each token, bits of ranks: a query's are those whose keys it sees, a key's those whose
   queries see it. */
static inline uint64_t *attend_masks(const attend_where_rows *w) {
    const attend *p = w->p;
    attend_way right = attend_right_way(p);
    uint64_t *mask = (uint64_t *)calloc((size_t)p->end + 1, sizeof *mask);
    for (int64_t i = 0; mask && i < p->query.count; i++) {
        int64_t token = p->query.token[i];
        attend_sight s = attend_sight_of(p, &right, token);
        for (int64_t u = s.lo; u < s.hi; u++)
            if (w->keys)
                mask[u] |= UINT64_C(1) << attend_rank_of(p, token);
            else
                mask[token] |= UINT64_C(1) << attend_rank_of(p, u);
    }
    return mask;
}

/* Whether at least half of the tokens with one of these bits are wrong, and no other token. The
   bit of a token's own rank does not count. */
static inline int attend_is_of_mask(const attend_where_rows *w, const uint64_t *mask,
                                    uint64_t bits) {
    attend_tally in = {0, 0}, out = {0, 0};
    for (int64_t i = 0; i < w->side->count; i++) {
        int64_t token = w->side->token[i];
        uint64_t others = mask[token] & ~(UINT64_C(1) << attend_rank_of(w->p, token));
        attend_tally *t = others & bits ? &in : &out;
        t->all++;
        t->off += attend_token_off(w, i) > 0;
    }
    return out.all && !out.off && 2 * in.off >= in.all;
}

static inline void attend_where_seen(attend_where_rows *w) {
    const char *what = w->keys ? "keys that queries of" : "queries that see keys of";
    uint64_t *mask;
    if (w->p->ranks == 1 || w->p->ranks > WHERE_RANKS) return;
    if ((double)w->p->query.count * (double)w->p->end > WHERE_PAIRS) return;
    if (!(mask = attend_masks(w))) return;
    for (int64_t r = 0; r < w->p->ranks; r++) {
        if (!attend_is_of_mask(w, mask, UINT64_C(1) << r)) continue;
        attend_append(w, "; only %s rank %lld%s", what, (long long)r, w->keys ? " see" : "");
        free(mask);
        return;
    }
    if (attend_is_of_mask(w, mask, ~UINT64_C(0)))
        attend_append(w, "; only %s other ranks%s", what, w->keys ? " see" : "");
    free(mask);
}

/* ---- the sentence ---- */

/* "48 of 354 rows are wrong; only heads 4..5; only documents that are cut". 0: none is off. */
static inline int attend_where(const attend *p, int t, const unsigned char *off, char *text,
                               size_t size) {
    int keys = t >= ATTEND_DK;
    attend_where_rows w = {.p = p,
                           .side = keys ? &p->key : &p->query,
                           .off = off,
                           .heads = keys ? p->kv_heads : p->heads,
                           .per = keys ? 1 : p->group,
                           .keys = keys,
                           .text = text,
                           .size = size};
    size_t begin;
    for (int64_t i = 0; i < w.side->count * w.heads; i++) w.count += off[i];
    if (!w.count) return 0;
    snprintf(text, size, "%lld of %lld rows are wrong", (long long)w.count,
             (long long)(w.side->count * w.heads));
    begin = strlen(text);
    attend_where_heads(&w);
    attend_where_property(&w, attend_rank_of, p->ranks, "ranks");
    if (p->row->docs > 1 && !attend_where_cut(&w))
        attend_where_property(&w, attend_document_of, p->row->docs, "documents");
    if (p->ranks > 1) attend_where_property(&w, attend_half_of, 2, "half");
    attend_where_seen(&w);
    if (strlen(text) == begin) attend_append(&w, ", of all heads, ranks and documents");
    return 1;
}
#endif
