/* SPDX-License-Identifier: MIT OR Unlicense */
/* One optimizer step is one optimizer step: every way of splitting it gives the bits of one
   rank. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "support/run_model.h"
#include "support/layouts.h"
#include "support/room.h"

/* UNTIED_PARTS: with all that families have beyond a plain Llama */
enum { UNTIED, TIED, UNTIED_PARTS, UNTIED_EXPERTS };
static const char *const kinds[] = {"untied", "tied", "untied_parts", "untied_experts"};

static void add_parts(seqpar_llama_config *c) {
    c->qkv_bias = c->o_bias = c->mlp_bias = c->qk_norm = 1;
    c->no_rope_every = 2;
    c->window = 11;
    c->window_from = 1;
}

/* Every second layer; an expert that nobody chooses is likely in some leaves. */
static void add_experts(seqpar_llama_config *c) {
    c->layers = 3;
    c->experts = 5;
    c->experts_per_token = 2;
    c->expert_intermediate = 11;
    c->sparse_every = 2;
    c->topk_norm = 1;
}

static void make_task(model_task *task, int kind) {
    int tied = kind == TIED;
    seqpar_llama_config config = {.layers = 2,
                                  .hidden = 24,
                                  .heads = 6,
                                  .kv_heads = 2,
                                  .head_dim = 10,
                                  .intermediate = 37,
                                  .vocab = 307, /* three slices of the table */
                                  .tied = tied};
    memset(task, 0, sizeof *task);
    if (kind == UNTIED_PARTS) add_parts(&config);
    if (kind == UNTIED_EXPERTS) add_experts(&config);
    task->balance = kind == UNTIED_EXPERTS ? 0.3 : 0;
    task->config = config;
    random_batch(&task->batch, 31, 40, 307, 61, 7); /* ranks share documents */
    task->objective.count = task->batch.counts.supervised;
    task->objective.label_smoothing = tied ? 0.1 : 0;
    task->objective.z_loss = tied ? 0.01 : 0;
    task->seed = 7;
    task->lr = 0.01;
    task->max_norm = 0.3;
    task->decay = 0.1;
}

static const model_way plain = {.dp = 1, .sp = 1, .accumulation = 1, .threads = 1, .steps = 3};

static void expect_moved(const model_result *r) {
    test_expect(memcmp(r->start, r->params, (size_t)r->elements * 8) != 0,
                "the parameters did not change");
    test_expect(r->norm > 0.3, "the clip did not act (norm %g)", r->norm);
}

/* Shapes in turn, all other options drawn at random: every pair of option values comes up. */
static void test_ways(int reference, int kind, int64_t ways) {
    static const int64_t shapes[][2] = {{1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 5}, {1, 8},
                                        {2, 2}, {4, 1}, {2, 3}, {3, 1}, {5, 1}};
    model_task task;
    model_result one, other;
    model_way base = plain;
    int64_t i;
    make_task(&task, kind);
    test_expect(task.batch.rows >= 8, "only %lld rows", (long long)task.batch.rows);
    base.reference = reference;
    model_run(&task, &base, &one);
    test_expect(!one.status, "%s", one.error.text);
    expect_moved(&one);
    for (i = 0; i < ways; i++) {
        int64_t shape = i % (int64_t)(sizeof shapes / sizeof *shapes);
        model_way w = base;
        char what[160];
        w.dp = shapes[shape][0];
        w.sp = shapes[shape][1];
        w.accumulation = (int64_t[]){1, 2, 4, 3}[test_integer(0, 3)];
        w.layout = layout_of_grid(test_integer(0, layouts_on_grid() - 1));
        w.schedule = (int)test_integer(SEQPAR_SCHEDULE_RING, SEQPAR_SCHEDULE_ULYSSES);
        w.ulysses_size = w.sp % 2 == 0 && test_integer(0, 1) ? 2 : 0; /* of two kv heads */
        w.heads_k_stride = w.ulysses_size ? 1 : test_integer(1, 2);
        w.zero_stage = (int)test_integer(0, 3);
        w.recompute = (int)test_integer(0, 2);
        w.threads = test_integer(1, 2);
        w.vocab_rows = (int64_t[]){0, 1, 7, 64}[test_integer(0, 3)];
        w.mlp_rows = (int64_t[]){9, 0, 1, 64}[i % 4];
        w.slice = (int64_t[]){0, 1, 6144}[test_integer(0, 2)];
        w.offload = (int)(3 * i % 8) & (w.zero_stage == 3 ? 7 : 5);
        model_run(&task, &w, &other);
        snprintf(what, sizeof what,
                 "D=%lld P=%lld A=%lld %s %s U=%lld zero=%d recompute=%d threads=%lld "
                 "vocab_rows=%lld mlp_rows=%lld slice=%lld offload=%d",
                 (long long)w.dp, (long long)w.sp, (long long)w.accumulation,
                 seqpar_layout_name(w.layout), seqpar_schedule_name(w.schedule),
                 (long long)w.ulysses_size, w.zero_stage, w.recompute, (long long)w.threads,
                 (long long)w.vocab_rows, (long long)w.mlp_rows, (long long)w.slice, w.offload);
        expect_equal_runs(&other, &one, what);
        test_end("bits_%s_%s %s",
                 (const char *[]){"fp32", "fp64", "bf16", "naive_bf16"}[reference], kinds[kind],
                 what);
        model_result_free(&other);
    }
    model_result_free(&one);
    seqpar_batch_free(&task.batch);
}

/* shape: D, P, A and the ZeRO stage */
static model_way shaped(const model_way *base, const int64_t *shape) {
    model_way w = *base;
    w.dp = shape[0];
    w.sp = shape[1];
    w.accumulation = shape[2];
    w.zero_stage = (int)shape[3];
    return w;
}

/* Activations that go to the second pool and come back, over more layers than stay. In micro-batches
   of different sizes, whose room there is one after the other's; beside parameters and moments that
   move by the same thread. Every second time they come as late as they may. */
static void test_checkpoints(int reference, int kind) {
    static const int64_t shapes[][4] = {{1, 1, 1, 0}, {1, 3, 3, 0}, {2, 2, 2, 3},
                                        {1, 5, 1, 3}, {3, 1, 2, 1}, {1, 8, 1, 2}};
    model_task task;
    model_result one, other;
    model_way base = plain;
    make_task(&task, kind);
    task.config.layers = 5;
    base.reference = reference;
    model_run(&task, &base, &one);
    test_expect(!one.status, "%s", one.error.text);
    expect_moved(&one);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        model_way w = shaped(&base, shapes[i]);
        w.recompute = 2;
        w.threads = 1 + (int64_t)i % 2;
        w.offload = w.zero_stage == 3 ? 7 : 5 * (int)(i % 2);
        if (i % 2 == 0) w.offload = (w.offload & 3) | MODEL_LATE;
        model_run(&task, &w, &other);
        expect_equal_runs(&other, &one, "in the second pool");
        test_end("bits_checkpoints device %d %s D=%lld P=%lld A=%lld zero=%d offload=%d",
                 reference, kinds[kind], (long long)w.dp, (long long)w.sp,
                 (long long)w.accumulation, w.zero_stage, w.offload);
        model_result_free(&other);
    }
    model_result_free(&one);
    seqpar_batch_free(&task.batch);
}

/* Tiles of the MLP: of one token, of parts of cells, of whole cells, of all tokens. Sums wait between
   two tiles in places that no other way has. */
static void test_mlp_tiles(int reference, int kind) {
    static const int64_t shapes[][4] = {{1, 1, 1, 0}, {1, 2, 1, 0}, {1, 1, 1, 3}, {2, 3, 2, 1},
                                        {1, 5, 1, 3}, {3, 1, 2, 2}, {1, 8, 1, 0}, {1, 1, 3, 0}};
    static const int64_t rows[] = {1, 3, 7, 14, 20, 28, 4, 1000};
    model_task task;
    model_result one, other;
    model_way base = plain;
    make_task(&task, kind);
    base.reference = reference;
    model_run(&task, &base, &one);
    test_expect(!one.status, "%s", one.error.text);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        model_way w = shaped(&base, shapes[i]);
        w.mlp_rows = rows[i];
        w.recompute = (int)i % 3;
        w.threads = 1 + (int64_t)i / 2 % 2;
        model_run(&task, &w, &other);
        expect_equal_runs(&other, &one, "in tiles");
        test_end("bits_mlp_tiles device %d %s D=%lld P=%lld A=%lld zero=%d mlp_rows=%lld "
                 "recompute=%d",
                 reference, kinds[kind], (long long)w.dp, (long long)w.sp,
                 (long long)w.accumulation, w.zero_stage, (long long)w.mlp_rows, w.recompute);
        model_result_free(&other);
    }
    model_result_free(&one);
    seqpar_batch_free(&task.batch);
}

/* With bf16 storage the weights are master parameters in fp32, rounded. Steps too small to
   be seen in most weights add up in the masters, whose gradient hardly changes meanwhile. */
static void test_masters(int device) {
    model_task task;
    model_result r;
    model_way way = plain;
    double *moved, *want, d;
    int64_t i, still = 0, count;
    make_task(&task, 0);
    task.max_norm = task.decay = 0;
    task.lr = 1e-4;
    way.optimizer = SEQPAR_OPTIM_SGD;
    way.reference = device;
    model_run(&task, &way, &r);
    test_expect(!r.status, "%s", r.error.text);
    count = r.elements;
    moved = calloc((size_t)(2 * count), sizeof *moved);
    want = moved + count;
    for (i = 0; i < count; i++) {
        double master = r.state[2 * count + i];
        moved[i] = master - r.start[i];
        want[i] = -3 * task.lr * r.gradient[i];
        still += r.params[i] == r.start[i] && r.gradient[i] != 0;
        test_expect(r.params[i] ==
                        (double)seqpar_bf16_to_float(seqpar_bf16_from_float((float)master)),
                    "weight %lld is %.9g, its master %.9g", (long long)i, r.params[i], master);
    }
    d = test_distance(moved, want, count);
    test_expect(
        d <= 0.02 && still > count / 2,
        "three steps of %lld weights: the masters are off by %.2e, %lld weights stand still",
        (long long)count, d, (long long)still);
    free(moved);
    model_result_free(&r);
    seqpar_batch_free(&task.batch);
    test_end("masters, device %d: off by %.1e, %lld of %lld weights stand still", device, d,
             (long long)still, (long long)count);
}

/* What bf16 costs: a step's gradient against fp64 on the same weights. */
static void test_cost(void) {
    model_task task;
    model_result rounded, exact;
    model_way way = plain;
    make_task(&task, 0);
    way.steps = 1;
    way.reference = 2;
    model_run(&task, &way, &rounded);
    task.start = rounded.start;
    way.reference = 1;
    model_run(&task, &way, &exact);
    double d = test_distance(rounded.gradient, exact.gradient, exact.elements);
    double loss = fabs(rounded.loss - exact.loss) / exact.loss;
    test_expect(!rounded.status && !exact.status && d <= 3e-2 && d >= 1e-4 && loss <= 1e-3,
                "the gradient is %.2e off, the loss %.2e", d, loss);
    model_result_free(&rounded);
    model_result_free(&exact);
    seqpar_batch_free(&task.batch);
    test_end("bf16_cost: gradient off by %.1e, loss by %.1e", d, loss);
}

/* T14: the gradient-scale law. A plain SGD step, where no optimizer hides a factor, for
   every D x P = 8. */
static void test_law(void) {
    model_task task;
    model_result one, other;
    model_way base = plain, w;
    int64_t dp;
    make_task(&task, 0);
    task.max_norm = 0;
    task.decay = 0;
    task.lr = 1;
    base.optimizer = SEQPAR_OPTIM_SGD;
    base.steps = 1;
    model_run(&task, &base, &one);
    for (int64_t i = 0; i < 16; i++) { /* every factoring of 8 ranks at every ZeRO stage */
        char what[64];
        w = base;
        w.dp = dp = INT64_C(1) << i / 4;
        w.sp = 8 / dp;
        w.zero_stage = (int)(i % 4);
        w.layout = SEQPAR_LAYOUT_ZIGZAG;
        w.offload = w.zero_stage == 3 && i / 4 % 2 ? SEQPAR_OFFLOAD_PARAMS : 0;
        model_run(&task, &w, &other);
        snprintf(what, sizeof what, "SGD, D=%lld P=%lld zero=%d offload=%d", (long long)dp,
                 (long long)w.sp, w.zero_stage, w.offload);
        expect_equal_runs(&other, &one, what);
        test_end("law %s", what);
        model_result_free(&other);
    }
    model_result_free(&one);
    seqpar_batch_free(&task.batch);
}

/* Relative L2 distance of the ways two runs have gone from their common start. */
static double apart(const model_result *a, const model_result *b) {
    double gone = 0, between = 0;
    for (int64_t i = 0; i < a->elements; i++) {
        gone += (b->params[i] - b->start[i]) * (b->params[i] - b->start[i]);
        between += (a->params[i] - b->params[i]) * (a->params[i] - b->params[i]);
    }
    return sqrt(between / gone);
}

/* Moments in 8 bits, weights rounded by chance, and both: the bits of one rank on all, within so
   much of what accumulators and masters give. */
static void test_forms(int reference, int bits, int stochastic, double limit) {
    static const int64_t shapes[][2] = {{1, 3}, {3, 1}, {2, 2}, {1, 8}, {5, 1}, {1, 1}};
    model_task task;
    model_result one, other, full;
    model_way base = plain, w;
    make_task(&task, 0);
    base.reference = reference;
    model_run(&task, &base, &full);
    base.state_bits = bits;
    base.stochastic = stochastic;
    model_run(&task, &base, &one);
    test_expect(!one.status && !full.status, "%s%s", one.error.text, full.error.text);
    expect_moved(&one);
    double far = apart(&one, &full);
    test_expect(far > 1e-4 && far <= limit, "%.3f of the way from what it replaces", far);
    printf("#   %d bits, by chance %d: %.4f of the way apart\n", bits, stochastic, far);
    for (int i = 0; i < 6; i++) {
        char what[80];
        w = base;
        w.dp = shapes[i][0];
        w.sp = shapes[i][1];
        w.zero_stage = i % 4;
        w.accumulation = 1 + i % 2;
        w.layout = SEQPAR_LAYOUT_ZIGZAG;
        w.slice = i % 3 ? 6144 : 0;
        w.offload = w.zero_stage == 3 ? SEQPAR_OFFLOAD_PARAMS : 0;
        if (!bits && i % 2) w.offload |= SEQPAR_OFFLOAD_STATE;
        model_run(&task, &w, &other);
        snprintf(what, sizeof what, "%d bits, by chance %d, device %d: D=%lld P=%lld zero=%d",
                 bits, stochastic, reference, (long long)w.dp, (long long)w.sp, w.zero_stage);
        expect_equal_runs(&other, &one, what);
        test_end("forms %s", what);
        model_result_free(&other);
    }
    model_result_free(&one);
    model_result_free(&full);
    seqpar_batch_free(&task.batch);
}

/* ---- a caller's own tensors: odd sizes at odd places, in arrays of exactly their size ---- */

enum { ROOM_TENSORS = 6, ROOM_GROUPS = 3, ROOM_STEPS = 2, ROOM_DOCUMENTS = 27 };
static const seqpar_tensor room_tensors[ROOM_TENSORS] = {
    {"a", 7, 13, 3, 1, 0},      {"b", 1, 1031, 99, 0, 0}, /* a gap of 5 */
    {"c", 37, 61, 1130, 1, 1},  {"d", 1, 1, 3387, 0, 1},
    {"e", 3, 1024, 3390, 1, 1},  /* none before d, 2 behind it */
    {"f", 11, 189, 6469, 1, 2}}; /* 7 before it, nothing behind */
static int64_t room_end(int64_t tensor) {
    return room_tensors[tensor].offset + room_tensors[tensor].rows * room_tensors[tensor].cols;
}

typedef struct {
    int64_t dp, sp, accumulation;
    int reference, zero_stage, layout;
} room_way;

typedef struct {
    const room_way *way;
    const seqpar_batch *batch;
    /* (elements), (elements), (3, elements) of rank 0; 0 in gaps */
    double *params, *gradient, *state;
    int64_t elements;
    int spoiled; /* ranks that wrote into a gap */
    double norm;
} room_run;

static double room_value(int64_t leaf, int64_t element, int64_t source) {
    return seqpar_random_normal((uint64_t)(5 + source), (uint64_t)leaf, (uint64_t)element);
}

/* The nodes of a group: each leaf is a vector of random numbers, folded as the rank would.
   Gaps stay poisoned. */
static seqpar_status room_gradient(seqpar_ctx *ctx, const room_run *run, seqpar_optim *optim,
                                   int64_t micro, int64_t group, int source) {
    const seqpar_token_fold *fold = NULL;
    const int64_t *tensors = optim->blocks.group_tensor + group;
    int64_t first = tensors[0], last = tensors[1] - 1;
    int64_t begin = room_tensors[first].offset, width = room_end(last) - begin;
    int64_t stride = width + 3;
    int64_t size = seqpar_dtype_bytes(ctx->device->accumulator), row, rows, i, k, count;
    seqpar_share share = {0};
    seqpar_status status = seqpar_step_rows(ctx, optim, micro, &row, &rows);
    if (!status)
        status = seqpar_split(
            ctx->error, &share, run->batch->row + row, rows,
            &(seqpar_split_desc){run->way->layout, ctx->sp_size, ctx->sp_rank});
    if (!status) status = seqpar_step_fold(ctx, optim, &fold, &share, micro);
    if (status) {
        seqpar_share_free(&share);
        return status;
    }
    count = fold->node_count;
    room nodes = room_new(count ? ((count - 1) * stride + width) * size : 0,
                          (micro + group) % 2),
         before;
    double *leaf = calloc((size_t)(width + 1), sizeof *leaf);
    void *leaves = calloc((size_t)(share.count * width + 1), 8);
    for (i = 0; i < share.count; i++) {
        for (k = 0; k < width; k++)
            leaf[k] = room_value(share.pieces[i].leaf, begin + k, source);
        seqpar_device_write(ctx->device, leaves, i * width, leaf, width,
                            ctx->device->accumulator);
    }
    for (i = first; !status && i <= last && count; i++) {
        int64_t at = room_tensors[i].offset - begin;
        seqpar_fold_args f = {{fold->program, fold->program_count, fold->depth,
                               nodes.data + at * size, stride, NULL},
                              (char *)leaves + at * size,
                              width,
                              room_tensors[i].rows * room_tensors[i].cols};
        status = ctx->device->fold(ctx->device, &f, ctx->queue);
    }
    before = room_new((int64_t)nodes.bytes, 1);
    memcpy(before.data, nodes.data, nodes.bytes);
    seqpar_step_nodes n = {nodes.data, stride, (int64_t)nodes.bytes / size,
                           micro,      group,  source};
    if (!status) status = seqpar_step_gradient(ctx, optim, &n);
    if (memcmp(before.data, nodes.data, nodes.bytes)) ((room_run *)run)->spoiled++;
    room_free(&nodes);
    room_free(&before);
    free(leaf);
    free(leaves);
    seqpar_share_free(&share);
    return status;
}

/* Group 0 gets two sums, as a tied table does. */
static seqpar_status room_step(seqpar_ctx *ctx, const room_run *run, seqpar_optim *optim,
                               const seqpar_shards *shards, void *params) {
    seqpar_status status = seqpar_step_begin(ctx, optim, run->batch->row, run->batch->rows,
                                             run->way->layout, run->way->accumulation);
    int64_t i, g;
    for (i = 0; !status && i < run->way->accumulation; i++) {
        status = room_gradient(ctx, run, optim, i, 0, 1);
        for (g = ROOM_GROUPS - 1; !status && g >= 0; g--)
            status = room_gradient(ctx, run, optim, i, g, 0);
    }
    if (!status && shards->own.data)
        return seqpar_step_end(ctx, optim, shards->own.data, shards->blocks.own_elements, .01);
    return status ? status : seqpar_step_end(ctx, optim, params, run->elements, .01);
}

/* Part by part, of odd sizes. */
static seqpar_status room_read(seqpar_ctx *ctx, seqpar_optim *optim, double *values,
                               int state) {
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; i < ROOM_TENSORS; i++)
        for (int64_t at = 0, all = room_tensors[i].rows * room_tensors[i].cols;
             !status && at < all; at += 701) {
            seqpar_optim_part part = {state, i, at, all - at < 701 ? all - at : 701};
            status = seqpar_optim_read(ctx, optim, values + room_tensors[i].offset + at, &part);
            /* back where it was */
            if (!status && state != SEQPAR_STATE_GRADIENT)
                status = seqpar_optim_write(ctx, optim, values + room_tensors[i].offset + at,
                                            &part);
        }
    return status;
}

/* Parameters at their owners: values go in part by part, as they come out. */
static seqpar_status room_shards_write(seqpar_ctx *ctx, seqpar_shards *shards,
                                       const double *values) {
    seqpar_status status = seqpar_shards_open(ctx, shards, room_tensors, ROOM_TENSORS, 0, 0);
    for (int64_t i = 0; i < ROOM_TENSORS; i++)
        for (int64_t at = 0, all = room_tensors[i].rows * room_tensors[i].cols, n;
             !status && at < all; at += n) {
            n = all - at < 701 ? all - at : 701;
            if (seqpar_shards_owns(ctx, shards, i, at, n))
                status = seqpar_shards_write(ctx, shards, values + room_tensors[i].offset + at,
                                             i, at, n);
        }
    return status;
}

/* Whole, then group by group, in orders of which some meet what is held, and some do not. */
static seqpar_status room_shards_read(seqpar_ctx *ctx, seqpar_shards *shards, room *params,
                                      int64_t elements) {
    static const int64_t order[][2] = {{0, 1}, {1, 2}, {2, -1}, {2, 1}, {2, 2}, {0, 1},
                                       {2, 0}, {0, 2}, {1, -1}, {1, 0}, {2, 1}};
    int64_t size = seqpar_dtype_bytes(ctx->device->storage);
    void *group = NULL;
    double got[701], want[701];
    seqpar_status status = seqpar_shards_gather(ctx, shards, params->data, elements);
    for (size_t i = 0; !status && i < sizeof order / sizeof *order; i++) {
        int64_t g = order[i][0], first = shards->blocks.group_tensor[g];
        status = seqpar_shards_use(ctx, shards, g, order[i][1], &group);
        for (int64_t t = first; !status && t < shards->blocks.group_tensor[g + 1]; t++)
            if (memcmp((char *)group +
                           (room_tensors[t].offset - room_tensors[first].offset) * size,
                       params->data + room_tensors[t].offset * size,
                       (size_t)(room_end(t) - room_tensors[t].offset) * (size_t)size))
                status = seqpar_fail(ctx->error, SEQPAR_ERR_STEP, "tensor %s differs in use %d",
                                     room_tensors[t].name, (int)i);
    }
    if (!status) status = seqpar_shards_use(ctx, shards, -1, -1, &group);
    if (!status && (group || shards->held[0].whole.data || shards->held[1].whole.data))
        status = seqpar_fail(ctx->error, SEQPAR_ERR_STEP, "a group was not dropped");
    if (!status) status = seqpar_shards_read(ctx, shards, got, 2, 1024 - 350, 701);
    seqpar_device_read(ctx->device, want, params->data, room_tensors[2].offset + 1024 - 350,
                       701, ctx->device->storage);
    if (!status && memcmp(got, want, sizeof got))
        status = seqpar_fail(ctx->error, SEQPAR_ERR_STEP, "a part across two owners differs");
    return status;
}

static seqpar_status room_rank(seqpar_comm *world, void *user) {
    room_run *run = user;
    seqpar_device *device = test_device(run->way->reference, 1);
    seqpar_optim_desc desc = {.zero_stage = run->way->zero_stage,
                              .beta1 = .9,
                              .beta2 = .95,
                              .eps = 1e-8,
                              .decay = .1,
                              .max_norm = 1};
    int64_t size = seqpar_dtype_bytes(device->storage), i, k;
    room params = room_new(run->elements * size, world->rank % 2 == 0);
    double *values = calloc((size_t)run->elements, sizeof *values);
    char *used = calloc((size_t)run->elements, 1);
    seqpar_ctx ctx;
    seqpar_optim optim;
    seqpar_shards shards;
    memset(&optim, 0, sizeof optim);
    memset(&shards, 0, sizeof shards);
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, run->way->sp);
    if (!status) status = seqpar_optim_open(&ctx, &optim, room_tensors, ROOM_TENSORS, &desc);
    for (i = 0; i < ROOM_TENSORS; i++) {
        for (k = room_tensors[i].offset; k < room_end(i); k++) {
            values[k] = room_value(-1, k, 0);
            used[k] = 1;
        }
        if (desc.zero_stage == 3) continue;
        seqpar_device_write(device, params.data, room_tensors[i].offset,
                            values + room_tensors[i].offset,
                            room_end(i) - room_tensors[i].offset, device->storage);
    }
    if (!status && desc.zero_stage == 3) status = room_shards_write(&ctx, &shards, values);
    for (i = 0; !status && i < ROOM_STEPS; i++) {
        status = room_step(&ctx, run, &optim, &shards, params.data);
        if (!status)
            status = room_read(&ctx, &optim, world->rank ? values : run->gradient,
                               SEQPAR_STATE_GRADIENT);
        for (k = SEQPAR_STATE_M; !status && k <= SEQPAR_STATE_MASTER; k++)
            if (seqpar_optim_keeps(&ctx, &optim, (int)k))
                status = room_read(
                    &ctx, &optim,
                    world->rank ? values : run->state + (k - SEQPAR_STATE_M) * run->elements,
                    (int)k);
    }
    if (!status && desc.zero_stage == 3)
        status = room_shards_read(&ctx, &shards, &params, run->elements);
    for (k = 0; k < run->elements * size; k++)
        if (!used[k / size] && params.data[k] != (char)0xff) {
            run->spoiled++;
            break;
        }
    if (world->rank == 0) {
        run->norm = optim.norm;
        for (i = 0; i < ROOM_TENSORS; i++)
            seqpar_device_read(device, run->params + room_tensors[i].offset, params.data,
                               room_tensors[i].offset, room_end(i) - room_tensors[i].offset,
                               device->storage);
    }
    if (desc.zero_stage == 3) seqpar_shards_close(&ctx, &shards);
    seqpar_optim_close(&ctx, &optim);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    room_free(&params);
    free(values);
    free(used);
    return status;
}

static void room_start(room_run *run, const seqpar_batch *batch, const room_way *way) {
    seqpar_error error = {0};
    memset(run, 0, sizeof *run);
    run->way = way;
    run->batch = batch;
    run->elements = room_end(ROOM_TENSORS - 1);
    run->params = calloc((size_t)(5 * run->elements), sizeof *run->params);
    run->gradient = run->params + run->elements;
    run->state = run->gradient + run->elements;
    test_expect(!seqpar_run_threads(way->dp * way->sp, room_rank, run, &error),
                "D=%lld P=%lld: %s", (long long)way->dp, (long long)way->sp, error.text);
    test_expect(!run->spoiled,
                "D=%lld P=%lld: %d ranks or nodes lost what lies between tensors",
                (long long)way->dp, (long long)way->sp, run->spoiled);
}

/* The gradient of the first step's kind: plain sums over all leaves. */
static void room_expect_sums(const room_run *run) {
    seqpar_share share;
    double *want = calloc((size_t)run->elements, sizeof *want);
    seqpar_split(NULL, &share, run->batch->row, run->batch->rows,
                 &(seqpar_split_desc){SEQPAR_LAYOUT_CONTIGUOUS, 1, 0});
    for (int64_t i = 0; i < ROOM_TENSORS; i++)
        for (int64_t k = room_tensors[i].offset; k < room_end(i); k++)
            for (int64_t p = 0; p < share.count; p++)
                want[k] += room_value(share.pieces[p].leaf, k, 0) +
                           (room_tensors[i].group == 0 ? room_value(share.pieces[p].leaf, k, 1)
                                                       : 0);
    test_expect(test_distance(run->gradient, want, run->elements) <=
                    (run->way->reference == 1 ? 1e-13 : 1e-6),
                "the gradient is %.2e off", test_distance(run->gradient, want, run->elements));
    free(want);
    seqpar_share_free(&share);
}

static void test_room(int reference) {
    static const int64_t shapes[][2] = {{1, 1}, {1, 2}, {3, 1}, {1, 4}, {2, 2},
                                        {1, 5}, {2, 4}, {8, 1}, {1, 8}, {1, 3}};
    model_task task;
    room_run one, other;
    room_way plain_way = {1, 1, 1, reference, 0, SEQPAR_LAYOUT_CONTIGUOUS};
    memset(&task, 0, sizeof task);
    random_batch(&task.batch, ROOM_DOCUMENTS, 40, 53, 61, 4);
    test_expect(task.batch.rows >= 8, "only %lld rows", (long long)task.batch.rows);
    room_start(&one, &task.batch, &plain_way);
    room_expect_sums(&one);
    for (size_t i = 0; i < 2 * (sizeof shapes / sizeof *shapes); i++) {
        room_way way = {shapes[i / 2][0],
                        shapes[i / 2][1],
                        1 + (int64_t)i % 3,
                        reference,
                        i % 2 ? 3 : (int)(i + 1) % 3,
                        layout_of_grid((int64_t)i)};
        room_start(&other, &task.batch, &way);
        test_expect(
            !memcmp(one.params, other.params, (size_t)(5 * one.elements) * sizeof(double)) &&
                one.norm == other.norm,
            "D=%lld P=%lld A=%lld zero %d: not the bits of one rank", (long long)way.dp,
            (long long)way.sp, (long long)way.accumulation, way.zero_stage);
        free(other.params);
    }
    free(one.params);
    seqpar_batch_free(&task.batch);
    test_end("room_%s: tensors at odd places, arrays of exactly their size",
             (const char *[]){"fp32", "fp64", "bf16", "naive_bf16"}[reference]);
}

/* ---- what is too small is named, before a byte moves ---- */

typedef struct {
    const seqpar_batch *batch;
    int which;
} room_refusal;

static seqpar_status room_refused_rank(seqpar_comm *world, void *user) {
    const room_refusal *what = user;
    room_way way = {1, world->size, 2, 0, 2, SEQPAR_LAYOUT_ZIGZAG};
    room_run run = {.way = &way, .batch = what->batch, .elements = room_end(ROOM_TENSORS - 1)};
    seqpar_tensor tensors[ROOM_TENSORS];
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_optim_desc desc = {.zero_stage = 2, .beta1 = .9, .beta2 = .95, .eps = 1e-8};
    seqpar_step_nodes n = {0};
    seqpar_optim_part part = {SEQPAR_STATE_M, 2, 0, 1};
    double few[4], *params = calloc((size_t)run.elements, sizeof *params);
    seqpar_ctx ctx;
    seqpar_optim optim;
    memset(&optim, 0, sizeof optim);
    memcpy(tensors, room_tensors, sizeof tensors);
    if (what->which == 0) tensors[3].offset--; /* into the tensor before */
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, world->size);
    if (!status) status = seqpar_optim_open(&ctx, &optim, tensors, ROOM_TENSORS, &desc);
    if (!status && what->which == 1)
        status = seqpar_step_end(&ctx, &optim, params, run.elements, .01);
    if (!status && what->which == 2) {
        part.state = SEQPAR_STATE_GRADIENT;
        status = seqpar_optim_read(&ctx, &optim, few, &part);
    }
    if (!status && what->which == 3) {
        part.state = SEQPAR_STATE_MASTER;
        status = seqpar_optim_read(&ctx, &optim, few, &part);
    }
    if (!status && what->which == 4) {
        part.first = 37 * 61;
        status = seqpar_optim_read(&ctx, &optim, few, &part);
    }
    if (!status)
        status = seqpar_step_begin(&ctx, &optim, run.batch->row, run.batch->rows, way.layout,
                                   way.accumulation);
    n.nodes = params;
    n.group = 1;
    n.node_stride = 5332;
    n.elements = 5332 * 40; /* c, d, e */
    if (what->which == 5) n.elements = 5331;
    if (what->which == 6) n.node_stride = 5331;
    if (what->which == 7) n.group = ROOM_GROUPS;
    if (what->which == 8) n.micro_batch = 2;
    if (!status && what->which < 9) status = seqpar_step_gradient(&ctx, &optim, &n);
    if (!status && what->which >= 9) status = room_gradient(&ctx, &run, &optim, 0, 1, 0);
    if (!status && what->which == 10)
        for (int64_t g = 0; !status && g < ROOM_GROUPS; g++) {
            if (g != 1) status = room_gradient(&ctx, &run, &optim, 0, g, 0);
            if (!status) status = room_gradient(&ctx, &run, &optim, 1, g, 0);
        }
    if (!status)
        status = seqpar_step_end(&ctx, &optim, params, run.elements - (what->which == 10), .01);
    seqpar_optim_close(&ctx, &optim);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    free(params);
    return status;
}

static void test_room_refused(void) {
    static const struct {
        seqpar_status status;
        const char *words[2];
    } want[] = {{SEQPAR_ERR_SIZE, {"tensor d", "begin at 3387"}},
                {SEQPAR_ERR_STEP, {"no step was begun", "seqpar_step_begin"}},
                {SEQPAR_ERR_OPTION, {"gradient", "needs seqpar_step_norm"}},
                {SEQPAR_ERR_OPTION, {"master", "bf16"}},
                {SEQPAR_ERR_SIZE, {"2257", "2257 elements"}},
                {SEQPAR_ERR_SIZE, {"5332", "5331"}},
                {SEQPAR_ERR_SIZE, {"node_stride 5331", "tensor e"}},
                {SEQPAR_ERR_STEP, {"group 3", "0 to 2"}},
                {SEQPAR_ERR_STEP, {"micro-batch 2", "0 to 1"}},
                {SEQPAR_ERR_STEP, {"group 0 was given", "0 of 2"}},
                {SEQPAR_ERR_SIZE, {"8547", "tensor f ends at 8548"}}};
    model_task task;
    memset(&task, 0, sizeof task);
    random_batch(&task.batch, ROOM_DOCUMENTS, 40, 53, 61, 4);
    for (int i = 0; i < (int)(sizeof want / sizeof *want); i++)
        /* one rank has one node, and no stride */
        for (int64_t ranks = i == 6 ? 2 : 1; ranks <= 2; ranks++) {
            room_refusal refusal = {&task.batch, i};
            seqpar_error error = {0};
            seqpar_status status = seqpar_run_threads(ranks, room_refused_rank, &refusal,
                                                      &error);
            test_expect(status == want[i].status && strstr(error.text, want[i].words[0]) &&
                            strstr(error.text, want[i].words[1]),
                        "case %d on %lld ranks: status %d, %s", i, (long long)ranks, status,
                        error.text);
        }
    seqpar_batch_free(&task.batch);
    test_end("room_refused");
}

/* ---- shards ---- */

typedef struct {
    const char *name, *words;
    seqpar_status status;
} shards_refusal;
enum {
    SHARDS_GROUP,
    SHARDS_PART,
    SHARDS_ROOM,
    SHARDS_WHOLE,
    SHARDS_SHARED,
    SHARDS_SLICE,
    SHARDS_TEXTS
};
static const shards_refusal shards_refusals[] = {
    [SHARDS_GROUP] = {"group", "group 3, next -1: give 0 to 2, or -1 for none",
                      SEQPAR_ERR_SIZE},
    [SHARDS_PART] = {"part", "first 2000, count 701 of tensor 2 are out of range",
                     SEQPAR_ERR_SIZE},
    [SHARDS_ROOM] = {"room", "8547 elements, but tensor f ends at 8548", SEQPAR_ERR_SIZE},
    [SHARDS_WHOLE] = {"whole", "are 8548 elements, but at zero_stage 3", SEQPAR_ERR_SIZE},
    [SHARDS_SHARED] = {"shared", "zero_stage is 3; use 1 or 2", SEQPAR_ERR_OPTION},
    [SHARDS_SLICE] = {"slice", "sharded parameters: slice is 2048 on rank 1", SEQPAR_ERR_STEP},
    [SHARDS_TEXTS] = {"texts", "call seqpar_llama_gather first", SEQPAR_ERR_STEP},
};

/* A model at its owners makes no texts. */
static seqpar_status shards_generate(seqpar_ctx *ctx) {
    const seqpar_llama_config config = {.layers = 1,
                                        .hidden = 8,
                                        .heads = 1,
                                        .kv_heads = 1,
                                        .head_dim = 8,
                                        .intermediate = 8,
                                        .vocab = 11};
    const seqpar_llama_prompt prompt = {(const int32_t[]){3}, 1, 0};
    const seqpar_llama_sample_desc desc = {.max_new_tokens = 2, .top_p = 1};
    seqpar_llama model;
    seqpar_llama_text text;
    seqpar_status status = seqpar_llama_open_sharded(ctx, &model, &config, 0, 0);
    if (!status) status = seqpar_llama_generate(ctx, &model, &text, &prompt, 1, &desc);
    seqpar_llama_close(ctx, &model);
    return status;
}

/* A step whose end is given whole parameters. */
static seqpar_status shards_step(seqpar_ctx *ctx, seqpar_optim *optim, double *values,
                                 int64_t elements) {
    seqpar_status status = seqpar_step_begin_plain(ctx, optim, 1);
    for (int64_t g = 0; !status && g < ROOM_GROUPS; g++) {
        seqpar_step_nodes n = {
            .nodes = values, .node_stride = elements, .elements = elements, .group = g};
        status = seqpar_step_gradient(ctx, optim, &n);
    }
    return status ? status : seqpar_step_end(ctx, optim, values, elements, .01);
}

static seqpar_status shards_refused_rank(seqpar_comm *world, void *user) {
    int which = *(const int *)user;
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_optim_desc desc = {
        .kind = SEQPAR_OPTIM_SGD, .zero_stage = 3, .params_shared = which == SHARDS_SHARED};
    int64_t elements = room_end(ROOM_TENSORS - 1);
    double *values = calloc((size_t)elements, sizeof *values);
    void *group;
    seqpar_ctx ctx;
    seqpar_optim optim;
    seqpar_shards shards;
    memset(&optim, 0, sizeof optim);
    memset(&shards, 0, sizeof shards);
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, world->size);
    if (!status) status = seqpar_optim_open(&ctx, &optim, room_tensors, ROOM_TENSORS, &desc);
    if (!status)
        status = seqpar_shards_open(&ctx, &shards, room_tensors, ROOM_TENSORS,
                                    which == SHARDS_SLICE && world->rank ? 2048 : 0, 0);
    if (!status && which == SHARDS_GROUP)
        status = seqpar_shards_use(&ctx, &shards, ROOM_GROUPS, -1, &group);
    if (!status && which == SHARDS_PART)
        status = seqpar_shards_write(&ctx, &shards, values, 2, 2000, 701);
    if (!status && which == SHARDS_ROOM)
        status = seqpar_shards_gather(&ctx, &shards, values, elements - 1);
    if (!status && which == SHARDS_WHOLE) status = shards_step(&ctx, &optim, values, elements);
    if (!status && which == SHARDS_TEXTS) status = shards_generate(&ctx);
    seqpar_shards_close(&ctx, &shards);
    seqpar_optim_close(&ctx, &optim);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    free(values);
    return status;
}

static void test_shards_refused(void) {
    for (int i = 0; i < (int)(sizeof shards_refusals / sizeof *shards_refusals); i++)
        for (int64_t ranks = 2; ranks <= 5; ranks += 3) {
            const shards_refusal *want = &shards_refusals[i];
            seqpar_error error = {0};
            seqpar_status status = seqpar_run_threads(ranks, shards_refused_rank, &i, &error);
            test_expect(status == want->status && strstr(error.text, want->words),
                        "%s on %lld ranks: status %d, %s", want->name, (long long)ranks, status,
                        error.text);
        }
    test_end("shards_refused");
}

/* ---- attention and head in arrays of exactly their size ---- */

typedef struct {
    const seqpar_row *rows;
    int64_t row_count, heads, kv_heads, head_dim, vocab;
    int reference, at_end, layout, schedule;
} room_case;

static room room_random(seqpar_device *device, int64_t count, int dtype, int at_end) {
    room r = room_new(count * seqpar_dtype_bytes(dtype), at_end);
    double *values = malloc((size_t)(count + 1) * sizeof *values);
    for (int64_t i = 0; i < count; i++) values[i] = room_value(count, i, 1) * .3;
    seqpar_device_write(device, r.data, 0, values, count, dtype);
    free(values);
    return r;
}

static seqpar_status room_attention(seqpar_ctx *ctx, const room_case *c, seqpar_attn *attn) {
    enum { IN = 5, ALL = 9 };
    int64_t n = seqpar_attn_share(attn)->tokens, wide = c->heads * c->head_dim;
    int64_t narrow = c->kv_heads * c->head_dim;
    /* q, k, v, dout, out, lse, dq, dk, dv */
    const int64_t width[ALL] = {wide,     narrow, narrow, wide,  wide,
                                c->heads, wide,   narrow, narrow};
    room r[ALL];
    for (int i = 0; i < ALL; i++)
        r[i] = i < 4 ? room_random(ctx->device, n * width[i], ctx->device->storage, c->at_end)
                     : room_new(n * width[i] *
                                    seqpar_dtype_bytes(i == 5 ? ctx->device->accumulator
                                                              : ctx->device->storage),
                                c->at_end);
    seqpar_attn_io io = {.q = r[0].data,
                         .k = r[1].data,
                         .v = r[2].data,
                         .dout = r[3].data,
                         .out = r[4].data,
                         .lse = r[5].data,
                         .dq = r[6].data,
                         .dk = r[7].data,
                         .dv = r[8].data};
    seqpar_status status = seqpar_attn_forward(ctx, attn, &io);
    if (!status) status = seqpar_attn_backward(ctx, attn, &io);
    for (int i = 0; i < ALL; i++) room_free(&r[i]);
    return status;
}

static seqpar_status room_head(seqpar_ctx *ctx, const room_case *c, const seqpar_share *share,
                               const seqpar_token_fold *fold) {
    int acc = ctx->device->accumulator;
    int64_t n = share->tokens, hidden = c->heads * c->head_dim, width = c->vocab * hidden;
    int64_t size = seqpar_dtype_bytes(acc);
    seqpar_vocab_desc desc = {.hidden = hidden, .vocab = c->vocab, .rows_max = 7};
    int64_t places = seqpar_vocab_node_count(share, fold, &desc);
    room x = room_random(ctx->device, n * hidden, ctx->device->storage, c->at_end),
         table = room_random(ctx->device, width, ctx->device->storage, c->at_end);
    room dx = room_new(n * hidden * seqpar_dtype_bytes(ctx->device->storage), c->at_end),
         nodes = room_new(places * width * size, c->at_end), ids = room_new(n * 4, c->at_end),
         value[4], seed[4];
    for (int64_t t = 0; t < n; t++)
        ((int32_t *)(void *)ids.data)[t] = (int32_t)(t * 7 % c->vocab);
    for (int i = 0; i < 4; i++) {
        value[i] = room_new(n * size, c->at_end);
        seed[i] = room_random(ctx->device, n, acc, c->at_end);
    }
    seqpar_vocab_io io = {
        .hidden = x.data,
        .table = table.data,
        .targets = (int32_t *)(void *)ids.data,
        .tokens = n,
        .values = {value[0].data, value[1].data, value[2].data, value[3].data},
        .seeds = {seed[0].data, seed[1].data, seed[2].data, seed[3].data},
        .dhidden = dx.data,
        .nodes = nodes.data,
        .node_stride = width};
    seqpar_status status = seqpar_vocab_forward(ctx, &io, &desc);
    if (!status) status = seqpar_vocab_backward(ctx, &io, share, fold, &desc);
    for (int i = 0; i < 4; i++) {
        room_free(&value[i]);
        room_free(&seed[i]);
    }
    room_free(&x);
    room_free(&table);
    room_free(&dx);
    room_free(&nodes);
    room_free(&ids);
    return status;
}

/* Leaves that the caller computes give the nodes of the device's own fold. */
enum { LEAF_WIDTH = 37 };

typedef struct leaf_data {
    const char *values;
    int64_t bytes;
} leaf_data;

static seqpar_status leaf_copied(void *user, void *value, int64_t leaf) {
    const leaf_data *d = user;
    memcpy(value, d->values + leaf * d->bytes, (size_t)d->bytes);
    return SEQPAR_OK;
}

static seqpar_status leaf_fails(void *user, void *value, int64_t leaf) {
    (void)user, (void)value;
    return leaf >= 0 ? SEQPAR_ERR_OPTION : SEQPAR_OK;
}

static seqpar_status room_leaves(seqpar_ctx *ctx, const room_case *c, const seqpar_share *share,
                                 const seqpar_token_fold *fold) {
    int acc = ctx->device->accumulator;
    int64_t bytes = LEAF_WIDTH * seqpar_dtype_bytes(acc);
    room leaves = room_random(ctx->device, share->count * LEAF_WIDTH, acc, c->at_end),
         want = room_new(fold->node_count * bytes, c->at_end),
         got = room_new(fold->node_count * bytes, c->at_end);
    leaf_data data = {leaves.data, bytes};
    seqpar_leaves copied = {leaf_copied, &data, LEAF_WIDTH};
    seqpar_leaves fails = {leaf_fails, &data, LEAF_WIDTH};
    seqpar_fold_args a = {.fold = {.program = fold->program,
                                   .program_count = fold->program_count,
                                   .depth = fold->depth,
                                   .store = want.data,
                                   .store_stride = LEAF_WIDTH},
                          .leaf_data = leaves.data,
                          .leaf_stride = LEAF_WIDTH,
                          .count = LEAF_WIDTH};
    seqpar_status status = ctx->device->fold(ctx->device, &a, ctx->queue);
    if (!status) status = seqpar_fold_leaves(ctx, got.data, LEAF_WIDTH, fold, &copied);
    if (!status && memcmp(got.data, want.data, (size_t)(fold->node_count * bytes)))
        status = seqpar_fail(ctx->error, SEQPAR_ERR_STEP, "leaves give other nodes");
    seqpar_error *kept = ctx->error, own;
    memset(&own, 0, sizeof own);
    ctx->error = &own;
    if (!status && share->count &&
        seqpar_fold_leaves(ctx, got.data, LEAF_WIDTH, fold, &fails) != SEQPAR_ERR_OPTION)
        status = seqpar_fail(kept, SEQPAR_ERR_STEP, "a leaf's failure is not passed on");
    ctx->error = kept;
    room_free(&leaves);
    room_free(&want);
    room_free(&got);
    return status;
}

static seqpar_status room_case_rank(seqpar_comm *world, void *user) {
    const room_case *c = user;
    seqpar_device *device = test_device(c->reference, 1);
    seqpar_attn_desc desc = {.heads = c->heads,
                             .kv_heads = c->kv_heads,
                             .head_dim = c->head_dim,
                             .layout = c->layout,
                             .schedule = c->schedule};
    seqpar_optim_desc sgd = {.kind = SEQPAR_OPTIM_SGD};
    seqpar_tensor table = {"table", c->vocab, c->heads * c->head_dim, 0, 1, 0};
    seqpar_optim optim;
    seqpar_attn *attn = NULL;
    seqpar_ctx ctx;
    const seqpar_token_fold *fold;
    memset(&optim, 0, sizeof optim);
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, world->size);
    if (!status) status = seqpar_attn_open(&ctx, &attn, c->rows, c->row_count, &desc);
    if (!status) status = room_attention(&ctx, c, attn);
    if (!status) status = seqpar_optim_open(&ctx, &optim, &table, 1, &sgd);
    if (!status) status = seqpar_step_begin(&ctx, &optim, c->rows, c->row_count, c->layout, 1);
    if (!status) status = seqpar_step_fold(&ctx, &optim, &fold, seqpar_attn_share(attn), 0);
    if (!status) status = room_head(&ctx, c, seqpar_attn_share(attn), fold);
    if (!status) status = room_leaves(&ctx, c, seqpar_attn_share(attn), fold);
    seqpar_optim_close(&ctx, &optim);
    seqpar_attn_close(&ctx, attn);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static void test_room_beside(int reference) {
    static const int64_t dims[] = {10, 5, 17, 64};
    model_task task;
    memset(&task, 0, sizeof task);
    random_batch(&task.batch, 4, 40, 53, 61, 4);
    for (int64_t ranks = 1; ranks <= 3; ranks++)
        for (int i = 0; i < 8; i++) {
            room_case c = {task.batch.row,
                           task.batch.rows,
                           6,
                           3,
                           dims[i / 2],
                           53,
                           reference,
                           i % 2,
                           layout_of_grid(i % 3),
                           (int)(i + ranks) % 3};
            seqpar_error error = {0};
            test_expect(!seqpar_run_threads(ranks, room_case_rank, &c, &error),
                        "P=%lld head_dim %lld: %s", (long long)ranks, (long long)c.head_dim,
                        error.text);
        }
    seqpar_batch_free(&task.batch);
    test_end("room_%s: attention and head touch nothing beside their arrays",
             (const char *[]){"fp32", "fp64", "bf16", "naive_bf16"}[reference]);
}

int main(int argc, char **argv) {
    const char *fewer = getenv("TEST_WAYS"); /* sanitizers are slow */
    int64_t ways = fewer ? atoll(fewer) : 0;
    test_begin(argc, argv);
    for (int device = 0; device < 3; device++) TEST(test_room(device));
    for (int device = 0; device < 3; device++) TEST(test_room_beside(device));
    TEST(test_room_refused());
    TEST(test_shards_refused());
    TEST(test_masters(2));
    TEST(test_masters(3));
    TEST(test_cost());
    TEST(test_law());
    TEST(test_forms(0, 8, 0, 0.02));
    TEST(test_forms(1, 8, 0, 0.02));
    TEST(test_forms(2, 0, 1, 0.1));
    TEST(test_forms(2, 8, 1, 0.1));
    TEST(test_forms(3, 8, 1, 0.1));
    for (int kind = 0; kind < 4; kind++) TEST(test_checkpoints(0, kind));
    TEST(test_checkpoints(1, 0));
    TEST(test_checkpoints(2, 3));
    for (int kind = 0; kind < 3; kind++) TEST(test_mlp_tiles(0, kind));
    TEST(test_mlp_tiles(1, 1));
    TEST(test_mlp_tiles(2, 2));
    TEST(test_mlp_tiles(3, 0));
    TEST(test_ways(0, 0, ways ? ways : 44));
    TEST(test_ways(0, 1, ways ? ways : 33));
    TEST(test_ways(1, 1, ways ? 1 : 11));
    TEST(test_ways(2, 0, ways ? 1 : 22));
    TEST(test_ways(2, 1, ways ? 2 : 11));
    TEST(test_ways(3, 0, ways ? 1 : 4));
    TEST(test_ways(0, 2, ways ? ways / 4 + 1 : 33));
    TEST(test_ways(2, 2, ways ? 1 : 11));
    TEST(test_ways(0, 3, ways ? ways / 4 + 1 : 33));
    TEST(test_ways(1, 3, ways ? 1 : 11));
    TEST(test_ways(2, 3, ways ? 1 : 11));
    return test_summary();
}
