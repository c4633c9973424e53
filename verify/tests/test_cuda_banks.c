/* SPDX-License-Identifier: MIT OR Unlicense */
/* Tiles in shared memory are padded so that no load of a factor and no store of 16 bytes
   meets a bank twice (cuda_on_cpu.h counts): products, weight gradients, attention with
   heads of every width, in fp32 and bf16. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "support/test.h"

extern int cuda_on_cpu_count_words __attribute__((weak));
extern int64_t cuda_on_cpu_phases __attribute__((weak)),
    cuda_on_cpu_conflicts __attribute__((weak)), cuda_on_cpu_store_phases __attribute__((weak)),
    cuda_on_cpu_store_conflicts __attribute__((weak));

static seqpar_ctx ctx;

static void *zeros(int64_t count) {
    void *data = ctx.device->alloc(ctx.device, count * 4);
    ctx.device->zero(ctx.device, data, count * 4, NULL);
    return data;
}

static void begin(void) {
    (void)seqpar_device_settle(ctx.device, ctx.queue);
    cuda_on_cpu_phases = cuda_on_cpu_conflicts = cuda_on_cpu_store_phases =
        cuda_on_cpu_store_conflicts = 0;
}

/* half: in fp32 as many of the loads meet a bank twice */
static void end(seqpar_status status, const char *name, int64_t width, int half) {
    int64_t known;
    if (!status) status = seqpar_device_settle(ctx.device, ctx.queue);
    test_expect(!status, "%s", ctx.error->text);
    test_expect(cuda_on_cpu_phases > 0, "no load was counted");
    known = half && ctx.device->storage == SEQPAR_DTYPE_F32 ? cuda_on_cpu_phases / 2 : 0;
    test_expect(cuda_on_cpu_conflicts <= known, "%lld of %lld loads meet a bank again",
                (long long)cuda_on_cpu_conflicts, (long long)cuda_on_cpu_phases);
    /* 12 stores a line: every third 8 lie in two lines */
    known = ctx.device->storage == SEQPAR_DTYPE_BF16 && width == 96
                ? cuda_on_cpu_store_phases / 3
                : 0;
    test_expect(cuda_on_cpu_store_conflicts <= known, "%lld of %lld stores meet a bank again",
                (long long)cuda_on_cpu_store_conflicts, (long long)cuda_on_cpu_store_phases);
    test_end("cuda_banks_%s_%s_%lld: %lld loads, %lld stores",
             ctx.device->storage == SEQPAR_DTYPE_F32 ? "fp32" : "bf16", name, (long long)width,
             (long long)cuda_on_cpu_phases, (long long)cuda_on_cpu_store_phases);
}

static void test_products(int64_t n) {
    static const seqpar_fold_op program[] = {{SEQPAR_FOLD_LEAF, 0}, {SEQPAR_FOLD_FINISH, 0}};
    seqpar_device *d = ctx.device;
    void *x = zeros(n * n), *w = zeros(n * n), *y = zeros(n * n);
    seqpar_piece leaf = {.stride = 1, .count = n};
    seqpar_weight_grad_args g = {{program, 2, 1, NULL, 0, y}, &leaf, {x, n}, {w, n}, n, n};
    for (int transposed = 0; transposed < 2; transposed++) {
        seqpar_matmul_args a = {.y = {y, n},
                                .x = {x, n},
                                .w = {w, n},
                                .rows = n,
                                .out = n,
                                .in = n,
                                .transposed = transposed};
        begin();
        seqpar_status status = d->matmul(d, &a, NULL);
        /* rows whose terms go by pairs, in words: lane (g + 1, t) meets the bank of (g, t +
           2) */
        end(status, transposed ? "product_transposed" : "product", n, transposed);
    }
    begin();
    end(d->weight_grad(d, &g, NULL), "weight_gradient", n, 0);
    d->free(d, x);
    d->free(d, w);
    d->free(d, y);
}

static void test_attention(int64_t width) {
    enum { TOKENS = 40 };
    int64_t cu[2] = {0, TOKENS};
    seqpar_row row = {.tokens = TOKENS, .cell = (TOKENS + 1) / 2, .docs = 1, .cu_seqlens = cu};
    seqpar_attn_desc desc = {.heads = 2, .kv_heads = 1, .head_dim = width};
    seqpar_attn *attn = NULL;
    void *x[9];
    for (int i = 0; i < 9; i++) x[i] = zeros(TOKENS * 2 * width);
    seqpar_attn_io io = {.q = x[0],
                         .k = x[1],
                         .v = x[2],
                         .out = x[3],
                         .lse = x[4],
                         .dout = x[5],
                         .dq = x[6],
                         .dk = x[7],
                         .dv = x[8]};
    seqpar_status status = seqpar_attn_open(&ctx, &attn, &row, 1, &desc);
    begin();
    end(status ? status : seqpar_attn_forward(&ctx, attn, &io), "attention_forward", width, 0);
    begin();
    end(status ? status : seqpar_attn_backward(&ctx, attn, &io), "attention_backward", width,
        0);
    for (int i = 0; i < 9; i++) ctx.device->free(ctx.device, x[i]);
    seqpar_attn_close(&ctx, attn);
}

static void test_storage(seqpar_comm *self, int storage) {
    static const int64_t widths[] = {16, 32, 40, 64, 96, 128, 256};
    seqpar_cuda_desc desc = {.storage = storage};
    seqpar_device *device = seqpar_device_cuda(self->error, &desc);
    if (seqpar_ctx_open(&ctx, self, device, 1)) {
        test_expect(0, "%s", self->error->text);
        test_end("cuda_banks_device");
        return;
    }
    for (int64_t n = 64; n <= 136; n += 36) test_products(n);
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) test_attention(widths[i]);
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    if (!&cuda_on_cpu_count_words) {
        test_skip("cuda_banks", "a GPU does not count");
        return test_summary();
    }
    seqpar_comm *self = seqpar_comm_self();
    cuda_on_cpu_count_words = 1;
    TEST(test_storage(self, SEQPAR_DTYPE_F32));
    TEST(test_storage(self, SEQPAR_DTYPE_BF16));
    seqpar_comm_free(self);
    return test_summary();
}
