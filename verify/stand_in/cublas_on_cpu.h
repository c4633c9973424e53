/* SPDX-License-Identifier: MIT OR Unlicense */
/* A stand-in for the part of cuBLAS that seqpar_cuda.cu calls, on top of cuda_on_cpu.h. Like
   the real one it is column-major, runs late on its stream, and may sum in any order: the order
   depends on the number of columns (n: our rows) and on alignment, so bits change if a rank's
   share decides the shape of a product. Without the caller's workspace it allocates, which a
   capture forbids. */
#ifndef CUBLAS_ON_CPU_H
#define CUBLAS_ON_CPU_H

#include "cuda_on_cpu.h"
#include <algorithm>
#include <math.h>
#include <vector>

typedef enum {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_EXECUTION_FAILED = 13
} cublasStatus_t;

typedef enum { CUBLAS_OP_N, CUBLAS_OP_T } cublasOperation_t;
typedef enum { CUDA_R_32F = 0, CUDA_R_16BF = 14 } cudaDataType_t;
typedef enum { CUBLAS_COMPUTE_32F = 68 } cublasComputeType_t;
typedef enum { CUBLAS_GEMM_DEFAULT = -1 } cublasGemmAlgo_t;
typedef enum {
    CUBLAS_DEFAULT_MATH = 0,
    CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
} cublasMath_t;

typedef struct cublas_on_cpu {
    cudaStream_t stream;
    void *workspace;
    size_t bytes;
} * cublasHandle_t;

static inline const char *cublasGetStatusString(cublasStatus_t status) {
    return status == CUBLAS_STATUS_NOT_INITIALIZED ? "the library was not initialized"
           : status == CUBLAS_STATUS_EXECUTION_FAILED
               ? "the GPU program failed to execute"
               : "an unsupported value or parameter was passed to the function";
}

static inline cublasStatus_t cublasCreate(cublasHandle_t *handle) {
    if (cuda_failing()) return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = (cublasHandle_t)calloc(1, sizeof **handle);
    return *handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}

static inline cublasStatus_t cublasDestroy(cublasHandle_t handle) {
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
    if (cuda_failing()) return CUBLAS_STATUS_NOT_INITIALIZED;
    handle->stream = stream;
    handle->workspace = NULL; /* as the real one: back to its own */
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *workspace,
                                                size_t bytes) {
    if (cuda_failing() || (uintptr_t)workspace % 256) return CUBLAS_STATUS_INVALID_VALUE;
    handle->workspace = workspace;
    handle->bytes = bytes;
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
    return !handle || mode != (cublasMath_t)CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION ||
                   cuda_failing()
               ? CUBLAS_STATUS_INVALID_VALUE
               : CUBLAS_STATUS_SUCCESS;
}

static inline float cublas_element(const void *x, cudaDataType_t type, int64_t i) {
    uint32_t bits;
    float value;
    if (type == CUDA_R_32F) return ((const float *)x)[i];
    bits = (uint32_t)((const uint16_t *)x)[i] << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline void cublas_store(void *x, cudaDataType_t type, int64_t i, float value) {
    uint32_t bits;
    if (type == CUDA_R_32F) {
        ((float *)x)[i] = value;
        return;
    }
    memcpy(&bits, &value, sizeof bits);
    ((uint16_t *)x)[i] = value != value ? (uint16_t)0x7fff
                                        : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__attribute__((optimize("O3"))) static inline void cublas_term(float *sum, const float *a,
                                                               float x, int64_t count) {
    for (int64_t i = 0; i < count; i++) sum[i] = fmaf(a[i], x, sum[i]);
}

/* c (m, n) = alpha op(a) b + beta c. op(b) is b itself: all that is asked for. */
static inline cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t of_a,
                                          cublasOperation_t of_b, int m, int n, int k,
                                          const void *alpha, const void *a,
                                          cudaDataType_t type_a, int lda, const void *b,
                                          cudaDataType_t type_b, int ldb, const void *beta,
                                          void *c, cudaDataType_t type_c, int ldc,
                                          cublasComputeType_t compute, cublasGemmAlgo_t algo) {
    float factor = *(const float *)alpha, before = *(const float *)beta;
    int64_t other_kernel = ((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) % 16 != 0;
    int64_t parts = 1 + (n + other_kernel) % 3;
    if (cuda_failing()) return CUBLAS_STATUS_EXECUTION_FAILED;
    if (of_b != CUBLAS_OP_N || type_a != type_b || type_b != type_c ||
        compute != CUBLAS_COMPUTE_32F || algo != CUBLAS_GEMM_DEFAULT || m < 1 || n < 1 ||
        k < 1 || lda < (of_a == CUBLAS_OP_N ? m : k) || ldb < k || ldc < m)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!handle->workspace && cuda_forbidden("cuBLAS without a workspace"))
        return CUBLAS_STATUS_EXECUTION_FAILED;
    cuda_push(handle->stream, [=] {
        std::vector<float> wide((size_t)m * (size_t)k), sum((size_t)m);
        for (int64_t l = 0; l < k; l++)
            for (int64_t i = 0; i < m; i++)
                wide[(size_t)(l * m + i)] = cublas_element(
                    a, type_a, of_a == CUBLAS_OP_N ? l * lda + i : i * lda + l);
        for (int64_t j = 0; j < n; j++) {
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (int64_t part = 0; part < parts; part++)
                for (int64_t l = part; l < k; l += parts)
                    cublas_term(sum.data(), wide.data() + l * m,
                                cublas_element(b, type_b, j * ldb + l), m);
            for (int64_t i = 0; i < m; i++)
                cublas_store(
                    c, type_c, j * ldc + i,
                    sum[(size_t)i] * factor +
                        (before != 0 ? before * cublas_element(c, type_c, j * ldc + i) : 0.0f));
        }
    });
    return CUBLAS_STATUS_SUCCESS;
}
#endif
