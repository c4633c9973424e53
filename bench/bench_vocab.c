/* SPDX-License-Identifier: MIT OR Unlicense */
/* The token layer - log-probs of a large vocabulary, chunk by chunk - against the
   matrix products it cannot do without, one thread: three with known seeds (entry B: logits,
   dhidden, dtable), four where the seeds hang on the values (entry A, then B). Prints a
   table and writes build/bench/vocab.json. */
#include "bench.h"

enum { HIDDEN = 512, CHUNK_ROWS = 256 };
static int vocab = 32000, tokens = 8192;
static int part = 2048; /* products are timed on so many rows */

typedef struct token_layer {
    seqpar_ctx ctx;
    seqpar_row row;
    seqpar_share share;
    seqpar_optim optim;
    seqpar_tensor tensor;
    seqpar_vocab_desc desc;
    const seqpar_token_fold *fold;
    float *hidden, *table, *dhidden, *nodes, *logp, *lse, *seed, *logits, *product;
    int32_t *targets;
} token_layer;

static void must(seqpar_status status, const token_layer *h) {
    if (status) {
        fprintf(stderr, "bench_vocab: %s\n", h->ctx.error->text);
        exit(1);
    }
}

static void entry_a(void *user) {
    token_layer *h = user;
    seqpar_vocab_io io = {.hidden = h->hidden,
                          .table = h->table,
                          .targets = h->targets,
                          .tokens = tokens,
                          .values = {.logp = h->logp, .lse = h->lse}};
    must(seqpar_vocab_forward(&h->ctx, &io, &h->desc), h);
}

static void entry_b(void *user) {
    token_layer *h = user;
    seqpar_vocab_io io = {.hidden = h->hidden,
                          .table = h->table,
                          .targets = h->targets,
                          .tokens = tokens,
                          .values = {.logp = h->logp},
                          .seeds = {.dlogp = h->seed},
                          .dhidden = h->dhidden,
                          .nodes = h->nodes,
                          .node_stride = (int64_t)vocab * HIDDEN};
    must(seqpar_vocab_backward(&h->ctx, &io, &h->share, h->fold, &h->desc), h);
}

static void entries_a_b(void *user) {
    entry_a(user);
    entry_b(user);
}

/* One of the three products, on part rows. */
static void product(token_layer *h, int which) {
    seqpar_device *d = h->ctx.device;
    static const seqpar_fold_op program[] = {{SEQPAR_FOLD_LEAF, 0}, {SEQPAR_FOLD_FINISH, 0}};
    seqpar_piece leaf = {.count = part, .stride = 1};
    seqpar_matmul_args logits = {
        {h->logits, vocab}, {h->hidden, HIDDEN}, {h->table, HIDDEN}, part, vocab, HIDDEN, 0, 0};
    seqpar_matmul_args dhidden = {{h->product, HIDDEN},
                                  {h->logits, vocab},
                                  {h->table, HIDDEN},
                                  part,
                                  HIDDEN,
                                  vocab,
                                  1,
                                  0};
    seqpar_weight_grad_args dtable = {{program, 2, 1, NULL, 0, h->product},
                                      &leaf,
                                      {h->logits, vocab},
                                      {h->hidden, HIDDEN},
                                      vocab,
                                      HIDDEN};
    must(which == 2 ? d->weight_grad(d, &dtable, NULL)
                    : d->matmul(d, which ? &dhidden : &logits, NULL),
         h);
}

static void product_logits(void *user) { product(user, 0); }
static void product_dhidden(void *user) { product(user, 1); }
static void product_dtable(void *user) { product(user, 2); }

static void token_layer_open(token_layer *h) {
    static int64_t cu[2];
    seqpar_optim_desc adamw = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
    memset(h, 0, sizeof *h);
    cu[1] = tokens;
    h->desc = (seqpar_vocab_desc){.hidden = HIDDEN, .vocab = vocab, .rows_max = CHUNK_ROWS};
    must(seqpar_ctx_open(&h->ctx, seqpar_comm_self(), seqpar_device_cpu(1), 1), h);
    h->row = (seqpar_row){.tokens = tokens, .cell = CHUNK_ROWS, .docs = 1, .cu_seqlens = cu};
    h->tensor = (seqpar_tensor){.name = "table", .rows = vocab, .cols = HIDDEN};
    must(seqpar_optim_open(&h->ctx, &h->optim, &h->tensor, 1, &adamw), h);
    must(seqpar_step_begin(&h->ctx, &h->optim, &h->row, 1, SEQPAR_LAYOUT_ZIGZAG, 1), h);
    must(seqpar_split(h->ctx.error, &h->share, &h->row, 1,
                      &(seqpar_split_desc){SEQPAR_LAYOUT_ZIGZAG, 1, 0}),
         h);
    must(seqpar_step_fold(&h->ctx, &h->optim, &h->fold, &h->share, 0), h);
    h->hidden = random_floats((int64_t)tokens * HIDDEN, 1);
    h->table = random_floats((int64_t)vocab * HIDDEN, 2);
    h->dhidden = random_floats((int64_t)tokens * HIDDEN, 3);
    h->nodes = random_floats(
        seqpar_vocab_node_count(&h->share, h->fold, &h->desc) * vocab * HIDDEN, 4);
    h->logp = random_floats(tokens, 5);
    h->lse = random_floats(tokens, 6);
    h->seed = random_floats(tokens, 7);
    h->logits = random_floats((int64_t)part * vocab, 8);
    h->product = random_floats((int64_t)vocab * HIDDEN, 9);
    h->targets = calloc((size_t)tokens, sizeof *h->targets);
    for (int64_t t = 0; t < tokens; t++) h->targets[t] = (int32_t)(t * 7919 % vocab);
    for (int64_t i = 0; i < (int64_t)vocab * HIDDEN; i++) h->table[i] *= 0.1f;
}

/* Some tokens in fp64: log-prob and dhidden. */
static double farthest(const token_layer *h) {
    double *p = malloc((size_t)vocab * sizeof *p), worst = 0;
    for (int64_t t = 0; t < tokens; t += size_or_tiny(1021, 83)) {
        distance d = {0, 0};
        double top = -INFINITY, sum = 0, e;
        for (int64_t j = 0; j < vocab; j++) {
            for (p[j] = 0, e = 0; e < HIDDEN; e++)
                p[j] += (double)h->hidden[t * HIDDEN + (int64_t)e] *
                        h->table[j * HIDDEN + (int64_t)e];
            top = fmax(top, p[j]);
        }
        for (int64_t j = 0; j < vocab; j++) sum += exp(p[j] - top);
        compare(&d, h->logp[t], p[h->targets[t]] - top - log(sum));
        for (int64_t i = 0; i < HIDDEN; i++) {
            double want = 0;
            for (int64_t j = 0; j < vocab; j++)
                want += ((j == h->targets[t]) - exp(p[j] - top) / sum) *
                        h->table[j * HIDDEN + i];
            compare(&d, h->dhidden[t * HIDDEN + i], want * h->seed[t]);
        }
        e = relative(&d);
        if (worst == worst && !(e <= worst)) worst = e; /* a NaN stays */
    }
    free(p);
    return worst;
}

static double best_of(call_fn call, token_layer *h) {
    double best = INFINITY;
    for (int i = 0; i < size_or_tiny(3, 1); i++) best = fmin(best, seconds_of(call, h, 1));
    return best;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        call_fn call;
        int products;
    } ways[] = {
        {"A", entry_a, 1}, {"B (seeds known)", entry_b, 3}, {"A, then B", entries_a_b, 4}};
    token_layer h;
    report r;
    double one[3], error;
    take_arguments(argc, argv, 0);
    if (tiny) vocab = 1009, tokens = part = 2 * CHUNK_ROWS;
    token_layer_open(&h);
    report_open(&r, "vocab",
                "\"device\": \"cpu\", \"threads\": 1, \"vocab\": %d, \"hidden\": %d, "
                "\"tokens\": %d, \"chunk\": %d,",
                vocab, HIDDEN, tokens, CHUNK_ROWS);
    printf("the token layer: vocab %d, hidden %d, %d tokens in chunks of %d; processor time of "
           "one thread; wanted: at most 1.20 of its products\n\n",
           vocab, HIDDEN, tokens, CHUNK_ROWS);
    printf("%-18s %9s %12s %12s %8s %9s\n", "entry", "products", "ms", "products ms", "ratio",
           "distance");
    entries_a_b(&h);
    error = farthest(&h);
    one[0] = best_of(product_logits, &h) * tokens / part;
    one[1] = best_of(product_dhidden, &h) * tokens / part;
    one[2] = best_of(product_dtable, &h) * tokens / part;
    for (int i = 0; i < 3; i++) {
        double took = best_of(ways[i].call, &h);
        double needs = ways[i].products == 1
                           ? one[0]
                           : one[0] * (ways[i].products - 2) + one[1] + one[2];
        printf("%-18s %9d %12.1f %12.1f %8.3f %9.1e%s\n", ways[i].name, ways[i].products,
               took * 1e3, needs * 1e3, took / needs, error, error <= 5e-6 ? "" : "  WRONG");
        report_case(&r, error <= 5e-6,
                    "\"entry\": \"%s\", \"ms\": %.2f, \"products_ms\": %.2f, \"ratio\": %.4f",
                    ways[i].name, took * 1e3, needs * 1e3, took / needs);
    }
    return report_close(&r);
}
