/* SPDX-License-Identifier: MIT OR Unlicense */
/* Runs one optimizer step of any objective on a small model, split in any way, and keeps
   what it computed: loss, metrics, gradient of every parameter, norm, updated parameters.
   What a rollout would have brought (old log-probs, advantages, returns) is data at absolute
   positions, the same for every way. */
#ifndef RUN_OBJECTIVE_H
#define RUN_OBJECTIVE_H
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "seqpar_llama.h"
#include "trainer/ppo/advantage.h"
#include "stand_in/on_cuda.h"
#include "kept.h"
#include "layouts.h"

/* What a loss is computed of: a token, averaged over the step (TOKENS) or first within its
   document (SEQUENCES); a document; a pair of documents. */
enum { OBJECTIVE_TOKENS, OBJECTIVE_SEQUENCES, OBJECTIVE_DOCUMENTS, OBJECTIVE_PAIRS };

/* An objective is a line here and the function objective_* it names; every preference loss of
   the library's table is one.
     scores     the model has a score head: of tokens, or of a document by its last one
     reference  log-probs of a reference model are there as well
   X: name, text, unit, scores, reference, function; P: SEQPAR_PREFERENCES' */
#define OBJECTIVES_EACH(X, P) \
    X(SFT, "SFT", TOKENS, 0, 0, sft) \
    X(KD, "KD", TOKENS, 0, 0, kd) \
    X(PRM, "PRM", TOKENS, 0, 0, prm) \
    SEQPAR_PREFERENCES(P) \
    X(KTO, "KTO", DOCUMENTS, 0, 1, kto) \
    X(RM, "reward model", PAIRS, 1, 0, rm) \
    X(POLICY, "PPO policy", TOKENS, 0, 1, policy) \
    X(VALUE, "PPO value", TOKENS, 1, 0, value) \
    X(GRPO, "GRPO", SEQUENCES, 0, 1, grpo)
enum {
#define OBJECTIVE__X(name, text, unit, scores, reference, function) OBJECTIVE_##name,
#define OBJECTIVE__P(name, text, reference, means, smoothing)       OBJECTIVE_##name,
    OBJECTIVES_EACH(OBJECTIVE__X, OBJECTIVE__P)
#undef OBJECTIVE__X
#undef OBJECTIVE__P
        OBJECTIVES
};

enum { OBJECTIVE_COLUMNS = 4 }; /* the loss, and what a trainer would log beside it */

typedef struct objective_way { /* how to do it */
    int64_t dp, sp, accumulation, ulysses_size, threads;
    /* reference_device: test_device */
    int layout, schedule, reference_device, optimizer, zero_stage, recompute, offload;
    int64_t vocab_rows, mlp_rows; /* as in seqpar_llama_batch_desc */
    int64_t slice;                /* as in seqpar_optim_desc */
    int state_bits, stochastic;   /* the same */
} objective_way;

/* what to do; documents 2i and 2i + 1 are a pair, and share a row */
typedef struct objective_task {
    int kind, same_reference; /* same_reference: the policy itself, as before the first step */
    seqpar_llama_config config;
    /* rank above 0: only adapters learn, and the reference is the policy without adapters */
    seqpar_adapter_desc adapter;
    int rounded; /* the policy's matrices are rounded to four bits */
    seqpar_batch batch;
    int64_t documents;
    /* (documents) log-prob sums to use instead of computing them; NULL: compute */
    double *reference;
    /* parameters to begin with, and the reference's; NULL: from the seed */
    const double *start, *reference_start;
    uint64_t seed;
    double lr, temperature; /* of log-probs; 0: 1 */
    int lean;               /* keep no logits: the step as it is */
    /* KD: the teacher, initialized by seed + 2; the weight of its term in the loss */
    seqpar_llama_config teacher;
    double kd_coef;
    int reverse;
    /* ---- what enters the gradient alone, not the loss that is kept ---- */
    double smooth, zloss, entropy; /* seeds of every token with a target */
    const double *balance;         /* (experts), as in seqpar_llama_batch; or NULL */
    int64_t untaught;              /* as in seqpar_llama_batch_desc */
} objective_task;

typedef struct objective_result {
    int64_t elements;
    /* state (3, elements): m, v, masters; logits (tokens, width): of the policy; reference
       (documents) */
    double loss, columns[OBJECTIVE_COLUMNS], norm, *logits, *gradient, *start, *reference_start;
    double *params, *state, *reference;
    int64_t tokens, width;
    seqpar_status status;
    seqpar_error error;
} objective_result;

typedef struct objective_job {
    const objective_task *task;
    const objective_way *way;
    objective_result *result;
} objective_job;

typedef struct objective_rank { /* one rank at work */
    seqpar_ctx *ctx;
    const objective_job *job;
    seqpar_llama policy, reference, adapters, teacher;
    seqpar_optim optim;
    /* columns of documents, pairs or tokens' sums that this rank answers for */
    seqpar_segments units;
} objective_rank;

/* ---- what is known of an objective ---- */

/* value: log-prob or score, ref: the reference's; of a document they are sums. [1]: the second
   document of a pair */
typedef struct objective_unit {
    double value[2], ref[2], kl;
    double far, teacher_entropy; /* of KD: from the teacher */
    double other;                /* of PRM: the log-prob of the second mark */
    int64_t tokens[2];           /* supervised, of the document */
    int64_t document, position;
} objective_unit;

/* columns: the loss, then of a token: clipped, value, 1; of documents: both rewards, accuracy.
   slope: the loss differentiated by each value. */
typedef struct objective_loss {
    double columns[OBJECTIVE_COLUMNS], slope[2];
} objective_loss;

typedef struct objective_kind {
    const char *name;
    int unit, scores, reference;
    int preference; /* SEQPAR_PREFERENCE_*; -1: none */
    objective_loss (*of)(const objective_task *t, const objective_unit *u);
} objective_kind;
static const objective_kind *objective_at(int kind);

__attribute__((unused)) static const char *objective_name(int kind) {
    return objective_at(kind)->name;
}
static int objective_scores(int kind) { return objective_at(kind)->scores; }
static int objective_taught(int kind) { return kind == OBJECTIVE_KD; }
/* PRM: a target lies at its own token, not at the one before, and is one of two marks. */
static int objective_marked(int kind) { return kind == OBJECTIVE_PRM; }
static const seqpar_llama_choices objective_marks = {{7, 0}, 2, NULL};

/* Documents of a unit; 0: a token is one. */
static int objective_whole(int kind) {
    int unit = objective_at(kind)->unit;
    return unit == OBJECTIVE_PAIRS ? 2 : unit == OBJECTIVE_DOCUMENTS;
}

/* A document counts by its last token alone. */
static int objective_last(int kind) { return objective_whole(kind) && objective_scores(kind); }

/* Of the values of one token (log-prob or score), and of its seed. */
static int objective_dtype(const objective_rank *r, const objective_task *t) {
    return objective_scores(t->kind) ? r->ctx->device->storage : r->ctx->device->accumulator;
}

/* ---- what a rollout brings: numbers of a document's place ---- */

static double objective_data(const objective_task *t, int64_t document, int64_t position,
                             uint64_t what) {
    return seqpar_random_normal(t->seed + 77, what, (uint64_t)(document * 4096 + position));
}

/* Two responses a prompt: the group of a document is its pair. */
static double objective_advantage(const objective_task *t, int64_t document) {
    double rewards[2] = {objective_data(t, document / 2 * 2, 0, 1),
                         objective_data(t, document / 2 * 2 + 1, 0, 1)};
    double advantages[2];
    group_advantages(NULL, advantages, rewards, 2, ADVANTAGE_GRPO, 1e-9);
    return advantages[document % 2];
}

/* ---- the loss of one token, document or pair ---- */

static objective_loss objective_token(double loss, double slope, int clipped, double value) {
    return (objective_loss){{loss, clipped, value, 1}, {slope}};
}

static objective_loss objective_pair(const seqpar_pair_result *p) {
    return (objective_loss){
        {p->loss, p->reward_chosen, p->reward_rejected, p->reward_chosen > p->reward_rejected},
        {p->dchosen, p->drejected}};
}

static objective_loss objective_sft(const objective_task *t, const objective_unit *u) {
    (void)t;
    return objective_token(-u->value[0], -1, 0, u->value[0]);
}

/* (1 - c) cross-entropy with the data + c cross-entropy with the teacher, which is the KL plus
   the teacher's entropy. slope[1]: by the KL */
static objective_loss objective_kd(const objective_task *t, const objective_unit *u) {
    double c = t->kd_coef;
    return (objective_loss){{-(1 - c) * u->value[0] + c * (u->far + u->teacher_entropy), u->far,
                             u->teacher_entropy, 1},
                            {-(1 - c), c}};
}

/* The soft label, the first mark's probability: drawn for each token, sometimes 0 or 1. */
static double objective_share(const objective_task *t, const objective_unit *u) {
    double drawn = 1.4 * seqpar_random_uniform(t->seed + 78, (uint64_t)u->document,
                                               (uint64_t)u->position) -
                   0.2;
    return drawn < 0 ? 0 : drawn > 1 ? 1 : drawn;
}

/* slope[1]: by the log-prob of the second mark */
static objective_loss objective_prm(const objective_task *t, const objective_unit *u) {
    double p = objective_share(t, u);
    int right = (u->value[0] >= u->other) == (p >= 0.5);
    return (objective_loss){{-p * u->value[0] - (1 - p) * u->other, u->value[0], right, 1},
                            {-p, -(1 - p)}};
}

static objective_loss objective_preference(const objective_task *t, const objective_unit *u) {
    const seqpar_preference_desc d = {
        .kind = objective_at(t->kind)->preference, .beta = 0.1, .gamma = 0.5};
    const seqpar_preference pair = {u->value[0], u->value[1],  u->ref[0],
                                    u->ref[1],   u->tokens[0], u->tokens[1]};
    seqpar_pair_result p;
    seqpar_preference_loss(NULL, &p, &pair, &d);
    return objective_pair(&p);
}

static objective_loss objective_kto(const objective_task *t, const objective_unit *u) {
    const seqpar_kto_desc d = {0.1, 1.0, 1.33, u->kl};
    int undesirable = (int)(u->document % 2);
    seqpar_kto_result k;
    (void)t;
    seqpar_kto_loss(NULL, &k, u->value[0], u->ref[0], !undesirable, &d);
    objective_loss l = {{k.loss, 0, 0, !undesirable}, {k.dlogp}};
    l.columns[1 + undesirable] = k.reward;
    return l;
}

static objective_loss objective_rm(const objective_task *t, const objective_unit *u) {
    seqpar_pair_result p = seqpar_reward_loss(u->value[0], u->value[1], 0.1, 0.01);
    (void)t;
    return objective_pair(&p);
}

static const seqpar_policy_desc objective_clip = {0.2, 0.28, 3.0};

static objective_loss objective_policy(const objective_task *t, const objective_unit *u) {
    seqpar_policy_result p = seqpar_policy_loss(
        u->value[0], u->ref[0] + 0.1 * objective_data(t, u->document, u->position, 4),
        objective_data(t, u->document, u->position, 5), &objective_clip);
    return objective_token(p.loss, p.dlogp, p.clipped, u->value[0]);
}

static objective_loss objective_value(const objective_task *t, const objective_unit *u) {
    seqpar_value_result v = seqpar_value_loss(
        u->value[0], 0.3 * objective_data(t, u->document, u->position, 2),
        objective_data(t, u->document, u->position, 3), 0.2);
    return objective_token(v.loss, v.dvalue, v.clipped, u->value[0]);
}

/* The group's advantage, and k3 to the reference. */
static objective_loss objective_grpo(const objective_task *t, const objective_unit *u) {
    seqpar_policy_result p = seqpar_policy_loss(
        u->value[0], u->ref[0], objective_advantage(t, u->document), &objective_clip);
    double dkl, kl = seqpar_kl(u->value[0], u->ref[0], SEQPAR_KL_K3, &dkl);
    return objective_token(p.loss + 0.04 * kl, p.dlogp + 0.04 * dkl, p.clipped, u->value[0]);
}

static const objective_kind *objective_at(int kind) {
    static const objective_kind table[] = {
#define OBJECTIVE__X(name, text, unit, scores, reference, function) \
    {text, OBJECTIVE_##unit, scores, reference, -1, objective_##function},
#define OBJECTIVE__P(name, text, reference, means, smoothing) \
    {#name, OBJECTIVE_PAIRS, 0, reference, SEQPAR_PREFERENCE_##name, objective_preference},
        OBJECTIVES_EACH(OBJECTIVE__X, OBJECTIVE__P)
#undef OBJECTIVE__X
#undef OBJECTIVE__P
    };
    return &table[kind];
}

/* A token's part of the loss, weighted. slope (2) */
static void objective_token_columns(const objective_task *t, const objective_unit *u,
                                    double *slope, double *columns) {
    seqpar_aggregate mean = {objective_at(t->kind)->unit == OBJECTIVE_SEQUENCES
                                 ? SEQPAR_AGGREGATE_SEQUENCE_MEAN
                                 : SEQPAR_AGGREGATE_TOKEN_MEAN,
                             t->batch.counts.supervised, t->documents, 0};
    double weight = seqpar_token_weight(&mean, u->tokens[0]);
    objective_loss l = objective_at(t->kind)->of(t, u);
    for (int i = 0; i < 2; i++) slope[i] = l.slope[i] * weight;
    for (int c = 0; c < OBJECTIVE_COLUMNS; c++) columns[c] = l.columns[c] * weight;
}

/* sums (documents, 3): log-prob or score, the reference's, tokens. Fills columns and slopes of
   the units in this micro-batch. */
static void objective_documents(const objective_task *t, const double *sums, double kl,
                                double *columns, double *slope) {
    int64_t whole = objective_whole(t->kind);
    for (int64_t i = 0; i < t->documents; i += whole) {
        objective_unit u = {.document = i, .kl = kl};
        if (sums[3 * i + 2] == 0) continue;
        for (int64_t h = 0; h < whole; h++) {
            u.value[h] = sums[3 * (i + h)];
            u.ref[h] = sums[3 * (i + h) + 1];
            u.tokens[h] = (int64_t)sums[3 * (i + h) + 2];
        }
        objective_loss l = objective_at(t->kind)->of(t, &u);
        memcpy(columns + OBJECTIVE_COLUMNS * i, l.columns, sizeof l.columns);
        for (int64_t h = 0; h < whole; h++)
            slope[i + h] = (double)whole * l.slope[h] / (double)t->documents;
    }
}

/* ---- one micro-batch ---- */

/* the local tokens: what was computed, and what goes back */
typedef struct objective_micro {
    seqpar_llama_batch b;
    const seqpar_row *rows;
    int64_t first, count;
    double *value, *ref, *seed, *live;   /* (tokens) */
    double *far, *teacher_entropy, *dkl; /* of PRM far: the second mark's, dkl: its seed */
    seqpar_llama_batch taught;
    seqpar_llama_teacher teacher;
    seqpar_llama_choices marks;
} objective_micro;

/* Dropout is only in the policy's pass, not in the reference's or the teacher's. */
static seqpar_llama_batch_desc objective_run_of(const objective_task *t,
                                                const objective_way *way, int learns) {
    return (seqpar_llama_batch_desc){
        .layout = way->layout,
        .schedule = way->schedule,
        .ulysses_size = way->ulysses_size,
        .vocab_rows = way->vocab_rows,
        .mlp_rows = way->mlp_rows,
        .recompute = way->recompute,
        .temperature = t->temperature,
        .dropout = learns && t->config.attention_dropout + t->adapter.dropout > 0,
        .dropout_seed = t->seed,
        .dropout_step = 3,
        .untaught = t->untaught};
}

/* The teacher's pass over the same rows; its batch stays until the student's backward pass. */
static seqpar_status objective_teach(objective_rank *r, objective_micro *m) {
    const objective_task *t = r->job->task;
    seqpar_llama_batch_desc run = objective_run_of(t, r->job->way, 0);
    seqpar_status status = seqpar_llama_open_batch(r->ctx, &r->teacher, &m->taught, m->rows,
                                                   m->count, &run);
    if (!status) status = seqpar_llama_forward(r->ctx, &r->teacher, &m->taught, 0);
    m->teacher = (seqpar_llama_teacher){&r->teacher, &m->taught, t->reverse, NULL};
    m->b.teacher = &m->teacher;
    return status;
}

/* Log-probs of both marks. */
static void objective_read_marks(objective_rank *r, objective_micro *m) {
    int64_t n = m->b.tokens;
    double *both = calloc((size_t)(2 * n + 1), sizeof *both);
    seqpar_device_read(r->ctx->device, both, m->b.logq.data, 0, 2 * n,
                       r->ctx->device->accumulator);
    for (int64_t i = 0; i < n; i++) {
        m->value[i] = both[2 * i];
        m->far[i] = both[2 * i + 1];
    }
    free(both);
}

/* The policy's pass and values, then the reference's log-probs. With adapters the reference is
   the policy itself, its adapters taken off for that pass. */
static seqpar_status objective_forward(objective_rank *r, objective_micro *m) {
    const objective_task *t = r->job->task;
    seqpar_llama_batch_desc run = objective_run_of(t, r->job->way, 1);
    seqpar_llama_batch ref;
    seqpar_status status = seqpar_llama_open_batch(r->ctx, &r->policy, &m->b, m->rows, m->count,
                                                   &run);
    int64_t n = m->b.tokens;
    m->value = calloc((size_t)(7 * n + 1), sizeof(double));
    m->ref = m->value + n;
    m->seed = m->ref + n;
    m->live = m->seed + n;
    m->far = m->live + n;
    m->teacher_entropy = m->far + n;
    m->dkl = m->teacher_entropy + n;
    if (!status) status = seqpar_llama_forward(r->ctx, &r->policy, &m->b, 1);
    if (!status && objective_taught(t->kind)) status = objective_teach(r, m);
    m->marks = objective_marks;
    if (objective_marked(t->kind)) m->b.choices = &m->marks;
    if (!status) status = seqpar_llama_values(r->ctx, &r->policy, &m->b);
    if (!status && objective_marked(t->kind)) objective_read_marks(r, m);
    if (!status && !objective_marked(t->kind))
        seqpar_device_read(r->ctx->device, m->value,
                           objective_scores(t->kind) ? m->b.score.data : m->b.logp.data, 0, n,
                           objective_dtype(r, t));
    if (!status && objective_taught(t->kind)) {
        int type = r->ctx->device->accumulator;
        seqpar_device_read(r->ctx->device, m->far, m->b.kl.data, 0, n, type);
        seqpar_device_read(r->ctx->device, m->teacher_entropy, m->b.teacher_entropy.data, 0, n,
                           type);
    }
    for (int64_t i = 0; !status && i < n; i++) m->live[i] = m->b.targets[i] != SEQPAR_IGNORE;
    m->b.balance = t->balance;
    if (status || !objective_at(t->kind)->reference || t->reference) return status;
    seqpar_llama *of = t->adapter.rank ? &r->policy : &r->reference;
    run = objective_run_of(t, r->job->way, 0);
    of->adapters = NULL;
    status = seqpar_llama_open_batch(r->ctx, of, &ref, m->rows, m->count, &run);
    if (!status) status = seqpar_llama_forward(r->ctx, of, &ref, 0);
    if (!status) status = seqpar_llama_values(r->ctx, of, &ref);
    if (!status)
        seqpar_device_read(r->ctx->device, m->ref, ref.logp.data, 0, n,
                           r->ctx->device->accumulator);
    seqpar_llama_close_batch(r->ctx, of, &ref);
    if (t->adapter.rank) of->adapters = &r->adapters;
    return status;
}

/* Which document a local token belongs to, and its place in it. */
static objective_unit objective_place(const seqpar_row *row, int64_t position) {
    int64_t d = 0;
    while (row->cu_seqlens[d + 1] <= position) d++;
    objective_unit u = {.document = row->doc_source[d],
                        .position = position - row->cu_seqlens[d]};
    for (int64_t i = row->cu_seqlens[d]; i < row->cu_seqlens[d + 1]; i++)
        u.tokens[0] += row->targets[i] != SEQPAR_IGNORE;
    return u;
}

/* Seeds of the tokens; their columns, one sum per piece, are leaves of one segment. */
static seqpar_status objective_tokens(objective_rank *r, objective_micro *m) {
    seqpar_status status = SEQPAR_OK;
    r->units.width = OBJECTIVE_COLUMNS;
    for (int64_t i = 0; !status && i < m->b.share->count; i++) {
        const seqpar_piece *p = &m->b.share->pieces[i];
        double sum[OBJECTIVE_COLUMNS] = {0}, token[OBJECTIVE_COLUMNS] = {0};
        for (int64_t k = 0; k < p->count; k++) {
            int64_t at = p->local + k;
            objective_unit u = objective_place(&m->rows[p->row], p->start + k * p->stride);
            double slope[2] = {0, 0};
            u.value[0] = m->value[at];
            u.ref[0] = m->ref[at];
            u.far = u.other = m->far[at];
            u.teacher_entropy = m->teacher_entropy[at];
            if (m->live[at] != 0) objective_token_columns(r->job->task, &u, slope, token);
            m->seed[at] = slope[0];
            m->dkl[at] = slope[1];
            for (int c = 0; m->live[at] != 0 && c < OBJECTIVE_COLUMNS; c++) sum[c] += token[c];
        }
        status = seqpar_segments_push(r->ctx->error, &r->units, 0, p->leaf, sum);
    }
    return status;
}

/* Each document's sums of values, reference values and counted tokens, over the ranks of sp. */
static seqpar_status objective_sums(objective_rank *r, objective_micro *m, double *sums) {
    const objective_task *t = r->job->task;
    double *terms = calloc((size_t)(3 * m->b.tokens + 1), sizeof *terms);
    seqpar_segments segments = {.width = 3};
    for (int64_t i = 0; i < m->b.share->count; i++)
        for (int64_t k = 0; k < m->b.share->pieces[i].count; k++) {
            const seqpar_piece *p = &m->b.share->pieces[i];
            const seqpar_row *row = &m->rows[p->row];
            int64_t at = p->local + k, position = p->start + k * p->stride, last = 0;
            for (int64_t d = 0; d < row->docs; d++)
                last |= position == row->cu_seqlens[d + 1] - 1;
            if (objective_last(t->kind)) m->live[at] = (double)last;
            if (m->live[at] == 0) continue;
            terms[3 * at] = m->value[at];
            terms[3 * at + 1] = m->ref[at];
            terms[3 * at + 2] = 1;
        }
    seqpar_status status = seqpar_segments_add(r->ctx->error, &segments, terms, m->b.share);
    if (!status) status = seqpar_segments_sum(r->ctx->sp, sums, t->documents, &segments);
    for (int64_t i = 0; !status && t->reference && i < t->documents; i++)
        sums[3 * i + 1] = sums[3 * i + 2] > 0 ? t->reference[i] : 0.0;
    seqpar_segments_free(&segments);
    free(terms);
    return status;
}

static seqpar_status objective_units(objective_rank *r, objective_micro *m, double kl) {
    const objective_task *t = r->job->task;
    int64_t whole = objective_whole(t->kind);
    double *sums = calloc((size_t)((4 + OBJECTIVE_COLUMNS) * t->documents + 1), sizeof *sums);
    double *slope = sums + 3 * t->documents, *columns = slope + t->documents;
    seqpar_status status = objective_sums(r, m, sums);
    r->units.width = OBJECTIVE_COLUMNS;
    if (!status) objective_documents(t, sums, kl, columns, slope);
    for (int64_t i = 0; !status && i < t->documents; i++) {
        if (sums[3 * i + 2] == 0 || r->ctx->sp_rank || i % whole) continue;
        status = seqpar_segments_push(r->ctx->error, &r->units, i, 0,
                                      columns + OBJECTIVE_COLUMNS * i);
        for (int64_t k = i; k < i + whole; k++)
            if (sums[3 * k + 2] > 0) r->job->result->reference[k] = sums[3 * k + 1];
    }
    seqpar_segments_spread(m->seed, slope, m->b.share);
    for (int64_t i = 0; i < m->b.tokens; i++)
        if (m->live[i] == 0) m->seed[i] = 0;
    free(sums);
    return status;
}

/* Logits or scores to their global places: rows are numbered over the whole batch. */
static seqpar_status objective_keep_logits(objective_rank *r, const objective_micro *m) {
    objective_result *result = r->job->result;
    void *logits = r->ctx->device->alloc(r->ctx->device,
                                         (m->b.tokens * result->width + 1) *
                                             seqpar_dtype_bytes(r->ctx->device->storage));
    seqpar_status status = seqpar_llama_logits(r->ctx, &r->policy, (seqpar_llama_batch *)&m->b,
                                               logits);
    for (int64_t i = 0; !status && i < m->b.share->count; i++)
        for (int64_t k = 0; k < m->b.share->pieces[i].count; k++) {
            const seqpar_piece *p = &m->b.share->pieces[i];
            int64_t base = p->start + k * p->stride;
            for (int64_t row = 0; row < m->first + p->row; row++)
                base += r->job->task->batch.row[row].tokens;
            seqpar_device_read(r->ctx->device, result->logits + base * result->width, logits,
                               (p->local + k) * result->width, result->width,
                               r->ctx->device->storage);
        }
    r->ctx->device->free(r->ctx->device, logits);
    return status;
}

/* A seed array with `value` at every token that has a target; *to stays NULL if value is 0. */
static seqpar_status objective_term(objective_rank *r, const objective_micro *m, double value,
                                    seqpar_buffer *seed, const void **to) {
    int64_t n = m->b.tokens, bytes = n * seqpar_dtype_bytes(r->ctx->device->accumulator);
    seqpar_status status;
    if (value == 0 || n == 0) return SEQPAR_OK;
    status = seqpar_buffer_new(r->ctx, seed, bytes, SEQPAR_MEM_ACTIVATIONS);
    for (int64_t i = 0; !status && i < n; i++) {
        double x = m->b.targets[i] == SEQPAR_IGNORE ? 0 : value;
        seqpar_device_write(r->ctx->device, seed->data, i, &x, 1, r->ctx->device->accumulator);
    }
    *to = seed->data;
    return status;
}

static seqpar_status objective_dkl(objective_rank *r, objective_micro *m, seqpar_buffer *far) {
    int type = r->ctx->device->accumulator;
    seqpar_status status = seqpar_buffer_new(
        r->ctx, far, m->b.tokens * seqpar_dtype_bytes(type), SEQPAR_MEM_ACTIVATIONS);
    if (!status && m->b.tokens)
        seqpar_device_write(r->ctx->device, far->data, 0, m->dkl, m->b.tokens, type);
    m->teacher.dkl = far->data;
    return status;
}

static seqpar_status objective_dmarks(objective_rank *r, objective_micro *m,
                                      seqpar_buffer *both) {
    int type = r->ctx->device->accumulator;
    int64_t n = m->b.tokens;
    seqpar_status status = seqpar_buffer_new(r->ctx, both, 2 * n * seqpar_dtype_bytes(type),
                                             SEQPAR_MEM_ACTIVATIONS);
    double *seeds = calloc((size_t)(2 * n + 1), sizeof *seeds);
    for (int64_t i = 0; i < n; i++) {
        seeds[2 * i] = m->seed[i];
        seeds[2 * i + 1] = m->dkl[i];
    }
    if (!status && n) seqpar_device_write(r->ctx->device, both->data, 0, seeds, 2 * n, type);
    m->marks.dlogq = both->data;
    free(seeds);
    return status;
}

static seqpar_status objective_step_micro(objective_rank *r, int64_t index, double kl) {
    int whole = objective_whole(r->job->task->kind);
    const objective_task *t = r->job->task;
    objective_micro m = {0};
    seqpar_vocab_seeds seeds = {0};
    seqpar_buffer seed = {0}, far = {0}, term[3] = {{0}};
    seqpar_status status = seqpar_step_rows(r->ctx, &r->optim, index, &m.first, &m.count);
    m.rows = r->job->task->batch.row + m.first;
    if (!status) status = objective_forward(r, &m);
    if (!status) status = whole ? objective_units(r, &m, kl) : objective_tokens(r, &m);
    if (!status && !r->job->task->lean) status = objective_keep_logits(r, &m);
    if (!status)
        status = seqpar_buffer_new(r->ctx, &seed,
                                   m.b.tokens * seqpar_dtype_bytes(r->ctx->device->accumulator),
                                   SEQPAR_MEM_ACTIVATIONS);
    if (!status && m.b.tokens)
        seqpar_device_write(r->ctx->device, seed.data, 0, m.seed, m.b.tokens,
                            objective_dtype(r, r->job->task));
    if (!objective_marked(t->kind)) seeds.dlogp = seed.data;
    if (!status && objective_taught(t->kind)) status = objective_dkl(r, &m, &far);
    if (!status && objective_marked(t->kind)) status = objective_dmarks(r, &m, &far);
    if (!status) status = objective_term(r, &m, t->smooth, &term[0], &seeds.dsmooth);
    if (!status) status = objective_term(r, &m, t->zloss, &term[1], &seeds.dzloss);
    if (!status) status = objective_term(r, &m, t->entropy, &term[2], &seeds.dentropy);
    if (!status)
        status = seqpar_llama_backward(r->ctx, &r->policy, &m.b, &r->optim, index, &seeds);
    for (int i = 0; i < 3; i++) seqpar_buffer_free(r->ctx, &term[i]);
    seqpar_buffer_free(r->ctx, &far);
    seqpar_buffer_free(r->ctx, &seed);
    free(m.value);
    if (objective_taught(t->kind)) seqpar_llama_close_batch(r->ctx, &r->teacher, &m.taught);
    seqpar_llama_close_batch(r->ctx, &r->policy, &m.b);
    return status;
}

/* ---- the step ---- */

/* Means over the units, or the sums of the weighted tokens; the loss first. */
static seqpar_status objective_columns(objective_rank *r, double *means) {
    const objective_task *t = r->job->task;
    int whole = objective_whole(t->kind), step = whole ? whole : 1;
    int64_t n = whole ? t->documents : 1;
    double *all = calloc((size_t)((1 + OBJECTIVE_COLUMNS) * n), sizeof *all);
    double *column = all + OBJECTIVE_COLUMNS * n;
    r->units.width = OBJECTIVE_COLUMNS;
    seqpar_status status = seqpar_segments_sum(r->ctx->world, all, n, &r->units);
    for (int c = 0; c < OBJECTIVE_COLUMNS; c++) {
        for (int64_t i = 0; i < n / step; i++)
            column[i] = all[i * step * OBJECTIVE_COLUMNS + c];
        means[c] = whole ? seqpar_mean(column, n / step) : column[0];
    }
    free(all);
    return status;
}

static seqpar_llama *objective_learner(objective_rank *r) {
    return r->policy.adapters ? r->policy.adapters : &r->policy;
}

static seqpar_status objective_step(objective_rank *r, double *gradient, double *state,
                                    double *params) {
    const objective_task *t = r->job->task;
    /* kl: KTO's over mismatched pairs, given here instead of computed */
    double means[OBJECTIVE_COLUMNS] = {0}, kl = t->same_reference ? 0.0 : 0.15;
    seqpar_status status = seqpar_step_begin(r->ctx, &r->optim, t->batch.row, t->batch.rows,
                                             r->job->way->layout, r->job->way->accumulation);
    for (int64_t i = 0; !status && i < r->job->way->accumulation; i++)
        status = objective_step_micro(r, i, kl);
    if (!status) status = objective_columns(r, means);
    int64_t elements;
    void *trainable = seqpar_llama_trainable(&r->policy, &elements);
    if (!status) status = seqpar_step_end(r->ctx, &r->optim, trainable, elements, t->lr);
    if (!status) status = kept_read(r->ctx, &r->optim, gradient, SEQPAR_STATE_GRADIENT);
    const seqpar_llama *learner = objective_learner(r);
    if (!status) status = kept_state(r->ctx, &r->optim, state, learner->elements);
    if (!status) status = params_read(r->ctx, learner, params);
    if (status || r->ctx->world->rank) return status;
    r->job->result->loss = means[0];
    memcpy(r->job->result->columns, means, sizeof means);
    r->job->result->norm = r->optim.norm;
    memcpy(r->job->result->gradient, gradient, (size_t)learner->elements * sizeof *gradient);
    memcpy(r->job->result->state, state, (size_t)(3 * learner->elements) * sizeof *state);
    memcpy(r->job->result->params, params, (size_t)learner->elements * sizeof *params);
    return SEQPAR_OK;
}

/* Rounds the policy's parameters to four bits, by way of a model that has them so. */
static seqpar_status objective_round(objective_rank *r) {
    seqpar_llama_config config = r->job->task->config;
    seqpar_llama coded;
    config.four_bits = 1;
    seqpar_status status = seqpar_llama_open(r->ctx, &coded, &config);
    if (!status) status = seqpar_llama_init(r->ctx, &coded, r->job->task->seed);
    for (int64_t i = 0; !status && i < coded.tensor_count; i++) {
        int64_t n = coded.tensors[i].rows * coded.tensors[i].cols;
        double *values = calloc((size_t)n, sizeof *values);
        status = seqpar_llama_read(r->ctx, &coded, values, i, 0, n);
        if (!status) status = seqpar_llama_write(r->ctx, &r->policy, values, i, 0, n);
        free(values);
    }
    seqpar_llama_close(r->ctx, &coded);
    return status;
}

/* Initializes the reference; values: gets its parameters. */
static seqpar_status objective_reference(objective_rank *r, double *values) {
    const objective_task *t = r->job->task;
    seqpar_status status = seqpar_llama_init(r->ctx, &r->reference,
                                             t->same_reference ? t->seed : t->seed + 1);
    if (!status && t->reference_start)
        status = params_write(r->ctx, &r->reference, t->reference_start);
    return status ? status : params_read(r->ctx, &r->reference, values);
}

/* One rank's whole run. `gradient` holds three arrays: gradient, state (3), parameters. Ranks
   other than 0 need them, too, since reads are collective. */
static seqpar_status objective_main(seqpar_comm *world, void *user) {
    const objective_job *job = user;
    const objective_task *t = job->task;
    seqpar_device *device = test_device(job->way->reference_device, job->way->threads);
    seqpar_optim_desc optim = {job->way->optimizer,
                               job->way->zero_stage,
                               .9,
                               .95,
                               1e-8,
                               0.01,
                               1.0,
                               job->way->slice,
                               .offload = job->way->offload,
                               .state_bits = job->way->state_bits,
                               .stochastic = job->way->stochastic,
                               .seed = 5};
    int64_t all = job->result->elements;
    double *gradient = calloc((size_t)(5 * all) + 1, sizeof *gradient),
           *params = gradient + 4 * all;
    seqpar_ctx ctx;
    objective_rank r = {.ctx = &ctx, .job = job};
    seqpar_status status = seqpar_ctx_open(&ctx, world, device, job->way->sp);
    if (!status) status = params_open(&ctx, &r.policy, &t->config, &optim);
    if (!status && t->adapter.rank)
        status = seqpar_llama_open_adapters(&ctx, &r.adapters, &r.policy, &t->adapter,
                                            optim.zero_stage == 3, optim.slice);
    if (t->adapter.rank) r.policy.adapters = &r.adapters;
    seqpar_llama *learner = objective_learner(&r);
    if (!status && !t->adapter.rank)
        status = params_open(&ctx, &r.reference, &t->config, &optim);
    if (!status && objective_taught(t->kind)) {
        status = params_open(&ctx, &r.teacher, &t->teacher, &optim);
        if (!status) status = seqpar_llama_init(&ctx, &r.teacher, t->seed + 2);
    }
    if (!status)
        status = seqpar_optim_open(&ctx, &r.optim, learner->tensors, learner->tensor_count,
                                   &optim);
    if (!status) status = seqpar_llama_init(&ctx, &r.policy, t->seed);
    if (!status && t->rounded) status = objective_round(&r);
    if (!status && t->adapter.rank) status = seqpar_llama_init(&ctx, &r.adapters, t->seed);
    if (!status && t->start) status = params_write(&ctx, learner, t->start);
    if (!status) status = params_read(&ctx, learner, world->rank ? params : job->result->start);
    if (!status && !t->adapter.rank)
        status = objective_reference(&r, world->rank ? params : job->result->reference_start);
    if (!status) status = objective_step(&r, gradient, gradient + all, params);
    seqpar_segments_free(&r.units);
    seqpar_optim_close(&ctx, &r.optim);
    seqpar_llama_close(&ctx, &r.reference);
    seqpar_llama_close(&ctx, &r.teacher);
    seqpar_llama_close(&ctx, &r.adapters);
    seqpar_llama_close(&ctx, &r.policy);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    free(gradient);
    return status;
}

/* A mark at every fifth token, from one that depends on the document: its first token may have
   one, and a short document none. */
static void objective_marks_set(int32_t *targets, int64_t document, int64_t tokens) {
    for (int64_t k = 0; k < tokens; k++)
        targets[k] = (k + document) % 5 ? SEQPAR_IGNORE : objective_marks.ids[0];
}

/* Documents of a prompt and a response each, tokens 0 among them, as pairs that are packed. */
__attribute__((unused)) static void objective_task_packed(objective_task *t, int kind,
                                                          int64_t pairs, int64_t longest,
                                                          const seqpar_pack_desc *pack,
                                                          uint64_t seed) {
    seqpar_pack_desc desc = *pack;
    seqpar_document *docs = calloc((size_t)(2 * pairs), sizeof *docs);
    seqpar_error error = {0};
    memset(t, 0, sizeof *t);
    t->kind = kind;
    t->seed = seed;
    t->documents = 2 * pairs;
    t->lr = 1e-2;
    t->config = (seqpar_llama_config){.layers = 2,
                                      .hidden = 24,
                                      .heads = 8,
                                      .kv_heads = 4,
                                      .head_dim = 6,
                                      .intermediate = 40,
                                      .vocab = 61,
                                      .score = objective_scores(kind) ? "score" : NULL};
    t->kd_coef = 0.4;
    t->teacher = t->config;
    t->teacher.layers = 1;
    t->teacher.hidden = 30;
    t->teacher.intermediate = 37;
    desc.vocab = t->config.vocab;
    for (int64_t i = 0; i < 2 * pairs; i++) {
        int64_t n = 3 + (int64_t)(seqpar_random_uniform(seed, 9, (uint64_t)i) *
                                  (double)(longest - 2));
        int64_t prompt = 1 + n / 4;
        int32_t *ids = calloc((size_t)n, sizeof *ids);
        uint8_t *mask = calloc((size_t)n, 1);
        for (int64_t k = 0; k < n; k++) {
            ids[k] = (int32_t)(seqpar_random_uniform(seed, 10 + (uint64_t)i, (uint64_t)k) *
                               61) *
                     (k % 7 != 3);
            mask[k] = k >= prompt;
        }
        docs[i] = (seqpar_document){.ids = ids, .loss_mask = mask, .tokens = n, .unit = i / 2};
        if (!objective_marked(kind)) continue;
        docs[i].loss_mask = NULL;
        docs[i].targets = calloc((size_t)n, sizeof *ids);
        objective_marks_set((int32_t *)docs[i].targets, i, n);
        free(mask);
    }
    if (seqpar_pack(&error, &t->batch, docs, 2 * pairs, &desc)) {
        fprintf(stderr, "%s\n", error.text);
        exit(2);
    }
    for (int64_t i = 0; i < 2 * pairs; i++) {
        free((void *)docs[i].ids);
        free((void *)docs[i].loss_mask);
        free((void *)docs[i].targets);
    }
    free(docs);
}

/* In rows of at most pack_len, in cells of `cell` tokens. */
__attribute__((unused)) static void objective_task_cells(objective_task *t, int kind,
                                                         int64_t pairs, int64_t longest,
                                                         int64_t pack_len, int64_t cell,
                                                         uint64_t seed) {
    const seqpar_pack_desc pack = {.pack_len = pack_len, .cell = cell};
    objective_task_packed(t, kind, pairs, longest, &pack, seed);
}

__attribute__((unused)) static void objective_task_open(objective_task *t, int kind,
                                                        int64_t pairs, int64_t longest,
                                                        int64_t pack_len, uint64_t seed) {
    objective_task_cells(t, kind, pairs, longest, pack_len, 5, seed);
}

/* Of what learns. */
static int64_t objective_elements(const objective_task *t) {
    seqpar_comm *self = seqpar_comm_self();
    seqpar_device *device = seqpar_device_reference();
    seqpar_llama model = {0}, adapters = {0};
    seqpar_ctx ctx;
    seqpar_ctx_open(&ctx, self, device, 1);
    seqpar_llama_open(&ctx, &model, &t->config);
    if (t->adapter.rank) seqpar_llama_open_adapters(&ctx, &adapters, &model, &t->adapter, 0, 0);
    int64_t elements = t->adapter.rank ? adapters.elements : model.elements;
    seqpar_llama_close(&ctx, &adapters);
    seqpar_llama_close(&ctx, &model);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(self);
    return elements;
}

/* Adapters as after some steps, in which no B is 0: a task's start, for the caller to free. */
__attribute__((unused)) static double *objective_adapters(const objective_task *t) {
    int64_t n = objective_elements(t);
    double *start = calloc((size_t)n, sizeof *start);
    for (int64_t i = 0; i < n; i++)
        start[i] = (double)(float)(0.15 * seqpar_random_normal(21, 0, (uint64_t)i));
    return start;
}

static void objective_run(const objective_task *t, const objective_way *way,
                          objective_result *result) {
    objective_job job = {t, way, result};
    int64_t i;
    memset(result, 0, sizeof *result);
    for (i = 0; i < t->batch.rows; i++) result->tokens += t->batch.row[i].tokens;
    result->width = t->config.score ? 1 : t->config.vocab;
    result->elements = objective_elements(t);
    result->logits = t->lean ? NULL
                             : calloc((size_t)(result->tokens * result->width), sizeof(double));
    result->gradient = calloc((size_t)result->elements, sizeof(double));
    result->params = calloc((size_t)result->elements, sizeof(double));
    result->start = calloc((size_t)result->elements, sizeof(double));
    result->state = calloc((size_t)(3 * result->elements), sizeof(double));
    result->reference_start = calloc((size_t)result->elements, sizeof(double));
    result->reference = calloc((size_t)t->documents, sizeof(double));
    result->status = seqpar_run_threads(way->dp * way->sp, objective_main, &job,
                                        &result->error);
}

static void objective_result_free(objective_result *r) {
    free(r->logits);
    free(r->gradient);
    free(r->start);
    free(r->reference_start);
    free(r->params);
    free(r->state);
    free(r->reference);
}

static void objective_task_close(objective_task *t) { seqpar_batch_free(&t->batch); }
#endif
