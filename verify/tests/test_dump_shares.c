/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver --want` on gradients whose shares are weighed wrongly: means of means over
   ranks, replicas and rows, lost micro-batches, with and without local. tensors; what each
   mistake gives is summed anew here, share by share. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "seqpar_safetensors.h"
#include "support/oracle_says.h"

#define FOLDER "build/test_dump_shares.d"
#define WANTED "build/test_dump_shares.want"
enum { RANKS = 10, MICRO = 3, TOKENS = 23, SIZE = 61, TENSORS = 2 };
static const char *const names[TENSORS] = {"embed", "head"}; /* embed mixes ranks' losses */

typedef struct scene {
    int64_t sp, dp, accumulation, world;
    int32_t ids[RANKS][MICRO][TOKENS], index[RANKS][MICRO][TOKENS];
    int32_t labels[RANKS][MICRO][TOKENS];
    int64_t tokens;                          /* of a rank and micro-batch */
    int64_t held[MICRO];                     /* how many ranks of a replica hold its row */
    double sum[RANKS][MICRO][TENSORS][SIZE]; /* gradient of a rank's sum of losses */
    double weight[RANKS][MICRO];             /* of them in the step that is dumped */
    double reducer;                          /* times all */
    int with_local, rows_apart;
    int tied;    /* the wanted dump has embed + head as embed, and no head */
    double kept; /* times an old gradient, which is added; moments are written, too */
} scene;
static scene s;

/* ---- counts ---- */

static double count_of(int64_t r, int64_t a) {
    double count = 0;
    for (int64_t t = 0; t < s.tokens; t++) count += s.labels[r][a][t] != -100;
    return count;
}

/* Over ranks first to last - 1 and micro-batches from to to - 1. */
static double count_over(int64_t first, int64_t last, int64_t from, int64_t to) {
    double count = 0;
    for (int64_t r = first; r < last; r++)
        for (int64_t a = from; a < to; a++) count += count_of(r, a);
    return count;
}

static double count_all(void) { return count_over(0, s.world, 0, s.accumulation); }

/* ---- a right step ---- */

/* The last 2 to 6 tokens of the rank before have labels; of the row's last rank, 3 to 7 but
   one. */
static void set_labels(int64_t r, int64_t a) {
    for (int64_t q = r % s.sp ? r - 1 : r; q <= r; q++) {
        int64_t n = 2 + (q + 2 * a) % 5, last = q % s.sp == s.held[a] - 1;
        if (q == r && !last) continue;
        for (int64_t t = s.tokens - n - last; t < s.tokens - last; t++)
            s.labels[q][a][t] = t + 1 < s.tokens ? s.ids[q][a][t + 1] : s.ids[q + 1][a][0];
    }
}

/* uneven: only the first row of a replica is split over all its ranks. */
static void make_split(int64_t sp, int64_t dp, int64_t accumulation, int uneven) {
    memset(&s, 0, sizeof s);
    s.sp = sp;
    s.dp = dp;
    s.world = sp * dp;
    s.accumulation = accumulation;
    s.tokens = 7;
    s.with_local = s.rows_apart = 1;
    s.reducer = 1;
    for (int64_t a = 0; a < accumulation; a++) s.held[a] = a && uneven ? a : sp;
    for (int64_t r = 0; r < s.world; r++)
        for (int64_t a = 0; a < accumulation; a++) {
            for (int64_t t = 0; t < s.tokens; t++) {
                s.index[r][a][t] = (int32_t)(r % sp * s.tokens + t);
                s.ids[r][a][t] = (int32_t)test_integer(0, 500); /* 0 is a token, too */
                s.labels[r][a][t] = -100;
            }
            if (r % sp >= s.held[a]) continue; /* it holds nothing of the row */
            set_labels(r, a); /* of the rank before, which ends in this one's first token */
            for (int i = 0; i < TENSORS * SIZE; i++)
                s.sum[r][a][i / SIZE][i % SIZE] = 0.01 * (double)test_integer(-90, 90) *
                                                  (double)(1 + (2 * r + a) % 4);
        }
    for (int64_t r = 0; r < s.world; r++)
        for (int64_t a = 0; a < accumulation; a++) s.weight[r][a] = 1 / count_all();
}

static void make(int64_t sp, int64_t dp, int64_t accumulation) {
    make_split(sp, dp, accumulation, 0);
}

/* Rank r's own gradient of tensor i: of head from its own loss; of embed a third comes from the
   loss of the next rank of its sequence, as through keys and values. */
static double local_of(int64_t r, int64_t a, int i, int at, int right) {
    int64_t next = r / s.sp * s.sp + (r + 1) % s.sp;
    double own = right ? 1 / count_all() : s.weight[r][a];
    double others = right ? 1 / count_all() : s.weight[next][a];
    if (i == 1 || s.sp == 1) return own * s.sum[r][a][i][at];
    return (2 * own * s.sum[r][a][i][at] + others * s.sum[next][a][i][(at + 1) % SIZE]) / 3;
}

static double row_of(int64_t replica, int64_t a, int i, int at, int right) {
    double sum = 0;
    for (int64_t r = replica * s.sp; r < (replica + 1) * s.sp; r++)
        sum += local_of(r, a, i, at, right);
    return sum;
}

static double whole_of(int i, int at, int right) {
    double sum = 0;
    for (int64_t d = 0; d < s.dp; d++)
        for (int64_t a = 0; a < s.accumulation; a++) sum += row_of(d, a, i, at, right);
    return sum;
}

/* ---- writing it ---- */

typedef struct page {
    seqpar_safetensors_tensor tensors[32];
    const void *data[32];
    char name[32][32];
    double numbers[2 * TENSORS][SIZE];
    int64_t count;
} page;

static void put(page *p, const char *name, const void *data, int is_number, int64_t count) {
    int64_t at = p->count++;
    snprintf(p->name[at], sizeof p->name[at], "%s", name);
    p->tensors[at] = (seqpar_safetensors_tensor){.name = p->name[at],
                                                 .dtype = is_number ? SEQPAR_SAFETENSORS_F64
                                                                    : SEQPAR_SAFETENSORS_I32,
                                                 .dims = 1,
                                                 .shape = {count}};
    p->data[at] = data;
}

static void put_row(page *p, const char *micro, int64_t r, int64_t a) {
    char name[32];
    int64_t n = r % s.sp < s.held[a] ? s.tokens : 0;
    snprintf(name, sizeof name, "%s.index", micro);
    put(p, name, s.index[r][a], 0, n);
    snprintf(name, sizeof name, "%s.ids", micro);
    put(p, name, s.ids[r][a], 0, n);
    snprintf(name, sizeof name, "%s.labels", micro);
    put(p, name, s.labels[r][a], 0, n);
}

static void save(page *p, const char *folder, int64_t rank, int64_t world, int64_t sp,
                 int64_t accumulation) {
    char text[4][24], path[64];
    const int64_t numbers[] = {rank, world, sp, accumulation};
    seqpar_safetensors_pair pairs[] = {
        {"seqpar_dump", "1"},      {"rank", text[0]},
        {"world", text[1]},        {"sp", text[2]},
        {"accumulation", text[3]}, {"optimizer", s.kept > 0 ? "adamw" : "none"}};
    seqpar_error error = {0};
    for (int i = 0; i < 4; i++)
        snprintf(text[i], sizeof text[i], "%lld", (long long)numbers[i]);
    snprintf(path, sizeof path, "%s/rank%lld.safetensors", folder, (long long)rank);
    seqpar_safetensors_desc desc = {.path = path,
                                    .tensors = p->tensors,
                                    .count = p->count,
                                    .metadata = pairs,
                                    .metadata_count = 6};
    test_expect(!seqpar_safetensors_save(&desc, p->data, &error), "%s", error.text);
}

static double old_of(int i, int at) { return 0.07 * (double)((3 * i + 5 * at) % 11 - 4); }

/* AdamW's moments behind the step of the old gradient. */
static void put_moments(page *p) {
    static double moments[TENSORS][SIZE];
    for (int i = 0; i < TENSORS; i++) {
        char name[32];
        for (int at = 0; at < SIZE; at++) moments[i][at] = 0.1 * old_of(i, at);
        snprintf(name, sizeof name, "m.%s", names[i]);
        put(p, name, moments[i], 1, SIZE);
    }
}

static void put_gradients(page *p, int right) {
    for (int i = 0; i < TENSORS; i++) {
        char name[32];
        if (i && right && s.tied) continue;
        for (int at = 0; at < SIZE; at++)
            p->numbers[i][at] = (right ? 1 : s.reducer) * whole_of(i, at, right) +
                                (right && s.tied ? whole_of(1, at, right) : 0) +
                                (right ? 0 : s.kept * old_of(i, at));
        snprintf(name, sizeof name, "grad.%s", names[i]);
        put(p, name, p->numbers[i], 1, SIZE);
        snprintf(name, sizeof name, "local.%s", names[i]);
        if (s.with_local) put(p, name, p->numbers[TENSORS + i], 1, SIZE);
    }
}

static void write_rank(int64_t r) {
    static page p; /* large */
    memset(&p, 0, sizeof p);
    for (int64_t a = 0; a < s.accumulation; a++) {
        char micro[8];
        snprintf(micro, sizeof micro, "%lld", (long long)a);
        put_row(&p, micro, r, a);
        for (int i = 0; i < TENSORS * SIZE; i++)
            p.numbers[TENSORS + i / SIZE][i % SIZE] += local_of(r, a, i / SIZE, i % SIZE, 0);
    }
    put_gradients(&p, 0);
    if (s.kept > 0) put_moments(&p);
    save(&p, FOLDER, r, s.world, s.sp, s.accumulation);
}

/* The wanted dump: a rank a row, the last row first; or one rank with no rows. */
static void write_want(int64_t q, int64_t rows) {
    static page p;
    static int32_t whole[3][RANKS * TOKENS];
    int64_t row = rows - 1 - q, d = row / s.accumulation, a = row % s.accumulation;
    int64_t tokens = s.held[a] * s.tokens;
    memset(&p, 0, sizeof p);
    for (int64_t t = 0; t < tokens; t++) {
        int64_t r = d * s.sp + t / s.tokens;
        whole[0][t] = (int32_t)t;
        whole[1][t] = s.ids[r][a][t % s.tokens];
        whole[2][t] = s.labels[r][a][t % s.tokens];
    }
    for (int i = 0; i < TENSORS * SIZE; i++)
        p.numbers[TENSORS + i / SIZE][i % SIZE] = row_of(d, a, i / SIZE, i % SIZE, 1);
    put(&p, "0.index", whole[0], 0, tokens);
    put(&p, "0.ids", whole[1], 0, tokens);
    put(&p, "0.labels", whole[2], 0, tokens);
    if (rows == 1) p.count = 0;
    put_gradients(&p, 1);
    save(&p, WANTED, q, rows, 1, 1);
}

static void expect(int code, const char *headline, const char *text) {
    int64_t rows = s.rows_apart ? s.dp * s.accumulation : 1;
    char said[16384];
    if (system("rm -rf " FOLDER " " WANTED)) exit(1);
    mkdir(FOLDER, 0777);
    mkdir(WANTED, 0777);
    for (int64_t r = 0; r < s.world; r++) write_rank(r);
    for (int64_t q = 0; q < rows; q++) write_want(q, rows);
    int is = said_by("build/seqpar-verify ver " FOLDER " --want " WANTED " 2>&1", said,
                     sizeof said);
    expect_says(is, said, code, headline, text);
}

static void expect_named(const char *what, const char *name, const char *text) {
    char headline[96];
    snprintf(headline, sizeof headline, "wrong: %s\n", name);
    expect(1, headline, text);
    test_end("dump_shares_%s_P%lld_D%lld_A%lld", what, (long long)s.sp, (long long)s.dp,
             (long long)s.accumulation);
}

/* ---- ways to weigh ---- */

enum { RANK_MEANS, REPLICA_MEANS, ROW_MEANS, MICRO_MEANS, PLACE_MEANS };

/* Of the ranks with one place in the sequence, over all replicas. */
static double count_of_place(int64_t place) {
    double count = 0;
    for (int64_t r = place; r < s.world; r += s.sp)
        count += count_over(r, r + 1, 0, s.accumulation);
    return count;
}

static void weigh(int which, int averaged) {
    for (int64_t r = 0; r < s.world; r++)
        for (int64_t a = 0; a < s.accumulation; a++) {
            int64_t first = r / s.sp * s.sp, last = first + s.sp, all = s.accumulation;
            double groups = which == RANK_MEANS      ? (double)s.world
                            : which == REPLICA_MEANS ? (double)s.dp
                            : which == PLACE_MEANS   ? (double)s.sp
                            : which == MICRO_MEANS   ? (double)all
                                                     : (double)(s.dp * all);
            double own = which == RANK_MEANS      ? count_over(r, r + 1, 0, all)
                         : which == REPLICA_MEANS ? count_over(first, last, 0, all)
                         : which == MICRO_MEANS   ? count_over(0, s.world, a, a + 1)
                         : which == PLACE_MEANS   ? count_of_place(r % s.sp)
                                                  : count_over(first, last, a, a + 1);
            s.weight[r][a] = own > 0 ? 1 / own / (averaged ? groups : 1) : 0;
        }
}

static void lose_micro_batches(int64_t kept) {
    for (int64_t r = 0; r < s.world; r++)
        for (int64_t a = 0; a < s.accumulation; a++)
            s.weight[r][a] = a == kept ? 1 / count_all() : 0;
}

static void test_right(void) {
    static const int64_t shapes[][3] = {{1, 2, 3}, {3, 2, 2}, {5, 1, 1}, {2, 3, 1},
                                        {1, 1, 3}, {8, 1, 1}, {4, 2, 1}};
    for (int i = 0; i < 14; i++) {
        make(shapes[i / 2][0], shapes[i / 2][1], shapes[i / 2][2]);
        s.rows_apart = i % 2;
        expect(0, "right", "gradients right");
        test_end("dump_shares_right_P%lld_D%lld_A%lld", (long long)s.sp, (long long)s.dp,
                 (long long)s.accumulation);
    }
}

static void test_rows(void) {
    make(3, 2, 3);
    lose_micro_batches(2);
    expect_named("lost", "micro_batches_lost", "the gradient of the last micro-batch");
    s.reducer = 3;
    expect_named("lost_and_scaled", "micro_batches_lost", "3 times the gradient of");
    make(3, 2, 2);
    lose_micro_batches(1);
    s.reducer = 3;
    expect_named("lost_and_scaled", "micro_batches_lost and times_sp", "3 times the gradient");
    make(1, 2, 3);
    lose_micro_batches(0);
    expect_named("kept", "micro_batches_lost", "the gradient of the first micro-batch");
    s.with_local = 0;
    expect_named("not_shown", "unknown", "the dump does");
    make(2, 2, 3);
    weigh(ROW_MEANS, 1);
    expect_named("rows", "mean_of_means", "a mean of rows' means");
    weigh(ROW_MEANS, 0);
    expect_named("rows_added", "one of sum_of_means, local_count", "a mean of rows' means");
    weigh(MICRO_MEANS, 1);
    expect_named("micro_batches", "mean_of_means", "a mean of micro-batches' means");
    make(2, 5, 1);
    weigh(REPLICA_MEANS, 1);
    expect_named("replicas", "mean_of_means", "means");
    s.reducer = 2;
    expect_named("replicas_scaled", "mean_of_means and times_sp", "they are 2 times");
    s.reducer = 1.37;
    expect_named("replicas_with_another", "unknown", "they are 1.37 times");
}

/* Two micro-batches of the same text: each stands for one rank of the wanted dump. */
static void test_equal_rows(void) {
    make(1, 2, 3);
    for (int64_t r = 0; r < s.world; r++) {
        memcpy(s.ids[r][2], s.ids[r][0], sizeof s.ids[r][0]);
        memcpy(s.labels[r][2], s.labels[r][0], sizeof s.labels[r][0]);
        memcpy(s.sum[r][2], s.sum[r][0], sizeof s.sum[r][0]);
    }
    for (int64_t r = 0; r < s.world; r++)
        for (int64_t a = 0; a < 3; a++) s.weight[r][a] = 1 / count_all();
    expect(0, "right", "gradients right");
    test_end("dump_shares_equal_right");
    lose_micro_batches(2);
    expect_named("equal_lost", "micro_batches_lost", "they are 1 times the gradient of the");
}

static void test_ranks(void) {
    static const int64_t shapes[][2] = {{3, 1}, {2, 3}, {5, 1}};
    for (int i = 0; i < 3; i++) {
        make(shapes[i][0], shapes[i][1], 1);
        s.rows_apart = 0;
        weigh(RANK_MEANS, 1);
        expect_named("ranks", "one of mean_of_means, own_mean_alone", "a mean of ranks' means");
        weigh(RANK_MEANS, 0);
        expect_named("ranks_added", "one of sum_of_means, local_count", "mean of ranks' means");
        s.with_local = 0;
        expect_named("ranks_not_shown", "unknown", "the dump does");
    }
    make(3, 1, 1); /* a rank without labels */
    for (int64_t t = 0; t < s.tokens; t++) s.labels[1][0][t] = -100;
    memset(s.sum[1], 0, sizeof s.sum[1]);
    s.rows_apart = 0;
    weigh(RANK_MEANS, 1);
    s.reducer = 1.5;
    expect_named("non_empty", "mean_of_non_empty_means", "a mean of ranks' means");
    make(3, 1, 1);
    s.rows_apart = 0;
    for (int64_t r = 0; r < 3; r++) s.weight[r][0] *= 1 + 0.3 * (double)r;
    expect_named("other", "unknown", "the dump does");
}

static void test_places(void) {
    make(2, 3, 1);
    s.rows_apart = 0;
    weigh(PLACE_MEANS, 0);
    expect_named("places_added", "one of sum_of_means, local_count", "a mean of places");
    weigh(PLACE_MEANS, 1);
    expect_named("places", "mean_of_means", "a mean of places");
}

/* Sequences of a step that are split over 3, 1 and 2 of the ranks, and over 5, 1 and 2. */
static void test_uneven(void) {
    static const int64_t sizes[] = {3, 5};
    for (int i = 0; i < 4; i++) {
        int64_t sp = sizes[i / 2];
        make_split(sp, 2 - i / 2, 3, 1);
        s.with_local = i % 2;
        expect(0, "right", "gradients right");
        test_end("dump_shares_uneven_right_P%lld", (long long)sp);
        for (int over = 0; over < 2; over++) {
            for (int64_t r = 0; r < s.world; r++)
                for (int64_t a = 0; a < 3; a++)
                    s.weight[r][a] = pow((double)s.held[a], over ? -1 : 1) / count_all();
            /* the wanted dump's local. tensors show it */
            s.with_local = 1;
            expect_named("uneven", over ? "over_sp" : "times_sp",
                         over ? "over the number of ranks that hold it"
                              : "times the number of ranks that hold it");
            s.reducer = 1.37;
            expect_named("uneven_scaled", "unknown", "the dump does");
            s.reducer = 1;
        }
        make_split(sp, 2 - i / 2, 3, 1);
        weigh(ROW_MEANS, 1);
        expect_named("uneven_rows", "mean_of_means", "a mean of rows' means");
    }
}

static void test_tied(void) {
    static const int64_t shapes[][3] = {{1, 1, 1}, {3, 2, 2}, {2, 1, 1}};
    for (int i = 0; i < 3; i++) {
        make(shapes[i][0], shapes[i][1], shapes[i][2]);
        s.tied = 1;
        s.rows_apart = s.with_local = 0;
        expect_named("tied", "tables_untied", "grad.embed and grad.head together are the");
        s.reducer = 1.37; /* then the sum is not the wanted one */
        expect_named("tied_scaled", "unknown", "0 of 1 tensors are the wanted ones");
    }
}

/* The gradient of the step before was not zeroed; 0.6: it was clipped before it made m. */
static void test_kept(void) {
    make(2, 1, 2);
    s.rows_apart = s.with_local = 0;
    s.kept = 1;
    expect_named("kept", "gradient_kept", "the wanted ones plus 10 times the moments m.");
    s.kept = 0.6;
    expect_named("kept_part", "gradient_kept", "the wanted ones plus 6 times the moments m.");
    s.reducer = 1.37; /* then the difference is not along m */
    expect_named("kept_scaled", "unknown", "0 of 2 tensors are the wanted ones");
}

static void divide_by(double count) {
    for (int64_t r = 0; r < s.world; r++)
        for (int64_t a = 0; a < s.accumulation; a++) s.weight[r][a] = 1 / count;
}

/* The sum over a count that is not that of the labels. */
static void test_counts(void) {
    double tokens;
    make(2, 2, 3);
    tokens = (double)(s.world * s.accumulation * s.tokens);
    divide_by(count_all() + 7);
    expect_named("counted", "one of counted_before_mask, another_window",
                 "tokens have a label");
    divide_by(count_all() - 7);
    expect_named("counted", "another_window", "tokens have a label");
    divide_by(tokens + 7);
    expect_named("counted", "another_window", "tokens have a label");
    divide_by(tokens);
    expect_named("counted", "all_tokens_counted", "tokens have a label");
    divide_by((double)s.world);
    expect_named("counted", "micro_batches_counted", "over 4, where");
    divide_by(count_all() + 0.4);
    expect_named("counted", "unknown", "the dump does");
    make(2, 2, 1);
    divide_by(count_all() + 7);
    expect_named("counted", "counted_before_mask", "tokens have a label");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_right());
    TEST(test_rows());
    TEST(test_equal_rows());
    TEST(test_ranks());
    TEST(test_places());
    TEST(test_uneven());
    TEST(test_tied());
    TEST(test_kept());
    TEST(test_counts());
    return test_summary();
}
