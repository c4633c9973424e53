/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify on_policy`: its figures against sums made here, its limits from both sides, and
   the mistakes that it names. */
#define FOLDER "build/test_dump_on_policy.d"
#include "support/dump_support.h"

/* The limits of on_policy.h, of float32. */
#define F32        0x1p-24
#define MEAN_MOST  (2 * sqrt(2) * 3.5e-6)
#define WORST_MOST (2 * sqrt(2) * 2.2e-5)

static int is_supervised(const row *r, int64_t t) { return r->labels[t] != NONE; }

/* All supervised tokens, row by row. */
#define EACH_TOKEN(r_, t_) \
    EACH_ROW(dp_, a_) \
    for (row *r_ = &s.of[dp_][a_], *once_ = r_; once_; once_ = NULL) \
        for (int64_t t_ = 0; t_ < TOKENS; t_++) \
            if (is_supervised(r_, t_))

static void make_equal(int layout, int64_t sp) {
    make("ppo", layout, sp, 2, 2);
    EACH_ROW(dp, a)
    memcpy(s.of[dp][a].old_logp, s.of[dp][a].logp, sizeof s.of[dp][a].logp);
}

static int64_t supervised(void) {
    int64_t n = 0;
    EACH_TOKEN(r, t) n++;
    return n;
}

/* ---- equal ---- */

static void test_right(int layout, int64_t sp) {
    char text[80];
    make_equal(layout, sp);
    snprintf(text, sizeof text, "%lld of %lld supervised tokens have logp = old_logp",
             (long long)supervised(), (long long)supervised());
    more_options = "--strict";
    expect(0, "right", text);
    test_expect(strstr(said, "mean 1, worst 1; 0 of ") && strstr(said, "k1 0, k3 0 ") &&
                    !strstr(said, "document of"),
                "equal, and it says '%.600s'", said);
    more_options = "";
    test_end("on_policy_right_%s_P%lld", seqpar_layout_name(layout), (long long)sp);
}

static void test_last_bit(void) {
    make_equal(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.of[1][1].old_logp[12] = nextafter(s.of[1][1].logp[12], 0);
    expect(0, "close", "roundings of float32 explain");
    more_options = "--strict";
    expect(5, "close", "roundings of float32 explain");
    more_options = "";
    test_end("on_policy_last_bit");
}

/* ---- figures ---- */

static double figure(const char *key) {
    char text[40];
    const char *at;
    snprintf(text, sizeof text, "\"%s\":", key);
    at = strstr(said, text);
    return at ? strtod(at + strlen(text), NULL) : NAN;
}

static void expect_figure(const char *key, double want) {
    double got = figure(key);
    test_expect(fabs(got - want) <= 1e-13 * fmax(1, fabs(want)), "%s is %.17g, not %.17g", key,
                got, want);
}

static int ask_json(void) {
    int code;
    write_scene();
    more_options = "--json";
    code = ask(said, sizeof said);
    more_options = "";
    return code;
}

/* Four tokens, whose ratios are 1.5, 1.25, 0.5 and 1. The clip is 0.8 to 1.3. */
static void test_by_hand(void) {
    static const double ratios[4] = {1.5, 1.25, 0.5, 1};
    row *r;
    make_equal(SEQPAR_LAYOUT_ZIGZAG, 3);
    EACH_TOKEN(q, t) q->labels[t] = NONE;
    r = &s.of[1][0];
    for (int64_t i = 0; i < 4; i++) {
        r->labels[2 + i] = 7;
        r->logp[2 + i] = log(ratios[i]) - 1;
        r->old_logp[2 + i] = -1;
    }
    test_expect(ask_json() == 1, "ratios of 1.5 and 0.5 are not wrong: %.200s", said);
    expect_figure("supervised", 4);
    expect_figure("equal", 1);
    expect_figure("mean", 0.33043895999557979); /* (ln 1.5 + ln 1.25 + ln 2) / 4 */
    expect_figure("worst", 0.69314718055994531);
    expect_figure("ratio_mean", 1.0625);
    expect_figure("ratio_worst", 0.5);
    expect_figure("outside_clip", 0.5);
    expect_figure("k1", 0.016134630284392798);
    expect_figure("k3", 0.078634630284392798);
    test_expect(strstr(said, "token 4, document 0, position 5, of micro-batch 0") != NULL,
                "the worst is elsewhere: %.900s", said);
    test_end("on_policy_by_hand");
}

/* Positions are of the token that is predicted, and each power of two has a line. */
static void test_bins(void) {
    const char *at;
    double tokens[7] = {0}, sum[7] = {0}, worst[7] = {0};
    make("ppo", SEQPAR_LAYOUT_STRIPE, 3, 2, 2);
    EACH_TOKEN(r, t) {
        int64_t position = t + 1 - cu_seqlens[document_of(r, t)];
        int power = (int)floor(log2((double)position) + 1e-9);
        double far = fabs(r->logp[t] - r->old_logp[t]);
        tokens[power]++;
        sum[power] += far;
        worst[power] = fmax(worst[power], far);
    }
    test_expect(ask_json() == 1, "not wrong: %.200s", said);
    at = strstr(said, "\"by_position\"");
    for (int k = 1; at && k < 5; k++) { /* 2 tokens of a document are a prompt */
        at = strstr(at, "\"first\"");
        if (!at) break;
        memmove(said, at, strlen(at) + 1);
        at = said + 1;
        expect_figure("first", ldexp(1, k));
        expect_figure("last", ldexp(2, k) - 1);
        expect_figure("tokens", tokens[k]);
        expect_figure("mean", sum[k] / tokens[k]);
        expect_figure("worst", worst[k]);
    }
    test_expect(at != NULL, "a line of the table is missing");
    test_end("on_policy_by_position");
}

/* ---- limits ---- */

/* As far as writing in float32 allows, and `more`. */
static void move(row *r, int64_t t, double more) {
    r->old_logp[t] = r->logp[t] - 2 * F32 * fabs(r->logp[t]) - more;
}

static void test_limits(void) {
    static const struct {
        double mean, worst;
        int code;
        const char *headline;
    } table[] = {{0.99, 0, 0, "close"},
                 {1.01, 0, 1, "wrong: unknown"},
                 {0, 0.99, 0, "close"},
                 {0, 1.01, 1, "wrong: unknown"}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        make_equal(SEQPAR_LAYOUT_ZIGZAG, 3);
        say_word("dtype", "float32");
        EACH_TOKEN(r, t) if (table[i].mean > 0) move(r, t, table[i].mean * MEAN_MOST);
        if (table[i].worst > 0) move(&s.of[0][1], 2, table[i].worst * WORST_MOST);
        expect(table[i].code, table[i].headline, "roundings of float32 explain");
        test_end("on_policy_limit_%zu", i);
    }
}

/* A type that is said counts, and so does one that the numbers show. */
static void test_types(void) {
    make_equal(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.rough = "old_logp";
    expect(0, "close", "roundings of bfloat16 explain");
    say_word("dtype", "float32");
    expect(0, "close", "roundings of float32 explain");
    s.rough = NULL;
    EACH_TOKEN(r, t) r->old_logp[t] += 0.01;
    expect(1, "wrong: unknown", "roundings of float32 explain");
    s.keys = 0;
    say_word("dtype", "bfloat16");
    expect(0, "close", "roundings of bfloat16 explain");
    test_end("on_policy_types");
}

static void test_not_finite(double logp, double old) {
    make_equal(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.of[0][1].logp[3] = logp;
    s.of[0][1].old_logp[3] = old;
    expect(1, "wrong: unknown", "1 tokens is not finite, first at rank");
    test_end("on_policy_not_finite_%g_%g", logp, old);
}

/* ---- mistakes ---- */

static void test_shift(int64_t by, const char *text) {
    make("ppo", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 2);
    EACH_ROW(dp, a)
    for (int64_t t = 1; t + 1 < TOKENS; t++) s.of[dp][a].old_logp[t] = s.of[dp][a].logp[t + by];
    expect(1, "wrong: old_log_probs_shifted", text);
    s.of[0][0].old_logp[5] += 0.5; /* not all fit */
    expect(1, "wrong: old_log_probs_shifted", "77 of 78 numbers are nearer to logp there");
    test_end("on_policy_shift_%lld", (long long)by);
}

static void test_side(int source) {
    make_equal(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.side = "old_logp";
    s.source = source;
    expect(1, "wrong: side_tensor_not_split", "old_logp: ");
    test_end("on_policy_not_split_%d", source);
}

/* Old log-probs of a policy that has moved a little, in blocks that another order puts elsewhere:
   tokens 0 to 39, 80 to the end, 40 to 79. */
static void test_blocks(void) {
    make_equal(SEQPAR_LAYOUT_ZIGZAG, 3);
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        row *r = &s.of[dp][a];
        int64_t from = t < 40 ? t : t < TOKENS - 40 ? t + 40 : t - (TOKENS - 80);
        r->old_logp[t] = r->logp[from] + 0.02 * test_normal();
    }
    expect(1, "wrong: gathered_in_rank_order",
           "stand in blocks that are those of other places");
    test_end("on_policy_blocks");
    make_equal(SEQPAR_LAYOUT_ZIGZAG, 3);
    EACH_TOKEN(r, t) r->old_logp[t] = r->logp[t] + 0.02 * test_normal();
    expect(1, "wrong: unknown", "no shift by a token explains it");
    test_end("on_policy_near");
}

/* Old log-probs of a policy that has moved a little, in the order of ranks whose pieces end up to
   one token behind those of the dump's zigzag (`back`: from that order into the row's). Two
   of five tokens are trained on, of the first `of` tokens alone; six that have moved are the fewest for a name. */
static void test_pieces(int back, int64_t of, const char *headline, const char *text) {
    int64_t ends[2 * 3 + 1], order[TOKENS], n = 0;
    make_equal(SEQPAR_LAYOUT_ZIGZAG, 3);
    for (int k = 0; k <= 6; k++) ends[k] = (k * TOKENS + 5) / 6;
    for (int i = 0; i < 6; i++) {
        int piece = i % 2 ? 5 - i / 2 : i / 2;
        for (int64_t t = ends[piece]; t < ends[piece + 1]; t++) order[n++] = t;
    }
    EACH_ROW(dp, a)
    for (int64_t i = 0; i < TOKENS; i++) {
        row *r = &s.of[dp][a];
        int64_t t = back ? order[i] : i, from = back ? i : order[i];
        r->logp[t] = -1 - 9 * fmod(t * 0.618034, 1); /* far from each other: few are enough */
        r->old_logp[t] = -1 - 9 * fmod(from * 0.618034, 1) + 0.02 * test_normal();
        if (t * 19 % 31 > 12 || t >= of) r->labels[t] = NONE;
    }
    expect(1, headline, text);
    test_end("on_policy_pieces_%d_%lld", back, (long long)of);
}

/* ---- what is not there ---- */

static void test_lacks(const char *name) {
    char sentence[160];
    make_equal(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.without = name;
    snprintf(sentence, sizeof sentence, "no tensor 0.%s; on_policy compares logp", name);
    expect_refused(NULL, sentence);
}

static void test_nothing(void) {
    make_equal(SEQPAR_LAYOUT_ZIGZAG, 3);
    EACH_TOKEN(r, t) r->labels[t] = NONE;
    expect(4, "insufficient", "no token is supervised");
    test_end("on_policy_nothing");
}

static void test_one_document(void) {
    make_equal(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.without = "cu_seqlens";
    expect(0, "right", "4 rows have no cu_seqlens: each is taken for one document");
    test_end("on_policy_without_documents");
}

static void test_sequence(void) {
    make_equal(SEQPAR_LAYOUT_ZIGZAG, 3);
    say_word("importance", "sequence");
    expect(0, "right", "these are ratios of tokens; metadata importance says");
    test_end("on_policy_importance");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    asked_verb = "on_policy";
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int64_t sp = 1; sp <= SP; sp++) TEST(test_right(layout, sp));
    TEST(test_last_bit());
    TEST(test_by_hand());
    TEST(test_bins());
    TEST(test_limits());
    TEST(test_types());
    TEST(test_not_finite(NAN, -1));
    TEST(test_not_finite(-1, NAN));
    TEST(test_not_finite(NAN, NAN));
    TEST(test_not_finite(-INFINITY, -INFINITY));
    TEST(test_shift(-1, "logp of the token before it"));
    TEST(test_shift(1, "logp of the token behind it"));
    TEST(test_side(FIRST));
    TEST(test_side(CONTIGUOUS));
    TEST(test_blocks());
    TEST(test_pieces(0, 93, "wrong: unknown", "no shift by a token explains it"));
    TEST(test_pieces(0, 94, "wrong: gathered_in_rank_order", "; 6 of 6 numbers are those"));
    TEST(test_pieces(1, TOKENS, "wrong: gathered_in_rank_order",
                     "places, each piece up to one"));
    TEST(test_lacks("index"));
    TEST(test_lacks("labels"));
    TEST(test_lacks("logp"));
    TEST(test_lacks("old_logp"));
    TEST(test_nothing());
    TEST(test_one_document());
    TEST(test_sequence());
    return test_summary();
}
