/* SPDX-License-Identifier: MIT OR Unlicense */
/* policy.h - the loss of one token, right and with each mistake: minus its log-prob (SFT), or
 * PPO's
 *
 *     max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) + kl_coef (exp(d) - d - 1)
 *
 * where A is the token's advantage, d = ref_logp - logp, and r = exp(logp - old_logp), or exp of
 * the mean of logp - old_logp over the document (importance in dump.h). CISPO (MiniMax-M1, arXiv
 * 2506.13585) has -min(r, cispo) A logp in place of the first term, with no gradient through that
 * r. With kl_ratio token the KL term is multiplied by r. */
#ifndef ORACLE_POLICY_H
#define ORACLE_POLICY_H
#include "oracle/dump/rows.h"

/* Side tensors (old_logp, advantages, ...) are split like ids. If one is not, a rank reads
   another token's number: the source says which. */
enum { FROM_FIRST, FROM_GATHERED, SOURCES };
static const char *const source_texts[SOURCES] = {
    "each rank takes the first n of the row",
    "each rank takes what a contiguous split would give it"};

enum {
    TOKEN_RIGHT,
    TOKEN_KL_CUT,
    TOKEN_INVERTED,
    TOKEN_WRONG_SIDE,
    TOKEN_NO_CLIP,
    TOKEN_NO_KL,
    TOKEN_K1,
    TOKEN_K2,
    TOKEN_KL_REVERSED,
    TOKEN_KL_PLAIN,
    TOKEN_RATIO_PART,
    TOKEN_RATIO_SHARE,
    TOKEN_RATIO_OWN,
    TOKEN_OLD, /* this and the following have one value per source */
    TOKEN_ADVANTAGE = TOKEN_OLD + SOURCES,
    TOKEN_REFERENCE = TOKEN_ADVANTAGE + SOURCES,
    TOKEN_RETURNS = TOKEN_REFERENCE + SOURCES,
    TOKEN_OLD_VALUES = TOKEN_RETURNS + SOURCES,
    TOKEN_WAYS = TOKEN_OLD_VALUES + SOURCES
};
static const struct {
    const char *name, *how; /* without a name: no mistake */
} token_ways[TOKEN_WAYS] = {
    {NULL, NULL},
    {NULL, "the KL estimate is cut at 10, as verl and OpenRLHF do: no mistake"},
    {"ratio_inverted", NULL},
    {"clip_wrong_side", NULL},
    {"clip_missing", NULL},
    {"kl_missing", NULL},
    {"kl_estimator", "k1, logp - ref_logp"},
    {"kl_estimator", "k2, (logp - ref_logp)^2 / 2"},
    {"kl_estimator", "k3 of ref_logp - logp with its sign turned"},
    {"option_not_applied", "kl_ratio"},
    {"ratio_of_parts", "the mean over the rank's own tokens"},
    {"ratio_of_parts", "the sum over the rank's own tokens, over the whole count"},
    {"ratio_of_tokens", NULL},
    {"side_tensor_not_split", "old_logp: each rank takes the first n of the row"},
    {"side_tensor_not_split", "old_logp: as a contiguous split has it"},
    {"side_tensor_not_split", "advantages: each rank takes the first n of the row"},
    {"side_tensor_not_split", "advantages: as a contiguous split has them"},
    {"side_tensor_not_split", "ref_logp: each rank takes the first n of the row"},
    {"side_tensor_not_split", "ref_logp: as a contiguous split has it"},
    {"side_tensor_not_split", "returns: each rank takes the first n of the row"},
    {"side_tensor_not_split", "returns: as a contiguous split has them"},
    {"side_tensor_not_split", "old_values: each rank takes the first n of the row"},
    {"side_tensor_not_split", "old_values: as a contiguous split has them"}};

/* The token whose number a rank reads for `token`; -1: there is no such token in the row. */
static inline int64_t row_source(const dump_row *row, int source, int64_t token) {
    int64_t at = source == FROM_FIRST ? row->local[token] : row->gathered[token];
    return at >= 0 && at < row->tokens && row->rank[at] >= 0 ? at : -1;
}

static inline double clipped_loss(const dump_facts *f, double ratio, double advantage,
                                  int wrong_side) {
    double clipped = fmin(fmax(ratio, 1 - f->clip_low), 1 + f->clip_high);
    double free = -advantage * ratio, bound = -advantage * clipped;
    double loss = (free > bound) != wrong_side ? free : bound;
    if (isnan(ratio)) return NAN; /* fmin and fmax ignore a NaN */
    return f->dual_clip > 0 && advantage < 0 ? fmin(loss, -advantage * f->dual_clip) : loss;
}

/* What the advantage makes of a token's loss; wrong_side: of CISPO, which has one side, NaN. */
static inline double advantage_loss(const dump_facts *f, double logp, double ratio,
                                    double advantage, int wrong_side) {
    if (!(f->cispo > 0)) return clipped_loss(f, ratio, advantage, wrong_side);
    return wrong_side || isnan(ratio) ? NAN : -fmin(ratio, f->cispo) * advantage * logp;
}

static inline double k3(double d) { return expm1(d) - d; } /* d: ref_logp - logp */

/* Logarithms of a document's ratio. whole: the right one; part: a rank's mean over its own
   tokens; share: a rank's sum over its own tokens, divided by the document's count. */
typedef struct sequence_ratio {
    double whole, part, share;
} sequence_ratio;

/* Inputs of one token's loss. */
typedef struct token_side {
    double logp, ratio, advantage, reference; /* ratio: the logarithm of r; reference: ref_logp,
                                                 or 0 if no KL is added */
} token_side;

/* The factor of the KL estimate: kl_coef, with kl_ratio kl_coef r. */
static inline double kl_weight(const dump_facts *f, const token_side *s) {
    return f->kl_ratio ? f->kl_coef * exp(s->ratio) : f->kl_coef;
}

static inline double policy_loss(const dump_facts *f, const token_side *s) {
    double kl = f->kl_coef > 0 ? kl_weight(f, s) * k3(s->reference - s->logp) : 0;
    return advantage_loss(f, s->logp, exp(s->ratio), s->advantage, 0) + kl;
}

/* The loss with other estimates of KL, or with none. */
static inline void policy_kl_ways(const dump_facts *f, const token_side *s, double *loss) {
    double d = s->reference - s->logp, weight = kl_weight(f, s), free;
    if (!(f->kl_coef > 0)) return;
    free = loss[TOKEN_RIGHT] - weight * k3(d);
    loss[TOKEN_KL_CUT] = free + weight * fmin(k3(d), 10);
    loss[TOKEN_NO_KL] = free;
    loss[TOKEN_K1] = free - weight * d;
    loss[TOKEN_K2] = free + weight * d * d / 2;
    loss[TOKEN_KL_REVERSED] = free + weight * k3(-d);
    if (f->kl_ratio) loss[TOKEN_KL_PLAIN] = free + f->kl_coef * k3(d);
}

/* The loss with another token's number of one side tensor; NaN: there is no such token. */
static inline void policy_side_ways(const dump_facts *f, const dump_row *row, int64_t t,
                                    const token_side *s, double *loss) {
    for (int source = 0; source < SOURCES; source++) {
        int64_t from = row_source(row, source, t);
        token_side old = *s, advantage = *s, reference = *s;
        if (from < 0) continue;
        old.ratio = s->logp - row->old_logp[from];
        advantage.advantage = row->advantages[from];
        if (f->importance == DUMP_RATIO_OF_TOKEN)
            loss[TOKEN_OLD + source] = policy_loss(f, &old);
        loss[TOKEN_ADVANTAGE + source] = policy_loss(f, &advantage);
        if (!(f->kl_coef > 0)) continue;
        reference.reference = row->ref_logp[from];
        loss[TOKEN_REFERENCE + source] = policy_loss(f, &reference);
    }
}

/* Bounds of the derivatives of a token's loss; size: sum of its terms' absolute values. The
   derivatives without a clip are such bounds, with one exception: if A < 0 and
   r < 1 - clip_low, the clip makes the derivative by A, and size, larger. */
typedef struct token_slopes {
    double logp, old_logp, advantage, reference, size;
} token_slopes;

static inline token_slopes token_slopes_of(const dump_facts *f, const dump_row *row, int64_t t,
                                           const sequence_ratio *of) {
    token_slopes s = {.logp = -1, .size = fabs(row->logp[t])};
    double ratio, most, d, weight;
    if (f->objective != DUMP_PPO) return s;
    ratio = exp(of ? of->whole : row->logp[t] - row->old_logp[t]);
    most = row->advantages[t] < 0 ? fmax(ratio, 1 - f->clip_low) : ratio;
    d = f->kl_coef > 0 ? row->ref_logp[t] - row->logp[t] : 0;
    weight = f->kl_ratio ? f->kl_coef * ratio : f->kl_coef;
    s.old_logp = row->advantages[t] * ratio - (f->kl_ratio ? weight * k3(d) : 0);
    s.advantage = -most;
    s.reference = weight * expm1(d);
    s.logp = -s.old_logp - s.reference;
    s.size = fabs(row->advantages[t]) * most + weight * k3(d);
    if (f->cispo > 0) {
        ratio = fmin(ratio, f->cispo);
        s.size = fabs(row->advantages[t] * ratio * row->logp[t]);
        s.old_logp = s.size + (f->kl_ratio ? weight * k3(d) : 0);
        s.advantage = -ratio * row->logp[t];
        s.logp = s.old_logp + fabs(row->advantages[t]) * ratio + fabs(s.reference);
        s.size += weight * k3(d);
    }
    return s;
}

/* The loss with a document's ratio from the rank's own tokens, or with a ratio per token. */
static inline void policy_ratio_ways(const dump_facts *f, const token_side *s, double own,
                                     const sequence_ratio *of, double *loss) {
    token_side part = *s, share = *s, token = *s;
    part.ratio = f->sp > 1 ? of->part : NAN;
    share.ratio = f->sp > 1 ? of->share : NAN;
    token.ratio = own;
    loss[TOKEN_RATIO_PART] = policy_loss(f, &part);
    loss[TOKEN_RATIO_SHARE] = policy_loss(f, &share);
    loss[TOKEN_RATIO_OWN] = policy_loss(f, &token);
}

/* loss: (TOKEN_WAYS), NaN where a mistake cannot be made. of: the document's ratio, or NULL. */
static inline void policy_losses(const dump_facts *f, const dump_row *row, int64_t t,
                                 const sequence_ratio *of, double *loss) {
    double own = row->logp[t] - row->old_logp[t];
    token_side s = {row->logp[t], of ? of->whole : own, row->advantages[t],
                    f->kl_coef > 0 ? row->ref_logp[t] : 0};
    double ratio = exp(s.ratio), kl;
    for (int way = 0; way < TOKEN_WAYS; way++) loss[way] = NAN;
    loss[TOKEN_RIGHT] = policy_loss(f, &s);
    kl = loss[TOKEN_RIGHT] - advantage_loss(f, s.logp, ratio, s.advantage, 0);
    loss[TOKEN_INVERTED] = advantage_loss(f, s.logp, 1 / ratio, s.advantage, 0) + kl;
    loss[TOKEN_WRONG_SIDE] = advantage_loss(f, s.logp, ratio, s.advantage, 1) + kl;
    loss[TOKEN_NO_CLIP] = -s.advantage * ratio * (f->cispo > 0 ? s.logp : 1) + kl;
    policy_kl_ways(f, &s, loss);
    if (of) policy_ratio_ways(f, &s, own, of, loss);
    policy_side_ways(f, row, t, &s, loss);
}
#endif
