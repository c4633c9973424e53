/* SPDX-License-Identifier: MIT OR Unlicense */
/* The optimizer alone: gradients that are plain sums, given without rows, and read before
   the update. Integers are summed exactly in any order, so every number of ranks and
   micro-batches must give the bits of one. */
#include "support/test.h"
#include <unistd.h>
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "support/small_gradient.h"
#include "support/late_moves.h"

/* two groups, a gap between tensors, a tensor of more than one block, and with `slice` 1 of two
   slices: 64 rows and 30 */
enum { SMALL = 21, GAP = 5, LARGE = 1504, ELEMENTS = SMALL + GAP + LARGE, STEPS = 3 };
static const seqpar_tensor tensors[] = {{"small", 3, 7, 0, 1, 0},
                                        {"large", 94, 16, SMALL + GAP, 0, 1}};

typedef struct way {
    int64_t ranks, accumulation;
    int stage, kind;
    double max_norm;
    int shared; /* all ranks have rank 0's parameters */
    int sliced; /* 1: slices of the large tensor; 2: which are given one by one, the last first */
    int slow;   /* the last rank updates late */
} way;

typedef struct result {
    float params[ELEMENTS];
    double gradient[ELEMENTS], norm;
} result;

/* Element i of the gradient of part `part` of a step: what the parts of one way give in all
   is the same for every way, as they are cut from the same 120 portions. */
enum { PORTIONS = 120 };
static double portion(int step, int64_t part, int64_t i) {
    return (double)((i * 7 + part * 13 + step * 5) % 31 - 15);
}

static void part_of(float *g, int step, int64_t part, int64_t parts) {
    memset(g, 0, ELEMENTS * sizeof *g);
    for (int64_t p = PORTIONS * part / parts; p < PORTIONS * (part + 1) / parts; p++)
        for (int64_t i = 0; i < ELEMENTS; i++) g[i] += (float)portion(step, p, i);
    for (int64_t i = SMALL; i < SMALL + GAP; i++) g[i] = NAN; /* nobody's */
}

/* A slice at a time, without the elements before and behind it. */
static seqpar_status give_slices(seqpar_ctx *ctx, seqpar_optim *optim, const float *g,
                                 int64_t micro) {
    seqpar_status status = SEQPAR_OK;
    int64_t first, count, given = 0;
    for (int64_t group = 1; group >= 0; group--)
        for (int64_t i = 2; !status && i >= 0; i--) {
            if (!seqpar_optim_slice(optim, group, i, &first, &count)) continue;
            seqpar_step_nodes nodes = {.nodes = g + tensors[group].offset + first,
                                       .elements = count,
                                       .micro_batch = micro,
                                       .group = group,
                                       .first = first,
                                       .count = count};
            status = seqpar_step_gradient(ctx, optim, &nodes);
            given++;
        }
    test_expect(status || given == 3, "%lld slices, not 3", (long long)given);
    return status;
}

static seqpar_status give(seqpar_ctx *ctx, seqpar_optim *optim, const float *g, int64_t micro) {
    seqpar_status status = SEQPAR_OK;
    for (int64_t group = 1; !status && group >= 0; group--) {
        seqpar_step_nodes nodes = {.nodes = g + tensors[group].offset,
                                   .elements = group ? LARGE : SMALL,
                                   .micro_batch = micro,
                                   .group = group};
        status = seqpar_step_gradient(ctx, optim, &nodes);
    }
    return status;
}

static seqpar_status read_gradient(seqpar_ctx *ctx, seqpar_optim *optim, double *gradient) {
    seqpar_status status = SEQPAR_OK;
    for (int64_t t = 0; !status && t < 2; t++) {
        seqpar_optim_part part = {SEQPAR_STATE_GRADIENT, t, 0, t ? LARGE : SMALL};
        status = seqpar_optim_read(ctx, optim, gradient + tensors[t].offset, &part);
    }
    return status;
}

/* One step; but in step 1 the gradient is read before the parameters change, too. */
static seqpar_status step_of(seqpar_ctx *ctx, seqpar_optim *optim, const way *w, result *r,
                             float *params, int step) {
    static _Thread_local float g[ELEMENTS];
    float before[ELEMENTS];
    double after[ELEMENTS] = {0};
    int64_t size = ctx->world->size, rank = ctx->world->rank;
    seqpar_status status = seqpar_step_begin_plain(ctx, optim, w->accumulation);
    for (int64_t a = 0; !status && a < w->accumulation; a++) {
        part_of(g, step, a * size + rank, size * w->accumulation);
        status = w->sliced == 2 ? give_slices(ctx, optim, g, a) : give(ctx, optim, g, a);
    }
    memcpy(before, params, sizeof before);
    if (!status && step != 1) status = seqpar_step_norm(ctx, optim);
    if (!status && step != 1) status = read_gradient(ctx, optim, r->gradient);
    test_expect(status || !memcmp(before, params, sizeof before), "the norm changed them");
    if (!status) status = seqpar_step_end(ctx, optim, params, ELEMENTS, 1e-2);
    memcpy(r->params, params, sizeof r->params); /* at once: what follows waits for all ranks */
    if (!status) status = read_gradient(ctx, optim, after);
    if (!status && step != 1)
        test_expect(!memcmp(after, r->gradient, sizeof after), "the gradient changed");
    r->norm = optim->norm;
    return status;
}

/* ---- a device that updates late ---- */

static seqpar_status (*quick_adamw)(seqpar_device *, const seqpar_update_args *, void *);

static seqpar_status slow_adamw(seqpar_device *device, const seqpar_update_args *a,
                                void *queue) {
    usleep(20000);
    return quick_adamw(device, a, queue);
}

typedef struct job {
    const way *way;
    result *result; /* (ranks) */
    float shared[ELEMENTS];
} job;

static seqpar_status rank_main(seqpar_comm *world, void *user) {
    job *j = (job *)user;
    result *r = &j->result[world->rank];
    seqpar_optim_desc desc = {.kind = j->way->kind,
                              .zero_stage = j->way->stage,
                              .beta1 = 0.9,
                              .beta2 = 0.99,
                              .eps = 1e-8,
                              .decay = 0.1,
                              .max_norm = j->way->max_norm,
                              .params_shared = j->way->shared,
                              .slice = j->way->sliced != 0};
    float own[ELEMENTS], *params = j->way->shared ? j->shared : own;
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_optim optim;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, world->size);
    if (!status) status = seqpar_optim_open(&ctx, &optim, tensors, 2, &desc);
    if (j->way->slow && world->rank == world->size - 1) {
        quick_adamw = device->adamw;
        device->adamw = slow_adamw;
    }
    for (int64_t i = 0; i < ELEMENTS && (params == own || !world->rank); i++)
        params[i] = 0.01f * (float)(i % 17);
    if (!status) status = seqpar_comm_barrier(world);
    for (int step = 0; !status && step < STEPS; step++)
        status = step_of(&ctx, &optim, j->way, r, params, step);
    if (!status) seqpar_optim_close(&ctx, &optim);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

/* ---- the same step in fp64, written down from the formulas ---- */

static double expected_gradient(int step, int64_t i) {
    double sum = 0;
    if (i >= SMALL && i < SMALL + GAP) return 0;
    for (int64_t p = 0; p < PORTIONS; p++) sum += portion(step, p, i);
    return sum;
}

static void expected(const way *w, double *params, double *norm) {
    static double m[ELEMENTS], v[ELEMENTS], g[ELEMENTS];
    memset(m, 0, sizeof m);
    memset(v, 0, sizeof v);
    for (int64_t i = 0; i < ELEMENTS; i++) params[i] = 0.01f * (float)(i % 17);
    for (int step = 0; step < STEPS; step++) {
        double squares = 0, clip;
        for (int64_t i = 0; i < ELEMENTS; i++) {
            g[i] = expected_gradient(step, i);
            squares += g[i] * g[i];
        }
        *norm = sqrt(squares);
        clip = w->max_norm > 0 ? fmin(1, w->max_norm / (*norm + 1e-6)) : 1;
        for (int64_t i = 0; i < ELEMENTS; i++) {
            double decay = i < SMALL ? 0.1 : 0, x = clip * g[i];
            if (i >= SMALL && i < SMALL + GAP) continue;
            if (w->kind == SEQPAR_OPTIM_SGD) {
                params[i] -= 1e-2 * (x + decay * params[i]);
                continue;
            }
            params[i] *= 1 - 1e-2 * decay;
            m[i] = 0.9 * m[i] + 0.1 * x;
            v[i] = 0.99 * v[i] + 0.01 * x * x;
            params[i] -= 1e-2 * (m[i] / (1 - pow(0.9, step + 1))) /
                         (sqrt(v[i] / (1 - pow(0.99, step + 1))) + 1e-8);
        }
    }
}

static void check_ways(int kind, double max_norm) {
    static const int64_t ranks[] = {1, 2, 3, 4, 5, 8}, accumulations[] = {1, 3};
    static result one[1], many[8];
    static double params[ELEMENTS], got[ELEMENTS];
    way first = {1, 1, 0, kind, max_norm, 0, 0, 0};
    static job j, k;
    j = (job){.way = &first, .result = one};
    double norm;
    seqpar_error error;
    test_expect(!seqpar_run_threads(1, rank_main, &j, &error), "%s", error.text);
    expected(&first, params, &norm);
    for (int64_t i = 0; i < ELEMENTS; i++) {
        got[i] = one->params[i];
        test_expect(one->gradient[i] == expected_gradient(STEPS - 1, i),
                    "element %lld of the gradient is %g, the sum is %g", (long long)i,
                    one->gradient[i], expected_gradient(STEPS - 1, i));
    }
    test_expect(test_distance(got, params, ELEMENTS) < 3e-7, "off by %g from the formulas",
                test_distance(got, params, ELEMENTS));
    test_expect(fabs(one->norm - norm) < 1e-12 * norm, "norm %.17g, by hand %.17g", one->norm,
                norm);
    test_end("plain_%s_max_norm_%g", kind == SEQPAR_OPTIM_SGD ? "sgd" : "adamw", max_norm);
    for (int p = 0; p < 6; p++)
        for (int a = 0; a < 2; a++)
            for (int i = 0; i < 15; i++) {
                int shared = i % 5 / 3, stage = i % 5 % 3 + shared;
                way w = {ranks[p], accumulations[a], stage, kind, max_norm, shared, i / 5, 0};
                k = (job){.way = &w, .result = many};
                memset(many, 0, sizeof many);
                test_expect(!seqpar_run_threads(w.ranks, rank_main, &k, &error), "%s",
                            error.text);
                for (int64_t r = 0; r < w.ranks; r++)
                    test_expect(!memcmp(&many[r], one, sizeof *one),
                                "accumulation %lld, stage %d%s, slices %d: rank %lld of %lld "
                                "has other bits",
                                (long long)w.accumulation, w.stage, w.shared ? ", shared" : "",
                                w.sliced, (long long)r, (long long)w.ranks);
            }
    test_end("plain_%s_max_norm_%g_on_1_to_8_ranks", kind == SEQPAR_OPTIM_SGD ? "sgd" : "adamw",
             max_norm);
}

/* One rank updates late: nobody may see the end of the step before. */
static void check_slow_rank(void) {
    static const way w = {3, 1, 1, SEQPAR_OPTIM_ADAMW, 0, 1, 0, 1};
    static result seen[3];
    static job j;
    seqpar_error error;
    j = (job){.way = &w, .result = seen};
    test_expect(!seqpar_run_threads(3, rank_main, &j, &error), "%s", error.text);
    for (int r = 0; r < 3; r++)
        test_expect(!memcmp(seen[r].params, j.shared, sizeof j.shared),
                    "rank %d saw parameters that rank 2 had not updated yet", r);
    test_end("plain_shared_by_ranks_of_which_one_is_slow");
}

/* ---- what must be refused, and what a step that is given up leaves ---- */

typedef struct misuse {
    const char *name, *says;
} misuse;

enum {
    GIVEN_UP,
    NO_ROWS,
    NO_FOLD,
    NORM_WITHOUT_STEP,
    NORM_OF_HALF,
    NORM_TWICE,
    GRADIENT_EARLY,
    GRADIENT_GIVEN_UP,
    NORM_ON_ONE,
    PLAIN_ON_ONE,
    NO_MICRO_BATCH,
    SHARED_EVERYWHERE,
    SHARED_APART,
    SLICE_NEGATIVE,
    SLICE_BEGINS_INSIDE,
    SLICE_ENDS_INSIDE,
    SLICE_BEYOND,
    SLICE_TWICE,
    SLICE_LEFT_OUT,
    SLICE_OF_SECOND_SUM_LEFT_OUT,
    SLICE_SHORT,
    OFFLOAD_UNKNOWN,
    OFFLOAD_EARLY,
    OFFLOAD_NOWHERE,
    OFFLOAD_NO_FOLDER,
    PACKED_ODD,
    PACKED_AWAY,
    PACKED_PART,
    CHANCE_FLOATS,
    MISUSES
};
static const misuse misuses[MISUSES] = {
    [GIVEN_UP] = {"given_up", ""},
    [NO_ROWS] = {"rows_of_none", "begun without rows"},
    [NO_FOLD] = {"fold_of_none", "begun without rows"},
    [NORM_WITHOUT_STEP] = {"norm_without_step", "no step was begun"},
    [NORM_OF_HALF] = {"norm_of_half", "0 of 1 micro-batches"},
    [NORM_TWICE] = {"norm_twice", "no step was begun"},
    [GRADIENT_EARLY] = {"gradient_early", "a step is under way"},
    [GRADIENT_GIVEN_UP] = {"gradient_of_a_step_given_up",
                           "this optimizer keeps no gradient now"},
    [NORM_ON_ONE] = {"norm_on_one_rank",
                     "calls of seqpar_step_norm is 0 on rank 1 and 1 on rank 0"},
    [PLAIN_ON_ONE] = {"plain_on_one_rank", "rows"},
    [NO_MICRO_BATCH] = {"no_micro_batch", "step: 0 micro-batches on"},
    [SHARED_EVERYWHERE] = {"shared_at_stage_0", "but zero_stage is 0; use 1 or 2"},
    [SHARED_APART] = {"shared_that_are_two",
                      "the shared parameters of rank 1 are not those of rank 0"},
    [SLICE_NEGATIVE] = {"slice_negative", "slices of -1 elements are wanted"},
    [SLICE_BEGINS_INSIDE] = {"slice_begins_inside", "first 16 and count 1488 of group 1"},
    [SLICE_ENDS_INSIDE] = {"slice_ends_inside", "first 0 and count 1023 of group 1"},
    [SLICE_BEYOND] = {"slice_beyond", "not whole slices; take both from seqpar_optim_slice"},
    [SLICE_TWICE] = {"slice_twice",
                     "group 1 was given the gradient of micro-batch 0 when it had those of 1 "},
    [SLICE_LEFT_OUT] = {"slice_left_out", "0 of 1 micro-batches; run all of them"},
    [SLICE_OF_SECOND_SUM_LEFT_OUT] = {"slice_of_second_sum_left_out", "and all slices"},
    [SLICE_SHORT] = {"slice_short", "elements is 479 and node_stride"},
    [OFFLOAD_UNKNOWN] = {"offload_unknown", "offload is 4 at zero_stage 0"},
    [OFFLOAD_EARLY] = {"offload_params_of_all", "offload is 3 at zero_stage 1"},
    [OFFLOAD_NOWHERE] = {"offload_without_pool", "the device 'cpu' has no second memory pool"},
    [OFFLOAD_NO_FOLDER] = {"offload_without_folder",
                           "bytes to offload cannot be kept in a file in build/none: No such"},
    [PACKED_ODD] = {"state_of_7_bits", "state_bits is 7 and offload 0; use 0"},
    [PACKED_AWAY] = {"state_of_8_bits_offloaded", "state_bits is 8 and offload 1; use 0"},
    [PACKED_PART] = {"part_of_a_group", "first 256, count 255 cut a group of 8-bit moments"},
    [CHANCE_FLOATS] = {"floats_by_chance", "weights in bf16; the device 'cpu' has others"},
};

/* Elements of the large tensor's gradient, of either sum. */
static seqpar_status give_part(seqpar_ctx *ctx, seqpar_optim *optim, const float *g, int source,
                               int64_t first, int64_t count, int64_t elements) {
    seqpar_step_nodes nodes = {.nodes = g,
                               .elements = elements,
                               .group = 1,
                               .source = source,
                               .first = first,
                               .count = count};
    return seqpar_step_gradient(ctx, optim, &nodes);
}

/* In slices of 1,024 and 480 elements */
static seqpar_status missliced(seqpar_ctx *ctx, seqpar_optim *optim, const float *g,
                               int which) {
    seqpar_step_nodes small = {.nodes = g, .elements = SMALL};
    seqpar_status status = SEQPAR_OK;
    if (which == SLICE_BEGINS_INSIDE) return give_part(ctx, optim, g, 0, 16, 1488, LARGE);
    if (which == SLICE_ENDS_INSIDE) return give_part(ctx, optim, g, 0, 0, 1023, LARGE);
    if (which == SLICE_BEYOND) return give_part(ctx, optim, g, 0, INT64_MAX, INT64_MAX, LARGE);
    if (which == SLICE_SHORT) return give_part(ctx, optim, g, 0, 1024, 480, 479);
    status = give_part(ctx, optim, g, 0, 0, 1024, 1024);
    if (!status && which == SLICE_TWICE) return give_part(ctx, optim, g, 0, 0, 1024, 1024);
    if (!status && which == SLICE_OF_SECOND_SUM_LEFT_OUT)
        status = give_part(ctx, optim, g, 0, 1024, 480, 480);
    if (!status && which == SLICE_OF_SECOND_SUM_LEFT_OUT)
        status = give_part(ctx, optim, g, 1, 0, 1024, 1024);
    if (!status) status = seqpar_step_gradient(ctx, optim, &small);
    return status ? status : seqpar_step_norm(ctx, optim);
}

static seqpar_status misused(seqpar_ctx *ctx, seqpar_optim *optim, int which) {
    static const int64_t cu[] = {0, 4};
    static const seqpar_row row = {.tokens = 4, .cell = 1, .docs = 1, .cu_seqlens = cu};
    static _Thread_local float g[ELEMENTS];
    float params[ELEMENTS] = {0};
    double gradient[ELEMENTS];
    int64_t first, count;
    int odd = ctx->world->rank == 1;
    const seqpar_token_fold *fold;
    seqpar_share share = {0};
    seqpar_status status;
    if (which == NORM_WITHOUT_STEP) return seqpar_step_norm(ctx, optim);
    if (which == PLAIN_ON_ONE && odd)
        return seqpar_step_begin(ctx, optim, &row, 1, SEQPAR_LAYOUT_ZIGZAG, 1);
    status = seqpar_step_begin_plain(ctx, optim, which == NO_MICRO_BATCH ? 0 : 1);
    part_of(g, 0, 0, 1);
    if (status) return status;
    if (which == PACKED_PART)
        return seqpar_optim_read(ctx, optim, gradient,
                                 &(seqpar_optim_part){SEQPAR_STATE_M, 1, 256, 255});
    if (which >= SLICE_BEGINS_INSIDE) return missliced(ctx, optim, g, which);
    if (which == NO_ROWS) return seqpar_step_rows(ctx, optim, 0, &first, &count);
    if (which == NO_FOLD) return seqpar_step_fold(ctx, optim, &fold, &share, 0);
    if (which == NORM_OF_HALF) return seqpar_step_norm(ctx, optim);
    if (which == GRADIENT_EARLY) return read_gradient(ctx, optim, gradient);
    status = give(ctx, optim, g, 0);
    if (status) return status;
    if (which == NORM_ON_ONE && odd) return seqpar_step_end(ctx, optim, params, ELEMENTS, 1);
    status = seqpar_step_norm(ctx, optim);
    if (status) return status;
    if (which == NORM_TWICE) return seqpar_step_norm(ctx, optim);
    /* given up: the next step is the first */
    status = seqpar_step_begin_plain(ctx, optim, 1);
    if (!status && which == GRADIENT_GIVEN_UP) {
        if (!seqpar_step_begin_plain(ctx, optim, 0)) return SEQPAR_OK;
        *ctx->error = (seqpar_error){0}; /* the first error is kept */
        return read_gradient(ctx, optim, gradient);
    }
    if (!status) status = give(ctx, optim, g, 0);
    if (!status) status = seqpar_step_end(ctx, optim, params, ELEMENTS, 1);
    for (int64_t i = 0; !status && i < SMALL; i++)
        test_expect(optim->t == 1 && params[i] == -2 * g[i], "%g after one step along %g",
                    (double)params[i], (double)g[i]);
    return status;
}

static seqpar_status misuse_main(seqpar_comm *world, void *user) {
    int which = *(const int *)user;
    seqpar_optim_desc desc = {
        .kind = SEQPAR_OPTIM_SGD,
        .zero_stage = which == SHARED_APART || which == OFFLOAD_EARLY,
        .params_shared = which == SHARED_EVERYWHERE || which == SHARED_APART,
        .slice = which == SLICE_NEGATIVE ? -1 : which > SLICE_NEGATIVE,
        .offload = which == OFFLOAD_UNKNOWN ? 4
                   : which == OFFLOAD_EARLY ? 3
                   : which == PACKED_AWAY   ? 1
                                            : which > OFFLOAD_EARLY && which < PACKED_ODD,
        .state_bits = which == PACKED_ODD                            ? 7
                      : which == PACKED_AWAY || which == PACKED_PART ? 8
                                                                     : 0,
        .stochastic = which == CHANCE_FLOATS};
    seqpar_device *device = seqpar_device_cpu(1);
    if (which >= OFFLOAD_UNKNOWN) desc.kind = SEQPAR_OPTIM_ADAMW;
    if (which == OFFLOAD_NOWHERE) device->move = NULL;
    if (which == OFFLOAD_NO_FOLDER) device->pool_path = "build/none";
    seqpar_ctx ctx;
    seqpar_optim optim;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, world->size);
    if (!status) status = seqpar_optim_open(&ctx, &optim, tensors, 2, &desc);
    if (!status) status = misused(&ctx, &optim, which);
    seqpar_optim_close(&ctx, &optim);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static void check_misuse(int which) {
    const char *says = misuses[which].says;
    seqpar_error error;
    seqpar_status status = seqpar_run_threads(2, misuse_main, &which, &error);
    test_expect((status == SEQPAR_OK) == !*says, "status %s", seqpar_status_name(status));
    if (*says) test_expect(strstr(error.text, says) != NULL, "'%s'", error.text);
    test_end("plain_%s", misuses[which].name);
}

/* ---- the second pool ---- */

/* Moves are done in order, beside the caller, who waits for as many as they want: each takes
   what the one before has brought. */
static void check_pool(const char *path, int64_t count) {
    enum { BYTES = 1 << 22 };
    seqpar_comm *world = seqpar_comm_self();
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_buffer far = {0}, near[2] = {{0}};
    int64_t moves = 0, wrong = 0, first = 0;
    device->pool_path = path;
    test_expect(!seqpar_ctx_open(&ctx, world, device, 1) &&
                    !seqpar_buffer_new(&ctx, &far, (count + 1) * BYTES, SEQPAR_MEM_OFFLOADED) &&
                    !seqpar_buffer_new(&ctx, &near[0], BYTES, SEQPAR_MEM_SCRATCH) &&
                    !seqpar_buffer_new(&ctx, &near[1], BYTES, SEQPAR_MEM_SCRATCH),
                "%s", world->error->text);
    test_expect(ctx.memory.total == 2 * BYTES &&
                    ctx.memory.now[SEQPAR_MEM_OFFLOADED] == (count + 1) * BYTES,
                "%lld bytes in all", (long long)ctx.memory.total);
    char *data = far.data;
    for (int64_t i = 0; i < (count + 1) * BYTES; i++) wrong += data[i] != 0;
    test_expect(wrong == 0, "%lld bytes are not zero", (long long)wrong);
    for (int64_t i = 0; i < BYTES; i++) data[i] = (char)(i * 7 + i / 256);
    for (int64_t i = 0; i < count; i++) {
        device->move(device, near[i % 2].data, data + i * BYTES, BYTES, NULL);
        moves = device->move(device, data + (i + 1) * BYTES, near[i % 2].data, BYTES, NULL);
        test_expect(moves == 2 * i + 2, "%lld moves begun", (long long)moves);
        if (i == 0) first = moves;
    }
    device->moved(device, first, NULL);
    test_expect(!memcmp(data, data + BYTES, BYTES), "the first pair has not arrived");
    device->moved(device, moves, NULL);
    test_expect(!memcmp(data, data + count * BYTES, BYTES), "the last one has not arrived");
    seqpar_buffer_free(&ctx, &far);
    for (int i = 0; i < 2; i++) seqpar_buffer_free(&ctx, &near[i]);
    test_expect(ctx.memory.now[SEQPAR_MEM_OFFLOADED] == 0 && ctx.memory.total == 0, "left");
    seqpar_ctx_close(&ctx);
    seqpar_comm_free(world);
    seqpar_device_close(device);
    test_end("pool_%s_%lld", path ? "files" : "memory", (long long)count);
}

static const seqpar_tensor late_tensors[] = {
    {"a", 3, 7, 0, 0, 0}, {"b", 5, 1030, 21, 0, 1}, {"c", 2, 11, 21 + 5150, 0, 2}};
enum { LATE_GROUPS = 3, LATE_ELEMENTS = 21 + 5150 + 22 };

static double late_value(int64_t i) { return (double)(i % 2039) + 1; }

static seqpar_status late_write(seqpar_ctx *ctx, seqpar_shards *s) {
    seqpar_status status = SEQPAR_OK;
    for (int64_t t = 0; t < LATE_GROUPS; t++)
        for (int64_t i = 0, n = late_tensors[t].rows * late_tensors[t].cols; !status && i < n;
             i++) {
            double value = late_value(late_tensors[t].offset + i);
            if (seqpar_shards_owns(ctx, s, t, i, 1))
                status = seqpar_shards_write(ctx, s, &value, t, i, 1);
        }
    late_moved(ctx->device, late.begun, NULL);
    return status;
}

static seqpar_status late_main(seqpar_comm *world, void *user) {
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_shards shards = {0};
    seqpar_ctx ctx;
    (void)user;
    late_begin(device);
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, 1);
    if (!status) status = seqpar_shards_open(&ctx, &shards, late_tensors, LATE_GROUPS, 0, 1);
    if (!status) status = late_write(&ctx, &shards);
    for (int64_t g = 0; !status && g < LATE_GROUPS; g++) {
        const seqpar_tensor *t = &late_tensors[g];
        int64_t wrong = 0, n = t->rows * t->cols;
        double got[5150];
        void *params;
        status = seqpar_shards_use(&ctx, &shards, g, g + 1 < LATE_GROUPS ? g + 1 : -1, &params);
        if (status) break;
        seqpar_device_read(device, got, params, 0, n, device->storage);
        for (int64_t i = 0; i < n; i++) wrong += got[i] != late_value(t->offset + i);
        test_expect(!wrong, "rank %lld of %lld: %lld values of group %lld are wrong",
                    (long long)world->rank, (long long)world->size, (long long)wrong,
                    (long long)g);
        /* those of the next group are on their way while this one is used */
        test_expect(world->size > 1 || g + 1 == LATE_GROUPS || late.done < late.begun,
                    "group %lld was waited for before its use", (long long)g + 1);
    }
    seqpar_shards_close(&ctx, &shards);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

/* What is sent or used has been waited for; what only sets out has not. */
static void check_late_moves(int64_t ranks) {
    seqpar_error error = {0};
    test_expect(!seqpar_run_threads(ranks, late_main, NULL, &error), "%s", error.text);
    test_end("late_moves_%lld", (long long)ranks);
}

/* ---- the vocabulary projection alone ---- */

enum { TOKENS = 37, HIDDEN = 6, VOCAB = 11 };
typedef struct head_result {
    float dhidden[TOKENS * HIDDEN], dtable[VOCAB * HIDDEN], logp[TOKENS];
} head_result;

/* The table's gradient in two parts, from the dlogits that backward leaves. */
static seqpar_status head_in_parts(seqpar_ctx *ctx, const seqpar_vocab_io *of,
                                   const seqpar_share *share, const seqpar_token_fold *fold,
                                   const seqpar_vocab_desc *vocab) {
    enum { FIRST = 4 };
    float dlogits[TOKENS * VOCAB], *table = of->nodes;
    seqpar_vocab_io io = *of;
    io.nodes = NULL;
    io.dlogits = dlogits;
    seqpar_status status = seqpar_vocab_backward(ctx, &io, share, fold, vocab);
    io.nodes = table + FIRST * HIDDEN;
    if (!status)
        status = seqpar_vocab_nodes(ctx, &io, share, fold, vocab, FIRST, VOCAB - FIRST);
    io.nodes = table;
    if (!status) status = seqpar_vocab_nodes(ctx, &io, share, fold, vocab, 0, FIRST);
    if (status) return status;
    test_expect(seqpar_vocab_nodes(ctx, &io, share, fold, vocab, FIRST, VOCAB) ==
                        SEQPAR_ERR_SIZE &&
                    strstr(ctx->error->text, "first is 4 and rows 11, of a vocab of 11;"),
                "%s", ctx->error->text);
    *ctx->error = (seqpar_error){0}; /* the first would stay */
    io.dlogits = io.tokens ? NULL : dlogits;
    test_expect(!io.tokens || (seqpar_vocab_nodes(ctx, &io, share, fold, vocab, 0, 1) ==
                                   SEQPAR_ERR_SIZE &&
                               strstr(ctx->error->text, "dlogits are NULL")),
                "%s", ctx->error->text);
    *ctx->error = (seqpar_error){0};
    return SEQPAR_OK;
}

enum { PLAIN, OF_A_ROW, SHARE_ALONE, PLAIN_IN_PARTS, OF_A_ROW_IN_PARTS };
static seqpar_status head_run(seqpar_ctx *ctx, head_result *r, int64_t tokens, int whole) {
    static const int64_t cu[] = {0, TOKENS};
    const seqpar_row row = {.tokens = TOKENS, .cell = TOKENS, .docs = 1, .cu_seqlens = cu};
    const seqpar_split_desc split = {SEQPAR_LAYOUT_CONTIGUOUS, 1, 0};
    const seqpar_vocab_desc vocab = {.hidden = HIDDEN, .vocab = VOCAB, .rows_max = 8};
    float hidden[TOKENS * HIDDEN], table[VOCAB * HIDDEN], seed[TOKENS];
    int32_t targets[TOKENS];
    seqpar_optim_desc sgd = {.kind = SEQPAR_OPTIM_SGD};
    seqpar_tensor tensor = {"table", VOCAB, HIDDEN, 0, 0, 0};
    seqpar_optim optim = {0};
    seqpar_share share = {0};
    const seqpar_token_fold *fold = NULL;
    for (int i = 0; i < TOKENS * HIDDEN; i++) hidden[i] = (float)seqpar_random_normal(3, 0, i);
    for (int i = 0; i < VOCAB * HIDDEN; i++) table[i] = (float)seqpar_random_normal(3, 1, i);
    for (int t = 0; t < TOKENS; t++) {
        targets[t] = t % 5 ? t % VOCAB : SEQPAR_IGNORE;
        seed[t] = t % 5 ? -0.25f : 0;
    }
    seqpar_vocab_io io = {hidden, table,      targets,   tokens,        {r->logp},
                          {seed}, r->dhidden, r->dtable, VOCAB * HIDDEN};
    if (whole == PLAIN) return seqpar_vocab_backward(ctx, &io, NULL, NULL, &vocab);
    if (whole == PLAIN_IN_PARTS) return head_in_parts(ctx, &io, NULL, NULL, &vocab);
    if (whole == SHARE_ALONE) return seqpar_vocab_backward(ctx, &io, &share, NULL, &vocab);
    seqpar_status status = seqpar_optim_open(ctx, &optim, &tensor, 1, &sgd);
    if (!status) status = seqpar_step_begin(ctx, &optim, &row, 1, SEQPAR_LAYOUT_CONTIGUOUS, 1);
    if (!status) status = seqpar_split(ctx->error, &share, &row, 1, &split);
    if (!status) status = seqpar_step_fold(ctx, &optim, &fold, &share, 0);
    if (!status)
        status = whole == OF_A_ROW ? seqpar_vocab_backward(ctx, &io, &share, fold, &vocab)
                                   : head_in_parts(ctx, &io, &share, fold, &vocab);
    seqpar_share_free(&share);
    seqpar_optim_close(ctx, &optim);
    return status;
}

static void check_head(seqpar_device *device, const char *name) {
    static head_result plain, whole, none;
    static const float zero[VOCAB * HIDDEN];
    seqpar_comm *world = seqpar_comm_self();
    seqpar_ctx ctx;
    test_expect(!seqpar_ctx_open(&ctx, world, device, 1), "%s", world->error->text);
    test_expect(!head_run(&ctx, &plain, TOKENS, PLAIN), "%s", world->error->text);
    for (int way = OF_A_ROW; way <= OF_A_ROW_IN_PARTS; way++) {
        if (way == SHARE_ALONE) continue;
        memset(&whole, 0xff, sizeof whole);
        test_expect(!head_run(&ctx, &whole, TOKENS, way), "%s", world->error->text);
        test_expect(!memcmp(&plain, &whole, sizeof plain), "way %d has other bits", way);
    }
    test_expect(memcmp(plain.dtable, zero, sizeof zero) != 0, "the gradient is zero");
    for (int way = PLAIN; way <= PLAIN_IN_PARTS; way += PLAIN_IN_PARTS) {
        memset(&none, 0xff, sizeof none);
        test_expect(!head_run(&ctx, &none, 0, way), "%s", world->error->text);
        test_expect(!memcmp(none.dtable, zero, sizeof zero), "no token, but a gradient");
    }
    test_expect(head_run(&ctx, &none, TOKENS, SHARE_ALONE) == SEQPAR_ERR_STEP &&
                    strstr(world->error->text, "one of share and fold is NULL"),
                "%s", world->error->text);
    seqpar_ctx_close(&ctx);
    seqpar_comm_free(world);
    seqpar_device_close(device);
    test_end("head_without_a_row_%s", name);
}

/* Where slices of a group of three tensors, of 1, 2 and 1 blocks, begin: whole tensors while they
   fit to the element, and no tensor cut that need not be. */
static void check_slice_edges(void) {
    static const seqpar_tensor tensors[] = {
        {"a", 64, 16, 0, 0, 0}, {"b", 128, 16, 1024, 0, 0}, {"c", 64, 16, 3072, 0, 0}};
    static const struct {
        int64_t slice, begins[4];
    } cases[] = {{1, {0, 1024, 2048, 3072}},
                 {1024, {0, 1024, 2048, 3072}},
                 {2047, {0, 1024, 2048, 3072}},
                 {2048, {0, 1024, 3072}},
                 {3071, {0, 1024, 3072}},
                 {3072, {0, 3072}},
                 {3073, {0, 3072}},
                 {4095, {0, 3072}},
                 {4096, {0}}};
    seqpar_comm *self = seqpar_comm_self();
    seqpar_device *device = seqpar_device_reference();
    seqpar_ctx ctx;
    test_expect(!seqpar_ctx_open(&ctx, self, device, 1), "no context");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        seqpar_optim_desc desc = {.kind = SEQPAR_OPTIM_SGD, .slice = cases[i].slice};
        seqpar_optim optim;
        int64_t n = 0, first, count, end = 0;
        test_expect(!seqpar_optim_open(&ctx, &optim, tensors, 3, &desc), "no optimizer");
        for (; seqpar_optim_slice(&optim, 0, n, &first, &count); n++, end = first + count)
            test_expect(n < 4 && first == cases[i].begins[n] && first == end,
                        "slices of %lld: number %lld is %lld .. + %lld",
                        (long long)cases[i].slice, (long long)n, (long long)first,
                        (long long)count);
        test_expect(end == 4096 && (n == 4 || !cases[i].begins[n]),
                    "slices of %lld: %lld to %lld", (long long)cases[i].slice, (long long)n,
                    (long long)end);
        seqpar_optim_close(&ctx, &optim);
    }
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(self);
    test_end("optim_slice_edges");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(check_ways(SEQPAR_OPTIM_ADAMW, 0));
    TEST(check_ways(SEQPAR_OPTIM_ADAMW, 1));
    TEST(check_ways(SEQPAR_OPTIM_SGD, 0));
    TEST(check_ways(SEQPAR_OPTIM_SGD, 3));
    TEST(check_slow_rank());
    TEST(check_slice_edges());
    for (int which = 0; which < MISUSES; which++) TEST(check_misuse(which));
    TEST(check_pool(NULL, 3));
    TEST(check_pool(NULL, 50)); /* more than wait at a time */
    TEST(check_pool("build", 3));
    for (int64_t ranks = 1; ranks <= 3; ranks++) TEST(check_late_moves(ranks));
    TEST(check_head(seqpar_device_cpu(1), "cpu"));
    TEST(check_every_small_gradient());
    return test_summary();
}
