/* SPDX-License-Identifier: MIT OR Unlicense */
/* Sums per document and the objectives on plain numbers; then every objective through a
   model: the gradient is the contract, whatever the split. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "seqpar_llama.h"
#include "support/test.h"
#include "support/run_objective.h"
#include "trainer/ppo/advantage.h"
#include "second/golden.h"
#include "support/layouts.h"
#include "second/slow_loss.h"

/* ---- sums per document ---- */

typedef struct {
    seqpar_row rows[2];
    int64_t documents, layout, size;
    double *want, *got;
    int bits;
} segment_task;

static seqpar_status segment_rank(seqpar_comm *world, void *user) {
    segment_task *t = user;
    seqpar_share share;
    seqpar_segments segments = {.width = 2};
    seqpar_status status = seqpar_split(
        world->error, &share, t->rows, 2,
        &(seqpar_split_desc){(int)t->layout, world->size, world->rank});
    double *values = calloc((size_t)(2 * share.tokens + 1), sizeof *values);
    double *sums = calloc((size_t)(2 * t->documents), sizeof *sums);
    for (int64_t i = 0; !status && i < share.count; i++)
        for (int64_t k = 0; k < share.pieces[i].count; k++) {
            const seqpar_piece *p = &share.pieces[i];
            values[2 * (p->local + k)] = seqpar_random_normal(
                3, (uint64_t)p->row, (uint64_t)(p->start + k * p->stride));
            values[2 * (p->local + k) + 1] = 1;
        }
    if (!status) status = seqpar_segments_add(world->error, &segments, values, &share);
    if (!status) status = seqpar_segments_sum(world, sums, t->documents, &segments);
    if (world->rank == world->size - 1)
        memcpy(t->got, sums, (size_t)(2 * t->documents) * sizeof *sums);
    seqpar_segments_free(&segments);
    seqpar_share_free(&share);
    free(values);
    free(sums);
    return status;
}

/* One document over whole rows, of one token, empty; ranks without a token; every layout. */
static void test_segments(void) {
    static const int64_t cu0[] = {0, 1, 40, 40, 97}, cu1[] = {0, 23}, source0[] = {0, 1, 2, 4};
    static const int64_t source1[] = {5}, ranks[] = {1, 2, 3, 4, 5, 8};
    double one[12], got[12];
    segment_task t = {.documents = 6,
                      .rows = {{.index = 0,
                                .tokens = 97,
                                .cell = 7,
                                .docs = 4,
                                .cu_seqlens = cu0,
                                .doc_source = source0},
                               {.index = 1,
                                .tokens = 23,
                                .cell = 3,
                                .docs = 1,
                                .cu_seqlens = cu1,
                                .doc_source = source1}}};
    seqpar_error error;
    for (t.layout = 0; t.layout < SEQPAR_LAYOUT_COUNT; t.layout++) {
        for (size_t p = 0; p < sizeof ranks / sizeof *ranks; p++) {
            t.got = p ? got : one;
            test_expect(!seqpar_run_threads(ranks[p], segment_rank, &t, &error), "%s",
                        error.text);
            if (layout_on_grid((int)t.layout))
                test_expect(!memcmp(t.got, one, sizeof one), "P=%lld: other bits than one rank",
                            (long long)ranks[p]);
            for (int64_t d = 0; d < 6; d++)
                test_expect(fabs(t.got[2 * d] - one[2 * d]) <= 1e-13 &&
                                t.got[2 * d + 1] == (double[]){1, 39, 0, 0, 57, 23}[d],
                            "P=%lld: document %lld", (long long)ranks[p], (long long)d);
        }
        test_end("segments_%s", seqpar_layout_name((int)t.layout));
    }
    t.documents = 4; /* too few for the fifth */
    t.layout = SEQPAR_LAYOUT_CONTIGUOUS;
    t.got = got;
    test_expect(seqpar_run_threads(2, segment_rank, &t, &error) == SEQPAR_ERR_SIZE &&
                    strstr(error.text, "document 4"),
                "%s", error.text);
    test_end("segments_refused");
}

/* ---- golden vectors: half a unit of the last printed digit, and the rounding of fp64 ---- */

enum { MOST = 16 };
typedef struct {
    double value[MOST];
    int count;
} numbers;

static numbers of(const golden_case *c, const char *name) {
    numbers n;
    n.count = golden_array(c, name, MOST, n.value);
    return n;
}

static void expect_golden(const golden_case *c, const char *name, const double *got,
                          int count) {
    double want[MOST], limit[MOST];
    int n = golden_expected(c, name, MOST, want, limit);
    test_expect(n > 0 && n <= count, "line %d: %s has %d values, the case %d", c->line, name,
                count, n);
    for (int i = 0; i < n && i < count; i++)
        test_expect(fabs(got[i] - want[i]) <= limit[i] + 4e-16 * fmax(1, fabs(want[i])),
                    "line %d, %s %s[%d]: %.17g, want %.17g", c->line, c->objective, name, i,
                    got[i], want[i]);
}

/* golden.tsv and slow_loss.h call a kind by its name in SEQPAR_PREFERENCES, or by that behind
   dpo_. */
static int names_preference(const char *name, int kind) {
    const char *own = seqpar_preference_at(kind)->name;
    return !strcmp(name, own) || (!strncmp(name, "dpo_", 4) && !strcmp(name + 4, own));
}

/* The kind with the options that a golden name means; kind -1: it is none of the library's. */
static seqpar_preference_desc golden_preference(const char *name) {
    static const struct {
        const char *name;
        seqpar_preference_desc d;
    } others[] = {{"ipo_mean", {.kind = SEQPAR_PREFERENCE_IPO, .length_normalized = 1}},
                  {"dpo_norm", {.kind = SEQPAR_PREFERENCE_DPO, .length_normalized = 1}},
                  {"cpo", {.kind = SEQPAR_PREFERENCE_DPO, .reference_free = 1}}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (!strcmp(name, others[i].name)) return others[i].d;
    for (int kind = 0; kind < SEQPAR_PREFERENCE_COUNT; kind++)
        if (names_preference(name, kind)) return (seqpar_preference_desc){.kind = kind};
    return (seqpar_preference_desc){.kind = -1};
}

static int golden_kinds[SEQPAR_PREFERENCE_COUNT]; /* cases seen of each */

static int golden_pair(const golden_case *c) {
    seqpar_preference_desc d = golden_preference(c->objective);
    seqpar_preference pair = {golden_number(c, "chosen", 0),
                              golden_number(c, "rejected", 0),
                              golden_number(c, "ref_chosen", 0),
                              golden_number(c, "ref_rejected", 0),
                              (int64_t)golden_number(c, "chosen_length", 0),
                              (int64_t)golden_number(c, "rejected_length", 0)};
    seqpar_pair_result r;
    if (d.kind < 0 || golden_text(c, "divergence")) return 0;
    d.beta = golden_number(c, "beta", 0);
    d.label_smoothing = golden_number(c, "label_smoothing", 0);
    d.gamma = golden_number(c, "gamma", 0);
    test_expect(!seqpar_preference_loss(NULL, &r, &pair, &d), "line %d is refused", c->line);
    expect_golden(c, "loss", &r.loss, 1);
    expect_golden(c, "dchosen", &r.dchosen, 1);
    expect_golden(c, "drejected", &r.drejected, 1);
    golden_kinds[d.kind]++;
    return 1;
}

static int golden_reward_kto(const golden_case *c) {
    numbers h = of(c, "log_ratio"), desirable = of(c, "desirable"),
            mismatched = of(c, "kl_log_ratio");
    double loss[MOST], slope[MOST];
    if (!strcmp(c->objective, "rm_sigmoid")) {
        seqpar_pair_result r = seqpar_reward_loss(
            golden_number(c, "chosen", 0), golden_number(c, "rejected", 0),
            golden_number(c, "margin", 0), golden_number(c, "center", 0));
        expect_golden(c, "loss", &r.loss, 1);
        expect_golden(c, "dchosen", &r.dchosen, 1);
        expect_golden(c, "drejected", &r.drejected, 1);
        return 1;
    }
    if (strcmp(c->objective, "kto")) return 0;
    seqpar_kto_desc d = {golden_number(c, "beta", 0), golden_number(c, "desirable_weight", 0),
                         golden_number(c, "undesirable_weight", 0),
                         seqpar_kto_kl(mismatched.value, mismatched.count)};
    for (int i = 0; i < h.count; i++) {
        seqpar_kto_result r;
        test_expect(!seqpar_kto_loss(NULL, &r, h.value[i], 0, desirable.value[i] != 0, &d),
                    "line %d is refused", c->line);
        loss[i] = r.loss;
        slope[i] = r.dlogp / h.count;
    }
    loss[0] = seqpar_mean(loss, h.count);
    expect_golden(c, "kl", &d.kl, 1);
    expect_golden(c, "loss", loss, 1);
    expect_golden(c, "dlogp", slope, h.count);
    return 1;
}

static int golden_policy_value(const golden_case *c) {
    numbers x = of(c, "logp"), old = of(c, "old_logp"), a = of(c, "advantages"),
            v = of(c, "values"), old_v = of(c, "old_values"), g = of(c, "returns"),
            d = of(c, "d");
    seqpar_policy_desc clip = {golden_number(c, "clip_low", 0),
                               golden_number(c, "clip_high", 0),
                               golden_number(c, "dual_clip", 0)};
    double loss = 0, slope[MOST], ratio[MOST], clipped = 0, k[3], dk;
    for (int i = 0; i < x.count && !strcmp(c->objective, "ppo_policy"); i++) {
        seqpar_policy_result p = seqpar_policy_loss(x.value[i], old.value[i], a.value[i],
                                                    &clip);
        loss += p.loss / x.count;
        slope[i] = p.dlogp / x.count;
        ratio[i] = p.ratio;
        clipped += (double)p.clipped / x.count;
    }
    for (int i = 0; i < v.count && !strcmp(c->objective, "value_loss"); i++) {
        seqpar_value_result r = seqpar_value_loss(v.value[i], old_v.value[i], g.value[i],
                                                  golden_number(c, "clip", 0));
        loss += r.loss / v.count;
        slope[i] = r.dvalue / v.count;
    }
    if (!strcmp(c->objective, "kl_estimators")) {
        for (int kind = 0; kind < 3; kind++) k[kind] = seqpar_kl(d.value[0], 0, kind, &dk);
        if (strstr(c->expected, "k1="))
            expect_golden(c, "k1", &k[0], 1), expect_golden(c, "k2", &k[1], 1),
                expect_golden(c, "dk3", &dk, 1);
        expect_golden(c, "k3", &k[2], 1);
        return 1;
    }
    if (strcmp(c->objective, "ppo_policy") && strcmp(c->objective, "value_loss")) return 0;
    expect_golden(c, "loss", &loss, 1);
    if (strstr(c->expected, "dvalues")) expect_golden(c, "dvalues", slope, v.count);
    if (strstr(c->expected, "dlogp")) expect_golden(c, "dlogp", slope, x.count);
    if (strstr(c->expected, "ratios"))
        expect_golden(c, "ratios", ratio, x.count), expect_golden(c, "clipfrac", &clipped, 1);
    return 1;
}

static int golden_advantages(const golden_case *c) {
    numbers r = of(c, "rewards"), v = of(c, "values"), x = of(c, "x"), reward = of(c, "reward"),
            kl = of(c, "kl");
    static const struct {
        const char *name;
        int kind;
    } groups[] = {{"group_norm", ADVANTAGE_GRPO},
                  {"rloo", ADVANTAGE_RLOO},
                  {"group_baseline", ADVANTAGE_MEAN}};
    double a[MOST], g[MOST];
    for (int i = 0; i < 3; i++)
        if (!strcmp(c->objective, groups[i].name)) {
            group_advantages(NULL, a, reward.value, reward.count, groups[i].kind,
                             golden_number(c, "eps", 0));
            expect_golden(c, "advantage", a, reward.count);
            return 1;
        }
    if (!strcmp(c->objective, "gae")) {
        gae_desc discount = {golden_number(c, "gamma", 0), golden_number(c, "lambda", 0)};
        gae(a, g, r.value, v.value, r.count, &discount);
        expect_golden(c, "advantages", a, r.count);
        if (strstr(c->expected, "returns")) expect_golden(c, "returns", g, r.count);
    } else if (!strcmp(c->objective, "whiten")) {
        whiten(x.value, x.count, 0);
        expect_golden(c, "whitened", x.value, x.count);
    } else if (!strcmp(c->objective, "shaped_rewards")) {
        reward_shape shape = {golden_number(c, "kl_coef", 0), golden_number(c, "low", 0),
                              golden_number(c, "high", 0)};
        shaped_rewards(a, kl.value, kl.count, golden_number(c, "score", 0), &shape);
        expect_golden(c, "rewards", a, kl.count);
    } else if (!strcmp(c->objective, "adaptive_kl")) {
        kl_controller k = {1, golden_number(c, "target", 0), golden_number(c, "horizon", 0)};
        kl_controller_update(&k, golden_number(c, "observed", 0),
                             (int64_t)golden_number(c, "n", 0));
        expect_golden(c, "factor", &k.coef, 1);
    } else
        return 0;
    return 1;
}

static int golden_aggregate(const golden_case *c) {
    static const char *const kinds[] = {"token_mean", "seq_mean_token_mean",
                                        "seq_mean_token_sum", "seq_mean_token_sum_norm"};
    numbers losses = of(c, "losses"), length = of(c, "length");
    seqpar_aggregate a = {0, losses.count, length.count,
                          (int64_t)golden_number(c, "max_length", 0)};
    double sum = 0;
    if (strcmp(c->objective, "aggregate")) return 0;
    while (!golden_is(c, "aggregation", kinds[a.kind])) a.kind++;
    for (int i = 0, t = 0; i < length.count; i++)
        for (int k = 0; k < (int)length.value[i]; k++)
            sum += losses.value[t++] * seqpar_token_weight(&a, (int64_t)length.value[i]);
    expect_golden(c, "loss", &sum, 1);
    return 1;
}

static void visit_golden(const golden_case *c, void *seen) {
    *(int *)seen += golden_pair(c) || golden_reward_kto(c) || golden_policy_value(c) ||
                    golden_advantages(c) || golden_aggregate(c);
}

/* Numbers of documents to their tokens. A share without a token takes nothing from either. */
static void test_spread(void) {
    static const int64_t cu[] = {0, 3, 3, 10}, source[] = {3, 4, 6};
    const seqpar_row rows[2] = {
        {.index = 0, .tokens = 10, .cell = 2, .docs = 3, .cu_seqlens = cu},
        {.index = 1,
         .tokens = 10,
         .cell = 3,
         .docs = 3,
         .cu_seqlens = cu,
         .doc_source = source}};
    static const double per_document[] = {5, -1, 7, 0.5, 11, 3, 2.5};
    static const double of[2][3] = {{5, -1, 7}, {0.5, 11, 2.5}};
    seqpar_error error = {0};
    for (int64_t rank = 0; rank < 3; rank++) {
        const seqpar_split_desc split = {SEQPAR_LAYOUT_ZIGZAG, 3, rank};
        double values[21];
        int64_t wrong = 0;
        seqpar_share share;
        for (int i = 0; i < 21; i++) values[i] = -99;
        test_expect(!seqpar_split(&error, &share, rows, 2, &split), "%s", error.text);
        seqpar_segments_spread(values, per_document, &share);
        for (int64_t i = 0; i < share.count; i++)
            for (int64_t k = 0; k < share.pieces[i].count; k++) {
                const seqpar_piece *p = &share.pieces[i];
                wrong += values[p->local + k] !=
                         of[p->row][p->start + k * p->stride < 3 ? 0 : 2];
            }
        for (int64_t i = share.tokens; i < 21; i++) wrong += values[i] != -99;
        test_expect(!wrong, "rank %lld: %lld values are wrong", (long long)rank,
                    (long long)wrong);
        seqpar_share_free(&share);
        seqpar_segments_spread(values, per_document, &share);
        seqpar_segments_spread(NULL, NULL, &share);
    }
    test_end("segments_spread");
}

/* ---- the vocabulary ---- */

enum { HEAD_TOKENS = 11, HEAD_HIDDEN = 6, HEAD_VOCAB = 13 };
typedef struct head_bits {
    double forward[4][HEAD_TOKENS], backward[4][HEAD_TOKENS];
    double dhidden[HEAD_TOKENS * HEAD_HIDDEN], dtable[HEAD_VOCAB * HEAD_HIDDEN];
} head_bits;

/* As many of the device's numbers, in memory that spoils what reads more of it. */
static void *head_numbers(seqpar_device *device, int64_t count, int dtype, uint64_t key) {
    double x[HEAD_VOCAB * HEAD_HIDDEN];
    void *data = device->alloc(device, count * seqpar_dtype_bytes(dtype));
    for (int64_t i = 0; i < count; i++)
        x[i] = key ? seqpar_random_normal(7, key, (uint64_t)i) : (double)1e30f;
    seqpar_device_write(device, data, 0, x, count, dtype);
    return data;
}

static void head_of(seqpar_ctx *ctx, int64_t rows_max, head_bits *to) {
    enum { INPUTS = 6, VALUES = 4, ALL = INPUTS + VALUES + 2 };
    const seqpar_vocab_desc desc = {
        .hidden = HEAD_HIDDEN, .vocab = HEAD_VOCAB, .rows_max = rows_max};
    seqpar_device *d = ctx->device;
    int32_t targets[HEAD_TOKENS];
    void *at[ALL];
    for (int i = 0; i < ALL; i++) {
        int64_t count = i == 1 || i == ALL - 1   ? HEAD_VOCAB * HEAD_HIDDEN
                        : i == 0 || i == ALL - 2 ? HEAD_TOKENS * HEAD_HIDDEN
                                                 : HEAD_TOKENS;
        at[i] = head_numbers(d, count, i < 2 || i == ALL - 2 ? d->storage : d->accumulator,
                             i < INPUTS ? (uint64_t)i + 1 : 0);
    }
    for (int t = 0; t < HEAD_TOKENS; t++)
        targets[t] = t % 5 == 3 ? SEQPAR_IGNORE : (t * 7 + 2) % HEAD_VOCAB;
    const seqpar_vocab_io io = {.hidden = at[0],
                                .table = at[1],
                                .targets = targets,
                                .tokens = HEAD_TOKENS,
                                .values = {at[6], at[7], at[8], at[9]},
                                .seeds = {at[2], at[3], at[4], at[5]},
                                .dhidden = at[10],
                                .nodes = at[11],
                                .node_stride = HEAD_VOCAB * HEAD_HIDDEN};
    test_expect(seqpar_vocab_node_count(NULL, NULL, &desc) == 1,
                "a plain sum is said to have %lld places",
                (long long)seqpar_vocab_node_count(NULL, NULL, &desc));
    test_expect(!seqpar_vocab_forward(ctx, &io, &desc), "%s", ctx->error->text);
    for (int i = 0; i < VALUES; i++)
        seqpar_device_read(d, to->forward[i], at[INPUTS + i], 0, HEAD_TOKENS, d->accumulator);
    test_expect(!seqpar_vocab_backward(ctx, &io, NULL, NULL, &desc), "%s", ctx->error->text);
    for (int i = 0; i < VALUES; i++)
        seqpar_device_read(d, to->backward[i], at[INPUTS + i], 0, HEAD_TOKENS, d->accumulator);
    seqpar_device_read(d, to->dhidden, at[10], 0, HEAD_TOKENS * HEAD_HIDDEN, d->storage);
    seqpar_device_read(d, to->dtable, at[11], 0, HEAD_VOCAB * HEAD_HIDDEN, d->accumulator);
    for (int i = 0; i < ALL; i++) d->free(d, at[i]);
}

/* However many rows of logits there are at a time: the same bits, and those of both entries. */
static void test_rows_at_a_time(seqpar_device *device, const char *name) {
    static const int64_t rows_max[] = {1, 3, 4, HEAD_TOKENS, 0};
    static head_bits whole, parts;
    seqpar_comm *world = seqpar_comm_self();
    seqpar_ctx ctx;
    test_expect(!seqpar_ctx_open(&ctx, world, device, 1), "%s", world->error->text);
    head_of(&ctx, HEAD_TOKENS + 2, &whole);
    test_expect(!memcmp(whole.forward, whole.backward, sizeof whole.forward),
                "backward has other values than forward");
    for (size_t i = 0; i < sizeof rows_max / sizeof *rows_max; i++) {
        head_of(&ctx, rows_max[i], &parts);
        test_expect(!memcmp(&whole, &parts, sizeof whole), "rows_max %lld has other bits",
                    (long long)rows_max[i]);
    }
    seqpar_ctx_close(&ctx);
    seqpar_comm_free(world);
    seqpar_device_close(device);
    test_end("head_rows_at_a_time_%s", name);
}

static void test_golden(void) {
    int seen = 0, cases = golden_each(GOLDEN_PATH, visit_golden, &seen);
    test_expect(cases > 80 && seen >= 35, "%d of %d cases are for the core", seen, cases);
    for (int kind = 0; kind < SEQPAR_PREFERENCE_COUNT; kind++)
        test_expect(golden_kinds[kind] > 0, "no golden vector of %s",
                    seqpar_preference_at(kind)->name);
    test_end("objective_golden: %d of %d cases, those of the core's objectives", seen, cases);
}

/* ---- identities ---- */

static seqpar_pair_result preference(const seqpar_preference_desc *d, double chosen,
                                     double rejected) {
    seqpar_preference pair = {chosen, rejected, -3.25, -7.5, 5, 8};
    seqpar_pair_result r = {0};
    seqpar_error error = {0};
    test_expect(!seqpar_preference_loss(&error, &r, &pair, d), "%s", error.text);
    return r;
}

static void test_identities(void) {
    const double ln2 = 0.693147180559945309417;
    static const seqpar_preference_desc kinds[] = {{SEQPAR_PREFERENCE_DPO, 0.1},
                                                   {SEQPAR_PREFERENCE_DPO, 0.3, 0.2},
                                                   {SEQPAR_PREFERENCE_DPO, 2.0, 0, 0, 1}};
    const seqpar_preference_desc ipo = {SEQPAR_PREFERENCE_IPO, 0.1};
    const seqpar_preference_desc hinge = {SEQPAR_PREFERENCE_HINGE, 0.1};
    const seqpar_preference_desc dpo = {SEQPAR_PREFERENCE_DPO, 0.1};
    double same[7] = {ln2, ln2, ln2, ln2, ln2, ln2, ln2};
    double advantages[5], rewards[] = {2, 2, 2, 2, 2}, x[] = {3, -1, 4, 1, -5, 9, 2};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        seqpar_pair_result r = preference(&kinds[i], -3.25, -7.5);
        test_expect(!memcmp(&r.loss, &ln2, 8), "kind %zu: %.17g is not ln 2", i, r.loss);
        test_expect(r.reward_chosen == 0 && r.reward_rejected == 0,
                    "kind %zu: rewards of the reference itself", i);
    }
    test_expect(fabs(preference(&ipo, -3.25, -7.5).loss - 25.0) < 1e-13 &&
                    preference(&hinge, -3.25, -7.5).loss == 1.0,
                "IPO 1/(4 beta^2), hinge 1");
    test_expect(preference(&dpo, -3.25, -7.5).dchosen == -0.05 &&
                    preference(&dpo, -3.25, -7.5).drejected == 0.05,
                "beta / 2");
    test_expect(!memcmp(&same[0], (double[]){seqpar_mean(same, 7)}, 8),
                "a mean of equal numbers");
    test_expect(seqpar_reward_loss(1.5, 1.5, 0, 0).loss == ln2 &&
                    seqpar_reward_loss(1.5, 1.5, 0, 0).dchosen == -0.5,
                "equal scores");
    test_expect(seqpar_softplus(800) == 800 && seqpar_softplus(-745) > 0 &&
                    seqpar_sigmoid(-800) >= 0 && seqpar_softplus(-40) > 0,
                "no overflow, no cancelling");
    group_advantages(NULL, advantages, rewards, 5, ADVANTAGE_GRPO, 1e-9);
    for (int i = 0; i < 5; i++)
        test_expect(advantages[i] == 0, "equal rewards have an advantage");
    whiten(x, 7, 0);
    test_expect(fabs(seqpar_mean(x, 7)) < 1e-15, "whitened mean");
    for (int kind = 0; kind < 3; kind++)
        test_expect(seqpar_kl(-2.5, -2.5, kind, NULL) == 0, "KL of equals");
    test_end("objective_identities");
}

static void expect_refused(seqpar_preference_desc d, int64_t tokens, const char *words) {
    seqpar_preference pair = {-1, -2, -1, -2, tokens, 3};
    seqpar_pair_result r;
    seqpar_error error = {0};
    test_expect(seqpar_preference_loss(&error, &r, &pair, &d) && strstr(error.text, words),
                "%s: %s", words, error.text);
}

/* Whatever of a kind the table says. */
static void test_kinds(void) {
    for (int i = 0; i < SEQPAR_PREFERENCE_COUNT; i++) {
        const seqpar_preference_kind *kind = seqpar_preference_at(i);
        seqpar_preference_desc d = {.kind = i, .beta = 0.1, .gamma = 0.5};
        seqpar_preference_desc means = d, alone = d, smooth = d;
        double loss = preference(&d, -3, -8).loss;
        means.length_normalized = alone.reference_free = 1;
        smooth.label_smoothing = 0.1;
        test_expect((preference(&means, -3, -8).loss == loss) == kind->means,
                    "%s: means over tokens", kind->name);
        test_expect((preference(&alone, -3, -8).loss == loss) == !kind->reference,
                    "%s: the reference", kind->name);
        if (!kind->smoothing)
            expect_refused(smooth, 1, "no meaning");
        else
            test_expect(preference(&smooth, -3, -8).loss != loss, "%s: label smoothing",
                        kind->name);
        for (int k = 0; k < i; k++)
            test_expect(strcmp(kind->name, seqpar_preference_at(k)->name), "two kinds are %s",
                        kind->name);
    }
    test_expect(!seqpar_preference_at(-1) && !seqpar_preference_at(SEQPAR_PREFERENCE_COUNT),
                "unknown kinds");
    test_end("objective_preferences are what the table says");
}

static void test_refused(void) {
    seqpar_kto_result k;
    seqpar_error error = {0};
    double one = 1, advantage;
    expect_refused((seqpar_preference_desc){SEQPAR_PREFERENCE_DPO, 0}, 1, "beta is 0");
    expect_refused((seqpar_preference_desc){SEQPAR_PREFERENCE_DPO, NAN}, 1, "beta is");
    expect_refused((seqpar_preference_desc){SEQPAR_PREFERENCE_DPO, 0.1, 0.6}, 1,
                   "label_smoothing is 0.6");
    expect_refused((seqpar_preference_desc){999, 0.1}, 1, "loss 999");
    expect_refused((seqpar_preference_desc){SEQPAR_PREFERENCE_DPO, 0.1}, 0, "0 chosen");
    test_expect(seqpar_kto_loss(&error, &k, 0, 0, 1, &(seqpar_kto_desc){0.1, 1, 1, -0.5}) &&
                    strstr(error.text, "-0.5"),
                "%s", error.text);
    test_expect(group_advantages(NULL, &advantage, &one, 1, ADVANTAGE_RLOO, 0) ==
                    SEQPAR_ERR_OPTION,
                "a group of one");
    test_end("objective_refused");
}

/* ---- derivatives on plain numbers: central differences ---- */

static double slope_of(double (*f)(double, const void *), double x, const void *user) {
    double h = 1e-4;
    return (8 * (f(x + h, user) - f(x - h, user)) - (f(x + 2 * h, user) - f(x - 2 * h, user))) /
           (12 * h);
}

typedef struct {
    seqpar_preference_desc d;
    double chosen, rejected;
} pair_at;

static double pair_of_chosen(double chosen, const void *user) {
    const pair_at *p = user;
    return preference(&p->d, chosen, p->rejected).loss;
}

static double pair_of_rejected(double rejected, const void *user) {
    const pair_at *p = user;
    return preference(&p->d, p->chosen, rejected).loss;
}

/* Every kind in turn, plain and with what it knows. */
static pair_at pair_drawn(int i) {
    int kind = i % SEQPAR_PREFERENCE_COUNT, with = i / SEQPAR_PREFERENCE_COUNT % 5;
    pair_at p = {{.kind = kind, .beta = 0.3, .gamma = 0.5}};
    if (with == 1 && seqpar_preference_at(kind)->smoothing) p.d.label_smoothing = 0.1;
    p.d.length_normalized = with == 2;
    p.d.nll_coef = with > 2 ? 0.2 : 0;
    p.d.nll_tokens = with == 4 ? 7 : 0;
    p.chosen = -0.5 - 3 * fabs(test_normal()); /* log-probs */
    p.rejected = -0.5 - 4 * fabs(test_normal());
    return p;
}

static double policy_at(double logp, const void *user) {
    const double *x = user;
    return seqpar_policy_loss(logp, x[0], x[1], &(seqpar_policy_desc){0.2, 0.3, 3}).loss;
}

static double value_at(double value, const void *user) {
    const double *x = user;
    return seqpar_value_loss(value, x[0], x[1], 0.2).loss;
}

static double kl_at(double logp, const void *user) {
    return seqpar_kl(logp, -1.7, *(const int *)user, NULL);
}

static void near(double got, double want, const char *what) {
    test_expect(fabs(got - want) <= 1e-8 * (1 + fabs(want)), "%s: %.12g, differences say %.12g",
                what, got, want);
}

static void test_derivatives(void) {
    for (int i = 0; i < 400; i++) {
        pair_at p = pair_drawn(i);
        seqpar_pair_result pair = preference(&p.d, p.chosen, p.rejected);
        double x[2] = {test_normal(), test_normal()};
        double at = x[0] + 0.6 * test_normal(), dkl;
        int kind = i % 3;
        seqpar_policy_result policy = seqpar_policy_loss(at, x[0], x[1],
                                                         &(seqpar_policy_desc){0.2, 0.3, 3});
        near(pair.dchosen, slope_of(pair_of_chosen, p.chosen, &p), "chosen");
        near(pair.drejected, slope_of(pair_of_rejected, p.rejected, &p), "rejected");
        if (fabs(policy.ratio - 0.8) > 1e-3 && fabs(policy.ratio - 1.3) > 1e-3 &&
            fabs(policy.ratio - 3) > 1e-2)
            near(policy.dlogp, slope_of(policy_at, at, x), "policy");
        if (fabs(fabs(at - x[0]) - 0.2) > 1e-3 && fabs(at + x[0] - 2 * x[1]) > 0.5)
            near(seqpar_value_loss(at, x[0], x[1], 0.2).dvalue, slope_of(value_at, at, x),
                 "value");
        seqpar_kl(at, -1.7, kind, &dkl);
        near(dkl, slope_of(kl_at, at, &kind), "kl");
    }
    test_end("objective_derivatives");
}

/* ---- the gradient is the contract ---- */

static void expect_equal(const objective_result *got, const objective_result *want,
                         const char *what) {
    test_expect(!got->status, "%s: %s", what, got->error.text);
    test_expect(!memcmp(&got->loss, &want->loss, 8), "%s: loss %.17g, one rank has %.17g", what,
                got->loss, want->loss);
    test_expect(!memcmp(got->columns, want->columns, sizeof got->columns),
                "%s: metrics %.17g %.17g %.17g, one rank has %.17g %.17g %.17g", what,
                got->columns[1], got->columns[2], got->columns[3], want->columns[1],
                want->columns[2], want->columns[3]);
    test_expect(!memcmp(&got->norm, &want->norm, 8), "%s: norm %.17g, one rank has %.17g", what,
                got->norm, want->norm);
    test_expect(!memcmp(got->logits, want->logits, (size_t)(want->tokens * want->width) * 8),
                "%s: logits", what);
    test_expect(!memcmp(got->gradient, want->gradient, (size_t)want->elements * 8),
                "%s: gradients differ by %.2e", what,
                test_distance(got->gradient, want->gradient, want->elements));
    test_expect(!memcmp(got->params, want->params, (size_t)want->elements * 8),
                "%s: parameters after the step", what);
    test_expect(!memcmp(got->state, want->state, (size_t)(3 * want->elements) * 8),
                "%s: the optimizer's state after the step", what);
}

/* D x P x A, schedules, layouts, ZeRO stages, both optimizers in turn. */
static void test_contract(int kind, int reference) {
    static const int64_t dps[] = {1, 2, 4, 8, 3}, sps[] = {1, 2, 4, 8, 3, 5};
    static const int64_t accumulations[] = {1, 2, 4};
    objective_task t;
    objective_result one[2], r;
    int64_t n, runs = 0;
    objective_task_open(&t, kind, 5, 50, 110, 11);
    for (n = 0; n < 2; n++) {
        objective_way alone = {.dp = 1,
                               .sp = 1,
                               .accumulation = 1,
                               .reference_device = reference,
                               .optimizer = (int)n};
        objective_run(&t, &alone, &one[n]);
        test_expect(!one[n].status && one[n].norm > 0 &&
                        memcmp(one[n].start, one[n].params, (size_t)one[n].elements * 8),
                    "one rank: %s", one[n].error.text);
    }
    for (n = kind; n < 5 * 6 * 3; n += 7) {
        objective_way way = {.dp = dps[n % 5],
                             .sp = sps[n / 5 % 6],
                             .accumulation = accumulations[n / 30],
                             .layout = layout_of_grid(n),
                             .schedule = (int)(n % 3),
                             .optimizer = (int)(n / 2 % 2),
                             .zero_stage = (int)(n % 4),
                             .recompute = (int)(n / 3 % 2),
                             .reference_device = reference,
                             .threads = 1 + n % 2};
        char what[96];
        if (way.dp * way.sp > 16) continue;
        snprintf(what, sizeof what, "D=%lld P=%lld A=%lld %s %s", (long long)way.dp,
                 (long long)way.sp, (long long)way.accumulation, seqpar_layout_name(way.layout),
                 seqpar_schedule_name(way.schedule));
        objective_run(&t, &way, &r);
        expect_equal(&r, &one[way.optimizer], what);
        objective_result_free(&r);
        runs++;
    }
    for (n = 0; n < 2; n++) objective_result_free(&one[n]);
    objective_task_close(&t);
    test_end("objective_%s_%s_bits: %lld ways", objective_name(kind),
             (const char *[]){"fp32", "fp64", "bf16"}[reference], (long long)runs);
}

/* ---- the same with responses that begin and end anywhere ---- */

enum {
    EDGE_ROW = 26,
    EDGE_CELL = 3,
    EDGE_ROWS = 3,
    EDGE_CUTS = EDGE_ROW - 4,
    EDGE_LENGTHS = 3,
    EDGE_TASKS = EDGE_CUTS * EDGE_LENGTHS,
    EDGE_WORLDS = 10 * 3 /* D x P, A */
};

/* targets by their place in a row */
typedef struct {
    int first[EDGE_ROW], last[EDGE_ROW], whole_ranks_masked, uneven;
} edge_seen;

/* Three rows of a pair each. The cut between the documents of the first row moves, and so
   does a window of supervised tokens in all of them: one token, three, or all that are left. */
static void edge_task(objective_task *t, int kind, int64_t cut, int64_t length) {
    const int64_t sizes[2 * EDGE_ROWS] = {2 + cut, EDGE_ROW - 2 - cut, 13, 13, 9, 17};
    const int64_t lengths[EDGE_LENGTHS] = {1, 3, EDGE_ROW};
    seqpar_document documents[2 * EDGE_ROWS];
    int32_t ids[2 * EDGE_ROWS][EDGE_ROW], targets[2 * EDGE_ROWS][EDGE_ROW];
    uint8_t mask[2 * EDGE_ROWS][EDGE_ROW] = {{0}};
    seqpar_pack_desc pack = {.pack_len = EDGE_ROW,
                             .cell = EDGE_CELL,
                             .vocab = 13,
                             .order = SEQPAR_PACK_UNIT_PER_ROW};
    seqpar_error error = {0};
    *t = (objective_task){.kind = kind, .seed = 7, .documents = 2 * EDGE_ROWS, .lr = 1e-2};
    t->config = (seqpar_llama_config){.layers = 1,
                                      .hidden = 8,
                                      .heads = 8,
                                      .kv_heads = 4,
                                      .head_dim = 2,
                                      .intermediate = 12,
                                      .vocab = 13,
                                      .score = objective_scores(kind) ? "score" : NULL};
    t->kd_coef = 0.4;
    t->teacher = t->config;
    t->teacher.hidden = 10;
    for (int64_t d = 0; d < 2 * EDGE_ROWS; d++) {
        int64_t first = 1 + (cut + 5 * d) % (sizes[d] - 1);
        for (int64_t k = 0; k < sizes[d]; k++) {
            ids[d][k] = (int32_t)((cut + 7 * d + 3 * k) % 13);
            mask[d][k] = k >= first && k < first + lengths[(length + d) % EDGE_LENGTHS];
        }
        for (int64_t k = 0; k < sizes[d]; k++)
            targets[d][k] = k + 1 < sizes[d] && mask[d][k + 1] ? objective_marks.ids[0]
                                                               : SEQPAR_IGNORE;
        documents[d] = (seqpar_document){
            .ids = ids[d], .loss_mask = mask[d], .tokens = sizes[d], .unit = d / 2};
        if (!objective_marked(kind)) continue;
        documents[d].loss_mask = NULL;
        documents[d].targets = targets[d];
    }
    if (seqpar_pack(&error, &t->batch, documents, 2 * EDGE_ROWS, &pack)) {
        fprintf(stderr, "%s\n", error.text);
        exit(2);
    }
}

/* Where targets begin and end, and what the ranks of a contiguous split into eight have of
   them. */
static void edge_note(const objective_task *t, edge_seen *seen) {
    for (int64_t r = 0; r < t->batch.rows; r++) {
        const seqpar_row *row = &t->batch.row[r];
        int targets[8] = {0};
        for (int64_t i = 0; i < row->tokens; i++) {
            int here = row->targets[i] != SEQPAR_IGNORE;
            seen->first[i] |= here && (i == 0 || row->targets[i - 1] == SEQPAR_IGNORE);
            seen->last[i] |= here &&
                             (i + 1 == row->tokens || row->targets[i + 1] == SEQPAR_IGNORE);
            for (int64_t rank = 0; rank < 8; rank++)
                targets[rank] += here && i >= seqpar_part_begin(row->tokens, 8, rank) &&
                                 i < seqpar_part_begin(row->tokens, 8, rank + 1);
        }
        for (int rank = 1; rank < 8; rank++) {
            seen->whole_ranks_masked |= targets[rank] == 0;
            seen->uneven |= targets[rank] > 1 && targets[rank - 1] == 1;
        }
    }
}

static int64_t edge_ways(void) {
    return EDGE_WORLDS * SEQPAR_SCHEDULE_COUNT * layouts_on_grid();
}

/* of a task, so that all tasks together see every way */
static int64_t edge_runs(void) { return 2 + edge_ways() / EDGE_TASKS; }

/* One of all D x P x A, layouts and schedules; the optimizers in turn. */
static objective_way edge_way(int64_t n, int64_t optimizer) {
    static const int64_t worlds[][2] = {{1, 1}, {1, 2}, {2, 1}, {1, 4}, {2, 2},
                                        {4, 1}, {1, 8}, {2, 4}, {4, 2}, {8, 1}};
    objective_way way = {
        .dp = worlds[n % 10][0],
        .sp = worlds[n % 10][1],
        .accumulation = INT64_C(1) << (n / 10 % 3),
        .layout = layout_of_grid(n / EDGE_WORLDS),
        .schedule = (int)(n / EDGE_WORLDS / layouts_on_grid() % SEQPAR_SCHEDULE_COUNT),
        .optimizer = (int)optimizer,
        .zero_stage = (int)(n % 4),
        .recompute = (int)(n / 7 % 2)};
    return way;
}

static void edge_compare(const objective_task *t, int64_t number) {
    objective_result one[2], r;
    int reference = number % 4 == 3;
    for (int n = 0; n < 2; n++) {
        objective_way alone = {
            .dp = 1, .sp = 1, .accumulation = 1, .reference_device = reference, .optimizer = n};
        objective_run(t, &alone, &one[n]);
        test_expect(!one[n].status && one[n].norm > 0 &&
                        memcmp(one[n].start, one[n].params, (size_t)one[n].elements * 8),
                    "one rank: %s", one[n].error.text);
    }
    for (int64_t n = number * edge_runs(); n < (number + 1) * edge_runs(); n++) {
        objective_way way = edge_way(n % edge_ways(), n / 10 % 2);
        char what[96];
        way.reference_device = reference;
        snprintf(what, sizeof what, "boundaries %lld, D=%lld P=%lld A=%lld %s %s",
                 (long long)number, (long long)way.dp, (long long)way.sp,
                 (long long)way.accumulation, seqpar_layout_name(way.layout),
                 seqpar_schedule_name(way.schedule));
        objective_run(t, &way, &r);
        expect_equal(&r, &one[way.optimizer], what);
        objective_result_free(&r);
    }
    for (int n = 0; n < 2; n++) objective_result_free(&one[n]);
}

static void test_edges(int kind) {
    edge_seen seen = {{0}, {0}, 0, 0};
    int64_t number = 0, places = 0;
    for (int64_t cut = 0; cut < EDGE_CUTS; cut++)
        for (int64_t length = 0; length < EDGE_LENGTHS; length++) {
            objective_task t;
            edge_task(&t, kind, cut, length);
            edge_note(&t, &seen);
            edge_compare(&t, number++);
            objective_task_close(&t);
        }
    for (int i = 0; i < EDGE_ROW - 1; i++) places += seen.first[i] && seen.last[i];
    test_expect(places == EDGE_ROW - 1, "responses begin and end at %lld of %d places",
                (long long)places, EDGE_ROW - 1);
    test_expect(seen.whole_ranks_masked && seen.uneven && number * edge_runs() >= edge_ways(),
                "masked ranks %d, uneven counts %d, %lld ways", seen.whole_ranks_masked,
                seen.uneven, (long long)(number * edge_runs()));
    test_end("objective_%s_boundaries: every place of a row, %lld runs", objective_name(kind),
             (long long)(number * edge_runs()));
}

/* ---- the truth: slow.h's model under slow_loss.h's objectives, derivatives by complex step ---- */

typedef struct { /* the tokens of all rows with a target, or the last of each document */
    slow_complex value;
    double ref;
    slow_complex taught; /* of KD: cross-entropy with the teacher */
    slow_complex other;  /* of PRM, whose value is that of the first mark: that of the second */
    int64_t document, position, tokens;
} slow_seen;

static slow_config slow_config_of(const seqpar_llama_config *c) {
    return (slow_config){c->layers,       c->hidden, c->heads, c->kv_heads, c->head_dim,
                         c->intermediate, c->vocab,  10000,    1e-5,        false};
}

/* Parameters without gaps, in slow.h's order; a score head is the first row of its head. */
static slow_complex *slow_dense(const seqpar_llama_config *c, const double *params) {
    slow_config config = slow_config_of(c);
    slow_complex *dense = calloc((size_t)slow_parameters(&config, NULL), sizeof *dense),
                 *to = dense;
    seqpar_comm *self = seqpar_comm_self();
    seqpar_device *device = seqpar_device_reference();
    seqpar_llama model;
    seqpar_ctx ctx;
    seqpar_ctx_open(&ctx, self, device, 1);
    seqpar_llama_open(&ctx, &model, c);
    for (int64_t i = 0; i < model.tensor_count; i++)
        for (int64_t k = 0; k < model.tensors[i].rows * model.tensors[i].cols; k++)
            *to++ = params[model.tensors[i].offset + k];
    seqpar_llama_close(&ctx, &model);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(self);
    return dense;
}

/* KD's teacher: a model that is drawn like it. */
static slow_complex *slow_teacher(const objective_task *t, const objective_way *way) {
    objective_task drawn = *t;
    objective_result r;
    drawn.kind = OBJECTIVE_SFT;
    drawn.config = t->teacher;
    drawn.seed = t->seed + 2;
    objective_run(&drawn, way, &r);
    slow_complex *theta = slow_dense(&t->teacher, r.start);
    objective_result_free(&r);
    return theta;
}

/* - sum over the vocabulary of the teacher's probabilities times the log of the student's. */
static slow_complex slow_taught(int64_t vocab, const slow_complex *student,
                                const slow_complex *teacher) {
    slow_complex all = 0, mean = 0;
    double sum = 0;
    for (int64_t j = 0; j < vocab; j++) {
        double q = exp(creal(teacher[j]));
        sum += q;
        mean += q * student[j];
        all += cexp(student[j]);
    }
    return clog(all) - mean / sum;
}

/* Log-prob of one mark, of both alone. */
static slow_complex slow_mark(const slow_complex *logits, int mark) {
    slow_complex both = 0;
    for (int k = 0; k < 2; k++) both += cexp(logits[objective_marks.ids[k]]);
    return logits[objective_marks.ids[mark]] - clog(both);
}

/* What the model says of every token that counts. ref_theta: the reference's, or the teacher's */
static int64_t slow_tokens(const objective_task *t, const slow_complex *theta,
                           const slow_complex *ref_theta, slow_seen *seen) {
    slow_config config = slow_config_of(&t->config);
    int64_t n = 0;
    for (int64_t r = 0; r < t->batch.rows; r++) {
        const seqpar_row *row = &t->batch.row[r];
        slow_row s = {.tokens = row->tokens,
                      .docs = row->docs,
                      .cu_seqlens = row->cu_seqlens,
                      .ids = row->ids,
                      .targets = row->targets};
        slow_complex *logits = calloc((size_t)(2 * row->tokens * config.vocab), sizeof *logits),
                     *ref = logits + row->tokens * config.vocab;
        slow_logits(&config, theta, &s, logits);
        slow_config of = slow_config_of(objective_taught(t->kind) ? &t->teacher : &t->config);
        if (objective_at(t->kind)->reference || objective_taught(t->kind))
            slow_logits(&of, ref_theta, &s, ref);
        for (int64_t k = 0; t->temperature > 0 && k < 2 * row->tokens * config.vocab; k++)
            logits[k] /= t->temperature;
        for (int64_t k = 0; k < row->tokens; k++) {
            objective_unit place = objective_place(row, k);
            int last = objective_last(t->kind) &&
                       (k + 1 == row->tokens ||
                        objective_place(row, k + 1).document != place.document);
            if (objective_last(t->kind) ? !last : row->targets[k] == SEQPAR_IGNORE) continue;
            seen[n] = (slow_seen){.document = place.document,
                                  .position = place.position,
                                  .tokens = place.tokens[0]};
            seen[n].value = objective_scores(t->kind)
                                ? logits[k * config.vocab]
                                : slow_token_of(config.vocab, logits + k * config.vocab,
                                                row->targets[k])
                                      .logp;
            if (objective_marked(t->kind)) {
                seen[n].value = slow_mark(logits + k * config.vocab, 0);
                seen[n].other = slow_mark(logits + k * config.vocab, 1);
            }
            if (objective_taught(t->kind))
                seen[n].taught = slow_taught(config.vocab, logits + k * config.vocab,
                                             ref + k * config.vocab);
            if (objective_at(t->kind)->reference)
                seen[n].ref = creal(
                    slow_token_of(config.vocab, ref + k * config.vocab, row->targets[k]).logp);
            n++;
        }
        free(logits);
    }
    return n;
}

static slow_complex slow_token_objective(const objective_task *t, const slow_seen *x) {
    static const slow_ppo clip = {0.2, 0.28, 3.0, 20};
    double n = (double)t->batch.counts.supervised, rewards[2], shaped[2];
    int64_t first = x->document / 2 * 2;
    if (t->kind == OBJECTIVE_SFT) return -x->value / n;
    if (t->kind == OBJECTIVE_KD)
        return (-(1 - t->kd_coef) * x->value + t->kd_coef * x->taught) / n;
    const objective_unit place = {.document = x->document, .position = x->position};
    double share = objective_share(t, &place);
    if (t->kind == OBJECTIVE_PRM) return -(share * x->value + (1 - share) * x->other) / n;
    if (t->kind == OBJECTIVE_VALUE)
        return slow_value_loss(0.2, x->value,
                               0.3 * objective_data(t, x->document, x->position, 2),
                               objective_data(t, x->document, x->position, 3)) /
               n;
    if (t->kind == OBJECTIVE_POLICY)
        return slow_ppo_policy(&clip, x->value,
                               x->ref + 0.1 * objective_data(t, x->document, x->position, 4),
                               objective_data(t, x->document, x->position, 5)) /
               n;
    for (int i = 0; i < 2; i++) rewards[i] = objective_data(t, first + i, 0, 1);
    slow_group_norm(1, 2, 1e-9, rewards, shaped);
    return (slow_ppo_policy(&clip, x->value, x->ref, shaped[x->document % 2]) +
            0.04 * slow_k3(x->value - x->ref)) /
           ((double)t->documents * (double)x->tokens);
}

/* NULL: slow_loss.h has none. */
static slow_pair_loss *slow_pair_of(int preference) {
    const slow_pair_entry *e = slow_pair_losses;
    while (e->name && !names_preference(e->name, preference)) e++;
    return e->loss;
}

static slow_complex slow_objective_loss(const objective_task *t, const slow_complex *theta,
                                        const slow_complex *ref_theta) {
    slow_seen *seen = calloc((size_t)4096, sizeof *seen);
    slow_complex sum = 0, logp[64] = {0};
    double ref[64] = {0}, length[64] = {0}, margin[64];
    bool desirable[64];
    int64_t n = slow_tokens(t, theta, ref_theta, seen);
    int preference = objective_at(t->kind)->preference;
    for (int64_t i = 0; i < n; i++) {
        if (!objective_whole(t->kind)) sum += slow_token_objective(t, &seen[i]);
        logp[seen[i].document] += seen[i].value;
        ref[seen[i].document] += seen[i].ref;
        length[seen[i].document]++;
    }
    free(seen);
    for (int64_t i = 0; i < t->documents; i++) {
        desirable[i] = i % 2 == 0;
        margin[i] = 0.1;
    }
    if (t->kind == OBJECTIVE_KTO)
        return slow_kto_loss(&(slow_kto){0.1, 1, 1.33}, t->documents, desirable, 0.15, logp,
                             ref);
    for (int64_t i = 0; preference >= 0 && i < t->documents; i += 2) {
        slow_preference o = {.beta = 0.1, .gamma = 0.5};
        slow_pair x = {logp[i], logp[i + 1], ref[i], ref[i + 1], length[i], length[i + 1]};
        sum += slow_pair_of(preference)(&o, &x) / ((double)t->documents / 2);
    }
    for (int64_t i = 0; t->kind == OBJECTIVE_RM && i < t->documents; i += 2)
        sum += slow_rm_loss(1, &logp[i], &logp[i + 1], &margin[i], 0.01) /
               ((double)t->documents / 2);
    return sum;
}

static void test_truth(int kind, double temperature) {
    objective_way way = {.dp = 1,
                         .sp = 3,
                         .accumulation = 1,
                         .layout = SEQPAR_LAYOUT_ZIGZAG,
                         .vocab_rows = 3,
                         .reference_device = 1};
    objective_task t;
    objective_result r;
    int preference = objective_at(kind)->preference;
    if (preference >= 0 && !slow_pair_of(preference)) {
        test_expect(0, "slow_loss.h has no loss of this name; a kind needs its truth there");
        test_end("objective_%s_truth", objective_name(kind));
        return;
    }
    objective_task_open(&t, kind, 2, 20, 50, 31);
    t.temperature = temperature;
    objective_run(&t, &way, &r);
    slow_config config = slow_config_of(&t.config);
    slow_complex *theta = slow_dense(&t.config, r.start),
                 *ref = objective_taught(kind) ? slow_teacher(&t, &way)
                                               : slow_dense(&t.config, r.reference_start),
                 *gradient = slow_dense(&t.config, r.gradient);
    int64_t count = slow_parameters(&config, NULL);
    double loss = creal(slow_objective_loss(&t, theta, ref));
    test_expect(fabs(r.loss - loss) <= 1e-12 * fabs(loss), "loss %.17g, slow.h has %.17g",
                r.loss, loss);
    for (int direction = 0; direction < 4; direction++) {
        slow_complex *moved = calloc((size_t)count, sizeof *moved);
        double slope = 0, want;
        for (int64_t k = 0; k < count; k++) {
            double d = k % 4 < direction
                           ? 0
                           : seqpar_random_normal(5, (uint64_t)direction, (uint64_t)k);
            moved[k] = theta[k] + d * SLOW_STEP * _Complex_I;
            slope += creal(gradient[k]) * d;
            /* rows that are not there */
            if (t.config.score && k >= count - (t.config.vocab - 1) * t.config.hidden)
                moved[k] = 0;
        }
        want = cimag(slow_objective_loss(&t, moved, ref)) / SLOW_STEP;
        test_expect(fabs(slope - want) <= 1e-10 * fabs(want),
                    "direction %d: %.15g, slow.h has %.15g", direction, slope, want);
        free(moved);
    }
    free(theta);
    free(ref);
    free(gradient);
    objective_result_free(&r);
    objective_task_close(&t);
    test_end("objective_%s_truth%s", objective_name(kind),
             temperature > 0 ? " at a temperature" : "");
}

/* Whole gradients against differences of the loss along random directions, in fp64, on two
   ranks. */
static void test_gradient(int kind) {
    objective_way way = {.dp = 1,
                         .sp = 2,
                         .accumulation = 1,
                         .layout = SEQPAR_LAYOUT_ZIGZAG,
                         .reference_device = 1};
    objective_task t;
    objective_result at, side;
    double losses[4], slope, want, h = 2e-6; /* clips have corners: a small step crosses few */
    static const double steps[] = {-2, -1, 1, 2};
    objective_task_open(&t, kind, 3, 30, 64, 23);
    objective_run(&t, &way, &at);
    for (int direction = 0; direction < 3; direction++) {
        double *moved = calloc((size_t)at.elements, sizeof *moved);
        for (int i = 0; i < 4; i++) {
            for (int64_t k = 0; k < at.elements; k++)
                moved[k] = at.start[k] +
                           steps[i] * h * (at.start[k] != 0) *
                               seqpar_random_normal(5, (uint64_t)direction, (uint64_t)k);
            t.start = moved;
            objective_run(&t, &way, &side);
            losses[i] = side.loss;
            objective_result_free(&side);
        }
        want = (8 * (losses[2] - losses[1]) - (losses[3] - losses[0])) / (12 * h);
        slope = 0;
        for (int64_t k = 0; k < at.elements; k++)
            slope += at.gradient[k] * (at.start[k] != 0) *
                     seqpar_random_normal(5, (uint64_t)direction, (uint64_t)k);
        test_expect(fabs(slope - want) <= 2e-7 * fabs(want) + 1e-8,
                    "direction %d: %.12g, differences say %.12g", direction, slope, want);
        free(moved);
    }
    objective_result_free(&at);
    objective_task_close(&t);
    test_end("objective_%s_gradient", objective_name(kind));
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_segments());
    TEST(test_spread());
    TEST(test_rows_at_a_time(seqpar_device_reference(), "reference"));
    TEST(test_rows_at_a_time(seqpar_device_cpu(1), "cpu"));
    TEST(test_golden());
    TEST(test_identities());
    TEST(test_kinds());
    TEST(test_refused());
    TEST(test_derivatives());
    for (int kind = 0; kind < OBJECTIVES; kind++) TEST(test_truth(kind, 0));
    TEST(test_truth(OBJECTIVE_KD, 1.6));
    TEST(test_truth(OBJECTIVE_PRM, 0.6));
    TEST(test_truth(OBJECTIVE_POLICY, 0.7));
    TEST(test_truth(OBJECTIVE_GRPO, 1.3));
    for (int kind = 0; kind < OBJECTIVES; kind++) TEST(test_gradient(kind));
    for (int kind = 0; kind < OBJECTIVES; kind++) {
        TEST(test_contract(kind, 1));
        TEST(test_contract(kind, 0));
        TEST(test_contract(kind, 2));
    }
    for (int kind = 0; kind < OBJECTIVES; kind++) TEST(test_edges(kind));
    return test_summary();
}
