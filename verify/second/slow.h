/* SPDX-License-Identifier: MIT OR Unlicense */
/*
 * slow.h - a Llama-style language model (Llama, Mistral, Qwen2, Qwen3, SmolLM3, Mixtral and
 * Qwen3-MoE), its loss, its gradient and its optimizer, written a second time: dense, naive and
 * obvious, to be what a fast implementation is checked against.
 *
 * There is no backward pass here to get wrong.  The forward pass is written in complex numbers
 * and uses analytic functions only, so for a real function f
 *
 *     f(x + i h) = f(x) + i h f'(x) - O(h^2)        hence        f'(x) = Im f(x + i h) / h,
 *
 * and since nothing is subtracted h can be 1e-30: the derivative is exact to rounding.  It
 * costs one forward pass per parameter.  "Analytic" rules out fabs, conj and max of complex
 * numbers; where a maximum is wanted for range (log-sum-exp) it is taken over the real parts
 * and used as a real constant that cancels, and experts are chosen by real parts.
 *
 * Matrices are row-major, one row per token.  Weights are (outputs x inputs) as in PyTorch's
 * Linear. Heads lie side by side within a token's row: q[token][head][element].
 */
#ifndef SLOW_H
#define SLOW_H

#include <complex.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SLOW         static __attribute__((unused))
#define SLOW_STEP    1e-30
#define SLOW_IGNORED (-100)

typedef double _Complex slow_complex;

/* How rotary frequencies are scaled to serve longer texts than a model was first trained on,
   as Hugging Face's rope_type; its "dynamic" is plain as far as that first length. */
enum { SLOW_ROPE_PLAIN, SLOW_ROPE_LINEAR, SLOW_ROPE_LLAMA3, SLOW_ROPE_YARN };

typedef struct {
    int64_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocab;
    double rope_theta, rms_eps;
    bool tied;
    /* All zero: plain. rope_low and rope_high are turns within the first rope_first positions:
       llama3's low_freq_factor and high_freq_factor, yarn's beta_slow and beta_fast. */
    int rope;
    double rope_factor, rope_low, rope_high;
    double rope_first;     /* original_max_position_embeddings */
    double rope_attention; /* yarn's attention_factor; 0: what the factor implies */
    bool rope_exact;       /* yarn's truncate is false */
    int64_t window;        /* keys that a query sees, itself the last; 0: all before it */
    bool qkv_bias;         /* q_proj, k_proj and v_proj have biases, as Qwen2's */
    bool o_bias;           /* o_proj has one; with qkv_bias it is Llama's attention_bias */
    bool mlp_bias;         /* gate_proj, up_proj and down_proj have, but no expert's */
    bool qk_norm;          /* RMSNorm of each head of q and k, before they turn, as Qwen3's */
    int64_t no_rope_every; /* layer i does not turn if this divides i + 1 (SmolLM3); 0: all */
    int64_t window_from;   /* the first layer with the window: Qwen2's max_window_layers */
    int64_t experts;       /* of a layer, as Mixtral's and Qwen3-MoE's; 0: dense MLPs */
    int64_t experts_per_token;
    /* Layer i has experts if this divides i + 1, or else a dense MLP of `intermediate`:
       Qwen3-MoE's decoder_sparse_step; 0: all have. */
    int64_t sparse_every;
    int64_t expert_intermediate; /* intermediate_size (Mixtral), moe_intermediate_size */
    bool topk_norm;              /* the chosen probabilities are made to sum to 1 (Mixtral) */
    bool mixtral_names;          /* of routers and experts: block_sparse_moe, w1, w2, w3 */
    int64_t untaught; /* torch's padding_idx + 1: inputs of it give the embedding no gradient */
} slow_config;

/* Where a named tensor lies in the flat parameter array; a norm's gain and a bias are one
   row. */
typedef struct {
    char name[96];
    int64_t offset, rows, cols;
} slow_tensor;

/*
 * One row of a batch: documents packed end to end, document d from token cu_seqlens[d] up to
 * cu_seqlens[d+1]. Tokens past the last document are padding and attend to nothing.  The
 * targets are already shifted. The seeds are arbitrary coefficients, per token, of the entropy
 * and of the target's log-probability. Any of the last four may be NULL: no targets, weights of
 * 1, seeds of 0.
 */
typedef struct {
    int64_t tokens, docs;
    const int64_t *cu_seqlens;
    const int32_t *ids;
    const int32_t *targets;
    const double *weights;
    const double *entropy_seeds;
    const double *logp_seeds;
} slow_row;

/* What to minimize; `count` is the number of tokens to divide by, over all the rows of all
   the ranks. */
typedef struct {
    double smoothing, zloss, count;
    double balance; /* on the experts' load-balancing loss: router_aux_loss_coef */
} slow_objective;

/* ---- memory ---- */

#ifndef SLOW_MEMORY_EXIT /* the exit code where memory runs out */
#define SLOW_MEMORY_EXIT 1
#endif

/* Zeroed memory, or the end of the program; the spare byte keeps an empty array from being
   NULL. */
SLOW void *slow_allocate(int64_t count, size_t size) {
    void *memory = calloc((size_t)count * size + 1, 1);
    if (!memory) {
        fprintf(stderr, "error: no memory for the second reference\n");
        exit(SLOW_MEMORY_EXIT);
    }
    return memory;
}

SLOW slow_complex *slow_array(int64_t count) {
    return slow_allocate(count, sizeof(slow_complex));
}

SLOW slow_complex *slow_promote(int64_t count, const double *x) {
    slow_complex *z = slow_array(count);
    for (int64_t k = 0; k < count; k++) z[k] = x[k];
    return z;
}

SLOW void slow_real_parts(int64_t count, const slow_complex *z, double *x) {
    for (int64_t k = 0; k < count; k++) x[k] = creal(z[k]);
}

/* ---- differentiation by complex step ---- */

typedef slow_complex slow_scalar(const slow_complex *x, const void *context);

SLOW double slow_value_of(slow_scalar *f, const void *context, int64_t count, const double *x) {
    slow_complex *z = slow_promote(count, x);
    double value = creal(f(z, context));
    free(z);
    return value;
}

SLOW void slow_gradient_of(slow_scalar *f, const void *context, int64_t count, const double *x,
                           double *gradient) {
    slow_complex *z = slow_promote(count, x);
    for (int64_t k = 0; k < count; k++) {
        z[k] = x[k] + SLOW_STEP * _Complex_I;
        gradient[k] = cimag(f(z, context)) / SLOW_STEP;
        z[k] = x[k];
    }
    free(z);
}

/* The gradient's inner product with `direction`, for the price of one evaluation. */
SLOW double slow_directional_of(slow_scalar *f, const void *context, int64_t count,
                                const double *x, const double *direction) {
    slow_complex *z = slow_array(count);
    for (int64_t k = 0; k < count; k++) z[k] = x[k] + SLOW_STEP * direction[k] * _Complex_I;
    double derivative = cimag(f(z, context)) / SLOW_STEP;
    free(z);
    return derivative;
}

/* ---- parameters ---- */

typedef struct {
    slow_tensor *table;
    int64_t tensors, parameters;
} slow_builder;

SLOW void slow_append(slow_builder *b, const char *prefix, const char *name, int64_t rows,
                      int64_t cols) {
    if (b->table) {
        slow_tensor *t = &b->table[b->tensors];
        snprintf(t->name, sizeof t->name, "%s%s", prefix, name);
        t->offset = b->parameters;
        t->rows = rows;
        t->cols = cols;
    }
    b->tensors++;
    b->parameters += rows * cols;
}

/* A weight and, if there is one, its bias. */
SLOW void slow_append_linear(slow_builder *b, const char *prefix, const char *name,
                             int64_t outputs, int64_t inputs, bool bias) {
    char both[64];
    snprintf(both, sizeof both, "%s.weight", name);
    slow_append(b, prefix, both, outputs, inputs);
    snprintf(both, sizeof both, "%s.bias", name);
    if (bias) slow_append(b, prefix, both, 1, outputs);
}

/* Does this layer route its tokens to experts? */
SLOW bool slow_sparse(const slow_config *c, int64_t layer) {
    return c->experts > 0 && (c->sparse_every <= 1 || (layer + 1) % c->sparse_every == 0);
}

SLOW void slow_append_attention(slow_builder *b, const slow_config *c, const char *prefix) {
    int64_t q_width = c->heads * c->head_dim, kv_width = c->kv_heads * c->head_dim;
    slow_append_linear(b, prefix, "self_attn.q_proj", q_width, c->hidden, c->qkv_bias);
    if (c->qk_norm) slow_append(b, prefix, "self_attn.q_norm.weight", 1, c->head_dim);
    slow_append_linear(b, prefix, "self_attn.k_proj", kv_width, c->hidden, c->qkv_bias);
    if (c->qk_norm) slow_append(b, prefix, "self_attn.k_norm.weight", 1, c->head_dim);
    slow_append_linear(b, prefix, "self_attn.v_proj", kv_width, c->hidden, c->qkv_bias);
    slow_append_linear(b, prefix, "self_attn.o_proj", c->hidden, q_width, c->o_bias);
}

SLOW void slow_append_mlp(slow_builder *b, const slow_config *c, const char *prefix) {
    slow_append_linear(b, prefix, "mlp.gate_proj", c->intermediate, c->hidden, c->mlp_bias);
    slow_append_linear(b, prefix, "mlp.up_proj", c->intermediate, c->hidden, c->mlp_bias);
    slow_append_linear(b, prefix, "mlp.down_proj", c->hidden, c->intermediate, c->mlp_bias);
}

/* Named as in checkpoint files, each expert's three matrices apart. */
SLOW void slow_append_experts(slow_builder *b, const slow_config *c, const char *layer) {
    static const char *const plain[] = {"gate_proj.weight", "up_proj.weight",
                                        "down_proj.weight"},
                             *const mixtral[] = {"w1.weight", "w3.weight", "w2.weight"};
    const char *block = c->mixtral_names ? "block_sparse_moe." : "mlp.";
    const char *const *name = c->mixtral_names ? mixtral : plain;
    char prefix[96];
    snprintf(prefix, sizeof prefix, "%s%s", layer, block);
    slow_append(b, prefix, "gate.weight", c->experts, c->hidden);
    for (int64_t e = 0; e < c->experts; e++) {
        snprintf(prefix, sizeof prefix, "%s%sexperts.%d.", layer, block, (int)e);
        slow_append(b, prefix, name[0], c->expert_intermediate, c->hidden);
        slow_append(b, prefix, name[1], c->expert_intermediate, c->hidden);
        slow_append(b, prefix, name[2], c->hidden, c->expert_intermediate);
    }
}

SLOW void slow_append_layer(slow_builder *b, const slow_config *c, int64_t layer) {
    char prefix[32];
    snprintf(prefix, sizeof prefix, "model.layers.%d.", (int)layer);
    slow_append(b, prefix, "input_layernorm.weight", 1, c->hidden);
    slow_append_attention(b, c, prefix);
    slow_append(b, prefix, "post_attention_layernorm.weight", 1, c->hidden);
    if (slow_sparse(c, layer))
        slow_append_experts(b, c, prefix);
    else
        slow_append_mlp(b, c, prefix);
}

/* All of a model's tensors; `table` may be NULL. */
SLOW slow_builder slow_build(const slow_config *c, slow_tensor *table) {
    slow_builder b = {.table = table};
    slow_append(&b, "model.", "embed_tokens.weight", c->vocab, c->hidden);
    for (int64_t layer = 0; layer < c->layers; layer++) slow_append_layer(&b, c, layer);
    slow_append(&b, "model.", "norm.weight", 1, c->hidden);
    if (!c->tied) slow_append(&b, "lm_head.", "weight", c->vocab, c->hidden);
    return b;
}

/* How many tensors there are: the length of slow_parameters' table. */
SLOW int64_t slow_tensors(const slow_config *c) { return slow_build(c, NULL).tensors; }

/* The number of scalar parameters; fills `table` unless it is NULL. */
SLOW int64_t slow_parameters(const slow_config *c, slow_tensor *table) {
    return slow_build(c, table).parameters;
}

/* The next `count` parameters: the forward pass reads the tensors in the order
   slow_parameters lists them. */
SLOW const slow_complex *slow_next(const slow_complex **cursor, int64_t count) {
    const slow_complex *tensor = *cursor;
    *cursor += count;
    return tensor;
}

/* y = weight x + bias, the bias NULL if there is none. */
typedef struct {
    const slow_complex *weight, *bias;
} slow_projection;

SLOW slow_projection slow_next_projection(const slow_complex **cursor, int64_t outputs,
                                          int64_t inputs, bool bias) {
    slow_projection p = {NULL, NULL};
    p.weight = slow_next(cursor, outputs * inputs);
    if (bias) p.bias = slow_next(cursor, outputs);
    return p;
}

/* A dense MLP, or one expert. */
typedef struct {
    slow_projection gate, up, down;
} slow_mlp;

SLOW slow_mlp slow_next_mlp(const slow_complex **cursor, int64_t hidden, int64_t width,
                            bool bias) {
    slow_mlp m;
    m.gate = slow_next_projection(cursor, width, hidden, bias);
    m.up = slow_next_projection(cursor, width, hidden, bias);
    m.down = slow_next_projection(cursor, hidden, width, bias);
    return m;
}

/* The dense MLP in layers without experts; the router and the experts, end to end, in those
   with. */
typedef struct {
    const slow_complex *attention_norm, *q_norm, *k_norm, *mlp_norm, *router, *experts;
    slow_projection q, k, v, o;
    slow_mlp mlp;
} slow_layer;

SLOW void slow_next_attention(const slow_config *c, const slow_complex **cursor,
                              slow_layer *w) {
    int64_t q_width = c->heads * c->head_dim, kv_width = c->kv_heads * c->head_dim;
    w->q = slow_next_projection(cursor, q_width, c->hidden, c->qkv_bias);
    if (c->qk_norm) w->q_norm = slow_next(cursor, c->head_dim);
    w->k = slow_next_projection(cursor, kv_width, c->hidden, c->qkv_bias);
    if (c->qk_norm) w->k_norm = slow_next(cursor, c->head_dim);
    w->v = slow_next_projection(cursor, kv_width, c->hidden, c->qkv_bias);
    w->o = slow_next_projection(cursor, c->hidden, q_width, c->o_bias);
}

SLOW slow_layer slow_next_layer(const slow_config *c, int64_t layer,
                                const slow_complex **cursor) {
    slow_layer w = {.attention_norm = slow_next(cursor, c->hidden)};
    slow_next_attention(c, cursor, &w);
    w.mlp_norm = slow_next(cursor, c->hidden);
    if (slow_sparse(c, layer)) {
        w.router = slow_next(cursor, c->experts * c->hidden);
        w.experts = slow_next(cursor, c->experts * 3 * c->expert_intermediate * c->hidden);
    } else {
        w.mlp = slow_next_mlp(cursor, c->hidden, c->intermediate, c->mlp_bias);
    }
    return w;
}

/* ---- documents, positions, masks ---- */

/* The document that token t belongs to, -1 for padding. */
SLOW int64_t slow_document(int64_t docs, const int64_t *cu_seqlens, int64_t t) {
    for (int64_t d = 0; d < docs; d++)
        if (cu_seqlens[d] <= t && t < cu_seqlens[d + 1]) return d;
    return -1;
}

/* Positions count from the start of the token's own document. */
SLOW int64_t slow_position(int64_t docs, const int64_t *cu_seqlens, int64_t t) {
    int64_t d = slow_document(docs, cu_seqlens, t);
    return d < 0 ? 0 : t - cu_seqlens[d];
}

/*
 * mask[i][j]: may token i look at token j?  Only within its document.  If causal, only j <= i
 * and the first prefix_lens[d] tokens of document d, which the whole document may see.  With a
 * window of W > 0, only the W - 1 tokens before i, also in a prefix, and, if not causal, only
 * the W - 1 after it.  prefix_lens may be NULL.
 */
SLOW void slow_mask_general(int64_t tokens, int64_t docs, const int64_t *cu_seqlens,
                            bool causal, int64_t window, const int64_t *prefix_lens,
                            bool *mask) {
    for (int64_t i = 0; i < tokens; i++)
        for (int64_t j = 0; j < tokens; j++) {
            int64_t d = slow_document(docs, cu_seqlens, i);
            bool together = d >= 0 && d == slow_document(docs, cu_seqlens, j);
            bool in_prefix = together && prefix_lens && j < cu_seqlens[d] + prefix_lens[d];
            bool in_order = !causal || j <= i || in_prefix;
            bool near = window <= 0 || (i - j < window && (causal || j - i < window));
            mask[i * tokens + j] = together && in_order && near;
        }
}

SLOW void slow_mask(int64_t tokens, int64_t docs, const int64_t *cu_seqlens, bool causal,
                    bool *mask) {
    slow_mask_general(tokens, docs, cu_seqlens, causal, 0, NULL, mask);
}

/* ---- the layers' functions ---- */

/* y = x w^T, a PyTorch Linear without bias. */
SLOW void slow_linear(int64_t tokens, int64_t inputs, int64_t outputs, const slow_complex *x,
                      const slow_complex *w, slow_complex *y) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t o = 0; o < outputs; o++) {
            slow_complex sum = 0;
            for (int64_t i = 0; i < inputs; i++) sum += x[t * inputs + i] * w[o * inputs + i];
            y[t * outputs + o] = sum;
        }
}

/* y = x weight^T + bias, a PyTorch Linear. */
SLOW void slow_project(int64_t tokens, int64_t inputs, int64_t outputs, const slow_complex *x,
                       const slow_projection *p, slow_complex *y) {
    slow_linear(tokens, inputs, outputs, x, p->weight, y);
    for (int64_t k = 0; p->bias && k < tokens * outputs; k++) y[k] += p->bias[k % outputs];
}

/* y = gain * x / sqrt(mean(x^2) + eps), token by token; y may be x. */
SLOW void slow_rmsnorm(int64_t tokens, int64_t hidden, double eps, const slow_complex *x,
                       const slow_complex *gain, slow_complex *y) {
    for (int64_t t = 0; t < tokens; t++) {
        slow_complex squares = 0;
        for (int64_t i = 0; i < hidden; i++) squares += x[t * hidden + i] * x[t * hidden + i];
        slow_complex root = csqrt(squares / (double)hidden + eps);
        for (int64_t i = 0; i < hidden; i++)
            y[t * hidden + i] = gain[i] * x[t * hidden + i] / root;
    }
}

/* x sigmoid(x), in whichever form keeps the exponential from overflowing. */
SLOW slow_complex slow_silu(slow_complex x) {
    return creal(x) < 0 ? x * cexp(x) / (1 + cexp(x)) : x / (1 + cexp(-x));
}

/* Small arguments leave ctanh nothing to overflow; for large ones 1 - tanh^2, the slope,
   must not cancel. */
SLOW slow_complex slow_tanh(slow_complex x) {
    if (creal(x) < 0) return -slow_tanh(-x);
    slow_complex e = cexp(-2 * x);
    return creal(x) < 1 ? ctanh(x) : (1 - e) / (1 + e);
}

/* log(sum(exp(x))); -inf if there is nothing but -inf to sum, when any finite shift will do. */
SLOW slow_complex slow_log_sum_exp(int64_t count, const slow_complex *x) {
    double shift = -INFINITY;
    for (int64_t j = 0; j < count; j++)
        if (creal(x[j]) > shift) shift = creal(x[j]);
    if (isinf(shift)) shift = 0;
    slow_complex sum = 0;
    for (int64_t j = 0; j < count; j++) sum += cexp(x[j] - shift);
    return shift + clog(sum);
}

/* ---- rotary embedding ---- */

/* By how many radians element i of a head turns from one position to the next. */
SLOW double slow_rope_plain(const slow_config *c, int64_t i) {
    return pow(c->rope_theta, -2.0 * (double)i / (double)c->head_dim);
}

/* Elements with many turns within the original length keep their frequency. Those with few
   turns are slowed down by the factor, so that longer texts bring no new angles. In between the
   two frequencies are mixed. */
SLOW double slow_rope_llama3(const slow_config *c, int64_t i) {
    double fast = slow_rope_plain(c, i), slow = fast / c->rope_factor;
    double wavelength = 2 * acos(-1) / fast;
    if (wavelength < c->rope_first / c->rope_high) return fast;
    if (wavelength > c->rope_first / c->rope_low) return slow;
    double share = (c->rope_first / wavelength - c->rope_low) / (c->rope_high - c->rope_low);
    return (1 - share) * slow + share * fast;
}

/* The element that makes so many turns within the original length: slow_rope_plain solved for
   i, which seldom is whole and may be no element at all. */
SLOW double slow_rope_element(const slow_config *c, double turns) {
    double wavelength = c->rope_first / turns;
    return (double)c->head_dim * log(wavelength / (2 * acos(-1))) / (2 * log(c->rope_theta));
}

/* 0 for the elements that stay, the first ones, to 1 for those that are slowed down in full.
   The bounds are Hugging Face's, head_dim - 1 too, although only head_dim/2 elements turn. */
SLOW double slow_rope_ramp(const slow_config *c, int64_t i) {
    double begin = slow_rope_element(c, c->rope_high), end = slow_rope_element(c, c->rope_low);
    if (!c->rope_exact) begin = floor(begin);
    if (!c->rope_exact) end = ceil(end);
    begin = fmax(begin, 0);
    end = fmin(end, (double)c->head_dim - 1);
    if (begin == end) end += 0.001; /* a step, not 0 / 0 */
    return fmin(fmax(((double)i - begin) / (end - begin), 0), 1);
}

SLOW double slow_rope_yarn(const slow_config *c, int64_t i) {
    double fast = slow_rope_plain(c, i), ramp = slow_rope_ramp(c, i);
    return fast / c->rope_factor * ramp + fast * (1 - ramp);
}

SLOW double slow_rope_frequency(const slow_config *c, int64_t i) {
    switch (c->rope) {
    case SLOW_ROPE_LINEAR: return slow_rope_plain(c, i) / c->rope_factor;
    case SLOW_ROPE_LLAMA3: return slow_rope_llama3(c, i);
    case SLOW_ROPE_YARN: return slow_rope_yarn(c, i);
    }
    return slow_rope_plain(c, i);
}

/* YaRN multiplies queries and keys by this, so scores by its square: attention over more keys
   is to stay as sharp. */
SLOW double slow_rope_attention(const slow_config *c) {
    if (c->rope != SLOW_ROPE_YARN) return 1;
    if (c->rope_attention != 0) return c->rope_attention;
    return c->rope_factor > 1 ? 0.1 * log(c->rope_factor) + 1 : 1;
}

/* Rotary embedding of one head, rotate_half convention: element i turns with element i +
   head_dim/2. Turned first and lengthened then, so that a factor of 1 changes no bit. */
SLOW void slow_rope(const slow_config *c, int64_t position, slow_complex *x) {
    int64_t half = c->head_dim / 2;
    double attention = slow_rope_attention(c);
    for (int64_t i = 0; i < half; i++) {
        double angle = (double)position * slow_rope_frequency(c, i);
        slow_complex first = x[i], second = x[i + half];
        x[i] = attention * (first * cos(angle) - second * sin(angle));
        x[i + half] = attention * (second * cos(angle) + first * sin(angle));
    }
}

SLOW void slow_rope_row(const slow_config *c, const slow_row *row, int64_t heads,
                        slow_complex *x) {
    for (int64_t t = 0; t < row->tokens; t++) {
        int64_t position = slow_position(row->docs, row->cu_seqlens, t);
        for (int64_t h = 0; h < heads; h++)
            slow_rope(c, position, x + (t * heads + h) * c->head_dim);
    }
}

/* ---- attention ---- */

/* q and out: queries x heads x head_dim.  k and v: keys x kv_heads x head_dim.  lse: queries
   x heads. */
typedef struct {
    int64_t queries, keys, heads, kv_heads, head_dim;
} slow_shape;

/* What plain attention does without; a NULL or zeroed slow_extras is plain attention. */
typedef struct {
    double scale;   /* 0: 1 / sqrt(head_dim) */
    double softcap; /* c > 0: a score s = scale q.k becomes c tanh(s / c) */
    /* (heads): one more score in the softmax's sum, without a value; may be NULL */
    const double *sinks;
    /* (heads x queries x keys): on probabilities times v, not in the sum; may be NULL */
    const double *dropout;
} slow_extras;

/* All inputs of attention; those that it is differentiated by are complex. `sinks` here are
   used, not those of the extras. */
typedef struct {
    const slow_shape *shape;
    const bool *mask;
    slow_extras extras;
    slow_complex *q, *k, *v, *sinks;
} slow_inputs;

SLOW slow_inputs slow_promote_inputs(const slow_shape *s, const bool *mask,
                                     const slow_extras *extras, const double *q,
                                     const double *k, const double *v) {
    int64_t q_count = s->queries * s->heads * s->head_dim;
    int64_t kv_count = s->keys * s->kv_heads * s->head_dim;
    slow_inputs a = {.shape = s, .mask = mask};
    if (extras) a.extras = *extras;
    a.q = slow_promote(q_count, q);
    a.k = slow_promote(kv_count, k);
    a.v = slow_promote(kv_count, v);
    if (a.extras.sinks) a.sinks = slow_promote(s->heads, a.extras.sinks);
    return a;
}

SLOW void slow_free_inputs(slow_inputs *a) {
    free(a->q);
    free(a->k);
    free(a->v);
    free(a->sinks);
}

SLOW slow_complex slow_score(const slow_extras *x, int64_t head_dim, const slow_complex *q,
                             const slow_complex *k) {
    slow_complex score = 0;
    for (int64_t e = 0; e < head_dim; e++) score += q[e] * k[e];
    score = x->scale != 0 ? score * x->scale : score / sqrt((double)head_dim);
    return x->softcap > 0 ? x->softcap * slow_tanh(score / x->softcap) : score;
}

/* Attention of query i of head h over the keys that its row of the mask allows; out: head_dim
   numbers. Returns the lse. */
SLOW slow_complex slow_attend(const slow_inputs *a, int64_t i, int64_t h, slow_complex *out) {
    const slow_shape *s = a->shape;
    const bool *mask = a->mask + i * s->keys;
    const double *dropout = a->extras.dropout;
    const slow_complex *q = a->q + (i * s->heads + h) * s->head_dim;
    int64_t group = s->heads / s->kv_heads, first = h / group * s->head_dim;
    int64_t stride = s->kv_heads * s->head_dim;
    int64_t *key = slow_allocate(s->keys, sizeof *key), count = 0; /* that the query sees */
    slow_complex *score = slow_array(s->keys + 1);                 /* the last is the sink's */
    for (int64_t j = 0; j < s->keys; j++)
        if (mask[j]) {
            key[count] = j;
            score[count++] = slow_score(&a->extras, s->head_dim, q, a->k + j * stride + first);
        }
    if (a->sinks) score[count] = a->sinks[h];
    slow_complex lse = slow_log_sum_exp(count + (a->sinks != NULL), score);
    for (int64_t e = 0; e < s->head_dim; e++) out[e] = 0;
    for (int64_t n = 0; n < count; n++) {
        double factor = dropout ? dropout[(h * s->queries + i) * s->keys + key[n]] : 1;
        slow_complex probability = cexp(score[n] - lse);
        for (int64_t e = 0; e < s->head_dim; e++)
            out[e] += factor * probability * a->v[key[n] * stride + first + e];
    }
    free(key);
    free(score);
    return lse;
}

/*
 * mask: queries x keys.  A query that may look at nothing gets out = 0 and lse = -inf, or its
 * head's sink. lse may be NULL.
 */
SLOW void slow_attention(const slow_inputs *a, slow_complex *out, slow_complex *lse) {
    for (int64_t i = 0; i < a->shape->queries; i++)
        for (int64_t h = 0; h < a->shape->heads; h++) {
            int64_t at = i * a->shape->heads + h;
            slow_complex l = slow_attend(a, i, h, out + at * a->shape->head_dim);
            if (lse) lse[at] = l;
        }
}

SLOW void slow_attention_extra_real(const slow_shape *s, const bool *mask,
                                    const slow_extras *extras, const double *q, const double *k,
                                    const double *v, double *out, double *lse) {
    int64_t lse_count = s->queries * s->heads, q_count = lse_count * s->head_dim;
    slow_inputs a = slow_promote_inputs(s, mask, extras, q, k, v);
    slow_complex *zout = slow_array(q_count), *zlse = slow_array(lse_count);
    slow_attention(&a, zout, zlse);
    slow_real_parts(q_count, zout, out);
    slow_real_parts(lse_count, zlse, lse);
    slow_free_inputs(&a);
    free(zout);
    free(zlse);
}

SLOW void slow_attention_real(const slow_shape *s, const bool *mask, const double *q,
                              const double *k, const double *v, double *out, double *lse) {
    slow_attention_extra_real(s, mask, NULL, q, k, v, out, lse);
}

/* dout . out of query i of head h. */
SLOW slow_complex slow_attention_loss(const slow_inputs *a, const double *dout, int64_t i,
                                      int64_t h) {
    int64_t d = a->shape->head_dim;
    slow_complex *out = slow_array(d), loss = 0;
    slow_attend(a, i, h, out);
    for (int64_t e = 0; e < d; e++) loss += dout[(i * a->shape->heads + h) * d + e] * out[e];
    free(out);
    return loss;
}

/*
 * The derivative of sum(dout * out) by *x, one of a's numbers.  Only what x can change is
 * evaluated: queries first_query and on, of heads first_head and on and, if x belongs to a key
 * (-1: none), only those that see it.
 */
SLOW double slow_attention_slope(const slow_inputs *a, const double *dout, slow_complex *x,
                                 int64_t key, int64_t first_query, int64_t queries,
                                 int64_t first_head, int64_t heads) {
    slow_complex here = *x, loss = 0;
    *x += SLOW_STEP * _Complex_I;
    for (int64_t i = first_query; i < first_query + queries; i++)
        if (key < 0 || a->mask[i * a->shape->keys + key])
            for (int64_t h = first_head; h < first_head + heads; h++)
                loss += slow_attention_loss(a, dout, i, h);
    *x = here;
    return cimag(loss) / SLOW_STEP;
}

/* dsinks may be NULL; it is 0 where there are no sinks. */
SLOW void slow_attention_extra_gradient(const slow_shape *s, const bool *mask,
                                        const slow_extras *extras, const double *q,
                                        const double *k, const double *v, const double *dout,
                                        double *dq, double *dk, double *dv, double *dsinks) {
    int64_t n = s->queries, group = s->heads / s->kv_heads, d = s->head_dim;
    slow_inputs a = slow_promote_inputs(s, mask, extras, q, k, v);
    for (int64_t at = 0; at < n * s->heads * d; at++)
        dq[at] = slow_attention_slope(&a, dout, &a.q[at], -1, at / d / s->heads, 1,
                                      at / d % s->heads, 1);
    for (int64_t at = 0; at < s->keys * s->kv_heads * d; at++) {
        int64_t key = at / d / s->kv_heads, head = at / d % s->kv_heads * group;
        dk[at] = slow_attention_slope(&a, dout, &a.k[at], key, 0, n, head, group);
        dv[at] = slow_attention_slope(&a, dout, &a.v[at], key, 0, n, head, group);
    }
    for (int64_t h = 0; dsinks && h < s->heads; h++)
        dsinks[h] = a.sinks ? slow_attention_slope(&a, dout, &a.sinks[h], -1, 0, n, h, 1) : 0;
    slow_free_inputs(&a);
}

SLOW void slow_attention_gradient(const slow_shape *s, const bool *mask, const double *q,
                                  const double *k, const double *v, const double *dout,
                                  double *dq, double *dk, double *dv) {
    slow_attention_extra_gradient(s, mask, NULL, q, k, v, dout, dq, dk, dv, NULL);
}

/* ---- the model ---- */

/* x += y */
SLOW void slow_add(int64_t count, slow_complex *x, const slow_complex *y) {
    for (int64_t k = 0; k < count; k++) x[k] += y[k];
}

SLOW bool slow_turns(const slow_config *c, int64_t layer) {
    return c->no_rope_every <= 0 || (layer + 1) % c->no_rope_every != 0;
}

/* Queries or keys: every head is normalized, all by the same gain, and then turned. */
SLOW void slow_place_heads(const slow_config *c, int64_t layer, const slow_row *row,
                           int64_t heads, const slow_complex *gain, slow_complex *x) {
    if (gain) slow_rmsnorm(row->tokens * heads, c->head_dim, c->rms_eps, x, gain, x);
    if (slow_turns(c, layer)) slow_rope_row(c, row, heads, x);
}

SLOW void slow_layer_mask(const slow_config *c, int64_t layer, const slow_row *row,
                          bool *mask) {
    int64_t window = layer >= c->window_from ? c->window : 0;
    slow_mask_general(row->tokens, row->docs, row->cu_seqlens, true, window, NULL, mask);
}

/* x += o_proj(attention(rmsnorm(x))) */
SLOW void slow_attention_block(const slow_config *c, const slow_layer *w, int64_t layer,
                               const slow_row *row, slow_complex *x) {
    int64_t n = row->tokens, q_width = c->heads * c->head_dim;
    int64_t kv_width = c->kv_heads * c->head_dim;
    slow_shape shape = {n, n, c->heads, c->kv_heads, c->head_dim};
    slow_complex *y = slow_array(n * c->hidden), *out = slow_array(n * q_width);
    slow_complex *q = slow_array(n * q_width), *k = slow_array(n * kv_width),
                 *v = slow_array(n * kv_width);
    bool *mask = slow_allocate(n * n, sizeof *mask);
    slow_layer_mask(c, layer, row, mask);
    slow_rmsnorm(n, c->hidden, c->rms_eps, x, w->attention_norm, y);
    slow_project(n, c->hidden, q_width, y, &w->q, q);
    slow_project(n, c->hidden, kv_width, y, &w->k, k);
    slow_project(n, c->hidden, kv_width, y, &w->v, v);
    slow_place_heads(c, layer, row, c->heads, w->q_norm, q);
    slow_place_heads(c, layer, row, c->kv_heads, w->k_norm, k);
    slow_attention(&(slow_inputs){.shape = &shape, .mask = mask, .q = q, .k = k, .v = v}, out,
                   NULL);
    slow_project(n, q_width, c->hidden, out, &w->o, y);
    slow_add(n * c->hidden, x, y);
    free(y);
    free(out);
    free(q);
    free(k);
    free(v);
    free(mask);
}

/* y = down(silu(gate(x)) * up(x)) */
SLOW void slow_mlp_of(int64_t tokens, int64_t hidden, int64_t width, const slow_mlp *m,
                      const slow_complex *x, slow_complex *y) {
    slow_complex *gate = slow_array(tokens * width), *up = slow_array(tokens * width);
    slow_project(tokens, hidden, width, x, &m->gate, gate);
    slow_project(tokens, hidden, width, x, &m->up, up);
    for (int64_t k = 0; k < tokens * width; k++) up[k] *= slow_silu(gate[k]);
    slow_project(tokens, width, hidden, up, &m->down, y);
    free(gate);
    free(up);
}

/* ---- experts ---- */

/* A token's probabilities of all the experts, and which of them it goes to. */
typedef struct {
    slow_complex *probability;
    bool *chosen;
} slow_route;

/* Sums over the layers with experts and the tokens of documents: what the balance of a whole
   step is worked out from. */
typedef struct {
    double routes;             /* (token, layer) pairs */
    double *chosen;            /* (experts): pairs that chose this expert */
    slow_complex *probability; /* (experts): summed over pairs */
} slow_routing;

SLOW slow_route slow_route_open(int64_t experts) {
    return (slow_route){slow_array(experts), slow_allocate(experts, sizeof(bool))};
}

SLOW void slow_route_close(slow_route *r) {
    free(r->probability);
    free(r->chosen);
}

SLOW slow_routing slow_routing_open(int64_t experts) {
    return (slow_routing){0, slow_allocate(experts, sizeof(double)), slow_array(experts)};
}

SLOW void slow_routing_close(slow_routing *r) {
    free(r->chosen);
    free(r->probability);
}

/*
 * The `most` likely experts; of equally likely ones those with the lower numbers, which
 * PyTorch's topk leaves open.  The choice is by real parts: it has no derivative.
 */
SLOW void slow_choose(int64_t experts, int64_t most, slow_route *r) {
    for (int64_t e = 0; e < experts; e++) {
        double own = creal(r->probability[e]);
        int64_t before = 0;
        for (int64_t other = 0; other < experts; other++) {
            double theirs = creal(r->probability[other]);
            before += theirs > own || (theirs == own && other < e);
        }
        r->chosen[e] = before < most;
    }
}

/* A softmax over all the experts, not only over those that are then chosen. */
SLOW void slow_route_token(const slow_config *c, const slow_layer *w, const slow_complex *x,
                           slow_route *r) {
    slow_linear(1, c->hidden, c->experts, x, w->router, r->probability);
    slow_complex lse = slow_log_sum_exp(c->experts, r->probability);
    for (int64_t e = 0; e < c->experts; e++) r->probability[e] = cexp(r->probability[e] - lse);
    slow_choose(c->experts, c->experts_per_token, r);
}

SLOW void slow_count_route(int64_t experts, const slow_route *r, slow_routing *sums) {
    sums->routes += 1;
    for (int64_t e = 0; e < experts; e++) {
        sums->chosen[e] += r->chosen[e];
        sums->probability[e] += r->probability[e];
    }
}

/* What the chosen probabilities are divided by. */
SLOW slow_complex slow_route_sum(const slow_config *c, const slow_route *r) {
    slow_complex sum = 0;
    for (int64_t e = 0; e < c->experts; e++)
        if (r->chosen[e]) sum += r->probability[e];
    return c->topk_norm ? sum : 1;
}

/* One token through the experts that it goes to: the sum of what they say, each times its
   probability. */
SLOW void slow_experts_of(const slow_config *c, const slow_layer *w, const slow_route *r,
                          const slow_complex *x, slow_complex *y) {
    slow_complex *said = slow_array(c->hidden), sum = slow_route_sum(c, r);
    const slow_complex *cursor = w->experts;
    for (int64_t i = 0; i < c->hidden; i++) y[i] = 0;
    for (int64_t e = 0; e < c->experts; e++) {
        slow_mlp expert = slow_next_mlp(&cursor, c->hidden, c->expert_intermediate, false);
        if (!r->chosen[e]) continue;
        slow_mlp_of(1, c->hidden, c->expert_intermediate, &expert, x, said);
        for (int64_t i = 0; i < c->hidden; i++) y[i] += r->probability[e] / sum * said[i];
    }
    free(said);
}

/* Padding is routed too, but not counted.  `sums` may be NULL. */
SLOW void slow_sparse_mlp(const slow_config *c, const slow_layer *w, const slow_row *row,
                          slow_routing *sums, const slow_complex *x, slow_complex *y) {
    slow_route r = slow_route_open(c->experts);
    for (int64_t t = 0; t < row->tokens; t++) {
        slow_route_token(c, w, x + t * c->hidden, &r);
        slow_experts_of(c, w, &r, x + t * c->hidden, y + t * c->hidden);
        if (sums && slow_document(row->docs, row->cu_seqlens, t) >= 0)
            slow_count_route(c->experts, &r, sums);
    }
    slow_route_close(&r);
}

/*
 * Hugging Face's load_balancing_loss_func: experts * sum over experts of (how many times it is
 * chosen) * (its probability), both means over all layers' and all documents' tokens.  The
 * first has no derivative.  A router that prefers no expert gets experts_per_token.
 */
SLOW slow_complex slow_balance(int64_t experts, const slow_routing *r) {
    slow_complex sum = 0;
    if (r->routes == 0) return 0;
    for (int64_t e = 0; e < experts; e++)
        sum += r->chosen[e] / r->routes * (r->probability[e] / r->routes);
    return (double)experts * sum;
}

/* ---- the layers together ---- */

/* x += mlp(rmsnorm(x)), or the experts' */
SLOW void slow_mlp_block(const slow_config *c, const slow_layer *w, const slow_row *row,
                         slow_routing *sums, slow_complex *x) {
    int64_t n = row->tokens;
    slow_complex *normed = slow_array(n * c->hidden), *y = slow_array(n * c->hidden);
    slow_rmsnorm(n, c->hidden, c->rms_eps, x, w->mlp_norm, normed);
    if (w->router)
        slow_sparse_mlp(c, w, row, sums, normed, y);
    else
        slow_mlp_of(n, c->hidden, c->intermediate, &w->mlp, normed, y);
    slow_add(n * c->hidden, x, y);
    free(normed);
    free(y);
}

/* logits: tokens x vocab.  What the experts' routers said is added to `sums` unless it is
   NULL. */
SLOW void slow_forward(const slow_config *c, const slow_complex *parameters,
                       const slow_row *row, slow_routing *sums, slow_complex *logits) {
    int64_t n = row->tokens, hidden = c->hidden;
    slow_complex *x = slow_array(n * hidden);
    const slow_complex *embedding = slow_next(&parameters, c->vocab * hidden);
    for (int64_t t = 0; t < n; t++)
        for (int64_t k = 0; k < hidden; k++) {
            slow_complex e = embedding[row->ids[t] * hidden + k];
            x[t * hidden + k] = row->ids[t] + 1 == c->untaught ? creal(e) : e;
        }
    for (int64_t layer = 0; layer < c->layers; layer++) {
        slow_layer w = slow_next_layer(c, layer, &parameters);
        slow_attention_block(c, &w, layer, row, x);
        slow_mlp_block(c, &w, row, sums, x);
    }
    slow_rmsnorm(n, hidden, c->rms_eps, x, slow_next(&parameters, hidden), x);
    const slow_complex *head = c->tied ? embedding : slow_next(&parameters, c->vocab * hidden);
    slow_linear(n, hidden, c->vocab, x, head, logits);
    free(x);
}

SLOW void slow_logits(const slow_config *c, const slow_complex *parameters, const slow_row *row,
                      slow_complex *logits) {
    slow_forward(c, parameters, row, NULL, logits);
}

/* ---- the loss ---- */

/* What one token's logits say; logp is that of the target, 0 for an ignored one. */
typedef struct {
    slow_complex lse, logp, entropy, mean;
} slow_token;

SLOW slow_token slow_token_of(int64_t vocab, const slow_complex *logits, int32_t target) {
    slow_token y = {.lse = slow_log_sum_exp(vocab, logits)};
    for (int64_t j = 0; j < vocab; j++) {
        y.entropy -= cexp(logits[j] - y.lse) * (logits[j] - y.lse);
        y.mean += logits[j] / (double)vocab;
    }
    if (target != SLOW_IGNORED) y.logp = logits[target] - y.lse;
    return y;
}

SLOW double slow_or(const double *array, int64_t t, double otherwise) {
    return array ? array[t] : otherwise;
}

SLOW int32_t slow_target(const slow_row *row, int64_t t) {
    return row->targets ? row->targets[t] : SLOW_IGNORED;
}

/*
 * Token t's share of the loss: its weighted cross-entropy (label smoothing, z-loss) over the
 * global count, plus whatever is seeded on its log-probability and its entropy.  An ignored
 * target leaves the entropy only.
 */
SLOW slow_complex slow_token_loss(const slow_objective *o, const slow_row *row, int64_t t,
                                  int64_t vocab, const slow_complex *logits) {
    slow_token y = slow_token_of(vocab, logits, slow_target(row, t));
    slow_complex loss = slow_or(row->entropy_seeds, t, 0) * y.entropy;
    if (slow_target(row, t) == SLOW_IGNORED) return loss;
    loss += slow_or(row->logp_seeds, t, 0) * y.logp;
    slow_complex cross_entropy = -(1 - o->smoothing) * y.logp + o->smoothing * (y.lse - y.mean);
    return loss +
           slow_or(row->weights, t, 1) * (cross_entropy + o->zloss * y.lse * y.lse) / o->count;
}

typedef struct {
    const slow_config *config;
    int64_t rows;
    const slow_row *row;
    slow_objective objective;
} slow_problem;

SLOW slow_complex slow_row_loss(const slow_problem *p, const slow_complex *parameters,
                                const slow_row *row, slow_routing *sums) {
    int64_t vocab = p->config->vocab;
    slow_complex *logits = slow_array(row->tokens * vocab), loss = 0;
    slow_forward(p->config, parameters, row, sums, logits);
    for (int64_t t = 0; t < row->tokens; t++)
        loss += slow_token_loss(&p->objective, row, t, vocab, logits + t * vocab);
    free(logits);
    return loss;
}

/* The whole loss, a slow_scalar of the flat parameters; `problem` is a slow_problem.  The
   balance is that of all the rows together, not a sum over them. */
SLOW slow_complex slow_loss_complex(const slow_complex *parameters, const void *problem) {
    const slow_problem *p = problem;
    slow_routing sums = slow_routing_open(p->config->experts);
    slow_complex loss = 0;
    for (int64_t r = 0; r < p->rows; r++)
        loss += slow_row_loss(p, parameters, &p->row[r], &sums);
    if (p->objective.balance != 0)
        loss += p->objective.balance * slow_balance(p->config->experts, &sums);
    slow_routing_close(&sums);
    return loss;
}

SLOW double slow_loss(const slow_problem *p, const double *parameters) {
    return slow_value_of(slow_loss_complex, p, slow_parameters(p->config, NULL), parameters);
}

/* Every parameter by complex step: as many forward passes as parameters. */
SLOW void slow_gradient(const slow_problem *p, const double *parameters, double *gradient) {
    slow_gradient_of(slow_loss_complex, p, slow_parameters(p->config, NULL), parameters,
                     gradient);
}

/* With a unit vector for direction: one single parameter's derivative. */
SLOW double slow_directional(const slow_problem *p, const double *parameters,
                             const double *direction) {
    return slow_directional_of(slow_loss_complex, p, slow_parameters(p->config, NULL),
                               parameters, direction);
}

/* ---- plain real results of the forward pass ---- */

SLOW void slow_logits_real(const slow_config *c, const double *parameters, const slow_row *row,
                           double *logits) {
    slow_complex *z = slow_promote(slow_parameters(c, NULL), parameters);
    slow_complex *zlogits = slow_array(row->tokens * c->vocab);
    slow_logits(c, z, row, zlogits);
    slow_real_parts(row->tokens * c->vocab, zlogits, logits);
    free(z);
    free(zlogits);
}

/* Per token: the target's log-probability (0 if ignored), the log-sum-exp of the logits, the
   entropy. */
SLOW void slow_statistics(const slow_config *c, const double *parameters, const slow_row *row,
                          double *logp, double *lse, double *entropy) {
    slow_complex *z = slow_promote(slow_parameters(c, NULL), parameters);
    slow_complex *logits = slow_array(row->tokens * c->vocab);
    slow_logits(c, z, row, logits);
    for (int64_t t = 0; t < row->tokens; t++) {
        slow_token y = slow_token_of(c->vocab, logits + t * c->vocab, slow_target(row, t));
        logp[t] = creal(y.logp);
        lse[t] = creal(y.lse);
        entropy[t] = creal(y.entropy);
    }
    free(z);
    free(logits);
}

/* ---- optimizers, in PyTorch's order of operations ---- */

typedef struct {
    double beta1, beta2, eps, weight_decay;
} slow_adamw;

/* Step number t = 1, 2, ...; m and v start at 0. */
SLOW void slow_adamw_step(const slow_adamw *a, double lr, int64_t t, int64_t count,
                          const double *g, double *m, double *v, double *theta) {
    double correction1 = 1 - pow(a->beta1, (double)t);
    double correction2 = 1 - pow(a->beta2, (double)t);
    for (int64_t k = 0; k < count; k++) {
        theta[k] *= 1 - lr * a->weight_decay;
        m[k] += (1 - a->beta1) * (g[k] - m[k]);
        v[k] = a->beta2 * v[k] + (1 - a->beta2) * g[k] * g[k];
        double denominator = sqrt(v[k]) / sqrt(correction2) + a->eps;
        theta[k] -= lr / correction1 * m[k] / denominator;
    }
}

/* The buffer starts at 0; without momentum it just holds the last gradient. */
SLOW void slow_sgd_step(double lr, double momentum, double weight_decay, int64_t count,
                        const double *g, double *buffer, double *theta) {
    for (int64_t k = 0; k < count; k++) {
        buffer[k] = momentum * buffer[k] + g[k] + weight_decay * theta[k];
        theta[k] -= lr * buffer[k];
    }
}

SLOW double slow_norm(int64_t count, const double *x) {
    double squares = 0;
    for (int64_t k = 0; k < count; k++) squares += x[k] * x[k];
    return sqrt(squares);
}

/* clip_grad_norm_: returns the norm before clipping.  A NaN in one gradient makes all of
   them NaN. */
SLOW double slow_clip(int64_t count, double max_norm, double *g) {
    double norm = slow_norm(count, g);
    double coefficient = max_norm / (norm + 1e-6);
    if (coefficient > 1) coefficient = 1;
    for (int64_t k = 0; k < count; k++) g[k] *= coefficient;
    return norm;
}

/* ---- learning-rate schedules, as Hugging Face's get_scheduler ---- */

typedef enum {
    SLOW_CONSTANT,
    SLOW_LINEAR,
    SLOW_COSINE,
    SLOW_COSINE_WITH_MIN_LR
} slow_schedule_kind;

typedef struct {
    slow_schedule_kind kind;
    int64_t warmup, total;
    double min_lr_rate;
} slow_schedule;

/* The factor on the learning rate after `step` scheduler steps. */
SLOW double slow_schedule_factor(const slow_schedule *s, int64_t step) {
    double warmup = (double)s->warmup, total = (double)s->total, now = (double)step;
    if (step < s->warmup) return now / fmax(1, warmup);
    double progress = (now - warmup) / fmax(1, total - warmup);
    double cosine = 0.5 * (1 + cos(acos(-1) * progress));
    switch (s->kind) {
    case SLOW_LINEAR: return fmax(0, (total - now) / fmax(1, total - warmup));
    case SLOW_COSINE: return fmax(0, cosine);
    case SLOW_COSINE_WITH_MIN_LR:
        return fmax(0, cosine * (1 - s->min_lr_rate) + s->min_lr_rate);
    case SLOW_CONSTANT: break;
    }
    return 1;
}

#endif
