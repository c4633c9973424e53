/* SPDX-License-Identifier: MIT OR Unlicense */
/*
 * slow_loss.h - the objectives of post-training, written a second time: dense, in double
 * precision, one plain loop per sum, to be what a fast and sharded implementation is checked
 * against.
 *
 * As in slow.h nothing is differentiated by hand.  What a gradient flows through is
 * slow_complex, so that slow_gradient_of gets every derivative by complex step; what the
 * algorithms detach (references, old log-probabilities, advantages, KTO's KL, whitening) is
 * double and stays out of it.  A maximum, a minimum or a clip branches on the real part: at a
 * tie both branches have the same derivative wherever one occurs here.
 *
 * There is one machine and one step: every mean is over all that is given, hence over the whole
 * step.
 *
 * Where systems differ the default is OpenRLHF's and the comment says so.  [O5] is OpenRLHF
 * 0.5.5, [OH] its 0.11.0; [T] TRL 1.9, [T23] TRL 0.23.1, [T9] TRL 0.9.6; [V] verl; [LF]
 * LLaMA-Factory; [HF] transformers; [PT] PyTorch; [DS] DeepSpeed; [BB] bitsandbytes.  "Spec"
 * numbers are the sections of the losses' specification. The token's own loss with label
 * smoothing and z-loss (spec 3.2) is slow.h's slow_token_loss; its log-sum-exp, AdamW, SGD,
 * clipping and learning-rate schedules are also there.
 */
#ifndef SLOW_LOSS_H
#define SLOW_LOSS_H

#include "slow.h"

/* ---- numeric primitives, spec 2 ---- */

/* e^z - 1: the real part is e^x cos y - 1 with nothing subtracted that is nearly equal. */
SLOW slow_complex slow_expm1(slow_complex z) {
    double x = creal(z), y = cimag(z), half = sin(y / 2);
    return expm1(x) * cos(y) - 2 * half * half + exp(x) * sin(y) * _Complex_I;
}

/* log(1 + z): |1 + z|^2 = 1 + 2x + x^2 + y^2. */
SLOW slow_complex slow_log1p(slow_complex z) {
    double x = creal(z), y = cimag(z);
    return (y == 0 ? log1p(x) : log1p(2 * x + x * x + y * y) / 2) +
           atan2(y, 1 + x) * _Complex_I;
}

/* log(1 + e^x) = max(x, 0) + log1p(e^-|x|), without PyTorch's switch to the identity above
   20. */
SLOW slow_complex slow_softplus(slow_complex x) {
    return creal(x) > 0 ? x + slow_log1p(cexp(-x)) : slow_log1p(cexp(x));
}

SLOW slow_complex slow_logsigmoid(slow_complex x) { return -slow_softplus(-x); }

SLOW slow_complex slow_sigmoid(slow_complex x) {
    return creal(x) < 0 ? cexp(x) / (1 + cexp(x)) : 1 / (1 + cexp(-x));
}

/* log(1 - e^a) for a < 0, in whichever form does not cancel. */
SLOW slow_complex slow_log1mexp(slow_complex a) {
    return creal(a) > -log(2) ? clog(-slow_expm1(a)) : slow_log1p(-cexp(a));
}

SLOW slow_complex slow_max(slow_complex a, slow_complex b) {
    return creal(a) >= creal(b) ? a : b;
}

SLOW slow_complex slow_min(slow_complex a, slow_complex b) {
    return creal(a) <= creal(b) ? a : b;
}

/* The bounds belong to the inside, so the gradient passes there, as through torch.clamp. */
SLOW slow_complex slow_clamp(slow_complex x, double low, double high) {
    return creal(x) < low ? low : creal(x) > high ? high : x;
}

SLOW slow_complex slow_square(slow_complex x) { return x * x; }

SLOW double slow_mean(int64_t count, const double *x) {
    double sum = 0;
    for (int64_t k = 0; k < count; k++) sum += x[k];
    return sum / (double)count;
}

/* torch.std: unbiased, hence NaN for a single number. */
SLOW double slow_std_unbiased(int64_t count, const double *x) {
    double mean = slow_mean(count, x), squares = 0;
    for (int64_t k = 0; k < count; k++) squares += (x[k] - mean) * (x[k] - mean);
    return sqrt(squares / (double)(count - 1));
}

/* ---- sequences: one packed row, sequence i from token cu_seqlens[i] up to cu_seqlens[i + 1] ---- */

/*
 * The mask is aligned with the predictions: 1 where the token's log-probability counts.  NULL:
 * all of them. How many tokens a sequence has is read off the mask, never off cu_seqlens (spec
 * 11, 33).
 */
typedef struct {
    int64_t sequences;
    const int64_t *cu_seqlens;
    const double *mask;
} slow_sequences;

SLOW double slow_sequence_length(const slow_sequences *s, int64_t i) {
    double length = 0;
    for (int64_t t = s->cu_seqlens[i]; t < s->cu_seqlens[i + 1]; t++)
        length += slow_or(s->mask, t, 1);
    return length;
}

SLOW double slow_masked_tokens(const slow_sequences *s) {
    double tokens = 0;
    for (int64_t i = 0; i < s->sequences; i++) tokens += slow_sequence_length(s, i);
    return tokens;
}

/* s_i = sum of m_t x_t over sequence i. */
SLOW slow_complex slow_sequence_sum(const slow_sequences *s, int64_t i, const slow_complex *x) {
    slow_complex sum = 0;
    for (int64_t t = s->cu_seqlens[i]; t < s->cu_seqlens[i + 1]; t++)
        if (slow_or(s->mask, t, 1) != 0) sum += slow_or(s->mask, t, 1) * x[t];
    return sum;
}

/*
 * Aggregation of per-token losses, spec 8.5: N tokens and S sequences that are not empty.
 *   TOKEN_MEAN                 sum / N, [OH]'s default and [V]'s;
 *   SEQ_MEAN_TOKEN_MEAN        mean over sequences of the mean over tokens, [O5]'s batches and GRPO's first;
 *   SEQ_MEAN_TOKEN_SUM         mean over sequences of the sum over tokens, [V];
 *   SEQ_MEAN_TOKEN_SUM_NORM    sum / (S max_length), Dr.GRPO, [T] [V].
 * [OH] adds 1e-8 to n_i against empty sequences; here those are skipped and n_i is exact.
 */
typedef enum {
    SLOW_TOKEN_MEAN,
    SLOW_SEQ_MEAN_TOKEN_MEAN,
    SLOW_SEQ_MEAN_TOKEN_SUM,
    SLOW_SEQ_MEAN_TOKEN_SUM_NORM
} slow_aggregation;

/* What one sequence's sum is divided by. */
SLOW double slow_aggregation_divisor(slow_aggregation mode, const slow_sequences *s,
                                     double max_length, int64_t i) {
    double nonempty = 0;
    for (int64_t k = 0; k < s->sequences; k++) nonempty += slow_sequence_length(s, k) > 0;
    switch (mode) {
    case SLOW_TOKEN_MEAN: return slow_masked_tokens(s);
    case SLOW_SEQ_MEAN_TOKEN_MEAN: return nonempty * slow_sequence_length(s, i);
    case SLOW_SEQ_MEAN_TOKEN_SUM: return nonempty;
    case SLOW_SEQ_MEAN_TOKEN_SUM_NORM: return nonempty * max_length;
    }
    return NAN;
}

/* Nothing to average is a loss of 0, not 0 / 0 (spec 11, 7). */
SLOW slow_complex slow_aggregate(slow_aggregation mode, const slow_sequences *s,
                                 double max_length, const slow_complex *loss) {
    slow_complex total = 0;
    for (int64_t i = 0; i < s->sequences; i++)
        if (slow_sequence_length(s, i) > 0)
            total += slow_sequence_sum(s, i, loss) /
                     slow_aggregation_divisor(mode, s, max_length, i);
    return total;
}

/* ---- log-probabilities of tokens, spec 2 and 3.1 ---- */

/*
 * logp, entropy and log-sum-exp per token of logits / temperature.  [OH] divides by the temperature itself;
 * [T] adds 1e-7 to it, which is not done here.  entropy and lse may be NULL.
 */
SLOW void slow_logps(int64_t tokens, int64_t vocab, double temperature,
                     const slow_complex *logits, const int32_t *targets, slow_complex *logp,
                     slow_complex *entropy, slow_complex *lse) {
    slow_complex *x = slow_array(vocab);
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t j = 0; j < vocab; j++) x[j] = logits[t * vocab + j] / temperature;
        slow_token y = slow_token_of(vocab, x, targets[t]);
        logp[t] = y.logp;
        if (entropy) entropy[t] = y.entropy;
        if (lse) lse[t] = y.lse;
    }
    free(x);
}

/* log(sum of p^2) = lse(2 x) - 2 lse(x), the normaliser of WPO's weights (spec 4, [T]). */
SLOW slow_complex slow_log_sum_squares(int64_t vocab, const slow_complex *logits) {
    slow_complex *twice = slow_array(vocab);
    for (int64_t j = 0; j < vocab; j++) twice[j] = 2 * logits[j];
    slow_complex y = slow_log_sum_exp(vocab, twice) - 2 * slow_log_sum_exp(vocab, logits);
    free(twice);
    return y;
}

/* ---- supervised fine-tuning, spec 3 ---- */

SLOW slow_complex slow_sft(slow_aggregation mode, const slow_sequences *s,
                           const slow_complex *logp) {
    return -slow_aggregate(mode, s, 0, logp);
}

/* Token mean, spec 3.1: L = -(1/N) sum m logp, N over the whole step; the default of [OH]'s
   SFTLoss and [HF]. */
SLOW slow_complex slow_sft_token_mean(const slow_sequences *s, const slow_complex *logp) {
    return slow_sft(SLOW_TOKEN_MEAN, s, logp);
}

/*
 * Weighted tokens, spec 3.3: L = -sum m w logp / sum m w, as torch's cross-entropy with class
 * weights, or with by_count / sum m, as ms-swift's loss_scale.  OpenRLHF has no weights.
 */
SLOW slow_complex slow_sft_weighted(int64_t tokens, const double *mask, const double *weights,
                                    bool by_count, const slow_complex *logp) {
    slow_complex sum = 0;
    double divisor = 0;
    for (int64_t t = 0; t < tokens; t++) {
        double m = slow_or(mask, t, 1);
        sum -= m * weights[t] * logp[t];
        divisor += by_count ? m : m * weights[t];
    }
    return divisor > 0 ? sum / divisor : 0;
}

/* ---- preference losses on pairs, spec 4 ---- */

typedef enum { SLOW_REVERSE_KL, SLOW_FORWARD_KL, SLOW_JS, SLOW_ALPHA } slow_divergence;

/*
 * label_smoothing is epsilon, gamma SimPO's target margin, delta BCO's reward shift, tau
 * DiscoPOP's temperature, alpha the alpha-divergence's.  The divergence's default is 0: reverse
 * KL, which is DPO's.
 */
typedef struct {
    double beta, label_smoothing, gamma, delta, tau, alpha;
    slow_divergence divergence;
    bool reference_free;
} slow_preference;

/* Log-probabilities summed over the completions' tokens, and how many those are. */
typedef struct {
    slow_complex chosen, rejected;
    double ref_chosen, ref_rejected, chosen_length, rejected_length;
} slow_pair;

typedef slow_complex slow_pair_loss(const slow_preference *o, const slow_pair *x);

/* Spec 4, f-divergence scores of h = logp - ref_logp ([T]); alpha's exponent is capped at 80
   as for fp32. */
SLOW slow_complex slow_divergence_score(const slow_preference *o, slow_complex h) {
    switch (o->divergence) {
    case SLOW_FORWARD_KL: return -cexp(-h);
    case SLOW_JS: return slow_logsigmoid(h);
    case SLOW_ALPHA:
        return cexp(slow_clamp((o->alpha - 1) * h, -HUGE_VAL, 80)) / (o->alpha - 1);
    case SLOW_REVERSE_KL: break;
    }
    return h;
}

/* h_w, or its score under another divergence. */
SLOW slow_complex slow_chosen(const slow_preference *o, const slow_pair *x) {
    return slow_divergence_score(o, o->reference_free ? x->chosen : x->chosen - x->ref_chosen);
}

SLOW slow_complex slow_rejected(const slow_preference *o, const slow_pair *x) {
    return slow_divergence_score(o, o->reference_free ? x->rejected
                                                      : x->rejected - x->ref_rejected);
}

/* z = beta (h_w - h_l) */
SLOW slow_complex slow_margin(const slow_preference *o, const slow_pair *x) {
    return o->beta * (slow_chosen(o, x) - slow_rejected(o, x));
}

/* -(1 - epsilon) logsigmoid(z) - epsilon logsigmoid(-z), written with softplus. */
SLOW slow_complex slow_smoothed(double epsilon, slow_complex z) {
    return (1 - epsilon) * slow_softplus(-z) + epsilon * slow_softplus(z);
}

/* DPO sigmoid, and cDPO with label_smoothing as [O5] [T23] have it: -(1-e) logsigmoid(z) - e
   logsigmoid(-z). */
SLOW slow_complex slow_dpo_sigmoid(const slow_preference *o, const slow_pair *x) {
    return slow_smoothed(o->label_smoothing, slow_margin(o, x));
}

/* Robust DPO ([T]): [-(1-e) logsigmoid(z) + e logsigmoid(-z)] / (1 - 2e) */
SLOW slow_complex slow_dpo_robust(const slow_preference *o, const slow_pair *x) {
    double e = o->label_smoothing;
    slow_complex z = slow_margin(o, x);
    return ((1 - e) * slow_softplus(-z) - e * slow_softplus(z)) / (1 - 2 * e);
}

/* Hinge, SLiC ([T]): max(0, 1 - z) */
SLOW slow_complex slow_dpo_hinge(const slow_preference *o, const slow_pair *x) {
    slow_complex z = slow_margin(o, x);
    return creal(z) < 1 ? 1 - z : 0;
}

/* IPO on sums, the default because [O5] [OH] have it so: (h_w - h_l - 1/(2 beta))^2 */
SLOW slow_complex slow_ipo(const slow_preference *o, const slow_pair *x) {
    return slow_square(slow_chosen(o, x) - slow_rejected(o, x) - 1 / (2 * o->beta));
}

/* h_w / n_w - h_l / n_l */
SLOW slow_complex slow_mean_difference(const slow_preference *o, const slow_pair *x) {
    return slow_chosen(o, x) / x->chosen_length - slow_rejected(o, x) / x->rejected_length;
}

/* IPO on means ([T]): (h_w/n_w - h_l/n_l - 1/(2 beta))^2 */
SLOW slow_complex slow_ipo_mean(const slow_preference *o, const slow_pair *x) {
    return slow_square(slow_mean_difference(o, x) - 1 / (2 * o->beta));
}

/* Length-normalised DPO, sigmoid_norm ([T]): -logsigmoid(beta (h_w/n_w - h_l/n_l)) */
SLOW slow_complex slow_dpo_norm(const slow_preference *o, const slow_pair *x) {
    return slow_softplus(-o->beta * slow_mean_difference(o, x));
}

/* EXO ([T]): the KL of (sigmoid(z), sigmoid(-z)) from (1 - e, e); e = 0 is not allowed. */
SLOW slow_complex slow_exo_pair(const slow_preference *o, const slow_pair *x) {
    double e = o->label_smoothing;
    slow_complex z = slow_margin(o, x);
    return slow_sigmoid(z) * (slow_logsigmoid(z) - log(1 - e)) +
           slow_sigmoid(-z) * (slow_logsigmoid(-z) - log(e));
}

/* NCA ([T]): -logsigmoid(r_w) - 1/2 logsigmoid(-r_w) - 1/2 logsigmoid(-r_l), r = beta h */
SLOW slow_complex slow_nca_pair(const slow_preference *o, const slow_pair *x) {
    slow_complex w = o->beta * slow_chosen(o, x), l = o->beta * slow_rejected(o, x);
    return slow_softplus(-w) + slow_softplus(w) / 2 + slow_softplus(l) / 2;
}

/* BCO on a pair ([T]): -logsigmoid(r_w - delta) - logsigmoid(-(r_l - delta)) */
SLOW slow_complex slow_bco_pair(const slow_preference *o, const slow_pair *x) {
    slow_complex w = o->beta * slow_chosen(o, x), l = o->beta * slow_rejected(o, x);
    return slow_softplus(o->delta - w) + slow_softplus(l - o->delta);
}

/* SPPO hard ([T]): (h_w - 1/(2 beta))^2 + (h_l + 1/(2 beta))^2 */
SLOW slow_complex slow_sppo_hard(const slow_preference *o, const slow_pair *x) {
    double half = 1 / (2 * o->beta);
    return slow_square(slow_chosen(o, x) - half) + slow_square(slow_rejected(o, x) + half);
}

/* APO zero ([T]): 1 - sigmoid(beta h_w) + sigmoid(beta h_l) */
SLOW slow_complex slow_apo_zero(const slow_preference *o, const slow_pair *x) {
    return slow_sigmoid(-o->beta * slow_chosen(o, x)) +
           slow_sigmoid(o->beta * slow_rejected(o, x));
}

/* APO down ([T]): sigmoid(beta h_w) + 1 - sigmoid(z) */
SLOW slow_complex slow_apo_down(const slow_preference *o, const slow_pair *x) {
    return slow_sigmoid(o->beta * slow_chosen(o, x)) + slow_sigmoid(-slow_margin(o, x));
}

/* DiscoPOP ([T]): softplus(-z) (1 - m) + e^-z m, m = sigmoid(z / tau) */
SLOW slow_complex slow_discopop(const slow_preference *o, const slow_pair *x) {
    slow_complex z = slow_margin(o, x), m = slow_sigmoid(z / o->tau);
    return slow_softplus(-z) * (1 - m) + cexp(-z) * m;
}

/* SimPO, spec 4.1 ([T] [LF]): z = beta (s_w/n_w - s_l/n_l) - gamma without a reference,
   smoothed as cDPO. */
SLOW slow_complex slow_simpo(const slow_preference *o, const slow_pair *x) {
    slow_complex u = x->chosen / x->chosen_length - x->rejected / x->rejected_length;
    return slow_smoothed(o->label_smoothing, o->beta * u - o->gamma);
}

/* CPO, spec 4.2 ([T]), without its NLL: -logsigmoid(beta (s_w - s_l)) */
SLOW slow_complex slow_cpo(const slow_preference *o, const slow_pair *x) {
    return slow_smoothed(o->label_smoothing, o->beta * (x->chosen - x->rejected));
}

/* log odds of chosen against rejected, a = s / n: (a_w - a_l) - (log1mexp(a_w) -
   log1mexp(a_l)) */
SLOW slow_complex slow_log_odds(const slow_pair *x) {
    slow_complex w = x->chosen / x->chosen_length, l = x->rejected / x->rejected_length;
    return w - l - (slow_log1mexp(w) - slow_log1mexp(l));
}

/* ORPO's odds term, spec 4.3 ([T] [LF]), without its NLL: -beta logsigmoid(log odds) */
SLOW slow_complex slow_orpo(const slow_preference *o, const slow_pair *x) {
    return o->beta * slow_softplus(-slow_log_odds(x));
}

typedef struct {
    const char *name;
    slow_pair_loss *loss;
} slow_pair_entry;

__attribute__((unused)) static const slow_pair_entry slow_pair_losses[] = {
    {"dpo_sigmoid", slow_dpo_sigmoid},
    {"dpo_robust", slow_dpo_robust},
    {"dpo_hinge", slow_dpo_hinge},
    {"ipo", slow_ipo},
    {"ipo_mean", slow_ipo_mean},
    {"dpo_norm", slow_dpo_norm},
    {"exo_pair", slow_exo_pair},
    {"nca_pair", slow_nca_pair},
    {"bco_pair", slow_bco_pair},
    {"sppo_hard", slow_sppo_hard},
    {"apo_zero", slow_apo_zero},
    {"apo_down", slow_apo_down},
    {"discopop", slow_discopop},
    {"simpo", slow_simpo},
    {"cpo", slow_cpo},
    {"orpo", slow_orpo},
    {NULL, NULL},
};

/* NULL if there is no such loss. */
SLOW slow_pair_loss *slow_pair_loss_named(const char *name) {
    const slow_pair_entry *e = slow_pair_losses;
    while (e->name && strcmp(e->name, name)) e++;
    return e->loss;
}

/* NLL of the chosen completions, spec 4: the mean over pairs of -s_w/n_w, as nll_loss_coef
   of [O5] [OH]. */
SLOW slow_complex slow_chosen_nll(int64_t pairs, const slow_pair *x) {
    slow_complex sum = 0;
    for (int64_t p = 0; p < pairs; p++) sum -= x[p].chosen / x[p].chosen_length;
    return sum / (double)pairs;
}

/* The same as a mean over the chosen tokens of all pairs: rpo_alpha of [T23], CPO's NLL. */
SLOW slow_complex slow_chosen_nll_tokens(int64_t pairs, const slow_pair *x) {
    slow_complex sum = 0;
    double tokens = 0;
    for (int64_t p = 0; p < pairs; p++) {
        sum -= x[p].chosen;
        tokens += x[p].chosen_length;
    }
    return sum / tokens;
}

/* Mean over the step's pairs plus nll_coef times the NLL per pair; RPO is this with
   slow_dpo_sigmoid. */
SLOW slow_complex slow_preference_mean(slow_pair_loss *loss, const slow_preference *o,
                                       double nll_coef, int64_t pairs, const slow_pair *x) {
    slow_complex sum = 0;
    for (int64_t p = 0; p < pairs; p++) sum += loss(o, &x[p]);
    return sum / (double)pairs + (nll_coef != 0 ? nll_coef * slow_chosen_nll(pairs, x) : 0);
}

/*
 * The pairs of a packed row that holds all the chosen documents before all the rejected ones,
 * as [O5]'s: sequence p against sequence pairs + p.  The sums and the lengths are over the
 * masked tokens, the completions'.
 */
SLOW void slow_pairs(const slow_sequences *s, const slow_complex *logp, const double *ref_logp,
                     slow_pair *x) {
    int64_t pairs = s->sequences / 2;
    slow_complex *ref = slow_promote(s->cu_seqlens[s->sequences], ref_logp);
    for (int64_t w = 0, l = pairs; w < pairs; w++, l++) {
        x[w].chosen = slow_sequence_sum(s, w, logp);
        x[w].rejected = slow_sequence_sum(s, l, logp);
        x[w].ref_chosen = creal(slow_sequence_sum(s, w, ref));
        x[w].ref_rejected = creal(slow_sequence_sum(s, l, ref));
        x[w].chosen_length = slow_sequence_length(s, w);
        x[w].rejected_length = slow_sequence_length(s, l);
    }
    free(ref);
}

typedef struct {
    double chosen_reward, rejected_reward, margin, accuracy;
} slow_preference_metrics;

/* Spec 4: r = beta h even where the loss normalises by length; accuracy counts r_w > r_l, so
   a tie is wrong. */
SLOW slow_preference_metrics slow_preference_report(double beta, int64_t pairs,
                                                    const slow_pair *x) {
    slow_preference_metrics y = {0, 0, 0, 0};
    for (int64_t p = 0; p < pairs; p++) {
        double w = beta * (creal(x[p].chosen) - x[p].ref_chosen);
        double l = beta * (creal(x[p].rejected) - x[p].ref_rejected);
        y.chosen_reward += w / (double)pairs;
        y.rejected_reward += l / (double)pairs;
        y.margin += (w - l) / (double)pairs;
        y.accuracy += (w > l) / (double)pairs;
    }
    return y;
}

/* LD-DPO, spec 4 ([T]): s = sum over the first min(n, other_length) completion tokens +
   alpha times the rest. */
SLOW slow_complex slow_ld_logp(int64_t n, int64_t other_length, double alpha,
                               const slow_complex *logp) {
    slow_complex sum = 0;
    for (int64_t t = 0; t < n; t++) sum += (t < other_length ? 1 : alpha) * logp[t];
    return sum;
}

/* ---- unpaired: KTO, spec 5.1 ([O5]) ---- */

typedef struct {
    double beta, desirable_weight, undesirable_weight;
} slow_kto;

/*
 * max(0, mean of logp - ref_logp) over the mismatched pairs of the whole step: the clamp comes
 * after the mean. Detached.  [O5] averages the ranks' means; with equal counts per rank that is
 * this.
 */
SLOW double slow_kto_kl(int64_t count, const double *logp, const double *ref_logp) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += logp[i] - ref_logp[i];
    return fmax(0, sum / (double)count);
}

/* Mean over all examples of w_D (1 - sigmoid(beta (h - kl))) or w_U (1 - sigmoid(beta (kl -
   h))). */
SLOW slow_complex slow_kto_loss(const slow_kto *o, int64_t count, const bool *desirable,
                                double kl, const slow_complex *logp, const double *ref_logp) {
    slow_complex sum = 0;
    for (int64_t i = 0; i < count; i++) {
        slow_complex u = o->beta * (logp[i] - ref_logp[i] - kl);
        sum += desirable[i] ? o->desirable_weight * slow_sigmoid(-u)
                            : o->undesirable_weight * slow_sigmoid(u);
    }
    return sum / (double)count;
}

/* ---- reward models, spec 6 ---- */

/* -logsigmoid(r_w - r_l - margin), [O5]'s PairWiseLoss; the margin's default is 0. */
SLOW slow_complex slow_rm_sigmoid(slow_complex chosen, slow_complex rejected, double margin) {
    return slow_softplus(rejected - chosen + margin);
}

/* log(1 + e^(r_l - r_w)), [O5]'s LogExpLoss: the same function without a margin. */
SLOW slow_complex slow_rm_logexp(slow_complex chosen, slow_complex rejected) {
    return slow_softplus(rejected - chosen);
}

/* The mean over pairs plus center (r_w + r_l)^2 ([T]; OpenRLHF has none: center = 0).
   margin may be NULL. */
SLOW slow_complex slow_rm_loss(int64_t pairs, const slow_complex *chosen,
                               const slow_complex *rejected, const double *margin,
                               double center) {
    slow_complex sum = 0;
    for (int64_t p = 0; p < pairs; p++) {
        sum += slow_rm_sigmoid(chosen[p], rejected[p], slow_or(margin, p, 0));
        sum += center * slow_square(chosen[p] + rejected[p]);
    }
    return sum / (double)pairs;
}

/* The fraction of pairs whose chosen score is strictly above the rejected one. */
SLOW double slow_accuracy(int64_t pairs, const double *chosen, const double *rejected) {
    double right = 0;
    for (int64_t p = 0; p < pairs; p++) right += chosen[p] > rejected[p];
    return right / (double)pairs;
}

/* PRM with a soft label, spec 6.2 ([O5]): the cross-entropy of (p, 1 - p) on the two reward
   tokens' logits. */
SLOW slow_complex slow_prm_soft(double p, const slow_complex *two_logits) {
    slow_complex lse = slow_log_sum_exp(2, two_logits);
    return -p * (two_logits[0] - lse) - (1 - p) * (two_logits[1] - lse);
}

/* ---- distillation, spec 7: one token's distributions ---- */

/* log of the mixture (1 - beta) S + beta T, which for beta = 0 or 1 is one of the two. */
SLOW slow_complex slow_log_mixture(double beta, slow_complex log_student,
                                   slow_complex log_teacher) {
    slow_complex both[2] = {log(1 - beta) + log_student, log(beta) + log_teacher};
    return beta == 0 ? log_student : beta == 1 ? log_teacher : slow_log_sum_exp(2, both);
}

/* Forward KL(T || S), [O5]'s KDLoss less the teacher's entropy, which has no gradient. */
SLOW slow_complex slow_kd_forward(int64_t vocab, const slow_complex *student,
                                  const slow_complex *teacher) {
    slow_complex s = slow_log_sum_exp(vocab, student), t = slow_log_sum_exp(vocab, teacher),
                 sum = 0;
    for (int64_t j = 0; j < vocab; j++)
        sum += cexp(teacher[j] - t) * (teacher[j] - t - (student[j] - s));
    return sum;
}

/* Reverse KL(S || T), GKD with beta = 1 ([T]). */
SLOW slow_complex slow_kd_reverse(int64_t vocab, const slow_complex *student,
                                  const slow_complex *teacher) {
    return slow_kd_forward(vocab, teacher, student);
}

/* Generalised JSD ([T] GKD), 0 < beta < 1: beta KL(T || M) + (1 - beta) KL(S || M), M = (1 -
   beta) S + beta T. */
SLOW slow_complex slow_kd_jsd(double beta, int64_t vocab, const slow_complex *student,
                              const slow_complex *teacher) {
    slow_complex s = slow_log_sum_exp(vocab, student), t = slow_log_sum_exp(vocab, teacher),
                 sum = 0;
    for (int64_t j = 0; j < vocab; j++) {
        slow_complex log_s = student[j] - s, log_t = teacher[j] - t;
        slow_complex log_m = slow_log_mixture(beta, log_s, log_t);
        sum += beta * cexp(log_t) * (log_t - log_m) +
               (1 - beta) * cexp(log_s) * (log_s - log_m);
    }
    return sum;
}

/* ---- KL estimators, spec 8.1: d = logp - ref_logp of one sampled token ---- */

SLOW slow_complex slow_k1(slow_complex d) { return d; }

SLOW slow_complex slow_k2(slow_complex d) { return d * d / 2; }

/*
 * e^-d - 1 + d.  Near 0 the result is d^2/2, and even expm1(-d) + d cancels: its error is
 * relative to d.  The series sum_{k >= 2} (-d)^k / k! keeps all digits.
 */
SLOW slow_complex slow_k3(slow_complex d) {
    slow_complex term = -d, sum = 0;
    if (fabs(creal(d)) > .5) return slow_expm1(-d) + d;
    for (int k = 2; k < 20; k++) sum += term *= -d / (double)k;
    return sum;
}

/* [OH] clamps the estimate to +-10; [T] does not: limit = HUGE_VAL. */
SLOW slow_complex slow_kl(slow_complex estimator(slow_complex), double limit, slow_complex logp,
                          double ref_logp) {
    return slow_clamp(estimator(logp - ref_logp), -limit, limit);
}

/* sum w x / sum w; of the sequences' KL by their lengths it is what the adaptive controller
   observes (spec 8.2). */
SLOW double slow_weighted_mean(int64_t count, const double *x, const double *w) {
    double sum = 0, weights = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += x[i] * w[i];
        weights += w[i];
    }
    return sum / weights;
}

/* [O5] FixedKLController, the default: the coefficient stays. */
SLOW double slow_fixed_kl(double kl_coef, double observed) {
    (void)observed;
    return kl_coef;
}

/* [O5] [T9] AdaptiveKLController: kl_coef (1 + clip(observed/target - 1, +-0.2) n /
   horizon). */
SLOW double slow_adaptive_kl(double kl_coef, double observed, double target, double n,
                             double horizon) {
    double error = fmin(fmax(observed / target - 1, -.2), .2);
    return kl_coef * (1 + error * n / horizon);
}

/* ---- rewards, spec 8.2 ---- */

/* (r - mean) / std of the reward model's evaluation, std clamped at 1e-8, clipped to +-limit
   (HUGE_VAL: not). */
SLOW double slow_normalize_reward(double reward, double mean, double std, double limit) {
    return fmin(fmax((reward - mean) / fmax(std, 1e-8), -limit), limit);
}

/* Overlong penalty ([OH], DAPO): e = min(len - (max_new - buffer), buffer); if e > 0, -e /
   buffer factor. */
SLOW double slow_overlong_penalty(double length, double max_new, double buffer, double factor) {
    double exceed = fmin(length - (max_new - buffer), buffer);
    return exceed > 0 ? -exceed / buffer * factor : 0;
}

/* The last token of sequence i that counts, -1 if none does. */
SLOW int64_t slow_last_action(const slow_sequences *s, int64_t i) {
    for (int64_t t = s->cu_seqlens[i + 1] - 1; t >= s->cu_seqlens[i]; t--)
        if (slow_or(s->mask, t, 1) != 0) return t;
    return -1;
}

/*
 * [O5] compute_reward: r_t = -kl_coef kl_t, and clip(score, low, high) on the sequence's last
 * action; a coefficient below 0 is 0.  The default clip is (-10, 10), after any group baseline.
 */
SLOW void slow_shaped_rewards(const slow_sequences *s, double kl_coef, const double *kl,
                              const double *score, double low, double high, double *rewards) {
    for (int64_t i = 0; i < s->sequences; i++) {
        int64_t last = slow_last_action(s, i);
        for (int64_t t = s->cu_seqlens[i]; t < s->cu_seqlens[i + 1]; t++) {
            rewards[t] = -fmax(kl_coef, 0) * slow_or(s->mask, t, 1) * kl[t];
            if (t == last) rewards[t] += fmin(fmax(score[i], low), high);
        }
    }
}

/* ---- advantages, spec 8.3 and 8.4 ---- */

/*
 * GAE, [O5] get_advantages_and_returns, per document of the row; the mask comes first, V <- V m and r <- r m:
 *     delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1},  G_t = A_t + V_t,
 * where beyond a document's end both V and A are 0, whether it ended or was cut off.
 * Defaults: gamma = 1; lambda = .95 in [O5], 1 in [OH].
 */
SLOW void slow_gae(const slow_sequences *s, double gamma, double lambda, const double *rewards,
                   const double *values, double *advantages, double *returns) {
    for (int64_t i = 0; i < s->sequences; i++) {
        double next_value = 0, next_advantage = 0;
        for (int64_t t = s->cu_seqlens[i + 1] - 1; t >= s->cu_seqlens[i]; t--) {
            double m = slow_or(s->mask, t, 1), value = values[t] * m;
            double delta = rewards[t] * m + gamma * next_value - value;
            advantages[t] = delta + gamma * lambda * next_advantage;
            returns[t] = advantages[t] + value;
            next_value = value;
            next_advantage = advantages[t];
        }
    }
}

/* REINFORCE, [O5] get_cumulative_returns: G_t = r_t m_t + gamma G_{t+1}, which is the
   advantage too. */
SLOW void slow_reward_to_go(const slow_sequences *s, double gamma, const double *rewards,
                            double *returns) {
    for (int64_t i = 0; i < s->sequences; i++) {
        double next = 0;
        for (int64_t t = s->cu_seqlens[i + 1] - 1; t >= s->cu_seqlens[i]; t--)
            next = returns[t] = rewards[t] * slow_or(s->mask, t, 1) + gamma * next;
    }
}

SLOW double slow_masked_mean(int64_t count, const double *mask, const double *x) {
    double sum = 0, n = 0;
    for (int64_t k = 0; k < count; k++) {
        sum += slow_or(mask, k, 1) * x[k];
        n += slow_or(mask, k, 1);
    }
    return sum / n;
}

/* The population's variance: the divisor is the number of unmasked. */
SLOW double slow_masked_variance(int64_t count, const double *mask, const double *x) {
    double mean = slow_masked_mean(count, mask, x);
    double *squares = slow_allocate(count, sizeof(double));
    for (int64_t k = 0; k < count; k++) squares[k] = (x[k] - mean) * (x[k] - mean);
    double variance = slow_masked_mean(count, mask, squares);
    free(squares);
    return variance;
}

/*
 * Whitening, [O5]: (x - mean) rsqrt(max(variance, 1e-8)) with the population's moments over the
 * whole rollout. What it leaves at masked entries means nothing.  out may be x.
 */
SLOW void slow_whiten(int64_t count, const double *mask, const double *x, double *out) {
    double mean = slow_masked_mean(count, mask, x);
    double variance = slow_masked_variance(count, mask, x);
    for (int64_t k = 0; k < count; k++) out[k] = (x[k] - mean) / sqrt(fmax(variance, 1e-8));
}

/* Whitening, [T] PPO: unbiased, rsqrt(variance + 1e-8), the mean put back if shift_mean is
   false. */
SLOW void slow_whiten_unbiased(int64_t count, const double *mask, bool shift_mean,
                               const double *x, double *out) {
    double mean = slow_masked_mean(count, mask, x), n = 0;
    for (int64_t k = 0; k < count; k++) n += slow_or(mask, k, 1);
    double variance = slow_masked_variance(count, mask, x) * n / (n - 1);
    for (int64_t k = 0; k < count; k++)
        out[k] = (x[k] - mean) / sqrt(variance + 1e-8) + (shift_mean ? 0 : mean);
}

/* REINFORCE++ ([OH] "reinforce"): token returns of rewards that hold the KL, then global
   whitening. */
SLOW void slow_reinforce_plus_plus(const slow_sequences *s, double gamma, const double *rewards,
                                   double *advantages) {
    slow_reward_to_go(s, gamma, rewards, advantages);
    slow_whiten(s->cu_seqlens[s->sequences], s->mask, advantages, advantages);
}

/* Dr.GRPO and [OH] reinforce_baseline: R - mean of the prompt's n samples, which lie side by
   side. */
SLOW void slow_group_baseline(int64_t prompts, int64_t n, const double *reward,
                              double *shaped) {
    for (int64_t p = 0; p < prompts; p++)
        for (int64_t i = p * n; i < (p + 1) * n; i++)
            shaped[i] = reward[i] - slow_mean(n, reward + p * n);
}

/* GRPO: (R - mean) / (unbiased std + eps); eps is 1e-9 in [OH] (group_norm, the default),
   1e-4 [T], 1e-6 [V]. */
SLOW void slow_group_norm(int64_t prompts, int64_t n, double eps, const double *reward,
                          double *shaped) {
    for (int64_t p = 0; p < prompts; p++) {
        double mean = slow_mean(n, reward + p * n), std = slow_std_unbiased(n, reward + p * n);
        for (int64_t i = p * n; i < (p + 1) * n; i++)
            shaped[i] = (reward[i] - mean) / (std + eps);
    }
}

/* RLOO ([OH] [T]): R_i less the mean of the other n - 1 samples. */
SLOW void slow_rloo(int64_t prompts, int64_t n, const double *reward, double *shaped) {
    for (int64_t i = 0; i < prompts * n; i++) {
        double others = 0;
        for (int64_t k = i / n * n; k < i / n * n + n; k++)
            if (k != i) others += reward[k];
        shaped[i] = reward[i] - others / (double)(n - 1);
    }
}

/* OPO ([V]): R less the mean that weighs each sample by its length. */
SLOW void slow_opo(int64_t prompts, int64_t n, const double *length, const double *reward,
                   double *shaped) {
    for (int64_t p = 0; p < prompts; p++)
        for (int64_t i = p * n; i < (p + 1) * n; i++)
            shaped[i] = reward[i] - slow_weighted_mean(n, reward + p * n, length + p * n);
}

/* REINFORCE++-baseline: the scores are group-centred, go through the shaped reward, then as
   REINFORCE++. */
SLOW void slow_reinforce_plus_plus_baseline(const slow_sequences *s, int64_t n, double kl_coef,
                                            const double *kl, const double *score, double low,
                                            double high, double *advantages) {
    double *shaped = slow_allocate(s->sequences, sizeof(double));
    double *rewards = slow_allocate(s->cu_seqlens[s->sequences], sizeof(double));
    slow_group_baseline(s->sequences / n, n, score, shaped);
    slow_shaped_rewards(s, kl_coef, kl, shaped, low, high, rewards);
    slow_reinforce_plus_plus(s, 1, rewards, advantages);
    free(shaped);
    free(rewards);
}

/* One scalar per sequence to all its tokens: what return-to-go with gamma = 1 makes of a
   terminal reward. */
SLOW void slow_spread(const slow_sequences *s, const double *per_sequence, double *per_token) {
    for (int64_t i = 0; i < s->sequences; i++)
        for (int64_t t = s->cu_seqlens[i]; t < s->cu_seqlens[i + 1]; t++)
            per_token[t] = per_sequence[i];
}

/* ---- policy losses of one token or one sequence, spec 8.5 ---- */

/*
 * clip_low and clip_high are .2 by default; dual_clip is c > 1, 0 for none, the default; the
 * log-ratio is clamped to +-log_ratio_limit, 20 in [OH], before exp: HUGE_VAL for none, as in
 * [O5] and [T].
 */
typedef struct {
    double clip_low, clip_high, dual_clip, log_ratio_limit;
} slow_ppo;

SLOW slow_complex slow_ratio(const slow_ppo *o, slow_complex logp, double old_logp) {
    return cexp(slow_clamp(logp - old_logp, -o->log_ratio_limit, o->log_ratio_limit));
}

/* -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A); with a dual clip and A < 0,
   -max(that min, c A). */
SLOW slow_complex slow_clipped_surrogate(const slow_ppo *o, slow_complex ratio,
                                         double advantage) {
    slow_complex clipped = slow_clamp(ratio, 1 - o->clip_low, 1 + o->clip_high);
    slow_complex surrogate = slow_min(ratio * advantage, clipped * advantage);
    if (o->dual_clip > 0 && advantage < 0)
        surrogate = slow_max(surrogate, o->dual_clip * advantage);
    return -surrogate;
}

/* PPO ([O5] PolicyLoss), DAPO's clip-higher with clip_high > clip_low, dual clip ([OH] [V]). */
SLOW slow_complex slow_ppo_policy(const slow_ppo *o, slow_complex logp, double old_logp,
                                  double advantage) {
    return slow_clipped_surrogate(o, slow_ratio(o, logp, old_logp), advantage);
}

/* Did the clip take effect: is the clipped surrogate strictly below the other?  Its mean is
   clipfrac. */
SLOW bool slow_clipped(const slow_ppo *o, double logp, double old_logp, double advantage) {
    double ratio = creal(slow_ratio(o, logp, old_logp));
    return creal(slow_clamp(ratio, 1 - o->clip_low, 1 + o->clip_high)) * advantage <
           ratio * advantage;
}

/* Plain REINFORCE: -A logp, PPO's gradient at ratio 1. */
SLOW slow_complex slow_reinforce(slow_complex logp, double advantage) {
    return -advantage * logp;
}

/* CISPO ([T]): -sg(min(ratio, cap)) A logp; the cap is absolute. */
SLOW slow_complex slow_cispo(double cap, slow_complex logp, double old_logp, double advantage) {
    return -fmin(exp(creal(logp) - old_logp), cap) * advantage * logp;
}

/* SAPO ([T]): -(4/tau) sigmoid(tau (ratio - 1)) A; tau 1 for A > 0 and 1.05 otherwise by
   default. */
SLOW slow_complex slow_sapo(double tau, slow_complex logp, double old_logp, double advantage) {
    return -4 / tau * slow_sigmoid(tau * (cexp(logp - old_logp) - 1)) * advantage;
}

/* mean over sequence i of logp - old_logp, GSPO's log-ratio. */
SLOW slow_complex slow_mean_log_ratio(const slow_sequences *s, int64_t i,
                                      const slow_complex *logp, const double *old_logp) {
    slow_complex sum = 0;
    for (int64_t t = s->cu_seqlens[i]; t < s->cu_seqlens[i + 1]; t++)
        if (slow_or(s->mask, t, 1) != 0) sum += logp[t] - old_logp[t];
    return sum / slow_sequence_length(s, i);
}

/* GSPO ([OH] [T] [V]): PPO's surrogate of the sequence's geometric mean ratio, mean over
   sequences not empty. */
SLOW slow_complex slow_gspo(const slow_ppo *o, const slow_sequences *s,
                            const slow_complex *logp, const double *old_logp,
                            const double *advantage) {
    slow_complex sum = 0;
    double nonempty = 0;
    for (int64_t i = 0; i < s->sequences; i++)
        if (slow_sequence_length(s, i) > 0) {
            slow_complex ratio = cexp(slow_mean_log_ratio(s, i, logp, old_logp));
            sum += slow_clipped_surrogate(o, ratio, advantage[i]);
            nonempty++;
        }
    return sum / nonempty;
}

/* RLOO's loss in [T], spec 8.10: the ratio of whole sequences, exp(sum of logp - old_logp),
   clipped. */
SLOW slow_complex slow_rloo_loss(const slow_ppo *o, const slow_sequences *s,
                                 const slow_complex *logp, const double *old_logp,
                                 const double *advantage) {
    slow_complex sum = 0;
    for (int64_t i = 0; i < s->sequences; i++) {
        double n = slow_sequence_length(s, i);
        slow_complex log_ratio = n > 0 ? n * slow_mean_log_ratio(s, i, logp, old_logp) : 0;
        sum += slow_clipped_surrogate(o, cexp(log_ratio), advantage[i]);
    }
    return sum / (double)s->sequences;
}

/* VESPO's weight ([T]): exp(lambda + k ln w - lambda w), (k, lambda) = (2, 3) for A >= 0 and
   (3, 2) below. */
SLOW double slow_vespo_weight(double w, double advantage) {
    double k = advantage >= 0 ? 2 : 3, lambda = advantage >= 0 ? 3 : 2;
    return exp(lambda + k * log(w) - lambda * w);
}

/* ---- value loss, spec 8.6 ---- */

/*
 * 1/2 max((V - G)^2, (V_clip - G)^2), V_clip = V_old + clamp(V - V_old, +-clip); HUGE_VAL for
 * no clip. The default clip is .2 in [O5] and [T], .5 in [OH].
 */
SLOW slow_complex slow_value_loss(double clip, slow_complex value, double old_value,
                                  double returns) {
    slow_complex clipped = value;
    if (!isinf(clip)) clipped = old_value + slow_clamp(value - old_value, -clip, clip);
    return slow_max(slow_square(value - returns), slow_square(clipped - returns)) / 2;
}

/* ---- the actor's total, spec 8.7 ---- */

/* What the parts are multiplied by; all are 0 unless asked for, except that ptx_coef is .05
   with pretrain data. */
typedef struct {
    double kl_coef, entropy_coef, ptx_coef;
} slow_actor;

/* [OH]: L_policy + kl_coef L_kl - entropy_coef H + ptx_coef CE, each already aggregated. */
SLOW slow_complex slow_actor_loss(const slow_actor *o, slow_complex policy, slow_complex kl,
                                  slow_complex entropy, slow_complex ptx) {
    return policy + o->kl_coef * kl - o->entropy_coef * entropy + o->ptx_coef * ptx;
}

/* Exponential moving average of the parameters, spec 8.8 ([O5], beta = .992): ema <- beta
   ema + (1 - beta) x */
SLOW void slow_ema(double beta, int64_t count, const double *x, double *ema) {
    for (int64_t k = 0; k < count; k++) ema[k] = beta * ema[k] + (1 - beta) * x[k];
}

/* ---- mixture of experts, spec 9 ---- */

/* Is expert e among the k most probable ones?  The earlier one wins a tie. */
SLOW bool slow_routed(int64_t experts, int64_t k, const slow_complex *p, int64_t e) {
    int64_t better = 0;
    for (int64_t j = 0; j < experts; j++)
        better += creal(p[j]) > creal(p[e]) || (creal(p[j]) == creal(p[e]) && j < e);
    return better < k;
}

/* Balance loss ([HF]) of router probabilities: E sum_e f_e P_e, f the routed fraction
   (constant), P the mean. */
SLOW slow_complex slow_moe_balance(int64_t tokens, int64_t experts, int64_t k,
                                   const slow_complex *p) {
    slow_complex loss = 0;
    for (int64_t e = 0; e < experts; e++) {
        slow_complex mean = 0;
        double routed = 0;
        for (int64_t t = 0; t < tokens; t++) {
            mean += p[t * experts + e] / (double)tokens;
            routed += slow_routed(experts, k, p + t * experts, e);
        }
        loss += (double)experts * routed / (double)tokens * mean;
    }
    return loss;
}

/* ---- optimizers that are not slow.h's AdamW, spec 12.1 ---- */

/* The moments after step t of plain gradients; what AdamW's variants share. */
SLOW void slow_moments(const slow_adamw *a, double g, double *m, double *v) {
    *m += (1 - a->beta1) * (g - *m);
    *v = a->beta2 * *v + (1 - a->beta2) * g * g;
}

/* [PT] Adam and [DS] mode 0: the decay is an L2 term of the gradient, g <- g + weight_decay
   theta. */
SLOW void slow_adam_l2_step(const slow_adamw *a, double lr, int64_t t, int64_t count,
                            const double *g, double *m, double *v, double *theta) {
    double correction1 = 1 - pow(a->beta1, (double)t);
    double correction2 = 1 - pow(a->beta2, (double)t);
    for (int64_t k = 0; k < count; k++) {
        slow_moments(a, g[k] + a->weight_decay * theta[k], &m[k], &v[k]);
        theta[k] -= lr * (m[k] / correction1) / (sqrt(v[k] / correction2) + a->eps);
    }
}

/* TensorFlow 1's eps (the first PPO): theta -= lr sqrt(bc2) / bc1 m / (sqrt(v) + eps),
   decoupled decay first. */
SLOW void slow_adamw_tf1_step(const slow_adamw *a, double lr, int64_t t, int64_t count,
                              const double *g, double *m, double *v, double *theta) {
    double correction1 = 1 - pow(a->beta1, (double)t);
    double correction2 = 1 - pow(a->beta2, (double)t);
    for (int64_t k = 0; k < count; k++) {
        theta[k] *= 1 - lr * a->weight_decay;
        slow_moments(a, g[k], &m[k], &v[k]);
        theta[k] -= lr * sqrt(correction2) / correction1 * m[k] / (sqrt(v[k]) + a->eps);
    }
}

/* [BB]: Adam's update first, with eps scaled by sqrt(bc2) as in [PT], and the decay after
   it. */
SLOW void slow_adamw_decay_after_step(const slow_adamw *a, double lr, int64_t t, int64_t count,
                                      const double *g, double *m, double *v, double *theta) {
    double correction1 = 1 - pow(a->beta1, (double)t);
    double root2 = sqrt(1 - pow(a->beta2, (double)t));
    for (int64_t k = 0; k < count; k++) {
        slow_moments(a, g[k], &m[k], &v[k]);
        theta[k] -= lr * root2 / correction1 * m[k] / (sqrt(v[k]) + root2 * a->eps);
        theta[k] *= 1 - lr * a->weight_decay;
    }
}

#endif
