/* SPDX-License-Identifier: MIT OR Unlicense */
/* What sequence parallelism costs, by attention over 4,096 tokens in one process whose
   threads are the ranks: SP = 2 against one rank with two threads, zigzag rings of 2, 4 and 8
   ranks against one, two threads against one where there is one head only; llama3 on 4 ranks
   by its head stride, with the memory that each takes. Every way must give the bits of one rank on one thread before it is timed. Ways that are compared take
   turns, so that both have the same machine; a ratio is the median of those of the turns,
   and is what `wanted` holds for.

   Of a turn's runs the best counts by wall time, since what disturbs only adds. Processor
   time is added up instead: cores are disturbed one by one, so that the best run of ranks on
   all of them is seldom as undisturbed as the best of one rank on one. */
#include "bench.h"
#include "attention.h"

enum { MOST_TURNS = 21, MOST_RANKS = 8, PASSES = 2 };
static int tokens = 4096, turns = MOST_TURNS, runs_of_turn = 4;
static const char *const passes[PASSES] = {"forward", "backward"};

typedef struct way {
    int64_t ranks, threads; /* threads of each rank's device */
    seqpar_attn_desc desc;
    int check;
    float *result[TENSORS]; /* gathered, where check */
    double best[PASSES];    /* seconds of the best run, of all turns, */
    double turn[PASSES];    /* and what counts of a turn */
    /* CLOCK_MONOTONIC, or CLOCK_PROCESS_CPUTIME_ID: of all ranks together */
    clockid_t clock;
    int64_t exchange; /* bytes of buffers for messages, at most at once, of the first rank */
} way;

static void gather_results(way *w, attention *a) {
    int i;
    for (i = OUT; i <= DV; i++)
        seqpar_gather(w->result[i], a->x[i], seqpar_attn_share(a->attn), 0,
                      tensor_width(&w->desc, i) * (int64_t)sizeof(float));
}

/* Barriers, so that nobody's clock starts before all are there and stops before all are
   done. */
static void time_pass(way *w, attention *a, seqpar_comm *world, int pass) {
    double began, seconds;
    seqpar_comm_barrier(world);
    began = clock_seconds(w->clock);
    seqpar_comm_barrier(world);
    (pass ? backward_call : forward_call)(a);
    seqpar_comm_barrier(world);
    if (world->rank) return;
    seconds = clock_seconds(w->clock) - began;
    w->best[pass] = fmin(w->best[pass], seconds);
    w->turn[pass] = w->clock == CLOCK_PROCESS_CPUTIME_ID ? w->turn[pass] + seconds
                                                         : fmin(w->turn[pass], seconds);
}

static seqpar_status rank_main(seqpar_comm *world, void *user) {
    way *w = user;
    attention a;
    int pass, run;
    attention_open(&a, world, seqpar_device_cpu(w->threads), tokens, CHUNK, w->desc);
    forward_call(&a); /* warm, and what the backward pass needs */
    backward_call(&a);
    if (w->check) gather_results(w, &a);
    for (run = 0; !w->check && run < runs_of_turn; run++)
        for (pass = 0; pass < PASSES; pass++) time_pass(w, &a, world, pass);
    if (!world->rank) w->exchange = a.ctx.memory.peak[SEQPAR_MEM_EXCHANGE];
    attention_close(&a);
    return SEQPAR_OK;
}

static void run_way(way *w) {
    seqpar_error error;
    if (seqpar_run_threads(w->ranks, rank_main, w, &error)) {
        fprintf(stderr, "%s\n", error.text);
        exit(1);
    }
}

static void results_of(way *w) {
    int i;
    w->check = 1;
    for (i = OUT; i <= DV; i++)
        w->result[i] = calloc((size_t)(tokens * tensor_width(&w->desc, i)), sizeof(float));
    run_way(w);
    w->check = 0;
}

/* The same bits as one rank on one thread? */
static int same_bits(way *w) {
    way one = {.ranks = 1, .threads = 1, .desc = w->desc};
    int i, same = 1;
    results_of(&one);
    results_of(w);
    for (i = OUT; i <= DV; i++) {
        if (memcmp(one.result[i], w->result[i],
                   (size_t)(tokens * tensor_width(&w->desc, i)) * sizeof(float))) {
            printf("%s differs\n", tensor_names[i]);
            same = 0;
        }
        free(one.result[i]);
        free(w->result[i]);
    }
    return same;
}

static void take_turn(way *w) {
    int pass;
    for (pass = 0; pass < PASSES; pass++)
        w->turn[pass] = w->clock == CLOCK_PROCESS_CPUTIME_ID ? 0 : INFINITY;
    run_way(w);
}

/* `first` over `second`, by wall or processor time. */
static void compare_ways(report *r, const char *name, way first, way second, clockid_t clock,
                         double wanted, int at_most) {
    int same = same_bits(&first) && same_bits(&second);
    int by_cpu = clock == CLOCK_PROCESS_CPUTIME_ID, pass, run;
    double ratio[PASSES][MOST_TURNS];
    first.clock = second.clock = clock;
    for (pass = 0; pass < PASSES; pass++) first.best[pass] = second.best[pass] = INFINITY;
    for (run = 0; run < turns; run++) {
        take_turn(run % 2 ? &first : &second);
        take_turn(run % 2 ? &second : &first);
        for (pass = 0; pass < PASSES; pass++)
            ratio[pass][run] = first.turn[pass] / second.turn[pass];
    }
    for (pass = 0; pass < PASSES; pass++) {
        double a = first.best[pass], b = second.best[pass], median;
        char shape[48];
        qsort(ratio[pass], turns, sizeof *ratio[pass], rising);
        median = ratio[pass][turns / 2];
        snprintf(shape, sizeof shape, "S=%d d=%lld %lld/%lld", tokens,
                 (long long)first.desc.head_dim, (long long)first.desc.heads,
                 (long long)first.desc.kv_heads);
        printf("%-38s %-9s %-18s %-5s %10.2f %10.2f %7.3f %7.3f %8s %4.2f %5s\n", name,
               passes[pass], shape, by_cpu ? "cpu" : "wall", a * 1e3, b * 1e3, a / b, median,
               at_most ? "at most" : "at least", wanted, same ? "same" : "DIFFER");
        report_case(r, same,
                    "\"case\": \"%s\", \"pass\": \"%s\", \"shape\": \"%s\", \"clock\": \"%s\", "
                    "\"first_ms\": %.4f, \"second_ms\": %.4f, \"of_best\": %.4f, \"ratio\": "
                    "%.4f, \"wanted_%s\": %.2f, \"head_stride\": %lld, "
                    "\"exchange_bytes\": %lld",
                    name, passes[pass], shape,
                    by_cpu ? "processor time of the process" : "wall", a * 1e3, b * 1e3, a / b,
                    median, at_most ? "at_most" : "at_least", wanted,
                    (long long)first.desc.heads_k_stride, (long long)first.exchange);
    }
}

/* llama3 gathers the keys and values of so many heads at a time: fewer and larger messages, and
   larger buffers. Against itself with stride 1, which shows how far the clock can be trusted. */
static void compare_strides(report *r) {
    const seqpar_attn_desc one = {.heads = 8,
                                  .kv_heads = 4,
                                  .head_dim = 64,
                                  .layout = SEQPAR_LAYOUT_ZIGZAG,
                                  .schedule = SEQPAR_SCHEDULE_LLAMA3,
                                  .heads_k_stride = 1};
    char name[48];
    for (int64_t stride = 1; stride <= one.kv_heads; stride *= 2) {
        way first = {.ranks = 4, .threads = 1, .desc = one}, second = first;
        first.desc.heads_k_stride = stride;
        snprintf(name, sizeof name, "llama3, stride %lld over stride 1", (long long)stride);
        compare_ways(r, name, first, second, CLOCK_PROCESS_CPUTIME_ID, 1.05, 1);
    }
}

int main(int argc, char **argv) {
    seqpar_attn_desc many = {.heads = 4,
                             .kv_heads = 2,
                             .head_dim = 64,
                             .layout = SEQPAR_LAYOUT_ZIGZAG,
                             .schedule = SEQPAR_SCHEDULE_RING};
    seqpar_attn_desc single = many;
    way one = {.ranks = 1, .threads = 1, .desc = many},
        one_two = {.ranks = 1, .threads = 2, .desc = many},
        two = {.ranks = 2, .threads = 1, .desc = many};
    char name[48];
    report r;
    int64_t p;
    double load = 0;
    take_arguments(argc, argv, 0);
    if (tiny) tokens = 2 * MOST_RANKS * CHUNK, turns = runs_of_turn = 1;
    single.heads = single.kv_heads = 1;
    report_open(&r, "ranks", "\"tokens\": %d, \"chunk\": %d, \"turns\": %d,", tokens, CHUNK,
                turns);
    printf(
        "ranks as threads of one process, zigzag ring, causal, chunks of %d; best of %d turns; "
        "ratio: their median, for which `wanted` holds;\nof each turn the best of %d runs, or "
        "their sum by processor time; bits compared with one rank on one thread\n\n",
        CHUNK, turns, runs_of_turn);
    if (getloadavg(&load, 1) == 1 && load > 0.5)
        printf("others are at work here (load %.1f): wall times of two threads mean little\n\n",
               load);
    printf("%-38s %-9s %-18s %-5s %10s %10s %7s %7s %13s %5s\n", "first over second", "pass",
           "shape", "clock", "first ms", "second ms", "of best", "ratio", "wanted", "bits");
    compare_ways(&r, "1 rank of 2 threads over 2 ranks of 1", one_two, two, CLOCK_MONOTONIC,
                 0.95, 0);
    for (p = 2; p <= MOST_RANKS; p *= 2) {
        way ring = {.ranks = p, .threads = 1, .desc = many};
        snprintf(name, sizeof name, "%lld ranks over 1 rank", (long long)p);
        compare_ways(&r, name, ring, one, CLOCK_PROCESS_CPUTIME_ID, 1.08, 1);
    }
    one.desc = one_two.desc = single;
    compare_ways(&r, "1 thread over 2 threads, one head", one, one_two, CLOCK_MONOTONIC, 1.7,
                 0);
    compare_strides(&r);
    return report_close(&r);
}
