/* SPDX-License-Identifier: MIT OR Unlicense */
/* room.h - arrays of exactly the promised size. An array ends, or begins, at a page that cannot
 * be accessed, so an access beside it ends the process. Memory is filled with NaN, so that a
 * test sees later which elements were written. */
#ifndef ROOM_H
#define ROOM_H
#include <sys/mman.h>
#include <unistd.h>
#include "test.h"

typedef struct {
    char *base;
    size_t pages, bytes;
    char *data;
} room;

/* at_end: nothing follows the array; else nothing precedes it. `poison` in every byte. */
static room room_new(int64_t bytes, int at_end) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), body = ((size_t)bytes + page) / page * page;
    room r = {.pages = body + 2 * page, .bytes = (size_t)bytes};
    r.base = mmap(NULL, r.pages, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (r.base == MAP_FAILED || mprotect(r.base + page, body, PROT_READ | PROT_WRITE)) {
        perror("room");
        exit(2);
    }
    r.data = at_end ? r.base + page + body - bytes : r.base + page;
    memset(r.base + page, 0xff, body); /* NaN in every type */
    return r;
}

static void room_free(room *r) { munmap(r->base, r->pages); }
#endif
