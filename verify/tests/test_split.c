/* SPDX-License-Identifier: MIT OR Unlicense */
/* Who holds which token: golden index maps, every share against a slow search that is written
   here a second time, every small row there is, numbers at their limits, and what comes of
   scatter and gather. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "support/layouts.h"
#include "support/test.h"

/* of the library, which counts it under SEQPAR_COUNT_WORK */
extern __thread int64_t seqpar__work;

#define RANKS       8
#define COUNT(list) ((int64_t)(sizeof(list) / sizeof *(list)))

static const int64_t ranks_list[] = {1, 2, 3, 4, 5, 8};

static seqpar_row plain_row(int64_t tokens, int64_t cell) {
    return (seqpar_row){.tokens = tokens, .cell = cell};
}

static int64_t piece_token(const seqpar_piece *p, int64_t t) {
    return p->start + t * p->stride;
}

static seqpar_share split_or_fail(const seqpar_row *rows, int64_t row_count, int layout,
                                  int64_t ranks, int64_t rank) {
    seqpar_error error = {0};
    seqpar_share share;
    seqpar_split(&error, &share, rows, row_count, &(seqpar_split_desc){layout, ranks, rank});
    test_expect(!error.status, "%s: %s", seqpar_status_name(error.status), error.text);
    return share;
}

/* ---- the shares once more, by slow searches ---- */

typedef struct slow_cell {
    int64_t row, document, origin, number, leaf;
    int64_t begin, end,
        before; /* in the list of all rows' tokens, of which `before` are those of
                                   the rows before */
    int64_t at; /* which document of the list */
} slow_cell;

/* Level of the node that joins two leaves. */
static int64_t slow_level(int64_t a, int64_t b) {
    int64_t level = 0;
    for (; a != b; level++) a /= 2, b /= 2;
    return level;
}

static int64_t slow_cell_tokens(int64_t cell, int64_t number) {
    if (cell) return cell;
    return number < 128 ? 128 : number < 128 + 448 ? 256 : 512;
}

static int64_t slow_power(int64_t n) {
    int64_t power = 1;
    while (power < n) power *= 2;
    return power;
}

/* Number of a cell's leaf in its document: the default's cells of 256 tokens take two numbers,
   those of 512 four. A stripe takes `fine` for each cell. */
static int64_t slow_leaf(int64_t cell, int64_t number, int64_t fine) {
    int64_t leaf = 0, i;
    if (cell || fine > 1) return number * fine;
    for (i = 0; i < number; i++) leaf += slow_cell_tokens(0, i) / 128;
    return leaf;
}

static int64_t slow_leaves(int64_t cell, int64_t cells, int64_t fine) {
    return slow_leaf(cell, cells - 1, fine) + fine;
}

/* Cells of a row's documents, in order, which go to `to`; returns how many. fine: leaves of
   each; before, document: tokens and documents of the rows before. */
static int64_t slow_cells(slow_cell *to, const seqpar_row *row, int64_t row_number,
                          int64_t fine, int64_t before, int64_t document) {
    int64_t count = 0, d, begin, end, free_leaf = 0;
    for (d = 0; d < (row->docs ? row->docs : 1); d++) {
        int64_t first = count, origin = row->docs ? row->cu_seqlens[d] : 0, i;
        int64_t last = row->docs ? row->cu_seqlens[d + 1] : row->tokens, leaf;
        for (begin = origin; begin < last; begin = end, count++) {
            end = begin + slow_cell_tokens(row->cell, count - first);
            end = end < last ? end : last;
            to[count] = (slow_cell){.row = row_number,
                                    .origin = origin,
                                    .number = count - first,
                                    .begin = before + begin,
                                    .end = before + end,
                                    .before = before,
                                    .at = document + d};
        }
        if (count == first) continue;
        leaf = slow_power(slow_leaves(row->cell, count - first, fine)); /* aligned */
        leaf = (free_leaf + leaf - 1) / leaf * leaf;
        free_leaf = leaf + slow_leaves(row->cell, count - first, fine);
        for (i = first; i < count; i++) {
            to[i].document = row->doc_source ? row->doc_source[d] : row->index * (1 << 20) + d;
            to[i].leaf = row->doc_source ? row->doc_source[d] * (INT64_C(1) << 32)
                                         : row->index * (INT64_C(1) << 34) + leaf;
            to[i].leaf += slow_leaf(row->cell, to[i].number, fine);
        }
    }
    return count;
}

/* Where a slot begins that would begin at `token`: at the highest joint among cells that begin
   within 1/8 of a slot, else at the nearest cell. */
static int64_t slow_edge(const slow_cell *cells, int64_t count, int64_t token, double eighth) {
    int64_t best = 0, best_level = -1, i;
    for (i = 0; i < count; i++) { /* of equal ones the nearest */
        int64_t near = llabs(cells[i].begin - token), level = 99;
        if (i) level = slow_level(cells[i - 1].leaf, cells[i].leaf);
        if ((double)near > eighth || level < best_level) continue;
        if (level == best_level && near >= llabs(cells[best].begin - token)) continue;
        best = i;
        best_level = level;
    }
    for (i = 0; i < count && best_level < 0; i++)
        if (llabs(cells[i].begin - token) < llabs(cells[best].begin - token)) best = i;
    return cells[best].begin;
}

/* The slot of a token: the last that begins at it or before. */
static int64_t slow_slot(const slow_cell *cells, int64_t count, int64_t slots, int64_t token) {
    int64_t first = cells[0].begin, tokens = cells[count - 1].end - first, i, slot = 0;
    for (i = 1; i < slots; i++)
        if (slow_edge(cells, count, first + i * tokens / slots,
                      (double)tokens / (double)slots / 8) <= token)
            slot = i;
    return slot;
}

static int64_t forth_and_back(int64_t slot, int64_t ranks) {
    return slot < ranks ? slot : 2 * ranks - 1 - slot;
}

/* Cells of the document that has cell i: [first, *end). */
static int64_t slow_document(const slow_cell *cells, int64_t count, int64_t i, int64_t *end) {
    int64_t first = i;
    while (first > 0 && cells[first - 1].at == cells[i].at) first--;
    for (*end = i; *end < count && cells[*end].at == cells[i].at;) ++*end;
    return first;
}

/* Zigzag-doc: a document of 2P cells is a zigzag; of the others' tokens, in a row, rank r has
   the r-th part, and a document goes where its middle lies. */
static int64_t slow_rank_by_document(const slow_cell *cells, int64_t count, int64_t i,
                                     int64_t ranks) {
    int64_t end, first = slow_document(cells, count, i, &end), all = 0, before = 0, j;
    if (end - first >= 2 * ranks)
        return forth_and_back(slow_slot(cells + first, end - first, 2 * ranks, cells[i].begin),
                              ranks);
    for (j = 0; j < count; j = end) {
        int64_t n = slow_document(cells, count, j, &end);
        n = end - n < 2 * ranks ? cells[end - 1].end - cells[j].begin : 0;
        before += j < first ? 2 * n : j == first ? n : 0; /* twice the tokens */
        all += n;
    }
    for (j = 0; j + 1 < ranks && before >= 2 * all * (j + 1) / ranks;) j++;
    return j;
}

static int64_t slow_rank(const slow_cell *cells, int64_t count, int64_t i, int layout,
                         int64_t ranks) {
    if (ranks == 1) return 0;
    switch (layout) {
    case SEQPAR_LAYOUT_CONTIGUOUS: return slow_slot(cells, count, ranks, cells[i].begin);
    case SEQPAR_LAYOUT_ZIGZAG:
        return forth_and_back(slow_slot(cells, count, 2 * ranks, cells[i].begin), ranks);
    case SEQPAR_LAYOUT_ZIGZAG_DOC: return slow_rank_by_document(cells, count, i, ranks);
    default: return -1;
    }
}

/* What rank `rank` has of a cell; count 0: nothing. */
static seqpar_piece slow_piece(const slow_cell *cells, int64_t count, int64_t i, int layout,
                               int64_t ranks, int64_t rank) {
    const slow_cell *c = &cells[i];
    seqpar_piece p = {.row = c->row, .document = c->document, .origin = c->origin};
    p.cell = c->number;
    p.leaf = c->leaf;
    p.start = c->begin - c->before;
    p.stride = 1;
    if (layout == SEQPAR_LAYOUT_STRIPE) {
        int64_t end = c->end - c->before;
        p.leaf += rank;
        p.stride = ranks;
        while (p.start % ranks != rank) p.start++;
        if (p.start < end) p.count = (end - 1 - p.start) / ranks + 1;
    } else if (slow_rank(cells, count, i, layout, ranks) == rank)
        p.count = c->end - c->begin;
    return p;
}

/* As seqpar_split, where no cells are taken together. */
static seqpar_share slow_split(const seqpar_row *rows, int64_t row_count, int layout,
                               int64_t ranks, int64_t rank) {
    seqpar_share share = {.rows = rows,
                          .row_count = row_count,
                          .layout = layout,
                          .sp_size = ranks,
                          .sp_rank = rank};
    int64_t fine = layout == SEQPAR_LAYOUT_STRIPE ? slow_power(ranks) : 1, all = 1, r, i;
    int64_t count = 0, before = 0, documents = 0;
    slow_cell *cells;
    for (r = 0; r < row_count; r++)
        all += rows[r].docs + 1 + rows[r].tokens / (rows[r].cell ? rows[r].cell : 128);
    cells = malloc((size_t)all * sizeof *cells);
    share.pieces = calloc((size_t)all, sizeof *share.pieces);
    for (r = 0; r < row_count; before += rows[r++].tokens) {
        count += slow_cells(cells + count, &rows[r], r, fine, before, documents);
        documents += rows[r].docs + 1;
    }
    for (i = 0; i < count; i++) {
        seqpar_piece p = slow_piece(cells, count, i, layout, ranks, rank);
        if (!p.count) continue;
        p.local = share.tokens;
        share.pieces[share.count++] = p;
        share.tokens += p.count;
    }
    free(cells);
    return share;
}

static void expect_slow(const seqpar_share *got) {
    seqpar_share want = slow_split(got->rows, got->row_count, got->layout, got->sp_size,
                                   got->sp_rank);
    int64_t i;
    test_expect(
        got->count == want.count && got->tokens == want.tokens,
        "%s, rank %lld of %lld: %lld pieces of %lld tokens, the slow search has %lld of "
        "%lld",
        seqpar_layout_name(got->layout), (long long)got->sp_rank, (long long)got->sp_size,
        (long long)got->count, (long long)got->tokens, (long long)want.count,
        (long long)want.tokens);
    for (i = 0; i < got->count && i < want.count; i++) {
        const seqpar_piece *a = &got->pieces[i], *b = &want.pieces[i];
        test_expect(
            !memcmp(a, b, sizeof *a),
            "%s, rank %lld of %lld, piece %lld: row %lld, document %lld, origin %lld, "
            "cell %lld, leaf %lld, %lld tokens from %lld; the slow search has %lld, "
            "%lld, %lld, %lld, %lld, %lld from %lld",
            seqpar_layout_name(got->layout), (long long)got->sp_rank, (long long)got->sp_size,
            (long long)i, (long long)a->row, (long long)a->document, (long long)a->origin,
            (long long)a->cell, (long long)a->leaf, (long long)a->count, (long long)a->start,
            (long long)b->row, (long long)b->document, (long long)b->origin, (long long)b->cell,
            (long long)b->leaf, (long long)b->count, (long long)b->start);
    }
    free(want.pieces);
}

/* ---- golden index maps ---- */

/* "0 1 14 15": the tokens a rank holds of one row, in local order. */
static void write_tokens(char *text, size_t size, const seqpar_share *share) {
    int64_t i, t;
    size_t at = 0;
    text[0] = 0;
    for (i = 0; i < share->count; i++)
        for (t = 0; t < share->pieces[i].count && at + 8 < size; t++)
            at += (size_t)snprintf(text + at, size - at, "%s%lld", at ? " " : "",
                                   (long long)piece_token(&share->pieces[i], t));
}

typedef struct golden {
    int layout;
    int64_t ranks, tokens, cell;
    const char *held[RANKS];
} golden;

static const golden goldens[] = {
    {SEQPAR_LAYOUT_CONTIGUOUS, 4, 16, 1, {"0 1 2 3", "4 5 6 7", "8 9 10 11", "12 13 14 15"}},
    {SEQPAR_LAYOUT_ZIGZAG, 4, 16, 1, {"0 1 14 15", "2 3 12 13", "4 5 10 11", "6 7 8 9"}},
    {SEQPAR_LAYOUT_STRIPE, 4, 16, 1, {"0 4 8 12", "1 5 9 13", "2 6 10 14", "3 7 11 15"}},
    {SEQPAR_LAYOUT_CONTIGUOUS, 2, 16, 1, {"0 1 2 3 4 5 6 7", "8 9 10 11 12 13 14 15"}},
    {SEQPAR_LAYOUT_ZIGZAG, 2, 16, 1, {"0 1 2 3 12 13 14 15", "4 5 6 7 8 9 10 11"}},
    {SEQPAR_LAYOUT_ZIGZAG_DOC, 2, 16, 1, {"0 1 2 3 12 13 14 15", "4 5 6 7 8 9 10 11"}},
    {SEQPAR_LAYOUT_STRIPE, 2, 16, 1, {"0 2 4 6 8 10 12 14", "1 3 5 7 9 11 13 15"}},
    /* shares that cannot be equal */
    {SEQPAR_LAYOUT_CONTIGUOUS, 3, 16, 1, {"0 1 2 3 4", "5 6 7 8 9", "10 11 12 13 14 15"}},
    {SEQPAR_LAYOUT_ZIGZAG, 3, 16, 1, {"0 1 13 14 15", "2 3 4 10 11 12", "5 6 7 8 9"}},
    {SEQPAR_LAYOUT_STRIPE, 3, 16, 1, {"0 3 6 9 12 15", "1 4 7 10 13", "2 5 8 11 14"}},
    /* edges would be 2, 5 and 7: the nearest cells begin at 3, 6 and 6 */
    {SEQPAR_LAYOUT_ZIGZAG, 2, 10, 3, {"0 1 2 6 7 8 9", "3 4 5"}},
    /* more ranks than cells: some are empty */
    {SEQPAR_LAYOUT_CONTIGUOUS, 8, 11, 4, {"", "", "0 1 2 3", "", "", "4 5 6 7", "", "8 9 10"}},
    {SEQPAR_LAYOUT_ZIGZAG, 4, 11, 11, {"0 1 2 3 4 5 6 7 8 9 10", "", "", ""}},
    {SEQPAR_LAYOUT_ZIGZAG_DOC, 4, 11, 4, {"", "", "0 1 2 3 4 5 6 7 8 9 10", ""}},
    {SEQPAR_LAYOUT_STRIPE, 5, 3, 2, {"0", "1", "2", "", ""}},
    {SEQPAR_LAYOUT_ZIGZAG, 2, 0, 5, {"", ""}},
    /* Edges would be 21 and 42. Within 1/8 of a slot, 2 tokens, lie the joints of level 3 at 20
       and of level 4 at 40. */
    {SEQPAR_LAYOUT_CONTIGUOUS,
     3,
     64,
     1,
     {"0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19",
      "20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39",
      "40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63"}},
};

static void expect_held(const seqpar_row *row, int layout, int64_t ranks,
                        const char *const *held) {
    for (int64_t r = 0; r < ranks; r++) {
        seqpar_share share = split_or_fail(row, 1, layout, ranks, r);
        char text[256];
        write_tokens(text, sizeof text, &share);
        test_expect(!strcmp(text, held[r]), "rank %lld holds [%s], not [%s]", (long long)r,
                    text, held[r]);
        seqpar_share_free(&share);
    }
}

static void test_golden(void) {
    for (int64_t i = 0; i < COUNT(goldens); i++) {
        const golden *g = &goldens[i];
        seqpar_row row = plain_row(g->tokens, g->cell);
        expect_held(&row, g->layout, g->ranks, g->held);
        test_end("split_golden_%s_S%lld_cell%lld_P%lld", seqpar_layout_name(g->layout),
                 (long long)g->tokens, (long long)g->cell, (long long)g->ranks);
    }
}

/* Rows of several documents by hand. */
static void test_golden_documents(void) {
    static const struct {
        const char *name;
        int layout;
        int64_t ranks, cell, docs, cu[6], source[5];
        const char *held[RANKS];
    } table[] = {
        /* Cells of 2: documents of four and eight cells are zigzags of 2 ranks. The others' two
           tokens: the first is rank 0's, the second rank 1's. */
        {"zigzag_and_whole",
         SEQPAR_LAYOUT_ZIGZAG_DOC,
         2,
         2,
         5,
         {0, 8, 9, 9, 24, 25},
         {0, 1, 2, 3, 4},
         {"0 1 6 7 8 9 10 19 20 21 22 23", "2 3 4 5 11 12 13 14 15 16 17 18 24"}},
        /* Middles at 1.5, 3.5, 5 and 7 of 8 tokens. */
        {"short_ones_evenly",
         SEQPAR_LAYOUT_ZIGZAG_DOC,
         2,
         8,
         4,
         {0, 3, 4, 6, 8},
         {3, 5, 8, 9},
         {"0 1 2 3", "4 5 6 7"}},
        /* The edge would be 16, where a cell begins; but within 1/8 of a slot, 2 tokens, the
           joint of two documents at 18 is higher. */
        {"between_documents",
         SEQPAR_LAYOUT_CONTIGUOUS,
         2,
         1,
         2,
         {0, 18, 32},
         {7, 8},
         {"0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17",
          "18 19 20 21 22 23 24 25 26 27 28 29 30 31"}},
        /* Between documents 7 and 8 is a higher joint than between 6 and 7. */
        {"between_which_documents",
         SEQPAR_LAYOUT_CONTIGUOUS,
         2,
         1,
         4,
         {0, 15, 16, 18, 32},
         {5, 6, 7, 8},
         {"0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17",
          "18 19 20 21 22 23 24 25 26 27 28 29 30 31"}},
        /* A cell does not reach from one document into the next. */
        {"cells_of_documents",
         SEQPAR_LAYOUT_CONTIGUOUS,
         3,
         4,
         3,
         {0, 5, 8, 12},
         {0, 1, 2},
         {"0 1 2 3", "4 5 6 7", "8 9 10 11"}},
    };
    for (int64_t i = 0; i < COUNT(table); i++) {
        seqpar_row row = {.tokens = table[i].cu[table[i].docs],
                          .cell = table[i].cell,
                          .docs = table[i].docs,
                          .cu_seqlens = table[i].cu,
                          .doc_source = table[i].source};
        expect_held(&row, table[i].layout, table[i].ranks, table[i].held);
        test_end("split_golden_documents_%s", table[i].name);
    }
}

/* The table of index maps, where its divisibility holds: cells of m tokens, blocks of
   cells / 2P of them. -1: no map of this layout is written down here. */
static int64_t table_owner(int layout, int64_t ranks, int64_t cells, int64_t m, int64_t token) {
    int64_t cell = token / m, block = cell * 2 * ranks / cells;
    switch (layout) {
    case SEQPAR_LAYOUT_CONTIGUOUS: return cell * ranks / cells;
    case SEQPAR_LAYOUT_STRIPE: return token % ranks;
    case SEQPAR_LAYOUT_ZIGZAG:
    case SEQPAR_LAYOUT_ZIGZAG_DOC: return block < ranks ? block : 2 * ranks - 1 - block;
    default: return -1;
    }
}

static void test_index_maps(void) {
    int layout;
    int64_t i, r, k, m, t;
    for (layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
        for (i = 0; i < COUNT(ranks_list); i++)
            for (k = 1; k <= 3; k++) /* 2Pk cells of m tokens */
                for (m = 1; m <= 5; m += 2) {
                    int64_t ranks = ranks_list[i], tokens = 2 * ranks * k * m;
                    seqpar_row row = plain_row(tokens, m);
                    for (t = 0; t < tokens; t++) {
                        int64_t owner = -1, local;
                        seqpar_split_owner(NULL, &owner, &local, &row, t,
                                           &(seqpar_split_desc){layout, ranks});
                        r = table_owner(layout, ranks, 2 * ranks * k, m, t);
                        test_expect(owner == r,
                                    "S %lld P %lld: token %lld is held by %lld, not %lld",
                                    (long long)tokens, (long long)ranks, (long long)t,
                                    (long long)owner, (long long)r);
                    }
                }
        test_end("split_index_map_%s", seqpar_layout_name(layout));
    }
}

/* ---- llama3: a contiguous slice of the packed row; the keys its tokens may see make one slice ---- */

typedef struct slice {
    int64_t cu[5], docs, ranks, rank, begin, end;
    const char *cu_q, *cu_k;
    int64_t k_begin, k_end;
} slice;

/* In the last row a slice begins at the highest joint within 66 tokens of 529, 1058, ...: at
   cells 384 and 896 of document 1, 384 and 2432 of document 2. */
static const slice slices[] = {
    {{0, 7, 14, 16}, 3, 8, 1, 2, 4, "0 2", "0 4", 0, 4},
    {{0, 7, 14, 16}, 3, 8, 3, 6, 8, "0 1 2", "0 7 8", 0, 8},
    {{0, 7, 14, 16}, 3, 8, 4, 8, 10, "0 2", "0 3", 7, 10},
    {{0, 7, 14, 16}, 3, 8, 7, 14, 16, "0 2", "0 2", 14, 16},
    {{0, 3, 5, 12}, 3, 4, 0, 0, 3, "0 3", "0 3", 0, 3},
    {{0, 3, 5, 12}, 3, 4, 1, 3, 6, "0 2 3", "0 2 3", 3, 6},
    {{0, 3, 5, 12}, 3, 4, 2, 6, 9, "0 3", "0 4", 5, 9},
    {{0, 3, 5, 12}, 3, 4, 3, 9, 12, "0 3", "0 7", 5, 12},
    {{0, 120, 1248, 4232}, 3, 8, 0, 0, 504, "0 120 504", "0 120 504", 0, 504},
    {{0, 120, 1248, 4232}, 3, 8, 2, 1016, 1632, "0 232 616", "0 1128 1512", 120, 1632},
    {{0, 120, 1248, 4232}, 3, 8, 7, 3680, 4232, "0 552", "0 2984", 1248, 4232},
};

/* What the tokens of a rank show: queries and visible keys per document, and the union of
   the keys. */
typedef struct view {
    char cu_q[64], cu_k[64];
    int64_t k_begin, k_end;
} view;

static void append_number(char *text, size_t size, int64_t n) {
    size_t at = strlen(text);
    snprintf(text + at, size - at, "%s%lld", at ? " " : "", (long long)n);
}

static view view_of(const seqpar_share *share, const slice *s) {
    view v = {"0", "0", INT64_MAX, 0};
    int64_t d, i, t, queries = 0, keys = 0;
    for (d = 0; d < s->docs; d++) {
        int64_t begin = s->cu[d], end = begin, here = 0;
        for (i = 0; i < share->count; i++)
            for (t = 0; t < share->pieces[i].count; t++) {
                int64_t token = piece_token(&share->pieces[i], t);
                if (token < s->cu[d] || token >= s->cu[d + 1]) continue;
                here++;
                /* token sees the keys [begin, token] */
                end = token + 1 > end ? token + 1 : end;
            }
        if (!here) continue;
        append_number(v.cu_q, sizeof v.cu_q, queries += here);
        append_number(v.cu_k, sizeof v.cu_k, keys += end - begin);
        v.k_begin = begin < v.k_begin ? begin : v.k_begin;
        v.k_end = end > v.k_end ? end : v.k_end;
    }
    return v;
}

static void test_llama3_slices(void) {
    int64_t i;
    for (i = 0; i < COUNT(slices); i++) {
        const slice *s = &slices[i];
        static const int64_t source[] = {0, 1, 2};
        int64_t tokens = s->cu[s->docs];
        seqpar_row row = {.tokens = tokens,
                          .cell = 1,
                          .docs = s->docs,
                          .cu_seqlens = s->cu,
                          .doc_source = source};
        seqpar_share share = split_or_fail(&row, 1, SEQPAR_LAYOUT_CONTIGUOUS, s->ranks,
                                           s->rank);
        view v = view_of(&share, s);
        test_expect(share.count == s->end - s->begin && share.tokens == share.count &&
                        share.pieces[0].start == s->begin &&
                        share.pieces[share.count - 1].start == s->end - 1,
                    "the local slice is not [%lld, %lld)", (long long)s->begin,
                    (long long)s->end);
        test_expect(!strcmp(v.cu_q, s->cu_q), "cu_q [%s], not [%s]", v.cu_q, s->cu_q);
        test_expect(!strcmp(v.cu_k, s->cu_k), "cu_k [%s], not [%s]", v.cu_k, s->cu_k);
        test_expect(v.k_begin == s->k_begin && v.k_end == s->k_end,
                    "keys %lld:%lld, not %lld:%lld", (long long)v.k_begin, (long long)v.k_end,
                    (long long)s->k_begin, (long long)s->k_end);
        seqpar_share_free(&share);
        test_end("split_llama3_S%lld_P%lld_rank%lld", (long long)tokens, (long long)s->ranks,
                 (long long)s->rank);
    }
}

/* ---- shares of all ranks ---- */

typedef struct world {
    const seqpar_row *rows;
    int64_t count, ranks;
    int layout;
    seqpar_share share[RANKS];
} world;

static world world_new(const seqpar_row *rows, int64_t count, int layout, int64_t ranks) {
    world w = {.rows = rows, .count = count, .ranks = ranks, .layout = layout};
    for (int64_t r = 0; r < ranks; r++)
        w.share[r] = split_or_fail(rows, count, layout, ranks, r);
    return w;
}

static void world_free(world *w) {
    for (int64_t r = 0; r < w->ranks; r++) seqpar_share_free(&w->share[r]);
}

/* Every token of every row once; local rows without gaps. */
static void expect_partition(const world *w) {
    int64_t tokens = 0, rows, r, i, t;
    uint8_t *held;
    for (rows = 0; rows < w->count; rows++) tokens += w->rows[rows].tokens;
    held = calloc((size_t)tokens + 1, 1);
    for (r = 0; r < w->ranks; r++) {
        int64_t local = 0;
        for (i = 0; i < w->share[r].count; i++) {
            const seqpar_piece *p = &w->share[r].pieces[i];
            int64_t base = 0;
            for (rows = 0; rows < p->row; rows++) base += w->rows[rows].tokens;
            test_expect(p->count > 0 && p->local == local,
                        "a piece begins at local row %lld, not %lld", (long long)p->local,
                        (long long)local);
            for (t = 0; t < p->count; t++, local++) held[base + piece_token(p, t)]++;
        }
        test_expect(local == w->share[r].tokens, "a share of %lld tokens has %lld",
                    (long long)w->share[r].tokens, (long long)local);
    }
    for (t = 0; t < tokens; t++)
        test_expect(held[t] == 1, "token %lld of %lld is held by %d ranks", (long long)t,
                    (long long)tokens, held[t]);
    free(held);
}

/* Leaves rise within a share; none is there twice. */
static void expect_leaves(const world *w) {
    int64_t r, q, i, j;
    for (r = 0; r < w->ranks; r++)
        for (i = 0; i < w->share[r].count; i++) {
            const seqpar_piece *p = &w->share[r].pieces[i];
            test_expect(p->leaf >= 0 && (!i || p->leaf > p[-1].leaf), "leaf %lld follows %lld",
                        (long long)p->leaf, (long long)(i ? p[-1].leaf : -1));
            for (q = 0; q < r; q++)
                for (j = 0; j < w->share[q].count; j++)
                    test_expect(w->share[q].pieces[j].leaf != p->leaf,
                                "leaf %lld is there twice", (long long)p->leaf);
        }
}

/* Whole cells have the leaves, and the tokens, that they have where the document is alone on one
   rank. */
static void expect_alone(const seqpar_piece *p, const seqpar_row *row) {
    int64_t d = 0, cu[2] = {0, 0}, i;
    seqpar_row alone = *row;
    seqpar_share share;
    while (row->docs && row->cu_seqlens[d + 1] <= p->start) d++;
    alone.tokens = cu[1] = row->docs ? row->cu_seqlens[d + 1] - row->cu_seqlens[d]
                                     : row->tokens;
    alone.docs = 1;
    alone.cu_seqlens = cu;
    alone.doc_source = row->doc_source + d;
    share = split_or_fail(&alone, 1, SEQPAR_LAYOUT_CONTIGUOUS, 1, 0);
    for (i = 0; i < share.count && share.pieces[i].cell != p->cell;) i++;
    test_expect(i < share.count && share.pieces[i].leaf == p->leaf &&
                    share.pieces[i].document == p->document &&
                    share.pieces[i].count == p->count &&
                    share.pieces[i].start == p->start - p->origin,
                "cell %lld of document %lld is another one where the document is alone",
                (long long)p->cell, (long long)p->document);
    seqpar_share_free(&share);
}

static void expect_owners(const world *w) {
    int64_t r, i, t, owner, local;
    for (r = 0; r < w->ranks; r++)
        for (i = 0; i < w->share[r].count; i++)
            for (t = 0; t < w->share[r].pieces[i].count; t++) {
                const seqpar_piece *p = &w->share[r].pieces[i];
                seqpar_status status = seqpar_split_owner(
                    NULL, &owner, &local, w->rows, piece_token(p, t),
                    &(seqpar_split_desc){w->layout, w->ranks});
                test_expect(!status && owner == r && local == p->local + t,
                            "token %lld is not where its owner has it",
                            (long long)piece_token(p, t));
            }
}

static void expect_world(const seqpar_row *rows, int64_t count, int layout, int64_t ranks) {
    world w = world_new(rows, count, layout, ranks);
    int64_t r, i;
    expect_partition(&w);
    expect_leaves(&w);
    for (r = 0; r < ranks; r++) {
        expect_slow(&w.share[r]);
        for (i = 0; layout_on_grid(layout) && i < w.share[r].count; i++) {
            const seqpar_piece *p = &w.share[r].pieces[i];
            if (rows[p->row].doc_source) expect_alone(p, &rows[p->row]);
        }
    }
    if (count == 1) expect_owners(&w);
    world_free(&w);
}

/* A row of several documents, some of them empty, with numbers or without. */
typedef struct drawn {
    seqpar_row row;
    int64_t cu[8], source[7];
} drawn;

static void draw_row(drawn *x, int64_t longest, int64_t cell) {
    int64_t d, number = test_integer(0, 9);
    memset(x, 0, sizeof *x);
    x->row = (seqpar_row){.index = test_integer(0, 9), .cell = cell};
    x->row.docs = test_integer(1, 7);
    for (d = 0; d < x->row.docs; d++) {
        x->cu[d + 1] = x->cu[d] + (test_integer(0, 4) ? test_integer(1, longest) : 0);
        x->source[d] = number;
        number += test_integer(1, 9);
    }
    x->row.tokens = x->cu[x->row.docs];
    x->row.cu_seqlens = x->cu;
    x->row.doc_source = test_integer(0, 1) ? x->source : NULL;
}

static void test_shares(void) {
    static const int64_t cells[] = {1, 2, 3, 5, 7, 16, 0};
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int64_t p = 0; p < COUNT(ranks_list); p++) {
            int64_t ranks = ranks_list[p], c, s, n;
            for (c = 0; c < COUNT(cells); c++) {
                for (s = 1; s <= 4 * ranks + 1; s++) {
                    seqpar_row row = plain_row(s, cells[c]);
                    expect_world(&row, 1, layout, ranks);
                }
                for (n = 0; n < 10; n++) {
                    drawn x;
                    draw_row(&x, cells[c] ? 23 : 700, cells[c]);
                    expect_world(&x.row, 1, layout, ranks);
                }
            }
            test_end("split_shares_%s_P%lld", seqpar_layout_name(layout), (long long)ranks);
        }
}

/* ---- every small row ---- */

enum { SMALL = 9 };

typedef struct small_rows {
    seqpar_row row[SMALL];
    int64_t count, cu[SMALL][SMALL + 1], source[SMALL][SMALL];
} small_rows;

/* `gaps`: a digit of 0, 1 or 2 for each gap between two tokens: one document, two, two rows.
   numbering: 0: by rows; 1: 0, 1, 2 ..., 2: 1, 3, 5 ... */
static void small_rows_make(small_rows *x, int64_t tokens, int64_t gaps, int numbering) {
    int64_t t, documents = 0;
    seqpar_row *row = x->row;
    memset(x, 0, sizeof *x);
    x->count = 1;
    for (t = 0; t < tokens; t++) {
        int64_t before = t ? gaps % 3 : 1;
        if (t) gaps /= 3;
        if (before == 2) (++row)->index = x->count++;
        row->cu_seqlens = x->cu[row->index];
        row->doc_source = numbering ? x->source[row->index] : NULL;
        if (before)
            x->source[row->index][row->docs++] = numbering * documents++ + numbering - 1;
        x->cu[row->index][row->docs] = ++row->tokens;
    }
}

/* Every row of so many tokens, with every partition into documents and of these into rows. */
static void test_every_small_row(void) {
    int64_t step = getenv("TEST_ALL") ? 1 : 97, number = 0, cases = 0, tokens, ways = 1, w;
    for (tokens = 0; tokens <= SMALL; tokens++) {
        for (w = 0; w < 180 * ways; w++) {
            int64_t x = w, ranks, cell;
            int layout, numbering;
            small_rows rows;
            if (number++ % step) continue;
            ranks = 1 + x % 5, x /= 5;
            layout = (int)(x % SEQPAR_LAYOUT_COUNT), x /= SEQPAR_LAYOUT_COUNT;
            cell = 1 + x % 3, x /= 3;
            numbering = (int)(x % 3), x /= 3;
            small_rows_make(&rows, tokens, x, numbering);
            for (int64_t r = 0; r < rows.count; r++) rows.row[r].cell = cell;
            expect_world(rows.row, rows.count, layout, ranks);
            cases++;
        }
        if (tokens) ways *= 3;
    }
    test_end("split_every_small_row");
    printf("#   %lld of %lld cases: rows of up to %d tokens, 1 to 5 ranks, cells of 1 to 3\n",
           (long long)cases, (long long)number, SMALL);
}

/* ---- edges of long documents ---- */

static void expect_edges(const seqpar_row *row, int layout, int64_t ranks) {
    int64_t slots = ranks * seqpar_layout_at(layout)->slots, count, i, r, tokens = 0;
    slow_cell *cells = malloc((size_t)(row->tokens / 128 + 9) * sizeof *cells);
    int64_t *edge = calloc((size_t)slots, sizeof *edge);
    count = slow_cells(cells, row, 0, 1, 0, 0);
    for (i = 1; i < slots; i++)
        edge[i] = slow_edge(cells, count, i * row->tokens / slots,
                            (double)row->tokens / (double)slots / 8);
    for (r = 0; r < ranks; r++) {
        seqpar_share share = split_or_fail(row, 1, layout, ranks, r);
        for (i = 0; i < share.count; i++) {
            int64_t slot = slots - 1;
            while (edge[slot] > share.pieces[i].start) slot--;
            test_expect(forth_and_back(slot, ranks) == r,
                        "token %lld belongs to rank %lld of %lld, not %lld",
                        (long long)share.pieces[i].start,
                        (long long)forth_and_back(slot, ranks), (long long)ranks, (long long)r);
        }
        tokens += share.tokens;
        seqpar_share_free(&share);
    }
    test_expect(tokens == row->tokens, "%lld of %lld tokens", (long long)tokens,
                (long long)row->tokens);
    free(edge);
    free(cells);
}

/* Slots begin at the highest joint within 1/8 of a slot. */
static void test_edges(void) {
    static const int64_t lengths[] = {16384, 16384 + 129, 100003, 131072 + 511, 1 << 20},
                         ranks[] = {2, 3, 8, 24, 61};
    static const int64_t source[] = {5, 6, 9};
    for (int64_t layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
        if (!layout_on_grid((int)layout)) continue;
        for (int64_t s = 0; s < COUNT(lengths); s++)
            for (int64_t p = 0; p < COUNT(ranks); p++) {
                int64_t cu[] = {0, lengths[s] / 7, lengths[s] / 7 * 3, lengths[s]};
                seqpar_row row = {.tokens = lengths[s]};
                expect_edges(&row, (int)layout, ranks[p]);
                if (layout == SEQPAR_LAYOUT_ZIGZAG_DOC) continue;
                row.docs = 3;
                row.cu_seqlens = cu;
                expect_edges(&row, (int)layout, ranks[p]);
                row.doc_source = source;
                expect_edges(&row, (int)layout, ranks[p]);
            }
        test_end("split_edges_%s", seqpar_layout_name((int)layout));
    }
}

/* ---- several rows, scattered and gathered ---- */

#define ROWS 5
static const int64_t uneven_cu[] = {0, 7, 7, 40, 53}, uneven_source[] = {11, 12, 13, 20},
                     last_source[] = {1 << 20};
static const seqpar_row uneven_rows[ROWS] = {
    {.index = 0, .tokens = 29, .cell = 4},
    {.index = 1, .tokens = 1, .cell = 3},
    {.index = 4, .tokens = 0, .cell = 2},
    /* numbers of documents are those of leaves / 2^32, of rows those of leaves / 2^34 */
    {.index = 5,
     .tokens = 53,
     .cell = 2,
     .docs = 4,
     .cu_seqlens = uneven_cu,
     .doc_source = uneven_source},
    {.index = 1 << 20, .tokens = 13, .doc_source = last_source},
};
#define POISON 0xA5

static unsigned char hash_byte(int64_t row, int64_t token, int64_t byte) {
    uint64_t x = (uint64_t)(row * 1000003 + token * 101 + byte + 1) *
                 UINT64_C(0x9e3779b97f4a7c15);
    return (unsigned char)(x >> 56);
}

static unsigned char *row_bytes(int64_t row, int64_t width, int fill) {
    int64_t tokens = uneven_rows[row].tokens, t, b;
    unsigned char *x = malloc((size_t)(tokens * width + 1));
    memset(x, POISON, (size_t)(tokens * width + 1));
    for (t = 0; fill && t < tokens; t++)
        for (b = 0; b < width; b++) x[t * width + b] = hash_byte(row, t, b);
    return x;
}

/* The local buffer holds every row's tokens where the pieces say, and nothing behind. */
static void expect_local(const unsigned char *local, const seqpar_share *share, int64_t width) {
    int64_t i, t, b;
    for (i = 0; i < share->count; i++)
        for (t = 0; t < share->pieces[i].count; t++)
            for (b = 0; b < width; b++) {
                const seqpar_piece *p = &share->pieces[i];
                test_expect(local[(p->local + t) * width + b] ==
                                hash_byte(p->row, piece_token(p, t), b),
                            "row %lld token %lld is not here", (long long)p->row,
                            (long long)piece_token(p, t));
            }
    for (b = 0; b < width; b++)
        test_expect(local[share->tokens * width + b] == POISON,
                    "something was written behind the local rows");
}

static void expect_round_trip(int layout, int64_t ranks, int64_t width) {
    unsigned char *back[ROWS];
    int64_t r, row;
    for (row = 0; row < ROWS; row++) back[row] = row_bytes(row, width, 0);
    for (r = 0; r < ranks; r++) {
        seqpar_share share = split_or_fail(uneven_rows, ROWS, layout, ranks, r);
        unsigned char *local = malloc((size_t)((share.tokens + 1) * width));
        memset(local, POISON, (size_t)((share.tokens + 1) * width));
        for (row = 0; row < ROWS; row++) {
            unsigned char *from = row_bytes(row, width, 1);
            seqpar_scatter(local, from, &share, row, width);
            free(from);
        }
        expect_local(local, &share, width);
        for (row = 0; row < ROWS; row++) seqpar_gather(back[row], local, &share, row, width);
        seqpar_share_free(&share);
        free(local);
    }
    for (row = 0; row < ROWS; row++) {
        unsigned char *from = row_bytes(row, width, 1);
        test_expect(!memcmp(from, back[row], (size_t)(uneven_rows[row].tokens * width + 1)),
                    "row %lld comes back changed, or what lies behind it", (long long)row);
        free(from);
        free(back[row]);
    }
}

static void test_scatter_gather(void) {
    static const int64_t widths[] = {1, 4, 12};
    int layout;
    int64_t p, w;
    for (layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
        for (p = 0; p < COUNT(ranks_list); p++)
            for (w = 0; w < COUNT(widths); w++)
                expect_round_trip(layout, ranks_list[p], widths[w]);
        test_end("split_scatter_gather_%s", seqpar_layout_name(layout));
    }
}

/* Pieces of many rows, of which one is empty. */
static void test_many_rows(void) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
        for (int64_t p = 0; p < COUNT(ranks_list); p++)
            expect_world(uneven_rows, ROWS, layout, ranks_list[p]);
        test_end("split_many_rows_%s", seqpar_layout_name(layout));
    }
}

/* ---- numbers of documents and cells at their limits ---- */

static const int64_t most = SEQPAR_MAX_DOCUMENTS - 1;

static void expect_shares(const seqpar_row *rows, int64_t count, int layout, int64_t ranks) {
    int64_t r, i, tokens = 0, all = 0;
    for (r = 0; r < count; r++) all += rows[r].tokens;
    for (r = 0; r < ranks; r++) {
        seqpar_share share = split_or_fail(rows, count, layout, ranks, r);
        expect_slow(&share);
        for (i = 0; i < share.count; i++)
            test_expect(share.pieces[i].leaf >= 0 &&
                            (!i || share.pieces[i].leaf > share.pieces[i - 1].leaf),
                        "leaf %lld does not rise", (long long)share.pieces[i].leaf);
        tokens += share.tokens;
        seqpar_share_free(&share);
    }
    test_expect(tokens == all, "%lld of %lld tokens", (long long)tokens, (long long)all);
}

/* The last documents and rows there may be, of cells of one token. */
static void test_last_numbers(void) {
    const int64_t cu[] = {0, 70, 70, 75}, source[] = {most - 2, most - 1, most};
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int64_t p = 0; p < COUNT(ranks_list); p++) {
            seqpar_row row = {.tokens = 75, .cell = 1, .docs = 3, .cu_seqlens = cu};
            row.doc_source = source;
            expect_shares(&row, 1, layout, ranks_list[p]);
            row.doc_source = NULL;
            row.index = (1 << 20) - 1;
            expect_shares(&row, 1, layout, ranks_list[p]);
        }
    test_end("split_last_numbers");
}

/* Cells of all three sizes of the default. */
static void test_grown_cells(void) {
    const int64_t cu[] = {0, 133000, 133007, 149900}, source[] = {3, 4, 8};
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int64_t ranks = 1; ranks <= 3; ranks += 2) {
            seqpar_row row = {.tokens = 149900, .docs = 3, .cu_seqlens = cu, .index = 2};
            expect_shares(&row, 1, layout, ranks);
            row.doc_source = source;
            expect_shares(&row, 1, layout, ranks);
        }
    test_end("split_grown_cells");
}

/* The longest rows there may be, in few cells. */
static void test_longest_rows(void) {
    const int64_t tokens = SEQPAR_MAX_TOKENS, cu[] = {0, tokens / 3, tokens};
    const int64_t source[] = {most - 1, most};
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int64_t cell = tokens; cell > 1 << 25; cell /= 3)
            for (int64_t p = 0; p < COUNT(ranks_list); p++) {
                seqpar_row row = {.tokens = tokens, .cell = cell, .index = (1 << 20) - 1};
                expect_shares(&row, 1, layout, ranks_list[p]);
                row.docs = 2;
                row.cu_seqlens = cu;
                expect_shares(&row, 1, layout, ranks_list[p]);
                row.doc_source = source;
                expect_shares(&row, 1, layout, ranks_list[p]);
            }
    test_end("split_longest_rows");
}

/* Whether the numbers of a row fit, for so many ranks, without dealing it. */
static void expect_numbers(const seqpar_row *row, int layout, int64_t ranks, int fit) {
    int64_t rank, local;
    seqpar_error error = {0};
    seqpar_status status = seqpar_split_owner(&error, &rank, &local, row, -1,
                                              &(seqpar_split_desc){layout, ranks});
    test_expect(status == (fit ? SEQPAR_ERR_TOKEN_RANGE : SEQPAR_ERR_SIZE),
                "%s, %lld ranks: %s", seqpar_layout_name(layout), (long long)ranks, error.text);
}

/* Without doc_source: leaves of 2^31 - 1 cells of one token fit wherever documents end, and so do
   those of 2^20 documents. */
static void test_numbers_by_rows(void) {
    enum { DOCUMENTS = 1 << 20 };
    const int64_t last = SEQPAR_MAX_TOKENS;
    int64_t *cu = malloc((DOCUMENTS + 2) * sizeof *cu), d, n;
    seqpar_row row = {.tokens = last, .cell = 1, .cu_seqlens = cu, .index = DOCUMENTS - 1};
    cu[0] = 0;
    for (n = 0; n < 200; n++) {
        row.docs = test_integer(1, 40);
        for (d = 1; d < row.docs; d++) { /* 2^k + 1 cells take 2^(k + 1) numbers */
            cu[d] = cu[d - 1] + (INT64_C(1) << test_integer(0, 30)) + test_integer(0, 1);
            if (cu[d] > last) cu[d] = last;
        }
        cu[row.docs] = last;
        for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
            expect_numbers(&row, layout, layout == SEQPAR_LAYOUT_STRIPE ? 8 : 4096, 1);
    }
    row.docs = 0;
    expect_numbers(&row, SEQPAR_LAYOUT_STRIPE, SEQPAR_MAX_TOKENS, 1);
    for (d = 0; d <= DOCUMENTS + 1; d++) cu[d] = d;
    row.docs = row.tokens = DOCUMENTS;
    expect_numbers(&row, SEQPAR_LAYOUT_STRIPE, 1 << 13, 1);
    expect_numbers(&row, SEQPAR_LAYOUT_STRIPE, (1 << 14) + 1, 0);
    expect_shares(&row, 1, SEQPAR_LAYOUT_STRIPE, 2);
    row.docs = row.tokens = DOCUMENTS + 1;
    expect_numbers(&row, SEQPAR_LAYOUT_CONTIGUOUS, 2, 0);
    free(cu);
    test_end("split_numbers_by_rows");
}

/* ---- refusals ---- */

static const int64_t cu_falls[] = {0, 5, 3, 9}, cu_late[] = {2, 5, 9}, cu_short[] = {0, 5, 8},
                     cu_good[] = {0, 5, 5, 9};
static const int64_t falls[] = {7, 6, 8}, twice[] = {7, 7, 8}, negative[] = {-1, 0, 1},
                     too_high[] = {0, 1, SEQPAR_MAX_DOCUMENTS}, low[] = {2, 3, 4},
                     high[] = {4, 5, 6}, higher[] = {5, 6, 7};

typedef struct refusal {
    const char *name;
    seqpar_status status;
    seqpar_row rows[2];
    int layout;
    int64_t ranks, rank;
    const char *sentence;
} refusal;

#define ROW(number, ...) \
    { .index = number, .tokens = 9, .cell = 4, __VA_ARGS__ }
#define GOOD ROW(3, .docs = 3, .cu_seqlens = cu_good)
#define NUMBERED(number, source) \
    ROW(number, .docs = 3, .cu_seqlens = cu_good, .doc_source = source)
static const refusal refusals[] = {
    {"layout",
     SEQPAR_ERR_LAYOUT,
     {GOOD},
     999,
     2,
     0,
     "layout 999 is unknown; use contiguous, zigzag, stripe or zigzag-doc"},
    {"negative_layout",
     SEQPAR_ERR_LAYOUT,
     {GOOD},
     -1,
     2,
     0,
     "layout -1 is unknown; use contiguous, zigzag, stripe or zigzag-doc"},
    {"ranks",
     SEQPAR_ERR_RANKS,
     {GOOD},
     SEQPAR_LAYOUT_ZIGZAG,
     0,
     0,
     "sequence_parallel_size is 0; give at least 1"},
    {"negative_ranks",
     SEQPAR_ERR_RANKS,
     {GOOD},
     SEQPAR_LAYOUT_STRIPE,
     -4,
     0,
     "sequence_parallel_size is -4; give at least 1"},
    {"too_many_ranks",
     SEQPAR_ERR_RANKS,
     {GOOD},
     SEQPAR_LAYOUT_STRIPE,
     INT64_MAX,
     0,
     "sequence_parallel_size is 9223372036854775807; give at most 2147483647"},
    {"rank",
     SEQPAR_ERR_RANK,
     {GOOD},
     SEQPAR_LAYOUT_CONTIGUOUS,
     3,
     3,
     "sp_rank is 3; with sequence_parallel_size 3 give 0 to 2"},
    {"negative_rank",
     SEQPAR_ERR_RANK,
     {GOOD},
     SEQPAR_LAYOUT_CONTIGUOUS,
     3,
     -2,
     "sp_rank is -2; with sequence_parallel_size 3 give 0 to 2"},
    {"negative_cell",
     SEQPAR_ERR_CELL,
     {{.index = 6, .tokens = 9, .cell = -1}},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row 6: cell is -1; give the tokens of a cell, 1 to 2147483647, or 0 for the default"},
    {"large_cell",
     SEQPAR_ERR_CELL,
     {{.index = 6, .tokens = 9, .cell = SEQPAR_MAX_TOKENS + 1}},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row 6: cell is 2147483648; give the tokens of a cell, 1 to 2147483647, or 0 for the "
     "default"},
    {"tokens",
     SEQPAR_ERR_SIZE,
     {{.index = 6, .tokens = -9}},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row 6 has -9 tokens; give 0 to 2147483647"},
    {"many_tokens",
     SEQPAR_ERR_SIZE,
     {{.index = 6, .tokens = SEQPAR_MAX_TOKENS + 1}},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row 6 has 2147483648 tokens; give 0 to 2147483647"},
    {"row_order",
     SEQPAR_ERR_ROW_ORDER,
     {GOOD, GOOD},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row number 3 follows 3; rows must rise"},
    {"row_number",
     SEQPAR_ERR_ROW_ORDER,
     {{.index = -2, .tokens = 9}},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row number -2 follows -1; rows must rise"},
    {"rows_without_numbers",
     SEQPAR_ERR_SIZE,
     {{.index = 1 << 20, .tokens = 9}},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row 1048576 has 0 documents without numbers; number them (doc_source) where rows or "
     "documents of a row are more than 1048576"},
    {"cu_falls",
     SEQPAR_ERR_CU_SEQLENS,
     {ROW(6, .docs = 3, .cu_seqlens = cu_falls)},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row 6: cu_seqlens falls from 5 to 3 at document 1"},
    {"cu_begin",
     SEQPAR_ERR_CU_SEQLENS,
     {ROW(6, .docs = 2, .cu_seqlens = cu_late)},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row 6: cu_seqlens runs from 2 to 9; it must run from 0 to 9"},
    {"cu_end",
     SEQPAR_ERR_CU_SEQLENS,
     {ROW(6, .docs = 2, .cu_seqlens = cu_short)},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row 6: cu_seqlens runs from 0 to 8; it must run from 0 to 9"},
    {"negative_docs",
     SEQPAR_ERR_CU_SEQLENS,
     {ROW(6, .docs = -1, .cu_seqlens = cu_good + 1)},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row 6 has -1 documents; give 0 or more, and cu_seqlens with docs + 1 entries"},
    {"negative_docs_null",
     SEQPAR_ERR_CU_SEQLENS,
     {ROW(6, .docs = -3)},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row 6 has -3 documents and no cu_seqlens; give 0 or more, and cu_seqlens with docs + 1 "
     "entries"},
    {"no_cu_seqlens",
     SEQPAR_ERR_CU_SEQLENS,
     {ROW(6, .docs = 2)},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row 6 has 2 documents and no cu_seqlens; give 0 or more, and cu_seqlens with docs + 1 "
     "entries"},
    {"documents_fall",
     SEQPAR_ERR_ROW_ORDER,
     {NUMBERED(6, falls)},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row 6: document 1 has the number 6; numbers rise within a step, from 0 to 2147483647"},
    {"documents_doubled",
     SEQPAR_ERR_ROW_ORDER,
     {NUMBERED(6, twice)},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row 6: document 1 has the number 7 again; numbers rise within a step, from 0 to "
     "2147483647"},
    {"negative_document",
     SEQPAR_ERR_ROW_ORDER,
     {NUMBERED(6, negative)},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row 6: document 0 has the number -1; numbers rise within a step, from 0 to 2147483647"},
    {"document_too_high",
     SEQPAR_ERR_ROW_ORDER,
     {NUMBERED(6, too_high)},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     "row 6: document 2 has the number 2147483648; numbers rise within a step, from 0 to "
     "2147483647"},
    {"documents_fall_from_row_to_row",
     SEQPAR_ERR_ROW_ORDER,
     {NUMBERED(6, higher), NUMBERED(7, low)},
     SEQPAR_LAYOUT_CONTIGUOUS,
     2,
     1,
     "row 7 has document 2 behind those of row 6; numbers of documents (doc_source) rise from "
     "row to row, and each stands there once"},
    {"documents_doubled_in_two_rows",
     SEQPAR_ERR_ROW_ORDER,
     {NUMBERED(6, low), NUMBERED(7, high)},
     SEQPAR_LAYOUT_STRIPE,
     2,
     1,
     "row 7 has document 4 behind those of row 6; numbers of documents (doc_source) rise from "
     "row to row, and each stands there once"},
    {"documents_between_those_of_rows",
     SEQPAR_ERR_ROW_ORDER,
     {ROW(2, .docs = 3, .cu_seqlens = cu_good), NUMBERED(7, higher)},
     SEQPAR_LAYOUT_ZIGZAG_DOC,
     2,
     1,
     "row 7 has document 5 behind those of row 2; numbers of documents (doc_source) rise from "
     "row to row, and each stands there once"},
};

static void test_refusals(void) {
    for (int64_t i = 0; i < COUNT(refusals); i++) {
        const refusal *x = &refusals[i];
        seqpar_error error = {0};
        seqpar_share share;
        seqpar_status status = seqpar_split(&error, &share, x->rows, x->rows[1].tokens ? 2 : 1,
                                            &(seqpar_split_desc){x->layout, x->ranks, x->rank});
        test_expect(status == x->status && error.status == status, "%s: %s",
                    seqpar_status_name(status), error.text);
        test_expect(!strcmp(error.text, x->sentence), "it says: %s", error.text);
        test_expect(!share.pieces && !share.count && !share.tokens,
                    "a refused share holds something");
        test_end("split_refuses_%s", x->name);
    }
}

/* More leaves than a row's numbers: they would be those of the next row. */
static void test_refused_stripe(void) {
    int64_t cu[10], local, rank;
    seqpar_row row = {.index = 6, .tokens = 9, .cell = 1, .docs = 9, .cu_seqlens = cu};
    seqpar_error error = {0};
    for (int64_t d = 0; d < 10; d++) cu[d] = d;
    test_expect(seqpar_split_owner(&error, &rank, &local, &row, 2,
                                   &(seqpar_split_desc){SEQPAR_LAYOUT_STRIPE,
                                                        SEQPAR_MAX_TOKENS}) == SEQPAR_ERR_SIZE,
                "it passes");
    test_expect(!strcmp(error.text,
                        "row 6: its documents have no numbers, and 2147483647 striped ranks "
                        "need more than 2^34 leaves of it; number them (doc_source)"),
                "it says: %s", error.text);
    test_end("split_refuses_leaves_of_a_stripe");
}

static void test_owner_refusals(void) {
    static const struct {
        const char *name;
        seqpar_status status;
        int layout;
        int64_t ranks, token;
        const char *sentence;
    } table[] = {
        {"token_too_high", SEQPAR_ERR_TOKEN_RANGE, SEQPAR_LAYOUT_ZIGZAG, 3, 9,
         "token 9 is outside a row of 9 tokens"},
        {"token_negative", SEQPAR_ERR_TOKEN_RANGE, SEQPAR_LAYOUT_ZIGZAG, 3, -1,
         "token -1 is outside a row of 9 tokens"},
        {"layout", SEQPAR_ERR_LAYOUT, 999, 3, 2,
         "layout 999 is unknown; use contiguous, zigzag, stripe or zigzag-doc"},
        {"ranks", SEQPAR_ERR_RANKS, SEQPAR_LAYOUT_ZIGZAG, 0, 2,
         "sequence_parallel_size is 0; give at least 1"},
    };
    seqpar_row row = plain_row(9, 5);
    int64_t i, rank, local;
    for (i = 0; i < COUNT(table); i++) {
        seqpar_error error = {0};
        seqpar_status status = seqpar_split_owner(
            &error, &rank, &local, &row, table[i].token,
            &(seqpar_split_desc){table[i].layout, table[i].ranks});
        test_expect(status == table[i].status && error.status == status, "%s: %s",
                    seqpar_status_name(status), error.text);
        test_expect(!strcmp(error.text, table[i].sentence), "it says: %s", error.text);
        test_end("split_owner_refuses_%s", table[i].name);
    }
}

/* ---- balance ---- */

static void test_balance(void) {
    static const struct {
        const char *name;
        int64_t tokens, cell;
        int layout;
        int64_t ranks, most, idle, better;
        int poor;
    } table[] = {
        {"even", 4096, 128, SEQPAR_LAYOUT_ZIGZAG, 8, 512, 0, 64, 0},
        /* 128 slots: half of them have a cell, and so half of the ranks; of half the size every
           second slot has one, and every rank */
        {"idle", 1 << 20, 32768, SEQPAR_LAYOUT_ZIGZAG, 64, 32768, 32, 16384, 1},
        {"uneven", 1 << 20, 32768, SEQPAR_LAYOUT_ZIGZAG, 24, 65536, 8, 8192, 1},
        {"default_64", 1 << 20, 0, SEQPAR_LAYOUT_ZIGZAG, 64, 16384, 0, 256, 0},
        {"default_24", 1 << 20, 0, SEQPAR_LAYOUT_ZIGZAG, 24, 45056, 0, 256, 0},
        {"default_1024", 1 << 20, 0, SEQPAR_LAYOUT_ZIGZAG, 1024, 1024, 0, 256, 0},
        /* all its cells are small; the next would be wide */
        {"default_edge", 16384, 0, SEQPAR_LAYOUT_ZIGZAG, 64, 256, 0, 64, 0},
        {"default_short", 700, 0, SEQPAR_LAYOUT_ZIGZAG, 4, 256, 0, 32, 1},
        {"contiguous", 1000, 334, SEQPAR_LAYOUT_CONTIGUOUS, 5, 334, 2, 64, 1},
        {"too_long_a_cell", 7, 7, SEQPAR_LAYOUT_ZIGZAG, 4, 7, 3, 2, 1},
        {"cells_of_one", 9, 1, SEQPAR_LAYOUT_ZIGZAG, 4, 3, 0, 0, 1},
        {"stripe", 1000, 143, SEQPAR_LAYOUT_STRIPE, 3, 334, 0, 0, 0},
        {"stripe_many", 5, 5, SEQPAR_LAYOUT_STRIPE, INT64_C(1) << 12, 1, 4091, 0, 1},
        {"many_cells", 1 << 21, 2, SEQPAR_LAYOUT_ZIGZAG, 2, 1 << 20, 0, 1, 0},
    };
    for (int64_t i = 0; i < COUNT(table); i++) {
        seqpar_row row = plain_row(table[i].tokens, table[i].cell);
        seqpar_balance b;
        seqpar_error error = {0};
        test_expect(!seqpar_split_balance(&error, &b, &row, 1, table[i].layout, table[i].ranks),
                    "%s", error.text);
        test_expect(b.tokens == table[i].tokens && b.most == table[i].most &&
                        b.idle == table[i].idle && b.better_cell == table[i].better &&
                        seqpar_balance_poor(&b, table[i].ranks) == table[i].poor,
                    "tokens %lld, most %lld, idle %lld, better %lld, poor %d",
                    (long long)b.tokens, (long long)b.most, (long long)b.idle,
                    (long long)b.better_cell, seqpar_balance_poor(&b, table[i].ranks));
        test_end("split_balance_%s", table[i].name);
    }
}

static seqpar_balance balance_of(const seqpar_row *rows, int64_t count, int layout,
                                 int64_t ranks) {
    seqpar_balance b;
    seqpar_error error = {0};
    test_expect(!seqpar_split_balance(&error, &b, rows, count, layout, ranks), "%s",
                error.text);
    return b;
}

/* The first of halved cells that deals two rows evenly. */
static int64_t slow_better_cell(const seqpar_row *rows, int64_t now, int layout,
                                int64_t ranks) {
    seqpar_row other[2] = {rows[0], rows[1]};
    int64_t cell, r, even, all = rows[0].tokens + rows[1].tokens;
    for (cell = 1 << 20; cell > 0; cell /= 2) {
        if (cell >= now) continue;
        other[0].cell = other[1].cell = cell;
        for (r = even = 0; r < ranks; r++) {
            seqpar_share share = slow_split(other, 2, layout, ranks, r);
            even += share.tokens && 4 * ranks * share.tokens <= 5 * all;
            free(share.pieces);
        }
        if (even == ranks) return cell;
    }
    return 0;
}

/* Rows of several documents, two at a time. */
static void test_better_cell(void) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
        int64_t found = 0, poor = 0, n;
        for (n = 0; n < 120; n++) {
            static const int64_t cells[] = {0, 3, 8, 20, 50, 300};
            int64_t ranks = test_integer(1, RANKS), cell = cells[n % 6], i, t, tokens = 0, d;
            int64_t at_most = 0, idle = 0, now = cell ? cell : 128, want = 0;
            drawn x[2];
            seqpar_row rows[2];
            seqpar_balance b;
            for (i = 0; i < 2; i++) {
                draw_row(&x[i], cell ? 30 : 300, cell);
                rows[i] = x[i].row;
                rows[i].index = i;
                rows[i].doc_source = NULL;
                for (d = 0; d <= rows[i].docs; d++) x[i].cu[d] *= 1 + (n % 3);
                rows[i].tokens = x[i].cu[rows[i].docs];
                rows[i].cu_seqlens = x[i].cu;
                tokens += rows[i].tokens;
            }
            b = balance_of(rows, 2, layout, ranks);
            for (i = 0; i < ranks; i++) {
                seqpar_share share = slow_split(rows, 2, layout, ranks, i);
                t = share.tokens;
                at_most = t > at_most ? t : at_most;
                idle += !t;
                free(share.pieces);
            }
            if (layout_on_grid(layout)) want = slow_better_cell(rows, now, layout, ranks);
            test_expect(b.tokens == tokens && b.most == at_most && b.idle == idle &&
                            b.better_cell == want,
                        "tokens %lld, most %lld, idle %lld, better %lld; the slow search says "
                        "%lld, %lld, %lld, %lld",
                        (long long)b.tokens, (long long)b.most, (long long)b.idle,
                        (long long)b.better_cell, (long long)tokens, (long long)at_most,
                        (long long)idle, (long long)want);
            found += want > 0;
            poor += seqpar_balance_poor(&b, ranks);
        }
        test_expect(!layout_on_grid(layout) || (found > 20 && poor > 10 && poor < 119),
                    "%lld found, %lld poor", (long long)found, (long long)poor);
        test_end("split_better_cell_%s", seqpar_layout_name(layout));
    }
}

/* Far more ranks than pairs a plan may name: parts of a document are one, and no fewer. */
static void test_very_many_ranks(void) {
    seqpar_row row = plain_row(5, 5);
    seqpar_share share = split_or_fail(&row, 1, SEQPAR_LAYOUT_STRIPE, (INT64_C(1) << 23) + 1,
                                       3);
    test_expect(share.tokens == 1, "%lld tokens", (long long)share.tokens);
    seqpar_share_free(&share);
    test_end("split_very_many_ranks");
}

/* ---- large groups ---- */

/* Pieces of a stripe share where its cells are too many for so many ranks: every token
   once, in order, runs of whole cells. */
static void expect_stripe(int64_t tokens, int64_t cell, int64_t ranks, int64_t pieces) {
    seqpar_row row = plain_row(tokens, cell);
    uint8_t *held = calloc((size_t)tokens, 1);
    int64_t r, i, t, last = ranks < 5 ? ranks : 5, shares = 0;
    for (r = 0; r < last; r++) {
        seqpar_share share = split_or_fail(&row, 1, SEQPAR_LAYOUT_STRIPE, ranks,
                                           r == last - 1 ? ranks - 1 : r);
        test_expect(share.count == pieces, "rank %lld of %lld: %lld pieces, not %lld",
                    (long long)share.sp_rank, (long long)ranks, (long long)share.count,
                    (long long)pieces);
        for (i = 0; i < share.count; i++) {
            const seqpar_piece *p = &share.pieces[i];
            test_expect(p->stride == ranks &&
                            (!i || (p->leaf > p[-1].leaf &&
                                    p->start == p[-1].start + p[-1].count * ranks &&
                                    p->local == p[-1].local + p[-1].count)),
                        "piece %lld", (long long)i);
            test_expect(p->start >= p->cell * cell && p->start < p->cell * cell + ranks,
                        "piece %lld does not begin with cell %lld", (long long)i,
                        (long long)p->cell);
            for (t = 0; t < p->count; t++) held[piece_token(p, t)]++;
        }
        shares += share.tokens;
        seqpar_share_free(&share);
    }
    for (t = i = 0; t < tokens; t++) i += held[t] == 1;
    test_expect(i == shares && shares >= last * (tokens / ranks), "%lld tokens in %lld places",
                (long long)i, (long long)shares);
    free(held);
}

/* About the pieces of all ranks: of a stripe, one rank in 128 is asked. */
static int64_t pieces_of(const seqpar_row *row, int layout, int64_t ranks) {
    int64_t count = 0, each = layout_on_grid(layout) ? 1 : 128;
    for (int64_t r = 0; r < ranks; r += each) {
        seqpar_share share = split_or_fail(row, 1, layout, ranks, r);
        count += each * share.count;
        seqpar_share_free(&share);
    }
    return count;
}

/* All ranks' shares take one pass: no more than a few steps a piece and rank. */
static void test_large(void) {
    enum { DOCS = 300 };
    int64_t cu[DOCS + 1], i;
    seqpar_row row = {.tokens = 1 << 18, .cell = 512, .docs = DOCS, .cu_seqlens = cu};
    int layout;
    expect_stripe(1 << 16, 512, 512, 128); /* 2^23: as they are */
    expect_stripe(100003, 35, 2, 1429);
    expect_stripe(1 << 18, 128, 1024, 64);
    expect_stripe(70001, 24, 1, 2917);
    test_end("split_stripe_of_many_cells_and_ranks");
    for (i = 0; i <= DOCS; i++) cu[i] = row.tokens * i / DOCS * i / DOCS;
    for (layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
        int64_t pieces = pieces_of(&row, layout, 512), cells = 0;
        for (i = 0; i < DOCS; i++) cells += (cu[i + 1] - cu[i] + 511) / 512;
        test_expect(layout_on_grid(layout) ? pieces == cells
                                           : pieces > cells && pieces <= 512 * cells,
                    "%s: %lld pieces of %lld cells", seqpar_layout_name(layout),
                    (long long)pieces, (long long)cells);
        seqpar__work = 0;
        test_expect(
            !seqpar_split_owner(NULL, &i, &i, &row, 7, &(seqpar_split_desc){layout, 512}),
            "no owner");
        test_expect(seqpar__work >= pieces / 4 && seqpar__work < 4 * (pieces + 2048),
                    "%s: %lld steps for about %lld pieces", seqpar_layout_name(layout),
                    (long long)seqpar__work, (long long)pieces);
    }
    test_end("split_work");
}

static void test_names(void) {
    test_expect(!strcmp(seqpar_layout_name(SEQPAR_LAYOUT_CONTIGUOUS), "contiguous"),
                "contiguous");
    test_expect(!strcmp(seqpar_layout_name(SEQPAR_LAYOUT_ZIGZAG), "zigzag"), "zigzag");
    test_expect(!strcmp(seqpar_layout_name(SEQPAR_LAYOUT_STRIPE), "stripe"), "stripe");
    test_expect(!strcmp(seqpar_layout_name(SEQPAR_LAYOUT_ZIGZAG_DOC), "zigzag-doc"),
                "zigzag-doc");
    test_expect(!strcmp(seqpar_layout_name(SEQPAR_LAYOUT_COUNT), "?") &&
                    !strcmp(seqpar_layout_name(-1), "?"),
                "unknown layouts");
    test_end("split_layout_names");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_golden());
    TEST(test_golden_documents());
    TEST(test_index_maps());
    TEST(test_llama3_slices());
    TEST(test_shares());
    TEST(test_every_small_row());
    TEST(test_edges());
    TEST(test_scatter_gather());
    TEST(test_many_rows());
    TEST(test_last_numbers());
    TEST(test_grown_cells());
    TEST(test_longest_rows());
    TEST(test_numbers_by_rows());
    TEST(test_refusals());
    TEST(test_refused_stripe());
    TEST(test_owner_refusals());
    TEST(test_balance());
    TEST(test_better_cell());
    TEST(test_very_many_ranks());
    TEST(test_large());
    TEST(test_names());
    return test_summary();
}
