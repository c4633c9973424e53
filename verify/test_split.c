/* SPDX-License-Identifier: MIT OR Unlicense */
/* Who holds which token: golden index maps, every token held once, leaves in order, and what
   comes of scatter and gather. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "layouts.h"
#include "test.h"

/* of the library, which counts it under SEQPAR_COUNT_WORK */
extern __thread int64_t seqpar__work;

#define RANKS  8
#define TOKENS 64

static const int64_t ranks_list[] = {1, 2, 3, 4, 5, 8}, chunks_list[] = {1, 2, 3, 5, 7, 16, 32};
#define COUNT(list) ((int64_t)(sizeof(list) / sizeof *(list)))

static seqpar_row plain_row(int64_t tokens, int64_t padded, int64_t chunks) {
    return (seqpar_row){.tokens = tokens, .padded = padded, .chunks = chunks};
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
    int64_t ranks, tokens, padded, chunks;
    const char *held[RANKS];
} golden;

static const golden goldens[] = {
    {SEQPAR_LAYOUT_CONTIGUOUS,
     4,
     16,
     16,
     16,
     {"0 1 2 3", "4 5 6 7", "8 9 10 11", "12 13 14 15"}},
    {SEQPAR_LAYOUT_ZIGZAG, 4, 16, 16, 16, {"0 1 14 15", "2 3 12 13", "4 5 10 11", "6 7 8 9"}},
    {SEQPAR_LAYOUT_STRIPE, 4, 16, 16, 16, {"0 4 8 12", "1 5 9 13", "2 6 10 14", "3 7 11 15"}},
    {SEQPAR_LAYOUT_CONTIGUOUS, 2, 16, 16, 16, {"0 1 2 3 4 5 6 7", "8 9 10 11 12 13 14 15"}},
    {SEQPAR_LAYOUT_ZIGZAG, 2, 16, 16, 16, {"0 1 2 3 12 13 14 15", "4 5 6 7 8 9 10 11"}},
    {SEQPAR_LAYOUT_STRIPE, 2, 16, 16, 16, {"0 2 4 6 8 10 12 14", "1 3 5 7 9 11 13 15"}},
    /* shares that cannot be equal */
    {SEQPAR_LAYOUT_CONTIGUOUS, 3, 16, 16, 16, {"0 1 2 3 4", "5 6 7 8 9", "10 11 12 13 14 15"}},
    {SEQPAR_LAYOUT_ZIGZAG, 3, 16, 16, 16, {"0 1 13 14 15", "2 3 4 10 11 12", "5 6 7 8 9"}},
    {SEQPAR_LAYOUT_STRIPE, 3, 16, 16, 16, {"0 3 6 9 12 15", "1 4 7 10 13", "2 5 8 11 14"}},
    {SEQPAR_LAYOUT_ZIGZAG, 2, 10, 10, 4, {"0 1 7 8 9", "2 3 4 5 6"}},
    /* more ranks than chunks: some are empty */
    {SEQPAR_LAYOUT_CONTIGUOUS,
     8,
     11,
     11,
     3,
     {"", "", "0 1 2", "", "", "3 4 5 6", "", "7 8 9 10"}},
    {SEQPAR_LAYOUT_ZIGZAG, 4, 11, 11, 3, {"7 8 9 10", "", "0 1 2 3 4 5 6", ""}},
    {SEQPAR_LAYOUT_STRIPE, 5, 3, 3, 2, {"0", "1", "2", "", ""}},
    /* pads take part in the grid and are held by nobody */
    {SEQPAR_LAYOUT_CONTIGUOUS, 4, 9, 16, 16, {"0 1 2 3", "4 5 6 7", "8", ""}},
    {SEQPAR_LAYOUT_ZIGZAG, 4, 9, 16, 16, {"0 1", "2 3", "4 5", "6 7 8"}},
    {SEQPAR_LAYOUT_STRIPE, 4, 9, 16, 16, {"0 4 8", "1 5", "2 6", "3 7"}},
    {SEQPAR_LAYOUT_ZIGZAG, 2, 0, 0, 5, {"", ""}},
};

/* Per-document zigzag by hand: documents of 8, 1 and 15 tokens over 2 ranks. */
static void test_golden_documents(void) {
    static const int64_t cu[] = {0, 8, 9, 9, 24};
    static const char *const held[] = {"0 1 6 7 8 9 10 11 20 21 22 23",
                                       "2 3 4 5 12 13 14 15 16 17 18 19"};
    seqpar_row row = {.tokens = 24, .padded = 24, .chunks = 5, .docs = 4, .cu_seqlens = cu};
    int64_t r;
    for (r = 0; r < 2; r++) {
        seqpar_share share = split_or_fail(&row, 1, SEQPAR_LAYOUT_ZIGZAG_DOC, 2, r);
        char text[256];
        write_tokens(text, sizeof text, &share);
        test_expect(!strcmp(text, held[r]), "rank %lld holds [%s], not [%s]", (long long)r,
                    text, held[r]);
        seqpar_share_free(&share);
    }
    test_end("split_golden_zigzag-doc_by_document");
}

static void test_golden(void) {
    int64_t i, r;
    for (i = 0; i < COUNT(goldens); i++) {
        const golden *g = &goldens[i];
        seqpar_row row = plain_row(g->tokens, g->padded, g->chunks);
        for (r = 0; r < g->ranks; r++) {
            seqpar_share share = split_or_fail(&row, 1, g->layout, g->ranks, r);
            char text[256];
            write_tokens(text, sizeof text, &share);
            test_expect(!strcmp(text, g->held[r]), "rank %lld holds [%s], not [%s]",
                        (long long)r, text, g->held[r]);
            seqpar_share_free(&share);
        }
        test_end("split_golden_%s_S%lld_L%lld_P%lld", seqpar_layout_name(g->layout),
                 (long long)g->tokens, (long long)g->chunks, (long long)g->ranks);
    }
}

/* The table of index maps, where its divisibility holds: chunks of m tokens, blocks of
   chunks / 2P of them. -1: no map of this layout is written down here. */
static int64_t table_owner(int layout, int64_t ranks, int64_t chunks, int64_t m,
                           int64_t token) {
    int64_t chunk = token / m, block = chunk * 2 * ranks / chunks;
    switch (layout) {
    case SEQPAR_LAYOUT_CONTIGUOUS: return chunk * ranks / chunks;
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
            for (k = 1; k <= 3; k++) /* L = 2Pk chunks of m tokens */
                for (m = 1; m <= 5; m += 2) {
                    int64_t ranks = ranks_list[i], tokens = 2 * ranks * k * m;
                    seqpar_row row = plain_row(tokens, tokens, 2 * ranks * k);
                    for (t = 0; t < tokens; t++) {
                        int64_t owner = -1, local;
                        seqpar_split_owner(NULL, &owner, &local, &row, t,
                                           &(seqpar_split_desc){layout, ranks});
                        r = table_owner(layout, ranks, row.chunks, m, t);
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
    int64_t cu[5], docs, ranks, rank;
    const char *cu_q, *cu_k;
    int64_t k_begin, k_end;
} slice;

static const slice slices[] = {
    {{0, 7, 14, 16}, 3, 8, 1, "0 2", "0 4", 0, 4},
    {{0, 7, 14, 16}, 3, 8, 3, "0 1 2", "0 7 8", 0, 8},
    {{0, 7, 14, 16}, 3, 8, 4, "0 2", "0 3", 7, 10},
    {{0, 7, 14, 16}, 3, 8, 7, "0 2", "0 2", 14, 16},
    {{0, 3, 5, 12}, 3, 4, 0, "0 3", "0 3", 0, 3},
    {{0, 3, 5, 12}, 3, 4, 1, "0 2 3", "0 2 3", 3, 6},
    {{0, 3, 5, 12}, 3, 4, 2, "0 3", "0 4", 5, 9},
    {{0, 3, 5, 12}, 3, 4, 3, "0 3", "0 7", 5, 12},
    {{0, 120, 1248, 4232}, 3, 8, 0, "0 120 529", "0 120 529", 0, 529},
    {{0, 120, 1248, 4232}, 3, 8, 2, "0 190 529", "0 1128 1467", 120, 1587},
    {{0, 120, 1248, 4232}, 3, 8, 7, "0 529", "0 2984", 1248, 4232},
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
        int64_t tokens = s->cu[s->docs], n = tokens / s->ranks;
        seqpar_row row = {.tokens = tokens,
                         
                          .chunks = s->ranks,
                          .docs = s->docs,
                          .cu_seqlens = s->cu};
        seqpar_share share = split_or_fail(&row, 1, SEQPAR_LAYOUT_CONTIGUOUS, s->ranks,
                                           s->rank);
        view v = view_of(&share, s);
        test_expect(share.count == 1 && share.pieces[0].start == s->rank * n &&
                        share.tokens == n,
                    "the local slice is not [%lld, %lld)", (long long)(s->rank * n),
                    (long long)(s->rank * n + n));
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

/* ---- properties, for every length and grid ---- */

typedef struct world { /* all shares of one row */
    seqpar_row row;
    int layout;
    int64_t ranks;
    seqpar_share share[RANKS];
} world;

static world world_new(const seqpar_row *row, int layout, int64_t ranks) {
    world w = {.row = *row, .layout = layout, .ranks = ranks};
    int64_t r;
    for (r = 0; r < ranks; r++) w.share[r] = split_or_fail(row, 1, layout, ranks, r);
    return w;
}

static void world_free(world *w) {
    int64_t r;
    for (r = 0; r < w->ranks; r++) seqpar_share_free(&w->share[r]);
}

/* Every token once, none of the pads; local rows without gaps. */
static void expect_partition(const world *w) {
    int64_t held[TOKENS] = {0}, r, i, t, local;
    for (r = 0; r < w->ranks; r++) {
        for (i = local = 0; i < w->share[r].count; i++) {
            const seqpar_piece *p = &w->share[r].pieces[i];
            test_expect(p->count > 0 && p->local == local,
                        "a piece begins at local row %lld, not %lld", (long long)p->local,
                        (long long)local);
            for (t = 0; t < p->count; t++, local++) held[piece_token(p, t)]++;
        }
        test_expect(local == w->share[r].tokens, "a share of %lld tokens has %lld",
                    (long long)w->share[r].tokens, (long long)local);
    }
    for (t = 0; t < TOKENS; t++)
        test_expect(held[t] == (t < w->row.tokens), "token %lld of %lld is held %lld times",
                    (long long)t, (long long)w->row.tokens, (long long)held[t]);
}

/* Pieces in order of chunk, each inside its chunk; grid layouts hold chunks as a whole. */
static void expect_chunks(const world *w) {
    int64_t r, i;
    for (r = 0; r < w->ranks; r++)
        for (i = 0; i < w->share[r].count; i++) {
            const seqpar_piece *p = &w->share[r].pieces[i];
            int64_t begin = seqpar_part_begin(w->row.padded, w->row.chunks, p->chunk);
            int64_t end = seqpar_part_begin(w->row.padded, w->row.chunks, p->chunk + 1);
            if (end > w->row.tokens) end = w->row.tokens;
            test_expect(piece_token(p, 0) >= begin && piece_token(p, p->count - 1) < end,
                        "a piece leaves its chunk %lld", (long long)p->chunk);
            test_expect(!i || (p->leaf > p[-1].leaf && p->start > p[-1].start),
                        "leaves or tokens do not rise");
            if (w->layout == SEQPAR_LAYOUT_STRIPE)
                test_expect(p->stride == w->ranks && p->start % w->ranks == r &&
                                (!i || p->chunk > p[-1].chunk),
                            "a stripe of another rank, or two of a chunk");
            if (layout_on_grid(w->layout))
                test_expect(p->stride == 1 && p->start == begin && p->count == end - begin,
                            "part of chunk %lld", (long long)p->chunk);
        }
}

/* No leaf twice; in grid layouts a chunk's leaf is the same whoever holds it. */
static void expect_leaves(const world *w) {
    seqpar_share whole = split_or_fail(&w->row, 1, w->layout, 1, 0);
    int64_t r, i, q, j;
    for (r = 0; r < w->ranks; r++)
        for (i = 0; i < w->share[r].count; i++) {
            const seqpar_piece *p = &w->share[r].pieces[i];
            for (q = 0; q < r; q++)
                for (j = 0; j < w->share[q].count; j++)
                    test_expect(w->share[q].pieces[j].leaf != p->leaf,
                                "leaf %lld is there twice", (long long)p->leaf);
            for (j = 0; layout_on_grid(w->layout) && j < whole.count; j++)
                test_expect(whole.pieces[j].chunk != p->chunk ||
                                whole.pieces[j].leaf == p->leaf,
                            "the leaf of chunk %lld depends on the rank", (long long)p->chunk);
        }
    seqpar_share_free(&whole);
}

static void expect_owners(const world *w) {
    int64_t r, i, t, owner, local;
    for (r = 0; r < w->ranks; r++)
        for (i = 0; i < w->share[r].count; i++)
            for (t = 0; t < w->share[r].pieces[i].count; t++) {
                const seqpar_piece *p = &w->share[r].pieces[i];
                seqpar_status status = seqpar_split_owner(
                    NULL, &owner, &local, &w->row, piece_token(p, t),
                    &(seqpar_split_desc){w->layout, w->ranks});
                test_expect(!status && owner == r && local == p->local + t,
                            "token %lld is not where its owner has it",
                            (long long)piece_token(p, t));
            }
}

/* A multiple of the slots of all ranks is dealt evenly; of other numbers a rank has at most a
   chunk a slot more or less than another. */
static void expect_even(const world *w) {
    int64_t slots = seqpar_layout_at(w->layout)->slots, least = INT64_MAX, most = 0;
    for (int64_t r = 0; r < w->ranks; r++) {
        least = w->share[r].count < least ? w->share[r].count : least;
        most = w->share[r].count > most ? w->share[r].count : most;
    }
    test_expect(most - least <= (w->row.chunks % (slots * w->ranks) ? slots : 0),
                "shares of %lld and of %lld chunks", (long long)least, (long long)most);
}

static void expect_world(int64_t tokens, int64_t pads, int64_t chunks, int layout,
                         int64_t ranks) {
    seqpar_row row = plain_row(tokens, tokens + pads, chunks);
    world w = world_new(&row, layout, ranks);
    expect_partition(&w);
    expect_chunks(&w);
    expect_leaves(&w);
    expect_owners(&w);
    /* no chunk is empty */
    if (layout_on_grid(layout) && pads == 0 && tokens >= chunks) expect_even(&w);
    world_free(&w);
}

static void test_properties(void) {
    int layout;
    int64_t p, l, s, pads;
    for (layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (p = 0; p < COUNT(ranks_list); p++) {
            for (l = 0; l < COUNT(chunks_list); l++)
                for (s = 1; s <= 4 * ranks_list[p] + 1; s++)
                    for (pads = 0; pads <= 6; pads += 3)
                        expect_world(s, pads, chunks_list[l], layout, ranks_list[p]);
            for (l = 0; l < COUNT(chunks_list); l++)
                expect_world(53, 0, chunks_list[l], layout, ranks_list[p]);
            test_end("split_partition_%s_P%lld", seqpar_layout_name(layout),
                     (long long)ranks_list[p]);
        }
}

/* ---- several rows, scattered and gathered ---- */

#define ROWS 5
static const seqpar_row uneven_rows[ROWS] = {
    {.index = 0, .tokens = 29, .padded = 32, .chunks = 7},
    {.index = 1, .tokens = 1, .padded = 1, .chunks = 3},
    {.index = 4, .tokens = 0, .padded = 5, .chunks = 2},
    {.index = 5, .tokens = 53, .padded = 53, .chunks = 32},
    {.index = 1 << 20, .tokens = 13, .padded = 17, .chunks = 1},
};
#define POISON 0xA5

static unsigned char hash_byte(int64_t row, int64_t token, int64_t byte) {
    uint64_t x = (uint64_t)(row * 1000003 + token * 101 + byte + 1) *
                 UINT64_C(0x9e3779b97f4a7c15);
    return (unsigned char)(x >> 56);
}

static unsigned char *row_bytes(int64_t row, int64_t width, int fill) {
    int64_t padded = uneven_rows[row].padded, t, b;
    unsigned char *x = malloc((size_t)(padded * width + 1));
    memset(x, POISON, (size_t)(padded * width + 1));
    for (t = 0; fill && t < uneven_rows[row].tokens; t++)
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
        test_expect(!memcmp(from, back[row], (size_t)(uneven_rows[row].padded * width + 1)),
                    "row %lld comes back changed, or its pads were touched", (long long)row);
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

/* Leaves rise with (row, chunk) over all rows of a share; ranks never share one. */
static void test_many_rows(void) {
    int layout;
    int64_t p, r, i;
    for (layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
        for (p = 0; p < COUNT(ranks_list); p++) {
            int64_t tokens = 0;
            for (r = 0; r < ranks_list[p]; r++) {
                seqpar_share share = split_or_fail(uneven_rows, ROWS, layout, ranks_list[p], r);
                for (i = 1; i < share.count; i++) {
                    const seqpar_piece *a = &share.pieces[i - 1], *b = &share.pieces[i];
                    test_expect(b->row > a->row || (b->row == a->row && b->start > a->start),
                                "pieces are not in order of row and chunk");
                    test_expect(b->leaf > a->leaf && b->local == a->local + a->count,
                                "leaf or local row does not rise");
                }
                tokens += share.tokens;
                seqpar_share_free(&share);
            }
            test_expect(tokens == 29 + 1 + 0 + 53 + 13, "%lld tokens are held",
                        (long long)tokens);
        }
        test_end("split_many_rows_%s", seqpar_layout_name(layout));
    }
}

/* ---- refusals ---- */

static const int64_t cu_falls[] = {0, 5, 3, 9}, cu_late[] = {2, 5, 9}, cu_short[] = {0, 5, 8},
                     cu_good[] = {0, 5, 5, 9};

typedef struct refusal {
    const char *name;
    seqpar_status status;
    seqpar_row rows[2];
    int layout;
    int64_t ranks, rank;
    const char *words[3];
} refusal;

#define GOOD \
    { .index = 3, .tokens = 9, .padded = 9, .chunks = 2, .docs = 3, .cu_seqlens = cu_good }
static const refusal refusals[] = {
    {"layout", SEQPAR_ERR_LAYOUT, {GOOD}, 999, 2, 0, {"layout 999"}},
    {"negative_layout", SEQPAR_ERR_LAYOUT, {GOOD}, -1, 2, 0, {"-1"}},
    {"ranks", SEQPAR_ERR_RANKS, {GOOD}, SEQPAR_LAYOUT_ZIGZAG, 0, 0, {"is 0"}},
    {"negative_ranks", SEQPAR_ERR_RANKS, {GOOD}, SEQPAR_LAYOUT_STRIPE, -4, 0, {"-4"}},
    {"rank", SEQPAR_ERR_RANK, {GOOD}, SEQPAR_LAYOUT_CONTIGUOUS, 3, 3, {"rank 3", "group of 3"}},
    {"negative_rank", SEQPAR_ERR_RANK, {GOOD}, SEQPAR_LAYOUT_CONTIGUOUS, 3, -2, {"rank -2"}},
    {"chunks",
     SEQPAR_ERR_CHUNKS,
     {{.index = 6, .tokens = 9, .padded = 9}},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     {"row 6", "0 chunks"}},
    {"padded",
     SEQPAR_ERR_SIZE,
     {{.index = 6, .tokens = 9, .padded = 8, .chunks = 2}},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     {"row 6", "9 tokens", "8"}},
    {"tokens",
     SEQPAR_ERR_SIZE,
     {{.index = 6, .tokens = -9, .padded = 8, .chunks = 2}},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     {"row 6", "-9"}},
    {"row_order",
     SEQPAR_ERR_ROW_ORDER,
     {GOOD, GOOD},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     {"number 3", "follows 3"}},
    {"row_number",
     SEQPAR_ERR_ROW_ORDER,
     {{.index = -2, .tokens = 9, .padded = 9, .chunks = 2}},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     {"-2"}},
    {"cu_falls",
     SEQPAR_ERR_CU_SEQLENS,
     {{.index = 6, .tokens = 9, .padded = 9, .chunks = 2, .docs = 3, .cu_seqlens = cu_falls}},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     {"row 6", "5 to 3"}},
    {"cu_begin",
     SEQPAR_ERR_CU_SEQLENS,
     {{.index = 6, .tokens = 9, .padded = 9, .chunks = 2, .docs = 2, .cu_seqlens = cu_late}},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     {"row 6", "from 2", "9"}},
    {"cu_end",
     SEQPAR_ERR_CU_SEQLENS,
     {{.index = 6, .tokens = 9, .padded = 9, .chunks = 2, .docs = 2, .cu_seqlens = cu_short}},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     {"row 6", "to 8", "to 9"}},
    {"negative_docs",
     SEQPAR_ERR_CU_SEQLENS,
     {{.index = 6,
       .tokens = 9,
       .padded = 9,
       .chunks = 2,
       .docs = -1,
       .cu_seqlens = cu_good + 1}},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     {"row 6", "-1 documents"}},
    {"negative_docs_null",
     SEQPAR_ERR_CU_SEQLENS,
     {{.index = 6, .tokens = 9, .padded = 9, .chunks = 2, .docs = -3}},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     {"row 6", "-3 documents"}},
    {"no_cu_seqlens",
     SEQPAR_ERR_CU_SEQLENS,
     {{.index = 6, .tokens = 9, .padded = 9, .chunks = 2, .docs = 2}},
     SEQPAR_LAYOUT_ZIGZAG,
     2,
     1,
     {"row 6", "no cu_seqlens"}},
};

static void test_refusals(void) {
    int64_t i, w;
    for (i = 0; i < COUNT(refusals); i++) {
        const refusal *x = &refusals[i];
        seqpar_error error = {0};
        seqpar_share share;
        seqpar_status status = seqpar_split(&error, &share, x->rows, x->rows[1].chunks ? 2 : 1,
                                            &(seqpar_split_desc){x->layout, x->ranks, x->rank});
        test_expect(status == x->status && error.status == status, "%s: %s",
                    seqpar_status_name(status), error.text);
        for (w = 0; w < 3 && x->words[w]; w++)
            test_expect(strstr(error.text, x->words[w]) != NULL, "'%s' is not in: %s",
                        x->words[w], error.text);
        test_expect(!share.pieces && !share.count && !share.tokens,
                    "a refused share holds something");
        test_end("split_refuses_%s", x->name);
    }
}

static void test_owner_refusals(void) {
    static const struct {
        const char *name;
        seqpar_status status;
        int layout;
        int64_t ranks, token;
        const char *word;
    } table[] = {
        {"token_too_high", SEQPAR_ERR_TOKEN_RANGE, SEQPAR_LAYOUT_ZIGZAG, 3, 9,
         "9 tokens"}, /* the
                  row has
                  nine
                  tokens
                  and four
                  pads */
        {"token_negative", SEQPAR_ERR_TOKEN_RANGE, SEQPAR_LAYOUT_ZIGZAG, 3, -1, "token -1"},
        {"layout", SEQPAR_ERR_LAYOUT, 999, 3, 2, "layout 999"},
        {"ranks", SEQPAR_ERR_RANKS, SEQPAR_LAYOUT_ZIGZAG, 0, 2, "0"},
    };
    seqpar_row row = plain_row(9, 13, 2);
    int64_t i, rank, local;
    for (i = 0; i < COUNT(table); i++) {
        seqpar_error error = {0};
        seqpar_status status = seqpar_split_owner(
            &error, &rank, &local, &row, table[i].token,
            &(seqpar_split_desc){table[i].layout, table[i].ranks});
        test_expect(status == table[i].status && error.status == status, "%s: %s",
                    seqpar_status_name(status), error.text);
        test_expect(strstr(error.text, table[i].word) != NULL, "'%s' is not in: %s",
                    table[i].word, error.text);
        test_end("split_owner_refuses_%s", table[i].name);
    }
}

/* ---- balance ---- */

static void test_balance(void) {
    static const struct {
        const char *name;
        int64_t tokens, chunks;
        int layout;
        int64_t ranks, most, idle, better;
        int poor;
    } table[] = {
        {"even", 4096, 32, SEQPAR_LAYOUT_ZIGZAG, 8, 512, 0, 48, 0},
        {"idle", 1 << 20, 32, SEQPAR_LAYOUT_ZIGZAG, 64, 32768, 32, 128, 1},
        {"uneven", 1 << 20, 32, SEQPAR_LAYOUT_ZIGZAG, 24, 65536, 0, 48, 1},
        {"default_64", 1 << 20, 0, SEQPAR_LAYOUT_ZIGZAG, 64, 16384, 0, 2048 + 128, 0},
        {"default_24", 1 << 20, 0, SEQPAR_LAYOUT_ZIGZAG, 24, 44032, 0, 2064, 0},
        {"default_1024", 1 << 20, 0, SEQPAR_LAYOUT_ZIGZAG, 1024, 1024, 0, 4096, 0},
        {"contiguous", 1000, 3, SEQPAR_LAYOUT_CONTIGUOUS, 5, 334, 2, 5, 1},
        {"too_short", 7, 1, SEQPAR_LAYOUT_ZIGZAG, 4, 7, 3, 0, 1},
        {"as_even_as_can_be", 9, 8, SEQPAR_LAYOUT_ZIGZAG, 4, 3, 0, 0, 1}, /* 2 2 2 3: a mean
                                                                             of 2.25 */
        {"stripe", 1000, 7, SEQPAR_LAYOUT_STRIPE, 3, 334, 0, 0, 0},
        {"stripe_many", 5, 1, SEQPAR_LAYOUT_STRIPE, INT64_C(1) << 12, 1, 4091, 0, 1},
        {"most_chunks", 1 << 21, 1 << 20, SEQPAR_LAYOUT_ZIGZAG, 2, 1 << 20, 0, 0, 0},
    };
    for (int64_t i = 0; i < COUNT(table); i++) {
        seqpar_row row = plain_row(
            table[i].tokens, table[i].tokens,
            table[i].chunks ? table[i].chunks : seqpar_grid_default_chunks(table[i].tokens));
        seqpar_balance b;
        seqpar_error error = {0};
        test_expect(!seqpar_split_balance(&error, &b, &row, 1, table[i].layout, table[i].ranks),
                    "%s", error.text);
        test_expect(
            b.tokens == table[i].tokens && b.most == table[i].most && b.idle == table[i].idle &&
                b.chunks == row.chunks && b.better_chunks == table[i].better &&
                seqpar_balance_poor(&b, table[i].ranks) == table[i].poor,
            "tokens %lld, most %lld, idle %lld, chunks %lld, better %lld, poor %d",
            (long long)b.tokens, (long long)b.most, (long long)b.idle, (long long)b.chunks,
            (long long)b.better_chunks, seqpar_balance_poor(&b, table[i].ranks));
        test_end("split_balance_%s", table[i].name);
    }
}

/* Far more ranks than pairs a plan may name: chunks are one, and no fewer. */
static void test_very_many_ranks(void) {
    seqpar_row row = plain_row(5, 5, 1);
    seqpar_share share;
    seqpar_error error = {0};
    test_expect(
        !seqpar_split(&error, &share, &row, 1,
                      &(seqpar_split_desc){SEQPAR_LAYOUT_STRIPE, (INT64_C(1) << 23) + 1, 3}) &&
            share.tokens == 1,
        "%s", error.text);
    seqpar_share_free(&share);
    test_end("split_very_many_ranks");
}

/* ---- large groups ---- */

/* Pieces of a stripe share where its chunks are too many for so many ranks: every token
   once, in order, runs of whole chunks. */
static void expect_stripe(int64_t tokens, int64_t chunks, int64_t ranks, int64_t pieces) {
    seqpar_row row = plain_row(tokens, tokens, chunks);
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
            test_expect(p->start >= seqpar_part_begin(tokens, chunks, p->chunk) &&
                            p->start < seqpar_part_begin(tokens, chunks, p->chunk) + ranks,
                        "piece %lld does not begin with chunk %lld", (long long)i,
                        (long long)p->chunk);
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

/* About the pieces of all ranks: one in 128 of them is asked. */
static int64_t pieces_of(const seqpar_row *row, int layout, int64_t ranks) {
    int64_t count = 0;
    for (int64_t r = 0; r < ranks; r += 128) {
        seqpar_share share = split_or_fail(row, 1, layout, ranks, r);
        count += 128 * share.count;
        seqpar_share_free(&share);
    }
    return count;
}

/* All ranks' shares take one pass: no more than a few steps a piece and rank. */
static void test_large(void) {
    enum { DOCS = 300 };
    int64_t cu[DOCS + 1], i;
    seqpar_row row = {
        .tokens = 1 << 18, .padded = 1 << 18, .chunks = 2048, .docs = DOCS, .cu_seqlens = cu};
    int layout;
    expect_stripe(1 << 16, 128, 512, 128); /* 2^23: as they are */
    expect_stripe(100003, 2897, 2, 1449);
    expect_stripe(1 << 18, 2048, 1024, 64);
    expect_stripe(70001, 3000, 1, 3000);
    test_end("split_stripe_of_many_chunks_and_ranks");
    for (i = 0; i <= DOCS; i++) cu[i] = row.tokens * i / DOCS * i / DOCS;
    for (layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
        int64_t pieces = pieces_of(&row, layout, 512);
        int64_t most = row.chunks + (layout_on_grid(layout) ? 0 : 2 * 512 * DOCS);
        seqpar_balance b;
        seqpar__work = 0;
        test_expect(pieces > 0 && pieces <= most, "%s: %lld pieces, more than %lld",
                    seqpar_layout_name(layout), (long long)pieces, (long long)most);
        test_expect(!seqpar_split_balance(NULL, &b, &row, 1, layout, 512) &&
                        b.tokens == row.tokens,
                    "balance");
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
    test_golden();
    test_golden_documents();
    test_index_maps();
    test_llama3_slices();
    test_properties();
    test_scatter_gather();
    test_many_rows();
    test_refusals();
    test_owner_refusals();
    test_balance();
    test_very_many_ranks();
    test_large();
    test_names();
    return test_summary();
}
