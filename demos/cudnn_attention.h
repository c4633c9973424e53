/* SPDX-License-Identifier: MIT OR Unlicense */
/* cudnn_attention.h - NVIDIA cuDNN's flash attention as a seqpar_attn_kernel, to take along;
 * 09_cudnn_attention.cu tries it.
 *
 *     cudnn_attention c = {0};                 of one seqpar_attn: close it before the next
 *     cudnnCreate(&c.cudnn);
 *     seqpar_attn_kernel kernel = {cudnn_forward, cudnn_backward, &c};     for seqpar_attn_desc.kernel
 *     cudnn_attention_close(&c);               when the queue is settled
 *
 * Each direction is one cuDNN operation (SDPA, cuDNN 9.21 or newer), planned at a source's
 * first call. Who sees whom is a mask that is added to the scores, 2 bytes a pair, made once
 * for a source. For a device with bf16 storage: cuDNN's results are bf16, and so are what they
 * are summed from. */
#ifndef CUDNN_ATTENTION_H
#define CUDNN_ATTENTION_H
#include "seqpar.h"
#ifndef SEQPAR_CUDA_ON_CPU /* tests put a stand-in in the place of both */
#include <cuda_runtime.h>
#include <cudnn.h>
#define LAUNCH(kernel, threads, queue, ...) \
    kernel<<<(unsigned)((threads) + 127) / 128, 128, 0, (cudaStream_t)(queue)>>>(__VA_ARGS__)
#endif
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if CUDNN_VERSION < 92100
#error "a mask of one's own needs cuDNN 9.21 or newer"
#endif

/* ---- what cuDNN does not do: masks, and the types and layouts of seqpar ---- */

/* far below any score, and yet a number: no difference with it is a NaN */
#define UNSEEN (-1e30f)

static __device__ float wide(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static __device__ uint16_t narrow(float x) { /* to the nearest, ties to even; no NaN */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__global__ void to_fp32(float *to, const uint16_t *from, int64_t count) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = wide(from[i]);
}

/* (heads, tokens) to (tokens, heads); a query that sees no key has -inf. */
__global__ void to_lse(float *lse, const float *stats, int64_t tokens, int64_t heads) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= tokens * heads) return;
    float value = stats[i % heads * tokens + i / heads];
    lse[i] = value < UNSEEN / 2 ? -INFINITY : value;
}

/* For cuDNN's backward: stats is lse, (heads, tokens). Of the forward's out it needs only
   delta = dout . out, so the multiple of dout with that product does for it. */
__global__ void from_delta(uint16_t *out, float *stats, seqpar_attn_source a) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, t = i / a.heads;
    if (t >= a.q_tokens) return;
    int64_t h = i % a.heads, d = a.head_dim, at = t * a.lse_stride + h;
    const uint16_t *dout = (const uint16_t *)a.dout + t * a.dout_stride + h * d;
    float lse = ((const float *)a.lse)[at], square = 0;
    for (int64_t c = 0; c < d; c++) square += wide(dout[c]) * wide(dout[c]);
    float factor = square > 0 ? ((const float *)a.delta)[at] / square : 0;
    for (int64_t c = 0; c < d; c++) out[i * d + c] = narrow(factor * wide(dout[c]));
    stats[h * a.q_tokens + t] = lse == -INFINITY ? 0 : lse;
}

static int sees(const seqpar_attn_source *a, const seqpar_piece *q, int64_t t,
                const seqpar_piece *k, int64_t n) {
    int64_t query = q->local + t, at = k->start + n * k->stride;
    return q->row == k->row && at >= a->visible_begin[query] && at < a->visible_end[query];
}

/* (queries, keys), on the GPU. NULL: no memory */
static void *mask_of(const seqpar_attn_source *a, void *queue) {
    size_t bytes = (size_t)(a->q_tokens * a->k_tokens) * sizeof(uint16_t);
    uint16_t *mask = (uint16_t *)malloc(bytes), unseen = seqpar_bf16_from_float(UNSEEN);
    void *on_gpu = NULL;
    for (int64_t i = 0; mask && i < a->q_piece_count * a->k_piece_count; i++) {
        const seqpar_piece *q = a->q_pieces + i / a->k_piece_count;
        const seqpar_piece *k = a->k_pieces + i % a->k_piece_count;
        for (int64_t t = 0; t < q->count; t++)
            for (int64_t n = 0; n < k->count; n++)
                mask[(q->local + t) * a->k_tokens + k->local + n] = sees(a, q, t, k, n)
                                                                        ? 0
                                                                        : unseen;
    }
    if (mask && !cudaMalloc(&on_gpu, bytes))
        cudaMemcpyAsync(on_gpu, mask, bytes, cudaMemcpyHostToDevice, (cudaStream_t)queue);
    free(mask);
    return on_gpu;
}

/* ---- cuDNN: a graph of one operation, and the plan that runs it ---- */

enum { SOURCES = 64 };
/* Numbers of tensors. Forward has those before DOUT; SCORES and MASKED are never in memory. */
enum { Q = 1, K, V, OUT, LSE, SCALE, DOUT, DQ, DK, DV, MASK, TENSORS, SCORES, MASKED };
typedef cudnnBackendDescriptor_t descriptor;

/* One direction of one source. What cuDNN reads or writes in its own way (OWN tensors; forward
   the first two) lies in `memory`, `bytes` for each, the workspace behind them. */
enum { OWN_OUT, OWN_LSE, OWN_DQ, OWN_DK, OWN_DV, OWN };
typedef struct {
    descriptor made[32], plan;
    int made_count;
    cudnnStatus_t status; /* the first that is not success */
    int64_t bytes, workspace;
    char *memory;
} direction;

typedef struct {
    cudnnHandle_t cudnn;
    const void *of;            /* whose masks and plans they are: seqpar_attn's visible_begin */
    direction way[SOURCES][2]; /* of a source: forward, backward */
    void *mask[SOURCES];
} cudnn_attention;

static descriptor begin(direction *d, cudnnBackendDescriptorType_t type) {
    descriptor made = NULL;
    if (!d->status) d->status = cudnnBackendCreateDescriptor(type, &made);
    return d->made[d->made_count++] = made;
}

static void set(direction *d, descriptor of, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t count, const void *values) {
    if (!d->status) d->status = cudnnBackendSetAttribute(of, name, type, count, values);
}

static void join(direction *d, descriptor of, cudnnBackendAttributeName_t name, descriptor x) {
    set(d, of, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &x);
}

static descriptor end(direction *d, descriptor made) {
    if (!d->status) d->status = cudnnBackendFinalize(made);
    return made;
}

/* Heads stand side by side in a row, but in LSE and in what has a column for every key. */
static void shape_of(const seqpar_attn_source *a, int64_t x, int64_t *size, int64_t *stride) {
    int64_t h = a->heads, n = a->q_tokens, width = a->head_dim, row;
    int head_by_head = x == LSE || x >= MASK;
    if (x == K || x == V || x == DK || x == DV) {
        h = a->kv_heads;
        n = a->k_tokens;
    }
    if (x >= MASK) width = a->k_tokens;
    if (x == MASK) h = 1;
    if (x == LSE) width = 1;
    if (x == SCALE) h = n = width = 1;
    row = head_by_head ? width : h * width;
    if (x == Q) row = a->q_stride;
    if (x == K) row = a->k_stride;
    if (x == V) row = a->v_stride;
    if (x == DOUT) row = a->dout_stride;
    const int64_t sizes[] = {1, h, n, width};
    const int64_t strides[] = {n * row, head_by_head ? n * width : width, row, 1};
    memcpy(size, sizes, sizeof sizes);
    memcpy(stride, strides, sizeof strides);
}

static descriptor tensor(direction *d, const seqpar_attn_source *a, int64_t x) {
    bool value = x == SCALE, is_virtual = x >= SCORES, fp32 = x == LSE || value || is_virtual;
    cudnnDataType_t type = fp32 ? CUDNN_DATA_FLOAT : CUDNN_DATA_BFLOAT16;
    int64_t size[4], stride[4], align = 16;
    descriptor t = begin(d, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    shape_of(a, x, size, stride);
    set(d, t, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &x);
    set(d, t, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    set(d, t, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, size);
    set(d, t, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, stride);
    set(d, t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &align);
    set(d, t, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
    set(d, t, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &value);
    return end(d, t);
}

static descriptor graph(direction *d, descriptor operation, cudnnHandle_t cudnn) {
    descriptor g = begin(d, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    join(d, g, CUDNN_ATTR_OPERATIONGRAPH_OPS, operation);
    if (cudnn) set(d, g, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &cudnn);
    return end(d, g);
}

/* MASKED = SCORES + MASK */
static descriptor mask_graph(direction *d, const seqpar_attn_source *a) {
    cudnnPointwiseMode_t mode = CUDNN_POINTWISE_ADD;
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    descriptor add = begin(d, CUDNN_BACKEND_POINTWISE_DESCRIPTOR), x;
    set(d, add, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set(d, add, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &type);
    end(d, add);
    x = begin(d, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    join(d, x, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, add);
    join(d, x, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, tensor(d, a, SCORES));
    join(d, x, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, tensor(d, a, MASK));
    join(d, x, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, tensor(d, a, MASKED));
    return graph(d, end(d, x), NULL);
}

/* The operation's attributes: its tensors from Q on, then the mask's graph and what goes in
   and comes out there. */
#define FWD(x) CUDNN_ATTR_OPERATION_SDPA_FWD_##x
#define BWD(x) CUDNN_ATTR_OPERATION_SDPA_BWD_##x
static const cudnnBackendAttributeName_t forward_names[] = {FWD(QDESC),
                                                            FWD(KDESC),
                                                            FWD(VDESC),
                                                            FWD(ODESC),
                                                            FWD(STATSDESC),
                                                            FWD(SCALEDESC),
                                                            FWD(SUBGRAPH),
                                                            FWD(SUBGRAPH_INPUT_UID),
                                                            FWD(SUBGRAPH_OUTPUT_UID)};
static const cudnnBackendAttributeName_t backward_names[] = {BWD(QDESC),
                                                             BWD(KDESC),
                                                             BWD(VDESC),
                                                             BWD(ODESC),
                                                             BWD(STATSDESC),
                                                             BWD(SCALEDESC),
                                                             BWD(DODDESC),
                                                             BWD(DQDESC),
                                                             BWD(DKDESC),
                                                             BWD(DVDESC),
                                                             BWD(SUBGRAPH),
                                                             BWD(SUBGRAPH_INPUT_UID),
                                                             BWD(SUBGRAPH_OUTPUT_UID)};

static descriptor attention_graph(direction *d, const seqpar_attn_source *a, int backward,
                                  cudnnHandle_t cudnn) {
    const cudnnBackendAttributeName_t *name = backward ? backward_names : forward_names;
    int64_t in = SCORES, out = MASKED;
    descriptor x = begin(d, backward ? CUDNN_BACKEND_OPERATION_SDPA_BWD_DESCRIPTOR
                                     : CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR);
    for (int i = Q; i < (backward ? MASK : DOUT); i++) join(d, x, *name++, tensor(d, a, i));
    join(d, x, *name++, mask_graph(d, a));
    set(d, x, *name++, CUDNN_TYPE_INT64, 1, &in);
    set(d, x, *name++, CUDNN_TYPE_INT64, 1, &out);
    return graph(d, end(d, x), cudnn);
}

static void get(direction *d, descriptor of, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, void *value) {
    int64_t found = 0;
    if (!d->status) d->status = cudnnBackendGetAttribute(of, name, type, 1, &found, value);
    if (!d->status && !found) d->status = CUDNN_STATUS_NOT_SUPPORTED;
}

/* The one that cuDNN thinks fastest. */
static void plan(direction *d, descriptor all, cudnnHandle_t cudnn) {
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    descriptor heuristics = begin(d, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    descriptor best = begin(d, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    join(d, heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, all);
    set(d, heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    get(d, end(d, heuristics), CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
        &best);
    d->plan = begin(d, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    set(d, d->plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &cudnn);
    join(d, d->plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, best);
    get(d, end(d, d->plan), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64,
        &d->workspace);
}

static void close_direction(direction *d) {
    cudaFree(d->memory);
    while (d->made_count > 0) cudnnBackendDestroyDescriptor(d->made[--d->made_count]);
    memset(d, 0, sizeof *d);
}

static char *own(const direction *d, int which) { return d->memory + which * d->bytes; }

/* Made at a source's first call. */
static direction *open_direction(cudnn_attention *c, const seqpar_attn_source *a, int backward,
                                 void *queue) {
    direction *d = &c->way[a->source][backward];
    int64_t queries = a->q_tokens * a->heads, keys = a->k_tokens * a->kv_heads;
    int64_t tensors = backward ? OWN : OWN_DQ;
    if (d->plan) return d;
    d->bytes = ((queries > keys ? queries : keys) * a->head_dim * 2 + 255) / 256 * 256;
    plan(d, attention_graph(d, a, backward, c->cudnn), c->cudnn);
    if (!c->mask[a->source]) c->mask[a->source] = mask_of(a, queue);
    if (!d->status &&
        (!c->mask[a->source] ||
         cudaMalloc((void **)&d->memory, (size_t)(tensors * d->bytes + d->workspace))))
        d->status = CUDNN_STATUS_ALLOC_FAILED;
    return d;
}

static int failed(const direction *d) {
    char text[512] = "";
    if (!d->status) return cudaGetLastError() != cudaSuccess;
    cudnnGetLastErrorString(text, sizeof text);
    fprintf(stderr, "cuDNN: %s %s\n", cudnnGetErrorString(d->status), text);
    return 1;
}

static int run(cudnn_attention *c, direction *d, const seqpar_attn_source *a, int backward,
               void *queue) {
    float scale = (float)a->scale;
    const void *workspace = own(d, backward ? OWN : OWN_DQ);
    const void *all[TENSORS] = {
        NULL,   a->q,    a->k,           a->v,           own(d, OWN_OUT), own(d, OWN_LSE),
        &scale, a->dout, own(d, OWN_DQ), own(d, OWN_DK), own(d, OWN_DV),  c->mask[a->source]};
    const void *data[TENSORS];
    int64_t number[TENSORS], count = 0;
    descriptor pack = begin(d, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    for (int i = Q; i < TENSORS; i++) {
        if (!backward && i >= DOUT && i != MASK) continue;
        number[count] = i;
        data[count++] = all[i];
    }
    set(d, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, number);
    set(d, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, data);
    set(d, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    end(d, pack);
    if (!d->status) d->status = cudnnSetStream(c->cudnn, (cudaStream_t)queue);
    if (!d->status) d->status = cudnnBackendExecute(c->cudnn, d->plan, pack);
    cudnnBackendDestroyDescriptor(d->made[--d->made_count]);
    return failed(d);
}

/* ---- the kernel that seqpar calls ---- */

static int refused(cudnn_attention *c, const seqpar_attn_source *a) {
    if (!c->of) c->of = a->visible_begin;
    if (c->of != a->visible_begin) {
        fprintf(stderr, "cuDNN: masks and plans are those of another seqpar_attn; call "
                        "cudnn_attention_close and cudnnCreate between the two\n");
        return 1;
    }
    if (a->source < SOURCES && a->softcap == 0 && a->head_dim % 8 == 0) return 0;
    fprintf(stderr, "cuDNN: at most %d sources, no softcap, head_dim a multiple of 8\n",
            SOURCES);
    return 1;
}

static void widened(void *to, const direction *d, int which, int64_t count, void *queue) {
    LAUNCH(to_fp32, count, queue, (float *)to, (const uint16_t *)own(d, which), count);
}

static int cudnn_forward(void *user, const seqpar_attn_source *a, void *out, void *lse,
                         void *queue) {
    cudnn_attention *c = (cudnn_attention *)user;
    int64_t rows = a->q_tokens * a->heads;
    direction *d;
    if (refused(c, a)) return 1;
    d = open_direction(c, a, 0, queue);
    if (failed(d) || run(c, d, a, 0, queue)) return 1;
    widened(out, d, OWN_OUT, rows * a->head_dim, queue);
    LAUNCH(to_lse, rows, queue, (float *)lse, (const float *)own(d, OWN_LSE), a->q_tokens,
           a->heads);
    return failed(d);
}

static int cudnn_backward(void *user, const seqpar_attn_source *a, void *dq, void *dk, void *dv,
                          void *queue) {
    cudnn_attention *c = (cudnn_attention *)user;
    int64_t rows = a->q_tokens * a->heads, keys = a->k_tokens * a->kv_heads;
    direction *d;
    if (refused(c, a)) return 1;
    d = open_direction(c, a, 1, queue);
    if (failed(d)) return 1;
    LAUNCH(from_delta, rows, queue, (uint16_t *)own(d, OWN_OUT), (float *)own(d, OWN_LSE), *a);
    if (run(c, d, a, 1, queue)) return 1;
    widened(dq, d, OWN_DQ, rows * a->head_dim, queue);
    widened(dk, d, OWN_DK, keys * a->head_dim, queue);
    widened(dv, d, OWN_DV, keys * a->head_dim, queue);
    return failed(d);
}

static void cudnn_attention_close(cudnn_attention *c) {
    for (int i = 0; i < SOURCES; i++) {
        close_direction(&c->way[i][0]);
        close_direction(&c->way[i][1]);
        cudaFree(c->mask[i]);
    }
    if (c->cudnn) cudnnDestroy(c->cudnn);
    memset(c, 0, sizeof *c);
}
#endif
