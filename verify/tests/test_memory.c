/* SPDX-License-Identifier: MIT OR Unlicense */
/* What a rank holds: activations fall as 1/P, attention holds what its plan needs and no
   more, everything is given back, and the counters agree with what the operating system saw.
   And nobody cheats: every rank does its part of the work. */
#include "support/counted.h"

static void *noted_calloc(size_t count, size_t size) {
    note_most(&block_largest, (int64_t)(count * size));
    return calloc(count, size);
}

static void *noted_realloc(void *data, size_t size) {
    note_most(&block_largest, (int64_t)size);
    return realloc(data, size);
}
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_CHECK_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#define STB_DS_IMPLEMENTATION
#define STBDS_REALLOC(context, data, size) noted_realloc(data, size)
#define STBDS_FREE(context, data)          free(data)
#include "support/run_model.h"
#include <sys/wait.h>
#include <unistd.h>
#define calloc(count, size) noted_calloc(count, size)
#include "support/run_objective.h"
#include "seqpar_check.h"
#include "seqpar_safetensors.h"
#include "trainer/objective/kto.h"
#include "trainer/ppo/ppo.h"
#include "trainer/objective/sft.h"

#define RANKS_MAX 8
#define FLOAT     4 /* bytes: all of this runs on the fp32 device */

/* ---- a model step, and what each rank held at its end ---- */

typedef struct rank_memory {
    seqpar_memory memory; /* after everything was closed */
    int64_t bytes_sent, workspace;
    char text[512];
} rank_memory;

typedef struct memory_run {
    model_job job;
    int64_t first_step;          /* 1: leave out what run_model.h keeps of the first step */
    int64_t more_steps;          /* than one */
    seqpar_adapter_desc adapter; /* rank above 0: they learn, in place of the model */
    rank_memory rank[RANKS_MAX];
} memory_run;

static seqpar_status run_steps(seqpar_ctx *ctx, const memory_run *m) {
    const model_job *job = &m->job;
    seqpar_optim_desc desc = {.kind = SEQPAR_OPTIM_ADAMW,
                              .zero_stage = job->way->zero_stage,
                              .beta1 = .9,
                              .beta2 = .95,
                              .eps = 1e-8,
                              .slice = job->way->slice,
                              .offload = job->way->offload};
    seqpar_llama model, adapters = {0}, *learns = m->adapter.rank ? &adapters : &model;
    seqpar_optim optim;
    seqpar_status status = params_open(ctx, &model, &job->task->config, &desc);
    memset(&optim, 0, sizeof optim);
    if (!status && m->adapter.rank)
        status = seqpar_llama_open_adapters(ctx, &adapters, &model, &m->adapter,
                                            desc.zero_stage == 3, desc.slice);
    if (!status)
        status = seqpar_optim_open(ctx, &optim, learns->tensors, learns->tensor_count, &desc);
    if (!status) seqpar_llama_init(ctx, &model, job->task->seed);
    if (!status && m->adapter.rank) seqpar_llama_init(ctx, &adapters, job->task->seed);
    if (m->adapter.rank) model.adapters = &adapters;
    for (int64_t i = 0; !status && i <= m->more_steps; i++)
        status = model_step(ctx, job, &model, &optim, m->first_step + i);
    seqpar_optim_close(ctx, &optim);
    seqpar_llama_close(ctx, &adapters);
    seqpar_llama_close(ctx, &model);
    return status;
}

static seqpar_status memory_main(seqpar_comm *world, void *user) {
    memory_run *m = user;
    const model_way *way = m->job.way;
    rank_memory *mine = &m->rank[world->rank];
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_inject_desc calm = {0};
    seqpar_comm *comm = way->inject
                            ? seqpar_comm_inject(
                                  world, way->inject_rank == world->rank ? way->inject : &calm)
                            : world;
    seqpar_ctx ctx;
    seqpar_status status = seqpar_ctx_open(&ctx, comm, device, way->sp);
    if (!status) status = m->first_step ? run_steps(&ctx, m) : model_rank(&ctx, &m->job);
    mine->memory = ctx.memory;
    mine->bytes_sent = comm->bytes_sent + (ctx.sp ? ctx.sp->bytes_sent : 0);
    mine->workspace = device ? device->workspace_bytes : 0;
    snprintf(mine->text, sizeof mine->text, "%s", world->error->text);
    seqpar_ctx_close(&ctx);
    if (comm != world) seqpar_comm_free(comm);
    seqpar_device_close(device);
    return status;
}

/* Runs a task in one way. The results that run_model.h wants to fill are thrown away. */
static seqpar_status run_memory(memory_run *m, const model_task *task, const model_way *way,
                                seqpar_error *error) {
    model_result *r = calloc(1, sizeof *r);
    int64_t elements = 1 << 20, n = task_tokens(task) + 1;
    seqpar_status status;
    r->logits = calloc((size_t)(n * task->config.vocab), sizeof(double));
    r->logp = calloc((size_t)n, sizeof(double));
    r->gradient = calloc((size_t)elements, sizeof(double));
    r->params = calloc((size_t)elements, sizeof(double));
    r->start = calloc((size_t)elements, sizeof(double));
    m->job = (model_job){task, way, r};
    status = seqpar_run_threads(way->dp * way->sp, memory_main, m, error);
    model_result_free(r);
    free(r);
    return status;
}

static void packed_task(model_task *task, const seqpar_llama_config *config,
                        const seqpar_document *docs, int64_t count,
                        const seqpar_pack_desc *desc) {
    seqpar_error error = {0};
    memset(task, 0, sizeof *task);
    if (seqpar_pack(&error, &task->batch, docs, count, desc)) {
        fprintf(stderr, "%s\n", error.text);
        exit(2);
    }
    task->config = *config;
    task->objective.count = task->batch.counts.supervised;
    task->lr = 1e-3;
}

/* One row of `tokens` tokens in `documents` documents of nearly equal length. */
static void row_task(model_task *task, const seqpar_llama_config *config, int64_t tokens,
                     int64_t documents, int64_t cell) {
    seqpar_document *docs = calloc((size_t)documents, sizeof *docs);
    int32_t *ids = calloc((size_t)tokens, sizeof *ids);
    seqpar_pack_desc desc = {.pack_len = tokens, .cell = cell};
    int64_t i;
    for (i = 0; i < tokens; i++) ids[i] = (int32_t)test_integer(0, config->vocab - 1);
    for (i = 0; i < documents; i++) {
        docs[i].ids = ids + i * tokens / documents;
        docs[i].tokens = (i + 1) * tokens / documents - i * tokens / documents;
        docs[i].unit = i;
    }
    packed_task(task, config, docs, documents, &desc);
    free(docs);
    free(ids);
}

static int64_t most(const memory_run *m, int64_t ranks, int kind) {
    int64_t r, peak = 0;
    for (r = 0; r < ranks; r++)
        if (m->rank[r].memory.peak[kind] > peak) peak = m->rank[r].memory.peak[kind];
    return peak;
}

static int64_t largest_share(const seqpar_row *rows, int64_t row_count, int layout,
                             int64_t ranks) {
    seqpar_share share;
    int64_t r, tokens = 0;
    for (r = 0; r < ranks; r++) {
        seqpar_split(NULL, &share, rows, row_count, &(seqpar_split_desc){layout, ranks, r});
        if (share.tokens > tokens) tokens = share.tokens;
        seqpar_share_free(&share);
    }
    return tokens;
}

/* ---- activations ---- */

static const seqpar_llama_config small = {.layers = 4,
                                          .hidden = 32,
                                          .heads = 4,
                                          .kv_heads = 2,
                                          .head_dim = 8,
                                          .intermediate = 64,
                                          .vocab = 17};

/* Floats per token of a layer's x, out and lse, */
static int64_t core_floats(const seqpar_llama_config *c) {
    return c->hidden + c->heads * c->head_dim + c->heads;
}

/* and of what a step keeps; recompute: those, 2: of two layers; and what stands behind the last
   one. */
static int64_t kept_floats(const seqpar_llama_config *c, int recompute) {
    int64_t wide = c->heads * c->head_dim, narrow = c->kv_heads * c->head_dim;
    int64_t rest = wide + 2 * narrow + c->hidden + 2 * c->intermediate + 2;
    /* normed output, its statistic, four values and four seeds of the loss */
    int64_t tail = c->hidden + 1 + 4 + 4;
    int64_t layers = recompute == 2 && c->layers > 2 ? 2 : c->layers;
    return layers * (core_floats(c) + (recompute ? 0 : rest)) + tail;
}

/* Do slots of the row end where its cells do? Of three documents, as row_task makes them. */
static int slots_of_cells(int64_t tokens, int64_t cell, int64_t ranks) {
    return tokens % (3 * cell) == 0 && tokens % (2 * ranks * cell) == 0;
}

static void test_activations(int64_t tokens, int64_t cell, int recompute, const int64_t *ranks,
                             int64_t count) {
    model_task task;
    int64_t i, one = 0;
    row_task(&task, &small, tokens, 3, cell);
    for (i = 0; i < count; i++) {
        model_way way = {.dp = 1,
                         .sp = ranks[i],
                         .accumulation = 1,
                         .threads = 1,
                         .steps = 1,
                         .layout = SEQPAR_LAYOUT_ZIGZAG,
                         .recompute = recompute};
        memory_run m = {0};
        seqpar_error error;
        int64_t share = largest_share(task.batch.row, 1, SEQPAR_LAYOUT_ZIGZAG, ranks[i]), peak;
        test_expect(!run_memory(&m, &task, &way, &error), "P=%lld: %s", (long long)ranks[i],
                    error.text);
        peak = most(&m, ranks[i], SEQPAR_MEM_ACTIVATIONS);
        if (i == 0) one = peak;
        test_expect(peak > 0 && (!slots_of_cells(tokens, cell, ranks[i]) ||
                                 (double)peak <= 1.10 * (double)one / (double)ranks[i]),
                    "P=%lld keeps %lld bytes, P=1 %lld", (long long)ranks[i], (long long)peak,
                    (long long)one);
        /* no constant: everything that is kept has a line a token */
        test_expect(peak * tokens <= one * share,
                    "P=%lld keeps %lld bytes for %lld of %lld tokens; P=1 %lld",
                    (long long)ranks[i], (long long)peak, (long long)share, (long long)tokens,
                    (long long)one);
        test_expect((double)peak <=
                        1.02 * (double)(share * FLOAT * kept_floats(&small, recompute)),
                    "P=%lld keeps %lld bytes, want %lld", (long long)ranks[i], (long long)peak,
                    (long long)(share * FLOAT * kept_floats(&small, recompute)));
        int64_t away = recompute == 2 ? share * FLOAT * (small.layers - 2) * core_floats(&small)
                                      : 0;
        test_expect(most(&m, ranks[i], SEQPAR_MEM_OFFLOADED) == away,
                    "P=%lld has %lld bytes in the second pool, want %lld", (long long)ranks[i],
                    (long long)most(&m, ranks[i], SEQPAR_MEM_OFFLOADED), (long long)away);
        printf(
            "#   S=%lld cell=%lld P=%lld recompute=%d: %lld bytes of activations, %.3f of P=1 "
            "(1/P is %.3f)\n",
            (long long)tokens, (long long)cell, (long long)ranks[i], recompute, (long long)peak,
            (double)peak / (double)one, 1.0 / (double)ranks[i]);
    }
    test_end("memory_activations S=%lld cell=%lld recompute=%d", (long long)tokens,
             (long long)cell, recompute);
    seqpar_batch_free(&task.batch);
}

static void test_recompute(void) {
    model_task task;
    int64_t peak[3];
    int recompute;
    seqpar_llama_config deep = small;
    deep.layers = 12;
    row_task(&task, &deep, 480, 2, 30);
    for (recompute = 0; recompute < 3; recompute++) {
        model_way way = {.dp = 1,
                         .sp = 4,
                         .accumulation = 1,
                         .threads = 1,
                         .steps = 1,
                         .layout = SEQPAR_LAYOUT_ZIGZAG,
                         .recompute = recompute};
        memory_run m = {0};
        seqpar_error error;
        test_expect(!run_memory(&m, &task, &way, &error), "%s", error.text);
        peak[recompute] = most(&m, 4, SEQPAR_MEM_ACTIVATIONS);
    }
    printf("#   recompute keeps %.3f of the activations, %.3f beside the second pool\n",
           (double)peak[1] / (double)peak[0], (double)peak[2] / (double)peak[0]);
    test_expect(peak[2] > 0 && 100 * peak[2] < 35 * peak[1],
                "%lld bytes beside the second pool, %lld without", (long long)peak[2],
                (long long)peak[1]);
    test_expect(peak[1] > 0 && 100 * peak[1] < 30 * peak[0],
                "%lld bytes with recompute, %lld without", (long long)peak[1],
                (long long)peak[0]);
    test_end("memory_recompute");
    seqpar_batch_free(&task.batch);
}

/* Of a model whose MLP is wide: of all that the MLP makes a tile is there, and a gradient has a place
   for each sum that waits between two tiles. */
static void test_mlp_tiles(int recompute, int64_t ranks) {
    enum { ROWS = 60, TOKENS = 960, CELL = 20 };
    model_task task;
    seqpar_llama_config wide = small;
    memory_run m[2];
    int64_t share, saved, group, waiting = 1;
    wide.intermediate = 512;
    memset(m, 0, sizeof m);
    row_task(&task, &wide, TOKENS, 3, CELL);
    share = largest_share(task.batch.row, 1, SEQPAR_LAYOUT_ZIGZAG, ranks);
    for (int tiled = 0; tiled < 2; tiled++) {
        model_way way = {.dp = 1,
                         .sp = ranks,
                         .accumulation = 1,
                         .threads = 1,
                         .steps = 1,
                         .layout = SEQPAR_LAYOUT_ZIGZAG,
                         .recompute = recompute,
                         .mlp_rows = tiled ? ROWS : 0};
        seqpar_error error;
        test_expect(!run_memory(&m[tiled], &task, &way, &error), "%s", error.text);
    }
    saved = most(&m[0], ranks, SEQPAR_MEM_ACTIVATIONS) -
            most(&m[1], ranks, SEQPAR_MEM_ACTIVATIONS);
    test_expect(saved == (recompute ? 0 : 2 * wide.layers * share * wide.intermediate * FLOAT),
                "tiles save %lld bytes of activations", (long long)saved);
    saved = most(&m[0], ranks, SEQPAR_MEM_SCRATCH) - most(&m[1], ranks, SEQPAR_MEM_SCRATCH);
    test_expect(saved ==
                    ((recompute ? 3 : 1) * share - 3 * CELL * 2) * wide.intermediate * FLOAT,
                "tiles save %lld bytes of scratch", (long long)saved);
    group = wide.hidden *
            (2 + 3 * wide.intermediate + 2 * wide.head_dim * (wide.heads + wide.kv_heads));
    while (CELL * 2 << (waiting - 1) < share) waiting++; /* a tile is two cells */
    saved = most(&m[1], ranks, SEQPAR_MEM_GRADIENTS) - most(&m[0], ranks, SEQPAR_MEM_GRADIENTS);
    test_expect(saved >= 0 && saved <= waiting * group * FLOAT,
                "tiles take %lld bytes of gradients more", (long long)saved);
    printf("#   P=%lld recompute=%d: gradients have %.2f groups more\n", (long long)ranks,
           recompute, (double)saved / (double)(group * FLOAT));
    test_end("memory_mlp_tiles P=%lld recompute=%d", (long long)ranks, recompute);
    seqpar_batch_free(&task.batch);
}

/* ---- gradients: what a step holds of them ---- */

/* Bytes of accumulators of all state, and of the largest group; in slices: of the largest group
   without tables, or slice of one. */
static void gradient_sizes(const seqpar_llama_config *config, int64_t slice, int64_t *all,
                           int64_t *largest) {
    seqpar_comm *self = seqpar_comm_self();
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_optim_desc desc = {.kind = SEQPAR_OPTIM_SGD, .slice = slice};
    seqpar_ctx ctx;
    seqpar_llama model;
    seqpar_optim optim;
    int64_t first, count;
    *largest = 0;
    test_expect(!seqpar_ctx_open(&ctx, self, device, 1) &&
                    !seqpar_llama_open(&ctx, &model, config) &&
                    !seqpar_optim_open(&ctx, &optim, model.tensors, model.tensor_count, &desc),
                "no model");
    for (int64_t g = 0; g < optim.blocks.groups; g++) {
        int64_t of_group = 0, table = slice && (g == 0 || g > config->layers);
        for (int64_t i = 0; seqpar_optim_slice(&optim, g, i, &first, &count); i++) {
            of_group = table ? count : of_group + count;
            if (of_group > *largest) *largest = of_group;
        }
    }
    *all = optim.blocks.elements * FLOAT;
    *largest *= FLOAT;
    seqpar_optim_close(&ctx, &optim);
    seqpar_llama_close(&ctx, &model);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(self);
}

/* `rows` rows of 1,024 tokens in one document each. */
static void rows_task(model_task *task, const seqpar_llama_config *config, int64_t rows,
                      int64_t tokens) {
    seqpar_document *docs = calloc((size_t)rows, sizeof *docs);
    int32_t *ids = calloc((size_t)rows * tokens, sizeof *ids);
    seqpar_pack_desc desc = {.pack_len = tokens, .cell = 32, .order = SEQPAR_PACK_UNIT_PER_ROW};
    for (int64_t i = 0; i < rows * tokens; i++)
        ids[i] = (int32_t)test_integer(0, config->vocab - 1);
    for (int64_t i = 0; i < rows; i++)
        docs[i] = (seqpar_document){.ids = ids + i * tokens, .tokens = tokens, .unit = i};
    packed_task(task, config, docs, rows, &desc);
    free(docs);
    free(ids);
}

static int64_t ceil_log2(int64_t n);

/* A table of three tenths of the weights, as in a small GPT-2. */
static void test_gradients(int tied) {
    static const seqpar_llama_config config = {.layers = 5,
                                               .hidden = 64,
                                               .heads = 4,
                                               .kv_heads = 4,
                                               .head_dim = 16,
                                               .intermediate = 160,
                                               .vocab = 1920};
    static const struct {
        int64_t dp, sp, micro;
        int stage;
        int64_t slice; /* of 512 rows of a table; a rank of 8 has few tokens enough for them */
    } cases[] = {{1, 1, 1, 2, 0},       {1, 2, 1, 2, 0}, {1, 4, 1, 2, 0}, {1, 8, 1, 2, 0},
                 {1, 8, 1, 2, 1 << 15}, {1, 1, 1, 0, 0}, {1, 4, 1, 0, 0}, {1, 1, 4, 1, 0},
                 {1, 1, 3, 2, 0},       {4, 1, 4, 2, 0}, {2, 2, 2, 0, 0}};
    seqpar_llama_config c = config;
    int64_t all, largest, before = 0;
    c.tied = tied;
    /* a tied table has all that another has, and two sums */
    for (size_t i = 0; i < (tied ? sizeof cases / sizeof *cases : 5); i++) {
        /* of a share of a row; or the vocab's sums that wait */
        int64_t dp = cases[i].dp, sp = cases[i].sp, world = dp * sp, micro = cases[i].micro;
        int64_t nodes = world > 1 ? 2 : 1;
        int stage = cases[i].stage;
        model_way way = {.dp = dp,
                         .sp = sp,
                         .accumulation = micro,
                         .threads = 1,
                         .layout = SEQPAR_LAYOUT_ZIGZAG,
                         .recompute = 1,
                         .zero_stage = stage,
                         .slice = cases[i].slice};
        model_result unused = {0};
        memory_run m = {.first_step = 1};
        model_task task;
        seqpar_error error = {0};
        gradient_sizes(&c, way.slice, &all, &largest);
        rows_task(&task, &c, dp * micro, 1024);
        m.job = (model_job){&task, &way, &unused};
        test_expect(!seqpar_run_threads(world, memory_main, &m, &error), "%s", error.text);
        double own = (double)all / (double)world + 4096.0 * (double)(c.layers + 2);
        double peak = (double)most(&m, world, SEQPAR_MEM_GRADIENTS);
        double moving = (double)most(&m, world, SEQPAR_MEM_EXCHANGE);
        double bound = (1.5 + (double)ceil_log2(micro)) * own + (double)(nodes * largest);
        test_expect(peak > 0 && peak <= bound,
                    "D=%lld P=%lld A=%lld stage %d: %.0f bytes of gradients, the bound is %.0f",
                    (long long)dp, (long long)sp, (long long)micro, stage, peak, bound);
        /* what arrives is a node of every rank, of which this one owns its part; attention's
           messages are counted there, too */
        int64_t arrives = sp > 1 ? nodes : 1; /* of each rank */
        test_expect(
            (sp > 1 && !way.slice) ||
                moving <=
                    (world > 1 ? (double)(arrives * largest) + 4096.0 * (double)world : 0),
            "D=%lld P=%lld A=%lld stage %d: %.0f bytes on their way", (long long)dp,
            (long long)sp, (long long)micro, stage, moving);
        test_expect(sp == 1 || dp > 1 || (int64_t)peak <= before,
                    "P=%lld stage %d: %.0f bytes, fewer ranks %lld", (long long)sp, stage, peak,
                    (long long)before);
        before = (int64_t)peak;
        printf("#   D=%lld P=%lld A=%lld%s: gradients %.2f of the weights' bytes, the bound "
               "%.2f; %.2f on their way; the largest group %.2f\n",
               (long long)dp, (long long)sp, (long long)micro,
               way.slice ? ", tables in slices" : "", peak / (double)all, bound / (double)all,
               moving / (double)all, (double)largest / (double)all);
        seqpar_batch_free(&task.batch);
    }
    test_end("memory_gradients %s", tied ? "tied" : "untied");
}

/* ---- ZeRO: what a rank holds, and what is sent ---- */

/* Parameters of groups first .. last, with the gaps behind tensors and without. */
static int64_t group_bytes(const seqpar_llama_config *config, int64_t first, int64_t last,
                           int gaps) {
    seqpar_comm *self = seqpar_comm_self();
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_llama model;
    int64_t bytes = 0;
    test_expect(!seqpar_ctx_open(&ctx, self, device, 1) &&
                    !seqpar_llama_open_table(&ctx, &model, config),
                "no model");
    for (int64_t i = 0; i < model.tensor_count; i++) {
        const seqpar_tensor *t = &model.tensors[i];
        int64_t n = t->rows * t->cols;
        if (gaps) n = (n + SEQPAR_PARAM_BLOCK - 1) / SEQPAR_PARAM_BLOCK * SEQPAR_PARAM_BLOCK;
        if (t->group >= first && t->group <= last) bytes += n * FLOAT;
    }
    seqpar_llama_close(&ctx, &model);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(self);
    return bytes;
}

/* Two that follow each other; the tables of a pass meet a layer each, or the last norm. */
static int64_t two_groups(const seqpar_llama_config *c) {
    int64_t most = 0, groups = c->layers + (c->tied ? 2 : 3);
    for (int64_t g = 0; g + 1 < groups; g++) {
        int64_t bytes = group_bytes(c, g, g + 1, 1);
        if (bytes > most) most = bytes;
    }
    return most;
}

/* What a step sends of parameters and gradients, all ranks together: ZeRO's formulas. Whoever does
   not own them sends gradients to owners (a tied table's two sums), from where parameters (stage
   0: gradients in whole blocks) come back; at stage 3 parameters are gathered twice instead, but
   embedding and head of an untied model once. */
static int64_t zero_bytes(const seqpar_llama_config *c, int64_t world, int64_t micro,
                          int stage) {
    int64_t all = group_bytes(c, 0, INT64_MAX - 1, 0), table = group_bytes(c, 0, 0, 0);
    int64_t blocks = group_bytes(c, 0, INT64_MAX - 1, 1);
    int64_t gradients = micro * (all + (c->tied ? table : 0));
    int64_t back = stage == 3   ? micro * (2 * all - (c->tied ? 0 : 2 * table))
                   : stage == 0 ? blocks
                                : all;
    int64_t norm = 8 * blocks / FLOAT / SEQPAR_PARAM_BLOCK;
    return (world - 1) * (gradients + back + norm);
}

static int64_t sent_by_all(const memory_run *m, int64_t world) {
    int64_t bytes = 0;
    for (int64_t r = 0; r < world; r++) bytes += m->rank[r].bytes_sent;
    return bytes;
}

/* Of one rank the messages of ranks that agree, which are a few hundred bytes each. */
static void zero_expect(const model_task *task, const model_way *way) {
    const seqpar_llama_config *c = &task->config;
    int64_t world = way->dp * way->sp, all = group_bytes(c, 0, INT64_MAX - 1, 1);
    int64_t slices = 2 * (c->layers + 3);
    int64_t share = all / world + slices * 4 * SEQPAR_PARAM_BLOCK;
    int64_t rope = 1024 * c->head_dim * FLOAT;
    int64_t kept = way->zero_stage ? share : all, two_of = two_groups(c);
    int off_state = way->offload & SEQPAR_OFFLOAD_STATE;
    int off_params = way->offload & SEQPAR_OFFLOAD_PARAMS;
    int64_t weights = way->zero_stage < 3 ? all
                      : off_params        ? two_of
                                          : share + (world > 1 ? two_of : all);
    /* offloaded, what a rank updates of two groups is there at a time */
    int64_t turns = 2 * (way->zero_stage ? two_of / world + 8 * SEQPAR_PARAM_BLOCK : two_of);
    int64_t state = off_state ? 2 * turns : 2 * kept;
    int64_t offloaded = (off_state ? 2 * kept : 0) + (off_params ? share : 0);
    model_result unused = {0};
    memory_run m = {.first_step = 1, .job = {task, way, &unused}}, two = m;
    seqpar_error error = {0};
    if (off_params) state += turns;
    two.more_steps = 1;
    test_expect(!seqpar_run_threads(world, memory_main, &m, &error), "%s", error.text);
    test_expect(!seqpar_run_threads(world, memory_main, &two, &error), "%s", error.text);
    int64_t sent = sent_by_all(&two, world) - sent_by_all(&m, world);
    int64_t formula = zero_bytes(c, world, way->accumulation, way->zero_stage);
    int64_t agreeing = 1024 * world * world * (3 + way->accumulation);
    for (int64_t r = 0; r < world; r++) {
        const seqpar_memory *peak = &two.rank[r].memory;
        test_expect(
            peak->peak[SEQPAR_MEM_WEIGHTS] <= weights + rope,
            "D=%lld P=%lld stage %d: rank %lld has %lld bytes of weights, the bound is %lld",
            (long long)way->dp, (long long)way->sp, way->zero_stage, (long long)r,
            (long long)peak->peak[SEQPAR_MEM_WEIGHTS], (long long)(weights + rope));
        test_expect(
            peak->peak[SEQPAR_MEM_OPTIMIZER] <= state,
            "D=%lld P=%lld stage %d: rank %lld has %lld bytes of state, the bound is %lld",
            (long long)way->dp, (long long)way->sp, way->zero_stage, (long long)r,
            (long long)peak->peak[SEQPAR_MEM_OPTIMIZER], (long long)state);
        test_expect(
            peak->peak[SEQPAR_MEM_OFFLOADED] <= offloaded &&
                peak->peak[SEQPAR_MEM_OFFLOADED] >= offloaded / 2 &&
                peak->now[SEQPAR_MEM_OFFLOADED] == 0,
            "D=%lld P=%lld stage %d: rank %lld has %lld bytes offloaded (%lld left), the "
            "bound is %lld",
            (long long)way->dp, (long long)way->sp, way->zero_stage, (long long)r,
            (long long)peak->peak[SEQPAR_MEM_OFFLOADED],
            (long long)peak->now[SEQPAR_MEM_OFFLOADED], (long long)offloaded);
    }
    if (way->sp == 1) /* else attention's messages are counted, too */
        test_expect(sent >= formula && sent <= formula + (world > 1 ? agreeing : 0),
                    "D=%lld A=%lld stage %d: %lld bytes sent in a step, the formula says %lld",
                    (long long)way->dp, (long long)way->accumulation, way->zero_stage,
                    (long long)sent, (long long)formula);
    printf(
        "#   D=%lld P=%lld A=%lld stage %d offload %d: weights %.2f, state %.2f of one rank's, "
        "%.2f of the weights' bytes sent by a rank\n",
        (long long)way->dp, (long long)way->sp, (long long)way->accumulation, way->zero_stage,
        way->offload, (double)most(&two, world, SEQPAR_MEM_WEIGHTS) / (double)all,
        (double)most(&two, world, SEQPAR_MEM_OPTIMIZER) / (double)(2 * all),
        (double)sent / (double)world / (double)all);
}

/* ---- adapters: gradients, state and what is sent are theirs alone ---- */

static const seqpar_adapter_desc adapters_of_all = {3, 1, SEQPAR_ADAPT_ALL};

/* gaps: with those behind tensors */
static int64_t adapter_bytes(const seqpar_llama_config *c, int gaps) {
    const int64_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    const int64_t sides[] = {c->hidden,
                             q,
                             c->hidden,
                             kv,
                             c->hidden,
                             kv,
                             q,
                             c->hidden,
                             c->hidden,
                             c->intermediate,
                             c->hidden,
                             c->intermediate,
                             c->intermediate,
                             c->hidden};
    int64_t values = 0, block = gaps ? SEQPAR_PARAM_BLOCK : 1;
    for (size_t i = 0; i < sizeof sides / sizeof *sides; i++)
        values += (adapters_of_all.rank * sides[i] + block - 1) / block * block;
    return c->layers * values * FLOAT;
}

/* As zero_bytes; a frozen model's weights are gathered as those of one that learns, and its tables
   once. */
static int64_t adapter_formula(const seqpar_llama_config *c, const model_way *way) {
    int64_t own = adapter_bytes(c, 0), blocks = adapter_bytes(c, 1), micro = way->accumulation;
    int64_t all = group_bytes(c, 0, INT64_MAX - 1, 0), table = group_bytes(c, 0, 0, 0);
    int64_t back = way->zero_stage == 3
                       ? micro * (2 * own + 2 * all - (c->tied ? 0 : 2) * table)
                   : way->zero_stage == 0 ? blocks
                                          : own;
    return (way->dp - 1) * (micro * own + back + 8 * blocks / FLOAT / SEQPAR_PARAM_BLOCK);
}

static void adapters_expect(const model_task *task, const model_way *way) {
    const seqpar_llama_config *c = &task->config;
    int64_t world = way->dp, all = adapter_bytes(c, 1),
            room = 2 * c->layers * 4 * SEQPAR_PARAM_BLOCK;
    int64_t kept = way->zero_stage ? all / world + room : all,
            slack = 2 * 1024 * world * world * (3 + way->accumulation);
    model_result unused = {0};
    memory_run m = {.first_step = 1, .job = {task, way, &unused}, .adapter = adapters_of_all},
               two = m;
    seqpar_error error = {0};
    two.more_steps = 1;
    test_expect(!seqpar_run_threads(world, memory_main, &m, &error), "%s", error.text);
    test_expect(!seqpar_run_threads(world, memory_main, &two, &error), "%s", error.text);
    int64_t sent = sent_by_all(&two, world) - sent_by_all(&m, world),
            formula = adapter_formula(c, way);
    for (int64_t r = 0; r < world; r++) {
        const int64_t *peak = two.rank[r].memory.peak;
        test_expect(
            peak[SEQPAR_MEM_OPTIMIZER] <= 2 * kept && peak[SEQPAR_MEM_GRADIENTS] <= 2 * all,
            "D=%lld stage %d: rank %lld has %lld bytes of state and %lld of gradients, the "
            "adapters are %lld",
            (long long)world, way->zero_stage, (long long)r,
            (long long)peak[SEQPAR_MEM_OPTIMIZER], (long long)peak[SEQPAR_MEM_GRADIENTS],
            (long long)all);
    }
    test_expect(sent >= formula && sent <= formula + (world > 1 ? slack : 0),
                "D=%lld A=%lld stage %d: %lld bytes sent in a step, the formula says %lld",
                (long long)world, (long long)way->accumulation, way->zero_stage,
                (long long)sent, (long long)formula);
    printf(
        "#   adapters, D=%lld A=%lld stage %d: state %.2f of one rank's, %.3f of the model's bytes sent "
        "by a rank\n",
        (long long)world, (long long)way->accumulation, way->zero_stage,
        (double)most(&two, world, SEQPAR_MEM_OPTIMIZER) / (double)(2 * all),
        (double)sent / (double)world / (double)group_bytes(c, 0, INT64_MAX - 1, 1));
}

static void test_zero_adapters(int tied) {
    static const int64_t shapes[][2] = {{1, 1}, {2, 1}, {3, 2}, {8, 1}};
    seqpar_llama_config config = {.layers = 7,
                                  .hidden = 64,
                                  .heads = 4,
                                  .kv_heads = 2,
                                  .head_dim = 16,
                                  .intermediate = 160,
                                  .vocab = 331,
                                  .tied = tied};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int stage = 0; stage <= 3; stage++) {
            model_way way = {.dp = shapes[i][0],
                             .sp = 1,
                             .accumulation = shapes[i][1],
                             .threads = 1,
                             .layout = SEQPAR_LAYOUT_ZIGZAG,
                             .zero_stage = stage};
            model_task task;
            rows_task(&task, &config, way.dp * way.accumulation, 160);
            adapters_expect(&task, &way);
            seqpar_batch_free(&task.batch);
        }
    test_end("memory_zero_adapters %s: state, gradients and bytes sent at stages 0 to 3",
             tied ? "tied" : "untied");
}

static void test_zero(int tied) {
    static const seqpar_llama_config config = {.layers = 7,
                                               .hidden = 64,
                                               .heads = 4,
                                               .kv_heads = 4,
                                               .head_dim = 16,
                                               .intermediate = 160,
                                               .vocab = 331};
    static const int64_t shapes[][3] = {{1, 1, 1}, {2, 1, 1}, {3, 1, 2}, {2, 2, 1},
                                        {4, 1, 3}, {1, 5, 1}, {8, 1, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int stage = 0; stage <= 3; stage++) {
            model_way way = {.dp = shapes[i][0],
                             .sp = shapes[i][1],
                             .accumulation = shapes[i][2],
                             .threads = 1,
                             .layout = SEQPAR_LAYOUT_ZIGZAG,
                             .recompute = (int)(i % 2),
                             .zero_stage = stage};
            seqpar_llama_config c = config;
            model_task task;
            c.tied = tied;
            rows_task(&task, &c, way.dp * way.accumulation, 160);
            zero_expect(&task, &way);
            way.offload = stage < 3 ? 1 : 1 + (int)(i % 3);
            zero_expect(&task, &way);
            seqpar_batch_free(&task.batch);
        }
    test_end("memory_zero %s: weights, state and bytes sent at stages 0 to 3",
             tied ? "tied" : "untied");
}

/* Values that wait between two runs of the vocabulary, which ends each with whole subtrees: as
   many as a count of runs has digits. A run of 576 tokens, 18 cells of 32, would leave six. */
static void test_vocab_places(void) {
    enum { ROWS = 4, HIDDEN = 576, RUNS_LOG2 = 3 }; /* 8 runs of 512 of 4,096 tokens */
    const seqpar_llama_config config = {.vocab = 99};
    const seqpar_vocab_desc desc = {.hidden = HIDDEN, .vocab = 99};
    const seqpar_split_desc split = {SEQPAR_LAYOUT_ZIGZAG, 1, 0};
    const seqpar_optim_desc sgd = {.kind = SEQPAR_OPTIM_SGD};
    const seqpar_tensor tensor = {"table", 99, HIDDEN, 0, 0, 0};
    const seqpar_token_fold *fold = NULL;
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_comm *self = seqpar_comm_self();
    seqpar_share share = {0};
    seqpar_optim optim = {0};
    seqpar_ctx ctx;
    model_task task;
    rows_task(&task, &config, ROWS, 1024);
    test_expect(
        !seqpar_ctx_open(&ctx, self, device, 1) &&
            !seqpar_optim_open(&ctx, &optim, &tensor, 1, &sgd) &&
            !seqpar_step_begin(&ctx, &optim, task.batch.row, ROWS, SEQPAR_LAYOUT_ZIGZAG, 1) &&
            !seqpar_split(ctx.error, &share, task.batch.row, ROWS, &split) &&
            !seqpar_step_fold(&ctx, &optim, &fold, &share, 0),
        "%s", self->error->text);
    int64_t places = fold ? seqpar_vocab_node_count(&share, fold, &desc) : -1;
    test_expect(places >= 1 && places <= RUNS_LOG2, "%lld places", (long long)places);
    for (int64_t most = -1; fold && most < 2; most++) /* a tile has a token or more */
        test_expect(seqpar_token_node_count(&share, fold, most) ==
                            seqpar_token_node_count(&share, fold, 1) &&
                        seqpar_token_tile_rows(&share, most, 1) ==
                            seqpar_token_tile_rows(&share, 1, 1),
                    "tiles of %lld tokens are not those of 1", (long long)most);
    seqpar_share_free(&share);
    seqpar_optim_close(&ctx, &optim);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(self);
    seqpar_batch_free(&task.batch);
    test_end("memory_vocab_places: %lld", (long long)places);
}

/* ---- attention: buffers, work and bytes of every rank ---- */

typedef struct attn_case {
    int64_t tokens, cells, ranks, heads, kv_heads, head_dim, stride; /* cells: of the row */
    int layout, schedule, full;
} attn_case;

typedef struct attn_rank {
    int64_t exchange, scratch, left, flops, planned, bytes, planned_bytes, query_places,
        key_places;
} attn_rank;

typedef struct attn_run {
    const attn_case *c;
    seqpar_row row;
    int64_t cu[2];
    attn_rank rank[RANKS_MAX];
} attn_run;

static float *some_floats(int64_t count) {
    float *x = malloc((size_t)(count + 1) * sizeof *x);
    int64_t i;
    for (i = 0; i < count; i++) x[i] = (float)(i * 37 % 101) / 101 - .5f;
    return x;
}

/* Forward and backward on buffers of this test's own, so that ctx counts only what attention
   allocates. */
static seqpar_status attn_passes(seqpar_ctx *ctx, seqpar_attn *attn, const attn_case *c) {
    int64_t n = seqpar_attn_share(attn)->tokens, wide = n * c->heads * c->head_dim;
    int64_t narrow = n * c->kv_heads * c->head_dim, i;
    float *x[9]; /* q, k, v, dout, out, lse, dq, dk, dv */
    seqpar_status status;
    for (i = 0; i < 9; i++) x[i] = some_floats(i == 1 || i == 2 || i > 6 ? narrow : wide);
    seqpar_attn_io io = {.q = x[0],
                         .k = x[1],
                         .v = x[2],
                         .out = x[4],
                         .lse = x[5],
                         .dout = x[3],
                         .dq = x[6],
                         .dk = x[7],
                         .dv = x[8]};
    status = seqpar_attn_forward(ctx, attn, &io);
    if (!status) status = seqpar_attn_backward(ctx, attn, &io);
    for (i = 0; i < 9; i++) free(x[i]);
    return status;
}

static seqpar_status attn_rank_main(seqpar_ctx *ctx, attn_run *run) {
    const attn_case *c = run->c;
    attn_rank *mine = &run->rank[ctx->sp_rank];
    seqpar_attn_desc desc = {.heads = c->heads,
                             .kv_heads = c->kv_heads,
                             .head_dim = c->head_dim,
                             .layout = c->layout,
                             .schedule = c->schedule,
                             .heads_k_stride = c->stride,
                             .full = c->full};
    seqpar_attn *attn;
    seqpar_attn_cost cost = {0};
    seqpar_status status = seqpar_attn_open(ctx, &attn, &run->row, 1, &desc);
    if (status) return status;
    int64_t asked = ctx->sp->bytes_sent; /* whether all ranks were given the same */
    status = attn_passes(ctx, attn, c);
    if (!status) status = seqpar_attn_cost_of(ctx, attn, &cost, NULL);
    mine->exchange = ctx->memory.peak[SEQPAR_MEM_EXCHANGE];
    mine->scratch = ctx->memory.peak[SEQPAR_MEM_SCRATCH];
    mine->left = ctx->memory.total;
    mine->flops = ctx->device->attn_flops;
    mine->planned = cost.forward_flops + cost.backward_flops;
    mine->bytes = ctx->sp->bytes_sent - asked;
    mine->planned_bytes = cost.forward_bytes + cost.backward_bytes;
    mine->query_places = attn->query_slots;
    mine->key_places = attn->key_slots;
    seqpar_attn_close(ctx, attn);
    return status;
}

static seqpar_status attn_main(seqpar_comm *world, void *user) {
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, world->size);
    if (!status) status = attn_rank_main(&ctx, (attn_run *)user);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static seqpar_row row_of(const attn_case *c, const int64_t *cu) {
    return (seqpar_row){.tokens = c->tokens,
                        .cell = (c->tokens + c->cells - 1) / c->cells,
                        .docs = 1,
                        .cu_seqlens = cu};
}

/* returns the most of each over the ranks */
static attn_rank run_attn(attn_run *run, const attn_case *c) {
    seqpar_error error;
    attn_rank top = {0};
    int64_t r, i;
    memset(run, 0, sizeof *run);
    run->c = c;
    run->cu[1] = c->tokens;
    run->row = row_of(c, run->cu);
    test_expect(!seqpar_run_threads(c->ranks, attn_main, run, &error), "%s", error.text);
    for (r = 0; r < c->ranks; r++)
        for (i = 0; i < (int64_t)(sizeof top / sizeof(int64_t)); i++)
            if ((&run->rank[r].exchange)[i] > (&top.exchange)[i])
                (&top.exchange)[i] = (&run->rank[r].exchange)[i];
    return top;
}

static int64_t ceil_log2(int64_t n) {
    int64_t bits = 0;
    while ((INT64_C(1) << bits) < n) bits++;
    return bits;
}

static int aligned(const attn_case *c) {
    return !(c->cells & (c->cells - 1)) && !(c->ranks & (c->ranks - 1)) &&
           c->cells % (2 * c->ranks) == 0;
}

/* Most nodes a rank makes for a key of another rank. Where 2P divides L and both are powers
   of two, each of the two runs of a zigzag share is one node; causal, half of the keys are
   seen by both runs and half by none, or all of them by one. Elsewhere a run of n leaves
   falls into at most 2 ceil(log2(n + 1)) nodes. */
static int64_t nodes_of_share(const attn_case *c) {
    if (aligned(c)) return c->full ? 2 : 1;
    return 2 * 2 * ceil_log2((c->cells + 2 * c->ranks - 1) / (2 * c->ranks) + 1);
}

/* Ulysses of all ranks: q, k, v, dout, lse, delta of all S tokens for a share of the heads;
   results dq, dk, dv likewise; messages: the former of the own tokens for all heads. Nine
   tensors begin at multiples of 64 bytes. */
static int64_t ulysses_bound(const attn_case *c, int64_t share) {
    int64_t in = 2 * (c->heads + c->kv_heads) * c->head_dim + 2 * c->heads;
    int64_t results = (c->heads + 2 * c->kv_heads) * c->head_dim;
    return FLOAT * ((c->tokens + c->ranks - 1) / c->ranks * (in + results) + share * in) +
           9 * 64;
}

/* Ring: two slots of k and v of the largest share T; in the backward pass twice the message
   with dk, dv of one rank's keys, each way. Llama3: two slots of k and v of all S tokens for
   `stride` heads, messages to and from all. */
static int64_t exchange_bound(const attn_case *c, int64_t share) {
    int64_t nodes = nodes_of_share(c);
    if (c->ranks == 1) return 0;
    if (c->schedule == SEQPAR_SCHEDULE_ULYSSES) return ulysses_bound(c, share);
    if (c->schedule == SEQPAR_SCHEDULE_RING)
        return FLOAT * c->kv_heads * c->head_dim * share * (2 * 2 + 4 * 2 * nodes);
    return FLOAT * c->stride * c->head_dim *
           (2 * 2 * c->tokens + 2 * 2 * nodes * (c->tokens + c->ranks * share));
}

/* How many partial sums wait for their sibling while shares come around: what has come of
   the low and of the high slots are two runs each (before and after the wrap), and a run
   from an end of its half falls into at most one node a bit. */
static int64_t waiting_places(const attn_case *c) {
    int64_t bits = ceil_log2(aligned(c) ? c->ranks : c->cells);
    return bits > 1 ? 4 * (bits - 1) : 2;
}

/* States (o, m, l) of the queries and pending dk, dv of the keys. Llama3 computes all keys
   in one go (no state waits between steps), but holds pending dk, dv of two head ranges.
   Delta is one number a query and head. */
static int64_t scratch_bound(const attn_case *c, int64_t share) {
    int64_t places = waiting_places(c), delta = share * c->heads;
    int64_t heads = c->schedule == SEQPAR_SCHEDULE_RING ? c->kv_heads : c->stride;
    int64_t group = heads * (c->heads / c->kv_heads);
    int64_t states = places * share * group * (c->head_dim + 2);
    int64_t keys = places * 2 * share * heads * c->head_dim;
    /* all keys are there at once */
    if (c->ranks == 1 || c->schedule == SEQPAR_SCHEDULE_ULYSSES) return FLOAT * delta;
    return FLOAT * (delta + (c->schedule == SEQPAR_SCHEDULE_RING ? states + keys : 2 * keys));
}

static void test_attention_memory(const attn_case *c) {
    attn_run run;
    attn_rank top = run_attn(&run, c);
    int64_t share = largest_share(&run.row, 1, c->layout, c->ranks), r;
    for (r = 0; r < c->ranks; r++) {
        attn_rank *a = &run.rank[r];
        test_expect(a->left == 0, "rank %lld still holds %lld bytes", (long long)r,
                    (long long)a->left);
        test_expect(a->bytes == a->planned_bytes,
                    "rank %lld sent %lld bytes, the plan says %lld", (long long)r,
                    (long long)a->bytes, (long long)a->planned_bytes);
        test_expect(c->ranks == 1 ? a->bytes == 0 : a->bytes > 0,
                    "rank %lld of %lld sent %lld bytes", (long long)r, (long long)c->ranks,
                    (long long)a->bytes);
    }
    test_expect(top.exchange <= exchange_bound(c, share), "exchange %lld bytes, at most %lld",
                (long long)top.exchange, (long long)exchange_bound(c, share));
    test_expect(c->ranks == 1 || top.exchange >= FLOAT * share * 4 * c->head_dim,
                "exchange %lld bytes: too few to be true", (long long)top.exchange);
    test_expect(top.scratch <= scratch_bound(c, share), "scratch %lld bytes, at most %lld",
                (long long)top.scratch, (long long)scratch_bound(c, share));
    printf("#   %s %s P=%lld S=%lld L=%lld stride=%lld: exchange %lld of %lld, scratch %lld of "
           "%lld (%lld states, %lld keys wait)\n",
           seqpar_schedule_name(c->schedule), c->full ? "full" : "causal", (long long)c->ranks,
           (long long)c->tokens, (long long)c->cells, (long long)c->stride,
           (long long)top.exchange, (long long)exchange_bound(c, share), (long long)top.scratch,
           (long long)scratch_bound(c, share), (long long)top.query_places,
           (long long)top.key_places);
    test_end("memory_attention %s P=%lld S=%lld L=%lld stride=%lld %s",
             seqpar_schedule_name(c->schedule), (long long)c->ranks, (long long)c->tokens,
             (long long)c->cells, (long long)c->stride, c->full ? "full" : "causal");
}

/* A causal row of S tokens has S (S + 1) / 2 visible pairs; a pair costs 4 d forward, 10 d
   backward. */
static void test_work(const attn_case *c) {
    attn_run run;
    attn_rank top = run_attn(&run, c);
    int64_t whole = (c->full ? c->tokens * c->tokens : c->tokens * (c->tokens + 1) / 2) *
                    c->heads * 14 * c->head_dim;
    int64_t sum = 0, r;
    for (r = 0; r < c->ranks; r++) {
        sum += run.rank[r].flops;
        test_expect(run.rank[r].flops == run.rank[r].planned,
                    "rank %lld computed %lld FLOPs, the plan says %lld", (long long)r,
                    (long long)run.rank[r].flops, (long long)run.rank[r].planned);
    }
    test_expect(sum == whole, "all ranks computed %lld FLOPs, the row has %lld", (long long)sum,
                (long long)whole);
    test_expect(c->layout != SEQPAR_LAYOUT_ZIGZAG ||
                    (double)top.flops <= 1.1 * (double)whole / (double)c->ranks,
                "the busiest of %lld ranks computed %.3f of the whole", (long long)c->ranks,
                (double)top.flops / (double)whole);
    printf("#   %s %s P=%lld: the busiest rank computes %.3f of the whole\n",
           seqpar_layout_name(c->layout), seqpar_schedule_name(c->schedule),
           (long long)c->ranks, (double)top.flops / (double)whole);
    test_end("memory_work %s %s P=%lld %s", seqpar_layout_name(c->layout),
             seqpar_schedule_name(c->schedule), (long long)c->ranks,
             c->full ? "full" : "causal");
}

static void test_attention(void) {
    static const struct {
        int64_t tokens, cells, ranks;
        int full;
    } shapes[] = {{960, 32, 1, 0}, {960, 32, 2, 0}, {960, 32, 4, 0}, {960, 32, 8, 0},
                  {960, 16, 8, 0}, {960, 32, 3, 0}, {997, 32, 5, 0}, {1920, 32, 8, 0},
                  {960, 32, 4, 1}, {960, 32, 8, 1}, {960, 32, 5, 1}};
    size_t i;
    int64_t stride;
    for (i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        attn_case c = {shapes[i].tokens,     shapes[i].cells,      shapes[i].ranks, 4, 4, 8, 1,
                       SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_RING, shapes[i].full};
        attn_case all_to_all = {shapes[i].tokens,
                                shapes[i].cells,
                                shapes[i].ranks,
                                2 * shapes[i].ranks,
                                shapes[i].ranks,
                                8,
                                1,
                                SEQPAR_LAYOUT_ZIGZAG,
                                SEQPAR_SCHEDULE_ULYSSES,
                                shapes[i].full};
        test_attention_memory(&all_to_all);
        test_attention_memory(&c);
        for (stride = 1; stride <= 4; stride *= 2) {
            c.schedule = SEQPAR_SCHEDULE_LLAMA3;
            c.stride = stride;
            test_attention_memory(&c);
        }
    }
    for (i = 0; i < 4; i++) {
        attn_case c = {960,
                       32,
                       INT64_C(1) << i,
                       4,
                       2,
                       8,
                       1,
                       SEQPAR_LAYOUT_ZIGZAG,
                       i % 2 ? SEQPAR_SCHEDULE_LLAMA3 : SEQPAR_SCHEDULE_RING,
                       0};
        test_work(&c);
        c.full = 1;
        test_work(&c);
        c.full = 0;
        c.layout = SEQPAR_LAYOUT_CONTIGUOUS;
        test_work(&c);
    }
}

/* ---- everything is given back ---- */

/* Three steps, undisturbed or not: no block of memory is left, no counter but the peaks is
   above zero. */
static void test_given_back(const model_task *task, int64_t dp, int64_t sp,
                            const seqpar_inject_desc *inject, const char *what) {
    model_way way = {.dp = dp,
                     .sp = sp,
                     .accumulation = 2,
                     .threads = 1,
                     .steps = 3,
                     .layout = SEQPAR_LAYOUT_ZIGZAG,
                     .zero_stage = 2,
                     .recompute = 1,
                     .inject = inject,
                     .inject_rank = dp * sp - 1};
    memory_run m = {0};
    seqpar_error error = {0};
    int64_t before = blocks_live, r;
    seqpar_status status = run_memory(&m, task, &way, &error);
    test_expect(inject ? status != 0 : status == 0, "status %s: %s", seqpar_status_name(status),
                error.text);
    test_expect(blocks_live == before, "%lld blocks are left (%s)",
                (long long)(blocks_live - before), error.text);
    for (r = 0; r < dp * sp; r++) {
        test_expect(m.rank[r].memory.total == 0, "rank %lld still counts %lld bytes",
                    (long long)r, (long long)m.rank[r].memory.total);
        test_expect(inject || m.rank[r].memory.peak[SEQPAR_MEM_WEIGHTS] > 0,
                    "rank %lld never held weights", (long long)r);
        if (dp * sp > 1)
            test_expect(inject || m.rank[r].bytes_sent > 0, "rank %lld sent nothing",
                        (long long)r);
        else
            test_expect(m.rank[r].bytes_sent == 0 &&
                            m.rank[r].memory.peak[SEQPAR_MEM_EXCHANGE] == 0,
                        "one rank sent %lld bytes and held %lld for an exchange",
                        (long long)m.rank[r].bytes_sent,
                        (long long)m.rank[r].memory.peak[SEQPAR_MEM_EXCHANGE]);
    }
    test_end("memory_given_back D=%lld P=%lld %s", (long long)dp, (long long)sp, what);
}

static void test_lifetimes(void) {
    static const int64_t numbers[] = {1, 2, 3, 5, 8, 11, 14, 20, 33, 47, 60, 75};
    static const int64_t worlds[][2] = {{1, 1}, {1, 4}, {2, 2}, {4, 1}};
    seqpar_llama_config config = {.layers = 2,
                                  .hidden = 16,
                                  .heads = 4,
                                  .kv_heads = 2,
                                  .head_dim = 4,
                                  .intermediate = 24,
                                  .vocab = 31};
    model_task task = {.config = config, .lr = .01};
    size_t i;
    random_batch(&task.batch, 17, 30, 31, 41, 8);
    task.objective.count = task.batch.counts.supervised;
    for (i = 0; i < 4; i++)
        test_given_back(&task, worlds[i][0], worlds[i][1], NULL, "undisturbed");
    for (i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        seqpar_inject_desc fail = {.fail_at = numbers[i]}, die = {.die_at = numbers[i]};
        char what[64];
        snprintf(what, sizeof what, "transfer %lld fails", (long long)numbers[i]);
        test_given_back(&task, 1, 4, &fail, what);
        snprintf(what, sizeof what, "a rank dies at transfer %lld", (long long)numbers[i]);
        test_given_back(&task, 1, 4, &die, what);
    }
    seqpar_batch_free(&task.batch);
}

/* One rank's forward pass, of q, k and v with gap elements between tokens. *peak: what was there
   at most, by kind. */
static void gapped_pass(int64_t gap, int64_t *peak) {
    enum { TOKENS = 37, HEADS = 4, KV_HEADS = 2, DIM = 3 };
    const int64_t wide = HEADS * DIM, narrow = KV_HEADS * DIM;
    const int64_t cu[2] = {0, TOKENS};
    const seqpar_row row = {.tokens = TOKENS, .cell = 8, .docs = 1, .cu_seqlens = cu};
    seqpar_attn_desc desc = {.heads = HEADS, .kv_heads = KV_HEADS, .head_dim = DIM};
    seqpar_comm *self = seqpar_comm_self();
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_attn *attn;
    float *q = some_floats(TOKENS * (wide + gap)), *k = some_floats(TOKENS * (narrow + gap));
    float *out = some_floats(TOKENS * wide), *lse = some_floats(TOKENS * HEADS);
    seqpar_attn_io io = {.q = q, .k = k, .v = k, .out = out, .lse = lse};
    io.q_stride = wide + gap;
    io.k_stride = io.v_stride = narrow + gap;
    test_expect(!seqpar_ctx_open(&ctx, self, device, 1), "%s", self->error->text);
    test_expect(!seqpar_attn_open(&ctx, &attn, &row, 1, &desc), "%s", self->error->text);
    test_expect(!seqpar_attn_forward(&ctx, attn, &io), "%s", self->error->text);
    memcpy(peak, ctx.memory.peak, sizeof ctx.memory.peak);
    seqpar_attn_close(&ctx, attn);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(self);
    free(q);
    free(k);
    free(out);
    free(lse);
}

/* Copies without gaps are exchange memory, and nothing else grows by them. */
static void test_gaps(void) {
    int64_t dense[SEQPAR_MEM_KINDS], gapped[SEQPAR_MEM_KINDS];
    gapped_pass(0, dense);
    gapped_pass(5, gapped);
    for (int kind = 0; kind < SEQPAR_MEM_KINDS; kind++) {
        int64_t more = kind == SEQPAR_MEM_EXCHANGE ? FLOAT * 37 * (4 + 2 * 2) * 3 : 0;
        test_expect(gapped[kind] == dense[kind] + more,
                    "%lld bytes of kind %d, %lld without gaps", (long long)gapped[kind], kind,
                    (long long)dense[kind]);
    }
    test_end("memory_gaps");
}

static void *no_pool(seqpar_device *device, int64_t bytes) {
    (void)device;
    (void)bytes;
    return NULL;
}

/* Where the second pool is full, the sentence says what is in it. */
static void test_pool_is_full(void) {
    seqpar_comm *self = seqpar_comm_self();
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_buffer first, second, scratch;
    seqpar_ctx ctx;
    test_expect(!seqpar_ctx_open(&ctx, self, device, 1), "%s", self->error->text);
    test_expect(!seqpar_buffer_new(&ctx, &first, 640, SEQPAR_MEM_OFFLOADED) &&
                    !seqpar_buffer_new(&ctx, &scratch, 96, SEQPAR_MEM_SCRATCH),
                "%s", self->error->text);
    device->pool_alloc = no_pool;
    test_expect(seqpar_buffer_new(&ctx, &second, 1001, SEQPAR_MEM_OFFLOADED) ==
                    SEQPAR_ERR_MEMORY,
                "it was allocated");
    test_expect(!strcmp(self->error->text, "out of memory: 1001 bytes to offload from device "
                                           "cpu (640 are offloaded already)"),
                "%s", self->error->text);
    seqpar_buffer_free(&ctx, &first);
    seqpar_buffer_free(&ctx, &scratch);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(self);
    test_end("memory_pool_is_full");
}

/* Every single allocation of an attention run may be the one that finds no memory. */
static void test_refused(int64_t ranks, int64_t every) {
    attn_case c = {48, 8, ranks, 2, 2, 4, 1, SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_RING, 0};
    attn_run run = {.c = &c, .cu = {0, 48}};
    seqpar_error error;
    int64_t before = blocks_live, made = blocks_made, total, n;
    run.row = row_of(&c, run.cu);
    test_expect(!seqpar_run_threads(ranks, attn_main, &run, &error), "%s", error.text);
    total = blocks_made - made;
    for (n = 1; n <= total; n += every) {
        block_refused = blocks_made + n;
        test_expect(seqpar_run_threads(ranks, attn_main, &run, &error) != 0,
                    "allocation %lld of %lld failed, the run did not", (long long)n,
                    (long long)total);
        test_expect(blocks_live == before,
                    "%lld blocks are left after allocation %lld of %lld failed (%s)",
                    (long long)(blocks_live - before), (long long)n, (long long)total,
                    error.text);
        before = blocks_live;
    }
    block_refused = 0;
    printf("#   P=%lld makes %lld allocations\n", (long long)ranks, (long long)total);
    test_end("memory_refused P=%lld", (long long)ranks);
}

/* ---- the counters against the operating system ---- */

/* bytes */
typedef struct seen {
    int64_t high_water, counted, workspace;
    int status;
} seen;

static int64_t high_water(void) {
    char line[256];
    long long kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "VmHWM: %lld", &kib) == 1) break;
    if (f) fclose(f);
    return kib * 1024;
}

/* One run (or nothing) in a process of its own. Every large block is a mapping of its own
   there, so that what is freed is gone and the high-water mark is that of live memory. */
static seen in_a_child(const model_task *task, const model_way *way) {
    seen s = {0};
    int ends[2], state;
    pid_t child;
    if (pipe(ends)) return s;
    fflush(stdout);
    child = fork();
    if (child == 0) {
        memory_run m = {.first_step = 1};
        model_result unused = {0};
        int64_t r;
        mallopt(M_MMAP_THRESHOLD, 65536);
        mallopt(M_PERTURB, 0); /* a pattern would touch memory that nobody uses */
        m.job = (model_job){task, way, &unused};
        if (way) s.status = seqpar_run_threads(way->dp * way->sp, memory_main, &m, NULL);
        for (r = 0; r < RANKS_MAX; r++) {
            s.counted += m.rank[r].memory.total_peak;
            s.workspace += m.rank[r].workspace;
        }
        s.high_water = high_water();
        _exit(write(ends[1], &s, sizeof s) != (ssize_t)sizeof s);
    }
    s.status = read(ends[0], &s, sizeof s) == (ssize_t)sizeof s ? s.status : -1;
    waitpid(child, &state, 0);
    close(ends[0]);
    close(ends[1]);
    return s;
}

static void test_high_water(void) {
    static const struct {
        int64_t ranks;
        int schedule, recompute;
    } cases[] = {{1, SEQPAR_SCHEDULE_RING, 0},
                 {1, SEQPAR_SCHEDULE_RING, 1},
                 {4, SEQPAR_SCHEDULE_RING, 0},
                 {4, SEQPAR_SCHEDULE_LLAMA3, 0}};
    seqpar_llama_config config = {.layers = 2,
                                  .hidden = 256,
                                  .heads = 4,
                                  .kv_heads = 2,
                                  .head_dim = 32,
                                  .intermediate = 512,
                                  .vocab = 64};
    model_task task;
    seen idle;
    size_t i;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    test_skip("memory_high_water", "a sanitizer has an allocator of its own");
    return;
#endif
    row_task(&task, &config, 4096, 4, 32);
    idle = in_a_child(&task, NULL);
    if (!idle.high_water) test_skip("memory_high_water", "no VmHWM in /proc/self/status");
    for (i = 0; idle.high_water && i < sizeof cases / sizeof *cases; i++) {
        model_way way = {.dp = 1,
                         .sp = cases[i].ranks,
                         .accumulation = 1,
                         .threads = 1,
                         .layout = SEQPAR_LAYOUT_ZIGZAG,
                         .schedule = cases[i].schedule,
                         .recompute = cases[i].recompute};
        seen s = in_a_child(&task, &way);
        double held = (double)(s.high_water - idle.high_water), counted = (double)s.counted;
        test_expect(s.status == 0, "the run failed with %d", s.status);
        test_expect(counted > 20e6, "only %.1f MB: too small to measure", counted / 1e6);
        test_expect(fabs(held - counted) <= 0.1 * counted,
                    "counted %.1f MB, the process held %.1f MB", counted / 1e6, held / 1e6);
        printf("#   P=%lld %s recompute=%d: counted %.1f MB and %.1f MB of device scratch, the "
               "process held %.1f MB (%.3f)\n",
               (long long)cases[i].ranks, seqpar_schedule_name(cases[i].schedule),
               cases[i].recompute, counted / 1e6, (double)s.workspace / 1e6, held / 1e6,
               held / counted);
        test_end("memory_high_water P=%lld %s recompute=%d", (long long)cases[i].ranks,
                 seqpar_schedule_name(cases[i].schedule), cases[i].recompute);
    }
    seqpar_batch_free(&task.batch);
}

/* ---- checkpoints: no second copy of the model ---- */

#define SAVED_FOLDER "build/memory_saved"
typedef struct {
    int64_t ranks, counted, weights;
    int saves, failed;
} saved_run;

static seqpar_status saved_main(seqpar_comm *world, void *user) {
    static const seqpar_llama_config config = {.layers = 2,
                                               .hidden = 256,
                                               .heads = 4,
                                               .kv_heads = 4,
                                               .head_dim = 64,
                                               .intermediate = 768,
                                               .vocab = 12000,
                                               .rope_theta = 1e4,
                                               .rms_eps = 1e-5};
    saved_run *run = (saved_run *)user;
    seqpar_optim_desc desc = {.zero_stage = 1, .beta1 = .9, .beta2 = .95, .eps = 1e-8};
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_llama model;
    seqpar_optim optim;
    demo_average average = {0};
    demo_state state = {.step = 1, .train_batch_size = 1, .documents = 1};
    memset(&optim, 0, sizeof optim);
    memset(&model, 0, sizeof model);
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, 1);
    if (!status) status = seqpar_llama_open(&ctx, &model, &config);
    if (!status)
        status = seqpar_optim_open(&ctx, &optim, model.tensors, model.tensor_count, &desc);
    if (!status) status = demo_average_open(&ctx, &model, &average, .9);
    if (!status && run->saves) seqpar_llama_init(&ctx, &model, 1);
    if (!status && run->saves)
        status = demo_save_checkpoint(&ctx, &model, &optim, SAVED_FOLDER, &state);
    if (!status && run->saves) status = demo_save_average(&ctx, &model, SAVED_FOLDER, &average);
    if (!status && !run->saves)
        status = demo_load_checkpoint(&ctx, &model, &optim, SAVED_FOLDER, 1, &state);
    if (!status && !run->saves)
        status = demo_load_average(&ctx, &model, SAVED_FOLDER, &average);
    __atomic_fetch_add(&run->counted,
                       ctx.memory.total_peak + average.count * (int64_t)sizeof *average.share,
                       __ATOMIC_SEQ_CST);
    run->weights = model.params.bytes;
    demo_average_close(&average);
    seqpar_optim_close(&ctx, &optim);
    seqpar_llama_close(&ctx, &model);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

/* In a process of its own: how much it held at most, above what it began with. */
static int64_t saved_in_a_child(saved_run *run) {
    int ends[2], state;
    int64_t seen[3] = {-1, 0, 0};
    if (pipe(ends)) return -1;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int64_t idle = high_water();
        seqpar_error error = {0};
        mallopt(M_MMAP_THRESHOLD, 65536);
        mallopt(M_PERTURB, 0);
        if (run->ranks && seqpar_run_threads(run->ranks, saved_main, run, &error)) {
            fprintf(stderr, "%s\n", error.text);
            _exit(1);
        }
        int64_t told[3] = {high_water() - idle, run->counted, run->weights};
        _exit(write(ends[1], told, sizeof told) != (ssize_t)sizeof told);
    }
    close(ends[1]);
    if (read(ends[0], seen, sizeof seen) != (ssize_t)sizeof seen) seen[0] = -1;
    waitpid(child, &state, 0);
    close(ends[0]);
    run->counted = seen[1];
    run->weights = seen[2];
    return seen[0];
}

static void test_saved(void) {
    seqpar_error error = {0};
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    test_skip("memory_saved", "a sanitizer has an allocator of its own");
    return;
#endif
    if (!high_water()) {
        test_skip("memory_saved", "no VmHWM in /proc/self/status");
        return;
    }
    test_expect(!demo_make_folder(SAVED_FOLDER, &error), "%s", error.text);
    for (int i = 0; i < 4; i++) {
        saved_run run = {.ranks = i < 2 ? 1 : 4, .saves = i % 2 == 0};
        int64_t held = saved_in_a_child(&run);
        test_expect(run.weights > 20000000, "the model has %lld bytes: too small to measure",
                    (long long)run.weights);
        test_expect(held > 0 && fabs((double)(held - run.counted)) <= .2 * (double)run.counted,
                    "%s on %lld ranks: %.1f MB are counted, the process held %.1f MB more than "
                    "at its beginning",
                    run.saves ? "saved" : "loaded", (long long)run.ranks,
                    (double)run.counted / 1e6, (double)held / 1e6);
        printf("#   checkpoint %s on %lld ranks: counted %.1f MB, held %.1f MB, the weights "
               "are %.1f MB\n",
               run.saves ? "saved" : "loaded", (long long)run.ranks, (double)run.counted / 1e6,
               (double)held / 1e6, (double)run.weights / 1e6);
    }
    test_expect(demo_remove_if_ours(SAVED_FOLDER), "%s holds more than a checkpoint",
                SAVED_FOLDER);
    test_end("memory_saved: checkpoints are written and read without a copy of the model");
}

/* ---- no array of tokens by vocabulary ---- */

/* of the vocab: rows whose logits are there at a time */
enum { WIDE_VOCAB = 8192, VOCAB_ROWS = 256 };
static const seqpar_llama_config wide = {.layers = 1,
                                         .hidden = 8,
                                         .heads = 4,
                                         .kv_heads = 4,
                                         .head_dim = 2,
                                         .intermediate = 16,
                                         .vocab = WIDE_VOCAB,
                                         .rope_theta = 10000,
                                         .rms_eps = 1e-5};

/* bytes of all ranks, bytes of a block */
typedef struct {
    int64_t peak, largest, tokens;
} wide_seen;

static void wide_begin(void) {
    bytes_peak = bytes_live;
    block_largest = 0;
}

static wide_seen wide_end(int64_t before, int64_t tokens) {
    return (wide_seen){bytes_peak - before, block_largest, tokens};
}

/* A step on twice the tokens needs far less than logits for each; and no block is larger
   than the vocab's chunk of them, whether a rank's tokens make one chunk or many. */
static void expect_no_logits(const wide_seen *half, const wide_seen *whole, int64_t ranks) {
    int64_t chunk = VOCAB_ROWS * WIDE_VOCAB * FLOAT, more = whole->tokens - half->tokens;
    test_expect(half->tokens / ranks >= 2 * VOCAB_ROWS && more >= half->tokens / 2,
                "%lld and %lld tokens on %lld ranks are too few to tell",
                (long long)half->tokens, (long long)whole->tokens, (long long)ranks);
    test_expect(whole->largest <= chunk + 4096,
                "a block of %lld bytes, the chunk of the vocab has %lld",
                (long long)whole->largest, (long long)chunk);
    test_expect(whole->peak - half->peak < more * WIDE_VOCAB * FLOAT / 8,
                "%lld tokens more need %lld bytes more, their logits would be %lld",
                (long long)more, (long long)(whole->peak - half->peak),
                (long long)(more * WIDE_VOCAB * FLOAT));
    printf("#   %lld and %lld tokens: %.2f and %.2f MB at most, the largest block %.2f MB; "
           "logits would be %.2f MB\n",
           (long long)half->tokens, (long long)whole->tokens, (double)half->peak / 1e6,
           (double)whole->peak / 1e6, (double)whole->largest / 1e6,
           (double)(whole->tokens * WIDE_VOCAB * FLOAT) / 1e6);
}

static wide_seen wide_objective(int kind, int64_t pairs, int64_t ranks, int lean) {
    objective_way way = {
        .dp = 1, .sp = ranks, .accumulation = 1, .layout = SEQPAR_LAYOUT_ZIGZAG};
    objective_task t;
    objective_result r;
    /* one row: few partial gradients of the table */
    objective_task_open(&t, kind, pairs, 400, 8192, 5);
    t.config = wide;
    t.config.score = objective_scores(kind) ? "score" : NULL;
    t.teacher = wide;
    t.lean = lean;
    int64_t before = bytes_live;
    wide_begin();
    objective_run(&t, &way, &r);
    test_expect(!r.status, "%s", r.error.text);
    wide_seen seen = wide_end(before, t.batch.counts.tokens);
    objective_result_free(&r);
    objective_task_close(&t);
    return seen;
}

/* SFT goes backward at once (entry B), the others ask for log-probs first (entry A). */
static void test_wide_objectives(void) {
    static const int64_t ranks[] = {1, 2, 4};
    for (int kind = 0; kind < OBJECTIVES; kind++)
        for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
            wide_seen half = wide_objective(kind, 9, ranks[i], 1),
                      whole = wide_objective(kind, 18, ranks[i], 1);
            expect_no_logits(&half, &whole, ranks[i]);
            test_end("memory_no_logits %s P=%lld", objective_name(kind), (long long)ranks[i]);
        }
    wide_seen none = wide_objective(OBJECTIVE_DPO, 9, 1, 1),
              kept = wide_objective(OBJECTIVE_DPO, 9, 1, 0);
    test_expect(kept.largest > 4 * none.largest / 3 &&
                    kept.peak - none.peak > kept.tokens * WIDE_VOCAB * FLOAT / 2,
                "logits that are kept are not seen: %lld and %lld bytes", (long long)kept.peak,
                (long long)none.peak);
    test_end("memory_logits_are_seen");
}

/* The trainers themselves, one step on a model with that vocabulary; documents are alike in
   length. */
#define WIDE_FOLDER "build/wide"

static void wide_files(void) {
    seqpar_error error = {0};
    char xs[121];
    memset(xs, 'x', 120);
    xs[120] = 0;
    test_expect(!demo_make_folder(WIDE_FOLDER, &error) &&
                    !demo_save_config(WIDE_FOLDER, &wide, &error),
                "%s", error.text);
    FILE *file = fopen(WIDE_FOLDER "/data.jsonl", "wb");
    for (int i = 100; file && i < 132; i++)
        fprintf(
            file,
            "{\"input\": \"%s%d\", \"output\": \"%s%d\", \"wrong\": \"%d%s\", \"label\": %s}\n",
            xs, i, xs, i, i, xs, i % 2 ? "true" : "false");
    test_expect(file && !fclose(file), "no file");
}

/* options: of this trainer, space between them. Tokens are those of a step. */
static wide_seen wide_train(demo_job *job, const char *tool, const demo_binding *bindings,
                            int count, int64_t units, int64_t ranks, const char *options) {
    static demo_options parsed;
    char line[1024], *argv[64];
    demo_error error = {""};
    int argc = 0;
    snprintf(line, sizeof line,
             "%s --pretrain " WIDE_FOLDER
             " --packing_samples --max_len 300 --pack_len 5000 --train_batch_size %lld "
             "--micro_train_batch_size 64 --max_steps 1 --omp_threads 1 --ring_attn_size %lld "
             "--save_path " WIDE_FOLDER "/%s --ckpt_path " WIDE_FOLDER " %s",
             tool, (long long)units, (long long)ranks, tool, options);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    parsed = (demo_options){.tool = tool, .bindings = bindings, .binding_count = count};
    int opened = !demo_options_parse(&parsed, argc, argv, &error) &&
                 !demo_job_open(job, &error);
    seqpar_error made = {0};
    opened = opened && !demo_make_folder(job->config.save_path, &made);
    if (!test_expect(opened, "%s: %s%s", tool, error.text, made.text))
        return (wide_seen){0, 0, 0};
    job->config.pretrain = NULL; /* its config alone was wanted */
    int64_t before = bytes_live;
    int64_t tokens = units * job->objective->documents_per_unit *
                     job->train.documents[0].tokens;
    wide_begin();
    test_expect(!demo_run_job(job), "%s failed", tool);
    wide_seen seen = wide_end(before, tokens);
    demo_job_close(job);
    return seen;
}

static wide_seen wide_sft(int64_t half, int64_t ranks) {
    demo_job job = {.objective = &demo_sft};
    const demo_binding bindings[] = {DEMO_TRAINER_BINDINGS(job.config),
                                     DEMO_SFT_BINDINGS(job.config)};
    return wide_train(&job, "sft", bindings, (int)(sizeof bindings / sizeof *bindings),
                      16 / half, ranks,
                      "--dataset " WIDE_FOLDER "/data.jsonl --output_key output");
}

static wide_seen wide_dpo(int64_t half, int64_t ranks) {
    demo_preference_config dpo = {0};
    demo_job job = {.objective = &demo_dpo, .options = &dpo};
    const demo_binding bindings[] = {DEMO_TRAINER_BINDINGS(job.config), DEMO_DPO_BINDINGS(dpo)};
    return wide_train(
        &job, "dpo", bindings, (int)(sizeof bindings / sizeof *bindings), 8 / half, ranks,
        "--dataset " WIDE_FOLDER
        "/data.jsonl --prompt_key input --chosen_key output --rejected_key wrong");
}

static wide_seen wide_kto(int64_t half, int64_t ranks) {
    demo_kto_config kto = {0};
    demo_job job = {.objective = &demo_kto, .options = &kto};
    const demo_binding bindings[] = {DEMO_TRAINER_BINDINGS(job.config), DEMO_KTO_BINDINGS(kto)};
    return wide_train(&job, "kto", bindings, (int)(sizeof bindings / sizeof *bindings),
                      16 / half, ranks, "--dataset " WIDE_FOLDER "/data.jsonl");
}

static wide_seen wide_ppo(int64_t half, int64_t ranks) {
    demo_ppo_config ppo = {0};
    demo_job job = {.objective = &demo_ppo_objective, .options = &ppo};
    const demo_binding bindings[] = {DEMO_TRAINER_BINDINGS(job.config),
                                     DEMO_PPO_BINDINGS(job.config, ppo)};
    return wide_train(
        &job, "ppo", bindings, (int)(sizeof bindings / sizeof *bindings), 16 / half, ranks,
        half == 1 ? "--prompt_data " WIDE_FOLDER
                    "/data.jsonl --label_key output --reward_rule last_number --prompt_max_len "
                    "300 --generate_max_len 4 --rollout_batch_size 16"
                  : "--prompt_data " WIDE_FOLDER
                    "/data.jsonl --label_key output --reward_rule last_number --prompt_max_len "
                    "300 --generate_max_len 4 --rollout_batch_size 8");
}

static void test_wide_trainers(void) {
    static const struct {
        const char *name;
        wide_seen (*run)(int64_t half, int64_t ranks);
    } trainers[] = {{"SFT", wide_sft}, {"DPO", wide_dpo}, {"KTO", wide_kto}, {"PPO", wide_ppo}};
    wide_files();
    for (size_t i = 0; i < sizeof trainers / sizeof *trainers; i++)
        for (int64_t ranks = 1; ranks <= 2; ranks++) {
            wide_seen half = trainers[i].run(2, ranks), whole = trainers[i].run(1, ranks);
            expect_no_logits(&half, &whole, ranks);
            test_end("memory_no_logits train %s P=%lld", trainers[i].name, (long long)ranks);
        }
}

int main(int argc, char **argv) {
    static const int64_t powers[] = {1, 2, 4, 8}, others[] = {1, 3, 5, 6};
    int recompute;
    test_begin(argc, argv);
    test_state += test_seed;
    TEST(test_saved());
    TEST(
        test_high_water()); /* these two first: their children start out as small as this process */
    for (recompute = 0; recompute < 3; recompute++) {
        TEST(test_activations(960, 20, recompute, powers, 4));
        TEST(test_activations(960, 40, recompute, powers, 4));
        TEST(test_activations(997, 32, recompute, others, 4));
    }
    TEST(test_gaps());
    TEST(test_pool_is_full());
    TEST(test_gradients(0));
    TEST(test_gradients(1));
    TEST(test_zero(0));
    TEST(test_zero(1));
    TEST(test_zero_adapters(0));
    TEST(test_zero_adapters(1));
    TEST(test_vocab_places());
    TEST(test_recompute());
    for (int64_t ranks = 1; ranks < 4; ranks++)
        for (recompute = 0; recompute < 3; recompute++) TEST(test_mlp_tiles(recompute, ranks));
    TEST(test_attention());
    TEST(test_lifetimes());
    TEST(test_refused(1, 1));
    TEST(test_refused(4, 3));
    TEST(test_wide_objectives());
    TEST(test_wide_trainers());
    test_expect(blocks_live == 0, "%lld blocks are left at the end", (long long)blocks_live);
    test_end("memory_all_given_back");
    return test_summary();
}
