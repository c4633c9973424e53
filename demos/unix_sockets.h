/* SPDX-License-Identifier: MIT OR Unlicense */
/* unix_sockets.h - ranks that are processes of one machine: a whole seqpar_comm_table,
   written to be read. 04_own_transport.c uses it. Every rank has an inbox, a socket that all
   can write to and it alone reads. begin sends messages, cut into packets; wait collects
   those it expects. Whoever must wait, for a packet or for room in an inbox, does so in
   progress() and takes in what arrives meanwhile: that makes room for others, so no exchange
   is too large. Nobody waits in vain: a process that ends closes its inbox, which poll()
   reports to all who hold the other end; bad news go to the board, a socket that all write to
   and all look at, taking nothing away; and where nothing comes for own_patience seconds, the
   wait is called a hang. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "seqpar.h"
enum {
    MOST_RANKS = 16,
    BOARD = MOST_RANKS,
    SOCKETS,
    WRITE = 0,
    READ = 1,
    PIECE = 1 << 15 /* bytes of a packet */
};

/* from: in the world; number: counted per comm and pair of ranks */
typedef struct heading {
    long long comm, from, number, bytes, step;
    char name[32]; /* of its group, cut */
} heading;

typedef struct message {
    struct message *next;
    heading head;
    long long arrived;
    char data[];
} message;

typedef struct expected {
    heading head;
    void *data;
} expected;

/* a request */
typedef struct parcel {
    const char *name;
    long long step, count;
    expected recvs[];
} parcel;

typedef struct member {
    seqpar_comm comm;
    int64_t id, world[MOST_RANKS], sent[MOST_RANKS], received[MOST_RANKS];
} member;

static struct {             /* this process */
    int socket[SOCKETS][2]; /* one inbox per rank, and the board */
    long long rank, comms;  /* comms: the largest id of a comm so far */
    message *messages;      /* that have arrived, if only in part, and are not collected */
    seqpar_status failed;   /* if set, nothing is sent or collected any more */
    seqpar_error error;
} here;
#define FAIL(...) (here.failed = seqpar_fail(&here.error, __VA_ARGS__))

static double own_patience = 600; /* longer than any rank computes between two waits */

/* Where a context is open, buffers may lie in the memory of its device, which the host does
   not read and write itself. */
static void move_bytes(const seqpar_comm *comm, void *to, const void *from, long long bytes) {
    if (bytes && comm->device)
        comm->device->copy(comm->device, to, from, bytes, NULL);
    else if (bytes)
        memcpy(to, from, (size_t)bytes);
}

static heading heading_of(const seqpar_group *g, long long comm, long long from,
                          long long number, long long bytes) {
    heading h = {comm, from, number, bytes, g->step, ""};
    snprintf(h.name, sizeof h.name, "%s", g->name);
    return h;
}

static message **find(const heading *h) { /* the link to that message, or the last link */
    message **link = &here.messages;
    while (*link && memcmp(&(*link)->head, h, offsetof(heading, bytes))) link = &(*link)->next;
    return link;
}

static void take_in(void) { /* one packet */
    struct {
        heading head;
        char data[PIECE];
    } packet;
    ssize_t bytes = recv(here.socket[here.rank][READ], &packet, sizeof packet, MSG_DONTWAIT) -
                    (ssize_t)sizeof packet.head;
    if (bytes < 0) return;
    message **link = find(&packet.head), *m = *link;
    /* the others will notice */
    if (!m && !(m = *link = (message *)calloc(1, sizeof *m + (size_t)packet.head.bytes)))
        abort();
    memcpy(m->data + m->arrived, packet.data, (size_t)bytes);
    m->head = packet.head, m->arrived += bytes;
}

/* Sleeps until something happens. poll() goes through the list in order: if it finds a
   process ended, it finds all that one had sent. */
static void progress(const parcel *p, long long peer, short event) {
    struct pollfd on[] = {{here.socket[peer][WRITE], event},
                          {here.socket[here.rank][READ], POLLIN},
                          {here.socket[BOARD][READ], POLLIN}};
    seqpar_error news;
    int found = poll(on, 3, (int)(own_patience * 1000));
    if (found < 0) return; /* a signal: the caller comes again */
    if (!found)
        FAIL(SEQPAR_ERR_TIMEOUT,
             "rank %lld waits in '%s' step %lld for rank %lld, and nothing came for %g s",
             here.rank, p->name, p->step, peer, own_patience);
    else if (on[2].revents && recv(here.socket[BOARD][READ], &news, sizeof news, MSG_PEEK) > 0)
        FAIL(SEQPAR_ERR_PEER, "rank %lld failed: %s", (long long)news.rank, news.text);
    else if (on[1].revents)
        take_in();
    else if (on[0].revents & POLLHUP)
        FAIL(SEQPAR_ERR_PEER,
             "rank %lld waits in '%s' step %lld for rank %lld, which has ended", here.rank,
             p->name, p->step, peer);
}

static void deliver(const seqpar_comm *comm, const parcel *p, long long peer, heading h,
                    const char *data) {
    char piece[PIECE];
    struct iovec part[] = {{&h, sizeof h}, {piece, 0}};
    struct msghdr packet = {.msg_iov = part, .msg_iovlen = 2};
    for (long long left = h.bytes;; data += PIECE) {
        long long bytes = left < PIECE ? left : PIECE;
        move_bytes(comm, piece, data, bytes);
        part[1].iov_len = (size_t)bytes;
        while (!here.failed &&
               sendmsg(here.socket[peer][WRITE], &packet, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
            progress(p, peer, POLLOUT);
        /* not before: a message without bytes is a packet, too */
        if ((left -= PIECE) <= 0) return;
    }
}

static void collect(const seqpar_comm *comm, const parcel *p, const expected *e) {
    message **link, *m;
    while (!(m = *(link = find(&e->head))) || m->arrived < m->head.bytes)
        if (progress(p, e->head.from, 0), here.failed) return;
    const seqpar_mismatch both = {e->head.name, m->head.name, e->head.step,  m->head.step,
                                  here.rank,    e->head.from, e->head.bytes, m->head.bytes};
    if (memcmp(&m->head.bytes, &e->head.bytes, sizeof m->head - offsetof(heading, bytes)))
        here.failed = seqpar_comm_mismatch(&here.error, &both);
    else
        move_bytes(comm, e->data, m->data, m->head.bytes);
    *link = m->next, free(m);
}

/* ---- the five functions; .queued is 0, so they are given no queue ---- */
static seqpar_status own_begin(seqpar_comm *comm, const seqpar_group *g, void *queue,
                               seqpar_request *request) {
    member *m = (member *)comm->state;
    parcel *p = (parcel *)malloc(sizeof *p + (size_t)g->recv_count * sizeof *p->recvs);
    if (!(request->state = p))
        return seqpar_fail(comm->error, SEQPAR_ERR_MEMORY, "out of memory for '%s'", g->name);
    p->name = g->name, p->step = g->step, p->count = 0;
    for (const seqpar_transfer *t = g->recvs; t < g->recvs + g->recv_count; t++)
        p->recvs[p->count++] = (expected){
            heading_of(g, m->id, m->world[t->peer], m->received[t->peer]++, t->bytes), t->data};
    for (const seqpar_transfer *t = g->sends; t < g->sends + g->send_count; t++)
        deliver(comm, p, m->world[t->peer],
                heading_of(g, m->id, here.rank, m->sent[t->peer]++, t->bytes),
                (const char *)t->data);
    return (void)queue, SEQPAR_OK; /* if a send failed, wait says so */
}

static void own_abort(seqpar_comm *comm, const char *text) {
    seqpar_error news = {comm->error->status ? comm->error->status : SEQPAR_ERR_PEER, here.rank,
                         ""};
    snprintf(news.text, sizeof news.text, "%s", text);
    /* if there is no room, others were first */
    send(here.socket[BOARD][WRITE], &news, sizeof news, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static seqpar_status own_wait(seqpar_comm *comm, seqpar_request *request, void *queue) {
    parcel *p = (parcel *)request->state;
    for (expected *e = p->recvs; e < p->recvs + p->count && !here.failed; e++)
        collect(comm, p, e);
    /* or others would only see that this rank has ended */
    if (here.failed) own_abort(comm, here.error.text);
    return (void)queue, free(p), here.failed;
}

static seqpar_status own_split(seqpar_comm *comm, int64_t color, int64_t key,
                               seqpar_comm **sub) {
    struct {
        int64_t color, key, comms;
    } mine = {color, key, here.comms}, all[MOST_RANKS], *a, *b, *end = all + comm->size;
    int64_t bytes[MOST_RANKS], place;
    for (a = all; a < end; a++) bytes[a - all] = sizeof mine;
    seqpar_status status = seqpar_comm_all_gather(comm, all, &mine, bytes, "split");
    member *s = status ? NULL : (member *)calloc(1, sizeof *s);
    if (!s)
        return seqpar_fail(comm->error, status ? status : SEQPAR_ERR_MEMORY,
                           "out of memory for a comm");
    s->comm = (seqpar_comm){.table = comm->table, .error = comm->error, .state = s};
    for (a = all; a < end; a++) {
        for (place = 0, b = all; b < end; b++)
            place += b->color == a->color && (b->key < a->key || (b->key == a->key && b < a));
        if (a->color == color)
            s->world[place] = ((member *)comm->state)->world[a - all], s->comm.size++;
        if (a == all + comm->rank) s->comm.rank = place;
        if (here.comms < a->comms) here.comms = a->comms;
    }
    s->id = ++here.comms; /* no member is in another comm of this number */
    return *sub = &s->comm, SEQPAR_OK;
}

static void own_free(seqpar_comm *comm) { free(comm->state); }
/* the other inboxes are for others to read: kept open here too, they would not close with
   their owner */
static void sit_down(int rank) {
    here.rank = here.error.rank = rank;
    for (int s = 0; s < SOCKETS; s++)
        if (s != rank && s != BOARD) close(here.socket[s][READ]);
}

static int rank_process(int rank, int64_t ranks, seqpar_rank_fn fn, void *user) {
    static const seqpar_comm_table table = {"unix sockets", own_begin, own_wait, own_split,
                                            own_abort,      own_free,  0};
    member world = {.comm = {.table = &table,
                             .rank = rank,
                             .size = ranks,
                             .error = &here.error,
                             .state = &world}};
    for (int64_t r = 0; r < ranks; r++) world.world[r] = r;
    sit_down(rank);
    seqpar_status status = fn(&world.comm, user);
    if (!status || status == SEQPAR_ERR_DIED) return status != SEQPAR_OK;
    /* if it did not say more */
    seqpar_fail(&here.error, status, "%s", seqpar_status_text(status));
    return own_abort(&world.comm, here.error.text), 1;
}

/* Like seqpar_run_threads, but with processes: what fn writes to memory, *user included,
   stays in its process. */
static seqpar_status run_processes(int64_t ranks, seqpar_rank_fn fn, void *user,
                                   seqpar_error *error) {
    seqpar_error end = {0};
    int r, code, pid[MOST_RANKS];
    memset(&here, 0, sizeof here), memset(here.socket, -1, sizeof here.socket);
    for (int s = 0; s < SOCKETS; s++) /* packets stay whole, also with many writers */
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, here.socket[s]))
            seqpar_fail(&end, SEQPAR_ERR_THREAD, "no more sockets");
    if (ranks < 1 || ranks > MOST_RANKS)
        seqpar_fail(&end, SEQPAR_ERR_RANKS, "this transport has 1 to %d ranks", MOST_RANKS);
    fflush(NULL); /* or what is buffered would be printed by every process */
    for (r = 0; r < ranks && !end.status; r++)
        if (!(pid[r] = fork())) exit(rank_process(r, ranks, fn, user));
    sit_down(BOARD); /* the parent has no inbox and no part in the world */
    while (r-- > 0) {
        for (code = -1; pid[r] > 0 && waitpid(pid[r], &code, 0) < 0 && errno == EINTR;) {
        }
        if (code && !end.status)
            end.rank = r, seqpar_fail(&end, SEQPAR_ERR_DIED,
                                      "rank %d died without a word, or did not start", r);
    }
    /* the first to tell knows better */
    recv(here.socket[BOARD][READ], &end, sizeof end, MSG_DONTWAIT);
    for (int s = 0; s < SOCKETS; s++) close(here.socket[s][WRITE]);
    close(here.socket[BOARD][READ]);
    if (error) *error = end;
    return end.status;
}
