/* seqpar_llama.h - v0.2.0 - reference decoder-only transformer on seqpar.h: forward,
   backward, recompute - MIT or Unlicense */
/* SPDX-License-Identifier: MIT OR Unlicense */
/*
   A Llama-style model (RMSNorm, rotary embedding at document positions, grouped-query
   attention, SwiGLU, tied or untied vocabulary table) whose tokens are split over the ranks of
   a seqpar_ctx. It never reads a device buffer: operations of the device table compute every
   number, so the same code runs on the fp64 reference device, the fast CPU device and a GPU.

   Does:      one optimizer step over packed rows; evaluation; logits for tests; init from a
              seed; sampled text for rollouts; weights whole on every rank, or each at its
              owner alone (ZeRO 3).

   It uses only what seqpar.h declares, so you can write a model of your own in the same way.

   #define SEQPAR_LLAMA_IMPLEMENTATION in one unit: the one with SEQPAR_IMPLEMENTATION or
   another. Options: SEQPAR_STATIC as in seqpar.h (then in that same unit); SEQPAR_MALLOC and
   SEQPAR_FREE, which the unit of this implementation defines. The other implementation may use
   other ones: neither frees memory that the other allocated.

   One step; batch: a seqpar_batch from seqpar_pack, b: a seqpar_llama_batch:
       seqpar_step_begin(ctx, &optim, batch.row, batch.rows, layout, accumulation);
       for (i = 0; i < accumulation; i++) {
           seqpar_llama_open_batch(ctx, &model, &b, rows of micro-batch i, ...);
           seqpar_llama_forward(ctx, &model, &b, 1);
           seqpar_llama_backward(ctx, &model, &b, &optim, i, &seeds);
           seqpar_llama_close_batch(ctx, &model, &b);
       }
       seqpar_step_end(ctx, &optim, model.params.data, model.elements, lr);
*/
#ifndef SEQPAR_LLAMA_H
#define SEQPAR_LLAMA_H
#include "seqpar.h"
#if SEQPAR_VERSION_MAJOR != 0 || SEQPAR_VERSION_MINOR != 2 || SEQPAR_VERSION_PATCH != 0
#error "seqpar_llama.h 0.2.0 needs seqpar.h 0.2.0; take both from one release"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* How rotary frequencies theta^(-2 i / head_dim) are scaled for texts longer than those of
   pretraining; the types of transformers' rope_parameters. */
enum seqpar_rope_type {
    SEQPAR_ROPE_DEFAULT, /* unscaled */
    SEQPAR_ROPE_LINEAR,  /* every frequency / factor */
    SEQPAR_ROPE_DYNAMIC, /* unscaled up to first_positions; longer texts are refused, since
                            their frequencies would depend on the longest text seen before */
    SEQPAR_ROPE_LLAMA3,  /* long waves: frequency / factor; short: unscaled; a blend between */
    SEQPAR_ROPE_YARN     /* as LLAMA3, but blends by pair index; scales cosine and sine, too */
};
typedef struct seqpar_llama_rope {
    int type;               /* SEQPAR_ROPE_.. */
    double factor;          /* above 0; no effect with DYNAMIC; DEFAULT does not read it */
    double first_positions; /* original_max_position_embeddings; not for DEFAULT, LINEAR */
    /* A wave that fits fewer than `low` times into first_positions is long; one that fits more
       than `high` times is short. LLAMA3: low_freq_factor, high_freq_factor; YARN: beta_slow,
       beta_fast */
    double low, high;
    double attention_factor; /* YARN: scales cosine and sine; 0: max(1, 0.1 ln(factor) + 1) */
    int exact; /* YARN: 1: bounds are not rounded to whole pairs (truncate false) */
} seqpar_llama_rope;

typedef struct seqpar_llama_config {
    int64_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocab;
    double rope_theta, rms_eps; /* 0: 10000, 1e-5 */
    int tied;                   /* the vocabulary projection uses the embedding table */
    const char *score; /* NULL: a language model. "score": the head is the tensor score.weight
                          (1, hidden), one number per token instead of logits, as in Hugging
                          Face's sequence classifiers; borrowed */
    seqpar_llama_rope rope;
    int64_t window; /* as in seqpar_attn_desc; 0: none */
    /* the first layer with the window: 0 in Mistral, max_window_layers in Qwen2 */
    int64_t window_from;
    /* every no_rope_every-th layer (counted from 1) has no rotary embedding, as in SmolLM3; 0:
       every layer has it */
    int64_t no_rope_every;
    /* 1: biases of the q, k and v projections (Qwen2), of the output projection (Llama's
       attention_bias sets both), of the MLP's three projections */
    int qkv_bias, o_bias, mlp_bias;
    int qk_norm; /* 1: RMSNorm of every head of q and k before the rotation, as in Qwen3 */
    /* experts above 0: so many expert MLPs of width expert_intermediate, without biases, are
       the MLP of every sparse_every-th layer (counted from 1; 0: every layer). The router's
       softmax over all experts weights them; a token goes through its experts_per_token most
       probable experts, and the layer's output is their sum, each times its probability.
       topk_norm 1: the chosen probabilities are divided by their sum first. As in Mixtral,
       Qwen3-MoE. */
    int64_t experts, experts_per_token, expert_intermediate, sparse_every;
    int topk_norm;
    /* probability that an attention weight becomes 0; only with seqpar_llama_batch_desc.dropout */
    double attention_dropout;
    /* 1: the layers' matrices are stored in four bits (seqpar_nf4) and frozen, for adapters.
       Not with experts, and not sharded */
    int four_bits;
} seqpar_llama_config;

/* ---- adapters (LoRA) ---- */

/* Which matrices of a layer have adapters; with experts only those of attention can. */
enum seqpar_adapter_target {
    SEQPAR_ADAPT_Q = 1,
    SEQPAR_ADAPT_K = 2,
    SEQPAR_ADAPT_V = 4,
    SEQPAR_ADAPT_O = 8,
    SEQPAR_ADAPT_GATE = 16,
    SEQPAR_ADAPT_UP = 32,
    SEQPAR_ADAPT_DOWN = 64,
    SEQPAR_ADAPT_ALL = 127
};
/* y = x W^T + scale (x A^T) B^T, A (rank, inputs), B (outputs, rank). scale: alpha / rank, or in
   rsLoRA alpha / sqrt(rank). LoRA: Hu et al. 2021; rsLoRA: Kalajdzievski 2023. */
typedef struct seqpar_adapter_desc {
    int64_t rank;
    double scale;
    int targets; /* SEQPAR_ADAPT_.., added */
    /* probability that an input of A becomes 0; only with seqpar_llama_batch_desc.dropout */
    double dropout;
} seqpar_adapter_desc;

typedef struct seqpar_llama {
    seqpar_llama_config config;
    seqpar_tensor *tensors; /* by Hugging Face's names; offsets into params */
    /* elements: with the padding between tensors; values: without */
    int64_t tensor_count, elements, values;
    /* (elements), storage type; .data is NULL while every parameter is at its owner alone */
    seqpar_buffer params;
    seqpar_shards *shards; /* NULL: the model is not sharded */
    /* config.four_bits: a tensor's byte offset in codes (-1: it is in params); size of codes */
    int64_t *codes_at, code_bytes;
    seqpar_buffer codes;
    float
        *written; /* values so far of the four-bit matrix that seqpar_llama_write is filling */
    int64_t written_tensor, written_count;
    seqpar_buffer cosine, sine; /* (positions, head_dim/2) */
    int64_t positions;
    seqpar_buffer offloaded; /* cached memory of the second pool, for the next batch */
    char *names;
    /* a tensor's number by (layer, part); 0: the layer has none. Adapters: that of B; A is the
       one before */
    int64_t *parts;
    seqpar_adapter_desc adapter; /* rank above 0: this object is adapters, not a model */
    /* Borrowed. Not NULL: the model computes with these adapters and its own parameters are
       frozen: backward yields gradients of the adapters alone */
    struct seqpar_llama *adapters;
} seqpar_llama;

/* Makes the tensor table and allocates the parameters (zero). Free with seqpar_llama_close. */
SEQPAR_DEF seqpar_status seqpar_llama_open(seqpar_ctx *ctx, seqpar_llama *model,
                                           const seqpar_llama_config *config);
/* Makes the tensor table alone. The caller sets model->params.data to an array of model->elements
   of the storage type, and if code_bytes is not 0, model->codes.data to one of code_bytes bytes;
   the caller owns both. So ranks that are threads of one process can share one array
   (seqpar_optim_desc.params_shared). Free with seqpar_llama_close. */
SEQPAR_DEF seqpar_status seqpar_llama_open_table(seqpar_ctx *ctx, seqpar_llama *model,
                                                 const seqpar_llama_config *config);
/* A sharded model: each parameter (zero) is at its owner alone, for an optimizer of zero_stage 3
   with the same slice (seqpar_optim_desc.slice) that updates model->shards->own. offload 1: in
   the device's second pool (SEQPAR_OFFLOAD_PARAMS). Every function that computes gathers one
   layer at a time, and so is collective over the world. Free with seqpar_llama_close. Collective
   over the world. */
SEQPAR_DEF seqpar_status seqpar_llama_open_sharded(seqpar_ctx *ctx, seqpar_llama *model,
                                                   const seqpar_llama_config *config,
                                                   int64_t slice, int offload);
/* Gathers all parameters of a sharded model, and of its adapters, on every rank until
   seqpar_llama_drop: seqpar_llama_generate, which is not collective, needs them. The optimizer
   does not update this copy. Does nothing to a model that is not sharded. Both are collective
   over the world. */
SEQPAR_DEF seqpar_status seqpar_llama_gather(seqpar_ctx *ctx, seqpar_llama *model);
SEQPAR_DEF void seqpar_llama_drop(seqpar_ctx *ctx, seqpar_llama *model);
/* Returns this rank's trainable parameters, and in *elements their number; pass both to
   seqpar_step_end. They are the adapters' if the model uses adapters, else the model's; of a
   sharded model those that this rank owns. */
SEQPAR_DEF void *seqpar_llama_trainable(seqpar_llama *model, int64_t *elements);
/* Copies `count` elements of a tensor, from `first` on, to values, or from them. Sharded: every
   rank calls write with all values and stores those it owns (seqpar_llama_owns: does it own
   any of these?); read is collective over the world. A four-bit matrix is written from
   its first element to its last, in any number of calls, and is quantized when it is complete;
   read returns the dequantized values. */
SEQPAR_DEF seqpar_status seqpar_llama_read(seqpar_ctx *ctx, const seqpar_llama *model,
                                           double *values, int64_t tensor, int64_t first,
                                           int64_t count);
SEQPAR_DEF seqpar_status seqpar_llama_write(seqpar_ctx *ctx, seqpar_llama *model,
                                            const double *values, int64_t tensor, int64_t first,
                                            int64_t count);
SEQPAR_DEF int seqpar_llama_owns(const seqpar_ctx *ctx, const seqpar_llama *model,
                                 int64_t tensor, int64_t first, int64_t count);
SEQPAR_DEF void seqpar_llama_close(seqpar_ctx *ctx, seqpar_llama *model);
/* Opens adapters of `model`: a seqpar_llama that cannot compute by itself. seqpar_llama_init,
   _read, _write, _owns, _gather, _drop, _trainable and _close take it; the optimizer is opened with
   its tensors; model->adapters = adapters makes the model compute with it. Tensors have PEFT's
   names; a score model's score is one of them, too. sharded, slice: as in
   seqpar_llama_open_sharded. OPTION: a desc out of range, or MLP targets if the model
   has experts. Collective over the world if sharded. */
SEQPAR_DEF seqpar_status seqpar_llama_open_adapters(seqpar_ctx *ctx, seqpar_llama *adapters,
                                                    const seqpar_llama *model,
                                                    const seqpar_adapter_desc *desc,
                                                    int sharded, int64_t slice);
/* Adds the adapters to the model's matrices, W + scale B A in fp64, rounded once, copies their
   score, if any, to the model and sets model->adapters to NULL. OPTION: four_bits. Collective
   over the world if either is sharded. */
SEQPAR_DEF seqpar_status seqpar_llama_merge(seqpar_ctx *ctx, seqpar_llama *model);
/* Fills all tensors, or the one of that number. A model: weights normal(0, 1/columns), those that
   write to the residual stream divided by sqrt(2 layers), gains 1, biases 0. Adapters: A uniform
   in +-1/sqrt(columns), as in PEFT, B 0, a score like a weight. A value depends on (seed, tensor,
   index) alone. MEMORY: none for the copy of a four-bit matrix. */
SEQPAR_DEF seqpar_status seqpar_llama_init(seqpar_ctx *ctx, seqpar_llama *model, uint64_t seed);
SEQPAR_DEF seqpar_status seqpar_llama_init_tensor(seqpar_ctx *ctx, seqpar_llama *model,
                                                  int64_t tensor, uint64_t seed);

/* How a batch is computed. Fields change no bit unless they say so. With layout stripe, relaxed
   or kernel, results keep the error rule instead. */
typedef struct seqpar_llama_batch_desc {
    int layout, schedule;   /* as in seqpar_attn_desc */
    int64_t heads_k_stride; /* the same */
    /* 1: forward stores (x, out, lse) per layer, backward computes the rest again. 2: the same,
       but all layers except two are stored in the device's second pool; backward fetches one
       layer ahead */
    int recompute;
    /* rows of logits in memory at a time; 0: as in seqpar_vocab_desc.rows_max */
    int64_t vocab_rows;
    /* Above 0: the MLP's gate and up exist for that many tokens at a time (seqpar_token_tiles);
       backward computes them again; a layer's gradient has seqpar_token_node_count nodes then.
       0: for all tokens, and stored if recompute is 0. No effect if the model has experts */
    int64_t mlp_rows;
    int64_t ulysses_size; /* ranks that exchange tokens for heads; as in seqpar_plan_desc */
    int relaxed;          /* as in seqpar_attn_desc.relaxed */
    /* your own attention kernel, as in seqpar_attn_desc.kernel; NULL: seqpar's */
    const seqpar_attn_kernel *kernel;
    /* divides logits before log-probs and entropy, as sampling does; 0: 1. Changes numbers */
    double temperature;
    /* 1: the dropout of config and adapters is on, as in training. The draws depend on seed, step,
       layer, matrix, head or column, document (seqpar_row.doc_source) and the positions in it
       alone. Changes numbers */
    int dropout;
    uint64_t dropout_seed;
    int64_t dropout_step;
    /* Above 0: tokens with id untaught - 1 add nothing to the embedding's gradient, as in torch's
       padding_idx; a tied projection still adds its part to that row. Changes numbers */
    int64_t untaught;
} seqpar_llama_batch_desc;

typedef struct seqpar_llama_layer {
    seqpar_buffer x, q, k, v, out, lse, x2, gate, up, rstd1, rstd2;
    seqpar_buffer raw_q, raw_k, rstd_q, rstd_k; /* qk_norm: its inputs, and their 1/rms */
    seqpar_buffer probs, weights;               /* as in seqpar_route_args */
} seqpar_llama_layer;

/* recompute 2: a staging buffer for one layer's (x, out, lse) in the device's memory. layer -1:
   empty. moves: the buffer is loaded, or free again, after that many moves of the device. */
typedef struct seqpar_llama_staging {
    seqpar_buffer x, out, lse;
    int64_t layer, moves;
} seqpar_llama_staging;

/* Which experts a layer's tokens go to; host memory. A pair is (token, one of its experts); a slot
   is a pair's index after sorting by expert, then by token. */
typedef struct seqpar_llama_routes {
    int32_t *ids;                /* (tokens, experts_per_token) the expert of a pair */
    int32_t *slot_of;            /* (pairs) */
    int32_t *pair_of, *token_of; /* (slots) */
    int64_t *begin;              /* (experts + 1) the first slot of each expert */
} seqpar_llama_routes;

struct seqpar_llama_batch;
/* Knowledge distillation: a frozen model of the same vocabulary, and its batch of the same rows
   after seqpar_llama_forward. Both borrowed. */
typedef struct seqpar_llama_teacher {
    seqpar_llama *model;
    struct seqpar_llama_batch *batch;
    int reverse;     /* as in seqpar_vocab_teacher */
    const void *dkl; /* (tokens) accumulator type, for backward: dL/dkl; NULL is zero */
} seqpar_llama_teacher;

/* The tokens that log-probs are normalized over, as in seqpar_vocab_choices. */
typedef struct seqpar_llama_choices {
    int32_t ids[SEQPAR_MAX_CHOICES];
    int64_t count;
    /* (tokens, count) accumulator type, for backward: dL/dlogq; NULL is zero */
    const void *dlogq;
} seqpar_llama_choices;

/* what a batch holds: nothing yet; hidden states; these and the activations for backward */
enum seqpar__llama_has {
    SEQPAR__LLAMA_HAS_NOTHING,
    SEQPAR__LLAMA_HAS_HIDDEN,
    SEQPAR__LLAMA_HAS_ACTIVATIONS
};

/* this rank's tokens of some rows, and their activations */
typedef struct seqpar_llama_batch {
    seqpar_llama_batch_desc desc;
    seqpar_llama_config config; /* of the model it was opened for */
    int has;                    /* SEQPAR__LLAMA_HAS_.. */
    /* for layers without and with the window; NULL: no layer is of that kind */
    seqpar_attn *attn, *windowed;
    const seqpar_share *share;
    /* qk_norm: the share's pieces where a row is one head, or kv head, of a token */
    seqpar_piece *head_pieces, *kv_head_pieces;
    int64_t tokens;
    int64_t longest;                    /* positions that rotary tables need */
    int32_t *ids, *targets, *positions; /* (tokens) */
    int32_t *taught;                    /* (tokens) ids, -1 instead of untaught - 1 */
    seqpar_llama_layer *layers;         /* (layers) */
    seqpar_llama_layer shared;          /* recompute: one set for all layers */
    seqpar_llama_staging staging[2];    /* recompute 2: double buffer, even and odd layers */
    seqpar_buffer offloaded;            /* recompute 2: the second pool, all but two layers */
    /* residual stream, scratch, final norm's output and its 1/rms */
    seqpar_buffer x, n, hidden, rstd;
    seqpar_buffer logp, entropy, lse, smooth; /* (tokens), accumulator type */
    seqpar_buffer kl, teacher_entropy;        /* the same; with a teacher */
    /* NULL, or the teacher; set it before values or backward */
    const seqpar_llama_teacher *teacher;
    /* NULL, or the tokens that log-probs are normalized over. Values and backward then write logq
       (tokens, count), accumulator type, instead of logp and the others, and backward takes no
       seeds. Set it before values or backward */
    const seqpar_llama_choices *choices;
    seqpar_buffer logq;
    /* NULL, or (tokens), the caller's: values and backward write each token's most probable next
       token */
    int32_t *best;
    /* (tokens), storage type: a score model's output, instead of logp and the others */
    seqpar_buffer score;
    seqpar_buffer wide; /* scratch (tokens, intermediate), or (slots, expert_intermediate) */
    seqpar_buffer tile; /* scratch: some rows or columns of a four-bit matrix, dequantized */
    seqpar_buffer ones; /* (tokens) ones; with biases */
    /* ---- with adapters ---- */
    seqpar_buffer adapted;       /* scratch (tokens, rank) */
    seqpar_buffer adapted_scale; /* (tokens) each the adapters' scale */
    seqpar_buffer dropped;       /* scratch (tokens, widest input) */
    double adapted_by;           /* the value in adapted_scale; 0: not written yet */
    int32_t *tokens_of;          /* (tokens) 0, 1, 2, .. */
    int64_t *document_of;        /* (tokens) dropout: the document's number */
    int32_t *position_of;        /* (tokens) dropout: the position in it */
    /* ---- with experts ---- */
    /* (experts) how often this rank's tokens chose each, in all layers of the last forward pass */
    int64_t *chosen;
    /* (experts), borrowed: dL/dprobs for every token and layer, from seqpar_llama_balance; set it
       between forward and backward. NULL: no load-balancing loss */
    const double *balance;
    /* (tokens) accumulators, after backward with `balance`: each token's term of that loss */
    seqpar_buffer balance_loss;
    seqpar_llama_routes *routes; /* (layers); recompute: one */
    int32_t *route_lists;        /* memory of the routes' lists and of self */
    int64_t *route_begins;       /* memory of the routes' begin */
    int32_t *self;               /* (slots) 0, 1, 2, .. */
    seqpar_piece *expert_pieces; /* the share's pieces, cut to slots of one expert */
    seqpar_buffer slots_in, slots_out, slots_wide, router, dweights; /* scratch */
} seqpar_llama_batch;

/* rows (borrowed) are the same on all ranks of ctx->sp; row_count may be 0. Collective over
   ctx->sp, as seqpar_attn_open is. */
SEQPAR_DEF seqpar_status seqpar_llama_open_batch(seqpar_ctx *ctx, seqpar_llama *model,
                                                 seqpar_llama_batch *batch,
                                                 const seqpar_row *rows, int64_t row_count,
                                                 const seqpar_llama_batch_desc *desc);
SEQPAR_DEF void seqpar_llama_close_batch(seqpar_ctx *ctx, seqpar_llama *model,
                                         seqpar_llama_batch *batch);
/* Computes batch->hidden. keep 1: stores activations for backward. Collective over ctx->sp; of a
   sharded model over the world, ranks without rows included. */
SEQPAR_DEF seqpar_status seqpar_llama_forward(seqpar_ctx *ctx, seqpar_llama *model,
                                              seqpar_llama_batch *batch, int keep);
/* Computes from batch->hidden: logp, entropy, lse and smooth, or logq, or score. Sharded:
   collective over the world. */
SEQPAR_DEF seqpar_status seqpar_llama_values(seqpar_ctx *ctx, seqpar_llama *model,
                                             seqpar_llama_batch *batch);
/* Computes the values, and each group's gradient, which goes to seqpar_step_gradient. Seeds
   are per local token; a score model reads dlogp alone, which is dL/dscore in storage type. The
   stored activations are used up. STEP: the batch's rows or layout differ from those given to
   seqpar_step_begin. Collective over the world; ranks without rows call it with an empty batch. */
SEQPAR_DEF seqpar_status seqpar_llama_backward(seqpar_ctx *ctx, seqpar_llama *model,
                                               seqpar_llama_batch *batch, seqpar_optim *optim,
                                               int64_t micro_batch,
                                               const seqpar_vocab_seeds *seeds);
/* The load-balancing loss of Switch Transformers (Fedus et al. 2021), as transformers computes
   it: experts x sum over e of f[e] P[e], f[e] = how often e is chosen per token and layer, P[e] =
   its mean probability, both over the whole step. chosen (experts): batch->chosen summed over the
   step's micro-batches and all ranks. Writes slopes (experts) = coefficient x dloss/dprob of one
   token in one layer, for batch->balance. */
SEQPAR_DEF void seqpar_llama_balance(const seqpar_llama_config *config, double *slopes,
                                     const int64_t *chosen, double coefficient);
/* From batch->hidden: logits (batch->tokens, vocab), or scores (batch->tokens, 1), to device
   memory of the caller. For tests: seqpar_vocab_* never hold all logits. */
SEQPAR_DEF seqpar_status seqpar_llama_logits(seqpar_ctx *ctx, seqpar_llama *model,
                                             seqpar_llama_batch *batch, void *logits);

/* ---- sample: text for rollouts ---- */
typedef struct seqpar_llama_prompt {
    const int32_t *ids; /* (tokens), borrowed */
    int64_t tokens;     /* at least 1 */
    /* this text's index in the whole rollout, over all ranks; it selects the random numbers */
    int64_t number;
} seqpar_llama_prompt;

typedef struct seqpar_llama_sample_desc {
    int64_t max_new_tokens; /* at least 1 */
    int64_t max_tokens;     /* of a prompt and its text together; 0: no limit */
    /* texts generated at a time, each with a cache of keys and values; 0: 16 */
    int64_t batch;
    /* 0: always the most probable token, of equals the one with the lowest id */
    double temperature;
    /* in (0, 1]: the fewest most probable tokens whose probabilities add up to it; 1: all */
    double top_p;
    int64_t top_k;        /* only the top_k most probable tokens, before top_p; 0: all */
    const int32_t *stops; /* (stop_count) ids that end a text, borrowed */
    int64_t stop_count;
    uint64_t seed;
    int64_t cell; /* as in the rows that train on the text: seqpar_cell_begin */
} seqpar_llama_sample_desc;

typedef struct seqpar_llama_text {
    int32_t *ids; /* (count) without the prompt; a stop id is the last of them */
    /* (count) each id's log-prob over the whole vocabulary (top_k, top_p do not count) at the
       desc's temperature (0: at 1); never NaN. Equal bit for bit to batch->logp when prompt and
       text are one document of a row, at that temperature, on any number of ranks */
    double *logp;
    int64_t count; /* at least 1 */
    int stopped;   /* 1: by a stop id, 0: by length */
} seqpar_llama_text;

/* Writes texts (count), texts[i] for prompts[i]. No communication: every rank passes its own
   prompts, or none. A text depends on the parameters, its prompt, the desc and its number alone,
   not on the other texts, ranks, threads or batch. seqpar_random_uniform(seed, number, t) chooses
   the token at position t (prompt included). Free with seqpar_llama_texts_free; after an error
   there is nothing to free. OPTION: a desc outside its range, a score model, or a prompt of
   max_tokens and more; STEP: a sharded model that is not gathered; SIZE: a negative count or no
   new tokens; DOCUMENT_TOKENS: an empty prompt; TOKEN_ID: an id outside the vocabulary;
   CELL: a cell outside its range; NOT_FINITE: a logit is not finite. */
SEQPAR_DEF seqpar_status seqpar_llama_generate(seqpar_ctx *ctx, seqpar_llama *model,
                                               seqpar_llama_text *texts,
                                               const seqpar_llama_prompt *prompts,
                                               int64_t count,
                                               const seqpar_llama_sample_desc *desc);
SEQPAR_DEF void seqpar_llama_texts_free(seqpar_llama_text *texts, int64_t count);

#ifdef __cplusplus
}
#endif
#endif /* SEQPAR_LLAMA_H */

#if defined(SEQPAR_LLAMA_IMPLEMENTATION) && !defined(SEQPAR__LLAMA_IMPLEMENTED)
#define SEQPAR__LLAMA_IMPLEMENTED

#if defined(SEQPAR_STATIC) && !defined(SEQPAR_IMPLEMENTATION)
#error \
    "seqpar_llama.h: with SEQPAR_STATIC no function is seen in other units; define SEQPAR_IMPLEMENTATION in this one"
#endif
#if defined(__FAST_MATH__)
#error \
    "seqpar_llama.h: -ffast-math and -Ofast change the rotary tables and initial parameters; seqpar promises equal bits. Drop the flag where SEQPAR_LLAMA_IMPLEMENTATION is."
#endif

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef SEQPAR_MALLOC
#define SEQPAR_MALLOC(size) malloc(size)
#define SEQPAR_FREE(ptr)    free(ptr)
#endif

#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off", "no-trapping-math", "no-math-errno")
#endif

#define SEQPAR__LLAMA_TRY(call) \
    do { \
        seqpar_status try_ = (call); \
        if (try_) return try_; \
    } while (0)
#define SEQPAR__LLAMA_NEW(type, count) \
    ((type *)seqpar__llama_calloc((int64_t)(count), (int64_t)sizeof(type)))
#define SEQPAR__LLAMA_MIN(a, b) ((a) < (b) ? (a) : (b))
#define SEQPAR__LLAMA_MAX(a, b) ((a) > (b) ? (a) : (b))

/* Zeroed memory. NULL always means out of memory: a count of 0 still gets an address. */
static void *seqpar__llama_calloc(int64_t count, int64_t size) {
    int64_t many = count > 0 ? count : 1;
    void *data = many <= PTRDIFF_MAX / size ? SEQPAR_MALLOC((size_t)(many * size)) : NULL;
    if (data) memset(data, 0, (size_t)(many * size));
    return data;
}

static seqpar_status seqpar__llama_no_memory(seqpar_error *error, const char *what) {
    return seqpar_fail(error, SEQPAR_ERR_MEMORY, "out of memory for %s", what);
}

/* The address of an element of a device buffer. */
static void *seqpar__llama_at(const void *base, int64_t element, int dtype) {
    return (char *)base + element * seqpar_dtype_bytes(dtype);
}

/* ---- >>tensors  the parameter table ---- */

/* A layer's tensors. A matrix's bias comes right after it (seqpar__llama_bias_of). */
enum {
    SEQPAR__LLAMA_NORM1,
    SEQPAR__LLAMA_Q,
    SEQPAR__LLAMA_Q_BIAS,
    SEQPAR__LLAMA_Q_NORM,
    SEQPAR__LLAMA_K,
    SEQPAR__LLAMA_K_BIAS,
    SEQPAR__LLAMA_K_NORM,
    SEQPAR__LLAMA_V,
    SEQPAR__LLAMA_V_BIAS,
    SEQPAR__LLAMA_O,
    SEQPAR__LLAMA_O_BIAS,
    SEQPAR__LLAMA_NORM2,
    SEQPAR__LLAMA_ROUTER,
    SEQPAR__LLAMA_GATE,
    SEQPAR__LLAMA_GATE_BIAS,
    SEQPAR__LLAMA_UP,
    SEQPAR__LLAMA_UP_BIAS,
    SEQPAR__LLAMA_DOWN,
    SEQPAR__LLAMA_DOWN_BIAS,
    SEQPAR__LLAMA_PARTS,
    /* gate, up and down of expert 0, then those of the next, ... */
    SEQPAR__LLAMA_EXPERTS = SEQPAR__LLAMA_PARTS,
    SEQPAR__LLAMA_LAYER_PARTS
};
/* symbolic numbers of rows and columns */
enum {
    SEQPAR__LLAMA_ONE,
    SEQPAR__LLAMA_HIDDEN,
    SEQPAR__LLAMA_HEAD,  /* head_dim */
    SEQPAR__LLAMA_HEADS, /* heads * head_dim */
    SEQPAR__LLAMA_KV_HEADS,
    SEQPAR__LLAMA_INTERMEDIATE,
    SEQPAR__LLAMA_NUM_EXPERTS
};
static const struct {
    const char *name;
    int rows, cols;
} seqpar__llama_parts[SEQPAR__LLAMA_PARTS] = {
    {"input_layernorm.weight", SEQPAR__LLAMA_ONE, SEQPAR__LLAMA_HIDDEN},
    {"self_attn.q_proj.weight", SEQPAR__LLAMA_HEADS, SEQPAR__LLAMA_HIDDEN},
    {"self_attn.q_proj.bias", SEQPAR__LLAMA_ONE, SEQPAR__LLAMA_HEADS},
    {"self_attn.q_norm.weight", SEQPAR__LLAMA_ONE, SEQPAR__LLAMA_HEAD},
    {"self_attn.k_proj.weight", SEQPAR__LLAMA_KV_HEADS, SEQPAR__LLAMA_HIDDEN},
    {"self_attn.k_proj.bias", SEQPAR__LLAMA_ONE, SEQPAR__LLAMA_KV_HEADS},
    {"self_attn.k_norm.weight", SEQPAR__LLAMA_ONE, SEQPAR__LLAMA_HEAD},
    {"self_attn.v_proj.weight", SEQPAR__LLAMA_KV_HEADS, SEQPAR__LLAMA_HIDDEN},
    {"self_attn.v_proj.bias", SEQPAR__LLAMA_ONE, SEQPAR__LLAMA_KV_HEADS},
    {"self_attn.o_proj.weight", SEQPAR__LLAMA_HIDDEN, SEQPAR__LLAMA_HEADS},
    {"self_attn.o_proj.bias", SEQPAR__LLAMA_ONE, SEQPAR__LLAMA_HIDDEN},
    {"post_attention_layernorm.weight", SEQPAR__LLAMA_ONE, SEQPAR__LLAMA_HIDDEN},
    {"mlp.gate.weight", SEQPAR__LLAMA_NUM_EXPERTS, SEQPAR__LLAMA_HIDDEN},
    {"mlp.gate_proj.weight", SEQPAR__LLAMA_INTERMEDIATE, SEQPAR__LLAMA_HIDDEN},
    {"mlp.gate_proj.bias", SEQPAR__LLAMA_ONE, SEQPAR__LLAMA_INTERMEDIATE},
    {"mlp.up_proj.weight", SEQPAR__LLAMA_INTERMEDIATE, SEQPAR__LLAMA_HIDDEN},
    {"mlp.up_proj.bias", SEQPAR__LLAMA_ONE, SEQPAR__LLAMA_INTERMEDIATE},
    {"mlp.down_proj.weight", SEQPAR__LLAMA_HIDDEN, SEQPAR__LLAMA_INTERMEDIATE},
    {"mlp.down_proj.bias", SEQPAR__LLAMA_ONE, SEQPAR__LLAMA_HIDDEN}};
#define SEQPAR__LLAMA_NAME_BYTES 96
/* base_model.model.NAME.weight, as adapters have it, fits with its 0 */
#define SEQPAR__LLAMA_SCORE_LETTERS (SEQPAR__LLAMA_NAME_BYTES - 25)

static int seqpar__llama_is_sparse(const seqpar_llama_config *c, int64_t layer) {
    return c->experts && (layer + 1) % (c->sparse_every ? c->sparse_every : 1) == 0;
}

static int seqpar__llama_has(const seqpar_llama_config *c, int64_t layer, int part) {
    int sparse = seqpar__llama_is_sparse(c, layer);
    switch (part) {
    case SEQPAR__LLAMA_Q_BIAS:
    case SEQPAR__LLAMA_K_BIAS:
    case SEQPAR__LLAMA_V_BIAS: return c->qkv_bias;
    case SEQPAR__LLAMA_O_BIAS: return c->o_bias;
    case SEQPAR__LLAMA_Q_NORM:
    case SEQPAR__LLAMA_K_NORM: return c->qk_norm;
    case SEQPAR__LLAMA_ROUTER: return sparse;
    case SEQPAR__LLAMA_GATE:
    case SEQPAR__LLAMA_UP:
    case SEQPAR__LLAMA_DOWN: return !sparse;
    case SEQPAR__LLAMA_GATE_BIAS:
    case SEQPAR__LLAMA_UP_BIAS:
    case SEQPAR__LLAMA_DOWN_BIAS: return c->mlp_bias && !sparse;
    }
    return 1;
}

static int seqpar__llama_has_biases(const seqpar_llama_config *c) {
    return c->qkv_bias || c->o_bias || c->mlp_bias;
}

static int64_t seqpar__llama_size(const seqpar_llama_config *c, int size) {
    switch (size) {
    case SEQPAR__LLAMA_HIDDEN: return c->hidden;
    case SEQPAR__LLAMA_HEAD: return c->head_dim;
    case SEQPAR__LLAMA_HEADS: return c->heads * c->head_dim;
    case SEQPAR__LLAMA_KV_HEADS: return c->kv_heads * c->head_dim;
    case SEQPAR__LLAMA_INTERMEDIATE: return c->intermediate;
    case SEQPAR__LLAMA_NUM_EXPERTS: return c->experts;
    }
    return 1;
}

/* Whether tensor number `tensor` is in four bits. */
static int seqpar__llama_is_coded(const seqpar_llama *m, int64_t tensor) {
    return m->codes_at && m->codes_at[tensor] >= 0;
}

/* Reserves space for the last tensor: in codes if it is a four-bit matrix, else in params. */
static void seqpar__llama_reserve(seqpar_llama *m) {
    const seqpar_tensor *t = &m->tensors[m->tensor_count - 1];
    int64_t n = t->rows * t->cols;
    int coded = t->rows > 1 && t->group > 0 && t->group <= m->config.layers;
    if (m->codes_at) m->codes_at[m->tensor_count - 1] = coded ? m->code_bytes : -1;
    if (m->codes_at && coded)
        m->code_bytes += seqpar_nf4_bytes(n);
    else
        m->elements += (n + SEQPAR_PARAM_BLOCK - 1) / SEQPAR_PARAM_BLOCK * SEQPAR_PARAM_BLOCK;
}

static void seqpar__llama_tensor(seqpar_llama *m, int64_t rows, int64_t cols, int64_t group,
                                 const char *prefix, const char *name) {
    seqpar_tensor *t = &m->tensors[m->tensor_count];
    char *whole = m->names + m->tensor_count++ * SEQPAR__LLAMA_NAME_BYTES;
    snprintf(whole, SEQPAR__LLAMA_NAME_BYTES, "%s%s", prefix, name);
    t->name = whole;
    t->rows = rows;
    t->cols = cols;
    t->offset = m->elements;
    t->decay = rows > 1;
    t->group = group;
    seqpar__llama_reserve(m);
    m->values += rows * cols;
}

static void seqpar__llama_expert_tensors(seqpar_llama *m, int64_t layer) {
    const seqpar_llama_config *c = &m->config;
    char prefix[80];
    m->parts[layer * SEQPAR__LLAMA_LAYER_PARTS + SEQPAR__LLAMA_EXPERTS] = m->tensor_count;
    for (int64_t e = 0; e < c->experts; e++) {
        snprintf(prefix, sizeof prefix, "model.layers.%lld.mlp.experts.%lld.", (long long)layer,
                 (long long)e);
        seqpar__llama_tensor(m, c->expert_intermediate, c->hidden, layer + 1, prefix,
                             "gate_proj.weight");
        seqpar__llama_tensor(m, c->expert_intermediate, c->hidden, layer + 1, prefix,
                             "up_proj.weight");
        seqpar__llama_tensor(m, c->hidden, c->expert_intermediate, layer + 1, prefix,
                             "down_proj.weight");
    }
}

static void seqpar__llama_layer_tensors(seqpar_llama *m, int64_t layer) {
    char prefix[48];
    snprintf(prefix, sizeof prefix, "model.layers.%lld.", (long long)layer);
    for (int part = 0; part < SEQPAR__LLAMA_PARTS; part++) {
        if (!seqpar__llama_has(&m->config, layer, part)) continue;
        m->parts[layer * SEQPAR__LLAMA_LAYER_PARTS + part] = m->tensor_count;
        seqpar__llama_tensor(m, seqpar__llama_size(&m->config, seqpar__llama_parts[part].rows),
                             seqpar__llama_size(&m->config, seqpar__llama_parts[part].cols),
                             layer + 1, prefix, seqpar__llama_parts[part].name);
    }
    if (seqpar__llama_is_sparse(&m->config, layer)) seqpar__llama_expert_tensors(m, layer);
}

static void seqpar__llama_tensors(seqpar_llama *m) {
    const seqpar_llama_config *c = &m->config;
    seqpar__llama_tensor(m, c->vocab, c->hidden, 0, "model.", "embed_tokens.weight");
    for (int64_t i = 0; i < c->layers; i++) seqpar__llama_layer_tensors(m, i);
    seqpar__llama_tensor(m, 1, c->hidden, c->layers + 1, "model.", "norm.weight");
    if (c->score) {
        seqpar__llama_tensor(m, 1, c->hidden, c->layers + 1, c->score, ".weight");
        m->tensors[m->tensor_count - 1].decay = 1; /* a matrix of one row, not a gain */
    } else if (!c->tied)
        seqpar__llama_tensor(m, c->vocab, c->hidden, c->layers + 2, "lm_head.", "weight");
}

/* Is the last tensor the head? A tied language model uses the embedding table instead. */
static int seqpar__llama_has_head_tensor(const seqpar_llama *m) {
    return !m->config.tied || m->config.score;
}

static int64_t seqpar__llama_final_norm(const seqpar_llama *m) {
    return m->tensor_count - 1 - seqpar__llama_has_head_tensor(m);
}

/* The tensor that projects to the vocabulary (tied: the embedding table), or to a score. */
static int64_t seqpar__llama_head(const seqpar_llama *m) {
    return seqpar__llama_has_head_tensor(m) ? m->tensor_count - 1 : 0;
}

/* The object that holds the head: a score is trained with the adapters, as one of them. */
static const seqpar_llama *seqpar__llama_head_model(const seqpar_llama *m) {
    return m->adapters && m->config.score ? m->adapters : m;
}

/* A tensor's number; of adapters that of B. 0: the layer has no such part. */
static int64_t seqpar__llama_part(const seqpar_llama *m, int64_t layer, int part) {
    return m->parts[layer * SEQPAR__LLAMA_LAYER_PARTS + part];
}

enum { SEQPAR__LLAMA_EXPERT_GATE, SEQPAR__LLAMA_EXPERT_UP, SEQPAR__LLAMA_EXPERT_DOWN };

static int64_t seqpar__llama_expert(const seqpar_llama *m, int64_t layer, int64_t expert,
                                    int matrix) {
    return seqpar__llama_part(m, layer, SEQPAR__LLAMA_EXPERTS) + 3 * expert + matrix;
}

/* The widest MLP of any layer: elements of a token between gate and down. */
static int64_t seqpar__llama_widest(const seqpar_llama_config *c) {
    return SEQPAR__LLAMA_MAX(c->intermediate, c->experts_per_token * c->expert_intermediate);
}

static int seqpar__llama_is_windowed(const seqpar_llama_config *c, int64_t layer) {
    return c->window && layer >= c->window_from;
}

static int seqpar__llama_rotates(const seqpar_llama_config *c, int64_t layer) {
    return !c->no_rope_every || (layer + 1) % c->no_rope_every;
}

/* A tensor in device memory. Sharded: seqpar__llama_use must have gathered its group. */
static void *seqpar__llama_param(seqpar_ctx *ctx, const seqpar_llama *m, int64_t tensor) {
    const seqpar_tensor *t = &m->tensors[tensor];
    const seqpar_shards *s = m->params.data ? NULL : m->shards;
    int second = s && s->held[0].group != t->group;
    if (!s) return seqpar__llama_at(m->params.data, t->offset, ctx->device->storage);
    return seqpar__llama_at(s->held[second].whole.data,
                            t->offset - m->tensors[s->blocks.group_tensor[t->group]].offset,
                            ctx->device->storage);
}

static seqpar_status seqpar__llama_use_group(seqpar_ctx *ctx, const seqpar_llama *m,
                                             int64_t group, int64_t next) {
    void *params;
    if (m->params.data || !m->shards) return SEQPAR_OK;
    return seqpar_shards_use(ctx, m->shards, group, next, &params);
}

/* The group of the adapters that belongs to a group of the model. Only layers and a score have
   adapters; -1: none. */
static int64_t seqpar__llama_adapter_group(const seqpar_llama *m, int64_t group) {
    return group > 0 && group <= m->config.layers + !!m->config.score ? group - 1 : -1;
}

/* Gathers a group's parameters, and its adapters', and starts gathering those of `next`. -1, -1:
   releases all. */
static seqpar_status seqpar__llama_use(seqpar_ctx *ctx, const seqpar_llama *m, int64_t group,
                                       int64_t next) {
    int64_t adapted = seqpar__llama_adapter_group(m, group);
    SEQPAR__LLAMA_TRY(seqpar__llama_use_group(ctx, m, group, next));
    if (!m->adapters || (adapted < 0 && group >= 0)) return SEQPAR_OK;
    return seqpar__llama_use_group(ctx, m->adapters, adapted,
                                   seqpar__llama_adapter_group(m, next));
}

/* Releases gathered parameters at the end of a call, since an optimizer step may change them
   before the next. After an error it does not wait for transfers under way. */
static seqpar_status seqpar__llama_release(seqpar_ctx *ctx, const seqpar_llama *m,
                                           seqpar_status status) {
    if (!status) return seqpar__llama_use(ctx, m, -1, -1);
    if (m->shards) m->shards->held[0].group = m->shards->held[1].group = -1;
    if (m->adapters) return seqpar__llama_release(ctx, m->adapters, status);
    return status;
}

static int seqpar__llama_is_above(double x, double least) { return x > least && x <= 1e300; }

static seqpar_status seqpar__llama_check_rope(seqpar_error *error,
                                              const seqpar_llama_config *c) {
    const seqpar_llama_rope *r = &c->rope;
    int bands = r->type == SEQPAR_ROPE_LLAMA3 || r->type == SEQPAR_ROPE_YARN;
    if (r->type < SEQPAR_ROPE_DEFAULT || r->type > SEQPAR_ROPE_YARN)
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "rope type is %d; give one of SEQPAR_ROPE_DEFAULT to _YARN",
                           r->type);
    if (r->type == SEQPAR_ROPE_DEFAULT) return SEQPAR_OK;
    if (!seqpar__llama_is_above(r->factor, 0) ||
        (r->type != SEQPAR_ROPE_LINEAR && !seqpar__llama_is_above(r->first_positions, 0)))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "rope factor is %g and original positions %g; give numbers above 0",
                           r->factor, r->first_positions);
    if (bands &&
        (!seqpar__llama_is_above(r->low, 0) || !seqpar__llama_is_above(r->high, r->low)))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "rope bounds are %g and %g; give two numbers above 0, the lower one "
                           "(low_freq_factor, beta_slow) first",
                           r->low, r->high);
    if (r->type == SEQPAR_ROPE_YARN &&
        !(r->attention_factor >= 0 && r->attention_factor <= 1e300))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "rope attention_factor is %g; give a number above 0, or 0 to "
                           "compute it from factor",
                           r->attention_factor);
    if (r->type == SEQPAR_ROPE_YARN && c->rope_theta > 0 && !(c->rope_theta > 1))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "rope_theta is %g, and yarn takes its logarithm; give one above 1",
                           c->rope_theta);
    return SEQPAR_OK;
}

static seqpar_status seqpar__llama_check_experts(seqpar_error *error,
                                                 const seqpar_llama_config *c) {
    if (c->experts < 0 || c->experts > SEQPAR_MAX_WIDTH || c->sparse_every < 0)
        return seqpar_fail(error, SEQPAR_ERR_SIZE,
                           "experts is %lld and sparse_every %lld; give 0 to %lld experts, and "
                           "a sparse_every of at least 0 (0: every layer)",
                           (long long)c->experts, (long long)c->sparse_every,
                           (long long)SEQPAR_MAX_WIDTH);
    if (!c->experts) return SEQPAR_OK;
    if (c->experts_per_token < 1 || c->experts_per_token > c->experts)
        return seqpar_fail(
            error, SEQPAR_ERR_SIZE,
            "a token goes to %lld of %lld experts; give at least 1 and at most as "
            "many as there are",
            (long long)c->experts_per_token, (long long)c->experts);
    if (c->expert_intermediate < 1 ||
        c->expert_intermediate > SEQPAR_MAX_WIDTH / c->experts_per_token)
        return seqpar_fail(
            error, SEQPAR_ERR_SIZE,
            "experts have intermediate %lld and a token goes to %lld; their product "
            "must be 1 to %lld",
            (long long)c->expert_intermediate, (long long)c->experts_per_token,
            (long long)SEQPAR_MAX_WIDTH);
    return SEQPAR_OK;
}

static seqpar_status seqpar__llama_check_config(seqpar_error *error,
                                                const seqpar_llama_config *c) {
    if (c->layers <= 0 || c->hidden <= 0 || c->intermediate <= 0 || c->vocab <= 0)
        return seqpar_fail(error, SEQPAR_ERR_SIZE,
                           "the model has %lld layers, hidden %lld, intermediate %lld, vocab "
                           "%lld; all must be positive",
                           (long long)c->layers, (long long)c->hidden,
                           (long long)c->intermediate, (long long)c->vocab);
    if (c->layers > SEQPAR_MAX_LAYERS || c->hidden > SEQPAR_MAX_WIDTH ||
        c->intermediate > SEQPAR_MAX_WIDTH || c->vocab > SEQPAR_MAX_VOCAB)
        return seqpar_fail(
            error, SEQPAR_ERR_SIZE,
            "the model has %lld layers, hidden %lld, intermediate %lld, vocab %lld; at most "
            "%lld, %lld, %lld and %lld are possible, check the configuration",
            (long long)c->layers, (long long)c->hidden, (long long)c->intermediate,
            (long long)c->vocab, (long long)SEQPAR_MAX_LAYERS, (long long)SEQPAR_MAX_WIDTH,
            (long long)SEQPAR_MAX_WIDTH, (long long)SEQPAR_MAX_VOCAB);
    if (c->heads <= 0 || c->kv_heads <= 0 || c->heads % c->kv_heads)
        return seqpar_fail(
            error, SEQPAR_ERR_HEADS,
            "%lld heads over %lld kv_heads; heads must be a positive multiple of kv_heads",
            (long long)c->heads, (long long)c->kv_heads);
    if (c->score && (!c->score[0] || strlen(c->score) > SEQPAR__LLAMA_SCORE_LETTERS))
        return seqpar_fail(
            error, SEQPAR_ERR_OPTION,
            "the score head is named '%.100s'; give a name of 1 to %d letters, usually score",
            c->score, SEQPAR__LLAMA_SCORE_LETTERS);
    if (c->score &&
        (!strcmp(c->score, "model.embed_tokens") || !strcmp(c->score, "model.norm") ||
         !strncmp(c->score, "model.layers.", 13)))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "the score head is named '%.100s', which is another tensor's name; "
                           "give another, usually score",
                           c->score);
    if (c->head_dim <= 0 || c->head_dim % 2)
        return seqpar_fail(error, SEQPAR_ERR_HEAD_DIM,
                           "head_dim is %lld; rotary embedding needs a positive even one",
                           (long long)c->head_dim);
    if (c->heads > SEQPAR_MAX_WIDTH / c->head_dim)
        return seqpar_fail(error, SEQPAR_ERR_SIZE,
                           "%lld heads of head_dim %lld are wider than %lld, the most a token "
                           "may have; check the configuration",
                           (long long)c->heads, (long long)c->head_dim,
                           (long long)SEQPAR_MAX_WIDTH);
    if (!(c->rope_theta >= 0 && c->rope_theta <= 1e300) ||
        !(c->rms_eps >= 0 && c->rms_eps <= 1e300))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "rope_theta is %g and rms_norm_eps %g; give numbers above 0, up to "
                           "1e300, or 0 for 10000 and 1e-5",
                           c->rope_theta, c->rms_eps);
    if (c->window < 0 || c->window_from < 0 || c->no_rope_every < 0)
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "window is %lld, window_from %lld and no_rope_every %lld; none may "
                           "be negative",
                           (long long)c->window, (long long)c->window_from,
                           (long long)c->no_rope_every);
    SEQPAR__LLAMA_TRY(seqpar__llama_check_experts(error, c));
    if (c->four_bits && c->experts)
        return seqpar_fail(
            error, SEQPAR_ERR_OPTION,
            "a model with experts is not kept in four bits; leave out four_bits");
    return seqpar__llama_check_rope(error, c);
}

SEQPAR_DEF seqpar_status seqpar_llama_open_table(seqpar_ctx *ctx, seqpar_llama *m,
                                                 const seqpar_llama_config *config) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, model, config", ctx, m, config);
    int64_t count;
    memset(m, 0, sizeof *m);
    SEQPAR__LLAMA_TRY(seqpar__llama_check_config(ctx->error, config));
    count = 3 + config->layers * (SEQPAR__LLAMA_LAYER_PARTS + 3 * config->experts);
    m->config = *config;
    if (m->config.rope_theta == 0) m->config.rope_theta = 10000.0;
    if (m->config.rms_eps == 0) m->config.rms_eps = 1e-5;
    m->tensors = SEQPAR__LLAMA_NEW(seqpar_tensor, count);
    m->names = SEQPAR__LLAMA_NEW(char, count *SEQPAR__LLAMA_NAME_BYTES);
    m->parts = SEQPAR__LLAMA_NEW(int64_t, count);
    if (config->four_bits) m->codes_at = SEQPAR__LLAMA_NEW(int64_t, count);
    if (!m->tensors || !m->names || !m->parts || (config->four_bits && !m->codes_at))
        return seqpar__llama_no_memory(ctx->error, "the model");
    seqpar__llama_tensors(m);
    return SEQPAR_OK;
}

static seqpar_status seqpar__llama_params_new(seqpar_ctx *ctx, seqpar_llama *m) {
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(ctx, &m->params,
                                        m->elements * seqpar_dtype_bytes(ctx->device->storage),
                                        SEQPAR_MEM_WEIGHTS));
    ctx->device->zero(ctx->device, m->params.data, m->params.bytes, ctx->queue);
    if (!m->code_bytes) return SEQPAR_OK;
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(ctx, &m->codes, m->code_bytes, SEQPAR_MEM_WEIGHTS));
    ctx->device->zero(ctx->device, m->codes.data, m->codes.bytes, ctx->queue);
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_llama_open(seqpar_ctx *ctx, seqpar_llama *m,
                                           const seqpar_llama_config *config) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, model, config", ctx, m, config);
    SEQPAR__LLAMA_TRY(seqpar_llama_open_table(ctx, m, config));
    return seqpar__llama_params_new(ctx, m);
}

SEQPAR_DEF seqpar_status seqpar_llama_open_sharded(seqpar_ctx *ctx, seqpar_llama *m,
                                                   const seqpar_llama_config *config,
                                                   int64_t slice, int offload) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, model, config", ctx, m, config);
    SEQPAR__LLAMA_TRY(seqpar_llama_open_table(ctx, m, config));
    if (config->four_bits)
        return seqpar_fail(ctx->error, SEQPAR_ERR_OPTION,
                           "a model in four bits is not sharded; open it by seqpar_llama_open "
                           "and, if you like, its adapters with sharded 1");
    m->shards = SEQPAR__LLAMA_NEW(seqpar_shards, 1);
    if (!m->shards) return seqpar__llama_no_memory(ctx->error, "the model");
    return seqpar_shards_open(ctx, m->shards, m->tensors, m->tensor_count, slice, offload);
}

/* ---- adapters ---- */

/* The matrix of each bit of seqpar_adapter_desc.targets. */
static const int seqpar__llama_adapted_parts[] = {
    SEQPAR__LLAMA_Q,    SEQPAR__LLAMA_K,  SEQPAR__LLAMA_V,   SEQPAR__LLAMA_O,
    SEQPAR__LLAMA_GATE, SEQPAR__LLAMA_UP, SEQPAR__LLAMA_DOWN};
enum {
    SEQPAR__LLAMA_TARGETS = 7,
    SEQPAR__LLAMA_ADAPT_MLP = 4 /* the first target of an MLP */
};

static seqpar_status seqpar__llama_check_adapter(seqpar_error *error, const seqpar_llama *m,
                                                 const seqpar_adapter_desc *d) {
    if (d->rank <= 0 || d->rank > SEQPAR_MAX_WIDTH)
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "the adapters' rank is %lld; give 1 to %lld", (long long)d->rank,
                           (long long)SEQPAR_MAX_WIDTH);
    if (!seqpar__llama_is_above(d->scale, 0))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "the adapters' scale is %g; give alpha / rank, above 0", d->scale);
    if (!(d->dropout >= 0 && d->dropout < 1))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "the adapters' dropout is %g; give at least 0 and less than 1",
                           d->dropout);
    if (d->targets <= 0 || d->targets > SEQPAR_ADAPT_ALL)
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "the adapters' targets are %d; give a sum of SEQPAR_ADAPT_..",
                           d->targets);
    if (m->config.experts && d->targets >> SEQPAR__LLAMA_ADAPT_MLP)
        return seqpar_fail(
            error, SEQPAR_ERR_OPTION,
            "the model has experts, whose MLPs have no adapters here; take targets "
            "of attention alone");
    return SEQPAR_OK;
}

static void seqpar__llama_adapter_tensors(seqpar_llama *a, int64_t layer, int part) {
    const seqpar_llama_config *c = &a->config;
    const char *name = seqpar__llama_parts[part].name;
    char prefix[SEQPAR__LLAMA_NAME_BYTES];
    snprintf(prefix, sizeof prefix, "base_model.model.model.layers.%lld.%.*s", (long long)layer,
             (int)(strlen(name) - strlen("weight")), name);
    seqpar__llama_tensor(a, a->adapter.rank,
                         seqpar__llama_size(c, seqpar__llama_parts[part].cols), layer, prefix,
                         "lora_A.weight");
    seqpar__llama_tensor(a, seqpar__llama_size(c, seqpar__llama_parts[part].rows),
                         a->adapter.rank, layer, prefix, "lora_B.weight");
    a->parts[layer * SEQPAR__LLAMA_LAYER_PARTS + part] = a->tensor_count - 1;
}

static void seqpar__llama_adapter_table(seqpar_llama *a) {
    char score[SEQPAR__LLAMA_NAME_BYTES];
    for (int64_t layer = 0; layer < a->config.layers; layer++)
        for (int i = 0; i < SEQPAR__LLAMA_TARGETS; i++)
            if (a->adapter.targets >> i & 1)
                seqpar__llama_adapter_tensors(a, layer, seqpar__llama_adapted_parts[i]);
    if (a->config.score) {
        snprintf(score, sizeof score, "base_model.model.%.71s", a->config.score);
        seqpar__llama_tensor(a, 1, a->config.hidden, a->config.layers, score, ".weight");
    }
    for (int64_t i = 0; i < a->tensor_count; i++)
        a->tensors[i].decay = 1; /* all are matrices */
}

SEQPAR_DEF seqpar_status seqpar_llama_open_adapters(seqpar_ctx *ctx, seqpar_llama *a,
                                                    const seqpar_llama *m,
                                                    const seqpar_adapter_desc *desc,
                                                    int sharded, int64_t slice) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, adapters, model, desc", ctx, a, m, desc);
    int64_t count = 1 + 2 * SEQPAR__LLAMA_TARGETS * m->config.layers;
    memset(a, 0, sizeof *a);
    SEQPAR__LLAMA_TRY(seqpar__llama_check_adapter(ctx->error, m, desc));
    a->config = m->config;
    a->adapter = *desc;
    a->tensors = SEQPAR__LLAMA_NEW(seqpar_tensor, count);
    a->names = SEQPAR__LLAMA_NEW(char, count *SEQPAR__LLAMA_NAME_BYTES);
    a->parts = SEQPAR__LLAMA_NEW(int64_t, m->config.layers * SEQPAR__LLAMA_LAYER_PARTS);
    if (sharded) a->shards = SEQPAR__LLAMA_NEW(seqpar_shards, 1);
    if (!a->tensors || !a->names || !a->parts || (sharded && !a->shards))
        return seqpar__llama_no_memory(ctx->error, "the adapters");
    seqpar__llama_adapter_table(a);
    if (sharded)
        return seqpar_shards_open(ctx, a->shards, a->tensors, a->tensor_count, slice, 0);
    return seqpar__llama_params_new(ctx, a);
}

static int seqpar__llama_same_parts(const seqpar_llama_config *x,
                                    const seqpar_llama_config *y) {
    return x->window == y->window && x->window_from == y->window_from &&
           x->qkv_bias == y->qkv_bias && x->o_bias == y->o_bias && x->mlp_bias == y->mlp_bias &&
           x->qk_norm == y->qk_norm && x->experts == y->experts &&
           x->experts_per_token == y->experts_per_token &&
           x->expert_intermediate == y->expert_intermediate &&
           x->sparse_every == y->sparse_every;
}

/* Refuses a batch or adapters (`what`: "batch was", "adapters were") opened with config y if
   the model's config x differs. */
static seqpar_status seqpar__llama_check_same(seqpar_error *error, const char *what,
                                              const seqpar_llama_config *y,
                                              const seqpar_llama_config *x) {
    if (x->layers == y->layers && x->hidden == y->hidden && x->heads == y->heads &&
        x->kv_heads == y->kv_heads && x->head_dim == y->head_dim &&
        x->intermediate == y->intermediate && x->vocab == y->vocab && !x->score == !y->score &&
        seqpar__llama_same_parts(x, y))
        return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_STEP,
                       "the %s opened for another model: %lld layers, hidden %lld, "
                       "vocab %lld%s; this one has %lld, %lld, %lld%s",
                       what, (long long)y->layers, (long long)y->hidden, (long long)y->vocab,
                       y->score ? ", scores" : "", (long long)x->layers, (long long)x->hidden,
                       (long long)x->vocab, x->score ? ", scores" : "");
}

/* Refuses adapters given as the model, a model given as adapters, and adapters of another. */
static seqpar_status seqpar__llama_check_adapters(seqpar_error *error, const seqpar_llama *m) {
    if (m->adapter.rank)
        return seqpar_fail(error, SEQPAR_ERR_STEP,
                           "adapters do not compute alone; give the model, with "
                           "model->adapters set");
    if (!m->adapters) return SEQPAR_OK;
    if (!m->adapters->adapter.rank)
        return seqpar_fail(error, SEQPAR_ERR_STEP,
                           "model->adapters is a model; open adapters with "
                           "seqpar_llama_open_adapters");
    return seqpar__llama_check_same(error, "adapters were", &m->adapters->config, &m->config);
}

/* Rows first to end - 1 of a matrix become W + scale B A. a: all of A (rank, columns); w: scratch
   for the rows of W and B. */
static seqpar_status seqpar__llama_merge_rows(seqpar_ctx *ctx, seqpar_llama *m, int64_t tensor,
                                              int64_t b_tensor, const double *a, int64_t first,
                                              int64_t end, double *w) {
    const seqpar_llama *adapters = m->adapters;
    int64_t cols = m->tensors[tensor].cols, rank = adapters->adapter.rank, n = end - first;
    double *b = w + n * cols;
    SEQPAR__LLAMA_TRY(seqpar_llama_read(ctx, m, w, tensor, first * cols, n * cols));
    SEQPAR__LLAMA_TRY(seqpar_llama_read(ctx, adapters, b, b_tensor, first * rank, n * rank));
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < rank; k++)
            for (int64_t j = 0; j < cols; j++)
                w[i * cols + j] += adapters->adapter.scale * b[i * rank + k] * a[k * cols + j];
    return seqpar_llama_write(ctx, m, w, tensor, first * cols, n * cols);
}

#ifndef SEQPAR__LLAMA_MERGE_ROWS
#define SEQPAR__LLAMA_MERGE_ROWS 64 /* rows of a matrix merged at a time */
#endif
static seqpar_status seqpar__llama_merge_part(seqpar_ctx *ctx, seqpar_llama *m, int64_t layer,
                                              int part) {
    int64_t tensor = seqpar__llama_part(m, layer, part);
    int64_t b = seqpar__llama_part(m->adapters, layer, part);
    const seqpar_tensor *t = &m->tensors[tensor];
    int64_t rank = m->adapters->adapter.rank, n = SEQPAR__LLAMA_MERGE_ROWS;
    double *room;
    seqpar_status status;
    if (!b) return SEQPAR_OK;
    room = SEQPAR__LLAMA_NEW(double, rank * t->cols + n * (t->cols + rank));
    if (!room) return seqpar__llama_no_memory(ctx->error, "merged rows");
    status = seqpar_llama_read(ctx, m->adapters, room, b - 1, 0, rank * t->cols);
    for (int64_t i = 0; !status && i < t->rows; i += n)
        status = seqpar__llama_merge_rows(ctx, m, tensor, b, room, i,
                                          SEQPAR__LLAMA_MIN(i + n, t->rows),
                                          room + rank * t->cols);
    SEQPAR_FREE(room);
    return status;
}

static seqpar_status seqpar__llama_merge_score(seqpar_ctx *ctx, seqpar_llama *m) {
    int64_t hidden = m->config.hidden;
    double *room = SEQPAR__LLAMA_NEW(double, hidden);
    seqpar_status status;
    if (!room) return seqpar__llama_no_memory(ctx->error, "a merged score");
    status = seqpar_llama_read(ctx, m->adapters, room, m->adapters->tensor_count - 1, 0,
                               hidden);
    if (!status) status = seqpar_llama_write(ctx, m, room, seqpar__llama_head(m), 0, hidden);
    SEQPAR_FREE(room);
    return status;
}

SEQPAR_DEF seqpar_status seqpar_llama_merge(seqpar_ctx *ctx, seqpar_llama *m) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, model", ctx, m);
    SEQPAR_NEED(ctx->error, "model->adapters", m->adapters);
    SEQPAR__LLAMA_TRY(seqpar__llama_check_adapters(ctx->error, m));
    if (m->config.four_bits)
        return seqpar_fail(ctx->error, SEQPAR_ERR_OPTION,
                           "merged weights would be rounded to four bits again; open the model "
                           "without four_bits and merge the adapters into that");
    for (int64_t layer = 0; layer < m->config.layers; layer++)
        for (int i = 0; i < SEQPAR__LLAMA_TARGETS; i++)
            SEQPAR__LLAMA_TRY(
                seqpar__llama_merge_part(ctx, m, layer, seqpar__llama_adapted_parts[i]));
    if (m->config.score) SEQPAR__LLAMA_TRY(seqpar__llama_merge_score(ctx, m));
    m->adapters = NULL;
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_llama_gather(seqpar_ctx *ctx, seqpar_llama *m) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, model", ctx, m);
    if (m->adapters) SEQPAR__LLAMA_TRY(seqpar_llama_gather(ctx, m->adapters));
    if (m->params.data || !m->shards) return SEQPAR_OK;
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(ctx, &m->params,
                                        m->elements * seqpar_dtype_bytes(ctx->device->storage),
                                        SEQPAR_MEM_WEIGHTS));
    return seqpar_shards_gather(ctx, m->shards, m->params.data, m->elements);
}

SEQPAR_DEF void seqpar_llama_drop(seqpar_ctx *ctx, seqpar_llama *m) {
    SEQPAR_MUST("ctx, model", ctx, m);
    if (m->adapters) seqpar_llama_drop(ctx, m->adapters);
    if (m->shards) seqpar_buffer_free(ctx, &m->params);
}

SEQPAR_DEF void *seqpar_llama_trainable(seqpar_llama *m, int64_t *elements) {
    SEQPAR_MUST("model, elements", m, elements);
    if (m->adapters) return seqpar_llama_trainable(m->adapters, elements);
    *elements = m->shards ? m->shards->blocks.own_elements : m->elements;
    return m->shards ? m->shards->own.data : m->params.data;
}

static seqpar_mat seqpar__llama_mat(void *data, int64_t stride) {
    seqpar_mat m;
    m.data = data;
    m.stride = stride;
    return m;
}

/* Dequantizes part->rows x part->cols elements of a four-bit matrix, whose elements are taken
   as rows of `width`. */
static seqpar_status seqpar__llama_nf4_rows(seqpar_ctx *ctx, const seqpar_llama *m,
                                            int64_t tensor, int64_t width,
                                            seqpar_nf4_rows_args *part) {
    const seqpar_tensor *t = &m->tensors[tensor];
    part->from = seqpar_nf4_at((const char *)m->codes.data + m->codes_at[tensor],
                               t->rows * t->cols);
    part->width = width;
    return ctx->device->nf4_rows(ctx->device, part, ctx->queue);
}

static seqpar_status seqpar__llama_codes_read(seqpar_ctx *ctx, const seqpar_llama *m,
                                              double *values, int64_t tensor, int64_t first,
                                              int64_t count) {
    const seqpar_tensor *t = &m->tensors[tensor];
    seqpar_nf4_rows_args part;
    seqpar_buffer room;
    seqpar_status status = seqpar_buffer_new(
        ctx, &room, count * seqpar_dtype_bytes(ctx->device->storage), SEQPAR_MEM_SCRATCH);
    memset(&part, 0, sizeof part);
    part.out = seqpar__llama_mat(room.data, count);
    part.rows = 1;
    part.cols = count;
    part.col = first;
    if (!status) status = seqpar__llama_nf4_rows(ctx, m, tensor, t->rows * t->cols, &part);
    if (!status)
        seqpar_device_read(ctx->device, values, room.data, 0, count, ctx->device->storage);
    if (!status) status = seqpar_device_settle(ctx->device, ctx->queue);
    seqpar_buffer_free(ctx, &room);
    return status;
}

/* x rounded to the storage type (bf16: to nearest, ties to even). */
static float seqpar__llama_round_to_storage(int storage, double x) {
    float value = (float)x;
    uint32_t bits;
    if (storage != SEQPAR_DTYPE_BF16) return value;
    memcpy(&bits, &value, 4);
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
    memcpy(&value, &bits, 4);
    return value;
}

/* Quantizes the complete matrix and copies its bytes to the device. */
static seqpar_status seqpar__llama_codes_end(seqpar_ctx *ctx, seqpar_llama *m, int64_t tensor) {
    int64_t n = m->tensors[tensor].rows * m->tensors[tensor].cols, size = seqpar_nf4_bytes(n);
    char *bytes = SEQPAR__LLAMA_NEW(char, size);
    seqpar_status status = bytes ? seqpar_nf4_quantize(ctx->error, bytes, m->written, n)
                                 : seqpar__llama_no_memory(ctx->error, "a matrix in four bits");
    if (!status)
        ctx->device->copy(ctx->device, (char *)m->codes.data + m->codes_at[tensor], bytes, size,
                          ctx->queue);
    if (!status) status = seqpar_device_settle(ctx->device, ctx->queue);
    SEQPAR_FREE(bytes);
    SEQPAR_FREE(m->written);
    m->written = NULL;
    return status;
}

static seqpar_status seqpar__llama_codes_write(seqpar_ctx *ctx, seqpar_llama *m,
                                               const double *values, int64_t tensor,
                                               int64_t first, int64_t count) {
    const seqpar_tensor *t = &m->tensors[tensor];
    if (!first) {
        SEQPAR_FREE(m->written);
        m->written = SEQPAR__LLAMA_NEW(float, t->rows * t->cols);
        m->written_tensor = tensor;
        m->written_count = 0;
        if (!m->written)
            return seqpar__llama_no_memory(ctx->error, "a matrix to be in four bits");
    }
    if (!m->written || m->written_tensor != tensor || m->written_count != first ||
        count > t->rows * t->cols - first)
        return seqpar_fail(ctx->error, SEQPAR_ERR_STEP,
                           "%s is kept in four bits, and %lld values from %lld on do not "
                           "continue those written; write it whole, from 0 on",
                           t->name, (long long)count, (long long)first);
    for (int64_t i = 0; i < count; i++)
        m->written[first + i] = seqpar__llama_round_to_storage(ctx->device->storage, values[i]);
    m->written_count += count;
    if (m->written_count < t->rows * t->cols) return SEQPAR_OK;
    return seqpar__llama_codes_end(ctx, m, tensor);
}

SEQPAR_DEF seqpar_status seqpar_llama_read(seqpar_ctx *ctx, const seqpar_llama *m,
                                           double *values, int64_t tensor, int64_t first,
                                           int64_t count) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, model, values", ctx, m,
                SEQPAR_IF(count > 0, values));
    if (seqpar__llama_is_coded(m, tensor))
        return seqpar__llama_codes_read(ctx, m, values, tensor, first, count);
    if (m->shards) return seqpar_shards_read(ctx, m->shards, values, tensor, first, count);
    seqpar_device_read(ctx->device, values, m->params.data, m->tensors[tensor].offset + first,
                       count, ctx->device->storage);
    return seqpar_device_settle(ctx->device, ctx->queue); /* an error of the copy shows here */
}

SEQPAR_DEF seqpar_status seqpar_llama_write(seqpar_ctx *ctx, seqpar_llama *m,
                                            const double *values, int64_t tensor, int64_t first,
                                            int64_t count) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, model, values", ctx, m,
                SEQPAR_IF(count > 0, values));
    if (seqpar__llama_is_coded(m, tensor))
        return seqpar__llama_codes_write(ctx, m, values, tensor, first, count);
    if (m->shards) return seqpar_shards_write(ctx, m->shards, values, tensor, first, count);
    seqpar_device_write(ctx->device, m->params.data, m->tensors[tensor].offset + first, values,
                        count, ctx->device->storage);
    return seqpar_device_settle(ctx->device, ctx->queue);
}

SEQPAR_DEF int seqpar_llama_owns(const seqpar_ctx *ctx, const seqpar_llama *m, int64_t tensor,
                                 int64_t first, int64_t count) {
    SEQPAR_MUST("ctx, model", ctx, m);
    return !m->shards || seqpar_shards_owns(ctx, m->shards, tensor, first, count);
}

SEQPAR_DEF void seqpar_llama_close(seqpar_ctx *ctx, seqpar_llama *m) {
    SEQPAR_MUST("ctx, model", ctx, m);
    if (m->params.bytes) seqpar_buffer_free(ctx, &m->params); /* bytes 0: the caller's */
    if (m->codes.bytes) seqpar_buffer_free(ctx, &m->codes);
    SEQPAR_FREE(m->codes_at);
    SEQPAR_FREE(m->written);
    if (m->shards) seqpar_shards_close(ctx, m->shards);
    SEQPAR_FREE(m->shards);
    seqpar_buffer_free(ctx, &m->cosine);
    seqpar_buffer_free(ctx, &m->sine);
    seqpar_buffer_free(ctx, &m->offloaded);
    SEQPAR_FREE(m->tensors);
    SEQPAR_FREE(m->names);
    SEQPAR_FREE(m->parts);
    memset(m, 0, sizeof *m);
}

/* A matrix's initial standard deviation, with which outputs have the scale of inputs. The usual
   constant 0.02 suits widths of thousands; with it, a hidden size of 128 trains much slower. */
static double seqpar__llama_init_std(const seqpar_llama *m, int64_t tensor) {
    int64_t layer = m->tensors[tensor].group - 1;
    int inside = layer >= 0 && layer < m->config.layers;
    int64_t experts = inside ? seqpar__llama_part(m, layer, SEQPAR__LLAMA_EXPERTS) : 0;
    int residual = inside && (tensor == seqpar__llama_part(m, layer, SEQPAR__LLAMA_O) ||
                              tensor == seqpar__llama_part(m, layer, SEQPAR__LLAMA_DOWN) ||
                              (experts && tensor >= experts &&
                               (tensor - experts) % 3 == SEQPAR__LLAMA_EXPERT_DOWN));
    return 1.0 / sqrt((double)m->tensors[tensor].cols *
                      (residual ? 2.0 * (double)m->config.layers : 1.0));
}

/* B is 0, so new adapters do not change the model's output. */
static double seqpar__llama_init_adapter(const seqpar_tensor *t, int64_t tensor, uint64_t seed,
                                         int64_t index) {
    double bound = 1.0 / sqrt((double)t->cols);
    if (strstr(t->name, ".lora_B.")) return 0.0;
    if (strstr(t->name, ".lora_A."))
        return bound * (2 * seqpar_random_uniform(seed, (uint64_t)tensor, (uint64_t)index) - 1);
    return bound * seqpar_random_normal(seed, (uint64_t)tensor, (uint64_t)index);
}

static double seqpar__llama_init_value(const seqpar_llama *m, int64_t tensor, uint64_t seed,
                                       int64_t index) {
    const seqpar_tensor *t = &m->tensors[tensor];
    if (m->adapter.rank) return seqpar__llama_init_adapter(t, tensor, seed, index);
    if (!t->decay) return strstr(t->name, ".bias") ? 0.0 : 1.0;
    return seqpar__llama_init_std(m, tensor) *
           seqpar_random_normal(seed, (uint64_t)tensor, (uint64_t)index);
}

#ifndef SEQPAR__LLAMA_WRITE_VALUES
#define SEQPAR__LLAMA_WRITE_VALUES 256 /* values written at a time */
#endif
SEQPAR_DEF seqpar_status seqpar_llama_init_tensor(seqpar_ctx *ctx, seqpar_llama *m,
                                                  int64_t tensor, uint64_t seed) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, model", ctx, m);
    const seqpar_tensor *t = &m->tensors[tensor];
    int64_t n;
    double part[SEQPAR__LLAMA_WRITE_VALUES];
    for (int64_t j = 0; j < t->rows * t->cols; j += n) {
        n = SEQPAR__LLAMA_MIN(SEQPAR__LLAMA_WRITE_VALUES, t->rows * t->cols - j);
        if (!seqpar_llama_owns(ctx, m, tensor, j, n)) continue;
        for (int64_t k = 0; k < n; k++)
            part[k] = seqpar__llama_init_value(m, tensor, seed, j + k);
        SEQPAR__LLAMA_TRY(seqpar_llama_write(ctx, m, part, tensor, j, n));
    }
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_llama_init(seqpar_ctx *ctx, seqpar_llama *m, uint64_t seed) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, model", ctx, m);
    for (int64_t i = 0; i < m->tensor_count; i++)
        SEQPAR__LLAMA_TRY(seqpar_llama_init_tensor(ctx, m, i, seed));
    return SEQPAR_OK;
}

/* ---- >>batch  what one micro-batch needs ---- */

#define SEQPAR__LLAMA_TWO_PI 6.28318530717958647692 /* 2 pi */

/* LLAMA3: the weight of the scaled frequency, 0 to 1, for a wave that fits `waves` times into
   first_positions. */
static double seqpar__llama_llama3_weight(const seqpar_llama_rope *r, double waves) {
    double part = (r->high - waves) / (r->high - r->low);
    return SEQPAR__LLAMA_MIN(SEQPAR__LLAMA_MAX(part, 0), 1);
}

/* The index, not rounded, of the pair whose wave fits `waves` times into first_positions. */
static double seqpar__llama_pair_of(const seqpar_llama_config *c, double waves) {
    double length = c->rope.first_positions / (waves * SEQPAR__LLAMA_TWO_PI);
    return (double)c->head_dim * log(length) / (2 * log(c->rope_theta));
}

/* YARN: the weight of the scaled frequency: 0 up to pair `first`, linear, 1 from `last` on. */
static double seqpar__llama_yarn_weight(const seqpar_llama_config *c, int64_t pair) {
    double first = seqpar__llama_pair_of(c, c->rope.high), part;
    double last = seqpar__llama_pair_of(c, c->rope.low);
    if (!c->rope.exact) first = floor(first);
    if (!c->rope.exact) last = ceil(last);
    first = SEQPAR__LLAMA_MAX(first, 0);
    last = SEQPAR__LLAMA_MIN(last, (double)c->head_dim - 1);
    if (first == last) last += 0.001; /* as in transformers */
    part = ((double)pair - first) / (last - first);
    return SEQPAR__LLAMA_MIN(SEQPAR__LLAMA_MAX(part, 0), 1);
}

/* The angle, in radians, between the rotations of a pair at two adjacent positions. */
static double seqpar__llama_frequency(const seqpar_llama_config *c, int64_t pair) {
    const seqpar_llama_rope *r = &c->rope;
    double plain = pow(c->rope_theta, -2.0 * (double)pair / (double)c->head_dim), part = 0;
    if (r->type == SEQPAR_ROPE_LINEAR) part = 1;
    if (r->type == SEQPAR_ROPE_LLAMA3)
        part = seqpar__llama_llama3_weight(r,
                                           r->first_positions * plain / SEQPAR__LLAMA_TWO_PI);
    if (r->type == SEQPAR_ROPE_YARN) part = seqpar__llama_yarn_weight(c, pair);
    return part == 0 ? plain : part * plain / r->factor + (1 - part) * plain;
}

/* YARN: the factor of cosine and sine, so that scores keep their size over longer texts. */
static double seqpar__llama_rope_scale(const seqpar_llama_rope *r) {
    if (r->type != SEQPAR_ROPE_YARN) return 1;
    if (r->attention_factor > 0) return r->attention_factor;
    return r->factor > 1 ? 0.1 * log(r->factor) + 1 : 1;
}

/* Makes the tables of cosine and sine for at least `positions`, in fp64 on the host, so that
   every device gets equal values. */
static seqpar_status seqpar__llama_rope_tables(seqpar_ctx *ctx, seqpar_llama *m,
                                               int64_t positions) {
    int64_t half = m->config.head_dim / 2;
    int64_t bytes = positions * half * seqpar_dtype_bytes(ctx->device->accumulator);
    double *line, size = seqpar__llama_rope_scale(&m->config.rope);
    if (positions <= m->positions) return SEQPAR_OK;
    if (m->config.rope.type == SEQPAR_ROPE_DYNAMIC &&
        (double)positions > m->config.rope.first_positions)
        return seqpar_fail(ctx->error, SEQPAR_ERR_OPTION,
                           "a document has %lld tokens; with rope type dynamic %.0f are the "
                           "most (original_max_position_embeddings), give shorter ones or "
                           "another rope_type",
                           (long long)positions, m->config.rope.first_positions);
    seqpar_buffer_free(ctx, &m->cosine);
    seqpar_buffer_free(ctx, &m->sine);
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(ctx, &m->cosine, bytes, SEQPAR_MEM_WEIGHTS));
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(ctx, &m->sine, bytes, SEQPAR_MEM_WEIGHTS));
    line = SEQPAR__LLAMA_NEW(double, 3 * half);
    if (!line) return seqpar__llama_no_memory(ctx->error, "rotary tables");
    for (int64_t i = 0; i < half; i++)
        line[2 * half + i] = seqpar__llama_frequency(&m->config, i);
    for (int64_t p = 0; p < positions; p++) {
        for (int64_t i = 0; i < half; i++) {
            double angle = (double)p * line[2 * half + i];
            line[i] = size * cos(angle);
            line[half + i] = size * sin(angle);
        }
        seqpar_device_write(ctx->device, m->cosine.data, p * half, line, half,
                            ctx->device->accumulator);
        seqpar_device_write(ctx->device, m->sine.data, p * half, line + half, half,
                            ctx->device->accumulator);
    }
    SEQPAR_FREE(line);
    m->positions = positions;
    return SEQPAR_OK;
}

static seqpar_status seqpar__llama_tokens(seqpar_ctx *ctx, const seqpar_llama *m,
                                          seqpar_llama_batch *b, const seqpar_row *rows,
                                          int64_t row_count) {
    b->ids = SEQPAR__LLAMA_NEW(int32_t, 4 * b->tokens);
    if (!b->ids) return seqpar__llama_no_memory(ctx->error, "a micro-batch");
    b->targets = b->ids + b->tokens;
    b->positions = b->targets + b->tokens;
    b->taught = b->positions + b->tokens;
    for (int64_t r = 0; r < row_count; r++) {
        seqpar_scatter(b->ids, rows[r].ids, b->share, r, 4);
        seqpar_scatter(b->targets, rows[r].targets, b->share, r, 4);
        seqpar_scatter(b->positions, rows[r].position_ids, b->share, r, 4);
        for (int64_t i = 0; i < rows[r].tokens; i++) {
            int64_t position = rows[r].position_ids[i];
            if (position < 0)
                return seqpar_fail(ctx->error, SEQPAR_ERR_SIZE,
                                   "row %lld, token %lld has the position %lld; give 0 or more",
                                   (long long)rows[r].index, (long long)i, (long long)position);
            b->longest = SEQPAR__LLAMA_MAX(b->longest, position + 1);
            if (rows[r].ids[i] < 0 || rows[r].ids[i] >= m->config.vocab ||
                (rows[r].targets[i] != SEQPAR_IGNORE &&
                 (rows[r].targets[i] < 0 || rows[r].targets[i] >= m->config.vocab)))
                return seqpar_fail(
                    ctx->error, SEQPAR_ERR_TOKEN_ID,
                    "row %lld, token %lld has id %d and target %d; the model has ids 0..%lld",
                    (long long)rows[r].index, (long long)i, (int)rows[r].ids[i],
                    (int)rows[r].targets[i], (long long)m->config.vocab - 1);
        }
    }
    for (int64_t t = 0; t < b->tokens; t++)
        b->taught[t] = b->ids[t] == b->desc.untaught - 1 ? -1 : b->ids[t];
    return SEQPAR_OK;
}

/* Opens an attention for the layers with the window, and one for those without, each only if
   there are such layers. */
static seqpar_status seqpar__llama_open_attention(seqpar_ctx *ctx, seqpar_llama_batch *b,
                                                  const seqpar_row *rows, int64_t row_count) {
    const seqpar_llama_config *c = &b->config;
    seqpar_attn_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.heads = c->heads;
    desc.kv_heads = c->kv_heads;
    desc.head_dim = c->head_dim;
    desc.layout = b->desc.layout;
    desc.schedule = b->desc.schedule;
    desc.heads_k_stride = b->desc.heads_k_stride;
    desc.ulysses_size = b->desc.ulysses_size;
    desc.relaxed = b->desc.relaxed;
    desc.kernel = b->desc.kernel;
    desc.dropout = b->desc.dropout ? c->attention_dropout : 0.0;
    if (!seqpar__llama_is_windowed(c, 0))
        SEQPAR__LLAMA_TRY(seqpar_attn_open(ctx, &b->attn, rows, row_count, &desc));
    desc.window = c->window;
    if (seqpar__llama_is_windowed(c, c->layers - 1))
        SEQPAR__LLAMA_TRY(seqpar_attn_open(ctx, &b->windowed, rows, row_count, &desc));
    b->share = seqpar_attn_share(
        b->attn ? b->attn : b->windowed); /* the share does not depend on the window */
    b->tokens = b->share->tokens;
    return SEQPAR_OK;
}

/* The share's pieces in rows of (token, head): qk_norm's gain gradient sums over these. */
static void seqpar__llama_head_rows(const seqpar_share *share, int64_t heads,
                                    seqpar_piece *pieces) {
    for (int64_t i = 0; i < share->count; i++) {
        pieces[i] = share->pieces[i];
        pieces[i].local *= heads;
        pieces[i].count *= heads;
    }
}

static seqpar_status seqpar__llama_norm_pieces(seqpar_ctx *ctx, seqpar_llama_batch *b) {
    if (!b->config.qk_norm) return SEQPAR_OK;
    b->head_pieces = SEQPAR__LLAMA_NEW(seqpar_piece, 2 * b->share->count);
    if (!b->head_pieces) return seqpar__llama_no_memory(ctx->error, "a micro-batch");
    b->kv_head_pieces = b->head_pieces + b->share->count;
    seqpar__llama_head_rows(b->share, b->config.heads, b->head_pieces);
    seqpar__llama_head_rows(b->share, b->config.kv_heads, b->kv_head_pieces);
    return SEQPAR_OK;
}

/* A bias is added as a product: ones (rows, 1) times bias (1, columns). */
static seqpar_status seqpar__llama_ones(seqpar_ctx *ctx, seqpar_llama_batch *b, int64_t rows) {
    double ones[SEQPAR__LLAMA_WRITE_VALUES];
    if (!seqpar__llama_has_biases(&b->config)) return SEQPAR_OK;
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(
        ctx, &b->ones, rows * seqpar_dtype_bytes(ctx->device->storage), SEQPAR_MEM_SCRATCH));
    for (int64_t i = 0; i < SEQPAR__LLAMA_WRITE_VALUES; i++) ones[i] = 1;
    for (int64_t i = 0; i < rows; i += SEQPAR__LLAMA_WRITE_VALUES)
        seqpar_device_write(ctx->device, b->ones.data, i, ones,
                            SEQPAR__LLAMA_MIN(SEQPAR__LLAMA_WRITE_VALUES, rows - i),
                            ctx->device->storage);
    return SEQPAR_OK;
}

/* Allocates the routes of `rows` tokens for `count` layers. */
static seqpar_status seqpar__llama_routes_new(seqpar_ctx *ctx, seqpar_llama_batch *b,
                                              int64_t rows, int64_t count) {
    int64_t slots = rows * b->config.experts_per_token, experts = b->config.experts;
    b->routes = SEQPAR__LLAMA_NEW(seqpar_llama_routes, count);
    b->route_lists = SEQPAR__LLAMA_NEW(int32_t, (4 * count + 1) * slots);
    b->route_begins = SEQPAR__LLAMA_NEW(int64_t, count * (experts + 1));
    b->chosen = SEQPAR__LLAMA_NEW(int64_t, experts);
    b->expert_pieces = SEQPAR__LLAMA_NEW(seqpar_piece, b->share ? b->share->count : 0);
    if (!b->routes || !b->route_lists || !b->route_begins || !b->chosen || !b->expert_pieces)
        return seqpar__llama_no_memory(ctx->error, "experts");
    b->self = b->route_lists + 4 * count * slots;
    for (int64_t i = 0; i < slots; i++) b->self[i] = (int32_t)i;
    for (int64_t i = 0; i < count; i++) {
        b->routes[i].ids = b->route_lists + 4 * i * slots;
        b->routes[i].slot_of = b->routes[i].ids + slots;
        b->routes[i].pair_of = b->routes[i].slot_of + slots;
        b->routes[i].token_of = b->routes[i].pair_of + slots;
        b->routes[i].begin = b->route_begins + i * (experts + 1);
    }
    return SEQPAR_OK;
}

/* Allocates routes (of `layers` layers) and scratch of the experts for `rows` tokens. */
static seqpar_status seqpar__llama_experts_new(seqpar_ctx *ctx, seqpar_llama_batch *b,
                                               int64_t rows, int64_t layers) {
    const seqpar_llama_config *c = &b->config;
    int64_t slots = rows * c->experts_per_token;
    int64_t size = seqpar_dtype_bytes(ctx->device->storage);
    int64_t acc = seqpar_dtype_bytes(ctx->device->accumulator);
    if (!c->experts) return SEQPAR_OK;
    if (slots > INT32_MAX)
        return seqpar_fail(
            ctx->error, SEQPAR_ERR_SIZE,
            "a rank has %lld tokens, each for %lld experts; their product may be at "
            "most %d in a micro-batch, give fewer tokens",
            (long long)rows, (long long)c->experts_per_token, INT32_MAX);
    SEQPAR__LLAMA_TRY(seqpar__llama_routes_new(ctx, b, rows, layers));
    SEQPAR__LLAMA_TRY(
        seqpar_buffer_new(ctx, &b->slots_in, slots * c->hidden * size, SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(
        seqpar_buffer_new(ctx, &b->slots_out, slots * c->hidden * size, SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(
        ctx, &b->slots_wide, slots * c->expert_intermediate * size, SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(
        seqpar_buffer_new(ctx, &b->router, rows * c->experts * size, SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(
        seqpar_buffer_new(ctx, &b->balance_loss, rows * acc, SEQPAR_MEM_ACTIVATIONS));
    return seqpar_buffer_new(ctx, &b->dweights, slots * acc, SEQPAR_MEM_SCRATCH);
}

/* Tokens whose gate and up are in memory at a time. */
static int64_t seqpar__llama_mlp_rows(const seqpar_device *device,
                                      const seqpar_llama_batch *b) {
    return b->desc.mlp_rows
               ? seqpar_token_tile_rows(b->share, b->desc.mlp_rows, device->sum_step)
               : b->tokens;
}

static int64_t seqpar__llama_mlp_bytes(const seqpar_device *device,
                                       const seqpar_llama_batch *b) {
    return seqpar__llama_mlp_rows(device, b) * seqpar__llama_widest(&b->config) *
           seqpar_dtype_bytes(device->storage);
}

static seqpar_status seqpar__llama_check_batch_desc(seqpar_error *error,
                                                    const seqpar_llama_batch_desc *desc) {
    if (desc->recompute < 0 || desc->recompute > 2)
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "recompute is %d; use 0, 1, or 2 for activations in the device's "
                           "second pool",
                           desc->recompute);
    if (desc->mlp_rows < 0)
        return seqpar_fail(
            error, SEQPAR_ERR_OPTION,
            "mlp_rows is %lld; give the tokens of a tile of the MLP, or 0 for all",
            (long long)desc->mlp_rows);
    return SEQPAR_OK;
}

SEQPAR_DEF seqpar_status seqpar_llama_open_batch(seqpar_ctx *ctx, seqpar_llama *m,
                                                 seqpar_llama_batch *b, const seqpar_row *rows,
                                                 int64_t row_count,
                                                 const seqpar_llama_batch_desc *desc) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, model, batch, rows, desc", ctx, m, b,
                SEQPAR_IF(row_count > 0, rows), desc);
    const seqpar_llama_config *c = &m->config;
    int64_t size = seqpar_dtype_bytes(ctx->device->storage);
    int64_t acc = seqpar_dtype_bytes(ctx->device->accumulator);
    memset(b, 0, sizeof *b);
    b->longest = 1;
    b->desc = *desc;
    b->config = *c;
    b->staging[0].layer = b->staging[1].layer = -1;
    if (c->experts) b->desc.mlp_rows = 0;
    SEQPAR__LLAMA_TRY(seqpar__llama_check_batch_desc(ctx->error, desc));
    SEQPAR__LLAMA_TRY(seqpar__llama_open_attention(ctx, b, rows, row_count));
    SEQPAR__LLAMA_TRY(seqpar__llama_tokens(ctx, m, b, rows, row_count));
    SEQPAR__LLAMA_TRY(seqpar__llama_rope_tables(ctx, m, b->longest));
    SEQPAR__LLAMA_TRY(seqpar__llama_norm_pieces(ctx, b));
    SEQPAR__LLAMA_TRY(seqpar__llama_ones(ctx, b, b->tokens));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_experts_new(ctx, b, b->tokens, desc->recompute ? 1 : c->layers));
    b->layers = SEQPAR__LLAMA_NEW(seqpar_llama_layer, c->layers);
    if (!b->layers) return seqpar__llama_no_memory(ctx->error, "layers");
    SEQPAR__LLAMA_TRY(
        seqpar_buffer_new(ctx, &b->x, b->tokens * c->hidden * size, SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(
        seqpar_buffer_new(ctx, &b->n, b->tokens * c->hidden * size, SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(ctx, &b->hidden, b->tokens * c->hidden * size,
                                        SEQPAR_MEM_ACTIVATIONS));
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(ctx, &b->wide, seqpar__llama_mlp_bytes(ctx->device, b),
                                        SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(
        seqpar_buffer_new(ctx, &b->rstd, b->tokens * acc, SEQPAR_MEM_ACTIVATIONS));
    if (c->score)
        return seqpar_buffer_new(ctx, &b->score, b->tokens * size, SEQPAR_MEM_ACTIVATIONS);
    SEQPAR__LLAMA_TRY(
        seqpar_buffer_new(ctx, &b->logp, b->tokens * acc, SEQPAR_MEM_ACTIVATIONS));
    SEQPAR__LLAMA_TRY(
        seqpar_buffer_new(ctx, &b->entropy, b->tokens * acc, SEQPAR_MEM_ACTIVATIONS));
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(ctx, &b->lse, b->tokens * acc, SEQPAR_MEM_ACTIVATIONS));
    return seqpar_buffer_new(ctx, &b->smooth, b->tokens * acc, SEQPAR_MEM_ACTIVATIONS);
}

static void seqpar__llama_free_layer(seqpar_ctx *ctx, seqpar_llama_layer *l) {
    seqpar_buffer *all = &l->x;
    for (size_t i = 0; i < sizeof *l / sizeof *all; i++) seqpar_buffer_free(ctx, &all[i]);
}

/* ---- recompute 2: stored activations go to the second pool and come back ---- */

/* Later work on the queue waits for this buffer's moves; a failed move is reported by that work. */
static void seqpar__llama_staging_wait(const seqpar_ctx *ctx,
                                       const seqpar_llama_staging *staging) {
    if (staging->moves > 0) (void)ctx->device->moved(ctx->device, staging->moves, ctx->queue);
}

static void seqpar__llama_staging_free(seqpar_ctx *ctx, seqpar_llama_batch *b) {
    for (int i = 0; i < 2; i++) {
        seqpar_llama_staging *staging = &b->staging[i];
        seqpar__llama_staging_wait(ctx, staging);
        seqpar_buffer_free(ctx, &staging->x);
        seqpar_buffer_free(ctx, &staging->out);
        seqpar_buffer_free(ctx, &staging->lse);
        staging->layer = -1;
        staging->moves = 0;
    }
}

/* Caches the pool's memory for the next batch, since allocating pinned memory is slow. */
static void seqpar__llama_offloaded_close(seqpar_ctx *ctx, seqpar_llama *m,
                                          seqpar_llama_batch *b) {
    seqpar__llama_staging_free(ctx, b);
    if (m->offloaded.data)
        seqpar_buffer_free(ctx, &b->offloaded);
    else
        m->offloaded = b->offloaded;
}

SEQPAR_DEF void seqpar_llama_close_batch(seqpar_ctx *ctx, seqpar_llama *m,
                                         seqpar_llama_batch *b) {
    SEQPAR_MUST("ctx, model, batch", ctx, m, b);
    seqpar__llama_offloaded_close(ctx, m, b);
    for (int64_t i = 0; b->layers && i < m->config.layers; i++)
        seqpar__llama_free_layer(ctx, &b->layers[i]);
    seqpar__llama_free_layer(ctx, &b->shared);
    seqpar_buffer_free(ctx, &b->x);
    seqpar_buffer_free(ctx, &b->n);
    seqpar_buffer_free(ctx, &b->hidden);
    seqpar_buffer_free(ctx, &b->wide);
    seqpar_buffer_free(ctx, &b->ones);
    seqpar_buffer_free(ctx, &b->adapted);
    seqpar_buffer_free(ctx, &b->adapted_scale);
    seqpar_buffer_free(ctx, &b->dropped);
    seqpar_buffer_free(ctx, &b->slots_in);
    seqpar_buffer_free(ctx, &b->slots_out);
    seqpar_buffer_free(ctx, &b->slots_wide);
    seqpar_buffer_free(ctx, &b->router);
    seqpar_buffer_free(ctx, &b->dweights);
    seqpar_buffer_free(ctx, &b->balance_loss);
    seqpar_buffer_free(ctx, &b->rstd);
    seqpar_buffer_free(ctx, &b->logp);
    seqpar_buffer_free(ctx, &b->entropy);
    seqpar_buffer_free(ctx, &b->lse);
    seqpar_buffer_free(ctx, &b->smooth);
    seqpar_buffer_free(ctx, &b->kl);
    seqpar_buffer_free(ctx, &b->teacher_entropy);
    seqpar_buffer_free(ctx, &b->logq);
    seqpar_buffer_free(ctx, &b->score);
    seqpar_buffer_free(ctx, &b->tile);
    SEQPAR_FREE(b->layers);
    SEQPAR_FREE(b->ids);
    SEQPAR_FREE(b->head_pieces);
    SEQPAR_FREE(b->routes);
    SEQPAR_FREE(b->route_lists);
    SEQPAR_FREE(b->route_begins);
    SEQPAR_FREE(b->chosen);
    SEQPAR_FREE(b->tokens_of);
    SEQPAR_FREE(b->document_of);
    SEQPAR_FREE(b->position_of);
    SEQPAR_FREE(b->expert_pieces);
    seqpar_attn_close(ctx, b->attn);
    seqpar_attn_close(ctx, b->windowed);
    memset(b, 0, sizeof *b);
}

static int seqpar__llama_has_dropout(const seqpar_llama *m, const seqpar_llama_batch *b) {
    return m->adapters && m->adapters->adapter.dropout > 0 && b->desc.dropout;
}

/* Makes the scratch of dropout, and the lists of each local token's document and position,
   which its draws depend on. */
static seqpar_status seqpar__llama_dropped_scratch(seqpar_ctx *ctx, const seqpar_llama *m,
                                                   seqpar_llama_batch *b) {
    const seqpar_llama_config *c = &m->config;
    int64_t n = SEQPAR__LLAMA_MAX(b->tokens, (int64_t)1);
    int64_t bytes = n * SEQPAR__LLAMA_MAX(c->heads * c->head_dim, c->hidden) *
                    seqpar_dtype_bytes(ctx->device->storage);
    if (!seqpar__llama_has_dropout(m, b) || b->document_of) return SEQPAR_OK;
    b->document_of = SEQPAR__LLAMA_NEW(int64_t, n);
    b->position_of = SEQPAR__LLAMA_NEW(int32_t, n);
    if (!b->document_of || !b->position_of)
        return seqpar__llama_no_memory(ctx->error, "dropped tokens");
    for (int64_t i = 0; i < b->share->count; i++) {
        const seqpar_piece *p = &b->share->pieces[i];
        for (int64_t k = 0; k < p->count; k++) {
            b->document_of[p->local + k] = p->document;
            b->position_of[p->local + k] = (int32_t)(p->start + k * p->stride - p->origin);
        }
    }
    bytes = SEQPAR__LLAMA_MAX(bytes, seqpar__llama_mlp_bytes(ctx->device, b));
    return seqpar_buffer_new(ctx, &b->dropped, bytes, SEQPAR_MEM_SCRATCH);
}

/* Scratch for the adapters, made again if the caller has set others since the last call. */
static seqpar_status seqpar__llama_adapted_scratch(seqpar_ctx *ctx, const seqpar_llama *m,
                                                   seqpar_llama_batch *b) {
    int64_t n = SEQPAR__LLAMA_MAX(b->tokens, (int64_t)1), bytes;
    if (!m->adapters) return SEQPAR_OK;
    bytes = n * m->adapters->adapter.rank * seqpar_dtype_bytes(ctx->device->storage);
    if (b->adapted.bytes < bytes) {
        seqpar_buffer_free(ctx, &b->adapted);
        SEQPAR__LLAMA_TRY(seqpar_buffer_new(ctx, &b->adapted, bytes, SEQPAR_MEM_SCRATCH));
    }
    SEQPAR__LLAMA_TRY(seqpar__llama_dropped_scratch(ctx, m, b));
    if (m->adapters->adapter.scale == b->adapted_by) return SEQPAR_OK;
    if (!b->tokens_of) {
        b->tokens_of = SEQPAR__LLAMA_NEW(int32_t, n);
        if (!b->tokens_of) return seqpar__llama_no_memory(ctx->error, "adapted tokens");
        for (int64_t t = 0; t < n; t++) b->tokens_of[t] = (int32_t)t;
        SEQPAR__LLAMA_TRY(seqpar_buffer_new(ctx, &b->adapted_scale,
                                            n * seqpar_dtype_bytes(ctx->device->accumulator),
                                            SEQPAR_MEM_SCRATCH));
    }
    for (int64_t t = 0; t < n; t++)
        seqpar_device_write(ctx->device, b->adapted_scale.data, t, &m->adapters->adapter.scale,
                            1, ctx->device->accumulator);
    b->adapted_by = m->adapters->adapter.scale;
    return SEQPAR_OK;
}

/* ---- >>layer  one layer forward and backward ---- */

typedef struct seqpar__llama_layer_call { /* arguments of the functions of a layer */
    seqpar_ctx *ctx;
    seqpar_device *dev;
    const seqpar_llama *m;
    seqpar_llama_batch *b;
    int64_t layer;
    void *x, *q, *k, *v, *out, *lse, *x2, *gate, *up, *rstd1, *rstd2;
    void *raw_q, *raw_k, *rstd_q, *rstd_k, *probs, *weights;
    seqpar_llama_routes *routes;
    seqpar_token_tile tile;        /* all tokens, or mlp_rows of them */
    const seqpar_token_fold *fold; /* backward */
    void *nodes;
    int64_t node_stride;                         /* elements of a node: the group, or a slice */
    int64_t group, group_begin;                  /* its number and first parameter */
    int64_t first;                               /* the group's first element that nodes hold */
    const struct seqpar__llama_sampler *sampler; /* not NULL: attention reads its cache */
} seqpar__llama_layer_call;

/* outputs of a four-bit matrix that are dequantized at a time */
#ifndef SEQPAR__LLAMA_TILE
#define SEQPAR__LLAMA_TILE 256
#endif
/* Dequantizes rows of a four-bit matrix, or columns if transposed: tiles never cut a sum. */
static seqpar_status seqpar__llama_tile(const seqpar__llama_layer_call *c, int64_t tensor,
                                        int64_t first, int64_t count, int transposed) {
    const seqpar_tensor *t = &c->m->tensors[tensor];
    int64_t size = SEQPAR__LLAMA_TILE * SEQPAR__LLAMA_MAX(t->rows, t->cols) *
                   seqpar_dtype_bytes(c->dev->storage);
    seqpar_nf4_rows_args a;
    if (c->b->tile.bytes < size) {
        seqpar_buffer_free(c->ctx, &c->b->tile);
        SEQPAR__LLAMA_TRY(seqpar_buffer_new(c->ctx, &c->b->tile, size, SEQPAR_MEM_SCRATCH));
    }
    a.rows = transposed ? t->rows : count;
    a.cols = transposed ? count : t->cols;
    a.row = transposed ? 0 : first;
    a.col = transposed ? first : 0;
    a.out = seqpar__llama_mat(c->b->tile.data, a.cols);
    return seqpar__llama_nf4_rows(c->ctx, c->m, tensor, t->cols, &a);
}

/* The product `a` with a four-bit matrix, one tile of outputs after the other. */
static seqpar_status seqpar__llama_linear_coded(const seqpar__llama_layer_call *c,
                                                const seqpar_matmul_args *a, int64_t tensor) {
    for (int64_t first = 0, n; first < a->out; first += n) {
        seqpar_matmul_args part = *a;
        n = SEQPAR__LLAMA_MIN(SEQPAR__LLAMA_TILE, a->out - first);
        SEQPAR__LLAMA_TRY(seqpar__llama_tile(c, tensor, first, n, a->transposed));
        part.y.data = seqpar__llama_at(a->y.data, first, c->dev->storage);
        part.w = seqpar__llama_mat(c->b->tile.data, a->transposed ? n : a->in);
        part.out = n;
        SEQPAR__LLAMA_TRY(c->dev->matmul(c->dev, &part, c->ctx->queue));
    }
    return SEQPAR_OK;
}

/* y (tokens, rows of w) = x . w^T, or transposed: y (tokens, columns of w) = x . w. w: tensor
   number `tensor` of m, which is the model or its adapters. */
static seqpar_status seqpar__llama_linear_of(const seqpar__llama_layer_call *c,
                                             const seqpar_llama *m, void *y, void *x,
                                             int64_t tensor, int transposed, int accumulate) {
    const seqpar_tensor *t = &m->tensors[tensor];
    seqpar_matmul_args a;
    a.out = transposed ? t->cols : t->rows;
    a.in = transposed ? t->rows : t->cols;
    a.y = seqpar__llama_mat(y, a.out);
    a.x = seqpar__llama_mat(x, a.in);
    a.rows = c->tile.rows;
    a.transposed = transposed;
    a.accumulate = accumulate;
    if (seqpar__llama_is_coded(m, tensor)) return seqpar__llama_linear_coded(c, &a, tensor);
    a.w = seqpar__llama_mat(seqpar__llama_param(c->ctx, m, tensor), t->cols);
    return c->dev->matmul(c->dev, &a, c->ctx->queue);
}

static seqpar_status seqpar__llama_linear(const seqpar__llama_layer_call *c, void *y, void *x,
                                          int64_t tensor, int transposed, int accumulate) {
    return seqpar__llama_linear_of(c, c->m, y, x, tensor, transposed, accumulate);
}

/* The object whose parameters are trained: the adapters, if any, else the model. */
static const seqpar_llama *seqpar__llama_learner(const seqpar_llama *m) {
    return m->adapters ? m->adapters : m;
}

static seqpar_fold_call seqpar__llama_fold_call(const seqpar__llama_layer_call *c,
                                                int64_t tensor) {
    seqpar_fold_call r;
    r.program = c->tile.program;
    r.program_count = c->tile.program_count;
    r.depth = c->tile.depth;
    r.store = seqpar__llama_at(
        c->nodes, seqpar__llama_learner(c->m)->tensors[tensor].offset - c->group_begin,
        c->dev->accumulator);
    r.store_stride = c->node_stride;
    r.finish = NULL; /* a step's fold has no FINISH: it stores its nodes */
    return r;
}

/* The nodes of dW = dy^T x for a tensor of the learner. */
static seqpar_status seqpar__llama_linear_grad(const seqpar__llama_layer_call *c, void *dy,
                                               void *x, int64_t tensor) {
    const seqpar_tensor *t = &seqpar__llama_learner(c->m)->tensors[tensor];
    seqpar_weight_grad_args a;
    a.fold = seqpar__llama_fold_call(c, tensor);
    a.leaves = c->tile.leaves;
    a.dy = seqpar__llama_mat(dy, t->rows);
    a.x = seqpar__llama_mat(x, t->cols);
    a.out = t->rows;
    a.in = t->cols;
    return c->dev->weight_grad(c->dev, &a, c->ctx->queue);
}

static int64_t seqpar__llama_part_of(const seqpar__llama_layer_call *c, int part) {
    return seqpar__llama_part(c->m, c->layer, part);
}

/* The bias of a matrix is the part after it; a router has none. */
static int64_t seqpar__llama_bias_of(const seqpar__llama_layer_call *c, int part) {
    return part == SEQPAR__LLAMA_ROUTER ? 0 : seqpar__llama_part_of(c, part + 1);
}

/* The number of B among the adapters' tensors; A is the one before. 0: no adapter. */
static int64_t seqpar__llama_adapter_of(const seqpar__llama_layer_call *c, int part) {
    return c->m->adapters ? seqpar__llama_part(c->m->adapters, c->layer, part) : 0;
}

/* b->adapted (tokens, rank) = scale x A^T (transposed 0, `tensor` A) or scale x B (1, B). */
static seqpar_status seqpar__llama_adapted(const seqpar__llama_layer_call *c, void *x,
                                           int64_t tensor, int transposed) {
    const seqpar_adapter_desc *d = &c->m->adapters->adapter;
    void *u = c->b->adapted.data;
    seqpar_mix_args a;
    SEQPAR__LLAMA_TRY(seqpar__llama_linear_of(c, c->m->adapters, u, x, tensor, transposed, 0));
    if (d->scale == 1) return SEQPAR_OK;
    a.y = a.x = seqpar__llama_mat(u, d->rank);
    a.rows = c->tile.rows;
    a.terms = 1;
    a.width = d->rank;
    a.from = c->b->tokens_of;
    a.at = NULL;
    a.weights = c->b->adapted_scale.data;
    a.accumulate = 0;
    return c->dev->mix(c->dev, &a, c->ctx->queue);
}

/* y (tokens, inputs of the matrix) = dropout of x; accumulate: added to y. Each (matrix, layer,
   step) has a random stream of its own. Attention's streams count up from 0, these count down
   from the largest number. */
static seqpar_status seqpar__llama_dropout(const seqpar__llama_layer_call *c, void *y, void *x,
                                           int part, int accumulate) {
    const seqpar_llama_batch_desc *desc = &c->b->desc;
    int64_t layer = desc->dropout_step * c->m->config.layers + c->layer;
    seqpar_drop_args a;
    a.width = c->m->tensors[seqpar__llama_part_of(c, part)].cols;
    a.y = seqpar__llama_mat(y, a.width);
    a.x = seqpar__llama_mat(x, a.width);
    a.rows = c->tile.rows;
    a.document = c->b->document_of + c->tile.first;
    a.position = c->b->position_of + c->tile.first;
    a.dropout = c->m->adapters->adapter.dropout;
    a.seed = desc->dropout_seed;
    a.stream = ~(uint64_t)(layer * SEQPAR__LLAMA_LAYER_PARTS + part);
    a.accumulate = accumulate;
    return c->dev->drop(c->dev, &a, c->ctx->queue);
}

/* *x becomes the input of A: with dropout a copy in scratch, else unchanged. */
static seqpar_status seqpar__llama_adapter_input(const seqpar__llama_layer_call *c, void **x,
                                                 int part) {
    void *from = *x;
    if (!seqpar__llama_has_dropout(c->m, c->b)) return SEQPAR_OK;
    *x = c->b->dropped.data;
    return seqpar__llama_dropout(c, *x, from, part, 0);
}

/* y (tokens, outputs) = x W^T + bias + scale dropout(x) A^T B^T; accumulate: added to y. */
static seqpar_status seqpar__llama_project(const seqpar__llama_layer_call *c, void *y, void *x,
                                           int part, int accumulate) {
    int64_t bias = seqpar__llama_bias_of(c, part);
    SEQPAR__LLAMA_TRY(
        seqpar__llama_linear(c, y, x, seqpar__llama_part_of(c, part), 0, accumulate));
    if (bias) SEQPAR__LLAMA_TRY(seqpar__llama_linear(c, y, c->b->ones.data, bias, 1, 1));
    if (!seqpar__llama_adapter_of(c, part)) return SEQPAR_OK;
    SEQPAR__LLAMA_TRY(seqpar__llama_adapter_input(c, &x, part));
    SEQPAR__LLAMA_TRY(seqpar__llama_adapted(c, x, seqpar__llama_adapter_of(c, part) - 1, 0));
    return seqpar__llama_linear_of(c, c->m->adapters, y, c->b->adapted.data,
                                   seqpar__llama_adapter_of(c, part), 0, 1);
}

/* dx (tokens, inputs) = dy W + dropout(scale dy B A); accumulate: added to dx. */
static seqpar_status seqpar__llama_project_back(const seqpar__llama_layer_call *c, void *dx,
                                                void *dy, int part, int accumulate) {
    int64_t b = seqpar__llama_adapter_of(c, part);
    SEQPAR__LLAMA_TRY(
        seqpar__llama_linear(c, dx, dy, seqpar__llama_part_of(c, part), 1, accumulate));
    if (!b) return SEQPAR_OK;
    SEQPAR__LLAMA_TRY(seqpar__llama_adapted(c, dy, b, 1));
    if (!seqpar__llama_has_dropout(c->m, c->b))
        return seqpar__llama_linear_of(c, c->m->adapters, dx, c->b->adapted.data, b - 1, 1, 1);
    SEQPAR__LLAMA_TRY(seqpar__llama_linear_of(c, c->m->adapters, c->b->dropped.data,
                                              c->b->adapted.data, b - 1, 1, 0));
    return seqpar__llama_dropout(c, dx, c->b->dropped.data, part, 1);
}

/* dB = dy^T (scale x A^T), dA = (scale dy B)^T x, with dropout(x) for x if there is dropout. */
static seqpar_status seqpar__llama_adapter_grad(const seqpar__llama_layer_call *c, void *dy,
                                                void *x, int part) {
    int64_t b = seqpar__llama_adapter_of(c, part);
    if (!b) return SEQPAR_OK;
    SEQPAR__LLAMA_TRY(seqpar__llama_adapter_input(c, &x, part));
    SEQPAR__LLAMA_TRY(seqpar__llama_adapted(c, x, b - 1, 0));
    SEQPAR__LLAMA_TRY(seqpar__llama_linear_grad(c, dy, c->b->adapted.data, b));
    SEQPAR__LLAMA_TRY(seqpar__llama_adapted(c, dy, b, 1));
    return seqpar__llama_linear_grad(c, c->b->adapted.data, x, b - 1);
}

static seqpar_status seqpar__llama_project_grad(const seqpar__llama_layer_call *c, void *dy,
                                                void *x, int part) {
    int64_t bias = seqpar__llama_bias_of(c, part);
    if (c->m->adapters) return seqpar__llama_adapter_grad(c, dy, x, part);
    SEQPAR__LLAMA_TRY(seqpar__llama_linear_grad(c, dy, x, seqpar__llama_part_of(c, part)));
    if (!bias) return SEQPAR_OK;
    return seqpar__llama_linear_grad(c, c->b->ones.data, dy, bias);
}

/* RMSNorm of rows of the tensor's width, `heads` of them per token. */
static seqpar_status seqpar__llama_norm_rows(const seqpar__llama_layer_call *c, void *y,
                                             void *x, void *rstd, int64_t tensor,
                                             int64_t heads) {
    seqpar_rmsnorm_args a;
    a.width = c->m->tensors[tensor].cols;
    a.y = seqpar__llama_mat(y, a.width);
    a.x = seqpar__llama_mat(x, a.width);
    a.rstd = rstd;
    a.gain = seqpar__llama_param(c->ctx, c->m, tensor);
    a.rows = c->b->tokens * heads;
    a.eps = c->m->config.rms_eps;
    return c->dev->rmsnorm(c->dev, &a, c->ctx->queue);
}

static seqpar_status seqpar__llama_norm(const seqpar__llama_layer_call *c, void *y, void *x,
                                        void *rstd, int64_t tensor) {
    return seqpar__llama_norm_rows(c, y, x, rstd, tensor, 1);
}

/* pieces: the share's pieces, their local and count in rows of the norm */
static seqpar_status seqpar__llama_norm_rows_grad(const seqpar__llama_layer_call *c, void *dx,
                                                  void *dy, void *x, void *rstd, int64_t tensor,
                                                  int64_t heads, const seqpar_piece *pieces) {
    seqpar_rmsnorm_grad_args a;
    memset(&a, 0, sizeof a);
    a.width = c->m->tensors[tensor].cols;
    if (!c->m->adapters) { /* with adapters the gain is frozen */
        a.fold = seqpar__llama_fold_call(c, tensor);
        a.leaves = pieces;
    }
    a.dx = seqpar__llama_mat(dx, a.width);
    a.dy = seqpar__llama_mat(dy, a.width);
    a.x = seqpar__llama_mat(x, a.width);
    a.rstd = rstd;
    a.gain = seqpar__llama_param(c->ctx, c->m, tensor);
    a.rows = c->b->tokens * heads;
    return c->dev->rmsnorm_grad(c->dev, &a, c->ctx->queue);
}

static seqpar_status seqpar__llama_norm_grad(const seqpar__llama_layer_call *c, void *dx,
                                             void *dy, void *x, void *rstd, int64_t tensor) {
    return seqpar__llama_norm_rows_grad(c, dx, dy, x, rstd, tensor, 1, c->b->share->pieces);
}

static seqpar_status seqpar__llama_rotate(const seqpar__llama_layer_call *c, void *x,
                                          int64_t heads, int inverse) {
    seqpar_rope_args a;
    if (!seqpar__llama_rotates(&c->m->config, c->layer)) return SEQPAR_OK;
    a.x = seqpar__llama_mat(x, heads * c->m->config.head_dim);
    a.cosine = c->m->cosine.data;
    a.sine = c->m->sine.data;
    a.positions = c->b->positions;
    a.rows = c->b->tokens;
    a.heads = heads;
    a.head_dim = c->m->config.head_dim;
    a.inverse = inverse;
    return c->dev->rope(c->dev, &a, c->ctx->queue);
}

static seqpar_status seqpar__llama_swiglu(const seqpar__llama_layer_call *c, void *y,
                                          int gradient) {
    const seqpar_llama_config *f = &c->m->config;
    int sparse = seqpar__llama_is_sparse(f, c->layer);
    seqpar_swiglu_args a;
    a.width = sparse ? f->expert_intermediate : f->intermediate;
    a.rows = c->tile.rows * (sparse ? f->experts_per_token : 1);
    a.y = seqpar__llama_mat(y, a.width);
    a.gate = seqpar__llama_mat(c->gate, a.width);
    a.up = seqpar__llama_mat(c->up, a.width);
    return (gradient ? c->dev->swiglu_grad : c->dev->swiglu)(c->dev, &a, c->ctx->queue);
}

static seqpar_status seqpar__llama_layer_buffer(const seqpar__llama_layer_call *c,
                                                seqpar_buffer *own, seqpar_buffer *shared,
                                                int64_t width, int accumulator, int keep,
                                                void **data) {
    seqpar_buffer *buffer = keep ? own : shared;
    int64_t bytes = c->b->tokens * width *
                    seqpar_dtype_bytes(accumulator ? c->dev->accumulator : c->dev->storage);
    if (!buffer->data)
        SEQPAR__LLAMA_TRY(seqpar_buffer_new(
            c->ctx, buffer, bytes, keep ? SEQPAR_MEM_ACTIVATIONS : SEQPAR_MEM_SCRATCH));
    *data = buffer->data;
    return SEQPAR_OK;
}

/* The inputs of qk_norm; without it they are q and k. */
static seqpar_status seqpar__llama_raw_buffers(seqpar__llama_layer_call *c, int keep) {
    const seqpar_llama_config *f = &c->m->config;
    seqpar_llama_layer *own = &c->b->layers[c->layer], *shared = &c->b->shared;
    int64_t wide = f->heads * f->head_dim, narrow = f->kv_heads * f->head_dim;
    c->raw_q = c->q;
    c->raw_k = c->k;
    if (!f->qk_norm) return SEQPAR_OK;
    SEQPAR__LLAMA_TRY(
        seqpar__llama_layer_buffer(c, &own->raw_q, &shared->raw_q, wide, 0, keep, &c->raw_q));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_layer_buffer(c, &own->raw_k, &shared->raw_k, narrow, 0, keep, &c->raw_k));
    SEQPAR__LLAMA_TRY(seqpar__llama_layer_buffer(c, &own->rstd_q, &shared->rstd_q, f->heads, 1,
                                                 keep, &c->rstd_q));
    return seqpar__llama_layer_buffer(c, &own->rstd_k, &shared->rstd_k, f->kv_heads, 1, keep,
                                      &c->rstd_k);
}

/* gate and up of one tile: scratch that all layers share. */
static seqpar_status seqpar__llama_tile_buffers(seqpar__llama_layer_call *c) {
    seqpar_llama_layer *shared = &c->b->shared;
    int64_t bytes = seqpar__llama_mlp_bytes(c->ctx->device, c->b);
    if (!shared->gate.data)
        SEQPAR__LLAMA_TRY(seqpar_buffer_new(c->ctx, &shared->gate, bytes, SEQPAR_MEM_SCRATCH));
    if (!shared->up.data)
        SEQPAR__LLAMA_TRY(seqpar_buffer_new(c->ctx, &shared->up, bytes, SEQPAR_MEM_SCRATCH));
    c->gate = shared->gate.data;
    c->up = shared->up.data;
    return SEQPAR_OK;
}

static seqpar_status seqpar__llama_mlp_buffers(seqpar__llama_layer_call *c, int keep) {
    const seqpar_llama_config *f = &c->m->config;
    seqpar_llama_layer *own = &c->b->layers[c->layer], *shared = &c->b->shared;
    if (c->b->desc.mlp_rows) return seqpar__llama_tile_buffers(c);
    int sparse = seqpar__llama_is_sparse(f, c->layer);
    /* scratch is shared by layers with and without experts */
    int64_t wide = !keep    ? seqpar__llama_widest(f)
                   : sparse ? f->experts_per_token * f->expert_intermediate
                            : f->intermediate;
    SEQPAR__LLAMA_TRY(
        seqpar__llama_layer_buffer(c, &own->gate, &shared->gate, wide, 0, keep, &c->gate));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_layer_buffer(c, &own->up, &shared->up, wide, 0, keep, &c->up));
    if (!sparse && (keep || !f->experts)) return SEQPAR_OK;
    c->routes = &c->b->routes[keep ? c->layer : 0];
    SEQPAR__LLAMA_TRY(seqpar__llama_layer_buffer(c, &own->probs, &shared->probs, f->experts, 1,
                                                 keep, &c->probs));
    return seqpar__llama_layer_buffer(c, &own->weights, &shared->weights, f->experts_per_token,
                                      1, keep, &c->weights);
}

/* x, out and lse: buffers of the layer, a staging buffer (recompute 2), or scratch. */
static seqpar_status seqpar__llama_saved_buffers(seqpar__llama_layer_call *c, int keep) {
    const seqpar_llama_config *f = &c->m->config;
    seqpar_llama_layer *own = &c->b->layers[c->layer], *shared = &c->b->shared;
    seqpar_llama_staging *staging = c->b->desc.recompute == 2 ? &c->b->staging[c->layer % 2]
                                                              : NULL;
    SEQPAR__LLAMA_TRY(seqpar__llama_layer_buffer(c, staging ? &staging->x : &own->x, &shared->x,
                                                 f->hidden, 0, keep, &c->x));
    SEQPAR__LLAMA_TRY(seqpar__llama_layer_buffer(c, staging ? &staging->out : &own->out,
                                                 &shared->out, f->heads * f->head_dim, 0, keep,
                                                 &c->out));
    return seqpar__llama_layer_buffer(c, staging ? &staging->lse : &own->lse, &shared->lse,
                                      f->heads, 1, keep, &c->lse);
}

/* Selects the layer's buffers. keep 1: it has its own for all that backward reads; with
   recompute, only for x, out and lse. keep 0: it has none. All other buffers are scratch that
   the layers share. */
static seqpar_status seqpar__llama_layer_call_open(seqpar__llama_layer_call *c, int keep) {
    const seqpar_llama_config *f = &c->m->config;
    seqpar_llama_layer *own = &c->b->layers[c->layer], *shared = &c->b->shared;
    int all = keep && !c->b->desc.recompute;
    int64_t wide = f->heads * f->head_dim, narrow = f->kv_heads * f->head_dim;
    SEQPAR__LLAMA_TRY(seqpar__llama_saved_buffers(c, keep));
    SEQPAR__LLAMA_TRY(seqpar__llama_layer_buffer(c, &own->q, &shared->q, wide, 0, all, &c->q));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_layer_buffer(c, &own->k, &shared->k, narrow, 0, all, &c->k));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_layer_buffer(c, &own->v, &shared->v, narrow, 0, all, &c->v));
    SEQPAR__LLAMA_TRY(seqpar__llama_raw_buffers(c, all));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_layer_buffer(c, &own->x2, &shared->x2, f->hidden, 0, all, &c->x2));
    SEQPAR__LLAMA_TRY(seqpar__llama_mlp_buffers(c, all));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_layer_buffer(c, &own->rstd1, &shared->rstd1, 1, 1, all, &c->rstd1));
    return seqpar__llama_layer_buffer(c, &own->rstd2, &shared->rstd2, 1, 1, all, &c->rstd2);
}

static int64_t seqpar__llama_hidden_bytes(const seqpar__llama_layer_call *c) {
    return c->b->tokens * c->m->config.hidden * seqpar_dtype_bytes(c->dev->storage);
}

static seqpar_attn_io seqpar__llama_attention_io(const seqpar__llama_layer_call *c) {
    seqpar_attn_io io;
    memset(&io, 0, sizeof io);
    io.q = c->q;
    io.k = c->k;
    io.v = c->v;
    io.out = c->out;
    io.lse = c->lse;
    io.dropout_seed = c->b->desc.dropout_seed;
    io.dropout_stream = (uint64_t)(c->b->desc.dropout_step * c->m->config.layers + c->layer);
    return io;
}

static seqpar_status seqpar__llama_sampler_attend(const seqpar__llama_layer_call *c);

static seqpar_status seqpar__llama_qk_norm(const seqpar__llama_layer_call *c) {
    const seqpar_llama_config *f = &c->m->config;
    if (!f->qk_norm) return SEQPAR_OK;
    SEQPAR__LLAMA_TRY(seqpar__llama_norm_rows(c, c->q, c->raw_q, c->rstd_q,
                                              seqpar__llama_part_of(c, SEQPAR__LLAMA_Q_NORM),
                                              f->heads));
    return seqpar__llama_norm_rows(c, c->k, c->raw_k, c->rstd_k,
                                   seqpar__llama_part_of(c, SEQPAR__LLAMA_K_NORM), f->kv_heads);
}

/* x to q, k and v */
static seqpar_status seqpar__llama_qkv(const seqpar__llama_layer_call *c) {
    const seqpar_llama_config *f = &c->m->config;
    void *n = c->b->n.data;
    SEQPAR__LLAMA_TRY(seqpar__llama_norm(c, n, c->x, c->rstd1,
                                         seqpar__llama_part_of(c, SEQPAR__LLAMA_NORM1)));
    SEQPAR__LLAMA_TRY(seqpar__llama_project(c, c->raw_q, n, SEQPAR__LLAMA_Q, 0));
    SEQPAR__LLAMA_TRY(seqpar__llama_project(c, c->raw_k, n, SEQPAR__LLAMA_K, 0));
    SEQPAR__LLAMA_TRY(seqpar__llama_project(c, c->v, n, SEQPAR__LLAMA_V, 0));
    SEQPAR__LLAMA_TRY(seqpar__llama_qk_norm(c));
    SEQPAR__LLAMA_TRY(seqpar__llama_rotate(c, c->q, f->heads, 0));
    return seqpar__llama_rotate(c, c->k, f->kv_heads, 0);
}

static seqpar_attn *seqpar__llama_attention(const seqpar__llama_layer_call *c) {
    return seqpar__llama_is_windowed(&c->m->config, c->layer) ? c->b->windowed : c->b->attn;
}

/* ---- experts ---- */

/* Sorts pairs by expert, then by token; a token has an expert at most once. */
static void seqpar__llama_sort_slots(const seqpar__llama_layer_call *c) {
    const seqpar_llama_config *f = &c->m->config;
    seqpar_llama_routes *r = c->routes;
    int64_t pairs = c->b->tokens * f->experts_per_token;
    for (int64_t e = 0; e <= f->experts; e++) r->begin[e] = 0;
    for (int64_t p = 0; p < pairs; p++) r->begin[r->ids[p] + 1]++;
    for (int64_t e = 0; e < f->experts; e++) r->begin[e + 1] += r->begin[e];
    for (int64_t p = 0; p < pairs; p++) {
        int64_t slot = r->begin[r->ids[p]]++;
        r->slot_of[p] = (int32_t)slot;
        r->pair_of[slot] = (int32_t)p;
        r->token_of[slot] = (int32_t)(p / f->experts_per_token);
    }
    for (int64_t e = f->experts; e > 0; e--) r->begin[e] = r->begin[e - 1];
    r->begin[0] = 0;
}

/* Adds this layer's counts to those of the layers before it in this pass. */
static void seqpar__llama_count_chosen(const seqpar__llama_layer_call *c) {
    for (int64_t e = 0; e < c->m->config.experts; e++)
        c->b->chosen[e] += c->routes->begin[e + 1] - c->routes->begin[e];
}

/* seqpar__llama_linear for slots: each row by the matrix of its slot's expert. */
static seqpar_status seqpar__llama_experts_linear(const seqpar__llama_layer_call *c, void *y,
                                                  void *x, int matrix, int transposed,
                                                  int accumulate) {
    int64_t size = c->dev->storage;
    for (int64_t e = 0; e < c->m->config.experts; e++) {
        int64_t number = seqpar__llama_expert(c->m, c->layer, e, matrix);
        const seqpar_tensor *t = &c->m->tensors[number];
        int64_t first = c->routes->begin[e];
        seqpar_matmul_args a;
        a.rows = c->routes->begin[e + 1] - first;
        if (!a.rows) continue;
        a.out = transposed ? t->cols : t->rows;
        a.in = transposed ? t->rows : t->cols;
        a.y = seqpar__llama_mat(seqpar__llama_at(y, first * a.out, (int)size), a.out);
        a.x = seqpar__llama_mat(seqpar__llama_at(x, first * a.in, (int)size), a.in);
        a.w = seqpar__llama_mat(seqpar__llama_param(c->ctx, c->m, number), t->cols);
        a.transposed = transposed;
        a.accumulate = accumulate;
        SEQPAR__LLAMA_TRY(c->dev->matmul(c->dev, &a, c->ctx->queue));
    }
    return SEQPAR_OK;
}

/* The expert's first slot whose token is `token` or later. */
static int64_t seqpar__llama_slot_from(const seqpar_llama_routes *r, int64_t expert,
                                       int64_t token) {
    int64_t low = r->begin[expert], high = r->begin[expert + 1];
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (r->token_of[middle] < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The share's pieces, cut to the expert's slots; a piece may be empty. */
static void seqpar__llama_expert_leaves(const seqpar__llama_layer_call *c, int64_t expert) {
    const seqpar_share *share = c->b->share;
    for (int64_t i = 0; i < share->count; i++) {
        seqpar_piece *p = &c->b->expert_pieces[i];
        *p = share->pieces[i];
        p->local = seqpar__llama_slot_from(c->routes, expert, share->pieces[i].local);
        p->count = seqpar__llama_slot_from(c->routes, expert,
                                           share->pieces[i].local + share->pieces[i].count) -
                   p->local;
    }
}

static seqpar_status seqpar__llama_experts_grad(const seqpar__llama_layer_call *c, void *dy,
                                                void *x, int matrix) {
    /* with adapters the experts are frozen */
    int64_t learning = c->m->adapters ? 0 : c->m->config.experts;
    for (int64_t e = 0; e < learning; e++) {
        int64_t number = seqpar__llama_expert(c->m, c->layer, e, matrix);
        const seqpar_tensor *t = &c->m->tensors[number];
        seqpar_weight_grad_args a;
        seqpar__llama_expert_leaves(c, e);
        a.fold = seqpar__llama_fold_call(c, number);
        a.leaves = c->b->expert_pieces;
        a.dy = seqpar__llama_mat(dy, t->rows);
        a.x = seqpar__llama_mat(x, t->cols);
        a.out = t->rows;
        a.in = t->cols;
        SEQPAR__LLAMA_TRY(c->dev->weight_grad(c->dev, &a, c->ctx->queue));
    }
    return SEQPAR_OK;
}

/* y[r] = sum of `terms` rows x[from[r, i]], each times weights[at[r, i]]; at NULL: times
   weights[r, i]; weights NULL: times 1. */
static seqpar_status seqpar__llama_mix(const seqpar__llama_layer_call *c, void *y, void *x,
                                       int64_t terms, int64_t width, const int32_t *from,
                                       const int32_t *at, const void *weights, int accumulate) {
    seqpar_mix_args a;
    a.y = seqpar__llama_mat(y, width);
    a.x = seqpar__llama_mat(x, width);
    a.rows = c->b->tokens * c->m->config.experts_per_token / terms;
    a.terms = terms;
    a.width = width;
    a.from = from;
    a.at = at;
    a.weights = weights;
    a.accumulate = accumulate;
    return c->dev->mix(c->dev, &a, c->ctx->queue);
}

/* x[r] = table[ids[r]], (rows, hidden) */
static seqpar_status seqpar__llama_gather_rows(const seqpar__llama_layer_call *c, void *x,
                                               void *table, const int32_t *ids, int64_t rows) {
    seqpar_embedding_args e;
    e.x = seqpar__llama_mat(x, c->m->config.hidden);
    e.table = seqpar__llama_mat(table, c->m->config.hidden);
    e.ids = ids;
    e.rows = rows;
    e.width = c->m->config.hidden;
    return c->dev->embedding(c->dev, &e, c->ctx->queue);
}

/* Computes gate and up (slots, expert_intermediate) from n (tokens, hidden). */
static seqpar_status seqpar__llama_to_experts(const seqpar__llama_layer_call *c, void *n) {
    const seqpar_llama_config *f = &c->m->config;
    seqpar_route_args a;
    void *in = c->b->slots_in.data;
    a.logits = seqpar__llama_mat(c->b->router.data, f->experts);
    a.rows = c->b->tokens;
    a.experts = f->experts;
    a.chosen = f->experts_per_token;
    a.normed = f->topk_norm;
    a.probs = c->probs;
    a.weights = c->weights;
    a.ids = c->routes->ids;
    SEQPAR__LLAMA_TRY(seqpar__llama_project(c, c->b->router.data, n, SEQPAR__LLAMA_ROUTER, 0));
    SEQPAR__LLAMA_TRY(c->dev->route(c->dev, &a, c->ctx->queue));
    seqpar__llama_sort_slots(c);
    SEQPAR__LLAMA_TRY(seqpar__llama_gather_rows(c, in, n, c->routes->token_of,
                                                a.rows * f->experts_per_token));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_experts_linear(c, c->gate, in, SEQPAR__LLAMA_EXPERT_GATE, 0, 0));
    return seqpar__llama_experts_linear(c, c->up, in, SEQPAR__LLAMA_EXPERT_UP, 0, 0);
}

/* batch->x += the experts' down projections of batch->wide, each times its weight. */
static seqpar_status seqpar__llama_from_experts(const seqpar__llama_layer_call *c) {
    const seqpar_llama_config *f = &c->m->config;
    void *out = c->b->slots_out.data;
    SEQPAR__LLAMA_TRY(
        seqpar__llama_experts_linear(c, out, c->b->wide.data, SEQPAR__LLAMA_EXPERT_DOWN, 0, 0));
    return seqpar__llama_mix(c, c->b->x.data, out, f->experts_per_token, f->hidden,
                             c->routes->slot_of, NULL, c->weights, 1);
}

/* Backward through the weighted sum and the down projections. dwide = dx W_down is first computed
   without the weight, because its dot product with wide is the weight's derivative; then it is
   multiplied by the weight. slots_out = weight dx, for the gradient of W_down. */
static seqpar_status seqpar__llama_from_experts_backward(const seqpar__llama_layer_call *c,
                                                         void *dx) {
    const seqpar_llama_config *f = &c->m->config;
    const seqpar_llama_routes *r = c->routes;
    void *out = c->b->slots_out.data, *wide = c->b->wide.data, *dwide = c->b->slots_wide.data;
    seqpar_dots_args a;
    a.rows = c->b->tokens * f->experts_per_token;
    a.width = f->expert_intermediate;
    a.a = seqpar__llama_mat(wide, a.width);
    a.b = seqpar__llama_mat(dwide, a.width);
    a.to = r->pair_of;
    a.out = c->b->dweights.data;
    SEQPAR__LLAMA_TRY(seqpar__llama_gather_rows(c, out, dx, r->token_of, a.rows));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_experts_linear(c, dwide, out, SEQPAR__LLAMA_EXPERT_DOWN, 1, 0));
    SEQPAR__LLAMA_TRY(seqpar__llama_swiglu(c, wide, 0));
    SEQPAR__LLAMA_TRY(c->dev->dots(c->dev, &a, c->ctx->queue));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_mix(c, dwide, dwide, 1, a.width, c->b->self, r->pair_of, c->weights, 0));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_mix(c, out, dx, 1, f->hidden, r->token_of, r->pair_of, c->weights, 0));
    return seqpar__llama_experts_grad(c, out, wide, SEQPAR__LLAMA_EXPERT_DOWN);
}

/* Backward to dn (tokens, hidden) from the gradients that c->gate and c->up now hold. */
static seqpar_status seqpar__llama_to_experts_backward(const seqpar__llama_layer_call *c,
                                                       void *n, void *dn) {
    const seqpar_llama_config *f = &c->m->config;
    void *in = c->b->slots_in.data, *out = c->b->slots_out.data;
    SEQPAR__LLAMA_TRY(seqpar__llama_gather_rows(c, in, n, c->routes->token_of,
                                                c->b->tokens * f->experts_per_token));
    SEQPAR__LLAMA_TRY(seqpar__llama_experts_grad(c, c->gate, in, SEQPAR__LLAMA_EXPERT_GATE));
    SEQPAR__LLAMA_TRY(seqpar__llama_experts_grad(c, c->up, in, SEQPAR__LLAMA_EXPERT_UP));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_experts_linear(c, out, c->gate, SEQPAR__LLAMA_EXPERT_GATE, 1, 0));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_experts_linear(c, out, c->up, SEQPAR__LLAMA_EXPERT_UP, 1, 1));
    return seqpar__llama_mix(c, dn, out, f->experts_per_token, f->hidden, c->routes->slot_of,
                             NULL, NULL, 0);
}

/* dn += the gradient through the router */
static seqpar_status seqpar__llama_route_backward(const seqpar__llama_layer_call *c, void *n,
                                                  void *dn) {
    const seqpar_llama_config *f = &c->m->config;
    seqpar_route_grad_args a;
    void *dlogits = c->b->router.data;
    a.dlogits = seqpar__llama_mat(dlogits, f->experts);
    a.rows = c->b->tokens;
    a.experts = f->experts;
    a.chosen = f->experts_per_token;
    a.normed = f->topk_norm;
    a.probs = c->probs;
    a.weights = c->weights;
    a.dweights = c->b->dweights.data;
    a.ids = c->routes->ids;
    a.balance = c->b->balance;
    a.loss = c->b->balance ? c->b->balance_loss.data : NULL;
    SEQPAR__LLAMA_TRY(c->dev->route_grad(c->dev, &a, c->ctx->queue));
    SEQPAR__LLAMA_TRY(seqpar__llama_project_grad(c, dlogits, n, SEQPAR__LLAMA_ROUTER));
    return seqpar__llama_linear(c, dn, dlogits, seqpar__llama_part_of(c, SEQPAR__LLAMA_ROUTER),
                                1, 1);
}

/* seqpar__llama_mlp_backward for a layer with experts */
static seqpar_status seqpar__llama_experts_backward(const seqpar__llama_layer_call *c, void *dx,
                                                    void *dn) {
    int64_t norm = seqpar__llama_part_of(c, SEQPAR__LLAMA_NORM2);
    void *n = c->b->n.data;
    SEQPAR__LLAMA_TRY(seqpar__llama_from_experts_backward(c, dx));
    /* gate and up become their gradients */
    SEQPAR__LLAMA_TRY(seqpar__llama_swiglu(c, c->b->slots_wide.data, 1));
    SEQPAR__LLAMA_TRY(seqpar__llama_norm(c, n, c->x2, NULL, norm));
    SEQPAR__LLAMA_TRY(seqpar__llama_to_experts_backward(c, n, dn));
    SEQPAR__LLAMA_TRY(seqpar__llama_route_backward(c, n, dn));
    return seqpar__llama_norm_grad(c, dx, dn, c->x2, c->rstd2, norm);
}

/* ---- the whole layer ---- */

/* The address of the tile's first row in data (tokens, width). */
static void *seqpar__llama_rows(const seqpar__llama_layer_call *c, void *data, int64_t width) {
    return seqpar__llama_at(data, c->tile.first * width, c->dev->storage);
}

static seqpar_status seqpar__llama_gate_up(const seqpar__llama_layer_call *c) {
    void *n = seqpar__llama_rows(c, c->b->n.data, c->m->config.hidden);
    SEQPAR__LLAMA_TRY(seqpar__llama_project(c, c->gate, n, SEQPAR__LLAMA_GATE, 0));
    return seqpar__llama_project(c, c->up, n, SEQPAR__LLAMA_UP, 0);
}

/* Computes gate and up from x; with mlp_rows only the MLP's input n, since each tile computes
   its gate and up. attend 0: out and lse are stored, so attention is not computed again. */
static seqpar_status seqpar__llama_layer_inner(const seqpar__llama_layer_call *c, int attend) {
    void *n = c->b->n.data;
    SEQPAR__LLAMA_TRY(seqpar__llama_qkv(c));
    if (attend && c->sampler)
        SEQPAR__LLAMA_TRY(seqpar__llama_sampler_attend(c));
    else if (attend) {
        seqpar_attn_io io = seqpar__llama_attention_io(c);
        SEQPAR__LLAMA_TRY(seqpar_attn_forward(c->ctx, seqpar__llama_attention(c), &io));
    }
    c->dev->copy(c->dev, c->x2, c->x, seqpar__llama_hidden_bytes(c), c->ctx->queue);
    SEQPAR__LLAMA_TRY(seqpar__llama_project(c, c->x2, c->out, SEQPAR__LLAMA_O, 1));
    SEQPAR__LLAMA_TRY(seqpar__llama_norm(c, n, c->x2, c->rstd2,
                                         seqpar__llama_part_of(c, SEQPAR__LLAMA_NORM2)));
    if (seqpar__llama_is_sparse(&c->m->config, c->layer)) return seqpar__llama_to_experts(c, n);
    return c->b->desc.mlp_rows ? SEQPAR_OK : seqpar__llama_gate_up(c);
}

/* x += swiglu(n Wgate^T, n Wup^T) Wdown^T */
static seqpar_status seqpar__llama_mlp_tile(const seqpar__llama_layer_call *c) {
    void *wide = c->b->wide.data;
    void *x = seqpar__llama_rows(c, c->b->x.data, c->m->config.hidden);
    if (c->b->desc.mlp_rows) SEQPAR__LLAMA_TRY(seqpar__llama_gate_up(c));
    SEQPAR__LLAMA_TRY(seqpar__llama_swiglu(c, wide, 0));
    return seqpar__llama_project(c, x, wide, SEQPAR__LLAMA_DOWN, 1);
}

/* A row's result does not depend on other rows, so tiles may begin anywhere. */
static seqpar_status seqpar__llama_mlp_forward(const seqpar__llama_layer_call *c) {
    int64_t most = seqpar__llama_mlp_rows(c->dev, c->b);
    seqpar__llama_layer_call t = *c;
    for (int64_t first = 0; first < c->tile.rows; first += most) {
        t.tile.first = first;
        t.tile.rows = SEQPAR__LLAMA_MIN(most, c->tile.rows - first);
        SEQPAR__LLAMA_TRY(seqpar__llama_mlp_tile(&t));
    }
    return SEQPAR_OK;
}

static seqpar_status seqpar__llama_layer_forward(seqpar__llama_layer_call *c, int keep) {
    SEQPAR__LLAMA_TRY(seqpar__llama_layer_call_open(c, keep));
    c->dev->copy(c->dev, c->x, c->b->x.data, seqpar__llama_hidden_bytes(c), c->ctx->queue);
    SEQPAR__LLAMA_TRY(seqpar__llama_layer_inner(c, 1));
    c->dev->copy(c->dev, c->b->x.data, c->x2, seqpar__llama_hidden_bytes(c), c->ctx->queue);
    if (!seqpar__llama_is_sparse(&c->m->config, c->layer)) return seqpar__llama_mlp_forward(c);
    SEQPAR__LLAMA_TRY(seqpar__llama_swiglu(c, c->b->wide.data, 0));
    seqpar__llama_count_chosen(c);
    return seqpar__llama_from_experts(c);
}

typedef struct seqpar__llama_mlp_call {
    const seqpar__llama_layer_call *layer;
    void *dx, *dn; /* (tokens, hidden) */
} seqpar__llama_mlp_call;

/* One tile: dn from n and dx, and the gradients of the three matrices. */
static seqpar_status seqpar__llama_mlp_tile_backward(void *user,
                                                     const seqpar_token_tile *tile) {
    const seqpar__llama_mlp_call *call = (const seqpar__llama_mlp_call *)user;
    seqpar__llama_layer_call own = *call->layer, *c = &own;
    int64_t hidden = c->m->config.hidden;
    void *wide = c->b->wide.data, *n, *dx, *dn;
    c->tile = *tile;
    n = seqpar__llama_rows(c, c->b->n.data, hidden);
    dx = seqpar__llama_rows(c, call->dx, hidden);
    dn = seqpar__llama_rows(c, call->dn, hidden);
    if (c->b->desc.mlp_rows) SEQPAR__LLAMA_TRY(seqpar__llama_gate_up(c));
    SEQPAR__LLAMA_TRY(seqpar__llama_swiglu(c, wide, 0));
    SEQPAR__LLAMA_TRY(seqpar__llama_project_grad(c, dx, wide, SEQPAR__LLAMA_DOWN));
    SEQPAR__LLAMA_TRY(seqpar__llama_project_back(c, wide, dx, SEQPAR__LLAMA_DOWN, 0));
    /* gate and up become their gradients */
    SEQPAR__LLAMA_TRY(seqpar__llama_swiglu(c, wide, 1));
    SEQPAR__LLAMA_TRY(seqpar__llama_project_grad(c, c->gate, n, SEQPAR__LLAMA_GATE));
    SEQPAR__LLAMA_TRY(seqpar__llama_project_grad(c, c->up, n, SEQPAR__LLAMA_UP));
    SEQPAR__LLAMA_TRY(seqpar__llama_project_back(c, dn, c->gate, SEQPAR__LLAMA_GATE, 0));
    return seqpar__llama_project_back(c, dn, c->up, SEQPAR__LLAMA_UP, 1);
}

/* Backward of x = x2 + mlp(norm2(x2)); dx, the gradient of the residual stream, is updated in
   place. */
static seqpar_status seqpar__llama_mlp_backward(const seqpar__llama_layer_call *c, void *dx,
                                                void *dn) {
    int64_t norm = seqpar__llama_part_of(c, SEQPAR__LLAMA_NORM2);
    const seqpar_llama_batch *b = c->b;
    seqpar__llama_mlp_call call;
    if (seqpar__llama_is_sparse(&c->m->config, c->layer))
        return seqpar__llama_experts_backward(c, dx, dn);
    call.layer = c;
    call.dx = dx;
    call.dn = dn;
    SEQPAR__LLAMA_TRY(seqpar__llama_norm(c, b->n.data, c->x2, NULL, norm));
    SEQPAR__LLAMA_TRY(b->desc.mlp_rows
                          ? seqpar_token_tiles(c->ctx->error, b->share, c->fold,
                                               b->desc.mlp_rows, c->dev->sum_step,
                                               seqpar__llama_mlp_tile_backward, &call)
                          : seqpar__llama_mlp_tile_backward(&call, &c->tile));
    return seqpar__llama_norm_grad(c, dx, dn, c->x2, c->rstd2, norm);
}

typedef struct seqpar__llama_layer_gradients {
    seqpar_buffer dx, dn, dq, dk, dv, dout;
} seqpar__llama_layer_gradients;

/* Backward of qk_norm: dq and dk become the gradients of its inputs; dout is scratch. */
static seqpar_status seqpar__llama_qk_norm_backward(const seqpar__llama_layer_call *c,
                                                    seqpar__llama_layer_gradients *g) {
    const seqpar_llama_config *f = &c->m->config;
    seqpar_buffer swapped;
    if (!f->qk_norm) return SEQPAR_OK;
    c->dev->zero(c->dev, g->dout.data, g->dout.bytes, c->ctx->queue);
    SEQPAR__LLAMA_TRY(seqpar__llama_norm_rows_grad(
        c, g->dout.data, g->dq.data, c->raw_q, c->rstd_q,
        seqpar__llama_part_of(c, SEQPAR__LLAMA_Q_NORM), f->heads, c->b->head_pieces));
    swapped = g->dq;
    g->dq = g->dout;
    g->dout = swapped;
    c->dev->zero(c->dev, g->dout.data, g->dk.bytes, c->ctx->queue);
    SEQPAR__LLAMA_TRY(seqpar__llama_norm_rows_grad(
        c, g->dout.data, g->dk.data, c->raw_k, c->rstd_k,
        seqpar__llama_part_of(c, SEQPAR__LLAMA_K_NORM), f->kv_heads, c->b->kv_head_pieces));
    c->dev->copy(c->dev, g->dk.data, g->dout.data, g->dk.bytes, c->ctx->queue);
    return SEQPAR_OK;
}

/* Computes dq, dk, dv, the gradients of the projections' outputs, from g->dx. */
static seqpar_status seqpar__llama_attend_backward(const seqpar__llama_layer_call *c,
                                                   seqpar__llama_layer_gradients *g) {
    const seqpar_llama_config *f = &c->m->config;
    seqpar_attn_io io = seqpar__llama_attention_io(c);
    SEQPAR__LLAMA_TRY(seqpar__llama_project_grad(c, g->dx.data, c->out, SEQPAR__LLAMA_O));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_project_back(c, g->dout.data, g->dx.data, SEQPAR__LLAMA_O, 0));
    io.dout = g->dout.data;
    io.dq = g->dq.data;
    io.dk = g->dk.data;
    io.dv = g->dv.data;
    SEQPAR__LLAMA_TRY(seqpar_attn_backward(c->ctx, seqpar__llama_attention(c), &io));
    SEQPAR__LLAMA_TRY(seqpar__llama_rotate(c, g->dq.data, f->heads, 1));
    SEQPAR__LLAMA_TRY(seqpar__llama_rotate(c, g->dk.data, f->kv_heads, 1));
    return seqpar__llama_qk_norm_backward(c, g);
}

/* Backward of x2 = x + attention(norm1(x)) Wo^T. */
static seqpar_status seqpar__llama_attention_backward(const seqpar__llama_layer_call *c,
                                                      seqpar__llama_layer_gradients *g) {
    int64_t norm = seqpar__llama_part_of(c, SEQPAR__LLAMA_NORM1);
    void *n = c->b->n.data;
    SEQPAR__LLAMA_TRY(seqpar__llama_attend_backward(c, g));
    SEQPAR__LLAMA_TRY(seqpar__llama_norm(c, n, c->x, NULL, norm));
    SEQPAR__LLAMA_TRY(seqpar__llama_project_grad(c, g->dq.data, n, SEQPAR__LLAMA_Q));
    SEQPAR__LLAMA_TRY(seqpar__llama_project_grad(c, g->dk.data, n, SEQPAR__LLAMA_K));
    SEQPAR__LLAMA_TRY(seqpar__llama_project_grad(c, g->dv.data, n, SEQPAR__LLAMA_V));
    if (c->m->adapters && c->layer == 0)
        return SEQPAR_OK; /* no parameter below this layer is trained */
    SEQPAR__LLAMA_TRY(
        seqpar__llama_project_back(c, g->dn.data, g->dq.data, SEQPAR__LLAMA_Q, 0));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_project_back(c, g->dn.data, g->dk.data, SEQPAR__LLAMA_K, 1));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_project_back(c, g->dn.data, g->dv.data, SEQPAR__LLAMA_V, 1));
    return seqpar__llama_norm_grad(c, g->dx.data, g->dn.data, c->x, c->rstd1, norm);
}

/* ---- >>model  all layers, head and embedding ---- */

static seqpar__llama_layer_call seqpar__llama_call(seqpar_ctx *ctx, const seqpar_llama *m,
                                                   seqpar_llama_batch *b) {
    seqpar__llama_layer_call c;
    memset(&c, 0, sizeof c);
    c.ctx = ctx;
    c.dev = ctx->device;
    c.m = m;
    c.b = b;
    c.tile.rows = b->tokens;
    return c;
}

/* The tile of all tokens. */
static seqpar_token_tile seqpar__llama_whole(const seqpar_llama_batch *b,
                                             const seqpar_token_fold *fold) {
    seqpar_token_tile all;
    all.first = 0;
    all.rows = b->tokens;
    all.program = fold->program;
    all.program_count = fold->program_count;
    all.depth = fold->depth;
    all.leaves = b->share->pieces;
    return all;
}

/* ---- recompute 2: store a layer in the second pool, fetch it in backward ---- */

static int64_t seqpar__llama_offloaded_bytes(const seqpar_llama_batch *b,
                                             const seqpar_device *d) {
    const seqpar_llama_config *f = &b->config;
    return b->tokens * ((f->hidden + f->heads * f->head_dim) * seqpar_dtype_bytes(d->storage) +
                        f->heads * seqpar_dtype_bytes(d->accumulator));
}

/* Memory for all layers but the last two: backward begins with those, in the staging buffers. */
static seqpar_status seqpar__llama_offloaded_open(seqpar_ctx *ctx, seqpar_llama *m,
                                                  seqpar_llama_batch *b) {
    int64_t layers = SEQPAR__LLAMA_MAX(m->config.layers - 2, 0);
    int64_t bytes = layers * seqpar__llama_offloaded_bytes(b, ctx->device);
    if (b->desc.recompute < 2 || b->offloaded.data) return SEQPAR_OK;
    if (m->offloaded.bytes >= bytes) {
        b->offloaded = m->offloaded;
        memset(&m->offloaded, 0, sizeof m->offloaded);
        return SEQPAR_OK;
    }
    seqpar_buffer_free(ctx, &m->offloaded);
    return seqpar_buffer_new(ctx, &b->offloaded, bytes, SEQPAR_MEM_OFFLOADED);
}

/* Moves (x, out, lse) of a layer from its staging buffer to the pool (leaves 1), or back. */
static void seqpar__llama_move(const seqpar__llama_layer_call *c, seqpar_llama_staging *staging,
                               int64_t layer, int leaves) {
    const seqpar_buffer *parts[] = {&staging->x, &staging->out, &staging->lse};
    char *offloaded = (char *)c->b->offloaded.data +
                      layer * seqpar__llama_offloaded_bytes(c->b, c->dev);
    if (!staging->x.bytes) return; /* no tokens */
    staging->layer = layer;
    for (int i = 0; i < 3; i++) {
        void *here = parts[i]->data;
        staging->moves = c->dev->move(c->dev, leaves ? offloaded : here,
                                      leaves ? here : offloaded, parts[i]->bytes,
                                      c->ctx->queue);
        offloaded += parts[i]->bytes;
    }
}

/* Before a layer's forward pass: waits until the layer before it in the buffer is stored. */
static void seqpar__llama_staging_begin(const seqpar__llama_layer_call *c, int keep) {
    seqpar_llama_staging *staging = &c->b->staging[c->layer % 2];
    if (!keep || c->b->desc.recompute < 2) return;
    seqpar__llama_staging_wait(c->ctx, staging);
    staging->layer = c->layer;
}

static void seqpar__llama_staging_end(const seqpar__llama_layer_call *c, int keep) {
    if (keep && c->b->desc.recompute == 2 && c->layer + 2 < c->m->config.layers)
        seqpar__llama_move(c, &c->b->staging[c->layer % 2], c->layer, 1);
}

/* In backward: starts loading the layer below and waits for this one. */
static void seqpar__llama_staging_fetch(const seqpar__llama_layer_call *c) {
    seqpar_llama_staging *here = &c->b->staging[c->layer % 2],
                         *next = &c->b->staging[(c->layer + 1) % 2];
    if (c->b->desc.recompute < 2) return;
    if (here->layer != c->layer) seqpar__llama_move(c, here, c->layer, 0);
    if (c->layer > 0 && next->layer != c->layer - 1)
        seqpar__llama_move(c, next, c->layer - 1, 0);
    seqpar__llama_staging_wait(c->ctx, here);
}

/* Computes batch->x, the last layer's output, from batch->ids. */
static seqpar_status seqpar__llama_layers(seqpar__llama_layer_call *c, int keep) {
    SEQPAR__LLAMA_TRY(seqpar__llama_use(c->ctx, c->m, 0, 1));
    SEQPAR__LLAMA_TRY(seqpar__llama_gather_rows(
        c, c->b->x.data, seqpar__llama_param(c->ctx, c->m, 0), c->b->ids, c->b->tokens));
    for (c->layer = 0; c->layer < c->m->config.layers; c->layer++) {
        SEQPAR__LLAMA_TRY(seqpar__llama_use(c->ctx, c->m, c->layer + 1, c->layer + 2));
        seqpar__llama_staging_begin(c, keep);
        SEQPAR__LLAMA_TRY(seqpar__llama_layer_forward(c, keep));
        seqpar__llama_staging_end(c, keep);
    }
    return SEQPAR_OK;
}

/* ids to the final norm's output in batch->hidden */
static seqpar_status seqpar__llama_to_hidden(seqpar__llama_layer_call *c, int keep) {
    SEQPAR__LLAMA_TRY(seqpar__llama_layers(c, keep));
    SEQPAR__LLAMA_TRY(seqpar__llama_use(c->ctx, c->m, c->m->config.layers + 1, -1));
    return seqpar__llama_norm(c, c->b->hidden.data, c->b->x.data, c->b->rstd.data,
                              seqpar__llama_final_norm(c->m));
}

/* Refuses a batch of a model of another shape: its buffers have other sizes. */
static seqpar_status seqpar__llama_check_model(seqpar_error *error, const seqpar_llama *m,
                                               const seqpar_llama_batch *b) {
    SEQPAR__LLAMA_TRY(seqpar__llama_check_adapters(error, m));
    return seqpar__llama_check_same(error, "batch was", &b->config, &m->config);
}

SEQPAR_DEF seqpar_status seqpar_llama_forward(seqpar_ctx *ctx, seqpar_llama *m,
                                              seqpar_llama_batch *b, int keep) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, model, batch", ctx, m, b);
    seqpar__llama_layer_call c = seqpar__llama_call(ctx, m, b);
    SEQPAR__LLAMA_TRY(seqpar__llama_check_model(ctx->error, m, b));
    /* m has no tables if the batch was opened with another model of the same shape */
    SEQPAR__LLAMA_TRY(seqpar__llama_rope_tables(ctx, m, b->longest));
    SEQPAR__LLAMA_TRY(seqpar__llama_adapted_scratch(ctx, m, b));
    if (keep) SEQPAR__LLAMA_TRY(seqpar__llama_offloaded_open(ctx, m, b));
    b->has = SEQPAR__LLAMA_HAS_NOTHING;
    for (int64_t e = 0; e < m->config.experts; e++) b->chosen[e] = 0;
    SEQPAR__LLAMA_TRY(seqpar__llama_release(ctx, m, seqpar__llama_to_hidden(&c, keep)));
    b->has = keep ? SEQPAR__LLAMA_HAS_ACTIVATIONS : SEQPAR__LLAMA_HAS_HIDDEN;
    return SEQPAR_OK;
}

static seqpar_status seqpar__llama_check_forward(seqpar_error *error, const seqpar_llama *m,
                                                 const seqpar_llama_batch *b) {
    SEQPAR__LLAMA_TRY(seqpar__llama_check_model(error, m, b));
    return b->has
               ? SEQPAR_OK
               : seqpar_fail(error, SEQPAR_ERR_STEP,
                             "the batch has no hidden states; call seqpar_llama_forward first");
}

static seqpar_status seqpar__llama_use_head(seqpar_ctx *ctx, const seqpar_llama *m,
                                            int64_t next) {
    return seqpar__llama_use(ctx, m, m->tensors[seqpar__llama_head(m)].group, next);
}

/* the teacher and the choices that a seqpar_vocab_io points to */
typedef struct seqpar__llama_vocab_extra {
    seqpar_vocab_teacher from;
    seqpar_vocab_choices choices;
} seqpar__llama_vocab_extra;

/* The arguments of the vocabulary projection; *extra must outlive them. */
static seqpar_vocab_io seqpar__llama_vocab_io(seqpar_ctx *ctx, const seqpar_llama *m,
                                              const seqpar_llama_batch *b,
                                              seqpar__llama_vocab_extra *extra) {
    seqpar_vocab_io io;
    seqpar_vocab_teacher *from = &extra->from;
    memset(&io, 0, sizeof io);
    io.best = b->best;
    io.hidden = b->hidden.data;
    io.table = seqpar__llama_param(ctx, m, seqpar__llama_head(m));
    io.targets = b->targets;
    io.tokens = b->tokens;
    if (b->choices) {
        memcpy(extra->choices.ids, b->choices->ids, sizeof extra->choices.ids);
        extra->choices.count = b->choices->count;
        extra->choices.logq = b->logq.data;
        extra->choices.dlogq = b->choices->dlogq;
        io.choices = &extra->choices;
        return io;
    }
    io.values.logp = b->logp.data;
    io.values.entropy = b->entropy.data;
    io.values.lse = b->lse.data;
    io.values.smooth = b->smooth.data;
    if (!b->teacher) return io;
    const seqpar_llama *teacher = b->teacher->model;
    from->kl = b->kl.data;
    from->entropy = b->teacher_entropy.data;
    from->dkl = b->teacher->dkl;
    from->hidden = b->teacher->batch->hidden.data;
    from->table = seqpar__llama_param(ctx, teacher, seqpar__llama_head(teacher));
    from->width = teacher->config.hidden;
    from->reverse = b->teacher->reverse;
    io.teacher = from;
    return io;
}

/* A teacher must have the same tokens and vocabulary, and hidden states. */
static seqpar_status seqpar__llama_check_teacher(seqpar_error *error, const seqpar_llama *m,
                                                 const seqpar_llama_batch *b) {
    if (!b->teacher) return SEQPAR_OK;
    const seqpar_llama *teacher = b->teacher->model;
    const seqpar_llama_batch *of = b->teacher->batch;
    SEQPAR_NEED(error, "batch->teacher->model, batch->teacher->batch", teacher, of);
    SEQPAR__LLAMA_TRY(seqpar__llama_check_forward(error, teacher, of));
    if (m->config.score || teacher->config.score)
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "a model with a score head has no probabilities of tokens; student "
                           "and teacher are to be language models");
    if (teacher->config.vocab != m->config.vocab)
        return seqpar_fail(error, SEQPAR_ERR_SIZE,
                           "the teacher's vocabulary has %lld tokens, the student's %lld; give "
                           "a teacher with the same one",
                           (long long)teacher->config.vocab, (long long)m->config.vocab);
    return of->tokens == b->tokens &&
                   !memcmp(of->ids, b->ids, (size_t)b->tokens * sizeof *b->ids)
               ? SEQPAR_OK
               : seqpar_fail(error, SEQPAR_ERR_STEP,
                             "the teacher's batch (%lld tokens) and the student's (%lld) have "
                             "different ids; open both with the same rows and layout",
                             (long long)of->tokens, (long long)b->tokens);
}

/* Choices exclude a teacher, whose KL is over the whole vocabulary, and a score head. */
static seqpar_status seqpar__llama_check_choices(seqpar_error *error, const seqpar_llama *m,
                                                 const seqpar_llama_batch *b) {
    if (!b->choices && !b->best) return SEQPAR_OK;
    if (m->config.score)
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "a model with a score head has no probabilities of tokens to choose "
                           "among; leave out batch->choices and batch->best");
    if (b->choices && (b->choices->count < 2 || b->choices->count > SEQPAR_MAX_CHOICES))
        return seqpar_fail(error, SEQPAR_ERR_SIZE,
                           "batch->choices are %lld tokens; give 2 to %d",
                           (long long)b->choices->count, SEQPAR_MAX_CHOICES);
    if (b->choices && b->teacher)
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "batch->teacher compares the whole vocabulary, batch->choices is a "
                           "part of it; set only one of them");
    return SEQPAR_OK;
}

static seqpar_status seqpar__llama_check_extra(seqpar_error *error, const seqpar_llama *m,
                                               const seqpar_llama_batch *b) {
    SEQPAR__LLAMA_TRY(seqpar__llama_check_choices(error, m, b));
    return seqpar__llama_check_teacher(error, m, b);
}

/* Allocates the outputs of choices or teacher, and gathers the teacher's table if sharded. */
static seqpar_status seqpar__llama_use_extra(seqpar_ctx *ctx, seqpar_llama_batch *b) {
    int64_t bytes = b->tokens * seqpar_dtype_bytes(ctx->device->accumulator);
    if (b->choices && b->logq.bytes < bytes * b->choices->count) {
        seqpar_buffer_free(ctx, &b->logq);
        return seqpar_buffer_new(ctx, &b->logq, bytes * b->choices->count,
                                 SEQPAR_MEM_ACTIVATIONS);
    }
    if (!b->teacher) return SEQPAR_OK;
    if (!b->kl.data)
        SEQPAR__LLAMA_TRY(seqpar_buffer_new(ctx, &b->kl, bytes, SEQPAR_MEM_ACTIVATIONS));
    if (!b->teacher_entropy.data)
        SEQPAR__LLAMA_TRY(
            seqpar_buffer_new(ctx, &b->teacher_entropy, bytes, SEQPAR_MEM_ACTIVATIONS));
    return seqpar__llama_use_head(ctx, b->teacher->model, -1);
}

static seqpar_status seqpar__llama_release_extra(seqpar_ctx *ctx, const seqpar_llama_batch *b,
                                                 seqpar_status status) {
    return b->teacher ? seqpar__llama_release(ctx, b->teacher->model, status) : status;
}

static seqpar_vocab_desc seqpar__llama_vocab_desc(const seqpar_llama *m,
                                                  const seqpar_llama_batch *b) {
    seqpar_vocab_desc d;
    d.hidden = m->config.hidden;
    d.vocab = m->config.vocab;
    d.rows_max = b->desc.vocab_rows;
    d.temperature = b->desc.temperature;
    return d;
}

SEQPAR_DEF seqpar_status seqpar_llama_values(seqpar_ctx *ctx, seqpar_llama *m,
                                             seqpar_llama_batch *b) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, model, batch", ctx, m, b);
    seqpar_vocab_io io;
    seqpar__llama_vocab_extra extra;
    seqpar_vocab_desc desc = seqpar__llama_vocab_desc(m, b);
    SEQPAR__LLAMA_TRY(seqpar__llama_check_forward(ctx->error, m, b));
    SEQPAR__LLAMA_TRY(seqpar__llama_check_extra(ctx->error, m, b));
    /* scores are logits of a vocabulary of 1 */
    if (m->config.score) return seqpar_llama_logits(ctx, m, b, b->score.data);
    SEQPAR__LLAMA_TRY(seqpar__llama_use_head(ctx, m, -1));
    SEQPAR__LLAMA_TRY(seqpar__llama_use_extra(ctx, b));
    io = seqpar__llama_vocab_io(ctx, m, b, &extra);
    return seqpar__llama_release(
        ctx, m, seqpar__llama_release_extra(ctx, b, seqpar_vocab_forward(ctx, &io, &desc)));
}

SEQPAR_DEF seqpar_status seqpar_llama_logits(seqpar_ctx *ctx, seqpar_llama *m,
                                             seqpar_llama_batch *b, void *logits) {
    seqpar__llama_layer_call c;
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, model, batch", ctx, m, b);
    SEQPAR_NEED(ctx->error, "logits", SEQPAR_IF(b->tokens > 0, logits));
    c = seqpar__llama_call(ctx, m, b);
    SEQPAR__LLAMA_TRY(seqpar__llama_check_forward(ctx->error, m, b));
    SEQPAR__LLAMA_TRY(seqpar__llama_use_head(ctx, m, -1));
    const seqpar_llama *head = seqpar__llama_head_model(m);
    return seqpar__llama_release(ctx, m,
                                 seqpar__llama_linear_of(&c, head, logits, b->hidden.data,
                                                         seqpar__llama_head(head), 0, 0));
}

/* Allocates `node_count` nodes of `count` elements of a group, from its element `first` on. */
static seqpar_status seqpar__llama_part_nodes_new(seqpar__llama_layer_call *c,
                                                  const seqpar_optim *optim, int64_t group,
                                                  int64_t first, int64_t count,
                                                  int64_t node_count, seqpar_buffer *nodes) {
    c->group = group;
    c->group_begin = optim->blocks.tensors[optim->blocks.group_tensor[group]].offset;
    c->first = first;
    c->node_stride = count;
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(
        c->ctx, nodes, node_count * c->node_stride * seqpar_dtype_bytes(c->dev->accumulator),
        SEQPAR_MEM_GRADIENTS));
    c->nodes = nodes->data;
    return SEQPAR_OK;
}

static seqpar_status seqpar__llama_nodes_new(seqpar__llama_layer_call *c,
                                             const seqpar_optim *optim, int64_t group,
                                             int64_t node_count, seqpar_buffer *nodes) {
    const seqpar_tensor *all = optim->blocks.tensors;
    const seqpar_tensor *first = &all[optim->blocks.group_tensor[group]];
    const seqpar_tensor *last = &all[optim->blocks.group_tensor[group + 1] - 1];
    return seqpar__llama_part_nodes_new(c, optim, group, 0,
                                        last->offset + last->rows * last->cols - first->offset,
                                        node_count, nodes);
}

/* Sends the nodes to the parameters' owners and frees them. */
static seqpar_status seqpar__llama_nodes_send(const seqpar__llama_layer_call *c,
                                              seqpar_optim *optim, int64_t micro, int source,
                                              seqpar_buffer *nodes) {
    seqpar_step_nodes n;
    seqpar_status status;
    n.nodes = nodes->data;
    n.node_stride = c->node_stride;
    n.elements = nodes->bytes / seqpar_dtype_bytes(c->dev->accumulator);
    n.micro_batch = micro;
    n.group = c->group;
    n.source = source;
    n.first = c->first;
    n.count = c->node_stride;
    status = seqpar_step_gradient(c->ctx, optim, &n);
    seqpar_buffer_free(c->ctx, nodes);
    return status;
}

/* dn (tokens, hidden) = dscore w, and the gradient of w */
static seqpar_status seqpar__llama_score_backward(const seqpar__llama_layer_call *c,
                                                  const seqpar_vocab_seeds *seeds, void *dn) {
    const seqpar_llama *of = seqpar__llama_head_model(c->m);
    int64_t head = seqpar__llama_head(of);
    SEQPAR__LLAMA_TRY(
        seqpar__llama_linear_grad(c, (void *)seeds->dlogp, c->b->hidden.data, head));
    return seqpar__llama_linear_of(c, of, dn, (void *)seeds->dlogp, head, 1, 0);
}

/* Makes and sends the nodes of a table, its group's only tensor, one slice at a time, so that nodes
   of the whole table are never in memory. make: writes the nodes of `rows` table rows, from row
   `first` on, to c->nodes. */
static seqpar_status seqpar__llama_table_backward(
    seqpar__llama_layer_call *c, seqpar_optim *optim, int64_t micro, int64_t tensor, int source,
    seqpar_status (*make)(seqpar__llama_layer_call *c, void *user, int64_t first, int64_t rows),
    void *user) {
    int64_t group = c->m->tensors[tensor].group, width = c->m->tensors[tensor].cols;
    int64_t first, count;
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; !status && seqpar_optim_slice(optim, group, i, &first, &count); i++) {
        seqpar_buffer nodes;
        status = seqpar__llama_part_nodes_new(c, optim, group, first, count,
                                              c->fold->node_count, &nodes);
        if (!status) status = make(c, user, first / width, count / width);
        if (!status) status = seqpar__llama_nodes_send(c, optim, micro, source, &nodes);
        seqpar_buffer_free(c->ctx, &nodes);
    }
    return status;
}

typedef struct seqpar__llama_vocab_call {
    seqpar_vocab_io io;
    seqpar__llama_vocab_extra extra;
    seqpar_vocab_desc desc;
} seqpar__llama_vocab_call;

static seqpar_status seqpar__llama_vocab_nodes(seqpar__llama_layer_call *c, void *user,
                                               int64_t first, int64_t rows) {
    seqpar__llama_vocab_call *v = (seqpar__llama_vocab_call *)user;
    v->io.nodes = c->nodes;
    v->io.node_stride = c->node_stride;
    return seqpar_vocab_nodes(c->ctx, &v->io, c->b->share, c->fold, &v->desc, first, rows);
}

/* Computes dn (tokens, hidden), the gradient of the final norm's output, and sends the table's.
   With few tokens it stores dlogits and makes nodes slice by slice, which takes less memory than
   nodes of the whole table. */
static seqpar_status seqpar__llama_vocab_backward(seqpar__llama_layer_call *c,
                                                  seqpar_optim *optim, int64_t micro,
                                                  const seqpar_vocab_seeds *seeds, void *dn) {
    const seqpar_llama *m = c->m;
    seqpar__llama_vocab_call v;
    int64_t head = seqpar__llama_head(m), group = m->tensors[head].group;
    int in_slices = c->b->tokens <= c->fold->node_count * m->config.hidden;
    seqpar_buffer room;
    seqpar_status status;
    v.io = seqpar__llama_vocab_io(c->ctx, m, c->b, &v.extra);
    v.desc = seqpar__llama_vocab_desc(m, c->b);
    v.io.seeds = *seeds;
    v.io.dhidden = dn;
    if (in_slices)
        status = seqpar_buffer_new(/* for dlogits; else for nodes */
                                   c->ctx, &room,
                                   c->b->tokens * m->config.vocab *
                                       seqpar_dtype_bytes(c->dev->storage),
                                   SEQPAR_MEM_SCRATCH);
    else
        status = seqpar__llama_nodes_new(
            c, optim, group, seqpar_vocab_node_count(c->b->share, c->fold, &v.desc), &room);
    if (in_slices)
        v.io.dlogits = room.data;
    else {
        v.io.nodes = c->nodes;
        v.io.node_stride = c->node_stride;
    }
    if (!status) status = seqpar_vocab_backward(c->ctx, &v.io, c->b->share, c->fold, &v.desc);
    if (!status && in_slices)
        status = seqpar__llama_table_backward(c, optim, micro, head, m->config.tied,
                                              seqpar__llama_vocab_nodes, &v);
    else if (!status)
        status = seqpar__llama_nodes_send(c, optim, micro, m->config.tied, &room);
    seqpar_buffer_free(c->ctx, &room);
    return status;
}

/* Computes dn (tokens, hidden), the gradient of the final norm's output; the table is frozen. */
static seqpar_status seqpar__llama_vocab_frozen(const seqpar__llama_layer_call *c,
                                                const seqpar_vocab_seeds *seeds, void *dn) {
    seqpar__llama_vocab_extra extra;
    seqpar_vocab_io io = seqpar__llama_vocab_io(c->ctx, c->m, c->b, &extra);
    seqpar_vocab_desc desc = seqpar__llama_vocab_desc(c->m, c->b);
    io.seeds = *seeds;
    io.dhidden = dn;
    io.frozen = 1;
    return seqpar_vocab_backward(c->ctx, &io, c->b->share, c->fold, &desc);
}

/* Backward of final norm and head: dx (tokens, hidden), the gradient of the last layer's output. */
static seqpar_status seqpar__llama_head_backward(seqpar__llama_layer_call *c,
                                                 seqpar_optim *optim, int64_t micro,
                                                 const seqpar_vocab_seeds *seeds, void *dx,
                                                 void *dn) {
    const seqpar_llama *m = c->m;
    int64_t norm = m->config.layers + 1; /* the group of the final norm, and of a score */
    int learns = !m->adapters || m->config.score;
    seqpar_buffer nodes;
    seqpar_status status = seqpar__llama_use_head(c->ctx, m, norm);
    memset(&nodes, 0, sizeof nodes);
    if (!status) status = seqpar__llama_use_extra(c->ctx, c->b);
    if (!status && !m->config.score)
        status = m->adapters ? seqpar__llama_vocab_frozen(c, seeds, dn)
                             : seqpar__llama_vocab_backward(c, optim, micro, seeds, dn);
    status = seqpar__llama_release_extra(c->ctx, c->b, status);
    if (!status) status = seqpar__llama_use(c->ctx, m, norm, norm - 1);
    if (!status && learns) /* adapters have no group for the embedding */
        status = seqpar__llama_nodes_new(c, optim, norm - !!m->adapters, c->fold->node_count,
                                         &nodes);
    if (!status && m->config.score) status = seqpar__llama_score_backward(c, seeds, dn);
    c->dev->zero(c->dev, dx, seqpar__llama_hidden_bytes(c), c->ctx->queue);
    if (!status)
        status = seqpar__llama_norm_grad(c, dx, dn, c->b->x.data, c->b->rstd.data,
                                         seqpar__llama_final_norm(m));
    if (!status && learns) status = seqpar__llama_nodes_send(c, optim, micro, 0, &nodes);
    seqpar_buffer_free(c->ctx, &nodes);
    return status;
}

/* The number of nodes of a layer. With mlp_rows there may be more, because partial sums are
   stored between tiles of the MLP. */
static int64_t seqpar__llama_layer_nodes(const seqpar__llama_layer_call *c) {
    int64_t most = c->b->desc.mlp_rows, nodes = c->fold->node_count;
    return most ? SEQPAR__LLAMA_MAX(nodes, seqpar_token_node_count(c->b->share, c->fold, most))
                : nodes;
}

static seqpar_status seqpar__llama_layer_backward(seqpar__llama_layer_call *c,
                                                  seqpar_optim *optim, int64_t micro,
                                                  seqpar__llama_layer_gradients *g) {
    seqpar_buffer nodes;
    seqpar_status status;
    memset(&nodes, 0, sizeof nodes);
    SEQPAR__LLAMA_TRY(
        seqpar__llama_use(c->ctx, c->m, c->layer + 1, c->layer > 0 ? c->layer : -1));
    SEQPAR__LLAMA_TRY(seqpar__llama_layer_call_open(c, 1));
    seqpar__llama_staging_fetch(c);
    if (c->b->desc.recompute) SEQPAR__LLAMA_TRY(seqpar__llama_layer_inner(c, 0));
    /* group 0 of the model is the embedding; adapters have none */
    status = seqpar__llama_nodes_new(c, optim, c->layer + !c->m->adapters,
                                     seqpar__llama_layer_nodes(c), &nodes);
    if (!status) status = seqpar__llama_mlp_backward(c, g->dx.data, g->dn.data);
    if (!status) status = seqpar__llama_attention_backward(c, g);
    if (!status) status = seqpar__llama_nodes_send(c, optim, micro, 0, &nodes);
    seqpar_buffer_free(c->ctx, &nodes);
    seqpar__llama_free_layer(c->ctx, &c->b->layers[c->layer]); /* its activations are used up */
    return status;
}

static seqpar_status seqpar__llama_embedding_nodes(seqpar__llama_layer_call *c, void *dx,
                                                   int64_t first, int64_t rows) {
    seqpar_embedding_grad_args a;
    a.fold = seqpar__llama_fold_call(c, 0);
    a.leaves = c->b->share->pieces;
    a.dx = seqpar__llama_mat(dx, c->m->config.hidden);
    a.ids = c->b->taught;
    a.rows = rows;
    a.width = c->m->config.hidden;
    a.first = first;
    return c->dev->embedding_grad(c->dev, &a, c->ctx->queue);
}

static seqpar_status seqpar__llama_layer_gradients_new(const seqpar__llama_layer_call *c,
                                                       seqpar__llama_layer_gradients *g) {
    const seqpar_llama_config *f = &c->m->config;
    int64_t row = c->b->tokens * seqpar_dtype_bytes(c->dev->storage);
    int64_t wide = f->heads * f->head_dim, narrow = f->kv_heads * f->head_dim;
    memset(g, 0, sizeof *g);
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(c->ctx, &g->dx, row * f->hidden, SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(c->ctx, &g->dn, row * f->hidden, SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(c->ctx, &g->dq, row * wide, SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(c->ctx, &g->dout, row * wide, SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(c->ctx, &g->dk, row * narrow, SEQPAR_MEM_SCRATCH));
    return seqpar_buffer_new(c->ctx, &g->dv, row * narrow, SEQPAR_MEM_SCRATCH);
}

/* Checks before anything is sent: the batch has activations, and the optimizer was opened with
   the learner's tensors. */
static seqpar_status seqpar__llama_check_backward(seqpar_error *error, const seqpar_llama *m,
                                                  const seqpar_llama_batch *b,
                                                  const seqpar_optim *optim) {
    SEQPAR__LLAMA_TRY(seqpar__llama_check_model(error, m, b));
    if (b->has != SEQPAR__LLAMA_HAS_ACTIVATIONS)
        return seqpar_fail(error, SEQPAR_ERR_STEP,
                           "the batch holds nothing for a backward pass; call "
                           "seqpar_llama_forward with keep 1 before each");
    if (m->config.four_bits && !m->adapters)
        return seqpar_fail(error, SEQPAR_ERR_STEP,
                           "a model in four bits does not learn; give it adapters, or open it "
                           "without four_bits");
    SEQPAR__LLAMA_TRY(seqpar__llama_check_extra(error, m, b));
    if (optim->blocks.tensors != seqpar__llama_learner(m)->tensors)
        return seqpar_fail(
            error, SEQPAR_ERR_STEP,
            "the optimizer was opened with other tensors than this model's (%lld elements, the "
            "model %lld); give seqpar_optim_open %s",
            (long long)optim->blocks.elements, (long long)seqpar__llama_learner(m)->elements,
            m->adapters ? "those of model.adapters" : "model.tensors");
    return SEQPAR_OK;
}

SEQPAR_DEF void seqpar_llama_balance(const seqpar_llama_config *c, double *slopes,
                                     const int64_t *chosen, double coefficient) {
    SEQPAR_MUST("config, slopes, chosen", c, slopes, chosen);
    int64_t pairs = 0;
    double routed; /* number of pairs (token, layer with experts) */
    for (int64_t e = 0; e < c->experts; e++) pairs += chosen[e];
    routed = c->experts ? (double)(pairs / c->experts_per_token) : 0;
    for (int64_t e = 0; e < c->experts; e++)
        slopes[e] = routed > 0 ? coefficient * (double)c->experts *
                                     ((double)chosen[e] / routed) / routed
                               : 0;
}

SEQPAR_DEF seqpar_status seqpar_llama_backward(seqpar_ctx *ctx, seqpar_llama *m,
                                               seqpar_llama_batch *b, seqpar_optim *optim,
                                               int64_t micro, const seqpar_vocab_seeds *seeds) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, model, batch, optim, seeds", ctx, m, b, optim,
                seeds);
    seqpar__llama_layer_call c = seqpar__llama_call(ctx, m, b);
    seqpar__llama_layer_gradients g;
    seqpar_buffer *all = &g.dx;
    seqpar_status status;
    SEQPAR__LLAMA_TRY(seqpar__llama_check_backward(ctx->error, m, b, optim));
    SEQPAR__LLAMA_TRY(seqpar__llama_rope_tables(ctx, m, b->longest));
    SEQPAR__LLAMA_TRY(seqpar__llama_adapted_scratch(ctx, m, b));
    SEQPAR__LLAMA_TRY(seqpar_step_fold(ctx, optim, &c.fold, b->share, micro));
    c.tile = seqpar__llama_whole(b, c.fold);
    if (b->balance) c.dev->zero(c.dev, b->balance_loss.data, b->balance_loss.bytes, ctx->queue);
    b->has = SEQPAR__LLAMA_HAS_HIDDEN; /* the activations are used up */
    status = seqpar__llama_layer_gradients_new(&c, &g);
    if (!status)
        status = seqpar__llama_head_backward(&c, optim, micro, seeds, g.dx.data, g.dn.data);
    for (c.layer = m->config.layers - 1; !status && c.layer >= 0; c.layer--)
        status = seqpar__llama_layer_backward(&c, optim, micro, &g);
    if (!status && !m->adapters)
        status = seqpar__llama_table_backward(&c, optim, micro, 0, 0,
                                              seqpar__llama_embedding_nodes, g.dx.data);
    for (size_t i = 0; i < sizeof g / sizeof *all; i++) seqpar_buffer_free(ctx, &all[i]);
    seqpar__llama_staging_free(ctx, b);
    return seqpar__llama_release(ctx, m, status);
}

/* ---- >>sample  text for rollouts ----
   A sampling step feeds every unfinished text the tokens that its cache lacks: a new text its
   prompt, the others the token chosen last. When a text ends, the next prompt gets its
   slot. A row's result
   does not depend on other rows, so a text does not depend on the texts beside it. The cache is
   (layer, kv head, slot, token, head_dim): for one token the query heads of one kv head are then
   the queries of one task. A prompt attends to the keys of its own step. */

#ifndef SEQPAR__LLAMA_PROMPT_ROWS
#define SEQPAR__LLAMA_PROMPT_ROWS \
    512 /* prompt tokens of one step, unless one prompt is longer */
#endif

/* Tasks: queries and the cells of keys that they see, folded as in training. Layers with a window
   need programs of their own, since a cell that no query of a task sees is no leaf. */
typedef struct seqpar__llama_programs {
    seqpar_attn_task *tasks;
    seqpar_fold_op *ops;
    int32_t *begin; /* (queries) the first key that a query sees */
    int64_t count;  /* ops in use */
} seqpar__llama_programs;

typedef struct seqpar__llama_attn_list {
    seqpar_piece *pieces;
    seqpar_attn_keys *keys;
    int64_t *cells; /* (cells of a text) seqpar_cell_leaf of each */
    int32_t *end;   /* (queries) one past the last key that a query sees */
    seqpar__llama_programs whole, windowed;
    int64_t count, key_count, depth;
} seqpar__llama_attn_list;

/* one text being generated. prompt -1: the slot is free; fed: tokens in the cache; first, rows:
   its rows in this step */
typedef struct seqpar__llama_slot {
    int64_t prompt, fed, first, rows;
} seqpar__llama_slot;

typedef struct seqpar__llama_sampler {
    seqpar_ctx *ctx;
    seqpar_llama *m;
    const seqpar_llama_sample_desc *d;
    const seqpar_llama_prompt *prompts;
    seqpar_llama_text *texts;
    int64_t count, next;               /* prompts, and how many have begun */
    int64_t slots, capacity, rows_max; /* maximum texts, cached tokens of one, rows of a step */
    seqpar__llama_slot *slot;
    int64_t *live, live_count; /* the slots of this step */
    int32_t *last;             /* (live_count) the row of a slot's last token */
    seqpar_llama_batch b;
    seqpar_buffer keys, values, logits, logp; /* logits (slots, vocab), logp (slots) */
    seqpar__llama_attn_list prompt_tasks, token_tasks;
    double *u;       /* (live_count) the random number that chooses the next token */
    int32_t *chosen; /* (live_count) that token */
} seqpar__llama_sampler;

/* The most tokens that may follow a prompt. */
static int64_t seqpar__llama_new_tokens_max(const seqpar_llama_sample_desc *d,
                                            const seqpar_llama_prompt *p) {
    return d->max_tokens ? SEQPAR__LLAMA_MIN(d->max_new_tokens, d->max_tokens - p->tokens)
                         : d->max_new_tokens;
}

static seqpar_status seqpar__llama_check_sample(seqpar_error *error,
                                                const seqpar_llama_config *c,
                                                const seqpar_llama_sample_desc *d,
                                                int64_t count) {
    if (c->score)
        return seqpar_fail(
            error, SEQPAR_ERR_OPTION,
            "the model ends in '%.80s', a number per token; text needs a language model",
            c->score);
    if (count < 0 || d->max_new_tokens <= 0)
        return seqpar_fail(error, SEQPAR_ERR_SIZE,
                           "%lld prompts and max_new_tokens %lld; give at least 0 and 1",
                           (long long)count, (long long)d->max_new_tokens);
    if (d->cell < 0 || d->cell > SEQPAR_MAX_TOKENS)
        return seqpar_fail(error, SEQPAR_ERR_CELL,
                           "cell is %lld; give the tokens of a cell, 1 to %lld, or 0 for the "
                           "default",
                           (long long)d->cell, (long long)SEQPAR_MAX_TOKENS);
    if (d->batch < 0 || d->max_tokens < 0 || d->stop_count < 0 ||
        (d->stop_count > 0 && !d->stops))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "batch %lld, max_tokens %lld, %lld stop ids%s; none may be negative "
                           "or NULL",
                           (long long)d->batch, (long long)d->max_tokens,
                           (long long)d->stop_count,
                           d->stop_count > 0 && !d->stops ? " at NULL" : "");
    if (!(d->temperature >= 0) || d->temperature > 1e300)
        return seqpar_fail(
            error, SEQPAR_ERR_OPTION,
            "temperature is %g; give a number from 0 to 1e300, 0 for the most probable token",
            d->temperature);
    if (!(d->top_p > 0 && d->top_p <= 1))
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "top_p is %g; give a number in (0, 1], 1 for all tokens", d->top_p);
    if (d->top_k < 0)
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "top_k is %lld; give a positive number, 0 for all tokens",
                           (long long)d->top_k);
    for (int64_t i = 0; i < d->stop_count; i++)
        if (d->stops[i] < 0 || d->stops[i] >= c->vocab)
            return seqpar_fail(error, SEQPAR_ERR_TOKEN_ID,
                               "stop id %d; the model has ids 0..%lld", (int)d->stops[i],
                               (long long)c->vocab - 1);
    return SEQPAR_OK;
}

static seqpar_status seqpar__llama_check_prompt(seqpar_error *error,
                                                const seqpar_llama_config *c,
                                                const seqpar_llama_sample_desc *d,
                                                const seqpar_llama_prompt *p, int64_t n) {
    if (p->tokens <= 0 || !p->ids)
        return seqpar_fail(error, SEQPAR_ERR_DOCUMENT_TOKENS,
                           "prompt %lld has %lld tokens%s; give at least one: without a "
                           "prompt, the beginning-of-text id",
                           (long long)n, (long long)p->tokens, p->ids ? "" : " at NULL");
    if (seqpar__llama_new_tokens_max(d, p) <= 0)
        return seqpar_fail(error, SEQPAR_ERR_OPTION,
                           "prompt %lld has %lld tokens and max_tokens is %lld; shorten it, "
                           "so that at least one new token fits",
                           (long long)n, (long long)p->tokens, (long long)d->max_tokens);
    if (p->tokens > INT32_MAX - seqpar__llama_new_tokens_max(d, p))
        return seqpar_fail(
            error, SEQPAR_ERR_OPTION,
            "prompt %lld has %lld tokens and %lld may follow; positions end at %d, lower "
            "max_new_tokens",
            (long long)n, (long long)p->tokens, (long long)seqpar__llama_new_tokens_max(d, p),
            INT32_MAX);
    for (int64_t i = 0; i < p->tokens; i++)
        if (p->ids[i] < 0 || p->ids[i] >= c->vocab)
            return seqpar_fail(error, SEQPAR_ERR_TOKEN_ID,
                               "prompt %lld, token %lld has id %d; the model has ids 0..%lld",
                               (long long)n, (long long)i, (int)p->ids[i],
                               (long long)c->vocab - 1);
    return SEQPAR_OK;
}

/* ---- attention over the cache ---- */

/* keys: cells of keys of all tasks. A program has fewer than four operations per leaf. */
static int seqpar__llama_programs_new(seqpar__llama_programs *p, int64_t tasks, int64_t queries,
                                      int64_t keys) {
    p->tasks = SEQPAR__LLAMA_NEW(seqpar_attn_task, tasks);
    p->ops = SEQPAR__LLAMA_NEW(seqpar_fold_op, 4 * keys + 2 * tasks);
    p->begin = SEQPAR__LLAMA_NEW(int32_t, queries);
    return p->tasks && p->ops && p->begin;
}

static void seqpar__llama_programs_free(seqpar__llama_programs *p) {
    SEQPAR_FREE(p->tasks);
    SEQPAR_FREE(p->ops);
    SEQPAR_FREE(p->begin);
}

static int seqpar__llama_attn_list_new(seqpar__llama_attn_list *l, int64_t tasks,
                                       int64_t queries, int64_t cell, int64_t cells) {
    l->pieces = SEQPAR__LLAMA_NEW(seqpar_piece, tasks);
    l->keys = SEQPAR__LLAMA_NEW(seqpar_attn_keys, tasks * cells);
    l->cells = SEQPAR__LLAMA_NEW(int64_t, cells);
    l->end = SEQPAR__LLAMA_NEW(int32_t, queries);
    for (int64_t i = 0; l->cells && i < cells; i++) l->cells[i] = seqpar_cell_leaf(cell, i);
    return l->pieces && l->keys && l->cells && l->end &&
           seqpar__llama_programs_new(&l->whole, tasks, queries, tasks * cells) &&
           seqpar__llama_programs_new(&l->windowed, tasks, queries, tasks * cells);
}

static void seqpar__llama_attn_list_free(seqpar__llama_attn_list *l) {
    SEQPAR_FREE(l->pieces);
    SEQPAR_FREE(l->keys);
    SEQPAR_FREE(l->cells);
    SEQPAR_FREE(l->end);
    seqpar__llama_programs_free(&l->whole);
    seqpar__llama_programs_free(&l->windowed);
}

/* Writes task n's fold program of cells first to end - 1; cell c is l->keys[keys + c]. */
static seqpar_status seqpar__llama_program(seqpar__llama_attn_list *l,
                                           seqpar__llama_programs *p, int64_t n, int64_t keys,
                                           int64_t first, int64_t end) {
    seqpar_fold fold;
    seqpar_status status = SEQPAR_OK;
    seqpar_attn_task *task = &p->tasks[n];
    seqpar_fold_init(&fold, l->cells + first, end - first);
    for (int64_t c = first; c < end && !status; c++) {
        seqpar_node node = {0, l->cells[c]};
        status = seqpar_fold_push(&fold, node, SEQPAR_FOLD_LEAF, (int32_t)(keys + c));
    }
    memset(task, 0, sizeof *task);
    task->piece = n;
    task->program = p->ops + p->count;
    if (!status) {
        memcpy(p->ops + p->count, fold.program,
               (size_t)fold.program_count * sizeof *fold.program);
        p->count += task->program_count = fold.program_count;
        l->depth = SEQPAR__LLAMA_MAX(l->depth, fold.depth_high);
    }
    seqpar_fold_free(&fold);
    return status;
}

/* A task: `count` queries, from row `local` on, and the first `keys` keys of a text, from row
   k_row on. The queries are a prompt's cell, at positions from `start` on, or the heads of one
   token, all at `start`. */
typedef struct seqpar__llama_task {
    int64_t local, start, count, k_row, keys;
    int64_t window_begin; /* the first key that the first query sees through a window */
} seqpar__llama_task;

static seqpar_status seqpar__llama_attn_list_add(seqpar__llama_attn_list *l, int64_t cell,
                                                 const seqpar__llama_task *b) {
    int64_t n = l->count++, first = l->key_count;
    int64_t cells = seqpar_cell_of(cell, b->keys - 1) + 1;
    l->pieces[n].local = b->local;
    l->pieces[n].start = b->start;
    l->pieces[n].stride = 1;
    l->pieces[n].count = b->count;
    for (int64_t c = 0; c < cells; c++) {
        seqpar_attn_keys *k = &l->keys[l->key_count++];
        k->start = seqpar_cell_begin(cell, c);
        k->k_row = k->v_row = b->k_row + k->start;
        k->stride = 1;
        k->count = SEQPAR__LLAMA_MIN(seqpar_cell_begin(cell, c + 1), b->keys) - k->start;
    }
    SEQPAR__LLAMA_TRY(seqpar__llama_program(l, &l->whole, n, first, 0, cells));
    return seqpar__llama_program(l, &l->windowed, n, first,
                                 seqpar_cell_of(cell, b->window_begin), cells);
}

/* elements of one layer's keys */
static int64_t seqpar__llama_cache_layer(const seqpar__llama_sampler *s) {
    return s->m->config.kv_heads * s->slots * s->capacity * s->m->config.head_dim;
}

/* Copies the step's keys, or values, of one text to the cache. */
static void seqpar__llama_cache_append(const seqpar__llama_layer_call *c,
                                       const seqpar__llama_slot *slot,
                                       const seqpar_buffer *cache, const void *from) {
    const seqpar__llama_sampler *s = c->sampler;
    int64_t d = c->m->config.head_dim, kv_heads = c->m->config.kv_heads;
    int64_t size = seqpar_dtype_bytes(c->dev->storage);
    int64_t head = s->capacity * s->slots * d;
    int64_t at = c->layer * seqpar__llama_cache_layer(s) +
                 ((slot - s->slot) * s->capacity + slot->fed) * d;
    const char *rows = (const char *)from + slot->first * kv_heads * d * size;
    char *to = (char *)cache->data + at * size;
    if (slot->rows == 1) {
        c->dev->copy_rows(c->dev, to, head * size, rows, d * size, d * size, kv_heads,
                          c->ctx->queue);
        return;
    }
    for (int64_t j = 0; j < kv_heads; j++)
        c->dev->copy_rows(c->dev, to + j * head * size, d * size, rows + j * d * size,
                          kv_heads * d * size, d * size, slot->rows, c->ctx->queue);
}

static seqpar_attn_args seqpar__llama_sampler_args(const seqpar__llama_layer_call *c,
                                                   const seqpar__llama_attn_list *l) {
    const seqpar_llama_config *f = &c->m->config;
    const seqpar__llama_programs *p = seqpar__llama_is_windowed(f, c->layer) ? &l->windowed
                                                                             : &l->whole;
    seqpar_attn_args a;
    memset(&a, 0, sizeof a);
    a.heads = f->heads;
    a.kv_heads = a.head_count = f->kv_heads;
    a.head_dim = f->head_dim;
    a.scale = 1.0 / sqrt((double)f->head_dim);
    a.q_pieces = l->pieces;
    a.k_pieces = l->keys;
    a.tasks = p->tasks;
    a.task_count = l->count;
    a.depth = l->depth;
    a.visible_begin = p->begin;
    a.visible_end = l->end;
    a.q_tokens = c->b->tokens;
    a.q = c->q;
    a.k = c->k;
    a.v = c->v;
    a.out = c->out;
    a.lse = c->lse;
    return a;
}

static seqpar_status seqpar__llama_sampler_attend(const seqpar__llama_layer_call *c) {
    const seqpar__llama_sampler *s = c->sampler;
    int64_t cache = c->layer * seqpar__llama_cache_layer(s);
    seqpar_attn_args a = seqpar__llama_sampler_args(c, &s->prompt_tasks);
    for (int64_t i = 0; i < s->live_count; i++) {
        seqpar__llama_cache_append(c, &s->slot[s->live[i]], &s->keys, c->k);
        seqpar__llama_cache_append(c, &s->slot[s->live[i]], &s->values, c->v);
    }
    if (a.task_count) SEQPAR__LLAMA_TRY(c->dev->attn_forward(c->dev, &a, c->ctx->queue));
    a = seqpar__llama_sampler_args(c, &s->token_tasks);
    /* a query is one head of a token; those of one kv head are adjacent */
    a.q_tokens = a.task_count / a.kv_heads * a.heads;
    a.heads = a.kv_heads = a.head_count = 1;
    a.k = seqpar__llama_at(s->keys.data, cache, c->dev->storage);
    a.v = seqpar__llama_at(s->values.data, cache, c->dev->storage);
    return a.task_count ? c->dev->attn_forward(c->dev, &a, c->ctx->queue) : SEQPAR_OK;
}

/* The log-prob of each chosen token, by the routine of training. */
static seqpar_status seqpar__llama_sample_logp(seqpar__llama_sampler *s) {
    seqpar_vocab_softmax_args a;
    memset(&a, 0, sizeof a);
    a.logits.data = s->logits.data;
    a.logits.stride = a.vocab = s->m->config.vocab;
    a.rows = s->live_count;
    a.scale = s->d->temperature == 0 ? 0 : 1.0 / s->d->temperature;
    a.targets = s->chosen;
    a.logp = s->logp.data;
    SEQPAR__LLAMA_TRY(s->ctx->device->vocab_softmax(s->ctx->device, &a, s->ctx->queue));
    for (int64_t i = 0; i < s->live_count; i++) {
        seqpar_llama_text *text = &s->texts[s->slot[s->live[i]].prompt];
        seqpar_device_read(s->ctx->device, &text->logp[text->count], s->logp.data, i, 1,
                           s->ctx->device->accumulator);
    }
    return SEQPAR_OK;
}

/* Chooses a token for every text of this step. */
static seqpar_status seqpar__llama_sample_tokens(seqpar__llama_sampler *s) {
    const seqpar_llama_sample_desc *d = s->d;
    int64_t vocab = s->m->config.vocab, i, prompt;
    seqpar_sample_args a;
    double bad;
    memset(&a, 0, sizeof a);
    for (i = 0; i < s->live_count; i++) {
        prompt = s->slot[s->live[i]].prompt;
        s->u[i] = seqpar_random_uniform(
            d->seed, (uint64_t)s->prompts[prompt].number,
            (uint64_t)(s->prompts[prompt].tokens + s->texts[prompt].count));
    }
    a.logits.data = s->logits.data;
    a.logits.stride = vocab;
    a.rows = s->live_count;
    a.vocab = vocab;
    a.top_k = d->top_k;
    a.temperature = d->temperature;
    a.top_p = d->top_p;
    a.u = s->u;
    a.ids = s->chosen;
    SEQPAR__LLAMA_TRY(s->ctx->device->sample(s->ctx->device, &a, s->ctx->queue));
    /* a row with a logit that is not finite gets the id -1 - its token */
    for (i = 0; i < s->live_count && s->chosen[i] >= 0;) i++;
    if (i == s->live_count) return seqpar__llama_sample_logp(s);
    prompt = s->slot[s->live[i]].prompt;
    seqpar_device_read(s->ctx->device, &bad, s->logits.data, i * vocab - 1 - s->chosen[i], 1,
                       s->ctx->device->storage);
    return seqpar_fail(s->ctx->error, SEQPAR_ERR_NOT_FINITE,
                       "prompt %lld (number %lld): at position %lld the logit of token %lld is "
                       "%g; are the parameters finite?",
                       (long long)prompt, (long long)s->prompts[prompt].number,
                       (long long)(s->prompts[prompt].tokens + s->texts[prompt].count),
                       (long long)(-1 - s->chosen[i]), bad);
}

/* ---- steps ---- */

/* Gives free slots to the next prompts while the step has at most rows_max tokens. */
static seqpar_status seqpar__llama_sample_admit(seqpar__llama_sampler *s) {
    int64_t rows = 0;
    for (int64_t i = 0; i < s->slots; i++) rows += s->slot[i].prompt >= 0;
    for (int64_t i = 0; i < s->slots && s->next < s->count; i++) {
        const seqpar_llama_prompt *p = &s->prompts[s->next];
        if (s->slot[i].prompt >= 0 || rows + p->tokens > s->rows_max) continue;
        s->texts[s->next].ids = SEQPAR__LLAMA_NEW(int32_t,
                                                  seqpar__llama_new_tokens_max(s->d, p));
        s->texts[s->next].logp = SEQPAR__LLAMA_NEW(double,
                                                   seqpar__llama_new_tokens_max(s->d, p));
        if (!s->texts[s->next].ids || !s->texts[s->next].logp)
            return seqpar__llama_no_memory(s->ctx->error, "a text");
        rows += p->tokens;
        s->slot[i].fed = 0;
        s->slot[i].prompt = s->next++;
    }
    return SEQPAR_OK;
}

/* The first position in the window of a query that sees the positions before `end`. */
static int64_t seqpar__llama_window_begin(const seqpar_llama_config *c, int64_t end) {
    return c->window ? SEQPAR__LLAMA_MAX(end - c->window, 0) : 0;
}

static void seqpar__llama_set_visible(const seqpar_llama_config *c, seqpar__llama_attn_list *l,
                                      int64_t query, int64_t end) {
    l->windowed.begin[query] = (int32_t)seqpar__llama_window_begin(c, end);
    l->end[query] = (int32_t)end;
}

/* Adds a prompt's tasks: one per cell of queries, over the keys of this step. */
static seqpar_status seqpar__llama_sample_prompt(seqpar__llama_sampler *s,
                                                 const seqpar__llama_slot *slot) {
    const seqpar_llama_config *f = &s->m->config;
    int64_t end;
    for (int64_t i = 0, c = 1; i < slot->rows; i = end, c++) {
        end = SEQPAR__LLAMA_MIN(seqpar_cell_begin(s->d->cell, c), slot->rows);
        seqpar__llama_task b = {slot->first + i, i,   end - i,
                                slot->first,     end, seqpar__llama_window_begin(f, i + 1)};
        SEQPAR__LLAMA_TRY(seqpar__llama_attn_list_add(&s->prompt_tasks, s->d->cell, &b));
    }
    for (int64_t i = 0; i < slot->rows; i++)
        seqpar__llama_set_visible(f, &s->prompt_tasks, slot->first + i, i + 1);
    return SEQPAR_OK;
}

/* Adds a token's tasks: one per kv head, over the cache; its queries are that head's query
   heads. */
static seqpar_status seqpar__llama_sample_token(seqpar__llama_sampler *s,
                                                const seqpar__llama_slot *slot) {
    const seqpar_llama_config *f = &s->m->config;
    int64_t group = f->heads / f->kv_heads, end = slot->fed + 1;
    for (int64_t i = 0; i < f->heads; i++)
        seqpar__llama_set_visible(f, &s->token_tasks, slot->first * f->heads + i, end);
    for (int64_t i = 0; i < f->kv_heads; i++) {
        int64_t k_row = (i * s->slots + (slot - s->slot)) * s->capacity;
        seqpar__llama_task b = {
            slot->first * f->heads + i * group, slot->fed, group, k_row, end,
            seqpar__llama_window_begin(f, end)};
        SEQPAR__LLAMA_TRY(seqpar__llama_attn_list_add(&s->token_tasks, s->d->cell, &b));
    }
    return SEQPAR_OK;
}

/* Adds a text's rows and tasks to this step. */
static seqpar_status seqpar__llama_sample_feed(seqpar__llama_sampler *s,
                                               seqpar__llama_slot *slot) {
    const seqpar_llama_prompt *p = &s->prompts[slot->prompt];
    const seqpar_llama_text *text = &s->texts[slot->prompt];
    slot->first = s->b.tokens;
    slot->rows = p->tokens + text->count - slot->fed;
    for (int64_t t = slot->fed; t < slot->fed + slot->rows; t++) {
        s->b.ids[s->b.tokens] = t < p->tokens ? p->ids[t] : text->ids[t - p->tokens];
        s->b.positions[s->b.tokens++] = (int32_t)t;
    }
    s->last[s->live_count] = (int32_t)(s->b.tokens - 1);
    s->live[s->live_count++] = slot - s->slot;
    return slot->fed ? seqpar__llama_sample_token(s, slot)
                     : seqpar__llama_sample_prompt(s, slot);
}

/* Lays out the step: first the texts that continue (a token each), then the new prompts, so that
   the queries of token_tasks are in the first rows. */
static seqpar_status seqpar__llama_sample_layout(seqpar__llama_sampler *s) {
    seqpar__llama_attn_list *lists[] = {&s->prompt_tasks, &s->token_tasks};
    s->b.tokens = s->live_count = 0;
    for (int i = 0; i < 2; i++)
        lists[i]->count = lists[i]->key_count = lists[i]->whole.count =
            lists[i]->windowed.count = 0;
    for (int fresh = 0; fresh < 2; fresh++)
        for (int64_t i = 0; i < s->slots; i++)
            if (s->slot[i].prompt >= 0 && (s->slot[i].fed == 0) == fresh)
                SEQPAR__LLAMA_TRY(seqpar__llama_sample_feed(s, &s->slot[i]));
    return SEQPAR_OK;
}

/* Logits (live_count, vocab) after each text's last token */
static seqpar_status seqpar__llama_sample_forward(seqpar__llama_sampler *s) {
    seqpar__llama_layer_call c = seqpar__llama_call(s->ctx, s->m, &s->b);
    c.sampler = s;
    SEQPAR__LLAMA_TRY(seqpar__llama_layers(&c, 0));
    SEQPAR__LLAMA_TRY(
        seqpar__llama_gather_rows(&c, s->b.n.data, s->b.x.data, s->last, s->live_count));
    c.tile.rows = s->b.tokens = s->live_count;
    SEQPAR__LLAMA_TRY(seqpar__llama_norm(&c, s->b.hidden.data, s->b.n.data, s->b.rstd.data,
                                         seqpar__llama_final_norm(s->m)));
    return seqpar__llama_linear(&c, s->logits.data, s->b.hidden.data, seqpar__llama_head(s->m),
                                0, 0);
}

static int seqpar__llama_sample_stops(const seqpar_llama_sample_desc *d, int32_t id) {
    for (int64_t i = 0; i < d->stop_count; i++)
        if (d->stops[i] == id) return 1;
    return 0;
}

static seqpar_status seqpar__llama_sample_step(seqpar__llama_sampler *s) {
    SEQPAR__LLAMA_TRY(seqpar__llama_sample_admit(s));
    SEQPAR__LLAMA_TRY(seqpar__llama_sample_layout(s));
    SEQPAR__LLAMA_TRY(seqpar__llama_sample_forward(s));
    SEQPAR__LLAMA_TRY(seqpar__llama_sample_tokens(s));
    for (int64_t i = 0; i < s->live_count; i++) {
        seqpar__llama_slot *slot = &s->slot[s->live[i]];
        seqpar_llama_text *text = &s->texts[slot->prompt];
        text->ids[text->count++] = s->chosen[i];
        text->stopped = seqpar__llama_sample_stops(s->d, s->chosen[i]);
        slot->fed += slot->rows;
        if (text->stopped ||
            text->count == seqpar__llama_new_tokens_max(s->d, &s->prompts[slot->prompt]))
            slot->prompt = -1;
    }
    return SEQPAR_OK;
}

/* ---- memory of the sampler ---- */

static void seqpar__llama_sampler_sizes(seqpar__llama_sampler *s) {
    int64_t longest = 0;
    s->slots = SEQPAR__LLAMA_MIN(s->d->batch ? s->d->batch : 16, s->count);
    for (int64_t i = 0; i < s->count; i++) {
        longest = SEQPAR__LLAMA_MAX(longest, s->prompts[i].tokens);
        /* the last token is never fed */
        s->capacity = SEQPAR__LLAMA_MAX(
            s->capacity,
            s->prompts[i].tokens + seqpar__llama_new_tokens_max(s->d, &s->prompts[i]) - 1);
    }
    s->rows_max = SEQPAR__LLAMA_MAX(
        longest + s->slots, SEQPAR__LLAMA_MIN(SEQPAR__LLAMA_PROMPT_ROWS, longest * s->slots));
}

/* A bound on the number of whole cells in the prompts of one step. */
static int64_t seqpar__llama_cells_max(const seqpar__llama_sampler *s) {
    return s->rows_max / seqpar_cell_begin(s->d->cell, 1) + 1;
}

static int seqpar__llama_sampler_lists(seqpar__llama_sampler *s) {
    const seqpar_llama_config *f = &s->m->config;
    s->slot = SEQPAR__LLAMA_NEW(seqpar__llama_slot, s->slots);
    s->live = SEQPAR__LLAMA_NEW(int64_t, s->slots);
    s->last = SEQPAR__LLAMA_NEW(int32_t, s->slots);
    s->u = SEQPAR__LLAMA_NEW(double, s->slots);
    s->chosen = SEQPAR__LLAMA_NEW(int32_t, s->slots);
    s->b.ids = SEQPAR__LLAMA_NEW(int32_t, 2 * s->rows_max);
    s->b.layers = SEQPAR__LLAMA_NEW(seqpar_llama_layer, f->layers);
    if (!s->slot || !s->live || !s->last || !s->u || !s->chosen || !s->b.ids || !s->b.layers)
        return 0;
    s->b.positions = s->b.ids + s->rows_max;
    for (int64_t i = 0; i < s->slots; i++) s->slot[i].prompt = -1;
    int64_t cells = seqpar_cell_of(s->d->cell, s->capacity) + 1;
    return seqpar__llama_attn_list_new(&s->prompt_tasks, s->slots + seqpar__llama_cells_max(s),
                                       s->rows_max, s->d->cell, cells) &&
           seqpar__llama_attn_list_new(&s->token_tasks, s->slots * f->kv_heads,
                                       s->slots * f->heads, s->d->cell, cells);
}

static seqpar_status seqpar__llama_sampler_open(seqpar__llama_sampler *s) {
    const seqpar_llama_config *f = &s->m->config;
    int64_t size = seqpar_dtype_bytes(s->ctx->device->storage), rows;
    seqpar__llama_layer_call c = seqpar__llama_call(s->ctx, s->m, &s->b);
    s->b.config = *f;
    seqpar__llama_sampler_sizes(s);
    if (!seqpar__llama_sampler_lists(s)) return seqpar__llama_no_memory(s->ctx->error, "texts");
    SEQPAR__LLAMA_TRY(seqpar__llama_rope_tables(s->ctx, s->m, s->capacity));
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(s->ctx, &s->keys,
                                        f->layers * seqpar__llama_cache_layer(s) * size,
                                        SEQPAR_MEM_ACTIVATIONS));
    SEQPAR__LLAMA_TRY(
        seqpar_buffer_new(s->ctx, &s->values, s->keys.bytes, SEQPAR_MEM_ACTIVATIONS));
    SEQPAR__LLAMA_TRY(
        seqpar_buffer_new(s->ctx, &s->logits, s->slots * f->vocab * size, SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(s->ctx, &s->logp, s->slots * 8, SEQPAR_MEM_SCRATCH));
    rows = s->b.tokens = s->rows_max; /* buffers for the largest step */
    SEQPAR__LLAMA_TRY(
        seqpar_buffer_new(s->ctx, &s->b.x, rows * f->hidden * size, SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(
        seqpar_buffer_new(s->ctx, &s->b.n, rows * f->hidden * size, SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(s->ctx, &s->b.hidden, s->slots * f->hidden * size,
                                        SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(
        s->ctx, &s->b.wide, rows * seqpar__llama_widest(f) * size, SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(seqpar_buffer_new(s->ctx, &s->b.rstd,
                                        rows * seqpar_dtype_bytes(s->ctx->device->accumulator),
                                        SEQPAR_MEM_SCRATCH));
    SEQPAR__LLAMA_TRY(seqpar__llama_ones(s->ctx, &s->b, rows));
    SEQPAR__LLAMA_TRY(seqpar__llama_adapted_scratch(s->ctx, s->m, &s->b));
    SEQPAR__LLAMA_TRY(seqpar__llama_experts_new(s->ctx, &s->b, rows, 1));
    return seqpar__llama_layer_call_open(&c, 0);
}

static void seqpar__llama_sampler_close(seqpar__llama_sampler *s) {
    seqpar_buffer_free(s->ctx, &s->keys);
    seqpar_buffer_free(s->ctx, &s->values);
    seqpar_buffer_free(s->ctx, &s->logits);
    seqpar_buffer_free(s->ctx, &s->logp);
    seqpar_llama_close_batch(s->ctx, s->m, &s->b);
    seqpar__llama_attn_list_free(&s->prompt_tasks);
    seqpar__llama_attn_list_free(&s->token_tasks);
    SEQPAR_FREE(s->slot);
    SEQPAR_FREE(s->live);
    SEQPAR_FREE(s->last);
    SEQPAR_FREE(s->u);
    SEQPAR_FREE(s->chosen);
}

SEQPAR_DEF void seqpar_llama_texts_free(seqpar_llama_text *texts, int64_t count) {
    SEQPAR_MUST("texts", SEQPAR_IF(count > 0, texts));
    for (int64_t i = 0; i < count; i++) {
        SEQPAR_FREE(texts[i].ids);
        SEQPAR_FREE(texts[i].logp);
        memset(&texts[i], 0, sizeof *texts);
    }
}

SEQPAR_DEF seqpar_status seqpar_llama_generate(seqpar_ctx *ctx, seqpar_llama *m,
                                               seqpar_llama_text *texts,
                                               const seqpar_llama_prompt *prompts,
                                               int64_t count,
                                               const seqpar_llama_sample_desc *d) {
    SEQPAR_NEED(SEQPAR_ERROR_OF(ctx), "ctx, model, texts, prompts, desc", ctx, m,
                SEQPAR_IF(count > 0, texts), SEQPAR_IF(count > 0, prompts), d);
    seqpar__llama_sampler s;
    seqpar_status status;
    int64_t growing = 1;
    SEQPAR__LLAMA_TRY(seqpar__llama_check_adapters(ctx->error, m));
    SEQPAR__LLAMA_TRY(seqpar__llama_check_sample(ctx->error, &m->config, d, count));
    for (int64_t i = 0; i < count; i++) memset(&texts[i], 0, sizeof *texts);
    for (int64_t i = 0; i < count; i++)
        SEQPAR__LLAMA_TRY(
            seqpar__llama_check_prompt(ctx->error, &m->config, d, &prompts[i], i));
    if (count == 0) return SEQPAR_OK;
    if (!m->params.data || (m->adapters && !m->adapters->params.data))
        return seqpar_fail(ctx->error, SEQPAR_ERR_STEP,
                           "the model's parameters are at their owners alone, but every rank "
                           "makes texts of its own; call seqpar_llama_gather first");
    memset(&s, 0, sizeof s);
    s.ctx = ctx;
    s.m = m;
    s.d = d;
    s.prompts = prompts;
    s.texts = texts;
    s.count = count;
    status = seqpar__llama_sampler_open(&s);
    while (!status && growing) {
        status = seqpar__llama_sample_step(&s);
        growing = s.next < count;
        for (int64_t i = 0; i < s.slots; i++) growing |= s.slot[i].prompt >= 0;
    }
    seqpar__llama_sampler_close(&s);
    if (status) seqpar_llama_texts_free(texts, count);
    return status;
}

#if !defined(__clang__) && defined(__GNUC__)
#pragma GCC pop_options
#endif
#endif /* SEQPAR_LLAMA_IMPLEMENTATION */
