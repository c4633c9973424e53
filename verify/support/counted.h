/* SPDX-License-Identifier: MIT OR Unlicense */
/* counted.h - counts the library's allocations, can make any one of them fail, and aborts when
   a block is freed behind which something was written. Include before the library's
   implementation. */
#ifndef TEST_COUNTED_H
#define TEST_COUNTED_H
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

/* Behind a block: a pattern, and at last the size that was asked for. */
enum { GUARD = 24, GUARD_BYTE = 0xa7 };
static void guard_put(char *data, size_t size) {
    const size_t end = malloc_usable_size(data) - sizeof size;
    memset(data + size, GUARD_BYTE, end - size);
    memcpy(data + end, &size, sizeof size);
}

static void guard_look(const char *data) {
    const size_t end = malloc_usable_size((void *)data) - sizeof end;
    size_t size, at;
    memcpy(&size, data + end, sizeof size);
    for (at = size; at < end && (unsigned char)data[at] == GUARD_BYTE;) at++;
    if (at == end) return;
    printf("FAIL guard: bytes behind a block of %zu were written\n", size);
    fflush(stdout);
    abort();
}

static void *counted_malloc(size_t size) {
    int64_t number = __atomic_add_fetch(&blocks_made, 1, __ATOMIC_SEQ_CST);
    char *data = number == block_refused ? NULL : malloc(size + GUARD);
    if (!data) return NULL;
    guard_put(data, size);
    __atomic_fetch_add(&blocks_live, 1, __ATOMIC_SEQ_CST);
    note_most(&bytes_peak,
              __atomic_add_fetch(&bytes_live, (int64_t)malloc_usable_size(data) - GUARD,
                                 __ATOMIC_SEQ_CST));
    note_most(&block_largest, (int64_t)size);
    return data;
}

static void counted_free(void *data) {
    if (!data) return;
    guard_look(data);
    __atomic_fetch_sub(&blocks_live, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_sub(&bytes_live, (int64_t)malloc_usable_size(data) - GUARD,
                       __ATOMIC_SEQ_CST);
    free(data);
}
#define SEQPAR_MALLOC(size) counted_malloc(size)
#define SEQPAR_FREE(data)   counted_free(data)
#endif
