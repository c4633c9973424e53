/* SPDX-License-Identifier: MIT OR Unlicense */
/* targets.h - finds the trainer that a command starts, and the program that the command is
 * written for. A command names a trainer, a module or script of OpenRLHF, LLaMA-Factory's
 * script with --stage, or a yaml file of LLaMA-Factory or axolotl. */
#ifndef PROGRAM_TARGETS_H
#define PROGRAM_TARGETS_H

#include "axolotl.h"
#include "launchers.h"
#include "llamafactory.h"
#include "stage.h"

/* Translates the yaml file p->options[at] of LLaMA-Factory or axolotl, and the words after it,
   into options, which replace p->options. */
static int program_yaml(program *p, int from, int at) {
    program_keys k = {.p = p, .path = p->options[at]};
    char **behind = p->options + at + 1;
    int64_t count = arrlen(p->options) - at - 1;
    bool axolotl = from == DEMO_FROM_AXOLOTL;
    p->options = NULL; /* `behind` still points to the old words */
    p->file = k.path;
    p->from = from;
    if (program_keys_read(&k) || (axolotl ? program_keys_dashes(&k, behind, count)
                                          : program_keys_equals(&k, behind, count)))
        return -1;
    return axolotl ? program_yaml_of_axolotl(&k) : program_yaml_of_llamafactory(&k);
}

/* Sets p->tool from a name such as train_sft or train_ppo_ray; false if there is no such
   trainer. */
static bool program_trainer(program *p, const char *name, size_t length) {
    static const char *const generates[] = {"generate", "batch_inference" /* OpenRLHF's */};
    char wanted[32];
    for (int i = 0; i < 2; i++)
        if (strlen(generates[i]) == length && !strncmp(generates[i], name, length))
            return p->tool = generates[0], true;
    for (int i = 0; i < PROGRAM_TOOLS; i++)
        for (int ray = 0; ray < 1 + (i == PROGRAM_TOOLS - 1); ray++) {
            snprintf(wanted, sizeof wanted, "train_%s%s", program_tools[i], ray ? "_ray" : "");
            if (strlen(wanted) != length || strncmp(wanted, name, length)) continue;
            p->tool = program_tools[i];
            return true;
        }
    return false;
}

static int program_no_trainer(program *p, const char *word) {
    return demo_fail(
        p->error,
        "%.200s starts no known program; give one of train_sft, train_dpo, train_rm, "
        "train_kto, train_kd, train_prm, train_ppo, generate; seqpar --help lists the "
        "launchers that may come before it",
        word);
}

/* Reads the variables that llamafactory-cli passes to torchrun, unless another launcher
   precedes it. */
static int program_launch_of_environment(program *p) {
    static const char *const names[] = {"NNODES", "NPROC_PER_NODE"};
    int64_t *const counts[] = {&p->launch.nodes, &p->launch.per_node};
    const char *started = p->launch.launcher;
    for (int i = 0; i < 2 && !strcmp(started, "llamafactory-cli"); i++) {
        const char *text = getenv(names[i]);
        if (text && *text && program_count(p, names[i], text, counts[i])) return -1;
    }
    return 0;
}

/* Reads the yaml file after axolotl.cli.train, llamafactory-cli train and the like. */
static int program_yaml_behind(program *p, int from, const char *word, bool verb) {
    int at = verb;
    if (verb && arrlen(p->options) && strcmp(p->options[0], "train"))
        return demo_fail(p->error,
                         "%.100s %.100s is not supported, only train is; give %.100s train "
                         "FILE.yaml",
                         word, p->options[0], word);
    if (!p->launch.launcher) p->launch.launcher = word;
    if (from == DEMO_FROM_LLAMAFACTORY && program_launch_of_environment(p)) return -1;
    if (at < arrlen(p->options) && program_is_yaml(p->options[at]))
        return program_yaml(p, from, at);
    return demo_fail(p->error, "%.200s needs a .yaml file; name one%s", word,
                     at < arrlen(p->options) ? " before all options" : "");
}

static int program_module(program *p, const char *word) {
    static const char openrlhf[] = "openrlhf.cli.";
    size_t skip = sizeof openrlhf - 1;
    if (!strcmp(word, "axolotl.cli.train"))
        return program_yaml_behind(p, DEMO_FROM_AXOLOTL, word, false);
    p->from = DEMO_FROM_OPENRLHF;
    if (strncmp(word, openrlhf, skip) || !program_trainer(p, word + skip, strlen(word + skip)))
        return program_no_trainer(p, word);
    return 0;
}

/* Handles a script: LLaMA-Factory's src/train.py takes options or a yaml file. */
static int program_script(program *p, const char *word) {
    const char *name = program_base(word);
    if (!strcmp(name, "train.py") || !strcmp(name, "train_bash.py"))
        return arrlen(p->options) && program_is_yaml(p->options[0])
                   ? program_yaml(p, DEMO_FROM_LLAMAFACTORY, 0)
                   : program_stage(p);
    p->from = DEMO_FROM_OPENRLHF;
    return program_trainer(p, name, strlen(name) - 3) ? 0 : program_no_trainer(p, word);
}

/* Sets tool and from by the word after the launchers. p->options must already be filled. */
static int program_target(program *p, const char *word, bool module) {
    size_t length = strlen(word);
    if (module) return program_module(p, word);
    if (length > 3 && !strcmp(word + length - 3, ".py")) return program_script(p, word);
    if (!strcmp(word, "llamafactory-cli"))
        return program_yaml_behind(p, DEMO_FROM_LLAMAFACTORY, word, true);
    if (!strcmp(word, "axolotl")) return program_yaml_behind(p, DEMO_FROM_AXOLOTL, word, true);
    return program_trainer(p, word, length) ? 0 : program_no_trainer(p, word);
}

#endif
