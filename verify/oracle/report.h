/* SPDX-License-Identifier: MIT OR Unlicense */
/* report.h - what reports that are files have in common: what they tell of, text escaped for
 * XML and HTML, a file written whole or not at all. */
#ifndef ORACLE_REPORT_H
#define ORACLE_REPORT_H
#include "gradients.h"

typedef struct report {
    const char *folder, *wanted, *model; /* as given; NULL: not */
    const stage *stages;                 /* (STAGES) */
    const verdict *v;                    /* of all */
    const details *more;
} report;

/* ---- text ---- */

/* For an element's text and an attribute's; what may not stand in it as \x1b. */
static inline void put_text(FILE *out, const char *text) {
    static const char marks[] = "&<>\"'";
    static const char *const entities[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
    while (*text) {
        const char *mark = strchr(marks, *text);
        int length = text_character((const unsigned char *)text);
        if (mark)
            fputs(entities[mark - marks], out);
        else if (length)
            fwrite(text, 1, (size_t)length, out);
        else
            fprintf(out, "\\x%02x", (unsigned)(unsigned char)*text);
        text += length ? length : 1;
    }
}

/* ---- files ---- */

/* Writes what `put` says of the report. 0, or -1 with the error set. */
static inline int report_write(const char *path, const report *r,
                               int (*put)(FILE *out, const report *r, seqpar_error *error),
                               seqpar_error *error) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    int status = out ? put(out, r, error) : -1;
    if (out && ferror(out)) status = -1;
    if (out && fclose(out)) status = -1;
    if (!status) status = seqpar_file_write_atomic(path, text, (int64_t)bytes, error) ? -1 : 0;
    if (status && !error->status)
        seqpar_fail(error, SEQPAR_ERR_MEMORY, "%.300s: no memory for it", path);
    free(text);
    return status;
}
#endif
