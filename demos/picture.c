/* SPDX-License-Identifier: MIT OR Unlicense */
/* picture.c - draws the picture of the README, as SVG: a row split over four ranks, the
   messages between them, and the tree that adds every sum over the row.

       build/picture > demos/picture.svg */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include <stdio.h>
#include "trainer/base/files.h"

enum { RANKS = 4, CELLS = 8, WIDTH = 480 };
static const double wide = 54, left = 24; /* of a cell; the margin */
static const char *const colors[RANKS] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7"};
static int holder[CELLS]; /* the rank of each cell, as seqpar_split deals them */

static int deal(void) {
    int64_t cu_seqlens[] = {0, CELLS};
    seqpar_row row = {.tokens = CELLS, .cell = 1, .docs = 1, .cu_seqlens = cu_seqlens};
    seqpar_error error = {0};
    for (int rank = 0; rank < RANKS; rank++) {
        seqpar_split_desc split = {SEQPAR_LAYOUT_ZIGZAG, RANKS, rank};
        seqpar_share share;
        if (seqpar_split(&error, &share, &row, 1, &split))
            return fprintf(stderr, "error: %s\n", error.text), 1;
        for (int64_t i = 0; i < share.count; i++)
            for (int64_t t = 0; t < share.pieces[i].count; t++)
                holder[share.pieces[i].start + t * share.pieces[i].stride] = rank;
        seqpar_share_free(&share);
    }
    return 0;
}

static void text(double x, double y, const char *style, const char *words) {
    printf("<text x=\"%g\" y=\"%g\" %s>%s</text>\n", x, y, style, words);
}

static void heading(double y, const char *words) {
    text(left, y, "font-weight=\"bold\"", words);
}

static void box(double x, double y, double w, double h, const char *color) {
    printf("<rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\" rx=\"4\" fill=\"%s\"/>\n", x, y,
           w, h, color);
}

static void line(double x, double y, double to_x, double to_y, const char *style) {
    printf("<path d=\"M%g %gL%g %g\" fill=\"none\" stroke=\"#444\" stroke-width=\"1.5\"%s/>\n",
           x, y, to_x, to_y, style);
}

static const char middle[] = "text-anchor=\"middle\"",
                  white[] = "text-anchor=\"middle\" fill=\"#fff\"",
                  arrow[] = " marker-end=\"url(#arrow)\"";

static void draw_row(double y) {
    char word[16];
    heading(y, "A sequence in 8 cells, split over 4 ranks");
    for (int i = 0; i < CELLS; i++) {
        snprintf(word, sizeof word, "%d", i);
        box(left + i * wide, y + 14, wide - 3, 36, colors[holder[i]]);
        text(left + i * wide + (wide - 3) / 2.0, y + 38, white, word);
    }
}

/* Rank r holds its two cells and hands keys and values to the next. */
static void draw_ring(double y) {
    double part = 84, gap = 32, at = left;
    char word[32];
    heading(y, "Ring attention: keys and values move on");
    for (int r = 0; r < RANKS; r++, at += part + gap) {
        box(at, y + 16, part, 44, colors[r]);
        snprintf(word, sizeof word, "rank %d", r);
        text(at + part / 2, y + 43, white, word);
        if (r + 1 < RANKS) line(at + part, y + 38, at + part + gap - 7, y + 38, arrow);
    }
    at -= part / 2 + gap;
    printf(
        "<path d=\"M%g %gV%gH%gV%g\" fill=\"none\" stroke=\"#444\" stroke-width=\"1.5\"%s/>\n",
        at, y + 60, y + 76, left + part / 2, y + 67, arrow);
}

/* Leaves in the colour of who computes them; whoever has both operands adds. */
static void draw_tree(double y) {
    char word[16];
    heading(y, "All sums over tokens follow one tree");
    for (int count = CELLS, level = 0; count >= 1; count /= 2, level++) {
        double step = (double)CELLS / count * wide, at = y + 200 - level * 52;
        for (int i = 0; i < count; i++) {
            double x = left + (i + 0.5) * step - 1.5;
            if (count > 1) line(x, at - 12, x + (i % 2 ? -step : step) / 2, at - 42, "");
            if (level == 0) {
                snprintf(word, sizeof word, "%d", i);
                box(x - 17, at - 13, 34, 26, colors[holder[i]]);
                text(x, at + 6, white, word);
                continue;
            }
            printf("<circle cx=\"%g\" cy=\"%g\" r=\"12\" fill=\"#fff\" stroke=\"#444\"/>\n", x,
                   at);
            text(x, at + 5, middle, "+");
        }
    }
    text(left, y + 240, "", "On 1 rank and on 4 these are the same additions:");
    text(left, y + 262, "", "the same order, the same rounding, the same bits.");
}

int main(void) {
    if (deal()) return 1;
    printf("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d 500\" width=\"%d\" "
           "font-family=\"sans-serif\" font-size=\"16\" fill=\"#222\">\n"
           "<!-- SPDX-License-Identifier: MIT OR Unlicense -->\n"
           "<title>A row over four ranks, the ring, and the tree of sums</title>\n"
           "<defs><marker id=\"arrow\" viewBox=\"0 0 8 8\" refX=\"4\" refY=\"4\" "
           "markerWidth=\"7\" markerHeight=\"7\" orient=\"auto\"><path d=\"M0 0L8 4L0 8z\" "
           "fill=\"#444\"/></marker></defs>\n"
           "<rect width=\"%d\" height=\"500\" fill=\"#fff\"/>\n",
           WIDTH, WIDTH, WIDTH);
    draw_row(30);
    draw_ring(112);
    draw_tree(220);
    printf("</svg>\n");
    return demo_print_failed("the picture");
}
