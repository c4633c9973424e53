/* SPDX-License-Identifier: MIT OR Unlicense */
/* Attention over ranks: the bits of one rank in every grid layout, the truth of slow.h, the
   error rule for those that cut cells. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_CHECK_IMPLEMENTATION
#include "seqpar_check.h"
#include "support/attention_setup.h"
#include "support/layouts.h"
#include "support/own_attention.h"
#include "second/slow.h"
#include "support/test.h"

static problem *problem_new(int64_t rows, const int64_t *lengths, const int64_t *cells,
                            int64_t heads, int64_t kv_heads, int64_t head_dim) {
    problem *p = calloc(1, sizeof *p);
    int64_t r, d, at, number = 0;
    p->heads = heads;
    p->kv_heads = kv_heads;
    p->head_dim = head_dim;
    p->row_count = rows;
    for (r = 0; r < rows; r++) {
        seqpar_row *row = &p->rows[r];
        row->index = r * 2; /* numbers need not be neighbours */
        row->tokens = lengths[r];
        row->cell = cells[r];
        p->cu[r][0] = 0;
        for (d = 0, at = 0; at < lengths[r] && d < 14; d++) {
            /* one-token and empty documents */
            int64_t n = d == 1 ? 1 : d == 2 ? 0 : test_integer(1, lengths[r] / 2 + 1);
            at = d == 13 || at + n > lengths[r] ? lengths[r] : at + n;
            p->prefix[r][d] = test_integer(0, at - p->cu[r][d]);
            p->cu[r][d + 1] = at;
        }
        row->docs = d;
        row->cu_seqlens = p->cu[r];
        /* one more: some tests cut a row of one document into three */
        for (d = 0; d < 15; d++) p->source[r][d] = number += 1 + (d + r) % 3;
        row->doc_source = p->source[r];
        p->tokens += lengths[r];
    }
    for (r = 0; r < heads; r++) p->sinks[r] = (double)(float)test_normal();
    p->q = random_values(p->tokens * heads * head_dim);
    p->dout = random_values(p->tokens * heads * head_dim);
    p->k = random_values(p->tokens * kv_heads * head_dim);
    p->v = random_values(p->tokens * kv_heads * head_dim);
    return p;
}

static int same_results(const setup *a, const setup *b) {
    const problem *p = a->p;
    int64_t wide = p->tokens * p->heads * p->head_dim;
    int64_t narrow = p->tokens * p->kv_heads * p->head_dim;
    return same(a->out, b->out, wide) && same(a->lse, b->lse, p->tokens * p->heads) &&
           same(a->dq, b->dq, wide) && same(a->dk, b->dk, narrow) &&
           same(a->dv, b->dv, narrow) && same(a->dsinks, b->dsinks, dsinks_size(p));
}

/* The factor of a query and a key of a row: of its document, at its position in that. What no
   mask shows has none. */
static double dropout_factor(const setup *s, const seqpar_row *row, int64_t head, int64_t query,
                             int64_t key) {
    const seqpar_dropout from = {s->f.dropout, DROPOUT_SEED, DROPOUT_STREAM};
    int64_t d = 0, begin;
    while (row->cu_seqlens[d + 1] <= query) d++;
    begin = row->cu_seqlens[d];
    if (key < begin || key >= row->cu_seqlens[d + 1]) return 0;
    return seqpar_attn_dropout(&from, row->doc_source[d], head, query - begin, key - begin);
}

/* Dropout factors of a row for slow.h: (heads, queries, keys). */
static double *dropout_factors(const setup *s, const seqpar_row *row) {
    int64_t n = row->tokens, h, i, j;
    double *z = malloc((size_t)(s->p->heads * n * n + 1) * sizeof *z);
    for (h = 0; h < s->p->heads; h++)
        for (i = 0; i < n; i++)
            for (j = 0; j < n; j++) z[(h * n + i) * n + j] = dropout_factor(s, row, h, i, j);
    return z;
}

static void expect_near(const double *got, const double *want, int64_t count, double limit,
                        const char *what, const char *tensor) {
    double d = test_distance(got, want, count);
    test_expect(d <= limit, "%s: %s is %.2e off", what, tensor, d);
}

/* Dense attention of one row, by slow.h, and its gradients. */
typedef struct row_truth {
    uint64_t key;
    double *out, *lse, *dq, *dk, *dv, dsinks[8];
} row_truth;

static uint64_t hash_of(uint64_t h, const void *data, size_t bytes) {
    const unsigned char *byte = data;
    for (size_t i = 0; i < bytes; i++) h = (h ^ byte[i]) * UINT64_C(1099511628211);
    return h;
}

/* The hash of all that the truth of row r is computed from; z: dropout factors or NULL. */
static uint64_t truth_key(const setup *s, int64_t r, int64_t base, const bool *mask,
                          const double *z) {
    const problem *p = s->p;
    size_t n = (size_t)p->rows[r].tokens, d = (size_t)p->head_dim, heads = (size_t)p->heads;
    size_t wide = heads * d, narrow = (size_t)p->kv_heads * d, from = (size_t)base;
    const int64_t sizes[] = {p->rows[r].tokens, p->heads, p->kv_heads, p->head_dim, s->f.sinks};
    uint64_t h = hash_of(UINT64_C(1469598103934665603), sizes, sizeof sizes);
    h = hash_of(h, &s->f.scale, sizeof s->f.scale);
    h = hash_of(h, &s->f.softcap, sizeof s->f.softcap);
    h = hash_of(h, p->sinks, sizeof p->sinks);
    h = hash_of(h, mask, n * n);
    if (z) h = hash_of(h, z, heads * n * n * sizeof *z);
    h = hash_of(h, p->q + from * wide, n * wide * sizeof *p->q);
    h = hash_of(h, p->k + from * narrow, n * narrow * sizeof *p->k);
    h = hash_of(h, p->v + from * narrow, n * narrow * sizeof *p->v);
    return hash_of(h, p->dout + from * wide, n * wide * sizeof *p->dout);
}

static void truth_compute(row_truth *t, const setup *s, int64_t r, int64_t base,
                          const bool *mask, const double *z) {
    const problem *p = s->p;
    int64_t n = p->rows[r].tokens, d = p->head_dim, wide = p->heads * d,
            narrow = p->kv_heads * d;
    slow_shape shape = {n, n, p->heads, p->kv_heads, d};
    slow_extras extras = {.scale = s->f.scale,
                          .softcap = s->f.softcap,
                          .sinks = s->f.sinks ? p->sinks : NULL,
                          .dropout = z};
    free(t->out);
    t->out = malloc((size_t)(5 * n * wide + 8) * sizeof *t->out);
    t->lse = t->out + n * wide;
    t->dq = t->lse + n * wide;
    t->dk = t->dq + n * wide;
    t->dv = t->dk + n * wide;
    slow_attention_extra_real(&shape, mask, &extras, p->q + base * wide, p->k + base * narrow,
                              p->v + base * narrow, t->out, t->lse);
    slow_attention_extra_gradient(&shape, mask, &extras, p->q + base * wide,
                                  p->k + base * narrow, p->v + base * narrow,
                                  p->dout + base * wide, t->dq, t->dk, t->dv, t->dsinks);
}

/* Many setups have the same truth, which takes longer to compute than they do: the last 64 rows
   are cached. */
static const row_truth *truth_of(const setup *s, int64_t r, int64_t base) {
    static row_truth cache[64];
    static size_t next;
    const seqpar_row *row = &s->p->rows[r];
    bool *mask = malloc((size_t)(row->tokens * row->tokens));
    double *z = s->f.dropout > 0 ? dropout_factors(s, row) : NULL;
    size_t i = 0, most = sizeof cache / sizeof *cache;
    slow_mask_general(row->tokens, row->docs, row->cu_seqlens, !s->f.full, s->f.window,
                      s->f.prefix ? s->p->prefix[r] : NULL, mask);
    uint64_t key = truth_key(s, r, base, mask, z);
    while (i < most && !(cache[i].out && cache[i].key == key)) i++;
    if (i == most) {
        i = next++ % most;
        truth_compute(&cache[i], s, r, base, mask, z);
        cache[i].key = key;
    }
    free(mask);
    free(z);
    return &cache[i];
}

static void expect_truth(const setup *s, double limit, const char *what) {
    const problem *p = s->p;
    int64_t r, base = 0, d = p->head_dim, i;
    double sinks[8] = {0}, sinks_want[8] = {0};
    for (r = 0; r < p->row_count; base += p->rows[r++].tokens) {
        int64_t n = p->rows[r].tokens, wide = p->heads * d, narrow = p->kv_heads * d;
        const row_truth *t = truth_of(s, r, base);
        for (i = 0; i < p->heads; i++) sinks_want[i] += t->dsinks[i];
        for (i = 0; i < n * p->heads; i++)
            sinks[i % p->heads] += s->dsinks[dsinks_begin(p, r) + i];
        expect_near(s->out + base * wide, t->out, n * wide, limit, what, "out");
        expect_near(s->lse + base * p->heads, t->lse, n * p->heads, limit, what, "lse");
        expect_near(s->dq + base * wide, t->dq, n * wide, limit, what, "dq");
        expect_near(s->dk + base * narrow, t->dk, n * narrow, limit, what, "dk");
        expect_near(s->dv + base * narrow, t->dv, n * narrow, limit, what, "dv");
    }
    if (s->f.sinks) expect_near(sinks, sinks_want, p->heads, limit, what, "dsinks");
}

static const features features_list[] = {
    {.name = "causal"},
    {.name = "full", .full = 1},
    {.name = "window 1", .window = 1},
    {.name = "window 7", .window = 7},
    {.name = "window 1000", .window = 1000},
    {.name = "full window 5", .full = 1, .window = 5},
    {.name = "prefix", .prefix = 1},
    {.name = "prefix window 11", .prefix = 1, .window = 11},
    {.name = "softcap", .softcap = 1.5},
    {.name = "sinks", .sinks = 1},
    {.name = "dropout", .dropout = 0.3},
    {.name = "scale", .scale = -0.7},
    {.name = "everything",
     .window = 13,
     .prefix = 1,
     .sinks = 1,
     .softcap = 2.5,
     .dropout = 0.2,
     .scale = 0.9},
    {.name = "full everything",
     .full = 1,
     .window = 9,
     .sinks = 1,
     .softcap = 2.5,
     .dropout = 0.2,
     .scale = 0.9},
};

static const char *const device_names[] = {"fp32", "fp64", "bf16"}; /* of test_device */
/* Distance from the truth: of fp32 where a query sees itself alone dq is 0 and what is
   measured is rounding; of bf16 so many roundings of 2^-8 at most: results are rounded,
   backward reads a rounded out, tensor cores take rounded factors; with dropout or
   sinks a token that sees few keys has a dq that is a small difference of such numbers, and
   so has a key that few tokens see a dk. */
static double truth_limit(int device, const features *f) {
    return device == 2      ? (f->dropout > 0 || f->sinks ? 12.0 : 3.0) / 256
           : device         ? 1e-13
           : f->window == 1 ? 8e-6
                            : 3e-6;
}

enum { FEATURES = sizeof features_list / sizeof *features_list };

static const int64_t ranks_list[] = {1, 2, 3, 4, 5, 8};

/* Every grid layout and schedule at every P against P = 1. */
static void test_bits(int reference) {
    static const int64_t lengths[] = {97, 53, 5}, cells[] = {8, 2, 2};
    problem *p = problem_new(3, lengths, cells, 6, 2, 10);
    int feature, layout, schedule;
    size_t i;
    for (feature = 0; feature < FEATURES; feature++) {
        setup one = {.p = p,
                     .reference = reference,
                     .ranks = 1,
                     .threads = 1,
                     .f = features_list[feature]};
        setup_run(&one);
        for (layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
            for (schedule = SEQPAR_SCHEDULE_RING;
                 layout_on_grid(layout) && schedule <= SEQPAR_SCHEDULE_LLAMA3; schedule++) {
                for (i = 0; i < sizeof ranks_list / sizeof *ranks_list; i++) {
                    setup s = {.p = p,
                               .reference = reference,
                               .ranks = ranks_list[i],
                               .threads = 1 + (int64_t)(i % 2),
                               .f = one.f,
                               .layout = layout,
                               .schedule = schedule,
                               .stride = 1 + (int64_t)(i % 2)};
                    char what[64];
                    setup_run(&s);
                    snprintf(what, sizeof what, "P=%lld", (long long)s.ranks);
                    expect_same_bits(&s, &one, what);
                    setup_free(&s);
                }
                test_end("attn_%s_%s_%s_%s_bits", device_names[reference], one.f.name,
                         seqpar_layout_name(layout), seqpar_schedule_name(schedule));
            }
        setup_free(&one);
    }
    problem_free(p);
}

/* Cells longer than the tiles of the fast device, so that a block is several sums; as many
   kv heads as heads, and fewer. */
static void test_long_cells(int kv_heads) {
    static const int64_t lengths[] = {1001, 31}, cells[] = {201, 5}, ranks[] = {2, 3, 5};
    problem *p = problem_new(2, lengths, cells, 2, kv_heads, 6);
    int i;
    for (i = 0; i < 3 * FEATURES; i++) {
        setup one = {.p = p, .ranks = 1, .threads = 1, .f = features_list[i / 3]}, s = one;
        s.ranks = ranks[i % 3];
        s.threads = 1 + i % 2;
        s.layout = layout_of_grid(i);
        s.schedule = SEQPAR_SCHEDULE_RING + (i / 2) % 2;
        setup_run(&one);
        setup_run(&s);
        expect_same_bits(&s, &one, one.f.name);
        setup_free(&one);
        setup_free(&s);
    }
    problem_free(p);
    test_end("attn_long_cells heads=2/%d", kv_heads);
}

/* Heads of two panels of a product and a piece of a third, and ranges of more keys than one
   of softmax's sums has. */
static void test_wide_heads(void) {
    static const int64_t lengths[] = {41}, cells[] = {20};
    problem *p = problem_new(1, lengths, cells, 2, 1, 67);
    for (int feature = 0; feature < FEATURES; feature++) {
        setup one = {.p = p, .ranks = 1, .threads = 1, .f = features_list[feature]}, s = one;
        s.ranks = 2 + feature % 2;
        s.schedule = feature % SEQPAR_SCHEDULE_COUNT;
        setup_run(&one);
        setup_run(&s);
        expect_same_bits(&s, &one, one.f.name);
        if (feature % 4 == 0) expect_truth(&one, truth_limit(0, &one.f), one.f.name);
        setup_free(&one);
        setup_free(&s);
    }
    problem_free(p);
    test_end("attn_wide_heads");
}

/* ---- packed = alone ---- */

static double *slice(const double *x, int64_t begin, int64_t end, int64_t width) {
    double *y = malloc((size_t)((end - begin) * width + 1) * sizeof *y);
    memcpy(y, x + begin * width, (size_t)((end - begin) * width) * sizeof *y);
    return y;
}

/* Documents [first, end) of all rows in order, in one row. */
static problem *problem_part(const problem *p, int64_t first, int64_t end) {
    problem *part = calloc(1, sizeof *part);
    seqpar_row *row = &part->rows[0];
    int64_t n = 0, base = 0, begin = -1, wide = p->heads * p->head_dim;
    int64_t narrow = p->kv_heads * p->head_dim;
    part->heads = p->heads, part->kv_heads = p->kv_heads, part->head_dim = p->head_dim;
    part->row_count = 1;
    memcpy(part->sinks, p->sinks, sizeof part->sinks);
    for (int64_t r = 0; r < p->row_count; base += p->rows[r++].tokens)
        for (int64_t d = 0; d < p->rows[r].docs; d++, n++) {
            if (n < first || n >= end) continue;
            if (begin < 0) begin = base + p->cu[r][d];
            part->prefix[0][row->docs] = p->prefix[r][d];
            part->source[0][row->docs++] = p->source[r][d];
            part->cu[0][row->docs] = base + p->cu[r][d + 1] - begin;
        }
    row->index = first;
    row->cell = p->rows[0].cell;
    row->cu_seqlens = part->cu[0];
    row->doc_source = part->source[0];
    row->tokens = part->tokens = part->cu[0][row->docs];
    part->q = slice(p->q, begin, begin + row->tokens, wide);
    part->dout = slice(p->dout, begin, begin + row->tokens, wide);
    part->k = slice(p->k, begin, begin + row->tokens, narrow);
    part->v = slice(p->v, begin, begin + row->tokens, narrow);
    return part;
}

/* Into the results of all tokens those of a part, from token `at` on. */
static void results_put(setup *all, int64_t at, const setup *part) {
    const problem *p = part->p;
    int64_t wide = p->heads * p->head_dim, narrow = p->kv_heads * p->head_dim, n = p->tokens;
    memcpy(all->out + at * wide, part->out, (size_t)(n * wide) * sizeof(double));
    memcpy(all->dq + at * wide, part->dq, (size_t)(n * wide) * sizeof(double));
    memcpy(all->dk + at * narrow, part->dk, (size_t)(n * narrow) * sizeof(double));
    memcpy(all->dv + at * narrow, part->dv, (size_t)(n * narrow) * sizeof(double));
    memcpy(all->lse + at * p->heads, part->lse, (size_t)(n * p->heads) * sizeof(double));
    memcpy(all->dsinks + at * p->heads, part->dsinks, (size_t)(n * p->heads) * sizeof(double));
}

/* What each document alone in a row of one rank gives. */
static setup each_alone(problem *p, int reference, features f, int64_t documents) {
    setup all = {.p = p};
    int64_t at = 0;
    setup_results(&all);
    for (int64_t d = 0; d < documents; d++) {
        problem *one = problem_part(p, d, d + 1);
        setup s = {.p = one, .reference = reference, .ranks = 1, .threads = 1, .f = f};
        setup_run(&s);
        results_put(&all, at, &s);
        at += one->tokens;
        setup_free(&s);
        problem_free(one);
    }
    return all;
}

/* A document's bits are its own: alone, in one row with all others, in two rows, in rows whose
   documents nobody numbered (without dropout, which hangs on the number), over any ranks. */
static void test_packings(int reference) {
    static const int64_t lengths[] = {61, 43}, cells[] = {4, 4};
    problem *p = problem_new(2, lengths, cells, 4, 2, 6), unnumbered, *packing[3] = {p};
    int64_t documents = p->rows[0].docs + p->rows[1].docs;
    if (reference == 2) round_problem(p);
    packing[1] = problem_part(p, 0, documents);
    unnumbered = *p;
    unnumbered.rows[0].doc_source = unnumbered.rows[1].doc_source = NULL;
    packing[2] = &unnumbered;
    for (int i = 0; i < 6 * FEATURES; i++) {
        features f = features_list[i / 6];
        setup alone, s = {.p = packing[i % 3],
                          .reference = reference,
                          .ranks = ranks_list[(i / 3 + i) % 5],
                          .threads = 1,
                          .layout = layout_of_grid(i / 2),
                          .schedule = SEQPAR_SCHEDULE_RING + i / 3 % 2,
                          .f = f};
        if (i % 3 == 2) s.f.dropout = f.dropout = 0;
        alone = each_alone(p, reference, f, documents);
        setup_run(&s);
        s.p = p; /* the same tokens, one row or two */
        expect_same_bits(&s, &alone, f.name);
        setup_free(&s);
        setup_free(&alone);
        if (i % 6 == 5) test_end("attn_%s_%s_packings", device_names[reference], f.name);
    }
    problem_free(packing[1]);
    problem_free(p);
}

/* One row of `tokens` tokens; bit t - 1 of `cuts`: a document begins at token t. */
static problem *problem_cut(int64_t tokens, int cuts, int64_t cell) {
    problem *p = problem_new(1, &tokens, &cell, 2, 1, 4);
    int64_t docs = 0, t;
    for (t = 1; t < tokens; t++)
        if (cuts >> (t - 1) & 1) p->cu[0][++docs] = t;
    p->cu[0][++docs] = tokens;
    p->rows[0].docs = docs;
    for (t = 0; t < docs; t++) p->prefix[0][t] = (p->cu[0][t + 1] - p->cu[0][t]) * (t % 3) / 2;
    return p;
}

static double results_distance(const setup *a, const setup *b) {
    const problem *p = a->p;
    int64_t wide = p->tokens * p->heads * p->head_dim;
    int64_t narrow = p->tokens * p->kv_heads * p->head_dim;
    const double each[] = {
        test_distance(a->out, b->out, wide), test_distance(a->dq, b->dq, wide),
        test_distance(a->dk, b->dk, narrow), test_distance(a->dv, b->dv, narrow)};
    double most = 0;
    for (int i = 0; i < 4; i++)
        if (most == most && !(each[i] <= most)) most = each[i]; /* a NaN stays */
    return most;
}

/* Small rows, for whose ways to be dealt all are tried: every layout and schedule on 1 to 5 ranks
   against each document alone. A layout that cuts cells is to be near: 1.2e-7 is half a unit, and
   no sum here has more than 9 terms. */
static int64_t try_small_row(problem *p, int reference, features f, double *worst) {
    setup alone = each_alone(p, reference, f, p->rows[0].docs);
    int64_t cases = 0;
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int schedule = 0; schedule < SEQPAR_SCHEDULE_COUNT; schedule++)
            for (int64_t ranks = 1; ranks <= 5; ranks++, cases++) {
                setup s = {.p = p,
                           .reference = reference,
                           .ranks = ranks,
                           .threads = 1,
                           .layout = layout,
                           .schedule = schedule,
                           .f = f};
                setup_run(&s);
                if (layout_on_grid(layout))
                    expect_same_bits(&s, &alone, f.name);
                else if (*worst == *worst && !(results_distance(&s, &alone) <= *worst))
                    *worst = results_distance(&s, &alone);
                setup_free(&s);
            }
    setup_free(&alone);
    return cases;
}

/* Every row of up to 9 tokens, cut into documents in every way, in cells of 1, 2 and 3 tokens,
   with every mask; without TEST_ALL a sample. */
static void test_every_small_row(void) {
    int64_t rows = 0, cases = 0;
    double worst = 0;
    for (int64_t tokens = 1; tokens <= 9; tokens++)
        for (int cuts = 0; cuts < 1 << (tokens - 1); cuts++)
            for (int i = 0; i < 3 * FEATURES; i++) {
                if (rows++ % 307 && !getenv("TEST_ALL")) continue;
                problem *p = problem_cut(tokens, cuts, 1 + i % 3);
                cases += try_small_row(p, (int)(rows / 42 % 2), features_list[i / 3], &worst);
                problem_free(p);
            }
    /* 3.7e-6 is the worst of all 1,287,720 cases; fault 10 (outputs averaged) is 0.86 off */
    test_expect(worst <= 8e-6, "a layout that cuts cells is off by %.1e", worst);
    test_end("attn_every_small_row");
    printf("#   %lld cases of %lld; layouts that cut cells are off by %.1e at most\n",
           (long long)cases,
           (long long)(rows * 5 * SEQPAR_LAYOUT_COUNT * SEQPAR_SCHEDULE_COUNT), worst);
}

/* Whether -1e-60 added to 0 gives -0 here: a product that is rounded before it is added
   gives 0, and no sum is -0. */
static int fused(void) {
#ifdef TEST_CUDA /* linked with the library, whose vectors it does not see */
    return 1;
#else
    float lanes[SEQPAR__VL];
    seqpar__vstore(lanes, seqpar__vfma(seqpar__vsplat(-1e-30f), seqpar__vsplat(1e-30f),
                                       seqpar__vsplat(0.0f)));
    return signbit(lanes[0]) != 0;
#endif
}

/* Numbers so small that products vanish: sums of -0, which the zeros of a block that nothing
   is seen of make 0. */
static void test_vanishing(double dout) {
    static const int64_t lengths[] = {301, 31}, cells[] = {61, 5}, ranks[] = {2, 3, 5};
    problem *p = problem_new(2, lengths, cells, 2, 2, 6);
    int64_t n, minus = 0, count = p->tokens * p->heads * p->head_dim;
    int i;
    for (n = 0; n < count; n++) {
        p->q[n] *= 1e-30;
        p->k[n] *= 1e-30;
        p->dout[n] *= dout;
    }
    for (i = 0; i < 3 * FEATURES; i++) {
        setup one = {.p = p, .ranks = 1, .threads = 1, .f = features_list[i / 3]}, s = one;
        s.ranks = ranks[i % 3];
        s.layout = layout_of_grid(i);
        s.schedule = SEQPAR_SCHEDULE_RING + (i / 2) % 2;
        setup_run(&one);
        setup_run(&s);
        expect_same_bits(&s, &one, one.f.name);
        for (n = 0; n < count; n++)
            minus += (one.dk[n] == 0 && signbit(one.dk[n])) ||
                     (one.dv[n] == 0 && signbit(one.dv[n]));
        setup_free(&one);
        setup_free(&s);
    }
    test_expect((minus > 0) == fused(), "%lld sums are -0", (long long)minus);
    problem_free(p);
    test_end("attn_vanishing dout=%g", dout);
}

static void test_truth(int reference) {
    static const int64_t lengths[] = {29, 17}, cells[] = {5, 6};
    problem *p = problem_new(2, lengths, cells, 3, 3, 5),
            *g = problem_new(2, lengths, cells, 6, 2, 4);
    int layout, schedule, feature;
    int64_t ranks;
    for (layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (schedule = 0; schedule < SEQPAR_SCHEDULE_COUNT; schedule++)
            for (feature = 0; feature < FEATURES; feature++) {
                for (ranks = 1 + (layout + schedule + feature) % 2; ranks <= 4;
                     ranks += 1 + (feature > 1)) {
                    setup s = {.p = ranks % 3 ? g : p,
                               .reference = reference,
                               .ranks = ranks,
                               .threads = 1,
                               .layout = layout,
                               .schedule = schedule,
                               .f = features_list[feature]};
                    setup_run(&s);
                    expect_truth(&s, truth_limit(reference, &s.f), "against slow.h");
                    setup_free(&s);
                }
                test_end("attn_%s_%s_%s_%s_truth", device_names[reference],
                         features_list[feature].name, seqpar_layout_name(layout),
                         seqpar_schedule_name(schedule));
            }
    problem_free(p);
    problem_free(g);
}

/* Ulysses and 2D by name: members of any number that divides P, uneven shares of heads, ring
   or all-gather between. */
typedef struct grid {
    int64_t heads, kv_heads, ranks, ulysses;
    int schedule, replicate;
} grid;

static const grid grids[] = {
    {5, 5, 2, 2, SEQPAR_SCHEDULE_RING, 0},    {7, 7, 3, 3, SEQPAR_SCHEDULE_RING, 0},
    {8, 4, 4, 2, SEQPAR_SCHEDULE_RING, 0},    {8, 4, 8, 4, SEQPAR_SCHEDULE_RING, 0},
    {6, 3, 4, 2, SEQPAR_SCHEDULE_LLAMA3, 0},  {6, 3, 6, 3, SEQPAR_SCHEDULE_LLAMA3, 0},
    {8, 8, 8, 8, SEQPAR_SCHEDULE_RING, 0},    {6, 3, 8, 2, SEQPAR_SCHEDULE_RING, 0},
    {8, 2, 4, 0, SEQPAR_SCHEDULE_ULYSSES, 0}, {6, 6, 5, 0, SEQPAR_SCHEDULE_ULYSSES, 0},
    {4, 2, 4, 4, SEQPAR_SCHEDULE_RING, 1},    {8, 2, 8, 4, SEQPAR_SCHEDULE_RING, 1},
    {8, 1, 8, 0, SEQPAR_SCHEDULE_ULYSSES, 1}, {4, 1, 8, 4, SEQPAR_SCHEDULE_LLAMA3, 1},
};

static void test_grids(int reference) {
    static const int64_t lengths[] = {61, 19, 1}, cells[] = {4, 4, 1};
    size_t g;
    int64_t n = 0;
    for (g = 0; g < sizeof grids / sizeof *grids; g++) {
        const grid *x = &grids[g];
        problem *p = problem_new(3, lengths, cells, x->heads, x->kv_heads, 6);
        int layout;
        if (reference == 2) round_problem(p);
        for (layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
            features f = features_list[n++ % FEATURES];
            setup s = {.p = p,
                       .reference = reference,
                       .ranks = x->ranks,
                       .threads = 1 + layout % 2,
                       .layout = layout,
                       .schedule = x->schedule,
                       .ulysses = x->ulysses,
                       .replicate = x->replicate,
                       .f = f};
            setup one = {.p = p, .reference = reference, .ranks = 1, .threads = 1, .f = f};
            setup_run(&s);
            setup_run(&one);
            if (layout_on_grid(layout) && !x->replicate) expect_same_bits(&s, &one, f.name);
            expect_truth(&s, truth_limit(reference, &f), f.name);
            setup_free(&s);
            setup_free(&one);
        }
        problem_free(p);
        test_end("attn_%s_grid P=%lld ulysses=%lld heads=%lld/%lld %s%s",
                 device_names[reference], (long long)x->ranks, (long long)x->ulysses,
                 (long long)x->heads, (long long)x->kv_heads, seqpar_schedule_name(x->schedule),
                 x->replicate ? " replicated" : "");
    }
}

/* Stripe: of neighbouring cells a rank has no two tokens in a row, so what it folds piles
   up, deeper than a tree of them. */
static void test_many_cells(int reference) {
    static const int64_t lengths[] = {207}, cells[] = {3};
    problem *p = problem_new(1, lengths, cells, 1, 1, 2);
    setup s = {.p = p,
               .reference = reference,
               .ranks = 3,
               .threads = 2,
               .layout = SEQPAR_LAYOUT_STRIPE,
               .schedule = SEQPAR_SCHEDULE_RING,
               .f = features_list[0]};
    p->rows[0].docs = 1; /* every query sees the first key */
    p->cu[0][1] = lengths[0];
    setup_run(&s);
    expect_truth(&s, truth_limit(reference, &s.f), "against slow.h");
    setup_free(&s);
    problem_free(p);
    test_end("attn_%s_many_cells", device_names[reference]);
}

/* Equal scores and one-hot values: out lists, for every query, exactly the keys it sees. */
static void test_probe(int layout, int schedule) {
    static const int64_t lengths[] = {23}, cells[] = {4};
    problem *p = problem_new(1, lengths, cells, 1, 1, 23);
    int feature;
    int64_t i, j;
    memset(p->q, 0, (size_t)(p->tokens * 23) * sizeof *p->q);
    for (i = 0; i < 23; i++)
        for (j = 0; j < 23; j++) p->v[i * 23 + j] = i == j;
    for (feature = 0; feature < FEATURES; feature++) {
        setup s = {.p = p,
                   .ranks = 3 + feature % 3,
                   .threads = 1,
                   .layout = layout,
                   .schedule = schedule,
                   .f = features_list[feature]};
        bool mask[23 * 23];
        setup_run(&s);
        slow_mask_general(23, p->rows[0].docs, p->rows[0].cu_seqlens, !s.f.full, s.f.window,
                          s.f.prefix ? p->prefix[0] : NULL, mask);
        for (i = 0; i < 23 * 23; i++) {
            bool seen = mask[i] && dropout_factor(&s, &p->rows[0], 0, i / 23, i % 23) > 0;
            test_expect((s.out[i] > 0) == seen && s.out[i] >= 0,
                        "%s, P=%lld: query %lld %s key %lld", s.f.name, (long long)s.ranks,
                        (long long)i / 23, seen ? "misses" : "sees", (long long)i % 23);
        }
        setup_free(&s);
    }
    problem_free(p);
    test_end("attn_mask_probe_%s_%s", seqpar_layout_name(layout),
             seqpar_schedule_name(schedule));
}

/* T01: scores of neighbouring cells far apart, so that one side of a merge vanishes or both
   are alike. */
static void test_gaps(int reference) {
    static const int64_t lengths[] = {31}, cells[] = {4};
    static const double gaps[] = {0, 20, 90, 1e4};
    size_t g;
    int64_t i;
    for (g = 0; g < sizeof gaps / sizeof *gaps; g++) {
        problem *p = problem_new(1, lengths, cells, 2, 1, 6);
        setup s = {.p = p,
                   .reference = reference,
                   .ranks = 3,
                   .threads = 1,
                   .layout = SEQPAR_LAYOUT_ZIGZAG,
                   .f = {.full = 1}};
        p->rows[0].docs = 1;
        p->cu[0][1] = 31;
        /* a whole cell up, the next down */
        for (i = 0; i < 31; i++) p->k[i * 6] = (i / 4 % 2 ? 1.0 : -1.0) * gaps[g];
        for (i = 0; i < 31 * 2; i++) p->q[i * 6] = (double)(float)(i % 3 - 1);
        setup_run(&s);
        /* a score of size g is rounded by g eps, and so is the logarithm of every weight */
        expect_truth(&s, reference ? 1e-13 + gaps[g] * 1e-15 : 2e-6 + gaps[g] * 1e-7,
                     "against slow.h");
        setup_free(&s);
        problem_free(p);
    }
    test_end("attn_%s_merge_gaps", device_names[reference]);
}

/* T07: every length from 1 to 4P+1, so that ranks are empty, cells hold one token, and
   nothing divides. */
static void test_lengths(int64_t ranks) {
    int64_t length, cell;
    int layout;
    for (length = 1; length <= 4 * ranks + 1; length++)
        for (layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
            problem *p;
            setup s, one;
            cell = length % 3 ? 1 : (length + 2 * ranks - 1) / (2 * ranks);
            p = problem_new(1, &length, &cell, 2, 1, 4);
            if (length % 2) p->rows[0].doc_source = NULL;
            memset(&s, 0, sizeof s);
            s.p = p;
            s.ranks = 1;
            s.threads = 1;
            one = s;
            s.ranks = ranks;
            s.layout = layout;
            s.schedule = (int)(length % 2);
            setup_run(&one);
            setup_run(&s);
            if (layout_on_grid(layout)) expect_same_bits(&s, &one, "length sweep");
            setup_free(&s);
            s.reference = 1;
            setup_run(&s);
            expect_truth(&s, 1e-13, "against slow.h");
            setup_free(&s);
            setup_free(&one);
            problem_free(p);
        }
    test_end("attn_lengths_1_to_%lld P=%lld", (long long)(4 * ranks + 1), (long long)ranks);
}

/* ---- the user's own block kernel ---- */

typedef struct own_kernel {
    int storage, harm;
} own_kernel;

enum { NO_HARM, NAN_LSE, INFINITE_OUT, FAILS, LSE_OF_NOTHING, NAN_DQ, FAILS_BACKWARD };

static double element(const own_kernel *own, const void *x, int64_t i) {
    return own->storage == SEQPAR_DTYPE_F64 ? ((const double *)x)[i]
           : own->storage == SEQPAR_DTYPE_F32
               ? (double)((const float *)x)[i]
               : (double)seqpar_bf16_to_float(((const uint16_t *)x)[i]);
}

static void element_set(const own_kernel *own, void *x, int64_t i, double value) {
    if (own->storage == SEQPAR_DTYPE_F64)
        ((double *)x)[i] = value;
    else if (own->storage == SEQPAR_DTYPE_F32)
        ((float *)x)[i] = (float)value;
    else
        ((uint16_t *)x)[i] = seqpar_bf16_from_float((float)value);
}

static double own_score(const own_kernel *own, const seqpar_block *b, int64_t r, int64_t n) {
    double s = 0;
    int64_t i;
    for (i = 0; i < b->head_dim; i++)
        s += element(own, b->q, r * b->head_dim + i) * element(own, b->k, n * b->head_dim + i);
    s *= b->scale;
    return b->softcap > 0 ? b->softcap * tanh(s / b->softcap) : s;
}

static int own_forward(void *user, const seqpar_block *b, void *out, double *lse) {
    const own_kernel *own = user;
    int64_t r, n, i, d = b->head_dim;
    for (r = 0; r < b->queries; r++) {
        double total = 0, row[64] = {0};
        for (n = b->visible_begin[r]; n < b->visible_end[r]; n++) {
            double p = exp(own_score(own, b, r, n));
            total += p;
            for (i = 0; i < d; i++) row[i] += p * element(own, b->v, n * d + i);
        }
        for (i = 0; i < d; i++)
            element_set(own, out, r * d + i, total > 0 ? row[i] / total : 0);
        lse[r] = own->harm == LSE_OF_NOTHING || total > 0
                     ? log(total + (own->harm == LSE_OF_NOTHING))
                     : -HUGE_VAL;
    }
    if (own->harm == NAN_LSE) lse[b->queries - 1] = NAN;
    if (own->harm == INFINITE_OUT) element_set(own, out, 0, HUGE_VAL);
    return own->harm == FAILS;
}

static int own_backward(void *user, const seqpar_block *b, void *dq, void *dk, void *dv) {
    const own_kernel *own = user;
    int64_t r, n, i, d = b->head_dim;
    double *sum = calloc((size_t)((b->queries + 2 * b->keys) * d), sizeof *sum);
    double *sk = sum + b->queries * d, *sv = sk + b->keys * d;
    for (r = 0; r < b->queries; r++)
        for (n = b->visible_begin[r]; n < b->visible_end[r]; n++) {
            double s = own_score(own, b, r, n), p = exp(s - b->lse[r]), dp = 0, ds;
            for (i = 0; i < d; i++)
                dp += element(own, b->dout, r * d + i) * element(own, b->v, n * d + i);
            ds = p * (dp - b->delta[r]) * b->scale *
                 (b->softcap > 0 ? 1 - s / b->softcap * (s / b->softcap) : 1);
            for (i = 0; i < d; i++) {
                sum[r * d + i] += ds * element(own, b->k, n * d + i);
                sk[n * d + i] += ds * element(own, b->q, r * d + i);
                sv[n * d + i] += p * element(own, b->dout, r * d + i);
            }
        }
    for (i = 0; dq && i < b->queries * d; i++)
        element_set(own, dq, i, own->harm == NAN_DQ ? NAN : sum[i]);
    for (i = 0; dk && i < b->keys * d; i++) {
        element_set(own, dk, i, sk[i]);
        element_set(own, dv, i, sv[i]);
    }
    free(sum);
    return own->harm == FAILS_BACKWARD;
}

/* Every mask but dropout, every schedule; what the storage type rounds is all that may be
   lost. */
static void test_own_kernel(int storage, double limit) {
    static const int64_t lengths[] = {37, 11}, cells[] = {5, 4};
    problem *p = problem_new(2, lengths, cells, 4, 2, 6);
    own_kernel own = {storage, NO_HARM};
    seqpar_block_kernel kernel = {storage, own_forward, own_backward, &own};
    int feature, schedule;
    for (feature = 0; feature < FEATURES; feature++) {
        schedule = feature % SEQPAR_SCHEDULE_COUNT;
        setup s = {.p = p,
                   .reference = storage == SEQPAR_DTYPE_F64,
                   .ranks = 1 + feature % 4,
                   .threads = 2,
                   .layout = feature % SEQPAR_LAYOUT_COUNT,
                   .schedule = schedule,
                   .f = features_list[feature],
                   .own = &kernel,
                   .relaxed = feature / 4 % 2};
        if (s.f.dropout > 0) continue;
        setup_run(&s);
        expect_truth(&s, limit * (s.f.window == 1 ? 30 : 1), s.f.name);
        setup_free(&s);
    }
    problem_free(p);
    test_end("attn_own_kernel_%s", storage == SEQPAR_DTYPE_F64   ? "fp64"
                                   : storage == SEQPAR_DTYPE_F32 ? "fp32"
                                                                 : "bf16");
}

/* T03: blocks rounded to bf16 are the same blocks on any number of ranks, so the error does
   not grow with P; and many blocks are hardly worse than one for the whole row. */
static void test_error_slope(void) {
    static const int64_t lengths[] = {163}, many[] = {32}, one[] = {1};
    static const int64_t ranks[] = {1, 2, 3, 4, 5, 8, 16};
    uint64_t state = test_state;
    problem *p = problem_new(1, lengths, many, 4, 2, 16), *whole;
    own_kernel own = {SEQPAR_DTYPE_BF16, NO_HARM};
    seqpar_block_kernel kernel = {SEQPAR_DTYPE_BF16, own_forward, own_backward, &own};
    setup truth = {.p = p, .reference = 1, .ranks = 1, .threads = 1},
          first = {.p = p, .ranks = 1, .threads = 1, .own = &kernel}, single = first;
    int64_t wide = p->tokens * 4 * 16;
    double error[2][4];
    size_t i;
    test_state = state; /* the same numbers */
    single.p = whole = problem_new(1, lengths, one, 4, 2, 16);
    setup_run(&truth);
    setup_run(&first);
    setup_run(&single);
    for (i = 0; i < sizeof ranks / sizeof *ranks; i++) {
        setup s = {.p = p,
                   .ranks = ranks[i],
                   .threads = 1,
                   .layout = SEQPAR_LAYOUT_ZIGZAG,
                   .schedule = (int)(i % SEQPAR_SCHEDULE_COUNT),
                   .own = &kernel};
        setup_run(&s);
        expect_same_bits(&s, &first, "bf16 blocks");
        setup_free(&s);
    }
    for (i = 0; i < 2; i++) {
        const setup *s = i ? &single : &first;
        error[i][0] = test_distance(s->out, truth.out, wide);
        error[i][1] = test_distance(s->dq, truth.dq, wide);
        error[i][2] = test_distance(s->dk, truth.dk, wide / 2);
        error[i][3] = test_distance(s->dv, truth.dv, wide / 2);
    }
    for (i = 0; i < 4; i++)
        test_expect(error[0][i] <= 1.5 * error[1][i] && error[1][i] > 1e-4,
                    "tensor %d: 32 blocks are %.2e off, one block %.2e", (int)i, error[0][i],
                    error[1][i]);
    setup_free(&truth);
    setup_free(&first);
    setup_free(&single);
    problem_free(p);
    problem_free(whole);
    test_end(
        "attn_error_slope_bf16: out %.1e in 32 blocks, %.1e in one, on any number of ranks",
        error[0][0], error[1][0]);
}

/* A kernel that misbehaves is named, on every rank, and the run ends. */
static void test_own_kernel_refused(void) {
    static const struct {
        int harm;
        const char *words;
    } cases[] = {{NAN_LSE, "lse that is not finite"},
                 {INFINITE_OUT, "out that is not finite"},
                 {FAILS, "fails"},
                 {LSE_OF_NOTHING, "a query without keys"},
                 {NAN_DQ, "dq that is not finite"},
                 {FAILS_BACKWARD, "fails backward"}};
    static const int64_t lengths[] = {24}, cells[] = {4};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        problem *p = problem_new(1, lengths, cells, 2, 1, 4);
        own_kernel own = {SEQPAR_DTYPE_F32, cases[i].harm};
        seqpar_block_kernel kernel = {SEQPAR_DTYPE_F32, own_forward, own_backward, &own};
        setup s = {.p = p,
                   .ranks = 3,
                   .threads = 1,
                   .layout = SEQPAR_LAYOUT_ZIGZAG,
                   .own = &kernel,
                   .f = {.window = 3}};
        seqpar_error error;
        setup_results(&s);
        s.status = seqpar_run_threads(s.ranks, rank_main, &s, &error);
        test_expect(s.status == SEQPAR_ERR_KERNEL && strstr(error.text, cases[i].words),
                    "%s: %s", seqpar_status_name(s.status), error.text);
        setup_free(&s);
        problem_free(p);
    }
    test_end("attn_own_kernel_refused");
}

/* What cannot work is refused on every rank before anything is sent. */
static void test_refused(void) {
    static const struct {
        features f;
        int64_t heads, kv_heads, ulysses, prefix;
        seqpar_status status;
        const char *words;
    } cases[] = {{{.window = -1}, 2, 1, 0, 0, SEQPAR_ERR_MASK, "window is -1"},
                 {{.softcap = -2}, 2, 1, 0, 0, SEQPAR_ERR_MASK, "softcap is -2"},
                 {{.softcap = NAN}, 2, 1, 0, 0, SEQPAR_ERR_MASK, "softcap is nan"},
                 {{.dropout = 1}, 2, 1, 0, 0, SEQPAR_ERR_MASK, "dropout is 1"},
                 {{.dropout = NAN}, 2, 1, 0, 0, SEQPAR_ERR_MASK, "dropout is nan"},
                 {{.scale = HUGE_VAL}, 2, 1, 0, 0, SEQPAR_ERR_MASK, "scale is inf"},
                 {{.prefix = 1}, 2, 1, 0, 99, SEQPAR_ERR_MASK, "prefix of 99"},
                 {{.prefix = 1}, 2, 1, 0, -1, SEQPAR_ERR_MASK, "prefix of -1"},
                 {{.name = ""}, 3, 2, 0, 0, SEQPAR_ERR_HEADS, "3 heads over 2 kv_heads"},
                 {{.name = ""}, 4, 2, 3, 0, SEQPAR_ERR_ULYSSES, "ulysses_size 3"},
                 {{.name = ""}, 4, 1, 2, 0, SEQPAR_ERR_ULYSSES, "more than the 1 kv_heads"}};
    static const int64_t lengths[] = {24}, cells[] = {4};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        problem *p = problem_new(1, lengths, cells, 4, 2, 4);
        setup s = {.p = p,
                   .ranks = 4,
                   .threads = 1,
                   .layout = SEQPAR_LAYOUT_ZIGZAG,
                   .ulysses = cases[i].ulysses,
                   .f = cases[i].f};
        seqpar_error error;
        p->heads = cases[i].heads;
        p->kv_heads = cases[i].kv_heads;
        p->prefix[0][0] = cases[i].prefix;
        p->rows[0].prefix_lens = s.f.prefix ? p->prefix[0] : NULL;
        setup_results(&s);
        s.status = seqpar_run_threads(s.ranks, rank_main, &s, &error);
        test_expect(s.status == cases[i].status && strstr(error.text, cases[i].words), "%s: %s",
                    seqpar_status_name(s.status), error.text);
        setup_free(&s);
        problem_free(p);
    }
    test_end("attn_refused");
}

/* T07: a document of every length from 0 to 2P+1 between two others. */
static void test_document_lengths(int64_t ranks) {
    int64_t n, cell;
    for (n = 0; n <= 2 * ranks + 1; n++) {
        int64_t length = 3 + n + 5;
        problem *p;
        int layout;
        cell = n % 2 ? 1 : (length + 3) / 4;
        p = problem_new(1, &length, &cell, 4, 2, 4);
        p->rows[0].docs = 3;
        p->cu[0][1] = 3;
        p->cu[0][2] = 3 + n;
        p->cu[0][3] = length;
        for (layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
            setup s = {.p = p,
                       .reference = 1,
                       .ranks = ranks,
                       .threads = 1,
                       .layout = layout,
                       .schedule = (int)(n % SEQPAR_SCHEDULE_COUNT)};
            setup_run(&s);
            expect_truth(&s, 1e-13, "against slow.h");
            setup_free(&s);
        }
        problem_free(p);
    }
    test_end("attn_document_lengths_0_to_%lld P=%lld", (long long)(2 * ranks + 1),
             (long long)ranks);
}

/* T10: whatever numbers are in one document, not a bit of another changes, forward or
   backward. (A NaN is no number: within a tile 0 times NaN is NaN, and a NaN ends the run
   anyway.) */
static void test_isolation(int layout) {
    static const int64_t lengths[] = {59}, cells[] = {4};
    int64_t schedule, i, heads = 4, d = 6;
    for (schedule = 0; schedule < SEQPAR_SCHEDULE_COUNT + 1; schedule++) {
        problem *p = problem_new(1, lengths, cells, heads, 4, d);
        setup before = {.p = p,
                        .ranks = 4,
                        .threads = 1,
                        .layout = layout,
                        .schedule = (int)(schedule % SEQPAR_SCHEDULE_COUNT),
                        .ulysses = schedule == SEQPAR_SCHEDULE_COUNT ? 2 : 0},
              after = before;
        int64_t begin = 17, end = 40, wide = heads * d;
        p->rows[0].docs = 3;
        p->cu[0][1] = begin;
        p->cu[0][2] = end;
        p->cu[0][3] = 59;
        setup_run(&before);
        for (i = begin * wide; i < end * wide; i++)
            p->q[i] = p->k[i] = p->v[i] = p->dout[i] = (double)(float)(1e3 * test_normal());
        setup_run(&after);
        for (i = 0; i < 2; i++) { /* the document before and the one behind */
            int64_t from = i ? end : 0, n = i ? 59 - end : begin;
            test_expect(same(before.out + from * wide, after.out + from * wide, n * wide) &&
                            same(before.dq + from * wide, after.dq + from * wide, n * wide) &&
                            same(before.dk + from * wide, after.dk + from * wide, n * wide) &&
                            same(before.dv + from * wide, after.dv + from * wide, n * wide),
                        "document %d changes with its neighbour", i ? 2 : 0);
        }
        test_expect(
            !same(before.out + begin * wide, after.out + begin * wide, (end - begin) * wide),
            "nothing was changed");
        setup_free(&before);
        setup_free(&after);
        problem_free(p);
    }
    test_end("attn_isolation_%s", seqpar_layout_name(layout));
}

/* ---- every combination has the bits of one rank ---- */

enum { MODES = 5, ARRIVALS = 3 };
static const int64_t product_ranks[] = {1, 2, 3, 4, 5, 8, 16};
enum {
    PRODUCT_RANKS = sizeof product_ranks / sizeof *product_ranks,
    PRODUCT = MODES * FEATURES * PRODUCT_RANKS * 2 * ARRIVALS /* of one layout */
};

static int64_t product_feature(int64_t n) { return n / layouts_on_grid() / MODES % FEATURES; }

/* Combination number n, 0 <= n < PRODUCT layouts_on_grid(). Four kv heads: Ulysses groups of
   2 (2D), or as large as gcd(P, 4). */
static setup product_way(problem *p, int64_t n, const seqpar_inject_desc *arrival) {
    static const int schedules[MODES] = {SEQPAR_SCHEDULE_RING, SEQPAR_SCHEDULE_LLAMA3,
                                         SEQPAR_SCHEDULE_ULYSSES, SEQPAR_SCHEDULE_RING,
                                         SEQPAR_SCHEDULE_LLAMA3};
    setup s = {.p = p};
    int64_t k = n / layouts_on_grid(), mode = k % MODES, which;
    s.layout = layout_of_grid(n);
    s.f = features_list[product_feature(n)];
    s.ranks = product_ranks[k / (MODES * FEATURES) % PRODUCT_RANKS];
    s.threads = 1 + k / (MODES * FEATURES * PRODUCT_RANKS) % 2;
    which = k / (2 * MODES * FEATURES * PRODUCT_RANKS);
    s.inject = which ? &arrival[which - 1] : NULL;
    s.schedule = schedules[mode];
    s.ulysses = mode > 2 && s.ranks % 2 == 0 ? 2 : 0;
    s.stride = s.schedule == SEQPAR_SCHEDULE_LLAMA3 ? 1 + k / MODES % 2 : 1;
    return s;
}

/* A part of the product that grows to all of it with TEST_ALL (make check-all). */
static void test_product(void) {
    static const int64_t lengths[] = {71, 26}, cells[] = {4, 1};
    static const seqpar_inject_desc arrival[] = {{.seed = 3, .reorder = 1},
                                                 {.seed = 4, .reorder = 1, .delay_us_max = 40}};
    problem *p = problem_new(2, lengths, cells, 8, 4, 6);
    setup one[FEATURES];
    int64_t n, runs = 0, step = getenv("TEST_ALL") ? 1 : 11;
    int64_t all = PRODUCT * layouts_on_grid();
    int i;
    for (i = 0; i < FEATURES; i++) {
        one[i] = (setup){.p = p, .ranks = 1, .threads = 1, .f = features_list[i]};
        setup_run(&one[i]);
    }
    for (n = test_integer(0, step - 1); n < all; n += step, runs++) {
        setup s = product_way(p, n, arrival);
        char what[160];
        setup_run(&s);
        snprintf(what, sizeof what, "%s %s U=%lld P=%lld %s threads=%lld arrival=%d",
                 seqpar_layout_name(s.layout), seqpar_schedule_name(s.schedule),
                 (long long)s.ulysses, (long long)s.ranks, s.f.name, (long long)s.threads,
                 s.inject ? (int)(s.inject - arrival) + 1 : 0);
        expect_same_bits(&s, &one[product_feature(n)], what);
        setup_free(&s);
    }
    for (i = 0; i < FEATURES; i++) setup_free(&one[i]);
    problem_free(p);
    test_end("attn_product: %lld of %lld combinations", (long long)runs, (long long)all);
}

/* 20 repeats under delays and another order of messages each time; the first call and all
   later ones are alike. */
static void test_arrival(int schedule, int64_t ulysses) {
    static const int64_t lengths[] = {67}, cells[] = {5};
    problem *p = problem_new(1, lengths, cells, 4, 4, 8);
    setup one = {.p = p, .ranks = 1, .threads = 1};
    uint64_t repeat;
    setup_run(&one);
    for (repeat = 0; repeat < 20; repeat++) {
        seqpar_inject_desc late = {.seed = repeat, .reorder = 1, .delay_us_max = 200};
        setup s = {.p = p,
                   .ranks = 4,
                   .threads = 1,
                   .layout = SEQPAR_LAYOUT_ZIGZAG,
                   .schedule = schedule,
                   .ulysses = ulysses,
                   .inject = &late};
        setup_run(&s);
        expect_same_bits(&s, &one, "late and out of order");
        setup_free(&s);
    }
    setup_free(&one);
    problem_free(p);
    test_end("attn_arrival_%s U=%lld: 20 repeats", seqpar_schedule_name(schedule),
             (long long)ulysses);
}

/* ---- one projection holds q, k and v ---- */

static void test_packed(int device) {
    static const int64_t lengths[] = {61, 7}, cells[] = {7, 3}, ranks[] = {1, 3, 4};
    problem *p = problem_new(2, lengths, cells, 4, 2, 6);
    setup one = {.p = p, .reference = device, .ranks = 1, .threads = 1};
    setup_run(&one);
    for (int i = 0; i < 9; i++) {
        setup s = {.p = p,
                   .reference = device,
                   .ranks = ranks[i % 3],
                   .threads = 1,
                   .layout = layout_of_grid(i),
                   .schedule = i / 3,
                   .packed = 1};
        setup_run(&s);
        expect_same_bits(&s, &one, "packed");
        setup_free(&s);
    }
    setup_free(&one);
    setup s = {.p = p, .reference = device, .ranks = 3, .threads = 1, .packed = 2};
    seqpar_error error;
    setup_results(&s);
    s.status = seqpar_run_threads(s.ranks, rank_main, &s, &error);
    test_expect(s.status == SEQPAR_ERR_SIZE && strstr(error.text, "dk_stride is 11"), "%s: %s",
                seqpar_status_name(s.status), error.text);
    setup_free(&s);
    problem_free(p);
    test_end("attn_packed_%s_bits", device_names[device]);
}

/* ---- whole tensors in one call ---- */

static float *narrowed(const double *x, int64_t count) {
    float *y = malloc((size_t)count * sizeof *y);
    for (int64_t i = 0; i < count; i++) y[i] = (float)x[i];
    return y;
}

static int same_floats(const float *a, const double *b, int64_t count) {
    float *want = narrowed(b, count);
    int same = !memcmp(a, want, (size_t)count * sizeof *a);
    free(want);
    return same;
}

/* All results are those of ranks that make the calls themselves; what is not wanted stays. */
static void in_one_call(const setup *one, seqpar_attn_io io, const seqpar_attn_desc *desc,
                        int64_t ranks) {
    const problem *p = one->p;
    const int64_t wide = p->tokens * p->heads * p->head_dim;
    const int64_t narrow = p->tokens * p->kv_heads * p->head_dim;
    float *x = calloc((size_t)(2 * wide + 2 * narrow + p->tokens * p->heads), sizeof *x);
    const float zero = 0;
    seqpar_error error;
    io.out = x, io.dq = x + wide, io.dk = x + 2 * wide, io.dv = x + 2 * wide + narrow;
    io.lse = ranks == 3 ? NULL : x + 2 * wide + 2 * narrow;
    if (ranks == 2) io.dout = NULL;
    test_expect(!seqpar_attn_run_threads(&error, &io, p->rows, desc, ranks), "%s", error.text);
    test_expect(same_floats(x, one->out, wide), "%lld ranks: out differs", (long long)ranks);
    if (io.lse) test_expect(same_floats(io.lse, one->lse, p->tokens * p->heads), "lse differs");
    if (!io.dout)
        for (int64_t i = 0; i < wide + 2 * narrow; i++)
            test_expect(!memcmp(x + wide + i, &zero, sizeof zero), "gradients without dout");
    else
        test_expect(same_floats(io.dq, one->dq, wide) && same_floats(io.dk, one->dk, narrow) &&
                        same_floats(io.dv, one->dv, narrow),
                    "%lld ranks: gradients differ", (long long)ranks);
    free(x);
}

static void in_one_call_refused(const seqpar_attn_io *io, const seqpar_row *row,
                                const seqpar_attn_desc *desc, seqpar_status status,
                                const char *words) {
    seqpar_error error;
    test_expect(seqpar_attn_run_threads(&error, io, row, desc, 2) == status &&
                    strstr(error.text, words),
                "%s", error.text);
}

static void test_in_one_call(void) {
    static const int64_t lengths[] = {61}, cells[] = {7};
    static float dsinks[1];
    problem *p = problem_new(1, lengths, cells, 4, 2, 6);
    setup one = {.p = p, .ranks = 1, .threads = 1, .f = {.sinks = 1, .dropout = 0.2}};
    seqpar_attn_desc desc = {.heads = 4, .kv_heads = 2, .head_dim = 6, .dropout = 0.2};
    float *q = narrowed(p->q, 61 * 24), *k = narrowed(p->k, 61 * 12),
          *v = narrowed(p->v, 61 * 12), *dout = narrowed(p->dout, 61 * 24),
          *sinks = narrowed(p->sinks, 4);
    seqpar_attn_io io = {.q = q,
                         .k = k,
                         .v = v,
                         .dout = dout,
                         .sinks = sinks,
                         .dropout_seed = DROPOUT_SEED,
                         .dropout_stream = DROPOUT_STREAM};
    setup_run(&one);
    for (int64_t ranks = 1; ranks <= 4; ranks++) {
        desc.layout = ranks % 2 ? SEQPAR_LAYOUT_ZIGZAG : SEQPAR_LAYOUT_CONTIGUOUS;
        desc.schedule = (int)(ranks % SEQPAR_SCHEDULE_COUNT);
        in_one_call(&one, io, &desc, ranks);
    }
    io.dk_stride = 12;
    in_one_call_refused(&io, p->rows, &desc, SEQPAR_ERR_OPTION, "without gaps");
    io.dk_stride = 0;
    io.dsinks = dsinks;
    in_one_call_refused(&io, p->rows, &desc, SEQPAR_ERR_OPTION, "makes no dsinks");
    io.dsinks = NULL;
    io.k = NULL;
    in_one_call_refused(&io, p->rows, &desc, SEQPAR_ERR_POINTER, "io->k is NULL");
    free(q), free(k), free(v), free(dout), free(sinks);
    setup_free(&one);
    problem_free(p);
    test_end("attn_in_one_call");
}

/* ---- the user's own attention: my queries x one source (own_attention.h) ---- */

/* Every layout, schedule, number of ranks; every mask but dropout. */
static void test_own_attention(int device) {
    static const int64_t lengths[] = {141, 7}, few[] = {47, 7}, cells[] = {13, 3};
    static const int64_t ranks[] = {1, 2, 3, 4, 5, 4};
    problem *problems[] = {problem_new(2, lengths, cells, 4, 2, 3),
                           problem_new(2, few, few, 4, 2, 3)};
    own_attention own = {.storage = device == 0   ? SEQPAR_DTYPE_F32
                                    : device == 1 ? SEQPAR_DTYPE_F64
                                                  : SEQPAR_DTYPE_BF16,
                         .sums = device == 1 ? SEQPAR_DTYPE_F64 : SEQPAR_DTYPE_F32};
    seqpar_attn_kernel kernel = {step_forward, step_backward, &own};
    if (device == 2) round_problem(problems[0]);
    if (device == 2) round_problem(problems[1]);
    for (int way = 0; way < SEQPAR_LAYOUT_COUNT * SEQPAR_SCHEDULE_COUNT; way++) {
        for (int i = (way + device) % 3; i < 12; i += 3) {
            setup s = {.p = problems[i / 6],
                       .reference = device,
                       .ranks = ranks[i % 6],
                       .threads = 1,
                       .layout = way % SEQPAR_LAYOUT_COUNT,
                       .schedule = way / SEQPAR_LAYOUT_COUNT,
                       .stride = i % 6 == 5 ? 1 : 1 + way % 2,
                       .f = features_list[(way + 5 * i) % FEATURES],
                       .kernel = &kernel,
                       .ulysses = way / SEQPAR_LAYOUT_COUNT != SEQPAR_SCHEDULE_ULYSSES &&
                                          i % 6 == 5
                                      ? 2
                                      : 0};
            s.f.dropout = 0;
            setup_run(&s);
            expect_truth(&s, truth_limit(device, &s.f) * (i < 6 ? 1 : 4), s.f.name);
            setup_free(&s);
        }
        test_end("attn_own_attention_%s_%s_%s_truth", device_names[device],
                 seqpar_layout_name(way % SEQPAR_LAYOUT_COUNT),
                 seqpar_schedule_name(way / SEQPAR_LAYOUT_COUNT));
    }
    test_expect(own.calls > 0, "the own kernel was never called");
    problem_free(problems[0]);
    problem_free(problems[1]);
}

/* Over any number of ranks at most twice as far off as the library's relaxed path on one. */
static void test_own_attention_rule(void) {
    static const int64_t lengths[] = {389}, cells[] = {13};
    own_attention own = {.storage = SEQPAR_DTYPE_F32, .sums = SEQPAR_DTYPE_F32};
    seqpar_attn_kernel kernel = {step_forward, step_backward, &own};
    problem *p = problem_new(1, lengths, cells, 4, 2, 16);
    setup truth = {.p = p, .reference = 1, .ranks = 1, .threads = 1};
    setup one = {.p = p, .ranks = 1, .threads = 1, .relaxed = 1};
    int64_t wide = p->tokens * 4 * 16;
    double worst = 0;
    setup_run(&truth);
    setup_run(&one);
    for (int i = 0; i < 5 * SEQPAR_SCHEDULE_COUNT; i++) {
        setup s = {.p = p,
                   .ranks = ranks_list[i / SEQPAR_SCHEDULE_COUNT],
                   .threads = 1,
                   .layout = i % SEQPAR_LAYOUT_COUNT,
                   .schedule = i % SEQPAR_SCHEDULE_COUNT,
                   .kernel = &kernel};
        setup_run(&s);
        const double *const want[] = {truth.out, truth.dq, truth.dk, truth.dv};
        const double *const got[] = {s.out, s.dq, s.dk, s.dv};
        const double *const first[] = {one.out, one.dq, one.dk, one.dv};
        for (int t = 0; t < 4; t++) {
            double ours = test_distance(first[t], want[t], t < 2 ? wide : wide / 2);
            double theirs = test_distance(got[t], want[t], t < 2 ? wide : wide / 2);
            test_expect(theirs <= 2 * ours && theirs > 0,
                        "tensor %d at P=%lld is %.2e off, the library on one rank %.2e", t,
                        (long long)s.ranks, theirs, ours);
            worst = fmax(worst, theirs / ours);
        }
        setup_free(&s);
    }
    setup_free(&truth);
    setup_free(&one);
    problem_free(p);
    test_end("attn_own_attention_error_rule: at most %.2f times the library's on one rank",
             worst);
}

/* An error of one call, on one rank, ends all of them and is named. */
static void test_own_attention_refused(void) {
    static const int64_t lengths[] = {24}, cells[] = {4};
    static const char *const words[] = {"",
                                        "the forward of the own attention kernel returned 77",
                                        "the backward of the own attention kernel returned 78",
                                        "the lse ",
                                        "the lse inf",
                                        "has no dropout",
                                        "has no backward"};
    for (int harm = STEP_FAILS; harm <= STEP_INFINITE + 2; harm++)
        for (int schedule = 0; schedule < SEQPAR_SCHEDULE_COUNT; schedule++) {
            problem *p = problem_new(1, lengths, cells, 8, 4, 4);
            own_attention own = {SEQPAR_DTYPE_F32, SEQPAR_DTYPE_F32, harm, 0};
            seqpar_attn_kernel kernel = {step_forward,
                                         harm > STEP_INFINITE + 1 ? NULL : step_backward, &own};
            setup s = {.p = p,
                       .ranks = 4,
                       .threads = 1,
                       .ulysses = 2,
                       .schedule = schedule,
                       .layout = SEQPAR_LAYOUT_ZIGZAG,
                       .kernel = &kernel,
                       .f = {.full = 1, .dropout = harm == STEP_INFINITE + 1 ? 0.5 : 0}};
            seqpar_error error;
            setup_results(&s);
            s.status = seqpar_run_threads(s.ranks, rank_main, &s, &error);
            test_expect(s.status == SEQPAR_ERR_KERNEL && strstr(error.text, words[harm]),
                        "%s: %s", seqpar_status_name(s.status), error.text);
            setup_free(&s);
            problem_free(p);
        }
    test_end("attn_own_attention_refused");
}

/* ---- the relaxed path: the truth everywhere, the error rule, tiles that know no cells ---- */

/* Documents longer than tiles of 128, which end within cells; one for all devices, because the
   truth of long documents takes seconds. */
static problem *relaxed_problem(void) {
    static const int64_t lengths[] = {277, 7}, cells[] = {13, 3};
    static const int64_t documents[] = {131, 1, 0, 133, 12};
    static problem *p;
    if (p) return p;
    p = problem_new(2, lengths, cells, 4, 2, 3);
    p->rows[0].docs = 5;
    for (int d = 0; d < 5; d++) {
        p->cu[0][d + 1] = p->cu[0][d] + documents[d];
        p->prefix[0][d] = test_integer(0, documents[d]);
    }
    return p;
}

static void test_relaxed_truth(int reference) {
    problem *p = relaxed_problem();
    int way;
    for (way = 0; way < SEQPAR_LAYOUT_COUNT * SEQPAR_SCHEDULE_COUNT; way++) {
        size_t i;
        for (i = (size_t)(way + reference) % 3; i < sizeof ranks_list / sizeof *ranks_list;
             i += 3) {
            setup s = {.p = p,
                       .reference = reference,
                       .ranks = ranks_list[i],
                       .threads = 1 + (int64_t)i % 2,
                       .layout = way % SEQPAR_LAYOUT_COUNT,
                       .schedule = way / SEQPAR_LAYOUT_COUNT,
                       .relaxed = 1,
                       .f = features_list[(way + 5 * i) % FEATURES],
                       .ulysses = way / SEQPAR_LAYOUT_COUNT == SEQPAR_SCHEDULE_RING &&
                                          ranks_list[i] == 4
                                      ? 2
                                      : 0};
            setup_run(&s);
            expect_truth(&s, reference ? 1e-13 : s.f.window == 1 ? 8e-6 : 4e-6, s.f.name);
            setup_free(&s);
        }
        test_end("attn_%s_relaxed_%s_%s_truth", device_names[reference],
                 seqpar_layout_name(way % SEQPAR_LAYOUT_COUNT),
                 seqpar_schedule_name(way / SEQPAR_LAYOUT_COUNT));
    }
}

/* On one rank the grid leaves no trace. */
static void test_relaxed_grid(void) {
    static const int64_t lengths[] = {301};
    static const int64_t coarse[] = {151}, fine[] = {5};
    uint64_t state = test_state;
    problem *p = problem_new(1, lengths, coarse, 4, 2, 16), *g;
    setup few = {.p = p, .ranks = 1, .threads = 1, .relaxed = 1}, many = few;
    test_state = state; /* the same numbers */
    g = problem_new(1, lengths, fine, 4, 2, 16);
    many.p = g;
    setup_run(&few);
    setup_run(&many);
    expect_same_bits(&few, &many, "cells of 151 and of 5");
    setup_free(&few);
    setup_free(&many);
    problem_free(p);
    problem_free(g);
    test_end("attn_relaxed_without_grid");
}

/* the first way is one rank, not relaxed */
enum { RULE_SEEDS = 20, RULE_TENSORS = 4, RULE_WAYS = 7 };
static double rule_error[RULE_WAYS][RULE_TENSORS][RULE_SEEDS];

static void measure_rule(int64_t seed) {
    static const int64_t lengths[] = {389}, cells[] = {13};
    problem *p = problem_new(1, lengths, cells, 4, 2, 16);
    setup truth = {.p = p, .reference = 1, .ranks = 1, .threads = 1};
    int64_t wide = p->tokens * 4 * 16, narrow = wide / 2, w;
    setup_run(&truth);
    for (w = 0; w < RULE_WAYS; w++) {
        setup s = {.p = p,
                   .ranks = w ? ranks_list[w - 1] : 1,
                   .threads = 1,
                   .relaxed = w > 0,
                   .layout = SEQPAR_LAYOUT_ZIGZAG,
                   .schedule = (int)(seed % SEQPAR_SCHEDULE_COUNT)};
        setup_run(&s);
        rule_error[w][0][seed] = test_distance(s.out, truth.out, wide);
        rule_error[w][1][seed] = test_distance(s.dq, truth.dq, wide);
        rule_error[w][2][seed] = test_distance(s.dk, truth.dk, narrow);
        rule_error[w][3][seed] = test_distance(s.dv, truth.dv, narrow);
        setup_free(&s);
    }
    setup_free(&truth);
    problem_free(p);
}

static int rising(const void *a, const void *b) {
    return *(const double *)a < *(const double *)b ? -1
                                                   : *(const double *)a > *(const double *)b;
}

static void test_relaxed_rule(void) {
    static const char *const names[] = {"out", "dq", "dk", "dv"};
    double worst = 0, middle[RULE_WAYS];
    int64_t seed, w, t;
    for (seed = 0; seed < RULE_SEEDS; seed++) measure_rule(seed);
    for (t = 0; t < RULE_TENSORS; t++) {
        for (w = 0; w < RULE_WAYS; w++) {
            qsort(rule_error[w][t], RULE_SEEDS, sizeof(double), rising);
            middle[w] =
                (rule_error[w][t][RULE_SEEDS / 2 - 1] + rule_error[w][t][RULE_SEEDS / 2]) / 2;
            test_expect(middle[w] <= 2 * middle[0],
                        "%s: median error %.2e at P=%lld, one rank by cells has %.2e", names[t],
                        middle[w], (long long)(w ? ranks_list[w - 1] : 1), middle[0]);
            if (w) worst = fmax(worst, middle[w] / middle[0]);
        }
        test_expect(middle[RULE_WAYS - 1] <= 1.5 * middle[2],
                    "%s: the median error grows from %.2e at P=2 to %.2e at P=8", names[t],
                    middle[2], middle[RULE_WAYS - 1]);
    }
    test_end("attn_relaxed_error_rule: median at most %.2f times that of the grid on one rank, "
             "%d seeds",
             worst, RULE_SEEDS);
}

/* ---- the README's table: what a mode gives for a mask over all P, against one rank ---- */

static const int table_masks[] = {0, 1, 3, 6, 8, 9, 10, 12};
enum { TABLE_MASKS = sizeof table_masks / sizeof *table_masks };

/* of one mask, over all P */
static const char *table_cell(const setup *mode, features f) {
    setup one = {.p = mode->p, .ranks = 1, .threads = 1, .f = f};
    int bits = 1;
    setup_run(&one);
    for (size_t i = 0; i < PRODUCT_RANKS; i++) {
        setup s = *mode;
        s.f = f;
        s.ranks = product_ranks[i];
        if (s.ulysses && s.ranks % s.ulysses) continue;
        setup_run(&s);
        if (!same_results(&s, &one)) {
            bits = 0;
            expect_truth(&s, 4e-6, "table");
        }
        setup_free(&s);
    }
    setup_free(&one);
    return test_why[0] ? "WRONG" : bits ? "bits" : "error rule";
}

static void print_mode(const setup *mode, const char *how) {
    printf("| %s %s |", seqpar_layout_name(mode->layout), how);
    for (int f = 0; f < TABLE_MASKS; f++)
        printf(" %s |", table_cell(mode, features_list[table_masks[f]]));
    printf("\n");
}

/* Layouts that cut cells obey the same rule in every schedule: one row each. */
static void print_table(void) {
    static const int64_t lengths[] = {47}, cells[] = {2};
    problem *p = problem_new(1, lengths, cells, 8, 4, 4);
    setup mode = {.p = p, .threads = 1};
    printf("| mode |");
    for (int f = 0; f < TABLE_MASKS; f++) printf(" %s |", features_list[table_masks[f]].name);
    printf("\n|---|---|---|---|---|---|---|---|---|\n");
    for (mode.layout = 0; mode.layout < SEQPAR_LAYOUT_COUNT; mode.layout++)
        for (mode.schedule = 0;
             mode.schedule < (layout_on_grid(mode.layout) ? SEQPAR_SCHEDULE_COUNT : 1);
             mode.schedule++)
            print_mode(&mode, seqpar_schedule_name(mode.schedule));
    mode = (setup){.p = p, .threads = 1, .layout = SEQPAR_LAYOUT_ZIGZAG, .ulysses = 2};
    print_mode(&mode, "2D, U = 2");
    mode.ulysses = 0;
    mode.relaxed = 1;
    print_mode(&mode, "ring, relaxed");
    problem_free(p);
}

#ifdef TEST_CUDA /* few and small: without a GPU every thread of a kernel is a fiber */
static void test_feature(int feature, int device) {
    static const int64_t lengths[] = {29, 17}, cells[] = {6, 6}, ranks[] = {1, 2, 3, 5};
    problem *p = problem_new(2, lengths, cells, 4, 2, 6);
    setup one = {
        .p = p, .reference = device, .ranks = 1, .threads = 1, .f = features_list[feature]};
    int first = test_fibers() ? 1 + feature % 3 : 1, last = test_fibers() ? first : 3;
    if (device == 2) round_problem(p);
    setup_run(&one);
    expect_truth(&one, truth_limit(device, &one.f), "P=1");
    for (int i = first; i <= last; i++) {
        setup s = {.p = p,
                   .reference = device,
                   .ranks = ranks[i],
                   .threads = 1,
                   .f = one.f,
                   .layout = layout_of_grid(feature / 3 + i),
                   .schedule = (feature / 2 + i) % SEQPAR_SCHEDULE_COUNT,
                   .stride = 1};
        char what[64];
        setup_run(&s);
        snprintf(what, sizeof what, "%s %s, P=%lld", seqpar_layout_name(s.layout),
                 seqpar_schedule_name(s.schedule), (long long)s.ranks);
        expect_same_bits(&s, &one, what);
        setup_free(&s);
    }
    test_end("attn_cuda_%s_%s", device_names[device], one.f.name);
    setup_free(&one);
    problem_free(p);
}

/* Without a GPU: other orders of threads between barriers, the same bits. */
static void test_thread_orders(int device) {
    static const int64_t lengths[] = {37, 17}, cells[] = {3, 3};
    problem *p = problem_new(2, lengths, cells, 4, 2, 6);
    setup one = {.p = p,
                 .reference = device,
                 .ranks = 1,
                 .threads = 1,
                 .f = {.name = "full", .full = 1, .dropout = 0.2}};
    if (!&cuda_on_cpu_seed) {
        test_skip("attn_cuda_thread_orders", "a GPU's threads take their own order");
        problem_free(p);
        return;
    }
    setup_run(&one);
    for (uint64_t seed = 0; seed < (test_fibers() ? 2 : 5); seed++) {
        setup s = one;
        char what[32];
        s.ranks = 5; /* a sum that waits is loaded, added to, and stored where it was */
        s.layout = SEQPAR_LAYOUT_ZIGZAG;
        cuda_on_cpu_seed = seed * 977;
        setup_run(&s);
        snprintf(what, sizeof what, "order %d", (int)seed);
        expect_same_bits(&s, &one, what);
        setup_free(&s);
    }
    test_end("attn_cuda_%s_thread_orders", device_names[device]);
    setup_free(&one);
    problem_free(p);
}

/* One running sum takes what every other rank made of a key. */
static void test_relaxed_return(int device) {
    static const int64_t lengths[] = {29, 17}, cells[] = {6, 6};
    problem *p = problem_new(2, lengths, cells, 4, 2, 6);
    if (device == 2) round_problem(p);
    for (int schedule = SEQPAR_SCHEDULE_RING; schedule <= SEQPAR_SCHEDULE_LLAMA3; schedule++) {
        setup s = {.p = p,
                   .reference = device,
                   .ranks = 4,
                   .threads = 1,
                   .layout = SEQPAR_LAYOUT_ZIGZAG,
                   .schedule = schedule,
                   .relaxed = 1};
        setup_run(&s);
        expect_truth(&s, truth_limit(device, &s.f), seqpar_schedule_name(schedule));
        setup_free(&s);
    }
    problem_free(p);
    test_end("attn_cuda_%s_relaxed_return", device_names[device]);
}

/* Every width of head that a kernel is written for, and pieces of more than one tile. */
static void test_widths(int device) {
    static const int64_t width[] = {64, 70, 128, 130}, lengths[] = {67}, cells[] = {67};
    for (int i = 0; i < 4; i++) {
        problem *p = problem_new(1, lengths, cells, 1, 1, width[i]);
        setup s = {.p = p, .reference = device, .ranks = 1, .threads = 1};
        if (device == 2) round_problem(p);
        setup_run(&s);
        expect_truth(&s, truth_limit(device, &s.f), "one cell");
        test_end("attn_cuda_%s_head_dim_%lld", device_names[device], (long long)width[i]);
        setup_free(&s);
        problem_free(p);
    }
}
#endif

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "--table")) {
        test_begin(1, argv);
        print_table();
        return 0;
    }
    test_begin(argc, argv);
#ifdef TEST_CUDA /* what runs through the device's kernels */
    for (int device = 0; device <= 2; device += 2) {
        TEST(test_thread_orders(device));
        TEST(test_widths(device));
        TEST(test_relaxed_return(device));
        for (int i = 0; i < FEATURES; i += device ? 3 : 1) TEST(test_feature(i, device));
    }
    return test_summary();
#endif
    TEST(test_many_cells(1));
    TEST(test_many_cells(0));
    TEST(test_packings(1));
    TEST(test_packings(0));
    TEST(test_packings(2));
    TEST(test_every_small_row());
    TEST(test_truth(1));
    TEST(test_truth(0));
    for (int i = 0; i < SEQPAR_LAYOUT_COUNT * SEQPAR_SCHEDULE_COUNT; i++)
        TEST(test_probe(i / SEQPAR_SCHEDULE_COUNT, i % SEQPAR_SCHEDULE_COUNT));
    TEST(test_grids(1));
    TEST(test_grids(0));
    TEST(test_grids(2));
    TEST(test_document_lengths(3));
    TEST(test_document_lengths(4));
    for (int i = 0; i < SEQPAR_LAYOUT_COUNT; i++) TEST(test_isolation(i));
    TEST(test_relaxed_truth(1));
    TEST(test_relaxed_truth(0));
    TEST(test_relaxed_grid());
    TEST(test_relaxed_rule());
    TEST(test_own_kernel(SEQPAR_DTYPE_F64, 1e-13));
    TEST(test_own_kernel(SEQPAR_DTYPE_F32, 3e-6));
    TEST(test_own_kernel(SEQPAR_DTYPE_BF16, 2e-2));
    TEST(test_own_attention(0));
    TEST(test_own_attention(1));
    TEST(test_own_attention(2));
    TEST(test_packed(0));
    TEST(test_packed(1));
    TEST(test_packed(2));
    TEST(test_in_one_call());
    TEST(test_own_attention_rule());
    TEST(test_own_attention_refused());
    TEST(test_error_slope());
    TEST(test_own_kernel_refused());
    TEST(test_refused());
    TEST(test_product());
    TEST(test_arrival(SEQPAR_SCHEDULE_RING, 0));
    TEST(test_arrival(SEQPAR_SCHEDULE_LLAMA3, 0));
    TEST(test_arrival(SEQPAR_SCHEDULE_ULYSSES, 0));
    TEST(test_arrival(SEQPAR_SCHEDULE_RING, 2));
    TEST(test_vanishing(1e-20));
    TEST(test_vanishing(1e-44));
    TEST(test_long_cells(2));
    TEST(test_long_cells(1));
    TEST(test_wide_heads());
    TEST(test_gaps(1));
    TEST(test_gaps(0));
    TEST(test_lengths(3));
    TEST(test_lengths(5));
    TEST(test_bits(1));
    TEST(test_bits(0));
    TEST(test_bits(2));
    return test_summary();
}
