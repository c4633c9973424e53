/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on dumps of PPO with generalised advantages: right ones in every layout,
   golden numbers, and one with each mistake. Advantages are sums over all later tokens here. */
#define FOLDER "build/test_dump_gae.d"
#include "support/dump_support.h"

enum {
    WHOLE,
    PASSED_OVER,
    OWN,
    RESTARTED,
    RESTARTED_ALL,
    NO_VALUE,
    ACROSS,
    EVERY,
    LAST,
    AT_END,
    LOST,
    MASKED_VALUES,
    MASKED_INSIDE,
    MASKED_REWARDS,
    MASKED_BOTH,
    MASKED_RESTART
};
static const double gamma_ = 0.97, lambda = 0.9;

typedef struct chain {
    int64_t of[TOKENS + 1], count; /* the tokens that a recursion passes, in order */
} chain;

static int is_trained(const row *r, int64_t t) { return r->labels[t] != NONE; }

static chain chain_of(const row *r, int64_t d, int64_t from, int way) {
    chain c = {.count = 0};
    int64_t end = way == ACROSS ? last_of(r->docs - 1) : last_of(d);
    for (int64_t t = from; t <= end; t++) {
        if (way == OWN && s.member[t] != s.member[from]) continue;
        if ((way == OWN || way == PASSED_OVER) && !is_trained(r, t)) continue;
        c.of[c.count++] = t;
    }
    return c;
}

/* The last trained token of document d, of member m or of any (-1). */
static int64_t last_trained(const row *r, int64_t d, int64_t m) {
    int64_t best = -1;
    for (int64_t t = cu_seqlens[d]; t <= last_of(d); t++)
        if (is_trained(r, t) && (m < 0 || s.member[t] == m)) best = t;
    return best;
}

static double reward_at(const row *r, int64_t t, int way) {
    int64_t d = document_of(r, t), highest = 0;
    int masked = way == MASKED_REWARDS || way == MASKED_BOTH || way == AT_END;
    if (!is_trained(r, t) && !masked) return 0;
    if (way == AT_END || way == LOST) return t == last_of(d) ? r->rewards[d] : 0;
    if (s.with_token_rewards) return r->token_rewards[t];
    for (int64_t i = cu_seqlens[d]; i <= last_of(d); i++)
        if (is_trained(r, i) && s.member[i] > highest) highest = s.member[i];
    return last_trained(r, d,
                        way == EVERY  ? s.member[t]
                        : way == LAST ? highest
                                      : -1) == t
               ? r->rewards[d]
               : 0;
}

static double value_at(const row *r, int64_t t, int way) {
    int64_t last = last_trained(r, document_of(r, t), -1);
    int masked = way == MASKED_VALUES || way == MASKED_BOTH ||
                 (way == MASKED_INSIDE && t < last);
    return masked || is_trained(r, t) ? r->values[t] : 0;
}

/* The sum over later tokens of delta, each times gamma lambda once more than the one before. */
static double gae(const row *r, int64_t t, int way) {
    chain c = chain_of(r, document_of(r, t), t, way);
    double sum = 0, factor = 1;
    for (int64_t k = 0; k < c.count; k++) {
        int64_t at = c.of[k], next = k + 1 < c.count ? c.of[k + 1] : -1;
        int cut = next >= 0 && s.member[next] != s.member[at];
        double value = next >= 0 ? value_at(r, next, way) : 0;
        if (cut && (way == NO_VALUE || way == RESTARTED_ALL)) value = 0;
        sum += factor * (reward_at(r, at, way) + gamma_ * value - value_at(r, at, way));
        if (cut && (way == RESTARTED || way == RESTARTED_ALL)) break;
        if (way == MASKED_RESTART && next >= 0 && !is_trained(r, next)) break;
        factor *= gamma_ * lambda;
    }
    return sum;
}

static void set_gae(int way) {
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        row *r = &s.of[dp][a];
        if (document_of(r, t) == r->docs || !is_trained(r, t)) continue;
        r->advantages[t] = gae(r, t, way);
        r->returns[t] = r->advantages[t] + r->values[t];
    }
    set_loss(right_loss());
}

static void make_gae(int layout, int64_t sp, int64_t dp, int64_t micro) {
    begin("ppo", sp, dp, micro);
    s.advantage = "gae";
    s.with_values = 1;
    say("gamma", gamma_);
    say("gae_lambda", lambda);
    deal(layout);
    fill();
    EACH_ROW(d, a)
    for (int64_t t = 0; t < TOKENS; t++)
        s.of[d][a].token_rewards[t] = 0.1 * test_normal() + (t % 9 == 0);
    set_gae(WHOLE);
}

/* Whitens advantages over supervised tokens of all, ranks, ranks' rows or replicas. */
enum { ALL, RANK, RANK_MICRO, REPLICA };
static void whiten_gae(int how, int unbiased) {
    static double sum[RANKS * MICRO], squares[RANKS * MICRO], n[RANKS * MICRO];
    memset(sum, 0, sizeof sum);
    memset(squares, 0, sizeof squares);
    memset(n, 0, sizeof n);
    for (int turn = 0; turn < 3; turn++) EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        int64_t rank = dp * s.sp + s.member[t];
        int64_t g = how == ALL       ? 0
                    : how == RANK    ? rank
                    : how == REPLICA ? dp
                                     : rank * s.micro + a;
        double *x = &s.of[dp][a].advantages[t];
        if (!is_trained(&s.of[dp][a], t)) continue;
        if (turn == 0) sum[g] += *x;
        if (turn == 0) n[g]++;
        if (turn == 1) squares[g] += (*x - sum[g] / n[g]) * (*x - sum[g] / n[g]);
        if (turn == 2) *x = (*x - sum[g] / n[g]) / sqrt(squares[g] / (n[g] - unbiased));
    }
    set_loss(right_loss());
}

/* ---- right ones ---- */

static void test_right(void) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int64_t sp = 1; sp <= SP; sp++) {
            make_gae(layout, sp, 1 + (sp + layout) % 3, 1 + layout % 2);
            s.with_token_rewards = (int)(layout + sp) % 2;
            set_gae(WHOLE);
            if (s.world * s.micro == 1) /* whose loss has no other mean */
                expect(4, "insufficient", "rewards right: advantages of");
            else
                expect(0, "right", "rewards right: advantages of");
            test_end("gae_right_%s_P%lld", seqpar_layout_name(layout), (long long)sp);
        }
}

static void test_odd_but_right(void) {
    make_gae(SEQPAR_LAYOUT_ZIGZAG, 3, 2, 2);
    whiten_gae(ALL, 0);
    expect_right("gae_whitened", "whitened over all supervised tokens of the step");
    make_gae(SEQPAR_LAYOUT_ZIGZAG, 3, 2, 2);
    whiten_gae(ALL, 1);
    expect_right("gae_whitened_unbiased", "whitened over all supervised tokens of the step");
    make_gae(SEQPAR_LAYOUT_STRIPE, 3, 2, 2);
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t += 5) s.of[dp][a].labels[t] = NONE; /* observations */
    set_gae(WHOLE);
    expect_right("gae_with_observations", "what values and rewards give");
    set_gae(PASSED_OVER);
    expect_right("gae_passed_over", "tokens without a label are passed over: no mistake");
    make_gae(SEQPAR_LAYOUT_STRIPE, 3, 2, 2);
    for (int i = 0; i < 2; i++) {
        s.dtype = i ? SEQPAR_SAFETENSORS_BF16 : SEQPAR_SAFETENSORS_F32;
        expect_right(i ? "gae_of_BF16" : "gae_of_F32", "rewards right: advantages of");
    }
    make_gae(SEQPAR_LAYOUT_ZIGZAG, 3, 2, 2); /* what is not trained may be anything */
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        row *r = &s.of[dp][a];
        if (!is_trained(r, t)) r->values[t] = r->returns[t] = r->advantages[t] = NAN;
    }
    expect_right("gae_of_untrained_nan", "rewards right: advantages of");
    s.without = "returns";
    expect_right("gae_without_returns", "rewards right: advantages of");
    s.without = "values";
    expect_right("gae_without_values",
                 "rewards not judged: it takes index, cu_seqlens, labels, values, advantages, "
                 "and token_rewards or rewards");
    s.without = "cu_seqlens";
    expect_right("gae_without_documents", "rewards not judged: it takes");
}

/* Where no mistake of ranks would show, right numbers prove nothing; wrong ones are wrong. */
static void test_nothing_cut(void) {
    make_gae(SEQPAR_LAYOUT_ZIGZAG, 2, 1, 2);
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) s.of[dp][a].values[t] = 0;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++) s.of[dp][a].rewards[d] = 0;
    set_gae(WHOLE);
    expect(4, "insufficient", "no recursion that is cut between ranks would show");
    test_end("gae_nothing_cut");
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) s.of[dp][a].advantages[t] += 0.5;
    set_loss(right_loss());
    expect(1, "wrong: unknown", "rewards wrong: advantages");
    test_end("gae_nothing_cut_but_wrong");
}

/* Four tokens whose advantages and returns are known to many digits. */
static void test_golden(void) {
    static const double values[] = {0.3, 0.4, 0.1, 0.6}, rewards[] = {-0.01, 0.02, -0.005, 1.5};
    static const double A[] = {1.0029787768625, 0.974990725, 1.33545, 0.9};
    for (int off = 0; off < 2; off++) {
        row *r = &s.of[0][0];
        begin("ppo", 2, 1, 1);
        s.advantage = "gae";
        s.with_values = s.with_token_rewards = 1;
        say("gamma", 0.99);
        say("gae_lambda", 0.95);
        deal(SEQPAR_LAYOUT_STRIPE);
        fill();
        for (int64_t t = 0; t < TOKENS; t++) r->labels[t] = NONE;
        for (int64_t i = 0; i < 4; i++) {
            int64_t t = cu_seqlens[2] + 3 + i;
            r->labels[t] = r->ids[t + 1];
            r->values[t] = values[i];
            r->token_rewards[t] = rewards[i];
            r->advantages[t] = A[i] + 0.02 * (off && i == 1);
            r->returns[t] = A[i] + values[i];
        }
        set_loss(right_loss());
        expect(off ? 1 : 4, off ? "wrong: unknown" : "insufficient", /* equal counts */
               off ? "document 2 of micro-batch 0: 0.994990725, right 0.974990725"
                   : "what values and rewards give");
        test_end("gae_golden_%d", off);
    }
}

/* ---- mistakes ---- */

static void test_mistakes(void) {
    static const struct {
        int way, layout;
        const char *name, *how;
    } table[] = {{OWN, SEQPAR_LAYOUT_ZIGZAG, "one of gae_of_own_tokens, gae_restarted_at_cut",
                  "apart: several packed responses, of which a rank holds several pieces"},
                 {OWN, SEQPAR_LAYOUT_STRIPE, "gae_of_own_tokens", "rewards wrong: advantages"},
                 {RESTARTED, SEQPAR_LAYOUT_ZIGZAG, "gae_restarted_at_cut", "rewards wrong"},
                 {RESTARTED_ALL, SEQPAR_LAYOUT_STRIPE, "gae_restarted_at_cut",
                  "the value behind the cut is lost, too"},
                 {NO_VALUE, SEQPAR_LAYOUT_ZIGZAG, "value_lost_at_cut", "rewards wrong"},
                 {ACROSS, SEQPAR_LAYOUT_CONTIGUOUS, "gae_across_documents", "rewards wrong"},
                 {EVERY, SEQPAR_LAYOUT_ZIGZAG, "reward_on_every_rank", "rewards wrong"},
                 {LAST, SEQPAR_LAYOUT_ZIGZAG, "reward_on_wrong_rank", "rewards wrong"}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        for (int white = 0; white < 2; white++) {
            make_gae(table[i].layout, 3, 2, 2);
            set_gae(table[i].way);
            if (white) whiten_gae(ALL, (int)i % 2);
            expect_named(table[i].name, table[i].how);
        }
}

/* Tokens without a label inside of answers and behind them: what a tool says, padding. */
static void test_masked(void) {
    static const struct {
        int way, tokens; /* tokens: they have rewards of their own */
        const char *name, *how;
    } table[] = {
        {AT_END, 0, "reward_on_masked_token", "the document's last token has it"},
        {LOST, 0, "reward_on_masked_token", "and a mask removes it"},
        {MASKED_VALUES, 0, "gae_over_masked_tokens", "their values enter"},
        {MASKED_INSIDE, 0, "gae_over_masked_tokens", "up to the last token with a label"},
        {MASKED_REWARDS, 1, "gae_over_masked_tokens", "their rewards enter"},
        {MASKED_BOTH, 1, "gae_over_masked_tokens", "their values and rewards enter"},
        {MASKED_RESTART, 0, "gae_restarted_at_mask", "rewards wrong: advantages"}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        for (int64_t sp = 1; sp <= 3; sp += 2) {
            make_gae(SEQPAR_LAYOUT_ZIGZAG, sp, 2, 2);
            s.with_token_rewards = table[i].tokens;
            EACH_ROW(dp, a)
            for (int64_t d = 0; d < s.of[dp][a].docs; d++) {
                s.of[dp][a].labels[last_of(d) - 1] = NONE;
                s.of[dp][a].labels[cu_seqlens[d] + (last_of(d) - cu_seqlens[d]) / 2] = NONE;
            }
            set_gae(WHOLE);
            expect_right("gae_of_masked", "rewards right: advantages of");
            set_gae(table[i].way);
            expect_named(table[i].name, table[i].how);
        }
}

static void test_whitening(void) {
    static const int hows[] = {RANK, RANK_MICRO, REPLICA};
    static const char *const texts[] = {"over the tokens of each rank",
                                        "over the tokens of each rank's micro-batch",
                                        "over the tokens of each replica"};
    for (int i = 0; i < 6; i++) {
        make_gae(SEQPAR_LAYOUT_ZIGZAG, 3, 2, 2);
        whiten_gae(hows[i / 2], i % 2);
        expect_named("whitened_by_rank", texts[i / 2]);
    }
}

static void test_returns(void) {
    make_gae(SEQPAR_LAYOUT_ZIGZAG, 3, 2, 2);
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        row *r = &s.of[dp][a];
        if (document_of(r, t) < r->docs && is_trained(r, t))
            r->returns[t] = gae(r, t, NO_VALUE) + r->values[t];
    }
    expect_named("value_lost_at_cut", "returns, first at rank");
    set_gae(WHOLE);
    s.of[1][1].returns[31] += 0.2;
    expect_named("unknown", "token 31, document 2 of micro-batch 1");
    set_gae(WHOLE);
    s.of[1][1].advantages[31] = NAN;
    set_loss(1);
    expect_named("unknown", "rewards wrong: advantages, first at rank");
}

static void test_shows_nothing(void) {
    make_gae(SEQPAR_LAYOUT_ZIGZAG, 3, 2, 2);
    EACH_ROW(dp, a) {
        memset(s.of[dp][a].values, 0, sizeof s.of[dp][a].values);
        memset(s.of[dp][a].rewards, 0, sizeof s.of[dp][a].rewards);
    }
    set_gae(WHOLE);
    expect(4, "insufficient", "no recursion that is cut between ranks would show");
    test_end("gae_of_zeros");
    make_gae(SEQPAR_LAYOUT_ZIGZAG, 3, 2, 2);
    s.of[0][0].values[2] = NAN;
    expect(4, "insufficient", "a value or a reward is NaN or Inf already");
    test_end("gae_of_nan");
}

/* ---- both sides of the limits ---- */

/* The root of the mean square of right ones, over all trained tokens. */
static double usual_size(int returns) {
    double squares = 0, n = 0;
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        const row *r = &s.of[dp][a];
        double x = returns ? r->returns[t] : r->advantages[t];
        if (document_of(r, t) == r->docs || !is_trained(r, t)) continue;
        squares += x * x;
        n++;
    }
    return sqrt(squares / n);
}

/* One token is off: by the tolerance, the unit of its type, what values of 16 bits leave. */
static void test_limits(void) {
    static const struct {
        const char *rough;
        int returns;
        double of_number, of_largest, below, above;
    } table[] = {{NULL, 0, 1e-3, 0, 0.99, 1.01},
                 {NULL, 1, 1e-3, 0, 0.99, 1.01},
                 {"advantages", 0, 1e-3 + 0x1p-7, 0, 0.7, 1.3},
                 {"returns", 1, 1e-3 + 0x1p-7, 0, 0.7, 1.3},
                 {"values", 0, 1e-3, 4 * 0x1p-8, 0.9, 1.1}};
    for (size_t i = 0; i < 2 * sizeof table / sizeof *table; i++) {
        row *r = &s.of[1][1];
        double *x, limit;
        make_gae(SEQPAR_LAYOUT_ZIGZAG, 3, 2, 2);
        s.rough = table[i / 2].rough;
        if (table[i / 2].of_largest > 0) r->values[cu_seqlens[2] + 2] = 64; /* the largest */
        set_gae(WHOLE);
        x = (table[i / 2].returns ? r->returns : r->advantages) + 31;
        limit = table[i / 2].of_number * fabs(*x) + table[i / 2].of_largest * 64 +
                1e-4 * usual_size(table[i / 2].returns);
        if (!table[i / 2].returns) s.without = "returns";
        *x += limit * (i % 2 ? table[i / 2].above : table[i / 2].below);
        set_loss(right_loss());
        expect(i % 2, i % 2 ? "wrong: unknown" : "right", "document 2" + (i % 2 ? 0 : 8));
        test_end("gae_limit_%zu_%s", i / 2, i % 2 ? "above" : "below");
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_right());
    TEST(test_odd_but_right());
    TEST(test_nothing_cut());
    TEST(test_golden());
    TEST(test_mistakes());
    TEST(test_masked());
    TEST(test_whitening());
    TEST(test_returns());
    TEST(test_shows_nothing());
    TEST(test_limits());
    return test_summary();
}
