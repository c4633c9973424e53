/* SPDX-License-Identifier: MIT OR Unlicense */
/* What a command prints, the oracle's above all, and its exit code. */
#ifndef ORACLE_SAYS_H
#define ORACLE_SAYS_H
#include <sys/wait.h>
#include "test.h"

/* Exit code of the command; -1: it did not end by itself. */
static inline int said_by(const char *command, char *said, size_t size) {
    FILE *out = popen(command, "r");
    size_t bytes = out ? fread(said, 1, size - 1, out) : 0;
    int is = out ? pclose(out) : -1;
    said[bytes] = 0;
    return WIFEXITED(is) ? WEXITSTATUS(is) : -1;
}

/* Each run of blanks and line ends becomes one blank. */
static inline void squeeze(char *text) {
    char *to = text;
    for (const char *from = text; *from; from++)
        if (*from != ' ' && *from != '\n')
            *to++ = *from;
        else if (to > text && to[-1] != ' ')
            *to++ = ' ';
    *to = 0;
}

/* The exit code is the one that is wanted, and what is said begins with the headline and has
   the text in it. */
static inline void expect_says(int is, const char *said, int code, const char *headline,
                               const char *text) {
    test_expect(is == code && !strncmp(said, headline, strlen(headline)) && strstr(said, text),
                "exit code %d, not %d; said '%.400s', not '%s' with '%s'", is, code, said,
                headline, text);
}
#endif
