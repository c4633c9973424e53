/* SPDX-License-Identifier: MIT OR Unlicense */
/* escape.h - untrusted text (file names, keys, answers): escaped for a terminal, and whether it
 * is UTF-8. */
#ifndef DEMO_ESCAPE_H
#define DEMO_ESCAPE_H

#include "seqpar.h"

/* Escapes text as seqpar's errors do (seqpar__escape); returns out, which has `size` bytes. */
static inline const char *demo_escape(char *out, int64_t size, const char *text) {
    return seqpar__escape(out, size, text);
}

/* Bytes of the UTF-8 character at text; 0: there is none in `left` bytes. */
static inline int64_t demo_utf8_length(const char *text, int64_t left) {
    return seqpar__utf8_length(text, left);
}

#endif
