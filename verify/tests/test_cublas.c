/* SPDX-License-Identifier: MIT OR Unlicense */
/* Products by cuBLAS: right, and a row has the same bits whichever rows are with it and
   wherever it stands. Without a GPU cublas_on_cpu.h sums in another order for another shape. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "support/test.h"

extern int64_t cuda_on_cpu_fail_at __attribute__((weak)),
    cuda_on_cpu_calls __attribute__((weak));

enum { IN = 88, OUT = 72, MOST_ROWS = 600 };
typedef struct product {
    seqpar_device *device;
    int storage, transposed, accumulate;
    int64_t stride;              /* of x and y beyond their width */
    double *x, *w, *y;           /* as stored */
    void *dx, *dw, *dy, *before; /* before: the bytes of y */
} product;

static void *device_numbers(seqpar_device *device, double *host, int64_t count, int storage,
                            uint64_t stream) {
    void *data = device->alloc(device, count * seqpar_dtype_bytes(storage));
    for (int64_t i = 0; i < count; i++)
        host[i] = seqpar_random_normal(test_seed, stream, (uint64_t)i);
    seqpar_device_write(device, data, 0, host, count, storage);
    seqpar_device_read(device, host, data, 0, count, storage);
    return data;
}

static int64_t y_bytes(const product *p, int64_t rows) {
    return rows * (OUT + p->stride) * seqpar_dtype_bytes(p->storage);
}

static void product_open(product *p) {
    p->x = (double *)calloc((size_t)(MOST_ROWS * (IN + p->stride)), sizeof *p->x);
    p->y = (double *)calloc((size_t)(MOST_ROWS * (OUT + p->stride)), sizeof *p->y);
    p->w = (double *)calloc(IN * OUT, sizeof *p->w);
    p->dx = device_numbers(p->device, p->x, MOST_ROWS * (IN + p->stride), p->storage, 1);
    p->dy = device_numbers(p->device, p->y, MOST_ROWS * (OUT + p->stride), p->storage, 2);
    p->dw = device_numbers(p->device, p->w, IN * OUT, p->storage, 3);
    p->before = malloc((size_t)y_bytes(p, MOST_ROWS));
    p->device->copy(p->device, p->before, p->dy, y_bytes(p, MOST_ROWS), NULL);
}

static void product_close(product *p) {
    p->device->free(p->device, p->dx);
    p->device->free(p->device, p->dy);
    p->device->free(p->device, p->dw);
    free(p->x);
    free(p->y);
    free(p->w);
    free(p->before);
}

/* Rows first .. first + rows of the product into got, (rows, OUT + stride) as stored, from y
   as it was. */
static seqpar_status product_rows(product *p, int64_t first, int64_t rows, void *got) {
    int64_t size = seqpar_dtype_bytes(p->storage), y_row = OUT + p->stride;
    seqpar_matmul_args a;
    memset(&a, 0, sizeof a);
    a.x.data = (char *)p->dx + first * (IN + p->stride) * size;
    a.x.stride = IN + p->stride;
    a.y.data = (char *)p->dy + first * y_row * size;
    a.y.stride = y_row;
    a.w.data = p->dw;
    a.w.stride = p->transposed ? OUT : IN;
    a.rows = rows;
    a.out = OUT;
    a.in = IN;
    a.transposed = p->transposed;
    a.accumulate = p->accumulate;
    p->device->copy(p->device, p->dy, p->before, y_bytes(p, MOST_ROWS), NULL);
    seqpar_status status = p->device->matmul(p->device, &a, p->device->queue);
    if (status) return status;
    p->device->copy(p->device, got, (char *)p->dy + y_bytes(p, first), y_bytes(p, rows), NULL);
    return SEQPAR_OK;
}

static double wanted(const product *p, int64_t t, int64_t o) {
    double sum = p->accumulate ? p->y[t * (OUT + p->stride) + o] : 0.0;
    for (int64_t i = 0; i < IN; i++)
        sum += p->x[t * (IN + p->stride) + i] *
               (p->transposed ? p->w[i * OUT + o] : p->w[o * IN + i]);
    return sum;
}

static void test_product(seqpar_device *device, int transposed, int accumulate,
                         int64_t stride) {
    static const int64_t runs[][2] = {{0, 1},     {0, 255},   {0, 256}, {1, 256}, {255, 2},
                                      {256, 257}, {300, 300}, {599, 1}, {3, 513}};
    product p = {.device = device,
                 .storage = device->storage,
                 .transposed = transposed,
                 .accumulate = accumulate,
                 .stride = stride};
    /* bf16: half a unit in the last place, and again where cuBLAS adds its rounded product to y
       (on an H200 5.3e-3); fp32: measured 1.6e-6 */
    double limit = p.storage == SEQPAR_DTYPE_BF16 ? (accumulate ? 2.0 : 1.0) / 256 : 2e-6;
    double worst = 0;
    int64_t y_row = OUT + stride;
    product_open(&p);
    char *bytes = (char *)malloc((size_t)y_bytes(&p, MOST_ROWS));
    char *some = (char *)malloc((size_t)y_bytes(&p, MOST_ROWS));
    double *all = (double *)calloc((size_t)(MOST_ROWS * y_row), sizeof *all);
    test_expect(!product_rows(&p, 0, MOST_ROWS, bytes), "the product fails: %s",
                device->error ? device->error->text : "");
    for (int64_t i = 0; i < MOST_ROWS * y_row; i++)
        all[i] = p.storage == SEQPAR_DTYPE_BF16
                     ? (double)seqpar_bf16_to_float(((uint16_t *)bytes)[i])
                     : (double)((float *)bytes)[i];
    for (int64_t t = 0; t < MOST_ROWS; t++)
        for (int64_t o = 0; o < y_row; o++) {
            double want = o < OUT ? wanted(&p, t, o) : p.y[t * y_row + o];
            double error = fabs(all[t * y_row + o] - want) / (fabs(want) + sqrt(IN));
            if (o >= OUT)
                test_expect(error == 0, "what lies behind row %lld is written to",
                            (long long)t);
            else if (worst == worst && !(error <= worst))
                worst = error; /* a NaN stays */
        }
    test_expect(worst <= limit, "farthest %g, at most %g", worst, limit);
    for (size_t r = 0; r < sizeof runs / sizeof *runs; r++) {
        test_expect(!product_rows(&p, runs[r][0], runs[r][1], some), "the product fails");
        test_expect(
            !memcmp(some, bytes + y_bytes(&p, runs[r][0]), (size_t)y_bytes(&p, runs[r][1])),
            "rows %lld to %lld alone have other bits than among all", (long long)runs[r][0],
            (long long)(runs[r][0] + runs[r][1] - 1));
    }
    product_close(&p);
    free(all);
    free(bytes);
    free(some);
    test_end("cublas_%s%s%s stride +%lld: farthest %.1e",
             p.storage == SEQPAR_DTYPE_BF16 ? "bf16" : "f32", transposed ? " transposed" : "",
             accumulate ? " accumulate" : "", (long long)stride, worst);
}

/* Every call that opening the device and one product make fails in turn: named, and nothing
   hangs. */
static void test_failures(void) {
    if (!&cuda_on_cpu_fail_at) {
        test_skip("cublas_failures", "a GPU does not fail on demand");
        return;
    }
    int64_t calls = 0, named = 0;
    for (int64_t n = 0; n == 0 || n <= calls; n++) {
        seqpar_error error = {0};
        seqpar_cuda_desc desc = {.cublas = 1};
        seqpar_matmul_args a;
        memset(&a, 0, sizeof a);
        cuda_on_cpu_calls = 0;
        cuda_on_cpu_fail_at = n;
        seqpar_device *device = seqpar_device_cuda(&error, &desc);
        void *memory = device ? device->alloc(device, 3 * 64 * 64 * 4) : NULL;
        if (memory) {
            a.x.data = memory;
            a.w.data = (char *)memory + 64 * 64 * 4;
            a.y.data = (char *)memory + 2 * 64 * 64 * 4;
            a.x.stride = a.w.stride = a.y.stride = a.rows = a.out = a.in = 64;
            (void)device->matmul(device, &a, device->queue);
        }
        if (n == 0) calls = cuda_on_cpu_calls;
        test_expect((n == 0) == (error.status == SEQPAR_OK),
                    "call %lld of %lld fails: status %d, '%s'", (long long)n, (long long)calls,
                    error.status, error.text);
        named += strstr(error.text, "cuBLAS") != NULL;
        cuda_on_cpu_fail_at = 0;
        seqpar_device_close(device);
    }
    test_expect(named >= 5, "cuBLAS is named %lld times", (long long)named);
    test_end("cublas_failures: each of %lld calls is named", (long long)calls);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    for (int bf16 = 0; bf16 < 2; bf16++) {
        seqpar_error error = {0};
        seqpar_cuda_desc desc = {.storage = bf16 ? SEQPAR_DTYPE_BF16 : SEQPAR_DTYPE_F32,
                                 .cublas = 1};
        seqpar_device *device = seqpar_device_cuda(&error, &desc);
        if (!device) {
            printf("FAIL %s\n0 passed, 1 failed\n", error.text);
            return 1;
        }
        for (int way = 0; way < 4; way++) /* +9: not aligned, our own kernel */
            for (int64_t stride = 0; stride <= 9; stride += stride ? 1 : 8)
                TEST(test_product(device, way & 1, way / 2, stride));
        seqpar_device_close(device);
    }
    TEST(test_failures());
    return test_summary();
}
