/* SPDX-License-Identifier: MIT OR Unlicense */
/* rows.h - a row of tokens put together from the ranks that share it. */
#ifndef ORACLE_ROWS_H
#define ORACLE_ROWS_H
#include "dump.h"

/* What was wrong with index. */
typedef struct dump_places {
    int64_t held;                          /* tokens of all ranks */
    int64_t outside, twice, missing;       /* how many */
    int64_t rank, local, token, other;     /* the first of them; other: who else holds it */
} dump_places;

static inline void dump_row_free(dump_row *row) {
    free(row->cu_seqlens);
    free(row->rank);
    free(row->local);
    free(row->next);
    free(row->ids);
    free(row->positions);
    free(row->labels);
    free(row->logp);
    free(row->ref_logp);
}

/* How many of this replica's ranks have the tensor; *tokens: elements of all. */
static inline int64_t dump_count(const dump *d, int64_t dp, int64_t micro, const char *what,
                                 int64_t *tokens) {
    int64_t have = 0;
    for (int64_t r = dp * d->sp; r < (dp + 1) * d->sp; r++) {
        const seqpar_safetensors_tensor *t = dump_find(d, r, micro, what);
        have += t != NULL;
        *tokens += t ? t->count : 0;
    }
    return have;
}

static inline void dump_misplaced(dump_places *found, int64_t rank, int64_t local,
                                  int64_t token, int64_t other) {
    if (!(found->outside + found->twice)) {
        found->rank = rank;
        found->local = local;
        found->token = token;
        found->other = other;
    }
    if (other >= 0)
        found->twice++;
    else
        found->outside++;
}

/* The tokens of one rank, row by row. */
static inline void dump_place_rank(dump_row *row, int64_t rank, const int64_t *index,
                                   int64_t count, dump_places *found) {
    int64_t last = -1;
    for (int64_t i = 0; i < count; i++) {
        int64_t at = index[i];
        if (at < 0 || at >= row->tokens || row->rank[at] >= 0) {
            int inside = at >= 0 && at < row->tokens;
            dump_misplaced(found, rank, i, at, inside ? row->rank[at] : -1);
            continue;
        }
        row->rank[at] = rank;
        row->local[at] = i;
        row->next[at] = -1;
        if (last >= 0) row->next[last] = at;
        last = at;
    }
}

/* Who holds which token, by index. 0, or -1 with d->error. */
static inline int dump_place(dump *d, int64_t dp, int64_t micro, dump_row *row,
                             dump_places *found) {
    size_t bytes = (size_t)(row->tokens + 1) * sizeof *row->rank;
    row->rank = (int64_t *)malloc(bytes);
    row->local = (int64_t *)calloc(bytes, 1);
    row->next = (int64_t *)malloc(bytes);
    if (!row->rank || !row->local || !row->next)
        return seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for a row"), -1;
    for (int64_t t = 0; t < row->tokens; t++) row->rank[t] = row->next[t] = -1;
    for (int64_t r = dp * d->sp; r < (dp + 1) * d->sp; r++) {
        const seqpar_safetensors_tensor *t = dump_find(d, r, micro, "index");
        int64_t *index = t ? dump_integers(d, r, t) : NULL;
        if (!index && t) return -1;
        if (index) dump_place_rank(row, r, index, t->count, found);
        free(index);
    }
    for (int64_t t = row->tokens - 1; t >= 0; t--)
        if (row->rank[t] < 0) {
            found->missing++;
            if (!(found->outside + found->twice)) found->token = t;
        }
    return 0;
}

static inline int dump_sizes_differ(dump *d, int64_t rank, int64_t micro, const char *what,
                                    const seqpar_safetensors_tensor *t,
                                    const seqpar_safetensors_tensor *index) {
    if (t && t->count == index->count) return 0;
    seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: tensor %lld.%s has %lld elements and %lld.index %lld; write one a "
                "token that the rank holds",
                d->ranks[rank].path, (long long)micro, what, (long long)(t ? t->count : 0),
                (long long)micro, (long long)index->count);
    return -1;
}

/* A tensor of one rank as elements of 8 bytes: int64_t or double. */
typedef void *(*dump_reader)(dump *d, int64_t rank, const seqpar_safetensors_tensor *t);
static inline void *dump_as_integers(dump *d, int64_t rank,
                                     const seqpar_safetensors_tensor *t) {
    return dump_integers(d, rank, t);
}
static inline void *dump_as_numbers(dump *d, int64_t rank, const seqpar_safetensors_tensor *t) {
    return dump_check_row(d, rank, t) ? NULL : dump_doubles(d, rank, t);
}

/* Rank r's elements to the tokens they are of. 0, or -1 with d->error. */
static inline int dump_spread(dump *d, int64_t r, int64_t micro, const char *what,
                              const dump_row *row, dump_reader read, char *to) {
    const seqpar_safetensors_tensor *t = dump_find(d, r, micro, what);
    const seqpar_safetensors_tensor *index = dump_find(d, r, micro, "index");
    char *own;
    if (dump_sizes_differ(d, r, micro, what, t, index) || !(own = (char *)read(d, r, t)))
        return -1;
    for (int64_t n = 0; n < row->tokens; n++)
        if (row->rank[n] == r) memcpy(to + 8 * n, own + 8 * row->local[n], 8);
    free(own);
    return 0;
}

/* A tensor of all ranks, by token; a token that nobody holds has `fill`. NULL where no rank has
   one, or with d->error. */
static inline void *dump_gather(dump *d, int64_t dp, int64_t micro, const char *what,
                                const dump_row *row, dump_reader read, const void *fill) {
    int64_t elements = 0, r = dp * d->sp, last = r + d->sp;
    char *out;
    if (d->error.status || !dump_count(d, dp, micro, what, &elements)) return NULL;
    out = (char *)malloc((size_t)(row->tokens + 1) * 8);
    if (!out) seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for a row");
    for (int64_t t = 0; out && t < row->tokens; t++) memcpy(out + 8 * t, fill, 8);
    while (out && r < last && !dump_spread(d, r, micro, what, row, read, out)) r++;
    if (!d->error.status) return out;
    free(out);
    return NULL;
}

static inline int64_t *dump_gather_integers(dump *d, int64_t dp, int64_t micro,
                                            const char *what, const dump_row *row,
                                            int64_t fill) {
    return (int64_t *)dump_gather(d, dp, micro, what, row, dump_as_integers, &fill);
}

static inline double *dump_gather_numbers(dump *d, int64_t dp, int64_t micro, const char *what,
                                          const dump_row *row) {
    double none = 0;
    return (double *)dump_gather(d, dp, micro, what, row, dump_as_numbers, &none);
}

/* Whether another rank says otherwise where documents begin: then with d->error. */
static inline int dump_documents_differ(dump *d, int64_t rank, int64_t micro,
                                        const dump_row *row) {
    const seqpar_safetensors_tensor *t = dump_find(d, rank, micro, "cu_seqlens");
    int64_t *own = t ? dump_integers(d, rank, t) : NULL;
    if (own && (t->count != row->docs + 1 ||
                memcmp(own, row->cu_seqlens, (size_t)t->count * sizeof *own)))
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor %s is not that of another rank of the sequence; write "
                    "where documents begin in the whole row, on every rank",
                    d->ranks[rank].path, t->name);
    free(own);
    return d->error.status != 0;
}

/* Where documents begin, as all ranks say that say so. */
static inline int dump_documents(dump *d, int64_t dp, int64_t micro, dump_row *row) {
    const seqpar_safetensors_tensor *t = NULL;
    int64_t r = dp * d->sp, last = (dp + 1) * d->sp;
    while (r < last && !(t = dump_find(d, r, micro, "cu_seqlens"))) r++;
    if (!t) return 0;
    if (!(row->cu_seqlens = dump_integers(d, r, t))) return -1;
    row->docs = t->count - 1;
    if (row->docs < 1 || row->cu_seqlens[row->docs] > DUMP_TOKENS_MAX) {
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor %s has %lld elements and ends with %lld; it has one more "
                    "than there are documents, and a row has at most %d tokens",
                    d->ranks[r].path, t->name, (long long)t->count,
                    (long long)(t->count ? row->cu_seqlens[row->docs] : 0), DUMP_TOKENS_MAX);
        return -1;
    }
    for (int64_t i = 0; i < t->count; i++)
        if (row->cu_seqlens[i] < 0 || (i ? row->cu_seqlens[i] < row->cu_seqlens[i - 1]
                                         : row->cu_seqlens[0] != 0)) {
            seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                        "%.300s: tensor %s has %lld at %lld; it begins with 0 and never falls",
                        d->ranks[r].path, t->name, (long long)row->cu_seqlens[i], (long long)i);
            return -1;
        }
    if (row->cu_seqlens[row->docs] > row->tokens) row->tokens = row->cu_seqlens[row->docs];
    for (r++; r < last; r++)
        if (dump_documents_differ(d, r, micro, row)) return -1;
    return 0;
}

/* All that the dump has of micro-batch `micro` of replica `dp`. 0, or -1 with d->error. To be
   freed in either case. */
static inline int dump_read_row(dump *d, int64_t dp, int64_t micro, dump_row *row,
                                dump_places *found) {
    int64_t have;
    memset(row, 0, sizeof *row);
    memset(found, 0, sizeof *found);
    have = dump_count(d, dp, micro, "index", &found->held);
    row->tokens = found->held;
    if (have && (have < d->sp || row->tokens > DUMP_TOKENS_MAX)) {
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: %lld.index is on %lld of the %lld ranks that share a sequence, "
                    "with %lld tokens; write it on all, with at most %d",
                    d->ranks[dp * d->sp].path, (long long)micro, (long long)have,
                    (long long)d->sp, (long long)row->tokens, DUMP_TOKENS_MAX);
        return -1;
    }
    if (!have) return 0; /* nobody knows where a token belongs */
    if (dump_documents(d, dp, micro, row) || dump_place(d, dp, micro, row, found)) return -1;
    row->ids = dump_gather_integers(d, dp, micro, "ids", row, 0);
    row->positions = dump_gather_integers(d, dp, micro, "positions", row, 0);
    row->labels = dump_gather_integers(d, dp, micro, "labels", row, DUMP_IGNORE);
    row->logp = dump_gather_numbers(d, dp, micro, "logp", row);
    row->ref_logp = dump_gather_numbers(d, dp, micro, "ref_logp", row);
    return d->error.status ? -1 : 0;
}
#endif
