/* SPDX-License-Identifier: MIT OR Unlicense */
/* Whole optimizer steps on the CUDA device, pair by pair: every two of its objectives, models,
   rows, ways to split and to keep the optimizer's state meet in one step at least. On ranks
   the bits of one rank; on one rank as near to fp64 as its type allows. What the library
   refuses is refused as written here. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "seqpar_llama.h"
#include "support/test.h"
#include "support/run_objective.h"
#include "support/covering.h"
#include "support/layouts.h"

/* ---- factors and their values ---- */

enum {
    /* what to do */
    OBJECTIVE,
    STORAGE,
    ROWS,
    WIDTH,
    HEADS,
    MLP,
    PARTS,
    WINDOW,
    TIED,
    DROPOUT,
    TERMS,
    TEMPERATURE,
    UNTAUGHT,
    OPTIMIZER,
    STATE,
    CHANCE,
    /* how to do it */
    RANKS,
    COPIES,
    ACCUMULATION,
    LAYOUT,
    SCHEDULE,
    MEMBERS,
    ZERO,
    OFFLOAD,
    SLICE,
    RECOMPUTE,
    VOCAB_ROWS,
    FACTORS
};

static const int objectives[] = {OBJECTIVE_SFT, OBJECTIVE_DPO,    OBJECTIVE_KTO,
                                 OBJECTIVE_RM,  OBJECTIVE_POLICY, OBJECTIVE_VALUE};
/* Odd, so that rows begin at any place; and even, where a slice is 64 rows of the table. */
static const int64_t widths[][2] = {{13, 61}, {16, 131}}; /* hidden, vocab */
/* kv heads alone, in groups, and as many as there are heads */
static const int64_t heads_list[][2] = {{3, 1}, {4, 2}, {3, 3}};
enum { DENSE, BIASES, EXPERTS };
enum { NO_TERMS, SMOOTHED, ENTROPY };
static const int64_t members[] = {0, 2}, slices[] = {0, 1}, vocab_rows[] = {0, 3},
                     mlp_rows[] = {0, 5};
static const int offloads[] = {0, SEQPAR_OFFLOAD_STATE, SEQPAR_OFFLOAD_PARAMS};

/* Cells cost, tokens hardly: each is a tile of 16 queries and 64 keys. */
static const struct packing {
    const char *name;
    int64_t pairs, longest, pack_len, cell;
} packings[] = {{"a pair a row", 2, 7, 14, 3},
                {"pairs in a row", 3, 9, 61, 5},
                {"a cell a document", 2, 11, 22, 0}};

#define COUNT(list) ((int)(sizeof(list) / sizeof *(list)))
enum { GRID_LAYOUTS = 2 };
static const int levels[FACTORS] = {[OBJECTIVE] = COUNT(objectives),
                                    [STORAGE] = 2,
                                    [ROWS] = COUNT(packings),
                                    [WIDTH] = COUNT(widths),
                                    [HEADS] = COUNT(heads_list),
                                    [MLP] = 3,
                                    [PARTS] = 2,
                                    [WINDOW] = 2,
                                    [TIED] = 2,
                                    [DROPOUT] = 2,
                                    [TERMS] = 3,
                                    [TEMPERATURE] = 2,
                                    [UNTAUGHT] = 2,
                                    [OPTIMIZER] = 2,
                                    [STATE] = 2,
                                    [CHANCE] = 2,
                                    [RANKS] = 3,
                                    [COPIES] = 2,
                                    [ACCUMULATION] = 2,
                                    [LAYOUT] = GRID_LAYOUTS,
                                    [SCHEDULE] = SEQPAR_SCHEDULE_COUNT,
                                    [MEMBERS] = COUNT(members),
                                    [ZERO] = 4,
                                    [OFFLOAD] = COUNT(offloads),
                                    [SLICE] = COUNT(slices),
                                    [RECOMPUTE] = 3,
                                    [VOCAB_ROWS] = COUNT(vocab_rows)};

/* What a value is called. */
static const char *value_name(int factor, int level) {
    static const char *const text[FACTORS][COVER_LEVELS] = {
        [STORAGE] = {"fp32", "bf16"},
        [WIDTH] = {"odd", "even"},
        [HEADS] = {"3/1", "4/2", "3/3"},
        [MLP] = {"no other MLP", "biases", "experts"},
        [PARTS] = {"no parts", "parts"},
        [WINDOW] = {"no window", "window"},
        [TIED] = {"no tie", "tied"},
        [DROPOUT] = {"no dropout", "dropout"},
        [TERMS] = {"no terms", "smoothed", "entropy"},
        [TEMPERATURE] = {"no temperature", "temperature"},
        [UNTAUGHT] = {"no untaught", "untaught"},
        [OPTIMIZER] = {"adamw", "sgd"},
        [STATE] = {"no packing", "8 bits"},
        [CHANCE] = {"no chance", "chance"},
        [RANKS] = {"P=1", "P=2", "P=3"},
        [COPIES] = {"no copies", "D=2"},
        [ACCUMULATION] = {"no accumulation", "A=2"},
        [MEMBERS] = {"no U", "U=2"},
        [ZERO] = {"no zero", "zero 1", "zero 2", "zero 3"},
        [OFFLOAD] = {"no offload", "offload state", "offload params"},
        [SLICE] = {"no slices", "slices"},
        [RECOMPUTE] = {"no recompute", "recompute", "second pool"},
        [VOCAB_ROWS] = {"no tiles", "logits by 3, MLP by 5 tokens"}};
    return factor == OBJECTIVE  ? objective_name(objectives[level])
           : factor == ROWS     ? packings[level].name
           : factor == LAYOUT   ? seqpar_layout_name(layout_of_grid(level))
           : factor == SCHEDULE ? seqpar_schedule_name(level)
                                : text[factor][level];
}

static const char *case_name(const int *level) {
    return cover_name(FACTORS, level, value_name);
}

/* ---- what is refused, and what has no meaning ---- */

/* Two values that never meet: the status and the words of the refusal; NULL: they have no
   meaning together. */
static const struct rule {
    int factor[2], level[2];
    seqpar_status status;
    const char *words;
} rules[] = {{{OFFLOAD, ZERO}, {2, 0}, SEQPAR_ERR_OPTION, "offload is 2 at zero_stage 0"},
             {{OFFLOAD, ZERO}, {2, 1}, SEQPAR_ERR_OPTION, "offload is 2 at zero_stage 1"},
             {{OFFLOAD, ZERO}, {2, 2}, SEQPAR_ERR_OPTION, "offload is 2 at zero_stage 2"},
             {{STATE, OFFLOAD}, {1, 1}, SEQPAR_ERR_OPTION, "state_bits is 8 and offload 1"},
             {{CHANCE, STORAGE},
              {1, 0},
              SEQPAR_ERR_OPTION,
              "stochastic rounding is for weights in bf16"},
             {{MEMBERS, RANKS}, {1, 0}, SEQPAR_ERR_ULYSSES, "ulysses_size 2 does not divide"},
             {{MEMBERS, RANKS}, {1, 2}, SEQPAR_ERR_ULYSSES, "ulysses_size 2 does not divide"},
             {{MEMBERS, HEADS}, {1, 0}, SEQPAR_ERR_ULYSSES, "is more than the 1 kv_heads"},
             /* a score has no logits */
             {{OBJECTIVE, TIED}, {3, 1}, SEQPAR_OK, NULL},
             {{OBJECTIVE, TIED}, {5, 1}, SEQPAR_OK, NULL},
             {{OBJECTIVE, TERMS}, {3, 1}, SEQPAR_OK, NULL},
             {{OBJECTIVE, TERMS}, {3, 2}, SEQPAR_OK, NULL},
             {{OBJECTIVE, TERMS}, {5, 1}, SEQPAR_OK, NULL},
             {{OBJECTIVE, TERMS}, {5, 2}, SEQPAR_OK, NULL},
             {{OBJECTIVE, TEMPERATURE}, {3, 1}, SEQPAR_OK, NULL},
             {{OBJECTIVE, TEMPERATURE}, {5, 1}, SEQPAR_OK, NULL},
             {{OBJECTIVE, VOCAB_ROWS}, {3, 1}, SEQPAR_OK, NULL},
             {{OBJECTIVE, VOCAB_ROWS}, {5, 1}, SEQPAR_OK, NULL}};
enum { RULES = COUNT(rules) };

static int breaks(const int *level, const struct rule *r) {
    return level[r->factor[0]] == r->level[0] && level[r->factor[1]] == r->level[1];
}

/* The first rule that a case breaks; RULES: none. */
static int broken(const int *level) {
    int rule = 0;
    while (rule < RULES && !breaks(level, &rules[rule])) rule++;
    return rule;
}

/* What is open can always be chosen: no value has rules with all of another factor's. */
static int possible(const int *level) { return broken(level) == RULES; }

/* ---- a case ---- */

enum { MOST_CASES = 100 };
static int cases[MOST_CASES][COVER_FACTORS];
static int case_count;

static cover covering(void) {
    return (cover){.factors = FACTORS, .levels = levels, .possible = possible, .draw = 1};
}

static void make_cases(void) {
    cover c = covering();
    case_count = cover_all(&c, cases, 0, MOST_CASES);
}

static seqpar_llama_config config_of(const int *level) {
    seqpar_llama_config c = {.layers = level[RECOMPUTE] == 2 ? 3 : 2, /* two of them stay */
                             .hidden = widths[level[WIDTH]][0],
                             .heads = heads_list[level[HEADS]][0],
                             .kv_heads = heads_list[level[HEADS]][1],
                             .head_dim = 6,
                             .intermediate = 19,
                             .vocab = widths[level[WIDTH]][1],
                             .tied = level[TIED],
                             .window = level[WINDOW] ? 3 : 0,
                             .window_from = level[WINDOW],
                             .attention_dropout = level[DROPOUT] ? 0.3 : 0};
    if (level[PARTS]) c.qk_norm = c.qkv_bias = c.o_bias = 1, c.no_rope_every = 2;
    c.mlp_bias = level[MLP] == BIASES;
    if (level[MLP] == EXPERTS) {
        c.experts = 3;
        c.experts_per_token = c.sparse_every = 2;
        c.expert_intermediate = 7;
        c.topk_norm = level[PARTS];
    }
    return c;
}

static void task_of(const int *level, objective_task *t) {
    static const double balance[] = {0.02, -0.03, 0.01};
    const struct packing *p = &packings[level[ROWS]];
    objective_task_cells(t, objectives[level[OBJECTIVE]], p->pairs, p->longest, p->pack_len,
                         p->cell, 5);
    const char *score = t->config.score;
    t->config = config_of(level);
    t->config.score = score;
    t->temperature = level[TEMPERATURE] ? 0.7 : 0;
    t->smooth = level[TERMS] == SMOOTHED ? 0.02 : 0;
    t->zloss = level[TERMS] == SMOOTHED ? 0.003 : 0;
    t->entropy = level[TERMS] == ENTROPY ? 0.01 : 0;
    t->balance = level[MLP] == EXPERTS ? balance : NULL;
    t->untaught = level[UNTAUGHT];
    t->lean = 1;
}

static objective_way way_of(const int *level) {
    return (objective_way){.dp = 1 + level[COPIES],
                           .sp = 1 + level[RANKS],
                           .accumulation = 1 + level[ACCUMULATION],
                           .layout = layout_of_grid(level[LAYOUT]),
                           .schedule = level[SCHEDULE],
                           .ulysses_size = members[level[MEMBERS]],
                           .reference_device = level[STORAGE] ? 2 : 0,
                           .optimizer = level[OPTIMIZER] ? SEQPAR_OPTIM_SGD
                                                         : SEQPAR_OPTIM_ADAMW,
                           .zero_stage = level[ZERO],
                           .recompute = level[RECOMPUTE],
                           .offload = offloads[level[OFFLOAD]],
                           .vocab_rows = vocab_rows[level[VOCAB_ROWS]],
                           .mlp_rows = mlp_rows[level[VOCAB_ROWS]],
                           .slice = slices[level[SLICE]],
                           .state_bits = level[STATE] ? 8 : 0,
                           .stochastic = level[CHANCE]};
}

/* The same numbers on one rank, as plainly as can be. */
static objective_way alone_on(const objective_way *w, int device) {
    return (objective_way){.dp = 1,
                           .sp = 1,
                           .accumulation = 1,
                           .layout = layout_of_grid(0),
                           .reference_device = device,
                           .optimizer = w->optimizer,
                           .state_bits = w->state_bits,
                           .stochastic = device > 1 && w->stochastic};
}

/* ---- the bits of one rank ---- */

static void expect_same(const char *what, const double *a, const double *b, int64_t count) {
    test_expect(!memcmp(a, b, (size_t)count * sizeof *a), "%s differ by %.2e", what,
                test_distance(a, b, count));
}

static void expect_bits(const objective_result *r, const objective_result *one) {
    if (!test_expect(!r->status, "%s", r->error.text)) return;
    expect_same("losses", &r->loss, &one->loss, 1);
    expect_same("metrics", r->columns, one->columns, OBJECTIVE_COLUMNS);
    expect_same("gradients", r->gradient, one->gradient, one->elements);
    expect_same("norms", &r->norm, &one->norm, 1);
    expect_same("moments or masters", r->state, one->state, 3 * one->elements);
    expect_same("parameters", r->params, one->params, one->elements);
}

/* ---- as near to fp64 as its type allows ---- */

static double worst; /* share of a limit that was used */

/* Near a corner of PPO's losses a rounding says whether a token is clipped: their share. */
static double clipped_otherwise(int kind, const objective_result *one,
                                const objective_result *truth) {
    int clips = kind == OBJECTIVE_POLICY || kind == OBJECTIVE_VALUE;
    return clips ? fabs(one->columns[1] - truth->columns[1]) : 0;
}

/* Twice what was measured of fp32; of bf16 twice what the reference device, which rounds in
   the same places, loses of the same numbers, or one rounding. */
static void expect_near(int kind, const objective_result *one, const objective_result *truth,
                        const objective_result *base) {
    double d = test_distance(one->gradient, truth->gradient, one->elements), limit = 1e-5;
    if (base)
        limit = fmax(2 * test_distance(base->gradient, truth->gradient, one->elements),
                     1. / 128) +
                clipped_otherwise(kind, one, truth);
    worst = fmax(worst, d / limit);
    test_expect(d <= limit && d >= (base ? 1e-4 : 0), "the gradient is %.2e off, at most %.2e",
                d, limit);
    test_expect(fabs(one->norm - truth->norm) <= limit * truth->norm, "norm %.9g, in fp64 %.9g",
                one->norm, truth->norm);
    test_expect(fabs(one->loss - truth->loss) <= limit * (1 + fabs(truth->loss)),
                "loss %.9g, in fp64 %.9g", one->loss, truth->loss);
    test_expect(one->norm > 0 && memcmp(one->params, one->start,
                                        (size_t)one->elements * sizeof *one->params),
                "the parameters did not move");
}

static void test_case(int n) {
    const int *level = cases[n];
    objective_task t;
    objective_way way = way_of(level), alone = alone_on(&way, way.reference_device),
                  exact = alone_on(&way, 1), rounded = alone_on(&way, 3);
    objective_result one, r, truth, base;
    task_of(level, &t);
    objective_run(&t, &alone, &one);
    objective_run(&t, &way, &r);
    t.start = one.start; /* the same numbers */
    t.reference_start = one.reference_start;
    objective_run(&t, &exact, &truth);
    objective_run(&t, &rounded, &base);
    if (test_expect(!one.status && !truth.status && !base.status, "%s%s%s", one.error.text,
                    truth.error.text, base.error.text))
        expect_near(t.kind, &one, &truth, level[STORAGE] ? &base : NULL);
    expect_bits(&r, &one);
    test_end("cuda_steps_%02d%s", n, case_name(level));
    objective_result_free(&base);
    objective_result_free(&truth);
    objective_result_free(&r);
    objective_result_free(&one);
    objective_task_close(&t);
}

/* ---- what is refused ---- */

typedef struct opening {
    const objective_task *task;
    const objective_way *way;
} opening;

static seqpar_status rank_open(seqpar_comm *world, void *user) {
    const opening *o = user;
    const objective_way *w = o->way;
    seqpar_device *device = test_device(w->reference_device, 1);
    seqpar_optim_desc desc = {.kind = w->optimizer,
                              .zero_stage = w->zero_stage,
                              .offload = w->offload,
                              .state_bits = w->state_bits,
                              .stochastic = w->stochastic};
    seqpar_llama_batch_desc run = objective_run_of(o->task, w, 1);
    seqpar_llama_batch batch = {0};
    seqpar_llama model = {0};
    seqpar_optim optim = {0};
    seqpar_ctx ctx;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, w->sp);
    if (!status) status = params_open(&ctx, &model, &o->task->config, &desc);
    if (!status)
        status = seqpar_optim_open(&ctx, &optim, model.tensors, model.tensor_count, &desc);
    if (!status)
        status = seqpar_llama_open_batch(&ctx, &model, &batch, o->task->batch.row, 1, &run);
    seqpar_llama_close_batch(&ctx, &model, &batch);
    seqpar_optim_close(&ctx, &optim);
    seqpar_llama_close(&ctx, &model);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

/* Opens, or is refused as the first rule that it breaks says: its number. */
static int open_way(const int *level) {
    int rule = broken(level);
    const struct rule *r = rule < RULES ? &rules[rule] : NULL;
    seqpar_error error = {0};
    objective_task t;
    objective_way way = way_of(level);
    task_of(level, &t);
    seqpar_status status = seqpar_run_threads(way.dp * way.sp, rank_open, &(opening){&t, &way},
                                              &error);
    test_expect(r ? status == r->status && strstr(error.text, r->words) : !status,
                "%s: '%s', not '%s'", case_name(level), error.text, r ? r->words : "");
    objective_task_close(&t);
    return rule;
}

/* All values of these factors with each other, the rest plain. */
static void open_all(const int *planned, int factors, int *count) {
    int level[FACTORS] = {0}, ways = 1;
    for (int i = 0; i < factors; i++) ways *= levels[planned[i]];
    for (int way = 0; way < ways; way++) {
        int at = way;
        for (int i = 0; i < factors; at /= levels[planned[i++]])
            level[planned[i]] = at % levels[planned[i]];
        count[open_way(level)]++;
    }
}

static void test_refused(void) {
    static const int of_ranks[] = {RANKS, MEMBERS, HEADS, SCHEDULE},
                     of_state[] = {STORAGE, STATE, CHANCE, ZERO, OFFLOAD};
    int count[RULES + 1] = {0}, refused = 0;
    open_all(of_ranks, COUNT(of_ranks), count);
    open_all(of_state, COUNT(of_state), count);
    for (int i = 0; i < RULES; i++) {
        test_expect(!rules[i].words || count[i], "nothing was refused because '%s'",
                    rules[i].words ? rules[i].words : "");
        if (rules[i].words) printf("  %3d ways: %s\n", count[i], rules[i].words);
        refused += count[i];
    }
    test_end("cuda_steps_refused: %d ways open, %d are refused", count[RULES], refused);
}

/* Every pair is in a case, or a rule says why not. */
static void test_all_met(void) {
    cover met = covering();
    int64_t count[2] = {0};
    for (int n = 0; n < case_count; n++) cover_meet(&met, cases[n]);
    for (cover_pair p = {{0}}; cover_next(&met, &p);) {
        int can = cover_pair_possible(&met, &p);
        test_expect(cover_met(&met, &p) == can, "%s and %s %s",
                    value_name(p.factor[0], p.level[0]), value_name(p.factor[1], p.level[1]),
                    can ? "never meet" : "meet, though a rule is against it");
        count[can]++;
    }
    test_expect(count[0] + count[1] == cover_pairs(&met) && count[0] == RULES,
                "pairs were left out");
    test_end("cuda_steps_met: %lld pairs in %d cases, %lld by no way", (long long)count[1],
             case_count, (long long)count[0]);
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
