/* SPDX-License-Identifier: MIT OR Unlicense */
/*
 * golden.h - reads golden.tsv and hands its cases, one by one, to a function that asks for
 * values by name:
 *
 *     static void visit(const golden_case *c, void *context)
 *     {
 *         double logits[8], beta = golden_number(c, "beta", .1);
 *         int vocab = golden_array(c, "logits", 8, logits);
 *         ...
 *     }
 *     int cases = golden_each(GOLDEN_PATH, visit, &context);
 *
 * Every expected value comes with a limit: half a unit of its last printed digit, or 0 if the
 * value is exact.  The caller adds the error of its own arithmetic.
 */
#ifndef GOLDEN_H
#define GOLDEN_H

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GOLDEN static __attribute__((unused))
#ifndef GOLDEN_PATH
#define GOLDEN_PATH \
    "verify/second/golden.tsv" /* from the top of the tree, where the suites are run \
                                         */
#endif

/* One row; the columns hold "name=value,value name=value". */
typedef struct {
    char objective[64], parameters[256], inputs[512], expected[1024];
    int line;
} golden_case;

typedef void golden_visit(const golden_case *c, void *context);

/* Half a unit of the last digit of a printed decimal. */
GOLDEN double golden_half_unit(const char *text) {
    int places = 0;
    bool fraction = false;
    for (; *text && strchr("+-.0123456789", *text); text++) {
        places += fraction;
        fraction = fraction || *text == '.';
    }
    return .5 * pow(10, (*text == 'e' ? atoi(text + 1) : 0) - places);
}

/* The value at *text, which moves behind it and its comma; NaN, which no comparison passes,
   if it is malformed. */
GOLDEN double golden_value(const char **text, double *limit) {
    bool rounded = **text == '~';
    const char *from = *text + rounded;
    char *end;
    double value = strtod(from, &end);
    *limit = rounded ? golden_half_unit(from) : 0;
    if (*end == '/') value /= strtod(end + 1, &end);
    bool good = end != from && (*end == 0 || *end == ' ' || *end == ',');
    *text = *end == ',' ? end + 1 : end;
    return good ? value : NAN;
}

/* Where the values of `name` begin in a column, NULL if it is not there. */
GOLDEN const char *golden_find(const char *column, const char *name) {
    size_t length = strlen(name);
    while (column && *column) {
        if (!strncmp(column, name, length) && column[length] == '=') return column + length + 1;
        column = strchr(column, ' ');
        column += column != NULL;
    }
    return NULL;
}

/* The values of a field, the number of which is returned: 0 if it is malformed or there are
   more than `most`. */
GOLDEN int golden_values(const char *text, int most, double *value, double *limit) {
    int count = 0;
    for (bool more = text != NULL; more; count++) {
        if (count == most) return 0;
        value[count] = golden_value(&text, &limit[count]);
        if (!(fabs(value[count]) <= HUGE_VAL)) return 0;
        more = text[-1] == ',';
    }
    return count;
}

/* The text of a parameter or an input, up to the next blank or the end; NULL if the row has
   none of that name. */
GOLDEN const char *golden_text(const golden_case *c, const char *name) {
    const char *text = golden_find(c->parameters, name);
    return text ? text : golden_find(c->inputs, name);
}

/* Is the parameter `name` this word? */
GOLDEN bool golden_is(const golden_case *c, const char *name, const char *word) {
    const char *text = golden_text(c, name);
    size_t length = strlen(word);
    return text && !strncmp(text, word, length) && (text[length] == ' ' || text[length] == 0);
}

/* A parameter or an input; how many values it has is returned, 0 if it is not there. */
GOLDEN int golden_array(const golden_case *c, const char *name, int most, double *value) {
    double limit[64];
    return golden_values(golden_text(c, name), most < 64 ? most : 64, value, limit);
}

GOLDEN double golden_number(const golden_case *c, const char *name, double otherwise) {
    double value;
    return golden_array(c, name, 1, &value) ? value : otherwise;
}

/* What is expected under `name`: as many values as are returned, and how far each may be
   off. */
GOLDEN int golden_expected(const golden_case *c, const char *name, int most, double *value,
                           double *limit) {
    return golden_values(golden_find(c->expected, name), most, value, limit);
}

/* The name of expected field `index`; false after the last. */
GOLDEN bool golden_expected_name(const golden_case *c, int index, char name[64]) {
    const char *field = c->expected;
    while (field && index--) {
        field = strchr(field, ' ');
        field += field != NULL;
    }
    return field && sscanf(field, "%63[^=]", name) == 1;
}

/* The next column of *row, cut off at its tab; false if there is none or it is too long. */
GOLDEN bool golden_column(char **row, size_t size, char *column) {
    if (!*row) return false;
    char *end = strchr(*row, '\t');
    size_t length = end ? (size_t)(end - *row) : strcspn(*row, "\n");
    if (length >= size) return false;
    memcpy(column, *row, length);
    column[length] = 0;
    *row = end ? end + 1 : NULL;
    return true;
}

/* Cuts a row into its four columns; false if there are fewer or more. */
GOLDEN bool golden_cut(char *row, golden_case *c) {
    return golden_column(&row, sizeof c->objective, c->objective) &&
           golden_column(&row, sizeof c->parameters, c->parameters) &&
           golden_column(&row, sizeof c->inputs, c->inputs) &&
           golden_column(&row, sizeof c->expected, c->expected) && !row;
}

/* The number of cases visited; -1, with a message, if the file cannot be read or a row is
   not four columns. */
GOLDEN int golden_each(const char *path, golden_visit *visit, void *context) {
    FILE *file = fopen(path, "r");
    char row[2048];
    int cases = 0;
    golden_case c = {.line = 0};
    while (file && fgets(row, sizeof row, file)) {
        c.line++;
        if (row[0] == '#' || row[0] == '\n') continue;
        if (!golden_cut(row, &c)) {
            fprintf(stderr, "%s:%d: not four columns\n", path, c.line);
            cases = -1;
            break;
        }
        visit(&c, context);
        cases++;
    }
    if (!file)
        fprintf(stderr, "%s: cannot be read\n", path);
    else
        fclose(file);
    return file ? cases : -1;
}

#endif
