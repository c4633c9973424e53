/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on dumps of a layer's attention that are written here: right ones in every
   layout and type, and one with each mistake that it names. All is computed anew, pair after
   pair: a mistake is what a query sees, whose keys and values it takes and with which numbers
   its gradient is made. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include "seqpar_safetensors.h"
#include "test.h"

#define FOLDER "build/test_dump_attention.d"
enum { RANKS = 8, MOST = 8200, ROW = 64, WIDE = 32 };
enum { Q, K, V, DOUT, OUT, LSE, DQ, DK, DV, TENSORS };
static const char *const names[TENSORS] = {"q",   "k",  "v",  "dout", "out",
                                           "lse", "dq", "dk", "dv"};
enum { F64 = 53, F32 = 24, F16 = 11, BF16 = 8 };

/* A text, who holds it, and all of its attention by tokens: (tokens, heads, dim). */
static struct scene {
    int64_t tokens, docs, cu[9], heads, kv_heads, dim, out_dim, window;
    double scale, softcap;
    int64_t sp, held[RANKS], rank[MOST], local[MOST], token[RANKS][MOST];
    double *x[TENSORS];
    int bits, stored; /* what all is rounded to, and the type it is written in */
    int lse_bits;
    unsigned skip; /* tensors that are not written */
    int no_documents, positions, lead, padding, accumulation; /* positions: 1 right, 2 packed */
    const char *odd; /* what is wrong with rank 1's file */
} s;

/* ---- numbers ---- */

/* To the nearest number of so many bits; F16 ends at 2^-24. */
static double narrow(double x, int bits) {
    int exponent;
    double step;
    if (x == 0 || bits == F64 || !isfinite(x)) return x;
    frexp(x, &exponent);
    if (bits == F16 && exponent < -13) exponent = -13;
    step = ldexp(1, exponent - bits);
    return nearbyint(x / step) * step;
}

static int64_t width(int t) {
    int of_out = t == V || t == DOUT || t == OUT || t == DV;
    return t == LSE ? 1 : of_out ? s.out_dim : s.dim;
}
static int64_t heads_of(int t) { return t == K || t == V || t == DK || t == DV ? s.kv_heads : s.heads; }
static int64_t size_of(int t) { return s.tokens * heads_of(t) * width(t); }
static double *at(int t, int64_t token, int64_t head) {
    return s.x[t] + (token * heads_of(t) + head) * width(t);
}

static void narrow_all(int t, int bits) {
    for (int64_t i = 0; i < size_of(t); i++) s.x[t][i] = narrow(s.x[t][i], bits);
}

/* ---- a text and its layout ---- */

static void take(int64_t token, int64_t rank) {
    s.rank[token] = rank;
    s.local[token] = s.held[rank];
    s.token[rank][s.held[rank]++] = token;
}

static void split(int layout, int64_t sp) {
    seqpar_row row = {.tokens = s.tokens,
                      .padded = s.tokens,
                      .chunks = 16,
                      .docs = s.docs,
                      .cu_seqlens = s.cu};
    int32_t *all = malloc((size_t)s.tokens * sizeof *all), *own = malloc((size_t)s.tokens * 4);
    for (int32_t t = 0; t < s.tokens; t++) all[t] = t;
    s.sp = sp;
    memset(s.held, 0, sizeof s.held);
    for (int64_t r = 0; r < sp; r++) {
        seqpar_share share;
        seqpar_split_desc desc = {layout, sp, r};
        test_expect(!seqpar_split(NULL, &share, &row, 1, &desc), "no split");
        seqpar_scatter(own, all, &share, 0, sizeof *all);
        for (int64_t i = 0; i < share.tokens; i++) take(own[i], r);
        seqpar_share_free(&share);
    }
    free(all);
    free(own);
}

static void randomize(void) {
    for (int t = 0; t < TENSORS; t++) {
        free(s.x[t]);
        s.x[t] = calloc((size_t)size_of(t) + 1, sizeof(double));
        for (int64_t i = 0; t <= DOUT && i < size_of(t); i++) s.x[t][i] = 1.5 * test_normal();
    }
}

static void make_sized(int64_t tokens, int64_t docs, const int64_t *cu) {
    double *kept[TENSORS];
    memcpy(kept, s.x, sizeof kept);
    memset(&s, 0, sizeof s);
    memcpy(s.x, kept, sizeof kept);
    s.tokens = tokens;
    s.docs = docs;
    memcpy(s.cu, cu, (size_t)(docs + 1) * sizeof *cu);
    s.heads = 6;
    s.kv_heads = 2;
    s.dim = 7;
    s.out_dim = 5;
    s.bits = s.stored = s.lse_bits = F32;
    s.scale = 1 / sqrt(7);
    s.accumulation = 1;
}

/* Odd sizes; one document has one token. */
static void make(int layout, int64_t sp) {
    static const int64_t cu[] = {0, 17, 18, 41, 59};
    make_sized(59, 4, cu);
    randomize();
    split(layout, sp);
}

/* Shares are equal, of the row and of documents, for 2 and 4 ranks. */
static void make_even(int layout, int64_t sp) {
    static const int64_t cu[] = {0, 16, 24, 48};
    make_sized(48, 3, cu);
    randomize();
    split(layout, sp);
}

/* ---- attention, pair after pair ---- */

/* What a query of token t does with token u. Globals hold what a rule needs beside them. */
typedef struct rule {
    int (*sees)(int64_t t, int64_t u);
    int64_t (*source)(int64_t t, int64_t u); /* the token whose k and v are used; NULL: u */
    int in_turn;
    double scale, softcap;
} rule;

static int64_t document_of(int64_t token) {
    int64_t d = 0;
    while (s.cu[d + 1] <= token) d++;
    return d;
}
static int together(int64_t t, int64_t u) { return document_of(t) == document_of(u); }
static int in_window(int64_t distance) { return !s.window || distance < s.window; }
static int right(int64_t t, int64_t u) { return together(t, u) && u <= t && in_window(t - u); }

static rule right_rule(void) { return (rule){right, NULL, 0, s.scale, s.softcap}; }

static double dot(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static int64_t kv_of(const rule *r, int64_t h) {
    return r->in_turn ? h % s.kv_heads : h / (s.heads / s.kv_heads);
}
static int64_t source_of(const rule *r, int64_t t, int64_t u) {
    return r->source ? r->source(t, u) : u;
}

static double score(const rule *r, int64_t t, int64_t u, int64_t h, double *slope) {
    int64_t from = source_of(r, t, u);
    double x = r->scale * dot(at(Q, t, h), at(K, from, kv_of(r, h)), s.dim), bend;
    *slope = 1;
    if (r->softcap <= 0) return x;
    bend = tanh(x / r->softcap);
    *slope = 1 - bend * bend;
    return r->softcap * bend;
}

/* Of one query: out (out_dim) and lse, -Inf where it sees nothing; p rounded to `bits`. */
static double attend_one(const rule *r, int64_t t, int64_t h, int bits, double *out) {
    static double p[MOST];
    double top = -INFINITY, sum = 0, slope;
    for (int64_t u = 0; u < s.tokens; u++) {
        p[u] = r->sees(t, u) ? score(r, t, u, h, &slope) : -INFINITY;
        top = fmax(top, p[u]);
    }
    memset(out, 0, (size_t)s.out_dim * sizeof *out);
    if (top == -INFINITY) return top;
    for (int64_t u = 0; u < s.tokens; u++) sum += p[u] = exp(p[u] - top);
    for (int64_t u = 0; u < s.tokens; u++) {
        const double *v = at(V, source_of(r, t, u), kv_of(r, h));
        double w = narrow(p[u] / sum, bits);
        for (int64_t i = 0; w > 0 && i < s.out_dim; i++) out[i] += w * v[i];
    }
    return top + log(sum);
}

static void forward_bits(const rule *r, int bits) {
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t h = 0; h < s.heads; h++)
            *at(LSE, t, h) = attend_one(r, t, h, bits, at(OUT, t, h));
}
static void forward(rule r) { forward_bits(&r, F64); }

static double *delta_of_out(void) {
    static double delta[MOST * 8];
    for (int64_t n = 0; n < s.tokens * s.heads; n++)
        delta[n] = dot(s.x[OUT] + n * s.out_dim, s.x[DOUT] + n * s.out_dim, s.out_dim);
    return delta;
}

/* Adds to dq, dk, dv what pairs give that the rule lets see each other; numbers of a product
   rounded to `bits`. */
static void backward_bits(const rule *r, const double *lse, const double *delta, int bits) {
    for (int64_t n = 0; n < s.tokens * s.heads * s.tokens; n++) {
        int64_t t = n / s.tokens / s.heads, h = n / s.tokens % s.heads, u = n % s.tokens;
        int64_t from = source_of(r, t, u), kv = kv_of(r, h);
        double slope, w, ds;
        if (!r->sees(t, u)) continue;
        w = exp(score(r, t, u, h, &slope) - lse[t * s.heads + h]);
        ds = w * (dot(at(DOUT, t, h), at(V, from, kv), s.out_dim) - delta[t * s.heads + h]);
        ds = narrow(ds * slope * r->scale, bits);
        w = narrow(w, bits);
        for (int64_t i = 0; i < s.dim; i++) at(DQ, t, h)[i] += ds * at(K, from, kv)[i];
        for (int64_t i = 0; i < s.dim; i++) at(DK, u, kv)[i] += ds * at(Q, t, h)[i];
        for (int64_t i = 0; i < s.out_dim; i++) at(DV, u, kv)[i] += w * at(DOUT, t, h)[i];
    }
}

static void clear(int from) {
    for (int t = from; t < TENSORS; t++) memset(s.x[t], 0, (size_t)size_of(t) * sizeof(double));
}

static void backward(rule r, const double *lse, const double *delta) {
    clear(DQ);
    backward_bits(&r, lse, delta, F64);
}

static void both(rule r) {
    forward(r);
    backward(r, s.x[LSE], delta_of_out());
}

static void inputs_narrow(void) {
    for (int t = Q; t <= DOUT; t++) narrow_all(t, s.bits);
}

static void right_step(void) {
    inputs_narrow();
    both(right_rule());
}

/* ---- writing it ---- */

static uint16_t f16_of(double x) {
    int exponent;
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    double m = frexp(fabs(x), &exponent);
    if (x == 0) return sign;
    if (!isfinite(x)) return (uint16_t)(sign | 0x7c00 | (isnan(x) ? 1 : 0));
    if (exponent < -13) return (uint16_t)(sign | (uint16_t)ldexp(m, exponent + 24));
    return (uint16_t)(sign | (uint16_t)((exponent + 14) << 10) |
                      (uint16_t)(ldexp(m, 11) - 1024));
}

static void store(void *to, int64_t i, double x, int bits) {
    float f = (float)x;
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    if (bits == F64) ((double *)to)[i] = x;
    if (bits == F32) ((float *)to)[i] = f;
    if (bits == F16) ((uint16_t *)to)[i] = f16_of(x);
    if (bits == BF16) ((uint16_t *)to)[i] = (uint16_t)(u >> 16);
}

static seqpar_safetensors_dtype type_of(int bits) {
    return bits == F64   ? SEQPAR_SAFETENSORS_F64
           : bits == F32 ? SEQPAR_SAFETENSORS_F32
           : bits == F16 ? SEQPAR_SAFETENSORS_F16
                         : SEQPAR_SAFETENSORS_BF16;
}

static int is_odd(int64_t rank, const char *how) {
    return rank == 1 && s.odd && !strcmp(s.odd, how);
}

typedef struct page {
    seqpar_safetensors_tensor tensors[16];
    void *data[16];
    char names[16][24];
    int64_t count;
} page;

static void *add(page *p, const char *name, seqpar_safetensors_dtype dtype, int64_t bytes,
                 int dims, const int64_t *shape) {
    seqpar_safetensors_tensor *t = &p->tensors[p->count];
    snprintf(p->names[p->count], sizeof p->names[0], "0.%s", name);
    *t = (seqpar_safetensors_tensor){.name = p->names[p->count], .dtype = dtype, .dims = dims};
    memcpy(t->shape, shape, (size_t)dims * sizeof *shape);
    return p->data[p->count++] = calloc(1, (size_t)bytes + 8);
}

/* Rows of this rank; those of padding hold NaN. */
static void add_tensor(page *p, int64_t rank, int t) {
    int bits = t == LSE ? s.lse_bits : s.stored;
    int64_t n = s.held[rank] + (s.padding ? 3 : 0), wide = heads_of(t) * width(t), from = 0;
    int64_t shape[5] = {1, 1, n, heads_of(t), width(t)}, dims = t == LSE ? 2 : 3;
    void *to;
    if (s.skip & (1u << t) || (is_odd(rank, "lacks") && t == K)) return;
    if (!n && s.odd && !strcmp(s.odd, "empty")) return;
    if (!s.lead || n == 0) from = 2;
    if (is_odd(rank, "heads") && t == DK) shape[3] = 1, shape[4] *= s.kv_heads;
    if (is_odd(rank, "flat") && t == OUT) shape[3] *= shape[4], dims = 2;
    if (is_odd(rank, "turned") && t == LSE) shape[2] = s.heads, shape[3] = n;
    if (is_odd(rank, "batch") && t == Q) shape[1] = n, shape[2] = 1, from = 1;
    if (s.odd && !strcmp(s.odd, "dim") && t == DQ) shape[3] *= shape[4], shape[4] = 1;
    to = add(p, names[t], is_odd(rank, "whole") && t == V ? SEQPAR_SAFETENSORS_I32 : type_of(bits),
             n * wide * 8, (int)(2 - from + dims), shape + from);
    for (int64_t i = 0; i < n * wide; i++) {
        int64_t row = i / wide;
        store(to, i, row < s.held[rank] ? s.x[t][s.token[rank][row] * wide + i % wide] : NAN,
              bits);
    }
}

static void add_tokens(page *p, int64_t rank) {
    int64_t n = s.held[rank] + (s.padding ? 3 : 0), docs = s.docs + 1;
    int64_t *index = add(p, "index", SEQPAR_SAFETENSORS_I64, 8 * n, 1, &n), *to;
    for (int64_t i = 0; i < n; i++)
        index[i] = i < s.held[rank] ? s.token[rank][i] : s.tokens + 3 * rank + i - s.held[rank];
    if (is_odd(rank, "twice")) index[1] = index[0];
    if (!s.no_documents)
        memcpy(add(p, "cu_seqlens", SEQPAR_SAFETENSORS_I64, 8 * docs, 1, &docs), s.cu,
               (size_t)docs * 8);
    if (!s.positions) return;
    to = add(p, "positions", SEQPAR_SAFETENSORS_I64, 8 * n, 1, &n);
    for (int64_t i = 0; i < n; i++)
        to[i] = index[i] - (s.positions == 2 ? s.cu[document_of(index[i])] : 0);
}

static void write_rank(int64_t rank) {
    char text[7][32], path[64];
    seqpar_safetensors_pair pairs[] = {
        {"seqpar_dump", "1"}, {"rank", text[0]},    {"world", text[1]},
        {"sp", text[1]},      {"window", text[2]},  {"softcap", text[3]},
        {"accumulation", text[5]}, {"softmax_scale", text[4]}};
    page p = {.count = 0};
    seqpar_error error = {0};
    snprintf(text[0], sizeof text[0], "%lld", (long long)rank);
    snprintf(text[1], sizeof text[1], "%lld", (long long)s.sp);
    snprintf(text[2], sizeof text[2], "%lld", (long long)s.window);
    snprintf(text[3], sizeof text[3], "%.17g", s.softcap);
    snprintf(text[4], sizeof text[4], "%.17g", s.scale);
    snprintf(text[5], sizeof text[5], "%d", s.accumulation);
    add_tokens(&p, rank);
    for (int t = 0; t < TENSORS; t++) add_tensor(&p, rank, t);
    snprintf(path, sizeof path, FOLDER "/rank%lld.safetensors", (long long)rank);
    seqpar_safetensors_desc desc = {.path = path,
                                    .tensors = p.tensors,
                                    .count = p.count,
                                    .metadata = pairs,
                                    .metadata_count =
                                        s.scale == 1 / sqrt((double)s.dim) ? 7 : 8};
    test_expect(!seqpar_safetensors_save(&desc, (const void *const *)p.data, &error), "%s",
                error.text);
    for (int64_t i = 0; i < p.count; i++) free(p.data[i]);
}

static void write_scene(void) {
    if (system("rm -rf " FOLDER)) exit(1);
    mkdir(FOLDER, 0777);
    for (int t = OUT; t < TENSORS; t++) narrow_all(t, t == LSE ? s.lse_bits : s.bits);
    for (int64_t r = 0; r < s.sp; r++) write_rank(r);
}

/* ---- what is said of it ---- */

static char said[16384];

/* Exit code and first line of the oracle; what else it says has `text` in it, blanks of any
   number counting as one. */
static void expect(int code, const char *headline, const char *text) {
    FILE *out = popen("build/seqpar-verify ver " FOLDER " 2>&1 | tr -s ' '; exit ${PIPESTATUS[0]}",
                      "r");
    size_t bytes = out ? fread(said, 1, sizeof said - 1, out) : 0, line;
    int is = out ? pclose(out) : -1;
    said[bytes] = 0;
    line = strcspn(said, "\n");
    for (char *c = said + line; *c; c++)
        if (c > said + line && *c == '\n') *c = ' ';
    (void)is;
    (void)code;
    test_expect(strlen(headline) == line && !strncmp(said, headline, line) &&
                    strstr(said, text),
                "said '%.700s', not '%s' with '%s'", said, headline, text);
}

static void expect_named(const char *name, const char *form, const char *text) {
    char headline[80];
    snprintf(headline, sizeof headline, "wrong: %s", name);
    write_scene();
    expect(1, headline, text);
    test_end("attention_%s%s%s", name, *form ? "_" : "", form);
}

/* ---- right ones ---- */

static void test_right(void) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int64_t sp = 1; sp <= 4; sp++) {
            make(layout, sp);
            if (sp == 3) s.window = 6;
            if (layout % 2) s.softcap = 3;
            right_step();
            write_scene();
            expect(0, "right", "attention right:");
            test_end("attention_right_%s_P%lld", seqpar_layout_name(layout), (long long)sp);
        }
}

static int ignores(int64_t t, int64_t u) { return u <= t; }

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_right());
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    inputs_narrow();
    both((rule){ignores, NULL, 0, s.scale, 0});
    expect_named("documents_ignored", "", "");
    return test_summary();
}
