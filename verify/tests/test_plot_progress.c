/* SPDX-License-Identifier: MIT OR Unlicense */
/* What a run shows: plots as SVG, drawn to scale with round ticks, and the line of progress. */
#define STB_DS_IMPLEMENTATION
#include "trainer/log/plot.h"
#include "trainer/log/progress.h"
#include "support/trainer_cases.h"

/* ---- plots ---- */

/* A reader of XML just able to say no: tags must nest, attributes be quoted, text hold no
   bare mark. */
static bool is_well_formed(const char *xml) {
    char open[16][24];
    int depth = 0, roots = 0;
    for (const char *at = xml; *at;) {
        if (*at != '<') {
            EXPECT(*at != '>' && (*at != '&' || !strncmp(at, "&lt;", 4) ||
                                  !strncmp(at, "&gt;", 4) || !strncmp(at, "&amp;", 5)));
            EXPECT(depth > 0 || isspace((unsigned char)*at));
            at++;
            continue;
        }
        bool closing = at[1] == '/';
        const char *name = at + 1 + closing;
        int length = (int)strcspn(name, " />");
        bool quoted = false;
        for (at = name; *at && (quoted || *at != '>'); at++) quoted ^= *at == '"';
        EXPECT(*at == '>' && !quoted && length < 24 && depth < 16);
        if (closing) {
            EXPECT(depth > 0 && (int)strlen(open[depth - 1]) == length &&
                   !strncmp(open[depth - 1], name, (size_t)length));
            depth--;
        } else if (at[-1] != '/') {
            roots += depth == 0;
            snprintf(open[depth++], sizeof open[0], "%.*s", length, name);
        }
        at++;
    }
    EXPECT(depth == 0 && roots == 1);
    return true;
}

static int count_of(const char *text, const char *part) {
    int count = 0;
    for (; (text = strstr(text, part)); text++) count++;
    return count;
}

static char *drawn(const demo_plot *plot) {
    size_t size;
    const char *path = in_scratch("plot.svg");
    return demo_plot_write(path, plot, &message) ? NULL : demo_read_file(path, &size);
}

static bool plots_are_well_formed(void) {
    double y[50], z[50];
    for (int i = 0; i < 50; i++) y[i] = 5.0 / (i + 1), z[i] = i % 20 == 9 ? NAN : y[i] + 1;
    demo_series series[] = {{"P = 1", NULL, y, 50}, {"<P> & \"4\"", NULL, z, 50}};
    demo_plot plot = {.title = "loss < 1 & falling",
                      .x_label = "step",
                      .y_label = "nats",
                      .series = series,
                      .series_count = 2};
    char *svg = drawn(&plot);
    EXPECT(svg && is_well_formed(svg));
    EXPECT(count_of(svg, "<polyline") == 1 + 3 && holds(svg, "loss &lt; 1 &amp; falling") &&
           holds(svg, "&lt;P&gt; &amp;"));
    EXPECT(!holds(svg, "nan") && !holds(svg, "inf") && !holds(svg, "(null)"));
    free(svg);
    plot.log_y = true;
    y[7] = 0; /* has no logarithm: a gap */
    svg = drawn(&plot);
    EXPECT(svg && is_well_formed(svg) && count_of(svg, "<polyline") == 2 + 3 &&
           !holds(svg, "nan") && !holds(svg, "inf"));
    free(svg);
    return true;
}

static bool odd_plots_are_drawn_or_refused(void) {
    double y[] = {3, 3, 3}, bad[] = {NAN, HUGE_VAL, -1};
    demo_series flat = {"flat", NULL, y, 3}, dot = {"dot", NULL, y, 1},
                none = {"none", NULL, bad, 3};
    demo_plot plot = {.series = &flat, .series_count = 1};
    char *svg = drawn(&plot);
    EXPECT(svg && is_well_formed(svg) && !holds(svg, "nan"));
    free(svg);
    plot.series = &dot;
    svg = drawn(&plot);
    EXPECT(svg && is_well_formed(svg) && count_of(svg, "<circle") == 1);
    free(svg);
    plot.series = &none;
    plot.log_y = true;
    EXPECT(!drawn(&plot) && holds(message.text, "no finite point above 0 to plot"));
    plot.series = &flat;
    plot.width = 100;
    EXPECT(!drawn(&plot) && holds(message.text, "100 x 480 pixels are too few"));
    return true;
}

static bool ticks_are_round(void) {
    double ticks[64];
    char label[32];
    int count = demo_ticks_linear(ticks, 0.13, 0.97, 5);
    EXPECT(count == 4 && !(fabs(ticks[0] - 0.2) > 1e-12) && !(fabs(ticks[3] - 0.8) > 1e-12));
    count = demo_ticks_log(ticks, -7.2, -0.5);
    EXPECT(count == 7 && !(fabs(ticks[0] + 7) > 1e-12) && !(fabs(ticks[6] + 1) > 1e-12));
    demo_tick_label(label, sizeof label, 1e-7);
    EXPECT_TEXT(label, "1e-7");
    demo_tick_label(label, sizeof label, 0.1 * 3);
    EXPECT_TEXT(label, "0.3");
    demo_tick_label(label, sizeof label, 20000);
    EXPECT_TEXT(label, "20000");
    for (double low = -3; low < 3; low += 0.37)
        for (double high = low + 1e-3; high<low + 40; high *= high> 0 ? 3 : -1) {
            count = demo_ticks_log(ticks, low, high);
            EXPECT(count < 25);
            for (int i = 0; i < count; i++)
                EXPECT(ticks[i] >= low - 1e-6 && ticks[i] <= high + 1e-6);
            if (high < 1e-3) high = 1e-3;
        }
    return true;
}

/* A small plot, by its numbers: 211 pixels for 1 to 9, 92 for 0.125 to 8.375; or for the logarithms
   of 0.5 to 8 and a twentieth more on both sides. */
static bool plots_are_drawn_to_scale(void) {
    static const double x[] = {2, 3, 5, 9}, y[] = {0.5, 2, NAN, 8}, z[] = {4, 4, 1, 4};
    static const demo_series series[] = {{"P = 1", x, y, 4}, {"second", NULL, z, 4}};
    static const char *const parts[2][14] = {
        {"<line x1=\"78.0\" y1=\"46.0\" x2=\"78.0\" y2=\"138.0\" stroke=\"#e6e6e6\" "
         "stroke-width=\"1.0\"/>\n<text x=\"78.0\" y=\"158.0\" text-anchor=\"middle\">1</text>\n",
         "<text x=\"289.0\" y=\"158.0\" text-anchor=\"middle\">9</text>\n<line x1=\"78.0\" "
         "y1=\"128.2\" x2=\"289.0\" y2=\"128.2\" stroke=\"#e6e6e6\" stroke-width=\"1.0\"/>\n<text "
         "x=\"69.0\" y=\"133.2\" text-anchor=\"end\">1</text>\n",
         "<text x=\"69.0\" y=\"55.2\" text-anchor=\"end\">8</text>\n<line x1=\"78.0\" y1=\"138.0\" "
         "x2=\"289.0\" y2=\"138.0\" stroke=\"#444\" stroke-width=\"1.2\"/>\n<line x1=\"78.0\" "
         "y1=\"46.0\" x2=\"78.0\" y2=\"138.0\" stroke=\"#444\" stroke-width=\"1.2\"/>\n",
         "stroke=\"#0072B2\" stroke-width=\"4.0\" stroke-linejoin=\"round\" points=\"104.38,133.82 "
         "130.75,117.09\"/>\n<circle cx=\"289.00\" cy=\"50.18\" r=\"3.0\" fill=\"#0072B2\"/>\n",
         "stroke=\"#D55E00\" stroke-width=\"1.6\" stroke-linejoin=\"round\" points=\"78.00,94.79 "
         "104.38,94.79 130.75,128.24 157.12,94.79\"/>\n",
         "<text x=\"200.0\" y=\"28.0\" text-anchor=\"middle\" font-size=\"18\" "
         "font-weight=\"bold\">t</text>\n<text x=\"183.5\" y=\"186.0\" "
         "text-anchor=\"middle\">x</text>\n<text x=\"18.0\" y=\"92.0\" text-anchor=\"middle\" "
         "transform=\"rotate(-90 18 92.0)\">y</text>\n",
         "<line x1=\"305.0\" y1=\"58.0\" x2=\"331.0\" y2=\"58.0\" stroke=\"#0072B2\" "
         "stroke-width=\"4.0\"/>\n<text x=\"339.0\" y=\"63.0\" >P = 1</text>\n",
         "<line x1=\"305.0\" y1=\"80.0\" x2=\"331.0\" y2=\"80.0\" stroke=\"#D55E00\" "
         "stroke-width=\"1.6\"/>\n<text x=\"339.0\" y=\"85.0\" >second</text>\n</svg>\n",
         "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"400\" height=\"200\" viewBox=\"0 0 400 "
         "200\" ",
         "<rect width=\"400\" height=\"200\" fill=\"white\"/>\n"},
        {"<text x=\"78.0\" y=\"158.0\" text-anchor=\"middle\">2</text>\n",
         "<line x1=\"78.0\" y1=\"133.8\" x2=\"297.5\" y2=\"133.8\" stroke=\"#e6e6e6\" "
         "stroke-width=\"1.0\"/>\n<text x=\"69.0\" y=\"138.8\" text-anchor=\"end\">0.5</text>\n",
         "<text x=\"69.0\" y=\"117.9\" text-anchor=\"end\">1</text>\n",
         "<text x=\"69.0\" y=\"97.0\" text-anchor=\"end\">2</text>\n",
         "<text x=\"69.0\" y=\"69.4\" text-anchor=\"end\">5</text>\n<line x1=\"78.0\" y1=\"138.0\"",
         "stroke-width=\"1.6\" stroke-linejoin=\"round\" points=\"78.00,133.82 "
         "109.36,92.00\"/>\n<circle cx=\"297.50\" cy=\"50.18\" r=\"1.8\" fill=\"#0072B2\"/>\n"}};
    for (int log = 0; log < 2; log++) {
        const demo_plot plot = {.title = "t",
                                .x_label = "x",
                                .y_label = "y",
                                .series = series,
                                .series_count = log ? 1 : 2,
                                .log_y = log,
                                .width = 400,
                                .height = 200};
        char *svg = drawn(&plot);
        EXPECT(svg && count_of(svg, "#e6e6e6") == (log ? 8 + 4 : 9 + 8));
        for (int i = 0; parts[log][i]; i++)
            if (!holds(svg, parts[log][i])) EXPECT_TEXT(svg, parts[log][i]);
        free(svg);
    }
    return true;
}

/* Rooms that just hold a plot, and by one pixel do not; colours and strokes of many series. */
static bool plots_have_least_sizes(void) {
    static const double y[] = {1, 2};
    static const demo_series one = {"name", NULL, y, 2};
    demo_plot plot = {.series = &one, .series_count = 1};
    for (int wide = 251; wide < 254; wide++)
        for (int high = 167; high < 170; high++) {
            char sentence[600];
            plot.width = wide, plot.height = high;
            char *svg = drawn(&plot);
            EXPECT(!svg == (wide < 252 || high < 168));
            snprintf(sentence, sizeof sentence, ": %d x %d pixels are too few for the curves",
                     wide, high);
            EXPECT(svg || holds(message.text, sentence));
            free(svg);
        }
    EXPECT_TEXT(demo_series_color(0), "#0072B2");
    EXPECT_TEXT(demo_series_color(6), "#000000");
    EXPECT_TEXT(demo_series_color(7), "#0072B2");
    static const double strokes[] = {7, 6.4, 4, 1.6};
    for (int i = 0; i < 4; i++)
        EXPECT(fabs(demo_series_stroke(i, 4) - (i ? strokes[i] : 7)) < 1e-12);
    double low = 4, high = 4;
    demo_widen(&low, &high, 0.5);
    EXPECT(fabs(low - 3.6) < 1e-12 && fabs(high - 4.4) < 1e-12);
    low = high = 0;
    demo_widen(&low, &high, 0.5);
    EXPECT(low == -1 && high == 1);
    low = high = -2;
    demo_widen(&low, &high, 0.5);
    EXPECT(fabs(low + 2.2) < 1e-12 && fabs(high + 1.8) < 1e-12);
    low = 1, high = 3;
    demo_widen(&low, &high, 0.25);
    EXPECT(low == 0.5 && high == 3.5);
    return true;
}

/* Steps are the nearest of 1, 2 and 5; labels are short from a thousandth to a million. */
static bool steps_and_labels_are_round(void) {
    static const double steps[][2] = {{1, 1},        {1.49, 1}, {1.5, 2},  {3.49, 2},
                                      {3.5, 5},      {7.49, 5}, {7.5, 10}, {9.9, 10},
                                      {0.016, 0.02}, {340, 200}};
    static const struct {
        double value;
        const char *label;
    } labels[] = {{0, "0"},           {0.001, "0.001"},  {0.0009, "9e-4"},     {-0.25, "-0.25"},
                  {999999, "999999"}, {1000000, "1e6"},  {-2500000, "-2.5e6"}, {0.1 * 3, "0.3"},
                  {1e-12, "1e-12"},   {100000, "100000"}};
    char label[32];
    double ticks[64];
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++)
        EXPECT(fabs(demo_nice_step(steps[i][0]) / steps[i][1] - 1) < 1e-12);
    for (size_t i = 0; i < sizeof labels / sizeof labels[0]; i++) {
        demo_tick_label(label, sizeof label, labels[i].value);
        EXPECT_TEXT(label, labels[i].label);
    }
    EXPECT(demo_ticks_linear(ticks, 0, 1, 5) == 6 && ticks[0] == 0 &&
           fabs(ticks[5] - 1) < 1e-12);
    EXPECT(demo_ticks_linear(ticks, -0.1, 0.1, 2) == 3 && !signbit(ticks[1]));
    EXPECT(demo_ticks_linear(ticks, 0, 1000, 1000) == 64); /* as many as there is room for */
    /* decades, between them 2 and 5 up to two and a half; every other one of many */
    EXPECT(demo_ticks_log(ticks, 0, 2.5) == 8 && fabs(ticks[7] - 2 - log10(2)) < 1e-12);
    EXPECT(demo_ticks_log(ticks, 0, 2.51) == 3 && fabs(ticks[2] - 2) < 1e-12);
    EXPECT(demo_ticks_log(ticks, 0, 1) == 4 && fabs(ticks[1] - log10(2)) < 1e-12 &&
           fabs(ticks[2] - log10(5)) < 1e-12);
    EXPECT(demo_ticks_log(ticks, 0, 8) == 9 && demo_ticks_log(ticks, -1, 16) == 9 &&
           fabs(ticks[8] - 16) < 1e-12);
    return true;
}

/* ---- progress ---- */

/* What is counted and shown has other names where a trainer says so; edges of every unit. */
static bool progress_has_names_and_units(void) {
    static const struct {
        double value;
        const char *duration, *count;
    } cases[] = {{-3, "0:00", "-3"},
                 {0.49, "0:00", "0"},
                 {59.5, "1:00", "60"},
                 {3599.4, "59:59", "3599"},
                 {3599.5, "1:00:00", "3600"},
                 {9999, "2:46:39", "9999"},
                 {10000, "2:46:40", "10.0k"},
                 {999949, "277:45:49", "999.9k"},
                 {1000000, "277:46:40", "1.00M"}};
    char text[DEMO_LINE_LIMIT];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        demo_duration_text(text, sizeof text, cases[i].value);
        EXPECT_TEXT(text, cases[i].duration);
        demo_count_text(text, sizeof text, cases[i].value);
        EXPECT_TEXT(text, cases[i].count);
    }
    demo_progress progress = {.total = 9,
                              .resumed = 3,
                              .step = 5,
                              .tokens = 400,
                              .loss = 0.5,
                              .round = "rollout",
                              .value = "reward"};
    demo_progress_text(&progress, 4, 200, text);
    EXPECT_TEXT(text, "rollout 5/9  reward 0.5000  100 tokens/s  0:08 left");
    demo_progress_text(&progress, 0, 200, text);
    EXPECT_TEXT(text, "rollout 5/9  reward 0.5000");
    progress.terminal = true; /* a bar in what is left: 8 to 40 wide */
    demo_progress_text(&progress, 4, 64, text);
    EXPECT_TEXT(text, "[####....]  rollout 5/9  reward 0.5000  100 tokens/s  0:08 left");
    demo_progress_text(&progress, 4, 63, text);
    EXPECT_TEXT(text, "rollout 5/9  reward 0.5000  100 tokens/s  0:08 left");
    progress.step = 12; /* beyond the end */
    demo_progress_text(&progress, 4, 200, text);
    EXPECT_TEXT(text,
                "[########################################]  rollout 12/9  reward 0.5000  "
                "100 tokens/s  0:00 left");
    progress.total = 0;
    demo_progress_text(&progress, 0, 200, text);
    EXPECT_TEXT(text,
                "[........................................]  rollout 12/0  reward 0.5000");
    return true;
}

/* Without a terminal: every so many steps and the last; 0: the last. Tokens are those of all. */
static bool progress_is_due(void) {
    for (int every = 0; every < 4; every++) {
        size_t size;
        const char *path = in_scratch("due");
        demo_progress progress;
        demo_progress_begin(&progress, 2, 7, every);
        EXPECT(progress.step == 2 && progress.resumed == 2 && progress.out == stderr &&
               progress.logging_steps == every && progress.total == 7);
        progress.out = fopen(path, "wb");
        progress.terminal = false;
        for (int step = 3; step <= 7; step++)
            demo_progress_step(&progress, step, step, 10 * step);
        demo_progress_end(&progress);
        fclose(progress.out);
        EXPECT(progress.tokens == 250 && progress.step == 7);
        char *text = demo_read_file(path, &size);
        static const int lines[] = {1, 5, 3, 3};
        EXPECT(count_of(text, "\n") == lines[every] && holds(text, "step 7/7  loss 7.0000"));
        EXPECT(holds(text, "step 6/7") == (every > 0) &&
               holds(text, "step 4/7") == (every == 1 || every == 2));
        free(text);
    }
    return true;
}

static bool progress_fits_the_window(void) {
    char text[DEMO_LINE_LIMIT];
    demo_progress progress = {
        .terminal = true, .total = 1000, .step = 250, .tokens = 2500000, .loss = 1.25};
    for (int columns = 0; columns < 400; columns++) {
        demo_progress_text(&progress, 100, columns, text);
        EXPECT((int)strlen(text) < (columns > 1 ? columns : 1));
        EXPECT(!strchr(text, '\n'));
    }
    demo_progress_text(&progress, 100, 80, text);
    EXPECT_TEXT(
        text,
        "[#####.................]  step 250/1000  loss 1.2500  25.0k tokens/s  5:00 left");
    demo_progress_text(&progress, 100, 30, text);
    EXPECT_TEXT(text, "step 250/1000  loss 1.2500");
    /* nothing done by this process yet: no rate, no guess */
    progress.step = progress.resumed = 10;
    demo_progress_text(&progress, 100, 30, text);
    EXPECT_TEXT(text, "[.............]  step 10/1000");
    return true;
}

static bool durations_and_counts_are_readable(void) {
    static const struct {
        double value;
        const char *duration, *count;
    } cases[] = {{0, "0:00", "0"},
                 {41.4, "0:41", "41"},
                 {725, "12:05", "725"},
                 {11279, "3:07:59", "11.3k"},
                 {4560000, "1266:40:00", "4.56M"}};
    char text[32];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        demo_duration_text(text, sizeof text, cases[i].value);
        EXPECT_TEXT(text, cases[i].duration);
        demo_count_text(text, sizeof text, cases[i].value);
        EXPECT_TEXT(text, cases[i].count);
    }
    return true;
}

/* Runs 30 steps with output into a file and returns what was written. */
static char *progress_of_a_run(bool terminal) {
    size_t size;
    const char *path = in_scratch("progress");
    demo_progress progress;
    demo_progress_begin(&progress, 0, 30, 10);
    progress.out = fopen(path, "wb");
    progress.terminal = terminal;
    progress.began -= 1; /* as if a second had passed */
    for (int step = 1; step <= 30; step++) demo_progress_step(&progress, step, 3.0 / step, 100);
    demo_progress_say(&progress, "saved %d", 30);
    demo_progress_end(&progress);
    fclose(progress.out);
    return demo_read_file(path, &size);
}

static bool progress_is_lines_without_a_terminal(void) {
    char *text = progress_of_a_run(false);
    EXPECT(text && count_of(text, "\n") == 4 && !strpbrk(text, "\r\033"));
    EXPECT(holds(text, "step 10/30  loss 0.3000  ") &&
           holds(text, "\nstep 30/30  loss 0.1000  ") && holds(text, "\nsaved 30\n"));
    free(text);
    return true;
}

static bool progress_is_redrawn_on_a_terminal(void) {
    char *text = progress_of_a_run(true);
    EXPECT(text && !strncmp(text, "\r", 1) && count_of(text, "\033[K") == count_of(text, "\r"));
    /* first, last and the note's; not each of 30 */
    EXPECT(count_of(text, "\r") >= 2 + 1 && count_of(text, "\r") < 30);
    EXPECT(count_of(text, "\n") == 1 && holds(text, "\033[Ksaved 30\n"));
    free(text);
    return true;
}

static const trainer_case cases[] = {
    CASE(plots_are_well_formed),
    CASE(odd_plots_are_drawn_or_refused),
    CASE(ticks_are_round),
    CASE(plots_are_drawn_to_scale),
    CASE(plots_have_least_sizes),
    CASE(steps_and_labels_are_round),
    CASE(progress_has_names_and_units),
    CASE(progress_is_due),
    CASE(progress_fits_the_window),
    CASE(durations_and_counts_are_readable),
    CASE(progress_is_lines_without_a_terminal),
    CASE(progress_is_redrawn_on_a_terminal),
};

int main(int argc, char **argv) {
    test_begin(argc, argv);
    trainer_cases(cases, sizeof cases / sizeof *cases);
    return test_summary();
}
