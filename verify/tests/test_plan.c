/* SPDX-License-Identifier: MIT OR Unlicense */
/* Plans on paper: those of every schedule pass, every single mistake that is planted in one
   is refused, costs are what the formulas of the field say. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_CHECK_IMPLEMENTATION
#define SEQPAR_COUNT_WORK
#include "seqpar_check.h"
#include "support/layouts.h"
#include "support/test.h"

typedef struct shape {
    int schedule;
    int64_t ranks, kv_heads, stride, ulysses;
    int replicate, down;
} shape;

static const shape shapes[] = {
    {SEQPAR_SCHEDULE_RING, 1, 3, 1, 0, 0},    {SEQPAR_SCHEDULE_RING, 2, 2, 1, 0, 0},
    {SEQPAR_SCHEDULE_RING, 3, 1, 1, 0, 0},    {SEQPAR_SCHEDULE_RING, 5, 2, 1, 0, 0},
    {SEQPAR_SCHEDULE_RING, 16, 4, 1, 0, 0},   {SEQPAR_SCHEDULE_LLAMA3, 1, 4, 2, 0, 0},
    {SEQPAR_SCHEDULE_LLAMA3, 3, 4, 1, 0, 0},  {SEQPAR_SCHEDULE_LLAMA3, 4, 6, 2, 0, 0},
    {SEQPAR_SCHEDULE_LLAMA3, 5, 3, 3, 0, 0},  {SEQPAR_SCHEDULE_ULYSSES, 4, 4, 1, 0, 0},
    {SEQPAR_SCHEDULE_ULYSSES, 3, 7, 1, 0, 0}, {SEQPAR_SCHEDULE_ULYSSES, 6, 4, 1, 0, 0},
    {SEQPAR_SCHEDULE_ULYSSES, 8, 2, 1, 0, 1}, {SEQPAR_SCHEDULE_RING, 6, 5, 1, 2, 0},
    {SEQPAR_SCHEDULE_RING, 8, 4, 1, 2, 0},    {SEQPAR_SCHEDULE_LLAMA3, 9, 6, 2, 3, 0},
    {SEQPAR_SCHEDULE_LLAMA3, 8, 2, 1, 4, 1},  {SEQPAR_SCHEDULE_RING, 1, 2, 1, 0, 0, 1},
    {SEQPAR_SCHEDULE_RING, 2, 3, 1, 0, 0, 1}, {SEQPAR_SCHEDULE_RING, 5, 2, 1, 0, 0, 1},
    {SEQPAR_SCHEDULE_RING, 6, 4, 1, 2, 0, 1},
};

enum { SHAPES = sizeof shapes / sizeof *shapes };

static seqpar_plan *plans_new(const shape *s, int backward) {
    seqpar_plan *plans = calloc((size_t)s->ranks, sizeof *plans);
    seqpar_error error = {0};
    int64_t r;
    for (r = 0; r < s->ranks; r++) {
        seqpar_plan_desc d = {.schedule = s->schedule,
                              .sp_size = s->ranks,
                              .sp_rank = r,
                              .kv_heads = s->kv_heads,
                              .heads_k_stride = s->stride,
                              .ulysses_size = s->ulysses,
                              .ulysses_replicate = s->replicate,
                              .down = s->down,
                              .backward = backward};
        test_expect(!seqpar_plan_make(&error, &plans[r], &d), "%s", error.text);
    }
    return plans;
}

static void plans_free(seqpar_plan *plans, int64_t ranks) {
    int64_t r;
    for (r = 0; r < ranks; r++) seqpar_plan_free(&plans[r]);
    free(plans);
}

static const char *shape_name(const shape *s) {
    static char text[96];
    snprintf(text, sizeof text, "%s%s P=%lld U=%lld%s heads=%lld",
             seqpar_schedule_name(s->schedule), s->down ? " down" : "", (long long)s->ranks,
             (long long)s->ulysses, s->replicate ? " replicated" : "", (long long)s->kv_heads);
    return text;
}

static void test_sound(const shape *s) {
    int backward;
    for (backward = 0; backward < 2; backward++) {
        seqpar_plan *plans = plans_new(s, backward);
        seqpar_error error = {0};
        test_expect(!seqpar_plan_check(&error, plans, NULL), "%s", error.text);
        plans_free(plans, s->ranks);
    }
    test_end("plan_sound %s", shape_name(s));
}

/* ---- mistakes ---- */

/* returns 0 where it makes no difference */
typedef int (*mutation)(seqpar_plan *plan, int64_t at);

static int drop(seqpar_plan *p, int64_t at) {
    memmove(p->ops + at, p->ops + at + 1, (size_t)(p->count - at - 1) * sizeof *p->ops);
    p->count--;
    return 1;
}

static int repeat(seqpar_plan *p, int64_t at) {
    /* harmless */
    if (p->ops[at].op == SEQPAR_PLAN_COPY || p->ops[at].op == SEQPAR_PLAN_PLACE) return 0;
    memmove(p->ops + at + 1, p->ops + at, (size_t)(p->count - at) * sizeof *p->ops);
    p->count++;
    return 1;
}

static int other_source(seqpar_plan *p, int64_t at) {
    seqpar_plan_op *o = &p->ops[at];
    if (o->op != SEQPAR_PLAN_COMPUTE && o->op != SEQPAR_PLAN_SHIFT) return 0;
    o->source = o->sources == 1 ? (o->source + 1) % p->ring_size : o->source + 1;
    return o->sources > 1 || p->ring_size > 1;
}

static int other_from(seqpar_plan *p, int64_t at) {
    seqpar_plan_op *o = &p->ops[at];
    o->from = (int32_t)((o->from + 1) % p->slots);
    return (o->op == SEQPAR_PLAN_COMPUTE || o->op == SEQPAR_PLAN_SHIFT) && p->slots > 1;
}

static int other_to(seqpar_plan *p, int64_t at) {
    seqpar_plan_op *o = &p->ops[at];
    o->to = (int32_t)((o->to + 1) % p->slots);
    return (o->op == SEQPAR_PLAN_SHIFT || o->op == SEQPAR_PLAN_GATHER ||
            o->op == SEQPAR_PLAN_COPY) &&
           p->slots > 1;
}

static int other_send(seqpar_plan *p, int64_t at) {
    seqpar_plan_op *o = &p->ops[at];
    if (o->send_to < 0) return 0;
    o->send_to = (o->send_to + 1) % p->ring_size;
    return 1;
}

static int other_receive(seqpar_plan *p, int64_t at) {
    seqpar_plan_op *o = &p->ops[at];
    if (o->recv_from < 0) return 0;
    o->recv_from = (o->recv_from + 1) % p->ring_size;
    return 1;
}

static int other_request(seqpar_plan *p, int64_t at) {
    seqpar_plan_op *o = &p->ops[at];
    if (o->op == SEQPAR_PLAN_COMPUTE || o->op == SEQPAR_PLAN_COPY ||
        o->op == SEQPAR_PLAN_PLACE || p->requests < 2)
        return 0;
    o->request = (int32_t)((o->request + 1) % p->requests);
    return 1;
}

/* One operation alone uses the other outbox or inbox. */
static int other_buffer(seqpar_plan *p, int64_t at) {
    seqpar_plan_op *o = &p->ops[at];
    o->buffer = 1 - o->buffer;
    if (o->op == SEQPAR_PLAN_COMPUTE)
        return p->backward && p->ring_size > 1 &&
               !(o->sources == 1 && o->source == p->position);
    return o->op == SEQPAR_PLAN_RETURN || o->op == SEQPAR_PLAN_FOLD;
}

static int other_heads(seqpar_plan *p, int64_t at) {
    seqpar_plan_op *o = &p->ops[at];
    if (o->head_count == 0 || o->op == SEQPAR_PLAN_WAIT || o->op == SEQPAR_PLAN_FOLD) return 0;
    o->head_begin++;
    return 1;
}

static int fewer_heads(seqpar_plan *p, int64_t at) {
    seqpar_plan_op *o = &p->ops[at];
    if (o->head_count == 0 || o->op == SEQPAR_PLAN_WAIT || o->op == SEQPAR_PLAN_FOLD ||
        o->op == SEQPAR_PLAN_PLACE)
        return 0;
    o->head_count--;
    return 1;
}

/* A wait moves behind the next computation, which then reads what may not be there. */
static int late_wait(seqpar_plan *p, int64_t at) {
    seqpar_plan_op wait = p->ops[at], next;
    if (wait.op != SEQPAR_PLAN_WAIT || at + 1 >= p->count ||
        p->ops[at + 1].op != SEQPAR_PLAN_COMPUTE)
        return 0;
    next = p->ops[at + 1];
    p->ops[at] = next;
    p->ops[at + 1] = wait;
    return 1;
}

static const struct {
    const char *name;
    mutation make;
} mutations[] = {

    {"dropped", drop},
    {"repeated", repeat},
    {"other source", other_source},
    {"other slot read", other_from},
    {"other slot written", other_to},
    {"sent elsewhere", other_send},
    {"received from elsewhere", other_receive},
    {"other request", other_request},
    {"other buffer", other_buffer},
    {"other heads", other_heads},
    {"fewer heads", fewer_heads},
    {"waits too late", late_wait},
};

enum { MUTATIONS = sizeof mutations / sizeof *mutations };

/* Every operation of one rank's plan, wrong in this way: refused, and with a sentence that
   names a rank. */
static int64_t test_mutation(const shape *s, int backward, int m, int64_t victim) {
    seqpar_plan *plans = plans_new(s, backward), whole = plans[victim];
    int64_t at, refused = 0;
    for (at = 0; at < whole.count; at++) {
        seqpar_error error = {0};
        seqpar_plan bad = whole;
        bad.ops = calloc((size_t)whole.count + 1, sizeof *bad.ops);
        memcpy(bad.ops, whole.ops, (size_t)whole.count * sizeof *bad.ops);
        if (mutations[m].make(&bad, at)) {
            plans[victim] = bad;
            test_expect(seqpar_plan_check(&error, plans, NULL) == SEQPAR_ERR_PLAN &&
                            strstr(error.text, "rank "),
                        "%s of rank %lld, operation %lld, %s, passes",
                        backward ? "backward" : "forward", (long long)victim, (long long)at,
                        mutations[m].name);
            refused++;
        }
        free(bad.ops);
    }
    plans[victim] = whole;
    plans_free(plans, s->ranks);
    return refused;
}

static void test_mutations(void) {
    int m, i;
    for (m = 0; m < MUTATIONS; m++) {
        int64_t refused = 0;
        for (i = 0; i < SHAPES; i++)
            if (shapes[i].ranks <= 9) {
                refused += test_mutation(&shapes[i], 0, m,
                                         test_integer(0, shapes[i].ranks - 1));
                refused += test_mutation(&shapes[i], 1, m,
                                         test_integer(0, shapes[i].ranks - 1));
            }
        test_expect(refused >= 10, "only %lld mutants", (long long)refused);
        test_end("plan_mutants %s: %lld refused", mutations[m].name, (long long)refused);
    }
}

static void test_refused(void) {
    static const struct {
        seqpar_plan_desc d;
        seqpar_status status;
        const char *words;
    } cases[] = {
        {{.sp_size = 0, .kv_heads = 2}, SEQPAR_ERR_RANKS, "is 0"},
        {{.sp_size = 4, .sp_rank = 4, .kv_heads = 2}, SEQPAR_ERR_RANK, "sp_rank is 4;"},
        {{.sp_size = 4, .sp_rank = -1, .kv_heads = 2}, SEQPAR_ERR_RANK, "sp_rank is -1;"},
        {{.schedule = SEQPAR_SCHEDULE_LLAMA3, .sp_size = 4}, SEQPAR_ERR_HEADS, "kv_heads is 0"},
        {{.schedule = SEQPAR_SCHEDULE_LLAMA3, .sp_size = 4, .kv_heads = 4, .heads_k_stride = 3},
         SEQPAR_ERR_HEAD_STRIDE,
         "3 does not divide kv_heads 4"},
        {{.schedule = SEQPAR_SCHEDULE_LLAMA3,
          .sp_size = 4,
          .kv_heads = 4,
          .heads_k_stride = -1},
         SEQPAR_ERR_HEAD_STRIDE,
         "-1"},
        {{.schedule = 7, .sp_size = 4, .kv_heads = 4}, SEQPAR_ERR_SCHEDULE, "schedule 7"},
        {{.sp_size = 4, .kv_heads = 4, .ulysses_size = 3},
         SEQPAR_ERR_ULYSSES,
         "3 does not divide sequence_parallel_size 4"},
        {{.sp_size = 4, .kv_heads = 4, .ulysses_size = -2}, SEQPAR_ERR_ULYSSES, "-2"},
        {{.sp_size = 4, .kv_heads = 2, .ulysses_size = 4},
         SEQPAR_ERR_ULYSSES,
         "more than the 2 kv_heads; use at most 2"},
        {{.sp_size = 8, .kv_heads = 3, .ulysses_size = 4, .ulysses_replicate = 1},
         SEQPAR_ERR_ULYSSES,
         "no multiple of the 3"},
        {{.schedule = SEQPAR_SCHEDULE_LLAMA3,
          .sp_size = 4,
          .kv_heads = 5,
          .ulysses_size = 2,
          .heads_k_stride = 2},
         SEQPAR_ERR_HEAD_STRIDE,
         "Ulysses"}};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        seqpar_plan plan;
        seqpar_error error = {0};
        seqpar_status status = seqpar_plan_make(&error, &plan, &cases[i].d);
        test_expect(status == cases[i].status && strstr(error.text, cases[i].words),
                    "case %d gives %s: %s", (int)i, seqpar_status_name(status), error.text);
        seqpar_plan_free(&plan);
    }
    test_end("plan_refused");
}

/* A mask forgives what nobody sees: with documents that end at a rank's end no block between
   ranks is needed. */
static void test_mask(void) {
    static const int64_t apart[] = {0, 8, 16, 24}, joined[] = {0, 24};
    shape s = {SEQPAR_SCHEDULE_RING, 3, 1, 1, 0, 0};
    seqpar_attn_desc desc = {
        .heads = 1, .kv_heads = 1, .head_dim = 4, .layout = SEQPAR_LAYOUT_CONTIGUOUS};
    int whole;
    for (whole = 0; whole < 2; whole++) {
        seqpar_row row = {.tokens = 24,
                          .cell = 8,
                          .docs = whole ? 1 : 3,
                          .cu_seqlens = whole ? joined : apart};
        seqpar_plan_mask mask = {&row, 1, &desc};
        seqpar_plan *plans = plans_new(&s, 0);
        seqpar_error error = {0};
        seqpar_status status;
        int64_t i, dropped = 0;
        for (i = 0; i < plans[2].count; i++) /* rank 2 leaves out the keys of rank 1 */
            if (plans[2].ops[i].op == SEQPAR_PLAN_COMPUTE && plans[2].ops[i].source == 1)
                dropped += drop(&plans[2], i);
        status = seqpar_plan_check(&error, plans, &mask);
        test_expect(dropped == 1 && status == (whole ? SEQPAR_ERR_PLAN : SEQPAR_OK), "%s: %s",
                    whole ? "one document" : "three documents", error.text);
        plans_free(plans, 3);
    }
    test_end("plan_mask");
}

/* ---- cost ---- */

static seqpar_plan_cost cost_of(const seqpar_row *row, const seqpar_attn_desc *desc,
                                int64_t ranks, int64_t rank) {
    seqpar_plan_mask mask = {row, 1, desc};
    seqpar_plan_cost cost;
    seqpar_error error = {0};
    test_expect(!seqpar_plan_cost_of(&error, &cost, &mask, ranks, rank, SEQPAR_DTYPE_F32), "%s",
                error.text);
    return cost;
}

/* Work of the busiest rank over the mean. */
static double imbalance(const seqpar_row *row, const seqpar_attn_desc *desc, int64_t ranks) {
    int64_t r, most = 0;
    double sum = 0;
    for (r = 0; r < ranks; r++) {
        seqpar_plan_cost c = cost_of(row, desc, ranks, r);
        most = c.forward_flops > most ? c.forward_flops : most;
        sum += (double)c.forward_flops;
        seqpar_plan_cost_free(&c);
    }
    return (double)most * (double)ranks / sum;
}

static void test_balance(void) {
    static const int64_t cu[] = {0, 65536};
    seqpar_row row = {.tokens = 65536, .cell = 2048, .docs = 1, .cu_seqlens = cu};
    seqpar_attn_desc desc = {
        .heads = 8, .kv_heads = 8, .head_dim = 64, .layout = SEQPAR_LAYOUT_ZIGZAG};
    double zigzag = imbalance(&row, &desc, 8), grid, contiguous;
    desc.ulysses_size = 2;
    grid = imbalance(&row, &desc, 8);
    desc.ulysses_size = 0;
    desc.layout = SEQPAR_LAYOUT_CONTIGUOUS;
    contiguous = imbalance(&row, &desc, 8);
    printf("#   S=65536, P=8: busiest rank over mean: zigzag %.5f, 2D %.5f, contiguous %.5f (2 "
           "- 1/P is 1.875)\n",
           zigzag, grid, contiguous);
    test_expect(zigzag < 1.01 && grid < 1.01, "zigzag %.4f, 2D %.4f", zigzag, grid);
    test_expect(fabs(contiguous - 1.875) < 0.001, "contiguous %.4f", contiguous);
    test_end("plan_balance");
}

/* Bytes of a forward pass against the field's formulas, n = S/P tokens a rank, G kv heads, H
   heads, d: ring and llama3 (P-1) 2 n G d; Ulysses (P-1)/P n (2H + 2G) d and, ours, one
   statistic a head and token for lse. */
static void test_formulas(void) {
    static const int64_t cu[] = {0, 4096};
    seqpar_row row = {.tokens = 4096, .cell = 128, .docs = 1, .cu_seqlens = cu};
    int64_t p, n, h = 16, g = 8, d = 32;
    for (p = 2; p <= 8; p *= 2) {
        seqpar_attn_desc desc = {.heads = h,
                                 .kv_heads = g,
                                 .head_dim = d,
                                 .layout = SEQPAR_LAYOUT_ZIGZAG,
                                 .full = 1};
        seqpar_plan_cost c;
        n = 4096 / p;
        for (desc.schedule = SEQPAR_SCHEDULE_RING; desc.schedule <= SEQPAR_SCHEDULE_ULYSSES;
             desc.schedule++) {
            int64_t want = desc.schedule == SEQPAR_SCHEDULE_ULYSSES
                               ? (p - 1) * n * ((2 * h + 2 * g) * d + h) / p
                               : (p - 1) * 2 * n * g * d;
            c = cost_of(&row, &desc, p, p / 2);
            test_expect(c.forward_bytes == 4 * want,
                        "%s P=%lld: %lld bytes, the formula says %lld",
                        seqpar_schedule_name(desc.schedule), (long long)p,
                        (long long)c.forward_bytes, (long long)(4 * want));
            test_expect(desc.schedule != SEQPAR_SCHEDULE_RING || c.forward_overlap == 1.0,
                        "ring: only %.2f of the transfers are hidden", c.forward_overlap);
            seqpar_plan_cost_free(&c);
        }
    }
    test_end("plan_bytes_by_formula");
}

/* A key goes on only while somebody on its way sees it. In messages of one share, all ranks
   together, of the P (P - 1) that go round: causal zigzag three quarters, contiguous a half,
   a window of one cell over contiguous shares P - 1 cells. */
static void test_as_far_as_seen(void) {
    static const int64_t cu[] = {0, 4096};
    static const struct {
        const char *name;
        int layout, full;
        int64_t window;
    } modes[] = {{"zigzag", SEQPAR_LAYOUT_ZIGZAG, 0, 0},
                 {"contiguous", SEQPAR_LAYOUT_CONTIGUOUS, 0, 0},
                 {"full", SEQPAR_LAYOUT_ZIGZAG, 1, 0},
                 {"window", SEQPAR_LAYOUT_CONTIGUOUS, 0, 128}};
    seqpar_row row = {.tokens = 4096, .cell = 128, .docs = 1, .cu_seqlens = cu};
    int64_t p, r;
    int i;
    for (p = 1; p <= 16; p *= 2)
        for (i = 0; i < 4; i++) {
            seqpar_attn_desc desc = {.heads = 6,
                                     .kv_heads = 3,
                                     .head_dim = 8,
                                     .layout = modes[i].layout,
                                     .full = modes[i].full,
                                     .window = modes[i].window};
            int64_t share = 4096 / p, token = 2 * 3 * 8 * 4, want = p * (p - 1) * share * token;
            int64_t sent = 0;
            for (r = 0; r < p; r++) {
                seqpar_plan_cost c = cost_of(&row, &desc, p, r);
                sent += c.forward_bytes;
                test_expect(c.backward_bytes >= c.forward_bytes, "less in backward");
                seqpar_plan_cost_free(&c);
            }
            want = i == 0   ? want / 4 * 3
                   : i == 1 ? want / 2
                   : i == 2 ? want
                            : (p - 1) * 128 * token;
            test_expect(sent == want, "%s P=%lld: %lld bytes, the formula says %lld",
                        modes[i].name, (long long)p, (long long)sent, (long long)want);
        }
    test_end("plan_keys_go_as_far_as_seen");
}

/* Nothing is quadratic in P for one rank's plan; not timed, but a blow-up would be felt. */
static void test_large(void) {
    static const int64_t cu[] = {0, 1 << 20};
    seqpar_row row = {.tokens = 1 << 20, .docs = 1, .cu_seqlens = cu};
    int layout, schedule;
    for (layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (schedule = 0; schedule < SEQPAR_SCHEDULE_COUNT; schedule++) {
            seqpar_attn_desc desc = {.heads = 32,
                                     .kv_heads = 8,
                                     .head_dim = 128,
                                     .layout = layout,
                                     .schedule = schedule};
            seqpar_plan_cost c;
            c = cost_of(&row, &desc, 1024, 700);
            test_expect(c.forward_flops > 0 && c.forward_bytes > 0 &&
                            c.backward_bytes > c.forward_bytes / 2,
                        "no cost");
            seqpar_plan_cost_free(&c);
        }
    test_end("plan_cost_of_1024_ranks");
}

/* ---- a long document: what waits, and what is sent ---- */

/* In 0.2.0, whose cells were fractions of a row: the most values of a query and of a key that
   waited on a rank, and what all ranks sent. */
static const struct {
    int layout;
    int64_t ranks, query_slots, key_slots, forward, backward;
} long_documents[] = {
    {SEQPAR_LAYOUT_CONTIGUOUS, 8, 3, 3, 15032385536, 30064771072},
    {SEQPAR_LAYOUT_ZIGZAG, 8, 7, 7, 22548578304, 52613349376},
    {SEQPAR_LAYOUT_ZIGZAG_DOC, 8, 7, 7, 22548578304, 52613349376},
    {SEQPAR_LAYOUT_CONTIGUOUS, 5, 7, 6, 8589934592, 70399295488},
    {SEQPAR_LAYOUT_ZIGZAG, 5, 15, 20, 12884901888, 128777715712},
};

typedef struct waiting { /* at most on a rank; of all ranks */
    int64_t query_slots, key_slots, forward, backward;
} waiting;

static void add_waiting(waiting *w, const seqpar_row *row, const seqpar_attn_desc *desc,
                        int64_t ranks, int64_t rank) {
    seqpar_device device = {.storage = SEQPAR_DTYPE_F32, .accumulator = SEQPAR_DTYPE_F32};
    seqpar_error error = {0};
    seqpar_ctx ctx = {.error = &error, .device = &device, .sp_size = ranks, .sp_rank = rank};
    seqpar_plan_cost c = cost_of(row, desc, ranks, rank);
    seqpar_attn *attn = NULL;
    w->forward += c.forward_bytes;
    w->backward += c.backward_bytes;
    seqpar_plan_cost_free(&c);
    if (!test_expect(!seqpar__attn_open(&ctx, &attn, row, 1, desc, seqpar__attn_prepare), "%s",
                     error.text))
        return;
    if (attn->query_slots > w->query_slots) w->query_slots = attn->query_slots;
    if (attn->key_slots > w->key_slots) w->key_slots = attn->key_slots;
    seqpar_attn_close(&ctx, attn);
}

/* Slots begin at joints: of 1 M tokens no more values wait than in 0.2.0, and no more is sent;
   where the ranks are no power of two, half as much. */
static void test_long_documents(void) {
    static const int64_t cu[] = {0, 1 << 20};
    const seqpar_row row = {.tokens = 1 << 20, .docs = 1, .cu_seqlens = cu};
    for (size_t i = 0; i < sizeof long_documents / sizeof *long_documents; i++) {
        const int64_t ranks = long_documents[i].ranks, times = ranks == 8 ? 1 : 2;
        const seqpar_attn_desc desc = {
            .heads = 16, .kv_heads = 8, .head_dim = 64, .layout = long_documents[i].layout};
        waiting w = {0};
        for (int64_t r = 0; r < ranks; r++) add_waiting(&w, &row, &desc, ranks, r);
        test_expect(w.query_slots > 0 &&
                        times * w.query_slots <= long_documents[i].query_slots &&
                        w.key_slots > 0 && times * w.key_slots <= long_documents[i].key_slots,
                    "%lld values of a query and %lld of a key wait", (long long)w.query_slots,
                    (long long)w.key_slots);
        test_expect(w.forward > 0 && w.forward <= long_documents[i].forward,
                    "%lld bytes are sent forward", (long long)w.forward);
        test_expect(w.backward > 0 && times * w.backward <= long_documents[i].backward,
                    "%lld bytes are sent backward", (long long)w.backward);
        test_end("plan_long_document_%s_P%lld: %lld and %lld wait",
                 seqpar_layout_name(desc.layout), (long long)ranks, (long long)w.query_slots,
                 (long long)w.key_slots);
    }
}

/* ---- the count against the long way round ---- */

enum { ROWS_MAX = 3, DOCS_MAX = 6 };
typedef struct batch {
    seqpar_row row[ROWS_MAX];
    int64_t count, cu[ROWS_MAX][DOCS_MAX + 1], prefix[ROWS_MAX][DOCS_MAX];
} batch;

/* Rows of odd sizes, some with fewer tokens than ranks or with none; documents of any size,
   0 too. */
static void batch_draw(batch *b, int documents, int prefixes) {
    int64_t r, d;
    memset(b, 0, sizeof *b);
    b->count = test_integer(1, ROWS_MAX);
    for (r = 0; r < b->count; r++) {
        seqpar_row *row = &b->row[r];
        row->index = 2 * r + test_integer(0, 1);
        row->tokens = test_integer(0, 3) ? test_integer(0, r ? 90 : 400) : test_integer(0, 7);
        row->cell = test_integer(0, 5) ? test_integer(1, 30) : 0;
        row->docs = documents ? test_integer(1, DOCS_MAX) : 1;
        for (d = 1; d < row->docs; d++)
            b->cu[r][d] = test_integer(b->cu[r][d - 1], row->tokens);
        b->cu[r][row->docs] = row->tokens;
        for (d = 0; d < row->docs; d++)
            b->prefix[r][d] = test_integer(0, b->cu[r][d + 1] - b->cu[r][d]);
        row->cu_seqlens = b->cu[r];
        row->prefix_lens = prefixes ? b->prefix[r] : NULL;
    }
}

/* Visible pairs, query by query and key by key; with `rows`, those whose key is not among
   these rows of its share. */
static int64_t pairs_by_hand(const seqpar_attn *attn, const seqpar_share *queries,
                             const seqpar_share *keys, const seqpar__bounds *rows) {
    int64_t i, j, t, u, begin, end, pairs = 0;
    for (i = 0; i < queries->count; i++)
        for (t = 0; t < queries->pieces[i].count; t++) {
            const seqpar_piece *q = &queries->pieces[i];
            seqpar__token_visible(&attn->rows[q->row], q->start + t * q->stride, &attn->desc,
                                  &begin, &end);
            for (j = 0; j < keys->count; j++)
                for (u = 0; u < keys->pieces[j].count && keys->pieces[j].row == q->row; u++) {
                    int64_t key = keys->pieces[j].start + u * keys->pieces[j].stride;
                    int64_t at = keys->pieces[j].local + u;
                    pairs += key >= begin && key < end &&
                             (!rows || at < rows->begin || at >= rows->end);
                }
        }
    return pairs;
}

static void expect_keys_arrive(const seqpar_attn *attn) {
    int64_t s, p;
    for (s = 0; s < attn->size; s++) {
        const seqpar__bounds *go = &attn->send_rows[s], *come = &attn->recv_rows[s];
        if (s != attn->position)
            test_expect(
                !pairs_by_hand(attn, &attn->shares[attn->position], &attn->shares[s], come),
                "keys of position %lld do not all come to %lld", (long long)s,
                (long long)attn->position);
        for (p = (attn->position + attn->forward.next) % attn->size; p != s && attn->size > 1;
             p = (p + attn->forward.next) % attn->size)
            test_expect(!pairs_by_hand(attn, &attn->shares[p], &attn->shares[s], go),
                        "keys of position %lld do not all go on from %lld to %lld",
                        (long long)s, (long long)attn->position, (long long)p);
        test_expect(go->begin >= go->end || (come->begin <= go->begin && come->end >= go->end),
                    "position %lld sends on what it has not got", (long long)attn->position);
    }
}

/* A rank's cost on paper is that of the programs it would run, and of the pairs counted one
   by one. */
static void compare_cost(const batch *b, const seqpar_attn_desc *desc, int64_t ranks,
                         int64_t rank) {
    seqpar_error error = {0};
    seqpar_device device = {.storage = SEQPAR_DTYPE_BF16, .accumulator = SEQPAR_DTYPE_F32};
    seqpar_ctx ctx = {.error = &error, .device = &device, .sp_size = ranks, .sp_rank = rank};
    seqpar_plan_mask mask = {b->row, b->count, desc};
    seqpar_plan_cost paper;
    seqpar_attn *attn = NULL;
    seqpar_attn_cost programs;
    int64_t s;
    if (!test_expect(
            !seqpar_plan_cost_of(&error, &paper, &mask, ranks, rank, SEQPAR_DTYPE_BF16) &&
                !seqpar__attn_open(&ctx, &attn, b->row, b->count, desc, seqpar__attn_prepare),
            "%s", error.text))
        return;
    test_expect(!seqpar_attn_cost_of(&ctx, attn, &programs, NULL), "%s", error.text);
    test_expect(paper.steps == attn->size, "%lld steps, not %lld", (long long)paper.steps,
                (long long)attn->size);
    for (s = 0; s < attn->size; s++) {
        int64_t want = 4 * desc->head_dim * attn->heads *
                       pairs_by_hand(attn, &attn->shares[attn->position], &attn->shares[s],
                                     NULL);
        test_expect(paper.step_flops[s] == want,
                    "%lld FLOPs with the keys of position %lld, not %lld",
                    (long long)paper.step_flops[s], (long long)s, (long long)want);
    }
    test_expect(paper.forward_flops == programs.forward_flops &&
                    paper.backward_flops == programs.backward_flops,
                "FLOPs differ from those of the programs");
    test_expect(paper.forward_bytes == programs.forward_bytes &&
                    paper.backward_bytes == programs.backward_bytes,
                "%s of %lld ranks: %lld and %lld bytes, the programs send %lld and %lld",
                seqpar_layout_name(desc->layout), (long long)ranks,
                (long long)paper.forward_bytes, (long long)paper.backward_bytes,
                (long long)programs.forward_bytes, (long long)programs.backward_bytes);
    if (desc->schedule != SEQPAR_SCHEDULE_LLAMA3 && rank % 3 == 1) expect_keys_arrive(attn);
    seqpar_plan_cost_free(&paper);
    seqpar_attn_close(&ctx, attn);
}

static void test_counts(void) {
    static const struct {
        const char *name;
        int full, window, documents, prefixes;
    } masks[] = {{"causal", 0, 0, 0, 0},
                 {"full", 1, 0, 0, 0},
                 {"window", 0, 1, 0, 0},
                 {"window both ways", 1, 1, 0, 0},
                 {"prefix", 0, 0, 0, 1},
                 {"documents", 0, 0, 1, 0},
                 {"full documents", 1, 0, 1, 0},
                 {"documents, window", 0, 1, 1, 0},
                 {"documents, prefixes", 0, 0, 1, 1},
                 {"all of it", 0, 1, 1, 1}};
    size_t m;
    for (m = 0; m < sizeof masks / sizeof *masks; m++) {
        int64_t trial, rank, compared = 0;
        for (trial = 0; trial < 40 * SEQPAR_LAYOUT_COUNT; trial++) {
            int64_t ranks = test_integer(1, 12), members = test_integer(1, 4);
            seqpar_attn_desc desc = {
                .heads = 24,
                .kv_heads = 12,
                .head_dim = 4,
                .layout = (int)(trial % SEQPAR_LAYOUT_COUNT),
                .schedule = (int)test_integer(0, SEQPAR_SCHEDULE_COUNT - 1),
                .full = masks[m].full};
            batch b;
            desc.ulysses_size = ranks % members ? 0 : members;
            desc.window = masks[m].window ? test_integer(1, 40) : 0;
            desc.relaxed = test_integer(0, 3) == 0;
            batch_draw(&b, masks[m].documents, masks[m].prefixes);
            for (rank = 0; rank < ranks; rank++, compared++)
                compare_cost(&b, &desc, ranks, rank);
        }
        test_end("plan_cost_counts %s: %lld ranks", masks[m].name, (long long)compared);
    }
}

/* ---- what planning costs: steps, not seconds ---- */

static int64_t tasks_size(const seqpar__tasks *tasks) {
    int64_t i, size = tasks->count;
    for (i = 0; i < tasks->count; i++) size += tasks->task[i].program_count;
    return size;
}

/* What a rank's plan consists of, and what it is made from: operations, tasks and their
   programs, documents, pieces of all ranks, own pieces times the positions they may meet, slots. */
static int64_t plan_size(const seqpar_attn *attn) {
    int64_t s, g;
    int64_t size = attn->forward.count + attn->backward.count + attn->total + attn->rows->docs +
                   attn->shares[attn->position].count * attn->size + 4 * attn->forward.sp_size;
    for (s = 0; s < attn->step_count; s++) {
        size += tasks_size(&attn->steps[s].queries) + tasks_size(&attn->steps[s].own);
        for (g = 0; g < attn->steps[s].sources; g++)
            size += tasks_size(&attn->steps[s].foreign[g]);
    }
    for (s = 0; s < attn->size; s++) size += tasks_size(&attn->returns[s]);
    return size;
}

static double work_of(const seqpar_row *row, const seqpar_attn_desc *desc, int64_t ranks,
                      int64_t rank) {
    seqpar_error error = {0};
    seqpar_device device = {.storage = SEQPAR_DTYPE_F32, .accumulator = SEQPAR_DTYPE_F32};
    seqpar_ctx ctx = {.error = &error, .device = &device, .sp_size = ranks, .sp_rank = rank};
    seqpar_attn *attn;
    double size, ratio;
    seqpar__work = 0;
    if (!test_expect(!seqpar__attn_open(&ctx, &attn, row, 1, desc, seqpar__attn_prepare), "%s",
                     error.text))
        return HUGE_VAL;
    size = (double)plan_size(attn);
    ratio = (double)seqpar__work / (size * log2(size + 2));
    test_expect(seqpar__work > attn->total / 2, "only %lld steps: is anybody counting?",
                (long long)seqpar__work);
    seqpar_attn_close(&ctx, attn);
    return ratio;
}

/* Of all ranks, as many each as the first. */
static int64_t pieces_about(const seqpar_row *row, int layout, int64_t ranks) {
    seqpar_split_desc first = {layout, ranks, 0};
    seqpar_share share;
    int64_t count;
    if (!test_expect(!seqpar_split(NULL, &share, row, 1, &first), "no split")) return 0;
    count = share.count * ranks;
    seqpar_share_free(&share);
    return count;
}

/* A row of 2^20 tokens. The bound: size log2 size steps. */
static void test_work(int layout) {
    static const struct {
        int schedule;
        int64_t ulysses;
    } ways[] = {{SEQPAR_SCHEDULE_RING, 0},
                {SEQPAR_SCHEDULE_LLAMA3, 0},
                {SEQPAR_SCHEDULE_ULYSSES, 0},
                {SEQPAR_SCHEDULE_RING, 2}};
    static const int64_t ranks[] = {1, 24, 1024}, documents[] = {1, 512},
                         cells[] = {32768, 8192};
    int64_t cu[513], w, p, d, c, i;
    double most = 0;
    for (w = 0; w < 4; w++)
        for (p = 0; p < 3; p++)
            for (d = 0; d < 2; d++)
                for (c = 0; c < 2; c++) {
                    seqpar_attn_desc desc = {.heads = 16,
                                             .kv_heads = 8,
                                             .head_dim = 64,
                                             .layout = layout,
                                             .schedule = ways[w].schedule,
                                             .ulysses_size = ranks[p] > 1 ? ways[w].ulysses
                                                                          : 0};
                    seqpar_row row = {.tokens = 1 << 20,
                                      .cell = cells[c],
                                      .docs = documents[d],
                                      .cu_seqlens = cu};
                    double ratio;
                    /* from a few tokens to thousands */
                    for (i = 0; i <= documents[d]; i++)
                        cu[i] = row.tokens * i / documents[d] * i / documents[d];
                    /* half a million: once */
                    if (pieces_about(&row, layout, ranks[p]) > 200000 && (w || c)) continue;
                    ratio = work_of(&row, &desc, ranks[p], ranks[p] * 5 / 8);
                    if (ratio > most) most = ratio;
                    test_expect(
                        ratio <= 1,
                        "%s %s, %lld ranks, %lld documents, cells of %lld: %.2f size log "
                        "size steps",
                        seqpar_layout_name(layout), seqpar_schedule_name(desc.schedule),
                        (long long)ranks[p], (long long)documents[d], (long long)cells[c],
                        ratio);
                }
    test_end("plan_work %s", seqpar_layout_name(layout));
    printf("#   at most %.2f size log2(size) steps\n", most);
}

/* ---- the README's table: what a rank sends in the mean, in MiB of fp32 ---- */

static const int64_t table_cu[] = {0, 65536};
static const seqpar_row table_row = {
    .tokens = 65536, .cell = 2048, .docs = 1, .cu_seqlens = table_cu};
enum { TABLE_RANKS = 8 };

/* The field's formulas for the same mode: n = S/P tokens a rank, H heads, G kv heads, d: ring
   forward (P-1) 2 n G d, backward that and 2 n G d over P hops; llama3 the same forward,
   backward that and a reduce-scatter of dk and dv; Ulysses (P-1)/P n (2H + 2G) d either way. */
static void field_sends(const seqpar_attn_desc *desc, double *forward, double *backward) {
    const double p = TABLE_RANKS, n = (double)table_row.tokens / p, d = (double)desc->head_dim;
    const double kv = 2 * n * (double)desc->kv_heads * d;
    const double all = n * 2 * (double)(desc->heads + desc->kv_heads) * d;
    double ring = desc->ulysses_size ? p / (double)desc->ulysses_size : p;
    *forward = (ring - 1) * kv;
    *backward = *forward + (desc->schedule == SEQPAR_SCHEDULE_RING ? ring : ring - 1) * kv;
    if (desc->schedule == SEQPAR_SCHEDULE_ULYSSES) *forward = *backward = (p - 1) / p * all;
    if (desc->ulysses_size) {
        *forward += 0.5 * all;
        *backward += 0.5 * all;
    }
}

static void print_costs(int layout, int schedule, int64_t ulysses, const char *how) {
    seqpar_attn_desc desc = {.heads = 32,
                             .kv_heads = 8,
                             .head_dim = 128,
                             .layout = layout,
                             .schedule = schedule,
                             .ulysses_size = ulysses};
    const double mib = 4.0 / (1 << 20);
    double forward, backward, sent[2] = {0, 0}, hidden = 0;
    field_sends(&desc, &forward, &backward);
    for (int64_t rank = 0; rank < TABLE_RANKS; rank++) {
        seqpar_plan_cost c = cost_of(&table_row, &desc, TABLE_RANKS, rank);
        sent[0] += (double)c.forward_bytes / (TABLE_RANKS << 20);
        sent[1] += (double)c.backward_bytes / (TABLE_RANKS << 20);
        hidden += c.backward_overlap / TABLE_RANKS;
        seqpar_plan_cost_free(&c);
    }
    printf("| %s %s | %.0f | %.0f | %.0f | %.0f | %.0f %% | %.3f |\n",
           seqpar_layout_name(layout), how, sent[0], forward * mib, sent[1], backward * mib,
           100 * hidden, imbalance(&table_row, &desc, TABLE_RANKS));
}

/* Every layout in a ring, every schedule on a zigzag. */
static void print_table(void) {
    int i;
    printf("| mode | forward | field | backward | field | transfers hidden | busiest rank / "
           "mean |\n|---|---:|---:|---:|---:|---:|---:|\n");
    for (i = 0; i < SEQPAR_LAYOUT_COUNT; i++)
        print_costs(i, SEQPAR_SCHEDULE_RING, 0, seqpar_schedule_name(SEQPAR_SCHEDULE_RING));
    for (i = 0; i < SEQPAR_SCHEDULE_COUNT; i++)
        if (i != SEQPAR_SCHEDULE_RING)
            print_costs(SEQPAR_LAYOUT_ZIGZAG, i, 0, seqpar_schedule_name(i));
    print_costs(SEQPAR_LAYOUT_ZIGZAG, SEQPAR_SCHEDULE_RING, 2, "2D, U = 2");
}

int main(int argc, char **argv) {
    int i;
    if (argc > 1 && !strcmp(argv[1], "--table")) {
        test_begin(1, argv);
        print_table();
        return 0;
    }
    test_begin(argc, argv);
    for (i = 0; i < SHAPES; i++) TEST(test_sound(&shapes[i]));
    TEST(test_sound(&(shape){SEQPAR_SCHEDULE_RING, 1024, 1, 1, 0, 0, 0}));
    TEST(test_sound(&(shape){SEQPAR_SCHEDULE_RING, 1024, 1, 1, 0, 0, 1}));
    TEST(test_sound(&(shape){SEQPAR_SCHEDULE_LLAMA3, 1024, 2, 1, 2, 0}));
    TEST(test_mutations());
    TEST(test_refused());
    TEST(test_mask());
    TEST(test_balance());
    TEST(test_formulas());
    TEST(test_as_far_as_seen());
    TEST(test_large());
    TEST(test_long_documents());
    for (i = 0; i < SEQPAR_LAYOUT_COUNT; i++) TEST(test_work(i));
    TEST(test_counts());
    return test_summary();
}
