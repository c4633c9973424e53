/* SPDX-License-Identifier: MIT OR Unlicense */
/* The conformance suite of transports. Whoever writes a seqpar_comm_table hands
   transport_conformance() a function that runs ranks over it. Ranks may be processes: they
   share no memory with each other or with the test, so every rank checks its own data, and
   what it finds wrong goes into a file that all have open. */
#ifndef TRANSPORT_H
#define TRANSPORT_H

#include "seqpar.h"
#include "test.h"
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

typedef struct transport_maker {
    const char *name; /* of the tests */
    /* as seqpar_run_threads */
    seqpar_status (*run)(int64_t ranks, seqpar_rank_fn fn, void *user, seqpar_error *error);
    int processes; /* a rank can be killed alone */
    /* the most ranks, such as the number of GPUs: leaves out tests of more ranks, and repeats,
       which take long; 0: any number */
    int64_t most;
    /* sets how long a wait may last until the transport calls it a hang, 0: its default; NULL:
       it has no such limit, or finds a deadlock without one */
    void (*patience)(double seconds);
    int own_device; /* it reads and writes memory of its own kind of device, and of no other */
} transport_maker;

#ifndef TRANSPORT_SECONDS
#define TRANSPORT_SECONDS 120 /* for the longest single run of ranks */
#endif
#define RANKS 8
#define TRY(call) \
    do { \
        seqpar_status try_ = (call); \
        if (try_) return try_; \
    } while (0)
#define COUNT(list) ((int64_t)(sizeof(list) / sizeof *(list)))

/* ---- the ledger: what ranks have to say, a line each; a rank that has come to its end says "+" ---- */

static int ledger = -1;
/* 0: another process reads it, where several go through this suite in step */
static int ledger_reads = 1;
static void ledger_open(void) {
    FILE *file = ledger < 0 ? tmpfile() : NULL;
    if (file) ledger = fileno(file);
    if (file) fcntl(ledger, F_SETFL, O_APPEND); /* one write, one line, whoever writes */
}

__attribute__((format(printf, 1, 2))) static void ledger_write(const char *format, ...) {
    char line[600];
    va_list args;
    int n;
    va_start(args, format);
    n = vsnprintf(line, sizeof line - 1, format, args);
    va_end(args);
    if (n > (int)sizeof line - 2) n = sizeof line - 2;
    line[n++] = '\n';
    if (write(ledger, line, (size_t)n) != n) abort();
}

/* Expects that no rank complained; returns how many came to their end. */
static int64_t ledger_read(void) {
    char text[4096] = "", *line, *rest = text;
    int64_t ended = 0;
    if (!ledger_reads) return -1;
    ssize_t n = pread(ledger, text, sizeof text - 1, 0);
    for (text[n > 0 ? n : 0] = 0; (line = strtok_r(rest, "\n", &rest));)
        if (!strcmp(line, "+"))
            ended++;
        else
            test_expect(0, "%s", line);
    if (ftruncate(ledger, 0)) abort();
    return ended;
}
#define EXPECT(condition, ...) \
    do { \
        if (!(condition)) ledger_write(__VA_ARGS__); \
    } while (0)

/* ---- the bell: one rank tells another something outside the transport under test ---- */

static int bell[2] = {-1, -1};
static void bell_open(void) { /* a failed run may have left rings in the pipe */
    struct pollfd on;
    char ring;
    if (bell[0] < 0 && pipe(bell)) abort();
    on = (struct pollfd){bell[0], POLLIN, 0};
    while (poll(&on, 1, 0) == 1 && read(bell[0], &ring, 1) == 1) {
    }
}

static void bell_ring(void) {
    if (write(bell[1], "!", 1) != 1) abort();
}

/* Whether it rings within 20 s; stands for a rank that computes all the while. */
static int bell_heard(void) {
    struct pollfd on = {bell[0], POLLIN, 0};
    char ring;
    return poll(&on, 1, 20000) == 1 && read(bell[0], &ring, 1) == 1;
}

typedef struct watched {
    seqpar_rank_fn fn;
    void *user;
} watched;

static seqpar_status rank_watched(seqpar_comm *world, void *user) {
    const watched *w = user;
    seqpar_status status;
    test_limit(TRANSPORT_SECONDS); /* in a process of its own nobody else would end it */
    status = w->fn(world, w->user);
    ledger_write("+");
    return status;
}

static seqpar_status transport_run(const transport_maker *maker, int64_t ranks,
                                   seqpar_rank_fn fn, void *user, seqpar_error *error) {
    watched w = {fn, user};
    seqpar_status status;
    int64_t ended;
    ledger_open();
    bell_open();
    memset(error, 0, sizeof *error);
    if (!maker->processes) test_limit(TRANSPORT_SECONDS); /* the last resort against a hang */
    status = maker->run(ranks, rank_watched, &w, error);
    ended = ledger_read();
    test_expect(ended == ranks || ended < 0 || status, "%lld of %lld ranks came to their end",
                (long long)ended, (long long)ranks);
    return status;
}

static void transport_run_well(const transport_maker *maker, int64_t ranks, seqpar_rank_fn fn,
                               void *user) {
    seqpar_error error;
    seqpar_status status = transport_run(maker, ranks, fn, user, &error);
    test_expect(!status, "P %lld: %s: %s", (long long)ranks, seqpar_status_name(status),
                error.text);
}

static uint64_t mix(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    uint64_t x = (((a * 1000003 + b) * 1000003 + c) * 1000003 + d + test_seed) *
                 UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 29)) * UINT64_C(0xbf58476d1ce4e5b9);
    return x ^ (x >> 32);
}

static void fill(unsigned char *data, int64_t bytes, uint64_t key) {
    int64_t i;
    for (i = 0; i < bytes; i++)
        data[i] = (unsigned char)((key + (uint64_t)i) * UINT64_C(0x9e3779b97f4a7c15) >> 40);
}

static int64_t wrong_bits(const unsigned char *data, int64_t bytes, uint64_t key) {
    int64_t i, bits = 0;
    for (i = 0; i < bytes; i++)
        bits += __builtin_popcount(
            data[i] ^
            (unsigned char)((key + (uint64_t)i) * UINT64_C(0x9e3779b97f4a7c15) >> 40));
    return bits;
}

/* ---- mail: groups of messages between all pairs, the own rank included, several groups in flight ---- */

#define GROUPS 5

typedef struct mail { /* one group as one rank sees it */
    seqpar_transfer sends[2 * RANKS], recvs[2 * RANKS];
    seqpar_group group;
    seqpar_request request;
} mail;

typedef struct post { /* what all ranks agree on */
    uint64_t key;
    int64_t letters; /* messages from each rank to each in a group: 1 or 2 */
    /* 1: some messages take long to copy; 2: some are larger than any buffer on their way */
    int big;
} post;

static uint64_t letter_key(const post *p, int64_t group, int64_t from, int64_t to,
                           int64_t number) {
    return mix(p->key, (uint64_t)group, (uint64_t)(from * RANKS + to), (uint64_t)number);
}

static int64_t letter_bytes(const post *p, uint64_t key) {
    if (key % 5 == 0) return 0;
    if (p->big == 2 && key % 29 == 1) return (1 << 20) + (int64_t)(key % 300007);
    return (int64_t)(p->big && key % 7 == 1 ? key % 50021 : key % 271);
}

static seqpar_transfer letter_new(const post *p, int64_t peer, uint64_t key, int sending) {
    int64_t bytes = letter_bytes(p, key);
    seqpar_transfer t = {peer, bytes ? malloc((size_t)bytes) : NULL, bytes};
    if (sending)
        fill(t.data, bytes, key);
    else if (bytes)
        memset(t.data, 0xA5, (size_t)bytes);
    return t;
}

static void mail_write(mail *m, const post *p, int64_t group, int64_t rank, int64_t size) {
    int64_t n = 0, i, peer;
    for (i = 0; i < p->letters; i++)
        for (peer = 0; peer < size; peer++, n++) {
            m->sends[n] = letter_new(p, peer, letter_key(p, group, rank, peer, i), 1);
            m->recvs[n] = letter_new(p, peer, letter_key(p, group, peer, rank, i), 0);
        }
    m->group = (seqpar_group){"mail", group, m->sends, n, m->recvs, n};
}

/* Checks and frees all messages; returns how many bits are wrong. *worst: number, from 1, of
   the last wrong message. */
static int64_t mail_read(mail *m, const post *p, int64_t group, int64_t rank, int64_t size,
                         int64_t *worst) {
    int64_t n, bits, total = 0;
    for (n = 0; n < m->group.recv_count; n++) {
        const seqpar_transfer *t = &m->recvs[n];
        bits = wrong_bits(t->data, t->bytes, letter_key(p, group, t->peer, rank, n / size));
        if (bits && worst) *worst = n + 1;
        total += bits;
        free(m->sends[n].data);
        free(m->recvs[n].data);
    }
    return total;
}

/* Waits for all groups in an order of this rank's own. */
static seqpar_status mail_wait(seqpar_comm *comm, mail *m, int64_t groups, uint64_t key) {
    int64_t order[GROUPS], i, j, t;
    for (i = 0; i < groups; i++) order[i] = i;
    for (i = groups - 1; i > 0; i--) {
        j = (int64_t)(mix(key, (uint64_t)i, (uint64_t)comm->rank, 77) % (uint64_t)(i + 1));
        t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
    for (i = 0; i < groups; i++) TRY(seqpar_comm_wait(comm, &m[order[i]].request, NULL));
    return SEQPAR_OK;
}

/* Sends, waits and checks all groups; *bits gets what was damaged. */
static seqpar_status mail_run(seqpar_comm *comm, const post *p, int64_t groups, int64_t *bits,
                              int64_t *worst) {
    mail m[GROUPS];
    seqpar_status status = SEQPAR_OK;
    int64_t g;
    for (g = 0, *bits = 0; g < groups; g++) mail_write(&m[g], p, g, comm->rank, comm->size);
    for (g = 0; !status && g < groups; g++)
        status = seqpar_comm_begin(comm, &m[g].group, NULL, &m[g].request);
    if (!status) status = mail_wait(comm, m, groups, p->key);
    for (g = 0; g < groups; g++) *bits += mail_read(&m[g], p, g, comm->rank, comm->size, worst);
    return status;
}

static seqpar_status rank_mail(seqpar_comm *world, void *user) {
    int64_t round, bits;
    for (round = 0; round < 6; round++) {
        post p = *(const post *)user;
        p.key += (uint64_t)round;
        TRY(mail_run(world, &p, GROUPS, &bits, NULL));
        EXPECT(bits == 0, "rank %lld, round %lld: %lld bits are wrong", (long long)world->rank,
               (long long)round, (long long)bits);
    }
    return SEQPAR_OK;
}

/* Messages between two ranks match in order of posting, whoever is waited for first. */
static seqpar_status rank_order(seqpar_comm *world, void *user) {
    int64_t next = (world->rank + 1) % world->size;
    int64_t last = (world->rank + world->size - 1) % world->size;
    int64_t out[7], in[7], i;
    seqpar_request request[7];
    (void)user;
    for (i = 0; i < 7; i++) {
        seqpar_transfer send = {next, &out[i], 8}, recv = {last, &in[i], 8};
        seqpar_group group = {"numbered", i, &send, 1, &recv, 1};
        out[i] = 100 * world->rank + i;
        in[i] = -1;
        TRY(seqpar_comm_begin(world, &group, NULL, &request[i]));
    }
    for (i = 6; i >= 0; i--) {
        TRY(seqpar_comm_wait(world, &request[i], NULL));
        EXPECT(in[i] == 100 * last + i, "message %lld is %lld", (long long)i, (long long)in[i]);
        EXPECT(!request[i].state && !seqpar_comm_wait(world, &request[i], NULL),
               "a second wait is not free");
    }
    return SEQPAR_OK;
}

/* ---- large exchanges: more than any buffer on the way holds, all at once ---- */

#define LARGE (INT64_C(3) << 20)

/* Everybody sends LARGE to everybody, itself included, in one group. */
static seqpar_status rank_flood(seqpar_comm *world, void *user) {
    seqpar_transfer sends[RANKS], recvs[RANKS];
    seqpar_group group = {"flood", 0, sends, world->size, recvs, world->size};
    seqpar_request request;
    seqpar_status status;
    int64_t r, me = world->rank;
    (void)user;
    for (r = 0; r < world->size; r++) {
        sends[r] = (seqpar_transfer){r, malloc(LARGE), LARGE};
        recvs[r] = (seqpar_transfer){r, calloc(1, LARGE), LARGE};
        fill(sends[r].data, LARGE, mix(11, (uint64_t)me, (uint64_t)r, 0));
    }
    status = seqpar_comm_begin(world, &group, NULL, &request);
    if (!status) status = seqpar_comm_wait(world, &request, NULL);
    for (r = 0; r < world->size; r++) {
        EXPECT(status ||
                   !wrong_bits(recvs[r].data, LARGE, mix(11, (uint64_t)r, (uint64_t)me, 0)),
               "rank %lld has not what rank %lld sent", (long long)me, (long long)r);
        free(sends[r].data);
        free(recvs[r].data);
    }
    return status;
}

/* LARGE to the next rank, sends and receives in groups of their own. Sends are begun first, and
   waited for first in one round, last in the other. */
static seqpar_status rank_one_way(seqpar_comm *world, void *user) {
    int64_t me = world->rank, next = (me + 1) % world->size;
    int64_t last = (me + world->size - 1) % world->size, round;
    unsigned char *out = malloc(LARGE), *in = malloc(LARGE);
    seqpar_transfer send = {next, out, LARGE}, recv = {last, in, LARGE};
    seqpar_group sending = {"one way", 0, &send, 1, NULL, 0};
    seqpar_group receiving = {"one way", 0, NULL, 0, &recv, 1};
    seqpar_request request[2];
    seqpar_status status = SEQPAR_OK;
    (void)user;
    for (round = 0; !status && round < 2 && world->size > 1; round++) {
        fill(out, LARGE, mix(13, (uint64_t)me, (uint64_t)round, 0));
        memset(in, 0, LARGE);
        status = seqpar_comm_begin(world, &sending, NULL, &request[0]);
        if (!status) status = seqpar_comm_begin(world, &receiving, NULL, &request[1]);
        if (!status) status = seqpar_comm_wait(world, &request[round], NULL);
        if (!status) status = seqpar_comm_wait(world, &request[1 - round], NULL);
        EXPECT(status || !wrong_bits(in, LARGE, mix(13, (uint64_t)last, (uint64_t)round, 0)),
               "rank %lld, round %lld: wrong bits", (long long)me, (long long)round);
    }
    free(out);
    free(in);
    return status;
}

static seqpar_status rank_large_gather(seqpar_comm *world, void *user) {
    unsigned char *all = malloc((size_t)(LARGE * world->size));
    int64_t bytes[RANKS], r, me = world->rank;
    seqpar_status status;
    (void)user;
    for (r = 0; r < world->size; r++) bytes[r] = LARGE;
    fill(all + me * LARGE, LARGE, mix(17, (uint64_t)me, 0, 0));
    status = seqpar_comm_all_gather(world, all, all + me * LARGE, bytes, "in place");
    for (r = 0; !status && r < world->size; r++)
        EXPECT(!wrong_bits(all + r * LARGE, LARGE, mix(17, (uint64_t)r, 0, 0)),
               "rank %lld has not the part of rank %lld", (long long)me, (long long)r);
    free(all);
    return status;
}

/* ---- collectives ---- */

static int64_t part_bytes(int64_t round, int64_t rank) {
    return rank % 3 == round % 3 ? 0 : (rank * 37 + round * 11) % 101;
}

static seqpar_status rank_all_gather(seqpar_comm *world, void *user) {
    int64_t round, r, at, bytes[RANKS];
    (void)user;
    for (round = 0; round < 7; round++) {
        unsigned char all[101 * RANKS + 1], part[101];
        for (r = at = 0; r < world->size; at += bytes[r++]) bytes[r] = part_bytes(round, r);
        memset(all, 0xA5, sizeof all);
        fill(part, bytes[world->rank], mix((uint64_t)round, (uint64_t)world->rank, 1, 2));
        TRY(seqpar_comm_all_gather(world, all, part, bytes, "parts"));
        EXPECT(all[at] == 0xA5, "bytes behind the parts were written");
        for (r = at = 0; r < world->size; at += bytes[r++])
            EXPECT(!wrong_bits(all + at, bytes[r], mix((uint64_t)round, (uint64_t)r, 1, 2)),
                   "round %lld: the part of rank %lld", (long long)round, (long long)r);
    }
    return SEQPAR_OK;
}

static seqpar_status rank_broadcast(seqpar_comm *world, void *user) {
    int64_t root;
    (void)user;
    for (root = 0; root < world->size; root++) {
        unsigned char data[53];
        fill(data, 53, mix((uint64_t)world->rank, (uint64_t)root, 3, 4));
        TRY(seqpar_comm_broadcast(world, data, 53, root));
        EXPECT(!wrong_bits(data, 53, mix((uint64_t)root, (uint64_t)root, 3, 4)),
               "rank %lld has not what rank %lld sent", (long long)world->rank,
               (long long)root);
        TRY(seqpar_comm_broadcast(world, NULL, 0, root));
    }
    return SEQPAR_OK;
}

static seqpar_status rank_reduce(seqpar_comm *world, void *user) {
    int64_t p = world->size, r = world->rank;
    int64_t sum[5] = {r, -r, INT64_C(1) << 40, 0, r == p - 1 ? -7 : 0};
    int64_t max[4] = {r, -r - 1, INT64_MIN + r, r == 1 ? INT64_MAX : -5};
    (void)user;
    TRY(seqpar_comm_sum_i64(world, sum, 5));
    TRY(seqpar_comm_max_i64(world, max, 4));
    EXPECT(sum[0] == p * (p - 1) / 2 && sum[1] == -sum[0] && sum[2] == p << 40 && sum[3] == 0 &&
               sum[4] == -7,
           "sums");
    EXPECT(max[0] == p - 1 && max[1] == -1 && max[2] == INT64_MIN + p - 1 &&
               max[3] == (p > 1 ? INT64_MAX : -5),
           "maxima");
    TRY(seqpar_comm_sum_i64(world, NULL, 0));
    return SEQPAR_OK;
}

/* ---- barrier ---- */

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t); /* one clock for all processes */
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* No rank leaves the barrier before the last one enters; every rank is late in two rounds. */
static seqpar_status rank_enters(seqpar_comm *world, void *user) {
    int64_t round, entered, left;
    (void)user;
    for (round = 0; round < 2 * world->size; round++) {
        if (round % world->size == world->rank) usleep(2000);
        entered = now_ns();
        TRY(seqpar_comm_barrier(world));
        left = now_ns();
        TRY(seqpar_comm_max_i64(world, &entered, 1));
        EXPECT(left >= entered, "round %lld: rank %lld left %lld ns before all had come",
               (long long)round, (long long)world->rank, (long long)(entered - left));
    }
    return SEQPAR_OK;
}

/* ---- parts of a world ---- */

/* The ranks of a sub-comm, in its order, as their world ranks. */
static seqpar_status expect_members(seqpar_comm *sub, int64_t world_rank, const int64_t *want,
                                    int64_t count) {
    int64_t all[RANKS], bytes[RANKS], i;
    for (i = 0; i < RANKS; i++) bytes[i] = 8;
    EXPECT(sub->size == count && want[sub->rank] == world_rank,
           "rank %lld is number %lld of %lld", (long long)world_rank, (long long)sub->rank,
           (long long)sub->size);
    TRY(seqpar_comm_all_gather(sub, all, &world_rank, bytes, "members"));
    for (i = 0; i < count; i++)
        EXPECT(all[i] == want[i], "place %lld has rank %lld, not %lld", (long long)i,
               (long long)all[i], (long long)want[i]);
    return SEQPAR_OK;
}

/* Mail on three comms at once, each with its own data; waits in another order than begins. */
static seqpar_status talk_at_once(seqpar_comm *const *comms, const uint64_t *keys) {
    mail m[3][2];
    int64_t c, g, bits, round;
    for (round = 0; round < 5; round++) {
        for (g = 0; g < 2; g++)
            for (c = 0; c < 3; c++) {
                post p = {.key = keys[c] + (uint64_t)round, .letters = 1};
                mail_write(&m[c][g], &p, g, comms[c]->rank, comms[c]->size);
                TRY(seqpar_comm_begin(comms[c], &m[c][g].group, NULL, &m[c][g].request));
            }
        for (c = 2; c >= 0; c--) {
            post p = {.key = keys[c] + (uint64_t)round, .letters = 1};
            TRY(mail_wait(comms[c], m[c], 2, p.key));
            for (g = 0; g < 2; g++) {
                bits = mail_read(&m[c][g], &p, g, comms[c]->rank, comms[c]->size, NULL);
                EXPECT(bits == 0, "comm %lld: %lld bits are somebody else's", (long long)c,
                       (long long)bits);
            }
        }
    }
    return SEQPAR_OK;
}

/* Groups of uneven size in reversed order, and those reversed again; all three comms are
   used at once. */
static seqpar_status rank_uneven(seqpar_comm *world, void *user) {
    /* 0 and 3; the others */
    int64_t color = world->rank * world->rank % 3 - 1, down[RANKS], up[RANKS], n = 0, r;
    uint64_t keys[3] = {7, (uint64_t)(1000 + color), (uint64_t)(2000 + color)};
    seqpar_comm *comms[3] = {world, NULL, NULL};
    (void)user;
    for (r = world->size - 1; r >= 0; r--)
        if (r * r % 3 - 1 == color) down[n++] = r;
    for (r = 0; r < n; r++) up[r] = down[n - 1 - r];
    TRY(seqpar_comm_split(world, color, -10 * world->rank, &comms[1]));
    EXPECT(!comms[1]->messages_sent && !comms[1]->bytes_sent, "a new comm has sent something");
    TRY(seqpar_comm_split(comms[1], 5, -comms[1]->rank, &comms[2]));
    EXPECT(comms[1]->error == world->error && comms[2]->error == world->error,
           "a part has another place for errors than the world");
    TRY(expect_members(comms[1], world->rank, down, n));
    TRY(expect_members(comms[2], world->rank, up, n));
    TRY(talk_at_once(comms, keys));
    seqpar_comm_free(comms[1]); /* a part of a part outlives it */
    TRY(seqpar_comm_barrier(comms[2]));
    seqpar_comm_free(comms[2]);
    return seqpar_comm_barrier(world);
}

/* Two comms of the same ranks do not mix their messages, although odd ranks begin them in the
   other order. */
static seqpar_status rank_twins(seqpar_comm *world, void *user) {
    int64_t i, me = world->rank, next = (me + 1) % world->size;
    int64_t last = (me + world->size - 1) % world->size, out[2], in[2] = {-1, -1};
    seqpar_comm *twin[2];
    seqpar_request request[2];
    (void)user;
    for (i = 0; i < 2; i++) TRY(seqpar_comm_split(world, 0, me, &twin[i]));
    for (i = 0; i < 2; i++) {
        int64_t t = me % 2 ? 1 - i : i;
        seqpar_transfer send = {next, &out[t], 8}, recv = {last, &in[t], 8};
        seqpar_group group = {"twins", t, &send, 1, &recv, 1};
        out[t] = 10 * me + t;
        TRY(seqpar_comm_begin(twin[t], &group, NULL, &request[t]));
    }
    for (i = 0; i < 2; i++) TRY(seqpar_comm_wait(twin[i], &request[i], NULL));
    for (i = 0; i < 2; i++)
        EXPECT(in[i] == 10 * last + i, "twin %lld of rank %lld got %lld", (long long)i,
               (long long)me, (long long)in[i]);
    for (i = 0; i < 2; i++) seqpar_comm_free(twin[i]);
    return SEQPAR_OK;
}

/* ---- memory of a device ---- */

/* Device memory is one arena. Its bytes are XORed with a code of their address, and only
   copy_coded decodes them: a transport that uses memcpy delivers wrong bytes. */
enum { ARENA = 3 << 20 };
static unsigned char arena[RANKS][ARENA];

static unsigned char arena_code(const void *p) {
    const unsigned char *at = p, *begin = &arena[0][0];
    if (at < begin || at >= begin + sizeof arena) return 0;
    return (unsigned char)((uint64_t)(at - begin + 1) * UINT64_C(0x9e3779b97f4a7c15) >> 40 | 1);
}

static void copy_coded(seqpar_device *device, void *to, const void *from, int64_t bytes,
                       void *queue) {
    unsigned char *t = to;
    const unsigned char *f = from;
    (void)device;
    (void)queue;
    for (int64_t i = 0; i < bytes; i++)
        t[i] = (unsigned char)(f[i] ^ arena_code(f + i) ^ arena_code(t + i));
}

/* One message to the next rank and one from the last; `way`: 1 sends from the device, 2
   receives into it, 3 both. */
static seqpar_status device_mail(seqpar_comm *comm, seqpar_device *device, int64_t bytes,
                                 int way) {
    int64_t me = comm->rank, next = (me + 1) % comm->size;
    int64_t last = (me + comm->size - 1) % comm->size;
    unsigned char *host = malloc((size_t)(2 * bytes + 2)), *memory = arena[me];
    seqpar_transfer send = {next, way & 1 ? memory : host, bytes};
    seqpar_transfer recv = {last, way & 2 ? memory + ARENA / 2 + 5 : host + bytes + 1, bytes};
    seqpar_group group = {"device memory", way, &send, 1, &recv, 1};
    seqpar_request request;
    seqpar_status status;
    fill(host, bytes, mix(31, (uint64_t)me, (uint64_t)bytes, (uint64_t)way));
    if (way & 1) copy_coded(device, memory, host, bytes, NULL);
    status = seqpar_comm_begin(comm, &group, NULL, &request);
    if (!status) status = seqpar_comm_wait(comm, &request, NULL);
    if (way & 2) copy_coded(device, host + bytes + 1, recv.data, bytes, NULL);
    EXPECT(status || !wrong_bits(host + bytes + 1, bytes,
                                 mix(31, (uint64_t)last, (uint64_t)bytes, (uint64_t)way)),
           "rank %lld: %lld bytes %s a device are wrong", (long long)me, (long long)bytes,
           way == 1   ? "out of"
           : way == 2 ? "into"
                      : "from device to");
    free(host);
    return status;
}

/* A context lends its device to the world and to the part that it makes. */
static seqpar_status rank_device_memory(seqpar_comm *world, void *user) {
    static const int64_t bytes[] = {1, 0, 271, 40000, (1 << 20) + 7};
    seqpar_device *device = seqpar_device_reference();
    seqpar_ctx ctx;
    seqpar_status status;
    (void)user;
    device->copy = copy_coded;
    device->own_memory = 1;
    status = seqpar_ctx_open(&ctx, world, device, world->size);
    for (int64_t i = 0; !status && i < COUNT(bytes); i++)
        for (int way = 1; !status && way < 4; way++) {
            status = device_mail(world, device, bytes[i], way);
            if (!status) status = device_mail(ctx.sp, device, bytes[i], way);
        }
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

/* ---- counters ---- */

static seqpar_status rank_count(seqpar_comm *world, void *user) {
    int64_t p = world->size, r = world->rank, bytes[RANKS], i, want_bytes = 0;
    int64_t want_messages = 0;
    char all[64 * RANKS], own[64] = {0}, back[64];
    seqpar_transfer send = {r, own, 41}, recv = {r, back, 41};
    seqpar_group to_self = {"to myself", 0, &send, 1, &recv, 1};
    seqpar_request request;
    (void)user;
    for (i = 0; i < p; i++) bytes[i] = 5 * i + 3;
    TRY(seqpar_comm_all_gather(world, all, own, bytes, "counted"));
    TRY(seqpar_comm_broadcast(world, own, 29, p - 1));
    TRY(seqpar_comm_begin(world, &to_self, NULL, &request));
    TRY(seqpar_comm_wait(world, &request, NULL));
    want_bytes += (p - 1) * (5 * r + 3) + (r == p - 1 ? (p - 1) * 29 : 0);
    want_messages += (p - 1) + (r == p - 1 ? p - 1 : 0);
    EXPECT(world->bytes_sent == want_bytes, "rank %lld of %lld sent %lld bytes, not %lld",
           (long long)r, (long long)p, (long long)world->bytes_sent, (long long)want_bytes);
    EXPECT(world->messages_sent == want_messages,
           "rank %lld of %lld sent %lld messages, not %lld", (long long)r, (long long)p,
           (long long)world->messages_sent, (long long)want_messages);
    return SEQPAR_OK;
}

/* ---- failures: what the world says, and what each rank says ---- */

typedef struct failure {
    const char *name;
    int64_t ranks;
    seqpar_rank_fn fn;
    seqpar_status status;
    int64_t rank;         /* the rank that the world's error names; -1: not compared */
    const char *words[6]; /* parts of the world's sentence */
    seqpar_status peers;  /* what the other ranks return; 0: not compared */
    const char *echo;     /* part of the other ranks' sentence */
} failure;

static const failure *failing; /* the case that runs */

/* Runs what a rank does, and compares what the transport tells the ranks that are not at
   fault. */
static seqpar_status rank_observed(seqpar_comm *world, void *user) {
    seqpar_status status = failing->fn(world, user);
    if (!failing->peers || world->rank == failing->rank) return status;
    EXPECT(status == failing->peers, "rank %lld ends with %s: %s", (long long)world->rank,
           seqpar_status_name(status), world->error->text);
    EXPECT(world->error->status == status && world->error->rank == world->rank,
           "rank %lld: its error is not its own", (long long)world->rank);
    EXPECT(strstr(world->error->text, failing->echo) != NULL,
           "rank %lld does not repeat it: %s", (long long)world->rank, world->error->text);
    return status;
}

/* Runs a case and compares how the world ends. Status 0 in the table: any error will do. */
static void expect_failure(const transport_maker *maker, const failure *f) {
    seqpar_error error;
    seqpar_status status;
    int64_t w;
    failing = f;
    status = transport_run(maker, f->ranks, rank_observed, NULL, &error);
    test_expect((f->status ? status == f->status : status) && error.status == status,
                "the world ends with %s: %s", seqpar_status_name(status), error.text);
    test_expect(f->rank < 0 || error.rank == f->rank, "it happened on rank %lld, not %lld: %s",
                (long long)error.rank, (long long)f->rank, error.text);
    for (w = 0; w < 6 && f->words[w]; w++)
        test_expect(strstr(error.text, f->words[w]) != NULL, "'%s' is not in: %s", f->words[w],
                    error.text);
    test_end("%s_%s", maker->name, f->name);
}

/* Runs all cases of a table, then repeats them. An abort may come at any moment, so of repeats
   only the final status is compared. */
static void expect_failures(const transport_maker *maker, const failure *table, int64_t count,
                            int64_t repeats) {
    seqpar_error error;
    int64_t i;
    for (i = 0; i < count; i++)
        if (!maker->most || table[i].ranks <= maker->most) expect_failure(maker, &table[i]);
    for (i = 0; i < repeats && !test_why[0]; i++) {
        const failure *f = failing = &table[i % count];
        seqpar_status status = transport_run(maker, f->ranks, rank_observed, NULL, &error);
        test_expect(status && (!f->status || status == f->status),
                    "%s: another end in repeat %lld: %s", f->name, (long long)i, error.text);
    }
}

static seqpar_status exchange(seqpar_comm *comm, const char *name, int64_t step,
                              int64_t send_to, int64_t send_bytes, int64_t recv_from,
                              int64_t recv_bytes) {
    char out[64] = {0}, in[64];
    seqpar_transfer send = {send_to, out, send_bytes}, recv = {recv_from, in, recv_bytes};
    seqpar_group group = {name, step, &send, send_to >= 0, &recv, recv_from >= 0};
    seqpar_request request;
    TRY(seqpar_comm_begin(comm, &group, NULL, &request));
    return seqpar_comm_wait(comm, &request, NULL);
}

static seqpar_status rank_wrong_size(seqpar_comm *world, void *user) {
    (void)user;
    /* a transport that buffers has nothing to say here */
    if (world->rank == 1) TRY(exchange(world, "kv ring", 3, 2, 37, -1, 0));
    if (world->rank == 2) return exchange(world, "kv ring", 3, -1, 0, 1, 41);
    return seqpar_comm_barrier(world);
}

/* of the same size, but of another group, or of another step of it */
static seqpar_status rank_other_group(seqpar_comm *world, void *user) {
    (void)user;
    if (world->rank == 1) TRY(exchange(world, "dk, dv", 3, 2, 37, -1, 0));
    if (world->rank == 2) return exchange(world, "kv ring", 3, -1, 0, 1, 37);
    return seqpar_comm_barrier(world);
}

static seqpar_status rank_other_step(seqpar_comm *world, void *user) {
    (void)user;
    for (int64_t i = 0; i < 2; i++) {
        /* rank 0 goes backwards */
        int64_t step = world->rank ? i : 1 - i;
        TRY(exchange(world, "gradients", step, 1 - world->rank, 8, 1 - world->rank, 8));
    }
    return seqpar_comm_barrier(world);
}

static seqpar_status rank_says_no(seqpar_comm *world, void *user) {
    (void)user;
    TRY(seqpar_comm_barrier(world));
    if (world->rank == 2)
        return seqpar_fail(world->error, SEQPAR_ERR_OPTION, "pack_len %d does not suit me",
                           4711);
    TRY(exchange(world, "ring", 0, (world->rank + 1) % world->size, 8,
                 (world->rank + world->size - 1) % world->size, 8));
    return seqpar_comm_barrier(world);
}

/* a code without a sentence */
static seqpar_status rank_fails_silently(seqpar_comm *world, void *user) {
    (void)user;
    return world->rank == 1 ? SEQPAR_ERR_NOT_FINITE : seqpar_comm_barrier(world);
}

static seqpar_status rank_aborts(seqpar_comm *world, void *user) {
    (void)user;
    if (world->rank != 1) return seqpar_comm_barrier(world);
    seqpar_comm_abort(world, "stop, the disk is full");
    return SEQPAR_OK;
}

/* the other group hears of it as well */
static seqpar_status rank_fails_in_a_group(seqpar_comm *world, void *user) {
    seqpar_comm *sub;
    seqpar_status status;
    (void)user;
    TRY(seqpar_comm_split(world, world->rank / 2, 0, &sub));
    if (world->rank == 3)
        status = seqpar_fail(world->error, SEQPAR_ERR_SIZE, "group two, rank three");
    else
        for (status = SEQPAR_OK; !status;) status = seqpar_comm_barrier(sub);
    seqpar_comm_free(sub);
    return status;
}

static seqpar_status rank_fails_before_a_split(seqpar_comm *world, void *user) {
    seqpar_comm *sub;
    (void)user;
    if (world->rank == 1) return seqpar_fail(world->error, SEQPAR_ERR_WORLD, "no mesh for me");
    TRY(seqpar_comm_split(world, 0, 0, &sub));
    seqpar_comm_free(sub);
    return SEQPAR_OK;
}

static seqpar_status rank_leaves_early(seqpar_comm *world, void *user) {
    (void)user;
    return world->rank == 0 ? SEQPAR_OK : seqpar_comm_barrier(world);
}

/* Rank 1 aborts with large messages in flight: its text must reach the others all the same, and
   its own wait must return. */
static seqpar_status rank_aborts_busy(seqpar_comm *world, void *user) {
    seqpar_transfer sends[RANKS];
    seqpar_group group = {"never asked for", 0, sends, 0, NULL, 0};
    seqpar_request request;
    seqpar_comm *aside;
    char *data;
    seqpar_status status;
    (void)user;
    TRY(seqpar_comm_split(world, 0, 0, &aside));
    data = calloc(1, LARGE);
    for (int64_t r = 0; r < world->size; r++)
        if (r != 1) sends[group.send_count++] = (seqpar_transfer){r, data, LARGE};
    status = world->rank == 1 ? seqpar_comm_begin(aside, &group, NULL, &request)
                              : seqpar_comm_barrier(world);
    if (world->rank == 1)
        seqpar_comm_abort(world, "stop, in the middle of it"),
            seqpar_comm_abort(world, "the second text is not heard");
    if (world->rank == 1 && !status) seqpar_comm_wait(aside, &request, NULL);
    free(data);
    seqpar_comm_free(aside);
    return status;
}

/* Rank 1 aborts on its own part; the next wait of the others, on another part, returns it. */
static seqpar_status rank_aborts_a_part(seqpar_comm *world, void *user) {
    seqpar_comm *sub;
    seqpar_status status;
    (void)user;
    TRY(seqpar_comm_split(world, world->rank == 1, 0, &sub));
    if (world->rank == 1)
        seqpar_comm_abort(sub, "said on a part"), status = SEQPAR_OK;
    else
        for (status = SEQPAR_OK; !status;) status = seqpar_comm_barrier(sub);
    seqpar_comm_free(sub);
    return status;
}

/* 3 MB where 8 bytes are expected: nothing is written behind those. */
static seqpar_status rank_much_too_long(seqpar_comm *world, void *user) {
    char *data = calloc(1, LARGE), word[24];
    seqpar_transfer send = {1, data, LARGE}, recv = {0, word + 8, 8};
    seqpar_group group = {"too long", 6, &send, world->rank == 0, &recv, world->rank == 1};
    seqpar_request request;
    seqpar_status status;
    int i;
    (void)user;
    memset(word, 0x5A, sizeof word);
    status = seqpar_comm_begin(world, &group, NULL, &request);
    if (!status) status = seqpar_comm_wait(world, &request, NULL);
    if (!status) status = seqpar_comm_barrier(world);
    for (i = 0; i < 24; i++)
        EXPECT(i / 8 == 1 || word[i] == 0x5A, "byte %d beside the place was written", i - 8);
    free(data);
    return status;
}

static seqpar_status rank_nothing_for_something(seqpar_comm *world, void *user) {
    (void)user;
    TRY(exchange(world, "nothing", 2, world->rank == 0 ? 1 : -1, 0, world->rank == 1 ? 0 : -1,
                 8));
    return seqpar_comm_barrier(world);
}

/* Rank 0 has done its part and goes; the others are in no hurry to read what it sent. This
   is no error. */
static seqpar_status rank_leaves_in_peace(seqpar_comm *world, void *user) {
    seqpar_comm *others;
    unsigned char all[61], part[61];
    int64_t r;
    seqpar_status status;
    (void)user;
    TRY(seqpar_comm_split(world, world->rank == 0, 0, &others));
    fill(part, 61, 23);
    if (world->rank) usleep(3000);
    for (r = 1, status = SEQPAR_OK; !status && r < world->size; r++) {
        seqpar_transfer t = {world->rank ? 0 : r, world->rank ? all : part, 61};
        seqpar_group group = {"last words", r, &t, world->rank == 0, &t, world->rank == r};
        seqpar_request request;
        status = seqpar_comm_begin(world, &group, NULL, &request);
        if (!status) status = seqpar_comm_wait(world, &request, NULL);
    }
    EXPECT(status || !world->rank || !wrong_bits(all, 61, 23),
           "rank %lld has not the last words", (long long)world->rank);
    if (!status && world->rank) usleep(3000);
    if (!status && world->rank) status = seqpar_comm_barrier(others);
    seqpar_comm_free(others);
    return status;
}

static seqpar_status rank_sends_to_the_dead(seqpar_comm *world, void *user) {
    char *data = calloc(1, LARGE);
    seqpar_transfer send = {0, data, LARGE};
    seqpar_group group = {"too late", 0, &send, 1, NULL, 0};
    seqpar_request request;
    seqpar_status status = SEQPAR_OK;
    (void)user;
    if (world->rank == 1) status = seqpar_comm_begin(world, &group, NULL, &request);
    if (world->rank == 1 && !status) status = seqpar_comm_wait(world, &request, NULL);
    EXPECT(status || world->rank == 0, "a message to a rank that has ended was called sent");
    free(data);
    return status;
}

static seqpar_status rank_is_killed(seqpar_comm *world, void *user) {
    (void)user;
    TRY(seqpar_comm_barrier(world));
    if (world->rank == 1) raise(SIGKILL);
    return seqpar_comm_barrier(world);
}

/* Rank 1 computes; rank 0, which waits for it, hears of rank 2 all the same, and at once. */
static seqpar_status rank_fails_meanwhile(seqpar_comm *world, void *user) {
    seqpar_status status = seqpar_comm_barrier(world); /* may end with rank 2's error already */
    (void)user;
    if (world->rank == 2)
        return seqpar_fail(world->error, SEQPAR_ERR_NOT_FINITE, "the loss of step 7 is NaN");
    if (world->rank == 0) {
        if (!status) status = exchange(world, "long", 8, -1, 0, 1, 8);
        bell_ring();
        return status;
    }
    EXPECT(bell_heard(), "rank 0 waits on for rank 1 although rank 2 has failed");
    return status ? status : seqpar_comm_barrier(world);
}

/* Both wait for what the other would send later. */
static seqpar_status rank_waits_crosswise(seqpar_comm *world, void *user) {
    (void)user;
    TRY(exchange(world, "crosswise", 11, -1, 0, 1 - world->rank, 8));
    return exchange(world, "crosswise", 12, 1 - world->rank, 8, -1, 0);
}

/* Rank 1 does not come, as if it hung in its own code. */
static seqpar_status rank_stays_away(seqpar_comm *world, void *user) {
    seqpar_status status = seqpar_comm_barrier(world);
    (void)user;
    if (world->rank == 0) {
        if (!status) status = exchange(world, "nobody comes", 4, -1, 0, 1, 8);
        bell_ring();
        return status;
    }
    EXPECT(bell_heard(), "rank 0 waits for rank 1 without end");
    return status ? status : seqpar_comm_barrier(world);
}

static const failure transport_failures[] = {
    {"wrong_size",
     4,
     rank_wrong_size,
     SEQPAR_ERR_MESSAGE_SIZE,
     2,
     {"kv ring", "step 3", "rank 1", "37 bytes", "rank 2", "41"},
     SEQPAR_ERR_PEER,
     "rank 1 sent 37 bytes"},
    {"message_of_another_group",
     4,
     rank_other_group,
     SEQPAR_ERR_STEP,
     2,
     {"rank 2 is in 'kv ring' step 3", "rank 1 sent a message of 'dk, dv' step 3"},
     SEQPAR_ERR_PEER,
     "'dk, dv' step 3"},
    {"message_of_another_step",
     2,
     rank_other_step,
     SEQPAR_ERR_STEP,
     -1,
     {"'gradients' step 0", "'gradients' step 1"},
     0,
     NULL},
    {"much_too_long",
     2,
     rank_much_too_long,
     SEQPAR_ERR_MESSAGE_SIZE,
     1,
     {"too long", "3145728"},
     SEQPAR_ERR_PEER,
     "3145728"},
    {"nothing_for_something",
     3,
     rank_nothing_for_something,
     SEQPAR_ERR_MESSAGE_SIZE,
     1,
     {"'nothing' step 2"},
     SEQPAR_ERR_PEER,
     "'nothing' step 2"},
    {"error_ends_all",
     5,
     rank_says_no,
     SEQPAR_ERR_OPTION,
     2,
     {"pack_len 4711 does not suit me"},
     SEQPAR_ERR_PEER,
     "rank 2 failed: pack_len 4711 does not suit me"},
    {"silent_error",
     3,
     rank_fails_silently,
     SEQPAR_ERR_NOT_FINITE,
     1,
     {"NaN"},
     SEQPAR_ERR_PEER,
     "NaN"},
    {"abort_P2",
     2,
     rank_aborts,
     SEQPAR_ERR_PEER,
     1,
     {"stop, the disk is full"},
     SEQPAR_ERR_PEER,
     "stop, the disk is full"},
    {"abort_P5",
     5,
     rank_aborts,
     SEQPAR_ERR_PEER,
     1,
     {"stop, the disk is full"},
     SEQPAR_ERR_PEER,
     "stop, the disk is full"},
    {"abort_busy",
     4,
     rank_aborts_busy,
     SEQPAR_ERR_PEER,
     1,
     {"stop, in the middle of it"},
     SEQPAR_ERR_PEER,
     "stop, in the middle of it"},
    {"abort_of_a_part",
     4,
     rank_aborts_a_part,
     SEQPAR_ERR_PEER,
     1,
     {"said on a part"},
     SEQPAR_ERR_PEER,
     "said on a part"},
    {"error_in_a_group",
     4,
     rank_fails_in_a_group,
     SEQPAR_ERR_SIZE,
     3,
     {"group two, rank three"},
     SEQPAR_ERR_PEER,
     "group two, rank three"},
    {"error_before_a_split",
     3,
     rank_fails_before_a_split,
     SEQPAR_ERR_WORLD,
     1,
     {"no mesh for me"},
     SEQPAR_ERR_PEER,
     "no mesh for me"},
    {"early_end_P2", 2, rank_leaves_early, 0, -1, {"for rank 0, which has ended"}, 0, NULL},
    {"early_end_P5", 5, rank_leaves_early, 0, -1, {"for rank 0, which has ended"}, 0, NULL},
    {"send_to_the_dead", 2, rank_sends_to_the_dead, 0, -1, {"rank 0"}, 0, NULL},
    {"heard_while_another_computes",
     3,
     rank_fails_meanwhile,
     SEQPAR_ERR_NOT_FINITE,
     2,
     {"the loss of step 7 is NaN"},
     SEQPAR_ERR_PEER,
     "rank 2 failed: the loss of step 7 is NaN"},
};

static const failure transport_kill = {
    "rank_is_killed", 4, rank_is_killed, 0, -1, {"for rank 1, which has ended"}, 0, NULL};

static const failure transport_deadlock = {"deadlock_is_named",
                                           2,
                                           rank_waits_crosswise,
                                           0,
                                           -1,
                                           {"waits in 'crosswise' step 11 for rank"},
                                           0,
                                           NULL};

static const failure transport_hang = {"hang_is_named",
                                       2,
                                       rank_stays_away,
                                       SEQPAR_ERR_TIMEOUT,
                                       0,
                                       {"rank 0 waits in 'nobody comes' step 4 for rank 1"},
                                       SEQPAR_ERR_PEER,
                                       "rank 0 waits in 'nobody comes'"};

/* ---- the suite ---- */

static int64_t transport_most(const transport_maker *maker) {
    return maker->most && maker->most < 5 ? maker->most : 5;
}

static void transport_on_all(const transport_maker *maker, const char *name, seqpar_rank_fn fn,
                             void *user) {
    int64_t p;
    for (p = 1; p <= transport_most(maker); p++) transport_run_well(maker, p, fn, user);
    test_end("%s_%s", maker->name, name);
}

/* Mail: random groups of messages between all pairs; what is not small is rare, or this
   would take long. */
static void transport_exchanges(const transport_maker *maker) {
    int64_t p, big;
    for (p = 1; p <= transport_most(maker); p++) {
        for (big = 0; big < 3; big++) {
            post letters = {.key = (uint64_t)(100 * p + 1000 * big),
                            .letters = 1 + (p + big) % 2,
                            .big = (int)big};
            transport_run_well(maker, p, rank_mail, &letters);
        }
        test_end("%s_exchange_P%lld", maker->name, (long long)p);
    }
}

/* Two ranks wait for each other; one waits for another that never comes. */
static void transport_waits(const transport_maker *maker) {
    if (maker->patience) maker->patience(0.5);
    expect_failure(maker, &transport_deadlock);
    if (maker->patience) expect_failure(maker, &transport_hang);
    if (maker->patience) maker->patience(0);
}

/* ---- deadlocks that the suites of threads and of NCCL share ---- */

__attribute__((unused)) static seqpar_status rank_cross(seqpar_comm *world,
                                                        void *user) { /* both receive first */
    (void)user;
    TRY(exchange(world, "cross", 11, -1, 0, 1 - world->rank, 8));
    return exchange(world, "cross", 12, 1 - world->rank, 8, -1, 0);
}

__attribute__((unused)) static seqpar_status rank_cycle(seqpar_comm *world, void *user) {
    (void)user;
    return exchange(world, "cycle", world->rank, -1, 0, (world->rank + 1) % world->size, 8);
}

__attribute__((unused)) static seqpar_status rank_to_nobody(seqpar_comm *world, void *user) {
    (void)user;
    return exchange(world, "alone", 0, -1, 0, world->rank, 8);
}

#define DEADLOCK_CROSS \
    { \
        "deadlock_cross", 2, rank_cross, SEQPAR_ERR_DEADLOCK, -1, \
            {"rank 0 waits in 'cross' step 11 for rank 1", \
             "rank 1 waits in 'cross' step 11 for rank 0"}, \
            SEQPAR_ERR_DEADLOCK, "rank 0 waits in 'cross'" \
    }
#define DEADLOCK_CYCLE \
    { \
        "deadlock_cycle", 5, rank_cycle, SEQPAR_ERR_DEADLOCK, -1, \
            {"rank 4 waits in 'cycle' step 4 for rank 0", \
             "rank 1 waits in 'cycle' step 1 for rank 2"}, \
            SEQPAR_ERR_DEADLOCK, "'cycle'" \
    }
#define DEADLOCK_SELF \
    { \
        "deadlock_self", 1, rank_to_nobody, SEQPAR_ERR_DEADLOCK, 0, {"'alone'", "rank 0"}, 0, \
            NULL \
    }

__attribute__((unused)) static void transport_conformance(const transport_maker *maker) {
    static const struct {
        const char *name;
        seqpar_rank_fn fn;
    } table[] = {{"order", rank_order},           {"flood", rank_flood},
                 {"one_way", rank_one_way},       {"large_gather", rank_large_gather},
                 {"all_gather", rank_all_gather}, {"broadcast", rank_broadcast},
                 {"sum_max", rank_reduce},        {"barrier", rank_enters},
                 {"split_uneven", rank_uneven},   {"split_twins", rank_twins},
                 {"counters", rank_count},        {"early_end_in_peace", rank_leaves_in_peace}};
    int64_t i;
    transport_exchanges(maker);
    for (i = 0; i < COUNT(table); i++)
        transport_on_all(maker, table[i].name, table[i].fn, NULL);
    if (!maker->own_device) transport_on_all(maker, "device_memory", rank_device_memory, NULL);
    if (maker->processes) expect_failure(maker, &transport_kill);
    if (transport_most(maker) > 1) transport_waits(maker);
    expect_failures(maker, transport_failures, COUNT(transport_failures), maker->most ? 0 : 50);
    if (!maker->most) test_end("%s_failures_repeated", maker->name);
    test_limit(0);
}
#endif
