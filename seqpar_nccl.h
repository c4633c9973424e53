/* seqpar_nccl.h - v0.2.0 - a transport of seqpar over NCCL: ranks are GPUs - MIT or
   Unlicense */
/* SPDX-License-Identifier: MIT OR Unlicense */
/*
>>doc ------------------------------------------------------------------------------------------

    A rank is a GPU, driven by a process or by a thread. NCCL only moves bytes. seqpar adds up
    sums itself, in its own order, so the bits do not depend on NCCL's choice of algorithm.

    In exactly one C or C++ file:

        #define SEQPAR_IMPLEMENTATION           (the core, unless another file has it)
        #define SEQPAR_NCCL_IMPLEMENTATION
        #include "seqpar_nccl.h"

    and link with -lnccl -lcudart -lpthread. NCCL 2.18 or newer.

    CONTENTS: >>doc >>api >>socket >>referee >>rank >>abort >>launch >>progress >>table >>split
    >>open >>licence

HOW RANKS FIND EACH OTHER (seqpar_nccl_desc; the first that is set)
    comm     the caller's communicator and stream, which stay the caller's
    id       a ncclUniqueId that the caller handed to all ranks, for example

                 ncclUniqueId id;
                 if (rank == 0) ncclGetUniqueId(&id);
                 MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
                 seqpar_nccl_desc desc = {.rank = rank, .size = size, .id = &id};

    file     a path that all ranks share: rank 0 writes its address and port to this file
    nothing  the environment: MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, and LOCAL_RANK for the device

HOW BYTES MOVE
    The referee is a thread of rank 0, to which every rank has a TCP connection. It never sees
    data.

    - A group on a queue (a cudaStream_t) becomes one NCCL group on the comm's own stream. An
      event makes the group wait for the queue; wait makes the queue wait for the group. The
      host does not wait for the transfer, and the referee is not asked, so sizes are not
      compared. NCCL finishes a group before it starts the next one, so both ends of a message
      must be in groups of the same number, where each rank counts its groups on queues.
    - A group on the host (queue NULL) is announced to the referee. When both ends of a message
      are announced and agree on its size, both ranks launch it. All ranks launch messages in
      the same order, so begins and waits may come in any order. A wrong size, a rank that has
      ended and a deadlock are reported before a byte moves. This costs two TCP hops. Counts
      and barriers are exchanged this way.
    - Pageable host memory is copied to and from pinned memory, which NCCL accesses itself; on a
      queue it is refused. The two ends of a message may use different kinds of memory. Both
      ends leave out messages of 0 bytes.

WHEN SOMETHING FAILS
    NCCL does not carry error texts, so the referee sends them. The first failure in the world
    counts. All communicators are aborted, so no kernel keeps waiting, and every other rank
    returns SEQPAR_ERR_PEER with the text. On each rank a thread watches, also while the host
    computes, for asynchronous errors of NCCL, for ranks that die, and for groups that do not
    finish within limit_s, which it names.

DOES NOT
    - accept the default stream as a queue: its handle is NULL, which means the host
    - set the CUDA device: the thread that calls must have the rank's device as its current one
    - compare sizes on a queue; for a plan, seqpar_plan_check (verify/seqpar_check.h) checks
      without a run which message each receive takes
    - authenticate: any process that reaches rank 0's port while the world opens can join it
    - use IPv6
    - keep the caller's communicator alive through a failure: like all others it is then
      aborted, which frees it. Do not destroy it after seqpar_nccl_verdict says that the world
      failed. A blocking one (ncclConfig_t.blocking 1) can hold the host inside NCCL, where no
      time limit reaches.

A COMMUNICATOR OF YOURS (seqpar_nccl_desc.comm)
    You may use and destroy it again when the last comm of the world is freed; so too a stream
    that you passed. Until then, use it for your own collectives only if all ranks call them at
    the same point between seqpar's groups, and if no group on the host is in flight: NCCL
    matches calls by their order. A second communicator, made by ncclCommSplit, does not have
    this restriction.

    Rank 0 sends the address of the referee through the communicator itself. The referee listens
    on any free port of rank 0's machine, or on seqpar_nccl_desc.port if a firewall needs a
    known one. Every rank must reach it by TCP. If rank 0 has several addresses, set
    seqpar_nccl_desc.host.

SAMPLE (one process a GPU; RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set)

    static seqpar_status rank_main(seqpar_comm *world, void *user)
    {
        int64_t sum = world->rank;
        (void)user;
        return seqpar_comm_sum_i64(world, &sum, 1);
    }
    int main(void)
    {
        seqpar_nccl_desc desc = { 0 };
        seqpar_error error;
        if (seqpar_nccl_run(&desc, rank_main, NULL, &error)) fprintf(stderr, "%s\n", error.text);
        return error.status != 0;
    }

OPTIONS
    SEQPAR_STATIC                everywhere: all functions become static (defined by seqpar.h)
    SEQPAR_MALLOC, SEQPAR_FREE   implementation file: the allocator, shared with seqpar.h
    SEQPAR_NCCL_SECONDS()        implementation file: a clock, in seconds; time limits are measured by it
*/
#ifndef SEQPAR_NCCL_H
#define SEQPAR_NCCL_H

/* -std=c11 hides sockets and clocks unless POSIX is asked for before the first system
   header. */
#ifdef SEQPAR_NCCL_IMPLEMENTATION
#if defined(__STRICT_ANSI__) && !defined(_POSIX_C_SOURCE) && !defined(_XOPEN_SOURCE) && \
    !defined(_GNU_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif
#endif

#include "seqpar.h"
#if SEQPAR_VERSION_MAJOR != 0 || SEQPAR_VERSION_MINOR != 2 || SEQPAR_VERSION_PATCH != 0
#error "seqpar_nccl.h 0.2.0 needs seqpar.h 0.2.0; take both from one release"
#endif

#ifndef NCCL_MAJOR /* else the program has included its own nccl.h, which is used */
#include <cuda_runtime_api.h>
#include <nccl.h>
#endif
#if NCCL_VERSION_CODE < 21800
#error "seqpar_nccl.h: NCCL 2.18 or newer is needed, for ncclCommSplit"
#endif

/* >>api ------------------------------------------------------------------------------------ */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct seqpar_nccl_desc {
    int64_t rank, size; /* size 0: RANK and WORLD_SIZE; with comm: the communicator's */
    /* 1: keep the current CUDA device; 0: use device LOCAL_RANK if that variable is set */
    int keep_device;
    const char *file;       /* path shared by all ranks; removed when all are connected */
    const ncclUniqueId *id; /* from ncclGetUniqueId on one rank */
    /* the caller's; all its ranks open the world; its device must be the current one */
    ncclComm_t comm;
    cudaStream_t stream; /* with comm: its stream; NULL: one is made */
    /* name or address of rank 0's machine; NULL: MASTER_ADDR where the environment is used,
       else the address that rank 0 finds for itself */
    const char *host;
    /* 0: MASTER_PORT where the environment is used, else any free one */
    int64_t port;
    /* seconds until all ranks must be connected; 0: 120. A host name that stays unknown is
       given up after an eighth of them */
    double connect_s;
    double limit_s; /* seconds for a group to finish; 0: 600; negative: no limit */
} seqpar_nccl_desc;

/* Opens a world, as one of its ranks. Collective. Errors of this rank go to *error, which is
   zeroed here and must outlive the world. The last seqpar_comm_free of the world and of the
   comms split from it closes the world; on rank 0 this waits until all others have closed
   theirs. If opening fails, rank 0 waits up to connect_s for ranks that have not connected yet,
   to tell them why. Errors: OPTION, RANK, RANKS, WORLD, FILE_OPEN, FILE_WRITE, TRANSPORT,
   TIMEOUT, PEER, MEMORY, THREAD. */
SEQPAR_DEF seqpar_status seqpar_nccl_open(seqpar_comm **world, const seqpar_nccl_desc *desc,
                                          seqpar_error *error);
/* Writes the first failure of the world, and the rank it happened on, to *error: the same on
   all ranks. If this rank has failed, waits until the referee has decided which failure was
   first. Returns its status; SEQPAR_OK: nothing has failed so far. error may be NULL. */
SEQPAR_DEF seqpar_status seqpar_nccl_verdict(seqpar_comm *comm, seqpar_error *error);
/* Opens a world, runs fn as one rank, aborts the world if fn fails, and closes it. *error is
   the first failure of the world, as after seqpar_run_threads. user and error may be NULL. */
SEQPAR_DEF seqpar_status seqpar_nccl_run(const seqpar_nccl_desc *desc, seqpar_rank_fn fn,
                                         void *user, seqpar_error *error);

#ifdef __cplusplus
}
#endif
#endif /* SEQPAR_NCCL_H */

/* Everything below is implementation. */
#if defined(SEQPAR_NCCL_IMPLEMENTATION) && !defined(SEQPAR__NCCL_IMPLEMENTED)
#define SEQPAR__NCCL_IMPLEMENTED

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#ifndef SEQPAR_MALLOC
#define SEQPAR_MALLOC(size) malloc(size)
#define SEQPAR_FREE(ptr)    free(ptr)
#endif

static void *seqpar_nccl__new(int64_t count, int64_t size) {
    size_t bytes = (size_t)(count > 0 ? count : 1) * (size_t)size;
    void *data = SEQPAR_MALLOC(bytes);
    if (data) memset(data, 0, bytes);
    return data;
}
#define SEQPAR_NCCL__NEW(type, count) \
    ((type *)seqpar_nccl__new((int64_t)(count), (int64_t)sizeof(type)))

#ifndef SEQPAR_NCCL_SECONDS
static double seqpar_nccl__seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
#define SEQPAR_NCCL_SECONDS() seqpar_nccl__seconds()
#endif

static void seqpar_nccl__nap(int microseconds) {
    struct timespec t;
    t.tv_sec = 0;
    t.tv_nsec = microseconds * 1000L;
    nanosleep(&t, NULL);
}

/* >>socket  notes between a rank and the referee ------------------------------------------- */

enum {
    SEQPAR_NCCL__HELLO,
    SEQPAR_NCCL__WELCOME,
    SEQPAR_NCCL__POST,
    SEQPAR_NCCL__BLOCKED,
    SEQPAR_NCCL__GO,
    SEQPAR_NCCL__STOP,
    SEQPAR_NCCL__BYE,
    SEQPAR_NCCL__REFUSED /* never sent: there was no memory for the items of a note */
};
#define SEQPAR_NCCL__MAGIC INT64_C(0x3163636e71657301)

typedef struct seqpar_nccl__note {
    int64_t kind, rank, count;    /* count: items that follow */
    int64_t status;               /* STOP */
    int64_t magic, version, size; /* HELLO */
    int64_t comm, request, step, sends;
    /* STOP: the sentence; POST: the group's name; WELCOME: the unique id */
    char text[512];
} seqpar_nccl__note;

/* POST: world rank of the peer, bytes; GO: request, index of the message in it */
typedef struct seqpar_nccl__item {
    int64_t a, b;
} seqpar_nccl__item;

static seqpar_nccl__note seqpar_nccl__note_of(int64_t kind, int64_t rank) {
    seqpar_nccl__note n;
    memset(&n, 0, sizeof n);
    n.kind = kind;
    n.rank = rank;
    return n;
}

/* Returns 1 if all bytes were read, 0 if the connection ended before. */
static int seqpar_nccl__read(int fd, void *data, size_t bytes) {
    char *at = (char *)data;
    while (bytes > 0) {
        ssize_t n = recv(fd, at, bytes, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return 0;
        at += n;
        bytes -= (size_t)n;
    }
    return 1;
}

static int seqpar_nccl__write(int fd, const void *data, size_t bytes) {
    const char *at = (const char *)data;
    while (bytes > 0) {
        ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return 0;
        at += n;
        bytes -= (size_t)n;
    }
    return 1;
}

static int seqpar_nccl__readable(int fd, int wait_ms) {
    struct pollfd on;
    on.fd = fd;
    on.events = POLLIN;
    on.revents = 0;
    return poll(&on, 1, wait_ms) > 0;
}

static int seqpar_nccl__send_note(int fd, const seqpar_nccl__note *note,
                                  const seqpar_nccl__item *items) {
    return seqpar_nccl__write(fd, note, sizeof *note) &&
           (!note->count || seqpar_nccl__write(fd, items, (size_t)note->count * sizeof *items));
}

typedef struct seqpar_nccl__items {
    seqpar_nccl__item *item;
    int64_t count, capacity;
} seqpar_nccl__items;

static int seqpar_nccl__reserve(seqpar_nccl__items *list, int64_t count) {
    int64_t capacity = count > 2 * list->capacity ? count : 2 * list->capacity;
    seqpar_nccl__item *bigger;
    if (count <= list->capacity) return 1;
    bigger = SEQPAR_NCCL__NEW(seqpar_nccl__item, capacity);
    if (!bigger) return 0;
    if (list->count) memcpy(bigger, list->item, (size_t)list->count * sizeof *bigger);
    SEQPAR_FREE(list->item);
    list->item = bigger;
    list->capacity = capacity;
    return 1;
}

static int seqpar_nccl__append(seqpar_nccl__items *list, int64_t a, int64_t b) {
    if (!seqpar_nccl__reserve(list, list->count + 1)) return 0;
    list->item[list->count].a = a;
    list->item[list->count++].b = b;
    return 1;
}

/* Reads items that there is no memory for, so that the next note is found. */
static int seqpar_nccl__skip(int fd, int64_t count) {
    seqpar_nccl__item one;
    while (count > 0 && seqpar_nccl__read(fd, &one, sizeof one)) count--;
    return count == 0;
}

/* Reads a note and its items. Returns 0 if the connection has ended, or if the count of items
   is impossible. Without memory for the items, the note is of kind REFUSED. */
static int seqpar_nccl__take_note(int fd, seqpar_nccl__note *note, seqpar_nccl__items *items) {
    items->count = 0;
    if (!seqpar_nccl__read(fd, note, sizeof *note) || note->count < 0 ||
        note->count > (INT64_C(1) << 32))
        return 0;
    note->text[sizeof note->text - 1] = 0;
    if (!seqpar_nccl__reserve(items, note->count)) {
        note->kind = SEQPAR_NCCL__REFUSED;
        return seqpar_nccl__skip(fd, note->count);
    }
    items->count = note->count;
    return !note->count ||
           seqpar_nccl__read(fd, items->item, (size_t)note->count * sizeof *items->item);
}

/* >>referee  a thread of rank 0: matches the sends and receives of all ranks, and decides which
   failure was first --- */

typedef struct seqpar_nccl__end { /* one end of a message that waits for its other end */
    struct seqpar_nccl__end *next;
    int64_t rank, comm, request, index, bytes, step;
    int sending;
    char name[64];
} seqpar_nccl__end;

typedef struct seqpar_nccl__referee {
    pthread_t thread;
    int listener;
    /* met: HELLO notes, also refused ones; came: ranks that are accepted */
    int64_t size, met, came, version;
    double connect_s, began;
    ncclUniqueId id;
    int *socket;                      /* (size) to each rank; -1: none */
    char *seen, *ended;               /* (size) 1: has connected; has ended or died */
    int64_t *blocked;                 /* (size) request that blocks the rank; -1: none */
    seqpar_nccl__end **ends;          /* (size, size) unmatched ends, by sender and receiver */
    seqpar_nccl__items *ready, items; /* ready: (size) messages each rank is to launch */
    seqpar_nccl__note stop;           /* the first failure; status 0: none */
} seqpar_nccl__referee;

__attribute__((format(printf, 4, 5))) static void seqpar_nccl__rule(seqpar_nccl__referee *f,
                                                                    seqpar_status status,
                                                                    int64_t rank,
                                                                    const char *format, ...) {
    va_list args;
    if (f->stop.status) return;
    f->stop = seqpar_nccl__note_of(SEQPAR_NCCL__STOP, rank);
    f->stop.status = status;
    va_start(args, format);
    vsnprintf(f->stop.text, sizeof f->stop.text, format, args);
    va_end(args);
    for (int64_t r = 0; r < f->size; r++)
        if (f->socket[r] >= 0) seqpar_nccl__send_note(f->socket[r], &f->stop, NULL);
}

static void seqpar_nccl__rule_ended(seqpar_nccl__referee *f, const seqpar_nccl__end *e,
                                    int64_t peer) {
    seqpar_nccl__rule(f, SEQPAR_ERR_PEER, e->rank,
                      "rank %lld waits in '%s' step %lld for rank %lld, which has ended",
                      (long long)e->rank, e->name, (long long)e->step, (long long)peer);
}

static void seqpar_nccl__marry(seqpar_nccl__referee *f, const seqpar_nccl__end *send,
                               const seqpar_nccl__end *recv) {
    const seqpar_mismatch m = {recv->name, send->name, recv->step,  send->step,
                               recv->rank, send->rank, recv->bytes, send->bytes};
    seqpar_error wrong;
    memset(&wrong, 0, sizeof wrong);
    if (send->bytes != recv->bytes || send->step != recv->step ||
        strcmp(send->name, recv->name)) {
        seqpar_status status = seqpar_comm_mismatch(&wrong, &m);
        seqpar_nccl__rule(f, status, recv->rank, "%s", wrong.text);
    } else if (!seqpar_nccl__append(&f->ready[send->rank], send->request, send->index) ||
               !seqpar_nccl__append(&f->ready[recv->rank], recv->request, recv->index))
        seqpar_nccl__rule(f, SEQPAR_ERR_MEMORY, 0,
                          "out of memory for the list of matched messages");
}

/* Matches this end with the other end of its message, or stores it until that is posted. Per
   comm and pair of ranks, messages match in the order in which they were posted. */
static void seqpar_nccl__match(seqpar_nccl__referee *f, const seqpar_nccl__end *e,
                               int64_t peer) {
    seqpar_nccl__end **link = e->sending ? &f->ends[e->rank * f->size + peer]
                                         : &f->ends[peer * f->size + e->rank];
    seqpar_nccl__end *other, *kept;
    while (*link && ((*link)->comm != e->comm || (*link)->sending == e->sending))
        link = &(*link)->next;
    other = *link;
    if (other) {
        *link = other->next;
        seqpar_nccl__marry(f, e->sending ? e : other, e->sending ? other : e);
        SEQPAR_FREE(other);
        return;
    }
    if (f->ended[peer]) {
        seqpar_nccl__rule_ended(f, e, peer);
        return;
    }
    kept = SEQPAR_NCCL__NEW(seqpar_nccl__end, 1);
    if (!kept) {
        seqpar_nccl__rule(f, SEQPAR_ERR_MEMORY, 0, "out of memory for unmatched messages");
        return;
    }
    *kept = *e;
    *link = kept;
}

static void seqpar_nccl__posted(seqpar_nccl__referee *f, int64_t rank,
                                const seqpar_nccl__note *n) {
    seqpar_nccl__end e;
    memset(&e, 0, sizeof e);
    e.rank = rank;
    e.comm = n->comm;
    e.request = n->request;
    e.step = n->step;
    snprintf(e.name, sizeof e.name, "%.63s", n->text);
    for (int64_t i = 0; i < n->count; i++) {
        /* ignores a peer that is not a rank of the world */
        if (f->items.item[i].a < 0 || f->items.item[i].a >= f->size) continue;
        e.index = i;
        e.sending = i < n->sends;
        e.bytes = f->items.item[i].b;
        seqpar_nccl__match(f, &e, f->items.item[i].a);
    }
}

/* Returns the first end in the list that belongs to this rank and, unless request is -1, to
   this request; NULL: none. */
static const seqpar_nccl__end *seqpar_nccl__end_of(const seqpar_nccl__end *e, int64_t rank,
                                                   int64_t request) {
    while (e && (e->rank != rank || (request >= 0 && e->request != request))) e = e->next;
    return e;
}

/* Returns an unmatched end of a rank's request, and the rank at the other end in *peer; NULL:
   all are matched. */
static const seqpar_nccl__end *seqpar_nccl__waits(const seqpar_nccl__referee *f, int64_t rank,
                                                  int64_t request, int64_t *peer) {
    const seqpar_nccl__end *e = NULL;
    for (int64_t q = 0; q < f->size && !e; q++) {
        *peer = q;
        e = seqpar_nccl__end_of(f->ends[q * f->size + rank], rank, request);
        if (!e) e = seqpar_nccl__end_of(f->ends[rank * f->size + q], rank, request);
    }
    return e;
}

/* Returns an unmatched end, of a rank that has not ended, whose other end is this rank; NULL:
   none. */
static const seqpar_nccl__end *seqpar_nccl__missed(const seqpar_nccl__referee *f,
                                                   int64_t rank) {
    const seqpar_nccl__end *e = NULL;
    for (int64_t q = 0; q < f->size && !e; q++) {
        if (q == rank || f->ended[q]) continue;
        e = seqpar_nccl__end_of(f->ends[q * f->size + rank], q, -1);
        if (!e) e = seqpar_nccl__end_of(f->ends[rank * f->size + q], q, -1);
    }
    return e;
}

static void seqpar_nccl__left(seqpar_nccl__referee *f, int64_t rank, int well) {
    const seqpar_nccl__end *e = seqpar_nccl__missed(f, rank);
    if (f->ended[rank]) return;
    f->ended[rank] = 1;
    if (e)
        seqpar_nccl__rule_ended(f, e, rank);
    else if (!well)
        seqpar_nccl__rule(
            f, SEQPAR_ERR_DIED, rank,
            "rank %lld died and reported nothing (no rank waited for rank %lld, which has ended); "
            "see its output",
            (long long)rank, (long long)rank);
}

/* Detects deadlocks exactly: a rank that is blocked in an unmatched request begins nothing
   more. So if all ranks are blocked, none of them can continue. */
static void seqpar_nccl__watch_deadlock(seqpar_nccl__referee *f) {
    char text[400];
    int at = 0;
    int64_t peer, first = -1;
    const seqpar_nccl__end *e;
    if (f->came < f->size || f->stop.status) return;
    for (int64_t r = 0; r < f->size; r++)
        if (!f->ended[r] && f->blocked[r] < 0) return;
    for (int64_t r = 0; r < f->size; r++) {
        if (f->ended[r]) continue;
        e = seqpar_nccl__waits(f, r, f->blocked[r], &peer);
        if (!e) {
            f->blocked[r] = -1;
            return;
        }
        if (at < (int)sizeof text - 120)
            at += snprintf(text + at, sizeof text - (size_t)at,
                           "%srank %lld waits in '%s' step %lld for rank %lld", at ? "; " : "",
                           (long long)r, e->name, (long long)e->step, (long long)peer);
        if (first < 0) first = r;
    }
    if (first >= 0) seqpar_nccl__rule(f, SEQPAR_ERR_DEADLOCK, first, "deadlock: %s", text);
}

static void seqpar_nccl__hear_rank(seqpar_nccl__referee *f, int64_t rank) {
    seqpar_nccl__note n;
    if (!seqpar_nccl__take_note(f->socket[rank], &n, &f->items)) {
        seqpar_nccl__left(f, rank, 0);
        close(f->socket[rank]);
        f->socket[rank] = -1;
        return;
    }
    f->blocked[rank] = n.kind == SEQPAR_NCCL__BLOCKED ? n.request : -1;
    if (n.kind == SEQPAR_NCCL__POST && !f->stop.status) seqpar_nccl__posted(f, rank, &n);
    if (n.kind == SEQPAR_NCCL__STOP)
        seqpar_nccl__rule(f, (seqpar_status)n.status, rank, "%s", n.text);
    if (n.kind == SEQPAR_NCCL__BYE) seqpar_nccl__left(f, rank, 1);
    if (n.kind == SEQPAR_NCCL__REFUSED)
        seqpar_nccl__rule(f, SEQPAR_ERR_MEMORY, 0, "out of memory for a note of rank %lld",
                          (long long)rank);
}

/* Tells each rank which of its messages were matched in this round, before the next round begins.
   So all ranks launch messages in the same order. */
static void seqpar_nccl__tell_ready(seqpar_nccl__referee *f) {
    for (int64_t r = 0; r < f->size; r++) {
        seqpar_nccl__note n = seqpar_nccl__note_of(SEQPAR_NCCL__GO, r);
        n.count = f->ready[r].count;
        if (n.count && f->socket[r] >= 0 && !f->stop.status)
            seqpar_nccl__send_note(f->socket[r], &n, f->ready[r].item);
        f->ready[r].count = 0;
    }
}

/* Returns why a rank that says HELLO is refused; NULL: it is accepted. */
static const char *seqpar_nccl__unfit(const seqpar_nccl__referee *f, const seqpar_nccl__note *n,
                                      char text[256]) {
    if (n->size != f->size)
        snprintf(
            text, 256,
            "rank %lld was started for a world of %lld ranks, rank 0 for one of %lld; start "
            "all with the same WORLD_SIZE",
            (long long)n->rank, (long long)n->size, (long long)f->size);
    else if (n->version != f->version)
        snprintf(text, 256,
                 "rank %lld runs NCCL %lld, rank 0 runs NCCL %lld; give all ranks the same "
                 "libnccl.so",
                 (long long)n->rank, (long long)n->version, (long long)f->version);
    else if (n->rank < 0 || n->rank >= f->size)
        snprintf(text, 256, "rank %lld is outside 0 .. %lld; check RANK", (long long)n->rank,
                 (long long)f->size - 1);
    else if (f->seen[n->rank])
        snprintf(text, 256, "two processes are rank %lld; give every one a RANK of its own",
                 (long long)n->rank);
    else
        return NULL;
    return text;
}

static void seqpar_nccl__welcome(seqpar_nccl__referee *f) {
    seqpar_nccl__note n = seqpar_nccl__note_of(SEQPAR_NCCL__WELCOME, 0);
    memcpy(n.text, &f->id, sizeof f->id);
    for (int64_t r = 0; r < f->size; r++)
        if (f->socket[r] >= 0) seqpar_nccl__send_note(f->socket[r], &n, NULL);
}

static void seqpar_nccl__seat(seqpar_nccl__referee *f, int fd) {
    seqpar_nccl__note n;
    char text[256];
    int yes = 1;
    if (fd < 0) return;
    /* else TCP would delay the items of a note until the note itself is acknowledged */
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    /* no HELLO within 5 s: not a rank of seqpar, or too slow */
    if (!seqpar_nccl__readable(fd, 5000) || !seqpar_nccl__take_note(fd, &n, &f->items) ||
        n.kind != SEQPAR_NCCL__HELLO || n.magic != SEQPAR_NCCL__MAGIC) {
        close(fd);
        return;
    }
    f->met++;
    if (seqpar_nccl__unfit(f, &n, text))
        seqpar_nccl__rule(f, SEQPAR_ERR_WORLD, n.rank, "%s", text);
    if (f->stop.status) {
        seqpar_nccl__send_note(fd, &f->stop, NULL);
        shutdown(fd, SHUT_WR);
        /* closing a socket with unread bytes could lose the text that was sent */
        while (seqpar_nccl__readable(fd, 1000) && seqpar_nccl__take_note(fd, &n, &f->items)) {
        }
        close(fd);
        return;
    }
    f->socket[n.rank] = fd;
    f->seen[n.rank] = 1;
    if (++f->came == f->size) seqpar_nccl__welcome(f);
}

/* Returns 1 while ranks may still connect. It does so after a failure too: ranks that connect
   then are told of it. When connect_s is over, fails if ranks are missing. */
static int seqpar_nccl__gathers(seqpar_nccl__referee *f) {
    char missing[200] = "";
    int at = 0;
    if (f->met == f->size) return 0;
    if (SEQPAR_NCCL_SECONDS() - f->began <= f->connect_s) return 1;
    for (int64_t r = 0; r < f->size && at < 180; r++)
        if (!f->seen[r])
            at += snprintf(missing + at, sizeof missing - (size_t)at, " %lld", (long long)r);
    seqpar_nccl__rule(
        f, SEQPAR_ERR_TIMEOUT, 0,
        "of %lld ranks these did not connect within %g s:%s; check that they were "
        "started and can reach rank 0",
        (long long)f->size, f->connect_s, missing);
    return 0;
}

/* Polls all connections once. Returns 0 when no rank is connected and none is awaited. */
static int seqpar_nccl__round(seqpar_nccl__referee *f, struct pollfd *on) {
    int64_t left = 0;
    int gathers = seqpar_nccl__gathers(f);
    on[f->size].fd = gathers ? f->listener : -1;
    on[f->size].events = POLLIN;
    for (int64_t r = 0; r < f->size; r++) {
        on[r].fd = f->socket[r];
        on[r].events = POLLIN;
        left += f->socket[r] >= 0;
    }
    if (!left && !gathers) return 0;
    if (poll(on, (nfds_t)f->size + 1, gathers ? 20 : 1000) <= 0) return 1;
    for (int64_t r = 0; r < f->size; r++)
        if (on[r].fd >= 0 && on[r].revents) seqpar_nccl__hear_rank(f, r);
    if (gathers && on[f->size].revents) seqpar_nccl__seat(f, accept(f->listener, NULL, NULL));
    seqpar_nccl__tell_ready(f);
    seqpar_nccl__watch_deadlock(f);
    return 1;
}

static void seqpar_nccl__referee_free(seqpar_nccl__referee *f) {
    seqpar_nccl__end *e;
    if (!f) return;
    for (int64_t i = 0; f->ends && i < f->size * f->size; i++)
        while ((e = f->ends[i])) {
            f->ends[i] = e->next;
            SEQPAR_FREE(e);
        }
    for (int64_t i = 0; f->ready && i < f->size; i++) SEQPAR_FREE(f->ready[i].item);
    for (int64_t i = 0; f->socket && i < f->size; i++) /* of a referee without a thread */
        if (f->socket[i] >= 0) close(f->socket[i]);
    if (f->listener >= 0) close(f->listener);
    SEQPAR_FREE(f->socket);
    SEQPAR_FREE(f->seen);
    SEQPAR_FREE(f->ended);
    SEQPAR_FREE(f->blocked);
    SEQPAR_FREE(f->ends);
    SEQPAR_FREE(f->ready);
    SEQPAR_FREE(f->items.item);
    SEQPAR_FREE(f);
}

static void *seqpar_nccl__referee_main(void *argument) {
    seqpar_nccl__referee *f = (seqpar_nccl__referee *)argument;
    struct pollfd *on = SEQPAR_NCCL__NEW(struct pollfd, f->size + 1);
    if (!on)
        seqpar_nccl__rule(f, SEQPAR_ERR_MEMORY, 0, "out of memory for %lld connections",
                          (long long)f->size);
    while (on && seqpar_nccl__round(f, on)) {
    }
    SEQPAR_FREE(on);
    return NULL;
}

static seqpar_nccl__referee *seqpar_nccl__referee_new(int64_t size) {
    seqpar_nccl__referee *f = SEQPAR_NCCL__NEW(seqpar_nccl__referee, 1);
    if (!f) return NULL;
    f->size = size;
    f->listener = -1;
    f->socket = SEQPAR_NCCL__NEW(int, size);
    f->seen = SEQPAR_NCCL__NEW(char, size);
    f->ended = SEQPAR_NCCL__NEW(char, size);
    f->blocked = SEQPAR_NCCL__NEW(int64_t, size);
    f->ends = SEQPAR_NCCL__NEW(seqpar_nccl__end *, size * size);
    f->ready = SEQPAR_NCCL__NEW(seqpar_nccl__items, size);
    for (int64_t r = 0; r < size; r++) {
        if (f->socket) f->socket[r] = -1;
        if (f->blocked) f->blocked[r] = -1;
    }
    if (f->socket && f->seen && f->ended && f->blocked && f->ends && f->ready) return f;
    seqpar_nccl__referee_free(f);
    return NULL;
}

/* >>rank  the state of a rank; a thread that calls NCCL holds its lock, never for long ----- */

enum { SEQPAR_NCCL__POSTED, SEQPAR_NCCL__STARTED, SEQPAR_NCCL__RUNS, SEQPAR_NCCL__DONE };

typedef struct seqpar_nccl__block { /* pinned memory */
    struct seqpar_nccl__block *next;
    void *data;
    int64_t bytes;
} seqpar_nccl__block;

typedef struct seqpar_nccl__request {
    struct seqpar_nccl__request *next;
    const char *name;
    int64_t step, number, sends, count, left; /* left: messages not given to NCCL */
    seqpar_transfer *list;                    /* (count) sends, then receives */
    void **at;                                /* (count) where NCCL reads or writes */
    seqpar_nccl__block *block;
    /* ready: the caller's queue has reached begin; done: the group has finished */
    cudaEvent_t ready, done;
    int state, waited; /* waited: wait has returned; recycled once it is done */
    double since;
} seqpar_nccl__request;

/* a message that may start */
typedef struct seqpar_nccl__start {
    seqpar_nccl__request *request;
    int64_t index;
} seqpar_nccl__start;

typedef struct seqpar_nccl__member { /* state of a comm */
    seqpar_comm comm;
    struct seqpar_nccl__world *world;
    struct seqpar_nccl__member *next;
    ncclComm_t nccl;
    cudaStream_t stream;
    int adopted, own_stream, freed, finalized;
    /* name of the NCCL call that is still in progress; NULL: none */
    const char *launching;
    struct seqpar_nccl__member *part; /* being split off */
    double since;
    int64_t id, *world_rank;        /* (size) */
    seqpar_nccl__request *requests; /* in order of begin */
    seqpar_nccl__start *ready;
    int64_t ready_count, ready_capacity;
} seqpar_nccl__member;

typedef struct seqpar_nccl__world { /* what the comms of one rank share */
    pthread_mutex_t lock;
    pthread_t monitor;
    int monitored, closing, device, socket; /* socket: to the referee */
    seqpar_nccl__referee *referee;          /* on rank 0 */
    const char *file;                       /* that rank 0 wrote and has not removed */
    int refereed;
    int64_t rank, size, version, comms, requests;
    double connect_s, limit_s;
    ncclUniqueId id;
    /* welcome: the world is complete; ruled: verdict is set; quiet: this rank is closing, so
       the end of the referee is no failure */
    int welcome, ruled, quiet;
    int untold; /* the referee does not know of the news yet, which is of this rank */
    /* news: the failure that this rank heard of first; verdict: the referee's */
    seqpar_error news, verdict;
    seqpar_error *error; /* the caller's */
    seqpar_nccl__member *members;
    seqpar_nccl__request *spare;
    seqpar_nccl__block *blocks;
    seqpar_nccl__items items;
} seqpar_nccl__world;

/* >>abort  failures of this rank and of others --------------------------------------------- */

static void seqpar_nccl__abort_all(seqpar_nccl__world *w) {
    seqpar_nccl__member *m;
    for (m = w->members; m; m = m->next) {
        /* ends its kernels, so that no buffer is touched after a wait has failed */
        if (m->nccl) ncclCommAbort(m->nccl);
        m->nccl = NULL;
        m->launching = NULL;
        m->ready_count = 0;
    }
}

static void seqpar_nccl__learn(seqpar_nccl__world *w, seqpar_status status, int64_t rank,
                               const char *text) {
    if (w->news.status) return;
    w->news.status = status;
    w->news.rank = rank;
    snprintf(w->news.text, sizeof w->news.text, "%s", text);
    seqpar_nccl__abort_all(w);
}

/* Records that memory was refused, and sends nothing: seqpar_nccl__tell may have sent half of a
   note. seqpar_nccl__progress tells the referee. */
static void seqpar_nccl__learn_memory(seqpar_nccl__world *w, const char *text) {
    if (w->news.status) return;
    seqpar_nccl__learn(w, SEQPAR_ERR_MEMORY, w->rank, text);
    w->untold = 1;
}

static void seqpar_nccl__rule_here(seqpar_nccl__world *w, const seqpar_error *e) {
    if (!w->ruled) w->verdict = *e;
    w->ruled = 1;
}

static void seqpar_nccl__lost(seqpar_nccl__world *w) {
    char text[128];
    if (w->socket >= 0) close(w->socket);
    w->socket = -1;
    snprintf(text, sizeof text,
             "rank %lld lost its connection to rank 0, which has ended or cannot be reached",
             (long long)w->rank);
    if (!w->quiet) seqpar_nccl__learn(w, SEQPAR_ERR_PEER, w->rank, text);
    seqpar_nccl__rule_here(w, &w->news);
}

static void seqpar_nccl__started(seqpar_nccl__world *w, int64_t number, int64_t index);
static void seqpar_nccl__hear(seqpar_nccl__world *w) {
    seqpar_nccl__note n;
    seqpar_error e;
    while (w->socket >= 0 && seqpar_nccl__readable(w->socket, 0)) {
        if (!seqpar_nccl__take_note(w->socket, &n, &w->items)) {
            seqpar_nccl__lost(w);
            return;
        }
        if (n.kind == SEQPAR_NCCL__WELCOME) {
            memcpy(&w->id, n.text, sizeof w->id);
            w->welcome = 1;
        }
        for (int64_t i = 0; n.kind == SEQPAR_NCCL__GO && i < n.count; i++)
            seqpar_nccl__started(w, w->items.item[i].a, w->items.item[i].b);
        if (n.kind == SEQPAR_NCCL__REFUSED)
            seqpar_nccl__learn_memory(w, "out of memory for a note of rank 0");
        if (n.kind != SEQPAR_NCCL__STOP) continue;
        memset(&e, 0, sizeof e);
        e.status = (seqpar_status)n.status;
        e.rank = n.rank;
        memcpy(e.text, n.text, sizeof e.text);
        seqpar_nccl__rule_here(w, &e);
        seqpar_nccl__learn(w, e.status, e.rank, e.text);
    }
}

/* Sends a whole note. While the socket is full, reads what the referee sends: the referee may
   be blocked in a write to this rank. */
static void seqpar_nccl__tell(seqpar_nccl__world *w, const seqpar_nccl__note *note,
                              const seqpar_nccl__item *items) {
    const char *part[2];
    size_t left[2];
    part[0] = (const char *)note;
    left[0] = sizeof *note;
    part[1] = (const char *)items;
    left[1] = (size_t)note->count * sizeof *items;
    for (int i = 0; i < 2; i++)
        while (left[i] > 0 && w->socket >= 0) {
            ssize_t n = send(w->socket, part[i], left[i], MSG_NOSIGNAL | MSG_DONTWAIT);
            if (n > 0) {
                part[i] += n;
                left[i] -= (size_t)n;
            } else if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
                seqpar_nccl__hear(w);
                seqpar_nccl__lost(w);
            } else {
                seqpar_nccl__hear(w);
                seqpar_nccl__nap(50);
            }
        }
}

static void seqpar_nccl__tell_news(seqpar_nccl__world *w) {
    seqpar_nccl__note n = seqpar_nccl__note_of(SEQPAR_NCCL__STOP, w->rank);
    n.status = w->news.status;
    memcpy(n.text, w->news.text, sizeof n.text);
    w->untold = 0;
    seqpar_nccl__tell(w, &n, NULL);
}

__attribute__((format(printf, 3, 4))) static void seqpar_nccl__fail(seqpar_nccl__world *w,
                                                                    seqpar_status status,
                                                                    const char *format, ...) {
    char text[sizeof w->news.text];
    va_list args;
    if (w->news.status) return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    seqpar_nccl__learn(w, status, w->rank, text);
    seqpar_nccl__tell_news(w);
}

/* Returns what a call of this rank returns, with its text in *w->error: failures of this rank and
   deadlocks have their own status, those of other ranks SEQPAR_ERR_PEER. The caller holds the
   lock. */
static seqpar_status seqpar_nccl__status(seqpar_nccl__world *w) {
    const seqpar_error *n = &w->news;
    if (!n->status) return SEQPAR_OK;
    if (n->rank == w->rank || n->status == SEQPAR_ERR_DEADLOCK)
        return seqpar_fail(w->error, n->status, "%s", n->text);
    return seqpar_fail(w->error, SEQPAR_ERR_PEER, "rank %lld failed: %.440s",
                       (long long)n->rank, n->text);
}

static int seqpar_nccl__cuda(seqpar_nccl__world *w, cudaError_t code, const char *call) {
    if (code == cudaSuccess) return 1;
    seqpar_nccl__fail(w, SEQPAR_ERR_TRANSPORT, "%.*s on rank %lld: %s (CUDA error %d)",
                      (int)strcspn(call, "("), call, (long long)w->rank,
                      cudaGetErrorString(code), (int)code);
    return 0;
}

/* Returns 1 if an NCCL call has not failed. ncclInProgress is no failure: NCCL continues by
   itself, and until it has finished nothing else is launched on the communicator. */
static int seqpar_nccl__nccl(seqpar_nccl__member *m, ncclResult_t code, const char *call) {
    seqpar_nccl__world *w = m->world;
    const char *more = code == ncclSuccess || code == ncclInProgress ? NULL
                                                                     : ncclGetLastError(NULL);
    if (code == ncclInProgress) {
        m->launching = call;
        m->since = SEQPAR_NCCL_SECONDS();
    }
    if (!more && (code == ncclSuccess || code == ncclInProgress)) return 1;
    seqpar_nccl__fail(
        w, SEQPAR_ERR_TRANSPORT, "%.*s on rank %lld: %s%s%.200s%s", (int)strcspn(call, "("),
        call, (long long)w->rank, ncclGetErrorString(code), more && *more ? ": " : "",
        more ? more : "",
        code == ncclInvalidUsage ? "; every rank needs a GPU of its own, see LOCAL_RANK" : "");
    return 0;
}
#define SEQPAR_NCCL__CUDA(w, call) seqpar_nccl__cuda(w, call, #call)
#define SEQPAR_NCCL__NCCL(m, call) seqpar_nccl__nccl(m, call, #call)

/* >>launch  makes an NCCL group of messages that may start, and records its event ---------- */

static int seqpar_nccl__add_ready(seqpar_nccl__member *m, seqpar_nccl__request *r,
                                  int64_t index) {
    if (m->ready_count == m->ready_capacity) {
        int64_t capacity = m->ready_capacity ? 2 * m->ready_capacity : 16;
        seqpar_nccl__start *bigger = SEQPAR_NCCL__NEW(seqpar_nccl__start, capacity);
        if (!bigger) return 0;
        if (m->ready_count) memcpy(bigger, m->ready, (size_t)m->ready_count * sizeof *bigger);
        SEQPAR_FREE(m->ready);
        m->ready = bigger;
        m->ready_capacity = capacity;
    }
    m->ready[m->ready_count].request = r;
    m->ready[m->ready_count++].index = index;
    return 1;
}

/* The referee says that a message may start. */
static void seqpar_nccl__started(seqpar_nccl__world *w, int64_t number, int64_t index) {
    seqpar_nccl__member *m;
    seqpar_nccl__request *r;
    for (m = w->members; m; m = m->next)
        for (r = m->requests; r; r = r->next)
            if (r->number == number && index >= 0 && index < r->count &&
                !seqpar_nccl__add_ready(m, r, index))
                seqpar_nccl__learn_memory(w, "out of memory for messages that may start");
}

/* Records the events of started groups on the stream. Only called when no NCCL call is in
   progress: while one is, its group is not yet on the stream. */
static void seqpar_nccl__record(seqpar_nccl__member *m) {
    seqpar_nccl__request *r;
    for (r = m->requests; r && !m->world->news.status; r = r->next)
        if (r->state == SEQPAR_NCCL__STARTED &&
            SEQPAR_NCCL__CUDA(m->world, cudaEventRecord(r->done, m->stream)))
            r->state = SEQPAR_NCCL__RUNS;
}

static ncclResult_t seqpar_nccl__message(seqpar_nccl__member *m, const seqpar_nccl__request *r,
                                         int64_t i) {
    const seqpar_transfer *t = &r->list[i];
    if (i < r->sends)
        return ncclSend(r->at[i], (size_t)t->bytes, ncclUint8, (int)t->peer, m->nccl,
                        m->stream);
    return ncclRecv(r->at[i], (size_t)t->bytes, ncclUint8, (int)t->peer, m->nccl, m->stream);
}

/* Launches all messages that may start as one NCCL group. Both ends know that a message has 0
   bytes, and both leave it out. Calls ncclGroupEnd also after an error: an open group would
   swallow all later groups of this thread. */
static void seqpar_nccl__launch(seqpar_nccl__member *m) {
    const char *call = "ncclGroupStart";
    ncclResult_t code = ncclSuccess, end = ncclSuccess;
    int64_t count = m->ready_count;
    int grouped = 0;
    for (int64_t i = 0; i < count && (code == ncclSuccess || code == ncclInProgress); i++) {
        const seqpar_nccl__start *s = &m->ready[i];
        if (!s->request->list[s->index].bytes) continue;
        if (!grouped && (code = ncclGroupStart()) != ncclSuccess) break;
        grouped = 1;
        call = s->index < s->request->sends ? "ncclSend" : "ncclRecv";
        code = seqpar_nccl__message(m, s->request, s->index);
    }
    if (grouped) end = ncclGroupEnd();
    if (!seqpar_nccl__nccl(m, code, call) || !seqpar_nccl__nccl(m, end, "ncclGroupEnd")) return;
    for (int64_t i = 0; i < count; i++)
        if (!--m->ready[i].request->left) m->ready[i].request->state = SEQPAR_NCCL__STARTED;
    m->ready_count = 0;
    if (!m->launching) seqpar_nccl__record(m);
}

/* >>progress  one look at everything: news, NCCL's errors, what may start, what has ended,
   what takes too long */

/* Stores a request for reuse with its events, and its pinned memory. */
static void seqpar_nccl__recycle(seqpar_nccl__world *w, seqpar_nccl__request *r) {
    if (r->block) {
        r->block->next = w->blocks;
        w->blocks = r->block;
    }
    SEQPAR_FREE(r->list);
    SEQPAR_FREE(r->at);
    r->list = NULL;
    r->at = NULL;
    r->block = NULL;
    r->next = w->spare;
    w->spare = r;
}

static void seqpar_nccl__unlink(seqpar_nccl__member *m, seqpar_nccl__request *r) {
    seqpar_nccl__request **link = &m->requests;
    while (*link != r) link = &(*link)->next;
    *link = r->next;
    seqpar_nccl__recycle(m->world, r);
}

static void seqpar_nccl__finish(seqpar_nccl__world *w, seqpar_nccl__request *r) {
    cudaError_t code;
    if (r->state != SEQPAR_NCCL__RUNS) return;
    code = cudaEventQuery(r->done);
    if (code == cudaErrorNotReady) {
        /* resets CUDA's last error, or the caller's next cudaGetLastError would return it */
        if (cudaPeekAtLastError() == cudaErrorNotReady) cudaGetLastError();
        return;
    }
    if (!seqpar_nccl__cuda(w, code, "cudaEventQuery")) return;
    for (int64_t i = r->sends; i < r->count; i++)
        if (r->at[i] != r->list[i].data)
            memcpy(r->list[i].data, r->at[i], (size_t)r->list[i].bytes);
    r->state = SEQPAR_NCCL__DONE;
}

static void seqpar_nccl__overrun(seqpar_nccl__member *m, const seqpar_nccl__request *r) {
    char what[300] = "";
    int at = 0;
    for (int64_t i = 0; i < r->count && at < 240; i++)
        at += snprintf(what + at, sizeof what - (size_t)at, "%s%s rank %lld %lld bytes",
                       at ? ", " : "", i < r->sends ? "to" : "from",
                       (long long)m->world_rank[r->list[i].peer], (long long)r->list[i].bytes);
    seqpar_nccl__fail(m->world, SEQPAR_ERR_TIMEOUT,
                      "'%s' step %lld on rank %lld did not finish within %g s: %s%s", r->name,
                      (long long)r->step, (long long)m->world->rank, m->world->limit_s, what,
                      r->state == SEQPAR_NCCL__POSTED ? "; the other side has not begun it"
                                                      : "");
}

static void seqpar_nccl__watch(seqpar_nccl__member *m) {
    seqpar_nccl__world *w = m->world;
    const seqpar_nccl__request *r;
    double now = SEQPAR_NCCL_SECONDS();
    int grouping = 0;
    for (r = m->requests; r && !w->news.status; r = r->next) {
        /* the NCCL call in progress launches a group, which has a name and its own limit */
        grouping |= r->state == SEQPAR_NCCL__STARTED;
        if (w->limit_s >= 0 && r->state != SEQPAR_NCCL__DONE && now - r->since > w->limit_s)
            seqpar_nccl__overrun(m, r);
    }
    if (m->launching && !grouping && now - m->since > w->connect_s)
        seqpar_nccl__fail(w, SEQPAR_ERR_TIMEOUT,
                          "%.*s on rank %lld did not finish within %g s; do all ranks call it, "
                          "and do they reach each other? NCCL_DEBUG=INFO tells more",
                          (int)strcspn(m->launching, "("), m->launching, (long long)w->rank,
                          w->connect_s);
}

static void seqpar_nccl__ask(seqpar_nccl__member *m) {
    ncclResult_t state = ncclSuccess;
    ncclResult_t code = m->nccl ? ncclCommGetAsyncError(m->nccl, &state) : ncclSuccess;
    if (code != ncclSuccess) {
        seqpar_nccl__nccl(m, code, "ncclCommGetAsyncError");
        return;
    }
    /* NCCL 2.28 returns ncclSuccess before a split has begun. A thread of NCCL sets the new
       communicator when the split is done; it is NULL before. */
    if (state == ncclInProgress ||
        (state == ncclSuccess && m->part && !__atomic_load_n(&m->part->nccl, __ATOMIC_ACQUIRE)))
        return;
    if (!seqpar_nccl__nccl(m, state, m->launching ? m->launching : "NCCL")) return;
    m->launching = NULL;
    m->part = NULL;
    seqpar_nccl__record(m);
}

static void seqpar_nccl__advance(seqpar_nccl__member *m) {
    seqpar_nccl__world *w = m->world;
    seqpar_nccl__request *r, *next;
    seqpar_nccl__ask(m);
    if (!w->news.status && !m->launching && m->ready_count) seqpar_nccl__launch(m);
    if (!w->news.status) seqpar_nccl__watch(m);
    for (r = m->requests; r && !w->news.status; r = next) {
        next = r->next;
        seqpar_nccl__finish(w, r);
        if (!w->news.status && r->waited && r->state == SEQPAR_NCCL__DONE)
            seqpar_nccl__unlink(m, r);
    }
}

static void seqpar_nccl__member_free(seqpar_nccl__member *m) {
    seqpar_nccl__member **link = &m->world->members;
    while (m->requests) seqpar_nccl__unlink(m, m->requests);
    while (*link && *link != m) link = &(*link)->next;
    if (*link) *link = m->next;
    if (m->own_stream) cudaStreamDestroy(m->stream);
    SEQPAR_FREE(m->ready);
    SEQPAR_FREE(m->world_rank);
    SEQPAR_FREE(m);
}

/* Destroys a comm that the user has freed, once its groups have ended. Finalizing may wait for
   other ranks, so it is polled, and this rank does not block in it. */
static void seqpar_nccl__retire(seqpar_nccl__member *m) {
    seqpar_nccl__world *w = m->world;
    ncclComm_t nccl = m->nccl;
    if (!m->freed || m->requests || m->launching || w->news.status) return;
    if (!m->finalized && !m->adopted) {
        m->finalized = 1;
        if (!SEQPAR_NCCL__NCCL(m, ncclCommFinalize(m->nccl)) || m->launching) return;
    }
    m->nccl = NULL;
    if (!m->adopted && !SEQPAR_NCCL__NCCL(m, ncclCommDestroy(nccl))) return;
    seqpar_nccl__member_free(m);
}

static void seqpar_nccl__progress(seqpar_nccl__world *w) {
    seqpar_nccl__member *m, *next;
    seqpar_nccl__hear(w);
    if (w->untold) seqpar_nccl__tell_news(w);
    for (m = w->members; m && !w->news.status; m = m->next) seqpar_nccl__advance(m);
    for (m = w->members; m && !w->news.status; m = next) {
        next = m->next;
        seqpar_nccl__retire(m);
    }
}

/* One step of a thread that waits and holds the lock: polls everything, then sleeps without the
   lock. */
static void seqpar_nccl__rest(seqpar_nccl__world *w, int soon) {
    seqpar_nccl__progress(w);
    pthread_mutex_unlock(&w->lock);
    if (soon || w->socket < 0)
        seqpar_nccl__nap(20);
    else
        seqpar_nccl__readable(w->socket, 1); /* a note ends the sleep */
    pthread_mutex_lock(&w->lock);
}

static void *seqpar_nccl__monitor_main(void *argument) {
    seqpar_nccl__world *w = (seqpar_nccl__world *)argument;
    int on = 1;
    cudaError_t code = cudaSetDevice(w->device);
    while (on) {
        pthread_mutex_lock(&w->lock);
        if (code == cudaSuccess || seqpar_nccl__cuda(w, code, "cudaSetDevice"))
            seqpar_nccl__progress(w);
        else
            seqpar_nccl__hear(w);
        on = !w->closing;
        pthread_mutex_unlock(&w->lock);
        if (on) seqpar_nccl__nap(5000);
    }
    return NULL;
}

/* >>table  the five functions -------------------------------------------------------------- */

#ifndef SEQPAR_NCCL__PINNED
#define SEQPAR_NCCL__PINNED 4096 /* bytes of the smallest block */
#endif
static seqpar_nccl__block *seqpar_nccl__block_new(seqpar_nccl__world *w, int64_t bytes) {
    seqpar_nccl__block **link = &w->blocks, *b;
    while (*link && (*link)->bytes < bytes) link = &(*link)->next;
    if ((b = *link)) {
        *link = b->next;
        return b;
    }
    b = SEQPAR_NCCL__NEW(seqpar_nccl__block, 1);
    if (!b) {
        seqpar_nccl__fail(w, SEQPAR_ERR_MEMORY, "out of memory for pinned memory");
        return NULL;
    }
    for (b->bytes = SEQPAR_NCCL__PINNED; b->bytes < bytes;) b->bytes *= 2;
    if (SEQPAR_NCCL__CUDA(w, cudaHostAlloc(&b->data, (size_t)b->bytes, cudaHostAllocPortable)))
        return b;
    SEQPAR_FREE(b);
    return NULL;
}

/* Can NCCL access a message in place? Fails if the buffer is of another device, or is pageable
   memory on a queue. */
static int seqpar_nccl__in_place(seqpar_nccl__world *w, const seqpar_nccl__request *r,
                                 const void *data, int on_queue) {
    struct cudaPointerAttributes about;
    memset(&about, 0, sizeof about);
    if (!SEQPAR_NCCL__CUDA(w, cudaPointerGetAttributes(&about, data))) return 0;
    if (about.type == cudaMemoryTypeDevice && about.device != w->device)
        seqpar_nccl__fail(w, SEQPAR_ERR_OPTION,
                          "'%s' step %lld: a buffer lies on CUDA device %d, rank %lld is on "
                          "device %d; allocate it there",
                          r->name, (long long)r->step, about.device, (long long)w->rank,
                          w->device);
    else if (about.type == cudaMemoryTypeUnregistered && on_queue)
        seqpar_nccl__fail(w, SEQPAR_ERR_OPTION,
                          "'%s' step %lld on rank %lld: pageable host memory cannot travel on "
                          "a queue; pass pinned or device memory, or queue NULL",
                          r->name, (long long)r->step, (long long)w->rank);
    return about.type != cudaMemoryTypeUnregistered;
}

/* Chooses where NCCL accesses each message: in place, or in pinned memory if it is in pageable
   memory. Copies such sends there. */
static void seqpar_nccl__choose_buffers(seqpar_nccl__world *w, seqpar_nccl__request *r,
                                        int on_queue) {
    int64_t i, bytes = 0;
    for (i = 0; i < r->count && !w->news.status; i++) {
        const seqpar_transfer *t = &r->list[i];
        if (!t->bytes || seqpar_nccl__in_place(w, r, t->data, on_queue))
            r->at[i] = t->data;
        else
            bytes += (t->bytes + 15) / 16 * 16;
    }
    if (w->news.status || !bytes || !(r->block = seqpar_nccl__block_new(w, bytes))) return;
    for (i = bytes = 0; i < r->count; i++) {
        if (r->at[i] || !r->list[i].bytes) continue;
        r->at[i] = (char *)r->block->data + bytes;
        bytes += (r->list[i].bytes + 15) / 16 * 16;
        if (i < r->sends) memcpy(r->at[i], r->list[i].data, (size_t)r->list[i].bytes);
    }
}

static seqpar_nccl__request *seqpar_nccl__request_blank(seqpar_nccl__world *w) {
    seqpar_nccl__request *r = w->spare;
    if (r) {
        w->spare = r->next;
        return r;
    }
    r = SEQPAR_NCCL__NEW(seqpar_nccl__request, 1);
    if (!r) {
        seqpar_nccl__fail(w, SEQPAR_ERR_MEMORY, "out of memory for a request");
        return NULL;
    }
    r->next = w->spare;
    w->spare = r; /* if an event fails, seqpar_nccl__close destroys r with those it has */
    if (!SEQPAR_NCCL__CUDA(w, cudaEventCreateWithFlags(&r->ready, cudaEventDisableTiming)) ||
        !SEQPAR_NCCL__CUDA(w, cudaEventCreateWithFlags(&r->done, cudaEventDisableTiming)))
        return NULL;
    w->spare = r->next;
    return r;
}

/* Appends a new request to the comm's list. If anything fails, returns NULL; the world has then
   failed, and frees the request when it is closed. */
static seqpar_nccl__request *seqpar_nccl__request_new(seqpar_nccl__member *m,
                                                      const seqpar_group *g, int on_queue) {
    seqpar_nccl__world *w = m->world;
    seqpar_nccl__request *r = seqpar_nccl__request_blank(w), **link = &m->requests;
    if (!r) return NULL;
    while (*link) link = &(*link)->next;
    *link = r;
    r->next = NULL;
    r->name = g->name;
    r->step = g->step;
    r->number = w->requests++;
    r->sends = g->send_count;
    r->left = r->count = g->send_count + g->recv_count;
    r->state = r->left ? SEQPAR_NCCL__POSTED : SEQPAR_NCCL__DONE;
    r->waited = 0;
    r->since = SEQPAR_NCCL_SECONDS();
    r->list = SEQPAR_NCCL__NEW(seqpar_transfer, r->count);
    r->at = SEQPAR_NCCL__NEW(void *, r->count);
    if (!r->list || !r->at) {
        r->count = 0;
        seqpar_nccl__fail(w, SEQPAR_ERR_MEMORY, "out of memory for '%s'", g->name);
        return NULL;
    }
    if (g->send_count) memcpy(r->list, g->sends, (size_t)g->send_count * sizeof *r->list);
    if (g->recv_count)
        memcpy(r->list + g->send_count, g->recvs, (size_t)g->recv_count * sizeof *r->list);
    seqpar_nccl__choose_buffers(w, r, on_queue);
    return w->news.status ? NULL : r;
}

static void seqpar_nccl__post(seqpar_nccl__member *m, const seqpar_nccl__request *r) {
    seqpar_nccl__note n = seqpar_nccl__note_of(SEQPAR_NCCL__POST, m->world->rank);
    seqpar_nccl__items list;
    memset(&list, 0, sizeof list);
    n.comm = m->id;
    n.request = r->number;
    n.step = r->step;
    n.sends = r->sends;
    snprintf(n.text, sizeof n.text, "%s", r->name);
    for (int64_t i = 0; i < r->count; i++)
        if (!seqpar_nccl__append(&list, m->world_rank[r->list[i].peer], r->list[i].bytes))
            seqpar_nccl__fail(m->world, SEQPAR_ERR_MEMORY, "out of memory for '%s'", r->name);
    n.count = list.count;
    if (!m->world->news.status && n.count) seqpar_nccl__tell(m->world, &n, list.item);
    SEQPAR_FREE(list.item);
}

static int seqpar_nccl__unstarted(const seqpar_nccl__member *m,
                                  const seqpar_nccl__request *but) {
    const seqpar_nccl__request *r;
    for (r = m->requests; r; r = r->next)
        if (r != but && r->state == SEQPAR_NCCL__POSTED) return 1;
    return m->launching != NULL;
}

/* Starts a group behind the work that the queue has so far. First waits until host groups begun
   earlier have started, since they come first on all ranks. */
static void seqpar_nccl__start_on_queue(seqpar_nccl__member *m, seqpar_nccl__request *r,
                                        cudaStream_t queue) {
    seqpar_nccl__world *w = m->world;
    while (!w->news.status && seqpar_nccl__unstarted(m, r)) seqpar_nccl__rest(w, 0);
    if (w->news.status || !SEQPAR_NCCL__CUDA(w, cudaEventRecord(r->ready, queue)) ||
        !SEQPAR_NCCL__CUDA(w, cudaStreamWaitEvent(m->stream, r->ready, 0)))
        return;
    for (int64_t i = 0; i < r->count; i++)
        if (!seqpar_nccl__add_ready(m, r, i))
            seqpar_nccl__fail(w, SEQPAR_ERR_MEMORY, "out of memory for '%s'", r->name);
    if (!w->news.status) seqpar_nccl__launch(m);
}

static seqpar_status seqpar_nccl__begin(seqpar_comm *comm, const seqpar_group *group,
                                        void *queue, seqpar_request *request) {
    seqpar_nccl__member *m = (seqpar_nccl__member *)comm->state;
    seqpar_nccl__world *w = m->world;
    seqpar_nccl__request *r;
    seqpar_status status;
    pthread_mutex_lock(&w->lock);
    r = w->news.status ? NULL : seqpar_nccl__request_new(m, group, queue != NULL);
    if (r && queue)
        seqpar_nccl__start_on_queue(m, r, (cudaStream_t)queue);
    else if (r)
        seqpar_nccl__post(m, r);
    status = seqpar_nccl__status(w);
    request->state = status ? NULL : r;
    pthread_mutex_unlock(&w->lock);
    return status;
}

/* Tells the referee, once per wait, that this rank begins nothing until the request is done. */
static void seqpar_nccl__say_blocked(seqpar_nccl__world *w, const seqpar_nccl__request *r) {
    seqpar_nccl__note n = seqpar_nccl__note_of(SEQPAR_NCCL__BLOCKED, w->rank);
    n.request = r->number;
    seqpar_nccl__tell(w, &n, NULL);
}

static seqpar_status seqpar_nccl__wait(seqpar_comm *comm, seqpar_request *request,
                                       void *queue) {
    seqpar_nccl__member *m = (seqpar_nccl__member *)comm->state;
    seqpar_nccl__world *w = m->world;
    seqpar_nccl__request *r = (seqpar_nccl__request *)request->state;
    /* the host itself copies out of pinned memory, so it then waits until the group is done */
    int far = queue && !r->block ? SEQPAR_NCCL__RUNS : SEQPAR_NCCL__DONE, naps = 0;
    seqpar_status status;
    pthread_mutex_lock(&w->lock);
    for (; !w->news.status && r->state < far; naps++) {
        if (naps == 20 && r->state == SEQPAR_NCCL__POSTED) seqpar_nccl__say_blocked(w, r);
        seqpar_nccl__rest(w, r->state != SEQPAR_NCCL__POSTED);
    }
    if (!w->news.status && r->state == SEQPAR_NCCL__RUNS)
        SEQPAR_NCCL__CUDA(w, cudaStreamWaitEvent((cudaStream_t)queue, r->done, 0));
    status = seqpar_nccl__status(w);
    if (r->state == SEQPAR_NCCL__DONE || status)
        seqpar_nccl__unlink(m, r);
    else
        r->waited = 1;
    pthread_mutex_unlock(&w->lock);
    return status;
}

static void seqpar_nccl__abort(seqpar_comm *comm, const char *text) {
    seqpar_nccl__world *w = ((seqpar_nccl__member *)comm->state)->world;
    pthread_mutex_lock(&w->lock);
    seqpar_nccl__fail(w, comm->error->status ? comm->error->status : SEQPAR_ERR_PEER, "%s",
                      text);
    pthread_mutex_unlock(&w->lock);
}

static void seqpar_nccl__close(seqpar_nccl__world *w);
static void seqpar_nccl__free(seqpar_comm *comm) {
    seqpar_nccl__member *m = (seqpar_nccl__member *)comm->state;
    seqpar_nccl__world *w = m->world;
    int used = 0;
    pthread_mutex_lock(&w->lock);
    m->freed = 1;
    for (m = w->members; m; m = m->next) used += !m->freed;
    if (used) seqpar_nccl__progress(w);
    pthread_mutex_unlock(&w->lock);
    if (!used) seqpar_nccl__close(w);
}

/* >>split  comms of a world ---------------------------------------------------------------- */

static seqpar_status seqpar_nccl__split(seqpar_comm *comm, int64_t color, int64_t key,
                                        seqpar_comm **sub);
static seqpar_nccl__member *seqpar_nccl__member_new(seqpar_nccl__world *w, int64_t size) {
    static const seqpar_comm_table table = {"nccl",
                                            seqpar_nccl__begin,
                                            seqpar_nccl__wait,
                                            seqpar_nccl__split,
                                            seqpar_nccl__abort,
                                            seqpar_nccl__free,
                                            1};
    seqpar_nccl__member *m = SEQPAR_NCCL__NEW(seqpar_nccl__member, 1);
    if (m) m->world_rank = SEQPAR_NCCL__NEW(int64_t, size);
    if (!m || !m->world_rank) {
        SEQPAR_FREE(m);
        seqpar_nccl__fail(w, SEQPAR_ERR_MEMORY, "out of memory for a comm of size %lld",
                          (long long)size);
        return NULL;
    }
    m->comm.table = &table;
    m->comm.size = size;
    m->comm.error = w->error;
    m->comm.state = m;
    m->world = w;
    return m;
}

/* Adds a comm to the world's list. Creates its stream, unless it has one, with the highest
   priority: a message that waits for another kernel does not overlap with computation. */
static void seqpar_nccl__member_start(seqpar_nccl__member *m) {
    seqpar_nccl__world *w = m->world;
    int least, greatest;
    m->next = w->members;
    w->members = m;
    if (m->stream || !SEQPAR_NCCL__CUDA(w, cudaDeviceGetStreamPriorityRange(&least, &greatest)))
        return;
    m->own_stream = SEQPAR_NCCL__CUDA(
        w, cudaStreamCreateWithPriority(&m->stream, cudaStreamNonBlocking, greatest));
}

static void seqpar_nccl__settle(seqpar_nccl__member *m) {
    while (!m->world->news.status && m->launching) seqpar_nccl__rest(m->world, 1);
}

static ncclConfig_t seqpar_nccl__config(void) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0; /* calls do not block the host; seqpar_nccl__ask polls for their end */
    return config;
}

/* Calls ncclCommSplit: its color is the first rank of the caller's color, its key the rank in
   the new comm. The caller holds the lock. */
static void seqpar_nccl__split_nccl(seqpar_nccl__member *m, seqpar_nccl__member *s, int color) {
    ncclConfig_t config = seqpar_nccl__config();
    while (!m->world->news.status && seqpar_nccl__unstarted(m, NULL))
        seqpar_nccl__rest(m->world, 0);
    if (m->world->news.status ||
        !SEQPAR_NCCL__NCCL(m,
                           ncclCommSplit(m->nccl, color, (int)s->comm.rank, &s->nccl, &config)))
        return;
    m->part = s;
    m->launching = "ncclCommSplit";
    m->since = SEQPAR_NCCL_SECONDS();
    seqpar_nccl__settle(m);
    m->part = NULL;
    if (m->world->news.status && s->nccl) ncclCommAbort(s->nccl); /* the split was done */
    if (m->world->news.status) return;
    seqpar_nccl__member_start(s);
    s->launching = "ncclCommSplit"; /* so that the new communicator's state is polled, too */
    s->since = SEQPAR_NCCL_SECONDS();
    seqpar_nccl__settle(s);
}

typedef struct seqpar_nccl__choice {
    int64_t color, key, comms;
} seqpar_nccl__choice;

static int64_t seqpar_nccl__index_of(const seqpar_nccl__choice *all, int64_t size,
                                     int64_t rank) {
    int64_t place = 0;
    for (int64_t r = 0; r < size; r++)
        place += all[r].color == all[rank].color &&
                 (all[r].key < all[rank].key || (all[r].key == all[rank].key && r < rank));
    return place;
}

static seqpar_nccl__member *seqpar_nccl__part(seqpar_nccl__member *m,
                                              const seqpar_nccl__choice *all, int *color) {
    seqpar_nccl__world *w = m->world;
    int64_t me = m->comm.rank, size = 0;
    seqpar_nccl__member *s;
    *color = -1;
    for (int64_t r = 0; r < m->comm.size; r++) {
        if (all[r].color == all[me].color && !size++) *color = (int)r;
        if (w->comms < all[r].comms) w->comms = all[r].comms;
    }
    w->comms++; /* an id that is new to every member */
    s = seqpar_nccl__member_new(w, size);
    if (!s) return NULL;
    s->id = w->comms;
    s->comm.rank = seqpar_nccl__index_of(all, m->comm.size, me);
    for (int64_t r = 0; r < m->comm.size; r++)
        if (all[r].color == all[me].color)
            s->world_rank[seqpar_nccl__index_of(all, m->comm.size, r)] = m->world_rank[r];
    return s;
}

static seqpar_status seqpar_nccl__split(seqpar_comm *comm, int64_t color, int64_t key,
                                        seqpar_comm **sub) {
    seqpar_nccl__member *m = (seqpar_nccl__member *)comm->state, *s = NULL;
    seqpar_nccl__world *w = m->world;
    seqpar_nccl__choice mine, *all = SEQPAR_NCCL__NEW(seqpar_nccl__choice, comm->size);
    int64_t *bytes = SEQPAR_NCCL__NEW(int64_t, comm->size);
    int first;
    seqpar_status status = SEQPAR_OK, failed;
    for (int64_t r = 0; bytes && r < comm->size; r++) bytes[r] = sizeof mine;
    mine.color = color;
    mine.key = key;
    mine.comms = w->comms;
    if (all && bytes) status = seqpar_comm_all_gather(comm, all, &mine, bytes, "split");
    pthread_mutex_lock(&w->lock);
    if (!all || !bytes) seqpar_nccl__fail(w, SEQPAR_ERR_MEMORY, "out of memory for a split");
    if (!status && !w->news.status) s = seqpar_nccl__part(m, all, &first);
    if (s) seqpar_nccl__split_nccl(m, s, first);
    failed = seqpar_nccl__status(w);
    if (failed) status = failed;
    if (s && status) seqpar_nccl__member_free(s);
    pthread_mutex_unlock(&w->lock);
    SEQPAR_FREE(all);
    SEQPAR_FREE(bytes);
    if (!status) *sub = &s->comm;
    return status;
}

/* >>open  ranks find each other, then NCCL ------------------------------------------------- */

static int seqpar_nccl__env(seqpar_nccl__world *w, const char *name, int64_t *value,
                            const char *what) {
    const char *text = getenv(name);
    char *end = NULL;
    long long v = text ? strtoll(text, &end, 10) : 0;
    if (text && end != text && !*end && v >= 0) {
        *value = v;
        return 1;
    }
    if (what)
        seqpar_nccl__fail(w, SEQPAR_ERR_OPTION,
                          "the environment's %s is '%s', not %s; start by torchrun or mpirun, "
                          "set it, or fill in seqpar_nccl_desc",
                          name, text ? text : "", what);
    return 0;
}

static int seqpar_nccl__listen(seqpar_nccl__world *w, int64_t *port) {
    struct sockaddr_in at;
    socklen_t bytes = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_port = htons((uint16_t)*port);
    if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 1024) ||
        getsockname(fd, (struct sockaddr *)&at, &bytes)) {
        seqpar_nccl__fail(w, SEQPAR_ERR_TRANSPORT,
                          "rank 0 cannot listen on port %lld: %s; choose a free one by "
                          "MASTER_PORT or seqpar_nccl_desc.port",
                          (long long)*port, strerror(errno));
        if (fd >= 0) close(fd);
        return -1;
    }
    /* if a rank disconnects between poll and accept, accept must not block the referee */
    fcntl(fd, F_SETFL, O_NONBLOCK);
    *port = ntohs(at.sin_port);
    return fd;
}

#define SEQPAR_NCCL__HOST 256 /* bytes of a name: the domain name system has 253 letters */

/* Writes the address that this machine would use to send outside. Sends nothing. */
static void seqpar_nccl__own_address(char *host) {
    struct sockaddr_in out;
    socklen_t bytes = sizeof out;
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    memset(&out, 0, sizeof out);
    out.sin_family = AF_INET;
    out.sin_port = htons(9);
    out.sin_addr.s_addr = htonl(0xC0000201u); /* 192.0.2.1, which nobody has */
    if (fd < 0 || connect(fd, (struct sockaddr *)&out, sizeof out) ||
        getsockname(fd, (struct sockaddr *)&out, &bytes))
        out.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    inet_ntop(AF_INET, &out.sin_addr, host, SEQPAR_NCCL__HOST);
    if (fd >= 0) close(fd);
}

/* where rank 0's referee listens */
typedef struct seqpar_nccl__ticket {
    char host[SEQPAR_NCCL__HOST];
    int64_t port;
} seqpar_nccl__ticket;

/* The lookup of a host name, in a thread of its own. A name server can be slow, so the caller
   may stop waiting; the thread then frees the struct. */
typedef struct seqpar_nccl__lookup {
    pthread_mutex_t lock;
    char host[SEQPAR_NCCL__HOST];
    struct sockaddr_in address;
    int code, ready, left; /* left: nobody waits for the answer any more */
} seqpar_nccl__lookup;

static int seqpar_nccl__resolve(struct sockaddr_in *address, const char *host, int flags) {
    struct addrinfo hints, *list = NULL;
    int code;
    memset(&hints, 0, sizeof hints);
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags;
    code = getaddrinfo(host, NULL, &hints, &list);
    if (code) return code;
    memcpy(address, list->ai_addr, sizeof *address);
    freeaddrinfo(list);
    return 0;
}

static void seqpar_nccl__lookup_free(seqpar_nccl__lookup *l) {
    pthread_mutex_destroy(&l->lock);
    SEQPAR_FREE(l);
}

static void *seqpar_nccl__lookup_main(void *argument) {
    seqpar_nccl__lookup *l = (seqpar_nccl__lookup *)argument;
    int code = seqpar_nccl__resolve(&l->address, l->host, 0), left;
    pthread_mutex_lock(&l->lock);
    l->code = code;
    l->ready = 1;
    left = l->left;
    pthread_mutex_unlock(&l->lock);
    if (left) seqpar_nccl__lookup_free(l);
    return NULL;
}

/* Returns getaddrinfo's code; EAI_AGAIN too where there is no answer by `until`. */
static int seqpar_nccl__look_up(struct sockaddr_in *address, const char *host, double until) {
    seqpar_nccl__lookup *l;
    pthread_t thread;
    int ready = 0, code = EAI_AGAIN;
    if (!seqpar_nccl__resolve(address, host, AI_NUMERICHOST)) return 0;
    if (!(l = SEQPAR_NCCL__NEW(seqpar_nccl__lookup, 1))) return EAI_MEMORY;
    pthread_mutex_init(&l->lock, NULL);
    snprintf(l->host, sizeof l->host, "%s", host);
    if (pthread_create(&thread, NULL, seqpar_nccl__lookup_main, l)) {
        seqpar_nccl__lookup_free(l);
        return EAI_MEMORY;
    }
    pthread_detach(thread);
    while (!ready) {
        pthread_mutex_lock(&l->lock);
        ready = l->ready;
        if (ready) {
            code = l->code;
            *address = l->address;
        } else if (SEQPAR_NCCL_SECONDS() > until) {
            l->left = 1;
            pthread_mutex_unlock(&l->lock);
            return code;
        }
        pthread_mutex_unlock(&l->lock);
        if (!ready) seqpar_nccl__nap(1000);
    }
    seqpar_nccl__lookup_free(l);
    return code;
}

/* Connects, but waits only until `until`: connect can take minutes to fail if no machine has
   the address. Returns 0 if connected. */
static int seqpar_nccl__connect(int fd, const struct sockaddr_in *address, double until) {
    struct pollfd ready = {fd, POLLOUT, 0};
    int flags = fcntl(fd, F_GETFL), trouble = 0;
    socklen_t bytes = sizeof trouble;
    double left = until - SEQPAR_NCCL_SECONDS();
    fcntl(fd, F_SETFL, flags | O_NONBLOCK);
    if (connect(fd, (const struct sockaddr *)address, sizeof *address)) {
        if (errno != EINPROGRESS || left <= 0 ||
            poll(&ready, 1, (int)(1000 * (left < 1e6 ? left : 1e6)) + 1) != 1)
            return -1;
        if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &trouble, &bytes) || trouble) return -1;
    }
    return fcntl(fd, F_SETFL, flags);
}

/* Returns a connected socket, or -1. *code: what getaddrinfo returned for the name. */
static int seqpar_nccl__dial(const char *host, int64_t port, double until, int *code) {
    struct sockaddr_in address;
    int fd, yes = 1;
    if ((*code = seqpar_nccl__look_up(&address, host, until))) return -1;
    address.sin_port = htons((uint16_t)port);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd >= 0 && seqpar_nccl__connect(fd, &address, until)) {
        close(fd);
        fd = -1;
    }
    if (fd >= 0) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    return fd;
}

/* Writes the file atomically: writes a temporary file in the same folder, then renames it. */
static void seqpar_nccl__write_ticket(seqpar_nccl__world *w, const char *path,
                                      const seqpar_nccl__ticket *t) {
    char beside[1024];
    FILE *file;
    int ok;
    snprintf(beside, sizeof beside, "%.990s.tmp.%ld", path, (long)getpid());
    file = fopen(beside, "w");
    ok = file && fprintf(file, "seqpar_nccl %s %lld\n", t->host, (long long)t->port) > 0;
    if (file) ok = !fclose(file) && ok;
    if (ok && !rename(beside, path)) {
        w->file = path;
        return;
    }
    seqpar_nccl__fail(
        w, SEQPAR_ERR_FILE_WRITE,
        "rank 0 cannot write '%s': %s; give a path in a folder that all ranks share", path,
        strerror(errno));
    remove(beside);
}

static int seqpar_nccl__read_ticket(const char *path, seqpar_nccl__ticket *t) {
    FILE *file = fopen(path, "r");
    long long port = 0;
    int ok = file && fscanf(file, "seqpar_nccl %255s %lld", t->host, &port) == 2;
    t->port = port;
    if (file) fclose(file);
    return ok;
}

/* Connects to rank 0, and retries until it answers: it may not be up yet, and a file may be
   left over from another run. An unknown host name is retried for an eighth of
   connect_s: it may be so new that name servers do not have it yet. */
static void seqpar_nccl__find(seqpar_nccl__world *w, const char *path, seqpar_nccl__ticket *t) {
    /* asked: seconds that the name has been unknown */
    double began = SEQPAR_NCCL_SECONDS(), until = began + w->connect_s, now = began, asked = 0;
    int known = !path, nap = 500, code = 0;
    while (w->socket < 0 && now <= until && asked <= w->connect_s / 8) {
        if (path) known = seqpar_nccl__read_ticket(path, t);
        if (known) w->socket = seqpar_nccl__dial(t->host, t->port, until, &code);
        if (w->socket < 0) seqpar_nccl__nap(nap = nap < 50000 ? 2 * nap : nap);
        asked = code && code != EAI_AGAIN ? asked + SEQPAR_NCCL_SECONDS() - now : 0;
        now = SEQPAR_NCCL_SECONDS();
    }
    if (w->socket >= 0) return;
    if (known && code)
        seqpar_nccl__fail(
            w, SEQPAR_ERR_TIMEOUT,
            "rank %lld cannot find the machine of rank 0, '%.255s': %s, after %.3g s; correct "
            "MASTER_ADDR, or write the machine's address in digits",
            (long long)w->rank, t->host, gai_strerror(code), now - began);
    else if (known)
        seqpar_nccl__fail(w, SEQPAR_ERR_TIMEOUT,
                          "rank %lld found nobody at %.255s port %lld within %g s; does rank 0 "
                          "run there, and is the port open?",
                          (long long)w->rank, t->host, (long long)t->port, w->connect_s);
    else
        seqpar_nccl__fail(w, SEQPAR_ERR_FILE_OPEN,
                          "rank %lld waited %g s for rank 0 to write '%.300s'; give all ranks "
                          "the same path on a disk they share",
                          (long long)w->rank, w->connect_s, path);
}

/* Starts the referee on rank 0, and connects rank 0 itself to it. */
static void seqpar_nccl__appoint(seqpar_nccl__world *w, int listener) {
    seqpar_nccl__referee *f = w->referee = seqpar_nccl__referee_new(w->size);
    int pair[2];
    if (!f) {
        close(listener);
        seqpar_nccl__fail(w, SEQPAR_ERR_MEMORY, "out of memory for a referee of %lld ranks",
                          (long long)w->size);
        return;
    }
    f->listener = listener;
    f->version = w->version;
    f->connect_s = w->connect_s;
    f->began = SEQPAR_NCCL_SECONDS();
    f->id = w->id;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) {
        seqpar_nccl__fail(w, SEQPAR_ERR_TRANSPORT, "socketpair on rank 0: %s", strerror(errno));
        return;
    }
    w->socket = pair[0];
    f->socket[0] = pair[1];
    f->seen[0] = 1;
    f->met = f->came = 1;
    if (f->came == f->size) seqpar_nccl__welcome(f);
    w->refereed = !pthread_create(&f->thread, NULL, seqpar_nccl__referee_main, f);
    if (!w->refereed)
        seqpar_nccl__fail(
            w, SEQPAR_ERR_THREAD,
            "the referee's thread could not be started on rank 0; raise the limit of threads");
}

static void seqpar_nccl__present(seqpar_nccl__world *w) {
    seqpar_nccl__note n = seqpar_nccl__note_of(SEQPAR_NCCL__HELLO, w->rank);
    double began = SEQPAR_NCCL_SECONDS();
    n.magic = SEQPAR_NCCL__MAGIC;
    n.version = w->version;
    n.size = w->size;
    if (w->rank != 0) seqpar_nccl__tell(w, &n, NULL);
    while (!w->news.status && !w->welcome) {
        if (SEQPAR_NCCL_SECONDS() - began > 2 * w->connect_s) /* the referee himself waits
                                                                 connect_s and then says who is
                                                                 missing */
            seqpar_nccl__fail(w, SEQPAR_ERR_TIMEOUT,
                              "rank %lld was not let in by rank 0 within %g s; is it rank 0 "
                              "who answers there?",
                              (long long)w->rank, 2 * w->connect_s);
        seqpar_nccl__readable(w->socket, 20);
        seqpar_nccl__hear(w);
    }
}

static void seqpar_nccl__meet(seqpar_nccl__world *w, const seqpar_nccl_desc *d,
                              const char *path, seqpar_nccl__ticket *t) {
    int listener;
    if (w->rank != 0)
        seqpar_nccl__find(w, path, t);
    else if ((listener = seqpar_nccl__listen(w, &t->port)) >= 0) {
        if (path && d->host)
            snprintf(t->host, sizeof t->host, "%s", d->host);
        else if (path)
            seqpar_nccl__own_address(t->host);
        if (path) seqpar_nccl__write_ticket(w, path, t);
        if (w->news.status)
            close(listener);
        else
            seqpar_nccl__appoint(w, listener);
    }
    if (!w->news.status) seqpar_nccl__present(w);
    /* after a failure the file stays as long as the referee, for ranks that connect later */
    if (w->file && w->welcome) remove(w->file);
    if (w->welcome) w->file = NULL;
}

static void seqpar_nccl__choose_device(seqpar_nccl__world *w, const seqpar_nccl_desc *d) {
    int count = 0;
    int64_t local;
    cudaError_t code = cudaGetDeviceCount(&count);
    if (code != cudaSuccess || count < 1) {
        seqpar_nccl__fail(w, SEQPAR_ERR_TRANSPORT,
                          "rank %lld has no CUDA device (cudaGetDeviceCount: %s); without one "
                          "use seqpar_run_threads",
                          (long long)w->rank, cudaGetErrorString(code));
        return;
    }
    if (!d->comm && !d->keep_device && seqpar_nccl__env(w, "LOCAL_RANK", &local, NULL)) {
        if (local >= count)
            seqpar_nccl__fail(w, SEQPAR_ERR_RANK,
                              "LOCAL_RANK is %lld, but this machine has %d CUDA devices; start "
                              "at most %d ranks on it",
                              (long long)local, count, count);
        else
            SEQPAR_NCCL__CUDA(w, cudaSetDevice((int)local));
    }
    if (!w->news.status) SEQPAR_NCCL__CUDA(w, cudaGetDevice(&w->device));
}

static seqpar_nccl__member *seqpar_nccl__open_nccl(seqpar_nccl__world *w,
                                                   const seqpar_nccl_desc *d) {
    seqpar_nccl__member *m = seqpar_nccl__member_new(w, w->size);
    ncclConfig_t config = seqpar_nccl__config();
    if (!m) return NULL;
    for (int64_t r = 0; r < w->size; r++) m->world_rank[r] = r;
    m->comm.rank = w->rank;
    m->adopted = d->comm != NULL;
    m->nccl = d->comm;
    m->stream = d->comm ? d->stream : NULL;
    seqpar_nccl__member_start(m);
    if (!w->news.status && !d->comm)
        SEQPAR_NCCL__NCCL(
            m, ncclCommInitRankConfig(&m->nccl, (int)w->size, w->id, (int)w->rank, &config));
    seqpar_nccl__settle(m);
    return m;
}

/* Worlds that are opened by comm or id have a communicator before the ranks know the referee.
   Its first message sends the referee's address from rank 0 to all others, through pinned
   memory. */
static void seqpar_nccl__hand_out(seqpar_nccl__member *m, seqpar_nccl__ticket *t) {
    seqpar_nccl__world *w = m->world;
    seqpar_transfer *list = SEQPAR_NCCL__NEW(seqpar_transfer, w->size);
    seqpar_group g;
    seqpar_nccl__request *r;
    double limit = w->limit_s;
    if (!list) {
        seqpar_nccl__fail(w, SEQPAR_ERR_MEMORY, "out of memory for an address");
        return;
    }
    memset(&g, 0, sizeof g);
    g.name = "address of rank 0";
    g.sends = g.recvs = list;
    for (int64_t i = 1; i < w->size; i++) {
        list[i - 1].peer = w->rank ? 0 : i;
        list[i - 1].data = t;
        list[i - 1].bytes = sizeof *t;
    }
    *(w->rank ? &g.recv_count : &g.send_count) = w->rank ? 1 : w->size - 1;
    r = seqpar_nccl__request_new(m, &g, 0);
    SEQPAR_FREE(list);
    for (int64_t i = 0; r && i < r->count; i++)
        if (!seqpar_nccl__add_ready(m, r, i))
            seqpar_nccl__fail(w, SEQPAR_ERR_MEMORY, "out of memory for an address");
    w->limit_s = w->connect_s;
    while (r && !w->news.status && r->state != SEQPAR_NCCL__DONE) seqpar_nccl__rest(w, 1);
    w->limit_s = limit;
    if (r && !w->news.status) seqpar_nccl__unlink(m, r);
}

static seqpar_nccl__member *seqpar_nccl__open_by_nccl(seqpar_nccl__world *w,
                                                      const seqpar_nccl_desc *d) {
    seqpar_nccl__ticket t;
    seqpar_nccl__member *m;
    int listener = -1;
    memset(&t, 0, sizeof t);
    t.port = d->port;
    if (d->host)
        snprintf(t.host, sizeof t.host, "%s", d->host);
    else
        seqpar_nccl__own_address(t.host);
    if (d->id) w->id = *d->id;
    seqpar_nccl__choose_device(w, d);
    if (!w->news.status && w->rank == 0) listener = seqpar_nccl__listen(w, &t.port);
    m = w->news.status ? NULL : seqpar_nccl__open_nccl(w, d);
    if (!w->news.status) seqpar_nccl__hand_out(m, &t);
    if (listener >= 0 && w->news.status)
        close(listener);
    else if (listener >= 0)
        seqpar_nccl__appoint(w, listener);
    else if (!w->news.status)
        seqpar_nccl__find(w, NULL, &t);
    if (!w->news.status) seqpar_nccl__present(w);
    return m;
}

static seqpar_nccl__member *seqpar_nccl__open_by_tcp(seqpar_nccl__world *w,
                                                     const seqpar_nccl_desc *d) {
    seqpar_nccl__ticket t;
    const char *host = d->host ? d->host : getenv("MASTER_ADDR");
    ncclResult_t code;
    memset(&t, 0, sizeof t);
    t.port = d->port;
    if (!d->file && !t.port &&
        !seqpar_nccl__env(w, "MASTER_PORT", &t.port, "a port of rank 0's machine"))
        return NULL;
    if (t.port < 0 || t.port > 65535) {
        seqpar_nccl__fail(w, SEQPAR_ERR_OPTION,
                          "the port of rank 0's machine is %lld; give 1 to 65535 by "
                          "MASTER_PORT or seqpar_nccl_desc.port",
                          (long long)t.port);
        return NULL;
    }
    if (!d->file && !host && w->rank) {
        seqpar_nccl__fail(w, SEQPAR_ERR_OPTION,
                          "MASTER_ADDR is not set on rank %lld; set it to the name of rank 0's "
                          "machine, or fill in seqpar_nccl_desc",
                          (long long)w->rank);
        return NULL;
    }
    if (host && strlen(host) >= sizeof t.host) {
        seqpar_nccl__fail(w, SEQPAR_ERR_OPTION,
                          "rank 0's machine is called '%.60s...' with %lld letters, names have "
                          "at most %d; set MASTER_ADDR to its name or address",
                          host, (long long)strlen(host), SEQPAR_NCCL__HOST - 1);
        return NULL;
    }
    if (host) snprintf(t.host, sizeof t.host, "%s", host);
    code = w->rank ? ncclSuccess : ncclGetUniqueId(&w->id);
    if (code != ncclSuccess)
        seqpar_nccl__fail(w, SEQPAR_ERR_TRANSPORT, "ncclGetUniqueId on rank 0: %s",
                          ncclGetErrorString(code));
    if (!w->news.status) seqpar_nccl__meet(w, d, d->file, &t);
    if (!w->news.status) seqpar_nccl__choose_device(w, d);
    return w->news.status ? NULL : seqpar_nccl__open_nccl(w, d);
}

static void seqpar_nccl__seats(seqpar_nccl__world *w, const seqpar_nccl_desc *d) {
    int rank = (int)d->rank, size = (int)d->size, version = 0;
    ncclResult_t code = ncclGetVersion(&version);
    if (d->comm && code == ncclSuccess) code = ncclCommUserRank(d->comm, &rank);
    if (d->comm && code == ncclSuccess) code = ncclCommCount(d->comm, &size);
    w->rank = rank;
    w->size = size;
    w->version = version;
    if (code != ncclSuccess)
        seqpar_nccl__fail(w, SEQPAR_ERR_TRANSPORT, "NCCL does not answer: %s",
                          ncclGetErrorString(code));
    else if (version < 21800)
        seqpar_nccl__fail(w, SEQPAR_ERR_TRANSPORT,
                          "libnccl.so is version %d; 2.18 (21800) or newer is needed", version);
    else if (!size && seqpar_nccl__env(w, "RANK", &w->rank, "a rank"))
        seqpar_nccl__env(w, "WORLD_SIZE", &w->size, "a number of ranks");
    if (!w->news.status && w->size < 1)
        seqpar_nccl__fail(w, SEQPAR_ERR_RANKS,
                          "a world of %lld ranks cannot be; set WORLD_SIZE to at least 1",
                          (long long)w->size);
    if (!w->news.status && (w->rank < 0 || w->rank >= w->size))
        seqpar_nccl__fail(w, SEQPAR_ERR_RANK,
                          "rank %lld is outside a world of %lld; use 0 .. %lld",
                          (long long)w->rank, (long long)w->size, (long long)w->size - 1);
    w->error->rank = w->rank;
}

static seqpar_nccl__world *seqpar_nccl__world_new(const seqpar_nccl_desc *d,
                                                  seqpar_error *error) {
    seqpar_nccl__world *w = SEQPAR_NCCL__NEW(seqpar_nccl__world, 1);
    memset(error, 0, sizeof *error);
    if (!w) {
        seqpar_fail(error, SEQPAR_ERR_MEMORY, "out of memory for a world");
        return NULL;
    }
    w->socket = -1;
    w->error = error;
    w->connect_s = d->connect_s > 0 ? d->connect_s : 120;
    w->limit_s = d->limit_s == 0 ? 600 : d->limit_s;
    pthread_mutex_init(&w->lock, NULL);
    return w;
}

static seqpar_status seqpar_nccl__enter(seqpar_nccl__world *w, const seqpar_nccl_desc *d,
                                        seqpar_comm **world) {
    seqpar_nccl__member *m = NULL;
    seqpar_status status;
    pthread_mutex_lock(&w->lock);
    seqpar_nccl__seats(w, d);
    if (!w->news.status)
        m = d->comm || d->id ? seqpar_nccl__open_by_nccl(w, d) : seqpar_nccl__open_by_tcp(w, d);
    if (!w->news.status)
        w->monitored = !pthread_create(&w->monitor, NULL, seqpar_nccl__monitor_main, w);
    if (!w->news.status && !w->monitored)
        seqpar_nccl__fail(
            w, SEQPAR_ERR_THREAD,
            "the watching thread could not be started on rank %lld; raise the limit of threads",
            (long long)w->rank);
    status = seqpar_nccl__status(w);
    *world = status ? NULL : &m->comm;
    pthread_mutex_unlock(&w->lock);
    return status;
}

/* The lock is held. */
static void seqpar_nccl__say_goodbye(seqpar_nccl__world *w) {
    seqpar_nccl__note n = seqpar_nccl__note_of(SEQPAR_NCCL__BYE, w->rank);
    double began = SEQPAR_NCCL_SECONDS();
    seqpar_nccl__member *m;
    for (m = w->members; m; m = m->next) m->freed = 1;
    if (w->untold) seqpar_nccl__tell_news(w);
    if (!w->news.status) seqpar_nccl__tell(w, &n, NULL);
    while (w->members && !w->news.status &&
           (w->limit_s < 0 || SEQPAR_NCCL_SECONDS() - began <= w->limit_s))
        seqpar_nccl__rest(w, 1);
    seqpar_nccl__abort_all(w);
    w->quiet = w->closing = 1;
}

static void seqpar_nccl__close(seqpar_nccl__world *w) {
    seqpar_nccl__request *r;
    seqpar_nccl__block *b;
    pthread_mutex_lock(&w->lock);
    seqpar_nccl__say_goodbye(w);
    pthread_mutex_unlock(&w->lock);
    if (w->monitored) pthread_join(w->monitor, NULL);
    if (w->socket >= 0) close(w->socket);
    if (w->refereed) pthread_join(w->referee->thread, NULL);
    if (w->file) remove(w->file);
    seqpar_nccl__referee_free(w->referee);
    while (w->members) seqpar_nccl__member_free(w->members);
    while ((r = w->spare)) {
        w->spare = r->next;
        if (r->ready) cudaEventDestroy(r->ready);
        if (r->done) cudaEventDestroy(r->done);
        SEQPAR_FREE(r);
    }
    while ((b = w->blocks)) {
        w->blocks = b->next;
        cudaFreeHost(b->data);
        SEQPAR_FREE(b);
    }
    SEQPAR_FREE(w->items.item);
    pthread_mutex_destroy(&w->lock);
    SEQPAR_FREE(w);
}

static seqpar_status seqpar_nccl__ruling(seqpar_nccl__world *w, seqpar_error *error) {
    seqpar_status status;
    pthread_mutex_lock(&w->lock);
    seqpar_nccl__hear(w);
    while (w->news.status && !w->ruled && w->socket >= 0) seqpar_nccl__rest(w, 0);
    if (!w->ruled) w->verdict = w->news; /* nothing has failed, or before there was a referee */
    if (error) *error = w->verdict;
    status = w->verdict.status;
    pthread_mutex_unlock(&w->lock);
    return status;
}

SEQPAR_DEF seqpar_status seqpar_nccl_open(seqpar_comm **world, const seqpar_nccl_desc *desc,
                                          seqpar_error *error) {
    SEQPAR_NEED(error, "world, desc, error", world, desc, error);
    seqpar_nccl__world *w = seqpar_nccl__world_new(desc, error);
    seqpar_status status;
    *world = NULL;
    if (!w) return SEQPAR_ERR_MEMORY;
    status = seqpar_nccl__enter(w, desc, world);
    if (status) seqpar_nccl__close(w);
    return status;
}

SEQPAR_DEF seqpar_status seqpar_nccl_verdict(seqpar_comm *comm, seqpar_error *error) {
    SEQPAR_NEED(error, "comm", comm);
    return seqpar_nccl__ruling(((seqpar_nccl__member *)comm->state)->world, error);
}

SEQPAR_DEF seqpar_status seqpar_nccl_run(const seqpar_nccl_desc *desc, seqpar_rank_fn fn,
                                         void *user, seqpar_error *error) {
    seqpar_error own;
    seqpar_comm *world;
    SEQPAR_NEED(error, "desc, fn", desc, SEQPAR_THERE(fn));
    seqpar_nccl__world *w = seqpar_nccl__world_new(desc, &own);
    seqpar_status status = SEQPAR_ERR_MEMORY;
    if (error) *error = own;
    if (!w) return status;
    status = seqpar_nccl__enter(w, desc, &world);
    if (!status && (status = fn(world, user))) {
        /* unless fn has stored its own text */
        seqpar_fail(&own, status, "%s", seqpar_status_text(status));
        seqpar_comm_abort(world, own.text);
    }
    status = seqpar_nccl__ruling(w, error);
    seqpar_nccl__close(w);
    return status;
}

/* >>licence  MIT or Unlicense, as of seqpar.h ---------------------------------------------- */
#endif /* SEQPAR_NCCL_IMPLEMENTATION */
