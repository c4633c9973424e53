/* SPDX-License-Identifier: MIT OR Unlicense */
/* same_step.h - whether two dumps are of the same step. Gradients of different texts cannot be
 * compared: they differ even without a mistake. */
#ifndef ORACLE_SAME_STEP_H
#define ORACLE_SAME_STEP_H
#include "rows.h"

/* Length of a run: consecutive tokens of one document, which are compared as a whole. A shorter
   document is one run. Where a row does not say its documents, runs cross from one document into
   the next, which has another neighbour in the other dump: short runs cross seldom. */
enum { SAME_TOKENS = 16, SAME_TOKENS_ACROSS = 4 };

/* Digests of all runs of a dump, in ascending order. */
typedef struct text_runs {
    uint64_t *digests; /* (count), allocated: most */
    int64_t count, most, length;
    int unknown; /* ids are missing, or index is wrong or incomplete */
} text_runs;

static inline int digests_ascend(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static inline uint64_t run_digest(const int64_t *ids, int64_t count) {
    uint64_t digest = (uint64_t)count;
    for (int64_t i = 0; i < count; i++)
        digest = (digest ^ (uint64_t)ids[i]) * 0x9e3779b97f4a7c15u + (digest >> 29);
    return digest;
}

static inline int runs_alloc(text_runs *to, int64_t more) {
    uint64_t *room;
    if (to->count + more <= to->most) return 0;
    to->most = 2 * to->most + more;
    room = (uint64_t *)realloc(to->digests, (size_t)to->most * sizeof *room);
    if (room) to->digests = room;
    return room ? 0 : -1;
}

static inline int runs_add_row(text_runs *to, const dump_row *row) {
    int64_t docs = row->docs ? row->docs : 1;
    if (runs_alloc(to, row->tokens + docs)) return -1;
    for (int64_t d = 0; d < docs; d++) {
        int64_t begin = row->docs ? row->cu_seqlens[d] : 0;
        int64_t end = row->docs ? row->cu_seqlens[d + 1] : row->tokens;
        int64_t length = end - begin < to->length ? end - begin : to->length;
        for (int64_t t = begin; length && t + length <= end; t++)
            to->digests[to->count++] = run_digest(row->ids + t, length);
    }
    return 0;
}

/* 0, or -1 with d->error. */
static inline int runs_read(dump *d, text_runs *to) {
    int64_t rows = d->world / d->sp * d->accumulation;
    int status = 0;
    for (int64_t i = 0; !status && !to->unknown && i < rows; i++) {
        dump_row row;
        dump_places found;
        status = dump_read_row(d, i / d->accumulation, i % d->accumulation, &row, &found);
        to->unknown = !row.ids || found.missing || found.outside || found.twice ||
                      row_end(&row) > row.tokens;
        if (!status && !to->unknown && runs_add_row(to, &row)) {
            seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for the texts of a dump");
            status = -1;
        }
        dump_row_free(&row);
    }
    if (to->count) qsort(to->digests, (size_t)to->count, sizeof *to->digests, digests_ascend);
    return status;
}

static inline int64_t runs_found(const text_runs *these, const text_runs *in) {
    int64_t found = 0;
    for (int64_t i = 0; i < these->count; i++)
        found += bsearch(&these->digests[i], in->digests, (size_t)in->count,
                         sizeof *in->digests, digests_ascend) != NULL;
    return found;
}

/* 0 if at least half of the runs of either dump are in the other: a trainer that drops texts,
   or repeats them on all replicas, has only some of the wanted runs. 0 also if runs are
   unknown. Else -1 with want->error. */
static inline int same_texts(dump *d, dump *want, const text_runs *got,
                             const text_runs *wanted) {
    int64_t found;
    if (got->unknown || wanted->unknown || !got->count || !wanted->count) return 0;
    found = runs_found(got, wanted);
    if (2 * found >= got->count || 2 * runs_found(wanted, got) >= wanted->count) return 0;
    seqpar_fail(
        &want->error, SEQPAR_ERR_FILE_FORMAT,
        "%.300s: of the %lld excerpts of %d tokens in %.300s, this dump has only %lld, so the "
        "two are of different steps; give --want the same step on one rank",
        want->ranks[0].path, (long long)got->count, (int)got->length, d->ranks[0].path,
        (long long)found);
    return -1;
}

/* Whether every row has cu_seqlens, by its first rank. */
static inline int dump_says_documents(const dump *d) {
    for (int64_t rank = 0; rank < d->world; rank += d->sp)
        for (int64_t micro = 0; micro < d->accumulation; micro++)
            if (!dump_find(d, rank, micro, "cu_seqlens") &&
                !dump_find(d, rank, micro, "boundaries"))
                return 0;
    return 1;
}

/* 0, or -1 with d->error or want->error. */
static inline int same_step(dump *d, dump *want) {
    const char *step = seqpar_safetensors_metadata(d->ranks[0].file, "step");
    const char *other = seqpar_safetensors_metadata(want->ranks[0].file, "step");
    int says = dump_says_documents(d) && dump_says_documents(want);
    text_runs got = {.length = says ? SAME_TOKENS : SAME_TOKENS_ACROSS}, wanted = got;
    int status = 0;
    if (step && other && d->facts.step != want->facts.step) {
        seqpar_fail(
            &want->error, SEQPAR_ERR_FILE_FORMAT,
            "%.300s: its step is %lld, and that of %.300s is %lld; give --want the same "
            "step on one rank",
            want->ranks[0].path, (long long)want->facts.step, d->ranks[0].path,
            (long long)d->facts.step);
        return -1;
    }
    status = runs_read(d, &got) || runs_read(want, &wanted) ||
             same_texts(d, want, &got, &wanted);
    free(got.digests);
    free(wanted.digests);
    return status ? -1 : 0;
}
#endif
