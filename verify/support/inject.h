/* SPDX-License-Identifier: MIT OR Unlicense */
/* A transport that does harm on purpose: what a trainer, or a transport of your own, is
   tested with. */
#ifndef INJECT_H
#define INJECT_H

#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include "seqpar.h"

/* A comm around another one that delays, reorders or damages messages, or fails. Receives and
   begins of this rank are counted from 1; 0 is never. Virtual clock (seqpar_inject_clock): the
   caller adds the cost of computing by seqpar_inject_compute; a received message sets it to at
   least the sender's time plus latency. */
typedef struct seqpar_inject_desc {
    uint64_t seed;
    int64_t delay_us_max; /* sleep before a begin, uniform in 0..max */
    int reorder;          /* post the sends of a group in random order */
    int64_t flip_bit_at;  /* flip one bit of this received message */
    int64_t fail_at;      /* begin number that returns SEQPAR_ERR_INJECTED */
    int64_t die_at;       /* begin number at which the rank ends without a word */
    int virtual_clock;    /* carry time stamps with every message */
    double latency;       /* virtual time a message takes */
} seqpar_inject_desc;

/* inner stays the caller's, to be freed after */
static inline seqpar_comm *seqpar_comm_inject(seqpar_comm *inner,
                                              const seqpar_inject_desc *desc);

typedef struct inject {
    seqpar_comm comm;
    seqpar_comm *inner, *owned; /* owned: made by split, freed with the wrapper */
    seqpar_inject_desc desc;
    int64_t begins, received;
    double clock;
} inject;

typedef struct injected { /* a request: the transfers as passed on, and their time stamps */
    seqpar_request inner;
    seqpar_transfer *list;
    double *stamps;
    int64_t recv_first, recv_count;
} injected;

static void inject_sleep(inject *in) {
#ifndef SEQPAR_NO_THREADS
    /* sleeps by a timed wait that nobody signals, as -std=c11 hides nanosleep */
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t never = PTHREAD_COND_INITIALIZER;
    struct timespec until;
    double u = seqpar_random_uniform(in->desc.seed, (uint64_t)in->comm.rank,
                                     (uint64_t)in->begins);
    if (in->desc.delay_us_max <= 0) return;
    timespec_get(&until, TIME_UTC);
    until.tv_nsec += (long)(u * 1000.0 *
                            (double)(in->desc.delay_us_max < 1000000 ? in->desc.delay_us_max
                                                                     : 1000000));
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    pthread_mutex_lock(&lock);
    pthread_cond_timedwait(&never, &lock, &until);
    pthread_mutex_unlock(&lock);
#else
    (void)in;
#endif
}

/* Peers in random order; messages to one peer keep theirs. */
static void inject_shuffle(const inject *in, seqpar_transfer *list, int64_t count) {
    int64_t i, j;
    for (i = 1; i < count; i++)
        for (j = i; j > 0; j--) {
            double a = seqpar_random_uniform(in->desc.seed, (uint64_t)in->begins,
                                             (uint64_t)list[j - 1].peer);
            double b = seqpar_random_uniform(in->desc.seed, (uint64_t)in->begins,
                                             (uint64_t)list[j].peer);
            seqpar_transfer t = list[j];
            if (a <= b) break;
            list[j] = list[j - 1];
            list[j - 1] = t;
        }
}

/* Every message is followed by 8 bytes: the virtual time at which it arrives. */
static int64_t inject_copy(seqpar_transfer *to, double *stamps, const seqpar_transfer *from,
                           int64_t count, int clock) {
    int64_t i, n = 0;
    for (i = 0; i < count; i++) {
        to[n++] = from[i];
        if (!clock) continue;
        to[n].peer = from[i].peer;
        to[n].data = &stamps[i];
        to[n++].bytes = 8;
    }
    return n;
}

static void injected_free(injected *r) {
    free(r->list);
    free(r->stamps);
    free(r);
}

/* Passes a copy of the group on, because the order of sends and the time stamps differ from the
   caller's. */
static seqpar_status inject_begin(seqpar_comm *comm, const seqpar_group *group, void *queue,
                                  seqpar_request *request) {
    inject *in = (inject *)comm->state;
    injected *r;
    seqpar_status status;
    seqpar_group g = *group;
    int64_t total = group->send_count + group->recv_count, i;
    in->begins++;
    if (in->begins == in->desc.die_at) return SEQPAR_ERR_DIED;
    if (in->begins == in->desc.fail_at)
        return seqpar_fail(comm->error, SEQPAR_ERR_INJECTED,
                           "'%s': injected failure of transfer %lld", group->name,
                           (long long)in->begins);
    inject_sleep(in);
    r = (injected *)calloc(1, sizeof *r);
    if (r) r->list = (seqpar_transfer *)calloc((size_t)(2 * total), sizeof *r->list);
    if (r) r->stamps = (double *)calloc((size_t)total, sizeof *r->stamps);
    if (!r || !r->list || !r->stamps) {
        if (r) {
            free(r->list);
            free(r->stamps);
        }
        free(r);
        return seqpar_fail(comm->error, SEQPAR_ERR_MEMORY, "no memory for an injected request");
    }
    for (i = 0; i < group->send_count; i++) r->stamps[i] = in->clock + in->desc.latency;
    g.send_count = inject_copy(r->list, r->stamps, group->sends, group->send_count,
                               in->desc.virtual_clock);
    if (in->desc.reorder) inject_shuffle(in, r->list, g.send_count);
    r->recv_first = group->send_count;
    r->recv_count = group->recv_count;
    g.recv_count = inject_copy(r->list + g.send_count, r->stamps + r->recv_first, group->recvs,
                               group->recv_count, in->desc.virtual_clock);
    g.sends = r->list;
    g.recvs = r->list + g.send_count;
    in->inner->device = comm->device;
    status = seqpar_comm_begin(in->inner, &g, queue, &r->inner);
    if (status)
        injected_free(r);
    else
        request->state = r;
    return status;
}

static void inject_damage(inject *in, injected *r, int64_t sends) {
    int64_t step = in->desc.virtual_clock ? 2 : 1, i;
    for (i = 0; i < r->recv_count; i++) {
        seqpar_transfer *t = &r->list[sends * step + i * step];
        if (++in->received != in->desc.flip_bit_at || t->bytes == 0) continue;
        ((unsigned char *)t->data)[t->bytes / 2] ^= 0x10;
    }
}

static seqpar_status inject_wait(seqpar_comm *comm, seqpar_request *request, void *queue) {
    inject *in = (inject *)comm->state;
    injected *r = (injected *)request->state;
    seqpar_status status = seqpar_comm_wait(in->inner, &r->inner, queue);
    int64_t i;
    if (!status) inject_damage(in, r, r->recv_first);
    for (i = 0; !status && in->desc.virtual_clock && i < r->recv_count; i++)
        if (r->stamps[r->recv_first + i] > in->clock) in->clock = r->stamps[r->recv_first + i];
    injected_free(r);
    return status;
}

static seqpar_status inject_split(seqpar_comm *comm, int64_t color, int64_t key,
                                  seqpar_comm **sub) {
    inject *in = (inject *)comm->state;
    seqpar_comm *inner = NULL;
    if (seqpar_comm_split(in->inner, color, key, &inner)) return comm->error->status;
    *sub = seqpar_comm_inject(inner, &in->desc);
    if (!*sub) {
        seqpar_comm_free(inner);
        return seqpar_fail(comm->error, SEQPAR_ERR_MEMORY, "no memory for a comm");
    }
    ((inject *)(*sub)->state)->owned = inner;
    return SEQPAR_OK;
}

static void inject_abort(seqpar_comm *comm, const char *text) {
    seqpar_comm_abort(((inject *)comm->state)->inner, text);
}

static void inject_free(seqpar_comm *comm) {
    inject *in = (inject *)comm->state;
    seqpar_comm_free(in->owned);
    free(in);
}

static inline seqpar_comm *seqpar_comm_inject(seqpar_comm *inner,
                                              const seqpar_inject_desc *desc) {
    static const seqpar_comm_table table = {
        "inject", inject_begin, inject_wait, inject_split, inject_abort, inject_free, 0};
    inject *in = (inject *)calloc(1, sizeof *in);
    if (!in) return NULL;
    in->comm = *inner;
    in->comm.table = &table;
    in->comm.bytes_sent = in->comm.messages_sent = 0;
    in->comm.state = in;
    in->inner = inner;
    in->desc = *desc;
    return &in->comm;
}

static inline void seqpar_inject_compute(seqpar_comm *comm, double cost) {
    ((inject *)comm->state)->clock += cost;
}

static inline double seqpar_inject_clock(seqpar_comm *comm) {
    return ((inject *)comm->state)->clock;
}

#endif
