/* SPDX-License-Identifier: MIT OR Unlicense */
/* program.h - the state of the program seqpar: the words of the command, the trainer that it
 * starts, and the trainer's options. Its memory is never freed, because in the end the trainer
 * replaces this program in its process. */
#ifndef PROGRAM_H
#define PROGRAM_H

#include <limits.h>
#include <unistd.h>
#include "trainer/base/escape.h"
#include "trainer/base/files.h"
#include "trainer/base/memory.h"
#include "trainer/run/options.h"
#include "trainer/base/shell.h"

typedef struct {
    const char *name;
    int64_t slots;
} program_host;

/* The number of ranks, as the launcher's options give it; 0: not given. */
typedef struct {
    const char *launcher; /* NULL: there is none */
    const char *hostfile, *include;
    int64_t nodes, per_node, processes;
    bool bf16; /* the launcher's --mixed_precision */
} program_launch;

/* The origin of an option: a line of a file, or line 0 for words after the file on the command
   line. */
typedef struct {
    const char *name, *path;
    int line;
} program_origin;

/* An error message and the line of the yaml file that it is about; INT_MAX: no line. */
typedef struct {
    char *text;
    int line;
} program_complaint;

typedef struct {
    char **words; /* words of the command; words[at] is the next one */
    int count, at;
    const char *tool;        /* the trainer, as in options.tsv: "sft", ... */
    int from;                /* the program whose command it is: DEMO_FROM_.. */
    char **options;          /* the trainer's options, stb_ds array */
    program_origin *origins; /* origins of options from a file; stb_ds array */
    program_launch launch;
    program_host *hosts;  /* hosts of the hostfile, stb_ds array */
    int64_t nodes, ranks; /* 0: not given */
    const char *cache_dir, *local_names;
    bool local, print_command;
    const char *file, *pad; /* the yaml file, and its pad_token; NULL: there is none */
    int pad_line;
    program_complaint *complaints; /* stb_ds array: the errors so far */
    const char **wrong;            /* options that have been refused */
    char folder[PATH_MAX];         /* folder of this program and the trainers */
    demo_error *error;
} program;

__attribute__((format(printf, 1, 2))) static inline char *program_text(const char *format,
                                                                       ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int64_t length = vsnprintf(NULL, 0, format, arguments);
    char *text = (char *)demo_alloc(length + 1, 1);
    vsnprintf(text, (size_t)length + 1, format, again);
    va_end(again);
    va_end(arguments);
    return text;
}

static inline const char *program_base(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* The path of a trainer's executable. kind: "", "cuda_" or "mpi_". */
static inline char *program_binary(const program *p, const char *kind, const char *tool) {
    return program_text("%s/%s%s%s", p->folder, kind, strcmp(tool, "generate") ? "train_" : "",
                        tool);
}

/* Does the run need several hosts? This program cannot start ranks on other hosts. */
static inline bool program_is_elsewhere(const program *p) { return p->nodes > 1 && !p->local; }

/* ---- the trainer's options ---- */

/* The option that a word names; NULL if the word is no option, or one that the trainer will
   refuse. */
static inline const demo_known *program_known(const char *word) {
    char name[DEMO_NAME_LIMIT];
    if (strncmp(word, "--", 2)) return NULL;
    snprintf(name, sizeof name, "%.*s", (int)strcspn(word + 2, "="), word + 2);
    const demo_known *known = demo_known_find(name);
    return known ? demo_known_target(known) : NULL;
}

/* The position of option i's value: in p->options[word], from byte `behind` on. */
typedef struct {
    int word; /* -1: the option has no value */
    int behind;
} program_value;

static inline program_value program_value_of(const program *p, int i) {
    const char *equals = strchr(p->options[i], '=');
    if (equals) return (program_value){i, (int)(equals + 1 - p->options[i])};
    bool follows = i + 1 < arrlen(p->options) && strncmp(p->options[i + 1], "--", 2);
    return (program_value){follows ? i + 1 : -1, 0};
}

/* The index of the last occurrence of an option under any of its names; -1: none. */
static inline int program_find(const program *p, const char *name) {
    int last = -1;
    for (int i = 0; i < arrlen(p->options); i++) {
        const demo_known *known = program_known(p->options[i]);
        if (known && !strcmp(known->name, name)) last = i;
    }
    return last;
}

/* The value of an option; NULL if it has none. */
static inline const char *program_given(const program *p, const char *name) {
    int i = program_find(p, name);
    program_value at = i < 0 ? (program_value){-1, 0} : program_value_of(p, i);
    return at.word < 0 ? NULL : p->options[at.word] + at.behind;
}

static inline void program_replace(program *p, program_value at, const char *text) {
    char *word = p->options[at.word];
    p->options[at.word] = program_text("%.*s%s", at.behind, word, text);
}

static inline void program_add(program *p, const char *name, const char *value) {
    arrput(p->options, program_text("--%s", name));
    if (value) arrput(p->options, program_text("%s", value));
}

static inline void program_drop(program *p, int i) {
    program_value at = program_value_of(p, i);
    arrdeln(p->options, i, at.word > i ? 2 : 1);
}

/* The origin of the last occurrence of an option; NULL if no file is involved. */
static inline const program_origin *program_origin_of(const program *p, const char *name) {
    for (int64_t i = arrlen(p->origins) - 1; i >= 0; i--)
        if (demo_same_name(p->origins[i].name, name)) return &p->origins[i];
    return NULL;
}

/* Prefixes an error about an option from a file with "x.yaml:7: ", and removes the option's
   dashes. Returns -1. */
static inline int program_error_placed(program *p) {
    char name[DEMO_NAME_LIMIT];
    const char *text = p->error->text;
    size_t dashes = !strncmp(text, "--", 2) ? 2 : 0, length = strcspn(text + dashes, " :=;,");
    snprintf(name, sizeof name, "%.*s", (int)length, text + dashes);
    const program_origin *origin = dashes ? program_origin_of(p, name) : NULL;
    if (!origin) return -1;
    char *sentence = program_text("%s", text + dashes);
    if (origin->line)
        demo_fail(p->error, "%.300s:%d: %s", origin->path, origin->line, sentence);
    else
        demo_fail(p->error, "behind %.300s: %s", origin->path, sentence);
    free(sentence);
    return -1;
}

/* ---- all errors are reported at once ---- */

/* Records an error message whose control characters are already escaped. */
static inline void program_complain_as(program *p, const char *text) {
    size_t length = p->file ? strlen(p->file) : 0;
    bool placed = p->file && !strncmp(text, p->file, length) && text[length] == ':';
    program_complaint one = {program_text("%s", text),
                             placed ? atoi(text + length + 1) : INT_MAX};
    arrput(p->complaints, one);
}

/* Records the current error and clears it, so that checking continues. option: the option that
   the error is about, or NULL. */
static inline void program_complain(program *p, const char *option) {
    static char shown[4 * sizeof(demo_error)];
    program_complain_as(p, demo_escape(shown, sizeof shown, p->error->text));
    if (option) arrput(p->wrong, option);
    p->error->text[0] = 0;
}

/* Does this message of the trainer name an option that has been refused? The trainer did not
   get the value of that option, so its message may be wrong. */
static inline bool program_is_hanging(const program *p, const char *sentence) {
    for (int64_t i = 0; i < arrlen(p->wrong); i++) {
        const demo_known *known = demo_known_find(p->wrong[i]);
        char *names[] = {
            program_text("--%s", p->wrong[i]),
            program_text("--%s", known ? demo_known_target(known)->name : p->wrong[i])};
        bool named = strstr(sentence, names[0]) || strstr(sentence, names[1]);
        free(names[0]), free(names[1]);
        if (named) return true;
    }
    return false;
}

/* Prints the errors sorted by line; errors without a line come last. */
static inline void program_complaints_say(program *p) {
    program_complaint *all = p->complaints;
    for (int64_t i = 0; i < arrlen(all); i++) {
        int64_t k = i;
        program_complaint one = all[i];
        for (; k > 0 && all[k - 1].line > one.line; k--) all[k] = all[k - 1];
        all[k] = one;
    }
    for (int64_t i = 0; i < arrlen(all); i++) fprintf(stderr, "error: %s\n", all[i].text);
}

/* Parses a number of ranks, hosts or slots. 0, or -1 with a message. */
static inline int program_count(program *p, const char *what, const char *text,
                                int64_t *value) {
    if (demo_read_int(text, value) && *value > 0 && *value <= SEQPAR_MAX_RANKS) return 0;
    return demo_fail(p->error, "%s is %.60s; give a whole number from 1 to %lld", what,
                     *text ? text : "empty", (long long)SEQPAR_MAX_RANKS);
}

#endif
