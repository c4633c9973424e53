/* SPDX-License-Identifier: MIT OR Unlicense */
/* seqpar_mpi.h in one process: what it tells ranks that are not there, and what it says where MPI
   fails or memory ends. MPI's own interface for profiling lets calls fail, or only be noted. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_MPI_IMPLEMENTATION
#define SEQPAR_MPI_PIECE 10
#define SEQPAR_MPI_GRACE 1.0
#include "support/counted.h"
#include "seqpar_mpi.h"
#include "support/test.h"

#define COUNT(list) ((int64_t)(sizeof(list) / sizeof *(list)))

/* ---- MPI, as this file wants it ---- */

enum { NOTED = 64, FAILING = 77 };
typedef struct noted_send {
    const void *data;
    int bytes, to, tag;
} noted_send;

static struct {
    int only_noted; /* sends and receives are noted, and done at once */
    noted_send send[NOTED];
    int sends, receives, tests, listens;
    int fail_send, fail_receive, fail_test, fail_dup, fail_init; /* which call; 0: none */
    int single;                                                  /* the level of threads */
    const seqpar_mpi__note *notes;                               /* that come */
    int note_count, cancels;
} mpi;

int MPI_Isend(const void *data, int bytes, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request *request) {
    if (mpi.sends < NOTED) mpi.send[mpi.sends] = (noted_send){data, bytes, to, tag};
    if (++mpi.sends == mpi.fail_send) return MPI_ERR_OTHER;
    if (!mpi.only_noted) return PMPI_Isend(data, bytes, type, to, tag, comm, request);
    *request = MPI_REQUEST_NULL;
    return 0;
}

static seqpar_mpi__note *listening_in;
int MPI_Irecv(void *data, int bytes, MPI_Datatype type, int from, int tag, MPI_Comm comm,
              MPI_Request *request) {
    if (from != MPI_ANY_SOURCE && ++mpi.receives == mpi.fail_receive) return MPI_ERR_OTHER;
    if (!mpi.only_noted) return PMPI_Irecv(data, bytes, type, from, tag, comm, request);
    mpi.listens += from == MPI_ANY_SOURCE;
    listening_in = data;
    return 0;
}

int MPI_Test(MPI_Request *request, int *there, MPI_Status *status) {
    if (*request != MPI_REQUEST_NULL && ++mpi.tests == mpi.fail_test) return MPI_ERR_OTHER;
    if (!mpi.only_noted) return PMPI_Test(request, there, status);
    *there = mpi.note_count > 0;
    if (*there) *listening_in = *mpi.notes++, mpi.note_count--;
    return 0;
}

int MPI_Comm_dup(MPI_Comm comm, MPI_Comm *other) {
    return mpi.fail_dup ? FAILING : PMPI_Comm_dup(comm, other);
}

int MPI_Init_thread(int *argc, char ***argv, int level, int *got) {
    return mpi.fail_init ? MPI_ERR_OTHER : PMPI_Init_thread(argc, argv, level, got);
}

int MPI_Cancel(MPI_Request *request) {
    mpi.cancels++;
    return PMPI_Cancel(request);
}

/* How the process ends, for those who read its output. */
int MPI_Finalize(void) {
    puts("finalized");
    return PMPI_Finalize();
}

int MPI_Abort(MPI_Comm comm, int code) {
    printf("aborted %d %d\n", comm == MPI_COMM_WORLD, code);
    fflush(NULL);
    _exit(code);
}

int MPI_Query_thread(int *level) {
    if (!mpi.single) return PMPI_Query_thread(level);
    *level = MPI_THREAD_SINGLE;
    return 0;
}

static void mpi_fresh(void) { memset(&mpi, 0, sizeof mpi); }

/* ---- a world of ranks that are not there ---- */

enum { AWAY = 4, ME = 2 };
typedef struct away {
    seqpar_error error;
    seqpar_mpi__peer peer[AWAY];
    int64_t ranks[AWAY];
    MPI_Request ending[AWAY];
    seqpar_mpi__world world;
    seqpar_mpi__member member;
} away;

static void away_open(away *a) {
    mpi_fresh();
    mpi.only_noted = 1;
    memset(a, 0, sizeof *a);
    a->world = (seqpar_mpi__world){.rank = ME,
                                   .size = AWAY,
                                   .ids = 1,
                                   .limit_s = 5,
                                   .mpi = MPI_COMM_SELF,
                                   .error = &a->error,
                                   .peer = a->peer,
                                   .members = &a->member};
    a->member.world = &a->world;
    a->member.id = 1;
    a->member.ranks = a->ranks;
    a->member.ending = a->ending;
    a->member.comm = (seqpar_comm){.table = &seqpar_mpi__table,
                                   .rank = ME,
                                   .size = AWAY,
                                   .error = &a->error,
                                   .state = &a->member};
    for (int64_t r = 0; r < AWAY; r++) {
        a->ranks[r] = r;
        a->ending[r] = a->peer[r].sending[0] = a->peer[r].sending[1] = MPI_REQUEST_NULL;
        a->peer[r].taken = 100 + r;
    }
}

/* Which failure is the world's. */
static void test_rulings(void) {
    static const struct {
        struct {
            seqpar_status status;
            int64_t rank;
        } said[3];
        int64_t ruling; /* which of them */
    } table[] = {{{{SEQPAR_ERR_TIMEOUT, 2}}, 0},
                 {{{SEQPAR_OK, 0}, {SEQPAR_ERR_SIZE, 3}}, 1},
                 {{{SEQPAR_ERR_SIZE, 3}, {SEQPAR_OK, 0}}, 0},
                 {{{SEQPAR_ERR_TIMEOUT, 1}, {SEQPAR_ERR_SIZE, 3}}, 1},
                 {{{SEQPAR_ERR_DIED, 1}, {SEQPAR_ERR_SIZE, 3}}, 1},
                 {{{SEQPAR_ERR_SIZE, 3}, {SEQPAR_ERR_TIMEOUT, 0}}, 0},
                 {{{SEQPAR_ERR_SIZE, 3}, {SEQPAR_ERR_DIED, 0}}, 0},
                 {{{SEQPAR_ERR_SIZE, 3}, {SEQPAR_ERR_STEP, 1}}, 1},
                 {{{SEQPAR_ERR_SIZE, 1}, {SEQPAR_ERR_STEP, 3}}, 0},
                 {{{SEQPAR_ERR_SIZE, 1}, {SEQPAR_ERR_STEP, 1}}, 1},
                 {{{SEQPAR_ERR_DIED, 2}, {SEQPAR_ERR_TIMEOUT, 1}, {SEQPAR_ERR_DIED, 3}}, 1},
                 {{{SEQPAR_ERR_DIED, 0}, {SEQPAR_ERR_SIZE, 2}, {SEQPAR_ERR_STEP, 1}}, 2}};
    for (int64_t c = 0; c < COUNT(table); c++) {
        seqpar_mpi__world w = {.rank = 0};
        char text[] = "number 0", want[] = "number 0";
        want[7] = (char)('0' + table[c].ruling);
        for (int i = 0; i < 3; i++) {
            text[7] = (char)('0' + i);
            seqpar_mpi__rule(&w, table[c].said[i].status, table[c].said[i].rank, text);
        }
        test_expect(w.ruling.status == table[c].said[table[c].ruling].status &&
                        w.ruling.rank == table[c].said[table[c].ruling].rank &&
                        !strcmp(w.ruling.text, want),
                    "case %lld: rank %lld, '%s'", (long long)c, (long long)w.ruling.rank,
                    w.ruling.text);
    }
    test_end("mpi_alone_rulings");
}

static void expect_note(const away *a, int i, int64_t to, int64_t kind) {
    const seqpar_mpi__note *n = mpi.send[i].data;
    test_expect(mpi.send[i].to == to && mpi.send[i].tag == SEQPAR_MPI__NOTES &&
                    mpi.send[i].bytes == (int)sizeof *n && n->kind == kind && n->rank == ME &&
                    n->taken == 100 + to && n->ruling.status == a->world.ruling.status &&
                    n == &a->peer[to].out[kind == SEQPAR_MPI__BYE],
                "note %d to rank %d", i, mpi.send[i].to);
}

/* Who fails tells every other rank, once; and says goodbye to all, on every comm. */
static void test_tells(void) {
    static const int64_t others[] = {0, 1, 3};
    static away a;
    away_open(&a);
    seqpar_comm_abort(&a.member.comm, "no more");
    seqpar_comm_abort(&a.member.comm, "again");
    test_expect(mpi.sends == 3 && a.world.failed == SEQPAR_ERR_PEER &&
                    a.world.ruling.rank == ME && !strcmp(a.world.ruling.text, "no more"),
                "%d notes: '%s'", mpi.sends, a.world.ruling.text);
    for (int i = 0; i < 3; i++) expect_note(&a, i, others[i], SEQPAR_MPI__FAILED);
    mpi.sends = 0;
    seqpar_mpi__say_goodbye(&a.world);
    test_expect(mpi.sends == 6, "%d goodbyes", mpi.sends);
    for (int i = 0; i < 3; i++) {
        const seqpar_mpi__head *h = mpi.send[i].data;
        test_expect(mpi.send[i].to == others[i] && mpi.send[i].tag == 1 &&
                        mpi.send[i].bytes == (int)sizeof *h && h->bytes == SEQPAR_MPI__ENDED,
                    "the last head to rank %lld", (long long)others[i]);
        expect_note(&a, 3 + i, others[i], SEQPAR_MPI__BYE);
    }
    away_open(&a);
    seqpar_fail(&a.error, SEQPAR_ERR_SIZE, "too wide");
    seqpar_comm_abort(&a.member.comm, "of a size");
    test_expect(a.world.failed == SEQPAR_ERR_SIZE && a.world.ruling.status == SEQPAR_ERR_SIZE,
                "an abort has the status of the error");
    test_end("mpi_alone_tells");
}

static void test_hears(void) {
    static away a;
    const seqpar_mpi__note notes[] = {{SEQPAR_MPI__BYE, 3, 17, {SEQPAR_OK, 0, ""}},
                                      {SEQPAR_MPI__FAILED, 1, 0, {SEQPAR_ERR_SIZE, 1, "first"}},
                                      {SEQPAR_MPI__BYE, 0, 5, {SEQPAR_ERR_STEP, 0, "second"}}};
    away_open(&a);
    a.world.listening = MPI_REQUEST_NULL;
    test_expect(!seqpar_mpi__hear(&a.world), "nobody listens");
    MPI_Request real;
    PMPI_Irecv(NULL, 0, MPI_BYTE, 0, 9, MPI_COMM_SELF, &real);
    a.world.listening = real;
    seqpar_mpi__listen(&a.world);
    mpi.listens = 0;
    test_expect(!seqpar_mpi__hear(&a.world) && !mpi.listens, "there is nothing");
    mpi.notes = notes, mpi.note_count = 1;
    test_expect(seqpar_mpi__hear(&a.world) && mpi.listens == 1 && !a.world.failed &&
                    a.peer[3].bye && a.peer[3].took == 17 && !a.peer[1].bye && !a.peer[0].bye,
                "a goodbye");
    mpi.notes = notes + 1, mpi.note_count = 2;
    test_expect(seqpar_mpi__hear(&a.world) && mpi.listens == 3 && !a.peer[1].bye &&
                    a.peer[0].bye && a.peer[0].took == 5,
                "two notes");
    test_expect(a.world.failed == SEQPAR_ERR_PEER && a.error.status == SEQPAR_ERR_PEER &&
                    !strcmp(a.error.text, "rank 1 failed: first") && a.world.ruling.rank == 0 &&
                    !strcmp(a.world.ruling.text, "second"),
                "'%s', the world: '%s'", a.error.text, a.world.ruling.text);
    PMPI_Cancel(&real);
    PMPI_Wait(&real, MPI_STATUS_IGNORE);
    test_end("mpi_alone_hears");
}

/* ---- parts of a world ---- */

static void test_places(void) {
    for (int turn = 0; turn < 200; turn++) {
        static away a;
        seqpar_mpi__choice all[AWAY];
        int64_t place = 0, most = 1, size = 0;
        away_open(&a);
        for (int64_t r = 0; r < AWAY; r++) {
            all[r] = (seqpar_mpi__choice){test_integer(-1, 1), test_integer(-2, 2),
                                          test_integer(1, 9)};
            a.ranks[r] = 3 * r + 1;
        }
        a.world.members = NULL;
        a.world.ids = all[ME].ids;
        for (int64_t r = 0; r < AWAY; r++) most = SEQPAR__MAX(most, all[r].ids);
        seqpar_mpi__member *s = seqpar_mpi__part_of(&a.member, all);
        test_expect(s && s->id == most + 1 && a.world.ids == most + 1 && a.world.open == 1,
                    "the number of a comm");
        /* by color and key, then by rank */
        for (int64_t key = -2; s && key <= 2; key++)
            for (int64_t r = 0; r < AWAY; r++) {
                if (all[r].color != all[ME].color || all[r].key != key) continue;
                test_expect(s->ranks[place] == a.ranks[r] && (r != ME || s->comm.rank == place),
                            "place %lld has rank %lld", (long long)place,
                            (long long)s->ranks[place]);
                place++;
            }
        size = s ? s->comm.size : 0;
        test_expect(size == place && s->comm.error == &a.error &&
                        s->comm.table == &seqpar_mpi__table,
                    "%lld of %lld ranks", (long long)size, (long long)place);
        for (int64_t r = 0; r < size; r++)
            test_expect(s->ending[r] == MPI_REQUEST_NULL, "a message is under way");
        if (s) SEQPAR_FREE(s->ranks), SEQPAR_FREE(s->ending), SEQPAR_FREE(s);
    }
    test_end("mpi_alone_places");
}

/* As many comms as there are tags for. */
static void test_most_comms(void) {
    for (int64_t ids = SEQPAR_MPI__COMMS - 2; ids < SEQPAR_MPI__COMMS; ids++) {
        static away a;
        seqpar_mpi__choice all[AWAY] = {{0}};
        away_open(&a);
        all[1].ids = ids;
        seqpar_mpi__member *s = seqpar_mpi__part_of(&a.member, all);
        const int fits = ids + 1 < SEQPAR_MPI__COMMS;
        test_expect(!s == !fits && (fits || !strcmp(a.error.text,
                                                    "a world has 16383 comms at most, and they "
                                                    "are all taken; split less often, or open "
                                                    "another world")),
                    "%lld comms: '%s'", (long long)ids, a.error.text);
        if (s) SEQPAR_FREE(s->ranks), SEQPAR_FREE(s->ending), SEQPAR_FREE(s);
    }
    test_end("mpi_alone_most_comms");
}

/* ---- messages ---- */

/* A message of so many bytes is a head and its pieces; tags go round. */
static void test_pieces(void) {
    static const int64_t bytes[] = {0, 1, 9, 10, 11, 19, 20, 21, 35};
    static const int64_t before[] = {0, 5, SEQPAR_MPI__ROUND - 1, SEQPAR_MPI__ROUND,
                                     SEQPAR_MPI__ROUND + 3};
    char data[40];
    for (int64_t b = 0; b < COUNT(bytes); b++)
        for (int64_t s = 0; s < COUNT(before); s++) {
            static away a;
            seqpar_transfer send = {3, data, bytes[b]};
            seqpar_group group = {"pieces", 6, &send, 1, NULL, 0};
            seqpar_request request;
            int64_t at = 0, tag = SEQPAR_MPI__COMMS + before[s] % SEQPAR_MPI__ROUND;
            away_open(&a);
            a.peer[3].sent = before[s];
            test_expect(!seqpar_comm_begin(&a.member.comm, &group, NULL, &request), "begin");
            const seqpar_mpi__head *h = mpi.send[0].data;
            test_expect(mpi.send[0].to == 3 && mpi.send[0].tag == 1 && h->bytes == bytes[b] &&
                            h->step == 6 && h->tag == tag && !strcmp(h->name, "pieces") &&
                            mpi.send[0].bytes == (int)sizeof *h,
                        "the head of %lld bytes", (long long)bytes[b]);
            for (int i = 1; i < mpi.sends; i++) {
                test_expect(mpi.send[i].data == data + at && mpi.send[i].to == 3 &&
                                mpi.send[i].tag == tag && mpi.send[i].bytes > 0 &&
                                (i == mpi.sends - 1 || mpi.send[i].bytes == SEQPAR_MPI_PIECE),
                            "piece %d of %lld bytes", i, (long long)bytes[b]);
                at += mpi.send[i].bytes;
            }
            test_expect(at == bytes[b] && mpi.sends == 1 + (bytes[b] + 9) / 10 &&
                            a.peer[3].sent == before[s] + 1,
                        "%lld of %lld bytes", (long long)at, (long long)bytes[b]);
            test_expect(!seqpar_comm_wait(&a.member.comm, &request, NULL) && !a.world.requests,
                        "wait");
        }
    test_end("mpi_alone_pieces");
}

/* Who is gone without taking all is named by the send that waits, and only by such a one. */
static void test_sends_to_the_gone(void) {
    for (int way = 0; way < 6; way++) {
        static away a;
        seqpar_mpi__part part = {.peer = 3, .first = 1, .count = 2, .receiving = way == 1};
        MPI_Request list[4], real;
        away_open(&a);
        PMPI_Irecv(NULL, 0, MPI_BYTE, 0, 9, MPI_COMM_SELF, &real);
        for (int i = 0; i < 4; i++) list[i] = MPI_REQUEST_NULL;
        list[way == 4 ? 0 : way == 5 ? 1 : 2] = real; /* 4: of another part */
        seqpar_mpi__request r = {.member = &a.member,
                                 .name = "gone",
                                 .step = 8,
                                 .part = &part,
                                 .part_count = 1,
                                 .request = list,
                                 .count = 4};
        a.peer[3].bye = way != 2;
        a.peer[3].sent = 7;
        a.peer[3].took = way == 3 ? 7 : 6;
        seqpar_mpi__check_send(&r, &part);
        const int named = way == 0 || way == 5;
        test_expect((a.world.failed == SEQPAR_ERR_DIED) == named &&
                        !strcmp(a.error.text, named
                                                  ? "rank 2 waits in 'gone' step 8 for rank 3, "
                                                    "which has ended"
                                                  : ""),
                    "way %d: '%s'", way, a.error.text);
        test_expect(seqpar_mpi__unfinished(&r) == (way == 4 ? -1 : 0), "way %d: unfinished",
                    way);
        PMPI_Cancel(&real);
        PMPI_Wait(&real, MPI_STATUS_IGNORE);
    }
    test_end("mpi_alone_sends_to_the_gone");
}

static void test_overdue(void) {
    static const struct {
        double limit, waited;
        int named;
    } table[] = {{5, 4, 0}, {5, 6, 1}, {-1, 1e6, 0}, {600, 590, 0}, {600, 610, 1}};
    for (int64_t c = 0; c < COUNT(table); c++) {
        static away a;
        seqpar_mpi__part part[2] = {{.peer = 0, .first = 0, .count = 1},
                                    {.peer = 1, .first = 1, .count = 1}};
        MPI_Request list[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
        away_open(&a);
        seqpar_mpi__request r = {.member = &a.member,
                                 .name = "slow",
                                 .step = 3,
                                 .part = part,
                                 .part_count = 2,
                                 .request = list,
                                 .count = 2};
        seqpar_mpi_limit(&a.member.comm, table[c].limit);
        seqpar_mpi__overdue(&r, MPI_Wtime() - 1e6);
        test_expect(!a.world.failed, "nothing is waited for");
        PMPI_Irecv(NULL, 0, MPI_BYTE, 0, 9, MPI_COMM_SELF, &list[1]);
        seqpar_mpi__overdue(&r, MPI_Wtime() - table[c].waited);
        char want[120];
        snprintf(want, sizeof want,
                 "rank 2 waits in 'slow' step 3 for rank 1, and nothing came for %g s",
                 table[c].limit);
        test_expect((a.world.failed == SEQPAR_ERR_TIMEOUT) == table[c].named &&
                        !strcmp(a.error.text, table[c].named ? want : ""),
                    "case %lld: '%s'", (long long)c, a.error.text);
        PMPI_Cancel(&list[1]);
        PMPI_Wait(&list[1], MPI_STATUS_IGNORE);
    }
    static away a;
    seqpar_mpi__part part = {.peer = 3, .count = 1};
    MPI_Request real;
    away_open(&a);
    PMPI_Irecv(NULL, 0, MPI_BYTE, 0, 9, MPI_COMM_SELF, &real);
    seqpar_mpi__request first = {.member = &a.member,
                                 .name = "first",
                                 .part = &part,
                                 .part_count = 1,
                                 .request = &real,
                                 .count = 1};
    seqpar_mpi__overdue(&first, MPI_Wtime() - 6);
    test_expect(a.world.failed == SEQPAR_ERR_TIMEOUT, "the first message is late");
    PMPI_Cancel(&real);
    PMPI_Wait(&real, MPI_STATUS_IGNORE);
    test_expect(seqpar_mpi__limit(0) == 600 && seqpar_mpi__limit(-2) == -2 &&
                    seqpar_mpi__limit(.5) == .5,
                "limits");
    test_end("mpi_alone_overdue");
}

/* ---- requests ---- */

/* Which of three requests are under way: none is at MPI, one is done, one waits. */
static void test_requests(void) {
    static away a;
    char byte = 7, there = 0, never;
    seqpar_mpi__part part = {.first = 0, .count = 3, .receiving = 1, .known = 1};
    MPI_Request list[3] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL, MPI_REQUEST_NULL}, send;
    away_open(&a);
    mpi_fresh();
    seqpar_mpi__request r = {.member = &a.member,
                             .name = "three",
                             .part = &part,
                             .part_count = 1,
                             .request = list,
                             .count = 3};
    test_expect(seqpar_mpi__test(&r) == 0 && !seqpar_mpi__advance(&r), "nothing is under way");
    a.world.listening = MPI_REQUEST_NULL;
    PMPI_Irecv(&there, 1, MPI_BYTE, 0, 8, MPI_COMM_SELF, &list[1]);
    PMPI_Irecv(&never, 1, MPI_BYTE, 0, 9, MPI_COMM_SELF, &list[2]);
    test_expect(!seqpar_mpi__advance(&r) && seqpar_mpi__unfinished(&r) == 0, "both wait");
    PMPI_Isend(&byte, 1, MPI_BYTE, 0, 8, MPI_COMM_SELF, &send);
    PMPI_Wait(&send, MPI_STATUS_IGNORE);
    test_expect(seqpar_mpi__advance(&r) == 1 && there == 7 && list[1] == MPI_REQUEST_NULL &&
                    list[2] != MPI_REQUEST_NULL,
                "one has come");
    test_expect(seqpar_mpi__withdraw(&r) == 1 && mpi.cancels == 1 &&
                    list[2] == MPI_REQUEST_NULL && seqpar_mpi__unfinished(&r) == -1,
                "%d are taken back", mpi.cancels);
    test_end("mpi_alone_requests");
}

/* ---- a world of this process ---- */

typedef struct letters {
    const char *name[2]; /* of the group that sends, of that which receives */
    int64_t step[2], bytes[2];
    seqpar_status want;
    const char *says;
} letters;

static seqpar_status rank_writes(seqpar_comm *world, void *user) {
    const letters *l = user;
    char out[64], in[64];
    for (int i = 0; i < 64; i++) out[i] = (char)(i + 1), in[i] = 0;
    seqpar_transfer send = {0, out, l->bytes[0]}, recv = {0, in, l->bytes[1]};
    seqpar_group sends = {l->name[0], l->step[0], &send, 1, NULL, 0};
    seqpar_group receives = {l->name[1], l->step[1], NULL, 0, &recv, 1};
    seqpar_request request[2] = {{NULL}, {NULL}};
    seqpar_status status = seqpar_comm_begin(world, &sends, NULL, &request[0]), last;
    if (!status) status = seqpar_comm_begin(world, &receives, NULL, &request[1]);
    last = seqpar_comm_wait(world, &request[1], NULL);
    if (!status) status = last;
    last = seqpar_comm_wait(world, &request[0], NULL);
    if (!status) status = last;
    test_expect(status || !memcmp(in, out, (size_t)l->bytes[0]), "%lld bytes",
                (long long)l->bytes[0]);
    test_expect(!in[l->bytes[1]], "behind %lld bytes", (long long)l->bytes[1]);
    return status;
}

/* Several messages in a group, each to its place. */
static seqpar_status rank_writes_many(seqpar_comm *world, void *user) {
    static const int64_t bytes[] = {25, 0, 12, 10};
    char out[4][32], in[4][32];
    seqpar_transfer sends[4], recvs[4];
    seqpar_group group = {"many", 2, sends, 4, recvs, 4};
    seqpar_request request;
    (void)user;
    for (int i = 0; i < 4; i++) {
        memset(out[i], 'a' + i, sizeof out[i]);
        memset(in[i], 0, sizeof in[i]);
        sends[i] = (seqpar_transfer){0, out[i], bytes[i]};
        recvs[i] = (seqpar_transfer){0, in[i], bytes[i]};
    }
    seqpar_status status = seqpar_comm_begin(world, &group, NULL, &request);
    if (!status) status = seqpar_comm_wait(world, &request, NULL);
    for (int i = 0; i < 4; i++)
        test_expect(!memcmp(in[i], out[i], (size_t)bytes[i]) && !in[i][bytes[i]], "message %d",
                    i);
    return status;
}

static void test_many(void) {
    const seqpar_mpi_desc desc = {0};
    seqpar_error error;
    mpi_fresh();
    test_expect(!seqpar_mpi_run(&desc, rank_writes_many, NULL, &error), "%s", error.text);
    test_end("mpi_alone_many_messages");
}

#define LONG_NAME "a name that is longer than what a head ho"
static void test_letters(void) {
    static const letters table[] = {
        {{"a", "a"}, {1, 1}, {0, 0}, SEQPAR_OK, ""},
        {{"a", "a"}, {1, 1}, {9, 9}, SEQPAR_OK, ""},
        {{"a", "a"}, {1, 1}, {10, 10}, SEQPAR_OK, ""},
        {{"a", "a"}, {1, 1}, {35, 35}, SEQPAR_OK, ""},
        {{LONG_NAME "lds", LONG_NAME "uses"}, {1, 1}, {3, 3}, SEQPAR_OK, ""},
        {{"a", "a"},
         {1, 1},
         {5, 6},
         SEQPAR_ERR_MESSAGE_SIZE,
         "'a' step 1: rank 0 sent 5 bytes, rank 0 expects 6"},
        {{"a", "a"},
         {1, 2},
         {5, 5},
         SEQPAR_ERR_STEP,
         "rank 0 is in 'a' step 2, but rank 0 sent a message of 'a' step 1; all ranks must "
         "make the same calls in the same order"},
        {{"a", "b"},
         {2, 2},
         {5, 5},
         SEQPAR_ERR_STEP,
         "rank 0 is in 'b' step 2, but rank 0 sent a message of 'a' step 2; all ranks must "
         "make the same calls in the same order"},
    };
    const seqpar_mpi_desc desc = {0};
    for (int64_t c = 0; c < COUNT(table); c++) {
        const int64_t live = blocks_live;
        seqpar_error error;
        mpi_fresh();
        test_expect(seqpar_mpi_run(&desc, rank_writes, (void *)&table[c], &error) ==
                            table[c].want &&
                        error.status == table[c].want && !strcmp(error.text, table[c].says),
                    "case %lld: '%s'", (long long)c, error.text);
        test_expect(blocks_live == live, "case %lld: %lld blocks are left", (long long)c,
                    (long long)(blocks_live - live));
    }
    test_end("mpi_alone_letters");
}

/* Names that differ where a head still holds them. */
static void test_names(void) {
    char one[60], other[60];
    for (int at = 36; at < 42; at++) {
        letters l = {{one, other}, {1, 1}, {3, 3}, at < 39 ? SEQPAR_ERR_STEP : SEQPAR_OK, ""};
        const seqpar_mpi_desc desc = {0};
        memset(one, 'n', 50), one[50] = 0;
        memcpy(other, one, sizeof one);
        other[at] = 'm';
        mpi_fresh();
        test_expect(seqpar_mpi_run(&desc, rank_writes, &l, NULL) == l.want, "letter %d", at);
    }
    test_end("mpi_alone_names");
}

static int64_t coded; /* bytes that the device copied */
static void copy_coded(seqpar_device *device, void *to, const void *from, int64_t bytes,
                       void *queue) {
    (void)device, (void)queue;
    coded += bytes;
    memcpy(to, from, (size_t)bytes);
}

/* Messages in a device's memory go through the host's, unless this MPI takes them. */
static seqpar_status rank_of_a_device(seqpar_comm *world, void *user) {
    static const letters l = {{"a", "a"}, {1, 1}, {23, 23}, SEQPAR_OK, ""};
    seqpar_device device = {.copy = copy_coded};
    const int taken = *(int *)user;
    seqpar_status status = SEQPAR_OK;
    world->device = &device;
    for (device.own_memory = 0; !status && device.own_memory < 2; device.own_memory++) {
        coded = 0;
        status = rank_writes(world, (void *)&l);
        test_expect(coded == (device.own_memory && !taken ? 46 : 0),
                    "own memory %d, taken %d: the device copied %lld bytes", device.own_memory,
                    taken, (long long)coded);
    }
    world->device = NULL;
    return status;
}

static void test_device_memory(void) {
    seqpar_error error;
    for (int taken = 0; taken < 2; taken++) {
        const MPI_Comm self = MPI_COMM_SELF;
        const seqpar_mpi_desc desc = {.comm = &self, .device_memory = taken};
        mpi_fresh();
        test_expect(!seqpar_mpi_run(&desc, rank_of_a_device, &taken, &error), "%s", error.text);
    }
    test_end("mpi_alone_device_memory");
}

/* ---- what fails ---- */

static seqpar_status rank_does_all(seqpar_comm *world, void *user) {
    static const letters l = {{"all", "all"}, {4, 4}, {23, 23}, SEQPAR_OK, ""};
    seqpar_comm *sub = NULL;
    int64_t one = 1;
    (void)user;
    seqpar_status status = seqpar_comm_split(world, 1, 0, &sub);
    test_expect(!status == !!sub, "a comm although it failed");
    if (!status) status = rank_writes(sub, (void *)&l);
    if (!status) status = seqpar_comm_sum_i64(sub, &one, 1);
    if (sub) seqpar_comm_free(sub);
    return status;
}

/* Any allocation may find no memory: it is said, and nothing is left. */
static void test_memory(void) {
    static const char *const says[] = {
        "out of memory for a world", "rank 0: out of memory for a comm",
        "rank 0: out of memory for 'all' step 4", "out of memory for an all-gather"};
    const seqpar_mpi_desc desc = {0};
    int seen[COUNT(says)] = {0};
    seqpar_status status = SEQPAR_ERR_MEMORY;
    int64_t n;
    for (n = 1; status && n < 100; n++) {
        const int64_t live = blocks_live;
        seqpar_error error;
        int64_t s = 0;
        mpi_fresh();
        block_refused = blocks_made + n;
        status = seqpar_mpi_run(&desc, rank_does_all, NULL, &error);
        block_refused = 0;
        while (s < COUNT(says) && strcmp(error.text, says[s])) s++;
        test_expect(!status || (status == SEQPAR_ERR_MEMORY && s < COUNT(says)),
                    "allocation %lld: %s: '%s'", (long long)n, seqpar_status_name(status),
                    error.text);
        if (status && s < COUNT(says)) seen[s]++;
        test_expect(blocks_live == live, "allocation %lld: %lld blocks are left", (long long)n,
                    (long long)(blocks_live - live));
    }
    test_expect(!status && seen[0] && seen[1] && seen[2] && seen[3],
                "%lld allocations: %d %d %d %d", (long long)n, seen[0], seen[1], seen[2],
                seen[3]);
    test_end("mpi_alone_memory");
}

/* Any call of MPI may fail: it is said, in MPI's words. */
static void test_calls(void) {
    const seqpar_mpi_desc desc = {0};
    char text[MPI_MAX_ERROR_STRING], want[400];
    int length;
    seqpar_error error;
    MPI_Error_string(MPI_ERR_OTHER, text, &length);
    snprintf(want, sizeof want, "rank 0: a message: %.300s", text);
    for (int which = 0; which < 2; which++)
        for (int n = 1; n < 4; n++) {
            mpi_fresh();
            *(which ? &mpi.fail_receive : &mpi.fail_send) = n;
            test_expect(
                seqpar_mpi_run(&desc, rank_does_all, NULL, &error) == SEQPAR_ERR_TRANSPORT &&
                    !strcmp(error.text, want),
                "call %d of %s: '%s'", n, which ? "MPI_Irecv" : "MPI_Isend", error.text);
        }
    mpi_fresh();
    mpi.fail_dup = 1;
    test_expect(
        seqpar_mpi_run(&desc, rank_does_all, NULL, &error) == SEQPAR_ERR_TRANSPORT &&
            !strcmp(error.text, "the communicator cannot be duplicated (MPI's code 77)"),
        "MPI_Comm_dup: '%s'", error.text);
    mpi_fresh();
    mpi.single = 1;
    test_expect(seqpar_mpi_run(&desc, rank_does_all, NULL, &error) == SEQPAR_ERR_TRANSPORT &&
                    !strcmp(error.text,
                            "MPI was started without thread support (MPI_THREAD_SINGLE), but "
                            "ranks compute on threads; call MPI_Init_thread with "
                            "MPI_THREAD_FUNNELED, or leave it to seqpar"),
                "MPI_Query_thread: '%s'", error.text);
    mpi_fresh();
    test_expect(!seqpar_mpi_run(&desc, rank_does_all, NULL, &error), "again: %s", error.text);
    test_end("mpi_alone_calls");
}

static seqpar_status rank_ends(seqpar_comm *world, void *user) {
    const letters *l = user;
    if (l->name[1]) seqpar_comm_abort(world, l->name[1]);
    return l->name[0] ? seqpar_fail(world->error, l->want, "%s", l->name[0]) : l->want;
}

/* How a world ends: with what fn says, or with what was said before. */
static void test_ends(void) {
    static const letters table[] = {{{NULL, NULL}, {0}, {0}, SEQPAR_OK, ""},
                                    {{"too wide", NULL}, {0}, {0}, SEQPAR_ERR_SIZE, "too wide"},
                                    {{NULL, NULL}, {0}, {0}, SEQPAR_ERR_NOT_FINITE, NULL}};
    const seqpar_mpi_desc desc = {0};
    for (int64_t c = 0; c < COUNT(table); c++) {
        const char *says = table[c].says ? table[c].says : seqpar_status_text(table[c].want);
        seqpar_error error;
        mpi_fresh();
        test_expect(
            seqpar_mpi_run(&desc, rank_ends, (void *)&table[c], &error) == table[c].want &&
                error.status == table[c].want && !error.rank && !strcmp(error.text, says),
            "case %lld: '%s'", (long long)c, error.text);
        test_expect(seqpar_mpi_run(&desc, rank_ends, (void *)&table[c], NULL) == table[c].want,
                    "without a place for the error");
    }
    static const letters aborts = {{NULL, "stop"}, {0}, {0}, SEQPAR_OK, ""};
    seqpar_error error;
    test_expect(seqpar_mpi_run(&desc, rank_ends, (void *)&aborts, &error) == SEQPAR_ERR_PEER &&
                    !strcmp(error.text, "stop"),
                "an abort: '%s'", error.text);
    test_end("mpi_alone_ends");
}

static MPI_Errhandler handler_of(MPI_Comm comm) {
    MPI_Errhandler handler;
    MPI_Comm_get_errhandler(comm, &handler);
    return handler;
}

/* Errors are returned while a world is open, also of comms that are not its own, and then are
   again what they were. */
static void test_handlers(void) {
    const MPI_Comm comm[2] = {MPI_COMM_WORLD, MPI_COMM_SELF};
    const seqpar_mpi_desc desc = {.limit_s = 7};
    seqpar_comm *world;
    seqpar_error error;
    mpi_fresh();
    for (int i = 0; i < 2; i++) MPI_Comm_set_errhandler(comm[i], MPI_ERRORS_ARE_FATAL);
    test_expect(!seqpar_mpi_open(&world, &desc, &error) && world->size == 1 && !world->rank &&
                    ((seqpar_mpi__member *)world->state)->world->limit_s == 7,
                "%s", error.text);
    for (int i = 0; i < 2; i++)
        test_expect(handler_of(comm[i]) == MPI_ERRORS_RETURN, "errors of comm %d are fatal", i);
    mpi.cancels = 0;
    test_expect(!seqpar_mpi_end(world, SEQPAR_OK) && mpi.cancels == 1, "%s, %d are taken back",
                error.text, mpi.cancels);
    for (int i = 0; i < 2; i++)
        test_expect(handler_of(comm[i]) == MPI_ERRORS_ARE_FATAL, "errors of comm %d are not",
                    i);
    test_end("mpi_alone_handlers");
}

/* The first call, before MPI is there. */
static void test_begins(void) {
    seqpar_error error = {0};
    int64_t rank = -1, size = -1;
    mpi_fresh();
    mpi.fail_init = 1;
    test_expect(seqpar_mpi_world(&rank, &size, &error) == SEQPAR_ERR_TRANSPORT &&
                    !strcmp(error.text, "MPI_Init_thread failed") && rank == -1,
                "'%s'", error.text);
    mpi_fresh();
    memset(&error, 0, sizeof error);
    test_expect(!seqpar_mpi_world(&rank, &size, &error) && rank == 0 && size == 1, "'%s'",
                error.text);
    test_end("mpi_alone_begins");
}

/* Ends without a test: leaves MPI to seqpar, ends it first, or has lost a rank. */
static int end_as(const char *way) {
    int64_t rank, size;
    if (seqpar_mpi_world(&rank, &size, NULL)) return 2;
    if (!strcmp(way, "ends")) MPI_Finalize();
    if (!strcmp(way, "lost")) seqpar_mpi__lost = 1;
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && argv[1][0] != '-') return end_as(argv[1]);
    test_begin(argc, argv);
    test_begins();
    test_rulings();
    test_tells();
    test_hears();
    test_places();
    test_most_comms();
    test_pieces();
    test_sends_to_the_gone();
    test_overdue();
    test_requests();
    test_letters();
    test_many();
    test_names();
    test_device_memory();
    test_memory();
    test_calls();
    test_ends();
    test_handlers();
    return test_summary();
}
