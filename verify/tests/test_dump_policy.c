/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on dumps of PPO: its loss and its advantages with each mistake. */
#define FOLDER "build/test_dump_policy.d"
#include "support/dump_support.h"

/* ---- PPO's loss ---- */

static void test_policy(const char *reduction) {
    static const struct {
        int way;
        const char *name, *how;
    } table[] = {{INVERTED, "ratio_inverted", "loss wrong"},
                 {WRONG_SIDE, "clip_wrong_side", "loss wrong"},
                 {NO_CLIP, "clip_missing", "loss wrong"},
                 {NO_KL, "kl_missing", "loss wrong"},
                 {K1, "kl_estimator", "k1, logp - ref_logp"},
                 {K2, "kl_estimator", "k2,"},
                 {K3_TURNED, "kl_estimator", "with its sign turned"}};
    begin("ppo", 3, strcmp(reduction, "token") ? 3 : 2, 1);
    s.reduction = reduction;
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        expect_loss(mean_loss(table[i].way), table[i].name, table[i].how);
    for (s.source = FIRST; s.source <= CONTIGUOUS; s.source++) {
        expect_loss(mean_loss(SIDE_OLD), "side_tensor_not_split", "old_logp: ");
        expect_loss(mean_loss(SIDE_REFERENCE), "side_tensor_not_split", "ref_logp: ");
        expect_loss(mean_loss(SIDE_ADVANTAGES), "side_tensor_not_split", "advantages: ");
    }
    s.source = SPLIT;
    expect_loss(mean_loss(RIGHT) * 1.1 + 0.05, "unknown", "loss wrong");
    expect_loss(NAN, by_sequence() ? "nan_of_an_empty_rank" : "unknown", "got nan");
}

/* Ratios far below the clip: the loss is |A| (1 - clip_low) and rounds as that does. */
static void test_low_ratios(void) {
    begin("ppo", 3, 2, 1);
    s.kl_coef = 0;
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
    s.dtype = SEQPAR_SAFETENSORS_BF16;
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        row *r = &s.of[dp][a];
        r->old_logp[t] = -1 - 0.01 * (double)(t % 50);
        r->logp[t] = r->old_logp[t] - (t % 11 ? 8 : 7);
        r->advantages[t] = -fabs(r->advantages[t]) - 0.1;
    }
    set_loss(right_loss());
    s.without = "rewards"; /* which advantages would have to agree with */
    expect_right("policy_low_ratios", "loss right");
}

/* ---- GSPO ---- */

enum { WHOLE, OF_PART, OF_SHARE, OF_TOKEN };

/* The logarithm of the ratio that token t has, of its document d. */
static double log_ratio(const row *r, int64_t d, int64_t t, int how) {
    double sum = 0, own = 0, count = 0, own_count = 0;
    for (int64_t i = cu_seqlens[d]; i <= last_of(d); i++) {
        double x = r->logp[i] - r->old_logp[i];
        if (r->labels[i] == NONE) continue;
        sum += x;
        count++;
        own += s.member[i] == s.member[t] ? x : 0;
        own_count += s.member[i] == s.member[t];
    }
    return how == WHOLE      ? sum / count
           : how == OF_PART  ? own / own_count
           : how == OF_SHARE ? own / count
                             : r->logp[t] - r->old_logp[t];
}

/* The mean over documents of their tokens' means, or over tokens, without KL. */
static double gspo(int how) {
    double total = 0, documents = 0, all = 0, tokens = 0;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++) {
        const row *r = &s.of[dp][a];
        double sum = 0, n = 0;
        for (int64_t t = cu_seqlens[d]; t <= last_of(d); t++) {
            double q, cut, A = r->advantages[t];
            if (r->labels[t] == NONE) continue;
            q = exp(log_ratio(r, d, t, how));
            cut = q < 0.8 ? 0.8 : q > 1.3 ? 1.3 : q;
            sum += -(q * A < cut * A ? q * A : cut * A);
            n++;
        }
        if (n == 0) continue;
        total += sum / n;
        documents++;
        all += sum;
        tokens += n;
    }
    return by_sequence() ? total / documents : all / tokens;
}

static void make_gspo(const char *reduction, int layout, int64_t sp) {
    begin("ppo", sp, 2, 2);
    s.reduction = reduction;
    s.kl_coef = 0;
    say_word("importance", "sequence");
    deal(layout);
    fill();
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) /* documents' ratios lie on both sides of the clip */
        s.of[dp][a].old_logp[t] += 0.6 * sin((double)document_of(&s.of[dp][a], t));
    set_loss(gspo(WHOLE));
}

static void test_gspo(const char *reduction) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int64_t sp = 1; sp <= SP; sp++) {
            make_gspo(reduction, layout, sp);
            expect(0, "right", "loss right: got");
            test_end("policy_right_gspo_%s_%s_P%lld", reduction, seqpar_layout_name(layout),
                     (long long)sp);
        }
    make_gspo(reduction, SEQPAR_LAYOUT_ZIGZAG, 3);
    expect_loss(gspo(OF_PART), "ratio_of_parts", "the mean over the rank's own tokens");
    expect_loss(gspo(OF_SHARE), "ratio_of_parts", "over the whole count");
    expect_loss(gspo(OF_TOKEN), "ratio_of_tokens", "loss wrong");
    expect_loss(gspo(WHOLE) + 0.1, "unknown", "loss wrong");
    set_loss(gspo(WHOLE));
    s.without = "cu_seqlens";
    expect_right("gspo_without_documents", "loss not judged: it takes cu_seqlens");
}

/* ---- PPO's advantages ---- */

static void test_group(const char *how) {
    begin("ppo", 3, 2, 2);
    s.advantage = how;
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
    expect_right(how, "rewards right: what documents' rewards and groups give");
    set_advantages(in_replica, 0);
    set_loss(right_loss());
    expect_named("baseline_of_one_replica", "first at rank 0, local row 2, token 2, document");
    set_advantages(in_row, 0);
    set_loss(right_loss());
    expect_named("baseline_of_one_replica", "of one micro-batch of it");
    set_advantages(in_batch, 0);
    set_loss(right_loss());
    expect_named("baseline_of_batch", "rewards wrong");
}

/* A document's advantage for all of its tokens, `far` documents on in the row. */
static void shift_advantages(int64_t far) {
    EACH_ROW(dp, a) {
        row *r = &s.of[dp][a];
        double of[DOCS];
        for (int64_t d = 0; d < r->docs; d++) of[d] = r->advantages[cu_seqlens[d]];
        for (int64_t t = 0; t < cu_seqlens[r->docs]; t++)
            r->advantages[t] = of[(document_of(r, t) + far + r->docs) % r->docs];
    }
    set_loss(right_loss());
}

static void shift_rewards(int64_t far) {
    double old[DP][MICRO][DOCS];
    EACH_ROW(dp, a) {
        row *r = &s.of[dp][a];
        memcpy(old[dp][a], r->rewards, sizeof r->rewards);
        for (int64_t d = 0; d < r->docs; d++)
            r->rewards[d] = old[dp][a][(d + far + r->docs) % r->docs];
    }
    set_advantages(in_group, 0);
    EACH_ROW(dp, a) memcpy(s.of[dp][a].rewards, old[dp][a], sizeof old[dp][a]);
    set_loss(right_loss());
}

/* Whitens advantages over supervised tokens of ranks or replicas, or of all. */
enum { ALL, RANK, RANK_MICRO, REPLICA, REPLICA_MICRO };
static int64_t white_group(int how, int64_t dp, int64_t a, int64_t t) {
    int64_t rank = dp * s.sp + s.member[t];
    return how == ALL             ? 0
           : how == RANK          ? rank
           : how == REPLICA       ? dp
           : how == REPLICA_MICRO ? dp * s.micro + a
                                  : rank * s.micro + a;
}

static void whiten(int how, int unbiased) {
    static double sum[RANKS * MICRO], squares[RANKS * MICRO], n[RANKS * MICRO];
    memset(sum, 0, sizeof sum);
    memset(squares, 0, sizeof squares);
    memset(n, 0, sizeof n);
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        double x = s.of[dp][a].advantages[t];
        int64_t g = white_group(how, dp, a, t);
        if (s.of[dp][a].labels[t] == NONE) continue;
        sum[g] += x;
        squares[g] += x * x;
        n[g]++;
    }
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        int64_t g = white_group(how, dp, a, t);
        double mean = sum[g] / n[g];
        double variance = (squares[g] - n[g] * mean * mean) / (n[g] - unbiased);
        s.of[dp][a].advantages[t] -= mean;
        if (variance > 1e-9) s.of[dp][a].advantages[t] /= sqrt(variance);
    }
    set_loss(right_loss());
}

/* What of a document is whitened: its advantage, or its reward as it is. */
static void rewards_alone(void) {
    EACH_ROW(dp, a) {
        row *r = &s.of[dp][a];
        for (int64_t t = 0; t < cu_seqlens[r->docs]; t++)
            r->advantages[t] = r->rewards[document_of(r, t)];
    }
}

static void test_whitening(void) {
    static const struct {
        int how;
        const char *text;
    } ways[] = {{RANK, "over the tokens of each rank"},
                {RANK_MICRO, "over the tokens of each rank's micro-batch"},
                {REPLICA, "over the tokens of each replica"},
                {REPLICA_MICRO, "over the tokens of each replica's micro-batch"}};
    for (int i = 0; i < 24; i++) {
        make_ppo(i / 2 % 3 ? "group" : "group_mean");
        if (i / 2 % 3 == 2) rewards_alone();
        whiten(ways[i / 6].how, i % 2);
        expect_named("whitened_by_rank", ways[i / 6].text);
    }
    make_ppo("group_mean");
    whiten(ALL, 0);
    expect_right("whitened", "no mistake of sequence parallelism");
}

static void test_advantages(void) {
    test_group("group");
    test_group("group_mean");
    test_group("rloo");
    make_ppo("group_mean");
    s.advantage = "rloo"; /* which is another baseline, and no mistake of ranks */
    expect_right("rloo_of_all", "the response itself is in the baseline's mean, too");
    make_ppo("group");
    set_advantages(in_group, 1);
    set_loss(right_loss());
    expect_right("unbiased", "with the unbiased deviation (n - 1): no mistake");
    set_advantages(in_replica, 1);
    set_loss(right_loss());
    expect_named("baseline_of_one_replica", "with the unbiased deviation");
    s.advantage = "group_mean";
    set_advantages(in_group, 0);
    set_loss(right_loss());
    s.advantage = "group";
    expect_named("std_missing", "rewards wrong");
}

static void test_wrong_documents(void) {
    for (int64_t far = -1; far <= 1; far += 2) {
        make_ppo("group");
        shift_advantages(far);
        expect_named("reward_on_wrong_document", "the advantage is that of the document");
        make_ppo("group");
        shift_rewards(far);
        expect_named("reward_on_wrong_document", "the reward is that of the document");
    }
}

static void test_unsplit_advantages(void) {
    for (int source = FIRST; source <= CONTIGUOUS; source++) {
        make_ppo("group");
        s.side = "advantages";
        s.source = source;
        EACH_ROW(dp, a)
        for (int64_t t = 0; t < TOKENS; t++) {
            row *r = &s.of[dp][a];
            if (t >= cu_seqlens[r->docs])
                r->advantages[t] = 7; /* padding: anything */
            else if (r->labels[t] == NONE)
                r->advantages[t] = 0; /* prompts: masked */
        }
        set_loss(mean_loss(SIDE_ADVANTAGES));
        expect_named("side_tensor_not_split",
                     source == FIRST ? "advantages: each rank takes the first n of the row"
                                     : "advantages: each rank takes what a contiguous split");
    }
    begin("ppo", 2, 1, 1); /* all 0, and contiguous shares of prompts would be 0, too */
    deal(SEQPAR_LAYOUT_CONTIGUOUS);
    fill();
    for (int64_t t = 0; t < TOKENS; t++) {
        if (t < s.held[0]) s.of[0][0].labels[t] = NONE;
        s.of[0][0].advantages[t] = 0;
    }
    set_loss(right_loss());
    expect_named("unknown", "rewards wrong: first at rank 1");
}

static void test_odd_advantages(void) {
    begin("ppo", 3, 1, 1);
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
    expect_unsaid("of_one_row", "baseline_of_one_replica");
    begin("ppo", 3, 2, 1);
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < DOCS; d++) s.of[dp][a].groups[d] += 10 * dp;
    set_advantages(in_group, 0);
    set_loss(right_loss());
    expect_right("groups_of_replicas", "so not excluded: baseline_of_one_replica");
    make_ppo("group"); /* a replica's baseline is that of all, a micro-batch's is not */
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < DOCS; d++) s.of[dp][a].groups[d] += 10 * dp;
    set_advantages(in_group, 0);
    set_loss(right_loss());
    expect_right("groups_of_replicas_in_rows",
                 "so not excluded: baseline_of_one_replica to see them");
    set_advantages(in_row, 0);
    set_loss(right_loss());
    expect_named("baseline_of_one_replica", "of one micro-batch of it");
    make_ppo("group");
    s.of[1][0].advantages[31] += 0.3;
    set_loss(right_loss());
    expect_named("unknown", "token 31, document 2 of micro-batch 0: advantage");
    s.of[1][0].advantages[31] = NAN;
    set_loss(1);
    expect_named("unknown", "rewards wrong");
}

static void set_groups(const int64_t *groups) {
    for (int64_t d = 0; d < DOCS; d++) s.of[0][0].groups[d] = groups[d];
}

static void set_document(int64_t d, double advantage) {
    for (int64_t t = cu_seqlens[d]; t <= last_of(d); t++) s.of[0][0].advantages[t] = advantage;
}

/* One of three responses is missing in the second group, and strides of three are taken. */
static void test_stride(void) {
    static const int64_t groups[] = {7, 7, 7, 2, 2, 5, 5, 5}, strides[] = {0, 0, 0, 1, 1, 1, 2};
    for (int unbiased = 0; unbiased < 2; unbiased++) {
        begin("ppo", 3, 1, 1);
        deal(SEQPAR_LAYOUT_ZIGZAG);
        fill();
        s.of[0][0].docs = 7; /* the last stride is not whole */
        set_groups(strides);
        set_advantages(in_group, unbiased);
        set_document(6, 0.125);
        set_groups(groups);
        set_loss(right_loss());
        expect_named("groups_by_stride",
                     unbiased ? "with the unbiased deviation" : "rewards wrong: first at");
        set_document(6, 0.125);
        set_document(0, 0.5);
        set_loss(right_loss());
        expect_named("unknown", "rewards wrong: first at");
    }
}

/* Rewards of one group are equal; of another there is one. */
static void test_alike(void) {
    static const int64_t groups[] = {0, 0, 1, 1, 1, 2, 0, 0};
    begin("ppo", 3, 1, 1);
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
    set_groups(groups);
    for (int64_t d = 2; d < 5; d++) s.of[0][0].rewards[d] = 0.95;
    set_advantages(in_group, 0);
    set_loss(right_loss());
    expect_right("alike", "what documents' rewards and groups give");
    for (int64_t d = 2; d < 5; d++) set_document(d, -2246.67);
    set_loss(right_loss());
    expect_named("deviation_by_cancellation", "have advantages up to -2246.67");
    set_document(6, 0.3); /* of another group */
    set_loss(right_loss());
    expect_named("unknown", "rewards wrong: first at");
    set_advantages(in_group, 0);
    set_document(5, s.of[0][0].rewards[5]);
    set_loss(right_loss());
    expect_named("unknown", "groups of one response have their reward as advantage");
}

/* The root of the mean square of documents' advantages, each once on each rank that trains it. */
static double usual_advantage(void) {
    double squares = 0, n = 0;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++)
        for (int64_t m = 0; m < s.sp; m++) {
            const row *r = &s.of[dp][a];
            int held = 0;
            for (int64_t t = cu_seqlens[d]; t <= last_of(d); t++)
                held |= s.member[t] == m && r->labels[t] != NONE;
            squares += held ? r->advantages[cu_seqlens[d]] * r->advantages[cu_seqlens[d]] : 0;
            n += held;
        }
    return sqrt(squares / n);
}

/* The largest reward of a document's group. */
static double largest_reward(int64_t group) {
    double largest = 0;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++)
        if (s.of[dp][a].groups[d] == group) largest = fmax(largest, s.of[dp][a].rewards[d]);
    return largest;
}

/* A document's advantage is off by so many limits; rewards of 16 bits make these wider. */
static void test_limits(void) {
    for (int i = 0; i < 12; i++) {
        row *r = &s.of[1][0];
        double mean, pop, unbiased, limit;
        make_ppo(i / 4 == 2 ? "group_mean" : "group");
        if (i / 4) s.rough = "rewards";
        moments(in_group, 1, 0, 2, &mean, &pop, &unbiased);
        limit = 1e-3 * fabs(r->advantages[31]) + 1e-4 * usual_advantage() +
                (i / 4 ? 4 * 0x1p-8 * largest_reward(r->groups[2]) : 0) /
                    (i / 4 == 2 ? 1 : pop + 1e-4);
        for (int64_t t = cu_seqlens[2]; t <= last_of(2); t++)
            r->advantages[t] += around_a_limit[i % 4].times * limit;
        set_loss(right_loss());
        expect(around_a_limit[i % 4].code, around_a_limit[i % 4].headline, "rewards ");
        test_end("policy_limit_of_advantages_%d_%g", i / 4, around_a_limit[i % 4].times);
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_policy("token"));
    TEST(test_policy("sequence"));
    TEST(test_low_ratios());
    TEST(test_gspo("sequence"));
    TEST(test_gspo("token"));
    TEST(test_advantages());
    TEST(test_wrong_documents());
    TEST(test_unsplit_advantages());
    TEST(test_odd_advantages());
    TEST(test_whitening());
    TEST(test_limits());
    TEST(test_stride());
    TEST(test_alike());
    return test_summary();
}
