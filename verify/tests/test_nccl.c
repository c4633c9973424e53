/* SPDX-License-Identifier: MIT OR Unlicense */
/* The NCCL transport over a stand-in for NCCL and CUDA: ranks are threads, a GPU is not
   needed. */
#include "stand_in/nccl_stand_in.h"
#include <netdb.h>
#include <poll.h>
static int names_getaddrinfo(const char *host, const char *service,
                             const struct addrinfo *hints, struct addrinfo **list);
#define getaddrinfo names_getaddrinfo
/* time limits are tested by putting the clock forward, not by waiting */
static double clock_ahead;
static double clock_seconds(void);
#define SEQPAR_NCCL_SECONDS() clock_seconds()
/* a signal may come into any call, and nobody has 64 GiB */
static ssize_t interrupted_send(int fd, const void *data, size_t bytes, int flags);
static ssize_t interrupted_recv(int fd, void *data, size_t bytes, int flags);
static void *frugal_malloc(size_t bytes);
static int counted_poll(struct pollfd *on, nfds_t count, int wait_ms);
static int counted_nanosleep(const struct timespec *time, struct timespec *left);
#define send                interrupted_send
#define recv                interrupted_recv
#define poll                counted_poll
#define nanosleep           counted_nanosleep
#define SEQPAR_MALLOC(size) frugal_malloc(size)
#define SEQPAR_FREE(ptr)    free(ptr)
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_NCCL_IMPLEMENTATION
#include "seqpar_nccl.h"
#undef send
#undef recv
#undef poll
#undef nanosleep
#include <dirent.h>
#include "support/transport.h"
#include "stand_in/nccl_world.h"

/* The name servers of these tests: nobody is called unknown.host, and of silent.host one
   hears when the test is over. */
static int names_over, names_answered;
#undef getaddrinfo
static int names_getaddrinfo(const char *host, const char *service,
                             const struct addrinfo *hints, struct addrinfo **list) {
    if (hints->ai_flags & AI_NUMERICHOST || !strstr(host, ".host"))
        return getaddrinfo(host, service, hints, list);
    if (!strcmp(host, "unknown.host")) return EAI_NONAME;
    while (!__atomic_load_n(&names_over, __ATOMIC_SEQ_CST)) usleep(1000);
    __atomic_store_n(&names_answered, 1, __ATOMIC_SEQ_CST);
    return EAI_AGAIN;
}

static double clock_seconds(void) {
    double ahead;
    __atomic_load(&clock_ahead, &ahead, __ATOMIC_SEQ_CST);
    return 1e-9 * (double)now_ns() + ahead;
}

static void clock_forward(double seconds) {
    double ahead = clock_ahead + seconds;
    __atomic_store(&clock_ahead, &ahead, __ATOMIC_SEQ_CST);
}

/* Every second call is interrupted before it has done anything. */
static _Atomic int interrupting, interrupted;
static int is_interrupted(void) {
    if (!interrupting || interrupted++ % 2) return 0;
    errno = EINTR;
    return 1;
}

/* No call moves all bytes at once. */
static size_t cut(size_t bytes) { return bytes > 5 ? bytes / 2 : bytes; }

static ssize_t interrupted_send(int fd, const void *data, size_t bytes, int flags) {
    return is_interrupted() ? -1 : send(fd, data, cut(bytes), flags);
}

static ssize_t interrupted_recv(int fd, void *data, size_t bytes, int flags) {
    return is_interrupted() ? -1 : recv(fd, data, cut(bytes), flags);
}

/* How often ranks look whether there is news, and how often they sleep until there is. */
static _Atomic int64_t looks, sleeps;
static int counted_poll(struct pollfd *on, nfds_t count, int wait_ms) {
    *(wait_ms ? &sleeps : &looks) += 1;
    return poll(on, count, wait_ms);
}

static int counted_nanosleep(const struct timespec *time, struct timespec *left) {
    sleeps++;
    return nanosleep(time, left);
}

static _Atomic size_t refused_bytes; /* that were last asked for in vain */
static _Atomic int64_t scarce;       /* this many calls from now one is refused; 0: none */
static _Atomic int64_t refused;      /* it was */
static void *frugal_malloc(size_t bytes) {
    if (scarce > 0 && --scarce == 0) {
        refused = 1;
        return NULL;
    }
    if (bytes <= (size_t)1 << 32) return malloc(bytes);
    refused_bytes = bytes;
    return NULL;
}

/* ---- worlds of threads ---- */

static char world_file[256];
static int quick; /* under a sanitizer that takes its time */

static void expect_order(void) {
    test_expect(!stand.complaint[0], "NCCL's rules: %s", stand.complaint);
    test_expect(!stand_leaks()[0], "%s", stand_leaks());
}

/* Descriptors that are open; -1: standard input is not. */
static int open_files(void) {
    int count = 0;
    for (int fd = 0; fd < 4096; fd++) count += fcntl(fd, F_GETFD) >= 0;
    return fcntl(0, F_GETFD) < 0 ? -1 : count;
}

static void expect_files(int before) {
    int now = open_files();
    test_expect(now == before, "%d files are open, before there were %d", now, before);
}

/* Runs all places; what the world ended with. */
static seqpar_status run_places(place *places, int64_t count, seqpar_error *error) {
    int files = open_files();
    seqpar_status status;
    test_limit(TRANSPORT_SECONDS); /* against a hang */
    status = places_run(places, count, error);
    expect_order();
    expect_files(files);
    return status;
}

static seqpar_status run_world(int64_t ranks, seqpar_rank_fn fn, void *user,
                               seqpar_error *error) {
    int files = open_files();
    seqpar_status status;
    test_limit(TRANSPORT_SECONDS);
    looks = sleeps = 0;
    status = world_run(world_file, ranks, fn, user, error);
    expect_order();
    expect_files(files);
    /* a rank that waits sleeps between two looks; without that it takes a core from others */
    test_expect(looks <= 2 * sleeps + 500, "ranks that wait looked %lld times and slept %lld",
                (long long)looks, (long long)sleeps);
    return status;
}

static seqpar_status run_nccl(int64_t ranks, seqpar_rank_fn fn, void *user,
                              seqpar_error *error) {
    static uint64_t seed;
    stand_reset(test_seed + seed++, 0);
    return run_world(ranks, fn, user, error);
}

/* nothing is copied to pinned memory */
static seqpar_status run_nccl_in_place(int64_t ranks, seqpar_rank_fn fn, void *user,
                                       seqpar_error *error) {
    static uint64_t seed;
    stand_reset(test_seed + seed++, 0);
    stand.all_device = 1;
    return run_world(ranks, fn, user, error);
}

static void run_nccl_well(int64_t ranks, seqpar_rank_fn fn, void *user) {
    static const transport_maker maker = {.name = "nccl", .run = run_nccl};
    transport_run_well(&maker, ranks, fn, user);
}

/* ---- the stand-in itself: it sees what it is there to see ---- */

typedef struct pair {
    ncclComm_t comm[2];
    cudaStream_t stream[2];
    ncclUniqueId id;
    int rank, way;
    cudaError_t end;
    pthread_t thread;
} pair;

static void pair_open(pair *p, int rank) {
    ncclConfig_t config = {1};
    cudaSetDevice(rank);
    cudaStreamCreate(&p->stream[rank]);
    test_expect(ncclCommInitRankConfig(&p->comm[rank], 2, p->id, rank, &config) == ncclSuccess,
                "a blocking communicator");
}

static void pair_exchange(pair *p, char *in, const char *out, size_t bytes, int grouped) {
    int me = p->rank;
    if (grouped) ncclGroupStart();
    ncclSend(out, bytes, ncclUint8, 1 - me, p->comm[me], p->stream[me]);
    ncclRecv(in, 8, ncclUint8, 1 - me, p->comm[me], p->stream[me]);
    if (grouped) ncclGroupEnd();
    p->end = cudaStreamSynchronize(p->stream[me]);
}

/* A right exchange, and then 1: sends before receives, ungrouped; 2: sizes that differ. */
static void *pair_main(void *argument) {
    pair *p = argument;
    int me = p->rank;
    char in[8] = "", out[8] = "letter";
    pair_open(p, me);
    pair_exchange(p, in, out, 8, 1);
    test_expect(!strcmp(in, "letter") && p->end == cudaSuccess, "the letter did not come");
    if (p->way) pair_exchange(p, in, out, p->way == 2 && me ? 7 : 8, p->way == 2);
    ncclCommAbort(p->comm[me]);
    return NULL;
}

static void run_pair(pair p[2], int way) {
    int r;
    stand_reset(test_seed, 2);
    memset(p, 0, 2 * sizeof *p);
    for (r = 0; r < 2; r++) {
        snprintf(p[r].id.internal, sizeof p[r].id.internal, "pair");
        p[r].rank = r;
        p[r].way = way;
        pthread_create(&p[r].thread, NULL, pair_main, &p[r]);
    }
    for (r = 0; r < 2; r++) pthread_join(p[r].thread, NULL);
}

static void test_stand_in(void) {
    pair p[2];
    run_pair(p, 0);
    test_expect(!stand.complaint[0], "a right exchange: %s", stand.complaint);
    test_expect(strstr(stand_leaks(), "0 communicators, 2 streams") != NULL,
                "two streams were left: %s", stand_leaks());
    test_end("stand_in_exchange");
    run_pair(p, 1);
    test_expect(p[0].end == cudaErrorLaunchFailure && p[1].end == cudaErrorLaunchFailure,
                "sends before receives went well");
    test_expect(strstr(stand.deadlock, "rank 0 sends 8 bytes to rank 1") &&
                    strstr(stand.deadlock, "rank 1 sends 8 bytes to rank 0"),
                "who waits: %s", stand.deadlock);
    test_end("stand_in_deadlock");
    run_pair(p, 2);
    test_expect(strstr(stand.complaint, "8 and 7 bytes") ||
                    strstr(stand.complaint, "7 and 8 bytes"),
                "sizes: %s", stand.complaint);
    test_end("stand_in_sizes");
}

/* ---- queues: kernels make what is sent and read what has come, and the host never waits in between ---- */

enum { CELLS = 40, LAPS = 6 };
/* one launch of a kernel */
typedef struct cell {
    int64_t *to;
    const int64_t *from;
    int64_t add;
} cell;

static void kernel_make(void *argument) {
    cell *c = argument;
    for (int i = 0; i < CELLS; i++) c->to[i] = c->add * 1000 + i;
    free(c);
}

/* of anything, where an event is missing */
static void kernel_sum(void *argument) {
    cell *c = argument;
    for (int i = 0; i < CELLS; i++)
        c->to[i] = (int64_t)((uint64_t)c->to[i] + (uint64_t)c->from[i] * (uint64_t)c->add);
    free(c);
}

static void kernel(cudaStream_t queue, void (*fn)(void *), int64_t *to, const int64_t *from,
                   int64_t add) {
    cell *c = malloc(sizeof *c);
    *c = (cell){to, from, add};
    stand_kernel(queue, fn, c);
}

/* A ring; every buffer is made anew as soon as its group has been waited for. */
static seqpar_status queue_laps(seqpar_comm *comm, cudaStream_t queue, int64_t *out,
                                int64_t *in, int64_t *sum) {
    int64_t next = (comm->rank + 1) % comm->size;
    int64_t last = (comm->rank + comm->size - 1) % comm->size;
    int64_t lap;
    for (lap = 1; lap <= LAPS; lap++) {
        seqpar_transfer sends[] = {{next, out, CELLS * 8}, {comm->rank, out, 0}};
        seqpar_transfer recvs[] = {{last, in, CELLS * 8}, {comm->rank, in, 0}};
        seqpar_group group = {"queue ring", lap, sends, 2, recvs, 2};
        seqpar_request request;
        kernel(queue, kernel_make, out, NULL, 10 * lap + comm->rank);
        TRY(seqpar_comm_begin(comm, &group, queue, &request));
        TRY(seqpar_comm_wait(comm, &request, queue));
        kernel(queue, kernel_sum, sum, in, lap);
    }
    return SEQPAR_OK;
}

static seqpar_status rank_queue(seqpar_comm *world, void *user) {
    int64_t *buffer[3], last = (world->rank + world->size - 1) % world->size, want, lap, i;
    cudaStream_t queue;
    seqpar_status status;
    cudaStreamCreate(&queue);
    for (i = 0; i < 3; i++) cudaMalloc((void **)&buffer[i], CELLS * 8);
    memset(buffer[2], 0, CELLS * 8);
    status = queue_laps(world, queue, buffer[0], buffer[1], buffer[2]);
    cudaStreamSynchronize(queue);
    for (i = 0; !status && i < CELLS; i++) {
        for (want = 0, lap = 1; lap <= LAPS; lap++)
            want += ((10 * lap + last) * 1000 + i) * lap;
        if (buffer[2][i] != want) __atomic_store_n((int *)user, 1, __ATOMIC_SEQ_CST);
    }
    /* a host group behind groups of a queue */
    if (!status) status = seqpar_comm_barrier(world);
    cudaStreamDestroy(queue);
    for (i = 0; i < 3; i++) cudaFree(buffer[i]);
    return status;
}

/* A part is freed while its group is still under way: the queue gets what it was promised. */
static seqpar_status rank_queue_freed(seqpar_comm *world, void *user) {
    int64_t *data;
    cudaStream_t queue;
    seqpar_comm *part;
    seqpar_request request;
    seqpar_status status;
    TRY(seqpar_comm_split(world, 0, 0, &part));
    cudaStreamCreate(&queue);
    cudaMalloc((void **)&data, 2 * CELLS * 8);
    seqpar_transfer send = {(part->rank + 1) % part->size, data, CELLS * 8};
    seqpar_transfer recv = {(part->rank + part->size - 1) % part->size, data + CELLS,
                            CELLS * 8};
    seqpar_group group = {"left alone", 0, &send, 1, &recv, 1};
    kernel(queue, kernel_make, data, NULL, part->rank + 1);
    status = seqpar_comm_begin(part, &group, queue, &request);
    if (!status) status = seqpar_comm_wait(part, &request, queue);
    seqpar_comm_free(part);
    cudaStreamSynchronize(queue);
    if (data[CELLS + 1] != (recv.peer + 1) * 1000 + 1)
        __atomic_store_n((int *)user, 1, __ATOMIC_SEQ_CST);
    cudaStreamDestroy(queue);
    cudaFree(data);
    return status;
}

static seqpar_status rank_asks_cuda(seqpar_comm *world, void *user) {
    int64_t i;
    for (i = 0; i < 20; i++) TRY(rank_order(world, user));
    EXPECT(cudaGetLastError() == cudaSuccess,
           "what an event query found is left as an error of the caller's");
    return SEQPAR_OK;
}

static void test_queue(void) {
    seqpar_error error;
    int64_t p, odd, seed, wrong = 0, seen;
    for (p = 1; p <= 5; p++) {
        int bad = 0;
        run_nccl_well(p, rank_queue, &bad);
        run_nccl_well(p, rank_queue_freed, &bad);
        test_expect(!bad, "P %lld: other numbers than the kernels make", (long long)p);
    }
    run_nccl_well(3, rank_asks_cuda, NULL);
    test_end("nccl_queue");
    /* without the event of begin, or of wait, the same must go wrong */
    for (odd = 0; odd < 2; odd++) {
        for (seed = seen = 0; seed < 40 && !seen; seed++) {
            int bad = 0;
            stand_reset(test_seed + (uint64_t)seed, 0);
            stand_skip("cudaStreamWaitEvent", (int)odd);
            run_world(2, rank_queue, &bad, &error);
            seen = bad;
        }
        wrong += seen;
    }
    test_expect(wrong == 2, "an event can be left out unseen");
    test_end("nccl_queue_needs_its_events");
}

static seqpar_status rank_wrong_memory(seqpar_comm *world, void *user) {
    int64_t way = *(int64_t *)user, host = 0;
    void *device = NULL;
    cudaStream_t queue;
    seqpar_transfer t = {world->rank, &host, 8};
    seqpar_group group = {"misplaced", 2, &t, 1, &t, 1};
    seqpar_request request;
    seqpar_status status;
    cudaStreamCreate(&queue);
    if (way) {
        cudaSetDevice(9);
        cudaMalloc(&device, 8);
        cudaSetDevice((int)world->rank);
        t.data = device;
    }
    status = world->rank ? seqpar_comm_barrier(world)
                         : seqpar_comm_begin(world, &group, way ? NULL : queue, &request);
    EXPECT(world->rank || !request.state, "a begin that fails leaves a request");
    cudaStreamDestroy(queue);
    if (way) cudaFree(device);
    return status;
}

static void test_memory(void) {
    seqpar_error error;
    int64_t way = 0;
    ledger_open();
    test_expect(run_nccl(2, rank_wrong_memory, &way, &error) == SEQPAR_ERR_OPTION &&
                    strstr(error.text, "'misplaced' step 2 on rank 0: pageable host memory"),
                "pageable: %s", error.text);
    way = 1;
    test_expect(run_nccl(2, rank_wrong_memory, &way, &error) == SEQPAR_ERR_OPTION &&
                    strstr(error.text, "CUDA device 9, rank 0 is on device 0"),
                "elsewhere: %s", error.text);
    ledger_read();
    test_end("nccl_memory_refused");
}

/* ---- attention: forward and backward over NCCL have the bits they have over threads ---- */

enum { TOKENS = 211, HEADS = 4, KV_HEADS = 2, DIM = 6, TENSORS = 8 };
enum { Q, K, V, DOUT, OUT, DQ, DK, DV };
static const int64_t tensor_heads[TENSORS] = {HEADS, KV_HEADS, KV_HEADS, HEADS,
                                              HEADS, HEADS,    KV_HEADS, KV_HEADS};
typedef struct attention {
    int layout, schedule, on_queue;
    float *whole[TENSORS];
} attention;

static seqpar_device original; /* of the CPU; what its copies change is put before it */
#define X(op) \
    static seqpar_status queued_##op(seqpar_device *device, const seqpar_##op##_args *args, \
                                     void *queue) { \
        return cudaStreamSynchronize((cudaStream_t)queue) ? SEQPAR_ERR_TRANSPORT \
                                                          : original.op(device, args, queue); \
    }
SEQPAR_DEVICE_OPS(X)
#undef X
static void queued_copy(seqpar_device *d, void *to, const void *from, int64_t bytes,
                        void *queue) {
    if (queue) cudaStreamSynchronize((cudaStream_t)queue);
    original.copy(d, to, from, bytes, queue);
}

static void queued_copy_rows(seqpar_device *d, void *to, int64_t to_stride, const void *from,
                             int64_t from_stride, int64_t bytes, int64_t rows, void *queue) {
    if (queue) cudaStreamSynchronize((cudaStream_t)queue);
    original.copy_rows(d, to, to_stride, from, from_stride, bytes, rows, queue);
}

static void queued_zero(seqpar_device *d, void *data, int64_t bytes, void *queue) {
    if (queue) cudaStreamSynchronize((cudaStream_t)queue);
    original.zero(d, data, bytes, queue);
}

static __thread cudaStream_t free_behind;
static void *queued_alloc(seqpar_device *d, int64_t bytes) {
    void *data = NULL;
    (void)d;
    return cudaMalloc(&data, (size_t)bytes) ? NULL : data;
}

/* as cudaFreeAsync: in its turn */
static void queued_free(seqpar_device *d, void *data) {
    (void)d;
    cudaStreamSynchronize(free_behind);
    cudaFree(data);
}

/* A device whose operations come in the order of a queue: each runs when the queue has come
   to it. Its memory is a device's. */
static seqpar_device *device_on_queue(void) {
    seqpar_device *d = seqpar_device_cpu(1);
#define X(op) d->op = queued_##op;
    SEQPAR_DEVICE_OPS(X)
#undef X
    d->copy = queued_copy;
    d->copy_rows = queued_copy_rows;
    d->zero = queued_zero;
    d->alloc = queued_alloc;
    d->free = queued_free;
    return d;
}

static seqpar_status attend(seqpar_ctx *ctx, const attention *a) {
    static const int64_t cu_seqlens[] = {0, 97, 98, TOKENS};
    static const seqpar_row row = {
        .tokens = TOKENS, .cell = TOKENS / 16 + 1, .docs = 3, .cu_seqlens = cu_seqlens};
    seqpar_attn_desc desc = {
        .heads = HEADS,
        .kv_heads = KV_HEADS,
        .head_dim = DIM,
        .layout = a->layout,
        .schedule = a->schedule,
        .ulysses_size = a->schedule == SEQPAR_SCHEDULE_ULYSSES && ctx->sp_size % 2 == 0 ? 2
                                                                                        : 1};
    const seqpar_share *mine;
    seqpar_attn *attn;
    float *x[TENSORS], *lse;
    seqpar_status status;
    int i;
    TRY(seqpar_attn_open(ctx, &attn, &row, 1, &desc));
    mine = seqpar_attn_share(attn);
    for (i = 0; i < TENSORS; i++) {
        x[i] = ctx->device->alloc(ctx->device, mine->tokens * HEADS * DIM * 4 + 4);
        if (i <= DOUT) seqpar_scatter(x[i], a->whole[i], mine, 0, tensor_heads[i] * DIM * 4);
    }
    lse = ctx->device->alloc(ctx->device, mine->tokens * HEADS * 8 + 8);
    seqpar_attn_io io = {.q = x[Q],
                         .k = x[K],
                         .v = x[V],
                         .out = x[OUT],
                         .lse = lse,
                         .dout = x[DOUT],
                         .dq = x[DQ],
                         .dk = x[DK],
                         .dv = x[DV]};
    status = seqpar_attn_forward(ctx, attn, &io);
    if (!status) status = seqpar_attn_backward(ctx, attn, &io);
    if (ctx->queue && cudaStreamSynchronize((cudaStream_t)ctx->queue))
        status = SEQPAR_ERR_TRANSPORT;
    for (i = 0; i < TENSORS; i++) {
        if (i >= OUT && !status)
            seqpar_gather(a->whole[i], x[i], mine, 0, tensor_heads[i] * DIM * 4);
        ctx->device->free(ctx->device, x[i]);
    }
    ctx->device->free(ctx->device, lse);
    seqpar_attn_close(ctx, attn);
    return status;
}

static seqpar_status rank_attention(seqpar_comm *world, void *user) {
    const attention *a = user;
    seqpar_device *device = a->on_queue ? device_on_queue() : seqpar_device_cpu(1);
    cudaStream_t queue = NULL;
    seqpar_ctx ctx;
    seqpar_status status;
    if (a->on_queue) cudaStreamCreate(&queue);
    free_behind = queue;
    status = seqpar_ctx_open(&ctx, world, device, world->size);
    ctx.queue = queue;
    if (!status) status = attend(&ctx, a);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    if (queue) cudaStreamDestroy(queue);
    return status;
}

static void attention_new(attention *a, int layout, int schedule, int on_queue) {
    int i, j;
    *a = (attention){.layout = layout, .schedule = schedule, .on_queue = on_queue};
    for (i = 0; i < TENSORS; i++) {
        a->whole[i] = calloc(TOKENS * HEADS * DIM, 4);
        for (j = 0; i <= DOUT && j < TOKENS * HEADS * DIM; j++)
            a->whole[i][j] = (float)seqpar_random_normal(test_seed, (uint64_t)i, (uint64_t)j);
    }
}

static void attention_free(attention *a) {
    for (int i = 0; i < TENSORS; i++) free(a->whole[i]);
}

static void test_attention(void) {
    static const struct {
        const char *name;
        int layout, schedule;
    } ways[] = {{"ring", SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_RING},
                {"llama3", SEQPAR_LAYOUT_CONTIGUOUS, SEQPAR_SCHEDULE_LLAMA3},
                {"2d", SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_ULYSSES}};
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 8};
    seqpar_device *plain = seqpar_device_cpu(1);
    int64_t w, p, on_queue, i;
    original = *plain;
    for (w = 0; w < COUNT(ways); w++)
        for (on_queue = 0; on_queue < 2; on_queue++) {
            for (p = 0; p < (quick ? 3 : COUNT(sizes)); p++) {
                attention want, got;
                seqpar_error error;
                attention_new(&want, ways[w].layout, ways[w].schedule, 0);
                attention_new(&got, ways[w].layout, ways[w].schedule, (int)on_queue);
                test_expect(!seqpar_run_threads(sizes[p], rank_attention, &want, &error),
                            "threads: %s", error.text);
                run_nccl_well(sizes[p], rank_attention, &got);
                for (i = 0; i < TENSORS; i++)
                    test_expect(!memcmp(want.whole[i], got.whole[i],
                                        (size_t)(TOKENS * tensor_heads[i] * DIM) * 4) &&
                                    want.whole[i][1000] != 0,
                                "P %lld: tensor %lld has other bits than over threads",
                                (long long)sizes[p], (long long)i);
                attention_free(&want);
                attention_free(&got);
            }
            test_end("nccl_attention_%s%s", ways[w].name, on_queue ? "_on_queue" : "");
        }
    seqpar_device_close(plain);
}

/* ---- failures on demand: every call, one at a time ---- */

static seqpar_status rank_everything(seqpar_comm *world, void *user) {
    post p = {.key = 77, .letters = 1};
    int64_t bits;
    seqpar_comm *sub;
    seqpar_status status;
    TRY(seqpar_comm_split(world, world->rank % 2, 0, &sub));
    status = mail_run(sub, &p, 2, &bits, NULL);
    seqpar_comm_free(sub);
    if (!status) status = mail_run(world, &p, 2, &bits, NULL);
    if (!status) status = rank_queue(world, user);
    return status;
}

/* What can fail without anybody being worse off: giving back. */
static int gives_back(const char *name) {
    return strstr(name, "Finalize") || strstr(name, "Destroy") || strstr(name, "Free");
}

static int is_of_test(const char *name) {
    return !strcmp(name, "cudaMalloc") || !strcmp(name, "cudaFree") ||
           !strcmp(name, "cudaStreamSynchronize") ||
           !strcmp(name, "cudaStreamCreateWithPriority");
}

static void fail_call(const char *name, int64_t call, int64_t *done) {
    seqpar_error error;
    int bad = 0;
    seqpar_status status;
    stand_reset(test_seed + (uint64_t)call, 0);
    stand_fail(name, 1, call);
    status = run_world(3, rank_everything, &bad, &error);
    *done = stand.failed;
    if (!stand.failed || (gives_back(name) && !status)) return;
    test_expect(status == SEQPAR_ERR_TRANSPORT && error.rank == 1,
                "%s, call %lld: %s on rank %lld: %s", name, (long long)call,
                seqpar_status_name(status), (long long)error.rank, error.text);
    test_expect(strstr(error.text,
                       strcmp(name, "asynchronous error") ? name : "remote process exited") !=
                    NULL,
                "%s, call %lld is not named: %s", name, (long long)call, error.text);
}

static void test_failing_calls(void) {
    seqpar_error error;
    const char *names[64];
    int64_t count = 0, i, call, done, total = 0;
    int bad = 0;
    stand_reset(test_seed, 0);
    test_expect(!run_world(3, rank_everything, &bad, &error) && !bad, "without a failure: %s",
                error.text);
    for (i = 0; stand.counts[i].name; i++)
        if (stand.counts[i].calls[1] && !is_of_test(stand.counts[i].name))
            names[count++] = stand.counts[i].name;
    test_expect(count >= 20, "only %lld functions are called", (long long)count);
    for (i = 0; i < count; i++) {
        /* before the ranks have met: test_mismatches */
        if (!strcmp(names[i], "ncclGetVersion")) continue;
        /* the first cudaSetDevice is this file's */
        for (call = 1 + !strcmp(names[i], "cudaSetDevice"), done = 1;
             done && call <= (quick ? 2 : 6); call++, total += done)
            fail_call(names[i], call, &done);
        test_end("nccl_fails_%s", names[i][0] == 'a' ? "asynchronously" : names[i]);
    }
    test_expect(total >= (quick ? 20 : 60), "only %lld calls were made to fail",
                (long long)total);
    test_end("nccl_failing_calls");
}

static seqpar_status rank_meets(seqpar_comm *world, void *user) {
    (void)user;
    TRY(rank_reduce(world, NULL));
    return rank_order(world, NULL);
}

static void *hurry(void *stop) { /* for worlds that somebody does not come to */
    while (!__atomic_load_n((int *)stop, __ATOMIC_SEQ_CST)) {
        usleep(20000);
        clock_forward(20);
    }
    return NULL;
}

static void places_new(place *places, int64_t count) {
    int64_t r;
    stand_reset(test_seed + (uint64_t)count, 0);
    memset(places, 0, RANKS * sizeof *places);
    for (r = 0; r < count; r++)
        places[r] = (place){
            .desc = {.rank = r, .size = count, .keep_device = 1, .file = world_file},
            .fn = rank_meets};
}

/* ---- memory that is refused: every call, one at a time ---- */

static const char *const scarce_texts[] = {"out of memory for a world",
                                           "out of memory for a referee of 3 ranks",
                                           "out of memory for 3 connections",
                                           "out of memory for unmatched messages",
                                           "out of memory for the list of matched messages",
                                           "out of memory for messages that may start",
                                           "out of memory for a note of rank 0",
                                           "out of memory for a note of rank 1",
                                           "out of memory for a note of rank 2",
                                           "out of memory for a comm of size 3",
                                           "out of memory for a comm of size 1",
                                           "out of memory for a request",
                                           "out of memory for pinned memory",
                                           "out of memory for a split",
                                           "out of memory for an address",
                                           "out of memory for 'address of rank 0'",
                                           "out of memory for 'split'",
                                           "out of memory for 'integer sum'"};

static seqpar_status rank_splits(seqpar_comm *world, void *user) {
    seqpar_comm *sub;
    seqpar_status status;
    (void)user;
    TRY(seqpar_comm_split(world, world->rank, 0, &sub));
    status = seqpar_comm_barrier(world);
    seqpar_comm_free(sub);
    return status;
}

/* Refuses call number `call`. Returns the number of the sentence that a rank's world ended with;
   -1: there were not so many calls. */
static int refuse_call(place *p, int64_t call, int by_id) {
    static ncclUniqueId id;
    seqpar_error error;
    pthread_t thread;
    int stop = 0, is = 0;
    const char *text = error.text;
    places_new(p, 3);
    snprintf(id.internal, sizeof id.internal, "refused %lld", (long long)call);
    for (int r = 0; r < 3; r++) {
        p[r].fn = rank_splits;
        if (by_id) p[r].desc.id = &id, p[r].desc.file = NULL;
    }
    refused = 0;
    scarce = call;
    pthread_create(&thread, NULL, hurry, &stop); /* the others do not wait for who is gone */
    run_places(p, 3, &error);
    __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
    pthread_join(thread, NULL);
    scarce = 0;
    if (!refused) return -1;
    for (int r = 0; r < 3; r++)
        if (p[r].status == SEQPAR_ERR_MEMORY) text = p[r].error.text;
    while (is < COUNT(scarce_texts) && strcmp(text, scarce_texts[is])) is++;
    test_expect(is < COUNT(scarce_texts), "call %lld: %s", (long long)call, text);
    return is;
}

/* Threads decide in which order the ranks' calls come, so a sentence that no refused call led to
   is tried for again. Which rank's note is refused is left to them. */
static void test_scarce(void) {
    place p[RANKS];
    int seen[COUNT(scarce_texts) + 1] = {0}, missing = COUNT(scarce_texts);
    for (int turn = 0; turn < (quick ? 1 : 5) && missing; turn++) {
        for (int by_id = 0; by_id < 2 - quick; by_id++) {
            int64_t call = 1;
            for (int is; (is = refuse_call(p, call, by_id)) >= 0 && !test_why[0]; call++)
                seen[is] = 1;
            test_expect(call > 40, "only %lld calls", (long long)call);
        }
        missing = 0;
        for (int i = 0; i < COUNT(scarce_texts); i++)
            if (!seen[i] && !strstr(scarce_texts[i], "note of rank")) missing = i + 1;
    }
    test_expect(!missing || quick, "nobody said: %s", missing ? scarce_texts[missing - 1] : "");
    test_end("nccl_scarce");
}

/* ---- time limits, by a clock that is put forward ---- */

static int begun;
static void await_begun(void) {
    while (!__atomic_load_n(&begun, __ATOMIC_SEQ_CST)) usleep(200);
}

/* Rank 0 computes for ever; rank 1 waits for it on the host (way 0), on a queue (1), or only
   has begun (2). */
static seqpar_status rank_stuck(seqpar_comm *world, void *user) {
    int64_t way = *(int64_t *)user, *data;
    seqpar_transfer t = {0, NULL, 64};
    seqpar_group group = {"late kv", 4, NULL, 0, &t, 1};
    seqpar_request request;
    cudaStream_t queue;
    seqpar_status status;
    if (world->rank == 0) {
        await_begun();
        clock_forward(601);
        while (!seqpar_nccl_verdict(world, NULL)) usleep(200);
        return seqpar_comm_barrier(world);
    }
    cudaStreamCreate(&queue);
    cudaMalloc((void **)&data, 64);
    t.data = data;
    status = seqpar_comm_begin(world, &group, way ? queue : NULL, &request);
    __atomic_store_n(&begun, 1, __ATOMIC_SEQ_CST);
    if (way == 2)
        while (!seqpar_nccl_verdict(world, NULL)) usleep(200);
    if (!status) status = seqpar_comm_wait(world, &request, way ? queue : NULL);
    cudaStreamSynchronize(queue); /* comes back: the group was aborted */
    if (!status) status = seqpar_comm_barrier(world);
    cudaStreamDestroy(queue);
    cudaFree(data);
    return status;
}

static void test_watchdog(void) {
    static const char *const names[] = {"host", "queue", "unwatched"};
    seqpar_error error;
    int64_t way;
    for (way = 0; way < 3; way++) {
        seqpar_status status;
        begun = 0;
        status = run_nccl(2, rank_stuck, &way, &error);
        test_expect(status == SEQPAR_ERR_TIMEOUT && error.rank == 1, "%s on rank %lld: %s",
                    seqpar_status_name(status), (long long)error.rank, error.text);
        test_expect(strstr(error.text, "'late kv' step 4 on rank 1 did not finish within 600 "
                                       "s: from rank 0 64 bytes") != NULL,
                    "%s", error.text);
        /* on a queue the message is NCCL's already */
        test_expect(!strstr(error.text, "64 bytes; the other side has not begun it") ==
                        (way > 0),
                    "%s", error.text);
        test_end("nccl_watchdog_%s", names[way]);
    }
}

/* ---- deadlocks on the host: found by the referee, exactly ---- */

/* its line is cut: all that the others see of a process that ends */
static seqpar_status rank_dies(seqpar_comm *world, void *user) {
    (void)user;
    TRY(seqpar_comm_barrier(world));
    if (world->rank == 1)
        shutdown(((seqpar_nccl__member *)world->state)->world->socket, SHUT_RDWR);
    return seqpar_comm_barrier(world);
}

static void test_deadlocks(void) {
    static const transport_maker maker = {.name = "nccl", .run = run_nccl};
    static const failure table[] = {
        DEADLOCK_CROSS,
        DEADLOCK_CYCLE,
        DEADLOCK_SELF,
        {"rank_dies", 4, rank_dies, 0, -1, {"for rank 1, which has ended"}, 0, NULL}};
    expect_failures(&maker, table, COUNT(table), 24);
    test_end("nccl_deadlocks_repeated");
}

static void post_one(seqpar_nccl__referee *f, int64_t rank, int64_t request, int sends) {
    seqpar_nccl__note n = seqpar_nccl__note_of(SEQPAR_NCCL__POST, rank);
    n.request = request;
    n.count = 1;
    n.sends = sends;
    strcpy(n.text, "s");
    f->items.item[0] = (seqpar_nccl__item){1 - rank, 8};
    seqpar_nccl__posted(f, rank, &n);
}

/* A referee of two ranks without connections, so that the order of notes is certain. */
typedef struct lone_referee {
    seqpar_nccl__referee f;
    int sockets[2];
    char ended[2];
    int64_t blocked[2];
    seqpar_nccl__end *ends[4];
    seqpar_nccl__items ready[2];
} lone_referee;

static void lone_new(lone_referee *l) {
    memset(l, 0, sizeof *l);
    l->f.size = l->f.came = 2;
    l->sockets[0] = l->sockets[1] = -1;
    l->f.socket = l->sockets;
    l->f.ended = l->ended;
    l->f.blocked = l->blocked;
    l->f.ends = l->ends;
    l->f.ready = l->ready;
    test_expect(seqpar_nccl__append(&l->f.items, 0, 0), "out of memory");
}

static void lone_free(lone_referee *l) {
    for (int i = 0; i < 4; i++) SEQPAR_FREE(l->ends[i]);
    for (int i = 0; i < 2; i++) SEQPAR_FREE(l->ready[i].item);
    SEQPAR_FREE(l->f.items.item);
}

/* Rank 0 says that request 0 blocks it while that is already matched; its request 1 waits for
   rank 1, and rank 1 for rank 0. */
static void test_matched_is_no_deadlock(void) {
    lone_referee l;
    lone_new(&l);
    post_one(&l.f, 0, 0, 0);
    post_one(&l.f, 1, 0, 1);
    post_one(&l.f, 0, 1, 0);
    post_one(&l.f, 1, 1, 0);
    l.blocked[1] = 1;
    seqpar_nccl__watch_deadlock(&l.f);
    test_expect(l.f.stop.status == 0, "%s", l.f.stop.text);
    test_expect(l.blocked[0] == -1 && l.ready[0].count == 1 && l.ready[1].count == 1,
                "rank 0 is not told to go on");
    l.blocked[0] = 1;
    seqpar_nccl__watch_deadlock(&l.f);
    test_expect(l.f.stop.status == SEQPAR_ERR_DEADLOCK, "no deadlock: status %lld",
                (long long)l.f.stop.status);
    lone_free(&l);
    test_end("nccl_matched_is_no_deadlock");
}

/* A rank has posted its end of a message when the other rank ends, with a goodbye or without. */
static void test_posted_before_the_end(void) {
    for (int64_t way = 0; way < 8; way++) {
        int64_t waits = way & 1;
        lone_referee l;
        lone_new(&l);
        post_one(&l.f, waits, 0, way >> 1 & 1);
        seqpar_nccl__left(&l.f, 1 - waits, way >> 2);
        test_expect(l.f.stop.status == SEQPAR_ERR_PEER && l.f.stop.rank == waits &&
                        strstr(l.f.stop.text, "waits in 's' step 0 for rank") != NULL,
                    "rank %lld waits: rank %lld: %s", (long long)waits,
                    (long long)l.f.stop.rank, l.f.stop.text);
        lone_free(&l);
    }
    test_end("nccl_posted_before_the_end");
}

/* ---- ways to open a world ---- */

static void expect_places(place *places, int64_t count, seqpar_status status,
                          const char *words) {
    seqpar_error error;
    seqpar_status got;
    pthread_t thread;
    int stop = 0;
    ledger_open();
    if (status == SEQPAR_ERR_TIMEOUT || status == SEQPAR_ERR_FILE_OPEN)
        pthread_create(&thread, NULL, hurry, &stop);
    got = run_places(places, count, &error);
    if (status == SEQPAR_ERR_TIMEOUT || status == SEQPAR_ERR_FILE_OPEN) {
        __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
        pthread_join(thread, NULL);
    }
    ledger_read();
    test_expect(got == status, "%s: %s", seqpar_status_name(got), error.text);
    test_expect(!words || strstr(error.text, words), "'%s' is not in: %s", words, error.text);
}

static int64_t free_port(void) {
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t bytes = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) ||
        getsockname(fd, (struct sockaddr *)&at, &bytes))
        abort();
    close(fd);
    return ntohs(at.sin_port);
}

static void *adopt_main(void *argument) { /* a caller with a communicator of its own */
    place *p = argument;
    ncclConfig_t config = {.blocking = p->user != NULL};
    ncclUniqueId id = {"adopted"};
    ncclResult_t state = ncclInProgress;
    cudaSetDevice((int)p->desc.rank);
    if (p->desc.rank) cudaStreamCreate(&p->desc.stream); /* rank 0 lets one be made */
    ncclCommInitRankConfig(&p->desc.comm, (int)p->desc.size, id, (int)p->desc.rank, &config);
    while (state == ncclInProgress) ncclCommGetAsyncError(p->desc.comm, &state);
    p->desc.rank = p->desc.size = 0;
    p->status = seqpar_nccl_run(&p->desc, p->fn, p->user, &p->error);
    if (!p->status) {
        ncclCommFinalize(p->desc.comm);
        for (state = ncclInProgress; state == ncclInProgress;)
            ncclCommGetAsyncError(p->desc.comm, &state);
        ncclCommDestroy(p->desc.comm);
    }
    if (p->desc.stream) cudaStreamDestroy(p->desc.stream);
    return NULL;
}

static void test_adopt(void) {
    static const seqpar_rank_fn ends[] = {rank_meets, rank_says_no};
    place places[RANKS];
    int64_t r, blocking, end;
    int yes = 1;
    ledger_open();
    for (end = 0; end < 2; end++)
        for (blocking = 0; blocking < 2; blocking++) {
            places_new(places, 3);
            for (r = 0; r < 3; r++) {
                places[r].desc.file = NULL;
                places[r].desc.host = "127.0.0.1";
                places[r].user = blocking ? &yes : NULL;
                places[r].fn = ends[end];
                pthread_create(&places[r].thread, NULL, adopt_main, &places[r]);
            }
            for (r = 0; r < 3; r++) pthread_join(places[r].thread, NULL);
            for (r = 0; r < 3; r++)
                test_expect(places[r].status == (end ? SEQPAR_ERR_OPTION : SEQPAR_OK),
                            "rank %lld: %s", (long long)r, places[r].error.text);
            test_expect(!stand.complaint[0] && !stand_leaks()[0], "%s %s", stand.complaint,
                        stand_leaks());
        }
    ledger_read();
    test_end("nccl_adopt");
}

static void test_open(void) {
    int before = open_files();
    place places[RANKS];
    char port[24];
    ncclUniqueId id = {"handed over"};
    int64_t r;
    FILE *stale = fopen(world_file, "w");
    /* left over from a run that is gone */
    fprintf(stale, "seqpar_nccl 127.0.0.1 %lld\n", (long long)free_port());
    fclose(stale);
    places_new(places, 3);
    expect_places(places, 3, SEQPAR_OK, NULL);
    test_expect(access(world_file, F_OK) != 0, "the file stays");
    test_end("nccl_open_by_file");
    places_new(places, 4);
    for (r = 0; r < 4; r++) places[r].desc.id = &id, places[r].desc.file = NULL;
    expect_places(places, 4, SEQPAR_OK, NULL);
    test_end("nccl_open_by_id");
    places_new(places, 4);
    snprintf(port, sizeof port, "%lld", (long long)free_port());
    setenv("MASTER_ADDR", "127.0.0.1", 1); /* a bare machine knows no localhost */
    setenv("MASTER_PORT", port, 1);
    for (r = 0; r < 4; r++) places[r].desc.file = NULL;
    expect_places(places, 4, SEQPAR_OK, NULL);
    expect_files(before);
    test_end("nccl_open_by_tcp");
}

/* ---- notes ---- */

/* A note that says so many items follow, and two that do. Whether it is taken; *left: bytes of
   the items that nobody has read. */
static int take_note(int64_t count, seqpar_nccl__items *items, ssize_t *left) {
    seqpar_nccl__note n = seqpar_nccl__note_of(SEQPAR_NCCL__GO, 0);
    seqpar_nccl__item two[2] = {{1, 2}, {3, 4}};
    int line[2], taken;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, line)) abort();
    n.count = count;
    seqpar_nccl__write(line[0], &n, sizeof n);
    seqpar_nccl__write(line[0], two, sizeof two);
    shutdown(line[0], SHUT_WR);
    taken = seqpar_nccl__take_note(line[1], &n, items);
    *left = recv(line[1], two, sizeof two, 0);
    close(line[0]);
    close(line[1]);
    return taken;
}

/* A count that no rank writes is a connection that is lost: nothing is read or asked for. */
static void test_notes(void) {
    static const int64_t counts[] = {-1, INT64_MIN, (INT64_C(1) << 32) + 1, INT64_MAX};
    seqpar_nccl__items items = {NULL, 0, 0};
    ssize_t left;
    test_expect(take_note(2, &items, &left) && items.count == 2 && items.item[1].b == 4 &&
                    !left,
                "two items are not taken");
    test_expect(take_note(0, &items, &left) && !items.count && left == 32,
                "a note without items takes some");
    test_expect(!take_note(3, &items, &left), "a note of three items is whole with two");
    for (int i = 0; i < COUNT(counts); i++) {
        refused_bytes = 0;
        test_expect(!take_note(counts[i], &items, &left) && !items.count && left == 32,
                    "%lld items: %d bytes of 32 are left", (long long)counts[i], (int)left);
        test_expect(!refused_bytes, "%lld items: room for them is asked for",
                    (long long)counts[i]);
    }
    test_expect(!take_note(INT64_C(1) << 32, &items, &left) &&
                    refused_bytes == sizeof *items.item << 32,
                "the most items: %zu bytes are asked for", (size_t)refused_bytes);
    free(items.item);
    test_end("nccl_notes");
}

/* Signals come into calls of all ranks, and of the referee. */
static void test_interrupted(void) {
    place places[RANKS];
    places_new(places, 3);
    interrupted = 0;
    interrupting = 1;
    expect_places(places, 3, SEQPAR_OK, NULL);
    interrupting = 0;
    test_expect(interrupted > 20, "only %d calls", interrupted);
    test_end("nccl_interrupted");
}

static seqpar_status rank_on_third(seqpar_comm *world, void *user) {
    int device = -1;
    (void)user;
    EXPECT(world->size == 1 && !cudaGetDevice(&device) && device == 3, "not alone on device 3");
    return rank_meets(world, NULL);
}

static void test_environment(void) {
    int before = open_files();
    place p[RANKS];
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "1", 1);
    setenv("LOCAL_RANK", "3", 1);
    places_new(p, 1);
    p[0].desc = (seqpar_nccl_desc){0};
    p[0].fn = rank_on_third;
    expect_places(p, 1, SEQPAR_OK, NULL);
    setenv("LOCAL_RANK", "16", 1);
    expect_places(p, 1, SEQPAR_ERR_RANK,
                  "LOCAL_RANK is 16, but this machine has 16 CUDA devices");
    setenv("WORLD_SIZE", "many", 1);
    expect_places(p, 1, SEQPAR_ERR_OPTION, "WORLD_SIZE is 'many'");
    setenv("WORLD_SIZE", "0", 1);
    expect_places(p, 1, SEQPAR_ERR_RANKS, "a world of 0 ranks");
    setenv("WORLD_SIZE", "1", 1);
    setenv("RANK", "1", 1);
    expect_places(p, 1, SEQPAR_ERR_RANK, "rank 1 is outside a world of 1");
    unsetenv("RANK");
    expect_places(p, 1, SEQPAR_ERR_OPTION, "RANK is ''");
    setenv("RANK", "0", 1);
    unsetenv("MASTER_PORT");
    expect_places(p, 1, SEQPAR_ERR_OPTION, "MASTER_PORT");
    setenv("WORLD_SIZE", "2", 1);
    setenv("RANK", "1", 1);
    setenv("MASTER_PORT", "1", 1);
    unsetenv("MASTER_ADDR");
    expect_places(p, 1, SEQPAR_ERR_OPTION, "MASTER_ADDR is not set on rank 1");
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    unsetenv("LOCAL_RANK");
    unsetenv("MASTER_PORT");
    expect_files(before);
    test_end("nccl_environment");
}

static void test_names(void) {
    place p[RANKS];
    char far_too_long[300];
    memset(far_too_long, 'n', sizeof far_too_long - 1);
    far_too_long[sizeof far_too_long - 1] = 0;
    places_new(p, 2);
    p[1].desc.file = NULL;
    p[1].desc.host = "unknown.host";
    p[1].desc.port = free_port();
    expect_places(
        p + 1, 1, SEQPAR_ERR_TIMEOUT,
        "cannot find the machine of rank 0, 'unknown.host': Name or service not known, after");
    test_expect(p[1].desc.connect_s == 0 && !strstr(p[1].error.text, "after 120 s"),
                "a name that nobody knows is asked for all the time: %s", p[1].error.text);
    const char *after = strstr(p[1].error.text, ", after ");
    test_expect(after && atof(after + strlen(", after ")) >= 120 / 8,
                "a name is asked for less than an eighth of the time: %s", p[1].error.text);
    p[1].desc.host = "silent.host";
    expect_places(p + 1, 1, SEQPAR_ERR_TIMEOUT,
                  "cannot find the machine of rank 0, 'silent.host': Temporary failure in name "
                  "resolution");
    test_expect(!names_answered, "a name server that does not answer is waited for");
    __atomic_store_n(&names_over, 1, __ATOMIC_SEQ_CST);
    while (!__atomic_load_n(&names_answered, __ATOMIC_SEQ_CST)) usleep(1000);
    p[1].desc.host = far_too_long;
    expect_places(p + 1, 1, SEQPAR_ERR_OPTION, "with 299 letters, names have at most 255");
    p[1].desc.host = "127.0.0.1";
    p[1].desc.port = 65536 + 22;
    expect_places(p + 1, 1, SEQPAR_ERR_OPTION, "the port of rank 0's machine is 65558");
    test_end("nccl_names");
}

/* ---- a split whose exchange fails on this rank alone ---- */

/* A listener whose queue is full does not answer: a caller gives up when its time is over, and at
   once if it was over before. */
static void test_silent_port(void) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t bytes = sizeof address;
    int waiting[8], count = 0, listener = socket(AF_INET, SOCK_STREAM, 0);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    test_expect(!bind(listener, (struct sockaddr *)&address, sizeof address) &&
                    !listen(listener, 0) &&
                    !getsockname(listener, (struct sockaddr *)&address, &bytes),
                "no listener: %s", strerror(errno));
    for (int is = 0; !is && count < (int)COUNT(waiting);) { /* until one is not answered */
        waiting[count] = socket(AF_INET, SOCK_STREAM, 0);
        is = seqpar_nccl__connect(waiting[count++], &address, clock_seconds() + 0.2);
    }
    for (int late = 0; late < 2; late++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        double begin = clock_seconds(), until = late ? begin - 100 : begin + 0.3;
        test_expect(seqpar_nccl__connect(fd, &address, until) == -1 &&
                        clock_seconds() - begin >= (late ? 0 : 0.3),
                    "after %g s", clock_seconds() - begin);
        close(fd);
    }
    while (count) close(waiting[--count]);
    close(listener);
    test_end("nccl_silent_port");
}

static seqpar_status no_begin(seqpar_comm *comm, const seqpar_group *group, void *queue,
                              seqpar_request *request) {
    (void)group, (void)queue, (void)request;
    return seqpar_fail(comm->error, SEQPAR_ERR_MEMORY, "no memory to begin");
}

static seqpar_status rank_cannot_split(seqpar_comm *world, void *user) {
    const seqpar_comm_table *table = world->table;
    seqpar_comm_table failing = *table;
    seqpar_comm *sub = NULL;
    (void)user;
    failing.begin = no_begin;
    world->table = &failing;
    seqpar_status status = seqpar_comm_split(world, 0, 0, &sub);
    world->table = table;
    EXPECT(status == SEQPAR_ERR_MEMORY && !sub, "rank %lld: the split ends with %s",
           (long long)world->rank, seqpar_status_name(status));
    return status;
}

static void test_split_fails(void) {
    seqpar_error error;
    test_expect(run_nccl(2, rank_cannot_split, NULL, &error) == SEQPAR_ERR_MEMORY &&
                    strstr(error.text, "no memory to begin"),
                "%s", error.text);
    test_end("nccl_split_fails");
}

/* Threads of this process; -1: the system does not list them. */
static int threads_now(void) {
    int count = -1;
    DIR *d = opendir("/proc/self/task");
    while (d && readdir(d)) count++;
    if (d) closedir(d);
    return count;
}

/* A rank that opens the world itself. Rank 0 frees the world before its half, the others
   after. */
static void *open_main(void *argument) {
    place *p = argument;
    int64_t me = p->desc.rank;
    seqpar_comm *world = (seqpar_comm *)p, *half = NULL;
    seqpar_error verdict;
    cudaSetDevice((int)me);
    p->status = seqpar_nccl_open(&world, &p->desc, &p->error);
    test_expect(!p->status || !world, "a world that failed is handed out");
    if (p->status) return NULL;
    p->status = seqpar_comm_split(world, me % 2, me, &half);
    if (me == 0) seqpar_comm_free(world);
    if (!p->status) p->status = seqpar_comm_barrier(half);
    test_expect(seqpar_nccl_verdict(me ? world : half, &verdict) == p->status, "%s",
                verdict.text);
    seqpar_comm_free(half);
    if (me) seqpar_comm_free(world);
    return NULL;
}

static seqpar_status open_places(place *p, int64_t count) {
    seqpar_status status = SEQPAR_OK;
    for (int64_t r = 0; r < count; r++)
        if (pthread_create(&p[r].thread, NULL, open_main, &p[r])) abort();
    for (int64_t r = 0; r < count; r++) {
        pthread_join(p[r].thread, NULL);
        if (!status) status = p[r].status;
    }
    expect_order();
    return status;
}

/* The last comm that a rank frees closes its world: sockets, threads and the file are gone. */
static void test_opened_by_ranks(void) {
    place p[RANKS];
    int files = open_files(), threads = 0;
    test_limit(TRANSPORT_SECONDS);
    for (int turn = 0; turn < 2; turn++) { /* the first one starts threads of the stand-in */
        if (turn) threads = threads_now();
        places_new(p, 3);
        test_expect(open_places(p, 3) == SEQPAR_OK, "%s", p[0].error.text);
    }
    test_expect(access(world_file, F_OK) != 0, "the file stays");
    expect_files(files);
    test_expect(threads_now() == threads, "%d threads run, %d ran before", threads_now(),
                threads);
    test_end("nccl_opened_by_ranks");
    places_new(p, 3);
    stand.version[1] = 21805;
    test_expect(open_places(p, 3), "it is opened");
    for (int r = 0; r < 3; r++)
        test_expect(p[r].status == (r == 1 ? SEQPAR_ERR_WORLD : SEQPAR_ERR_PEER) &&
                        strstr(p[r].error.text, "rank 1 runs NCCL 21805, rank 0 runs NCCL"),
                    "rank %d: %s: %s", r, seqpar_status_name(p[r].status), p[r].error.text);
    expect_files(files);
    test_expect(threads_now() == threads, "%d threads run, %d ran before", threads_now(),
                threads);
    test_end("nccl_opened_by_ranks_fails");
}

static void test_mismatches(void) {
    place p[RANKS];
    places_new(p, 3);
    stand.version[2] = 21805;
    p[1].late_us = 50000; /* who comes when the world has already failed hears why */
    expect_places(p, 3, SEQPAR_ERR_WORLD, "rank 2 runs NCCL 21805, rank 0 runs NCCL 22809");
    test_expect(p[1].status == SEQPAR_ERR_WORLD &&
                    strstr(p[1].error.text, "rank 2 runs NCCL 21805") != NULL,
                "the late rank: %s", p[1].error.text);
    test_expect(access(world_file, F_OK) != 0, "the file stays");
    places_new(p, 1);
    stand.version[0] = 21703;
    expect_places(p, 1, SEQPAR_ERR_TRANSPORT, "version 21703; 2.18");
    places_new(p, 1);
    stand_fail("ncclGetVersion", 0, 1);
    expect_places(p, 1, SEQPAR_ERR_TRANSPORT, "NCCL does not answer");
    test_end("nccl_versions");
    places_new(p, 3);
    p[1].desc.size = 4;
    expect_places(p, 3, SEQPAR_ERR_WORLD,
                  "rank 1 was started for a world of 4 ranks, rank 0 for one of 3");
    places_new(p, 3);
    p[2].desc.rank = 1;
    expect_places(p, 3, SEQPAR_ERR_WORLD, "two processes are rank 1");
    test_end("nccl_seats");
    places_new(p, 2);
    stand.devices = 0;
    expect_places(p, 2, SEQPAR_ERR_TRANSPORT, "has no CUDA device");
    test_end("nccl_no_device");
    places_new(p, 3);
    expect_places(p, 2, SEQPAR_ERR_TIMEOUT,
                  "of 3 ranks these did not connect within 120 s: 2; check");
    test_end("nccl_a_rank_does_not_come");
    places_new(p, 5);
    expect_places(p, 2, SEQPAR_ERR_TIMEOUT,
                  "of 5 ranks these did not connect within 120 s: 2 3 4; check");
    test_end("nccl_three_ranks_do_not_come");
    places_new(p, 2);
    expect_places(p + 1, 1, SEQPAR_ERR_FILE_OPEN, "rank 1 waited 120 s for rank 0 to write");
    p[1].desc.file = NULL;
    p[1].desc.host = "127.0.0.1";
    p[1].desc.port = free_port();
    expect_places(p + 1, 1, SEQPAR_ERR_TIMEOUT, "rank 1 found nobody at 127.0.0.1 port");
    p[0].desc.file = "/nowhere/at/all";
    expect_places(p, 1, SEQPAR_ERR_FILE_WRITE, "/nowhere/at/all");
    test_end("nccl_rank_0_does_not_come");
}

int main(int argc, char **argv) {
    static const transport_maker makers[] = {
        {.name = "nccl", .run = run_nccl, .own_device = 1},
        {.name = "nccl_in_place", .run = run_nccl_in_place, .own_device = 1}};
    int64_t i;
    test_begin(argc, argv);
    snprintf(world_file, sizeof world_file, "%s/seqpar_nccl.%ld",
             getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid());
    TEST(test_stand_in());
    quick = getenv("TEST_WAYS") != NULL;
    for (i = 0; i < (quick ? 1 : COUNT(makers)); i++) TEST(transport_conformance(&makers[i]));
    TEST(test_deadlocks());
    TEST(test_matched_is_no_deadlock());
    TEST(test_posted_before_the_end());
    TEST(test_queue());
    TEST(test_memory());
    TEST(test_attention());
    TEST(test_failing_calls());
    TEST(test_scarce());
    TEST(test_watchdog());
    TEST(test_open());
    TEST(test_notes());
    TEST(test_interrupted());
    TEST(test_adopt());
    TEST(test_environment());
    TEST(test_names());
    TEST(test_silent_port());
    TEST(test_opened_by_ranks());
    TEST(test_mismatches());
    TEST(test_split_fails());
    return test_summary();
}
