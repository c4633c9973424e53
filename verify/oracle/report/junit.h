/* SPDX-License-Identifier: MIT OR Unlicense */
/* junit.h - a verdict as JUnit XML, for test reports of CI: one suite, one test case per stage.
 * Wrong is a failure; not judged and insufficient are skipped; marginal passes, and its
 * system-out says that it is marginal. */
#ifndef ORACLE_JUNIT_H
#define ORACLE_JUNIT_H
#include "report.h"

static inline int junit_fails(const stage *s) {
    return s->judged && s->v.kind == VERDICT_WRONG;
}

static inline int junit_is_skipped(const stage *s) {
    return stage_is_listed(s) && (!s->judged || s->v.kind == VERDICT_INSUFFICIENT);
}

static inline int junit_count(const stage *stages, int (*is)(const stage *s)) {
    int count = 0;
    for (int i = 0; i < STAGES; i++) count += is(&stages[i]);
    return count;
}

static inline void junit_lines(FILE *out, const verdict *v) {
    for (int i = 0; i < v->lines; i++) {
        put_text(out, v->line[i]);
        fputc('\n', out);
    }
}

static inline void junit_failure(FILE *out, const verdict *v) {
    fprintf(out, "      <failure type=\"wrong\" message=\"");
    verdict_title(out, v);
    fprintf(out, "\">");
    junit_lines(out, v);
    for (int i = 0; i < v->count; i++) {
        fprintf(out, "%s: ", v->named[i]->name);
        put_text(out, v->named[i]->cause);
        fprintf(out, " Fix: ");
        put_text(out, v->named[i]->fix);
        fputc('\n', out);
    }
    fprintf(out, "</failure>\n");
}

static inline void junit_skipped(FILE *out, const stage *s, const char *needs) {
    fprintf(out, "      <skipped message=\"%s", s->judged ? "insufficient" : "not judged");
    if (!s->judged) fprintf(out, ": it takes ");
    if (!s->judged) put_text(out, needs);
    for (int i = 0; s->judged && i < s->v.lines; i++) {
        fprintf(out, i ? "; " : ": ");
        put_text(out, s->v.line[i]);
    }
    fprintf(out, "\"/>\n");
}

/* Verdict and evidence of a case that passed. */
static inline void junit_output(FILE *out, const verdict *v) {
    fprintf(out, "      <system-out>%s\n", verdict_word(v));
    junit_lines(out, v);
    fprintf(out, "</system-out>\n");
}

static inline void junit_case(FILE *out, const stage *s, int i) {
    fprintf(out, "    <testcase classname=\"seqpar-verify\" name=\"%s\" time=\"0\">\n",
            stage_names[i].name);
    if (junit_is_skipped(s))
        junit_skipped(out, s, stage_needs(s, i));
    else if (junit_fails(s))
        junit_failure(out, &s->v);
    else
        junit_output(out, &s->v);
    fprintf(out, "    </testcase>\n");
}

/* `put` of report_write. It cannot fail. */
static inline int junit_put(FILE *out, const report *r, seqpar_error *error) {
    int failures = junit_count(r->stages, junit_fails);
    int skipped = junit_count(r->stages, junit_is_skipped);
    fprintf(out, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    fprintf(out, "<testsuites tests=\"%d\" failures=\"%d\" errors=\"0\" skipped=\"%d\">\n",
            stages_listed(r->stages), failures, skipped);
    fprintf(out,
            "  <testsuite name=\"seqpar-verify\" tests=\"%d\" failures=\"%d\" errors=\"0\" "
            "skipped=\"%d\" time=\"0\">\n    <properties>\n      <property name=\"dump\" "
            "value=\"",
            stages_listed(r->stages), failures, skipped);
    put_text(out, r->folder);
    fprintf(out, "\"/>\n      <property name=\"verdict\" value=\"");
    put_headline(out, r);
    fprintf(out, "\"/>\n    </properties>\n");
    for (int i = 0; i < STAGES; i++)
        if (stage_is_listed(&r->stages[i])) junit_case(out, &r->stages[i], i);
    fprintf(out, "  </testsuite>\n</testsuites>\n");
    return (void)error, 0;
}
#endif
