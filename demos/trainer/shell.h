/* SPDX-License-Identifier: MIT OR Unlicense */
/* shell.h - words of a command line as one would type them. */
#ifndef DEMO_SHELL_H
#define DEMO_SHELL_H

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* A blank and the word, as a shell reads it. */
static inline void demo_shell_word(char *to, size_t size, const char *word) {
    bool plain = *word && !word[strspn(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"
                                             "XYZ0123456789_./,:@%+=-")];
    size_t used = (size_t)snprintf(to, size, "%s", plain ? " " : " $'");
    for (; *word && used + 5 < size; word++)
        used += (size_t)snprintf(to + used, size - used,
                                 *word == '\n'                                ? "\\n"
                                 : !plain && (*word == '\'' || *word == '\\') ? "\\%c"
                                                                              : "%c",
                                 *word);
    if (!plain) snprintf(to + used, size - used, "'");
}

#endif
