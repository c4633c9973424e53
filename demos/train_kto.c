/* SPDX-License-Identifier: MIT OR Unlicense */
/* train_kto.c - KTO: learns from responses labelled desirable or undesirable, with sequences
 * split over ranks.
 *
 *     train_kto --dataset labelled.jsonl --input_key prompt --output_key completion --pretrain sft_model --ring_attn_size 4
 *
 * The KL term is computed over the whole optimizer step, so it does not depend on micro-batches
 * or ranks. --help lists all options. */
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
