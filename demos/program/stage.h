/* SPDX-License-Identifier: MIT OR Unlicense */
/* stage.h - the trainers of this project, and the one that LLaMA-Factory's --stage selects. */
#ifndef PROGRAM_STAGE_H
#define PROGRAM_STAGE_H

#include "program.h"

static const char *const program_tools[] = {"sft", "dpo", "rm", "kto", "kd", "prm", "ppo"};
enum { PROGRAM_TOOLS = 7 };

static int program_tool(const char *name) {
    for (int i = 0; i < PROGRAM_TOOLS; i++)
        if (!strcmp(name, program_tools[i])) return i;
    return -1;
}

/* Sets the trainer from --stage; pt (pretraining) is train_sft on plain text. */
static int program_stage(program *p) {
    int i = program_find(p, "stage");
    const char *stage = program_given(p, "stage");
    bool plain = stage && !strcmp(stage, "pt");
    p->from = DEMO_FROM_LLAMAFACTORY;
    if (!stage)
        fprintf(stderr, "notice: without --stage the stage is sft, as in LLaMA-Factory\n");
    int tool = program_tool(plain || !stage ? "sft" : stage);
    if (tool < 0)
        return demo_fail(p->error,
                         "--stage is %.60s; give sft, pt, dpo, kto, rm or ppo, or leave it out",
                         stage);
    p->tool = program_tools[tool];
    if (i >= 0) program_drop(p, i);
    if (plain) program_add(p, "pretrain_mode", NULL);
    return 0;
}
#endif
