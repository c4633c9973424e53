/* SPDX-License-Identifier: MIT OR Unlicense */
/* The kernels of cuda_on_cpu.h on the streams of nccl_stand_in.h: one order for what is
   computed and what is sent. */
#ifndef NCCL_ON_CPU_H
#define NCCL_ON_CPU_H
#include "nccl_stand_in.h"
#include "cuda_on_cpu_bridge.h"

static void *stand_stream_new(void) {
    cudaStream_t s = NULL;
    return cudaStreamCreate(&s) ? NULL : s;
}

static void stand_stream_free(void *s) { cudaStreamDestroy(s); }
static void stand_stream_push(void *s, void (*run)(void *), void *operation) {
    stand_kernel(s, run, operation);
}

static void stand_stream_settle(void *s) { cudaStreamSynchronize(s); }
static void *stand_event_new(void) {
    cudaEvent_t e = NULL;
    return cudaEventCreateWithFlags(&e, cudaEventDisableTiming) ? NULL : e;
}

static void stand_event_free(void *e) { cudaEventDestroy(e); }
static void stand_event_record(void *e, void *s) { cudaEventRecord(e, s); }
static void stand_event_wait(void *s, void *e) { cudaStreamWaitEvent(s, e, 0); }

/* 1: kernels run on these streams, and every pointer counts as device memory; 0: no more. */
static void stand_runs_kernels(int on) {
    static const cuda_on_cpu_bridge bridge = {
        stand_stream_new, stand_stream_free, stand_stream_push,  stand_stream_settle,
        stand_event_new,  stand_event_free,  stand_event_record, stand_event_wait};
    stand.all_device = on;
    cuda_on_cpu_elsewhere = on ? &bridge : NULL;
    cuda_on_cpu_open_memory(on ? 1 : -1);
}
#endif
