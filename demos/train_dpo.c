/* SPDX-License-Identifier: MIT OR Unlicense */
/* train_dpo.c - direct preference optimization (DPO) and related losses, with sequences split
 * over ranks.
 *
 *     train_dpo --dataset pairs.jsonl --prompt_key prompt --pretrain sft_model --packing_samples --ring_attn_size 4
 *
 * At the first step the policy is the reference, so the loss is exactly -log(sigmoid(0)). Four
 * ranks and one rank give the same weights, bit for bit. --help lists all options. */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "trainer/objective/preference.h"

int main(int argc, char **argv) {
    static demo_preference_config preference;
    static demo_job job = {.objective = &demo_dpo, .options = &preference};
    const demo_binding bindings[] = {DEMO_TRAINER_BINDINGS(job.config),
                                     DEMO_DPO_BINDINGS(preference)};
    return demo_main(&job, "dpo", bindings, (int)(sizeof bindings / sizeof *bindings), argc,
                     argv);
}
