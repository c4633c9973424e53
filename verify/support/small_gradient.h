/* SPDX-License-Identifier: MIT OR Unlicense */
/* A weight gradient of every small step: up to 9 tokens, cut into documents in every way, in
   cells of 1, 2 and 3 tokens, in one row on 1 to 5 ranks by every layout, and each document in a
   row of its own, over micro-batches and data-parallel ranks. One answer, by memcmp. */
#ifndef SMALL_GRADIENT_H
#define SMALL_GRADIENT_H

enum { SMALL_TOKENS = 9, SMALL_WIDTH = 3 };

typedef struct small_step {
    int64_t row_count, sp, dp, accumulation;
    int layout;
    seqpar_row rows[SMALL_TOKENS];
    int64_t cu[SMALL_TOKENS][SMALL_TOKENS + 1], source[SMALL_TOKENS][SMALL_TOKENS];
    int64_t first[SMALL_TOKENS]; /* a row's first token among those of the step */
    double gradient[SMALL_WIDTH];
} small_step;

/* Token t's term of element e. Magnitudes differ so much that another order of sums shows. */
static float small_value(int64_t t, int64_t e) {
    double x = seqpar_random_normal(11, 0, (uint64_t)(t * SMALL_WIDTH + e));
    return (float)(x * pow(2, (double)((t * 5 + e * 3) % 13)));
}

/* One row, or with `alone` each document in a row of its own; bit t - 1 of `cuts`: a document
   begins at token t. */
static void small_make(small_step *s, int64_t tokens, int cuts, int64_t cell, int alone) {
    seqpar_row *row = NULL;
    memset(s, 0, sizeof *s);
    s->sp = s->dp = s->accumulation = 1;
    for (int64_t t = 0, document = 0; t < tokens; t++) {
        if (t == 0 || cuts >> (t - 1) & 1) {
            if (!row || alone) {
                int64_t r = s->row_count++;
                row = &s->rows[r];
                *row = (seqpar_row){.index = r,
                                    .cell = cell,
                                    .cu_seqlens = s->cu[r],
                                    .doc_source = s->source[r]};
                s->first[r] = t;
            }
            s->source[row->index][row->docs++] = document++;
        }
        s->cu[row->index][row->docs] = ++row->tokens;
    }
}

typedef struct small_part {
    const small_step *s;
    const seqpar_share *share;
    int64_t first; /* row of the step that is the share's first */
} small_part;

static seqpar_status small_leaf(void *user, void *value, int64_t leaf) {
    const small_part *of = user;
    const seqpar_piece *p = &of->share->pieces[leaf];
    for (int64_t e = 0; e < SMALL_WIDTH; e++) {
        float sum = 0;
        for (int64_t i = 0; i < p->count; i++)
            sum += small_value(of->s->first[of->first + p->row] + p->start + i * p->stride, e);
        ((float *)value)[e] = sum;
    }
    return SEQPAR_OK;
}

static seqpar_status small_micro(seqpar_ctx *ctx, seqpar_optim *optim, const small_step *s,
                                 int64_t micro) {
    seqpar_split_desc split = {s->layout, s->sp, ctx->sp_rank};
    const seqpar_token_fold *fold = NULL;
    seqpar_share share = {0};
    float *nodes = NULL;
    int64_t first = 0, count = 0;
    seqpar_status status = seqpar_step_rows(ctx, optim, micro, &first, &count);
    small_part part = {s, &share, first};
    seqpar_leaves leaves = {small_leaf, &part, SMALL_WIDTH};
    if (!status) status = seqpar_split(ctx->error, &share, s->rows + first, count, &split);
    if (!status) status = seqpar_step_fold(ctx, optim, &fold, &share, micro);
    int64_t room = status ? 0 : (fold->node_count + 1) * SMALL_WIDTH;
    if (!status) nodes = calloc((size_t)room, sizeof *nodes);
    if (!status) status = seqpar_fold_leaves(ctx, nodes, SMALL_WIDTH, fold, &leaves);
    seqpar_step_nodes given = {
        .nodes = nodes, .node_stride = SMALL_WIDTH, .elements = room, .micro_batch = micro};
    if (!status) status = seqpar_step_gradient(ctx, optim, &given);
    seqpar_share_free(&share);
    free(nodes);
    return status;
}

static seqpar_status small_main(seqpar_comm *world, void *user) {
    static const seqpar_tensor tensor = {"w", 1, SMALL_WIDTH, 0, 0, 0};
    seqpar_optim_desc sgd = {.kind = SEQPAR_OPTIM_SGD, .zero_stage = 2};
    seqpar_optim_part all = {SEQPAR_STATE_GRADIENT, 0, 0, SMALL_WIDTH};
    small_step *s = user;
    double gradient[SMALL_WIDTH];
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_optim optim;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, s->sp);
    if (!status) status = seqpar_optim_open(&ctx, &optim, &tensor, 1, &sgd);
    if (!status)
        status = seqpar_step_begin(&ctx, &optim, s->rows, s->row_count, s->layout,
                                   s->accumulation);
    for (int64_t m = 0; !status && m < s->accumulation; m++)
        status = small_micro(&ctx, &optim, s, m);
    if (!status) status = seqpar_step_norm(&ctx, &optim);
    if (!status) status = seqpar_optim_read(&ctx, &optim, gradient, &all);
    if (!status && world->rank == 0) memcpy(s->gradient, gradient, sizeof gradient);
    seqpar_optim_close(&ctx, &optim);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

/* Expects that the step on its ranks and micro-batches has the bits of `one`. The layout
   stripe, which cuts cells, must only be near: *worst is its largest error. */
static void small_try(small_step *s, const small_step *one, double *worst) {
    seqpar_error error = {0};
    seqpar_status status = seqpar_run_threads(s->sp * s->dp, small_main, s, &error);
    double off = 0, size = 0;
    for (int e = 0; e < SMALL_WIDTH; e++) {
        off = fmax(off, fabs(s->gradient[e] - one->gradient[e]));
        size = fmax(size, fabs(one->gradient[e]));
    }
    if (s->layout == SEQPAR_LAYOUT_STRIPE) *worst = fmax(*worst, off / size);
    test_expect(!status, "%s", error.text);
    test_expect(
        s->layout == SEQPAR_LAYOUT_STRIPE ||
            !memcmp(s->gradient, one->gradient, sizeof s->gradient),
        "%s, P = %lld, D = %lld, %lld micro-batches, %lld rows in cells of %lld: off by "
        "%.1e",
        seqpar_layout_name(s->layout), (long long)s->sp, (long long)s->dp,
        (long long)s->accumulation, (long long)s->row_count, (long long)s->rows[0].cell, off);
    memset(s->gradient, 0xff, sizeof s->gradient);
}

static int64_t small_tries(int64_t tokens, int cuts, int64_t cell, double *worst) {
    static const int64_t ways[][3] = {{1, 1, 2}, {1, 2, 1}, {2, 1, 3}, {2, 2, 2}, {3, 1, 1}};
    small_step one, s;
    seqpar_error error = {0};
    int64_t cases = 0;
    small_make(&one, tokens, cuts, cell, 0);
    s = one;
    for (int64_t r = 0; r < s.row_count; r++)
        s.rows[r].cu_seqlens = s.cu[r], s.rows[r].doc_source = s.source[r];
    test_expect(!seqpar_run_threads(1, small_main, &one, &error), "%s", error.text);
    for (s.layout = 0; s.layout < SEQPAR_LAYOUT_COUNT; s.layout++)
        for (s.sp = 1; s.sp <= 5; s.sp++, cases++) small_try(&s, &one, worst);
    small_make(&s, tokens, cuts, cell, 1);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++, cases++) {
        s.sp = ways[i][0], s.dp = ways[i][1], s.accumulation = ways[i][2];
        s.layout = i % 2 ? SEQPAR_LAYOUT_ZIGZAG : SEQPAR_LAYOUT_CONTIGUOUS;
        small_try(&s, &one, worst);
    }
    return cases;
}

/* Without TEST_ALL a sample. */
static void check_every_small_gradient(void) {
    int64_t steps = 0, cases = 0;
    double worst = 0;
    for (int64_t tokens = 1; tokens <= SMALL_TOKENS; tokens++)
        for (int cuts = 0; cuts < 1 << (tokens - 1); cuts++)
            for (int64_t cell = 1; cell <= 3; cell++)
                if (steps++ % 13 == 0 || getenv("TEST_ALL"))
                    cases += small_tries(tokens, cuts, cell, &worst);
    test_expect(worst <= 1e-6, "a layout that cuts cells is off by %.1e", worst);
    test_end("every_small_gradient");
    printf("#   %lld cases of %lld steps; a layout that cuts cells is off by %.1e at most\n",
           (long long)cases, (long long)steps, worst);
}
#endif
