/* SPDX-License-Identifier: MIT OR Unlicense */
/* The conformance suite over NCCL itself, with as many ranks as there are GPUs, a thread for
   each; one alone sends to itself. Without a GPU it is built upon nccl_stand_in.h
   (-include), whose GPUs are as many as NCCL_GPUS says. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_NCCL_IMPLEMENTATION
#include "seqpar_nccl.h"
#include "support/transport.h"
#include "stand_in/nccl_world.h"

static seqpar_status run_gpus(int64_t ranks, seqpar_rank_fn fn, void *user,
                              seqpar_error *error) {
    char file[256];
    snprintf(file, sizeof file, "%s/seqpar_nccl_gpus.%ld",
             getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid());
    return world_run(file, ranks, fn, user, error);
}

/* A letter to oneself between device arrays, on a queue. */
static seqpar_status rank_to_itself(seqpar_comm *world, void *user) {
    enum { BYTES = 1 << 20 };
    unsigned char *host = malloc(BYTES), *from = NULL, *to = NULL;
    cudaStream_t queue = NULL;
    seqpar_status status = SEQPAR_ERR_DEVICE;
    (void)user;
    fill(host, BYTES, 71);
    if (!cudaMalloc((void **)&from, BYTES) && !cudaMalloc((void **)&to, BYTES) &&
        !cudaStreamCreate(&queue) && !cudaMemcpy(from, host, BYTES, cudaMemcpyDefault)) {
        seqpar_transfer send = {world->rank, from, BYTES}, recv = {world->rank, to, BYTES};
        seqpar_group group = {"to itself", 0, &send, 1, &recv, 1};
        seqpar_request request;
        memset(host, 0, BYTES);
        status = seqpar_comm_begin(world, &group, queue, &request);
        if (!status) status = seqpar_comm_wait(world, &request, queue);
        if (!status &&
            (cudaStreamSynchronize(queue) || cudaMemcpy(host, to, BYTES, cudaMemcpyDefault)))
            status = SEQPAR_ERR_DEVICE;
        EXPECT(status || !wrong_bits(host, BYTES, 71),
               "a letter to oneself arrives with other bits");
    }
    if (queue) cudaStreamDestroy(queue);
    cudaFree(from);
    cudaFree(to);
    free(host);
    return status;
}

static void test_to_itself(const transport_maker *maker) {
    transport_run_well(maker, 1, rank_to_itself, NULL);
    test_end("nccl_gpus_to_itself_on_a_queue");
}

int main(int argc, char **argv) {
    int gpus = 0, version = 0;
    test_begin(argc, argv);
#ifdef NCCL_STAND_IN_H
    stand_reset(test_seed, 0);
    stand.devices = atoi(getenv("NCCL_GPUS") ? getenv("NCCL_GPUS") : "1");
#endif
    if (cudaGetDeviceCount(&gpus) || gpus < 1) {
        test_skip("nccl_gpus", "no GPU");
        return test_summary();
    }
    ncclGetVersion(&version);
    printf("# NCCL %d, %d GPU%s\n", version, gpus, gpus > 1 ? "s" : "");
    transport_maker maker = {
        .name = "nccl_gpus", .run = run_gpus, .most = gpus, .own_device = 1};
    TEST(transport_conformance(&maker));
    TEST(test_to_itself(&maker));
    return test_summary();
}
