/* SPDX-License-Identifier: MIT OR Unlicense */
/* 06_curves_lie.c - two trainings on four ranks whose loss curves coincide, although the
   gradients of one are four times too small. Its local gradients are right, but its reducer
   averages them over all ranks, where the ranks that share a sequence must be added up. Adam
   divides by the gradient's size, which hides the factor; the norm, the clip and plain SGD do
   not hide it. cc 06_curves_lie.c -lm -lpthread */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "seqpar_llama.h"
#include "trainer/log/plot.h"
#include <sys/stat.h>

enum { RANKS = 4, DOCUMENTS = 24, TOKENS = 72, STEPS = 80, VOCAB = 128 };

typedef struct { /* one training */
    int optimizer;
    int64_t steps;
    double share; /* of the gradient that arrives */
    double loss[STEPS], norm[STEPS];
    double moved; /* length of the first step in parameter space */
} training;

/* Documents of one step: sums, a byte a token; (step, i) decides what is in one. */
static void write_documents(int64_t step, seqpar_document *documents, int32_t (*ids)[TOKENS]) {
    for (int64_t i = 0; i < DOCUMENTS; i++) {
        char text[TOKENS + 64] = "";
        for (uint64_t k = 0, n = 0; n < TOKENS - 16; n = strlen(text), k++) {
            int a = (int)(seqpar_random_uniform(7, (uint64_t)(step * DOCUMENTS + i), 2 * k) *
                          50);
            int b = (int)(seqpar_random_uniform(7, (uint64_t)(step * DOCUMENTS + i),
                                                2 * k + 1) *
                          50);
            snprintf(text + n, sizeof text - n, "%d+%d=%d;", a, b, a + b);
        }
        int64_t count = (int64_t)strlen(text) < TOKENS ? (int64_t)strlen(text) : TOKENS;
        for (int64_t t = 0; t < count; t++) ids[i][t] = text[t];
        documents[i] = (seqpar_document){.ids = ids[i], .tokens = count, .unit = i};
    }
}

/* The loss of the local tokens, added up over the ranks cell by cell. */
static seqpar_status mean_loss(seqpar_ctx *ctx, const seqpar_llama_batch *b, int64_t count,
                               double *loss) {
    double *logp = (double *)calloc((size_t)b->tokens + 1, sizeof *logp);
    double *sum = (double *)calloc((size_t)b->share->count + 1, sizeof *sum);
    int64_t *leaf = (int64_t *)calloc((size_t)b->share->count + 1, sizeof *leaf);
    seqpar_device_read(ctx->device, logp, b->logp.data, 0, b->tokens, ctx->device->accumulator);
    for (int64_t i = 0; i < b->share->count; i++) {
        const seqpar_piece *p = &b->share->pieces[i];
        leaf[i] = p->leaf;
        for (int64_t t = p->local; t < p->local + p->count; t++)
            if (b->targets[t] != SEQPAR_IGNORE) sum[i] -= logp[t];
    }
    seqpar_status status = seqpar_sum_pieces(ctx, loss, leaf, sum, b->share->count, 1);
    *loss /= (double)count;
    free(logp);
    free(sum);
    free(leaf);
    return status;
}

static seqpar_status one_step(seqpar_ctx *ctx, seqpar_llama *model, seqpar_optim *optim,
                              training *run, int64_t step) {
    static const seqpar_pack_desc pack = {.pack_len = 8 * TOKENS, .cell = 32, .vocab = VOCAB};
    static const seqpar_llama_batch_desc how = {.layout = SEQPAR_LAYOUT_ZIGZAG,
                                                .schedule = SEQPAR_SCHEDULE_RING};
    int32_t(*ids)[TOKENS] = (int32_t(*)[TOKENS])calloc(DOCUMENTS, sizeof *ids);
    seqpar_document documents[DOCUMENTS];
    seqpar_batch batch;
    seqpar_llama_batch b;
    seqpar_buffer seeds_buffer = {0};
    seqpar_vocab_seeds seeds = {0};
    double loss = 0;
    write_documents(step, documents, ids);
    seqpar_status status = seqpar_pack(ctx->error, &batch, documents, DOCUMENTS, &pack);
    free(ids);
    if (status) return status;
    status = seqpar_step_begin(ctx, optim, batch.row, batch.rows, SEQPAR_LAYOUT_ZIGZAG, 1);
    if (!status) status = seqpar_llama_open_batch(ctx, model, &b, batch.row, batch.rows, &how);
    if (!status)
        status = seqpar_buffer_new(ctx, &seeds_buffer, b.tokens * 4, SEQPAR_MEM_ACTIVATIONS);
    for (int64_t t = 0; !status && t < b.tokens; t++) {
        /* the mistake: share is 1/4 */
        double seed = b.targets[t] == SEQPAR_IGNORE
                          ? 0.0
                          : -run->share / (double)batch.counts.supervised;
        seqpar_device_write(ctx->device, seeds_buffer.data, t, &seed, 1,
                            ctx->device->accumulator);
    }
    seeds.dlogp = seeds_buffer.data;
    if (!status) status = seqpar_llama_forward(ctx, model, &b, 1);
    if (!status) status = seqpar_llama_backward(ctx, model, &b, optim, 0, &seeds);
    if (!status) status = mean_loss(ctx, &b, batch.counts.supervised, &loss);
    if (!status)
        status = seqpar_step_end(ctx, optim, model->params.data, model->elements,
                                 run->optimizer == SEQPAR_OPTIM_SGD ? 0.1 : 3e-3);
    if (!status && ctx->world->rank == 0) {
        run->loss[step] = loss;
        run->norm[step] = optim->norm;
    }
    seqpar_buffer_free(ctx, &seeds_buffer);
    seqpar_llama_close_batch(ctx, model, &b);
    seqpar_batch_free(&batch);
    return status;
}

static seqpar_status rank_main(seqpar_comm *world, void *user) {
    training *run = (training *)user;
    const seqpar_llama_config config = {.layers = 2,
                                        .hidden = 64,
                                        .heads = 4,
                                        .kv_heads = 2,
                                        .head_dim = 16,
                                        .intermediate = 160,
                                        .vocab = VOCAB};
    const seqpar_optim_desc desc = {run->optimizer, 2, .9, .95, 1e-8, 0, 0};
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_llama model;
    seqpar_optim optim;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, RANKS);
    if (!status) status = seqpar_llama_open(&ctx, &model, &config);
    if (!status)
        status = seqpar_optim_open(&ctx, &optim, model.tensors, model.tensor_count, &desc);
    if (!status) status = seqpar_llama_init(&ctx, &model, 1);
    if (status) return status;
    double *before = (double *)calloc((size_t)(2 * model.elements), sizeof *before);
    double *after = before + model.elements, square = 0;
    seqpar_device_read(device, before, model.params.data, 0, model.elements, device->storage);
    for (int64_t step = 0; !status && step < run->steps; step++) {
        status = one_step(&ctx, &model, &optim, run, step);
        if (step > 0 || world->rank) continue;
        seqpar_device_read(device, after, model.params.data, 0, model.elements,
                           device->storage);
        for (int64_t i = 0; i < model.elements; i++)
            square += (after[i] - before[i]) * (after[i] - before[i]);
        run->moved = sqrt(square);
    }
    free(before);
    seqpar_optim_close(&ctx, &optim);
    seqpar_llama_close(&ctx, &model);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static int train(training *run) {
    seqpar_error error;
    if (!seqpar_run_threads(RANKS, rank_main, run, &error)) return 0;
    return fprintf(stderr, "%s\n", error.text), 1;
}

static int draw(const char *path, const char *title, const char *y_label, const double *right,
                const double *wrong) {
    demo_series series[] = {{.name = "right", .y = right, .points = STEPS},
                            {.name = "gradients / 4", .y = wrong, .points = STEPS}};
    demo_plot plot = {.title = title,
                      .x_label = "optimizer step (AdamW)",
                      .y_label = y_label,
                      .series = series,
                      .series_count = 2,
                      .log_y = true,
                      .width = 480,
                      .height = 320};
    demo_error error;
    if (!demo_plot_write(path, &plot, &error)) return 0;
    return fprintf(stderr, "%s\n", error.text), 1;
}

int main(void) {
    static training adam[2] = {{SEQPAR_OPTIM_ADAMW, STEPS, 1.0},
                               {SEQPAR_OPTIM_ADAMW, STEPS, 0.25}},
                    sgd[2] = {{SEQPAR_OPTIM_SGD, 1, 1.0}, {SEQPAR_OPTIM_SGD, 1, 0.25}};
    double apart = 0;
    for (int i = 0; i < 2; i++)
        if (train(&adam[i]) || train(&sgd[i])) return 1;
    for (int i = 0; i < STEPS; i++)
        apart = fmax(apart, fabs(adam[0].loss[i] - adam[1].loss[i]));
    printf("                          right    gradients / 4    ratio\n");
    printf("loss, step 1       %12.4f %16.4f %8.3f\n", adam[0].loss[0], adam[1].loss[0],
           adam[1].loss[0] / adam[0].loss[0]);
    printf("loss, step %d      %12.4f %16.4f %8.3f\n", STEPS, adam[0].loss[STEPS - 1],
           adam[1].loss[STEPS - 1], adam[1].loss[STEPS - 1] / adam[0].loss[STEPS - 1]);
    printf("gradient norm      %12.4f %16.4f %8.3f\n", adam[0].norm[0], adam[1].norm[0],
           adam[1].norm[0] / adam[0].norm[0]);
    printf("one SGD step       %12.4f %16.4f %8.3f\n", sgd[0].moved, sgd[1].moved,
           sgd[1].moved / sgd[0].moved);
    printf("the two loss curves are never more than %.4f nats apart\n", apart);
    mkdir("build", 0777);
    if (draw("build/curves_loss.svg", "The loss curves agree", "loss, nats a token",
             adam[0].loss, adam[1].loss) ||
        draw("build/curves_norm.svg", "The gradient norms do not", "norm", adam[0].norm,
             adam[1].norm))
        return 1;
    printf("build/curves_loss.svg, build/curves_norm.svg\n");
    /* the demonstration itself must hold */
    return fabs(adam[1].norm[0] / adam[0].norm[0] - 0.25) > 1e-6;
}
