/* seqpar_mpi.h - v0.2.0 - a transport of seqpar over MPI: ranks are processes - MIT or Unlicense */
/* SPDX-License-Identifier: MIT OR Unlicense */
/*
>>doc ------------------------------------------------------------------------------------------

    A rank is a process that mpirun, mpiexec or srun has started, on one host or on many. MPI
    only moves bytes from rank to rank. seqpar adds up sums itself, in its own order, so the
    bits do not depend on MPI's choice of algorithm.

    In exactly one C or C++ file:

        #define SEQPAR_IMPLEMENTATION           (the core, unless another file has it)
        #define SEQPAR_MPI_IMPLEMENTATION
        #include "seqpar_mpi.h"

    and compile with mpicc. It needs MPI 3.0 or newer: Open MPI, MPICH or a derivative of them.

    CONTENTS: >>doc >>api >>notes >>request >>progress >>table >>split >>close >>open >>licence

SAMPLE (mpirun -n 4 ./sample)

    static seqpar_status rank_main(seqpar_comm *world, void *user)
    {
        int64_t sum = world->rank;
        (void)user;
        return seqpar_comm_sum_i64(world, &sum, 1);
    }
    int main(void)
    {
        seqpar_mpi_desc desc = { 0 };
        seqpar_error error;
        if (seqpar_mpi_run(&desc, rank_main, NULL, &error)) fprintf(stderr, "%s\n", error.text);
        return error.status != 0;
    }

HOW BYTES MOVE
    All comms of a world share one duplicate of the caller's MPI communicator; tags distinguish
    them. So a split only exchanges numbers, and if a rank has failed, it returns an error like
    every other call. A message is a head, which states its size, and its bytes in pieces of at
    most SEQPAR_MPI_PIECE. They move directly from the sender's buffer to the receiver's. begin
    starts all sends and the receives of heads. The receiver starts to receive the bytes only
    when the head has arrived and its size fits: Open MPI crashes if a large message is longer
    than the receive buffer.

    Buffers in device memory (seqpar_device.own_memory) are copied through host memory, unless
    seqpar_mpi_desc.device_memory says that this MPI accesses device memory itself.

WHEN SOMETHING FAILS
    While a world is open, MPI returns errors and does not abort, also on MPI_COMM_WORLD. A rank
    that fails sends its error text to all other ranks. They receive it in their next begin or
    wait, whichever rank they wait for. A rank that ends also tells all others, so no rank
    waits for it. If nothing arrives in a wait for limit_s seconds, the world ends with an error
    that names this wait. Only the launcher (mpirun) notices a process that crashes; it then
    ends all processes.

    When the last comm of a world is freed, a rank waits until all other ranks have freed
    theirs. Then all of them know the first failure (seqpar_mpi_run returns it). After a
    failure, a rank stops waiting once nothing has happened for SEQPAR_MPI_GRACE seconds. If
    seqpar initialised MPI, the process then calls MPI_Abort at its exit. If seqpar's own call
    of MPI_Finalize takes that long, the process prints a notice and exits: MPI_Finalize of
    MPICH 4.0 over UCX's TCP sometimes never returns.

DOES NOT
    - start a thread: messages progress only while a rank waits
    - receive messages of the caller's communicator, even with equal tags: it uses a duplicate
    - finish a receive while the rank computes. So a failed rank that has large sends in flight
      waits until their receivers call seqpar again

OPTIONS
    SEQPAR_STATIC                everywhere: all functions become static (defined by seqpar.h)
    SEQPAR_MALLOC, SEQPAR_FREE   implementation file: the allocator, shared with seqpar.h
    SEQPAR_MPI_PIECE             implementation file: most bytes in one MPI call; 1 GiB
    SEQPAR_MPI_GRACE             implementation file: seconds to wait for other ranks after a
                                 failure, or for MPI_Finalize; 30
*/
#ifndef SEQPAR_MPI_H
#define SEQPAR_MPI_H

/* -std=c11 hides clocks unless POSIX is asked for before the first system header. */
#ifdef SEQPAR_MPI_IMPLEMENTATION
#if defined(__STRICT_ANSI__) && !defined(_POSIX_C_SOURCE) && !defined(_XOPEN_SOURCE) && \
    !defined(_GNU_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif
#endif

#include "seqpar.h"
#if SEQPAR_VERSION_MAJOR != 0 || SEQPAR_VERSION_MINOR != 2 || SEQPAR_VERSION_PATCH != 0
#error "seqpar_mpi.h 0.2.0 needs seqpar.h 0.2.0; take both from one release"
#endif

/* Leaves out the C++ bindings that some mpi.h contain: they do not compile as modern C++. */
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>
#if MPI_VERSION < 3
#error "seqpar_mpi.h: MPI 3.0 or newer is needed, for MPI_Improbe"
#endif

/* >>api ------------------------------------------------------------------------------------ */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct seqpar_mpi_desc {
    const MPI_Comm *comm; /* its ranks form the world; the caller's; NULL: MPI_COMM_WORLD */
    /* seconds that a wait may last with nothing arriving; 0: 600; negative: no limit */
    double limit_s;
    int device_memory; /* 1: this MPI reads and writes the device's memory itself */
} seqpar_mpi_desc;

/* Returns rank and size of this process in MPI_COMM_WORLD. Initialises MPI if nobody has, and
   then finalizes it at exit. Errors: TRANSPORT (MPI cannot be initialised, or lacks the thread
   support that computing needs). */
SEQPAR_DEF seqpar_status seqpar_mpi_world(int64_t *rank, int64_t *size, seqpar_error *error);
/* Opens a world, as one of its ranks. Initialises MPI if nobody has. Collective. Errors of this
   rank go to *error, which is zeroed here and must outlive the world. The last
   seqpar_comm_free of the world and of the comms split from it waits until all other ranks have
   made theirs. Errors: TRANSPORT, MEMORY. */
SEQPAR_DEF seqpar_status seqpar_mpi_open(seqpar_comm **world, const seqpar_mpi_desc *desc,
                                         seqpar_error *error);
/* Sets the time limit of this rank's waits, as desc.limit_s does, from now on. */
SEQPAR_DEF void seqpar_mpi_limit(seqpar_comm *world, double limit_s);
/* Leaves the world with this status. If it is not SEQPAR_OK, tells all other ranks, with the
   text in world->error, or seqpar_status_text if there is none. Frees the comm. The *error of
   seqpar_mpi_open is then the first failure of the world, the same on all ranks, as after
   seqpar_run_threads. Returns its status. */
SEQPAR_DEF seqpar_status seqpar_mpi_end(seqpar_comm *world, seqpar_status status);
/* Opens a world, runs fn as one rank, and ends with its status. user and error may be NULL. */
SEQPAR_DEF seqpar_status seqpar_mpi_run(const seqpar_mpi_desc *desc, seqpar_rank_fn fn,
                                        void *user, seqpar_error *error);

#ifdef __cplusplus
}
#endif
#endif /* SEQPAR_MPI_H */

/* Everything below is implementation. */
#if defined(SEQPAR_MPI_IMPLEMENTATION) && !defined(SEQPAR__MPI_IMPLEMENTED)
#define SEQPAR__MPI_IMPLEMENTED

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifndef _WIN32
#include <unistd.h>
#endif

#ifndef SEQPAR_MALLOC
#define SEQPAR_MALLOC(size) malloc(size)
#define SEQPAR_FREE(ptr)    free(ptr)
#endif
#ifndef SEQPAR_MPI_PIECE
#define SEQPAR_MPI_PIECE (INT64_C(1) << 30)
#endif
#ifndef SEQPAR_MPI_GRACE
#define SEQPAR_MPI_GRACE 30.0
#endif

static void *seqpar_mpi__new(int64_t count, int64_t size) {
    size_t bytes = (size_t)(count > 0 ? count : 1) * (size_t)size;
    void *data = SEQPAR_MALLOC(bytes);
    if (data) memset(data, 0, bytes);
    return data;
}
#define SEQPAR_MPI__NEW(type, count) \
    ((type *)seqpar_mpi__new((int64_t)(count), (int64_t)sizeof(type)))

/* >>notes  control messages between ranks ---------------------------------------------------
   A note is FAILED or BYE. BYE says that the rank has ended, and how many messages of the
   recipient it has taken. Both kinds contain the first failure of the world, as far as the rank
   knows it. On every comm the last head from a rank says that the rank has ended
   (SEQPAR_MPI__ENDED). MPI keeps the order of heads, so a rank that waits for another message
   learns that there is none. */

enum { SEQPAR_MPI__FAILED = 1, SEQPAR_MPI__BYE };
/* Tags: 0 for notes; `id` of the comm for heads; 16384 to 32767 for pieces, used in turn. Every
   MPI has at least tags up to 32,767. */
enum { SEQPAR_MPI__NOTES = 0, SEQPAR_MPI__COMMS = 16384, SEQPAR_MPI__ROUND = 16384 };
#define SEQPAR_MPI__ENDED (-1)

typedef struct seqpar_mpi__note {
    int64_t kind, rank, taken;
    seqpar_error ruling; /* status 0: nothing */
} seqpar_mpi__note;

typedef struct seqpar_mpi__peer { /* another rank of the world */
    int64_t sent, taken;          /* messages sent to it; receives from it that were begun */
    int64_t bye;                  /* 1: it has ended */
    int64_t took;                 /* with bye: how many of the sent messages it has taken */
    seqpar_mpi__note out[2];
    MPI_Request sending[2];
} seqpar_mpi__peer;

typedef struct seqpar_mpi__head {
    int64_t bytes, tag, step; /* tag: of its pieces */
    char name[40];            /* of its group, cut */
} seqpar_mpi__head;

typedef struct seqpar_mpi__member seqpar_mpi__member;
typedef struct seqpar_mpi__request seqpar_mpi__request;
typedef struct seqpar_mpi__world {
    MPI_Comm mpi;
    int64_t rank, size, ids; /* ids: the largest id of a comm so far */
    int64_t open;            /* comms that are not freed */
    int device_memory;
    double limit_s;
    seqpar_error *error;
    seqpar_error ruling;  /* the first failure of the world; status 0: none */
    seqpar_status failed; /* what every call returns from now on */
    int lost;             /* 1: a rank did not end in time, or MPI may still use a buffer */
    seqpar_mpi__note in;
    MPI_Request listening;
    MPI_Errhandler handlers[2];    /* of MPI_COMM_WORLD and _SELF, to be restored */
    seqpar_mpi__peer *peer;        /* (size) */
    seqpar_mpi__member *members;   /* all, also freed ones */
    seqpar_mpi__request *requests; /* in flight; a wait advances all of them */
} seqpar_mpi__world;

struct seqpar_mpi__member {
    seqpar_comm comm;
    seqpar_mpi__world *world;
    seqpar_mpi__member *next;
    int64_t id, *ranks; /* (size) in the world */
    seqpar_mpi__head ended;
    MPI_Request *ending; /* (size) */
};

static int seqpar_mpi__lost; /* a world of this process was lost */

static void seqpar_mpi__tell(seqpar_mpi__world *w, int64_t to, int64_t kind) {
    seqpar_mpi__peer *p = &w->peer[to];
    seqpar_mpi__note *n = &p->out[kind == SEQPAR_MPI__BYE];
    n->kind = kind;
    n->rank = w->rank;
    n->taken = p->taken;
    n->ruling = w->ruling;
    MPI_Isend(n, (int)sizeof *n, MPI_BYTE, (int)to, SEQPAR_MPI__NOTES, w->mpi,
              &p->sending[kind == SEQPAR_MPI__BYE]);
}

/* Decides which of several failures is the cause. TIMEOUT and DIED only say that a message did
   not arrive, so any other failure outweighs them. Of equals the lowest rank's counts. */
static int seqpar_mpi__weight(seqpar_status status) {
    return status == SEQPAR_ERR_TIMEOUT || status == SEQPAR_ERR_DIED ? 1 : 2;
}

static void seqpar_mpi__rule(seqpar_mpi__world *w, seqpar_status status, int64_t rank,
                             const char *text) {
    int more = seqpar_mpi__weight(status) - seqpar_mpi__weight(w->ruling.status);
    if (!status || (w->ruling.status && (more < 0 || (more == 0 && rank > w->ruling.rank))))
        return;
    w->ruling.status = status;
    w->ruling.rank = rank;
    snprintf(w->ruling.text, sizeof w->ruling.text, "%s", text);
}

/* Records that this rank has failed, and tells all other ranks; only the first time. */
static void seqpar_mpi__fail(seqpar_mpi__world *w, seqpar_status status, const char *text) {
    if (w->failed) return;
    w->failed = status;
    seqpar_mpi__rule(w, status, w->rank, text);
    for (int64_t r = 0; r < w->size; r++)
        if (r != w->rank) seqpar_mpi__tell(w, r, SEQPAR_MPI__FAILED);
}

/* The same, with an error text of this transport. */
#define SEQPAR_MPI__FAIL(w, code, ...) \
    do { \
        if (!(w)->failed) { \
            seqpar_fail((w)->error, code, __VA_ARGS__); \
            seqpar_mpi__fail(w, code, (w)->error->text); \
        } \
    } while (0)

static void seqpar_mpi__failed_call(seqpar_mpi__world *w, int code, const char *call) {
    char text[MPI_MAX_ERROR_STRING] = "unknown error";
    int length;
    MPI_Error_string(code, text, &length);
    SEQPAR_MPI__FAIL(w, SEQPAR_ERR_TRANSPORT, "rank %lld: %s: %.300s", (long long)w->rank, call,
                     text);
}

static void seqpar_mpi__listen(seqpar_mpi__world *w) {
    MPI_Irecv(&w->in, (int)sizeof w->in, MPI_BYTE, MPI_ANY_SOURCE, SEQPAR_MPI__NOTES, w->mpi,
              &w->listening);
}

/* Receives all notes that have arrived. Returns 1 if there was one. */
static int seqpar_mpi__hear(seqpar_mpi__world *w) {
    int any = 0, there = 1;
    while (w->listening != MPI_REQUEST_NULL &&
           !MPI_Test(&w->listening, &there, MPI_STATUS_IGNORE) && there) {
        const seqpar_error *e = &w->in.ruling;
        any = 1;
        seqpar_mpi__rule(w, e->status, e->rank, e->text);
        if (w->in.kind == SEQPAR_MPI__BYE) {
            w->peer[w->in.rank].bye = 1;
            w->peer[w->in.rank].took = w->in.taken;
        }
        if (e->status && !w->failed) {
            w->failed = SEQPAR_ERR_PEER;
            seqpar_fail(w->error, SEQPAR_ERR_PEER, "rank %lld failed: %s", (long long)e->rank,
                        e->text);
        }
        seqpar_mpi__listen(w);
    }
    return any;
}

/* Receives and discards a message that no call will ask for any more, so that its sender gets
   its buffer back. Returns 1 if there was one. */
static int seqpar_mpi__discard(seqpar_mpi__world *w) {
    MPI_Message message;
    MPI_Status status;
    int there = 0, bytes = 0;
    void *nowhere;
    if (MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, w->mpi, &there, &message, &status) || !there)
        return 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    nowhere = SEQPAR_MALLOC((size_t)bytes + 1);
    MPI_Mrecv(nowhere, nowhere ? bytes : 0, MPI_BYTE, &message, MPI_STATUS_IGNORE);
    SEQPAR_FREE(nowhere);
    return 1;
}

/* How a wait polls: while idle, it yields the core to other threads at first, then sleeps. */
typedef struct seqpar_mpi__patience {
    double since; /* when something happened last */
    int64_t idle; /* polls since then */
} seqpar_mpi__patience;

static void seqpar_mpi__rest(seqpar_mpi__patience *p, int happened) {
    struct timespec nap = {0, 50000};
    if (happened) {
        p->idle = 0;
        p->since = MPI_Wtime();
    } else if (++p->idle < 2000)
        sched_yield();
    else
        nanosleep(&nap, NULL);
}

/* >>request  a group in flight ----------------------------------------------------------- */

typedef struct seqpar_mpi__part { /* one message */
    int64_t peer;                 /* in the world */
    int receiving, known;         /* known: the head has arrived */
    int64_t bytes;
    void *data;    /* the caller's */
    char *staging; /* copy of data in host memory; NULL: MPI uses data itself */
    seqpar_mpi__head head;
    int64_t first, count; /* its MPI requests: the head's, and those of its pieces */
} seqpar_mpi__part;

struct seqpar_mpi__request {
    seqpar_mpi__request *next;
    seqpar_mpi__member *member;
    const char *name;
    int64_t step, part_count, count;
    seqpar_mpi__part *part; /* (part_count) */
    MPI_Request *request;   /* (count) */
};

static int64_t seqpar_mpi__pieces(int64_t bytes) {
    return (bytes + SEQPAR_MPI_PIECE - 1) / SEQPAR_MPI_PIECE;
}

static void seqpar_mpi__request_free(seqpar_mpi__request *r) {
    for (int64_t i = 0; r && r->part && i < r->part_count; i++) SEQPAR_FREE(r->part[i].staging);
    if (!r) return;
    SEQPAR_FREE(r->part);
    SEQPAR_FREE(r->request);
    SEQPAR_FREE(r);
}

/* Fills in a message. If it may be in device memory, allocates a staging buffer on the host,
   and copies a send into it. Returns 0 if memory ran out. */
static int seqpar_mpi__part_buffer(seqpar_mpi__member *m, seqpar_mpi__part *p,
                                   const seqpar_transfer *t, int receiving) {
    struct seqpar_device *device = m->comm.device;
    p->peer = m->ranks[t->peer];
    p->receiving = receiving;
    p->bytes = t->bytes;
    p->data = t->data;
    if (!t->bytes || !device || !device->own_memory || m->world->device_memory) return 1;
    p->staging = SEQPAR_MPI__NEW(char, t->bytes);
    if (p->staging && !receiving) device->copy(device, p->staging, t->data, t->bytes, NULL);
    return p->staging != NULL;
}

static seqpar_mpi__request *seqpar_mpi__request_new(seqpar_mpi__member *m,
                                                    const seqpar_group *g) {
    seqpar_mpi__request *r = SEQPAR_MPI__NEW(seqpar_mpi__request, 1);
    int ok = r != NULL;
    if (!r) return NULL;
    r->member = m;
    r->name = g->name;
    r->step = g->step;
    r->part_count = g->recv_count + g->send_count;
    r->part = SEQPAR_MPI__NEW(seqpar_mpi__part, r->part_count);
    /* receives first, so that a message to oneself finds its receive begun */
    for (int64_t i = 0; r->part && ok && i < r->part_count; i++) {
        int receiving = i < g->recv_count;
        const seqpar_transfer *t = receiving ? &g->recvs[i] : &g->sends[i - g->recv_count];
        ok = seqpar_mpi__part_buffer(m, &r->part[i], t, receiving);
        r->part[i].first = r->count;
        r->part[i].count = 1 + seqpar_mpi__pieces(t->bytes);
        r->count += r->part[i].count;
    }
    r->request = SEQPAR_MPI__NEW(MPI_Request, r->count);
    for (int64_t i = 0; r->request && i < r->count; i++) r->request[i] = MPI_REQUEST_NULL;
    if (ok && r->part && r->request) return r;
    seqpar_mpi__request_free(r);
    return NULL;
}

/* Starts to send or to receive the pieces of a message. Returns MPI's error code. */
static int seqpar_mpi__start_pieces(seqpar_mpi__request *r, const seqpar_mpi__part *p) {
    MPI_Comm mpi = r->member->world->mpi;
    char *data = p->staging ? p->staging : (char *)p->data;
    int code = 0;
    for (int64_t i = 1; !code && i < p->count; i++, data += SEQPAR_MPI_PIECE) {
        int64_t left = p->bytes - (i - 1) * SEQPAR_MPI_PIECE;
        int bytes = (int)(left < SEQPAR_MPI_PIECE ? left : SEQPAR_MPI_PIECE);
        MPI_Request *q = r->request + p->first + i;
        code = p->receiving
                   ? MPI_Irecv(data, bytes, MPI_BYTE, (int)p->peer, (int)p->head.tag, mpi, q)
                   : MPI_Isend(data, bytes, MPI_BYTE, (int)p->peer, (int)p->head.tag, mpi, q);
    }
    return code;
}

/* Starts to send a message, or to receive its head. Returns MPI's error code. */
static int seqpar_mpi__start(seqpar_mpi__request *r, seqpar_mpi__part *p) {
    seqpar_mpi__world *w = r->member->world;
    MPI_Request *q = r->request + p->first;
    int peer = (int)p->peer, tag = (int)r->member->id, code;
    if (p->receiving) {
        w->peer[peer].taken++;
        return MPI_Irecv(&p->head, (int)sizeof p->head, MPI_BYTE, peer, tag, w->mpi, q);
    }
    p->head.bytes = p->bytes;
    p->head.step = r->step;
    snprintf(p->head.name, sizeof p->head.name, "%s", r->name);
    p->head.tag = SEQPAR_MPI__COMMS + w->peer[peer].sent++ % SEQPAR_MPI__ROUND;
    code = MPI_Isend(&p->head, (int)sizeof p->head, MPI_BYTE, peer, tag, w->mpi, q);
    return code ? code : seqpar_mpi__start_pieces(r, p);
}

/* >>progress ----------------------------------------------------------------------------------- */

/* A head said that the rank has ended. Waits for its BYE, which follows: it may contain the
   failure that is the reason. */
static void seqpar_mpi__hear_bye(seqpar_mpi__world *w, int64_t rank) {
    seqpar_mpi__patience patience = {MPI_Wtime(), 0};
    while (!w->peer[rank].bye && !w->failed && MPI_Wtime() - patience.since < SEQPAR_MPI_GRACE)
        seqpar_mpi__rest(&patience, seqpar_mpi__hear(w));
}

static void seqpar_mpi__wrong(const seqpar_mpi__request *r, const seqpar_mpi__part *p) {
    seqpar_mpi__world *w = r->member->world;
    const seqpar_mismatch m = {r->name, p->head.name, r->step,  p->head.step,
                               w->rank, p->peer,      p->bytes, p->head.bytes};
    if (!w->failed) seqpar_mpi__fail(w, seqpar_comm_mismatch(w->error, &m), w->error->text);
}

/* Checks a head that has arrived; if it fits, starts to receive the pieces. */
static void seqpar_mpi__check_head(seqpar_mpi__request *r, seqpar_mpi__part *p) {
    seqpar_mpi__world *w = r->member->world;
    int code;
    p->known = 1;
    if (p->head.bytes == SEQPAR_MPI__ENDED) seqpar_mpi__hear_bye(w, p->peer);
    if (p->head.bytes == SEQPAR_MPI__ENDED)
        SEQPAR_MPI__FAIL(w, SEQPAR_ERR_DIED,
                         "rank %lld waits in '%s' step %lld for rank %lld, which has ended",
                         (long long)w->rank, r->name, (long long)r->step, (long long)p->peer);
    else if (p->head.bytes != p->bytes || p->head.step != r->step ||
             strncmp(p->head.name, r->name, sizeof p->head.name - 1))
        seqpar_mpi__wrong(r, p);
    else if ((code = seqpar_mpi__start_pieces(r, p)))
        seqpar_mpi__failed_call(w, code, "a message");
}

/* Fails if a send is not complete and its receiver has ended without taking all messages. */
static void seqpar_mpi__check_send(seqpar_mpi__request *r, seqpar_mpi__part *p) {
    seqpar_mpi__world *w = r->member->world;
    const seqpar_mpi__peer *to = &w->peer[p->peer];
    if (p->receiving || !to->bye || to->sent <= to->took) return;
    for (int64_t i = 0; i < p->count; i++)
        if (r->request[p->first + i] != MPI_REQUEST_NULL) {
            SEQPAR_MPI__FAIL(w, SEQPAR_ERR_DIED,
                             "rank %lld waits in '%s' step %lld for rank %lld, which has ended",
                             (long long)w->rank, r->name, (long long)r->step,
                             (long long)p->peer);
            return;
        }
}

/* Tests each request with a call of its own. For a list of requests, MPICH raises errors on
   MPI_COMM_WORLD, where they are fatal by default. Returns how many have completed. */
static int64_t seqpar_mpi__test(seqpar_mpi__request *r) {
    int64_t ended = 0;
    for (int64_t i = 0; i < r->count; i++) {
        int there = 0, code;
        if (r->request[i] == MPI_REQUEST_NULL) continue;
        code = MPI_Test(&r->request[i], &there, MPI_STATUS_IGNORE);
        if (code) r->request[i] = MPI_REQUEST_NULL;
        if (code) seqpar_mpi__failed_call(r->member->world, code, "a message");
        ended += there || code;
    }
    return ended;
}

/* Returns 1 if a send or receive has completed. */
static int seqpar_mpi__advance(seqpar_mpi__request *r) {
    seqpar_mpi__world *w = r->member->world;
    int happened = seqpar_mpi__test(r) > 0;
    for (int64_t i = 0; i < r->part_count && !w->failed; i++) {
        seqpar_mpi__part *p = &r->part[i];
        if (p->receiving && !p->known && r->request[p->first] == MPI_REQUEST_NULL)
            seqpar_mpi__check_head(r, p);
        seqpar_mpi__check_send(r, p);
    }
    return happened;
}

static int seqpar_mpi__advance_all(seqpar_mpi__world *w) {
    int happened = seqpar_mpi__hear(w);
    for (seqpar_mpi__request *r = w->requests; r; r = r->next)
        happened |= seqpar_mpi__advance(r);
    return happened;
}

static void seqpar_mpi__unlink(seqpar_mpi__request *r) {
    seqpar_mpi__request **at = &r->member->world->requests;
    while (*at != r) at = &(*at)->next;
    *at = r->next;
}

static int64_t seqpar_mpi__unfinished(const seqpar_mpi__request *r) {
    int64_t i = 0;
    while (i < r->part_count) {
        const seqpar_mpi__part *p = &r->part[i];
        for (int64_t k = 0; k < p->count; k++)
            if (r->request[p->first + k] != MPI_REQUEST_NULL) return i;
        i++;
    }
    return -1;
}

/* For a world that has failed: cancels receives, and waits until the other ranks have discarded
   the sends, or until nothing has happened for SEQPAR_MPI_GRACE seconds. Returns 1 if MPI no
   longer uses the buffers. */
static int seqpar_mpi__withdraw(seqpar_mpi__request *r) {
    seqpar_mpi__world *w = r->member->world;
    seqpar_mpi__patience patience = {MPI_Wtime(), 0};
    for (int64_t i = 0; i < r->part_count; i++)
        for (int64_t k = 0; r->part[i].receiving && k < r->part[i].count; k++)
            if (r->request[r->part[i].first + k] != MPI_REQUEST_NULL)
                MPI_Cancel(&r->request[r->part[i].first + k]);
    while (seqpar_mpi__unfinished(r) >= 0) {
        int happened = seqpar_mpi__test(r) > 0;
        happened |= seqpar_mpi__hear(w) | seqpar_mpi__discard(w);
        if (MPI_Wtime() - patience.since > SEQPAR_MPI_GRACE) return 0;
        seqpar_mpi__rest(&patience, happened);
    }
    return 1;
}

/* >>table -------------------------------------------------------------------------------------- */

static seqpar_status seqpar_mpi__begin(seqpar_comm *comm, const seqpar_group *group,
                                       void *queue, seqpar_request *request) {
    seqpar_mpi__member *m = (seqpar_mpi__member *)comm->state;
    seqpar_mpi__world *w = m->world;
    seqpar_mpi__request *r = NULL;
    int code = 0;
    (void)queue;
    request->state = NULL;
    seqpar_mpi__hear(w);
    if (w->failed) return w->failed;
    r = seqpar_mpi__request_new(m, group);
    if (!r) {
        SEQPAR_MPI__FAIL(w, SEQPAR_ERR_MEMORY, "rank %lld: out of memory for '%s' step %lld",
                         (long long)w->rank, group->name, (long long)group->step);
        return w->failed;
    }
    for (int64_t i = 0; !code && i < r->part_count; i++)
        code = seqpar_mpi__start(r, &r->part[i]);
    if (!code) {
        r->next = w->requests;
        w->requests = r;
        request->state = r;
        return SEQPAR_OK;
    }
    seqpar_mpi__failed_call(w, code, "a message");
    if (seqpar_mpi__withdraw(r)) seqpar_mpi__request_free(r);
    return w->failed;
}

static void seqpar_mpi__overdue(seqpar_mpi__request *r, double since) {
    seqpar_mpi__world *w = r->member->world;
    int64_t part = seqpar_mpi__unfinished(r);
    if (w->limit_s < 0 || part < 0 || MPI_Wtime() - since < w->limit_s) return;
    SEQPAR_MPI__FAIL(
        w, SEQPAR_ERR_TIMEOUT,
        "rank %lld waits in '%s' step %lld for rank %lld, and nothing came for %g s",
        (long long)w->rank, r->name, (long long)r->step, (long long)r->part[part].peer,
        w->limit_s);
}

/* Copies received messages from their staging buffers to the caller's buffers. */
static void seqpar_mpi__deliver(seqpar_mpi__request *r) {
    struct seqpar_device *device = r->member->comm.device;
    for (int64_t i = 0; i < r->part_count; i++) {
        seqpar_mpi__part *p = &r->part[i];
        if (p->receiving && p->staging)
            device->copy(device, p->data, p->staging, p->bytes, NULL);
    }
}

static seqpar_status seqpar_mpi__wait(seqpar_comm *comm, seqpar_request *request, void *queue) {
    seqpar_mpi__member *m = (seqpar_mpi__member *)comm->state;
    seqpar_mpi__world *w = m->world;
    seqpar_mpi__request *r = (seqpar_mpi__request *)request->state;
    seqpar_mpi__patience patience = {MPI_Wtime(), 0};
    int gone = 1;
    (void)queue;
    while (!w->failed) {
        int happened = seqpar_mpi__advance_all(w);
        if (seqpar_mpi__unfinished(r) < 0) break;
        seqpar_mpi__rest(&patience, happened);
        if (!happened) seqpar_mpi__overdue(r, patience.since);
    }
    seqpar_mpi__unlink(r);
    if (w->failed)
        gone = seqpar_mpi__withdraw(r);
    else
        seqpar_mpi__deliver(r);
    request->state = NULL;
    if (gone)
        seqpar_mpi__request_free(r);
    else
        seqpar_mpi__lost = w->lost = 1; /* MPI may still read it */
    return w->failed;
}

static void seqpar_mpi__abort(seqpar_comm *comm, const char *text) {
    seqpar_mpi__world *w = ((seqpar_mpi__member *)comm->state)->world;
    seqpar_mpi__hear(w);
    seqpar_mpi__fail(w, comm->error->status ? comm->error->status : SEQPAR_ERR_PEER, text);
}

static void seqpar_mpi__close(seqpar_mpi__world *w);
static void seqpar_mpi__free(seqpar_comm *comm) {
    seqpar_mpi__world *w = ((seqpar_mpi__member *)comm->state)->world;
    if (--w->open == 0) seqpar_mpi__close(w);
}

/* >>split -------------------------------------------------------------------------------------- */

static seqpar_status seqpar_mpi__split(seqpar_comm *comm, int64_t color, int64_t key,
                                       seqpar_comm **sub);
static const seqpar_comm_table seqpar_mpi__table = {"MPI",
                                                    seqpar_mpi__begin,
                                                    seqpar_mpi__wait,
                                                    seqpar_mpi__split,
                                                    seqpar_mpi__abort,
                                                    seqpar_mpi__free,
                                                    0};

/* Allocates a comm of `size` ranks; the caller fills in ranks[]. Returns NULL if memory ran
   out. */
static seqpar_mpi__member *seqpar_mpi__member_new(seqpar_mpi__world *w, int64_t size) {
    seqpar_mpi__member *m = SEQPAR_MPI__NEW(seqpar_mpi__member, 1);
    int64_t *ranks = SEQPAR_MPI__NEW(int64_t, size);
    MPI_Request *ending = SEQPAR_MPI__NEW(MPI_Request, size);
    if (!m || !ranks || !ending) {
        SEQPAR_FREE(m);
        SEQPAR_FREE(ranks);
        SEQPAR_FREE(ending);
        return NULL;
    }
    for (int64_t r = 0; r < size; r++) ending[r] = MPI_REQUEST_NULL;
    m->comm.table = &seqpar_mpi__table;
    m->comm.size = size;
    m->comm.error = w->error;
    m->comm.state = m;
    m->world = w;
    m->ranks = ranks;
    m->ending = ending;
    m->id = ++w->ids;
    m->next = w->members;
    w->members = m;
    w->open++;
    return m;
}

typedef struct seqpar_mpi__choice {
    int64_t color, key, ids;
} seqpar_mpi__choice;

/* Returns the rank that rank `r` gets in the comm of its color. */
static int64_t seqpar_mpi__index_of(const seqpar_mpi__choice *all, int64_t size, int64_t r) {
    int64_t place = 0;
    for (int64_t i = 0; i < size; i++)
        place += all[i].color == all[r].color &&
                 (all[i].key < all[r].key || (all[i].key == all[r].key && i < r));
    return place;
}

static seqpar_mpi__member *seqpar_mpi__part_of(seqpar_mpi__member *m,
                                               const seqpar_mpi__choice *all) {
    seqpar_mpi__world *w = m->world;
    int64_t rank = m->comm.rank, size = 0;
    seqpar_mpi__member *s;
    for (int64_t r = 0; r < m->comm.size; r++) {
        size += all[r].color == all[rank].color;
        /* the largest id of all members, so that the next id is new to each of them */
        if (w->ids < all[r].ids) w->ids = all[r].ids;
    }
    if (w->ids + 1 >= SEQPAR_MPI__COMMS) {
        SEQPAR_MPI__FAIL(w, SEQPAR_ERR_TRANSPORT,
                         "a world has %d comms at most, and they are all taken; split less "
                         "often, or open another world",
                         SEQPAR_MPI__COMMS - 1);
        return NULL;
    }
    s = seqpar_mpi__member_new(w, size);
    if (!s)
        SEQPAR_MPI__FAIL(w, SEQPAR_ERR_MEMORY, "rank %lld: out of memory for a comm",
                         (long long)w->rank);
    for (int64_t r = 0; s && r < m->comm.size; r++)
        if (all[r].color == all[rank].color)
            s->ranks[seqpar_mpi__index_of(all, m->comm.size, r)] = m->ranks[r];
    if (s) s->comm.rank = seqpar_mpi__index_of(all, m->comm.size, rank);
    return s;
}

static seqpar_status seqpar_mpi__split(seqpar_comm *comm, int64_t color, int64_t key,
                                       seqpar_comm **sub) {
    seqpar_mpi__member *m = (seqpar_mpi__member *)comm->state, *s = NULL;
    seqpar_mpi__choice *all = SEQPAR_MPI__NEW(seqpar_mpi__choice, comm->size);
    int64_t *bytes = SEQPAR_MPI__NEW(int64_t, comm->size);
    seqpar_mpi__choice mine = {color, key, m->world->ids};
    if (!all || !bytes)
        SEQPAR_MPI__FAIL(m->world, SEQPAR_ERR_MEMORY, "rank %lld: out of memory for a comm",
                         (long long)m->world->rank);
    for (int64_t r = 0; bytes && r < comm->size; r++) bytes[r] = sizeof mine;
    seqpar_status status = m->world->failed;
    if (!status) status = seqpar_comm_all_gather(comm, all, &mine, bytes, "split");
    if (!status) s = seqpar_mpi__part_of(m, all);
    SEQPAR_FREE(all);
    SEQPAR_FREE(bytes);
    *sub = s ? &s->comm : NULL;
    return s ? SEQPAR_OK : status ? status : m->world->failed;
}

/* >>close -------------------------------------------------------------------------------------- */

static void seqpar_mpi__say_goodbye(seqpar_mpi__world *w) {
    for (seqpar_mpi__member *m = w->members; m; m = m->next)
        for (int64_t r = 0; r < m->comm.size; r++) {
            m->ended.bytes = SEQPAR_MPI__ENDED;
            if (m->ranks[r] != w->rank)
                MPI_Isend(&m->ended, (int)sizeof m->ended, MPI_BYTE, (int)m->ranks[r],
                          (int)m->id, w->mpi, &m->ending[r]);
        }
    for (int64_t r = 0; r < w->size; r++)
        if (r != w->rank) seqpar_mpi__tell(w, r, SEQPAR_MPI__BYE);
}

static int seqpar_mpi__all_have_ended(seqpar_mpi__world *w) {
    int all = 1;
    for (int64_t r = 0; r < w->size; r++) all &= r == w->rank || w->peer[r].bye;
    return all;
}

/* Have all other ranks sent BYE, and are all notes and last heads of this rank sent? */
static int seqpar_mpi__all_is_said(seqpar_mpi__world *w) {
    int there = seqpar_mpi__all_have_ended(w), one;
    for (int64_t r = 0; r < w->size; r++)
        for (int i = 0; i < 2; i++) {
            one = 1;
            MPI_Test(&w->peer[r].sending[i], &one, MPI_STATUS_IGNORE);
            there &= one;
        }
    for (seqpar_mpi__member *m = w->members; m; m = m->next)
        for (int64_t r = 0; r < m->comm.size; r++) {
            one = 1;
            MPI_Test(&m->ending[r], &one, MPI_STATUS_IGNORE);
            there &= one;
        }
    return there;
}

/* Receives notes. Discards messages, but only after a failure or when all ranks have ended:
   before that, a rank may still have to fail because its message was not received. */
static int seqpar_mpi__tidy(seqpar_mpi__world *w) {
    int happened = seqpar_mpi__hear(w);
    if (w->failed || seqpar_mpi__all_have_ended(w)) happened |= seqpar_mpi__discard(w);
    return happened;
}

/* Waits until all ranks have ended. Returns 0 if the world has failed and nothing has happened
   for SEQPAR_MPI_GRACE seconds. */
static int seqpar_mpi__until_all_end(seqpar_mpi__world *w) {
    seqpar_mpi__patience patience = {MPI_Wtime(), 0};
    MPI_Request barrier = MPI_REQUEST_NULL;
    int begun = 0, over = 0;
    while (!over) {
        int happened = seqpar_mpi__tidy(w);
        if (!begun && seqpar_mpi__all_is_said(w))
            begun = !MPI_Ibarrier(w->mpi, &barrier), happened = 1;
        if (begun) MPI_Test(&barrier, &over, MPI_STATUS_IGNORE);
        if (w->failed && MPI_Wtime() - patience.since > SEQPAR_MPI_GRACE) return 0;
        seqpar_mpi__rest(&patience, happened);
    }
    while (seqpar_mpi__discard(w)) {
    }
    return 1;
}

static void seqpar_mpi__world_free(seqpar_mpi__world *w) {
    for (seqpar_mpi__member *m = w->members, *next; m; m = next) {
        next = m->next;
        SEQPAR_FREE(m->ranks);
        SEQPAR_FREE(m->ending);
        SEQPAR_FREE(m);
    }
    SEQPAR_FREE(w->peer);
    SEQPAR_FREE(w);
}

/* on: errors on these two communicators return; off: their old handlers are restored. Before
   MPI 4.0, errors of a request are raised on one of the two, not on its own communicator. */
static void seqpar_mpi__return_errors(seqpar_mpi__world *w, int on) {
    const MPI_Comm comm[2] = {MPI_COMM_WORLD, MPI_COMM_SELF};
    for (int i = 0; i < 2; i++)
        if (on) {
            MPI_Comm_get_errhandler(comm[i], &w->handlers[i]);
            MPI_Comm_set_errhandler(comm[i], MPI_ERRORS_RETURN);
        } else {
            MPI_Comm_set_errhandler(comm[i], w->handlers[i]);
            MPI_Errhandler_free(&w->handlers[i]);
        }
}

/* If a rank was lost, nothing is freed, since MPI may still use it. */
static void seqpar_mpi__close(seqpar_mpi__world *w) {
    seqpar_mpi__say_goodbye(w);
    w->lost = w->lost || !seqpar_mpi__until_all_end(w);
    if (w->ruling.status) *w->error = w->ruling;
    if (w->lost) {
        seqpar_mpi__lost = 1;
        return;
    }
    if (w->listening != MPI_REQUEST_NULL) {
        MPI_Cancel(&w->listening);
        MPI_Wait(&w->listening, MPI_STATUS_IGNORE);
    }
    MPI_Comm_free(&w->mpi);
    seqpar_mpi__return_errors(w, 0);
    seqpar_mpi__world_free(w);
}

/* >>open --------------------------------------------------------------------------------------- */

#ifndef _WIN32
static void seqpar_mpi__finalize_hangs(int number) {
    static const char text[] =
        "notice: MPI_Finalize does not return and is given up; what ranks had to do was done "
        "before\n";
    if (write(2, text, sizeof text - 1) < 0) {
    }
    (void)number;
    _exit(1); /* the status that the process was about to exit with is unknown here */
}
#endif

static void seqpar_mpi__at_exit(void) {
    int finalized = 0;
#ifndef _WIN32
    signal(SIGALRM, seqpar_mpi__finalize_hangs);
    alarm((unsigned)SEQPAR_MPI_GRACE);
#endif
    MPI_Finalized(&finalized);
    if (finalized) return;
    if (seqpar_mpi__lost)
        MPI_Abort(MPI_COMM_WORLD, 1);
    else
        MPI_Finalize();
}

static seqpar_status seqpar_mpi__init(seqpar_error *error) {
    int there = 0, level = MPI_THREAD_SINGLE;
    MPI_Initialized(&there);
    if (there)
        MPI_Query_thread(&level);
    else if (MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level))
        return seqpar_fail(error, SEQPAR_ERR_TRANSPORT, "MPI_Init_thread failed");
    else
        atexit(seqpar_mpi__at_exit);
    if (level != MPI_THREAD_SINGLE) return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_TRANSPORT,
                       "MPI was started without thread support (MPI_THREAD_SINGLE), but ranks "
                       "compute on threads; call MPI_Init_thread with MPI_THREAD_FUNNELED, or "
                       "leave it to seqpar");
}

SEQPAR_DEF seqpar_status seqpar_mpi_world(int64_t *rank, int64_t *size, seqpar_error *error) {
    SEQPAR_NEED(error, "rank, size", rank, size);
    seqpar_status status = seqpar_mpi__init(error);
    int r = 0, n = 1;
    if (status) return status;
    MPI_Comm_rank(MPI_COMM_WORLD, &r);
    MPI_Comm_size(MPI_COMM_WORLD, &n);
    *rank = r;
    *size = n;
    return SEQPAR_OK;
}

static double seqpar_mpi__limit(double limit_s) {
    return limit_s > 0 || limit_s < 0 ? limit_s : 600;
}

static int seqpar_mpi__world_set(seqpar_mpi__world *w, const seqpar_mpi_desc *d) {
    int rank, size;
    int code = MPI_Comm_dup(d->comm ? *d->comm : MPI_COMM_WORLD, &w->mpi);
    if (code) return code;
    MPI_Comm_set_errhandler(w->mpi, MPI_ERRORS_RETURN);
    seqpar_mpi__return_errors(w, 1);
    MPI_Comm_rank(w->mpi, &rank);
    MPI_Comm_size(w->mpi, &size);
    w->rank = rank;
    w->size = size;
    w->limit_s = seqpar_mpi__limit(d->limit_s);
    w->device_memory = d->device_memory;
    w->listening = MPI_REQUEST_NULL;
    return 0;
}

static seqpar_mpi__member *seqpar_mpi__enter(seqpar_mpi__world *w) {
    seqpar_mpi__member *m;
    w->peer = SEQPAR_MPI__NEW(seqpar_mpi__peer, w->size);
    m = w->peer ? seqpar_mpi__member_new(w, w->size) : NULL;
    if (!m) return NULL;
    for (int64_t r = 0; r < w->size; r++) {
        m->ranks[r] = r;
        w->peer[r].sending[0] = w->peer[r].sending[1] = MPI_REQUEST_NULL;
    }
    m->comm.rank = w->rank;
    seqpar_mpi__listen(w);
    return m;
}

SEQPAR_DEF seqpar_status seqpar_mpi_open(seqpar_comm **world, const seqpar_mpi_desc *desc,
                                         seqpar_error *error) {
    seqpar_mpi__world *w = NULL;
    seqpar_mpi__member *m = NULL;
    int code;
    SEQPAR_NEED(error, "world, desc, error", world, desc, error);
    memset(error, 0, sizeof *error);
    *world = NULL;
    if (seqpar_mpi__init(error)) return error->status;
    w = SEQPAR_MPI__NEW(seqpar_mpi__world, 1);
    if (!w) return seqpar_fail(error, SEQPAR_ERR_MEMORY, "out of memory for a world");
    w->error = error;
    code = seqpar_mpi__world_set(w, desc);
    if (code) {
        SEQPAR_FREE(w);
        return seqpar_fail(error, SEQPAR_ERR_TRANSPORT,
                           "the communicator cannot be duplicated (MPI's code %d)", code);
    }
    error->rank = w->rank;
    m = seqpar_mpi__enter(w);
    if (!m) {
        seqpar_mpi__world_free(w);
        return seqpar_fail(error, SEQPAR_ERR_MEMORY, "out of memory for a world");
    }
    *world = &m->comm;
    return SEQPAR_OK;
}

SEQPAR_DEF void seqpar_mpi_limit(seqpar_comm *world, double limit_s) {
    SEQPAR_MUST("world", world);
    ((seqpar_mpi__member *)world->state)->world->limit_s = seqpar_mpi__limit(limit_s);
}

SEQPAR_DEF seqpar_status seqpar_mpi_end(seqpar_comm *world, seqpar_status status) {
    SEQPAR_NEED(NULL, "world", world);
    seqpar_mpi__world *w = ((seqpar_mpi__member *)world->state)->world;
    seqpar_error *error = w->error;
    if (status) {
        seqpar_fail(error, status, "%s", seqpar_status_text(status));
        seqpar_mpi__fail(w, status, error->text);
    }
    seqpar_comm_free(world);
    return error->status;
}

SEQPAR_DEF seqpar_status seqpar_mpi_run(const seqpar_mpi_desc *desc, seqpar_rank_fn fn,
                                        void *user, seqpar_error *error) {
    seqpar_error own;
    seqpar_comm *world;
    SEQPAR_NEED(error, "desc, fn", desc, SEQPAR_THERE(fn));
    seqpar_status status = seqpar_mpi_open(&world, desc, error ? error : &own);
    return status ? status : seqpar_mpi_end(world, fn(world, user));
}

/* >>licence  MIT or Unlicense, as of seqpar.h ---------------------------------------------- */
#endif /* SEQPAR_MPI_IMPLEMENTATION */
