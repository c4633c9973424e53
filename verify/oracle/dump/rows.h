/* SPDX-License-Identifier: MIT OR Unlicense */
/* rows.h - a row of tokens put together from the ranks that share it. */
#ifndef ORACLE_ROWS_H
#define ORACLE_ROWS_H
#include "dump.h"
#include "roundings.h"

/* Errors in A.index of a row's ranks. */
typedef struct dump_places {
    int64_t held;                      /* tokens of all ranks */
    int64_t outside, twice, missing;   /* how many */
    int64_t rank, local, token, other; /* the first error; other: the token's first rank */
} dump_places;

/* Tensors that are read as doubles, and the fields of dump_row for numbers and unit. */
static const struct {
    const char *name;
    size_t at, unit;
    int of_documents;
} row_numbers[] = {
    {"logp", offsetof(dump_row, logp), offsetof(dump_row, unit.logp), 0},
    {"ref_logp", offsetof(dump_row, ref_logp), offsetof(dump_row, unit.ref_logp), 0},
    {"old_logp", offsetof(dump_row, old_logp), offsetof(dump_row, unit.old_logp), 0},
    {"advantages", offsetof(dump_row, advantages), offsetof(dump_row, unit.advantages), 0},
    {"values", offsetof(dump_row, values), offsetof(dump_row, unit.values), 0},
    {"weights", offsetof(dump_row, weights), offsetof(dump_row, unit.weights), 0},
    {"mean_logp", offsetof(dump_row, mean_logp), offsetof(dump_row, unit.mean_logp), 0},
    {"logits_lse", offsetof(dump_row, logits_lse), offsetof(dump_row, unit.logits_lse), 0},
    {"entropy", offsetof(dump_row, entropy), offsetof(dump_row, unit.entropy), 0},
    {"returns", offsetof(dump_row, returns), offsetof(dump_row, unit.returns), 0},
    {"old_values", offsetof(dump_row, old_values), offsetof(dump_row, unit.old_values), 0},
    {"token_rewards", offsetof(dump_row, token_rewards), offsetof(dump_row, unit.token_rewards),
     0},
    {"scores", offsetof(dump_row, scores), offsetof(dump_row, unit.scores), 1},
    {"rewards", offsetof(dump_row, rewards), offsetof(dump_row, unit.rewards), 1},
    {"desirable", offsetof(dump_row, desirable), offsetof(dump_row, unit.desirable), 1},
    {"margins", offsetof(dump_row, margins), offsetof(dump_row, unit.margins), 1},
    {"kl", offsetof(dump_row, kl), offsetof(dump_row, unit.kl), 1}};
enum { ROW_NUMBERS = sizeof row_numbers / sizeof *row_numbers };

static inline double **row_number(dump_row *row, int i) {
    return (double **)((char *)row + row_numbers[i].at);
}

static inline void dump_row_free(dump_row *row) {
    int64_t *integers[] = {row->cu_seqlens, row->used,     row->rank,  row->local,
                           row->next,       row->gathered, row->order, row->ids,
                           row->positions,  row->labels,   row->groups};
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) free(integers[i]);
    for (int i = 0; i < ROW_NUMBERS; i++) free(*row_number(row, i));
}

/* ---- a row, once it is read ---- */

/* The document of a token; row->docs: none, the token is padding after the last document. */
static inline int64_t row_document(const dump_row *row, int64_t token) {
    int64_t low = 0, high = row->docs;
    while (low < high) {
        int64_t mid = (low + high) / 2;
        if (row->cu_seqlens[mid + 1] <= token)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static inline int64_t row_document_begin(const dump_row *row, int64_t token) {
    return row->docs ? row->cu_seqlens[row_document(row, token)] : 0;
}

/* Whether the ranks write the row, and hold no token of it. */
static inline int row_is_empty(const dump_row *row) { return row->rank && !row->tokens; }

static inline int64_t row_end(const dump_row *row) { /* tokens from here on are padding */
    return row->docs ? row->cu_seqlens[row->docs] : row->tokens;
}

static inline int row_supervised(const dump_row *row, int64_t token) {
    return row->rank[token] >= 0 && row->labels && row->labels[token] != DUMP_IGNORE;
}

/* Where a token is, as text for messages. Padding is said to be of the last document. */
static inline const char *place_text(char *text, size_t size, const dump_row *row,
                                     int64_t token) {
    int64_t document = row_document(row, token);
    if (document && document == row->docs) document--;
    snprintf(text, size, "rank %lld, local row %lld, token %lld, document %lld",
             (long long)row->rank[token], (long long)row->local[token], (long long)token,
             (long long)document);
    return text;
}

/* ---- reading a row ---- */

/* How many of this replica's ranks have the tensor; adds their elements to *tokens. */
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

/* Enters one rank's tokens in the row; begin: the number of tokens on the ranks before it. */
static inline void dump_place_rank(dump_row *row, int64_t rank, const int64_t *index,
                                   int64_t count, int64_t begin, dump_places *found) {
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
        row->gathered[at] = begin + i;
        row->order[begin + i] = at;
        if (last >= 0) row->next[last] = at;
        last = at;
    }
}

/* Fills rank, local, next, gathered and order of the row from A.index of all ranks. Errors in
   index go to found, to be judged; 0, or -1 with d->error if it cannot be read. */
static inline int dump_place(dump *d, int64_t dp, int64_t micro, dump_row *row,
                             dump_places *found) {
    size_t bytes = (size_t)(row->tokens + 1) * sizeof *row->rank;
    int64_t **each[] = {&row->rank, &row->local, &row->next, &row->gathered, &row->order};
    int64_t begin = 0;
    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        *each[i] = (int64_t *)malloc(bytes);
        if (!*each[i])
            return seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for a row"), -1;
        memset(*each[i], each[i] == &row->local ? 0 : -1, bytes);
    }
    for (int64_t r = dp * d->sp; r < (dp + 1) * d->sp; r++) {
        const seqpar_safetensors_tensor *t = dump_find(d, r, micro, "index");
        int64_t *index = t ? dump_integers(d, r, t) : NULL;
        if (!index && t) return -1;
        if (index) dump_place_rank(row, r, index, t->count, begin, found);
        begin += t ? t->count : 0;
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
                "%.300s: tensor %lld.%s has %lld elements and %lld.index %lld; write one "
                "element for each token of the rank",
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

/* Copies rank r's elements to `to`, at their tokens in the row. 0, or -1 with d->error. */
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

/* A tensor of all ranks, in order of the row's tokens; a token that no rank holds has `fill`.
   NULL: no rank has the tensor, or d->error is set. */
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

/* Offsets of documents in a row, as cu_seqlens has them. */
typedef struct row_offsets {
    int64_t *at; /* (docs + 1), allocated; NULL: not in the dump */
    int64_t docs;
} row_offsets;

/* Whether this rank's tensor differs from the row's, or cannot be read: sets d->error. */
static inline int dump_offsets_differ(dump *d, int64_t rank, int64_t micro, const char *what,
                                      const row_offsets *of) {
    const seqpar_safetensors_tensor *t = dump_find(d, rank, micro, what);
    int64_t *own = t ? dump_integers(d, rank, t) : NULL;
    if (own &&
        (t->count != of->docs + 1 || memcmp(own, of->at, (size_t)t->count * sizeof *own)))
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor %s differs from that of another rank of the sequence; "
                    "write the document boundaries of the whole row, the same on every rank",
                    d->ranks[rank].path, t->name);
    free(own);
    return d->error.status != 0;
}

/* Whether the offsets are 0 alone, and no rank holds a token: a replica without a row, as
   dynamic batches leave one. */
static inline int is_of_nothing(const row_offsets *of, int64_t tokens) {
    return of->docs == 0 && of->at[0] == 0 && !tokens;
}

/* Reads the tensor, which is the same on all ranks that have it. tokens: that ranks hold. 0, or -1
   with d->error; of->at is to be freed in either case. */
static inline int dump_offsets(dump *d, int64_t dp, int64_t micro, const char *what,
                               int64_t tokens, row_offsets *of) {
    const seqpar_safetensors_tensor *t = NULL;
    int64_t r = dp * d->sp, last = (dp + 1) * d->sp;
    while (r < last && !(t = dump_find(d, r, micro, what))) r++;
    if (!t) return 0;
    if (!(of->at = dump_integers(d, r, t))) return -1;
    of->docs = t->count - 1;
    if ((of->docs < 1 && !(t->count && is_of_nothing(of, tokens))) ||
        of->at[of->docs] > DUMP_TOKENS_MAX) {
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor %s has %lld elements and ends with %lld; write one element "
                    "more than there are documents, the last at most %d",
                    d->ranks[r].path, t->name, (long long)t->count,
                    (long long)(t->count ? of->at[of->docs] : 0), DUMP_TOKENS_MAX);
        return -1;
    }
    for (int64_t i = 0; i < t->count; i++)
        if (of->at[i] < 0 || (i ? of->at[i] < of->at[i - 1] : of->at[0] != 0)) {
            seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                        "%.300s: tensor %s has %lld at element %lld; write offsets that begin "
                        "with 0 and never decrease",
                        d->ranks[r].path, t->name, (long long)of->at[i], (long long)i);
            return -1;
        }
    for (r++; r < last; r++)
        if (dump_offsets_differ(d, r, micro, what, of)) return -1;
    return 0;
}

/* Reads cu_seqlens and boundaries; where both are there, boundaries are the row's documents. If
   these end after the last held token, the row is extended, so that missing tokens show. 0, or -1
   with d->error. */
static inline int dump_documents(dump *d, int64_t dp, int64_t micro, dump_row *row) {
    row_offsets used = {0}, meant = {0};
    int status = dump_offsets(d, dp, micro, "cu_seqlens", row->tokens, &used) ||
                 dump_offsets(d, dp, micro, "boundaries", row->tokens, &meant);
    if (!meant.at) meant = used;
    row->cu_seqlens = meant.at;
    row->docs = meant.docs;
    row->used = used.at == meant.at ? NULL : used.at;
    row->used_docs = used.docs;
    if (!status && meant.at && meant.at[meant.docs] > row->tokens)
        row->tokens = meant.at[meant.docs];
    return status ? -1 : 0;
}

/* ---- tensors of documents ---- */

static inline int dump_is_real(seqpar_safetensors_dtype dtype) {
    return dtype == SEQPAR_SAFETENSORS_F64 || dtype == SEQPAR_SAFETENSORS_F32 ||
           dtype == SEQPAR_SAFETENSORS_F16 || dtype == SEQPAR_SAFETENSORS_BF16;
}

/* Reads integers as doubles, too: rewards are often counts, and desirable is a bool. */
static inline void *dump_as_numbers_of_any(dump *d, int64_t rank,
                                           const seqpar_safetensors_tensor *t) {
    int64_t *whole;
    double *out;
    if (dump_is_real(t->dtype)) return dump_doubles(d, rank, t);
    whole = dump_integers(d, rank, t);
    out = whole ? (double *)malloc((size_t)(t->count + 1) * sizeof *out) : NULL;
    if (whole && !out) seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for a dump");
    for (int64_t i = 0; out && i < t->count; i++) out[i] = (double)whole[i];
    free(whole);
    return out;
}

/* The unit roundoff of a type: a relative error. */
static inline double dump_unit_of(seqpar_safetensors_dtype dtype) {
    return dtype == SEQPAR_SAFETENSORS_BF16  ? UNIT_BF16
           : dtype == SEQPAR_SAFETENSORS_F16 ? UNIT_F16
                                             : UNIT_F32; /* F64: computed in F32, mostly */
}

/* The largest unit of the tensor's types on the ranks of the replica. */
static inline double dump_unit(const dump *d, int64_t dp, int64_t micro, const char *what) {
    double unit = 0;
    for (int64_t r = dp * d->sp; r < (dp + 1) * d->sp; r++) {
        const seqpar_safetensors_tensor *t = dump_find(d, r, micro, what);
        if (t) unit = fmax(unit, dump_unit_of(t->dtype));
    }
    return unit;
}

/* Integers must be equal; others may differ by 1e-5, relative: ranks may compute their own. */
static inline int dump_same(const void *a, const void *b, int integers) {
    double x, y;
    if (!memcmp(a, b, 8) || integers) return !memcmp(a, b, 8);
    memcpy(&x, a, 8);
    memcpy(&y, b, 8);
    return fabs(x - y) <= 1e-5 * fmax(fabs(x), fabs(y));
}

/* Rank r's tensor of documents; NULL where it has none, or with d->error. */
static inline char *dump_documents_of(dump *d, int64_t r, int64_t micro, const char *what,
                                      const dump_row *row, dump_reader read) {
    const seqpar_safetensors_tensor *t = dump_find(d, r, micro, what);
    if (!t) return NULL;
    if (t->count == row->docs) return (char *)read(d, r, t);
    seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: tensor %s has %lld elements and its row %lld documents; write one "
                "element for each document of the whole row, on every rank",
                d->ranks[r].path, t->name, (long long)t->count, (long long)row->docs);
    return NULL;
}

/* A tensor of documents, which must be the same on all ranks that have it. NULL: no rank has
   it, there is no cu_seqlens (sets row->unread if a rank has it), or d->error is set. */
static inline void *dump_read_documents(dump *d, int64_t dp, int64_t micro, const char *what,
                                        dump_row *row, dump_reader read) {
    char *out = NULL;
    int64_t elements = 0;
    if (!row->docs) {
        row->unread |= dump_count(d, dp, micro, what, &elements) > 0;
        return NULL;
    }
    for (int64_t r = dp * d->sp; !d->error.status && r < (dp + 1) * d->sp; r++) {
        char *own = dump_documents_of(d, r, micro, what, row, read);
        int64_t i = 0;
        if (!own) continue;
        while (out && i < row->docs &&
               dump_same(out + 8 * i, own + 8 * i, read == dump_as_integers))
            i++;
        if (out && i < row->docs)
            seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                        "%.300s: tensor %lld.%s differs from another rank's of the sequence at "
                        "document %lld; write what is used for the whole document, the same on "
                        "every rank",
                        d->ranks[r].path, (long long)micro, what, (long long)i);
        if (out) free(own);
        if (!out) out = own;
    }
    if (!d->error.status) return out;
    free(out);
    return NULL;
}

/* The unit of the 16-bit type that all numbers of supervised tokens fit: they were rounded to
   it before they were written in a wider type. 0: some do not fit, or too few differ. */
static inline double row_narrow_unit(const dump_row *row, const double *x) {
    double unit = UNIT_F32, last = 0;
    int64_t different = 0;
    for (int64_t t = 0; t < row->tokens; t++) {
        double own;
        if (!row_supervised(row, t) || x[t] == 0) continue;
        own = narrow_unit(x[t]);
        if (own == 0) return 0;
        if (unit == UNIT_F32 || own == UNIT_F16) unit = own;
        different += x[t] != last;
        last = x[t];
    }
    return different >= 8 ? unit : 0;
}

static inline void row_note_unit(dump_row *row, int i, double unit) {
    if (strstr(row_numbers[i].name, "logp") && *row_number(row, i) && unit < NARROW)
        unit = fmax(unit, row_narrow_unit(row, *row_number(row, i)));
    memcpy((char *)row + row_numbers[i].unit, &unit, sizeof unit);
}

/* Reads all tensors of row_numbers. 0, or -1 with d->error. */
static inline int dump_read_numbers(dump *d, int64_t dp, int64_t micro, dump_row *row) {
    for (int i = 0; !d->error.status && i < ROW_NUMBERS; i++) {
        const char *name = row_numbers[i].name;
        *row_number(row, i) = row_numbers[i].of_documents
                                  ? (double *)dump_read_documents(d, dp, micro, name, row,
                                                                  dump_as_numbers_of_any)
                                  : dump_gather_numbers(d, dp, micro, name, row);
        if (!d->error.status) row_note_unit(row, i, dump_unit(d, dp, micro, name));
    }
    for (int64_t i = 0; !d->error.status && row->desirable && i < row->docs; i++)
        if (row->desirable[i] != 0 && row->desirable[i] != 1)
            seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                        "%.300s: tensor %lld.desirable has %g at document %lld; write 1 or 0",
                        d->ranks[dp * d->sp].path, (long long)micro, row->desirable[i],
                        (long long)i);
    return d->error.status ? -1 : 0;
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
    if (!have) return 0; /* without index, tokens cannot be put in order */
    if (dump_documents(d, dp, micro, row) || dump_place(d, dp, micro, row, found)) return -1;
    row->ids = dump_gather_integers(d, dp, micro, "ids", row, 0);
    row->positions = dump_gather_integers(d, dp, micro, "positions", row, 0);
    row->labels = dump_gather_integers(d, dp, micro, "labels", row, DUMP_IGNORE);
    if (d->error.status || dump_read_numbers(d, dp, micro, row)) return -1;
    row->groups = (int64_t *)dump_read_documents(d, dp, micro, "groups", row, dump_as_integers);
    return d->error.status ? -1 : 0;
}
#endif
