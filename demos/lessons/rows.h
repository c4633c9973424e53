/* SPDX-License-Identifier: MIT OR Unlicense */
/* rows.h - lessons 1 to 3: who holds which token, positions and packing, labels at a cut. */
#ifndef LESSON_ROWS_H
#define LESSON_ROWS_H
#include "split.h"
#include "drawing.h"

/* ---- 1: one row, four ranks ---- */

static const int work_layouts[] = {SEQPAR_LAYOUT_CONTIGUOUS, SEQPAR_LAYOUT_ZIGZAG,
                                   SEQPAR_LAYOUT_STRIPE};
enum { WORK_LAYOUTS = sizeof work_layouts / sizeof *work_layouts };

/* The share of the machine that waits for the rank with most pairs, in percent. */
static inline double idle_percent(const lesson_split *s) {
    int64_t all = 0, most = 0;
    for (int64_t r = 0; r < s->ranks; r++) {
        int64_t pairs = pairs_of(s, r);
        all += pairs;
        if (pairs > most) most = pairs;
    }
    return 100 - 100 * (double)all / (double)(most * s->ranks);
}

static inline void lesson_work(void) {
    char text[64];
    printf("            tokens of rank 0, 1, 2, 3                        "
           "pairs of rank 0, 1, 2, 3   idle\n");
    for (int l = 0; l < WORK_LAYOUTS; l++) {
        lesson_split s = split_row(work_layouts[l], 16, 4);
        printf("%-12s", seqpar_layout_name(work_layouts[l]));
        for (int r = 0; r < 4; r++) printf("%-12s", held_text(text, sizeof text, &s, r));
        for (int r = 0; r < 4; r++) printf(" %4d", (int)pairs_of(&s, r));
        printf("       %2.0f %%\n", idle_percent(&s));
    }
}

static inline void draw_holders(double y, const lesson_split *s, const char *name) {
    double wide = 27;
    draw_text(24, y, "b", "%s", name);
    for (int t = 0; t < s->tokens; t++) {
        double x = 24 + t * wide;
        draw_box(x, y + 8, wide - 2, 26, rank_class("", s->holder[t]));
        draw_text(x + (wide - 2) / 2, y + 26, "m w s", "%d", t);
    }
}

/* One bar a rank: its pairs. */
static inline void draw_pairs(double y, const lesson_split *s) {
    for (int r = 0; r < s->ranks; r++) {
        double wide = 5 * (double)pairs_of(s, r);
        draw_box(100, y + r * 20, wide, 16, rank_class("", r));
        draw_text(92, y + r * 20 + 13, "e s", "rank %d", r);
        draw_text(106 + wide, y + r * 20 + 13, "s", "%d pairs", (int)pairs_of(s, r));
    }
}

static inline void picture_holders(void) {
    picture_begin("Who holds which of 16 tokens, and how many pairs each of 4 ranks computes",
                  470, 0);
    for (int l = 0; l < WORK_LAYOUTS; l++) {
        lesson_split s = split_row(work_layouts[l], 16, 4);
        draw_holders(28 + l * 152, &s, seqpar_layout_name(work_layouts[l]));
        draw_pairs(72 + l * 152, &s);
    }
    picture_end();
}

/* ---- 2: positions and packing ---- */

enum { PACKED = 10, PACKED_DOCS = 3 };
static const int packed_begin[] = {0, 4, 7, PACKED};

static inline int packed_document(int token) {
    int d = 0;
    while (packed_begin[d + 1] <= token) d++;
    return d;
}

static inline int packed_position(int token) {
    return token - packed_begin[packed_document(token)];
}

static inline void print_numbers(const char *name, const int *numbers, const char *after) {
    printf("%-24s", name);
    for (int t = 0; t < PACKED; t++) printf("%s%3d", t == PACKED / 2 ? " |" : "", numbers[t]);
    printf("%s\n", after);
}

static inline void lesson_positions(void) {
    int token[PACKED], document[PACKED], right[PACKED], local[PACKED], wrong[2] = {0};
    char after[32];
    for (int t = 0; t < PACKED; t++) {
        token[t] = t;
        document[t] = packed_document(t);
        right[t] = packed_position(t);
        local[t] = t % (PACKED / 2);
        wrong[0] += token[t] != right[t];
        wrong[1] += local[t] != right[t];
    }
    printf("%24s%-17s%s\n", "", "  rank 0", "  rank 1");
    print_numbers("token", token, "");
    print_numbers("document", document, "");
    print_numbers("position, right", right, "");
    snprintf(after, sizeof after, "   %d wrong", wrong[0]);
    print_numbers("position, one row", token, after);
    snprintf(after, sizeof after, "   %d wrong", wrong[1]);
    print_numbers("position, by rank", local, after);
}

static inline void lesson_packed_pairs(void) {
    int right = 0, row = 0;
    for (int t = 0; t < PACKED; t++) {
        right += packed_position(t) + 1;
        row += t + 1;
    }
    printf("pairs that documents of 4, 3 and 3 tokens have   %d\n", right);
    printf("pairs of one text of 10 tokens                   %d\n", row);
    printf("pairs that reach into another document           %d\n", row - right);
}

/* The mask of the packed row. A cross marks a key that a causal mask alone would let pass. The
   last document has no name: there is no space to its right. */
static inline void picture_packing(void) {
    double wide = 34, left = 100, top = 58;
    picture_begin("Which keys each of 10 tokens sees in a row of three documents", 430, 0);
    draw_text(left, 26, "b", "keys: token 0 to 9");
    draw_text(left - 12, top - 32, "e b", "queries");
    for (int q = 0; q < PACKED; q++) {
        draw_text(left - 10, top + q * wide + 22, "e s", "%d", q);
        draw_text(left + q * wide + 16, top - 10, "m s", "%d", q);
        for (int k = 0; k < PACKED; k++) {
            int same = packed_document(q) == packed_document(k);
            const char *classes = k > q  ? "g f"
                                  : same ? rank_class("", packed_document(q))
                                         : "x";
            draw_box(left + k * wide, top + q * wide, wide - 2, wide - 2, classes);
            if (k <= q && !same)
                draw_text(left + k * wide + 16, top + q * wide + 22, "m w", "×");
        }
    }
    for (int d = 0; d < PACKED_DOCS; d++)
        if (packed_begin[d] < 7)
            draw_text(left + packed_begin[d + 1] * wide + 6, top + packed_begin[d] * wide + 22,
                      "s", "document %d", d);
    draw_text(left, top + PACKED * wide + 22, "s",
              "×: another document's key, which must not be seen");
    picture_end();
}

/* ---- 3: labels at a cut ---- */

static const char *const words[] = {"The", "cat", "sat",  "on", "a",
                                    "mat", "and", "then", "it", "slept"};
enum { WORDS = sizeof words / sizeof *words };

/* The label of rank `rank`'s i-th token if labels are shifted after the split. -1: none. */
static inline int64_t label_after_split(const lesson_split *s, int64_t rank, int64_t i) {
    return i + 1 < s->count[rank] ? s->held[rank][i + 1] : -1;
}

static inline int64_t label_right(const lesson_split *s, int64_t token) {
    return token + 1 < s->tokens ? token + 1 : -1;
}

static inline const char *word_at(int64_t token) { return token < 0 ? "-" : words[token]; }

static inline void print_labels(const lesson_split *s, int64_t r, int64_t *lost,
                                int64_t *wrong) {
    printf("  rank %d  token", (int)r);
    for (int64_t i = 0; i < s->count[r]; i++) printf("  %-6s", word_at(s->held[r][i]));
    printf("\n          right");
    for (int64_t i = 0; i < s->count[r]; i++)
        printf("  %-6s", word_at(label_right(s, s->held[r][i])));
    printf("\n          got  ");
    for (int64_t i = 0; i < s->count[r]; i++) {
        int64_t got = label_after_split(s, r, i), want = label_right(s, s->held[r][i]);
        *lost += got < 0 && want >= 0;
        *wrong += got >= 0 && got != want;
        printf("%s%-6s", got == want ? "  " : " !", word_at(got));
    }
    printf("\n");
}

static inline void lesson_labels(void) {
    static const int layouts[] = {SEQPAR_LAYOUT_CONTIGUOUS, SEQPAR_LAYOUT_ZIGZAG};
    for (int l = 0; l < 2; l++) {
        lesson_split s = split_row(layouts[l], WORDS, 2);
        int64_t lost = 0, wrong = 0;
        printf("%s\n", seqpar_layout_name(layouts[l]));
        for (int r = 0; r < 2; r++) print_labels(&s, r, &lost, &wrong);
        printf("  of %d labels %d %s lost and %d %s wrong\n", WORDS - 1, (int)lost,
               lost == 1 ? "is" : "are", (int)wrong, wrong == 1 ? "is" : "are");
    }
}

/* A long row: labels that are lost and labels that are wrong if each rank shifts its own tokens. */
static inline void count_labels(int layout, int64_t tokens, int64_t ranks, int64_t *lost,
                                int64_t *wrong) {
    int64_t cu_seqlens[] = {0, tokens};
    seqpar_row row = {.tokens = tokens, .cell = 64, .docs = 1, .cu_seqlens = cu_seqlens};
    for (int64_t rank = 0; rank < ranks; rank++) {
        seqpar_split_desc desc = {layout, ranks, rank};
        seqpar_error error = {0};
        seqpar_share share;
        int64_t before = -1;
        if (seqpar_split(&error, &share, &row, 1, &desc)) lesson_stop(&error);
        for (int64_t i = 0; i < share.count; i++) {
            *wrong += before >= 0 && share.pieces[i].start != before + 1;
            before = share.pieces[i].start + share.pieces[i].count - 1;
        }
        *lost += before + 1 < tokens;
        seqpar_share_free(&share);
    }
}

static inline void lesson_long_row(void) {
    static const int layouts[] = {SEQPAR_LAYOUT_CONTIGUOUS, SEQPAR_LAYOUT_ZIGZAG};
    for (int l = 0; l < 2; l++) {
        int64_t lost = 0, wrong = 0;
        count_labels(layouts[l], 32768, 8, &lost, &wrong);
        printf("32768 tokens on 8 ranks, %-12s %d labels lost, %d wrong\n",
               seqpar_layout_name(layouts[l]), (int)lost, (int)wrong);
    }
}

static inline void draw_labels(double y, const lesson_split *s, int64_t r) {
    double wide = 84;
    draw_text(20, y + 18, "b", "rank %d", (int)r);
    for (int64_t i = 0; i < s->count[r]; i++) {
        double x = 20 + (double)i * (wide + 4);
        int64_t token = s->held[r][i], got = label_after_split(s, r, i);
        draw_box(x, y + 28, wide, 30, rank_class("", r));
        draw_text(x + wide / 2, y + 48, "m w", "%s", word_at(token));
        draw_line(x + wide / 2, y + 60, x + wide / 2, y + 78, 1);
        draw_text(x + wide / 2, y + 98, "m", "%s", word_at(label_right(s, token)));
        if (got == label_right(s, token)) continue;
        draw_box(x + 1, y + 82, wide - 2, 46, "o");
        draw_text(x + wide / 2, y + 120, "m x", "%s", got < 0 ? "none" : word_at(got));
    }
}

static inline void picture_labels(void) {
    lesson_split s = split_row(SEQPAR_LAYOUT_ZIGZAG, WORDS, 2);
    picture_begin(
        "Ten tokens on two ranks, zigzag; below each what it has to predict, and in red "
        "what a shift after the split makes of it",
        310, 0);
    draw_labels(6, &s, 0);
    draw_labels(150, &s, 1);
    draw_text(20, 302, "s x",
              "zigzag; red: what the rank predicts if it shifts its own tokens");
    picture_end();
}
#endif
