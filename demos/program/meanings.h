/* SPDX-License-Identifier: MIT OR Unlicense */
/* meanings.h - the description of each option on seqpar's help pages. It is taken from the
 * output of the trainers' --help, so that every description is written only once. */
#ifndef PROGRAM_MEANINGS_H
#define PROGRAM_MEANINGS_H

#include "program.h"

/* name and description, stb_ds string map */
typedef struct {
    char *key, *value;
} program_meaning;

/* The output of a trainer's --help; "" if the trainer cannot be run. The caller calls
   free(). */
static char *program_trainer_help(const program *p, const char *tool) {
    char *binary = program_binary(p, "", tool);
    char *command = program_text("'%s' --help 2>/dev/null", binary);
    free(binary);
    FILE *pipe = popen(command, "r");
    size_t used = 0, got;
    char *text = (char *)demo_alloc(1 << 20, 1);
    while (pipe && used < (1 << 20) - 1 &&
           (got = fread(text + used, 1, (1 << 20) - 1 - used, pipe)) > 0)
        used += got;
    if (pipe) pclose(pipe);
    free(command);
    return text;
}

/* Parses a help page and adds its entries. An entry is "  --name  kind [default] text"; a
   default may contain line ends. */
static void program_meanings_add(program_meaning **all, char *help) {
    char *next = strstr(help, "\n\n  --"), *text;
    for (char *at = next ? next + 2 : NULL; at; at = next) {
        char *section = strstr(at, "\n\n");
        next = strstr(at, "\n  --");
        if (section && (!next || section < next)) *section = 0, next = NULL;
        if (next) *next++ = 0;
        at += strspn(at, " -");
        text = strstr(at, "] ");
        at[strcspn(at, " ")] = 0;
        if (text && shgeti(*all, at) < 0) shput(*all, at, program_text("%s", text + 2));
    }
}

/* The descriptions of the options of all trainers. */
static program_meaning *program_meanings(const program *p) {
    static const char *const tools[] = {"sft", "dpo", "rm",  "kto",
                                        "kd",  "prm", "ppo", "generate"};
    program_meaning *all = NULL;
    sh_new_strdup(all);
    for (size_t i = 0; i < sizeof tools / sizeof *tools; i++) {
        char *help = program_trainer_help(p, tools[i]);
        program_meanings_add(&all, help);
        free(help);
    }
    return all;
}

#endif
