/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on means over tokens and sequences: the right one, and one with each
   mistake. */
#define FOLDER "build/test_dump_means.d"
#include "support/dump_support.h"

/* ---- means ---- */

/* What each rank makes of documents by its own count of their tokens. */
enum { ADDED, AVERAGED, NON_EMPTY, POOLED, OF_RANKS, OWN };
static double local_means(int how, int64_t rank) {
    double total = 0, documents = 0, pieces = 0, ranks = 0;
    for (int64_t r = 0; r < s.world; r++) {
        double own = 0, count = 0, n;
        for (int64_t a = 0; a < s.micro; a++)
            for (int64_t d = 0; d < s.of[r / s.sp][a].docs; d++) {
                double sum = document_loss(&s.of[r / s.sp][a], d, r % s.sp, r % s.sp + 1, RIGHT,
                                           &n);
                if (n > 0) own += sum / n;
                count += n > 0;
            }
        total += own;
        pieces += count;
        ranks += own / count / (double)s.world;
        if (how == OWN && r == rank) return own / count;
    }
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++) {
        double n;
        document_loss(&s.of[dp][a], d, 0, s.sp, RIGHT, &n);
        documents += n > 0;
    }
    return how == ADDED      ? total / documents
           : how == AVERAGED ? total / documents / (double)s.sp
           : how == POOLED   ? total / pieces
                             : ranks;
}

static double local_means_of_non_empty(void) {
    double sum = 0, documents = 0;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++) {
        double means = 0, filled = 0, n;
        for (int64_t m = 0; m < s.sp; m++) {
            double part = document_loss(&s.of[dp][a], d, m, m + 1, RIGHT, &n);
            if (n > 0) means += part / n;
            filled += n > 0;
        }
        if (filled > 0) sum += means / filled;
        documents += filled > 0;
    }
    return sum / documents;
}

/* The mean over rows of their means over documents, or over tokens. */
static double mean_of_rows(int tokens) {
    double sum = 0, rows = 0;
    EACH_ROW(dp, a) {
        double own = 0, count = 0, n;
        for (int64_t d = 0; d < s.of[dp][a].docs; d++) {
            double one = document_loss(&s.of[dp][a], d, 0, s.sp, RIGHT, &n);
            if (n > 0) own += tokens ? one : one / n;
            count += tokens ? n : n > 0;
        }
        if (count > 0) sum += own / count;
        rows += count > 0;
    }
    return sum / rows;
}

static double mean_of_ranks(void) {
    double sum = 0;
    for (int64_t r = 0; r < s.world; r++) {
        double own = 0, count = 0, n;
        for (int64_t a = 0; a < s.micro; a++)
            for (int64_t d = 0; d < s.of[r / s.sp][a].docs; d++) {
                own += document_loss(&s.of[r / s.sp][a], d, r % s.sp, r % s.sp + 1, RIGHT, &n);
                count += n;
            }
        sum += own / count;
    }
    return sum / (double)s.world;
}

/* Each rank's shares of documents' means, by its shares of documents: nobody computes that. */
static double mean_of_shares(void) {
    double sum = 0;
    for (int64_t r = 0; r < s.world; r++) {
        double own = 0, count = 0, whole, n;
        for (int64_t a = 0; a < s.micro; a++)
            for (int64_t d = 0; d < s.of[r / s.sp][a].docs; d++) {
                const row *w = &s.of[r / s.sp][a];
                double part = document_loss(w, d, r % s.sp, r % s.sp + 1, RIGHT, &n);
                document_loss(w, d, 0, s.sp, RIGHT, &whole);
                if (whole > 0) own += part / whole;
                if (whole > 0) count += n / whole;
            }
        sum += own / count;
    }
    return sum / (double)s.world;
}

static void test_sequences(const char *objective) {
    make_by(objective, "sequence");
    expect_loss(mean_of_tokens(RIGHT), "mean_over_tokens", "loss wrong: got");
    expect_loss(local_means(ADDED, 0), "sequence_counts_local", "added over ranks");
    expect_loss(local_means(AVERAGED, 0), "sequence_counts_local", "averaged over ranks");
    expect_loss(local_means(POOLED, 0), "sequence_counts_local", "and ranks together");
    expect_loss(local_means(OF_RANKS, 0), "sequence_counts_local", "the mean over ranks of");
    expect_loss(local_means_of_non_empty(), "sequence_counts_local", "have a token of the");
    expect_loss(mean_of_rows(0), "mean_of_means", "replicas' micro-batches");
    expect_loss(right_loss() / 3, "shares_averaged", "over the ranks of a sequence");
    expect_loss(right_loss() / 6, "shares_averaged", "groups are ranks");
    expect_loss(right_loss() * 3, "losses_added", "over the ranks of a sequence");
    expect_loss(right_loss() * 2, "losses_added", "over replicas");
    expect_loss(NAN, "nan_of_an_empty_rank", "got nan");
    set_loss(right_loss());
    s.loss[4] = local_means(OWN, 4);
    expect_named("own_mean_alone", "as rank 4 reports it");
    set_loss(right_loss());
    s.loss[4] = local_means(OWN, 5);
    expect_named("unknown", "as rank 4 reports it");
    expect_loss(right_loss() * 1.31, "unknown", "no known way to divide these sums");
    expect_loss(mean_of_shares(), "unknown", "no known way to divide these sums");
    begin(objective, 1, 2, 2);
    s.reduction = "sequence";
    deal(SEQPAR_LAYOUT_CONTIGUOUS);
    fill();
    expect_unsaid("one_rank", "sequence_counts_local");
}

/* Some targets have id 0: over all targets they are lost, over the others with their count. */
static double mean_without_zero(int counted) {
    double sum = 0, count = 0;
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        const row *r = &s.of[dp][a];
        if (r->labels[t] == NONE) continue;
        if (r->labels[t]) sum += token_loss(r, t, RIGHT);
        count += counted || r->labels[t];
    }
    return sum / count;
}

static void test_zero(const char *objective) {
    make_by(objective, "token");
    EACH_ROW(dp, a)
    for (int64_t t = 3; t + 1 < TOKENS; t += 5)
        if (s.of[dp][a].labels[t] != NONE) s.of[dp][a].labels[t] = s.of[dp][a].ids[t + 1] = 0;
    expect_loss(mean_without_zero(0), "token_zero_ignored", "loss wrong: got");
    expect_loss(mean_without_zero(1), "token_zero_ignored", "they count all the same");
}

static void test_tokens(const char *objective) {
    make_by(objective, "token");
    expect_loss(mean_of_documents(RIGHT), "mean_over_sequences", "loss wrong: got");
    expect_loss(mean_of_rows(0), "mean_over_sequences", "and then the mean of rows");
    expect_loss(mean_of_rows(1), "mean_of_means", "replicas' micro-batches");
    expect_loss(mean_of_ranks(), "mean_of_means", "groups are ranks");
    expect_loss(local_means(ADDED, 0), "sequence_counts_local", "added over ranks");
    expect_loss(right_loss() / 3, "shares_averaged", "over the ranks of a sequence");
    expect_loss(right_loss() * 6, "losses_added", "over all ranks");
    for (int64_t t = 0; t < TOKENS; t++) s.of[1][1].labels[t] = NONE;
    expect_loss(mean_of_rows(0), "mean_over_sequences", "and then the mean of rows");
}

/* ---- means that are meant otherwise ---- */

/* Each row's sum over the ranks' own count, by rank, and its mean over micro-batches. */
static double local_count(int64_t rank, int whole) {
    double mean = 0, n, own;
    for (int64_t a = 0; a < s.micro; a++) {
        double sum = 0, count = 0;
        for (int64_t dp = 0; dp < s.dp; dp++)
            for (int64_t d = 0; d < s.of[dp][a].docs; d++) {
                double one = document_loss(&s.of[dp][a], d, 0, s.sp, RIGHT, &n);
                document_loss(&s.of[dp][a], d, rank % s.sp, rank % s.sp + 1, RIGHT, &own);
                if (whole || dp == rank / s.sp) sum += one;
                if (dp == rank / s.sp) count += own;
            }
        mean += sum / count / (double)s.micro;
    }
    return mean;
}

static void test_local_counts(void) {
    make_by("sft", "token");
    for (int whole = 0; whole < 2; whole++) {
        double mean = 0;
        set_loss(right_loss());
        s.loss[4] = local_count(4, whole);
        expect_named("local_count", "of each micro-batch, the sum of");
        for (int64_t r = 0; r < s.world; r++) mean += local_count(r, whole) / (double)s.world;
        expect_loss(mean, "local_count", "own count, averaged over ranks");
    }
    set_loss(right_loss());
    s.loss[4] = local_count(5, 0); /* another rank's count */
    expect_named("unknown", "as rank 4 reports it");
}

static const char *const designs[] = {"constant", "micro", "replica"};

static void test_designs_right(const char *objective) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int64_t sp = 1; sp <= SP; sp++) {
            begin(objective, sp, 1 + (sp + layout) % 3, 1 + layout % 2);
            s.reduction = designs[(layout + sp) % 3];
            deal(layout);
            fill();
            write_scene();
            /* one replica, or one row: the mean over all tokens is the same */
            if (!by_what("constant") && s.dp * (by_what("micro") ? s.micro : 1) == 1)
                expect(4, "insufficient", "the mean over tokens, or of ranks, is the same");
            else
                expect(0, "right", "loss right: got");
            test_end("objectives_right_%s_%s_%s_P%lld", objective, s.reduction,
                     seqpar_layout_name(layout), (long long)sp);
        }
}

static void test_designs(const char *objective) {
    for (int i = 0; i < 3; i++) {
        make_by(objective, designs[i]);
        expect_right(designs[i],
                     i ? "so N ranks and one rank differ by design" : "loss right: got");
        expect_loss(mean_of_tokens(RIGHT), "mean_over_tokens", "loss wrong: got");
        expect_loss(mean_of_documents(RIGHT), "mean_over_sequences", "loss wrong: got");
        expect_loss(mean_of_ranks(), "mean_of_means", "groups are ranks");
        if (i != 1) expect_loss(mean_of_groups(RIGHT, 0), "mean_of_means", "micro-batches");
        if (i != 2) expect_loss(mean_of_groups(RIGHT, 1), "mean_of_means", "replicas");
        expect_loss(right_loss() / 3, "shares_averaged", "over the ranks of a sequence");
        expect_loss(right_loss() * 2,
                    i == 2 ? "one of sum_of_means, losses_added" : "losses_added",
                    "over replicas");
        expect_loss(right_loss() * 1.31 + 0.01, "unknown", "no known way to divide");
        expect_loss(NAN, "unknown", "got nan");
    }
    make_by(objective, "micro"); /* a micro-batch without a token counts, or does not */
    for (int64_t t = 0; t < TOKENS; t++) s.of[1][1].labels[t] = NONE;
    set_loss(right_loss());
    expect_right("empty_micro_batch", "loss right: got");
    set_loss(right_loss() * 4 / 3);
    expect_right("empty_micro_batch_left_out", "are left out: no mistake");
    s.reduction = "replica";
    set_loss(mean_of_groups(RIGHT, 1));
    expect_right("half_empty_replica", "the means of 2 replicas");
    for (int64_t t = 0; t < TOKENS; t++) s.of[0][0].labels[t] = s.of[0][1].labels[t] = NONE;
    for (int64_t t = 0; t < TOKENS; t++) s.of[1][0].labels[t] = NONE;
    set_loss(0);
    expect(4, "insufficient", "nothing is counted");
    test_end("objectives_%s_nothing_counted", objective);
    make_by(objective, "constant");
    s.constant = 0;
    expect_refused(NULL, "reduction is 'constant' and reduction_constant is 0; write the");
    s.constant = 1;
    s.reduction = "tokens";
    expect_refused(NULL, "write token, sequence, constant, micro or replica");
}

/* ---- equal counts ---- */

/* Every row has as many documents and tokens as every other. */
static void make_equal(void) {
    EACH_ROW(dp, a) {
        row *r = &s.of[dp][a];
        r->docs = 4;
        for (int64_t t = cu_seqlens[4]; t < TOKENS; t++) r->labels[t] = NONE;
    }
    set_advantages(in_group, 0);
    set_loss(right_loss());
}

/* What equal counts hide does not hang on the objective. */
static void test_equal_counts(void) {
    static const char *const means[][2] = {{"sft", "token"},
                                           {"ppo", "token"},
                                           {"sft", "sequence"},
                                           {"ppo", "sequence"}},
                             *const documents[] = {"dpo", "rm", "kto"};
    for (int i = 0; i < 4; i++) {
        begin(means[i][0], 1, 2, 2);
        s.reduction = means[i][1];
        deal(SEQPAR_LAYOUT_CONTIGUOUS);
        fill();
        expect_right("unequal_counts", "loss right: got");
        make_equal();
        expect_nothing("equal_counts", "means is the same here");
    }
    for (int i = 0; i < 6; i++) {
        make(documents[i / 2], SEQPAR_LAYOUT_ZIGZAG, 3, 1 + i % 2, 2 - i % 2);
        make_equal();
        expect_nothing("equal_counts", "have unequal numbers of documents");
        make(documents[i / 2], SEQPAR_LAYOUT_ZIGZAG, 3, 1, 1);
        make_equal(); /* there is no other mean */
        expect_right("one_micro_batch", "loss right: got");
    }
}

/* ---- counts of other tokens ---- */

static double labels_of_step(void) {
    double labels = 0;
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) labels += s.of[dp][a].labels[t] != NONE;
    return labels;
}

/* The mean of the ranks of one place in the sequence, over all replicas; added over places. */
static double sum_of_places(void) {
    double all = 0;
    for (int64_t m = 0; m < s.sp; m++) {
        double sum = 0, count = 0, n;
        EACH_ROW(dp, a)
        for (int64_t d = 0; d < s.of[dp][a].docs; d++) {
            sum += document_loss(&s.of[dp][a], d, m, m + 1, RIGHT, &n);
            count += n;
        }
        all += sum / count;
    }
    return all;
}

/* The mean of each replica's micro-batch, added up over all. */
static double sum_of_rows(void) { return mean_of_rows(1) * (double)(s.micro * s.world / s.sp); }

static void test_counts(void) {
    double sum, labels, tokens;
    make_by("sft", "token");
    labels = labels_of_step();
    tokens = (double)(s.micro * s.world / s.sp * TOKENS);
    sum = right_loss() * labels;
    expect_loss(sum / (labels + 7), "one of counted_before_mask, another_window",
                "it is the sum of all tokens over");
    expect_loss(sum / (labels - 7), "another_window", "tokens have a label");
    expect_loss(sum / (tokens + 5), "another_window", "tokens have a label");
    expect_loss(sum / (tokens - 0.5), "unknown", "no known way to divide these sums");
    expect_loss(sum / (double)s.micro, "micro_batches_counted", "it is the sum of all tokens");
    expect_loss(sum / (double)(s.world * s.micro), "micro_batches_counted", "over 12, where");
    expect_loss(right_loss() * 2 / 3, "another_window",
                "the means of tokens, summed over 2 micro-batches and divided by 3");
    expect_loss(sum_of_rows() / 2 / 3, "mean_of_means and another_window",
                "the means of replicas' micro-batches, summed over 2 micro-batches and divided "
                "by 3");
    expect_loss(sum_of_rows() / 2, "sum_of_means", "divided by 1");
    expect_loss(sum_of_places(), "sum_of_means", "groups are places in the sequence");
    expect_loss(sum_of_places() / 3, "mean_of_means", "groups are places in the sequence");
    s.dtype = s.loss_dtype = SEQPAR_SAFETENSORS_BF16; /* no whole number can be told */
    expect_loss(sum / (labels + 77), "unknown", "no known way to divide these sums");
    make_by("ppo", "sequence");
    expect_loss(
        mean_of_rows(1), "row_taken_for_sequence",
        "it is what reduction micro gives: if that is meant, write it into the metadata");
    begin("sft", 3, 2, 1); /* one micro-batch: there is no other window but a longer one */
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
    sum = right_loss() * labels_of_step();
    expect_loss(sum / (labels_of_step() + 7), "counted_before_mask", "tokens have a label");
    expect_loss(sum / (labels_of_step() - 7), "unknown", "tokens have a label");
}

/* ---- options of a token's loss ---- */

/* Weights of tokens, 0 for some. */
static void weigh(void) {
    s.with_weights = 1;
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++)
        s.of[dp][a].weights[t] = t % 11 ? 0.25 + 0.125 * (double)(t % 7) : 0;
    set_loss(right_loss());
}

static double without_weights(void) {
    double loss;
    s.with_weights = 0;
    loss = right_loss();
    s.with_weights = 1;
    return loss;
}

static double sum_of_weights(void) {
    double sum = 0;
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++)
        sum += s.of[dp][a].labels[t] != NONE ? s.of[dp][a].weights[t] : 0;
    return sum;
}

/* The sum over the weights is no mistake with a name: packages differ, and the metadata can say
   it. */
static void test_mean_by_weights(const char *objective) {
    double sum, weights;
    char said_of[96];
    make_by(objective, "token");
    weigh();
    weights = sum_of_weights();
    sum = right_loss() * labels_of_step();
    snprintf(said_of, sizeof said_of, "their weights, %.6g", weights);
    expect_loss(sum / weights, "unknown", said_of);
    expect_loss(sum / weights, "unknown", "write reduction constant");
    expect_loss(sum / (weights + 0.5), "unknown", "no known way to divide these sums");
    s.reduction = "constant";
    s.constant = weights;
    set_loss(sum / weights);
    expect_right("mean_by_weights", "loss right: got");
}

static void test_weights(const char *objective, const char *reduction) {
    make_by(objective, reduction);
    weigh();
    expect_right("weights", "loss right: got");
    expect_loss(without_weights(), "option_not_applied", "option_not_applied: weights");
    expect_loss(mean_of_groups(RIGHT, 1) + 0.1, "unknown", "loss wrong");
    s.dtype = SEQPAR_SAFETENSORS_BF16;
    set_loss(right_loss());
    expect_right("weights_bf16", "loss right: got");
}

/* Terms of other numbers than logp: smoothing, z-loss, entropy. */
static void test_terms(const char *objective, const char *key, double *coef, double factor) {
    double plain;
    char said_of[96];
    make_by(objective, "token");
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        row *r = &s.of[dp][a];
        r->mean_logp[t] = r->logp[t] - 3 - 0.1 * (double)(t % 13);
        r->logits_lse[t] = 2 + 0.3 * (double)(t % 9);
        r->entropy[t] = 0.5 + 0.1 * (double)(t % 17);
    }
    plain = right_loss();
    *coef = factor;
    say(key, factor);
    weigh();
    expect_right(key, "loss right: got");
    s.with_weights = 0;
    set_loss(right_loss());
    expect_right(key, "loss right: got");
    snprintf(said_of, sizeof said_of, "option_not_applied: %s", key);
    expect_loss(plain, "option_not_applied", said_of);
    *coef = factor / 2;
    expect_loss(right_loss(), "unknown", "loss wrong");
    s.without = !strcmp(key, "z_loss")         ? "logits_lse"
                : !strcmp(key, "entropy_coef") ? "entropy"
                                               : "mean_logp";
    snprintf(said_of, sizeof said_of, "loss not judged: it takes %s, which %s takes", s.without,
             key);
    expect(0, "right", said_of);
    test_end("objectives_%s_without_%s", objective, s.without);
}

/* A second clip of bad tokens whose ratio is large. */
static void test_dual_clip(const char *reduction) {
    double plain;
    make_by("ppo", reduction);
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        s.of[dp][a].old_logp[t] = s.of[dp][a].logp[t] - (t % 5 ? 0 : 2);
    }
    plain = right_loss();
    s.dual_clip = 3;
    say("dual_clip", 3);
    s.without = "rewards";
    set_loss(right_loss());
    expect_right("dual_clip", "loss right: got");
    expect_loss(plain, "option_not_applied", "option_not_applied: dual_clip");
    s.dual_clip = 3.5; /* another one than is said */
    expect_loss(right_loss(), "unknown", "loss wrong");
}

/* The ratio is a weight, cut from above alone, of the log-prob. */
static void test_cispo(const char *reduction) {
    double plain;
    make_by("ppo", reduction);
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++)
        s.of[dp][a].old_logp[t] = s.of[dp][a].logp[t] - (t % 5 ? 0.2 : 2);
    plain = right_loss();
    s.cispo = 2.5;
    say("cispo", 2.5);
    s.without = "rewards";
    set_loss(right_loss());
    expect_right("cispo", "loss right: got");
    expect_loss(plain, "option_not_applied", "option_not_applied: dual_clip or cispo");
    expect_loss(mean_loss(NO_CLIP), "clip_missing", "loss wrong");
    expect_loss(mean_loss(INVERTED), "ratio_inverted", "loss wrong");
    s.cispo = 3.5; /* another one than is said */
    expect_loss(right_loss(), "unknown", "loss wrong");
}

/* The KL term is multiplied by the ratio, too, as TRL's use_bias_correction_kl has it. */
static void test_kl_ratio(const char *reduction) {
    static const int ways[] = {K1, K2, K3_TURNED};
    double plain;
    make_by("ppo", reduction);
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++)
        s.of[dp][a].old_logp[t] = s.of[dp][a].logp[t] - 0.3 * (double)(t % 3);
    plain = right_loss();
    s.kl_ratio = 1;
    say_word("kl_ratio", "token");
    s.without = "rewards";
    set_loss(right_loss());
    expect_right("kl_ratio", "loss right: got");
    expect_loss(plain, "option_not_applied", "option_not_applied: kl_ratio");
    expect_loss(mean_loss(NO_KL), "kl_missing", "loss wrong");
    for (int i = 0; i < 3; i++) expect_loss(mean_loss(ways[i]), "kl_estimator", "loss wrong");
    s.cispo = 2.5;
    say("cispo", 2.5);
    set_loss(right_loss());
    expect_right("kl_ratio_cispo", "loss right: got");
}

/* The last micro-batch of the last replica has no row at all, as dynamic batches leave one. */
static void leave_out_row(void) {
    row *r = &s.of[s.dp - 1][s.micro - 1];
    s.no_row = 1;
    r->docs = 0;
    for (int64_t t = 0; t < TOKENS; t++) r->labels[t] = NONE;
}

static void test_no_row(const char *objective, int64_t sp) {
    begin(objective, sp, 2, 2);
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
    leave_out_row();
    set_loss(right_loss());
    expect(0, "right", "loss right: got");
    test_end("means_no_row_%s_P%lld", objective, (long long)sp);
    set_loss(right_loss() * 1.1);
    expect(1, "wrong: unknown", "loss wrong: got");
    test_end("means_no_row_%s_P%lld_wrong", objective, (long long)sp);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_tokens("sft"));
    TEST(test_zero("sft"));
    TEST(test_tokens("ppo"));
    TEST(test_sequences("sft"));
    TEST(test_sequences("ppo"));
    TEST(test_local_counts());
    TEST(test_designs_right("sft"));
    TEST(test_designs_right("ppo"));
    TEST(test_designs("sft"));
    TEST(test_designs("ppo"));
    TEST(test_equal_counts());
    TEST(test_counts());
    TEST(test_weights("sft", "token"));
    TEST(test_weights("ppo", "token"));
    TEST(test_weights("ppo", "sequence"));
    TEST(test_mean_by_weights("sft"));
    TEST(test_mean_by_weights("ppo"));
    TEST(test_terms("sft", "label_smoothing", &s.smoothing, 0.1));
    TEST(test_terms("sft", "z_loss", &s.z_loss, 0.01));
    TEST(test_terms("ppo", "entropy_coef", &s.entropy_coef, 0.02));
    TEST(test_dual_clip("token"));
    TEST(test_dual_clip("sequence"));
    TEST(test_cispo("token"));
    TEST(test_cispo("sequence"));
    TEST(test_kl_ratio("token"));
    TEST(test_kl_ratio("sequence"));
    for (int64_t sp = 1; sp <= 3; sp += 2) {
        TEST(test_no_row("sft", sp));
        TEST(test_no_row("ppo", sp));
        TEST(test_no_row("dpo", sp));
        TEST(test_no_row("kto", sp));
        TEST(test_no_row("rm", sp));
    }
    return test_summary();
}
