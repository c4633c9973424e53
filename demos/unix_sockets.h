/* SPDX-License-Identifier: MIT OR Unlicense */
/* unix_sockets.h - ranks that are processes of one machine: a whole seqpar_comm_table, written to be read. 04_own_transport.c uses it.
   From every rank to every rank, itself and the parent included, runs a wire: a stream socket with messages one behind the other,
   each behind a head. The one thing that blocks is a poll() over all wires: whoever waits goes on reading from all and writing to
   all, so no exchange is too large. Messages are copied twice; a faster transport would read and write where the bytes belong. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "seqpar.h"

enum { MOST = 16, PIECE = 1 << 16, HEAD = 24, BAD_NEWS = 0, WORLD = 1 /* comm numbers */ };
typedef struct head { uint64_t comm; int64_t number, bytes; } head;         /* number: counted per comm and pair of ranks; bad news: status */
typedef struct wire { int fd; char *data; int64_t begin, end, room; } wire; /* bytes that have come and not been asked for, or are still to go */
typedef struct awaited { int64_t peer, number, bytes; void *data; } awaited; /* peer: here and on the wires, ranks are those of the world */
typedef struct parcel { const char *name; int64_t step, count; awaited recvs[]; } parcel; /* what a request points to */
typedef struct member { seqpar_comm comm; uint64_t id, splits; int64_t world[MOST], sent[MOST], received[MOST]; } member;
static struct { int64_t rank, size; wire in[MOST + 1], out[MOST + 1]; seqpar_error error, news; } here; /* a process is a rank; number `size` is the parent */

/* ---- wires ---- */

static char *room_for(wire *w, int64_t bytes) {
    if (w->begin == w->end) w->begin = w->end = 0;
    if (w->end + bytes > w->room) w->data = realloc(w->data, (size_t)(w->room = 2 * (w->end + bytes)));
    return w->data ? w->data + w->end : (perror("unix sockets"), abort(), NULL); /* the others will see this rank end */
}
static void put(wire *w, const void *data, int64_t bytes) {
    if (bytes) memcpy(room_for(w, bytes), data, (size_t)bytes);
    w->end += bytes;
}
static void move(wire *w, int sending) { /* as much as goes without waiting */
    ssize_t n = 1;
    while (w->fd >= 0 && n > 0 && !(sending && w->begin == w->end)) {
        if (sending && (n = send(w->fd, w->data + w->begin, (size_t)(w->end - w->begin), MSG_NOSIGNAL)) > 0) w->begin += n;
        if (!sending && (n = recv(w->fd, room_for(w, PIECE), PIECE, 0)) > 0) w->end += n;
    }
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) close(w->fd), w->fd = -1; /* there is nobody at the other end */
}
static void write_to(int64_t peer, head h, const void *data) {
    put(&here.out[peer], &h, HEAD);
    put(&here.out[peer], data, h.bytes);
    move(&here.out[peer], 1); /* what fits travels while we compute */
}
static char *arrived(wire *w, uint64_t comm, int64_t number, head *h) { /* that message (bad news: any) if all of it has come */
    int64_t at;
    for (at = w->begin; at + HEAD <= w->end; at += HEAD + h->bytes) {
        memcpy(h, w->data + at, HEAD);
        if (h->comm == comm && (h->number == number || comm == BAD_NEWS)) return at + HEAD + h->bytes <= w->end ? w->data + at : NULL;
    }
    return NULL;
}
/* Whoever hears bad news passes it on: what others see of us after that, such as our end, they understand. Only the first is heard. */
static void spread(const seqpar_error *news) {
    if (here.news.status) return;
    here.news = *news;
    for (int64_t r = 0; r <= here.size; r++) if (r != here.rank) write_to(r, (head){BAD_NEWS, 0, sizeof here.news}, &here.news);
}
static int unsent(int64_t r) { return here.out[r].begin < here.out[r].end; }
static void hear(int64_t r) {
    seqpar_error news;
    head h;
    char *from;
    move(&here.in[r], 0);
    if ((from = arrived(&here.in[r], BAD_NEWS, 0, &h))) memcpy(&news, from + HEAD, sizeof news), spread(&news);
}
static void progress(void) { /* sleeps until something can move, and moves it */
    struct pollfd p[2 * MOST + 2];
    int64_t r, n = here.size + 1;
    for (r = 0; r < n; r++) p[r] = (struct pollfd){here.in[r].fd, POLLIN, 0}, p[n + r] = (struct pollfd){unsent(r) ? here.out[r].fd : -1, POLLOUT, 0};
    if (poll(p, (nfds_t)(2 * n), -1) < 0) return; /* a signal: the caller comes again */
    for (r = 0; r < n; r++) if (p[r].revents) hear(r);
    for (r = 0; r < n; r++) if (p[n + r].revents) move(&here.out[r], 1);
}

/* ---- the five functions ---- */

static seqpar_status own_begin(seqpar_comm *comm, const seqpar_group *g, void *queue, seqpar_request *request) {
    member *m = comm->state;
    parcel *p = request->state = malloc(sizeof *p + (size_t)g->recv_count * sizeof *p->recvs);
    const seqpar_transfer *t;
    (void)queue; /* this transport knows the host alone */
    if (!p) return seqpar_fail(comm->error, SEQPAR_ERR_MEMORY, "out of memory for '%s'", g->name);
    *p = (parcel){g->name, g->step, g->recv_count};
    for (t = g->sends; t < g->sends + g->send_count; t++) write_to(m->world[t->peer], (head){m->id, m->sent[t->peer]++, t->bytes}, t->data);
    for (t = g->recvs; t < g->recvs + g->recv_count; t++) p->recvs[t - g->recvs] = (awaited){m->world[t->peer], m->received[t->peer]++, t->bytes, t->data};
    return SEQPAR_OK;
}

static seqpar_status stuck(seqpar_comm *comm, const parcel *p, const wire *w, int64_t peer) { /* a reason not to wait any longer? */
    if (w->fd < 0) hear(peer); /* who cannot write to it any more may not have read its last words */
    if (here.news.status) return seqpar_fail(comm->error, SEQPAR_ERR_PEER, "rank %lld failed: %s", (long long)here.news.rank, here.news.text);
    if (here.in[here.size].fd < 0) return seqpar_fail(comm->error, SEQPAR_ERR_PEER, "the process that started rank %lld has ended", (long long)here.rank);
    if (w->fd >= 0) return SEQPAR_OK;
    return seqpar_fail(comm->error, SEQPAR_ERR_PEER, "rank %lld waits in '%s' step %lld for rank %lld, which has ended", (long long)here.rank, p->name, (long long)p->step, (long long)peer);
}
static seqpar_status receive(seqpar_comm *comm, const parcel *p, const awaited *a) {
    wire *w = &here.in[a->peer];
    head h;
    char *from;
    seqpar_status status = SEQPAR_OK;
    while (!(from = arrived(w, ((member *)comm->state)->id, a->number, &h)) && !(status = stuck(comm, p, w, a->peer))) progress();
    if (status) return status;
    if (h.bytes != a->bytes)
        return seqpar_fail(comm->error, SEQPAR_ERR_MESSAGE_SIZE, "'%s' step %lld: rank %lld sent %lld bytes, rank %lld expects %lld", p->name, (long long)p->step,
                           (long long)a->peer, (long long)h.bytes, (long long)here.rank, (long long)a->bytes);
    if (h.bytes) memcpy(a->data, from + HEAD, (size_t)h.bytes);
    if (from == w->data + w->begin) return w->begin += HEAD + h.bytes, SEQPAR_OK; /* mostly they are asked for as they come */
    memmove(from, from + HEAD + h.bytes, (size_t)(w->data + w->end - from - HEAD - h.bytes));
    return w->end -= HEAD + h.bytes, SEQPAR_OK;
}
static void tell_all(seqpar_status status, const char *text) { /* copies, so it cannot block */
    seqpar_error news = {status, here.rank, ""};
    snprintf(news.text, sizeof news.text, "%s", text);
    spread(&news);
}
static seqpar_status own_wait(seqpar_comm *comm, seqpar_request *request, void *queue) {
    parcel *p = request->state;
    seqpar_status status = SEQPAR_OK;
    int64_t i;
    (void)queue;
    for (i = 0; !status && i < p->count; i++) status = receive(comm, p, &p->recvs[i]);
    for (i = 0; i < here.size; i++) while (!status && unsent(i) && !(status = stuck(comm, p, &here.out[i], i))) progress();
    if (status) tell_all(status, comm->error->text);
    return free(p), status;
}
static void own_abort(seqpar_comm *comm, const char *text) { tell_all(comm->error->status ? comm->error->status : SEQPAR_ERR_PEER, text); }
static void own_free(seqpar_comm *comm) { free(comm->state); }

static member *member_new(uint64_t id);
static seqpar_status own_split(seqpar_comm *comm, int64_t color, int64_t key, seqpar_comm **sub) {
    member *m = comm->state, *s;
    int64_t mine[2] = {color, key}, all[MOST][2], bytes[MOST], r, q, place;
    uint32_t id[4];
    for (r = 0; r < comm->size; r++) bytes[r] = sizeof mine;
    seqpar_status status = seqpar_comm_all_gather(comm, all, mine, bytes, "split");
    if (status) return status;
    seqpar_random(id, m->id, ++m->splits, (uint64_t)color); /* all members come to the same number, and no other comm does */
    if (!(s = member_new((uint64_t)id[0] << 32 | id[1]))) return seqpar_fail(comm->error, SEQPAR_ERR_MEMORY, "out of memory for a comm");
    for (r = 0; r < comm->size; r++) {
        if (all[r][0] != color) continue;
        for (q = place = 0; q < comm->size; q++) place += all[q][0] == color && (all[q][1] < all[r][1] || (all[q][1] == all[r][1] && q < r));
        s->world[place] = m->world[r];
        s->comm.size++;
        if (r == comm->rank) s->comm.rank = place;
    }
    return *sub = &s->comm, SEQPAR_OK;
}
static member *member_new(uint64_t id) {
    static const seqpar_comm_table table = {"unix sockets", own_begin, own_wait, own_split, own_abort, own_free};
    member *m = calloc(1, sizeof *m);
    if (m) m->comm.table = &table, m->comm.error = &here.error, m->comm.state = m, m->id = id;
    return m;
}

/* ---- starting and ending ---- */

typedef int wires[MOST + 1][MOST + 1][2]; /* from, to: both ends */
static void sit_down(int64_t rank, int64_t size, wires fd) { /* keeps the ends of this rank; an end kept by others would hide that it died */
    memset(&here, 0, sizeof here);
    here.rank = here.error.rank = rank, here.size = size;
    for (int64_t r = 0; r <= size; r++)
        for (int64_t q = 0; q <= size; q++) {
            if (r == rank) here.out[q].fd = fd[r][q][0]; else close(fd[r][q][0]);
            if (q == rank) here.in[r].fd = fd[r][q][1]; else close(fd[r][q][1]);
        }
}
static void get_up(void) {
    for (int64_t r = 0; r <= here.size; r++) {
        while (unsent(r) && here.out[r].fd >= 0) progress();
        close(here.out[r].fd), close(here.in[r].fd);
        here.in[r].fd = -1; here.out[r].fd = -1;
    }
    for (int64_t r = 0; r <= here.size; r++) free(here.in[r].data), free(here.out[r].data);
}
static int child(seqpar_rank_fn fn, void *user) {
    member *m = member_new(WORLD);
    seqpar_status status = SEQPAR_ERR_MEMORY;
    if (m) {
        m->comm.rank = here.rank, m->comm.size = here.size;
        for (int64_t r = 0; r < here.size; r++) m->world[r] = r;
        status = fn(&m->comm, user);
        own_free(&m->comm);
    }
    if (status) tell_all(status, here.error.text[0] ? here.error.text : seqpar_status_text(status));
    return get_up(), status != SEQPAR_OK;
}
/* Like seqpar_run_threads, but with processes: what fn writes to memory, *user included, stays in its process. */
static seqpar_status run_processes(int64_t ranks, seqpar_rank_fn fn, void *user, seqpar_error *error) {
    static wires fd;
    pid_t pid[MOST];
    int64_t r, q;
    int code, open;
    seqpar_error ignored;
    if (!error) error = &ignored;
    memset(error, 0, sizeof *error);
    if (ranks <= 0 || ranks > MOST) return seqpar_fail(error, SEQPAR_ERR_RANKS, "%lld ranks cannot run; give 1 to %d", (long long)ranks, MOST);
    for (r = 0; r <= ranks; r++)
        for (q = 0; q <= ranks; q++)
            if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fd[r][q])) return seqpar_fail(error, SEQPAR_ERR_THREAD, "no more sockets: %s; use fewer ranks", strerror(errno));
    fflush(NULL); /* or what is buffered would be printed by every process */
    for (r = 0; r < ranks; r++) if (!(pid[r] = fork())) { sit_down(r, ranks, fd); exit(child(fn, user)); }
    sit_down(ranks, ranks, fd);
    do for (progress(), open = 0, r = 0; r < ranks; r++) open += here.in[r].fd >= 0; while (open);
    if (here.news.status) *error = here.news;
    for (r = 0; r < ranks; r++)
        if (pid[r] < 0 || waitpid(pid[r], &code, 0) < 0 || code) {
            if (!error->status) error->rank = r;
            seqpar_fail(error, SEQPAR_ERR_DIED, "process of rank %lld %s", (long long)r, pid[r] < 0 ? "could not be started" : "died without a word");
        }
    return get_up(), error->status;
}
