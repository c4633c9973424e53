/* SPDX-License-Identifier: MIT OR Unlicense */
/* Transports: bytes arrive, in order and nowhere else; what goes wrong ends everybody with a
   sentence, and nothing hangs. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "support/inject.h"
#include "support/test.h"
#include "support/transport.h"
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

static const int64_t ranks_list[] = {1, 2, 3, 4, 5, 8};
static const transport_maker threads = {.name = "comm", .run = seqpar_run_threads};

static void run_well(int64_t ranks, seqpar_rank_fn fn, void *user) {
    transport_run_well(&threads, ranks, fn, user);
}

static void test_exchange(void) {
    int64_t i, repeat;
    for (i = 0; i < COUNT(ranks_list); i++) {
        post p = {.key = (uint64_t)i * 100, .letters = 1 + i % 2};
        run_well(ranks_list[i], rank_mail, &p);
        test_end("comm_exchange_P%lld", (long long)ranks_list[i]);
    }
    /* a message may come while another one is being copied */
    for (repeat = 0; repeat < 6; repeat++) {
        post p = {.key = (uint64_t)repeat * 1000, .letters = 2, .big = 1};
        run_well(3 + 2 * (repeat % 2), rank_mail, &p);
    }
    test_end("comm_exchange_big");
}

/* Rank 2's message comes while rank 0 is busy copying that of rank 1; it must not be slept
   over. */
#define LONG_COPY (INT64_C(12) << 20)
static seqpar_status rank_late(seqpar_comm *world, void *user) {
    int64_t late_us = *(const int64_t *)user;
    char *data = malloc(LONG_COPY), word[2] = {0};
    seqpar_transfer recvs[] = {{2, word, 2}, {1, data, LONG_COPY}};
    seqpar_transfer send = {0, world->rank == 1 ? data : word,
                            world->rank == 1 ? LONG_COPY : 2};
    seqpar_group group = {"late", 0, &send, world->rank > 0, recvs, world->rank ? 0 : 2};
    seqpar_request request;
    seqpar_status status;
    if (world->rank == 1) memset(data, 1, LONG_COPY);
    status = seqpar_comm_barrier(world);
    if (world->rank == 0) usleep(1000);
    if (world->rank == 2) usleep((useconds_t)late_us);
    if (!status) status = seqpar_comm_begin(world, &group, NULL, &request);
    if (!status) status = seqpar_comm_wait(world, &request, NULL);
    free(data);
    return status;
}

static void test_late(void) {
    int64_t late_us;
    for (late_us = 1000; late_us <= 4000; late_us += 250) run_well(3, rank_late, &late_us);
    test_end("comm_message_comes_during_a_copy");
}

static void test_order(void) {
    run_well(2, rank_order, NULL);
    test_end("comm_matching_by_order");
}

/* ---- collectives ---- */

/* Nobody leaves a barrier before everybody has entered it. */
static seqpar_status rank_barrier(seqpar_comm *world, void *user) {
    int64_t *entered = user, round;
    for (round = 1; round <= 20; round++) {
        __atomic_fetch_add(entered, 1, __ATOMIC_SEQ_CST);
        TRY(seqpar_comm_barrier(world));
        EXPECT(__atomic_load_n(entered, __ATOMIC_SEQ_CST) >= round * world->size,
               "round %lld: left before all had come", (long long)round);
    }
    return SEQPAR_OK;
}

static void test_collectives(void) {
    static const struct {
        const char *name;
        seqpar_rank_fn fn;
    } table[] = {{"all_gather", rank_all_gather},
                 {"broadcast", rank_broadcast},
                 {"sum_max", rank_reduce},
                 {"barrier", rank_barrier}};
    int64_t i, p;
    for (i = 0; i < COUNT(table); i++) {
        for (p = 0; p < COUNT(ranks_list); p++) {
            int64_t entered = 0;
            run_well(ranks_list[p], table[i].fn, &entered);
        }
        test_end("comm_%s", table[i].name);
    }
}

/* ---- meshes: D x P ranks; keys may turn the order round ---- */

typedef struct mesh {
    int64_t d, p;
    int reverse;
} mesh;

static seqpar_status rank_mesh(seqpar_comm *world, void *user) {
    const mesh *x = user;
    int64_t d = world->rank / x->p, p = world->rank % x->p, row[RANKS], column[RANKS], i;
    uint64_t keys[3] = {7, 1000 + (uint64_t)d, 2000 + (uint64_t)p};
    seqpar_comm *comms[3] = {world, NULL, NULL};
    for (i = 0; i < x->p; i++) row[i] = d * x->p + (x->reverse ? x->p - 1 - i : i);
    for (i = 0; i < x->d; i++) column[i] = (x->reverse ? x->d - 1 - i : i) * x->p + p;
    TRY(seqpar_comm_split(world, d, x->reverse ? -p : p, &comms[1]));
    /* equal keys: by rank; colours may be negative */
    TRY(seqpar_comm_split(world, p - 3, x->reverse ? -10 * d : 0, &comms[2]));
    TRY(expect_members(comms[1], world->rank, row, x->p));
    TRY(expect_members(comms[2], world->rank, column, x->d));
    TRY(talk_at_once(comms, keys));
    seqpar_comm_free(comms[2]);
    seqpar_comm_free(comms[1]);
    return SEQPAR_OK;
}

static void test_split(void) {
    static const mesh meshes[] = {{1, 1, 0}, {2, 2, 0}, {2, 2, 1}, {3, 1, 1},
                                  {1, 5, 1}, {2, 4, 0}, {4, 2, 1}, {2, 3, 1}};
    int64_t i;
    for (i = 0; i < COUNT(meshes); i++) {
        mesh m = meshes[i];
        run_well(m.d * m.p, rank_mesh, &m);
        test_end("comm_split_%lldx%lld%s", (long long)m.d, (long long)m.p,
                 m.reverse ? "_reversed" : "");
    }
}

/* A comm of a comm: halves, and of those halves again. */
static seqpar_status rank_split_twice(seqpar_comm *world, void *user) {
    seqpar_comm *half, *quarter;
    int64_t sum = world->rank, first = world->rank / 2 * 2;
    (void)user;
    TRY(seqpar_comm_split(world, world->rank / 4, world->rank, &half));
    TRY(seqpar_comm_split(half, half->rank / 2, half->rank, &quarter));
    TRY(seqpar_comm_sum_i64(quarter, &sum, 1));
    EXPECT(quarter->size == 2 && sum == 2 * first + 1, "rank %lld adds up to %lld",
           (long long)world->rank, (long long)sum);
    seqpar_comm_free(quarter);
    seqpar_comm_free(half);
    return SEQPAR_OK;
}

static void test_split_twice(void) {
    run_well(8, rank_split_twice, NULL);
    test_end("comm_split_of_a_split");
}

/* ---- counters ---- */

static void test_counters(void) {
    int64_t i;
    for (i = 0; i < COUNT(ranks_list); i++) {
        run_well(ranks_list[i], rank_count, NULL);
        test_end("comm_counters_P%lld", (long long)ranks_list[i]);
    }
}

static void test_self(void) {
    seqpar_comm *self = seqpar_comm_self(), *sub = NULL;
    post p = {.key = 5, .letters = 2};
    int64_t bits, value = 17;
    test_expect(self && self->size == 1 && self->rank == 0, "not a world of one");
    test_expect(!mail_run(self, &p, 1, &bits, NULL) && bits == 0, "mail to myself");
    test_expect(!seqpar_comm_split(self, 3, 4, &sub) && sub->size == 1, "split");
    test_expect(!seqpar_comm_sum_i64(sub, &value, 1) && !seqpar_comm_max_i64(self, &value, 1) &&
                    !seqpar_comm_barrier(self) && value == 17,
                "collectives");
    test_expect(!self->bytes_sent && !self->messages_sent && !sub->bytes_sent &&
                    !sub->messages_sent,
                "something was sent");
    seqpar_comm_free(sub);
    seqpar_comm_free(self);
    test_end("comm_self_sends_nothing");
}

/* Rank 0 sees a wrong message, and stays: who waits for it, rank 2, hears of it all the same. */
static seqpar_status rank_stays(seqpar_comm *world, void *user) {
    atomic_int *heard = user;
    seqpar_status status = SEQPAR_OK;
    if (world->rank == 0) status = exchange(world, "short", 0, -1, 0, 1, 8);
    if (world->rank == 1) status = exchange(world, "short", 0, 0, 9, -1, 0);
    if (world->rank == 2) status = exchange(world, "never", 0, -1, 0, 0, 8);
    if (world->rank == 2) atomic_store(heard, 1);
    for (int ms = 0; world->rank == 0 && !atomic_load(heard) && ms < 20000; ms++) usleep(1000);
    if (world->rank == 0) test_expect(atomic_load(heard), "rank 2 still waits");
    return status;
}

static void test_stays(void) {
    atomic_int heard = 0;
    seqpar_error error;
    seqpar_status status = seqpar_run_threads(3, rank_stays, &heard, &error);
    test_expect(status && strstr(error.text, "sent 9 bytes, rank 0 expects 8"), "%s: %s",
                seqpar_status_name(status), error.text);
    test_end("comm_wrong_message_ends_others_at_once");
}

static seqpar_status rank_aborts_alone(seqpar_comm *world, void *user) {
    seqpar_comm *sub;
    (void)user;
    TRY(seqpar_comm_split(world, 1, 0, &sub));
    seqpar_comm_abort(sub, "enough");
    seqpar_comm_free(sub);
    return SEQPAR_OK;
}

static void test_abort_alone(void) {
    seqpar_error error;
    seqpar_status status = seqpar_run_threads(1, rank_aborts_alone, NULL, &error);
    test_expect(status == SEQPAR_ERR_PEER && !strcmp(error.text, "enough"), "%s: %s",
                seqpar_status_name(status), error.text);
    test_end("comm_abort_alone");
}

/* ---- failures: what the world says, and what each rank says ---- */

/* on a comm of its own, where nothing else is sent */
static seqpar_status rank_never_sent(seqpar_comm *world, void *user) {
    seqpar_comm *sub;
    seqpar_status status = SEQPAR_OK;
    (void)user;
    TRY(seqpar_comm_split(world, 0, 0, &sub));
    if (world->rank == 2) status = exchange(sub, "dkv return", 5, -1, 0, 1, 8);
    seqpar_comm_free(sub);
    return status ? status : seqpar_comm_barrier(world);
}

static seqpar_status rank_never_received(seqpar_comm *world, void *user) {
    (void)user;
    if (world->rank == 1) TRY(exchange(world, "unwanted", 7, 0, 8, -1, 0));
    return SEQPAR_OK;
}

/* two collectives, entered in another order */
static seqpar_status rank_other_order(seqpar_comm *world, void *user) {
    seqpar_comm *sub[2];
    seqpar_status status;
    int64_t one = 1;
    (void)user;
    TRY(seqpar_comm_split(world, 0, 0, &sub[0]));
    TRY(seqpar_comm_split(world, 0, 0, &sub[1]));
    status = seqpar_comm_sum_i64(sub[world->rank], &one, 1);
    if (!status) status = seqpar_comm_max_i64(sub[1 - world->rank], &one, 1);
    seqpar_comm_free(sub[0]);
    seqpar_comm_free(sub[1]);
    return status;
}

/* What threads can tell beside what every transport must (transport_failures). */
/* Rank 1 gives the gradients of two tensors of one size in the other order. */
static seqpar_status rank_other_gradient(seqpar_comm *world, void *user) {
    static const seqpar_tensor tensors[] = {{"a", 64, 64, 0, 0, 0}, {"b", 64, 64, 4096, 0, 1}};
    static const float nodes[4096];
    const seqpar_optim_desc desc = {.kind = SEQPAR_OPTIM_SGD};
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx = {0};
    seqpar_optim optim = {0};
    (void)user;
    /* the others may have failed, and this rank with them, before it is here */
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, world->size);
    if (!status) status = seqpar_optim_open(&ctx, &optim, tensors, 2, &desc);
    if (!status) status = seqpar_step_begin_plain(&ctx, &optim, 1);
    for (int64_t i = 0; !status && i < 2; i++) {
        const int64_t group = world->rank == 1 ? i : 1 - i;
        status = seqpar_step_gradient(
            &ctx, &optim,
            &(seqpar_step_nodes){
                .nodes = (void *)nodes, .node_stride = 4096, .elements = 4096, .group = group});
    }
    seqpar_optim_close(&ctx, &optim);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status ? status : seqpar_comm_barrier(world);
}

static const failure thread_failures[] = {
    {"gradients_in_another_order",
     4,
     rank_other_gradient,
     SEQPAR_ERR_STEP,
     -1,
     {"'gradients to owners' step 0", "'gradients to owners' step 1"},
     0,
     NULL},
    {"deadlock_early_end",
     3,
     rank_leaves_early,
     SEQPAR_ERR_DEADLOCK,
     -1,
     {"rank 1 waits", "rank 2 waits", "'integer sum'", "for rank 0", "which has ended"},
     0,
     NULL},
    {"deadlock_never_sent",
     3,
     rank_never_sent,
     SEQPAR_ERR_DEADLOCK,
     -1,
     {"rank 2 waits in 'dkv return' step 5 for rank 1", "rank 0 waits in 'integer sum'",
      "for rank 2"},
     SEQPAR_ERR_DEADLOCK,
     "'dkv return' step 5"},
    {"deadlock_never_received",
     2,
     rank_never_received,
     SEQPAR_ERR_DEADLOCK,
     1,
     {"rank 1 waits in 'unwanted' step 7 for rank 0, which has ended"},
     0,
     NULL},
    DEADLOCK_CROSS,
    DEADLOCK_CYCLE,
    {"deadlock_other_order",
     2,
     rank_other_order,
     SEQPAR_ERR_DEADLOCK,
     -1,
     {"rank 0 waits in 'integer sum'", "rank 1 waits in 'integer sum'"},
     SEQPAR_ERR_DEADLOCK,
     "deadlock"},
    DEADLOCK_SELF,
    {"deadlock_to_nobody",
     3,
     rank_to_nobody,
     SEQPAR_ERR_DEADLOCK,
     -1,
     {"rank 1 waits in 'alone' step 0 for rank 1"},
     SEQPAR_ERR_DEADLOCK,
     "'alone'"},
};

static void test_failures(void) {
    expect_failures(&threads, transport_failures, COUNT(transport_failures), 100);
    test_end("comm_failures_repeated");
    expect_failures(&threads, thread_failures, COUNT(thread_failures), 100);
    test_end("comm_thread_failures_repeated");
}

static void test_rank_numbers(void) {
    seqpar_error error;
    test_expect(seqpar_run_threads(0, rank_mail, NULL, &error) == SEQPAR_ERR_RANKS &&
                    strstr(error.text, "0 ranks"),
                "0 ranks: %s", error.text);
    test_expect(seqpar_run_threads(-3, rank_mail, NULL, &error) == SEQPAR_ERR_RANKS &&
                    strstr(error.text, "-3"),
                "-3 ranks: %s", error.text);
    test_expect(seqpar_run_threads(-3, rank_mail, NULL, NULL) == SEQPAR_ERR_RANKS,
                "without a place for the error");
    test_end("comm_rank_numbers");
}

/* ---- what a transport is told ---- */

/* A transport that only notes what it was called with. */
typedef struct told {
    void *queue;
    int64_t begins, waits, settled;
    seqpar_status settles; /* what the device says */
} told;

static seqpar_status told_begin(seqpar_comm *comm, const seqpar_group *group, void *queue,
                                seqpar_request *request) {
    told *t = comm->state;
    t->queue = queue;
    t->begins++;
    if (group->send_count) request->state = t; /* else nothing is left to wait for */
    return SEQPAR_OK;
}

static seqpar_status told_wait(seqpar_comm *comm, seqpar_request *request, void *queue) {
    told *t = comm->state;
    t->queue = queue;
    t->waits += request->state == t;
    return SEQPAR_ERR_NOT_FINITE;
}

static told *settling; /* the one whose device it is */
static seqpar_status told_settle(seqpar_device *device, void *queue) {
    (void)device;
    settling->settled += queue == settling;
    return settling->settles;
}

static seqpar_comm told_comm(const seqpar_comm_table *table, told *t, int64_t rank,
                             int64_t size) {
    return (seqpar_comm){.table = table, .rank = rank, .size = size, .state = t};
}

/* Who knows no queue is called when the queue has settled, and is told of none. */
static void test_told_queue(int queued) {
    const seqpar_comm_table table = {.begin = told_begin, .wait = told_wait, .queued = queued};
    seqpar_device device = {.settle = told_settle};
    told t = {0};
    seqpar_comm comm = told_comm(&table, &t, 1, 3);
    seqpar_transfer send = {2, NULL, 0};
    seqpar_group group = {"told", 5, &send, 1, NULL, 0}, nothing = {.name = "nothing"};
    seqpar_request request = {&request};
    comm.device = &device;
    settling = &t;
    test_expect(!seqpar_comm_begin(&comm, &group, &t, &request) && t.begins == 1, "begin");
    test_expect(t.queue == (queued ? &t : NULL) && t.settled == !queued,
                "queued %d: it settled %lld times", queued, (long long)t.settled);
    test_expect(seqpar_comm_wait(&comm, &request, &t) == SEQPAR_ERR_NOT_FINITE && t.waits == 1,
                "wait");
    test_expect(t.queue == (queued ? &t : NULL) && !request.state, "what wait is told");
    request.state = &request; /* of before */
    test_expect(!seqpar_comm_begin(&comm, &nothing, NULL, &request) && !request.state &&
                    !seqpar_comm_wait(&comm, &request, NULL) && t.waits == 1,
                "a wait for nothing");
    test_expect(comm.queue_groups == queued, "%lld groups on queues",
                (long long)comm.queue_groups);
    t.settles = SEQPAR_ERR_DEVICE;
    test_expect(seqpar_comm_begin(&comm, &group, &t, &request) ==
                        (queued ? SEQPAR_OK : SEQPAR_ERR_DEVICE) &&
                    t.begins == 2 + queued,
                "a device that fails to settle");
    test_end("comm_told_%s", queued ? "of_the_queue" : "of_no_queue");
}

enum { QUEUED_RANKS = 4, QUEUED_GROUPS = 3 };
enum queued_fault {
    QUEUED_WELL,
    QUEUED_NAME_BEGINS,
    QUEUED_NAME_ENDS,
    QUEUED_STEP,
    QUEUED_OTHER_ORDER,
    QUEUED_FROM_OTHER,
    QUEUED_TO_OTHER,
    QUEUED_ONE_MORE,
    QUEUED_ONE_LESS,
    QUEUED_FAULTS
};

/* Group `g` of a rank: one message to the next and one to the one behind it. */
static void queued_begin(seqpar_comm *comm, int64_t g, enum queued_fault wrong) {
    static const char *const names[] = {"ring of keys", "king of keys", "ring of keyt"};
    const int64_t r = comm->rank, n = comm->size, odd = r == n - 1;
    const int64_t number = odd && wrong == QUEUED_OTHER_ORDER ? (3 - g) % QUEUED_GROUPS : g;
    seqpar_transfer sends[3] = {{(r + 1) % n, NULL, 0}, {(r + 2) % n, NULL, 0}, {0, NULL, 0}};
    seqpar_transfer recvs[3] = {{(r + n - 1) % n, NULL, 0}, {(r + n - 2) % n, NULL, 0}};
    seqpar_group group = {names[0], number, sends, 2, recvs, 2};
    seqpar_request request;
    if (odd && wrong == QUEUED_NAME_BEGINS) group.name = names[1];
    if (odd && wrong == QUEUED_NAME_ENDS) group.name = names[2];
    if (odd && wrong == QUEUED_STEP) group.step = 7;
    if (odd && wrong == QUEUED_TO_OTHER) sends[1].peer = 0;
    if (odd && wrong == QUEUED_FROM_OTHER) recvs[1].peer = 2;
    if (odd && wrong == QUEUED_ONE_MORE) group.send_count = 3;
    if (odd && wrong == QUEUED_ONE_LESS) group.recv_count = 1;
    test_expect(!seqpar_comm_begin(comm, &group, comm, &request), "begin");
}

/* Over all ranks the sum of messages on queues is 0 exactly where both ends of each message are
   of the same group. */
static void test_queue_sums(void) {
    const seqpar_comm_table table = {.begin = told_begin, .queued = 1};
    for (int wrong = 0; wrong < QUEUED_FAULTS; wrong++) {
        uint64_t sum = 0;
        for (int64_t r = 0; r < QUEUED_RANKS; r++) {
            told t = {0};
            seqpar_comm comm = told_comm(&table, &t, r, QUEUED_RANKS);
            for (int64_t g = 0; g < QUEUED_GROUPS; g++)
                queued_begin(&comm, g, (enum queued_fault)wrong);
            test_expect(comm.queue_groups == QUEUED_GROUPS, "%lld groups",
                        (long long)comm.queue_groups);
            sum += comm.queue_sum;
        }
        test_expect((sum != 0) == (wrong != QUEUED_WELL), "case %d: the sum is %llx", wrong,
                    (unsigned long long)sum);
    }
    test_end("comm_queue_sums");
}

/* The order of groups counts, too: of two that are alike but for their number. */
static void test_queue_order(void) {
    const seqpar_comm_table table = {.begin = told_begin, .queued = 1};
    uint64_t sums[2] = {0, 0};
    for (int later = 0; later < 2; later++) {
        told t = {0};
        seqpar_comm comm = told_comm(&table, &t, 0, 2);
        seqpar_transfer send = {1, NULL, 0};
        seqpar_group group = {"alike", 0, &send, 1, NULL, 0}, nothing = {.name = "nothing"};
        seqpar_request request;
        if (later) seqpar_comm_begin(&comm, &nothing, &t, &request);
        seqpar_comm_begin(&comm, &group, &t, &request);
        sums[later] = comm.queue_sum;
    }
    test_expect(sums[0] && sums[1] && sums[0] != sums[1], "the first group is as the second");
    test_end("comm_queue_order");
}

/* ---- what a deadlock is called: as many ranks as fit ---- */

enum { CROWD = 9, CROWD_TEXT = 512, CROWD_ROOM = 120 };
typedef struct crowd {
    char name[64];
    int64_t step, ended;
} crowd;

static int64_t crowd_step(const crowd *c, int64_t rank) {
    return rank == CROWD - 2 ? -3 : rank ? 11 * rank : c->step;
}

static seqpar_status rank_crowd(seqpar_comm *world, void *user) {
    const crowd *c = user;
    if (world->rank < c->ended) return SEQPAR_OK;
    return exchange(world, c->name, crowd_step(c, world->rank), -1, 0,
                    (world->rank + 1) % world->size, 8);
}

static void crowd_text(char *text, const crowd *c, int64_t size) {
    int at = snprintf(text, CROWD_TEXT, "deadlock: ");
    for (int64_t r = c->ended; r < size && at < CROWD_TEXT - CROWD_ROOM; r++)
        at += snprintf(text + at, (size_t)(CROWD_TEXT - at),
                       "%srank %lld waits in '%s' step %lld for rank %lld%s",
                       r > c->ended ? "; " : "", (long long)r, c->name,
                       (long long)crowd_step(c, r), (long long)((r + 1) % size),
                       (r + 1) % size < c->ended ? ", which has ended" : "");
}

static void expect_crowd(crowd *c, int64_t letters, int64_t size) {
    char want[CROWD_TEXT];
    seqpar_error error;
    memset(c->name, 0, sizeof c->name);
    memset(c->name, 'w', (size_t)letters);
    crowd_text(want, c, size);
    test_expect(seqpar_run_threads(size, rank_crowd, c, &error) == SEQPAR_ERR_DEADLOCK &&
                    error.rank == c->ended && !strcmp(error.text, want),
                "rank %lld says '%s', not '%s'", (long long)error.rank, error.text, want);
}

static void test_crowd(void) {
    crowd c = {.step = 4};
    expect_crowd(&c, 3, 2);
    for (c.ended = 1; c.ended < 3; c.ended++) expect_crowd(&c, 5, 4);
    c.ended = 0;
    for (int64_t letters = 1; letters < 40; letters += 2)
        for (c.step = 1; c.step < 100000; c.step *= 10) expect_crowd(&c, letters, CROWD);
    test_end("comm_deadlock_of_a_crowd");
}

/* ---- one rank: what its world says ---- */

typedef struct alone {
    int64_t sends, recvs, bytes[2]; /* of messages to itself; bytes that the second has */
    seqpar_status status;
    const char *text, *aborts;
    seqpar_status want;
    const char *says;
} alone;

static seqpar_status rank_alone(seqpar_comm *world, void *user) {
    const alone *a = user;
    char out[2][8] = {"abcdefg", "hijklmn"}, in[2][8] = {{0}};
    seqpar_transfer sends[] = {{0, out[0], 8}, {0, out[1], a->bytes[0]}};
    seqpar_transfer recvs[] = {{0, in[0], 8}, {0, in[1], a->bytes[1]}};
    seqpar_group group = {"alone", 6, sends, a->sends, recvs, a->recvs};
    seqpar_request request;
    TRY(seqpar_comm_begin(world, &group, NULL, &request));
    TRY(seqpar_comm_wait(world, &request, NULL));
    for (int64_t i = 0; i < a->sends; i++)
        EXPECT(!memcmp(in[i], out[i], (size_t)(i ? a->bytes[0] : 8)), "message %lld",
               (long long)i);
    EXPECT(!in[1][a->bytes[1]] || a->bytes[1] == 8, "behind the second message");
    if (a->aborts) seqpar_comm_abort(world, a->aborts);
    return a->text ? seqpar_fail(world->error, a->status, "%s", a->text) : a->status;
}

static void test_alone(void) {
    static const alone table[] = {
        {0, 0, {0, 0}, SEQPAR_OK, NULL, NULL, SEQPAR_OK, ""},
        {2, 2, {5, 5}, SEQPAR_OK, NULL, NULL, SEQPAR_OK, ""},
        {1,
         2,
         {8, 8},
         SEQPAR_OK,
         NULL,
         NULL,
         SEQPAR_ERR_DEADLOCK,
         "'alone': rank 0 is alone, sends 1 messages and expects 2"},
        {2,
         0,
         {8, 8},
         SEQPAR_OK,
         NULL,
         NULL,
         SEQPAR_ERR_DEADLOCK,
         "'alone': rank 0 is alone, sends 2 messages and expects 0"},
        {2,
         2,
         {5, 6},
         SEQPAR_OK,
         NULL,
         NULL,
         SEQPAR_ERR_MESSAGE_SIZE,
         "'alone': 5 bytes were sent where 6 were expected"},
        {2,
         2,
         {6, 5},
         SEQPAR_OK,
         NULL,
         NULL,
         SEQPAR_ERR_MESSAGE_SIZE,
         "'alone': 6 bytes were sent where 5 were expected"},
        {0, 0, {0, 0}, SEQPAR_ERR_SIZE, "no room", NULL, SEQPAR_ERR_SIZE, "no room"},
        {0, 0, {0, 0}, SEQPAR_ERR_SIZE, "n", NULL, SEQPAR_ERR_SIZE, "n"},
        {0, 0, {0, 0}, SEQPAR_ERR_NOT_FINITE, NULL, NULL, SEQPAR_ERR_NOT_FINITE, NULL},
        {0, 0, {0, 0}, SEQPAR_OK, NULL, "enough", SEQPAR_ERR_PEER, "enough"},
        {0, 0, {0, 0}, SEQPAR_ERR_SIZE, "no room", "enough", SEQPAR_ERR_SIZE, "enough"},
    };
    for (int64_t i = 0; i < COUNT(table); i++) {
        const alone *a = &table[i];
        const char *says = a->says ? a->says : seqpar_status_text(a->want);
        seqpar_error error;
        ledger_open();
        test_expect(seqpar_run_threads(1, rank_alone, (void *)a, &error) == a->want &&
                        error.status == a->want && !error.rank && !strcmp(error.text, says),
                    "case %lld: %s: '%s', not '%s'", (long long)i,
                    seqpar_status_name(error.status), error.text, says);
        ledger_read();
    }
    test_end("comm_one_rank_says");
}

/* ---- collectives: what begin and wait say is said ---- */

static seqpar_status failing_begin(seqpar_comm *comm, const seqpar_group *group, void *queue,
                                   seqpar_request *request) {
    (void)group, (void)queue;
    request->state = comm->state;
    return ((told *)comm->state)->settles;
}

/* begin or wait of a collective fails: neither is lost. */
static void test_collectives_fail(void) {
    const seqpar_comm_table begins = {.begin = failing_begin, .wait = told_wait};
    const seqpar_comm_table waits = {.begin = told_begin, .wait = told_wait};
    for (int fails = 0; fails < 2; fails++)
        for (int64_t r = 0; r < 2; r++) {
            told t = {.settles = SEQPAR_ERR_DEVICE};
            seqpar_error error = {0};
            seqpar_comm comm = told_comm(fails ? &waits : &begins, &t, r, 2);
            const seqpar_status want = fails ? SEQPAR_ERR_NOT_FINITE : SEQPAR_ERR_DEVICE;
            int64_t one = 1, all[2], bytes[2] = {8, 8};
            comm.error = &error;
            test_expect(seqpar_comm_all_gather(&comm, all, &one, bytes, "fails") == want,
                        "all-gather");
            test_expect(seqpar_comm_sum_i64(&comm, &one, 1) == want &&
                            seqpar_comm_max_i64(&comm, &one, 1) == want && one == 1,
                        "sums and maxima");
            test_expect(seqpar_comm_barrier(&comm) == want, "barrier");
            if (fails == 0 || r == 0) /* whoever only receives has nothing to wait for here */
                test_expect(seqpar_comm_broadcast(&comm, &one, 8, 0) == want, "broadcast");
            test_expect(t.waits == (fails ? 4 + (r == 0) : 0), "%lld waits",
                        (long long)t.waits);
        }
    test_end("comm_collectives_fail");
}

/* One byte or number more than none wants a place. */
static void test_places(void) {
    seqpar_comm *self = seqpar_comm_self();
    const seqpar_status want = SEQPAR_ERR_POINTER;
    char one = 5, to = 0;
    int64_t none = 0, first = 1;
    test_expect(!seqpar_comm_all_gather(self, NULL, NULL, &none, "none") &&
                    !seqpar_comm_broadcast(self, NULL, 0, 0) &&
                    !seqpar_comm_sum_i64(self, NULL, 0) && !seqpar_comm_max_i64(self, NULL, 0),
                "nothing is refused: %s", self->error->text);
    test_expect(seqpar_comm_all_gather(self, NULL, &one, &first, "to nowhere") == want &&
                    seqpar_comm_all_gather(self, &to, NULL, &first, "of nothing") == want,
                "all-gather");
    test_expect(seqpar_comm_broadcast(self, NULL, 1, 0) == want, "broadcast");
    test_expect(seqpar_comm_sum_i64(self, NULL, 1) == want &&
                    seqpar_comm_max_i64(self, NULL, 1) == want,
                "sums and maxima");
    test_expect(!seqpar_comm_all_gather(self, &to, &one, &first, "a byte") && to == 5,
                "a byte is gathered");
    test_expect(!self->table->queued, "a world of one rank knows queues");
    seqpar_comm_free(self);
    test_end("comm_places");
}

static seqpar_status rank_knows_no_queue(seqpar_comm *world, void *user) {
    (void)user;
    EXPECT(!world->table->queued, "threads know queues");
    return SEQPAR_OK;
}

/* ---- an abort while a message is copied: nobody leaves whose memory it is ---- */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t turn, blocked; /* which copy is the slow one; copies so far */
    int copying, aborted, copied;
} slow_copy = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void slow_set(int *what) {
    pthread_mutex_lock(&slow_copy.lock);
    *what = 1;
    pthread_cond_broadcast(&slow_copy.changed);
    pthread_mutex_unlock(&slow_copy.lock);
}

static void slow_await(const int *what) {
    pthread_mutex_lock(&slow_copy.lock);
    while (!*what) pthread_cond_wait(&slow_copy.changed, &slow_copy.lock);
    pthread_mutex_unlock(&slow_copy.lock);
}

static void copy_slowly(seqpar_device *device, void *to, const void *from, int64_t bytes,
                        void *queue) {
    (void)device, (void)queue;
    if (slow_copy.turn++ != slow_copy.blocked) {
        memcpy(to, from, (size_t)bytes);
        return;
    }
    slow_set(&slow_copy.copying);
    slow_await(&slow_copy.aborted);
    usleep(20000); /* for whoever would leave */
    memcpy(to, from, (size_t)bytes);
    slow_set(&slow_copy.copied);
}

/* Ranks 0 and 1 exchange three messages, of which the first comer's are copied by the other. */
static seqpar_status rank_slow(seqpar_comm *world, void *user) {
    const int64_t first = *(const int64_t *)user, me = world->rank;
    seqpar_device device = {.copy = copy_slowly};
    char out[3] = {1, 2, 3}, in[3];
    seqpar_transfer sends[2] = {{1, &out[0], 1}, {1, &out[1], 1}}, back = {1, &in[2], 1};
    seqpar_transfer recvs[2] = {{0, &in[0], 1}, {0, &in[1], 1}}, forth = {0, &out[2], 1};
    seqpar_group group = {"slow",    0, me ? &forth : sends, me ? 1 : 2, me ? recvs : &back,
                          me ? 2 : 1};
    seqpar_request request;
    seqpar_status status;
    TRY(seqpar_comm_barrier(world));
    if (me == 2) {
        slow_await(&slow_copy.copying);
        seqpar_comm_abort(world, "in the middle of a copy");
        slow_set(&slow_copy.aborted);
        return SEQPAR_OK;
    }
    world->device = &device;
    if (me != first) usleep(2000);
    status = seqpar_comm_begin(world, &group, NULL, &request);
    if (!status) status = seqpar_comm_wait(world, &request, NULL);
    EXPECT(slow_copy.copied, "rank %lld left while its memory was in use", (long long)me);
    return status;
}

static void test_slow_copies(void) {
    for (int64_t first = 0; first < 2; first++)
        for (int64_t blocked = 0; blocked < 3; blocked++) {
            seqpar_error error;
            slow_copy.turn = slow_copy.copying = slow_copy.aborted = slow_copy.copied = 0;
            slow_copy.blocked = blocked;
            test_expect(transport_run(&threads, 3, rank_slow, &first, &error) ==
                                SEQPAR_ERR_PEER &&
                            !strcmp(error.text, "in the middle of a copy") && error.rank == 2,
                        "%s", error.text);
        }
    test_end("comm_abort_during_a_copy");
}

/* ---- the wrapper that does harm ---- */

typedef struct harm {
    seqpar_inject_desc desc;
    int64_t only; /* the rank that is harmed; -1: all */
    post p;
    int64_t bits, worst; /* what was damaged on rank `only`, and which message of the group */
} harm;

static seqpar_status wrap(seqpar_comm *world, const seqpar_inject_desc *desc,
                          seqpar_comm **wrapped) {
    *wrapped = seqpar_comm_inject(world, desc);
    return *wrapped ? SEQPAR_OK : SEQPAR_ERR_MEMORY;
}

static seqpar_status rank_harmed(seqpar_comm *world, void *user) {
    static const seqpar_inject_desc harmless;
    harm *h = user;
    seqpar_comm *comm;
    int64_t bits, worst = 0;
    seqpar_status status;
    TRY(wrap(world, h->only < 0 || h->only == world->rank ? &h->desc : &harmless, &comm));
    status = mail_run(comm, &h->p, 1, &bits, &worst);
    if (!status) status = seqpar_comm_barrier(comm);
    if (world->rank == h->only)
        h->bits = bits, h->worst = worst;
    else
        EXPECT(status || bits == 0, "rank %lld, which was not harmed, reads %lld wrong bits",
               (long long)world->rank, (long long)bits);
    seqpar_comm_free(comm);
    return status;
}

static seqpar_status rank_perturbed(seqpar_comm *world, void *user) {
    const harm *h = user;
    seqpar_comm *comm;
    int64_t bits;
    seqpar_status status;
    TRY(wrap(world, &h->desc, &comm));
    status = mail_run(comm, &h->p, GROUPS, &bits, NULL);
    EXPECT(status || bits == 0, "seed %llu: rank %lld reads %lld wrong bits",
           (unsigned long long)h->desc.seed, (long long)world->rank, (long long)bits);
    seqpar_comm_free(comm);
    return status;
}

static void test_perturbed(void) {
    int64_t repeat;
    for (repeat = 0; repeat < 20; repeat++) {
        harm h = {.desc = {.seed = (uint64_t)repeat,
                           .delay_us_max = 300,
                           .reorder = 1,
                           .virtual_clock = repeat % 2},
                  .p = {.key = 42, .letters = 2}};
        run_well(ranks_list[repeat % COUNT(ranks_list)], rank_perturbed, &h);
    }
    test_end("comm_inject_delay_reorder");
}

/* Every message of a group in turn: one bit of it is wrong, if it has bits, and no other. */
static void test_flip(void) {
    int64_t n, ranks = 3;
    for (n = 1; n <= 2 * ranks + 1; n++) {
        harm h = {.desc = {.flip_bit_at = n}, .only = 1, .p = {.key = 9, .letters = 2}};
        int64_t from = (n - 1) % ranks, number = (n - 1) / ranks;
        int64_t filled = number < 2 &&
                         letter_bytes(&h.p, letter_key(&h.p, 0, from, 1, number)) > 0;
        run_well(ranks, rank_harmed, &h);
        test_expect(h.bits == filled, "message %lld: %lld bits are wrong", (long long)n,
                    (long long)h.bits);
        test_expect(!h.bits || h.worst == n, "message %lld was to be damaged, message %lld is",
                    (long long)n, (long long)h.worst);
    }
    test_end("comm_inject_flip_bit");
}

static seqpar_status rank_fifth_begin(seqpar_comm *world, void *user) {
    seqpar_inject_desc desc = {.seed = 1};
    seqpar_comm *comm;
    seqpar_status status = SEQPAR_OK;
    int64_t i;
    (void)user;
    if (world->rank == 1)
        *(failing->status == SEQPAR_ERR_INJECTED ? &desc.fail_at : &desc.die_at) = 5;
    TRY(wrap(world, &desc, &comm));
    for (i = 1; i <= 7 && !status; i++)
        status = exchange(comm, "ring", i, (comm->rank + 1) % comm->size, 8,
                          (comm->rank + comm->size - 1) % comm->size, 8);
    EXPECT(world->rank != 1 || i == 6, "rank 1 ended at begin %lld", (long long)i - 1);
    EXPECT(world->rank != 1 || status == (desc.die_at ? SEQPAR_ERR_DIED : SEQPAR_ERR_INJECTED),
           "rank 1 ended with %s", seqpar_status_name(status));
    seqpar_comm_free(comm);
    return status;
}

/* Rank 1 dies at its last message, which nobody waits for: the world must not be called
   well. */
static seqpar_status rank_dies_unmissed(seqpar_comm *world, void *user) {
    seqpar_inject_desc desc = {.die_at = world->rank == 1};
    seqpar_comm *comm;
    seqpar_status status;
    (void)user;
    TRY(wrap(world, &desc, &comm));
    status = comm->rank == 1 ? exchange(comm, "last", 0, -1, 0, -1, 0) : SEQPAR_OK;
    seqpar_comm_free(comm);
    return status;
}

static void test_fail_and_die(void) {
    static const failure table[] = {
        {"inject_fail_at",
         3,
         rank_fifth_begin,
         SEQPAR_ERR_INJECTED,
         1,
         {"'ring'", "5"},
         SEQPAR_ERR_PEER,
         "injected"},
        {"inject_die_at",
         3,
         rank_fifth_begin,
         SEQPAR_ERR_DEADLOCK,
         -1,
         {"'ring' step 5", "for rank 1, which has ended"},
         0,
         NULL},
        {"inject_die_unmissed",
         3,
         rank_dies_unmissed,
         SEQPAR_ERR_DIED,
         1,
         {"without a word"},
         0,
         NULL},
    };
    int64_t i;
    for (i = 0; i < COUNT(table); i++) expect_failure(&threads, &table[i]);
}

/* Collectives over a wrapped comm, and over what is split from it, are as harmless as the
   wrapper. */
static seqpar_status rank_wrapped_split(seqpar_comm *world, void *user) {
    seqpar_inject_desc desc = {.seed = 3, .reorder = 1, .delay_us_max = 50};
    seqpar_comm *comm, *sub;
    int64_t sum = world->rank + 1;
    (void)user;
    TRY(wrap(world, &desc, &comm));
    TRY(seqpar_comm_split(comm, world->rank % 2, -world->rank, &sub));
    EXPECT(sub->table == comm->table, "what is split from a wrapper is not wrapped");
    TRY(seqpar_comm_sum_i64(sub, &sum, 1));
    EXPECT(sum == (world->rank % 2 ? 6 : 4) && sub->rank == 1 - world->rank / 2,
           "rank %lld adds up to %lld", (long long)world->rank, (long long)sum);
    EXPECT(sub->messages_sent == 1 && sub->bytes_sent == 8, "%lld messages, %lld bytes",
           (long long)sub->messages_sent, (long long)sub->bytes_sent);
    seqpar_comm_free(sub);
    seqpar_comm_free(comm);
    return SEQPAR_OK;
}

static void test_wrapped_split(void) {
    run_well(4, rank_wrapped_split, NULL);
    test_end("comm_inject_split");
}

/* ---- the virtual clock ---- */

#define LATENCY 0.25

static double work_of(int64_t rank, int64_t step) {
    return (double)(mix((uint64_t)rank, (uint64_t)step, 5, 6) % 64) / 8;
}

/* A ring: work, pass on, receive; what the clocks must say is worked out here for all ranks
   at once. */
static void clocks_after(double *clock, int64_t ranks, int64_t steps) {
    int64_t r, s;
    for (r = 0; r < ranks; r++) clock[r] = 0;
    for (s = 0; s < steps; s++) {
        double before[RANKS];
        for (r = 0; r < ranks; r++) before[r] = clock[r] + work_of(r, s);
        for (r = 0; r < ranks; r++)
            clock[r] = fmax(before[r], before[(r + ranks - 1) % ranks] + LATENCY);
    }
}

static seqpar_status rank_clock(seqpar_comm *world, void *user) {
    seqpar_inject_desc desc = {.virtual_clock = 1, .latency = LATENCY};
    double want[RANKS];
    seqpar_comm *comm;
    int64_t s, p = world->size, steps = 9;
    (void)user;
    TRY(wrap(world, &desc, &comm));
    EXPECT(seqpar_inject_clock(comm) == 0, "the clock does not begin at 0");
    for (s = 0; s < steps; s++) {
        seqpar_inject_compute(comm, work_of(comm->rank, s));
        TRY(exchange(comm, "clocked", s, (comm->rank + 1) % p, 16, (comm->rank + p - 1) % p,
                     16));
        clocks_after(want, p, s + 1);
        EXPECT(seqpar_inject_clock(comm) == want[comm->rank],
               "step %lld: rank %lld is at %g, not %g", (long long)s, (long long)comm->rank,
               seqpar_inject_clock(comm), want[comm->rank]);
    }
    EXPECT(comm->bytes_sent == (p > 1 ? 16 * steps : 0), "time stamps are counted as bytes");
    seqpar_comm_free(comm);
    return SEQPAR_OK;
}

/* Work between begin and wait hides the message; work before begin does not. A wait that
   receives nothing takes no time. */
static seqpar_status rank_overlap(seqpar_comm *world, void *user) {
    seqpar_inject_desc desc = {.virtual_clock = 1, .latency = 4};
    static const double want[2] = {3 + 10, 7 + 1};
    seqpar_comm *comm;
    char out = 1, in = 0;
    seqpar_transfer send = {1 - world->rank, &out, 1}, recv = {1 - world->rank, &in, 1};
    seqpar_group group = {"overlap", 0, &send, 1, &recv, 1};
    seqpar_group only_send = {"one way", 1, &send, 1, NULL, 0};
    seqpar_group only_recv = {"one way", 1, NULL, 0, &recv, 1};
    seqpar_request request;
    (void)user;
    TRY(wrap(world, &desc, &comm));
    seqpar_inject_compute(comm, comm->rank ? 1 : 3);
    TRY(seqpar_comm_begin(comm, &group, NULL, &request));
    if (comm->rank == 0) seqpar_inject_compute(comm, 10);
    TRY(seqpar_comm_wait(comm, &request, NULL));
    if (comm->rank == 1) seqpar_inject_compute(comm, 1);
    EXPECT(seqpar_inject_clock(comm) == want[comm->rank], "rank %lld is at %g",
           (long long)comm->rank, seqpar_inject_clock(comm));
    TRY(seqpar_comm_begin(comm, comm->rank ? &only_recv : &only_send, NULL, &request));
    TRY(seqpar_comm_wait(comm, &request, NULL));
    EXPECT(seqpar_inject_clock(comm) == (comm->rank ? 17 : 13), "one way: rank %lld is at %g",
           (long long)comm->rank, seqpar_inject_clock(comm));
    seqpar_comm_free(comm);
    return SEQPAR_OK;
}

static void test_clock(void) {
    int64_t i;
    for (i = 0; i < COUNT(ranks_list); i++) run_well(ranks_list[i], rank_clock, NULL);
    test_end("comm_clock_ring");
    run_well(2, rank_overlap, NULL);
    test_end("comm_clock_overlap");
}

static void test_no_queue(void) {
    run_well(2, rank_knows_no_queue, NULL);
    test_end("comm_threads_know_no_queue");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    test_limit(20); /* a hang is a failure */
    TEST(test_exchange());
    TEST(test_late());
    TEST(test_order());
    TEST(test_collectives());
    TEST(test_split());
    TEST(test_split_twice());
    TEST(test_counters());
    TEST(test_self());
    TEST(test_stays());
    TEST(test_abort_alone());
    TEST(test_failures());
    TEST(test_rank_numbers());
    TEST(test_told_queue(0));
    TEST(test_told_queue(1));
    TEST(test_queue_sums());
    TEST(test_queue_order());
    TEST(test_crowd());
    TEST(test_alone());
    TEST(test_collectives_fail());
    TEST(test_places());
    TEST(test_no_queue());
    TEST(test_slow_copies());
    TEST(test_perturbed());
    TEST(test_flip());
    TEST(test_fail_and_die());
    TEST(test_wrapped_split());
    TEST(test_clock());
    return test_summary();
}
