/* SPDX-License-Identifier: MIT OR Unlicense */
/* Parts of the NCCL transport, each called by itself where the order of events is certain: what
   the referee matches, decides and says; what a rank says; names, ports, files and numbers that
   ranks find each other by. The whole is in test_nccl.c. */
#include "stand_in/nccl_stand_in.h"
static double clock_now = 1000;
#define SEQPAR_NCCL_SECONDS() clock_now
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_NCCL_IMPLEMENTATION
#include "seqpar_nccl.h"
#include "support/test.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* ---- a referee without a thread ---- */

enum { RANKS_MOST = 200 };

/* Both ends of a rank's connection: the referee's, and ours. */
static seqpar_nccl__referee *lone; /* the test's */
static int ours[RANKS_MOST];

static void lone_new(int64_t size) {
    lone = seqpar_nccl__referee_new(size);
    lone->came = lone->met = size;
    for (int64_t r = 0; r < size; r++) {
        ours[r] = -1;
        lone->seen[r] = 1;
    }
    test_expect(seqpar_nccl__reserve(&lone->items, 8), "no memory");
}

static void lone_connect(int64_t rank) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) abort();
    lone->socket[rank] = pair[0];
    ours[rank] = pair[1];
}

static void lone_free(void) {
    for (int64_t r = 0; r < lone->size; r++) {
        if (lone->socket[r] >= 0) close(lone->socket[r]);
        if (ours[r] >= 0) close(ours[r]);
    }
    seqpar_nccl__referee_free(lone);
}

/* Rank `rank` posts one message of a group. */
typedef struct message {
    int64_t rank, peer, comm, request, step, bytes;
    int sends;
    const char *name;
} message;

static void post(message m) {
    seqpar_nccl__note n = seqpar_nccl__note_of(SEQPAR_NCCL__POST, m.rank);
    n.comm = m.comm;
    n.request = m.request;
    n.step = m.step;
    n.count = 1;
    n.sends = m.sends;
    snprintf(n.text, sizeof n.text, "%s", m.name ? m.name : "s");
    lone->items.item[0] = (seqpar_nccl__item){m.peer, m.bytes};
    seqpar_nccl__posted(lone, m.rank, &n);
}

/* The messages that a rank is to launch, as "request.index" in their order. */
static const char *ready_of(int64_t rank) {
    static char text[256];
    int at = 0;
    text[0] = 0;
    for (int64_t i = 0; i < lone->ready[rank].count; i++)
        at += snprintf(text + at, sizeof text - (size_t)at, "%s%lld.%lld", i ? " " : "",
                       (long long)lone->ready[rank].item[i].a,
                       (long long)lone->ready[rank].item[i].b);
    return text;
}

static void expect_ready(int64_t rank, const char *want) {
    test_expect(!strcmp(ready_of(rank), want), "rank %lld: launches '%s', expected '%s'",
                (long long)rank, ready_of(rank), want);
}

static void expect_ruled(seqpar_status status, int64_t rank, const char *text) {
    test_expect(lone->stop.status == (int64_t)status, "status %lld: %s",
                (long long)lone->stop.status, lone->stop.text);
    test_expect(!status || lone->stop.rank == rank, "it is of rank %lld",
                (long long)lone->stop.rank);
    test_expect(!text || !strcmp(lone->stop.text, text), "'%s', not '%s'", lone->stop.text,
                text);
}

/* ---- what is matched ---- */

static void test_matching(void) {
    lone_new(3); /* in the order of posting, whichever end is first; each pair alone */
    post((message){.rank = 0, .peer = 2, .request = 4, .bytes = 8, .sends = 1});
    post((message){.rank = 0, .peer = 2, .request = 5, .bytes = 16, .sends = 1});
    post((message){.rank = 1, .peer = 2, .request = 9, .bytes = 24, .sends = 1});
    post((message){.rank = 2, .peer = 0, .request = 0, .bytes = 32, .sends = 1});
    expect_ready(2, "");
    post((message){.rank = 2, .peer = 0, .request = 1, .bytes = 8});
    post((message){.rank = 2, .peer = 1, .request = 2, .bytes = 24});
    post((message){.rank = 2, .peer = 0, .request = 3, .bytes = 16});
    expect_ready(2, "1.0 2.0 3.0");
    expect_ready(0, "4.0 5.0");
    expect_ready(1, "9.0");
    post((message){.rank = 0, .peer = 2, .request = 6, .bytes = 32});
    expect_ready(2, "1.0 2.0 3.0 0.0");
    expect_ruled(SEQPAR_OK, 0, "");
    lone_free();
    lone_new(2); /* to itself; of another comm, which matches nothing of this one */
    post((message){.rank = 1, .peer = 1, .request = 1, .bytes = 8, .sends = 1});
    post((message){.rank = 1, .peer = 1, .request = 1, .bytes = 8, .comm = 1});
    expect_ready(1, "");
    post((message){.rank = 1, .peer = 1, .request = 2, .bytes = 8});
    expect_ready(1, "1.0 2.0");
    post((message){.rank = 1, .peer = 1, .request = 3, .bytes = 8, .comm = 1, .sends = 1});
    expect_ready(1, "1.0 2.0 3.0 1.0");
    lone_free();
    test_end("nccl_matching");
}

/* A note's messages: the first of them are sent. Peers that are no ranks of the world are passed
   over. */
static void test_items(void) {
    static const int64_t peers[] = {-1, 1, 2, 1, INT64_MAX, 1};
    seqpar_nccl__note n = seqpar_nccl__note_of(SEQPAR_NCCL__POST, 0);
    lone_new(2);
    for (int i = 0; i < 6; i++) lone->items.item[i] = (seqpar_nccl__item){peers[i], 8};
    n.count = 6;
    n.sends = 4;
    n.request = 7;
    seqpar_nccl__posted(lone, 0, &n);
    post((message){.rank = 1, .request = 1, .bytes = 8, .sends = 1, .name = ""});
    expect_ready(0, "7.5");
    post((message){.rank = 1, .request = 2, .bytes = 8, .name = ""});
    post((message){.rank = 1, .request = 3, .bytes = 8, .name = ""});
    expect_ready(0, "7.5 7.1 7.3");
    expect_ready(1, "1.0 2.0 3.0");
    lone_free();
    test_end("nccl_items");
}

static void test_mismatched(void) {
    static const struct {
        message sent, received;
        seqpar_status status;
        const char *text;
    } table[] = {
        {{.bytes = 9, .name = "kv"},
         {.bytes = 8, .name = "kv"},
         SEQPAR_ERR_MESSAGE_SIZE,
         "'kv' step 0: rank 0 sent 9 bytes, rank 1 expects 8"},
        {{.step = 3, .name = "kv"},
         {.step = 2, .name = "kv"},
         SEQPAR_ERR_STEP,
         "rank 1 is in 'kv' step 2, but rank 0 sent a message of 'kv' step 3; all ranks "
         "must make the same calls in the same order"},
        {{.name = "kv"},
         {.name = "dkv"},
         SEQPAR_ERR_STEP,
         "rank 1 is in 'dkv' step 0, but rank 0 sent a message of 'kv' step 0; all ranks "
         "must make the same calls in the same order"}};
    for (int i = 0; i < COUNT(table); i++)
        for (int first = 0; first < 2; first++) { /* who posts first changes nothing */
            message s = table[i].sent, r = table[i].received;
            s.peer = r.rank = s.sends = 1;
            lone_new(2);
            post(first ? r : s);
            post(first ? s : r);
            expect_ruled(table[i].status, 1, table[i].text);
            expect_ready(0, "");
            lone_free();
        }
    lone_new(2); /* a name of 63 letters is whole, and of longer ones so much is compared */
    post((message){.peer = 1,
                   .sends = 1,
                   .name = "1234567890123456789012345678901234567890123456789012345678901234"});
    post((message){.rank = 1,
                   .name = "1234567890123456789012345678901234567890123456789012345678901235"});
    expect_ruled(SEQPAR_OK, 0, "");
    post((message){.peer = 1,
                   .sends = 1,
                   .name = "123456789012345678901234567890123456789012345678901234567890123"});
    post((message){.rank = 1,
                   .name = "123456789012345678901234567890123456789012345678901234567890124"});
    test_expect(lone->stop.status == SEQPAR_ERR_STEP, "63 letters are not compared");
    lone_free();
    test_end("nccl_mismatched");
}

/* ---- who has ended, and who waits ---- */

static void test_ends(void) {
    lone_new(4); /* messages of an ended rank, also to itself, are no failure */
    post((message){.rank = 1, .peer = 3, .sends = 1});
    post((message){.rank = 3, .peer = 3, .sends = 1});
    seqpar_nccl__left(lone, 1, 1);
    expect_ruled(SEQPAR_OK, 0, "");
    seqpar_nccl__left(lone, 3, 1);
    expect_ruled(SEQPAR_OK, 0, "");
    post((message){.rank = 0, .peer = 2, .request = 1, .step = 6, .name = "kv"});
    post((message){.rank = 0, .peer = 3, .request = 1, .step = 5, .name = "kv", .sends = 1});
    expect_ruled(SEQPAR_ERR_PEER, 0, "rank 0 waits in 'kv' step 5 for rank 3, which has ended");
    lone_free();
    lone_new(3); /* a second end is ignored; BYE is not DIED */
    seqpar_nccl__left(lone, 2, 1);
    seqpar_nccl__left(lone, 2, 0);
    expect_ruled(SEQPAR_OK, 0, "");
    seqpar_nccl__left(lone, 1, 0);
    expect_ruled(
        SEQPAR_ERR_DIED, 1,
        "rank 1 died and reported nothing (no rank waited for rank 1, which has ended); "
        "see its output");
    seqpar_nccl__left(lone, 0, 0); /* the first failure counts */
    expect_ruled(SEQPAR_ERR_DIED, 1, NULL);
    lone_free();
    lone_new(3); /* of those that wait, the lowest */
    post((message){.rank = 2, .peer = 1, .step = 3, .sends = 1, .name = "b"});
    post((message){.rank = 0, .peer = 1, .step = 4, .name = "a"});
    seqpar_nccl__left(lone, 1, 0);
    expect_ruled(SEQPAR_ERR_PEER, 0, "rank 0 waits in 'a' step 4 for rank 1, which has ended");
    lone_free();
    test_end("nccl_ends");
}

/* ---- deadlocks ---- */

/* A cycle: each rank waits for a message of the next one. */
static void make_cycle(int64_t size, const char *name) {
    lone_new(size);
    for (int64_t r = 0; r < size; r++) {
        post((message){.rank = r, .peer = (r + 1) % size, .request = 10 + r, .name = name});
        lone->blocked[r] = 10 + r;
    }
}

static void test_deadlock_sentence(void) {
    char name[64] = "", want[600] = "deadlock: ";
    int base = (int)strlen("rank 0 waits in '' step 0 for rank 1");
    make_cycle(3, "kv");
    lone->blocked[1] = -1; /* somebody goes on */
    seqpar_nccl__watch_deadlock(lone);
    expect_ruled(SEQPAR_OK, 0, "");
    lone->blocked[1] = 11;
    lone->came = 2; /* somebody is still to come */
    seqpar_nccl__watch_deadlock(lone);
    expect_ruled(SEQPAR_OK, 0, "");
    lone->came = 3;
    seqpar_nccl__watch_deadlock(lone);
    expect_ruled(SEQPAR_ERR_DEADLOCK, 0,
                 "deadlock: rank 0 waits in 'kv' step 0 for rank 1; rank 1 waits in 'kv' step "
                 "0 for rank 2; rank 2 waits in 'kv' step 0 for rank 0");
    lone_free();
    make_cycle(4, "kv"); /* who has ended waits for nobody */
    lone->ended[0] = lone->ended[3] = 1;
    lone->blocked[0] = lone->blocked[3] = -1;
    post((message){.rank = 2, .peer = 1, .request = 20, .step = 8, .name = "dkv"});
    lone->blocked[2] = 20;
    seqpar_nccl__watch_deadlock(lone);
    expect_ruled(SEQPAR_ERR_DEADLOCK, 1,
                 "deadlock: rank 1 waits in 'kv' step 0 for rank 2; rank 2 waits in 'dkv' step "
                 "8 for rank 1");
    lone_free();
    lone_new(2); /* all have ended */
    lone->ended[0] = lone->ended[1] = 1;
    seqpar_nccl__watch_deadlock(lone);
    expect_ruled(SEQPAR_OK, 0, "");
    lone_free();
    /* of many ranks as many as have room, each whole: three of 92, with two "; ", are 280 */
    for (int i = 0; i < 92 - base; i++) name[i] = 'n';
    make_cycle(8, name);
    for (int r = 0; r < 3; r++)
        snprintf(want + strlen(want), sizeof want - strlen(want),
                 "%srank %d waits in '%s' step 0 for rank %d", r ? "; " : "", r, name, r + 1);
    seqpar_nccl__watch_deadlock(lone);
    expect_ruled(SEQPAR_ERR_DEADLOCK, 0, want);
    lone_free();
    name[92 - base - 1] = 0; /* a letter less, and a fourth one has room */
    make_cycle(8, name);
    seqpar_nccl__watch_deadlock(lone);
    test_expect(strstr(lone->stop.text, "rank 3 waits") && !strstr(lone->stop.text, "rank 4 w"),
                "%s", lone->stop.text);
    lone_free();
    test_end("nccl_deadlock_sentence");
}

/* ---- notes of ranks ---- */

static void say(int64_t rank, const seqpar_nccl__note *n, const seqpar_nccl__item *items) {
    test_expect(seqpar_nccl__send_note(ours[rank], n, items), "a note is not sent");
    seqpar_nccl__hear_rank(lone, rank);
}

/* What the referee has sent to a rank; kind -1: nothing. */
static seqpar_nccl__note told(int64_t rank, seqpar_nccl__items *items) {
    seqpar_nccl__note n = {.kind = -1};
    if (seqpar_nccl__readable(ours[rank], 0) && !seqpar_nccl__take_note(ours[rank], &n, items))
        n.kind = -2;
    return n;
}

static void test_rank_is_heard(void) {
    seqpar_nccl__note n = seqpar_nccl__note_of(SEQPAR_NCCL__BLOCKED, 0);
    seqpar_nccl__items items = {NULL, 0, 0};
    seqpar_nccl__item one = {1, 8};
    lone_new(3);
    for (int r = 0; r < 3; r++) lone_connect(r);
    n.request = 12;
    say(0, &n, NULL);
    test_expect(lone->blocked[0] == 12 && lone->blocked[1] == -1, "rank 0 is not blocked");
    n.kind = SEQPAR_NCCL__POST;
    n.count = n.sends = 1;
    say(0, &n, &one);
    test_expect(lone->blocked[0] == -1, "rank 0 stays blocked after it began a group");
    n.sends = 0;
    one.a = 0;
    n.request = 3;
    say(1, &n, &one);
    expect_ready(0, "12.0");
    expect_ready(1, "3.0");
    /* each is told its own, once; rank 2, which has none, nothing */
    seqpar_nccl__tell_ready(lone);
    n = told(0, &items);
    test_expect(n.kind == SEQPAR_NCCL__GO && n.count == 1 && items.item[0].a == 12 &&
                    items.item[0].b == 0,
                "rank 0 got note kind %lld with %lld items", (long long)n.kind,
                (long long)n.count);
    n = told(1, &items);
    test_expect(n.kind == SEQPAR_NCCL__GO && n.count == 1 && items.item[0].a == 3,
                "rank 1 got note kind %lld with %lld items", (long long)n.kind,
                (long long)n.count);
    seqpar_nccl__tell_ready(lone);
    for (int r = 0; r < 3; r++)
        test_expect(told(r, &items).kind == -1, "rank %d is told something more", r);
    n = seqpar_nccl__note_of(SEQPAR_NCCL__STOP, 1);
    n.status = SEQPAR_ERR_OPTION;
    strcpy(n.text, "100%s of it");
    say(1, &n, NULL);
    expect_ruled(SEQPAR_ERR_OPTION, 1, "100%s of it");
    for (int r = 0; r < 3; r++) {
        n = told(r, &items);
        test_expect(n.kind == SEQPAR_NCCL__STOP && n.status == SEQPAR_ERR_OPTION &&
                        n.rank == 1 && !strcmp(n.text, "100%s of it"),
                    "rank %d is told %lld: %s", r, (long long)n.kind, n.text);
    }
    /* after a failure nothing is matched or told any more */
    n = seqpar_nccl__note_of(SEQPAR_NCCL__POST, 2);
    n.count = 1;
    say(2, &n, &one);
    test_expect(!lone->ends[2] && !lone->ends[6], "a message is kept after a failure");
    seqpar_nccl__append(&lone->ready[2], 1, 1);
    seqpar_nccl__tell_ready(lone);
    test_expect(told(2, &items).kind == -1 && !lone->ready[2].count,
                "a message is started after a failure");
    n = seqpar_nccl__note_of(SEQPAR_NCCL__BYE, 2);
    say(2, &n, NULL);
    test_expect(lone->ended[2] && lone->socket[2] >= 0, "a goodbye is not the end");
    close(ours[0]);
    ours[0] = -1;
    seqpar_nccl__hear_rank(lone, 0);
    test_expect(lone->ended[0] && lone->socket[0] == -1, "a connection that ended stays");
    lone_free();
    free(items.item);
    test_end("nccl_rank_is_heard");
}

/* ---- who is let in ---- */

static void expect_unfit(seqpar_nccl__note n, const char *want) {
    char text[256] = "";
    const char *said = seqpar_nccl__unfit(lone, &n, text);
    test_expect(want ? said && !strcmp(said, want) : !said, "rank %lld: '%s', not '%s'",
                (long long)n.rank, said ? said : "let in", want ? want : "let in");
}

static void test_let_in(void) {
    const seqpar_nccl__note fit = {.rank = 4, .size = 5, .version = 22809};
    seqpar_nccl__note n = fit;
    lone_new(5);
    lone->version = 22809;
    lone->seen[4] = lone->seen[0] = 0;
    expect_unfit(fit, NULL);
    n.rank = 0;
    expect_unfit(n, NULL);
    n.rank = -1;
    expect_unfit(n, "rank -1 is outside 0 .. 4; check RANK");
    n.rank = 5;
    expect_unfit(n, "rank 5 is outside 0 .. 4; check RANK");
    n.rank = 3;
    expect_unfit(n, "two processes are rank 3; give every one a RANK of its own");
    n.version = 22808;
    expect_unfit(n, "rank 3 runs NCCL 22808, rank 0 runs NCCL 22809; give all ranks the same "
                    "libnccl.so");
    n.size = 6;
    expect_unfit(n, "rank 3 was started for a world of 6 ranks, rank 0 for one of 5; start all "
                    "with the same WORLD_SIZE");
    lone_free();
    test_end("nccl_let_in");
}

/* Connects with a note; what the referee answers with, and whether it hangs up. */
static seqpar_nccl__note seat(const seqpar_nccl__note *n, int64_t rank, int *hangs_up) {
    seqpar_nccl__note answer = {.kind = -1};
    seqpar_nccl__items items = {NULL, 0, 0};
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) abort();
    seqpar_nccl__send_note(pair[1], n, NULL);
    shutdown(pair[1], SHUT_WR);
    seqpar_nccl__seat(lone, pair[0]);
    *hangs_up = 0;
    while (seqpar_nccl__readable(pair[1], 0) && !*hangs_up)
        *hangs_up = !seqpar_nccl__take_note(pair[1], &answer, &items);
    free(items.item);
    if (rank >= 0 && !*hangs_up)
        ours[rank] = pair[1];
    else
        close(pair[1]);
    return answer;
}

static void test_seats(void) {
    seqpar_nccl__note n = seqpar_nccl__note_of(SEQPAR_NCCL__HELLO, 1), answer;
    int hangs_up;
    lone_new(3);
    lone->came = lone->met = 1;
    lone->seen[1] = lone->seen[2] = 0;
    memset(&lone->id, 7, sizeof lone->id);
    n.size = 3;
    n.magic = SEQPAR_NCCL__MAGIC + 1;
    seat(&n, -1, &hangs_up); /* a stranger */
    test_expect(hangs_up && lone->met == 1 && !lone->stop.status, "a stranger is let in");
    n.kind = SEQPAR_NCCL__POST;
    n.magic = SEQPAR_NCCL__MAGIC;
    seat(&n, -1, &hangs_up);
    test_expect(hangs_up && lone->met == 1, "who does not say hello is let in");
    n.kind = SEQPAR_NCCL__HELLO;
    answer = seat(&n, 1, &hangs_up);
    test_expect(answer.kind == -1 && !hangs_up && lone->met == 2 && lone->came == 2 &&
                    lone->seen[1] && lone->socket[1] >= 0,
                "rank 1 is not seated");
    n.rank = 2;
    answer = seat(&n, 2, &hangs_up);
    test_expect(answer.kind == SEQPAR_NCCL__WELCOME && lone->came == 3,
                "the last one is not welcomed");
    for (size_t i = 0; i < sizeof lone->id; i++)
        test_expect(answer.text[i] == 7, "the unique id is another one");
    answer = seat(&n, -1, &hangs_up);
    expect_ruled(SEQPAR_ERR_WORLD, 2,
                 "two processes are rank 2; give every one a RANK of its own");
    test_expect(answer.kind == SEQPAR_NCCL__STOP && hangs_up && lone->met == 4 &&
                    lone->came == 3,
                "the second rank 2 is told %lld", (long long)answer.kind);
    n.rank = 1; /* after a failure nobody is seated any more */
    lone->seen[1] = 0;
    answer = seat(&n, -1, &hangs_up);
    test_expect(answer.kind == SEQPAR_NCCL__STOP && hangs_up && !lone->seen[1],
                "rank 1 is told %lld", (long long)answer.kind);
    lone_free();
    test_end("nccl_seated");
}

static void test_gathers(void) {
    char want[400] = "of 200 ranks these did not connect within 1 s:";
    size_t head = strlen(want);
    lone_new(3);
    lone->connect_s = 30;
    lone->began = clock_now - 30;
    test_expect(!seqpar_nccl__gathers(lone), "waits although all have come");
    lone->met = 2;
    lone->seen[1] = 0;
    test_expect(seqpar_nccl__gathers(lone) && !lone->stop.status, "gives up at 30 of 30 s");
    lone->began -= 0.5;
    test_expect(!seqpar_nccl__gathers(lone), "still waits at 30.5 of 30 s");
    expect_ruled(
        SEQPAR_ERR_TIMEOUT, 0,
        "of 3 ranks these did not connect within 30 s: 1; check that they were started "
        "and can reach rank 0");
    lone_free();
    lone_new(200); /* as many as have room, each whole */
    lone->connect_s = 1;
    lone->began = clock_now - 2;
    lone->met = 2;
    for (int r = 1; r < 200; r++) lone->seen[r] = 0;
    seqpar_nccl__gathers(lone);
    for (int r = 1; strlen(want) - head < 180; r++)
        snprintf(want + strlen(want), sizeof want - strlen(want), " %d", r);
    strcat(want, "; check that they were started and can reach rank 0");
    expect_ruled(SEQPAR_ERR_TIMEOUT, 0, want);
    lone_free();
    test_end("nccl_gathers");
}

/* ---- a rank's own sentences ---- */

static seqpar_nccl__world *own; /* rank 1 of 3, without a connection */
static seqpar_error own_error;

static void own_new(void) {
    seqpar_nccl_desc desc = {.rank = 1, .size = 3};
    stand_reset(test_seed, 0);
    own = seqpar_nccl__world_new(&desc, &own_error);
    own->rank = 1;
    own->size = 3;
}

/* Ends the world; text: what it failed with, NULL: it did not. */
static void own_free(seqpar_status status, const char *text) {
    test_expect(own->news.status == status, "%s: %s", seqpar_status_name(own->news.status),
                own->news.text);
    test_expect(!text || !strcmp(own->news.text, text), "'%s', not '%s'", own->news.text,
                text ? text : "");
    own->socket = -1;
    while (own->members)
        seqpar_nccl__member_free(own->members); /* which have no communicator */
    seqpar_nccl__close(own);
    test_expect(!stand_leaks()[0], "%s", stand_leaks());
}

/* Times that are not given, and that are. */
static void test_times(void) {
    static const double table[][4] = {
        {0, 0, 120, 600}, {-1, -1, 120, -1}, {0.5, 0.25, 0.5, 0.25}};
    for (int i = 0; i < COUNT(table); i++) {
        seqpar_nccl_desc desc = {.connect_s = table[i][0], .limit_s = table[i][1]};
        seqpar_nccl__world *w = seqpar_nccl__world_new(&desc, &own_error);
        test_expect(w->connect_s == table[i][2] && w->limit_s == table[i][3] && w->socket == -1,
                    "%g and %g s", w->connect_s, w->limit_s);
        seqpar_nccl__close(w);
    }
    test_end("nccl_times");
}

/* What a call of this rank returns for failures of its own, of others, and of all. */
static void test_status(void) {
    char long_text[512], want[512];
    own_new();
    test_expect(seqpar_nccl__status(own) == SEQPAR_OK, "nothing has failed");
    seqpar_nccl__learn(own, SEQPAR_ERR_MEMORY, 1, "no memory");
    test_expect(seqpar_nccl__status(own) == SEQPAR_ERR_MEMORY &&
                    !strcmp(own_error.text, "no memory"),
                "own: %s", own_error.text);
    seqpar_nccl__learn(own, SEQPAR_ERR_OPTION, 2, "later"); /* the first one counts */
    own_free(SEQPAR_ERR_MEMORY, "no memory");
    own_new();
    memset(long_text, 'x', sizeof long_text);
    long_text[500] = 0;
    seqpar_nccl__learn(own, SEQPAR_ERR_MEMORY, 2, long_text);
    long_text[440] = 0;
    snprintf(want, sizeof want, "rank 2 failed: %s", long_text);
    test_expect(seqpar_nccl__status(own) == SEQPAR_ERR_PEER && !strcmp(own_error.text, want),
                "another's: %s", own_error.text);
    own_free(SEQPAR_ERR_MEMORY, NULL);
    own_new();
    seqpar_nccl__learn(own, SEQPAR_ERR_DEADLOCK, 2, "deadlock: all");
    test_expect(seqpar_nccl__status(own) == SEQPAR_ERR_DEADLOCK &&
                    !strcmp(own_error.text, "deadlock: all"),
                "all: %s", own_error.text);
    own_free(SEQPAR_ERR_DEADLOCK, NULL);
    test_end("nccl_status");
}

static seqpar_nccl__member *member_new(void) {
    seqpar_nccl__member *m = seqpar_nccl__member_new(own, 3);
    for (int r = 0; r < 3; r++) m->world_rank[r] = 5 + r;
    m->next = own->members;
    own->members = m;
    return m;
}

/* The sentence of a group that takes too long: its messages, as many as have room. */
static void test_overrun(void) {
    seqpar_transfer list[20];
    seqpar_nccl__request r = {.name = "kv", .step = 3, .sends = 1, .count = 2, .list = list};
    char want[512] = "'kv' step 3 on rank 1 did not finish within 600 s: ";
    size_t head = strlen(want);
    for (int i = 0; i < 20; i++) list[i] = (seqpar_transfer){i % 3, NULL, 10 + i};
    own_new();
    r.state = SEQPAR_NCCL__RUNS;
    seqpar_nccl__overrun(member_new(), &r);
    own_free(SEQPAR_ERR_TIMEOUT,
             "'kv' step 3 on rank 1 did not finish within 600 s: to rank 5 10 bytes, from rank "
             "6 11 bytes");
    own_new();
    r.count = 20;
    r.state = SEQPAR_NCCL__POSTED;
    seqpar_nccl__overrun(member_new(), &r);
    for (int i = 0; strlen(want) - head < 240; i++)
        snprintf(want + strlen(want), sizeof want - strlen(want), "%s%s rank %d %d bytes",
                 i ? ", " : "", i ? "from" : "to", 5 + i % 3, 10 + i);
    strcat(want, "; the other side has not begun it");
    own_free(SEQPAR_ERR_TIMEOUT, want);
    test_end("nccl_overrun");
}

/* Which requests, and which calls of NCCL, are over their time. */
static void test_limits(void) {
    static const struct {
        double limit, since;
        int state;
        seqpar_status status;
    } table[] = {{600, 600, SEQPAR_NCCL__POSTED, SEQPAR_OK},
                 {600, 601, SEQPAR_NCCL__POSTED, SEQPAR_ERR_TIMEOUT},
                 {600, 601, SEQPAR_NCCL__RUNS, SEQPAR_ERR_TIMEOUT},
                 {600, 601, SEQPAR_NCCL__DONE, SEQPAR_OK},
                 {-1, 1e6, SEQPAR_NCCL__RUNS, SEQPAR_OK}};
    for (int i = 0; i < COUNT(table); i++) {
        seqpar_nccl__member *m;
        seqpar_nccl__request r = {
            .name = "kv", .state = table[i].state, .since = clock_now - table[i].since};
        own_new();
        own->limit_s = table[i].limit;
        m = member_new();
        m->requests = &r;
        seqpar_nccl__watch(m);
        m->requests = NULL;
        own_free(table[i].status, NULL);
    }
    for (int i = 0; i < 3; i++) { /* a call in progress; of a group, which has its own limit */
        seqpar_nccl__request r = {
            .name = "kv", .state = SEQPAR_NCCL__STARTED, .since = clock_now};
        seqpar_nccl__member *m;
        own_new();
        own->connect_s = 30;
        m = member_new();
        m->launching = "ncclCommSplit(m->nccl)";
        m->since = clock_now - 30 - (i > 0);
        m->requests = i == 2 ? &r : NULL;
        seqpar_nccl__watch(m);
        m->requests = NULL;
        own_free(i == 1 ? SEQPAR_ERR_TIMEOUT : SEQPAR_OK,
                 i == 1 ? "ncclCommSplit on rank 1 did not finish within 30 s; do all ranks "
                          "call it, and do they reach each other? NCCL_DEBUG=INFO tells more"
                        : NULL);
    }
    test_end("nccl_limits");
}

/* A rank's connection to the referee, whose side is `line`. */
static int line;
static void own_connect(void) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) abort();
    own->socket = pair[0];
    line = pair[1];
}

static void own_disconnect(void) {
    if (own->socket >= 0) close(own->socket);
    own->socket = -1;
    close(line);
}

/* Single bytes are moved, too. */
static void test_one_byte(void) {
    char got[2] = "";
    own_new();
    own_connect();
    test_expect(seqpar_nccl__write(own->socket, "a", 1) &&
                    recv(line, got, 2, MSG_DONTWAIT) == 1 && got[0] == 'a',
                "one byte is not written");
    test_expect(seqpar_nccl__write(line, "b", 1) && seqpar_nccl__read(own->socket, got, 1) &&
                    got[0] == 'b',
                "one byte is not read");
    test_expect(seqpar_nccl__write(line, "", 0) && seqpar_nccl__read(own->socket, got, 0),
                "no byte is a failure");
    own_disconnect();
    test_expect(!seqpar_nccl__write(-1, "c", 1) && !seqpar_nccl__read(-1, got, 1),
                "bytes move over no connection");
    own_free(SEQPAR_OK, NULL);
    test_end("nccl_one_byte");
}

/* What a rank hears: it is let in, some message may start, the world has failed. */
static void test_rank_hears(void) {
    seqpar_nccl__note n = seqpar_nccl__note_of(SEQPAR_NCCL__WELCOME, 0);
    seqpar_nccl__item go[2] = {{4, 1}, {4, 0}};
    seqpar_nccl__request r = {.number = 4, .count = 2};
    seqpar_nccl__member *m;
    own_new();
    own_connect();
    m = member_new();
    m->requests = &r;
    memset(n.text, 3, sizeof own->id);
    seqpar_nccl__hear(own); /* nothing yet */
    test_expect(!own->welcome, "it is welcome before it is let in");
    seqpar_nccl__send_note(line, &n, NULL);
    n = seqpar_nccl__note_of(SEQPAR_NCCL__GO, 1);
    n.count = 2;
    seqpar_nccl__send_note(line, &n, go);
    seqpar_nccl__hear(own); /* all that is there */
    test_expect(own->welcome && !memcmp(&own->id, "\3\3\3", 3), "it is not let in");
    test_expect(m->ready_count == 2 && m->ready[0].index == 1 && m->ready[1].index == 0,
                "%lld messages may start", (long long)m->ready_count);
    n = seqpar_nccl__note_of(SEQPAR_NCCL__STOP, 2);
    n.status = SEQPAR_ERR_OPTION;
    strcpy(n.text, "no such option");
    seqpar_nccl__send_note(line, &n, NULL);
    seqpar_nccl__hear(own);
    test_expect(own->ruled && own->verdict.status == SEQPAR_ERR_OPTION &&
                    own->verdict.rank == 2 && !strcmp(own->verdict.text, "no such option"),
                "the verdict is %s", own->verdict.text);
    test_expect(own->news.rank == 2 && m->ready_count == 0, "messages start after a failure");
    n.rank = 0; /* the first verdict stands */
    seqpar_nccl__send_note(line, &n, NULL);
    seqpar_nccl__hear(own);
    test_expect(own->verdict.rank == 2, "there is another verdict");
    m->requests = NULL;
    own_disconnect();
    own_free(SEQPAR_ERR_OPTION, "no such option");
    test_end("nccl_rank_hears");
}

/* Rank 0 is gone: that is a failure, unless this rank is closing the world. */
static void test_lost(void) {
    for (int quiet = 0; quiet < 2; quiet++) {
        own_new();
        own_connect();
        own->quiet = quiet;
        close(line);
        seqpar_nccl__hear(own);
        test_expect(own->socket == -1 && own->ruled, "the connection stays");
        test_expect(own->verdict.status == (quiet ? SEQPAR_OK : SEQPAR_ERR_PEER), "%s",
                    own->verdict.text);
        own_free(quiet ? SEQPAR_OK : SEQPAR_ERR_PEER,
                 quiet ? NULL
                       : "rank 1 lost its connection to rank 0, which has ended or "
                         "cannot be reached");
    }
    test_end("nccl_lost");
}

static void *read_late(void *argument) {
    seqpar_nccl__note *n = argument;
    seqpar_nccl__items items = {NULL, 0, 0};
    usleep(50000);
    if (!seqpar_nccl__take_note(line, n, &items) || items.count != 100000) n->kind = -1;
    for (int64_t i = 0; i < items.count; i++)
        if (items.item[i].a != i || items.item[i].b != 3 * i) n->kind = -1;
    free(items.item);
    return NULL;
}

/* A note that is larger than the socket's buffer, while the other side does not read. */
static void test_full_socket(void) {
    seqpar_nccl__note n = seqpar_nccl__note_of(SEQPAR_NCCL__POST, 1), got;
    seqpar_nccl__item *items = malloc(100000 * sizeof *items);
    int small = 4096;
    pthread_t thread;
    own_new();
    own_connect();
    setsockopt(own->socket, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    for (int64_t i = 0; i < 100000; i++) items[i] = (seqpar_nccl__item){i, 3 * i};
    n.count = 100000;
    pthread_create(&thread, NULL, read_late, &got);
    seqpar_nccl__tell(own, &n, items);
    pthread_join(thread, NULL);
    test_expect(got.kind == SEQPAR_NCCL__POST && got.rank == 1, "the note is another one");
    close(line); /* a note to nobody: the rank is alone */
    line = -1;
    seqpar_nccl__tell(own, &n, items);
    free(items);
    own_disconnect();
    own_free(SEQPAR_ERR_PEER,
             "rank 1 lost its connection to rank 0, which has ended or cannot be reached");
    test_end("nccl_full_socket");
}

/* A failure of this rank is told to the referee, also where no note can be sent at once. */
static void test_failure_is_told(void) {
    seqpar_nccl__items items = {NULL, 0, 0};
    seqpar_nccl__note n;
    for (int late = 0; late < 3; late++) { /* 2: when the world is closed */
        own_new();
        own_connect();
        if (late)
            seqpar_nccl__learn_memory(own, "no memory for 7");
        else
            seqpar_nccl__fail(own, SEQPAR_ERR_MEMORY, "no memory for %d", 7);
        test_expect(seqpar_nccl__readable(line, 0) == !late, "it is told %s",
                    late ? "at once" : "late");
        if (late < 2)
            seqpar_nccl__progress(own);
        else
            seqpar_nccl__say_goodbye(own);
        test_expect(seqpar_nccl__take_note(line, &n, &items) && n.kind == SEQPAR_NCCL__STOP &&
                        n.rank == 1 && n.status == SEQPAR_ERR_MEMORY &&
                        !strcmp(n.text, "no memory for 7"),
                    "another note: %s", n.text);
        seqpar_nccl__fail(own, SEQPAR_ERR_OPTION, "later");
        seqpar_nccl__learn_memory(own, "later");
        seqpar_nccl__progress(own);
        test_expect(!seqpar_nccl__readable(line, 0), "a second failure is told");
        own_disconnect();
        own_free(SEQPAR_ERR_MEMORY, "no memory for 7");
    }
    test_end("nccl_failure_is_told");
}

static void expect_call(int good, int said, const char *text) {
    test_expect(said == good, "it is %s", said ? "no failure" : "a failure");
    own_free(good ? SEQPAR_OK : SEQPAR_ERR_TRANSPORT, text);
}

/* What calls of CUDA and NCCL end with. */
static void test_calls(void) {
    static const struct {
        ncclResult_t code;
        int speechless;
        const char *text;
    } table[] = {
        {ncclSuccess, 0, NULL},
        {ncclInProgress, 1, NULL},
        {ncclSystemError, 0, "ncclSend on rank 1: unhandled system error: as was asked for"},
        {ncclSystemError, 1, "ncclSend on rank 1: unhandled system error"},
        {ncclInvalidUsage, 1,
         "ncclSend on rank 1: invalid usage; every rank needs a GPU of its own, see LOCAL_RANK"}};
    own_new();
    expect_call(1, seqpar_nccl__cuda(own, cudaSuccess, "cudaEventQuery(x)"), NULL);
    own_new();
    expect_call(
        0, seqpar_nccl__cuda(own, cudaErrorNoDevice, "cudaEventQuery(x)"),
        "cudaEventQuery on rank 1: no CUDA-capable device is detected (CUDA error 100)");
    for (int i = 0; i < COUNT(table); i++) {
        seqpar_nccl__member *m;
        int said;
        own_new();
        stand.speechless = table[i].speechless;
        m = member_new();
        said = seqpar_nccl__nccl(m, table[i].code, "ncclSend(a, b)");
        test_expect(!m->launching == (table[i].code != ncclInProgress) &&
                        (!m->launching || m->since == clock_now),
                    "%d: what is in progress", i);
        m->launching = NULL;
        expect_call(!table[i].text, said, table[i].text);
    }
    test_end("nccl_calls");
}

/* The numbers that a world cannot have. */
static void test_sizes(void) {
    static const struct {
        int64_t rank, size;
        seqpar_status status;
        const char *text;
    } table[] = {{0, 1, SEQPAR_OK, NULL},
                 {4, 5, SEQPAR_OK, NULL},
                 {5, 5, SEQPAR_ERR_RANK, "rank 5 is outside a world of 5; use 0 .. 4"},
                 {-1, 5, SEQPAR_ERR_RANK, "rank -1 is outside a world of 5; use 0 .. 4"},
                 {0, -1, SEQPAR_ERR_RANKS,
                  "a world of -1 ranks cannot be; set WORLD_SIZE to at least 1"}};
    for (int i = 0; i < COUNT(table); i++) {
        seqpar_nccl_desc desc = {.rank = table[i].rank, .size = table[i].size};
        own_new();
        seqpar_nccl__seats(own, &desc);
        test_expect(own->rank == table[i].rank && own->size == table[i].size &&
                        own->version == NCCL_VERSION_CODE && own->error->rank == own->rank,
                    "rank %lld of %lld", (long long)own->rank, (long long)own->size);
        own_free(table[i].status, table[i].text);
    }
    test_end("nccl_sizes");
}

/* Which device a rank takes. */
static void test_devices(void) {
    static const struct {
        const char *local;
        int keep, devices, want;
        seqpar_status status;
        const char *text;
    } table[] = {
        {"2", 0, 3, 2, SEQPAR_OK, NULL},
        {"2", 1, 3, 1, SEQPAR_OK, NULL},
        {"0", 0, 1, 0, SEQPAR_OK, NULL},
        {NULL, 0, 3, 1, SEQPAR_OK, NULL},
        {"3", 0, 3, 1, SEQPAR_ERR_RANK,
         "LOCAL_RANK is 3, but this machine has 3 CUDA devices; start at most 3 ranks "
         "on it"},
        {"0", 0, 0, 1, SEQPAR_ERR_TRANSPORT,
         "rank 1 has no CUDA device (cudaGetDeviceCount: no CUDA-capable device is detected); without one use "
         "seqpar_run_threads"}};
    for (int i = 0; i < COUNT(table); i++) {
        seqpar_nccl_desc desc = {.keep_device = table[i].keep};
        int device = -1;
        own_new();
        cudaSetDevice(1);
        stand.devices = table[i].devices;
        if (table[i].local) setenv("LOCAL_RANK", table[i].local, 1);
        seqpar_nccl__choose_device(own, &desc);
        cudaGetDevice(&device);
        test_expect(device == table[i].want && (table[i].status || own->device == device),
                    "%d: device %d", i, device);
        unsetenv("LOCAL_RANK");
        cudaSetDevice(0);
        own_free(table[i].status, table[i].text);
    }
    test_end("nccl_devices");
}

/* Nobody lets the rank in. */
static void test_not_let_in(void) {
    seqpar_nccl__items items = {NULL, 0, 0};
    seqpar_nccl__note n;
    own_new();
    own_connect();
    own->version = 22809;
    own->connect_s = -1; /* the time is over */
    seqpar_nccl__present(own);
    test_expect(seqpar_nccl__take_note(line, &n, &items) && n.kind == SEQPAR_NCCL__HELLO &&
                    n.magic == SEQPAR_NCCL__MAGIC && n.version == 22809 && n.size == 3 &&
                    n.rank == 1,
                "it says another hello");
    own_disconnect();
    own_free(SEQPAR_ERR_TIMEOUT,
             "rank 1 was not let in by rank 0 within -2 s; is it rank 0 who answers there?");
    test_end("nccl_not_let_in");
}

/* ---- memory ---- */

static void test_blocks(void) {
    static const int64_t sizes[][2] = {
        {1, 4096}, {4096, 4096}, {4097, 8192}, {8193, 16384}, {100000, 131072}};
    seqpar_nccl__block *b[5], *again;
    own_new();
    for (int i = 0; i < 5; i++) {
        b[i] = seqpar_nccl__block_new(own, sizes[i][0]);
        test_expect(b[i] && b[i]->bytes == sizes[i][1], "%lld bytes for %lld",
                    b[i] ? (long long)b[i]->bytes : 0, (long long)sizes[i][0]);
    }
    for (int i = 0; i < 5; i++) { /* given back: the largest is first in the list */
        b[i]->next = own->blocks;
        own->blocks = b[i];
    }
    again = seqpar_nccl__block_new(own, 131072);
    test_expect(again == b[4], "another block than the one that is large enough");
    again->next = NULL;
    again = seqpar_nccl__block_new(own, 16385); /* none is left that is as large */
    test_expect(again && again->bytes == 32768, "a block that is too small is given");
    again->next = own->blocks;
    own->blocks = again;
    b[4]->next = own->blocks;
    own->blocks = b[4];
    own_free(SEQPAR_OK, NULL);
    test_end("nccl_blocks");
}

/* Messages that may start stay in their order, however many they are. */
static void test_many_ready(void) {
    seqpar_nccl__member *m;
    seqpar_nccl__request r = {.number = 4, .count = 100};
    own_new();
    m = member_new();
    m->requests = &r;
    for (int i = 0; i < 100; i++) seqpar_nccl__started(own, 4, (37 * i) % 100);
    seqpar_nccl__started(own, 4, -1); /* none of these exists */
    seqpar_nccl__started(own, 4, 100);
    seqpar_nccl__started(own, 5, 0);
    test_expect(m->ready_count == 100, "%lld messages", (long long)m->ready_count);
    for (int i = 0; i < 100; i++)
        test_expect(m->ready[i].request == &r && m->ready[i].index == (37 * i) % 100,
                    "message %d is %lld", i, (long long)m->ready[i].index);
    m->requests = NULL;
    own_free(SEQPAR_OK, NULL);
    test_end("nccl_many_ready");
}

/* A group on a queue starts behind the groups of the host that were begun before. */
static void test_unstarted(void) {
    static const int states[][3] = {
        {SEQPAR_NCCL__RUNS, SEQPAR_NCCL__STARTED,
         SEQPAR_NCCL__POSTED}, /* the last is its own */
        {SEQPAR_NCCL__POSTED, SEQPAR_NCCL__DONE, SEQPAR_NCCL__POSTED},
        {SEQPAR_NCCL__RUNS, SEQPAR_NCCL__POSTED, SEQPAR_NCCL__POSTED}};
    for (int i = 0; i < COUNT(states); i++) {
        seqpar_nccl__request r[3] = {{.next = &r[1]}, {.next = &r[2]}, {.next = NULL}};
        seqpar_nccl__member *m;
        for (int k = 0; k < 3; k++) r[k].state = states[i][k];
        own_new();
        m = member_new();
        test_expect(!seqpar_nccl__unstarted(m, NULL), "a comm without requests waits");
        m->requests = r;
        test_expect(seqpar_nccl__unstarted(m, &r[2]) == (i > 0), "case %d", i);
        test_expect(seqpar_nccl__unstarted(m, NULL), "a split does not wait");
        m->requests = NULL;
        m->launching = "ncclSend";
        test_expect(seqpar_nccl__unstarted(m, NULL), "a call in progress is not waited for");
        m->launching = NULL;
        own_free(SEQPAR_OK, NULL);
    }
    test_end("nccl_unstarted");
}

/* The rank in a part: by key, and where keys are equal by rank. */
static void test_index_of(void) {
    static const seqpar_nccl__choice all[] = {{1, 5, 0}, {2, 0, 0}, {1, 3, 0},
                                              {1, 5, 0}, {2, 0, 0}, {1, -4, 0}};
    static const int64_t want[] = {2, 0, 1, 3, 1, 0};
    for (int r = 0; r < 6; r++)
        test_expect(seqpar_nccl__index_of(all, 6, r) == want[r], "rank %d is %lld of its part",
                    r, (long long)seqpar_nccl__index_of(all, 6, r));
    test_end("nccl_index_of");
}

/* ---- how ranks find each other ---- */

static void test_env(void) {
    static const char *const good[] = {"0", "17", "65536"}, *const bad[] = {"", "-1", "3x",
                                                                            "x"};
    int64_t value = -5;
    for (int i = 0; i < COUNT(good); i++) {
        own_new();
        setenv("SEQPAR_TEST", good[i], 1);
        test_expect(seqpar_nccl__env(own, "SEQPAR_TEST", &value, "a number") &&
                        value == atoll(good[i]),
                    "%s is %lld", good[i], (long long)value);
        own_free(SEQPAR_OK, NULL);
    }
    for (int i = 0; i < COUNT(bad); i++) {
        char want[256];
        own_new();
        setenv("SEQPAR_TEST", bad[i], 1);
        value = -5;
        test_expect(!seqpar_nccl__env(own, "SEQPAR_TEST", &value, NULL) && value == -5 &&
                        !own->news.status,
                    "'%s' is %lld, or a failure", bad[i], (long long)value);
        seqpar_nccl__env(own, "SEQPAR_TEST", &value, "a number");
        snprintf(want, sizeof want,
                 "the environment's SEQPAR_TEST is '%s', not a number; start by torchrun or "
                 "mpirun, set it, or fill in seqpar_nccl_desc",
                 bad[i]);
        own_free(SEQPAR_ERR_OPTION, want);
    }
    unsetenv("SEQPAR_TEST");
    test_end("nccl_env");
}

static void test_listen(void) {
    int64_t port = 0, taken;
    int fd, again;
    char want[128];
    own_new();
    fd = seqpar_nccl__listen(own, &port);
    test_expect(fd >= 0 && port > 0 && port < 65536, "port %lld", (long long)port);
    test_expect(accept(fd, NULL, NULL) < 0 && (errno == EAGAIN || errno == EWOULDBLOCK),
                "accept waits");
    taken = port;
    again = seqpar_nccl__listen(own, &taken);
    test_expect(again == -1, "two listen on one port");
    close(fd);
    snprintf(want, sizeof want, "rank 0 cannot listen on port %lld: ", (long long)port);
    test_expect(!strncmp(own->news.text, want, strlen(want)) &&
                    strstr(own->news.text, "; choose a free one by MASTER_PORT or "
                                           "seqpar_nccl_desc.port"),
                "%s", own->news.text);
    own_free(SEQPAR_ERR_TRANSPORT, NULL);
    test_end("nccl_listen");
}

/* Somebody listens, and then nobody. */
static void test_dial(void) {
    int64_t port = 0;
    int listener, fd, code = 7;
    own_new();
    listener = seqpar_nccl__listen(own, &port);
    fd = seqpar_nccl__dial("127.0.0.1", port, clock_now + 5, &code);
    test_expect(fd >= 0 && code == 0, "code %d", code);
    test_expect(!(fcntl(fd, F_GETFL) & O_NONBLOCK), "reads of it do not wait");
    close(fd);
    close(listener);
    test_expect(seqpar_nccl__dial("127.0.0.1", port, clock_now + 5, &code) == -1 && !code,
                "connects although nobody listens");
    own_free(SEQPAR_OK, NULL);
    test_end("nccl_dial");
}

static void test_own_address(void) {
    char host[SEQPAR_NCCL__HOST];
    struct in_addr address;
    memset(host, 'x', sizeof host);
    seqpar_nccl__own_address(host);
    test_expect(inet_pton(AF_INET, host, &address) == 1 && address.s_addr != 0, "%.20s", host);
    test_end("nccl_own_address");
}

static void write_text(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    if (!file || fputs(text, file) < 0 || fclose(file)) abort();
}

static void test_ticket(void) {
    static const char *const bad[] = {"", "seqpar_nccl host", "seqpar_mpi host 1", "host 1"};
    char path[256], host[SEQPAR_NCCL__HOST] = "", text[400];
    seqpar_nccl__ticket t = {"10.0.0.7", 29500}, got = {"", 0};
    snprintf(path, sizeof path, "%s/seqpar_nccl_parts.%ld",
             getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid());
    own_new();
    seqpar_nccl__write_ticket(own, path, &t);
    test_expect(own->file == path && seqpar_nccl__read_ticket(path, &got) &&
                    !strcmp(got.host, "10.0.0.7") && got.port == 29500,
                "%s port %lld", got.host, (long long)got.port);
    snprintf(text, sizeof text, "%s.tmp.%ld", path, (long)getpid());
    test_expect(access(text, F_OK) != 0, "the file beside it stays");
    own->file = NULL;
    memset(host, 'h', 255);
    snprintf(text, sizeof text, "seqpar_nccl %s 1", host);
    write_text(path, text);
    test_expect(seqpar_nccl__read_ticket(path, &got) && !strcmp(got.host, host),
                "a name of 255 letters is %s", got.host);
    for (int i = 0; i < COUNT(bad); i++) {
        write_text(path, bad[i]);
        test_expect(!seqpar_nccl__read_ticket(path, &got), "'%s' is read", bad[i]);
    }
    remove(path);
    test_expect(!seqpar_nccl__read_ticket(path, &got), "a file that is not there is read");
    own_free(SEQPAR_OK, NULL);
    test_end("nccl_ticket");
}

/* Ports and names at both ends of what is accepted; what is refused ends before anybody is
   looked for. */
static void expect_address(int64_t port, const char *host, const char *want) {
    seqpar_nccl_desc desc = {.rank = 1, .size = 2, .host = host, .port = port, .connect_s = -1};
    own_new();
    own->connect_s = -1; /* the time is over */
    seqpar_nccl__open_by_tcp(own, &desc);
    own_free(want ? SEQPAR_ERR_OPTION : SEQPAR_ERR_TIMEOUT, want);
}

static void test_addresses(void) {
    char host[300] = "", want[400];
    expect_address(65535, "127.0.0.1", NULL);
    expect_address(1, "127.0.0.1", NULL);
    for (int64_t port = -1; port < 65537; port += 65537) {
        snprintf(want, sizeof want,
                 "the port of rank 0's machine is %lld; give 1 to 65535 by MASTER_PORT or "
                 "seqpar_nccl_desc.port",
                 (long long)port);
        expect_address(port, "127.0.0.1", want);
    }
    memset(host, 'h', 255);
    expect_address(1, host, NULL);
    memset(host, 'h', 256);
    snprintf(want, sizeof want,
             "rank 0's machine is called '%.60s...' with 256 letters, names have at most 255; "
             "set MASTER_ADDR to its name or address",
             host);
    expect_address(1, host, want);
    test_end("nccl_addresses");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    test_limit(60);
    TEST(test_matching());
    TEST(test_items());
    TEST(test_mismatched());
    TEST(test_ends());
    TEST(test_deadlock_sentence());
    TEST(test_rank_is_heard());
    TEST(test_let_in());
    TEST(test_seats());
    TEST(test_gathers());
    TEST(test_times());
    TEST(test_status());
    TEST(test_overrun());
    TEST(test_limits());
    TEST(test_one_byte());
    TEST(test_rank_hears());
    TEST(test_lost());
    TEST(test_full_socket());
    TEST(test_failure_is_told());
    TEST(test_calls());
    TEST(test_sizes());
    TEST(test_devices());
    TEST(test_not_let_in());
    TEST(test_blocks());
    TEST(test_many_ready());
    TEST(test_unstarted());
    TEST(test_index_of());
    TEST(test_env());
    TEST(test_listen());
    TEST(test_dial());
    TEST(test_own_address());
    TEST(test_ticket());
    TEST(test_addresses());
    return test_summary();
}
