/* SPDX-License-Identifier: MIT OR Unlicense */
/* What the optimizer, a step and shards refuse, for test_refusals.c; on the one rank that it has
   opened. */
#ifndef REFUSALS_STEP_H
#define REFUSALS_STEP_H

enum { TENSORS = 3 };
typedef struct optim_call {
    seqpar_optim_desc desc;
    int64_t count, rows[TENSORS], cols[TENSORS], offset[TENSORS], group[TENSORS];
    int shards, offload;
} optim_call;

static void name_tensors(const optim_call *c, seqpar_tensor *t) {
    static const char *const names[TENSORS] = {"first", "second", "third"};
    for (int i = 0; i < TENSORS; i++)
        t[i] = (seqpar_tensor){names[i], c->rows[i], c->cols[i], c->offset[i], 0, c->group[i]};
}

static seqpar_status open_optim(void *call) {
    optim_call *c = call;
    seqpar_tensor t[TENSORS];
    seqpar_optim optim = {0};
    seqpar_shards shards = {0};
    seqpar_status status;
    name_tensors(c, t);
    if (c->shards) {
        status = seqpar_shards_open(&ctx, &shards, t, c->count, c->desc.slice, c->offload);
        seqpar_shards_close(&ctx, &shards);
        return status;
    }
    status = seqpar_optim_open(&ctx, &optim, t, c->count, &c->desc);
    seqpar_optim_close(&ctx, &optim);
    return status;
}

#define Z(member, value)     SET(optim_call, member, value)
#define BETAS(first, second) "adam_betas are " first " and " second "; both must lie in [0, 1)"
#define BELOW(eps, decay, norm) \
    "eps " eps ", weight decay " decay " and max_norm " norm " must not be negative"
#define OFFLOAD(offload, stage) \
    "offload is " offload " at zero_stage " stage \
    "; use SEQPAR_OFFLOAD_STATE at any stage, SEQPAR_OFFLOAD_PARAMS at stage 3"
#define BITS(bits, offload) \
    "state_bits is " bits " and offload " offload \
    "; use 0 for accumulators, or 8 without SEQPAR_OFFLOAD_STATE"
#define TENSOR(name, size, begin, end) \
    "tensor " name " of " size " begins at " begin "; it must begin at " end \
    " or later, and end below 2^59"
static const optim_call good_optim = {.desc = {.beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8},
                                      .count = TENSORS,
                                      .rows = {5, 3, 7},
                                      .cols = {3, 1, 2},
                                      .offset = {1, 16, 20},
                                      .group = {0, 1, 1}};
static const limit optim_limits[] = {
    {Z(desc.zero_stage, 0), -1, SEQPAR_ERR_OPTION, "zero_stage is -1; use 0, 1, 2 or 3"},
    {Z(desc.zero_stage, 3), 4, SEQPAR_ERR_OPTION, "zero_stage is 4; use 0, 1, 2 or 3"},
    {Z(desc.slice, 0), -1, SEQPAR_ERR_OPTION,
     "slices of -1 elements are wanted; give at least 1, or 0 for the default"},
    {Z(desc.slice, 0),
     -1,
     SEQPAR_ERR_OPTION,
     "slices of -1 elements are wanted; give at least 1, or 0 for the default",
     {Z(shards, 1)}},
    {Z(desc.zero_stage, 1),
     0,
     SEQPAR_ERR_OPTION,
     "params_shared wants owners that update one array for all, but zero_stage is 0; use 1 or 2",
     {Z(desc.params_shared, 1)}},
    {Z(desc.zero_stage, 2),
     3,
     SEQPAR_ERR_OPTION,
     "params_shared wants owners that update one array for all, but zero_stage is 3; use 1 or 2",
     {Z(desc.params_shared, 1)}},
    {Z(desc.offload, 0), -1, SEQPAR_ERR_OPTION, OFFLOAD("-1", "0")},
    {Z(desc.offload, 3), 4, SEQPAR_ERR_OPTION, OFFLOAD("4", "3"), {Z(desc.zero_stage, 3)}},
    {Z(desc.zero_stage, 3), 2, SEQPAR_ERR_OPTION, OFFLOAD("2", "2"), {Z(desc.offload, 2)}},
    {Z(desc.offload, 1), 3, SEQPAR_ERR_OPTION, OFFLOAD("3", "0")},
    {Z(desc.state_bits, 8), 7, SEQPAR_ERR_OPTION, BITS("7", "0")},
    {Z(desc.state_bits, 8), 9, SEQPAR_ERR_OPTION, BITS("9", "0")},
    {Z(desc.state_bits, 0), -8, SEQPAR_ERR_OPTION, BITS("-8", "0")},
    {Z(desc.state_bits, 0), 8, SEQPAR_ERR_OPTION, BITS("8", "1"), {Z(desc.offload, 1)}},
    {Z(desc.kind, 0), -1, SEQPAR_ERR_OPTION, "optimizer -1 is unknown; use adamw or sgd"},
    {Z(desc.kind, 1), 2, SEQPAR_ERR_OPTION, "optimizer 2 is unknown; use adamw or sgd"},
    {Z(desc.beta1, 0), -1e-300L, SEQPAR_ERR_OPTION, BETAS("-1e-300", "0.99")},
    {Z(desc.beta1, 0.999999), 1, SEQPAR_ERR_OPTION, BETAS("1", "0.99")},
    {Z(desc.beta1, 0), NAN, SEQPAR_ERR_OPTION, BETAS("nan", "0.99")},
    {Z(desc.beta2, 0), -1e-300L, SEQPAR_ERR_OPTION, BETAS("0.9", "-1e-300")},
    {Z(desc.beta2, 0.999999), 1, SEQPAR_ERR_OPTION, BETAS("0.9", "1")},
    {Z(desc.beta2, 0), NAN, SEQPAR_ERR_OPTION, BETAS("0.9", "nan")},
    {Z(desc.eps, 0), -1e-300L, SEQPAR_ERR_OPTION, BELOW("-1e-300", "0", "0")},
    {Z(desc.eps, 0), NAN, SEQPAR_ERR_OPTION, BELOW("nan", "0", "0")},
    {Z(desc.decay, 0), -1e-300L, SEQPAR_ERR_OPTION, BELOW("1e-08", "-1e-300", "0")},
    {Z(desc.decay, 0), NAN, SEQPAR_ERR_OPTION, BELOW("1e-08", "nan", "0")},
    {Z(desc.max_norm, 0), -1e-300L, SEQPAR_ERR_OPTION, BELOW("1e-08", "0", "-1e-300")},
    {Z(desc.max_norm, 0), NAN, SEQPAR_ERR_OPTION, BELOW("1e-08", "0", "nan")},
    {Z(desc.stochastic, 0), 1, SEQPAR_ERR_OPTION,
     "stochastic rounding is for weights in bf16; the device 'reference' has others"},
    {Z(count, 1), 0, SEQPAR_ERR_SIZE, "there is no tensor; give at least 1"},
    {Z(count, 1), 0, SEQPAR_ERR_SIZE, "there is no tensor; give at least 1", {Z(shards, 1)}},
    {Z(rows[0], 1), 0, SEQPAR_ERR_SIZE, "tensor first is 0 x 3; both must be positive"},
    {Z(cols[0], 1), 0, SEQPAR_ERR_SIZE, "tensor first is 5 x 0; both must be positive"},
    {Z(rows[2], 1), 0, SEQPAR_ERR_SIZE, "tensor third is 0 x 2; both must be positive"},
    {Z(cols[2], 1), -1, SEQPAR_ERR_SIZE, "tensor third is 7 x -1; both must be positive"},
    {Z(offset[0], 0), -1, SEQPAR_ERR_SIZE, TENSOR("first", "5 x 3", "-1", "0")},
    {Z(offset[2], 19), 18, SEQPAR_ERR_SIZE, TENSOR("third", "7 x 2", "18", "19")},
    {Z(offset[2], 576460752303423473.0L), 576460752303423474.0L, SEQPAR_ERR_SIZE,
     TENSOR("third", "7 x 2", "576460752303423474", "19")},
    {Z(group[0], 0),
     1,
     SEQPAR_ERR_SIZE,
     "tensor first is in group 1; groups begin at 0 and never fall or skip a number",
     {Z(count, 1)}},
    {Z(group[0], 0), -1, SEQPAR_ERR_SIZE,
     "tensor first is in group -1; groups begin at 0 and never fall or skip a number"},
    {Z(group[2], 1), 0, SEQPAR_ERR_SIZE,
     "tensor third is in group 0; groups begin at 0 and never fall or skip a number"},
    {Z(group[2], 2), 3, SEQPAR_ERR_SIZE,
     "tensor third is in group 3; groups begin at 0 and never fall or skip a number"},
};

/* ---- one step of two micro-batches of two rows each, by hand ---- */

enum { STEP_ROWS = 4, PARAMS = 34, ACCUMULATION = 2 };
typedef struct step_call {
    int64_t accumulation, row_count;
    int layout, plain;
} step_call;

static seqpar_optim step_optim;
static seqpar_tensor step_tensors[TENSORS];
static seqpar_row step_rows[STEP_ROWS];
static int64_t step_cu[STEP_ROWS][3];
static double step_nodes[8 * PARAMS];

/* doc_source of each row; the last row is not in the step */
static const int64_t step_numbers[STEP_ROWS + 1][2] = {{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}};

static void make_rows(void) {
    static const int64_t lengths[STEP_ROWS] = {11, 7, 5, 13};
    for (int i = 0; i < STEP_ROWS; i++) {
        step_cu[i][0] = 0, step_cu[i][1] = 3, step_cu[i][2] = lengths[i];
        step_rows[i] = (seqpar_row){.index = i,
                                    .tokens = lengths[i],
                                    .cell = 16,
                                    .docs = 2,
                                    .cu_seqlens = step_cu[i],
                                    .doc_source = step_numbers[i]};
    }
}

static seqpar_status begin_step(void *call) {
    step_call *c = call;
    if (c->plain) return seqpar_step_begin_plain(&ctx, &step_optim, c->accumulation);
    return seqpar_step_begin(&ctx, &step_optim, step_rows, c->row_count, c->layout,
                             c->accumulation);
}

#define B(member, value) SET(step_call, member, value)
static const step_call good_step = {ACCUMULATION, STEP_ROWS, SEQPAR_LAYOUT_ZIGZAG, 0};
static const limit begin_limits[] = {
#define NO_STEP_PARTS \
    " micro-batches on 1 data-parallel ranks; give at least 1 of each, and at most 16777216 parts"
    {B(accumulation, 1), 0, SEQPAR_ERR_OPTION, "step: 0" NO_STEP_PARTS},
    {B(accumulation, 1000), 16777217, SEQPAR_ERR_OPTION, "step: 16777217" NO_STEP_PARTS},
    {B(accumulation, 1), 0, SEQPAR_ERR_OPTION, "step: 0" NO_STEP_PARTS, {B(plain, 1)}},
    {B(row_count, 1), 0, SEQPAR_ERR_NO_DOCUMENTS, "a step has 0 rows; give at least 1"},
    {B(row_count, 1), -1, SEQPAR_ERR_NO_DOCUMENTS, "a step has -1 rows; give at least 1"},
    {B(layout, 0), -1, SEQPAR_ERR_LAYOUT,
     "layout -1 is unknown; use contiguous, zigzag, stripe or zigzag-doc"},
};

/* The share of a micro-batch, of rows that may not be those of the step. */
typedef struct fold_call {
    int64_t micro, first, count, tokens, cell, docs, cu, number, sp_size, sp_rank;
    int layout, rows_alone, unnumbered;
} fold_call;

static seqpar_status fold_share(void *call) {
    fold_call *c = call;
    const seqpar_split_desc desc = {c->layout, 1, 0};
    const seqpar_token_fold *fold;
    seqpar_row rows[STEP_ROWS + 1];
    seqpar_share share = {0};
    int64_t cu[3], numbers[2], first, count, at = c->first + c->count - 1;
    if (c->rows_alone) return seqpar_step_rows(&ctx, &step_optim, c->micro, &first, &count);
    memcpy(rows, step_rows, sizeof step_rows);
    rows[STEP_ROWS] = rows[STEP_ROWS - 1];
    rows[STEP_ROWS].index++;
    seqpar_row *last = &rows[at];
    cu[0] = 0, cu[1] = c->cu, cu[2] = last->tokens + c->tokens;
    last->tokens += c->tokens;
    last->cell = c->cell;
    last->docs = c->docs;
    last->cu_seqlens = cu;
    if (c->docs == 1) cu[1] = cu[2];
    numbers[0] = step_numbers[at][0], numbers[1] = step_numbers[at][1] + c->number;
    last->doc_source = c->unnumbered ? NULL : numbers;
    seqpar_status status = seqpar_split(world->error, &share, rows + c->first, c->count, &desc);
    share.sp_size = c->sp_size;
    share.sp_rank = c->sp_rank;
    if (!status) status = seqpar_step_fold(&ctx, &step_optim, &fold, &share, c->micro);
    seqpar_share_free(&share);
    return status;
}

#define F(member, value) SET(fold_call, member, value)
static const fold_call good_fold = {.first = 0,
                                    .count = 2,
                                    .cell = 16,
                                    .docs = 2,
                                    .cu = 3,
                                    .sp_size = 1,
                                    .layout = SEQPAR_LAYOUT_ZIGZAG};
#define NO_MICRO(n) "micro-batch " n " is not in the step, which was begun with 2; give 0 to 1"
#define OTHER_ROW(tokens, cell) \
    "micro-batch 0: row 1 of the share has " tokens " tokens in cells of " cell \
    ", in the step 7 in cells of 16; give both the same row"
#define OTHER_NUMBERS \
    "micro-batch 0: row 1 of the share has documents of other numbers (doc_source) than in the " \
    "step; give both the same row"
#define OTHER_DOCUMENTS \
    "micro-batch 0: row 1 of the share has other documents than in the step; give both the same " \
    "row"
static const limit fold_limits[] = {
    {F(micro, 0), -1, SEQPAR_ERR_STEP, NO_MICRO("-1")},
    {F(micro, 1), 2, SEQPAR_ERR_STEP, NO_MICRO("2"), {F(first, 2)}},
    {F(micro, 0), -1, SEQPAR_ERR_STEP, NO_MICRO("-1"), {F(rows_alone, 1)}},
    {F(micro, 1), 2, SEQPAR_ERR_STEP, NO_MICRO("2"), {F(rows_alone, 1)}},
    {F(layout, SEQPAR_LAYOUT_ZIGZAG), SEQPAR_LAYOUT_CONTIGUOUS, SEQPAR_ERR_STEP,
     "micro-batch 0 is split contiguous, but the step was begun with zigzag; give both the same "
     "layout"},
    {F(sp_size, 1), 2, SEQPAR_ERR_STEP,
     "micro-batch 0: the share is that of rank 0 of 2, this is rank 0 of 1; give the share of this rank"},
    {F(sp_rank, 0), 1, SEQPAR_ERR_STEP,
     "micro-batch 0: the share is that of rank 1 of 1, this is rank 0 of 1; give the share of this rank"},
    {F(count, 2), 1, SEQPAR_ERR_STEP,
     "micro-batch 0: the share is of 1 rows, in the step it has 2; seqpar_step_rows says which"},
    {F(count, 2), 3, SEQPAR_ERR_STEP,
     "micro-batch 0: the share is of 3 rows, in the step it has 2; seqpar_step_rows says which"},
    {F(first, 0), 1, SEQPAR_ERR_STEP,
     "micro-batch 0: the share holds row 1 where the step has row 0; seqpar_step_rows says which"},
    {F(first, 2),
     3,
     SEQPAR_ERR_STEP,
     "micro-batch 1: the share holds row 3 where the step has row 2; seqpar_step_rows says which",
     {F(micro, 1)}},
    {F(tokens, 0), -1, SEQPAR_ERR_STEP, OTHER_ROW("6", "16")},
    {F(cell, 16), 15, SEQPAR_ERR_STEP, OTHER_ROW("7", "15")},
    {F(docs, 2), 1, SEQPAR_ERR_STEP, OTHER_DOCUMENTS},
    {F(cu, 3), 4, SEQPAR_ERR_STEP, OTHER_DOCUMENTS},
    {F(number, 0), 1, SEQPAR_ERR_STEP, OTHER_NUMBERS},
    {F(unnumbered, 0), 1, SEQPAR_ERR_STEP, OTHER_NUMBERS},
};

static seqpar_status give(const seqpar_step_nodes *nodes) {
    return seqpar_step_gradient(&ctx, &step_optim, nodes);
}

/* Nodes of micro-batch 0 in which one number is wrong, in a step begun anew. */
typedef struct nodes_call {
    seqpar_step_nodes nodes;
    int64_t row_count; /* 3: micro-batch 1 has two nodes */
    int before;        /* how many micro-batches were given before */
} nodes_call;

static seqpar_status give_alone(void *call) {
    nodes_call *c = call;
    step_call step = good_step;
    step.row_count = c->row_count;
    seqpar_status status = begin_step(&step);
    c->nodes.nodes = step_nodes;
    for (int i = 0; i < c->before && !status; i++) {
        seqpar_step_nodes earlier = c->nodes;
        earlier.micro_batch = i;
        status = give(&earlier);
    }
    return status ? status : give(&c->nodes);
}

#define N(member, value) SET(nodes_call, member, value)
#define NO_GROUP(group, source) \
    "the gradient of group " group ", source " source \
    " was given; there are groups 0 to 1 and sources 0 and 1"
#define NO_ROOM(nodes, room, stride) \
    "group 1 has " nodes \
    " nodes of 18 elements (to the end of tensor third), but elements is " room \
    " and node_stride " stride "; pass the whole array and its size"
#define NO_SLICE(first, count) \
    "first " first " and count " count \
    " of group 1 are not whole slices; take both from seqpar_optim_slice"
#define NOT_IN_ORDER(micro, given) \
    "group 1 was given the gradient of micro-batch " micro " when it had those of " given \
    " micro-batches; give each once, in order"
static const nodes_call good_nodes = {
    .nodes = {.node_stride = PARAMS, .elements = 8 * PARAMS, .group = 1},
    .row_count = STEP_ROWS};
static const limit nodes_limits[] = {
    {N(nodes.micro_batch, 0), -1, SEQPAR_ERR_STEP, NO_MICRO("-1")},
    {N(nodes.micro_batch, 1), 2, SEQPAR_ERR_STEP, NO_MICRO("2"), {N(before, 1)}},
    {N(nodes.group, 0), -1, SEQPAR_ERR_STEP, NO_GROUP("-1", "0")},
    {N(nodes.group, 1), 2, SEQPAR_ERR_STEP, NO_GROUP("2", "0")},
    {N(nodes.source, 0), -1, SEQPAR_ERR_STEP, NO_GROUP("1", "-1")},
    {N(nodes.source, 1), 2, SEQPAR_ERR_STEP, NO_GROUP("1", "2")},
    {N(nodes.micro_batch, 0), 1, SEQPAR_ERR_STEP, NOT_IN_ORDER("1", "0")},
    {N(nodes.micro_batch, 1), 0, SEQPAR_ERR_STEP, NOT_IN_ORDER("0", "1"), {N(before, 1)}},
    {N(nodes.elements, 18), 17, SEQPAR_ERR_SIZE, NO_ROOM("1", "17", "34")},
    {N(nodes.node_stride, 18),
     17,
     SEQPAR_ERR_SIZE,
     NO_ROOM("2", "272", "17"),
     {N(row_count, 3), N(before, 1), N(nodes.micro_batch, 1)}},
    {N(nodes.first, 0), 1, SEQPAR_ERR_STEP, NO_SLICE("1", "0")},
    {N(nodes.count, 18), 17, SEQPAR_ERR_STEP, NO_SLICE("0", "17")},
    {N(nodes.count, 18), 19, SEQPAR_ERR_STEP, NO_SLICE("0", "19")},
    {N(nodes.first, 0), -1, SEQPAR_ERR_STEP, NO_SLICE("-1", "18"), {N(nodes.count, 18)}},
};

/* Two nodes of 18 elements need an array of 36. One of 35, in which the second node begins but
   does not end, is refused. */
static void check_room(void) {
    step_call step = good_step;
    seqpar_step_nodes nodes = {
        .nodes = step_nodes, .node_stride = 18, .elements = 36, .group = 1};
    step.row_count = 3;
    for (int outside = 0; outside < 2; outside++) {
        ACCEPTED(begin_step(&step), world->error);
        nodes.micro_batch = 0;
        ACCEPTED(give(&nodes), world->error);
        nodes.micro_batch = 1;
        nodes.elements -= outside;
        if (outside)
            REFUSED(give(&nodes), world->error, SEQPAR_ERR_SIZE, NO_ROOM("2", "35", "18"));
        else
            ACCEPTED(give(&nodes), world->error);
    }
    test_end("room_for_nodes");
}

/* ---- the end of a step ---- */

enum { SLICES = 3, OWNED = 3 * SEQPAR_PARAM_BLOCK };
typedef struct end_call {
    int64_t elements, given[2][SLICES]; /* micro-batches of a source and slice */
    int64_t t;                          /* steps before this one */
    double lr, gradient;
    int norm, twice, offload;
} end_call;

static double step_params[OWNED + 1];

/* Slice 0 is group 0, the other two are group 1. */
static seqpar_status give_slice(const end_call *c, int source, int slice, int64_t micro) {
    int64_t group = slice > 0, first, count;
    if (!seqpar_optim_slice(&step_optim, group, slice - group, &first, &count))
        return SEQPAR_ERR_PLAN; /* not cut as this suite says */
    const seqpar_step_nodes nodes = {step_nodes, PARAMS, 8 * PARAMS, micro,
                                     group,      source, first,      count};
    step_nodes[0] = c->gradient;
    return give(&nodes);
}

static seqpar_status end_step(void *call) {
    end_call *c = call;
    step_call step = good_step;
    seqpar_status status = begin_step(&step);
    for (int source = 0; source < 2; source++)
        for (int slice = 0; slice < SLICES; slice++)
            for (int64_t m = 0; !status && m < c->given[source][slice]; m++)
                status = give_slice(c, source, slice, m);
    if (!status && c->norm) status = seqpar_step_norm(&ctx, &step_optim);
    step_optim.t = c->t;
    for (int i = 0; !status && i <= c->twice; i++)
        status = seqpar_step_end(&ctx, &step_optim, step_params, c->elements, c->lr);
    return status;
}

#define E(member, value) SET(end_call, member, value)
#define INCOMPLETE(group, given) \
    "the step ends, but group " group " was given the gradients of " given \
    " of 2 micro-batches; run all of them, also those without rows, and all slices"
#define NO_NORM(value) \
    "the gradient norm of step 1 is " value \
    "; lower the learning rate or look for a NaN in the data"
static const end_call good_end = {
    .elements = PARAMS, .given = {{2, 2, 2}, {0}}, .lr = 0.1, .gradient = 1};
static const limit incomplete_limits[] = {
    {E(given[0][0], 2), 1, SEQPAR_ERR_STEP, INCOMPLETE("0", "1")},
    {E(given[0][1], 2), 0, SEQPAR_ERR_STEP, INCOMPLETE("1", "0")},
    {E(given[0][2], 2), 1, SEQPAR_ERR_STEP, INCOMPLETE("1", "1")},
    {E(given[0][2], 2), 1, SEQPAR_ERR_STEP, INCOMPLETE("1", "1"), {E(norm, 1)}},
    {E(given[1][0], 2), 1, SEQPAR_ERR_STEP, INCOMPLETE("0", "1")},
    {E(given[1][1], 0), 2, SEQPAR_ERR_STEP, INCOMPLETE("1", "0")},
    {E(given[1][2], 0), 2, SEQPAR_ERR_STEP, INCOMPLETE("1", "0")},
    {E(given[1][2], 2), 1, SEQPAR_ERR_STEP, INCOMPLETE("1", "1"), {E(given[1][1], 2)}},
    {E(t, 0), -1, SEQPAR_ERR_OPTION, "optim.t is -1, but steps are counted from 0"},
    {E(twice, 0), 1, SEQPAR_ERR_STEP, "no step was begun; call seqpar_step_begin first"},
};

/* These refusals come before any parameter changes, and the step is not counted. */
static void check_end(void) {
    static const struct {
        double gradient, lr;
        const char *sentence;
    } cases[] = {
        {NAN, 0.1, NO_NORM("nan")},
        {HUGE_VAL, 0.1, NO_NORM("inf")},
        {1, NAN, "the learning rate of step 1 is nan; give a number"},
        {1, HUGE_VAL, "the learning rate of step 1 is inf; give a number"},
        {1, -HUGE_VAL, "the learning rate of step 1 is -inf; give a number"},
    };
    end_call c = good_end;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        c.gradient = cases[i].gradient;
        c.lr = cases[i].lr;
        REFUSED(end_step(&c), world->error, SEQPAR_ERR_NOT_FINITE, cases[i].sentence);
    }
    c = good_end;
    c.elements = PARAMS - 1;
    REFUSED(
        end_step(&c), world->error, SEQPAR_ERR_SIZE,
        "the parameters are 33 elements, but tensor third ends at 34; pass the whole array and "
        "its size");
    test_expect(step_optim.t == 0, "%lld steps were counted", (long long)step_optim.t);
    for (int i = 0; i < PARAMS; i++)
        test_expect(step_params[i] == 0, "parameter %d changed", i);
    c = good_end;
    c.lr = 1.7976931348623157e308;
    ACCEPTED(end_step(&c), world->error);
    c.lr = -1.7976931348623157e308;
    ACCEPTED(end_step(&c), world->error);
    test_end("end_of_a_step");
}

/* At stage 3 the parameters are this rank's blocks, no more and no less. */
static void check_owned(void) {
    static const int64_t sizes[] = {OWNED - 1, OWNED + 1};
    seqpar_optim_desc desc = good_optim.desc;
    char sentence[200];
    end_call c = good_end;
    desc.zero_stage = 3;
    desc.slice = 15;
    ACCEPTED(seqpar_optim_open(&ctx, &step_optim, step_tensors, TENSORS, &desc), world->error);
    for (int i = 0; i < 2; i++) {
        c.elements = sizes[i];
        snprintf(
            sentence, sizeof sentence,
            "the parameters are %d elements, but at zero_stage 3 this rank owns 3072; pass "
            "seqpar_shards.own of shards with the same tensors and slice",
            (int)sizes[i]);
        REFUSED(end_step(&c), world->error, SEQPAR_ERR_SIZE, sentence);
    }
    c.elements = OWNED;
    ACCEPTED(end_step(&c), world->error);
    seqpar_optim_close(&ctx, &step_optim);
    test_end("end_of_a_step_of_owners");
}

/* ---- what is kept of a parameter, a part at a time ---- */

typedef struct part_call {
    seqpar_optim_part part;
    int write, own;
} part_call;

static seqpar_status keep(void *call) {
    static double values[4 * SEQPAR_QUANTIZE_GROUP];
    part_call *c = call;
    if (c->write) return seqpar_optim_write(&ctx, &step_optim, values, &c->part);
    if (c->own) return seqpar_optim_read_own(&ctx, &step_optim, values, &c->part);
    return seqpar_optim_read(&ctx, &step_optim, values, &c->part);
}

#define H(member, value) SET(part_call, member, value)
#define NO_PART(first, count, tensor, elements) \
    "first " first ", count " count " of tensor " tensor \
    " are out of range; there are 3 tensors, and this one has " elements " elements"
#define NO_STATE(what) \
    "this optimizer keeps no " what \
    " now: SGD has no moments, only bf16 that is not stochastic has masters, a gradient needs " \
    "seqpar_step_norm"
static const part_call good_part = {.part = {SEQPAR_STATE_M, 2, 3, 5}};
static const limit part_limits[] = {
    {H(part.tensor, 0), -1, SEQPAR_ERR_SIZE, NO_PART("3", "5", "-1", "0")},
    {H(part.tensor, 2), 3, SEQPAR_ERR_SIZE, NO_PART("3", "5", "3", "0")},
    {H(part.first, 0), -1, SEQPAR_ERR_SIZE, NO_PART("-1", "5", "2", "14")},
    {H(part.first, 9), 10, SEQPAR_ERR_SIZE, NO_PART("10", "5", "2", "14")},
    {H(part.count, 0), -1, SEQPAR_ERR_SIZE, NO_PART("3", "-1", "2", "14")},
    {H(part.count, 11), 12, SEQPAR_ERR_SIZE, NO_PART("3", "12", "2", "14")},
    {H(part.count, 11), 12, SEQPAR_ERR_SIZE, NO_PART("3", "12", "2", "14"), {H(write, 1)}},
    {H(part.count, 11), 12, SEQPAR_ERR_SIZE, NO_PART("3", "12", "2", "14"), {H(own, 1)}},
    {H(part.state, SEQPAR_STATE_GRADIENT), -1, SEQPAR_ERR_OPTION, NO_STATE("such state")},
    {H(part.state, SEQPAR_STATE_V), SEQPAR_STATE_MASTER, SEQPAR_ERR_OPTION,
     NO_STATE("master parameters")},
    {H(part.state, SEQPAR_STATE_V), 4, SEQPAR_ERR_OPTION, NO_STATE("such state")},
};

static void check_parts_kept(void) {
    step_call step = good_step;
    part_call gradient = {.part = {SEQPAR_STATE_GRADIENT, 2, 3, 5}};
    seqpar_optim_desc desc = good_optim.desc;
    end_call end = good_end;
    desc.slice = 15;
    ACCEPTED(seqpar_optim_open(&ctx, &step_optim, step_tensors, TENSORS, &desc), world->error);
    REFUSED(keep(&gradient), world->error, SEQPAR_ERR_OPTION, NO_STATE("gradient"));
    ACCEPTED(end_step(&end), world->error);
    TRY_LIMITS("parts", keep, good_part, world->error, part_limits);
    ACCEPTED(begin_step(&step), world->error);
    REFUSED(keep(&gradient), world->error, SEQPAR_ERR_STEP,
            "a step is under way; read its gradient after seqpar_step_norm or seqpar_step_end");
    seqpar_optim_close(&ctx, &step_optim);
    desc.kind = SEQPAR_OPTIM_SGD;
    ACCEPTED(seqpar_optim_open(&ctx, &step_optim, step_tensors, TENSORS, &desc), world->error);
    for (int state = SEQPAR_STATE_M; state <= SEQPAR_STATE_V; state++) {
        part_call moments = {.part = {state, 2, 3, 5}};
        REFUSED(keep(&moments), world->error, SEQPAR_ERR_OPTION,
                state == SEQPAR_STATE_M ? NO_STATE("first moments")
                                        : NO_STATE("second moments"));
    }
    seqpar_optim_close(&ctx, &step_optim);
    test_end("state_that_is_kept");
}

/* Moments in 8 bits: whole groups of 256, or to the tensor's end, which is a group and a half. */
#define NO_PACK(first, count) \
    "first " first ", count " count \
    " cut a group of 8-bit moments; give multiples of 256, or end with the tensor"
static const part_call good_pack_part = {.part = {SEQPAR_STATE_V, 0, 256, 128}};
static const limit pack_part_limits[] = {
    {H(part.first, 0), 1, SEQPAR_ERR_SIZE, NO_PACK("1", "256"), {H(part.count, 256)}},
    {H(part.count, 128), 127, SEQPAR_ERR_SIZE, NO_PACK("256", "127")},
    {H(part.count, 256), 255, SEQPAR_ERR_SIZE, NO_PACK("0", "255"), {H(part.first, 0)}},
    {H(part.count, 384),
     383,
     SEQPAR_ERR_SIZE,
     NO_PACK("0", "383"),
     {H(part.first, 0), H(part.state, SEQPAR_STATE_M)}},
};

static void check_packed_parts(void) {
    const seqpar_tensor tensor = {"packed", 128, 3, 0, 0, 0};
    seqpar_optim_desc desc = good_optim.desc;
    desc.state_bits = 8;
    ACCEPTED(seqpar_optim_open(&ctx, &step_optim, &tensor, 1, &desc), world->error);
    TRY_LIMITS("parts in 8 bits", keep, good_pack_part, world->error, pack_part_limits);
    seqpar_optim_close(&ctx, &step_optim);
}

/* ---- shards ---- */

typedef struct shards_call {
    int64_t group, next, elements, tensor, first, count;
    int what; /* 0: use, 1: gather, 2: read, 3: write, 4: read_own */
} shards_call;

static seqpar_status use_shards(void *call) {
    static double values[PARAMS];
    shards_call *c = call;
    seqpar_shards shards;
    void *params;
    seqpar_status status = seqpar_shards_open(&ctx, &shards, step_tensors, TENSORS, 15, 0);
    if (!status && c->what == 0)
        status = seqpar_shards_use(&ctx, &shards, c->group, c->next, &params);
    if (!status && c->what == 1)
        status = seqpar_shards_gather(&ctx, &shards, values, c->elements);
    if (!status && c->what == 2)
        status = seqpar_shards_read(&ctx, &shards, values, c->tensor, c->first, c->count);
    if (!status && c->what == 3)
        status = seqpar_shards_write(&ctx, &shards, values, c->tensor, c->first, c->count);
    if (!status && c->what == 4)
        status = seqpar_shards_read_own(&ctx, &shards, values, c->tensor, c->first, c->count);
    seqpar_shards_close(&ctx, &shards);
    return status;
}

#define W(member, value)       SET(shards_call, member, value)
#define NO_GROUPS(group, next) "group " group ", next " next ": give 0 to 1, or -1 for none"
static const shards_call good_shards = {
    .next = 1, .elements = PARAMS, .tensor = 2, .first = 3, .count = 5};
static const limit shards_limits[] = {
    {W(group, -1), -2, SEQPAR_ERR_SIZE, NO_GROUPS("-2", "1")},
    {W(group, 1), 2, SEQPAR_ERR_SIZE, NO_GROUPS("2", "1")},
    {W(next, -1), -2, SEQPAR_ERR_SIZE, NO_GROUPS("0", "-2")},
    {W(next, 1), 2, SEQPAR_ERR_SIZE, NO_GROUPS("0", "2")},
    {W(elements, 34),
     33,
     SEQPAR_ERR_SIZE,
     "the parameters are 33 elements, but tensor third ends at 34; pass the whole array and its "
     "size",
     {W(what, 1)}},
    {W(tensor, 2), 3, SEQPAR_ERR_SIZE, NO_PART("3", "5", "3", "0"), {W(what, 2)}},
    {W(first, 9), 10, SEQPAR_ERR_SIZE, NO_PART("10", "5", "2", "14"), {W(what, 3)}},
    {W(count, 11), 12, SEQPAR_ERR_SIZE, NO_PART("3", "12", "2", "14"), {W(what, 4)}},
};

/* On a queued transport, messages of different exchanges show as a sum over all ranks that is
   not 0: here in its low half, then in its high half. */
static void check_exchanges(void) {
    const seqpar_comm_table *table = world->table;
    seqpar_comm_table queued = *table;
    end_call c = good_end;
    c.norm = 1;
    queued.queued = 1;
    world->table = &queued;
    ctx.sp->queue_sum = 0;
    for (int half = 0; half < 3; half++) {
        world->queue_sum = half ? UINT64_C(1) << (half == 1 ? 0 : 32) : 0;
        seqpar_status status = end_step(&c);
        world->queue_sum = 0;
        if (half)
            REFUSED(status, world->error, SEQPAR_ERR_STEP,
                    "a message was sent in one exchange and received in another; all "
                    "ranks must make the same calls in the same order, above all of "
                    "seqpar_step_gradient");
        else
            ACCEPTED(status, world->error);
    }
    world->table = table;
    test_end("exchanges_in_another_order");
}

static seqpar_status leaf_of(void *user, void *value, int64_t leaf) {
    *(double *)value = 1;
    return leaf == *(int64_t *)user ? SEQPAR_ERR_PLAN : SEQPAR_OK;
}

/* Computes a micro-batch of four leaves; no leaf fails, then the first, then the last. */
static void check_leaves(void) {
    static const int64_t bad[] = {-1, 0, 3};
    const seqpar_split_desc desc = {SEQPAR_LAYOUT_ZIGZAG, 1, 0};
    const seqpar_token_fold *fold = NULL;
    seqpar_share share = {0};
    step_call step = good_step;
    double nodes[8];
    ACCEPTED(begin_step(&step), world->error);
    ACCEPTED(seqpar_split(world->error, &share, step_rows, 2, &desc), world->error);
    ACCEPTED(seqpar_step_fold(&ctx, &step_optim, &fold, &share, 0), world->error);
    for (int i = 0; i < 3; i++) {
        int64_t fails = bad[i];
        const seqpar_leaves leaves = {leaf_of, &fails, 1};
        seqpar_status status = seqpar_fold_leaves(&ctx, nodes, 1, fold, &leaves);
        if (i)
            REFUSED(status, world->error, SEQPAR_ERR_PLAN,
                    "a leaf of a token sum could not be computed");
        else
            ACCEPTED(status, world->error);
    }
    test_expect(share.count == 4 && nodes[0] == 4, "%lld leaves sum to %g",
                (long long)share.count, nodes[0]);
    seqpar_share_free(&share);
    test_end("leaves_that_fail");
}

static void check_step(void) {
    const seqpar_optim_desc whole = good_optim.desc;
    seqpar_optim_desc sliced = whole;
    step_call step = good_step;
    sliced.slice = 15;
    ACCEPTED(seqpar_optim_open(&ctx, &step_optim, step_tensors, TENSORS, &whole), world->error);
    REFUSED(fold_share(&(fold_call){.rows_alone = 1}), world->error, SEQPAR_ERR_STEP,
            "no step was begun; call seqpar_step_begin first");
    REFUSED(seqpar_step_norm(&ctx, &step_optim), world->error, SEQPAR_ERR_STEP,
            "no step was begun; call seqpar_step_begin first");
    step.plain = 1;
    ACCEPTED(begin_step(&step), world->error);
    REFUSED(fold_share(&(fold_call){.rows_alone = 1}), world->error, SEQPAR_ERR_STEP,
            "the step was begun without rows (seqpar_step_begin_plain) and takes whole "
            "gradients; for rows and folds call seqpar_step_begin");
    TRY_LIMITS("begin", begin_step, good_step, world->error, begin_limits);
    step = good_step;
    ACCEPTED(begin_step(&step), world->error);
    TRY_LIMITS("fold", fold_share, good_fold, world->error, fold_limits);
    TRY_LIMITS("nodes", give_alone, good_nodes, world->error, nodes_limits);
    check_room();
    seqpar_optim_close(&ctx, &step_optim);
    ACCEPTED(seqpar_optim_open(&ctx, &step_optim, step_tensors, TENSORS, &sliced),
             world->error);
    check_end();
    check_exchanges();
    check_leaves();
    TRY_LIMITS("incomplete", end_step, good_end, world->error, incomplete_limits);
    seqpar_optim_close(&ctx, &step_optim);
    test_end("step");
}

static void check_optimizer(void) {
    TRY_LIMITS("optimizer", open_optim, good_optim, world->error, optim_limits);
    name_tensors(&good_optim, step_tensors);
    make_rows();
    check_step();
    check_owned();
    check_parts_kept();
    check_packed_parts();
    TRY_LIMITS("shards", use_shards, good_shards, world->error, shards_limits);
}
#endif
