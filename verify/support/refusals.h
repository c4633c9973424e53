/* SPDX-License-Identifier: MIT OR Unlicense */
/* Refusals by table: a value just inside is accepted, one just outside is refused with the whole
   sentence, numbers and all. Every sentence that was compared is remembered; at the end each
   format of seqpar_fail in a header must have been seen, or stand in a list with the reason. */
#ifndef REFUSALS_H
#define REFUSALS_H

#include <ctype.h>
#include <stddef.h>
#include "seqpar.h"
#include "test.h"

enum { SENTENCES = 1024, SENTENCE = 512 };
static char sentence_seen[SENTENCES][SENTENCE];
static int sentences;
static char trying[80]; /* the table and the line of it, from 0 */

/* One field of a call's arguments, and the value it gets. long double holds every int64_t. */
typedef struct setting {
    size_t at;
    char as; /* l: int64_t, i: int, d: double; 0: there is none */
    long double value;
} setting;
#define SET(type, member, value) \
    { \
        offsetof(type, member), \
            _Generic(((type *)0)->member, int64_t \
                     : 'l', int \
                     : 'i', double \
                     : 'd'), \
            value \
    }

/* A limit of one field. The call is accepted with set.value, and refused by the sentence with
   `outside`. The fields of `with` are set before. */
typedef struct limit {
    setting set; /* inside */
    long double outside;
    seqpar_status status;
    const char *sentence;
    setting with[3];
} limit;

static void set_field(void *call, const setting *s) {
    char *field = (char *)call + s->at;
    if (s->as == 'l') *(int64_t *)(void *)field = (int64_t)s->value;
    if (s->as == 'i') *(int *)(void *)field = (int)s->value;
    if (s->as == 'd') *(double *)(void *)field = (double)s->value;
}

/* The call was refused with this status and exactly this sentence. */
static void refused(seqpar_status got, seqpar_error *error, seqpar_status want,
                    const char *sentence) {
    test_expect(got == want, "%s%s instead of %s: '%s'", trying, seqpar_status_name(got),
                seqpar_status_name(want), error->text);
    test_expect(!strcmp(error->text, sentence), "%s'%s' instead of '%s'", trying, error->text,
                sentence);
    if (!strcmp(error->text, sentence) && sentences < SENTENCES)
        snprintf(sentence_seen[sentences++], SENTENCE, "%s", sentence);
    memset(error, 0, sizeof *error);
}

static void accepted(const char *what, seqpar_status got, seqpar_error *error) {
    test_expect(!got, "%s%s is refused: %s", trying, what, error->text);
    memset(error, 0, sizeof *error);
}
#define ACCEPTED(call, error)                   accepted(#call, call, error)
#define REFUSED(call, error, status, sentence_) refused(call, error, status, sentence_)

typedef seqpar_status (*limited_call)(void *call);
enum { CALL_BYTES = 4096 };

/* Calls with a copy of the good arguments in which one field is inside, then outside. */
static void try_limits(const char *name, limited_call call, const void *good, size_t size,
                       seqpar_error *error, const limit *limits, size_t count) {
    union {
        char bytes[CALL_BYTES];
        int64_t aligned;
    } mine;
    test_expect(size <= sizeof mine && count > 0, "%s has no limits", name);
    for (size_t i = 0; i < count; i++)
        for (int out = 0; out < 2; out++) {
            setting s = limits[i].set;
            memcpy(&mine, good, size);
            for (int w = 0; w < 3; w++) set_field(&mine, &limits[i].with[w]);
            if (out) s.value = limits[i].outside;
            set_field(&mine, &s);
            snprintf(trying, sizeof trying, "%s, line %d: ", name, (int)i);
            if (out)
                refused(call(&mine), error, limits[i].status, limits[i].sentence);
            else
                accepted("a value inside", call(&mine), error);
        }
    trying[0] = 0;
    test_end("%s: %d limits", name, (int)count);
}
#define TRY_LIMITS(name, call, good, error, limits) \
    try_limits(name, call, &(good), sizeof(good), error, limits, \
               sizeof(limits) / sizeof *(limits))

/* ---- every format of a header was seen ---- */

/* What a header's refusal may be excused by: the beginning of its format, and why. */
typedef struct excuse {
    const char *format, *why;
} excuse;

/* Length of a printf conversion at `at`; 0: there is none. */
static size_t conversion(const char *at) {
    size_t n = 1;
    if (*at != '%') return 0;
    while (at[n] && strchr("0123456789.-+#*lzh", at[n])) n++;
    return n + 1;
}

/* Can this format print the text? %d and the like match only the characters of numbers. */
static int comes_from(const char *text, const char *format) {
    size_t n = conversion(format);
    char kind = n ? format[n - 1] : 0;
    if (!n) return *text == *format && (!*text || comes_from(text + 1, format + 1));
    if (kind == 's') {
        for (const char *t = text;; t++) {
            if (comes_from(t, format + n)) return 1;
            if (!*t) return 0;
        }
    }
    while (*text && (isdigit((unsigned char)*text) || strchr("+-.einfax", *text)))
        if (comes_from(++text, format + n)) return 1;
    return 0;
}

/* Reads the string literals that stand side by side at *at into format, behind what is there;
   *at goes behind them. SEQPAR__ST_BAD is one of them. */
static void read_format(char *format, size_t size, const char **at) {
    static const char advice[] = "SEQPAR__ST_BAD";
    size_t used = strlen(format);
    while (**at == '"') {
        for ((*at)++; **at && **at != '"'; (*at)++) {
            if (**at == '\\') (*at)++;
            if (used + 1 < size) format[used++] = **at;
        }
        (*at)++;
        *at += strspn(*at, " \n\t");
        if (strncmp(*at, advice, sizeof advice - 1)) continue;
        *at += sizeof advice - 1;
        used += (size_t)snprintf(format + used, size - used,
                                 "; the file is damaged or was "
                                 "written wrongly, get it again or "
                                 "write it again");
        *at += strspn(*at, " \n\t");
    }
    format[used] = 0;
}

static int excused(const excuse *excuses, size_t count, const char *format, int *used) {
    for (size_t i = 0; i < count; i++)
        if (!strncmp(format, excuses[i].format, strlen(excuses[i].format))) return ++used[i];
    return 0;
}

static int is_seen(const char *format) {
    for (int i = 0; i < sentences; i++)
        if (comes_from(sentence_seen[i], format)) return 1;
    return 0;
}

static char *read_header(const char *path) {
    FILE *file = fopen(path, "rb");
    char *text = file ? calloc(1, 1 << 21) : NULL;
    size_t n = text ? fread(text, 1, (1 << 21) - 1, file) : 0;
    if (file) fclose(file);
    test_expect(n > 0 && n < (1 << 21) - 1, "%s cannot be read", path);
    return text;
}

/* Finds the next call of a function that refuses, from *at on, and reads its format behind
   `before`. 0: there is none. Skips "%s", which repeats the sentence of another call. */
static int next_format(char *format, size_t size, const char **at, const char *call,
                       const char *before) {
    while ((*at = strstr(*at, call))) {
        const char *end = strchr(*at, ';');
        *at += strlen(call);
        while (*at && *at < end && **at && **at != '"') (*at)++;
        /* "(no path)" in the place of a path is no format */
        if (*at < end && !strncmp(*at, "\"(no ", 5))
            *at = strchr(strchr(*at + 1, '"') + 1, '"');
        if (!*at || *at >= end) continue; /* a prototype */
        snprintf(format, size, "%s", before);
        read_format(format, size, at);
        if (strcmp(format, "%s")) return 1;
    }
    return 0;
}

/* Every refusal by `call` in the header must have been compared whole or have an excuse. An
   excuse fails if its refusal is compared or does not exist. */
static void check_all_seen(const char *path, const char *call, const char *before,
                           const excuse *excuses, size_t count) {
    char *text = read_header(path), format[SENTENCE];
    int formats = 0, *used = calloc(count + 1, sizeof *used);
    const char *at = text;
    while (at && next_format(format, sizeof format, &at, call, before)) {
        formats++;
        if (excused(excuses, count, format, used))
            test_expect(!is_seen(format), "needs no excuse: %s", format);
        else
            test_expect(is_seen(format), "is compared by no test: %s", format);
    }
    for (size_t i = 0; i < count; i++)
        test_expect(used[i], "is excused, but not in %s: %s", path, excuses[i].format);
    test_expect(formats > 0, "%s refuses nothing", path);
    free(text);
    free(used);
    test_end("%s in %s: %d, of which %d are excused", call, path, formats, (int)count);
}

/* The sentences that another suite compares whole, a line each. */
static void see_listed(const char *path) {
    FILE *file = fopen(path, "r");
    sentences = 0;
    while (file && sentences < SENTENCES && fgets(sentence_seen[sentences], SENTENCE, file)) {
        sentence_seen[sentences][strcspn(sentence_seen[sentences], "\n")] = 0;
        sentences++;
    }
    test_expect(file && sentences > 0, "%s cannot be read", path);
    if (file) fclose(file);
}
#endif
