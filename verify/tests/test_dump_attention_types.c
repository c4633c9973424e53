/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on dumps of a layer's attention in every type: steps that are rounded as
   kernels and rings round, results that were cast once too often, and both sides of the
   limits. */
#define FOLDER "build/test_dump_attention_types.d"
#include "support/attention_scene.h"

enum { ROW = 64 }; /* as wide as a head can be here */

/* ---- rounding ---- */

/* As a ring in F32 does it: sums in float, hops merged by the sigmoid of their lse, which is a
   float, too. What each hop gives is rounded to `bits`. */
static void float_ring(int bits, int factors) {
    static float p[MOST];
    for (int64_t n = 0; n < size_of(LSE); n++) {
        float out[ROW] = {0}, lse = -INFINITY;
        int64_t t = n / s.heads, h = n % s.heads, kv = h / (s.heads / s.kv_heads);
        for (hop = 0; hop < s.sp; hop++) {
            float top = -INFINITY, sum = 0, own[ROW] = {0}, merged, weight;
            for (int64_t u = 0; u < s.tokens; u++) {
                float x = 0;
                for (int64_t i = 0; i < s.dim; i++)
                    x += (float)at(Q, t, h)[i] * (float)at(K, u, kv)[i];
                p[u] = in_hop(t, u) ? (float)s.scale * x : -INFINITY;
                top = fmaxf(top, p[u]);
            }
            if (top == -INFINITY) continue;
            for (int64_t u = 0; u < s.tokens; u++) sum += p[u] = expf(p[u] - top);
            for (int64_t u = 0; u < s.tokens; u++)
                for (int64_t i = 0; i < s.out_dim; i++)
                    own[i] += (float)narrow(p[u], factors) * (float)at(V, u, kv)[i];
            merged = top + logf(sum);
            weight = 1 / (1 + expf(lse - merged));
            for (int64_t i = 0; i < s.out_dim; i++)
                out[i] -= weight * (out[i] - (float)narrow(own[i] / sum, bits));
            lse = lse == -INFINITY ? merged : lse - logf(1 / (1 + expf(merged - lse)));
        }
        s.x[LSE][n] = lse;
        for (int64_t i = 0; i < s.out_dim; i++) s.x[OUT][n * s.out_dim + i] = out[i];
    }
}

/* Backward in double, hop by hop, with numbers of products rounded to `factors` and what a hop
   gives to `bits`. */
static void rounded_backward(int bits, int factors) {
    double *sum[TENSORS] = {0}, *delta = delta_of_out();
    int sums = s.bits == F64 ? F64 : F32;
    for (int t = DQ; t < TENSORS; t++) sum[t] = calloc((size_t)size_of(t), sizeof *sum[t]);
    for (hop = 0; hop < s.sp; hop++) {
        rule r = seeing(in_hop);
        clear(DQ);
        backward_bits(&r, s.x[LSE], delta, factors);
        for (int t = DQ; t < TENSORS; t++)
            for (int64_t i = 0; i < size_of(t); i++)
                sum[t][i] = narrow(sum[t][i] + narrow(s.x[t][i], bits), sums);
    }
    for (int t = DQ; t < TENSORS; t++) copy(t, sum[t]);
    for (int t = DQ; t < TENSORS; t++) free(sum[t]);
}

static void test_types(void) {
    static const int types[] = {F64, F32, F16, BF16};
    for (int i = 0; i < 4; i++)
        for (int upcast = 0; upcast < 2; upcast++)
            for (int64_t sp = 2; sp <= 4; sp += 2) {
                int factors = types[i] < F32 ? types[i] : F64;
                make(SEQPAR_LAYOUT_ZIGZAG, sp);
                s.bits = types[i];
                s.stored = upcast && s.bits < F32 ? F32 : types[i];
                s.lse_bits = s.bits == F64 ? F64 : F32;
                inputs_narrow();
                if (s.bits == F64)
                    both(right_rule());
                else
                    float_ring(F32, factors);
                narrow_all(OUT, s.bits);
                rounded_backward(F64, factors);
                write_scene();
                expect(0, "right",
                       s.bits == BF16  ? "rounding to BF16"
                       : s.bits == F16 ? "rounding to F16"
                       : s.bits == F32 ? "rounding to F32"
                                       : "rounding to F64");
                test_end("attention_right_bits%d_%d_P%lld", s.bits, upcast, (long long)sp);
            }
}

/* flash-attention gives each hop's out in BF16, and that is good enough. */
static void test_usual_partials(void) {
    for (int64_t sp = 2; sp <= 8; sp *= 2) {
        make(SEQPAR_LAYOUT_ZIGZAG, sp);
        s.bits = s.stored = BF16;
        inputs_narrow();
        float_ring(BF16, BF16);
        narrow_all(OUT, BF16);
        rounded_backward(BF16, BF16);
        write_scene();
        expect(0, "right", "rounding to BF16");
        test_end("attention_right_partials_P%lld", (long long)sp);
    }
}

/* Products of numbers that were rounded to `factors`, all else exact; the inputs are restored.
   scores: they are rounded, too, and so is dout . v. */
static void rough(int factors) {
    double *kept[TENSORS] = {0};
    inputs_narrow();
    for (int t = Q; t <= DOUT; t++) {
        kept[t] = malloc((size_t)size_of(t) * sizeof(double));
        memcpy(kept[t], s.x[t], (size_t)size_of(t) * sizeof(double));
        narrow_all(t, factors);
    }
    both(right_rule());
    for (int t = Q; t <= DOUT; t++) copy(t, kept[t]);
    for (int t = Q; t <= DOUT; t++) free(kept[t]);
}

/* Stripes on 4 ranks: values of ranks 0 and 1 are large and cancel, so that what a hop gives is
   far larger than out. Queries of rank 0, which see one more of them, look away. */
static void cancelling_hops(void) {
    static const int64_t cu[] = {0, 804};
    make_sized(804, 1, cu);
    s.bits = s.stored = BF16;
    randomize();
    split(SEQPAR_LAYOUT_STRIPE, 4);
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t h = 0; h < s.heads; h++) {
            int large = s.rank[t] < 2 && t > 3;
            for (int64_t i = 0; i < s.dim; i++) at(Q, t, h)[i] *= 0.01;
            at(Q, t, h)[0] = s.rank[t] == 0 ? -100 : 0;
            at(K, t, h / 3)[0] = large;
            for (int64_t i = 0; large && h % 3 == 0 && i < s.out_dim; i++)
                at(V, t, h / 3)[i] = 6 * at(V, t, h / 3)[i] + (s.rank[t] ? -265 : 265);
        }
}

/* Backward in float, a sum after the other, and with it what is left of two that cancel. */
static void float_backward(void) {
    clear(DQ);
    for (int64_t n = 0; n < size_of(LSE) * s.tokens; n++) {
        int64_t t = n / s.tokens / s.heads, h = n / s.tokens % s.heads, u = n % s.tokens;
        int64_t kv = h / (s.heads / s.kv_heads);
        float x = 0, dp = 0, delta = 0, w, ds;
        if (!right(t, u)) continue;
        for (int64_t i = 0; i < s.dim; i++) x += (float)at(Q, t, h)[i] * (float)at(K, u, kv)[i];
        for (int64_t i = 0; i < s.out_dim; i++) {
            dp += (float)at(DOUT, t, h)[i] * (float)at(V, u, kv)[i];
            delta += (float)at(DOUT, t, h)[i] * (float)at(OUT, t, h)[i];
        }
        w = expf((float)s.scale * x - (float)*at(LSE, t, h));
        ds = w * (dp - delta) * (float)s.scale;
        for (int64_t i = 0; i < s.dim; i++) {
            at(DQ, t, h)[i] = (float)at(DQ, t, h)[i] + ds * (float)at(K, u, kv)[i];
            at(DK, u, kv)[i] = (float)at(DK, u, kv)[i] + ds * (float)at(Q, t, h)[i];
            at(DV, u, kv)[i] = (float)at(DV, u, kv)[i] + w * (float)at(DOUT, t, h)[i];
        }
    }
}

/* Documents of one to three tokens: dq of a query that sees one key is rounding alone. */
static void make_tiny(int n) {
    static const int64_t cu[3][4] = {{0, 3}, {0, 1, 3}, {0, 1, 2, 4}};
    make_sized(n % 3 == 2 ? 4 : 3, n % 3 + 1, cu[n % 3]);
    s.heads = n % 2 ? 6 : 2;
    s.kv_heads = 1;
    s.dim = s.out_dim = 8;
    s.scale = n % 4 < 2 ? 0.6 : 1 / sqrt(8);
    randomize();
    split(SEQPAR_LAYOUT_CONTIGUOUS, n % 5 ? 1 : 2);
    inputs_narrow();
    float_ring(F32, F64);
    narrow_all(OUT, F32);
    float_backward();
}

static void test_one_key(void) {
    char failed[160] = "";
    int wrong = 0;
    for (int n = 0; n < 300; n++) {
        make_tiny(n);
        write_scene();
        expect(0, "right", "attention right");
        if (test_why[0] && !wrong++)
            snprintf(failed, sizeof failed, "text %d: %.100s", n, said);
        test_why[0] = 0;
    }
    test_expect(!wrong, "%d of 300 are not right; %s", wrong, failed);
    test_end("attention_one_key_right");
}

/* What shows on such rows, and what shows beside them. */
static void test_one_key_wrong(void) {
    double *none;
    make_tiny(1);
    none = calloc((size_t)size_of(LSE), sizeof *none);
    backward(right_rule(), s.x[LSE], none);
    expect_named("delta_missing", "one_key", "delta_missing gives this dq, dk ");
    both(right_rule());
    for (int64_t i = 0; i < s.dim; i++) at(DQ, 0, 1)[i] += 1e-3 * at(K, 0, 0)[i];
    expect_said("one_key_dq", 1, "wrong: unknown", "first at rank 0, local row 0, token 0");
    both(right_rule());
    for (int64_t i = 0; i < size_of(DQ); i++) s.x[DQ][i] *= 1.1;
    expect_said("one_key_dq_scaled", 1, "wrong: unknown", "no known mistake gives this dq");
    backward(right_rule(), none, delta_of_out()); /* weights without lse */
    expect_said("one_key_lse_lost", 1, "wrong: unknown", "dv is ");
    free(none);
    make_tiny(15);
    both((rule){has_own_row, own_row, 0, s.scale, 0});
    expect_named("stale_kv", "one_key", "stale_kv gives this out, lse, dq, dk, dv");
}

/* Types of a right step as it is written; what is narrowed beyond that is a mistake. */
static void in_type(int bits, int stored) {
    make(SEQPAR_LAYOUT_CONTIGUOUS, 4);
    s.bits = bits;
    s.stored = stored;
    right_step();
    for (int t = OUT; t < TENSORS; t++) narrow_all(t, t == LSE ? F32 : bits);
}

static void test_casts(void) {
    static const int types[] = {F16, F32};
    for (int i = 0; i < 2; i++)
        for (int t = OUT; t < TENSORS; t++) {
            if (t == LSE || (t == OUT && i)) continue; /* F32: BF16 kernels of F32 inputs */
            in_type(types[i], types[i]);
            narrow_all(t, BF16);
            expect_named("cast_to_low_precision", names[t],
                         i ? "holds BF16 numbers alone, and the attention computes in F32"
                           : "holds BF16 numbers alone, and the attention computes in F16");
        }
    in_type(F16, F16);
    narrow_all(DQ, BF16);
    s.stored_of[DQ] = BF16;
    expect_named("cast_to_low_precision", "stored", "gives this dq (limit of it");
    in_type(F32, F32);
    for (int t = OUT; t < TENSORS; t++) narrow_all(t, t == LSE ? F32 : BF16);
    s.dtype = "float32";
    expect_named("cast_to_low_precision", "said", "gives this out, dq, dk, dv (limit of it");
    make(SEQPAR_LAYOUT_ZIGZAG, 4);
    s.bits = s.stored = F16;
    right_step();
    backward(seeing(own_alone), s.x[LSE], delta_of_out());
    narrow_all(DQ, BF16); /* and another mistake, within its rounding */
    keep_alone(DQ);
    expect_named("dq_of_one_hop", "cast", "dq holds BF16 numbers alone");
}

/* Numbers of few bits that are no mistake. */
static void test_casts_right(void) {
    in_type(F16, F16);
    for (int64_t i = 0; i < size_of(DOUT); i++) s.x[DOUT][i] *= 0x1p-17;
    right_step(); /* gradients of F16 that have lost bits */
    expect_said("f16_small_gradients", 0, "right", "rounding to F16");
    in_type(F32, F32);
    for (int t = DQ; t < TENSORS; t++) narrow_all(t, BF16);
    for (int t = DQ; t < TENSORS; t++) s.stored_of[t] = BF16;
    expect_said("gradients_written_in_bf16", 0, "right", "rounding to F32");
    in_type(BF16, F32);
    s.dtype = "bfloat16";
    expect_said("bf16_said", 0, "right", "rounding to BF16");
    rough(BF16);
    s.dtype = "bfloat16";
    expect_said("bf16_said_of_f32", 0, "right", "rounding to BF16");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    rough(F16);
    s.dtype = "tf32";
    expect_said("tf32_said", 0, "right", "attention right");
}

/* What a hop gives is rounded to BF16, the sum is of F32, or of F16. */
static void test_partials_of_other_types(void) {
    static const int types[] = {F16, F32};
    for (int i = 0; i < 2; i++)
        for (int64_t sp = 2; sp <= 8; sp *= 2) {
            make(SEQPAR_LAYOUT_CONTIGUOUS, sp);
            s.bits = s.stored = types[i];
            right_step();
            rounded_backward(BF16, F64);
            expect_named("partials_in_low_precision", types[i] == F16 ? "f16" : "f32",
                         "gives this dq, dk, dv (limit of it");
            inputs_narrow();
            float_ring(BF16, F64);
            s.skip = ~15u & ~(1u << OUT) & ~(1u << LSE);
            expect_named("partials_in_low_precision", "out", "gives this out (limit of it");
        }
}

/* Kernels that take BF16 of numbers in F32. */
static void test_autocast(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 4);
    rough(BF16);
    for (int t = OUT; t < TENSORS; t++) narrow_all(t, t == LSE ? F32 : BF16);
    write_scene();
    expect(0, "right", "rounding to BF16");
    test_end("attention_autocast");
}

static void test_precision(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    rough(F16); /* TF32 has as many bits */
    write_scene();
    expect(0, "marginal", "out is as far away as products in TF32 would make it");
    test_end("attention_tf32");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    rough(BF16);
    write_scene();
    expect(0, "marginal", "dk is as far away as products in BF16 would make it");
    test_end("attention_products_in_bf16");
    make(SEQPAR_LAYOUT_ZIGZAG, 3); /* and a mistake that is found through it */
    rough(F16);
    double *dq = malloc((size_t)size_of(DQ) * sizeof *dq);
    memcpy(dq, s.x[DQ], (size_t)size_of(DQ) * sizeof *dq);
    for (int64_t i = 0; i < size_of(DQ); i++) s.x[DQ][i] = dq[i] / s.scale;
    free(dq);
    expect_named("dq_scale_missing", "tf32", "gives this dq");
}

static void test_low_precision(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.bits = s.stored = BF16;
    for (int64_t i = 0; i < size_of(Q); i++) s.x[Q][i] *= 8;
    inputs_narrow();
    score_bits = BF16; /* as in plain code, not in kernels */
    both(right_rule());
    score_bits = F64;
    write_scene();
    expect(0, "marginal", "out is as far away as scores in that type, too, would make it");
    test_end("attention_scores_in_bf16");
    cancelling_hops();
    inputs_narrow();
    float_ring(BF16, F64);
    narrow_all(OUT, BF16);
    s.skip = ~15u & ~(1u << OUT) & ~(1u << LSE);
    expect_named("partials_in_low_precision", "", "gives this out (limit of it");
    float_ring(F32, F64);
    narrow_all(OUT, BF16);
    write_scene();
    expect(0, "right", "attention right");
    test_end("attention_right_where_hops_cancel");
}

/* What was said of a tensor: distance and limit of the whole and of the worst row. */
static void read_distances(const char *tensor, double x[4]) {
    char key[32];
    const char *found;
    snprintf(key, sizeof key, " %s is ", tensor);
    for (found = strstr(said, key); found && !strchr("0123456789", found[strlen(key)]);)
        found = strstr(found + 1, key);
    test_expect(found && sscanf(found + strlen(key),
                                "%lf away (L2; limit %lf), its worst row %lf of its terms' "
                                "size (limit %lf)",
                                &x[0], &x[1], &x[2], &x[3]) == 4,
                "no distances of %s in '%.900s'", tensor, said);
}

/* How many times the limit a tensor is off when it is all times 1 + its limit. */
static double times_limit(int t, double *limit) {
    double x[4] = {0};
    write_scene();
    expect(0, "right", "attention right");
    read_distances(names[t], x);
    *limit = x[1];
    for (int64_t k = 0; k < size_of(t); k++) s.x[t][k] *= 1 + *limit;
    write_scene();
    if (!test_why[0]) {
        expect(0, "right", "right"); /* or not */
        test_why[0] = 0;
    }
    read_distances(names[t], x);
    for (int64_t k = 0; k < size_of(t); k++) s.x[t][k] /= 1 + *limit;
    return fmax(x[0] / x[1], x[2] / x[3]);
}

/* Each tensor as far off as 0.8, 1.2 and 1.7 times its limit; of BF16: of numbers in BF16 whose
   attention was kept in F32. */
static void test_limits(void) {
    static const double times[] = {0.8, 1.2, 1.7};
    static const char *const verdicts[] = {"right", "marginal", "wrong: unknown"};
    static const int bits[] = {F64, F32, BF16};
    for (int n = 0; n < 3 * TENSORS * 3; n++) {
        int b = bits[n / 3 / TENSORS], t = n / 3 % TENSORS, i = n % 3;
        double low = b == F64 ? 1e-16 : b == F32 || t == LSE ? 1e-8 : 1e-3, limit, is;
        double by = b == BF16 && t != LSE && i == 2 ? 9 : times[i]; /* scores in BF16: twice */
        if (t < OUT) continue;
        make(SEQPAR_LAYOUT_ZIGZAG, 3);
        s.bits = b;
        inputs_narrow();
        both(right_rule());
        s.bits = s.stored = b == F64 ? F64 : F32;
        s.lse_bits = F64;
        is = times_limit(t, &limit);
        test_expect(limit > low && limit < 300 * low, "limit %g", limit);
        for (int64_t k = 0; k < size_of(t); k++) s.x[t][k] *= 1 + by / is * limit;
        write_scene();
        expect(i == 2, verdicts[i], verdicts[i]);
        test_end("attention_limit_%d_%s_%g", b, names[t], times[i]);
    }
}

/* A mistake is named as soon as what it gives is wrong: dq without the scale, which is so near
   to 1 that dq is off by so many times its limit. */
static void test_named_near_limit(void) {
    static const double times[] = {1.7, 1.9, 2.5};
    for (int i = 0; i < 3; i++) {
        double limit, is;
        make(SEQPAR_LAYOUT_ZIGZAG, 3);
        s.bits = s.stored = F32;
        s.lse_bits = F64;
        s.scale = 1;
        inputs_narrow();
        both(right_rule());
        is = times_limit(DQ, &limit);
        s.scale = 1 / (1 + times[i] / is * limit);
        both(right_rule());
        for (int64_t k = 0; k < size_of(DQ); k++) s.x[DQ][k] /= s.scale;
        write_scene();
        expect(1, "wrong: dq_scale_missing", "gives this dq");
        test_end("attention_named_at_%g_limits", times[i]);
    }
}

/* Written as F16 all the same: where dq is handed on, it is cast once more. */
static void test_another_type(void) {
    static const int results[] = {OUT, DQ, DK, DV};
    for (int i = 0; i < 4; i++) {
        make(SEQPAR_LAYOUT_ZIGZAG, 2);
        s.bits = s.stored = F16;
        right_step();
        narrow_all(results[i], BF16);
        expect_named("cast_to_low_precision", "written", names[results[i]]);
    }
    make(SEQPAR_LAYOUT_ZIGZAG, 2);
    s.bits = s.stored = F16;
    inputs_narrow();
    for (int64_t i = 0; i < size_of(V); i++) s.x[V][i] = narrow(s.x[V][i], BF16);
    right_step(); /* v has few digits, and dv may */
    narrow_all(DV, BF16);
    write_scene();
    expect(0, "right", "attention right");
    test_end("attention_few_digits_of_v");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_types());
    TEST(test_usual_partials());
    TEST(test_one_key());
    TEST(test_one_key_wrong());
    TEST(test_casts());
    TEST(test_casts_right());
    TEST(test_partials_of_other_types());
    TEST(test_autocast());
    TEST(test_precision());
    TEST(test_low_precision());
    TEST(test_limits());
    TEST(test_named_near_limit());
    TEST(test_another_type());
    return test_summary();
}
