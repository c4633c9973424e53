/* SPDX-License-Identifier: MIT OR Unlicense */
/* With TEST_CUDA a suite runs on a GPU, or on cuda_on_cpu.h, where it would use the fast CPU device. Behind seqpar.h. */
#ifndef ON_CUDA_H
#define ON_CUDA_H
#ifdef TEST_CUDA
#include <stdio.h>
#include <stdlib.h>
__attribute__((unused)) static seqpar_device *test_cuda(int64_t threads) {
    seqpar_error error = {0};
    seqpar_device *device = seqpar_device_cuda(&error, NULL);
    (void)threads;
    if (!device) { printf("FAIL %s\n0 passed, 1 failed\n", error.text); exit(1); }
    device->error = NULL;
    return device;
}
#define seqpar_device_cpu test_cuda
#endif
#endif
