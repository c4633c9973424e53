/* SPDX-License-Identifier: MIT OR Unlicense */
/* mutants.h - plants each mistake in a generated dump and checks whether the oracle names it
 * and whether the caller's own test detects it. */
#ifndef ORACLE_MUTANTS_H
#define ORACLE_MUTANTS_H
#include <unistd.h>
#include "synthetic.h"

typedef struct mutant {
    const char *name, *objective; /* name "": no mistake, a right step */
    verdict_kind kind;
    int named, among; /* named: the verdict names it; among: how many the verdict names */
    int skipped;      /* it cannot be planted with these sizes */
    int seen;         /* 1: the caller's command fails on it, 0: it passes, -1: not run */
    char other[64];   /* if not named: the first mistake that the verdict names */
} mutant;

/* Inputs of the verb `mutants`. */
typedef struct mutants_desc {
    const char *command; /* NULL: none */
    made_desc make;
    /* 0, or an exit code with a sentence on stderr */
    int (*judge)(const char *folder, const char *model, verdict *v);
} mutants_desc;

/* Whether the caller's test, run as `command WANT GOT`, finds a difference: it ends with an
   exit code other than 0. */
static inline int command_fails(const char *command, const char *folder) {
    char line[4096];
    int n = snprintf(line, sizeof line, "%s '%s/want' '%s/got' >/dev/null 2>&1", command,
                     folder, folder);
    return n >= (int)sizeof line || system(line) != 0;
}

static inline void mutant_read(mutant *m, const verdict *v) {
    m->kind = v->kind;
    m->among = v->count;
    for (int i = 0; i < v->count; i++) m->named |= !strcmp(v->named[i]->name, m->name);
    if (v->count && !m->named) snprintf(m->other, sizeof m->other, "%s", v->named[0]->name);
}

/* Generates a dump with the mistake in a temporary folder, judges it and runs the caller's
   command on it. 0, or an exit code with a sentence on stderr. */
static inline int mutant_run(mutant *m, const mutants_desc *desc) {
    char folder[] = "/tmp/seqpar-mutant-XXXXXX", out[64], got[64], model[64];
    made_desc make = desc->make;
    seqpar_error error = {0};
    verdict v;
    int status;
    if (!mkdtemp(folder)) {
        fprintf(stderr, "error: no folder in /tmp: %s\n", strerror(errno));
        return VERDICT_FILE;
    }
    snprintf(out, sizeof out, "%s/case", folder);
    snprintf(got, sizeof got, "%s/got", out);
    snprintf(model, sizeof model, "%s/model", out);
    make.out = out;
    make.objective = m->objective;
    make.mistake = *m->name ? m->name : NULL;
    status = made_make(&make, &error) ? VERDICT_FILE : 0;
    if (status) bar_wipe();
    m->skipped = error.status == SEQPAR_ERR_OPTION;
    if (status && !m->skipped) fprintf(stderr, "error: %s\n", error.text);
    if (!status) status = desc->judge(got, model, &v);
    if (!status) mutant_read(m, &v);
    m->seen = !status && desc->command ? command_fails(desc->command, out) : -1;
    remove_folder(folder);
    return m->skipped ? 0 : status;
}

static inline int can_be_planted(const char *objective, const char *name) {
    dump d = {.world = 1};
    made_plant plant;
    d.facts.objective = !strcmp(objective, "dpo") ? DUMP_DPO : DUMP_SFT;
    return !made_plant_find(&plant, &d, name, &d.error);
}

/* Whether the verdict is as expected: a mistake is named, a right step passes. */
static inline int mutant_is_well(const mutant *m) {
    return *m->name ? m->kind == VERDICT_WRONG && m->named
                    : m->kind == VERDICT_RIGHT && !m->among;
}
#endif
