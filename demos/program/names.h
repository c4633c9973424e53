/* SPDX-License-Identifier: MIT OR Unlicense */
/* names.h - replaces names of data sets and models on a hub by local paths. A file lists them,
 * one name, tab and path a line. Nothing is downloaded. */
#ifndef PROGRAM_NAMES_H
#define PROGRAM_NAMES_H

#include "program.h"

/* Options whose values are paths, most of them comma lists. */
static const char *const program_named[] = {
    "pretrain", "ref_pretrain", "reward_pretrain", "critic_pretrain",
    "dataset",  "eval_dataset", "prompt_data",     "pretrain_data"};
enum { PROGRAM_NAMED = (int)(sizeof program_named / sizeof *program_named) };

typedef struct {
    char *name, *path;
    int line;
} program_local;

typedef struct {
    const char *file;
    program_local *local; /* stb_ds array */
} program_names;

static const char *program_name_path(const program_names *n, const char *name) {
    for (int64_t i = 0; i < arrlen(n->local); i++)
        if (!strcmp(n->local[i].name, name)) return n->local[i].path;
    return NULL;
}

/* Parses one line of the file and adds its name and path to n->local. */
static int program_name_line(program *p, program_names *n, int line, char *text) {
    char *tab = strchr(text, '\t');
    text[strcspn(text, "\r")] = 0;
    if (!*text || *text == '#') return 0;
    if (!tab || tab == text || !tab[1] || strchr(tab + 1, '\t'))
        return demo_fail(p->error,
                         "%.300s:%d is '%.200s'; write a name, one tab and a path, or # before "
                         "a comment",
                         n->file, line, text);
    *tab = 0;
    if (program_name_path(n, text))
        return demo_fail(p->error, "%.300s:%d: %.200s occurs twice; leave one line out",
                         n->file, line, text);
    arrput(n->local, ((program_local){text, tab + 1, line}));
    return 0;
}

/* The default file may be missing; a file given by --local_names may not. */
static int program_names_read(program *p, program_names *n) {
    const char *why = NULL;
    size_t size;
    int line = 0;
    n->file = p->local_names ? p->local_names : "names.tsv";
    if (!p->local_names && access(n->file, F_OK)) return 0;
    /* not freed: n->local points into it */
    char *bytes = demo_read_whole(n->file, 1 << 24, &size, &why);
    if (!bytes)
        return demo_fail(p->error,
                         "--local_names %.300s: %s; give a file of lines: name, tab, path",
                         n->file, why);
    for (char *at = bytes, *next; at; at = next) {
        next = strchr(at, '\n');
        if (next) *next++ = 0;
        if (program_name_line(p, n, ++line, at)) return -1;
    }
    return 0;
}

/* Does the file or folder exist? Accepts the form json@FOLDER. */
static bool program_is_here(const char *name) {
    const char *at = strchr(name, '@');
    return !access(name, F_OK) || (at && at[1] && !access(at + 1, F_OK));
}

/* Is it a path rather than a name on a hub, ORGANISATION/NAME? */
static bool program_is_path(const char *name) {
    size_t slash = strcspn(name, "/");
    bool rooted = strchr("/.~", *name) != NULL,
         deep = name[slash] && strchr(name + slash + 1, '/');
    char *folder = program_text("%.*s", (int)slash, name);
    bool here = name[slash] && !access(folder, F_OK);
    free(folder);
    return rooted || deep || here;
}

static void program_name_missing(program *p, const program_names *n, const char *option,
                                 const char *name) {
    if (program_is_path(name))
        demo_fail(p->error, "--%s %.300s: there is no such file or folder%s; correct the path",
                  option, name, *name == '~' ? " (the shell did not replace ~)" : "");
    else
        demo_fail(p->error,
                  "--%s %.300s is not a file or folder here, and nothing is downloaded; give "
                  "a path, or type printf '%.300s\\t/path/on/this/machine\\n' >>%.300s to "
                  "say where it is",
                  option, name, name, n->file);
}

/* The path of one name; NULL with a message. */
static const char *program_name_found(program *p, const program_names *n, const char *option,
                                      const char *name) {
    if (!*name || program_is_here(name)) return name;
    const char *path = program_name_path(n, name);
    if (path && program_is_here(path)) return path;
    if (path)
        demo_fail(p->error,
                  "%.300s says that %.300s is at %.300s, which does not exist; correct the "
                  "path",
                  n->file, name, path);
    else
        program_name_missing(p, n, option, name);
    return NULL;
}

/* Replaces the names in the value of one option by paths. -1 with a message if one has no
   path. */
static int program_names_of(program *p, const program_names *n, int i, const char *option) {
    program_value at = program_value_of(p, i);
    char *paths = NULL;
    if (at.word < 0) return 0; /* no value: the trainer reports it */
    for (const char *name = p->options[at.word] + at.behind;; name++) {
        int length = (int)strcspn(name, ",");
        char *one = program_text("%.*s", length, name);
        const char *found = program_name_found(p, n, option, one);
        if (!found) return -1;
        paths = program_text("%s%s%s", paths ? paths : "", paths ? "," : "", found);
        name += length;
        if (!*name) break;
    }
    program_replace(p, at, paths);
    return 0;
}

/* Is it an option whose value is a path, or a name on a hub? */
static bool program_is_named(const char *word) {
    const demo_known *known = program_known(word);
    for (int k = 0; known && k < PROGRAM_NAMED; k++)
        if (!strcmp(known->name, program_named[k])) return true;
    return false;
}

static int program_names_replace(program *p) {
    program_names names = {0};
    if (program_names_read(p, &names)) return -1;
    for (int i = 0; i < arrlen(p->options); i++) {
        if (!program_is_named(p->options[i])) continue;
        const char *option = program_known(p->options[i])->name;
        if (!program_names_of(p, &names, i, option)) continue;
        program_complain(p, option);
        program_drop(p, i--);
    }
    return 0;
}

#endif
