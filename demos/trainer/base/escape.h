/* SPDX-License-Identifier: MIT OR Unlicense */
/* escape.h - text of others (file names, keys, answers): what a terminal may show of it, and
 * whether it is UTF-8. */
#ifndef DEMO_ESCAPE_H
#define DEMO_ESCAPE_H

#include "seqpar.h"

/* As errors of seqpar show such text (seqpar.h); returns out (size). */
static inline const char *demo_escape(char *out, int64_t size, const char *text) {
    return seqpar__escape(out, size, text);
}

/* Bytes of the UTF-8 character at text; 0: there is none in `left` bytes. */
static inline int64_t demo_utf8_length(const char *text, int64_t left) {
    return seqpar__utf8_length(text, left);
}

#endif
