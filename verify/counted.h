/* SPDX-License-Identifier: MIT OR Unlicense */
/* counted.h - what the library allocates is counted, and any of it may find no memory. Included
   before the library's implementation. */
#ifndef TEST_COUNTED_H
#define TEST_COUNTED_H
#include <malloc.h>
#include <stdint.h>
#include <stdlib.h>
/* refused: number of the allocation that finds no memory */
static int64_t blocks_live, blocks_made, block_refused;
/* bytes; the last knows the trainers' own arrays too */
static int64_t bytes_live, bytes_peak, block_largest;
static void note_most(int64_t *most, int64_t bytes) {
    int64_t before = __atomic_load_n(most, __ATOMIC_SEQ_CST);
    while (before < bytes && !__atomic_compare_exchange_n(most, &before, bytes, 0,
                                                          __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
}

static void *counted_malloc(size_t size) {
    int64_t number = __atomic_add_fetch(&blocks_made, 1, __ATOMIC_SEQ_CST);
    void *data = number == block_refused ? NULL : malloc(size);
    if (!data) return NULL;
    __atomic_fetch_add(&blocks_live, 1, __ATOMIC_SEQ_CST);
    note_most(&bytes_peak, __atomic_add_fetch(&bytes_live, (int64_t)malloc_usable_size(data),
                                              __ATOMIC_SEQ_CST));
    note_most(&block_largest, (int64_t)size);
    return data;
}

static void counted_free(void *data) {
    if (data) __atomic_fetch_sub(&blocks_live, 1, __ATOMIC_SEQ_CST);
    if (data)
        __atomic_fetch_sub(&bytes_live, (int64_t)malloc_usable_size(data), __ATOMIC_SEQ_CST);
    free(data);
}
#define SEQPAR_MALLOC(size) counted_malloc(size)
#define SEQPAR_FREE(data)   counted_free(data)
#endif
