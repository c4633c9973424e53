/* SPDX-License-Identifier: MIT OR Unlicense */
/* What seqpar.h refuses, at both ends of every range: the last value that is accepted, the first
   that is refused, each half of a condition alone, first and last element; and the whole sentence
   with its numbers. check_all_seen names a refusal that no line here meets. */
#include <fenv.h>
#include "support/refusals.h"
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

static seqpar_error error;

/* ---- pack ---- */

enum { DOCS = 3, LONGEST = 7, VOCAB = 11 };
typedef struct pack_call {
    seqpar_pack_desc desc;
    int64_t count, tokens[DOCS], unit[DOCS], prefix[DOCS];
    int ids[DOCS][LONGEST], target[DOCS][LONGEST], masked;
    int no_ids, own; /* a bit for each document; own: has targets */
} pack_call;

static seqpar_status pack(void *call) {
    static const uint8_t nothing[LONGEST];
    pack_call *c = call;
    seqpar_document docs[DOCS];
    seqpar_batch batch;
    for (int i = 0; i < DOCS; i++)
        docs[i] = (seqpar_document){.ids = c->no_ids >> i & 1 ? NULL : c->ids[i],
                                    .tokens = c->tokens[i],
                                    .unit = c->unit[i],
                                    .prefix = c->prefix[i],
                                    .loss_mask = c->masked >> i & 1 ? nothing : NULL,
                                    .targets = c->own >> i & 1 ? c->target[i] : NULL};
    seqpar_status status = seqpar_pack(&error, &batch, docs, c->count, &c->desc);
    seqpar_batch_free(&batch);
    return status;
}

#define P(member, value) SET(pack_call, member, value)
static const pack_call good_pack = {.desc = {.pack_len = 7, .vocab = VOCAB},
                                    .count = DOCS,
                                    .tokens = {5, 2, 7},
                                    .unit = {4, 5, 6}};
static const limit pack_limits[] = {
    {P(desc.pack_len, 1),
     0,
     SEQPAR_ERR_PACK_LEN,
     "pack_len is 0; give the most tokens a row may have, 1 to 2147483647",
     {P(desc.keep_masked, 1), P(desc.truncation, SEQPAR_TRUNCATION_CUT)}},
    {P(desc.pack_len, 2147483647), 2147483648.0L, SEQPAR_ERR_PACK_LEN,
     "pack_len is 2147483648; give the most tokens a row may have, 1 to 2147483647"},
    {P(desc.cell, 0), -1, SEQPAR_ERR_CELL,
     "pack_desc: cell is -1; give the tokens of a cell, 1 to 2147483647, or 0 for the default"},
    {P(desc.cell, 2147483647), 2147483648.0L, SEQPAR_ERR_CELL,
     "pack_desc: cell is 2147483648; give the tokens of a cell, 1 to 2147483647, or 0 for the "
     "default"},
#define PARTS "; give 0 or more, and at most 16777216 parts"
    {P(desc.dp_size, 0), -1, SEQPAR_ERR_OPTION,
     "pack_desc: dp_size is -1, micro_batches 0 and micro_rows 0" PARTS},
    {P(desc.micro_batches, 0), -1, SEQPAR_ERR_OPTION,
     "pack_desc: dp_size is 0, micro_batches -1 and micro_rows 0" PARTS},
    {P(desc.micro_rows, 0), -1, SEQPAR_ERR_OPTION,
     "pack_desc: dp_size is 0, micro_batches 0 and micro_rows -1" PARTS},
    {P(desc.micro_batches, 16777216), 16777217, SEQPAR_ERR_OPTION,
     "pack_desc: dp_size is 0, micro_batches 16777217 and micro_rows 0" PARTS},
    {P(desc.dp_size, 5592405),
     5592406,
     SEQPAR_ERR_OPTION,
     "pack_desc: dp_size is 5592406, micro_batches 3 and micro_rows 0" PARTS,
     {P(desc.micro_batches, 3)}},
    {P(count, 1), 0, SEQPAR_ERR_NO_DOCUMENTS,
     "there are 0 documents to pack; give 1 to 2147483648"},
    {P(count, 1), -1, SEQPAR_ERR_NO_DOCUMENTS,
     "there are -1 documents to pack; give 1 to 2147483648"},
    {P(count, 3), 2147483649.0L, SEQPAR_ERR_NO_DOCUMENTS,
     "there are 2147483649 documents to pack; give 1 to 2147483648"},
    {P(tokens[0], 0), -1, SEQPAR_ERR_DOCUMENT_TOKENS,
     "document 0 has -1 tokens; lengths start at 0"},
    {P(tokens[2], 0), -1, SEQPAR_ERR_DOCUMENT_TOKENS,
     "document 2 has -1 tokens; lengths start at 0"},
    {P(no_ids, 0), 1, SEQPAR_ERR_DOCUMENT_TOKENS, "document 0 has 5 tokens but no ids"},
    {P(no_ids, 0), 4, SEQPAR_ERR_DOCUMENT_TOKENS, "document 2 has 7 tokens but no ids"},
    {P(tokens[1], 0),
     1,
     SEQPAR_ERR_DOCUMENT_TOKENS,
     "document 1 has 1 tokens but no ids",
     {P(no_ids, 2)}},
    {P(tokens[1], 0),
     -1,
     SEQPAR_ERR_DOCUMENT_TOKENS,
     "document 1 has -1 tokens; lengths start at 0",
     {P(no_ids, 2)}},
    {P(prefix[1], 0), -1, SEQPAR_ERR_MASK,
     "document 1 has 2 tokens and a prefix of -1; give 0 to its tokens"},
    {P(prefix[2], 7), 8, SEQPAR_ERR_MASK,
     "document 2 has 7 tokens and a prefix of 8; give 0 to its tokens"},
    {P(ids[0][0], 0), -1, SEQPAR_ERR_TOKEN_ID,
     "document 0, token 0 has id -1; the vocabulary has ids 0..10"},
    {P(ids[0][0], 10), 11, SEQPAR_ERR_TOKEN_ID,
     "document 0, token 0 has id 11; the vocabulary has ids 0..10"},
    {P(ids[2][6], 0), -1, SEQPAR_ERR_TOKEN_ID,
     "document 2, token 6 has id -1; the vocabulary has ids 0..10"},
    {P(ids[2][6], 10), 11, SEQPAR_ERR_TOKEN_ID,
     "document 2, token 6 has id 11; the vocabulary has ids 0..10"},
#define OWN_TARGET(document, token, target) \
    "document " document ", token " token " has target " target \
    "; give an id from 0 to 10, or SEQPAR_IGNORE"
    {P(target[0][0], -100), -99, SEQPAR_ERR_TOKEN_ID, OWN_TARGET("0", "0", "-99"), {P(own, 7)}},
    {P(target[0][0], 0), -1, SEQPAR_ERR_TOKEN_ID, OWN_TARGET("0", "0", "-1"), {P(own, 7)}},
    {P(target[2][6], 10), 11, SEQPAR_ERR_TOKEN_ID, OWN_TARGET("2", "6", "11"), {P(own, 4)}},
    {P(target[2][6], 2147483647),
     -1,
     SEQPAR_ERR_TOKEN_ID,
     "document 2, token 6 has target -1; give an id from 0 to 2147483647, or SEQPAR_IGNORE",
     {P(own, 4), P(desc.vocab, 0)}},
    {P(own, 5),
     7,
     SEQPAR_ERR_MASK,
     "document 1 has targets and a loss_mask, which both say what is learnt; leave out one of them",
     {P(masked, 2)}},
    {P(unit[0], 5), 6, SEQPAR_ERR_UNIT_ORDER,
     "documents of unit 6 are not neighbours; sort documents by unit"},
    {P(tokens[0], 2),
     1,
     SEQPAR_ERR_NO_TARGET,
     "of 3 documents none is left with a supervised token (1 empty, 1 too long, 1 fully masked); "
     "check keys, masks and pack_len 6",
     {P(tokens[1], 0), P(desc.pack_len, 6)}},
    {P(masked, 0), 7, SEQPAR_ERR_NO_TARGET,
     "of 3 documents none is left with a supervised token (0 empty, 0 too long, 3 fully masked); "
     "check keys, masks and pack_len 7"},
};

/* ---- split ---- */

typedef struct split_call {
    int64_t tokens[2], cell[2], index[2], docs[2], cu[2][4], prefix[2][3], source[2][3];
    int no_cu, prefixed, numbered;
    seqpar_split_desc desc;
    int64_t token; /* of the owner, where it is asked for */
    int owner, device;
} split_call;

static void split_rows(split_call *c, seqpar_row *rows) {
    for (int i = 0; i < 2; i++)
        rows[i] = (seqpar_row){.index = c->index[i],
                               .tokens = c->tokens[i],
                               .cell = c->cell[i],
                               .docs = c->docs[i],
                               .cu_seqlens = c->no_cu ? NULL : c->cu[i],
                               .doc_source = c->numbered ? c->source[i] : NULL,
                               .prefix_lens = c->prefixed ? c->prefix[i] : NULL};
}

static seqpar_status split(void *call) {
    split_call *c = call;
    seqpar_share share = {0};
    seqpar_row rows[2];
    int64_t rank, local;
    split_rows(c, rows);
    if (c->owner) return seqpar_split_owner(&error, &rank, &local, rows, c->token, &c->desc);
    seqpar_status status = seqpar_split(&error, &share, rows, 2, &c->desc);
    seqpar_share_free(&share);
    return status;
}

#define S(member, value) SET(split_call, member, value)
static const split_call good_split = {.tokens = {12, 7},
                                      .cell = {2, 3},
                                      .index = {0, 1},
                                      .docs = {3, 2},
                                      .cu = {{0, 5, 5, 12}, {0, 3, 7}},
                                      .source = {{3, 4, 8}, {9, 12}},
                                      .prefixed = 1,
                                      .desc = {SEQPAR_LAYOUT_ZIGZAG, 3, 1},
                                      .token = 4};
static const limit split_limits[] = {
    {S(cell[0], 0), -1, SEQPAR_ERR_CELL,
     "row 0: cell is -1; give the tokens of a cell, 1 to 2147483647, or 0 for the default"},
    {S(cell[1], 2147483647), 2147483648.0L, SEQPAR_ERR_CELL,
     "row 1: cell is 2147483648; give the tokens of a cell, 1 to 2147483647, or 0 for the "
     "default"},
    {S(tokens[0], 0),
     -1,
     SEQPAR_ERR_SIZE,
     "row 0 has -1 tokens; give 0 to 2147483647",
     {S(docs[0], 0)}},
    {S(tokens[1], 7),
     2147483648.0L,
     SEQPAR_ERR_SIZE,
     "row 1 has 2147483648 tokens; give 0 to 2147483647",
     {S(docs[1], 0)}},
    {S(source[0][0], 0),
     -1,
     SEQPAR_ERR_ROW_ORDER,
     "row 0: document 0 has the number -1; numbers rise within a step, from 0 to 2147483647",
     {S(numbered, 1)}},
    {S(source[0][1], 4),
     3,
     SEQPAR_ERR_ROW_ORDER,
     "row 0: document 1 has the number 3 again; numbers rise within a step, from 0 to 2147483647",
     {S(numbered, 1)}},
    {S(source[0][2], 5),
     2,
     SEQPAR_ERR_ROW_ORDER,
     "row 0: document 2 has the number 2; numbers rise within a step, from 0 to 2147483647",
     {S(numbered, 1)}},
    {S(source[1][1], 2147483647),
     2147483648.0L,
     SEQPAR_ERR_ROW_ORDER,
     "row 1: document 1 has the number 2147483648; numbers rise within a step, from 0 to "
     "2147483647",
     {S(numbered, 1)}},
    {S(source[1][0], 9),
     8,
     SEQPAR_ERR_ROW_ORDER,
     "row 1 has document 8 behind those of row 0; numbers of documents (doc_source) rise from row "
     "to row, and each stands there once",
     {S(numbered, 1)}},
    {S(index[1], 1048575), 1048576, SEQPAR_ERR_SIZE,
     "row 1048576 has 2 documents without numbers; number them (doc_source) where rows or "
     "documents of a row are more than 1048576"},
    {S(index[0], 0), -1, SEQPAR_ERR_ROW_ORDER, "row number -1 follows -1; rows must rise"},
    {S(index[1], 1), 0, SEQPAR_ERR_ROW_ORDER, "row number 0 follows 0; rows must rise"},
    {S(docs[0], 0), -1, SEQPAR_ERR_CU_SEQLENS,
     "row 0 has -1 documents; give 0 or more, and cu_seqlens with docs + 1 entries"},
    {S(docs[0], 0),
     1,
     SEQPAR_ERR_CU_SEQLENS,
     "row 0 has 1 documents and no cu_seqlens; give 0 or more, and cu_seqlens with docs + 1 "
     "entries",
     {S(no_cu, 1), S(docs[1], 0)}},
    {S(cu[0][2], 5), 4, SEQPAR_ERR_CU_SEQLENS,
     "row 0: cu_seqlens falls from 5 to 4 at document 1"},
    {S(cu[0][0], 0), 6, SEQPAR_ERR_CU_SEQLENS,
     "row 0: cu_seqlens falls from 6 to 5 at document 0"},
    {S(cu[1][1], 7), 8, SEQPAR_ERR_CU_SEQLENS,
     "row 1: cu_seqlens falls from 8 to 7 at document 1"},
    {S(cu[0][0], 0), 1, SEQPAR_ERR_CU_SEQLENS,
     "row 0: cu_seqlens runs from 1 to 12; it must run from 0 to 12"},
    {S(cu[1][2], 7), 6, SEQPAR_ERR_CU_SEQLENS,
     "row 1: cu_seqlens runs from 0 to 6; it must run from 0 to 7"},
    {S(cu[1][2], 7), 8, SEQPAR_ERR_CU_SEQLENS,
     "row 1: cu_seqlens runs from 0 to 8; it must run from 0 to 7"},
    {S(prefix[0][0], 0), -1, SEQPAR_ERR_MASK,
     "row 0: document 0 has 5 tokens and a prefix of -1; give 0 to all of them"},
    {S(prefix[0][2], 7), 8, SEQPAR_ERR_MASK,
     "row 0: document 2 has 7 tokens and a prefix of 8; give 0 to all of them"},
    {S(desc.layout, 0), -1, SEQPAR_ERR_LAYOUT,
     "layout -1 is unknown; use contiguous, zigzag, stripe or zigzag-doc"},
    {S(desc.layout, SEQPAR_LAYOUT_COUNT - 1), SEQPAR_LAYOUT_COUNT, SEQPAR_ERR_LAYOUT,
     "layout 4 is unknown; use contiguous, zigzag, stripe or zigzag-doc"},
    {S(desc.sp_size, 1),
     0,
     SEQPAR_ERR_RANKS,
     "sequence_parallel_size is 0; give at least 1",
     {S(desc.sp_rank, 0)}},
    {S(desc.sp_size, 1),
     -1,
     SEQPAR_ERR_RANKS,
     "sequence_parallel_size is -1; give at least 1",
     {S(desc.sp_rank, 0)}},
    {S(desc.sp_size, 2147483647), 2147483648.0L, SEQPAR_ERR_RANKS,
     "sequence_parallel_size is 2147483648; give at most 2147483647"},
    {S(desc.sp_rank, 0), -1, SEQPAR_ERR_RANK,
     "sp_rank is -1; with sequence_parallel_size 3 give 0 to 2"},
    {S(desc.sp_rank, 2), 3, SEQPAR_ERR_RANK,
     "sp_rank is 3; with sequence_parallel_size 3 give 0 to 2"},
    {S(token, 0),
     -1,
     SEQPAR_ERR_TOKEN_RANGE,
     "token -1 is outside a row of 12 tokens",
     {S(owner, 1)}},
    {S(token, 11),
     12,
     SEQPAR_ERR_TOKEN_RANGE,
     "token 12 is outside a row of 12 tokens",
     {S(owner, 1)}},
};

/* A striped document has a leaf a rank, rounded up to a power of two: eight of them fill a row
   that nobody has numbered. */
static void check_striped(void) {
    static const int64_t cu[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    const seqpar_split_desc desc = {SEQPAR_LAYOUT_STRIPE, 2147483647, 0};
    seqpar_row row = {.index = 3, .tokens = 8, .docs = 8, .cu_seqlens = cu};
    seqpar_share share = {0};
    ACCEPTED(seqpar_split(&error, &share, &row, 1, &desc), &error);
    seqpar_share_free(&share);
    row.tokens = row.docs = 9;
    REFUSED(seqpar_split(&error, &share, &row, 1, &desc), &error, SEQPAR_ERR_SIZE,
            "row 3: its documents have no numbers, and 2147483647 striped ranks need more than "
            "2^34 leaves of it; number them (doc_source)");
    row.doc_source = cu;
    ACCEPTED(seqpar_split(&error, &share, &row, 1, &desc), &error);
    seqpar_share_free(&share);
    test_end("striped_leaves");
}

/* ---- parts ---- */

typedef struct parting {
    seqpar_part part;
    int64_t docs;
} parting;

static seqpar_status part_rows(void *call) {
    static const int64_t cu[] = {0, 5, 7};
    parting *c = call;
    const seqpar_row row = {.tokens = 7, .cell = 2, .docs = c->docs, .cu_seqlens = cu};
    int64_t first, count;
    return seqpar_part_rows(&error, &first, &count, &row, 1, &c->part);
}

#define PT(member, value) SET(parting, member, value)
#define NO_PARTING        "; give at least 1 of each, and at most 16777216 parts"
#define NOT_COUNTED       "; count both from 0"
static const parting good_parting = {{3, 5, 2, 4}, 2};
static const limit parting_limits[] = {
    {PT(part.micro_batches, 1),
     0,
     SEQPAR_ERR_OPTION,
     "part: 0 micro-batches on 5 data-parallel ranks" NO_PARTING,
     {PT(part.micro_batch, 0)}},
    {PT(part.dp_size, 1),
     0,
     SEQPAR_ERR_OPTION,
     "part: 3 micro-batches on 0 data-parallel ranks" NO_PARTING,
     {PT(part.dp_rank, 0)}},
    {PT(part.dp_size, 5592405), 5592406, SEQPAR_ERR_OPTION,
     "part: 3 micro-batches on 5592406 data-parallel ranks" NO_PARTING},
    {PT(part.micro_batch, 2), 3, SEQPAR_ERR_OPTION,
     "part: micro-batch 3 of 3, data-parallel rank 4 of 5" NOT_COUNTED},
    {PT(part.micro_batch, 0), -1, SEQPAR_ERR_OPTION,
     "part: micro-batch -1 of 3, data-parallel rank 4 of 5" NOT_COUNTED},
    {PT(part.dp_rank, 4), 5, SEQPAR_ERR_OPTION,
     "part: micro-batch 2 of 3, data-parallel rank 5 of 5" NOT_COUNTED},
    {PT(part.dp_rank, 0), -1, SEQPAR_ERR_OPTION,
     "part: micro-batch 2 of 3, data-parallel rank -1 of 5" NOT_COUNTED},
    {PT(docs, 2), -1, SEQPAR_ERR_CU_SEQLENS,
     "row 0 has -1 documents; give 0 or more, and cu_seqlens with docs + 1 entries"},
};

/* ---- plan ---- */

static seqpar_status plan(void *call) {
    seqpar_plan made;
    seqpar_status status = seqpar_plan_make(&error, &made, call);
    if (!status) seqpar_plan_free(&made);
    return status;
}

#define L(member, value) SET(seqpar_plan_desc, member, value)
static const seqpar_plan_desc good_plan = {
    .schedule = SEQPAR_SCHEDULE_ULYSSES, .sp_size = 6, .sp_rank = 3, .kv_heads = 6};
static const limit plan_limits[] = {
    {L(sp_size, 1),
     0,
     SEQPAR_ERR_RANKS,
     "sequence_parallel_size is 0; give at least 1",
     {L(sp_rank, 0)}},
    {L(sp_rank, 0), -1, SEQPAR_ERR_RANK,
     "sp_rank is -1; with sequence_parallel_size 6 give 0 to 5"},
    {L(sp_rank, 5), 6, SEQPAR_ERR_RANK,
     "sp_rank is 6; with sequence_parallel_size 6 give 0 to 5"},
    {L(kv_heads, 1), 0, SEQPAR_ERR_HEADS, "kv_heads is 0; give at least 1"},
    {L(schedule, 0), -1, SEQPAR_ERR_SCHEDULE,
     "schedule -1 is unknown; use ring, llama3 or ulysses"},
    {L(schedule, SEQPAR_SCHEDULE_COUNT - 1), SEQPAR_SCHEDULE_COUNT, SEQPAR_ERR_SCHEDULE,
     "schedule 3 is unknown; use ring, llama3 or ulysses"},
    {L(ulysses_size, 3), 4, SEQPAR_ERR_ULYSSES,
     "ulysses_size 4 does not divide sequence_parallel_size 6; use a divisor"},
    {L(ulysses_size, 1), -1, SEQPAR_ERR_ULYSSES,
     "ulysses_size -1 does not divide sequence_parallel_size 6; use a divisor"},
    {L(ulysses_size, 2),
     3,
     SEQPAR_ERR_ULYSSES,
     "ulysses_size 3 is more than the 2 kv_heads; use at most 2 (positions then form a "
     "ring), or ulysses_replicate",
     {L(kv_heads, 2)}},
    {L(ulysses_size, 3),
     6,
     SEQPAR_ERR_ULYSSES,
     "ulysses_size 6 is no multiple of the 4 kv_heads; ulysses_replicate needs a multiple",
     {L(kv_heads, 4), L(ulysses_replicate, 1)}},
    {L(ulysses_replicate, 1),
     0,
     SEQPAR_ERR_ULYSSES,
     "ulysses_size 6 is more than the 3 kv_heads; use at most 3 (positions then form a "
     "ring), or ulysses_replicate",
     {L(kv_heads, 3), L(ulysses_size, 6)}},
    {L(heads_k_stride, 3),
     4,
     SEQPAR_ERR_HEAD_STRIDE,
     "heads_k_stride 4 does not divide kv_heads 6; use a divisor",
     {L(schedule, SEQPAR_SCHEDULE_LLAMA3)}},
    {L(heads_k_stride, 6),
     -6,
     SEQPAR_ERR_HEAD_STRIDE,
     "heads_k_stride -6 does not divide kv_heads 6; use a divisor",
     {L(schedule, SEQPAR_SCHEDULE_LLAMA3)}},
    {L(heads_k_stride, 1),
     2,
     SEQPAR_ERR_HEAD_STRIDE,
     "heads_k_stride 2 does not divide kv_heads 1 of a member of the Ulysses group; use a divisor",
     {L(schedule, SEQPAR_SCHEDULE_LLAMA3), L(ulysses_size, 2), L(kv_heads, 3)}},
};

/* ---- one rank ---- */

static seqpar_comm *world;
static seqpar_device *device;
static seqpar_ctx ctx;

static void open_rank(seqpar_device *on) {
    world = seqpar_comm_self();
    device = on;
    test_expect(!seqpar_ctx_open(&ctx, world, device, 1), "%s", world->error->text);
}

static void close_rank(void) {
    seqpar_ctx_close(&ctx);
    seqpar_comm_free(world);
    seqpar_device_close(device);
}

/* ---- attention ---- */

typedef struct attn_call {
    seqpar_attn_desc desc;
    seqpar_attn_io io;
    int64_t cell;
    int kernel; /* 1: whole, 2: without forward, 3: without backward */
    int run, dsinks;
} attn_call;

static int fail_attention(void *user, const seqpar_attn_source *s, void *out, void *lse,
                          void *queue) {
    (void)s, (void)queue, (void)out, (void)lse;
    return *(int *)user;
}
static int fail_gradient(void *user, const seqpar_attn_source *s, void *dq, void *dk, void *dv,
                         void *queue) {
    (void)s, (void)queue, (void)dq, (void)dk, (void)dv;
    return *(int *)user;
}

enum { ATTN_TOKENS = 5, ATTN_ROOM = 4096 };
static double attn_tensor[9][ATTN_ROOM];

/* Opens attention over one row; with `run` it goes forward and backward, too. */
static seqpar_status attend(void *call) {
    static int none;
    seqpar_attn_kernel kernel = {fail_attention, fail_gradient, &none};
    attn_call *c = call;
    const seqpar_row row = {.tokens = ATTN_TOKENS, .cell = c->cell};
    seqpar_attn *attn = NULL;
    if (c->kernel == 2) kernel.forward = NULL;
    if (c->kernel == 3) kernel.backward = NULL;
    if (c->kernel) c->desc.kernel = &kernel;
    c->io.q = attn_tensor[0], c->io.k = attn_tensor[1], c->io.v = attn_tensor[2];
    c->io.out = attn_tensor[3], c->io.lse = attn_tensor[4], c->io.dout = attn_tensor[5];
    c->io.dq = attn_tensor[6], c->io.dk = attn_tensor[7], c->io.dv = attn_tensor[8];
    seqpar_status status = seqpar_attn_open(&ctx, &attn, &row, 1, &c->desc);
    if (!status && c->run) status = seqpar_attn_forward(&ctx, attn, &c->io);
    if (!status && c->run) status = seqpar_attn_backward(&ctx, attn, &c->io);
    seqpar_attn_close(&ctx, attn);
    return status;
}

#define A(member, value) SET(attn_call, member, value)
#define STRIDE(name, width, less) \
    {A(io.name##_stride, width), \
     less, \
     SEQPAR_ERR_SIZE, \
     #name "_stride is " #less "; give 0, or at least " #width \
           " (a token's elements) and at most 4194304", \
     {A(run, 1)}}, \
    { \
        A(io.name##_stride, width), 4194305, SEQPAR_ERR_SIZE, \
            #name "_stride is 4194305; give 0, or at least " #width \
                  " (a token's elements) and at most 4194304", \
        { \
            A(run, 1) \
        } \
    }
static const attn_call good_attn = {.desc = {.heads = 6, .kv_heads = 2, .head_dim = 4},
                                    .cell = 3};
static const limit attn_limits[] = {
    {A(desc.kv_heads, 1), 0, SEQPAR_ERR_HEADS,
     "6 heads over 0 kv_heads; heads must be a positive multiple of kv_heads"},
    {A(desc.heads, 2), 0, SEQPAR_ERR_HEADS,
     "0 heads over 2 kv_heads; heads must be a positive multiple of kv_heads"},
    {A(desc.heads, 2), -2, SEQPAR_ERR_HEADS,
     "-2 heads over 2 kv_heads; heads must be a positive multiple of kv_heads"},
    {A(desc.heads, 8), 7, SEQPAR_ERR_HEADS,
     "7 heads over 2 kv_heads; heads must be a positive multiple of kv_heads"},
    {A(desc.head_dim, 1), 0, SEQPAR_ERR_HEAD_DIM, "head_dim is 0; give at least 1"},
    {A(desc.head_dim, 524288),
     524289,
     SEQPAR_ERR_SIZE,
     "2 heads of head_dim 524289 are wider than 1048576, the most a token may have; check both",
     {A(desc.heads, 2)}},
    {A(desc.window, 0), -1, SEQPAR_ERR_MASK, "window is -1; give 0 for none or at least 1"},
    {A(desc.softcap, 0), -1e-300L, SEQPAR_ERR_MASK,
     "softcap is -1e-300; give 0 for none or a positive number up to 1e30"},
    {A(desc.softcap, 1e30), 1.00001e30L, SEQPAR_ERR_MASK,
     "softcap is 1.00001e+30; give 0 for none or a positive number up to 1e30"},
    {A(desc.softcap, 1), NAN, SEQPAR_ERR_MASK,
     "softcap is nan; give 0 for none or a positive number up to 1e30"},
    {A(desc.dropout, 0), -1e-300L, SEQPAR_ERR_MASK,
     "dropout is -1e-300; give at least 0 and less than 1"},
    {A(desc.dropout, 0.999999), 1, SEQPAR_ERR_MASK,
     "dropout is 1; give at least 0 and less than 1"},
    {A(desc.dropout, 0.5), NAN, SEQPAR_ERR_MASK,
     "dropout is nan; give at least 0 and less than 1"},
    {A(desc.dropout, 0),
     1e-300L,
     SEQPAR_ERR_KERNEL,
     "an own attention kernel has no dropout; set it to 0 (it is 1e-300)",
     {A(kernel, 1)}},
    {A(kernel, 1), 2, SEQPAR_ERR_KERNEL,
     "an own attention kernel has no forward; give both functions"},
    {A(kernel, 1), 3, SEQPAR_ERR_KERNEL,
     "an own attention kernel has no backward; give both functions"},
    {A(desc.scale, 1e30), 1.00001e30L, SEQPAR_ERR_MASK,
     "the attention scale is 1.00001e+30; give a number from -1e30 to 1e30, 0 for "
     "1/sqrt(head_dim)"},
    {A(desc.scale, -1e30), -1.00001e30L, SEQPAR_ERR_MASK,
     "the attention scale is -1.00001e+30; give a number from -1e30 to 1e30, 0 for "
     "1/sqrt(head_dim)"},
    {A(desc.scale, 1), NAN, SEQPAR_ERR_MASK,
     "the attention scale is nan; give a number from -1e30 to 1e30, 0 for 1/sqrt(head_dim)"},
    {A(desc.layout, SEQPAR_LAYOUT_COUNT - 1), SEQPAR_LAYOUT_COUNT, SEQPAR_ERR_LAYOUT,
     "layout 4 is unknown; use contiguous, zigzag, stripe or zigzag-doc"},
    {A(desc.schedule, SEQPAR_SCHEDULE_COUNT - 1), SEQPAR_SCHEDULE_COUNT, SEQPAR_ERR_SCHEDULE,
     "schedule 3 is unknown; use ring, llama3 or ulysses"},
    STRIDE(q, 24, 23),
    STRIDE(k, 8, 7),
    STRIDE(v, 8, 7),
    STRIDE(dq, 24, 23),
    STRIDE(dk, 8, 7),
    STRIDE(dv, 8, 7),
};

/* In one call no tensor has gaps, and there are no dsinks. */
static seqpar_status attend_whole(void *call) {
    static double sinks[6], dsinks[8 * 6];
    const seqpar_row row = {.tokens = ATTN_TOKENS, .cell = 3};
    attn_call *c = call;
    c->io.q = attn_tensor[0], c->io.k = attn_tensor[1], c->io.v = attn_tensor[2];
    c->io.out = attn_tensor[3];
    if (c->dsinks) c->io.sinks = sinks, c->io.dsinks = dsinks;
    return seqpar_attn_run_threads(&error, &c->io, &row, &c->desc, 2);
}
#define WHOLE(member) \
    { \
        A(member, 0), 24, SEQPAR_ERR_OPTION, \
            "attention in one call takes tensors without gaps and makes no dsinks; leave " \
            "strides and dsinks 0, or call seqpar_attn_open and seqpar_attn_backward on each " \
            "rank" \
    }
static const limit whole_limits[] = {
    WHOLE(io.q_stride),  WHOLE(io.k_stride),  WHOLE(io.v_stride), WHOLE(io.dq_stride),
    WHOLE(io.dk_stride), WHOLE(io.dv_stride), WHOLE(dsinks)};

/* Opens attention on one row of 16 tokens, as one of `ranks` ranks. */
static seqpar_status attend_as(seqpar_comm *on, int64_t ranks, const seqpar_attn_desc *desc) {
    const seqpar_row row = {.tokens = 16, .cell = 2};
    seqpar_device *mine = seqpar_device_reference();
    seqpar_attn *attn = NULL;
    seqpar_ctx rank;
    seqpar_status status = seqpar_ctx_open(&rank, on, mine, ranks);
    if (!status) status = seqpar_attn_open(&rank, &attn, &row, 1, desc);
    seqpar_attn_close(&rank, attn);
    seqpar_ctx_close(&rank);
    seqpar_device_close(mine);
    return status;
}

/* 4 ranks, 2 kv heads copied to members of 4: their query heads must be as many. */
static seqpar_status attend_replicated(seqpar_comm *on, void *user) {
    const seqpar_attn_desc desc = {.heads = *(int64_t *)user,
                                   .kv_heads = 2,
                                   .head_dim = 3,
                                   .schedule = SEQPAR_SCHEDULE_ULYSSES,
                                   .ulysses_size = 4,
                                   .ulysses_replicate = 1};
    return attend_as(on, 4, &desc);
}

static void check_replicated(void) {
    int64_t good = 8, bad = 6;
    ACCEPTED(seqpar_run_threads(4, attend_replicated, &good, &error), &error);
    REFUSED(seqpar_run_threads(4, attend_replicated, &bad, &error), &error, SEQPAR_ERR_ULYSSES,
            "ulysses_size 4 does not divide 6 heads; with replicated kv heads use a divisor");
    test_end("attention_replicated");
}

/* What an own attention kernel returns: its code is named, and an lse that is none. */
static double own_lse;
static int give_lse(void *user, const seqpar_attn_source *s, void *out, void *lse,
                    void *queue) {
    (void)user, (void)queue, (void)out;
    for (int64_t i = 0; i < s->q_tokens * s->heads; i++) ((double *)lse)[i] = 0;
    ((double *)lse)[s->q_tokens * s->heads - 1] = own_lse;
    return 0;
}

static seqpar_status attend_own(seqpar_attn_kernel *kernel) {
    attn_call c = good_attn;
    c.desc.kernel = kernel;
    c.run = 1;
    return attend(&c);
}

static void check_own_attention(void) {
    int code = 77, fine = 0;
    seqpar_attn_kernel forward = {fail_attention, fail_gradient, &code};
    seqpar_attn_kernel backward = {give_lse, fail_gradient, &code};
    seqpar_attn_kernel good = {give_lse, fail_gradient, &fine};
    open_rank(seqpar_device_reference());
    own_lse = 0;
    ACCEPTED(attend_own(&good), world->error);
    REFUSED(
        attend_own(&forward), world->error, SEQPAR_ERR_KERNEL,
        "the forward of the own attention kernel returned 77, not 0: 5 queries, 5 keys of source "
        "0, 6 heads from head 0");
    REFUSED(attend_own(&backward), world->error, SEQPAR_ERR_KERNEL,
            "the backward of the own attention kernel returned 77, not 0: 5 queries, 5 keys of "
            "source 0, 6 heads from head 0");
    own_lse = NAN;
    REFUSED(
        attend_own(&good), world->error, SEQPAR_ERR_KERNEL,
        "an own attention kernel gives query 4, head 5 the lse nan; give a finite one, or -inf");
    own_lse = HUGE_VAL;
    REFUSED(
        attend_own(&good), world->error, SEQPAR_ERR_KERNEL,
        "an own attention kernel gives query 4, head 5 the lse inf; give a finite one, or -inf");
    close_rank();
    test_end("attention_own_kernel");
}

/* ---- the vocabulary ---- */

typedef struct vocab_call {
    seqpar_vocab_desc desc;
    int64_t tokens, first, rows, pieces;
    int nodes, no_dlogits, no_share, no_fold, backward;
    int64_t width; /* of a teacher; -2: there is none */
    int64_t choices;
    int choice[SEQPAR_MAX_CHOICES];
    int keeps[8]; /* values and seeds that stand beside choices */
} vocab_call;

enum { HIDDEN = 6, VOCAB_TOKENS = 5 };
static double vocab_data[4][ATTN_ROOM];

/* A step of one row, whose share and fold the gradient of the table takes. */
static seqpar_status vocab_backward(vocab_call *c, const seqpar_vocab_io *io) {
    static const seqpar_row row = {.tokens = VOCAB_TOKENS, .cell = (VOCAB_TOKENS + 1) / 2};
    const seqpar_split_desc whole = {SEQPAR_LAYOUT_CONTIGUOUS, 1, 0};
    seqpar_optim_desc sgd = {.kind = SEQPAR_OPTIM_SGD};
    seqpar_tensor tensor = {"table", VOCAB, HIDDEN, 0, 0, 0};
    const seqpar_token_fold *fold = NULL;
    seqpar_share share = {0}, given;
    seqpar_optim optim = {0};
    seqpar_status status = seqpar_optim_open(&ctx, &optim, &tensor, 1, &sgd);
    if (!status) status = seqpar_step_begin(&ctx, &optim, &row, 1, SEQPAR_LAYOUT_CONTIGUOUS, 1);
    if (!status) status = seqpar_split(ctx.error, &share, &row, 1, &whole);
    if (!status) status = seqpar_step_fold(&ctx, &optim, &fold, &share, 0);
    given = share;
    given.count = c->pieces;
    if (!status)
        status = seqpar_vocab_backward(&ctx, io, c->no_share ? NULL : &given,
                                       c->no_fold ? NULL : fold, &c->desc);
    seqpar_share_free(&share);
    seqpar_optim_close(&ctx, &optim);
    return status;
}

static seqpar_status project(void *call) {
    static int32_t targets[VOCAB_TOKENS];
    static double logp[VOCAB_TOKENS];
    vocab_call *c = call;
    seqpar_vocab_io io = {.hidden = vocab_data[0],
                          .table = vocab_data[1],
                          .targets = targets,
                          .tokens = c->tokens,
                          .values = {.logp = logp},
                          .dhidden = vocab_data[2],
                          .nodes = vocab_data[3],
                          .node_stride = VOCAB * HIDDEN};
    const seqpar_vocab_teacher teacher = {vocab_data[0], vocab_data[1], c->width, 0,
                                          NULL,          NULL,          NULL};
    seqpar_vocab_choices choices = {{0}, c->choices, NULL, NULL};
    const void **const seeds[4] = {&io.seeds.dlogp, &io.seeds.dentropy, &io.seeds.dsmooth,
                                   &io.seeds.dzloss};
    void **const values[4] = {&io.values.logp, &io.values.entropy, &io.values.lse,
                              &io.values.smooth};
    for (int i = 0; i < SEQPAR_MAX_CHOICES; i++) choices.ids[i] = c->choice[i];
    for (int i = 0; c->choices && i < 4; i++) {
        *values[i] = c->keeps[i] ? logp : NULL;
        *seeds[i] = c->keeps[4 + i] ? logp : NULL;
    }
    if (c->choices) io.choices = &choices;
    if (c->width != -2) io.teacher = &teacher;
    if (c->backward) return vocab_backward(c, &io);
    if (!c->nodes) return seqpar_vocab_forward(&ctx, &io, &c->desc);
    if (!c->no_dlogits) io.dlogits = vocab_data[2];
    return seqpar_vocab_nodes(&ctx, &io, NULL, NULL, &c->desc, c->first, c->rows);
}

#define V(member, value) SET(vocab_call, member, value)
#define NODES(first, rows, null) \
    "first is " first " and rows " rows ", of a vocab of 11" null \
    "; give rows within it, and the io->dlogits that seqpar_vocab_backward wrote"
static const vocab_call good_vocab = {.desc = {.hidden = HIDDEN, .vocab = VOCAB},
                                      .tokens = VOCAB_TOKENS,
                                      .rows = 3,
                                      .first = 2,
                                      .pieces = 2,
                                      .width = -2};
#define CHOICES(given) \
    { V(choices, given), V(choice[1], 1), V(choice[2], 10) }
#define CHOICES_ALONE \
    "choices are given with values, seeds or a teacher, which use the whole vocabulary; leave " \
    "those NULL, or the choices"
static seqpar_status no_tile(void *user, const seqpar_token_tile *tile) {
    return user || tile ? SEQPAR_ERR_STEP : SEQPAR_OK;
}

static void check_tiles(void) {
    const seqpar_share no_tokens = {0};
    const seqpar_token_fold no_fold = {0};
    REFUSED(seqpar_token_tiles(world->error, &no_tokens, &no_fold, 0, 1, no_tile, NULL),
            world->error, SEQPAR_ERR_SIZE, "a tile of 0 tokens is asked for; give 1 or more");
    ACCEPTED(seqpar_token_tiles(world->error, &no_tokens, &no_fold, 1, 1, no_tile, NULL),
             world->error);
    test_end("tiles_of_tokens");
}

static const limit vocab_limits[] = {
    {V(choices, 2),
     1,
     SEQPAR_ERR_SIZE,
     "a choice among 1 tokens is asked for; give 2 to 16",
     {V(choice[1], 1)}},
    {V(choices, 0), -1, SEQPAR_ERR_SIZE, "a choice among -1 tokens is asked for; give 2 to 16"},
    {V(choices, 3),
     17,
     SEQPAR_ERR_SIZE,
     "a choice among 17 tokens is asked for; give 2 to 16",
     {V(choice[1], 1), V(choice[2], 10)}},
    {V(choice[0], 0), -1, SEQPAR_ERR_TOKEN_ID,
     "choice 0 is token -1; give ids from 0 to 10, each once", CHOICES(3)},
    {V(choice[2], 10),
     11,
     SEQPAR_ERR_TOKEN_ID,
     "choice 2 is token 11; give ids from 0 to 10, each once",
     {V(choices, 3), V(choice[1], 1)}},
    {V(choice[2], 9),
     0,
     SEQPAR_ERR_TOKEN_ID,
     "choice 2 is token 0, as an earlier choice is; give ids from 0 to 10, each once",
     {V(choices, 3), V(choice[1], 1)}},
    {V(choice[2], 9),
     1,
     SEQPAR_ERR_TOKEN_ID,
     "choice 2 is token 1, as an earlier choice is; give ids from 0 to 10, each once",
     {V(choices, 3), V(choice[1], 1)}},
    {V(keeps[0], 0), 1, SEQPAR_ERR_OPTION, CHOICES_ALONE, CHOICES(3)},
    {V(keeps[1], 0), 1, SEQPAR_ERR_OPTION, CHOICES_ALONE, CHOICES(3)},
    {V(keeps[2], 0), 1, SEQPAR_ERR_OPTION, CHOICES_ALONE, CHOICES(3)},
    {V(keeps[3], 0), 1, SEQPAR_ERR_OPTION, CHOICES_ALONE, CHOICES(3)},
    {V(keeps[4], 0), 1, SEQPAR_ERR_OPTION, CHOICES_ALONE, CHOICES(3)},
    {V(keeps[5], 0), 1, SEQPAR_ERR_OPTION, CHOICES_ALONE, CHOICES(3)},
    {V(keeps[6], 0), 1, SEQPAR_ERR_OPTION, CHOICES_ALONE, CHOICES(3)},
    {V(keeps[7], 0), 1, SEQPAR_ERR_OPTION, CHOICES_ALONE, CHOICES(3)},
    {V(width, -2), 6, SEQPAR_ERR_OPTION, CHOICES_ALONE, CHOICES(3)},
    {V(width, 1), 0, SEQPAR_ERR_SIZE,
     "the teacher's hidden states have width 0; give 1 to 1048576"},
    {V(width, 1048576),
     1048577,
     SEQPAR_ERR_SIZE,
     "the teacher's hidden states have width 1048577; give 1 to 1048576",
     {V(tokens, 0)}},
    {V(desc.hidden, 1), 0, SEQPAR_ERR_SIZE,
     "the vocabulary projection has hidden 0 and vocab 11; both must be positive"},
    {V(desc.vocab, 1), 0, SEQPAR_ERR_SIZE,
     "the vocabulary projection has hidden 6 and vocab 0; both must be positive"},
    {V(desc.hidden, 1048576),
     1048577,
     SEQPAR_ERR_SIZE,
     "the vocabulary projection has hidden 1048577 and vocab 11; at most 1048576 and 16777216 are "
     "possible",
     {V(tokens, 0)}},
    {V(desc.vocab, 16777216),
     16777217,
     SEQPAR_ERR_SIZE,
     "the vocabulary projection has hidden 6 and vocab 16777217; at most 1048576 and 16777216 are "
     "possible",
     {V(tokens, 0)}},
    {V(desc.temperature, 0), -1e-300L, SEQPAR_ERR_OPTION,
     "the temperature of logits is -1e-300; give a number above 0, up to 1e30, or 0 for 1"},
    {V(desc.temperature, 1e30), 1.00001e30L, SEQPAR_ERR_OPTION,
     "the temperature of logits is 1.00001e+30; give a number above 0, up to 1e30, or 0 for 1"},
    {V(desc.temperature, 1), NAN, SEQPAR_ERR_OPTION,
     "the temperature of logits is nan; give a number above 0, up to 1e30, or 0 for 1"},
    {V(first, 0), -1, SEQPAR_ERR_SIZE, NODES("-1", "3", ""), {V(nodes, 1)}},
    {V(first, 8), 9, SEQPAR_ERR_SIZE, NODES("9", "3", ""), {V(nodes, 1)}},
    {V(rows, 1), 0, SEQPAR_ERR_SIZE, NODES("2", "0", ""), {V(nodes, 1)}},
    {V(rows, 9), 10, SEQPAR_ERR_SIZE, NODES("2", "10", ""), {V(nodes, 1)}},
    {V(no_dlogits, 0),
     1,
     SEQPAR_ERR_SIZE,
     NODES("2", "3", ", and dlogits are NULL"),
     {V(nodes, 1)}},
    {V(tokens, 0),
     VOCAB_TOKENS,
     SEQPAR_ERR_SIZE,
     NODES("2", "3", ", and dlogits are NULL"),
     {V(nodes, 1), V(no_dlogits, 1)}},
    {V(no_share, 0),
     1,
     SEQPAR_ERR_STEP,
     "one of share and fold is NULL; give both, or neither for a plain sum of the vocabulary's "
     "gradient over the tokens",
     {V(backward, 1)}},
    {V(no_fold, 0),
     1,
     SEQPAR_ERR_STEP,
     "one of share and fold is NULL; give both, or neither for a plain sum of the vocabulary's "
     "gradient over the tokens",
     {V(backward, 1)}},
    {V(pieces, 2),
     1,
     SEQPAR_ERR_STEP,
     "the share has 1 pieces, the fold wants 2; give the fold that seqpar_step_fold made for this "
     "share",
     {V(backward, 1)}},
    {V(pieces, 2),
     3,
     SEQPAR_ERR_STEP,
     "the share has 3 pieces, the fold wants 2; give the fold that seqpar_step_fold made for this "
     "share",
     {V(backward, 1)}},
};

/* ---- losses ---- */

typedef struct sft_call {
    seqpar_sft_desc desc;
    int64_t tokens;
} sft_call;

static seqpar_status sft(void *call) {
    static const int32_t targets[] = {3, SEQPAR_IGNORE, 5, 1};
    static double seed[3][4];
    const seqpar_host_seeds seeds = {seed[0], seed[1], seed[2]};
    sft_call *c = call;
    return seqpar_sft_seeds(&error, &seeds, targets, NULL, c->tokens, &c->desc);
}

#define T(member, value) SET(sft_call, member, value)
static const sft_call good_sft = {.desc = {.count = 3}, .tokens = 4};
static const limit sft_limits[] = {
    {T(desc.count, 1),
     0,
     SEQPAR_ERR_SEED_COUNT,
     "the step has 0 supervised tokens; a mean needs at least 1",
     {T(tokens, 0)}},
    {T(desc.count, 3), 2, SEQPAR_ERR_SEED_COUNT,
     "count is 2, but this call alone has 3 supervised tokens; give the count of the "
     "whole step (batch.counts.supervised)"},
    {T(desc.label_smoothing, 0), -1e-300L, SEQPAR_ERR_OPTION,
     "label_smoothing -1e-300 must lie in [0, 1) and z_loss 0 must not be negative"},
    {T(desc.label_smoothing, 0.999999), 1, SEQPAR_ERR_OPTION,
     "label_smoothing 1 must lie in [0, 1) and z_loss 0 must not be negative"},
    {T(desc.label_smoothing, 0.5), NAN, SEQPAR_ERR_OPTION,
     "label_smoothing nan must lie in [0, 1) and z_loss 0 must not be negative"},
    {T(desc.z_loss, 0), -1e-300L, SEQPAR_ERR_OPTION,
     "label_smoothing 0 must lie in [0, 1) and z_loss -1e-300 must not be negative"},
    {T(desc.z_loss, 0), NAN, SEQPAR_ERR_OPTION,
     "label_smoothing 0 must lie in [0, 1) and z_loss nan must not be negative"},
};

typedef struct segments_call {
    int64_t segment[2], leaf[2];
} segments_call;

static seqpar_status segments(void *call) {
    static const double value = 1;
    segments_call *c = call;
    seqpar_segments s = {.width = 1};
    double sums[3];
    seqpar_status status = SEQPAR_OK;
    for (int i = 0; i < 2 && !status; i++)
        status = seqpar_segments_push(world->error, &s, c->segment[i], c->leaf[i], &value);
    if (!status) status = seqpar_segments_sum(world, sums, 3, &s);
    seqpar_segments_free(&s);
    return status;
}

#define G(member, value) SET(segments_call, member, value)
static const segments_call good_segments = {{1, 1}, {4, 5}};
static const limit segments_limits[] = {
    {G(segment[0], 0), -1, SEQPAR_ERR_SIZE,
     "a sum is for document -1, but there are 3 documents, counted from 0"},
    {G(segment[1], 2), 3, SEQPAR_ERR_SIZE,
     "a sum is for document 3, but there are 3 documents, counted from 0"},
    {G(leaf[0], 4294967300.0L),
     4294967299.0L,
     SEQPAR_ERR_STEP,
     "the sum of the document 1 was given leaf 4294967299 twice; every cell of a document counts "
     "once, on one rank",
     {G(leaf[1], 4294967299.0L)}},
};

static void check_step_sum(void) {
    static const int64_t leaves[] = {3, 8}, twice[] = {8, 8};
    static const double values[] = {1, 2};
    double sum;
    ACCEPTED(seqpar_sum_pieces(&ctx, &sum, leaves, values, 2, 1), world->error);
    REFUSED(
        seqpar_sum_pieces(&ctx, &sum, twice, values, 2, 1), world->error, SEQPAR_ERR_STEP,
        "the sum of the step was given leaf 8 twice; every cell of a document counts once, on one "
        "rank");
    test_end("sum_of_a_step");
}

typedef struct pair_call {
    seqpar_preference_desc desc;
    seqpar_preference pair;
} pair_call;

static seqpar_status preference(void *call) {
    pair_call *c = call;
    seqpar_pair_result result;
    return seqpar_preference_loss(&error, &result, &c->pair, &c->desc);
}

#define Q(member, value) SET(pair_call, member, value)
static const pair_call good_pair = {.desc = {.beta = 0.1}, .pair = {-3, -4, -3, -5, 2, 3}};
static const limit pair_limits[] = {
    {Q(desc.kind, 0), -1, SEQPAR_ERR_OPTION,
     "preference loss -1 is unknown; SEQPAR_PREFERENCES has 0 to 4"},
    {Q(desc.kind, 4), 5, SEQPAR_ERR_OPTION,
     "preference loss 5 is unknown; SEQPAR_PREFERENCES has 0 to 4"},
    {Q(desc.beta, 1e-300), 0, SEQPAR_ERR_OPTION, "beta is 0; give more than 0, usually 0.1"},
    {Q(desc.beta, 1), NAN, SEQPAR_ERR_OPTION, "beta is nan; give more than 0, usually 0.1"},
    {Q(desc.label_smoothing, 0), -1e-300L, SEQPAR_ERR_OPTION,
     "label_smoothing is -1e-300; it is the fraction of wrong labels, give 0 to 0.5"},
    {Q(desc.label_smoothing, 0.5), 0.500001L, SEQPAR_ERR_OPTION,
     "label_smoothing is 0.500001; it is the fraction of wrong labels, give 0 to 0.5"},
    {Q(desc.label_smoothing, 0.1), NAN, SEQPAR_ERR_OPTION,
     "label_smoothing is nan; it is the fraction of wrong labels, give 0 to 0.5"},
    {Q(desc.label_smoothing, 0.49),
     0.5,
     SEQPAR_ERR_OPTION,
     "label_smoothing is 0.5, where robust would divide by 0; give less than 0.5",
     {Q(desc.kind, SEQPAR_PREFERENCE_ROBUST)}},
    {Q(desc.label_smoothing, 0),
     1e-300L,
     SEQPAR_ERR_OPTION,
     "label_smoothing 1e-300 has no meaning for ipo; set it to 0",
     {Q(desc.kind, SEQPAR_PREFERENCE_IPO)}},
    {Q(desc.nll_coef, 0), -1e-300L, SEQPAR_ERR_OPTION,
     "nll_coef is -1e-300 and nll_tokens 0; neither may be negative"},
    {Q(desc.nll_coef, 0), NAN, SEQPAR_ERR_OPTION,
     "nll_coef is nan and nll_tokens 0; neither may be negative"},
    {Q(desc.nll_tokens, 0), -1, SEQPAR_ERR_OPTION,
     "nll_coef is 0 and nll_tokens -1; neither may be negative"},
    {Q(desc.nll_tokens, 0), NAN, SEQPAR_ERR_OPTION,
     "nll_coef is 0 and nll_tokens nan; neither may be negative"},
    {Q(pair.chosen_tokens, 1), 0, SEQPAR_ERR_NO_TARGET,
     "a pair has 0 chosen and 3 rejected response tokens; both need at least 1"},
    {Q(pair.rejected_tokens, 1), 0, SEQPAR_ERR_NO_TARGET,
     "a pair has 2 chosen and 0 rejected response tokens; both need at least 1"},
};

static seqpar_status kto(void *call) {
    seqpar_kto_result result;
    return seqpar_kto_loss(&error, &result, -3, -4, 1, call);
}

#define K(member, value) SET(seqpar_kto_desc, member, value)
static const seqpar_kto_desc good_kto = {0.01, 1, 1, 0};
static const limit kto_limits[] = {
    {K(beta, 1e-300), 0, SEQPAR_ERR_OPTION, "beta is 0; give more than 0, usually 0.01 to 0.1"},
    {K(beta, 1), NAN, SEQPAR_ERR_OPTION, "beta is nan; give more than 0, usually 0.01 to 0.1"},
    {K(desirable_weight, 0), -1e-300L, SEQPAR_ERR_OPTION,
     "the weights of desirable and undesirable answers are -1e-300 and 1; neither may be negative"},
    {K(undesirable_weight, 0), -1e-300L, SEQPAR_ERR_OPTION,
     "the weights of desirable and undesirable answers are 1 and -1e-300; neither may be negative"},
    {K(desirable_weight, 0), NAN, SEQPAR_ERR_OPTION,
     "the weights of desirable and undesirable answers are nan and 1; neither may be negative"},
    {K(undesirable_weight, 0), NAN, SEQPAR_ERR_OPTION,
     "the weights of desirable and undesirable answers are 1 and nan; neither may be negative"},
    {K(kl, 0), -1e-300L, SEQPAR_ERR_OPTION,
     "kl is -1e-300; give the result of seqpar_kto_kl, which is at least 0"},
    {K(kl, 0), NAN, SEQPAR_ERR_OPTION,
     "kl is nan; give the result of seqpar_kto_kl, which is at least 0"},
};
#include "support/refusals_step.h"
#include "support/refusals_llama.h"

/* ---- transports and threads ---- */

static seqpar_status nothing(seqpar_comm *on, void *user) {
    return (void)on, (void)user, SEQPAR_OK;
}

typedef struct self_call {
    int64_t sends, receives, sent[2], expected[2];
} self_call;

static seqpar_status send_to_self(void *call) {
    static char from[2][8], to[2][8];
    self_call *c = call;
    seqpar_transfer send[2], receive[2];
    seqpar_request request = {0};
    for (int i = 0; i < 2; i++) {
        send[i] = (seqpar_transfer){0, from[i], c->sent[i]};
        receive[i] = (seqpar_transfer){0, to[i], c->expected[i]};
    }
    const seqpar_group group = {"to myself", 4, send, c->sends, receive, c->receives};
    return seqpar_comm_begin(world, &group, NULL, &request);
}

#define C(member, value) SET(self_call, member, value)
static const self_call good_self = {2, 2, {5, 3}, {5, 3}};
static const limit self_limits[] = {
    {C(sends, 2), 1, SEQPAR_ERR_DEADLOCK,
     "'to myself': rank 0 is alone, sends 1 messages and expects 2"},
    {C(receives, 2), 0, SEQPAR_ERR_DEADLOCK,
     "'to myself': rank 0 is alone, sends 2 messages and expects 0"},
    {C(sent[0], 5), 4, SEQPAR_ERR_MESSAGE_SIZE,
     "'to myself': 4 bytes were sent where 5 were expected"},
    {C(expected[1], 3), 2, SEQPAR_ERR_MESSAGE_SIZE,
     "'to myself': 3 bytes were sent where 2 were expected"},
};

static void check_mismatch(void) {
    seqpar_mismatch m = {"ring", "ring", 4, 5, 1, 2, 24, 16};
    REFUSED(seqpar_comm_mismatch(&error, &m), &error, SEQPAR_ERR_STEP,
            "rank 1 is in 'ring' step 4, but rank 2 sent a message of 'ring' step 5; all ranks "
            "must make the same calls in the same order");
    m = (seqpar_mismatch){"ring", "grid", 4, 4, 1, 2, 24, 16};
    REFUSED(seqpar_comm_mismatch(&error, &m), &error, SEQPAR_ERR_STEP,
            "rank 1 is in 'ring' step 4, but rank 2 sent a message of 'grid' step 4; all ranks "
            "must make the same calls in the same order");
    m.sent_name = "ring";
    REFUSED(seqpar_comm_mismatch(&error, &m), &error, SEQPAR_ERR_MESSAGE_SIZE,
            "'ring' step 4: rank 2 sent 16 bytes, rank 1 expects 24");
    test_end("messages_that_differ");
}

static void check_threads(void) {
    ACCEPTED(seqpar_run_threads(1, nothing, NULL, &error), &error);
    ACCEPTED(seqpar_run_threads(2, nothing, NULL, &error), &error);
    REFUSED(seqpar_run_threads(0, nothing, NULL, &error), &error, SEQPAR_ERR_RANKS,
            "0 ranks cannot run as threads of one process; give 1 to 4096");
    REFUSED(seqpar_run_threads(-1, nothing, NULL, &error), &error, SEQPAR_ERR_RANKS,
            "-1 ranks cannot run as threads of one process; give 1 to 4096");
    REFUSED(seqpar_run_threads(4097, nothing, NULL, &error), &error, SEQPAR_ERR_RANKS,
            "4097 ranks cannot run as threads of one process; give 1 to 4096");
    /* a machine may not have so many threads, but it is not the number that is refused */
    test_expect(seqpar_run_threads(4096, nothing, NULL, &error) != SEQPAR_ERR_RANKS, "%s",
                error.text);
    memset(&error, 0, sizeof error);
    test_end("threads");
}

static seqpar_error other_rank;

static seqpar_status wait_for_failed(seqpar_comm *on, void *user) {
    if (on->rank)
        return seqpar_fail(on->error, SEQPAR_ERR_PLAN, "no plan for %d", *(int *)user);
    seqpar_status status = seqpar_comm_barrier(on);
    other_rank = *on->error;
    return status;
}

/* The rank that waits is told who failed and of what. */
static void check_failed_rank(void) {
    int seventeen = 17;
    REFUSED(seqpar_run_threads(2, wait_for_failed, &seventeen, &error), &error, SEQPAR_ERR_PLAN,
            "no plan for 17");
    REFUSED(other_rank.status, &other_rank, SEQPAR_ERR_PEER, "rank 1 failed: no plan for 17");
    test_end("failed_rank");
}

/* ---- what is freed ---- */

/* Freed, it holds nothing, and may be freed again. */
#define FREED(what, free_it) \
    do { \
        static const unsigned char nothing[sizeof(what)]; \
        test_expect(memcmp(&(what), nothing, sizeof nothing) != 0, "%s is empty", #what); \
        free_it; \
        if (test_expect(!memcmp(&(what), nothing, sizeof nothing), "%s holds something", \
                        #what)) \
            free_it; \
    } while (0)

static void check_freed_twice(void) {
    static const int64_t leaves[] = {2, 5, 9}, cu[] = {0, 5};
    static const int32_t ids[] = {1, 3, 2, 6, 4};
    static const double value[] = {4, 7, 1};
    const seqpar_document doc = {.ids = ids, .tokens = 5, .unit = 1};
    const seqpar_pack_desc packing = {.pack_len = 7, .vocab = VOCAB};
    const seqpar_row row = {.tokens = 5, .cell = 2, .docs = 1, .cu_seqlens = cu};
    const seqpar_split_desc cut = {SEQPAR_LAYOUT_ZIGZAG, 1, 0};
    const seqpar_optim_desc adamw = {.kind = SEQPAR_OPTIM_ADAMW};
    const seqpar_tensor tensor = {"weight", 3, 11, 0, 0, 0};
    const seqpar_llama_config config = {.layers = 1,
                                        .hidden = 6,
                                        .heads = 3,
                                        .kv_heads = 1,
                                        .head_dim = 2,
                                        .intermediate = 7,
                                        .vocab = VOCAB};
    seqpar_fold fold;
    seqpar_batch batch;
    seqpar_share share;
    seqpar_plan made;
    seqpar_segments sums = {.width = 3};
    seqpar_buffer buffer;
    seqpar_optim optim = {0};
    seqpar_llama model;
    open_rank(seqpar_device_cpu(1));
    seqpar_fold_init(&fold, leaves, 3);
    ACCEPTED(seqpar_fold_push(&fold, (seqpar_node){5, 0}, SEQPAR_FOLD_LEAF, 0), &error);
    ACCEPTED(seqpar_fold_flush(&fold), &error);
    ACCEPTED(seqpar_pack(&error, &batch, &doc, 1, &packing), &error);
    ACCEPTED(seqpar_split(&error, &share, &row, 1, &cut), &error);
    ACCEPTED(seqpar_plan_make(&error, &made, &good_plan), &error);
    ACCEPTED(seqpar_segments_push(&error, &sums, 0, 4, value), &error);
    ACCEPTED(seqpar_buffer_new(&ctx, &buffer, 40, SEQPAR_MEM_SCRATCH), world->error);
    ACCEPTED(seqpar_optim_open(&ctx, &optim, &tensor, 1, &adamw), world->error);
    ACCEPTED(seqpar_llama_open(&ctx, &model, &config), world->error);
    FREED(fold, seqpar_fold_free(&fold));
    FREED(batch, seqpar_batch_free(&batch));
    FREED(share, seqpar_share_free(&share));
    FREED(made, seqpar_plan_free(&made));
    FREED(sums, seqpar_segments_free(&sums));
    FREED(buffer, seqpar_buffer_free(&ctx, &buffer));
    FREED(optim, seqpar_optim_close(&ctx, &optim));
    FREED(model, seqpar_llama_close(&ctx, &model));
    close_rank();
    test_end("freed_twice");
}

/* ---- contexts and devices ---- */

typedef struct open_call {
    int64_t sp[2]; /* of each rank */
    int storage;   /* of rank 1 */
} open_call;

static seqpar_status open_as_told(seqpar_comm *on, void *user) {
    const open_call *c = user;
    seqpar_device *mine = on->rank && c->storage ? seqpar_device_cpu(1)
                                                 : seqpar_device_reference();
    seqpar_ctx rank;
    seqpar_status status = seqpar_ctx_open(&rank, on, mine, c->sp[on->rank]);
    seqpar_ctx_close(&rank);
    seqpar_device_close(mine);
    return status;
}

static seqpar_status open_two(void *call) {
    return seqpar_run_threads(2, open_as_told, call, &error);
}

#define O(member, value) SET(open_call, member, value)
static const open_call good_open = {{1, 1}};
static const limit open_limits[] = {
    {O(sp[0], 1), 0, SEQPAR_ERR_RANKS, "sequence_parallel_size is 0; give at least 1"},
    {O(sp[0], 2),
     3,
     SEQPAR_ERR_WORLD,
     "world size 2 is not divisible by sequence_parallel_size 3; use a multiple of 3 ranks",
     {O(sp[1], 2)}},
    {O(sp[1], 2),
     1,
     SEQPAR_ERR_STEP,
     "a context: sequence_parallel_size is 1 on rank 1 and 2 on rank 0; give all ranks the same",
     {O(sp[0], 2)}},
    {O(storage, 0), 1, SEQPAR_ERR_STEP,
     "a context: the storage type is 1 on rank 1 and 0 on rank 0; give all ranks the same"},
};

static seqpar_status scale_of_rank(seqpar_comm *on, void *user) {
    const seqpar_attn_desc desc = {
        .heads = 2, .kv_heads = 1, .head_dim = 3, .scale = on->rank ? *(double *)user : 1};
    return attend_as(on, 2, &desc);
}

static void check_agreement(void) {
    double same = 1, other = 1 + 1e-15;
    ACCEPTED(seqpar_run_threads(2, scale_of_rank, &same, &error), &error);
    REFUSED(seqpar_run_threads(2, scale_of_rank, &other, &error), &error, SEQPAR_ERR_STEP,
            "attention: the scales of rank 1 are not those of rank 0; give all ranks the same");
    test_end("ranks_agree");
}

/* Tensors of rank 1, one of which is decayed or turned as on no other rank. */
enum { AGREED = 3 };
typedef struct tensor_call {
    int64_t decayed, turned; /* its number; AGREED: none */
} tensor_call;

static seqpar_status tensors_of_rank(seqpar_comm *on, void *user) {
    static const int64_t rows[AGREED] = {3, 5, 2}, cols[AGREED] = {7, 1, 11};
    const tensor_call *c = user;
    const seqpar_optim_desc sgd = {.kind = SEQPAR_OPTIM_SGD};
    seqpar_tensor t[AGREED] = {{"first"}, {"second"}, {"last"}};
    seqpar_device *mine = seqpar_device_reference();
    seqpar_optim optim = {0};
    seqpar_ctx rank;
    for (int64_t i = 0, at = 0; i < AGREED; at += rows[i] * cols[i], i++) {
        int turned = on->rank == 1 && i == c->turned;
        t[i].rows = turned ? cols[i] : rows[i];
        t[i].cols = turned ? rows[i] : cols[i];
        t[i].offset = at;
        t[i].decay = on->rank == 1 && i == c->decayed;
        t[i].group = i;
    }
    seqpar_status status = seqpar_ctx_open(&rank, on, mine, 1);
    if (!status) status = seqpar_optim_open(&rank, &optim, t, AGREED, &sgd);
    seqpar_optim_close(&rank, &optim);
    seqpar_ctx_close(&rank);
    seqpar_device_close(mine);
    return status;
}

/* Every tensor is compared, the first as the last. */
static void check_tensors_agree(void) {
    for (int64_t i = 0; i < 2 * AGREED; i++) {
        tensor_call c = {AGREED, AGREED};
        ACCEPTED(seqpar_run_threads(2, tensors_of_rank, &c, &error), &error);
        *(i < AGREED ? &c.decayed : &c.turned) = i % AGREED;
        REFUSED(
            seqpar_run_threads(2, tensors_of_rank, &c, &error), &error, SEQPAR_ERR_STEP,
            "an optimizer: the tensors of rank 1 are not those of rank 0; give all ranks the "
            "same");
    }
    test_end("tensors_agree");
}

static seqpar_status open_only(void) {
    seqpar_device *mine = seqpar_device_reference();
    seqpar_ctx rank;
    seqpar_status status = seqpar_ctx_open(&rank, world, mine, 1);
    seqpar_ctx_close(&rank);
    seqpar_device_close(mine);
    return status;
}

static void check_arithmetic(void) {
    static const int roundings[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    world = seqpar_comm_self();
    ACCEPTED(open_only(), world->error);
    for (int i = 0; i < 3; i++) {
        fesetround(roundings[i]);
        seqpar_status status = open_only();
        fesetround(FE_TONEAREST);
        REFUSED(
            status, world->error, SEQPAR_ERR_ARITHMETIC,
            "this process does not round to nearest; call fesetround(FE_TONEAREST) before a "
            "context is opened");
    }
#if defined(__SSE2__)
    static const unsigned flush[] = {0x8000, 0x40}; /* results to 0, operands as 0 */
    for (int i = 0; i < 2; i++) {
        unsigned before = _mm_getcsr();
        _mm_setcsr(before | flush[i]);
        seqpar_status status = open_only();
        _mm_setcsr(before);
        REFUSED(
            status, world->error, SEQPAR_ERR_ARITHMETIC,
            "this process flushes denormal numbers to 0, so its bits differ from those of other "
            "processes; link without -ffast-math and -Ofast, or clear FTZ and DAZ before a "
            "context is opened");
    }
#endif
    seqpar_comm_free(world);
    test_end("arithmetic");
}

static void check_claims(void) {
    seqpar_device *first = seqpar_device_reference(), *second = seqpar_device_reference();
    seqpar_error foreign;
    seqpar_ctx one, two;
    world = seqpar_comm_self();
    ACCEPTED(seqpar_ctx_open(&one, world, first, 1), world->error);
    ACCEPTED(seqpar_ctx_open(&two, world, first, 1), world->error);
    seqpar_ctx_close(&two);
    REFUSED(
        seqpar_ctx_open(&two, world, second, 1), world->error, SEQPAR_ERR_DEVICE,
        "another context is open on this world with a device other than 'reference'; open both "
        "with one device, or close the other context first");
    seqpar_ctx_close(&two);
    seqpar_ctx_close(&one);
    first->error = &foreign;
    first->contexts = 1;
    REFUSED(seqpar_ctx_open(&one, world, first, 1), world->error, SEQPAR_ERR_DEVICE,
            "the device 'reference' belongs to another context that is open; open a device for "
            "each rank");
    seqpar_ctx_close(&one);
    first->error = NULL;
    first->contexts = 0;
#define WITHOUT(operation) \
    { \
        seqpar_device *lacks = seqpar_device_reference(); \
        lacks->operation = NULL; \
        REFUSED(seqpar_ctx_open(&one, world, lacks, 1), world->error, SEQPAR_ERR_DEVICE, \
                "the device 'reference' has no operation " #operation \
                "; set a function for every line of SEQPAR_DEVICE_OPS"); \
        seqpar_ctx_close(&one); \
        seqpar_device_close(lacks); \
    }
    SEQPAR_DEVICE_OPS(WITHOUT)
    seqpar_device_close(first);
    seqpar_device_close(second);
    seqpar_comm_free(world);
    test_end("devices");
}

/* Each of the four functions of a second pool alone. */
static void check_pool(void) {
    seqpar_buffer buffer = {0};
    open_rank(seqpar_device_reference());
    seqpar_device whole = *device;
    for (int missing = 0; missing < 4; missing++) {
        if (missing == 0) device->pool_alloc = NULL;
        if (missing == 1) device->pool_free = NULL;
        if (missing == 2) device->move = NULL;
        if (missing == 3) device->moved = NULL;
        REFUSED(
            seqpar_buffer_new(&ctx, &buffer, 8, SEQPAR_MEM_OFFLOADED), world->error,
            SEQPAR_ERR_DEVICE,
            "the device 'reference' has no second memory pool to offload to; offload nothing, or "
            "use a device that has one");
        device->pool_alloc = whole.pool_alloc;
        device->pool_free = whole.pool_free;
        device->move = whole.move;
        device->moved = whole.moved;
    }
    ACCEPTED(seqpar_buffer_new(&ctx, &buffer, 8, SEQPAR_MEM_OFFLOADED), world->error);
    seqpar_buffer_free(&ctx, &buffer);
    device->pool_path = "build/no/such/folder";
    REFUSED(
        seqpar_buffer_new(&ctx, &buffer, 8, SEQPAR_MEM_OFFLOADED), world->error,
        SEQPAR_ERR_MEMORY,
        "8 bytes to offload cannot be kept in a file in build/no/such/folder: No such file or directory; "
        "give another folder, or none");
    device->pool_path = NULL;
    REFUSED(
        seqpar_buffer_new(&ctx, &buffer, INT64_MAX / 2, SEQPAR_MEM_OFFLOADED), world->error,
        SEQPAR_ERR_MEMORY,
        "out of memory: 4611686018427387903 bytes to offload from device reference (0 are offloaded already)");
    REFUSED(seqpar_buffer_new(&ctx, &buffer, INT64_MAX / 2, SEQPAR_MEM_SCRATCH), world->error,
            SEQPAR_ERR_MEMORY,
            "out of memory: 4611686018427387903 bytes on device reference (0 in use)");
    close_rank();
    test_end("second_pool");
}

/* ---- own kernels ---- */

enum harm {
    GOOD,
    FAILS,
    BAD_OUT,
    BAD_LSE,
    LSE_OF_NOTHING,
    FAILS_BACKWARD,
    BAD_DQ,
    BAD_DK,
    BAD_DV
};

static int own_calls; /* of the block kernel */

static int own_forward(void *user, const seqpar_block *b, void *out, double *lse) {
    own_calls++;
    enum harm harm = *(enum harm *)user;
    double *o = out;
    for (int64_t i = 0; i < b->queries * b->head_dim; i++) o[i] = 0;
    for (int64_t r = 0; r < b->queries; r++) {
        int sees = b->visible_end[r] > b->visible_begin[r];
        lse[r] = sees ? 0 : -HUGE_VAL;
        if (harm == LSE_OF_NOTHING && !sees) lse[r] = 0;
    }
    if (harm == BAD_OUT) o[b->queries * b->head_dim - 1] = NAN;
    if (harm == BAD_LSE) lse[b->queries - 1] = HUGE_VAL;
    return harm == FAILS;
}

static int own_backward(void *user, const seqpar_block *b, void *dq, void *dk, void *dv) {
    enum harm harm = *(enum harm *)user;
    memset(dq, 0, (size_t)(b->queries * b->head_dim) * 8);
    memset(dk, 0, (size_t)(b->keys * b->head_dim) * 8);
    memset(dv, 0, (size_t)(b->keys * b->head_dim) * 8);
    if (harm == BAD_DQ) ((double *)dq)[b->queries * b->head_dim - 1] = NAN;
    if (harm == BAD_DK) ((double *)dk)[b->keys * b->head_dim - 1] = HUGE_VAL;
    if (harm == BAD_DV) ((double *)dv)[b->keys * b->head_dim - 1] = NAN;
    return harm == FAILS_BACKWARD;
}

static void check_own_kernel(void) {
#define OF_BLOCK(what) \
    "the own block kernel " what \
    " (head 0, 5 queries from position 0, 5 keys); its results are discarded"
    static const char *const sentence[] = {
        NULL,
        OF_BLOCK("fails"),
        OF_BLOCK("returns an out that is not finite"),
        OF_BLOCK("returns an lse that is not finite"),
        "the own block kernel returns an lse that is not -inf for a query without keys (head 0, 2 "
        "queries from position 3, 3 keys); its results are discarded",
        OF_BLOCK("fails backward"),
        OF_BLOCK("returns a dq that is not finite"),
        OF_BLOCK("returns a dk or dv that is not finite"),
        OF_BLOCK("returns a dk or dv that is not finite")};
    enum harm harm;
    seqpar_block_kernel kernel = {SEQPAR_DTYPE_F64, own_forward, own_backward, &harm};
    attn_call c = good_attn;
    open_rank(seqpar_device_reference());
    seqpar_device_user_kernel(device, &kernel);
    for (harm = GOOD; harm <= BAD_DV; harm++) {
        c.cell = harm == LSE_OF_NOTHING ? 3 : ATTN_TOKENS;
        c.desc.window = harm == LSE_OF_NOTHING ? 2 : 0;
        c.run = 1;
        seqpar_status status = attend(&c);
        if (sentence[harm])
            REFUSED(status, world->error, SEQPAR_ERR_KERNEL, sentence[harm]);
        else
            ACCEPTED(status, world->error);
    }
    harm = GOOD;
    own_calls = 0;
    c.desc.dropout = 1e-300;
    REFUSED(attend(&c), world->error, SEQPAR_ERR_KERNEL,
            "an own block kernel has no dropout; set it to 0 (it is 1e-300)");
    test_expect(!own_calls, "it is called %d times all the same", own_calls);
    close_rank();
    test_end("own_block_kernel");
}

/* An own product counts in int: each of the four widths alone. */
typedef struct product_call {
    int64_t y, x, w, out;
    int reference;
} product_call;

static void no_product(int order, int transpose_a, int transpose_b, int rows, int columns,
                       int inner, float alpha, const float *a, int a_stride, const float *b,
                       int b_stride, float beta, float *c, int c_stride) {
    (void)order, (void)transpose_a, (void)transpose_b, (void)rows, (void)columns, (void)inner;
    (void)alpha, (void)a, (void)a_stride, (void)b, (void)b_stride, (void)beta, (void)c;
    (void)c_stride;
}

static seqpar_status own_product(void *call) {
    product_call *c = call;
    seqpar_device *on = c->reference ? seqpar_device_reference() : seqpar_device_cpu(1);
    seqpar_matmul_args args = {
        .y = {NULL, c->y}, .x = {NULL, c->x}, .w = {NULL, c->w}, .out = c->out};
    on->error = &error;
    seqpar_device_user_product(on, no_product);
    seqpar_status status = on->matmul(on, &args, NULL);
    seqpar_device_close(on);
    return status;
}

#define M(member, value) SET(product_call, member, value)
#define WIDE             "an own product takes rows of at most 2147483647 elements; these have 2147483648"
static const product_call good_product = {7, 7, 7, 7, 0};
static const limit product_limits[] = {
    {M(y, 2147483647), 2147483648.0L, SEQPAR_ERR_KERNEL, WIDE},
    {M(x, 2147483647), 2147483648.0L, SEQPAR_ERR_KERNEL, WIDE},
    {M(w, 2147483647), 2147483648.0L, SEQPAR_ERR_KERNEL, WIDE},
    {M(out, 2147483647), 2147483648.0L, SEQPAR_ERR_KERNEL, WIDE},
    {M(reference, 0), 1, SEQPAR_ERR_KERNEL,
     "an own product needs fp32 storage, which the device 'reference' does not have; use "
     "seqpar_device_cpu"},
};

/* What no line above meets, and where it is met. */
static const excuse excuses[] = {
    {"%s: %.*s is NULL", "test_null tries every pointer"},
    {"out of memory for", "test_injected refuses every allocation"},
    {"a step could not be set up", "only out of memory: test_injected"},
    {"attention could not be set up", "only out of memory: test_injected"},
    {"token %lld is held by no rank", "no row that is accepted has such a token"},
    {"%lld ranks need threads", "a build without threads, which only test_headers makes"},
    {"files in %.400s cannot be mapped",
     "a build without threads, which only test_headers makes"},
    {"this build fuses products and sums", "a build with -ffp-contract=fast: test_headers"},
    {"the blocks of dk and dv are not those of dq",
     "compared by test_device_attention, which makes such blocks"},
};

static const excuse llama_excuses[] = {
    {"out of memory for", "test_injected refuses every allocation"},
    {"a rank has %lld tokens, each for", "needs 2^31 tokens times experts"},
};

static const excuse file_excuses[] = {
    {"%s: SEQPAR_MALLOC returned NULL", "test_safetensors refuses every allocation"},
};

/* All tests together meet every sentence, so that one alone does not ask. */
static void check_every_sentence(void) {
    test_text = NULL;
    check_all_seen("seqpar.h", "seqpar_fail(", "", excuses, sizeof excuses / sizeof *excuses);
    check_all_seen("seqpar_llama.h", "seqpar_fail(", "", llama_excuses,
                   sizeof llama_excuses / sizeof *llama_excuses);
    see_listed("verify/tests/safetensors_said.txt"); /* of test_safetensors.c */
    check_all_seen("seqpar_safetensors.h", "return seqpar__st_fail(", "%s: ", file_excuses,
                   sizeof file_excuses / sizeof *file_excuses);
    check_all_seen("seqpar_safetensors.h", "return seqpar__st_bad(", "%s: ", NULL, 0);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(TRY_LIMITS("pack", pack, good_pack, &error, pack_limits));
    TEST(TRY_LIMITS("split", split, good_split, &error, split_limits));
    TEST(check_striped());
    TEST(TRY_LIMITS("part", part_rows, good_parting, &error, parting_limits));
    TEST(TRY_LIMITS("plan", plan, good_plan, &error, plan_limits));
    TEST(TRY_LIMITS("attention in one call", attend_whole, good_attn, &error, whole_limits));
    TEST(TRY_LIMITS("sft", sft, good_sft, &error, sft_limits));
    TEST(TRY_LIMITS("preference", preference, good_pair, &error, pair_limits));
    TEST(TRY_LIMITS("kto", kto, good_kto, &error, kto_limits));
    TEST(TRY_LIMITS("contexts", open_two, good_open, &error, open_limits));
    TEST(TRY_LIMITS("own product", own_product, good_product, &error, product_limits));
    open_rank(seqpar_device_reference());
    TEST(TRY_LIMITS("attention", attend, good_attn, world->error, attn_limits));
    TEST(TRY_LIMITS("vocabulary", project, good_vocab, world->error, vocab_limits));
    TEST(check_tiles());
    TEST(TRY_LIMITS("segments", segments, good_segments, world->error, segments_limits));
    TEST(TRY_LIMITS("self", send_to_self, good_self, world->error, self_limits));
    TEST(check_step_sum());
    TEST(check_optimizer());
    TEST(check_llama());
    close_rank();
    TEST(check_replicated());
    TEST(check_own_attention());
    TEST(check_own_kernel());
    TEST(check_mismatch());
    TEST(check_threads());
    TEST(check_failed_rank());
    TEST(check_agreement());
    TEST(check_tensors_agree());
    TEST(check_freed_twice());
    TEST(check_arithmetic());
    TEST(check_claims());
    TEST(check_pool());
    if (!getenv("TEST_ONLY")) check_every_sentence();
    return test_summary();
}
