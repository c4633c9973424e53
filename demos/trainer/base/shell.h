/* SPDX-License-Identifier: MIT OR Unlicense */
/* shell.h - quotes the words of a command line for a shell. */
#ifndef DEMO_SHELL_H
#define DEMO_SHELL_H

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include "memory.h"

/* Writes a blank and the word, quoted if a shell needs it. A `size` of 2 x strlen(word) + 8 is
   enough. */
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

/* Returns `begin` and the quoted words as one command line; the caller calls free(). */
static inline char *demo_shell_line(const char *begin, char *const *words, int64_t count) {
    size_t size = strlen(begin) + 1, used = strlen(begin);
    for (int64_t i = 0; i < count; i++) size += 2 * strlen(words[i]) + 8;
    char *line = (char *)demo_alloc((int64_t)size, 1);
    memcpy(line, begin, used);
    for (int64_t i = 0; i < count; i++, used += strlen(line + used))
        demo_shell_word(line + used, size - used, words[i]);
    return line;
}

#endif
