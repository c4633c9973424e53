/* SPDX-License-Identifier: MIT OR Unlicense */
/* A stand-in for the part of NCCL and of the CUDA runtime that seqpar_nccl.h calls, without a
   GPU. Devices are plain memory. Every stream is a queue; one thread works on all of them, late
   and in random order wherever no event orders them, so that a missing event shows. It keeps
   NCCL's rules, in the strictest reading where they are open:
   - a group blocks its stream until all its messages are done; nothing is buffered, so both
     ends must run at the same time
   - on a non-blocking communicator two ranks connect for their first message later, both
     together; until then the group is not on the stream, and the communicator must not be used
   - finalizing ends when all ranks have finalized
   It complains (stand.complaint) about mismatched messages, groups left open, objects used
   after their end or while in progress, and memory freed while in use. It counts what is not
   freed (stand_leaks) and calls by name and device, and fails any call on demand (stand_fail).
   A thread's current device is the rank that it works for. */
#ifndef NCCL_STAND_IN_H
#define NCCL_STAND_IN_H

#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NCCL_MAJOR        2
#define NCCL_VERSION_CODE 22809
#define NCCL_CONFIG_INITIALIZER \
    { INT_MIN }
typedef struct {
    char internal[128];
} ncclUniqueId;

typedef struct {
    int blocking;
} ncclConfig_t;

typedef enum {
    ncclSuccess,
    ncclUnhandledCudaError,
    ncclSystemError,
    ncclInternalError,
    ncclInvalidArgument,
    ncclInvalidUsage,
    ncclRemoteError,
    ncclInProgress
} ncclResult_t;

typedef enum { ncclInt8, ncclUint8 } ncclDataType_t;
typedef struct stand_comm *ncclComm_t;

typedef enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorNoDevice = 100,
    cudaErrorNotReady = 600,
    cudaErrorLaunchFailure = 719,
    cudaErrorUnknown = 999
} cudaError_t;

enum cudaMemoryType {
    cudaMemoryTypeUnregistered,
    cudaMemoryTypeHost,
    cudaMemoryTypeDevice,
    cudaMemoryTypeManaged
};

struct cudaPointerAttributes {
    enum cudaMemoryType type;
    int device;
};

enum {
    cudaMemcpyDefault = 4,
    cudaEventDisableTiming = 2,
    cudaStreamNonBlocking = 1,
    cudaHostAllocPortable = 1
};

typedef struct stand_stream *cudaStream_t;
typedef struct stand_event *cudaEvent_t;

/* ---- what there is ---- */

enum { STAND_KERNEL, STAND_RECORD, STAND_WAIT, STAND_GROUP };
typedef struct stand_message {
    int peer, sending, done;
    char *data;
    size_t bytes;
} stand_message;

typedef struct stand_group {
    struct stand_comm *comm;
    struct stand_stream *stream;
    stand_message *list;
    int count;
} stand_group;

typedef struct stand_op {
    struct stand_op *next;
    int kind;
    int64_t ticket;
    struct stand_event *event;
    stand_group *group;
    void (*fn)(void *);
    void *arg;
} stand_op;

struct stand_event {
    struct stand_event *next;
    int64_t asked, done;
    int freed;
};

struct stand_stream {
    struct stand_stream *next;
    stand_op *head, *tail;
    int device, freed, watched;
};

typedef struct stand_clique {
    struct stand_clique *next;
    ncclUniqueId id;
    int size, joined;
    struct stand_comm **member;
    char *connected; /* (size, size) */
} stand_clique;

struct stand_comm {
    struct stand_comm *next;
    stand_clique *clique;
    /* held: a thread of the caller's waits inside */
    int rank, device, blocking, joining, splitting, finalizing, aborted, freed, held, color;
    int key;
    ncclResult_t state;
    ncclComm_t *part; /* where a split puts its part */
    stand_group *setup, *running;
};

typedef struct stand_range {
    struct stand_range *next;
    char *data;
    size_t bytes;
    enum cudaMemoryType type;
    int device;
} stand_range;

typedef struct stand_count {
    const char *name;
    int64_t calls[16];
} stand_count;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    /* hosts: threads that call, 0: unknown; all_device: every pointer is one of the device */
    int started, devices, hosts, all_device;
    int speechless; /* NCCL has no sentence about its last error */
    int version[16];
    uint64_t random, ids;
    int64_t steps;
    struct stand_stream *streams;
    struct stand_event *events;
    struct stand_comm *comms;
    stand_clique *cliques;
    stand_range *ranges;
    stand_count counts[64];
    const char *fail_name, *skip_name;
    int fail_device, failed, skip_odd;
    int64_t fail_call;
    char complaint[512], deadlock[512];
} stand = {.lock = PTHREAD_MUTEX_INITIALIZER,
           .wake = PTHREAD_COND_INITIALIZER,
           .devices = 16,
           .random = 1};

static __thread int stand_device, stand_depth;
static __thread cudaError_t stand_last;
static __thread stand_group stand_open;

__attribute__((format(printf, 1, 2))) static void stand_complain(const char *format, ...) {
    va_list args;
    if (stand.complaint[0]) return;
    va_start(args, format);
    vsnprintf(stand.complaint, sizeof stand.complaint, format, args);
    va_end(args);
}

static int stand_chance(int one_in) {
    stand.random = stand.random * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (int)((stand.random >> 33) % (uint64_t)one_in) == 0;
}

/* Counts the call; returns 1 if this is the one that is to fail, 2 if it is to do nothing. */
static int stand_trips(const char *name) {
    stand_count *c = stand.counts;
    while (c->name && strcmp(c->name, name)) c++;
    c->name = name;
    c->calls[stand_device]++;
    if (stand.skip_name && !strcmp(stand.skip_name, name) &&
        c->calls[stand_device] % 2 == stand.skip_odd)
        return 2;
    if (!stand.fail_name || strcmp(stand.fail_name, name) ||
        stand.fail_device != stand_device || c->calls[stand_device] != stand.fail_call)
        return 0;
    stand.failed = 1;
    return 1;
}
#define STAND_ENTER(code) \
    do { \
        int trips_; \
        pthread_mutex_lock(&stand.lock); \
        trips_ = stand_trips(__func__); \
        if (trips_ == 1) { \
            int code_ = (int)code; \
            pthread_mutex_unlock(&stand.lock); \
            return code_; \
        } \
        if (trips_ == 2) { \
            pthread_mutex_unlock(&stand.lock); \
            return 0; \
        } \
    } while (0)
#define STAND_LEAVE(code) \
    do { \
        int code_ = (int)(code); \
        pthread_cond_broadcast(&stand.wake); \
        pthread_mutex_unlock(&stand.lock); \
        return code_; \
    } while (0)

/* ---- the work on the streams ---- */

static void stand_push(struct stand_stream *s, stand_op op) {
    stand_op *kept = malloc(sizeof *kept);
    if (s->freed) stand_complain("a stream is used after its end");
    *kept = op;
    kept->next = NULL;
    if (s->head)
        s->tail->next = kept;
    else
        s->head = kept;
    s->tail = kept;
}

static void stand_pop(struct stand_stream *s) {
    stand_op *op = s->head;
    s->head = op->next;
    if (op->group) {
        free(op->group->list);
        free(op->group);
    }
    free(op);
}

static stand_message *stand_first(const stand_group *g, int peer, int sending) {
    int i;
    for (i = 0; g && i < g->count; i++)
        if (g->list[i].peer == peer && g->list[i].sending == sending && !g->list[i].done)
            return &g->list[i];
    return NULL;
}

/* One message of the group that runs on this stream, if its other end runs, too. */
static int stand_exchange(stand_group *g) {
    struct stand_comm *c = g->comm, *other;
    stand_message *m, *t;
    int i;
    for (i = 0; i < g->count; i++) {
        m = &g->list[i];
        other = c->clique->member[m->peer];
        if (m->done || m != stand_first(g, m->peer, m->sending) || other->aborted) continue;
        t = stand_first(other->running, c->rank, !m->sending);
        if (!t) continue;
        if (t->bytes != m->bytes)
            stand_complain("rank %d and rank %d do not agree: %zu and %zu bytes", c->rank,
                           m->peer, m->bytes, t->bytes);
        if (m->data != t->data)
            memmove(m->sending ? t->data : m->data, m->sending ? m->data : t->data,
                    m->bytes < t->bytes ? m->bytes : t->bytes);
        m->done = t->done = 1;
        return 1;
    }
    return 0;
}

static int stand_group_step(struct stand_stream *s) {
    stand_group *g = s->head->group;
    int i, left = 0, did;
    if (g->comm->aborted) {
        stand_pop(s);
        return 1;
    }
    did = g->comm->running != g;
    g->comm->running = g;
    did |= stand_exchange(g);
    for (i = 0; i < g->count; i++) left += !g->list[i].done;
    if (left) return did;
    g->comm->running = NULL;
    stand_pop(s);
    return 1;
}

static int stand_stream_step(struct stand_stream *s) {
    stand_op *op = s->head;
    if (!op) return 0;
    if (op->kind == STAND_GROUP) return stand_group_step(s);
    if (op->kind == STAND_WAIT && op->event->done < op->ticket) return 0;
    if (op->kind == STAND_RECORD) op->event->done = op->ticket;
    if (op->kind == STAND_KERNEL) op->fn(op->arg);
    stand_pop(s);
    return 1;
}

/* ---- what communicators do behind the caller's back ---- */

static void stand_queue_group(struct stand_comm *c) {
    stand_group *g = c->setup;
    stand_op op = {NULL, STAND_GROUP, 0, NULL, g, NULL, NULL};
    c->setup = NULL;
    c->state = ncclSuccess;
    stand_push(g->stream, op);
}

static int stand_connected(const struct stand_comm *c, const stand_message *m) {
    int n = c->clique->size, from = m->sending ? c->rank : m->peer;
    int to = m->sending ? m->peer : c->rank;
    const struct stand_comm *other = c->clique->member[m->peer];
    char *wire = &c->clique->connected[from * n + to];
    if (!*wire && !other->aborted && stand_first(other->setup, c->rank, !m->sending)) *wire = 1;
    return *wire;
}

static int stand_setup_step(struct stand_comm *c) {
    int i, ready = 1;
    for (i = 0; i < c->setup->count; i++) ready &= stand_connected(c, &c->setup->list[i]);
    if (ready) stand_queue_group(c);
    return ready;
}

static stand_clique *stand_clique_new(int size) {
    stand_clique *q = calloc(1, sizeof *q);
    q->size = size;
    q->member = calloc((size_t)size, sizeof *q->member);
    q->connected = calloc((size_t)size, (size_t)size);
    q->next = stand.cliques;
    return stand.cliques = q;
}

static struct stand_comm *stand_comm_new(stand_clique *q, int rank, int device, int blocking) {
    struct stand_comm *c = calloc(1, sizeof *c);
    c->clique = q;
    c->rank = rank;
    c->device = device;
    c->blocking = blocking;
    c->next = stand.comms;
    q->member[rank] = c;
    return stand.comms = c;
}

static void stand_split_all(stand_clique *q) {
    int r, i, color, size;
    for (color = 0; color < q->size; color++) {
        stand_clique *part = NULL;
        for (r = size = 0; r < q->size; r++) size += q->member[r]->color == color;
        if (size) part = stand_clique_new(size);
        for (r = 0; r < q->size; r++) {
            struct stand_comm *c = q->member[r], *made;
            int place = 0;
            if (c->color != color) continue;
            for (i = 0; i < q->size; i++)
                place += q->member[i]->color == color &&
                         (q->member[i]->key < c->key || (q->member[i]->key == c->key && i < r));
            made = stand_comm_new(part, place, c->device, c->blocking);
            made->joining = !c->blocking; /* its ranks connect after the split */
            made->state = c->blocking ? ncclSuccess : ncclInProgress;
            __atomic_store_n(c->part, made, __ATOMIC_RELEASE);
        }
    }
    for (r = 0; r < q->size; r++) {
        q->member[r]->splitting = 0;
        q->member[r]->state = ncclSuccess;
    }
}

/* Joining, splitting, finalizing: done once all ranks of a clique have called it. */
static int stand_clique_step(stand_clique *q) {
    int r, joined = 0, split = 0, final = 0, busy = 0;
    for (r = 0; r < q->size; r++) {
        struct stand_comm *c = q->member[r];
        joined += c && c->joining;
        split += c && c->splitting && !c->aborted;
        final += c && (c->finalizing || c->aborted);
        busy += c && c->finalizing == 1 && !c->aborted && !c->running && !c->setup;
    }
    if (joined == q->size) {
        for (r = 0; r < q->size; r++) {
            q->member[r]->joining = 0;
            q->member[r]->state = ncclSuccess;
        }
        return 1;
    }
    if (split == q->size) { /* which takes its time */
        if (stand_chance(100)) stand_split_all(q);
        return 1;
    }
    if (final < q->size || !busy) return 0;
    for (r = 0; r < q->size; r++)
        if (q->member[r]->finalizing == 1) {
            q->member[r]->finalizing = 2;
            q->member[r]->state = ncclSuccess;
        }
    return 1;
}

/* ---- the thread that does it all ---- */

static void stand_describe(char *text, size_t bytes) {
    const struct stand_comm *c;
    const stand_group *g;
    int i, at = 0;
    text[0] = 0;
    for (c = stand.comms; c; c = c->next)
        for (g = c->running ? c->running : c->setup, i = 0;
             g && !c->aborted && i < g->count && at < (int)bytes - 100; i++) {
            const stand_message *m = &g->list[i];
            if (!m->done)
                at += snprintf(text + at, bytes - (size_t)at,
                               "%srank %d %s %zu bytes %s rank %d", at ? "; " : "", c->rank,
                               m->sending ? "sends" : "waits for", m->bytes,
                               m->sending ? "to" : "from", m->peer);
        }
}

/* Detects a deadlock, exactly: no step is possible, and every thread of the hosts waits inside
   NCCL or for a stream that has work left. */
static void stand_watch(void) {
    const struct stand_stream *s;
    const struct stand_comm *c;
    int waiting = 0;
    for (c = stand.comms; c; c = c->next) waiting += c->held && c->state == ncclInProgress;
    for (s = stand.streams; s; s = s->next) waiting += s->head ? s->watched : 0;
    if (stand.deadlock[0] || !stand.hosts || waiting < stand.hosts) return;
    stand_describe(stand.deadlock, sizeof stand.deadlock);
    pthread_cond_broadcast(&stand.wake);
}

static int stand_step(void) {
    int64_t skip = (int64_t)(stand.random >> 40) % 7, did = 0;
    struct stand_stream *s;
    struct stand_comm *c;
    stand_clique *q;
    stand_chance(2);
    for (s = stand.streams; s && !did; s = s->next)
        if (skip-- <= 0) did = stand_stream_step(s);
    for (c = stand.comms; c && !did; c = c->next)
        if (c->setup && !c->aborted) did = stand_setup_step(c);
    for (q = stand.cliques; q && !did; q = q->next) did = stand_clique_step(q);
    for (s = stand.streams; s && !did; s = s->next) did = stand_stream_step(s);
    return (int)did;
}

static void *stand_main(void *unused) {
    struct timespec late = {0, 20000};
    int sleeps;
    (void)unused;
    pthread_mutex_lock(&stand.lock);
    for (;;) {
        if (stand_step()) {
            stand.steps++;
            pthread_cond_broadcast(&stand.wake);
            if (!stand_chance(3)) continue;
            sleeps = stand_chance(4);
            pthread_mutex_unlock(&stand.lock);
            if (sleeps)
                nanosleep(&late, NULL);
            else
                sched_yield();
            pthread_mutex_lock(&stand.lock);
            continue;
        }
        stand_watch();
        pthread_cond_wait(&stand.wake, &stand.lock);
    }
    return NULL;
}

static void stand_start(void) { /* locked */
    pthread_t thread;
    if (stand.started) return;
    stand.started = 1;
    if (pthread_create(&thread, NULL, stand_main, NULL)) abort();
    pthread_detach(thread);
}

/* ---- for tests ---- */

/* Frees leftover streams, events and communicators, and clears counts, complaints and failures
   to come. hosts: threads that will call, 0: unknown. */
__attribute__((unused)) static void stand_reset(uint64_t seed, int hosts) {
    struct stand_stream *s;
    pthread_mutex_lock(&stand.lock);
    for (s = stand.streams; s; s = s->next)
        while (s->head) stand_pop(s);
    while (stand.streams) {
        s = stand.streams->next;
        free(stand.streams);
        stand.streams = s;
    }
    while (stand.events) {
        struct stand_event *e = stand.events->next;
        free(stand.events);
        stand.events = e;
    }
    while (stand.comms) {
        struct stand_comm *c = stand.comms->next;
        if (stand.comms->setup) {
            free(stand.comms->setup->list);
            free(stand.comms->setup);
        }
        free(stand.comms);
        stand.comms = c;
    }
    while (stand.cliques) {
        stand_clique *q = stand.cliques->next;
        free(stand.cliques->member);
        free(stand.cliques->connected);
        free(stand.cliques);
        stand.cliques = q;
    }
    memset(stand.counts, 0, sizeof stand.counts);
    memset(stand.version, 0, sizeof stand.version);
    stand.fail_name = stand.skip_name = NULL;
    stand.failed = stand.all_device = stand.speechless = 0;
    stand.hosts = hosts;
    stand.devices = 16;
    stand.random = seed * 2 + 1;
    stand.complaint[0] = stand.deadlock[0] = 0;
    pthread_mutex_unlock(&stand.lock);
}

/* What is left that should have been given back; "" is right. */
__attribute__((unused)) static const char *stand_leaks(void) {
    static char text[200];
    int comms = 0, streams = 0, events = 0, ranges = 0;
    struct stand_comm *c;
    struct stand_stream *s;
    struct stand_event *e;
    stand_range *r;
    pthread_mutex_lock(&stand.lock);
    for (c = stand.comms; c; c = c->next) comms += !c->freed;
    for (s = stand.streams; s; s = s->next) streams += !s->freed;
    for (e = stand.events; e; e = e->next) events += !e->freed;
    for (r = stand.ranges; r; r = r->next) ranges++;
    pthread_mutex_unlock(&stand.lock);
    text[0] = 0;
    if (comms || streams || events || ranges)
        snprintf(text, sizeof text,
                 "%d communicators, %d streams, %d events, %d allocations are left", comms,
                 streams, events, ranges);
    return text;
}

__attribute__((unused)) static void stand_fail(const char *name, int device, int64_t call) {
    stand.fail_name = name;
    stand.fail_device = device;
    stand.fail_call = call;
}

__attribute__((unused)) static int64_t stand_calls(const char *name, int device) {
    const stand_count *c = stand.counts;
    while (c->name && strcmp(c->name, name)) c++;
    return c->calls[device];
}

/* Every second call of this name, the odd or the even ones, does nothing and says that all
   is well. */
__attribute__((unused)) static void stand_skip(const char *name, int odd) {
    stand.skip_name = name;
    stand.skip_odd = odd;
}

/* What a kernel is here: a function that runs when the stream has come to it. */
__attribute__((unused)) static void stand_kernel(cudaStream_t s, void (*fn)(void *),
                                                 void *arg) {
    stand_op op = {NULL, STAND_KERNEL, 0, NULL, NULL, fn, arg};
    pthread_mutex_lock(&stand.lock);
    stand_push(s, op);
    pthread_cond_broadcast(&stand.wake);
    pthread_mutex_unlock(&stand.lock);
}

/* ---- the CUDA runtime ---- */

static const char *cudaGetErrorString(cudaError_t code) {
    return code == cudaErrorNoDevice ? "no CUDA-capable device is detected"
           : code == cudaSuccess     ? "no error"
                                     : "unknown error";
}

static cudaError_t cudaPeekAtLastError(void) { return stand_last; }
static cudaError_t cudaGetLastError(void) {
    cudaError_t last = stand_last;
    stand_last = cudaSuccess;
    return last;
}

static cudaError_t cudaGetDeviceCount(int *count) {
    STAND_ENTER(cudaErrorUnknown);
    *count = stand.devices;
    STAND_LEAVE(stand.devices ? cudaSuccess : cudaErrorNoDevice);
}

static cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= stand.devices) return cudaErrorInvalidValue;
    stand_device = device;
    STAND_ENTER(cudaErrorUnknown);
    STAND_LEAVE(cudaSuccess);
}

static cudaError_t cudaGetDevice(int *device) {
    STAND_ENTER(cudaErrorUnknown);
    *device = stand_device;
    STAND_LEAVE(cudaSuccess);
}

static cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    STAND_ENTER(cudaErrorUnknown);
    *least = 0;
    *greatest = -5;
    STAND_LEAVE(cudaSuccess);
}

static cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags,
                                                int priority) {
    STAND_ENTER(cudaErrorUnknown);
    stand_start();
    if (flags != cudaStreamNonBlocking || priority != -5)
        stand_complain("a stream with flags %u and priority %d", flags, priority);
    *stream = calloc(1, sizeof **stream);
    (*stream)->device = stand_device;
    (*stream)->next = stand.streams;
    stand.streams = *stream;
    STAND_LEAVE(cudaSuccess);
}

__attribute__((unused)) static cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, -5);
}

static cudaError_t cudaStreamDestroy(cudaStream_t s) {
    STAND_ENTER((s->freed = 1, cudaErrorUnknown));
    if (s->freed) stand_complain("a stream is destroyed twice");
    s->freed = 1;
    STAND_LEAVE(cudaSuccess);
}

__attribute__((unused)) static cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    STAND_ENTER(cudaErrorUnknown);
    s->watched++;
    pthread_cond_broadcast(&stand.wake);
    while (s->head && !stand.deadlock[0]) pthread_cond_wait(&stand.wake, &stand.lock);
    s->watched--;
    STAND_LEAVE(s->head ? cudaErrorLaunchFailure : cudaSuccess);
}

static cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    STAND_ENTER(cudaErrorUnknown);
    if (flags != cudaEventDisableTiming) stand_complain("an event that takes the time");
    *event = calloc(1, sizeof **event);
    (*event)->next = stand.events;
    stand.events = *event;
    STAND_LEAVE(cudaSuccess);
}

static cudaError_t cudaEventDestroy(cudaEvent_t e) {
    STAND_ENTER((e->freed = 1, cudaErrorUnknown));
    if (e->freed) stand_complain("an event is destroyed twice");
    e->freed = 1;
    STAND_LEAVE(cudaSuccess);
}

static cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    stand_op op = {NULL, STAND_RECORD, 0, e, NULL, NULL, NULL};
    STAND_ENTER(cudaErrorUnknown);
    if (e->freed) stand_complain("an event is recorded after its end");
    op.ticket = ++e->asked;
    stand_push(s, op);
    STAND_LEAVE(cudaSuccess);
}

static cudaError_t cudaEventQuery(cudaEvent_t e) {
    STAND_ENTER(cudaErrorUnknown);
    if (e->freed) stand_complain("an event is queried after its end");
    if (e->done < e->asked) stand_last = cudaErrorNotReady;
    STAND_LEAVE(e->done < e->asked ? cudaErrorNotReady : cudaSuccess);
}

static cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
    stand_op op = {NULL, STAND_WAIT, 0, e, NULL, NULL, NULL};
    STAND_ENTER(cudaErrorUnknown);
    if (e->freed || flags)
        stand_complain("a stream waits for an event after its end, or with flags");
    op.ticket = e->asked;
    stand_push(s, op);
    STAND_LEAVE(cudaSuccess);
}

static cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *about,
                                            const void *data) {
    const stand_range *r;
    STAND_ENTER(cudaErrorUnknown);
    about->type = stand.all_device ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    about->device = stand.all_device ? stand_device : -1;
    for (r = stand.ranges; r; r = r->next)
        if ((const char *)data >= r->data && (const char *)data < r->data + r->bytes) {
            about->type = r->type;
            about->device = r->device;
        }
    STAND_LEAVE(cudaSuccess);
}

static void *stand_range_new(size_t bytes, enum cudaMemoryType type) {
    stand_range *r = calloc(1, sizeof *r);
    r->data = malloc(bytes ? bytes : 1);
    memset(r->data, 0x77, bytes);
    r->bytes = bytes;
    r->type = type;
    r->device = stand_device;
    r->next = stand.ranges;
    stand.ranges = r;
    return r->data;
}

static void stand_range_free(void *data) {
    stand_range **link = &stand.ranges, *r;
    struct stand_comm *c;
    int i;
    while (*link && (*link)->data != data) link = &(*link)->next;
    if (!(r = *link)) {
        stand_complain("memory is freed twice");
        return;
    }
    for (c = stand.comms; c; c = c->next)
        for (i = 0; c->running && !c->aborted && i < c->running->count; i++)
            if (c->running->list[i].data >= r->data &&
                c->running->list[i].data < r->data + r->bytes)
                stand_complain("memory is freed while a group of rank %d uses it", c->rank);
    *link = r->next;
    free(r->data);
    free(r);
}

static cudaError_t cudaHostAlloc(void **data, size_t bytes, unsigned flags) {
    STAND_ENTER(cudaErrorUnknown);
    if (flags != cudaHostAllocPortable) stand_complain("pinned memory with flags %u", flags);
    *data = stand_range_new(bytes, cudaMemoryTypeHost);
    STAND_LEAVE(cudaSuccess);
}

static cudaError_t cudaFreeHost(void *data) {
    STAND_ENTER((stand_range_free(data), cudaErrorUnknown));
    stand_range_free(data);
    STAND_LEAVE(cudaSuccess);
}

__attribute__((unused)) static cudaError_t cudaMalloc(void **data, size_t bytes) {
    STAND_ENTER(cudaErrorUnknown);
    *data = stand_range_new(bytes, cudaMemoryTypeDevice);
    STAND_LEAVE(cudaSuccess);
}

__attribute__((unused)) static cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes,
                                                      int kind) {
    (void)kind;
    memcpy(to, from, bytes);
    return cudaSuccess;
}

__attribute__((unused)) static cudaError_t cudaFree(void *data) {
    STAND_ENTER(cudaErrorUnknown);
    stand_range_free(data);
    STAND_LEAVE(cudaSuccess);
}

/* ---- NCCL ---- */

static int stand_unusable(const struct stand_comm *c, const char *what) {
    if (c->freed)
        stand_complain("%s on a communicator of rank %d that is gone", what, c->rank);
    else if (c->state == ncclInProgress || c->splitting)
        stand_complain("%s on a communicator of rank %d that is in progress", what, c->rank);
    else if (c->device != stand_device)
        stand_complain("%s on a communicator of device %d from device %d", what, c->device,
                       stand_device);
    else
        return 0;
    return 1;
}

/* a blocking communicator waits here until it is no longer in progress */
static ncclResult_t stand_settle(struct stand_comm *c) {
    while (c->blocking && c->state == ncclInProgress && !c->aborted && !stand.deadlock[0]) {
        c->held = 1;
        pthread_cond_wait(&stand.wake, &stand.lock);
        c->held = 0;
    }
    return c->blocking && stand.deadlock[0] ? ncclSystemError : c->state;
}

static const char *ncclGetErrorString(ncclResult_t code) {
    return code == ncclSystemError    ? "unhandled system error"
           : code == ncclInvalidUsage ? "invalid usage"
           : code == ncclRemoteError  ? "remote process exited"
                                      : "an NCCL error";
}

static const char *ncclGetLastError(ncclComm_t c) {
    (void)c;
    return stand.speechless ? NULL : "as was asked for";
}

static ncclResult_t ncclGetVersion(int *version) {
    STAND_ENTER(ncclSystemError);
    *version = stand.version[stand_device] ? stand.version[stand_device] : NCCL_VERSION_CODE;
    STAND_LEAVE(ncclSuccess);
}

static ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    STAND_ENTER(ncclSystemError);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "world %llu", (unsigned long long)++stand.ids);
    STAND_LEAVE(ncclSuccess);
}

static ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id,
                                           int rank, ncclConfig_t *config) {
    stand_clique *q;
    int r;
    STAND_ENTER(ncclSystemError);
    stand_start();
    for (q = stand.cliques; q && memcmp(&q->id, &id, sizeof id); q = q->next) {
    }
    if (!q) {
        q = stand_clique_new(size);
        q->id = id;
    }
    if (rank < 0 || rank >= q->size || q->size != size || q->member[rank])
        STAND_LEAVE(ncclInvalidArgument);
    for (r = 0; r < size; r++)
        if (q->member[r] && q->member[r]->device == stand_device) STAND_LEAVE(ncclInvalidUsage);
    *comm = stand_comm_new(q, rank, stand_device, config->blocking != 0);
    (*comm)->joining = 1;
    (*comm)->state = ncclInProgress;
    pthread_cond_broadcast(&stand.wake);
    r = (int)stand_settle(*comm);
    STAND_LEAVE((ncclResult_t)r);
}

static ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *part,
                                  ncclConfig_t *config) {
    int code;
    STAND_ENTER(ncclSystemError);
    if (stand_unusable(c, "ncclCommSplit")) STAND_LEAVE(ncclInvalidUsage);
    if (color < 0 || config->blocking != 0) stand_complain("a split by colour %d", color);
    c->splitting = 1;
    c->color = color;
    c->key = key;
    c->part = part;
    *part = NULL;
    /* NCCL 2.28: a split that has not begun may look like success */
    c->state = c->blocking || stand_chance(2) ? ncclInProgress : ncclSuccess;
    pthread_cond_broadcast(&stand.wake);
    code = (int)stand_settle(c);
    STAND_LEAVE((ncclResult_t)code);
}

static ncclResult_t ncclCommFinalize(ncclComm_t c) {
    int code;
    STAND_ENTER(ncclSystemError);
    if (stand_unusable(c, "ncclCommFinalize")) STAND_LEAVE(ncclInvalidUsage);
    c->finalizing = 1;
    c->state = ncclInProgress;
    pthread_cond_broadcast(&stand.wake);
    code = (int)stand_settle(c);
    STAND_LEAVE((ncclResult_t)code);
}

static ncclResult_t ncclCommDestroy(ncclComm_t c) {
    STAND_ENTER((c->freed = 1, ncclSystemError));
    if (stand_unusable(c, "ncclCommDestroy")) STAND_LEAVE(ncclInvalidUsage);
    if (c->running || c->finalizing != 2)
        stand_complain(
            "rank %d destroys a communicator that is in use, or not finalized by all", c->rank);
    c->freed = 1;
    STAND_LEAVE(ncclSuccess);
}

static ncclResult_t ncclCommAbort(ncclComm_t c) {
    STAND_ENTER((c->freed = c->aborted = 1, ncclSystemError));
    if (c->freed) stand_complain("a communicator of rank %d is aborted after its end", c->rank);
    if (stand_depth) stand_complain("rank %d aborts while a group is open", c->rank);
    c->freed = c->aborted = 1;
    STAND_LEAVE(ncclSuccess);
}

static ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *state) {
    pthread_mutex_lock(&stand.lock);
    *state = ncclRemoteError;
    if (stand_trips("asynchronous error")) {
        pthread_mutex_unlock(&stand.lock);
        return ncclSuccess;
    }
    pthread_mutex_unlock(&stand.lock);
    STAND_ENTER(ncclSystemError);
    if (c->freed) stand_complain("a communicator of rank %d is asked after its end", c->rank);
    *state = c->state;
    STAND_LEAVE(ncclSuccess);
}

static ncclResult_t ncclCommCount(ncclComm_t c, int *count) {
    STAND_ENTER(ncclSystemError);
    *count = c->clique->size;
    STAND_LEAVE(ncclSuccess);
}

static ncclResult_t ncclCommUserRank(ncclComm_t c, int *rank) {
    STAND_ENTER(ncclSystemError);
    *rank = c->rank;
    STAND_LEAVE(ncclSuccess);
}

static ncclResult_t stand_message_add(void *data, size_t bytes, int peer, ncclComm_t c,
                                      cudaStream_t stream, int sending) {
    stand_group *g = &stand_open;
    stand_message m = {peer, sending, 0, data, bytes};
    if (stand_unusable(c, sending ? "ncclSend" : "ncclRecv")) return ncclInvalidUsage;
    if (!bytes) stand_complain("rank %d has a message of no bytes in a group", c->rank);
    if (peer < 0 || peer >= c->clique->size) return ncclInvalidArgument;
    if (g->comm && (g->comm != c || g->stream != stream))
        stand_complain("a group with two communicators or streams");
    g->comm = c;
    g->stream = stream;
    g->list = realloc(g->list, (size_t)(g->count + 1) * sizeof m);
    g->list[g->count++] = m;
    return ncclSuccess;
}

static ncclResult_t ncclGroupStart(void) {
    STAND_ENTER(ncclSystemError);
    stand_depth++;
    STAND_LEAVE(ncclSuccess);
}

static ncclResult_t stand_group_end(void) { /* locked */
    stand_group *g = NULL;
    struct stand_comm *c = stand_open.comm;
    int i, ready = 1;
    if (stand_depth < 1) stand_complain("ncclGroupEnd without ncclGroupStart");
    if (--stand_depth > 0 || !c) return ncclSuccess;
    g = malloc(sizeof *g);
    *g = stand_open;
    memset(&stand_open, 0, sizeof stand_open);
    c->setup = g;
    for (i = 0; i < g->count; i++)
        ready &= c->clique->connected[g->list[i].sending
                                          ? c->rank * c->clique->size + g->list[i].peer
                                          : g->list[i].peer * c->clique->size + c->rank];
    if (ready && !stand_chance(4)) {
        stand_queue_group(c);
        return ncclSuccess;
    }
    c->state = ncclInProgress;
    pthread_cond_broadcast(&stand.wake);
    return stand_settle(c);
}

static void stand_group_drop(void) { /* the group is over, and nothing of it is done */
    stand_depth--;
    free(stand_open.list);
    memset(&stand_open, 0, sizeof stand_open);
}

static ncclResult_t ncclGroupEnd(void) {
    int code;
    STAND_ENTER((stand_group_drop(), ncclSystemError));
    /* aborted meanwhile */
    if (stand_open.comm && stand_open.comm->freed) {
        stand_group_drop();
        STAND_LEAVE(ncclInvalidUsage);
    }
    code = (int)stand_group_end();
    STAND_LEAVE((ncclResult_t)code);
}

static ncclResult_t ncclSend(const void *data, size_t bytes, ncclDataType_t type, int peer,
                             ncclComm_t c, cudaStream_t stream) {
    int code;
    STAND_ENTER(ncclSystemError);
    if (type != ncclUint8) stand_complain("a message of other things than bytes");
    stand_depth++;
    code = (int)stand_message_add((void *)data, bytes, peer, c, stream, 1);
    if (stand_depth > 1)
        stand_depth--;
    else if (code == ncclSuccess)
        code = (int)stand_group_end();
    STAND_LEAVE((ncclResult_t)code);
}

static ncclResult_t ncclRecv(void *data, size_t bytes, ncclDataType_t type, int peer,
                             ncclComm_t c, cudaStream_t stream) {
    int code;
    STAND_ENTER(ncclSystemError);
    if (type != ncclUint8) stand_complain("a message of other things than bytes");
    stand_depth++;
    code = (int)stand_message_add(data, bytes, peer, c, stream, 0);
    if (stand_depth > 1)
        stand_depth--;
    else if (code == ncclSuccess)
        code = (int)stand_group_end();
    STAND_LEAVE((ncclResult_t)code);
}
#endif
