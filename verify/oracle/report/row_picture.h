/* SPDX-License-Identifier: MIT OR Unlicense */
/* row_picture.h - a row of the step as a picture (SVG): which rank holds which token, and
 * below, token by token, what is wrong by the rules of checks.h. A column is one token or
 * several. */
#ifndef ORACLE_ROW_PICTURE_H
#define ORACLE_ROW_PICTURE_H
#include "report.h"

enum { STRIP_LEFT = 116, STRIP_WIDE = 960, STRIP_RIGHT = 24, STRIP_COLUMNS = 1000 };
enum { HEAT_NONE = -2, HEAT_NO_LABEL, HEAT_WITHIN, HEAT_MOST = 7, HEAT_NAN };

typedef struct strips {
    FILE *out;
    dump *d;
    const stage *stages;
    const dump_row *row;
    int64_t number, first;    /* of the row in the step; the first rank that shares it */
    int64_t columns, per;     /* per: tokens of a column */
    int64_t cuts;             /* tokens that row_is_cut finds */
    int32_t *held;            /* (columns, sp + 1) [c][m]: tokens of column c on ranks < m */
    int32_t *holders;         /* (tokens) how often ranks' index tensors have the token */
    signed char *heat;        /* (columns) HEAT_..., or a level; of the rank that is drawn */
    const double *right;      /* right log-probs; NULL: not judged */
    double within, low, most; /* log-prob errors: limit of rounding; ends of the colour scale */
} strips;

/* ---- what is wrong ---- */

static inline int64_t mark_position(const strips *s, int64_t t) {
    return s->row->positions && token_differs(s->row, s->row->positions, position_right, t);
}
static inline int64_t mark_label(const strips *s, int64_t t) {
    return s->row->labels && s->row->ids && label_differs(s->row, label_right, t);
}
static inline int64_t mark_gap(const strips *s, int64_t t) {
    return s->row->labels && s->row->ids && s->row->rank[t] >= 0 && row_is_cut(s->row, t) &&
           label_gap(s->row, t);
}
static inline int64_t mark_twice(const strips *s, int64_t t) {
    return s->holders[t] > 1 ? s->holders[t] - 1 : 0;
}
static inline int64_t mark_nobody(const strips *s, int64_t t) { return s->row->rank[t] < 0; }

static inline int64_t mark_attention(const strips *s, int64_t t, int tensor) {
    unsigned char *const *of = s->d->attention_off;
    return of && of[s->number] ? of[s->number][t] >> tensor & 1 : 0;
}
static inline int64_t mark_out(const strips *s, int64_t t) {
    return mark_attention(s, t, ATTEND_OUT) || mark_attention(s, t, ATTEND_LSE);
}
static inline int64_t mark_dq(const strips *s, int64_t t) {
    return mark_attention(s, t, ATTEND_DQ);
}
static inline int64_t mark_dk(const strips *s, int64_t t) {
    return mark_attention(s, t, ATTEND_DK);
}
static inline int64_t mark_dv(const strips *s, int64_t t) {
    return mark_attention(s, t, ATTEND_DV);
}

static const struct mark {
    const char *label, *what;
    int stage;
    int64_t (*is)(const strips *s, int64_t t); /* how often */
} marks[] = {
    {"nobody", "held by nobody", PLACES, mark_nobody},
    {"twice", "held once more", PLACES, mark_twice},
    {"position", "position differs", POSITIONS, mark_position},
    {"label", "label differs", LABELS, mark_label},
    {"cut, no label", "no label at a cut, though its neighbours have one", LABELS, mark_gap},
    {"out, lse", "attention's out or lse differs at a query", ATTENTION, mark_out},
    {"dq", "dq differs at a query", ATTENTION, mark_dq},
    {"dk", "dk differs at a key", ATTENTION, mark_dk},
    {"dv", "dv differs at a key", ATTENTION, mark_dv}};
enum { MARKS = sizeof marks / sizeof *marks };

/* Marks of a stage that passed are not drawn: mark_gap also finds a masked token that lies at
   a cut, which is right. */
static inline int mark_counts(const strips *s, int m) {
    const stage *of = &s->stages[marks[m].stage];
    return of->judged && of->v.kind != VERDICT_RIGHT;
}

static inline double logp_error(const strips *s, int64_t t) {
    return fabs(s->row->logp[t] - s->right[t]);
}
static inline int logp_counts(const strips *s, int64_t t) {
    return s->right && s->row->logp && s->row->labels && t < row_end(s->row) &&
           s->row->rank[t] >= 0 && s->row->labels[t] != DUMP_IGNORE;
}
static inline int64_t mark_logp(const strips *s, int64_t t) {
    return logp_counts(s, t) && !(logp_error(s, t) <= s->within);
}

static inline int heat_of(const strips *s, int64_t t) {
    double distance;
    int level;
    if (!logp_counts(s, t)) return HEAT_NO_LABEL;
    distance = logp_error(s, t);
    if (isnan(distance)) return HEAT_NAN;
    if (distance <= s->within) return HEAT_WITHIN;
    if (distance >= s->most) return HEAT_MOST;
    level = 1 + (int)floor(HEAT_MOST * log(distance / s->low) / log(s->most / s->low));
    return level < 1 ? 1 : level > HEAT_MOST ? HEAT_MOST : level;
}

/* ---- where marks are ---- */

typedef struct tally {
    int64_t count, first, at_cuts, ranks;
    char which[64]; /* ranks, if they are few */
} tally;

static inline int next_to_cut(const dump_row *row, int64_t t) {
    return row_is_cut(row, t) || (t && row_is_cut(row, t - 1));
}

static inline void tally_ranks(tally *y, const strips *s, const char *has) {
    size_t at = 0;
    for (int64_t m = 0; m < s->d->sp; m++)
        if (has[m] && y->ranks++ < 4)
            at += (size_t)snprintf(y->which + at, sizeof y->which - at, "%s%lld",
                                   at ? ", " : "", (long long)(s->first + m));
}

static inline tally tally_of(const strips *s, int64_t (*is)(const strips *s, int64_t t)) {
    char *has = (char *)calloc((size_t)s->d->sp + 1, 1);
    tally y = {.first = -1};
    for (int64_t t = 0; t < s->row->tokens; t++) {
        int64_t times = is(s, t);
        if (!times) continue;
        if (!y.count) y.first = t;
        y.count += times;
        if (s->row->rank[t] < 0) continue;
        y.at_cuts += next_to_cut(s->row, t);
        if (has) has[s->row->rank[t] - s->first] = 1;
    }
    if (has) tally_ranks(&y, s, has);
    free(has);
    return y;
}

static inline void tally_say(FILE *out, const tally *y, const strips *s) {
    fprintf(out, "%stoken %lld", y->count > 1 ? "the first is " : "", (long long)y->first);
    if (y->ranks == s->d->sp && s->d->sp > 1)
        fprintf(out, "; on all ranks");
    else if (y->ranks == 1)
        fprintf(out, "; on rank %s alone", y->which);
    else if (y->ranks > 4)
        fprintf(out, "; on %lld of %lld ranks", (long long)y->ranks, (long long)s->d->sp);
    else if (y->ranks)
        fprintf(out, "; on ranks %s", y->which);
    if (4 * s->cuts > s->row->tokens) return; /* so many that most tokens are next to one */
    if (y->at_cuts == y->count)
        fprintf(out, "; %snext to a cut", y->count > 1 ? "all of them " : "");
    if (y->at_cuts && y->at_cuts < y->count)
        fprintf(out, "; %lld of them next to a cut", (long long)y->at_cuts);
}

/* ---- opening ---- */

static inline void strips_close(strips *s) {
    free(s->held);
    free(s->holders);
    free(s->heat);
}

/* If the rank changes from token to token, a column has a multiple of sp tokens: other widths
   would show a moire pattern. */
static inline void strips_columns(strips *s) {
    int64_t turns = 0, tokens = s->row->tokens, sp = s->d->sp;
    s->per = (tokens + STRIP_COLUMNS - 1) / STRIP_COLUMNS;
    for (int64_t t = 1; t < tokens; t++) turns += s->row->rank[t] != s->row->rank[t - 1];
    if (s->per > 1 && 2 * turns > tokens && sp <= 64) s->per = (s->per + sp - 1) / sp * sp;
    s->columns = s->per ? (tokens + s->per - 1) / s->per : 0;
}

static inline int strips_holders(strips *s, int64_t micro) {
    for (int64_t r = s->first; r < s->first + s->d->sp; r++) {
        const seqpar_safetensors_tensor *t = dump_find(s->d, r, micro, "index");
        int64_t *index = t ? dump_integers(s->d, r, t) : NULL;
        if (!index) return -1;
        for (int64_t i = 0; i < t->count; i++)
            if (index[i] >= 0 && index[i] < s->row->tokens) s->holders[index[i]]++;
        free(index);
    }
    return 0;
}

/* Prepares the picture of s->row, whose rank array is set. 0, or -1 with d->error. Call
   strips_close in either case. */
static inline int strips_open(strips *s) {
    const dump_row *row = s->row;
    int64_t wide = s->d->sp + 1;
    strips_columns(s);
    s->held = (int32_t *)calloc((size_t)(s->columns * wide) + 1, sizeof *s->held);
    s->holders = (int32_t *)calloc((size_t)row->tokens + 1, sizeof *s->holders);
    s->heat = (signed char *)calloc((size_t)s->columns + 1, 1);
    if (!s->held || !s->holders || !s->heat)
        return seqpar_fail(&s->d->error, SEQPAR_ERR_MEMORY, "no memory for a picture"), -1;
    for (int64_t t = 0; t < row->tokens; t++)
        if (row->rank[t] >= 0) s->held[t / s->per * wide + row->rank[t] - s->first + 1]++;
    for (int64_t t = 0; t < row_end(row); t++)
        s->cuts += row->rank[t] >= 0 && row_is_cut(row, t);
    for (int64_t i = 0; i < s->columns * wide; i++)
        if (i % wide) s->held[i] += s->held[i - 1];
    return strips_holders(s, s->number % s->d->accumulation);
}

/* ---- drawing ---- */

static inline double x_of(const strips *s, int64_t token) {
    if (token > s->row->tokens) token = s->row->tokens;
    return STRIP_LEFT + STRIP_WIDE * (double)token / (double)s->row->tokens;
}

/* Adds a box of columns a to b - 1 to an SVG path. */
static inline void put_box(const strips *s, int64_t a, int64_t b, double y, double height) {
    fprintf(s->out, "M%.2f %.2fH%.2fV%.2fH%.2fz", x_of(s, a * s->per), y, x_of(s, b * s->per),
            y + height, x_of(s, a * s->per));
}

/* The first eight ranks have colours that most people can tell apart. The others have hues at
   equal steps round the colour wheel. */
static inline const char *rank_colour(char text[40], int64_t member) {
    static const char *const few[] = {"#6c9bd2", "#f0a04b", "#63b35c", "#b08fd8",
                                      "#45b8b0", "#b58e75", "#e39ac0", "#b5b04a"};
    if (member < 8)
        snprintf(text, 40, "%s", few[member]);
    else
        snprintf(text, 40, "hsl(%d,50%%,%d%%)", (int)(member * 137 % 360),
                 member % 2 ? 55 : 70);
    return text;
}

/* share: the part of a column's tokens that a rank holds; top: the part of all ranks before it.
   The column is filled from the top in order of ranks. */
static inline void column_share(const strips *s, int64_t column, int64_t member, double *top,
                                double *share) {
    const int32_t *before = s->held + column * (s->d->sp + 1) + member;
    int64_t tokens = s->row->tokens - column * s->per;
    if (tokens > s->per) tokens = s->per;
    *top = (double)before[0] / (double)tokens;
    *share = (double)(before[1] - before[0]) / (double)tokens;
}

static inline void put_member(const strips *s, int64_t member, double y, double height) {
    double top = 0, share = 0, next_top = 0, next_share = 0;
    int64_t begin = 0;
    char colour[40];
    fprintf(s->out, "<path class=\"rank\" style=\"--c:%s\" d=\"", rank_colour(colour, member));
    for (int64_t c = 0; c <= s->columns; c++) {
        if (c < s->columns) column_share(s, c, member, &next_top, &next_share);
        if (c && c < s->columns && next_top == top && next_share == share) continue;
        if (share > 0) put_box(s, begin, c, y + top * height, share * height);
        begin = c;
        top = next_top;
        share = next_share;
    }
    fprintf(s->out, "\"/>\n");
}

/* Writes the rank's number into each run of its tokens that is wide enough. */
static inline void put_rank_numbers(const strips *s, double y) {
    const int64_t *rank = s->row->rank;
    for (int64_t t = 0, end; t < s->row->tokens; t = end) {
        for (end = t + 1; end < s->row->tokens && rank[end] == rank[t];) end++;
        if (rank[t] >= 0 && x_of(s, end) - x_of(s, t) >= (rank[t] < 10 ? 12 : 22))
            fprintf(s->out, "<text class=\"in\" x=\"%.1f\" y=\"%.1f\">%lld</text>\n",
                    (x_of(s, t) + x_of(s, end)) / 2, y, (long long)rank[t]);
    }
}

static inline void put_label(const strips *s, double y, const char *text) {
    fprintf(s->out, "<text class=\"at\" x=\"%d\" y=\"%.1f\">%s</text>\n", STRIP_LEFT - 8, y,
            text);
}

static inline void put_back(const strips *s, double y, double height) {
    fprintf(s->out, "<rect class=\"back\" x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%.1f\"/>\n",
            STRIP_LEFT, y, STRIP_WIDE, height);
}

static inline void put_document(const strips *s, int64_t a, int64_t b, const char *kind,
                                const char *name) {
    double left = x_of(s, a), wide = x_of(s, b) - left;
    fprintf(s->out, "<rect class=\"%s\" x=\"%.2f\" y=\"0\" width=\"%.2f\" height=\"14\"/>\n",
            kind, left, wide);
    if (wide >= 8.0 * (double)strlen(name))
        fprintf(s->out, "<text class=\"on\" x=\"%.1f\" y=\"11\">%s</text>\n", left + wide / 2,
                name);
}

/* Draws the documents on top and, if they are few, a line through all strips where each
   begins. */
static inline void put_documents(const strips *s, double height) {
    const dump_row *row = s->row;
    put_label(s, 11, "document");
    for (int64_t i = 0, n = 0; i < row->docs && row->docs <= STRIP_COLUMNS; i++) {
        int64_t a = row->cu_seqlens[i], b = row->cu_seqlens[i + 1];
        char name[24];
        snprintf(name, sizeof name, "%lld", (long long)i);
        if (a < b) put_document(s, a, b, n++ % 2 ? "odd" : "even", name);
        if (a > 0 && row->docs <= 100)
            fprintf(s->out, "<path class=\"line\" d=\"M%.2f 0V%.1f\"/>\n", x_of(s, a), height);
    }
    if (row_end(row) < row->tokens)
        put_document(s, row_end(row), row->tokens, "padding", "padding");
}

static inline void put_scale(const strips *s, double y) {
    int64_t step = 1;
    while (s->row->tokens / step > 12) { /* 1, 2, 5, 10, ... */
        int64_t next = step;
        while (next >= 10) next /= 10;
        step = next == 2 ? step / 2 * 5 : step * 2;
    }
    put_label(s, y + 15, "token");
    for (int64_t t = 0; t < s->row->tokens; t += step)
        fprintf(s->out,
                "<path class=\"tick\" d=\"M%.2f %.1fv4\"/><text class=\"on\" x=\"%.2f\" "
                "y=\"%.1f\">%lld</text>\n",
                x_of(s, t), y, x_of(s, t), y + 15, (long long)t);
}

/* ---- cells ---- */

static inline void say_cell(FILE *out, const strips *s, int m, int64_t t) {
    const dump_row *row = s->row;
    char place[160];
    if (row->rank[t] < 0)
        fprintf(out, "token %lld", (long long)t);
    else
        fprintf(out, "%s", place_text(place, sizeof place, row, t));
    fprintf(out, ": %s", marks[m].what);
    if (marks[m].is == mark_position)
        fprintf(out, ": %lld, right %lld", (long long)row->positions[t],
                (long long)position_right(row, t));
    if (marks[m].is == mark_label)
        fprintf(out, ": %lld, right %lld", (long long)row->labels[t],
                (long long)label_right(row, t));
}

/* Draws a cell in each column where something is wrong; data-n: how often. */
static inline void put_mark(const strips *s, int m, double y, double height) {
    int wrong = s->stages[marks[m].stage].v.kind == VERDICT_WRONG;
    put_label(s, y + height - 3, marks[m].label);
    put_back(s, y, height);
    for (int64_t c = 0; c < s->columns; c++) {
        double left = x_of(s, c * s->per), wide = x_of(s, (c + 1) * s->per) - left;
        int64_t count = 0, first = -1;
        for (int64_t t = c * s->per; t < (c + 1) * s->per && t < s->row->tokens; t++) {
            int64_t times = marks[m].is(s, t);
            if (times && !count) first = t;
            count += times;
        }
        if (!count) continue;
        fprintf(s->out,
                "<rect class=\"%s\" data-mark=\"%s\" data-n=\"%lld\" x=\"%.2f\" y=\"%.1f\" "
                "width=\"%.2f\" height=\"%.1f\"><title>",
                wrong ? "bad" : "maybe", marks[m].label, (long long)count, left, y,
                wide > 1.5 ? wide : 1.5, height);
        say_cell(s->out, s, m, first);
        if (count > 1) fprintf(s->out, "; %lld in this column", (long long)count);
        fprintf(s->out, "</title></rect>\n");
    }
}

static inline void put_heat_level(const strips *s, int level, double y, double height) {
    int64_t begin = -1, boxes = 0;
    for (int64_t c = 0; c <= s->columns; c++) {
        int has = c < s->columns && s->heat[c] == level;
        if (has && begin < 0) begin = c;
        if (has || begin < 0) continue;
        if (!boxes++) fprintf(s->out, "<path class=\"h%d\" d=\"", level);
        put_box(s, begin, c, y, height);
        begin = -1;
    }
    if (boxes) fprintf(s->out, "\"/>\n");
}

/* Draws a rank's line: how far its log-probs are off. A column shows its largest level. */
static inline void put_heat(strips *s, int64_t member, double y, double height) {
    for (int64_t c = 0; c < s->columns; c++) s->heat[c] = HEAT_NONE;
    for (int64_t t = 0; t < s->row->tokens; t++) {
        signed char *column = &s->heat[t / s->per];
        int level = s->row->rank[t] == s->first + member ? heat_of(s, t) : HEAT_NONE;
        if (level > *column) *column = (signed char)level;
    }
    put_back(s, y, height);
    for (int level = HEAT_NO_LABEL; level <= HEAT_NAN; level++)
        put_heat_level(s, level, y, height);
}
#endif
