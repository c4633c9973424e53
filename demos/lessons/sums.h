/* SPDX-License-Identifier: MIT OR Unlicense */
/* sums.h - lessons 4, 5, 8 and 9: counts, the factor P, the order of sums, a preference pair. */
#ifndef LESSON_SUMS_H
#define LESSON_SUMS_H
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "split.h"
#include "drawing.h"

/* ---- 4: sums and means ---- */

enum { COUNTED = 5 };
static const int token_loss[COUNTED] = {1, 1, 1, 1, 6};

typedef struct lesson_means {
    int sum[2], count[2];
} lesson_means;

/* The first `cut` supervised tokens are on rank 0, the others on rank 1. */
static inline lesson_means means_cut(int cut) {
    lesson_means m = {{0}, {0}};
    for (int t = 0; t < COUNTED; t++) {
        m.sum[t >= cut] += token_loss[t];
        m.count[t >= cut]++;
    }
    return m;
}

static inline double mean_of_step(const lesson_means *m) {
    return (double)(m->sum[0] + m->sum[1]) / (m->count[0] + m->count[1]);
}

/* An empty rank has no mean: 0 / 0. */
static inline double mean_of_rank(const lesson_means *m, int r) {
    return (double)m->sum[r] / m->count[r];
}

static inline const char *number(double x) {
    static char text[4][32];
    static int at;
    at = (at + 1) % 4;
    snprintf(text[at], sizeof text[at], isnan(x) ? "NaN" : "%.4g", x);
    return text[at];
}

static inline void lesson_counts(void) {
    printf("                rank 0        rank 1        right           mean of means\n"
           "                sum count     sum count     sums / counts\n");
    for (int cut = 4; cut <= COUNTED + 1; cut += cut == 4 ? -1 : 2) {
        lesson_means m = means_cut(cut);
        printf("cut after %d     %3d %5d     %3d %5d     %-14s  %s\n", cut, m.sum[0],
               m.count[0], m.sum[1], m.count[1], number(mean_of_step(&m)),
               number((mean_of_rank(&m, 0) + mean_of_rank(&m, 1)) / 2));
    }
}

static inline void picture_counts(void) {
    double wide = 68, high = 30, bottom = 232, left = 60;
    lesson_means m = means_cut(4);
    picture_begin("The losses of five tokens on two ranks: each token is a column of the same "
                  "width, each mean a height",
                  270, 0);
    for (int t = 0; t < COUNTED; t++) {
        int rank = t >= 4;
        double x = left + t * wide, y = bottom - token_loss[t] * high;
        draw_box(x, y, wide - 3, token_loss[t] * high, rank_class("", rank));
        draw_text(x + wide / 2, y - 6, "m s", "loss %d", token_loss[t]);
        draw_text(x + wide / 2, bottom + 20, "m s", "rank %d", rank);
    }
    double right = mean_of_step(&m), means = (mean_of_rank(&m, 0) + mean_of_rank(&m, 1)) / 2;
    draw_line(left - 10, bottom - right * high, left + COUNTED * wide + 6,
              bottom - right * high, 0);
    draw_text(left + 2, bottom - right * high - 6, "s b", "mean over tokens: %s",
              number(right));
    draw_line(left - 10, bottom - means * high, left + COUNTED * wide + 6,
              bottom - means * high, 0);
    draw_text(left + 2, bottom - means * high - 6, "s b x", "mean of the two ranks' means: %s",
              number(means));
    picture_end();
}

/* ---- 5: a factor P ---- */

/* The first step of a parameter by AdamW (b1 0.9, b2 0.999, no decay). */
static inline double first_step_adam(double g, double lr) {
    double m = .1 * g / (1 - .9), v = .001 * g * g / (1 - .999);
    return lr * m / (sqrt(v) + 1e-8);
}

static inline double norm_clip(double norm, double limit) {
    return norm > limit ? limit / norm : 1;
}

static inline void lesson_factor(void) {
    static const double gradient[] = {4, 2};
    printf("                          right: sum    wrong: mean\n");
    printf("gradient of 3 and 1       %-13s %s\n", number(gradient[0]), number(gradient[1]));
    printf("step of SGD, lr 0.1       %-13s %s\n", number(.1 * gradient[0]),
           number(.1 * gradient[1]));
    printf("first step of Adam        %-13s %s\n", number(first_step_adam(gradient[0], .1)),
           number(first_step_adam(gradient[1], .1)));
    printf("clip at 3 multiplies by   %-13s %s\n", number(norm_clip(gradient[0], 3)),
           number(norm_clip(gradient[1], 3)));
}

/* ---- 8: the order of sums ---- */

/* x rounded to three significant digits, for sums that a reader can do by hand. */
static inline double three_digits(double x) {
    char text[32];
    snprintf(text, sizeof text, "%.2e", x);
    return strtod(text, NULL);
}

static inline void lesson_digits(void) {
    double one = three_digits(three_digits(100 + .4) + .4);
    double two = three_digits(100 + three_digits(.4 + .4));
    printf("(100 + 0.4) + 0.4 = %s + 0.4 = %s\n", number(three_digits(100.4)), number(one));
    printf("100 + (0.4 + 0.4) = 100 + %s = %s\n", number(three_digits(.8)), number(two));
}

enum { CELLS = 8 };

static inline float cell_value(int64_t cell) {
    return (float)seqpar_random_normal(3, 0, (uint64_t)cell);
}

/* Each rank adds its cells one after the other; then the sums of the ranks are added in the
   order of the ranks: what an all-reduce does. */
static inline float sum_by_ranks(int64_t ranks) {
    lesson_split s = split_row(SEQPAR_LAYOUT_ZIGZAG, CELLS, ranks);
    float sum = 0;
    for (int64_t r = 0; r < ranks; r++) {
        float own = 0;
        for (int64_t i = 0; i < s.count[r]; i++) own += cell_value(s.held[r][i]);
        sum += own;
    }
    return sum;
}

/* The state of a stack machine that runs a fold's program, as a device does. */
typedef struct lesson_fold {
    float stack[CELLS], store[CELLS], result;
    int64_t top;
} lesson_fold;

static inline void fold_step(lesson_fold *f, const seqpar_fold_op *op) {
    float a;
    switch (op->op) {
    case SEQPAR_FOLD_LEAF: f->stack[f->top++] = cell_value(op->index); return;
    case SEQPAR_FOLD_LOAD: f->stack[f->top++] = f->store[op->index]; return;
    case SEQPAR_FOLD_STORE: f->store[op->index] = f->stack[--f->top]; return;
    case SEQPAR_FOLD_FINISH: f->result = f->stack[--f->top]; return;
    default: /* COMBINE */ a = f->stack[--f->top]; f->stack[f->top - 1] += a;
    }
}

/* Pushes the cells of one rank and computes what can be added. */
static inline void fold_rank(seqpar_fold *fold, lesson_fold *f, const lesson_split *s,
                             int64_t rank) {
    fold->program_count = 0;
    for (int64_t i = 0; i < s->count[rank]; i++) {
        seqpar_node leaf = {0, s->held[rank][i]};
        if (seqpar_fold_push(fold, leaf, SEQPAR_FOLD_LEAF, (int32_t)leaf.index)) exit(1);
    }
    if (seqpar_fold_flush(fold)) exit(1);
    for (int64_t i = 0; i < fold->program_count; i++) fold_step(f, &fold->program[i]);
}

static const int64_t all_cells[CELLS] = {0, 1, 2, 3, 4, 5, 6, 7};

static inline float sum_by_tree(int64_t ranks) {
    lesson_split s = split_row(SEQPAR_LAYOUT_ZIGZAG, CELLS, ranks);
    lesson_fold f = {{0}, {0}, 0, 0};
    seqpar_fold fold;
    seqpar_fold_init(&fold, all_cells, CELLS);
    for (int64_t r = 0; r < ranks; r++) fold_rank(&fold, &f, &s, r);
    seqpar_fold_free(&fold);
    return f.result;
}

static inline unsigned bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline void lesson_order(void) {
    printf("         rank after rank          by the tree\n");
    for (int64_t ranks = 1; ranks <= 4; ranks *= 2)
        printf("%d rank%s  %.8f %08x    %.8f %08x\n", (int)ranks, ranks > 1 ? "s" : " ",
               (double)sum_by_ranks(ranks), bits_of(sum_by_ranks(ranks)),
               (double)sum_by_tree(ranks), bits_of(sum_by_tree(ranks)));
}

/* Draws the tree; the cells of the first `ranks_in` ranks are there, and every sum that they
   allow. */
static inline void draw_tree(const lesson_split *s, int64_t ranks_in) {
    int in[CELLS];
    double step = 27;
    for (int c = 0; c < CELLS; c++) in[c] = s->holder[c] < ranks_in;
    for (int count = CELLS, level = 0; count >= 1; count /= 2, level++, step *= 2) {
        double y = 190 - level * 44;
        for (int i = 0; i < count; i++) {
            double x = 10 + (i + .5) * step;
            if (count > 1) draw_line(x, y - 10, x + (i % 2 ? -step : step) / 2 * .8, y - 34, 0);
            if (!level) {
                draw_box(x - 12, y - 11, 24, 24, in[i] ? rank_class("", s->holder[i]) : "g");
                draw_text(x, y + 6, in[i] ? "m w s" : "m s", "%d", i);
                continue;
            }
            in[i] = in[2 * i] && in[2 * i + 1];
            draw_box(x - 11, y - 11, 22, 22, in[i] ? "d" : "g");
            if (in[i]) draw_text(x, y + 5, "m w", "+");
        }
    }
}

static inline void picture_tree(void) {
    lesson_split s = split_row(SEQPAR_LAYOUT_ZIGZAG, CELLS, 4);
    picture_begin("The tree of sums over eight cells fills while the ranks deliver theirs", 236,
                  5);
    for (int64_t r = 0; r <= 4; r++) {
        frame_begin((int)r, 236);
        draw_text(10, 22, "b s", r ? "rank %d sends its cells" : "8 cells, 4 ranks, zigzag",
                  (int)r - 1);
        draw_tree(&s, r);
        draw_text(10, 226, "s", r == 4 ? "the sum is complete" : "grey: waits for others");
        frame_end();
    }
    picture_end();
}

/* ---- 9: a preference pair ---- */

/* Sums of logp - ref_logp of a response's tokens on each of two ranks. */
static const double chosen[2] = {3, -1}, rejected[2] = {1, -3};

static inline double pair_loss(double h_chosen, double h_rejected, double beta) {
    seqpar_preference pair = {.chosen = h_chosen, .rejected = h_rejected};
    seqpar_preference_desc desc = {.kind = SEQPAR_PREFERENCE_DPO, .beta = beta};
    seqpar_pair_result result;
    seqpar_error error = {0};
    pair.chosen_tokens = pair.rejected_tokens = 1;
    if (seqpar_preference_loss(&error, &result, &pair, &desc)) lesson_stop(&error);
    return result.loss;
}

/* The wrong loss: each rank computes one from its own sums, and the mean of these is taken. */
static inline double pair_loss_of_parts(void) {
    return (pair_loss(chosen[0], rejected[0], .5) + pair_loss(chosen[1], rejected[1], .5)) / 2;
}

static inline void lesson_pair(void) {
    double h_chosen = chosen[0] + chosen[1], h_rejected = rejected[0] + rejected[1];
    printf("sum of logp - ref_logp    rank 0   rank 1   both\n");
    printf("chosen                    %6s   %6s   %4s\n", number(chosen[0]), number(chosen[1]),
           number(h_chosen));
    printf("rejected                  %6s   %6s   %4s\n", number(rejected[0]),
           number(rejected[1]), number(h_rejected));
    printf("chosen - rejected         %6s   %6s   %4s\n", number(chosen[0] - rejected[0]),
           number(chosen[1] - rejected[1]), number(h_chosen - h_rejected));
    printf("right   -log sigmoid(0.5 x %s)                       = %.6f\n",
           number(h_chosen - h_rejected), pair_loss(h_chosen, h_rejected, .5));
    printf("wrong   mean of -log sigmoid(0.5 x %s), one a rank   = %.6f\n",
           number(chosen[0] - rejected[0]), pair_loss_of_parts());
}

static inline void lesson_first_pair(void) {
    printf("right   -log sigmoid(0)               = %.18f\n", pair_loss(0, 0, .5));
    printf("wrong   mean of two -log sigmoid(0)   = %.18f\n",
           (pair_loss(0, 0, .5) + pair_loss(0, 0, .5)) / 2);
    printf("log 2                                 = %.18f\n", seqpar_log(2));
    printf("reference missing: -9 and -10         = %.6f\n", pair_loss(-9, -10, .5));
}

static inline void picture_pair(void) {
    static const char *const names[] = {"chosen", "rejected"};
    const double *const sums[] = {chosen, rejected};
    picture_begin("A pair of responses over two ranks: sums travel, then one sigmoid", 230, 0);
    for (int i = 0; i < 2; i++) {
        double y = 20 + i * 76;
        draw_text(20, y + 14, "b", "%s", names[i]);
        for (int r = 0; r < 2; r++) {
            draw_box(20 + r * 120, y + 22, 116, 32, rank_class("", r));
            draw_text(78 + r * 120, y + 43, "m w s", "rank %d: %s", r, number(sums[i][r]));
        }
        draw_line(262, y + 38, 306, y + 38, 1);
        draw_text(314, y + 43, "", "sum %s", number(sums[i][0] + sums[i][1]));
    }
    draw_text(20, 190, "", "difference %s, times beta = 0.5, -log sigmoid: %.6f",
              number(chosen[0] + chosen[1] - rejected[0] - rejected[1]),
              pair_loss(chosen[0] + chosen[1], rejected[0] + rejected[1], .5));
    draw_text(20, 214, "s x", "a sigmoid on each rank, then the mean: %.6f",
              pair_loss_of_parts());
    picture_end();
}
#endif
