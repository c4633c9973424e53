/* SPDX-License-Identifier: MIT OR Unlicense */
/* cuDNN's own word on the graphs of demos/cudnn_attention.h, without a GPU: it is told what
   GPU to think of, takes the graph and names the engines that can run it. None is compiled. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "cudnn_attention.h"

static const struct {
    int version, multiprocessors, shared;
    const char *name;
} gpus[] = {{800, 108, 166912, "NVIDIA A100-SXM4-80GB"},
            {900, 132, 232448, "NVIDIA H100 80GB HBM3"},
            {1000, 148, 232448, "NVIDIA B200"}};

static const char properties[] =
    "{\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],"
    "\"regsPerBlock\":65536,\"multiProcessorCount\":%d,\"smCountOrigin\":0,\"warpSize\":32,"
    "\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":%d,"
    "\"reservedSharedMemoryPerBlock\":1024,\"oversizedSharedMemoryPerBlock\":0,"
    "\"maxRegistersPerSM\":65536,\"maxCtasPerSM\":32,\"maxThreadsPerBlock\":1024,"
    "\"maxThreadsPerSM\":2048,\"pciDeviceId\":0,\"isTccDriver\":0,\"supportCoopLaunch\":1,"
    "\"totalGlobalMem\":85000000000,\"smClockRateKHz\":1980000,\"memClockRateKHz\":2619000,"
    "\"memoryBusWidth\":5120,\"l2CacheSize\":52428800,\"cudaDeviceId\":0,\"deviceVer\":%d,"
    "\"driverVer\":13000,\"deviceName\":\"%s\"}";

static descriptor gpu_of(direction *d, int i) {
    char text[2048];
    descriptor gpu = begin(d, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    int length = snprintf(text, sizeof text, properties, gpus[i].multiprocessors,
                          gpus[i].shared, gpus[i].version, gpus[i].name);
    set(d, gpu, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, length + 1, text);
    return end(d, gpu);
}

/* Engines for a direction. */
static int64_t engines(direction *d, int gpu, const seqpar_attn_source *a, int backward) {
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    descriptor heuristics, engine[8];
    int64_t found = 0;
    descriptor all = attention_graph(d, a, backward, NULL), on = gpu_of(d, gpu);
    heuristics = begin(d, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    join(d, heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, all);
    join(d, heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, on);
    set(d, heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    end(d, heuristics);
    for (int i = 0; i < 8; i++) engine[i] = begin(d, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (!d->status)
        d->status = cudnnBackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                             CUDNN_TYPE_BACKEND_DESCRIPTOR, 8, &found, engine);
    return d->status ? 0 : found;
}

int main(void) {
    static const int64_t shapes[][5] = {/* queries, keys, heads, kv heads, head_dim */
                                        {512, 512, 4, 2, 64},
                                        {199, 101, 4, 1, 64},
                                        {5, 3, 2, 2, 24},
                                        {2048, 1000, 32, 8, 128}};
    int bad = 0;
    for (int n = 0; n < 3 * 4 * 2; n++) {
        const int64_t *shape = shapes[n / 2 % 4];
        static direction d;
        seqpar_attn_source a;
        memset(&d, 0, sizeof d);
        memset(&a, 0, sizeof a);
        a.q_tokens = shape[0];
        a.k_tokens = shape[1];
        a.heads = shape[2];
        a.kv_heads = shape[3];
        a.head_dim = shape[4];
        a.q_stride = a.dout_stride = 2 * a.heads * a.head_dim; /* some of the heads */
        a.k_stride = a.v_stride = a.kv_heads * a.head_dim;
        int64_t count = engines(&d, n / 8, &a, n % 2);
        printf("sm_%d, %s: %lld queries, %lld keys, head_dim %lld: %lld engines\n",
               gpus[n / 8].version / 10, n % 2 ? "backward" : "forward", (long long)shape[0],
               (long long)shape[1], (long long)shape[4], (long long)count);
        if (d.status) (void)failed(&d);
        bad += !count;
        close_direction(&d);
    }
    printf("every graph has an engine: %s\n", bad ? "no" : "yes");
    return bad > 0;
}
