/* SPDX-License-Identifier: MIT OR Unlicense */
/* late_moves.h - a device that copies a move's bytes as late as it may: when somebody waits for
   it, frees memory, or LATE_MOVES are pending. So a missing wait shows. State is per thread. */
#ifndef TEST_LATE_MOVES_H
#define TEST_LATE_MOVES_H
#include <string.h>
#include "seqpar.h"

enum { LATE_MOVES = 256 };
static _Thread_local struct {
    struct {
        void *to;
        const void *from;
        int64_t bytes;
    } move[LATE_MOVES];
    int64_t begun, done;
    void (*pool_free)(seqpar_device *device, void *data, int64_t bytes);
} late;

static seqpar_status late_moved(seqpar_device *device, int64_t moves, void *queue) {
    (void)device;
    (void)queue;
    for (; late.done < moves; late.done++)
        memcpy(late.move[late.done % LATE_MOVES].to, late.move[late.done % LATE_MOVES].from,
               (size_t)late.move[late.done % LATE_MOVES].bytes);
    return SEQPAR_OK;
}

static int64_t late_move(seqpar_device *device, void *to, const void *from, int64_t bytes,
                         void *queue) {
    late_moved(device, late.begun + 1 - LATE_MOVES, queue);
    late.move[late.begun % LATE_MOVES].to = to;
    late.move[late.begun % LATE_MOVES].from = from;
    late.move[late.begun % LATE_MOVES].bytes = bytes;
    return ++late.begun;
}

static void late_pool_free(seqpar_device *device, void *data, int64_t bytes) {
    late_moved(device, late.begun, NULL);
    late.pool_free(device, data, bytes);
}

static void late_begin(seqpar_device *device) {
    memset(&late, 0, sizeof late);
    late.pool_free = device->pool_free;
    device->pool_free = late_pool_free;
    device->move = late_move;
    device->moved = late_moved;
}
#endif
