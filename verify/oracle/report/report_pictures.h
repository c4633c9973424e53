/* SPDX-License-Identifier: MIT OR Unlicense */
/* report_pictures.h - pictures of a report: selected rows, each with title, legend and a
 * description in words; and gradients, tensor by tensor. */
#ifndef ORACLE_REPORT_PICTURES_H
#define ORACLE_REPORT_PICTURES_H
#include "row_picture.h"

enum { ROWS_SHOWN = 4, TENSORS_SHOWN = 40, CHART_LEFT = 330, CHART_WIDE = 640 };

/* ---- which rows ---- */

typedef struct gallery {
    FILE *out;
    const report *r;
    dump *d;
    int64_t rows, shown;
    char *bad, *show;         /* (rows) */
    double within, low, most; /* as in strips: one scale of log-prob errors for all rows */
    double squares, labels;   /* right log-probs: sum of squares, count */
} gallery;

static inline strips strips_of(const gallery *g, int64_t i, const dump_row *row) {
    return (strips){.out = g->out,
                    .d = g->d,
                    .stages = g->r->stages,
                    .row = row,
                    .number = i,
                    .first = i / g->d->accumulation * g->d->sp,
                    .right = g->r->more->logp ? g->r->more->logp[i] : NULL,
                    .within = g->within,
                    .low = g->low,
                    .most = g->most};
}

static inline int read_row(const gallery *g, int64_t i, dump_row *row) {
    dump_places found;
    return dump_read_row(g->d, i / g->d->accumulation, i % g->d->accumulation, row, &found);
}

/* Notes whether something is wrong in a row, and extends the scale of colours to its errors.
   *worst: the row with the largest error so far. */
static inline void survey_row(gallery *g, const strips *s, int64_t *worst) {
    for (int m = 0; m < MARKS; m++)
        if (mark_counts(s, m) && tally_of(s, marks[m].is).count) g->bad[s->number] = 1;
    for (int64_t t = 0; t < s->row->tokens; t++) {
        double distance;
        if (!logp_counts(s, t)) continue;
        g->squares += s->right[t] * s->right[t];
        g->labels++;
        distance = logp_error(s, t);
        if (!isfinite(distance)) g->bad[s->number] = 1;
        if (!isfinite(distance) || distance <= g->most) continue;
        g->most = distance;
        *worst = s->number;
    }
}

/* Selects up to ROWS_SHOWN rows: first those with something wrong, then others. */
static inline void choose_rows(gallery *g, int64_t worst) {
    if (worst >= 0 && g->r->stages[LOG_PROBS].v.kind == VERDICT_WRONG) g->bad[worst] = 1;
    for (int bad = 1; bad >= 0; bad--)
        for (int64_t i = 0; i < g->rows && g->shown < ROWS_SHOWN; i++)
            if (g->bad[i] == bad && !g->show[i]) g->shown += g->show[i] = 1;
}

static inline int survey(gallery *g) {
    int64_t worst = -1;
    for (int64_t i = 0; i < g->rows; i++) {
        dump_row row;
        int status = read_row(g, i, &row);
        strips s = strips_of(g, i, &row);
        if (!status && row.rank) status = strips_open(&s);
        if (!status && row.rank) survey_row(g, &s, &worst);
        if (row.rank) strips_close(&s);
        dump_row_free(&row);
        if (status) return -1;
    }
    choose_rows(g, worst);
    g->within = g->r->more->logp_limit * sqrt(g->squares / (g->labels > 0 ? g->labels : 1));
    if (g->within < 1e-12) g->within = 1e-12;
    if (g->most < 30 * g->within) g->most = 30 * g->within; /* small errors stay pale */
    g->low = g->most / 1000 > g->within ? g->most / 1000 : g->within;
    return 0;
}

/* ---- a row ---- */

static inline double lane_height(const strips *s) {
    return s->d->sp <= 16 ? 12 : s->d->sp < 192 ? 192.0 / (double)s->d->sp : 1;
}

/* Draws the strips from top to bottom. Returns where they end; draw 0: returns only that. */
static inline double put_lanes(strips *s, const tally *y, int draw) {
    double at = 54, lane = lane_height(s);
    for (int m = 0; m < MARKS; m++)
        if (y[m].count) {
            if (draw) put_mark(s, m, at, 14);
            at += 18;
        }
    if (!s->right || !s->row->logp) return at;
    at += 6;
    for (int64_t m = 0; m < s->d->sp; m++, at += lane + 1) {
        char label[40];
        snprintf(label, sizeof label, "%srank %lld", m ? "" : "log-prob, ",
                 (long long)(s->first + m));
        if (draw && (lane >= 11 || !m)) put_label(s, at + lane - 2, label);
        if (draw) put_heat(s, m, at, lane);
    }
    return at + 4;
}

static inline void put_svg(strips *s, const tally *y) {
    double bottom = put_lanes(s, y, 0);
    fprintf(s->out,
            "<div class=\"scroll\"><svg viewBox=\"0 0 %d %.0f\" role=\"img\" "
            "aria-label=\"tokens of row %lld by rank\">\n",
            STRIP_LEFT + STRIP_WIDE + STRIP_RIGHT, bottom + 22, (long long)s->number);
    put_label(s, 38, "rank");
    put_back(s, 17, 32);
    for (int64_t m = 0; m < s->d->sp; m++) put_member(s, m, 17, 32);
    put_rank_numbers(s, 37);
    put_lanes(s, y, 1);
    put_documents(s, bottom);
    put_scale(s, bottom);
    fprintf(s->out, "</svg></div>\n");
}

static inline void put_key(FILE *out, const char *kind, const char *text) {
    fprintf(out, "<span class=\"key\"><i class=\"%s\"></i>%s</span>", kind, text);
}

static inline void put_heat_keys(const strips *s) {
    char text[64];
    fprintf(s->out, "<br/>error of a log-prob: ");
    put_key(s->out, "h-1", "no label");
    snprintf(text, sizeof text, "up to %.2g: rounding", s->within);
    put_key(s->out, "h0", text);
    for (int level = 1; level <= HEAT_MOST; level++) {
        double from = s->low * pow(s->most / s->low, (level - 1.0) / HEAT_MOST);
        char kind[8];
        snprintf(kind, sizeof kind, "h%d", level);
        snprintf(text, sizeof text, "%s%.2g", level > 1 ? "" : "from ", from);
        put_key(s->out, kind, text);
    }
    put_key(s->out, "h8", "NaN");
}

static inline void put_row_legend(const strips *s, const tally *y) {
    FILE *out = s->out;
    int bad = 0, maybe = 0;
    fprintf(out, "<p class=\"legend\">");
    for (int64_t m = 0; m < s->d->sp && m < 16; m++) {
        char colour[40];
        fprintf(out,
                "<span class=\"key\"><i class=\"rank\" style=\"--c:%s\"></i>rank %lld</span>",
                rank_colour(colour, m), (long long)(s->first + m));
    }
    if (s->d->sp > 16) fprintf(out, "<span class=\"key\">and so on</span>");
    for (int m = 0; m < MARKS; m++) {
        int wrong = s->stages[marks[m].stage].v.kind == VERDICT_WRONG;
        bad |= y[m].count && wrong;
        maybe |= y[m].count && !wrong;
    }
    if (bad) put_key(out, "bad", "wrong");
    if (maybe) put_key(out, "maybe", "may be wrong");
    if (s->right && s->row->logp) put_heat_keys(s);
    fprintf(out, "</p>\n");
}

static inline void say_row(const strips *s) {
    fprintf(s->out, "<p>%lld tokens", (long long)s->row->tokens);
    if (s->row->docs)
        fprintf(s->out, " of %lld document%s", (long long)s->row->docs,
                s->row->docs > 1 ? "s" : "");
    fprintf(s->out,
            " on %lld rank%s; %lld cut%s, where a rank's next row is not the "
            "document's next token.",
            (long long)s->d->sp, s->d->sp > 1 ? "s" : "", (long long)s->cuts,
            s->cuts == 1 ? "" : "s");
    if (row_end(s->row) < s->row->tokens)
        fprintf(s->out, " What stands behind token %lld is padding.",
                (long long)row_end(s->row) - 1);
    if (s->per > 1) fprintf(s->out, " A column is %lld tokens.", (long long)s->per);
    if (s->row->docs > STRIP_COLUMNS) fprintf(s->out, " Documents are too many to be drawn.");
    fprintf(s->out, "</p>\n");
}

static inline void say_heat(const strips *s) {
    tally y = tally_of(s, mark_logp);
    int64_t worst = -1, nan = 0;
    char place[160];
    for (int64_t t = 0; t < s->row->tokens; t++) {
        double distance = logp_counts(s, t) ? logp_error(s, t) : 0;
        nan += isnan(distance);
        if (distance > (worst < 0 ? 0 : logp_error(s, worst))) worst = t;
    }
    fprintf(s->out, "<p><b>log-probs</b>: ");
    if (!y.count) fprintf(s->out, "none is farther off than rounding makes it");
    if (y.count) fprintf(s->out, "%lld off by more than %.2g: ", (long long)y.count, s->within);
    if (y.count) tally_say(s->out, &y, s);
    if (nan) fprintf(s->out, "; %lld of them NaN", (long long)nan);
    if (worst >= 0)
        fprintf(s->out, ". The farthest, by %.3g, is at %s", logp_error(s, worst),
                place_text(place, sizeof place, s->row, worst));
    fprintf(s->out, ".</p>\n");
}

/* Says in words what the marks show. */
static inline void say_marks(const strips *s, const tally *y) {
    const char *before = "";
    int64_t all = 0;
    for (int m = 0; m < MARKS; m++) {
        all += y[m].count;
        if (!y[m].count) continue;
        fprintf(s->out, "<p><b>%s</b>, %lld time%s: ", marks[m].what, (long long)y[m].count,
                y[m].count > 1 ? "s" : "");
        tally_say(s->out, &y[m], s);
        fprintf(s->out, ".</p>\n");
    }
    for (int i = PLACES; i <= LABELS && !all; i++)
        if (s->stages[i].judged) {
            fprintf(s->out, "%s%s", *before ? before : "<p>Nothing is wrong in this row's ",
                    stage_names[i].name);
            before = ", ";
        }
    if (*before) fprintf(s->out, ".</p>\n");
}

static inline void put_row(strips *s) {
    tally y[MARKS];
    int64_t a = s->d->accumulation;
    for (int m = 0; m < MARKS; m++)
        y[m] = mark_counts(s, m) ? tally_of(s, marks[m].is) : (tally){.count = 0};
    fprintf(s->out,
            "<figure class=\"row\" data-row=\"%lld\"><h3>Row %lld: replica %lld, micro-batch "
            "%lld</h3>\n",
            (long long)s->number, (long long)s->number, (long long)(s->number / a),
            (long long)(s->number % a));
    say_row(s);
    put_svg(s, y);
    put_row_legend(s, y);
    fprintf(s->out, "<figcaption>");
    say_marks(s, y);
    if (s->right && s->row->logp) say_heat(s);
    fprintf(s->out, "</figcaption></figure>\n");
}

/* A row without index, or without a token, gets a sentence in place of a picture. 0, or -1
   with d->error. */
static inline int put_chosen(gallery *g) {
    fprintf(g->out, "<h2>Who holds which token, and what is wrong where</h2>\n<p "
                    "class=\"note\">From left to right the tokens of a row as it was before "
                    "the split; under them, what is wrong by the rules of the stages.</p>\n");
    for (int64_t i = 0; i < g->rows; i++) {
        dump_row row;
        strips s = strips_of(g, i, &row);
        int status;
        if (!g->show[i]) continue;
        status = read_row(g, i, &row);
        if (!status && row.rank && row.tokens) status = strips_open(&s);
        if (!status && row.rank && row.tokens)
            put_row(&s);
        else if (!status)
            fprintf(g->out,
                    "<p>Row %lld: the dump does not say who holds which token; that "
                    "takes %s.</p>\n",
                    (long long)i, stage_names[PLACES].needs);
        strips_close(&s);
        dump_row_free(&row);
        if (status) return -1;
    }
    if (g->shown < g->rows)
        fprintf(g->out,
                "<p class=\"note\" data-left=\"%lld\">%lld of %lld rows are left out; "
                "those shown are the first that have something wrong, then the first."
                "</p>\n",
                (long long)(g->rows - g->shown), (long long)(g->rows - g->shown),
                (long long)g->rows);
    return 0;
}

/* 0, or -1 with d->error. */
static inline int put_rows(FILE *out, const report *r, dump *d) {
    gallery g = {.out = out, .r = r, .d = d, .rows = d->world / d->sp * d->accumulation};
    int status = -1;
    g.bad = (char *)calloc((size_t)g.rows, 1);
    g.show = (char *)calloc((size_t)g.rows, 1);
    if (g.bad && g.show)
        status = survey(&g) || put_chosen(&g) ? -1 : 0;
    else
        seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for pictures");
    free(g.bad);
    free(g.show);
    return status;
}

/* ---- gradients ---- */

typedef struct chart {
    FILE *out;
    const details *of;
    double low, high; /* ends of the scale, which is logarithmic */
} chart;

static inline double distance_of(const details *of, int64_t i) {
    return distance_from(&of->each[i].like, 1);
}

/* NaN is farther than anything. */
static inline int is_farther(double a, double b) { return isnan(a) ? !isnan(b) : a > b; }

/* Whether tensor i is among the TENSORS_SHOWN farthest. Of tensors that are equally far, the
   earlier are shown. */
static inline int chart_shows(const details *of, int64_t i) {
    int64_t before = 0;
    for (int64_t k = 0; of->n > TENSORS_SHOWN && k < of->n; k++)
        before += is_farther(distance_of(of, k), distance_of(of, i)) ||
                  (k < i && !is_farther(distance_of(of, i), distance_of(of, k)));
    return before < TENSORS_SHOWN;
}

static inline double chart_x(const chart *c, double distance) {
    double share = isnan(distance) ? 1 : log(distance / c->low) / log(c->high / c->low);
    return CHART_LEFT + CHART_WIDE * (share < 0.002 ? 0.002 : share > 1 ? 1 : share);
}

/* The end of a long name tells more than its beginning. */
static inline void put_tensor_name(FILE *out, const char *name) {
    size_t length, most = 50;
    if (after_prefix(name, "grad.")) name = after_prefix(name, "grad.");
    length = strlen(name);
    if (length > most) {
        name += length - most;
        while ((*name & 0xc0) == 0x80) name++;
        fputs("\u2026", out);
    }
    put_text(out, name);
}

static inline void put_bar(const chart *c, int64_t i, double y) {
    const gradient_pair *one = &c->of->each[i];
    double distance = distance_of(c->of, i);
    int fine = distance <= c->of->limit;
    fprintf(c->out, "<text class=\"at\" x=\"%d\" y=\"%.0f\">", CHART_LEFT - 8, y + 11);
    put_tensor_name(c->out, one->name);
    fprintf(c->out,
            "</text><rect class=\"%s\" data-tensor=\"%lld\" x=\"%d\" y=\"%.0f\" "
            "width=\"%.2f\" height=\"12\"><title>",
            fine ? "fine" : "bad", (long long)i, CHART_LEFT, y + 1,
            chart_x(c, distance) - CHART_LEFT);
    put_text(c->out, one->name);
    fprintf(c->out,
            ": %.3g away</title></rect><text class=\"pale\" x=\"%.1f\" y=\"%.0f\">%.2g, \u00d7 "
            "%.4g</text>\n",
            distance, CHART_LEFT + CHART_WIDE + 10.0, y + 11, distance,
            likeness_factor(&one->like));
}

static inline void put_chart_grid(const chart *c, double bottom) {
    int first = (int)lround(log10(c->low)), last = (int)lround(log10(c->high));
    int step = 1 + (last - first) / 10;
    for (int e = first; e <= last; e += step) {
        double x = chart_x(c, pow(10, e));
        fprintf(c->out,
                "<path class=\"grid\" d=\"M%.1f 16V%.0f\"/><text class=\"on pale\" x=\"%.1f\" "
                "y=\"%.0f\">%.0e</text>\n",
                x, bottom, x, bottom + 14, pow(10, e));
    }
}

static inline void put_limit(const chart *c, double bottom) {
    double limit = chart_x(c, c->of->limit);
    fprintf(c->out,
            "<path class=\"limit\" d=\"M%.1f 14V%.0f\"/><text class=\"on\" x=\"%.1f\" "
            "y=\"10\">limit %.3g</text>\n",
            limit, bottom, limit, c->of->limit);
}

static inline void put_chart(chart *c) {
    int64_t shown = c->of->n < TENSORS_SHOWN ? c->of->n : TENSORS_SHOWN;
    double y = 18, most = 10 * c->of->limit;
    for (int64_t i = 0; i < c->of->n; i++)
        if (isfinite(distance_of(c->of, i))) most = fmax(most, distance_of(c->of, i));
    c->low = pow(10, floor(log10(c->of->limit)) - 2);
    c->high = pow(10, ceil(log10(most)));
    fprintf(c->out,
            "<div class=\"scroll\"><svg viewBox=\"0 0 1100 %lld\" role=\"img\" "
            "aria-label=\"distance of gradients\">\n",
            (long long)(shown * 16 + 40));
    put_chart_grid(c, 20 + 16.0 * (double)shown);
    for (int64_t i = 0; i < c->of->n; i++)
        if (chart_shows(c->of, i)) {
            put_bar(c, i, y);
            y += 16;
        }
    put_limit(c, y + 2);
    fprintf(c->out, "</svg></div>\n");
}

/* A tensor whose distance is NaN counts as beyond the limit, and as the farthest. */
static inline void put_gradients(FILE *out, const report *r) {
    chart c = {.out = out, .of = r->more};
    int64_t n = r->more->n, beyond = 0, worst = 0;
    if (!n) return;
    for (int64_t i = 0; i < n; i++) {
        beyond += !(distance_of(r->more, i) <= r->more->limit);
        if (is_farther(distance_of(r->more, i), distance_of(r->more, worst))) worst = i;
    }
    fprintf(out, "<h2>Gradients, tensor by tensor</h2>\n<figure><p class=\"note\">How far each "
                 "is from the wanted one, relative to its norm, on a logarithmic scale; then "
                 "the factor that fits it best.</p>\n");
    put_chart(&c);
    fprintf(out, "<p class=\"legend\">");
    put_key(out, "fine", "within the limit");
    put_key(out, "bad", "beyond");
    fprintf(out,
            "</p>\n<figcaption><p>%lld of %lld tensors are beyond the limit. The farthest "
            "is <code>",
            (long long)beyond, (long long)n);
    put_text(out, r->more->each[worst].name);
    fprintf(out, "</code>, %.3g away.</p>", distance_of(r->more, worst));
    if (n > TENSORS_SHOWN)
        fprintf(out, "<p class=\"note\">Shown are the %d farthest of %lld.</p>", TENSORS_SHOWN,
                (long long)n);
    fprintf(out, "</figcaption></figure>\n");
}
#endif
