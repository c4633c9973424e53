/* SPDX-License-Identifier: MIT OR Unlicense */
/* Streams and events of another runtime, on which cuda_on_cpu.h puts its kernels and copies:
   those of nccl_stand_in.h, so that one order holds for kernels and messages. */
#ifndef CUDA_ON_CPU_BRIDGE_H
#define CUDA_ON_CPU_BRIDGE_H
#ifdef __cplusplus
extern "C" {
#endif
typedef struct cuda_on_cpu_bridge {
    void *(*stream_new)(void);
    void (*stream_free)(void *stream);
    void (*push)(void *stream, void (*run)(void *operation), void *operation);
    void (*settle)(void *stream);
    void *(*event_new)(void);
    void (*event_free)(void *event);
    void (*record)(void *event, void *stream);
    void (*wait)(void *stream, void *event);
} cuda_on_cpu_bridge;

extern const cuda_on_cpu_bridge *cuda_on_cpu_elsewhere; /* NULL: streams of its own */
/* for those who copy there: +1 opens, -1 closes */
extern void cuda_on_cpu_open_memory(int change);
#ifdef __cplusplus
}
#endif
#endif
