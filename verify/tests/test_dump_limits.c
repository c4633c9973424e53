/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver`: how far a loss may be off. Frameworks are imitated that compute in
   float32 and in bfloat16, in their own order, and are never accused; a mistake is seen though
   it changes little, and both sides of the limit are asked. */
#define FOLDER "build/test_dump_limits.d"
#include "oracle/dump/roundings.h"
#include "support/dump_support.h"

static double as_bf16(double x) {
    uint32_t bits = (uint32_t)bf16(x) << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static void begin_seed(const char *objective, int seed) {
    begin(objective, 3, 2, 2);
    test_state += (uint64_t)seed * 977;
    deal(SEQPAR_LAYOUT_ZIGZAG);
}

/* Log-probs about `middle`; all others of a scene as they are. */
static void set_logp(double middle, double spread) {
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) s.of[dp][a].logp[t] = middle + spread * test_normal();
    set_loss(right_loss());
}

/* Equal numbers of 16 bits are rounded alike, wherever they stand; those of 32 bits are not. */
static void test_sum_squares(void) {
    double x[] = {3, -2, 3, 1, -2, 3}, y[] = {3, -2, 3, 1, -2, 3};
    double narrow = sum_squares(x, 6, UNIT_BF16), wide = sum_squares(y, 6, UNIT_F32);
    test_expect(narrow == (81 + 16 + 1) * UNIT_BF16 * UNIT_BF16, "%g of equal ones added",
                narrow / UNIT_BF16 / UNIT_BF16);
    test_expect(wide == (27 + 8 + 1) * UNIT_F32 * UNIT_F32, "%g of each apart",
                wide / UNIT_F32 / UNIT_F32);
    test_end("limits_sum_of_squares");
}

/* ---- frameworks that are right ---- */

/* What ranks' micro-batches hold of the sum of losses, in float32 from their last token to
   their first; count: of the step. */
static int64_t float_shares(float *share, double noise, double *count) {
    int64_t parts = 0;
    *count = 0;
    for (int64_t r = 0; r < s.world; r++)
        for (int64_t a = 0; a < s.micro; a++, parts++) {
            const row *w = &s.of[r / s.sp][a];
            share[parts] = 0;
            for (int64_t i = s.held[r % s.sp] - 1; i >= 0; i--) {
                int64_t t = s.index[r % s.sp][i];
                if (w->labels[t] == NONE) continue;
                share[parts] -= (float)(w->logp[t] + noise * (2 * (t % 2) - 1));
                ++*count;
            }
        }
    return parts;
}

static double loss_in_float32(double noise) {
    float share[RANKS * MICRO], sum = 0;
    double count;
    int64_t parts = float_shares(share, noise, &count);
    for (int64_t i = 0; i < parts; i++) sum += share[i];
    return sum / (float)count;
}

/* Every share is rounded to bfloat16, and their sum after each addition. */
static double loss_in_bf16(void) {
    float share[RANKS * MICRO];
    double count, sum = 0;
    int64_t parts = float_shares(share, 0, &count);
    for (int64_t i = 0; i < parts; i++) sum = as_bf16(sum + as_bf16(share[i] / count));
    return sum;
}

static void never_accused(const char *what, int seed) {
    int code;
    write_scene();
    code = ask(said, sizeof said);
    test_expect((code == 0 && !strncmp(said, "right: ", 7)) || code == 4,
                "%s, seed %d: exit code %d, said '%.500s'", what, seed, code, said);
}

static void test_float32(void) {
    for (int seed = 0; seed < 8; seed++) {
        begin_seed("sft", seed);
        fill();
        set_logp(-2, seed % 2 ? 1.1 : 0.01);
        s.dtype = s.loss_dtype = SEQPAR_SAFETENSORS_F32;
        set_loss(loss_in_float32(0));
        never_accused("float32", seed);
        set_loss(loss_in_float32(30 * 0x1p-23)); /* logits of 30, off by a bit */
        never_accused("float32 in another order", seed);
    }
    test_end("limits_float32_in_any_order");
}

static void test_bf16_numbers(void) {
    static const double middle[] = {-10.375, -2, -0.4}, spread[] = {0.02, 1.1, 0.3};
    for (int seed = 0; seed < 9; seed++) {
        begin_seed("sft", seed);
        fill();
        set_logp(middle[seed % 3], spread[seed % 3]);
        s.dtype = SEQPAR_SAFETENSORS_BF16;
        never_accused("logp of bfloat16", seed);
        EACH_ROW(dp, a)
        for (int64_t t = 0; t < TOKENS; t++) s.of[dp][a].logp[t] = as_bf16(s.of[dp][a].logp[t]);
        s.dtype = SEQPAR_SAFETENSORS_F32; /* they were of 16 bits before */
        never_accused("logp of bfloat16 in float32", seed);
        test_expect(strstr(said, "rounding to 16 bits") != NULL, "'%.500s'", said);
    }
    test_end("limits_bf16_numbers");
}

static void test_bf16_loss(void) {
    for (int seed = 0; seed < 16; seed++) {
        begin_seed("sft", seed);
        fill();
        set_logp(-2, 1.1);
        set_loss(loss_in_bf16());
        s.loss_dtype = seed % 2 ? SEQPAR_SAFETENSORS_BF16 : SEQPAR_SAFETENSORS_F32;
        never_accused("a loss of bfloat16", seed);
    }
    set_loss(as_bf16(right_loss() * 1.09)); /* beyond any sum of 12 in bfloat16 */
    expect(1, "wrong: unknown", "rounding to 16 bits");
    test_end("limits_bf16_loss");
}

static void test_pairs_in_16_bits(void) {
    static const char *const objectives[] = {"dpo", "kto", "ppo", "rm"};
    for (int i = 0; i < 12; i++) {
        begin_seed(objectives[i % 4], i);
        fill();
        EACH_ROW(dp, a)
        for (int64_t t = 0; t < TOKENS && i < 4; t++) /* nearly uniform, as at the start */
            s.of[dp][a].logp[t] -= 8;
        set_loss(i % 3 ? right_loss() : as_bf16(right_loss()));
        s.dtype = i % 2 ? SEQPAR_SAFETENSORS_BF16 : SEQPAR_SAFETENSORS_F16;
        never_accused(objectives[i % 4], i);
    }
    test_end("limits_16_bits_of_every_objective");
}

/* ---- mistakes that change little ---- */

/* Sums and counts of micro-batches of replicas, or of ranks' micro-batches. */
static double mean_of_means(int by_rank) {
    double sum = 0, groups = 0;
    for (int64_t r = 0; r < s.world; r += by_rank ? 1 : s.sp)
        for (int64_t a = 0; a < s.micro; a++) {
            double own = 0, count = 0;
            for (int64_t t = 0; t < TOKENS; t++) {
                if (s.of[r / s.sp][a].labels[t] == NONE) continue;
                if (by_rank && s.member[t] != r % s.sp) continue;
                own -= s.of[r / s.sp][a].logp[t];
                count++;
            }
            sum += own / count;
            groups++;
        }
    return sum / groups;
}

static void test_similar_groups(void) {
    make_by("sft", "token");
    set_logp(-2, 8e-3);
    set_loss(mean_of_means(1));
    test_expect(fabs(s.loss[0] / right_loss() - 1) < 1e-3, "they are not similar");
    expect_named("mean_of_means", "groups are ranks' micro-batches");
    set_loss(mean_of_means(0));
    test_expect(fabs(s.loss[0] / right_loss() - 1) < 1e-3, "they are not similar");
    expect_named("mean_of_means", "groups are replicas' micro-batches");
    set_loss(right_loss());
    expect_right("similar_groups", "loss right: got");
    more_options = "--tolerance 0.001"; /* within which they are the same */
    expect(4, "insufficient", "a mean of means is the same here");
    more_options = "";
    s.loss_dtype = SEQPAR_SAFETENSORS_BF16; /* as they are in 16 bits */
    expect(4, "insufficient", "write the loss in float32");
    test_end("limits_similar_groups_within_the_tolerance");
}

/* ---- both sides of the limit ---- */

/* What the page says that a loss may be off by. */
static double limit_said(void) {
    const char *at = strstr(said, "(within ");
    return at ? strtod(at + strlen("(within "), NULL) : NAN;
}

static void test_sides(const char *objective) {
    double limit;
    make_by(objective, "token");
    expect_right("limit", "loss right: got");
    limit = limit_said();
    test_expect(limit > 0 && limit < 2e-5, "the limit is %g", limit);
    set_loss(right_loss() + 0.9 * limit);
    expect_right("below_its_limit", "loss right: got");
    set_loss(right_loss() - 1.1 * limit);
    expect(0, "marginal", "log-probs that were computed anew");
    test_end("limits_%s_beyond", objective);
    more_options = "--strict";
    expect(4, "insufficient", "loss marginal"); /* gradients are asked for, too */
    more_options = "--tolerance 0.01";
    set_loss(right_loss() + 30 * limit);
    write_scene();
    test_expect(ask(said, sizeof said) != 1, "'%.500s'", said);
    more_options = "";
    set_loss(right_loss() + 0.02);
    expect(1, "wrong: unknown", "log-probs that were computed anew");
    test_end("limits_%s_far_beyond", objective);
}

int main(int argc, char **argv) {
    static const char *const objectives[] = {"sft", "dpo", "rm", "kto", "ppo"};
    test_begin(argc, argv);
    TEST(test_sum_squares());
    TEST(test_float32());
    TEST(test_bf16_numbers());
    TEST(test_bf16_loss());
    TEST(test_pairs_in_16_bits());
    TEST(test_similar_groups());
    for (int i = 0; i < 5; i++) TEST(test_sides(objectives[i]));
    return test_summary();
}
