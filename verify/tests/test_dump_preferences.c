/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on dumps of DPO with every loss_type, and of RM with margins and a term
   that centers scores: right ones, golden numbers, and one with each mistake. */
#define FOLDER "build/test_dump_preferences.d"
#include "support/dump_support.h"

enum { SIGMOID, ROBUST, HINGE, IPO, IPO_MEAN, SIMPO, TYPES };
static const char *const types[TYPES] = {"sigmoid", "robust",   "hinge",
                                         "ipo",     "ipo_mean", "simpo"};
static const double smoothing = 0.1, simpo_gamma = 0.5;

static int is_of_means(int type) { return type == IPO_MEAN || type == SIMPO; }

/* The loss of x, as it is written for one pair. */
static double loss_of(int type, double x) {
    double z = s.beta * x, e = smoothing, u = x - 1 / (2 * s.beta);
    if (type == IPO || type == IPO_MEAN) return u * u;
    if (type == HINGE) return z < 1 ? 1 - z : 0;
    if (type == SIMPO) z -= simpo_gamma;
    if (type == ROBUST)
        return ((1 - e) * log_sigmoid_loss(z) - e * log_sigmoid_loss(-z)) / (1 - 2 * e);
    return (1 - e) * log_sigmoid_loss(z) + e * log_sigmoid_loss(-z);
}

/* What a response has on members first to last; by: 1, means over their tokens. */
static double response(const row *r, int64_t d, int64_t first, int64_t last, double reference,
                       int by) {
    double n, h = h_of(r, d, first, last, reference, &n);
    return by && n > 0 ? h / n : h;
}

enum { ADDED, AVERAGED, FILLED, HOWS };
static double local_response(const row *r, int64_t d, double reference, int how) {
    double sum = 0, filled = 0, n;
    for (int64_t m = 0; m < s.sp; m++) {
        double h = h_of(r, d, m, m + 1, reference, &n);
        if (n > 0) sum += h / n;
        filled += n > 0;
    }
    return how == ADDED      ? sum
           : how == AVERAGED ? sum / (double)s.sp
                             : sum / (filled > 0 ? filled : 1);
}

/* The mean over pairs, by what a mistake takes: of members, times, with a reference, means. */
static double preference(int type, int64_t first, int64_t last, double times, double reference,
                         int by) {
    double sum = 0, pairs = 0;
    if (type == SIMPO) reference = 0;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d += 2, pairs++) {
        const row *r = &s.of[dp][a];
        double x = response(r, d, first, last, reference, by) -
                   response(r, d + 1, first, last, reference, by);
        sum += loss_of(type, times * x);
    }
    return sum / pairs;
}

static double right_of(int type) { return preference(type, 0, s.sp, 1, 1, is_of_means(type)); }

static double of_parts(int type) {
    double sum = 0;
    for (int64_t m = 0; m < s.sp; m++)
        sum += preference(type, m, m + 1, 1, 1, is_of_means(type)) / (double)s.sp;
    return sum;
}

static double of_local_means(int type, int how) {
    double sum = 0, pairs = 0, reference = type != SIMPO;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d += 2, pairs++)
        sum += loss_of(type, local_response(&s.of[dp][a], d, reference, how) -
                                 local_response(&s.of[dp][a], d + 1, reference, how));
    return sum / pairs;
}

static void make_type(int type, int layout, int64_t sp, int64_t dp, int64_t micro) {
    begin("dpo", sp, dp, micro);
    s.beta = is_of_means(type) ? 2 : 0.3;
    say_word("loss_type", types[type]);
    say("label_smoothing", smoothing);
    say("simpo_gamma", simpo_gamma);
    deal(layout);
    fill();
    set_loss(right_of(type));
}

/* ---- right ones ---- */

static void test_right(int type) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int64_t sp = 1; sp <= SP; sp++) {
            make_type(type, layout, sp, 1 + (sp + layout) % 3, 1 + layout % 2);
            write_scene();
            if (sp * s.dp * s.micro == 1)
                expect(4, "insufficient", "one rank has nothing");
            else
                expect(0, "right", "loss right: got");
            test_end("preferences_right_%s_%s_P%lld", types[type], seqpar_layout_name(layout),
                     (long long)sp);
        }
}

/* Of one pair that is known to many digits, and three without a trained token. */
static const struct {
    const char *type;
    double smoothing, beta, gamma, golden, of_0;
} golden[] = {{"sigmoid", 0, 0.3, 0, 0.52312326413984, 0.693147180559945309},
              {"sigmoid", 0.1, 0.3, 0, 0.56062326413984, 0.693147180559945309},
              {"robust", 0.1, 0.3, 0, 0.47624826413984, 0.693147180559945309},
              {"hinge", 0, 0.3, 0, 0.625, 1},
              {"ipo", 0, 0.3, 0, 0.173611111111111, 2.77777777777777778},
              {"ipo_mean", 0, 0.3, 0, 2.16948350694444, 2.77777777777777778},
              {"simpo", 0, 2, 0.5, 1.85722707818315, 0.974076984180107}};

/* `count` supervised tokens of document d, with these sums. */
static void set_document(int64_t d, int64_t count, double policy, double reference) {
    row *r = &s.of[0][0];
    for (int64_t i = 0; i < count; i++) {
        int64_t t = cu_seqlens[d] + i;
        double share = (double)(2 * (i + 1)) / (double)(count * (count + 1));
        r->labels[t] = r->ids[t + 1];
        r->logp[t] = policy * share;
        r->ref_logp[t] = reference / (double)count;
    }
}

static void test_golden(void) {
    for (size_t i = 0; i < sizeof golden / sizeof *golden; i++) {
        begin("dpo", 2, 1, 1);
        s.beta = golden[i].beta;
        say_word("loss_type", golden[i].type);
        say("label_smoothing", golden[i].smoothing);
        say("simpo_gamma", golden[i].gamma);
        deal(SEQPAR_LAYOUT_ZIGZAG);
        fill();
        for (int64_t t = 0; t < TOKENS; t++) s.of[0][0].labels[t] = NONE;
        set_document(6, 5, -12.5, -13);
        set_document(7, 8, -15.25, -14.5);
        set_loss((3 * golden[i].of_0 + golden[i].golden) / 4);
        write_scene();
        test_expect(ask(said, sizeof said) != 1 && strstr(said, "4 pairs give") &&
                        !strstr(said, "marginal"),
                    "%s: '%.900s'", golden[i].type, said);
        set_loss((3 * golden[i].of_0 + golden[i].golden) / 4 + 2e-4);
        write_scene();
        ask(said, sizeof said);
        test_expect(!strncmp(said, "marginal", 8) || !strncmp(said, "wrong", 5), "%s: '%.900s'",
                    golden[i].type, said);
        test_end("preferences_golden_%s_%g", golden[i].type, golden[i].smoothing);
    }
}

/* ---- mistakes ---- */

static void test_mistakes(int type) {
    static const char *const hows[HOWS] = {"added over ranks", "averaged over ranks",
                                           "averaged over the ranks that have a token"};
    int of_means = is_of_means(type);
    make_type(type, SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    expect_loss(preference(type, 0, 3, 1.0 / 3, 1, of_means), "log_probs_averaged", "loss");
    expect_loss(preference(type, 0, 3, 3, 1, of_means), "log_probs_added", "loss wrong");
    expect_loss(preference(type, 0, 3, -1, 1, of_means), "pair_swapped", "loss wrong");
    expect_loss(of_parts(type), "sigmoid_of_parts", "loss wrong");
    expect_loss(preference(type, 0, 3, 1, 1, !of_means),
                of_means ? "log_probs_not_by_length" : "log_probs_by_length", "loss wrong");
    for (int how = 0; how < HOWS && of_means; how++)
        expect_loss(of_local_means(type, how), "sequence_counts_local", hows[how]);
    set_loss(right_of(type));
    s.loss[2] = preference(type, 2, 3, 1, 1, of_means);
    expect_named("log_probs_of_one_rank", "as rank 2 reports it");
    set_loss(right_of(type) * 1.1);
    expect_named("unknown", "loss wrong");
    expect_loss(NAN, "unknown", "got nan");
    if (type == SIMPO) {
        s.without = "ref_logp";
        set_loss(right_of(type));
        expect_right("without_reference", "loss right: got");
        return;
    }
    expect_loss(preference(type, 0, 3, 1, 0, of_means), "reference_missing", "loss wrong");
    s.source = FIRST;
    expect_loss(right_of(type), "side_tensor_not_split", "ref_logp: each rank takes the first");
    s.source = SPLIT;
}

/* Another type than the metadata have is no known mistake, and never right. */
static void test_types_differ(void) {
    for (int type = 0; type < TYPES; type++)
        for (int other = 0; other < TYPES; other++) {
            double loss;
            if (type == other) continue;
            make_type(type, SEQPAR_LAYOUT_STRIPE, 3, 2, 1);
            loss = right_of(other);
            set_loss(loss);
            write_scene();
            test_expect(ask(said, sizeof said) == 1, "%s for %s: '%.300s'", types[other],
                        types[type], said);
        }
    test_end("preferences_of_another_type");
}

/* ---- margins and the term that centers ---- */

static const double center = 0.07;
enum { WITH_MARGINS, NO_MARGINS, SWAPPED };

static double margin_mean(int how, double times, int64_t first, int64_t last) {
    double sum = 0, pairs = 0;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d += 2, pairs++)
        for (int64_t m = first; m < last; m++) {
            const row *r = &s.of[dp][a];
            int whole = last - first == s.sp && s.sp > 1 && times != 0;
            double c = r->scores[d], j = r->scores[d + 1], margin = r->margins[d];
            if (!whole) c = s.member[last_of(d)] == m ? c : 0;
            if (!whole) j = s.member[last_of(d + 1)] == m ? j : 0;
            if (times != 0) c *= times;
            if (times != 0) j *= times;
            if (how == NO_MARGINS) margin = 0;
            sum += (log_sigmoid_loss((how == SWAPPED ? j - c : c - j) - margin) +
                    center * (c + j) * (c + j)) /
                   (double)(last - first);
        }
    return sum / pairs;
}

static void make_margins(void) {
    begin("rm", 3, 2, 1);
    s.with_margins = 1;
    say("center", center);
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < DOCS; d++)
        s.of[dp][a].margins[d] = d % 2 ? 9 : 0.2 + 0.1 * (double)d;
    set_loss(margin_mean(WITH_MARGINS, 1, 0, 3));
}

static void test_margins(void) {
    make_margins();
    expect_right("margins", "loss right: got");
    s.without = "values";
    expect_right("margins_and_scores", "loss right: got");
    s.without = "scores";
    expect_right("margins_and_values", "loss right: got");
    s.without = NULL;
    expect_loss(margin_mean(NO_MARGINS, 1, 0, 3), "margin_missing", "7 pairs give");
    expect_loss(margin_mean(SWAPPED, 1, 0, 3), "pair_swapped", "loss wrong");
    expect_loss(margin_mean(WITH_MARGINS, 1.0 / 3, 0, 3), "scores_averaged", "loss wrong");
    expect_loss(margin_mean(WITH_MARGINS, 3, 0, 3), "scores_added", "loss wrong");
    expect_loss(margin_mean(WITH_MARGINS, 0, 0, 3), "sigmoid_of_parts", "loss wrong");
    set_loss(margin_mean(WITH_MARGINS, 1, 0, 3));
    s.loss[1] = margin_mean(WITH_MARGINS, 0, 1, 2);
    expect_named("scores_of_one_rank", "as rank 1 reports it");
    expect_loss(score_mean(1), "unknown", "loss wrong"); /* neither of both */
    set_loss(margin_mean(WITH_MARGINS, 1, 0, 3));
    s.without = "none";
    expect_refused("margins", "0.margins has 7 elements and its row 8 documents");
    expect_refused("margins differ", "0.margins differs from another rank's");
}

static void test_refused(void) {
    begin("dpo", 2, 1, 1);
    say_word("loss_type", "kto_pair");
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
    s.without = "none";
    expect_refused(NULL, "loss_type is 'kto_pair'; write sigmoid, robust, hinge, ipo,");
    s.keys = 0;
    say("label_smoothing", 0.5);
    expect_refused(NULL, "label_smoothing is '0.5'; write a number from 0 to 0.499");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    for (int type = 0; type < TYPES; type++) TEST(test_right(type));
    TEST(test_golden());
    for (int type = 0; type < TYPES; type++) TEST(test_mistakes(type));
    TEST(test_types_differ());
    TEST(test_margins());
    TEST(test_refused());
    return test_summary();
}
