/* SPDX-License-Identifier: MIT OR Unlicense */
/* slow_loss.h's derivatives: those worked out by hand against complex step. */
#include "support/loss_functions.h"

/* ---- derivatives worked out by hand, against complex step ---- */

static double sigma(double x) { return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)); }

static double dsigma(double x) { return sigma(x) * sigma(-x); }

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

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_pair_slopes());
    TEST(test_divergence_slopes());
    TEST(test_primitives());
    TEST(test_extremes());
    TEST(test_token_slopes());
    TEST(test_distillation_slopes());
    TEST(test_kto_slopes());
    TEST(test_rm_slopes());
    TEST(test_kl_slopes());
    TEST(test_ppo_slopes());
    TEST(test_sequence_slopes());
    TEST(test_one_token_slopes());
    TEST(test_value_slopes());
    TEST(test_sft_slopes());
    TEST(test_moe_slopes());
    TEST(test_mix_slopes());
    TEST(test_from_logits());
    return test_summary();
}
