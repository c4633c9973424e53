/* SPDX-License-Identifier: MIT OR Unlicense */
/* Packing: every document once and whole, targets shifted once and never across documents,
   each rule written a second time, naively. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "support/test.h"

/* of the library, which counts it under SEQPAR_COUNT_WORK */
extern __thread int64_t seqpar__work;

#define DOCS  64
#define VOCAB 89

/* ---- documents; every array has exactly its size, so that a sanitizer sees the first byte too far ---- */

enum {
    MASK_NULL,
    MASK_NOTHING,
    MASK_EVERYTHING,
    MASK_RANDOM,
    MASK_FIRST,
    MASK_LAST,
    OWN_TARGETS, /* in the place of a mask */
    MASK_KINDS
};

typedef struct corpus {
    seqpar_document doc[DOCS];
    int64_t count;
} corpus;

static int mask_bit(int kind, int64_t t, int64_t tokens) {
    if (kind == MASK_FIRST) return t == 0;
    if (kind == MASK_LAST) return t == tokens - 1;
    return kind == MASK_RANDOM ? (int)test_integer(0, 1) : kind == MASK_EVERYTHING;
}

static void corpus_add(corpus *c, int64_t unit, int64_t tokens, int mask_kind) {
    int32_t *ids = malloc((size_t)tokens * sizeof *ids);
    uint8_t *mask = mask_kind == MASK_NULL || mask_kind == OWN_TARGETS ? NULL
                                                                       : malloc((size_t)tokens);
    int32_t *targets = mask_kind == OWN_TARGETS ? malloc((size_t)tokens * sizeof *targets)
                                                : NULL;
    int64_t t;
    /* id 0 is a token like any other */
    for (t = 0; t < tokens; t++)
        ids[t] = test_integer(0, 3) ? (int32_t)test_integer(0, VOCAB - 1) : 0;
    for (t = 0; mask && t < tokens; t++) mask[t] = (uint8_t)mask_bit(mask_kind, t, tokens);
    for (t = 0; targets && t < tokens; t++)
        targets[t] = test_integer(0, 4) ? SEQPAR_IGNORE : (int32_t)test_integer(0, VOCAB - 1);
    c->doc[c->count++] = (seqpar_document){
        ids, mask, tokens, unit, .prefix = tokens * (c->count % 3) / 2, .targets = targets};
}

static void corpus_free(corpus *c) {
    int64_t i;
    for (i = 0; i < c->count; i++) {
        free((void *)c->doc[i].ids);
        free((void *)c->doc[i].loss_mask);
        free((void *)c->doc[i].targets);
    }
    memset(c, 0, sizeof *c);
}

static void corpus_random(corpus *c, int64_t units, int64_t longest) {
    int64_t u, d;
    for (u = 0; u < units; u++)
        for (d = test_integer(1, 3); d > 0; d--) {
            int64_t tokens = test_integer(0, 4) ? test_integer(0, longest) : test_integer(0, 2);
            corpus_add(c, u * 7 - 5, tokens,
                       test_integer(0, 2) ? MASK_NULL : (int)test_integer(0, MASK_KINDS - 1));
        }
}

/* Token t of a document cut to `length` is to be predicted, or predicts a target of its own. */
static int predicted(const seqpar_document *d, int64_t t, int64_t length) {
    if (d->targets) return t < length && d->targets[t] != SEQPAR_IGNORE;
    return t > 0 && t < length && (!d->loss_mask || d->loss_mask[t]);
}

/* ---- what should become of every document ---- */

typedef struct fate {
    int64_t length[DOCS]; /* 0: left out */
    int64_t row[DOCS];    /* -1: left out */
    int64_t part[DOCS];
    int64_t rows, micro_batches;
    seqpar_pack_counts counts;
} fate;

typedef struct unit_sum {
    int64_t live, tokens, predicted;
} unit_sum;

static unit_sum sum_unit(const corpus *c, const fate *f, int64_t unit) {
    unit_sum s = {0, 0, 0};
    int64_t i, t;
    for (i = 0; i < c->count; i++) {
        if (c->doc[i].unit != unit) continue;
        s.live += f->length[i] > 0;
        s.tokens += f->length[i];
        for (t = 0; t < f->length[i]; t++)
            s.predicted += predicted(&c->doc[i], t, f->length[i]);
    }
    return s;
}

static void decide_lengths(fate *f, const corpus *c, const seqpar_pack_desc *desc) {
    fate before = *f;
    int64_t i;
    for (i = 0; i < c->count; i++) before.length[i] = c->doc[i].tokens;
    for (i = 0; i < c->count; i++) {
        unit_sum s = sum_unit(c, &before, c->doc[i].unit);
        int64_t tokens = c->doc[i].tokens, share = s.live ? desc->pack_len / s.live : 0;
        f->length[i] = tokens;
        f->counts.zero_length += tokens == 0;
        if (s.tokens <= desc->pack_len || tokens == 0) continue;
        if (desc->truncation == SEQPAR_TRUNCATION_DROP || share == 0)
            share = 0, f->counts.dropped++;
        else
            f->counts.cut += tokens > share;
        f->length[i] = tokens < share ? tokens : share;
    }
}

static void decide_masked(fate *f, const corpus *c, const seqpar_pack_desc *desc) {
    fate before = *f;
    int64_t i;
    for (i = 0; i < c->count && !desc->keep_masked; i++)
        if (f->length[i] && !sum_unit(c, &before, c->doc[i].unit).predicted) {
            f->counts.masked++;
            f->length[i] = 0;
        }
}

/* The first document of the unit that is placed next; -1: none is left. */
static int64_t next_unit(const corpus *c, const fate *f) {
    int64_t i;
    for (i = 0; i < c->count; i++)
        if (f->row[i] < 0 && sum_unit(c, f, c->doc[i].unit).tokens > 0) return i;
    return -1;
}

/* Units that are placed: the document each begins with, the last one, and tokens before it. */
typedef struct placed {
    int64_t count, first[DOCS], last[DOCS], before[DOCS + 1];
} placed;

static placed placed_units(const corpus *c, const fate *f) {
    placed u = {.count = 0};
    int64_t i;
    for (i = 0; i < c->count; i++) {
        if (!f->length[i]) continue;
        if (!u.count || c->doc[i].unit != c->doc[u.last[u.count - 1]].unit) {
            u.first[u.count] = i;
            u.before[u.count + 1] = u.before[u.count] + sum_unit(c, f, c->doc[i].unit).tokens;
            u.count++;
        }
        u.last[u.count - 1] = i;
    }
    return u;
}

/* Of the units from `at` on the one that a part begins with: of those within `reach` of `token` the
   one whose number has the least in common with that of the document before, else the nearest. */
static int64_t slow_part_edge(const placed *u, int64_t at, int64_t token, int64_t reach) {
    int64_t best = at, i, best_level = -1;
    for (i = at; i < u->count; i++) {
        int64_t near = llabs(u->before[i] - token), level = 0, a = i ? u->last[i - 1] : 0;
        int64_t b = u->first[i];
        for (; a != b; level++) a /= 2, b /= 2;
        if (i == 0) level = 99;
        if (near > reach || level < best_level) continue;
        if (level == best_level && near >= llabs(u->before[best] - token)) continue;
        best = i;
        best_level = level;
    }
    for (i = at; i < u->count && best_level < 0; i++)
        if (llabs(u->before[i] - token) < llabs(u->before[best] - token)) best = i;
    return best;
}

/* begin: of every part, the first unit. */
static void slow_part_edges(const placed *u, int64_t *begin, int64_t micro_batches,
                            int64_t dp_size) {
    int64_t m, d, from = 0, to = 0, all = u->before[u->count];
    for (m = 0; m < micro_batches; m++, from = to) {
        int64_t tokens, at = from;
        to = m + 1 == micro_batches ? u->count
                                    : slow_part_edge(u, from, all * (m + 1) / micro_batches,
                                                     all / micro_batches / 8);
        tokens = u->before[to] - u->before[from];
        for (d = 0; d < dp_size; d++) {
            begin[m * dp_size + d] = at;
            if (at < to)
                at = slow_part_edge(u, at, u->before[from] + tokens * (d + 1) / dp_size,
                                    tokens / dp_size / 64);
            at = at < to ? at : to;
        }
    }
    begin[micro_batches * dp_size] = u->count;
}

static void decide_rows(fate *f, const corpus *c, const seqpar_pack_desc *desc,
                        int64_t micro_batches, int64_t dp_size) {
    placed u = placed_units(c, f);
    int64_t used = 0, n = 0, last = 0, part = 0, first, i;
    int64_t *begin = calloc((size_t)(micro_batches * dp_size + 1), sizeof *begin);
    slow_part_edges(&u, begin, micro_batches, dp_size);
    f->rows = 0;
    f->micro_batches = micro_batches;
    for (i = 0; i < c->count; i++) f->row[i] = -1;
    for (; (first = next_unit(c, f)) >= 0; n++, last = part) {
        int64_t tokens = sum_unit(c, f, c->doc[first].unit).tokens;
        while (part + 1 < micro_batches * dp_size && begin[part + 1] <= n) part++;
        if (!f->rows || desc->order == SEQPAR_PACK_UNIT_PER_ROW || part > last ||
            used + tokens > desc->pack_len)
            used = 0, f->rows++;
        used += tokens;
        for (i = 0; i < c->count; i++)
            if (c->doc[i].unit == c->doc[first].unit) {
                f->row[i] = f->rows - 1;
                f->part[i] = part;
            }
    }
    free(begin);
}

static void decide_parts(fate *f, const corpus *c, const seqpar_pack_desc *desc) {
    int64_t dp_size = desc->dp_size ? desc->dp_size : 1, times = 1;
    decide_rows(f, c, desc, 1, 1);
    while (!desc->micro_batches && desc->micro_rows &&
           times * dp_size * desc->micro_rows < f->rows)
        times++;
    decide_rows(f, c, desc, desc->micro_batches ? desc->micro_batches : times, dp_size);
}

static void decide_counts(fate *f, const corpus *c) {
    int64_t i, t;
    f->counts.documents = c->count;
    for (i = 0; i < c->count; i++) f->counts.tokens += f->length[i];
    for (i = 0; i < c->count; i++)
        for (t = 0; t < f->length[i]; t++)
            f->counts.supervised += predicted(&c->doc[i], t, f->length[i]);
}

static fate decide(const corpus *c, const seqpar_pack_desc *desc) {
    fate f;
    memset(&f, 0, sizeof f);
    decide_lengths(&f, c, desc);
    decide_masked(&f, c, desc);
    decide_parts(&f, c, desc);
    decide_counts(&f, c);
    return f;
}

/* ---- comparing ---- */

#define EXPECT_EQUAL(got, want, what) \
    test_expect((got) == (want), "%s is %lld, not %lld", what, (long long)(got), \
                (long long)(want))

static void expect_counts(const seqpar_pack_counts *got, const seqpar_pack_counts *want) {
    EXPECT_EQUAL(got->documents, want->documents, "counts.documents");
    EXPECT_EQUAL(got->zero_length, want->zero_length, "counts.zero_length");
    EXPECT_EQUAL(got->dropped, want->dropped, "counts.dropped");
    EXPECT_EQUAL(got->cut, want->cut, "counts.cut");
    EXPECT_EQUAL(got->masked, want->masked, "counts.masked");
    EXPECT_EQUAL(got->tokens, want->tokens, "counts.tokens");
    EXPECT_EQUAL(got->supervised, want->supervised, "counts.supervised");
}

/* Document `source` lies at row tokens begin .. end. */
static void expect_document(const seqpar_row *row, const seqpar_document *d, int64_t begin,
                            int64_t end) {
    int64_t t, n = end - begin;
    for (t = 0; t < n; t++) {
        int32_t target = d->targets               ? d->targets[t]
                         : predicted(d, t + 1, n) ? d->ids[t + 1]
                                                  : SEQPAR_IGNORE;
        EXPECT_EQUAL(row->ids[begin + t], d->ids[t], "an id");
        EXPECT_EQUAL(row->position_ids[begin + t], t, "a position");
        EXPECT_EQUAL(row->targets[begin + t], target, "a target");
    }
    test_expect(d->targets || row->targets[end - 1] == SEQPAR_IGNORE,
                "the last position of a document has a target");
}

/* Documents of a unit lie side by side, in the order given. */
static void expect_whole_units(const seqpar_row *row, const corpus *c, const fate *f) {
    int64_t d, next;
    for (d = 0; d < row->docs; d++) {
        int64_t source = row->doc_source[d], unit = c->doc[source].unit;
        for (next = source + 1;
             next < c->count && c->doc[next].unit == unit && !f->length[next];)
            next++;
        if (next == c->count || c->doc[next].unit != unit) continue;
        test_expect(d + 1 < row->docs && row->doc_source[d + 1] == next,
                    "unit %lld is torn between documents %lld and %lld", (long long)unit,
                    (long long)source, (long long)next);
    }
}

static void expect_row(const seqpar_row *row, int64_t number, const corpus *c,
                       const seqpar_pack_desc *desc, const fate *f, int64_t *seen) {
    int64_t d;
    EXPECT_EQUAL(row->index, number, "the number of a row");
    EXPECT_EQUAL(row->cell, desc->cell, "the size of a cell");
    EXPECT_EQUAL(row->cu_seqlens[0], 0, "the beginning of cu_seqlens");
    EXPECT_EQUAL(row->cu_seqlens[row->docs], row->tokens, "the end of cu_seqlens");
    test_expect(row->tokens > 0 && row->tokens <= desc->pack_len,
                "a row has %lld tokens of at most %lld", (long long)row->tokens,
                (long long)desc->pack_len);
    for (d = 0; d < row->docs; d++) {
        int64_t source = row->doc_source[d], begin = row->cu_seqlens[d];
        int64_t end = row->cu_seqlens[d + 1];
        if (!test_expect(source >= 0 && source < c->count && !seen[source]++,
                         "document %lld is there twice", (long long)source))
            return;
        EXPECT_EQUAL(f->row[source], number, "the row of a document (naively)");
        if (!EXPECT_EQUAL(end - begin, f->length[source], "the length of a document")) return;
        expect_document(row, &c->doc[source], begin, end);
        EXPECT_EQUAL(row->prefix_lens[d],
                     c->doc[source].prefix < end - begin ? c->doc[source].prefix : end - begin,
                     "a prefix");
    }
    expect_whole_units(row, c, f);
}

/* Numbers of documents rise over all rows. */
static void expect_rising(const seqpar_batch *batch) {
    int64_t r, d, last = -1;
    for (r = 0; r < batch->rows; r++)
        for (d = 0; d < batch->row[r].docs; d++) {
            int64_t source = batch->row[r].doc_source[d];
            test_expect(source > last, "row %lld: document %lld stands behind %lld",
                        (long long)r, (long long)source, (long long)last);
            last = source;
        }
}

/* Rows are found again by their parts, and each part has those of its units. */
static void expect_parts(const seqpar_batch *batch, const seqpar_pack_desc *desc,
                         const fate *f) {
    seqpar_part part = {f->micro_batches, desc->dp_size ? desc->dp_size : 1};
    int64_t row = 0, first, count, i;
    EXPECT_EQUAL(batch->micro_batches, f->micro_batches, "the number of micro-batches");
    for (i = 0; i < part.micro_batches * part.dp_size; i++) {
        part.micro_batch = i / part.dp_size;
        part.dp_rank = i % part.dp_size;
        test_expect(!seqpar_part_rows(NULL, &first, &count, batch->row, batch->rows, &part),
                    "no parts");
        EXPECT_EQUAL(first, row, "the first row of a part");
        for (; row < batch->rows && f->part[batch->row[row].doc_source[0]] == i;) row++;
        EXPECT_EQUAL(first + count, row, "the end of a part");
    }
    EXPECT_EQUAL(row, batch->rows, "the end of the last part");
}

static void expect_batch(const seqpar_batch *batch, const corpus *c,
                         const seqpar_pack_desc *desc, const fate *f) {
    int64_t seen[DOCS] = {0}, i;
    if (!EXPECT_EQUAL(batch->rows, f->rows, "the number of rows")) return;
    for (i = 0; i < batch->rows; i++) expect_row(&batch->row[i], i, c, desc, f, seen);
    for (i = 0; i < c->count; i++)
        EXPECT_EQUAL(seen[i], f->length[i] > 0, "the times a document is there");
    expect_rising(batch);
    expect_parts(batch, desc, f);
    expect_counts(&batch->counts, &f->counts);
}

/* ---- the supervised (document, position, target) triples, from either side ---- */

typedef struct triple {
    int64_t document, position, target;
} triple;

static int triple_order(const void *a, const void *b) {
    const triple *x = a, *y = b;
    int64_t d = x->document != y->document   ? x->document - y->document
                : x->position != y->position ? x->position - y->position
                                             : x->target - y->target;
    return d < 0 ? -1 : d > 0;
}

static int64_t triples_of_documents(triple *to, const corpus *c, const fate *f) {
    int64_t i, t, n = 0;
    for (i = 0; i < c->count; i++)
        for (t = 0; t < f->length[i]; t++)
            if (predicted(&c->doc[i], t, f->length[i]))
                to[n++] = c->doc[i].targets ? (triple){i, t, c->doc[i].targets[t]}
                                            : (triple){i, t - 1, c->doc[i].ids[t]};
    return n;
}

static int64_t triples_of_rows(triple *to, const seqpar_batch *batch) {
    int64_t r, t, d, n = 0;
    for (r = 0; r < batch->rows; r++) {
        const seqpar_row *row = &batch->row[r];
        for (t = d = 0; t < row->tokens; t++) {
            while (t >= row->cu_seqlens[d + 1]) d++;
            if (row->targets[t] != SEQPAR_IGNORE)
                to[n++] = (triple){row->doc_source[d], row->position_ids[t], row->targets[t]};
        }
    }
    return n;
}

static void expect_triples(const seqpar_batch *batch, const corpus *c, const fate *f) {
    int64_t room = batch->counts.tokens + f->counts.tokens;
    int64_t rows, documents;
    triple *a = malloc((size_t)(2 * room + 1) * sizeof *a), *b = a + room;
    rows = triples_of_rows(a, batch);
    documents = triples_of_documents(b, c, f);
    qsort(a, (size_t)rows, sizeof *a, triple_order);
    qsort(b, (size_t)documents, sizeof *b, triple_order);
    EXPECT_EQUAL(rows, documents, "the number of supervised triples");
    test_expect(!memcmp(a, b, (size_t)(rows < documents ? rows : documents) * sizeof *a),
                "the supervised triples differ");
    free(a);
}

/* Packs and compares with the naive answer in all respects. */
static void expect_packing(const corpus *c, const seqpar_pack_desc *desc) {
    seqpar_error error = {0};
    seqpar_batch batch;
    fate f = decide(c, desc);
    seqpar_status status = seqpar_pack(&error, &batch, c->doc, c->count, desc);
    if (f.rows == 0)
        EXPECT_EQUAL(status, SEQPAR_ERR_NO_TARGET, "the status where nothing is left");
    else if (test_expect(!status, "%s: %s", seqpar_status_name(status), error.text)) {
        expect_batch(&batch, c, desc, &f);
        expect_triples(&batch, c, &f);
    }
    seqpar_batch_free(&batch);
}

/* ---- tests ---- */

/* One packing written out by hand: two rows, an empty and a one-token document, a pair,
   token id 0 as input and as target. */
static void test_golden(void) {
    static const int32_t a[] = {0, 7, 0}, b[] = {5}, d[] = {3, 0, 4, 8};
    static const uint8_t answer_only[] = {1, 0, 1, 1};
    static const seqpar_document docs[] = {{a, NULL, 3, 1},
                                           {NULL, NULL, 0, 2},
                                           {b, NULL, 1, 3},
                                           {a, NULL, 2, 3},
                                           {d, answer_only, 4, 4}};
    static const int32_t ids[2][6] = {{0, 7, 0, 5, 0, 7}, {3, 0, 4, 8}};
    static const int32_t places[2][6] = {{0, 1, 2, 0, 0, 1}, {0, 1, 2, 3}};
    static const int32_t targets[2][6] = {{7, 0, -100, -100, 7, -100}, {-100, 4, 8, -100}};
    static const int64_t cu[2][4] = {{0, 3, 4, 6}, {0, 4}}, source[2][3] = {{0, 2, 3}, {4}};
    static const int64_t tokens[2] = {6, 4}, documents[2] = {3, 1};
    static const seqpar_pack_counts counts = {5, 1, 0, 0, 0, 10, 5};
    seqpar_pack_desc desc = {.pack_len = 7, .cell = 3, .vocab = 10};
    seqpar_batch batch;
    seqpar_status status = seqpar_pack(NULL, &batch, docs, 5, &desc);
    int64_t r;
    EXPECT_EQUAL(status, SEQPAR_OK, "the status");
    EXPECT_EQUAL(batch.rows, 2, "the number of rows");
    for (r = 0; r < batch.rows; r++) {
        size_t bytes = (size_t)tokens[r] * sizeof(int32_t);
        size_t numbers = (size_t)documents[r] * sizeof(int64_t);
        EXPECT_EQUAL(batch.row[r].tokens, tokens[r], "the tokens of a row");
        EXPECT_EQUAL(batch.row[r].docs, documents[r], "the documents of a row");
        EXPECT_EQUAL(batch.row[r].cell, 3, "the size of a cell");
        test_expect(!memcmp(batch.row[r].ids, ids[r], bytes), "row %lld: ids", (long long)r);
        test_expect(!memcmp(batch.row[r].targets, targets[r], bytes), "row %lld: targets",
                    (long long)r);
        test_expect(!memcmp(batch.row[r].position_ids, places[r], bytes),
                    "row %lld: position_ids", (long long)r);
        test_expect(!memcmp(batch.row[r].cu_seqlens, cu[r], numbers + 8),
                    "row %lld: cu_seqlens", (long long)r);
        test_expect(!memcmp(batch.row[r].doc_source, source[r], numbers),
                    "row %lld: doc_source", (long long)r);
    }
    expect_counts(&batch.counts, &counts);
    seqpar_batch_free(&batch);
    test_expect(!batch.row && !batch.rows && !batch.storage, "a freed batch still has rows");
    test_end("pack_golden");
}

/* Lengths and the rows they must get, by hand: a full row is full, none is gone back to, order
   rules differ. */
static void test_order(void) {
    static const struct {
        const char *name;
        int order;
        int64_t pack_len, lengths[8], rows[8];
    } table[] = {
        {"in_order", SEQPAR_PACK_IN_ORDER, 10, {2, 5, 5, 8, 2, 7}, {0, 0, 1, 2, 2, 3}},
        {"in_order_full", SEQPAR_PACK_IN_ORDER, 7, {4, 3, 4, 4, 3, 2}, {0, 0, 1, 2, 2, 3}},
        {"unit_per_row", SEQPAR_PACK_UNIT_PER_ROW, 10, {2, 5, 5, 8, 3, 7}, {0, 1, 2, 3, 4, 5}},
    };
    size_t i, d;
    for (i = 0; i < sizeof table / sizeof *table; i++) {
        seqpar_pack_desc desc = {.pack_len = table[i].pack_len, .order = table[i].order};
        corpus c = {.count = 0};
        fate f;
        for (d = 0; table[i].lengths[d]; d++)
            corpus_add(&c, (int64_t)d, table[i].lengths[d], MASK_NULL);
        f = decide(&c, &desc);
        test_expect(!memcmp(f.row, table[i].rows, d * sizeof *f.row),
                    "the naive packing itself is wrong");
        expect_packing(&c, &desc);
        corpus_free(&c);
        test_end("pack_order_%s", table[i].name);
    }
}

/* mask[t] says that token t is to be predicted: it acts on the target of position t - 1. */
static void test_mask(void) {
    static const int32_t ids[] = {11, 0, 13, 14, 0};
    static const struct {
        uint8_t mask[5];
        int32_t targets[5];
    } table[] = {
        {{1, 0, 0, 0, 1}, {-100, -100, -100, 0, -100}},
        {{0, 1, 0, 1, 0}, {0, -100, 14, -100, -100}},
        {{1, 1, 1, 1, 1}, {0, 13, 14, 0, -100}},
        {{0, 0, 1, 0, 0}, {-100, 13, -100, -100, -100}},
    };
    seqpar_pack_desc desc = {.pack_len = 6};
    size_t i;
    for (i = 0; i < sizeof table / sizeof *table; i++) {
        seqpar_document d = {ids, table[i].mask, 5, 0};
        seqpar_batch batch;
        test_expect(!seqpar_pack(NULL, &batch, &d, 1, &desc), "case %d is refused", (int)i);
        test_expect(batch.rows == 1 && !memcmp(batch.row[0].targets, table[i].targets,
                                               sizeof table[i].targets),
                    "case %d: targets", (int)i);
        seqpar_batch_free(&batch);
    }
    test_end("pack_loss_mask");
}

/* Every counter has a row of its own, with the other ones at rest. */
static void test_counters(void) {
    static const struct {
        const char *name;
        int truncation, keep_masked;
        int64_t lengths[6], units[6];
        int masks[6];
        seqpar_pack_counts want;
    } table[] = {
        {"zero_length", 0, 0, {3, 0, 0, 5}, {1, 2, 3, 3}, {0}, {4, 2, 0, 0, 0, 8, 6}},
        {"dropped",
         SEQPAR_TRUNCATION_DROP,
         0,
         {3, 14, 6, 7, 1},
         {1, 2, 3, 3, 4},
         {0},
         {5, 0, 3, 0, 1, 3, 2}},
        {"cut",
         SEQPAR_TRUNCATION_CUT,
         0,
         {3, 14, 5, 9},
         {1, 2, 3, 3},
         {0},
         {4, 0, 0, 2, 0, 26, 22}},
        {"cut_one_token_each",
         SEQPAR_TRUNCATION_CUT,
         1,
         {2, 20, 20, 20, 20},
         {1, 2, 2, 2, 2},
         {0},
         {5, 0, 0, 4, 0, 14, 9}},
        {"masked",
         0,
         0,
         {3, 4, 5, 1},
         {1, 2, 2, 3},
         {0, MASK_NOTHING, MASK_FIRST, 0},
         {4, 0, 0, 0, 3, 3, 2}},
        {"masked_in_a_unit",
         0,
         0,
         {4, 5, 1},
         {2, 2, 2},
         {MASK_NOTHING, MASK_LAST, MASK_NOTHING},
         {3, 0, 0, 0, 0, 10, 1}},
        {"masked_kept",
         0,
         1,
         {3, 4, 1},
         {1, 2, 3},
         {0, MASK_NOTHING, 0},
         {3, 0, 0, 0, 0, 8, 2}},
        {"masked_by_the_cut",
         SEQPAR_TRUNCATION_CUT,
         0,
         {3, 15},
         {1, 2},
         {0, MASK_LAST},
         {2, 0, 0, 1, 1, 3, 2}},
    };
    size_t i, d;
    for (i = 0; i < sizeof table / sizeof *table; i++) {
        seqpar_pack_desc desc = {.pack_len = 12,
                                 .truncation = table[i].truncation,
                                 .keep_masked = table[i].keep_masked};
        corpus c = {.count = 0};
        seqpar_batch batch;
        for (d = 0; d < 6 && table[i].units[d]; d++)
            corpus_add(&c, table[i].units[d], table[i].lengths[d], table[i].masks[d]);
        test_expect(!seqpar_pack(NULL, &batch, c.doc, c.count, &desc), "refused");
        expect_counts(&batch.counts, &table[i].want);
        expect_packing(&c, &desc);
        seqpar_batch_free(&batch);
        corpus_free(&c);
        test_end("pack_counter_%s", table[i].name);
    }
}

/* Cells of a size of its own, and the default's: 128 tokens up to 16,384, 256 up to 131,072, 512
   from there on. */
static void test_cells(void) {
    static const int64_t table[][4] = {
        /* cell, number, first token, leaf */
        {1, 0, 0, 0},
        {1, SEQPAR_MAX_TOKENS, SEQPAR_MAX_TOKENS, SEQPAR_MAX_TOKENS},
        {7, 3, 21, 3},
        {SEQPAR_MAX_TOKENS, 1, SEQPAR_MAX_TOKENS, 1},
        {0, 0, 0, 0},
        {0, 1, 128, 1},
        {0, 127, 16256, 127},
        {0, 128, 16384, 128},
        {0, 129, 16640, 130},
        {0, 575, 130816, 1022},
        {0, 576, 131072, 1024},
        {0, 577, 131584, 1028},
        {0, 2368, 1 << 20, 8192},
        {0, 4194624, INT64_C(1) << 31, 1 << 24}};
    int64_t cell, token, number, end;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        EXPECT_EQUAL(seqpar_cell_begin(table[i][0], table[i][1]), table[i][2],
                     "where a cell begins");
        EXPECT_EQUAL(seqpar_cell_of(table[i][0], table[i][2]), table[i][1], "the cell there");
        EXPECT_EQUAL(seqpar_cell_leaf(table[i][0], table[i][1]), table[i][3], "its leaf");
        if (table[i][2])
            EXPECT_EQUAL(seqpar_cell_of(table[i][0], table[i][2] - 1), table[i][1] - 1,
                         "the cell before");
    }
    for (cell = 0; cell <= 5; cell++) /* every token lies in its cell */
        for (token = 0; token < 140000; token++) {
            number = seqpar_cell_of(cell, token);
            end = seqpar_cell_begin(cell, number + 1);
            test_expect(seqpar_cell_begin(cell, number) <= token && token < end,
                        "token %lld does not lie in cell %lld", (long long)token,
                        (long long)number);
            test_expect(end - seqpar_cell_begin(cell, number) == (cell             ? cell
                                                                  : token < 16384  ? 128
                                                                  : token < 131072 ? 256
                                                                                   : 512),
                        "cell %lld has %lld tokens", (long long)number,
                        (long long)(end - seqpar_cell_begin(cell, number)));
        }
    test_end("pack_cells");
}

/* The limit itself is no refusal, here and where the rows are dealt. */
static void test_largest_cell(void) {
    static const int32_t ids[] = {1, 2, 3};
    const seqpar_document doc = {.ids = ids, .tokens = 3};
    const seqpar_pack_desc desc = {.pack_len = SEQPAR_MAX_TOKENS, .cell = SEQPAR_MAX_TOKENS};
    const seqpar_split_desc deal = {.layout = SEQPAR_LAYOUT_ZIGZAG, .sp_size = 2};
    seqpar_error error = {0};
    seqpar_batch batch;
    seqpar_share share;
    if (test_expect(!seqpar_pack(&error, &batch, &doc, 1, &desc), "%s", error.text)) {
        EXPECT_EQUAL(batch.row->cell, SEQPAR_MAX_TOKENS, "the size of a cell");
        test_expect(!seqpar_split(&error, &share, batch.row, 1, &deal), "%s", error.text);
        seqpar_share_free(&share);
        seqpar_batch_free(&batch);
    }
    test_end("pack_largest_cell");
}

/* ---- one list of documents, however it is packed ---- */

/* What stands in a cell: its leaf, its document and number there, and its tokens and targets. */
typedef struct packed_cell {
    int64_t leaf, document, cell, tokens;
    int32_t ids[8], targets[8], places[8];
} packed_cell;

static int64_t packed_cells(packed_cell *to, const seqpar_batch *batch) {
    seqpar_error error = {0};
    seqpar_share share;
    int64_t i, t;
    test_expect(!seqpar_split(&error, &share, batch->row, batch->rows,
                              &(seqpar_split_desc){SEQPAR_LAYOUT_CONTIGUOUS, 1, 0}),
                "%s", error.text);
    for (i = 0; i < share.count; i++) {
        const seqpar_piece *p = &share.pieces[i];
        const seqpar_row *row = &batch->row[p->row];
        memset(&to[i], 0, sizeof to[i]);
        to[i].leaf = p->leaf;
        to[i].document = p->document;
        to[i].cell = p->cell;
        to[i].tokens = p->count;
        for (t = 0; t < p->count; t++) {
            to[i].ids[t] = row->ids[p->start + t];
            to[i].targets[t] = row->targets[p->start + t];
            to[i].places[t] = row->position_ids[p->start + t];
        }
    }
    i = share.count;
    seqpar_share_free(&share);
    return i;
}

/* The cells of a list of documents are the same, in the same order, whatever shares a row. */
static void test_packings(void) {
    enum { MOST = DOCS * 40 };
    packed_cell *one = malloc(2 * MOST * sizeof *one), *other = one + MOST;
    int64_t n, i, packed = 0;
    for (n = 0; n < 60; n++) {
        seqpar_pack_desc desc = {.pack_len = 120, .cell = 1 + n % 8, .keep_masked = 1};
        int64_t count = -1;
        corpus c = {.count = 0};
        corpus_random(&c, test_integer(2, 15), 40);
        corpus_add(&c, 1 << 20, 2, MASK_NULL);
        for (i = 0; i < 4; i++) {
            seqpar_batch batch;
            desc.order = i ? SEQPAR_PACK_IN_ORDER : SEQPAR_PACK_UNIT_PER_ROW;
            desc.pack_len = i < 2 ? 120 : test_integer(120, 3000);
            test_expect(!seqpar_pack(NULL, &batch, c.doc, c.count, &desc), "refused");
            packed += batch.rows;
            if (count < 0)
                count = packed_cells(one, &batch);
            else
                test_expect(packed_cells(other, &batch) == count &&
                                !memcmp(one, other, (size_t)count * sizeof *one),
                            "other cells with pack_len %lld", (long long)desc.pack_len);
            seqpar_batch_free(&batch);
        }
        corpus_free(&c);
    }
    free(one);
    test_expect(packed > 500, "only %lld rows", (long long)packed);
    test_end("pack_packings_have_the_same_cells");
}

/* floor(i S / n) in 128 bits */
static void test_parts(void) {
    int64_t n, total, parts, part;
    for (n = 0; n < 20000; n++) {
        total = (int64_t)(test_random() >> test_integer(24, 63));
        parts = test_integer(1, n % 2 ? 32 : 1 << 20);
        part = test_integer(0, parts);
        EXPECT_EQUAL(seqpar_part_begin(total, parts, part),
                     (int64_t)((__int128)part * total / parts), "the beginning of a part");
    }
    test_end("pack_part_begin");
}

/* ---- refusals ---- */

/* A whole word of the sentence: no letter or digit before or behind it. */
static int says(const char *text, const char *word) {
    const char *at;
    size_t n = strlen(word);
    for (at = strstr(text, word); at; at = strstr(at + 1, word)) {
        int before = at > text &&
                     strchr("0123456789abcdefghijklmnopqrstuvwxyz-", at[-1]) != NULL;
        int behind = at[n] && strchr("0123456789abcdefghijklmnopqrstuvwxyz", at[n]) != NULL;
        if (!before && !behind) return 1;
    }
    return 0;
}

static const int32_t some_ids[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17},
                     low_id[] = {4, 0, 3, -6}, high_id[] = {4, 0, 31};
static const uint8_t no_mask[17];

static void test_refusals(void) {
    static const struct {
        const char *name;
        seqpar_status status;
        seqpar_pack_desc desc;
        int64_t count;
        seqpar_document docs[9];
        const char *words[4];
    } table[] = {
        {"pack_len_zero",
         SEQPAR_ERR_PACK_LEN,
         {.pack_len = 0},
         1,
         {{some_ids, NULL, 3, 0}},
         {"pack_len is 0"}},
        {"pack_len_negative",
         SEQPAR_ERR_PACK_LEN,
         {.pack_len = -37},
         1,
         {{some_ids, NULL, 3, 0}},
         {"-37"}},
        {"cell_negative",
         SEQPAR_ERR_CELL,
         {.pack_len = 8, .cell = -3},
         1,
         {{some_ids, NULL, 3, 0}},
         {"pack_desc: cell is -3", "1 to 2147483647"}},
        {"cell_large",
         SEQPAR_ERR_CELL,
         {.pack_len = 8, .cell = SEQPAR_MAX_TOKENS + 1},
         1,
         {{some_ids, NULL, 3, 0}},
         {"pack_desc: cell is 2147483648", "0 for the default"}},
        {"dp_size_negative",
         SEQPAR_ERR_OPTION,
         {.pack_len = 8, .dp_size = -1},
         1,
         {{some_ids, NULL, 3, 0}},
         {"pack_desc: dp_size is -1, micro_batches 0 and micro_rows 0", "0 or more"}},
        {"micro_batches_negative",
         SEQPAR_ERR_OPTION,
         {.pack_len = 8, .micro_batches = -3},
         1,
         {{some_ids, NULL, 3, 0}},
         {"micro_batches -3"}},
        {"micro_rows_negative",
         SEQPAR_ERR_OPTION,
         {.pack_len = 8, .dp_size = 3, .micro_rows = -2},
         1,
         {{some_ids, NULL, 3, 0}},
         {"dp_size is 3, micro_batches 0 and micro_rows -2"}},
        {"parts_large",
         SEQPAR_ERR_OPTION,
         {.pack_len = 8, .dp_size = 1 << 16, .micro_batches = (1 << 15) + 1},
         1,
         {{some_ids, NULL, 3, 0}},
         {"dp_size is 65536, micro_batches 32769", "at most 16777216 parts"}},
        {"pack_len_large",
         SEQPAR_ERR_PACK_LEN,
         {.pack_len = INT64_MAX},
         1,
         {{some_ids, NULL, 3, 0}},
         {"pack_len", "9223372036854775807"}},
        {"no_documents",
         SEQPAR_ERR_NO_DOCUMENTS,
         {.pack_len = 8},
         0,
         {{NULL, NULL, 0, 0}},
         {"0 documents"}},
        {"negative_length",
         SEQPAR_ERR_DOCUMENT_TOKENS,
         {.pack_len = 8},
         3,
         {{some_ids, NULL, 3, 0}, {some_ids, NULL, 2, 1}, {some_ids, NULL, -4, 2}},
         {"document 2", "-4"}},
        {"no_ids",
         SEQPAR_ERR_DOCUMENT_TOKENS,
         {.pack_len = 8},
         2,
         {{some_ids, NULL, 3, 0}, {NULL, NULL, 6, 1}},
         {"document 1", "6 tokens", "ids"}},
        {"id_too_high",
         SEQPAR_ERR_TOKEN_ID,
         {.pack_len = 8, .vocab = 31},
         2,
         {{some_ids, NULL, 3, 0}, {high_id, NULL, 3, 1}},
         {"document 1", "token 2", "31", "30"}},
        {"id_negative",
         SEQPAR_ERR_TOKEN_ID,
         {.pack_len = 8, .vocab = 31},
         1,
         {{low_id, NULL, 4, 1}},
         {"document 0", "token 3", "-6"}},
        {"torn_unit",
         SEQPAR_ERR_UNIT_ORDER,
         {.pack_len = 8},
         3,
         {{some_ids, NULL, 3, 41}, {some_ids, NULL, 2, 5}, {some_ids, NULL, 3, 41}},
         {"unit 41"}},
        {"torn_empty_unit",
         SEQPAR_ERR_UNIT_ORDER,
         {.pack_len = 8},
         3,
         {{some_ids, NULL, 3, 41}, {NULL, NULL, 0, 5}, {NULL, NULL, 0, 41}},
         {"unit 41"}},
        {"no_target",
         SEQPAR_ERR_NO_TARGET,
         {.pack_len = 13},
         9,
         {{NULL, NULL, 0, 0},
          {NULL, NULL, 0, 1},
          {some_ids, NULL, 14, 2},
          {some_ids, NULL, 9, 3},
          {some_ids, NULL, 6, 3},
          {some_ids, no_mask, 3, 4},
          {some_ids, NULL, 1, 5},
          {some_ids, no_mask, 12, 6},
          {some_ids, no_mask, 1, 6}},
         {"9 documents", "2 empty", "3 too long", "4 fully masked"}},
        {"no_target_but_kept",
         SEQPAR_ERR_NO_TARGET,
         {.pack_len = 13, .keep_masked = 1},
         1,
         {{NULL, NULL, 0, 0}},
         {"1 documents"}},
    };
    size_t i, w;
    for (i = 0; i < sizeof table / sizeof *table; i++) {
        seqpar_error error = {0};
        seqpar_batch batch;
        seqpar_status status = seqpar_pack(&error, &batch, table[i].docs, table[i].count,
                                           &table[i].desc);
        test_expect(status == table[i].status && error.status == status, "%s: %s",
                    seqpar_status_name(status), error.text);
        for (w = 0; w < 4 && table[i].words[w]; w++)
            test_expect(says(error.text, table[i].words[w]), "'%s' is not in: %s",
                        table[i].words[w], error.text);
        test_expect(!batch.row && !batch.rows && !batch.storage, "a refused batch has rows");
        test_expect(seqpar_pack(NULL, &batch, table[i].docs, table[i].count, &table[i].desc) ==
                        table[i].status,
                    "another answer without a place for the error");
        test_end("pack_refuses_%s", table[i].name);
    }
}

static void test_first_error_wins(void) {
    seqpar_pack_desc desc = {.pack_len = -1}, later = {.pack_len = 8};
    seqpar_document d = {some_ids, NULL, -4, 0};
    seqpar_error error = {0};
    seqpar_batch batch;
    seqpar_pack(&error, &batch, &d, 1, &desc);
    test_expect(seqpar_pack(&error, &batch, &d, 1, &later) == SEQPAR_ERR_DOCUMENT_TOKENS,
                "the second call must say its own code");
    test_expect(error.status == SEQPAR_ERR_PACK_LEN && says(error.text, "-1"),
                "the first sentence is lost: %s", error.text);
    test_expect(!strcmp(seqpar_status_name(error.status), "SEQPAR_ERR_PACK_LEN") &&
                    !strcmp(seqpar_status_name(-9999), "?"),
                "names of codes");
    test_end("pack_first_error_wins");
}

static void fuzz_one(int order, int truncation) {
    int64_t pack_len = test_integer(2, 97);
    seqpar_pack_desc desc = {.pack_len = pack_len,
                             .cell = test_integer(0, 1) * test_integer(1, 40),
                             .order = order,
                             .truncation = truncation,
                             .dp_size = test_integer(0, 5),
                             .micro_batches = test_integer(0, 1) * test_integer(0, 9),
                             .micro_rows = test_integer(0, 1) * test_integer(1, 7),
                             .keep_masked = !test_integer(0, 2),
                             .vocab = test_integer(0, 1) * VOCAB};
    corpus c = {.count = 0};
    corpus_random(&c, test_integer(1, 20), test_integer(1, pack_len + pack_len / 4 + 1));
    /* then something is supervised in any case */
    if (desc.keep_masked) corpus_add(&c, 1 << 20, 2, MASK_NULL);
    expect_packing(&c, &desc);
    corpus_free(&c);
}

static void test_fuzz(void) {
    static const char *const orders[] = {"in_order", "unit_per_row"}, *const truncations[] = {
                                                                          "drop", "cut"};
    int order, truncation, n;
    for (order = 0; order < 2; order++)
        for (truncation = 0; truncation < 2; truncation++) {
            for (n = 0; n < 100; n++) fuzz_one(order, truncation);
            test_end("pack_fuzz_%s_%s", orders[order], truncations[truncation]);
        }
}

/* ---- many documents: the rows of the plain loops, at a cost that does not explode ---- */

enum { MANY = 240 };
static const int32_t many_ids[4096];

/* a unit's tokens once rules are applied; 0: left out */
typedef struct many {
    seqpar_document doc[3 * MANY];
    int64_t count, units, first[MANY], tokens[MANY], row[MANY];
} many;

static void many_draw(many *m, const seqpar_pack_desc *desc, int64_t longest) {
    int64_t u, d, docs, live;
    m->count = 0;
    m->units = test_integer(1, MANY);
    for (u = 0; u < m->units; u++) {
        m->first[u] = m->count;
        m->tokens[u] = 0;
        for (docs = test_integer(1, 3), live = d = 0; d < docs; d++) {
            int64_t n = test_integer(0, 3) ? test_integer(0, longest) : test_integer(0, 1);
            m->doc[m->count++] = (seqpar_document){many_ids, NULL, n, 3 * u - 100};
            m->tokens[u] += n;
            live += n > 0;
        }
        if (m->tokens[u] <= desc->pack_len) continue;
        m->tokens[u] = 0;
        for (d = m->first[u]; d < m->count && desc->truncation == SEQPAR_TRUNCATION_CUT &&
                              live <= desc->pack_len;
             d++)
            m->tokens[u] += m->doc[d].tokens < desc->pack_len / live ? m->doc[d].tokens
                                                                     : desc->pack_len / live;
    }
}

/* Returns the rows. */
static int64_t plain_rows(many *m, const seqpar_pack_desc *desc) {
    int64_t room = 0, rows = 0, u;
    for (u = 0; u < m->units; u++) {
        m->row[u] = -1;
        if (!m->tokens[u]) continue;
        if (desc->order == SEQPAR_PACK_UNIT_PER_ROW || room < m->tokens[u])
            room = desc->pack_len, rows++;
        room -= m->tokens[u];
        m->row[u] = rows - 1;
    }
    return rows;
}

static void expect_plain_rows(const many *m, const seqpar_batch *batch, int64_t rows) {
    int64_t r, d, u, source, placed = 0, wanted = 0;
    EXPECT_EQUAL(batch->rows, rows, "the number of rows");
    for (u = 0; u < m->units; u++) wanted += m->tokens[u];
    for (r = 0; r < batch->rows; r++)
        for (u = d = 0; d < batch->row[r].docs; d++) {
            source = batch->row[r].doc_source[d];
            test_expect(!d || source > batch->row[r].doc_source[d - 1],
                        "row %lld: document %lld stands behind a later one", (long long)r,
                        (long long)source);
            while (u + 1 < m->units && m->first[u + 1] <= source) u++;
            test_expect(m->row[u] == r, "document %lld of %lld lies in row %lld, not %lld",
                        (long long)source, (long long)m->count, (long long)r,
                        (long long)m->row[u]);
            placed += batch->row[r].cu_seqlens[d + 1] - batch->row[r].cu_seqlens[d];
        }
    EXPECT_EQUAL(placed, wanted, "the tokens in rows");
}

static void test_plain_rows(void) {
    static const char *const orders[] = {"in_order", "unit_per_row"};
    many *m = malloc(sizeof *m);
    int order, n;
    for (order = 0; order < 2; order++) {
        for (n = 0; n < 1500; n++) {
            int64_t pack_len = test_integer(1, n % 3 ? 40 : 1000);
            seqpar_pack_desc desc = {
                .pack_len = pack_len, .order = order, .truncation = n % 2, .keep_masked = 1};
            seqpar_batch batch;
            seqpar_status status;
            int64_t rows;
            many_draw(m, &desc, n % 5 ? test_integer(1, pack_len + 2) : pack_len / 3 + 1);
            rows = plain_rows(m, &desc);
            status = seqpar_pack(NULL, &batch, m->doc, m->count, &desc);
            EXPECT_EQUAL(status, rows ? SEQPAR_OK : SEQPAR_ERR_NO_TARGET, "the status");
            if (!status) expect_plain_rows(m, &batch, rows);
            seqpar_batch_free(&batch);
        }
        test_end("pack_plain_rows_%s", orders[order]);
    }
    free(m);
}

/* Steps of packing, sorting included: fewer than 6 n log2 n; units in any order are sorted
   to find one that is torn. */
static void test_work(void) {
    static const char *const orders[] = {"in_order", "unit_per_row"};
    enum { N = 200000 };
    seqpar_document *doc = calloc(N, sizeof *doc);
    int64_t i, n, log2;
    int order;
    for (order = 0; order < 2; order++) {
        for (n = N / 200, log2 = 10; n <= N; n *= 200, log2 = 18) {
            seqpar_pack_desc desc = {.pack_len = 64, .order = order, .keep_masked = 1};
            seqpar_batch batch;
            for (i = 0; i < n; i++)
                doc[i] = (seqpar_document){many_ids, NULL, 1 + i * 7919 % 61,
                                           i * 99991 % 1000003};
            seqpar__work = 0;
            test_expect(!seqpar_pack(NULL, &batch, doc, n, &desc), "refused");
            test_expect(seqpar__work > n / 2 && seqpar__work < 6 * n * log2,
                        "%lld documents take %lld steps", (long long)n,
                        (long long)seqpar__work);
            seqpar_batch_free(&batch);
            doc[n - 1].unit = doc[n / 3].unit;
            test_expect(seqpar_pack(NULL, &batch, doc, n, &desc) == SEQPAR_ERR_UNIT_ORDER,
                        "a torn unit passes");
        }
        test_end("pack_work_%s", orders[order]);
    }
    free(doc);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_golden());
    TEST(test_order());
    TEST(test_mask());
    TEST(test_counters());
    TEST(test_cells());
    TEST(test_largest_cell());
    TEST(test_packings());
    TEST(test_parts());
    TEST(test_refusals());
    TEST(test_first_error_wins());
    TEST(test_fuzz());
    TEST(test_plain_rows());
    TEST(test_work());
    return test_summary();
}
