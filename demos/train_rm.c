/* SPDX-License-Identifier: MIT OR Unlicense */
/* train_rm.c - trains a reward model on preference pairs, with sequences split over ranks.
 *
 *     train_rm --dataset pairs.jsonl --prompt_key prompt --pretrain sft_model --packing_samples --ring_attn_size 4
 *
 * Writes a sequence classifier with one label: score.weight maps the last token's hidden state
 * to the reward. --help lists all options. */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "trainer/objective/preference.h"

int main(int argc, char **argv) {
    static demo_preference_config preference;
    static demo_job job = {
        .objective = &demo_rm, .options = &preference, .score = &preference.value_head_prefix};
    const demo_binding bindings[] = {DEMO_TRAINER_BINDINGS(job.config),
                                     DEMO_RM_BINDINGS(preference)};
    return demo_main(&job, "rm", bindings, (int)(sizeof bindings / sizeof *bindings), argc,
                     argv);
}
