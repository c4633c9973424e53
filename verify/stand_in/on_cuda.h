/* SPDX-License-Identifier: MIT OR Unlicense */
/* With TEST_CUDA a suite uses a GPU, or cuda_on_cpu.h, instead of the fast CPU device; with
   TEST_CUBLAS in the environment cuBLAS computes the products. Include after seqpar.h; without
   seqpar.h there are no devices and this file is empty. */
#if defined(SEQPAR_H) && !defined(ON_CUDA_H)
#define ON_CUDA_H
#ifdef TEST_CUDA
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static seqpar_device *test_cuda_open(int storage) {
    seqpar_error error = {0};
    seqpar_cuda_desc desc = {.storage = storage, .cublas = getenv("TEST_CUBLAS") != NULL};
    seqpar_device *device = seqpar_device_cuda(&error, &desc);
    /* other ranks may be on their way out too */
    if (!device) {
        printf("FAIL %s\n0 passed, 1 failed\n", error.text);
        fflush(stdout);
        _exit(1);
    }
    device->error = NULL;
    return device;
}

__attribute__((unused)) static seqpar_device *test_cuda(int64_t threads) {
    return (void)threads, test_cuda_open(0);
}

__attribute__((unused)) static seqpar_device *test_device_bf16(int64_t threads) {
    return (void)threads, test_cuda_open(SEQPAR_DTYPE_BF16);
}
#define seqpar_device_cpu test_cuda
/* 1: long tests try fewer cases, unless TEST_ALL is set, because kernels are slow: on fibers,
   without a GPU, and under compute-sanitizer (TEST_SMALL). */
extern uint64_t cuda_on_cpu_seed __attribute__((weak));
__attribute__((unused)) static int test_fibers(void) {
    return (&cuda_on_cpu_seed || getenv("TEST_SMALL")) && !getenv("TEST_ALL");
}
#else
__attribute__((unused)) static int test_fibers(void) { return 0; }
__attribute__((unused)) static seqpar_device *test_device_bf16(int64_t threads) {
    return seqpar_device_cpu_bf16(threads);
}
#endif
/* Devices by number: 0 the fast one, 1 the reference in fp64, 2 the fast one with bf16 storage,
   3 the reference in bf16. */
__attribute__((unused)) static seqpar_device *test_device(int kind, int64_t threads) {
    return kind == 3   ? seqpar_device_reference_bf16()
           : kind == 2 ? test_device_bf16(threads ? threads : 1)
           : kind      ? seqpar_device_reference()
                       : seqpar_device_cpu(threads ? threads : 1);
}
#endif
