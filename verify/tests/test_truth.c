/* SPDX-License-Identifier: MIT OR Unlicense */
/* The model against slow.h: values, every gradient, optimizer steps; and what must not
   change the answer, or may. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "support/run_model.h"
#include "support/layouts.h"
#include "support/own_attention.h"
#include "second/slow.h"

/* ---- documents ---- */

typedef struct corpus {
    seqpar_document *doc;
    int64_t count, vocab;
} corpus;

static int32_t *corpus_ids(const corpus *c, int64_t i) { return (int32_t *)c->doc[i].ids; }
static uint8_t *corpus_mask(const corpus *c, int64_t i) {
    return (uint8_t *)c->doc[i].loss_mask;
}

/* Document 0 is long and wholly supervised, 1 has one token, every fourth is masked, the
   others have holes; token id 0 is everywhere. */
static corpus corpus_new(int64_t count, int64_t shortest, int64_t longest, int64_t vocab) {
    corpus c = {calloc((size_t)count, sizeof *c.doc), count, vocab};
    int64_t i, t;
    for (i = 0; i < count; i++) {
        seqpar_document *d = &c.doc[i];
        d->tokens = i == 0 ? longest : i == 1 ? 1 : test_integer(shortest, longest);
        d->unit = i;
        d->ids = calloc((size_t)d->tokens, sizeof *d->ids);
        d->loss_mask = calloc((size_t)d->tokens, 1);
        for (t = 0; t < d->tokens; t++)
            corpus_ids(&c, i)[t] = (int32_t)(t % 5 == 2 ? 0 : test_integer(0, vocab - 1));
        for (t = 0; t < d->tokens; t++)
            corpus_mask(&c, i)[t] = i == 0 || (i % 4 != 3 && test_integer(0, 5) > 0);
    }
    return c;
}

static void corpus_free(corpus *c) {
    int64_t i;
    for (i = 0; i < c->count; i++) {
        free(corpus_ids(c, i));
        free(corpus_mask(c, i));
    }
    free(c->doc);
}

static void corpus_pack(const corpus *c, seqpar_batch *batch, seqpar_pack_desc desc) {
    seqpar_error error = {0};
    desc.vocab = c->vocab;
    desc.keep_masked = 1;
    if (seqpar_pack(&error, batch, c->doc, c->count, &desc)) {
        fprintf(stderr, "%s\n", error.text);
        exit(2);
    }
}

/* ---- one model as the library and as slow.h see it ---- */

enum { MOST_TENSORS = 80, QUANTITIES = 3 + MOST_TENSORS };

typedef struct truth {
    model_task task;
    slow_config config;
    slow_tensor table[MOST_TENSORS];
    /* of the same tensor in the library's parameters, which have gaps */
    int64_t offset[MOST_TENSORS];
    int64_t tensors, parameters, elements;
    slow_row *row;
    int32_t *ids, *targets;   /* by global token, from the documents */
    double *dense, *start;    /* parameters without and with gaps, exact in fp32 */
    double *seeds;            /* entropy seeds by global token */
    double noise[QUANTITIES]; /* see measure_noise */
} truth;

/* Every third model is plain; lengths are such that texts of tens of tokens reach all branches. */
static void random_rope(int64_t i, slow_config *c) {
    static const int types[] = {SLOW_ROPE_PLAIN, SLOW_ROPE_LLAMA3, SLOW_ROPE_YARN,
                                SLOW_ROPE_PLAIN, SLOW_ROPE_LINEAR, SLOW_ROPE_YARN};
    c->rope = types[i % 6];
    c->rope_factor = 1 + (double)test_integer(0, 28) / 4;
    c->rope_first = (double)test_integer(6, 40);
    c->rope_low = 0.3 + (double)test_integer(0, 8) / 8;
    c->rope_high = c->rope_low + 0.2 + (double)test_integer(0, 24) / 8;
    c->rope_attention = i % 4 ? 0 : 0.5 + (double)test_integer(0, 8) / 8;
    c->rope_exact = i % 5 == 0;
    c->window = i % 4 == 1 ? test_integer(2, 9) : 0;
}

/* What the families have beyond a plain Llama, and what none of them has together. */
static void random_parts(int64_t i, slow_config *c) {
    c->no_rope_every = i % 4 == 3 ? test_integer(1, 2) : 0;
    c->qk_norm = i % 7 < 3;
    /* keys that do not turn and are not normed: their bias adds the same to all scores of a query,
       so its gradient is nothing but rounding */
    c->qkv_bias = i % 3 == 1 && (!c->no_rope_every || c->qk_norm);
    c->o_bias = i % 6 == 1;
    c->mlp_bias = i % 5 == 2;
    c->window_from = i % 8 == 5 ? 1 : 0;
    if (i % 4 != 2) return;
    c->experts = test_integer(2, 4);
    c->experts_per_token = test_integer(1, 2);
    c->expert_intermediate = test_integer(2, 4);
    c->sparse_every = i % 8 == 6 ? 2 : 0;
    /* the share of one is 1, whatever the router says */
    c->topk_norm = i % 3 != 0 && c->experts_per_token > 1;
}

static slow_config random_config(int64_t i, int64_t most_parameters) {
    int64_t scale = most_parameters > 2000 ? 4 : 1;
    slow_config c = {.layers = 1 + i / 2 % 2,
                     .tied = i % 2,
                     .rope_theta = i % 3 ? 10000 : 500,
                     .rms_eps = i % 3 ? 1e-5 : 1e-3};
    random_parts(i, &c);
    do {
        c.kv_heads = test_integer(1, 2);
        c.heads = c.kv_heads * test_integer(1, 3);
        c.head_dim = (int64_t[]){6, 10, 14, 18}[test_integer(0, scale > 1 ? 3 : 1)];
        c.hidden = test_integer(5, 11 * scale);
        c.intermediate = test_integer(3, 13 * scale);
        c.vocab = test_integer(5, 23 * scale);
    } while (slow_parameters(&c, NULL) > most_parameters);
    random_rope(i, &c);
    return c;
}

static seqpar_llama_rope library_rope(const slow_config *c) {
    static const int types[] = {[SLOW_ROPE_PLAIN] = SEQPAR_ROPE_DEFAULT,
                                [SLOW_ROPE_LINEAR] = SEQPAR_ROPE_LINEAR,
                                [SLOW_ROPE_LLAMA3] = SEQPAR_ROPE_LLAMA3,
                                [SLOW_ROPE_YARN] = SEQPAR_ROPE_YARN};
    return (seqpar_llama_rope){.type = types[c->rope],
                               .factor = c->rope_factor,
                               .first_positions = c->rope_first,
                               .low = c->rope_low,
                               .high = c->rope_high,
                               .attention_factor = c->rope_attention,
                               .exact = c->rope_exact};
}

/* Where the library has 0 for a default, it is asked for the default. */
static seqpar_llama_config library_config(const slow_config *c) {
    seqpar_llama_config l = {c->layers,
                             c->hidden,
                             c->heads,
                             c->kv_heads,
                             c->head_dim,
                             c->intermediate,
                             c->vocab,
                             c->rope_theta,
                             c->rms_eps,
                             c->tied,
                             .rope = library_rope(c)};
    l.window = c->window;
    l.window_from = c->window_from;
    l.no_rope_every = c->no_rope_every;
    l.qkv_bias = c->qkv_bias;
    l.o_bias = c->o_bias;
    l.mlp_bias = c->mlp_bias;
    l.qk_norm = c->qk_norm;
    l.experts = c->experts;
    l.experts_per_token = c->experts_per_token;
    l.expert_intermediate = c->expert_intermediate;
    l.sparse_every = c->sparse_every;
    l.topk_norm = c->topk_norm;
    if (c->rope_theta == 10000) l.rope_theta = 0;
    if (c->rms_eps == 1e-5) l.rms_eps = 0;
    return l;
}

static void match_tensors(truth *t, const seqpar_llama *model) {
    int64_t i, j;
    test_expect(model->tensor_count == t->tensors, "the library has %lld tensors, slow.h %lld",
                (long long)model->tensor_count, (long long)t->tensors);
    for (i = 0; i < t->tensors; i++) {
        const slow_tensor *want = &t->table[i];
        for (j = 0; j < model->tensor_count && strcmp(model->tensors[j].name, want->name);
             j++) {
        }
        if (!test_expect(j < model->tensor_count, "the library has no tensor %s", want->name))
            exit(2);
        test_expect(model->tensors[j].rows == want->rows &&
                        model->tensors[j].cols == want->cols,
                    "%s has another shape", want->name);
        t->offset[i] = model->tensors[j].offset;
    }
    t->elements = model->elements;
}

static void find_tensors(truth *t) {
    seqpar_comm *self = seqpar_comm_self();
    seqpar_device *device = seqpar_device_reference();
    seqpar_ctx ctx;
    seqpar_llama model;
    t->tensors = slow_tensors(&t->config);
    t->parameters = slow_parameters(&t->config, t->table);
    seqpar_ctx_open(&ctx, self, device, 1);
    if (seqpar_llama_open(&ctx, &model, &t->task.config)) {
        fprintf(stderr, "%s\n", ctx.error->text);
        exit(2);
    }
    match_tensors(t, &model);
    seqpar_llama_close(&ctx, &model);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(self);
}

static void drop_gaps(const truth *t, double *dense, const double *library) {
    int64_t i;
    for (i = 0; i < t->tensors; i++)
        memcpy(dense + t->table[i].offset, library + t->offset[i],
               (size_t)(t->table[i].rows * t->table[i].cols) * sizeof *dense);
}

static void make_gaps(const truth *t, double *library, const double *dense) {
    int64_t i;
    for (i = 0; i < t->tensors; i++)
        memcpy(library + t->offset[i], dense + t->table[i].offset,
               (size_t)(t->table[i].rows * t->table[i].cols) * sizeof *dense);
}

/* Weights that keep every layer's output near 1, so that no part of the model is too small
   to be seen. */
static void random_parameters(truth *t) {
    int64_t i, j;
    t->dense = calloc((size_t)t->parameters, sizeof *t->dense);
    t->start = calloc((size_t)t->elements, sizeof *t->start);
    for (i = 0; i < t->tensors; i++) {
        const slow_tensor *w = &t->table[i];
        double spread = w->rows == 1 ? 0.3 : i == 0 ? 0.8 : 1 / sqrt((double)w->cols);
        for (j = 0; j < w->rows * w->cols; j++)
            t->dense[w->offset + j] = (float)((w->rows == 1) + spread * test_normal());
    }
    make_gaps(t, t->start, t->dense);
    t->task.start = t->start;
}

/* A token's target is the next one of its document, if that is to be predicted. */
static void describe_document(const seqpar_document *d, int32_t *ids, int32_t *targets) {
    int64_t n;
    for (n = 0; n < d->tokens; n++) {
        ids[n] = d->ids[n];
        targets[n] = n + 1 < d->tokens && d->loss_mask[n + 1] ? d->ids[n + 1] : SLOW_IGNORED;
    }
}

/* Which document went where is the packer's business; what it says there is not. */
static void describe_rows(truth *t, const corpus *c) {
    int64_t r, d, base, tokens = task_tokens(&t->task);
    t->row = calloc((size_t)t->task.batch.rows + 1, sizeof *t->row);
    t->ids = calloc((size_t)tokens, sizeof *t->ids);
    t->targets = calloc((size_t)tokens, sizeof *t->targets);
    for (r = 0; r < t->task.batch.rows; r++) {
        const seqpar_row *row = &t->task.batch.row[r];
        base = row_base(&t->task, r);
        for (d = 0; d < row->docs; d++)
            describe_document(&c->doc[row->doc_source[d]], t->ids + base + row->cu_seqlens[d],
                              t->targets + base + row->cu_seqlens[d]);
        t->row[r] = (slow_row){.tokens = row->tokens,
                               .docs = row->docs,
                               .cu_seqlens = row->cu_seqlens,
                               .ids = t->ids + base,
                               .targets = t->targets + base};
    }
}

static void truth_open(truth *t, const slow_config *config, const corpus *c,
                       seqpar_pack_desc desc) {
    memset(t, 0, sizeof *t);
    t->config = *config;
    t->task.config = library_config(config);
    t->task.lr = 0.01;
    t->task.max_norm = 0.3;
    t->task.decay = 0.1;
    corpus_pack(c, &t->task.batch, desc);
    t->task.objective.count = t->task.batch.counts.supervised;
    find_tensors(t);
    random_parameters(t);
    describe_rows(t, c);
}

static void truth_close(truth *t) {
    seqpar_batch_free(&t->task.batch);
    free(t->dense);
    free(t->start);
    free(t->row);
    free(t->seeds);
    free(t->ids);
    free(t->targets);
}

/* Label smoothing, z-loss and entropy seeds, each on some of the models. */
static void vary_objective(truth *t, int64_t i) {
    int64_t n, tokens = task_tokens(&t->task), r;
    t->task.objective.label_smoothing = i % 3 == 0 ? 0.1 : 0;
    t->task.objective.z_loss = i % 4 == 0 ? 0.02 : 0;
    t->task.balance = t->config.experts && i % 5 ? 0.5 : 0;
    if (i % 3 != 1) return;
    t->seeds = calloc((size_t)tokens, sizeof *t->seeds);
    for (n = 0; n < tokens; n++) t->seeds[n] = (float)(0.1 * test_normal());
    for (r = 0; r < t->task.batch.rows; r++)
        t->row[r].entropy_seeds = t->seeds + row_base(&t->task, r);
    t->task.entropy_seeds = t->seeds;
}

static void random_truth(truth *t, int64_t i, int64_t most_parameters, int64_t documents,
                         int64_t longest) {
    slow_config config = random_config(i, most_parameters);
    corpus c = corpus_new(documents, 2, longest, config.vocab);
    truth_open(t, &config, &c,
               (seqpar_pack_desc){.pack_len = 2 * longest, .cell = i % 3 ? 3 : 7});
    vary_objective(t, i);
    corpus_free(&c);
}

static slow_problem truth_problem(const truth *t) {
    const seqpar_sft_desc *o = &t->task.objective;
    return (slow_problem){&t->config,
                          t->task.batch.rows,
                          t->row,
                          {o->label_smoothing, o->z_loss, (double)o->count, t->task.balance}};
}

/* ---- ways ---- */

static const model_way plain_reference = {
    .dp = 1, .sp = 1, .accumulation = 1, .threads = 1, .steps = 1, .reference = 1};
static const model_way plain_cpu = {
    .dp = 1, .sp = 1, .accumulation = 1, .threads = 1, .steps = 1};

static model_way random_way(int reference, int64_t kv_heads) {
    model_way w = reference ? plain_reference : plain_cpu;
    w.dp = test_integer(1, 3);
    w.sp = test_integer(w.dp == 1 ? 2 : 1, 4);
    w.accumulation = test_integer(1, 2);
    w.layout = (int)test_integer(0, SEQPAR_LAYOUT_COUNT - 1);
    w.schedule = (int)test_integer(0, SEQPAR_SCHEDULE_COUNT - 1);
    w.heads_k_stride = test_integer(0, 1) ? kv_heads : 1;
    w.zero_stage = (int)test_integer(0, 2);
    w.recompute = (int)test_integer(0, 1);
    w.vocab_rows = (int64_t[]){0, 1, 5}[test_integer(0, 2)];
    return w;
}

static const char *way_name(const model_way *w) {
    static char name[160];
    snprintf(name, sizeof name, "%s D=%lld P=%lld A=%lld %s %s", w->reference ? "fp64" : "fp32",
             (long long)w->dp, (long long)w->sp, (long long)w->accumulation,
             seqpar_layout_name(w->layout), seqpar_schedule_name(w->schedule));
    return name;
}

/* ---- what is compared: 0 logits, 1 log-probs, 2 loss, 3.. the gradient of each tensor ---- */

typedef struct outcome {
    double *logits, *logp, *gradient, loss;
} outcome;

static outcome outcome_new(const truth *t) {
    int64_t tokens = task_tokens(&t->task);
    outcome o = {calloc((size_t)(tokens * t->config.vocab), sizeof(double)),
                 calloc((size_t)tokens, sizeof(double)),
                 calloc((size_t)t->parameters, sizeof(double)), 0};
    return o;
}

static void outcome_free(outcome *o) {
    free(o->logits);
    free(o->logp);
    free(o->gradient);
}

/* The loss that a trainer reports leaves the entropy seeds out. */
static double slow_reported_loss(const truth *t) {
    slow_problem p = truth_problem(t);
    slow_row *rows = calloc((size_t)p.rows, sizeof *rows);
    double loss;
    int64_t r;
    memcpy(rows, p.row, (size_t)p.rows * sizeof *rows);
    for (r = 0; r < p.rows; r++) rows[r].entropy_seeds = NULL;
    p.row = rows;
    loss = slow_loss(&p, t->dense);
    free(rows);
    return loss;
}

static outcome outcome_slow(const truth *t) {
    slow_problem p = truth_problem(t);
    outcome o = outcome_new(t);
    double *unused = calloc(2 * (size_t)task_tokens(&t->task), sizeof *unused);
    int64_t r;
    for (r = 0; r < p.rows; r++) {
        int64_t base = row_base(&t->task, r);
        slow_logits_real(&t->config, t->dense, &t->row[r], o.logits + base * t->config.vocab);
        slow_statistics(&t->config, t->dense, &t->row[r], o.logp + base, unused,
                        unused + task_tokens(&t->task));
    }
    free(unused);
    o.loss = slow_reported_loss(t);
    slow_gradient(&p, t->dense, o.gradient);
    return o;
}

static outcome outcome_library(const truth *t, const model_result *r) {
    outcome o = outcome_new(t);
    memcpy(o.logits, r->logits, (size_t)(r->tokens * r->vocab) * sizeof *o.logits);
    memcpy(o.logp, r->logp, (size_t)r->tokens * sizeof *o.logp);
    drop_gaps(t, o.gradient, r->gradient);
    o.loss = r->loss;
    return o;
}

static const char *quantity_name(const truth *t, int64_t q) {
    static const char *const first[] = {"logits", "log-probs", "loss"};
    return q < 3 ? first[q] : t->table[q - 3].name;
}

/* Relative L2 distances; returns how many. */
static int64_t distances(const truth *t, const outcome *got, const outcome *want,
                         double *distance) {
    int64_t i, tokens = task_tokens(&t->task);
    distance[0] = test_distance(got->logits, want->logits, tokens * t->config.vocab);
    distance[1] = test_distance(got->logp, want->logp, tokens);
    distance[2] = test_distance(&got->loss, &want->loss, 1);
    for (i = 0; i < t->tensors; i++)
        distance[3 + i] = test_distance(got->gradient + t->table[i].offset,
                                        want->gradient + t->table[i].offset,
                                        t->table[i].rows * t->table[i].cols);
    return 3 + t->tensors;
}

static int64_t result_distances(const truth *t, const model_result *r, const outcome *want,
                                double *distance) {
    outcome got = outcome_library(t, r);
    int64_t count = distances(t, &got, want, distance);
    outcome_free(&got);
    return count;
}

/* Relative L2 error against slow.h. fp64: the worst of seeds 1..40 is 1.1e-13. fp32: as a
   multiple of what rounding the parameters alone would do (measure_noise); of plain Llamas the
   worst is 5.5, with norms of q and k, whose gradients are small differences, 30 (seeds 1..40).
   The limit is one and a half times that; test_fp32_limit shows that a fault of 1e-4 is beyond it
   (58). A bias of k adds nearly the same to all scores of a query: its gradient is what is left of
   sums that cancel, and as uncertain (77). */
#define FP64_LIMIT     1e-12
#define FP32_TIMES     45
#define KEY_BIAS_TIMES 3

static double times_of(const truth *t, int64_t q) {
    return strstr(quantity_name(t, q), "k_proj.bias") ? KEY_BIAS_TIMES * FP32_TIMES
                                                      : FP32_TIMES;
}

/* Each quantity's error over its limit, of the worst; NaN and a failed run are infinitely
   bad. */
static double expect_close(const truth *t, const model_result *r, const outcome *want,
                           const model_way *way) {
    double distance[QUANTITIES], worst = 0;
    int64_t count, q;
    if (!test_expect(!r->status, "%s: %s %s", way_name(way), seqpar_status_name(r->status),
                     r->error.text))
        return HUGE_VAL;
    count = result_distances(t, r, want, distance);
    for (q = 0; q < count; q++) {
        double limit = way->reference ? FP64_LIMIT : times_of(t, q) * t->noise[q];
        test_expect(distance[q] <= limit, "%s: %s is off by %.2e, limit %.1e", way_name(way),
                    quantity_name(t, q), distance[q], limit);
        worst = fmax(worst, distance[q] / limit);
    }
    return worst;
}

/* What fp32 cannot avoid: the model's answer to a relative 2^-24 in its parameters (root
   mean square of four draws on the reference device), and the rounding of the answer. A
   badly conditioned model may err more, the others may not. */
static void measure_noise(truth *t, const outcome *want) {
    double distance[QUANTITIES], squares[QUANTITIES] = {0};
    int64_t draw, i, q, count = 0;
    for (draw = 0; draw < 4; draw++) {
        model_result r;
        for (i = 0; i < t->elements; i++) t->start[i] *= 1 + ldexp(test_normal(), -24);
        model_run(&t->task, &plain_reference, &r);
        count = result_distances(t, &r, want, distance);
        for (q = 0; q < count; q++) squares[q] += distance[q] * distance[q] / 4;
        model_result_free(&r);
        make_gaps(t, t->start, t->dense);
    }
    for (q = 0; q < count; q++) t->noise[q] = sqrt(squares[q]) + ldexp(1, -24);
}

/* ---- 1: tiny models, every gradient ---- */

/* Three steps by slow.h from the first gradient on; gains do not decay. */
static void slow_three_steps(const truth *t, const double *first_gradient, double *theta) {
    slow_problem p = truth_problem(t);
    double *g = calloc(3 * (size_t)t->parameters, sizeof *g);
    double *m = g + t->parameters, *v = m + t->parameters;
    int64_t step, i;
    memcpy(theta, t->dense, (size_t)t->parameters * sizeof *theta);
    for (step = 1; step <= 3; step++) {
        if (step == 1)
            memcpy(g, first_gradient, (size_t)t->parameters * sizeof *g);
        else
            slow_gradient(&p, theta, g);
        slow_clip(t->parameters, t->task.max_norm, g);
        for (i = 0; i < t->tensors; i++) {
            slow_adamw a = {.9, .95, 1e-8, t->table[i].rows > 1 ? t->task.decay : 0};
            int64_t at = t->table[i].offset;
            slow_adamw_step(&a, t->task.lr, step, t->table[i].rows * t->table[i].cols, g + at,
                            m + at, v + at, theta + at);
        }
    }
    free(g);
}

static double expect_parameters(const truth *t, const model_result *r, const double *theta,
                                double limit, const char *what) {
    double *got = calloc((size_t)t->parameters, sizeof *got), worst = 0;
    int64_t i;
    drop_gaps(t, got, r->params);
    for (i = 0; i < t->tensors; i++) {
        double d = test_distance(got + t->table[i].offset, theta + t->table[i].offset,
                                 t->table[i].rows * t->table[i].cols);
        test_expect(d <= limit, "%s: after 3 steps %s is off by %.2e", what, t->table[i].name,
                    d);
        worst = fmax(worst, d);
    }
    free(got);
    return worst;
}

typedef struct tiny_worst {
    double values, steps, fp32;
} tiny_worst;

static void check_tiny_way(const truth *t, model_way way, const outcome *want,
                           const double *theta, tiny_worst *worst) {
    model_result r;
    way.steps = way.reference ? 3 : 1;
    model_run(&t->task, &way, &r);
    if (way.reference) {
        worst->values = fmax(worst->values, FP64_LIMIT * expect_close(t, &r, want, &way));
        worst->steps = fmax(worst->steps,
                            expect_parameters(t, &r, theta, 1e-11, way_name(&way)));
        test_expect(r.norm > t->task.max_norm, "the clip did not act (norm %g)", r.norm);
    } else
        worst->fp32 = fmax(worst->fp32, FP32_TIMES * expect_close(t, &r, want, &way));
    model_result_free(&r);
}

static void check_tiny(int64_t i, tiny_worst *worst) {
    truth t;
    outcome want;
    double *theta;
    random_truth(&t, i, i % 5 ? 1000 : 2000, 5, 9);
    want = outcome_slow(&t);
    theta = calloc((size_t)t.parameters, sizeof *theta);
    slow_three_steps(&t, want.gradient, theta);
    measure_noise(&t, &want);
    check_tiny_way(&t, plain_reference, &want, theta, worst);
    check_tiny_way(&t, random_way(1, t.config.kv_heads), &want, theta, worst);
    check_tiny_way(&t, plain_cpu, &want, theta, worst);
    check_tiny_way(&t, random_way(0, t.config.kv_heads), &want, theta, worst);
    test_end("tiny_%lld %lld parameters, heads %lld/%lld of %lld, %s", (long long)i,
             (long long)t.parameters, (long long)t.config.heads, (long long)t.config.kv_heads,
             (long long)t.config.head_dim, t.config.tied ? "tied" : "untied");
    free(theta);
    outcome_free(&want);
    truth_close(&t);
}

static void test_tiny(void) {
    tiny_worst worst = {0};
    int64_t i;
    for (i = 0; i < 20; i++) check_tiny(i, &worst);
    printf("# worst: fp64 %.1e, after 3 steps %.1e, fp32 %.1f times its noise\n", worst.values,
           worst.steps, worst.fp32);
}

/* One tensor is wrong by a relative 1e-4: somewhere the fp32 limit must be passed. */
static double faulty_tensor(truth *t, const outcome *want, int64_t tensor) {
    double distance[QUANTITIES], worst = 0;
    int64_t i, count;
    model_result r;
    for (i = 0; i < t->table[tensor].rows * t->table[tensor].cols; i++)
        t->start[t->offset[tensor] + i] *= 1 + 1e-4 * test_normal();
    model_run(&t->task, &plain_cpu, &r);
    count = result_distances(t, &r, want, distance);
    for (i = 0; i < count; i++) worst = fmax(worst, distance[i] / t->noise[i]);
    model_result_free(&r);
    make_gaps(t, t->start, t->dense);
    return worst;
}

static int is_idle(const truth *t, const outcome *want, int64_t tensor) {
    int64_t i = 0, count = t->table[tensor].rows * t->table[tensor].cols;
    while (i < count && want->gradient[t->table[tensor].offset + i] == 0) i++;
    return i == count;
}

static void test_fp32_limit(void) {
    double least = HUGE_VAL;
    int64_t model, i;
    for (model = 0; model < 4; model++) {
        truth t;
        outcome want;
        random_truth(&t, model, 1000, 5, 9);
        want = outcome_slow(&t);
        measure_noise(&t, &want);
        for (i = 0; i < t.tensors; i++) {
            /* an expert that no token goes to does nothing */
            if (is_idle(&t, &want, i)) continue;
            double times = faulty_tensor(&t, &want, i);
            test_expect(times > FP32_TIMES,
                        "a fault of 1e-4 in %s is only %.1f times the noise", t.table[i].name,
                        times);
            least = fmin(least, times);
        }
        outcome_free(&want);
        truth_close(&t);
    }
    printf("# a fault of 1e-4 in any one tensor is at least %.0f times the noise\n", least);
    test_end("fp32_limit_catches_1e-4");
}

/* ---- 2: larger models, some directions ---- */

/* |<g, d> - truth| / (|g| |d|), g and d those of one tensor or of all. The worst of 22 runs
   of 1000 directions is 2.4e-14 and 5.1e-6. */
#define DIRECTION_FP64 1e-12
#define DIRECTION_FP32 2e-5

/* The whole space, or one random tensor: there an error cannot hide behind the others. */
static void random_direction(const truth *t, int64_t number, double *direction) {
    const slow_tensor *one = &t->table[test_integer(0, t->tensors - 1)];
    int64_t i, begin = number ? one->offset : 0;
    int64_t end = number ? begin + one->rows * one->cols : t->parameters;
    memset(direction, 0, (size_t)t->parameters * sizeof *direction);
    for (i = begin; i < end; i++) direction[i] = test_normal();
}

static double direction_error(const double *gradient, const double *direction, int64_t count,
                              double want) {
    double dot = 0, g = 0, d = 0;
    int64_t i;
    for (i = 0; i < count; i++) {
        if (direction[i] == 0) continue;
        dot += gradient[i] * direction[i];
        g += gradient[i] * gradient[i];
        d += direction[i] * direction[i];
    }
    return dot == dot ? fabs(dot - want) / (sqrt(g * d) + 1e-300) : HUGE_VAL;
}

static void dense_gradient(const truth *t, int reference, int64_t i, double *gradient) {
    model_way plain = reference ? plain_reference : plain_cpu,
              way = i % 2 ? random_way(reference, t->config.kv_heads) : plain;
    model_result r;
    model_run(&t->task, &way, &r);
    test_expect(!r.status, "%s: %s", way_name(&way), r.error.text);
    drop_gaps(t, gradient, r.gradient);
    model_result_free(&r);
}

static void check_directions(int64_t i, double *worst) {
    truth t;
    slow_problem p;
    double *gradient, *direction;
    int64_t n;
    random_truth(&t, i, 30000, test_integer(3, 7), 16);
    p = truth_problem(&t);
    gradient = calloc(3 * (size_t)t.parameters, sizeof *gradient);
    direction = gradient + 2 * t.parameters;
    dense_gradient(&t, 1, i, gradient);
    dense_gradient(&t, 0, i, gradient + t.parameters);
    for (n = 0; n < 5; n++) {
        double want, fp64, fp32;
        random_direction(&t, n, direction);
        want = slow_directional(&p, t.dense, direction);
        fp64 = direction_error(gradient, direction, t.parameters, want);
        fp32 = direction_error(gradient + t.parameters, direction, t.parameters, want);
        test_expect(fp64 <= DIRECTION_FP64, "model %lld, direction %lld: fp64 is off by %.2e",
                    (long long)i, (long long)n, fp64);
        test_expect(fp32 <= DIRECTION_FP32, "model %lld, direction %lld: fp32 is off by %.2e",
                    (long long)i, (long long)n, fp32);
        worst[0] = fmax(worst[0], fp64);
        worst[1] = fmax(worst[1], fp32);
    }
    free(gradient);
    truth_close(&t);
}

static void test_directions(int64_t models) {
    double worst[2] = {0};
    int64_t i;
    for (i = 0; i < models; i++) check_directions(i, worst);
    printf("# worst over directions: fp64 %.1e, fp32 %.1e\n", worst[0], worst[1]);
    test_end("directions: 5 through each of %lld models", (long long)models);
}

/* ---- 3: layouts that cut cells change the order of sums, not the size of the error ---- */

enum { CUTTING_SEEDS = 20, CUTTING_WAYS = 6 };
static const int64_t cutting_ranks[CUTTING_WAYS] = {1, 2, 3, 4, 5, 8};
static double cutting_error[CUTTING_WAYS][QUANTITIES][CUTTING_SEEDS];

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(const double *values, int64_t count) {
    double sorted[CUTTING_SEEDS];
    memcpy(sorted, values, (size_t)count * sizeof *sorted);
    qsort(sorted, (size_t)count, sizeof *sorted, by_size);
    return (sorted[(count - 1) / 2] + sorted[count / 2]) / 2;
}

static void cutting_truth(truth *t) {
    slow_config config = {.layers = 2,
                          .hidden = 26,
                          .heads = 6,
                          .kv_heads = 2,
                          .head_dim = 10,
                          .intermediate = 39,
                          .vocab = 53,
                          .rope_theta = 10000,
                          .rms_eps = 1e-5};
    corpus c = corpus_new(12, 6, 70, config.vocab);
    truth_open(t, &config, &c, (seqpar_pack_desc){.pack_len = 150});
    t->task.objective.label_smoothing = 0.1;
    t->task.objective.z_loss = 0.01;
    corpus_free(&c);
}

static void measure_cutting(truth *t, int layout, int64_t seed) {
    model_result exact, r;
    double distance[QUANTITIES];
    outcome want;
    int64_t w, q, count;
    model_run(&t->task, &plain_reference, &exact);
    want = outcome_library(t, &exact);
    for (w = 0; w < CUTTING_WAYS; w++) {
        model_way way = plain_cpu;
        way.sp = cutting_ranks[w];
        way.layout = way.sp > 1 ? layout : SEQPAR_LAYOUT_CONTIGUOUS;
        way.schedule = (int)(seed % SEQPAR_SCHEDULE_COUNT);
        model_run(&t->task, &way, &r);
        test_expect(!r.status, "%s: %s", way_name(&way), r.error.text);
        count = result_distances(t, &r, &want, distance);
        for (q = 0; q < count; q++) cutting_error[w][q][seed] = distance[q];
        model_result_free(&r);
    }
    outcome_free(&want);
    model_result_free(&exact);
}

/* `worst` takes the largest ratio to one rank and, last, that of 8 ranks to 2. */
static void expect_cutting_rule(const truth *t, int64_t q, double worst[2]) {
    double middle[CUTTING_WAYS], growth;
    int64_t w;
    for (w = 0; w < CUTTING_WAYS; w++) middle[w] = median(cutting_error[w][q], CUTTING_SEEDS);
    for (w = 1; w < CUTTING_WAYS; w++) {
        test_expect(middle[w] <= 2 * middle[0],
                    "%s at P=%lld: median error %.2e, one rank has %.2e", quantity_name(t, q),
                    (long long)cutting_ranks[w], middle[w], middle[0]);
        worst[0] = fmax(worst[0], middle[w] / middle[0]);
    }
    growth = middle[CUTTING_WAYS - 1] / middle[1];
    test_expect(growth <= 1.5, "%s: the median error grows from %.2e at P=2 to %.2e at P=8",
                quantity_name(t, q), middle[1], middle[CUTTING_WAYS - 1]);
    worst[1] = fmax(worst[1], growth);
}

static void test_cutting(int layout) {
    truth t;
    double worst[2] = {0};
    int64_t seed, q;
    for (seed = 0; seed < CUTTING_SEEDS; seed++) {
        if (seed) truth_close(&t);
        cutting_truth(&t);
        measure_cutting(&t, layout, seed);
    }
    for (q = 0; q < 3 + t.tensors; q++)
        /* the loss is one number: its error may be 0 by chance */
        if (q != 2) expect_cutting_rule(&t, q, worst);
    printf(
        "# %s: median error at most %.2f times that of one rank; P=8 at most %.2f times P=2\n",
        seqpar_layout_name(layout), worst[0], worst[1]);
    test_end("%s_error_rule over %d seeds", seqpar_layout_name(layout), CUTTING_SEEDS);
    truth_close(&t);
}

/* ---- 4: what must not matter ---- */

static const slow_config small_config = {.layers = 2,
                                         .hidden = 13,
                                         .heads = 6,
                                         .kv_heads = 2,
                                         .head_dim = 6,
                                         .intermediate = 17,
                                         .vocab = 31,
                                         .rope_theta = 10000,
                                         .rms_eps = 1e-5};

/* First token of an input document in global order. */
static int64_t document_begin(const model_task *task, int64_t source) {
    int64_t r, d;
    for (r = 0; r < task->batch.rows; r++)
        for (d = 0; d < task->batch.row[r].docs; d++)
            if (task->batch.row[r].doc_source[d] == source)
                return row_base(task, r) + task->batch.row[r].cu_seqlens[d];
    return -1;
}

/* From global token `changed` to `end` logits differ; everywhere else they have the same
   bits. */
static void expect_isolated(const model_result *a, const model_result *b, int64_t changed,
                            int64_t end, const char *what) {
    int64_t t;
    test_expect(!a->status && !b->status, "%s: %s%s", what, a->error.text, b->error.text);
    for (t = 0; t < a->tokens; t++) {
        int same = !memcmp(a->logits + t * a->vocab, b->logits + t * a->vocab,
                           (size_t)a->vocab * sizeof *a->logits);
        if (t >= changed && t < end)
            test_expect(!same, "%s: token %lld should have changed", what, (long long)t);
        else
            test_expect(same, "%s: token %lld changed, the disturbed ones are %lld..%lld", what,
                        (long long)t, (long long)changed, (long long)end - 1);
    }
}

static void check_isolation(const corpus *c, truth *t, int64_t document, const model_way *way) {
    model_result before, after;
    seqpar_batch original = t->task.batch;
    int64_t position = test_integer(0, c->doc[document].tokens - 1);
    int64_t begin = document_begin(&t->task, document), n;
    int32_t *ids = corpus_ids(c, document), old = ids[position];
    model_run(&t->task, way, &before);
    ids[position] = (int32_t)((old + test_integer(1, c->vocab - 1)) % c->vocab);
    corpus_pack(c, &t->task.batch, (seqpar_pack_desc){.pack_len = 47, .cell = 5});
    model_run(&t->task, way, &after);
    n = c->doc[document].tokens;
    expect_isolated(&before, &after, begin + position, begin + n, way_name(way));
    ids[position] = old;
    seqpar_batch_free(&t->task.batch);
    t->task.batch = original;
    model_result_free(&before);
    model_result_free(&after);
}

static void test_isolation(void) {
    corpus c = corpus_new(9, 2, 20, small_config.vocab);
    truth t;
    int64_t i;
    truth_open(&t, &small_config, &c, (seqpar_pack_desc){.pack_len = 47, .cell = 5});
    test_expect(t.task.batch.row[0].docs > 1, "the first row has one document only");
    for (i = 0; i < 36; i++) {
        model_way w = i % 2 ? plain_cpu : plain_reference;
        w.sp = 1 + i % 5;
        w.layout = (int)(i % SEQPAR_LAYOUT_COUNT);
        w.schedule = (int)(i / 2 % SEQPAR_SCHEDULE_COUNT);
        check_isolation(&c, &t, i % c.count, &w);
    }
    test_end("documents_do_not_see_each_other nor what comes later");
    truth_close(&t);
    corpus_free(&c);
}

/* The same documents in another order; source[i] is the number that document i had before. */
static corpus permuted(const corpus *c, int64_t *source) {
    corpus p = {calloc((size_t)c->count, sizeof *p.doc), c->count, c->vocab};
    int64_t i;
    seqpar_shuffle(source, c->count, test_random(), 0);
    for (i = 0; i < c->count; i++) {
        p.doc[i] = c->doc[source[i]];
        p.doc[i].unit = i;
    }
    return p;
}

static void expect_permuted(const model_task *task, const model_result *r,
                            const model_task *other_task, const model_result *other,
                            const corpus *p, const int64_t *source, double limit,
                            const char *what) {
    int64_t i, v = r->vocab;
    double d;
    test_expect(!r->status && !other->status, "%s: %s%s", what, r->error.text,
                other->error.text);
    for (i = 0; i < p->count; i++) {
        d = test_distance(other->logits + document_begin(other_task, i) * v,
                          r->logits + document_begin(task, source[i]) * v,
                          p->doc[i].tokens * v);
        test_expect(d <= limit,
                    "%s: logits of document %lld moved by %.2e when its row was reordered",
                    what, (long long)source[i], d);
    }
    d = test_distance(other->gradient, r->gradient, r->elements);
    test_expect(d <= limit, "%s: gradients moved by %.2e", what, d);
}

static void test_equivariance(void) {
    corpus c = corpus_new(8, 2, 20, small_config.vocab);
    truth t;
    int64_t i;
    truth_open(&t, &small_config, &c,
               (seqpar_pack_desc){.pack_len = 300, .order = SEQPAR_PACK_IN_ORDER});
    for (i = 0; i < 12; i++) {
        int64_t source[8];
        corpus p = permuted(&c, source);
        model_way w = i ? random_way(i % 2, small_config.kv_heads) : plain_reference;
        model_task other_task = t.task;
        model_result before, after;
        corpus_pack(&p, &other_task.batch,
                    (seqpar_pack_desc){.pack_len = 300, .order = SEQPAR_PACK_IN_ORDER});
        model_run(&t.task, &w, &before);
        model_run(&other_task, &w, &after);
        expect_permuted(&t.task, &before, &other_task, &after, &p, source,
                        w.reference ? FP64_LIMIT : 1e-5, way_name(&w));
        seqpar_batch_free(&other_task.batch);
        model_result_free(&before);
        model_result_free(&after);
        free(p.doc);
    }
    test_end("documents_in_another_order");
    truth_close(&t);
    corpus_free(&c);
}

/* ---- unequal shares ---- */

static int64_t supervised_of(const model_task *task, const model_way *w, int64_t dp_rank,
                             int64_t sp_rank) {
    int64_t first = seqpar_part_begin(task->batch.rows, w->dp, dp_rank);
    int64_t end = seqpar_part_begin(task->batch.rows, w->dp, dp_rank + 1);
    int64_t i, t, n = 0;
    seqpar_share share;
    seqpar_split(NULL, &share, task->batch.row + first, end - first,
                 &(seqpar_split_desc){w->layout, w->sp, sp_rank});
    for (i = 0; i < share.count; i++)
        for (t = 0; t < share.pieces[i].count; t++)
            n += task->batch.row[first + share.pieces[i].row]
                     .targets[share.pieces[i].start + t * share.pieces[i].stride] !=
                 SEQPAR_IGNORE;
    seqpar_share_free(&share);
    return n;
}

/* At least one rank has no supervised token, the others have different numbers, and together
   they have all. */
static void expect_unequal(const model_task *task, const model_way *w) {
    int64_t rank, least = INT64_MAX, most = 0, sum = 0;
    for (rank = 0; rank < w->dp * w->sp; rank++) {
        int64_t n = supervised_of(task, w, rank / w->sp, rank % w->sp);
        least = n < least ? n : least;
        most = n > most ? n : most;
        sum += n;
    }
    test_expect(least == 0 && most * w->dp * w->sp > sum,
                "%s: ranks have %lld..%lld supervised tokens", way_name(w), (long long)least,
                (long long)most);
    test_expect(sum == task->objective.count,
                "%s: ranks have %lld supervised tokens together, not %lld", way_name(w),
                (long long)sum, (long long)task->objective.count);
}

/* Rows of one document: the first half of them and every fourth are masked, the others but
   for their ends. */
static corpus lopsided_corpus(int64_t count, int64_t vocab) {
    corpus c = corpus_new(count, 24, 40, vocab);
    int64_t i, t;
    for (i = 0; i < count; i++)
        for (t = 0; t < c.doc[i].tokens; t++)
            corpus_mask(&c, i)[t] = i >= count / 2 && i % 4 != 3 && t > c.doc[i].tokens - 6;
    return c;
}

static void test_unequal(void) {
    static const int64_t shapes[][2] = {{1, 3}, {2, 1}, {2, 3}, {1, 8}, {3, 2}, {4, 1}, {1, 5}};
    corpus c = lopsided_corpus(8, small_config.vocab);
    truth t;
    size_t i;
    int reference;
    truth_open(
        &t, &small_config, &c,
        (seqpar_pack_desc){.pack_len = 40, .order = SEQPAR_PACK_UNIT_PER_ROW, .cell = 3});
    for (reference = 0; reference < 2; reference++)
        for (i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            model_way one = reference ? plain_reference : plain_cpu,
                      w = random_way(reference, small_config.kv_heads);
            model_result want, got;
            w.dp = shapes[i][0];
            w.sp = shapes[i][1];
            /* else every micro-batch has rows of both halves */
            if (w.dp > 1) w.accumulation = 1;
            w.layout = layout_of_grid(w.sp > 1 ? (int64_t)i : 0);
            expect_unequal(&t.task, &w);
            model_run(&t.task, &one, &want);
            model_run(&t.task, &w, &got);
            expect_equal_runs(&got, &want, way_name(&w));
            model_result_free(&want);
            model_result_free(&got);
        }
    test_end("ranks_and_rows_without_supervised_tokens");
    truth_close(&t);
    corpus_free(&c);
}

/* The model with an attention of the user's own in fp64, on several ranks, against its own. */
static void test_own_attention(void) {
    corpus c = lopsided_corpus(5, small_config.vocab);
    truth t;
    model_result want, got;
    truth_open(&t, &small_config, &c, (seqpar_pack_desc){.pack_len = 40, .cell = 5});
    model_run(&t.task, &plain_reference, &want);
    for (int64_t sp = 1; sp <= 4; sp++) {
        own_attention own = {.storage = SEQPAR_DTYPE_F64, .sums = SEQPAR_DTYPE_F64};
        seqpar_attn_kernel kernel = {step_forward, step_backward, &own};
        model_way way = plain_reference;
        way.sp = sp;
        way.schedule = (int)(sp % SEQPAR_SCHEDULE_COUNT);
        way.recompute = sp == 3;
        way.kernel = &kernel;
        model_run(&t.task, &way, &got);
        double off = test_distance(got.gradient, want.gradient, want.elements);
        test_expect(got.status == 0, "%s", got.error.text);
        test_expect(own.calls > 0, "P=%lld: it is never called", (long long)sp);
        test_expect(off <= 1e-11, "P=%lld: the gradient is %.2e off", (long long)sp, off);
        off = fabs(got.loss - want.loss) / want.loss;
        test_expect(off <= 1e-12, "P=%lld: the loss is %.2e off", (long long)sp, off);
        model_result_free(&got);
    }
    model_result_free(&want);
    test_end("own_attention_in_the_model");
    truth_close(&t);
    corpus_free(&c);
}

/* Only targets with id 0 are supervised. */
static corpus zero_target_corpus(int64_t *count) {
    corpus c = corpus_new(7, 4, 15, small_config.vocab);
    int64_t i, t;
    for (*count = i = 0; i < c.count; i++)
        for (t = 0; t < c.doc[i].tokens; t++) {
            corpus_mask(&c, i)[t] = corpus_ids(&c, i)[t] == 0;
            *count += t > 0 && corpus_ids(&c, i)[t] == 0;
        }
    return c;
}

static void test_token_zero(void) {
    int64_t zeros, i;
    corpus c = zero_target_corpus(&zeros);
    truth t;
    outcome want;
    truth_open(&t, &small_config, &c, (seqpar_pack_desc){.pack_len = 33});
    test_expect(zeros > 5 && t.task.batch.counts.supervised == zeros,
                "%lld tokens are supervised, %lld have id 0",
                (long long)t.task.batch.counts.supervised, (long long)zeros);
    want = outcome_slow(&t);
    test_expect(want.loss > 0.1, "the loss of slow.h is %g", want.loss);
    measure_noise(&t, &want);
    for (i = 0; i < 4; i++) {
        model_way w = i < 2 ? plain_reference : random_way(i == 2, small_config.kv_heads);
        model_result r;
        w.reference = i != 3;
        model_run(&t.task, &w, &r);
        expect_close(&t, &r, &want, &w);
        model_result_free(&r);
    }
    test_end("token_id_0_counts");
    outcome_free(&want);
    truth_close(&t);
    corpus_free(&c);
}

/* ---- two batches open at a time, token weights, and the two entries of the vocab ---- */

typedef struct interleaving { /* one run of two micro-batches */
    const truth *truth;
    const double *weights; /* by global token */
    int together, reference, layout;
    int64_t sp;
    /* logp, entropy, lse, smooth by global token: with backward, before it, and again after it */
    double *values[4], *early[4], *late[4];
    double *gradient, *params; /* dense */
    seqpar_status status;
} interleaving;

typedef struct open_batch {
    seqpar_llama_batch b;
    seqpar_buffer seed[3];
    int64_t first;
} open_batch;

static void local_weights(const interleaving *run, const open_batch *o, double *local) {
    int64_t i, t;
    for (i = 0; i < o->b.share->count; i++)
        for (t = 0; t < o->b.share->pieces[i].count; t++) {
            const seqpar_piece *p = &o->b.share->pieces[i];
            local[p->local + t] = run->weights[row_base(&run->truth->task, o->first + p->row) +
                                               p->start + t * p->stride];
        }
}

static seqpar_status write_seeds(seqpar_ctx *ctx, const interleaving *run, open_batch *o) {
    int64_t n = o->b.tokens, i;
    double *host = calloc((size_t)(4 * n + 4), sizeof *host);
    seqpar_status status;
    local_weights(run, o, host + 3 * n);
    seqpar_host_seeds parts = {host, host + n, host + 2 * n};
    status = seqpar_sft_seeds(ctx->error, &parts, o->b.targets, host + 3 * n, n,
                              &run->truth->task.objective);
    for (i = 0; i < 3; i++) {
        seqpar_buffer_new(ctx, &o->seed[i], n * seqpar_dtype_bytes(ctx->device->accumulator),
                          SEQPAR_MEM_ACTIVATIONS);
        if (n)
            seqpar_device_write(ctx->device, o->seed[i].data, 0, host + i * n, n,
                                ctx->device->accumulator);
    }
    free(host);
    return status;
}

static void collect_values(seqpar_ctx *ctx, const interleaving *run, const open_batch *o,
                           double *const *to) {
    const seqpar_buffer *from[4] = {&o->b.logp, &o->b.entropy, &o->b.lse, &o->b.smooth};
    int i;
    for (i = 0; i < 4; i++)
        collect_rows(ctx, &run->truth->task, &o->b, o->first, to[i], from[i]->data, 1,
                     ctx->device->accumulator);
}

static seqpar_status begin_batch(seqpar_ctx *ctx, const interleaving *run, seqpar_llama *model,
                                 seqpar_optim *optim, open_batch *o, int64_t index) {
    seqpar_llama_batch_desc how = {.layout = run->layout, .recompute = 1, .vocab_rows = 5};
    int64_t rows;
    seqpar_status status;
    status = seqpar_step_rows(ctx, optim, index, &o->first, &rows);
    if (!status)
        status = seqpar_llama_open_batch(ctx, model, &o->b,
                                         run->truth->task.batch.row + o->first, rows, &how);
    if (!status) status = write_seeds(ctx, run, o);
    if (!status) status = seqpar_llama_forward(ctx, model, &o->b, 1);
    if (!status) status = seqpar_llama_values(ctx, model, &o->b);
    if (!status) collect_values(ctx, run, o, run->early);
    return status;
}

static seqpar_status end_batch(seqpar_ctx *ctx, const interleaving *run, seqpar_llama *model,
                               seqpar_optim *optim, open_batch *o, int64_t index) {
    seqpar_vocab_seeds seeds = {
        .dlogp = o->seed[0].data, .dsmooth = o->seed[1].data, .dzloss = o->seed[2].data};
    seqpar_status status = seqpar_llama_backward(ctx, model, &o->b, optim, index, &seeds);
    int i;
    if (!status) collect_values(ctx, run, o, run->values);
    if (!status) status = seqpar_llama_values(ctx, model, &o->b);
    if (!status) collect_values(ctx, run, o, run->late);
    for (i = 0; i < 3; i++) seqpar_buffer_free(ctx, &o->seed[i]);
    seqpar_llama_close_batch(ctx, model, &o->b);
    return status;
}

static seqpar_status two_batches(seqpar_ctx *ctx, const interleaving *run, seqpar_llama *model,
                                 seqpar_optim *optim) {
    open_batch o[2];
    seqpar_status status = begin_batch(ctx, run, model, optim, &o[0], 0);
    if (!status && run->together) status = begin_batch(ctx, run, model, optim, &o[1], 1);
    if (!status) status = end_batch(ctx, run, model, optim, &o[0], 0);
    if (!status && !run->together) status = begin_batch(ctx, run, model, optim, &o[1], 1);
    if (!status) status = end_batch(ctx, run, model, optim, &o[1], 1);
    return status;
}

static seqpar_status interleaved_step(seqpar_ctx *ctx, const interleaving *run,
                                      seqpar_llama *model, seqpar_optim *optim) {
    const truth *t = run->truth;
    double *gapped = calloc((size_t)t->elements, sizeof *gapped);
    seqpar_status status = seqpar_step_begin(ctx, optim, t->task.batch.row, t->task.batch.rows,
                                             run->layout, 2);
    seqpar_device_write(ctx->device, model->params.data, 0, t->start, t->elements,
                        ctx->device->storage);
    if (!status) status = two_batches(ctx, run, model, optim);
    if (!status)
        status = seqpar_step_end(ctx, optim, model->params.data, model->elements, t->task.lr);
    if (!status) status = kept_read(ctx, optim, gapped, SEQPAR_STATE_GRADIENT);
    if (!status && ctx->world->rank == 0) {
        drop_gaps(t, run->gradient, gapped);
        seqpar_device_read(ctx->device, gapped, model->params.data, 0, t->elements,
                           ctx->device->storage);
        drop_gaps(t, run->params, gapped);
    }
    free(gapped);
    return status;
}

static seqpar_status interleaving_rank(seqpar_comm *world, void *user) {
    const interleaving *run = user;
    seqpar_device *device = run->reference ? seqpar_device_reference() : seqpar_device_cpu(1);
    seqpar_optim_desc desc = {SEQPAR_OPTIM_ADAMW, 1, .9, .95, 1e-8, .1, .3};
    seqpar_ctx ctx;
    seqpar_llama model;
    seqpar_optim optim;
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, run->sp);
    if (!status) status = seqpar_llama_open(&ctx, &model, &run->truth->task.config);
    if (!status)
        status = seqpar_optim_open(&ctx, &optim, model.tensors, model.tensor_count, &desc);
    if (!status) status = interleaved_step(&ctx, run, &model, &optim);
    seqpar_optim_close(&ctx, &optim);
    seqpar_llama_close(&ctx, &model);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    return status;
}

static void interleaving_run(interleaving *run, int together) {
    int64_t tokens = task_tokens(&run->truth->task);
    seqpar_error error = {0};
    int i;
    run->together = together;
    for (i = 0; i < 4; i++) {
        run->values[i] = calloc((size_t)tokens, sizeof(double));
        run->early[i] = calloc((size_t)tokens, sizeof(double));
        run->late[i] = calloc((size_t)tokens, sizeof(double));
    }
    run->gradient = calloc((size_t)run->truth->parameters, sizeof(double));
    run->params = calloc((size_t)run->truth->parameters, sizeof(double));
    run->status = seqpar_run_threads(run->sp, interleaving_rank, run, &error);
    test_expect(!run->status, "P=%lld %s: %s", (long long)run->sp,
                seqpar_layout_name(run->layout), error.text);
}

static void interleaving_free(interleaving *run) {
    int i;
    for (i = 0; i < 4; i++) {
        free(run->values[i]);
        free(run->early[i]);
        free(run->late[i]);
    }
    free(run->gradient);
    free(run->params);
}

static void expect_same_interleaving(const interleaving *a, const interleaving *b,
                                     const char *what) {
    int64_t n = a->truth->parameters, tokens = task_tokens(&a->truth->task);
    int i;
    for (i = 0; i < 4; i++) {
        test_expect(!memcmp(a->values[i], b->values[i], (size_t)tokens * sizeof(double)),
                    "%s: value %d differs", what, i);
        test_expect(!memcmp(a->values[i], a->early[i], (size_t)tokens * sizeof(double)),
                    "%s: value %d of the vocab's two entries differs", what, i);
        test_expect(!memcmp(a->early[i], a->late[i], (size_t)tokens * sizeof(double)),
                    "%s: value %d is another after backward", what, i);
    }
    test_expect(!memcmp(a->gradient, b->gradient, (size_t)n * sizeof(double)),
                "%s: gradients differ by %.2e", what,
                test_distance(a->gradient, b->gradient, n));
    test_expect(!memcmp(a->params, b->params, (size_t)n * sizeof(double)),
                "%s: parameters differ", what);
}

typedef struct slow_values {
    double *logp, *entropy, *lse, *gradient;
} slow_values;

static void expect_slow_values(const interleaving *run, const slow_values *want,
                               const char *what) {
    const truth *t = run->truth;
    const double *truths[3] = {want->logp, want->entropy, want->lse};
    static const char *const names[] = {"logp", "entropy", "lse"};
    /* fp32: only that it is the right thing */
    double limit = run->reference ? FP64_LIMIT : 1e-4, d;
    int64_t i;
    for (i = 0; i < 3; i++) {
        d = test_distance(run->values[i], truths[i], task_tokens(&t->task));
        test_expect(d <= limit, "%s: %s is off by %.2e", what, names[i], d);
    }
    for (i = 0; i < t->tensors; i++) {
        d = test_distance(run->gradient + t->table[i].offset,
                          want->gradient + t->table[i].offset,
                          t->table[i].rows * t->table[i].cols);
        test_expect(d <= limit, "%s: weighted gradient of %s is off by %.2e", what,
                    t->table[i].name, d);
    }
}

static slow_values weighted_truth(truth *t, const double *weights) {
    int64_t tokens = task_tokens(&t->task), r;
    slow_values v = {
        calloc((size_t)tokens, sizeof(double)), calloc((size_t)tokens, sizeof(double)),
        calloc((size_t)tokens, sizeof(double)), calloc((size_t)t->parameters, sizeof(double))};
    slow_problem p = truth_problem(t);
    for (r = 0; r < t->task.batch.rows; r++) {
        int64_t base = row_base(&t->task, r);
        t->row[r].weights = weights + base;
        slow_statistics(&t->config, t->dense, &t->row[r], v.logp + base, v.lse + base,
                        v.entropy + base);
    }
    slow_gradient(&p, t->dense, v.gradient);
    return v;
}

static void check_interleaving(const truth *t, const double *weights, const slow_values *want,
                               int64_t i) {
    interleaving apart = {.truth = t,
                          .weights = weights,
                          .reference = i % 2,
                          .sp = 1 + i / 2,
                          .layout = (int)(i % SEQPAR_LAYOUT_COUNT)},
                 together = apart;
    char what[64];
    snprintf(what, sizeof what, "P=%lld %s %s", (long long)apart.sp,
             seqpar_layout_name(apart.layout), apart.reference ? "fp64" : "fp32");
    interleaving_run(&apart, 0);
    interleaving_run(&together, 1);
    expect_same_interleaving(&together, &apart, what);
    expect_slow_values(&together, want, what);
    interleaving_free(&apart);
    interleaving_free(&together);
}

static void test_interleaving(void) {
    slow_config config = random_config(2, 1500);
    corpus c = corpus_new(6, 3, 11, config.vocab);
    truth t;
    slow_values want;
    double *weights;
    int64_t i;
    truth_open(&t, &config, &c, (seqpar_pack_desc){.pack_len = 22, .cell = 4});
    t.task.objective.label_smoothing = 0.05;
    t.task.objective.z_loss = 0.01;
    weights = calloc((size_t)task_tokens(&t.task), sizeof *weights);
    for (i = 0; i < task_tokens(&t.task); i++) weights[i] = (double)test_integer(0, 8) / 4;
    test_expect(t.task.batch.rows > 1, "the batch has one row only");
    want = weighted_truth(&t, weights);
    for (i = 0; i < 8; i++) check_interleaving(&t, weights, &want, i);
    test_end("two_batches_open_at_a_time, token weights, both entries of the vocab");
    free(want.logp);
    free(want.entropy);
    free(want.lse);
    free(want.gradient);
    free(weights);
    truth_close(&t);
    corpus_free(&c);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_tiny());
    TEST(test_fp32_limit());
    TEST(test_token_zero());
    TEST(test_interleaving());
    TEST(test_isolation());
    TEST(test_equivariance());
    TEST(test_unequal());
    TEST(test_own_attention());
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        if (!layout_on_grid(layout)) TEST(test_cutting(layout));
    TEST(test_directions(200));
    return test_summary();
}
