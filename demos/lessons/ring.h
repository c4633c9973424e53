/* SPDX-License-Identifier: MIT OR Unlicense */
/* ring.h - lesson 1's ring, and lessons 6 and 7: attention in a ring, forward and backward. The
 * pictures follow the plan that ranks execute (seqpar_plan_make). */
#ifndef LESSON_RING_H
#define LESSON_RING_H
#include <math.h>
#include "split.h"
#include "drawing.h"

static inline seqpar_plan ring_plan(int64_t ranks, int64_t rank, int backward) {
    seqpar_plan_desc desc = {.schedule = SEQPAR_SCHEDULE_RING,
                             .sp_size = ranks,
                             .sp_rank = rank,
                             .kv_heads = 1,
                             .backward = backward};
    seqpar_plan plan;
    seqpar_error error = {0};
    if (seqpar_plan_make(&error, &plan, &desc)) lesson_stop(&error);
    return plan;
}

/* The COMPUTE number `hop` of a plan, the last SHIFT before it, and the RETURN between it and
   the next COMPUTE; NULL: none. */
typedef struct ring_hop {
    const seqpar_plan_op *compute, *shift, *back;
} ring_hop;

static inline ring_hop hop_of(const seqpar_plan *plan, int64_t hop) {
    ring_hop h = {NULL, NULL, NULL};
    int64_t seen = -1;
    for (int64_t i = 0; i < plan->count; i++) {
        const seqpar_plan_op *op = &plan->ops[i];
        if (op->op == SEQPAR_PLAN_COMPUTE && ++seen == hop) h.compute = op;
        if (op->op == SEQPAR_PLAN_COMPUTE && seen > hop) break;
        if (op->op == SEQPAR_PLAN_SHIFT && seen < hop) h.shift = op;
        if (op->op == SEQPAR_PLAN_RETURN && seen == hop) h.back = op;
    }
    return h;
}

/* Blocks of the scores: a line for each rank's queries, a column for each rank's keys. Blocks
   of this hop have the colour of the keys, earlier ones a pale colour, later ones grey. */
static inline void draw_blocks(double x, double y, int64_t hop) {
    double wide = 25;
    draw_text(x + 2 * wide, y - 8, "m s", "keys of rank");
    for (int64_t r = 0; r < 4; r++) {
        seqpar_plan plan = ring_plan(4, r, 0);
        draw_text(x - 6, y + (double)r * wide + 17, "e s", "%d", (int)r);
        draw_text(x + (double)r * wide + 12, y + 4 * wide + 14, "m s", "%d", (int)r);
        for (int64_t s = 0; s < 4; s++) {
            int64_t source = hop_of(&plan, s).compute->source;
            draw_box(x + (double)source * wide, y + (double)r * wide, wide - 2, wide - 2,
                     s > hop ? "g" : rank_class(s < hop ? "f " : "", source));
        }
        seqpar_plan_free(&plan);
    }
}

/* Four ranks in a row: whose keys each has, and where they go meanwhile. */
static inline void draw_keys(double y, int64_t hop) {
    for (int64_t r = 0; r < 4; r++) {
        seqpar_plan plan = ring_plan(4, r, 0);
        ring_hop h = hop_of(&plan, hop);
        double x = 8 + (double)r * 57;
        draw_box(x, y, 44, 40, rank_class("", h.compute->source));
        draw_text(x + 22, y + 17, "m w s", "rank %d", (int)r);
        draw_text(x + 22, y + 33, "m w s", "k%d v%d", (int)h.compute->source,
                  (int)h.compute->source);
        if (h.shift && hop < 3 && h.shift->send_to == r + 1)
            draw_line(x + 45, y + 20, x + 56, y + 20, 1);
        if (h.shift && hop < 3 && h.shift->send_to == 0)
            printf("<path d=\"M%g %gv12H30v-10\" class=\"l\" marker-end=\"url(#arrow)\"/>\n",
                   x + 22, y + 41);
        seqpar_plan_free(&plan);
    }
}

static inline void picture_ring(void) {
    picture_begin(
        "Ring attention on four ranks, hop by hop: whose keys each rank has, and which "
        "blocks of the scores it computes",
        272, 4);
    for (int hop = 0; hop < 4; hop++) {
        frame_begin(hop, 272);
        draw_text(8, 22, "b s", "hop %d%s", hop, hop < 3 ? "; keys move on" : "; the last");
        draw_keys(36, hop);
        draw_text(8, 124, "s", "queries");
        draw_text(8, 140, "s", "of rank");
        if (hop) draw_text(8, 266, "s", "pale: done in earlier hops");
        draw_blocks(92, 132, hop);
        frame_end();
    }
    picture_end();
}

/* ---- 6: two halves merged by lse ---- */

/* One key a rank would do; two show that a half is normalized by itself. weight = e^score. */
static const double weight[2][2] = {{1, 3}, {1, 1}}, value[2][2] = {{4, 8}, {1, 1}};

typedef struct lesson_half {
    double total, out, lse; /* sum of weights; weighted mean of values; log of the sum */
} lesson_half;

static inline lesson_half half_of(int r) {
    lesson_half h = {weight[r][0] + weight[r][1], 0, 0};
    h.out = (weight[r][0] * value[r][0] + weight[r][1] * value[r][1]) / h.total;
    h.lse = seqpar_log(h.total);
    return h;
}

static inline double merged(const lesson_half *a, const lesson_half *b) {
    double largest = a->lse > b->lse ? a->lse : b->lse;
    double wa = seqpar_exp(a->lse - largest), wb = seqpar_exp(b->lse - largest);
    return (wa * a->out + wb * b->out) / (wa + wb);
}

static inline void lesson_merge(void) {
    lesson_half half[2];
    printf("            e^score    value    sum of e^score    out        lse\n");
    for (int r = 0; r < 2; r++) {
        half[r] = half_of(r);
        printf("keys of %d   %g and %g    %g, %g     %-17g %-10g log %g\n", r, weight[r][0],
               weight[r][1], value[r][0], value[r][1], half[r].total, half[r].out,
               half[r].total);
    }
    printf("right   (%g x %g + %g x %g) / (%g + %g) = %.4g\n", half[0].total, half[0].out,
           half[1].total, half[1].out, half[0].total, half[1].total,
           merged(&half[0], &half[1]));
    printf("wrong   (%g + %g) / 2 = %.4g\n", half[0].out, half[1].out,
           (half[0].out + half[1].out) / 2);
}

static inline void picture_merge(void) {
    double wide = 54, high = 22, bottom = 222, x = 12;
    lesson_half half[2] = {half_of(0), half_of(1)};
    double right = merged(&half[0], &half[1]), mean = (half[0].out + half[1].out) / 2;
    picture_begin(
        "Four keys on two ranks: the width of a column is e^score, its height the value", 290,
        0);
    for (int r = 0; r < 2; r++)
        for (int i = 0; i < 2; i++) {
            double w = weight[r][i] * wide, h = value[r][i] * high;
            draw_box(x, bottom - h, w - 3, h, rank_class("", r));
            draw_text(x + w / 2, bottom - 6, "m w s", "%g", value[r][i]);
            draw_text(x + w / 2, bottom + 18, "m s", "rank %d", r);
            x += w;
        }
    draw_line(10, bottom - right * high, x + 8, bottom - right * high, 0);
    draw_text(x + 12, bottom - right * high - 2, "s b", "right: %.4g", right);
    draw_line(10, bottom - mean * high, x + 8, bottom - mean * high, 0);
    draw_text(x + 12, bottom - mean * high + 12, "s b x", "mean of outs: %.4g", mean);
    draw_text(12, bottom + 42, "s",
              "width: e^score, height: value; out of rank 0: %g, of rank 1: %g", half[0].out,
              half[1].out);
    picture_end();
}

/* ---- 7: backward ---- */

enum { BACK = 10, BACK_DIMS = 6, BACK_SCALE = 1 };

static inline double back_number(int which, int64_t token, int64_t dim) {
    return seqpar_random_normal(7, (uint64_t)which, (uint64_t)(token * BACK_DIMS + dim));
}

/* dv of token k: the sum over queries i of p_ik dout_i. home 0: dv of a hop is not sent home,
   so the terms of other ranks' queries are missing. */
static inline double dv_of(const lesson_split *s, int64_t k, int64_t dim, int home) {
    double dv = 0;
    for (int64_t i = k; i < BACK; i++) {
        double sum = 0, p = 0;
        for (int64_t j = 0; j <= i; j++) {
            double score = 0;
            for (int64_t d = 0; d < BACK_DIMS; d++)
                score += back_number(0, i, d) * back_number(1, j, d) / sqrt(BACK_DIMS);
            sum += seqpar_exp(score);
            if (j == k) p = seqpar_exp(score);
        }
        if (home || s->holder[i] == s->holder[k]) dv += p / sum * back_number(2, i, dim);
    }
    return dv;
}

static inline double dv_error(const lesson_split *s, int64_t k) {
    double off = 0, size = 0;
    for (int64_t d = 0; d < BACK_DIMS; d++) {
        double right = dv_of(s, k, d, 1), wrong = dv_of(s, k, d, 0);
        off += (right - wrong) * (right - wrong);
        size += right * right;
    }
    return sqrt(off / size);
}

/* One token a rank: token 0 sees itself, token 1 sees both with equal weights. */
static inline void lesson_two_keys(void) {
    static const double p[2][2] = {{1, 0}, {.5, .5}}, dout[2] = {3, 2};
    for (int k = 0; k < 2; k++)
        printf("dv of token %d   %g x %g + %g x %g = %g   of rank 0's queries %g, of rank 1's "
               "%g\n",
               k, p[0][k], dout[0], p[1][k], dout[1], p[0][k] * dout[0] + p[1][k] * dout[1],
               p[0][k] * dout[0], p[1][k] * dout[1]);
}

static inline void lesson_dv(void) {
    lesson_split s = split_row(SEQPAR_LAYOUT_ZIGZAG, BACK, 2);
    printf("token        ");
    for (int64_t k = 0; k < BACK; k++) printf("%5d", (int)k);
    printf("\nheld by rank ");
    for (int64_t k = 0; k < BACK; k++) printf("%5d", (int)s.holder[k]);
    printf("\nlost of dv   ");
    for (int64_t k = 0; k < BACK; k++) printf("%4.0f%%", 100 * dv_error(&s, k));
    printf("\n");
}

static inline void draw_heat(double x, double y, const lesson_split *s, int home) {
    double wide = 30, high = 17;
    for (int64_t k = 0; k < BACK; k++)
        for (int64_t d = 0; d < BACK_DIMS; d++) {
            double dv = dv_of(s, k, d, home);
            double deep = fabs(dv) > 2 ? 1 : fabs(dv) / 2;
            printf("<rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\" class=\"%s\" "
                   "fill-opacity=\"%.3f\"/>\n",
                   x + (double)k * wide, y + (double)d * high, wide - 1, high - 1,
                   dv < 0 ? "n" : "u", deep);
        }
}

static inline void picture_dv(void) {
    lesson_split s = split_row(SEQPAR_LAYOUT_ZIGZAG, BACK, 2);
    double left = 150, wide = 30;
    picture_begin("dv of ten tokens on two ranks, a column each: right, and where the parts of "
                  "other ranks never come home",
                  330, 0);
    for (int64_t k = 0; k < BACK; k++) {
        double x = left + (double)k * wide;
        draw_box(x, 30, wide - 1, 18, rank_class("", s.holder[k]));
        draw_text(x + 14, 44, "m w s", "%d", (int)k);
        draw_text(x + 14, 284, "m s", "%.0f", 100 * dv_error(&s, k));
    }
    draw_text(16, 44, "s", "token, by rank");
    draw_text(16, 110, "b", "right");
    draw_heat(left, 56, &s, 1);
    draw_text(16, 220, "b x", "not returned");
    draw_heat(left, 166, &s, 0);
    draw_text(16, 284, "s", "lost, percent");
    draw_text(16, 314, "s", "violet above 0, olive below; full colour at 2 and beyond");
    picture_end();
}

/* The backward ring: each rank computes dk, dv of the keys it has and sends them home. */
static inline void picture_back(void) {
    picture_begin("The ring backward on four ranks: where dk and dv of each hop go", 190, 4);
    for (int hop = 0; hop < 4; hop++) {
        frame_begin(hop, 190);
        draw_text(8, 22, "b s", "hop %d", hop);
        for (int64_t r = 0; r < 4; r++) {
            seqpar_plan plan = ring_plan(4, r, 1);
            ring_hop h = hop_of(&plan, hop);
            int64_t source = h.compute->source;
            double x = 8 + (double)r * 57;
            double home = 30 + 57 * (double)(h.back ? h.back->send_to : r);
            draw_box(x - 4, 36, 54, 40, rank_class("", source));
            draw_text(x + 23, 53, "m w s", "rank %d", (int)r);
            draw_text(x + 23, 69, "m w s", "dk%d dv%d", (int)source, (int)source);
            if (hop) draw_line(x + 23, 78, home, 128, 1);
            draw_box(8 + (double)r * 57, 130, 44, 24, rank_class("", r));
            draw_text(30 + (double)r * 57, 147, "m w s", "rank %d", (int)r);
            seqpar_plan_free(&plan);
        }
        draw_text(8, 176, "s",
                  hop ? "sent to the owner, added there" : "own keys: added at once");
        frame_end();
    }
    picture_end();
}
#endif
