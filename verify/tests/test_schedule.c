/* SPDX-License-Identifier: MIT OR Unlicense */
/* Schedules: the order of events of real runs, a virtual clock that shows the overlap, and a
   transport that is late, out of order, wrong, failing or dead. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "support/inject.h"
#include "support/test.h"
#include <unistd.h>

/* without Ulysses, which moves no k and v between positions */
enum { SCHEDULES = SEQPAR_SCHEDULE_LLAMA3 + 1 };

/* ---- real runs: attention over threads through a transport that can be disturbed ---- */

enum {
    TOKENS = 192,
    HEADS = 4,
    KV_HEADS = 4,
    DIM = 8,
    WIDE = HEADS * DIM,
    EVENTS = 256,
    RANKS = 8
};

typedef struct run_desc {
    int64_t ranks, calls; /* calls of forward and backward on one seqpar_attn */
    int schedule, forward_only, full;
    int64_t stride, disturbed; /* rank that `inject` applies to, -1: all */
    const seqpar_inject_desc *inject;
    int virtual_clock;
    uint64_t numbers; /* which inputs */
    /* virtual time: of a message; that rank `disturbed` loses before it starts */
    double latency, late;
} run_desc;

typedef struct rank_record {
    seqpar_event event[EVENTS];
    int64_t events, forward_events, tokens, messages;
    double opened; /* virtual time when attention was opened */
    seqpar_comm *clock_comm;
    double clock, computed;
    float *result[5]; /* out, lse, dq, dk, dv of the last call */
    int64_t count[5];
    int calls_differ;
    char text[512];
    seqpar_status status;
} rank_record;

typedef struct run {
    const run_desc *d;
    seqpar_row row;
    int64_t cu[4];
    float *input[4];
    rank_record rank[RANKS];
    seqpar_error error;
    seqpar_status status;
} run;

static void record(void *user, const seqpar_event *event) {
    rank_record *r = user;
    if (r->events < EVENTS) r->event[r->events++] = *event;
    if (strcmp(event->what, "compute")) return;
    r->computed += event->cost;
    if (r->clock_comm) seqpar_inject_compute(r->clock_comm, event->cost);
}

static seqpar_status run_calls(seqpar_ctx *ctx, seqpar_attn *attn, const run *x,
                               rank_record *mine) {
    int64_t call, i;
    float *local[4], *first[5] = {0};
    seqpar_status status = SEQPAR_OK;
    for (i = 0; i < 4; i++) {
        local[i] = calloc((size_t)(mine->tokens * WIDE + 1), sizeof(float));
        seqpar_scatter(local[i], x->input[i], seqpar_attn_share(attn), 0,
                       WIDE * (int64_t)sizeof(float));
    }
    for (call = 0; call < x->d->calls && !status; call++) {
        for (i = 0; i < 5; i++)
            memset(mine->result[i], 0x55, (size_t)mine->count[i] * sizeof(float));
        seqpar_attn_io io = {.q = local[0],
                             .k = local[1],
                             .v = local[2],
                             .out = mine->result[0],
                             .lse = mine->result[1],
                             .dout = local[3],
                             .dq = mine->result[2],
                             .dk = mine->result[3],
                             .dv = mine->result[4]};
        status = seqpar_attn_forward(ctx, attn, &io);
        if (call == 0) mine->forward_events = mine->events;
        if (call == 0)
            mine->clock = x->d->virtual_clock ? seqpar_inject_clock(ctx->sp) - mine->opened : 0;
        if (!status && !x->d->forward_only) status = seqpar_attn_backward(ctx, attn, &io);
        for (i = 0; i < 5; i++) {
            size_t bytes = (size_t)mine->count[i] * sizeof(float);
            if (!first[i]) first[i] = memcpy(malloc(bytes + 1), mine->result[i], bytes);
            mine->calls_differ |= memcmp(first[i], mine->result[i], bytes) != 0;
        }
    }
    for (i = 0; i < 4; i++) free(local[i]);
    for (i = 0; i < 5; i++) free(first[i]);
    return status;
}

static seqpar_status run_rank(seqpar_ctx *ctx, run *x) {
    const run_desc *d = x->d;
    rank_record *mine = &x->rank[ctx->sp_rank];
    seqpar_attn_desc desc = {.heads = HEADS,
                             .kv_heads = KV_HEADS,
                             .head_dim = DIM,
                             .layout = SEQPAR_LAYOUT_ZIGZAG,
                             .schedule = d->schedule,
                             .heads_k_stride = d->stride,
                             .full = d->full};
    seqpar_attn *attn;
    int64_t i;
    seqpar_status status = seqpar_attn_open(ctx, &attn, &x->row, 1, &desc);
    if (status) return status;
    mine->tokens = seqpar_attn_share(attn)->tokens;
    mine->opened = d->virtual_clock ? seqpar_inject_clock(ctx->sp) : 0;
    for (i = 0; i < 5; i++) {
        mine->count[i] = mine->tokens * (i == 1 ? HEADS : WIDE);
        mine->result[i] = calloc((size_t)mine->count[i] + 1, sizeof(float));
    }
    ctx->trace = record;
    ctx->trace_user = mine;
    mine->clock_comm = d->virtual_clock ? ctx->sp : NULL;
    if (d->virtual_clock && ctx->sp_rank == d->disturbed)
        seqpar_inject_compute(ctx->sp, d->late);
    status = run_calls(ctx, attn, x, mine);
    mine->messages = ctx->sp->messages_sent;
    seqpar_attn_close(ctx, attn);
    return status;
}

static seqpar_status run_main(seqpar_comm *world, void *user) {
    run *x = user;
    const run_desc *d = x->d;
    seqpar_inject_desc desc = {0};
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_comm *comm;
    seqpar_ctx ctx;
    seqpar_status status;
    if (d->inject && (d->disturbed < 0 || d->disturbed == world->rank)) desc = *d->inject;
    desc.seed += (uint64_t)world->rank * 1000;
    desc.virtual_clock = d->virtual_clock;
    desc.latency = d->latency;
    comm = seqpar_comm_inject(world, &desc);
    status = seqpar_ctx_open(&ctx, comm, device, world->size);
    if (!status) status = run_rank(&ctx, x);
    x->rank[world->rank].status = status;
    snprintf(x->rank[world->rank].text, sizeof x->rank[world->rank].text, "%s",
             world->error->text);
    seqpar_ctx_close(&ctx);
    seqpar_comm_free(comm);
    seqpar_device_close(device);
    return status;
}

static void run_begin(run *x, const run_desc *d) {
    int64_t i, j;
    uint64_t state = test_state;
    memset(x, 0, sizeof *x);
    x->d = d;
    test_state = test_seed * 77 + d->numbers; /* the same in every run */
    for (i = 0; i < 4; i++) {
        x->input[i] = malloc(TOKENS * WIDE * sizeof(float));
        for (j = 0; j < TOKENS * WIDE; j++) x->input[i][j] = (float)test_normal();
    }
    test_state = state;
    x->cu[1] = TOKENS;
    x->row = (seqpar_row){
        .tokens = TOKENS, .cell = TOKENS / 16, .docs = 1, .cu_seqlens = x->cu};
    test_limit(60); /* a hang is a failure, not a wait */
    x->status = seqpar_run_threads(d->ranks, run_main, x, &x->error);
    test_limit(0);
}

static void run_end(run *x) {
    int64_t r, i;
    for (i = 0; i < 4; i++) free(x->input[i]);
    for (r = 0; r < RANKS; r++)
        for (i = 0; i < 5; i++) free(x->rank[r].result[i]);
}

static int same_results(const run *a, const run *b) {
    int64_t r, i;
    for (r = 0; r < a->d->ranks; r++)
        for (i = 0; i < 5; i++)
            if (a->rank[r].count[i] != b->rank[r].count[i] ||
                memcmp(a->rank[r].result[i], b->rank[r].result[i],
                       (size_t)a->rank[r].count[i] * sizeof(float)))
                return 0;
    return 1;
}

/* ---- order of events ---- */

/* Place of an event in a record, from `from` on; -1: it is not there. */
static int64_t place(const rank_record *r, int64_t from, int64_t to, const char *what,
                     int64_t number) {
    int64_t i;
    for (i = from; i < to; i++)
        if (!strcmp(r->event[i].what, what) &&
            number == (!strcmp(what, "compute") ? r->event[i].step : r->event[i].request))
            return i;
    return -1;
}

/* Within one pass (events from..to) of `steps` computes: ring sends what step s computes
   while it computes, llama3 fetches the heads of step s + 1; either way the request of the
   step begins before the compute and is waited for behind it. */
static void expect_overlap(const run *x, int64_t rank, int64_t from, int64_t to, int64_t steps,
                           int backward) {
    const rank_record *r = &x->rank[rank];
    int64_t s;
    int64_t ring = x->d->schedule == SEQPAR_SCHEDULE_RING;
    int64_t requests = ring ? x->d->ranks : steps;
    for (s = 0; s < steps; s++) {
        int64_t ahead = ring ? s : s + 1, compute = place(r, from, to, "compute", s);
        int64_t next = place(r, from, to, "compute", s + 1);
        int64_t begin = place(r, from, to, "begin", ahead);
        int64_t wait = place(r, from, to, "wait", ahead);
        test_expect(compute >= 0, "step %lld is not computed", (long long)s);
        if (s + 1 < steps) {
            test_expect(begin >= 0 && begin < compute,
                        "rank %lld: request %lld begins at %lld, step %lld is computed at %lld",
                        (long long)rank, (long long)ahead, (long long)begin, (long long)s,
                        (long long)compute);
            test_expect(wait > compute && wait < next,
                        "rank %lld: request %lld is waited for at %lld, steps %lld and %lld "
                        "are computed at %lld and %lld",
                        (long long)rank, (long long)ahead, (long long)wait, (long long)s,
                        (long long)s + 1, (long long)compute, (long long)next);
        }
        if (!backward || (ring && s == 0)) continue;
        begin = place(r, from, to, "begin", requests + s);
        wait = place(r, from, to, "fold", requests + s);
        test_expect(begin > compute && wait > begin && (s + 1 == steps || wait > next),
                    "rank %lld: dk, dv of step %lld (computed at %lld, next at %lld) leave at "
                    "%lld and are folded at %lld",
                    (long long)rank, (long long)s, (long long)compute, (long long)next,
                    (long long)begin, (long long)wait);
    }
}

static void test_order(int schedule, int64_t ranks, int64_t stride) {
    run_desc d = {.ranks = ranks, .calls = 1, .schedule = schedule, .stride = stride};
    run x;
    int64_t r, steps = schedule == SEQPAR_SCHEDULE_RING ? ranks : KV_HEADS / stride;
    run_begin(&x, &d);
    test_expect(!x.status, "%s", x.error.text);
    for (r = 0; r < ranks && !x.status; r++) {
        test_expect(x.rank[r].events < EVENTS && x.rank[r].forward_events > 0, "%lld events",
                    (long long)x.rank[r].events);
        expect_overlap(&x, r, 0, x.rank[r].forward_events, steps, 0);
        expect_overlap(&x, r, x.rank[r].forward_events, x.rank[r].events, steps, 1);
    }
    run_end(&x);
    test_end("order_%s P=%lld stride=%lld", seqpar_schedule_name(schedule), (long long)ranks,
             (long long)stride);
}

/* ---- virtual time ---- */

/* latest rank; most computing; without overlap */
typedef struct virtual_time {
    double clock, compute, serial;
} virtual_time;

static virtual_time run_clock(const run_desc *d, int64_t messages) {
    virtual_time t = {0, 0, 0};
    run x;
    int64_t r;
    run_begin(&x, d);
    test_expect(!x.status, "%s", x.error.text);
    for (r = 0; r < d->ranks; r++) {
        if (x.rank[r].clock > t.clock) t.clock = x.rank[r].clock;
        if (x.rank[r].computed > t.compute) t.compute = x.rank[r].computed;
    }
    t.serial = t.compute + (double)messages * d->latency + d->late;
    run_end(&x);
    return t;
}

/* A step computes c; a message takes 0.8 c. With the transfer behind the compute nothing of
   it is left to see. */
static void test_clock(int schedule, int64_t ranks, int64_t stride) {
    /* of a forward pass */
    double step = 4.0 * DIM * HEADS * (TOKENS * (TOKENS + 1) / 2) / (double)ranks;
    int64_t steps = schedule == SEQPAR_SCHEDULE_RING ? ranks : KV_HEADS / stride;
    int64_t hops = schedule == SEQPAR_SCHEDULE_RING ? ranks - 1 : steps;
    /* llama3 cannot hide the first gather */
    double latency = 0.8 * step / (double)steps;
    double first = schedule == SEQPAR_SCHEDULE_RING ? 0 : latency;
    run_desc d = {.ranks = ranks,
                  .calls = 1,
                  .schedule = schedule,
                  .stride = stride,
                  .forward_only = 1,
                  .virtual_clock = 1,
                  .latency = latency,
                  .disturbed = -1};
    virtual_time t = run_clock(&d, hops), late;
    test_expect(t.clock >= t.compute && t.compute > 0, "virtual time %g, computing alone %g",
                t.clock, t.compute);
    test_expect(t.clock < t.serial && t.clock <= t.compute * 1.15 + first,
                "virtual time %.3g of %.3g (computing %.3g, %lld messages of %.3g)", t.clock,
                t.serial, t.compute, (long long)hops, latency);
    d.disturbed = 1;
    d.late = 2 * latency;
    late = run_clock(&d, hops);
    test_expect(late.clock < late.serial && late.clock > t.clock,
                "one late rank: %.3g of %.3g, %.3g without", late.clock, late.serial, t.clock);
    test_expect(late.clock <= t.clock + d.late * 1.01,
                "one late rank costs %.3g, it was late by %.3g", late.clock - t.clock, d.late);
    printf("#   %s P=%lld: virtual time %.3f of the serial sum; with a late rank %.3f\n",
           seqpar_schedule_name(schedule), (long long)ranks, t.clock / t.serial,
           late.clock / late.serial);
    test_end("clock_%s P=%lld", seqpar_schedule_name(schedule), (long long)ranks);
}

/* ---- a transport that does harm ---- */

static void test_arrival(int schedule, int64_t ranks, int64_t stride) {
    run_desc calm = {.ranks = ranks, .calls = 5, .schedule = schedule, .stride = stride};
    run one, x;
    int i;
    run_begin(&one, &calm);
    test_expect(!one.status && !one.rank[0].calls_differ,
                "%s five calls on one seqpar_attn differ", one.error.text);
    for (i = 0; i < 20; i++) {
        seqpar_inject_desc rough = {
            .seed = (uint64_t)i + test_seed * 100, .delay_us_max = 300, .reorder = 1};
        run_desc d = calm;
        int64_t r;
        d.inject = &rough;
        d.disturbed = i % 3 == 0 ? i % ranks : -1;
        d.calls = 1 + i % 2;
        run_begin(&x, &d);
        test_expect(!x.status && same_results(&x, &one), "run %d: %s other bits", i,
                    x.error.text);
        for (r = 0; r < ranks; r++)
            test_expect(!x.rank[r].calls_differ, "run %d: the calls of rank %lld differ", i,
                        (long long)r);
        run_end(&x);
    }
    run_end(&one);
    test_end("arrival_%s P=%lld", seqpar_schedule_name(schedule), (long long)ranks);
}

/* Does one flipped bit in this message end the run or change the results? It is a low one
   and may drown in a sum, but not with all inputs. */
static int flip_shows(run_desc d, int64_t message) {
    seqpar_inject_desc flip = {.flip_bit_at = message};
    int shows = 0;
    for (d.numbers = 0; d.numbers < 5 && !shows; d.numbers++) {
        run one, x;
        d.inject = NULL;
        run_begin(&one, &d);
        d.inject = &flip;
        run_begin(&x, &d);
        test_expect(!one.status, "%s", one.error.text);
        shows = x.status || !same_results(&x, &one);
        run_end(&one);
        run_end(&x);
    }
    return shows;
}

/* All keys are seen, so every message counts. */
static void test_flip(int schedule, int64_t ranks) {
    run_desc d = {.ranks = ranks,
                  .calls = 1,
                  .schedule = schedule,
                  .stride = 2,
                  .full = 1,
                  .disturbed = ranks - 1};
    run one;
    int64_t n, messages;
    run_begin(&one, &d);
    messages = one.rank[ranks - 1].messages; /* as many come as go */
    run_end(&one);
    for (n = 1; n <= messages; n++)
        test_expect(flip_shows(d, n), "a flipped bit in message %lld of %lld changes nothing",
                    (long long)n, (long long)messages);
    test_expect(messages > 0 && !flip_shows(d, messages + 1), "there is a message %lld",
                (long long)messages + 1);
    test_end("flip_%s P=%lld, %lld messages", seqpar_schedule_name(schedule), (long long)ranks,
             (long long)messages);
}

/* The failing rank says INJECTED, the world repeats it, and everybody else has its words as
   PEER. */
static void test_failure(int schedule, int64_t ranks) {
    run_desc d = {
        .ranks = ranks, .calls = 1, .schedule = schedule, .stride = 1, .disturbed = 1};
    int64_t n, r;
    /* none is the last of its pass, so all others still wait for rank 1 */
    for (n = 1; n <= 7; n += 2) {
        seqpar_inject_desc fail = {.fail_at = n};
        run x;
        d.inject = &fail;
        run_begin(&x, &d);
        test_expect(x.status == SEQPAR_ERR_INJECTED && x.error.rank == 1 &&
                        strstr(x.error.text, "injected failure"),
                    "transfer %lld: the world says %s: %s", (long long)n,
                    seqpar_status_name(x.status), x.error.text);
        for (r = 0; r < ranks; r++) {
            rank_record *q = &x.rank[r];
            test_expect(q->status == (r == 1 ? SEQPAR_ERR_INJECTED : SEQPAR_ERR_PEER),
                        "transfer %lld: rank %lld has %s", (long long)n, (long long)r,
                        seqpar_status_name(q->status));
            test_expect(strstr(q->text, "injected failure") &&
                            (r == 1 || strstr(q->text, "rank 1 failed")),
                        "transfer %lld: rank %lld says: %s", (long long)n, (long long)r,
                        q->text);
        }
        run_end(&x);
    }
    test_end("failure_%s P=%lld", seqpar_schedule_name(schedule), (long long)ranks);
}

static void test_death(int schedule, int64_t ranks) {
    run_desc d = {
        .ranks = ranks, .calls = 1, .schedule = schedule, .stride = 1, .disturbed = ranks - 1};
    int64_t n;
    for (n = 1; n <= 7; n += 2) {
        seqpar_inject_desc die = {.die_at = n};
        run x;
        d.inject = &die;
        run_begin(&x, &d);
        test_expect(x.status != 0 && x.rank[ranks - 1].status == SEQPAR_ERR_DIED,
                    "transfer %lld: the world says %s, the dead rank %s", (long long)n,
                    seqpar_status_name(x.status), seqpar_status_name(x.rank[ranks - 1].status));
        test_expect(strstr(x.error.text, "ended") != NULL,
                    "transfer %lld: nobody says that a rank has ended: %s", (long long)n,
                    x.error.text);
        run_end(&x);
    }
    test_end("death_%s P=%lld", seqpar_schedule_name(schedule), (long long)ranks);
}

int main(int argc, char **argv) {
    static const int64_t ranks[] = {2, 3, 4, 8};
    int schedule;
    size_t i;
    test_begin(argc, argv);
    for (schedule = 0; schedule < SCHEDULES; schedule++)
        for (i = 0; i < 4; i++)
            TEST(test_order(schedule, ranks[i],
                            schedule == SEQPAR_SCHEDULE_LLAMA3 ? 1 + (int64_t)(i % 2) : 1));
    for (i = 0; i < 3; i++) {
        TEST(test_clock(SEQPAR_SCHEDULE_RING, ranks[i + 1], 1));
        TEST(test_clock(SEQPAR_SCHEDULE_LLAMA3, ranks[i + 1], 1));
    }
    for (schedule = 0; schedule < SCHEDULES; schedule++) {
        TEST(test_arrival(schedule, 4, 1));
        TEST(test_arrival(schedule, 3, 2));
        TEST(test_flip(schedule, 4));
        TEST(test_failure(schedule, 4));
        TEST(test_death(schedule, 4));
    }
    return test_summary();
}
