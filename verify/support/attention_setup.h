/* SPDX-License-Identifier: MIT OR Unlicense */
/* Runs one attention, forward and backward, with any desc: copies the rows' numbers to the
   ranks' devices, and the results back into global arrays, laid out as those of one rank. */
#ifndef ATTENTION_SETUP_H
#define ATTENTION_SETUP_H
#include "seqpar_check.h"
#include "inject.h"
#include "test.h"

typedef struct problem {
    int64_t heads, kv_heads, head_dim, row_count;
    seqpar_row rows[3];
    int64_t tokens; /* of all rows */
    int64_t cu[3][32], prefix[3][32], source[3][32];
    double sinks[8];
    double *q, *k, *v, *dout; /* global, row after row */
} problem;

typedef struct features { /* what the mask and the scores can be */
    const char *name;
    int full;
    int64_t window;
    int prefix, sinks;
    double softcap, dropout, scale;
} features;

typedef struct setup { /* one way to run it */
    problem *p;
    features f;
    int reference, layout, schedule;
    int64_t ranks, stride, threads, ulysses;
    int replicate, relaxed;
    const seqpar_inject_desc *inject;
    const seqpar_block_kernel *own;
    const seqpar_attn_kernel *kernel;
    int packed; /* 1: q, k, v in one tensor, dq, dk, dv in another; 2: dk_stride is too small */
    double *out, *lse, *dq, *dk, *dv; /* global results */
    /* (ranks, tokens, heads): a cell's dsinks lie at its first token; at last rank 0's part has
       the sums over ranks */
    double *dsinks;
    int64_t flops, planned_flops, bytes, planned_bytes, flops_max;
    seqpar_status status;
} setup;

static double *random_values(int64_t count) {
    double *x = malloc((size_t)(count + 1) * sizeof *x);
    int64_t i;
    for (i = 0; i < count; i++) x[i] = (double)(float)test_normal(); /* exact in fp32 as well */
    return x;
}

static void round_problem(problem *p) { /* to numbers of bf16 */
    double *const tensor[] = {p->q, p->k, p->v, p->dout};
    int i;
    int64_t n;
    for (i = 0; i < 4; i++)
        for (n = 0; n < p->tokens * (i % 3 ? p->kv_heads : p->heads) * p->head_dim; n++)
            tensor[i][n] = (double)seqpar_bf16_to_float(
                seqpar_bf16_from_float((float)tensor[i][n]));
}

static void problem_free(problem *p) {
    free(p->q);
    free(p->k);
    free(p->v);
    free(p->dout);
    free(p);
}

static int64_t dsinks_size(const problem *p) { return p->tokens * p->heads; }

/* Where those of a row begin. */
static int64_t dsinks_begin(const problem *p, int64_t row) {
    int64_t tokens = 0;
    for (int64_t r = 0; r < row; r++) tokens += p->rows[r].tokens;
    return tokens * p->heads;
}

static void setup_results(setup *s) {
    const problem *p = s->p;
    s->out = random_values(p->tokens * p->heads * p->head_dim);
    s->dq = random_values(p->tokens * p->heads * p->head_dim);
    s->lse = random_values(p->tokens * p->heads);
    s->dk = random_values(p->tokens * p->kv_heads * p->head_dim);
    s->dv = random_values(p->tokens * p->kv_heads * p->head_dim);
    s->dsinks = calloc((size_t)(16 * dsinks_size(p)), sizeof(double));
}

static void setup_free(setup *s) {
    free(s->out);
    free(s->lse);
    free(s->dq);
    free(s->dk);
    free(s->dv);
    free(s->dsinks);
}

enum { DROPOUT_SEED = 7, DROPOUT_STREAM = 11 };

/* Moves the local rows of a global tensor to the device, or back. */
static void move_rows(seqpar_ctx *ctx, const setup *s, const seqpar_share *share, void *local,
                      double *global, int64_t width, int dtype, int to_device) {
    int64_t i, t, r, base = 0;
    for (r = 0; r < s->p->row_count; base += s->p->rows[r++].tokens)
        for (i = 0; i < share->count; i++)
            for (t = 0; share->pieces[i].row == r && t < share->pieces[i].count; t++) {
                const seqpar_piece *p = &share->pieces[i];
                double *g = global + (base + p->start + t * p->stride) * width;
                if (to_device)
                    seqpar_device_write(ctx->device, local, (p->local + t) * width, g, width,
                                        dtype);
                else
                    seqpar_device_read(ctx->device, g, local, (p->local + t) * width, width,
                                       dtype);
            }
}

static seqpar_attn_desc setup_desc(const setup *s) {
    const problem *p = s->p;
    return (seqpar_attn_desc){.heads = p->heads,
                              .kv_heads = p->kv_heads,
                              .head_dim = p->head_dim,
                              .layout = s->layout,
                              .schedule = s->schedule,
                              .heads_k_stride = s->stride,
                              .full = s->f.full,
                              .window = s->f.window,
                              .softcap = s->f.softcap,
                              .dropout = s->f.dropout,
                              .scale = s->f.scale,
                              .ulysses_size = s->ulysses,
                              .ulysses_replicate = s->replicate,
                              .relaxed = s->relaxed,
                              .kernel = s->kernel};
}

/* One rank's part of the attention. Beside the results, the FLOPs and the bytes sent must be
   those that the plan says. */
static seqpar_status rank_attention(seqpar_ctx *ctx, setup *s) {
    const problem *p = s->p;
    const seqpar_attn_desc desc = setup_desc(s);
    seqpar_attn *attn;
    seqpar_attn_cost cost;
    int type = ctx->device->storage, sum = ctx->device->accumulator;
    int64_t size = seqpar_dtype_bytes(sum), n, wide = p->heads * p->head_dim;
    int64_t narrow = p->kv_heads * p->head_dim, i;
    seqpar_status status = seqpar_attn_open(ctx, &attn, p->rows, p->row_count, &desc);
    void *buffer[11];
    if (status) return status;
    n = seqpar_attn_share(attn)->tokens + seqpar_attn_share(attn)->count;
    for (i = 0; i < 11; i++)
        buffer[i] = ctx->device->alloc(ctx->device, (n + 1) * (wide + 1) * size);
    move_rows(ctx, s, seqpar_attn_share(attn), buffer[0], p->q, wide, type, 1);
    move_rows(ctx, s, seqpar_attn_share(attn), buffer[1], p->k, narrow, type, 1);
    move_rows(ctx, s, seqpar_attn_share(attn), buffer[2], p->v, narrow, type, 1);
    move_rows(ctx, s, seqpar_attn_share(attn), buffer[3], p->dout, wide, type, 1);
    seqpar_device_write(ctx->device, buffer[9], 0, p->sinks, p->heads, sum);
    ctx->sp->bytes_sent = 0;
    seqpar_attn_io io = {.dropout_seed = DROPOUT_SEED,
                         .dropout_stream = DROPOUT_STREAM,
                         .sinks = s->f.sinks ? buffer[9] : NULL,
                         .dsinks = s->f.sinks ? buffer[10] : NULL,
                         .q = buffer[0],
                         .k = buffer[1],
                         .v = buffer[2],
                         .out = buffer[4],
                         .lse = buffer[5],
                         .dout = buffer[3],
                         .dq = buffer[6],
                         .dk = buffer[7],
                         .dv = buffer[8]};
    char *one = NULL, *packed[6];
    int64_t row = (wide + 2 * narrow) * seqpar_dtype_bytes(type);
    if (s->packed) { /* a tensor of q, k, v and one of dq, dk, dv, spare rows behind each */
        one = ctx->device->alloc(ctx->device, 2 * (n + 2) * row + 1);
        for (i = 0; i < 6; i++)
            packed[i] = one + i / 3 * (n + 2) * row +
                        (i % 3 ? wide + (i % 3 - 1) * narrow : 0) * seqpar_dtype_bytes(type);
        for (i = 0; i < 3; i++)
            ctx->device->copy_rows(ctx->device, packed[i], row, buffer[i],
                                   (i ? narrow : wide) * seqpar_dtype_bytes(type),
                                   (i ? narrow : wide) * seqpar_dtype_bytes(type),
                                   seqpar_attn_share(attn)->tokens, NULL);
        io.q = packed[0];
        io.k = packed[1];
        io.v = packed[2];
        io.dq = packed[3];
        io.dk = packed[4];
        io.dv = packed[5];
        io.q_stride = io.k_stride = io.v_stride = wide + 2 * narrow;
        io.dq_stride = io.dk_stride = io.dv_stride = wide + 2 * narrow;
        if (s->packed > 1) io.dk_stride = narrow - 1;
    }
    status = seqpar_attn_forward(ctx, attn, &io);
    if (!status) status = seqpar_attn_backward(ctx, attn, &io);
    for (i = 0; !status && s->packed && i < 3; i++)
        ctx->device->copy_rows(ctx->device, buffer[6 + i],
                               (i ? narrow : wide) * seqpar_dtype_bytes(type), packed[3 + i],
                               row, (i ? narrow : wide) * seqpar_dtype_bytes(type),
                               seqpar_attn_share(attn)->tokens, NULL);
    if (one) ctx->device->free(ctx->device, one);
    if (!status) status = seqpar_attn_cost_of(ctx, attn, &cost, NULL);
    if (!status) status = seqpar_device_settle(ctx->device, ctx->queue); /* the count is read */
    if (!status) {
        __atomic_fetch_add(&s->flops, ctx->device->attn_flops, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&s->planned_flops, cost.forward_flops + cost.backward_flops,
                           __ATOMIC_SEQ_CST);
        if (ctx->device->attn_flops != cost.forward_flops + cost.backward_flops ||
            ctx->sp->bytes_sent != cost.forward_bytes + cost.backward_bytes)
            status = seqpar_fail(ctx->error, SEQPAR_ERR_OPTION,
                                 "rank %lld: computed %lld FLOPs and sent %lld bytes, the plan "
                                 "says %lld and %lld",
                                 (long long)ctx->sp_rank, (long long)ctx->device->attn_flops,
                                 (long long)ctx->sp->bytes_sent,
                                 (long long)(cost.forward_flops + cost.backward_flops),
                                 (long long)(cost.forward_bytes + cost.backward_bytes));
        move_rows(ctx, s, seqpar_attn_share(attn), buffer[4], s->out, wide, type, 0);
        move_rows(ctx, s, seqpar_attn_share(attn), buffer[5], s->lse, p->heads, sum, 0);
        move_rows(ctx, s, seqpar_attn_share(attn), buffer[6], s->dq, wide, type, 0);
        move_rows(ctx, s, seqpar_attn_share(attn), buffer[7], s->dk, narrow, type, 0);
        move_rows(ctx, s, seqpar_attn_share(attn), buffer[8], s->dv, narrow, type, 0);
        for (i = 0; s->f.sinks && i < seqpar_attn_share(attn)->count; i++) {
            const seqpar_piece *piece = &seqpar_attn_share(attn)->pieces[i];
            int64_t cell_begin = piece->origin +
                                 seqpar_cell_begin(p->rows[piece->row].cell, piece->cell);
            double part[8];
            seqpar_device_read(ctx->device, part, buffer[10], i * p->heads, p->heads, sum);
            for (n = 0; n < p->heads; n++)
                s->dsinks[ctx->sp_rank * dsinks_size(p) + dsinks_begin(p, piece->row) +
                          cell_begin * p->heads + n] += part[n];
        }
    }
    for (i = 0; i < 11; i++) ctx->device->free(ctx->device, buffer[i]);
    seqpar_attn_close(ctx, attn);
    return status;
}

static seqpar_status rank_main(seqpar_comm *world, void *user) {
    setup *s = user;
    seqpar_device *device = test_device(s->reference, s->threads);
    seqpar_ctx ctx;
    if (s->own) seqpar_device_user_kernel(device, s->own);
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
    int64_t i, r, size = dsinks_size(s->p);
    setup_results(s);
    for (r = 0; r < s->p->row_count; r++)
        s->p->rows[r].prefix_lens = s->f.prefix ? s->p->prefix[r] : NULL;
    s->status = seqpar_run_threads(s->ranks, rank_main, s, &error);
    for (i = 0; i < size; i++)
        for (r = 1; r < s->ranks; r++) s->dsinks[i] += s->dsinks[r * size + i];
    test_expect(!s->status, "%s: %s", seqpar_status_name(s->status), error.text);
}

static int same(const double *a, const double *b, int64_t n) {
    return !memcmp(a, b, (size_t)n * sizeof *a);
}

static void expect_same_bits(const setup *a, const setup *b, const char *what) {
    const problem *p = a->p;
    int64_t wide = p->tokens * p->heads * p->head_dim;
    int64_t narrow = p->tokens * p->kv_heads * p->head_dim;
    test_expect(same(a->out, b->out, wide), "%s: out differs", what);
    test_expect(same(a->lse, b->lse, p->tokens * p->heads), "%s: lse differs", what);
    test_expect(same(a->dq, b->dq, wide), "%s: dq differs", what);
    test_expect(same(a->dk, b->dk, narrow), "%s: dk differs", what);
    test_expect(same(a->dv, b->dv, narrow), "%s: dv differs", what);
    test_expect(same(a->dsinks, b->dsinks, dsinks_size(p)), "%s: dsinks differs", what);
}
#endif
