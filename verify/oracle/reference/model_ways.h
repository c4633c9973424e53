/* SPDX-License-Identifier: MIT OR Unlicense */
/* model_ways.h - the mistakes inside of a model that --model tries out, in all their forms. */
#ifndef ORACLE_MODEL_WAYS_H
#define ORACLE_MODEL_WAYS_H
#include "reference.h"

static const reference_way right_way = {.name = NULL};
/* Cheap and frequent mistakes come first, since --budget may end the trials. Of each name the
   plainest form comes first: gen plants that one. */
static const reference_way wrong_ways[] = {
    {.name = "positions_local", .positions = POSITIONS_LOCAL},
    {.name = "positions_local",
     .positions = POSITIONS_LOCAL_DOCUMENT,
     .form = "each counts the rank's own tokens of its document"},
    {.name = "positions_run_on", .positions = POSITIONS_RUN_ON},
    {.name = "documents_ignored", .sight = SEES_ANY_DOCUMENT},
    {.name = "documents_ignored",
     .sight = SEES_ANY_DOCUMENT,
     .positions = POSITIONS_RUN_ON,
     .form = "positions run on, too"},
    {.name = "looks_ahead", .sight = SEES_AHEAD},
    {.name = "mask_missing", .sight = SEES_ANY_DOCUMENT | SEES_AHEAD},
    {.name = "own_tokens_only", .seen = seen_own},
    {.name = "own_tokens_only",
     .seen = seen_own,
     .positions = POSITIONS_LOCAL,
     .form = "positions are local, too"},
    {.name = "own_tokens_only",
     .seen = seen_own,
     .positions = POSITIONS_LOCAL_DOCUMENT,
     .form = "positions are local, too"},
    {.name = "causal_by_local_row", .sight = SEES_BY_LOCAL_ROW},
    {.name = "causal_by_local_row",
     .sight = SEES_BY_LOCAL_ROW,
     .positions = POSITIONS_LOCAL,
     .form = "positions are local, too"},
    {.name = "causal_by_local_row",
     .sight = SEES_BY_LOCAL_ROW,
     .rows = ROWS_OF_GATHERED_KEYS,
     .form = "of the key that among all gathered ones"},
    {.name = "causal_by_local_row",
     .sight = SEES_BY_LOCAL_ROW,
     .rows = ROWS_OF_ALL,
     .form = "rows among those of all ranks, one behind the other"},
    {.name = "stale_kv", .own_kv = 1},
    {.name = "stale_kv", .own_kv = 1, .passes = PASS_FORWARD, .form = "forward alone"},
    {.name = "stale_kv", .own_kv = 1, .passes = PASS_BACKWARD, .form = "backward alone"},
    {.name = "hop_lost", .hop = HOP_LAST},
    {.name = "hop_lost", .hop = HOP_LAST, .passes = PASS_FORWARD, .form = "forward alone"},
    {.name = "hop_lost", .hop = HOP_LAST, .passes = PASS_BACKWARD, .form = "backward alone"},
    {.name = "hop_lost", .hop = 1, .form = "the first"},
    {.name = "hop_lost", .hop = 1, .passes = PASS_FORWARD, .form = "the first, forward alone"},
    {.name = "hop_lost",
     .hop = 1,
     .passes = PASS_BACKWARD,
     .form = "the first, backward alone"},
    {.name = "hop_lost", .hop = 2, .form = "the second"},
    {.name = "hop_lost",
     .hop = 2,
     .passes = PASS_BACKWARD,
     .form = "the second, backward alone"},
    {.name = "half_not_exchanged",
     .seen = seen_first_halves,
     .form = "the first halves alone travel"},
    {.name = "half_not_exchanged",
     .seen = seen_second_halves,
     .form = "the second halves alone travel"},
    {.name = "half_not_updated", .seen = seen_by_first_half, .form = "the second half is not"},
    {.name = "half_not_updated", .seen = seen_by_second_half, .form = "the first half is not"},
    {.name = "half_not_updated",
     .seen = seen_not_of_later,
     .form = "the second half is not, from later ranks"},
    {.name = "layout_mistaken", .layout = TAKEN_CONTIGUOUS + 1, .form = "for contiguous"},
    {.name = "layout_mistaken", .layout = TAKEN_ZIGZAG + 1, .form = "for zigzag"},
    {.name = "layout_mistaken", .layout = TAKEN_STRIPE + 1, .form = "for stripe"},
    {.name = "layout_mistaken",
     .layout = TAKEN_CONTIGUOUS_EACH + 1,
     .form = "for contiguous in each document"},
    {.name = "layout_mistaken",
     .layout = TAKEN_ZIGZAG_EACH + 1,
     .form = "for zigzag in each document"},
    {.name = "outputs_averaged", .merge = MERGE_SUM_OVER_P, .form = "sum over hops / P"},
    {.name = "outputs_averaged",
     .merge = MERGE_SUM_OVER_P,
     .backward = BACKWARD_OF_AVERAGE,
     .form = "sum over hops / P, and its own gradient"},
    {.name = "outputs_averaged",
     .merge = MERGE_MEAN_OF_SEEN,
     .form = "mean of the hops that saw a key"},
    {.name = "outputs_averaged",
     .merge = MERGE_BY_TWOS,
     .form = "two by two, in the ring's order"},
    {.name = "outputs_averaged",
     .merge = MERGE_UNSCALED,
     .form = "by sums of exponentials that are not of one maximum"},
    {.name = "merge_weights_swapped", .merge = MERGE_SWAPPED},
    {.name = "kv_heads_in_turn", .in_turn = 1},
    {.name = "heads_permuted", .heads = HEADS_DEALT, .form = "dealt to ranks in turn"},
    {.name = "heads_permuted", .heads = HEADS_COLLECTED, .form = "collected in turn"},
    {.name = "tokens_permuted", .tokens = 1, .form = "outs lie as ranks have them"},
    {.name = "scale_missing", .scale = SCALE_OF_DIM, .form = "1 / sqrt(head_dim)"},
    {.name = "scale_missing", .scale = SCALE_ONE, .form = "1"},
    {.name = "rotary_missing", .unrotated = UNROTATED_KEYS, .form = "keys"},
    {.name = "rotary_missing", .unrotated = UNROTATED_QUERIES, .form = "queries"},
    {.name = "rotary_missing",
     .unrotated = UNROTATED_KEYS | UNROTATED_QUERIES,
     .form = "queries and keys"},
    {.name = "window_missing", .no_window = 1},
    {.name = "window_by_local_row", .sight = SEES_LOCAL_WINDOW},
    {.name = "window_by_local_row",
     .sight = SEES_LOCAL_WINDOW | SEES_LOCAL_BOUND,
     .form = "and nobody of a later row"},
    {.name = "window_by_local_row",
     .sight = SEES_LOCAL_WINDOW,
     .rows = ROWS_OF_GATHERED_KEYS,
     .form = "of the key that among all gathered ones"},
    {.name = "window_by_local_row",
     .sight = SEES_LOCAL_WINDOW,
     .rows = ROWS_OF_ALL,
     .form = "rows among those of all ranks, one behind the other"},
    {.name = "softcap_missing", .no_softcap = 1},
    {.name = "lse_of_last_hop", .backward = BACKWARD_LSE_OF_LAST},
    {.name = "dkv_not_returned", .backward = BACKWARD_DKV_STAYS},
    {.name = "dkv_not_returned",
     .backward = BACKWARD_DKV_SHIFTED,
     .form = "ranks have those of the next one"},
    {.name = "dq_of_one_hop", .backward = BACKWARD_DQ_STAYS},
    {.name = "delta_missing", .backward = BACKWARD_NO_DELTA},
    {.name = "delta_of_hop", .backward = BACKWARD_DELTA_OF_HOP},
    {.name = "delta_of_hop", .backward = BACKWARD_BOTH_OF_HOP, .form = "and lse of each hop"},
    {.name = "delta_of_hop", .backward = BACKWARD_LSE_OF_HOP, .form = "lse of each hop"},
    {.name = "dk_dv_swapped", .backward = BACKWARD_SWAPPED},
    {.name = "dq_scale_missing", .backward = BACKWARD_UNSCALED},
    {.name = "kv_group_not_summed", .backward = BACKWARD_GROUP_MEAN, .form = "the mean"},
    {.name = "kv_group_not_summed",
     .backward = BACKWARD_GROUP_FIRST,
     .form = "the first head of each group alone"},
    {.name = "documents_ignored",
     .sight = SEES_ANY_DOCUMENT,
     .passes = PASS_BACKWARD,
     .form = "backward alone"},
    {.name = "looks_ahead",
     .sight = SEES_AHEAD,
     .passes = PASS_BACKWARD,
     .form = "backward alone"},
    {.name = "own_tokens_only",
     .seen = seen_own,
     .passes = PASS_BACKWARD,
     .form = "backward alone"},
    {.name = "causal_by_local_row",
     .sight = SEES_BY_LOCAL_ROW,
     .passes = PASS_BACKWARD,
     .form = "backward alone"},
    {.name = "window_missing",
     .no_window = 1,
     .passes = PASS_BACKWARD,
     .form = "backward alone"}};
enum { WRONG_WAYS = sizeof wrong_ways / sizeof *wrong_ways };

/* Whether the mistake changes the forward pass. */
static inline int way_is_of_forward(const reference_way *w) {
    return w->passes != PASS_BACKWARD &&
           (w->positions || w->sight || w->seen || w->hop || w->layout || w->own_kv ||
            w->in_turn || w->scale || w->unrotated || w->no_window || w->no_softcap ||
            w->heads || w->tokens || w->merge);
}

/* Whether only several ranks that share a sequence can make the mistake. */
static inline int way_is_of_ranks(const reference_way *w) {
    return w->seen || w->hop || w->layout || w->own_kv || w->merge || w->heads || w->tokens ||
           w->positions == POSITIONS_LOCAL_DOCUMENT ||
           w->sight & (SEES_BY_LOCAL_ROW | SEES_LOCAL_WINDOW) ||
           w->backward == BACKWARD_DKV_STAYS || w->backward == BACKWARD_DKV_SHIFTED ||
           w->backward == BACKWARD_DQ_STAYS ||
           (w->backward >= BACKWARD_DELTA_OF_HOP && w->backward <= BACKWARD_OF_AVERAGE);
}

/* Whether the metadata set the option (window, softcap, softmax_scale) that the mistake is
   about. */
static inline int way_has_facts(const dump_facts *f, const reference_way *w) {
    if ((w->no_window || w->sight & SEES_LOCAL_WINDOW) && !f->window) return 0;
    if (w->no_softcap && !(f->softcap > 0)) return 0;
    return w->scale != SCALE_OF_DIM || f->softmax_scale > 0;
}

/* Whether this step can have the mistake. hop_lost needs three ranks: with two, the last hop is
   the only one, and to lose it is own_tokens_only. */
static inline int way_has_meaning(const dump *d, const reference_way *w,
                                  const seqpar_llama_config *c) {
    int grouped = c->heads > c->kv_heads;
    if (way_is_of_ranks(w) && d->sp == 1) return 0;
    if (w->hop && (d->sp < 3 || w->hop >= d->sp - 1)) return 0;
    if (w->in_turn && (!grouped || c->kv_heads == 1)) return 0;
    if (w->unrotated && c->no_rope_every) return 0; /* some layers rightly have none */
    if (w->heads && (c->heads % d->sp || c->heads == d->sp)) return 0;
    if (w->backward >= BACKWARD_GROUP_MEAN && !grouped) return 0;
    return way_has_facts(&d->facts, w);
}
#endif
