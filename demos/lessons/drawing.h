/* SPDX-License-Identifier: MIT OR Unlicense */
/* drawing.h - pictures of the lessons, as SVG on stdout. Colours are classes, so that one picture
 * is readable on light and on dark pages. A picture that changes step by step is a series of
 * frames of one size: side by side in the file, one at a time behind a slider on the page. */
#ifndef LESSON_DRAWING_H
#define LESSON_DRAWING_H
#include <stdarg.h>
#include <stdio.h>

enum { PICTURE_WIDTH = 480, FRAME_COLUMNS = 2, FRAME_WIDTH = PICTURE_WIDTH / FRAME_COLUMNS };

static const char picture_style[] =
    ".lesson text{font:15px sans-serif;fill:#222}.lesson .m{text-anchor:middle}"
    ".lesson .e{text-anchor:end}.lesson .b{font-weight:bold}.lesson .w{fill:#fff}"
    ".lesson .s{font-size:13px}.lesson .p{fill:#fff}.lesson .g{fill:#e4e4e4}"
    ".lesson .r0{fill:#0072b2}.lesson .r1{fill:#b34700}.lesson .r2{fill:#00795a}"
    ".lesson .r3{fill:#a3507f}.lesson .u{fill:#7b3fb5}.lesson .n{fill:#857500}"
    ".lesson .d{fill:#555}.lesson .f{opacity:.3}.lesson .x{fill:#c00020}"
    ".lesson .o{fill:none;stroke:#c00020;stroke-width:3}"
    ".lesson .l{fill:none;stroke:#444;stroke-width:1.5}"
    "@media(prefers-color-scheme:dark){.lesson text{fill:#ddd}.lesson .w{fill:#fff}"
    ".lesson .p{fill:#16181c}.lesson .g{fill:#3a3d44}.lesson .l{stroke:#bbb}"
    ".lesson .x{fill:#ff5c6c}.lesson .o{stroke:#ff5c6c}}";

/* frames: how many; 0: the picture does not change. Their size is FRAME_WIDTH x height. */
static inline void picture_begin(const char *title, int height, int frames) {
    int rows = (frames + FRAME_COLUMNS - 1) / FRAME_COLUMNS;
    int all = frames ? rows * height : height;
    printf("<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"lesson\" viewBox=\"0 0 %d %d\" "
           "width=\"%d\" role=\"img\"",
           PICTURE_WIDTH, all, PICTURE_WIDTH);
    if (frames) printf(" data-frame=\"%d %d\"", FRAME_WIDTH, height);
    printf(">\n<!-- SPDX-License-Identifier: MIT OR Unlicense -->\n<title>%s</title>\n"
           "<style>%s</style>\n<defs><marker id=\"arrow\" viewBox=\"0 0 8 8\" refX=\"7\" "
           "refY=\"4\" markerWidth=\"7\" markerHeight=\"7\" orient=\"auto\">"
           "<path d=\"M0 0L8 4L0 8z\" fill=\"#888\"/></marker></defs>\n"
           "<rect width=\"%d\" height=\"%d\" class=\"p\"/>\n",
           title, picture_style, PICTURE_WIDTH, all);
}

static inline void picture_end(void) { printf("</svg>\n"); }

static inline void frame_begin(int frame, int height) {
    printf("<g class=\"frame\" transform=\"translate(%d,%d)\">\n",
           frame % FRAME_COLUMNS * FRAME_WIDTH, frame / FRAME_COLUMNS * height);
}

static inline void frame_end(void) { printf("</g>\n"); }

__attribute__((format(printf, 4, 5))) static inline void draw_text(double x, double y,
                                                                   const char *classes,
                                                                   const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("<text x=\"%g\" y=\"%g\" class=\"%s\">", x, y, classes);
    vprintf(format, args);
    printf("</text>\n");
    va_end(args);
}

static inline void draw_box(double x, double y, double w, double h, const char *classes) {
    printf("<rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\" rx=\"3\" class=\"%s\"/>\n", x, y,
           w, h, classes);
}

static inline void draw_line(double x, double y, double to_x, double to_y, int arrow) {
    printf("<path d=\"M%g %gL%g %g\" class=\"l\"%s/>\n", x, y, to_x, to_y,
           arrow ? " marker-end=\"url(#arrow)\"" : "");
}

/* The class of rank r's colour, with another class in front. */
static inline const char *rank_class(const char *more, int64_t rank) {
    static char text[4][16];
    static int at;
    at = (at + 1) % 4;
    snprintf(text[at], sizeof text[at], "%sr%d", more, (int)(rank % 4));
    return text[at];
}
#endif
