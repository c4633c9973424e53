/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on dumps of a layer's attention: right ones in every layout, and one
   with each mistake in what a query sees; what is no mistake, what shows nothing, and what has
   no name. */
#define FOLDER "build/test_dump_attention.d"
#include "support/attention_scene.h"

/* ---- right ones ---- */

static void test_right(void) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int64_t sp = 1; sp <= 4; sp++) {
            make(layout, sp);
            if (sp == 3) s.window = 6;
            if (layout % 2) s.softcap = 3;
            right_step();
            write_scene();
            expect(0, "right", "attention right:");
            test_end("attention_right_%s_P%lld", seqpar_layout_name(layout), (long long)sp);
        }
}

/* ---- who sees whom, wrongly ---- */

static int ignores_documents(int64_t t, int64_t u) { return u <= t && in_window(t - u); }
static int looks_ahead(int64_t t, int64_t u) { return together(t, u) && in_window(t - u); }
static int sees_all(int64_t t, int64_t u) { return in_window(t - u); }
static int by_rows(int64_t t, int64_t u) {
    return together(t, u) && s.local[u] <= s.local[t] && in_window(s.local[t] - s.local[u]);
}
static int without_window(int64_t t, int64_t u) { return together(t, u) && u <= t; }
static int window_by_rows(int64_t t, int64_t u) {
    return without_window(t, u) && in_window(s.local[t] - s.local[u]);
}
static int window_by_rows_bound(int64_t t, int64_t u) {
    return window_by_rows(t, u) && s.local[u] <= s.local[t];
}

/* Halves of ranks' rows. */
static int half_of(int64_t t) { return 2 * s.local[t] >= s.held[s.rank[t]]; }
static int first_travels(int64_t t, int64_t u) {
    return right(t, u) && (s.rank[t] == s.rank[u] || !half_of(u));
}
static int second_travels(int64_t t, int64_t u) {
    return right(t, u) && (s.rank[t] == s.rank[u] || half_of(u));
}
static int first_updated(int64_t t, int64_t u) {
    return right(t, u) && (s.rank[t] == s.rank[u] || !half_of(t));
}
static int second_updated(int64_t t, int64_t u) {
    return right(t, u) && (s.rank[t] == s.rank[u] || half_of(t));
}
static int later_lost(int64_t t, int64_t u) {
    return right(t, u) && (s.rank[u] <= s.rank[t] || !half_of(t));
}

static int64_t taken[MOST]; /* where a token is taken to be */
static int by_taken(int64_t t, int64_t u) { return right(taken[t], taken[u]); }

static int by_rows_in_window(int64_t t, int64_t u) {
    return together(t, u) && s.local[u] <= s.local[t] && in_window(t - u);
}

static void test_masks(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    test_rule("documents_ignored", "", seeing(ignores_documents), "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_CONTIGUOUS, 3);
    test_rule("looks_ahead", "", seeing(looks_ahead), "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_STRIPE, 4);
    test_rule("mask_missing", "", seeing(sees_all), "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_CONTIGUOUS, 4);
    test_rule("causal_by_local_row", "", seeing(by_rows), "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.window = 5;
    test_rule("causal_by_local_row", "window", seeing(by_rows), "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.window = 5;
    test_rule("causal_by_local_row", "placed", seeing(by_rows_in_window), "goes by places");
    make(SEQPAR_LAYOUT_ZIGZAG, 4);
    test_rule("own_tokens_only", "", seeing(own_alone), "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_CONTIGUOUS, 1);
    test_rule("looks_ahead", "P1", seeing(looks_ahead), "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    backward(seeing(ignores_documents), s.x[LSE], delta_of_out());
    expect_named("documents_ignored", "backward",
                 "this dq, dk, dv (in the backward pass alone)");
}

/* ---- rows of gathered keys, bounds that are one off ---- */

static int64_t gathered(int64_t t) {
    int64_t before = 0;
    for (int64_t r = 0; r < s.rank[t]; r++) before += s.held[r];
    return before + s.local[t];
}
static int64_t from_end(int64_t t) { return s.local[t] + s.tokens - s.held[s.rank[t]]; }
static int gathered_form; /* how rows of queries are counted */
static int64_t form_rows(int64_t t) {
    return gathered_form == 2 ? gathered(t) : gathered_form ? from_end(t) : s.local[t];
}
static int by_gathered(int64_t t, int64_t u) {
    int64_t distance = form_rows(t) - gathered(u);
    return together(t, u) && distance >= 0 && in_window(distance);
}
static int window_by_gathered(int64_t t, int64_t u) {
    return without_window(t, u) && in_window(form_rows(t) - gathered(u));
}
static int next_too(int64_t t, int64_t u) {
    return together(t, u) && u <= t + 1 && in_window(t - u);
}
static int not_itself(int64_t t, int64_t u) { return right(t, u) && u != t; }
static int one_more(int64_t t, int64_t u) { return without_window(t, u) && t - u <= s.window; }
static int one_less(int64_t t, int64_t u) {
    return without_window(t, u) && t - u < s.window - 1;
}

/* llama3, with keys of all ranks, and Ulysses, with queries, too: in every layout in which rows
   are not places. */
static void test_gathered(void) {
    static const char *const forms[] = {"(keys' rows are those of all ranks' gathered keys)",
                                        "(the same, queries aligned with the last of them)",
                                        "(rows of all ranks' tokens, gathered)"};
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (gathered_form = 0; gathered_form < 3; gathered_form++) {
            if (gathered_form == 2 && layout == SEQPAR_LAYOUT_CONTIGUOUS) continue;
            make(layout, 3);
            inputs_narrow();
            both(seeing(by_gathered));
            expect_named("causal_by_local_row", forms[gathered_form], forms[gathered_form]);
            make(layout, 4);
            s.window = 5;
            inputs_narrow();
            both(seeing(window_by_gathered));
            expect_among("window_by_local_row", forms[gathered_form]);
        }
}

static void test_off_by_one(void) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
        make(layout, 1 + layout % 4);
        test_rule("causal_off_by_one", "next", seeing(next_too), "the next token is seen");
        make(layout, 4 - layout % 4);
        test_rule("causal_off_by_one", "own", seeing(not_itself), "the own token is not seen");
        make(layout, 1 + layout % 4);
        s.window = 4;
        test_rule("window_off_by_one", "more", seeing(one_more), "(one token more)");
        test_rule("window_off_by_one", "less", seeing(one_less), "(one token less)");
    }
}

static void test_options(void) {
    rule r;
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.scale = 0.21;
    r = right_rule();
    r.scale = 1 / sqrt(7);
    test_rule("scale_missing", "", r, "lse, dq, dk, dv (1 / sqrt(head_dim))");
    r.scale = 1;
    test_rule("scale_missing", "one", r, "lse, dq, dk, dv (1)");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.softcap = 1.5;
    r = right_rule();
    r.softcap = 0;
    test_rule("softcap_missing", "", r, "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    r = right_rule();
    r.in_turn = 1;
    test_rule("kv_heads_in_turn", "", r, "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_CONTIGUOUS, 3);
    s.window = 5;
    test_rule("window_missing", "", seeing(without_window), "this out, lse, dq, dk, dv");
    test_rule("window_by_local_row", "", seeing(window_by_rows), "this out, lse, dq, dk, dv");
    test_rule("window_by_local_row", "bound", seeing(window_by_rows_bound),
              "lse, dq, dk, dv (and nobody of a later row)");
}

/* Where tokens would be if the rank's rows were those of another layout. */
static void take_for(int layout) {
    int64_t kept[RANKS][64], held[RANKS], sp = s.sp;
    for (int64_t r = 0; r < sp; r++)
        for (int64_t i = 0; i < s.held[r]; i++) kept[r][i] = s.token[r][i];
    split(layout, sp);
    memcpy(held, s.held, sizeof held);
    for (int64_t r = 0; r < sp; r++)
        for (int64_t i = 0; i < held[r]; i++) taken[kept[r][i]] = s.token[r][i];
    memset(s.held, 0, sizeof s.held);
    for (int64_t r = 0; r < sp; r++)
        for (int64_t i = 0; i < held[r]; i++) take(kept[r][i], r);
}

static void test_layouts(void) {
    static const struct {
        int is, taken;
        int64_t sp;
        const char *form;
    } table[] = {
        {SEQPAR_LAYOUT_ZIGZAG, SEQPAR_LAYOUT_CONTIGUOUS, 4, "(contiguous)"},
        {SEQPAR_LAYOUT_CONTIGUOUS, SEQPAR_LAYOUT_ZIGZAG, 2, "(zigzag)"},
        {SEQPAR_LAYOUT_ZIGZAG, SEQPAR_LAYOUT_STRIPE, 4, "(stripe)"},
        {SEQPAR_LAYOUT_ZIGZAG, SEQPAR_LAYOUT_ZIGZAG_DOC, 4, "(zigzag in each document)"},
        {SEQPAR_LAYOUT_ZIGZAG_DOC, SEQPAR_LAYOUT_ZIGZAG, 4, "(zigzag)"}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        make_even(table[i].is, table[i].sp);
        take_for(table[i].taken);
        test_rule("layout_mistaken", table[i].form, seeing(by_taken), table[i].form);
    }
}

static void test_stale(void) {
    rule stale = {right, own_row, 0, 0, 0};
    make_even(SEQPAR_LAYOUT_ZIGZAG, 4);
    stale.scale = s.scale;
    test_rule("stale_kv", "", stale, "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_CONTIGUOUS, 4); /* the last rank has fewer rows */
    stale.sees = has_own_row;
    test_rule("stale_kv", "uneven", stale, "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    stale.sees = has_own_row;
    backward(stale, s.x[LSE], delta_of_out());
    expect_named("stale_kv", "backward", "(in the backward pass alone)");
}

static int64_t hop_shift; /* 1: the hop before, whose keys are of the rank after */
static int64_t of_hop(int64_t t, int64_t u) {
    int64_t rank = s.rank[t] == s.rank[u] ? s.rank[u] : (s.rank[u] + hop_shift) % s.sp;
    return s.token[rank][s.local[u]];
}

static void test_stale_hops(void) {
    rule stale = {right, of_hop, 0, 0, 0};
    for (int i = 0; i < 4; i++) {
        make_even(i / 2 ? SEQPAR_LAYOUT_STRIPE : SEQPAR_LAYOUT_ZIGZAG, 4);
        hop_shift = i % 2 ? 3 : 1;
        stale.scale = s.scale;
        test_rule("stale_kv", i % 2 ? "after" : "before", stale,
                  i % 2 ? "(those of the hop after)" : "(those of the hop before)");
    }
}

/* More ranks than kv heads. */
static void test_heads_of_ranks(void) {
    rule r;
    make(SEQPAR_LAYOUT_CONTIGUOUS, 3);
    r = right_rule();
    r.in_turn = 2;
    test_rule("kv_heads_by_rank", "in_turn", r, "(rank r takes kv head r mod kv_heads)");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    r.in_turn = 3;
    test_rule("kv_heads_by_rank", "from_0", r, "(each rank counts kv heads from 0)");
}

static void test_halves(void) {
    static const struct {
        const char *name, *form;
        int (*sees)(int64_t t, int64_t u);
    } table[] = {
        {"half_not_exchanged", "(the first halves alone travel)", first_travels},
        {"half_not_exchanged", "(the second halves alone travel)", second_travels},
        {"half_not_updated", "(the second half is not)", first_updated},
        {"half_not_updated", "(the first half is not)", second_updated},
        {"half_not_updated", "(the second half is not, from later ranks)", later_lost}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        make(SEQPAR_LAYOUT_ZIGZAG, 4);
        test_rule(table[i].name, table[i].form, seeing(table[i].sees), table[i].form);
    }
}

/* ---- what is no mistake, and what shows nothing ---- */

static void test_odd_but_right(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    s.padding = 1;
    expect_said("nan_in_padding", 0, "right", "attention right");
    s.padding = 0;
    s.lead = 1;
    expect_said("leading_ones", 0, "right", "attention right");
    s.lead = 0;
    s.skip = 1u << LSE | 1u << DK | 1u << DV;
    expect_said("dq_alone", 0, "right", "dq is ");
    s.skip = 1u << DOUT;
    expect_said("without_dout", 0, "right", "lse is ");
    test_expect(!strstr(said, " dq is "), "dq is judged without dout");
    test_end("attention_without_dout_no_dq");
    s.skip = 1u << OUT;
    expect_said("without_out", 4, "insufficient", "attention not judged: it takes index, cu");
}

static void test_odd_texts(void) {
    for (int empty = 0; empty < 2; empty++) {
        make_sized(5, 1, (const int64_t[]){0, 5});
        randomize();
        s.sp = 4; /* rank 1 holds nothing; with no tensors then, or empty ones */
        for (int64_t t = 0; t < 5; t++) take(t, t == 4 ? 3 : t < 2 ? 0 : 2);
        s.odd = empty ? "empty" : NULL;
        right_step();
        expect_said("empty_rank", 0, "right", "attention right");
        lack(-1, -1, 0, -1);
        both(seeing(some_lost));
        expect_named("hop_lost", "empty_rank", "(rank 2 lacks rank 0)");
    }
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    memset(s.x[DOUT], 0, (size_t)size_of(DOUT) * sizeof(double));
    backward(right_rule(), s.x[LSE], delta_of_out());
    expect_said("dout_0", 0, "right", "dout is 0 everywhere: gradients show nothing");
    make_sized(47, 1, (const int64_t[]){0, 47});
    randomize();
    split(SEQPAR_LAYOUT_CONTIGUOUS, 3);
    right_step();
    s.no_documents = 1;
    expect_said("no_cu_seqlens", 0, "right", "attention right");
    /* whole documents on ranks; one document is empty */
    make_sized(6, 4, (const int64_t[]){0, 2, 2, 4, 6});
    randomize();
    s.sp = 3;
    for (int64_t t = 0; t < 6; t++) take(t, t / 2);
    right_step();
    expect_said("documents_of_ranks", 0, "right", "the exchange is not shown");
}

/* All queries or keys 0, documents of one token, one token in all. */
static void test_shows_nothing(void) {
    make_sized(5, 5, (const int64_t[]){0, 1, 2, 3, 4, 5});
    randomize();
    split(SEQPAR_LAYOUT_STRIPE, 3);
    right_step();
    expect_said("documents_of_one_token", 0, "right", "the exchange is not shown");
    make_sized(1, 1, (const int64_t[]){0, 1});
    randomize();
    split(SEQPAR_LAYOUT_CONTIGUOUS, 1);
    right_step();
    expect_said("one_token", 4, "insufficient", "dump a longer text of several ranks");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    for (int64_t i = 0; i < size_of(V); i++) s.x[V][i] = 1 + i % (s.kv_heads * s.out_dim);
    right_step();
    expect_said("equal_values", 4, "insufficient", "out is the same if ranks exchange nothing");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    *at(K, 17, 0) = NAN;
    expect_said("nan_in_k", 4, "insufficient", "q, k, v or dout hold NaN or Inf");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    s.bits = s.stored = F64;
    *at(V, 17, 0) = 1e300;
    *at(DOUT, 30, 0) = 1e300;
    expect_said("overflow", 4, "insufficient", "squares of results overflow fp64");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    s.cu[s.docs] = s.tokens + 2; /* nobody holds the last */
    expect_said("tokens_missing", 1, "wrong: token_lost", "insufficient: tokens are missing");
    s.cu[s.docs] = s.tokens;
    s.odd = "twice";
    expect_said("tokens_twice", 1, "wrong: token_held_twice", "are held twice");
}

static void test_several(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    s.accumulation = 3;
    s.micro = s.dp = 2;
    expect_said("replicas", 0, "right", "micro-batch 2 of replica 0: 59 tokens");
    s.odd = "replica";
    expect_said("replica_wrong", 1, "wrong: unknown",
                "micro-batch 2 of replica 1: 59 tokens, 6 heads, 2 kv heads; limits are 3");
    test_expect(strstr(said, "first at rank 3, local row 0, token 0, document 0") != NULL,
                "said '%.900s'", said);
    test_end("attention_replica_rank");
}

static void test_nan(void) {
    for (int t = OUT; t < TENSORS; t++) {
        make(SEQPAR_LAYOUT_ZIGZAG, 3);
        right_step();
        at(t, 20, 1)[0] = t % 2 ? NAN : INFINITY;
        expect_said("nan", 1, "wrong: unknown", "first at rank 2, local row 1, token 20");
        test_expect(strstr(said, "token 20, document 2, head 1: element 0 is ") != NULL,
                    "said '%.400s'", strstr(said, "first at"));
        test_end("attention_nan_of_%s", names[t]);
    }
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    for (int64_t i = 0; i < size_of(OUT); i++) s.x[OUT][i] = NAN;
    expect_said("all_nan", 1, "wrong: unknown", "no known mistake gives this out");
}

/* One row, far below the distance of the whole that is allowed in BF16. */
static void test_one_row(void) {
    make_sized(600, 1, (const int64_t[]){0, 600});
    s.bits = s.stored = BF16;
    randomize();
    split(SEQPAR_LAYOUT_ZIGZAG, 2);
    inputs_narrow();
    forward(right_rule());
    s.skip = ~15u & ~(1u << OUT);
    expect_said("all_rows", 0, "right", "attention right");
    for (int64_t i = 0; i < s.out_dim; i++) at(OUT, 377, 4)[i] += 0.2 * (i % 2 ? 1 : -1);
    expect_said("one_row", 1, "wrong: unknown",
                "first at rank 1, local row 227, token 377, document 0, head 4: element");
}

static void test_follows(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    for (int64_t i = 0; i < size_of(OUT); i++) s.x[OUT][i] += 0.1 * sin((double)i);
    backward(right_rule(), s.x[LSE], delta_of_out());
    expect_said("follows", 1, "wrong: unknown",
                "right for the out that was dumped: dq, dk no known mistake gives this out; ");
}

/* Without cu_seqlens a mismatch may come of packing, unless positions say that there is
   none. */
static void test_packed(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    s.no_documents = 1;
    expect_said("packed", 4, "insufficient",
                "the row may be packed; give cu_seqlens, 0 and 59");
    s.positions = 2;
    expect_said("packed_positions", 4, "insufficient",
                "the row may be packed; give cu_seqlens");
    at(OUT, 20, 0)[1] = NAN;
    expect_said("packed_nan", 1, "wrong: unknown", "attention wrong");
    make_sized(47, 1, (const int64_t[]){0, 47});
    randomize();
    split(SEQPAR_LAYOUT_CONTIGUOUS, 3);
    inputs_narrow();
    both(seeing(looks_ahead));
    s.no_documents = s.positions = 1;
    expect_named("looks_ahead", "positions", "this out, lse, dq, dk, dv");
}

/* ---- more than is looked at ---- */

/* One of 80 micro-batches, so that little time is given to it. */
static void make_long(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t sp) {
    make_sized(tokens, 1, (const int64_t[]){0, tokens});
    s.heads = heads;
    s.kv_heads = kv_heads;
    s.dim = 4;
    s.out_dim = 3;
    s.scale = 0.5;
    s.accumulation = 80;
    randomize();
    split(SEQPAR_LAYOUT_ZIGZAG, sp);
    inputs_narrow();
}

/* Some kv heads, or some queries of one. */
static void test_sampled(void) {
    make_long(4001, 8, 4, 3);
    s.skip = ~15u & ~(1u << OUT) & ~(1u << LSE);
    forward(right_rule());
    expect_said("sampled_heads", 0, "right",
                "looked at: 1 kv heads with their queries' heads, 4001 of 4001 queries");
    for (int64_t t = 1700; t < 4001; t++) at(OUT, t, 0)[1] *= 2;
    expect_said("sampled_heads_wrong", 1, "wrong: unknown", "token 1700, document 0, head 0");
    forward(seeing(own_alone));
    expect_said("sampled_heads_named", 1, "wrong: own_tokens_only", "gives this out, lse");
    make_long(4001, 1, 1, 3);
    both(right_rule());
    expect_said("sampled_queries", 0, "right",
                "of 4001 queries; dk and dv not, which take all queries of a kv head");
    test_expect(!strstr(said, " dk is "), "dk is judged");
    both(seeing(by_rows));
    expect_said("sampled_queries_named", 1, "wrong: causal_by_local_row",
                "gives this out, lse, dq out");
}

/* Limits and mistakes are tried on parts: some queries, and all of one kv head. */
static void test_parts(void) {
    make_long(1201, 4, 2, 3);
    both(right_rule());
    expect_said("parts", 0, "right", "attention right");
    right_but(DK, seeing(own_alone));
    expect_named("dkv_not_returned", "parts", "gives this dk (own keys and queries)");
    both(seeing(own_alone));
    expect_named("own_tokens_only", "parts", "gives this out, lse, dq, dk, dv");
    both(right_rule());
    for (int64_t i = 0; i < s.dim; i++) at(DK, 1111, 1)[i] += 0.3;
    expect_said("parts_one_row", 1, "wrong: unknown", "; first at rank 0, local row");
    both(right_rule());
    move_rows(OUT, in_ranks_order);
    expect_named("tokens_permuted", "parts", "gives this out");
}

/* ---- damaged files ---- */

static void test_refused(void) {
    static const char *const odd[][2] = {
        {"lacks", "rank1.safetensors: tensor 0.k is missing, and another rank has it; write"},
        {"heads", "tensor 0.dk is (20, 1, 14), and that of another rank has 2 heads with"},
        {"flat", "tensor 0.out is (20, 30); write (20, heads, head_dim), one row a token"},
        {"turned", "tensor 0.lse is (6, 20); write (20, heads), one row a token"},
        {"batch", "tensor 0.q is (20, 1, 6, 7); write (20, heads, head_dim), one row a token"},
        {"dim", "tensor 0.dq has 42 heads, but q has 6; write both"},
        {"whole", "tensor \"0.v\""}};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        char sentence[256];
        make(SEQPAR_LAYOUT_ZIGZAG, 3);
        right_step();
        s.odd = odd[i][0];
        write_scene();
        int is = ask_with(">/dev/null", said, sizeof said);
        snprintf(sentence, sizeof sentence, "%s", odd[i][1]);
        test_expect(is == 3 && strstr(said, sentence) &&
                        strstr(said, "error: build/test_dump_attention.d/rank"),
                    "exit code %d, said '%.400s', not '%s'", is, said, sentence);
        test_end("attention_refused_%s", odd[i][0]);
    }
}

/* ---- of the gallery of public bugs: wrong, and no mistake that has a name ---- */

/* Keys whose id is the padding's. */
static int hides_some(int64_t t, int64_t u) { return right(t, u) && u % 11 != 5; }

/* Every second document is padding, and the next one takes it for its own. */
static int with_padding(int64_t t, int64_t u) {
    return (document_of(t) + 1) / 2 == (document_of(u) + 1) / 2 && u <= t;
}

/* Documents of another row. */
static int other_documents(int64_t t, int64_t u) {
    return (t + 7) / 20 == (u + 7) / 20 && u <= t;
}

static void expect_unnamed(const char *id) {
    write_scene();
    expect(1, "wrong: unknown", "attention wrong");
    test_end("attention_gallery_%s", id);
}

static void test_gallery(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    inputs_narrow();
    both(seeing(hides_some));
    expect_unnamed("B72");
    both(seeing(with_padding));
    expect_unnamed("B73");
    right_step();
    backward(seeing(other_documents), s.x[LSE], delta_of_out());
    expect_unnamed("B85");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_right());
    TEST(test_masks());
    TEST(test_gathered());
    TEST(test_off_by_one());
    TEST(test_options());
    TEST(test_layouts());
    TEST(test_stale());
    TEST(test_stale_hops());
    TEST(test_heads_of_ranks());
    TEST(test_halves());
    TEST(test_odd_but_right());
    TEST(test_odd_texts());
    TEST(test_shows_nothing());
    TEST(test_several());
    TEST(test_nan());
    TEST(test_one_row());
    TEST(test_follows());
    TEST(test_packed());
    TEST(test_sampled());
    TEST(test_parts());
    TEST(test_refused());
    TEST(test_gallery());
    return test_summary();
}
