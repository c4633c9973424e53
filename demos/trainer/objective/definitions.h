/* SPDX-License-Identifier: MIT OR Unlicense */
/* definitions.h - losses that programs define differently under the same name.
 * --loss_definition selects the program whose definition is used. Each program has a row in the
 * table below, taken from the source of the releases that the row names.
 * verify/second/golden_definitions.tsv has the results of these releases for small inputs;
 * verify/pages/DEFINITIONS.md explains the differences. */
#ifndef DEMO_DEFINITIONS_H
#define DEMO_DEFINITIONS_H
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include "seqpar.h"

enum {
    DEMO_DEFINED_HERE, /* seqpar's own definition, the default */
    DEMO_DEFINED_OPENRLHF,
    DEMO_DEFINED_TRL,
    DEMO_DEFINED_LLAMAFACTORY,
    DEMO_DEFINITIONS
};

/* The fields from `pairs` to `means` are comma lists of the option values that the program
   supports. */
typedef struct {
    const char *name, *releases;
    const char *pairs;      /* --pref_loss */
    const char *smoothed;   /* --pref_loss values that use --label_smoothing */
    const char *with_nll;   /* --pref_loss values that use --nll_loss_coef */
    const char *rewards;    /* --loss of train_rm */
    const char *estimators; /* --advantage_estimator */
    const char *policies;   /* --policy_loss_type */
    const char *means;      /* --loss_agg_mode */
    bool margins;           /* the reward loss can use the margin of a pair */
    bool ipo_means;         /* IPO compares means over tokens, not sums */
    bool nll_tokens;        /* NLL term: mean over all chosen tokens, not over responses */
    bool bounded;           /* has --dual_clip */
    bool both_signs;        /* --dual_clip bounds the ratio for positive advantages, too */
    bool uncut, uncut_gspo; /* log-ratios of tokens (gspo: of texts) are not clamped to +-20 */
    bool added_by_tokens;   /* KL and entropy terms are token means with any loss_agg_mode */
    bool dr_grpo_by_length; /* Dr. GRPO divides by the maximum length of a text */
    bool centers_only;      /* has --no_advantage_std_norm */
    int whiten;             /* WHITEN_..., for whiten() */
    double group_eps;       /* added to the deviation of a group's rewards */
    double length_eps;      /* added to a text's number of tokens, if the mean is per text */
    double kl_limit;        /* the KL of a token is clamped to +- this; 0: it is not */
    bool padding;           /* the padding token's embedding gets no gradient from inputs */
} demo_definition;

enum { WHITEN_POPULATION, WHITEN_MEAN_ONLY, WHITEN_UNBIASED }; /* ways of whiten() */

#define DEMO_EVERY_ESTIMATOR "gae,reinforce,rloo,reinforce_baseline,group_norm,dr_grpo"
static const demo_definition demo_definitions[DEMO_DEFINITIONS] = {
    {.name = "seqpar",
     .releases = "seqpar",
     .pairs = "sigmoid,ipo,hinge,simpo,robust,kto_pair",
     .smoothed = "sigmoid,simpo,robust",
     .with_nll = "sigmoid,ipo,hinge,simpo,robust",
     .rewards = "sigmoid,logexp",
     .estimators = DEMO_EVERY_ESTIMATOR,
     .policies = "ppo,gspo",
     .means = "token-mean,seq-mean-token-mean,seq-mean-token-sum-norm",
     .margins = true,
     .bounded = true,
     .centers_only = true,
     .whiten = WHITEN_POPULATION,
     .group_eps = 1e-9},
    /* pairs: models/loss.py DPOLoss, trainer/dpo_trainer.py (nll_loss); kto_pair:
       VanillaKTOLoss, last in 0.8.11. Policies: models/loss.py PolicyLoss, aggregate_loss,
       trainer/ray/ppo_actor.py (KL and entropy). KL: models/utils.py compute_approx_kl.
       Advantages: trainer/ppo_utils/experience_maker.py. */
    {.name = "openrlhf",
     .releases = "OpenRLHF 0.11.2",
     .pairs = "sigmoid,ipo,kto_pair",
     .smoothed = "sigmoid",
     .with_nll = "sigmoid,ipo",
     .rewards = "sigmoid,logexp",
     .estimators = DEMO_EVERY_ESTIMATOR,
     .policies = "ppo,gspo",
     .means = "token-mean,seq-mean-token-mean",
     .margins = true,
     .bounded = true,
     .uncut_gspo = true,
     .added_by_tokens = true,
     .centers_only = true,
     .whiten = WHITEN_POPULATION,
     .group_eps = 1e-9,
     .length_eps = 1e-8,
     .kl_limit = 10,
     .padding = true},
    /* pairs: trainer/dpo_trainer.py _compute_loss, whose sigmoid ignores label_smoothing and
       whose NLL is loss_type "sft"; simpo: experimental/cpo, whose NLL includes the prompt.
       Policies: trainer/grpo_trainer.py _compute_loss; its delta is --dual_clip. RLOO is left
       out: TRL's has one ratio per text, from summed log-probs, and subtracts the KL before
       the baseline. PPO with a critic, and its whitening: 0.24.0, trainer/ppo_trainer.py and
       core.py. */
    {.name = "trl",
     .releases = "TRL 1.16.0",
     .pairs = "sigmoid,ipo,hinge,simpo,robust",
     .smoothed = "simpo,robust",
     .with_nll = "sigmoid,ipo,hinge,robust",
     .rewards = "sigmoid",
     .estimators = "gae,group_norm,dr_grpo",
     .policies = "ppo,gspo",
     .means = "token-mean,seq-mean-token-mean,seq-mean-token-sum-norm",
     .margins = true,
     .ipo_means = true,
     .nll_tokens = true,
     .bounded = true,
     .both_signs = true,
     .uncut = true,
     .uncut_gspo = true,
     .dr_grpo_by_length = true,
     .whiten = WHITEN_UNBIASED,
     .group_eps = 1e-4,
     .padding = true},
    /* pairs: train/dpo/trainer.py, which calls TRL's dpo_loss. TRL is 0.18.0 here: from 0.20 on
       dpo_loss takes the loss type as an argument, LLaMA-Factory does not pass it, and the loss
       is always sigmoid. kto_pair: last in TRL 0.8.6. Policies: TRL 0.9.6
       trainer/ppo_trainer.py, core.py. */
    {.name = "llamafactory",
     .releases = "LLaMA-Factory 0.9.5 with TRL 0.18.0",
     .pairs = "sigmoid,ipo,hinge,simpo,kto_pair",
     .smoothed = "sigmoid",
     .with_nll = "sigmoid,ipo,hinge,simpo",
     .rewards = "sigmoid",
     .estimators = "gae",
     .policies = "ppo",
     .means = "token-mean",
     .ipo_means = true,
     .uncut = true,
     .uncut_gspo = true,
     .whiten = WHITEN_UNBIASED,
     .group_eps = 1e-9,
     .padding = true}};

/* The definition of this name; for NULL and unknown names, seqpar's. */
static inline const demo_definition *demo_defined(const char *name) {
    for (int i = 0; name && i < DEMO_DEFINITIONS; i++)
        if (!strcmp(name, demo_definitions[i].name)) return &demo_definitions[i];
    return &demo_definitions[DEMO_DEFINED_HERE];
}

/* ---- pairs ---- */

/* chosen_mean: mean number of chosen tokens per pair of the step. */
static inline void demo_defined_pair(const demo_definition *by, seqpar_preference_desc *d,
                                     double chosen_mean) {
    d->length_normalized = d->kind == SEQPAR_PREFERENCE_IPO && by->ipo_means;
    d->nll_tokens = by->nll_tokens ? chosen_mean : 0.0;
}

/* KTO loss of pairs (HALOs' eqn 7). It compares the log-ratio h of each chosen response with
   the mean h of the rejected responses, and that of each rejected response with the mean h of
   the chosen ones. The means are over the whole step, and gradients flow through them. */
typedef struct {
    double chosen, rejected; /* max(0, mean of h) */
    double dchosen,
        drejected; /* derivative of the summed loss of all pairs by one h, through its mean */
} demo_kto_means;

static inline seqpar_pair_result demo_kto_pair(double chosen, double rejected, double beta,
                                               const demo_kto_means *m) {
    double up = beta * (chosen - m->rejected), down = beta * (m->chosen - rejected);
    return (seqpar_pair_result){
        .loss = 0.5 * (seqpar_sigmoid(-up) + seqpar_sigmoid(-down)),
        .dchosen = -0.5 * beta * seqpar_sigmoid(up) * seqpar_sigmoid(-up) + m->dchosen,
        .drejected = 0.5 * beta * seqpar_sigmoid(down) * seqpar_sigmoid(-down) + m->drejected,
        .reward_chosen = beta * chosen,
        .reward_rejected = beta * rejected};
}

/* terms (2 count) is scratch. A mean that was clamped to 0 has no gradient. */
static inline demo_kto_means demo_kto_means_of(const double *chosen, const double *rejected,
                                               int64_t count, double beta, double *terms) {
    demo_kto_means m = {seqpar_kto_kl(chosen, count), seqpar_kto_kl(rejected, count), 0, 0};
    for (int64_t i = 0; i < count; i++) {
        seqpar_pair_result r = demo_kto_pair(chosen[i], rejected[i], beta, &m);
        terms[i] = -r.drejected; /* the loss depends on h minus a mean: only the sign differs */
        terms[count + i] = -r.dchosen;
    }
    if (!(seqpar_mean(chosen, count) < 0)) m.dchosen = seqpar_mean(terms, count);
    if (!(seqpar_mean(rejected, count) < 0)) m.drejected = seqpar_mean(terms + count, count);
    return m;
}

/* ---- policies ---- */

static inline seqpar_policy_desc demo_defined_clip(const demo_definition *by, bool gspo,
                                                   double low, double high, double bound) {
    return (seqpar_policy_desc){.clip_low = low,
                                .clip_high = high,
                                .dual_clip = bound,
                                .both_signs = by->both_signs,
                                .uncut = gspo ? by->uncut_gspo : by->uncut};
}

/* The KL of a token, clamped to the limit of the definition. Where it is clamped its gradient
   is 0. */
static inline double demo_defined_kl(const demo_definition *by, double logp, double ref_logp,
                                     int kind, double *dlogp) {
    double kl = seqpar_kl(logp, ref_logp, kind, dlogp);
    if (!(by->kl_limit > 0) || !(fabs(kl) > by->kl_limit)) return kl;
    if (dlogp) *dlogp = 0;
    return kl < 0 ? -by->kl_limit : by->kl_limit;
}

/* A SEQPAR_AGGREGATE_... value: that of --loss_agg_mode, or without it the default of the
   loss. */
static inline int demo_defined_mean(const demo_definition *by, const char *mode, bool gspo,
                                    const char *estimator) {
    if (mode && !strcmp(mode, "token-mean")) return SEQPAR_AGGREGATE_TOKEN_MEAN;
    if (mode && !strcmp(mode, "seq-mean-token-sum-norm"))
        return SEQPAR_AGGREGATE_SEQUENCE_SUM_NORM;
    if (mode || gspo) return SEQPAR_AGGREGATE_SEQUENCE_MEAN;
    return by->dr_grpo_by_length && !strcmp(estimator, "dr_grpo")
               ? SEQPAR_AGGREGATE_SEQUENCE_SUM_NORM
               : SEQPAR_AGGREGATE_TOKEN_MEAN;
}

static inline double demo_defined_weight(const demo_definition *by, const seqpar_aggregate *a,
                                         int64_t tokens_of_text) {
    double weight = seqpar_token_weight(a, tokens_of_text), n = (double)tokens_of_text;
    return a->kind == SEQPAR_AGGREGATE_SEQUENCE_MEAN && by->length_eps > 0
               ? weight * n / (n + by->length_eps)
               : weight;
}
#endif
