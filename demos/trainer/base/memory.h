/* SPDX-License-Identifier: MIT OR Unlicense */
/* memory.h - host memory of the trainers; the library allocates its own. If an allocation
   fails, the program prints an error and exits. */
#ifndef DEMO_MEMORY_H
#define DEMO_MEMORY_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#ifndef DEMO_MEMORY_EXIT /* exit status; a program may define another */
#define DEMO_MEMORY_EXIT 1
#endif

static inline void demo_out_of_memory(double bytes) {
    fprintf(stderr,
            "error: out of memory: cannot allocate %.0f more bytes; give fewer or shorter "
            "documents, a smaller model, fewer ranks, or a machine with more memory\n",
            bytes);
    /* Not exit(): its handlers would free what other ranks still use. No file is left
       half-written, since files are renamed when they are complete. */
    _exit(DEMO_MEMORY_EXIT);
}

/* Allocates `count` zeroed elements; the caller calls free(). */
static inline void *demo_alloc(int64_t count, size_t size) {
    void *memory = count < 0 || (uint64_t)count > (SIZE_MAX >> 1) / size
                       ? NULL
                       : calloc((size_t)count + !count, size);
    if (!memory) demo_out_of_memory((double)count * (double)size);
    return memory;
}

static inline void *demo_grown(void *memory, size_t bytes) {
    void *larger = realloc(memory, bytes);
    if (!larger) demo_out_of_memory((double)bytes);
    return larger;
}

/* for cJSON_InitHooks */
static inline void *demo_json_alloc(size_t bytes) { return demo_grown(NULL, bytes); }

#ifndef STBDS_REALLOC /* a program may define these, to track allocations */
#define STBDS_REALLOC(context, memory, bytes) demo_grown(memory, bytes)
#define STBDS_FREE(context, memory)           free(memory)
#endif
#include <stb/stb_ds.h>

#endif
