/* SPDX-License-Identifier: MIT OR Unlicense */
/* Every allocation of a whole step may be the one that finds no memory, and every thread the one
   that cannot be started: the step fails and says so, on all ranks, and nothing is left behind. */
#include "support/counted.h"
#include "support/locked.h"
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "seqpar_llama.h"
#include "support/test.h"
#include "support/run_objective.h"
#include "support/layouts.h"

typedef struct scarcity {
    const char *what;
    int64_t *made, *refused; /* counted so far; the number that is refused */
    seqpar_status status;
} scarcity;

/* Fails as it should, or does without: the numbers are the same. Returns how often it did without.
   every: one in so many is refused. */
static int64_t test_each(const scarcity *s, int64_t total, int64_t every, int64_t ranks,
                         objective_job *job, const objective_result *whole) {
    objective_result *result = job->result;
    int64_t before = blocks_live, without = 0;
    seqpar_error error;
    for (int64_t n = 1; n <= total && !test_why[0]; n += every) {
        *s->refused = *s->made + n;
        seqpar_status status = seqpar_run_threads(ranks, objective_main, job, &error);
        without += !status;
        test_expect(status == s->status ||
                        (!status && !memcmp(result->params, whole->params,
                                            (size_t)whole->elements * sizeof(double))),
                    "%s %lld of %lld refused: %s, %s", s->what, (long long)n, (long long)total,
                    status ? seqpar_status_name(status) : "other weights", error.text);
        test_expect(blocks_live == before, "%lld blocks are left after %s %lld: %s",
                    (long long)(blocks_live - before), s->what, (long long)n, error.text);
        before = blocks_live;
    }
    *s->refused = 0;
    return without;
}

/* every: of the allocations one in so many. */
static void test_step(const char *what, objective_task *t, const objective_way *way,
                      int64_t every) {
    static const scarcity memory = {"allocation", &blocks_made, &block_refused,
                                    SEQPAR_ERR_MEMORY};
    static const scarcity thread = {"thread", &threads_made, &thread_refused,
                                    SEQPAR_ERR_THREAD};
    objective_result whole, result;
    objective_job job = {t, way, &result};
    seqpar_error error;
    int64_t ranks = way->dp * way->sp, made, started, without;
    t->lean = 1;
    objective_run(t, way, &whole);
    objective_run(t, way, &result);
    made = blocks_made;
    started = threads_made;
    test_expect(!whole.status && !seqpar_run_threads(ranks, objective_main, &job, &error), "%s",
                whole.error.text);
    made = blocks_made - made;
    started = threads_made - started;
    test_expect(started == (ranks > 1 ? ranks : way->offload > 0),
                "%lld threads for %lld ranks", (long long)started, (long long)ranks);
    without = test_each(&memory, made, every, ranks, &job, &whole);
    printf("#   %lld allocations, of which %lld can be done without", (long long)made,
           (long long)without);
    without = test_each(&thread, started, 1, ranks, &job, &whole);
    printf("; %lld threads, of which %lld\n", (long long)started, (long long)without);
    objective_result_free(&whole);
    objective_result_free(&result);
    objective_task_close(t);
    test_end("scarce %s D=%lld P=%lld", what, (long long)way->dp, (long long)way->sp);
}

static objective_task task_of(int kind) {
    objective_task t;
    objective_task_cells(&t, kind, 2, 7, 14, 3, 5);
    t.config.hidden = 12;
    t.config.heads = 2;
    t.config.kv_heads = 1;
    t.config.intermediate = 10;
    t.config.vocab = 61;
    return t;
}

static void test_objectives(void) {
    static const int kinds[] = {OBJECTIVE_SFT, OBJECTIVE_DPO, OBJECTIVE_RM, OBJECTIVE_KD,
                                OBJECTIVE_PRM};
    const objective_way alone = {.dp = 1, .sp = 1, .accumulation = 2, .threads = 1};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        objective_task t = task_of(kinds[i]);
        test_step(objective_name(kinds[i]), &t, &alone, 1);
    }
}

static void test_states(void) {
    const struct {
        const char *what;
        objective_way way;
    } cases[] = {{"zero 3, offloaded, second pool",
                  {.dp = 1,
                   .sp = 1,
                   .accumulation = 1,
                   .threads = 1,
                   .zero_stage = 3,
                   .offload = 3,
                   .recompute = 2}},
                 {"8 bits, bf16",
                  {.dp = 1,
                   .sp = 1,
                   .accumulation = 1,
                   .threads = 1,
                   .reference_device = 2,
                   .state_bits = 8}},
                 {"reference",
                  {.dp = 1, .sp = 1, .accumulation = 1, .reference_device = 1, .recompute = 1}},
                 {"two threads", {.dp = 1, .sp = 1, .accumulation = 1, .threads = 2}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        objective_task t = task_of(OBJECTIVE_SFT);
        t.config.layers = 3;
        test_step(cases[i].what, &t, &cases[i].way, 1);
    }
}

static void test_models(void) {
    const objective_way alone = {.dp = 1, .sp = 1, .accumulation = 1, .threads = 1};
    objective_task t = task_of(OBJECTIVE_SFT);
    t.config.qkv_bias = t.config.o_bias = t.config.mlp_bias = t.config.qk_norm = 1;
    t.config.window = 3;
    t.config.window_from = 1;
    test_step("parts", &t, &alone, 1);
    t = task_of(OBJECTIVE_SFT);
    t.config.experts = 3;
    t.config.experts_per_token = t.config.sparse_every = 2;
    t.config.expert_intermediate = 7;
    test_step("experts", &t, &alone, 1);
    t = task_of(OBJECTIVE_SFT);
    t.adapter = (seqpar_adapter_desc){
        .rank = 2, .scale = 0.5, .targets = SEQPAR_ADAPT_ALL, .dropout = 0.3};
    test_step("adapters", &t, &alone, 1);
    t = task_of(OBJECTIVE_SFT);
    t.adapter = (seqpar_adapter_desc){.rank = 2, .scale = 0.5, .targets = SEQPAR_ADAPT_ALL};
    t.config.four_bits = 1;
    test_step("four bits", &t, &alone, 1);
}

/* Documents of many cells over parts and micro-batches, so that every list of packing grows. */
static void test_pack(void) {
    enum { COUNT = 61, LONGEST = 700 };
    static int32_t ids[LONGEST];
    seqpar_document documents[COUNT];
    seqpar_pack_desc desc = {.pack_len = 801, .dp_size = 3, .micro_batches = 2};
    seqpar_batch whole, batch;
    seqpar_error error = {SEQPAR_OK};
    int64_t made = blocks_made, before;
    memset(documents, 0, sizeof documents);
    for (int64_t i = 0; i < COUNT; i++) {
        documents[i].ids = ids;
        documents[i].unit = i;
        documents[i].tokens = i % 7 ? 13 + 11 * i : 2;
    }
    test_expect(!seqpar_pack(&error, &whole, documents, COUNT, &desc), "%s", error.text);
    made = blocks_made - made;
    before = blocks_live;
    for (int64_t n = 1; n <= made && !test_why[0]; n++) {
        block_refused = blocks_made + n;
        memset(&error, 0, sizeof error);
        seqpar_status status = seqpar_pack(&error, &batch, documents, COUNT, &desc);
        block_refused = 0;
        test_expect(status == SEQPAR_ERR_MEMORY && blocks_live == before && !batch.rows,
                    "allocation %lld of %lld refused: %s, %s, %lld rows, %lld blocks are left",
                    (long long)n, (long long)made, seqpar_status_name(status), error.text,
                    (long long)batch.rows, (long long)(blocks_live - before));
    }
    printf("#   %lld allocations\n", (long long)made);
    seqpar_batch_free(&whole);
    test_end("scarce pack");
}

/* On ranks, any of which may be the one. */
static void test_ranks(void) {
    static const int64_t worlds[][4] = {{1, 2, 0, SEQPAR_SCHEDULE_RING},
                                        {2, 1, 2, SEQPAR_SCHEDULE_RING},
                                        {1, 3, 3, SEQPAR_SCHEDULE_LLAMA3},
                                        {1, 2, 1, SEQPAR_SCHEDULE_ULYSSES}};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        objective_task t = task_of(OBJECTIVE_DPO);
        const objective_way way = {.dp = worlds[i][0],
                                   .sp = worlds[i][1],
                                   .accumulation = 1,
                                   .threads = 1,
                                   .zero_stage = (int)worlds[i][2],
                                   .schedule = (int)worlds[i][3]};
        t.config.kv_heads = 2;
        test_step(seqpar_schedule_name(way.schedule), &t, &way, 5);
    }
}

/* ---- collectives ---- */

static seqpar_status rank_collects(seqpar_comm *world, void *user) {
    int64_t one = 1, all[3], bytes[3] = {8, 8, 8};
    seqpar_comm *sub = NULL;
    seqpar_status status = seqpar_comm_all_gather(world, all, &one, bytes, "scarce");
    (void)user;
    if (!status) status = seqpar_comm_broadcast(world, &one, 8, 1);
    if (!status) status = seqpar_comm_sum_i64(world, &one, 1);
    if (!status) status = seqpar_comm_max_i64(world, &one, 1);
    if (!status) status = seqpar_comm_split(world, 0, 0, &sub);
    test_expect(status || (one == world->size && sub && sub->size == world->size), "%lld",
                (long long)one);
    seqpar_comm_free(sub);
    return status;
}

/* Each allocation in turn: where there is another, the world ends for want of memory. */
static void test_collectives(void) {
    for (int64_t ranks = 1; ranks <= 3; ranks++) {
        const int64_t live = blocks_live;
        seqpar_error error;
        int64_t made = blocks_made;
        test_expect(!seqpar_run_threads(ranks, rank_collects, NULL, &error), "%s", error.text);
        made = blocks_made - made;
        for (int64_t n = 1; n <= made; n++) {
            block_refused = blocks_made + n;
            seqpar_status status = seqpar_run_threads(ranks, rank_collects, NULL, &error);
            test_expect(status == SEQPAR_ERR_MEMORY && strstr(error.text, "memory"),
                        "allocation %lld of %lld: %s, '%s'", (long long)n, (long long)made,
                        seqpar_status_name(status), error.text);
            test_expect(blocks_live == live, "allocation %lld of %lld: %lld blocks are left",
                        (long long)n, (long long)made, (long long)(blocks_live - live));
        }
        block_refused = 0;
        test_end("scarce collectives P=%lld: %lld allocations", (long long)ranks,
                 (long long)made);
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_pack());
    TEST(test_collectives());
    TEST(test_objectives());
    TEST(test_states());
    TEST(test_models());
    TEST(test_ranks());
    return test_summary();
}
