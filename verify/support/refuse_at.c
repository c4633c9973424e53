/* SPDX-License-Identifier: MIT OR Unlicense */
/* refuse_at - a library to preload: the REFUSE_AT-th allocation that the program itself makes,
 * not one of its libraries, finds no memory. Without REFUSE_AT it says at the end, on stderr,
 * the numbers of the allocations that are the first of their place in the program. */
#define _GNU_SOURCE
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PLACES = 4096 };
static atomic_long calls, first_of[PLACES];  /* 0: none */
static _Atomic uintptr_t place[PLACES];      /* hash table; 0: free */
static uintptr_t program_begin, program_end; /* its code; 0 until it is known */

/* The first object is the program. */
static int find_program(struct dl_phdr_info *object, size_t bytes, void *user) {
    (void)bytes;
    (void)user;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type != PT_LOAD || !(part->p_flags & PF_X)) continue;
        program_begin = object->dlpi_addr + part->p_vaddr;
        program_end = program_begin + part->p_memsz;
    }
    return 1;
}

__attribute__((constructor)) static void begin(void) { dl_iterate_phdr(find_program, NULL); }

__attribute__((destructor)) static void say(void) {
    if (getenv("REFUSE_AT")) return;
    fprintf(stderr, "refuse_at:");
    for (int i = 0; i < PLACES; i++)
        if (first_of[i]) fprintf(stderr, " %ld", first_of[i]);
    fprintf(stderr, "\n");
}

static void note_place(uintptr_t caller, long number) {
    for (int i = 0; i < PLACES; i++) {
        const size_t at = (caller * 2654435761u + (size_t)i) % PLACES;
        uintptr_t none = 0;
        if (atomic_compare_exchange_strong(&place[at], &none, caller)) first_of[at] = number;
        if (place[at] == caller) return;
    }
}

/* caller: where the allocation returns to. */
static int refuses(const void *caller) {
    const char *at = getenv("REFUSE_AT");
    long number;
    if ((uintptr_t)caller < program_begin || (uintptr_t)caller >= program_end) return 0;
    number = atomic_fetch_add(&calls, 1) + 1;
    if (!at) note_place((uintptr_t)caller, number);
    return at && number == atol(at);
}

#define REFUSES refuses(__builtin_return_address(0))
/* the C library's own, under their other names */
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t),
    *__libc_realloc(void *, size_t);
void *malloc(size_t size) { return REFUSES ? NULL : __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return REFUSES ? NULL : __libc_calloc(count, size); }
void *realloc(void *data, size_t size) { return REFUSES ? NULL : __libc_realloc(data, size); }

char *strdup(const char *text) {
    const size_t bytes = strlen(text) + 1;
    char *copy = REFUSES ? NULL : __libc_malloc(bytes);
    return copy ? memcpy(copy, text, bytes) : NULL;
}
