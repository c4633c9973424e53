/* SPDX-License-Identifier: MIT OR Unlicense */
/* quiz.h - wrong steps for the lessons (demos/lessons): `gen --quiz N` makes one without naming its
 * mistake, `explain --quiz N` names it. Lessons 3, 4, 5 and 7 have three each. */
#ifndef ORACLE_QUIZ_H
#define ORACLE_QUIZ_H
#include "synthetic.h"

typedef struct quiz {
    int lesson;
    const char *mistake;
    int64_t dp, tokens, docs;
} quiz;

/* Two ranks share a row, zigzag. The lessons plant other mistakes than these. */
static const quiz quizzes[] = {
    {3, "labels_cross_documents", 1, 14, 3},
    {3, "labels_shifted_twice", 1, 14, 1},
    {3, "labels_not_shifted", 1, 14, 3},
    {4, "all_tokens_counted", 1, 24, 3},
    {4, "own_mean_alone", 1, 24, 3},
    {4, "mean_over_sequences", 1, 24, 3},
    {5, "times_sp", 1, 14, 3},
    {5, "times_dp", 3, 14, 3},
    {5, "over_sp_squared", 1, 14, 3},
    {7, "dk_dv_swapped", 1, 14, 1},
    {7, "dq_scale_missing", 1, 14, 1},
    {7, "kv_group_not_summed", 1, 14, 1},
};
enum { QUIZZES = sizeof quizzes / sizeof *quizzes };

/* number: from 1 on; NULL: there is no such quiz. */
static inline const quiz *quiz_at(int64_t number) {
    return number >= 1 && number <= QUIZZES ? &quizzes[number - 1] : NULL;
}

static inline made_desc quiz_desc(const quiz *q, const char *out) {
    return (made_desc){.out = out,
                       .layout = "zigzag",
                       .objective = "sft",
                       .mistake = q->mistake,
                       .sp = 2,
                       .dp = q->dp,
                       .accumulation = 1,
                       .tokens = q->tokens,
                       .docs = q->docs,
                       .seed = 1 + (q - quizzes)};
}
#endif
