/* SPDX-License-Identifier: MIT OR Unlicense */
/* second_reference.h - checks the reference by slow.h, which shares no code with it: log-probs,
 * and the loss's directional derivative along two directions, by complex step. If the two
 * disagree, there is no verdict.
 *
 * slow.h has no reward models. It runs one as a language model whose head has the reward's row
 * first and zeros below. If the reward model's value is s, token 0 has the log-prob
 * l = s - log(e^s + V - 1), so s = l + log(V - 1) - log(1 - e^l) and dl/ds = 1 - e^l. */
#ifndef ORACLE_SECOND_REFERENCE_H
#define ORACLE_SECOND_REFERENCE_H
#include "reference.h"
#include "second/slow.h"

/* Above this many parameters times tokens, each a complex product, slow.h takes too long. */
#ifndef SECOND_WORK
#define SECOND_WORK 4e8
#endif

typedef struct second {
    const reference *f;
    slow_config config;
    slow_tensor *table;
    double *parameters, *direction; /* in the order of slow.h */
    slow_row *rows;
    int32_t *tokens; /* ids, targets */
    double *seeds;   /* of RM: by token, dL/dl */
    double **terms;  /* (rows) what slow.h computes the loss's terms from; NULL: it has none */
} second;

/* SEQPAR_ROPE_DYNAMIC is plain here: seqpar_llama.h refuses rows that are long enough to be
   scaled. */
static inline void second_rope(slow_config *to, const seqpar_llama_rope *r) {
    static const int types[] = {SLOW_ROPE_PLAIN, SLOW_ROPE_LINEAR, SLOW_ROPE_PLAIN,
                                SLOW_ROPE_LLAMA3, SLOW_ROPE_YARN};
    to->rope = types[r->type];
    to->rope_factor = r->factor;
    to->rope_low = r->low;
    to->rope_high = r->high;
    to->rope_first = r->first_positions;
    to->rope_attention = r->attention_factor;
    to->rope_exact = r->exact != 0;
}

/* slow.h has no defaults, so rope_theta and rms_eps of 0 become those of seqpar_llama.h. A
   reward model is untied: its head is laid out as lm_head. The window is the dump's unless only
   some layers have one. */
static inline void second_config(second *s) {
    const seqpar_llama_config *c = &s->f->model.config;
    s->config = (slow_config){.layers = c->layers,
                              .hidden = c->hidden,
                              .heads = c->heads,
                              .kv_heads = c->kv_heads,
                              .head_dim = c->head_dim,
                              .intermediate = c->intermediate,
                              .vocab = c->vocab,
                              .rope_theta = c->rope_theta > 0 ? c->rope_theta : 10000,
                              .rms_eps = c->rms_eps > 0 ? c->rms_eps : 1e-5,
                              .tied = c->tied != 0 && !c->score};
    second_rope(&s->config, &c->rope);
    s->config.window = c->window_from ? c->window : s->f->d->facts.window;
    s->config.window_from = c->window_from;
    s->config.no_rope_every = c->no_rope_every;
    s->config.qkv_bias = c->qkv_bias != 0;
    s->config.o_bias = c->o_bias != 0;
    s->config.mlp_bias = c->mlp_bias != 0;
    s->config.qk_norm = c->qk_norm != 0;
    s->config.experts = c->experts;
    s->config.experts_per_token = c->experts_per_token;
    s->config.sparse_every = c->sparse_every;
    s->config.expert_intermediate = c->expert_intermediate;
    s->config.topk_norm = c->topk_norm != 0;
}

/* From the layout of the model's elements to that of slow.h. */
static inline void second_order(const second *s, double *to, const double *from) {
    for (int64_t i = 0; i < slow_tensors(&s->config); i++) {
        const seqpar_tensor *t = model_tensor(s->f, s->table[i].name);
        int64_t size = s->table[i].rows * s->table[i].cols;
        if (!t && s->f->model.config.score) { /* the head: one row */
            t = &s->f->model.tensors[s->f->model.tensor_count - 1];
            memset(to + s->table[i].offset, 0, (size_t)size * sizeof *to);
            size = s->table[i].cols;
        }
        if (t) memcpy(to + s->table[i].offset, from + t->offset, (size_t)size * sizeof *to);
    }
}

/* A reward model's value from the log-prob of token 0. A language model's log-prob stays. */
static inline double second_value(const second *s, double logp) {
    if (!s->f->model.config.score) return logp;
    return logp + log((double)s->config.vocab - 1) - log(-expm1(logp));
}

static inline int64_t second_tokens(const reference *f) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < f->count; i++) tokens += row_end(&f->rows[i]);
    return tokens;
}

/* slow.h has label smoothing and z loss of weighted tokens, and seeds of the entropy. */
static inline void second_terms(second *s, int64_t i) {
    const reference *f = s->f;
    int64_t n = s->rows[i].tokens;
    double entropy = reference_term(f, TERM_ENTROPY);
    double *own = s->terms[i] = (double *)slow_allocate(n, sizeof *own);
    for (int64_t t = 0; t < n; t++)
        own[t] = entropy > 0 ? entropy * f->weights[i][t] : -f->weights[i][t];
    if (entropy > 0) {
        s->rows[i].entropy_seeds = own;
        return;
    }
    s->rows[i].weights = own;
    s->rows[i].logp_seeds = NULL; /* the cross-entropy has them */
}

/* The terms of the loss as slow.h has them. */
static inline slow_objective second_objective(const second *s) {
    double smoothing = reference_term(s->f, TERM_SMOOTHING), z = reference_term(s->f, TERM_Z);
    return (slow_objective){.smoothing = smoothing,
                            .zloss = z,
                            /* INFINITY leaves the seeds alone */
                            .count = smoothing > 0 || z > 0 ? 1 : INFINITY};
}

/* seeds (rows) each (tokens), borrowed */
static inline void second_rows(second *s, double *const *seeds) {
    int32_t *at = s->tokens;
    for (int64_t i = 0; i < s->f->count; i++) {
        const dump_row *row = &s->f->rows[i];
        int64_t n = row_end(row);
        for (int64_t t = 0; t < n; t++) {
            at[t] = (int32_t)row->ids[t];
            at[n + t] = s->f->model.config.score        ? 0
                        : row->labels[t] == DUMP_IGNORE ? SLOW_IGNORED
                                                        : (int32_t)row->labels[t];
        }
        s->rows[i] = (slow_row){.tokens = n,
                                .docs = row->docs,
                                .cu_seqlens = row->cu_seqlens,
                                .ids = at,
                                .targets = at + n,
                                .logp_seeds = seeds[i]};
        if (s->terms) second_terms(s, i);
        at += 2 * n;
    }
}

static inline void second_close(second *s) {
    for (int64_t i = 0; s->terms && i < s->f->count; i++) free(s->terms[i]);
    free(s->terms);
    free(s->table);
    free(s->parameters);
    free(s->direction);
    free(s->rows);
    free(s->tokens);
    free(s->seeds);
}

/* Whether attention has options that slow.h lacks. */
static inline int second_lacks(const dump_facts *f) {
    return f->softcap > 0 || f->softmax_scale > 0;
}

/* 0; 1: slow.h cannot check this: too much work, options that it lacks, a vocabulary of 1, or
   no cu_seqlens, without which it takes all tokens for padding. */
static inline int second_open(second *s, const reference *f, double *const *seeds) {
    int64_t count, tokens = second_tokens(f);
    double *elements;
    *s = (second){.f = f};
    second_config(s);
    count = slow_parameters(&s->config, NULL);
    for (int64_t i = 0; i < f->count; i++)
        if (!f->rows[i].docs) return 1;
    if (second_lacks(&f->d->facts) || (double)count * (double)tokens > SECOND_WORK) return 1;
    if (f->model.config.score && f->model.config.vocab < 2) return 1;
    s->table = (slow_tensor *)slow_allocate(slow_tensors(&s->config), sizeof *s->table);
    slow_parameters(&s->config, s->table);
    s->parameters = (double *)slow_allocate(count, sizeof *s->parameters);
    s->direction = (double *)slow_allocate(count, sizeof *s->direction);
    s->rows = (slow_row *)slow_allocate(f->count, sizeof *s->rows);
    s->tokens = (int32_t *)slow_allocate(2 * tokens, sizeof *s->tokens);
    elements = (double *)slow_allocate(f->model.elements, sizeof *elements);
    if (f->weights) s->terms = (double **)slow_allocate(f->count, sizeof *s->terms);
    seqpar_device_read(f->device, elements, f->model.params.data, 0, f->model.elements,
                       f->device->storage);
    second_order(s, s->parameters, elements);
    free(elements);
    second_rows(s, seeds);
    return 0;
}

/* Turns dL/dvalue into dL/dl, l being slow.h's log-prob of token 0. */
static inline void second_seeds(second *s, double *const *values, double *const *seeds) {
    double *at = s->seeds = (double *)slow_allocate(second_tokens(s->f), sizeof *s->seeds);
    for (int64_t i = 0; i < s->f->count; i++) {
        int64_t n = s->rows[i].tokens;
        s->rows[i].logp_seeds = at;
        for (int64_t t = 0; t < n; t++)
            at[t] = seeds[i][t] * (1 + exp(values[i][t]) / ((double)s->config.vocab - 1));
        at += n;
    }
}

/* The relative distance of slow.h's log-probs or values from the reference's. */
static inline double second_logp(const second *s, double *const *logp) {
    likeness l = {0};
    for (int64_t i = 0; i < s->f->count; i++) {
        int64_t n = s->rows[i].tokens;
        double *own = (double *)slow_allocate(3 * n, sizeof *own);
        slow_statistics(&s->config, s->parameters, &s->rows[i], own, own + n, own + 2 * n);
        for (int64_t t = 0; t < n; t++)
            if (s->rows[i].targets[t] != SLOW_IGNORED) {
                double x = second_value(s, own[t]);
                liken(&l, &x, &logp[i][t], 1);
            }
        free(own);
    }
    return distance_from(&l, 1);
}

/* The direction must not change the zeros below the first row of a reward model's head. */
static inline void second_keep_head(second *s) {
    const slow_tensor *head = &s->table[slow_tensors(&s->config) - 1];
    if (!s->f->model.config.score) return;
    memset(s->direction + head->offset + head->cols, 0,
           (size_t)((head->rows - 1) * head->cols) * sizeof *s->direction);
}

/* slow.h's slope along s->direction minus the gradient's inner product with it, relative to the
   product of their norms. */
static inline double second_slope(const second *s, const double *gradient) {
    slow_problem p = {.config = &s->config,
                      .rows = s->f->count,
                      .row = s->rows,
                      .objective = second_objective(s)};
    int64_t count = slow_parameters(&s->config, NULL);
    double slope = slow_directional(&p, s->parameters, s->direction);
    double own = dot_product(gradient, s->direction, count);
    double norm = slow_norm(count, gradient) * slow_norm(count, s->direction);
    return norm > 0 ? fabs(slope - own) / norm : slope;
}

/* Compares slow.h with the reference; text says the result. The directions are the gradient,
   which tests its length, and a random one, which tests the rest. 1: they agree; 0: they do
   not; -1: not compared. logp, seeds: (rows); gradient: (model.elements). */
static inline int second_agrees(const reference *f, double *const *logp, double *const *seeds,
                                const double *gradient, char *text, size_t size) {
    second s;
    double distance, along, across, *ordered;
    uint64_t state = 1;
    int64_t count;
    if (second_open(&s, f, seeds)) {
        second_close(&s);
        snprintf(text, size,
                 "the reference was not checked against slow.h: too much work, no "
                 "cu_seqlens, or softmax_scale or softcap");
        return -1;
    }
    if (f->model.config.score) second_seeds(&s, logp, seeds);
    count = slow_parameters(&s.config, NULL);
    ordered = (double *)slow_allocate(count, sizeof *ordered);
    second_order(&s, ordered, gradient);
    distance = second_logp(&s, logp);
    memcpy(s.direction, ordered, (size_t)count * sizeof *ordered);
    along = second_slope(&s, ordered);
    for (int64_t i = 0; i < count; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        s.direction[i] = (double)(int64_t)state / 0x1p63;
    }
    second_keep_head(&s);
    across = second_slope(&s, ordered);
    free(ordered);
    second_close(&s);
    snprintf(text, size,
             "slow.h and the reference are %.3g apart in log-probs, %.3g and %.3g in slopes of "
             "the loss",
             distance, along, across);
    return distance < 1e-7 && along < 1e-9 && across < 1e-9;
}
#endif
