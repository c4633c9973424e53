/* SPDX-License-Identifier: MIT OR Unlicense */
/* generate.c - generates texts for prompts, scores them by reward models, reward servers or a
 * rule, and turns them into training data.
 *
 *     generate --dataset prompts.jsonl --input_key question --pretrain model --output_path texts.jsonl \
 *         --n_samples_per_prompt 4 --reward_pretrain rm --post_processor rs --data_parallel_size 4
 *
 * The texts do not depend on the number of ranks. --help lists all options. */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "trainer/ppo/generate.h"

int main(int argc, char **argv) {
    static demo_generate_config generate;
    static demo_job job = {.objective = &demo_generate_objective, .options = &generate};
    static const char tool[] = "generate";
    const demo_binding all[] = {DEMO_GENERATE_BINDINGS(job.config, generate, generate.ppo),
                                DEMO_TRAINER_BINDINGS(job.config)};
    enum { ALL = sizeof all / sizeof *all };
    demo_binding own[ALL];
    int count = demo_bindings_of(own, all, ALL, tool);
    return demo_main(&job, tool, own, count, argc, argv);
}
