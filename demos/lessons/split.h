/* SPDX-License-Identifier: MIT OR Unlicense */
/* split.h - rows of the lessons, split over ranks by the library. */
#ifndef LESSON_SPLIT_H
#define LESSON_SPLIT_H
#include <stdlib.h>
#include "seqpar.h"

enum { SPLIT_TOKENS = 16, SPLIT_RANKS = 4 };

/* Who holds which token of one row. A rank's tokens are in the order in which it holds them. */
typedef struct lesson_split {
    int64_t tokens, ranks;
    int64_t holder[SPLIT_TOKENS];
    int64_t count[SPLIT_RANKS], held[SPLIT_RANKS][SPLIT_TOKENS];
} lesson_split;

static inline void lesson_stop(const seqpar_error *error) {
    fprintf(stderr, "error: %s\n", error->text);
    exit(1);
}

static inline void hold(lesson_split *s, int64_t rank, int64_t token) {
    s->holder[token] = rank;
    s->held[rank][s->count[rank]++] = token;
}

static inline lesson_split split_row(int layout, int64_t tokens, int64_t ranks) {
    int64_t cu_seqlens[] = {0, tokens};
    seqpar_row row = {.tokens = tokens, .cell = 1, .docs = 1, .cu_seqlens = cu_seqlens};
    lesson_split s = {.tokens = tokens, .ranks = ranks};
    for (int64_t rank = 0; rank < ranks; rank++) {
        seqpar_split_desc desc = {layout, ranks, rank};
        seqpar_error error = {0};
        seqpar_share share;
        if (seqpar_split(&error, &share, &row, 1, &desc)) lesson_stop(&error);
        for (int64_t i = 0; i < share.count; i++)
            for (int64_t t = 0; t < share.pieces[i].count; t++)
                hold(&s, rank, share.pieces[i].start + t * share.pieces[i].stride);
        seqpar_share_free(&share);
    }
    return s;
}

/* "0-1 14-15" */
static inline const char *held_text(char *text, size_t size, const lesson_split *s,
                                    int64_t rank) {
    const int64_t *held = s->held[rank], count = s->count[rank];
    size_t at = 0;
    text[0] = 0;
    for (int64_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count && held[end] == held[end - 1] + 1; end++) {
        }
        at += (size_t)snprintf(text + at, size - at, end - i > 1 ? "%s%d-%d" : "%s%d",
                               i ? " " : "", (int)held[i], (int)held[end - 1]);
    }
    return text;
}

/* Query-key pairs of a rank in causal attention over one document: a token sees itself and all
   before it. */
static inline int64_t pairs_of(const lesson_split *s, int64_t rank) {
    int64_t pairs = 0;
    for (int64_t i = 0; i < s->count[rank]; i++) pairs += s->held[rank][i] + 1;
    return pairs;
}
#endif
