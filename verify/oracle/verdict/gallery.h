/* SPDX-License-Identifier: MIT OR Unlicense */
/* gallery.h - bugs of public packages' sequence parallelism, and how a dump would show each: by
 * the name of a mistake, by a stage that says wrong without one, by `mutants --score` where the
 * bug is a test's, or not at all. Source of `seqpar-verify list --gallery` and of
 * verify/pages/GALLERY.md. verify/tests/test_gallery.c plants what can be planted. */
#ifndef ORACLE_GALLERY_H
#define ORACLE_GALLERY_H
#include "checks.h"

typedef struct gallery_seen {
    int stage;
    const char *name; /* of a mistake; "": wrong, without a name; NULL: no more */
} gallery_seen;

enum { GALLERY_SEEN = 5 };
typedef struct gallery_bug {
    const char *id;
    const char *where; /* repository and thread, or whose source was read */
    const char *what;
    gallery_seen seen[GALLERY_SEEN];
    const char *how; /* what it takes, or why a dump cannot show it */
    int of_tests;    /* a test that would not see a mistake: mutants --score shows it */
} gallery_bug;

static const gallery_bug gallery_bugs[] = {
    /* ---- the attention ---- */
    {"B01", "EasyContext 14; ring-flash-attention 30",
     "Hops were merged with a bare exp, which overflows in F32: every prediction became 0.",
     .seen = {{ATTENTION, "merge_overflows"}}},
    {"B02", "TransformerEngine 716",
     "exp of lse overflowed to NaN, and the first mend put a hop's result into a copy.",
     .seen = {{ATTENTION, "merge_overflows"}, {ATTENTION, "half_not_updated"}}},
    {"B03", "ring-flash-attention 42, 22",
     "Each hop's result is rounded to BF16, so that errors grow with the ring.",
     .seen = {{ATTENTION, "partials_in_low_precision"}},
     .how = "Where hops cancel; what BF16 kernels usually give is right."},
    {"B04", "ring-flash-attention 87", "dq was cast to BF16 though the inputs are F16.",
     .seen = {{ATTENTION, "cast_to_low_precision"}}},
    {"B05", "TransformerEngine 1624",
     "A transpose ran on another stream: now and then lse was wrong.",
     .seen = {{ATTENTION, ""}}, .how = "In a step in which it happens."},
    {"B06", "TransformerEngine 1557; Megatron-LM 1464, 1465",
     "Gradients of q, k and v were far from those of one GPU, for a reason that is not known.",
     .seen = {{ATTENTION, ""}}},
    {"B07", "diffusers 14265, 14274",
     "The backward pass took the keys of the first hop for those of all.",
     .seen = {{ATTENTION, "stale_kv"}}},
    {"B08", "Automodel 3157",
     "Keys and values were transposed once too often in the backward pass.",
     .seen = {{ATTENTION, ""}}},
    {"B09", "ring-attention-pytorch, commit cfb1990",
     "With fewer passes than ranks, gradients of keys did not get home.",
     .seen = {{ATTENTION, "dkv_not_returned"}},
     .how = "With all passes; with fewer, out is named hop_lost, though it is meant."},
    {"B10", "ring-flash-attention, commit 7895974",
     "Ranks within a group were taken for ranks of the world: it hung, or keys came from "
     "another group.",
     .seen = {{ATTENTION, ""}}, .how = "Where it does not hang."},
    {"B11", "ms-swift, its zigzag ring, by reading",
     "The backward pass of a hop gets that hop's own out and lse, and a dout to match.",
     .seen = {{ATTENTION, "delta_of_hop"}, {GRADIENTS, "delta_of_hop"}},
     .how = "The package changes lse in place, too, which makes dv wrong: both together are "
            "wrong without a name."},
    {"B12", "EasyContext 47, 57; ring-flash-attention 39",
     "A length that does not divide made unequal chunks, whose sizes then did not match.",
     .how = "The step ends in an error, so there is no dump."},
    {"B13", "ring-flash-attention 46, 47",
     "A kernel's lse came in another shape than the merge expected.",
     .how = "The step ends in an error, so there is no dump."},
    {"B14", "ring-flash-attention, commit 22f0e1d",
     "Heads taken in strides: gradients of keys were not cleared between two of them.",
     .seen = {{ATTENTION, ""}}},
    {"B15", "axolotl 2643", "Some lengths gave huge or infinite gradients; why is not known.",
     .seen = {{ATTENTION, ""}, {GRADIENTS, ""}}, .how = "In a step of such a length."},
    {"B16", "pytorch 141429",
     "Attention that is not causal met a schedule for causal attention.",
     .how = "The step ends in an error, so there is no dump."},
    {"B17", "pytorch 159706, 183968",
     "Rows too short for two chunks a rank were balanced all the same.",
     .how = "Results have another shape than the input, which no dump can hold."},
    {"B18", "pytorch 152261",
     "The output put together again differs from that of one rank, for a reason not known.",
     .seen = {{ATTENTION, ""}}},
    {"B19", "torchtitan 3681",
     "q, k and v were annotated as split by heads where they are split by tokens.",
     .how = "An annotation that nothing used yet: no number was wrong."},
    {"B20", "torchtitan 1880",
     "A slip of indentation changed when the context of CP applies, and the loss with it.",
     .seen = {{LOG_PROBS, ""}, {GRADIENTS, ""}}},
    {"B21", "DeepSpeed 5664",
     "A reshape after the second all-to-all mixed up heads and tokens.",
     .seen = {{ATTENTION, "heads_permuted"}, {ATTENTION, "tokens_permuted"}}},
    {"B22", "DeepSpeed 5823, 5808",
     "With several rows in a batch, the exchange mixed their tokens.",
     .seen = {{ATTENTION, ""}},
     .how = "Rows of a batch are micro-batches of a dump; another row's numbers have no name."},
    {"B23", "DeepSpeed 6797",
     "With heads that do not divide, the second exchange took the path of the first.",
     .seen = {{ATTENTION, ""}},
     .how = "Where shapes happen to fit; otherwise the step ends in an error."},
    {"B24", "DeepSpeed 6750", "The overlapped exchange lacked a reshape.",
     .seen = {{ATTENTION, ""}},
     .how = "Where shapes happen to fit; otherwise the step ends in an error."},
    {"B25", "verl 850",
     "With fewer kv heads than ranks, copies had to be made, and their gradients added.",
     .seen = {{ATTENTION, "kv_heads_in_turn"}, {ATTENTION, "kv_group_not_summed"}}},
    {"B26", "DeepSpeed's FlexAttention path, by reading",
     "The mask that is built anew is plain causal: a window is lost.",
     .seen = {{ATTENTION, "window_missing"}}},
    {"B27", "VeOmni 420, 419",
     "The backward pass of the key norm began before the exchange was done.",
     .seen = {{GRADIENTS, ""}}, .how = "With --want: models of --model have no key norm."},
    {"B28", "360-LLaMA-Factory's README; axolotl 2643",
     "The first forward pass gives other numbers than later ones: DPO does not begin at ln 2.",
     .seen = {{LOG_PROBS, ""}}, .how = "In a dump of the first step."},
    {"B29", "TransformerEngine 1031",
     "The state of dropout was not kept for the backward pass.",
     .how = "The step ends in an error; dropout is not judged either."},

    /* ---- loss and gradients ---- */
    {"B30", "DeepSpeed 5555",
     "Under ZeRO-1 a wrong group's size divided gradients: 4 times too large at sp 4.",
     .seen = {{GRADIENTS, "times_sp"}}},
    {"B31", "DeepSpeed 5248",
     "The branch that divides is switched off: gradients are sp times too large.",
     .seen = {{GRADIENTS, "times_sp"}}},
    {"B32", "Megatron-LM 673, 906",
     "The loss was multiplied by cp while the average was over a group without it.",
     .seen = {{GRADIENTS, "times_sp"}}},
    {"B33", "Megatron-LM 7452, 7513",
     "Each rank divides by its own count of tokens: one valid token at cp 4 has a quarter of "
     "its gradient.",
     .seen = {{LOSS, "mean_of_means"}, {GRADIENTS, "mean_of_means"}, {GRADIENTS, "over_sp"}},
     .how = "over_sp where one rank alone has tokens to learn."},
    {"B34", "Megatron-LM 2237",
     "The gradient of the experts' balance loss lacked the factor cp.",
     .seen = {{GRADIENTS, ""}}, .how = "With --want: the router's gradient is the odd one."},
    {"B35", "Megatron-LM 3959", "The gradient of multi-token prediction lacked the factor cp.",
     .seen = {{GRADIENTS, ""}}, .how = "With --want."},
    {"B36", "Megatron-LM 5047, 3768, 3672",
     "Balance and z losses changed with tp and cp where losses are summed by token.",
     .seen = {{GRADIENTS, ""}}, .how = "With --want: the router's gradient is the odd one."},
    {"B37", "verl 6609",
     "The loss gave two results where three were read, and nobody divided by the tokens.",
     .seen = {{GRADIENTS, ""}},
     .how = "The factor is a count of tokens, no power of sp, dp or accumulation."},
    {"B38", "SkyRL 1420",
     "A metric was summed over ranks that all had it whole; gradients were cp times too small.",
     .seen = {{LOSS, "losses_added"}, {GRADIENTS, "over_sp"}}},
    {"B39", "VeOmni 338",
     "The loss was scaled by the replicas' number, not by that of the ranks that are averaged.",
     .seen = {{LOSS, "shares_averaged"}, {GRADIENTS, "over_sp"}}},
    {"B40", "VeOmni 1115, 1059; slime 1366",
     "Gradients were reduced over a group without the ranks of a sequence.",
     .seen = {{REDUCTION, "never_synchronised"},
              {REDUCTION, "sequence_not_reduced"},
              {GRADIENTS, "never_synchronised"}}},
    {"B41", "VeOmni 1120",
     "A gather whose backward pass hands back a slice, with nothing to make up for it.",
     .seen = {{GRADIENTS, "over_sp"}}},
    {"B42", "slime 1748", "Gradients of linear-attention layers were too large.",
     .seen = {{GRADIENTS, ""}}, .how = "With --want: those layers are the odd ones."},
    {"B43", "Automodel 3414, 2931, 2768",
     "Gradients were wrong or lost where a vision model's inputs are split.",
     .seen = {{GRADIENTS, ""}},
     .how = "With --want: embeddings and the vision tower are the odd ones."},
    {"B44", "360-LLaMA-Factory's trainers, by reading",
     "Sums over ranks take place outside of autograd, and gradients are averaged.",
     .seen = {{GRADIENTS, "over_sp"}}},
    {"B45", "OpenRLHF 583 (GPTLMLoss)",
     "Shift after the split, mean of ranks' means, a sum that autograd does not see, 0 / 0 on "
     "an empty rank.",
     .seen = {{LABELS, "shift_after_split"},
              {LOSS, "mean_of_means"},
              {LOSS, "nan_of_an_empty_rank"},
              {GRADIENTS, "over_sp_squared"}}},
    {"B46", "XTuner 0.1.23, reduce_loss.py, by reading",
     "The loss is weighted by tokens, its backward pass is not.",
     .seen = {{GRADIENTS, "mean_of_means"}},
     .how = "With --model; with --want it is wrong without a name."},
    {"B47", "axolotl's sequence-parallel context, by reading",
     "The gather's backward pass hands back a slice, and gradients are averaged.",
     .seen = {{GRADIENTS, "over_sp"}}},
    {"B48", "transformers 36607; ms-swift 810; axolotl and XTuner 0.1.23, by reading",
     "Labels are split and then shifted: each share's last target is lost.",
     .seen = {{LABELS, "shift_after_split"}}},
    {"B49", "transformers 48491, 48563, 48570",
     "Models dropped the labels that were shifted already, and shifted each share.",
     .seen = {{LABELS, "shift_after_split"}}},
    {"B50", "Megatron-LM 1764; axolotl 3026; NeMo Speech 14488; OLMo-core 657; OpenRLHF 583",
     "A rank without a token to learn divides 0 by 0.",
     .seen = {{LOSS, "nan_of_an_empty_rank"}}},
    {"B51", "Megatron-Bridge 3117", "NaN of padding, times a mask's 0, is NaN in the loss.",
     .seen = {{LOSS, ""}}},
    {"B52", "ms-swift 9152; axolotl 3382",
     "In evaluation, losses of all ranks were divided by the count of one.",
     .seen = {{LOSS, "local_count"}}, .how = "In a dump of an evaluation step."},
    {"B53", "verl 2857; 360-LLaMA-Factory 1, 72; OpenRLHF 1249",
     "Means of micro-batches were averaged, or not even divided by their number.",
     .seen = {{LOSS, "mean_of_means"},
              {GRADIENTS, "mean_of_means"},
              {GRADIENTS, "times_accumulation"}}},
    {"B54", "axolotl's num_items_in_batch, by reading",
     "A micro-batch's count times their number stands for the count of the step.",
     .seen = {{LOSS, "mean_of_means"}, {GRADIENTS, "mean_of_means"}}},
    {"B55", "XTuner 0.1.23, dpo.py, by reading", "Tokens whose id is 0 vanish from log-probs.",
     .seen = {{LOSS, "token_zero_ignored"}},
     .how = "With labels of the text; if 0 is ignored in them as well, it may be a mask."},
    {"B56", "ms-swift 4085, 4149, 1958",
     "DPO's loss was wrong before it was written anew; how is not known.",
     .seen = {{LOSS, ""}}},
    {"B57", "ms-swift 9977, 9973",
     "Metrics by channel shifted labels that were shifted already.",
     .seen = {{LABELS, "labels_shifted_twice"}},
     .how = "In a dump of the labels that the metric takes."},
    {"B58", "verl 3724, 5227", "A fused kernel was given the labels of the whole row.",
     .seen = {{LABELS, "side_tensor_not_split"}}},
    {"B59", "verl 5957; slime 1135",
     "Temperatures, or a teacher's log-probs, were not split with the tokens.",
     .seen = {{LOSS, "side_tensor_not_split"}},
     .how = "Of log-probs; temperatures are not in a dump."},
    {"B60", "slime, commits e8d3f58f3, e9e42e5e8",
     "A rank without a response token made the gather fail.",
     .how = "The step ends in an error, so there is no dump."},
    {"B61", "OpenRLHF 1168, 1182; NeMo-RL 2483",
     "A reward model ran without the group of its sequence.",
     .how = "The step ends in an error, or is refused."},
    {"B62", "ring-flash-attention's adapter for transformers, by reading",
     "The window is compared with the length of a share, and switched off.",
     .seen = {{ATTENTION, "window_missing"}}},
    {"B92", "axolotl's train.py, by reading",
     "DPO, KTO and reward models split their inputs and gather no outputs.",
     .seen = {{LOSS, "log_probs_of_one_rank"}}, .how = "Where it does not end in an error."},
    {"B63", "Automodel 2384; prime-rl 2828",
     "A wrapper drops the model's softmax scale, window or softcap.",
     .seen = {{ATTENTION, "scale_missing"},
              {ATTENTION, "window_missing"},
              {ATTENTION, "softcap_missing"}}},
    {"B64", "torchtitan 3280, 3329, 2983",
     "The loss shown was a rank's share, never summed over cp.",
     .seen = {{LOSS, "share_alone"}},
     .how = "Counts of tokens that are shown beside it are not in a dump."},

    /* ---- layout, packing, positions ---- */
    {"B65", "axolotl 2495", "cu_seqlens was a placeholder with packing.",
     .seen = {{ATTENTION, "documents_ignored"},
              {LOG_PROBS, "documents_ignored"},
              {GRADIENTS, "documents_ignored"}}},
    {"B66", "LLaMA-Factory 7338",
     "Positions ran over the whole pack, and no mask kept documents apart.",
     .seen = {{POSITIONS, "positions_run_on"}, {ATTENTION, "documents_ignored"}}},
    {"B67", "torchtitan 2780", "Positions of the row replaced those of documents.",
     .seen = {{POSITIONS, "positions_run_on"}}},
    {"B68", "Automodel 2377",
     "Rotary embeddings took the first rows of their table, whatever the positions.",
     .seen = {{LOG_PROBS, "positions_local"}, {GRADIENTS, "positions_local"}}},
    {"B69", "Megatron-LM 5243; TransformerEngine 2077; verl 4611",
     "Rotary embeddings of packed rows were those of other places.",
     .seen = {{LOG_PROBS, "positions_local"}, {LOG_PROBS, ""}},
     .how = "Of other places than a rank's own without a name; those of the row do no harm, as "
            "rotary embeddings see distances alone."},
    {"B70", "axolotl 3498", "Two layers of code split the sequence one after the other.",
     .seen = {{PLACES, "token_lost"}}},
    {"B71", "Megatron-LM 5191, in review",
     "Zigzag of the whole row where zigzag of each document was meant.",
     .seen = {{ATTENTION, "layout_mistaken"}}},
    {"B72", "Automodel 3223",
     "A padding mask made of ids hides real tokens that have the padding's id.",
     .seen = {{ATTENTION, ""}}},
    {"B73", "TransformerEngine 1930, 1012, 1354, 3269",
     "Padding between documents was taken for text.", .seen = {{ATTENTION, ""}},
     .how = "With the padding as documents of their own in cu_seqlens."},
    {"B74", "Automodel 2147; axolotl 3572; slime 769, 770; LLaMA-Factory 10787",
     "States of recurrent layers bled across documents, or stopped at a rank.",
     .seen = {{GRADIENTS, ""}},
     .how = "With --want from a run that has it right; --model has no such layers."},
    {"B75", "EasyContext's usp/prepare_inputs.py, by reading",
     "Positions were cut to a share and then split once more.", .seen = {{POSITIONS, ""}},
     .how = "As many as there are tokens; a dump of fewer is refused."},
    {"B76", "ChatLearn 343, in review; verl 4250", "Labels were rolled after the row was cut.",
     .seen = {{LABELS, "shift_after_split"}}},

    /* ---- data, steps, checkpoints ---- */
    {"B77", "axolotl 3920; LongLive 71", "Ranks of one sequence may draw different rows.",
     .seen = {{LABELS, ""}}, .how = "A label at a cut is then not the next rank's token."},
    {"B78", "ms-swift 10132", "The flag that shuffles, and its seed, were ignored.",
     .how = "The order of rows over steps is not in a dump of one step."},
    {"B79", "DeepSpeed 7484, 7472",
     "Micro-batches of a step were copies of one, and a second epoch found no data.",
     .how = "Each row is whole; which rows a step should have is not in a dump."},
    {"B80", "360-LLaMA-Factory's sampler, by reading",
     "With several rows a device, a rank gets shares that belong to other ranks.",
     .seen = {{LABELS, ""}}, .how = "A label at a cut is then not the next rank's token."},
    {"B81", "axolotl 3218, 3444; ms-swift 9356",
     "Epochs and steps were counted P times too short or too long.",
     .how = "Counts over an epoch are not in a dump of one step."},
    {"B82", "DeepSpeed 8226, 8122; axolotl 3382",
     "Checkpoints and profiles were written by the wrong rank, or not whole.",
     .how = "Files that are written after a step are not in a dump."},
    {"B83", "DeepSpeed 7672, 7809",
     "With P below the number of ranks, an index was out of range.",
     .how = "The step ends in an error, so there is no dump."},
    {"B84", "ms-swift's experts, by reading",
     "The balance loss was weighted by labels of a share, shifted once more.",
     .seen = {{GRADIENTS, ""}}, .how = "With --want: the router's gradient is the odd one."},
    {"B85", "ring-flash-attention's adapter, OpenRLHF, axolotl, by reading",
     "Lengths of documents are kept in one global: recomputation takes those of a later row.",
     .seen = {{ATTENTION, ""}, {GRADIENTS, ""}},
     .how = "In a step that runs two rows forward before it goes back."},

    /* ---- tests ---- */
    {"B86", "DeepSpeed's TestUlyssesAll2All, by reading",
     "The loop that compares begins behind the only entry: nothing is compared.",
     .of_tests = 1},
    {"B87", "ring-flash-attention's tests, by reading",
     "Differences are printed, and nothing is asserted.", .of_tests = 1},
    /* ---- counts and steps, reported in 2025 and 2026 ---- */
    {"B93", "TRL 5619, 6024; ms-swift 10084; transformers 39659",
     "The loss was divided by the tokens, or the micro-batches, of another window than the "
     "step's: that of the generated batch, or as many as are configured.",
     .seen = {{LOSS, "another_window"}, {GRADIENTS, "another_window"}}},
    {"B94", "tunix 1662; OpenRLHF 923",
     "With packing, a mean over sequences took a packed row for one sequence.",
     .seen = {{LOSS, "row_taken_for_sequence"}}},
    {"B95", "SkyRL 1504",
     "Sums within micro-batches were averaged over these and over replicas, without a count of "
     "tokens.",
     .seen = {{LOSS, "micro_batches_counted"}, {GRADIENTS, "micro_batches_counted"}}},
    {"B96", "Megatron-LM 5974, 5976",
     "A step without gradients made the optimizer's state and was counted.",
     .seen = {{STEP, "another_step_number"}}},
    {"B97", "Megatron-LM 7468",
     "The first step after a resume had another weight decay than the schedule's.",
     .seen = {{STEP, "another_decay"}}},
    {"B98", "verl 5983, 6049",
     "Counts of tokens were added over replicas alone, not over the ranks of a sequence.",
     .seen = {{LOSS, "sum_of_means"}},
     .how = "With loss_count and local gradients, also in counts and gradients."},
    {"B99", "prime-rl 1525; ms-swift 10071",
     "Old log-probs stood one token beside their own, or in the order of another layout.",
     .seen = {{LOSS, "old_log_probs_shifted"}, {LOSS, "gathered_in_rank_order"}},
     .how = "While the policy has hardly moved."},
    /* ---- reported in 2026 ---- */
    {"B100", "TransformerEngine 3331",
     "A hop's lengths were those of documents over cp, though these were padded: real keys were "
     "dropped, and real rows were 0.",
     .seen = {{ATTENTION, ""}}, .how = "Each run gave another result."},
    {"B101", "TransformerEngine 3528",
     "A kernel was told -1 for no window, and took it for one: the output was 0 everywhere.",
     .seen = {{ATTENTION, ""}},
     .how = "On one rank as on many, so that a comparison of both saw nothing."},
    {"B102", "flash-linear-attention 1115",
     "The backward pass of KDA read each head's gate without its offset: gradients were wrong "
     "on all ranks but the last.",
     .seen = {{GRADIENTS, ""}}, .how = "With --want: models of --model have no such layers."},
    {"B103", "SkyRL 1751",
     "The loss was multiplied by cp, which Megatron's schedule had done already.",
     .seen = {{GRADIENTS, "times_sp"}}},
    {"B104", "accelerate 4177; Automodel 0.7.0, by running it",
     "A hook for context parallelism put is_causal in a mask's place: windows were dropped.",
     .seen = {{ATTENTION, "window_missing"}}},
    {"B105", "ms-swift 10185",
     "A loss that was asked for by name shifted labels that were shifted and split already.",
     .seen = {{LABELS, "labels_shifted_twice"}}},
    {"B106", "VeOmni 963; its DPO in 0.1.12, by running it",
     "Means of micro-batches were added, and their number divided the report alone.",
     .seen = {{GRADIENTS, "times_accumulation"}}},
    {"B107", "prime-rl 2358, 1960, 1961; ms-swift 10165",
     "Each rank divided by its own count of tokens, and gradients were averaged.",
     .seen = {{LOSS, "mean_of_means"}, {GRADIENTS, "mean_of_means"}}},
    {"B108", "Automodel 2511, 2571; verl 7834, 7835; UniRL 71",
     "An embedding that is the head was two tensors after sharding or a resume, and each got the "
     "gradient of its own use.",
     .seen = {{GRADIENTS, "tables_untied"}}},
    {"B109", "prime-rl 2562",
     "Every rank of a sequence counted the whole mask, and counts were added over all ranks.",
     .seen = {{LOSS, "shares_averaged"}}},
    {"B110", "prime-rl 674", "Padding was counted in the loss's divisor.",
     .seen = {{LOSS, "all_tokens_counted"}}},
    {"B111", "transformers 39674, 48167",
     "The loss was multiplied by the number of processes, those of a sequence included.",
     .seen = {{LOSS, "losses_added"}}},
    {"B112", "Automodel 3830",
     "Means of micro-batches were added, and multiplied by the number of replicas.",
     .seen = {{LOSS, "sum_of_means"}}},
    {"B113", "LLaMA-Factory 10475",
     "Each share's labels were shifted on their own, and means of shares were averaged.",
     .seen = {{LABELS, "shift_after_split"}, {LOSS, "mean_of_means"}}},
    {"B114", "AReaL 1419", "Groups were taken by a fixed stride, though a rollout was missing.",
     .seen = {{REWARDS, "groups_by_stride"}}},
    {"B115", "slime 1918", "With unequal groups the baseline was that of all rewards.",
     .seen = {{REWARDS, "baseline_of_batch"}}},
    {"B116", "NeMo-RL 4158",
     "A deviation by cancellation gave a group of equal rewards advantages of thousands.",
     .seen = {{REWARDS, "deviation_by_cancellation"}}},
    {"B117", "verl 6452; gem 113",
     "A rejected answer stayed in its group's baseline; advantages were normalised twice.",
     .how =
         "Either baseline is taken for right, and a second time hardly changes the numbers."},
    {"B118", "Liger-Kernel 1082, 1088",
     "Importance weights between sampler and trainer were not applied.",
     .seen = {{LOSS, "option_not_applied"}}, .how = "Where the dump has the weights."},
    {"B119", "mcore-bridge 173",
     "Of a replicated factor of LoRA each rank kept its own part of the gradient.",
     .seen = {{REDUCTION, "never_synchronised"}}},
    {"B120", "NeMo-RL 3788; ROCm TransformerEngine 715",
     "Squares of replicated parameters were added over all ranks.",
     .seen = {{NORM, "norm_counts_copies"}}},
    {"B121", "Megatron-LM 7530", "Squares of sharded sinks were those of one rank.",
     .seen = {{NORM, "norm_of_part"}}},
    {"B122", "miles 1627; slime 1547",
     "The schedule of the learning rate was advanced twice after a resume.",
     .seen = {{STEP, "another_lr"}}},
    {"B123", "verl 5070, 7215", "Weight decay acted on norms and biases.",
     .how = "It is a choice: the stage of the step says what decays."},
    {"B124", "prime-rl 3003",
     "A linear attention carried its state on into the next document of a row, and its "
     "convolution began anew at every cut between ranks.",
     .seen = {{GRADIENTS, ""}}, .how = "With --want: models of --model have no such layers."},
    {"B125", "miles 885",
     "A linear attention took ranks' zigzag shares for pieces that follow one another.",
     .seen = {{GRADIENTS, ""}}, .how = "With --want: models of --model have no such layers."},
    {"B126", "verl 2337; ROLL 447; miles 1827",
     "Values and KL of a tool's output and of padding entered the advantages before them.",
     .seen = {{REWARDS, "gae_over_masked_tokens"}}},
    {"B127", "TRL 3750, 1893; miles 1827",
     "The reward was added behind the end, where a mask removes it.",
     .seen = {{REWARDS, "reward_on_masked_token"}}},
    {"B128", "verl 6376, 7278",
     "A tool's output ended the recursion: what came before it was not rewarded.",
     .seen = {{REWARDS, "gae_restarted_at_mask"}},
     .how = "REINFORCE++ is written as advantage gae, with gae_lambda 1 and values of 0."},
    {"B129", "prime-rl 2084; ms-swift 9767",
     "An infinite number of a token that a mask leaves out was multiplied by 0: NaN.",
     .seen = {{LOSS, "nan_times_mask"}}},
    {"B130", "pytorch 31367; torchtitan 4295; mlx 4058",
     "A limit of -1, meant as none, turned the sign of all gradients.",
     .seen = {{STEP, "clip_turns_sign"}}},
    {"B131", "torchforge 71; tt-blacksmith 711", "Gradients were not zeroed between steps.",
     .seen = {{GRADIENTS, "gradient_kept"}}, .how = "In a dump of step 2, with m. tensors."},
    {"B88", "axolotl's end-to-end test, by reading",
     "It asserts that the loss is below 2.5, and is skipped.", .of_tests = 1},
    {"B89", "DeepSpeed's FPDT test, by reading",
     "An absolute tolerance of 0.1 on numbers far below 1.", .of_tests = 1},
    {"B91", "yunchang's hybrid tests, by reading",
     "Outputs are compared within 0.1, about twice their size, and no gradient at all.",
     .of_tests = 1},
    {"B90", "360-LLaMA-Factory, verl, OpenRLHF 576",
     "Losses alone are compared, which no wrong gradient changes.", .of_tests = 1}};
enum { GALLERY = sizeof gallery_bugs / sizeof *gallery_bugs };

/* ---- what is said of it ---- */

static inline int gallery_count(const gallery_bug *b) {
    int n = 0;
    while (n < GALLERY_SEEN && b->seen[n].name) n++;
    return n;
}

static inline int gallery_has_name(const gallery_bug *b) {
    for (int i = 0; i < gallery_count(b); i++)
        if (*b->seen[i].name) return 1;
    return 0;
}

enum { SIGHT_NAMED, SIGHT_WRONG, SIGHT_SCORE, SIGHT_NONE, SIGHTS };
static const struct {
    const char *word, *text;
} gallery_sights[SIGHTS] = {
    {"named", "by the name of a mistake"},
    {"wrong", "by a stage that says wrong, without a name"},
    {"score", "a test's own bug: `seqpar-verify mutants --score` shows it"},
    {"unseen", "a dump of a step cannot show it"}};

static inline int gallery_sight(const gallery_bug *b) {
    return b->of_tests            ? SIGHT_SCORE
           : gallery_has_name(b)  ? SIGHT_NAMED
           : gallery_count(b) > 0 ? SIGHT_WRONG
                                  : SIGHT_NONE;
}

static inline int gallery_of_sight(int sight) {
    int n = 0;
    for (int i = 0; i < GALLERY; i++) n += gallery_sight(&gallery_bugs[i]) == sight;
    return n;
}

/* ---- text ---- */

enum { GALLERY_COLUMN = 53 }; /* where the text begins */

/* As many words of *text as fit behind that column. */
static inline void gallery_print_words(const char **text) {
    int column = GALLERY_COLUMN;
    while (**text) {
        int word = (int)strcspn(*text, " ");
        if (column > GALLERY_COLUMN && column + 1 + word > PAGE) break;
        column += printf("%s%.*s", column > GALLERY_COLUMN ? " " : "", word, *text);
        *text += word;
        *text += strspn(*text, " ");
    }
    printf("\n");
}

static inline void gallery_print(const gallery_bug *b) {
    char text[640];
    const char *rest = text;
    int n = gallery_count(b);
    snprintf(text, sizeof text, "%s: %s%s%s", b->where, b->what, b->how ? " " : "",
             b->how ? b->how : "");
    for (int i = 0; *rest || i < n; i++) {
        const char *stage = i < n ? stage_names[b->seen[i].stage].name : i || n ? "" : "-";
        const char *name = i >= n ? "" : *b->seen[i].name ? b->seen[i].name : "(wrong)";
        printf("%-4s %-7s %-10s %-*s", i ? "" : b->id,
               i ? "" : gallery_sights[gallery_sight(b)].word, stage, *rest ? 29 : 0, name);
        gallery_print_words(&rest);
    }
}

static inline void gallery_print_all(void) {
    for (int i = 0; i < GALLERY; i++) gallery_print(&gallery_bugs[i]);
    for (int i = 0; i < SIGHTS; i++)
        printf("%s%d %s", i ? ", " : "\n", gallery_of_sight(i), gallery_sights[i].word);
    printf(" of %d\n", GALLERY);
}

/* ---- a page, and JSON ---- */

static inline void gallery_print_markdown(void) {
    printf("# Public bugs, and what the oracle says of them\n\n<!-- SPDX-License-Identifier: "
           "MIT OR Unlicense -->\n\nGenerated by `seqpar-verify list --gallery --markdown` "
           "from `verify/oracle/verdict/gallery.h`.\n\n");
    for (int i = 0; i < SIGHTS; i++)
        printf("- **%s**, %d of %d: %s\n", gallery_sights[i].word, gallery_of_sight(i), GALLERY,
               gallery_sights[i].text);
    printf("\n| | where | what | seen | |\n|---|---|---|---|---|\n");
    for (int i = 0; i < GALLERY; i++) {
        const gallery_bug *b = &gallery_bugs[i];
        printf("| %s | %s | %s | **%s**", b->id, b->where, b->what,
               gallery_sights[gallery_sight(b)].word);
        for (int k = 0; k < gallery_count(b); k++) {
            const char *name = b->seen[k].name;
            printf("%s %s", k ? "," : ":", stage_names[b->seen[k].stage].name);
            if (*name) printf(" [%s](MISTAKES.md#%s)", name, name);
        }
        printf(" | %s |\n", b->how ? b->how : "");
    }
}

static inline cJSON *gallery_json(const gallery_bug *b) {
    cJSON *o = cJSON_CreateObject(), *list;
    cJSON_AddStringToObject(o, "id", b->id);
    cJSON_AddStringToObject(o, "where", b->where);
    cJSON_AddStringToObject(o, "what", b->what);
    cJSON_AddStringToObject(o, "sight", gallery_sights[gallery_sight(b)].word);
    list = cJSON_AddArrayToObject(o, "seen");
    for (int i = 0; i < gallery_count(b); i++) {
        cJSON *one = cJSON_CreateObject();
        cJSON_AddStringToObject(one, "stage", stage_names[b->seen[i].stage].name);
        if (*b->seen[i].name) cJSON_AddStringToObject(one, "mistake", b->seen[i].name);
        cJSON_AddItemToArray(list, one);
    }
    if (b->how) cJSON_AddStringToObject(o, "how", b->how);
    return o;
}
#endif
