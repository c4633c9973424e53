/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on dumps of DPO, RM and KTO with each mistake. */
#define FOLDER "build/test_dump_pairs.d"
#include "support/dump_support.h"

/* ---- DPO ---- */

/* Of a row, documents' sums where tokens lie one rank behind the other. */
static double gathered_h(const row *r, int64_t d) {
    double h = 0;
    int64_t at = 0;
    for (int64_t m = 0; m < s.sp; m++)
        for (int64_t i = 0; i < s.held[m]; i++, at++) {
            int64_t t = s.index[m][i];
            if (at >= cu_seqlens[d] && at <= last_of(d) && r->labels[t] != NONE)
                h += r->logp[t] - r->ref_logp[t];
        }
    return h;
}

static double gathered_pairs(void) {
    double sum = 0, count = 0;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d += 2, count++)
        sum += log_sigmoid_loss(
            s.beta * (gathered_h(&s.of[dp][a], d) - gathered_h(&s.of[dp][a], d + 1)));
    return sum / count;
}

static double pairs_of_replica(int64_t dp) {
    double sum = 0, count = 0, n;
    for (int64_t a = 0; a < s.micro; a++)
        for (int64_t d = 0; d < s.of[dp][a].docs; d += 2, count++)
            sum += log_sigmoid_loss(s.beta * (h_of(&s.of[dp][a], d, 0, s.sp, 1, &n) -
                                              h_of(&s.of[dp][a], d + 1, 0, s.sp, 1, &n)));
    return sum / count;
}

static void test_dpo(void) {
    make("dpo", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    expect_loss(
        (pair_mean(1, 1, 0, 0, 1) + pair_mean(1, 1, 0, 1, 2) + pair_mean(1, 1, 0, 2, 3)) / 3,
        "sigmoid_of_parts", "7 pairs give");
    expect_loss(pair_mean(1.0 / 3, 1, 0, 0, 3), "log_probs_averaged", "loss wrong");
    expect_loss(pair_mean(3, 1, 0, 0, 3), "log_probs_added", "loss wrong");
    expect_loss(pair_mean(-1, 1, 0, 0, 3), "pair_swapped", "loss wrong");
    expect_loss(pair_mean(1, 0, 0, 0, 3), "reference_missing", "loss wrong");
    expect_loss(pair_mean(1, 1, 1, 0, 3), "log_probs_by_length", "loss wrong");
    expect_loss(gathered_pairs(), "gathered_in_rank_order", "loss wrong");
    expect_loss((pairs_of_replica(0) + pairs_of_replica(1)) / 2, "mean_of_means",
                "groups are replicas");
    set_loss(right_loss());
    s.loss[2] = pair_mean(1, 1, 0, 2, 3);
    expect_named("log_probs_of_one_rank", "as rank 2 reports it");
    set_loss(right_loss());
    s.loss[2] = pair_mean(1, 1, 0, 2, 3) / 3; /* its share, for ranks to add up */
    expect_named("log_probs_of_one_rank", "as rank 2 reports it");
    s.loss[2] = pair_mean(1, 1, 0, 1, 2) / 3;
    expect_named("unknown", "as rank 2 reports it");
    set_loss(right_loss());
    s.loss[2] = pairs_of_replica(0);
    expect_named("own_mean_alone", "as rank 2 reports it");
    s.source = FIRST;
    expect_loss(right_loss(), "side_tensor_not_split", "ref_logp: each rank takes the first n");
    s.source = CONTIGUOUS;
    expect_loss(right_loss(), "side_tensor_not_split", "as a contiguous split has it");
    s.source = SPLIT;
    set_loss(right_loss() * 1.0008);
    expect(0, "marginal", "loss marginal: got");
    test_end("objectives_dpo_marginal");
    expect_loss(right_loss() * 1.0017, "unknown", "no known mistake");
    expect_loss(NAN, "unknown", "got nan");
}

/* Means of kl of unequal signs and sizes, by replica. */
static void set_kl(double first, double second) {
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++)
        s.of[dp][a].kl[d] = (dp ? second : first) + 0.5 * sin((double)(d + 3 * a));
    set_loss(right_loss());
}

/* One rank has all log-probs: what replicas make of their means is judged. */
static void test_dpo_of_replicas(void) {
    make("dpo", SEQPAR_LAYOUT_CONTIGUOUS, 1, 2, 1);
    expect_right("of_replicas", "loss right: got");
    expect_loss((pairs_of_replica(0) + pairs_of_replica(1)) / 2, "mean_of_means",
                "groups are replicas");
    set_loss(right_loss());
    s.loss[1] = pairs_of_replica(1);
    expect_named("own_mean_alone", "as rank 1 reports it");
    expect_loss(right_loss() * 2, "losses_added", "over replicas");
    EACH_ROW(dp, a) { /* one row twice */
        s.of[dp][a] = s.of[0][0];
    }
    set_loss(right_loss());
    expect_nothing("of_replicas_alike", "have the same mean here");
    make("dpo", SEQPAR_LAYOUT_CONTIGUOUS, 1, 1, 2); /* or micro-batches */
    expect_right("of_micro_batches", "loss right: got");
    make("dpo", SEQPAR_LAYOUT_CONTIGUOUS, 1, 1, 1);
    expect_nothing("of_one_rank", "one rank has nothing");
}

/* Several names of one number: each with what tells it from the others. */
static void test_apart(void) {
    make("dpo", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) /* so close that a sigmoid is a line */
        s.of[dp][a].logp[t] = s.of[dp][a].ref_logp[t] + 1e-4 * (s.member[t] + 1);
    expect_loss(pair_mean(1.0 / 3, 1, 0, 0, 3), "one of sigmoid_of_parts, log_probs_averaged",
                "to tell sigmoid_of_parts, log_probs_averaged apart: a later step");
    make("kto", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    set_kl(1, -1.2);
    expect_loss(kto_mean(1, 1, Z_MEANS, 0, 0, 3), "one of kl_mean_of_means, kl_missing",
                "2 mistakes give this number here");
    test_expect(strstr(said, "to tell kl_mean_of_means, kl_missing apart: replicas") != NULL,
                "'%.900s'", said);
    test_end("objectives_kto_apart");
}

/* ---- RM ---- */

/* The value of a token of the row as this rule has it, for every document. */
typedef double (*score_rule)(const row *r, int64_t d);

static double rank_end(const row *r, int64_t d) {
    int64_t best = -1, at = 0;
    for (int64_t t = cu_seqlens[d]; t <= last_of(d); t++)
        if (best < 0 || s.member[t] > s.member[best] ||
            (s.member[t] == s.member[best] && s.local[t] >= s.local[best]))
            best = t;
    return (void)at, r->values[best];
}
static double first_token(const row *r, int64_t d) { return r->values[cu_seqlens[d]]; }
static double row_end_value(const row *r, int64_t d) {
    return (void)d, r->values[last_of(r->docs - 1)];
}
static double padded_row_end(const row *r, int64_t d) { return (void)d, r->values[TOKENS - 1]; }
static double padding(const row *r, int64_t d) {
    return r->values[d == r->docs - 1 ? TOKENS - 1 : last_of(d)];
}
static double gathered_value(const row *r, int64_t d) {
    int64_t at = 0;
    for (int64_t m = 0; m < s.sp; m++)
        for (int64_t i = 0; i < s.held[m]; i++)
            if (at++ == last_of(d)) return r->values[s.index[m][i]];
    return NAN;
}
static double over_sp(const row *r, int64_t d) { return r->values[last_of(d)] / (double)s.sp; }
static double times_sp(const row *r, int64_t d) { return r->values[last_of(d)] * (double)s.sp; }

/* Each rank's own last token of the document: their sum, and how many have one. */
static double ends_of_ranks(const row *r, int64_t d, double *count) {
    double sum = 0;
    *count = 0;
    for (int64_t m = 0; m < s.sp; m++) {
        int64_t best = -1;
        for (int64_t t = cu_seqlens[d]; t <= last_of(d); t++)
            if (s.member[t] == m && (best < 0 || s.local[t] > s.local[best])) best = t;
        if (best >= 0) sum += r->values[best];
        *count += best >= 0;
    }
    return sum;
}
static double parts_added(const row *r, int64_t d) {
    double count;
    return ends_of_ranks(r, d, &count);
}
static double parts_averaged(const row *r, int64_t d) {
    double count;
    return ends_of_ranks(r, d, &count) / (double)s.sp;
}
static double parts_mean(const row *r, int64_t d) {
    double count, sum = ends_of_ranks(r, d, &count);
    return sum / count;
}
static double next_document(const row *r, int64_t d) {
    return r->values[last_of((d + 1) % r->docs)];
}
static double previous_document(const row *r, int64_t d) {
    return r->values[last_of((d + r->docs - 1) % r->docs)];
}

static void set_scores(score_rule rule) {
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++)
        s.of[dp][a].scores[d] = rule(&s.of[dp][a], d);
    set_loss(right_loss());
}

static const struct {
    const char *name, *how;
    score_rule rule;
} score_table[] = {{"score_of_rank_end", "first at micro-batch 0, document", rank_end},
                   {"score_of_first_token", "rewards wrong", first_token},
                   {"score_of_row_end", "rewards wrong", row_end_value},
                   {"score_of_row_end", "of the row with its padding", padded_row_end},
                   {"score_of_padding", "rewards wrong", padding},
                   {"gathered_in_rank_order", "rewards wrong", gathered_value},
                   {"scores_averaged", "rewards wrong", over_sp},
                   {"scores_added", "rewards wrong", times_sp},
                   {"scores_of_parts", "added over ranks", parts_added},
                   {"scores_of_parts", "averaged over ranks", parts_averaged},
                   {"scores_of_parts", "averaged over the ranks that", parts_mean},
                   {"reward_on_wrong_document", "of the document behind it", next_document},
                   {"reward_on_wrong_document", "of the document before", previous_document}};

static double scores_of_parts_loss(int64_t from, int64_t to) {
    double sum = 0, count = 0;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d += 2, count++)
        for (int64_t m = from; m < to; m++) {
            const row *r = &s.of[dp][a];
            double c = s.member[last_of(d)] == m ? r->scores[d] : 0;
            double j = s.member[last_of(d + 1)] == m ? r->scores[d + 1] : 0;
            sum += log_sigmoid_loss(c - j) / (double)(to - from);
        }
    return sum / count;
}

static void test_rm(void) {
    for (size_t i = 0; i < sizeof score_table / sizeof *score_table; i++) {
        make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
        set_scores(score_table[i].rule);
        expect_named(score_table[i].name, score_table[i].how);
    }
    for (size_t i = 0; i < sizeof score_table / sizeof *score_table; i++) {
        make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
        set_scores(score_table[i].rule);
        s.without = "scores"; /* the loss alone tells */
        if (strcmp(score_table[i].name, "scores_of_parts") &&
            strcmp(score_table[i].name, "reward_on_wrong_document"))
            expect_named(score_table[i].name, "loss wrong");
    }
}

static void test_rm_loss(void) {
    make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    expect_loss(score_mean(-1), "pair_swapped", "7 pairs give");
    expect_loss(score_mean(1.0 / 3), "scores_averaged", "loss wrong");
    expect_loss(score_mean(3), "scores_added", "loss wrong");
    expect_loss(scores_of_parts_loss(0, 3), "sigmoid_of_parts", "loss wrong");
    set_loss(right_loss());
    s.loss[1] = scores_of_parts_loss(1, 2);
    expect_named("scores_of_one_rank", "as rank 1 reports it");
    s.loss[1] /= 3;
    expect_named("scores_of_one_rank", "as rank 1 reports it");
    s.without = "scores";
    expect_loss(right_loss() * 1.1, "unknown", "loss wrong");
    set_loss(right_loss());
    expect_right("from_values_alone", "rewards not judged");
    s.without = "values";
    expect_right("from_scores_alone", "rewards not judged");
    s.without = NULL;
    for (int64_t i = s.local[last_of(3)]; i + 1 < s.held[s.member[last_of(3)]]; i++)
        s.index[s.member[last_of(3)]][i] = s.index[s.member[last_of(3)]][i + 1];
    s.held[s.member[last_of(3)]]--;
    expect_named("token_lost", "rewards insufficient: what scores are made of is NaN");
    make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    s.of[0][0].scores[3] += 0.01 * s.of[0][0].scores[3];
    set_loss(right_loss());
    expect_named("unknown", "document 3, whose last token is at rank");
    s.of[0][0].scores[3] = NAN;
    expect_named("unknown", "rewards wrong");
}

/* ---- KTO ---- */

static double gathered_kto(void) {
    double sum = 0, count = 0;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++, count++) {
        double x = s.beta * (gathered_h(&s.of[dp][a], d) - z_of(dp, a, Z));
        sum += 1 - 1 / (1 + exp(s.of[dp][a].desirable[d] != 0 ? -x : x));
    }
    return sum / count;
}

static double kto_by_length(void) {
    double sum = 0, count = 0, n;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++, count++) {
        double h = h_of(&s.of[dp][a], d, 0, s.sp, 1, &n), x;
        x = s.beta * (h / (n > 0 ? n : 1) - z_of(dp, a, Z));
        sum += 1 - 1 / (1 + exp(s.of[dp][a].desirable[d] != 0 ? -x : x));
    }
    return sum / count;
}

static double kto_at(double z) {
    double sum = 0, count = 0, n;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++, count++) {
        double x = s.beta * (h_of(&s.of[dp][a], d, 0, s.sp, 1, &n) - z);
        sum += 1 - 1 / (1 + exp(s.of[dp][a].desirable[d] != 0 ? -x : x));
    }
    return sum / count;
}

/* A mistake that gives the right number within the limit is not named, though it is nearer to
   the number that is there. */
static void near_the_right_one(void) {
    double off = 0;
    make("kto", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    for (double z = 0; fabs(off) < 0.8e-3; z += 1e-4) {
        EACH_ROW(dp, a)
        for (int64_t d = 0; d < DOCS; d++) s.of[dp][a].kl[d] = z;
        off = kto_mean(1, 1, Z_NONE, 0, 0, 3) / right_loss() - 1;
    }
    set_loss(right_loss() * (1 + 1.5 * off));
    more_options = "--tolerance 0.001";
    expect(0, "marginal", "and tolerance 0.001)");
    more_options = "";
    test_end("objectives_kto_near");
}

static void test_kto(void) {
    make("kto", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    set_kl(4, -1.5);
    expect_loss(kto_mean(1, 1, Z_REPLICA, 0, 0, 3), "kl_of_one_replica", "14 documents give");
    expect_loss(kto_mean(1, 1, Z_CLAMPED, 0, 0, 3), "kl_clamped_before_mean", "loss wrong");
    expect_loss(kto_mean(1, 1, Z_MEANS, 0, 0, 3), "kl_mean_of_means", "loss wrong");
    expect_loss(kto_mean(1, 1, Z_NONE, 0, 0, 3), "kl_missing", "loss wrong");
    expect_loss(kto_mean(1, 1, Z_TIMES, 0, 0, 3), "kl_added", "loss wrong");
    expect_loss(kto_mean(1, 1, Z_OVER, 0, 0, 3), "kl_averaged", "loss wrong");
    expect_loss(kto_mean(1, 1, Z, 1, 0, 3), "desirable_swapped", "loss wrong");
    expect_loss(kto_mean(1, 0, Z, 0, 0, 3), "reference_missing", "loss wrong");
    expect_loss(kto_mean(1.0 / 3, 1, Z, 0, 0, 3), "log_probs_averaged", "loss wrong");
    expect_loss(kto_mean(3, 1, Z, 0, 0, 3), "log_probs_added", "loss wrong");
    expect_loss(kto_by_length(), "log_probs_by_length", "loss wrong");
    expect_loss(gathered_kto(), "gathered_in_rank_order", "loss wrong");
    expect_loss(
        (kto_mean(1, 1, Z, 0, 0, 1) + kto_mean(1, 1, Z, 0, 1, 2) + kto_mean(1, 1, Z, 0, 2, 3)) /
            3,
        "sigmoid_of_parts", "loss wrong");
    set_loss(right_loss());
    s.loss[4] = kto_mean(1, 1, Z, 0, 1, 2);
    expect_named("log_probs_of_one_rank", "as rank 4 reports it");
    s.loss[4] /= 3;
    expect_named("log_probs_of_one_rank", "as rank 4 reports it");
}

static void test_kto_weights(void) {
    make("kto", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    set_kl(4, -1.5);
    s.desirable_weight = 1.7;
    s.undesirable_weight = 0.6;
    say("desirable_weight", s.desirable_weight);
    say("undesirable_weight", s.undesirable_weight);
    set_loss(right_loss());
    expect(0, "right", "loss right");
    expect_loss(kto_mean(1, 1, Z, 1, 0, 3), "desirable_swapped", "loss wrong");
    expect_loss(kto_mean(1, 1, Z_NONE, 0, 0, 3), "kl_missing", "loss wrong");
    s.desirable_weight = s.undesirable_weight = 1;
    expect_loss(right_loss(), "option_not_applied",
                "desirable_weight and undesirable_weight of 1 give it");
    s.keys -= 2; /* without these words, a step that has weights is wrong */
    s.desirable_weight = 1.7;
    set_loss(right_loss());
    expect(
        1, "wrong: unknown",
        "option that the dump does not say: desirable_weight, undesirable_weight of the metadata");
    test_end("objectives_kto_weights");
}

static void test_kto_more(void) {
    make("kto", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    set_kl(4, -1.5);
    for (int64_t r = 0; r < 6; r++)
        s.loss[r] = kto_at((r % 3 == 0 ? 0.5 : r % 3 == 1 ? 0.3 : 0.2) * kl_mean_of_all());
    expect_named("kl_of_own_part", "which add up to");
    for (int64_t r = 0; r < 6; r++)
        s.loss[r] = kto_at((r % 3 ? 0.2 : 0.5) * kl_mean_of_all()); /* a tenth is missing */
    expect_named("unknown", "loss wrong");
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < DOCS; d++) s.of[dp][a].kl[d] = 0.2;
    for (int64_t r = 0; r < 6; r++) s.loss[r] = kto_at((r % 3 ? 0.2 : 0.5) * 0.2);
    expect(1, "wrong: unknown", "loss wrong"); /* so small that any z would do */
    test_end("objectives_kto_small_kl");
    set_kl(4, -1.5);
    s.source = FIRST;
    expect_loss(right_loss(), "side_tensor_not_split", "ref_logp: each rank takes the first n");
    s.source = SPLIT;
    expect_loss(right_loss() * 1.1, "unknown", "loss wrong");
    set_loss(right_loss() * 0.9992);
    expect(0, "marginal", "loss marginal: got");
    test_end("objectives_kto_marginal");
    set_kl(1, -1.2);
    expect_loss(kto_mean(1, 1, Z_MEANS, 0, 0, 3), "one of kl_mean_of_means, kl_missing",
                "loss wrong");
    set_kl(-3, -1.5);
    expect_loss(kto_mean(1, 1, Z_FREE, 0, 0, 3), "kl_not_clamped", "loss wrong");
    set_loss(right_loss());
    expect_right("without_kl", "so not excluded: kl_of_one_replica, kl_clamped_before_mean");
    make("kto", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 2);
    set_kl(4, -1.5);
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < DOCS && a; d++) s.of[dp][a].kl[d] *= 2;
    expect_loss(kto_mean(1, 1, Z_REPLICA, 0, 0, 3), "kl_of_one_replica", "26 documents give");
    near_the_right_one();
}

/* A score is off by so many limits. */
static void test_score_limits(void) {
    for (int i = 0; i < 8; i++) {
        double squares = 0, n = 0, unit = i / 4 ? 2 * 0x1p-8 : 0, limit;
        make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
        EACH_ROW(dp, a)
        for (int64_t d = 0; d < s.of[dp][a].docs; d++, n++)
            squares += s.of[dp][a].scores[d] * s.of[dp][a].scores[d];
        if (i / 4) s.rough = "values"; /* this one has few bits */
        if (i / 4) s.of[1][0].values[last_of(2)] = s.of[1][0].scores[2] = -1.5;
        if (i / 4) squares = n; /* about */
        limit = (1e-3 + unit) * fabs(s.of[1][0].scores[2]) + 1e-5 * sqrt(squares / n);
        s.of[1][0].scores[2] += around_a_limit[i % 4].times * limit;
        set_loss(right_loss());
        expect(around_a_limit[i % 4].code, around_a_limit[i % 4].headline, "rewards ");
        test_end("pairs_limit_of_scores_%d_%g", i / 4, around_a_limit[i % 4].times);
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_dpo());
    TEST(test_dpo_of_replicas());
    TEST(test_apart());
    TEST(test_rm());
    TEST(test_rm_loss());
    TEST(test_score_limits());
    TEST(test_kto());
    TEST(test_kto_weights());
    TEST(test_kto_more());
    return test_summary();
}
