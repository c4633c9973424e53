/* SPDX-License-Identifier: MIT OR Unlicense */
/* plot.h - line plots as self-contained SVG files.
 *
 *     double loss[] = {5.5, 2.1, 1.3};
 *     demo_series series[] = {{.name = "P = 4", .y = loss, .points = 3}};
 *     demo_plot plot = {.title = "Loss", .x_label = "step", .y_label = "nats",
 *                       .series = series, .series_count = 1};
 *     demo_plot_write("loss.svg", &plot, &error);
 *
 * The plots often show curves that coincide. So each of the last four series is drawn thinner
 * than the one before, and all four stay visible. Points that are not finite, or not positive
 * on a log axis, leave a gap. */
#ifndef DEMO_PLOT_H
#define DEMO_PLOT_H

#include "trainer/data/data.h" /* demo_write_atomically */

typedef struct {
    const char *name;
    const double *x; /* (points); NULL: 1, 2, 3, ... */
    const double *y; /* (points) */
    int64_t points;
} demo_series;

typedef struct {
    const char *title, *x_label, *y_label;
    const demo_series *series;
    int64_t series_count;
    bool log_y;
    int width, height; /* in pixels; 0: 860 x 480 */
} demo_plot;

/* The frame of the curves in pixels, and the values at its edges. y is log10 of the value on
   a log axis. */
typedef struct {
    double left, top, right, bottom;
    double x_low, x_high, y_low, y_high;
    bool log_y;
} demo_axes;

/* Okabe and Ito's colours, which colour-blind readers can tell apart; the yellow, too pale
   on white, is left out. */
static inline const char *demo_series_color(int64_t i) {
    static const char *const colors[] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7",
                                         "#E69F00", "#56B4E9", "#000000"};
    return colors[i % 7];
}

static inline double demo_series_stroke(int64_t i, int64_t count) {
    double wide = 1.6 + 2.4 * (double)(count - 1 - i);
    return wide < 7 ? wide : 7;
}

static inline double demo_series_x(const demo_series *series, int64_t i) {
    return series->x ? series->x[i] : (double)(i + 1);
}

static inline bool demo_plot_shows(const demo_series *series, int64_t i, bool log_y) {
    return isfinite(demo_series_x(series, i)) && isfinite(series->y[i]) &&
           (!log_y || series->y[i] > 0);
}

/* ---- ticks ---- */

/* Returns the round step nearest to `rough`: 1, 2, 5 or 10 times a power of ten. */
static inline double demo_nice_step(double rough) {
    double power = pow(10, floor(log10(rough)));
    double digit = rough / power;
    return power * (digit < 1.5 ? 1 : digit < 3.5 ? 2 : digit < 7.5 ? 5 : 10);
}

/* Fills ticks (room for 64) with round values inside [low, high], about `wanted` of them;
   returns how many. */
static inline int demo_ticks_linear(double *ticks, double low, double high, int wanted) {
    int count = 0;
    double step = demo_nice_step((high - low) / wanted);
    for (double i = ceil(low / step - 1e-9); i * step <= high + 1e-9 * step && count < 64; i++)
        ticks[count++] = i * step + 0.0; /* never -0 */
    return count;
}

/* Ticks for an axis of log10 values: decades, with 2 and 5 between them while there are few;
 * within a single decade, round values. */
static inline int demo_ticks_log(double *ticks, double low, double high) {
    int count = 0;
    if (high - low < 1) {
        count = demo_ticks_linear(ticks, pow(10, low), pow(10, high), 5);
        for (int i = 0; i < count; i++) ticks[i] = log10(ticks[i]);
        return count;
    }
    double stride = demo_nice_step((high - low) / 8 < 1 ? 1 : (high - low) / 8);
    for (double decade = floor(low / stride) * stride; decade <= high; decade += stride)
        for (int digit = 1; digit <= 5; digit += digit == 1 ? 1 : 3) {
            double at = decade + log10(digit);
            bool shown = digit == 1 || high - low <= 2.5;
            if (shown && at >= low - 1e-9 && at <= high + 1e-9 && count < 64)
                ticks[count++] = at;
        }
    return count;
}

/* Formats a tick, such as 250, 0.05 or 1e-7, without the rounding error of i * step. */
static inline void demo_tick_label(char *label, size_t size, double value) {
    double exponent = fabs(value) > 0 ? floor(log10(fabs(value)) + 1e-9) : 0;
    if (exponent >= -3 && exponent < 6)
        snprintf(label, size, "%.10g", value);
    else
        snprintf(label, size, "%.6ge%.0f", value / pow(10, exponent), exponent);
}

/* ---- ranges ---- */

static inline void demo_widen(double *low, double *high, double share) {
    double margin = *high > *low     ? (*high - *low) * share
                    : fabs(*low) > 0 ? fabs(*low) * 0.1
                                     : 1;
    *low -= margin;
    *high += margin;
}

/* Finds the values at the frame's edges; false if there is no point to show. */
static inline bool demo_axes_fit(demo_axes *axes, const demo_plot *plot) {
    axes->x_low = axes->y_low = HUGE_VAL;
    axes->x_high = axes->y_high = -HUGE_VAL;
    for (int64_t s = 0; s < plot->series_count; s++)
        for (int64_t i = 0; i < plot->series[s].points; i++) {
            if (!demo_plot_shows(&plot->series[s], i, plot->log_y)) continue;
            double x = demo_series_x(&plot->series[s], i), y = plot->series[s].y[i];
            if (plot->log_y) y = log10(y);
            axes->x_low = fmin(axes->x_low, x);
            axes->x_high = fmax(axes->x_high, x);
            axes->y_low = fmin(axes->y_low, y);
            axes->y_high = fmax(axes->y_high, y);
        }
    if (axes->x_low > axes->x_high) return false;
    if (axes->x_low == axes->x_high) demo_widen(&axes->x_low, &axes->x_high, 0);
    demo_widen(&axes->y_low, &axes->y_high, 0.05);
    return true;
}

static inline double demo_pixel_x(const demo_axes *axes, double x) {
    return axes->left +
           (axes->right - axes->left) * (x - axes->x_low) / (axes->x_high - axes->x_low);
}

static inline double demo_pixel_y(const demo_axes *axes, double y) {
    return axes->bottom -
           (axes->bottom - axes->top) * (y - axes->y_low) / (axes->y_high - axes->y_low);
}

/* ---- SVG ---- */

/* Escapes <, > and & for XML, and leaves out control characters. */
static inline void demo_svg_escape(FILE *svg, const char *text) {
    for (; text && *text; text++) {
        const char *entity = *text == '<'   ? "&lt;"
                             : *text == '>' ? "&gt;"
                             : *text == '&' ? "&amp;"
                                            : NULL;
        if (entity)
            fputs(entity, svg);
        else if (!iscntrl((unsigned char)*text))
            fputc(*text, svg);
    }
}

static inline void demo_svg_text(FILE *svg, double x, double y, const char *attributes,
                                 const char *text) {
    fprintf(svg, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, attributes);
    demo_svg_escape(svg, text);
    fprintf(svg, "</text>\n");
}

static inline void demo_svg_line(FILE *svg, double x1, double y1, double x2, double y2,
                                 const char *color, double wide) {
    fprintf(svg,
            "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\" "
            "stroke-width=\"%.1f\"/>\n",
            x1, y1, x2, y2, color, wide);
}

static inline void demo_svg_grid_x(FILE *svg, const demo_axes *axes) {
    double ticks[64];
    char label[32];
    int count = demo_ticks_linear(ticks, axes->x_low, axes->x_high, 7);
    for (int i = 0; i < count; i++) {
        double x = demo_pixel_x(axes, ticks[i]);
        demo_svg_line(svg, x, axes->top, x, axes->bottom, "#e6e6e6", 1);
        demo_tick_label(label, sizeof label, ticks[i]);
        demo_svg_text(svg, x, axes->bottom + 20, "text-anchor=\"middle\"", label);
    }
}

static inline void demo_svg_grid_y(FILE *svg, const demo_axes *axes) {
    double ticks[64];
    char label[32];
    int count = axes->log_y ? demo_ticks_log(ticks, axes->y_low, axes->y_high)
                            : demo_ticks_linear(ticks, axes->y_low, axes->y_high, 6);
    for (int i = 0; i < count; i++) {
        double y = demo_pixel_y(axes, ticks[i]);
        demo_svg_line(svg, axes->left, y, axes->right, y, "#e6e6e6", 1);
        demo_tick_label(label, sizeof label, axes->log_y ? pow(10, ticks[i]) : ticks[i]);
        demo_svg_text(svg, axes->left - 9, y + 5, "text-anchor=\"end\"", label);
    }
}

static inline void demo_svg_dot(FILE *svg, double x, double y, double wide, const char *color) {
    fprintf(svg, "<circle cx=\"%.2f\" cy=\"%.2f\" r=\"%.1f\" fill=\"%s\"/>\n", x, y,
            wide / 2 + 1, color);
}

/* One series: a polyline per run of points without a gap; a run of one point is a dot. */
static inline void demo_svg_series(FILE *svg, const demo_axes *axes, const demo_series *series,
                                   const char *color, double wide) {
    for (int64_t start = 0, end; start < series->points; start = end + 1) {
        for (end = start; end < series->points && demo_plot_shows(series, end, axes->log_y);
             end++)
            continue;
        if (end - start > 1)
            fprintf(svg,
                    "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%.1f\" "
                    "stroke-linejoin=\"round\" points=\"",
                    color, wide);
        for (int64_t i = start; i < end; i++) {
            double x = demo_pixel_x(axes, demo_series_x(series, i));
            double y = demo_pixel_y(axes, axes->log_y ? log10(series->y[i]) : series->y[i]);
            if (end - start == 1)
                demo_svg_dot(svg, x, y, wide, color);
            else
                fprintf(svg, "%s%.2f,%.2f", i > start ? " " : "", x, y);
        }
        if (end - start > 1) fputs("\"/>\n", svg);
    }
}

/* Writes the title, the names of the axes, and the legend. */
static inline void demo_svg_labels(FILE *svg, const demo_axes *axes, const demo_plot *plot,
                                   int width, int height) {
    char turned[96];
    double middle = (axes->top + axes->bottom) / 2;
    snprintf(turned, sizeof turned, "text-anchor=\"middle\" transform=\"rotate(-90 18 %.1f)\"",
             middle);
    demo_svg_text(svg, width / 2.0, 28,
                  "text-anchor=\"middle\" font-size=\"18\" font-weight=\"bold\"", plot->title);
    demo_svg_text(svg, (axes->left + axes->right) / 2, height - 14, "text-anchor=\"middle\"",
                  plot->x_label);
    demo_svg_text(svg, 18, middle, turned, plot->y_label);
    for (int64_t s = 0; s < plot->series_count; s++) {
        double x = axes->right + 16, y = axes->top + 12 + 22 * (double)s;
        demo_svg_line(svg, x, y, x + 26, y, demo_series_color(s),
                      demo_series_stroke(s, plot->series_count));
        demo_svg_text(svg, x + 34, y + 5, "", plot->series[s].name);
    }
}

/* The width of the legend, in pixels, estimated from the longest name. It is to the right of
   the frame, so that it never hides a curve. */
static inline double demo_legend_width(const demo_plot *plot) {
    size_t longest = 4;
    for (int64_t s = 0; s < plot->series_count; s++)
        if (plot->series[s].name && strlen(plot->series[s].name) > longest)
            longest = strlen(plot->series[s].name);
    return 60 + 8.5 * (double)longest;
}

/* Writes the whole SVG file: grid, frame, series, labels. */
static inline void demo_svg_draw(FILE *svg, const demo_plot *plot, demo_axes *axes, int width,
                                 int height) {
    fprintf(svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 "
            "0 %d %d\" "
            "font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\" font-size=\"14\" "
            "fill=\"#222\">\n",
            width, height, width, height);
    fprintf(svg, "<rect width=\"%d\" height=\"%d\" fill=\"white\"/>\n", width, height);
    demo_svg_grid_x(svg, axes);
    demo_svg_grid_y(svg, axes);
    demo_svg_line(svg, axes->left, axes->bottom, axes->right, axes->bottom, "#444", 1.2);
    demo_svg_line(svg, axes->left, axes->top, axes->left, axes->bottom, "#444", 1.2);
    for (int64_t s = 0; s < plot->series_count; s++)
        demo_svg_series(svg, axes, &plot->series[s], demo_series_color(s),
                        demo_series_stroke(s, plot->series_count));
    demo_svg_labels(svg, axes, plot, width, height);
    fputs("</svg>\n", svg);
}

/* Draws the plot into the file, whole or not at all. Returns 0, or -1 with one sentence in
   error. */
static inline int demo_plot_write(const char *path, const demo_plot *plot, demo_error *error) {
    int width = plot->width ? plot->width : 860, height = plot->height ? plot->height : 480;
    demo_axes axes = {
        78, 46, width - demo_legend_width(plot), (double)height - 62, 0, 0, 0, 0, plot->log_y};
    bool small = axes.right - axes.left < 80 || axes.bottom - axes.top < 60;
    if (small)
        demo_fail(error, "%s: %d x %d pixels are too few for the curves", path, width, height);
    if (small) return -1;
    bool any = demo_axes_fit(&axes, plot);
    if (!any)
        demo_fail(error, "%s: no finite point%s to plot", path, plot->log_y ? " above 0" : "");
    if (!any) return -1;
    char *text = NULL;
    size_t size = 0;
    FILE *svg = open_memstream(&text, &size);
    if (svg) demo_svg_draw(svg, plot, &axes, width, height);
    bool whole = svg && !ferror(svg);
    if (svg && fclose(svg)) whole = false;
    int failed = whole ? demo_write_atomically(path, text, size, error) : -1;
    if (!whole) demo_fail(error, "%s: no memory for the picture", path);
    free(text);
    return failed;
}

#endif
