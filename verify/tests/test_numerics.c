/* SPDX-License-Identifier: MIT OR Unlicense */
/* exp, log, random numbers, schedules, optimizers; and that a row of a row operation has its
   bits wherever it lies. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include <zlib.h>
#include "support/nf4.h"
#include "support/test.h"

#define COUNT(list) ((int64_t)(sizeof(list) / sizeof *(list)))

static int same_bits(double a, double b) { return !memcmp(&a, &b, sizeof a); }

/* ---- exp and log ---- */

#define EXP_ULPS 2
#define LOG_ULPS \
    2.05 /* 2.016 was the worst of 10^8, just below the root of 1/2; 1.99 elsewhere */

/* Distance in units of the last place of the true value (of the smallest denormal at least). */
static double ulps(double got, long double want) {
    if (want == 0) return got == 0 ? 0 : HUGE_VAL;
    return (double)(fabsl((long double)got - want) /
                    ldexpl(1, ilogbl(want) < -1022 ? -1074 : ilogbl(want) - 52));
}

static double uniform(double low, double high) {
    return low + (high - low) * (double)(test_random() >> 11) / 9007199254740992.0;
}

/* every exponent, denormals included, is as likely as any other */
static double any_positive(void) {
    uint64_t bits = test_random() >> 1;
    double x;
    memcpy(&x, &bits, 8);
    return x > 0 && x <= 1.7976931348623157e308 ? x : 1.0;
}

static double exp_error(double x) { return ulps(seqpar_exp(x), expl((long double)x)); }
static double log_error(double x) { return ulps(seqpar_log(x), logl((long double)x)); }

static void test_exp(void) {
    static const double edges[] = {1e-300,
                                   -1e-300,
                                   5e-324,
                                   1e-17,
                                   -1e-17,
                                   0.34657359027997264,
                                   -0.34657359027997264,
                                   0.34657359027997270,
                                   1,
                                   -1,
                                   700,
                                   -700,
                                   709.0,
                                   709.7,
                                   -708.3};
    static const double spans[] = {700, 40, 1, 1e-3, 1e-9};
    double worst = 0;
    int64_t i;
    for (i = 0; i < 300000; i++) {
        double span = spans[i % COUNT(spans)], x = uniform(-span, span), error = exp_error(x);
        if (!test_expect(error <= EXP_ULPS, "exp(%.17g) is %.2f ulp off", x, error)) break;
        worst = fmax(worst, error);
    }
    for (i = 0; i < COUNT(edges); i++)
        test_expect(exp_error(edges[i]) <= EXP_ULPS, "exp(%.17g) is %.2f ulp off", edges[i],
                    exp_error(edges[i]));
    for (i = -1000; i <= 1000; i++)
        test_expect(exp_error((double)i * 0.69314718055994531) <= EXP_ULPS, "exp(%lld ln 2)",
                    (long long)i);
    test_end("numerics_exp (worst %.2f ulp)", worst);
}

static void test_exp_edges(void) {
    double x;
    test_expect(same_bits(seqpar_exp(0.0), 1.0) && same_bits(seqpar_exp(-0.0), 1.0),
                "exp(0) is not 1");
    test_expect(same_bits(seqpar_exp(-HUGE_VAL), 0.0) && same_bits(seqpar_exp(-1e300), 0.0) &&
                    same_bits(seqpar_exp(-746), 0.0),
                "exp of very little is not 0");
    test_expect(seqpar_exp(HUGE_VAL) == HUGE_VAL && seqpar_exp(1e300) == HUGE_VAL &&
                    seqpar_exp(710) == HUGE_VAL,
                "exp of very much is not infinite");
    test_expect(seqpar_exp((double)NAN) != seqpar_exp((double)NAN) &&
                    seqpar_exp(-(double)NAN) != seqpar_exp(-(double)NAN),
                "exp(NaN) is a number");
    for (x = -745.1; x < -708.4; x += 0.0173)
        test_expect(exp_error(x) <= EXP_ULPS, "exp(%.17g), a denormal, is %.2f units off", x,
                    exp_error(x));
    test_expect(exp_error(709.782712893383) <= EXP_ULPS &&
                    isinf(seqpar_exp(709.782712893385)) && isinf(seqpar_exp(1e300)),
                "exp does not reach to the largest double");
    for (x = 709.0; x < 709.782712893384; x += 0.00173)
        test_expect(exp_error(x) <= EXP_ULPS, "exp(%.17g) is %.2f ulp off", x, exp_error(x));
    test_end("numerics_exp_edges");
}

static void test_log(void) {
    double worst = 0, x;
    int64_t i;
    for (i = 0; i < 300000; i++) {
        x = i % 3 == 0   ? any_positive()
            : i % 3 == 1 ? uniform(0.5, 2)
                         : 1 + ldexp(uniform(-1, 1), (int)test_integer(-50, -1));
        if (!test_expect(log_error(x) <= LOG_ULPS, "log(%.17g) is %.2f ulp off", x,
                         log_error(x)))
            break;
        worst = fmax(worst, log_error(x));
    }
    for (x = 5e-324; x < 1e308; x *= 3)
        test_expect(log_error(x) <= LOG_ULPS, "log(%.17g) is %.2f ulp off", x, log_error(x));
    test_end("numerics_log (worst %.2f ulp)", worst);
}

static void test_log_edges(void) {
    static const double denormals[] = {5e-324, 1e-323, 2.2250738585072009e-308, 1.1e-310};
    static const double root = 1.4142135623730951;
    int64_t i;
    test_expect(same_bits(seqpar_log(1.0), 0.0), "log(1) is not 0");
    test_expect(seqpar_log(0.0) == -HUGE_VAL && seqpar_log(-0.0) == -HUGE_VAL,
                "log(0) is not -infinity");
    test_expect(seqpar_log(HUGE_VAL) == HUGE_VAL, "log of infinity");
    test_expect(seqpar_log(-1.0) != seqpar_log(-1.0) &&
                    seqpar_log(-HUGE_VAL) != seqpar_log(-HUGE_VAL),
                "log of less than 0 is a number");
    test_expect(seqpar_log((double)NAN) != seqpar_log((double)NAN), "log(NaN) is a number");
    for (i = 0; i < COUNT(denormals); i++)
        test_expect(log_error(denormals[i]) <= LOG_ULPS, "log(%g) is %.2f ulp off",
                    denormals[i], log_error(denormals[i]));
    for (i = -3; i <= 3; i++)
        test_expect(log_error(root + (double)i * 2.3e-16) <= LOG_ULPS &&
                        log_error(0.5 * root + (double)i * 1.2e-16) <= LOG_ULPS,
                    "log beside the root of 2");
    test_end("numerics_log_edges");
}

/* The fast device's, in fp32 by vectors. */
static float vector_exp2(float x) {
    float lane[SEQPAR__VL];
    seqpar__vstore(lane, seqpar__vexp2(seqpar__vsplat(x)));
    return lane[0];
}

static float vector_exp(float x) {
    float lane[SEQPAR__VL];
    seqpar__vstore(lane, seqpar__vexp(seqpar__vsplat(x)));
    return lane[0];
}

static double ulps32(float got, long double want) {
    return (double)(fabsl((long double)got - want) / ldexpl(1, ilogbl(want) - 23));
}

static void test_exp_vectors(void) {
    double worst2 = 0, worst = 0, error;
    for (int64_t i = 0; i < 300000; i++) {
        float x = (float)uniform(-125.9, 127.9), y = (float)uniform(-87, 88);
        if (i % 3 == 0) x = (float)ldexp(x, -(int)test_integer(0, 30));
        error = ulps32(vector_exp2(x), exp2l((long double)x));
        if (!test_expect(error <= 1.2, "2^%.9g is %.2f ulp off", x, error)) break;
        worst2 = fmax(worst2, error);
        error = ulps32(vector_exp(y), expl((long double)y));
        if (!test_expect(error <= 1.2, "exp(%.9g) is %.2f ulp off", y, error)) break;
        worst = fmax(worst, error);
    }
    for (int n = -125; n <= 127; n++)
        test_expect(vector_exp2((float)n) == ldexpf(1, n), "2^%d is not exact", n);
    test_expect(vector_exp2(-127) == 0 && vector_exp2(-1e30f) == 0 &&
                    vector_exp2(-HUGE_VALF) == 0,
                "2^x of very little is not 0");
    for (float x = -127; x < -126; x += 0.0173f)
        test_expect(vector_exp2(x) >= 0 && vector_exp2(x) <= 1.2e-38f, "2^%g is %g", x,
                    vector_exp2(x));
    test_expect(isnan(vector_exp2(NAN)) && isnan(vector_exp(NAN)), "exp(NaN) is a number");
    test_end("numerics_exp_vectors (worst %.2f ulp to base 2, %.2f to base e)", worst2, worst);
}

/* ---- random numbers ---- */

/* Philox4x32-10 of the Random123 distribution: counter and key as 32-bit words, lowest
   first. */
static void test_philox(void) {
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } table[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    int64_t i;
    for (i = 0; i < COUNT(table); i++) {
        const uint32_t *c = table[i].counter, *k = table[i].key;
        uint32_t out[5] = {0, 0, 0, 0, 0x5eed}; /* the last is somebody else's */
        seqpar_random(out, (uint64_t)k[1] << 32 | k[0], (uint64_t)c[3] << 32 | c[2],
                      (uint64_t)c[1] << 32 | c[0]);
        test_expect(!memcmp(out, table[i].out, sizeof table[i].out),
                    "vector %lld: %08x %08x %08x %08x", (long long)i, out[0], out[1], out[2],
                    out[3]);
        test_expect(out[4] == 0x5eed, "vector %lld: a fifth number is written", (long long)i);
    }
    test_end("numerics_philox_known_answers");
}

/* Newton: each step doubles the bits that are right */
static uint32_t inverse32(uint32_t odd) {
    uint32_t x = odd;
    int i;
    for (i = 0; i < 5; i++) x *= 2 - odd * x;
    return x;
}

/* Philox backwards: the counter (x becomes it) that gives the words x under this key. */
static void philox_backwards(uint32_t x[4], uint64_t key) {
    int round;
    for (round = 9; round >= 0; round--) {
        uint32_t k0 = (uint32_t)key + (uint32_t)round * 0x9E3779B9u;
        uint32_t k1 = (uint32_t)(key >> 32) + (uint32_t)round * 0xBB67AE85u;
        uint32_t x0 = x[3] * inverse32(0xD2511F53u), x2 = x[1] * inverse32(0xCD9E8D57u);
        uint32_t x1 = x[0] ^ (uint32_t)((uint64_t)0xCD9E8D57u * x2 >> 32) ^ k0;
        uint32_t x3 = x[2] ^ (uint32_t)((uint64_t)0xD2511F53u * x0 >> 32) ^ k1;
        x[0] = x0;
        x[1] = x1;
        x[2] = x2;
        x[3] = x3;
    }
}

/* The words nobody ever draws by chance: all zeros, all ones. */
static void test_uniform_extremes(void) {
    static const uint32_t words[] = {0, 1, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff};
    uint64_t key = UINT64_C(0x0123456789abcdef);
    int64_t i, j;
    for (i = 0; i < COUNT(words); i++)
        for (j = 0; j < COUNT(words); j++) {
            uint32_t x[4] = {words[i], words[j], 5, 7}, back[4];
            uint64_t high, low;
            double u, n;
            philox_backwards(x, key);
            low = (uint64_t)x[1] << 32 | x[0];
            high = (uint64_t)x[3] << 32 | x[2];
            seqpar_random(back, key, high, low);
            test_expect(back[0] == words[i] && back[1] == words[j] && back[2] == 5 &&
                            back[3] == 7,
                        "Philox was not turned round");
            u = seqpar_random_uniform(key, high, low);
            n = seqpar_random_normal(key, high, low);
            test_expect(u > 0 && u < 1, "words %08x %08x: %.17g is not in (0, 1)", words[i],
                        words[j], u);
            test_expect(fabs(n) < 7, "words %08x %08x: a normal number of %g", words[i],
                        words[j], n);
        }
    test_end("numerics_uniform_extremes");
}

/* Mean, variance and kurtosis within six standard errors; the next index and the next stream
   have nothing to do with this one. */
static void test_moments(void) {
    const int64_t n = 60000;
    double u1 = 0, u2 = 0, n1 = 0, n2 = 0, n4 = 0, next = 0, stream = 0;
    double error = 6 / sqrt((double)n);
    int64_t i;
    for (i = 0; i < n; i++) {
        double u = seqpar_random_uniform(11, 3, (uint64_t)i) - 0.5;
        double x = seqpar_random_normal(13, 5, (uint64_t)i);
        test_expect(fabs(u) < 0.5, "not in (0, 1)");
        u1 += u;
        u2 += u * u;
        n1 += x;
        n2 += x * x;
        n4 += x * x * x * x;
        next += x * seqpar_random_normal(13, 5, (uint64_t)i + 1);
        stream += x * seqpar_random_normal(13, 6, (uint64_t)i);
    }
    test_expect(fabs(u1 / (double)n) < 0.29 * error &&
                    fabs(u2 / (double)n - 1.0 / 12) < 0.075 * error,
                "uniform: mean %g, variance %g", u1 / (double)n + 0.5, u2 / (double)n);
    test_expect(fabs(n1 / (double)n) < error && fabs(n2 / (double)n - 1) < 1.42 * error &&
                    fabs(n4 / (double)n - 3) < 9.8 * error,
                "normal: moments %g %g %g", n1 / (double)n, n2 / (double)n, n4 / (double)n);
    test_expect(fabs(next / (double)n) < error && fabs(stream / (double)n) < error,
                "neighbours go together: %g, %g", next / (double)n, stream / (double)n);
    test_end("numerics_random_moments");
}

static void test_random_keys(void) {
    double base = seqpar_random_uniform(1, 2, 3);
    double high = seqpar_random_uniform(1, 2 + (UINT64_C(1) << 40), 3);
    test_expect(base == seqpar_random_uniform(1, 2, 3), "the same place gives another number");
    test_expect(base != seqpar_random_uniform(2, 2, 3) &&
                    base != seqpar_random_uniform(1, 3, 3) &&
                    base != seqpar_random_uniform(1, 2, 4),
                "another place gives the same number");
    test_expect(base != high && base != seqpar_random_uniform(1 + (UINT64_C(1) << 40), 2, 3) &&
                    base != seqpar_random_uniform(1, 2, 3 + (UINT64_C(1) << 40)),
                "upper halves do not count");
    test_end("numerics_random_keys");
}

#define CARDS 97
static int is_permutation(const int64_t *order, int64_t count) {
    int64_t seen[CARDS] = {0}, i;
    for (i = 0; i < count; i++)
        if (order[i] < 0 || order[i] >= count || seen[order[i]]++) return 0;
    return 1;
}

static void test_shuffle(void) {
    int64_t a[CARDS + 1], b[CARDS], count, seed, i, at[5][5] = {{0}};
    for (count = 0; count <= CARDS; count++) {
        a[count] = -77;
        seqpar_shuffle(a, count, 3, (uint64_t)count);
        test_expect(is_permutation(a, count) && a[count] == -77,
                    "%lld cards: not a permutation", (long long)count);
    }
    seqpar_shuffle(NULL, 0, 7, 2); /* nothing to write */
    seqpar_shuffle(a, CARDS, 7, 2);
    seqpar_shuffle(b, CARDS, 7, 2);
    test_expect(!memcmp(a, b, sizeof b), "the same seed and epoch give another order");
    seqpar_shuffle(b, CARDS, 8, 2);
    test_expect(memcmp(a, b, sizeof b), "another seed gives the same order");
    seqpar_shuffle(b, CARDS, 7, 3);
    test_expect(memcmp(a, b, sizeof b), "another epoch gives the same order");
    for (seed = 0; seed < 5000; seed++) {
        seqpar_shuffle(a, 5, (uint64_t)seed, 0);
        for (i = 0; i < 5; i++) at[i][a[i]]++;
    }
    for (i = 0; i < 25; i++)
        test_expect(llabs((long long)at[i / 5][i % 5] - 1000) < 170,
                    "card %lld lies at %lld %lld times of 5000", (long long)i % 5,
                    (long long)i / 5, (long long)at[i / 5][i % 5]);
    test_end("numerics_shuffle");
}

/* Numbers that Philox' answers give by hand, in another language. */
static void test_random_answers(void) {
    static const struct {
        uint64_t key, stream, index;
        double uniform, normal;
    } table[] = {
        {0, 0, 0, 0.88052019788861424, 0.99113767993038548},
        {1, 2, 3, 0.39939876270185237, -0.43047584634403252},
        {11, 3, 9, 0.72187551502871028, -0.10680452342047059},
        {UINT64_C(5497558138887), UINT64_C(77309411329), UINT64_C(1125899906842630),
         0.18528626269554482, 0.3503686475712719},
        {UINT64_MAX, UINT64_MAX, UINT64_MAX, 0.25696152780488701, -0.07258079133347102},
    };
    static const int64_t shuffled[2][11] = {{10, 3, 6, 8, 0, 7, 2, 4, 5, 1, 9},
                                            {1, 2, 5, 6, 4, 7, 9, 0, 3, 10, 8}};
    int64_t order[11];
    for (int64_t i = 0; i < COUNT(table); i++) {
        double u = seqpar_random_uniform(table[i].key, table[i].stream, table[i].index);
        double n = seqpar_random_normal(table[i].key, table[i].stream, table[i].index);
        test_expect(u == table[i].uniform && fabs(n - table[i].normal) < 1e-14,
                    "case %lld: %.17g and %.17g", (long long)i, u, n);
    }
    for (int i = 0; i < 2; i++) {
        seqpar_shuffle(order, 11, 7 + (uint64_t)i, i ? 0 : 2);
        test_expect(!memcmp(order, shuffled[i], sizeof order), "order %d", i);
    }
    test_expect(seqpar__mix(0) == 0 && /* the first number of splitmix64 from 0 */
                    seqpar__mix(UINT64_C(0x9e3779b97f4a7c15)) == UINT64_C(0xe220a8397b1dcdaf),
                "splitmix64");
    test_end("numerics_random_known_answers");
}

/* A draw of Philox decides four neighbouring keys; each of the numbers counts. */
static void test_dropout_draws(void) {
    const seqpar_dropout none = {0, 3, 4}, some = {.3, UINT64_C(0x123456789), 5};
    const uint64_t key = seqpar_attn_dropout_key(some.seed, some.stream);
    test_expect(key == (some.seed ^ seqpar__mix(5)), "the key");
    for (int64_t i = 0; i < 400; i++) {
        const int64_t document = i % 7 + (i % 3 << 33), head = i % 11, query = i * 13 % 57,
                      at = i;
        uint32_t draw[4];
        seqpar_random(draw, key, (uint64_t)(document * 16777216 + head),
                      (uint64_t)(query * 4294967296 + at / 4));
        double want = (double)draw[at % 4] / 4294967296.0 < some.dropout ? 0 : 1 / .7;
        double got = seqpar_attn_dropout(&some, document, head, query, at);
        test_expect(fabs(got - want) < 1e-15, "key %lld: %g, not %g", (long long)at, got, want);
        test_expect(seqpar_attn_dropout(&none, document, head, query, at) == 1, "no dropout");
    }
    test_end("numerics_dropout_draws");
}

/* ---- sizes, and lists that grow ---- */

static void test_times(void) {
    const int64_t most = INT64_C(1) << 60;
    const int64_t table[][3] = {{0, 5, 0},
                                {5, 0, 0},
                                {0, INT64_MAX, 0},
                                {3, 7, 21},
                                {1, most - 1, most - 1},
                                {1, most, most},
                                {1, most + 1, most},
                                {most, 1, most},
                                {most + 1, 1, most},
                                {2, most / 2 - 1, most - 2},
                                {2, most / 2, most},
                                {2, most / 2 + 1, most},
                                {3, most / 3, most / 3 * 3},
                                {3, most / 3 + 1, most},
                                {INT64_MAX, INT64_MAX, most}};
    for (int64_t i = 0; i < COUNT(table); i++) {
        int64_t got = seqpar__times(table[i][0], table[i][1]);
        /* of what is more than 1 << 60 only that is known */
        test_expect(table[i][2] == most ? got >= most : got == table[i][2],
                    "%lld times %lld is %lld", (long long)table[i][0], (long long)table[i][1],
                    (long long)got);
    }
    for (int64_t count = -1; count < 4; count++) {
        unsigned char *data = seqpar__calloc(count, 3), any = 0;
        for (int64_t i = 0; i < 3 * count; i++) any |= data[i];
        test_expect(data && !any, "%lld elements", (long long)count);
        SEQPAR_FREE(data);
    }
    test_end("numerics_sizes");
}

/* A list grows by doubling and keeps what it holds; behind that it is empty. */
static void test_grow(void) {
    int32_t *list = NULL;
    int64_t capacity = 0, held = 0;
    static const int64_t needs[] = {1, 7, 15, 16, 17, 32, 33, 64, 128, 129, 130, 600, 1025};
    for (int64_t n = 0; n < COUNT(needs); n++) {
        const int64_t need = needs[n];
        void *data = list, *before = list;
        int64_t had = capacity, want = had ? had : SEQPAR__GROW_FROM;
        while (want < need) want *= 2;
        test_expect(seqpar__grow(&data, &capacity, need, 4), "no memory");
        list = data;
        test_expect(capacity == want && (want != had || data == before),
                    "%lld of %lld are wanted: %lld", (long long)need, (long long)had,
                    (long long)capacity);
        for (int64_t i = 0; i < held; i++) test_expect(list[i] == 5 + i, "what was held");
        for (int64_t i = had; i < capacity; i++) test_expect(list[i] == 0, "what is new");
        for (held = 0; held < need; held++) list[held] = 5 + (int32_t)held;
        for (int64_t i = held; i < capacity; i++) list[i] = 0;
    }
    void *data = list;
    test_expect(!seqpar__grow(&data, &capacity, INT64_C(1) << 59, 4) && data == list,
                "more than any machine has");
    SEQPAR_FREE(list);
    test_end("numerics_list_grows");
}

/* ---- schedules and optimizers: golden numbers ---- */

static void test_schedules(void) {
    /* 3 of 10 steps warm up; step 11 is one too many */
    static const struct {
        const char *name;
        int kind;
        double min_ratio, factor[12];
    } table[] = {
        {"constant", SEQPAR_LR_CONSTANT, 0, {0, 1.0 / 3, 2.0 / 3, 1, 1, 1, 1, 1, 1, 1, 1, 1}},
        {"linear",
         SEQPAR_LR_LINEAR,
         0,
         {0, 1.0 / 3, 2.0 / 3, 1, .857142857143, .714285714286, .571428571429, .428571428571,
          .285714285714, .142857142857, 0, 0}},
        {"cosine",
         SEQPAR_LR_COSINE,
         0,
         {0, 1.0 / 3, 2.0 / 3, 1, .950484433951, .811744900929, .611260466978, .388739533022,
          .188255099071, .049515566049, 0, .049515566049}},
        {"cosine_min",
         SEQPAR_LR_COSINE_MIN,
         0.1,
         {0, 1.0 / 3, 2.0 / 3, 1, .955435990556, .830570410836, .65013442028, .44986557972,
          .269429589164, .144564009444, .1, .144564009444}},
    };
    int64_t i, s;
    for (i = 0; i < COUNT(table); i++) {
        for (s = 0; s < 12; s++) {
            double factor = seqpar_lr_factor(table[i].kind, s, 3, 10, table[i].min_ratio);
            test_expect(fabs(factor - table[i].factor[s]) <= 1e-12,
                        "step %lld: %.12f, not %.12f", (long long)s, factor,
                        table[i].factor[s]);
        }
        test_expect(seqpar_lr_factor(table[i].kind, 0, 0, 10, 0) == 1,
                    "without warm-up the first step is not a whole one");
        test_expect(seqpar_lr_factor(table[i].kind, 5, 5, 5, 0) <= 1,
                    "no step after the warm-up");
        test_end("numerics_schedule_%s", table[i].name);
    }
}

typedef struct optimizer {
    const char *name;
    int sgd;
    /* after each step; m and v after the last */
    double lr, decay, clip, p, g[3], want[3], m, v;
} optimizer;

static const optimizer optimizers[] = {
    {"adamw",
     0,
     .01,
     .1,
     1,
     1,
     {.5, -.25, .1},
     {.9890000002, .985327305787383, .981129127774162},
     .028,
     .01475},
    {"adamw_clip",
     0,
     .01,
     .1,
     .5,
     1,
     {1, -.5, .2},
     {.9890000002, .985327305787383, .981129127774162},
     .028,
     .01475},
    {"adamw_tiny",
     0,
     .01,
     .1,
     1,
     1,
     {1e-8, -.5e-8, .2e-8},
     {.994, .991826226958815, .989576821663403},
     .0,
     .0},
    {"adamw_zero_gradient", 0, .01, .5, 1, 2, {0, 0, 0}, {1.99, 1.98005, 1.97014975}, 0, 0},
    {"sgd", 1, .1, 0, 1, 1, {.5, -.25, .125}, {.95, .975, .9625}, 0, 0},
    {"sgd_decay_clip", 1, .1, .5, .25, 2, {4, -8, 0}, {1.8, 1.91, 1.8145}, 0, 0},
};

/* Writes one number everywhere, or asks for it everywhere. */
static void spread(seqpar_device *device, void *data, int64_t count, double value) {
    int64_t i;
    for (i = 0; i < count; i++)
        seqpar_device_write(device, data, i, &value, 1, device->storage);
}

static void expect_everywhere(seqpar_device *device, const void *data, int64_t count,
                              double want, double tolerance, const char *what) {
    double value;
    int64_t i;
    for (i = 0; i < count; i++) {
        seqpar_device_read(device, &value, data, i, 1, device->storage);
        test_expect(fabs(value - want) <= tolerance, "%s: %.15g, not %.15g, at %lld", what,
                    value, want, (long long)i);
    }
}

/* Many equal elements: none is forgotten at the end of a block of any size. */
static void expect_optimizer(const optimizer *o, seqpar_device *device, double tolerance) {
    static const char *const steps[] = {"step 1", "step 2", "step 3"};
    int64_t count = 16384 + 13, bytes = count * seqpar_dtype_bytes(device->storage), i;
    seqpar_update_args a = {.count = count,
                            .lr = o->lr,
                            .beta1 = .9,
                            .beta2 = .95,
                            .eps = 1e-8,
                            .decay = o->decay,
                            .clip = o->clip};
    void *gradient = device->alloc(device, bytes), *state[3];
    for (i = 0; i < 3; i++) {
        state[i] = device->alloc(device, bytes);
        device->zero(device, state[i], bytes, NULL);
    }
    a.p = state[0];
    a.m = state[1];
    a.v = state[2];
    a.g = gradient;
    spread(device, a.p, count, o->p);
    for (a.t = 1; a.t <= 3; a.t++) {
        spread(device, gradient, count, o->g[a.t - 1]);
        test_expect(!(o->sgd ? device->sgd : device->adamw)(device, &a, NULL), "refused");
        expect_everywhere(device, a.p, count, o->want[a.t - 1], tolerance, steps[a.t - 1]);
    }
    if (o->m != 0) expect_everywhere(device, a.m, count, o->m, tolerance, "m");
    if (o->v != 0) expect_everywhere(device, a.v, count, o->v, tolerance, "v");
    for (i = 0; i < 3; i++) device->free(device, state[i]);
    device->free(device, gradient);
}

static void test_optimizers(void) {
    seqpar_device *reference = seqpar_device_reference(), *cpu = seqpar_device_cpu(1);
    int64_t i;
    for (i = 0; i < COUNT(optimizers); i++) {
        expect_optimizer(&optimizers[i], reference, 1e-12);
        test_end("numerics_%s_reference", optimizers[i].name);
        expect_optimizer(&optimizers[i], cpu, 1e-6);
        test_end("numerics_%s_cpu", optimizers[i].name);
    }
    seqpar_device_close(reference);
    seqpar_device_close(cpu);
}

/* ---- row operations: one call computes some rows of a bank; everything is written and read as doubles ---- */

#define ROWS     97
#define GAP      3   /* row strides are wider than rows */
#define STATS    4   /* values per row that lie in arrays of their own */
#define WIDE     271 /* wider than one packed panel of the product, and odd */
#define DEEP     263
#define HEADS    3
#define HEAD_DIM 10
#define VOCAB    61

typedef struct call { /* what an operation gets */
    seqpar_device *device;
    int64_t rows;
    seqpar_mat in, out;
    void *stats[STATS];
    const void *seeds[STATS], *weights;
    const int32_t *ids;
} call;

typedef struct row_op {
    const char *name;
    int64_t in, out, weights; /* widths; elements */
    seqpar_status (*run)(const call *c);
    /* the first columns of the input are what the output held before */
    int preset;
} row_op;

static seqpar_mat columns(const call *c, seqpar_mat m, int64_t first) {
    return (seqpar_mat){(char *)m.data + first * seqpar_dtype_bytes(c->device->storage),
                        m.stride};
}

static const void *weights_at(const call *c, int64_t first) {
    return (const char *)c->weights + first * seqpar_dtype_bytes(c->device->storage);
}

static seqpar_status run_product(const call *c, int64_t out, int64_t in, int64_t first,
                                 int transposed, int accumulate) {
    seqpar_matmul_args a = {.y = c->out,
                            .x = columns(c, c->in, first),
                            .w = {(void *)c->weights, transposed ? out : in},
                            .rows = c->rows,
                            .out = out,
                            .in = in,
                            .transposed = transposed,
                            .accumulate = accumulate};
    return c->device->matmul(c->device, &a, NULL);
}

static seqpar_status run_matmul(const call *c) { return run_product(c, WIDE, DEEP, 0, 0, 0); }
static seqpar_status run_matmul_small(const call *c) { return run_product(c, 5, 7, 0, 0, 0); }
static seqpar_status run_matmul_transposed(const call *c) {
    return run_product(c, WIDE, DEEP, 0, 1, 0);
}

static seqpar_status run_matmul_accumulate(const call *c) {
    return run_product(c, 29, DEEP, 29, 0, 1);
}

static seqpar_status run_rmsnorm(const call *c) {
    seqpar_rmsnorm_args a = {.y = c->out,
                             .x = c->in,
                             .rstd = c->stats[0],
                             .gain = c->weights,
                             .rows = c->rows,
                             .width = DEEP,
                             .eps = 1e-5};
    return c->device->rmsnorm(c->device, &a, NULL);
}

/* dx lies in the output, x and dy side by side in the input */
static seqpar_status run_rmsnorm_grad(const call *c) {
    seqpar_fold_op leaf[] = {{SEQPAR_FOLD_LEAF, 0}, {SEQPAR_FOLD_FINISH, 0}};
    seqpar_piece all = {.count = c->rows};
    void *dgain = c->device->alloc(c->device, DEEP * 8);
    seqpar_rmsnorm_grad_args a = {.fold = {leaf, 2, 2, NULL, 0, dgain},
                                  .leaves = &all,
                                  .dx = c->out,
                                  .dy = columns(c, c->in, DEEP),
                                  .x = columns(c, c->in, 2 * DEEP),
                                  .rstd = c->seeds[0],
                                  .gain = c->weights,
                                  .rows = c->rows,
                                  .width = DEEP};
    seqpar_status status = c->device->rmsnorm_grad(c->device, &a, NULL);
    c->device->free(c->device, dgain);
    return status;
}

/* in place: the output holds what the input held */
static seqpar_status turn(const call *c, int inverse) {
    int64_t half = HEAD_DIM / 2;
    seqpar_rope_args a = {.x = c->out,
                          .cosine = c->weights,
                          .sine = weights_at(c, VOCAB * half),
                          .positions = c->ids,
                          .rows = c->rows,
                          .heads = HEADS,
                          .head_dim = HEAD_DIM,
                          .inverse = inverse};
    return c->device->rope(c->device, &a, NULL);
}

static seqpar_status run_rope(const call *c) { return turn(c, 0); }
static seqpar_status run_rope_inverse(const call *c) { return turn(c, 1); }

static seqpar_status run_swiglu(const call *c) {
    seqpar_swiglu_args a = {
        .y = c->out, .gate = c->in, .up = columns(c, c->in, 53), .rows = c->rows, .width = 53};
    return c->device->swiglu(c->device, &a, NULL);
}

/* gate and up are overwritten: they lie in the output */
static seqpar_status run_swiglu_grad(const call *c) {
    seqpar_swiglu_args a = {.y = columns(c, c->in, 106),
                            .gate = c->out,
                            .up = columns(c, c->out, 53),
                            .rows = c->rows,
                            .width = 53};
    return c->device->swiglu_grad(c->device, &a, NULL);
}

static seqpar_status head(const call *c, int gradient) {
    seqpar_vocab_softmax_args a = {.logits = c->out,
                                   .rows = c->rows,
                                   .vocab = VOCAB,
                                   .targets = c->ids,
                                   .logp = c->stats[0],
                                   .entropy = c->stats[1],
                                   .lse = c->stats[2],
                                   .smooth = c->stats[3],
                                   .dlogp = c->seeds[0],
                                   .dentropy = c->seeds[1],
                                   .dsmooth = c->seeds[2],
                                   .dzloss = c->seeds[3],
                                   .gradient = gradient};
    return c->device->vocab_softmax(c->device, &a, NULL);
}

static seqpar_status run_head(const call *c) { return head(c, 0); }
static seqpar_status run_head_gradient(const call *c) { return head(c, 1); }

static seqpar_status run_embedding(const call *c) {
    seqpar_embedding_args a = {.x = c->out,
                               .table = {(void *)c->weights, 31},
                               .ids = c->ids,
                               .rows = c->rows,
                               .width = 29};
    return c->device->embedding(c->device, &a, NULL);
}

static seqpar_status run_add(const call *c) { /* elements: the rows of seeds */
    seqpar_add_args a = {
        .y = c->stats[0], .a = c->seeds[0], .b = c->seeds[1], .count = c->rows};
    return c->device->add(c->device, &a, NULL);
}

static const row_op row_ops[] = {
    {"matmul", DEEP, WIDE, WIDE *DEEP, run_matmul, 0},
    {"matmul_small", 7, 5, 35, run_matmul_small, 0},
    {"matmul_transposed", DEEP, WIDE, WIDE *DEEP, run_matmul_transposed, 0},
    {"matmul_accumulate", DEEP + 29, 29, 29 * DEEP, run_matmul_accumulate, 1},
    {"rmsnorm", DEEP, DEEP, DEEP, run_rmsnorm, 0},
    {"rmsnorm_grad", 3 * DEEP, DEEP, DEEP, run_rmsnorm_grad, 1},
    {"rope", HEADS *HEAD_DIM, HEADS *HEAD_DIM, 2 * VOCAB *HEAD_DIM / 2, run_rope, 1},
    {"rope_inverse", HEADS *HEAD_DIM, HEADS *HEAD_DIM, 2 * VOCAB *HEAD_DIM / 2,
     run_rope_inverse, 1},
    {"swiglu", 106, 53, 1, run_swiglu, 0},
    {"swiglu_grad", 159, 106, 1, run_swiglu_grad, 1},
    {"vocab_softmax", VOCAB, VOCAB, 1, run_head, 1},
    {"vocab_softmax_gradient", VOCAB, VOCAB, 1, run_head_gradient, 1},
    {"embedding", 1, 29, VOCAB * 31, run_embedding, 0},
    {"add", 1, 1, 1, run_add, 0},
};

typedef struct bank { /* inputs of all rows, and what all of them give */
    const row_op *op;
    double *in, *seeds, *weights; /* (ROWS, in), (STATS, ROWS) */
    int32_t ids[ROWS];
} bank;

static double *random_doubles(int64_t count, int narrow) {
    double *x = malloc((size_t)count * sizeof *x);
    int64_t i;
    /* narrow: exact in fp32 as well */
    for (i = 0; i < count; i++) x[i] = narrow ? (double)(float)test_normal() : test_normal();
    return x;
}

static bank bank_new(const row_op *op) {
    bank b = {.op = op,
              .in = random_doubles(ROWS * op->in, 1),
              .seeds = random_doubles(STATS * ROWS, 1),
              .weights = random_doubles(op->weights, 1)};
    int64_t i;
    for (i = 0; i < ROWS; i++) b.ids[i] = (int32_t)(i % 7 ? test_integer(0, VOCAB - 1) : 0);
    for (i = 2; i < ROWS && (op->run == run_head || op->run == run_head_gradient); i += 5)
        b.ids[i] = SEQPAR_IGNORE;
    return b;
}

static void bank_free(bank *b) {
    free(b->in);
    free(b->seeds);
    free(b->weights);
}

static void *buffer_of(seqpar_device *device, const double *from, int64_t count) {
    void *data = device->alloc(device, (count + 1) * seqpar_dtype_bytes(device->storage));
    if (from) seqpar_device_write(device, data, 0, from, count, device->storage);
    return data;
}

static void call_close(call *c) {
    int64_t s;
    for (s = 0; s < STATS; s++) {
        c->device->free(c->device, c->stats[s]);
        c->device->free(c->device, (void *)c->seeds[s]);
    }
    c->device->free(c->device, c->in.data);
    c->device->free(c->device, c->out.data);
    c->device->free(c->device, (void *)c->weights);
    free((void *)c->ids);
}

/* Rows pick[0..count) of the bank, in that order, on the device. */
static call call_open(const bank *b, seqpar_device *device, const int64_t *pick,
                      int64_t count) {
    const row_op *op = b->op;
    int64_t in_stride = op->in + GAP, out_stride = op->out + GAP + 2, i, s;
    int32_t *ids = malloc((size_t)count * sizeof *ids);
    double *zeros = calloc((size_t)(count * out_stride), sizeof *zeros);
    call c = {.device = device,
              .rows = count,
              .in = {buffer_of(device, NULL, count * in_stride), in_stride},
              .out = {buffer_of(device, zeros, count * out_stride), out_stride},
              .weights = buffer_of(device, b->weights, op->weights),
              .ids = ids};
    for (s = 0; s < STATS; s++) {
        c.stats[s] = buffer_of(device, zeros, count);
        c.seeds[s] = buffer_of(device, NULL, count);
        for (i = 0; i < count; i++)
            seqpar_device_write(device, (void *)c.seeds[s], i, &b->seeds[s * ROWS + pick[i]], 1,
                                device->accumulator);
    }
    for (i = 0; i < count; i++) {
        ids[i] = b->ids[pick[i]];
        seqpar_device_write(device, c.in.data, i * in_stride, b->in + pick[i] * op->in, op->in,
                            device->storage);
        if (op->preset)
            seqpar_device_write(device, c.out.data, i * out_stride, b->in + pick[i] * op->in,
                                op->out, device->storage);
    }
    free(zeros);
    return c;
}

/* What the operation makes of these rows: (count, out + STATS). */
static void bank_run(const bank *b, seqpar_device *device, const int64_t *pick, int64_t count,
                     double *result) {
    call c = call_open(b, device, pick, count);
    int64_t i, s, width = b->op->out + STATS;
    test_expect(!b->op->run(&c), "refused");
    for (i = 0; i < count; i++) {
        seqpar_device_read(device, result + i * width, c.out.data, i * c.out.stride, b->op->out,
                           device->storage);
        for (s = 0; s < STATS; s++)
            seqpar_device_read(device, result + i * width + b->op->out + s, c.stats[s], i, 1,
                               device->accumulator);
    }
    call_close(&c);
}

/* `count` rows from `first` on, or (scattered) from all over the bank, against the rows of
   the whole. */
static void expect_rows(const bank *b, seqpar_device *device, int64_t first, int64_t count,
                        int scattered, const double *whole) {
    int64_t pick[ROWS] = {0}, width = b->op->out + STATS, i;
    double *part = malloc((size_t)(count * width) * sizeof *part);
    for (i = 0; i < count; i++) pick[i] = scattered ? test_integer(0, ROWS - 1) : first + i;
    bank_run(b, device, pick, count, part);
    for (i = 0; i < count; i++)
        test_expect(
            !memcmp(part + i * width, whole + pick[i] * width, (size_t)width * sizeof *part),
            "row %lld of %lld from %lld (%s): other bits than among %d", (long long)i,
            (long long)count, (long long)first, scattered ? "scattered" : "a run", ROWS);
    free(part);
}

static void expect_independence(const bank *b, seqpar_device *device, const double *whole) {
    static const int64_t counts[] = {1, 2, 7, 48, 97};
    int64_t i, first;
    for (i = 0; i < COUNT(counts); i++) {
        for (first = 0; first + counts[i] <= ROWS; first += counts[i] < 7 ? 13 : 17)
            expect_rows(b, device, first, counts[i], 0, whole);
        expect_rows(b, device, 0, counts[i], 1, whole);
    }
}

static void test_row_operations(void) {
    seqpar_device *reference = seqpar_device_reference();
    seqpar_device *cpu[] = {seqpar_device_cpu(1), seqpar_device_cpu(2)};
    int64_t o, i, all[ROWS];
    for (i = 0; i < ROWS; i++) all[i] = i;
    for (o = 0; o < COUNT(row_ops); o++) {
        bank b = bank_new(&row_ops[o]);
        int64_t size = ROWS * (b.op->out + STATS);
        double *fast = malloc((size_t)size * sizeof *fast);
        double *exact = malloc((size_t)size * sizeof *exact);
        bank_run(&b, cpu[0], all, ROWS, fast);
        for (i = 0; i < 2; i++) {
            expect_independence(&b, cpu[i], fast);
            test_end("numerics_rows_%s_threads%d", b.op->name, (int)i + 1);
        }
        bank_run(&b, reference, all, ROWS, exact);
        test_expect(test_distance(fast, exact, size) <= 1e-5, "%.2e off the reference",
                    test_distance(fast, exact, size));
        test_end("numerics_cpu_%s_against_reference", b.op->name);
        bank_free(&b);
        free(fast);
        free(exact);
    }
    seqpar_device_close(reference);
    seqpar_device_close(cpu[0]);
    seqpar_device_close(cpu[1]);
}

/* Where both devices share their code the reference says nothing: what these two must give
   is written out. */
static void test_copies(void) {
    static const row_op ops[] = {{"embedding", 1, 29, VOCAB * 31, run_embedding, 0},
                                 {"add", 1, 1, 1, run_add, 0}};
    seqpar_device *device = seqpar_device_cpu(1);
    int64_t all[ROWS], t, i, wrong = 0;
    bank words = bank_new(&ops[0]), sums = bank_new(&ops[1]);
    double *result = malloc(ROWS * (29 + STATS) * sizeof *result);
    for (t = 0; t < ROWS; t++) all[t] = t;
    bank_run(&words, device, all, ROWS, result);
    for (t = 0; t < ROWS; t++)
        for (i = 0; i < 29; i++)
            wrong += !same_bits(result[t * (29 + STATS) + i],
                                words.weights[words.ids[t] * 31 + i]);
    test_expect(!wrong, "%lld embedded numbers are not those of the table", (long long)wrong);
    bank_run(&sums, device, all, ROWS, result);
    for (t = 0; t < ROWS; t++)
        wrong += result[t * (1 + STATS) + 1] !=
                 (double)((float)sums.seeds[t] + (float)sums.seeds[ROWS + t]);
    test_expect(!wrong, "%lld sums are wrong", (long long)wrong);
    bank_free(&words);
    bank_free(&sums);
    free(result);
    seqpar_device_close(device);
    test_end("numerics_embedding_and_add");
}

/* ---- sums over tokens: EXTEND in pieces is one LEAF, to the bit ---- */

#define OUT 53

typedef struct sum_call {
    seqpar_device *device;
    seqpar_fold_call fold;
    const seqpar_piece *leaves;
    void *a, *b, *dx;
    const int32_t *ids;
} sum_call;

typedef struct token_sum {
    const char *name;
    int64_t a, b, result;
    seqpar_status (*run)(const sum_call *c);
} token_sum;

static seqpar_status run_weight_grad(const sum_call *c) {
    seqpar_weight_grad_args a = {.fold = c->fold,
                                 .leaves = c->leaves,
                                 .dy = {c->a, OUT + GAP},
                                 .x = {c->b, DEEP + GAP},
                                 .out = OUT,
                                 .in = DEEP};
    return c->device->weight_grad(c->device, &a, NULL);
}

static seqpar_status run_embedding_grad(const sum_call *c) {
    seqpar_embedding_grad_args a = {.fold = c->fold,
                                    .leaves = c->leaves,
                                    .dx = {c->a, 29 + GAP},
                                    .ids = c->ids,
                                    .rows = VOCAB,
                                    .width = 29};
    return c->device->embedding_grad(c->device, &a, NULL);
}

static seqpar_status run_gain_grad(const sum_call *c) {
    seqpar_rmsnorm_grad_args a = {.fold = c->fold,
                                  .leaves = c->leaves,
                                  .dx = {c->dx, DEEP},
                                  .dy = {c->a, DEEP + GAP},
                                  .x = {c->b, DEEP + GAP},
                                  .rstd = c->a,
                                  .gain = c->b,
                                  .rows = ROWS,
                                  .width = DEEP};
    return c->device->rmsnorm_grad(c->device, &a, NULL);
}

static const token_sum token_sums[] = {
    {"weight_grad", OUT + GAP, DEEP + GAP, OUT *DEEP, run_weight_grad},
    {"embedding_grad", 29 + GAP, 1, VOCAB * 29, run_embedding_grad},
    {"rmsnorm_gain", DEEP + GAP, DEEP + GAP, DEEP, run_gain_grad},
};

typedef struct sum_inputs {
    double *a, *b;
    int32_t ids[ROWS];
} sum_inputs;

/* Runs a program over the leaves that begin at these tokens (leaf_count + 1, up to the end
   of the last). */
static void sum_run(const token_sum *s, seqpar_device *device, const sum_inputs *in,
                    const int64_t *begin, int64_t leaf_count, const seqpar_fold_op *program,
                    int64_t program_count, double *result) {
    seqpar_piece leaves[ROWS];
    int64_t i;
    sum_call c = {.device = device,
                  .leaves = leaves,
                  .a = buffer_of(device, in->a, ROWS * s->a),
                  .b = buffer_of(device, in->b, ROWS * s->b),
                  .dx = device->alloc(device, ROWS * DEEP * 8),
                  .ids = in->ids};
    void *store = device->alloc(device, 2 * s->result * 8);
    void *finish = device->alloc(device, s->result * 8);
    device->zero(device, c.dx, ROWS * DEEP * 8, NULL);
    c.fold = (seqpar_fold_call){program, program_count, 4, store, s->result, finish};
    for (i = 0; i < leaf_count; i++)
        leaves[i] = (seqpar_piece){.local = begin[i], .count = begin[i + 1] - begin[i]};
    test_expect(!s->run(&c), "refused");
    seqpar_device_read(device, result, finish, 0, s->result, device->accumulator);
    device->free(device, store);
    device->free(device, finish);
    device->free(device, c.a);
    device->free(device, c.b);
    device->free(device, c.dx);
}

static void expect_extension(const token_sum *s, seqpar_device *device, const sum_inputs *in) {
    static const seqpar_fold_op whole[] = {{SEQPAR_FOLD_LEAF, 0}, {SEQPAR_FOLD_FINISH, 0}};
    static const seqpar_fold_op thirds[] = {{SEQPAR_FOLD_LEAF, 0},    {SEQPAR_FOLD_STORE, 0},
                                            {SEQPAR_FOLD_LEAF, 1},    {SEQPAR_FOLD_STORE, 1},
                                            {SEQPAR_FOLD_LEAF, 2},    {SEQPAR_FOLD_LOAD, 0},
                                            {SEQPAR_FOLD_COMBINE, 0}, {SEQPAR_FOLD_LOAD, 1},
                                            {SEQPAR_FOLD_COMBINE, 0}, {SEQPAR_FOLD_FINISH, 0}};
    static const int64_t cut[] = {5, 18, 59, 97};
    double *one = malloc((size_t)s->result * sizeof *one);
    double *other = malloc((size_t)s->result * sizeof *other);
    int64_t n, i;
    sum_run(s, device, in, (const int64_t[]){5, 97}, 1, whole, 2, one);
    for (n = 0; n < 6; n++) {
        seqpar_fold_op program[ROWS];
        int64_t begin[ROWS], pieces = 0, at = 5;
        /* later pieces may be empty */
        for (; at < 97; at += n ? test_integer(pieces > 1 ? 0 : 1, 30) : 1) {
            program[pieces] = (seqpar_fold_op){pieces ? SEQPAR_FOLD_EXTEND : SEQPAR_FOLD_LEAF,
                                               (int32_t)pieces};
            begin[pieces++] = at;
        }
        begin[pieces] = 97;
        program[pieces] = (seqpar_fold_op){SEQPAR_FOLD_FINISH, 0};
        sum_run(s, device, in, begin, pieces, program, pieces + 1, other);
        test_expect(!memcmp(one, other, (size_t)s->result * sizeof *one),
                    "%lld pieces give other bits than one", (long long)pieces);
    }
    /* three leaves combined are another rounding, but the same sum */
    sum_run(s, device, in, cut, 3, thirds, COUNT(thirds), other);
    for (i = n = 0; i < s->result; i++) n += !same_bits(one[i], other[i]);
    test_expect(test_distance(other, one, s->result) < 1e-5 && n > 0,
                "three leaves: %.2e apart, %lld elements differ",
                test_distance(other, one, s->result), (long long)n);
    free(one);
    free(other);
}

/* A leaf without a token is 0, whatever the scratch held. */
static void expect_empty_leaf(const token_sum *s, seqpar_device *device, const sum_inputs *in) {
    static const seqpar_fold_op program[] = {{SEQPAR_FOLD_LEAF, 0},
                                             {SEQPAR_FOLD_STORE, 0},
                                             {SEQPAR_FOLD_LEAF, 1},
                                             {SEQPAR_FOLD_FINISH, 0}};
    double *result = malloc((size_t)s->result * sizeof *result);
    int64_t i, wrong = 0;
    sum_run(s, device, in, (const int64_t[]){5, 97, 97}, 2, program, COUNT(program), result);
    for (i = 0; i < s->result; i++) wrong += !(result[i] == 0);
    test_expect(!wrong, "%lld of %lld elements are not 0", (long long)wrong,
                (long long)s->result);
    free(result);
}

/* The sums themselves, the plain way. */
static double plain_sum(const token_sum *s, const sum_inputs *in, int64_t element) {
    double sum = 0;
    int64_t t, o = element / DEEP, i = element % DEEP;
    for (t = 5; t < 97; t++)
        if (s->run == run_weight_grad)
            sum += in->a[t * s->a + o] * in->b[t * s->b + i];
        else if (s->run == run_embedding_grad)
            sum += in->ids[t] == element / 29 ? in->a[t * s->a + element % 29] : 0;
        else
            sum += in->a[t * s->a + element] * in->b[t * s->b + element] * in->a[t]; /* rstd is
                                                                                        the
                                                                                        front of
                                                                                        a */
    return sum;
}

static void expect_plain(const token_sum *s, seqpar_device *device, const sum_inputs *in,
                         double tolerance) {
    static const seqpar_fold_op whole[] = {{SEQPAR_FOLD_LEAF, 0}, {SEQPAR_FOLD_FINISH, 0}};
    double *got = malloc((size_t)s->result * sizeof *got);
    double *want = malloc((size_t)s->result * sizeof *want);
    int64_t i;
    sum_run(s, device, in, (const int64_t[]){5, 97}, 1, whole, 2, got);
    for (i = 0; i < s->result; i++) want[i] = plain_sum(s, in, i);
    test_expect(test_distance(got, want, s->result) <= tolerance, "%.2e off",
                test_distance(got, want, s->result));
    free(got);
    free(want);
}

static void test_token_sums(void) {
    seqpar_device *devices[] = {seqpar_device_reference(), seqpar_device_cpu(1),
                                seqpar_device_cpu(2)};
    static const char *const names[] = {"reference", "cpu_threads1", "cpu_threads2"};
    int64_t s, d, i;
    for (s = 0; s < COUNT(token_sums); s++) {
        sum_inputs in = {.a = random_doubles(ROWS * token_sums[s].a, 0),
                         .b = random_doubles(ROWS * token_sums[s].b, 0)};
        for (i = 0; i < ROWS; i++)
            in.ids[i] = (int32_t)(i % 5 ? test_integer(0, VOCAB - 1) : 0);
        for (d = 0; d < 3; d++) {
            expect_extension(&token_sums[s], devices[d], &in);
            test_end("numerics_extend_%s_%s", token_sums[s].name, names[d]);
            expect_empty_leaf(&token_sums[s], devices[d], &in);
            test_end("numerics_empty_leaf_%s_%s", token_sums[s].name, names[d]);
            expect_plain(&token_sums[s], devices[d], &in, d ? 1e-5 : 1e-13);
            test_end("numerics_sum_%s_%s", token_sums[s].name, names[d]);
        }
        free(in.a);
        free(in.b);
    }
    for (d = 0; d < 3; d++) seqpar_device_close(devices[d]);
}

/* ---- what comes from outside: text of others in sentences, sizes that nobody means ---- */

static void expect_escaped(const char *text, const char *want) {
    seqpar_error error = {0};
    seqpar_fail(&error, SEQPAR_ERR_OPTION, "%s", text);
    test_expect(!strcmp(error.text, want), "got '%s', want '%s'", error.text, want);
    seqpar__escape(error.text, (int64_t)sizeof error.text, want);
    test_expect(!strcmp(error.text, want), "escaped twice: '%s'", error.text);
}

static void test_escape(void) {
    seqpar_error error = {0};
    char text[9000], small[9];
    expect_escaped("plain, gr\xC3\xBC\xC3\x9F"
                   "e \xE2\x82\xAC \xF0\x9F\x98\x80 \\n",
                   "plain, gr\xC3\xBC\xC3\x9F"
                   "e \xE2\x82\xAC \xF0\x9F\x98\x80 \\n");
    expect_escaped("a\nb\rc\td\x1b[31me\x7f", "a\\nb\\rc\\td\\x1b[31me\\x7f");
    expect_escaped("\xC2\x9b 31m", "\\xc2\\x9b 31m"); /* C1 */
    /* turns the direction of writing */
    expect_escaped("a\xE2\x80\xAEgnp.exe", "a\\xe2\\x80\\xaegnp.exe");
    /* no UTF-8, overlong, half a surrogate, cut off */
    expect_escaped("\xff\xC0\x80 \xED\xA0\x80 \xE2\x82",
                   "\\xff\\xc0\\x80 \\xed\\xa0\\x80 \\xe2\\x82");
    memset(text, 'x', sizeof text - 1);
    memcpy(text, "begin", 5);
    memcpy(text + 7000, "the end", 8);
    seqpar_fail(&error, SEQPAR_ERR_OPTION, "%s", text);
    test_expect(strlen(error.text) == sizeof error.text - 1, "%lld bytes are shown",
                (long long)strlen(error.text));
    test_expect(!strncmp(error.text, "begin", 5) && strstr(error.text, "...") &&
                    strstr(error.text, "the end"),
                "of a long sentence: '%s'", error.text);
    test_expect(!strcmp(seqpar__escape(small, 9,
                                       "a\xE2\x82\xAC\xE2\x82\xAC"
                                       "bcd"),
                        "a...bcd"),
                "a small room: '%s'", small);
    test_expect(!strcmp(seqpar__escape(small, 3, "\n\n"), "\\n") &&
                    !strcmp(seqpar__escape(small, 2, "\n"), "") &&
                    seqpar__escape(small, 0, "x") == small,
                "hardly any room");
    test_end("escape");
}

/* Bytes of code point `c`; 0: it has none. */
static int utf8_put(char *out, int64_t c) {
    static const int64_t end[] = {0x80, 0x800, 0x10000, 0x110000};
    static const int mark[] = {0, 0xc0, 0xe0, 0xf0};
    int n = 0;
    while (n < 4 && c >= end[n]) n++;
    if (n == 4 || c < 0 || (c >= 0xd800 && c < 0xe000)) return 0;
    for (int i = n; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3f));
    out[0] = (char)(mark[n] | c);
    return n + 1;
}

/* The code point that these bytes would be, shortest or not; -1: none. */
static int64_t utf8_decode(const unsigned char *s, int n) {
    int64_t c = n == 1 ? s[0] : s[0] & (0x7f >> n);
    for (int i = 1; i < n; i++) {
        if (s[i] >> 6 != 2) return -1;
        c = c << 6 | (s[i] & 0x3f);
    }
    return c;
}

/* Every first and second byte with the edges of the others: as long as it is written anew. */
static void test_utf8(void) {
    static const unsigned char edge[] = {0, 0x7f, 0x80, 0xbf, 0xc0, 0xff};
    for (int first = 0; first < 256; first++)
        for (int second = 0; second < 256; second++)
            for (int e = 0; e < 36; e++) {
                unsigned char s[4] = {(unsigned char)first, (unsigned char)second, edge[e / 6],
                                      edge[e % 6]};
                char again[4];
                int n = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
                int64_t c = utf8_decode(s, n);
                int want = c >= 0 && utf8_put(again, c) == n && !memcmp(s, again, (size_t)n)
                               ? n
                               : 0;
                for (int64_t left = 1; left <= 5; left++)
                    test_expect(seqpar__utf8_length((char *)s, left) ==
                                    (left < want ? 0 : want),
                                "%02x %02x %02x %02x, %lld bytes", s[0], s[1], s[2], s[3],
                                (long long)left);
            }
    test_end("utf8");
}

/* One character as it is shown; returns its bytes. */
static int shown_put(char *out, int64_t c) {
    static const char *const letters[] = {['\t'] = "\\t", ['\n'] = "\\n", ['\r'] = "\\r"};
    char s[4];
    int n = utf8_put(s, c), used = 0;
    if (c < 14 && letters[c]) return sprintf(out, "%s", letters[c]);
    if (c < 0x20 || (c >= 0x7f && c < 0xa0) || (c >= 0x2028 && c <= 0x202e) ||
        (c >= 0x2066 && c <= 0x2069)) {
        for (int i = 0; i < n; i++) used += sprintf(out + used, "\\x%02x", (unsigned char)s[i]);
        return used;
    }
    memcpy(out, s, (size_t)n);
    return n;
}

static void test_shown(void) {
    for (int64_t c = 1; c < 0x3000; c++) {
        char text[5] = "", want[32] = "", got[64];
        utf8_put(text, c);
        shown_put(want, c);
        test_expect(!strcmp(seqpar__escape(got, sizeof got, text), want),
                    "U+%04llX is shown as '%s'", (unsigned long long)c, got);
    }
    test_end("escape_every_character");
}

/* What fits of a text whose characters are shown as `shown`, in `bytes` each. */
static void shown_in(char *out, int64_t size, const char *shown, const int *bytes, int count) {
    int64_t whole = (int64_t)strlen(shown), used = 0;
    int n = 0, from = 0, skipped = 0;
    if (whole >= size && size > 8) {
        for (; used + bytes[n] <= (size - 4) / 2; n++) used += bytes[n];
        for (from = n, skipped = (int)used; used + 3 + whole - skipped >= size; from++)
            skipped += bytes[from];
        sprintf(out, "%.*s...%s", (int)used, shown, shown + skipped);
        return;
    }
    for (; n < count && used + bytes[n] <= size - 1; n++) used += bytes[n];
    sprintf(out, "%.*s", (int)used, shown);
}

/* In every room: the whole text, or its begin and its end, or as much as fits. */
static void test_rooms(void) {
    static const int64_t points[] = {'a', '\n', 0xfc, 0x20ac,  0x1f600, 0x9b, 'b', 0x2028, 'c',
                                     'd', 0x7f, 0xe4, 0x1f601, 'e',     '\t', 'f', 'g',    'h'};
    char text[100] = "", shown[200] = "", want[200], got[204];
    int bytes[COUNT(points)], at = 0, used = 0;
    for (int i = 0; i < COUNT(points); i++) {
        at += utf8_put(text + at, points[i]);
        used += bytes[i] = shown_put(shown + used, points[i]);
    }
    for (int64_t size = 1; size < used + 5; size++) {
        memset(got, '!', sizeof got);
        shown_in(want, size, shown, bytes, (int)COUNT(points));
        seqpar__escape(got, size, text);
        test_expect(!strcmp(got, want) && got[size] == '!', "%lld bytes: '%s', not '%s'",
                    (long long)size, got, want);
    }
    test_end("escape_in_every_room");
}

/* Every code has a name and a text of its own, and no other has. */
static void test_status_names(void) {
    int named = 0;
    for (int s = -300; s < 300; s++) {
        const char *name = seqpar_status_name((seqpar_status)s);
        const char *text = seqpar_status_text((seqpar_status)s);
        named += strcmp(name, "?") != 0;
        test_expect(!strcmp(name, "?") == !strcmp(text, "?"), "%d: '%s' and '%s'", s, name,
                    text);
        for (int other = s + 1; strcmp(name, "?") && other < 300; other++)
            test_expect(strcmp(name, seqpar_status_name((seqpar_status)other)) &&
                            strcmp(text, seqpar_status_text((seqpar_status)other)),
                        "%d and %d are both %s", s, other, name);
    }
#define SEQPAR__X(name, code, text) \
    named--; \
    test_expect(!strcmp(seqpar_status_name((seqpar_status)(code)), "SEQPAR_ERR_" #name) && \
                    !strcmp(seqpar_status_text((seqpar_status)(code)), text), \
                #name);
    SEQPAR_ERRORS(SEQPAR__X)
#undef SEQPAR__X
    test_expect(named == 1 && !strcmp(seqpar_status_name(SEQPAR_OK), "SEQPAR_OK") &&
                    !strcmp(seqpar_status_text(SEQPAR_OK), "no error"),
                "%d names beside", named);
    test_end("status_names");
}

static seqpar_status rank_of_none(seqpar_comm *world, void *user) {
    (void)world, (void)user;
    return SEQPAR_OK;
}

static void test_large_sizes(void) {
    const seqpar_tensor tensor = {.name = "w", .rows = INT64_C(1) << 62, .cols = 4, .decay = 1};
    const seqpar_optim_desc optim = {.kind = SEQPAR_OPTIM_SGD};
    const seqpar_attn_desc attention[] = {
        {.heads = INT64_C(1) << 61, .kv_heads = 1, .head_dim = 8},
        {.heads = 8, .kv_heads = 1, .head_dim = INT64_MAX}};
    seqpar_comm *self = seqpar_comm_self();
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_optim o;
    seqpar_attn *attn;
    int i;
    test_expect(!seqpar_ctx_open(&ctx, self, device, 1), "no context");
    test_expect(seqpar_optim_open(&ctx, &o, &tensor, 1, &optim) == SEQPAR_ERR_SIZE &&
                    strstr(ctx.error->text, "4611686018427387904 x 4"),
                "a tensor: %s", ctx.error->text);
    for (i = 0; i < 2; i++) {
        memset(ctx.error, 0, sizeof *ctx.error);
        test_expect(
            seqpar_attn_open(&ctx, &attn, NULL, 0, &attention[i]) == SEQPAR_ERR_SIZE &&
                strstr(ctx.error->text, i ? "9223372036854775807" : "2305843009213693952"),
            "attention: %s", ctx.error->text);
    }
    test_expect(!seqpar__calloc(INT64_C(1) << 61, 8) && !seqpar__calloc(INT64_MAX, 1),
                "memory that no machine has");
    test_expect(seqpar_run_threads(SEQPAR_MAX_RANKS + 1, rank_of_none, NULL, NULL) ==
                    SEQPAR_ERR_RANKS,
                "more ranks than a process takes");
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(self);
    test_end("large_sizes");
}

/* The loss of the fast device counts exponents from higher up where logits climb, and works
   on two rows at once: a row has the same bits alone and beside one that climbs in the same
   block, at every height around the one from which it counts anew. */
static void test_head_beside(void) {
    enum { WIDTH = 12 * 128 + 77, CLIMB = 4 * 128, HEIGHTS = 200 };
    static float logits[2 * WIDTH], beside[2 * WIDTH], alone[WIDTH];
    static const int32_t targets[2] = {3, 5};
    const float seeds[2] = {.5f, .25f};
    seqpar_device *device = seqpar_device_cpu(1);
    for (int height = 0; height < HEIGHTS; height++) {
        float stats[3][2], own[3];
        for (int i = 0; i < 2 * WIDTH; i++)
            logits[i] = (float)seqpar_random_uniform(test_seed, (uint64_t)height, (uint64_t)i);
        logits[CLIMB + 7] = 9;
        /* from 1 to 3 powers of two above the others */
        logits[WIDTH + CLIMB + 9] = (float)((2 + 2.0 * height / HEIGHTS) * 0.69314718055994531);
        for (int i = WIDTH + CLIMB + 128; i < 2 * WIDTH; i++) logits[i] -= 0.5f;
        memcpy(beside, logits, sizeof beside);
        memcpy(alone, logits + WIDTH, sizeof alone);
        seqpar_vocab_softmax_args two = {.logits = {beside, WIDTH},
                                         .rows = 2,
                                         .vocab = WIDTH,
                                         .targets = targets,
                                         .logp = stats[0],
                                         .entropy = stats[1],
                                         .lse = stats[2],
                                         .dlogp = seeds,
                                         .gradient = 1};
        seqpar_vocab_softmax_args one = {.logits = {alone, WIDTH},
                                         .rows = 1,
                                         .vocab = WIDTH,
                                         .targets = targets + 1,
                                         .logp = &own[0],
                                         .entropy = &own[1],
                                         .lse = &own[2],
                                         .dlogp = seeds + 1,
                                         .gradient = 1};
        test_expect(!device->vocab_softmax(device, &two, NULL) &&
                        !device->vocab_softmax(device, &one, NULL),
                    "vocab_softmax fails");
        test_expect(isfinite(own[1]) && own[1] > 1, "entropy %g", (double)own[1]);
        for (int i = 0; i < 3; i++)
            test_expect(!memcmp(&stats[i][1], &own[i], sizeof own[i]),
                        "height %d: statistic %d is %.9g beside another row, %.9g alone",
                        height, i, (double)stats[i][1], (double)own[i]);
        test_expect(!memcmp(beside + WIDTH, alone, sizeof alone),
                    "height %d: the gradient differs beside another row", height);
    }
    seqpar_device_close(device);
    test_end("head_row_beside_one_that_climbs");
}

/* ---- four bits: what bitsandbytes stores, and what it gives back (golden_nf4.tsv) ---- */

static uint32_t crc_of(const void *bytes, int64_t count) {
    return (uint32_t)crc32(0, (const unsigned char *)bytes, (uInt)count);
}

static uint32_t unpacked_crc(const void *bytes, int64_t rows, int64_t cols) {
    seqpar_device *device = seqpar_device_cpu(1);
    float *x = calloc((size_t)(rows * cols), sizeof *x);
    const seqpar_nf4_rows_args a = {
        {x, cols}, rows, cols, 0, 0, cols, seqpar_nf4_at(bytes, rows * cols)};
    test_expect(!device->nf4_rows(device, &a, NULL), "unpack fails");
    uint32_t crc = crc_of(x, rows * cols * 4);
    seqpar_device_close(device);
    free(x);
    return crc;
}

static void hex_into(void *to, const char *hex) {
    for (unsigned char *at = to; *hex && *hex != '\n'; hex += 2) {
        unsigned byte = 0;
        sscanf(hex, "%2x", &byte);
        *at++ = (unsigned char)byte;
    }
}

/* Values of its own state come back to the bit. The mean of the scales, which torch adds in fp32 by
   the width of the machine's vectors, may be off by a rounding; where it is not, all is the same. */
typedef struct nf4_line {
    int64_t rows, cols;
    unsigned kind, codes, scales, steps, back, offset;
    char hex[3][6000]; /* steps, scales, codes; "-": not there */
} nf4_line;

static int nf4_alike(const nf4_line *l) {
    int64_t n = l->rows * l->cols, groups = (n + 63) / 64;
    float *x = calloc((size_t)n, sizeof *x);
    void *bytes = malloc((size_t)seqpar_nf4_bytes(n));
    seqpar_nf4 m = seqpar_nf4_at(bytes, n);
    uint32_t offset;
    for (int64_t i = 0; i < n; i++) x[i] = nf4_value((uint32_t)i, l->kind);
    test_expect(!seqpar_nf4_quantize(NULL, bytes, x, n), "pack fails");
    memcpy(&offset, m.offset, 4);
    int alike = offset == l->offset;
    test_expect(crc_of(m.codes, (n + 1) / 2) == l->codes, "%lld x %lld: other codes",
                (long long)l->rows, (long long)l->cols);
    test_expect(offset - l->offset + 2 <= 4, "offset %08x, not %08x", offset, l->offset);
    if (alike)
        test_expect(crc_of(m.scales, groups) == l->scales &&
                        crc_of(m.steps, (groups + 255) / 256 * 4) == l->steps &&
                        unpacked_crc(bytes, l->rows, l->cols) == l->back,
                    "%lld x %lld: other scales, steps or values", (long long)l->rows,
                    (long long)l->cols);
    if (*l->hex[0] != '-') {
        hex_into((void *)m.steps, l->hex[0]);
        hex_into((void *)m.scales, l->hex[1]);
        hex_into((void *)m.codes, l->hex[2]);
        memcpy((void *)m.offset, &l->offset, 4);
        test_expect(unpacked_crc(bytes, l->rows, l->cols) == l->back,
                    "%lld x %lld: other values of its bytes", (long long)l->rows,
                    (long long)l->cols);
    }
    free(bytes);
    free(x);
    return alike;
}

static void test_nf4(void) {
    static char text[20000];
    static nf4_line l;
    int lines = 0, alike = 0;
    FILE *file = fopen("verify/second/golden_nf4.tsv", "r");
    while (file && fgets(text, sizeof text, file)) {
        long long rows, cols;
        if (*text == '#') continue;
        int read = sscanf(text, "%lld %lld %u %x %x %x %x %x %5999s %5999s %5999s", &rows,
                          &cols, &l.kind, &l.codes, &l.scales, &l.steps, &l.back, &l.offset,
                          l.hex[0], l.hex[1], l.hex[2]);
        l.rows = rows;
        l.cols = cols;
        if (test_expect(read == 11, "%d fields", read)) alike += nf4_alike(&l);
        lines++;
    }
    if (file) fclose(file);
    test_expect(lines == 7 && alike >= 3, "%d lines, %d alike", lines, alike);
    test_end("nf4_golden: %d of %d matrices alike from the mean of their scales on", alike,
             lines);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_exp());
    TEST(test_exp_edges());
    TEST(test_exp_vectors());
    TEST(test_log());
    TEST(test_log_edges());
    TEST(test_philox());
    TEST(test_uniform_extremes());
    TEST(test_moments());
    TEST(test_random_keys());
    TEST(test_shuffle());
    TEST(test_random_answers());
    TEST(test_dropout_draws());
    TEST(test_times());
    TEST(test_grow());
    TEST(test_schedules());
    TEST(test_optimizers());
    TEST(test_row_operations());
    TEST(test_head_beside());
    TEST(test_copies());
    TEST(test_token_sums());
    TEST(test_escape());
    TEST(test_utf8());
    TEST(test_shown());
    TEST(test_rooms());
    TEST(test_status_names());
    TEST(test_nf4());
    TEST(test_large_sizes());
    return test_summary();
}
