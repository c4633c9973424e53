/* SPDX-License-Identifier: MIT OR Unlicense */
/* test_queue.c over NCCL: block kernels on the rank's stream, messages on a stream of their
   own beside it, both late and in random order wherever no event orders them. */
#define QUEUE_NCCL
#include "test_queue.c"
