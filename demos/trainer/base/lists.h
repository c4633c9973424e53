/* SPDX-License-Identifier: MIT OR Unlicense */
/* lists.h - comma-separated lists of words. */
#ifndef DEMO_LISTS_H
#define DEMO_LISTS_H
#include <stdbool.h>
#include <string.h>

static inline bool demo_list_has(const char *commas, const char *word) {
    size_t length = strlen(word);
    for (const char *at = commas; *at; at += strcspn(at, ","), at += *at == ',')
        if (strcspn(at, ",") == length && !strncmp(at, word, length)) return true;
    return false;
}

#endif
