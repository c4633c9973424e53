/* SPDX-License-Identifier: MIT OR Unlicense */
/* mistakes.h - what goes wrong in sequence parallelism, one entry a mistake: the source of
 * verdicts, of `seqpar-verify explain` and `list`, and of verify/MISTAKES.md.
 *
 * In all formulas P is the number of ranks that share a sequence (sp), D that of data-parallel
 * replicas (dp), A the micro-batches of an optimizer step, s_r and n_r a rank's sum of losses
 * and count of supervised tokens, N the count of the whole step, g_r the gradient of s_r / N.
 */
#ifndef ORACLE_MISTAKES_H
#define ORACLE_MISTAKES_H
#include <string.h>

/* What a mistake makes of a right gradient: times P^sp D^dp A^accumulation. */
typedef struct mistake_scale {
    int sp, dp, accumulation;
} mistake_scale;

/* What a mistake makes of the loss, from sums and counts of G ranks or micro-batches. */
typedef enum mistake_mean {
    MEAN_NONE,
    MEAN_OF_MEANS,     /* (1/G) sum of s_g / n_g, an empty group counting as 0 */
    MEAN_OF_NON_EMPTY, /* the same over groups that have a token */
    MEAN_LOCAL_COUNT,  /* sum of s_g / n_r of one group r */
    MEAN_OWN,          /* s_r / n_r of one group r */
    MEAN_SUM_OF_MEANS, /* sum of s_g / n_g */
    MEAN_OVER_GROUPS,  /* (sum of s_g / sum of n_g) / G */
    MEAN_OVER_ALL,     /* sum of s_g / all tokens, supervised or not */
    MEAN_NAN           /* 0 / 0 of an empty group, carried on */
} mistake_mean;

typedef struct mistake {
    const char *name, *family;
    const char *symptom; /* what people see */
    const char *cause;
    const char *right, *wrong; /* formulas */
    const char *example;       /* on few ranks, by hand */
    const char *fix;
    const char *seen; /* public threads: repository and number; NULL: none that we know */
    mistake_scale scale;
    mistake_mean mean;
} mistake;

static const mistake mistakes[] = {
    {.name = "times_sp",
     .family = "scale",
     .symptom = "the gradient norm grows with P (x2 at sp 2), loss and Adam's curves are right",
     .cause = "Every rank starts its backward pass from the whole loss: it was gathered by an "
              "operation whose backward pass sums over ranks. The reducer then sums over sp, "
              "or divides by D alone.",
     .right = "g = sum_r g_r",
     .wrong = "g = P sum_r g_r",
     .example = "g_0 = 3, g_1 = 1: right 4. Each rank's backward pass gives both ranks' seeds "
                "2, so g_0 = 6, g_1 = 2: 8.",
     .fix = "Start from the rank's own share s_r / N, or let the reducer average over D x P.",
     .seen = "DeepSpeed 5555, 5248; Megatron-LM 673, 906; transformers 46775",
     .scale = {.sp = 1}},
    {.name = "over_sp",
     .family = "scale",
     .symptom = "the gradient norm falls as 1/P, loss and Adam's curves are right",
     .cause = "Gradients are averaged over the ranks that share a sequence as if they were "
              "data-parallel replicas, while each rank's gradient is only its tokens' part: "
              "the sum over ranks took place outside autograd, or the gather's backward pass "
              "hands back a slice.",
     .right = "g = sum_r g_r",
     .wrong = "g = (1/P) sum_r g_r",
     .example = "g_0 = 3, g_1 = 1: right 4, the mean is 2.",
     .fix = "Sum over sp, average over dp alone; or multiply each rank's share by P before "
            "the backward pass.",
     .seen = "VeOmni 338, 1120; SkyRL 1420; read in the source of 360-LLaMA-Factory's SFT and "
             "DPO trainers and of axolotl's sequence-parallel context",
     .scale = {.sp = -1}},
    {.name = "times_sp_squared",
     .family = "scale",
     .symptom = "the gradient norm grows with P^2 (x4 at sp 2)",
     .cause = "The factor P that makes up for an averaging reducer is applied to a loss that "
              "every rank already holds whole, and the reducer sums.",
     .right = "g = sum_r g_r",
     .wrong = "g = P^2 sum_r g_r",
     .example = "g_0 = 3, g_1 = 1: right 4. Whole loss on both ranks 8, times P = 2: 16.",
     .fix = "One convention: shares and a sum, or whole losses and a mean over D x P.",
     .scale = {.sp = 2}},
    {.name = "over_sp_squared",
     .family = "scale",
     .symptom = "the gradient norm falls as 1/P^2 (a quarter at sp 2)",
     .cause = "The loss is divided by P after a sum that autograd does not see, and the "
              "reducer averages over D x P once more.",
     .right = "g = sum_r g_r",
     .wrong = "g = (1/P^2) sum_r g_r",
     .example = "g_0 = 3, g_1 = 1: right 4, got 1.",
     .fix = "Divide by the step's count of tokens alone; sum over sp.",
     .seen = "OpenRLHF 583 (GPTLMLoss)",
     .scale = {.sp = -2}},
    {.name = "times_dp",
     .family = "scale",
     .symptom = "the gradient norm grows with the number of replicas",
     .cause = "Each replica divides by the mean count, as for an average over dp, and the "
              "reducer sums.",
     .right = "g = (1/D) sum_d (sum of losses of replica d)' / (N / D)",
     .wrong = "g = sum_d (sum of losses of replica d)' / (N / D)",
     .example = "D = 2, both replicas have gradient 4: right 4, the sum is 8.",
     .fix = "Average over dp, or divide by the count of all replicas and sum.",
     .scale = {.dp = 1}},
    {.name = "over_dp",
     .family = "scale",
     .symptom = "the gradient norm falls with the number of replicas",
     .cause = "The loss is divided by the count of all replicas, and the reducer averages over "
              "dp once more.",
     .right = "g = sum_d (sum of losses of replica d)' / N",
     .wrong = "g = (1/D) sum_d (sum of losses of replica d)' / N",
     .example = "D = 2, sums have gradients 6 and 10, N = 4: right 4, got 2.",
     .fix = "Multiply by D, which the reducer divides by, or let it sum.",
     .seen = "transformers' average_tokens_across_devices is the mend of it",
     .scale = {.dp = -1}},
    {.name = "times_accumulation",
     .family = "scale",
     .symptom = "the gradient norm grows with the micro-batches of a step",
     .cause = "Gradients of micro-batches' means are summed and not divided by their number.",
     .right = "g = sum_a (sum of losses of micro-batch a)' / N",
     .wrong = "g = sum_a (mean loss of micro-batch a)'",
     .example = "A = 4 with equal counts, each mean has gradient 4: right 4, the sum is 16.",
     .fix = "Divide sums by the count of the whole step, which is known before its first "
            "backward pass.",
     .seen = "360-LLaMA-Factory 72",
     .scale = {.accumulation = 1}},
    {.name = "over_accumulation",
     .family = "scale",
     .symptom = "the gradient norm falls with the micro-batches of a step",
     .cause = "The loss is divided by the step's count already and the engine divides it by "
              "the number of micro-batches again.",
     .right = "g = sum_a (sum of losses of micro-batch a)' / N",
     .wrong = "g = (1/A) sum_a (sum of losses of micro-batch a)' / N",
     .example = "A = 4: right 4, got 1.",
     .fix = "Multiply by A where the engine divides by it (DeepSpeed does).",
     .seen = "transformers before num_items_in_batch",
     .scale = {.accumulation = -1}},
    {.name = "never_synchronised",
     .family = "scale",
     .symptom = "ranks' parameters drift apart; with dp 1 nothing else shows it",
     .cause = "Gradients are reduced over a group that leaves out the ranks which share a "
              "sequence, or not at all.",
     .right = "all ranks have g = sum_r g_r",
     .wrong = "rank r goes on with g_r",
     .example = "g_0 = 3, g_1 = 1: both should have 4.",
     .fix = "Reduce over sp, too. After a step all ranks hold the same parameters, to the bit.",
     .seen = "VeOmni 1115, 1059"},
    {.name = "mean_of_means",
     .family = "count",
     .symptom = "the loss depends on how tokens fall on ranks or micro-batches; an empty one "
                "pulls it to 0",
     .cause = "Each divides by its own count, and the means are averaged.",
     .right = "L = sum_g s_g / sum_g n_g",
     .wrong = "L = (1/G) sum_g s_g / n_g, 0 where n_g = 0",
     .example = "Counts 1, 7, 0, 8 and sums 4, 7, 0, 16: right 27 / 16 = 1.6875, the mean of "
                "4, 1, 0, 2 is 1.75.",
     .fix = "Add sums and counts apart, over ranks and micro-batches, and divide once.",
     .seen = "OpenRLHF 583; Megatron-LM 7452, 7513; verl 2857; 360-LLaMA-Factory 1, 72",
     .mean = MEAN_OF_MEANS},
    {.name = "mean_of_non_empty_means",
     .family = "count",
     .symptom = "as mean_of_means; empty ranks are left out",
     .cause = "Each divides by its own count, and the means of those that have a token are "
              "averaged.",
     .right = "L = sum_g s_g / sum_g n_g",
     .wrong = "L = sum over n_g > 0 of s_g / n_g, by the number of these",
     .example = "Counts 1, 7, 0, 8 and sums 4, 7, 0, 16: right 1.6875, the mean of 4, 1, 2 is "
                "2.3333.",
     .fix = "Add sums and counts apart, over ranks and micro-batches, and divide once.",
     .mean = MEAN_OF_NON_EMPTY},
    {.name = "local_count",
     .family = "count",
     .symptom = "ranks show different losses; each is too large",
     .cause = "The sum over all ranks is divided by the count of one.",
     .right = "L = sum_g s_g / sum_g n_g",
     .wrong = "L = sum_g s_g / n_r",
     .example = "Counts 1, 3 and sums 2, 3: right 5 / 4 = 1.25, got 5 on rank 0 and 1.6667 on "
                "rank 1.",
     .fix = "Add counts over the ranks that sums are added over.",
     .seen = "ms-swift 9152",
     .mean = MEAN_LOCAL_COUNT},
    {.name = "sum_of_means",
     .family = "count",
     .symptom = "the loss is about P times too large and depends on who holds which tokens",
     .cause = "Each divides by its own count, and the means are summed.",
     .right = "L = sum_g s_g / sum_g n_g",
     .wrong = "L = sum_g s_g / n_g",
     .example = "Counts 1, 3 and sums 2, 3: right 5 / 4 = 1.25, the sum of 2 and 1 is 3.",
     .fix = "Add counts over ranks before anybody divides.",
     .seen = "read in the source of 360-LLaMA-Factory's DPO trainer (IPO, ORPO, SimPO)",
     .mean = MEAN_SUM_OF_MEANS},
    {.name = "shares_averaged",
     .family = "count",
     .symptom = "the loss shown is 1/P of the right one",
     .cause = "Shares s_r / N are averaged over ranks where they are to be summed, or the "
              "count was added up over ranks that all hold the whole mask.",
     .right = "L = sum_g s_g / sum_g n_g",
     .wrong = "L = (1/G) sum_g s_g / sum_g n_g",
     .example = "Counts 1, 3 and sums 2, 3: right 1.25, got 0.625.",
     .fix = "Sum shares over sp. Add counts over sp only where each rank counts its own "
            "tokens.",
     .seen = "VeOmni 338; torchtitan 3280",
     .mean = MEAN_OVER_GROUPS},
    {.name = "all_tokens_counted",
     .family = "count",
     .symptom = "the loss is too small, the more so the longer prompts and padding are",
     .cause = "The sum over supervised tokens is divided by the count of all tokens.",
     .right = "L = sum_g s_g / sum_g n_g",
     .wrong = "L = sum_g s_g / number of all tokens",
     .example = "Sums 2, 3, counts 1, 3, eight tokens in all: right 1.25, got 0.625.",
     .fix = "Count where the label is not the ignored one.",
     .mean = MEAN_OVER_ALL},
    {.name = "nan_of_an_empty_rank",
     .family = "count",
     .symptom = "NaN with long prompts: a rank has no supervised token",
     .cause = "0 / 0 on the rank without a supervised token, carried on by the sum over ranks, "
              "even with weight 0.",
     .right = "L = sum_g s_g / sum_g n_g",
     .wrong = "L = sum_g n_g (s_g / n_g) / sum_g n_g, NaN where n_g = 0",
     .example = "Counts 0, 4 and sums 0, 6: right 1.5, got 0 (0 / 0) + 6 = NaN.",
     .fix = "Divide once, after the sums over ranks.",
     .seen = "Megatron-LM 1764; axolotl 3026; NeMo Speech 14488; OLMo-core 657; OpenRLHF 583",
     .mean = MEAN_NAN},
    {.name = "own_mean_alone",
     .family = "count",
     .symptom = "ranks show different losses, some too small, some too large",
     .cause = "The loss of the rank's own tokens is taken for that of the step.",
     .right = "L = sum_g s_g / sum_g n_g",
     .wrong = "L = s_r / n_r",
     .example = "Counts 1, 3 and sums 2, 3: right 1.25, rank 0 shows 2 and rank 1 shows 1.",
     .fix = "Add sums and counts over the ranks that share the sequence, and over replicas.",
     .mean = MEAN_OWN},
    {.name = "token_lost",
     .family = "layout",
     .symptom = "the last tokens of a row are in nobody's loss",
     .cause = "A length that does not divide is cut off, or a rank's end is computed for "
              "another length.",
     .right = "the ranks' places are 0 .. T - 1, each once",
     .wrong = "a place is held by nobody, or lies outside of the row",
     .example = "T = 5 on two ranks, two tokens each: token 4 is lost.",
     .fix = "Pad, or let shares differ by a token; check that places are a bijection."},
    {.name = "token_held_twice",
     .family = "layout",
     .symptom = "tokens count twice in loss and gradient",
     .cause = "A row is split twice, or shares overlap, or two ranks have the same share.",
     .right = "the ranks' places are 0 .. T - 1, each once",
     .wrong = "a place is held by two rows",
     .example = "T = 4, rank 0 holds 0 1 2, rank 1 holds 2 3: token 2 counts twice.",
     .fix = "Split once, by the rank's number within its sequence-parallel group.",
     .seen = "axolotl 3498; DeepSpeed 7484"},
    {.name = "positions_local",
     .family = "packing",
     .symptom = "the loss is a little too high, more so with more ranks; nothing crashes",
     .cause = "Positions count from 0 on every rank, so rotary embeddings are those of a short "
              "text.",
     .right = "position = place in the row - begin of its document",
     .wrong = "position = place among the rank's own tokens",
     .example = "T = 4 on two ranks: right 0 1 and 2 3, got 0 1 and 0 1.",
     .fix = "Make positions before the split and split them like the tokens.",
     .seen = "ring-flash-attention 16"},
    {.name = "positions_run_on",
     .family = "packing",
     .symptom = "the loss is too high with packing, right without",
     .cause = "Positions run on over the documents of a packed row.",
     .right = "position = place in the row - begin of its document",
     .wrong = "position = place in the row",
     .example = "Documents of 2 and 3 tokens: right 0 1 0 1 2, got 0 1 2 3 4.",
     .fix = "Begin anew at every document, before the split.",
     .seen = "LLaMA-Factory 7338; torchtitan 2780"},
    {.name = "shift_after_split",
     .family = "shift",
     .symptom = "P - 1 targets of a sequence are missing; no curve shows it",
     .cause = "Labels are split like tokens and shifted afterwards, within each rank's share. "
              "The last token of every stretch has no target, or that of a stretch far behind.",
     .right = "label[t] = id[t + 1], then split",
     .wrong = "label of a rank's row i = id of its row i + 1",
     .example = "Tokens 5 6 7 8 on two ranks: right 6 7 and 8 none, got 6 none and 8 none. "
                "Zigzag, 0 3 and 1 2: rank 0 predicts 8 from 5.",
     .fix = "Shift the whole row first; then split ids, labels and masks by one map.",
     .seen = "transformers 36607; ms-swift 810, 9973; verl 4250; ChatLearn 343"},
    {.name = "labels_not_shifted",
     .family = "shift",
     .symptom = "the loss falls to 0 within a few steps",
     .cause = "Each token is its own target: the model's own shift was turned off and nobody "
              "else shifts.",
     .right = "label[t] = id[t + 1]",
     .wrong = "label[t] = id[t]",
     .example = "Tokens 5 6 7: right 6 7 none, got 5 6 7.",
     .fix = "Shift once, before the split."},
    {.name = "labels_shifted_twice",
     .family = "shift",
     .symptom = "the loss is far too high and falls slowly",
     .cause = "Labels are shifted before the split and the model shifts them again.",
     .right = "label[t] = id[t + 1]",
     .wrong = "label[t] = id[t + 2]",
     .example = "Tokens 5 6 7: right 6 7 none, got 7 none none.",
     .fix = "Shift once, before the split, and tell the model so (shift_labels).",
     .seen = "ms-swift 9977"},
    {.name = "labels_cross_documents",
     .family = "packing",
     .symptom = "the loss is a little too high with packing, right without",
     .cause = "The last token of a document is to predict the first of the next.",
     .right = "the last token of a document has no target",
     .wrong = "label[t] = id[t + 1] over the whole row",
     .example = "Documents 5 6 and 7 8: right 6 none 8 none, got 6 7 8 none.",
     .fix = "Set the label of every document's last token to the ignored one.",
     .seen = "read in the source of OpenRLHF 0.5's ring SFT in pretrain mode"},
    {.name = "sigmoid_of_parts",
     .family = "pairs",
     .symptom = "the DPO loss stays nearer to ln 2 with more ranks",
     .cause = "Each rank takes the sigmoid of its own part of a response's log-prob, and the "
              "losses are averaged.",
     .right = "L = -log sigmoid(beta sum_r h_r)",
     .wrong = "L = (1/P) sum_r -log sigmoid(beta h_r)",
     .example = "beta 1, h_0 = 2, h_1 = -1: right -log sigmoid(1) = 0.3133; 0.1269 and 1.3133 "
                "have the mean 0.7201.",
     .fix = "Add log-probs per response over the ranks before anything that is not linear."},
    {.name = "log_probs_averaged",
     .family = "pairs",
     .symptom = "the DPO loss falls P times too slowly from ln 2",
     .cause = "The parts of a response's log-prob are averaged over ranks, not added.",
     .right = "h = sum_r h_r",
     .wrong = "h = (1/P) sum_r h_r",
     .example = "beta 1, h_0 = 2, h_1 = -1: right -log sigmoid(1) = 0.3133, got "
                "-log sigmoid(0.5) = 0.4741.",
     .fix = "Sum over sp."},
    {.name = "log_probs_of_one_rank",
     .family = "pairs",
     .symptom = "ranks show different DPO losses",
     .cause = "A rank takes its part of a response's log-prob for the whole.",
     .right = "h = sum_r h_r",
     .wrong = "h = h_r",
     .example = "beta 1, h_0 = 2, h_1 = -1: right 0.3133, rank 0 has 0.1269.",
     .fix = "Add log-probs per response over the ranks.",
     .seen = "OpenRLHF 1168, of a reward model"},
    {.name = "pair_swapped",
     .family = "pairs",
     .symptom = "the DPO loss rises, accuracy falls below one half",
     .cause = "Chosen and rejected have changed places in packing or unpacking.",
     .right = "h = chosen - rejected",
     .wrong = "h = rejected - chosen",
     .example = "beta 1, h = 1: right 0.3133, got 1.3133.",
     .fix = "Keep the order in one place, and test it with a pair of unequal lengths."},
    {.name = "reference_missing",
     .family = "pairs",
     .symptom = "the first DPO loss is not ln 2",
     .cause = "The reference model's log-probs are left out, or 0.",
     .right = "h = (chosen - ref_chosen) - (rejected - ref_rejected)",
     .wrong = "h = chosen - rejected",
     .example = "beta 0.1, -20 and -30 in policy and reference: right 0.6931, got 0.3133.",
     .fix = "Compare the first step's loss with ln 2, always."},
    {.name = "log_probs_by_length",
     .family = "pairs",
     .symptom = "the DPO loss hardly moves from ln 2",
     .cause = "Log-probs are divided by the response's length, as IPO and SimPO want it.",
     .right = "h from sums over tokens",
     .wrong = "h from means over tokens",
     .example = "beta 0.1, margins 10 and 0 over 100 tokens: right -log sigmoid(1) = 0.3133, "
                "got -log sigmoid(0.01) = 0.6882.",
     .fix = "DPO takes sums."},
};
enum { MISTAKES = sizeof mistakes / sizeof *mistakes };

/* NULL: there is none of this name. */
static inline const mistake *mistake_named(const char *name) {
    for (int i = 0; i < MISTAKES; i++)
        if (!strcmp(mistakes[i].name, name)) return &mistakes[i];
    return NULL;
}
#endif
