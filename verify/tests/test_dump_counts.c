/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on dumps that say by what each rank divides its losses: right divisors
   with every factor, and counts of parts of the step. */
#define FOLDER "build/test_dump_counts.d"
#include "support/dump_page.h"

enum { MOST = 13, RANKS = 12, MICRO = 3, NONE = -100, ANY = -1 };

static struct {
    int64_t sp, dp, accumulation, tokens[RANKS][MICRO];
    int32_t index[RANKS][MICRO][MOST], labels[RANKS][MICRO][MOST];
    double logp[RANKS][MICRO][MOST], sum[RANKS][MICRO], count[RANKS][MICRO];
    int with_logp, with_sum, lacks; /* the last rank has no count */
} s;

static double labels_of(int64_t r, int64_t a) {
    double n = 0;
    for (int64_t i = 0; i < s.tokens[r][a]; i++) n += s.labels[r][a][i] != NONE;
    return n;
}

/* No two ranks alike; with 4 or more one has no label, with 3 one no token. */
static void make(int64_t sp, int64_t dp, int64_t accumulation) {
    memset(&s, 0, sizeof s);
    s.sp = sp;
    s.dp = dp;
    s.accumulation = accumulation;
    s.with_logp = s.with_sum = 1;
    for (int64_t r = 0; r < sp * dp; r++)
        for (int64_t a = 0; a < accumulation; a++) {
            int64_t n = sp > 2 && r % sp == 1 ? 0 : 3 + (r * 5 + a * 7) % (MOST - 2);
            s.tokens[r][a] = n;
            for (int64_t i = 0; i < n; i++) {
                int is_prompt = i < 1 + r % 3 || (r == 2 && sp > 3);
                s.labels[r][a][i] = is_prompt ? NONE : (int32_t)test_integer(0, 9);
                s.logp[r][a][i] = -0.01 * (double)test_integer(1, 300);
                if (!is_prompt) s.sum[r][a] -= s.logp[r][a][i];
            }
        }
    for (int64_t d = 0; d < dp; d++)
        for (int64_t a = 0; a < accumulation; a++)
            for (int64_t r = d * sp, t = 0; r < (d + 1) * sp; r++)
                for (int64_t i = 0; i < s.tokens[r][a]; i++) s.index[r][a][i] = (int32_t)t++;
}

/* Each divides by `factor` times the labels (or tokens) of all that share these with it. */
static void divide_by(int member, int replica, int micro, int all, double factor) {
    for (int64_t n = 0; n < s.sp * s.dp * s.accumulation; n++) {
        int64_t r = n / s.accumulation, a = n % s.accumulation;
        s.count[r][a] = 0;
        for (int64_t m = 0; m < s.sp * s.dp * s.accumulation; m++) {
            int64_t q = m / s.accumulation, b = m % s.accumulation;
            if ((member && q % s.sp != r % s.sp) || (replica && q / s.sp != r / s.sp) ||
                (micro && a != b))
                continue;
            s.count[r][a] += factor * (all ? (double)s.tokens[q][b] : labels_of(q, b));
        }
    }
}

/* ---- writing it ---- */

static void write_rank(int64_t r) {
    static char text[4][24];
    const int64_t numbers[] = {r, s.sp * s.dp, s.sp, s.accumulation};
    seqpar_safetensors_pair pairs[] = {{"seqpar_dump", "1"},
                                       {"rank", text[0]},
                                       {"world", text[1]},
                                       {"sp", text[2]},
                                       {"accumulation", text[3]}};
    page p = {.count = 0};
    for (int i = 0; i < 4; i++)
        snprintf(text[i], sizeof text[i], "%lld", (long long)numbers[i]);
    for (int64_t a = 0; a < s.accumulation; a++) {
        int64_t n = s.tokens[r][a];
        put(&p, a, "index", s.index[r][a], SEQPAR_SAFETENSORS_I32, 1, &n);
        put(&p, a, "labels", s.labels[r][a], SEQPAR_SAFETENSORS_I32, 1, &n);
        if (s.with_logp) put(&p, a, "logp", s.logp[r][a], SEQPAR_SAFETENSORS_F64, 1, &n);
        if (s.with_sum) put(&p, a, "loss_sum", &s.sum[r][a], SEQPAR_SAFETENSORS_F64, 0, NULL);
        if (!s.lacks || r + 1 < s.sp * s.dp)
            put(&p, a, "loss_count", &s.count[r][a], SEQPAR_SAFETENSORS_F64, 0, NULL);
    }
    save(&p, r, pairs, 5);
}

/* Exit code (ANY: whatever it is), first line ("": any), and what stage counts says. */
static void expect(int code, const char *headline, const char *counts) {
    char said[8192], *at;
    size_t line;
    int is;
    write_ranks(s.sp * s.dp, write_rank);
    is = ask_with("", said, sizeof said);
    line = strcspn(said, code == 1 || code == 3 ? "\n" : ":\n");
    at = strstr(said, "\n    counts    ");
    test_expect(code == ANY ? is >= 0 : is == code, "exit code %d, not %d: %.500s", is, code,
                said);
    test_expect(!*headline || (strlen(headline) == line && !strncmp(said, headline, line)),
                "%.60s, not %s", said, headline);
    test_expect(at && strstr(at, counts) && strstr(at, counts) < strstr(at, "\n    loss "),
                "counts: %.300s, not '%s'", at ? at + 15 : said, counts);
}

/* ---- tests ---- */

static const int64_t grids[][3] = {{2, 1, 1}, {3, 1, 1}, {1, 2, 1}, {1, 1, 3}, {2, 3, 1},
                                   {5, 1, 2}, {4, 3, 2}, {3, 2, 3}, {8, 1, 1}};
enum { GRIDS = sizeof grids / sizeof *grids };

static void test_right(void) {
    for (int g = 0; g < GRIDS; g++) {
        const int64_t *n = grids[g];
        double factors[] = {1, 1 / (double)n[0], (double)n[2], 1 / (double)(n[0] * n[1]),
                            (double)(n[1] * n[2])};
        for (int k = 0; k < 5; k++) {
            make(n[0], n[1], n[2]);
            divide_by(0, 0, 0, 0, factors[k]);
            expect(ANY, "", "right: all divide by");
            s.with_logp = s.with_sum = k % 2;
            expect(ANY, "", "right: all divide by");
        }
    }
    test_end("dump_counts_right");
}

static void test_apart(void) {
    for (int g = 0; g < GRIDS; g++)
        for (int apart = 1; apart < 8; apart++) {
            const int64_t *n = grids[g];
            int member = apart & 1, replica = apart >> 1 & 1, micro = apart >> 2;
            if ((member && n[0] == 1) || (replica && n[1] == 1) || (micro && n[2] == 1))
                continue;
            make(n[0], n[1], n[2]);
            divide_by(member, replica, micro, 0, apart % 3 ? 1 : (double)n[0]);
            expect(1, "wrong: mean_of_means", "supervised");
            divide_by(member, replica, micro, 1, 1);
            expect(1, "wrong: all_tokens_counted", "of all"); /* tokens */
        }
    test_end("dump_counts_apart");
    make(5, 2, 2);
    divide_by(0, 0, 0, 1, 1);
    expect(1, "wrong: all_tokens_counted", "divide by the count of the whole step, of all");
    test_end("dump_counts_all_tokens");
    make(3, 2, 2); /* which has twice as many tokens as labels */
    divide_by(0, 0, 0, 1, 1);
    expect(4, "insufficient", "the number of all tokens is the same here");
    test_end("dump_counts_tokens_or_factor");
}

static void test_sums(void) {
    make(4, 2, 2);
    divide_by(0, 0, 0, 0, 1);
    expect(ANY, "", "that of the rank's own tokens");
    s.sum[6][1] *= 1 + 1e-4;
    expect(1, "wrong: unknown", "first at rank 6, micro-batch 1: the sum of losses is");
    s.sum[6][1] = NAN;
    expect(1, "wrong: unknown", "first at rank 6, micro-batch 1: the sum of losses is");
    make(2, 2, 1);
    divide_by(0, 0, 0, 0, 1);
    for (int64_t r = 0; r < 4; r += 2)
        s.sum[r][0] = s.sum[r + 1][0] = s.sum[r][0] + s.sum[r + 1][0];
    expect(ANY, "", "sums of losses go with the count of each replica");
    test_end("dump_counts_sums");
}

static void test_others(void) {
    make(3, 2, 2);
    divide_by(0, 0, 0, 0, 1);
    s.count[3][1] += 1;
    expect(1, "wrong: unknown", "first at rank 3, micro-batch 1");
    s.count[3][1] = NAN;
    expect(1, "wrong: unknown", "first at rank 3, micro-batch 1: nan");
    test_end("dump_counts_unknown");
    divide_by(0, 0, 0, 0, 1);
    s.count[0][0] = 0;
    expect(1, "wrong: unknown", "first at rank 0, micro-batch 0: 0, and the step has");
    test_end("dump_counts_first_zero");
    divide_by(0, 0, 0, 0, 1.7);
    expect(1, "wrong: unknown", "first at rank 0, micro-batch 0");
    test_end("dump_counts_factor");
    divide_by(0, 0, 0, 0, 1);
    s.lacks = 1;
    expect(ANY, "", "insufficient: rank 5 has no 0.loss_count");
    test_end("dump_counts_lacks");
    make(1, 1, 1);
    divide_by(0, 0, 0, 0, 1);
    expect(4, "insufficient", "one rank and one micro-batch");
    make(2, 1, 1);
    for (int r = 0; r < 2; r++)
        for (int i = 0; i < 3; i++) s.labels[r][0][i] = i ? 7 : NONE;
    s.tokens[0][0] = s.tokens[1][0] = 3;
    for (int r = 0; r < 2; r++)
        for (int i = 0; i < 3; i++) s.index[r][0][i] = 3 * r + i;
    s.with_sum = 0;
    divide_by(0, 0, 0, 0, 1);
    expect(4, "insufficient", "insufficient: all divide by 4");
    test_end("dump_counts_equal");
}

/* A sum is off by 2^-20 of its losses, and what float32 leaves of these; a count by 1e-6. */
static void test_limits(void) {
    for (int i = 0; i < 4; i++) {
        double times = i % 2 ? 1.01 : 0.99;
        make(4, 2, 2);
        divide_by(0, 0, 0, 0, 1);
        if (i / 2)
            s.count[6][1] *= 1 - times * 1e-6;
        else
            s.sum[6][1] *= 1 + times * (0x1p-20 + 0x1p-24);
        if (i % 2)
            expect(1, "wrong: unknown", "first at rank 6, micro-batch 1: ");
        else
            expect(ANY, "", "that of the rank's own tokens");
        test_end("dump_counts_limit_of_%s_%g", i / 2 ? "counts" : "sums", times);
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_right());
    TEST(test_apart());
    TEST(test_sums());
    TEST(test_others());
    TEST(test_limits());
    return test_summary();
}
