/* SPDX-License-Identifier: MIT OR Unlicense */
/* Calls that must agree, given differently: each pair is refused by name, on one rank and on
   several, and so is what ranks were given differently. Without a mistake the same program
   runs through. */
#include <fenv.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "seqpar_llama.h"
#include "support/test.h"

enum { ROWS = 4, ACCUMULATION = 2, VOCAB = 29 };

/* One step of a small model, in which exactly one thing is wrong. */
typedef enum {
    NOTHING,
    STEP_LAYOUT,
    STEP_MICRO_NEGATIVE,
    STEP_MICRO_BEYOND,
    STEP_OTHER_ROWS,
    STEP_FEWER_ROWS,
    STEP_CELL,
    STEP_DOCUMENTS,
    STEP_NUMBERS,
    STEP_OTHER_RANK,
    STEP_NOT_BEGUN,
    STEP_ENDED_TWICE,
    STEP_MICRO_LEFT_OUT,
    STEP_MICRO_TWICE,
    STEP_MICRO_EARLY,
    STEP_GROUP,
    STEP_SOURCE,
    STEP_GRADIENT_EARLY,
    BATCH_NO_FORWARD,
    BATCH_NOT_KEPT,
    BATCH_BACKWARD_TWICE,
    BATCH_VALUES_EARLY,
    BATCH_OTHER_OPTIMIZER,
    BATCH_OTHER_MODEL,
    SUM_TWICE,
    SUM_OF_DOCUMENT_TWICE,
    RANKS_SP_SIZE,
    RANKS_DEVICE,
    RANKS_STAGE,
    RANKS_BETA,
    RANKS_TENSORS,
    RANKS_STEP_ROWS,
    RANKS_IDS,
    RANKS_LAYOUT,
    RANKS_ACCUMULATION,
    RANKS_RATE,
    RANKS_ATTN_LAYOUT,
    RANKS_ATTN_WINDOW,
    RANKS_ATTN_ROWS,
    RANKS_ATTN_SCALE,
    RANKS_ATTN_SCHEDULE,
    MISTAKES
} mistake;

static const struct {
    const char *name, *says;
} mistakes[MISTAKES] = {

    [NOTHING] = {"nothing", ""},
    [STEP_LAYOUT] = {"step_layout", "is split contiguous, but the step was begun with zigzag"},
    [STEP_MICRO_NEGATIVE] =
        {"step_micro_negative",
         "micro-batch -1 is not in the step, which was begun with 2; give 0 to 1"},
    [STEP_MICRO_BEYOND] = {"step_micro_beyond", "micro-batch 2 is not in the step"},
    [STEP_OTHER_ROWS] =
        {"step_other_rows",
         "the share holds row 2 where the step has row 0; seqpar_step_rows says which"},
    [STEP_FEWER_ROWS] = {"step_fewer_rows", "the share is of 1 rows, in the step it has 2"},
    [STEP_CELL] = {"step_cell", "tokens in cells of 7, in the step"},
    [STEP_DOCUMENTS] = {"step_documents", "has other documents than in the step"},
    [STEP_NUMBERS] = {"step_numbers",
                      "has documents of other numbers (doc_source) than in the step"},
    [STEP_OTHER_RANK] = {"step_other_rank", "the share is that of rank"},
    [STEP_NOT_BEGUN] = {"step_not_begun", "no step was begun; call seqpar_step_begin first"},
    [STEP_ENDED_TWICE] = {"step_ended_twice", "no step was begun"},
    [STEP_MICRO_LEFT_OUT] = {"step_micro_left_out", "gradients of 1 of 2 micro-batches"},
    [STEP_MICRO_TWICE] =
        {"step_micro_twice",
         "micro-batch 0 when it had those of 1 micro-batches; give each once, in order"},
    [STEP_MICRO_EARLY] = {"step_micro_early", "micro-batch 1 when it had those of 0"},
    [STEP_GROUP] = {"step_group",
                    "the gradient of group 99, source 0 was given; there are groups 0 to 3"},
    [STEP_SOURCE] = {"step_source", "source 2 was given"},
    [STEP_GRADIENT_EARLY] = {"step_gradient_early", "a step is under way"},
    [BATCH_NO_FORWARD] = {"batch_no_forward", "holds nothing for a backward pass"},
    [BATCH_NOT_KEPT] = {"batch_not_kept", "call seqpar_llama_forward with keep 1"},
    [BATCH_BACKWARD_TWICE] = {"batch_backward_twice", "holds nothing for a backward pass"},
    [BATCH_VALUES_EARLY] = {"batch_values_early",
                            "has no hidden states; call seqpar_llama_forward first"},
    [BATCH_OTHER_OPTIMIZER] = {"batch_other_optimizer",
                               "opened with other tensors than this model's"},
    [BATCH_OTHER_MODEL] = {"batch_other_model",
                           "the batch was opened for another model: 2 layers, hidden 8, vocab "
                           "29; this one has 2, 16, 29"},
    [SUM_TWICE] = {"sum_twice", "the sum of the step was given leaf 4294967299 twice"},
    [SUM_OF_DOCUMENT_TWICE] = {"sum_of_document_twice",
                               "the sum of the document 0 was given leaf 0 twice"},
    [RANKS_SP_SIZE] = {"ranks_sp_size", "a context: sequence_parallel_size is 1 on rank 1 and"},
    [RANKS_DEVICE] = {"ranks_device", "a context: the storage type is"},
    [RANKS_STAGE] =
        {"ranks_stage",
         "an optimizer: zero_stage is 1 on rank 1 and 2 on rank 0; give all ranks the same"},
    [RANKS_BETA] = {"ranks_beta", "an optimizer: the beta2 of rank 1"},
    [RANKS_TENSORS] = {"ranks_tensors",
                       "an optimizer: the tensors of rank 1 are not those of rank 0"},
    [RANKS_STEP_ROWS] = {"ranks_step_rows",
                         "a step: the number of rows is 3 on rank 1 and 4 on rank 0"},
    [RANKS_IDS] = {"ranks_ids", "a step: the rows of rank 1 are not those of rank 0"},
    [RANKS_LAYOUT] = {"ranks_layout", "a step: layout is 0 on rank 1 and 1 on rank 0"},
    [RANKS_ACCUMULATION] = {"ranks_accumulation",
                            "a step: accumulation is 3 on rank 1 and 2 on rank 0"},
    [RANKS_RATE] = {"ranks_rate", "the end of a step: the learning rates of rank 1"},
    [RANKS_ATTN_LAYOUT] = {"ranks_attn_layout",
                           "attention: layout is 0 on rank 1 and 1 on rank 0"},
    [RANKS_ATTN_WINDOW] = {"ranks_attn_window",
                           "attention: window is 7 on rank 1 and 0 on rank 0"},
    [RANKS_ATTN_ROWS] = {"ranks_attn_rows", "attention: the rows of rank 1"},
    [RANKS_ATTN_SCALE] = {"ranks_attn_scale", "attention: the scales of rank 1"},
    [RANKS_ATTN_SCHEDULE] = {"ranks_attn_schedule",
                             "attention: schedule is 1 on rank 1 and 0 on rank 0"},
};

typedef struct agreement {
    mistake wrong;
    int64_t sp;
    seqpar_batch batch;
} agreement;

static void make_batch(seqpar_batch *batch) {
    static int32_t ids[ROWS][40];
    static const int64_t lengths[ROWS] = {37, 29, 23, 31};
    seqpar_document docs[ROWS];
    seqpar_pack_desc desc = {.pack_len = 40, .cell = 6};
    for (int64_t d = 0; d < ROWS; d++) {
        for (int64_t t = 0; t < lengths[d]; t++) ids[d][t] = (int32_t)(test_random() % VOCAB);
        docs[d] = (seqpar_document){.ids = ids[d], .tokens = lengths[d], .unit = d};
    }
    seqpar_pack(NULL, batch, docs, ROWS, &desc);
}

static int odd_one_out(const seqpar_ctx *ctx, const agreement *a, mistake wrong) {
    return a->wrong == wrong && ctx->world->rank == 1;
}

static seqpar_status sums(seqpar_ctx *ctx, const agreement *a) {
    const int64_t leaf[2] = {(INT64_C(1) << 32) + 3,
                             (INT64_C(1) << 32) + (a->wrong == SUM_TWICE ? 3 : 4)};
    const int64_t count = ctx->world->rank == 0 ? 2 : 0;
    const double values[2] = {1, 2}, one = 1;
    double sum;
    seqpar_segments segments = {.width = 1};
    seqpar_status status = seqpar_sum_pieces(ctx, &sum, leaf, values, count, 1);
    if (!status && a->wrong != SUM_TWICE) test_expect(sum == 3, "1 + 2 is %g", sum);
    for (int64_t i = 0; !status && i < 2 && ctx->sp_rank == 0; i++)
        status = seqpar_segments_push(ctx->error, &segments, 0,
                                      a->wrong == SUM_OF_DOCUMENT_TWICE ? 0 : i, &one);
    if (!status) status = seqpar_segments_sum(ctx->sp, &sum, 1, &segments);
    seqpar_segments_free(&segments);
    return status;
}

/* The rows a batch is opened with instead of its own. */
static void wrong_rows(const agreement *a, seqpar_row *rows, int64_t *first, int64_t *count) {
    static const int64_t cu[3] = {0, 5, 29}, other[1] = {ROWS}, two[2] = {1, ROWS};
    if (a->wrong == STEP_OTHER_ROWS) *first = 2 - *first;
    if (a->wrong == STEP_FEWER_ROWS) (*count)--;
    if (a->wrong == STEP_CELL) rows[1].cell = 7;
    if (a->wrong == STEP_NUMBERS) rows[1].doc_source = other;
    if (a->wrong == STEP_DOCUMENTS) {
        rows[1].docs = 2;
        rows[1].cu_seqlens = cu;
        rows[1].doc_source = two;
        rows[1].prefix_lens = NULL;
    }
}

static seqpar_status micro_batch(seqpar_ctx *ctx, const agreement *a, seqpar_llama *model,
                                 seqpar_llama *other, seqpar_optim *optim, int64_t index) {
    seqpar_llama_batch_desc run = {.layout = a->wrong == STEP_LAYOUT ? SEQPAR_LAYOUT_CONTIGUOUS
                                                                     : SEQPAR_LAYOUT_ZIGZAG};
    seqpar_llama_batch b;
    seqpar_row rows[ROWS];
    seqpar_buffer seed = {0};
    int64_t first, count;
    int64_t asked = a->wrong == STEP_MICRO_NEGATIVE ? -1
                    : a->wrong == STEP_MICRO_BEYOND ? ACCUMULATION
                                                    : index;
    const seqpar_token_fold *fold;
    seqpar_status status = seqpar_step_rows(ctx, optim, asked, &first, &count);
    if (status) return status;
    memcpy(rows, a->batch.row, sizeof rows);
    wrong_rows(a, rows, &first, &count);
    status = seqpar_llama_open_batch(ctx, model, &b, rows + first, count, &run);
    if (!status) status = seqpar_buffer_new(ctx, &seed, b.tokens * 8, SEQPAR_MEM_ACTIVATIONS);
    if (!status && seed.data) ctx->device->zero(ctx->device, seed.data, seed.bytes, ctx->queue);
    if (!status && a->wrong == STEP_OTHER_RANK) {
        seqpar_share other = *b.share;
        other.sp_rank = (other.sp_rank + 1) % 4;
        status = seqpar_step_fold(ctx, optim, &fold, &other, index);
    }
    if (!status && a->wrong == BATCH_VALUES_EARLY) status = seqpar_llama_values(ctx, model, &b);
    if (!status && a->wrong != BATCH_NO_FORWARD)
        status = seqpar_llama_forward(ctx, a->wrong == BATCH_OTHER_MODEL ? other : model, &b,
                                      a->wrong != BATCH_NOT_KEPT);
    seqpar_vocab_seeds seeds = {.dlogp = seed.data};
    for (int time = 0; !status && time < 1 + (a->wrong == BATCH_BACKWARD_TWICE); time++)
        status = seqpar_llama_backward(ctx, model, &b, optim, index, &seeds);
    if (!status) status = seqpar_llama_values(ctx, model, &b); /* hidden states stay */
    seqpar_buffer_free(ctx, &seed);
    seqpar_llama_close_batch(ctx, model, &b);
    return status;
}

static seqpar_status step(seqpar_ctx *ctx, const agreement *a, seqpar_llama *model,
                          seqpar_llama *other, seqpar_optim *optim, double *gradient) {
    seqpar_row rows[ROWS];
    int32_t ids[64];
    int layout = odd_one_out(ctx, a, RANKS_LAYOUT) ? SEQPAR_LAYOUT_CONTIGUOUS
                                                   : SEQPAR_LAYOUT_ZIGZAG;
    seqpar_status status;
    memcpy(rows, a->batch.row, sizeof rows);
    memcpy(ids, rows[0].ids, (size_t)rows[0].tokens * 4);
    if (odd_one_out(ctx, a, RANKS_IDS)) {
        ids[7]++;
        rows[0].ids = ids;
    }
    status = a->wrong == STEP_NOT_BEGUN
                 ? SEQPAR_OK
                 : seqpar_step_begin(ctx, optim, rows,
                                     ROWS - odd_one_out(ctx, a, RANKS_STEP_ROWS), layout,
                                     ACCUMULATION + odd_one_out(ctx, a, RANKS_ACCUMULATION));
    for (int64_t i = 0; !status && i < ACCUMULATION - (a->wrong == STEP_MICRO_LEFT_OUT); i++)
        status = micro_batch(ctx, a, model, other, optim,
                             a->wrong == STEP_MICRO_TWICE   ? 0
                             : a->wrong == STEP_MICRO_EARLY ? 1 - i
                                                            : i);
    if (!status && a->wrong == STEP_GROUP)
        status = seqpar_step_gradient(ctx, optim, &(seqpar_step_nodes){.group = 99});
    if (!status && a->wrong == STEP_SOURCE)
        status = seqpar_step_gradient(ctx, optim, &(seqpar_step_nodes){.source = 2});
    if (!status && a->wrong == STEP_GRADIENT_EARLY)
        status = seqpar_optim_read(
            ctx, optim, gradient,
            &(seqpar_optim_part){.state = SEQPAR_STATE_GRADIENT, .count = 7});
    if (!status)
        status = seqpar_step_end(ctx, optim, model->params.data, model->elements,
                                 odd_one_out(ctx, a, RANKS_RATE) ? 2e-3 : 1e-3);
    if (!status && a->wrong == STEP_ENDED_TWICE)
        status = seqpar_step_end(ctx, optim, model->params.data, model->elements, 1e-3);
    if (!status)
        status = seqpar_optim_read(
            ctx, optim, gradient,
            &(seqpar_optim_part){.state = SEQPAR_STATE_GRADIENT, .count = 7});
    return status;
}

static seqpar_status attention(seqpar_ctx *ctx, const agreement *a) {
    seqpar_attn_desc desc = {
        .heads = 2,
        .kv_heads = 1,
        .head_dim = 4,
        .layout = odd_one_out(ctx, a, RANKS_ATTN_LAYOUT) ? SEQPAR_LAYOUT_CONTIGUOUS
                                                         : SEQPAR_LAYOUT_ZIGZAG,
        .schedule = odd_one_out(ctx, a, RANKS_ATTN_SCHEDULE) ? SEQPAR_SCHEDULE_LLAMA3
                                                             : SEQPAR_SCHEDULE_RING,
        .window = odd_one_out(ctx, a, RANKS_ATTN_WINDOW) ? 7 : 0,
        .scale = odd_one_out(ctx, a, RANKS_ATTN_SCALE) ? 0.25 : 0.5};
    seqpar_row row = a->batch.row[0];
    seqpar_attn *attn;
    if (odd_one_out(ctx, a, RANKS_ATTN_ROWS)) row.cell = 5;
    seqpar_status status = seqpar_attn_open(ctx, &attn, &row, 1, &desc);
    seqpar_attn_close(ctx, attn);
    return status;
}

static seqpar_status with_model(seqpar_ctx *ctx, const agreement *a) {
    seqpar_llama_config config = {.layers = 2,
                                  .hidden = 8,
                                  .heads = 2,
                                  .kv_heads = 1,
                                  .head_dim = 4,
                                  .intermediate = 12,
                                  .vocab = VOCAB,
                                  .tied = 1};
    seqpar_optim_desc desc = {.kind = SEQPAR_OPTIM_ADAMW,
                              .zero_stage = odd_one_out(ctx, a, RANKS_STAGE) ? 1 : 2,
                              .beta1 = .9,
                              .beta2 = odd_one_out(ctx, a, RANKS_BETA) ? .99 : .95,
                              .eps = 1e-8};
    seqpar_llama model, other;
    seqpar_optim optim;
    memset(&optim, 0, sizeof optim);
    memset(&other, 0, sizeof other);
    seqpar_status status = seqpar_llama_open(ctx, &model, &config);
    if (a->wrong == BATCH_OTHER_MODEL) config.hidden = 16;
    if (!status) status = seqpar_llama_open(ctx, &other, &config);
    if (!status && odd_one_out(ctx, a, RANKS_TENSORS)) model.tensors[0].decay = 0;
    if (!status)
        status = seqpar_optim_open(ctx, &optim, model.tensors, model.tensor_count, &desc);
    if (!status) seqpar_llama_init(ctx, &model, 1);
    if (!status) seqpar_llama_init(ctx, &other, 1);
    double *gradient = calloc((size_t)model.elements + 1, sizeof *gradient);
    if (!status)
        status = step(ctx, a, a->wrong == BATCH_OTHER_OPTIMIZER ? &other : &model, &other,
                      &optim, gradient);
    free(gradient);
    seqpar_optim_close(ctx, &optim);
    seqpar_llama_close(ctx, &other);
    seqpar_llama_close(ctx, &model);
    return status;
}

static seqpar_status agreement_main(seqpar_comm *world, void *user) {
    const agreement *a = user;
    seqpar_device *device = world->rank == 1 && a->wrong == RANKS_DEVICE
                                ? seqpar_device_cpu(1)
                                : seqpar_device_reference();
    seqpar_ctx ctx;
    seqpar_status status = seqpar_ctx_open(
        &ctx, world, device, world->rank == 1 && a->wrong == RANKS_SP_SIZE ? 1 : a->sp);
    if (!status) status = attention(&ctx, a);
    if (!status) status = with_model(&ctx, a);
    if (!status) status = sums(&ctx, a);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static void check_mistake(mistake wrong, int64_t dp, int64_t sp) {
    agreement a = {.wrong = wrong, .sp = sp};
    seqpar_error error;
    make_batch(&a.batch);
    seqpar_status status = seqpar_run_threads(dp * sp, agreement_main, &a, &error);
    if (wrong == NOTHING)
        test_expect(status == SEQPAR_OK, "nothing is wrong, but: %s", error.text);
    else {
        test_expect(status == SEQPAR_ERR_STEP, "status %s: %s", seqpar_status_name(status),
                    error.text);
        test_expect(strstr(error.text, mistakes[wrong].says) != NULL, "'%s' does not say '%s'",
                    error.text, mistakes[wrong].says);
    }
    seqpar_batch_free(&a.batch);
}

/* ---- counts of one rank, and a device of two ---- */

static void check_count(void) {
    const int32_t targets[5] = {1, SEQPAR_IGNORE, 0, 2, 3};
    double dlogp[5], dsmooth[5], dzloss[5];
    seqpar_host_seeds seeds = {dlogp, dsmooth, dzloss};
    seqpar_sft_desc desc = {.count = 4};
    seqpar_error error = {0};
    test_expect(!seqpar_sft_seeds(&error, &seeds, targets, NULL, 5, &desc), "%s", error.text);
    desc.count = 3;
    test_expect(
        seqpar_sft_seeds(&error, &seeds, targets, NULL, 5, &desc) == SEQPAR_ERR_SEED_COUNT &&
            strstr(error.text, "count is 3, but this call alone has 4 supervised tokens"),
        "%s", error.text);
    test_end("count_of_the_step");
}

static seqpar_status open_together(seqpar_comm *world, void *user) {
    seqpar_ctx ctx;
    return seqpar_ctx_open(&ctx, world, user, 1);
}

static seqpar_status open_shared(seqpar_comm *world, void *user) {
    seqpar_ctx ctx;
    seqpar_status status = SEQPAR_OK;
    /* one after the other, and none is closed */
    for (int64_t r = 0; r < world->size && !status; r++) {
        if (world->rank == r) status = seqpar_ctx_open(&ctx, world, user, 1);
        if (!status) status = seqpar_comm_barrier(world);
    }
    return status;
}

/* ---- a tied table where the first and the third of four micro-batches have no token ---- */

static seqpar_status tied_main(seqpar_comm *world, void *user) {
    enum { ELEMENTS = 6, NODES = 8 };
    const int first_source = *(const int *)user;
    const int64_t cu[2] = {0, 16};
    const seqpar_row rows[2] = {{.tokens = 16, .cell = 4, .docs = 1, .cu_seqlens = cu},
                                {1, 16, 4, 1, cu}};
    const seqpar_tensor table = {.name = "table", .rows = 2, .cols = 3};
    const seqpar_optim_desc desc = {.kind = SEQPAR_OPTIM_SGD, .zero_stage = 2};
    double params[ELEMENTS] = {0}, gradient[ELEMENTS] = {0}, nodes[NODES * ELEMENTS];
    seqpar_device *device = seqpar_device_reference();
    seqpar_ctx ctx;
    seqpar_optim optim;
    int64_t first, count;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, 1);
    if (!status) status = seqpar_optim_open(&ctx, &optim, &table, 1, &desc);
    if (!status) status = seqpar_step_begin(&ctx, &optim, rows, 2, SEQPAR_LAYOUT_ZIGZAG, 4);
    for (int i = 0; !status && i < 8; i++) {
        seqpar_share share = {0};
        const seqpar_token_fold *fold = NULL;
        int source = i % 2 ? !first_source : first_source;
        status = seqpar_step_rows(&ctx, &optim, i / 2, &first, &count);
        test_expect(count == i / 2 % 2, "%lld rows", (long long)count);
        if (!status)
            status = seqpar_split(ctx.error, &share, rows + first, count,
                                  &(seqpar_split_desc){SEQPAR_LAYOUT_ZIGZAG, 1, 0});
        if (!status) status = seqpar_step_fold(&ctx, &optim, &fold, &share, i / 2);
        for (int k = 0; k < NODES * ELEMENTS; k++) nodes[k] = source ? 10 : 1;
        if (!status)
            status = seqpar_step_gradient(
                &ctx, &optim,
                &(seqpar_step_nodes){.nodes = nodes,
                                     .node_stride = ELEMENTS,
                                     .elements = ELEMENTS * fold->node_count,
                                     .micro_batch = i / 2,
                                     .source = source});
        seqpar_share_free(&share);
    }
    if (!status) status = seqpar_step_end(&ctx, &optim, params, ELEMENTS, 1.0);
    if (!status)
        status = seqpar_optim_read(
            &ctx, &optim, gradient,
            &(seqpar_optim_part){.state = SEQPAR_STATE_GRADIENT, .count = ELEMENTS});
    for (int k = 0; !status && k < ELEMENTS; k++)
        test_expect(gradient[k] == 22 && params[k] == -22,
                    "gradient %g, parameter %g; twice 10 + 1 is 22", gradient[k], params[k]);
    seqpar_optim_close(&ctx, &optim);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static void check_tied(void) {
    seqpar_error error;
    for (int source = 0; source < 2; source++)
        test_expect(!seqpar_run_threads(1, tied_main, &source, &error), "%s", error.text);
    test_end("tied_table_among_empty_micro_batches");
}

static void check_device(void) {
    seqpar_device *device = seqpar_device_reference();
    seqpar_comm *world = seqpar_comm_self();
    seqpar_error error;
    seqpar_ctx ctx;
    for (int i = 0; i < 2; i++) { /* one after the other */
        test_expect(!seqpar_ctx_open(&ctx, world, device, 1), "%s", world->error->text);
        seqpar_ctx_close(&ctx);
    }
    device->error = &error; /* as of a device that was opened with an error of its own */
    test_expect(!seqpar_ctx_open(&ctx, world, device, 1), "%s", world->error->text);
    seqpar_device *both = seqpar_device_reference();
    for (int i = 0; i < 8; i++)
        test_expect(seqpar_run_threads(2, open_together, both, &error) == SEQPAR_ERR_DEVICE &&
                        strstr(error.text, "belongs to another context"),
                    "%s", error.text);
    seqpar_device_close(both);
    test_expect(seqpar_run_threads(1, open_shared, device, &error) == SEQPAR_ERR_DEVICE &&
                    strstr(error.text, "belongs to another context"),
                "%s", error.text);
    seqpar_ctx_close(&ctx);
    seqpar_comm_free(world);
    seqpar_device_close(device);
    test_end("device_of_one_rank");
}

/* ---- two contexts on one world ---- */

static int64_t copied; /* bytes, by the device */
static void copy_counted(seqpar_device *device, void *to, const void *from, int64_t bytes,
                         void *queue) {
    (void)device;
    (void)queue;
    copied += bytes;
    memcpy(to, from, (size_t)bytes);
}

/* A message to oneself; returns how many of its bytes the device copied. */
static int64_t copied_by_device(seqpar_comm *world) {
    char out[48] = {0}, in[48];
    seqpar_transfer send = {0, out, 48}, recv = {0, in, 48};
    seqpar_group group = {"to myself", 0, &send, 1, &recv, 1};
    seqpar_request request;
    copied = 0;
    test_expect(!seqpar_comm_begin(world, &group, NULL, &request) &&
                    !seqpar_comm_wait(world, &request, NULL),
                "%s", world->error->text);
    return copied;
}

/* The world copies by its device as long as a context is open on it, and no longer. */
static void check_two_contexts(void) {
    seqpar_device *device = seqpar_device_reference(), *other = seqpar_device_reference();
    seqpar_comm *world = seqpar_comm_self();
    seqpar_ctx first, second, third;
    device->copy = copy_counted;
    test_expect(!seqpar_ctx_open(&first, world, device, 1) &&
                    !seqpar_ctx_open(&second, world, device, 1),
                "%s", world->error->text);
    test_expect(copied_by_device(world) == 48, "two are open, and the device did not copy");
    seqpar_ctx_close(&first);
    test_expect(copied_by_device(world) == 48, "one is open, and the device did not copy");
    test_expect(seqpar_ctx_open(&third, world, other, 1) == SEQPAR_ERR_DEVICE &&
                    strstr(world->error->text, "another context is open on this world"),
                "another device: %s", world->error->text);
    test_expect(!other->error, "a device that was refused still speaks to the world");
    seqpar_ctx_close(&third);
    seqpar_ctx_close(&second);
    test_expect(copied_by_device(world) == 0 && !world->device,
                "no context is open, and the world has a device");
    memset(world->error, 0, sizeof *world->error);
    test_expect(!seqpar_ctx_open(&third, world, other, 1), "%s", world->error->text);
    seqpar_ctx_close(&third);
    seqpar_comm_free(world);
    seqpar_device_close(device);
    seqpar_device_close(other);
    test_end("two_contexts_on_one_world");
}

/* ---- a device that lacks an operation ---- */

static seqpar_status open_main(seqpar_comm *world, void *user) {
    seqpar_ctx ctx;
    seqpar_status status = seqpar_ctx_open(&ctx, world, user, 1);
    if (!status) seqpar_ctx_close(&ctx);
    return status;
}

static void check_missing_operation(void) {
#define OPERATION(op) \
    { \
        seqpar_device *device = seqpar_device_reference(); \
        seqpar_error error; \
        test_expect(!seqpar_run_threads(1, open_main, device, &error), "whole: %s", \
                    error.text); \
        device->op = NULL; \
        test_expect(seqpar_run_threads(1, open_main, device, &error) == SEQPAR_ERR_DEVICE && \
                        strstr(error.text, "has no operation " #op ";"), \
                    #op ": %s", error.text); \
        seqpar_device_close(device); \
    }
    SEQPAR_DEVICE_OPS(OPERATION)
    test_end("device_lacks_an_operation");
}

/* ---- all that ranks must have been given alike ---- */

enum { GIVEN_ROWS = 3, GIVEN_TENSORS = 3, GIVEN_TOKENS = 11 };

/* What a rank gives; one thing differs on one rank. */
typedef struct given {
    int64_t cu[GIVEN_ROWS][4], prefix[GIVEN_ROWS][3], source[GIVEN_ROWS][3];
    int32_t ids[GIVEN_ROWS][GIVEN_TOKENS], targets[GIVEN_ROWS][GIVEN_TOKENS],
        positions[GIVEN_ROWS][GIVEN_TOKENS];
    seqpar_row rows[GIVEN_ROWS];
    int64_t row_count, accumulation, tensor_count, slice;
    int layout, offload;
    seqpar_attn_desc attn;
    seqpar_optim_desc optim;
    seqpar_tensor tensors[GIVEN_TENSORS];
} given;

static int never_forward(void *user, const seqpar_attn_source *s, void *out, void *lse,
                         void *queue) {
    (void)user, (void)s, (void)out, (void)lse, (void)queue;
    return 1;
}

static int never_backward(void *user, const seqpar_attn_source *s, void *dq, void *dk, void *dv,
                          void *queue) {
    (void)user, (void)s, (void)dq, (void)dk, (void)dv, (void)queue;
    return 1;
}
static const seqpar_attn_kernel given_kernel = {never_forward, never_backward, NULL};

#define ATTN(member, was, is) \
    X(attn.member, is, "attention: " #member " is " #is " on rank %d and " #was " on rank 0")
#define ROW(member, is)    X(member, is, "attention: the rows of rank %d are not those of rank 0")
#define TENSOR(member, is) X(member, is, "an optimizer: the tensors of rank %d are not those")
#define OPTIM(member, is, name) \
    X(optim.member, is, "an optimizer: the " name " of rank %d are not those of rank 0")
#define SHOWN(member, was, is, name) \
    X(member, is, name " is " #is " on rank %d and " #was " on rank 0")
/* member, its value on one rank, what is said of it */
#define GIVENS \
    SHOWN(row_count, 3, 2, "attention: the number of rows") \
    ATTN(heads, 6, 12) \
    ATTN(kv_heads, 3, 6) \
    ATTN(head_dim, 4, 8) \
    ATTN(heads_k_stride, 0, 3) \
    ATTN(ulysses_size, 0, 1) \
    ATTN(ulysses_replicate, 0, 1) \
    ATTN(full, 0, 1) \
    ATTN(window, 0, 5) \
    ATTN(relaxed, 0, 1) \
    ATTN(layout, 1, 0) \
    ATTN(schedule, 0, 1) \
    X(attn.scale, 2, "attention: the scales of rank %d are not those of rank 0") \
    X(attn.softcap, 2, "attention: the softcaps of rank %d are not those of rank 0") \
    X(attn.dropout, .5, "attention: the dropout rates of rank %d are not those of rank 0") \
    ROW(rows[0].index, 1) \
    ROW(rows[2].index, 9) \
    ROW(rows[1].tokens, 9) \
    ROW(rows[0].cell, 5) \
    ROW(rows[2].cell, 3) \
    ROW(cu[0][1], 5) \
    ROW(cu[2][2], 6) \
    ROW(prefix[0][0], 0) \
    ROW(prefix[2][2], 2) \
    ROW(source[0][0], 1) \
    ROW(source[1][0], 8) \
    ROW(source[2][2], 17) \
    ROW(ids[0][0], 77) \
    ROW(ids[0][10], 77) \
    ROW(ids[2][6], 77) \
    ROW(targets[0][0], 77) \
    ROW(targets[2][6], 77) \
    ROW(positions[0][0], 77) \
    ROW(positions[2][6], 77) \
    SHOWN(tensor_count, 3, 2, "an optimizer: the number of tensors") \
    TENSOR(tensors[0].rows, 3) \
    TENSOR(tensors[2].rows, 1) \
    TENSOR(tensors[0].cols, 4) \
    TENSOR(tensors[2].cols, 6) \
    TENSOR(tensors[1].offset, 21) \
    TENSOR(tensors[2].offset, 51) \
    TENSOR(tensors[0].decay, 1) \
    TENSOR(tensors[2].decay, 1) \
    TENSOR(tensors[2].group, 1) \
    OPTIM(beta1, .5, "beta1") \
    OPTIM(beta2, .5, "beta2") \
    OPTIM(eps, .5, "eps") \
    OPTIM(decay, .5, "weight decays") \
    OPTIM(max_norm, .5, "max_norm") \
    SHOWN(optim.kind, 0, 1, "an optimizer: the kind") \
    SHOWN(optim.zero_stage, 1, 2, "an optimizer: zero_stage") \
    SHOWN(optim.slice, 0, 64, "an optimizer: slice") \
    SHOWN(optim.params_shared, 0, 1, "an optimizer: params_shared") \
    SHOWN(optim.offload, 0, 1, "an optimizer: offload") \
    SHOWN(optim.state_bits, 0, 8, "an optimizer: state_bits") \
    SHOWN(optim.stochastic, 0, 1, "an optimizer: stochastic rounding") \
    SHOWN(optim.seed, 0, 3, "an optimizer: its seed") \
    SHOWN(layout, 1, 0, "a step: layout") \
    SHOWN(accumulation, 2, 3, "a step: accumulation") \
    SHOWN(slice, 0, 64, "sharded parameters: slice") \
    SHOWN(offload, 0, 1, "sharded parameters: offload")

/* Sets number `which`, and returns what is said of it. */
static const char *set_given(given *g, int which) {
    int n = 0;
#define X(member, is, says) \
    if (n++ == which) { \
        g->member = is; \
        return says; \
    }
    GIVENS
#undef X
    if (n == which) g->attn.kernel = &given_kernel;
    return n == which ? "attention: own kernels is 1 on rank %d and 0 on rank 0" : NULL;
}

static void same_given(given *g) {
    static const seqpar_tensor tensors[] = {
        {"a", 2, 5, 0, 0, 0}, {"b", 7, 4, 20, 0, 1}, {"c", 2, 3, 50, 0, 2}};
    static const int64_t cu[GIVEN_ROWS][4] = {{0, 4, 9, 11}, {0}, {0, 3, 5, 7}};
    static const int64_t tokens[] = {11, 8, 7}, docs[] = {3, 0, 3};
    *g = (given){.row_count = GIVEN_ROWS, .tensor_count = GIVEN_TENSORS, .accumulation = 2};
    memcpy(g->cu, cu, sizeof cu);
    memcpy(g->tensors, tensors, sizeof tensors);
    for (int r = 0; r < GIVEN_ROWS; r++) {
        for (int d = 0; d < 3; d++) g->prefix[r][d] = 1, g->source[r][d] = 2 + 5 * r + d;
        for (int t = 0; t < GIVEN_TOKENS; t++)
            g->ids[r][t] = g->targets[r][t] = g->positions[r][t] = 20 * r + t;
        g->rows[r] = (seqpar_row){.index = 2 * r, .tokens = tokens[r], .cell = 4};
        g->rows[r].docs = docs[r];
    }
    g->layout = g->attn.layout = SEQPAR_LAYOUT_ZIGZAG;
    g->attn.heads = 6, g->attn.kv_heads = 3, g->attn.head_dim = 4;
    g->optim.zero_stage = 1;
}

/* A rank's rows point to its own arrays. */
static void point_rows(given *g) {
    for (int r = 0; r < GIVEN_ROWS; r++) {
        seqpar_row *row = &g->rows[r];
        row->ids = g->ids[r], row->targets = g->targets[r], row->position_ids = g->positions[r];
        row->doc_source = g->source[r];
        if (row->docs) row->cu_seqlens = g->cu[r], row->prefix_lens = g->prefix[r];
    }
}

static seqpar_status open_given(seqpar_ctx *ctx, const given *g) {
    seqpar_optim optim = {0};
    seqpar_shards shards = {0};
    seqpar_attn *attn = NULL;
    seqpar_status status = seqpar_attn_open(ctx, &attn, g->rows, g->row_count, &g->attn);
    if (!status)
        status = seqpar_optim_open(ctx, &optim, g->tensors, g->tensor_count, &g->optim);
    if (!status)
        status = seqpar_step_begin(ctx, &optim, g->rows, g->row_count, g->layout,
                                   g->accumulation);
    if (!status)
        status = seqpar_shards_open(ctx, &shards, g->tensors, g->tensor_count, g->slice,
                                    g->offload);
    seqpar_shards_close(ctx, &shards);
    seqpar_optim_close(ctx, &optim);
    seqpar_attn_close(ctx, attn);
    return status;
}

typedef struct odd_given {
    int which;
    int64_t rank; /* the odd one out; -1: nobody */
} odd_given;

static seqpar_status given_main(seqpar_comm *world, void *user) {
    const odd_given *odd = user;
    given *g = malloc(sizeof *g);
    seqpar_device *device = seqpar_device_reference_bf16();
    seqpar_ctx ctx;
    same_given(g);
    if (world->rank == odd->rank) set_given(g, odd->which);
    point_rows(g);
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, world->size);
    if (!status) status = open_given(&ctx, g);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    free(g);
    return status;
}

/* Any rank may be the odd one out, the last as the one behind the first. */
static void check_given(void) {
    seqpar_error error;
    odd_given odd = {0, -1};
    given room;
    const char *says;
    test_expect(!seqpar_run_threads(3, given_main, &odd, &error), "all alike: %s", error.text);
    for (; (says = set_given(&room, odd.which)); odd.which++)
        for (odd.rank = 1; odd.rank < 3; odd.rank++) {
            char want[160];
            snprintf(want, sizeof want, says, (int)odd.rank);
            test_expect(seqpar_run_threads(3, given_main, &odd, &error) == SEQPAR_ERR_STEP &&
                            !strncmp(error.text, want, strlen(want)),
                        "number %d: '%s' instead of '%s'", odd.which, error.text, want);
        }
    test_end("given_alike: %d things", odd.which);
}

/* ---- the end of a step: ranks that call different functions ---- */

enum { END_WELL, END_NORM, END_STEPS, END_RATE, ENDS };
static const char *const end_says[ENDS] = {
    "",
    "the end of a step: the number of calls of seqpar_step_norm is 0 on rank 2 and 1 on rank 0; "
    "give all ranks the same",
    "the end of a step: the number of steps done is 3 on rank 2 and 0 on rank 0; give all ranks "
    "the same",
    "the end of a step: the learning rates of rank 2 are not those of rank 0; give all ranks the "
    "same"};

static seqpar_status end_main(seqpar_comm *world, void *user) {
    enum { ELEMENTS = 64 };
    const int wrong = world->rank == world->size - 1 ? *(const int *)user : END_WELL;
    const seqpar_tensor tensor = {"a", 8, 8, 0, 0, 0};
    const seqpar_optim_desc desc = {.kind = SEQPAR_OPTIM_SGD};
    double nodes[ELEMENTS], params[ELEMENTS] = {0};
    seqpar_device *device = seqpar_device_reference();
    seqpar_ctx ctx;
    seqpar_optim optim = {0};
    for (int i = 0; i < ELEMENTS; i++) nodes[i] = i;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, world->size);
    if (!status) status = seqpar_optim_open(&ctx, &optim, &tensor, 1, &desc);
    if (!status) status = seqpar_step_begin_plain(&ctx, &optim, 1);
    if (!status)
        status = seqpar_step_gradient(&ctx, &optim,
                                      &(seqpar_step_nodes){.nodes = nodes,
                                                           .node_stride = ELEMENTS,
                                                           .elements = ELEMENTS});
    if (wrong == END_STEPS) optim.t = 3;
    if (!status && wrong != END_NORM) status = seqpar_step_norm(&ctx, &optim);
    if (!status)
        status = seqpar_step_end(&ctx, &optim, params, ELEMENTS, wrong == END_RATE ? .2 : .1);
    for (int i = 0; !status && i < ELEMENTS; i++)
        test_expect(fabs(params[i] + .1 * i * (double)world->size) < 1e-12,
                    "parameter %d is %g", i, params[i]);
    seqpar_optim_close(&ctx, &optim);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static void check_ends(void) {
    for (int wrong = 0; wrong < ENDS; wrong++) {
        seqpar_error error;
        seqpar_status status = seqpar_run_threads(3, end_main, &wrong, &error);
        test_expect(status == (wrong ? SEQPAR_ERR_STEP : SEQPAR_OK) &&
                        !strcmp(error.text, end_says[wrong]),
                    "case %d: '%s'", wrong, error.text);
    }
    test_end("ends_of_a_step");
}

/* ---- memory: what was freed is used again, and never more is kept than was once in use ---- */

enum { MEMORY_MOST = 700, MEMORY_SIZES = 5 };
typedef struct block {
    char *data;
    int64_t bytes;
} block;

/* What the device did, and what it was to do. */
static struct memory_model {
    block kept[MEMORY_MOST];
    int64_t count, total, peak, made;
    char *freed[MEMORY_MOST];
    int64_t freed_count, freed_wanted, given_back; /* to the second pool: bytes */
} model;

static void *noted_alloc(seqpar_device *device, int64_t bytes) {
    (void)device;
    model.made++;
    return malloc((size_t)bytes);
}

static void noted_free(seqpar_device *device, void *data) {
    (void)device;
    test_expect(model.freed_count < MEMORY_MOST, "too many are freed");
    if (model.freed_count < MEMORY_MOST) model.freed[model.freed_count++] = data;
    free(data);
}

static void noted_pool_free(seqpar_device *device, void *data, int64_t bytes) {
    (void)device;
    model.given_back += bytes;
    free(data);
}

static int64_t model_bytes(void) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < model.count; i++) bytes += model.kept[i].bytes;
    return bytes;
}

/* The oldest are given back while more bytes than `most` are kept. */
static void model_leave(int64_t most) {
    while (model_bytes() > most) {
        test_expect(model.freed_wanted < model.freed_count &&
                        model.freed[model.freed_wanted] == model.kept[0].data,
                    "the oldest of %lld is not given back", (long long)model.count);
        model.freed_wanted++;
        model.count--;
        memmove(model.kept, model.kept + 1, (size_t)model.count * sizeof *model.kept);
    }
    test_expect(model.freed_wanted == model.freed_count, "%lld are given back, not %lld",
                (long long)model.freed_count, (long long)model.freed_wanted);
}

static void memory_take(seqpar_ctx *ctx, seqpar_buffer *b, int64_t bytes, int kind) {
    const int64_t made = model.made;
    int64_t i = model.count - 1, room = model.peak - model.total - bytes;
    test_expect(!seqpar_buffer_new(ctx, b, bytes, kind), "%s", ctx->error->text);
    while (i >= 0 && model.kept[i].bytes != bytes) i--;
    if (i >= 0) {
        test_expect(b->data == model.kept[i].data && model.made == made,
                    "%lld bytes: not the last of its size", (long long)bytes);
        memmove(model.kept + i, model.kept + i + 1,
                (size_t)(--model.count - i) * sizeof *model.kept);
    } else {
        model_leave(room > 0 ? room : 0);
        test_expect(model.made == made + 1, "%lld bytes: kept ones of another size",
                    (long long)bytes);
    }
    model.total += bytes;
    if (model.total > model.peak) model.peak = model.total;
}

static void memory_give(seqpar_ctx *ctx, seqpar_buffer *b) {
    const block last = {b->data, b->bytes};
    if (model.count == SEQPAR_CACHED_BUFFERS) {
        model.total -= last.bytes;
        seqpar_buffer_free(ctx, b);
        model_leave(model_bytes() - 1);
    } else {
        model.total -= last.bytes;
        seqpar_buffer_free(ctx, b);
        model_leave(INT64_MAX);
    }
    model.kept[model.count++] = last;
    test_expect(!b->data && !b->bytes && !b->kind, "a freed buffer holds something");
}

static void expect_memory(const seqpar_ctx *ctx) {
    test_expect(ctx->memory.total == model.total && ctx->memory.total_peak == model.peak &&
                    ctx->cached_count == model.count && ctx->cached_bytes == model_bytes(),
                "%lld bytes, at most %lld; %lld kept of %lld", (long long)ctx->memory.total,
                (long long)ctx->memory.total_peak, (long long)ctx->cached_bytes,
                (long long)ctx->cached_count);
}

/* Buffers of a few sizes come and go. */
static void memory_at_random(seqpar_ctx *ctx) {
    static const int64_t sizes[MEMORY_SIZES] = {8, 24, 40, 104, 1000};
    seqpar_buffer b[12] = {{0}};
    for (int i = 0; i < 600 && !test_why[0]; i++) {
        const int at = (int)test_integer(0, i % 100 < 50 ? 11 : 3);
        if (b[at].data)
            memory_give(ctx, &b[at]);
        else
            memory_take(ctx, &b[at], sizes[test_integer(0, MEMORY_SIZES - 1)],
                        (int)test_integer(0, SEQPAR_MEM_OFFLOADED - 1));
        expect_memory(ctx);
    }
    for (int i = 0; i < 12; i++)
        if (b[i].data) memory_give(ctx, &b[i]);
}

/* More than can be kept: the oldest goes for each that comes. */
static void memory_full(seqpar_ctx *ctx) {
    static seqpar_buffer b[SEQPAR_CACHED_BUFFERS + 3];
    for (int i = 0; i < SEQPAR_CACHED_BUFFERS + 3; i++)
        memory_take(ctx, &b[i], 8 + 8 * i, SEQPAR_MEM_SCRATCH);
    for (int i = 0; i < SEQPAR_CACHED_BUFFERS + 3; i++) {
        memory_give(ctx, &b[i]);
        expect_memory(ctx);
    }
    test_expect(model.count == SEQPAR_CACHED_BUFFERS, "%lld are kept", (long long)model.count);
}

static void memory_open(seqpar_comm **world, seqpar_device **device, seqpar_ctx *ctx) {
    memset(&model, 0, sizeof model);
    *world = seqpar_comm_self();
    *device = seqpar_device_reference();
    (*device)->alloc = (*device)->pool_alloc = noted_alloc;
    (*device)->free = noted_free;
    (*device)->pool_free = noted_pool_free;
    test_expect(!seqpar_ctx_open(ctx, *world, *device, 1), "%s", (*world)->error->text);
}

static void check_memory(void) {
    for (int full = 0; full < 2; full++) {
        seqpar_device *device;
        seqpar_comm *world;
        seqpar_ctx ctx;
        memory_open(&world, &device, &ctx);
        (full ? memory_full : memory_at_random)(&ctx);
        seqpar_ctx_close(&ctx);
        model_leave(0);
        test_expect(!model.count && model.freed_count == model.made, "%lld of %lld are freed",
                    (long long)model.freed_count, (long long)model.made);
        seqpar_device_close(device);
        seqpar_comm_free(world);
        test_end(full ? "memory_no_more_is_kept" : "memory_is_used_again");
    }
}

/* Each kind has its own count; the second pool is in no total, and keeps nothing. */
static void check_memory_kinds(void) {
    seqpar_buffer b[SEQPAR_MEM_KINDS], none;
    seqpar_device *device;
    seqpar_comm *world;
    seqpar_ctx ctx;
    int64_t total = 0;
    memory_open(&world, &device, &ctx);
    memset(&none, 0x55, sizeof none);
    test_expect(!seqpar_buffer_new(&ctx, &none, 0, SEQPAR_MEM_SCRATCH) && !none.data &&
                    !none.bytes && !model.made,
                "a buffer of nothing");
    for (int k = 0; k < SEQPAR_MEM_KINDS; k++) {
        test_expect(!seqpar_buffer_new(&ctx, &b[k], 16 + 8 * k, k) && b[k].kind == k &&
                        b[k].bytes == 16 + 8 * k,
                    "kind %d", k);
        if (k != SEQPAR_MEM_OFFLOADED) total += 16 + 8 * k;
        test_expect(ctx.memory.total == total && ctx.memory.total_peak == total,
                    "kind %d: %lld bytes in all", k, (long long)ctx.memory.total);
    }
    for (int k = 0; k < SEQPAR_MEM_KINDS; k++) {
        seqpar_buffer_free(&ctx, &b[k]);
        for (int q = 0; q < SEQPAR_MEM_KINDS; q++)
            test_expect(ctx.memory.now[q] == (q > k ? 16 + 8 * q : 0) &&
                            ctx.memory.peak[q] == 16 + 8 * q,
                        "kind %d: now %lld, at most %lld", q, (long long)ctx.memory.now[q],
                        (long long)ctx.memory.peak[q]);
    }
    test_expect(ctx.memory.total == 0 && ctx.memory.total_peak == total, "freed: %lld bytes",
                (long long)ctx.memory.total);
    test_expect(!model.freed_count && model.given_back == 16 + 8 * SEQPAR_MEM_OFFLOADED,
                "%lld are freed, %lld bytes of the second pool", (long long)model.freed_count,
                (long long)model.given_back);
    ctx.queue = &ctx; /* a device with a queue keeps what is freed itself */
    test_expect(!seqpar_buffer_new(&ctx, &b[0], 500, 0), "on a queue");
    model.freed_count = 0;
    seqpar_buffer_free(&ctx, &b[0]);
    test_expect(model.freed_count == 1, "on a queue: %lld are freed",
                (long long)model.freed_count);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(world);
    test_end("memory_of_each_kind");
}

/* ---- what a context is closed with ---- */

static int64_t settled;
static seqpar_status noted_settle(seqpar_device *device, void *queue) {
    settled += queue == device->queue;
    return SEQPAR_OK;
}

static void check_closing(void) {
    seqpar_device *device;
    seqpar_comm *world;
    seqpar_ctx one, two;
    memory_open(&world, &device, &one);
    device->queue = &settled;
    device->settle = noted_settle;
    test_expect(!seqpar_ctx_open(&two, world, device, 1) && two.queue == &settled &&
                    device->contexts == 2 && world->contexts == 2,
                "%s", world->error->text);
    settled = 0;
    seqpar_ctx_close(&two);
    test_expect(settled == 1 && !two.sp && device->error == world->error &&
                    world->device == device && device->contexts == 1 && world->contexts == 1,
                "one of two is closed: it settled %lld times", (long long)settled);
    seqpar_ctx_close(&one);
    test_expect(!device->error && !world->device && !device->contexts && !world->contexts,
                "both are closed");
    seqpar_device_close(device);
    seqpar_comm_free(world);
    test_end("closing_a_context");
}

/* A second context that is refused leaves the claim of the first. */
static seqpar_status second_main(seqpar_comm *world, void *user) {
    seqpar_device *device = seqpar_device_reference();
    seqpar_ctx one, two;
    (void)user;
    seqpar_status status = seqpar_ctx_open(&one, world, device, 2);
    if (!status) {
        test_expect(seqpar_ctx_open(&two, world, device, 1 + (world->rank == 0)) ==
                            SEQPAR_ERR_STEP &&
                        device->error == world->error && device->contexts == 1,
                    "rank %lld: the first context has lost its device", (long long)world->rank);
        seqpar_ctx_close(&two);
        memset(world->error, 0, sizeof *world->error);
    }
    seqpar_ctx_close(&one);
    seqpar_device_close(device);
    return status;
}

/* Ranks whose devices differ in one type alone. */
static seqpar_status types_main(seqpar_comm *world, void *user) {
    const int accumulator = *(const int *)user;
    seqpar_device *device = seqpar_device_reference();
    seqpar_ctx ctx;
    if (world->rank == 1)
        *(accumulator ? &device->accumulator : &device->storage) = SEQPAR_DTYPE_BF16;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, 1);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static void check_contexts_of_ranks(void) {
    static const char *const says[] = {
        "a context: the storage type is 2 on rank 1 and 0 on",
        "a context: the accumulator type is 2 on rank 1 and 0 on"};
    seqpar_error error;
    test_expect(!seqpar_run_threads(2, second_main, NULL, &error), "%s", error.text);
    for (int accumulator = 0; accumulator < 2; accumulator++)
        test_expect(seqpar_run_threads(2, types_main, &accumulator, &error) ==
                            SEQPAR_ERR_STEP &&
                        !strncmp(error.text, says[accumulator], strlen(says[accumulator])),
                    "types: %s", error.text);
    test_end("contexts_of_ranks");
}

static seqpar_status mesh_main(seqpar_comm *world, void *user) {
    const int64_t sp = *(const int64_t *)user;
    seqpar_device *device = seqpar_device_reference();
    seqpar_ctx ctx;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, sp);
    int64_t first = world->rank;
    if (!status) status = seqpar_comm_broadcast(ctx.sp, &first, 8, 0);
    if (!status)
        test_expect(ctx.sp_size == sp && ctx.dp_size == world->size / sp &&
                        ctx.dp_rank * sp + ctx.sp_rank == world->rank && ctx.sp_rank < sp &&
                        ctx.sp->rank == ctx.sp_rank && ctx.sp->size == sp &&
                        first == ctx.dp_rank * sp && ctx.sp->device == device,
                    "rank %lld is %lld of sequence %lld", (long long)world->rank,
                    (long long)ctx.sp_rank, (long long)ctx.dp_rank);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static void check_meshes(void) {
    seqpar_error error;
    for (int64_t sp = 1; sp <= 6; sp++)
        if (6 % sp == 0)
            test_expect(!seqpar_run_threads(6, mesh_main, &sp, &error), "sp %lld: %s",
                        (long long)sp, error.text);
    test_end("meshes");
}

/* ---- the process itself ---- */

static seqpar_status open_only(seqpar_comm *world, void *user) {
    seqpar_device *device = seqpar_device_reference();
    seqpar_ctx ctx;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, 1);
    (void)user;
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static void expect_arithmetic(const char *says) {
    seqpar_comm *world = seqpar_comm_self();
    seqpar_status status = open_only(world, NULL);
    test_expect(status == (*says ? SEQPAR_ERR_ARITHMETIC : SEQPAR_OK), "status %s",
                seqpar_status_name(status));
    test_expect(strstr(world->error->text, says) != NULL, "'%s' does not say '%s'",
                world->error->text, says);
    seqpar_comm_free(world);
}

static void check_arithmetic(void) {
    static const int roundings[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    expect_arithmetic("");
    for (int i = 0; i < 3; i++) {
        fesetround(roundings[i]);
        expect_arithmetic("does not round to nearest");
        fesetround(FE_TONEAREST);
    }
    test_end("arithmetic_rounding");
#if defined(__SSE2__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8000); /* FTZ */
    expect_arithmetic("flushes denormal numbers to 0");
    _mm_setcsr(before | 0x0040); /* DAZ */
    expect_arithmetic("flushes denormal numbers to 0");
    _mm_setcsr(before);
    expect_arithmetic("");
    test_end("arithmetic_denormals");
#else
    test_skip("arithmetic_denormals", "this test sets the flags of SSE");
#endif
}

/* A mistake of one rank: alone in a ring, among three, and in a mesh where that can be told. */
static void test_mistake(mistake wrong) {
    if (wrong < RANKS_SP_SIZE) check_mistake(wrong, 1, 1);
    check_mistake(wrong, 1, 3);
    if (wrong < RANKS_ATTN_LAYOUT && wrong != STEP_OTHER_ROWS && wrong != STEP_FEWER_ROWS &&
        wrong != STEP_CELL && wrong != STEP_DOCUMENTS && wrong != STEP_NUMBERS)
        check_mistake(wrong, 2, 2);
    test_end("agree_%s", mistakes[wrong].name);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    for (int wrong = 0; wrong < MISTAKES; wrong++) TEST(test_mistake((mistake)wrong));
    TEST(check_count());
    TEST(check_tied());
    TEST(check_device());
    TEST(check_two_contexts());
    TEST(check_missing_operation());
    TEST(check_given());
    TEST(check_ends());
    TEST(check_memory());
    TEST(check_memory_kinds());
    TEST(check_closing());
    TEST(check_meshes());
    TEST(check_contexts_of_ranks());
    TEST(check_arithmetic());
    return test_summary();
}
