/* SPDX-License-Identifier: MIT OR Unlicense */
/* A stand-in for the part of cuDNN's graph API that demos/cudnn_attention.h calls, on top of
   cuda_on_cpu.h. It takes everything about attention, forward and backward, from the graph:
   sizes, strides and types of tensors, and the mask. p, ds and bf16 tensors are rounded as by
   the real one. It runs late on its stream. Two faults that a comparison must see:
   CUDNN_ON_CPU_WRONG=strides reads keys as if each head were contiguous, =mask uses the mask of
   the next key. */
#ifndef CUDNN_ON_CPU_H
#define CUDNN_ON_CPU_H

#include "cublas_on_cpu.h"
#include <map>
#include <memory>
#include <string>

#define CUDNN_VERSION 92100
/* what the demo launches itself */
#define LAUNCH(kernel, threads, queue, ...) \
    (void)cuda_on_cpu_launch(#kernel, dim3((unsigned)((threads) + 127) / 128), dim3(128), 0, \
                             (cudaStream_t)(queue), cuda_bind(kernel, __VA_ARGS__))

typedef enum {
    CUDNN_STATUS_SUCCESS,
    CUDNN_STATUS_BAD_PARAM = 2000,
    CUDNN_STATUS_NOT_SUPPORTED = 3000,
    CUDNN_STATUS_ALLOC_FAILED = 4001
} cudnnStatus_t;
typedef enum { CUDNN_DATA_FLOAT = 0, CUDNN_DATA_BFLOAT16 = 9 } cudnnDataType_t;
typedef enum { CUDNN_POINTWISE_ADD = 0 } cudnnPointwiseMode_t;
typedef enum { CUDNN_HEUR_MODE_A = 3 } cudnnBackendHeurMode_t;
typedef enum {
    CUDNN_BACKEND_POINTWISE_DESCRIPTOR,
    CUDNN_BACKEND_ENGINECFG_DESCRIPTOR,
    CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR,
    CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR,
    CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
    CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR,
    CUDNN_BACKEND_OPERATION_SDPA_BWD_DESCRIPTOR,
    CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR,
    CUDNN_BACKEND_TENSOR_DESCRIPTOR,
    CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR
} cudnnBackendDescriptorType_t;
typedef enum {
    CUDNN_TYPE_HANDLE,
    CUDNN_TYPE_DATA_TYPE,
    CUDNN_TYPE_POINTWISE_MODE,
    CUDNN_TYPE_HEUR_MODE,
    CUDNN_TYPE_INT64,
    CUDNN_TYPE_BOOLEAN,
    CUDNN_TYPE_VOID_PTR,
    CUDNN_TYPE_BACKEND_DESCRIPTOR
} cudnnBackendAttributeType_t;
typedef enum {
    CUDNN_ATTR_POINTWISE_MODE,
    CUDNN_ATTR_POINTWISE_MATH_PREC,
    CUDNN_ATTR_ENGINEHEUR_MODE,
    CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH,
    CUDNN_ATTR_ENGINEHEUR_RESULTS,
    CUDNN_ATTR_EXECUTION_PLAN_HANDLE,
    CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG,
    CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
    CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR,
    CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
    CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
    CUDNN_ATTR_OPERATION_POINTWISE_YDESC,
    CUDNN_ATTR_OPERATIONGRAPH_HANDLE,
    CUDNN_ATTR_OPERATIONGRAPH_OPS,
    CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT,
    CUDNN_ATTR_TENSOR_DATA_TYPE,
    CUDNN_ATTR_TENSOR_DIMENSIONS,
    CUDNN_ATTR_TENSOR_STRIDES,
    CUDNN_ATTR_TENSOR_UNIQUE_ID,
    CUDNN_ATTR_TENSOR_IS_VIRTUAL,
    CUDNN_ATTR_TENSOR_IS_BY_VALUE,
    CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS,
    CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS,
    CUDNN_ATTR_VARIANT_PACK_WORKSPACE,
    CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC,
    CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC,
    CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC,
    CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC,
    CUDNN_ATTR_OPERATION_SDPA_FWD_STATSDESC,
    CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC,
    CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH,
    CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID,
    CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID,
    CUDNN_ATTR_OPERATION_SDPA_BWD_QDESC,
    CUDNN_ATTR_OPERATION_SDPA_BWD_KDESC,
    CUDNN_ATTR_OPERATION_SDPA_BWD_VDESC,
    CUDNN_ATTR_OPERATION_SDPA_BWD_ODESC,
    CUDNN_ATTR_OPERATION_SDPA_BWD_STATSDESC,
    CUDNN_ATTR_OPERATION_SDPA_BWD_SCALEDESC,
    CUDNN_ATTR_OPERATION_SDPA_BWD_SUBGRAPH,
    CUDNN_ATTR_OPERATION_SDPA_BWD_SUBGRAPH_INPUT_UID,
    CUDNN_ATTR_OPERATION_SDPA_BWD_SUBGRAPH_OUTPUT_UID,
    CUDNN_ATTR_OPERATION_SDPA_BWD_DODDESC,
    CUDNN_ATTR_OPERATION_SDPA_BWD_DQDESC,
    CUDNN_ATTR_OPERATION_SDPA_BWD_DKDESC,
    CUDNN_ATTR_OPERATION_SDPA_BWD_DVDESC
} cudnnBackendAttributeName_t;

/* An attribute is its bytes. */
typedef struct cudnn_descriptor {
    cudnnBackendDescriptorType_t type;
    bool finalized;
    std::map<int, std::string> attribute;
    int64_t number(int name, int i = 0) const {
        int64_t value = 0;
        memcpy(&value, attribute.at(name).data() + i * 8, 8);
        return value;
    }
    int word(int name) const {
        int value = 0;
        memcpy(&value, attribute.at(name).data(), sizeof value);
        return value;
    }
    cudnn_descriptor *of(int name) const { return (cudnn_descriptor *)number(name); }
} * cudnnBackendDescriptor_t;

typedef struct cudnn_on_cpu {
    cudaStream_t stream;
} * cudnnHandle_t;

static inline cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
    *handle = (cudnnHandle_t)calloc(1, sizeof **handle);
    return *handle ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_ALLOC_FAILED;
}

static inline cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
    free(handle);
    return CUDNN_STATUS_SUCCESS;
}

static inline cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    handle->stream = stream;
    return CUDNN_STATUS_SUCCESS;
}

static inline const char *cudnnGetErrorString(cudnnStatus_t status) {
    return status == CUDNN_STATUS_SUCCESS ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_BAD_PARAM";
}

static inline void cudnnGetLastErrorString(char *text, size_t size) {
    snprintf(text, size, "the stand-in refuses it");
}

static inline cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                                         cudnnBackendDescriptor_t *made) {
    *made = new cudnn_descriptor();
    (*made)->type = type;
    return CUDNN_STATUS_SUCCESS;
}

static inline cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t made) {
    delete made;
    return CUDNN_STATUS_SUCCESS;
}

static inline size_t cudnn_bytes(cudnnBackendAttributeType_t type) {
    if (type == CUDNN_TYPE_BOOLEAN) return 1;
    if (type == CUDNN_TYPE_DATA_TYPE || type == CUDNN_TYPE_POINTWISE_MODE) return 4;
    return type == CUDNN_TYPE_HEUR_MODE ? 4 : 8;
}

/* A descriptor that another one takes must be finished. */
static inline cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t of,
                                                     cudnnBackendAttributeName_t name,
                                                     cudnnBackendAttributeType_t type,
                                                     int64_t count, const void *values) {
    if (!of || of->finalized) return CUDNN_STATUS_BAD_PARAM;
    const cudnn_descriptor *x = NULL;
    if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) memcpy(&x, values, sizeof x);
    if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR && (!x || !x->finalized))
        return CUDNN_STATUS_BAD_PARAM;
    of->attribute[name] = std::string((const char *)values, (size_t)count * cudnn_bytes(type));
    return CUDNN_STATUS_SUCCESS;
}

static inline cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t made) {
    if (!made || made->finalized) return CUDNN_STATUS_BAD_PARAM;
    made->finalized = true;
    return CUDNN_STATUS_SUCCESS;
}

static inline cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t of,
                                                     cudnnBackendAttributeName_t name,
                                                     cudnnBackendAttributeType_t type,
                                                     int64_t room, int64_t *count,
                                                     void *value) {
    if (!of || !of->finalized || room < 1) return CUDNN_STATUS_BAD_PARAM;
    *count = 1;
    if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE && type == CUDNN_TYPE_INT64)
        *(int64_t *)value = 100;
    else if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS && type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
        cudnn_descriptor *best = *(cudnn_descriptor **)value;
        best->attribute = of->attribute;
        best->finalized = true;
    } else
        return CUDNN_STATUS_BAD_PARAM;
    return CUDNN_STATUS_SUCCESS;
}

/* ---- attention ---- */

static inline int cudnn_wrong(const char *what) {
    const char *wrong = getenv("CUDNN_ON_CPU_WRONG");
    return wrong && !strcmp(wrong, what);
}

struct cudnn_tensor {
    char *data = NULL;
    int type = 0;
    int64_t id = 0, size[4] = {0}, stride[4] = {0};
    cudaDataType_t as() const { return type == CUDNN_DATA_FLOAT ? CUDA_R_32F : CUDA_R_16BF; }
    int64_t at(int64_t h, int64_t t, int64_t c) const {
        return (size[1] > 1 ? h * stride[1] : 0) + t * stride[2] + c * stride[3];
    }
    float get(int64_t h, int64_t t, int64_t c) const {
        return cublas_element(data, as(), at(h, t, c));
    }
    void put(int64_t h, int64_t t, int64_t c, float x) const {
        cublas_store(data, as(), at(h, t, c), x);
    }
    bool is(int64_t h, int64_t t, int64_t c) const {
        return size[0] == 1 && size[1] == h && size[2] == t && size[3] == c;
    }
};

static inline float cudnn_round(float x) { /* to bf16 */
    uint16_t bits;
    cublas_store(&bits, CUDA_R_16BF, 0, x);
    return cublas_element(&bits, CUDA_R_16BF, 0);
}

static inline cudnn_tensor cudnn_tensor_of(const cudnn_descriptor *t,
                                           const cudnn_descriptor *pack) {
    const std::string &ids = pack->attribute.at(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    cudnn_tensor x;
    x.id = t->number(CUDNN_ATTR_TENSOR_UNIQUE_ID);
    x.type = t->word(CUDNN_ATTR_TENSOR_DATA_TYPE);
    for (int i = 0; i < 4; i++) {
        x.size[i] = t->number(CUDNN_ATTR_TENSOR_DIMENSIONS, i);
        x.stride[i] = t->number(CUDNN_ATTR_TENSOR_STRIDES, i);
    }
    for (int i = 0; i < (int)ids.size() / 8; i++)
        if (pack->number(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, i) == x.id)
            x.data = (char *)pack->number(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, i);
    return x;
}

struct cudnn_sdpa {
    cudnn_tensor q, k, v, out, stats, mask, dout, dq, dk, dv;
    float scale;
    int shift; /* of the mask: 0, but for a wrong one */

    float score(int64_t h, int64_t t, int64_t n) const {
        int64_t kv = h / (q.size[1] / k.size[1]), keys = k.size[2];
        float sum = 0;
        for (int64_t c = 0; c < q.size[3]; c++) sum += q.get(h, t, c) * k.get(kv, n, c);
        return sum * scale + mask.get(h, t, (n + shift) % keys);
    }

    void forward_row(int64_t h, int64_t t) const {
        int64_t kv = h / (q.size[1] / k.size[1]), keys = k.size[2];
        std::vector<float> p((size_t)keys);
        float top = -INFINITY, total = 0;
        for (int64_t n = 0; n < keys; n++) top = fmaxf(top, p[(size_t)n] = score(h, t, n));
        for (float &x : p) total += x = expf(x - top);
        for (int64_t c = 0; c < v.size[3]; c++) {
            float sum = 0;
            for (int64_t n = 0; n < keys; n++)
                sum += cudnn_round(p[(size_t)n]) * v.get(kv, n, c);
            out.put(h, t, c, sum / total);
        }
        stats.put(h, t, 0, top + logf(total));
    }

    /* Into sums of dq, dk, dv, laid out as packed (heads, rows, width). */
    void backward_row(int64_t h, int64_t t, float *sum_q, std::vector<float> &sum_k,
                      std::vector<float> &sum_v) const {
        int64_t kv = h / (q.size[1] / k.size[1]), keys = k.size[2], d = q.size[3];
        float delta = 0, lse = stats.get(h, t, 0);
        for (int64_t c = 0; c < d; c++) delta += out.get(h, t, c) * dout.get(h, t, c);
        for (int64_t n = 0; n < keys; n++) {
            float p = expf(score(h, t, n) - lse), dp = 0, *to_k, *to_v;
            if (p == 0) continue;
            for (int64_t c = 0; c < d; c++) dp += dout.get(h, t, c) * v.get(kv, n, c);
            float ds = cudnn_round(p * (dp - delta));
            to_k = &sum_k[(size_t)((kv * keys + n) * d)];
            to_v = &sum_v[(size_t)((kv * keys + n) * d)];
            for (int64_t c = 0; c < d; c++) {
                sum_q[c] += ds * k.get(kv, n, c) * scale;
                to_k[c] += ds * q.get(h, t, c) * scale;
                to_v[c] += cudnn_round(p) * dout.get(h, t, c);
            }
        }
    }

    void backward() const {
        int64_t d = q.size[3], keys = k.size[2];
        std::vector<float> sum_k((size_t)(k.size[1] * keys * d)), sum_v = sum_k;
        for (int64_t h = 0; h < q.size[1]; h++)
            for (int64_t t = 0; t < q.size[2]; t++) {
                std::vector<float> sum_q((size_t)d);
                backward_row(h, t, sum_q.data(), sum_k, sum_v);
                for (int64_t c = 0; c < d; c++) dq.put(h, t, c, sum_q[(size_t)c]);
            }
        for (int64_t i = 0; i < k.size[1] * keys * d; i++) {
            dk.put(i / (keys * d), i / d % keys, i % d, sum_k[(size_t)i]);
            dv.put(i / (keys * d), i / d % keys, i % d, sum_v[(size_t)i]);
        }
    }

    /* What does not fit together is refused, as is a tensor that has no memory. */
    bool fits(bool back) const {
        int64_t h = q.size[1], t = q.size[2], d = q.size[3], kv = k.size[1], n = k.size[2];
        const cudnn_tensor *all[] = {&q, &k, &v, &out, &stats, &mask, &dout, &dq, &dk, &dv};
        for (int i = 0; i < (back ? 10 : 6); i++)
            if (!all[i]->data || all[i]->stride[3] != 1 || (uintptr_t)all[i]->data % 16)
                return false;
        return h % kv == 0 && k.is(kv, n, d) && v.is(kv, n, d) && out.is(h, t, d) &&
               stats.is(h, t, 1) && stats.type == CUDNN_DATA_FLOAT && mask.is(1, t, n) &&
               (!back ||
                (dout.is(h, t, d) && dq.is(h, t, d) && dk.is(kv, n, d) && dv.is(kv, n, d)));
    }
};

/* Gets the mask: the subgraph must be a single addition of it to the scores, which come in and
   go out as virtual tensors. */
static inline bool cudnn_mask(const cudnn_descriptor *op, bool back,
                              const cudnn_descriptor *pack, cudnn_tensor *mask) {
    int from = back ? CUDNN_ATTR_OPERATION_SDPA_BWD_SUBGRAPH
                    : CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH;
    const cudnn_descriptor *add = op->of(from)->of(CUDNN_ATTR_OPERATIONGRAPH_OPS);
    const cudnn_descriptor *in = add->of(CUDNN_ATTR_OPERATION_POINTWISE_XDESC);
    const cudnn_descriptor *out = add->of(CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
    *mask = cudnn_tensor_of(add->of(CUDNN_ATTR_OPERATION_POINTWISE_BDESC), pack);
    return add->of(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR)
                   ->word(CUDNN_ATTR_POINTWISE_MODE) == CUDNN_POINTWISE_ADD &&
           in->attribute.at(CUDNN_ATTR_TENSOR_IS_VIRTUAL)[0] &&
           out->attribute.at(CUDNN_ATTR_TENSOR_IS_VIRTUAL)[0] &&
           in->number(CUDNN_ATTR_TENSOR_UNIQUE_ID) == op->number(from + 1) &&
           out->number(CUDNN_ATTR_TENSOR_UNIQUE_ID) == op->number(from + 2);
}

static inline cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle,
                                                cudnnBackendDescriptor_t plan,
                                                cudnnBackendDescriptor_t pack) {
    const cudnn_descriptor *op = plan->of(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)
                                     ->of(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)
                                     ->of(CUDNN_ATTR_OPERATIONGRAPH_OPS);
    bool back = op->type == CUDNN_BACKEND_OPERATION_SDPA_BWD_DESCRIPTOR;
    int first = back ? CUDNN_ATTR_OPERATION_SDPA_BWD_QDESC
                     : CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC;
    cudnn_sdpa a;
    cudnn_tensor scale, *to[] = {&a.q, &a.k, &a.v, &a.out, &a.stats, &scale};
    cudnn_tensor *gradient[] = {&a.dout, &a.dq, &a.dk, &a.dv};
    for (int i = 0; i < 6; i++) *to[i] = cudnn_tensor_of(op->of(first + i), pack);
    for (int i = 0; i < 4 && back; i++)
        *gradient[i] = cudnn_tensor_of(op->of(CUDNN_ATTR_OPERATION_SDPA_BWD_DODDESC + i), pack);
    if (!cudnn_mask(op, back, pack, &a.mask) || !a.fits(back) || !scale.data)
        return CUDNN_STATUS_BAD_PARAM;
    a.scale = *(const float *)scale.data; /* by value: the host's, read now */
    a.shift = cudnn_wrong("mask");
    if (cudnn_wrong("strides")) {
        a.k.stride[1] = a.k.size[2] * a.k.size[3];
        a.k.stride[2] = a.k.size[3];
    }
    cuda_push(handle->stream, [=] {
        if (back) a.backward();
        for (int64_t i = 0; i < a.q.size[1] * a.q.size[2] && !back; i++)
            a.forward_row(i / a.q.size[2], i % a.q.size[2]);
    });
    return CUDNN_STATUS_SUCCESS;
}
#endif
