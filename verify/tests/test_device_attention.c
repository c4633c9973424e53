/* SPDX-License-Identifier: MIT OR Unlicense */
/* Operations of attention on a device, as support/device_ops.h says: on one rank, and what
   ranks do with partial results and with gradients of keys and values. */
#define SEQPAR_IMPLEMENTATION
#include "support/device_ops.h"

/* ---- attention on one rank ---- */

enum { Q, K, V, DOUT, ATTENTION_OUT, LSE, DQ, DK, DV, DELTA };
enum { HEADS = 3, KV_HEADS, HEAD_DIM };

static const int64_t small_cu[][5] = {{0, 5, 6, 6, 17}, {0, 3, 8, 11, 11}},
                     large_cu[][5] = {{0, 211, 212, 293, 307}, {0, 1, 17, 18, 41}};
static seqpar_row attention_rows[2];

static void set_rows(const int64_t cu[][5], int64_t cell) {
    int64_t r;
    for (r = 0; r < 2; r++)
        attention_rows[r] = (seqpar_row){.index = 3 * r,
                                         .tokens = cu[r][4],
                                         .cell = cell + 2 * r,
                                         .docs = 4,
                                         .cu_seqlens = cu[r]};
}

static bench attention_bench(int64_t heads, int64_t kv_heads, int64_t head_dim) {
    int64_t tokens = attention_rows[0].tokens + attention_rows[1].tokens;
    int64_t wide = heads * head_dim, narrow = kv_heads * head_dim;
    bench b = {.size = {tokens, 0, 0, heads, kv_heads, head_dim}};
    add_field(&b, "q", tokens, wide, 0, 1);
    add_field(&b, "k", tokens, narrow, 0, 1);
    add_field(&b, "v", tokens, narrow, 0, 1);
    add_field(&b, "dout", tokens, wide, 0, 1);
    add_field(&b, "out", tokens, wide, 0, 1);
    add_sums(&b, "lse", tokens, heads, 0, 1);
    add_field(&b, "dq", tokens, wide, 0, 1);
    add_field(&b, "dk", tokens, narrow, 0, 1);
    add_field(&b, "dv", tokens, narrow, 0, 1);
    add_sums(&b, "delta", tokens, heads, 0, 1);
    return b;
}

static seqpar_status attend(seqpar_device *device, const bench *b, int backward) {
    seqpar_attn_desc desc = {.heads = b->size[HEADS],
                             .kv_heads = b->size[KV_HEADS],
                             .head_dim = b->size[HEAD_DIM],
                             .full = b->mode};
    const field *f = b->field;
    seqpar_attn_io io = {.q = f[Q].data,
                         .k = f[K].data,
                         .v = f[V].data,
                         .out = f[ATTENTION_OUT].data,
                         .lse = f[LSE].data,
                         .dout = f[DOUT].data,
                         .dq = f[DQ].data,
                         .dk = f[DK].data,
                         .dv = f[DV].data};
    seqpar_comm *self = seqpar_comm_self();
    seqpar_ctx ctx;
    seqpar_attn *attn = NULL;
    seqpar_status status = seqpar_ctx_open(&ctx, self, device, 1);
    if (!status) status = seqpar_attn_open(&ctx, &attn, attention_rows, 2, &desc);
    if (!status) status = seqpar_attn_forward(&ctx, attn, &io);
    if (!status && backward) status = seqpar_attn_backward(&ctx, attn, &io);
    if (attn) seqpar_attn_close(&ctx, attn);
    seqpar_ctx_close(&ctx);
    seqpar_comm_free(self);
    device->error = NULL;
    return status;
}

static seqpar_status call_attention(seqpar_device *device, const bench *b) {
    return attend(device, b, 0);
}

static seqpar_status call_attention_grad(seqpar_device *device, const bench *b) {
    return attend(device, b, 1);
}

static const pass attention_pass = {call_attention, 1 << ATTENTION_OUT | 1 << LSE, 0};
static const pass attention_grad_pass = {
    call_attention_grad, 1 << ATTENTION_OUT | 1 << LSE | 1 << DQ | 1 << DK | 1 << DV, 0};

/* out and lse of slow.h, row after row. */
static void slow_attention_of(const bench *b, double *out, double *lse) {
    int64_t heads = b->size[HEADS], kv_heads = b->size[KV_HEADS], d = b->size[HEAD_DIM];
    int64_t base = 0, r;
    for (r = 0; r < 2; base += attention_rows[r++].tokens) {
        int64_t n = attention_rows[r].tokens;
        slow_shape shape = {n, n, heads, kv_heads, d};
        bool *mask = malloc((size_t)(n * n));
        slow_mask(n, attention_rows[r].docs, attention_rows[r].cu_seqlens, !b->mode, mask);
        slow_attention_real(&shape, mask, b->field[Q].value + base * heads * d,
                            b->field[K].value + base * kv_heads * d,
                            b->field[V].value + base * kv_heads * d, out + base * heads * d,
                            lse + base * heads);
        free(mask);
    }
}

static void check_attention_values(bench *b) {
    double *out = malloc((size_t)(b->size[0] * b->size[HEADS] * (b->size[HEAD_DIM] + 1)) *
                         sizeof *out);
    double *lse = out + b->size[0] * b->size[HEADS] * b->size[HEAD_DIM];
    slow_attention_of(b, out, lse);
    expect_fast(b, &attention_pass);
    expect_values(b, ATTENTION_OUT, out);
    expect_values(b, LSE, lse);
    free(out);
}

/* Small with every derivative by field `in`, then large enough for several tiles; causal and
   full. */
static void check_attention(int in, int gradient) {
    chain c = {attention_pass, attention_grad_pass, ATTENTION_OUT, DOUT, NULL};
    int full;
    for (full = 0; full < 2; full++) {
        bench b;
        set_rows(small_cu, 6);
        b = attention_bench(6, 2, 5);
        b.mode = full;
        if (!gradient || !test_fibers()) check_attention_values(&b);
        if (gradient) expect_derivative(&b, &c, in, gradient, 0);
        bench_free(&b);
        /* the gradients are all of one pass: once full, twice causal */
        if (test_fibers() && gradient && full != (in == K)) continue;
        set_rows(large_cu, full ? 154 : 307);
        b = attention_bench(3, 3 - 2 * full, 7 + 12 * full);
        b.mode = full;
        expect_fast(&b, gradient ? &attention_grad_pass : &attention_pass);
        bench_free(&b);
    }
}

static void check_attn_forward(void) { check_attention(0, 0); }
static void check_attn_backward(void) {
    check_attention(Q, DQ);
    check_attention(K, DK);
    check_attention(V, DV);
}

static seqpar_status call_attn_delta(seqpar_device *device, const bench *b) {
    const field *f = b->field;
    seqpar_attn_delta_args a = {f[DELTA].data, f[DOUT].data,   f[ATTENTION_OUT].data,
                                b->size[0],    b->size[HEADS], b->size[HEAD_DIM]};
    return device->attn_delta(device, &a, device->queue);
}

static void check_attn_delta(void) {
    bench b;
    double *want;
    int64_t i, d = 19;
    set_rows(large_cu, 154);
    b = attention_bench(5, 1, d);
    want = calloc((size_t)(b.size[0] * 5), sizeof *want);
    for (i = 0; i < b.size[0] * 5 * d; i++)
        want[i / d] += b.field[DOUT].value[i] * b.field[ATTENTION_OUT].value[i];
    expect_fast(&b, &(pass){call_attn_delta, 1 << DELTA, 0});
    expect_values(&b, DELTA, want);
    free(want);
    bench_free(&b);
}

enum { SINKS, SINKS_LSE, SINKS_DELTA, DSINKS };
static const seqpar_piece sink_pieces[3] = {
    {.local = 2, .count = 5}, {.local = 0, .count = 2}, {.local = 7, .count = 6}};

static seqpar_status call_attn_sinks(seqpar_device *device, const bench *b) {
    const field *f = b->field;
    seqpar_attn_sinks_args a = {f[DSINKS].data,
                                f[SINKS].data,
                                f[SINKS_LSE].data,
                                f[SINKS_DELTA].data,
                                sink_pieces,
                                3,
                                5};
    return device->attn_sinks(device, &a, device->queue);
}

static void check_attn_sinks(void) {
    bench b;
    double want[15] = {0};
    int64_t i, h, t;
    memset(&b, 0, sizeof b);
    add_sums(&b, "sinks", 1, 5, 0, 1);
    add_sums(&b, "lse", 13, 5, 0, 1);
    add_sums(&b, "delta", 13, 5, 0, 1);
    add_sums(&b, "dsinks", 3, 5, 0, 1);
    for (i = 0; i < 3; i++)
        for (h = 0; h < 5; h++)
            for (t = sink_pieces[i].local; t < sink_pieces[i].local + sink_pieces[i].count; t++)
                want[i * 5 + h] -= exp(b.field[SINKS].value[h] -
                                       b.field[SINKS_LSE].value[t * 5 + h]) *
                                   b.field[SINKS_DELTA].value[t * 5 + h];
    expect_fast(&b, &(pass){call_attn_sinks, 1 << DSINKS, 0});
    expect_values(&b, DSINKS, want);
    bench_free(&b);
}

/* Partial results: a sum and one more, with their lse, and what is written in the end, into 3
   of 5 heads; mode 0 merges, 1 begins with a part, 2 ends with sinks, 3 adds. */
enum { SUM, SUM_LSE, PART, PART_LSE, MERGED, MERGED_LSE, MERGE_SINKS };
enum { MERGE_TOKENS = 11, MERGE_HEADS = 3, MERGE_DIM = 7, MERGE_ROW = MERGE_HEADS * MERGE_DIM };

static seqpar_status call_attn_merge(seqpar_device *device, const bench *b) {
    const field *f = b->field;
    int end = b->mode == 2, add = b->mode == 3;
    seqpar_attn_merge_args a = {.sum = f[SUM].data,
                                .sum_lse = add ? NULL : f[SUM_LSE].data,
                                .part = end ? NULL : f[PART].data,
                                .part_lse = end || add ? NULL : f[PART_LSE].data,
                                .out = end ? f[MERGED].data : NULL,
                                .lse = end ? f[MERGED_LSE].data : NULL,
                                .sinks = end ? f[MERGE_SINKS].data : NULL,
                                .tokens = MERGE_TOKENS,
                                .heads = MERGE_HEADS,
                                .head_dim = MERGE_DIM,
                                .out_heads = 5,
                                .begin = b->mode == 1};
    return device->attn_merge(device, &a, device->queue);
}

/* In row n the sum, or the part, saw no key: its lse is -inf, and its result is not read. */
static void see_nothing(bench *b, int n, int which) {
    b->field[which + 1].value[n] = -HUGE_VAL;
    for (int i = n * MERGE_DIM; i < (n + 1) * MERGE_DIM; i++)
        b->field[which].value[i] = HUGE_VAL;
}

static void check_attn_merge(void) {
    double want[MERGE_TOKENS * MERGE_ROW], lse[MERGE_TOKENS * MERGE_HEADS];
    for (int mode = 0; mode < 4; mode++) {
        bench b;
        memset(&b, 0, sizeof b);
        add_sums(&b, "sum", MERGE_TOKENS, MERGE_ROW, 0, 1);
        add_sums(&b, "sum_lse", MERGE_TOKENS, MERGE_HEADS, 0, 2);
        add_sums(&b, "part", MERGE_TOKENS, MERGE_ROW, 0, 1);
        add_sums(&b, "part_lse", MERGE_TOKENS, MERGE_HEADS, 0, 2);
        add_field(&b, "merged", MERGE_TOKENS, MERGE_ROW, 2 * MERGE_DIM, 1);
        add_sums(&b, "merged_lse", MERGE_TOKENS, MERGE_HEADS, 2, 1);
        add_sums(&b, "sinks", 1, MERGE_HEADS, 0, 1);
        b.mode = mode;
        if (mode == 0) see_nothing(&b, 4, SUM);
        if (mode == 0) see_nothing(&b, 17, PART);
        for (int n = 0; n < MERGE_TOKENS * MERGE_HEADS; n++) {
            double old = mode == 1 ? 0 : exp(b.field[SUM_LSE].value[n]);
            double part = mode == 2 ? 0 : exp(b.field[PART_LSE].value[n]);
            double whole = old + part;
            if (mode == 2) whole += exp(b.field[MERGE_SINKS].value[n % MERGE_HEADS]);
            if (mode == 3) old = part = whole = 1;
            lse[n] = log(whole);
            for (int i = n * MERGE_DIM; i < (n + 1) * MERGE_DIM; i++)
                want[i] = ((old > 0 ? old * b.field[SUM].value[i] : 0) +
                           (part > 0 ? part * b.field[PART].value[i] : 0)) /
                          whole;
        }
        expect_fast(&b, &(pass){call_attn_merge,
                                1 << SUM | (mode < 3 ? 1 << SUM_LSE : 0) |
                                    (mode == 2 ? 1 << MERGED | 1 << MERGED_LSE : 0),
                                0});
        expect_values(&b, SUM, want);
        if (mode < 3) expect_values(&b, SUM_LSE, lse);
        if (mode == 2) expect_values(&b, MERGED, want);
        if (mode == 2) expect_values(&b, MERGED_LSE, lse);
        bench_free(&b);
    }
}

/* Two key pieces of 3 and 5 tokens, kv heads 1 and 2 of 3: what other ranks made of dk, dv,
   and what waits in the store. */
enum { RETURN_DK, RETURN_DV, INBOX, RETURN_STORE };
enum {
    RETURN_HEADS = 2,
    RETURN_DIM = 7,
    RETURN_ROW = RETURN_HEADS * RETURN_DIM,
    RETURN_TOKENS = 9
};

static const int64_t return_count[2] = {3, 5}, return_local[2] = {1, 4},
                     inbox_base[2] = {0, 3 * 2 * 3 * RETURN_ROW},
                     store_base[2] = {4, 3 * 2 * 3 * RETURN_ROW + 11};

static seqpar_status call_attn_return(seqpar_device *device, const bench *b) {
    static const seqpar_fold_op first[] = {{SEQPAR_FOLD_LEAF, 0},    {SEQPAR_FOLD_LEAF, 1},
                                           {SEQPAR_FOLD_COMBINE, 0}, {SEQPAR_FOLD_STORE, 2},
                                           {SEQPAR_FOLD_LEAF, 2},    {SEQPAR_FOLD_LOAD, 2},
                                           {SEQPAR_FOLD_COMBINE, 0}, {SEQPAR_FOLD_LOAD, 0},
                                           {SEQPAR_FOLD_COMBINE, 0}, {SEQPAR_FOLD_FINISH, 0}};
    static const seqpar_fold_op second[] = {{SEQPAR_FOLD_LEAF, 0},    {SEQPAR_FOLD_EXTEND, 1},
                                            {SEQPAR_FOLD_EXTEND, 2},  {SEQPAR_FOLD_LOAD, 1},
                                            {SEQPAR_FOLD_COMBINE, 0}, {SEQPAR_FOLD_FINISH, 0}};
    seqpar_piece pieces[2] = {{.count = return_count[0], .local = return_local[0]},
                              {.count = return_count[1], .local = return_local[1]}};
    seqpar_attn_task tasks[2] = {
        {0, first, 10, store_base[0], 2 * 3 * RETURN_ROW, inbox_base[0]},
        {1, second, 6, store_base[1], 2 * 5 * RETURN_ROW, inbox_base[1]}};
    const field *f = b->field;
    seqpar_attn_args a = {.heads = 6,
                          .kv_heads = 3,
                          .head_dim = RETURN_DIM,
                          .head_begin = 1,
                          .head_count = RETURN_HEADS,
                          .q_pieces = pieces,
                          .tasks = tasks,
                          .task_count = 2,
                          .depth = 3,
                          .dk = f[RETURN_DK].data,
                          .dv = f[RETURN_DV].data,
                          .store = f[RETURN_STORE].data,
                          .inbox = f[INBOX].data};
    return device->attn_return(device, &a, device->queue);
}

/* Element (token t of the piece, head h of the range, i) of one value: for each head dk,
   then dv. */
static double returned(const double *value, int64_t count, int is_v, int64_t t, int64_t h,
                       int64_t i) {
    return value[((h * 2 + is_v) * count + t) * RETURN_DIM + i];
}

static double *plain_return(const bench *b, int is_v) {
    double *want = dense_copy(&b->field[is_v ? RETURN_DV : RETURN_DK],
                              b->field[is_v ? RETURN_DV : RETURN_DK].value);
    int64_t piece, t, h, i, n;
    for (piece = 0; piece < 2; piece++)
        for (t = 0; t < return_count[piece]; t++)
            for (h = 0; h < RETURN_HEADS; h++)
                for (i = 0; i < RETURN_DIM; i++) {
                    int64_t count = return_count[piece], size = 2 * count * RETURN_ROW;
                    double sum = returned(b->field[RETURN_STORE].value + store_base[piece] +
                                              piece * size,
                                          count, is_v, t, h, i);
                    for (n = 0; n < 3; n++)
                        sum += returned(b->field[INBOX].value + inbox_base[piece] + n * size,
                                        count, is_v, t, h, i);
                    want[((return_local[piece] + t) * 3 + 1 + h) * RETURN_DIM + i] = sum;
                }
    return want;
}

static void check_attn_return(void) {
    bench b = {0};
    int is_v;
    add_field(&b, "dk", RETURN_TOKENS, 3 * RETURN_DIM, 0, 1);
    add_field(&b, "dv", RETURN_TOKENS, 3 * RETURN_DIM, 0, 1);
    add_sums(&b, "inbox", 1, inbox_base[1] + 3 * 2 * 5 * RETURN_ROW, 0, 1);
    add_sums(&b, "store", 1, store_base[1] + 2 * 2 * 5 * RETURN_ROW, 0, 1);
    expect_fast(&b,
                &(pass){call_attn_return, 1 << RETURN_DK | 1 << RETURN_DV | 1 << RETURN_STORE,
                        1 << RETURN_STORE});
    for (is_v = 0; is_v < 2; is_v++) {
        double *want = plain_return(&b, is_v);
        expect_values(&b, is_v ? RETURN_DV : RETURN_DK, want);
        free(want);
    }
    bench_free(&b);
}

/* ---- blocks of a backward pass ---- */

/* A block of dq that is none of dk and dv, one the other way round, or two in another order,
   would be waited for without end. */
__attribute__((unused)) static void test_backward_blocks(void) {
    enum { BLOCKS = 2 };
    const seqpar_piece pieces[2 * BLOCKS] = {
        {.count = 1}, {.count = 1, .local = 1}, {.count = 1}, {.count = 1, .local = 1}};
    const seqpar_attn_keys keys[BLOCKS] = {
        {.stride = 1, .count = 1},
        {.k_row = 1, .v_row = 1, .start = 1, .stride = 1, .count = 1}};
    const int32_t begin[BLOCKS] = {0, 0}, end[BLOCKS] = {2, 2};
    const float x[BLOCKS] = {1, 2};
    float out[3][BLOCKS] = {{0}};
    const seqpar_fold_op both[] = {
        {SEQPAR_FOLD_LEAF, 0}, {SEQPAR_FOLD_EXTEND, 1}, {SEQPAR_FOLD_FINISH, 0}};
    const seqpar_fold_op first[] = {{SEQPAR_FOLD_LEAF, 0}, {SEQPAR_FOLD_FINISH, 0}};
    int wrong;
    for (wrong = 0; wrong < 5; wrong++) {
        seqpar_attn_task queries[BLOCKS] = {{.piece = 0, .program = both, .program_count = 3},
                                            {.piece = 1, .program = both, .program_count = 3}};
        seqpar_attn_task swapped[BLOCKS] = {queries[0], queries[1]};
        seqpar_attn_args a = {.heads = 1,
                              .kv_heads = 1,
                              .head_dim = 1,
                              .head_count = 1,
                              .q_tokens = BLOCKS,
                              .scale = 1,
                              .q_pieces = pieces,
                              .k_pieces = keys,
                              .tasks = queries,
                              .task_count = BLOCKS,
                              .depth = 2,
                              .visible_begin = begin,
                              .visible_end = end,
                              .q = x,
                              .k = x,
                              .v = x,
                              .lse = out[0],
                              .dout = x,
                              .delta = x,
                              .dq = out[0],
                              .dk = out[1],
                              .dv = out[2]};
        seqpar_attn_args dkv = a;
        seqpar_attn_backward_args args = {a, &dkv, 1};
        seqpar_device *device = seqpar_device_cpu(2);
        seqpar_error error = {0};
        seqpar_status status;
        device->error = &error;
        dkv.tasks = swapped;
        swapped[0].order = wrong == 1;
        swapped[1].order = wrong != 1;
        if (wrong == 2) {
            swapped[1].program = first;
            swapped[1].program_count = 2;
        }
        if (wrong == 3) {
            queries[1].program = first;
            queries[1].program_count = 2;
        }
        if (wrong == 4) args.queries.task_count = 1;
        if (wrong == 1) {
            swapped[0].program = first;
            swapped[0].program_count = 2;
        }
        status = device->attn_backward(device, &args, NULL);
        test_expect(status == (wrong ? SEQPAR_ERR_PLAN : SEQPAR_OK), "wrong %d: %s: %s", wrong,
                    seqpar_status_name(status), error.text);
        test_expect(!strcmp(error.text, wrong
                                            ? "the blocks of dk and dv are not those of dq in "
                                              "the same order"
                                            : ""),
                    "wrong %d: '%s'", wrong, error.text);
        seqpar_device_close(device);
    }
    test_end("attn_backward_blocks");
}

/* The backward operation reads an `out` that was rounded: two roundings to bf16. */
static const op_check checks[] = {
    {"attn_forward", check_attn_forward, 6e-7, 1},
    {"attn_backward", check_attn_backward, 1.1e-6, 2},
    {"attn_return", check_attn_return, 1.4e-7, 1},
    {"attn_delta", check_attn_delta, 1.9e-7, 1},
    {"attn_sinks", check_attn_sinks, 6e-7, 1},
    {"attn_merge", check_attn_merge, 6e-7, 1},
};

int main(int argc, char **argv) {
    test_begin(argc, argv);
    device_open(checks, sizeof checks / sizeof *checks);
#define X(op) TEST(test_op(#op, OP_##op));
    ATTENTION_OPS(X)
#undef X
    device_close();
#ifndef TEST_CUDA /* it is the CPU device's */
    TEST(test_backward_blocks());
#endif
    return test_summary();
}
