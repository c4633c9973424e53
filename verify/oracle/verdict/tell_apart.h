/* SPDX-License-Identifier: MIT OR Unlicense */
/* tell_apart.h - what to measure if several mistakes give the same number, or one gives the
 * right number: a step in which each of them gives a number of its own. */
#ifndef ORACLE_TELL_APART_H
#define ORACLE_TELL_APART_H
#include "oracle/dump/dump.h"
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
    {" reward_on_masked_token gae_over_masked_tokens gae_restarted_at_mask ",
     "tokens without a label between supervised ones and behind them, whose values and rewards "
     "are not 0, and gamma or gae_lambda below 1"},
    {" gathered_in_rank_order side_tensor_not_split old_log_probs_shifted ",
     "zigzag or stripe, several documents, and numbers that differ from token to token"},
    {" baseline_of_one_replica baseline_of_batch std_missing groups_by_stride "
     "deviation_by_cancellation ",
     "groups of unequal rewards, several of them, with members on several replicas"},
    {" share_alone micro_batches_lost another_window micro_batches_counted "
     "nan_of_an_empty_rank counted_before_mask ",
     "several micro-batches of unequal counts and losses on several ranks"},
    {" nan_times_mask ", "NaN or Inf at a token without a label, and labels on every rank"},
    {" option_not_applied margin_missing ratio_of_tokens ",
     "the option above 0, and what it acts on unequal from token to token"},
    {" token_zero_ignored row_taken_for_sequence ",
     "packed rows, with token 0 among the targets"},
    {" shift_after_split labels_not_shifted labels_shifted_twice labels_cross_documents "
     "positions_local positions_run_on documents_ignored own_tokens_only looks_ahead ",
     "rows of several documents, with cuts between ranks inside trained text"},
    {" never_synchronised replicas_not_reduced sequence_not_reduced ",
     "different tokens on each rank and replica"},
    {" gradient_kept ", "the optimizer's step 2, with m. tensors"},
    {" tables_untied ", "a model whose embedding is its head, and --model"},
    {" norm_of_part norms_added norm_counts_copies norm_after_clip not_clipped "
     "clip_by_own_norm clip_before_reduction clip_turns_sign ",
     "a norm above max_norm, and ranks whose own norms differ"},
    {" decay_coupled decay_after_step decay_missing decay_groups_swapped ",
     "a weight decay above 0, and lr so large that lr times it is above rounding"},
    {" bias_correction_missing steps_counted_by_micro_batches another_step_number ",
     "one of the first steps, but not the very first"},
    {" moments_lost moments_not_scaled eps_inside_root ",
     "a later step than the first, with its moments, and eps near the gradients' size"}};

enum { APART = sizeof apart / sizeof *apart };
static const char apart_else[] =
    "a longer text of several documents on more ranks, with heads, window and cap in use";

/* Whether the entry's list has the mistake. */
static inline int apart_has(size_t entry, const mistake *m) {
    char name[80];
    snprintf(name, sizeof name, " %s ", m->name);
    return strstr(apart[entry].names, name) != NULL;
}

/* The first entry that has the mistake; APART: none has. */
static inline size_t apart_entry(const mistake *m) {
    size_t i = 0;
    while (i < APART && !apart_has(i, m)) i++;
    return i;
}

static inline void apart_add(char *names, size_t size, const char *name) {
    if (strlen(names) + strlen(name) + 3 < size)
        snprintf(names + strlen(names), size - strlen(names), "%s%s", *names ? ", " : "", name);
}

/* Writes to `names` those mistakes of the verdict that this entry has. */
static inline void apart_list(const verdict *v, size_t entry, char *names, size_t size) {
    *names = 0;
    for (int i = 0; i < v->count; i++)
        if (apart_has(entry, v->named[i])) apart_add(names, size, v->named[i]->name);
}

/* If several mistakes are named, says which step tells them apart. */
static inline void apart_say(verdict *v) {
    char names[240];
    if (v->count < 2) return;
    verdict_say(v, "%d mistakes give this number here; each gives another one in another step",
                v->count);
    for (size_t i = 0; i < APART; i++) {
        apart_list(v, i, names, sizeof names);
        if (*names) verdict_say(v, "to tell %s apart: %s", names, apart[i].step);
    }
}

/* Mistakes that can be made only with more ranks of a sequence, replicas or micro-batches than
   one. Elsewhere they are no mistakes, although they give the same number. */
static const struct {
    const char *names; /* each between blanks */
    int sp, dp, accumulation;
} several[] = {
    {" gathered_in_rank_order side_tensor_not_split own_tokens_only positions_local "
     "shift_after_split sequence_counts_local score_of_rank_end sigmoid_of_parts "
     "log_probs_of_one_rank log_probs_averaged log_probs_added ratio_of_parts "
     "scores_averaged scores_added scores_of_parts kl_added kl_averaged kl_of_own_part ",
     1, 0, 0},
    {" kl_of_one_replica baseline_of_one_replica ", 0, 1, 0},
    {" steps_counted_by_micro_batches micro_batches_lost ", 0, 0, 1}};

/* form: NULL, or a text that names the form. The order of a contiguous split is a wrong one
   only where another layout is used. */
static inline int can_be_made(const mistake *m, const char *form, const dump *d) {
    int64_t sp = d->sp, dp = d->world / d->sp, accumulation = d->accumulation;
    char name[80];
    if (!d->interleaved &&
        (!strcmp(m->name, "gathered_in_rank_order") || (form && strstr(form, "contiguous"))))
        return 0;
    snprintf(name, sizeof name, " %s ", m->name);
    for (size_t i = 0; i < sizeof several / sizeof *several; i++)
        if (strstr(several[i].names, name))
            return !((several[i].sp && sp == 1) || (several[i].dp && dp == 1) ||
                     (several[i].accumulation && accumulation == 1));
    return 1;
}

/* Forgets forms that cannot be made with these numbers of ranks and micro-batches. */
static inline void tried_drop(verdict *v, const dump *d) {
    int kept = 0;
    for (int i = 0; i < v->tried_count; i++)
        if (can_be_made(v->tried[i].m, v->tried[i].how, d)) v->tried[kept++] = v->tried[i];
    v->tried_count = kept;
}

/* "mean_of_means (ranks, replicas)": the forms of the mistake that do not show. */
static inline void hidden_forms(const verdict *v, const mistake *m, char *text, size_t size) {
    int forms = 0;
    snprintf(text, size, "%s", m->name);
    for (int i = 0; i < v->tried_count; i++)
        if (v->tried[i].m == m && !v->tried[i].shows && v->tried[i].how &&
            strlen(text) + strlen(v->tried[i].how) + 4 < size)
            snprintf(text + strlen(text), size - strlen(text), "%s%s", forms++ ? "; " : " (",
                     v->tried[i].how);
    if (forms) snprintf(text + strlen(text), size - strlen(text), ")");
}

/* Says which mistakes a right number does not exclude, and which step would show them. */
static inline void hidden_say(verdict *v) {
    char names[300] = "", one[200];
    int left = 0;
    for (int i = 0; i < MISTAKES; i++) {
        if (!verdict_hides(v, &mistakes[i])) continue;
        hidden_forms(v, &mistakes[i], one, sizeof one);
        left += strlen(names) + strlen(one) + 3 >= sizeof names - 40;
        apart_add(names, sizeof names - 40, one);
    }
    if (!*names) return;
    if (left) snprintf(names + strlen(names), 40, " and %d more", left);
    verdict_say(v, "the same here, so not excluded: %s", names);
    for (size_t i = 0; i <= APART; i++) {
        int hides = 0;
        for (int k = 0; k < MISTAKES; k++)
            hides |= verdict_hides(v, &mistakes[k]) && apart_entry(&mistakes[k]) == i;
        if (hides) verdict_say(v, "to see them: %s", i < APART ? apart[i].step : apart_else);
    }
}
#endif
