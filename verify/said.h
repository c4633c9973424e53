/* SPDX-License-Identifier: MIT OR Unlicense */
/* said.h - what the oracle says in full. said.tsv has, of tests of a suite, sentences that are
   said there, and how many words are said in all. Numbers may be 1 % off, as machines round
   differently; whole ones may not. A suite gives each text to said_add, and includes this
   behind test.h. said.py makes the table anew, from a file that SAID names. */
#ifndef SAID_H
#define SAID_H
#include <ctype.h>
#include "test.h"

static char said_all[1 << 18]; /* since the last test's end, runs of blanks are one */

/* Lines of a text as they are, to the file that SAID names. */
static inline void said_log(const char *kind, const char *text) {
    FILE *log = getenv("SAID") ? fopen(getenv("SAID"), "a") : NULL;
    if (!log) return;
    fprintf(log, "%s\n%s\n", kind, text);
    fclose(log);
}

static inline void said_add(const char *text) {
    size_t used = strlen(said_all);
    said_log("\x01said", text);
    if (used && said_all[used - 1] != ' ' && used + 1 < sizeof said_all) said_all[used++] = ' ';
    for (; *text && used + 1 < sizeof said_all; text++)
        if (!isspace((unsigned char)*text) || (used && said_all[used - 1] != ' '))
            said_all[used++] = isspace((unsigned char)*text) ? ' ' : *text;
    said_all[used] = 0;
}

/* Behind a number that begins here; NULL: none does. *whole: it has digits alone. */
static inline const char *said_number(const char *text, const char *begin, double *x,
                                      int *whole) {
    const char *digit = text + (*text == '-');
    char *end;
    if (!isdigit((unsigned char)*digit)) return NULL;
    if (text > begin && (isalnum((unsigned char)text[-1]) || text[-1] == '_')) return NULL;
    *x = strtod(text, &end);
    *whole = strspn(digit, "0123456789") == (size_t)(end - digit);
    return end;
}

/* Below 1e-9 a number is what rounding left of 0. */
static inline int said_near(double a, double b) {
    double size = fmax(fabs(a), fabs(b));
    return fabs(a - b) <= 0.01 * size || size < 1e-9;
}

/* Whether the text begins with the sentence. */
static inline int said_begins(const char *text, const char *sentence) {
    const char *from = text, *begin = sentence;
    while (*sentence) {
        double a = 0, b = 0;
        int whole[2] = {0};
        const char *x = said_number(text, from, &a, &whole[0]);
        const char *y = said_number(sentence, begin, &b, &whole[1]);
        if (x && y ? (whole[0] && whole[1] ? a != b : !said_near(a, b)) : *text != *sentence)
            return 0;
        text = x && y ? x : text + 1;
        sentence = x && y ? y : sentence + 1;
    }
    return !*text || *text == ' ';
}

static inline int said_has(const char *sentence) {
    for (const char *at = said_all; at; at = strchr(at, ' ')) {
        at += *at == ' ';
        if (said_begins(at, sentence)) return 1;
    }
    return 0;
}

static inline int said_words(void) {
    int words = *said_all != 0;
    for (const char *c = said_all; *c; c++) words += *c == ' ' && c[1];
    return words;
}

/* One row's third column: "words N", or a sentence. */
static inline void said_row(const char *what) {
    if (!strncmp(what, "words ", 6) && isdigit((unsigned char)what[6]))
        test_expect(atoi(what + 6) == said_words(), "%d words are said, not %s: '%.600s'",
                    said_words(), what + 6, said_all);
    else
        test_expect(said_has(what), "'%s' is not said, but '%.400s'", what, said_all);
}

/* How many tests of this name have ended, with this one. */
static inline int said_turn(const char *name) {
    static struct {
        uint64_t key;
        int turns;
    } seen[4096];
    uint64_t key = 1, at;
    for (; *name; name++) key = key * 0x9e3779b97f4a7c15u + (unsigned char)*name;
    for (at = key; seen[at % 4096].turns && seen[at % 4096].key != key;) at++;
    seen[at % 4096].key = key;
    return ++seen[at % 4096].turns;
}

/* At the end of a test, by its name, and its turn where there were others. */
__attribute__((format(printf, 1, 2))) static inline void said_check(const char *format, ...) {
    static char line[2048];
    char key[400], name[256];
    const char *suite = strrchr(test_program, '/');
    FILE *table = fopen("verify/said.tsv", "r");
    va_list args;
    int turn;
    va_start(args, format);
    vsnprintf(name, sizeof name - 8, format, args);
    va_end(args);
    turn = said_turn(name);
    if (turn > 1) snprintf(name + strlen(name), 8, "#%d", turn);
    said_log("\x01test", name);
    snprintf(key, sizeof key, "%s\t%s\t", suite ? suite + 1 : test_program, name);
    test_expect(table != NULL, "verify/said.tsv cannot be read");
    while (table && *said_all && fgets(line, sizeof line, table)) {
        line[strcspn(line, "\n")] = 0;
        if (!getenv("SAID") && !strncmp(line, key, strlen(key))) said_row(line + strlen(key));
    }
    if (table) fclose(table);
    *said_all = 0;
}

#define test_end(...) (said_check(__VA_ARGS__), (test_end)(__VA_ARGS__))
#endif
