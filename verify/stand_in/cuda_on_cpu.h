/* SPDX-License-Identifier: MIT OR Unlicense */
/* cuda_on_cpu.h - runs the kernels of seqpar_cuda.cu on a CPU, to test their logic where there
 * is no GPU.
 *
 *     g++ -x c++ -include cuda_on_cpu.h -c seqpar_cuda.cu
 *
 * One fiber per thread of a block, blocks one after the other. A fiber runs until it has to
 * synchronize: __syncthreads, a shuffle, a vote, a matrix instruction. The order of warps, and
 * of lanes in a warp, is drawn from cuda_on_cpu_seed: if bits depend on the seed, a barrier is
 * missing. With -fsanitize=thread, races_on_cpu.h finds it whatever the order.
 * Shared memory is filled with NaN when a block begins. Device memory is accessible only to
 * kernels and copies: an access by host code is reported and ends the program. Matrix
 * instructions follow the fragment tables of PTX ISA 9.7.14 (mma.m16n8k16, m16n8k8, ldmatrix).
 *
 * Streams run late: a launch, a copy or a record is queued, with its arguments at the call,
 * until somebody waits. Then operations run in an order drawn from the seed; seed % 3 says how
 * often they run earlier (0 never, 1 seldom, 2 often). Pageable memory is read at the call,
 * pinned and device memory when the copy runs, and results reach the host only then, so a
 * missing wait shows as other numbers. CUDA_ON_CPU_SYNC=1 (cuda_on_cpu_late 0) runs all in the
 * order of calls, to tell such a fault from others; CUDA_ON_CPU_SEED=n sets the seed. A stream
 * can be captured and replayed; a call that a capture forbids breaks it and is reported. */
#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <utility>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define SEQPAR_CUDA_ON_CPU 1
#define __global__         static
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

struct int2 {
    int x, y;
};

static inline int2 make_int2(int x, int y) {
    int2 v = {x, y};
    return v;
}

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

/* ---- fibers ---- */

enum {
    CUDA_WARP = 32,
    CUDA_MOST_THREADS = 1024,
    CUDA_STACK = 96 * 1024,
    CUDA_MOST_SHARED = 227 * 1024,
    CUDA_WORDS = 12
};

struct cuda_warp {
    int arrived, generation, alive;
    /* what the lanes that have arrived are at */
    const char *meeting;
    /* what they brought, by the parity of the generation */
    uint32_t word[2][CUDA_WARP][CUDA_WORDS];
};

struct cuda_fiber {
    dim3 thread;
    int number, done;
    /* runs on when *waits_for differs from `was` */
    const int *waits_for;
    int was;
#if defined(__x86_64__)
    void *stack_pointer;
#else
    ucontext_t context;
#endif
    char *stack;
    void *fake_stack;
};

struct cuda_block {
    dim3 size, index, grid;
    int threads, alive, arrived, generation, any[2][2];
    cuda_warp warp[CUDA_MOST_THREADS / CUDA_WARP];
    cuda_fiber fiber[CUDA_MOST_THREADS];
    cuda_fiber *running;
#if defined(__x86_64__)
    void *scheduler;
#else
    ucontext_t scheduler;
#endif
    void *scheduler_fake_stack;
    const void *scheduler_stack;
    size_t scheduler_stack_bytes;
    void (*body)(void *);
    void *argument;
    const char *kernel;
    size_t shared_bytes;
    alignas(128) unsigned char shared[CUDA_MOST_SHARED];
};

extern "C" {
extern uint64_t cuda_on_cpu_seed;
extern int64_t cuda_on_cpu_fail_at, cuda_on_cpu_calls, cuda_on_cpu_launches,
    cuda_on_cpu_allocated, cuda_on_cpu_full_at, cuda_on_cpu_allocations;
}

uint64_t cuda_on_cpu_seed = 1; /* of the order of fibers; 0: threads in rising order */
int64_t cuda_on_cpu_fail_at;   /* this call of the run time fails; 0: none */
int64_t cuda_on_cpu_calls;     /* calls of the run time that can fail */
int64_t cuda_on_cpu_launches;
/* this allocation and the next fail, so that a retry fails, too; 0: none fails */
int64_t cuda_on_cpu_full_at;
int64_t cuda_on_cpu_allocations;
int64_t cuda_on_cpu_allocated; /* bytes of device memory in use */

static thread_local cuda_block *cuda_here;
#define threadIdx (cuda_here->running->thread)
#define blockIdx  (cuda_here->index)
#define blockDim  (cuda_here->size)
#define gridDim   (cuda_here->grid)

[[noreturn]] static void cuda_die(const char *what) {
    fprintf(stderr, "cuda_on_cpu: kernel %s, block (%u, %u, %u), thread %d: %s\n",
            cuda_here->kernel, cuda_here->index.x, cuda_here->index.y, cuda_here->index.z,
            cuda_here->running ? cuda_here->running->number : -1, what);
    abort();
}

#if defined(__x86_64__)
/* Saves the registers that a called function must preserve, and changes stacks. Jumps, as the
   processor would mispredict a return to another stack. */
extern "C" void cuda_on_cpu_switch(void **save, void *to);
__asm__(".text\n.globl cuda_on_cpu_switch\n.type "
        "cuda_on_cpu_switch,@function\ncuda_on_cpu_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\npop %rcx\njmp *%rcx\n"
        ".size cuda_on_cpu_switch, .-cuda_on_cpu_switch\n");
#endif

static void cuda_to_fiber(cuda_block *b, cuda_fiber *f) {
    b->running = f;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&b->scheduler_fake_stack, f->stack, CUDA_STACK);
#endif
#if defined(__x86_64__)
    cuda_on_cpu_switch(&b->scheduler, f->stack_pointer);
#else
    swapcontext(&b->scheduler, &f->context);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(b->scheduler_fake_stack, NULL, NULL);
#endif
}

static void cuda_to_scheduler(cuda_block *b, cuda_fiber *f) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(f->done ? NULL : &f->fake_stack, b->scheduler_stack,
                                   b->scheduler_stack_bytes);
#endif
#if defined(__x86_64__)
    cuda_on_cpu_switch(&f->stack_pointer, b->scheduler);
#else
    swapcontext(&f->context, &b->scheduler);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(f->fake_stack, &b->scheduler_stack,
                                    &b->scheduler_stack_bytes);
#endif
}

static void cuda_fiber_main(void) {
    cuda_block *b = cuda_here;
    cuda_fiber *f = b->running;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(NULL, &b->scheduler_stack, &b->scheduler_stack_bytes);
#endif
    b->body(b->argument);
    f->done = 1;
    b->alive--;
    b->warp[f->number / CUDA_WARP].alive--;
    cuda_to_scheduler(b, f);
}

static void cuda_fiber_start(cuda_block *b, int number) {
    cuda_fiber *f = &b->fiber[number];
    if (!f->stack)
        f->stack = (char *)mmap(NULL, CUDA_STACK, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    f->number = number;
    f->thread = dim3((unsigned)number % b->size.x, (unsigned)number / b->size.x % b->size.y,
                     (unsigned)number / b->size.x / b->size.y);
    f->done = 0;
    f->waits_for = NULL;
#if defined(__x86_64__)
    void **top = (void **)(f->stack + CUDA_STACK - 64);
    *--top = NULL;
    /* where the first switch returns to, on a stack aligned like that of a call */
    *--top = (void *)cuda_fiber_main;
    f->stack_pointer = top - 6;
    memset(f->stack_pointer, 0, 6 * sizeof *top);
#else
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack;
    f->context.uc_stack.ss_size = CUDA_STACK;
    f->context.uc_link = NULL;
    makecontext(&f->context, cuda_fiber_main, 0);
#endif
}

static void cuda_wait(const int *word, int was) {
    cuda_fiber *f = cuda_here->running;
    f->waits_for = word;
    f->was = was;
    cuda_to_scheduler(cuda_here, f);
}

static uint64_t cuda_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

#if defined(__SANITIZE_THREAD__)
static void cuda_races_block(bool first);
static void cuda_races_barrier(void);
static void cuda_races_warp(int warp);
#else
static inline void cuda_races_block(bool) {}
static inline void cuda_races_barrier(void) {}
static inline void cuda_races_warp(int) {}
#endif

static void cuda_block_begin(cuda_block *b) {
    memset(b->shared, 0xff, b->shared_bytes);
    memset(b->warp, 0, sizeof *b->warp * (size_t)b->threads / CUDA_WARP);
    b->alive = b->threads;
    b->arrived = b->generation = 0;
    b->any[0][0] = b->any[1][0] = -1;
    for (int i = 0; i < b->threads; i++) {
        cuda_fiber_start(b, i);
        b->warp[i / CUDA_WARP].alive++;
    }
    cuda_races_block(!b->index.x && !b->index.y && !b->index.z);
}

/* Draws which warps run first: with seed 0 those of low numbers. */
static void cuda_order_draw(int *order, int warps, uint64_t *draw) {
    for (int i = 0; i < warps; i++) {
        int at = cuda_on_cpu_seed ? (int)((*draw = cuda_mix(*draw + 1)) % (unsigned)(i + 1))
                                  : i;
        order[i] = order[at];
        order[at] = i;
    }
}

/* Runs each lane of a warp that can go on, beginning with a drawn one. Returns whether there
   was any. */
static bool cuda_warp_run(cuda_block *b, int warp, uint64_t *draw) {
    int start = 0, turn = 1;
    bool moved = false;
    if (cuda_on_cpu_seed) {
        *draw = cuda_mix(*draw + 1);
        start = (int)(*draw % CUDA_WARP);
        turn = *draw >> 40 & 1 ? 1 : CUDA_WARP - 1;
    }
    for (int i = 0; i < CUDA_WARP; i++) {
        cuda_fiber *f = &b->fiber[warp * CUDA_WARP + (start + i * turn) % CUDA_WARP];
        if (f->done || (f->waits_for && *f->waits_for == f->was)) continue;
        f->waits_for = NULL;
        cuda_to_fiber(b, f);
        moved = true;
    }
    return moved;
}

/* Runs all fibers of a block to their ends. A warp runs until all its lanes wait for other
   warps or have ended, and only then the next one, so that it is as far ahead as barriers let
   it: what it writes too early, others read. Each barrier draws another order of warps. */
static void cuda_block_run(cuda_block *b) {
    uint64_t draw = cuda_mix(cuda_on_cpu_seed + b->index.x * 977u + b->index.y * 31u);
    int order[CUDA_MOST_THREADS / CUDA_WARP], warps = b->threads / CUDA_WARP, drawn = -1;
    cuda_block_begin(b);
    for (int i = 0; b->alive;) {
        if (drawn != b->generation) {
            cuda_order_draw(order, warps, &draw);
            drawn = b->generation;
            i = 0;
        }
        if (cuda_warp_run(b, order[i], &draw)) continue;
        if (++i == warps)
            cuda_die(
                "all threads wait, for different things: a barrier that not all of them reach");
    }
}

/* ---- what threads do together ---- */

static inline void __syncthreads(void) {
    cuda_block *b = cuda_here;
    if (b->alive != b->threads) cuda_die("__syncthreads after a thread of the block has ended");
    if (++b->arrived == b->threads) {
        b->arrived = 0;
        b->generation++;
        cuda_races_barrier();
        return;
    }
    cuda_wait(&b->generation, b->generation);
}

static inline int __syncthreads_or(int predicate) {
    cuda_block *b = cuda_here;
    int generation = b->generation, *any = b->any[generation & 1];
    if (any[0] != generation) {
        any[0] = generation;
        any[1] = 0;
    }
    any[1] |= predicate != 0;
    __syncthreads();
    return any[1];
}

/* All lanes bring words and see those of the others: (32, CUDA_WORDS). The last to arrive
   calls `together` upon all of them. */
template <int COUNT>
static inline const uint32_t (
    *cuda_meet(const char *meeting, const uint32_t *words,
               void (*together)(uint32_t (*all)[CUDA_WORDS]) = NULL))[CUDA_WORDS] {
    cuda_fiber *f = cuda_here->running;
    cuda_warp *w = &cuda_here->warp[f->number / CUDA_WARP];
    int generation = w->generation, parity = generation & 1;
    if (w->arrived && w->meeting != meeting && strcmp(w->meeting, meeting))
        cuda_die("lanes of a warp meet in different instructions");
    w->meeting = meeting;
    for (int i = 0; i < COUNT; i++) w->word[parity][f->number % CUDA_WARP][i] = words[i];
    if (++w->arrived == CUDA_WARP) {
        if (together) together(w->word[parity]);
        w->arrived = 0;
        w->generation++;
    } else
        cuda_wait(&w->generation, generation);
    return w->word[parity];
}

static inline void __syncwarp(unsigned mask = 0xffffffffu) {
    (void)mask;
    cuda_meet<0>("__syncwarp", NULL, [](uint32_t(*)[CUDA_WORDS]) {
        cuda_races_warp(cuda_here->running->number / CUDA_WARP);
    });
}

template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
    static_assert(sizeof(T) % 4 == 0, "whole words");
    uint32_t words[sizeof(T) / 4];
    (void)mask;
    memcpy(words, &value, sizeof value);
    const uint32_t(*all)[CUDA_WORDS] = cuda_meet<(int)(sizeof(T) / 4)>("__shfl_xor_sync",
                                                                       words);
    memcpy(&value, all[(cuda_here->running->number ^ lane_mask) % CUDA_WARP], sizeof value);
    return value;
}

static inline int __any_sync(unsigned mask, int predicate) {
    uint32_t word = predicate != 0;
    (void)mask;
    const uint32_t(*all)[CUDA_WORDS] = cuda_meet<1>("__any_sync", &word);
    for (int i = 0; i < CUDA_WARP; i++)
        if (all[i][0]) return 1;
    return 0;
}

static inline unsigned long long atomicAdd(unsigned long long *to, unsigned long long value) {
    return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}

static inline float __fmul_rn(float a, float b) {
    volatile float c = a * b;
    return c;
}

static inline float __fadd_rn(float a, float b) {
    volatile float c = a + b;
    return c;
}

static inline uint32_t __umulhi(uint32_t a, uint32_t b) {
    return (uint32_t)((uint64_t)a * b >> 32);
}

static inline uint32_t __float_as_uint(float x) {
    uint32_t y;
    memcpy(&y, &x, 4);
    return y;
}

static inline float __uint_as_float(uint32_t x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}

/* ---- matrix instructions, by their fragment tables ---- */

static inline float cuda_bf16(uint32_t bits) { return __uint_as_float(bits << 16); }

/* Tensor cores add exactly and truncate once. */
static inline float cuda_truncated(double sum) {
    float x = (float)sum;
    return fabs((double)x) > fabs(sum) && fabs(sum) <= 3e38 ? nextafterf(x, 0) : x;
}

/* c (16, 8) += a (16, k) b (k, 8), whose registers the lanes have brought; pairs: two bf16 to
   a word, else one fp32. */
enum { CUDA_MMA_A = 4, CUDA_MMA_B = 2, CUDA_MMA_C = 4, CUDA_MMA_WORDS = 10 };
template <bool PAIRS> static void cuda_mma_together(uint32_t (*all)[CUDA_WORDS]) {
    enum { K = PAIRS ? 16 : 8, COLUMNS = 8 };
    float a[16][K], b[K][COLUMNS], c[16][COLUMNS];
    for (int lane = 0; lane < CUDA_WARP; lane++) {
        int group = lane / 4, t = lane % 4;
        const uint32_t *word = all[lane];
        for (int i = 0; i < CUDA_MMA_A + CUDA_MMA_B; i++) {
            bool of_a = i < CUDA_MMA_A;
            /* the half of k that the register holds, and its row of a */
            int half = of_a ? i / 2 : i - CUDA_MMA_A, row = group + (i & 1 ? 8 : 0);
            for (int j = 0; j < (PAIRS ? 2 : 1); j++) {
                int k = PAIRS ? 8 * half + 2 * t + j : 4 * half + t;
                float x = PAIRS ? cuda_bf16(j ? word[i] >> 16 : word[i] & 0xffff)
                                : __uint_as_float(word[i] & 0xffffe000u);
                if (of_a)
                    a[row][k] = x;
                else
                    b[k][group] = x;
            }
        }
        for (int i = 0; i < CUDA_MMA_C; i++)
            c[group + (i >= 2 ? 8 : 0)][2 * t + (i & 1)] = __uint_as_float(
                word[CUDA_MMA_A + CUDA_MMA_B + i]);
    }
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < COLUMNS; column++) {
            double sum = c[row][column];
            for (int k = 0; k < K; k++) sum += (double)a[row][k] * (double)b[k][column];
            c[row][column] = cuda_truncated(sum);
        }
    for (int lane = 0; lane < CUDA_WARP; lane++)
        for (int i = 0; i < CUDA_MMA_C; i++)
            all[lane][CUDA_MMA_A + CUDA_MMA_B + i] = __float_as_uint(
                c[lane / 4 + (i >= 2 ? 8 : 0)][2 * (lane % 4) + (i & 1)]);
}

template <bool PAIRS>
static inline void cuda_mma(float c[4], const uint32_t *a, const uint32_t *b) {
    uint32_t words[CUDA_MMA_WORDS];
    memcpy(words, a, CUDA_MMA_A * 4);
    memcpy(words + CUDA_MMA_A, b, CUDA_MMA_B * 4);
    memcpy(words + CUDA_MMA_A + CUDA_MMA_B, c, CUDA_MMA_C * 4);
    const uint32_t(*all)[CUDA_WORDS] = cuda_meet<CUDA_MMA_WORDS>(
        PAIRS ? "mma.m16n8k16.bf16" : "mma.m16n8k8.tf32", words, cuda_mma_together<PAIRS>);
    memcpy(c, all[cuda_here->running->number % CUDA_WARP] + CUDA_MMA_A + CUDA_MMA_B,
           CUDA_MMA_C * 4);
}

static inline void seqpar_cuda_mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    cuda_mma<true>(c, a, b);
}

static inline void seqpar_cuda_mma_tf32(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    cuda_mma<false>(c, a, b);
}

/* cvt.rna.tf32.f32: to nearest, ties away */
static inline uint32_t seqpar_cuda_tf32(float x) {
    uint32_t bits = __float_as_uint(x);
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & 0xffffe000u;
}

static inline float seqpar_cuda_exp2(float x) { return exp2f(x); }

/* Bank conflicts of loads from shared memory. */
extern "C" {
extern int64_t cuda_on_cpu_phases, cuda_on_cpu_conflicts;
}

/* ldmatrix is always counted, loads of words only with cuda_on_cpu_count_words */
int64_t cuda_on_cpu_phases, cuda_on_cpu_conflicts;
/* of lanes whose accesses are one phase: further rounds that the fullest bank needs */
static inline int cuda_conflicts(const uint64_t *address, int lanes, int words) {
    unsigned hit[32] = {0}, most = 0;
    for (int i = 0; i < lanes; i++)
        for (int w = 0; w < words; w++) {
            unsigned bank = (unsigned)((address[i] / 4 + (unsigned)w) % 32), again = 0;
            for (int j = 0; j < i; j++) again |= address[j] == address[i];
            if (!again) hit[bank]++;
            most = hit[bank] > most ? hit[bank] : most;
        }
    return most > 1 ? (int)most - 1 : 0;
}

static inline void cuda_count_banks(const uint64_t *address, int lanes, int words) {
    cuda_on_cpu_phases++;
    cuda_on_cpu_conflicts += cuda_conflicts(address, lanes, words);
}

/* ldmatrix.x4.trans, four 8 x 8 matrices of 16-bit elements: lane i passes the address of row
   i % 8 of matrix i / 8, and gets elements (2 t, group) and (2 t + 1, group) of each matrix. */
static inline void seqpar_cuda_load_matrices_transposed(uint32_t r[4], const void *row) {
    uint32_t words[2];
    uint64_t address[CUDA_WARP];
    int lane = cuda_here->running->number % CUDA_WARP, group = lane / 4, t = lane % 4;
    memcpy(words, &row, 8);
    if ((uintptr_t)row % 16) cuda_die("ldmatrix of a row that is not aligned to 16 bytes");
    const uint32_t(*all)[CUDA_WORDS] = cuda_meet<2>("ldmatrix.x4.trans", words);
    for (int i = 0; i < CUDA_WARP; i++) memcpy(&address[i], all[i], 8);
    if (lane == 0)
        for (int m = 0; m < 4; m++) cuda_count_banks(address + 8 * m, 8, 4);
    for (int m = 0; m < 4; m++) {
        const uint16_t *even = (const uint16_t *)address[8 * m + 2 * t];
        const uint16_t *odd = (const uint16_t *)address[8 * m + 2 * t + 1];
        r[m] = even[group] | (uint32_t)odd[group] << 16;
    }
}

/* Bank conflicts when all lanes of a warp load one word or store four. Counted only on demand,
   because the lanes must synchronize for it, which is slow. */
extern "C" {
extern int cuda_on_cpu_count_words;
extern int64_t cuda_on_cpu_store_phases, cuda_on_cpu_store_conflicts;
}

int cuda_on_cpu_count_words;
int64_t cuda_on_cpu_store_phases, cuda_on_cpu_store_conflicts;
static inline void cuda_count_words(const char *meeting, const void *at, int count,
                                    int64_t *phases, int64_t *conflicts) {
    uint32_t words[2];
    uint64_t address[CUDA_WARP];
    int lanes = CUDA_WARP / count; /* 128 bytes at a time */
    memcpy(words, &at, 8);
    const uint32_t(*all)[CUDA_WORDS] = cuda_meet<2>(meeting, words);
    if (cuda_here->running->number % CUDA_WARP) return;
    for (int i = 0; i < CUDA_WARP; i++) memcpy(&address[i], all[i], 8);
    for (int i = 0; i < count; i++, ++*phases)
        *conflicts += cuda_conflicts(address + lanes * i, lanes, count);
}

static inline void cuda_count_load(const void *at) {
    if (cuda_on_cpu_count_words)
        cuda_count_words("a load of a shared word", at, 1, &cuda_on_cpu_phases,
                         &cuda_on_cpu_conflicts);
}

static inline uint32_t seqpar_cuda_shared_word(const void *at) {
    uint32_t value;
    if ((uintptr_t)at % 4) cuda_die("a load of a word that is not aligned");
    cuda_count_load(at);
    memcpy(&value, at, 4);
    return value;
}

static inline void seqpar_cuda_shared_store(void *at, uint4 x) {
    if (cuda_on_cpu_count_words)
        cuda_count_words("a store of shared words", at, 4, &cuda_on_cpu_store_phases,
                         &cuda_on_cpu_store_conflicts);
    *(uint4 *)at = x;
}

/* ---- the run time: memory, streams, launches ---- */

typedef int cudaError_t;
enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorNoDevice = 100,
    cudaErrorLaunchFailure = 719,
    cudaErrorStreamCaptureUnsupported = 900
};

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};

enum {
    cudaStreamNonBlocking = 1,
    cudaEventDisableTiming = 2,
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8
};

enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone,
    cudaStreamCaptureStatusActive,
    cudaStreamCaptureStatusInvalidated
};

typedef struct cuda_stream *cudaStream_t;
typedef struct cuda_event *cudaEvent_t;
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};

#define CUDA_ARENA ((size_t)8 << 30)
/* of large pages, which are opened and closed much faster */
#define CUDA_PAGE ((size_t)2 << 20)
struct cuda_piece {
    char *at;
    size_t bytes, asked; /* bytes from `asked` on must stay CUDA_BEHIND */
};
/* a finite number in every type: arithmetic in place changes it, where NaN would stay NaN */
enum { CUDA_BEHIND = 0x5a, CUDA_BEHIND_LEAST = 64 };

enum { CUDA_PIECES = 1 << 16 };
static struct {
    char *base;
    size_t used;
    int open, lives, spares;
    cuda_piece live[CUDA_PIECES], spare[CUDA_PIECES];
    pthread_mutex_t lock;
} cuda_arena = {NULL, 0, 0, 0, 0, {}, {}, PTHREAD_MUTEX_INITIALIZER};

static size_t cuda_arena_pages(void) { /* bytes of all in use */
    return (cuda_arena.used + CUDA_PAGE - 1) & ~(CUDA_PAGE - 1);
}

static void cuda_segfault(int signal_number, siginfo_t *info, void *context) {
    char *at = (char *)info->si_addr;
    (void)context;
    if (at >= cuda_arena.base && at < cuda_arena.base + CUDA_ARENA)
        fprintf(stderr, "cuda_on_cpu: host code touches device memory at offset %zu\n",
                (size_t)(at - cuda_arena.base));
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

/* kernels and copies of all threads at once may touch it */
static void cuda_arena_open(int change) {
    pthread_mutex_lock(&cuda_arena.lock);
    cuda_arena.open += change;
    if (cuda_arena.base && cuda_arena.open == (change > 0))
        mprotect(cuda_arena.base, cuda_arena_pages(),
                 change > 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
    pthread_mutex_unlock(&cuda_arena.lock);
}

static int cuda_failing(void) {
    return __atomic_add_fetch(&cuda_on_cpu_calls, 1, __ATOMIC_RELAXED) == cuda_on_cpu_fail_at;
}

static int cuda_is_full(void) {
    int64_t n = __atomic_add_fetch(&cuda_on_cpu_allocations, 1, __ATOMIC_RELAXED);
    bool full = cuda_on_cpu_full_at &&
                (n == cuda_on_cpu_full_at || n == cuda_on_cpu_full_at + 1);
    return cuda_failing() || full;
}

static int cuda_in_arena(const void *at) {
    return cuda_arena.base && (const char *)at >= cuda_arena.base &&
           (const char *)at < cuda_arena.base + CUDA_ARENA;
}

#if defined(__SANITIZE_THREAD__)
#include "races_on_cpu.h"
#endif

/* ---- streams that run late ---- */

extern "C" {
extern int64_t cuda_on_cpu_late, cuda_on_cpu_waits, cuda_on_cpu_ran;
extern const char *cuda_on_cpu_broke_capture;
}

/* how often the host waited; kernels that have run */
int64_t cuda_on_cpu_waits, cuda_on_cpu_ran;
int64_t cuda_on_cpu_late = getenv("CUDA_ON_CPU_SYNC") ? 0 : 1;
const char *cuda_on_cpu_broke_capture; /* the first call that a capture forbids */
static int cuda_seeded = getenv("CUDA_ON_CPU_SEED")
                             ? (cuda_on_cpu_seed = (uint64_t)atoll(getenv("CUDA_ON_CPU_SEED")),
                                1)
                             : 0;

#include "cuda_on_cpu_bridge.h"
void cuda_on_cpu_open_memory(int change) { cuda_arena_open(change); }
const cuda_on_cpu_bridge *cuda_on_cpu_elsewhere;

struct cuda_event {
    int64_t asked, done;
    struct cuda_stream *on;
    void *elsewhere; /* its counterpart there */
};

struct cuda_op {
    cuda_op *next = NULL;
    cuda_event *event = NULL; /* runs only when this has come so far */
    int64_t ticket = 0;
    virtual void run() = 0;
    virtual ~cuda_op() {}
};

template <class F> struct cuda_op_of final : cuda_op {
    F body;
    explicit cuda_op_of(F f) : body(std::move(f)) {}
    void run() override { body(); }
};

struct cuda_graph {
    cuda_op *head, **tail;
    int broken;
};

struct cuda_stream {
    cuda_stream *next;
    cuda_op *head, **tail;
    bool busy; /* somebody runs the first of them */
    cuda_graph *capture;
    pthread_t owner;
};

static struct {
    cuda_stream *streams;
    uint64_t draw;
    pthread_mutex_t lock;
    pthread_cond_t moved;
} cuda_late = {NULL, 0, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER};

static thread_local cuda_stream *cuda_captured; /* by this thread */
/* elsewhere: the stream of this thread's device */
static thread_local cuda_stream *cuda_mine;

static uint64_t cuda_draw(void) {
    return cuda_late.draw = cuda_mix(cuda_late.draw + cuda_on_cpu_seed + 1);
}

/* For calls that CUDA forbids during a capture: if this thread captures, breaks the capture and
   returns 1. */
static int cuda_forbidden(const char *what) {
    if (!cuda_captured) return 0;
    cuda_captured->capture->broken = 1;
    if (!cuda_on_cpu_broke_capture) cuda_on_cpu_broke_capture = what;
    return 1;
}

/* Runs the first operation of a stream that can go on: half the time `target`'s, otherwise a
   random stream's, seldom one of another thread. The caller holds the lock. */
static bool cuda_step(cuda_stream *target) {
    uint64_t draw = cuda_draw();
    cuda_stream *chosen = NULL;
    unsigned seen = 0;
    for (cuda_stream *s = cuda_late.streams; s; s = s->next) {
        if (!s->head || s->busy || (s->head->event && s->head->event->done < s->head->ticket))
            continue;
        if (s == target && draw & 1) {
            chosen = s;
            break;
        }
        if (target && s != target && !pthread_equal(s->owner, pthread_self()) &&
            (draw >> 1 & 7) && chosen)
            continue;
        if ((draw >> 8) % ++seen == 0) chosen = s;
    }
    if (!chosen) return false;
    cuda_op *op = chosen->head;
    chosen->busy = true;
    pthread_mutex_unlock(&cuda_late.lock);
    op->run();
    pthread_mutex_lock(&cuda_late.lock);
    chosen->busy = false;
    chosen->head = op->next;
    if (!chosen->head) chosen->tail = &chosen->head;
    delete op;
    pthread_cond_broadcast(&cuda_late.moved);
    return true;
}

static bool cuda_pending(const cuda_stream *only, bool busy) {
    for (const cuda_stream *s = cuda_late.streams; s; s = s->next)
        if ((!only || s == only) && s->head && (!busy || s->busy)) return true;
    return false;
}

/* Until the stream, or all of them, have nothing to do. */
static void cuda_work_off(cuda_stream *stream) {
    if (cuda_on_cpu_elsewhere) {
        if (stream || cuda_mine) cuda_on_cpu_elsewhere->settle(stream ? stream : cuda_mine);
        return;
    }
    cuda_arena_open(1);
    pthread_mutex_lock(&cuda_late.lock);
    for (int naps = 0; cuda_pending(stream, false);) {
        if (cuda_step(stream)) continue;
        struct timespec until;
        timespec_get(&until, TIME_UTC);
        until.tv_sec++; /* another thread may bring what a stream waits for */
        naps = pthread_cond_timedwait(&cuda_late.moved, &cuda_late.lock, &until) ? naps + 1 : 0;
        if (naps > 300) {
            fprintf(stderr, "cuda_on_cpu: a stream waits for an event that nobody records\n");
            abort();
        }
    }
    pthread_mutex_unlock(&cuda_late.lock);
    cuda_arena_open(-1);
}

static void cuda_settle(cuda_stream *stream) {
    __atomic_add_fetch(&cuda_on_cpu_waits, 1, __ATOMIC_RELAXED);
    cuda_work_off(stream);
}

static void cuda_run_and_delete(void *operation) {
    cuda_op *op = (cuda_op *)operation;
    cuda_arena_open(1);
    op->run();
    cuda_arena_open(-1);
    delete op;
}

template <class F>
static void cuda_push(cuda_stream *s, F body, cuda_event *event = NULL, int64_t ticket = 0) {
    cuda_op *op = new cuda_op_of<F>(std::move(body));
    op->event = event;
    op->ticket = ticket;
    if (cuda_on_cpu_elsewhere) {
        cuda_on_cpu_elsewhere->push(s, cuda_run_and_delete, op);
        return;
    }
    pthread_mutex_lock(&cuda_late.lock);
    cuda_op ***tail = s->capture ? &s->capture->tail : &s->tail;
    **tail = op;
    *tail = &op->next;
    uint64_t draw = cuda_draw();
    bool ahead = cuda_on_cpu_late && !s->capture && cuda_on_cpu_seed % 3 &&
                 (cuda_on_cpu_seed % 3 == 1 ? draw % 64 : draw % 4) == 0;
    pthread_mutex_unlock(&cuda_late.lock);
    if (!cuda_on_cpu_late && !s->capture) cuda_work_off(s);
    if (!ahead) return;
    cuda_arena_open(1);
    pthread_mutex_lock(&cuda_late.lock);
    for (uint64_t i = 0; i < (draw >> 32 & 7) && cuda_step(NULL); i++) continue;
    pthread_mutex_unlock(&cuda_late.lock);
    cuda_arena_open(-1);
}

/* ---- memory ---- */

struct cuda_pinned_piece {
    cuda_pinned_piece *next;
    char *at;
    size_t bytes;
};

static cuda_pinned_piece *cuda_pinned_list;
static bool cuda_pageable(const void *data) {
    bool found = cuda_in_arena(data);
    pthread_mutex_lock(&cuda_late.lock);
    for (cuda_pinned_piece *p = cuda_pinned_list; p; p = p->next)
        found |= (const char *)data >= p->at && (const char *)data < p->at + p->bytes;
    pthread_mutex_unlock(&cuda_late.lock);
    return !found;
}

static inline cudaError_t cudaMallocHost(void **data, size_t bytes) {
    *data = NULL;
    if (cuda_forbidden("cudaMallocHost")) return cudaErrorStreamCaptureUnsupported;
    if (cuda_is_full()) return cudaErrorMemoryAllocation;
    *data = malloc(bytes + 1);
    pthread_mutex_lock(&cuda_late.lock);
    cuda_pinned_list = new cuda_pinned_piece{cuda_pinned_list, (char *)*data, bytes};
    pthread_mutex_unlock(&cuda_late.lock);
    return cudaSuccess;
}

static inline cudaError_t cudaFreeHost(void *data) {
    if (!data) return cudaSuccess;
    if (cuda_forbidden("cudaFreeHost")) return cudaErrorStreamCaptureUnsupported;
    cuda_settle(NULL);
    pthread_mutex_lock(&cuda_late.lock);
    for (cuda_pinned_piece **p = &cuda_pinned_list; *p; p = &(*p)->next)
        if ((*p)->at == data) {
            cuda_pinned_piece *gone = *p;
            *p = gone->next;
            delete gone;
            break;
        }
    pthread_mutex_unlock(&cuda_late.lock);
    free(data);
    return cudaSuccess;
}

/* Takes a freed piece of the same size, else the end of the arena. Memory is filled with NaN,
   so that reads of unwritten memory show. */
static inline cudaError_t cudaMalloc(void **data, size_t bytes) {
    size_t size = 4096;
    if (cuda_forbidden("cudaMalloc")) return cudaErrorStreamCaptureUnsupported;
    if (cuda_is_full()) return cudaErrorMemoryAllocation;
#if defined(__SANITIZE_ADDRESS__)
    size = 8192; /* what is left behind the bytes is poisoned */
#endif
    /* a power of two, so that what is given back fits the next; there is always something behind */
    while (size < bytes + CUDA_BEHIND_LEAST) size *= 2;
    pthread_mutex_lock(&cuda_arena.lock);
    if (!cuda_arena.base) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_sigaction = cuda_segfault;
        action.sa_flags = SA_SIGINFO;
        sigaction(SIGSEGV, &action, NULL);
        char *base = (char *)mmap(NULL, CUDA_ARENA + CUDA_PAGE, PROT_NONE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        cuda_arena.base = base + (CUDA_PAGE - (uintptr_t)base % CUDA_PAGE) % CUDA_PAGE;
        (void)madvise(cuda_arena.base, CUDA_ARENA, MADV_HUGEPAGE);
#if defined(__SANITIZE_THREAD__)
        cuda_races_arena = cuda_races_new(CUDA_ARENA);
#endif
    }
    *data = NULL;
    for (int i = 0; i < cuda_arena.spares && !*data; i++)
        if (cuda_arena.spare[i].bytes == size) {
            *data = cuda_arena.spare[i].at;
            cuda_arena.spare[i] = cuda_arena.spare[--cuda_arena.spares];
        }
    if (!*data && cuda_arena.used + size <= CUDA_ARENA) {
        *data = cuda_arena.base + cuda_arena.used;
        cuda_arena.used += size;
        if (cuda_arena.open)
            mprotect(cuda_arena.base, cuda_arena_pages(), PROT_READ | PROT_WRITE);
    }
    if (*data) {
        cuda_on_cpu_allocated += (int64_t)size;
        cuda_arena.live[cuda_arena.lives++] = {(char *)*data, size, bytes};
    }
    pthread_mutex_unlock(&cuda_arena.lock);
    if (!*data) return cudaErrorMemoryAllocation;
    cuda_arena_open(1);
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(*data, bytes);
    memset(*data, 0xff, bytes);
    __asan_poison_memory_region((char *)*data + bytes, size - bytes);
#else
    memset(*data, 0xff, bytes);
    memset((char *)*data + bytes, CUDA_BEHIND, size - bytes);
#endif
    cuda_arena_open(-1);
    return cudaSuccess;
}

/* A kernel that writes behind its memory would write into somebody else's. */
static void cuda_check_behind(const cuda_piece *p) {
#if !defined(__SANITIZE_ADDRESS__)
    size_t i = p->asked;
    cuda_arena_open(1);
    while (i < p->bytes && (unsigned char)p->at[i] == CUDA_BEHIND) i++;
    cuda_arena_open(-1);
    if (i == p->bytes) return;
    fprintf(stderr,
            "cuda_on_cpu: something was written %zu bytes behind a piece of %zu bytes\n",
            i - p->asked, p->asked);
    abort();
#else
    (void)p;
#endif
}

static inline cudaError_t cudaFree(void *data) {
    cuda_piece gone = {};
    size_t size = 0;
    if (!data) return cudaSuccess;
    if (cuda_forbidden("cudaFree")) return cudaErrorStreamCaptureUnsupported;
    cuda_settle(NULL);
    pthread_mutex_lock(&cuda_arena.lock);
    for (int i = 0; i < cuda_arena.lives; i++)
        if (cuda_arena.live[i].at == data) {
            gone = cuda_arena.live[i];
            size = gone.bytes;
            cuda_arena.live[i] = cuda_arena.live[--cuda_arena.lives];
            break;
        }
    if (!size) {
        fprintf(stderr, "cuda_on_cpu: cudaFree of %p, which cudaMalloc did not return\n", data);
        abort();
    }
    pthread_mutex_unlock(&cuda_arena.lock);
    /* before another thread may be given it */
    cuda_check_behind(&gone);
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(data, size);
#endif
    pthread_mutex_lock(&cuda_arena.lock);
    cuda_arena.spare[cuda_arena.spares].at = (char *)data;
    cuda_arena.spare[cuda_arena.spares++].bytes = size;
    cuda_on_cpu_allocated -= (int64_t)size;
    pthread_mutex_unlock(&cuda_arena.lock);
    return cudaSuccess;
}

static inline cudaError_t cudaMemcpy2DAsync(void *to, size_t to_stride, const void *from,
                                            size_t from_stride, size_t width, size_t rows,
                                            cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    if (cuda_failing()) return cudaErrorLaunchFailure;
    auto move = [=](const char *source, size_t stride) {
        for (size_t i = 0; i < rows; i++)
            memmove((char *)to + i * to_stride, source + i * stride, width);
    };
    if (!cuda_pageable(from)) {
        cuda_push(stream, [=] { move((const char *)from, from_stride); });
        return cudaSuccess;
    }
    if (cuda_forbidden("a copy from pageable memory")) return cudaErrorStreamCaptureUnsupported;
    /* from host to host the host waits */
    if (!cuda_in_arena(to)) {
        cuda_settle(stream);
        move((const char *)from, from_stride);
        return cudaSuccess;
    }
    std::vector<char> source(width * rows);
    for (size_t i = 0; i < rows; i++)
        memcpy(source.data() + i * width, (const char *)from + i * from_stride, width);
    cuda_push(stream,
              [source = std::move(source), move, width] { move(source.data(), width); });
    return cudaSuccess;
}

static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes,
                                          cudaMemcpyKind kind, cudaStream_t stream) {
    return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}

static inline void cuda_on_cpu_spoil(void *data, size_t bytes, cudaStream_t stream) {
    cuda_push(stream, [=] { memset(data, 0xff, bytes); });
}

static inline cudaError_t cudaMemsetAsync(void *data, int value, size_t bytes,
                                          cudaStream_t stream) {
    if (cuda_failing()) return cudaErrorLaunchFailure;
    cuda_push(stream, [=] { memset(data, value, bytes); });
    return cudaSuccess;
}

/* ---- streams, events, graphs ---- */

static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    (void)flags;
    if (cuda_failing()) return cudaErrorMemoryAllocation;
    if (cuda_on_cpu_elsewhere) {
        *stream = (cudaStream_t)cuda_on_cpu_elsewhere->stream_new();
        if (!cuda_mine) cuda_mine = *stream;
        return cudaSuccess;
    }
    cuda_stream *s = new cuda_stream{NULL, NULL, NULL, false, NULL, pthread_self()};
    s->tail = &s->head;
    pthread_mutex_lock(&cuda_late.lock);
    s->next = cuda_late.streams;
    cuda_late.streams = s;
    pthread_mutex_unlock(&cuda_late.lock);
    *stream = s;
    return cudaSuccess;
}

static inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (cuda_on_cpu_elsewhere) {
        if (cuda_mine == stream) cuda_mine = NULL;
        cuda_on_cpu_elsewhere->stream_free(stream);
        return cudaSuccess;
    }
    cuda_settle(stream);
    pthread_mutex_lock(&cuda_late.lock);
    for (cuda_stream **s = &cuda_late.streams; *s; s = &(*s)->next)
        if (*s == stream) {
            *s = stream->next;
            break;
        }
    pthread_mutex_unlock(&cuda_late.lock);
    delete stream;
    return cudaSuccess;
}

static inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (cuda_forbidden("cudaStreamSynchronize")) return cudaErrorStreamCaptureUnsupported;
    cuda_settle(stream); /* and what it then says is of what ran */
    return cuda_failing() ? cudaErrorLaunchFailure : cudaSuccess;
}

static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    (void)flags;
    if (cuda_failing()) return cudaErrorMemoryAllocation;
    *event = new cuda_event{0, 0, NULL,
                            cuda_on_cpu_elsewhere ? cuda_on_cpu_elsewhere->event_new() : NULL};
    return cudaSuccess;
}

static inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    cuda_settle(NULL);
    if (event->elsewhere && cuda_on_cpu_elsewhere)
        cuda_on_cpu_elsewhere->event_free(event->elsewhere);
    delete event;
    return cudaSuccess;
}

static inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    /* allowed, but nothing here needs it */
    if (cuda_forbidden("cudaEventRecord")) return cudaErrorStreamCaptureUnsupported;
    if (cuda_failing()) return cudaErrorLaunchFailure;
    int64_t ticket = __atomic_add_fetch(&event->asked, 1, __ATOMIC_SEQ_CST);
    event->on = stream;
    if (event->elsewhere && cuda_on_cpu_elsewhere)
        return cuda_on_cpu_elsewhere->record(event->elsewhere, stream), cudaSuccess;
    cuda_push(stream, [=] { __atomic_store_n(&event->done, ticket, __ATOMIC_SEQ_CST); });
    return cudaSuccess;
}

static inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                              unsigned flags) {
    (void)flags;
    if (cuda_failing()) return cudaErrorLaunchFailure;
    if (event->elsewhere && cuda_on_cpu_elsewhere)
        return cuda_on_cpu_elsewhere->wait(stream, event->elsewhere), cudaSuccess;
    cuda_push(
        stream, [] {}, event, __atomic_load_n(&event->asked, __ATOMIC_SEQ_CST));
    return cudaSuccess;
}

static inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (cuda_forbidden("cudaEventSynchronize")) return cudaErrorStreamCaptureUnsupported;
    if (cuda_failing()) return cudaErrorLaunchFailure;
    if (cuda_on_cpu_elsewhere) {
        if (event->on) cuda_settle(event->on);
        return cudaSuccess;
    }
    int64_t ticket = __atomic_load_n(&event->asked, __ATOMIC_SEQ_CST);
    cuda_stream waits = {NULL, NULL, NULL, false, NULL, pthread_self()};
    waits.tail = &waits.head;
    pthread_mutex_lock(&cuda_late.lock); /* a stream of its own that waits for the event */
    waits.next = cuda_late.streams;
    cuda_late.streams = &waits;
    pthread_mutex_unlock(&cuda_late.lock);
    cuda_push(
        &waits, [] {}, event, ticket);
    cuda_settle(&waits);
    pthread_mutex_lock(&cuda_late.lock);
    for (cuda_stream **s = &cuda_late.streams; *s; s = &(*s)->next)
        if (*s == &waits) {
            *s = waits.next;
            break;
        }
    pthread_mutex_unlock(&cuda_late.lock);
    return cudaSuccess;
}

static inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                                cudaStreamCaptureStatus *status) {
    *status = cuda_on_cpu_elsewhere || !stream->capture ? cudaStreamCaptureStatusNone
              : stream->capture->broken                 ? cudaStreamCaptureStatusInvalidated
                                                        : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

extern "C" { /* for tests in C, which find these in CUDA's run time, too */
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode) {
    (void)mode;
    stream->capture = new cuda_graph{NULL, NULL, 0};
    stream->capture->tail = &stream->capture->head;
    cuda_captured = stream;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cuda_graph **graph) {
    *graph = stream->capture;
    stream->capture = NULL;
    cuda_captured = NULL;
    return (*graph)->broken ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cuda_graph **exec, cuda_graph *graph,
                                          unsigned long long flags) {
    (void)flags;
    *exec = graph;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cuda_graph *exec, cudaStream_t stream) {
    cuda_push(stream, [=] {
        for (cuda_op *op = exec->head; op; op = op->next) op->run();
    });
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cuda_graph *exec) {
    (void)exec;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cuda_graph *graph) {
    cuda_settle(NULL);
    while (graph->head) {
        cuda_op *op = graph->head;
        graph->head = op->next;
        delete op;
    }
    delete graph;
    return cudaSuccess;
}
}

static inline cudaError_t cudaGetLastError(void) { return cudaSuccess; }
static inline cudaError_t cudaGetDeviceCount(int *count) {
    *count = getenv("CUDA_ON_CPU_NO_DEVICE") ? 0 : 1;
    return *count ? cudaSuccess : cudaErrorNoDevice;
}

static inline cudaError_t cudaSetDevice(int device) {
    (void)device;
    return cuda_failing() ? cudaErrorNoDevice : cudaSuccess;
}

static inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute,
                                                 int device) {
    (void)device;
    *value = attribute == cudaDevAttrMultiProcessorCount ? 3
             : attribute == cudaDevAttrComputeCapabilityMajor
                 ? (getenv("CUDA_ON_CPU_MAJOR") ? atoi(getenv("CUDA_ON_CPU_MAJOR")) : 9)
             : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? CUDA_MOST_SHARED
                                                                    : 0;
    return cudaSuccess;
}

static inline cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = CUDA_ARENA - (size_t)cuda_on_cpu_allocated;
    *total = CUDA_ARENA;
    return cudaSuccess;
}

static inline const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory"
           : error == cudaErrorNoDevice       ? "no CUDA-capable device is detected"
           : error                            ? "unspecified launch failure"
                                              : "no error";
}

template <class F>
static inline cudaError_t cudaFuncSetAttribute(F *kernel, int attribute, int value) {
    (void)kernel;
    (void)attribute;
    return value <= CUDA_MOST_SHARED && !cuda_failing() ? cudaSuccess : cudaErrorLaunchFailure;
}

struct cuda_thread_state { /* of a host thread: kept for its next launch */
    cuda_block *block = NULL;
    ~cuda_thread_state() {
        for (int i = 0; block && i < CUDA_MOST_THREADS; i++)
            if (block->fiber[i].stack) munmap(block->fiber[i].stack, CUDA_STACK);
        free(block);
    }
};

static inline cuda_block *cuda_state(void) {
    static thread_local cuda_thread_state mine;
    if (!mine.block && posix_memalign((void **)&mine.block, 128, sizeof *mine.block) == 0)
        memset((void *)mine.block, 0, sizeof *mine.block);
    return mine.block;
}

template <class F> static inline void cuda_call(void *body) { (*(F *)body)(); }
/* The call of a kernel, with its arguments as they are now. */
template <class K, class... A> static inline auto cuda_bind(K *kernel, A... arguments) {
    return [=] { kernel(arguments...); };
}

/* Runs body() as every thread of every block. */
template <class F>
static inline void cuda_kernel_run(const char *kernel, dim3 grid, dim3 block, size_t shared,
                                   F &body) {
    cuda_block *state = cuda_state();
    if (!state) abort();
    __atomic_add_fetch(&cuda_on_cpu_ran, 1, __ATOMIC_RELAXED);
    cuda_here = state;
    state->kernel = kernel;
    state->shared_bytes = shared;
    state->size = block;
    state->grid = grid;
    state->threads = (int)(block.x * block.y * block.z);
    state->body = cuda_call<F>;
    state->argument = &body;
    state->running = NULL;
    if (state->threads > CUDA_MOST_THREADS || state->threads % CUDA_WARP ||
        shared > CUDA_MOST_SHARED || !grid.x || !grid.y || !grid.z || grid.y > 65535 ||
        grid.z > 65535)
        cuda_die("a launch of impossible size");
    cuda_arena_open(1);
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(state->shared + shared, CUDA_MOST_SHARED - shared);
#endif
    for (state->index.z = 0; state->index.z < grid.z; state->index.z++)
        for (state->index.y = 0; state->index.y < grid.y; state->index.y++)
            for (state->index.x = 0; state->index.x < grid.x; state->index.x++)
                cuda_block_run(state);
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(state->shared, CUDA_MOST_SHARED);
#endif
    cuda_arena_open(-1);
}

template <class F>
static inline cudaError_t cuda_on_cpu_launch(const char *kernel, dim3 grid, dim3 block,
                                             size_t shared, cudaStream_t stream, F body) {
    if (cuda_failing()) return cudaErrorLaunchFailure;
    __atomic_add_fetch(&cuda_on_cpu_launches, 1, __ATOMIC_RELAXED);
    cuda_push(stream, [=]() mutable { cuda_kernel_run(kernel, grid, block, shared, body); });
    return cudaSuccess;
}
#endif
