/* SPDX-License-Identifier: MIT OR Unlicense */
/* The CUDA device against PyTorch on the same GPU, and against itself: a ring step against the
   whole sequence, 8 ranks on one GPU against one, equal bits against the relaxed path. Every
   result is compared with fp64 on the host before its time is taken; ours and the peer take
   turns. Prints a table, writes build/bench/gpu.json and one page of markdown.

       bench_gpu [--tiny] [--seconds 400] [--peer bench/peer_torch_gpu.py] [--gpu NAME]
                 [--driver VERSION] [--page FILE] [--only NAME] */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "bench.h"
#include "gpu.h"

static const char *only; /* cases whose name holds this */

static const goal goals[] = {
    {"attention forward", "flash", 0.7, 1.0},
    {"attention backward", "flash", 0.6, 0.85},
    {"attention backward", "flash-deterministic", 1.5, 2.2},
    {"rmsnorm backward", "compiled", 1.5, 2.0},
    {"linear cross-entropy", "chunked", 1.5, 2.3},
    {"adamw", "fused+clip+cast", 1.0, 1.15},
    {"ring step", "whole sequence", 0.90, 0.96},
    {"8 ranks, one GPU", "1 rank", 0.90, 0.96},
    {"equal bits", "relaxed", 0.85, 0.93},
};

/* Goals of attention are of one shape. */
static const char goal_shape[] = "16384 d128 causal";
static const goal *goal_of(const char *name, const char *shape, const char *against) {
    if (!strncmp(name, "attention", 9) && !strstr(shape, goal_shape)) return NULL;
    for (size_t i = 0; !tiny && i < sizeof goals / sizeof *goals; i++)
        if (!strcmp(goals[i].name, name) && !strcmp(goals[i].peer, against)) return &goals[i];
    return NULL;
}

static const char *dtype_name(void) {
    return bench.ctx.device->storage == SEQPAR_DTYPE_BF16 ? "bf16" : "f32";
}

static double nearness(double f32, double bf16) {
    return bench.ctx.device->storage == SEQPAR_DTYPE_BF16 ? bf16 : f32;
}

/* ---- one case against its peers, in turns ---- */

typedef struct timed {
    const char *name, *peers; /* "flash,cudnn" */
    char shape[40], request[200];
    call_fn call;
    void *user;
    double flops, bytes, error, limit, seconds; /* for ours, and for each peer */
} timed;

static void line_fill(line *l, const timed *t, sampling *ours, sampling *theirs) {
    l->ms = sampled(ours, 0.5);
    l->spread = spread(ours);
    l->peer_ms = sampled(theirs, 0.5);
    l->peer_spread = spread(theirs);
    l->flops = t->flops;
    l->bytes = t->bytes;
    l->error = t->error;
    l->limit = t->limit;
    l->goal = goal_of(l->name, l->shape, l->peer);
}

static void time_against(const timed *t, const char *against) {
    sampling ours = {.count = 0}, theirs = {.count = 0};
    char request[280];
    const char *why = NULL;
    line *l = line_new(t->name, t->shape, against);
    snprintf(request, sizeof request, "%s backend=%s dtype=%s", t->request, against,
             dtype_name());
    for (int turn = 0; turn < TURNS_OF_A_ROW; turn++) {
        sample(&ours, t->call, t->user, t->seconds / TURNS_OF_A_ROW);
        if (!why && (why = peer_ask(&theirs, request, t->seconds / TURNS_OF_A_ROW)) != NULL)
            snprintf(l->why, sizeof l->why, "%s", why);
    }
    line_fill(l, t, &ours, &theirs);
}

static void time_case(const timed *t) {
    char list[120], *at = list;
    snprintf(list, sizeof list, "%s", t->peers);
    for (char *each; (each = strsep(&at, ",")) != NULL && (each == list || !*peer.absent);)
        time_against(t, each);
}

/* Seconds a case may take: its part of what is left. */
static int cases_left;
static double allowance(void) {
    return tiny ? 0
                : fmax(0.2,
                       fmin(2, 0.5 * seconds_left() / (cases_left > 1 ? cases_left : 1) / 3));
}

/* A case that would not fit into what is left is a line that says so. `flops` at the speed
   seen so far. */
static double speed_seen = 2e13;
static int too_slow(const char *name, const char *shape, double flops) {
    double takes = 8 * flops / speed_seen, left = seconds_left();
    if (tiny || takes < 0.3 * left) return 0;
    line *l = line_new(name, shape, "");
    snprintf(l->why, sizeof l->why, "left out: about %.0f s of the %.0f s left", takes, left);
    return 1;
}

/* ---- attention ---- */

enum { Q, K, V, DOUT, OUT, LSE, DQ, DK, DV, TENSORS };
typedef struct shape {
    int64_t tokens, heads, dim;
    int full, relaxed;
} shape;

typedef struct attention {
    shape shape;
    seqpar_ctx *ctx;
    seqpar_attn *attn;
    seqpar_row row;
    int64_t cu[2], width[TENSORS];
    tensor x[TENSORS];
    seqpar_attn_io io;
} attention;

static void forward_call(void *user) {
    attention *a = user;
    must(seqpar_attn_forward(a->ctx, a->attn, &a->io));
}

static void backward_call(void *user) {
    attention *a = user;
    must(seqpar_attn_backward(a->ctx, a->attn, &a->io));
}

/* Pairs of a query and a key it sees, 4 d operations each; backward five products for two. */
static double attention_flops(const shape *s, int backward) {
    double pairs = s->full ? (double)s->tokens * (double)s->tokens
                           : 0.5 * (double)s->tokens * (double)(s->tokens + 1);
    return pairs * 4 * (double)(s->dim * s->heads) * (backward ? 2.5 : 1);
}

static void attention_open(attention *a, seqpar_ctx *ctx, const shape *s) {
    seqpar_attn_desc desc = {.heads = s->heads,
                             .kv_heads = s->heads,
                             .head_dim = s->dim,
                             .layout = SEQPAR_LAYOUT_ZIGZAG,
                             .schedule = SEQPAR_SCHEDULE_RING,
                             .full = s->full,
                             .relaxed = s->relaxed};
    memset(a, 0, sizeof *a);
    a->shape = *s;
    a->ctx = ctx;
    a->cu[1] = s->tokens;
    a->row.tokens = s->tokens;
    a->row.cell = s->tokens < 512 ? 16 : s->tokens / 32;
    a->row.docs = 1;
    a->row.cu_seqlens = a->cu;
    if (seqpar_attn_open(ctx, &a->attn, &a->row, 1, &desc)) {
        fprintf(stderr, "bench_gpu: %s\n", ctx->error->text);
        exit(1);
    }
    for (int i = 0; i < TENSORS; i++) {
        a->width[i] = s->heads * (i == LSE ? 1 : s->dim);
        a->x[i].dtype = i == LSE ? ctx->device->accumulator : ctx->device->storage;
        a->x[i].count = seqpar_attn_share(a->attn)->tokens * a->width[i];
    }
}

static void attention_io(attention *a) {
    tensor *x = a->x;
    a->io = (seqpar_attn_io){.q = x[Q].data,
                             .k = x[K].data,
                             .v = x[V].data,
                             .out = x[OUT].data,
                             .lse = x[LSE].data,
                             .dout = x[DOUT].data,
                             .dq = x[DQ].data,
                             .dk = x[DK].data,
                             .dv = x[DV].data};
}

static void attention_tensors(attention *a) {
    for (int i = 0; i < TENSORS; i++)
        a->x[i] = tensor_new(a->x[i].count, a->x[i].dtype, i % STREAMS, 1);
    attention_io(a);
}

static void attention_close(attention *a) {
    for (int i = 0; i < TENSORS; i++) a->ctx->device->free(a->ctx->device, a->x[i].data);
    seqpar_attn_close(a->ctx, a->attn);
}

/* Token t of a head at first. */
static void begun_row(const attention *a, int tensor, int64_t t, int64_t head, double *x) {
    begun_as(&a->x[tensor], t * a->width[tensor] + head * a->shape.dim, a->shape.dim, x);
}

static double *result_row(const attention *a, int tensor, int64_t t, int64_t head) {
    return fetch(&a->x[tensor], t * a->width[tensor] + head * a->shape.dim, a->shape.dim, 0, 1);
}

/* Scores of a query against all keys it sees, in p; their log sum of exponentials. */
static double scores(const attention *a, int64_t t, int64_t head, int64_t keys, double *p) {
    double q[256], k[256], top = -INFINITY, sum = 0;
    begun_row(a, Q, t, head, q);
    for (int64_t j = 0; j < keys; j++) {
        begun_row(a, K, j, head, k);
        p[j] = dot(q, k, a->shape.dim) / sqrt((double)a->shape.dim);
        top = fmax(top, p[j]);
    }
    for (int64_t j = 0; j < keys; j++) sum += exp(p[j] - top);
    return top + log(sum);
}

/* One query of one head: distance of out (forward) or dq from fp64. */
static double query_error(const attention *a, int64_t t, int64_t head, int backward) {
    int64_t d = a->shape.dim, keys = a->shape.full ? a->shape.tokens : t + 1;
    double *p = malloc((size_t)keys * sizeof *p), out[256] = {0}, dq[256] = {0}, k[256], v[256];
    double dout[256], lse = scores(a, t, head, keys, p), delta;
    distance e = {0, 0};
    for (int64_t j = 0; j < keys; j++) {
        begun_row(a, V, j, head, v);
        p[j] = exp(p[j] - lse);
        for (int64_t i = 0; i < d; i++) out[i] += p[j] * v[i];
    }
    begun_row(a, DOUT, t, head, dout);
    delta = dot(out, dout, d);
    for (int64_t j = 0; backward && j < keys; j++) {
        begun_row(a, K, j, head, k);
        begun_row(a, V, j, head, v);
        double ds = p[j] * (dot(dout, v, d) - delta) / sqrt((double)d);
        for (int64_t i = 0; i < d; i++) dq[i] += ds * k[i];
    }
    double *got = result_row(a, backward ? DQ : OUT, t, head);
    for (int64_t i = 0; i < d; i++) compare(&e, got[i], backward ? dq[i] : out[i]);
    free(got);
    free(p);
    return relative(&e);
}

/* One key of one head: dk and dv from all queries, whose out and lse are ours, which
   query_error has looked at. */
static double key_error(const attention *a, int64_t key, int64_t head) {
    int64_t d = a->shape.dim, tokens = a->shape.tokens;
    double *out = fetch(&a->x[OUT], head * d, d, a->width[OUT], tokens);
    double *lse = fetch(&a->x[LSE], head, 1, a->width[LSE], tokens);
    double dk[256] = {0}, dv[256] = {0}, k[256], v[256], q[256], dout[256];
    distance e = {0, 0};
    begun_row(a, K, key, head, k);
    begun_row(a, V, key, head, v);
    for (int64_t t = a->shape.full ? 0 : key; t < tokens; t++) {
        begun_row(a, Q, t, head, q);
        begun_row(a, DOUT, t, head, dout);
        double p = exp(dot(q, k, d) / sqrt((double)d) - lse[t]);
        double ds = p * (dot(dout, v, d) - dot(dout, out + t * d, d)) / sqrt((double)d);
        for (int64_t i = 0; i < d; i++) {
            dk[i] += ds * q[i];
            dv[i] += p * dout[i];
        }
    }
    double *got[2] = {result_row(a, DK, key, head), result_row(a, DV, key, head)};
    for (int64_t i = 0; i < d; i++) {
        compare(&e, got[0][i], dk[i]);
        compare(&e, got[1][i], dv[i]);
    }
    free(got[0]);
    free(got[1]);
    free(out);
    free(lse);
    return relative(&e);
}

static double attention_error(const attention *a, int backward) {
    int64_t last = a->shape.tokens - 1, places[] = {last / 7, last / 2 + 5, last};
    double worst = 0;
    for (int i = 0; i < 3; i++)
        worst = worse(worst, query_error(a, places[i], i % a->shape.heads, backward));
    for (int i = 0; backward && i < 2; i++)
        worst = worse(worst, key_error(a, places[i], a->shape.heads - 1));
    return worst;
}

static void bench_attention(shape s, const char *forward_peers, const char *backward_peers) {
    attention a;
    timed t = {.flops = attention_flops(&s, 0)};
    snprintf(t.shape, sizeof t.shape, "%lld d%lld %s, %lld heads", (long long)s.tokens,
             (long long)s.dim, s.full ? "full" : "causal", (long long)s.heads);
    if (too_slow("attention", t.shape, 3.5 * t.flops)) return;
    attention_open(&a, &bench.ctx, &s);
    attention_tensors(&a);
    for (int backward = 0; backward < 2; backward++) {
        t.name = backward ? "attention backward" : "attention forward";
        t.call = backward ? backward_call : forward_call;
        t.user = &a;
        t.peers = backward ? backward_peers : forward_peers;
        t.flops = attention_flops(&s, backward);
        snprintf(t.request, sizeof t.request, "%s tokens=%lld heads=%lld dim=%lld causal=%d",
                 backward ? "attention_backward" : "attention_forward", (long long)s.tokens,
                 (long long)s.heads, (long long)s.dim, !s.full);
        t.call(&a);
        t.error = attention_error(&a, backward);
        t.limit = nearness(1e-5, 2e-2);
        t.seconds = allowance();
        time_case(&t);
        speed_seen = t.flops / (1e-3 * lines[line_count - 1].ms);
    }
    attention_close(&a);
}

/* Equal bits against one running state, tiles that know no chunks. */
static void bench_relaxed(shape s) {
    attention way[2];
    char text[40];
    snprintf(text, sizeof text, "%lld d%lld causal", (long long)s.tokens, (long long)s.dim);
    if (too_slow("equal bits", text, 7 * attention_flops(&s, 0))) return;
    for (s.relaxed = 0; s.relaxed < 2; s.relaxed++) {
        attention_open(&way[s.relaxed], &bench.ctx, &s);
        attention_tensors(&way[s.relaxed]);
        forward_call(&way[s.relaxed]);
        backward_call(&way[s.relaxed]);
    }
    for (int backward = 0; backward < 2; backward++) {
        call_fn call = backward ? backward_call : forward_call;
        sampling x[2] = {{.count = 0}, {.count = 0}};
        timed t = {.name = "equal bits",
                   .flops = attention_flops(&s, backward),
                   .limit = nearness(1e-5, 2e-2)};
        snprintf(t.shape, sizeof t.shape, "%s, %s", text, backward ? "backward" : "forward");
        t.error = worse(attention_error(&way[0], backward), attention_error(&way[1], backward));
        for (int turn = 0; turn < TURNS_OF_A_ROW; turn++)
            for (int i = 0; i < 2; i++)
                sample(&x[i], call, &way[i], allowance() / TURNS_OF_A_ROW);
        line_fill(line_new("equal bits", t.shape, "relaxed"), &t, &x[0], &x[1]);
    }
    attention_close(&way[0]);
    attention_close(&way[1]);
}

/* ---- a rank's part of a ring, with nobody to wait for ---- */

/* A transport on which every neighbour is oneself: each message received is one sent. */
static seqpar_status echo_begin(seqpar_comm *comm, const seqpar_group *g, void *queue,
                                seqpar_request *request) {
    (void)queue;
    request->state = NULL;
    for (int64_t i = 0; i < g->recv_count && g->send_count; i++) {
        const seqpar_transfer *from = &g->sends[i % g->send_count], *to = &g->recvs[i];
        int64_t bytes = smaller(from->bytes, to->bytes);
        if (comm->device)
            comm->device->copy(comm->device, to->data, from->data, bytes, bench.ctx.queue);
        else
            memmove(to->data, from->data, (size_t)bytes); /* what ranks compare before a device
                                                             is theirs */
    }
    return SEQPAR_OK;
}

static seqpar_status echo_wait(seqpar_comm *comm, seqpar_request *request, void *queue) {
    (void)comm;
    (void)request;
    (void)queue;
    return SEQPAR_OK;
}

static void echo_abort(seqpar_comm *comm, const char *text) {
    (void)comm;
    (void)text;
}

static void echo_free(seqpar_comm *comm) { free(comm); }
static seqpar_status echo_split(seqpar_comm *comm, int64_t color, int64_t key,
                                seqpar_comm **sub) {
    (void)color;
    (void)key;
    *sub = malloc(sizeof **sub);
    if (!*sub) return SEQPAR_ERR_MEMORY;
    **sub = *comm;
    return SEQPAR_OK;
}

/* The steps of a rank, each on the state of those before, against the whole sequence in one:
   a rank of a zigzag has its part of the pairs exactly. */
static void bench_ring_step(shape s, int64_t ranks) {
    static const seqpar_comm_table table = {.name = "echo",
                                            .begin = echo_begin,
                                            .wait = echo_wait,
                                            .split = echo_split,
                                            .abort = echo_abort,
                                            .free = echo_free};
    seqpar_comm world = {.table = &table, .size = ranks, .error = bench.ctx.error};
    seqpar_ctx ctx;
    attention way[2];
    char text[40];
    snprintf(text, sizeof text, "%lld d%lld, %lld steps", (long long)s.tokens, (long long)s.dim,
             (long long)ranks);
    if (too_slow("ring step", text, 5 * attention_flops(&s, 0))) return;
    must(seqpar_ctx_open(&ctx, &world, bench.ctx.device, ranks));
    for (int i = 0; i < 2; i++) {
        attention_open(&way[i], i ? &ctx : &bench.ctx, &s);
        attention_tensors(&way[i]);
        forward_call(&way[i]);
        backward_call(&way[i]);
    }
    for (int backward = 0; backward < 2; backward++) {
        call_fn call = backward ? backward_call : forward_call;
        sampling whole = {.count = 0}, part = {.count = 0};
        timed t = {.flops = attention_flops(&s, backward) / (double)ranks, .error = NAN};
        for (int turn = 0; turn < TURNS_OF_A_ROW; turn++) {
            sample(&whole, call, &way[0], allowance() / TURNS_OF_A_ROW);
            sample(&part, call, &way[1], allowance() / TURNS_OF_A_ROW);
        }
        for (int i = 0; i < whole.count; i++) whole.ms[i] /= (double)ranks;
        snprintf(t.shape, sizeof t.shape, "%s, %s", text, backward ? "backward" : "forward");
        line_fill(line_new("ring step", t.shape, "whole sequence"), &t, &part, &whole);
    }
    attention_close(&way[0]);
    attention_close(&way[1]);
    seqpar_ctx_close(&ctx);
}

/* ---- ranks that share the GPU ---- */

typedef struct together {
    shape shape;
    int64_t ranks;
    tensor whole[4]; /* q, k, v, dout of all tokens */
    uint64_t *bits;  /* (tokens) of out, lse, dq, dk, dv */
    sampling pass[2];
    int runs;
} together;

static uint64_t bits_of(uint64_t hash, const char *bytes, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        hash = (hash ^ (unsigned char)bytes[i]) * UINT64_C(1099511628211);
    return hash;
}

static void take_share(attention *a, const together *w) {
    const seqpar_share *mine = seqpar_attn_share(a->attn);
    seqpar_device *d = a->ctx->device;
    for (int i = 0; i < TENSORS; i++) {
        int64_t size = a->width[i] * seqpar_dtype_bytes(a->x[i].dtype);
        a->x[i].data = d->alloc(d, mine->tokens * size + 1);
        if (!a->x[i].data) {
            fprintf(stderr, "bench_gpu: %s\n", a->ctx->error->text);
            exit(1);
        }
        for (int64_t p = 0; p < mine->count && i <= DOUT; p++) /* a zigzag's pieces are runs of
                                                                  tokens */
            d->copy(d, a->x[i].data + mine->pieces[p].local * size,
                    w->whole[i].data + mine->pieces[p].start * size,
                    mine->pieces[p].count * size, NULL);
    }
    attention_io(a);
}

static void note_bits(const attention *a, together *w) {
    const seqpar_share *mine = seqpar_attn_share(a->attn);
    seqpar_device *d = a->ctx->device;
    for (int i = OUT; i < TENSORS; i++) {
        int64_t size = a->width[i] * seqpar_dtype_bytes(a->x[i].dtype);
        char *here = malloc((size_t)(mine->tokens * size));
        d->copy(d, here, a->x[i].data, mine->tokens * size, NULL);
        for (int64_t p = 0; p < mine->count; p++)
            for (int64_t t = 0; t < mine->pieces[p].count; t++)
                w->bits[mine->pieces[p].start + t] = bits_of(
                    w->bits[mine->pieces[p].start + t],
                    here + (mine->pieces[p].local + t) * size, size);
        free(here);
    }
}

static void time_together(together *w, attention *a, seqpar_comm *world, int backward) {
    char here[4];
    seqpar_comm_barrier(world);
    double began = wall();
    seqpar_comm_barrier(world);
    (backward ? backward_call : forward_call)(a);
    a->ctx->device->copy(a->ctx->device, here, a->x[OUT].data, 4, NULL); /* its queue is done */
    seqpar_comm_barrier(world);
    if (world->rank == 0 && w->pass[backward].count < SAMPLES)
        w->pass[backward].ms[w->pass[backward].count++] = 1e3 * (wall() - began);
}

static seqpar_device *device_open(seqpar_error *error, int dtype);
static seqpar_status rank_main(seqpar_comm *world, void *user) {
    together *w = user;
    seqpar_ctx ctx;
    attention a;
    seqpar_device *device = device_open(world->error, bench.ctx.device->storage);
    seqpar_status status = device ? seqpar_ctx_open(&ctx, world, device, world->size)
                                  : world->error->status;
    if (status) return status;
    attention_open(&a, &ctx, &w->shape);
    take_share(&a, w);
    forward_call(&a);
    backward_call(&a);
    if (!w->runs) note_bits(&a, w);
    for (int run = 0; run < w->runs; run++)
        for (int backward = 0; backward < 2; backward++) time_together(w, &a, world, backward);
    attention_close(&a);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return SEQPAR_OK;
}

static void run_together(together *w, int runs) {
    seqpar_error error;
    w->runs = runs;
    if (seqpar_run_threads(w->ranks, rank_main, w, &error)) {
        fprintf(stderr, "bench_gpu: %s\n", error.text);
        exit(1);
    }
}

static void bench_together(shape s, int64_t ranks) {
    together way[2] = {{.shape = s, .ranks = ranks}, {.shape = s, .ranks = 1}};
    int same, runs = tiny ? 1 : 3;
    char text[40];
    snprintf(text, sizeof text, "%lld d%lld causal", (long long)s.tokens, (long long)s.dim);
    if (too_slow("8 ranks, one GPU", text, 7 * attention_flops(&s, 0))) return;
    for (int i = 0; i < 4; i++) way[0].whole[i] = storage_new(s.tokens * s.heads * s.dim, i, 1);
    memcpy(way[1].whole, way[0].whole, sizeof way[0].whole);
    for (int i = 0; i < 2; i++) {
        way[i].bits = calloc((size_t)s.tokens, sizeof *way[i].bits);
        run_together(&way[i], 0);
    }
    same = !memcmp(way[0].bits, way[1].bits, (size_t)s.tokens * sizeof *way[0].bits);
    for (int turn = 0; turn < TURNS_OF_A_ROW; turn++)
        for (int i = 0; i < 2; i++) run_together(&way[i], runs);
    for (int backward = 0; backward < 2; backward++) {
        timed t = {.flops = attention_flops(&s, backward),
                   .error = same ? 0 : INFINITY,
                   .limit = 1e-30};
        snprintf(t.shape, sizeof t.shape, "%s, %s", text, backward ? "backward" : "forward");
        line *l = line_new("8 ranks, one GPU", t.shape, "1 rank");
        line_fill(l, &t, &way[0].pass[backward], &way[1].pass[backward]);
        snprintf(l->why, sizeof l->why, "%s", same ? "same bits" : "the bits DIFFER");
    }
    for (int i = 0; i < 4; i++) tensor_free(&way[0].whole[i]);
    free(way[0].bits);
    free(way[1].bits);
}

/* ---- rows ---- */

enum { LEAF = 512, MOST = 5 };
static const double eps = 1e-5;
typedef struct rows {
    int64_t count, width, heads;
    tensor x[MOST], gain, dgain, rstd, cosine, sine;
    int32_t *positions;
    seqpar_piece *leaves;
    int64_t *numbers;
    seqpar_fold fold;
} rows;

static seqpar_mat mat(const rows *r, int n) { return (seqpar_mat){r->x[n].data, r->width}; }
#define OP(op, args) must(bench.ctx.device->op(bench.ctx.device, args, bench.ctx.queue))

static void rmsnorm_call(void *user) { /* x[0] x, x[1] y */
    rows *r = user;
    seqpar_rmsnorm_args a = {mat(r, 1), mat(r, 0), r->rstd.data, r->gain.data,
                             r->count,  r->width,  eps};
    OP(rmsnorm, &a);
}

static void rmsnorm_grad_call(void *user) { /* x[0] x, x[1] dy, x[2] dx */
    rows *r = user;
    seqpar_rmsnorm_grad_args a = {
        {r->fold.program, r->fold.program_count, r->fold.depth_high, NULL, 0, r->dgain.data},
        r->leaves,
        mat(r, 2),
        mat(r, 1),
        mat(r, 0),
        r->rstd.data,
        r->gain.data,
        r->count,
        r->width};
    OP(rmsnorm_grad, &a);
}

static void rope_call(void *user) {
    rows *r = user;
    seqpar_rope_args a = {mat(r, 0), r->cosine.data, r->sine.data,        r->positions,
                          r->count,  r->heads,       r->width / r->heads, 0};
    OP(rope, &a);
}

static void swiglu_call(void *user) { /* x[0] gate, x[1] up, x[2] y or dy */
    rows *r = user;
    seqpar_swiglu_args a = {mat(r, 2), mat(r, 0), mat(r, 1), r->count, r->width};
    OP(swiglu, &a);
}

static void swiglu_grad_call(void *user) {
    rows *r = user;
    seqpar_swiglu_grad_args a = {mat(r, 2), mat(r, 0), mat(r, 1), r->count, r->width};
    OP(swiglu_grad, &a);
}

/* A row of x[n] as it was, and as it is. */
static double *begun(const rows *r, int n, int64_t t) {
    double *x = malloc((size_t)r->width * sizeof *x);
    begun_as(&r->x[n], t * r->width, r->width, x);
    return x;
}

static double *row_now(const rows *r, int n, int64_t t) {
    return fetch(&r->x[n], t * r->width, r->width, 0, 1);
}

static double rstd_of(const rows *r, const double *x) {
    return 1 / sqrt(dot(x, x, r->width) / (double)r->width + eps);
}

static double rmsnorm_error(const rows *r, int64_t t) {
    double *x = begun(r, 0, t), *y = row_now(r, 1, t), rstd = rstd_of(r, x), gain;
    distance d = {0, 0};
    for (int64_t i = 0; i < r->width; i++) {
        begun_as(&r->gain, i, 1, &gain);
        compare(&d, y[i], x[i] * rstd * gain);
    }
    free(x);
    free(y);
    return relative(&d);
}

/* dx, which was 0. */
static double dx_error(const rows *r, int64_t t) {
    double *x = begun(r, 0, t), *dy = begun(r, 1, t), *dx = row_now(r, 2, t);
    double rstd = rstd_of(r, x), along = 0, gain;
    distance d = {0, 0};
    for (int64_t i = 0; i < r->width; i++) {
        begun_as(&r->gain, i, 1, &gain);
        dy[i] *= gain;
        along += dy[i] * x[i];
    }
    for (int64_t i = 0; i < r->width; i++)
        compare(&d, dx[i], rstd * dy[i] - x[i] * rstd * rstd * rstd * along / (double)r->width);
    free(x);
    free(dy);
    free(dx);
    return relative(&d);
}

/* One element of dgain, over all rows. */
static double dgain_error(const rows *r) {
    int64_t i = r->width / 3;
    double want = 0, dy, *got = fetch(&r->dgain, i, 1, 0, 1), size = 0;
    for (int64_t t = 0; t < r->count; t++) {
        double *x = begun(r, 0, t), part;
        begun_as(&r->x[1], t * r->width + i, 1, &dy);
        part = dy * x[i] * rstd_of(r, x);
        want += part;
        size += part * part;
        free(x);
    }
    size = fabs(*got - want) / sqrt(size);
    free(got);
    return size;
}

static double rmsnorm_grad_error(const rows *r, int64_t t) {
    return t ? dx_error(r, t) : worse(dx_error(r, 0), dgain_error(r));
}

static double rope_error(const rows *r, int64_t t) {
    int64_t dim = r->width / r->heads, half = dim / 2;
    double *x = begun(r, 0, t), *y = row_now(r, 0, t);
    distance d = {0, 0};
    for (int64_t i = 0; i < r->width; i++) {
        int64_t k = i % dim % half;
        double angle = (double)t * pow(10000, -2.0 * (double)k / (double)dim);
        double other = i % dim < half ? -x[i + half] : x[i - half];
        compare(&d, y[i], x[i] * cos(angle) + other * sin(angle));
    }
    free(x);
    free(y);
    return relative(&d);
}

static double swiglu_error(const rows *r, int64_t t) {
    double *g = begun(r, 0, t), *u = begun(r, 1, t), *y = row_now(r, 2, t);
    distance d = {0, 0};
    for (int64_t i = 0; i < r->width; i++) compare(&d, y[i], g[i] / (1 + exp(-g[i])) * u[i]);
    free(g);
    free(u);
    free(y);
    return relative(&d);
}

static double swiglu_grad_error(const rows *r, int64_t t) {
    double *g = begun(r, 0, t), *u = begun(r, 1, t), *dy = begun(r, 2, t);
    double *dg = row_now(r, 0, t), *du = row_now(r, 1, t);
    distance d = {0, 0};
    for (int64_t i = 0; i < r->width; i++) {
        double s = 1 / (1 + exp(-g[i]));
        compare(&d, dg[i], dy[i] * u[i] * s * (1 + g[i] * (1 - s)));
        compare(&d, du[i], dy[i] * g[i] * s);
    }
    free(g);
    free(u);
    free(dy);
    free(dg);
    free(du);
    return relative(&d);
}

typedef struct row_kind {
    const char *name, *request;
    int tensors, heads;
    int64_t width;
    double moved; /* numbers of the storage type that must travel, of one element */
    call_fn call;
    double (*error)(const rows *r, int64_t t);
} row_kind;

static const row_kind kinds[] = {
    {"rmsnorm forward", "rmsnorm_forward", 2, 1, 4096, 2, rmsnorm_call, rmsnorm_error},
    {"rmsnorm backward", "rmsnorm_backward", 3, 1, 4096, 4, rmsnorm_grad_call,
     rmsnorm_grad_error},
    {"rope", "rope", 1, 40, 5120, 2, rope_call, rope_error},
    {"swiglu forward", "swiglu_forward", 3, 1, 14336, 3, swiglu_call, swiglu_error},
    {"swiglu backward", "swiglu_backward", 3, 1, 14336, 5, swiglu_grad_call, swiglu_grad_error},
};

static void rows_fold(rows *r) {
    int64_t count = (r->count + LEAF - 1) / LEAF;
    r->numbers = malloc((size_t)count * sizeof *r->numbers);
    r->leaves = calloc((size_t)count, sizeof *r->leaves);
    for (int64_t i = 0; i < count; i++) {
        r->numbers[i] = i;
        r->leaves[i] = (seqpar_piece){.leaf = i,
                                      .stride = 1,
                                      .count = smaller(LEAF, r->count - i * LEAF),
                                      .local = i * LEAF};
    }
    seqpar_fold_init(&r->fold, r->numbers, count);
    for (int64_t i = 0; i < count; i++)
        seqpar_fold_push(&r->fold, (seqpar_node){.index = i}, SEQPAR_FOLD_LEAF, (int32_t)i);
}

/* Cosine and sine of every position, of the type of sums. */
static void rows_angles(rows *r) {
    int64_t half = r->width / r->heads / 2, count = r->count * half;
    float *c = malloc((size_t)count * sizeof *c), *s = malloc((size_t)count * sizeof *s);
    for (int64_t i = 0; i < count; i++) {
        double angle = (double)(i / half) *
                       pow(10000, -2.0 * (double)(i % half) / (double)(2 * half));
        c[i] = (float)cos(angle);
        s[i] = (float)sin(angle);
    }
    device_copy(r->cosine.data, c, count * (int64_t)sizeof *c);
    device_copy(r->sine.data, s, count * (int64_t)sizeof *s);
    free(c);
    free(s);
}

static void rows_open(rows *r, const row_kind *kind) {
    memset(r, 0, sizeof *r);
    r->count = tiny ? 40 : 16384;
    r->width = tiny ? 64 : kind->width;
    r->heads = tiny && kind->heads > 1 ? 2 : kind->heads;
    for (int i = 0; i < kind->tensors; i++) r->x[i] = storage_new(r->count * r->width, i, 1);
    r->gain = storage_new(r->width, 6, 1);
    r->dgain = accumulator_new(r->width, 7, 1);
    r->rstd = accumulator_new(r->count, 7, 1);
    r->positions = malloc((size_t)r->count * sizeof *r->positions);
    for (int64_t t = 0; t < r->count; t++) r->positions[t] = (int32_t)t;
    if (kind->call == rope_call) {
        r->cosine = accumulator_new(r->count * r->width / r->heads / 2, 0, 1);
        r->sine = accumulator_new(r->count * r->width / r->heads / 2, 0, 1);
        rows_angles(r);
    }
    rows_fold(r);
}

/* What the gradient of the norm starts from: rstd of these rows, dx of zeros. */
static void rows_prepare_grad(rows *r) {
    tensor y = r->x[1];
    r->x[1] = r->x[2];
    rmsnorm_call(r);
    r->x[1] = y;
    tensor_zero(&r->x[2]);
}

static void rows_close(rows *r) {
    tensor *all[] = {&r->x[0],  &r->x[1], &r->x[2],   &r->gain,
                     &r->dgain, &r->rstd, &r->cosine, &r->sine};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->data) tensor_free(all[i]);
    seqpar_fold_free(&r->fold);
    free(r->leaves);
    free(r->numbers);
    free(r->positions);
}

static void bench_rows(const row_kind *kind) {
    rows r;
    timed t = {.name = kind->name,
               .peers = "compiled",
               .call = kind->call,
               .user = &r,
               .limit = nearness(1e-5, 2e-2)};
    rows_open(&r, kind);
    if (kind->call == rmsnorm_grad_call) rows_prepare_grad(&r);
    kind->call(&r);
    for (int i = 0; i < 3; i++)
        t.error = worse(t.error, kind->error(&r, i * (r.count - 1) / 2));
    t.bytes = kind->moved *
              (double)(r.count * r.width * seqpar_dtype_bytes(bench.ctx.device->storage));
    t.seconds = allowance();
    snprintf(t.shape, sizeof t.shape, "%lldx%lld", (long long)r.count, (long long)r.width);
    snprintf(t.request, sizeof t.request, "%s rows=%lld width=%lld heads=%lld", kind->request,
             (long long)r.count, (long long)r.width, (long long)r.heads);
    time_case(&t);
    rows_close(&r);
}

/* ---- loss through a large table ---- */

typedef struct head_case {
    int64_t tokens, hidden, vocab;
    seqpar_row row;
    int64_t cu[2];
    seqpar_share share;
    seqpar_optim optim;
    seqpar_tensor parameter;
    const seqpar_token_fold *fold;
    seqpar_vocab_desc desc;
    tensor x, table, dx, nodes, logp, lse, seeds;
    int32_t *targets;
} head_case;

/* values and gradients of known seeds: three products */
static void head_call(void *user) {
    head_case *h = user;
    seqpar_vocab_io io = {.hidden = h->x.data,
                          .table = h->table.data,
                          .targets = h->targets,
                          .tokens = h->tokens};
    io.values.logp = h->logp.data;
    io.values.lse = h->lse.data;
    io.seeds.dlogp = h->seeds.data;
    io.dhidden = h->dx.data;
    io.nodes = h->nodes.data;
    io.node_stride = h->vocab * h->hidden;
    must(seqpar_vocab_backward(&bench.ctx, &io, &h->share, h->fold, &h->desc));
}

static void head_open(head_case *h) {
    static const seqpar_split_desc whole = {SEQPAR_LAYOUT_ZIGZAG, 1, 0};
    seqpar_optim_desc sgd = {.kind = SEQPAR_OPTIM_SGD}; /* it is here for the fold alone */
    memset(h, 0, sizeof *h);
    h->tokens = tiny ? 64 : 16384;
    h->hidden = tiny ? 32 : 4096;
    h->vocab = tiny ? 96 : 128256;
    h->cu[1] = h->tokens;
    h->row = (seqpar_row){
        .tokens = h->tokens, .cell = tiny ? 16 : 512, .docs = 1, .cu_seqlens = h->cu};
    h->parameter = (seqpar_tensor){.name = "table", .rows = h->vocab, .cols = h->hidden};
    h->desc = (seqpar_vocab_desc){
        .hidden = h->hidden, .vocab = h->vocab, .rows_max = tiny ? 32 : 4096};
    must(seqpar_optim_open(&bench.ctx, &h->optim, &h->parameter, 1, &sgd));
    must(seqpar_step_begin(&bench.ctx, &h->optim, &h->row, 1, SEQPAR_LAYOUT_ZIGZAG, 1));
    must(seqpar_split(bench.ctx.error, &h->share, &h->row, 1, &whole));
    must(seqpar_step_fold(&bench.ctx, &h->optim, &h->fold, &h->share, 0));
    h->x = storage_new(h->tokens * h->hidden, 0, 1);
    h->table = storage_new(h->vocab * h->hidden, 1, 1.0 / 32);
    h->dx = storage_new(h->tokens * h->hidden, 2, 1);
    h->nodes = accumulator_new(
        seqpar_vocab_node_count(&h->share, h->fold, &h->desc) * h->vocab * h->hidden, 3, 1);
    h->logp = accumulator_new(h->tokens, 4, 1);
    h->lse = accumulator_new(h->tokens, 5, 1);
    h->seeds = accumulator_new(h->tokens, 6, 1);
    h->targets = malloc((size_t)h->tokens * sizeof *h->targets);
    for (int64_t t = 0; t < h->tokens; t++) h->targets[t] = (int32_t)(t * 7919 % h->vocab);
}

static void head_close(head_case *h) {
    tensor *all[] = {&h->x, &h->table, &h->dx, &h->nodes, &h->logp, &h->lse, &h->seeds};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(all[i]);
    seqpar_share_free(&h->share);
    seqpar_optim_close(&bench.ctx, &h->optim);
    free(h->targets);
}

/* Log-prob and dx of one token, from all of the table. */
static double token_error(const head_case *h, int64_t t) {
    double *x = malloc((size_t)h->hidden * sizeof *x);
    double *w = malloc((size_t)h->hidden * sizeof *w);
    double *p = malloc((size_t)h->vocab * sizeof *p);
    double *dx = calloc((size_t)h->hidden, sizeof *dx);
    double seed, top = -INFINITY, sum = 0, *logp = fetch(&h->logp, t, 1, 0, 1);
    double *got = fetch(&h->dx, t * h->hidden, h->hidden, 0, 1);
    distance values = {0, 0}, d = {0, 0};
    begun_as(&h->x, t * h->hidden, h->hidden, x);
    begun_as(&h->seeds, t, 1, &seed);
    for (int64_t j = 0; j < h->vocab; j++) {
        begun_as(&h->table, j * h->hidden, h->hidden, w);
        p[j] = dot(x, w, h->hidden);
        top = fmax(top, p[j]);
    }
    for (int64_t j = 0; j < h->vocab; j++) sum += exp(p[j] - top);
    for (int64_t j = 0; j < h->vocab; j++) {
        double c = seed * ((j == h->targets[t]) - exp(p[j] - top) / sum);
        begun_as(&h->table, j * h->hidden, h->hidden, w);
        for (int64_t i = 0; i < h->hidden; i++) dx[i] += c * w[i];
    }
    compare(&values, *logp, p[h->targets[t]] - top - log(sum));
    for (int64_t i = 0; i < h->hidden; i++) compare(&d, got[i], dx[i]);
    free(x);
    free(w);
    free(p);
    free(dx);
    free(logp);
    free(got);
    return worse(relative(&values), relative(&d));
}

/* A row of the table's gradient, with our lse, which hangs together with logp. */
static double table_error(const head_case *h, int64_t j) {
    double *x = malloc((size_t)h->hidden * sizeof *x);
    double *w = malloc((size_t)h->hidden * sizeof *w);
    double *dw = calloc((size_t)h->hidden, sizeof *dw);
    double *lse = fetch(&h->lse, 0, h->tokens, 0, 1);
    double *got = fetch(&h->nodes, j * h->hidden, h->hidden, 0, 1);
    double seed;
    distance d = {0, 0};
    begun_as(&h->table, j * h->hidden, h->hidden, w);
    for (int64_t t = 0; t < h->tokens; t++) {
        begun_as(&h->x, t * h->hidden, h->hidden, x);
        begun_as(&h->seeds, t, 1, &seed);
        double c = seed * ((j == h->targets[t]) - exp(dot(x, w, h->hidden) - lse[t]));
        for (int64_t i = 0; i < h->hidden; i++) dw[i] += c * x[i];
    }
    for (int64_t i = 0; i < h->hidden; i++) compare(&d, got[i], dw[i]);
    free(x);
    free(w);
    free(dw);
    free(lse);
    free(got);
    return relative(&d);
}

static void bench_head(void) {
    head_case h;
    timed t = {.name = "linear cross-entropy",
               .peers = "chunked",
               .call = head_call,
               .user = &h,
               .limit = nearness(1e-4, 2e-2)};
    double flops = 6.0 * 16384 * 4096 * 128256;
    if (too_slow(t.name, "16384x4096x128256", flops)) return;
    head_open(&h);
    head_call(&h);
    t.flops = 6.0 * (double)(h.tokens * h.hidden) * (double)h.vocab;
    t.error = worse(token_error(&h, h.tokens / 3), table_error(&h, h.targets[h.tokens / 2]));
    t.seconds = allowance();
    snprintf(t.shape, sizeof t.shape, "%lldx%lldx%lld", (long long)h.tokens,
             (long long)h.hidden, (long long)h.vocab);
    snprintf(t.request, sizeof t.request,
             "linear_cross_entropy tokens=%lld hidden=%lld vocab=%lld", (long long)h.tokens,
             (long long)h.hidden, (long long)h.vocab);
    time_case(&t);
    head_close(&h);
}

/* ---- update ---- */

/* working: the weights in bf16, what p begins as */
typedef struct update {
    int64_t count, t;
    tensor p, m, v, g, working;
    double *sums, norm;
} update;

static const double max_norm = 1;
/* Norm, clip, AdamW. */
static void update_call(void *user) {
    update *u = user;
    int64_t blocks = u->count / SEQPAR_PARAM_BLOCK;
    seqpar_sumsq_args s = {u->sums, u->g.data, blocks, SEQPAR_PARAM_BLOCK};
    seqpar_adamw_args a = {.p = u->p.data,
                           .working = u->working.data,
                           .m = u->m.data,
                           .v = u->v.data,
                           .g = u->g.data,
                           .count = u->count,
                           .t = ++u->t,
                           .lr = 1e-3,
                           .beta1 = 0.9,
                           .beta2 = 0.95,
                           .eps = 1e-8,
                           .decay = 0.1};
    double square = 0;
    OP(sumsq, &s);
    for (int64_t i = 0; i < blocks; i++) square += u->sums[i];
    u->norm = sqrt(square);
    a.clip = fmin(1, max_norm / (u->norm + 1e-6));
    OP(adamw, &a);
}

/* after the first step, from moments of zero */
static double update_error(const update *u) {
    int64_t n = smaller(u->count, 4096);
    double *g = malloc((size_t)n * sizeof *g), *p = malloc((size_t)n * sizeof *p);
    double *got = fetch(&u->p, 0, n, 0, 1), clip = fmin(1, max_norm / (u->norm + 1e-6));
    double square = 0, x;
    distance d = {0, 0}, norm = {0, 0};
    begun_as(&u->g, 0, n, g);
    begun_as(u->working.data ? &u->working : &u->p, 0, n, p);
    for (int64_t i = 0; i < n; i++) {
        x = g[i] * clip;
        compare(&d, got[i] - p[i], -1e-3 * 0.1 * p[i] - 1e-3 * x / (fabs(x) + 1e-8));
    }
    for (int64_t i = 0; i < pattern_length(); i++) {
        begun_as(&u->g, i, 1, &x);
        square += x * x;
    }
    compare(&norm, u->norm,
            u->count < pattern_length()
                ? u->norm
                : sqrt(square / (double)pattern_length() * (double)u->count));
    free(g);
    free(p);
    free(got);
    /* the last period of the pattern is cut short */
    return worse(relative(&d), 1e-2 * relative(&norm));
}

static void bench_update(void) {
    update u = {.count = tiny ? 4096 : (int64_t)256 << 20};
    timed t = {.name = "adamw",
               .peers = "fused+clip+cast",
               .call = update_call,
               .user = &u,
               .limit = 1e-3};
    u.p = accumulator_new(u.count, 0, 1);
    u.m = accumulator_new(u.count, 1, 1);
    u.v = accumulator_new(u.count, 2, 1);
    u.g = accumulator_new(u.count, 3, 1);
    u.sums = malloc((size_t)(u.count / SEQPAR_PARAM_BLOCK) * sizeof *u.sums);
    tensor_zero(&u.m);
    tensor_zero(&u.v);
    if (bench.ctx.device->storage == SEQPAR_DTYPE_BF16) u.working = storage_new(u.count, 0, 1);
    update_call(&u);
    t.error = update_error(&u);
    /* p, m, v read and written, g read twice; with bf16 the weights written */
    t.bytes = (double)u.count * (28 + 4 + (u.working.data ? 2 : 0));
    t.seconds = allowance();
    snprintf(t.shape, sizeof t.shape, "%lldM parameters", (long long)(u.count >> 20));
    snprintf(t.request, sizeof t.request, "adamw count=%lld", (long long)u.count);
    time_case(&t);
    tensor_free(&u.p);
    tensor_free(&u.m);
    tensor_free(&u.v);
    tensor_free(&u.g);
    if (u.working.data) tensor_free(&u.working);
    free(u.sums);
}

/* ---- what a copy reaches ---- */

typedef struct copying {
    char *to, *from;
    int64_t bytes;
} copying;

static void copy_call(void *user) {
    copying *c = user;
    bench.ctx.device->copy(bench.ctx.device, c->to, c->from, c->bytes, bench.ctx.queue);
}

static void bench_copy(void) {
    copying c = {.bytes = tiny ? 4096 : (int64_t)2 << 30};
    tensor from = accumulator_new(c.bytes / 4, 0, 1);
    sampling s = {.count = 0};
    c.from = from.data;
    c.to = device_memory(c.bytes);
    sample(&s, copy_call, &c, tiny ? 0 : 0.7); /* and the clocks are up */
    bench.copy_bytes_per_second = 2e3 * (double)c.bytes / sampled(&s, 0.5);
    printf("a copy on the device reads and writes %.2f TB/s together\n",
           bench.copy_bytes_per_second * 1e-12);
    bench.ctx.device->free(bench.ctx.device, c.to);
    tensor_free(&from);
}

/* ---- all of it, what matters most and what is short first ---- */

static shape sized(int64_t tokens, int64_t dim, int full) {
    if (tiny) return (shape){.tokens = 64, .heads = 2, .dim = dim / 4, .full = full};
    return (shape){.tokens = tokens, .heads = 2048 / dim, .dim = dim, .full = full};
}

static shape fewer_heads(shape s) {
    s.heads = tiny ? 1 : 8;
    return s;
}

static void run_goals_of_attention(void) {
    bench_attention(sized(16384, 128, 0), "flash,cudnn,efficient",
                    "flash,flash-deterministic,cudnn,efficient");
}

static void run_rows(void) {
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) bench_rows(&kinds[i]);
}

static void run_ring_step(void) { bench_ring_step(sized(32768, 128, 0), tiny ? 2 : 4); }
static void run_relaxed(void) { bench_relaxed(sized(16384, 128, 0)); }
static void run_flex(void) { bench_attention(sized(32768, 128, 0), "flex", "flex"); }
static void run_long_ring(void) {
    bench_together(fewer_heads(sized(131072, 128, 0)), tiny ? 2 : 8);
}

static void run_short(void) {
    for (int64_t d = 64; d <= 128; d *= 2)
        bench_attention(sized(4096, d, 0), "flash,cudnn", "flash,cudnn");
}

static void run_full(void) {
    for (int64_t d = 64; d <= 128; d *= 2)
        bench_attention(sized(16384, d, 1), "flash,cudnn", "flash,cudnn");
}

static void run_narrow(void) {
    bench_attention(sized(16384, 64, 0), "flash,cudnn", "flash,cudnn");
}

static void run_long(void) {
    for (int64_t d = 64; d <= 128; d *= 2)
        bench_attention(sized(65536, d, 0), "flash,cudnn", "flash,cudnn");
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {

    {"goals", run_goals_of_attention},
    {"rows", run_rows},
    {"adamw", bench_update},
    {"head", bench_head},
    {"relaxed", run_relaxed},
    {"ring", run_ring_step},
    {"ranks", run_long_ring},
    {"short", run_short},
    {"full", run_full},
    {"narrow", run_narrow},
    {"long", run_long},
    {"flex", run_flex}, /* last: its compilation may take the peer's time */
};

enum { CASES = sizeof cases / sizeof *cases };

static void run_cases(void) {
    bench_copy();
    for (cases_left = CASES; cases_left > 0; cases_left--) {
        const char *name = cases[CASES - cases_left].name;
        if (only && strcmp(only, name)) continue;
        if (seconds_left() <= 0) {
            snprintf(line_new(name, "", "")->why, 100, "left out: the %.0f s are over",
                     bench.seconds);
            continue;
        }
        printf("%s ... %.0f s left\n", name, seconds_left());
        fflush(stdout);
        cases[CASES - cases_left].run();
    }
}

static void write_json(report *r) {
    char x[8][32];
    for (int i = 0; i < line_count; i++) {
        const line *l = &lines[i];
        report_case(
            r, line_right(l),
            "\"case\": \"%s\", \"shape\": \"%s\", \"ours_ms\": %s, \"ours_spread\": %s, "
            "\"peer\": \"%s\", \"peer_ms\": %s, \"peer_spread\": %s, \"ratio\": %s, \"goal\": "
            "%s, \"target\": %s, \"error\": %s, \"verdict\": \"%s\", \"note\": \"%s\"",
            l->name, l->shape, number_or_null(x[0], 32, l->ms),
            number_or_null(x[1], 32, l->spread), l->peer, number_or_null(x[2], 32, l->peer_ms),
            number_or_null(x[3], 32, l->peer_spread), number_or_null(x[4], 32, line_ratio(l)),
            number_or_null(x[5], 32, l->goal ? l->goal->must : NAN),
            number_or_null(x[6], 32, l->goal ? l->goal->target : NAN),
            number_or_null(x[7], 32, isfinite(l->error) ? l->error : NAN), line_verdict(l),
            l->why);
    }
}

static void write_page(const char *path) {
    char date[16];
    time_t seconds = time(NULL);
    FILE *out = path ? fopen(path, "w") : NULL;
    if (!out) {
        if (path) perror(path);
        return;
    }
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&seconds));
    fprintf(out,
            "# %s\n\n%s, driver %s, storage %s. Peer: %s.\nRatio: peer's time over "
            "ours, medians of turns; goals and targets are of these ratios. Error: relative "
            "distance of sampled results from fp64.\nA copy on the device: %.2f TB/s, read and "
            "written.\n\n",
            bench.gpu, date, bench.driver, dtype_name(),
            *peer.absent ? peer.absent : "PyTorch in the same run",
            bench.copy_bytes_per_second * 1e-12);
    print_table(out, 1);
    fclose(out);
    printf("page: %s\n", path);
}

static seqpar_device *device_open(seqpar_error *error, int dtype) {
    seqpar_cuda_desc desc = {.storage = dtype};
    return seqpar_device_cuda(error, &desc);
}

static int open_all(int dtype) {
    static seqpar_error error;
    bench.self = seqpar_comm_self();
    seqpar_device *device = device_open(&error, dtype);
    if (!device) {
        fprintf(stderr, "bench_gpu: %s\n", error.text);
        return 0;
    }
    must(seqpar_ctx_open(&bench.ctx, bench.self, device, 1));
    make_patterns();
    return 1;
}

int main(int argc, char **argv) {
    report r;
    const char *page = NULL, *program = NULL, *dtype = "f32";
    bench.gpu = "GPU";
    bench.driver = "unknown";
    bench.seconds = 400;
    bench.began = wall();
    argc = take_tiny(argc, argv);
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--seconds"))
            bench.seconds = atof(value);
        else if (!strcmp(argv[i], "--peer"))
            program = value;
        else if (!strcmp(argv[i], "--gpu"))
            bench.gpu = value;
        else if (!strcmp(argv[i], "--driver"))
            bench.driver = value;
        else if (!strcmp(argv[i], "--page"))
            page = value;
        else if (!strcmp(argv[i], "--only"))
            only = value;
        else if (!strcmp(argv[i], "--dtype"))
            dtype = value;
        else {
            fprintf(stderr, "bench_gpu: what is %s?\n", argv[i]);
            return 2;
        }
    }
    peer_start(program); /* before CUDA is: a process that has it open must not fork */
    if (!open_all(!strcmp(dtype, "bf16") ? SEQPAR_DTYPE_BF16 : SEQPAR_DTYPE_F32)) return 1;
    peer_greet();
    run_cases();
    peer_stop();
    report_open(&r, "gpu",
                "\"gpu\": \"%s\", \"driver\": \"%s\", \"dtype\": \"%s\", \"tiny\": %s, "
                "\"copy_tb_per_s\": %.4f,",
                bench.gpu, bench.driver, dtype_name(), tiny ? "true" : "false",
                bench.copy_bytes_per_second * 1e-12);
    write_json(&r);
    write_page(page);
    printf("\n%s, driver %s, storage %s; ratio: peer's time over ours\n\n", bench.gpu,
           bench.driver, dtype_name());
    print_table(stdout, 0);
    return report_close(&r);
}
