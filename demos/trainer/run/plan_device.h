/* SPDX-License-Identifier: MIT OR Unlicense */
/* plan_device.h - a device for dry runs, which computes nothing and has no memory. A trainer on
 * it makes the same calls and allocates the same buffers as on a real device, so the library
 * counts their bytes at almost no cost.
 *
 * Its buffers are addresses that are never mapped. Reads through the device give zeros. */
#ifndef DEMO_PLAN_DEVICE_H
#define DEMO_PLAN_DEVICE_H

#include "trainer/data/data.h"
#include "seqpar_llama.h"

#define DEMO_PLAN_FIRST ((uintptr_t)1 << 60)

typedef struct {
    seqpar_device device;
    uintptr_t next;
} demo_plan_device;

static inline void *demo_plan_alloc(seqpar_device *device, int64_t bytes) {
    demo_plan_device *plan = (demo_plan_device *)device;
    uintptr_t at = plan->next;
    plan->next += ((uintptr_t)bytes + 127) / 64 * 64;
    return (void *)at;
}

static inline void demo_plan_free(seqpar_device *device, void *data) {
    (void)device, (void)data;
}

/* Copies only from host to host, which messages between ranks need. */
static inline void demo_plan_copy(seqpar_device *device, void *to, const void *from,
                                  int64_t bytes, void *queue) {
    (void)device, (void)queue;
    if (bytes <= 0 || (uintptr_t)to >= DEMO_PLAN_FIRST) return;
    if ((uintptr_t)from >= DEMO_PLAN_FIRST)
        memset(to, 0, (size_t)bytes);
    else
        memmove(to, from, (size_t)bytes);
}

static inline void demo_plan_copy_rows(seqpar_device *device, void *to, int64_t to_stride,
                                       const void *from, int64_t from_stride, int64_t bytes,
                                       int64_t rows, void *queue) {
    if ((uintptr_t)to >= DEMO_PLAN_FIRST) return;
    for (int64_t i = 0; i < rows; i++)
        demo_plan_copy(device, (char *)to + i * to_stride, (const char *)from + i * from_stride,
                       bytes, queue);
}

static inline void demo_plan_zero(seqpar_device *device, void *data, int64_t bytes,
                                  void *queue) {
    (void)device, (void)data, (void)bytes, (void)queue;
}

static inline void demo_plan_pool_free(seqpar_device *device, void *data, int64_t bytes) {
    (void)device, (void)data, (void)bytes;
}

static inline int64_t demo_plan_move(seqpar_device *device, void *to, const void *from,
                                     int64_t bytes, void *queue) {
    demo_plan_copy(device, to, from, bytes, queue);
    return 0;
}

static inline seqpar_status demo_plan_moved(seqpar_device *device, int64_t moves, void *queue) {
    return (void)device, (void)moves, (void)queue, SEQPAR_OK;
}

static inline void demo_plan_close(seqpar_device *device) { free(device); }

#define SEQPAR__X(op) \
    static inline seqpar_status demo_plan_##op(seqpar_device *device, \
                                               const seqpar_##op##_args *args, void *queue) { \
        (void)device, (void)args, (void)queue; \
        return SEQPAR_OK; \
    }
SEQPAR_DEVICE_OPS(SEQPAR__X)
#undef SEQPAR__X

/* Ends every sampled text after its first token. The buffers for long texts are allocated
   before sampling starts. */
static inline seqpar_status demo_plan_ends(seqpar_device *device,
                                           const seqpar_sample_args *args, void *queue) {
    (void)device, (void)queue;
    for (int64_t i = 0; i < args->rows; i++) args->ids[i] = DEMO_EOS;
    return SEQPAR_OK;
}

/* storage, accumulator: the SEQPAR_DTYPE_.. of the device that is replaced. */
static inline seqpar_device *demo_plan_device_new(int storage, int accumulator) {
    demo_plan_device *plan = (demo_plan_device *)demo_alloc(1, sizeof *plan);
    seqpar_device *d = &plan->device;
    plan->next = DEMO_PLAN_FIRST;
    *d = (seqpar_device){.name = "plan",
                         .storage = storage,
                         .accumulator = accumulator,
                         .threads = 1,
                         .plans = 1,
                         .alloc = demo_plan_alloc,
                         .free = demo_plan_free,
                         .copy = demo_plan_copy,
                         .copy_rows = demo_plan_copy_rows,
                         .zero = demo_plan_zero,
                         .pool_alloc = demo_plan_alloc,
                         .pool_free = demo_plan_pool_free,
                         .move = demo_plan_move,
                         .moved = demo_plan_moved,
                         .close = demo_plan_close};
#define SEQPAR__X(op) d->op = demo_plan_##op;
    SEQPAR_DEVICE_OPS(SEQPAR__X)
#undef SEQPAR__X
    d->sample = demo_plan_ends;
    return d;
}

/* Is this the device for dry runs? Then weights are neither read nor digested. */
static inline bool demo_is_planned(const seqpar_device *device) {
    return device->copy == demo_plan_copy;
}
#endif
