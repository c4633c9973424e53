/* SPDX-License-Identifier: MIT OR Unlicense */
/* train_ppo.c - PPO, REINFORCE and group-relative policy optimization, with sequences split
 * over ranks.
 *
 *     train_ppo --prompt_data prompts.jsonl --input_key question --label_key answer --pretrain sft_model
 *         --reward_rule last_number --advantage_estimator group_norm --n_samples_per_prompt 4 --ring_attn_size 4
 *
 * The texts, rewards and weights do not depend on the number of ranks. --help lists all
 * options. */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "trainer/ppo/ppo.h"

int main(int argc, char **argv) {
    static demo_ppo_config ppo;
    static demo_job job = {.objective = &demo_ppo_objective, .options = &ppo};
    const demo_binding bindings[] = {DEMO_TRAINER_BINDINGS(job.config),
                                     DEMO_PPO_BINDINGS(job.config, ppo)};
    return demo_main(&job, "ppo", bindings, (int)(sizeof bindings / sizeof *bindings), argc,
                     argv);
}
