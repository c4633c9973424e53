/* SPDX-License-Identifier: MIT OR Unlicense */
/* seqpar_cuda.cu - the device table of seqpar.h for CUDA.
 *
 *     nvcc -std=c++17 -O3 -fmad=false -gencode=arch=compute_80,code=sm_80 -c seqpar_cuda.cu
 *
 * Link it with a unit that defines SEQPAR_IMPLEMENTATION, or include it there, and open
 * seqpar_device_cuda(). The rest of a program does not change: ranks of seqpar_run_threads
 * share one GPU, each with a stream and a device of its own. Compiled with -DSEQPAR_CUBLAS
 * (link -lcublas), seqpar_cuda_desc.cublas 1 computes matrix products, but not weight
 * gradients, by cuBLAS. -DSEQPAR_CUDA_HEAD_DIM_MAX=64 (96, 128, 256) compiles kernels only for
 * heads up to this width, since nvcc takes minutes for each of the four widths. Wider heads are
 * then refused; the error names the option.
 *
 *   >>table    host state: memory, lists uploaded once, launches on one stream
 *   >>tile     16 x 8 tiles on tensor cores: one template for fp32 and bf16; sums are fp32
 *   >>machine  fold programs, run by a block or by a thread
 *   >>rows     embedding, norm, RoPE, SwiGLU
 *   >>product  matrix products and weight gradients
 *   >>attn     flash attention from absolute positions
 *   >>vocab    cross-entropy
 *   >>optim    gradient norm, AdamW, SGD
 *
 * Determinism. A number depends only on its own row, its fold program and the shapes of the
 * model. A tile is always computed whole, with zeros for rows beyond the end. Tiles of keys
 * begin where their cell begins. No kernel sums results with atomics. So SP=N gives the bits of
 * SP=1 on one kind of GPU. The bits differ from those of the CPU devices (error rule). */
#include "seqpar.h"
#if SEQPAR_VERSION_MAJOR != 0 || SEQPAR_VERSION_MINOR != 2 || SEQPAR_VERSION_PATCH != 0
#error "seqpar_cuda.cu 0.2.0 needs seqpar.h 0.2.0; take both from one release"
#endif
#if !defined(SEQPAR_CUDA_ON_CPU)
#include <cuda_runtime.h>
#if defined(SEQPAR_CUBLAS)
#include <cublas_v2.h>
#endif
#endif
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifndef SEQPAR_CUDA_HEAD_DIM_MAX
#define SEQPAR_CUDA_HEAD_DIM_MAX 256
#endif
static_assert(SEQPAR_CUDA_HEAD_DIM_MAX == 64 || SEQPAR_CUDA_HEAD_DIM_MAX == 96 ||
                  SEQPAR_CUDA_HEAD_DIM_MAX == 128 || SEQPAR_CUDA_HEAD_DIM_MAX == 256,
              "SEQPAR_CUDA_HEAD_DIM_MAX is 64, 96, 128 or 256");

/* =============================================================================================
   >>table  host state
   ========================================================================================== */

namespace seqpar_cuda {

#if defined(SEQPAR_CUDA_ON_CPU)
#define UNROLL
#define UNROLL_SOME
#define UNROLL_PLAIN
#define NOINLINE
#define SEQPAR_CUDA_SHARED(type) ((type *)cuda_here->shared)
#define SEQPAR_CUDA_LAUNCH(self, kernel, grid, block, shared, ...) \
    launched(self, #kernel, \
             cuda_on_cpu_launch(#kernel, grid, block, shared, (self)->stream, \
                                cuda_bind(kernel, __VA_ARGS__)))
#else
#define UNROLL                   _Pragma("unroll")
#define UNROLL_SOME              _Pragma("unroll 4")
#define UNROLL_PLAIN             _Pragma("unroll (EXTRAS ? 1 : 64)")
#define NOINLINE                 __noinline__
extern __shared__ __align__(128) unsigned char shared_bytes[];
#define SEQPAR_CUDA_SHARED(type) ((type *)shared_bytes)
#define SEQPAR_CUDA_LAUNCH(self, kernel, grid, block, shared, ...) \
    (kernel<<<grid, block, shared, (self)->stream>>>(__VA_ARGS__), \
     launched(self, #kernel, cudaGetLastError()))
#endif

enum { WARP = 32, BLOCK = 128, LISTS = 512 };
#if defined(SEQPAR_CUDA_ON_CPU)
enum { STAGING = 8 * 1024 }; /* small, so that tests wrap around to its beginning */
#else
enum { STAGING = 4 * 1024 * 1024 };
#define cuda_on_cpu_spoil(data, bytes, stream) ((void)0)
#endif

/* The lists of one call (pieces, programs, ids, positions), uploaded from the host. Equal bytes
   are uploaded only once. used: the last call that read them. */
struct uploaded {
    uint64_t hash;
    int64_t bytes, used;
    char *host, *data;
    bool captured; /* a graph reads it */
};

/* A piece of GPU memory. Freed pieces are cached and reused without a wait: all work is on one
   stream, so the work that used a piece before ends before later work begins. */
struct piece_of_memory {
    char *data;
    int64_t bytes;
    /* captured: a graph uses it, so only captured calls may have it again */
    bool spare, captured;
};

enum { MOVES = 16 }; /* events that mark the end of a move; move i uses event i % MOVES */

struct cuda_device {
    seqpar_device base; /* first: the two are cast to each other */
    cudaStream_t stream;
    int ordinal, multiprocessors;
    bool own_stream;
    piece_of_memory *memory;
    int64_t pieces, pieces_capacity;
    char *lists_data; /* lists of the current call, one after the other */
    int64_t lists_bytes, lists_capacity, calls, list_bytes;
    uploaded list[LISTS];
    int lists;
    char *staging; /* pinned; two halves, used in turn */
    int64_t staging_bytes, staging_used;
    int half;
    cudaEvent_t left[2];       /* the stream has read all of this half */
    unsigned long long *flops; /* the attention kernels add to it */
    cudaStream_t mover;        /* the stream of moves; NULL until the first move */
    cudaEvent_t before;        /* recorded on `stream` before a move, which waits for it */
    cudaEvent_t behind[MOVES]; /* recorded after move i: behind[i % MOVES] */
    int64_t moves;             /* number of moves begun */
    bool lost; /* an operation that returns no status failed; the next finish() reports it */
#if defined(SEQPAR_CUBLAS)
    cublasHandle_t cublas; /* NULL: the kernels of this file compute products */
#endif
};

static cuda_device *of(seqpar_device *device) { return (cuda_device *)device; }

static seqpar_status failed(cuda_device *self, const char *what, cudaError_t error) {
    return seqpar_fail(self->base.error, SEQPAR_ERR_DEVICE, "CUDA device %d: %s: %s",
                       self->ordinal, what, cudaGetErrorString(error));
}

static seqpar_status launched(cuda_device *self, const char *kernel, cudaError_t error) {
    return error ? failed(self, kernel, error) : SEQPAR_OK;
}

/* Notes the failure of an operation that returns no status. */
static void note_status(cuda_device *self, seqpar_status status) {
    self->lost |= status != SEQPAR_OK;
}

/* Ends an operation. If the caller gave no queue, it returns when the work is done. */
static seqpar_status finish(cuda_device *self, seqpar_status status, void *queue) {
    if (status) return status;
    if (queue && queue != (void *)self->stream)
        return seqpar_fail(self->base.error, SEQPAR_ERR_OPTION,
                           "CUDA device %d works on its own queue; give seqpar_device_cuda "
                           "your stream, or pass device->queue",
                           self->ordinal);
    cudaError_t error = queue ? cudaSuccess : cudaStreamSynchronize(self->stream);
    if (error) return failed(self, "waiting for a kernel", error);
    return self->lost ? seqpar_fail(
                            self->base.error, SEQPAR_ERR_DEVICE,
                            "CUDA device %d: a copy failed before, so what the device holds is "
                            "not what it should be; close it and begin again",
                            self->ordinal)
                      : SEQPAR_OK;
}

static void enter(cuda_device *self, void *queue) {
    (void)queue; /* compared by finish */
    self->lists_bytes = 0;
    self->calls++;
}

static seqpar_status device_settle(seqpar_device *device, void *queue) {
    cuda_device *self = of(device);
    unsigned long long flops = 0;
    cudaError_t error = cudaMemcpyAsync(&flops, self->flops, sizeof flops,
                                        cudaMemcpyDeviceToHost, self->stream);
    if (error) return failed(self, "reading a count", error);
    seqpar_status status = finish(self, SEQPAR_OK,
                                  NULL); /* waits: the copy writes to a local variable */
    if (!status && queue) status = finish(self, SEQPAR_OK, queue);
    if (!status) device->attn_flops = (int64_t)flops;
    return status;
}

/* ---- memory ---- */

/* Is the stream being captured into a graph? If so, the host must not wait, allocate or
   upload. */
static bool capturing(cuda_device *self) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(self->stream, &status)) (void)cudaGetLastError();
    return status != cudaStreamCaptureStatusNone;
}

/* The smallest spare piece that is at most an eighth too large; -1: none. */
static int64_t spare_piece(const cuda_device *self, int64_t bytes, bool captured) {
    int64_t best = -1;
    for (int64_t i = 0; i < self->pieces; i++) {
        const piece_of_memory *p = &self->memory[i];
        if (!p->spare || p->bytes < bytes || p->bytes - bytes > bytes / 8 ||
            (p->captured && !captured))
            continue;
        if (best < 0 || p->bytes < self->memory[best].bytes) best = i;
    }
    return best;
}

static piece_of_memory *piece_at(cuda_device *self, const void *data) {
    for (int64_t i = 0; i < self->pieces; i++)
        if (self->memory[i].data == data) return &self->memory[i];
    return NULL;
}

/* Frees the spare pieces that no graph uses, after the stream is done with them. Returns
   whether there were any. */
static bool release_spares(cuda_device *self) {
    int64_t before = self->pieces;
    for (int64_t i = self->pieces - 1; i >= 0; i--) {
        if (!self->memory[i].spare || self->memory[i].captured) continue;
        if (before == self->pieces) (void)cudaStreamSynchronize(self->stream);
        (void)cudaFree(self->memory[i].data);
        self->memory[i] = self->memory[--self->pieces];
    }
    return before > self->pieces;
}

static piece_of_memory *new_piece(cuda_device *self, int64_t bytes) {
    void *data = NULL;
    if (self->pieces == self->pieces_capacity) {
        piece_of_memory *more = (piece_of_memory *)realloc(
            self->memory, (size_t)(2 * self->pieces_capacity + 64) * sizeof *more);
        if (!more) return NULL;
        self->memory = more;
        self->pieces_capacity = 2 * self->pieces_capacity + 64;
    }
    if (cudaMalloc(&data, (size_t)bytes)) {
        (void)cudaGetLastError();
        if (!release_spares(self)) return NULL;
        if (cudaMalloc(&data, (size_t)bytes)) {
            (void)cudaGetLastError();
            return NULL;
        }
    }
    piece_of_memory *p = &self->memory[self->pieces++];
    p->data = (char *)data;
    p->bytes = bytes;
    return p;
}

static void *device_alloc(seqpar_device *device, int64_t bytes) {
    cuda_device *self = of(device);
    bool captured = capturing(self);
    int64_t need = bytes > 0 ? bytes : 1, at = spare_piece(self, need, captured);
    size_t room = 0, total = 0;
    piece_of_memory *p = at >= 0 ? &self->memory[at] : captured ? NULL : new_piece(self, need);
    if (p) {
        p->spare = false;
        p->captured = captured;
        return p->data;
    }
    if (captured) {
        (void)seqpar_fail(device->error, SEQPAR_ERR_DEVICE,
                          "CUDA device %d: a captured call needs %lld bytes, and memory cannot "
                          "be allocated there; make the same call once before it is captured",
                          self->ordinal, (long long)need);
        return NULL;
    }
    (void)cudaMemGetInfo(&room, &total);
    (void)seqpar_fail(device->error, SEQPAR_ERR_MEMORY,
                      "CUDA device %d: %lld bytes are needed, %lld of %lld are free; use more "
                      "ranks or shorter rows",
                      self->ordinal, (long long)bytes, (long long)room, (long long)total);
    return NULL;
}

static void device_free(seqpar_device *device, void *data) {
    cuda_device *self = of(device);
    piece_of_memory *p = data ? piece_at(self, data) : NULL;
    if (!p) return;
    p->spare = true;
    p->captured |= capturing(self);
    cuda_on_cpu_spoil(p->data, (size_t)p->bytes, self->stream);
}

static void device_copy(seqpar_device *device, void *to, const void *from, int64_t bytes,
                        void *queue) {
    cuda_device *self = of(device);
    enter(self, queue);
    cudaError_t error = bytes > 0 ? cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault,
                                                    self->stream)
                                  : cudaSuccess;
    note_status(self, finish(self, launched(self, "a copy", error), queue));
}

static void device_copy_rows(seqpar_device *device, void *to, int64_t to_stride,
                             const void *from, int64_t from_stride, int64_t bytes, int64_t rows,
                             void *queue) {
    cuda_device *self = of(device);
    enter(self, queue);
    cudaError_t error = bytes > 0 && rows > 0
                            ? cudaMemcpy2DAsync(to, (size_t)to_stride, from,
                                                (size_t)from_stride, (size_t)bytes,
                                                (size_t)rows, cudaMemcpyDefault, self->stream)
                            : cudaSuccess;
    note_status(self, finish(self, launched(self, "a copy of rows", error), queue));
}

static void device_zero(seqpar_device *device, void *data, int64_t bytes, void *queue) {
    cuda_device *self = of(device);
    enter(self, queue);
    cudaError_t error = bytes > 0 ? cudaMemsetAsync(data, 0, (size_t)bytes, self->stream)
                                  : cudaSuccess;
    note_status(self, finish(self, launched(self, "zeros", error), queue));
}

/* ---- the second pool: pinned memory of the host, and a stream of its own ---- */

static void *pool_alloc(seqpar_device *device, int64_t bytes) {
    void *data = NULL;
    cudaError_t error = cudaSuccess;
    if (device->pool_path)
        (void)seqpar_fail(
            device->error, SEQPAR_ERR_OPTION,
            "a CUDA device offloads to the host's memory, not to files in %.400s; "
            "leave the folder out",
            device->pool_path);
    else if ((error = cudaMallocHost(&data, (size_t)bytes)) != cudaSuccess)
        (void)failed(of(device), "pinned memory to offload to", error);
    if (data) memset(data, 0, (size_t)bytes);
    return data;
}

static void pool_free(seqpar_device *device, void *data, int64_t bytes) {
    (void)bytes;
    if (of(device)->mover) (void)cudaStreamSynchronize(of(device)->mover);
    (void)cudaFreeHost(data);
}

static void close_mover(cuda_device *self) {
    if (!self->mover) return;
    (void)cudaStreamSynchronize(self->mover);
    if (self->before) (void)cudaEventDestroy(self->before);
    for (int i = 0; i < MOVES; i++) {
        if (self->behind[i]) (void)cudaEventDestroy(self->behind[i]);
        self->behind[i] = NULL;
    }
    (void)cudaStreamDestroy(self->mover);
    self->mover = NULL;
    self->before = NULL;
}

/* Creates the stream and all events, or after an error none of them. */
static cudaError_t open_mover(cuda_device *self) {
    cudaError_t error = cudaStreamCreateWithFlags(&self->mover, cudaStreamNonBlocking);
    if (error) return self->mover = NULL, error;
    error = cudaEventCreateWithFlags(&self->before, cudaEventDisableTiming);
    for (int i = 0; !error && i < MOVES; i++)
        error = cudaEventCreateWithFlags(&self->behind[i], cudaEventDisableTiming);
    if (error) close_mover(self);
    return error;
}

static int64_t device_move(seqpar_device *device, void *to, const void *from, int64_t bytes,
                           void *queue) {
    cuda_device *self = of(device);
    if (bytes <= 0) return self->moves;
    enter(self, queue);
    cudaError_t error = self->mover ? cudaSuccess : open_mover(self);
    if (!error) error = cudaEventRecord(self->before, self->stream);
    if (!error) error = cudaStreamWaitEvent(self->mover, self->before, 0);
    if (!error)
        error = cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, self->mover);
    if (!error) error = cudaEventRecord(self->behind[self->moves % MOVES], self->mover);
    note_status(self, launched(self, "a copy to or from the host", error));
    return ++self->moves;
}

/* A later move may have recorded the event again. It is then recorded after this move too, so
   waiting for it is enough. */
static seqpar_status device_moved(seqpar_device *device, int64_t moves, void *queue) {
    cuda_device *self = of(device);
    cudaError_t error = cudaSuccess;
    (void)queue;
    if (moves > 0 && self->mover) /* no mover: finish reports the error */
        error = cudaStreamWaitEvent(self->stream, self->behind[(moves - 1) % MOVES], 0);
    note_status(self, launched(self, "waiting for a copy", error));
    return finish(self, SEQPAR_OK, self->stream);
}

/* Returns scratch memory, kept between calls. All kernels run on one stream, so those that used
   it before are done when the next kernel begins. */
static char *scratch(cuda_device *self, int64_t bytes) {
    if (bytes > self->base.workspace_bytes) {
        int64_t more = bytes + bytes / 4; /* a later call may need a little more */
        device_free(&self->base, self->base.workspace);
        self->base.workspace_bytes = 0;
        self->base.workspace = device_alloc(&self->base, more);
        if (!self->base.workspace) return NULL;
        self->base.workspace_bytes = more;
    }
    if (capturing(self)) piece_at(self, self->base.workspace)->captured = true;
    return (char *)self->base.workspace;
}

/* ---- lists ---- */

/* Appends a list to those of this call. Returns its offset in bytes; -1: out of memory. */
static int64_t list_add(cuda_device *self, const void *list, int64_t bytes) {
    int64_t at = (self->lists_bytes + 15) & ~(int64_t)15, need = at + bytes;
    if (need > self->lists_capacity) {
        char *bigger = (char *)realloc(self->lists_data, (size_t)(2 * need));
        if (!bigger) return -1;
        self->lists_data = bigger;
        self->lists_capacity = 2 * need;
    }
    memset(self->lists_data + self->lists_bytes, 0, (size_t)(at - self->lists_bytes));
    if (bytes) memcpy(self->lists_data + at, list, (size_t)bytes);
    self->lists_bytes = need;
    return at;
}

static uint64_t hash_of(const char *bytes, int64_t count) { /* FNV-1a by words */
    uint64_t hash = UINT64_C(0xcbf29ce484222325), word;
    for (int64_t i = 0; i < count; i += 8) {
        word = 0;
        memcpy(&word, bytes + i, (size_t)(count - i < 8 ? count - i : 8));
        hash = (hash ^ word) * UINT64_C(0x100000001b3);
        hash ^= hash >> 29;
    }
    return hash;
}

static void forget(cuda_device *self, int i) {
    device_free(&self->base, self->list[i].data);
    free(self->list[i].host);
    self->list_bytes -= self->list[i].bytes;
    self->list[i] = self->list[--self->lists];
}

/* Makes room for one more list: evicts the least recently used ones, except those that a graph
   reads. */
static bool make_room(cuda_device *self, int64_t bytes) {
    while (self->lists &&
           (self->lists == LISTS || self->list_bytes + bytes > ((int64_t)512 << 20))) {
        int oldest = -1;
        for (int i = 0; i < self->lists; i++)
            if (!self->list[i].captured &&
                (oldest < 0 || self->list[i].used < self->list[oldest].used))
                oldest = i;
        if (oldest < 0) break;
        forget(self, oldest);
    }
    return self->lists < LISTS || !seqpar_fail(self->base.error, SEQPAR_ERR_DEVICE,
                                               "CUDA device %d: graphs hold all %d places for "
                                               "lists; close the device and capture less",
                                               self->ordinal, LISTS);
}

/* Returns pinned memory for an upload, so that the host does not wait: a copy from pageable
   memory can make the host wait for the stream. Each half is reused when the stream has read
   all of it. */
static char *stage(cuda_device *self, int64_t bytes) {
    if (2 * bytes > self->staging_bytes) {
        (void)cudaStreamSynchronize(self->stream);
        (void)cudaFreeHost(self->staging);
        self->staging = NULL;
        self->staging_bytes = self->staging_used = self->half = 0;
        if (cudaMallocHost((void **)&self->staging, (size_t)(4 * bytes))) {
            (void)cudaGetLastError();
            self->staging = NULL;
            return NULL;
        }
        self->staging_bytes = 4 * bytes;
    }
    int64_t room = self->staging_bytes / 2;
    if (self->staging_used + bytes > room) {
        if (cudaEventRecord(self->left[self->half], self->stream)) return NULL;
        self->half = 1 - self->half;
        self->staging_used = 0;
        if (cudaEventSynchronize(self->left[self->half])) return NULL;
    }
    char *at = self->staging + self->half * room + self->staging_used;
    self->staging_used += bytes;
    return at;
}

static char *upload_to(cuda_device *self, uploaded *l) {
    char *from = stage(self, (l->bytes + 15) & ~(int64_t)15);
    if (!from) {
        (void)failed(self, "pinned memory for lists", cudaErrorMemoryAllocation);
        return NULL;
    }
    memcpy(from, l->host, (size_t)l->bytes);
    cudaError_t error = cudaMemcpyAsync(l->data, from, (size_t)l->bytes, cudaMemcpyHostToDevice,
                                        self->stream);
    if (!error) return l->data;
    (void)failed(self, "uploading lists", error);
    return NULL;
}

/* Returns the address of the call's lists on the device; NULL after an error. */
static char *upload(cuda_device *self) {
    uint64_t hash = hash_of(self->lists_data, self->lists_bytes);
    bool captured = capturing(self);
    for (int i = 0; i < self->lists; i++) {
        uploaded *l = &self->list[i];
        if (l->hash != hash || l->bytes != self->lists_bytes ||
            memcmp(l->host, self->lists_data, (size_t)l->bytes))
            continue;
        l->used = self->calls;
        l->captured |= captured;
        return l->data;
    }
    if (captured) {
        (void)seqpar_fail(self->base.error, SEQPAR_ERR_DEVICE,
                          "CUDA device %d: a captured call brings lists that are not on the "
                          "device; make the same call once before it is captured",
                          self->ordinal);
        return NULL;
    }
    if (!make_room(self, self->lists_bytes)) return NULL;
    uploaded l = {hash,
                  self->lists_bytes,
                  self->calls,
                  (char *)malloc((size_t)self->lists_bytes + 1),
                  (char *)device_alloc(&self->base, self->lists_bytes),
                  false};
    if (l.host) memcpy(l.host, self->lists_data, (size_t)l.bytes);
    if (!l.host || !l.data || !upload_to(self, &l)) {
        free(l.host);
        device_free(&self->base, l.data);
        return NULL;
    }
    self->list[self->lists++] = l;
    self->list_bytes += l.bytes;
    return l.data;
}

static dim3 blocks_for(int64_t count, int64_t each) {
    return dim3((unsigned)((count + each - 1) / each));
}

/* =============================================================================================
   >>tile  16 x 8 tiles on tensor cores
   ========================================================================================== */

/* A warp multiplies a tile of 16 rows by a tile of 8 columns into 4 sums per lane: lane 4 g + t
   has (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1). Terms are the products that a sum
   adds; one instruction adds STEP of them: 16 in bf16, 8 in fp32. An fp32 factor is split into
   its tf32 value and the remainder; three tf32 products give about fp32's accuracy.
   Tiles are in shared memory, padded to avoid bank conflicts. In a tile by rows (x, Q, K) the
   terms of a sum are adjacent; in a tile by columns (V, dy) they are one line apart. If either
   tile is by columns, fp32 takes the terms 2t and 2t + 1 where the instruction's layout has t
   and t + 4: a tile of sums that becomes a factor has its terms in that order. */

#if !defined(SEQPAR_CUDA_ON_CPU)
static __device__ __forceinline__ void seqpar_cuda_mma_bf16(float c[4], const uint32_t a[4],
                                                            const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ __forceinline__ void seqpar_cuda_mma_tf32(float c[4], const uint32_t a[4],
                                                            const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ __forceinline__ uint32_t seqpar_cuda_tf32(float x) {
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float seqpar_cuda_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ void seqpar_cuda_load_matrices_transposed(uint32_t r[4],
                                                                            const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row)));
}

static __device__ __forceinline__ uint32_t seqpar_cuda_shared_word(const void *at) {
    return *(const uint32_t *)at;
}

static __device__ __forceinline__ void seqpar_cuda_shared_store(void *at, uint4 x) {
    *(uint4 *)at = x;
}
#endif

struct bf16 {
    uint16_t bits;
};

static __device__ __forceinline__ float wide(float x) { return x; }
static __device__ __forceinline__ float wide(bf16 x) {
    return __uint_as_float((uint32_t)x.bits << 16);
}

/* Rounds to nearest, ties to even; a NaN stays a NaN. */
static __device__ __forceinline__ uint32_t narrow_bits(float x) {
    uint32_t bits = __float_as_uint(x);
    return x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static __device__ __forceinline__ void narrow(float *to, float x) { *to = x; }
static __device__ __forceinline__ void narrow(bf16 *to, float x) {
    to->bits = (uint16_t)narrow_bits(x);
}

/* STEP: terms of one mma. TERMS: terms of a tile in shared memory, 128 bytes. PAD: elements
   added to each line of a tile to avoid bank conflicts. */
template <class T> struct traits;
template <> struct traits<float> {
    enum { STEP = 8, TERMS = 32, PAD = 4 };
};

template <> struct traits<bf16> {
    enum { STEP = 16, TERMS = 64, PAD = 8 };
};

static __device__ __forceinline__ int lane_of() { return (int)threadIdx.x % WARP; }

/* The factors of one mma in a lane's registers. fp32 factors are split by multiply(). */
struct factor_a {
    uint32_t r[4];
};

struct factor_b {
    uint32_t r[2];
};

static __device__ __forceinline__ void multiply(float c[4], const factor_a &a,
                                                const factor_b &b, bf16) {
    seqpar_cuda_mma_bf16(c, a.r, b.r);
}

/* Tensor cores truncate when they add: over 68 steps the error was 4e-6 of a sum on an H200,
   ten times that of fp32 rounding. So each step begins at zero, and fp32 instructions add its
   sum. */
static __device__ __forceinline__ void multiply(float c[4], const factor_a &a,
                                                const factor_b &b, float) {
    uint32_t high_a[4], low_a[4], high_b[2], low_b[2];
    float sum[4] = {0, 0, 0, 0};
    UNROLL for (int i = 0; i < 4; i++) {
        float x = __uint_as_float(a.r[i]);
        high_a[i] = seqpar_cuda_tf32(x);
        low_a[i] = seqpar_cuda_tf32(x - __uint_as_float(high_a[i]));
    }
    UNROLL for (int i = 0; i < 2; i++) {
        float x = __uint_as_float(b.r[i]);
        high_b[i] = seqpar_cuda_tf32(x);
        low_b[i] = seqpar_cuda_tf32(x - __uint_as_float(high_b[i]));
    }
    seqpar_cuda_mma_tf32(sum, low_a, high_b);
    seqpar_cuda_mma_tf32(sum, high_a, low_b);
    seqpar_cuda_mma_tf32(sum, high_a, high_b);
    UNROLL for (int i = 0; i < 4; i++) c[i] += sum[i];
}

/* Loads factors from a tile whose element (row, term) is at tile[row * stride + term]. */
template <bool PAIRS>
static __device__ __forceinline__ factor_a load_a_rows(const float *tile, int stride) {
    int g = lane_of() / 4, t = lane_of() % 4, first = PAIRS ? 2 * t : t;
    int second = PAIRS ? 2 * t + 1 : t + 4;
    factor_a a = {{seqpar_cuda_shared_word(tile + g * stride + first),
                   seqpar_cuda_shared_word(tile + (g + 8) * stride + first),
                   seqpar_cuda_shared_word(tile + g * stride + second),
                   seqpar_cuda_shared_word(tile + (g + 8) * stride + second)}};
    return a;
}

template <bool PAIRS>
static __device__ __forceinline__ factor_a load_a_rows(const bf16 *tile, int stride) {
    int g = lane_of() / 4, t = lane_of() % 4;
    factor_a a = {{seqpar_cuda_shared_word(tile + g * stride + 2 * t),
                   seqpar_cuda_shared_word(tile + (g + 8) * stride + 2 * t),
                   seqpar_cuda_shared_word(tile + g * stride + 2 * t + 8),
                   seqpar_cuda_shared_word(tile + (g + 8) * stride + 2 * t + 8)}};
    return a;
}

static __device__ __forceinline__ factor_b load_b_rows(const float *tile, int stride) {
    int g = lane_of() / 4, t = lane_of() % 4;
    factor_b b = {{seqpar_cuda_shared_word(tile + g * stride + t),
                   seqpar_cuda_shared_word(tile + g * stride + t + 4)}};
    return b;
}

static __device__ __forceinline__ factor_b load_b_rows(const bf16 *tile, int stride) {
    int g = lane_of() / 4, t = lane_of() % 4;
    factor_b b = {{seqpar_cuda_shared_word(tile + g * stride + 2 * t),
                   seqpar_cuda_shared_word(tile + g * stride + 2 * t + 8)}};
    return b;
}

/* Loads factors from a tile whose element (term, column) is at tile[term * stride + column].
   b[0] has columns 0 to 7, b[1] columns 8 to 15. */
static __device__ __forceinline__ void load_b_columns(factor_b b[2], const float *tile,
                                                      int stride) {
    int g = lane_of() / 4, t = lane_of() % 4;
    UNROLL for (int i = 0; i < 2; i++) {
        b[i].r[0] = seqpar_cuda_shared_word(tile + 2 * t * stride + 8 * i + g);
        b[i].r[1] = seqpar_cuda_shared_word(tile + (2 * t + 1) * stride + 8 * i + g);
    }
}

static __device__ __forceinline__ void load_b_columns(factor_b b[2], const bf16 *tile,
                                                      int stride) {
    uint32_t r[4];
    seqpar_cuda_load_matrices_transposed(r,
                                         tile + lane_of() % 16 * stride + lane_of() / 16 * 8);
    b[0].r[0] = r[0];
    b[0].r[1] = r[1];
    b[1].r[0] = r[2];
    b[1].r[1] = r[3];
}

static __device__ __forceinline__ factor_a load_a_columns(const float *tile, int stride) {
    int g = lane_of() / 4, t = lane_of() % 4;
    factor_a a = {{seqpar_cuda_shared_word(tile + 2 * t * stride + g),
                   seqpar_cuda_shared_word(tile + 2 * t * stride + g + 8),
                   seqpar_cuda_shared_word(tile + (2 * t + 1) * stride + g),
                   seqpar_cuda_shared_word(tile + (2 * t + 1) * stride + g + 8)}};
    return a;
}

static __device__ __forceinline__ factor_a load_a_columns(const bf16 *tile, int stride) {
    /* matrices in the order (terms 0-7, rows 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15) */
    factor_a a;
    int lane = lane_of();
    seqpar_cuda_load_matrices_transposed(a.r, tile + (lane % 8 + lane / 16 * 8) * stride +
                                                  lane / 8 % 2 * 8);
    return a;
}

/* Converts sums to a factor: one tile of 8 terms for fp32, two such tiles for bf16. */
static __device__ __forceinline__ factor_a factor_of(const float (*c)[4], float) {
    factor_a a = {{__float_as_uint(c[0][0]), __float_as_uint(c[0][2]), __float_as_uint(c[0][1]),
                   __float_as_uint(c[0][3])}};
    return a;
}

static __device__ __forceinline__ factor_a factor_of(const float (*c)[4], bf16) {
    factor_a a = {{narrow_bits(c[0][0]) | narrow_bits(c[0][1]) << 16,
                   narrow_bits(c[0][2]) | narrow_bits(c[0][3]) << 16,
                   narrow_bits(c[1][0]) | narrow_bits(c[1][1]) << 16,
                   narrow_bits(c[1][2]) | narrow_bits(c[1][3]) << 16}};
    return a;
}

/* Loads a tile (rows, width) of a matrix into shared memory. Elements beyond the matrix are 0.
   All threads of the block must call it. */
template <class T>
static __device__ __forceinline__ void load_tile(T *tile, int stride, int rows, int width,
                                                 const T *from, int64_t from_stride,
                                                 int64_t rows_left, int64_t columns_left) {
    enum { EACH = 16 / sizeof(T) };
    /* whole: can be copied 16 bytes at a time */
    bool whole = columns_left >= width && from_stride % EACH == 0 && (uintptr_t)from % 16 == 0;
    if (whole)
        for (int i = (int)threadIdx.x; i < rows * (width / EACH); i += (int)blockDim.x) {
            int r = i / (width / EACH), c = i % (width / EACH) * EACH;
            uint4 x = {0, 0, 0, 0};
            if (r < rows_left) x = *(const uint4 *)(from + r * from_stride + c);
            seqpar_cuda_shared_store(tile + r * stride + c, x);
        }
    else
        for (int i = (int)threadIdx.x; i < rows * width; i += (int)blockDim.x) {
            int r = i / width, c = i % width;
            T x;
            narrow(&x, 0.0f);
            tile[r * stride + c] = r < rows_left && c < columns_left ? from[r * from_stride + c]
                                                                     : x;
        }
}

/* =============================================================================================
   >>machine  fold programs
   ========================================================================================== */

/* Runs a fold program. A job keeps the top of the stack in registers, and the values below it
   in memory, one per level. Its functions compute a leaf, combine the value below with the top,
   and copy the top. The order of the two values that are combined does not matter; attention
   therefore rounds products before it adds them. All threads of a job run the program
   together. */
template <class Job>
static __device__ __forceinline__ void run_program(Job &job, const seqpar_fold_op *program,
                                                   int64_t count) {
    int level = 0; /* values on the stack */
    for (int64_t i = 0; i < count; i++) {
        int op = program[i].op, index = program[i].index;
        if (op == SEQPAR_FOLD_LEAF || op == SEQPAR_FOLD_LOAD) {
            if (level++) job.spill(level - 2);
            if (op == SEQPAR_FOLD_LEAF) {
                job.clear();
                job.leaf(index);
            } else
                job.load(index);
        } else if (op == SEQPAR_FOLD_EXTEND)
            job.leaf(index);
        else if (op == SEQPAR_FOLD_COMBINE)
            job.combine(--level - 1);
        else {
            if (op == SEQPAR_FOLD_STORE)
                job.store(index);
            else
                job.finish();
            if (--level) job.restore(level - 1);
        }
    }
}

/* Highest leaf number of a program, plus 1. */
static int64_t leaves_of(const seqpar_fold_op *program, int64_t count) {
    int64_t leaves = 0;
    for (int64_t i = 0; i < count; i++)
        if ((program[i].op == SEQPAR_FOLD_LEAF || program[i].op == SEQPAR_FOLD_EXTEND) &&
            program[i].index >= leaves)
            leaves = program[i].index + 1;
    return leaves;
}

/* Folds vectors, one thread per column. Leaf i is at leaf + i * leaf_stride. */
struct columns_args {
    const seqpar_fold_op *program;
    int64_t program_count, leaf_stride, store_stride, count;
    const float *leaf;
    float *values, *result, *stack;
};

struct columns_job {
    columns_args a;
    int64_t column;
    float top;
    __device__ void clear() { top = 0; }
    __device__ void leaf(int index) { top += a.leaf[index * a.leaf_stride + column]; }
    __device__ void spill(int level) { a.stack[level * a.count + column] = top; }
    __device__ void restore(int level) { top = a.stack[level * a.count + column]; }
    __device__ void combine(int level) { top += a.stack[level * a.count + column]; }
    __device__ void load(int index) { top = a.values[index * a.store_stride + column]; }
    __device__ void store(int index) { a.values[index * a.store_stride + column] = top; }
    __device__ void finish() { a.result[column] = top; }
};

__global__ void fold_columns(columns_args a) {
    columns_job job = {a, (int64_t)blockIdx.x * blockDim.x + threadIdx.x, 0};
    if (job.column < a.count) run_program(job, a.program, a.program_count);
}

/* program: the program's offset in `lists`. stack: scratch memory, (depth, count). */
static seqpar_status run_columns(cuda_device *self, const seqpar_fold_call *fold,
                                 const char *lists, int64_t program, const float *leaf,
                                 int64_t leaf_stride, int64_t count, float *stack) {
    columns_args a = {(const seqpar_fold_op *)(lists + program),
                      fold->program_count,
                      leaf_stride,
                      fold->store_stride,
                      count,
                      leaf,
                      (float *)fold->store,
                      (float *)fold->finish,
                      stack};
    return SEQPAR_CUDA_LAUNCH(self, fold_columns, blocks_for(count, BLOCK), dim3(BLOCK), 0, a);
}

template <typename T>
static seqpar_status op_fold(seqpar_device *device, const seqpar_fold_args *a, void *queue) {
    cuda_device *self = of(device);
    enter(self, queue);
    int64_t program = list_add(self, a->fold.program,
                               a->fold.program_count * (int64_t)sizeof *a->fold.program);
    float *stack = (float *)scratch(self, (a->fold.depth * a->count + 1) * 4);
    const char *lists = upload(self);
    if (a->count < 1) return SEQPAR_OK;
    if (!stack || !lists || program < 0) return SEQPAR_ERR_MEMORY;
    return finish(self,
                  run_columns(self, &a->fold, lists, program, (const float *)a->leaf_data,
                              a->leaf_stride, a->count, stack),
                  queue);
}

/* =============================================================================================
   >>rows  embedding, norm, RoPE, SwiGLU
   ========================================================================================== */

/* Returns the same sum in all lanes, always added in the same order. */
template <class F> static __device__ __forceinline__ F warp_sum(F x) {
    for (int i = WARP / 2; i; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
    return x;
}

template <class T>
__global__ void embedding_kernel(T *x, int64_t x_stride, const T *table, int64_t table_stride,
                                 const int32_t *ids, int64_t width) {
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x)
        x[blockIdx.x * x_stride + i] = table[ids[blockIdx.x] * table_stride + i];
}

template <class T>
static seqpar_status op_embedding(seqpar_device *device, const seqpar_embedding_args *a,
                                  void *queue) {
    cuda_device *self = of(device);
    if (a->rows < 1) return SEQPAR_OK;
    enter(self, queue);
    int64_t ids = list_add(self, a->ids, a->rows * 4);
    const char *lists = upload(self);
    if (!lists || ids < 0) return SEQPAR_ERR_MEMORY;
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, embedding_kernel<T>, dim3((unsigned)a->rows),
                                     dim3(BLOCK), 0, (T *)a->x.data, a->x.stride,
                                     (const T *)a->table.data, a->table.stride,
                                     (const int32_t *)(lists + ids), a->width),
                  queue);
}

/* One block per table row. The host has sorted the tokens by id, then by leaf; those of one id
   are `tokens[first[id] .. first[id + 1])`. */
struct token_of_leaf {
    int32_t leaf, token;
};

struct embedding_grad_view {
    const seqpar_fold_op *program;
    int64_t program_count, store_stride, width, dx_stride;
    const int32_t *first;
    const token_of_leaf *tokens;
    float *values, *result, *stack;
    int64_t stack_stride;
};

template <class T> struct embedding_grad_job {
    embedding_grad_view a;
    const T *dx;
    int64_t id, column;
    float top;
    __device__ int64_t at() const { return id * a.width + column; }
    __device__ void clear() { top = 0; }
    __device__ void leaf(int index) {
        for (int32_t i = a.first[id]; i < a.first[id + 1]; i++)
            if (a.tokens[i].leaf == index)
                top += wide(dx[a.tokens[i].token * a.dx_stride + column]);
    }
    __device__ void spill(int level) { a.stack[level * a.stack_stride + at()] = top; }
    __device__ void restore(int level) { top = a.stack[level * a.stack_stride + at()]; }
    __device__ void combine(int level) { top += a.stack[level * a.stack_stride + at()]; }
    __device__ void load(int index) { top = a.values[index * a.store_stride + at()]; }
    __device__ void store(int index) { a.values[index * a.store_stride + at()] = top; }
    __device__ void finish() { a.result[at()] = top; }
};

template <class T> __global__ void embedding_grad_kernel(embedding_grad_view a, const T *dx) {
    for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) {
        embedding_grad_job<T> job = {a, dx, (int64_t)blockIdx.x, c, 0};
        run_program(job, a.program, a.program_count);
    }
}

/* Sorts the tokens of all leaves by id (counting sort); ids without a row here are left out. */
static seqpar_status list_tokens_by_id(cuda_device *self, const seqpar_embedding_grad_args *a,
                                       int64_t leaves, int64_t *first_at, int64_t *tokens_at) {
    int64_t tokens = 0;
    for (int64_t l = 0; l < leaves; l++) tokens += a->leaves[l].count;
    int32_t *first = (int32_t *)calloc((size_t)a->rows + 2, sizeof *first);
    auto has_row = [a](int64_t t) {
        return a->ids[t] >= a->first && a->ids[t] - a->first < a->rows;
    };
    token_of_leaf *sorted = (token_of_leaf *)malloc(((size_t)tokens + 1) * sizeof *sorted);
    for (int64_t l = 0; first && sorted && l < leaves; l++)
        for (int64_t t = a->leaves[l].local; t < a->leaves[l].local + a->leaves[l].count; t++)
            if (has_row(t)) first[a->ids[t] - a->first + 2]++;
    for (int64_t r = 0; first && r < a->rows; r++) first[r + 2] += first[r + 1];
    for (int64_t l = 0; first && sorted && l < leaves; l++)
        for (int64_t t = a->leaves[l].local; t < a->leaves[l].local + a->leaves[l].count; t++)
            if (has_row(t))
                sorted[first[a->ids[t] - a->first + 1]++] = {(int32_t)l, (int32_t)t};
    *first_at = first && sorted ? list_add(self, first, (a->rows + 1) * 4) : -1;
    *tokens_at = first && sorted ? list_add(self, sorted, tokens * (int64_t)sizeof *sorted)
                                 : -1;
    free(first);
    free(sorted);
    return *first_at < 0 || *tokens_at < 0 ? SEQPAR_ERR_MEMORY : SEQPAR_OK;
}

template <class T>
static seqpar_status op_embedding_grad(seqpar_device *device,
                                       const seqpar_embedding_grad_args *a, void *queue) {
    cuda_device *self = of(device);
    int64_t first, tokens, count = a->rows * a->width;
    enter(self, queue);
    int64_t program = list_add(self, a->fold.program,
                               a->fold.program_count * (int64_t)sizeof *a->fold.program);
    float *stack = (float *)scratch(self, (a->fold.depth * count + 1) * 4);
    if (program < 0 || !stack ||
        list_tokens_by_id(self, a, leaves_of(a->fold.program, a->fold.program_count), &first,
                          &tokens))
        return SEQPAR_ERR_MEMORY;
    const char *lists = upload(self);
    if (!lists) return SEQPAR_ERR_MEMORY;
    embedding_grad_view v = {(const seqpar_fold_op *)(lists + program),
                             a->fold.program_count,
                             a->fold.store_stride,
                             a->width,
                             a->dx.stride,
                             (const int32_t *)(lists + first),
                             (const token_of_leaf *)(lists + tokens),
                             (float *)a->fold.store,
                             (float *)a->fold.finish,
                             stack,
                             count};
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, embedding_grad_kernel<T>, dim3((unsigned)a->rows),
                                     dim3(BLOCK), 0, v, (const T *)a->dx.data),
                  queue);
}

/* ---- RMSNorm: one warp per row ---- */

template <class T>
__global__ void rmsnorm_kernel(T *y, int64_t y_stride, const T *x, int64_t x_stride,
                               const T *gain, float *rstd, int64_t rows, int64_t width,
                               float eps) {
    int64_t row = (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    const T *from = x + row * x_stride;
    float sum = 0;
    for (int64_t i = lane_of(); i < width; i += WARP) {
        float v = wide(from[i]);
        sum = fmaf(v, v, sum);
    }
    float r = 1.0f / sqrtf(warp_sum(sum) / (float)width + eps);
    for (int64_t i = lane_of(); i < width; i += WARP)
        narrow(&y[row * y_stride + i], wide(from[i]) * r * wide(gain[i]));
    if (rstd && lane_of() == 0) rstd[row] = r;
}

template <class T>
static seqpar_status op_rmsnorm(seqpar_device *device, const seqpar_rmsnorm_args *a,
                                void *queue) {
    cuda_device *self = of(device);
    if (a->rows < 1) return SEQPAR_OK;
    enter(self, queue);
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, rmsnorm_kernel<T>, blocks_for(a->rows, BLOCK / WARP),
                                     dim3(BLOCK), 0, (T *)a->y.data, a->y.stride,
                                     (const T *)a->x.data, a->x.stride, (const T *)a->gain,
                                     (float *)a->rstd, a->rows, a->width, (float)a->eps),
                  queue);
}

/* y = g x r, r = (mean x^2 + eps)^-1/2:  dx += r g dy - x r^3 / n sum(g dy x) */
template <class T>
__global__ void rmsnorm_dx_kernel(T *dx, int64_t dx_stride, const T *dy, int64_t dy_stride,
                                  const T *x, int64_t x_stride, const T *gain,
                                  const float *rstd, int64_t rows, int64_t width) {
    int64_t row = (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    const T *d = dy + row * dy_stride, *v = x + row * x_stride;
    float sum = 0, r = rstd[row];
    for (int64_t i = lane_of(); i < width; i += WARP)
        sum = fmaf(wide(gain[i]) * wide(d[i]), wide(v[i]), sum);
    float slope = r * r * r * warp_sum(sum) / (float)width;
    for (int64_t i = lane_of(); i < width; i += WARP)
        narrow(&dx[row * dx_stride + i],
               wide(dx[row * dx_stride + i]) +
                   (r * wide(gain[i]) * wide(d[i]) - wide(v[i]) * slope));
}

/* Each block sums some columns of one leaf, one thread per column, in token order. */
struct token_range {
    int64_t begin, count;
};

template <class T>
__global__ void gain_leaf_kernel(float *leaf, const token_range *ranges, const T *dy,
                                 int64_t dy_stride, const T *x, int64_t x_stride,
                                 const float *rstd, int64_t width) {
    int64_t column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t begin = ranges[blockIdx.y].begin, end = begin + ranges[blockIdx.y].count;
    float sum = 0;
    if (column >= width) return;
    for (int64_t t = begin; t < end; t++)
        sum = fmaf(wide(dy[t * dy_stride + column]), wide(x[t * x_stride + column]) * rstd[t],
                   sum);
    leaf[blockIdx.y * width + column] = sum;
}

static int64_t list_ranges(cuda_device *self, const seqpar_piece *leaves, int64_t count) {
    token_range *ranges = (token_range *)malloc(((size_t)count + 1) * sizeof *ranges);
    for (int64_t i = 0; ranges && i < count; i++)
        ranges[i] = {leaves[i].local, leaves[i].count};
    int64_t at = ranges ? list_add(self, ranges, count * (int64_t)sizeof *ranges) : -1;
    free(ranges);
    return at;
}

template <class T>
static seqpar_status op_rmsnorm_grad(seqpar_device *device, const seqpar_rmsnorm_grad_args *a,
                                     void *queue) {
    cuda_device *self = of(device);
    int64_t leaves = leaves_of(a->fold.program, a->fold.program_count);
    seqpar_status status = SEQPAR_OK;
    enter(self, queue);
    int64_t program = list_add(self, a->fold.program,
                               a->fold.program_count * (int64_t)sizeof *a->fold.program);
    int64_t ranges = list_ranges(self, a->leaves, leaves);
    float *leaf = (float *)scratch(self, ((leaves + a->fold.depth) * a->width + 1) * 4);
    const char *lists = upload(self);
    if (program < 0 || ranges < 0 || !leaf || !lists) return SEQPAR_ERR_MEMORY;
    if (a->rows > 0)
        status = SEQPAR_CUDA_LAUNCH(
            self, rmsnorm_dx_kernel<T>, blocks_for(a->rows, BLOCK / WARP), dim3(BLOCK), 0,
            (T *)a->dx.data, a->dx.stride, (const T *)a->dy.data, a->dy.stride,
            (const T *)a->x.data, a->x.stride, (const T *)a->gain, (const float *)a->rstd,
            a->rows, a->width);
    if (!status && leaves)
        status = SEQPAR_CUDA_LAUNCH(
            self, gain_leaf_kernel<T>,
            dim3((unsigned)((a->width + BLOCK - 1) / BLOCK), (unsigned)leaves), dim3(BLOCK), 0,
            leaf, (const token_range *)(lists + ranges), (const T *)a->dy.data, a->dy.stride,
            (const T *)a->x.data, a->x.stride, (const float *)a->rstd, a->width);
    if (!status)
        status = run_columns(self, &a->fold, lists, program, leaf, a->width, a->width,
                             leaf + leaves * a->width);
    return finish(self, status, queue);
}

/* ---- element by element ---- */

template <class T>
__global__ void rope_kernel(T *x, int64_t stride, const float *cosine, const float *sine,
                            const int32_t *positions, int64_t count, int64_t heads,
                            int64_t half, float turn) {
    int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= count) return;
    int64_t i = n % half, row = n / half / heads;
    T *p = x + row * stride + n / half % heads * 2 * half + i;
    float c = cosine[positions[row] * half + i], s = turn * sine[positions[row] * half + i];
    float u = wide(p[0]), v = wide(p[half]);
    narrow(&p[0], u * c - v * s);
    narrow(&p[half], v * c + u * s);
}

template <class T>
static seqpar_status op_rope(seqpar_device *device, const seqpar_rope_args *a, void *queue) {
    cuda_device *self = of(device);
    int64_t count = a->rows * a->heads * (a->head_dim / 2);
    if (count < 1) return SEQPAR_OK;
    enter(self, queue);
    int64_t positions = list_add(self, a->positions, a->rows * 4);
    const char *lists = upload(self);
    if (positions < 0 || !lists) return SEQPAR_ERR_MEMORY;
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, rope_kernel<T>, blocks_for(count, BLOCK),
                                     dim3(BLOCK), 0, (T *)a->x.data, a->x.stride,
                                     (const float *)a->cosine, (const float *)a->sine,
                                     (const int32_t *)(lists + positions), count, a->heads,
                                     a->head_dim / 2, a->inverse ? -1.0f : 1.0f),
                  queue);
}

/* exp as exp2 of a rounded product. In SwiGLU the error is within 2 ulp of fp32 where it
   matters. */
static __device__ __forceinline__ float exponential(float x) {
    return seqpar_cuda_exp2(x * 1.44269504088896341f);
}

static __device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + exponential(-x));
}

template <class T>
__global__ void swiglu_kernel(T *y, int64_t y_stride, const T *gate, int64_t gate_stride,
                              const T *up, int64_t up_stride, int64_t count, int64_t width) {
    int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, t = n / width, i = n % width;
    if (n >= count) return;
    float g = wide(gate[t * gate_stride + i]);
    narrow(&y[t * y_stride + i], g * sigmoid(g) * wide(up[t * up_stride + i]));
}

template <class T>
__global__ void swiglu_grad_kernel(const T *dy, int64_t dy_stride, T *gate, int64_t gate_stride,
                                   T *up, int64_t up_stride, int64_t count, int64_t width) {
    int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, t = n / width, i = n % width;
    if (n >= count) return;
    float d = wide(dy[t * dy_stride + i]), g = wide(gate[t * gate_stride + i]);
    float u = wide(up[t * up_stride + i]), s = sigmoid(g);
    narrow(&gate[t * gate_stride + i], d * u * (s * (1.0f + g * (1.0f - s))));
    narrow(&up[t * up_stride + i], d * (g * s));
}

template <class T>
static seqpar_status op_swiglu(seqpar_device *device, const seqpar_swiglu_args *a,
                               void *queue) {
    cuda_device *self = of(device);
    int64_t count = a->rows * a->width;
    if (count < 1) return SEQPAR_OK;
    enter(self, queue);
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, swiglu_kernel<T>, blocks_for(count, BLOCK),
                                     dim3(BLOCK), 0, (T *)a->y.data, a->y.stride,
                                     (const T *)a->gate.data, a->gate.stride,
                                     (const T *)a->up.data, a->up.stride, count, a->width),
                  queue);
}

template <class T>
static seqpar_status op_swiglu_grad(seqpar_device *device, const seqpar_swiglu_args *a,
                                    void *queue) {
    cuda_device *self = of(device);
    int64_t count = a->rows * a->width;
    if (count < 1) return SEQPAR_OK;
    enter(self, queue);
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, swiglu_grad_kernel<T>, blocks_for(count, BLOCK),
                                     dim3(BLOCK), 0, (const T *)a->y.data, a->y.stride,
                                     (T *)a->gate.data, a->gate.stride, (T *)a->up.data,
                                     a->up.stride, count, a->width),
                  queue);
}

template <class T> __global__ void add_kernel(T *y, const T *a, const T *b, int64_t count) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) narrow(&y[i], wide(a[i]) + wide(b[i]));
}

template <class T>
static seqpar_status op_add(seqpar_device *device, const seqpar_add_args *a, void *queue) {
    cuda_device *self = of(device);
    if (a->accumulators && sizeof(T) < 4) return op_add<float>(device, a, queue);
    if (a->count < 1) return SEQPAR_OK;
    enter(self, queue);
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, add_kernel<T>, blocks_for(a->count, BLOCK),
                                     dim3(BLOCK), 0, (T *)a->y, (const T *)a->a,
                                     (const T *)a->b, a->count),
                  queue);
}

/* =============================================================================================
   >>product  matrix products and weight gradients
   ========================================================================================== */

/* A block computes 64 x 64 sums, each of its four warps 32 x 32 of them: 2 x 4 tiles. Terms are
   loaded 128 bytes at a time. */
enum { SIDE = 64 };
struct product_sums {
    float c[2][4][4];
};

/* Calls f(row, column, sum) for each sum of this lane; row and column within the 64 x 64. */
template <class F> static __device__ __forceinline__ void each_sum(product_sums &s, F f) {
    int warp = (int)threadIdx.x / WARP, g = lane_of() / 4, t = lane_of() % 4;
    UNROLL for (int i = 0; i < 2; i++) UNROLL for (int j = 0; j < 4; j++)
        UNROLL for (int e = 0; e < 4; e++)
            f(warp / 2 * 32 + i * 16 + g + (e >= 2 ? 8 : 0),
              warp % 2 * 32 + j * 8 + 2 * t + (e & 1), s.c[i][j][e]);
}

template <class T, bool COLUMNS>
__global__ void __launch_bounds__(BLOCK)
    matmul_kernel(T *y, int64_t y_stride, const T *x, int64_t x_stride, const T *w,
                  int64_t w_stride, int64_t rows, int64_t out, int64_t in, int accumulate) {
    enum {
        TERMS = traits<T>::TERMS,
        PAD = traits<T>::PAD,
        STEP = traits<T>::STEP,
        X = TERMS + PAD,
        W = COLUMNS ? SIDE + PAD : TERMS + PAD
    };
    T *tile_x = SEQPAR_CUDA_SHARED(T), *tile_w = tile_x + SIDE * X;
    int64_t row = (int64_t)blockIdx.x * SIDE, column = (int64_t)blockIdx.y * SIDE;
    int warp = (int)threadIdx.x / WARP;
    product_sums s;
    each_sum(s, [&](int r, int c, float &sum) {
        sum = accumulate && row + r < rows && column + c < out
                  ? wide(y[(row + r) * y_stride + column + c])
                  : 0.0f;
    });
    for (int64_t k = 0; k < in; k += TERMS) {
        __syncthreads();
        load_tile(tile_x, X, SIDE, TERMS, x + row * x_stride + k, x_stride, rows - row, in - k);
        if (COLUMNS)
            load_tile(tile_w, W, TERMS, SIDE, w + k * w_stride + column, w_stride, in - k,
                      out - column);
        else
            load_tile(tile_w, W, SIDE, TERMS, w + column * w_stride + k, w_stride, out - column,
                      in - k);
        __syncthreads();
        UNROLL_SOME for (int step = 0; step < TERMS; step += STEP) {
            factor_a a[2];
            factor_b b[4];
            UNROLL for (int i = 0; i < 2; i++)
                a[i] = load_a_rows<COLUMNS>(tile_x + (warp / 2 * 32 + i * 16) * X + step, X);
            UNROLL for (int j = 0; j < 4; j += COLUMNS ? 2 : 1) if (COLUMNS)
                load_b_columns(b + j, tile_w + step * W + warp % 2 * 32 + j * 8, W);
            else b[j] = load_b_rows(tile_w + (warp % 2 * 32 + j * 8) * W + step, W);
            UNROLL for (int i = 0; i < 2; i++) UNROLL for (int j = 0; j < 4; j++)
                multiply(s.c[i][j], a[i], b[j], T());
        }
    }
    each_sum(s, [&](int r, int c, float &sum) {
        if (row + r < rows && column + c < out)
            narrow(&y[(row + r) * y_stride + column + c], sum);
    });
}

template <class T>
static seqpar_status op_matmul(seqpar_device *device, const seqpar_matmul_args *a,
                               void *queue) {
    cuda_device *self = of(device);
    dim3 grid((unsigned)((a->rows + SIDE - 1) / SIDE), (unsigned)((a->out + SIDE - 1) / SIDE));
    size_t shared = (size_t)(2 * SIDE * (traits<T>::TERMS + traits<T>::PAD)) * sizeof(T);
    if (a->rows < 1 || a->out < 1) return SEQPAR_OK;
    enter(self, queue);
    if (a->transposed)
        return finish(self,
                      SEQPAR_CUDA_LAUNCH(self, (matmul_kernel<T, true>), grid, dim3(BLOCK),
                                         shared, (T *)a->y.data, a->y.stride,
                                         (const T *)a->x.data, a->x.stride,
                                         (const T *)a->w.data, a->w.stride, a->rows, a->out,
                                         a->in, a->accumulate),
                      queue);
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, (matmul_kernel<T, false>), grid, dim3(BLOCK), shared,
                                     (T *)a->y.data, a->y.stride, (const T *)a->x.data,
                                     a->x.stride, (const T *)a->w.data, a->w.stride, a->rows,
                                     a->out, a->in, a->accumulate),
                  queue);
}

#if defined(SEQPAR_CUBLAS)
/* Products by cuBLAS. It chooses a kernel, and so the order of a sum, by the shape of a
   product. So every call has CUBLAS_ROWS rows; the last rows are copied to a tile and padded
   with zeros. Arrays are row-major here and column-major in cuBLAS, which computes y^T = w
   x^T. */
enum { CUBLAS_ROWS = 256, CUBLAS_WORKSPACE = 32 << 20 };
static seqpar_status multiplied(cuda_device *self, cublasStatus_t error) {
    return error
               ? seqpar_fail(self->base.error, SEQPAR_ERR_DEVICE, "CUDA device %d: cuBLAS: %s",
                             self->ordinal, cublasGetStatusString(error))
               : SEQPAR_OK;
}

static seqpar_status cublas_rows(cuda_device *self, const seqpar_matmul_args *a, void *y,
                                 int64_t y_stride, const void *x, int64_t x_stride) {
    cudaDataType_t type = self->base.storage == SEQPAR_DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    float one = 1.0f, before = a->accumulate ? 1.0f : 0.0f;
    return multiplied(
        self, cublasGemmEx(self->cublas, a->transposed ? CUBLAS_OP_N : CUBLAS_OP_T, CUBLAS_OP_N,
                           (int)a->out, CUBLAS_ROWS, (int)a->in, &one, a->w.data, type,
                           (int)a->w.stride, x, type, (int)x_stride, &before, y, type,
                           (int)y_stride, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

static seqpar_status copied_rows(cuda_device *self, void *to, int64_t to_stride,
                                 const void *from, int64_t from_stride, int64_t width,
                                 int64_t rows, int64_t size) {
    return launched(self, "rows for cuBLAS",
                    cudaMemcpy2DAsync(to, (size_t)(to_stride * size), from,
                                      (size_t)(from_stride * size), (size_t)(width * size),
                                      (size_t)rows, cudaMemcpyDeviceToDevice, self->stream));
}

static seqpar_status cublas_last_rows(cuda_device *self, const seqpar_matmul_args *a, char *y,
                                      const char *x, int64_t rows) {
    int64_t size = seqpar_dtype_bytes(self->base.storage);
    int64_t in = (a->in + 63) / 64 * 64, out = (a->out + 63) / 64 * 64;
    char *tile = scratch(self, CUBLAS_ROWS * (in + out) * size);
    char *result = tile + CUBLAS_ROWS * in * size;
    if (!tile) return SEQPAR_ERR_MEMORY;
    seqpar_status status = launched(
        self, "zeros",
        cudaMemsetAsync(tile, 0, (size_t)(CUBLAS_ROWS * (in + out) * size), self->stream));
    if (!status) status = copied_rows(self, tile, in, x, a->x.stride, a->in, rows, size);
    if (!status && a->accumulate)
        status = copied_rows(self, result, out, y, a->y.stride, a->out, rows, size);
    if (!status) status = cublas_rows(self, a, result, out, tile, in);
    return status ? status : copied_rows(self, y, a->y.stride, result, out, a->out, rows, size);
}

/* cuBLAS uses other kernels if addresses are not multiples of 16 bytes. Then op_matmul is used,
   on all ranks. */
static bool aligned(const seqpar_mat *m, int64_t size) {
    return ((uintptr_t)m->data | (uintptr_t)(m->stride * size)) % 16 == 0;
}

template <class T>
static seqpar_status op_matmul_cublas(seqpar_device *device, const seqpar_matmul_args *a,
                                      void *queue) {
    cuda_device *self = of(device);
    int64_t size = sizeof(T), row = 0;
    seqpar_status status = SEQPAR_OK;
    if (a->rows < 1 || a->out < 1 || a->in < 1 || !aligned(&a->x, size) ||
        !aligned(&a->w, size) || !aligned(&a->y, size))
        return op_matmul<T>(device, a, queue);
    enter(self, queue);
    for (; !status && row + CUBLAS_ROWS <= a->rows; row += CUBLAS_ROWS)
        status = cublas_rows(self, a, (T *)a->y.data + row * a->y.stride, a->y.stride,
                             (const T *)a->x.data + row * a->x.stride, a->x.stride);
    if (!status && row < a->rows)
        status = cublas_last_rows(self, a, (char *)((T *)a->y.data + row * a->y.stride),
                                  (const char *)((const T *)a->x.data + row * a->x.stride),
                                  a->rows - row);
    return finish(self, status, queue);
}

/* The workspace is allocated here, so that cuBLAS allocates nothing later and a graph can be
   captured. The math mode keeps partial sums of a product in fp32. */
static seqpar_status open_cublas(cuda_device *self) {
    void *workspace = device_alloc(&self->base, CUBLAS_WORKSPACE);
    if (!workspace) return SEQPAR_ERR_MEMORY;
    seqpar_status status = multiplied(self, cublasCreate(&self->cublas));
    if (!status) status = multiplied(self, cublasSetStream(self->cublas, self->stream));
    if (!status)
        status = multiplied(self,
                            cublasSetWorkspace(self->cublas, workspace, CUBLAS_WORKSPACE));
    return status ? status
                  : multiplied(
                        self,
                        cublasSetMathMode(
                            self->cublas,
                            (cublasMath_t)(CUBLAS_DEFAULT_MATH |
                                           CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
}
#endif

/* ---- weight gradients: one block runs the fold program of a tile of dw ---- */

struct weight_grad_view {
    const seqpar_fold_op *program;
    const token_range *ranges;
    int64_t program_count, store_stride, out, in, dy_stride, x_stride, tiles_in;
    /* stack: (blocks, depth, 64 x 64) */
    float *values, *result, *stack;
    int64_t depth;
};

template <class T> struct weight_grad_job {
    enum {
        TERMS = traits<T>::TERMS,
        PAD = traits<T>::PAD,
        STEP = traits<T>::STEP,
        LINE = SIDE + PAD
    };
    const weight_grad_view &a;
    const T *dy, *x;
    int64_t row, column; /* first row (out) and column (in) of the tile in dw */
    float *stack;
    product_sums s;
    __device__ weight_grad_job(const weight_grad_view &view, const T *dy_, const T *x_,
                               int64_t tile)
        : a(view), dy(dy_), x(x_), row(tile / view.tiles_in * SIDE),
          column(tile % view.tiles_in * SIDE),
          stack(view.stack + (int64_t)blockIdx.x * view.depth * SIDE * SIDE) {}
    __device__ void clear() {
        each_sum(s, [](int, int, float &sum) { sum = 0; });
    }
    __device__ void leaf(int index) {
        T *tile_dy = SEQPAR_CUDA_SHARED(T), *tile_x = tile_dy + TERMS * LINE;
        int64_t begin = a.ranges[index].begin, count = a.ranges[index].count;
        int warp = (int)threadIdx.x / WARP;
        for (int64_t t = 0; t < count; t += TERMS) {
            __syncthreads();
            load_tile(tile_dy, LINE, TERMS, SIDE, dy + (begin + t) * a.dy_stride + row,
                      a.dy_stride, count - t, a.out - row);
            load_tile(tile_x, LINE, TERMS, SIDE, x + (begin + t) * a.x_stride + column,
                      a.x_stride, count - t, a.in - column);
            __syncthreads();
            UNROLL_SOME for (int step = 0; step < TERMS; step += STEP) {
                factor_a f[2];
                factor_b b[4];
                UNROLL for (int i = 0; i < 2; i++)
                    f[i] = load_a_columns(tile_dy + step * LINE + warp / 2 * 32 + i * 16, LINE);
                UNROLL for (int j = 0; j < 4; j += 2)
                    load_b_columns(b + j, tile_x + step * LINE + warp % 2 * 32 + j * 8, LINE);
                UNROLL for (int i = 0; i < 2; i++) UNROLL for (int j = 0; j < 4; j++)
                    multiply(s.c[i][j], f[i], b[j], T());
            }
        }
    }
    template <class F> __device__ void with_stack(int level, F f) {
        float *at = stack + (int64_t)level * SIDE * SIDE;
        each_sum(s, [&](int r, int c, float &sum) { f(at[r * SIDE + c], sum); });
    }
    __device__ void spill(int level) {
        with_stack(level, [](float &there, float &sum) { there = sum; });
    }
    __device__ void restore(int level) {
        with_stack(level, [](float &there, float &sum) { sum = there; });
    }
    __device__ void combine(int level) {
        with_stack(level, [](float &there, float &sum) { sum += there; });
    }
    template <class F> __device__ void with_matrix(float *matrix, F f) {
        each_sum(s, [&](int r, int c, float &sum) {
            if (row + r < a.out && column + c < a.in)
                f(matrix[(row + r) * a.in + column + c], sum);
        });
    }
    __device__ void load(int index) {
        with_matrix(a.values + index * a.store_stride,
                    [](float &there, float &sum) { sum = there; });
    }
    __device__ void store(int index) {
        with_matrix(a.values + index * a.store_stride,
                    [](float &there, float &sum) { there = sum; });
    }
    __device__ void finish() {
        with_matrix(a.result, [](float &there, float &sum) { there = sum; });
    }
};

template <class T>
__global__ void __launch_bounds__(BLOCK)
    weight_grad_kernel(weight_grad_view a, const T *dy, const T *x, int64_t tiles) {
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        weight_grad_job<T> job(a, dy, x, tile);
        run_program(job, a.program, a.program_count);
        __syncthreads();
    }
}

template <class T>
static seqpar_status op_weight_grad(seqpar_device *device, const seqpar_weight_grad_args *a,
                                    void *queue) {
    cuda_device *self = of(device);
    int64_t tiles_in = (a->in + SIDE - 1) / SIDE;
    int64_t tiles = (a->out + SIDE - 1) / SIDE * tiles_in;
    int64_t most = 4 * self->multiprocessors, grid = tiles < most ? tiles : most;
    if (tiles < 1) return SEQPAR_OK;
    enter(self, queue);
    int64_t program = list_add(self, a->fold.program,
                               a->fold.program_count * (int64_t)sizeof *a->fold.program);
    int64_t ranges = list_ranges(self, a->leaves,
                                 leaves_of(a->fold.program, a->fold.program_count));
    float *stack = (float *)scratch(self, grid * a->fold.depth * SIDE * SIDE * 4 + 4);
    const char *lists = upload(self);
    if (program < 0 || ranges < 0 || !stack || !lists) return SEQPAR_ERR_MEMORY;
    weight_grad_view v = {(const seqpar_fold_op *)(lists + program),
                          (const token_range *)(lists + ranges),
                          a->fold.program_count,
                          a->fold.store_stride,
                          a->out,
                          a->in,
                          a->dy.stride,
                          a->x.stride,
                          tiles_in,
                          (float *)a->fold.store,
                          (float *)a->fold.finish,
                          stack,
                          a->fold.depth};
    return finish(
        self,
        SEQPAR_CUDA_LAUNCH(self, weight_grad_kernel<T>, dim3((unsigned)grid), dim3(BLOCK),
                           (size_t)(2 * traits<T>::TERMS * (SIDE + traits<T>::PAD)) * sizeof(T),
                           v, (const T *)a->dy.data, (const T *)a->x.data, tiles),
        queue);
}

/* =============================================================================================
   >>attn  flash attention from absolute positions
   ========================================================================================== */

/* A block computes some rows of one piece for one head, by the piece's fold program. The rows
   are queries for out and dq, keys for dk and dv. A leaf streams tiles of the other side (keys
   or queries) through shared memory. One template serves every layout, window, document list,
   GQA, dropout, softcap and sink, because a mask is one range per query. */
struct attn_view {
    /* its lists and tasks are device memory; a task's program is a byte offset in `lists` */
    seqpar_attn_args a;
    const char *lists;
    const int2 *tile;     /* (tiles) task, first row; the heaviest tile last */
    int64_t tiles, heads; /* heads: query heads of the step, or kv heads */
    float *stack;         /* (blocks, depth, floats of a thread, threads) */
    unsigned long long *flops;
    uint64_t dropout_key;
    float scale, softcap, keep; /* keep: 1 / (1 - dropout) */
};

static __host__ __device__ __forceinline__ int64_t most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static __host__ __device__ __forceinline__ int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Keys [first, last) of a piece that query t of the share sees. */
static __device__ __forceinline__ int2 visible_keys(const seqpar_attn_args &a, int64_t t,
                                                    const seqpar_attn_keys &k) {
    int64_t begin = a.visible_begin[t] - k.start, end = a.visible_end[t] - k.start;
    if (k.stride > 1) {
        begin = begin > 0 ? (begin + k.stride - 1) / k.stride : 0;
        end = end > 0 ? (end + k.stride - 1) / k.stride : 0;
    }
    begin = most(begin, 0);
    end = least(end, k.count);
    return begin < end ? make_int2((int)begin, (int)end) : make_int2(0, 0);
}

/* Word `which` of seqpar_random(key, high, low), Philox 4x32-10. */
static __device__ NOINLINE uint32_t random_word(uint64_t key, uint64_t high, uint64_t low,
                                                int which) {
    uint32_t x0 = (uint32_t)low, x1 = (uint32_t)(low >> 32), x2 = (uint32_t)high;
    uint32_t x3 = (uint32_t)(high >> 32), k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint32_t y0 = __umulhi(0xCD9E8D57u, x2) ^ x1 ^ k0;
        uint32_t y2 = __umulhi(0xD2511F53u, x0) ^ x3 ^ k1;
        x1 = 0xCD9E8D57u * x2;
        x3 = 0xD2511F53u * x0;
        x0 = y0;
        x2 = y2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return which & 2 ? (which & 1 ? x3 : x2) : (which & 1 ? x1 : x0);
}

/* Returns 0 or 1 / (1 - dropout), drawn by document, head, query and key as in
   seqpar_attn_dropout. */
static __device__ __forceinline__ float dropout_factor(const attn_view &v, int64_t document,
                                                       int64_t head, int64_t query,
                                                       int64_t key) {
    uint64_t high = (uint64_t)document << 24 | (uint64_t)(v.a.dropout_head + head);
    uint64_t low = (uint64_t)query << 32 | (uint64_t)key >> 2;
    uint32_t draw = random_word(v.dropout_key, high, low, (int)(key & 3));
    return (double)draw < v.a.dropout * 4294967296.0 ? 0.0f : v.keep;
}

/* Not inlined: an unrolled loop would repeat its code up to 64 times. */
static __device__ NOINLINE float hyperbolic_tangent(float x) { return tanhf(x); }

/* c (tiles of 16 x 8, COLUMNS / 8 of them) = rows . columns^T over D terms; both tiles have
   their terms adjacent (by rows). */
template <class T, int D, int COLUMNS>
static __device__ __forceinline__ void scores(float (*c)[4], const T *rows, const T *columns,
                                              int line) {
    UNROLL for (int j = 0; j < COLUMNS / 8; j++) UNROLL for (int e = 0; e < 4; e++) c[j][e] = 0;
    UNROLL_SOME for (int step = 0; step < D; step += traits<T>::STEP) {
        factor_a a = load_a_rows<false>(rows + step, line);
        UNROLL for (int j = 0; j < COLUMNS / 8; j++)
            multiply(c[j], a, load_b_rows(columns + j * 8 * line + step, line), T());
    }
}

/* sums (16 x D) += factors (16 x COLUMNS) . tile (COLUMNS x D) */
template <class T, int D, int COLUMNS>
static __device__ __forceinline__ void add_product(float (*sums)[4], const float (*factors)[4],
                                                   const T *tile, int line) {
    UNROLL for (int step = 0; step < COLUMNS; step += traits<T>::STEP) {
        factor_a a = factor_of(factors + step / 8, T());
        UNROLL for (int j = 0; j < D / 8; j += 2) {
            factor_b b[2];
            load_b_columns(b, tile + step * line + j * 8, line);
            multiply(sums[j], a, b[0], T());
            multiply(sums[j + 1], a, b[1], T());
        }
    }
}

/* ---- forward ---- */

/* A lane holds parts of two of its warp's 16 rows: half 0 is row g, half 1 is row g + 8.
   Element e of a tile belongs to half e / 2. */
template <class T, int D, int WARPS, int COLUMNS, bool EXTRAS> struct forward_job {
    enum {
        LINE = D + traits<T>::PAD,
        ROWS = 16 * WARPS,
        THREADS = WARP * WARPS,
        FLOATS = D / 2 + 4
    };
    const attn_view &v;
    const seqpar_attn_task &task;
    const seqpar_piece &piece;
    /* head: the query head. row: row of the piece for each half; it exists if < piece.count */
    int64_t head, row[2];
    int64_t flops;
    float *stack;
    T *tile_q, *tile_k, *tile_v;
    int *range; /* (2 * WARPS) shared: for each warp the keys that its rows see */
    float o[D / 8][4], m[2], l[2];

    __device__ forward_job(const attn_view &view, int64_t item)
        : v(view), task(view.a.tasks[view.tile[item / view.heads].x]),
          piece(view.a.q_pieces[task.piece]),
          head(item % view.heads + view.a.head_begin * (view.a.heads / view.a.kv_heads)),
          flops(0) {
        int64_t first = view.tile[item / view.heads].y, d = v.a.head_dim;
        for (int i = 0; i < 2; i++)
            row[i] = first + (int)threadIdx.x / WARP * 16 + lane_of() / 4 + 8 * i;
        stack = v.stack + ((int64_t)blockIdx.x * v.a.depth * FLOATS) * THREADS + threadIdx.x;
        tile_q = SEQPAR_CUDA_SHARED(T);
        tile_k = tile_q + ROWS * LINE;
        tile_v = tile_k + COLUMNS * LINE;
        range = (int *)(tile_v + COLUMNS * LINE);
        load_tile(tile_q, LINE, ROWS, D,
                  (const T *)v.a.q + ((piece.local + first) * v.a.heads + head) * d,
                  v.a.heads * d, piece.count - first, d);
        __syncthreads();
    }
    __device__ void clear() {
        UNROLL for (int j = 0; j < D / 8; j++) UNROLL for (int e = 0; e < 4; e++) o[j][e] = 0;
        UNROLL for (int i = 0; i < 2; i++) {
            m[i] = -INFINITY;
            l[i] = 0;
        }
    }
    /* Returns the range [x, y) that holds all keys seen by rows of the block. */
    __device__ int2 block_range(const int2 seen[2]) {
        int low = seen[0].x < seen[0].y ? seen[0].x : INT32_MAX;
        int high = seen[0].y > seen[1].y ? seen[0].y : seen[1].y;
        if (seen[1].x < seen[1].y && seen[1].x < low) low = seen[1].x;
        for (int i = 4; i < WARP; i *= 2) {
            int other = __shfl_xor_sync(0xffffffffu, low, i);
            int end = __shfl_xor_sync(0xffffffffu, high, i);
            low = other < low ? other : low;
            high = end > high ? end : high;
        }
        __syncthreads();
        if (lane_of() == 0) {
            range[2 * (threadIdx.x / WARP)] = low;
            range[2 * (threadIdx.x / WARP) + 1] = high;
        }
        __syncthreads();
        for (int w = 0; w < WARPS; w++) {
            low = range[2 * w] < low ? range[2 * w] : low;
            high = range[2 * w + 1] > high ? range[2 * w + 1] : high;
        }
        return make_int2(low, high);
    }
    __device__ void leaf(int index) {
        const seqpar_attn_keys keys = v.a.k_pieces[index];
        int64_t d = v.a.head_dim;
        int64_t kv = head / (v.a.heads / v.a.kv_heads) - v.a.head_begin;
        int64_t stride = v.a.head_count * d;
        int2 seen[2], any;
        UNROLL for (int i = 0; i < 2; i++)
            seen[i] = row[i] < piece.count ? visible_keys(v.a, piece.local + row[i], keys)
                                           : make_int2(0, 0);
        if (lane_of() % 4 == 0)
            flops += 4 * d * (seen[0].y - seen[0].x + seen[1].y - seen[1].x);
        any = block_range(seen);
        if (any.x >= any.y) return;
        for (int begin = any.x / COLUMNS * COLUMNS; begin < any.y; begin += COLUMNS) {
            __syncthreads();
            load_tile(tile_k, LINE, COLUMNS, D,
                      (const T *)v.a.k + ((keys.k_row + begin) * v.a.head_count + kv) * d,
                      stride, keys.count - begin, d);
            load_tile(tile_v, LINE, COLUMNS, D,
                      (const T *)v.a.v + ((keys.v_row + begin) * v.a.head_count + kv) * d,
                      stride, keys.count - begin, d);
            __syncthreads();
            bool sees = (seen[0].x < begin + COLUMNS && seen[0].y > begin) ||
                        (seen[1].x < begin + COLUMNS && seen[1].y > begin);
            if (__any_sync(0xffffffffu, sees)) tile(begin, seen, keys);
        }
    }
    /* A tile changes no row that sees none of its keys: m stays, all values are multiplied by
       exp(0) = 1, and 0 is added. */
    __device__ void tile(int begin, const int2 seen[2], const seqpar_attn_keys &keys) {
        float s[COLUMNS / 8][4], top[2] = {m[0], m[1]}, sum[2] = {0, 0}, shrink[2];
        scores<T, D, COLUMNS>(s, tile_q + (int)threadIdx.x / WARP * 16 * LINE, tile_k, LINE);
        UNROLL_PLAIN for (int j = 0; j < COLUMNS / 8; j++)
            UNROLL_PLAIN for (int e = 0; e < 4; e++) {
            int key = begin + j * 8 + lane_of() % 4 * 2 + (e & 1);
            s[j][e] *= v.scale;
            if (EXTRAS && v.softcap > 0)
                s[j][e] = v.softcap * hyperbolic_tangent(s[j][e] / v.softcap);
            if (key < seen[e / 2].x || key >= seen[e / 2].y) s[j][e] = -INFINITY;
            top[e / 2] = s[j][e] > top[e / 2] || s[j][e] != s[j][e] ? s[j][e] : top[e / 2];
        }
        UNROLL for (int i = 0; i < 2; i++) {
            for (int x = 1; x < 4; x *= 2) {
                float other = __shfl_xor_sync(0xffffffffu, top[i], x);
                top[i] = other > top[i] || other != other ? other : top[i];
            }
            shrink[i] = m[i] == -INFINITY ? 0.0f : exponential(m[i] - top[i]);
            m[i] = top[i];
        }
        UNROLL_PLAIN for (int j = 0; j < COLUMNS / 8; j++)
            UNROLL_PLAIN for (int e = 0; e < 4; e++) {
            s[j][e] = s[j][e] == -INFINITY ? 0.0f : exponential(s[j][e] - m[e / 2]);
            sum[e / 2] += s[j][e];
            if (EXTRAS && v.a.dropout > 0) {
                int64_t key = begin + j * 8 + lane_of() % 4 * 2 + (e & 1);
                s[j][e] *= dropout_factor(v, piece.document, head,
                                          piece.start + row[e / 2] * piece.stride -
                                              piece.origin,
                                          keys.start + key * keys.stride - piece.origin);
            }
        }
        UNROLL for (int i = 0; i < 2; i++) {
            for (int x = 1; x < 4; x *= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], x);
            l[i] = fmaf(l[i], shrink[i], sum[i]);
        }
        UNROLL for (int j = 0; j < D / 8; j++) UNROLL for (int e = 0; e < 4; e++)
            o[j][e] *= shrink[e / 2];
        add_product<T, D, COLUMNS>(o, s, tile_v, LINE);
    }
    /* Merges m and l of another value into this one. *mine and *theirs become the factors that
       scale the two values to the larger maximum. Products are rounded before they are added,
       so the order of the two values does not matter. */
    __device__ void join(int i, float m2, float l2, float *mine, float *theirs) {
        float all = m[i] > m2 ? m[i] : m2;
        *mine = *theirs = 1;
        /* The other value is empty: keep this one exactly. With l2 NaN it is not empty. */
        if (l2 == 0) {
            *theirs = 0;
            return;
        }
        if (l[i] == 0) {
            *mine = 0;
            l[i] = l2;
            m[i] = m2;
            return;
        }
        *mine = exponential(m[i] - all);
        *theirs = exponential(m2 - all);
        l[i] = __fadd_rn(__fmul_rn(l[i], *mine), __fmul_rn(l2, *theirs));
        m[i] = all;
    }
    static __device__ __forceinline__ float joined(float x, float mine, float y, float theirs) {
        return theirs == 0.0f ? x
               : mine == 0.0f ? y
                              : __fadd_rn(__fmul_rn(x, mine), __fmul_rn(y, theirs));
    }
    __device__ float *level_at(int level) { return stack + (int64_t)level * FLOATS * THREADS; }
    __device__ void spill(int level) {
        float *at = level_at(level);
        UNROLL for (int j = 0; j < D / 8; j++) UNROLL for (int e = 0; e < 4; e++)
            at[(j * 4 + e) * THREADS] = o[j][e];
        UNROLL for (int i = 0; i < 2; i++) {
            at[(D / 2 + i) * THREADS] = m[i];
            at[(D / 2 + 2 + i) * THREADS] = l[i];
        }
    }
    __device__ void restore(int level) {
        const float *at = level_at(level);
        UNROLL for (int j = 0; j < D / 8; j++) UNROLL for (int e = 0; e < 4; e++)
            o[j][e] = at[(j * 4 + e) * THREADS];
        UNROLL for (int i = 0; i < 2; i++) {
            m[i] = at[(D / 2 + i) * THREADS];
            l[i] = at[(D / 2 + 2 + i) * THREADS];
        }
    }
    __device__ void combine(int level) {
        const float *at = level_at(level);
        float mine[2], theirs[2];
        UNROLL for (int i = 0; i < 2; i++) join(
            i, at[(D / 2 + i) * THREADS], at[(D / 2 + 2 + i) * THREADS], &mine[i], &theirs[i]);
        UNROLL for (int j = 0; j < D / 8; j++) UNROLL for (int e = 0; e < 4; e++)
            o[j][e] = joined(o[j][e], mine[e / 2], at[(j * 4 + e) * THREADS], theirs[e / 2]);
    }
    /* Returns the address of a stored state: o (count, head_dim), m (count), l (count). */
    __device__ float *place(int index) {
        int64_t d = v.a.head_dim, group = v.a.heads / v.a.kv_heads;
        return (float *)v.a.store +
               ((index * v.a.q_tokens + piece.local) * v.a.head_count * group +
                (head - v.a.head_begin * group) * piece.count) *
                   (d + 2);
    }
    /* Calls f(half, column, element) for each element of o that exists. */
    template <class F> __device__ void each_output(F f) {
        UNROLL for (int j = 0; j < D / 8; j++) UNROLL for (int e = 0; e < 4; e++) {
            int column = j * 8 + lane_of() % 4 * 2 + (e & 1);
            if (row[e / 2] < piece.count && column < v.a.head_dim) f(e / 2, column, o[j][e]);
        }
    }
    __device__ void load(int index) {
        const float *at = place(index);
        int64_t d = v.a.head_dim;
        clear();
        __syncwarp(); /* m and l may have been stored just now, by one lane of four */
        each_output([&](int i, int column, float &x) { x = at[row[i] * d + column]; });
        UNROLL for (int i = 0; i < 2; i++) if (row[i] < piece.count) {
            m[i] = at[piece.count * d + row[i]];
            l[i] = at[piece.count * (d + 1) + row[i]];
        }
    }
    __device__ void store(int index) {
        float *at = place(index);
        int64_t d = v.a.head_dim;
        __syncwarp(); /* wait until all lanes have loaded the old values */
        each_output([&](int i, int column, float &x) { at[row[i] * d + column] = x; });
        UNROLL for (int i = 0; i < 2; i++) if (row[i] < piece.count && lane_of() % 4 == 0) {
            at[piece.count * d + row[i]] = m[i];
            at[piece.count * (d + 1) + row[i]] = l[i];
        }
    }
    __device__ void finish() {
        int64_t d = v.a.head_dim;
        float factor[2] = {1, 1}, total[2] = {l[0], l[1]}, top[2] = {m[0], m[1]};
        bool empty[2] = {l[0] == 0.0f, l[1] == 0.0f};
        for (int i = 0; v.a.sinks && i < 2; i++) { /* a sink is one more score, without a v */
            float sink = ((const float *)v.a.sinks)[head];
            top[i] = empty[i] ? sink : m[i] > sink ? m[i] : sink;
            factor[i] = empty[i] ? 0.0f : exponential(m[i] - top[i]);
            total[i] = l[i] * factor[i] + exponential(sink - top[i]);
        }
        each_output([&](int i, int column, float &x) {
            narrow((T *)v.a.out + ((piece.local + row[i]) * v.a.heads + head) * d + column,
                   empty[i] ? 0.0f : x * factor[i] / total[i]);
        });
        UNROLL for (int i = 0; i < 2; i++) if (row[i] < piece.count && lane_of() % 4 == 0)(
            (float *)v.a.lse)[(piece.local + row[i]) * v.a.heads + head] =
            empty[i] && !v.a.sinks ? -INFINITY : top[i] + logf(total[i]);
    }
};

/* ---- backward: dq, or dk and dv. The block's rows are R1, R2; tiles of C1, C2 are streamed:
        s = R1 C1^T, dp = R2 C2^T, first += ds C1, second += p C2
   for dq  R = (q, dout), C = (k, v), first = dq;  for dk, dv  R = (k, v), C = (q, dout), first = dk, second = dv ---- */

template <class T, int D, int WARPS, int COLUMNS, bool KEYS, bool EXTRAS> struct gradient_job {
    enum {
        LINE = D + traits<T>::PAD,
        ROWS = 16 * WARPS,
        THREADS = WARP * WARPS,
        FLOATS = KEYS ? D : D / 2,
        SECOND = KEYS ? D / 8 : 1
    };
    const attn_view &v;
    const seqpar_attn_task &task;
    const seqpar_piece &piece;
    /* head: the query head, or with KEYS the kv head counted from head_begin */
    int64_t head, first_row, row[2];
    int64_t flops;
    float *stack;
    T *rows1, *rows2, *columns1, *columns2;
    int2 *seen_by;            /* (COLUMNS) dkv: keys that a query of the tile sees */
    float *lse_of, *delta_of; /* (COLUMNS) dkv */
    float own_lse[2], own_delta[2];
    float first[D / 8][4], second[SECOND][4];

    __device__ gradient_job(const attn_view &view, int64_t item)
        : v(view), task(view.a.tasks[view.tile[item / view.heads].x]),
          piece(view.a.q_pieces[task.piece]), head(item % view.heads),
          first_row(view.tile[item / view.heads].y), flops(0) {
        int64_t d = v.a.head_dim;
        if (!KEYS) head += v.a.head_begin * (v.a.heads / v.a.kv_heads);
        for (int i = 0; i < 2; i++)
            row[i] = first_row + (int)threadIdx.x / WARP * 16 + lane_of() / 4 + 8 * i;
        stack = v.stack + ((int64_t)blockIdx.x * v.a.depth * FLOATS) * THREADS + threadIdx.x;
        rows1 = SEQPAR_CUDA_SHARED(T);
        rows2 = rows1 + ROWS * LINE;
        columns1 = rows2 + ROWS * LINE;
        columns2 = columns1 + COLUMNS * LINE;
        seen_by = (int2 *)(columns2 + COLUMNS * LINE);
        lse_of = (float *)(seen_by + COLUMNS);
        delta_of = lse_of + COLUMNS;
        if (KEYS) {
            const seqpar_attn_keys &k = v.a.k_pieces[task.piece];
            load_tile(rows1, LINE, ROWS, D,
                      (const T *)v.a.k + ((k.k_row + first_row) * v.a.head_count + head) * d,
                      v.a.head_count * d, piece.count - first_row, d);
            load_tile(rows2, LINE, ROWS, D,
                      (const T *)v.a.v + ((k.v_row + first_row) * v.a.head_count + head) * d,
                      v.a.head_count * d, piece.count - first_row, d);
        } else {
            int64_t at = ((piece.local + first_row) * v.a.heads + head) * d;
            load_tile(rows1, LINE, ROWS, D, (const T *)v.a.q + at, v.a.heads * d,
                      piece.count - first_row, d);
            load_tile(rows2, LINE, ROWS, D, (const T *)v.a.dout + at, v.a.heads * d,
                      piece.count - first_row, d);
            UNROLL for (int i = 0; i < 2; i++) {
                int64_t t = (piece.local + row[i]) * v.a.heads + head;
                own_lse[i] = row[i] < piece.count ? ((const float *)v.a.lse)[t] : 0.0f;
                own_delta[i] = row[i] < piece.count ? ((const float *)v.a.delta)[t] : 0.0f;
            }
        }
        __syncthreads();
    }
    __device__ void clear() {
        UNROLL for (int j = 0; j < D / 8; j++) UNROLL for (int e = 0; e < 4; e++) {
            first[j][e] = 0;
            if (KEYS) second[j][e] = 0;
        }
    }
    __device__ void leaf(int index) {
        if (!KEYS) {
            over_keys(v.a.k_pieces[index]);
            return;
        }
        int64_t group = v.a.heads / v.a.kv_heads;
        for (int64_t h = (v.a.head_begin + head) * group;
             h < (v.a.head_begin + head + 1) * group; h++)
            over_queries(v.a.q_pieces[v.a.task_count + index], h);
    }
    __device__ void over_keys(const seqpar_attn_keys &k) {
        int64_t d = v.a.head_dim;
        int64_t kv = head / (v.a.heads / v.a.kv_heads) - v.a.head_begin;
        int64_t stride = v.a.head_count * d;
        int2 seen[2];
        UNROLL for (int i = 0; i < 2; i++)
            seen[i] = row[i] < piece.count ? visible_keys(v.a, piece.local + row[i], k)
                                           : make_int2(0, 0);
        if (lane_of() % 4 == 0)
            flops += 10 * d * (seen[0].y - seen[0].x + seen[1].y - seen[1].x);
        for (int64_t begin = 0; begin < k.count; begin += COLUMNS) {
            bool sees = (seen[0].x < begin + COLUMNS && seen[0].y > begin) ||
                        (seen[1].x < begin + COLUMNS && seen[1].y > begin);
            if (!__syncthreads_or(sees)) continue;
            load_tile(columns1, LINE, COLUMNS, D,
                      (const T *)v.a.k + ((k.k_row + begin) * v.a.head_count + kv) * d, stride,
                      k.count - begin, d);
            load_tile(columns2, LINE, COLUMNS, D,
                      (const T *)v.a.v + ((k.v_row + begin) * v.a.head_count + kv) * d, stride,
                      k.count - begin, d);
            __syncthreads();
            if (__any_sync(0xffffffffu, sees)) tile(begin, seen, piece, k, head);
        }
    }
    __device__ void over_queries(const seqpar_piece &queries, int64_t h) {
        const seqpar_attn_keys &k = v.a.k_pieces[task.piece];
        int64_t d = v.a.head_dim, end = least(first_row + ROWS, piece.count);
        for (int64_t begin = 0; begin < queries.count; begin += COLUMNS) {
            int mine = (int)threadIdx.x;
            bool sees = false;
            __syncthreads();
            if (mine < COLUMNS) {
                int64_t t = queries.local + begin + mine;
                bool there = begin + mine < queries.count;
                seen_by[mine] = there ? visible_keys(v.a, t, k) : make_int2(0, 0);
                lse_of[mine] = there ? ((const float *)v.a.lse)[t * v.a.heads + h] : 0.0f;
                delta_of[mine] = there ? ((const float *)v.a.delta)[t * v.a.heads + h] : 0.0f;
                int64_t pairs = least(seen_by[mine].y, end) - most(seen_by[mine].x, first_row);
                sees = pairs > 0;
            }
            if (!__syncthreads_or(sees)) continue;
            int64_t at = ((queries.local + begin) * v.a.heads + h) * d;
            load_tile(columns1, LINE, COLUMNS, D, (const T *)v.a.q + at, v.a.heads * d,
                      queries.count - begin, d);
            load_tile(columns2, LINE, COLUMNS, D, (const T *)v.a.dout + at, v.a.heads * d,
                      queries.count - begin, d);
            __syncthreads();
            tile(begin, NULL, queries, k, h);
        }
    }
    /* Does the query of tile element (half, column) see its key? column: within the tile. */
    __device__ __forceinline__ bool pair_exists(int half, int column, int64_t begin,
                                                const int2 *seen) {
        if (!KEYS) return begin + column >= seen[half].x && begin + column < seen[half].y;
        return row[half] < piece.count && row[half] >= seen_by[column].x &&
               row[half] < seen_by[column].y;
    }
    __device__ void tile(int64_t begin, const int2 *seen, const seqpar_piece &queries,
                         const seqpar_attn_keys &k, int64_t h) {
        float s[COLUMNS / 8][4], dp[COLUMNS / 8][4];
        int at = (int)threadIdx.x / WARP * 16 * LINE;
        scores<T, D, COLUMNS>(s, rows1 + at, columns1, LINE);
        scores<T, D, COLUMNS>(dp, rows2 + at, columns2, LINE);
        UNROLL_PLAIN for (int j = 0; j < COLUMNS / 8; j++)
            UNROLL_PLAIN for (int e = 0; e < 4; e++) {
            int half = e / 2, column = j * 8 + lane_of() % 4 * 2 + (e & 1);
            bool there = pair_exists(half, column, begin, seen);
            float x = s[j][e] * v.scale, slope = v.scale, z = 1, p;
            if (EXTRAS && v.softcap > 0) {
                float t = hyperbolic_tangent(x / v.softcap);
                x = v.softcap * t;
                slope *= 1.0f - t * t;
            }
            if (EXTRAS && v.a.dropout > 0 && there) {
                int64_t query = KEYS ? begin + column : row[half];
                int64_t key = KEYS ? row[half] : begin + column;
                z = dropout_factor(v, queries.document, h,
                                   queries.start + query * queries.stride - queries.origin,
                                   k.start + key * k.stride - queries.origin);
            }
            p = there ? exponential(x - (KEYS ? lse_of[column] : own_lse[half])) : 0.0f;
            dp[j][e] = there
                           ? p * (z * dp[j][e] - (KEYS ? delta_of[column] : own_delta[half])) *
                                 slope
                           : 0.0f;
            s[j][e] = p * z;
        }
        add_product<T, D, COLUMNS>(first, dp, columns1, LINE);
        if (KEYS) add_product<T, D, COLUMNS>(second, s, columns2, LINE);
    }
    template <class F> __device__ void with_stack(int level, F f) {
        float *at = stack + (int64_t)level * FLOATS * THREADS;
        UNROLL for (int j = 0; j < D / 8; j++) UNROLL for (int e = 0; e < 4; e++) {
            f(at[(j * 4 + e) * THREADS], first[j][e]);
            if (KEYS) f(at[(D / 2 + j * 4 + e) * THREADS], second[j][e]);
        }
    }
    __device__ void spill(int level) {
        with_stack(level, [](float &there, float &sum) { there = sum; });
    }
    __device__ void restore(int level) {
        with_stack(level, [](float &there, float &sum) { sum = there; });
    }
    __device__ void combine(int level) {
        with_stack(level, [](float &there, float &sum) { sum += there; });
    }
    /* Calls f(stored element, element) for a stored value: dq (count, head_dim), or dk and then
       dv. */
    template <class F> __device__ void with_place(int index, F f) {
        int64_t d = v.a.head_dim, value = (KEYS ? 2 : 1) * piece.count * d;
        int64_t group = v.a.heads / v.a.kv_heads;
        float *at = (float *)v.a.store +
                    (KEYS ? task.store_base + index * task.store_stride + head * value
                          : (index * v.a.q_tokens + piece.local) * v.a.head_count * group * d +
                                (head - v.a.head_begin * group) * value);
        each_output([&](int i, int column, float &x, float *y) {
            f(at[row[i] * d + column], x);
            if (KEYS) f(at[(piece.count + row[i]) * d + column], *y);
        });
    }
    template <class F> __device__ void each_output(F f) {
        UNROLL for (int j = 0; j < D / 8; j++) UNROLL for (int e = 0; e < 4; e++) {
            int column = j * 8 + lane_of() % 4 * 2 + (e & 1);
            if (row[e / 2] < piece.count && column < v.a.head_dim)
                f(e / 2, column, first[j][e], KEYS ? &second[j][e] : NULL);
        }
    }
    __device__ void load(int index) {
        clear();
        with_place(index, [](float &there, float &sum) { sum = there; });
    }
    __device__ void store(int index) {
        with_place(index, [](float &there, float &sum) { there = sum; });
    }
    __device__ void finish() {
        int64_t d = v.a.head_dim;
        each_output([&](int i, int column, float &x, float *y) {
            if (!KEYS) {
                narrow((T *)v.a.dq + ((piece.local + row[i]) * v.a.heads + head) * d + column,
                       x);
                return;
            }
            int64_t at = ((piece.local + row[i]) * v.a.kv_heads + v.a.head_begin + head) * d +
                         column;
            narrow((T *)v.a.dk + at, x);
            narrow((T *)v.a.dv + at, *y);
        });
    }
};

/* An item is a tile of rows and a head. The heaviest come first, so that none of them runs
   alone at the end. */
template <class Job> __global__ void __launch_bounds__(Job::THREADS) attn_kernel(attn_view v) {
    int64_t items = v.tiles * v.heads, flops = 0;
    for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
        Job job(v, items - 1 - i);
        run_program(job, (const seqpar_fold_op *)(v.lists + (intptr_t)job.task.program),
                    job.task.program_count);
        flops += job.flops;
        __syncthreads();
    }
    if (flops) atomicAdd(v.flops, (unsigned long long)flops); /* a count: the order is free */
}

/* ---- fold of the dk, dv from other ranks: one thread per column of a task's value ---- */

template <class T> struct return_job {
    const attn_view &v;
    const seqpar_attn_task &task;
    const seqpar_piece &piece;
    int64_t head, column, value, columns;
    float *stack;
    float top;
    __device__ const float *inbox(int index) const {
        return (const float *)v.a.inbox + task.inbox_base +
               (index * v.a.head_count + head) * value;
    }
    __device__ float &place(int index) {
        return (
            (float *)
                v.a.store)[task.store_base + index * task.store_stride + head * value + column];
    }
    /* begins at -0: -0 + x is x, also if x is a zero of either sign */
    __device__ void clear() { top = -0.0f; }
    __device__ void leaf(int index) { top += inbox(index)[column]; }
    __device__ void spill(int level) { stack[level * columns] = top; }
    __device__ void restore(int level) { top = stack[level * columns]; }
    __device__ void combine(int level) { top += stack[level * columns]; }
    __device__ void load(int index) { top = place(index); }
    __device__ void store(int index) { place(index) = top; }
    __device__ void finish() {
        int64_t d = v.a.head_dim, half = value / 2, row = column % half / d;
        int64_t at = ((piece.local + row) * v.a.kv_heads + v.a.head_begin + head) * d +
                     column % d;
        narrow((column < half ? (T *)v.a.dk : (T *)v.a.dv) + at, top);
    }
};

/* columns: number of columns of the longest value */
template <class T> __global__ void attn_return_kernel(attn_view v, int64_t columns) {
    const seqpar_attn_task &task = v.a.tasks[blockIdx.y / v.heads];
    const seqpar_piece &piece = v.a.q_pieces[task.piece];
    int64_t column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t value = 2 * piece.count * v.a.head_dim;
    return_job<T> job = {
        v,      task,  piece,   (int64_t)blockIdx.y % v.heads,
        column, value, columns, v.stack + (int64_t)blockIdx.y * v.a.depth * columns + column,
        0};
    if (column < value)
        run_program(job, (const seqpar_fold_op *)(v.lists + (intptr_t)task.program),
                    task.program_count);
}

/* ---- launching ---- */

enum { FORWARD, DQ, DKV, RETURN };

/* Uploads all lists of a call and points `v` to them on the device. The program of a task
   becomes a byte offset from v->lists. */
static seqpar_status list_attn(cuda_device *self, attn_view *v, int kind, int64_t rows) {
    seqpar_attn_args *a = &v->a;
    int64_t leaves = 0, tiles = 0, pieces = 0, keys = 0, at = 0;
    seqpar_attn_task *tasks = (seqpar_attn_task *)malloc((size_t)a->task_count * sizeof *tasks);
    for (int64_t i = 0; i < a->task_count; i++) {
        leaves = most(leaves, leaves_of(a->tasks[i].program, a->tasks[i].program_count));
        pieces = most(pieces, a->tasks[i].piece + 1);
        tiles += (a->q_pieces[a->tasks[i].piece].count + rows - 1) / rows;
    }
    keys = kind == DKV ? pieces : kind == RETURN ? 0 : leaves;
    if (kind == DKV) pieces = most(pieces, a->task_count + leaves);
    int2 *tile = (int2 *)malloc(((size_t)tiles + 1) * sizeof *tile);
    for (int64_t i = 0; tile && tasks && i < a->task_count; i++) {
        tasks[i] = a->tasks[i];
        tasks[i].program = (const seqpar_fold_op *)(intptr_t)list_add(
            self, a->tasks[i].program,
            a->tasks[i].program_count * (int64_t)sizeof *a->tasks[i].program);
        for (int64_t r = 0; r < a->q_pieces[a->tasks[i].piece].count; r += rows)
            tile[at++] = make_int2((int)i, (int)r);
    }
    v->tiles = tiles;
    if (tile && tasks) {
        a->tasks = (const seqpar_attn_task *)(intptr_t)list_add(
            self, tasks, a->task_count * (int64_t)sizeof *tasks);
        v->tile = (const int2 *)(intptr_t)list_add(self, tile, tiles * (int64_t)sizeof *tile);
        a->q_pieces = (const seqpar_piece *)(intptr_t)list_add(
            self, a->q_pieces, pieces * (int64_t)sizeof *a->q_pieces);
        a->k_pieces = (const seqpar_attn_keys *)(intptr_t)list_add(
            self, a->k_pieces, keys * (int64_t)sizeof *a->k_pieces);
        if (kind != RETURN) {
            a->visible_begin = (const int32_t *)(intptr_t)list_add(self, a->visible_begin,
                                                                   a->q_tokens * 4);
            a->visible_end = (const int32_t *)(intptr_t)list_add(self, a->visible_end,
                                                                 a->q_tokens * 4);
        }
    }
    bool whole = tile && tasks;
    free(tile);
    free(tasks);
    v->lists = whole ? upload(self) : NULL;
    if (!v->lists)
        return seqpar_fail(self->base.error, SEQPAR_ERR_MEMORY,
                           "no memory for the lists of %lld attention tasks",
                           (long long)a->task_count);
    a->tasks = (const seqpar_attn_task *)(v->lists + (intptr_t)a->tasks);
    v->tile = (const int2 *)(v->lists + (intptr_t)v->tile);
    a->q_pieces = (const seqpar_piece *)(v->lists + (intptr_t)a->q_pieces);
    a->k_pieces = (const seqpar_attn_keys *)(v->lists + (intptr_t)a->k_pieces);
    if (kind == RETURN) return SEQPAR_OK;
    a->visible_begin = (const int32_t *)(v->lists + (intptr_t)a->visible_begin);
    a->visible_end = (const int32_t *)(v->lists + (intptr_t)a->visible_end);
    return SEQPAR_OK;
}

static attn_view view_of(cuda_device *self, const seqpar_attn_args *a, int kind) {
    attn_view v;
    memset(&v, 0, sizeof v);
    v.a = *a;
    v.heads = kind < DKV ? a->head_count * (a->heads / a->kv_heads) : a->head_count;
    v.flops = self->flops;
    v.dropout_key = seqpar_attn_dropout_key(a->dropout_seed, a->dropout_stream);
    v.scale = (float)a->scale;
    v.softcap = (float)a->softcap;
    v.keep = (float)(1.0 / (1.0 - a->dropout));
    return v;
}

template <class Job>
static seqpar_status launch_attn(cuda_device *self, attn_view *v, int kind, size_t shared) {
    seqpar_status status = list_attn(self, v, kind, Job::ROWS);
    if (status) return status;
    int64_t items = v->tiles * v->heads, grid = least(items, 4 * self->multiprocessors);
    v->stack = (float *)scratch(self, grid * v->a.depth * Job::FLOATS * Job::THREADS * 4 + 4);
    if (!v->stack) return SEQPAR_ERR_MEMORY;
    if (!items) return SEQPAR_OK;
    cudaError_t error = shared > 48 * 1024
                            ? cudaFuncSetAttribute(attn_kernel<Job>,
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   (int)shared)
                            : cudaSuccess;
    if (error)
        return seqpar_fail(self->base.error, SEQPAR_ERR_DEVICE,
                           "attention with head_dim %lld needs %lld bytes of shared memory, "
                           "which CUDA device %d does not have; use bf16 or a smaller head",
                           (long long)v->a.head_dim, (long long)shared, self->ordinal);
    return SEQPAR_CUDA_LAUNCH(self, attn_kernel<Job>, dim3((unsigned)grid), dim3(Job::THREADS),
                              shared, *v);
}

/* EXTRAS: with softcap or dropout; a separate instance, so that others do not get slower. */
template <class T, int D, bool EXTRAS>
static seqpar_status launch_attn_of(cuda_device *self, attn_view *v, int kind) {
    enum {
        WARPS = D > 128 ? 2 : 4,
        COLUMNS = D > 128 ? 32 : 64,
        BACK = D > 64 ? 32 : 64,
        LINE = D + traits<T>::PAD,
        ROWS = 16 * WARPS
    };
    if (kind == FORWARD)
        return launch_attn<forward_job<T, D, WARPS, COLUMNS, EXTRAS>>(
            self, v, kind, (ROWS + 2 * COLUMNS) * LINE * sizeof(T) + 2 * WARPS * sizeof(int));
    size_t shared = (2 * ROWS + 2 * BACK) * LINE * sizeof(T) +
                    BACK * (sizeof(int2) + 2 * sizeof(float));
    if (kind == DQ)
        return launch_attn<gradient_job<T, D, WARPS, BACK, false, EXTRAS>>(self, v, kind,
                                                                           shared);
    return launch_attn<gradient_job<T, D, WARPS, BACK, true, EXTRAS>>(self, v, kind, shared);
}

template <class T, bool EXTRAS>
static seqpar_status launch_attn_by_width(cuda_device *self, attn_view *v, int kind) {
    int64_t d = v->a.head_dim;
    if constexpr (SEQPAR_CUDA_HEAD_DIM_MAX > 128)
        if (d > 128) return launch_attn_of<T, 256, EXTRAS>(self, v, kind);
    if constexpr (SEQPAR_CUDA_HEAD_DIM_MAX > 96)
        if (d > 96) return launch_attn_of<T, 128, EXTRAS>(self, v, kind);
    if constexpr (SEQPAR_CUDA_HEAD_DIM_MAX > 64)
        if (d > 64) return launch_attn_of<T, 96, EXTRAS>(self, v, kind);
    return launch_attn_of<T, 64, EXTRAS>(self, v, kind);
}

template <class T>
static seqpar_status attn_op(seqpar_device *device, const seqpar_attn_args *a, void *queue,
                             int kind) {
    cuda_device *self = of(device);
    attn_view v = view_of(self, a, kind);
    if (a->task_count < 1) return SEQPAR_OK;
    enter(self, queue);
    int64_t d = a->head_dim;
    if (d > SEQPAR_CUDA_HEAD_DIM_MAX)
        return seqpar_fail(device->error, SEQPAR_ERR_HEAD_DIM,
                           "head_dim is %lld; the CUDA device takes up to %d%s", (long long)d,
                           SEQPAR_CUDA_HEAD_DIM_MAX,
                           SEQPAR_CUDA_HEAD_DIM_MAX < 256
                               ? ", as SEQPAR_CUDA_HEAD_DIM_MAX says; compile it with more"
                               : "");
    bool extras = a->dropout > 0 || a->softcap > 0;
    seqpar_status status = extras ? launch_attn_by_width<T, true>(self, &v, kind)
                                  : launch_attn_by_width<T, false>(self, &v, kind);
    /* without a queue the host waits anyway, so the FLOP count is read, too */
    return status || queue ? finish(self, status, queue) : device_settle(device, NULL);
}

template <class T>
static seqpar_status op_attn_forward(seqpar_device *device, const seqpar_attn_args *a,
                                     void *queue) {
    return attn_op<T>(device, a, queue, FORWARD);
}

template <class T>
static seqpar_status op_attn_backward(seqpar_device *device, const seqpar_attn_backward_args *a,
                                      void *queue) {
    seqpar_status status = attn_op<T>(device, &a->queries, queue, DQ);
    for (int64_t g = 0; !status && g < a->groups; g++)
        status = attn_op<T>(device, &a->keys[g], queue, DKV);
    return status;
}

template <class T>
static seqpar_status op_attn_return(seqpar_device *device, const seqpar_attn_args *a,
                                    void *queue) {
    cuda_device *self = of(device);
    attn_view v = view_of(self, a, RETURN);
    int64_t columns = 0;
    if (a->task_count < 1) return SEQPAR_OK;
    enter(self, queue);
    for (int64_t i = 0; i < a->task_count; i++)
        columns = most(columns, 2 * a->q_pieces[a->tasks[i].piece].count * a->head_dim);
    seqpar_status status = list_attn(self, &v, RETURN, columns + 1);
    if (status) return status;
    v.stack = (float *)scratch(self, a->task_count * v.heads * a->depth * columns * 4 + 4);
    if (!v.stack) return SEQPAR_ERR_MEMORY;
    dim3 grid((unsigned)((columns + BLOCK - 1) / BLOCK), (unsigned)(a->task_count * v.heads));
    return finish(self,
                  columns ? SEQPAR_CUDA_LAUNCH(self, attn_return_kernel<T>, grid, dim3(BLOCK),
                                               0, v, columns)
                          : SEQPAR_OK,
                  queue);
}

/* ---- other operations of attention ---- */

/* One warp per (token, head). */
template <class T>
__global__ void attn_delta_kernel(float *delta, const T *dout, const T *out, int64_t count,
                                  int64_t d) {
    int64_t n = (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    float sum = 0;
    if (n >= count) return;
    for (int64_t i = lane_of(); i < d; i += WARP)
        sum = fmaf(wide(dout[n * d + i]), wide(out[n * d + i]), sum);
    sum = warp_sum(sum);
    if (lane_of() == 0) delta[n] = sum;
}

template <class T>
static seqpar_status op_attn_delta(seqpar_device *device, const seqpar_attn_delta_args *a,
                                   void *queue) {
    cuda_device *self = of(device);
    if (a->tokens < 1) return SEQPAR_OK;
    enter(self, queue);
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, attn_delta_kernel<T>,
                                     blocks_for(a->tokens * a->heads, BLOCK / WARP),
                                     dim3(BLOCK), 0, (float *)a->delta, (const T *)a->dout,
                                     (const T *)a->out, a->tokens * a->heads, a->head_dim),
                  queue);
}

/* One warp per (piece, head). */
__global__ void attn_sinks_kernel(float *dsinks, const float *sinks, const float *lse,
                                  const float *delta, const token_range *ranges,
                                  int64_t heads) {
    int64_t head = blockIdx.y;
    token_range r = ranges[blockIdx.x];
    float sum = 0;
    for (int64_t t = r.begin + lane_of(); t < r.begin + r.count; t += WARP)
        sum -= exponential(sinks[head] - lse[t * heads + head]) * delta[t * heads + head];
    sum = warp_sum(sum);
    if (lane_of() == 0) dsinks[blockIdx.x * heads + head] = sum;
}

template <typename T>
static seqpar_status op_attn_sinks(seqpar_device *device, const seqpar_attn_sinks_args *a,
                                   void *queue) {
    cuda_device *self = of(device);
    if (a->piece_count < 1) return SEQPAR_OK;
    enter(self, queue);
    int64_t ranges = list_ranges(self, a->pieces, a->piece_count);
    const char *lists = upload(self);
    if (ranges < 0 || !lists) return SEQPAR_ERR_MEMORY;
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, attn_sinks_kernel,
                                     dim3((unsigned)a->piece_count, (unsigned)a->heads),
                                     dim3(WARP), 0, (float *)a->dsinks, (const float *)a->sinks,
                                     (const float *)a->lse, (const float *)a->delta,
                                     (const token_range *)(lists + ranges), a->heads),
                  queue);
}

/* log(exp(a) + exp(b)); -inf: a side without keys. */
__device__ static float merged_lse(float a, float b) {
    float top = fmaxf(a, b), low = fminf(a, b);
    return low == -INFINITY ? top : top + logf(1 + exponential(low - top));
}

__device__ static float merged_weight(float log, float whole) {
    return log == -INFINITY ? 0 : exponential(log - whole);
}

/* One warp per (token, head). */
template <class T> __global__ void attn_merge_kernel(seqpar_attn_merge_args a) {
    int64_t n = (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, d = a.head_dim;
    if (n >= a.tokens * a.heads) return;
    int64_t at = n / a.heads * a.out_heads + n % a.heads;
    float *sum = (float *)a.sum + n * d, *sum_lse = (float *)a.sum_lse;
    const float *add = (const float *)a.part + n * d;
    float old = a.begin || !sum_lse ? -INFINITY : sum_lse[n];
    float part = a.part_lse ? ((const float *)a.part_lse)[n] : -INFINITY;
    float sink = a.sinks ? ((const float *)a.sinks)[n % a.heads] : -INFINITY;
    float whole = part != part ? part : merged_lse(merged_lse(old, part), sink);
    float keep = a.begin ? 0 : sum_lse ? merged_weight(old, whole) : 1;
    float take = !a.part ? 0 : sum_lse ? merged_weight(part, whole) : 1;
    for (int64_t i = lane_of(); i < d; i += WARP) {
        float x = keep != 0 ? keep * sum[i] : 0;
        if (take != 0) x = fmaf(take, add[i], x);
        sum[i] = x;
        if (a.out) narrow((T *)a.out + at * d + i, x);
    }
    __syncwarp();
    if (lane_of() == 0 && sum_lse) sum_lse[n] = whole;
    if (lane_of() == 0 && a.lse) ((float *)a.lse)[at] = whole;
}

template <class T>
static seqpar_status op_attn_merge(seqpar_device *device, const seqpar_attn_merge_args *a,
                                   void *queue) {
    cuda_device *self = of(device);
    if (a->tokens * a->heads < 1) return SEQPAR_OK;
    enter(self, queue);
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, attn_merge_kernel<T>,
                                     blocks_for(a->tokens * a->heads, BLOCK / WARP),
                                     dim3(BLOCK), 0, *a),
                  queue);
}

/* =============================================================================================
   >>vocab  cross-entropy
   ========================================================================================== */

/* block_sum and block_max return the same sum or maximum in all threads of a block. part:
   shared memory, one number per warp. */
template <class F> static __device__ __forceinline__ F block_sum(F x, F *part) {
    x = warp_sum(x);
    __syncthreads();
    if (lane_of() == 0) part[threadIdx.x / WARP] = x;
    __syncthreads();
    x = 0;
    for (int w = 0; w < (int)blockDim.x / WARP; w++) x += part[w];
    return x;
}

static __device__ __forceinline__ float larger(float a, float b) {
    return b > a || b != b ? b : a;
}

static __device__ __forceinline__ float block_max(float x, float *part) {
    for (int i = WARP / 2; i; i /= 2) x = larger(x, __shfl_xor_sync(0xffffffffu, x, i));
    __syncthreads();
    if (lane_of() == 0) part[threadIdx.x / WARP] = x;
    __syncthreads();
    for (int w = 0; w < (int)blockDim.x / WARP; w++) x = larger(x, part[w]);
    return x;
}

struct head_view {
    int64_t stride, vocab;
    const int32_t *targets;
    float *logp, *entropy, *lse, *smooth;
    const float *dlogp, *dentropy, *dsmooth, *dzloss;
    float scale;
    int gradient;
};

static __device__ __forceinline__ float seed(const float *seeds, int64_t t) {
    return seeds ? seeds[t] : 0.0f;
}

/* One block per row: maximum, sums and, in place of the logits, the gradient. For its formula
   see seqpar_vocab_softmax_args. */
template <class T>
__global__ void __launch_bounds__(BLOCK) vocab_softmax_kernel(T *logits, head_view v) {
    float *part = SEQPAR_CUDA_SHARED(float);
    int64_t t = blockIdx.x;
    T *x = logits + t * v.stride;
    int32_t target = v.targets[t];
    bool live = target != SEQPAR_IGNORE;
    float top = -INFINITY, sum = 0, mean = 0, weighted = 0;
    float hit = live ? wide(x[target]) * v.scale : 0.0f;
    for (int64_t j = threadIdx.x; j < v.vocab; j += blockDim.x)
        top = larger(top, wide(x[j]) * v.scale);
    top = block_max(top, part);
    for (int64_t j = threadIdx.x; j < v.vocab; j += blockDim.x) {
        float s = wide(x[j]) * v.scale, p = exponential(s - top);
        sum += p;
        mean += s;
        if (p != 0) weighted = fmaf(p, s - top, weighted); /* s may be -inf */
    }
    sum = block_sum(sum, part);
    float log_sum = logf(sum), lse = top + log_sum;
    float entropy = log_sum - block_sum(weighted, part) / sum;
    mean = block_sum(mean, part) / (float)v.vocab;
    if (threadIdx.x == 0) {
        /* not hit - lse: if logits are far from 0, rounding lse loses more */
        if (v.logp) v.logp[t] = live ? (hit - top) - log_sum : 0.0f;
        if (v.lse) v.lse[t] = lse;
        if (v.entropy) v.entropy[t] = entropy;
        if (v.smooth) v.smooth[t] = lse - mean;
    }
    float c = live ? seed(v.dlogp, t) : 0.0f, e = seed(v.dentropy, t);
    float s = live ? seed(v.dsmooth, t) : 0.0f, z = live ? seed(v.dzloss, t) : 0.0f;
    for (int64_t j = threadIdx.x; v.gradient && j < v.vocab; j += blockDim.x) {
        float y = (wide(x[j]) * v.scale - top) - log_sum, p = exponential(y);
        float d = c * ((live && j == target ? 1.0f : 0.0f) - p) -
                  (p != 0 ? e * p * (y + entropy) : 0.0f) + s * (p - 1.0f / (float)v.vocab) +
                  z * 2.0f * lse * p;
        narrow(&x[j], d * v.scale);
    }
}

template <class T>
static seqpar_status op_vocab_softmax(seqpar_device *device, const seqpar_vocab_softmax_args *a,
                                      void *queue) {
    cuda_device *self = of(device);
    if (a->rows < 1) return SEQPAR_OK;
    enter(self, queue);
    int64_t targets = list_add(self, a->targets, a->rows * 4);
    const char *lists = upload(self);
    if (targets < 0 || !lists) return SEQPAR_ERR_MEMORY;
    head_view v = {a->logits.stride,
                   a->vocab,
                   (const int32_t *)(lists + targets),
                   (float *)a->logp,
                   (float *)a->entropy,
                   (float *)a->lse,
                   (float *)a->smooth,
                   (const float *)a->dlogp,
                   (const float *)a->dentropy,
                   (const float *)a->dsmooth,
                   (const float *)a->dzloss,
                   a->scale != 0 ? (float)a->scale : 1.0f,
                   a->gradient};
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, vocab_softmax_kernel<T>, dim3((unsigned)a->rows),
                                     dim3(BLOCK), BLOCK / WARP * sizeof(float),
                                     (T *)a->logits.data, v),
                  queue);
}

/* ---- distill: KL divergence between a student's softmax and a teacher's ---- */

struct distill_view {
    int64_t stride, teacher_stride, vocab;
    float *kl, *entropy;
    const float *dkl;
    float scale;
    int reverse, gradient;
};

/* Scales a logit and bounds it below, so that the difference of two is never -inf - -inf. */
static __device__ __forceinline__ float scaled(float x, float scale) {
    return larger(-1e38f, x * scale);
}

/* One block per row; for the formula see seqpar_distill_args. Logits are subtracted before they
   are summed, so that equal logits contribute exactly 0. */
template <class T>
__global__ void __launch_bounds__(BLOCK)
    distill_kernel(const T *logits, T *teacher, distill_view v) {
    float *part = SEQPAR_CUDA_SHARED(float);
    int64_t t = blockIdx.x;
    const T *x = logits + t * v.stride;
    T *z = teacher + t * v.teacher_stride;
    float top = -INFINITY, teacher_top = -INFINITY, sum = 0, teacher_sum = 0, far = 0, own = 0;
    for (int64_t j = threadIdx.x; j < v.vocab; j += blockDim.x) {
        top = larger(top, wide(x[j]) * v.scale);
        teacher_top = larger(teacher_top, wide(z[j]) * v.scale);
    }
    top = block_max(top, part);
    teacher_top = block_max(teacher_top, part);
    for (int64_t j = threadIdx.x; j < v.vocab; j += blockDim.x) {
        float a = scaled(wide(x[j]), v.scale), b = scaled(wide(z[j]), v.scale);
        float p = exponential(a - top), q = exponential(b - teacher_top);
        sum += p;
        teacher_sum += q;
        far = v.reverse ? fmaf(p, a - b, far) : fmaf(q, b - a, far);
        own = fmaf(q, b - teacher_top, own);
    }
    sum = block_sum(sum, part);
    teacher_sum = block_sum(teacher_sum, part);
    float apart = (top - teacher_top) + (logf(sum) - logf(teacher_sum));
    far = block_sum(far, part) / (v.reverse ? sum : teacher_sum);
    float kl = v.reverse ? far - apart : far + apart;
    own = block_sum(own, part) / teacher_sum;
    if (threadIdx.x == 0) {
        if (v.kl) v.kl[t] = kl;
        if (v.entropy) v.entropy[t] = logf(teacher_sum) - own;
    }
    float d = seed(v.dkl, t) * v.scale;
    for (int64_t j = threadIdx.x; v.gradient && j < v.vocab; j += blockDim.x) {
        float a = scaled(wide(x[j]), v.scale), b = scaled(wide(z[j]), v.scale);
        float p = exponential(a - top) / sum, q = exponential(b - teacher_top) / teacher_sum;
        narrow(&z[j], d * (v.reverse ? p * ((a - b) - (apart + kl)) : p - q));
    }
}

template <class T>
static seqpar_status op_distill(seqpar_device *device, const seqpar_distill_args *a,
                                void *queue) {
    cuda_device *self = of(device);
    if (a->rows < 1) return SEQPAR_OK;
    enter(self, queue);
    distill_view v = {a->logits.stride,
                      a->teacher.stride,
                      a->vocab,
                      (float *)a->kl,
                      (float *)a->entropy,
                      (const float *)a->dkl,
                      a->scale != 0 ? (float)a->scale : 1.0f,
                      a->reverse,
                      a->gradient};
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, distill_kernel<T>, dim3((unsigned)a->rows),
                                     dim3(BLOCK), BLOCK / WARP * sizeof(float),
                                     (const T *)a->logits.data, (T *)a->teacher.data, v),
                  queue);
}

/* ---- choose: a softmax over some tokens alone ---- */

struct choose_view {
    int64_t stride, vocab;
    int count;
    int32_t ids[SEQPAR_MAX_CHOICES];
    float *logq;
    const float *dlogq;
    float scale;
    int gradient;
};

/* One block per row. Every thread has the few logits in registers; thread 0 writes logq and the
   gradients at those tokens. */
template <class T>
__global__ void __launch_bounds__(BLOCK) choose_kernel(T *logits, choose_view v) {
    int64_t t = blockIdx.x;
    T *x = logits + t * v.stride;
    float y[SEQPAR_MAX_CHOICES], top = -INFINITY, sum = 0, seeds = 0;
    UNROLL for (int k = 0; k < SEQPAR_MAX_CHOICES; k++) {
        y[k] = k < v.count ? wide(x[v.ids[k]]) * v.scale : -INFINITY;
        top = larger(top, y[k]);
        seeds += k < v.count ? seed(v.dlogq, t * v.count + k) : 0.0f;
    }
    UNROLL for (int k = 0; k < SEQPAR_MAX_CHOICES; k++)
        sum += k < v.count ? exponential(y[k] - top) : 0.0f;
    float log_sum = logf(sum);
    if (v.gradient) {
        __syncthreads(); /* all have read the row */
        for (int64_t j = threadIdx.x; j < v.vocab; j += blockDim.x) narrow(&x[j], 0.0f);
        __syncthreads();
    }
    if (threadIdx.x) return;
    UNROLL for (int k = 0; k < SEQPAR_MAX_CHOICES; k++) {
        if (k >= v.count) continue;
        float logq = (y[k] - top) - log_sum;
        if (v.logq) v.logq[t * v.count + k] = logq;
        if (v.gradient)
            narrow(&x[v.ids[k]],
                   v.scale * (seed(v.dlogq, t * v.count + k) - exponential(logq) * seeds));
    }
}

template <class T>
static seqpar_status op_choose(seqpar_device *device, const seqpar_choose_args *a,
                               void *queue) {
    cuda_device *self = of(device);
    if (a->rows < 1) return SEQPAR_OK;
    enter(self, queue);
    choose_view v = {a->logits.stride,
                     a->vocab,
                     (int)a->count,
                     {},
                     (float *)a->logq,
                     (const float *)a->dlogq,
                     a->scale != 0 ? (float)a->scale : 1.0f,
                     a->gradient};
    memcpy(v.ids, a->ids, sizeof v.ids);
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, choose_kernel<T>, dim3((unsigned)a->rows),
                                     dim3(BLOCK), 0, (T *)a->logits.data, v),
                  queue);
}

/* ---- nf4_rows: rows of a matrix in NF4, dequantized ---- */

struct nf4_view {
    int64_t stride, cols, row, col, width;
    seqpar_nf4 from;
};

/* The values of seqpar__nf4_levels, selected by the bits of the code without a table. */
static __device__ float nf4_level(int code) {
    float low = code & 2 ? (code & 1 ? -0.394917488f : -0.525073051f)
                         : (code & 1 ? -0.696192801f : -1.0f);
    float second = code & 2 ? (code & 1 ? 0.0f : -0.0910500363f)
                            : (code & 1 ? -0.184773430f : -0.284441382f);
    float third = code & 2 ? (code & 1 ? 0.337915242f : 0.246112302f)
                           : (code & 1 ? 0.160930201f : 0.0795802996f);
    float high = code & 2 ? (code & 1 ? 1.0f : 0.722956836f)
                          : (code & 1 ? 0.562617004f : 0.440709829f);
    return code & 8 ? (code & 4 ? high : third) : (code & 4 ? second : low);
}

/* As seqpar__nf4_point; fmaf rounds product and sum once. */
static __device__ float nf4_point(int n, int i) {
    float step = (1.0f - 0.1f) / (float)n;
    return i < (n + 1) / 2 ? fmaf(step, (float)i, 0.1f) : fmaf(-step, (float)(n - i), 1.0f);
}

/* As seqpar__nf4_byte_value. */
static __device__ float nf4_mark(int byte) {
    int n = byte < 127 ? 126 - byte : byte - 128, e = 0;
    if (byte == 127 || byte == 255) return byte == 127 ? 0.0f : 1.0f;
    while (n + 1 >= 2 << e) e++;
    n += 1 - (1 << e);
    float decade = e == 0   ? 1e-6f
                   : e == 1 ? 1e-5f
                   : e == 2 ? 1e-4f
                   : e == 3 ? 1e-3f
                   : e == 4 ? 1e-2f
                   : e == 5 ? 1e-1f
                            : 1.0f;
    float mark = decade * ((nf4_point(1 << e, n) + nf4_point(1 << e, n + 1)) / 2.0f);
    return byte < 127 ? -mark : mark;
}

/* One block per row. Shared memory holds the values of all scale bytes and codes. */
template <class T> __global__ void __launch_bounds__(BLOCK) nf4_kernel(T *out, nf4_view v) {
    float *marks = SEQPAR_CUDA_SHARED(float), *levels = marks + 256;
    for (int i = threadIdx.x; i < 256 + 16; i += blockDim.x)
        marks[i] = i < 256 ? nf4_mark(i) : nf4_level(i - 256);
    __syncthreads();
    out += blockIdx.x * v.stride;
    for (int64_t j = threadIdx.x; j < v.cols; j += blockDim.x) {
        int64_t n = (v.row + blockIdx.x) * v.width + v.col + j, group = n / SEQPAR_NF4_GROUP;
        int two = v.from.codes[n / 2];
        float scale = __fadd_rn(
            __fmul_rn(marks[v.from.scales[group]], v.from.steps[group / SEQPAR_NF4_STEP]),
            *v.from.offset);
        narrow(&out[j], levels[n & 1 ? two & 15 : two >> 4] * scale);
    }
}

template <class T>
static seqpar_status op_nf4_rows(seqpar_device *device, const seqpar_nf4_rows_args *a,
                                 void *queue) {
    cuda_device *self = of(device);
    if (a->rows < 1) return SEQPAR_OK;
    enter(self, queue);
    nf4_view v = {a->out.stride, a->cols, a->row, a->col, a->width, a->from};
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, nf4_kernel<T>, dim3((unsigned)a->rows), dim3(BLOCK),
                                     (256 + 16) * sizeof(float), (T *)a->out.data, v),
                  queue);
}

/* ---- sample: a token from its logits ----
   The candidates are the n most likely tokens; among equally likely ones, those with the lowest
   ids. Nothing is sorted: the key of the last candidate is found bit by bit, from the number
   and the weight of the tokens whose keys are not smaller. Sums are doubles; their order does
   not depend on other rows. */

/* Maps x to an integer that rises with x; of_key is the inverse. */
static __device__ __forceinline__ uint32_t key_of(float x) {
    uint32_t bits = __float_as_uint(x == 0 ? 0.0f : x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

static __device__ __forceinline__ float of_key(uint32_t key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

/* The most likely tokens. key: that of the last one; ties: how many tokens with this key belong
   to the set. */
struct likeliest {
    double count, weight;
    uint32_t key;
    double ties;
};

struct mass {
    double count, weight;
};

template <class T> struct row_choice {
    const T *x;
    const double *weight; /* proportional to the probability; the most likely token has 1 */
    int64_t vocab;
    double temperature;
    float top;
    double *part; /* (BLOCK + 2) of shared memory */
    __device__ double weight_of(float logit) {
        return exp(((double)logit - (double)top) / temperature);
    }
    template <class F> __device__ double sum_of(F f) {
        double sum = 0;
        for (int64_t j = threadIdx.x; j < vocab; j += blockDim.x) sum += f(j);
        return block_sum(sum, part);
    }
    /* Number and weight of the tokens for whose keys among() is true. */
    template <class F> __device__ mass mass_of(F among) {
        mass m = {0, 0};
        for (int64_t j = threadIdx.x; j < vocab; j += blockDim.x)
            if (among(key_of(wide(x[j])))) {
                m.count += 1;
                m.weight += weight[j];
            }
        m.count = block_sum(m.count, part);
        m.weight = block_sum(m.weight, part);
        return m;
    }
    /* Returns the smallest set of most likely tokens that has `most` tokens, or whose weight
       reaches (over: exceeds) `goal`. */
    __device__ likeliest fewest(double most, double goal, bool over) {
        likeliest set = {0, 0, 0, 0};
        for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
            uint32_t key = set.key | bit;
            mass m = mass_of([&](uint32_t k) { return k >= key; });
            if (m.count >= most || (over ? m.weight > goal : m.weight >= goal)) set.key = key;
        }
        mass above = mass_of([&](uint32_t k) { return k > set.key; }),
             equal = mass_of([&](uint32_t k) { return k == set.key; });
        double one = weight_of(of_key(set.key)), lacking = (goal - above.weight) / one;
        set.ties = fmin(
            fmax(fmin(most - above.count, over ? floor(lacking) + 1 : ceil(lacking)), 1.0),
            equal.count);
        set.count = above.count + set.ties;
        set.weight = above.weight + set.ties * one;
        return set;
    }
    /* Returns in all threads the first token at which the running sum of f exceeds goal. Each
       thread adds a run of consecutive tokens. */
    template <class F> __device__ int32_t first_beyond(double goal, F f) {
        int64_t run = (vocab + blockDim.x - 1) / blockDim.x, begin = threadIdx.x * run;
        int64_t end = begin + run < vocab ? begin + run : vocab;
        int64_t j;
        double sum = 0;
        for (j = begin; j < end; j++) sum += f(j);
        __syncthreads();
        part[threadIdx.x] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            int64_t last = (vocab - 1) / run, owner = 0;
            for (sum = 0; owner < last && !(sum + part[owner] > goal); owner++)
                sum += part[owner];
            part[BLOCK] = sum;
            part[BLOCK + 1] = (double)owner;
        }
        __syncthreads();
        int64_t owner = (int64_t)part[BLOCK + 1];
        sum = part[BLOCK];
        __syncthreads();
        if ((int64_t)threadIdx.x == owner) {
            for (j = begin; j + 1 < end; j++)
                if ((sum += f(j)) > goal) break;
            part[BLOCK] = (double)j;
        }
        __syncthreads();
        return (int32_t)part[BLOCK];
    }
};

struct sample_view {
    int64_t stride, vocab, top_k;
    double temperature, top_p;
};

template <class T>
__global__ void __launch_bounds__(BLOCK)
    sample_kernel(int32_t *ids, double *weights, const T *logits, const double *u,
                  sample_view v) {
    int64_t t = blockIdx.x;
    double *weight = weights + t * v.vocab;
    row_choice<T> row = {logits + t * v.stride, weight,    v.vocab,
                         v.temperature,         -INFINITY, SEQPAR_CUDA_SHARED(double)};
    bool few = v.top_k > 0 && v.top_k < v.vocab, ranked = few || v.top_p < 1;
    int32_t id;
    if (row.sum_of([&](int64_t j) { return fabsf(wide(row.x[j])) < INFINITY ? 0.0 : 1.0; }) >
        0) {
        id = row.first_beyond(
            0, [&](int64_t j) { return fabsf(wide(row.x[j])) < INFINITY ? 0.0 : 1.0; });
        if (threadIdx.x == 0) ids[t] = -1 - id;
        return;
    }
    for (int64_t j = threadIdx.x; j < v.vocab; j += blockDim.x)
        row.top = larger(row.top, wide(row.x[j]));
    row.top = block_max(row.top, (float *)row.part);
    if (!(v.temperature > 0))
        id = row.first_beyond(0,
                              [&](int64_t j) { return wide(row.x[j]) == row.top ? 1.0 : 0.0; });
    else {
        /* visible to all threads after the barriers of the first block_sum */
        for (int64_t j = threadIdx.x; j < v.vocab; j += blockDim.x)
            weight[j] = row.weight_of(wide(row.x[j]));
        likeliest left = {(double)v.vocab, row.sum_of([&](int64_t j) { return weight[j]; }), 0,
                          0};
        if (few) left = row.fewest((double)v.top_k, INFINITY, false);
        if (v.top_p < 1) left = row.fewest(left.count, v.top_p * left.weight, false);
        if (ranked) left = row.fewest(left.count, u[t] * left.weight, true);
        id = ranked
                 ? row.first_beyond(left.ties - 1,
                                    [&](int64_t j) {
                                        return key_of(wide(row.x[j])) == left.key ? 1.0 : 0.0;
                                    })
                 : row.first_beyond(u[t] * left.weight, [&](int64_t j) { return weight[j]; });
    }
    if (threadIdx.x == 0) ids[t] = id;
}

template <class T>
static seqpar_status op_sample(seqpar_device *device, const seqpar_sample_args *a,
                               void *queue) {
    cuda_device *self = of(device);
    const double none = 0;
    if (a->rows < 1) return SEQPAR_OK;
    enter(self, queue);
    int64_t u = list_add(self, a->u ? a->u : &none, (a->u ? a->rows : 1) * 8);
    double *weights = (double *)scratch(self, a->rows * (a->vocab * 8 + 4));
    const char *lists = upload(self);
    if (u < 0 || !weights || !lists) return SEQPAR_ERR_MEMORY;
    int32_t *ids = (int32_t *)(weights + a->rows * a->vocab);
    sample_view v = {a->logits.stride, a->vocab, a->top_k, a->temperature, a->top_p};
    seqpar_status status = SEQPAR_CUDA_LAUNCH(self, sample_kernel<T>, dim3((unsigned)a->rows),
                                              dim3(BLOCK), (BLOCK + 2) * sizeof(double), ids,
                                              weights, (const T *)a->logits.data,
                                              (const double *)(lists + u), v);
    if (!status)
        status = launched(self, "reading tokens",
                          cudaMemcpyAsync(a->ids, ids, (size_t)a->rows * 4,
                                          cudaMemcpyDeviceToHost, self->stream));
    return finish(self, status, NULL); /* waits: ids are host memory */
}

/* =============================================================================================
   >>optim  gradient norm, AdamW, SGD
   ========================================================================================== */

/* One CUDA block per block of x. */
__global__ void sumsq_kernel(double *out, const float *x, int64_t block_size) {
    double *part = SEQPAR_CUDA_SHARED(double), sum = 0;
    for (int64_t i = threadIdx.x; i < block_size; i += blockDim.x) {
        double v = x[blockIdx.x * block_size + i];
        sum = fma(v, v, sum);
    }
    sum = block_sum(sum, part);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

template <typename T>
static seqpar_status op_sumsq(seqpar_device *device, const seqpar_sumsq_args *a, void *queue) {
    cuda_device *self = of(device);
    if (a->blocks < 1) return SEQPAR_OK;
    enter(self, queue);
    double *sums = (double *)scratch(self, a->blocks * 8);
    if (!sums) return SEQPAR_ERR_MEMORY;
    seqpar_status status = SEQPAR_CUDA_LAUNCH(self, sumsq_kernel, dim3((unsigned)a->blocks),
                                              dim3(BLOCK), BLOCK / WARP * sizeof(double), sums,
                                              (const float *)a->x, a->block_size);
    if (!status)
        status = launched(self, "reading sums",
                          cudaMemcpyAsync(a->out, sums, (size_t)a->blocks * 8,
                                          cudaMemcpyDeviceToHost, self->stream));
    return finish(self, status, NULL); /* waits: out is host memory */
}

struct adamw_constants {
    float rest1, beta2, rest2, step, root2, eps, keep, clip;
};

/* working: the weights in bf16; NULL: p itself is the weights. In the first step p begins with
   their values. Every step stores p, rounded, in them in the same pass. */
static __device__ __forceinline__ float old_weight(const float *p, const bf16 *working,
                                                   int first, int64_t i) {
    return working && first ? wide(working[i]) : p[i];
}

static __device__ __forceinline__ void new_weight(float *p, bf16 *working, int64_t i, float x) {
    p[i] = x;
    if (working) narrow(&working[i], x);
}

/* PyTorch's order: decay on the old p, m by lerp, v, then p -= lr/bc1 m / (sqrt(v)/sqrt(bc2)
   + eps) */
__global__ void adamw_kernel(float *p, float *m, float *v, const float *g, bf16 *working,
                             int first, int64_t count, adamw_constants c) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float x = g[i] * c.clip, mean = fmaf(c.rest1, x - m[i], m[i]);
    float square = fmaf(c.rest2 * x, x, c.beta2 * v[i]);
    m[i] = mean;
    v[i] = square;
    new_weight(p, working, i,
               fmaf(-c.step, mean / fmaf(sqrtf(square), c.root2, c.eps),
                    old_weight(p, working, first, i) * c.keep));
}

template <typename T>
static seqpar_status op_adamw(seqpar_device *device, const seqpar_update_args *a, void *queue) {
    cuda_device *self = of(device);
    if (a->count < 1) return SEQPAR_OK;
    enter(self, queue);
    adamw_constants c = {(float)(1.0 - a->beta1),
                         (float)a->beta2,
                         (float)(1.0 - a->beta2),
                         (float)(a->lr / (1.0 - pow(a->beta1, (double)a->t))),
                         (float)(1.0 / sqrt(1.0 - pow(a->beta2, (double)a->t))),
                         (float)a->eps,
                         (float)(1.0 - a->lr * a->decay),
                         (float)a->clip};
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, adamw_kernel, blocks_for(a->count, BLOCK),
                                     dim3(BLOCK), 0, (float *)a->p, (float *)a->m,
                                     (float *)a->v, (const float *)a->g, (bf16 *)a->working,
                                     a->t == 1, a->count, c),
                  queue);
}

__global__ void sgd_kernel(float *p, const float *g, bf16 *working, int first, int64_t count,
                           float lr, float decay, float clip) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float old = old_weight(p, working, first, i);
    new_weight(p, working, i, fmaf(-lr, fmaf(g[i], clip, decay * old), old));
}

template <typename T>
static seqpar_status op_sgd(seqpar_device *device, const seqpar_update_args *a, void *queue) {
    cuda_device *self = of(device);
    if (a->count < 1) return SEQPAR_OK;
    enter(self, queue);
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, sgd_kernel, blocks_for(a->count, BLOCK), dim3(BLOCK),
                                     0, (float *)a->p, (const float *)a->g, (bf16 *)a->working,
                                     a->t == 1, a->count, (float)a->lr, (float)a->decay,
                                     (float)a->clip),
                  queue);
}

/* ---- quantization: one warp per group; arithmetic as in seqpar__quantize_float ---- */

__global__ void quantize_kernel(uint8_t *bytes, float *scales, const float *x, int64_t count,
                                bool positive) {
    int64_t group = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    int64_t begin = group * SEQPAR_QUANTIZE_GROUP, lane = threadIdx.x % WARP;
    if (begin >= count) return; /* the same for all lanes of a warp */
    int64_t end = begin + SEQPAR_QUANTIZE_GROUP < count ? begin + SEQPAR_QUANTIZE_GROUP : count;
    unsigned most = 0; /* largest magnitude, as bits: a NaN is above all numbers */
    for (int64_t i = begin + lane; i < end; i += WARP) {
        unsigned bits = __float_as_uint(x[i]) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    for (int i = WARP / 2; i; i /= 2) {
        unsigned other = __shfl_xor_sync(0xffffffffu, most, i);
        most = other > most ? other : most;
    }
    float top = __uint_as_float(most);
    if (lane == 0) scales[group] = top;
    for (int64_t i = begin + lane; i < end; i += WARP) {
        int code = 0;
        if (top > 0 && top - top == 0) {
            float y = fabsf(x[i]) / top;
            code = positive ? (int)(255 * sqrtf(sqrtf(y)) + 0.5f)
                            : (int)(127 * sqrtf(y) + 0.5f);
            if (positive && code == 0 && x[i] > 0) code = 1;
        }
        bytes[i] = (uint8_t)(x[i] < 0 ? -code : code);
    }
}

__global__ void dequantize_kernel(float *x, const uint8_t *bytes, const float *scales,
                                  int64_t count, bool positive) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float y = positive ? (float)bytes[i] / 255 : (float)(int8_t)bytes[i] / 127;
    y = positive ? y * y : y;
    x[i] = y * fabsf(y) * scales[i / SEQPAR_QUANTIZE_GROUP];
}

static __device__ __forceinline__ void narrow_stochastic(float *to, float x, uint32_t draw) {
    (void)draw; /* fp32 is stored as it is */
    *to = x;
}

static __device__ __forceinline__ void narrow_stochastic(bf16 *to, float x, uint32_t draw) {
    uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7f800000u) == 0x7f800000u)
        narrow(to, x);
    else
        narrow(to, __uint_as_float((bits + draw) & 0xffff0000u));
}

template <class T>
__global__ void chance_kernel(T *to, const float *x, int64_t count, int64_t first,
                              uint64_t seed, uint64_t stream) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    uint64_t n = (uint64_t)(first + i);
    uint32_t word = random_word(seed, stream, n / 8, (int)(n / 2 % 4));
    narrow_stochastic(&to[i], x[i], word >> 16 * (n % 2) & 0xffff);
}

template <class T> __global__ void widen_kernel(float *to, const T *from, int64_t count) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = wide(from[i]);
}

template <class T>
static seqpar_status quantize_weights(cuda_device *self, const seqpar_quantize_args *a) {
    dim3 blocks = blocks_for(a->count, BLOCK);
    if (a->back)
        return SEQPAR_CUDA_LAUNCH(self, widen_kernel<T>, blocks, dim3(BLOCK), 0, (float *)a->x,
                                  (const T *)a->codes, a->count);
    return SEQPAR_CUDA_LAUNCH(self, chance_kernel<T>, blocks, dim3(BLOCK), 0, (T *)a->codes,
                              (const float *)a->x, a->count, a->first, a->seed, a->stream);
}

static seqpar_status quantize_state(cuda_device *self, const seqpar_quantize_args *a) {
    int64_t groups = (a->count + SEQPAR_QUANTIZE_GROUP - 1) / SEQPAR_QUANTIZE_GROUP;
    bool positive = a->form == SEQPAR_QUANTIZE_POSITIVE;
    if (a->back)
        return SEQPAR_CUDA_LAUNCH(self, dequantize_kernel, blocks_for(a->count, BLOCK),
                                  dim3(BLOCK), 0, (float *)a->x, (const uint8_t *)a->codes,
                                  (const float *)a->scales, a->count, positive);
    return SEQPAR_CUDA_LAUNCH(self, quantize_kernel, blocks_for(groups, BLOCK / WARP),
                              dim3(BLOCK), 0, (uint8_t *)a->codes, (float *)a->scales,
                              (const float *)a->x, a->count, positive);
}

template <class T>
static seqpar_status op_quantize(seqpar_device *device, const seqpar_quantize_args *a,
                                 void *queue) {
    cuda_device *self = of(device);
    if (a->count < 1) return SEQPAR_OK;
    enter(self, queue);
    return finish(self,
                  a->form == SEQPAR_QUANTIZE_STOCHASTIC ? quantize_weights<T>(self, a)
                                                        : quantize_state(self, a),
                  queue);
}

/* ---- the table ---- */

static void device_close(seqpar_device *device) {
    cuda_device *self = of(device);
    if (self->stream) (void)cudaStreamSynchronize(self->stream);
    close_mover(self);
#if defined(SEQPAR_CUBLAS)
    if (self->cublas) (void)cublasDestroy(self->cublas);
#endif
    while (self->lists) free(self->list[--self->lists].host);
    while (self->pieces) (void)cudaFree(self->memory[--self->pieces].data);
    (void)cudaFreeHost(self->staging);
    for (int i = 0; i < 2; i++)
        if (self->left[i]) (void)cudaEventDestroy(self->left[i]);
    if (self->own_stream) (void)cudaStreamDestroy(self->stream);
    free(self->memory);
    free(self->lists_data);
    free(self);
}

/* ---- experts: one warp per row; the order of float sums depends only on the width ---- */

static __device__ __forceinline__ float warp_max(float x) {
    for (int i = WARP / 2; i; i /= 2) x = larger(x, __shfl_xor_sync(0xffffffffu, x, i));
    return x;
}

/* Returns the most likely expert that is not in ids (before); of equal ones, the one with the
   lowest number. If all are NaN it still returns one. */
static __device__ int32_t likeliest_expert(const float *p, int64_t experts, const int32_t *ids,
                                           int64_t before) {
    float best = -INFINITY;
    int id = INT32_MAX;
    for (int e = lane_of(); e < experts; e += WARP) {
        bool taken = false;
        for (int64_t j = 0; j < before; j++) taken |= ids[j] == e;
        if (!taken && (id == INT32_MAX || p[e] > best)) {
            best = p[e];
            id = e;
        }
    }
    for (int i = WARP / 2; i; i /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, best, i);
        int its = __shfl_xor_sync(0xffffffffu, id, i);
        if (its != INT32_MAX &&
            (id == INT32_MAX || other > best || (!(other < best) && its < id))) {
            best = other;
            id = its;
        }
    }
    return id;
}

struct route_view {
    int64_t stride, rows, experts, chosen;
    int normed;
};

template <class T>
__global__ void route_kernel(float *probs, float *weights, int32_t *ids, const T *logits,
                             route_view v) {
    int64_t row = (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= v.rows) return;
    const T *x = logits + row * v.stride;
    float *p = probs + row * v.experts, *w = weights + row * v.chosen;
    int32_t *id = ids + row * v.chosen;
    float top = -INFINITY, sum = 0, taken = 0;
    for (int64_t e = lane_of(); e < v.experts; e += WARP) top = larger(top, wide(x[e]));
    top = warp_max(top);
    for (int64_t e = lane_of(); e < v.experts; e += WARP) sum += p[e] = expf(wide(x[e]) - top);
    sum = warp_sum(sum);
    for (int64_t e = lane_of(); e < v.experts; e += WARP) p[e] /= sum;
    __syncwarp();
    for (int64_t j = 0; j < v.chosen; j++) {
        int32_t best = likeliest_expert(p, v.experts, id, j);
        if (lane_of() == 0) id[j] = best;
        taken += p[best];
        __syncwarp();
    }
    for (int64_t j = lane_of(); j < v.chosen; j += WARP)
        w[j] = v.normed ? p[id[j]] / taken : p[id[j]];
}

template <class T>
static seqpar_status op_route(seqpar_device *device, const seqpar_route_args *a, void *queue) {
    cuda_device *self = of(device);
    int64_t pairs = a->rows * a->chosen;
    if (a->rows < 1) return SEQPAR_OK;
    enter(self, queue);
    int32_t *ids = (int32_t *)scratch(self, pairs * 4);
    if (!ids) return SEQPAR_ERR_MEMORY;
    route_view v = {a->logits.stride, a->rows, a->experts, a->chosen, a->normed};
    seqpar_status status = SEQPAR_CUDA_LAUNCH(
        self, route_kernel<T>, blocks_for(a->rows, BLOCK / WARP), dim3(BLOCK), 0,
        (float *)a->probs, (float *)a->weights, ids, (const T *)a->logits.data, v);
    if (!status)
        status = launched(self, "reading the experts of tokens",
                          cudaMemcpyAsync(a->ids, ids, (size_t)pairs * 4,
                                          cudaMemcpyDeviceToHost, self->stream));
    return finish(self, status, NULL); /* waits: ids are host memory */
}

struct route_grad_view {
    int64_t stride, rows, experts, chosen;
    int normed;
    const float *probs, *weights, *dweights;
    const int32_t *ids;
    const double *balance; /* NULL: 0 */
    float *loss;           /* or NULL */
};

/* dL/dp of expert e of a row */
static __device__ float route_dp(const route_grad_view &v, int64_t row, int64_t e, float mean,
                                 float sum) {
    float dp = v.balance ? (float)v.balance[e] : 0;
    for (int64_t j = row * v.chosen; j < (row + 1) * v.chosen; j++)
        if (v.ids[j] == e) dp += v.normed ? (v.dweights[j] - mean) / sum : v.dweights[j];
    return dp;
}

template <class T> __global__ void route_grad_kernel(T *dlogits, route_grad_view v) {
    int64_t row = (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= v.rows) return;
    const float *p = v.probs + row * v.experts;
    float sum = 0, mean = 0, whole = 0, loss = 0;
    for (int64_t j = row * v.chosen; j < (row + 1) * v.chosen; j++) {
        sum += p[v.ids[j]];
        mean = fmaf(v.dweights[j], v.weights[j], mean);
    }
    for (int64_t e = lane_of(); e < v.experts; e += WARP) {
        whole = fmaf(p[e], route_dp(v, row, e, mean, sum), whole);
        loss = fmaf(p[e], v.balance ? (float)v.balance[e] : 0, loss);
    }
    whole = warp_sum(whole);
    loss = warp_sum(loss);
    for (int64_t e = lane_of(); e < v.experts; e += WARP)
        narrow(&dlogits[row * v.stride + e], p[e] * (route_dp(v, row, e, mean, sum) - whole));
    if (v.loss && lane_of() == 0) v.loss[row] += loss;
}

template <class T>
static seqpar_status op_route_grad(seqpar_device *device, const seqpar_route_grad_args *a,
                                   void *queue) {
    cuda_device *self = of(device);
    const double none = 0;
    if (a->rows < 1) return SEQPAR_OK;
    enter(self, queue);
    int64_t ids = list_add(self, a->ids, a->rows * a->chosen * 4);
    int64_t balance = list_add(self, a->balance ? a->balance : &none,
                               (a->balance ? a->experts : 1) * 8);
    const char *lists = upload(self);
    if (ids < 0 || balance < 0 || !lists) return SEQPAR_ERR_MEMORY;
    route_grad_view v = {a->dlogits.stride,
                         a->rows,
                         a->experts,
                         a->chosen,
                         a->normed,
                         (const float *)a->probs,
                         (const float *)a->weights,
                         (const float *)a->dweights,
                         (const int32_t *)(lists + ids),
                         a->balance ? (const double *)(lists + balance) : NULL,
                         (float *)a->loss};
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, route_grad_kernel<T>,
                                     blocks_for(a->rows, BLOCK / WARP), dim3(BLOCK), 0,
                                     (T *)a->dlogits.data, v),
                  queue);
}

struct mix_view {
    int64_t y_stride, x_stride, terms, width;
    const int32_t *from, *at; /* at: or NULL */
    const float *weights;     /* or NULL */
    int accumulate;
};

template <class T> __global__ void mix_kernel(T *y, const T *x, mix_view v) {
    int64_t row = blockIdx.x;
    for (int64_t i = threadIdx.x; i < v.width; i += blockDim.x) {
        float sum = v.accumulate ? wide(y[row * v.y_stride + i]) : 0;
        for (int64_t j = row * v.terms; j < (row + 1) * v.terms; j++)
            sum = fmaf(v.weights ? v.weights[v.at ? v.at[j] : j] : 1,
                       wide(x[v.from[j] * v.x_stride + i]), sum);
        narrow(&y[row * v.y_stride + i], sum);
    }
}

template <class T>
static seqpar_status op_mix(seqpar_device *device, const seqpar_mix_args *a, void *queue) {
    cuda_device *self = of(device);
    int64_t bytes = a->rows * a->terms * 4;
    if (a->rows < 1) return SEQPAR_OK;
    enter(self, queue);
    int64_t from = list_add(self, a->from, bytes),
            at = a->at ? list_add(self, a->at, bytes) : 0;
    const char *lists = upload(self);
    if (from < 0 || at < 0 || !lists) return SEQPAR_ERR_MEMORY;
    mix_view v = {a->y.stride,
                  a->x.stride,
                  a->terms,
                  a->width,
                  (const int32_t *)(lists + from),
                  a->at ? (const int32_t *)(lists + at) : NULL,
                  (const float *)a->weights,
                  a->accumulate};
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, mix_kernel<T>, dim3((unsigned)a->rows), dim3(BLOCK),
                                     0, (T *)a->y.data, (const T *)a->x.data, v),
                  queue);
}

struct drop_view {
    int64_t y_stride, x_stride, width;
    const int64_t *document;
    const int32_t *position;
    uint64_t key;
    double dropout;
    float keep;
    int accumulate;
};

template <class T> __global__ void drop_kernel(T *y, const T *x, drop_view v) {
    int64_t row = blockIdx.x;
    uint64_t high = (uint64_t)v.document[row] << 24, low = (uint64_t)v.position[row] << 32;
    for (int64_t i = threadIdx.x; i < v.width; i += blockDim.x) {
        uint32_t draw = random_word(v.key, high, low | (uint64_t)i >> 2, (int)(i & 3));
        float z = (double)draw < v.dropout * 4294967296.0 ? 0.0f : v.keep;
        float sum = v.accumulate ? wide(y[row * v.y_stride + i]) : 0;
        narrow(&y[row * v.y_stride + i], fmaf(z, wide(x[row * v.x_stride + i]), sum));
    }
}

template <class T>
static seqpar_status op_drop(seqpar_device *device, const seqpar_drop_args *a, void *queue) {
    cuda_device *self = of(device);
    if (a->rows < 1) return SEQPAR_OK;
    enter(self, queue);
    int64_t document = list_add(self, a->document, a->rows * 8);
    int64_t position = list_add(self, a->position, a->rows * 4);
    const char *lists = upload(self);
    if (document < 0 || position < 0 || !lists) return SEQPAR_ERR_MEMORY;
    drop_view v = {a->y.stride,
                   a->x.stride,
                   a->width,
                   (const int64_t *)(lists + document),
                   (const int32_t *)(lists + position),
                   seqpar_attn_dropout_key(a->seed, a->stream),
                   a->dropout,
                   (float)(1.0 / (1.0 - a->dropout)),
                   a->accumulate};
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(self, drop_kernel<T>, dim3((unsigned)a->rows), dim3(BLOCK),
                                     0, (T *)a->y.data, (const T *)a->x.data, v),
                  queue);
}

template <class T>
__global__ void dots_kernel(float *out, const int32_t *to, const T *a, int64_t a_stride,
                            const T *b, int64_t b_stride, int64_t rows, int64_t width) {
    int64_t row = (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    float sum = 0;
    for (int64_t i = lane_of(); i < width; i += WARP)
        sum = fmaf(wide(a[row * a_stride + i]), wide(b[row * b_stride + i]), sum);
    sum = warp_sum(sum);
    if (lane_of() == 0) out[to[row]] = sum;
}

template <class T>
static seqpar_status op_dots(seqpar_device *device, const seqpar_dots_args *a, void *queue) {
    cuda_device *self = of(device);
    if (a->rows < 1) return SEQPAR_OK;
    enter(self, queue);
    int64_t to = list_add(self, a->to, a->rows * 4);
    const char *lists = upload(self);
    if (to < 0 || !lists) return SEQPAR_ERR_MEMORY;
    return finish(self,
                  SEQPAR_CUDA_LAUNCH(
                      self, dots_kernel<T>, blocks_for(a->rows, BLOCK / WARP), dim3(BLOCK), 0,
                      (float *)a->out, (const int32_t *)(lists + to), (const T *)a->a.data,
                      a->a.stride, (const T *)a->b.data, a->b.stride, a->rows, a->width),
                  queue);
}

template <class T> static void fill_table(seqpar_device *d) {
    d->alloc = device_alloc;
    d->free = device_free;
    d->own_memory = 1;
    d->sum_step = traits<T>::STEP;
    d->copy = device_copy;
    d->copy_rows = device_copy_rows;
    d->zero = device_zero;
    d->settle = device_settle;
    d->pool_alloc = pool_alloc;
    d->pool_free = pool_free;
    d->move = device_move;
    d->moved = device_moved;
    d->close = device_close;
#define SEQPAR__X(op) d->op = op_##op<T>;
    SEQPAR_DEVICE_OPS(SEQPAR__X)
#undef SEQPAR__X
}

/* Allocates memory, opens the stream and reads the properties of the GPU. After an error the
   caller closes the device. */
static seqpar_status open_device(cuda_device *self, seqpar_error *error) {
    int count = 0, major = 0;
    self->base.error = error;
    cudaError_t why = cudaGetDeviceCount(&count);
    if (why || count < 1)
        return seqpar_fail(
            error, SEQPAR_ERR_DEVICE,
            "no CUDA device: %s; run on a machine with a GPU, or use the cpu device",
            cudaGetErrorString(why ? why : cudaErrorNoDevice));
    if (self->ordinal < 0 || self->ordinal >= count)
        return seqpar_fail(error, SEQPAR_ERR_DEVICE,
                           "there is no CUDA device %d; devices are 0 to %d", self->ordinal,
                           count - 1);
    if ((why = cudaSetDevice(self->ordinal)) != cudaSuccess)
        return failed(self, "selecting it", why);
    (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, self->ordinal);
    (void)cudaDeviceGetAttribute(&self->multiprocessors, cudaDevAttrMultiProcessorCount,
                                 self->ordinal);
    if (major < 8)
        return seqpar_fail(
            error, SEQPAR_ERR_DEVICE,
            "CUDA device %d has compute capability %d; 8 or more is needed (A100 and later)",
            self->ordinal, major);
    if (!self->stream) {
        if ((why = cudaStreamCreateWithFlags(&self->stream, cudaStreamNonBlocking)) !=
            cudaSuccess)
            return failed(self, "opening a stream", why);
        self->own_stream = true;
    }
    self->base.queue = (void *)self->stream;
    for (int i = 0; i < 2; i++)
        if ((why = cudaEventCreateWithFlags(&self->left[i], cudaEventDisableTiming)) !=
            cudaSuccess)
            return failed(self, "making an event", why);
    if ((why = cudaMallocHost((void **)&self->staging, STAGING)) != cudaSuccess)
        return failed(self, "pinned memory", why);
    self->staging_bytes = STAGING;
    self->flops = (unsigned long long *)device_alloc(&self->base, sizeof *self->flops);
    if (!self->flops) return SEQPAR_ERR_MEMORY;
    why = cudaMemsetAsync(self->flops, 0, sizeof *self->flops, self->stream);
    return why ? failed(self, "zeros", why) : SEQPAR_OK;
}

static seqpar_status use_cublas(cuda_device *self) {
#if defined(SEQPAR_CUBLAS)
    self->base.matmul = self->base.storage == SEQPAR_DTYPE_BF16 ? op_matmul_cublas<bf16>
                                                                : op_matmul_cublas<float>;
    return open_cublas(self);
#else
    return seqpar_fail(self->base.error, SEQPAR_ERR_OPTION,
                       "CUDA device %d: seqpar_cuda.cu was compiled without cuBLAS; compile it "
                       "with -DSEQPAR_CUBLAS and link -lcublas",
                       self->ordinal);
#endif
}

} /* namespace seqpar_cuda */

extern "C" seqpar_device *seqpar_device_cuda(seqpar_error *error,
                                             const seqpar_cuda_desc *desc) {
    using namespace seqpar_cuda;
    if (desc && desc->storage && desc->storage != SEQPAR_DTYPE_BF16 &&
        desc->storage != SEQPAR_DTYPE_F32)
        return (void)seqpar_fail(error, SEQPAR_ERR_OPTION,
                                 "a CUDA device stores fp32 or bf16; %d is neither",
                                 desc->storage),
               nullptr;
    cuda_device *self = (cuda_device *)calloc(1, sizeof *self);
    if (!self) {
        (void)seqpar_fail(error, SEQPAR_ERR_MEMORY, "no memory for a CUDA device");
        return NULL;
    }
    self->base.name = "cuda";
    self->base.storage = desc && desc->storage == SEQPAR_DTYPE_BF16 ? SEQPAR_DTYPE_BF16
                                                                    : SEQPAR_DTYPE_F32;
    self->base.accumulator = SEQPAR_DTYPE_F32;
    self->base.threads = 1;
    self->ordinal = desc ? (int)desc->ordinal : 0;
    self->stream = desc ? (cudaStream_t)desc->stream : NULL;
    if (self->base.storage == SEQPAR_DTYPE_BF16)
        fill_table<bf16>(&self->base);
    else
        fill_table<float>(&self->base);
    if (open_device(self, error) || (desc && desc->cublas && use_cublas(self))) {
        device_close(&self->base);
        return NULL;
    }
    return &self->base;
}
