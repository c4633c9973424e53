/* SPDX-License-Identifier: MIT OR Unlicense */
/* Schedules: plans computed by hand on paper ranks, the order of events of real runs, a virtual clock that shows the overlap,
   and a transport that is late, out of order, wrong, failing or dead. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "test.h"
#include <unistd.h>

enum { SCHEDULES = SEQPAR_LLAMA3 + 1 }; /* without Ulysses, which moves no k and v between positions */

/* ---- plans, without running anything ---- */

enum { IDLE, IN_FLIGHT, DONE };
typedef struct slot_state { /* what lies in a slot of one paper rank */
    int64_t source, sources, head_begin, head_count; /* sources 0: nothing */
    int64_t sent_by, arrives_by;                     /* request in flight that reads or writes it; -1: none */
    int computed;
} slot_state;

typedef struct paper_rank {
    const seqpar_plan *plan;
    slot_state slot[3];
    int *request;            /* (requests) */
    int *computed;           /* (sp_size, kv_heads) how often */
    int64_t kv_heads, last_source, last_head, returns_open;
} paper_rank;

static const char *op_name(int op) {
    static const char *const names[] = {"PACK", "SHIFT", "GATHER", "WAIT", "COMPUTE", "RETURN", "FOLD"};
    return names[op];
}
#define BAD(...) do { test_expect(0, __VA_ARGS__); return; } while (0)

static void begin_request(paper_rank *p, const seqpar_plan_op *op) {
    if (op->request < 0 || op->request >= p->plan->requests) BAD("%s has request %d of %lld", op_name(op->op), op->request, (long long)p->plan->requests);
    test_expect(p->request[op->request] == IDLE, "request %d is begun twice", op->request);
    p->request[op->request] = IN_FLIGHT;
}

static void end_request(paper_rank *p, const seqpar_plan_op *op) {
    int64_t i;
    if (op->request < 0 || op->request >= p->plan->requests) BAD("%s has request %d of %lld", op_name(op->op), op->request, (long long)p->plan->requests);
    test_expect(p->request[op->request] == IN_FLIGHT, "%s of request %d, which is not in flight", op_name(op->op), op->request);
    p->request[op->request] = DONE;
    for (i = 0; i < 3 && op->op == SEQPAR_PLAN_WAIT; i++) {
        if (p->slot[i].sent_by == op->request) p->slot[i].sent_by = -1;
        if (p->slot[i].arrives_by == op->request) p->slot[i].arrives_by = -1;
    }
}

/* Somebody is about to write into a slot. */
static slot_state *overwrite(paper_rank *p, int32_t number, const seqpar_plan_op *op) {
    slot_state *s = &p->slot[number];
    test_expect(number >= 0 && number < p->plan->slots, "%s writes slot %d of %lld", op_name(op->op), number, (long long)p->plan->slots);
    test_expect(s->sent_by < 0, "%s writes slot %d while request %lld sends it", op_name(op->op), number, (long long)s->sent_by);
    test_expect(s->arrives_by < 0, "%s writes slot %d while request %lld fills it", op_name(op->op), number, (long long)s->arrives_by);
    test_expect(!s->sources || s->computed, "%s overwrites slot %d before source %lld was computed", op_name(op->op), number, (long long)s->source);
    s->computed = 0;
    s->head_begin = op->head_begin;
    s->head_count = op->head_count;
    return s;
}

static void paper_shift(paper_rank *p, const seqpar_plan_op *op) {
    slot_state *from = &p->slot[op->from], *to = overwrite(p, op->to, op);
    int64_t size = p->plan->sp_size;
    begin_request(p, op);
    test_expect(op->from != op->to, "a shift from slot %d into itself", op->from);
    test_expect(from->arrives_by < 0, "slot %d is sent on before it has arrived", op->from);
    test_expect(from->sources == 1 && from->source == op->source, "slot %d holds source %lld, the shift names %lld", op->from, (long long)from->source, (long long)op->source);
    test_expect(op->send_to != p->plan->sp_rank && op->recv_from != p->plan->sp_rank, "a shift to itself");
    from->sent_by = op->request;
    to->arrives_by = op->request;
    to->sources = 1;
    to->source = (op->source - 1 + size) % size; /* held against the neighbour's plan below */
}

static void paper_gather(paper_rank *p, const seqpar_plan_op *op) {
    slot_state *s = &p->slot[op->to];
    begin_request(p, op);
    test_expect(s->sources == 1 && s->source == p->plan->sp_rank && s->head_begin == op->head_begin && s->head_count == op->head_count, "a gather into slot %d, which was not packed with these heads", op->to);
    s->sources = p->plan->sp_size;
    s->source = 0;
    s->sent_by = s->arrives_by = op->request;
}

static void paper_compute(paper_rank *p, const seqpar_plan_op *op) {
    slot_state *s = &p->slot[op->from];
    int64_t source, head;
    test_expect(s->arrives_by < 0, "slot %d is computed before it has arrived", op->from);
    test_expect(s->source == op->source && s->sources == op->sources && s->head_begin == op->head_begin && s->head_count == op->head_count, "slot %d holds source %lld heads %lld+%lld, the compute names %lld, %lld+%lld",
                op->from, (long long)s->source, (long long)s->head_begin, (long long)s->head_count, (long long)op->source, (long long)op->head_begin, (long long)op->head_count);
    test_expect(p->returns_open < 2, "a compute writes the outbox that a return in flight still reads");
    if (op->source < 0 || op->source + op->sources > p->plan->sp_size || op->head_begin < 0 || op->head_begin + op->head_count > p->kv_heads) BAD("a compute outside sources or heads");
    for (source = op->source; source < op->source + op->sources; source++)
        for (head = op->head_begin; head < op->head_begin + op->head_count; head++) p->computed[source * p->kv_heads + head]++;
    s->computed = 1;
    p->last_source = op->source;
    p->last_head = op->head_begin;
}

static void paper_return(paper_rank *p, const seqpar_plan_op *op) {
    begin_request(p, op);
    test_expect(p->plan->backward, "a return in a forward plan");
    test_expect(op->send_to == (op->recv_from < 0 ? -1 : p->last_source) && op->head_begin == p->last_head, "a return to %lld, but source %lld was computed last", (long long)op->send_to, (long long)p->last_source);
    test_expect(op->send_to != p->plan->sp_rank, "a return to itself");
    p->returns_open++;
}

static void paper_op(paper_rank *p, const seqpar_plan_op *op) {
    slot_state *s;
    switch (op->op) {
    case SEQPAR_PLAN_PACK:
        s = overwrite(p, op->to, op);
        s->source = p->plan->sp_rank;
        s->sources = 1;
        break;
    case SEQPAR_PLAN_SHIFT: paper_shift(p, op); break;
    case SEQPAR_PLAN_GATHER: paper_gather(p, op); break;
    case SEQPAR_PLAN_COMPUTE: paper_compute(p, op); break;
    case SEQPAR_PLAN_RETURN: paper_return(p, op); break;
    case SEQPAR_PLAN_FOLD: p->returns_open--; /* fall through */
    default: end_request(p, op); break;
    }
}

/* Walks one rank's plan; then every source is computed once per head, every request is over. */
static void walk_plan(const seqpar_plan *plan, int schedule, int64_t kv_heads) {
    paper_rank p = {.plan = plan, .kv_heads = kv_heads};
    int ring = schedule == SEQPAR_RING || plan->sp_size == 1;
    int64_t i, returns = 0, folds = 0;
    p.request = calloc((size_t)plan->requests + 1, sizeof *p.request);
    p.computed = calloc((size_t)(plan->sp_size * kv_heads), sizeof *p.computed);
    for (i = 0; i < 3; i++) p.slot[i].sent_by = p.slot[i].arrives_by = -1;
    if (ring) p.slot[0] = (slot_state){.source = plan->sp_rank, .sources = 1, .head_count = kv_heads, .sent_by = -1, .arrives_by = -1};
    for (i = 0; i < plan->count && !test_why[0]; i++) {
        paper_op(&p, &plan->ops[i]);
        returns += plan->ops[i].op == SEQPAR_PLAN_RETURN;
        folds += plan->ops[i].op == SEQPAR_PLAN_FOLD;
        test_expect(plan->sp_size > 1 || plan->ops[i].op == SEQPAR_PLAN_COMPUTE, "one rank alone does %s", op_name(plan->ops[i].op));
    }
    for (i = 0; i < plan->sp_size * kv_heads; i++) test_expect(p.computed[i] == 1, "source %lld, head %lld is computed %d times", (long long)(i / kv_heads), (long long)(i % kv_heads), p.computed[i]);
    for (i = 0; i < plan->requests; i++) test_expect(p.request[i] != IN_FLIGHT, "request %lld is never waited for", (long long)i);
    test_expect(returns == folds && (returns > 0) == (plan->backward && plan->sp_size > 1), "%lld returns, %lld folds", (long long)returns, (long long)folds);
    free(p.request);
    free(p.computed);
}

/* The n-th message between two ranks as one of them sees it: what the op is, where and which heads. 0: there is none. */
static int message_of(const seqpar_plan *plan, int64_t peer, int sends, int64_t n, seqpar_plan_op *found) {
    int64_t i;
    for (i = 0; i < plan->count; i++) {
        const seqpar_plan_op *op = &plan->ops[i];
        int moves = op->op == SEQPAR_PLAN_SHIFT || op->op == SEQPAR_PLAN_GATHER || op->op == SEQPAR_PLAN_RETURN;
        int64_t other = sends ? op->send_to : op->recv_from;
        if (!moves || (other >= 0 ? other != peer : op->op == SEQPAR_PLAN_SHIFT)) continue;
        *found = *op;
        if (n-- == 0) return 1;
    }
    return 0;
}

/* What rank a sends to rank b is what b expects of a, message by message. */
static void match_plans(const seqpar_plan *a, const seqpar_plan *b) {
    seqpar_plan_op sent = {0}, expected = {0};
    int64_t n, size = a->sp_size;
    for (n = 0;; n++) {
        int is = message_of(a, b->sp_rank, 1, n, &sent), wanted = message_of(b, a->sp_rank, 0, n, &expected);
        test_expect(is == wanted, "rank %lld sends %d, rank %lld expects %d as message %lld", (long long)a->sp_rank, is, (long long)b->sp_rank, wanted, (long long)n);
        if (!is || !wanted) return;
        test_expect(sent.op == expected.op && sent.request == expected.request && sent.head_begin == expected.head_begin && sent.head_count == expected.head_count,
                    "message %lld from %lld to %lld: %s of step %d was sent, %s of step %d expected", (long long)n, (long long)a->sp_rank, (long long)b->sp_rank, op_name(sent.op), sent.request, op_name(expected.op), expected.request);
        if (sent.op == SEQPAR_PLAN_SHIFT) /* the receiver counts on the source before its own */
            test_expect(sent.source == (expected.source - 1 + size) % size, "rank %lld sends source %lld, rank %lld expects %lld", (long long)a->sp_rank, (long long)sent.source, (long long)b->sp_rank, (long long)((expected.source - 1 + size) % size));
    }
}

static void test_plan(int schedule, int64_t size, int64_t kv_heads, int64_t stride, int backward) {
    seqpar_plan *plans = calloc((size_t)size, sizeof *plans);
    seqpar_error error = {0};
    int64_t r, q, near;
    for (r = 0; r < size; r++) {
        test_expect(!seqpar_plan_make(&error, &plans[r], &(seqpar_plan_desc){.schedule = schedule, .sp_size = size, .sp_rank = r, .kv_heads = kv_heads, .heads_k_stride = stride, .backward = backward}), "%s", error.text);
        test_expect(plans[r].slots <= 3, "%lld slots", (long long)plans[r].slots);
        if (size <= 64 || r % 93 == 0 || r == size - 1) walk_plan(&plans[r], schedule, kv_heads);
    }
    for (r = 0; r < size && !test_why[0]; r += size <= 8 ? 1 : size / 4 + 1)
        for (q = 0; q < size; q++) {
            near = (q - r + size) % size;
            if (q != r && (size <= 8 || near == 1 || near == size - 1 || near == size / 2)) match_plans(&plans[r], &plans[q]);
        }
    for (r = 0; r < size; r++) seqpar_plan_free(&plans[r]);
    free(plans);
}

static void test_plans(void) {
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 8, 64, 1024}, heads[][2] = {{1, 1}, {4, 1}, {4, 2}, {6, 3}, {8, 8}, {4, 0}};
    size_t i, j;
    int schedule, backward;
    for (schedule = 0; schedule < SCHEDULES; schedule++)
        for (backward = 0; backward < 2; backward++)
            for (i = 0; i < sizeof sizes / sizeof *sizes; i++) {
                for (j = 0; j < (schedule == SEQPAR_RING && sizes[i] > 64 ? 2 : 6); j++) test_plan(schedule, sizes[i], heads[j][0], heads[j][1], backward);
                test_end("plan_%s %s P=%lld", seqpar_schedule_name(schedule), backward ? "backward" : "forward", (long long)sizes[i]);
            }
}

static void test_refused_plans(void) {
    static const struct { int schedule; int64_t size, rank, heads, stride; seqpar_status status; } cases[] = {
        {SEQPAR_RING, 0, 0, 2, 1, SEQPAR_ERR_RANKS}, {SEQPAR_RING, 4, 4, 2, 1, SEQPAR_ERR_RANK}, {SEQPAR_RING, 4, -1, 2, 1, SEQPAR_ERR_RANK}, {SEQPAR_LLAMA3, 4, 0, 0, 1, SEQPAR_ERR_HEADS},
        {SEQPAR_LLAMA3, 4, 0, 4, 3, SEQPAR_ERR_HEAD_STRIDE}, {SEQPAR_LLAMA3, 4, 0, 4, -1, SEQPAR_ERR_HEAD_STRIDE}, {7, 4, 0, 4, 1, SEQPAR_ERR_SCHEDULE}};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        seqpar_plan plan;
        seqpar_error error = {0};
        seqpar_status status = seqpar_plan_make(&error, &plan, &(seqpar_plan_desc){.schedule = cases[i].schedule, .sp_size = cases[i].size, .sp_rank = cases[i].rank, .kv_heads = cases[i].heads, .heads_k_stride = cases[i].stride});
        test_expect(status == cases[i].status && error.text[0], "case %d gives %s, want %s", (int)i, seqpar_status_name(status), seqpar_status_name(cases[i].status));
        seqpar_plan_free(&plan);
    }
    test_end("plan_refused");
}

/* ---- real runs: attention over threads through a transport that can be disturbed ---- */

enum { TOKENS = 192, HEADS = 4, KV_HEADS = 4, DIM = 8, WIDE = HEADS * DIM, EVENTS = 256, RANKS = 8 };
typedef struct run_desc {
    int64_t ranks, calls;       /* calls of forward and backward on one seqpar_attn */
    int schedule, forward_only, full;
    int64_t stride, disturbed;  /* rank that `inject` applies to, -1: all */
    const seqpar_inject_desc *inject;
    int virtual_clock;
    uint64_t numbers;           /* which inputs */
    double latency, late;       /* virtual time: of a message; that rank `disturbed` loses before it starts */
} run_desc;

typedef struct rank_record {
    seqpar_event event[EVENTS];
    int64_t events, forward_events, tokens, messages;
    seqpar_comm *clock_comm;
    double clock, computed;
    float *result[5];            /* out, lse, dq, dk, dv of the last call */
    int64_t count[5];
    int calls_differ;
    char text[512];
    seqpar_status status;
} rank_record;
typedef struct run { const run_desc *d; seqpar_row row; int64_t cu[4]; float *input[4]; rank_record rank[RANKS]; seqpar_error error; seqpar_status status; } run;

static void record(void *user, const seqpar_event *event) {
    rank_record *r = user;
    if (r->events < EVENTS) r->event[r->events++] = *event;
    if (strcmp(event->what, "compute")) return;
    r->computed += event->cost;
    if (r->clock_comm) seqpar_inject_compute(r->clock_comm, event->cost);
}

static seqpar_status run_calls(seqpar_ctx *ctx, seqpar_attn *attn, const run *x, rank_record *mine) {
    int64_t call, i;
    float *local[4], *first[5] = {0};
    seqpar_status status = SEQPAR_OK;
    for (i = 0; i < 4; i++) {
        local[i] = calloc((size_t)(mine->tokens * WIDE + 1), sizeof(float));
        seqpar_scatter(local[i], x->input[i], seqpar_attn_share(attn), 0, WIDE * (int64_t)sizeof(float));
    }
    for (call = 0; call < x->d->calls && !status; call++) {
        for (i = 0; i < 5; i++) memset(mine->result[i], 0x55, (size_t)mine->count[i] * sizeof(float));
        seqpar_attn_io io = {.q = local[0], .k = local[1], .v = local[2], .out = mine->result[0], .lse = mine->result[1],
                             .dout = local[3], .dq = mine->result[2], .dk = mine->result[3], .dv = mine->result[4]};
        status = seqpar_attn_forward(ctx, attn, &io);
        if (call == 0) mine->forward_events = mine->events;
        if (call == 0) mine->clock = x->d->virtual_clock ? seqpar_inject_clock(ctx->sp) : 0;
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
    seqpar_attn_desc desc = {.heads = HEADS, .kv_heads = KV_HEADS, .head_dim = DIM, .layout = SEQPAR_ZIGZAG, .schedule = d->schedule, .heads_k_stride = d->stride, .full = d->full};
    seqpar_attn *attn;
    int64_t i;
    seqpar_status status = seqpar_attn_open(ctx, &attn, &x->row, 1, &desc);
    if (status) return status;
    mine->tokens = seqpar_attn_share(attn)->tokens;
    for (i = 0; i < 5; i++) {
        mine->count[i] = mine->tokens * (i == 1 ? HEADS : WIDE);
        mine->result[i] = calloc((size_t)mine->count[i] + 1, sizeof(float));
    }
    ctx->trace = record;
    ctx->trace_user = mine;
    mine->clock_comm = d->virtual_clock ? ctx->sp : NULL;
    if (d->virtual_clock && ctx->sp_rank == d->disturbed) seqpar_inject_compute(ctx->sp, d->late);
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
    snprintf(x->rank[world->rank].text, sizeof x->rank[world->rank].text, "%s", world->error->text);
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
    x->row = (seqpar_row){.tokens = TOKENS, .padded = TOKENS, .chunks = 16, .docs = 1, .cu_seqlens = x->cu};
    alarm(60); /* a hang is a failure, not a wait */
    x->status = seqpar_run_threads(d->ranks, run_main, x, &x->error);
    alarm(0);
}

static void run_end(run *x) {
    int64_t r, i;
    for (i = 0; i < 4; i++) free(x->input[i]);
    for (r = 0; r < RANKS; r++) for (i = 0; i < 5; i++) free(x->rank[r].result[i]);
}

static int same_results(const run *a, const run *b) {
    int64_t r, i;
    for (r = 0; r < a->d->ranks; r++)
        for (i = 0; i < 5; i++)
            if (a->rank[r].count[i] != b->rank[r].count[i] || memcmp(a->rank[r].result[i], b->rank[r].result[i], (size_t)a->rank[r].count[i] * sizeof(float))) return 0;
    return 1;
}

/* ---- order of events ---- */

/* Place of an event in a record, from `from` on; -1: it is not there. */
static int64_t place(const rank_record *r, int64_t from, int64_t to, const char *what, int64_t number) {
    int64_t i;
    for (i = from; i < to; i++)
        if (!strcmp(r->event[i].what, what) && number == (!strcmp(what, "compute") ? r->event[i].step : r->event[i].request)) return i;
    return -1;
}

/* Within one pass (events from..to) of `steps` computes: ring sends what step s computes while it computes, llama3 fetches
   the heads of step s + 1; either way the request of the step begins before the compute and is waited for behind it. */
static void expect_overlap(const run *x, int64_t rank, int64_t from, int64_t to, int64_t steps, int backward) {
    const rank_record *r = &x->rank[rank];
    int64_t s, ring = x->d->schedule == SEQPAR_RING, requests = ring ? x->d->ranks : steps;
    for (s = 0; s < steps; s++) {
        int64_t ahead = ring ? s : s + 1, compute = place(r, from, to, "compute", s), next = place(r, from, to, "compute", s + 1);
        int64_t begin = place(r, from, to, "begin", ahead), wait = place(r, from, to, "wait", ahead);
        test_expect(compute >= 0, "step %lld is not computed", (long long)s);
        if (s + 1 < steps) {
            test_expect(begin >= 0 && begin < compute, "rank %lld: request %lld begins at %lld, step %lld is computed at %lld", (long long)rank, (long long)ahead, (long long)begin, (long long)s, (long long)compute);
            test_expect(wait > compute && wait < next, "rank %lld: request %lld is waited for at %lld, steps %lld and %lld are computed at %lld and %lld", (long long)rank, (long long)ahead, (long long)wait,
                        (long long)s, (long long)s + 1, (long long)compute, (long long)next);
        }
        if (!backward || (ring && s == 0)) continue;
        begin = place(r, from, to, "begin", requests + s);
        wait = place(r, from, to, "fold", requests + s);
        test_expect(begin > compute && wait > begin && (s + 1 == steps || wait > next), "rank %lld: dk, dv of step %lld (computed at %lld, next at %lld) leave at %lld and are folded at %lld", (long long)rank, (long long)s,
                    (long long)compute, (long long)next, (long long)begin, (long long)wait);
    }
}

static void test_order(int schedule, int64_t ranks, int64_t stride) {
    run_desc d = {.ranks = ranks, .calls = 1, .schedule = schedule, .stride = stride};
    run x;
    int64_t r, steps = schedule == SEQPAR_RING ? ranks : KV_HEADS / stride;
    run_begin(&x, &d);
    test_expect(!x.status, "%s", x.error.text);
    for (r = 0; r < ranks && !x.status; r++) {
        test_expect(x.rank[r].events < EVENTS && x.rank[r].forward_events > 0, "%lld events", (long long)x.rank[r].events);
        expect_overlap(&x, r, 0, x.rank[r].forward_events, steps, 0);
        expect_overlap(&x, r, x.rank[r].forward_events, x.rank[r].events, steps, 1);
    }
    run_end(&x);
    test_end("order_%s P=%lld stride=%lld", seqpar_schedule_name(schedule), (long long)ranks, (long long)stride);
}

/* ---- virtual time ---- */

typedef struct virtual_time { double clock, compute, serial; } virtual_time; /* latest rank; most computing; without overlap */
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

/* A step computes c; a message takes 0.8 c. With the transfer behind the compute nothing of it is left to see. */
static void test_clock(int schedule, int64_t ranks, int64_t stride) {
    double step = 4.0 * DIM * HEADS * (TOKENS * (TOKENS + 1) / 2) / (double)ranks; /* of a forward pass */
    int64_t steps = schedule == SEQPAR_RING ? ranks : KV_HEADS / stride, hops = schedule == SEQPAR_RING ? ranks - 1 : steps;
    double latency = 0.8 * step / (double)steps, first = schedule == SEQPAR_RING ? 0 : latency; /* llama3 cannot hide the first gather */
    run_desc d = {.ranks = ranks, .calls = 1, .schedule = schedule, .stride = stride, .forward_only = 1, .virtual_clock = 1, .latency = latency, .disturbed = -1};
    virtual_time t = run_clock(&d, hops), late;
    test_expect(t.clock >= t.compute && t.compute > 0, "virtual time %g, computing alone %g", t.clock, t.compute);
    test_expect(t.clock < t.serial && t.clock <= t.compute * 1.15 + first, "virtual time %.3g of %.3g (computing %.3g, %lld messages of %.3g)", t.clock, t.serial, t.compute, (long long)hops, latency);
    d.disturbed = 1;
    d.late = 2 * latency;
    late = run_clock(&d, hops);
    test_expect(late.clock < late.serial && late.clock > t.clock, "one late rank: %.3g of %.3g, %.3g without", late.clock, late.serial, t.clock);
    test_expect(late.clock <= t.clock + d.late * 1.01, "one late rank costs %.3g, it was late by %.3g", late.clock - t.clock, d.late);
    printf("#   %s P=%lld: virtual time %.3f of the serial sum; with a late rank %.3f\n", seqpar_schedule_name(schedule), (long long)ranks, t.clock / t.serial, late.clock / late.serial);
    test_end("clock_%s P=%lld", seqpar_schedule_name(schedule), (long long)ranks);
}

/* ---- a transport that does harm ---- */

static void test_arrival(int schedule, int64_t ranks, int64_t stride) {
    run_desc calm = {.ranks = ranks, .calls = 5, .schedule = schedule, .stride = stride};
    run one, x;
    int i;
    run_begin(&one, &calm);
    test_expect(!one.status && !one.rank[0].calls_differ, "%s five calls on one seqpar_attn differ", one.error.text);
    for (i = 0; i < 20; i++) {
        seqpar_inject_desc rough = {.seed = (uint64_t)i + test_seed * 100, .delay_us_max = 300, .reorder = 1};
        run_desc d = calm;
        int64_t r;
        d.inject = &rough;
        d.disturbed = i % 3 == 0 ? i % ranks : -1;
        d.calls = 1 + i % 2;
        run_begin(&x, &d);
        test_expect(!x.status && same_results(&x, &one), "run %d: %s other bits", i, x.error.text);
        for (r = 0; r < ranks; r++) test_expect(!x.rank[r].calls_differ, "run %d: the calls of rank %lld differ", i, (long long)r);
        run_end(&x);
    }
    run_end(&one);
    test_end("arrival_%s P=%lld", seqpar_schedule_name(schedule), (long long)ranks);
}

/* Does one flipped bit in this message change the results? It is a low one and may drown in a sum, but not with all inputs. */
static int flip_shows(run_desc d, int64_t message) {
    seqpar_inject_desc flip = {.flip_bit_at = message};
    int shows = 0;
    for (d.numbers = 0; d.numbers < 5 && !shows; d.numbers++) {
        run one, x;
        d.inject = NULL;
        run_begin(&one, &d);
        d.inject = &flip;
        run_begin(&x, &d);
        test_expect(!one.status && !x.status, "%s", x.error.text);
        shows = !same_results(&x, &one);
        run_end(&one);
        run_end(&x);
    }
    return shows;
}

/* All keys are seen, so every message counts. */
static void test_flip(int schedule, int64_t ranks) {
    run_desc d = {.ranks = ranks, .calls = 1, .schedule = schedule, .stride = 2, .full = 1, .disturbed = ranks - 1};
    run one;
    int64_t n, messages;
    run_begin(&one, &d);
    messages = one.rank[ranks - 1].messages; /* as many come as go */
    run_end(&one);
    for (n = 1; n <= messages; n++) test_expect(flip_shows(d, n), "a flipped bit in message %lld of %lld changes nothing", (long long)n, (long long)messages);
    test_expect(messages > 0 && !flip_shows(d, messages + 1), "there is a message %lld", (long long)messages + 1);
    test_end("flip_%s P=%lld, %lld messages", seqpar_schedule_name(schedule), (long long)ranks, (long long)messages);
}

/* The failing rank says INJECTED, the world repeats it, and everybody else has its words as PEER. */
static void test_failure(int schedule, int64_t ranks) {
    run_desc d = {.ranks = ranks, .calls = 1, .schedule = schedule, .stride = 1, .disturbed = 1};
    int64_t n, r;
    for (n = 1; n <= 7; n += 2) { /* none is the last of its pass, so all others still wait for rank 1 */
        seqpar_inject_desc fail = {.fail_at = n};
        run x;
        d.inject = &fail;
        run_begin(&x, &d);
        test_expect(x.status == SEQPAR_ERR_INJECTED && x.error.rank == 1 && strstr(x.error.text, "injected failure"), "transfer %lld: the world says %s: %s", (long long)n, seqpar_status_name(x.status), x.error.text);
        for (r = 0; r < ranks; r++) {
            rank_record *q = &x.rank[r];
            test_expect(q->status == (r == 1 ? SEQPAR_ERR_INJECTED : SEQPAR_ERR_PEER), "transfer %lld: rank %lld has %s", (long long)n, (long long)r, seqpar_status_name(q->status));
            test_expect(strstr(q->text, "injected failure") && (r == 1 || strstr(q->text, "rank 1 failed")), "transfer %lld: rank %lld says: %s", (long long)n, (long long)r, q->text);
        }
        run_end(&x);
    }
    test_end("failure_%s P=%lld", seqpar_schedule_name(schedule), (long long)ranks);
}

static void test_death(int schedule, int64_t ranks) {
    run_desc d = {.ranks = ranks, .calls = 1, .schedule = schedule, .stride = 1, .disturbed = ranks - 1};
    int64_t n;
    for (n = 1; n <= 7; n += 2) {
        seqpar_inject_desc die = {.die_at = n};
        run x;
        d.inject = &die;
        run_begin(&x, &d);
        test_expect(x.status != 0 && x.rank[ranks - 1].status == SEQPAR_ERR_DIED, "transfer %lld: the world says %s, the dead rank %s", (long long)n, seqpar_status_name(x.status), seqpar_status_name(x.rank[ranks - 1].status));
        test_expect(strstr(x.error.text, "ended") != NULL, "transfer %lld: nobody says that a rank has ended: %s", (long long)n, x.error.text);
        run_end(&x);
    }
    test_end("death_%s P=%lld", seqpar_schedule_name(schedule), (long long)ranks);
}

int main(int argc, char **argv) {
    static const int64_t ranks[] = {2, 3, 4, 8};
    int schedule;
    size_t i;
    test_begin(argc, argv);
    test_state += test_seed;
    test_plans();
    test_refused_plans();
    for (schedule = 0; schedule < SCHEDULES; schedule++)
        for (i = 0; i < 4; i++) test_order(schedule, ranks[i], schedule == SEQPAR_LLAMA3 ? 1 + (int64_t)(i % 2) : 1);
    for (i = 0; i < 3; i++) {
        test_clock(SEQPAR_RING, ranks[i + 1], 1);
        test_clock(SEQPAR_LLAMA3, ranks[i + 1], 1);
    }
    for (schedule = 0; schedule < SCHEDULES; schedule++) {
        test_arrival(schedule, 4, 1);
        test_arrival(schedule, 3, 2);
        test_flip(schedule, 4);
        test_failure(schedule, 4);
        test_death(schedule, 4);
    }
    return test_summary();
}
