/* SPDX-License-Identifier: MIT OR Unlicense */
/* Whatever goes wrong on a rank, every rank ends: in good time, with one sentence that says what
   and where, and without keeping anything. Steps of a model in random ways, in each of them one
   thing at a random place: a transfer that fails, a rank that ends without a word, an allocation
   that finds no memory, messages late and out of order.
     INJECTED=10000     so many, the long mode
     INJECTED_FIRST=34  from that one on */
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
#include "support/counted.h"
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "support/run_model.h"

enum { WAYS = 8, LONGEST_S = 60 };
enum fault { FAULT_TRANSFER, FAULT_RANK, FAULT_MEMORY, FAULT_LATE, FAULTS };
static const char *const fault_name[FAULTS] = {"a transfer that fails", "a rank that ends",
                                               "no memory", "late messages"};

/* A run in some way, undisturbed: its result, and how many allocations and transfers it has. */
typedef struct undisturbed {
    model_way way;
    model_result result;
    int64_t blocks;
} undisturbed;

static model_task task;
static undisturbed ways[WAYS];
static char at_work[300]; /* for the watchdog */
static struct { int64_t runs, errors; } tally[FAULTS];

static void draw_way(model_way *w, int i) {
    static const int64_t shapes[WAYS][2] = {{1, 1}, {1, 2}, {2, 1}, {1, 3},
                                            {2, 2}, {3, 1}, {1, 5}, {2, 3}};
    *w = (model_way){.dp = shapes[i][0], .sp = shapes[i][1], .threads = 1, .steps = 2};
    w->accumulation = test_integer(1, 2);
    w->layout = test_integer(0, 1) ? SEQPAR_LAYOUT_ZIGZAG : SEQPAR_LAYOUT_CONTIGUOUS;
    w->schedule = (int)test_integer(SEQPAR_SCHEDULE_RING, SEQPAR_SCHEDULE_ULYSSES);
    w->heads_k_stride = 1;
    w->zero_stage = i % 4;
    w->recompute = (int)test_integer(0, 1);
    w->reference = i % 3 ? 0 : 2;
    w->offload = (int)test_integer(0, 3) & (w->zero_stage == 3 ? 3 : 1);
    w->slice = 1;
}

static void make_task(void) {
    task.config = (seqpar_llama_config){.layers = 2,
                                        .hidden = 16,
                                        .heads = 4,
                                        .kv_heads = 2,
                                        .head_dim = 4,
                                        .intermediate = 24,
                                        .vocab = 61};
    random_batch(&task.batch, 9, 24, 61, 40, 5);
    task.objective.count = task.batch.counts.supervised;
    task.seed = 3;
    task.lr = 0.01;
    task.max_norm = 1;
}

static void run_undisturbed(void) {
    for (int i = 0; i < WAYS; i++) {
        draw_way(&ways[i].way, i);
        model_room(&task, &ways[i].result);
        int64_t before = blocks_made;
        model_go(&task, &ways[i].way, &ways[i].result);
        ways[i].blocks = blocks_made - before;
    }
}

static void test_undisturbed(void) {
    for (int i = 0; i < WAYS; i++)
        test_expect(!ways[i].result.status, "%s", ways[i].result.error.text);
    test_end("injected_nothing");
}

/* What an error must say. */
static int names_cause(enum fault fault, const seqpar_error *error) {
    const char *text = error->text;
    if (fault == FAULT_TRANSFER) return strstr(text, "injected failure") != NULL;
    if (fault == FAULT_MEMORY) return strstr(text, "memory") != NULL;
    return strstr(text, "has ended") || strstr(text, "without a word") || strstr(text, "died");
}

static void expect_end(const undisturbed *u, enum fault fault, const model_result *r,
                       int64_t live) {
    tally[fault].runs++;
    tally[fault].errors += r->status != SEQPAR_OK;
    test_expect(blocks_live == live, "%lld blocks are left: %s",
                (long long)(blocks_live - live), at_work);
    if (r->status)
        test_expect(fault != FAULT_LATE && names_cause(fault, &r->error), "%s: %s", at_work,
                    r->error.text);
    else
        expect_equal_runs(r, &u->result, at_work);
}

static void run_disturbed(int64_t number) {
    test_state = test_seed + ((uint64_t)number << 32) + 1; /* each run by its number alone */
    for (int i = 0; i < 8; i++) test_random();
    const undisturbed *u = &ways[test_integer(0, WAYS - 1)];
    enum fault fault = (enum fault)test_integer(0, FAULTS - 1);
    int64_t live = blocks_live, at = test_integer(1, test_integer(0, 1) ? 20 : 300);
    seqpar_inject_desc inject = {.seed = (uint64_t)number};
    model_way way = u->way;
    model_result r;
    way.inject_rank = test_integer(0, way.dp * way.sp - 1);
    if (fault == FAULT_TRANSFER) inject.fail_at = at;
    if (fault == FAULT_RANK) inject.die_at = at;
    if (fault == FAULT_LATE) inject.reorder = 1, inject.delay_us_max = 20;
    if (fault == FAULT_MEMORY) at = test_integer(1, u->blocks);
    if (fault != FAULT_MEMORY) way.inject = &inject;
    snprintf(
        at_work, sizeof at_work,
        "FAIL injected_%lld: D=%lld P=%lld zero %d offload %d %s, %s at %lld of rank %lld\n",
        (long long)number, (long long)way.dp, (long long)way.sp, way.zero_stage, way.offload,
        seqpar_schedule_name(way.schedule), fault_name[fault], (long long)at,
        (long long)way.inject_rank);
    test_limit(LONGEST_S);
    model_room(&task, &r);
    block_refused = fault == FAULT_MEMORY ? blocks_made + at : 0;
    model_go(&task, &way, &r);
    block_refused = 0;
    test_limit(0);
    expect_end(u, fault, &r, live);
    model_result_free(&r);
}

static void test_disturbed(void) {
    const char *wanted = getenv("INJECTED"), *from = getenv("INJECTED_FIRST");
    int64_t runs = wanted ? atoll(wanted) : getenv("TEST_ALL") ? 10000 : 400;
    int64_t first = from ? atoll(from) : 0;
    for (int64_t i = first; i < first + runs; i++) run_disturbed(i);
    for (int f = 0; f < FAULTS; f++) {
        test_expect(
            runs < 100 || (f == FAULT_LATE ? tally[f].errors == 0 : tally[f].errors > 0),
            "%lld of %lld runs failed", (long long)tally[f].errors, (long long)tally[f].runs);
        test_end("injected %s: %lld runs, %lld errors", fault_name[f], (long long)tally[f].runs,
                 (long long)tally[f].errors);
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    test_hang.text = at_work;
    make_task();
    run_undisturbed(); /* what the disturbed ones are compared with */
    TEST(test_undisturbed());
    TEST(test_disturbed());
    for (int i = 0; i < WAYS; i++) model_result_free(&ways[i].result);
    seqpar_batch_free(&task.batch);
    return test_summary();
}
