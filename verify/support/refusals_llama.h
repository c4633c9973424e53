/* SPDX-License-Identifier: MIT OR Unlicense */
/* What seqpar_llama.h refuses, for test_refusals.c; on the one rank that it has opened. */
#ifndef REFUSALS_LLAMA_H
#define REFUSALS_LLAMA_H

#include "seqpar_llama.h"

/* ---- a model ---- */

typedef struct model_call {
    seqpar_llama_config config;
    int name;  /* of the score head: 0: a language model */
    int whole; /* 1: with room for its parameters */
} model_call;

enum { NO_NAME, SCORE, EMPTY, LONGEST_NAME, TOO_LONG, EMBEDDING, NORM, LAYER, LAYERS };
static const char *const head_names[] = {
    [SCORE] = "score",
    [EMPTY] = "",
    [LONGEST_NAME] = "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrs",
    [TOO_LONG] = "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrst",
    [EMBEDDING] = "model.embed_tokens",
    [NORM] = "model.norm",
    [LAYER] = "model.layers.",
    [LAYERS] = "model.layers"};

static seqpar_status open_model(void *call) {
    model_call *c = call;
    seqpar_llama model;
    if (c->name) c->config.score = head_names[c->name];
    seqpar_status status = c->whole ? seqpar_llama_open(&ctx, &model, &c->config)
                                    : seqpar_llama_open_table(&ctx, &model, &c->config);
    seqpar_llama_close(&ctx, &model);
    return status;
}

#define X(member, value) SET(model_call, config.member, value)
#define ROPE(kind)       X(rope.type, SEQPAR_ROPE_##kind)
#define POSITIVE(layers, hidden, intermediate, vocab) \
    "the model has " layers " layers, hidden " hidden ", intermediate " intermediate \
    ", vocab " vocab "; all must be positive"
#define AT_MOST(layers, hidden, intermediate, vocab) \
    "the model has " layers " layers, hidden " hidden ", intermediate " intermediate \
    ", vocab " vocab \
    "; at most 65536, 1048576, 1048576 and 16777216 are possible, check the configuration"
#define HEADS_OVER(heads, kv) \
    heads " heads over " kv " kv_heads; heads must be a positive multiple of kv_heads"
#define THETA(theta, eps) \
    "rope_theta is " theta " and rms_norm_eps " eps \
    "; give numbers above 0, up to 1e300, or 0 for 10000 and 1e-5"
#define WINDOW(window, from, every) \
    "window is " window ", window_from " from " and no_rope_every " every \
    "; none may be negative"
#define EXPERTS(experts, every) \
    "experts is " experts " and sparse_every " every \
    "; give 0 to 1048576 experts, and a sparse_every of at least 0 (0: every layer)"
#define FACTOR(factor, positions) \
    "rope factor is " factor " and original positions " positions "; give numbers above 0"
#define BOUNDS(low, high) \
    "rope bounds are " low " and " high \
    "; give two numbers above 0, the lower one (low_freq_factor, beta_slow) first"
static const model_call good_model = {
    .config = {.layers = 2,
               .hidden = 6,
               .heads = 4,
               .kv_heads = 2,
               .head_dim = 2,
               .intermediate = 5,
               .vocab = VOCAB,
               .rope = {.factor = 2, .first_positions = 8, .low = 1, .high = 4},
               .experts_per_token = 2,
               .expert_intermediate = 3}};
static const limit model_limits[] = {
    {X(layers, 1), 0, SEQPAR_ERR_SIZE, POSITIVE("0", "6", "5", "11")},
    {X(hidden, 1), 0, SEQPAR_ERR_SIZE, POSITIVE("2", "0", "5", "11")},
    {X(intermediate, 1), 0, SEQPAR_ERR_SIZE, POSITIVE("2", "6", "0", "11")},
    {X(vocab, 1), 0, SEQPAR_ERR_SIZE, POSITIVE("2", "6", "5", "0")},
    {X(layers, 65536), 65537, SEQPAR_ERR_SIZE, AT_MOST("65537", "6", "5", "11")},
    {X(hidden, 1048576), 1048577, SEQPAR_ERR_SIZE, AT_MOST("2", "1048577", "5", "11")},
    {X(intermediate, 1048576), 1048577, SEQPAR_ERR_SIZE, AT_MOST("2", "6", "1048577", "11")},
    {X(vocab, 16777216), 16777217, SEQPAR_ERR_SIZE, AT_MOST("2", "6", "5", "16777217")},
    {X(heads, 2), 0, SEQPAR_ERR_HEADS, HEADS_OVER("0", "2")},
    {X(kv_heads, 1), 0, SEQPAR_ERR_HEADS, HEADS_OVER("4", "0")},
    {X(heads, 6), 7, SEQPAR_ERR_HEADS, HEADS_OVER("7", "2")},
    {X(head_dim, 2), 0, SEQPAR_ERR_HEAD_DIM,
     "head_dim is 0; rotary embedding needs a positive even one"},
    {X(head_dim, 4), 3, SEQPAR_ERR_HEAD_DIM,
     "head_dim is 3; rotary embedding needs a positive even one"},
    {X(head_dim, 262144), 262146, SEQPAR_ERR_SIZE,
     "4 heads of head_dim 262146 are wider than 1048576, the most a token may have; check the "
     "configuration"},
    {X(rope_theta, 0), -1e-300L, SEQPAR_ERR_OPTION, THETA("-1e-300", "0")},
    {X(rope_theta, 1e300), 1.00001e300L, SEQPAR_ERR_OPTION, THETA("1.00001e+300", "0")},
    {X(rope_theta, 1), NAN, SEQPAR_ERR_OPTION, THETA("nan", "0")},
    {X(rms_eps, 0), -1e-300L, SEQPAR_ERR_OPTION, THETA("0", "-1e-300")},
    {X(rms_eps, 1e300), 1.00001e300L, SEQPAR_ERR_OPTION, THETA("0", "1.00001e+300")},
    {X(rms_eps, 1), NAN, SEQPAR_ERR_OPTION, THETA("0", "nan")},
    {X(window, 0), -1, SEQPAR_ERR_OPTION, WINDOW("-1", "0", "0")},
    {X(window_from, 0), -1, SEQPAR_ERR_OPTION, WINDOW("0", "-1", "0")},
    {X(no_rope_every, 0), -1, SEQPAR_ERR_OPTION, WINDOW("0", "0", "-1")},
    {SET(model_call, name, LONGEST_NAME), TOO_LONG, SEQPAR_ERR_OPTION,
     "the score head is named "
     "'abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrst'; "
     "give a name of 1 to 71 letters, usually score"},
    {SET(model_call, name, SCORE), EMPTY, SEQPAR_ERR_OPTION,
     "the score head is named ''; give a name of 1 to 71 letters, usually score"},
    {SET(model_call, name, SCORE), EMBEDDING, SEQPAR_ERR_OPTION,
     "the score head is named 'model.embed_tokens', which is another tensor's name; give another, "
     "usually score"},
    {SET(model_call, name, SCORE), NORM, SEQPAR_ERR_OPTION,
     "the score head is named 'model.norm', which is another tensor's name; give another, usually "
     "score"},
    {SET(model_call, name, LAYERS), LAYER, SEQPAR_ERR_OPTION,
     "the score head is named 'model.layers.', which is another tensor's name; give another, "
     "usually score"},
    /* experts */
    {X(experts, 0), -1, SEQPAR_ERR_SIZE, EXPERTS("-1", "0")},
    {X(sparse_every, 0), -1, SEQPAR_ERR_SIZE, EXPERTS("3", "-1"), {X(experts, 3)}},
    {X(sparse_every, 0), -1, SEQPAR_ERR_SIZE, EXPERTS("0", "-1")},
    {X(experts, 1048576), 1048577, SEQPAR_ERR_SIZE, EXPERTS("1048577", "0"), {X(layers, 1)}},
    {X(experts_per_token, 1),
     0,
     SEQPAR_ERR_SIZE,
     "a token goes to 0 of 3 experts; give at least 1 and at most as many as there are",
     {X(experts, 3)}},
    {X(experts_per_token, 3),
     4,
     SEQPAR_ERR_SIZE,
     "a token goes to 4 of 3 experts; give at least 1 and at most as many as there are",
     {X(experts, 3)}},
    {X(expert_intermediate, 1),
     0,
     SEQPAR_ERR_SIZE,
     "experts have intermediate 0 and a token goes to 2; their product must be 1 to 1048576",
     {X(experts, 3)}},
    {X(expert_intermediate, 524288),
     524289,
     SEQPAR_ERR_SIZE,
     "experts have intermediate 524289 and a token goes to 2; their product must be 1 to 1048576",
     {X(experts, 3)}},
    /* positions */
    {ROPE(DEFAULT), -1, SEQPAR_ERR_OPTION,
     "rope type is -1; give one of SEQPAR_ROPE_DEFAULT to _YARN"},
    {ROPE(YARN), SEQPAR_ROPE_YARN + 1, SEQPAR_ERR_OPTION,
     "rope type is 5; give one of SEQPAR_ROPE_DEFAULT to _YARN"},
    {X(rope.factor, 1e-300), 0, SEQPAR_ERR_OPTION, FACTOR("0", "8"), {ROPE(LINEAR)}},
    {X(rope.factor, 1e300),
     1.00001e300L,
     SEQPAR_ERR_OPTION,
     FACTOR("1.00001e+300", "8"),
     {ROPE(LINEAR)}},
    {X(rope.factor, 1), NAN, SEQPAR_ERR_OPTION, FACTOR("nan", "8"), {ROPE(YARN)}},
    {X(rope.first_positions, 1e-300), 0, SEQPAR_ERR_OPTION, FACTOR("2", "0"), {ROPE(LLAMA3)}},
    {X(rope.first_positions, 1), NAN, SEQPAR_ERR_OPTION, FACTOR("2", "nan"), {ROPE(DYNAMIC)}},
    {ROPE(LINEAR),
     SEQPAR_ROPE_DYNAMIC,
     SEQPAR_ERR_OPTION,
     FACTOR("2", "0"),
     {X(rope.first_positions, 0)}},
    {X(rope.low, 1e-300), 0, SEQPAR_ERR_OPTION, BOUNDS("0", "4"), {ROPE(LLAMA3)}},
    {X(rope.low, 3.99999), 4, SEQPAR_ERR_OPTION, BOUNDS("4", "4"), {ROPE(YARN)}},
    {X(rope.high, 1.00001), 1, SEQPAR_ERR_OPTION, BOUNDS("1", "1"), {ROPE(LLAMA3)}},
    {X(rope.high, 4), NAN, SEQPAR_ERR_OPTION, BOUNDS("1", "nan"), {ROPE(YARN)}},
    {X(rope.attention_factor, 0),
     -1e-300L,
     SEQPAR_ERR_OPTION,
     "rope attention_factor is -1e-300; give a number above 0, or 0 to compute it from factor",
     {ROPE(YARN)}},
    {X(rope.attention_factor, 1e300),
     1.00001e300L,
     SEQPAR_ERR_OPTION,
     "rope attention_factor is 1.00001e+300; give a number above 0, or 0 to compute it from factor",
     {ROPE(YARN)}},
    {X(rope_theta, 1.00001),
     1,
     SEQPAR_ERR_OPTION,
     "rope_theta is 1, and yarn takes its logarithm; give one above 1",
     {ROPE(YARN)}},
    {X(rope_theta, 0),
     1e-300L,
     SEQPAR_ERR_OPTION,
     "rope_theta is 1e-300, and yarn takes its logarithm; give one above 1",
     {ROPE(YARN)}},
};

/* ---- a batch ---- */

enum { LLAMA_TOKENS = 7 };
typedef struct llama_call {
    int ids[LLAMA_TOKENS], targets[LLAMA_TOKENS], positions[LLAMA_TOKENS];
    double first_positions;
    int dynamic, recompute, mlp_rows;
} llama_call;

static seqpar_llama llama;

static void fill_row(seqpar_row *row, const llama_call *c) {
    *row = (seqpar_row){.index = 5,
                        .tokens = LLAMA_TOKENS,
                        .cell = (LLAMA_TOKENS + 1) / 2,
                        .ids = c->ids,
                        .targets = c->targets,
                        .position_ids = c->positions};
}

static seqpar_status open_batch(void *call) {
    llama_call *c = call;
    const seqpar_llama_batch_desc run = {
        .layout = SEQPAR_LAYOUT_ZIGZAG, .recompute = c->recompute, .mlp_rows = c->mlp_rows};
    model_call model = good_model;
    seqpar_llama_batch batch = {0};
    seqpar_row row;
    fill_row(&row, c);
    if (c->dynamic) model.config.rope.type = SEQPAR_ROPE_DYNAMIC;
    model.config.rope.first_positions = c->first_positions;
    seqpar_status status = seqpar_llama_open(&ctx, &llama, &model.config);
    if (!status) status = seqpar_llama_open_batch(&ctx, &llama, &batch, &row, 1, &run);
    seqpar_llama_close_batch(&ctx, &llama, &batch);
    seqpar_llama_close(&ctx, &llama);
    return status;
}

#define Y(member, value) SET(llama_call, member, value)
#define NO_ID(token, id, target) \
    "row 5, token " token " has id " id " and target " target "; the model has ids 0..10"
#define RECOMPUTE(value) \
    "recompute is " value "; use 0, 1, or 2 for activations in the device's second pool"
static const llama_call good_batch = {.ids = {1, 2, 3, 4, 5, 6, 7},
                                      .targets = {2, 3, 4, 5, 6, 7, SEQPAR_IGNORE},
                                      .positions = {0, 1, 2, 3, 4, 5, 6},
                                      .first_positions = 7};
static const limit batch_limits[] = {
    {Y(ids[0], 0), -1, SEQPAR_ERR_TOKEN_ID, NO_ID("0", "-1", "2")},
    {Y(ids[0], 10), 11, SEQPAR_ERR_TOKEN_ID, NO_ID("0", "11", "2")},
    {Y(ids[6], 0), -1, SEQPAR_ERR_TOKEN_ID, NO_ID("6", "-1", "-100")},
    {Y(ids[6], 10), 11, SEQPAR_ERR_TOKEN_ID, NO_ID("6", "11", "-100")},
    {Y(targets[0], 0), -1, SEQPAR_ERR_TOKEN_ID, NO_ID("0", "1", "-1")},
    {Y(targets[0], SEQPAR_IGNORE), -101, SEQPAR_ERR_TOKEN_ID, NO_ID("0", "1", "-101")},
    {Y(targets[6], 10), 11, SEQPAR_ERR_TOKEN_ID, NO_ID("6", "7", "11")},
    {Y(positions[0], 0), -1, SEQPAR_ERR_SIZE,
     "row 5, token 0 has the position -1; give 0 or more"},
    {Y(positions[6], 0), -1, SEQPAR_ERR_SIZE,
     "row 5, token 6 has the position -1; give 0 or more"},
    {Y(first_positions, 7),
     6,
     SEQPAR_ERR_OPTION,
     "a document has 7 tokens; with rope type dynamic 6 are the most "
     "(original_max_position_embeddings), give shorter ones or another rope_type",
     {Y(dynamic, 1)}},
    {Y(recompute, 0), -1, SEQPAR_ERR_OPTION, RECOMPUTE("-1")},
    {Y(recompute, 2), 3, SEQPAR_ERR_OPTION, RECOMPUTE("3")},
    {Y(mlp_rows, 0), -1, SEQPAR_ERR_OPTION,
     "mlp_rows is -1; give the tokens of a tile of the MLP, or 0 for all"},
};

/* ---- a model that is not the batch's, and passes that were not made ---- */

typedef struct pass_call {
    seqpar_llama_config other; /* what the second model has */
    int forward, keep, again, score, values, foreign;
} pass_call;

static seqpar_status pass_with(pass_call *c, seqpar_llama *first, seqpar_llama *second,
                               seqpar_llama_batch *batch, const seqpar_row *row) {
    seqpar_optim_desc sgd = {.kind = SEQPAR_OPTIM_SGD};
    seqpar_tensor copy[64];
    seqpar_optim optim = {0};
    const seqpar_vocab_seeds seeds = {0};
    seqpar_tensor *tensors = second->tensors;
    if (c->foreign)
        tensors = memcpy(copy, tensors, sizeof *copy * (size_t)second->tensor_count);
    seqpar_status status = SEQPAR_OK;
    if (c->forward) status = seqpar_llama_forward(&ctx, first, batch, c->keep);
    if (!status && c->values) return seqpar_llama_values(&ctx, second, batch);
    if (!status) status = seqpar_optim_open(&ctx, &optim, tensors, second->tensor_count, &sgd);
    for (int i = 0; !status && i <= c->again; i++) {
        if (i == 0) status = seqpar_step_begin(&ctx, &optim, row, 1, SEQPAR_LAYOUT_ZIGZAG, 1);
        if (!status) status = seqpar_llama_backward(&ctx, second, batch, &optim, 0, &seeds);
    }
    seqpar_optim_close(&ctx, &optim);
    return status;
}

static seqpar_status pass(void *call) {
    const seqpar_llama_batch_desc run = {.layout = SEQPAR_LAYOUT_ZIGZAG};
    pass_call *c = call;
    seqpar_llama second = {0};
    seqpar_llama_batch batch = {0};
    seqpar_row row;
    fill_row(&row, &good_batch);
    if (c->score) c->other.score = "score";
    seqpar_status status = seqpar_llama_open(&ctx, &llama, &good_model.config);
    if (!status) status = seqpar_llama_open(&ctx, &second, &c->other);
    if (!status) status = seqpar_llama_open_batch(&ctx, &llama, &batch, &row, 1, &run);
    if (!status) status = pass_with(c, &llama, &second, &batch, &row);
    seqpar_llama_close_batch(&ctx, &llama, &batch);
    seqpar_llama_close(&ctx, &second);
    seqpar_llama_close(&ctx, &llama);
    return status;
}

/* ---- adapters ---- */

typedef struct adapters_call {
    seqpar_llama_config other; /* the model that the adapters are opened for */
    seqpar_adapter_desc desc;
    int64_t experts; /* of both models */
    int use;         /* MODEL: a model set as adapters; ALONE: adapters without a model */
} adapters_call;

enum { ADAPTERS, MODEL, ALONE };

static seqpar_status adapt(void *call) {
    adapters_call *c = call;
    seqpar_llama own = {0}, other = {0}, adapters = {0};
    seqpar_llama_config config = good_model.config;
    config.experts = c->experts;
    if (c->experts) c->other.experts = c->experts;
    config.experts_per_token = c->other.experts_per_token;
    config.expert_intermediate = c->other.expert_intermediate;
    seqpar_status status = seqpar_llama_open(&ctx, &own, &config);
    if (!status) status = seqpar_llama_open(&ctx, &other, &c->other);
    if (!status) status = seqpar_llama_open_adapters(&ctx, &adapters, &other, &c->desc, 0, 0);
    own.adapters = c->use == MODEL ? &other : &adapters;
    adapters.adapters = own.adapters;
    if (!status) status = seqpar_llama_merge(&ctx, c->use == ALONE ? &adapters : &own);
    seqpar_llama_close(&ctx, &adapters);
    seqpar_llama_close(&ctx, &other);
    seqpar_llama_close(&ctx, &own);
    return status;
}

#define ADAPT(member, value) SET(adapters_call, member, value)
#define ADAPTED_OTHER(layers, hidden, vocab) \
    "the adapters were opened for another model: " layers " layers, hidden " hidden \
    ", vocab " vocab "; this one has 2, 6, 11"
static const adapters_call good_adapters = {.other = {.layers = 2,
                                                      .hidden = 6,
                                                      .heads = 4,
                                                      .kv_heads = 2,
                                                      .head_dim = 2,
                                                      .intermediate = 5,
                                                      .vocab = VOCAB,
                                                      .experts_per_token = 2,
                                                      .expert_intermediate = 3},
                                            .desc = {3, 2, SEQPAR_ADAPT_ALL}};
static const limit adapters_limits[] = {
    {ADAPT(desc.rank, 1), 0, SEQPAR_ERR_OPTION, "the adapters' rank is 0; give 1 to 1048576"},
    {ADAPT(desc.rank, 1), -1, SEQPAR_ERR_OPTION, "the adapters' rank is -1; give 1 to 1048576"},
    {ADAPT(desc.rank, 1048576), 1048577, SEQPAR_ERR_OPTION,
     "the adapters' rank is 1048577; give 1 to 1048576"},
    {ADAPT(desc.scale, 1e-300), 0, SEQPAR_ERR_OPTION,
     "the adapters' scale is 0; give alpha / rank, above 0"},
    {ADAPT(desc.scale, 1), -0.5L, SEQPAR_ERR_OPTION,
     "the adapters' scale is -0.5; give alpha / rank, above 0"},
    {ADAPT(desc.scale, 1), NAN, SEQPAR_ERR_OPTION,
     "the adapters' scale is nan; give alpha / rank, above 0"},
    {ADAPT(desc.scale, 1), INFINITY, SEQPAR_ERR_OPTION,
     "the adapters' scale is inf; give alpha / rank, above 0"},
    {ADAPT(desc.dropout, 0), -1e-300L, SEQPAR_ERR_OPTION,
     "the adapters' dropout is -1e-300; give at least 0 and less than 1"},
    {ADAPT(desc.dropout, 0.999), 1, SEQPAR_ERR_OPTION,
     "the adapters' dropout is 1; give at least 0 and less than 1"},
    {ADAPT(desc.dropout, 0.5), NAN, SEQPAR_ERR_OPTION,
     "the adapters' dropout is nan; give at least 0 and less than 1"},
    {ADAPT(desc.targets, 1), 0, SEQPAR_ERR_OPTION,
     "the adapters' targets are 0; give a sum of SEQPAR_ADAPT_.."},
    {ADAPT(desc.targets, 127), 128, SEQPAR_ERR_OPTION,
     "the adapters' targets are 128; give a sum of SEQPAR_ADAPT_.."},
    {ADAPT(desc.targets, 15),
     16,
     SEQPAR_ERR_OPTION,
     "the model has experts, whose MLPs have no adapters here; take targets of attention alone",
     {ADAPT(experts, 3)}},
    {ADAPT(use, ADAPTERS), MODEL, SEQPAR_ERR_STEP,
     "model->adapters is a model; open adapters with seqpar_llama_open_adapters"},
    {ADAPT(use, ADAPTERS), ALONE, SEQPAR_ERR_STEP,
     "adapters do not compute alone; give the model, with model->adapters set"},
    {ADAPT(other.layers, 2), 3, SEQPAR_ERR_STEP, ADAPTED_OTHER("3", "6", "11")},
    {ADAPT(other.hidden, 6), 7, SEQPAR_ERR_STEP, ADAPTED_OTHER("2", "7", "11")},
    {ADAPT(other.vocab, 11), 12, SEQPAR_ERR_STEP, ADAPTED_OTHER("2", "6", "12")},
};

#define OTHER(member, value) SET(pass_call, other.member, value)
#define SWAPPED(layers, hidden, vocab, scores) \
    "the batch was opened for another model: 2 layers, hidden 6, vocab 11; this one has " layers \
    ", " hidden ", " vocab scores
#define PASS(member, value) SET(pass_call, member, value)
static const pass_call good_pass = {.other = {.layers = 2,
                                              .hidden = 6,
                                              .heads = 4,
                                              .kv_heads = 2,
                                              .head_dim = 2,
                                              .intermediate = 5,
                                              .vocab = VOCAB,
                                              .experts_per_token = 2,
                                              .expert_intermediate = 3},
                                    .forward = 1,
                                    .keep = 1};
static const limit pass_limits[] = {
    {OTHER(layers, 2), 3, SEQPAR_ERR_STEP, SWAPPED("3", "6", "11", "")},
    {OTHER(hidden, 6), 7, SEQPAR_ERR_STEP, SWAPPED("2", "7", "11", "")},
    {OTHER(heads, 4), 6, SEQPAR_ERR_STEP, SWAPPED("2", "6", "11", "")},
    {OTHER(kv_heads, 2), 1, SEQPAR_ERR_STEP, SWAPPED("2", "6", "11", "")},
    {OTHER(head_dim, 2), 4, SEQPAR_ERR_STEP, SWAPPED("2", "6", "11", "")},
    {OTHER(intermediate, 5), 6, SEQPAR_ERR_STEP, SWAPPED("2", "6", "11", "")},
    {OTHER(vocab, 11), 12, SEQPAR_ERR_STEP, SWAPPED("2", "6", "12", "")},
    {OTHER(window, 0), 3, SEQPAR_ERR_STEP, SWAPPED("2", "6", "11", "")},
    {OTHER(window_from, 0), 1, SEQPAR_ERR_STEP, SWAPPED("2", "6", "11", "")},
    {OTHER(qkv_bias, 0), 1, SEQPAR_ERR_STEP, SWAPPED("2", "6", "11", "")},
    {OTHER(o_bias, 0), 1, SEQPAR_ERR_STEP, SWAPPED("2", "6", "11", "")},
    {OTHER(mlp_bias, 0), 1, SEQPAR_ERR_STEP, SWAPPED("2", "6", "11", "")},
    {OTHER(qk_norm, 0), 1, SEQPAR_ERR_STEP, SWAPPED("2", "6", "11", "")},
    {OTHER(experts, 0), 3, SEQPAR_ERR_STEP, SWAPPED("2", "6", "11", "")},
    {OTHER(experts_per_token, 2), 1, SEQPAR_ERR_STEP, SWAPPED("2", "6", "11", "")},
    {OTHER(expert_intermediate, 3), 4, SEQPAR_ERR_STEP, SWAPPED("2", "6", "11", "")},
    {OTHER(sparse_every, 0), 1, SEQPAR_ERR_STEP, SWAPPED("2", "6", "11", "")},
    {PASS(score, 0), 1, SEQPAR_ERR_STEP, SWAPPED("2", "6", "11", ", scores")},
    {PASS(forward, 1), 0, SEQPAR_ERR_STEP,
     "the batch holds nothing for a backward pass; call seqpar_llama_forward with keep 1 before "
     "each"},
    {PASS(keep, 1), 0, SEQPAR_ERR_STEP,
     "the batch holds nothing for a backward pass; call seqpar_llama_forward with keep 1 before "
     "each"},
    {PASS(again, 0), 1, SEQPAR_ERR_STEP,
     "the batch holds nothing for a backward pass; call seqpar_llama_forward with keep 1 before "
     "each"},
    {PASS(forward, 1),
     0,
     SEQPAR_ERR_STEP,
     "the batch has no hidden states; call seqpar_llama_forward first",
     {PASS(values, 1)}},
    {PASS(foreign, 0), 1, SEQPAR_ERR_STEP,
     "the optimizer was opened with other tensors than this model's (21504 elements, the model "
     "21504); give seqpar_optim_open model.tensors"},
};

/* ---- a teacher ---- */

typedef struct teacher_call {
    seqpar_llama_config teacher;
    int ids[7]; /* of its batch */
    int64_t tokens;
    int forward, score, student_score, backward;
} teacher_call;

/* ---- a model in four bits ---- */

typedef struct coded_call {
    int64_t experts, first, count; /* what is written of its second tensor that is a matrix */
    int sharded, merged, learns, bare, poison;
} coded_call;

enum { CODED_TENSOR = 2, CODED_VALUES = 8 * 6 };

static seqpar_status coded_write(const coded_call *c) {
    double values[CODED_VALUES + 1] = {0};
    if (c->poison) values[c->poison] = c->poison % 2 ? NAN : -INFINITY;
    return seqpar_llama_write(&ctx, &llama, values, CODED_TENSOR, c->first, c->count);
}

/* A step that trains the adapters of a model in four bits; bare: without adapters. */
static seqpar_status coded_step(const coded_call *c, seqpar_llama *adapters) {
    const seqpar_llama_batch_desc run = {.layout = SEQPAR_LAYOUT_ZIGZAG};
    const seqpar_vocab_seeds seeds = {0};
    seqpar_optim_desc sgd = {.kind = SEQPAR_OPTIM_SGD};
    seqpar_llama_batch b = {0};
    seqpar_optim optim = {0};
    seqpar_row row;
    fill_row(&row, &good_batch);
    llama.adapters = c->bare ? NULL : adapters;
    seqpar_status status = seqpar_llama_open_batch(&ctx, &llama, &b, &row, 1, &run);
    if (!status) status = seqpar_llama_forward(&ctx, &llama, &b, 1);
    if (!status)
        status = seqpar_optim_open(&ctx, &optim, adapters->tensors, adapters->tensor_count,
                                   &sgd);
    if (!status) status = seqpar_step_begin(&ctx, &optim, &row, 1, SEQPAR_LAYOUT_ZIGZAG, 1);
    if (!status) status = seqpar_llama_backward(&ctx, &llama, &b, &optim, 0, &seeds);
    seqpar_optim_close(&ctx, &optim);
    seqpar_llama_close_batch(&ctx, &llama, &b);
    return status;
}

static seqpar_status code(void *call) {
    const coded_call *c = call;
    const seqpar_adapter_desc desc = {2, 1, SEQPAR_ADAPT_Q};
    seqpar_llama_config config = good_model.config;
    seqpar_llama adapters = {0};
    config.four_bits = 1;
    config.experts = c->experts;
    seqpar_status status = c->sharded ? seqpar_llama_open_sharded(&ctx, &llama, &config, 0, 0)
                                      : seqpar_llama_open(&ctx, &llama, &config);
    if (!status) seqpar_llama_init(&ctx, &llama, 3);
    if (!status) status = coded_write(c);
    if (!status) status = seqpar_llama_open_adapters(&ctx, &adapters, &llama, &desc, 0, 0);
    if (!status && c->learns) status = coded_step(c, &adapters);
    llama.adapters = &adapters;
    if (!status && c->merged) status = seqpar_llama_merge(&ctx, &llama);
    seqpar_llama_close(&ctx, &adapters);
    seqpar_llama_close(&ctx, &llama);
    return status;
}

#define CODED(member, value) SET(coded_call, member, value)
#define NOT_WHOLE(first, count) \
    "model.layers.0.self_attn.q_proj.weight is kept in four bits, and " count \
    " values from " first " on do not continue those written; write it whole, from 0 on"
static const coded_call good_coded = {.count = CODED_VALUES};
static const limit coded_limits[] = {
    {CODED(experts, 0), 3, SEQPAR_ERR_OPTION,
     "a model with experts is not kept in four bits; leave out four_bits"},
    {CODED(sharded, 0), 1, SEQPAR_ERR_OPTION,
     "a model in four bits is not sharded; open it by seqpar_llama_open and, if you like, its "
     "adapters with sharded 1"},
    {CODED(merged, 0), 1, SEQPAR_ERR_OPTION,
     "merged weights would be rounded to four bits again; open the model without four_bits and "
     "merge the adapters into that"},
    {CODED(bare, 0),
     1,
     SEQPAR_ERR_STEP,
     "a model in four bits does not learn; give it adapters, or open it without four_bits",
     {CODED(learns, 1)}},
    {CODED(first, 0), 1, SEQPAR_ERR_STEP, NOT_WHOLE("1", "48")},
    {CODED(count, CODED_VALUES), CODED_VALUES + 1, SEQPAR_ERR_STEP, NOT_WHOLE("0", "49")},
    {CODED(poison, 0), 1, SEQPAR_ERR_NOT_FINITE,
     "value 1 is nan; only finite values can be quantized to NF4"},
    {CODED(poison, 0), 46, SEQPAR_ERR_NOT_FINITE,
     "value 46 is -inf; only finite values can be quantized to NF4"},
};

/* Values of a model with batch->choices. choices: how many tokens; 0: NULL. */
typedef struct choice_call {
    int64_t choices;
    int best, score, taught;
} choice_call;

static seqpar_status choose(void *call) {
    const choice_call *c = call;
    const seqpar_llama_batch_desc run = {.layout = SEQPAR_LAYOUT_ZIGZAG};
    seqpar_llama_config config = good_model.config;
    seqpar_llama_choices choices = {{2, 9, 4}, c->choices, NULL};
    seqpar_llama_batch b = {0};
    const seqpar_llama_teacher self = {&llama, &b, 0, NULL};
    int32_t best[7];
    seqpar_row row;
    fill_row(&row, &good_batch);
    if (c->score) config.score = "score";
    seqpar_status status = seqpar_llama_open(&ctx, &llama, &config);
    if (!status) status = seqpar_llama_open_batch(&ctx, &llama, &b, &row, 1, &run);
    if (!status) status = seqpar_llama_forward(&ctx, &llama, &b, 0);
    if (c->choices) b.choices = &choices;
    if (c->best) b.best = best;
    if (c->taught) b.teacher = &self;
    if (!status) status = seqpar_llama_values(&ctx, &llama, &b);
    seqpar_llama_close_batch(&ctx, &llama, &b);
    seqpar_llama_close(&ctx, &llama);
    return status;
}

#define CHOOSE(member, value) SET(choice_call, member, value)
#define NO_CHOICE \
    "a model with a score head has no probabilities of tokens to choose among; leave out " \
    "batch->choices and batch->best"
static const choice_call good_choice = {.choices = 2};
static const limit choice_limits[] = {
    {CHOOSE(choices, 2), 1, SEQPAR_ERR_SIZE, "batch->choices are 1 tokens; give 2 to 16"},
    {CHOOSE(choices, 3), 17, SEQPAR_ERR_SIZE, "batch->choices are 17 tokens; give 2 to 16"},
    {CHOOSE(score, 0), 1, SEQPAR_ERR_OPTION, NO_CHOICE},
    {CHOOSE(score, 0), 1, SEQPAR_ERR_OPTION, NO_CHOICE, {CHOOSE(choices, 0), CHOOSE(best, 1)}},
    {CHOOSE(taught, 0), 1, SEQPAR_ERR_OPTION,
     "batch->teacher compares the whole vocabulary, batch->choices is a part of it; set only one "
     "of them"},
};

static seqpar_status taught_by(teacher_call *c, seqpar_llama *teacher, const seqpar_row *rows) {
    const seqpar_llama_batch_desc run = {.layout = SEQPAR_LAYOUT_ZIGZAG};
    const seqpar_vocab_seeds seeds = {0};
    seqpar_optim_desc sgd = {.kind = SEQPAR_OPTIM_SGD};
    seqpar_llama_batch own = {0}, of = {0};
    seqpar_optim optim = {0};
    seqpar_llama_teacher from = {teacher, &of, 0, NULL};
    seqpar_status status = seqpar_llama_open_batch(&ctx, &llama, &own, &rows[0], 1, &run);
    if (!status) status = seqpar_llama_open_batch(&ctx, teacher, &of, &rows[1], 1, &run);
    if (!status) status = seqpar_llama_forward(&ctx, &llama, &own, 1);
    if (!status && c->forward) status = seqpar_llama_forward(&ctx, teacher, &of, 0);
    own.teacher = &from;
    if (!status && !c->backward) status = seqpar_llama_values(&ctx, &llama, &own);
    if (!status && c->backward)
        status = seqpar_optim_open(&ctx, &optim, llama.tensors, llama.tensor_count, &sgd);
    if (!status && c->backward)
        status = seqpar_step_begin(&ctx, &optim, rows, 1, SEQPAR_LAYOUT_ZIGZAG, 1);
    if (!status && c->backward)
        status = seqpar_llama_backward(&ctx, &llama, &own, &optim, 0, &seeds);
    seqpar_optim_close(&ctx, &optim);
    seqpar_llama_close_batch(&ctx, teacher, &of);
    seqpar_llama_close_batch(&ctx, &llama, &own);
    return status;
}

static seqpar_status teach(void *call) {
    teacher_call *c = call;
    seqpar_llama teacher = {0};
    seqpar_llama_config config = good_model.config;
    seqpar_row rows[2];
    int32_t ids[7];
    int64_t documents[2] = {0, c->tokens};
    fill_row(&rows[0], &good_batch);
    rows[1] = rows[0];
    for (int i = 0; i < 7; i++) ids[i] = c->ids[i];
    rows[1].ids = ids;
    rows[1].tokens = c->tokens;
    rows[1].cu_seqlens = documents;
    if (c->student_score) config.score = "score";
    if (c->score) c->teacher.score = "score";
    seqpar_status status = seqpar_llama_open(&ctx, &llama, &config);
    if (!status) status = seqpar_llama_open(&ctx, &teacher, &c->teacher);
    if (!status) status = taught_by(c, &teacher, rows);
    seqpar_llama_close(&ctx, &teacher);
    seqpar_llama_close(&ctx, &llama);
    return status;
}

#define TEACH(member, value) SET(teacher_call, member, value)
#define TEACHER_SCORES \
    "a model with a score head has no probabilities of tokens; student and teacher are to be " \
    "language models"
#define TEACHER_TOKENS(tokens) \
    "the teacher's batch (" tokens \
    " tokens) and the student's (7) have different ids; open both with the same rows and layout"
static const teacher_call good_teacher = {.teacher = {.layers = 1,
                                                      .hidden = 9,
                                                      .heads = 3,
                                                      .kv_heads = 1,
                                                      .head_dim = 4,
                                                      .intermediate = 8,
                                                      .vocab = VOCAB},
                                          .ids = {1, 2, 3, 4, 5, 6, 7},
                                          .tokens = 7,
                                          .forward = 1};
static const limit teacher_limits[] = {
    {TEACH(forward, 1), 0, SEQPAR_ERR_STEP,
     "the batch has no hidden states; call seqpar_llama_forward first"},
    {TEACH(score, 0), 1, SEQPAR_ERR_OPTION, TEACHER_SCORES},
    {TEACH(student_score, 0), 1, SEQPAR_ERR_OPTION, TEACHER_SCORES},
    {TEACH(teacher.vocab, 11), 12, SEQPAR_ERR_SIZE,
     "the teacher's vocabulary has 12 tokens, the student's 11; give a teacher with the same one"},
    {TEACH(tokens, 7), 6, SEQPAR_ERR_STEP, TEACHER_TOKENS("6")},
    {TEACH(ids[0], 1), 2, SEQPAR_ERR_STEP, TEACHER_TOKENS("7")},
    {TEACH(ids[6], 7), 8, SEQPAR_ERR_STEP, TEACHER_TOKENS("7"), {TEACH(backward, 1)}},
};

/* ---- text ---- */

enum { PROMPTS = 2, PROMPT_TOKENS = 3, STOPS = 2 };
typedef struct text_call {
    seqpar_llama_sample_desc desc;
    int64_t count, tokens[PROMPTS];
    int ids[PROMPTS][PROMPT_TOKENS], stops[STOPS], no_ids, no_stops, score, sharded, poison;
} text_call;

static seqpar_status text_of(text_call *c) {
    seqpar_llama_text texts[PROMPTS];
    seqpar_llama_prompt prompts[PROMPTS];
    for (int i = 0; i < PROMPTS; i++)
        prompts[i] = (seqpar_llama_prompt){c->no_ids == 1 + i ? NULL : c->ids[i], c->tokens[i],
                                           40 + i};
    if (!c->no_stops) c->desc.stops = c->stops;
    seqpar_status status = seqpar_llama_generate(&ctx, &llama, texts, prompts, c->count,
                                                 &c->desc);
    if (!status && c->count > 0) seqpar_llama_texts_free(texts, c->count);
    return status;
}

static seqpar_status text(void *call) {
    text_call *c = call;
    seqpar_llama_config config = good_model.config;
    if (c->score) config.score = "score";
    seqpar_status status = c->sharded ? seqpar_llama_open_sharded(&ctx, &llama, &config, 0, 0)
                                      : seqpar_llama_open(&ctx, &llama, &config);
    if (c->poison && !status) /* its row of the projection: the logit of one token */
        for (int i = 0; i < 6; i++)
            ((double *)llama.params.data)[llama.tensors[llama.tensor_count - 1].offset +
                                          6 * (c->poison - 1) + i] = NAN;
    if (!status) status = text_of(c);
    seqpar_llama_close(&ctx, &llama);
    return status;
}

#define R(member, value) SET(text_call, member, value)
#define COUNTS(batch, tokens, stops) \
    "batch " batch ", max_tokens " tokens ", " stops "; none may be negative or NULL"
#define NO_STOP(id) "stop id " id "; the model has ids 0..10"
#define NO_PROMPT(n, tokens, null) \
    "prompt " n " has " tokens " tokens" null \
    "; give at least one: without a prompt, the beginning-of-text id"
#define NO_PROMPT_ID(n, token, id) \
    "prompt " n ", token " token " has id " id "; the model has ids 0..10"
static const text_call good_text = {
    .desc = {.max_new_tokens = 2, .temperature = 1, .top_p = 1, .stop_count = STOPS},
    .count = PROMPTS,
    .tokens = {3, 2},
    .ids = {{1, 2, 3}, {4, 5, 6}},
    .stops = {9, 8}};
static const limit text_limits[] = {
    {R(score, 0), 1, SEQPAR_ERR_OPTION,
     "the model ends in 'score', a number per token; text needs a language model"},
    {R(count, 0), -1, SEQPAR_ERR_SIZE,
     "-1 prompts and max_new_tokens 2; give at least 0 and 1"},
    {R(desc.max_new_tokens, 1), 0, SEQPAR_ERR_SIZE,
     "2 prompts and max_new_tokens 0; give at least 0 and 1"},
    {R(desc.cell, 0), -1, SEQPAR_ERR_CELL,
     "cell is -1; give the tokens of a cell, 1 to 2147483647, or 0 for the default"},
    {R(desc.cell, 2147483647), 2147483648.0L, SEQPAR_ERR_CELL,
     "cell is 2147483648; give the tokens of a cell, 1 to 2147483647, or 0 for the default"},
    {R(desc.batch, 0), -1, SEQPAR_ERR_OPTION, COUNTS("-1", "0", "2 stop ids")},
    {R(desc.max_tokens, 0), -1, SEQPAR_ERR_OPTION, COUNTS("0", "-1", "2 stop ids")},
    {R(desc.stop_count, 0), -1, SEQPAR_ERR_OPTION, COUNTS("0", "0", "-1 stop ids")},
    {R(desc.stop_count, 0),
     1,
     SEQPAR_ERR_OPTION,
     COUNTS("0", "0", "1 stop ids at NULL"),
     {R(no_stops, 1)}},
    {R(desc.temperature, 0), -1e-300L, SEQPAR_ERR_OPTION,
     "temperature is -1e-300; give a number from 0 to 1e300, 0 for the most probable token"},
    {R(desc.temperature, 1e300), 1.00001e300L, SEQPAR_ERR_OPTION,
     "temperature is 1.00001e+300; give a number from 0 to 1e300, 0 for the most probable token"},
    {R(desc.temperature, 1), NAN, SEQPAR_ERR_OPTION,
     "temperature is nan; give a number from 0 to 1e300, 0 for the most probable token"},
    {R(desc.top_p, 1e-300), 0, SEQPAR_ERR_OPTION,
     "top_p is 0; give a number in (0, 1], 1 for all tokens"},
    {R(desc.top_p, 1), 1.00001L, SEQPAR_ERR_OPTION,
     "top_p is 1.00001; give a number in (0, 1], 1 for all tokens"},
    {R(desc.top_p, 1), NAN, SEQPAR_ERR_OPTION,
     "top_p is nan; give a number in (0, 1], 1 for all tokens"},
    {R(desc.top_k, 0), -1, SEQPAR_ERR_OPTION,
     "top_k is -1; give a positive number, 0 for all tokens"},
    {R(stops[0], 0), -1, SEQPAR_ERR_TOKEN_ID, NO_STOP("-1")},
    {R(stops[0], 10), 11, SEQPAR_ERR_TOKEN_ID, NO_STOP("11")},
    {R(stops[1], 0), -1, SEQPAR_ERR_TOKEN_ID, NO_STOP("-1")},
    {R(stops[1], 10), 11, SEQPAR_ERR_TOKEN_ID, NO_STOP("11")},
    {R(tokens[0], 1), 0, SEQPAR_ERR_DOCUMENT_TOKENS, NO_PROMPT("0", "0", "")},
    {R(tokens[1], 1), -1, SEQPAR_ERR_DOCUMENT_TOKENS, NO_PROMPT("1", "-1", "")},
    {R(no_ids, 0), 1, SEQPAR_ERR_DOCUMENT_TOKENS, NO_PROMPT("0", "3", " at NULL")},
    {R(no_ids, 0), 2, SEQPAR_ERR_DOCUMENT_TOKENS, NO_PROMPT("1", "2", " at NULL")},
    {R(desc.max_tokens, 4), 3, SEQPAR_ERR_OPTION,
     "prompt 0 has 3 tokens and max_tokens is 3; shorten it, so that at least one new token fits"},
    /* the last value inside would be a text of 2^31 tokens */
    {R(desc.max_new_tokens, 5), 2147483645, SEQPAR_ERR_OPTION,
     "prompt 0 has 3 tokens and 2147483645 may follow; positions end at 2147483647, lower "
     "max_new_tokens"},
    {R(ids[0][0], 0), -1, SEQPAR_ERR_TOKEN_ID, NO_PROMPT_ID("0", "0", "-1")},
    {R(ids[0][2], 10), 11, SEQPAR_ERR_TOKEN_ID, NO_PROMPT_ID("0", "2", "11")},
    {R(ids[1][1], 10), 11, SEQPAR_ERR_TOKEN_ID, NO_PROMPT_ID("1", "1", "11")},
    {R(sharded, 0), 1, SEQPAR_ERR_STEP,
     "the model's parameters are at their owners alone, but every rank makes texts of its own; "
     "call seqpar_llama_gather first"},
    {R(poison, 0), 1, SEQPAR_ERR_NOT_FINITE,
     "prompt 0 (number 40): at position 3 the logit of token 0 is nan; are the parameters finite?"},
    {R(poison, 0), 11, SEQPAR_ERR_NOT_FINITE,
     "prompt 0 (number 40): at position 3 the logit of token 10 is nan; are the parameters "
     "finite?"},
};

static void check_llama(void) {
    TRY_LIMITS("model", open_model, good_model, world->error, model_limits);
    TRY_LIMITS("batch", open_batch, good_batch, world->error, batch_limits);
    TRY_LIMITS("adapters", adapt, good_adapters, world->error, adapters_limits);
    TRY_LIMITS("pass", pass, good_pass, world->error, pass_limits);
    TRY_LIMITS("teacher", teach, good_teacher, world->error, teacher_limits);
    TRY_LIMITS("four bits", code, good_coded, world->error, coded_limits);
    TRY_LIMITS("choices", choose, good_choice, world->error, choice_limits);
    TRY_LIMITS("text", text, good_text, world->error, text_limits);
}
#endif
