/* SPDX-License-Identifier: MIT OR Unlicense */
/* html.h - a verdict as a self-contained HTML page: what is right and wrong, which mistakes,
 * and pictures of where. The page is also well-formed XML. */
#ifndef ORACLE_HTML_H
#define ORACLE_HTML_H
#include "report_pictures.h"

static const char html_style[] =
    ":root{--paper:#fff;--ink:#1c2128;--pale:#5d6673;--line:#d5dae1;--back:#eef0f3;"
    "--even:#c9d0d9;--odd:#e0e5eb;--right:#1a7f37;--wrong:#cf222e;--marginal:#9a6700;"
    "--insufficient:#4c6a92;--label:#dfe3e8;--h0:#b9dcc0;--h1:#fde9a9;--h2:#fdd17a;"
    "--h3:#fdb04e;--h4:#f68a35;--h5:#e35d2a;--h6:#bf2f22;--h7:#7f0d1a;--nan:#c026d3}\n"
    "@media screen and (prefers-color-scheme:dark){:root{--paper:#14171c;--ink:#e3e7ec;"
    "--pale:#98a2b0;--line:#3a414b;--back:#22272e;--even:#4b5562;--odd:#353d47;"
    "--right:#2f9e4f;--wrong:#e5484d;--marginal:#b7861b;--insufficient:#5b82b8;"
    "--label:#323943;--h0:#2f5a3c;--h1:#5b3a1a;--h2:#7d4a1b;--h3:#a35c1c;--h4:#c97424;"
    "--h5:#ea9440;--h6:#ffbb70;--h7:#ffe6b3;--nan:#e879f9}}\n"
    "*{box-sizing:border-box}html{-webkit-print-color-adjust:exact;print-color-adjust:exact}"
    "body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}"
    "main{max-width:1180px;margin:0 auto;padding:24px 20px 48px}\n"
    "h1{margin:0 0 8px;font-size:22px}h2{margin:36px 0 8px;font-size:18px}"
    "h3{margin:22px 0 4px;font-size:15px}p{margin:4px 0}p,.note,.legend{max-width:1120px}"
    ".note,.legend,.facts{color:var(--pale);font-size:13px}\n"
    ".badge{display:inline-block;padding:6px 14px;border-radius:6px;color:#fff;"
    "overflow-wrap:anywhere}.mark{display:inline-block;padding:0 8px;border-radius:4px;"
    "color:#fff;font-size:13px}.right{background:var(--right)}.wrong{background:var(--wrong)}"
    ".marginal,.unjudged{background:var(--marginal)}"
    ".insufficient{background:var(--insufficient)}"
    ".none{color:var(--pale);padding:0}\n"
    "table{border-collapse:collapse;width:100%}th,td{border-top:1px solid var(--line);"
    "padding:6px 10px 6px 0;text-align:left;vertical-align:top;overflow-wrap:anywhere}"
    "th,td:nth-child(2){white-space:nowrap}td p{margin:0 0 2px}thead th{color:var(--pale);"
    "font-weight:normal;font-size:13px;border:0}\n"
    ".mistake{border-left:4px solid var(--wrong);padding:2px 0 2px 14px;margin:14px 0}"
    ".mistake h3{margin:0}dl{display:grid;grid-template-columns:76px 1fr;gap:4px 12px;"
    "margin:6px 0}dt{color:var(--pale)}dd{margin:0;overflow-wrap:anywhere}"
    "code{font:13px ui-monospace,monospace;background:var(--back);padding:1px 5px;"
    "border-radius:4px}a{color:inherit}\n"
    "figure{margin:14px 0 26px;break-inside:avoid}.scroll{overflow-x:auto}"
    "svg{display:block;width:100%;min-width:760px;height:auto}"
    "svg text{font:11px system-ui,sans-serif;fill:var(--ink)}.at{text-anchor:end}"
    ".on,.in{text-anchor:middle}svg .in{fill:#14171c}svg .pale{fill:var(--pale)}"
    "path,rect{shape-rendering:crispEdges}\n"
    ".back{fill:var(--back)}.rank{fill:var(--c);background:var(--c)}.bad{fill:var(--wrong);"
    "background:var(--wrong)}.maybe{fill:var(--marginal);background:var(--marginal)}"
    ".even{fill:var(--even)}.odd{fill:var(--odd)}.padding{fill:none;stroke:var(--line)}"
    ".fine{fill:var(--right);background:var(--right)}"
    ".line{stroke:var(--ink);stroke-width:1;opacity:.45}.tick{stroke:var(--pale)}"
    ".limit{stroke:var(--ink);stroke-width:1.5;stroke-dasharray:5 3}.grid{stroke:var(--line)}\n"
    ".h-1{fill:var(--label);background:var(--label)}.h0{fill:var(--h0);background:var(--h0)}"
    ".h1{fill:var(--h1);background:var(--h1)}.h2{fill:var(--h2);background:var(--h2)}"
    ".h3{fill:var(--h3);background:var(--h3)}.h4{fill:var(--h4);background:var(--h4)}"
    ".h5{fill:var(--h5);background:var(--h5)}.h6{fill:var(--h6);background:var(--h6)}"
    ".h7{fill:var(--h7);background:var(--h7)}.h8{fill:var(--nan);background:var(--nan)}\n"
    ".key{white-space:nowrap;margin-right:14px}.key i{display:inline-block;width:12px;"
    "height:12px;margin-right:4px;vertical-align:-1px;border-radius:2px}\n"
    "@media print{body{font-size:12px}main{padding:0}svg{min-width:0}"
    ".scroll{overflow:visible}tr,.mistake{break-inside:avoid}h2,h3{break-after:avoid}}";

/* ---- text ---- */

/* The badge of a right step is not green if gradients were not judged. */
static inline void put_badge(FILE *out, const report *r) {
    int unjudged = r->v->kind == VERDICT_RIGHT && !r->stages[GRADIENTS].judged;
    fprintf(out, "<h1 class=\"badge %s%s\">", verdict_word(r->v), unjudged ? " unjudged" : "");
    put_headline(out, r);
    fprintf(out, "</h1>\n");
}

/* What the headline means. */
static inline void put_summary(FILE *out, const report *r) {
    fprintf(out, "<p>%s. %d of %d stages were judged.</p>\n",
            r->v->kind == VERDICT_WRONG   ? "The step is wrong"
            : r->v->kind == VERDICT_RIGHT ? "All that was judged is right"
            : r->v->kind == VERDICT_MARGINAL
                ? "Beyond the limit that rounding may reach, but by less than half of it"
                : "Nothing is wrong in what was judged, and it is not enough for a pass: the "
                  "evidence says what to give",
            stages_judged(r->stages), stages_listed(r->stages));
}

static inline void put_facts(FILE *out, const report *r, const dump *d) {
    fprintf(out, "<p class=\"facts\">Dump <code>");
    put_text(out, r->folder);
    fprintf(out,
            "</code>: world %lld, sp %lld (ranks that share a sequence), replicas %lld, "
            "micro-batches %lld, objective %s",
            (long long)d->world, (long long)d->sp, (long long)(d->world / d->sp),
            (long long)d->accumulation, word_facts[FACT_OBJECTIVE].words[d->facts.objective]);
    if (r->wanted || r->model) {
        fprintf(out, r->model ? "; against the model <code>" : "; against the dump <code>");
        put_text(out, r->model ? r->model : r->wanted);
        fprintf(out, "</code>");
    }
    fprintf(out, ".</p>\n");
}

static inline void put_stage(FILE *out, const stage *s, int i) {
    static const char *const signs[] = {"\u2713", "\u2717", "", "", "?", "~"};
    const char *word = s->judged ? verdict_word(&s->v) : "none";
    fprintf(out, "<tr data-stage=\"%s\"><th>%s</th><td><span class=\"mark %s\">%s %s</span>",
            stage_names[i].name, stage_names[i].name, word, s->judged ? signs[s->v.kind] : "",
            s->judged ? word : "not judged");
    fprintf(out, "</td><td>");
    for (int k = 0; s->judged && k < s->v.count; k++)
        fprintf(out, "%s<a href=\"#%s\">%s</a>%s", k ? ", " : "<p>", s->v.named[k]->name,
                s->v.named[k]->name, k + 1 == s->v.count ? "</p>" : "");
    if (!s->judged) fprintf(out, "<p class=\"note\">it takes ");
    if (!s->judged) put_text(out, stage_needs(s, i));
    if (!s->judged) fprintf(out, "</p>");
    for (int k = 0; s->judged && k < s->v.lines; k++) {
        fprintf(out, "<p>");
        put_text(out, s->v.line[k]);
        fprintf(out, "</p>");
    }
    fprintf(out, "</td></tr>\n");
}

static inline void put_stages(FILE *out, const stage *stages) {
    fprintf(out, "<h2>Stages</h2>\n<p class=\"note\">In the order of the data: the first that "
                 "is wrong is where to look first.</p>\n<table><thead><tr><th>stage</th>"
                 "<th>verdict</th><th>evidence</th></tr></thead><tbody>\n");
    for (int i = 0; i < STAGES; i++)
        if (stage_is_listed(&stages[i])) put_stage(out, &stages[i], i);
    fprintf(out, "</tbody></table>\n");
}

static inline int stage_names_it(const stage *s, const mistake *m) {
    for (int k = 0; s->judged && k < s->v.count; k++)
        if (s->v.named[k] == m) return 1;
    return 0;
}

static inline void put_namers(FILE *out, const stage *stages, const mistake *m) {
    int count = 0;
    for (int i = 0; i < STAGES; i++)
        if (stage_names_it(&stages[i], m))
            fprintf(out, "%s%s", count++ ? ", " : "", stage_names[i].name);
}

static inline void put_mistake(FILE *out, const mistake *m, const stage *stages) {
    fprintf(out,
            "<section class=\"mistake\" id=\"%s\" data-mistake=\"%s\"><h3>%s</h3>\n"
            "<p class=\"note\">named by: ",
            m->name, m->name, m->name);
    put_namers(out, stages, m);
    fprintf(out, "</p>\n<dl>");
    for (int i = 0; i < MISTAKE_FIELDS; i++) {
        const char *text = mistake_field(m, i), *key = mistake_fields[i].key;
        int formula = !strcmp(key, "right") || !strcmp(key, "wrong");
        fprintf(out, "<dt>%s</dt><dd>%s", mistake_fields[i].label, formula ? "<code>" : "");
        put_text(out, text ? text : "in no public thread that we know");
        fprintf(out, "%s</dd>\n", formula ? "</code>" : "");
    }
    fprintf(out, "</dl></section>\n");
}

/* Explains the headline's mistakes first, then those that other stages name. */
static inline void put_mistakes(FILE *out, const report *r) {
    verdict all = *r->v;
    for (int i = 0; i < STAGES; i++)
        for (int k = 0; r->stages[i].judged && k < r->stages[i].v.count; k++)
            verdict_name(&all, r->stages[i].v.named[k]);
    if (all.count || all.kind == VERDICT_WRONG)
        fprintf(out, "<h2>Which mistake%s</h2>\n", all.count > 1 ? "s" : "");
    if (r->v->count > 1 && r->v->all)
        fprintf(out, "<p>The first %d together give the numbers of the dump.</p>\n",
                r->v->count);
    else if (r->v->count > 1)
        fprintf(out,
                "<p>Each of the first %d gives the numbers of the dump, which do not tell "
                "which of them it is.</p>\n",
                r->v->count);
    if (r->v->kind == VERDICT_WRONG && !r->v->count)
        fprintf(out, "<p>None that is known gives these numbers. The evidence says where it "
                     "first shows.</p>\n");
    for (int i = 0; i < all.count; i++) put_mistake(out, all.named[i], r->stages);
}

/* ---- the page ---- */

static inline void put_head(FILE *out, const report *r) {
    fprintf(out, "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>\n<meta "
                 "name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<meta "
                 "name=\"color-scheme\" content=\"light dark\"/>\n<title>");
    put_headline(out, r);
    fprintf(out, " - seqpar-verify</title>\n<style>%s</style></head>\n<body><main>\n",
            html_style);
}

/* `put` of report_write. 0, or -1 with the error. */
static inline int html_put(FILE *out, const report *r, seqpar_error *error) {
    dump d;
    int status = dump_open(&d, r->folder);
    d.attention_off = r->more ? r->more->attention_off : NULL; /* lent */
    put_head(out, r);
    put_badge(out, r);
    put_summary(out, r);
    if (!status) put_facts(out, r, &d);
    put_mistakes(out, r);
    put_stages(out, r->stages);
    if (!status) status = put_rows(out, r, &d);
    put_gradients(out, r);
    fprintf(out, "</main></body></html>\n");
    if (status) *error = d.error;
    d.attention_off = NULL;
    dump_close(&d);
    return status;
}
#endif
