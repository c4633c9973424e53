/* SPDX-License-Identifier: MIT OR Unlicense */
/* train_kto.c - KTO from responses that are liked or not, sequences split over ranks.
 *
 *     train_kto --dataset labelled.jsonl --input_key prompt --output_key completion --pretrain sft_model --ring_attn_size 4
 *
 * Its KL term is over the whole optimizer step, however it is split. --help lists everything.
    */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "trainer/objective/kto.h"

int main(int argc, char **argv) {
    static demo_kto_config kto;
    static demo_job job = {.objective = &demo_kto, .options = &kto};
    const demo_binding bindings[] = {DEMO_TRAINER_BINDINGS(job.config), DEMO_KTO_BINDINGS(kto)};
    return demo_main(&job, "kto", bindings, (int)(sizeof bindings / sizeof *bindings), argc,
                     argv);
}
