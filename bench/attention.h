/* SPDX-License-Identifier: MIT OR Unlicense */
/* Attention of one document on any number of ranks: what bench_cpu, bench_chunks and
   bench_ranks open, call and compare. */

enum { CHUNK = 128, TENSORS = 9 };
enum { Q, K, V, DOUT, OUT, LSE, DQ, DK, DV };
static const char *const tensor_names[TENSORS] = {"q",   "k",  "v",  "dout", "out",
                                                  "lse", "dq", "dk", "dv"};

typedef struct attention {
    seqpar_ctx ctx;
    seqpar_device *device;
    seqpar_attn *attn;
    seqpar_row row;
    int64_t cu[2];
    seqpar_attn_desc desc;
    void *x[TENSORS];
    seqpar_attn_io io;
} attention;

static inline void forward_call(void *user) {
    attention *a = user;
    seqpar_attn_forward(&a->ctx, a->attn, &a->io);
}

static inline void backward_call(void *user) {
    attention *a = user;
    seqpar_attn_backward(&a->ctx, a->attn, &a->io);
}

/* Numbers of one token in a tensor. */
static inline int64_t tensor_width(const seqpar_attn_desc *d, int tensor) {
    int of_keys = tensor == K || tensor == V || tensor >= DK;
    return (of_keys ? d->kv_heads : d->heads) * (tensor == LSE ? 1 : d->head_dim);
}

/* The inputs are those of one rank, whoever holds them: numbers by token, of which this rank
   takes its own. The device is closed with the rest. */
static inline void attention_open(attention *a, seqpar_comm *world, seqpar_device *device,
                                  int64_t tokens, int64_t cell, seqpar_attn_desc desc) {
    const seqpar_share *mine;
    int64_t n, count;
    int i;
    memset(a, 0, sizeof *a);
    a->desc = desc;
    a->cu[1] = tokens;
    a->row = (seqpar_row){.tokens = tokens, .cell = cell, .docs = 1, .cu_seqlens = a->cu};
    a->device = device;
    if (seqpar_ctx_open(&a->ctx, world, device, world->size) ||
        seqpar_attn_open(&a->ctx, &a->attn, &a->row, 1, &desc)) {
        fprintf(stderr, "%s\n", world->error->text);
        exit(1);
    }
    mine = seqpar_attn_share(a->attn);
    for (i = 0; i < TENSORS; i++) {
        int64_t width = tensor_width(&desc, i);
        float *values = random_floats(tokens * width, (uint64_t)i + 10);
        float *own = malloc((size_t)(tokens * width) * sizeof *own);
        seqpar_scatter(own, values, mine, 0, width * (int64_t)sizeof *own);
        count = mine->tokens * width;
        a->x[i] = device->alloc(device, count * seqpar_dtype_bytes(device->storage));
        for (n = 0; n < count; n++) {
            double x = own[n];
            seqpar_device_write(device, a->x[i], n, &x, 1, device->storage);
        }
        free(values);
        free(own);
    }
    a->io = (seqpar_attn_io){.q = a->x[Q],
                             .k = a->x[K],
                             .v = a->x[V],
                             .out = a->x[OUT],
                             .lse = a->x[LSE],
                             .dout = a->x[DOUT],
                             .dq = a->x[DQ],
                             .dk = a->x[DK],
                             .dv = a->x[DV]};
}

static inline void attention_close(attention *a) {
    int i;
    for (i = 0; i < TENSORS; i++) a->device->free(a->device, a->x[i]);
    seqpar_attn_close(&a->ctx, a->attn);
    seqpar_ctx_close(&a->ctx);
    seqpar_device_close(a->device);
}
