/* SPDX-License-Identifier: MIT OR Unlicense */
/* train_sft.c - supervised fine-tuning of a small transformer, its sequences split over ranks.
 *
 *     train_sft --dataset data.jsonl --input_key question --output_key answer --packing_samples --ring_attn_size 4
 *
 * Four ranks and one rank give the same weights, bit for bit. --help lists everything. */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "sft.h"

static void say_job(const demo_job *job) {
    const demo_config *c = &job->config;
    char summary[256];
    demo_data_summary(&job->train, summary, sizeof summary);
    fprintf(stderr, "data: %s\n", summary);
    fprintf(stderr, "model: %lld layers, hidden %lld, %lld heads over %lld kv heads, vocab %lld; %s\n", (long long)job->model.layers, (long long)job->model.hidden,
            (long long)job->model.heads, (long long)job->model.kv_heads, (long long)job->model.vocab, c->device);
    fprintf(stderr, "ranks: %lld data-parallel x %lld sequence-parallel (%s, %s), ZeRO %lld, %lld steps of %lld documents\n", (long long)job->dp, (long long)c->ring_attn_size,
            seqpar_layout_name(job->layout), seqpar_schedule_name(job->schedule), (long long)c->zero_stage, (long long)job->total_steps, (long long)c->train_batch_size);
}

int main(int argc, char **argv) {
    static demo_job job = {.objective = &demo_sft};
    const demo_binding bindings[] = {DEMO_TRAINER_BINDINGS(job.config)};
    demo_options options = {.tool = "sft", .bindings = bindings, .binding_count = (int)(sizeof bindings / sizeof *bindings)};
    char error[1024];
    demo_wait_passively(argv);
    if (demo_options_parse(&options, argc, argv, error, sizeof error)) {
        fprintf(stderr, "error: %s\n", error);
        return 2;
    }
    if (options.help_wanted) {
        demo_options_help(&options, stdout);
        return 0;
    }
    demo_options_print_ignored(&options, stderr);
    if (demo_job_open(&job, error, sizeof error)) {
        fprintf(stderr, "error: %s\n", error);
        return 2;
    }
    say_job(&job);
    int code = demo_job_run(&job);
    demo_job_close(&job);
    return code;
}
