/* SPDX-License-Identifier: MIT OR Unlicense */
/* For the suites of slow_loss.h: comparisons, random numbers, and each loss as a function of
   the numbers that its gradient flows through, for slow.h's complex step. */
#ifndef LOSS_FUNCTIONS_H
#define LOSS_FUNCTIONS_H
#include "second/slow_loss.h"
#include "test.h"

enum { MOST = 16 };
static const double LN2 = 0.693147180559945309;
static const slow_ppo ppo_default = {
    .clip_low = .2, .clip_high = .2, .log_ratio_limit = HUGE_VAL};

/* Written so that a NaN fails. */
static inline void near(const char *what, double got, double want, double limit) {
    test_expect(fabs(got - want) <= limit, "%s is %.17g, not %.17g within %.3g", what, got,
                want, limit);
}

static inline void same(const char *what, double got, double want) {
    test_expect(got == want, "%s is %.17g, not bitwise %.17g", what, got, want);
}

static inline void all_near(const char *what, int64_t count, const double *got,
                            const double *want, double limit) {
    for (int64_t k = 0; k < count; k++) near(what, got[k], want[k], limit);
}

static inline void all_same(const char *what, int64_t count, const double *got,
                            const double *want) {
    for (int64_t k = 0; k < count; k++) same(what, got[k], want[k]);
}

static inline double uniform(double low, double high) {
    return low + (high - low) * ((double)(test_random() >> 11) / 9007199254740992.0);
}

static inline void normals(int64_t count, double scale, double *x) {
    for (int64_t k = 0; k < count; k++) x[k] = scale * test_normal();
}

/* ---- losses as functions of the numbers that their gradients flow through ---- */

typedef struct {
    slow_pair_loss *loss;
    slow_preference options;
    slow_pair pair;
} pair_problem;

/* x: chosen, rejected */
static inline slow_complex pair_scalar(const slow_complex *x, const void *context) {
    const pair_problem *p = context;
    slow_pair pair = p->pair;
    pair.chosen = x[0];
    pair.rejected = x[1];
    return p->loss(&p->options, &pair);
}

typedef struct {
    double loss, dchosen, drejected;
} pair_result;

static inline pair_result pair_of(const pair_problem *p) {
    double x[2] = {creal(p->pair.chosen), creal(p->pair.rejected)}, g[2];
    slow_gradient_of(pair_scalar, p, 2, x, g);
    return (pair_result){slow_value_of(pair_scalar, p, 2, x), g[0], g[1]};
}

typedef struct {
    double margin, center;
} rm_problem;

static inline slow_complex rm_scalar(const slow_complex *x, const void *context) {
    const rm_problem *p = context;
    return slow_rm_loss(1, &x[0], &x[1], &p->margin, p->center);
}

typedef struct {
    slow_kto options;
    int64_t count;
    const bool *desirable;
    const double *ref_logp;
    double kl;
} kto_problem;

static inline slow_complex kto_scalar(const slow_complex *logp, const void *context) {
    const kto_problem *p = context;
    return slow_kto_loss(&p->options, p->count, p->desirable, p->kl, logp, p->ref_logp);
}

/* One token's loss from its logits. */
typedef struct {
    int64_t vocab;
    int32_t target;
    double smoothing, zloss, beta;
    const double *teacher;
} token_problem;

static inline slow_complex token_scalar(const slow_complex *logits, const void *context) {
    const token_problem *p = context;
    slow_objective o = {.smoothing = p->smoothing, .zloss = p->zloss, .count = 1};
    return slow_token_loss(&o, &(slow_row){.targets = &p->target}, 0, p->vocab, logits);
}

static inline slow_complex entropy_scalar(const slow_complex *logits, const void *context) {
    const token_problem *p = context;
    return slow_token_of(p->vocab, logits, SLOW_IGNORED).entropy;
}

static inline slow_complex distillation(const slow_complex *logits, const token_problem *p,
                                        int kind) {
    slow_complex *teacher = slow_promote(p->vocab, p->teacher);
    slow_complex loss = kind == 0   ? slow_kd_forward(p->vocab, logits, teacher)
                        : kind == 1 ? slow_kd_reverse(p->vocab, logits, teacher)
                                    : slow_kd_jsd(p->beta, p->vocab, logits, teacher);
    free(teacher);
    return loss;
}

static inline slow_complex forward_scalar(const slow_complex *logits, const void *context) {
    return distillation(logits, context, 0);
}

static inline slow_complex reverse_scalar(const slow_complex *logits, const void *context) {
    return distillation(logits, context, 1);
}

static inline slow_complex jsd_scalar(const slow_complex *logits, const void *context) {
    return distillation(logits, context, 2);
}

/* A packed row of policy tokens; advantages per token, or per sequence for losses of whole
   sequences. */
typedef struct {
    slow_ppo options;
    slow_sequences sequences;
    slow_aggregation mode;
    double max_length;
    const double *old_logp, *advantages;
} policy_problem;

static inline slow_complex policy_scalar(const slow_complex *logp, const void *context) {
    const policy_problem *p = context;
    int64_t tokens = p->sequences.cu_seqlens[p->sequences.sequences];
    slow_complex *loss = slow_array(tokens);
    for (int64_t t = 0; t < tokens; t++)
        loss[t] = slow_ppo_policy(&p->options, logp[t], p->old_logp[t], p->advantages[t]);
    slow_complex mean = slow_aggregate(p->mode, &p->sequences, p->max_length, loss);
    free(loss);
    return mean;
}

static inline slow_complex reinforce_scalar(const slow_complex *logp, const void *context) {
    const policy_problem *p = context;
    int64_t tokens = p->sequences.cu_seqlens[p->sequences.sequences];
    slow_complex *loss = slow_array(tokens);
    for (int64_t t = 0; t < tokens; t++) loss[t] = slow_reinforce(logp[t], p->advantages[t]);
    slow_complex mean = slow_aggregate(p->mode, &p->sequences, p->max_length, loss);
    free(loss);
    return mean;
}

static inline slow_complex gspo_scalar(const slow_complex *logp, const void *context) {
    const policy_problem *p = context;
    return slow_gspo(&p->options, &p->sequences, logp, p->old_logp, p->advantages);
}

static inline slow_complex rloo_scalar(const slow_complex *logp, const void *context) {
    const policy_problem *p = context;
    return slow_rloo_loss(&p->options, &p->sequences, logp, p->old_logp, p->advantages);
}

typedef struct {
    double tau, old_logp, advantage;
} one_token;

static inline slow_complex sapo_scalar(const slow_complex *logp, const void *context) {
    const one_token *p = context;
    return slow_sapo(p->tau, logp[0], p->old_logp, p->advantage);
}

/* tau is the cap on the ratio */
static inline slow_complex cispo_scalar(const slow_complex *logp, const void *context) {
    const one_token *p = context;
    return slow_cispo(p->tau, logp[0], p->old_logp, p->advantage);
}

typedef struct {
    int64_t count;
    double clip;
    const double *old_values, *returns;
} value_problem;

static inline slow_complex value_scalar(const slow_complex *values, const void *context) {
    const value_problem *p = context;
    slow_complex sum = 0;
    for (int64_t t = 0; t < p->count; t++)
        sum += slow_value_loss(p->clip, values[t], p->old_values[t], p->returns[t]);
    return sum / (double)p->count;
}

static inline slow_complex k1_scalar(const slow_complex *d, const void *context) {
    (void)context;
    return slow_k1(d[0]);
}

static inline slow_complex k2_scalar(const slow_complex *d, const void *context) {
    (void)context;
    return slow_k2(d[0]);
}

static inline slow_complex k3_scalar(const slow_complex *d, const void *context) {
    (void)context;
    return slow_k3(d[0]);
}

static inline double slope(slow_scalar *f, const void *context, double x) {
    double g;
    slow_gradient_of(f, context, 1, &x, &g);
    return g;
}

/* ---- random pairs, and log-probs of logits ---- */

/* Multiples of 1/64: sums and differences of them are exact. */
static inline double dyadic(double low, double high) {
    return round(uniform(low, high) * 64) / 64;
}

static inline pair_problem random_pair(const char *name, double spread) {
    slow_preference o = {.beta = uniform(.05, 1.5),
                         .label_smoothing = uniform(.01, .4),
                         .gamma = uniform(0, 2),
                         .delta = uniform(-1, 1),
                         .tau = uniform(.05, 1),
                         .alpha = uniform(-1, .9)};
    slow_pair x = {dyadic(-30 - spread, -.1),  dyadic(-30 - spread, -.1), 0, 0,
                   (double)test_integer(1, 9), (double)test_integer(1, 9)};
    x.ref_chosen = creal(x.chosen) + dyadic(-spread, spread);
    x.ref_rejected = creal(x.rejected) + dyadic(-spread, spread);
    return (pair_problem){slow_pair_loss_named(name), o, x};
}

static inline double plus(double x) { return fmax(x, 0) + log1p(exp(-fabs(x))); }

static inline void log_softmax(int64_t count, const double *x, double *y) {
    slow_complex *z = slow_promote(count, x);
    double lse = creal(slow_log_sum_exp(count, z));
    for (int64_t j = 0; j < count; j++) y[j] = x[j] - lse;
    free(z);
}

/* ---- a packed row: four sequences, one of a single token, one of which no token counts ---- */

enum { TOKENS = 12, SEQUENCES = 4 };
static const int64_t documents[SEQUENCES + 1] = {0, 4, 5, 10, TOKENS};
static const double mask[TOKENS] = {0, 1, 1, 1, 1, 0, 1, 0, 1, 1, 0, 0};
static const slow_sequences packed = {SEQUENCES, documents, mask};

static inline int64_t sequence_of(int64_t t) { return slow_document(SEQUENCES, documents, t); }

/* The formulas of spec 8.5's table, by hand: N = 7 tokens, S = 3 sequences, lengths 3, 1, 3,
   0; L_max = 5. */
static inline double token_weight(slow_aggregation mode, int64_t t) {
    static const double lengths[SEQUENCES] = {3, 1, 3, 0};
    if (mask[t] == 0) return 0;
    return mode == SLOW_TOKEN_MEAN            ? 1. / 7
           : mode == SLOW_SEQ_MEAN_TOKEN_MEAN ? 1 / (3 * lengths[sequence_of(t)])
           : mode == SLOW_SEQ_MEAN_TOKEN_SUM  ? 1. / 3
                                              : 1. / 15;
}

static const char *const mode_names[] = {"token-mean", "seq-mean-token-mean",
                                         "seq-mean-token-sum", "Dr.GRPO"};

static inline slow_complex sft_scalar(const slow_complex *logp, const void *mode) {
    return slow_sft(*(const slow_aggregation *)mode, &packed, logp);
}

typedef struct {
    double rewards[TOKENS], values[TOKENS], advantages[TOKENS], returns[TOKENS];
} rollout;

static inline void gae_of(const slow_sequences *s, double gamma, double lambda, rollout *r) {
    slow_gae(s, gamma, lambda, r->rewards, r->values, r->advantages, r->returns);
}

#endif
