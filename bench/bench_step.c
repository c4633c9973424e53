/* SPDX-License-Identifier: MIT OR Unlicense */
/* What a step costs beside its products, on one thread: a model of SmolLM2's shape (30 layers of
   width 576, a vocabulary of 49,152), whole and with adapters of rank 16 on every matrix, in fp32
   and in four bits, with tiles of the MLP, recompute, and activations in the second pool.

   Products are the device's matmul, weight_grad and attention: what the step cannot do without.
   Everything else counts as overhead: norms, rotation, SwiGLU, softmax over the vocabulary, folds,
   the update. Before it is timed a way's loss and gradient norm are compared: bit for bit with the
   same step without the option, or, in four bits, with a model whose weights are those that the
   codes stand for. Peaks are of all memory that a context counts.

       bench_step [TOKENS] [--tiny] */
#include "bench.h"
#include "seqpar_llama.h"

enum { ROUNDS = 3 };

/* ---- a device that measures the time of its products ---- */

static double product_seconds;
static seqpar_device plain; /* the operations that the timed ones call */

#define TIMED(op, args) \
    static seqpar_status timed_##op(seqpar_device *d, const args *a, void *queue) { \
        double began = now(); \
        seqpar_status status = plain.op(d, a, queue); \
        product_seconds += now() - began; \
        return status; \
    }
TIMED(matmul, seqpar_matmul_args)
TIMED(weight_grad, seqpar_weight_grad_args)
TIMED(attn_forward, seqpar_attn_args)
TIMED(attn_backward, seqpar_attn_backward_args)

static seqpar_device *timed_device(void) {
    seqpar_device *d = seqpar_device_cpu(1);
    plain = *d;
    d->matmul = timed_matmul;
    d->weight_grad = timed_weight_grad;
    d->attn_forward = timed_attn_forward;
    d->attn_backward = timed_attn_backward;
    return d;
}

/* ---- a model, and steps of it ---- */

typedef struct way {
    const char *name;
    int adapters, four_bits;
    seqpar_llama_batch_desc desc;
    int like;      /* the way whose bits it must have; -1: none */
    double wanted; /* step over products; 0: none */
} way;

typedef struct world {
    seqpar_comm *self;
    seqpar_ctx ctx;
    seqpar_llama model, adapters;
    seqpar_optim optim;
} world;

typedef struct outcome {
    double loss, norm, seconds, products;
    seqpar_memory memory;
} outcome;

static void must(const world *w, seqpar_status status) {
    if (!status) return;
    fprintf(stderr, "error: %s\n", w->self->error->text);
    exit(1);
}

static seqpar_llama_config config_of(const way *v) {
    return (seqpar_llama_config){.layers = size_or_tiny(30, 3),
                                 .hidden = size_or_tiny(576, 64),
                                 .heads = size_or_tiny(9, 3),
                                 .kv_heads = size_or_tiny(3, 1),
                                 .head_dim = size_or_tiny(64, 16),
                                 .intermediate = size_or_tiny(1536, 96),
                                 .vocab = size_or_tiny(49152, 257),
                                 .tied = 1,
                                 .four_bits = v->four_bits};
}

/* B is not 0, so that every product of the adapters has a part in the loss. */
static void adapters_fill(world *w) {
    must(w, seqpar_llama_init(&w->ctx, &w->adapters, 3));
    for (int64_t i = 0; i < w->adapters.tensor_count; i++) {
        const seqpar_tensor *t = &w->adapters.tensors[i];
        int64_t count = t->rows * t->cols;
        double *x = malloc((size_t)count * sizeof *x);
        if (!strstr(t->name, ".lora_B.")) {
            free(x);
            continue;
        }
        for (int64_t n = 0; n < count; n++)
            x[n] = .01 * seqpar_random_normal(4, (uint64_t)i, (uint64_t)n);
        must(w, seqpar_llama_write(&w->ctx, &w->adapters, x, i, 0, count));
        free(x);
    }
}

static void world_open(world *w, const way *v) {
    seqpar_llama_config config = config_of(v);
    seqpar_adapter_desc adapter = {.rank = 16, .scale = 2, .targets = SEQPAR_ADAPT_ALL};
    seqpar_optim_desc desc = {.kind = SEQPAR_OPTIM_ADAMW,
                              .beta1 = .9,
                              .beta2 = .95,
                              .eps = 1e-8,
                              .decay = .1,
                              .max_norm = 1};
    memset(w, 0, sizeof *w);
    w->self = seqpar_comm_self();
    must(w, seqpar_ctx_open(&w->ctx, w->self, timed_device(), 1));
    must(w, seqpar_llama_open(&w->ctx, &w->model, &config));
    must(w, seqpar_llama_init(&w->ctx, &w->model, 2));
    if (v->adapters) {
        must(w, seqpar_llama_open_adapters(&w->ctx, &w->adapters, &w->model, &adapter, 0, 0));
        adapters_fill(w);
        w->model.adapters = &w->adapters;
    }
    const seqpar_llama *learner = v->adapters ? &w->adapters : &w->model;
    must(w,
         seqpar_optim_open(&w->ctx, &w->optim, learner->tensors, learner->tensor_count, &desc));
}

static void world_close(world *w) {
    seqpar_device *device = w->ctx.device;
    seqpar_optim_close(&w->ctx, &w->optim);
    if (w->model.adapters) seqpar_llama_close(&w->ctx, &w->adapters);
    seqpar_llama_close(&w->ctx, &w->model);
    seqpar_ctx_close(&w->ctx);
    seqpar_device_close(device);
    seqpar_comm_free(w->self);
}

/* The weights that the codes of a model in four bits stand for, in one that has none. */
static void copy_weights(world *to, world *from) {
    for (int64_t i = 0; i < to->model.tensor_count; i++) {
        const seqpar_tensor *t = &to->model.tensors[i];
        double *x = malloc((size_t)(t->rows * t->cols) * sizeof *x);
        must(from, seqpar_llama_read(&from->ctx, &from->model, x, i, 0, t->rows * t->cols));
        must(to, seqpar_llama_write(&to->ctx, &to->model, x, i, 0, t->rows * t->cols));
        free(x);
    }
}

static double loss_of(world *w, const seqpar_llama_batch *b) {
    double sum = 0, logp;
    for (int64_t t = 0; t < b->tokens; t++) {
        seqpar_device_read(w->ctx.device, &logp, b->logp.data, t, 1, SEQPAR_DTYPE_F32);
        if (b->targets[t] != SEQPAR_IGNORE) sum -= logp;
    }
    return sum;
}

/* The mean of log-probs has the same seed for every token that has a target. */
static void seeds_fill(world *w, const seqpar_llama_batch *b, int64_t count,
                       seqpar_buffer *seeds) {
    must(w, seqpar_buffer_new(&w->ctx, seeds, b->tokens * 4, SEQPAR_MEM_ACTIVATIONS));
    for (int64_t t = 0; t < b->tokens; t++) {
        double seed = b->targets[t] == SEQPAR_IGNORE ? 0 : -1 / (double)count;
        seqpar_device_write(w->ctx.device, seeds->data, t, &seed, 1, SEQPAR_DTYPE_F32);
    }
}

static outcome step(world *w, const way *v, const seqpar_batch *batch) {
    outcome o = {0};
    seqpar_llama_batch b;
    seqpar_buffer seed;
    double began = now();
    product_seconds = 0;
    must(w, seqpar_step_begin(&w->ctx, &w->optim, batch->row, 1, v->desc.layout, 1));
    must(w, seqpar_llama_open_batch(&w->ctx, &w->model, &b, batch->row, 1, &v->desc));
    seeds_fill(w, &b, batch->counts.supervised, &seed);
    seqpar_vocab_seeds seeds = {.dlogp = seed.data};
    must(w, seqpar_llama_forward(&w->ctx, &w->model, &b, 1));
    must(w, seqpar_llama_backward(&w->ctx, &w->model, &b, &w->optim, 0, &seeds));
    o.loss = loss_of(w, &b);
    int64_t elements;
    void *params = seqpar_llama_trainable(&w->model, &elements);
    must(w, seqpar_step_end(&w->ctx, &w->optim, params, elements, 0));
    seqpar_buffer_free(&w->ctx, &seed);
    seqpar_llama_close_batch(&w->ctx, &w->model, &b);
    o.seconds = now() - began;
    o.products = product_seconds;
    o.norm = w->optim.norm;
    o.memory = w->ctx.memory;
    return o;
}

/* The best of some steps: with a rate of 0 all of them have the same loss and norm. */
static outcome best_step(const way *v, const way *weights_of, const seqpar_batch *batch) {
    world w, from;
    outcome best = {0};
    world_open(&w, v);
    if (weights_of) {
        world_open(&from, weights_of);
        copy_weights(&w, &from);
        world_close(&from);
    }
    for (int round = 0; round < size_or_tiny(ROUNDS, 1); round++) {
        outcome o = step(&w, v, batch);
        if (!round || o.seconds < best.seconds) best = o;
    }
    world_close(&w);
    return best;
}

static int same(double a, double b) { return a == a && !memcmp(&a, &b, sizeof a); }

static void print_case(report *r, const way *v, const outcome *o, int right) {
    const int64_t *peak = o->memory.peak;
    double bound = (double)peak[SEQPAR_MEM_WEIGHTS] +
                   1.2 * (double)peak[SEQPAR_MEM_ACTIVATIONS];
    char wanted[16] = "";
    if (v->wanted > 0) snprintf(wanted, sizeof wanted, "%.2f", v->wanted);
    printf("%-28s %9.3f %9.3f %8.3f %7s %9.1f %9.1f %9.1f %8.2f%s\n", v->name, o->seconds,
           o->products, o->seconds / o->products, wanted, (double)o->memory.total_peak / 1e6,
           (double)peak[SEQPAR_MEM_WEIGHTS] / 1e6, (double)peak[SEQPAR_MEM_ACTIVATIONS] / 1e6,
           (double)o->memory.total_peak / bound, right ? "" : "  WRONG");
    report_case(r, right,
                "\"way\": \"%s\", \"seconds\": %.6f, \"products\": %.6f, \"over_products\": "
                "%.4f, \"peak\": %lld, \"weights\": %lld, \"activations\": %lld, \"of_bound\": "
                "%.4f",
                v->name, o->seconds, o->products, o->seconds / o->products,
                (long long)o->memory.total_peak, (long long)peak[SEQPAR_MEM_WEIGHTS],
                (long long)peak[SEQPAR_MEM_ACTIVATIONS], (double)o->memory.total_peak / bound);
}

static void batch_of(seqpar_batch *batch, int64_t tokens, int64_t vocab) {
    int32_t *ids = malloc((size_t)tokens * sizeof *ids);
    seqpar_document document = {.ids = ids, .tokens = tokens};
    seqpar_pack_desc desc = {.pack_len = tokens, .order = SEQPAR_PACK_IN_ORDER};
    seqpar_error error = {0};
    for (int64_t i = 0; i < tokens; i++)
        ids[i] = (int32_t)(mixed((uint64_t)i) % (uint64_t)vocab);
    if (seqpar_pack(&error, batch, &document, 1, &desc)) {
        fprintf(stderr, "error: %s\n", error.text);
        exit(1);
    }
    free(ids);
}

int main(int argc, char **argv) {
    argc = take_arguments(argc, argv, 1);
    int64_t tokens = argc > 1 ? strtoll(argv[1], NULL, 10) : size_or_tiny(1024, 96);
    if (tokens < 2 || tokens > SEQPAR_MAX_TOKENS) {
        fprintf(stderr, "bench_step: %s tokens; give 2 or more\n", argv[1]);
        return 2;
    }
    const way ways[] = {
        {"whole model", .like = -1},
        {"  recompute", .desc.recompute = 1},
        {"  recompute, second pool", .desc.recompute = 2},
        {"  tiles of the MLP", .desc.mlp_rows = 256},
        {"adapters", .adapters = 1, .like = -1, .wanted = 1.05},
        {"  recompute", .adapters = 1, .desc.recompute = 1, .like = 4},
        {"  recompute, second pool", .adapters = 1, .desc.recompute = 2, .like = 4},
        {"  tiles of the MLP", .adapters = 1, .desc.mlp_rows = 256, .like = 4},
        {"  in four bits", .adapters = 1, .four_bits = 1, .like = -1},
    };
    enum { WAYS = sizeof ways / sizeof *ways };
    outcome o[WAYS];
    seqpar_batch batch;
    report r;
    seqpar_llama_config config = config_of(&ways[0]);
    batch_of(&batch, tokens, config.vocab);
    report_open(&r, "step", "\"device\": \"cpu\", \"threads\": 1, \"tokens\": %lld,",
                (long long)tokens);
    printf(
        "a step beside its products: %lld layers of width %lld, vocabulary %lld, one document "
        "of %lld tokens; processor time of one thread, fp32; adapters have rank 16; memory in "
        "MB, `of bound`: the peak over weights + 1.2 activations\n\n",
        (long long)config.layers, (long long)config.hidden, (long long)config.vocab,
        (long long)tokens);
    printf("%-28s %9s %9s %8s %7s %9s %9s %9s %8s\n", "", "step s", "products", "step /",
           "wanted", "peak", "weights", "activat.", "of bound");
    for (int i = 0; i < WAYS; i++) {
        const way *v = &ways[i];
        way dequantized = *v;
        dequantized.four_bits = 0;
        o[i] = best_step(v, NULL, &batch);
        outcome like = v->four_bits ? best_step(&dequantized, v, &batch)
                                    : o[v->like < 0 ? i : v->like];
        print_case(&r, v, &o[i],
                   same(o[i].loss, like.loss) && same(o[i].norm, like.norm) && o[i].loss > 0 &&
                       o[i].norm > 0);
    }
    seqpar_batch_free(&batch);
    return report_close(&r);
}
