/* SPDX-License-Identifier: MIT OR Unlicense */
/* What equal bits cost: attention chunk by chunk against the relaxed path (one running
   state, tiles that know no chunks) on the same kernels, one thread, for chunks of any size.
   Prints a table and writes build/bench/chunks.json. */
#include "bench.h"
#include "attention.h"

static const int64_t chunks[] = {16, 24, 32, 48, 64, 96, 128, 256};
enum { SIZES = sizeof chunks / sizeof *chunks, ROUNDS = 3 };

/* The farthest of some tensors of one way from the other: only the order of sums differs. */
static double farthest(const attention *a, const attention *b, int first, int last) {
    double worst = 0;
    for (int i = first; i <= last; i++) {
        distance d = {0, 0};
        double e;
        for (int64_t n = 0; n < a->row.tokens * tensor_width(&a->desc, i); n++)
            compare(&d, ((const float *)a->x[i])[n], ((const float *)b->x[i])[n]);
        e = relative(&d);
        if (worst == worst && !(e <= worst)) worst = e; /* a NaN stays */
    }
    return worst;
}

/* Both ways in turn, the best of each, so that neither has the quieter machine. */
static void bench_chunk(report *r, int64_t tokens, int64_t chunk, seqpar_attn_desc desc) {
    static const struct {
        const char *name;
        call_fn call;
        int first, last;
    } passes[] = {{"forward", forward_call, OUT, LSE}, {"backward", backward_call, DQ, DV}};
    attention way[2];
    seqpar_comm *self[] = {seqpar_comm_self(), seqpar_comm_self()}; /* a device each */
    char shape[48];
    snprintf(shape, sizeof shape, "S=%lld d=%lld %s", (long long)tokens,
             (long long)desc.head_dim, desc.full ? "full" : "causal");
    for (int i = 0; i < 2; i++) {
        desc.relaxed = i;
        attention_open(&way[i], self[i], seqpar_device_cpu(1), tokens, chunk, desc);
        forward_call(&way[i]);
        backward_call(&way[i]);
    }
    for (int p = 0; p < 2; p++) {
        double error = farthest(&way[0], &way[1], passes[p].first, passes[p].last);
        double best[2] = {INFINITY, INFINITY};
        int right = error <= 1e-5;
        for (int round = 0; round < size_or_tiny(ROUNDS, 1); round++)
            for (int i = 0; i < 2; i++)
                best[i] = fmin(best[i], measure(passes[p].call, &way[i]).best);
        printf("%-22s %-9s %6lld %12.3f %12.3f %10.3f %9.1e%s\n", shape, passes[p].name,
               (long long)chunk, best[0] * 1e3, best[1] * 1e3, best[1] / best[0], error,
               right ? "" : "  WRONG");
        report_case(r, right,
                    "\"shape\": \"%s\", \"pass\": \"%s\", \"chunk\": %lld, \"chunks_ms\": "
                    "%.4f, \"relaxed_ms\": %.4f, \"relaxed_over_chunks\": %.4f",
                    shape, passes[p].name, (long long)chunk, best[0] * 1e3, best[1] * 1e3,
                    best[1] / best[0]);
    }
    attention_close(&way[0]);
    attention_close(&way[1]);
    seqpar_comm_free(self[0]);
    seqpar_comm_free(self[1]);
}

int main(int argc, char **argv) {
    report r;
    take_arguments(argc, argv, 0);
    report_open(&r, "chunks", "\"device\": \"cpu\", \"threads\": 1,");
    printf("what equal bits cost: attention by chunks, and relaxed; processor time of one "
           "thread; wanted from chunks of %d on: 0.95\n\n",
           CHUNK);
    printf("%-22s %-9s %6s %12s %12s %10s %9s\n", "shape", "pass", "chunk", "chunks ms",
           "relaxed ms", "relaxed/", "distance");
    for (int64_t dim = 64; dim <= 128; dim *= 2)
        for (int full = 0; full < 2; full++)
            for (int i = 0; i < SIZES; i++)
                bench_chunk(&r, size_or_tiny(2304, 768), chunks[i],
                            (seqpar_attn_desc){
                                .heads = 1, .kv_heads = 1, .head_dim = dim, .full = full});
    return report_close(&r);
}
