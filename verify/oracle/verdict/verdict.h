/* SPDX-License-Identifier: MIT OR Unlicense */
/* verdict.h - a verdict of seqpar-verify, as text, as JSON and as an exit code. */
#ifndef ORACLE_VERDICT_H
#define ORACLE_VERDICT_H
#include <cjson/cJSON.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include "mistakes.h"

/* The numbers are exit codes. */
typedef enum verdict_kind {
    VERDICT_RIGHT = 0,
    VERDICT_WRONG = 1,
    VERDICT_USAGE = 2,
    VERDICT_FILE = 3,
    VERDICT_INSUFFICIENT = 4,
    VERDICT_VOID = 6,     /* the two references disagree */
    VERDICT_SURVIVED = 7, /* a mutant was not detected */
    VERDICT_MARGINAL = 5, /* beyond the limit, by less than half of it; 0 without --strict */
    VERDICT_CLOSE = 8     /* equal but for rounding; exit code 0, with --strict 5 */
} verdict_kind;

/* A form of a mistake that could have been made, and whether its number differs from the right
   one. If it does not, a right verdict does not exclude it. */
typedef struct tried_form {
    const mistake *m;
    const char *how; /* which form; NULL: the mistake has one */
    int shows;
} tried_form;

enum { VERDICT_LINES = 16, VERDICT_TRIED = 256 };
typedef struct verdict {
    verdict_kind kind;
    const mistake *named[MISTAKES]; /* (count) if wrong; count 0: no known mistake */
    int count, lines;
    int all;                       /* 1: all named mistakes were made; 0: one of them */
    char line[VERDICT_LINES][320]; /* the evidence, in sentences */
    tried_form tried[VERDICT_TRIED];
    int tried_count;
} verdict;

/* ---- characters ---- */

static inline uint32_t utf8_value(const unsigned char *s, int length) {
    uint32_t value = length == 1 ? s[0] : s[0] & (0xffu >> (length + 1));
    for (int i = 1; i < length; i++) value = value << 6 | (s[i] & 0x3f);
    return value;
}

/* Bytes of the UTF-8 character at s; 0: invalid, or forbidden in XML, HTML or JSON. */
static inline int text_character(const unsigned char *s) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    int length = s[0] < 0x80   ? 1
                 : s[0] < 0xc0 ? 0
                 : s[0] < 0xe0 ? 2
                 : s[0] < 0xf0 ? 3
                 : s[0] < 0xf8 ? 4
                               : 0;
    uint32_t value;
    for (int i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    value = length ? utf8_value(s, length) : 0;
    if (value < least[length] || value > 0x10ffff || (value >= 0xd800 && value < 0xe000) ||
        (value & 0xfffe) == 0xfffe || (value >= 0x7f && value < 0xa0) || value < 0x20)
        return value == '\n' || value == '\t';
    return length;
}

/* Names come from files, and evidence may cut a character in two: invalid bytes become '?'. */
static inline void text_mend(char *text) {
    while (*text) {
        int length = text_character((const unsigned char *)text);
        if (!length) *text = '?';
        text += length ? length : 1;
    }
}

/* ---- evidence ---- */

static inline void verdict_say(verdict *v, const char *format, ...) {
    va_list list;
    if (v->lines == VERDICT_LINES) return;
    va_start(list, format);
    vsnprintf(v->line[v->lines], sizeof v->line[0], format, list);
    va_end(list);
    text_mend(v->line[v->lines++]);
}

/* Moves the last sentence to the second place, where the headline takes the reason from. */
static inline void verdict_say_earlier(verdict *v) {
    char last[sizeof v->line[0]];
    if (v->lines < 3) return;
    memcpy(last, v->line[v->lines - 1], sizeof last);
    memmove(v->line[2], v->line[1], (size_t)(v->lines - 2) * sizeof last);
    memcpy(v->line[1], last, sizeof last);
}

static inline void verdict_name(verdict *v, const mistake *m) {
    for (int i = 0; i < v->count; i++)
        if (v->named[i] == m) return;
    v->named[v->count++] = m;
}

/* Notes that the mistake could have been made, in this form. Of several rows, ranks or shards
   one that shows it is enough. */
static inline void verdict_try(verdict *v, const char *name, const char *how, int shows) {
    const mistake *m = mistake_named(name);
    for (int i = 0; i < v->tried_count; i++)
        if (v->tried[i].m == m && (v->tried[i].how == how ||
                                   (how && v->tried[i].how && !strcmp(v->tried[i].how, how)))) {
            v->tried[i].shows |= shows;
            return;
        }
    if (v->tried_count < VERDICT_TRIED)
        v->tried[v->tried_count++] = (tried_form){m, how, shows};
}

static inline void verdict_take_tried(verdict *v, const verdict *other) {
    for (int i = 0; i < other->tried_count; i++)
        verdict_try(v, other->tried[i].m->name, other->tried[i].how, other->tried[i].shows);
}

/* Whether a right verdict does not exclude the mistake: a form of it gives the same number. */
static inline int verdict_hides(const verdict *v, const mistake *m) {
    for (int i = 0; i < v->tried_count; i++)
        if (v->kind == VERDICT_RIGHT && v->tried[i].m == m && !v->tried[i].shows) return 1;
    return 0;
}

static inline const char *verdict_word(const verdict *v) {
    return v->kind == VERDICT_RIGHT          ? "right"
           : v->kind == VERDICT_WRONG        ? "wrong"
           : v->kind == VERDICT_INSUFFICIENT ? "insufficient"
           : v->kind == VERDICT_CLOSE        ? "close"
                                             : "marginal";
}

/* ---- text ---- */

enum { PAGE = 96 };

/* Prints text after a label of `indent` columns, wrapped at PAGE columns. */
static inline void print_words(FILE *out, int indent, const char *text) {
    int column = indent;
    while (*text) {
        int word = (int)strcspn(text, " ");
        if (column > indent && column + 1 + word > PAGE)
            column = fprintf(out, "\n%*s", indent, "") - 1;
        column += fprintf(out, "%s%.*s", column > indent ? " " : "", word, text);
        text += word;
        text += strspn(text, " ");
    }
    fprintf(out, "\n");
}

/* "    label    text" */
static inline void print_wrapped(FILE *out, const char *label, const char *text) {
    print_words(out, fprintf(out, "    %-9s", label), text);
}

/* Fields of a mistake: the key in JSON, the label in text. */
static const struct {
    const char *key, *label;
    size_t offset;
} mistake_fields[] = {{"symptom", "symptom", offsetof(mistake, symptom)},
                      {"cause", "cause", offsetof(mistake, cause)},
                      {"right", "right", offsetof(mistake, right)},
                      {"wrong", "wrong", offsetof(mistake, wrong)},
                      {"example", "by hand", offsetof(mistake, example)},
                      {"fix", "fix", offsetof(mistake, fix)},
                      {"seen", "seen", offsetof(mistake, seen)}};
enum { MISTAKE_FIELDS = sizeof mistake_fields / sizeof *mistake_fields };

/* NULL for `seen` if no public issue thread is known. */
static inline const char *mistake_field(const mistake *m, int field) {
    return *(const char *const *)((const char *)m + mistake_fields[field].offset);
}

static inline void mistake_print(FILE *out, const mistake *m) {
    for (int i = 0; i < MISTAKE_FIELDS; i++) {
        const char *text = mistake_field(m, i);
        print_wrapped(out, mistake_fields[i].label,
                      text ? text : "in no public thread that we know");
    }
}

/* "wrong: over_sp", "wrong: one of over_sp, over_dp", "wrong: over_sp and over_dp" or "wrong:
   unknown" */
static inline void verdict_title(FILE *out, const verdict *v) {
    fprintf(out, "%s", verdict_word(v));
    if (v->kind == VERDICT_WRONG && !v->count) fprintf(out, ": unknown");
    for (int i = 0; i < v->count; i++)
        fprintf(out, "%s%s",
                i && v->all               ? " and "
                : i                       ? ", "
                : v->count > 1 && !v->all ? ": one of "
                                          : ": ",
                v->named[i]->name);
}

static inline void verdict_headline(FILE *out, const verdict *v) {
    verdict_title(out, v);
    fprintf(out, "\n");
}

static inline void verdict_print_mistakes(FILE *out, const verdict *v) {
    for (int i = 0; i < v->count; i++) {
        fprintf(out, "\n  %s\n", v->named[i]->name);
        mistake_print(out, v->named[i]);
    }
}

static inline void verdict_print(FILE *out, const verdict *v) {
    verdict_headline(out, v);
    for (int i = 0; i < v->lines; i++) print_wrapped(out, i ? "" : "evidence", v->line[i]);
    verdict_print_mistakes(out, v);
}

/* ---- JSON ---- */

static inline cJSON *mistake_json(const mistake *m) {
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "name", m->name);
    cJSON_AddStringToObject(o, "family", m->family);
    for (int i = 0; i < MISTAKE_FIELDS; i++)
        if (mistake_field(m, i))
            cJSON_AddStringToObject(o, mistake_fields[i].key, mistake_field(m, i));
    return o;
}

static inline void json_print(FILE *out, cJSON *json) {
    char *text = cJSON_Print(json);
    fprintf(out, "%s\n", text ? text : "null");
    cJSON_free(text);
    cJSON_Delete(json);
}

static inline cJSON *verdict_json(const verdict *v) {
    cJSON *o = cJSON_CreateObject(), *list;
    cJSON_AddStringToObject(o, "verdict", verdict_word(v));
    list = cJSON_AddArrayToObject(o, "mistakes");
    for (int i = 0; i < v->count; i++) cJSON_AddItemToArray(list, mistake_json(v->named[i]));
    if (v->count > 1) cJSON_AddBoolToObject(o, "together", v->all);
    list = cJSON_AddArrayToObject(o, "evidence");
    for (int i = 0; i < v->lines; i++)
        cJSON_AddItemToArray(list, cJSON_CreateString(v->line[i]));
    return o;
}
#endif
