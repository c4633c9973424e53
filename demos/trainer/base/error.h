/* SPDX-License-Identifier: MIT OR Unlicense */
/* error.h - error messages of a trainer before its ranks start. Ranks report by seqpar_fail
 * instead, so that one rank reports for all.
 *     return demo_fail(error, "--%s is %s; give a number", name, text); */
#ifndef DEMO_ERROR_H
#define DEMO_ERROR_H

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    char text[8192]; /* long: it may contain a command line for the user */
} demo_error;

enum { DEMO_ERROR_NEXT = 0x1e }; /* separates sentences; each is printed on its own line */

/* Appends the sentence to the text of *error. Returns -1. */
__attribute__((format(printf, 2, 0))) static inline int demo_fail_more(demo_error *error,
                                                                       const char *format,
                                                                       va_list arguments) {
    size_t used = strlen(error->text);
    vsnprintf(error->text + used, sizeof error->text - used, format, arguments);
    return -1;
}

/* Sets the text of *error to the sentence. Returns -1. */
__attribute__((format(printf, 2, 3))) static inline int demo_fail(demo_error *error,
                                                                  const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    error->text[0] = 0;
    demo_fail_more(error, format, arguments);
    va_end(arguments);
    return -1;
}

/* Appends the text of `one` to `all`, separated by DEMO_ERROR_NEXT. Returns -1. */
static inline int demo_fail_too(demo_error *all, const demo_error *one) {
    size_t used = strlen(all->text);
    const char next[2] = {used ? (char)DEMO_ERROR_NEXT : (char)0, 0};
    snprintf(all->text + used, sizeof all->text - used, "%s%s", next, one->text);
    return -1;
}

#endif
