/* SPDX-License-Identifier: MIT OR Unlicense */
/* train_kd.c - knowledge distillation: a student model learns from a larger teacher model, with
 * sequences split over ranks.
 *
 *     train_kd --dataset data.jsonl --input_key question --output_key answer --pretrain student --teacher_model teacher --ring_attn_size 4
 *
 * The logits of a sequence are never all in memory at once, neither the student's nor the
 * teacher's. --help lists all options. */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "trainer/objective/kd.h"

int main(int argc, char **argv) {
    static demo_kd_config kd;
    static demo_job job = {.objective = &demo_kd, .options = &kd};
    const demo_binding bindings[] = {DEMO_TRAINER_BINDINGS(job.config),
                                     DEMO_TEXT_BINDINGS(job.config), DEMO_KD_BINDINGS(kd)};
    return demo_main(&job, "kd", bindings, (int)(sizeof bindings / sizeof *bindings), argc,
                     argv);
}
