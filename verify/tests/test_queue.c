/* SPDX-License-Identifier: MIT OR Unlicense */
/* The queue of the CUDA device: no call waits but those that must, whatever order the
   streams are worked off in the bits are those of one rank in the order of calls, and a call
   that was made before can be captured into a graph. Without a GPU the streams of
   cuda_on_cpu.h run late, in an order drawn from a seed. */
#ifdef QUEUE_NCCL
#include "stand_in/nccl_on_cpu.h"
#define SEQPAR_NCCL_IMPLEMENTATION
#endif
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "seqpar_llama.h"
#ifdef QUEUE_NCCL
#include "seqpar_nccl.h"
#include "stand_in/nccl_world.h"
#endif
#include "support/test.h"
#include <unistd.h>

/* How ranks are run: as threads, or over NCCL. */
static seqpar_status (*run_ranks)(int64_t ranks, seqpar_rank_fn fn, void *user,
                                  seqpar_error *error) = seqpar_run_threads;
#define seqpar_run_threads run_ranks
#include "support/run_objective.h"
#undef seqpar_run_threads

extern int64_t cuda_on_cpu_late __attribute__((weak)), cuda_on_cpu_waits __attribute__((weak)),
    cuda_on_cpu_ran __attribute__((weak)), cuda_on_cpu_launches __attribute__((weak));
extern uint64_t cuda_on_cpu_seed __attribute__((weak));
extern const char *cuda_on_cpu_broke_capture __attribute__((weak));
#define ON_CPU (&cuda_on_cpu_late != NULL)

/* of CUDA's run time, or of its stand-in */
extern int cudaStreamBeginCapture(void *stream, int mode),
    cudaStreamEndCapture(void *stream, void **graph),
    cudaGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags);
extern int cudaGraphLaunch(void *exec, void *stream), cudaGraphExecDestroy(void *exec),
    cudaGraphDestroy(void *graph);
enum { CAPTURE_OF_THREAD = 1 };

#ifdef QUEUE_NCCL
/* ---- ranks over NCCL ---- */

#define OVER "_nccl"
static uint64_t world_seed;
static int skipped = -1; /* which event waits are left out: those of begin, those of wait */

static seqpar_status run_nccl(int64_t ranks, seqpar_rank_fn fn, void *user,
                              seqpar_error *error) {
    seqpar_status status;
    char file[256];
    stand_reset(test_seed + world_seed++, 0);
    if (skipped >= 0) stand_skip("cudaStreamWaitEvent", skipped);
    snprintf(file, sizeof file, "%s/seqpar_queue.%ld",
             getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid());
    stand_runs_kernels(1);
    test_limit(600);
    status = world_run(file, ranks, fn, user, error);
    stand_runs_kernels(0);
    test_expect(!stand.complaint[0] && !stand_leaks()[0], "%s%s", stand.complaint,
                stand_leaks());
    return status;
}
#else
#define OVER ""
#endif

/* Seeds 0, 3, 6: streams run when somebody waits; 1, 4: seldom before; 2, 5: often before. */
static void order(int late, uint64_t seed) {
    if (!ON_CPU) return;
#ifdef QUEUE_NCCL
    run_ranks = late ? run_nccl : seqpar_run_threads;
#endif
    cuda_on_cpu_late = late && !getenv("CUDA_ON_CPU_SYNC");
    cuda_on_cpu_seed = seed;
}

/* ---- attention ---- */

enum { TOKENS = 61, HEADS = 4, KV_HEADS = 2, DIM = 6, TENSORS = 8 };
enum { Q, K, V, DOUT, OUT, DQ, DK, DV };
static const int64_t tensor_heads[TENSORS] = {HEADS, KV_HEADS, KV_HEADS, HEADS,
                                              HEADS, HEADS,    KV_HEADS, KV_HEADS};
static const int64_t cu_seqlens[] = {0, 29, 30, TOKENS};
static const seqpar_row row = {
    .tokens = TOKENS, .cell = TOKENS / 5 + 1, .docs = 3, .cu_seqlens = cu_seqlens};
typedef struct attention {
    int layout, schedule;
    int64_t waited;
    float *whole[TENSORS];
} attention;

typedef struct held { /* by one rank */
    seqpar_attn *attn;
    float *local;
    void *x[TENSORS], *lse;
} held;

static void attention_new(attention *a, int layout, int schedule) {
    *a = (attention){.layout = layout, .schedule = schedule};
    for (int i = 0; i < TENSORS; i++) {
        a->whole[i] = calloc(TOKENS * HEADS * DIM, 4);
        for (int j = 0; i <= DOUT && j < TOKENS * HEADS * DIM; j++)
            a->whole[i][j] = (float)seqpar_random_normal(test_seed, (uint64_t)i, (uint64_t)j);
    }
}

static void attention_free(attention *a) {
    for (int i = 0; i < TENSORS; i++) free(a->whole[i]);
}

static int attention_differs(const attention *a, const attention *b) {
    for (int i = OUT; i < TENSORS; i++)
        if (memcmp(a->whole[i], b->whole[i], (size_t)(TOKENS * tensor_heads[i] * DIM) * 4) ||
            a->whole[i][100] == 0)
            return 1;
    return 0;
}

static void put(seqpar_ctx *ctx, held *h, const attention *a, int i) {
    const seqpar_share *mine = seqpar_attn_share(h->attn);
    seqpar_scatter(h->local, a->whole[i], mine, 0, tensor_heads[i] * DIM * 4);
    ctx->device->copy(ctx->device, h->x[i], h->local, mine->tokens * tensor_heads[i] * DIM * 4,
                      NULL);
}

static void get(seqpar_ctx *ctx, held *h, attention *a, int i) {
    const seqpar_share *mine = seqpar_attn_share(h->attn);
    ctx->device->copy(ctx->device, h->local, h->x[i], mine->tokens * tensor_heads[i] * DIM * 4,
                      NULL);
    seqpar_gather(a->whole[i], h->local, mine, 0, tensor_heads[i] * DIM * 4);
}

static seqpar_status held_open(seqpar_ctx *ctx, held *h, const attention *a) {
    seqpar_attn_desc desc = {
        .heads = HEADS,
        .kv_heads = KV_HEADS,
        .head_dim = DIM,
        .layout = a->layout,
        .schedule = a->schedule,
        .ulysses_size = a->schedule == SEQPAR_SCHEDULE_ULYSSES && ctx->sp_size % 2 == 0 ? 2
                                                                                        : 1};
    memset(h, 0, sizeof *h);
    seqpar_status status = seqpar_attn_open(ctx, &h->attn, &row, 1, &desc);
    h->local = malloc(TOKENS * HEADS * DIM * 4);
    for (int i = 0; !status && i < TENSORS; i++) {
        h->x[i] = ctx->device->alloc(ctx->device, TOKENS * HEADS * DIM * 4);
        if (i <= DOUT) put(ctx, h, a, i);
    }
    if (!status) h->lse = ctx->device->alloc(ctx->device, TOKENS * HEADS * 4);
    return status;
}

static void held_close(seqpar_ctx *ctx, held *h) {
    for (int i = 0; i < TENSORS; i++) ctx->device->free(ctx->device, h->x[i]);
    ctx->device->free(ctx->device, h->lse);
    seqpar_attn_close(ctx, h->attn);
    free(h->local);
}

static seqpar_status attend(seqpar_ctx *ctx, held *h) {
    seqpar_attn_io io = {.q = h->x[Q],
                         .k = h->x[K],
                         .v = h->x[V],
                         .out = h->x[OUT],
                         .lse = h->lse,
                         .dout = h->x[DOUT],
                         .dq = h->x[DQ],
                         .dk = h->x[DK],
                         .dv = h->x[DV]};
    seqpar_status status = seqpar_attn_forward(ctx, h->attn, &io);
    return status ? status : seqpar_attn_backward(ctx, h->attn, &io);
}

static seqpar_status rank_attention(seqpar_comm *world, void *user) {
    attention *a = user;
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    held h;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, world->size);
    if (!status) status = held_open(&ctx, &h, a);
    if (!status) status = attend(&ctx, &h);
    if (!status) status = seqpar_comm_barrier(world);
    int64_t before = ON_CPU ? cuda_on_cpu_waits : 0;
    if (!status) status = attend(&ctx, &h);             /* finds lists and memory there */
    if (ON_CPU) a->waited = cuda_on_cpu_waits - before; /* all ranks are between two barriers */
    if (!status) status = seqpar_comm_barrier(world);
    for (int i = OUT; !status && i < TENSORS; i++) get(&ctx, &h, a, i);
    if (!status) held_close(&ctx, &h);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static void test_attention(void) {
    static const struct {
        const char *name;
        int layout, schedule;
    } ways[] = {{"ring", SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_RING},
                {"llama3", SEQPAR_LAYOUT_CONTIGUOUS, SEQPAR_SCHEDULE_LLAMA3},
                {"2d", SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_ULYSSES}};
    seqpar_error error;
    for (int w = 0; w < 3; w++) {
        attention want, got;
        attention_new(&want, ways[w].layout, ways[w].schedule);
        order(0, 1);
        test_expect(!run_ranks(1, rank_attention, &want, &error), "%s", error.text);
        for (int64_t ranks = OVER[0] ? 2 : 1; ranks <= 4; ranks += OVER[0] ? 2 : 1) {
            attention_new(&got, ways[w].layout, ways[w].schedule);
            order(1, test_seed + (uint64_t)(ranks + w));
            test_expect(!run_ranks(ranks, rank_attention, &got, &error), "P %lld: %s",
                        (long long)ranks, error.text);
            test_expect(
                !attention_differs(&want, &got),
                "P %lld, seed %llu of the streams: other bits than in the order of calls",
                (long long)ranks,
                (unsigned long long)test_seed + (unsigned long long)(ranks + w));
            if (OVER[0])
                test_expect(!got.waited, "P %lld: hosts waited %lld times for the device",
                            (long long)ranks, (long long)got.waited);
            attention_free(&got);
        }
        attention_free(&want);
        test_end("queue" OVER "_attention_%s", ways[w].name);
    }
}

/* ---- who waits ---- */

#ifndef QUEUE_NCCL

static void test_waits(void) {
    seqpar_comm *self = seqpar_comm_self();
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    attention a;
    held h;
    int64_t ran, waits, launches;
    if (!ON_CPU) {
        test_skip("queue_waits", "a GPU does not count");
        return;
    }
    order(1, 3);
    attention_new(&a, SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_RING);
    test_expect(!seqpar_ctx_open(&ctx, self, device, 1) && ctx.queue &&
                    ctx.queue == device->queue && !held_open(&ctx, &h, &a),
                "%s", self->error->text);
    test_expect(!attend(&ctx, &h) && !seqpar_device_settle(device, ctx.queue), "%s",
                self->error->text);
    ran = cuda_on_cpu_ran;
    waits = cuda_on_cpu_waits;
    launches = cuda_on_cpu_launches;
    test_expect(!attend(&ctx, &h), "%s", self->error->text);
    test_expect(cuda_on_cpu_waits == waits, "attention waited %lld times",
                (long long)(cuda_on_cpu_waits - waits));
    test_expect(cuda_on_cpu_launches > launches &&
                    (cuda_on_cpu_ran == ran || !cuda_on_cpu_late),
                "%lld kernels ran before anybody waited", (long long)(cuda_on_cpu_ran - ran));
    test_expect(
        !seqpar_device_settle(device, ctx.queue) && cuda_on_cpu_ran == cuda_on_cpu_launches,
        "settling left %lld kernels", (long long)(cuda_on_cpu_launches - cuda_on_cpu_ran));
    held_close(&ctx, &h);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(self);
    attention_free(&a);
    test_end("queue_waits: attention of one rank for nobody");
}

/* ---- lists: more than fit the place they are uploaded from, without a wait in between ---- */

static void test_lists(void) {
    enum { LISTS = 60, N = 401, WIDTH = 3, IDS = 7 };
    seqpar_error error = {0};
    seqpar_device *d = seqpar_device_cuda(&error, NULL);
    float table[IDS * WIDTH], *x = calloc(LISTS * N * WIDTH, sizeof *x);
    int32_t ids[N];
    int64_t wrong = 0;
    order(1, test_seed + 2);
    for (int i = 0; i < IDS * WIDTH; i++) table[i] = (float)i;
    void *from = d->alloc(d, sizeof table), *to = d->alloc(d, LISTS * N * WIDTH * 4);
    d->copy(d, from, table, sizeof table, NULL);
    for (int l = 0; l < LISTS; l++) {
        seqpar_embedding_args a = {.x = {(char *)to + (size_t)l * N * WIDTH * 4, WIDTH},
                                   .table = {from, WIDTH},
                                   .ids = ids,
                                   .rows = N,
                                   .width = WIDTH};
        for (int t = 0; t < N; t++) ids[t] = (l + t) * (t % 5 + 1) % IDS;
        test_expect(!d->embedding(d, &a, d->queue), "%s", error.text);
        memset(ids, 0x7f, sizeof ids);
    }
    d->copy(d, x, to, LISTS * N * WIDTH * 4, NULL);
    for (int l = 0; l < LISTS; l++)
        for (int t = 0; t < N; t++)
            wrong += !(x[(l * N + t) * WIDTH + 1] ==
                       (float)((l + t) * (t % 5 + 1) % IDS * WIDTH + 1));
    test_expect(!wrong && !error.status, "%lld rows by other ids than they were given; %s",
                (long long)wrong, error.text);
    d->free(d, from);
    d->free(d, to);
    seqpar_device_close(d);
    free(x);
    test_end("queue_lists_are_as_they_were_at_the_call");
}

#endif

/* ---- whole steps ---- */

static void test_step(int kind, objective_way way, uint64_t seed) {
    static const objective_way alone = {
        .dp = 1, .sp = 1, .accumulation = 1, .layout = SEQPAR_LAYOUT_ZIGZAG};
    objective_task t;
    objective_result one, r;
    objective_task_open(&t, kind, 2, 12, 24, 5);
    t.config.layers = 1;
    t.config.hidden = 12;
    t.config.heads = 4;
    t.config.kv_heads = 2;
    t.config.intermediate = 16;
    t.lean = 1;
    order(0, 1);
    objective_run(&t, &alone, &one);
    for (int n = 0; n < (OVER[0] ? 1 : 3); n++, seed++) {
        order(1, seed);
        objective_run(&t, &way, &r);
        if (test_expect(!one.status && !r.status, "%s%s", one.error.text, r.error.text)) {
            test_expect(one.norm > 0 && one.norm == r.norm && one.loss == r.loss,
                        "seed %llu of the streams: loss %.17g and %.17g, norm %.17g and %.17g",
                        (unsigned long long)seed, one.loss, r.loss, one.norm, r.norm);
            test_expect(
                !memcmp(one.gradient, r.gradient, (size_t)one.elements * sizeof *one.gradient),
                "seed %llu of the streams: the gradient differs", (unsigned long long)seed);
            test_expect(
                !memcmp(one.params, r.params, (size_t)one.elements * sizeof *one.params) &&
                    memcmp(one.params, one.start, (size_t)one.elements * sizeof *one.params),
                "seed %llu of the streams: the parameters differ, or did not move",
                (unsigned long long)seed);
        }
        objective_result_free(&r);
    }
    test_end("queue" OVER "_step_%s_%s_D%lld_P%lld_zero%d", objective_name(kind),
             seqpar_schedule_name(way.schedule), (long long)way.dp, (long long)way.sp,
             way.zero_stage);
    objective_result_free(&one);
    objective_task_close(&t);
}

/* ---- a queue of the caller's ---- */

#ifndef QUEUE_NCCL

static void test_own_queue(void) {
    seqpar_error error = {0};
    seqpar_device *d = seqpar_device_cuda(&error, NULL);
    seqpar_device *other = seqpar_device_cuda(&error, NULL);
    seqpar_cuda_desc desc = {.stream = d->queue};
    seqpar_device *guest = seqpar_device_cuda(&error, &desc);
    float x[4] = {1, 2, 3, 4}, y[4] = {0};
    order(1, 3);
    void *a = d->alloc(d, sizeof x), *b = guest->alloc(guest, sizeof x);
    test_expect(guest->queue == d->queue && other->queue != d->queue,
                "the caller's stream is not taken");
    d->copy(d, a, x, sizeof x, d->queue);
    x[1] = 9;                                         /* pageable memory was read at the call */
    guest->copy(guest, b, a, sizeof x, guest->queue); /* one stream: behind it */
    guest->free(guest, b);
    /* the same place: what is written there comes behind what was read */
    b = guest->alloc(guest, sizeof x);
    d->zero(d, b, sizeof x, d->queue);
    d->copy(d, b, a, sizeof x, d->queue);
    guest->copy(guest, y, b, sizeof y, NULL);
    test_expect(y[0] == 1 && y[1] == 2 && y[3] == 4, "%g %g %g", y[0], y[1], y[3]);
    guest->free(guest, b);
    seqpar_device_close(guest);
    d->copy(d, y, a, sizeof y, NULL); /* the stream is still there */
    test_expect(y[3] == 4 && !error.status, "%s", error.text);
    d->zero(d, a, sizeof x, other->queue);
    test_expect(error.status == SEQPAR_ERR_OPTION &&
                    strstr(error.text, "works on its own queue"),
                "%s", error.text);
    d->free(d, a);
    seqpar_device_close(d);
    seqpar_device_close(other);
    test_end("queue_of_the_caller");
}

/* ---- graphs ---- */

/* The device keeps the lists of LISTS_KEPT different calls. A list is two rows of a table, so
   that there are ALL_LISTS of them. */
enum { LISTS_KEPT = 512, TABLE = 64, ALL_LISTS = TABLE * TABLE };

typedef struct look_up {
    seqpar_device *device;
    float *table, *out; /* on the device: (TABLE), (ALL_LISTS, 2) */
} look_up;

/* A call with list number n, which no other n has. */
static seqpar_status look_up_list(const look_up *l, int n) {
    const int32_t ids[2] = {n / TABLE, n % TABLE};
    seqpar_embedding_args a = {
        .x = {l->out + 2 * n, 1}, .table = {l->table, 1}, .ids = ids, .rows = 2, .width = 1};
    return l->device->embedding(l->device, &a, l->device->queue);
}

static void look_up_open(look_up *l, seqpar_error *error) {
    float table[TABLE];
    for (int i = 0; i < TABLE; i++) table[i] = (float)(i + 1);
    l->device = seqpar_device_cuda(error, NULL);
    l->table = (float *)l->device->alloc(l->device, sizeof table);
    l->out = (float *)l->device->alloc(l->device, ALL_LISTS * 2 * sizeof(float));
    l->device->copy(l->device, l->table, table, sizeof table, NULL);
}

static void look_up_close(look_up *l) {
    l->device->free(l->device, l->table);
    l->device->free(l->device, l->out);
    seqpar_device_close(l->device);
}

/* Captures calls with these lists. Returns how many calls were refused. */
static int capture_lists(const look_up *l, const int *list, int count, void **graph) {
    int refused = 0;
    test_expect(!cudaStreamBeginCapture(l->device->queue, CAPTURE_OF_THREAD), "no capture");
    for (int i = 0; i < count; i++) refused += look_up_list(l, list[i]) != SEQPAR_OK;
    test_expect(!cudaStreamEndCapture(l->device->queue, graph) && *graph, "no graph");
    return refused;
}

/* Draws an order of all lists that are kept, and uses the second half again in this order, so
   that the first half was used longest ago. */
static void use_lists(const look_up *l, int *list) {
    for (int n = 0; n < LISTS_KEPT; n++) {
        const int at = (int)test_integer(0, n);
        list[n] = list[at];
        list[at] = n;
        test_expect(!look_up_list(l, n), "a list is refused");
    }
    for (int i = LISTS_KEPT / 2; i < LISTS_KEPT; i++) (void)look_up_list(l, list[i]);
}

/* New lists take the places of those that were used longest ago. */
static void test_recent_lists(void) {
    enum { HALF = LISTS_KEPT / 2 };
    seqpar_error error = {0};
    look_up l;
    int list[LISTS_KEPT], refused;
    void *graph = NULL;
    order(1, test_seed + 3);
    look_up_open(&l, &error);
    use_lists(&l, list);
    for (int i = 0; i < HALF; i++) {
        list[i] = LISTS_KEPT + i;
        test_expect(!look_up_list(&l, list[i]), "%s", error.text);
    }
    refused = capture_lists(&l, list, LISTS_KEPT, &graph);
    test_expect(!refused, "%d of the %d lists that were used last are gone: %s", refused,
                LISTS_KEPT, error.text);
    test_end("queue_lists_used_last_are_kept");
    test_expect(look_up_list(&l, ALL_LISTS - 1) && error.status == SEQPAR_ERR_DEVICE &&
                    strstr(error.text, "graphs hold all 512 places for lists"),
                "%s", error.text);
    test_end("queue_lists_all_captured");
    if (graph) cudaGraphDestroy(graph);
    look_up_close(&l);
}

/* However many lists follow, a graph reads those that it was captured with. */
static void test_captured_lists(void) {
    static const int list[] = {7, 300, 511};
    seqpar_error error = {0};
    look_up l;
    void *graph = NULL, *exec = NULL;
    float got[2];
    order(1, test_seed + 4);
    look_up_open(&l, &error);
    for (int n = 0; n < LISTS_KEPT; n++) test_expect(!look_up_list(&l, n), "%s", error.text);
    test_expect(!capture_lists(&l, list, 3, &graph), "%s", error.text);
    test_expect(!cudaGraphInstantiateWithFlags(&exec, graph, 0), "no graph");
    for (int n = LISTS_KEPT; n < 3 * LISTS_KEPT; n++)
        test_expect(!look_up_list(&l, n), "%s", error.text);
    l.device->zero(l.device, l.out, ALL_LISTS * 2 * sizeof(float), l.device->queue);
    test_expect(!cudaGraphLaunch(exec, l.device->queue), "the graph does not run");
    for (int i = 0; i < 3; i++) {
        l.device->copy(l.device, got, l.out + 2 * list[i], sizeof got, NULL);
        test_expect(got[0] == (float)(list[i] / TABLE + 1) &&
                        got[1] == (float)(list[i] % TABLE + 1),
                    "list %d became %g and %g", list[i], got[0], got[1]);
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    look_up_close(&l);
    test_end("queue_lists_of_a_graph_stay");
}

/* Captures forward and backward, changes q and v, runs the graph: the bits of a call. */
static void capture_attention(seqpar_ctx *ctx, held *h, attention *got, attention *want) {
    void *graph = NULL, *exec = NULL;
    test_expect(!cudaStreamBeginCapture(ctx->queue, CAPTURE_OF_THREAD), "no capture");
    test_expect(!attend(ctx, h), "%s", ctx->error->text);
    test_expect(
        !cudaStreamEndCapture(ctx->queue, &graph) && graph, "the capture was ended by %s",
        ON_CPU && cuda_on_cpu_broke_capture ? cuda_on_cpu_broke_capture : "a call it forbids");
    if (test_why[0]) return;
    test_expect(!cudaGraphInstantiateWithFlags(&exec, graph, 0), "no graph");
    for (int lap = 0; lap < 2; lap++) {
        for (int j = 0; j < TOKENS * KV_HEADS * DIM; j++) {
            want->whole[Q][j] += 0.25f;
            want->whole[V][j] *= -0.5f;
        }
        put(ctx, h, want, Q);
        put(ctx, h, want, V);
        if (!test_expect(!attend(ctx, h), "%s", ctx->error->text)) return;
        for (int i = OUT; i < TENSORS; i++) {
            get(ctx, h, want, i);
            ctx->device->zero(ctx->device, h->x[i], TOKENS * tensor_heads[i] * DIM * 4,
                              ctx->queue);
        }
        test_expect(!cudaGraphLaunch(exec, ctx->queue), "the graph does not run");
        for (int i = OUT; i < TENSORS; i++) get(ctx, h, got, i);
        test_expect(!attention_differs(want, got),
                    "lap %d: the graph computes other bits than the calls", lap);
    }
    float mark = 0.5f; /* memory that the graph uses is given to nobody else */
    void *others = ctx->device->alloc(ctx->device, TOKENS * HEADS * 4);
    for (int j = 0; j < TOKENS * HEADS; j++)
        ctx->device->copy(ctx->device, (char *)others + 4 * j, &mark, 4, ctx->queue);
    test_expect(!cudaGraphLaunch(exec, ctx->queue), "the graph does not run");
    for (int j = 0; j < TOKENS * HEADS; j++) {
        ctx->device->copy(ctx->device, &mark, (char *)others + 4 * j, 4, NULL);
        test_expect(mark == 0.5f, "the graph wrote %g into memory of others", mark);
    }
    ctx->device->free(ctx->device, others);
    seqpar_device_settle(ctx->device, ctx->queue);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
}

static void test_capture(void) {
    seqpar_comm *self = seqpar_comm_self();
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    attention got, want;
    held h;
    void *graph = NULL;
    order(1, test_seed + 1);
    attention_new(&got, SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_RING);
    attention_new(&want, SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_RING);
    test_expect(!seqpar_ctx_open(&ctx, self, device, 1) && !held_open(&ctx, &h, &want) &&
                    !attend(&ctx, &h) && !seqpar_device_settle(device, ctx.queue),
                "%s", self->error->text);
    if (!test_why[0]) capture_attention(&ctx, &h, &got, &want);
    test_end("queue_capture_attention");
    device->zero(device, h.lse, 4, ctx.queue);
    test_expect(!cudaStreamBeginCapture(ctx.queue, CAPTURE_OF_THREAD), "no capture");
    test_expect(!device->alloc(device, 12345678) && self->error->status == SEQPAR_ERR_DEVICE &&
                    strstr(self->error->text, "before it is captured"),
                "%s", self->error->text);
    test_expect(!cudaStreamEndCapture(ctx.queue, &graph),
                "what is refused ended the capture all the same");
    if (graph) cudaGraphDestroy(graph);
    test_end("queue_capture_refuses_what_is_new");
    held_close(&ctx, &h);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(self);
    attention_free(&got);
    attention_free(&want);
}

#else
/* A buffer is sent before its kernel has run, or read before it was received: other bits, on
   one seed or another. */
static void test_needs_events(void) {
    static const char *const what[] = {"behind what the queue computes",
                                       "before the queue reads"};
    seqpar_error error;
    attention want, got;
    attention_new(&want, SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_RING);
    order(0, 1);
    test_expect(!run_ranks(1, rank_attention, &want, &error), "%s", error.text);
    for (int way = 0; way < 2; way++) {
        int seen = 0;
        attention_new(&got, SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_RING);
        order(1, 1);
        for (int n = 0; n < 10 && !seen && !test_why[0]; n++) {
            skipped = 1 - way; /* begin and wait take turns */
            test_expect(!run_ranks(2, rank_attention, &got, &error), "%s", error.text);
            seen = attention_differs(&want, &got);
        }
        skipped = -1;
        test_expect(seen, "a transfer that is not ordered %s goes unseen", what[way]);
        attention_free(&got);
        test_end("queue_nccl_needs_its_events %s", what[way]);
    }
    attention_free(&want);
}
#endif

int main(int argc, char **argv) {
    test_begin(argc, argv);
#ifdef QUEUE_NCCL
    TEST(test_needs_events());
#else
    TEST(test_waits());
    TEST(test_lists());
    TEST(test_own_queue());
    TEST(test_capture());
    TEST(test_recent_lists());
    TEST(test_captured_lists());
#endif
    TEST(test_step(OBJECTIVE_DPO,
                   (objective_way){.dp = 1,
                                   .sp = 3,
                                   .accumulation = 1,
                                   .layout = SEQPAR_LAYOUT_CONTIGUOUS,
                                   .schedule = SEQPAR_SCHEDULE_LLAMA3,
                                   .zero_stage = 3,
                                   .offload = SEQPAR_OFFLOAD_STATE | SEQPAR_OFFLOAD_PARAMS},
                   test_seed + 2));
    TEST(test_step(OBJECTIVE_SFT,
                   (objective_way){.dp = 2,
                                   .sp = 1,
                                   .accumulation = 1,
                                   .layout = SEQPAR_LAYOUT_ZIGZAG,
                                   .zero_stage = 1,
                                   .offload = SEQPAR_OFFLOAD_STATE},
                   test_seed + 1));
    TEST(test_step(OBJECTIVE_SFT,
                   (objective_way){.dp = 1,
                                   .sp = 2,
                                   .accumulation = 1,
                                   .layout = SEQPAR_LAYOUT_ZIGZAG,
                                   .schedule = SEQPAR_SCHEDULE_RING},
                   test_seed));
    TEST(test_attention());
    return test_summary();
}
