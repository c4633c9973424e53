/* SPDX-License-Identifier: MIT OR Unlicense */
/* reference_logprobs.h - whether a rank's side tensors, ref_logp and old_logp, are those of its
 * tokens. The row alone shows two mistakes: ranks have the same numbers for different tokens;
 * or the numbers are logp of other tokens, while the policy is still the model they are of. */
#ifndef ORACLE_REFERENCE_LOGPROBS_H
#define ORACLE_REFERENCE_LOGPROBS_H
#include "policy.h"
#include "oracle/verdict/verdict.h"

enum { SIDE_SHOWS = 3 }; /* least count of different numbers for a verdict */

/* Count of different numbers; token, from: of the first; at: the last number. */
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
    return 0;
}

/* first: the sequence's first rank. */
static inline int check_sides(verdict *v, const dump_row *row, int64_t first) {
    return side_is_wrong(v, row, "ref_logp", row->ref_logp, row->unit.ref_logp, first) ||
           side_is_wrong(v, row, "old_logp", row->old_logp, row->unit.old_logp, first);
}
#endif
