/* SPDX-License-Identifier: MIT OR Unlicense */
/* Attention on the CUDA device, pair by pair: every two of its masks, schedules, layouts,
   numbers of ranks, shapes of heads, rows and types meet in one run at least, forward and
   backward. On ranks the bits of one rank, or the error rule where that is the promise; on one
   rank as near to fp64 as its type allows. What the library refuses is refused as written
   here. (An own attention kernel is cuDNN's: on_cpu_cudnn_attention.) */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_CHECK_IMPLEMENTATION
#include "support/attention_setup.h"
#include "support/covering.h"
#include "support/layouts.h"

/* ---- factors and their values ---- */

enum {
    LAYOUT,
    SCHEDULE,
    RANKS,
    MEMBERS,
    REPLICATE,
    STRIDE,
    HEADS,
    HEAD_DIM,
    ROWS,
    STORAGE,
    FULL,
    WINDOW,
    PREFIX,
    SINKS,
    SOFTCAP,
    DROPOUT,
    SCALE,
    GAPS,
    RELAXED,
    FACTORS
};

/* kv heads that divide numbers of ranks and that do not, alone and in groups */
static const int64_t heads_list[][2] = {{2, 1}, {4, 2}, {4, 4}, {6, 3}, {5, 5}};
/* read by 16 bytes and not; the second width that kernels are written for */
static const int64_t dims[] = {5, 8, 70};
static const int64_t members[] = {0, 2}, strides[] = {1, 2}, windows[] = {0, 3, 17};

typedef struct packing { /* of one or two rows */
    const char *name;
    int64_t rows, tokens[2], cell[2], docs[2], cu[2][7];
    int unnumbered; /* 1: nobody has numbered the documents */
} packing;

/* Cells cost, tokens hardly: each is a tile of 16 queries and 64 keys, in which five ranks of
   a stripe still hold some. One cell is longer, and leaves all ranks but one without a
   token. */
static const packing packings[] = {
    {"one document", 1, {61}, {16}, {1}, {{0, 61}}, 0},
    {"documents", 1, {71}, {17}, {5}, {{0, 19, 20, 20, 53, 71}}, 0},
    {"tokens alone", 1, {5}, {1}, {5}, {{0, 1, 2, 3, 4, 5}}, 0},
    {"one cell", 1, {67}, {0}, {0}, {{0}}, 0},
    {"no numbers", 1, {37}, {7}, {2}, {{0, 36, 37}}, 1},
    {"two rows", 2, {31, 2}, {16, 1}, {2, 1}, {{0, 13, 31}, {0, 2}}, 0},
};

#define COUNT(list) ((int)(sizeof(list) / sizeof *(list)))
enum { MOST_RANKS = 5 };
static const int levels[FACTORS] = {[LAYOUT] = SEQPAR_LAYOUT_COUNT,
                                    [SCHEDULE] = SEQPAR_SCHEDULE_COUNT,
                                    [RANKS] = MOST_RANKS,
                                    [MEMBERS] = COUNT(members),
                                    [REPLICATE] = 2,
                                    [STRIDE] = COUNT(strides),
                                    [HEADS] = COUNT(heads_list),
                                    [HEAD_DIM] = COUNT(dims),
                                    [ROWS] = COUNT(packings),
                                    [STORAGE] = 2,
                                    [FULL] = 2,
                                    [WINDOW] = COUNT(windows),
                                    [PREFIX] = 2,
                                    [SINKS] = 2,
                                    [SOFTCAP] = 2,
                                    [DROPOUT] = 2,
                                    [SCALE] = 2,
                                    [GAPS] = 2,
                                    [RELAXED] = 2};

/* What a value is called. */
static const char *value_name(int factor, int level) {
    static const char *const text[FACTORS][COVER_LEVELS] = {
        [RANKS] = {"P=1", "P=2", "P=3", "P=4", "P=5"},
        [MEMBERS] = {"no U", "U=2"},
        [REPLICATE] = {"no copies", "copies"},
        [STRIDE] = {"no stride", "stride 2"},
        [HEADS] = {"2/1", "4/2", "4/4", "6/3", "5/5"},
        [HEAD_DIM] = {"x5", "x8", "x70"},
        [STORAGE] = {"fp32", "bf16"},
        [FULL] = {"causal", "full"},
        [WINDOW] = {"no window", "window 3", "window 17"},
        [PREFIX] = {"no prefix", "prefix"},
        [SINKS] = {"no sinks", "sinks"},
        [SOFTCAP] = {"no softcap", "softcap"},
        [DROPOUT] = {"no dropout", "dropout"},
        [SCALE] = {"no scale", "scale"},
        [GAPS] = {"no gaps", "gaps"},
        [RELAXED] = {"no relaxing", "relaxed"}};
    return factor == LAYOUT     ? seqpar_layout_name(level)
           : factor == SCHEDULE ? seqpar_schedule_name(level)
           : factor == ROWS     ? packings[level].name
                                : text[factor][level];
}

static const char *case_name(const int *level) {
    return cover_name(FACTORS, level, value_name);
}

/* ---- what is refused, and what has equal bits ---- */

typedef struct refusal {
    seqpar_status status;
    const char *words;
} refusal;

enum { REFUSALS = 5 };
static const refusal refusals[REFUSALS] = {
    {SEQPAR_ERR_ULYSSES, "does not divide sequence_parallel_size"},
    {SEQPAR_ERR_ULYSSES, "is more than the"},
    {SEQPAR_ERR_ULYSSES, "is no multiple of the"},
    {SEQPAR_ERR_HEAD_STRIDE, "heads_k_stride 2 does not divide"},
    {SEQPAR_ERR_ULYSSES, "with replicated kv heads use a divisor"}};

static int64_t common_divisor(int64_t a, int64_t b) { return b ? common_divisor(b, a % b) : a; }

static int64_t kv_of(const int *level) { return heads_list[level[HEADS]][1]; }

/* Ranks that exchange tokens for heads. */
static int64_t members_of(const int *level) {
    int64_t ranks = level[RANKS] + 1, kv = kv_of(level);
    if (members[level[MEMBERS]]) return members[level[MEMBERS]];
    if (level[SCHEDULE] != SEQPAR_SCHEDULE_ULYSSES) return 1;
    return kv >= ranks || level[REPLICATE] ? ranks : common_divisor(ranks, kv);
}

static int replicated(const int *level) { return members_of(level) > kv_of(level); }

/* kv heads of a member, fewest or most, that the stride must divide. */
static int stride_fits(const int *level) {
    int64_t u = members_of(level), kv = kv_of(level), stride = strides[level[STRIDE]];
    if (level[SCHEDULE] != SEQPAR_SCHEDULE_LLAMA3 && u > 1) return 1;
    if (replicated(level)) return stride == 1;
    return kv / u % stride == 0 && (kv + u - 1) / u % stride == 0;
}

/* Why a case is refused, or NULL. */
static const refusal *refused(const int *level) {
    int64_t u = members_of(level), kv = kv_of(level);
    if ((level[RANKS] + 1) % u) return &refusals[0];
    if (u > kv && !level[REPLICATE]) return &refusals[1];
    if (u > kv && u % kv) return &refusals[2];
    if (!stride_fits(level)) return &refusals[3];
    return u > kv && heads_list[level[HEADS]][0] % u ? &refusals[4] : NULL;
}

/* What the promise of equal bits leaves out, as far as it is chosen. */
static int by_error_rule(const int *level) {
    return (level[LAYOUT] != COVER_OPEN && !layout_on_grid(level[LAYOUT])) ||
           level[RELAXED] == 1;
}

static int has_equal_bits(const int *level) {
    return !by_error_rule(level) && !replicated(level);
}

/* those that a refusal asks for */
static const int planned[] = {RANKS, MEMBERS, HEADS, SCHEDULE, REPLICATE, STRIDE};
static int bits_alone; /* 1: cases with equal bits only */

/* Is there a choice of the open ones from planned[n] on? */
static int completes(int *level, int n) {
    int factor, found = 0;
    if (n == COUNT(planned)) return !refused(level) && (!bits_alone || has_equal_bits(level));
    factor = planned[n];
    if (level[factor] != COVER_OPEN) return completes(level, n + 1);
    for (int v = 0; v < levels[factor] && !found; v++) {
        level[factor] = v;
        found = completes(level, n + 1);
    }
    level[factor] = COVER_OPEN;
    return found;
}

static int possible(const int *level) {
    int tried[FACTORS];
    memcpy(tried, level, sizeof tried);
    return completes(tried, 0);
}

/* ---- a case ---- */

enum { MOST_CASES = 200 };
static int cases[MOST_CASES][COVER_FACTORS];
static int case_count;

static cover covering(void) {
    return (cover){.factors = FACTORS, .levels = levels, .possible = possible, .draw = 1};
}

/* First what can have equal bits, then the rest. */
static void make_cases(void) {
    cover c = covering();
    for (bits_alone = 1; bits_alone >= 0; bits_alone--)
        case_count = cover_all(&c, cases, case_count, MOST_CASES);
    bits_alone = 0;
}

static void lay_rows(problem *p, const packing *from) {
    p->row_count = from->rows;
    for (int64_t r = 0; r < from->rows; r++) {
        p->rows[r] = (seqpar_row){.index = 2 * r,
                                  .tokens = from->tokens[r],
                                  .cell = from->cell[r],
                                  .docs = from->docs[r],
                                  .cu_seqlens = from->docs[r] ? p->cu[r] : NULL,
                                  .doc_source = from->unnumbered ? NULL : p->source[r]};
        p->tokens += from->tokens[r];
        for (int64_t d = 0; d <= from->docs[r]; d++) p->cu[r][d] = from->cu[r][d];
        for (int64_t d = 0; d < 7; d++) p->source[r][d] = 3 * (7 * r + d) + 2;
        for (int64_t d = 0; d < from->docs[r]; d++)
            p->prefix[r][d] = (from->cu[r][d + 1] - from->cu[r][d] + 1) * 2 / 3;
    }
}

static problem *problem_of(const int *level) {
    problem *p = calloc(1, sizeof *p);
    p->heads = heads_list[level[HEADS]][0];
    p->kv_heads = heads_list[level[HEADS]][1];
    p->head_dim = dims[level[HEAD_DIM]];
    lay_rows(p, &packings[level[ROWS]]);
    for (int64_t h = 0; h < p->heads; h++) p->sinks[h] = (double)(float)test_normal();
    p->q = random_values(p->tokens * p->heads * p->head_dim);
    p->dout = random_values(p->tokens * p->heads * p->head_dim);
    p->k = random_values(p->tokens * p->kv_heads * p->head_dim);
    p->v = random_values(p->tokens * p->kv_heads * p->head_dim);
    if (level[STORAGE]) round_problem(p);
    return p;
}

static setup setup_of(const int *level, problem *p) {
    return (setup){.p = p,
                   .reference = level[STORAGE] ? 2 : 0,
                   .ranks = level[RANKS] + 1,
                   .threads = 1,
                   .layout = level[LAYOUT],
                   .schedule = level[SCHEDULE],
                   .ulysses = members[level[MEMBERS]],
                   .replicate = level[REPLICATE],
                   .stride = strides[level[STRIDE]],
                   .packed = level[GAPS],
                   .relaxed = level[RELAXED],
                   .f = {.full = level[FULL],
                         .window = windows[level[WINDOW]],
                         .prefix = level[PREFIX],
                         .sinks = level[SINKS],
                         .softcap = level[SOFTCAP] ? 1.5 : 0,
                         .dropout = level[DROPOUT] ? 0.3 : 0,
                         .scale = level[SCALE] ? -0.3 : 0}};
}

/* The same numbers on one rank, as plainly as can be. */
static setup alone_on(const setup *s, int device) {
    return (setup){.p = s->p, .reference = device, .ranks = 1, .threads = 1, .f = s->f};
}

/* ---- as near to fp64 as its type allows ---- */

enum { OUT, LSE, DQ, DK, DV, DSINKS, TENSORS };
static const char *const tensor_names[] = {"out", "lse", "dq", "dk", "dv", "dsinks"};

static const double *tensor_of(const setup *s, int tensor, int64_t *count) {
    const problem *p = s->p;
    int64_t wide = p->tokens * p->heads * p->head_dim;
    int64_t narrow = p->tokens * p->kv_heads * p->head_dim;
    const double *const all[] = {s->out, s->lse, s->dq, s->dk, s->dv, s->dsinks};
    const int64_t counts[] = {wide, p->tokens * p->heads, wide, narrow, narrow, dsinks_size(p)};
    *count = counts[tensor];
    return all[tensor];
}

/* Relative to what is wanted; where that is small because terms cancel (a token that sees
   itself alone has dq 0), to a quarter of the numbers that went in. */
static double off(const setup *got, const setup *want, int tensor) {
    int64_t n;
    const double *x = tensor_of(got, tensor, &n), *y = tensor_of(want, tensor, &n);
    double size = 0, ingoing = tensor == DSINKS ? (double)got->p->heads : (double)n;
    for (int64_t i = 0; i < n; i++) size += y[i] * y[i];
    return test_distance(x, y, n) * (size > 0 ? sqrt(size) : 1) /
           fmax(sqrt(size), sqrt(ingoing) / 4);
}

/* Twice what was measured of fp32; of bf16 twice what the reference device, which rounds in
   the same places, loses of the same numbers, or one rounding. lse has the accumulator's
   type. */
static double limit_of(const setup *truth, const setup *base, int tensor) {
    if (base->reference != 3 || tensor == LSE) return 2e-6;
    return fmax(2 * off(base, truth, tensor), 1. / 128);
}

static double worst; /* share of a limit that was used */

/* By the error rule a tensor may be twice as far off. */
static void expect_near(const setup *got, const setup *truth, const setup *base, int rule) {
    for (int t = 0; t < TENSORS; t++) {
        double d = off(got, truth, t), limit = (1 + rule) * limit_of(truth, base, t);
        worst = fmax(worst, d / limit);
        test_expect(d <= limit, "%s is %.2e off, at most %.2e", tensor_names[t], d, limit);
    }
}

static void test_case(int n) {
    const int *level = cases[n];
    problem *p = problem_of(level);
    setup s = setup_of(level, p), one = alone_on(&s, s.reference), truth = alone_on(&s, 1),
          base = alone_on(&s, level[STORAGE] ? 3 : 1);
    setup_run(&truth);
    setup_run(&base);
    setup_run(&one);
    setup_run(&s);
    expect_near(&one, &truth, &base, 0);
    if (has_equal_bits(level))
        expect_same_bits(&s, &one, "ranks");
    else
        expect_near(&s, &truth, &base, 1);
    test_end("cuda_pairs_%02d%s", n, case_name(level));
    setup_free(&truth);
    setup_free(&base);
    setup_free(&one);
    setup_free(&s);
    problem_free(p);
}

/* ---- what is refused ---- */

static seqpar_status rank_open(seqpar_comm *world, void *user) {
    const setup *s = user;
    seqpar_device *device = test_device(s->reference, 1);
    const seqpar_attn_desc desc = setup_desc(s);
    seqpar_attn *attn = NULL;
    seqpar_ctx ctx;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, s->ranks);
    if (!status) status = seqpar_attn_open(&ctx, &attn, s->p->rows, s->p->row_count, &desc);
    seqpar_attn_close(&ctx, attn);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

/* One way to plan, which opens or is refused as `refused` says; the number of its reason. */
static int open_way(const int *level, problem *p) {
    const refusal *why = refused(level);
    seqpar_error error = {0};
    setup s = setup_of(level, p);
    seqpar_status status = seqpar_run_threads(s.ranks, rank_open, &s, &error);
    test_expect(why ? status == why->status && strstr(error.text, why->words) : !status,
                "%s: '%s', not '%s'", case_name(level), error.text, why ? why->words : "");
    return why ? (int)(why - refusals) : REFUSALS;
}

static void test_refused(void) {
    int level[FACTORS] = {0}, count[REFUSALS + 1] = {0}, ways = 1, way, at;
    for (int i = 0; i < COUNT(planned); i++) ways *= levels[planned[i]];
    for (way = 0; way < ways; way++) {
        problem *p;
        at = way;
        for (int i = 0; i < COUNT(planned); at /= levels[planned[i++]])
            level[planned[i]] = at % levels[planned[i]];
        p = problem_of(level);
        count[open_way(level, p)]++;
        problem_free(p);
    }
    for (int i = 0; i < REFUSALS; i++) {
        test_expect(count[i] > 0, "nothing was refused because '%s'", refusals[i].words);
        printf("  %3d ways of %d: %s\n", count[i], ways, refusals[i].words);
    }
    test_end("cuda_pairs_refused: %d ways to plan open, %d are refused", count[REFUSALS],
             ways - count[REFUSALS]);
}

/* Equal bits can be had, or the error rule, or all that the pair is in is refused. */
enum { WITH_BITS, BY_RULE, REFUSED, SORTS };
static int sort_of(const cover_pair *p) {
    cover c = covering();
    int sort = BY_RULE;
    bits_alone = 1;
    if (cover_pair_possible(&c, p)) sort = WITH_BITS;
    bits_alone = 0;
    return cover_pair_possible(&c, p) ? sort : REFUSED;
}

static void expect_met(const cover met[2], const cover_pair *p, int sort) {
    const char *one = value_name(p->factor[0], p->level[0]);
    const char *other = value_name(p->factor[1], p->level[1]);
    if (sort == REFUSED) printf("  refused in any way: %s with %s\n", one, other);
    test_expect(sort == REFUSED || cover_met(&met[sort], p), "%s never meets %s%s", one, other,
                sort == WITH_BITS ? " with equal bits" : "");
}

/* Every pair is in a case, with equal bits where it can have them. */
static void test_all_met(void) {
    cover met[2] = {covering(), covering()};
    int64_t count[SORTS] = {0};
    for (int n = 0; n < case_count; n++) {
        if (has_equal_bits(cases[n])) cover_meet(&met[WITH_BITS], cases[n]);
        cover_meet(&met[BY_RULE], cases[n]);
    }
    for (cover_pair p = {{0}}; cover_next(&met[0], &p);) {
        int sort = sort_of(&p);
        expect_met(met, &p, sort);
        count[sort]++;
    }
    test_expect(count[WITH_BITS] + count[BY_RULE] + count[REFUSED] == cover_pairs(&met[0]) &&
                    count[WITH_BITS] && count[BY_RULE] && count[REFUSED],
                "pairs were left out");
    test_end("cuda_pairs_met: %lld pairs in %d cases, %lld with equal bits, %lld by the error "
             "rule; %lld refused",
             (long long)cover_pairs(&met[0]), case_count, (long long)count[WITH_BITS],
             (long long)count[BY_RULE], (long long)count[REFUSED]);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    make_cases();
    TEST(test_refused());
    for (int n = 0; n < case_count; n++) TEST(test_case(n));
    TEST(test_all_met());
    if (worst > 0) printf("# at most %.2f of a limit was needed\n", worst);
    return test_summary();
}
