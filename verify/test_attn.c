/* SPDX-License-Identifier: MIT OR Unlicense */
/* Attention over ranks: the bits of one rank in every grid layout, the truth of slow.h, the error rule for stripe. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "slow.h"
#include "test.h"

typedef struct problem {
    int64_t heads, kv_heads, head_dim, row_count;
    seqpar_row rows[3];
    int64_t tokens;                    /* of all rows */
    int64_t cu[3][16];
    double *q, *k, *v, *dout;          /* global, row after row */
} problem;

typedef struct setup { /* one way to run it */
    const problem *p;
    int reference, layout, schedule, full;
    int64_t ranks, stride, threads;
    const seqpar_inject_desc *inject;
    double *out, *lse, *dq, *dk, *dv;  /* global results */
    int64_t flops, planned_flops, bytes, planned_bytes, flops_max;
    seqpar_status status;
} setup;

static double *random_values(int64_t count) {
    double *x = malloc((size_t)(count + 1) * sizeof *x);
    int64_t i;
    for (i = 0; i < count; i++) x[i] = (double)(float)test_normal(); /* exact in fp32 as well */
    return x;
}

static problem *problem_new(int64_t rows, const int64_t *lengths, const int64_t *chunks, int64_t heads, int64_t kv_heads, int64_t head_dim) {
    problem *p = calloc(1, sizeof *p);
    int64_t r, d, at;
    p->heads = heads; p->kv_heads = kv_heads; p->head_dim = head_dim; p->row_count = rows;
    for (r = 0; r < rows; r++) {
        seqpar_row *row = &p->rows[r];
        row->index = r * 2; /* numbers need not be neighbours */
        row->tokens = row->padded = lengths[r];
        row->chunks = chunks[r];
        p->cu[r][0] = 0;
        for (d = 0, at = 0; at < lengths[r] && d < 14; d++) {
            int64_t n = d == 1 ? 1 : d == 2 ? 0 : test_integer(1, lengths[r] / 2 + 1); /* one-token and empty documents */
            at = d == 13 || at + n > lengths[r] ? lengths[r] : at + n;
            p->cu[r][d + 1] = at;
        }
        row->docs = d;
        row->cu_seqlens = p->cu[r];
        p->tokens += lengths[r];
    }
    p->q = random_values(p->tokens * heads * head_dim);
    p->dout = random_values(p->tokens * heads * head_dim);
    p->k = random_values(p->tokens * kv_heads * head_dim);
    p->v = random_values(p->tokens * kv_heads * head_dim);
    return p;
}

static void problem_free(problem *p) { free(p->q); free(p->k); free(p->v); free(p->dout); free(p); }

static void setup_results(setup *s) {
    const problem *p = s->p;
    s->out = random_values(p->tokens * p->heads * p->head_dim);
    s->dq = random_values(p->tokens * p->heads * p->head_dim);
    s->lse = random_values(p->tokens * p->heads);
    s->dk = random_values(p->tokens * p->kv_heads * p->head_dim);
    s->dv = random_values(p->tokens * p->kv_heads * p->head_dim);
}
static void setup_free(setup *s) { free(s->out); free(s->lse); free(s->dq); free(s->dk); free(s->dv); }

/* Moves the local rows of a global tensor to the device, or back. */
static void move_rows(seqpar_ctx *ctx, const setup *s, const seqpar_share *share, void *local, double *global, int64_t width, int to_device) {
    int64_t i, t, r, base = 0;
    for (r = 0; r < s->p->row_count; base += s->p->rows[r++].tokens)
        for (i = 0; i < share->count; i++)
            for (t = 0; share->pieces[i].row == r && t < share->pieces[i].count; t++) {
                const seqpar_piece *p = &share->pieces[i];
                double *g = global + (base + p->start + t * p->stride) * width;
                if (to_device) seqpar_device_write(ctx->device, local, (p->local + t) * width, g, width);
                else seqpar_device_read(ctx->device, g, local, (p->local + t) * width, width);
            }
}

static seqpar_status rank_attention(seqpar_ctx *ctx, setup *s) {
    const problem *p = s->p;
    seqpar_attn_desc desc = {.heads = p->heads, .kv_heads = p->kv_heads, .head_dim = p->head_dim, .layout = s->layout, .schedule = s->schedule,
                             .heads_k_stride = s->stride, .full = s->full};
    seqpar_attn *attn;
    seqpar_attn_cost cost;
    int64_t size = seqpar_dtype_bytes(ctx->device->storage), n, wide = p->heads * p->head_dim, narrow = p->kv_heads * p->head_dim, i;
    seqpar_status status = seqpar_attn_open(ctx, &attn, p->rows, p->row_count, &desc);
    void *buffer[9];
    if (status) return status;
    n = seqpar_attn_share(attn)->tokens;
    for (i = 0; i < 9; i++) buffer[i] = ctx->device->alloc(ctx->device, (n + 1) * (wide + 1) * size);
    move_rows(ctx, s, seqpar_attn_share(attn), buffer[0], p->q, wide, 1);
    move_rows(ctx, s, seqpar_attn_share(attn), buffer[1], p->k, narrow, 1);
    move_rows(ctx, s, seqpar_attn_share(attn), buffer[2], p->v, narrow, 1);
    move_rows(ctx, s, seqpar_attn_share(attn), buffer[3], p->dout, wide, 1);
    ctx->sp->bytes_sent = 0;
    status = seqpar_attn_forward(ctx, attn, buffer[4], buffer[5], buffer[0], buffer[1], buffer[2]);
    if (!status) status = seqpar_attn_backward(ctx, attn, buffer[6], buffer[7], buffer[8], buffer[3], buffer[4], buffer[5], buffer[0], buffer[1], buffer[2]);
    if (!status) {
        seqpar_attn_cost_of(ctx, attn, &cost, NULL);
        __atomic_fetch_add(&s->flops, ctx->device->attn_flops, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&s->planned_flops, cost.forward_flops + cost.backward_flops, __ATOMIC_SEQ_CST);
        if (ctx->device->attn_flops != cost.forward_flops + cost.backward_flops || ctx->sp->bytes_sent != cost.forward_bytes + cost.backward_bytes)
            status = seqpar_fail(ctx->error, SEQPAR_ERR_OPTION, "rank %lld: computed %lld FLOPs and sent %lld bytes, the plan says %lld and %lld", (long long)ctx->sp_rank,
                                 (long long)ctx->device->attn_flops, (long long)ctx->sp->bytes_sent, (long long)(cost.forward_flops + cost.backward_flops), (long long)(cost.forward_bytes + cost.backward_bytes));
        move_rows(ctx, s, seqpar_attn_share(attn), buffer[4], s->out, wide, 0);
        move_rows(ctx, s, seqpar_attn_share(attn), buffer[5], s->lse, p->heads, 0);
        move_rows(ctx, s, seqpar_attn_share(attn), buffer[6], s->dq, wide, 0);
        move_rows(ctx, s, seqpar_attn_share(attn), buffer[7], s->dk, narrow, 0);
        move_rows(ctx, s, seqpar_attn_share(attn), buffer[8], s->dv, narrow, 0);
    }
    for (i = 0; i < 9; i++) ctx->device->free(ctx->device, buffer[i]);
    seqpar_attn_close(ctx, attn);
    return status;
}

static seqpar_status rank_main(seqpar_comm *world, void *user) {
    setup *s = user;
    seqpar_device *device = s->reference ? seqpar_device_reference() : seqpar_device_cpu(s->threads);
    seqpar_ctx ctx;
    seqpar_comm *wrapped = s->inject ? seqpar_comm_inject(world, s->inject) : world;
    seqpar_status status = seqpar_ctx_open(&ctx, wrapped, device, s->ranks);
    if (!status) status = rank_attention(&ctx, s);
    seqpar_ctx_close(&ctx);
    if (s->inject) seqpar_comm_free(wrapped);
    seqpar_device_close(device);
    return status;
}

static void setup_run(setup *s) {
    seqpar_error error;
    setup_results(s);
    s->status = seqpar_run_threads(s->ranks, rank_main, s, &error);
    test_expect(!s->status, "%s: %s", seqpar_status_name(s->status), error.text);
}

static int same(const double *a, const double *b, int64_t n) { return !memcmp(a, b, (size_t)n * sizeof *a); }

static void expect_same_bits(const setup *a, const setup *b, const char *what) {
    const problem *p = a->p;
    int64_t wide = p->tokens * p->heads * p->head_dim, narrow = p->tokens * p->kv_heads * p->head_dim;
    test_expect(same(a->out, b->out, wide), "%s: out differs", what);
    test_expect(same(a->lse, b->lse, p->tokens * p->heads), "%s: lse differs", what);
    test_expect(same(a->dq, b->dq, wide), "%s: dq differs", what);
    test_expect(same(a->dk, b->dk, narrow), "%s: dk differs", what);
    test_expect(same(a->dv, b->dv, narrow), "%s: dv differs", what);
}

/* Truth: dense attention row by row. */
static void expect_truth(const setup *s, double limit, const char *what) {
    const problem *p = s->p;
    int64_t r, base = 0, d = p->head_dim;
    for (r = 0; r < p->row_count; base += p->rows[r++].tokens) {
        int64_t n = p->rows[r].tokens, wide = p->heads * d, narrow = p->kv_heads * d;
        slow_shape shape = {n, n, p->heads, p->kv_heads, d};
        bool *mask = malloc((size_t)(n * n));
        double *x = malloc((size_t)(5 * n * wide + 8) * sizeof *x), *out = x, *lse = out + n * wide, *dq = lse + n * wide, *dk = dq + n * wide, *dv = dk + n * wide;
        slow_mask(n, p->rows[r].docs, p->rows[r].cu_seqlens, !s->full, mask);
        slow_attention_real(&shape, mask, p->q + base * wide, p->k + base * narrow, p->v + base * narrow, out, lse);
        slow_attention_gradient(&shape, mask, p->q + base * wide, p->k + base * narrow, p->v + base * narrow, p->dout + base * wide, dq, dk, dv);
        test_expect(test_distance(s->out + base * wide, out, n * wide) <= limit, "%s: out is %.2e off", what, test_distance(s->out + base * wide, out, n * wide));
        test_expect(test_distance(s->lse + base * p->heads, lse, n * p->heads) <= limit, "%s: lse is %.2e off", what, test_distance(s->lse + base * p->heads, lse, n * p->heads));
        test_expect(test_distance(s->dq + base * wide, dq, n * wide) <= limit, "%s: dq is %.2e off", what, test_distance(s->dq + base * wide, dq, n * wide));
        test_expect(test_distance(s->dk + base * narrow, dk, n * narrow) <= limit, "%s: dk is %.2e off", what, test_distance(s->dk + base * narrow, dk, n * narrow));
        test_expect(test_distance(s->dv + base * narrow, dv, n * narrow) <= limit, "%s: dv is %.2e off", what, test_distance(s->dv + base * narrow, dv, n * narrow));
        free(mask);
        free(x);
    }
}

static const int64_t ranks_list[] = {1, 2, 3, 4, 5, 8};

/* Every grid layout and schedule at every P against P = 1. */
static void test_bits(int reference) {
    static const int64_t lengths[] = {97, 53, 5}, chunks[] = {13, 32, 4};
    problem *p = problem_new(3, lengths, chunks, 6, 2, 10);
    int full, layout, schedule;
    size_t i;
    for (full = 0; full < 2; full++) {
        setup one = {.p = p, .reference = reference, .ranks = 1, .threads = 1, .full = full};
        setup_run(&one);
        for (layout = SEQPAR_CONTIGUOUS; layout <= SEQPAR_ZIGZAG; layout++)
            for (schedule = SEQPAR_RING; schedule <= SEQPAR_LLAMA3; schedule++) {
                for (i = 0; i < sizeof ranks_list / sizeof *ranks_list; i++) {
                    setup s = {.p = p, .reference = reference, .ranks = ranks_list[i], .threads = 1 + (int64_t)(i % 2), .full = full, .layout = layout, .schedule = schedule, .stride = 1 + (int64_t)(i % 2)};
                    char what[64];
                    setup_run(&s);
                    snprintf(what, sizeof what, "P=%lld", (long long)s.ranks);
                    expect_same_bits(&s, &one, what);
                    setup_free(&s);
                }
                test_end("attn_%s_%s_%s_%s_bits", reference ? "fp64" : "fp32", full ? "full" : "causal", seqpar_layout_name(layout), seqpar_schedule_name(schedule));
            }
        setup_free(&one);
    }
    problem_free(p);
}

static void test_truth(int reference) {
    static const int64_t lengths[] = {29, 17}, chunks[] = {7, 3};
    problem *p = problem_new(2, lengths, chunks, 3, 3, 5), *g = problem_new(2, lengths, chunks, 6, 2, 4);
    int layout, schedule;
    int64_t ranks;
    for (layout = 0; layout < SEQPAR__LAYOUTS; layout++)
        for (schedule = 0; schedule < SEQPAR__SCHEDULES; schedule++) {
            for (ranks = 1; ranks <= 4; ranks++) {
                setup s = {.p = ranks % 2 ? g : p, .reference = reference, .ranks = ranks, .threads = 1, .layout = layout, .schedule = schedule, .full = ranks == 2};
                setup_run(&s);
                expect_truth(&s, reference ? 1e-13 : 2e-6, "against slow.h");
                setup_free(&s);
            }
            test_end("attn_%s_%s_%s_truth", reference ? "fp64" : "fp32", seqpar_layout_name(layout), seqpar_schedule_name(schedule));
        }
    problem_free(p);
    problem_free(g);
}

/* T01: scores of neighbouring chunks far apart, so that one side of a merge vanishes or both are alike. */
static void test_gaps(int reference) {
    static const int64_t lengths[] = {31}, chunks[] = {8};
    static const double gaps[] = {0, 20, 90, 1e4};
    size_t g;
    int64_t i;
    for (g = 0; g < sizeof gaps / sizeof *gaps; g++) {
        problem *p = problem_new(1, lengths, chunks, 2, 1, 6);
        setup s = {.p = p, .reference = reference, .ranks = 3, .threads = 1, .layout = SEQPAR_ZIGZAG, .full = 1};
        p->rows[0].docs = 1;
        p->cu[0][1] = 31;
        for (i = 0; i < 31; i++) p->k[i * 6] = (i / 4 % 2 ? 1.0 : -1.0) * gaps[g]; /* a whole chunk up, the next down */
        for (i = 0; i < 31 * 2; i++) p->q[i * 6] = (double)(float)(i % 3 - 1);
        setup_run(&s);
        /* a score of size g is rounded by g eps, and so is the logarithm of every weight */
        expect_truth(&s, reference ? 1e-13 + gaps[g] * 1e-15 : 2e-6 + gaps[g] * 1e-7, "against slow.h");
        setup_free(&s);
        problem_free(p);
    }
    test_end("attn_%s_merge_gaps", reference ? "fp64" : "fp32");
}

/* T07: every length from 1 to 4P+1, so that ranks are empty, chunks hold one token, and nothing divides. */
static void test_lengths(int64_t ranks) {
    int64_t length, chunks;
    int layout;
    for (length = 1; length <= 4 * ranks + 1; length++)
        for (layout = 0; layout < SEQPAR__LAYOUTS; layout++) {
            problem *p;
            setup s, one;
            chunks = length % 3 ? length : 2 * ranks;
            p = problem_new(1, &length, &chunks, 2, 1, 4);
            memset(&s, 0, sizeof s);
            s.p = p; s.ranks = 1; s.threads = 1;
            one = s;
            s.ranks = ranks; s.layout = layout; s.schedule = (int)(length % 2);
            setup_run(&one);
            setup_run(&s);
            if (layout != SEQPAR_STRIPE) expect_same_bits(&s, &one, "length sweep");
            expect_truth(&s, 3e-6, "against slow.h");
            setup_free(&s);
            setup_free(&one);
            problem_free(p);
        }
    test_end("attn_lengths_1_to_%lld P=%lld", (long long)(4 * ranks + 1), (long long)ranks);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    test_state += test_seed;
    test_truth(1);
    test_truth(0);
    test_gaps(1);
    test_gaps(0);
    test_lengths(3);
    test_lengths(5);
    test_bits(1);
    test_bits(0);
    return test_summary();
}
