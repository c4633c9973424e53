/* SPDX-License-Identifier: MIT OR Unlicense */
/* report.h - what the HTML and JUnit reports share: their contents, text escaped for XML and
 * HTML, and a file that is written completely or not at all. */
#ifndef ORACLE_REPORT_H
#define ORACLE_REPORT_H
#include <limits.h>
#include <sys/stat.h>
#include "oracle/gradient/gradients.h"

typedef struct report {
    const char *folder, *wanted, *model; /* as given; NULL: not given */
    const stage *stages;                 /* (STAGES) */
    const verdict *v;                    /* on all stages together */
    const char *said; /* what was judged and what not; "": the verdict's title says it */
    const details *more;
} report;

/* ---- text ---- */

/* Escapes text for XML elements and attributes. Bytes that XML does not allow become text such
   as \x1b. */
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

/* "right: places, labels (2 of 12 stages); ...", or the verdict with what it names. */
static inline void put_headline(FILE *out, const report *r) {
    if (*r->said)
        fprintf(out, "%s: ", verdict_word(r->v));
    else
        verdict_title(out, r->v);
    put_text(out, r->said);
}

/* ---- files ---- */

/* Whether a report may be written to path: nothing is there, or an empty file, or an earlier
   report, which starts with `begin`. */
static inline int report_may_replace(const char *path, const char *begin) {
    struct stat is;
    char had[16] = "";
    size_t length = strlen(begin), count;
    FILE *in;
    /* Nothing is there; or it is no regular file, and writing it fails. */
    if (stat(path, &is) || !S_ISREG(is.st_mode)) return 1;
    if (!(in = fopen(path, "rb"))) return 1;
    count = fread(had, 1, length, in);
    fclose(in);
    return !count || (count == length && !memcmp(had, begin, length));
}

/* "a/b" -> "/.../a/b"; the file need not exist. 0, or -1: its folder does not exist. */
static inline int report_path(const char *path, char *to, size_t size) {
    const char *name = strrchr(path, '/');
    char folder[PATH_MAX], whole[PATH_MAX];
    if (realpath(path, whole)) return snprintf(to, size, "%s", whole) < (int)size ? 0 : -1;
    snprintf(folder, sizeof folder, "%.*s", name ? (int)(name - path) + 1 : 1,
             name ? path : ".");
    if (!realpath(folder, whole)) return -1;
    return snprintf(to, size, "%s/%s", whole, name ? name + 1 : path) < (int)size ? 0 : -1;
}

static inline int reports_are_same(const char *a, const char *b) {
    char one[2 * PATH_MAX], two[2 * PATH_MAX];
    return !strcmp(a, b) || (!report_path(a, one, sizeof one) &&
                             !report_path(b, two, sizeof two) && !strcmp(one, two));
}

/* Writes to path what `put` prints. 0, or -1 with the error set. */
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
