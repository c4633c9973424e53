/* SPDX-License-Identifier: MIT OR Unlicense */
/* 09_cudnn_attention.cu - NVIDIA cuDNN's flash attention in the place of seqpar's, over ranks
 * that share a GPU.
 *
 * As in 07_own_attention.c, a kernel of seqpar_attn_desc.kernel gets my queries and the keys of
 * one source; cudnn_attention.h gives them to cuDNN. Compared with seqpar's own attention on
 * one rank. Without a GPU, verify/tests/test_cuda.sh runs it upon a stand-in, and asks cuDNN itself
 * for engines for its graphs.
 *
 * `make cudnn` builds it.            build/09_cudnn_attention [TOKENS] */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "cudnn_attention.h"

enum { HEADS = 4, KV_HEADS = 2, HEAD_DIM = 64, WIDE = HEADS * HEAD_DIM };
enum { NARROW = KV_HEADS * HEAD_DIM, GIVEN = 4, LOG = 8, NUMBERS, RUNS = 6 };
/* Each rounding to bf16 is off by 2^-9 at most. For out these are p, what a source gives, and
   the result of either side; for a gradient p or ds, delta, the outs it is made of, then the
   same. lse is fp32. */
static const struct {
    const char *name;
    int64_t width;
    double limit;
} numbers[NUMBERS] = {{"q", WIDE, 0},
                      {"k", NARROW, 0},
                      {"v", NARROW, 0},
                      {"dout", WIDE, 0},
                      {"out", WIDE, 4.0 / 512},
                      {"dq", WIDE, 8.0 / 512},
                      {"dk", NARROW, 8.0 / 512},
                      {"dv", NARROW, 8.0 / 512},
                      {"lse", HEADS, 1e-5}};
static const struct {
    int64_t ranks;
    int layout, schedule, cudnn;
} runs[RUNS] = {{1, SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_RING, 0},
                {1, SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_RING, 1},
                {3, SEQPAR_LAYOUT_STRIPE, SEQPAR_SCHEDULE_RING, 1},
                {4, SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_RING, 1},
                {4, SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_LLAMA3, 1},
                {4, SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_ULYSSES, 1}};

typedef struct {
    double *global[NUMBERS]; /* (tokens, width) */
    int64_t tokens;
    int run;
} problem;

static int dtype(int i) { return i == LOG ? SEQPAR_DTYPE_F32 : SEQPAR_DTYPE_BF16; }

static seqpar_status there_and_back(seqpar_ctx *ctx, seqpar_attn *attn, problem *p) {
    const seqpar_share *mine = seqpar_attn_share(attn);
    double *local = (double *)malloc((size_t)(mine->tokens + 1) * WIDE * sizeof *local);
    void *x[NUMBERS];
    for (int i = 0; i < NUMBERS; i++) {
        int64_t width = numbers[i].width;
        x[i] = ctx->device->alloc(ctx->device, (mine->tokens + 1) * width * 4);
        if (i >= GIVEN) continue;
        seqpar_scatter(local, p->global[i], mine, 0, width * (int64_t)sizeof *local);
        seqpar_device_write(ctx->device, x[i], 0, local, mine->tokens * width, dtype(i));
    }
    seqpar_attn_io io = {.q = x[0],
                         .k = x[1],
                         .v = x[2],
                         .out = x[4],
                         .lse = x[LOG],
                         .dout = x[3],
                         .dq = x[5],
                         .dk = x[6],
                         .dv = x[7]};
    seqpar_status status = seqpar_attn_forward(ctx, attn, &io);
    if (!status) status = seqpar_attn_backward(ctx, attn, &io);
    for (int i = GIVEN; i < NUMBERS && !status; i++) {
        int64_t width = numbers[i].width;
        seqpar_device_read(ctx->device, local, x[i], 0, mine->tokens * width, dtype(i));
        seqpar_gather(p->global[i], local, mine, 0, width * (int64_t)sizeof *local);
    }
    for (int i = 0; i < NUMBERS; i++) ctx->device->free(ctx->device, x[i]);
    free(local);
    return status;
}

static seqpar_status attend(seqpar_ctx *ctx, problem *p, cudnn_attention *c) {
    const int64_t cu_seqlens[] = {0, p->tokens * 5 / 12, p->tokens};
    seqpar_row row = {.tokens = p->tokens,

                      .cell = 32,
                      .docs = 2,
                      .cu_seqlens = cu_seqlens};
    seqpar_attn_kernel kernel = {cudnn_forward, cudnn_backward, c};
    seqpar_attn_desc desc = {.heads = HEADS,
                             .kv_heads = KV_HEADS,
                             .head_dim = HEAD_DIM,
                             .layout = runs[p->run].layout,
                             .schedule = runs[p->run].schedule,
                             .kernel = runs[p->run].cudnn ? &kernel : NULL}; /* this is all */
    seqpar_attn *attn;
    seqpar_status status = seqpar_attn_open(ctx, &attn, &row, 1, &desc);
    if (status) return status;
    status = there_and_back(ctx, attn, p);
    seqpar_attn_close(ctx, attn);
    return status;
}

static seqpar_status rank_main(seqpar_comm *world, void *user) {
    problem *p = (problem *)user;
    seqpar_error error = {};
    seqpar_cuda_desc desc = {.storage = SEQPAR_DTYPE_BF16};
    seqpar_device *device = seqpar_device_cuda(&error, &desc);
    cudnn_attention *c;
    seqpar_ctx ctx;
    seqpar_status status;
    if (!device) return fprintf(stderr, "error: %s\n", error.text), error.status;
    c = (cudnn_attention *)calloc(1, sizeof *c);
    status = seqpar_ctx_open(&ctx, world, device, runs[p->run].ranks);
    if (!status && cudnnCreate(&c->cudnn))
        status = seqpar_fail(ctx.error, SEQPAR_ERR_DEVICE, "cuDNN does not start");
    if (!status) status = attend(&ctx, p, c);
    seqpar_ctx_close(&ctx);
    cudnn_attention_close(c);
    free(c);
    seqpar_device_close(device);
    return status;
}

static double distance(const double *a, const double *b, int64_t count) {
    double diff = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        diff += (a[i] - b[i]) * (a[i] - b[i]);
        size += b[i] * b[i];
    }
    return sqrt(diff / size);
}

/* Attention of one run; its inputs are those of all. */
static int attention_run(problem *p, const problem *first, int run) {
    seqpar_error error;
    *p = *first;
    p->run = run;
    for (int i = GIVEN; i < NUMBERS; i++)
        p->global[i] = (double *)calloc((size_t)(p->tokens * numbers[i].width), sizeof(double));
    if (!seqpar_run_threads(runs[run].ranks, rank_main, p, &error)) return 0;
    fprintf(stderr, "error: %s\n", error.text);
    return 1;
}

static void print_heads(void) {
    printf("cuDNN's attention against seqpar's own on one rank: relative error\n        ");
    for (int i = 1; i < RUNS; i++) printf("%9lld", (long long)runs[i].ranks);
    printf(" ranks\n        ");
    for (int i = 1; i < RUNS; i++) printf("%9s", seqpar_layout_name(runs[i].layout));
    printf("\n        ");
    for (int i = 1; i < RUNS; i++) printf("%9s", seqpar_schedule_name(runs[i].schedule));
    printf("    limit\n");
}

/* How many are off by more than their roundings. */
static int print_errors(const problem *p) {
    int bad = 0;
    print_heads();
    for (int t = GIVEN; t < NUMBERS; t++) {
        printf("  %-6s", numbers[t].name);
        for (int i = 1; i < RUNS; i++) {
            double off = distance(p[i].global[t], p->global[t], p->tokens * numbers[t].width);
            printf("%9.1e", off);
            bad += !(off <= numbers[t].limit);
        }
        printf("%9.1e\n", numbers[t].limit);
    }
    printf("all within rounding: %s\n", bad ? "no" : "yes");
    return bad;
}

int main(int argc, char **argv) {
    static problem p[RUNS];
    int gpus = 0;
    cudaError_t none = cudaGetDeviceCount(&gpus);
    if (none || !gpus) return printf("skipped: no GPU (%s)\n", cudaGetErrorString(none)), 0;
    p->tokens = argc > 1 ? atoll(argv[1]) : 2048;
    for (int i = 0; i < GIVEN; i++) {
        p->global[i] = (double *)malloc((size_t)(p->tokens * WIDE) * sizeof(double));
        for (int64_t n = 0; n < p->tokens * WIDE; n++)
            p->global[i][n] = seqpar_random_normal(1, (uint64_t)i, (uint64_t)n);
    }
    for (int i = 0; i < RUNS; i++)
        if (attention_run(&p[i], p, i)) return 1;
    return print_errors(p) > 0;
}
