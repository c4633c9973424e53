/* SPDX-License-Identifier: MIT OR Unlicense */
/*
 * test_slow_loss.c - checks slow_loss.h against what it cannot have copied from itself: the
 * golden vectors, the identities that hold whatever the values, the derivatives worked out by
 * hand; and shows of well-known mistakes that these checks tell them from the right thing.
 *
 * "Spec" numbers are the sections of the losses' specification, as in slow_loss.h.
 */
#include <float.h>

#include "second/golden.h"
#include "second/slow_loss.h"
#include "support/test.h"

enum { MOST = 16 };
static const double LN2 = 0.693147180559945309;
static const slow_ppo ppo_default = {
    .clip_low = .2, .clip_high = .2, .log_ratio_limit = HUGE_VAL};

/* Written so that a NaN fails. */
static void near(const char *what, double got, double want, double limit) {
    test_expect(fabs(got - want) <= limit, "%s is %.17g, not %.17g within %.3g", what, got,
                want, limit);
}

static void same(const char *what, double got, double want) {
    test_expect(got == want, "%s is %.17g, not bitwise %.17g", what, got, want);
}

static void all_near(const char *what, int64_t count, const double *got, const double *want,
                     double limit) {
    for (int64_t k = 0; k < count; k++) near(what, got[k], want[k], limit);
}

static void all_same(const char *what, int64_t count, const double *got, const double *want) {
    for (int64_t k = 0; k < count; k++) same(what, got[k], want[k]);
}

static double uniform(double low, double high) {
    return low + (high - low) * ((double)(test_random() >> 11) / 9007199254740992.0);
}

static void normals(int64_t count, double scale, double *x) {
    for (int64_t k = 0; k < count; k++) x[k] = scale * test_normal();
}

/* ---- losses as functions of the numbers that their gradients flow through ---- */

typedef struct {
    slow_pair_loss *loss;
    slow_preference options;
    slow_pair pair;
} pair_problem;

/* x: chosen, rejected */
static slow_complex pair_scalar(const slow_complex *x, const void *context) {
    const pair_problem *p = context;
    slow_pair pair = p->pair;
    pair.chosen = x[0];
    pair.rejected = x[1];
    return p->loss(&p->options, &pair);
}

typedef struct {
    double loss, dchosen, drejected;
} pair_result;

static pair_result pair_of(const pair_problem *p) {
    double x[2] = {creal(p->pair.chosen), creal(p->pair.rejected)}, g[2];
    slow_gradient_of(pair_scalar, p, 2, x, g);
    return (pair_result){slow_value_of(pair_scalar, p, 2, x), g[0], g[1]};
}

typedef struct {
    double margin, center;
} rm_problem;

static slow_complex rm_scalar(const slow_complex *x, const void *context) {
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

static slow_complex kto_scalar(const slow_complex *logp, const void *context) {
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

static slow_complex token_scalar(const slow_complex *logits, const void *context) {
    const token_problem *p = context;
    slow_objective o = {.smoothing = p->smoothing, .zloss = p->zloss, .count = 1};
    return slow_token_loss(&o, &(slow_row){.targets = &p->target}, 0, p->vocab, logits);
}

static slow_complex entropy_scalar(const slow_complex *logits, const void *context) {
    const token_problem *p = context;
    return slow_token_of(p->vocab, logits, SLOW_IGNORED).entropy;
}

static slow_complex distillation(const slow_complex *logits, const token_problem *p, int kind) {
    slow_complex *teacher = slow_promote(p->vocab, p->teacher);
    slow_complex loss = kind == 0   ? slow_kd_forward(p->vocab, logits, teacher)
                        : kind == 1 ? slow_kd_reverse(p->vocab, logits, teacher)
                                    : slow_kd_jsd(p->beta, p->vocab, logits, teacher);
    free(teacher);
    return loss;
}

static slow_complex forward_scalar(const slow_complex *logits, const void *context) {
    return distillation(logits, context, 0);
}

static slow_complex reverse_scalar(const slow_complex *logits, const void *context) {
    return distillation(logits, context, 1);
}

static slow_complex jsd_scalar(const slow_complex *logits, const void *context) {
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

static slow_complex policy_scalar(const slow_complex *logp, const void *context) {
    const policy_problem *p = context;
    int64_t tokens = p->sequences.cu_seqlens[p->sequences.sequences];
    slow_complex *loss = slow_array(tokens);
    for (int64_t t = 0; t < tokens; t++)
        loss[t] = slow_ppo_policy(&p->options, logp[t], p->old_logp[t], p->advantages[t]);
    slow_complex mean = slow_aggregate(p->mode, &p->sequences, p->max_length, loss);
    free(loss);
    return mean;
}

static slow_complex reinforce_scalar(const slow_complex *logp, const void *context) {
    const policy_problem *p = context;
    int64_t tokens = p->sequences.cu_seqlens[p->sequences.sequences];
    slow_complex *loss = slow_array(tokens);
    for (int64_t t = 0; t < tokens; t++) loss[t] = slow_reinforce(logp[t], p->advantages[t]);
    slow_complex mean = slow_aggregate(p->mode, &p->sequences, p->max_length, loss);
    free(loss);
    return mean;
}

static slow_complex gspo_scalar(const slow_complex *logp, const void *context) {
    const policy_problem *p = context;
    return slow_gspo(&p->options, &p->sequences, logp, p->old_logp, p->advantages);
}

static slow_complex rloo_scalar(const slow_complex *logp, const void *context) {
    const policy_problem *p = context;
    return slow_rloo_loss(&p->options, &p->sequences, logp, p->old_logp, p->advantages);
}

typedef struct {
    double tau, old_logp, advantage;
} one_token;

static slow_complex sapo_scalar(const slow_complex *logp, const void *context) {
    const one_token *p = context;
    return slow_sapo(p->tau, logp[0], p->old_logp, p->advantage);
}

/* tau is the cap on the ratio */
static slow_complex cispo_scalar(const slow_complex *logp, const void *context) {
    const one_token *p = context;
    return slow_cispo(p->tau, logp[0], p->old_logp, p->advantage);
}

typedef struct {
    int64_t count;
    double clip;
    const double *old_values, *returns;
} value_problem;

static slow_complex value_scalar(const slow_complex *values, const void *context) {
    const value_problem *p = context;
    slow_complex sum = 0;
    for (int64_t t = 0; t < p->count; t++)
        sum += slow_value_loss(p->clip, values[t], p->old_values[t], p->returns[t]);
    return sum / (double)p->count;
}

static slow_complex k1_scalar(const slow_complex *d, const void *context) {
    (void)context;
    return slow_k1(d[0]);
}

static slow_complex k2_scalar(const slow_complex *d, const void *context) {
    (void)context;
    return slow_k2(d[0]);
}

static slow_complex k3_scalar(const slow_complex *d, const void *context) {
    (void)context;
    return slow_k3(d[0]);
}

static double slope(slow_scalar *f, const void *context, double x) {
    double g;
    slow_gradient_of(f, context, 1, &x, &g);
    return g;
}

/* ---- golden vectors ---- */

/* What a case's objective gave, field by field. */
typedef struct {
    struct {
        const char *name;
        int count;
        double value[MOST];
    } field[8];
    int fields;
} results;

static void give(results *r, const char *name, int64_t count, const double *value) {
    r->field[r->fields].name = name;
    r->field[r->fields].count = (int)count;
    memcpy(r->field[r->fields++].value, value, (size_t)count * sizeof *value);
}

static void give_one(results *r, const char *name, double value) { give(r, name, 1, &value); }

static void give_gradient(results *r, const char *name, slow_scalar *f, const void *context,
                          int count, const double *x) {
    double g[MOST];
    slow_gradient_of(f, context, count, x, g);
    give_one(r, "loss", slow_value_of(f, context, count, x));
    give(r, name, count, g);
}

static slow_divergence divergence_of(const golden_case *c) {
    return golden_is(c, "divergence", "forward_kl") ? SLOW_FORWARD_KL
           : golden_is(c, "divergence", "js")       ? SLOW_JS
           : golden_is(c, "divergence", "alpha")    ? SLOW_ALPHA
                                                    : SLOW_REVERSE_KL;
}

static pair_problem pair_problem_of(const golden_case *c) {
    slow_preference o = {.beta = golden_number(c, "beta", .1),
                         .gamma = golden_number(c, "gamma", 0),
                         .label_smoothing = golden_number(c, "label_smoothing", 0),
                         .delta = golden_number(c, "delta", 0),
                         .tau = golden_number(c, "tau", .05),
                         .alpha = golden_number(c, "alpha", .5),
                         .divergence = divergence_of(c)};
    slow_pair x = {
        golden_number(c, "chosen", NAN),        golden_number(c, "rejected", NAN),
        golden_number(c, "ref_chosen", NAN),    golden_number(c, "ref_rejected", NAN),
        golden_number(c, "chosen_length", NAN), golden_number(c, "rejected_length", NAN)};
    return (pair_problem){slow_pair_loss_named(c->objective), o, x};
}

static void run_pair(const golden_case *c, results *r) {
    pair_problem p = pair_problem_of(c);
    pair_result y = pair_of(&p);
    give_one(r, "loss", y.loss);
    give_one(r, "dchosen", y.dchosen);
    give_one(r, "drejected", y.drejected);
    give_one(r, "log_odds", creal(slow_log_odds(&p.pair)));
}

static void run_ld_dpo(const golden_case *c, results *r) {
    double w[MOST] = {0}, l[MOST] = {0}, alpha = golden_number(c, "alpha", 1);
    int n_w = golden_array(c, "chosen_logp", MOST, w);
    int n_l = golden_array(c, "rejected_logp", MOST, l);
    slow_complex *chosen = slow_promote(n_w, w), *rejected = slow_promote(n_l, l);
    give_one(r, "chosen", creal(slow_ld_logp(n_w, n_l, alpha, chosen)));
    give_one(r, "rejected", creal(slow_ld_logp(n_l, n_w, alpha, rejected)));
    free(chosen);
    free(rejected);
}

static void run_rm(const golden_case *c, results *r) {
    rm_problem p = {golden_number(c, "margin", 0), golden_number(c, "center", 0)};
    double x[2] = {golden_number(c, "chosen", NAN), golden_number(c, "rejected", NAN)}, g[2];
    slow_gradient_of(rm_scalar, &p, 2, x, g);
    give_one(r, "loss", slow_value_of(rm_scalar, &p, 2, x));
    give_one(r, "dchosen", g[0]);
    give_one(r, "drejected", g[1]);
}

/* Log-ratios are log-probabilities over a reference of 0. */
static kto_problem kto_problem_of(const golden_case *c, bool *desirable) {
    static const double zeros[MOST];
    double flag[MOST], kl[MOST];
    int count = golden_array(c, "desirable", MOST, flag);
    int kls = golden_array(c, "kl_log_ratio", MOST, kl);
    for (int i = 0; i < count; i++) desirable[i] = flag[i] != 0;
    slow_kto o = {golden_number(c, "beta", .01), golden_number(c, "desirable_weight", 1),
                  golden_number(c, "undesirable_weight", 1)};
    return (kto_problem){o, count, desirable, zeros, slow_kto_kl(kls, kl, zeros)};
}

static void run_kto(const golden_case *c, results *r) {
    bool desirable[MOST];
    double logp[MOST];
    kto_problem p = kto_problem_of(c, desirable);
    golden_array(c, "log_ratio", MOST, logp);
    give_one(r, "kl", p.kl);
    give_gradient(r, "dlogp", kto_scalar, &p, (int)p.count, logp);
}

static void run_logits(const golden_case *c, results *r) {
    double x[MOST], teacher[MOST];
    token_problem p = {golden_array(c, "logits", MOST, x),
                       (int32_t)golden_number(c, "target", SLOW_IGNORED),
                       golden_number(c, "label_smoothing", 0),
                       golden_number(c, "zloss", 0),
                       golden_number(c, "beta", 0),
                       teacher};
    bool distils = golden_array(c, "teacher_logits", MOST, teacher) > 0;
    slow_complex *z = slow_promote(p.vocab, x);
    slow_token y = slow_token_of(p.vocab, z, p.target);
    give_one(r, "lse", creal(y.lse));
    give_one(r, "entropy", creal(y.entropy));
    give_one(r, "value", creal(slow_log_sum_squares(p.vocab, z)));
    slow_scalar *f = !strcmp(c->objective, "token_loss")   ? token_scalar
                     : !strcmp(c->objective, "kd_forward") ? forward_scalar
                     : !strcmp(c->objective, "kd_reverse") ? reverse_scalar
                     : distils                             ? jsd_scalar
                                                           : entropy_scalar;
    give_gradient(r, "dlogits", f, &p, (int)p.vocab, x);
    free(z);
}

static void run_kl(const golden_case *c, results *r) {
    double d = golden_number(c, "d", NAN);
    give_one(r, "k1", creal(slow_k1(d)));
    give_one(r, "k2", creal(slow_k2(d)));
    give_one(r, "k3", creal(slow_k3(d)));
    give_one(r, "dk3", slope(k3_scalar, NULL, d));
}

static slow_ppo ppo_of(const golden_case *c) {
    return (slow_ppo){golden_number(c, "clip_low", .2), golden_number(c, "clip_high", .2),
                      golden_number(c, "dual_clip", 0), HUGE_VAL};
}

static void run_ppo(const golden_case *c, results *r) {
    double logp[MOST], old_logp[MOST], advantages[MOST], ratios[MOST], clipped = 0;
    int64_t n = golden_array(c, "logp", MOST, logp), cu_seqlens[2] = {0, n};
    golden_array(c, "old_logp", MOST, old_logp);
    golden_array(c, "advantages", MOST, advantages);
    policy_problem p = {ppo_of(c), {1, cu_seqlens, NULL}, SLOW_TOKEN_MEAN, 0, old_logp,
                        advantages};
    for (int64_t t = 0; t < n; t++) {
        ratios[t] = creal(slow_ratio(&p.options, logp[t], old_logp[t]));
        clipped += slow_clipped(&p.options, logp[t], old_logp[t], advantages[t]);
    }
    give(r, "ratios", n, ratios);
    give_one(r, "clipfrac", clipped / (double)n);
    give_gradient(r, "dlogp", policy_scalar, &p, (int)n, logp);
}

static void run_gspo(const golden_case *c, results *r) {
    double logp[MOST], old_logp[MOST], advantage = golden_number(c, "advantage", NAN);
    int64_t n = golden_array(c, "logp", MOST, logp), cu_seqlens[2] = {0, n};
    golden_array(c, "old_logp", MOST, old_logp);
    policy_problem p = {ppo_of(c), {1, cu_seqlens, NULL}, SLOW_TOKEN_MEAN, 0, old_logp,
                        &advantage};
    slow_complex *z = slow_promote(n, logp);
    give_one(r, "ratio", exp(creal(slow_mean_log_ratio(&p.sequences, 0, z, old_logp))));
    give_gradient(r, "dlogp", gspo_scalar, &p, (int)n, logp);
    free(z);
}

static void run_sapo(const golden_case *c, results *r) {
    one_token p = {golden_number(c, "tau", 1), 0, golden_number(c, "advantage", NAN)};
    double logp = log(golden_number(c, "ratio", NAN));
    give_gradient(r, "dlogp", sapo_scalar, &p, 1, &logp);
}

static void run_vespo(const golden_case *c, results *r) {
    give_one(
        r, "weight",
        slow_vespo_weight(golden_number(c, "ratio", NAN), golden_number(c, "advantage", NAN)));
}

static void run_value(const golden_case *c, results *r) {
    double values[MOST], old_values[MOST], returns[MOST];
    value_problem p = {golden_array(c, "values", MOST, values),
                       golden_number(c, "clip", HUGE_VAL), old_values, returns};
    golden_array(c, "old_values", MOST, old_values);
    golden_array(c, "returns", MOST, returns);
    give_gradient(r, "dvalues", value_scalar, &p, (int)p.count, values);
}

static void run_gae(const golden_case *c, results *r) {
    double rewards[MOST], values[MOST], advantages[MOST], returns[MOST];
    int64_t n = golden_array(c, "rewards", MOST, rewards), cu_seqlens[2] = {0, n};
    golden_array(c, "values", MOST, values);
    slow_gae(&(slow_sequences){1, cu_seqlens, NULL}, golden_number(c, "gamma", 1),
             golden_number(c, "lambda", 1), rewards, values, advantages, returns);
    give(r, "advantages", n, advantages);
    give(r, "returns", n, returns);
}

static void run_whiten(const golden_case *c, results *r) {
    double x[MOST], y[MOST];
    int64_t n = golden_array(c, "x", MOST, x);
    if (!strcmp(c->objective, "whiten"))
        slow_whiten(n, NULL, x, y);
    else
        slow_whiten_unbiased(n, NULL, true, x, y);
    give(r, "whitened", n, y);
}

static void shape_group(const golden_case *c, const char *estimator, int n,
                        const double *reward, double *advantage) {
    double length[MOST];
    golden_array(c, "length", MOST, length);
    if (!strcmp(estimator, "group_norm"))
        slow_group_norm(1, n, golden_number(c, "eps", 1e-9), reward, advantage);
    else if (!strcmp(estimator, "group_baseline"))
        slow_group_baseline(1, n, reward, advantage);
    else if (!strcmp(estimator, "rloo"))
        slow_rloo(1, n, reward, advantage);
    else
        slow_opo(1, n, length, reward, advantage);
}

static void run_group(const golden_case *c, results *r) {
    double reward[MOST], advantage[MOST];
    int n = golden_array(c, "reward", MOST, reward);
    shape_group(c, c->objective, n, reward, advantage);
    give(r, "advantage", n, advantage);
}

static slow_aggregation mode_of(const golden_case *c) {
    return golden_is(c, "aggregation", "token_mean")            ? SLOW_TOKEN_MEAN
           : golden_is(c, "aggregation", "seq_mean_token_mean") ? SLOW_SEQ_MEAN_TOKEN_MEAN
           : golden_is(c, "aggregation", "seq_mean_token_sum")  ? SLOW_SEQ_MEAN_TOKEN_SUM
                                                                : SLOW_SEQ_MEAN_TOKEN_SUM_NORM;
}

/* Offsets of documents of these lengths. */
static int lengths_of(const golden_case *c, int64_t *cu_seqlens) {
    double length[MOST];
    int n = golden_array(c, "length", MOST, length);
    cu_seqlens[0] = 0;
    for (int i = 0; i < n; i++) cu_seqlens[i + 1] = cu_seqlens[i] + (int64_t)length[i];
    return n;
}

static void run_first_step(const golden_case *c, results *r) {
    static const double zeros[MOST];
    double reward[MOST], advantage[MOST], advantages[MOST];
    int64_t cu_seqlens[MOST], n = lengths_of(c, cu_seqlens);
    bool norm = golden_is(c, "estimator", "group_norm");
    golden_array(c, "reward", MOST, reward);
    shape_group(c, norm ? "group_norm" : "group_baseline", (int)n, reward, advantage);
    policy_problem p = {ppo_default, {n, cu_seqlens, NULL},
                        mode_of(c),  golden_number(c, "max_length", 0),
                        zeros,       advantages};
    slow_spread(&p.sequences, advantage, advantages);
    give_one(r, "loss", slow_value_of(policy_scalar, &p, cu_seqlens[n], zeros));
}

static void run_shaped(const golden_case *c, results *r) {
    double kl[MOST], rewards[MOST], score = golden_number(c, "score", NAN);
    int64_t n = golden_array(c, "kl", MOST, kl), cu_seqlens[2] = {0, n};
    slow_shaped_rewards(&(slow_sequences){1, cu_seqlens, NULL}, golden_number(c, "kl_coef", 0),
                        kl, &score, golden_number(c, "low", -10), golden_number(c, "high", 10),
                        rewards);
    give(r, "rewards", n, rewards);
}

static void run_weighted_kl(const golden_case *c, results *r) {
    double kl[MOST], length[MOST];
    int n = golden_array(c, "kl", MOST, kl);
    golden_array(c, "length", MOST, length);
    give_one(r, "value", slow_weighted_mean(n, kl, length));
}

static void run_adaptive_kl(const golden_case *c, results *r) {
    give_one(r, "factor",
             slow_adaptive_kl(1, golden_number(c, "observed", NAN),
                              golden_number(c, "target", NAN), golden_number(c, "n", NAN),
                              golden_number(c, "horizon", 1e4)));
}

static void run_overlong(const golden_case *c, results *r) {
    give_one(r, "penalty",
             slow_overlong_penalty(
                 golden_number(c, "length", NAN), golden_number(c, "max_new", NAN),
                 golden_number(c, "buffer", NAN), golden_number(c, "factor", NAN)));
}

static void run_aggregate(const golden_case *c, results *r) {
    double x[MOST];
    int64_t cu_seqlens[MOST], n = lengths_of(c, cu_seqlens);
    slow_complex *loss = slow_promote(golden_array(c, "losses", MOST, x), x);
    slow_sequences s = {n, cu_seqlens, NULL};
    give_one(r, "loss",
             creal(slow_aggregate(mode_of(c), &s, golden_number(c, "max_length", 0), loss)));
    free(loss);
}

/* The mean of the masked from `low` up to `high`; none is a mean of 0, the mistake's own
   guard. */
static double local_mean(const double *x, const double *mask, int64_t low, int64_t high) {
    double sum = 0, count = 0;
    for (int64_t t = low; t < high; t++) {
        sum += mask[t] * x[t];
        count += mask[t];
    }
    return count > 0 ? sum / count : 0;
}

/* Mean of the means of pieces: of the given lengths, or of as many equal pieces as there are
   shards. */
static double mean_of_means(const golden_case *c, int64_t n, const double *x,
                            const double *mask) {
    int64_t cut[MOST], pieces = lengths_of(c, cut);
    double sum = 0;
    if (!pieces) pieces = (int64_t)golden_number(c, "shards", 1);
    for (int64_t k = 0; k < pieces; k++)
        sum += golden_text(c, "length")
                   ? local_mean(x, mask, cut[k], cut[k + 1])
                   : local_mean(x, mask, k * n / pieces, (k + 1) * n / pieces);
    return sum / (double)pieces;
}

/* Labels shifted inside each shard: the last position of each has lost its target. */
static double shift_in_shard(int64_t n, int64_t shards, const double *x, const double *mask) {
    double sum = 0;
    for (int64_t k = 0; k < shards; k++)
        sum += local_mean(x, mask, k * n / shards, (k + 1) * n / shards - 1);
    return sum / (double)shards;
}

static void run_token_mean(const golden_case *c, results *r) {
    double nll[MOST], mask[MOST], logp[MOST];
    int64_t n = golden_array(c, "nll", MOST, nll), cu_seqlens[2] = {0, n};
    golden_array(c, "mask", MOST, mask);
    for (int64_t t = 0; t < n; t++) logp[t] = -nll[t];
    slow_complex *z = slow_promote(n, logp);
    give_one(r, "loss", creal(slow_sft_token_mean(&(slow_sequences){1, cu_seqlens, mask}, z)));
    give_one(r, "mean_of_means", mean_of_means(c, n, nll, mask));
    give_one(r, "shift_in_shard",
             shift_in_shard(n, (int64_t)golden_number(c, "shards", 1), nll, mask));
    free(z);
}

static void run_moe(const golden_case *c, results *r) {
    double router[MOST], sum = 0;
    int64_t experts = (int64_t)golden_number(c, "experts", 1);
    int64_t k = (int64_t)golden_number(c, "k", 1);
    int64_t shards = (int64_t)golden_number(c, "shards", 1);
    int64_t tokens = golden_array(c, "router", MOST, router) / experts, part = tokens / shards;
    slow_complex *p = slow_promote(tokens * experts, router);
    for (int64_t i = 0; i < shards; i++)
        sum += creal(slow_moe_balance(part, experts, k, p + i * part * experts));
    give_one(r, "loss", creal(slow_moe_balance(tokens, experts, k, p)));
    give_one(r, "mean_of_means", sum / (double)shards);
    free(p);
}

/* DeepSpeed: stage 1 and 2 pad all tensors end to end to align * ranks; stage 3 cuts each by
   itself. */
static void run_zero(const golden_case *c, results *r) {
    double sizes[MOST], chunks[MOST], total = 0, ranks = golden_number(c, "ranks", 1);
    int n = golden_array(c, "sizes", MOST, sizes);
    double unit = ranks * golden_number(c, "align", 1);
    for (int i = 0; i < n; i++) {
        chunks[i] = ceil(sizes[i] / ranks);
        total += sizes[i];
    }
    give_one(r, "padded", ceil(total / unit) * unit);
    give_one(r, "partition", ceil(total / unit) * unit / ranks);
    give(r, "chunks", n, chunks);
}

static void run_clip(const golden_case *c, results *r) {
    double g[MOST], most = golden_number(c, "max_norm", 1);
    int n = golden_array(c, "gradient", MOST, g);
    double factor = fmin(1, most / slow_norm(n, g));
    if (!strcmp(c->objective, "clip_grad"))
        slow_clip(n, most, g);
    else
        for (int k = 0; k < n; k++) g[k] *= factor;
    give(r, "clipped", n, g);
}

typedef void optimizer(const slow_adamw *a, double lr, int64_t t, int64_t count,
                       const double *g, double *m, double *v, double *theta);

static optimizer *optimizer_of(const char *name) {
    return !strcmp(name, "adamw")               ? slow_adamw_step
           : !strcmp(name, "adamw_tf1")         ? slow_adamw_tf1_step
           : !strcmp(name, "adamw_decay_after") ? slow_adamw_decay_after_step
                                                : slow_adam_l2_step;
}

static void run_optimizer(const golden_case *c, results *r) {
    double g[MOST], after[MOST], m = 0, v = 0, theta = golden_number(c, "theta", NAN);
    int steps = golden_array(c, "gradient", MOST, g);
    slow_adamw a = {golden_number(c, "beta1", .9), golden_number(c, "beta2", .999),
                    golden_number(c, "eps", 1e-8), golden_number(c, "weight_decay", 0)};
    for (int t = 0; t < steps; t++) {
        optimizer_of(c->objective)(&a, golden_number(c, "lr", NAN), t + 1, 1, &g[t], &m, &v,
                                   &theta);
        after[t] = theta;
    }
    give(r, "theta", steps, after);
    give_one(r, "last_theta", theta);
    give_one(r, "m", m);
    give_one(r, "v", v);
}

static void run_schedule(const golden_case *c, results *r) {
    double step[MOST], factor[MOST];
    int n = golden_array(c, "step", MOST, step);
    slow_schedule s = {!strcmp(c->objective, "schedule_linear")   ? SLOW_LINEAR
                       : !strcmp(c->objective, "schedule_cosine") ? SLOW_COSINE
                                                                  : SLOW_COSINE_WITH_MIN_LR,
                       (int64_t)golden_number(c, "warmup", 0),
                       (int64_t)golden_number(c, "total", 0),
                       golden_number(c, "min_lr_rate", 0)};
    for (int k = 0; k < n; k++) factor[k] = slow_schedule_factor(&s, (int64_t)step[k]);
    give(r, "factor", n, factor);
}

typedef void runner(const golden_case *c, results *r);

static const struct {
    const char *objective;
    runner *run;
} runners[] = {

    {"ld_dpo", run_ld_dpo},
    {"rm_sigmoid", run_rm},
    {"kto", run_kto},
    {"token_loss", run_logits},
    {"entropy", run_logits},
    {"log_sum_squares", run_logits},
    {"kd_forward", run_logits},
    {"kd_reverse", run_logits},
    {"kd_jsd", run_logits},
    {"kl_estimators", run_kl},
    {"ppo_policy", run_ppo},
    {"gspo", run_gspo},
    {"sapo", run_sapo},
    {"vespo_weight", run_vespo},
    {"value_loss", run_value},
    {"gae", run_gae},
    {"whiten", run_whiten},
    {"whiten_unbiased", run_whiten},
    {"group_norm", run_group},
    {"rloo", run_group},
    {"group_baseline", run_group},
    {"opo", run_group},
    {"first_step", run_first_step},
    {"shaped_rewards", run_shaped},
    {"weighted_kl", run_weighted_kl},
    {"adaptive_kl", run_adaptive_kl},
    {"overlong_penalty", run_overlong},
    {"aggregate", run_aggregate},
    {"token_mean", run_token_mean},
    {"moe_balance", run_moe},
    {"zero_partition", run_zero},
    {"clip_grad", run_clip},
    {"clip_grad_exact", run_clip},
    {"adamw", run_optimizer},
    {"adamw_tf1", run_optimizer},
    {"adamw_decay_after", run_optimizer},
    {"adam_l2", run_optimizer},
    {"schedule_linear", run_schedule},
    {"schedule_cosine", run_schedule},
    {"schedule_cosine_with_min_lr", run_schedule},
    {NULL, NULL},
};

static runner *runner_of(const char *objective) {
    int k = 0;
    if (slow_pair_loss_named(objective)) return run_pair;
    while (runners[k].objective && strcmp(runners[k].objective, objective)) k++;
    return runners[k].run;
}

/*
 * What the arithmetic may add to half a printed unit: one rounding of numbers of the size of 1,
 * or of d where a small d makes everything small; two for exact values.
 */
static double rounding(const golden_case *c, double value, double limit) {
    double size = fmax(fabs(value), fmin(1, fabs(golden_number(c, "d", 1))));
    return DBL_EPSILON * size * (limit > 0 ? 1 : 2);
}

/* Is every value of the field as expected?  A field that the runner did not give is not. */
static void compare(const golden_case *c, const results *r, const char *name) {
    double want[MOST], limit[MOST];
    int count = golden_expected(c, name, MOST, want, limit), f = 0;
    while (f < r->fields && strcmp(r->field[f].name, name)) f++;
    if (!test_expect(count > 0 && f < r->fields, "%s cannot be read or is not computed", name))
        return;
    test_expect(count <= r->field[f].count, "%s has %d values, not %d", name, r->field[f].count,
                count);
    for (int k = 0; k < count && k < r->field[f].count; k++)
        near(name, r->field[f].value[k], want[k], limit[k] + rounding(c, want[k], limit[k]));
}

static int golden_numbers; /* how many expected numbers have been compared */

static void check_case(const golden_case *c, void *context) {
    results r = {.fields = 0};
    char name[64];
    double value[MOST], limit[MOST];
    (void)context;
    if (test_expect(runner_of(c->objective) != NULL, "nothing computes this objective"))
        runner_of(c->objective)(c, &r);
    for (int k = 0; golden_expected_name(c, k, name); k++) {
        compare(c, &r, name);
        golden_numbers += golden_expected(c, name, MOST, value, limit);
    }
    test_end("golden line %d: %s %s", c->line, c->objective, c->parameters);
}

static void test_golden(void) {
    int cases = golden_each(GOLDEN_PATH, check_case, NULL);
    test_expect(cases == 89, "%d golden cases, not 89", cases);
    test_expect(golden_numbers == 290, "%d golden numbers, not 290", golden_numbers);
    test_end("all golden cases were there");
}

/* ---- the reader of golden.tsv ---- */

static void test_reader(void) {
    golden_case c = {.parameters = "beta=.3 kind=js",
                     .inputs = "x=1,1/4,~-.250",
                     .expected = "loss=~1.5e-3 bad=1,x"};
    double x[3], limit[3];
    same("count", golden_array(&c, "x", 3, x), 3);
    all_same("values", 3, x, (double[]){1, .25, -.25});
    same("too many", golden_array(&c, "x", 2, x), 0);
    same("missing", golden_number(&c, "gamma", 7), 7);
    same("part of a name", golden_number(&c, "bet", 7), 7);
    test_expect(golden_is(&c, "kind", "js") && !golden_is(&c, "kind", "j"),
                "words are not compared whole");
    same("expected", golden_expected(&c, "loss", 3, x, limit), 1);
    near("half a unit", limit[0], .5e-4, 1e-18);
    same("malformed", golden_expected(&c, "bad", 3, x, limit), 0);
    test_expect(golden_each("/dev/null", check_case, NULL) == 0, "a file of nothing has cases");
    test_end("the reader of golden.tsv");
}

/* ---- derivatives worked out by hand, against complex step ---- */

static double sigma(double x) { return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)); }

static double dsigma(double x) { return sigma(x) * sigma(-x); }

static double plus(double x) { return fmax(x, 0) + log1p(exp(-fabs(x))); }

/* What the formulas of spec 4 are written in. */
typedef struct {
    double beta, e, delta, tau, gamma, w, l, z, n_w, n_l, s_w, s_l;
} pair_numbers;

static pair_numbers numbers_of(const slow_preference *o, const slow_pair *x) {
    double w = creal(x->chosen) - x->ref_chosen, l = creal(x->rejected) - x->ref_rejected;
    return (pair_numbers){o->beta,
                          o->label_smoothing,
                          o->delta,
                          o->tau,
                          o->gamma,
                          w,
                          l,
                          o->beta * (w - l),
                          x->chosen_length,
                          x->rejected_length,
                          creal(x->chosen),
                          creal(x->rejected)};
}

typedef struct {
    double w, l;
} slopes;

static slopes opposite(double w) { return (slopes){w, -w}; }

static slopes sigmoid_slopes(const pair_numbers *p) {
    return opposite(-p->beta * ((1 - p->e) * sigma(-p->z) - p->e * sigma(p->z)));
}

static slopes robust_slopes(const pair_numbers *p) {
    return opposite(-p->beta * ((1 - p->e) * sigma(-p->z) + p->e * sigma(p->z)) /
                    (1 - 2 * p->e));
}

static slopes hinge_slopes(const pair_numbers *p) { return opposite(p->z < 1 ? -p->beta : 0); }

static slopes ipo_slopes(const pair_numbers *p) {
    return opposite(2 * (p->w - p->l - 1 / (2 * p->beta)));
}

static slopes ipo_mean_slopes(const pair_numbers *p) {
    double u = p->w / p->n_w - p->l / p->n_l - 1 / (2 * p->beta);
    return (slopes){2 * u / p->n_w, -2 * u / p->n_l};
}

static slopes norm_slopes(const pair_numbers *p) {
    double c = p->beta * sigma(-p->beta * (p->w / p->n_w - p->l / p->n_l));
    return (slopes){-c / p->n_w, c / p->n_l};
}

static slopes exo_slopes(const pair_numbers *p) {
    return opposite(p->beta * dsigma(p->z) * (p->z - log((1 - p->e) / p->e)));
}

static slopes nca_slopes(const pair_numbers *p) {
    double w = p->beta * p->w, l = p->beta * p->l;
    return (slopes){p->beta * (-sigma(-w) + sigma(w) / 2), p->beta * sigma(l) / 2};
}

static slopes bco_slopes(const pair_numbers *p) {
    double w = p->beta * p->w - p->delta, l = p->beta * p->l - p->delta;
    return (slopes){-p->beta * sigma(-w), p->beta * sigma(l)};
}

static slopes sppo_slopes(const pair_numbers *p) {
    double half = 1 / (2 * p->beta);
    return (slopes){2 * (p->w - half), 2 * (p->l + half)};
}

static slopes apo_zero_slopes(const pair_numbers *p) {
    return (slopes){-p->beta * dsigma(p->beta * p->w), p->beta * dsigma(p->beta * p->l)};
}

static slopes apo_down_slopes(const pair_numbers *p) {
    return (slopes){p->beta * (dsigma(p->beta * p->w) - dsigma(p->z)), p->beta * dsigma(p->z)};
}

static slopes discopop_slopes(const pair_numbers *p) {
    double z = p->z, m = sigma(z / p->tau), spread = dsigma(z / p->tau) / p->tau;
    double mixed = -sigma(-z) * sigma(-z / p->tau) - exp(-z) * m +
                   spread * (exp(-z) - plus(-z));
    return opposite(p->beta * mixed);
}

static slopes simpo_slopes(const pair_numbers *p) {
    double z = p->beta * (p->s_w / p->n_w - p->s_l / p->n_l) - p->gamma;
    double c = p->beta * ((1 - p->e) * sigma(-z) - p->e * sigma(z));
    return (slopes){-c / p->n_w, c / p->n_l};
}

static slopes cpo_slopes(const pair_numbers *p) {
    double z = p->beta * (p->s_w - p->s_l);
    return opposite(-p->beta * ((1 - p->e) * sigma(-z) - p->e * sigma(z)));
}

static slopes orpo_slopes(const pair_numbers *p) {
    double w = p->s_w / p->n_w, l = p->s_l / p->n_l;
    double odds = w - l - log(-expm1(w)) + log(-expm1(l));
    return (slopes){p->beta * sigma(-odds) / expm1(w) / p->n_w,
                    -p->beta * sigma(-odds) / expm1(l) / p->n_l};
}

static const struct {
    const char *name;
    slopes (*of)(const pair_numbers *p);
    bool difference; /* does it depend on h_w - h_l alone, so that the slopes cancel? */
} pair_slopes[] = {

    {"dpo_sigmoid", sigmoid_slopes, true},
    {"dpo_robust", robust_slopes, true},
    {"dpo_hinge", hinge_slopes, true},
    {"ipo", ipo_slopes, true},
    {"ipo_mean", ipo_mean_slopes, false},
    {"dpo_norm", norm_slopes, false},
    {"exo_pair", exo_slopes, true},
    {"nca_pair", nca_slopes, false},
    {"bco_pair", bco_slopes, false},
    {"sppo_hard", sppo_slopes, false},
    {"apo_zero", apo_zero_slopes, false},
    {"apo_down", apo_down_slopes, false},
    {"discopop", discopop_slopes, true},
    {"simpo", simpo_slopes, false},
    {"cpo", cpo_slopes, true},
    {"orpo", orpo_slopes, false},
};

enum { PAIR_LOSSES = sizeof pair_slopes / sizeof *pair_slopes };

/* Multiples of 1/64: sums and differences of them are exact. */
static double dyadic(double low, double high) { return round(uniform(low, high) * 64) / 64; }

static pair_problem random_pair(const char *name, double spread) {
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

static void test_pair_slopes(void) {
    for (int k = 0; k < PAIR_LOSSES; k++) {
        for (int trial = 0; trial < 200; trial++) {
            pair_problem p = random_pair(pair_slopes[k].name, trial < 100 ? 2 : 20);
            pair_numbers n = numbers_of(&p.options, &p.pair);
            pair_result y = pair_of(&p);
            slopes want = pair_slopes[k].of(&n);
            near("dchosen", y.dchosen, want.w, 1e-12 * fmax(1, fabs(want.w)));
            near("drejected", y.drejected, want.l, 1e-12 * fmax(1, fabs(want.l)));
            if (pair_slopes[k].difference)
                same("dchosen + drejected", y.dchosen + y.drejected, 0);
        }
        test_end("slopes of %s", pair_slopes[k].name);
    }
}

/* Spec 4: -beta sigmoid(-z) score'(h_w) and beta sigmoid(-z) score'(h_l). */
static double score_slope(const slow_preference *o, double h) {
    return o->divergence == SLOW_FORWARD_KL ? exp(-h)
           : o->divergence == SLOW_JS       ? sigma(-h)
           : o->divergence == SLOW_ALPHA    ? exp((o->alpha - 1) * h)
                                            : 1;
}

static void test_divergence_slopes(void) {
    for (int trial = 0; trial < 200; trial++) {
        pair_problem p = random_pair("dpo_sigmoid", 3);
        p.options.divergence = (slow_divergence)(trial % 4);
        p.options.label_smoothing = 0;
        pair_numbers n = numbers_of(&p.options, &p.pair);
        pair_result y = pair_of(&p);
        double c = p.options.beta * sigma(-creal(slow_margin(&p.options, &p.pair)));
        double w = -c * score_slope(&p.options, n.w), l = c * score_slope(&p.options, n.l);
        near("dchosen", y.dchosen, w, 1e-12 * fmax(1, fabs(w)));
        near("drejected", y.drejected, l, 1e-12 * fmax(1, fabs(l)));
    }
    test_end("slopes of DPO under other divergences");
}

/* Far from the real axis too, which no complex step gets to, the primitives are what they
   are called. */
static void test_primitives(void) {
    for (int trial = 0; trial < 100; trial++) {
        slow_complex z = uniform(-2, 2) + uniform(-1, 1) * _Complex_I, w = z / 4;
        near("expm1", cabs(slow_expm1(z) - (cexp(z) - 1)), 0, 4e-15);
        near("log1p", cabs(slow_log1p(w) - clog(1 + w)), 0, 4e-15);
        near("softplus", cabs(slow_softplus(z) - clog(1 + cexp(z))), 0, 4e-15);
        near("sigmoid", cabs(slow_sigmoid(z) - 1 / (1 + cexp(-z))), 0, 4e-15);
        near("logsigmoid", cabs(slow_logsigmoid(z) - clog(slow_sigmoid(z))), 0, 4e-15);
        near("log1mexp", cabs(slow_log1mexp(z - 2.5) - clog(1 - cexp(z - 2.5))), 0, 4e-15);
    }
    near("expm1 near 0", creal(slow_expm1(1e-12)), 1e-12 + 5e-25, 1e-27);
    near("log1p near 0", creal(slow_log1p(1e-12 + 1e-30 * _Complex_I)), 1e-12 - 5e-25, 1e-27);
    test_end("primitives on the complex plane");
}

/* Spec 16, T1: |z| of 40 and above 700, where e^z is no double. */
static void test_extremes(void) {
    for (int k = 0; k < 4; k++) {
        double z = (double[]){40, -40, 750, -750}[k];
        pair_problem p = {slow_dpo_sigmoid, {.beta = 1}, {z, 0, 0, 0, 1, 1}};
        pair_result y = pair_of(&p);
        near("loss", y.loss, z > 0 ? exp(-z) : -z, 1e-13 * fmax(exp(-40), fabs(z > 0 ? 0 : z)));
        near("dchosen", y.dchosen, -sigma(-z), 1e-14 * sigma(-z));
        slow_complex r = slow_rm_logexp(z, 0);
        near("logexp", creal(r), y.loss, 0);
    }
    near("log1mexp near 0", creal(slow_log1mexp(-1e-20)), log(1e-20), 1e-13);
    near("log1mexp far", creal(slow_log1mexp(-50)), -exp(-50), 1e-36);
    test_end("losses far out");
}

/* Spec 3.2: dL/dx_j = (1 + 2 lambda lse) p_j - e/V - (1 - e) 1[j = y] */
static void test_token_slopes(void) {
    for (int trial = 0; trial < 50; trial++) {
        double x[7], g[7], lse;
        token_problem p = {7,   (int32_t)test_integer(0, 6), uniform(0, .5), uniform(0, .1), 0,
                           NULL};
        normals(7, 3, x);
        slow_gradient_of(token_scalar, &p, 7, x, g);
        slow_complex *z = slow_promote(7, x);
        lse = creal(slow_log_sum_exp(7, z));
        for (int j = 0; j < 7; j++)
            near("dlogits", g[j],
                 (1 + 2 * p.zloss * lse) * exp(x[j] - lse) - p.smoothing / 7 -
                     (1 - p.smoothing) * (j == p.target),
                 1e-14);
        double entropy = slow_value_of(entropy_scalar, &p, 7, x);
        slow_gradient_of(entropy_scalar, &p, 7, x, g);
        for (int j = 0; j < 7; j++)
            near("entropy's dlogits", g[j], -exp(x[j] - lse) * (x[j] - lse + entropy), 1e-14);
        free(z);
    }
    test_end("slopes of label smoothing, z-loss and entropy");
}

static void log_softmax(int64_t count, const double *x, double *y) {
    slow_complex *z = slow_promote(count, x);
    double lse = creal(slow_log_sum_exp(count, z));
    for (int64_t j = 0; j < count; j++) y[j] = x[j] - lse;
    free(z);
}

/* Spec 7.2: S - T; S (log S - log T - KL(S||T)); (1 - beta) S (log(S/M) - KL(S||M)) */
static void test_distillation_slopes(void) {
    for (int trial = 0; trial < 50; trial++) {
        double x[5], y[5], s[5], t[5], m[5], g[3][5], kl = 0, kl_m = 0;
        token_problem p = {5, 0, 0, 0, uniform(.05, .95), y};
        normals(5, 2, x);
        normals(5, 2, y);
        log_softmax(5, x, s);
        log_softmax(5, y, t);
        for (int j = 0; j < 5; j++) {
            m[j] = log((1 - p.beta) * exp(s[j]) + p.beta * exp(t[j]));
            kl += exp(s[j]) * (s[j] - t[j]);
            kl_m += exp(s[j]) * (s[j] - m[j]);
        }
        slow_gradient_of(forward_scalar, &p, 5, x, g[0]);
        slow_gradient_of(reverse_scalar, &p, 5, x, g[1]);
        slow_gradient_of(jsd_scalar, &p, 5, x, g[2]);
        for (int j = 0; j < 5; j++) {
            near("forward", g[0][j], exp(s[j]) - exp(t[j]), 1e-14);
            near("reverse", g[1][j], exp(s[j]) * (s[j] - t[j] - kl), 1e-13);
            near("jsd", g[2][j], (1 - p.beta) * exp(s[j]) * (s[j] - m[j] - kl_m), 1e-13);
        }
    }
    test_end("slopes of forward and reverse KL and JSD");
}

/* Spec 5.1: -w_D beta sigmoid'(beta (h - kl)) / n and w_U beta sigmoid'(beta (kl - h)) / n;
   the KL is detached. */
static void test_kto_slopes(void) {
    double logp[6], ref[6], mismatched[6], g[6];
    bool desirable[6] = {true, false, true, true, false, false};
    normals(6, 4, logp);
    normals(6, 4, ref);
    normals(6, 4, mismatched);
    kto_problem p = {{.3, 1.1, 1.4}, 6, desirable, ref, slow_kto_kl(6, mismatched, ref)};
    slow_gradient_of(kto_scalar, &p, 6, logp, g);
    for (int i = 0; i < 6; i++) {
        double c = .3 * dsigma(.3 * (logp[i] - ref[i] - p.kl)) / 6;
        near("dlogp", g[i], desirable[i] ? -1.1 * c : 1.4 * c, 1e-15);
    }
    test_end("slopes of KTO");
}

/* Spec 6.1: -+sigmoid(-(r_w - r_l - margin)) + 2 c (r_w + r_l);  spec 6.2: q - target. */
static void test_rm_slopes(void) {
    for (int trial = 0; trial < 50; trial++) {
        double x[2], g[2];
        rm_problem p = {uniform(0, 2), uniform(0, .1)};
        normals(2, 3, x);
        slow_gradient_of(rm_scalar, &p, 2, x, g);
        double c = sigma(-(x[0] - x[1] - p.margin)), center = 2 * p.center * (x[0] + x[1]);
        near("dchosen", g[0], -c + center, 1e-14);
        near("drejected", g[1], c + center, 1e-14);
        slow_complex z[2] = {x[0] + SLOW_STEP * _Complex_I, x[1]};
        near("PRM", cimag(slow_prm_soft(.3, z)) / SLOW_STEP, sigma(x[0] - x[1]) - .3, 1e-14);
    }
    test_end("slopes of the reward models");
}

/* Spec 8.1: 1, d, 1 - e^-d; none outside [OH]'s clamp. */
static void test_kl_slopes(void) {
    for (int trial = 0; trial < 50; trial++) {
        double d = trial < 25 ? uniform(-1e-3, 1e-3) : uniform(-5, 5);
        near("k1", slope(k1_scalar, NULL, d), 1, 0);
        near("k2", slope(k2_scalar, NULL, d), d, 1e-15 * fabs(d));
        near("k3", slope(k3_scalar, NULL, d), -expm1(-d), 1e-14 * fabs(expm1(-d)));
        test_expect(creal(slow_k2(d)) >= 0 && creal(slow_k3(d)) >= 0,
                    "k2 or k3 of %g is negative", d);
        double real = expm1(-d) + d;
        near("k3's value", creal(slow_k3(d)), real, 1e-15 * fmax(fabs(d), real));
    }
    slow_complex far = slow_kl(slow_k3, 10, -8 + SLOW_STEP * _Complex_I, 0);
    same("clamped", creal(far), 10);
    same("slope where clamped", cimag(far), 0);
    same("policy less reference", creal(slow_kl(slow_k1, 10, -1, -3)), 2);
    test_end("slopes of k1, k2, k3");
}

/* ---- a packed row: four sequences, one of a single token, one of which no token counts ---- */

enum { TOKENS = 12, SEQUENCES = 4 };
static const int64_t documents[SEQUENCES + 1] = {0, 4, 5, 10, TOKENS};
static const double mask[TOKENS] = {0, 1, 1, 1, 1, 0, 1, 0, 1, 1, 0, 0};
static const slow_sequences packed = {SEQUENCES, documents, mask};

static int64_t sequence_of(int64_t t) { return slow_document(SEQUENCES, documents, t); }

/* The formulas of spec 8.5's table, by hand: N = 7 tokens, S = 3 sequences, lengths 3, 1, 3,
   0; L_max = 5. */
static double token_weight(slow_aggregation mode, int64_t t) {
    static const double lengths[SEQUENCES] = {3, 1, 3, 0};
    if (mask[t] == 0) return 0;
    return mode == SLOW_TOKEN_MEAN            ? 1. / 7
           : mode == SLOW_SEQ_MEAN_TOKEN_MEAN ? 1 / (3 * lengths[sequence_of(t)])
           : mode == SLOW_SEQ_MEAN_TOKEN_SUM  ? 1. / 3
                                              : 1. / 15;
}

static const char *mode_names[] = {"token-mean", "seq-mean-token-mean", "seq-mean-token-sum",
                                   "Dr.GRPO"};

/* Spec 8.5: -ratio A, or 0 where the clip took over; 0 beyond a dual clip and beyond a clamp
   of the log-ratio. */
static double ppo_slope(const slow_ppo *o, double logp, double old_logp, double advantage) {
    double ratio = exp(logp - old_logp);
    bool above = advantage > 0 && ratio > 1 + o->clip_high,
         below = advantage < 0 && ratio < 1 - o->clip_low;
    bool dual = o->dual_clip > 0 && advantage < 0 && ratio > o->dual_clip;
    bool clamped = fabs(logp - old_logp) > o->log_ratio_limit;
    return above || below || dual || clamped ? 0 : -ratio * advantage;
}

static void test_ppo_slopes(void) {
    double logp[TOKENS], old_logp[TOKENS], advantages[TOKENS], g[TOKENS];
    for (int trial = 0; trial < 200; trial++) {
        policy_problem p = {
            {uniform(.1, .3), uniform(.1, .4), trial % 2 ? 1.5 : 0, trial % 3 ? 20 : .6},
            packed,
            (slow_aggregation)(trial % 4),
            5,
            old_logp,
            advantages};
        normals(TOKENS, .5, logp);
        normals(TOKENS, .5, old_logp);
        normals(TOKENS, 1, advantages);
        slow_gradient_of(policy_scalar, &p, TOKENS, logp, g);
        for (int t = 0; t < TOKENS; t++) {
            double want = ppo_slope(&p.options, logp[t], old_logp[t], advantages[t]);
            near("dlogp", g[t], token_weight(p.mode, t) * want, 1e-14);
        }
    }
    test_end("slopes of PPO, clip-higher, dual clip, in each aggregation");
}

/* Spec 8.5: -s A / (n_i S) for GSPO, spec 8.10: -s A / S for whole sequences, unless the
   clip took over. */
static void test_sequence_slopes(void) {
    double logp[TOKENS], old_logp[TOKENS], advantage[SEQUENCES], g[2][TOKENS];
    for (int trial = 0; trial < 100; trial++) {
        policy_problem p = {ppo_default, packed, 0, 0, old_logp, advantage};
        normals(TOKENS, .3, logp);
        normals(TOKENS, .3, old_logp);
        normals(SEQUENCES, 1, advantage);
        slow_gradient_of(gspo_scalar, &p, TOKENS, logp, g[0]);
        slow_gradient_of(rloo_scalar, &p, TOKENS, logp, g[1]);
        for (int t = 0; t < TOKENS; t++) {
            double n = 0, sum = 0, a = advantage[sequence_of(t)];
            for (int64_t u = documents[sequence_of(t)]; u < documents[sequence_of(t) + 1];
                 u++) {
                sum += mask[u] * (logp[u] - old_logp[u]);
                n += mask[u];
            }
            double gspo = mask[t] > 0 ? ppo_slope(&p.options, sum / n, 0, a) / (n * 3) : 0;
            near("GSPO's dlogp", g[0][t], gspo, 1e-14);
            near("RLOO's dlogp", g[1][t], mask[t] * ppo_slope(&p.options, sum, 0, a) / 4,
                 1e-14);
        }
    }
    test_end("slopes of GSPO and of RLOO's sequence ratio");
}

/* Spec 8.5: CISPO -sg(min(ratio, cap)) A; SAPO -4 sigmoid'(tau (ratio - 1)) ratio A. */
static void test_one_token_slopes(void) {
    for (int trial = 0; trial < 50; trial++) {
        double logp = -fabs(test_normal()), old_logp = -fabs(test_normal());
        double ratio = exp(logp - old_logp);
        one_token p = {uniform(.8, 1.4), old_logp, test_normal()};
        near("CISPO", slope(cispo_scalar, &p, logp), -fmin(ratio, p.tau) * p.advantage, 1e-14);
        double want = -4 * dsigma(p.tau * (ratio - 1)) * ratio * p.advantage;
        near("SAPO", slope(sapo_scalar, &p, logp), want, 1e-14 * fmax(1, fabs(want)));
    }
    test_end("slopes of CISPO and SAPO");
}

/* Spec 8.6: V - G where the unclipped is the larger, else (V_clip - G) 1[|V - V_old| <= c]. */
static void test_value_slopes(void) {
    for (int trial = 0; trial < 300; trial++) {
        double v = test_normal(), old = v + .5 * test_normal(), ret = test_normal();
        value_problem p = {1, trial % 3 ? .2 : HUGE_VAL, &old, &ret};
        double clipped = old + fmin(fmax(v - old, -p.clip), p.clip);
        bool plain = isinf(p.clip) || fabs(v - ret) >= fabs(clipped - ret);
        double want = plain ? v - ret : fabs(v - old) <= p.clip ? clipped - ret : 0;
        near("dvalue", slope(value_scalar, &p, v), want, 1e-15);
    }
    test_end("slopes of the value loss");
}

static slow_complex sft_scalar(const slow_complex *logp, const void *mode) {
    return slow_sft(*(const slow_aggregation *)mode, &packed, logp);
}

static slow_complex weighted_scalar(const slow_complex *logp, const void *weights) {
    return slow_sft_weighted(TOKENS, mask, weights, false, logp);
}

/* Spec 3.1: -m/N, -m/(n_i S); spec 3.3: -m w / sum m w. */
static void test_sft_slopes(void) {
    double logp[TOKENS], g[TOKENS], weights[TOKENS], total = 0;
    normals(TOKENS, 1, logp);
    for (slow_aggregation mode = SLOW_TOKEN_MEAN; mode <= SLOW_SEQ_MEAN_TOKEN_MEAN; mode++) {
        slow_gradient_of(sft_scalar, &mode, TOKENS, logp, g);
        for (int t = 0; t < TOKENS; t++) near("dlogp", g[t], -token_weight(mode, t), 1e-16);
    }
    for (int t = 0; t < TOKENS; t++) total += mask[t] * (weights[t] = uniform(.1, 2));
    slow_gradient_of(weighted_scalar, weights, TOKENS, logp, g);
    for (int t = 0; t < TOKENS; t++)
        near("weighted dlogp", g[t], -mask[t] * weights[t] / total, 1e-16);
    slow_complex *z = slow_promote(TOKENS, logp);
    double by_weight = creal(slow_sft_weighted(TOKENS, mask, weights, false, z));
    near("by count", creal(slow_sft_weighted(TOKENS, mask, weights, true, z)),
         by_weight * total / 7, 1e-15);
    free(z);
    test_end("seeds of the SFT means");
}

typedef struct {
    int64_t tokens, experts, k;
} moe_problem;

/* The balance loss of softmax(x). */
static slow_complex moe_scalar(const slow_complex *x, const void *context) {
    const moe_problem *p = context;
    slow_complex *q = slow_array(p->tokens * p->experts);
    for (int64_t i = 0; i < p->tokens * p->experts; i++)
        q[i] = cexp(x[i] - slow_log_sum_exp(p->experts, x + i / p->experts * p->experts));
    slow_complex loss = slow_moe_balance(p->tokens, p->experts, p->k, q);
    free(q);
    return loss;
}

/* Is expert e's logit among the k largest? */
static bool routed(int experts, int k, const double *x, int e) {
    int better = 0;
    for (int j = 0; j < experts; j++) better += x[j] > x[e];
    return better < k;
}

/* Spec 9: p_j (E/T) (f_j - sum_e f_e p_e), f constant. */
static void test_moe_slopes(void) {
    enum { E = 4, T = 6 };
    double x[T * E], g[T * E], p[T * E], f[E] = {0};
    moe_problem problem = {T, E, 2};
    normals(T * E, 1, x);
    for (int i = 0; i < T * E; i++) f[i % E] += routed(E, 2, x + i / E * E, i % E) / (double)T;
    for (int t = 0; t < T; t++) log_softmax(E, x + t * E, p + t * E);
    slow_gradient_of(moe_scalar, &problem, T * E, x, g);
    for (int i = 0; i < T * E; i++) {
        double mean = 0;
        for (int e = 0; e < E; e++) mean += f[e] * exp(p[i / E * E + e]);
        near("dx", g[i], exp(p[i]) * E / T * (f[i % E] - mean), 1e-15);
    }
    test_end("slopes of the router's balance loss");
}

/* Seeds of the NLL that is mixed in: -coef/(P n_w) by pairs, -1/N_w by tokens; spec 8.7's
   total is linear. */
static void test_mix_slopes(void) {
    slow_pair x[2] = {{-3, -4, -2, -4, 4, 2}, {-5 + SLOW_STEP * _Complex_I, -1, -4, -2, 5, 7}},
              plain[2] = {x[0], x[1]};
    slow_preference o = {.beta = .1};
    slow_complex with = slow_preference_mean(slow_dpo_sigmoid, &o, .25, 2, x);
    slow_complex without = slow_preference_mean(slow_dpo_sigmoid, &o, 0, 2, plain);
    near("by pairs", cimag(with - without) / SLOW_STEP, -.25 / (2 * 5), 1e-16);
    near("by tokens", cimag(slow_chosen_nll_tokens(2, x)) / SLOW_STEP, -1. / 9, 1e-16);
    slow_actor a = {.1, .01, .05};
    slow_complex i = SLOW_STEP * _Complex_I;
    near("total", creal(slow_actor_loss(&a, 1, 2, 3, 4)), 1 + .2 - .03 + .2, 1e-15);
    near("policy's slope", cimag(slow_actor_loss(&a, 1 + i, 2, 3, 4)) / SLOW_STEP, 1, 0);
    near("KL's slope", cimag(slow_actor_loss(&a, 1, 2 + i, 3, 4)) / SLOW_STEP, .1, 1e-16);
    near("entropy's slope", cimag(slow_actor_loss(&a, 1, 2, 3 + i, 4)) / SLOW_STEP, -.01,
         1e-16);
    near("ptx's slope", cimag(slow_actor_loss(&a, 1, 2, 3, 4 + i)) / SLOW_STEP, .05, 1e-16);
    test_end("slopes of mixed losses");
}

/* ---- from logits to a loss of whole sequences: two pairs in a row, chosen, chosen, rejected, rejected ---- */

enum { VOCAB = 5, PAIR_TOKENS = 12, PAIRS = 2 };
static const int64_t pair_documents[] = {0, 3, 5, 9, PAIR_TOKENS};
static const double pair_mask[PAIR_TOKENS] = {0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 1};
static const int32_t pair_targets[PAIR_TOKENS] = {1, 0, 4, 2, 2, 3, 1, 0, 4, 1, 3, 2};
static const slow_sequences pair_row = {2 * PAIRS, pair_documents, pair_mask};

typedef struct {
    slow_pair_loss *loss;
    slow_preference options;
    double temperature, nll_coef;
    const double *ref_logp;
} row_problem;

static slow_complex row_scalar(const slow_complex *logits, const void *context) {
    const row_problem *p = context;
    slow_complex logp[PAIR_TOKENS];
    slow_pair pairs[PAIRS];
    slow_logps(PAIR_TOKENS, VOCAB, p->temperature, logits, pair_targets, logp, NULL, NULL);
    slow_pairs(&pair_row, logp, p->ref_logp, pairs);
    return slow_preference_mean(p->loss, &p->options, p->nll_coef, PAIRS, pairs);
}

/* The seed dL/dlogp of token t: m_t / P times the slope of its sequence's sum, and the NLL's
   of chosen ones. */
static double row_seed(const row_problem *p, const slow_complex *logits,
                       slopes (*of)(const pair_numbers *), int t) {
    slow_complex logp[PAIR_TOKENS];
    slow_pair pairs[PAIRS];
    int64_t sequence = slow_document(2 * PAIRS, pair_documents, t);
    slow_logps(PAIR_TOKENS, VOCAB, p->temperature, logits, pair_targets, logp, NULL, NULL);
    slow_pairs(&pair_row, logp, p->ref_logp, pairs);
    pair_numbers n = numbers_of(&p->options, &pairs[sequence % PAIRS]);
    double chosen = of(&n).w - p->nll_coef / pairs[sequence % PAIRS].chosen_length;
    return pair_mask[t] / PAIRS * (sequence < PAIRS ? chosen : of(&n).l);
}

/* Spec 0: dL/dx_tj = c_t (1[j = y_t] - p_tj) / temperature; nothing at all where the mask is
   0. */
static void test_from_logits(void) {
    double x[PAIR_TOKENS * VOCAB], g[PAIR_TOKENS * VOCAB], ref[PAIR_TOKENS], half[VOCAB];
    double log_p[VOCAB];
    slow_pair_loss *losses[] = {slow_dpo_sigmoid, slow_ipo, slow_simpo, slow_orpo};
    slopes (*of[])(const pair_numbers *) = {sigmoid_slopes, ipo_slopes, simpo_slopes,
                                            orpo_slopes};
    for (int k = 0; k < 4; k++) {
        row_problem p = {
            losses[k], {.beta = .3, .label_smoothing = .1, .gamma = .5}, 2, .2, ref};
        normals(PAIR_TOKENS * VOCAB, 2, x);
        normals(PAIR_TOKENS, 1, ref);
        slow_complex *z = slow_promote(PAIR_TOKENS * VOCAB, x);
        slow_gradient_of(row_scalar, &p, PAIR_TOKENS * VOCAB, x, g);
        for (int i = 0; i < PAIR_TOKENS * VOCAB; i++) {
            int t = i / VOCAB, j = i % VOCAB;
            for (int v = 0; v < VOCAB; v++) half[v] = x[t * VOCAB + v] / 2;
            log_softmax(VOCAB, half, log_p);
            double want = row_seed(&p, z, of[k], t) * ((j == pair_targets[t]) - exp(log_p[j])) /
                          2;
            near("dlogits", g[i], want, 1e-14);
            test_expect(pair_mask[t] != 0 || g[i] == 0,
                        "a masked token's logit has a slope of %g", g[i]);
        }
        free(z);
    }
    test_end("from logits to DPO, IPO, SimPO, ORPO with an NLL: seeds times rows");
}

/* ---- identities, spec 10 ---- */

typedef struct {
    const char *name;
    double loss, w, l;
} fixed_point;

/* Policy and reference alike: value and slopes of the spec's table, per beta, epsilon, gamma
   = 0, tau, lengths. */
static void expect_fixed_points(double b, double e, double tau, double n_w, double n_l) {
    double exo = .5 * log(.5 / (1 - e)) + .5 * log(.5 / e), odds = b / 4 * log((1 - e) / e);
    double disco = b * (-.25 - .5 + (1 - LN2) / (4 * tau));
    fixed_point points[] = {
        {"dpo_sigmoid", LN2, -b * (.5 - e), b * (.5 - e)},
        {"dpo_robust", LN2, -b / (2 * (1 - 2 * e)), b / (2 * (1 - 2 * e))},
        {"dpo_hinge", 1, -b, b},
        {"ipo", 1 / (4 * b * b), -1 / b, 1 / b},
        {"ipo_mean", 1 / (4 * b * b), -1 / b / n_w, 1 / b / n_l},
        {"dpo_norm", LN2, -b / (2 * n_w), b / (2 * n_l)},
        {"exo_pair", exo, -odds, odds},
        {"nca_pair", 2 * LN2, -b / 4, b / 4},
        {"bco_pair", 2 * LN2, -b / 2, b / 2},
        {"sppo_hard", 1 / (2 * b * b), -1 / b, 1 / b},
        {"apo_zero", 1, -b / 4, b / 4},
        {"apo_down", 1, 0, b / 4},
        {"discopop", .5 * LN2 + .5, disco, -disco},
        {"cpo", LN2, -b * (.5 - e), b * (.5 - e)},
    };
    for (size_t k = 0; k < sizeof points / sizeof *points; k++) {
        pair_problem p = {slow_pair_loss_named(points[k].name),
                          {.beta = b, .label_smoothing = e, .tau = tau},
                          {-7.25, -7.25, -7.25, -7.25, n_w, n_l}};
        pair_result y = pair_of(&p);
        near(points[k].name, y.loss, points[k].loss, 4e-15 * fmax(1, fabs(points[k].loss)));
        near(points[k].name, y.dchosen, points[k].w, 4e-15 * fmax(1, fabs(points[k].w)));
        near(points[k].name, y.drejected, points[k].l, 4e-15 * fmax(1, fabs(points[k].l)));
    }
}

static void test_fixed_points(void) {
    expect_fixed_points(.1, .1, .05, 5, 8);
    expect_fixed_points(.5, .25, .2, 1, 1);
    expect_fixed_points(2, 1e-3, 1, 3, 2);
    test_end("pairs of a policy that is its reference");
}

/* The same bit for bit where no rounding can come in. */
static void test_fixed_points_bitwise(void) {
    pair_problem p = {
        slow_dpo_sigmoid, {.beta = .1, .label_smoothing = 0}, {-3, -4, -3, -4, 2, 2}};
    same("ln 2", pair_of(&p).loss, LN2);
    same("-beta / 2", pair_of(&p).dchosen, -.05);
    p.loss = slow_dpo_hinge;
    same("hinge", pair_of(&p).loss, 1);
    same("hinge's slope", pair_of(&p).dchosen, -.1);
    p.loss = slow_ipo;
    same("IPO", pair_of(&p).loss, 25);
    p.loss = slow_dpo_norm;
    same("norm", pair_of(&p).loss, LN2);
    slow_preference_metrics m = slow_preference_report(.1, 1, &p.pair);
    all_same("metrics", 4, (double *)&m, (double[]){0, 0, 0, 0});
    test_end("pairs of a policy that is its reference, bitwise");
}

/* ln 2 under every divergence, with slopes of -beta/2 score'(0): 1, 1, 1/2, 1. */
static void test_divergence_fixed_points(void) {
    static const double factor[] = {1, 1, .5, 1};
    for (int d = 0; d < 4; d++) {
        pair_problem p = {slow_dpo_sigmoid,
                          {.beta = .3, .divergence = (slow_divergence)d, .alpha = .5},
                          {-3, -4, -3, -4, 2, 2}};
        near("loss", pair_of(&p).loss, LN2, 1e-15);
        near("dchosen", pair_of(&p).dchosen, -.15 * factor[d], 1e-15);
    }
    for (int trial = 0; trial < 20; trial++) { /* alpha -> 1 is reverse KL */
        pair_problem p = random_pair("dpo_sigmoid", 2), q = p;
        p.options.divergence = SLOW_ALPHA;
        p.options.alpha = 1 - 1e-7;
        near("alpha near 1", pair_of(&p).loss, pair_of(&q).loss, 1e-5);
    }
    test_end("divergences of a policy that is its reference, and alpha near 1");
}

/* SimPO softplus(gamma), ORPO beta ln 2, NLL mix ln 2 + coef NLL, LD-DPO, KTO. */
static void test_other_fixed_points(void) {
    pair_problem p = {slow_simpo, {.beta = 2, .gamma = .5}, {-6, -9, 0, 0, 2, 3}};
    near("SimPO", pair_of(&p).loss, plus(.5), 1e-15);
    p.loss = slow_orpo;
    near("ORPO", pair_of(&p).loss, 2 * LN2, 1e-15);
    slow_pair x[2] = {{-6, -9, -6, -9, 2, 3}, {-4, -2, -4, -2, 4, 1}};
    near(
        "RPO",
        creal(slow_preference_mean(slow_dpo_sigmoid, &(slow_preference){.beta = .1}, .5, 2, x)),
        LN2 + .5 * (3 + 1) / 2, 1e-15);
    double logp[5] = {-3, -1, -4, -1, -5}, g[5];
    bool desirable[5] = {true, false, true, true, false};
    kto_problem k = {{.1, 1.25, 1.5}, 5, desirable, logp, slow_kto_kl(5, logp, logp)};
    same("KTO's KL", k.kl, 0);
    same("KTO's KL", slow_kto_kl(2, (double[]){-1, -2}, (double[]){-4, -3}), 2);
    same("KTO's KL, negative", slow_kto_kl(2, (double[]){-4, -3}, (double[]){-1, -2}), 0);
    near("KTO", slow_value_of(kto_scalar, &k, 5, logp), .5 * (1.25 * 3 + 1.5 * 2) / 5, 1e-15);
    slow_gradient_of(kto_scalar, &k, 5, logp, g);
    for (int i = 0; i < 5; i++)
        near("KTO's slope", g[i], (desirable[i] ? -1.25 : 1.5) * .1 / 4 / 5, 1e-16);
    test_end("other losses of a policy that is its reference");
}

/* L(D) - L(-D) = -beta D; swapping the pair with e -> 1 - e; beta scales; a shift of policy
   and reference cancels. */
static void test_pair_structure(void) {
    for (int trial = 0; trial < 100; trial++) {
        pair_problem p = random_pair("dpo_sigmoid", 4), q = p;
        q.pair = (slow_pair){
            p.pair.rejected, p.pair.chosen, p.pair.ref_rejected, p.pair.ref_chosen, 1, 1};
        q.options.label_smoothing = 1 - p.options.label_smoothing;
        near("swapped", pair_of(&q).loss, pair_of(&p).loss, 4e-15 * fmax(1, pair_of(&p).loss));
        p.options.label_smoothing = q.options.label_smoothing = 0;
        double z = creal(slow_margin(&p.options, &p.pair));
        near("antisymmetry", pair_of(&p).loss - pair_of(&q).loss, -z, 1e-14 * fmax(1, fabs(z)));
        q = p;
        q.pair.chosen += 3;
        q.pair.ref_chosen += 3;
        same("shift", pair_of(&q).loss, pair_of(&p).loss);
        p.options.beta = .25;
        q.options.beta = 1;
        q.pair = (slow_pair){p.pair.chosen / 4,
                             p.pair.rejected / 4,
                             p.pair.ref_chosen / 4,
                             p.pair.ref_rejected / 4,
                             1,
                             1};
        same("beta", pair_of(&q).loss, pair_of(&p).loss);
    }
    test_end("antisymmetry, swap, shift and scale of DPO");
}

/* Losses that are others at special values: SimPO as CPO, the normalised DPO as DPO, LD-DPO
   as a plain sum. */
static void test_pair_special(void) {
    for (int trial = 0; trial < 100; trial++) {
        pair_problem p = random_pair("simpo", 4), q = p;
        p.options.gamma = 0;
        p.pair.chosen_length = p.pair.rejected_length = 1;
        q.loss = slow_cpo;
        near("SimPO is CPO", pair_of(&p).loss, pair_of(&q).loss,
             4e-15 * fmax(1, pair_of(&q).loss));
        p.loss = slow_dpo_norm;
        q.loss = slow_dpo_sigmoid;
        p.options.label_smoothing = q.options.label_smoothing = 0;
        p.pair.chosen_length = p.pair.rejected_length = 4;
        q.options.beta = p.options.beta / 4;
        same("norm is DPO", pair_of(&p).loss, pair_of(&q).loss);
        p = q;
        p.pair.ref_chosen = p.pair.ref_rejected = 0;
        p.options.reference_free = false;
        q.options.reference_free = true;
        same("reference-free", pair_of(&p).loss, pair_of(&q).loss);
    }
    slow_complex logp[5] = {-1, -2, -.5, -3, -.25};
    same("LD-DPO", creal(slow_ld_logp(5, 2, 1, logp)), -6.75);
    same("LD-DPO, shorter", creal(slow_ld_logp(3, 5, .5, logp)), -3.5);
    test_end("losses on pairs that coincide");
}

static void test_metrics(void) {
    slow_pair x[3] = {{-1, -5, -2, -4, 1, 1}, {-3, -3, -3, -3, 1, 1}, {-6, -8, -4, -3, 1, 1}};
    slow_preference_metrics m = slow_preference_report(.5, 3, x);
    near("chosen", m.chosen_reward, .5 * (1 + 0 - 2) / 3, 1e-15);
    near("rejected", m.rejected_reward, .5 * (-1 + 0 - 5) / 3, 1e-15);
    near("margin", m.margin, .5 * (2 + 0 + 3) / 3, 1e-15);
    near("accuracy, in which a tie is wrong", m.accuracy, 2. / 3, 1e-15);
    same("accuracy of rewards",
         slow_accuracy(4, (double[]){1, 2, 3, 4}, (double[]){0, 2, 5, 3}), .5);
    test_end("rewards, margin and accuracy");
}

/* r_w = r_l: softplus(margin), slope -1/2; logexp is sigmoid without a margin; the centre's
   4 c r^2. */
static void test_rm_identities(void) {
    double x[2] = {.75, .75}, g[2];
    rm_problem p = {0, 0};
    same("ln 2", slow_value_of(rm_scalar, &p, 2, x), LN2);
    slow_gradient_of(rm_scalar, &p, 2, x, g);
    all_same("slopes", 2, g, (double[]){-.5, .5});
    p = (rm_problem){.3, 0};
    near("margin", slow_value_of(rm_scalar, &p, 2, x), plus(.3), 1e-15);
    p = (rm_problem){0, .25};
    near("centre", slow_value_of(rm_scalar, &p, 2, x), LN2 + 4 * .25 * .75 * .75, 1e-15);
    for (int trial = 0; trial < 20; trial++) {
        double w = test_normal(), l = test_normal();
        same("logexp", creal(slow_rm_logexp(w, l)), creal(slow_rm_sigmoid(w, l, 0)));
    }
    slow_complex w[2] = {1, 2}, l[2] = {1, 5};
    near("mean over pairs", creal(slow_rm_loss(2, w, l, NULL, 0)), (LN2 + plus(3)) / 2, 1e-15);
    near("PRM", creal(slow_prm_soft(.5, (slow_complex[]){3, 3})), LN2, 1e-15);
    test_end("reward models at equal rewards");
}

/* Equal logits: ln V whatever the smoothing, z-loss (ln V)^2; every slope sums to 0 without
   z-loss. */
static void test_token_identities(void) {
    double x[8] = {0}, g[8], y[8];
    token_problem p = {8, 3, .3, 0, 0, NULL}, z = {8, 3, 0, .5, 0, NULL};
    near("ln V", slow_value_of(token_scalar, &p, 8, x), log(8), 1e-15);
    near("z-loss", slow_value_of(token_scalar, &z, 8, x), log(8) + .5 * log(8) * log(8), 1e-14);
    normals(8, 3, x);
    slow_gradient_of(token_scalar, &p, 8, x, g);
    double sum = 0;
    for (int j = 0; j < 8; j++) {
        sum += g[j];
        y[j] = x[j] + 5;
    }
    near("sum of slopes", sum, 0, 8 * DBL_EPSILON);
    near("shift", slow_value_of(token_scalar, &p, 8, y), slow_value_of(token_scalar, &p, 8, x),
         1e-14);
    near("entropy's shift", slow_value_of(entropy_scalar, &p, 8, y),
         slow_value_of(entropy_scalar, &p, 8, x), 1e-14);
    test_expect(
        fabs(slow_value_of(token_scalar, &z, 8, y) - slow_value_of(token_scalar, &z, 8, x)) > 1,
        "the z-loss does not see a shift");
    x[3] = 800;
    p.smoothing = 0;
    same("certain", slow_value_of(token_scalar, &p, 8, x), 0);
    test_end("one token's loss");
}

static void test_logps(void) {
    double x[6] = {1, 2, -1, .5, 0, 3}, half[6];
    for (int k = 0; k < 6; k++) half[k] = x[k] / 2;
    slow_complex *z = slow_promote(6, x), *h = slow_promote(6, half), a[2], b[2], entropy[2],
                 lse[2];
    int32_t targets[2] = {2, SLOW_IGNORED};
    slow_logps(2, 3, 2, z, targets, a, entropy, lse);
    slow_logps(2, 3, 1, h, targets, b, NULL, NULL);
    same("temperature", creal(a[0]), creal(b[0]));
    same("ignored", creal(a[1]), 0);
    double p[3], log_p[3], H = 0;
    log_softmax(3, half, log_p);
    for (int j = 0; j < 3; j++) H -= (p[j] = exp(log_p[j])) * log_p[j];
    near("logp", creal(a[0]), log_p[2], 1e-15);
    near("entropy", creal(entropy[0]), H, 1e-15);
    near("lse", creal(lse[0]), log(exp(.5) + exp(1) + exp(-.5)), 1e-15);
    free(z);
    free(h);
    test_end("log-probabilities at a temperature");
}

/* A masked token's log-probability, even a NaN, changes nothing; empty sequences and empty
   steps give 0. */
static void test_masked(void) {
    double logp[TOKENS], g[TOKENS], none[TOKENS] = {0};
    normals(TOKENS, 1, logp);
    for (slow_aggregation mode = SLOW_TOKEN_MEAN; mode <= SLOW_SEQ_MEAN_TOKEN_MEAN; mode++) {
        double before = slow_value_of(sft_scalar, &mode, TOKENS, logp), kept = logp[5];
        slow_gradient_of(sft_scalar, &mode, TOKENS, logp, g);
        same("masked slope", g[5], 0);
        logp[5] = NAN;
        same("masked", slow_value_of(sft_scalar, &mode, TOKENS, logp), before);
        logp[5] = kept;
        slow_complex *z = slow_promote(TOKENS, logp);
        same("nothing", creal(slow_sft(mode, &(slow_sequences){SEQUENCES, documents, none}, z)),
             0);
        free(z);
    }
    test_end("masked tokens and empty sequences");
}

/* The row's sequences in another order, with other padding between them: the same aggregate. */
static void test_packing(void) {
    static const int64_t order[] = {2, 0, 1}, moved[] = {0, 5, 9, 10};
    double x[TOKENS], y[TOKENS], m[TOKENS];
    normals(TOKENS, 1, x);
    for (int k = 0, at = 0; k < 3; k++)
        for (int64_t t = documents[order[k]]; t < documents[order[k] + 1]; t++, at++) {
            y[at] = x[t];
            m[at] = mask[t];
        }
    slow_complex *a = slow_promote(TOKENS, x), *b = slow_promote(10, y);
    for (slow_aggregation mode = SLOW_TOKEN_MEAN; mode <= SLOW_SEQ_MEAN_TOKEN_SUM_NORM; mode++)
        near(mode_names[mode],
             creal(slow_aggregate(mode, &(slow_sequences){3, moved, m}, 5, b)),
             creal(slow_aggregate(mode, &packed, 5, a)), 1e-15);
    free(a);
    free(b);
    test_end("aggregates do not depend on the packing");
}

/* Spec 8.5's table once more, as values. */
static void test_aggregate(void) {
    double x[TOKENS];
    normals(TOKENS, 1, x);
    slow_complex *z = slow_promote(TOKENS, x);
    for (slow_aggregation mode = SLOW_TOKEN_MEAN; mode <= SLOW_SEQ_MEAN_TOKEN_SUM_NORM;
         mode++) {
        double want = 0;
        for (int t = 0; t < TOKENS; t++) want += token_weight(mode, t) * x[t];
        near(mode_names[mode], creal(slow_aggregate(mode, &packed, 5, z)), want, 1e-15);
    }
    free(z);
    test_end("aggregates by hand");
}

/* Teacher = student: 0 and no slope; all divergences are at least 0, JSD at most the entropy
   of a coin of beta. */
static void test_distillation_identities(void) {
    for (int trial = 0; trial < 20; trial++) {
        double x[6], y[6], g[6], b = uniform(.05, .95);
        token_problem p = {6, 0, 0, 0, b, x};
        normals(6, 3, x);
        slow_scalar *f[] = {forward_scalar, reverse_scalar, jsd_scalar};
        for (int k = 0; k < 3; k++) {
            slow_gradient_of(f[k], &p, 6, x, g);
            near("itself", slow_value_of(f[k], &p, 6, x), 0, 1e-15);
            all_near("its slope", 6, g, (double[6]){0}, 1e-15);
        }
        normals(6, 3, y);
        p.teacher = y;
        for (int k = 0; k < 3; k++)
            test_expect(slow_value_of(f[k], &p, 6, x) >= 0, "a divergence is negative");
        test_expect(slow_value_of(jsd_scalar, &p, 6, x) <= -b * log(b) - (1 - b) * log(1 - b),
                    "JSD is too large");
        double forward = slow_value_of(forward_scalar, &p, 6, x);
        p.beta = 1e-9;
        near("JSD / beta", slow_value_of(jsd_scalar, &p, 6, x) / 1e-9, forward,
             1e-2 * fmax(1, forward));
    }
    test_end("distillation of a model into itself, bounds");
}

/* d = 0: all 0, slopes 1, 0, 0; k3 = k2 - d^3/6 + ...; the controller stays at its target. */
static void test_kl_identities(void) {
    slow_scalar *f[] = {k1_scalar, k2_scalar, k3_scalar};
    double d = 1e-3, factors[] = {1 - .2 * 256 / 1e4, 1 + .2 * 256 / 1e4};
    for (int k = 0; k < 3; k++) {
        same("value at 0", slow_value_of(f[k], NULL, 1, (double[]){0}), 0);
        near("slope at 0", slope(f[k], NULL, 0), k == 0, 1e-60); /* the step itself squared */
    }
    near("k3", creal(slow_k3(d)), d * d / 2 - d * d * d / 6, d * d * d * d / 20);
    same("fixed", slow_fixed_kl(.01, 123), .01);
    same("on target", slow_adaptive_kl(.01, 6, 6, 256, 1e4), .01);
    near("far below", slow_adaptive_kl(1, 0, 6, 256, 1e4), factors[0], 1e-16);
    near("far above", slow_adaptive_kl(1, 1e9, 6, 256, 1e4), factors[1], 1e-15);
    test_end("KL estimators at 0 and the controllers");
}

/* logp = old_logp: ratio 1, nothing clipped, the loss -mean(A), its slopes REINFORCE's. */
static void test_first_step(void) {
    double logp[TOKENS], advantages[TOKENS], g[TOKENS], plain[TOKENS];
    normals(TOKENS, 1, logp);
    normals(TOKENS, 1, advantages);
    for (slow_aggregation mode = SLOW_TOKEN_MEAN; mode <= SLOW_SEQ_MEAN_TOKEN_SUM_NORM;
         mode++) {
        policy_problem p = {{.2, .28, 3, 20}, packed, mode, 5, logp, advantages};
        double want = 0;
        for (int t = 0; t < TOKENS; t++) {
            want -= token_weight(mode, t) * advantages[t];
            same("ratio", creal(slow_ratio(&p.options, logp[t], logp[t])), 1);
            test_expect(!slow_clipped(&p.options, logp[t], logp[t], advantages[t]),
                        "clipped at ratio 1");
        }
        near("loss", slow_value_of(policy_scalar, &p, TOKENS, logp), want, 1e-15);
        slow_gradient_of(policy_scalar, &p, TOKENS, logp, g);
        slow_gradient_of(reinforce_scalar, &p, TOKENS, logp, plain);
        for (int t = 0; t < TOKENS; t++) {
            near("REINFORCE", g[t], plain[t], 1e-15);
            near("seed", g[t], -token_weight(mode, t) * advantages[t], 1e-15);
        }
    }
    test_end("PPO's first step");
}

/* GSPO's ratio is 1, CISPO's weight 1 but its cap's if that is below, SAPO's coefficient 2 /
   tau, VESPO's 1. */
static void test_first_step_variants(void) {
    double logp[TOKENS], advantage[SEQUENCES] = {1.5, -.5, .25, 7};
    normals(TOKENS, 1, logp);
    policy_problem p = {ppo_default, packed, 0, 0, logp, advantage};
    near("GSPO", slow_value_of(gspo_scalar, &p, TOKENS, logp), -1.25 / 3, 1e-15);
    same("CISPO", slope(cispo_scalar, &(one_token){1.2, -1, 2}, -1), -2);
    same("CISPO below its cap", slope(cispo_scalar, &(one_token){.2, -1, 2}, -1), -.4);
    near("SAPO", slow_value_of(sapo_scalar, &(one_token){1.05, -1, 2}, 1, (double[]){-1}),
         -2 / 1.05 * 2, 1e-15);
    same("VESPO", slow_vespo_weight(1, -3), 1);
    test_end("the first step of GSPO, CISPO, SAPO, VESPO");
}

/* Whitened advantages with the loss's own weights: a loss of 0.  No KL at first: the score
   is all the reward. */
static void test_first_rollout(void) {
    double logp[TOKENS], x[TOKENS], kl[TOKENS], rewards[TOKENS], returns[TOKENS];
    double score[SEQUENCES] = {3, -20, .5, 1};
    normals(TOKENS, 1, logp);
    normals(TOKENS, 1, x);
    slow_whiten(TOKENS, mask, x, x);
    policy_problem p = {ppo_default, packed, SLOW_TOKEN_MEAN, 0, logp, x};
    near("loss", slow_value_of(policy_scalar, &p, TOKENS, logp), 0, 1e-15);
    for (int t = 0; t < TOKENS; t++) kl[t] = creal(slow_k3(logp[t] - logp[t]));
    slow_shaped_rewards(&packed, .01, kl, score, -10, 10, rewards);
    slow_reward_to_go(&packed, 1, rewards, returns);
    for (int t = 0; t < TOKENS; t++) /* the last actions are tokens 3, 4 and 9 */
        same("reward", rewards[t], t == 3 ? 3 : t == 4 ? -10 : t == 9 ? .5 : 0);
    all_same("returns", TOKENS, returns, (double[]){3, 3, 3, 3, -10, .5, .5, .5, .5, .5, 0, 0});
    test_end("the first rollout: whitened loss, rewards, returns");
}

static void test_value_identities(void) {
    double v[5], ret[5], want = 0;
    normals(5, 1, v);
    normals(5, 1, ret);
    value_problem p = {5, .2, v, ret};
    for (int t = 0; t < 5; t++) want += .5 * (v[t] - ret[t]) * (v[t] - ret[t]) / 5;
    near("loss", slow_value_of(value_scalar, &p, 5, v), want, 1e-15);
    for (int trial = 0; trial < 100; trial++) {
        double x = test_normal(), old = test_normal(), r = test_normal();
        double clipped = creal(slow_value_loss(.2, x, old, r));
        double plain = creal(slow_value_loss(HUGE_VAL, x, old, r));
        test_expect(clipped >= plain, "clipping made the value loss smaller");
        same("no clip", plain, .5 * ((x - r) * (x - r)));
    }
    test_end("the value loss at the old values, and without a clip");
}

typedef struct {
    double rewards[TOKENS], values[TOKENS], advantages[TOKENS], returns[TOKENS];
} rollout;

static void gae_of(const slow_sequences *s, double gamma, double lambda, rollout *r) {
    slow_gae(s, gamma, lambda, r->rewards, r->values, r->advantages, r->returns);
}

/* lambda = 1, gamma = 1: reward to go less the value; lambda = 0: delta; gamma = 0: r - V. */
static void test_gae(void) {
    rollout r;
    double to_go[TOKENS];
    normals(TOKENS, 1, r.rewards);
    normals(TOKENS, 1, r.values);
    gae_of(&packed, 1, 1, &r);
    slow_reward_to_go(&packed, 1, r.rewards, to_go);
    all_near("returns", TOKENS, r.returns, to_go, 1e-15 * 8);
    for (int t = 0; t < TOKENS; t++)
        near("A = G - V", r.advantages[t], to_go[t] - mask[t] * r.values[t], 8e-15);
    gae_of(&packed, .9, 0, &r);
    for (int t = 0; t < TOKENS; t++) {
        double next = t + 1 < documents[sequence_of(t) + 1] ? mask[t + 1] * r.values[t + 1] : 0;
        near("A = delta", r.advantages[t],
             mask[t] * r.rewards[t] + .9 * next - mask[t] * r.values[t], 1e-15);
    }
    gae_of(&packed, 0, .95, &r);
    for (int t = 0; t < TOKENS; t++)
        same("A = r - V", r.advantages[t], mask[t] * r.rewards[t] - mask[t] * r.values[t]);
    test_end("GAE at lambda = 1 and 0 and at gamma = 0");
}

/* r = 0, V = c: only the last delta is not 0, it is -c.  V = 0, a terminal reward R: A_t =
   lambda^(T-1-t) R. */
static void test_gae_terminal(void) {
    static const int64_t whole[2] = {0, TOKENS};
    slow_sequences s = {1, whole, NULL};
    rollout r = {.rewards = {0}};
    for (int t = 0; t < TOKENS; t++) r.values[t] = .75;
    gae_of(&s, 1, 0, &r);
    for (int t = 0; t < TOKENS; t++) same("delta", r.advantages[t], t == TOKENS - 1 ? -.75 : 0);
    memset(r.values, 0, sizeof r.values);
    r.rewards[TOKENS - 1] = 2;
    gae_of(&s, 1, .5, &r);
    for (int t = 0; t < TOKENS; t++)
        same("lambda's power", r.advantages[t], 2 * pow(.5, TOKENS - 1 - t));
    test_end("GAE of constant values and of a terminal reward");
}

/* A packed row is its documents one by one, bit for bit; GAE is linear in rewards and
   values. */
static void test_gae_packed(void) {
    rollout r, one, two, sum;
    normals(TOKENS, 1, r.rewards);
    normals(TOKENS, 1, r.values);
    gae_of(&packed, .99, .95, &r);
    for (int d = 0; d < SEQUENCES; d++) {
        int64_t at = documents[d], n = documents[d + 1] - at, cu_seqlens[2] = {0, n};
        memcpy(one.rewards, r.rewards + at, (size_t)n * sizeof(double));
        memcpy(one.values, r.values + at, (size_t)n * sizeof(double));
        gae_of(&(slow_sequences){1, cu_seqlens, mask + at}, .99, .95, &one);
        all_same("advantages", n, one.advantages, r.advantages + at);
        all_same("returns", n, one.returns, r.returns + at);
    }
    normals(TOKENS, 1, two.rewards);
    normals(TOKENS, 1, two.values);
    for (int t = 0; t < TOKENS; t++) {
        sum.rewards[t] = r.rewards[t] + 3 * two.rewards[t];
        sum.values[t] = r.values[t] + 3 * two.values[t];
    }
    gae_of(&packed, .99, .95, &two);
    gae_of(&packed, .99, .95, &sum);
    for (int t = 0; t < TOKENS; t++)
        near("linear", sum.advantages[t], r.advantages[t] + 3 * two.advantages[t], 1e-14);
    test_end("GAE of a packed row");
}

/* Mean 0 and variance 1 over the unmasked; idempotent; a x + b whitens as x; a constant
   whitens to 0. */
static void test_whitening(void) {
    double x[TOKENS], y[TOKENS], z[TOKENS], c[TOKENS];
    normals(TOKENS, 2, x);
    slow_whiten(TOKENS, mask, x, y);
    near("mean", slow_masked_mean(TOKENS, mask, y), 0, 1e-15);
    near("variance", slow_masked_variance(TOKENS, mask, y), 1, 1e-14);
    slow_whiten(TOKENS, mask, y, z);
    all_near("idempotent", TOKENS, z, y, 1e-14);
    for (int t = 0; t < TOKENS; t++) {
        z[t] = 3 * x[t] + 7;
        c[t] = .5;
    }
    slow_whiten(TOKENS, mask, z, z);
    all_near("affine", TOKENS, z, y, 1e-13);
    slow_whiten(TOKENS, mask, c, c);
    all_same("constant", TOKENS, c, (double[TOKENS]){0});
    slow_whiten(2, NULL, (double[]){1e-6, -1e-6}, c);
    all_near("hardly any variance", 2, c, (double[]){1e-2, -1e-2}, 1e-15);
    slow_whiten_unbiased(TOKENS, mask, true, x, y);
    slow_whiten_unbiased(TOKENS, mask, false, x, z);
    near("unbiased", slow_masked_variance(TOKENS, mask, y) * 7 / 6, 1, 1e-7);
    near("mean kept", slow_masked_mean(TOKENS, mask, z), slow_masked_mean(TOKENS, mask, x),
         1e-15);
    test_end("whitening");
}

/* Sum 0 per group; k successes of n; no variance, no advantage; a R + b; RLOO = n/(n-1) (R -
   mean). */
static void test_groups(void) {
    double r[8] = {1, 0, 0, 1, .5, .5, .5, .5}, a[8], b[8], c[8];
    slow_group_norm(2, 4, 1e-9, r, a);
    for (int i = 0; i < 4; i++) /* k = 2 of n = 4: std^2 = n p (1 - p) / (n - 1) = 1/3 */
        near("binary", a[i], (r[i] - .5) / (sqrt(1. / 3) + 1e-9), 1e-15);
    all_same("no variance", 4, a + 4, (double[4]){0});
    normals(8, 1, r);
    slow_group_norm(2, 4, 0, r, a);
    slow_group_baseline(2, 4, r, b);
    slow_rloo(2, 4, r, c);
    near("sum", a[4] + a[5] + a[6] + a[7], 0, 1e-14);
    for (int i = 0; i < 8; i++) {
        near("RLOO", c[i], 4. / 3 * b[i], 1e-15);
        r[i] = 2 * r[i] - 5;
    }
    slow_group_norm(2, 4, 0, r, c);
    all_near("affine", 8, c, a, 1e-14);
    slow_rloo(4, 2, r, c);
    for (int i = 0; i < 8; i++) same("RLOO of two", c[i], r[i] - r[i ^ 1]);
    slow_opo(2, 4, (double[]){3, 3, 3, 3, 7, 7, 7, 7}, r, a);
    slow_group_baseline(2, 4, r, b);
    all_near("OPO of equal lengths", 8, a, b, 1e-14);
    slow_opo(2, 2, (double[]){1, 3, 5, 5}, (double[]){1, 0, 2, 6}, a);
    all_same("OPO", 4, a, (double[]){.75, -.25, -2, 2});
    slow_group_norm(2, 2, 0, (double[]){1, 0, 2, 6}, a);
    all_near("each group by its own deviation", 4, a,
             (double[]){sqrt(.5), -sqrt(.5), -sqrt(.5), sqrt(.5)}, 1e-15);
    test_end("advantages within a group");
}

/* REINFORCE++ without KL: the clipped score at every action, whitened over the rollout; its
   baseline centres first. */
static void test_reinforce_plus_plus(void) {
    double kl[TOKENS] = {0}, score[SEQUENCES] = {1, 3, -2, 0}, rewards[TOKENS], a[TOKENS];
    double spread[TOKENS];
    slow_shaped_rewards(&packed, .1, kl, score, -10, 10, rewards);
    slow_reinforce_plus_plus(&packed, 1, rewards, a);
    slow_spread(&packed, score, spread);
    slow_whiten(TOKENS, mask, spread, spread);
    for (int t = 0; t < TOKENS; t++)
        near("REINFORCE++", mask[t] * a[t], mask[t] * spread[t], 1e-15);
    slow_reinforce_plus_plus_baseline(&packed, 2, .1, kl, score, -10, 10, a);
    slow_spread(&packed, (double[]){-1, 1, -1, 1}, spread);
    slow_whiten(TOKENS, mask, spread, spread);
    for (int t = 0; t < TOKENS; t++)
        near("with a baseline", mask[t] * a[t], mask[t] * spread[t], 1e-15);
    test_end("REINFORCE++");
}

static void test_rewards(void) {
    same("normalised", slow_normalize_reward(5, 1, 2, HUGE_VAL), 2);
    same("clipped", slow_normalize_reward(-50, 1, 2, 5), -5);
    same("no spread", slow_normalize_reward(1, 1, 0, 5), 0);
    near("hardly any", slow_normalize_reward(1 + 1e-8, 1, 1e-12, 5), 1, 1e-7);
    same("short", slow_overlong_penalty(896, 1024, 128, 1), 0);
    same("at the end", slow_overlong_penalty(1024, 1024, 128, 1), -1);
    same("beyond", slow_overlong_penalty(5000, 1024, 128, .5), -.5);
    double r[2], kl[2] = {.5, -.25}, score = 1;
    slow_shaped_rewards(&(slow_sequences){1, (int64_t[]){0, 2}, NULL}, -3, kl, &score, -10, 10,
                        r);
    all_same("a negative coefficient", 2, r, (double[]){0, 1});
    test_end("rewards: normalised, clipped, overlong");
}

/* Uniform router with balanced counts: k; all to one expert: E. */
static void test_moe_identities(void) {
    slow_complex even[16], one[8] = {1, 0, 0, 0, 1, 0, 0, 0};
    for (int i = 0; i < 16; i++) even[i] = .25;
    near("uniform, k = 2", creal(slow_moe_balance(4, 4, 2, even)), 2, 1e-15);
    near("collapsed", creal(slow_moe_balance(2, 4, 1, one)), 4, 1e-15);
    test_expect(slow_routed(4, 1, even, 0) && !slow_routed(4, 1, even, 3),
                "a tie does not go to the first");
    test_end("the router's balance loss");
}

/* Without decay all Adams are one, TF1's with eps / sqrt(bc2) for eps; an average of a
   constant is it. */
static void test_optimizers(void) {
    double theta[3] = {1, 1, 1}, m[3] = {0}, v[3] = {0}, ema = 2, x = 5;
    for (int t = 1; t <= 5; t++) {
        double g = test_normal() * 1e-6, root = sqrt(1 - pow(.95, t));
        slow_adamw a = {.9, .95, 1e-6, 0}, hat = {.9, .95, 1e-6 * root, 0};
        slow_adamw_step(&a, .01, t, 1, &g, &m[0], &v[0], &theta[0]);
        slow_adam_l2_step(&a, .01, t, 1, &g, &m[1], &v[1], &theta[1]);
        slow_adamw_tf1_step(&hat, .01, t, 1, &g, &m[2], &v[2], &theta[2]);
        near("L2 without decay", theta[1], theta[0], 1e-15);
        near("TF1's eps", theta[2], theta[0], 1e-15);
        slow_ema(.992, 1, &x, &ema);
    }
    near("average", ema, 5 + pow(.992, 5) * (2 - 5), 1e-15);
    ema = 5;
    slow_ema(.992, 1, &x, &ema);
    near("constant", ema, 5, 1e-15);
    test_end("optimizers that coincide, the average of parameters");
}

/* ---- planted mistakes, spec 11: the right thing passes and the wrong one does not ---- */

typedef struct {
    const char *objective, *parameters;
    golden_case found;
    int count;
} search;

static void search_case(const golden_case *c, void *context) {
    search *s = context;
    if (!strcmp(c->objective, s->objective) && !strcmp(c->parameters, s->parameters) &&
        s->count++ == 0)
        s->found = *c;
}

static golden_case case_of(const char *objective, const char *parameters) {
    search s = {objective, parameters, {.line = 0}, 0};
    golden_each(GOLDEN_PATH, search_case, &s);
    test_expect(s.count > 0, "no golden case %s %s", objective, parameters);
    return s.found;
}

/* Is the wrong number further from the expected one than any rounding, and the right one
   not? */
static void told_apart(const char *mistake, double wrong, double right, double want,
                       double limit) {
    test_expect(fabs(right - want) <= limit, "even the right %.17g is not %.17g", right, want);
    test_expect(!(fabs(wrong - want) <= limit), "the mistake's %.17g passes for %.17g", wrong,
                want);
    test_end("mistake told apart: %s", mistake);
}

/* The same against number k of a golden field. */
static void told_by_golden(const char *mistake, const golden_case *c, const char *field, int k,
                           double wrong, double right) {
    double want[MOST] = {0}, limit[MOST] = {0};
    test_expect(golden_expected(c, field, MOST, want, limit) > k, "no golden %s", field);
    told_apart(mistake, wrong, right, want[k], limit[k] + rounding(c, want[k], limit[k]));
}

static double golden_result(const golden_case *c, const char *field, int k) {
    results r = {.fields = 0};
    runner_of(c->objective)(c, &r);
    for (int f = 0; f < r.fields; f++)
        if (!strcmp(r.field[f].name, field)) return r.field[f].value[k];
    return NAN;
}

static void mistake_means(void) {
    golden_case c = case_of("token_mean", "shards=2");
    double right = golden_result(&c, "loss", 0), wrong = golden_result(&c, "mean_of_means", 0);
    told_by_golden("the mean of the shards' means (4, 16)", &c, "loss", 0, wrong, right);
    told_by_golden("labels shifted inside each shard (1)", &c, "loss", 0,
                   golden_result(&c, "shift_in_shard", 0), right);
    told_by_golden(
        "a denominator that counts the mask of both ranks, or shares averaged (16, 27)", &c,
        "loss", 0, right / 2, right);
    c = case_of("moe_balance", "experts=3 k=1 shards=2");
    told_by_golden("router loss from a shard's own f and P (12)", &c, "loss", 0,
                   golden_result(&c, "mean_of_means", 0), golden_result(&c, "loss", 0));
}

/* z = beta (h_w + h_l) */
static slow_complex added_rejected(const slow_preference *o, const slow_pair *x) {
    return slow_softplus(-o->beta * (slow_chosen(o, x) + slow_rejected(o, x)));
}

static slow_complex ignored_reference(const slow_preference *o, const slow_pair *x) {
    slow_preference free = *o;
    free.reference_free = true;
    return slow_dpo_sigmoid(&free, x);
}

static void mistake_pairs(void) {
    golden_case c = case_of("dpo_sigmoid", "beta=.3");
    pair_problem p = pair_problem_of(&c), q = p;
    double right = pair_of(&p).loss;
    q.loss = added_rejected;
    told_by_golden("the rejected log-ratio added", &c, "loss", 0, pair_of(&q).loss, right);
    told_by_golden("the slope of an added rejected", &c, "drejected", 0, pair_of(&q).drejected,
                   pair_of(&p).drejected);
    q.loss = ignored_reference;
    told_by_golden("no reference", &c, "loss", 0, pair_of(&q).loss, right);
    q = p;
    q.pair = (slow_pair){
        p.pair.rejected, p.pair.chosen, p.pair.ref_rejected, p.pair.ref_chosen, 8, 5};
    told_by_golden("chosen and rejected exchanged", &c, "loss", 0, pair_of(&q).loss, right);
    p.pair.ref_chosen = p.pair.ref_rejected = -13;
    p.pair.chosen = p.pair.rejected = -13;
    q = p;
    q.pair.chosen += 1e-6;
    told_apart("a reference that is not quite the policy (20)", pair_of(&q).loss,
               pair_of(&p).loss, LN2, 1e-15);
}

/* The sum over shards of s^r / n^r is not s / n (3, 14). */
static void mistake_local_lengths(void) {
    slow_pair x = {-6, -9, 0, 0, 4, 3}, wrong = {-2. / 1 - 4. / 3, -9. / 3, 0, 0, 1, 1};
    slow_preference o = {.beta = 2, .gamma = .5};
    double z = 2 * (-6. / 4 + 9. / 3) - .5;
    told_apart("SimPO with each shard's own length (3)", creal(slow_simpo(&o, &wrong)),
               creal(slow_simpo(&o, &x)), plus(-z), 1e-15);
    golden_case c = case_of("gspo", "clip_low=.2 clip_high=.2");
    double first = exp((.3 - .1) / 2), second = exp((-.05 - .4) / 2);
    told_by_golden("GSPO's ratio as the mean of the shards' (14)", &c, "ratio", 0,
                   (first + second) / 2, golden_result(&c, "ratio", 0));
    /* with one token of prompt counted, only one of chosen is before position 2 */
    c = case_of("ld_dpo", "alpha=.5");
    told_by_golden("LD-DPO's positions counted from the prompt (10)", &c, "chosen", 0,
                   -.5 + .5 * (-1 - 2), golden_result(&c, "chosen", 0));
}

static void mistake_kto(void) {
    golden_case c = case_of("kto", "beta=.3 desirable_weight=1 undesirable_weight=1.33");
    double logp[MOST], kl[MOST], zeros[MOST] = {0};
    bool desirable[MOST];
    kto_problem p = kto_problem_of(&c, desirable), q = p;
    golden_array(&c, "log_ratio", MOST, logp);
    golden_array(&c, "kl_log_ratio", MOST, kl);
    double right = slow_value_of(kto_scalar, &p, p.count, logp);
    q.kl = slow_kto_kl(1, kl, zeros);
    told_by_golden("KTO's KL over the first micro-batch (9)", &c, "loss", 0,
                   slow_value_of(kto_scalar, &q, 3, logp), right);
    q.kl = (slow_kto_kl(1, kl, zeros) + slow_kto_kl(1, kl + 1, zeros) +
            slow_kto_kl(1, kl + 2, zeros)) /
           3;
    told_by_golden("KTO's KL clamped before the mean (9)", &c, "kl", 0, q.kl, p.kl);
    q.kl = (slow_kto_kl(1, kl, zeros) + slow_kto_kl(2, kl + 1, zeros)) / 2;
    told_by_golden("KTO's KL as a mean of unequal means (9)", &c, "kl", 0, q.kl, p.kl);
    told_by_golden("KTO's KL summed over two replicas (9)", &c, "kl", 0, 2 * p.kl, p.kl);
    q.kl = 0;
    told_by_golden("KTO without its KL", &c, "loss", 0, slow_value_of(kto_scalar, &q, 3, logp),
                   right);
}

/* What a PPO loss is that takes the larger of the two surrogates, or does not clip. */
static double wrong_ppo(const golden_case *c, bool larger) {
    double logp[MOST], old_logp[MOST], a[MOST], sum = 0;
    int n = golden_array(c, "logp", MOST, logp);
    golden_array(c, "old_logp", MOST, old_logp);
    golden_array(c, "advantages", MOST, a);
    for (int t = 0; t < n; t++) {
        double ratio = exp(logp[t] - old_logp[t]), clipped = fmin(fmax(ratio, .8), 1.2);
        sum -= larger ? fmax(ratio * a[t], clipped * a[t]) : ratio * a[t];
    }
    return sum / n;
}

static void mistake_ppo(void) {
    golden_case c = case_of("ppo_policy", "clip_low=.2 clip_high=.2");
    double right = golden_result(&c, "loss", 0);
    told_by_golden("PPO with max for min", &c, "loss", 0, wrong_ppo(&c, true), right);
    told_by_golden("PPO without a clip", &c, "loss", 0, wrong_ppo(&c, false), right);
    told_by_golden("PPO summed, not averaged", &c, "loss", 0, 4 * right, right);
    c = case_of("ppo_policy", "clip_low=.2 clip_high=.2 dual_clip=3");
    told_by_golden("no dual clip", &c, "loss", 0, exp(1.5), golden_result(&c, "loss", 0));
    c = case_of("value_loss", "clip=.2");
    /* (V - G)^2 = .25, .64, .09 and (V_clip - G)^2 = .49, .64, .01 */
    told_by_golden("value loss with min for max", &c, "loss", 0, (.25 + .64 + .01) / 6,
                   golden_result(&c, "loss", 0));
    c = case_of("kl_estimators", "");
    told_by_golden("k3 of the ratio the wrong way up", &c, "k3", 0, creal(slow_k3(-.4)),
                   golden_result(&c, "k3", 0));
    told_by_golden("k1 of the wrong sign", &c, "k1", 0, -.4, golden_result(&c, "k1", 0));
}

static void mistake_advantages(void) {
    static const int64_t whole[2] = {0, TOKENS};
    rollout r, wrong;
    normals(TOKENS, 1, r.rewards);
    normals(TOKENS, 1, r.values);
    wrong = r;
    gae_of(&packed, 1, .95, &r);
    gae_of(&(slow_sequences){1, whole, mask}, 1, .95, &wrong);
    /* token 4 is a document of its own: A = r - V */
    told_apart("GAE across a document's end", wrong.advantages[4], r.advantages[4],
               r.rewards[4] - r.values[4], 1e-15);
    wrong = r;
    gae_of(&(slow_sequences){SEQUENCES, documents, NULL}, 1, .95, &wrong);
    told_apart("GAE that forgets the mask", wrong.returns[11], r.returns[11], 0, 0);
    golden_case c = case_of("gae", "gamma=1 lambda=1");
    told_by_golden("GAE cut at a shard's edge", &c, "advantages", 1, .02 - .4,
                   golden_result(&c, "advantages", 1));
}

static void mistake_moments(void) {
    golden_case c = case_of("whiten", "");
    double x[MOST], half[MOST], unbiased[MOST];
    golden_array(&c, "x", MOST, x);
    slow_whiten(2, NULL, x, half);
    slow_whiten_unbiased(4, NULL, true, x, unbiased);
    double right = golden_result(&c, "whitened", 0);
    told_by_golden("whitening by a shard's moments (15)", &c, "whitened", 0, half[0], right);
    told_by_golden("whitening with the unbiased variance (15)", &c, "whitened", 0, unbiased[0],
                   right);
    c = case_of("group_norm", "eps=1e-4");
    right = golden_result(&c, "advantage", 0);
    told_by_golden("a group's standard deviation as the population's", &c, "advantage", 0,
                   .625 / (sqrt(.171875) + 1e-4), right);
    told_by_golden("another library's eps", &c, "advantage", 0, .625 / (sqrt(.6875 / 3) + 1e-6),
                   right);
    /* the first observes 3: 3/6 - 1 is below -.2 */
    c = case_of("adaptive_kl", "target=6 n=256 horizon=1e4");
    told_by_golden("the controller without its clip", &c, "factor", 0, 1 - .5 * .0256,
                   golden_result(&c, "factor", 0));
    c = case_of("shaped_rewards", "kl_coef=.01 low=-10 high=10");
    told_by_golden("a score that is not clipped", &c, "rewards", 3, 12,
                   golden_result(&c, "rewards", 3));
    told_by_golden("KL added to the reward", &c, "rewards", 0, .001,
                   golden_result(&c, "rewards", 0));
}

/* A mean over no token is NaN, and no weight of 0 mends it (7). */
static void mistake_nan(void) {
    double none[TOKENS] = {0}, zero = 0, mean = zero / zero;
    slow_complex *z = slow_array(TOKENS);
    double right = creal(slow_sft_token_mean(&(slow_sequences){SEQUENCES, documents, none}, z));
    told_apart("the mean of an empty shard times 0 (7)", 0 * mean + .5, right + .5, .5, 0);
    free(z);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    test_state += test_seed;
    test_golden();
    test_reader();
    test_pair_slopes();
    test_divergence_slopes();
    test_primitives();
    test_extremes();
    test_token_slopes();
    test_distillation_slopes();
    test_kto_slopes();
    test_rm_slopes();
    test_kl_slopes();
    test_ppo_slopes();
    test_sequence_slopes();
    test_one_token_slopes();
    test_value_slopes();
    test_sft_slopes();
    test_moe_slopes();
    test_mix_slopes();
    test_from_logits();
    test_fixed_points();
    test_fixed_points_bitwise();
    test_divergence_fixed_points();
    test_other_fixed_points();
    test_pair_structure();
    test_pair_special();
    test_metrics();
    test_rm_identities();
    test_token_identities();
    test_logps();
    test_masked();
    test_packing();
    test_aggregate();
    test_distillation_identities();
    test_kl_identities();
    test_first_step();
    test_first_step_variants();
    test_first_rollout();
    test_value_identities();
    test_gae();
    test_gae_terminal();
    test_gae_packed();
    test_whitening();
    test_groups();
    test_reinforce_plus_plus();
    test_rewards();
    test_moe_identities();
    test_optimizers();
    mistake_means();
    mistake_pairs();
    mistake_local_lengths();
    mistake_kto();
    mistake_ppo();
    mistake_advantages();
    mistake_moments();
    mistake_nan();
    return test_summary();
}
