/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on dumps of a layer's attention whose ranks err in what they hand to each
   other: hops that are lost or merged wrongly, and gradients and rows that belong elsewhere. */
#define FOLDER "build/test_dump_attention_hops.d"
#include "support/attention_scene.h"

/* ---- hops ---- */

static int not_in_hop(int64_t t, int64_t u) { return right(t, u) && hop_of(t, u) != hop; }

static void test_lost(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 4);
    lack(1, 2, 3, 0); /* the last hop */
    test_rule("hop_lost", "last", seeing(some_lost),
              "rank 0 lacks rank 1, rank 1 lacks rank 2");
    lack(-1, 0, 0, 0); /* nobody has rank 0's */
    test_rule("hop_lost", "source", seeing(some_lost), "(rank 1 lacks rank 0, rank 2 lacks");
    lack(-1, -1, 1, -1);
    test_rule("hop_lost", "one_rank", seeing(some_lost), "(rank 2 lacks rank 1)");
    make(SEQPAR_LAYOUT_CONTIGUOUS, 4);
    lack(-1, -1, -1, 2);
    test_rule("hop_lost", "contiguous", seeing(some_lost), "(rank 3 lacks rank 2)");
    for (hop = 1; hop < 3; hop++) {
        make(SEQPAR_LAYOUT_STRIPE, 3);
        right_step();
        backward(seeing(not_in_hop), s.x[LSE], delta_of_out());
        expect_named("hop_lost", hop == 1 ? "backward_1" : "backward_2",
                     hop == 1 ? "(hop 1, in the backward pass alone)"
                              : "(hop 2, in the backward pass alone)");
    }
}

/* Of each hop: out and lse of all queries; -Inf: it saw nothing. */
static double *hop_out[RANKS], *hop_lse[RANKS];

static void hops(void) {
    for (hop = 0; hop < s.sp; hop++) {
        forward(seeing(in_hop));
        free(hop_out[hop]);
        free(hop_lse[hop]);
        hop_out[hop] = malloc((size_t)size_of(OUT) * sizeof(double));
        hop_lse[hop] = malloc((size_t)size_of(LSE) * sizeof(double));
        memcpy(hop_out[hop], s.x[OUT], (size_t)size_of(OUT) * sizeof(double));
        memcpy(hop_lse[hop], s.x[LSE], (size_t)size_of(LSE) * sizeof(double));
    }
}

enum { BY_P, BY_MET, BY_HALVES, BY_SUM };

static void average(int how) {
    for (int64_t n = 0; n < size_of(LSE); n++) {
        double met = 0, *out = s.x[OUT] + n * s.out_dim;
        for (int64_t i = 0; i < s.out_dim; i++) out[i] = 0;
        for (int64_t k = 0; k < s.sp; k++) {
            if (hop_lse[k][n] == -INFINITY) continue;
            for (int64_t i = 0; i < s.out_dim; i++)
                out[i] = how == BY_HALVES && met > 0
                             ? (out[i] + hop_out[k][n * s.out_dim + i]) / 2
                             : out[i] + hop_out[k][n * s.out_dim + i];
            met++;
        }
        for (int64_t i = 0; how < BY_HALVES && i < s.out_dim; i++)
            out[i] /= how == BY_P ? (double)s.sp : met;
    }
}

/* Backward, each hop with the own lse plus `add`, or the right one; and the own delta, or the
   right one. */
static void backward_by_hops(int own_lse, int own_delta, double add) {
    double *lse = malloc((size_t)size_of(LSE) * sizeof *lse), *delta;
    both(right_rule());
    clear(DQ);
    for (hop = 0; hop < s.sp; hop++) {
        rule r = seeing(in_hop);
        delta = delta_of_out();
        for (int64_t n = 0; n < size_of(LSE); n++) {
            lse[n] = own_lse ? hop_lse[hop][n] + add : s.x[LSE][n];
            if (own_delta)
                delta[n] = dot(hop_out[hop] + n * s.out_dim, s.x[DOUT] + n * s.out_dim,
                               s.out_dim);
        }
        backward_bits(&r, lse, delta, F64);
    }
    free(lse);
}

static void test_averages(void) {
    static const char *const forms[] = {"sum over hops / P", "mean of the hops that saw a key",
                                        "two by two, in the ring's order", "sum over hops)"};
    for (int how = 0; how <= BY_SUM; how++) {
        make(SEQPAR_LAYOUT_ZIGZAG, 4);
        inputs_narrow();
        hops();
        both(right_rule());
        average(how);
        expect_named("outputs_averaged", forms[how], forms[how]);
    }
    backward_by_hops(1, 1, log(4));
    average(BY_P);
    expect_named("outputs_averaged", "backward", "outputs_averaged gives this out, dq, dk, dv");
}

/* What is merged and the next hop, each with the weight of the other; lse is right. */
static void test_weights_swapped(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 4);
    inputs_narrow();
    hops();
    both(right_rule());
    for (int64_t n = 0; n < size_of(LSE); n++) {
        double sum = 0, *out = s.x[OUT] + n * s.out_dim;
        for (int64_t k = 0; k < s.sp; k++) {
            double own = exp(hop_lse[k][n]);
            const double *part = hop_out[k] + n * s.out_dim;
            for (int64_t i = 0; i < s.out_dim && own > 0; i++)
                out[i] = sum > 0 ? (own * out[i] + sum * part[i]) / (own + sum) : part[i];
            sum += own;
        }
    }
    expect_named("merge_weights_swapped", "", "merge_weights_swapped gives this out");
}

static void test_lse(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    for (int64_t n = 0; n < size_of(LSE); n++) s.x[LSE][n] /= log(2);
    expect_named("lse_in_base_2", "", "lse_in_base_2 gives this lse ");
    right_step();
    for (int64_t n = 0; n < size_of(LSE); n++) {
        int64_t t = n / s.heads, h = n % s.heads;
        rule r = right_rule();
        double top = -INFINITY, slope;
        for (int64_t u = 0; u < s.tokens; u++)
            if (right(t, u)) top = fmax(top, score(&r, t, u, h, &slope));
        s.x[LSE][n] -= top;
    }
    expect_named("lse_without_maximum", "", "gives this lse ");
    hops();
    both(right_rule());
    for (int64_t n = 0; n < size_of(LSE); n++)
        for (int64_t k = 0; k < s.sp; k++)
            if (hop_lse[k][n] > -INFINITY) s.x[LSE][n] = hop_lse[k][n];
    expect_named("lse_of_last_hop", "", "(hop 2, or the last before it with a key)");
}

/* Scores of rank 1's keys are larger by more than 89: exp is Inf in F32. */
static void test_overflow(void) {
    make(SEQPAR_LAYOUT_CONTIGUOUS, 3);
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t h = 0; h < s.heads; h++) {
            at(Q, t, h)[0] = 30;
            at(K, t, h % s.kv_heads)[0] = s.rank[t] == 1 ? 12 : 1;
        }
    inputs_narrow();
    hops();
    both(right_rule());
    for (int64_t n = 0; n < size_of(LSE); n++) {
        double lse = hop_lse[0][n], *out = s.x[OUT] + n * s.out_dim;
        for (int64_t k = 1; k < s.sp; k++) {
            double part = hop_lse[k][n];
            if (part == -INFINITY || (lse < INFINITY && part - lse < 88.8)) continue;
            for (int64_t i = 0; i < s.out_dim; i++) /* a hop later it is exp(Inf - Inf) */
                out[i] = lse == INFINITY ? NAN : 0;
            s.x[LSE][n] = lse = INFINITY;
        }
    }
    expect_named("merge_overflows", "", "merge_overflows gives this out, lse");
}

static void test_deltas(void) {
    for (int how = 0; how < 3; how++) {
        static const char *const forms[] = {"(delta of each hop)",
                                            "(delta and lse of each hop)", "(lse of each hop)"};
        make(SEQPAR_LAYOUT_ZIGZAG, 3);
        inputs_narrow();
        hops();
        backward_by_hops(how > 0, how < 2, 0);
        expect_named("delta_of_hop", forms[how], forms[how]);
    }
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    double *none = calloc((size_t)size_of(LSE), sizeof *none);
    backward(right_rule(), s.x[LSE], none);
    free(none);
    expect_named("delta_missing", "", "delta_missing gives this dq, dk ");
}

/* ---- gradients ---- */

static void test_gradients(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 4);
    right_but(DQ, seeing(own_alone));
    expect_named("dq_of_one_hop", "own", "gives this dq (own keys and queries)");
    hop = 3;
    right_but(DQ, seeing(in_hop));
    expect_named("dq_of_one_hop", "last", "gives this dq (those of hop 3)");
    right_but(DK, seeing(own_alone));
    expect_named("dkv_not_returned", "own", "gives this dk (own keys and queries)");
    right_but(DV, seeing(own_alone));
    expect_named("dkv_not_returned", "dv", "gives this dv (own keys and queries)");
    make_even(SEQPAR_LAYOUT_ZIGZAG, 4);
    right_step();
    for (int t = DK; t <= DV; t++) { /* the last hop home is missing */
        double *x = malloc((size_t)size_of(t) * sizeof *x);
        int64_t n = heads_of(t) * width(t);
        for (int64_t u = 0; u < s.tokens; u++)
            memcpy(x + u * n, at(t, s.token[(s.rank[u] + 1) % 4][s.local[u]], 0),
                   (size_t)n * sizeof *x);
        copy(t, x);
        free(x);
    }
    expect_named("dkv_not_returned", "shifted", "(rank r has those of rank (r + 1) mod P)");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.out_dim = s.dim;
    randomize();
    right_step();
    for (int64_t i = 0; i < size_of(DK); i++) {
        double x = s.x[DK][i];
        s.x[DK][i] = s.x[DV][i];
        s.x[DV][i] = x;
    }
    expect_named("dk_dv_swapped", "", "gives this dk, dv ");
}

static int64_t only_rank;
static int by_one_rank(int64_t t, int64_t u) { return right(t, u) && s.rank[t] == only_rank; }

/* dk and dv of llama3, where their sum over ranks is taken. */
static void test_scatter(void) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
        char form[40];
        make(layout, 2 + layout % 3);
        only_rank = s.sp - 1;
        right_but(DK, seeing(by_one_rank));
        snprintf(form, sizeof form, "(queries of rank %lld alone)", (long long)only_rank);
        expect_named("dkv_not_returned", form, form);
        make(layout, 5 - layout % 4);
        right_step();
        for (int t = DK; t <= DV; t++)
            for (int64_t i = 0; i < size_of(t); i++) s.x[t][i] /= (double)s.sp;
        if (s.sp != 3) /* 3 is the group, too */
            expect_named("dkv_averaged", "mean", "dkv_averaged gives this dk, dv (1 / P)");
        for (int t = DK; t <= DV; t++)
            for (int64_t i = 0; i < size_of(t); i++) s.x[t][i] *= (double)(s.sp * s.sp);
        expect_named("dkv_averaged", "twice", "dkv_averaged gives this dk, dv (times P)");
    }
}

static void test_scales(void) {
    for (int t = DQ; t <= DK; t++) {
        make(SEQPAR_LAYOUT_ZIGZAG, 3);
        right_step();
        for (int64_t i = 0; i < size_of(t); i++) s.x[t][i] /= s.scale;
        expect_named("dq_scale_missing", names[t],
                     t == DQ ? "gives this dq " : "gives this dk ");
    }
}

static int64_t only_head; /* of each group */
static void backward_of_head(void) {
    double *kept = malloc((size_t)size_of(DOUT) * sizeof *kept);
    right_step();
    memcpy(kept, s.x[DOUT], (size_t)size_of(DOUT) * sizeof *kept);
    for (int64_t n = 0; n < size_of(LSE); n++)
        if (n % 3 != only_head)
            memset(s.x[DOUT] + n * s.out_dim, 0, (size_t)s.out_dim * sizeof(double));
    backward(right_rule(), s.x[LSE], delta_of_out());
    copy(DOUT, kept);
    free(kept);
}

static void test_groups(void) {
    double *dq;
    for (only_head = 0; only_head < 3; only_head += 2) {
        make(SEQPAR_LAYOUT_ZIGZAG, 3);
        right_step();
        dq = malloc((size_t)size_of(DQ) * sizeof *dq);
        memcpy(dq, s.x[DQ], (size_t)size_of(DQ) * sizeof *dq);
        backward_of_head();
        copy(DQ, dq);
        free(dq);
        expect_named("kv_group_not_summed", only_head ? "last" : "first",
                     only_head ? "(head 2 of each group alone)"
                               : "(head 0 of each group alone)");
    }
    make(SEQPAR_LAYOUT_ZIGZAG, 4); /* P is not the group */
    right_step();
    for (int t = DK; t <= DV; t++)
        for (int64_t i = 0; i < size_of(t); i++) s.x[t][i] /= 3;
    expect_named("kv_group_not_summed", "mean", "gives this dk, dv (the mean)");
}

/* ---- rows that belong elsewhere ---- */

/* Heads of 3 ranks, 2 each, in the order of the buffer that came: 0 2 4 1 3 5. */
static int64_t heads_as_came(int64_t token, int64_t head) {
    return token * s.heads + head % 3 * 2 + head / 3;
}
static int64_t kv_swapped(int64_t token, int64_t head) { return token * s.kv_heads + 1 - head; }
/* The rank's rows came as (heads, tokens) and are read as (tokens, heads). */
static int64_t turned(int64_t token, int64_t head) {
    int64_t rank = s.rank[token], at = s.local[token] * s.heads + head, n = s.held[rank];
    return s.token[rank][at % n] * s.heads + at / n;
}

/* Two mistakes at once have no name: what is wrong is told by where it is. */
static void test_where(void) {
    make(SEQPAR_LAYOUT_CONTIGUOUS, 3);
    right_step();
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t i = 0; i < s.out_dim; i++) at(OUT, t, 4)[i] *= 1.3, at(OUT, t, 5)[i] += 1;
    expect_said("where_heads", 1, "wrong: unknown",
                "of out 118 of 354 rows are wrong; only heads 4..5");
    right_step();
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t h = 0; h < s.heads && s.rank[t] == 1; h++)
            at(DQ, t, h)[h % s.dim] += 1 + (double)t;
    expect_said("where_ranks", 1, "wrong: unknown", " rows are wrong; only ranks 1");
    right_step();
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t h = 0; h < s.heads && document_of(t) == 2; h++)
            at(OUT, t, h)[0] += 0.1 * (double)(t % 7 + 1);
    expect_said("where_documents", 1, "wrong: unknown", "; only documents that are cut");
    right_step();
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t h = 0; h < s.heads && s.rank[s.cu[document_of(t)]] != s.rank[t]; h++)
            at(OUT, t, h)[0] += 0.1 * (double)(t % 7 + 1);
    expect_said("where_seen", 1, "wrong: unknown", "; only queries that see keys of");
    right_step();
    for (int64_t i = 0; i < size_of(OUT); i++) s.x[OUT][i] += 0.1 * sin((double)i);
    expect_said("where_all", 1, "wrong: unknown",
                "of out 354 of 354 rows are wrong, of all heads, ranks and documents");
}

static void test_moved(void) {
    make(SEQPAR_LAYOUT_CONTIGUOUS, 3);
    right_step();
    move_rows(OUT, heads_as_came);
    expect_named("heads_permuted", "", "heads_permuted gives this out (token");
    right_step();
    move_rows(DK, kv_swapped);
    expect_named("heads_permuted", "dk", "heads_permuted gives this dk (token");
    right_step();
    move_rows(OUT, turned);
    expect_named("tokens_permuted", "turned", "tokens_permuted gives this out (token");
    right_step();
    move_rows(LSE, turned);
    expect_named("tokens_permuted", "lse", "(heads, tokens) read as (tokens, heads)");
    make(SEQPAR_LAYOUT_ZIGZAG, 4);
    right_step();
    move_rows(OUT, in_ranks_order);
    move_rows(DQ, in_ranks_order);
    expect_named("tokens_permuted", "", "tokens_permuted gives this out, dq (token");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_lost());
    TEST(test_averages());
    TEST(test_weights_swapped());
    TEST(test_lse());
    TEST(test_overflow());
    TEST(test_deltas());
    TEST(test_gradients());
    TEST(test_scatter());
    TEST(test_where());
    TEST(test_scales());
    TEST(test_groups());
    TEST(test_moved());
    return test_summary();
}
