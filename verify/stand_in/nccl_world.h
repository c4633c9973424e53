/* SPDX-License-Identifier: MIT OR Unlicense */
/* A world over NCCL whose ranks are threads of the test, rank r on GPU r. Include after
   seqpar_nccl.h; NCCL is the real one or its stand-in. */
#ifndef NCCL_WORLD_H
#define NCCL_WORLD_H
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct place { /* one rank */
    pthread_t thread;
    seqpar_nccl_desc desc;
    seqpar_rank_fn fn;
    void *user;
    seqpar_status status;
    seqpar_error error;
    useconds_t late_us;
} place;

static void *place_main(void *argument) {
    place *p = (place *)argument;
    cudaSetDevice((int)p->desc.rank);
    usleep(p->late_us);
    p->status = seqpar_nccl_run(&p->desc, p->fn, p->user, &p->error);
    return NULL;
}

/* Runs them all; returns the status of the lowest rank that has one, with its sentence: a
   rank that was done before the world failed has none. */
static seqpar_status places_run(place *places, int64_t count, seqpar_error *error) {
    int64_t r;
    memset(error, 0, sizeof *error);
    for (r = 0; r < count; r++)
        if (pthread_create(&places[r].thread, NULL, place_main, &places[r])) abort();
    for (r = 0; r < count; r++) pthread_join(places[r].thread, NULL);
    for (r = 0; r < count && !error->status; r++)
        if (places[r].status) *error = places[r].error;
    return error->status;
}

/* Ranks that meet over this file and all run fn. */
static seqpar_status world_run(const char *file, int64_t ranks, seqpar_rank_fn fn, void *user,
                               seqpar_error *error) {
    place *places = (place *)calloc((size_t)ranks, sizeof *places);
    seqpar_status status;
    int64_t r;
    if (!places) abort();
    for (r = 0; r < ranks; r++) {
        places[r].desc.rank = r;
        places[r].desc.size = ranks;
        places[r].desc.keep_device = 1;
        places[r].desc.file = file;
        places[r].fn = fn;
        places[r].user = user;
    }
    status = places_run(places, ranks, error);
    free(places);
    return status;
}
#endif
