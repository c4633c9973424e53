/* SPDX-License-Identifier: MIT OR Unlicense */
/* train_prm.c - process reward models, which rate each step of a solution, with sequences split
 * over ranks.
 *
 *     train_prm --dataset steps.jsonl --placeholder_token '*' --reward_tokens + - --pretrain model --ring_attn_size 4
 *
 * A placeholder token follows each step, and the step's label is the target at that token.
 * --help lists all options. */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "trainer/objective/prm.h"

int main(int argc, char **argv) {
    static demo_prm_config prm;
    static demo_job job = {.objective = &demo_prm, .options = &prm};
    const demo_binding bindings[] = {DEMO_SHARED_BINDINGS(job.config), DEMO_PRM_BINDINGS(prm)};
    return demo_main(&job, "prm", bindings, (int)(sizeof bindings / sizeof *bindings), argc,
                     argv);
}
