/* SPDX-License-Identifier: MIT OR Unlicense */
/* What holds of slow_loss.h whatever the values: fixed points, symmetries, first steps, what
   is masked or packed. */
#include <float.h>
#include "support/loss_functions.h"

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

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_fixed_points());
    TEST(test_fixed_points_bitwise());
    TEST(test_divergence_fixed_points());
    TEST(test_other_fixed_points());
    TEST(test_pair_structure());
    TEST(test_pair_special());
    TEST(test_metrics());
    TEST(test_rm_identities());
    TEST(test_token_identities());
    TEST(test_logps());
    TEST(test_masked());
    TEST(test_packing());
    TEST(test_aggregate());
    TEST(test_distillation_identities());
    TEST(test_kl_identities());
    TEST(test_first_step());
    TEST(test_first_step_variants());
    TEST(test_first_rollout());
    TEST(test_value_identities());
    TEST(test_gae());
    TEST(test_gae_terminal());
    TEST(test_gae_packed());
    TEST(test_whitening());
    TEST(test_groups());
    TEST(test_reinforce_plus_plus());
    TEST(test_rewards());
    TEST(test_moe_identities());
    TEST(test_optimizers());
    return test_summary();
}
