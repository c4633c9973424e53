/* SPDX-License-Identifier: MIT OR Unlicense */
/* reference_logprobs.h - whether a rank's side tensors, ref_logp and old_logp, are those of its
 * tokens. The row alone shows two mistakes: ranks have the same numbers for different tokens;
 * or the numbers are logp of other tokens. The second shows only while the policy is still, or
 * nearly, the model that gave the numbers. */
#ifndef ORACLE_REFERENCE_LOGPROBS_H
#define ORACLE_REFERENCE_LOGPROBS_H
#include "policy.h"
#include "oracle/verdict/verdict.h"

enum { SIDE_SHOWS = 3 }; /* least count of different numbers for a verdict */

/* count: of different numbers; token, from: the first one's token, and the token whose number
   it has; at: the last number. */
typedef struct side_seen {
    int64_t count, token, from;
    double at;
} side_seen;

static inline void side_see(side_seen *s, double x, int64_t token, int64_t from) {
    if (s->count && x == s->at) return;
    if (!s->count++) {
        s->token = token;
        s->from = from;
    }
    s->at = x;
}

/* Whether every rank has the same numbers as the first rank, local row by local row: each took
   the first n of the row. Local rows without a target may hold anything. */
static inline int side_is_alike(const dump_row *row, const double *x, int64_t first,
                                side_seen *seen) {
    for (int64_t t = 0; t < row_end(row); t++) {
        int64_t other = row->rank[t] > first ? row->order[row->local[t]] : -1;
        if (other < 0 || row->rank[other] != first) continue;
        if (!row_supervised(row, t) || !row_supervised(row, other)) continue;
        if (x[t] != x[other]) return 0;
        if (row->logp[t] != row->logp[other]) side_see(seen, x[t], t, other);
    }
    return seen->count >= SIDE_SHOWS;
}

/* Whether each number is logp of the token that row_source gives for `source`. */
static inline int side_is_from(const dump_row *row, const double *x, double unit, int source,
                               side_seen *seen) {
    double limit = 1e-4 + 2 * unit + 2 * row->unit.logp;
    for (int64_t t = 0; t < row_end(row); t++) {
        int64_t from = row_supervised(row, t) ? row_source(row, source, t) : -1;
        if (from < 0 || !row_supervised(row, from)) continue;
        if (!(fabs(x[t] - row->logp[from]) <= limit * fabs(row->logp[from]))) return 0;
        if (fabs(row->logp[t] - row->logp[from]) > 3 * limit * fabs(row->logp[from]))
            side_see(seen, x[t], t, from);
    }
    return seen->count >= SIDE_SHOWS;
}

static inline void side_say(verdict *v, const dump_row *row, const char *name,
                            const side_seen *seen, const char *what) {
    char place[160];
    memset(v, 0, sizeof *v);
    v->kind = VERDICT_WRONG;
    verdict_name(v, mistake_named("side_tensor_not_split"));
    verdict_say(v, "%s: %s of token %lld, first at %s", name, what, (long long)seen->from,
                place_text(place, sizeof place, row, seen->token));
}

/* ---- numbers that are near those of other tokens ---- */

/* A policy that has hardly moved has nearly its old log-probs. If the numbers are much nearer
   to logp of other tokens than to logp of their own, they stand at wrong tokens. */
enum { NEAR_BEFORE, NEAR_AFTER, NEAR_ORDER, NEAR_GATHERED, NEARS, NEAR_SHOWS = 8 };
static const struct {
    const char *name, *how;
} nears[NEARS] = {
    {"old_log_probs_shifted", "as a shift by one has it, the number of the token before"},
    {"old_log_probs_shifted", "as a shift by one has it, the number of the token behind"},
    {"gathered_in_rank_order",
     "it was gathered one rank behind the other and cut as if it were in the row's order"},
    {"gathered_in_rank_order", "it is in the row's order where ranks' shares are meant"}};

/* by: 0, 1 or -1, added to the token that a rank order gives. Packages differ in where
   they cut a row whose length is not divisible by the number of pieces. */
static inline int64_t near_source(const dump_row *row, int near, int64_t by, int64_t t) {
    int64_t from = near == NEAR_BEFORE  ? t - 1
                   : near == NEAR_AFTER ? t + 1
                   : near == NEAR_ORDER ? row->order[t] + by
                                        : row->gathered[t] + by;
    return from >= 0 && from < row_end(row) && row_supervised(row, from) ? from : -1;
}

/* Counts the tokens for which near_source gives another token. *nearer: how many of these have
   a number over three times nearer to logp of that token than to their own logp. */
static inline int64_t near_tokens(const dump_row *row, const double *x, int near, int64_t by,
                                  int64_t *nearer) {
    int64_t count = 0;
    *nearer = 0;
    for (int64_t t = 0; t < row_end(row); t++) {
        int64_t from = row_supervised(row, t) ? near_source(row, near, by, t) : -1;
        if (from < 0 || from == t) continue;
        *nearer += 3 * fabs(x[t] - row->logp[from]) < fabs(x[t] - row->logp[t]);
        count++;
    }
    return count;
}

/* Four fifths must be nearer, not all: if the row was cut at slightly other tokens than assumed
   here, some are not. */
static inline int side_is_near_others(verdict *v, const dump_row *row, const char *name,
                                      const double *x) {
    for (int i = 0; i < 3 * NEARS; i++) {
        int near = i % NEARS;
        int64_t nearer, by = i < NEARS ? 0 : i < 2 * NEARS ? 1 : -1;
        int64_t count = by && near < NEAR_ORDER ? 0 : near_tokens(row, x, near, by, &nearer);
        if (count < NEAR_SHOWS || 5 * nearer < 4 * count) continue;
        memset(v, 0, sizeof *v);
        v->kind = VERDICT_WRONG;
        verdict_name(v, mistake_named(nears[near].name));
        verdict_say(v,
                    "%s: %s; %lld of %lld numbers are nearer to logp there than to their own",
                    name, nears[near].how, (long long)nearer, (long long)count);
        return 1;
    }
    return 0;
}

/* ---- numbers that are those of other tokens, within what a policy moves ---- */

/* Least numbers of another order; least tokens of a block; most of a row that is searched. */
enum { RUN_SHOWS = 6, BLOCK_SHOWS = 4, BLOCK_ROW = 8192 };

/* How far a policy that has hardly moved may be from its old log-prob. */
static inline double near_limit(double logp) { return 0.1 + 0.02 * fabs(logp); }

static inline int near_is(const dump_row *row, const double *x, int64_t t, int64_t from) {
    return fabs(x[t] - row->logp[from]) <= near_limit(row->logp[from]);
}

/* Counts the tokens of [first, end) whose logp tells them from the token that near_source gives.
   *found: how many of them have the number of that token. Half of near_limit: a piece may have
   few numbers. */
static inline int64_t near_run(const dump_row *row, const double *x, int near, int64_t by,
                               int64_t first, int64_t end, int64_t *found) {
    int64_t count = 0;
    *found = 0;
    for (int64_t t = first; t < end; t++) {
        int64_t from = row_supervised(row, t) ? near_source(row, near, by, t) : -1;
        if (from < 0) continue;
        double limit = near_limit(row->logp[from]);
        if (fabs(row->logp[from] - row->logp[t]) <= limit) continue;
        *found += fabs(x[t] - row->logp[from]) <= limit / 2;
        count++;
    }
    return count;
}

/* How often a number is near logp of a token that it has nothing to do with. */
static inline double near_chance(const dump_row *row, const double *x) {
    static const int64_t apart[] = {3, 5, 7, 11, 13, 17, 19, 23};
    double near = 1, all = 2;
    for (int64_t t = 0; t < row_end(row); t++)
        for (int i = 0; i < 16; i++) {
            int64_t from = t + (i < 8 ? apart[i] : -apart[i - 8]);
            if (from < 0 || from >= row_end(row)) continue;
            if (!row_supervised(row, t) || !row_supervised(row, from)) continue;
            near += fabs(x[t] - row->logp[from]) <= near_limit(row->logp[from]) / 2;
            all++;
        }
    return near / all;
}

/* Whether so many numbers would be found by chance less than once in 100,000 rows: each piece
   has three ways to lie. */
static inline int pieces_show(const dump_row *row, const double *x, int64_t found,
                              int64_t count, int64_t pieces) {
    double n = (double)count, k = (double)found;
    double ways = lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) + (double)pieces * log(3);
    return found >= RUN_SHOWS && 5 * found >= 4 * count &&
           ways + k * log(near_chance(row, x)) < log(1e-5);
}

/* The end of the tokens from `first` on that come one behind the other in a rank order, too. */
static inline int64_t near_run_end(const dump_row *row, const int64_t *order, int64_t first) {
    int64_t t = first + 1;
    while (t < row_end(row) && order[t] == order[t - 1] + 1) t++;
    return t;
}

/* Whether the numbers are in a rank order whose pieces end one token before or behind those of
   this row, each piece for itself: a length that is not divisible is cut in several ways. */
static inline int side_is_in_pieces(verdict *v, const dump_row *row, const char *name,
                                    const double *x) {
    for (int near = NEAR_ORDER; near < NEARS; near++) {
        const int64_t *order = near == NEAR_ORDER ? row->order : row->gathered;
        int64_t count = 0, found = 0, pieces = 0;
        for (int64_t t = 0, end; t < row_end(row); t = end, pieces++) {
            int64_t most = 0, at = 0;
            end = near_run_end(row, order, t);
            for (int64_t by = -1; by <= 1; by++) {
                int64_t in, of = near_run(row, x, near, by, t, end, &in);
                if (by == -1 || in > most || (in == most && of < at)) most = in, at = of;
            }
            found += most;
            count += at;
        }
        if (!pieces_show(row, x, found, count, pieces)) continue;
        memset(v, 0, sizeof *v);
        v->kind = VERDICT_WRONG;
        verdict_name(v, mistake_named(nears[near].name));
        verdict_say(v,
                    "%s: %s; %lld of %lld numbers are those of other places, each piece up to "
                    "one token before or behind this row's",
                    name, nears[near].how, (long long)found, (long long)count);
        return 1;
    }
    return 0;
}

/* ---- blocks in other places, in whatever order ---- */

/* Marks the tokens of blocks whose numbers are near logp of the tokens `by` further. A block
   has BLOCK_SHOWS supervised tokens or more. */
static inline void blocks_mark(const dump_row *row, const double *x, int64_t by, char *in) {
    int64_t first = 0, count = 0, end = row_end(row);
    for (int64_t t = 0; t <= end; t++) {
        int64_t from = t + by;
        int other = t == end || from < 0 || from >= end;
        if (!other && (!row_supervised(row, t) || !row_supervised(row, from))) continue;
        if (!other && near_is(row, x, t, from)) {
            if (!count++) first = t;
            continue;
        }
        for (int64_t i = first; count >= BLOCK_SHOWS && i < t; i++) in[i] = 1;
        count = 0;
    }
}

/* Whether four fifths of the numbers that are far from logp of their own token are in blocks
   that match logp elsewhere in the row: then the tensor was gathered or split in an order that
   is not the row's. */
static inline int side_is_in_blocks(verdict *v, const dump_row *row, const char *name,
                                    const double *x) {
    int64_t end = row_end(row), far = 0, found = 0;
    char *in = end <= BLOCK_ROW ? (char *)calloc((size_t)end + 1, 1) : NULL;
    if (!in) return 0;
    for (int64_t by = 1 - end; by < end; by++)
        if (by) blocks_mark(row, x, by, in);
    for (int64_t t = 0; t < end; t++) {
        if (!row_supervised(row, t) ||
            fabs(x[t] - row->logp[t]) <= 3 * near_limit(row->logp[t]))
            continue;
        far++;
        found += in[t];
    }
    free(in);
    if (far < NEAR_SHOWS || 5 * found < 4 * far) return 0;
    memset(v, 0, sizeof *v);
    v->kind = VERDICT_WRONG;
    verdict_name(v, mistake_named("gathered_in_rank_order"));
    verdict_say(
        v,
        "%s: of %lld numbers far from logp of their token, %lld stand in blocks that are "
        "those of other places in the row",
        name, (long long)far, (long long)found);
    return 1;
}

/* 1 with a verdict if the tensor has the numbers of other tokens, else 0. */
static inline int side_is_wrong(verdict *v, const dump_row *row, const char *name,
                                const double *x, double unit, int64_t first) {
    side_seen seen = {0};
    if (!x || !row->logp || !row->labels) return 0;
    if (side_is_alike(row, x, first, &seen)) {
        side_say(v, row, name, &seen, "ranks have the same for different tokens, that");
        return 1;
    }
    for (int source = 0; source < SOURCES; source++) {
        memset(&seen, 0, sizeof seen);
        if (!side_is_from(row, x, unit, source, &seen)) continue;
        side_say(v, row, name, &seen, "it is logp");
        verdict_say(v, "%s", source_texts[source]);
        return 1;
    }
    return side_is_near_others(v, row, name, x) || side_is_in_pieces(v, row, name, x) ||
           side_is_in_blocks(v, row, name, x);
}

/* first: the sequence's first rank. */
static inline int check_sides(verdict *v, const dump_row *row, int64_t first) {
    return side_is_wrong(v, row, "ref_logp", row->ref_logp, row->unit.ref_logp, first) ||
           side_is_wrong(v, row, "old_logp", row->old_logp, row->unit.old_logp, first);
}
#endif
