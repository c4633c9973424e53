/* SPDX-License-Identifier: MIT OR Unlicense */
/* races_on_cpu.h - finds every access of a kernel that no barrier orders, whatever the schedule
 * was. Part of cuda_on_cpu.h if seqpar_cuda.cu is compiled with -fsanitize=thread: then the
 * compiler calls the functions below at each load and store. Link without that option, as the
 * sanitizer's own library would define them, too.
 *
 * Two threads of a block may access the same byte, one of them to write, only if a
 * __syncthreads lies in between or, in one warp, a __syncwarp: shuffles, votes and matrix
 * instructions order no memory. Two blocks of one launch may not at all. Atomics may. */
#ifndef RACES_ON_CPU_H
#define RACES_ON_CPU_H

#define RACES_FREE __attribute__((no_sanitize("thread")))

/* What a byte of shared or device memory has seen. Stamps number the intervals between
   barriers, over all blocks of all launches; 0: never. */
struct cuda_byte {
    uint32_t wrote, read;    /* stamps */
    uint16_t writer, reader; /* threads */
    /* how many __syncwarp the warp had passed then */
    uint16_t wrote_part, read_part;
};

/* A reader is a thread, or several: of one warp since its last __syncwarp, or of any. */
enum { CUDA_SEVERAL_LANES = 1 << 14, CUDA_SEVERAL_WARPS = 1 << 15, CUDA_THREAD = 1023 };

static thread_local struct {
    uint32_t now, block, launch; /* stamps of this interval, and of the first of each */
    uint32_t since;              /* older stamps do not matter to this access */
    uint16_t part[CUDA_MOST_THREADS / CUDA_WARP];
    cuda_byte *shared;
} cuda_races;
static cuda_byte *cuda_races_arena; /* of all device memory; the system gives pages when used */
static uint32_t cuda_races_stamps;

RACES_FREE static cuda_byte *cuda_races_new(size_t bytes) {
    void *room = mmap(NULL, bytes * sizeof(cuda_byte), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) abort();
    return (cuda_byte *)room;
}

RACES_FREE static void cuda_races_barrier(void) {
    cuda_races.now = __atomic_add_fetch(&cuda_races_stamps, 1, __ATOMIC_RELAXED);
    memset(cuda_races.part, 0, sizeof cuda_races.part);
}

RACES_FREE static void cuda_races_block(bool first) {
    cuda_races_barrier();
    cuda_races.block = cuda_races.now;
    if (first) cuda_races.launch = cuda_races.now;
}

RACES_FREE static void cuda_races_warp(int warp) { cuda_races.part[warp]++; }

/* Whether an access with this stamp is not ordered before one of now by another thread. */
RACES_FREE static bool cuda_races_open(uint32_t stamp, int threads, uint16_t part, int me) {
    int other = threads & CUDA_THREAD;
    if (stamp < cuda_races.since) return false;
    if (stamp < cuda_races.block) return true;
    if (stamp < cuda_races.now) return false;
    if (threads & CUDA_SEVERAL_WARPS || other / CUDA_WARP != me / CUDA_WARP) return true;
    return part == cuda_races.part[me / CUDA_WARP] &&
           (threads & CUDA_SEVERAL_LANES || other != me);
}

[[noreturn]] RACES_FREE static void cuda_races_say(const char *what, int threads) {
    char text[160];
    snprintf(text, sizeof text, "%s thread %d%s, and no barrier lies in between", what,
             threads & CUDA_THREAD,
             threads & (CUDA_SEVERAL_LANES | CUDA_SEVERAL_WARPS) ? " and others" : "");
    cuda_die(text);
}

RACES_FREE static void cuda_races_read(cuda_byte *b, int me) {
    int warp = me / CUDA_WARP, more = me;
    if (cuda_races_open(b->wrote, b->writer, b->wrote_part, me))
        cuda_races_say("it reads what was written by", b->writer);
    if (b->read == cuda_races.now) {
        int last = b->reader & CUDA_THREAD;
        more |= b->reader & CUDA_SEVERAL_WARPS;
        if (last / CUDA_WARP != warp) more |= CUDA_SEVERAL_WARPS;
        if (b->read_part == cuda_races.part[warp]) {
            more |= b->reader & CUDA_SEVERAL_LANES;
            if (last != me) more |= CUDA_SEVERAL_LANES;
        }
    }
    b->read = cuda_races.now;
    b->reader = (uint16_t)more;
    b->read_part = cuda_races.part[warp];
}

RACES_FREE static void cuda_races_write(cuda_byte *b, int me) {
    if (cuda_races_open(b->wrote, b->writer, b->wrote_part, me))
        cuda_races_say("it overwrites what was written by", b->writer);
    if (cuda_races_open(b->read, b->reader, b->read_part, me))
        cuda_races_say("it overwrites what was read by", b->reader);
    b->wrote = cuda_races.now;
    b->writer = (uint16_t)me;
    b->wrote_part = cuda_races.part[me / CUDA_WARP];
}

/* The record of a byte of shared or device memory; NULL for other memory. */
RACES_FREE static cuda_byte *cuda_races_of(const char *at) {
    const char *shared = (const char *)cuda_here->shared;
    cuda_races.since = cuda_races.launch;
    if (at >= shared && at < shared + CUDA_MOST_SHARED) {
        cuda_races.since = cuda_races.block; /* each block has its own */
        if (!cuda_races.shared) cuda_races.shared = cuda_races_new(CUDA_MOST_SHARED);
        return cuda_races.shared + (at - shared);
    }
    /* not by cuda_in_arena, whose own loads are looked at */
    return cuda_arena.base && at >= cuda_arena.base && at < cuda_arena.base + CUDA_ARENA
               ? cuda_races_arena + (at - cuda_arena.base)
               : NULL;
}

RACES_FREE static inline void cuda_races_see(const void *at, size_t bytes, bool writes) {
    cuda_byte *b;
    int me;
    if (!cuda_here || !cuda_here->alive || !(b = cuda_races_of((const char *)at))) return;
    me = cuda_here->running->number;
    for (size_t i = 0; i < bytes; i++)
        if (writes)
            cuda_races_write(b + i, me);
        else
            cuda_races_read(b + i, me);
}

/* ---- what the compiler calls ---- */

#define RACES_ACCESS(bytes) \
    RACES_FREE void __tsan_read##bytes(void *at) { cuda_races_see(at, bytes, false); } \
    RACES_FREE void __tsan_write##bytes(void *at) { cuda_races_see(at, bytes, true); }
#define RACES_UNALIGNED(bytes) \
    RACES_FREE void __tsan_unaligned_read##bytes(void *at) { \
        cuda_races_see(at, bytes, false); \
    } \
    RACES_FREE void __tsan_unaligned_write##bytes(void *at) { cuda_races_see(at, bytes, true); }
extern "C" {
RACES_ACCESS(1)
RACES_ACCESS(2)
RACES_ACCESS(4)
RACES_ACCESS(8)
RACES_ACCESS(16)
RACES_UNALIGNED(2)
RACES_UNALIGNED(4)
RACES_UNALIGNED(8)
RACES_UNALIGNED(16)
RACES_FREE void __tsan_read_range(void *at, size_t bytes) { cuda_races_see(at, bytes, false); }
RACES_FREE void __tsan_write_range(void *at, size_t bytes) { cuda_races_see(at, bytes, true); }
RACES_FREE void __tsan_init(void) {}
RACES_FREE void __tsan_func_entry(void *) {}
RACES_FREE void __tsan_func_exit(void) {}
RACES_FREE void __tsan_vptr_read(void **) {}
RACES_FREE void __tsan_vptr_update(void **, void *) {}
/* atomics, which are no races */
RACES_FREE int __tsan_atomic32_fetch_add(int *to, int value, int) {
    return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST);
}
RACES_FREE long __tsan_atomic64_fetch_add(long *to, long value, int) {
    return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST);
}
RACES_FREE long __tsan_atomic64_load(const long *from, int) {
    return __atomic_load_n(from, __ATOMIC_SEQ_CST);
}
RACES_FREE void __tsan_atomic64_store(long *to, long value, int) {
    __atomic_store_n(to, value, __ATOMIC_SEQ_CST);
}
RACES_FREE unsigned char __tsan_atomic8_load(const unsigned char *from, int) {
    return __atomic_load_n(from, __ATOMIC_SEQ_CST);
}
}
#endif
