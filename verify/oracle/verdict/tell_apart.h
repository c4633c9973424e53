/* SPDX-License-Identifier: MIT OR Unlicense */
/* tell_apart.h - what to measure if several mistakes give the same number: a step in which each
 * of them gives a different number. */
#ifndef ORACLE_TELL_APART_H
#define ORACLE_TELL_APART_H
#include "verdict.h"

static const struct {
    const char *names, *step; /* names: each between blanks */
} apart[] = {
    {" mean_of_means mean_of_non_empty_means sum_of_means local_count own_mean_alone ",
     "a step whose ranks and micro-batches have unequal counts and losses"},
    {" mean_over_sequences mean_over_tokens sequence_counts_local all_tokens_counted ",
     "rows of several documents of unequal lengths, cut into unequal parts, with prompts"},
    {" shares_averaged losses_added scores_averaged scores_added kl_averaged kl_added ",
     "sp, dp and accumulation whose products all differ, such as 2, 3 and 5"},
    {" sigmoid_of_parts log_probs_averaged log_probs_added log_probs_of_one_rank "
     "reference_missing pair_swapped log_probs_by_length log_probs_not_by_length ",
     "a later step, with policy and reference apart and responses on several ranks"},
    {" kl_of_one_replica kl_clamped_before_mean kl_mean_of_means kl_not_clamped kl_missing "
     "kl_of_own_part desirable_swapped ",
     "replicas of unequal numbers of documents, with means of kl of both signs and above 0 in "
     "all"},
    {" score_of_rank_end score_of_first_token score_of_row_end score_of_padding "
     "scores_of_parts scores_of_one_rank reward_on_wrong_document ",
     "documents that begin and end within ranks, padding behind them, and unequal values"},
    {" ratio_inverted ratio_of_parts ratio_of_tokens clip_wrong_side clip_missing "
     "kl_estimator ",
     "a later pass over the samples: ratios beyond both clips, advantages of both signs"},
    {" gae_of_own_tokens gae_restarted_at_cut value_lost_at_cut gae_across_documents "
     "reward_on_every_rank reward_on_wrong_rank whitened_by_rank ",
     "several packed responses, of which a rank holds several pieces, with unequal values"},
    {" gathered_in_rank_order side_tensor_not_split ",
     "zigzag or stripe, several documents, and numbers that differ from token to token"}};

/* Writes to `names` those mistakes of the verdict that this entry's list `of` contains. */
static inline void apart_list(const verdict *v, const char *of, char *names, size_t size) {
    *names = 0;
    for (int i = 0; i < v->count; i++) {
        char name[80];
        snprintf(name, sizeof name, " %s ", v->named[i]->name);
        if (strstr(of, name) && strlen(names) + strlen(name) < size)
            snprintf(names + strlen(names), size - strlen(names), "%s%s", *names ? ", " : "",
                     v->named[i]->name);
    }
}

/* If several mistakes are named, says which step tells them apart. */
static inline void apart_say(verdict *v) {
    char names[240];
    if (v->count < 2) return;
    verdict_say(v, "%d mistakes give this number here; each gives another one in another step",
                v->count);
    for (size_t i = 0; i < sizeof apart / sizeof *apart; i++) {
        apart_list(v, apart[i].names, names, sizeof names);
        if (*names) verdict_say(v, "to tell %s apart: %s", names, apart[i].step);
    }
}
#endif
