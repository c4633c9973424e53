/* SPDX-License-Identifier: MIT OR Unlicense */
/* attention_ways.h - recomputes attention with each known mistake and measures how far the dump
 * is from the result. A form is a variant of a mistake. In hop s, rank r of P attends to the
 * keys of rank (r - s) mod P. */
#ifndef ORACLE_ATTENTION_WAYS_H
#define ORACLE_ATTENTION_WAYS_H
#include "attention_limits.h"
#include "oracle/verdict/verdict.h"

/* Of one tensor and one mistake: the form nearest to the dump. */
typedef struct attend_fit {
    attend_distance distance;
    char form[72];
} attend_fit;

typedef struct attend_matches {
    attend_fit of[ATTEND_TENSORS][MISTAKES];
    attend_distance right[ATTEND_TENSORS]; /* of the right answer, on the same rows */
    attend_limits limits;
} attend_matches;

/* The part of a sequence on which mistakes are tried out. */
typedef struct attend_case {
    const attend *p;
    attend_answer right, x; /* x: with a mistake */
    double *right_delta, *delta;
    attend_matches *fits;
    int open[ATTEND_TENSORS]; /* wrong in the dump, and this part shows it */
    int forward_is_right;     /* the dump's out is right: only the backward pass may be wrong */
    int likely_alone;         /* long trials only of mistakes that match out, lse or dq */
    double most;              /* most multiplications for one trial */
    int left_out;             /* trials that would exceed it */
    verdict *right_verdict;   /* notes which mistakes would show, of a dump that is right; NULL:
                                 the dump is wrong, and they are compared with it */
} attend_case;

enum {
    OF_OUT = 1 << ATTEND_OUT,
    OF_LSE = 1 << ATTEND_LSE,
    OF_DQ = 1 << ATTEND_DQ,
    OF_DK = 1 << ATTEND_DK,
    OF_DV = 1 << ATTEND_DV,
    OF_FORWARD = OF_OUT | OF_LSE,
    OF_BACKWARD = OF_DQ | OF_DK | OF_DV
};

static inline int attend_open(const attend_case *c, int of) {
    for (int t = 0; t < ATTEND_TENSORS; t++)
        if (c->open[t] && of & (1 << t)) return 1;
    return 0;
}

/* The distance in units of the limit, of the whole tensor or of its worst row. */
static inline double attention_times(const attend_distance *distance,
                                     const attend_limits *limits, int t) {
    return fmax(attend_ratio(distance->all, limits->all[t]),
                attend_ratio(distance->row, limits->row[t]));
}

/* Of a right dump: notes whether the mistake would show in tensor t. Any form is enough: most
   differ in the ranks that they concern. */
static inline void attend_note(attend_case *c, int t, const char *name, const double *x) {
    attend_distance distance = attend_measure(c->p, t, c->right.x[t], x, c->right.scale[t], 0);
    verdict_try(c->right_verdict, name, NULL,
                attention_times(&distance, &c->fits->limits, t) > 1);
}

/* Records this form for tensor t if it is nearer to the dump than the mistake's other forms. */
static inline void attend_consider_tensor(attend_case *c, int t, const char *name,
                                          const char *form, const double *x) {
    attend_fit *fit = &c->fits->of[t][mistake_named(name) - mistakes];
    attend_distance distance;
    if (!c->open[t]) return;
    if (c->right_verdict) {
        attend_note(c, t, name, x);
        return;
    }
    distance = attend_measure(c->p, t, c->p->got[t], x, c->right.scale[t], 1);
    if (!(distance.all < fit->distance.all)) return;
    fit->distance = distance;
    snprintf(fit->form, sizeof fit->form, "%s", form);
}

static inline void attend_consider(attend_case *c, int of, const char *name, const char *form,
                                   const attend_answer *a) {
    for (int t = 0; t < ATTEND_TENSORS; t++)
        if (of & (1 << t) && a->x[t]) attend_consider_tensor(c, t, name, form, a->x[t]);
}

/* ---- a mistake in both passes: backward uses the wrong out and lse of forward ---- */

/* Multiplications of one pass forward and backward. */
static inline double attend_cost(const attend *p, const attend_way *w) {
    double pairs = 0;
    for (int64_t i = 0; i < p->query.count; i++) {
        attend_sight s = attend_sight_of(p, w, p->query.token[i]);
        pairs += s.hi - s.lo;
    }
    return pairs * (double)p->heads * (double)(p->dim + p->out_dim + ATTEND_EXP) *
           (p->backward ? attend_shows(p, ATTEND_DK) ? 4 : 3 : 1);
}

/* Whether a trial costs too much; if so, counts it in left_out. */
static inline int attend_is_long(attend_case *c, double cost) {
    if (cost <= c->most) return 0;
    c->left_out++;
    return 1;
}

/* Whether the mistake already matches out, lse or dq: then a long pass is worth its time. */
static inline int attend_is_likely(const attend_case *c, const char *name) {
    for (int t = 0; t < ATTEND_DK; t++)
        if (c->fits->of[t][mistake_named(name) - mistakes].distance.all <=
            c->fits->limits.all[t])
            return 1;
    return 0;
}

/* Whether the mistake already matches every open tensor: then its other forms are not tried. */
static inline int attend_is_found(const attend_case *c, const char *name) {
    for (int t = 0; t < ATTEND_TENSORS; t++) {
        const attend_distance *distance =
            &c->fits->of[t][mistake_named(name) - mistakes].distance;
        if (c->open[t] && !(distance->all <= c->fits->limits.all[t] &&
                            distance->row <= 2 * c->fits->limits.row[t]))
            return 0;
    }
    return 1;
}

static inline int attend_try_both(attend_case *c, const char *name, const char *form,
                                  const attend_way *w) {
    if (c->forward_is_right) return 0;
    if (!attend_is_likely(c, name) && attend_is_long(c, attend_cost(c->p, w))) return 0;
    if (attend_forward(c->p, w, NULL, &c->x)) return -1;
    attend_consider(c, OF_FORWARD, name, form, &c->x);
    if (attend_work(c->p) > ATTEND_LARGE && attend_open(c, OF_FORWARD) &&
        !attend_is_likely(c, name))
        return 0; /* the dump's gradients do not come from this out */
    if (!c->p->backward) return 0;
    if (attend_gradients(c->p, w, &c->x, c->delta)) return -1;
    attend_consider(c, OF_BACKWARD, name, form, &c->x);
    return 0;
}

/* Tries a mistake in both passes, then in backward alone with the right out and lse. */
static inline int attend_try_way(attend_case *c, const char *name, const char *form,
                                 const attend_way *w) {
    char alone[72];
    if (attend_is_found(c, name) || (c->likely_alone && !attend_is_likely(c, name))) return 0;
    if (attend_try_both(c, name, form, w)) return -1;
    if (attend_is_found(c, name)) return 0;
    if (!attend_open(c, OF_BACKWARD) || attend_is_long(c, attend_cost(c->p, w))) return 0;
    attend_answer_clear(&c->x, c->p, ATTEND_DQ);
    if (attend_backward(c->p, w, NULL, c->right.x[ATTEND_LSE], c->right_delta, &c->x))
        return -1;
    snprintf(alone, sizeof alone, "%s%sin the backward pass alone", form, *form ? ", " : "");
    attend_consider(c, OF_BACKWARD, name, alone, &c->x);
    return 0;
}

static inline int attend_try_sights(attend_case *c) {
    static const struct {
        const char *name, *form;
        int sight, window, ranks; /* window, ranks: 1 if it needs a window, several ranks */
    } table[] = {{"documents_ignored", "", SEES_ANY_DOCUMENT, 0, 0},
                 {"looks_ahead", "", SEES_AHEAD, 0, 0},
                 {"mask_missing", "", SEES_ANY_DOCUMENT | SEES_AHEAD, 0, 0},
                 {"causal_by_local_row", "", SEES_BY_LOCAL_ROW, 0, 1},
                 {"causal_by_local_row", "the window goes by places",
                  SEES_AHEAD | SEES_LOCAL_BOUND, 1, 1},
                 {"window_by_local_row", "", SEES_LOCAL_WINDOW, 1, 1},
                 {"window_by_local_row", "and nobody of a later row",
                  SEES_LOCAL_WINDOW | SEES_LOCAL_BOUND, 1, 1}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        attend_way w = attend_right_way(c->p);
        w.sight = table[i].sight;
        if ((table[i].window && !c->p->window) || (table[i].ranks && c->p->ranks == 1))
            continue;
        if (table[i].sight & SEES_ANY_DOCUMENT && c->p->row->docs < 2) continue;
        if (attend_try_way(c, table[i].name, table[i].form, &w)) return -1;
    }
    return 0;
}

/* Row numbers that a kernel compares after an all-gather of the keys in rank order: rows[0] of
   queries, rows[1] of keys. Returns whether any differs from the global position; if none does,
   the mask is right. */
static inline int attend_gathered_rows(const attend *p, int form, int64_t *const *rows) {
    int differs = 0;
    for (int64_t t = 0; t < p->end; t++) {
        int64_t held = p->held[p->row->rank[t] - p->first_rank];
        rows[1][t] = p->row->gathered[t];
        rows[0][t] = form == 2   ? p->row->gathered[t]
                     : form == 1 ? p->row->local[t] + p->end - held
                                 : p->row->local[t];
        differs |= rows[0][t] != t || rows[1][t] != t;
    }
    return differs;
}

static inline int attend_try_gathered(attend_case *c) {
    static const char *const forms[] = {"keys' rows are those of all ranks' gathered keys",
                                        "the same, queries aligned with the last of them",
                                        "rows of all ranks' tokens, gathered"};
    size_t bytes = (size_t)(c->p->end + 1) * sizeof(int64_t);
    int64_t *rows[2] = {(int64_t *)malloc(bytes), (int64_t *)malloc(bytes)};
    int status = rows[0] && rows[1] ? 0 : -1;
    for (int form = 0; !status && form < 3 && c->p->ranks > 1; form++) {
        attend_way w = attend_right_way(c->p);
        w.query_rows = rows[0];
        w.key_rows = rows[1];
        if (!attend_gathered_rows(c->p, form, rows)) continue;
        w.sight = SEES_BY_LOCAL_ROW;
        status = attend_try_way(c, "causal_by_local_row", forms[form], &w);
        w.sight = SEES_LOCAL_WINDOW;
        if (!status && w.window)
            status = attend_try_way(c, "window_by_local_row", forms[form], &w);
    }
    free(rows[0]);
    free(rows[1]);
    return status;
}

static inline int attend_try_off_by_one(attend_case *c) {
    attend_way next = attend_right_way(c->p), before = next, wide = next, narrow = next;
    next.ahead = 1;
    before.ahead = -1;
    wide.window++;
    narrow.window--;
    if (attend_try_way(c, "causal_off_by_one", "the next token is seen, too", &next)) return -1;
    if (attend_try_way(c, "causal_off_by_one", "the own token is not seen", &before)) return -1;
    if (!c->p->window) return 0;
    if (attend_try_way(c, "window_off_by_one", "one token more", &wide)) return -1;
    return narrow.window ? attend_try_way(c, "window_off_by_one", "one token less", &narrow)
                         : 0;
}

/* With Ulysses a rank holds heads / P query heads, and several ranks may need a copy of one kv
   head. Tries wrong choices of that kv head. */
static inline int attend_try_heads_of_ranks(attend_case *c) {
    static const char *const forms[] = {"rank r takes kv head r mod kv_heads",
                                        "each rank counts kv heads from 0"};
    const attend *p = c->p;
    if (p->ranks == 1 || p->kv_heads == 1 || !p->all_heads || p->heads % p->ranks) return 0;
    for (int i = 0; i < 2; i++) {
        attend_way w = attend_right_way(p), right = w;
        int other = 0;
        w.in_turn = i ? FROM_0_ON_RANK : IN_TURN_BY_RANK;
        for (int64_t h = 0; h < p->heads; h++)
            other |= attend_kv_of(p, &w, h) != attend_kv_of(p, &right, h);
        if (other && attend_try_way(c, "kv_heads_by_rank", forms[i], &w)) return -1;
    }
    return 0;
}

/* k and v of the previous or next hop. Only with equal shares: each row then has a counterpart
   on every rank. */
static inline int attend_try_hops_stale(attend_case *c) {
    attend_way before = attend_right_way(c->p), after = before;
    for (int64_t r = 0; r < c->p->ranks; r++)
        if (c->p->held[r] != c->p->held[0]) return 0;
    before.own_kv = OF_HOP_BEFORE;
    after.own_kv = OF_HOP_AFTER;
    if (c->p->ranks < 3) return 0; /* with 2 ranks this is OWN_KV */
    if (attend_try_way(c, "stale_kv", "those of the hop before", &before)) return -1;
    return attend_try_way(c, "stale_kv", "those of the hop after", &after);
}

static inline int attend_try_options(attend_case *c) {
    attend_way scaled = attend_right_way(c->p), plain = scaled, wide = scaled, turns = scaled;
    attend_way uncapped = scaled, stale = scaled;
    scaled.scale = 1 / sqrt((double)c->p->dim);
    plain.scale = 1;
    wide.window = 0;
    uncapped.softcap = 0;
    turns.in_turn = IN_TURN;
    stale.own_kv = OWN_KV;
    if (c->p->scale != scaled.scale &&
        attend_try_way(c, "scale_missing", "1 / sqrt(head_dim)", &scaled))
        return -1;
    if (c->p->scale != 1 && attend_try_way(c, "scale_missing", "1", &plain)) return -1;
    if (c->p->window && attend_try_way(c, "window_missing", "", &wide)) return -1;
    if (c->p->softcap > 0 && attend_try_way(c, "softcap_missing", "", &uncapped)) return -1;
    if (c->p->ranks > 1 && attend_try_way(c, "stale_kv", "", &stale)) return -1;
    return c->p->group > 1 && c->p->kv_heads > 1
               ? attend_try_way(c, "kv_heads_in_turn", "", &turns)
               : 0;
}

/* ---- layouts ---- */

enum {
    TAKEN_CONTIGUOUS,
    TAKEN_ZIGZAG,
    TAKEN_STRIPE,
    TAKEN_CONTIGUOUS_EACH,
    TAKEN_ZIGZAG_EACH,
    TAKEN
};

/* Global position of row `local` of `n` on this rank if the sequence is split by `layout`. */
static inline int64_t attend_taken(int layout, int64_t rank, int64_t ranks, int64_t n,
                                   int64_t local) {
    int64_t half = n / 2;
    if (layout == TAKEN_CONTIGUOUS) return rank * n + local;
    if (layout == TAKEN_STRIPE) return local * ranks + rank;
    return local < half ? rank * half + local : (2 * ranks - 1 - rank) * half + local - half;
}

/* The same if each document is split by itself. */
static inline int64_t attend_taken_each(const attend *p, int layout, int64_t rank,
                                        int64_t local) {
    const int64_t *cu = p->row->cu_seqlens;
    int64_t d = 0;
    while (d + 1 < p->row->docs && cu[d + 1] / p->ranks <= local) d++;
    return cu[d] + attend_taken(layout, rank, p->ranks, (cu[d + 1] - cu[d]) / p->ranks,
                                local - cu[d] / p->ranks);
}

/* Whether the ranks' shares fit the layout: equal shares of the row or, for _EACH, of each
   document. */
static inline int attend_may_be_taken(const attend *p, int layout) {
    int64_t by = layout == TAKEN_ZIGZAG || layout == TAKEN_ZIGZAG_EACH ? 2 * p->ranks
                                                                       : p->ranks;
    if (p->ranks == 1 || p->key.count != p->end) return 0;
    for (int64_t r = 0; r < p->ranks; r++)
        if (p->held[r] * p->ranks != p->end) return 0;
    for (int64_t d = 0; layout >= TAKEN_CONTIGUOUS_EACH && d < p->row->docs; d++)
        if ((p->row->cu_seqlens[d + 1] - p->row->cu_seqlens[d]) % by) return 0;
    return p->end % by == 0 && (layout < TAKEN_CONTIGUOUS_EACH || p->row->docs > 1);
}

static inline int attend_try_layouts(attend_case *c) {
    static const char *const forms[] = {"contiguous", "zigzag", "stripe",
                                        "contiguous in each document",
                                        "zigzag in each document"};
    const attend *p = c->p;
    int64_t *places = (int64_t *)calloc((size_t)p->row->tokens + 1, sizeof *places);
    int status = places ? 0 : -1;
    for (int layout = 0; !status && layout < TAKEN; layout++) {
        attend_way w = attend_right_way(p);
        int other = 0;
        w.places = places;
        if (!attend_may_be_taken(p, layout)) continue;
        for (int64_t t = 0; t < p->end; t++) {
            int64_t rank = p->row->rank[t] - p->first_rank, local = p->row->local[t];
            places[t] = layout < TAKEN_CONTIGUOUS_EACH
                            ? attend_taken(layout, rank, p->ranks, p->held[rank], local)
                            : attend_taken_each(p, layout - TAKEN_CONTIGUOUS_EACH, rank, local);
            other |= places[t] != t;
        }
        if (other) status = attend_try_way(c, "layout_mistaken", forms[layout], &w);
    }
    free(places);
    return status;
}

/* ---- halves ---- */

/* The halves of the keys of rank `source` that a half of the queries of `rank` sees, with a
   mistake. 1: the first half, 2: the second, 3: both. */
typedef unsigned char (*attend_seen)(int64_t half, int64_t rank, int64_t source);
static inline unsigned char seen_own(int64_t half, int64_t rank, int64_t source) {
    return (void)half, rank == source ? 3 : 0;
}
static inline unsigned char seen_first_halves(int64_t half, int64_t rank, int64_t source) {
    return (void)half, rank == source ? 3 : 1;
}
static inline unsigned char seen_second_halves(int64_t half, int64_t rank, int64_t source) {
    return (void)half, rank == source ? 3 : 2;
}
static inline unsigned char seen_by_first_half(int64_t half, int64_t rank, int64_t source) {
    return rank == source || half == 0 ? 3 : 0;
}
static inline unsigned char seen_by_second_half(int64_t half, int64_t rank, int64_t source) {
    return rank == source || half == 1 ? 3 : 0;
}
static inline unsigned char seen_not_of_later(int64_t half, int64_t rank, int64_t source) {
    return source > rank && half == 1 ? 0 : 3;
}

/* Mistakes that hide keys from queries, by halves of a rank's share as in the zigzag layout.
   Each is a table of what is seen (attend_way.sees). own_tokens_only is not tried in backward
   alone, where it equals dq_of_one_hop and others. */
static inline int attend_try_seen(attend_case *c) {
    static const struct {
        const char *name, *form;
        attend_seen seen;
    } table[] = {
        {"own_tokens_only", "", seen_own}, /* in both passes only */
        {"half_not_exchanged", "the first halves alone travel", seen_first_halves},
        {"half_not_exchanged", "the second halves alone travel", seen_second_halves},
        {"half_not_updated", "the second half is not", seen_by_first_half},
        {"half_not_updated", "the first half is not", seen_by_second_half},
        {"half_not_updated", "the second half is not, from later ranks", seen_not_of_later}};
    int64_t ranks = c->p->ranks, bits = 2 * ranks * ranks;
    unsigned char *sees = (unsigned char *)malloc((size_t)bits);
    int status = sees ? 0 : -1;
    for (size_t i = 0; !status && ranks > 1 && i < sizeof table / sizeof *table; i++) {
        attend_way w = attend_right_way(c->p);
        w.sees = sees;
        for (int64_t n = 0; n < bits; n++)
            sees[n] = table[i].seen(n / ranks % 2, n / ranks / 2, n % ranks);
        if (c->likely_alone && !attend_is_likely(c, table[i].name)) continue;
        status = (i ? attend_try_way : attend_try_both)(c, table[i].name, table[i].form, &w);
    }
    free(sees);
    return status;
}

/* ---- hop by hop ---- */

/* Backward passes that use a hop's own lse or delta. */
enum { DELTA_OF_HOP, BOTH_OF_HOP, LSE_OF_HOP, AVERAGED, HOP_WAYS };

typedef struct attend_hops {
    attend_case *c;
    attend_answer part, mean, halves, naive, swapped;
    attend_answer best; /* without the hops that seem lost */
    attend_answer ways[HOP_WAYS];
    double *met;                   /* (queries, heads) number of hops in which it saw a key */
    double *lse, *delta, *nearest; /* nearest: (ranks) squared distance of best to the dump */
    unsigned char *sees;
    int64_t *lost; /* (ranks) the hop that each rank seems to lack; 0: none */
    int overflowed;
} attend_hops;

static inline int attend_hops_begin(attend_hops *h, attend_case *c) {
    int64_t rows = attend_rows(c->p, ATTEND_LSE), ranks = c->p->ranks;
    attend_answer *const answers[] = {&h->part,  &h->mean,    &h->halves,
                                      &h->naive, &h->swapped, &h->best};
    int status = 0;
    memset(h, 0, sizeof *h);
    h->c = c;
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++)
        status |= attend_answer_new(answers[i], c->p, 0);
    for (int i = 0; i < HOP_WAYS; i++) status |= attend_answer_new(&h->ways[i], c->p, 0);
    h->met = attend_zeros(rows);
    h->lse = attend_zeros(rows);
    h->delta = attend_zeros(rows);
    h->nearest = attend_zeros(ranks);
    h->sees = (unsigned char *)malloc((size_t)(2 * ranks * ranks));
    h->lost = (int64_t *)calloc((size_t)ranks, sizeof *h->lost);
    if (!h->met || !h->lse || !h->delta || !h->nearest || !h->sees || !h->lost) return -1;
    return status;
}

static inline void attend_hops_end(attend_hops *h) {
    attend_answer *const answers[] = {&h->part,  &h->mean,    &h->halves,
                                      &h->naive, &h->swapped, &h->best};
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++)
        attend_answer_free(answers[i]);
    for (int i = 0; i < HOP_WAYS; i++) attend_answer_free(&h->ways[i]);
    free(h->met);
    free(h->lse);
    free(h->delta);
    free(h->nearest);
    free(h->sees);
    free(h->lost);
}

/* Merges a hop by new lse = lse + log(1 + exp(part - lse)), as early ring attention code did in
   F32: exp overflows above 88.7. */
static inline void attend_merge_naively(attend_hops *h, int64_t at, double part,
                                        const double *own) {
    int64_t n = h->c->p->out_dim;
    double *lse = &h->naive.x[ATTEND_LSE][at], *out = h->naive.x[ATTEND_OUT] + at * n, sum;
    if (h->met[at] == 0) {
        *lse = part;
        memcpy(out, own, (size_t)n * sizeof *out);
        return;
    }
    h->overflowed |= part - *lse > 88.7228;
    sum = part - *lse > 88.7228 ? INFINITY : *lse + log1p(exp(part - *lse));
    for (int64_t i = 0; i < n; i++)
        out[i] = exp(*lse - sum) * out[i] + exp(part - sum) * own[i];
    *lse = sum;
}

/* Merges a hop with the two weights exchanged; lse is right. */
static inline void attend_merge_swapped(attend_hops *h, int64_t at, double part,
                                        const double *own) {
    int64_t n = h->c->p->out_dim;
    double *lse = &h->swapped.x[ATTEND_LSE][at], *out = h->swapped.x[ATTEND_OUT] + at * n;
    double weight = h->met[at] == 0 ? 0 : 1 / (1 + exp(*lse - part)); /* of the hop */
    for (int64_t i = 0; i < n; i++) out[i] = weight * out[i] + (1 - weight) * own[i];
    *lse = h->met[at] == 0 ? part : fmax(*lse, part) + log1p(exp(-fabs(*lse - part)));
}

/* Merges one hop's out and lse of a query and head with earlier hops' in several wrong ways. */
static inline void attend_put_hop(attend_hops *h, int64_t at) {
    int64_t n = h->c->p->out_dim;
    double part = h->part.x[ATTEND_LSE][at], *own = h->part.x[ATTEND_OUT] + at * n;
    double *mean = h->mean.x[ATTEND_OUT] + at * n, *halves = h->halves.x[ATTEND_OUT] + at * n;
    if (part == -INFINITY) return;
    attend_merge_naively(h, at, part, own);
    attend_merge_swapped(h, at, part, own);
    h->halves.x[ATTEND_LSE][at] = part; /* for lse_of_last_hop */
    for (int64_t i = 0; i < n; i++) {
        mean[i] += own[i];
        halves[i] = h->met[at] == 0 ? own[i] : (halves[i] + own[i]) / 2;
    }
    h->met[at]++;
}

/* The lse and delta that the backward pass `way` (DELTA_OF_HOP, ...) uses in this hop. AVERAGED
   adds log P to lse, which divides the weights by P. */
static inline void attend_hop_factors(attend_hops *h, int way) {
    const attend *p = h->c->p;
    attend_delta(p, h->part.x[ATTEND_OUT], h->delta);
    for (int64_t i = 0; i < attend_rows(p, ATTEND_LSE); i++) {
        h->lse[i] = way == DELTA_OF_HOP ? h->c->right.x[ATTEND_LSE][i]
                                        : h->part.x[ATTEND_LSE][i];
        if (way == AVERAGED) h->lse[i] += log((double)p->ranks);
        if (way == LSE_OF_HOP) h->delta[i] = h->c->right_delta[i];
    }
}

static inline int attend_hop_backward(attend_hops *h, const attend_way *w, int64_t hop) {
    attend_case *c = h->c;
    char form[72];
    for (int i = 0; i < HOP_WAYS; i++) {
        attend_hop_factors(h, i);
        if (attend_backward(c->p, w, NULL, h->lse, h->delta, &h->ways[i])) return -1;
    }
    attend_answer_clear(&h->part, c->p, ATTEND_DQ);
    if (attend_backward(c->p, w, NULL, c->right.x[ATTEND_LSE], c->right_delta, &h->part))
        return -1;
    snprintf(form, sizeof form, hop ? "those of hop %lld" : "own keys and queries",
             (long long)hop);
    attend_consider(c, OF_DQ, "dq_of_one_hop", form, &h->part);
    attend_consider(c, OF_DK | OF_DV, "dkv_not_returned", form, &h->part);
    for (int t = ATTEND_DQ; t < ATTEND_TENSORS; t++)
        for (int64_t i = 0; h->part.x[t] && i < attend_rows(c->p, t) * attend_width(c->p, t);
             i++)
            h->part.x[t][i] = c->right.x[t][i] - h->part.x[t][i];
    snprintf(form, sizeof form, "hop %lld, in the backward pass alone", (long long)hop);
    attend_consider(c, OF_BACKWARD, "hop_lost", form, &h->part);
    return 0;
}

/* Adds to distance, (ranks), the squared distance of the dump's out from x. */
static inline void attend_distance_by_rank(const attend *p, const double *x, double *distance) {
    int64_t n = p->out_dim;
    for (int64_t i = 0; i < attend_rows(p, ATTEND_OUT); i++) {
        int64_t token = p->query.token[i / p->heads];
        double size;
        distance[p->row->rank[token] - p->first_rank] += attend_squares(
            p->got[ATTEND_OUT] + i * n, x + i * n, n, &size);
    }
}

/* Recomputes out without this hop. A rank seems to lack the hop if its out is then less than
   half as far from the dump (0.25 of the square) as the best so far. */
static inline int attend_lose_hop(attend_hops *h, attend_way *w, int64_t hop,
                                  double *distance) {
    attend_case *c = h->c;
    const attend *p = c->p;
    for (int64_t n = 0; n < 2 * p->ranks * p->ranks; n++)
        h->sees[n] = attend_hop(p, n / p->ranks / 2, n % p->ranks) == hop ? 0 : 3;
    if (attend_forward(p, w, NULL, &c->x)) return -1;
    memset(distance, 0, (size_t)p->ranks * sizeof *distance);
    attend_distance_by_rank(p, c->x.x[ATTEND_OUT], distance);
    for (int64_t r = 0; r < p->ranks; r++) {
        if (!(distance[r] < 0.25 * h->nearest[r])) continue;
        h->nearest[r] = distance[r];
        h->lost[r] = hop;
        for (int64_t i = 0; i < attend_rows(p, ATTEND_OUT); i++) {
            if (p->row->rank[p->query.token[i / p->heads]] - p->first_rank != r) continue;
            memcpy(h->best.x[ATTEND_OUT] + i * p->out_dim, c->x.x[ATTEND_OUT] + i * p->out_dim,
                   (size_t)p->out_dim * sizeof(double));
            h->best.x[ATTEND_LSE][i] = c->x.x[ATTEND_LSE][i];
        }
    }
    return 0;
}

/* "rank 2 lacks rank 1, rank 3 lacks rank 1" */
static inline void attend_say_lost(const attend_hops *h, char *form, size_t size) {
    const attend *p = h->c->p;
    size_t used = 0;
    *form = 0;
    for (int64_t r = 0; r < p->ranks && used + 30 < size; r++)
        if (h->lost[r])
            used += (size_t)snprintf(form + used, size - used, "%srank %lld lacks rank %lld",
                                     used ? ", " : "", (long long)r,
                                     (long long)attend_hop(p, r, h->lost[r]));
}

/* hop_lost: ranks may lack different hops. So the forward pass finds for each rank the one hop
   whose absence explains its out best; the backward pass then leaves out all of these. */
static inline int attend_try_lost(attend_hops *h, attend_way *w) {
    attend_case *c = h->c;
    int64_t ranks = c->p->ranks, lost = 0;
    double *distance = attend_zeros(ranks);
    char form[72];
    int status = distance ? 0 : -1;
    attend_distance_by_rank(c->p, c->right.x[ATTEND_OUT], h->nearest);
    for (int t = 0; t <= ATTEND_LSE; t++)
        memcpy(h->best.x[t], c->right.x[t],
               (size_t)(attend_rows(c->p, t) * attend_width(c->p, t)) * sizeof(double));
    for (int64_t hop = 1; !status && hop < ranks; hop++)
        status = attend_lose_hop(h, w, hop, distance);
    free(distance);
    for (int64_t r = 0; r < ranks; r++) lost += h->lost[r];
    if (status || !lost) return status;
    for (int64_t n = 0; n < 2 * ranks * ranks; n++) {
        int64_t rank = n / ranks / 2, hop = attend_hop(c->p, rank, n % ranks);
        h->sees[n] = h->lost[rank] && hop == h->lost[rank] ? 0 : 3;
    }
    attend_say_lost(h, form, sizeof form);
    if (c->p->backward) attend_delta(c->p, h->best.x[ATTEND_OUT], h->delta);
    if (c->p->backward &&
        attend_backward(c->p, w, NULL, h->best.x[ATTEND_LSE], h->delta, &h->best))
        return -1;
    attend_consider(c, OF_FORWARD | OF_BACKWARD, "hop_lost", form, &h->best);
    return 0;
}

static inline void attend_consider_merges(attend_hops *h) {
    attend_case *c = h->c;
    int64_t n = c->p->out_dim, rows = attend_rows(c->p, ATTEND_OUT);
    static const char *const forms[] = {"delta of each hop", "delta and lse of each hop",
                                        "lse of each hop"};
    attend_consider(c, OF_OUT, "outputs_averaged", "two by two, in the ring's order",
                    &h->halves);
    attend_consider(c, OF_OUT, "outputs_averaged", "sum over hops", &h->mean);
    for (int64_t i = 0; i < rows * n; i++) h->mean.x[ATTEND_OUT][i] /= (double)c->p->ranks;
    attend_consider(c, OF_OUT, "outputs_averaged", "sum over hops / P", &h->mean);
    for (int64_t i = 0; i < rows * n; i++)
        h->mean.x[ATTEND_OUT][i] *= (double)c->p->ranks / h->met[i / n];
    attend_consider(c, OF_OUT, "outputs_averaged", "mean of the hops that saw a key", &h->mean);
    attend_consider(c, OF_BACKWARD, "outputs_averaged", "", &h->ways[AVERAGED]);
    attend_consider(c, OF_OUT, "merge_weights_swapped", "", &h->swapped);
    if (h->overflowed) attend_consider(c, OF_FORWARD, "merge_overflows", "", &h->naive);
    for (int i = 0; i < AVERAGED; i++)
        attend_consider(c, OF_BACKWARD, "delta_of_hop", forms[i], &h->ways[i]);
}

/* dkv_not_returned: dk and dv of all keys from the queries of one rank alone. */
static inline int attend_try_one_rank(attend_hops *h, attend_way *w) {
    attend_case *c = h->c;
    int64_t ranks = c->p->ranks;
    char form[72];
    for (int64_t r = 0; r < ranks && attend_open(c, OF_DK | OF_DV); r++) {
        for (int64_t n = 0; n < 2 * ranks * ranks; n++) h->sees[n] = n / ranks / 2 == r ? 3 : 0;
        attend_answer_clear(&h->part, c->p, ATTEND_DQ);
        if (attend_backward(c->p, w, NULL, c->right.x[ATTEND_LSE], c->right_delta, &h->part))
            return -1;
        snprintf(form, sizeof form, "queries of rank %lld alone", (long long)r);
        attend_consider(c, OF_DK | OF_DV, "dkv_not_returned", form, &h->part);
    }
    return 0;
}

static inline int attend_hop_by_hop(attend_hops *h) {
    attend_case *c = h->c;
    attend_way w = attend_right_way(c->p);
    char form[72];
    w.sees = h->sees;
    for (int64_t hop = 0; hop < c->p->ranks; hop++) {
        attend_see_hops(c->p, h->sees, hop, hop);
        if (attend_forward(c->p, &w, NULL, &h->part)) return -1;
        for (int64_t i = 0; i < attend_rows(c->p, ATTEND_LSE); i++) attend_put_hop(h, i);
        snprintf(form, sizeof form, "hop %lld, or the last before it with a key",
                 (long long)hop);
        attend_consider(c, OF_LSE, "lse_of_last_hop", form, &h->halves);
        if (attend_open(c, OF_BACKWARD) && attend_hop_backward(h, &w, hop)) return -1;
    }
    attend_consider_merges(h);
    return attend_try_one_rank(h, &w) ? -1 : attend_try_lost(h, &w);
}

static inline int attend_try_hops(attend_case *c) {
    attend_way right = attend_right_way(c->p);
    double ranks = (double)c->p->ranks;
    double copies = ranks * (double)(c->p->key.count * c->p->kv_heads);
    attend_hops h;
    int status;
    if (c->p->ranks == 1 || attend_is_long(c, attend_cost(c->p, &right))) return 0;
    if (attend_is_long(c, copies * (double)(c->p->dim + c->p->out_dim))) return 0;
    if (attend_is_long(c, 2 * ranks * ranks * ranks)) return 0;
    status = attend_hops_begin(&h, c);
    if (!status) status = attend_hop_by_hop(&h);
    attend_hops_end(&h);
    return status;
}

/* ---- gradients, from the right ones ---- */

/* dk and dv if they stop on the ring before they reach their owner: rank r then has those of
   rank (r + by) mod P. */
static inline void attend_shift_home(attend_case *c, int64_t by) {
    const attend *p = c->p;
    int64_t wide = p->kv_heads * p->dim, narrow = p->kv_heads * p->out_dim;
    char form[72];
    for (int64_t j = 0; j < p->key.count; j++) {
        int64_t token = p->key.token[j], rank = p->row->rank[token] - p->first_rank;
        int64_t from = attend_own_row(p, (rank + by) % p->ranks, (int32_t)p->row->local[token]);
        if (from < 0) return;
        memcpy(c->x.x[ATTEND_DK] + j * wide, c->right.x[ATTEND_DK] + from * wide,
               (size_t)wide * sizeof(double));
        memcpy(c->x.x[ATTEND_DV] + j * narrow, c->right.x[ATTEND_DV] + from * narrow,
               (size_t)narrow * sizeof(double));
    }
    snprintf(form, sizeof form, "rank r has those of rank (r + %lld) mod P", (long long)by);
    attend_consider(c, OF_DK | OF_DV, "dkv_not_returned", form, &c->x);
}

static inline int attend_try_head_alone(attend_case *c) {
    attend_way w = attend_right_way(c->p);
    char form[72];
    for (w.only_head = 0; w.only_head < c->p->group; w.only_head++) {
        attend_answer_clear(&c->x, c->p, ATTEND_DQ);
        if (attend_backward(c->p, &w, NULL, c->right.x[ATTEND_LSE], c->right_delta, &c->x))
            return -1;
        snprintf(form, sizeof form, "head %lld of each group alone", (long long)w.only_head);
        attend_consider(c, OF_DK | OF_DV, "kv_group_not_summed", form, &c->x);
    }
    return 0;
}

/* Sets a tensor of c->x to the right answer's tensor `from` times a factor. */
static inline void attend_times(attend_case *c, int from, int tensor, double factor) {
    int64_t n = attend_rows(c->p, tensor) * attend_width(c->p, tensor);
    for (int64_t i = 0; c->x.x[tensor] && i < n; i++)
        c->x.x[tensor][i] = c->right.x[from][i] * factor;
}

static inline int attend_try_no_delta(attend_case *c) {
    const attend *p = c->p;
    attend_way w = attend_right_way(p);
    if (c->likely_alone && !attend_is_likely(c, "delta_missing")) return 0;
    attend_answer_clear(&c->x, p, ATTEND_DQ);
    memset(c->delta, 0, (size_t)attend_rows(p, ATTEND_LSE) * sizeof *c->delta);
    if (attend_backward(p, &w, NULL, c->right.x[ATTEND_LSE], c->delta, &c->x)) return -1;
    attend_consider(c, OF_BACKWARD, "delta_missing", "", &c->x);
    return 0;
}

/* Mistakes in gradients alone. Most need no pass: they scale, swap or shift the right ones. */
static inline int attend_try_gradients(attend_case *c) {
    const attend *p = c->p;
    if (!attend_open(c, OF_BACKWARD)) return 0;
    if (attend_try_no_delta(c)) return -1;
    attend_times(c, ATTEND_DQ, ATTEND_DQ, 1 / p->scale);
    attend_times(c, ATTEND_DK, ATTEND_DK, 1 / p->scale);
    attend_consider(c, OF_DQ | OF_DK, "dq_scale_missing", "", &c->x);
    if (!attend_open(c, OF_DK | OF_DV)) return 0;
    attend_times(c, ATTEND_DK, ATTEND_DK, 1 / (double)p->group);
    attend_times(c, ATTEND_DV, ATTEND_DV, 1 / (double)p->group);
    if (p->group > 1)
        attend_consider(c, OF_DK | OF_DV, "kv_group_not_summed", "the mean", &c->x);
    if (p->dim == p->out_dim) {
        attend_times(c, ATTEND_DV, ATTEND_DK, 1);
        attend_times(c, ATTEND_DK, ATTEND_DV, 1);
        attend_consider(c, OF_DK | OF_DV, "dk_dv_swapped", "", &c->x);
    }
    for (int i = 0; i < 2 && p->ranks > 1; i++) {
        double factor = i ? (double)p->ranks : 1 / (double)p->ranks;
        attend_times(c, ATTEND_DK, ATTEND_DK, factor);
        attend_times(c, ATTEND_DV, ATTEND_DV, factor);
        attend_consider(c, OF_DK | OF_DV, "dkv_averaged", i ? "times P" : "1 / P", &c->x);
    }
    for (int64_t by = 1; by < p->ranks; by++) attend_shift_home(c, by);
    return p->group > 1 && !c->likely_alone ? attend_try_head_alone(c) : 0;
}

/* lse as (heads, tokens) of a rank, read as (tokens, heads). */
static inline void attend_turn_lse(attend_case *c) {
    const attend *p = c->p;
    int64_t begin = 0;
    if (!p->all_heads || p->query.count != p->end || p->heads == 1) return;
    for (int64_t r = 0; r < p->ranks; begin += p->held[r++])
        for (int64_t n = 0; n < p->held[r] * p->heads; n++)
            c->x.x[ATTEND_LSE][begin * p->heads + n] =
                c->right.x[ATTEND_LSE][(begin + n % p->held[r]) * p->heads + n / p->held[r]];
    attend_consider(c, OF_LSE, "tokens_permuted", "(heads, tokens) read as (tokens, heads)",
                    &c->x);
}

static inline void attend_try_lse(attend_case *c) {
    attend_turn_lse(c);
    attend_times(c, ATTEND_LSE, ATTEND_LSE, 1 / log(2));
    attend_consider(c, OF_LSE, "lse_in_base_2", "", &c->x);
    attend_times(c, ATTEND_LSE, ATTEND_LSE, 1);
    for (int64_t i = 0; i < attend_rows(c->p, ATTEND_LSE); i++)
        c->x.x[ATTEND_LSE][i] -= c->right.top[i];
    attend_consider(c, OF_LSE, "lse_without_maximum", "", &c->x);
}

/* ---- rows that belong elsewhere ---- */

enum { MOVED_ROWS = 48 };

enum { LIKE_NONE = -1, LIKE_SEVERAL = -2 };

/* The row of the right answer that this row of the dump equals, within the limit. */
static inline int64_t attend_row_like(const attend_case *c, int t, int64_t row) {
    int64_t n = attend_width(c->p, t), found = LIKE_NONE;
    const double *got = c->p->got[t] + row * n;
    double limit = c->fits->limits.row[t];
    for (int64_t i = 0; i < attend_rows(c->p, t); i++) {
        double size, distance = sqrt(attend_squares(got, c->right.x[t] + i * n, n, &size));
        if (!(distance <= limit * c->right.scale[t][i])) continue;
        if (found >= 0) return LIKE_SEVERAL;
        found = i;
    }
    return found;
}

static inline int attend_is_off(const attend_case *c, int t, int64_t row) {
    int64_t n = attend_width(c->p, t);
    const double *got = c->p->got[t] + row * n, *want = c->right.x[t] + row * n;
    double size, distance = attend_squares(got, want, n, &size);
    return !(sqrt(distance) <= c->fits->limits.row[t] * c->right.scale[t][row]);
}

/* Checks that up to MOVED_ROWS wrong rows, spread evenly, are all right rows of other tokens
   (tokens_permuted) or of other heads of the same tokens (heads_permuted). For dk and dv only
   heads_permuted is named. */
static inline void attend_try_moved(attend_case *c, int t) {
    int64_t rows = attend_rows(c->p, t), step = rows / MOVED_ROWS + 1, seen = 0, tokens = 0;
    int64_t heads = t < ATTEND_DK ? c->p->heads : c->p->kv_heads, first = -1, from = -1;
    char form[72];
    for (int64_t n = 0; n < rows; n++) {
        int64_t row = n * step % rows + n * step / rows, like;
        if (row >= rows || !attend_is_off(c, t, row)) continue;
        like = attend_row_like(c, t, row);
        if (like == LIKE_NONE) return;
        if (like == LIKE_SEVERAL) continue;
        if (first < 0) from = like;
        if (first < 0) first = row;
        tokens += like / heads != row / heads;
        if (++seen == MOVED_ROWS) break;
    }
    if (seen < 2 || (tokens && t >= ATTEND_DK)) return;
    const int64_t *token = t < ATTEND_DK ? c->p->query.token : c->p->key.token;
    snprintf(form, sizeof form, "token %lld, head %lld has what belongs to %lld, %lld",
             (long long)token[first / heads], (long long)(first % heads),
             (long long)token[from / heads], (long long)(from % heads));
    const char *name = tokens ? "tokens_permuted" : "heads_permuted";
    attend_fit *fit = &c->fits->of[t][mistake_named(name) - mistakes];
    fit->distance = (attend_distance){.all = 0};
    snprintf(fit->form, sizeof fit->form, "%s", form);
}

/* ---- all mistakes ---- */

/* Computes the right answer, of one head in each group or of all (only_head -1). Call
   attend_case_end even if this fails. */
static inline int attend_case_begin(attend_case *c, const attend *p, int64_t only_head) {
    int64_t rows = attend_rows(p, ATTEND_LSE);
    attend_way w = attend_right_way(p);
    w.only_head = only_head;
    memset(c, 0, sizeof *c);
    c->p = p;
    c->right_delta = attend_zeros(rows);
    c->delta = attend_zeros(rows);
    if (attend_answer_new(&c->right, p, 1) | attend_answer_new(&c->x, p, 0)) return -1;
    return c->delta && c->right_delta ? attend_both(p, &w, &c->right, c->right_delta) : -1;
}

static inline void attend_case_end(attend_case *c) {
    attend_answer_free(&c->right);
    attend_answer_free(&c->x);
    free(c->right_delta);
    free(c->delta);
}

/* Whether a mistake that attend_try_hops tries already matches out, lse or dq. */
static inline int attend_is_of_hops(const attend_case *c) {
    return attend_is_likely(c, "hop_lost") || attend_is_likely(c, "outputs_averaged") ||
           attend_is_likely(c, "merge_weights_swapped") ||
           attend_is_likely(c, "delta_of_hop") || attend_is_likely(c, "dq_of_one_hop") ||
           attend_is_likely(c, "merge_overflows");
}

/* The cheapest first. 0, or -1: no memory. */
static inline int attend_try_all(attend_case *c) {
    attend_try_lse(c);
    if (attend_try_gradients(c) || attend_try_options(c) || attend_try_sights(c)) return -1;
    if (attend_try_seen(c) || attend_try_layouts(c) || attend_try_off_by_one(c)) return -1;
    if (attend_try_gathered(c) || attend_try_heads_of_ranks(c)) return -1;
    if (attend_try_hops_stale(c)) return -1;
    return c->likely_alone && !attend_is_of_hops(c) ? 0 : attend_try_hops(c);
}
#endif
