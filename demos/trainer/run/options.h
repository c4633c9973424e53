/* SPDX-License-Identifier: MIT OR Unlicense */
/* options.h - the command line of the trainers, driven by two tables.
 *
 * options.tsv lists every name that a user of OpenRLHF, 360-LLaMA-Factory or axolotl may type:
 * names that this project acts on, other spellings of those, names that change no weight, text
 * or metric (accepted, with a notice), and names of what this project does not implement
 * (refused). A trainer adds its own table, which binds names of the first kind to variables,
 * with default and help. Parsing, --help and all messages use the same two tables, so that they
 * cannot disagree.
 *
 *     static const demo_binding bindings[] = {
 *         {"max_len", &config.max_len, DEMO_INT, "2048", "longest document, in tokens", DEMO_AT_LEAST(1)}, ...};
 *     demo_options options = {.tool = "sft", .bindings = bindings, .binding_count = ...};
 *     if (demo_options_parse(&options, argc, argv, &error)) ... one sentence in error.text
 *     else if (options.help_wanted) demo_options_help(&options, stdout);
 *     else demo_options_print_ignored(&options, stderr);
 *
 * String variables point into argv, into the tables or into the demo_options, which therefore
 * has to outlive them. options.awk makes options.inc, which must be on the include path. */
#ifndef DEMO_OPTIONS_H
#define DEMO_OPTIONS_H

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "trainer/base/error.h"
#include "trainer/base/lists.h"
#include "seqpar.h"

/* One line of options.tsv. kind: flag, int, float, string, floats2 (two numbers), strings (any
 * number of words), optional (a flag to some tools, a word to others), choice:A=SYNONYM,B,C or
 * choice:@TABLE (SEQPAR_LAYOUTS and the like). role:
 *
 *   real            acted on: bound to a variable
 *   alias:TARGET    another spelling
 *   noeffect        accepted, with a notice: it changes no weight, text or metric
 *   refused:A,B     not implemented; the values A and B are accepted, since they do not need it
 *                   (@tool: the tool's name)
 *   prepared        done by demos/prepare.py; compared with what the token file says
 *
 * there: what it changes in the program that it comes from: weights, text, metrics, files,
 * speed, shown (what is printed), vision (only models with a vision tower) or always (what this
 * project always does).
 *
 * A new option: a line of options.tsv, a field of demo_config with its binding in
 * DEMO_SHARED_BINDINGS (config.h) or in those of one trainer (DEMO_SFT_BINDINGS in
 * objective/sft.h). If a resumed run may change it without a notice: demo_free_options in run.h.
 * If it changes weights: a test in test_absolute.c, or a line of absolute.tsv with the reason. */
#define DEMO_WORD(name, text, ...) text ","
typedef struct {
    const char *name, *kind, *role, *tools, *source, *there, *note;
} demo_known;

static const demo_known demo_known_options[] = {
#include "options.inc"
};

enum {
    DEMO_KNOWN_COUNT = (int)(sizeof demo_known_options / sizeof demo_known_options[0]),
    DEMO_NAME_LIMIT = 96
};

/* Type of the bound variable: bool, int64_t, double, const char *, double[2]. Choices and lists
   of words are strings. */
typedef enum { DEMO_FLAG, DEMO_INT, DEMO_FLOAT, DEMO_STRING, DEMO_FLOATS2 } demo_type;

typedef struct {
    double low, high; /* low == high: any value is allowed */
    bool open;        /* low itself is not allowed */
} demo_range;
#define DEMO_ANY \
    { 0, 0, false }
#define DEMO_AT_LEAST(low) \
    { (low), HUGE_VAL, false }
#define DEMO_ABOVE(low) \
    { (low), HUGE_VAL, true }
#define DEMO_BETWEEN(low, high) \
    { (low), (high), false }
#define DEMO_MOST \
    2147483647.0 /* the highest count: lengths, positions and ids have 32 bits, and the \
                    product of two such counts fits 64 bits */
#define DEMO_COUNT(low) \
    { (low), DEMO_MOST, false }

typedef struct {
    const char *name;
    void *variable;
    demo_type type;
    /* the default, as the user would type it; NULL leaves false, 0 or NULL */
    const char *fallback;
    const char *help;
    /* range of values that the user may type; the default may lie outside, such as -1 for
       "never" */
    demo_range range;
} demo_binding;

typedef struct {
    const char *tool; /* sft, dpo, ...: options of other tools are refused */
    const demo_binding *bindings;
    int binding_count;
    /* the fields below are filled by demo_options_parse */
    const char *program;
    bool help_wanted;
    /* for each entry of options.tsv: the position of the option on the command line, from 1,
       and its value; for an option that was typed several times, those of the last. 0 and NULL:
       not typed */
    int typed[DEMO_KNOWN_COUNT], typed_count;
    const char *text[DEMO_KNOWN_COUNT];
    /* an earlier value under the same name, which is ignored */
    const char *before[DEMO_KNOWN_COUNT];
    bool refused[DEMO_KNOWN_COUNT]; /* an error was reported for this option */
    /* memory for values that are not a word of argv: "0.9,0.95" for 0.9 0.95, or the choice
       that a synonym stands for */
    char pool[8192];
    size_t pool_used;
    demo_error *error;
} demo_options;

__attribute__((format(printf, 2, 3))) static inline int demo_refuse(demo_options *options,
                                                                    const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    options->error->text[0] = 0;
    demo_fail_more(options->error, format, arguments);
    va_end(arguments);
    return -1;
}

/* Copies the text into the pool; NULL if the pool is full. */
static inline char *demo_options_copy(demo_options *options, const char *text, size_t length) {
    if (length >= sizeof options->pool - options->pool_used) return NULL;
    char *copy = (char *)memcpy(options->pool + options->pool_used, text, length);
    copy[length] = 0;
    options->pool_used += length + 1;
    return copy;
}

/* ---- names ---- */

static inline bool demo_same_letter(char a, char b) {
    return (a == '_' ? '-' : a) == (b == '_' ? '-' : b);
}

static inline bool demo_same_name(const char *a, const char *b) {
    for (; *a && *b; a++, b++)
        if (!demo_same_letter(*a, *b)) return false;
    return *a == *b;
}

static inline const demo_known *demo_known_find(const char *name) {
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++)
        if (demo_same_name(demo_known_options[i].name, name)) return &demo_known_options[i];
    return NULL;
}

/* The entry that decides what a name does: the target of an alias, else the entry itself. */
static inline const demo_known *demo_known_target(const demo_known *known) {
    return strncmp(known->role, "alias:", 6) ? known : demo_known_find(known->role + 6);
}

static inline const demo_binding *demo_binding_find(const demo_options *options,
                                                    const char *name) {
    for (int i = 0; i < options->binding_count; i++)
        if (demo_same_name(options->bindings[i].name, name)) return &options->bindings[i];
    return NULL;
}

/* Levenshtein distance, with a single row of the table in memory. '-' and '_' count as the same
   letter. */
static inline int demo_edit_distance(const char *a, const char *b) {
    int row[DEMO_NAME_LIMIT + 1], b_length = (int)strnlen(b, DEMO_NAME_LIMIT);
    for (int j = 0; j <= b_length; j++) row[j] = j;
    for (; *a; a++) {
        int diagonal = row[0]++;
        for (int j = 1; j <= b_length; j++) {
            int shorter = row[j] < row[j - 1] ? row[j] : row[j - 1];
            int replaced = diagonal + !demo_same_letter(*a, b[j - 1]);
            diagonal = row[j];
            row[j] = replaced < shorter + 1 ? replaced : shorter + 1;
        }
    }
    return row[b_length];
}

static inline const demo_known *demo_known_nearest(const char *name, const char *tool) {
    const demo_known *nearest = NULL;
    /* a larger distance than half the word is not a typing error */
    int best = 1 + (int)strlen(name) / 2;
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++) {
        int distance = demo_edit_distance(name, demo_known_options[i].name);
        if (distance >= best || !demo_list_has(demo_known_options[i].tools, tool)) continue;
        best = distance;
        nearest = &demo_known_options[i];
    }
    return nearest;
}

/* ---- values: from text to variables ---- */

static inline demo_type demo_type_of(const char *kind) {
    static const char *const kinds[] = {"flag", "int", "float", "string", "floats2"};
    for (int i = 0; i < 5; i++)
        if (!strcmp(kind, kinds[i])) return (demo_type)i;
    return DEMO_STRING; /* strings, optional and choices */
}

static inline int demo_truth(const char *text) /* 1, 0, or -1 for neither */
{
    static const char *const words[] = {"false", "true", "no", "yes", "off", "on", "0", "1"};
    for (int i = 0; i < 8; i++)
        if (!strcasecmp(text, words[i])) return i % 2;
    return -1;
}

static inline bool demo_in_range(demo_range range, double value) {
    if (range.low == range.high) return true;
    return (range.open ? value > range.low : value >= range.low) && value <= range.high;
}

static inline bool demo_read_int(const char *text, int64_t *value) {
    char *end;
    errno = 0;
    *value = strtoll(text, &end, 10);
    return !isspace((unsigned char)*text) && end != text && !*end && !errno;
}

static inline bool demo_read_float(const char *text, char stop, double *value) {
    char *end;
    *value = strtod(text, &end);
    return !isspace((unsigned char)*text) && end != text && *end == stop && isfinite(*value);
}

static inline bool demo_read_floats2(const char *text, double *pair) {
    const char *comma = strchr(text, ',');
    return comma && demo_read_float(text, ',', &pair[0]) &&
           demo_read_float(comma + 1, 0, &pair[1]);
}

/* Describes the values that this kind accepts, for messages: "a whole number of at least 1",
   "one of drop, cut". */
static inline const char *demo_wanted(char *text, size_t size, const char *kind,
                                      demo_range range) {
    static const char *const words[] = {"true or false", "a whole number", "a number", "text",
                                        "two numbers"},
                             *const finite[] = {"", "", "a finite number", "",
                                                "two finite numbers"};
    demo_type type = demo_type_of(kind);
    bool choice = !strncmp(kind, "choice:", 7),
         endless = range.low == range.high || range.high >= HUGE_VAL || range.low <= -HUGE_VAL;
    size_t used = (size_t)snprintf(text, size, "%s",
                                   choice                       ? "one of"
                                   : (endless && *finite[type]) ? finite[type]
                                                                : words[type]);
    for (const char *at = kind + 6; choice && at[0] && at[1] && used < size;
         at += strcspn(at, ",")) {
        const char *word = at + 1; /* after the colon or a comma */
        const char *before = *at == ':' ? " " : ", ";
        used += (size_t)snprintf(text + used, size - used, "%s%.*s", before,
                                 (int)strcspn(word, ",="), word);
        at = word;
    }
    if (choice || range.low == range.high) return text;
    if (range.low <= -HUGE_VAL)
        snprintf(text + used, size - used, " up to %.15g", range.high);
    else if (type == DEMO_INT && range.high >= HUGE_VAL)
        snprintf(text + used, size - used, " from %.15g to %lld", range.low,
                 (long long)INT64_MAX);
    else if (range.high < HUGE_VAL)
        snprintf(text + used, size - used,
                 range.open ? " above %.15g, up to %.15g" : " from %.15g to %.15g", range.low,
                 range.high);
    else
        snprintf(text + used, size - used, range.open ? " above %.15g" : " of at least %.15g",
                 range.low);
    return text;
}

/* Looks a word up in choices such as A=SYNONYM,B. Returns a copy of the choice, A or B; NULL if
   there is none. */
static inline const char *demo_choice_find(demo_options *options, const char *choices,
                                           const char *word) {
    size_t length = strlen(word);
    for (const char *group = choices; *group;
         group += strcspn(group, ","), group += *group == ',')
        for (const char *at = group;; at += strcspn(at, ",=") + 1) {
            size_t span = strcspn(at, ",=");
            if (span == length && !strncmp(at, word, span))
                return demo_options_copy(options, group, strcspn(group, ",="));
            if (at[span] != '=') break;
        }
    return NULL;
}

static inline bool demo_store_number(void *variable, demo_type type, const char *text,
                                     demo_range range) {
    int64_t whole = 0;
    double pair[2] = {0, 0};
    bool read = type == DEMO_INT     ? demo_read_int(text, &whole)
                : type == DEMO_FLOAT ? demo_read_float(text, 0, pair)
                                     : demo_read_floats2(text, pair);
    if (type == DEMO_INT) pair[0] = (double)whole;
    if (type != DEMO_FLOATS2) pair[1] = pair[0];
    if (!read || !demo_in_range(range, pair[0]) || !demo_in_range(range, pair[1])) return false;
    if (type == DEMO_INT)
        *(int64_t *)variable = whole;
    else
        memcpy(variable, pair, type == DEMO_FLOAT ? sizeof(double) : sizeof pair);
    return true;
}

static inline bool demo_store_word(demo_options *options, void *variable, const char *kind,
                                   const char *text) {
    if (!strcmp(kind, "flag")) {
        int truth = demo_truth(text);
        if (truth >= 0) *(bool *)variable = truth == 1;
        return truth >= 0;
    }
    bool choice = !strncmp(kind, "choice:", 7);
    const char *word = choice ? demo_choice_find(options, kind + 7, text) : text;
    if (word) *(const char **)variable = word;
    return word != NULL;
}

static inline int demo_store(demo_options *options, void *variable, const demo_known *typed,
                             const char *text, demo_range range) {
    char wanted[256];
    demo_type type = demo_type_of(typed->kind);
    bool stored = type == DEMO_FLAG || type == DEMO_STRING
                      ? demo_store_word(options, variable, typed->kind, text)
                      : demo_store_number(variable, type, text, range);
    if (stored) return 0;
    demo_wanted(wanted, sizeof wanted, typed->kind, range);
    return demo_refuse(options, "--%s is %s, but it must be %s", typed->name,
                       *text ? text : "empty", wanted);
}

/* ---- the walk over argv ---- */

typedef struct {
    char **words;
    int count, at;
} demo_walk;

/* Takes the next word if it is a value: -1 is a value, --seed is not. Else returns NULL. */
static inline const char *demo_walk_value(demo_walk *walk) {
    if (walk->at >= walk->count || !strncmp(walk->words[walk->at], "--", 2)) return NULL;
    return walk->words[walk->at++];
}

/* Is the word blank, or blanks followed by a comment? The shell passes such a word on if a
   blank follows the backslash at the end of a line. */
static inline bool demo_word_blank(const char *word) {
    size_t blanks = strspn(word, " \t\r\n");
    return blanks && (!word[blanks] || word[blanks] == '#');
}

/* Like demo_walk_value, for an option whose value may be missing. A comment is not a value. */
static inline const char *demo_walk_perhaps(demo_walk *walk) {
    const char *next = walk->at < walk->count ? walk->words[walk->at] : "";
    return *next == '#' || demo_word_blank(next) ? NULL : demo_walk_value(walk);
}

static inline const char *demo_walk_truth(demo_walk *walk) {
    bool present = walk->at < walk->count && demo_truth(walk->words[walk->at]) >= 0;
    return present ? walk->words[walk->at++] : "true";
}

/* Joins the words of one option: 0.9 0.95 becomes "0.9,0.95". */
static inline const char *demo_walk_join(demo_options *options, demo_walk *walk,
                                         const char *first, char glue, int limit) {
    char *joined = demo_options_copy(options, first, strlen(first));
    for (const char *word; joined && --limit > 0 && (word = demo_walk_value(walk));) {
        if (!demo_options_copy(options, word, strlen(word))) return NULL;
        /* strings are adjacent in the pool: this replaces the zero byte between them */
        joined[strlen(joined)] = glue;
    }
    return joined;
}

/* The value of one option as a single text, or NULL if it is missing. */
static inline const char *demo_walk_collect(demo_options *options, demo_walk *walk,
                                            const char *kind, const char *inlined) {
    if (!strcmp(kind, "flag")) return inlined ? inlined : demo_walk_truth(walk);
    bool optional = !strcmp(kind, "optional");
    const char *first = inlined    ? inlined
                        : optional ? demo_walk_perhaps(walk)
                                   : demo_walk_value(walk);
    if (optional) return first ? first : "true";
    if (first && !strcmp(kind, "floats2") && !strchr(first, ','))
        return demo_walk_join(options, walk, first, ',', 2);
    if (first && !inlined && !strcmp(kind, "strings"))
        return demo_walk_join(options, walk, first, ' ', INT_MAX);
    return first;
}

static inline int demo_options_missing(demo_options *options, const demo_walk *walk,
                                       const demo_known *typed) {
    char wanted[256];
    const char *next = walk->at < walk->count ? walk->words[walk->at] : "nothing";
    demo_wanted(wanted, sizeof wanted, typed->kind, (demo_range)DEMO_ANY);
    if (sizeof options->pool - options->pool_used < 256)
        return demo_refuse(options, "--%s has too many values; give fewer", typed->name);
    return demo_refuse(options, "--%s needs a value (%s), but %s follows", typed->name, wanted,
                       next);
}

static inline int demo_options_unknown(demo_options *options, const char *name) {
    const demo_known *nearest = demo_known_nearest(name, options->tool);
    if (!nearest) return demo_refuse(options, "unknown option --%s (--help lists all)", name);
    return demo_refuse(options, "unknown option --%s; did you mean --%s? (--help lists all)",
                       name, nearest->name);
}

/* Refuses an option that only other trainers have. The message names these trainers, and the
   equivalent option of this one. */
static inline int demo_options_elsewhere(demo_options *options, const demo_known *typed) {
    static const char *const here[] = {"sft", "dpo", "rm",  "kto",
                                       "kd",  "prm", "ppo", "generate"};
    static const char *const parts[][2] = {{"dataset", "prompt_data"},
                                           {"prompt_data", "dataset"},
                                           {"learning_rate", "actor_learning_rate"},
                                           {"actor_learning_rate", "learning_rate"},
                                           {"output_key", "label_key"}};
    char tools[64] = "", instead[DEMO_NAME_LIMIT + 16] = "";
    for (size_t i = 0; i < sizeof here / sizeof *here; i++)
        if (demo_list_has(typed->tools, here[i]))
            snprintf(tools + strlen(tools), sizeof tools - strlen(tools), "%s%s",
                     *tools ? "," : "", here[i]);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!strcmp(parts[i][0], demo_known_target(typed)->name) &&
            demo_binding_find(options, parts[i][1]))
            snprintf(instead, sizeof instead, ", give --%s", parts[i][1]);
    return demo_refuse(options, "--%s is an option of %s; this is %s%s", typed->name, tools,
                       options->tool, instead);
}

static inline bool demo_is_role(const demo_known *known, const char *role) {
    size_t length = strlen(role);
    return !strncmp(known->role, role, length) &&
           (!known->role[length] || known->role[length] == ':');
}

/* Are two values equal, even if they are written differently? */
static inline bool demo_same_value(const char *a, const char *b) {
    double x, y;
    if (!strcasecmp(a, b) || (demo_truth(a) >= 0 && demo_truth(a) == demo_truth(b)))
        return true;
    return demo_read_float(a, 0, &x) && demo_read_float(b, 0, &y) && !(x < y) && !(x > y);
}

/* Is this value of a refused option accepted, because it needs nothing that is missing here? */
static inline bool demo_asks_nothing(const demo_options *options, const demo_known *target,
                                     const char *text) {
    char word[DEMO_NAME_LIMIT];
    const char *at = strchr(target->role, ':');
    for (at = at ? at + 1 : ""; *at; at += strcspn(at, ","), at += *at == ',') {
        snprintf(word, sizeof word, "%.*s", (int)strcspn(at, ","), at);
        if (demo_same_value(!strcmp(word, "@tool") ? options->tool : word, text)) return true;
    }
    return false;
}

static inline int demo_options_undone(demo_options *options, const demo_known *typed,
                                      const demo_known *target, const char *text) {
    char shown[64];
    if (demo_asks_nothing(options, target, text)) return 0;
    snprintf(shown, sizeof shown, strlen(text) < sizeof shown ? "%s" : "%.40s...", text);
    return demo_refuse(options, "--%s %s is not supported: %s", typed->name, shown,
                       target->note);
}

/* Handles an option by its name: finds its value, checks it, and stores it in the bound
   variable. inlined: the value after "=", or NULL. */
static inline int demo_options_named(demo_options *options, demo_walk *walk, const char *name,
                                     const char *inlined) {
    const demo_known *typed = demo_known_find(name);
    if (!typed) return demo_options_unknown(options, name);
    if (!demo_list_has(typed->tools, options->tool))
        return demo_options_elsewhere(options, typed);
    const char *text = demo_walk_collect(options, walk, typed->kind, inlined);
    if (!text) return demo_options_missing(options, walk, typed);
    const int64_t number = typed - demo_known_options;
    options->typed[number] = ++options->typed_count;
    options->before[number] = options->text[number];
    options->text[number] = text;
    options->refused[number] = true; /* cleared when the value is stored */
    const demo_known *target = demo_known_target(typed);
    /* a value of the wrong type is refused even if the option has no effect */
    double scratch[2];
    if (strcmp(target->role, "real") &&
        demo_store(options, scratch, typed, text, (demo_range)DEMO_ANY))
        return -1;
    if (demo_is_role(target, "refused") && demo_options_undone(options, typed, target, text))
        return -1;
    if (strcmp(target->role, "real")) return options->refused[number] = false, 0;
    const demo_binding *binding = demo_binding_find(options, target->name);
    if (!binding)
        return demo_refuse(options, "--%s is known, but this program does not serve it yet",
                           typed->name);
    /* an empty word comes, for example, from an unset shell variable */
    if (binding->type == DEMO_STRING && !*text)
        return demo_refuse(options, "--%s is empty; give it a value or leave it out",
                           typed->name);
    options->refused[number] = demo_store(options, binding->variable, typed, text,
                                          binding->range) != 0;
    return -options->refused[number];
}

/* Handles the next word of the command line, which must begin an option. */
static inline int demo_options_next(demo_options *options, demo_walk *walk) {
    const char *word = walk->words[walk->at++];
    char name[DEMO_NAME_LIMIT] = "";
    if (!strcmp(word, "-h") || !strcmp(word, "--help")) return options->help_wanted = true, 0;
    if (*word == '#')
        return demo_refuse(
            options,
            "'%.60s' is a comment that the shell passed on; remove it from the command", word);
    if (demo_word_blank(word))
        return demo_refuse(options, "a word is a space: a backslash at the end of a line has "
                                    "a space after it, so the shell did not pass on the "
                                    "lines below; remove everything after the backslash");
    if (strncmp(word, "--", 2))
        return demo_refuse(options, "stray word %s; options start with -- (--help lists all)",
                           word);
    size_t length = strcspn(word + 2, "=");
    memcpy(name, word + 2, length < sizeof name ? length : sizeof name - 1);
    return demo_options_named(options, walk, name,
                              word[2 + length] ? word + 2 + length + 1 : NULL);
}

static inline int demo_options_defaults(demo_options *options) {
    static const size_t sizes[] = {sizeof(bool), sizeof(int64_t), sizeof(double),
                                   sizeof(char *), 2 * sizeof(double)};
    for (int i = 0; i < options->binding_count; i++) {
        const demo_binding *b = &options->bindings[i];
        const demo_known *known = demo_known_find(b->name);
        if (!known || demo_type_of(known->kind) != b->type)
            return demo_refuse(
                options, "--%s is not in options.tsv with the type it is bound as", b->name);
        memset(b->variable, 0, sizes[b->type]);
        if (b->fallback &&
            demo_store(options, b->variable, known, b->fallback, (demo_range)DEMO_ANY))
            return -1;
    }
    return 0;
}

/* Refuses two names of one option with different values. */
static inline int demo_options_clash(demo_options *options) {
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++)
        for (int k = options->typed[i] ? i + 1 : DEMO_KNOWN_COUNT; k < DEMO_KNOWN_COUNT; k++) {
            const demo_known *a = &demo_known_options[i], *b = &demo_known_options[k];
            if (!options->typed[k] || demo_known_target(a) != demo_known_target(b) ||
                !strcmp(options->text[i], options->text[k]))
                continue;
            return demo_refuse(
                options,
                "--%s %.60s and --%s %.60s are the same option with different values; leave "
                "one of them out",
                a->name, options->text[i], b->name, options->text[k]);
        }
    return 0;
}

/* ---- interface for programs ---- */

/* Sets all variables to their defaults. Then copies to own (count) the bindings whose name the
   tool accepts by options.tsv; if two have the same name, only the first. Returns their
   number. */
static inline int demo_bindings_of(demo_binding *own, const demo_binding *all, int count,
                                   const char *tool) {
    demo_error error;
    demo_options defaults = {
        .tool = tool, .bindings = all, .binding_count = count, .error = &error};
    int kept = 0;
    (void)demo_options_defaults(&defaults);
    for (int i = 0; i < count; i++) {
        const demo_known *known = demo_known_find(all[i].name);
        const demo_options there = {.bindings = own, .binding_count = kept};
        if (known && demo_list_has(known->tools, tool) &&
            !demo_binding_find(&there, all[i].name))
            own[kept++] = all[i];
    }
    return kept;
}

/* Handles the next option. If it is wrong, adds a message and skips its values, so that they
   cause no further messages. */
static inline int demo_options_wrong(demo_options *options, demo_walk *walk) {
    demo_error *all = options->error, one = {""};
    options->error = &one;
    int wrong = demo_options_next(options, walk);
    options->error = all;
    if (!wrong) return 0;
    while (demo_walk_value(walk)) {
    }
    return demo_fail_too(all, &one);
}

/* Sets every bound variable to its default, then to the value in argv. If a name occurs twice,
 * the last value is used, as with argparse. Stops at --help or -h with help_wanted set. Returns
 * 0, or -1 with a message in error for each word that is wrong. */
static inline int demo_options_parse(demo_options *options, int argc, char **argv,
                                     demo_error *error) {
    demo_walk walk = {argv, argc, 1};
    const char *slash = strrchr(argv[0], '/');
    int wrong = 0;
    options->program = slash ? slash + 1 : argv[0];
    options->error = error;
    error->text[0] = 0;
    if (demo_options_defaults(options)) return -1;
    while (walk.at < argc && !options->help_wanted)
        if (demo_options_wrong(options, &walk)) wrong = -1;
    if (!wrong && !options->help_wanted && demo_options_clash(options)) return -1;
    return options->help_wanted ? 0 : wrong;
}

/* The name under which the user set the option last; NULL if the user did not set it. */
static inline const demo_known *demo_options_spelling(const demo_options *options,
                                                      const char *name) {
    const demo_known *wanted = demo_known_find(name), *last = NULL;
    int latest = 0;
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++)
        if (options->typed[i] > latest && demo_known_target(&demo_known_options[i]) == wanted)
            latest = options->typed[i], last = &demo_known_options[i];
    return last;
}

/* Did the user set the option, under any of its names? */
static inline bool demo_options_typed(const demo_options *options, const char *name) {
    return demo_options_spelling(options, name) != NULL;
}

/* The last value that the user gave the option, under any of its names; NULL if there is
   none. */
static inline const char *demo_options_text(const demo_options *options, const char *name) {
    const demo_known *last = demo_options_spelling(options, name);
    return last ? options->text[last - demo_known_options] : NULL;
}

/* ---- the program that a command line is written for: defaults and meanings differ ---- */

enum {
    DEMO_FROM_NONE,
    DEMO_FROM_OPENRLHF,
    DEMO_FROM_LLAMAFACTORY,
    DEMO_FROM_AXOLOTL,
    DEMO_FROMS
};
static const char *const demo_from_name[DEMO_FROMS] = {"none", "openrlhf", "llamafactory",
                                                       "axolotl"};

/* The only other program that has this spelling; DEMO_FROM_NONE if there are none or several.
   */
static inline int demo_only_program(const demo_known *known) {
    static const char *const sources[DEMO_FROMS] = {"seqpar", "openrlhf", "360lf", "axolotl"};
    int only = DEMO_FROM_NONE;
    for (int from = 0; from < DEMO_FROMS; from++) {
        if (!strstr(known->source, sources[from])) continue;
        if (from == DEMO_FROM_NONE || only != DEMO_FROM_NONE) return DEMO_FROM_NONE;
        only = from;
    }
    return only;
}

/* The program of the typed options, judged by the spellings that only one program has.
   DEMO_FROM_NONE if no such spelling was typed, or those of two programs. */
static inline int demo_options_program(const demo_options *options) {
    int all = DEMO_FROM_NONE;
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++) {
        int one = options->typed[i] ? demo_only_program(&demo_known_options[i])
                                    : DEMO_FROM_NONE;
        if (one != DEMO_FROM_NONE && all != DEMO_FROM_NONE && one != all) return DEMO_FROM_NONE;
        if (one != DEMO_FROM_NONE) all = one;
    }
    return all;
}

/* The program whose meaning an option has: that of --from, else the only program with the
   spelling that was typed, else the program of the other options. from: the value of --from, or
   NULL. */
static inline int demo_options_from(const demo_options *options, const char *from,
                                    const char *name) {
    for (int i = 1; from && i < DEMO_FROMS; i++)
        if (!strcmp(from, demo_from_name[i])) return i;
    const demo_known *spelling = demo_options_spelling(options, name);
    int own = spelling ? demo_only_program(spelling) : DEMO_FROM_NONE;
    return own != DEMO_FROM_NONE ? own : demo_options_program(options);
}

/* ---- notices and help ---- */

/* Prints one line about accepted options without effect, and one about each option that was
   typed twice. */
static inline void demo_options_print_ignored(const demo_options *options, FILE *out) {
    bool any = false;
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++) {
        const demo_known *known = &demo_known_options[i], *target = demo_known_target(known);
        if (!options->typed[i] || strcmp(target->role, "noeffect")) continue;
        fprintf(out, "%s--%s (%s)", any ? "; " : "no effect here: ", known->name, target->note);
        any = true;
    }
    if (any) fputc('\n', out);
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++)
        if (options->before[i] && strcmp(options->before[i], options->text[i]) &&
            strcmp(demo_known_target(&demo_known_options[i])->role, "noeffect"))
            fprintf(
                out,
                "notice: --%s was typed twice; the last value, %.100s, is used, not %.100s\n",
                demo_known_options[i].name, options->text[i], options->before[i]);
}

static inline void demo_help_others(const demo_options *options, FILE *out, const char *role,
                                    const char *title) {
    bool acts = !strcmp(role, "real");
    fprintf(out, "\n%s:\n", title);
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++) {
        const demo_known *known = &demo_known_options[i], *target = demo_known_target(known);
        if (!demo_is_role(target, role) || (acts && known == target) ||
            !demo_list_has(known->tools, options->tool))
            continue;
        fprintf(out, "  --%-36s %s%s\n", known->name, acts ? "= --" : "",
                acts ? target->name : target->note);
    }
}

/* Prints the help: options with default and description, other spellings, options without
   effect, options that demos/prepare.py handles, and options that are refused. */
static inline void demo_options_help(const demo_options *options, FILE *out) {
    static const char *const value[] = {"", "N", "X", "TEXT", "X X"};
    char wanted[256];
    fprintf(out,
            "usage: %s [--name value | --name=value]...   (in names, - and _ are the same)\n\n",
            options->program);
    for (int i = 0; i < options->binding_count; i++) {
        const demo_binding *b = &options->bindings[i];
        const char *kind = demo_known_find(b->name)->kind;
        const char *none = b->type == DEMO_FLAG ? "false" : "none";
        if (!demo_list_has(demo_known_find(b->name)->tools, options->tool)) continue;
        fprintf(out, "  --%-24s %-4s [%s] %s", b->name, value[b->type],
                b->fallback ? b->fallback : none, b->help);
        if (!strncmp(kind, "choice:", 7))
            fprintf(out, "; %s", demo_wanted(wanted, sizeof wanted, kind, b->range));
        fputc('\n', out);
    }
    demo_help_others(options, out, "real", "other names for these");
    demo_help_others(options, out, "noeffect", "accepted, without effect here");
    demo_help_others(options, out, "prepared",
                     "handled by demos/prepare.py when text "
                     "becomes tokens");
    demo_help_others(options, out, "refused",
                     "not supported: refused, unless the value changes nothing");
}

/* For tests: checks that the bindings are exactly the options with role `real` of this tool in
   options.tsv. */
static inline int demo_options_check(demo_options *options, demo_error *error) {
    options->error = error;
    for (int i = 0; i < options->binding_count; i++) {
        const char *name = options->bindings[i].name;
        const demo_known *known = demo_known_find(name);
        if (!known || strcmp(known->role, "real") ||
            !demo_list_has(known->tools, options->tool))
            return demo_refuse(options, "--%s is bound, but not real for %s in options.tsv",
                               name, options->tool);
    }
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++) {
        const char *name = demo_known_options[i].name;
        bool served = demo_list_has(demo_known_options[i].tools, options->tool);
        if (served && !strcmp(demo_known_options[i].role, "real") &&
            !demo_binding_find(options, name))
            return demo_refuse(options, "--%s is not bound, but real for %s in options.tsv",
                               name, options->tool);
    }
    return 0;
}

/* ---- layout and schedule under the names of other programs ---- */

/* Translates a value of --sequence_parallel_mode (360-LLaMA-Factory) or --ring_attn_func
 * (axolotl) to layout and schedule. varlen_zigzag distributes each document separately,
 * batch_zigzag the whole row. On entry layout and schedule are the values of other options, or
 * NULL; a contradiction is refused. name may be NULL. */
static inline int demo_placement_settle(const char **layout, const char **schedule,
                                        const char *name, demo_error *error) {
    if (!name) return 0;
    const char *its_layout = strstr(name, "varlen_zigzag") ? "zigzag-doc"
                             : strstr(name, "zigzag")      ? "zigzag"
                             : !strcmp(name, "usp")        ? "zigzag"
                             : strstr(name, "stripe")      ? "stripe"
                                                           : "contiguous";
    bool heads = !strcmp(name, "ulysses") || !strcmp(name, "usp");
    const char *its_schedule = strstr(name, "llama3") ? "llama3" : heads ? "ulysses" : "ring";
    bool clash = (*layout && strcmp(*layout, its_layout)) ||
                 (*schedule && strcmp(*schedule, its_schedule));
    if (clash)
        demo_fail(error,
                  "%s means --layout %s --schedule %s, but another option says %s %s; leave "
                  "one of them out",
                  name, its_layout, its_schedule, *layout ? *layout : "",
                  *schedule ? *schedule : "");
    else
        *layout = its_layout, *schedule = its_schedule;
    return clash ? -1 : 0;
}

#endif
