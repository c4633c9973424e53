/* SPDX-License-Identifier: MIT OR Unlicense */
/* The NCCL transport over a stand-in for NCCL and CUDA: ranks are threads, a GPU is not needed. */
#include "nccl_stand_in.h"
static double clock_ahead; /* time limits are tested by putting the clock forward, not by waiting */
static double clock_seconds(void);
#define SEQPAR_NCCL_SECONDS() clock_seconds()
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_NCCL_IMPLEMENTATION
#include "seqpar_nccl.h"
#include "transport.h"

static double clock_seconds(void) {
    double ahead;
    __atomic_load(&clock_ahead, &ahead, __ATOMIC_SEQ_CST);
    return 1e-9 * (double)now_ns() + ahead;
}
static void clock_forward(double seconds) {
    double ahead = clock_ahead + seconds;
    __atomic_store(&clock_ahead, &ahead, __ATOMIC_SEQ_CST);
}

/* ---- worlds of threads ---- */

typedef struct place { /* one rank */
    pthread_t thread;
    seqpar_nccl_desc desc;
    seqpar_rank_fn fn;
    void *user;
    seqpar_status status;
    seqpar_error error;
} place;

static char world_file[256];

static void *place_main(void *argument) {
    place *p = argument;
    cudaSetDevice((int)p->desc.rank);
    p->status = seqpar_nccl_run(&p->desc, p->fn, p->user, &p->error);
    return NULL;
}

/* Runs all places; what the world ended with. */
static seqpar_status run_places(place *places, int64_t count, seqpar_error *error) {
    int64_t r, said = -1;
    memset(error, 0, sizeof *error);
    for (r = 0; r < count; r++) if (pthread_create(&places[r].thread, NULL, place_main, &places[r])) abort();
    for (r = 0; r < count; r++) pthread_join(places[r].thread, NULL);
    for (r = 0; r < count; r++) if (places[r].status && said < 0) said = r;
    if (said >= 0) *error = places[said].error;
    test_expect(!stand.complaint[0], "NCCL's rules: %s", stand.complaint);
    test_expect(!stand_leaks()[0], "%s", stand_leaks());
    return error->status;
}

static seqpar_status run_world(int64_t ranks, seqpar_rank_fn fn, void *user, seqpar_error *error) {
    place places[RANKS];
    int64_t r;
    memset(places, 0, sizeof places);
    for (r = 0; r < ranks; r++) places[r] = (place){.desc = {.rank = r, .size = ranks, .keep_device = 1, .file = world_file}, .fn = fn, .user = user};
    return run_places(places, ranks, error);
}
static seqpar_status run_nccl(int64_t ranks, seqpar_rank_fn fn, void *user, seqpar_error *error) {
    static uint64_t seed;
    stand_reset(test_seed + seed++);
    return run_world(ranks, fn, user, error);
}

int main(int argc, char **argv) {
    static const transport_maker maker = {"nccl", run_nccl, 0};
    test_begin(argc, argv);
    snprintf(world_file, sizeof world_file, "%s/seqpar_nccl.%ld", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid());
    transport_conformance(&maker);
    return test_summary();
}
