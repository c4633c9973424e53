/* SPDX-License-Identifier: MIT OR Unlicense */
/* options.h - one table of options: parsing, help and every message come from it. */
#ifndef ORACLE_OPTIONS_H
#define ORACLE_OPTIONS_H
#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "seqpar.h"
#include "trainer/base/escape.h"

typedef enum option_kind {
    OPTION_FLAG,   /* int */
    OPTION_SIZE,   /* int64_t, at least 1 */
    OPTION_NUMBER, /* double; nan and inf, too */
    OPTION_LIST,   /* option_list: numbers with commas between */
    OPTION_TEXT,   /* const char * */
    OPTION_WORD,   /* const char *, one of the option's words */
    OPTION_NAME    /* const char *: a positional argument */
} option_kind;

typedef struct option_list {
    double *values; /* the caller's array of `most` */
    int64_t most, count;
} option_list;

typedef struct option {
    const char *verb, *name, *value; /* value: its name in help, such as FILE */
    option_kind kind;
    void *to;
    const char *help;
    int given;
    /* Ends with NULL. OPTION_WORD accepts only these words. For other kinds a shell offers
       the words, but other values are accepted, too. */
    const char *const *words;
} option;

/* The user's text, escaped to be shown in one line of a terminal. Two buffers alternate:
   a text is valid until the second next call. */
static inline const char *option_shown(const char *text) {
    static char shown[2][64];
    static int turn;
    turn = !turn;
    return demo_escape(shown[turn], sizeof shown[turn], text);
}

/* Parses a number. end: gets what follows the number; NULL: nothing may follow. 0, or -1. */
static inline int option_number(const char *text, double *x, const char **end) {
    char *rest;
    errno = 0;
    *x = strtod(text, &rest);
    if (rest == text || (!end && *rest)) return -1;
    if (end) *end = rest;
    return errno == ERANGE && isinf(*x) ? -1 : 0;
}

/* Parses numbers with commas between. 0, or -1 with *at where the text is wrong. */
static inline int option_list_read(option_list *list, const char *text, const char **at) {
    for (list->count = 0; list->count < list->most; text++) {
        *at = text;
        if (option_number(text, &list->values[list->count], &text)) return -1;
        if (!isfinite(list->values[list->count++])) return -1;
        if (!*text) return 0;
        if (*text != ',') return -1;
    }
    return -1;
}

/* "a, b or c" */
static inline void option_words(const option *o, char *text, size_t size) {
    size_t used = 0;
    *text = 0;
    for (int i = 0; o->words[i] && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s",
                                 !i                ? ""
                                 : o->words[i + 1] ? ", "
                                                   : " or ",
                                 o->words[i]);
}

/* The option's text in help; of OPTION_WORD, with the words that it accepts. */
static inline void option_text(const option *o, char *text, size_t size) {
    char words[300] = "";
    if (o->kind == OPTION_WORD) option_words(o, words, sizeof words);
    snprintf(text, size, "%s%s%s", o->help, *words ? ": " : "", words);
}

static inline int option_set_word(option *o, const char *text) {
    char words[300];
    for (int i = 0; o->words[i]; i++)
        if (!strcmp(o->words[i], text)) {
            *(const char **)o->to = text;
            return 0;
        }
    option_words(o, words, sizeof words);
    fprintf(stderr, "error: --%s is '%s'; give %s\n", o->name, option_shown(text), words);
    return -1;
}

/* Parses an option's value by its kind. 0, or -1 with one sentence on stderr. */
static inline int option_set(option *o, const char *text) {
    const char *at = text;
    double x;
    o->given = 1;
    if (o->kind == OPTION_NAME || o->kind == OPTION_TEXT) {
        *(const char **)o->to = text;
        return 0;
    }
    if (o->kind == OPTION_WORD) return option_set_word(o, text);
    if (o->kind == OPTION_NUMBER && !option_number(text, (double *)o->to, NULL)) return 0;
    if (o->kind == OPTION_SIZE && !option_number(text, &x, NULL) && x >= 1 && x <= 1e9 &&
        x == floor(x)) {
        *(int64_t *)o->to = (int64_t)x;
        return 0;
    }
    if (o->kind == OPTION_LIST && !option_list_read((option_list *)o->to, text, &at)) return 0;
    if (o->kind == OPTION_LIST)
        fprintf(stderr,
                "error: --%s is '%s', wrong from '%s' on; give 1 to %lld numbers "
                "with commas between\n",
                o->name, option_shown(text), option_shown(at),
                (long long)((option_list *)o->to)->most);
    else
        fprintf(stderr, "error: --%s is '%s'; give %s\n", o->name, option_shown(text),
                o->kind == OPTION_SIZE ? "a whole number from 1 to 1000000000" : "a number");
    return -1;
}

static inline option *option_named(option *options, int count, const char *verb,
                                   const char *text) {
    for (int i = 0; i < count; i++) {
        int fits = !strcmp(options[i].verb, verb) || !*options[i].verb;
        if (fits && !strncmp(text, "--", 2) && !strcmp(options[i].name, text + 2))
            return &options[i];
        if (fits && options[i].kind == OPTION_NAME && *text != '-' && !options[i].given)
            return &options[i];
    }
    return NULL;
}

/* For a surplus positional argument: the option whose value it may be, or NULL. It is one whose
   value has in help the name of a positional argument of the verb, as --want DUMP. */
static inline const option *option_meant(const option *options, int count, const char *verb,
                                         const char *text) {
    for (int i = 0; *text != '-' && i < count; i++)
        for (int n = 0; options[i].kind == OPTION_NAME && n < count; n++)
            if (!strcmp(options[i].verb, verb) && !strcmp(options[n].verb, verb) &&
                !strcmp(options[n].value, options[i].name))
                return &options[n];
    return NULL;
}

/* Whether one edit makes b of a: a character added, removed or replaced, or two neighbours
   swapped. */
static inline int words_alike(const char *a, const char *b) {
    size_t same = 0, la = strlen(a), lb = strlen(b);
    while (a[same] && a[same] == b[same]) same++;
    a += same, b += same, la -= same, lb -= same;
    return (la == lb && la > 0 && !strcmp(a + 1, b + 1)) ||
           (la == lb + 1 && !strcmp(a + 1, b)) || (lb == la + 1 && !strcmp(a, b + 1)) ||
           (la == lb && la > 1 && a[0] == b[1] && a[1] == b[0] && !strcmp(a + 2, b + 2));
}

/* The name of the option that an unknown word may mean; NULL: no name is alike. */
static inline const char *option_alike(const option *options, int count, const char *verb,
                                       const char *text) {
    if (words_alike("--help", text)) return "help";
    for (int i = 0; i < count && !strncmp(text, "--", 2); i++)
        if ((!strcmp(options[i].verb, verb) || !*options[i].verb) &&
            options[i].kind != OPTION_NAME && words_alike(options[i].name, text + 2))
            return options[i].name;
    return NULL;
}

static inline void options_refuse(const option *options, int count, const char *verb,
                                  const char *text) {
    const option *meant = option_meant(options, count, verb, text);
    const char *alike = option_alike(options, count, verb, text);
    fprintf(stderr, "error: what is '%s'? ", option_shown(text));
    if (alike) fprintf(stderr, "Did you mean --%s? ", alike);
    if (meant) fprintf(stderr, "Put --%s before it if it is %s; ", meant->name, meant->help);
    fprintf(stderr, "seqpar-verify %s --help lists options\n", verb);
}

/* 0, 1 where help is asked for, or -1 with one sentence on stderr. */
static inline int options_read(option *options, int count, const char *verb, int argc,
                               char **argv) {
    for (int i = 0; i < argc; i++) {
        option *o = option_named(options, count, verb, argv[i]);
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return 1;
        if (!o) {
            options_refuse(options, count, verb, argv[i]);
            return -1;
        }
        if (o->kind == OPTION_FLAG) {
            *(int *)o->to = o->given = 1;
        } else if (o->kind == OPTION_NAME) {
            option_set(o, argv[i]);
        } else if (i + 1 == argc) {
            fprintf(stderr, "error: --%s lacks its value, %s\n", o->name, o->value);
            return -1;
        } else if (option_set(o, argv[++i])) {
            return -1;
        }
    }
    return 0;
}

static inline void options_help(const option *options, int count, const char *verb) {
    for (int i = 0; i < count; i++) {
        char text[64], help[400];
        if (*options[i].verb && strcmp(options[i].verb, verb)) continue;
        option_text(&options[i], help, sizeof help);
        snprintf(text, sizeof text, "%s%s %s", options[i].kind == OPTION_NAME ? "" : "--",
                 options[i].name, options[i].value);
        printf("    %-26s %s\n", text, help);
    }
}
#endif
