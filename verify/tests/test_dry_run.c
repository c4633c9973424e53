/* SPDX-License-Identifier: MIT OR Unlicense */
/* What --dry_run says of memory, held against what the library counts while the same job takes
   its steps. Where the largest step is the one that is taken, the two are equal; else the
   forecast is a bound, and not a loose one. */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "trainer/objective/preference.h"
#include "trainer/objective/sft.h"
#include "support/test.h"

#define FOLDER "build/dry_run"
enum { DOCUMENTS = 24, WORDS = 64 };

/* Token ids, as pairs or as single documents: all of 80, or 40 to 109 of them. */
static void write_data(const char *path, int pairs, int even) {
    FILE *file = fopen(path, "wb");
    for (int i = 0; file && i < DOCUMENTS; i++) {
        static const char *const keys[2][2] = {{"input_ids", "labels"},
                                               {"rejected_input_ids", "rejected_labels"}};
        for (int k = 0; k <= pairs; k++) {
            int tokens = even ? 80 : 40 + (i * 31 + k * 17) % 70;
            for (int part = 0; part < 2; part++) {
                fprintf(file, "%s\"%s%s\": [", k || part ? ", " : "{",
                        pairs && !k ? "chosen_" : "", keys[k][part]);
                for (int t = 0; t < tokens; t++)
                    fprintf(file, "%s%d", t ? ", " : "",
                            part && t < 9 ? -100 : (i + t + 7 * k * (t > 9)) % 250);
                fputc(']', file);
            }
        }
        fprintf(file, "}\n");
    }
    if (!file || fclose(file)) exit(fprintf(stderr, "no file %s\n", path));
}

typedef struct run {
    demo_job job;
    demo_preference_config dpo;
    char line[2048], *words[WORDS];
    demo_error error;
    demo_memory counted;
} run;

/* A job that is ready to be run, by the options of a user. */
static int run_open(run *x, int dpo, const char *data, const char *options) {
    static demo_options parsed;
    int argc = 0, wrong;
    memset(x, 0, sizeof *x);
    x->job.objective = dpo ? &demo_dpo : &demo_sft;
    x->job.options = &x->dpo;
    const demo_binding sft_bindings[] = {DEMO_TRAINER_BINDINGS(x->job.config),
                                         DEMO_SFT_BINDINGS(x->job.config)},
                       dpo_bindings[] = {DEMO_TRAINER_BINDINGS(x->job.config),
                                         DEMO_DPO_BINDINGS(x->dpo)};
    memset(&parsed, 0, sizeof parsed);
    parsed.tool = dpo ? "dpo" : "sft";
    parsed.bindings = dpo ? dpo_bindings : sft_bindings;
    parsed.binding_count = (int)(dpo ? sizeof dpo_bindings / sizeof *dpo_bindings
                                     : sizeof sft_bindings / sizeof *sft_bindings);
    snprintf(x->line, sizeof x->line,
             "train --dataset " FOLDER "/%s.jsonl --max_len 128 --num_hidden_layers 3 "
             "--hidden_size 64 --omp_threads 1 --max_steps 2 --lr_scheduler constant "
             "--save_path " FOLDER "/none --ckpt_path " FOLDER "/none %s",
             data, options);
    for (char *at = strtok(x->line, " "); at && argc < WORDS; at = strtok(NULL, " "))
        x->words[argc++] = at;
    wrong = demo_options_parse(&parsed, argc, x->words, &x->error) ||
            demo_job_open(&x->job, &x->error);
    return test_expect(!wrong, "%s", x->error.text);
}

/* The steps of the run, on the device that computes. */
static seqpar_status counted_main(seqpar_comm *world, void *user) {
    run *x = (run *)user;
    demo_memory memory = {0};
    demo_rank r;
    memset(&r, 0, sizeof r);
    r.job = &x->job;
    seqpar_status status = demo_rank_open(&r, world);
    /* lines of progress are not what this is about */
    demo_progress_begin(&r.progress, 0, 1 << 30, 0);
    while (!status && r.step < r.job->total_steps) status = demo_step(&r);
    if (!status) status = demo_memory_gather(&r, &memory);
    if (!status && world->rank == 0) x->counted = memory;
    demo_rank_close(&r);
    return status;
}

static int run_counted(run *x) {
    seqpar_error error = {0};
    seqpar_status status = demo_run_with(&x->job, seqpar_run_threads, counted_main, x, &error);
    return test_expect(!status, "%s", error.text);
}

static int run_walked(run *x, demo_rehearsal *walk, bool other) {
    seqpar_error error = {0};
    x->job.config.dry_run = true;
    seqpar_status status = demo_walk_through(&x->job, walk, other, &error);
    x->job.config.dry_run = false;
    return test_expect(!status, "%s", error.text);
}

/* counted <= forecast <= most x counted, of every kind, of a rank and of all. */
static void compare(const demo_memory *forecast, const demo_memory *counted, double most) {
    for (int i = 0; i < DEMO_KINDS; i++)
        for (int all = 0; all < 2; all++) {
            double f = (double)(all ? forecast->all[i] : forecast->rank[i]);
            double c = (double)(all ? counted->all[i] : counted->rank[i]);
            test_expect(f >= c && f <= most * c,
                        "%s of %s: %.0f bytes are forecast, %.0f are "
                        "counted",
                        demo_kind_name[i], all ? "all ranks" : "a rank", f, c);
        }
    test_expect(counted->rank[SEQPAR_MEM_WEIGHTS] > 0 &&
                    counted->rank[SEQPAR_MEM_ACTIVATIONS] > 0,
                "nothing was counted");
}

/* Every step is the largest: all documents are in it, and all are alike. */
static void test_equal(int dpo, const char *options) {
    char all[1024];
    run x;
    demo_rehearsal walk = {0}, other = {0};
    snprintf(all, sizeof all, "--train_batch_size %d %s", DOCUMENTS, options);
    if (run_open(&x, dpo, dpo ? "pairs" : "even", all) && run_counted(&x) &&
        run_walked(&x, &walk, false) && run_walked(&x, &other, true)) {
        compare(&walk.memory, &x.counted, 1.0);
        x.job.config.gradient_checkpointing = !x.job.config.gradient_checkpointing;
        if (run_counted(&x)) compare(&other.memory, &x.counted, 1.0);
        test_expect(walk.memory.rank[SEQPAR_MEM_ACTIVATIONS] !=
                        other.memory.rank[SEQPAR_MEM_ACTIVATIONS],
                    "--gradient_checkpointing changes nothing");
    }
    demo_job_close(&x.job);
    test_end("dry_run_equal %s%s", dpo ? "dpo " : "", options);
}

/* Steps differ: near what the largest of them takes. least: packing may fill a row better than
   that of the longest documents. */
static void test_near(double least, double most, const char *options) {
    run x;
    demo_rehearsal walk = {0};
    if (run_open(&x, 0, "data", options) && run_counted(&x) && run_walked(&x, &walk, false)) {
        const demo_memory *f = &walk.memory, *c = &x.counted;
        static const int near[] = {SEQPAR_MEM_WEIGHTS, SEQPAR_MEM_OPTIMIZER,
                                   SEQPAR_MEM_GRADIENTS, SEQPAR_MEM_ACTIVATIONS};
        for (size_t i = 0; i < sizeof near / sizeof *near; i++) {
            double ratio = (double)f->rank[near[i]] / (double)c->rank[near[i]];
            test_expect(ratio >= least && ratio <= most, "%s: %.3f of what is counted",
                        demo_kind_name[near[i]], ratio);
        }
    }
    demo_job_close(&x.job);
    test_end("dry_run_near %s", options);
}

/* By hand, from the model's shape: what a layer keeps of a token, and what stands behind the
   last one; weights, which ranks that are threads share, with rotary tables; two moments, the
   weights' size a world has once. */
static void test_by_hand(int ranks, int recompute) {
    run x;
    demo_rehearsal walk = {0};
    char options[256];
    snprintf(options, sizeof options,
             "--train_batch_size %d --ring_attn_size %d --packing_samples --pack_len 1024 "
             "--micro_train_batch_size 64 %s",
             DOCUMENTS, ranks, recompute ? "--gradient_checkpointing" : "");
    if (run_open(&x, 0, "data", options) && run_walked(&x, &walk, false)) {
        const seqpar_llama_config *m = &x.job.model;
        int64_t wide = m->heads * m->head_dim, narrow = m->kv_heads * m->head_dim;
        int64_t kept = m->hidden + wide + m->heads;
        if (!recompute) kept += wide + 2 * narrow + m->hidden + 2 * m->intermediate + 2;
        int64_t token = m->layers * kept + m->hidden + 1 + 4 + 3, tokens = 0;
        for (int64_t i = 0; i < DOCUMENTS; i++) tokens += x.job.train.documents[i].tokens;
        int64_t layer = m->hidden * (2 * wide + 2 * narrow + 3 * m->intermediate + 2);
        int64_t weights = m->layers * layer + (2 * m->vocab + 1) * m->hidden;
        double of[3][2] = {
            {(double)walk.memory.all[SEQPAR_MEM_ACTIVATIONS], 4.0 * (double)(tokens * token)},
            {(double)walk.memory.all[SEQPAR_MEM_WEIGHTS], 4.0 * (double)weights},
            {(double)walk.memory.all[SEQPAR_MEM_OPTIMIZER], 8.0 * (double)weights}};
        for (int i = 0; i < 3; i++)
            test_expect(of[i][0] > 0.9 * of[i][1] && of[i][0] < 1.1 * of[i][1],
                        "figure %d: %.0f bytes are forecast, by hand they are %.0f", i,
                        of[i][0], of[i][1]);
        test_expect(walk.parameters == weights, "%lld parameters, by hand %lld",
                    (long long)walk.parameters, (long long)weights);
    }
    demo_job_close(&x.job);
    test_end("dry_run_by_hand P=%d recompute=%d", ranks, recompute);
}

int main(int argc, char **argv) {
    seqpar_error error = {0};
    test_begin(argc, argv);
    if (demo_make_folder(FOLDER, &error)) return fprintf(stderr, "%s\n", error.text), 2;
    write_data(FOLDER "/data.jsonl", 0, 0);
    write_data(FOLDER "/even.jsonl", 0, 1);
    write_data(FOLDER "/pairs.jsonl", 1, 1);
    for (int ranks = 1; ranks <= 3; ranks++)
        for (int recompute = 0; recompute < 2; recompute++)
            TEST(test_by_hand(ranks, recompute));
    TEST(test_equal(0, "--ring_attn_size 1"));
    TEST(test_equal(0, "--ring_attn_size 2 --packing_samples --pack_len 512"));
    TEST(test_equal(0, "--ring_attn_size 3 --zero_stage 0 --tie_word_embeddings"));
    TEST(test_equal(0, "--ring_attn_size 2 --data_parallel_size 2 --micro_train_batch_size 2"));
    TEST(
        test_equal(0, "--ring_attn_size 3 --schedule llama3 --packing_samples --pack_len 256"));
    TEST(test_equal(0, "--ring_attn_size 2 --schedule ulysses --optim sgd"));
    TEST(test_equal(0, "--ring_attn_size 2 --device reference --param_dtype bf16"));
    TEST(test_equal(0, "--ring_attn_size 3 --param_dtype bf16 --gradient_checkpointing"));
    TEST(test_equal(
        0, "--ring_attn_size 2 --param_dtype bf16 --stochastic_rounding --optim adamw_8bit"));
    TEST(test_equal(0, "--device reference --label_smoothing 0.1"));
    TEST(test_equal(0, "--ring_attn_size 2 --zero_stage 3 --adam_offload --param_offload"));
    TEST(test_equal(1, "--ring_attn_size 3 --packing_samples --pack_len 512"));
    TEST(test_near(0.98, 1.10,
                   "--train_batch_size 8 --packing_samples --pack_len 220 "
                   "--micro_train_batch_size 1 --max_epochs 2 --max_steps -1"));
    TEST(test_near(0.98, 1.10,
                   "--train_batch_size 8 --packing_samples --pack_len 220 "
                   "--micro_train_batch_size 1 --ring_attn_size 2 --max_steps 6"));
    TEST(test_near(1.0, 1.5, "--train_batch_size 4 --ring_attn_size 3 --max_steps 6"));
    return test_summary();
}
