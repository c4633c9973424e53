/* SPDX-License-Identifier: MIT OR Unlicense */
/* train_sft.c - supervised fine-tuning of a transformer, with sequences split over ranks.
 *
 *     train_sft --dataset data.jsonl --input_key question --output_key answer --packing_samples --ring_attn_size 4
 *
 * Four ranks and one rank give the same weights, bit for bit. --help lists all options. */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "trainer/objective/sft.h"

int main(int argc, char **argv) {
    static demo_job job = {.objective = &demo_sft};
    const demo_binding bindings[] = {DEMO_TRAINER_BINDINGS(job.config),
                                     DEMO_SFT_BINDINGS(job.config)};
    return demo_main(&job, "sft", bindings, (int)(sizeof bindings / sizeof *bindings), argc,
                     argv);
}
