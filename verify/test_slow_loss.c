/* SPDX-License-Identifier: MIT OR Unlicense */
/*
 * test_slow_loss.c - checks slow_loss.h against what it cannot have copied from itself: the golden vectors, the
 * identities that hold whatever the values, the derivatives worked out by hand; and shows of well-known mistakes
 * that these checks tell them from the right thing.
 *
 * "Spec" numbers are the sections of the losses' specification, as in slow_loss.h.
 */
#include <float.h>

#include "golden.h"
#include "slow_loss.h"
#include "test.h"

enum { MOST = 16 };
static const double LN2 = 0.693147180559945309;
static const slow_ppo ppo_default = {.clip_low = .2, .clip_high = .2, .log_ratio_limit = HUGE_VAL};

/* Written so that a NaN fails. */
static void near(const char *what, double got, double want, double limit)
{
    test_expect(fabs(got - want) <= limit, "%s is %.17g, not %.17g within %.3g", what, got, want, limit);
}

static void same(const char *what, double got, double want)
{
    test_expect(got == want, "%s is %.17g, not bitwise %.17g", what, got, want);
}

static void all_near(const char *what, int64_t count, const double *got, const double *want, double limit)
{
    for (int64_t k = 0; k < count; k++)
        near(what, got[k], want[k], limit);
}

static void all_same(const char *what, int64_t count, const double *got, const double *want)
{
    for (int64_t k = 0; k < count; k++)
        same(what, got[k], want[k]);
}

static double uniform(double low, double high)
{
    return low + (high - low) * ((double)(test_random() >> 11) / 9007199254740992.0);
}

static void normals(int64_t count, double scale, double *x)
{
    for (int64_t k = 0; k < count; k++)
        x[k] = scale * test_normal();
}

/* ---- losses as functions of the numbers that their gradients flow through ---- */

typedef struct {
    slow_pair_loss *loss;
    slow_preference options;
    slow_pair pair;
} pair_problem;

/* x: chosen, rejected */
static slow_complex pair_scalar(const slow_complex *x, const void *context)
{
    const pair_problem *p = context;
    slow_pair pair = p->pair;
    pair.chosen = x[0];
    pair.rejected = x[1];
    return p->loss(&p->options, &pair);
}

typedef struct {
    double loss, dchosen, drejected;
} pair_result;

static pair_result pair_of(const pair_problem *p)
{
    double x[2] = {creal(p->pair.chosen), creal(p->pair.rejected)}, g[2];
    slow_gradient_of(pair_scalar, p, 2, x, g);
    return (pair_result){slow_value_of(pair_scalar, p, 2, x), g[0], g[1]};
}

typedef struct {
    double margin, center;
} rm_problem;

static slow_complex rm_scalar(const slow_complex *x, const void *context)
{
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

static slow_complex kto_scalar(const slow_complex *logp, const void *context)
{
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

static slow_complex token_scalar(const slow_complex *logits, const void *context)
{
    const token_problem *p = context;
    slow_objective o = {.smoothing = p->smoothing, .zloss = p->zloss, .count = 1};
    return slow_token_loss(&o, &(slow_row){.targets = &p->target}, 0, p->vocab, logits);
}

static slow_complex entropy_scalar(const slow_complex *logits, const void *context)
{
    const token_problem *p = context;
    return slow_token_of(p->vocab, logits, SLOW_IGNORED).entropy;
}

static slow_complex distillation(const slow_complex *logits, const token_problem *p, int kind)
{
    slow_complex *teacher = slow_promote(p->vocab, p->teacher);
    slow_complex loss = kind == 0 ? slow_kd_forward(p->vocab, logits, teacher)
        : kind == 1               ? slow_kd_reverse(p->vocab, logits, teacher)
                                  : slow_kd_jsd(p->beta, p->vocab, logits, teacher);
    free(teacher);
    return loss;
}

static slow_complex forward_scalar(const slow_complex *logits, const void *context)
{
    return distillation(logits, context, 0);
}

static slow_complex reverse_scalar(const slow_complex *logits, const void *context)
{
    return distillation(logits, context, 1);
}

static slow_complex jsd_scalar(const slow_complex *logits, const void *context)
{
    return distillation(logits, context, 2);
}

/* A packed row of policy tokens; advantages per token, or per sequence for losses of whole sequences. */
typedef struct {
    slow_ppo options;
    slow_sequences sequences;
    slow_aggregation mode;
    double max_length;
    const double *old_logp, *advantages;
} policy_problem;

static slow_complex policy_scalar(const slow_complex *logp, const void *context)
{
    const policy_problem *p = context;
    int64_t tokens = p->sequences.cu_seqlens[p->sequences.sequences];
    slow_complex *loss = slow_array(tokens);
    for (int64_t t = 0; t < tokens; t++)
        loss[t] = slow_ppo_policy(&p->options, logp[t], p->old_logp[t], p->advantages[t]);
    slow_complex mean = slow_aggregate(p->mode, &p->sequences, p->max_length, loss);
    free(loss);
    return mean;
}

static slow_complex reinforce_scalar(const slow_complex *logp, const void *context)
{
    const policy_problem *p = context;
    int64_t tokens = p->sequences.cu_seqlens[p->sequences.sequences];
    slow_complex *loss = slow_array(tokens);
    for (int64_t t = 0; t < tokens; t++)
        loss[t] = slow_reinforce(logp[t], p->advantages[t]);
    slow_complex mean = slow_aggregate(p->mode, &p->sequences, p->max_length, loss);
    free(loss);
    return mean;
}

static slow_complex gspo_scalar(const slow_complex *logp, const void *context)
{
    const policy_problem *p = context;
    return slow_gspo(&p->options, &p->sequences, logp, p->old_logp, p->advantages);
}

static slow_complex rloo_scalar(const slow_complex *logp, const void *context)
{
    const policy_problem *p = context;
    return slow_rloo_loss(&p->options, &p->sequences, logp, p->old_logp, p->advantages);
}

typedef struct {
    double tau, old_logp, advantage;
} one_token;

static slow_complex sapo_scalar(const slow_complex *logp, const void *context)
{
    const one_token *p = context;
    return slow_sapo(p->tau, logp[0], p->old_logp, p->advantage);
}

/* tau is the cap on the ratio */
static slow_complex cispo_scalar(const slow_complex *logp, const void *context)
{
    const one_token *p = context;
    return slow_cispo(p->tau, logp[0], p->old_logp, p->advantage);
}

typedef struct {
    int64_t count;
    double clip;
    const double *old_values, *returns;
} value_problem;

static slow_complex value_scalar(const slow_complex *values, const void *context)
{
    const value_problem *p = context;
    slow_complex sum = 0;
    for (int64_t t = 0; t < p->count; t++)
        sum += slow_value_loss(p->clip, values[t], p->old_values[t], p->returns[t]);
    return sum / (double)p->count;
}

static slow_complex k1_scalar(const slow_complex *d, const void *context)
{
    (void)context;
    return slow_k1(d[0]);
}

static slow_complex k2_scalar(const slow_complex *d, const void *context)
{
    (void)context;
    return slow_k2(d[0]);
}

static slow_complex k3_scalar(const slow_complex *d, const void *context)
{
    (void)context;
    return slow_k3(d[0]);
}

static double slope(slow_scalar *f, const void *context, double x)
{
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

static void give(results *r, const char *name, int64_t count, const double *value)
{
    r->field[r->fields].name = name;
    r->field[r->fields].count = (int)count;
    memcpy(r->field[r->fields++].value, value, (size_t)count * sizeof *value);
}

static void give_one(results *r, const char *name, double value)
{
    give(r, name, 1, &value);
}

static void give_gradient(results *r, const char *name, slow_scalar *f, const void *context, int count,
                          const double *x)
{
    double g[MOST];
    slow_gradient_of(f, context, count, x, g);
    give_one(r, "loss", slow_value_of(f, context, count, x));
    give(r, name, count, g);
}

static slow_divergence divergence_of(const golden_case *c)
{
    return golden_is(c, "divergence", "forward_kl") ? SLOW_FORWARD_KL
        : golden_is(c, "divergence", "js")          ? SLOW_JS
        : golden_is(c, "divergence", "alpha")       ? SLOW_ALPHA
                                                    : SLOW_REVERSE_KL;
}

static pair_problem pair_problem_of(const golden_case *c)
{
    slow_preference o = {.beta = golden_number(c, "beta", .1), .gamma = golden_number(c, "gamma", 0),
        .label_smoothing = golden_number(c, "label_smoothing", 0), .delta = golden_number(c, "delta", 0),
        .tau = golden_number(c, "tau", .05), .alpha = golden_number(c, "alpha", .5),
        .divergence = divergence_of(c)};
    slow_pair x = {golden_number(c, "chosen", NAN), golden_number(c, "rejected", NAN),
        golden_number(c, "ref_chosen", NAN), golden_number(c, "ref_rejected", NAN),
        golden_number(c, "chosen_length", NAN), golden_number(c, "rejected_length", NAN)};
    return (pair_problem){slow_pair_loss_named(c->objective), o, x};
}

static void run_pair(const golden_case *c, results *r)
{
    pair_problem p = pair_problem_of(c);
    pair_result y = pair_of(&p);
    give_one(r, "loss", y.loss);
    give_one(r, "dchosen", y.dchosen);
    give_one(r, "drejected", y.drejected);
    give_one(r, "log_odds", creal(slow_log_odds(&p.pair)));
}

static void run_ld_dpo(const golden_case *c, results *r)
{
    double w[MOST], l[MOST], alpha = golden_number(c, "alpha", 1);
    int n_w = golden_array(c, "chosen_logp", MOST, w), n_l = golden_array(c, "rejected_logp", MOST, l);
    slow_complex *chosen = slow_promote(n_w, w), *rejected = slow_promote(n_l, l);
    give_one(r, "chosen", creal(slow_ld_logp(n_w, n_l, alpha, chosen)));
    give_one(r, "rejected", creal(slow_ld_logp(n_l, n_w, alpha, rejected)));
    free(chosen);
    free(rejected);
}

static void run_rm(const golden_case *c, results *r)
{
    rm_problem p = {golden_number(c, "margin", 0), golden_number(c, "center", 0)};
    double x[2] = {golden_number(c, "chosen", NAN), golden_number(c, "rejected", NAN)}, g[2];
    slow_gradient_of(rm_scalar, &p, 2, x, g);
    give_one(r, "loss", slow_value_of(rm_scalar, &p, 2, x));
    give_one(r, "dchosen", g[0]);
    give_one(r, "drejected", g[1]);
}

/* Log-ratios are log-probabilities over a reference of 0. */
static kto_problem kto_problem_of(const golden_case *c, bool *desirable)
{
    static const double zeros[MOST];
    double flag[MOST], kl[MOST];
    int count = golden_array(c, "desirable", MOST, flag), kls = golden_array(c, "kl_log_ratio", MOST, kl);
    for (int i = 0; i < count; i++)
        desirable[i] = flag[i] != 0;
    slow_kto o = {golden_number(c, "beta", .01), golden_number(c, "desirable_weight", 1),
        golden_number(c, "undesirable_weight", 1)};
    return (kto_problem){o, count, desirable, zeros, slow_kto_kl(kls, kl, zeros)};
}

static void run_kto(const golden_case *c, results *r)
{
    bool desirable[MOST];
    double logp[MOST];
    kto_problem p = kto_problem_of(c, desirable);
    golden_array(c, "log_ratio", MOST, logp);
    give_one(r, "kl", p.kl);
    give_gradient(r, "dlogp", kto_scalar, &p, (int)p.count, logp);
}

static void run_logits(const golden_case *c, results *r)
{
    double x[MOST], teacher[MOST];
    token_problem p = {golden_array(c, "logits", MOST, x), (int32_t)golden_number(c, "target", SLOW_IGNORED),
        golden_number(c, "label_smoothing", 0), golden_number(c, "zloss", 0), golden_number(c, "beta", 0),
        teacher};
    bool distils = golden_array(c, "teacher_logits", MOST, teacher) > 0;
    slow_complex *z = slow_promote(p.vocab, x);
    slow_token y = slow_token_of(p.vocab, z, p.target);
    give_one(r, "lse", creal(y.lse));
    give_one(r, "entropy", creal(y.entropy));
    give_one(r, "value", creal(slow_log_sum_squares(p.vocab, z)));
    slow_scalar *f = !strcmp(c->objective, "token_loss") ? token_scalar
        : !strcmp(c->objective, "kd_forward")            ? forward_scalar
        : !strcmp(c->objective, "kd_reverse")            ? reverse_scalar
        : distils                                        ? jsd_scalar
                                                         : entropy_scalar;
    give_gradient(r, "dlogits", f, &p, (int)p.vocab, x);
    free(z);
}

static void run_kl(const golden_case *c, results *r)
{
    double d = golden_number(c, "d", NAN);
    give_one(r, "k1", creal(slow_k1(d)));
    give_one(r, "k2", creal(slow_k2(d)));
    give_one(r, "k3", creal(slow_k3(d)));
    give_one(r, "dk3", slope(k3_scalar, NULL, d));
}

static slow_ppo ppo_of(const golden_case *c)
{
    return (slow_ppo){golden_number(c, "clip_low", .2), golden_number(c, "clip_high", .2),
        golden_number(c, "dual_clip", 0), HUGE_VAL};
}

static void run_ppo(const golden_case *c, results *r)
{
    double logp[MOST], old_logp[MOST], advantages[MOST], ratios[MOST], clipped = 0;
    int64_t n = golden_array(c, "logp", MOST, logp), cu_seqlens[2] = {0, n};
    golden_array(c, "old_logp", MOST, old_logp);
    golden_array(c, "advantages", MOST, advantages);
    policy_problem p = {ppo_of(c), {1, cu_seqlens, NULL}, SLOW_TOKEN_MEAN, 0, old_logp, advantages};
    for (int64_t t = 0; t < n; t++) {
        ratios[t] = creal(slow_ratio(&p.options, logp[t], old_logp[t]));
        clipped += slow_clipped(&p.options, logp[t], old_logp[t], advantages[t]);
    }
    give(r, "ratios", n, ratios);
    give_one(r, "clipfrac", clipped / (double)n);
    give_gradient(r, "dlogp", policy_scalar, &p, (int)n, logp);
}

static void run_gspo(const golden_case *c, results *r)
{
    double logp[MOST], old_logp[MOST], advantage = golden_number(c, "advantage", NAN);
    int64_t n = golden_array(c, "logp", MOST, logp), cu_seqlens[2] = {0, n};
    golden_array(c, "old_logp", MOST, old_logp);
    policy_problem p = {ppo_of(c), {1, cu_seqlens, NULL}, SLOW_TOKEN_MEAN, 0, old_logp, &advantage};
    slow_complex *z = slow_promote(n, logp);
    give_one(r, "ratio", exp(creal(slow_mean_log_ratio(&p.sequences, 0, z, old_logp))));
    give_gradient(r, "dlogp", gspo_scalar, &p, (int)n, logp);
    free(z);
}

static void run_sapo(const golden_case *c, results *r)
{
    one_token p = {golden_number(c, "tau", 1), 0, golden_number(c, "advantage", NAN)};
    double logp = log(golden_number(c, "ratio", NAN));
    give_gradient(r, "dlogp", sapo_scalar, &p, 1, &logp);
}

static void run_vespo(const golden_case *c, results *r)
{
    give_one(r, "weight", slow_vespo_weight(golden_number(c, "ratio", NAN), golden_number(c, "advantage", NAN)));
}

static void run_value(const golden_case *c, results *r)
{
    double values[MOST], old_values[MOST], returns[MOST];
    value_problem p = {golden_array(c, "values", MOST, values), golden_number(c, "clip", HUGE_VAL), old_values,
        returns};
    golden_array(c, "old_values", MOST, old_values);
    golden_array(c, "returns", MOST, returns);
    give_gradient(r, "dvalues", value_scalar, &p, (int)p.count, values);
}

static void run_gae(const golden_case *c, results *r)
{
    double rewards[MOST], values[MOST], advantages[MOST], returns[MOST];
    int64_t n = golden_array(c, "rewards", MOST, rewards), cu_seqlens[2] = {0, n};
    golden_array(c, "values", MOST, values);
    slow_gae(&(slow_sequences){1, cu_seqlens, NULL}, golden_number(c, "gamma", 1), golden_number(c, "lambda", 1),
        rewards, values, advantages, returns);
    give(r, "advantages", n, advantages);
    give(r, "returns", n, returns);
}

static void run_whiten(const golden_case *c, results *r)
{
    double x[MOST], y[MOST];
    int64_t n = golden_array(c, "x", MOST, x);
    if (!strcmp(c->objective, "whiten"))
        slow_whiten(n, NULL, x, y);
    else
        slow_whiten_unbiased(n, NULL, true, x, y);
    give(r, "whitened", n, y);
}

static void shape_group(const golden_case *c, const char *estimator, int n, const double *reward,
                        double *advantage)
{
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

static void run_group(const golden_case *c, results *r)
{
    double reward[MOST], advantage[MOST];
    int n = golden_array(c, "reward", MOST, reward);
    shape_group(c, c->objective, n, reward, advantage);
    give(r, "advantage", n, advantage);
}

static slow_aggregation mode_of(const golden_case *c)
{
    return golden_is(c, "aggregation", "token_mean")         ? SLOW_TOKEN_MEAN
        : golden_is(c, "aggregation", "seq_mean_token_mean") ? SLOW_SEQ_MEAN_TOKEN_MEAN
        : golden_is(c, "aggregation", "seq_mean_token_sum")  ? SLOW_SEQ_MEAN_TOKEN_SUM
                                                             : SLOW_SEQ_MEAN_TOKEN_SUM_NORM;
}

/* Offsets of documents of these lengths. */
static int lengths_of(const golden_case *c, int64_t *cu_seqlens)
{
    double length[MOST];
    int n = golden_array(c, "length", MOST, length);
    cu_seqlens[0] = 0;
    for (int i = 0; i < n; i++)
        cu_seqlens[i + 1] = cu_seqlens[i] + (int64_t)length[i];
    return n;
}

static void run_first_step(const golden_case *c, results *r)
{
    static const double zeros[MOST];
    double reward[MOST], advantage[MOST], advantages[MOST];
    int64_t cu_seqlens[MOST], n = lengths_of(c, cu_seqlens);
    bool norm = golden_is(c, "estimator", "group_norm");
    golden_array(c, "reward", MOST, reward);
    shape_group(c, norm ? "group_norm" : "group_baseline", (int)n, reward, advantage);
    policy_problem p = {ppo_default, {n, cu_seqlens, NULL}, mode_of(c), golden_number(c, "max_length", 0), zeros,
        advantages};
    slow_spread(&p.sequences, advantage, advantages);
    give_one(r, "loss", slow_value_of(policy_scalar, &p, cu_seqlens[n], zeros));
}

static void run_shaped(const golden_case *c, results *r)
{
    double kl[MOST], rewards[MOST], score = golden_number(c, "score", NAN);
    int64_t n = golden_array(c, "kl", MOST, kl), cu_seqlens[2] = {0, n};
    slow_shaped_rewards(&(slow_sequences){1, cu_seqlens, NULL}, golden_number(c, "kl_coef", 0), kl, &score,
        golden_number(c, "low", -10), golden_number(c, "high", 10), rewards);
    give(r, "rewards", n, rewards);
}

static void run_weighted_kl(const golden_case *c, results *r)
{
    double kl[MOST], length[MOST];
    int n = golden_array(c, "kl", MOST, kl);
    golden_array(c, "length", MOST, length);
    give_one(r, "value", slow_weighted_mean(n, kl, length));
}

static void run_adaptive_kl(const golden_case *c, results *r)
{
    give_one(r, "factor", slow_adaptive_kl(1, golden_number(c, "observed", NAN), golden_number(c, "target", NAN),
        golden_number(c, "n", NAN), golden_number(c, "horizon", 1e4)));
}

static void run_overlong(const golden_case *c, results *r)
{
    give_one(r, "penalty", slow_overlong_penalty(golden_number(c, "length", NAN),
        golden_number(c, "max_new", NAN), golden_number(c, "buffer", NAN), golden_number(c, "factor", NAN)));
}

static void run_aggregate(const golden_case *c, results *r)
{
    double x[MOST];
    int64_t cu_seqlens[MOST], n = lengths_of(c, cu_seqlens);
    slow_complex *loss = slow_promote(golden_array(c, "losses", MOST, x), x);
    slow_sequences s = {n, cu_seqlens, NULL};
    give_one(r, "loss", creal(slow_aggregate(mode_of(c), &s, golden_number(c, "max_length", 0), loss)));
    free(loss);
}

/* The mean of the masked from `low` up to `high`; none is a mean of 0, the mistake's own guard. */
static double local_mean(const double *x, const double *mask, int64_t low, int64_t high)
{
    double sum = 0, count = 0;
    for (int64_t t = low; t < high; t++) {
        sum += mask[t] * x[t];
        count += mask[t];
    }
    return count > 0 ? sum / count : 0;
}

/* Mean of the means of pieces: of the given lengths, or of as many equal pieces as there are shards. */
static double mean_of_means(const golden_case *c, int64_t n, const double *x, const double *mask)
{
    int64_t cut[MOST], pieces = lengths_of(c, cut);
    double sum = 0;
    if (!pieces)
        pieces = (int64_t)golden_number(c, "shards", 1);
    for (int64_t k = 0; k < pieces; k++)
        sum += golden_text(c, "length") ? local_mean(x, mask, cut[k], cut[k + 1])
                                        : local_mean(x, mask, k * n / pieces, (k + 1) * n / pieces);
    return sum / (double)pieces;
}

/* Labels shifted inside each shard: the last position of each has lost its target. */
static double shift_in_shard(int64_t n, int64_t shards, const double *x, const double *mask)
{
    double sum = 0;
    for (int64_t k = 0; k < shards; k++)
        sum += local_mean(x, mask, k * n / shards, (k + 1) * n / shards - 1);
    return sum / (double)shards;
}

static void run_token_mean(const golden_case *c, results *r)
{
    double nll[MOST], mask[MOST], logp[MOST];
    int64_t n = golden_array(c, "nll", MOST, nll), cu_seqlens[2] = {0, n};
    golden_array(c, "mask", MOST, mask);
    for (int64_t t = 0; t < n; t++)
        logp[t] = -nll[t];
    slow_complex *z = slow_promote(n, logp);
    give_one(r, "loss", creal(slow_sft_token_mean(&(slow_sequences){1, cu_seqlens, mask}, z)));
    give_one(r, "mean_of_means", mean_of_means(c, n, nll, mask));
    give_one(r, "shift_in_shard", shift_in_shard(n, (int64_t)golden_number(c, "shards", 1), nll, mask));
    free(z);
}

static void run_moe(const golden_case *c, results *r)
{
    double router[MOST], sum = 0;
    int64_t experts = (int64_t)golden_number(c, "experts", 1), k = (int64_t)golden_number(c, "k", 1);
    int64_t shards = (int64_t)golden_number(c, "shards", 1);
    int64_t tokens = golden_array(c, "router", MOST, router) / experts, part = tokens / shards;
    slow_complex *p = slow_promote(tokens * experts, router);
    for (int64_t i = 0; i < shards; i++)
        sum += creal(slow_moe_balance(part, experts, k, p + i * part * experts));
    give_one(r, "loss", creal(slow_moe_balance(tokens, experts, k, p)));
    give_one(r, "mean_of_means", sum / (double)shards);
    free(p);
}

/* DeepSpeed: stage 1 and 2 pad all tensors end to end to align * ranks; stage 3 cuts each by itself. */
static void run_zero(const golden_case *c, results *r)
{
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

static void run_clip(const golden_case *c, results *r)
{
    double g[MOST], most = golden_number(c, "max_norm", 1);
    int n = golden_array(c, "gradient", MOST, g);
    double factor = fmin(1, most / slow_norm(n, g));
    if (!strcmp(c->objective, "clip_grad"))
        slow_clip(n, most, g);
    else
        for (int k = 0; k < n; k++)
            g[k] *= factor;
    give(r, "clipped", n, g);
}

typedef void optimizer(const slow_adamw *a, double lr, int64_t t, int64_t count, const double *g, double *m,
                       double *v, double *theta);

static optimizer *optimizer_of(const char *name)
{
    return !strcmp(name, "adamw")               ? slow_adamw_step
        : !strcmp(name, "adamw_tf1")            ? slow_adamw_tf1_step
        : !strcmp(name, "adamw_decay_after")    ? slow_adamw_decay_after_step
                                                : slow_adam_l2_step;
}

static void run_optimizer(const golden_case *c, results *r)
{
    double g[MOST], after[MOST], m = 0, v = 0, theta = golden_number(c, "theta", NAN);
    int steps = golden_array(c, "gradient", MOST, g);
    slow_adamw a = {golden_number(c, "beta1", .9), golden_number(c, "beta2", .999), golden_number(c, "eps", 1e-8),
        golden_number(c, "weight_decay", 0)};
    for (int t = 0; t < steps; t++) {
        optimizer_of(c->objective)(&a, golden_number(c, "lr", NAN), t + 1, 1, &g[t], &m, &v, &theta);
        after[t] = theta;
    }
    give(r, "theta", steps, after);
    give_one(r, "last_theta", theta);
    give_one(r, "m", m);
    give_one(r, "v", v);
}

static void run_schedule(const golden_case *c, results *r)
{
    double step[MOST], factor[MOST];
    int n = golden_array(c, "step", MOST, step);
    slow_schedule s = {!strcmp(c->objective, "schedule_linear") ? SLOW_LINEAR
            : !strcmp(c->objective, "schedule_cosine")          ? SLOW_COSINE
                                                                : SLOW_COSINE_WITH_MIN_LR,
        (int64_t)golden_number(c, "warmup", 0), (int64_t)golden_number(c, "total", 0),
        golden_number(c, "min_lr_rate", 0)};
    for (int k = 0; k < n; k++)
        factor[k] = slow_schedule_factor(&s, (int64_t)step[k]);
    give(r, "factor", n, factor);
}

typedef void runner(const golden_case *c, results *r);

static const struct {
    const char *objective;
    runner *run;
} runners[] = {
    {"ld_dpo", run_ld_dpo}, {"rm_sigmoid", run_rm}, {"kto", run_kto}, {"token_loss", run_logits},
    {"entropy", run_logits}, {"log_sum_squares", run_logits}, {"kd_forward", run_logits},
    {"kd_reverse", run_logits}, {"kd_jsd", run_logits}, {"kl_estimators", run_kl}, {"ppo_policy", run_ppo},
    {"gspo", run_gspo}, {"sapo", run_sapo}, {"vespo_weight", run_vespo}, {"value_loss", run_value},
    {"gae", run_gae}, {"whiten", run_whiten}, {"whiten_unbiased", run_whiten}, {"group_norm", run_group},
    {"rloo", run_group}, {"group_baseline", run_group}, {"opo", run_group}, {"first_step", run_first_step},
    {"shaped_rewards", run_shaped}, {"weighted_kl", run_weighted_kl}, {"adaptive_kl", run_adaptive_kl},
    {"overlong_penalty", run_overlong}, {"aggregate", run_aggregate}, {"token_mean", run_token_mean},
    {"moe_balance", run_moe}, {"zero_partition", run_zero}, {"clip_grad", run_clip},
    {"clip_grad_exact", run_clip}, {"adamw", run_optimizer}, {"adamw_tf1", run_optimizer},
    {"adamw_decay_after", run_optimizer}, {"adam_l2", run_optimizer}, {"schedule_linear", run_schedule},
    {"schedule_cosine", run_schedule}, {"schedule_cosine_with_min_lr", run_schedule}, {NULL, NULL},
};

static runner *runner_of(const char *objective)
{
    int k = 0;
    if (slow_pair_loss_named(objective))
        return run_pair;
    while (runners[k].objective && strcmp(runners[k].objective, objective))
        k++;
    return runners[k].run;
}

/*
 * What the arithmetic may add to half a printed unit: one rounding of numbers of the size of 1, or of d where a
 * small d makes everything small; two for exact values.
 */
static double rounding(const golden_case *c, double value, double limit)
{
    double size = fmax(fabs(value), fmin(1, fabs(golden_number(c, "d", 1))));
    return DBL_EPSILON * size * (limit > 0 ? 1 : 2);
}

/* Is every value of the field as expected?  A field that the runner did not give is not. */
static void compare(const golden_case *c, const results *r, const char *name)
{
    double want[MOST], limit[MOST];
    int count = golden_expected(c, name, MOST, want, limit), f = 0;
    while (f < r->fields && strcmp(r->field[f].name, name))
        f++;
    if (!test_expect(count > 0 && f < r->fields, "%s cannot be read or is not computed", name))
        return;
    test_expect(count <= r->field[f].count, "%s has %d values, not %d", name, r->field[f].count, count);
    for (int k = 0; k < count && k < r->field[f].count; k++)
        near(name, r->field[f].value[k], want[k], limit[k] + rounding(c, want[k], limit[k]));
}

static int golden_numbers; /* how many expected numbers have been compared */

static void check_case(const golden_case *c, void *context)
{
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

static void test_golden(void)
{
    int cases = golden_each(GOLDEN_PATH, check_case, NULL);
    test_expect(cases == 89, "%d golden cases, not 89", cases);
    test_expect(golden_numbers == 290, "%d golden numbers, not 290", golden_numbers);
    test_end("all golden cases were there");
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    test_state += test_seed;
    test_golden();
    return test_summary();
}
