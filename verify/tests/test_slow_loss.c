/* SPDX-License-Identifier: MIT OR Unlicense */
/* slow_loss.h against golden vectors; and of well-known mistakes, that these vectors and the
   identities tell them from the right thing. "Spec" numbers are the sections of the losses'
   specification, as in slow_loss.h. */
#include <float.h>
#include "second/golden.h"
#include "support/loss_functions.h"

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
    TEST(test_golden());
    TEST(test_reader());
    TEST(mistake_means());
    TEST(mistake_pairs());
    TEST(mistake_local_lengths());
    TEST(mistake_kto());
    TEST(mistake_ppo());
    TEST(mistake_advantages());
    TEST(mistake_moments());
    TEST(mistake_nan());
    return test_summary();
}
