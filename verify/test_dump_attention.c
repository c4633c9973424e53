/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on dumps of a layer's attention that are written here: right ones in
   every layout and type, and one with each mistake that it names. All is computed anew, pair
   after pair: a mistake is what a query sees, whose keys and values it takes and with which
   numbers its gradient is made. */
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
    int stored_of[TENSORS]; /* 0: as `stored` */
    const char *dtype;      /* metadata; NULL: none */
    unsigned skip; /* tensors that are not written */
    int no_documents, positions, lead, padding, accumulation; /* positions: 1 right, 2 packed */
    int micro, dp; /* whose numbers these are; replicas, which are alike */
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
static int64_t heads_of(int t) {
    return t == K || t == V || t == DK || t == DV ? s.kv_heads : s.heads;
}
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
    s.accumulation = s.dp = 1;
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
    int in_turn; /* 2: heads of each rank take kv heads in turn, 3: from 0 on */
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
    int64_t of_rank = s.heads / s.sp, group = s.heads / s.kv_heads;
    if (r->in_turn == 3) return h % of_rank / group;
    if (r->in_turn == 2) return h / of_rank % s.kv_heads;
    return r->in_turn ? h % s.kv_heads : h / group;
}
static int64_t source_of(const rule *r, int64_t t, int64_t u) {
    return r->source ? r->source(t, u) : u;
}

static int score_bits = F64;
static double score(const rule *r, int64_t t, int64_t u, int64_t h, double *slope) {
    int64_t from = source_of(r, t, u);
    double x = r->scale * dot(at(Q, t, h), at(K, from, kv_of(r, h)), s.dim), bend;
    x = narrow(x, score_bits);
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
    snprintf(p->names[p->count], sizeof p->names[0], "%d.%s", s.micro, name);
    *t = (seqpar_safetensors_tensor){.name = p->names[p->count], .dtype = dtype, .dims = dims};
    memcpy(t->shape, shape, (size_t)dims * sizeof *shape);
    return p->data[p->count++] = calloc(1, (size_t)bytes + 8);
}

/* Rows of this rank; those of padding hold NaN. */
static void add_tensor(page *p, int64_t rank, int t) {
    int bits = t == LSE            ? s.lse_bits
               : s.stored_of[t] ? s.stored_of[t]
                                : s.stored;
    int64_t member = rank % s.sp, n = s.held[member], rows = n + (s.padding ? 3 : 0), from = 0;
    int64_t shape[5] = {1, 1, rows, heads_of(t), width(t)}, dims = t == LSE ? 2 : 3;
    int64_t wide = heads_of(t) * width(t);
    void *to;
    if (s.skip & (1u << t) || (is_odd(rank, "lacks") && t == K)) return;
    if (!n && s.odd && !strcmp(s.odd, "empty")) return;
    if (!s.lead || n == 0) from = 2;
    if (is_odd(rank, "heads") && t == DK) shape[3] = 1, shape[4] *= s.kv_heads;
    if (is_odd(rank, "flat") && t == OUT) shape[3] *= shape[4], dims = 2;
    if (is_odd(rank, "turned") && t == LSE) shape[2] = s.heads, shape[3] = n;
    if (is_odd(rank, "batch") && t == Q) shape[1] = n, shape[2] = 1, from = 1;
    if (s.odd && !strcmp(s.odd, "dim") && t == DQ) shape[3] *= shape[4], shape[4] = 1;
    to = add(p, names[t],
             is_odd(rank, "whole") && t == V ? SEQPAR_SAFETENSORS_I32 : type_of(bits),
             rows * wide * 8, (int)(2 - from + dims), shape + from);
    for (int64_t i = 0; i < rows * wide; i++) {
        int64_t row = i / wide;
        double x = row < n ? s.x[t][s.token[member][row] * wide + i % wide] : NAN;
        if (s.odd && !strcmp(s.odd, "replica") && rank >= s.sp && t == OUT) x *= 1.5;
        store(to, i, x, bits);
    }
}

static void add_tokens(page *p, int64_t rank) {
    int64_t member = rank % s.sp, held = s.held[member], docs = s.docs + 1;
    int64_t n = held + (s.padding ? 3 : 0);
    int64_t *index = add(p, "index", SEQPAR_SAFETENSORS_I64, 8 * n, 1, &n), *to;
    for (int64_t i = 0; i < n; i++)
        index[i] = i < held ? s.token[member][i] : s.tokens + 3 * member + i - held;
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
        {"seqpar_dump", "1"}, {"rank", text[0]},    {"world", text[6]},
        {"sp", text[1]},      {"window", text[2]},  {"softcap", text[3]},
        {"accumulation", text[5]}, {"dtype", s.dtype ? s.dtype : "tensors"},
        {"softmax_scale", text[4]}};
    page p = {.count = 0};
    seqpar_error error = {0};
    snprintf(text[0], sizeof text[0], "%lld", (long long)rank);
    snprintf(text[1], sizeof text[1], "%lld", (long long)s.sp);
    snprintf(text[2], sizeof text[2], "%lld", (long long)s.window);
    snprintf(text[3], sizeof text[3], "%.17g", s.softcap);
    snprintf(text[4], sizeof text[4], "%.17g", s.scale);
    snprintf(text[5], sizeof text[5], "%d", s.accumulation);
    snprintf(text[6], sizeof text[6], "%lld", (long long)s.sp * s.dp);
    add_tokens(&p, rank);
    for (int t = 0; t < TENSORS; t++) add_tensor(&p, rank, t);
    snprintf(path, sizeof path, FOLDER "/rank%lld.safetensors", (long long)rank);
    seqpar_safetensors_desc desc = {.path = path,
                                    .tensors = p.tensors,
                                    .count = p.count,
                                    .metadata = pairs,
                                    .metadata_count =
                                        s.scale == 1 / sqrt((double)s.dim) ? 8 : 9};
    test_expect(!seqpar_safetensors_save(&desc, (const void *const *)p.data, &error), "%s",
                error.text);
    for (int64_t i = 0; i < p.count; i++) free(p.data[i]);
}

static void write_scene(void) {
    if (system("rm -rf " FOLDER)) exit(1);
    mkdir(FOLDER, 0777);
    for (int t = OUT; t < TENSORS; t++) narrow_all(t, t == LSE ? s.lse_bits : s.bits);
    for (int64_t r = 0; r < s.sp * s.dp; r++) write_rank(r);
}

/* ---- what is said of it ---- */

static char said[16384];

/* Runs of blanks and line ends are one blank each. */
static void squeeze(char *text) {
    char *to = text;
    for (const char *from = text; *from; from++)
        if ((*from != ' ' && *from != '\n') || (to > text && to[-1] != ' '))
            *to++ = *from == '\n' ? ' ' : *from;
    *to = 0;
}

/* Exit code and first line of the oracle, and whether the rest has `text` in it. */
static void expect(int code, const char *headline, const char *text) {
    FILE *out = popen("build/seqpar-verify ver " FOLDER " 2>&1", "r");
    size_t bytes = out ? fread(said, 1, sizeof said - 1, out) : 0, line;
    int is = out ? pclose(out) : -1;
    said[bytes] = 0;
    line = strcspn(said, code == 4 ? ":\n" : "\n"); /* what is right follows */
    squeeze(said + line);
    test_expect(WIFEXITED(is) && WEXITSTATUS(is) == code && strlen(headline) == line &&
                    !strncmp(said, headline, line) && strstr(said, text),
                "exit code %d, not %d; said '%.600s', not '%s' with '%s'", WEXITSTATUS(is),
                code, said, headline, text);
}

static void expect_named(const char *name, const char *form, const char *text) {
    char headline[80];
    snprintf(headline, sizeof headline, "wrong: %s", name);
    write_scene();
    expect(1, headline, text);
    test_end("attention_%s%s%s", name, *form ? "_" : "", form);
}

/* Named, alone or with others that give the same numbers here. */
static void expect_among(const char *name, const char *form) {
    char sentence[160];
    write_scene();
    expect(1, "wrong", name);
    test_why[0] = 0; /* of the headline */
    snprintf(sentence, sizeof sentence, "%s gives this out, lse, dq, dk, dv %s", name, form);
    test_expect(!strncmp(said, "wrong: ", 7) && strstr(said, sentence),
                "said '%.600s', not '%s'", said, sentence);
    test_end("attention_%s_%s", name, form);
}

/* The same with any verdict, as a test of its own. */
static void expect_said(const char *name, int code, const char *headline, const char *text) {
    write_scene();
    expect(code, headline, text);
    test_end("attention_%s", name);
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


/* ---- who sees whom, wrongly ---- */

static int ignores_documents(int64_t t, int64_t u) { return u <= t && in_window(t - u); }
static int looks_ahead(int64_t t, int64_t u) { return together(t, u) && in_window(t - u); }
static int sees_all(int64_t t, int64_t u) { return in_window(t - u); }
static int by_rows(int64_t t, int64_t u) {
    return together(t, u) && s.local[u] <= s.local[t] && in_window(s.local[t] - s.local[u]);
}
static int own_alone(int64_t t, int64_t u) { return right(t, u) && s.rank[t] == s.rank[u]; }
static int without_window(int64_t t, int64_t u) { return together(t, u) && u <= t; }
static int window_by_rows(int64_t t, int64_t u) {
    return without_window(t, u) && in_window(s.local[t] - s.local[u]);
}
static int window_by_rows_bound(int64_t t, int64_t u) {
    return window_by_rows(t, u) && s.local[u] <= s.local[t];
}

/* Halves of ranks' rows. */
static int half_of(int64_t t) { return 2 * s.local[t] >= s.held[s.rank[t]]; }
static int first_travels(int64_t t, int64_t u) {
    return right(t, u) && (s.rank[t] == s.rank[u] || !half_of(u));
}
static int second_travels(int64_t t, int64_t u) {
    return right(t, u) && (s.rank[t] == s.rank[u] || half_of(u));
}
static int first_updated(int64_t t, int64_t u) {
    return right(t, u) && (s.rank[t] == s.rank[u] || !half_of(t));
}
static int second_updated(int64_t t, int64_t u) {
    return right(t, u) && (s.rank[t] == s.rank[u] || half_of(t));
}
static int later_lost(int64_t t, int64_t u) {
    return right(t, u) && (s.rank[u] <= s.rank[t] || !half_of(t));
}

static int64_t lacks[RANKS]; /* of each rank: the rank whose keys it misses; -1: none */
static int some_lost(int64_t t, int64_t u) {
    return right(t, u) && lacks[s.rank[t]] != s.rank[u];
}

static int64_t hop; /* the one that is computed */
static int64_t hop_of(int64_t t, int64_t u) { return (s.rank[t] - s.rank[u] + s.sp) % s.sp; }
static int in_hop(int64_t t, int64_t u) { return right(t, u) && hop_of(t, u) == hop; }
static int not_in_hop(int64_t t, int64_t u) { return right(t, u) && hop_of(t, u) != hop; }

/* The rank's own row of the same number. */
static int64_t own_row(int64_t t, int64_t u) { return s.token[s.rank[t]][s.local[u]]; }
static int has_own_row(int64_t t, int64_t u) {
    return right(t, u) && s.local[u] < s.held[s.rank[t]];
}

static int64_t taken[MOST]; /* where a token is taken to be */
static int by_taken(int64_t t, int64_t u) { return right(taken[t], taken[u]); }

static rule seeing(int (*sees)(int64_t t, int64_t u)) {
    return (rule){sees, NULL, 0, s.scale, s.softcap};
}

/* A mistake of both passes, then of the forward pass alone, whose gradients are right. */
static void test_rule(const char *name, const char *form, rule r, const char *text) {
    inputs_narrow();
    both(r);
    expect_named(name, form, text);
    both(right_rule());
    forward(r);
    expect_named(name, form, " gives this out, lse");
}

static void test_masks(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    test_rule("documents_ignored", "", seeing(ignores_documents), "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_CONTIGUOUS, 3);
    test_rule("looks_ahead", "", seeing(looks_ahead), "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_STRIPE, 4);
    test_rule("mask_missing", "", seeing(sees_all), "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_CONTIGUOUS, 4);
    test_rule("causal_by_local_row", "", seeing(by_rows), "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.window = 5;
    test_rule("causal_by_local_row", "window", seeing(by_rows), "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_ZIGZAG, 4);
    test_rule("own_tokens_only", "", seeing(own_alone), "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_CONTIGUOUS, 1);
    test_rule("looks_ahead", "P1", seeing(looks_ahead), "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    backward(seeing(ignores_documents), s.x[LSE], delta_of_out());
    expect_named("documents_ignored", "backward",
                 "this dq, dk, dv (in the backward pass alone)");
}

/* ---- rows of gathered keys, bounds that are one off ---- */

static int64_t gathered(int64_t t) {
    int64_t before = 0;
    for (int64_t r = 0; r < s.rank[t]; r++) before += s.held[r];
    return before + s.local[t];
}
static int64_t from_end(int64_t t) { return s.local[t] + s.tokens - s.held[s.rank[t]]; }
static int gathered_form; /* how rows of queries are counted */
static int64_t form_rows(int64_t t) {
    return gathered_form == 2 ? gathered(t) : gathered_form ? from_end(t) : s.local[t];
}
static int by_gathered(int64_t t, int64_t u) {
    int64_t distance = form_rows(t) - gathered(u);
    return together(t, u) && distance >= 0 && in_window(distance);
}
static int window_by_gathered(int64_t t, int64_t u) {
    return without_window(t, u) && in_window(form_rows(t) - gathered(u));
}
static int next_too(int64_t t, int64_t u) {
    return together(t, u) && u <= t + 1 && in_window(t - u);
}
static int not_itself(int64_t t, int64_t u) { return right(t, u) && u != t; }
static int one_more(int64_t t, int64_t u) { return without_window(t, u) && t - u <= s.window; }
static int one_less(int64_t t, int64_t u) {
    return without_window(t, u) && t - u < s.window - 1;
}

/* llama3, with keys of all ranks, and Ulysses, with queries, too: in every layout in which rows
   are not places. */
static void test_gathered(void) {
    static const char *const forms[] = {"(keys' rows are those of all ranks' gathered keys)",
                                        "(the same, queries aligned with the last of them)",
                                        "(rows of all ranks' tokens, gathered)"};
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (gathered_form = 0; gathered_form < 3; gathered_form++) {
            if (gathered_form == 2 && layout == SEQPAR_LAYOUT_CONTIGUOUS) continue;
            make(layout, 3);
            inputs_narrow();
            both(seeing(by_gathered));
            expect_named("causal_by_local_row", forms[gathered_form], forms[gathered_form]);
            make(layout, 4);
            s.window = 5;
            inputs_narrow();
            both(seeing(window_by_gathered));
            expect_among("window_by_local_row", forms[gathered_form]);
        }
}

static void test_off_by_one(void) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
        make(layout, 1 + layout % 4);
        test_rule("causal_off_by_one", "next", seeing(next_too), "the next token is seen");
        make(layout, 4 - layout % 4);
        test_rule("causal_off_by_one", "own", seeing(not_itself), "the own token is not seen");
        make(layout, 1 + layout % 4);
        s.window = 4;
        test_rule("window_off_by_one", "more", seeing(one_more), "(one token more)");
        test_rule("window_off_by_one", "less", seeing(one_less), "(one token less)");
    }
}

static void test_options(void) {
    rule r;
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.scale = 0.21;
    r = right_rule();
    r.scale = 1 / sqrt(7);
    test_rule("scale_missing", "", r, "lse, dq, dk, dv (1 / sqrt(head_dim))");
    r.scale = 1;
    test_rule("scale_missing", "one", r, "lse, dq, dk, dv (1)");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.softcap = 1.5;
    r = right_rule();
    r.softcap = 0;
    test_rule("softcap_missing", "", r, "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    r = right_rule();
    r.in_turn = 1;
    test_rule("kv_heads_in_turn", "", r, "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_CONTIGUOUS, 3);
    s.window = 5;
    test_rule("window_missing", "", seeing(without_window), "this out, lse, dq, dk, dv");
    test_rule("window_by_local_row", "", seeing(window_by_rows), "this out, lse, dq, dk, dv");
    test_rule("window_by_local_row", "bound", seeing(window_by_rows_bound),
              "lse, dq, dk, dv (and nobody of a later row)");
}

/* Where tokens would be if the rank's rows were those of another layout. */
static void take_for(int layout) {
    int64_t kept[RANKS][64], held[RANKS], sp = s.sp;
    for (int64_t r = 0; r < sp; r++)
        for (int64_t i = 0; i < s.held[r]; i++) kept[r][i] = s.token[r][i];
    split(layout, sp);
    memcpy(held, s.held, sizeof held);
    for (int64_t r = 0; r < sp; r++)
        for (int64_t i = 0; i < held[r]; i++) taken[kept[r][i]] = s.token[r][i];
    memset(s.held, 0, sizeof s.held);
    for (int64_t r = 0; r < sp; r++)
        for (int64_t i = 0; i < held[r]; i++) take(kept[r][i], r);
}

static void test_layouts(void) {
    static const struct {
        int is, taken;
        int64_t sp;
        const char *form;
    } table[] = {{SEQPAR_LAYOUT_ZIGZAG, SEQPAR_LAYOUT_CONTIGUOUS, 4, "(contiguous)"},
                 {SEQPAR_LAYOUT_CONTIGUOUS, SEQPAR_LAYOUT_ZIGZAG, 2, "(zigzag)"},
                 {SEQPAR_LAYOUT_ZIGZAG, SEQPAR_LAYOUT_STRIPE, 4, "(stripe)"},
                 {SEQPAR_LAYOUT_ZIGZAG, SEQPAR_LAYOUT_ZIGZAG_DOC, 4,
                  "(zigzag in each document)"},
                 {SEQPAR_LAYOUT_ZIGZAG_DOC, SEQPAR_LAYOUT_ZIGZAG, 4, "(zigzag)"}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        make_even(table[i].is, table[i].sp);
        take_for(table[i].taken);
        test_rule("layout_mistaken", table[i].form, seeing(by_taken), table[i].form);
    }
}

static void test_stale(void) {
    rule stale = {right, own_row, 0, 0, 0};
    make_even(SEQPAR_LAYOUT_ZIGZAG, 4);
    stale.scale = s.scale;
    test_rule("stale_kv", "", stale, "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_CONTIGUOUS, 4); /* the last rank has fewer rows */
    stale.sees = has_own_row;
    test_rule("stale_kv", "uneven", stale, "this out, lse, dq, dk, dv");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    stale.sees = has_own_row;
    backward(stale, s.x[LSE], delta_of_out());
    expect_named("stale_kv", "backward", "(in the backward pass alone)");
}

static int64_t hop_shift; /* 1: the hop before, whose keys are of the rank after */
static int64_t of_hop(int64_t t, int64_t u) {
    int64_t rank = s.rank[t] == s.rank[u] ? s.rank[u] : (s.rank[u] + hop_shift) % s.sp;
    return s.token[rank][s.local[u]];
}

static void test_stale_hops(void) {
    rule stale = {right, of_hop, 0, 0, 0};
    for (int i = 0; i < 4; i++) {
        make_even(i / 2 ? SEQPAR_LAYOUT_STRIPE : SEQPAR_LAYOUT_ZIGZAG, 4);
        hop_shift = i % 2 ? 3 : 1;
        stale.scale = s.scale;
        test_rule("stale_kv", i % 2 ? "after" : "before", stale,
                  i % 2 ? "(those of the hop after)" : "(those of the hop before)");
    }
}

/* More ranks than kv heads. */
static void test_heads_of_ranks(void) {
    rule r;
    make(SEQPAR_LAYOUT_CONTIGUOUS, 3);
    r = right_rule();
    r.in_turn = 2;
    test_rule("kv_heads_by_rank", "in_turn", r, "(rank r takes kv head r mod kv_heads)");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    r.in_turn = 3;
    test_rule("kv_heads_by_rank", "from_0", r, "(each rank counts kv heads from 0)");
}

static void test_halves(void) {
    static const struct {
        const char *name, *form;
        int (*sees)(int64_t t, int64_t u);
    } table[] = {{"half_not_exchanged", "(the first halves alone travel)", first_travels},
                 {"half_not_exchanged", "(the second halves alone travel)", second_travels},
                 {"half_not_updated", "(the second half is not)", first_updated},
                 {"half_not_updated", "(the first half is not)", second_updated},
                 {"half_not_updated", "(the second half is not, from later ranks)",
                  later_lost}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        make(SEQPAR_LAYOUT_ZIGZAG, 4);
        test_rule(table[i].name, table[i].form, seeing(table[i].sees), table[i].form);
    }
}

/* ---- hops ---- */

static void lack(int64_t a, int64_t b, int64_t c, int64_t d) {
    const int64_t all[] = {a, b, c, d};
    memcpy(lacks, all, sizeof all);
}

static void test_lost(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 4);
    lack(1, 2, 3, 0); /* the last hop */
    test_rule("hop_lost", "last", seeing(some_lost),
              "rank 0 lacks rank 1, rank 1 lacks rank 2");
    lack(-1, 0, 0, 0); /* nobody has rank 0's */
    test_rule("hop_lost", "source", seeing(some_lost), "(rank 1 lacks rank 0, rank 2 lacks");
    lack(-1, -1, 1, -1);
    test_rule("hop_lost", "one_rank", seeing(some_lost), "(rank 2 lacks rank 1)");
    make(SEQPAR_LAYOUT_CONTIGUOUS, 4);
    lack(-1, -1, -1, 2);
    test_rule("hop_lost", "contiguous", seeing(some_lost), "(rank 3 lacks rank 2)");
    for (hop = 1; hop < 3; hop++) {
        make(SEQPAR_LAYOUT_STRIPE, 3);
        right_step();
        backward(seeing(not_in_hop), s.x[LSE], delta_of_out());
        expect_named("hop_lost", hop == 1 ? "backward_1" : "backward_2",
                     hop == 1 ? "(hop 1, in the backward pass alone)"
                              : "(hop 2, in the backward pass alone)");
    }
}

/* Of each hop: out and lse of all queries; -Inf: it saw nothing. */
static double *hop_out[RANKS], *hop_lse[RANKS];

static void hops(void) {
    for (hop = 0; hop < s.sp; hop++) {
        forward(seeing(in_hop));
        free(hop_out[hop]);
        free(hop_lse[hop]);
        hop_out[hop] = malloc((size_t)size_of(OUT) * sizeof(double));
        hop_lse[hop] = malloc((size_t)size_of(LSE) * sizeof(double));
        memcpy(hop_out[hop], s.x[OUT], (size_t)size_of(OUT) * sizeof(double));
        memcpy(hop_lse[hop], s.x[LSE], (size_t)size_of(LSE) * sizeof(double));
    }
}

enum { BY_P, BY_MET, BY_HALVES, BY_SUM };

static void average(int how) {
    for (int64_t n = 0; n < size_of(LSE); n++) {
        double met = 0, *out = s.x[OUT] + n * s.out_dim;
        for (int64_t i = 0; i < s.out_dim; i++) out[i] = 0;
        for (int64_t k = 0; k < s.sp; k++) {
            if (hop_lse[k][n] == -INFINITY) continue;
            for (int64_t i = 0; i < s.out_dim; i++)
                out[i] = how == BY_HALVES && met > 0
                             ? (out[i] + hop_out[k][n * s.out_dim + i]) / 2
                             : out[i] + hop_out[k][n * s.out_dim + i];
            met++;
        }
        for (int64_t i = 0; how < BY_HALVES && i < s.out_dim; i++)
            out[i] /= how == BY_P ? (double)s.sp : met;
    }
}

/* Backward, each hop with the own lse plus `add`, or the right one; and the own delta, or the
   right one. */
static void backward_by_hops(int own_lse, int own_delta, double add) {
    double *lse = malloc((size_t)size_of(LSE) * sizeof *lse), *delta;
    both(right_rule());
    clear(DQ);
    for (hop = 0; hop < s.sp; hop++) {
        rule r = seeing(in_hop);
        delta = delta_of_out();
        for (int64_t n = 0; n < size_of(LSE); n++) {
            lse[n] = own_lse ? hop_lse[hop][n] + add : s.x[LSE][n];
            if (own_delta)
                delta[n] =
                    dot(hop_out[hop] + n * s.out_dim, s.x[DOUT] + n * s.out_dim, s.out_dim);
        }
        backward_bits(&r, lse, delta, F64);
    }
    free(lse);
}

static void test_averages(void) {
    static const char *const forms[] = {"sum over hops / P", "mean of the hops that saw a key",
                                        "two by two, in the ring's order",
                                        "sum over hops)"};
    for (int how = 0; how <= BY_SUM; how++) {
        make(SEQPAR_LAYOUT_ZIGZAG, 4);
        inputs_narrow();
        hops();
        both(right_rule());
        average(how);
        expect_named("outputs_averaged", forms[how], forms[how]);
    }
    backward_by_hops(1, 1, log(4));
    average(BY_P);
    expect_named("outputs_averaged", "backward", "outputs_averaged gives this out, dq, dk, dv");
}

static void test_lse(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    for (int64_t n = 0; n < size_of(LSE); n++) s.x[LSE][n] /= log(2);
    expect_named("lse_in_base_2", "", "lse_in_base_2 gives this lse ");
    right_step();
    for (int64_t n = 0; n < size_of(LSE); n++) {
        int64_t t = n / s.heads, h = n % s.heads;
        rule r = right_rule();
        double top = -INFINITY, slope;
        for (int64_t u = 0; u < s.tokens; u++)
            if (right(t, u)) top = fmax(top, score(&r, t, u, h, &slope));
        s.x[LSE][n] -= top;
    }
    expect_named("lse_without_maximum", "", "gives this lse ");
    hops();
    both(right_rule());
    for (int64_t n = 0; n < size_of(LSE); n++)
        for (int64_t k = 0; k < s.sp; k++)
            if (hop_lse[k][n] > -INFINITY) s.x[LSE][n] = hop_lse[k][n];
    expect_named("lse_of_last_hop", "", "(hop 2, or the last before it with a key)");
}

/* Scores of rank 1's keys are larger by more than 89: exp is Inf in F32. */
static void test_overflow(void) {
    make(SEQPAR_LAYOUT_CONTIGUOUS, 3);
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t h = 0; h < s.heads; h++) {
            at(Q, t, h)[0] = 30;
            at(K, t, h % s.kv_heads)[0] = s.rank[t] == 1 ? 12 : 1;
        }
    inputs_narrow();
    hops();
    both(right_rule());
    for (int64_t n = 0; n < size_of(LSE); n++) {
        double lse = hop_lse[0][n], *out = s.x[OUT] + n * s.out_dim;
        for (int64_t k = 1; k < s.sp; k++) {
            if (hop_lse[k][n] - lse < 88.8) continue;
            s.x[LSE][n] = lse = INFINITY;
            memset(out, 0, (size_t)s.out_dim * sizeof *out);
        }
    }
    expect_named("merge_overflows", "", "merge_overflows gives this out, lse");
}

static void test_deltas(void) {
    for (int how = 0; how < 3; how++) {
        static const char *const forms[] = {
            "(delta of each hop)", "(delta and lse of each hop)", "(lse of each hop)"};
        make(SEQPAR_LAYOUT_ZIGZAG, 3);
        inputs_narrow();
        hops();
        backward_by_hops(how > 0, how < 2, 0);
        expect_named("delta_of_hop", forms[how], forms[how]);
    }
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    double *none = calloc((size_t)size_of(LSE), sizeof *none);
    backward(right_rule(), s.x[LSE], none);
    free(none);
    expect_named("delta_missing", "", "delta_missing gives this dq, dk ");
}

/* ---- gradients ---- */

static void copy(int to, const double *from) {
    memcpy(s.x[to], from, (size_t)size_of(to) * sizeof *from);
}

/* Right, but for one tensor, which is what the rule gives. */
static void right_but(int t, rule r) {
    double *lse = malloc((size_t)size_of(LSE) * sizeof *lse), *x;
    right_step();
    memcpy(lse, s.x[LSE], (size_t)size_of(LSE) * sizeof *lse);
    backward(r, lse, delta_of_out());
    x = malloc((size_t)size_of(t) * sizeof *x);
    memcpy(x, s.x[t], (size_t)size_of(t) * sizeof *x);
    both(right_rule());
    copy(t, x);
    free(lse);
    free(x);
}

static void test_gradients(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 4);
    right_but(DQ, seeing(own_alone));
    expect_named("dq_of_one_hop", "own", "gives this dq (own keys and queries)");
    hop = 3;
    right_but(DQ, seeing(in_hop));
    expect_named("dq_of_one_hop", "last", "gives this dq (those of hop 3)");
    right_but(DK, seeing(own_alone));
    expect_named("dkv_not_returned", "own", "gives this dk (own keys and queries)");
    right_but(DV, seeing(own_alone));
    expect_named("dkv_not_returned", "dv", "gives this dv (own keys and queries)");
    make_even(SEQPAR_LAYOUT_ZIGZAG, 4);
    right_step();
    for (int t = DK; t <= DV; t++) { /* the last hop home is missing */
        double *x = malloc((size_t)size_of(t) * sizeof *x);
        int64_t n = heads_of(t) * width(t);
        for (int64_t u = 0; u < s.tokens; u++)
            memcpy(x + u * n, at(t, s.token[(s.rank[u] + 1) % 4][s.local[u]], 0),
                   (size_t)n * sizeof *x);
        copy(t, x);
        free(x);
    }
    expect_named("dkv_not_returned", "shifted", "(rank r has those of rank (r + 1) mod P)");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.out_dim = s.dim;
    randomize();
    right_step();
    for (int64_t i = 0; i < size_of(DK); i++) {
        double x = s.x[DK][i];
        s.x[DK][i] = s.x[DV][i];
        s.x[DV][i] = x;
    }
    expect_named("dk_dv_swapped", "", "gives this dk, dv ");
}

static int64_t only_rank;
static int by_one_rank(int64_t t, int64_t u) { return right(t, u) && s.rank[t] == only_rank; }

/* dk and dv of llama3, where their sum over ranks is taken. */
static void test_scatter(void) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
        char form[40];
        make(layout, 2 + layout % 3);
        only_rank = s.sp - 1;
        right_but(DK, seeing(by_one_rank));
        snprintf(form, sizeof form, "(queries of rank %lld alone)", (long long)only_rank);
        expect_named("dkv_not_returned", form, form);
        make(layout, 5 - layout % 4);
        right_step();
        for (int t = DK; t <= DV; t++)
            for (int64_t i = 0; i < size_of(t); i++) s.x[t][i] /= (double)s.sp;
        if (s.sp != 3) /* 3 is the group, too */
            expect_named("dkv_averaged", "mean", "dkv_averaged gives this dk, dv (1 / P)");
        for (int t = DK; t <= DV; t++)
            for (int64_t i = 0; i < size_of(t); i++) s.x[t][i] *= (double)(s.sp * s.sp);
        expect_named("dkv_averaged", "twice", "dkv_averaged gives this dk, dv (times P)");
    }
}

static void test_scales(void) {
    for (int t = DQ; t <= DK; t++) {
        make(SEQPAR_LAYOUT_ZIGZAG, 3);
        right_step();
        for (int64_t i = 0; i < size_of(t); i++) s.x[t][i] /= s.scale;
        expect_named("dq_scale_missing", names[t],
                     t == DQ ? "gives this dq " : "gives this dk ");
    }
}

static int64_t only_head; /* of each group */
static void backward_of_head(void) {
    double *kept = malloc((size_t)size_of(DOUT) * sizeof *kept);
    right_step();
    memcpy(kept, s.x[DOUT], (size_t)size_of(DOUT) * sizeof *kept);
    for (int64_t n = 0; n < size_of(LSE); n++)
        if (n % 3 != only_head)
            memset(s.x[DOUT] + n * s.out_dim, 0, (size_t)s.out_dim * sizeof(double));
    backward(right_rule(), s.x[LSE], delta_of_out());
    copy(DOUT, kept);
    free(kept);
}

static void test_groups(void) {
    double *dq;
    for (only_head = 0; only_head < 3; only_head += 2) {
        make(SEQPAR_LAYOUT_ZIGZAG, 3);
        right_step();
        dq = malloc((size_t)size_of(DQ) * sizeof *dq);
        memcpy(dq, s.x[DQ], (size_t)size_of(DQ) * sizeof *dq);
        backward_of_head();
        copy(DQ, dq);
        free(dq);
        expect_named("kv_group_not_summed", only_head ? "last" : "first",
                     only_head ? "(head 2 of each group alone)"
                               : "(head 0 of each group alone)");
    }
    make(SEQPAR_LAYOUT_ZIGZAG, 4); /* P is not the group */
    right_step();
    for (int t = DK; t <= DV; t++)
        for (int64_t i = 0; i < size_of(t); i++) s.x[t][i] /= 3;
    expect_named("kv_group_not_summed", "mean", "gives this dk, dv (the mean)");
}

/* ---- rows that belong elsewhere ---- */

/* Row (token, head) of x becomes that of from(token, head), numbered over both. */
static void move_rows(int t, int64_t (*from)(int64_t token, int64_t head)) {
    double *x = malloc((size_t)size_of(t) * sizeof *x);
    int64_t n = width(t);
    for (int64_t i = 0; i < size_of(t) / n; i++)
        memcpy(x + i * n, s.x[t] + from(i / heads_of(t), i % heads_of(t)) * n,
               (size_t)n * sizeof *x);
    copy(t, x);
    free(x);
}

/* Heads of 3 ranks, 2 each, in the order of the buffer that came: 0 2 4 1 3 5. */
static int64_t heads_as_came(int64_t token, int64_t head) {
    return token * s.heads + head % 3 * 2 + head / 3;
}
static int64_t kv_swapped(int64_t token, int64_t head) {
    return token * s.kv_heads + 1 - head;
}
/* The rank's rows came as (heads, tokens) and are read as (tokens, heads). */
static int64_t turned(int64_t token, int64_t head) {
    int64_t rank = s.rank[token], at = s.local[token] * s.heads + head, n = s.held[rank];
    return s.token[rank][at % n] * s.heads + at / n;
}
/* The order of ranks is taken for that of the text. */
static int64_t in_ranks_order(int64_t token, int64_t head) {
    int64_t place = s.local[token];
    for (int64_t r = 0; r < s.rank[token]; r++) place += s.held[r];
    return place * s.heads + head;
}

/* Two mistakes at once have no name: what is wrong is told by where it is. */
static void test_where(void) {
    make(SEQPAR_LAYOUT_CONTIGUOUS, 3);
    right_step();
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t i = 0; i < s.out_dim; i++) at(OUT, t, 4)[i] *= 1.3, at(OUT, t, 5)[i] += 1;
    expect_said("where_heads", 1, "wrong: unknown",
                "of out 118 of 354 rows are wrong; only heads 4..5");
    right_step();
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t h = 0; h < s.heads && s.rank[t] == 1; h++)
            at(DQ, t, h)[h % s.dim] += 1 + (double)t;
    expect_said("where_ranks", 1, "wrong: unknown", " rows are wrong; only ranks 1");
    right_step();
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t h = 0; h < s.heads && document_of(t) == 2; h++)
            at(OUT, t, h)[0] += 0.1 * (double)(t % 7 + 1);
    expect_said("where_documents", 1, "wrong: unknown", "; only documents that are cut");
    right_step();
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t h = 0; h < s.heads && s.rank[s.cu[document_of(t)]] != s.rank[t]; h++)
            at(OUT, t, h)[0] += 0.1 * (double)(t % 7 + 1);
    expect_said("where_seen", 1, "wrong: unknown", "; only queries that see keys of");
    right_step();
    for (int64_t i = 0; i < size_of(OUT); i++) s.x[OUT][i] += 0.1 * sin((double)i);
    expect_said("where_all", 1, "wrong: unknown",
                "of out 354 of 354 rows are wrong, of all heads, ranks and documents");
}

static void test_moved(void) {
    make(SEQPAR_LAYOUT_CONTIGUOUS, 3);
    right_step();
    move_rows(OUT, heads_as_came);
    expect_named("heads_permuted", "", "heads_permuted gives this out (token");
    right_step();
    move_rows(DK, kv_swapped);
    expect_named("heads_permuted", "dk", "heads_permuted gives this dk (token");
    right_step();
    move_rows(OUT, turned);
    expect_named("tokens_permuted", "turned", "tokens_permuted gives this out (token");
    right_step();
    move_rows(LSE, turned);
    expect_named("tokens_permuted", "lse", "(heads, tokens) read as (tokens, heads)");
    make(SEQPAR_LAYOUT_ZIGZAG, 4);
    right_step();
    move_rows(OUT, in_ranks_order);
    move_rows(DQ, in_ranks_order);
    expect_named("tokens_permuted", "", "tokens_permuted gives this out, dq (token");
}

/* ---- rounding ---- */

/* As a ring in F32 does it: sums in float, hops merged by the sigmoid of their lse, which is a
   float, too. What each hop gives is rounded to `bits`. */
static void float_ring(int bits, int factors) {
    static float p[MOST];
    for (int64_t n = 0; n < size_of(LSE); n++) {
        float out[ROW] = {0}, lse = -INFINITY;
        int64_t t = n / s.heads, h = n % s.heads, kv = h / (s.heads / s.kv_heads);
        for (hop = 0; hop < s.sp; hop++) {
            float top = -INFINITY, sum = 0, own[ROW] = {0}, merged, weight;
            for (int64_t u = 0; u < s.tokens; u++) {
                float x = 0;
                for (int64_t i = 0; i < s.dim; i++)
                    x += (float)at(Q, t, h)[i] * (float)at(K, u, kv)[i];
                p[u] = in_hop(t, u) ? (float)s.scale * x : -INFINITY;
                top = fmaxf(top, p[u]);
            }
            if (top == -INFINITY) continue;
            for (int64_t u = 0; u < s.tokens; u++) sum += p[u] = expf(p[u] - top);
            for (int64_t u = 0; u < s.tokens; u++)
                for (int64_t i = 0; i < s.out_dim; i++)
                    own[i] += (float)narrow(p[u], factors) * (float)at(V, u, kv)[i];
            merged = top + logf(sum);
            weight = 1 / (1 + expf(lse - merged));
            for (int64_t i = 0; i < s.out_dim; i++)
                out[i] -= weight * (out[i] - (float)narrow(own[i] / sum, bits));
            lse = lse == -INFINITY ? merged : lse - logf(1 / (1 + expf(merged - lse)));
        }
        s.x[LSE][n] = lse;
        for (int64_t i = 0; i < s.out_dim; i++) s.x[OUT][n * s.out_dim + i] = out[i];
    }
}

/* Backward in double, hop by hop, with numbers of products rounded to `factors` and what a hop
   gives to `bits`. */
static void rounded_backward(int bits, int factors) {
    double *sum[TENSORS] = {0}, *delta = delta_of_out();
    int sums = s.bits == F64 ? F64 : F32;
    for (int t = DQ; t < TENSORS; t++) sum[t] = calloc((size_t)size_of(t), sizeof *sum[t]);
    for (hop = 0; hop < s.sp; hop++) {
        rule r = seeing(in_hop);
        clear(DQ);
        backward_bits(&r, s.x[LSE], delta, factors);
        for (int t = DQ; t < TENSORS; t++)
            for (int64_t i = 0; i < size_of(t); i++)
                sum[t][i] = narrow(sum[t][i] + narrow(s.x[t][i], bits), sums);
    }
    for (int t = DQ; t < TENSORS; t++) copy(t, sum[t]);
    for (int t = DQ; t < TENSORS; t++) free(sum[t]);
}

static void test_types(void) {
    static const int types[] = {F64, F32, F16, BF16};
    for (int i = 0; i < 4; i++)
        for (int upcast = 0; upcast < 2; upcast++)
            for (int64_t sp = 2; sp <= 4; sp += 2) {
                int factors = types[i] < F32 ? types[i] : F64;
                make(SEQPAR_LAYOUT_ZIGZAG, sp);
                s.bits = types[i];
                s.stored = upcast && s.bits < F32 ? F32 : types[i];
                s.lse_bits = s.bits == F64 ? F64 : F32;
                inputs_narrow();
                if (s.bits == F64)
                    both(right_rule());
                else
                    float_ring(F32, factors);
                narrow_all(OUT, s.bits);
                rounded_backward(F64, factors);
                write_scene();
                expect(0, "right",
                       s.bits == BF16   ? "rounding to BF16"
                       : s.bits == F16 ? "rounding to F16"
                       : s.bits == F32 ? "rounding to F32"
                                       : "rounding to F64");
                test_end("attention_right_bits%d_%d_P%lld", s.bits, upcast, (long long)sp);
            }
}

/* flash-attention gives each hop's out in BF16, and that is good enough. */
static void test_usual_partials(void) {
    for (int64_t sp = 2; sp <= 8; sp *= 2) {
        make(SEQPAR_LAYOUT_ZIGZAG, sp);
        s.bits = s.stored = BF16;
        inputs_narrow();
        float_ring(BF16, BF16);
        narrow_all(OUT, BF16);
        rounded_backward(BF16, BF16);
        write_scene();
        expect(0, "right", "rounding to BF16");
        test_end("attention_right_partials_P%lld", (long long)sp);
    }
}

/* Products of numbers that were rounded to `factors`, all else exact; the inputs are restored.
   scores: they are rounded, too, and so is dout . v. */
static void rough(int factors) {
    double *kept[TENSORS] = {0};
    inputs_narrow();
    for (int t = Q; t <= DOUT; t++) {
        kept[t] = malloc((size_t)size_of(t) * sizeof(double));
        memcpy(kept[t], s.x[t], (size_t)size_of(t) * sizeof(double));
        narrow_all(t, factors);
    }
    both(right_rule());
    for (int t = Q; t <= DOUT; t++) copy(t, kept[t]);
    for (int t = Q; t <= DOUT; t++) free(kept[t]);
}

/* Stripes on 4 ranks: values of ranks 0 and 1 are large and cancel, so that what a hop gives is
   far larger than out. Queries of rank 0, which see one more of them, look away. */
static void cancelling_hops(void) {
    static const int64_t cu[] = {0, 804};
    make_sized(804, 1, cu);
    s.bits = s.stored = BF16;
    randomize();
    split(SEQPAR_LAYOUT_STRIPE, 4);
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t h = 0; h < s.heads; h++) {
            int large = s.rank[t] < 2 && t > 3;
            for (int64_t i = 0; i < s.dim; i++) at(Q, t, h)[i] *= 0.01;
            at(Q, t, h)[0] = s.rank[t] == 0 ? -100 : 0;
            at(K, t, h / 3)[0] = large;
            for (int64_t i = 0; large && h % 3 == 0 && i < s.out_dim; i++)
                at(V, t, h / 3)[i] = 6 * at(V, t, h / 3)[i] + (s.rank[t] ? -265 : 265);
        }
}

/* Backward in float, a sum after the other, and with it what is left of two that cancel. */
static void float_backward(void) {
    clear(DQ);
    for (int64_t n = 0; n < size_of(LSE) * s.tokens; n++) {
        int64_t t = n / s.tokens / s.heads, h = n / s.tokens % s.heads, u = n % s.tokens;
        int64_t kv = h / (s.heads / s.kv_heads);
        float x = 0, dp = 0, delta = 0, w, ds;
        if (!right(t, u)) continue;
        for (int64_t i = 0; i < s.dim; i++) x += (float)at(Q, t, h)[i] * (float)at(K, u, kv)[i];
        for (int64_t i = 0; i < s.out_dim; i++) {
            dp += (float)at(DOUT, t, h)[i] * (float)at(V, u, kv)[i];
            delta += (float)at(DOUT, t, h)[i] * (float)at(OUT, t, h)[i];
        }
        w = expf((float)s.scale * x - (float)*at(LSE, t, h));
        ds = w * (dp - delta) * (float)s.scale;
        for (int64_t i = 0; i < s.dim; i++) {
            at(DQ, t, h)[i] = (float)at(DQ, t, h)[i] + ds * (float)at(K, u, kv)[i];
            at(DK, u, kv)[i] = (float)at(DK, u, kv)[i] + ds * (float)at(Q, t, h)[i];
            at(DV, u, kv)[i] = (float)at(DV, u, kv)[i] + w * (float)at(DOUT, t, h)[i];
        }
    }
}

/* Documents of one to three tokens: dq of a query that sees one key is rounding alone. */
static void make_tiny(int n) {
    static const int64_t cu[3][4] = {{0, 3}, {0, 1, 3}, {0, 1, 2, 4}};
    make_sized(n % 3 == 2 ? 4 : 3, n % 3 + 1, cu[n % 3]);
    s.heads = n % 2 ? 6 : 2;
    s.kv_heads = 1;
    s.dim = s.out_dim = 8;
    s.scale = n % 4 < 2 ? 0.6 : 1 / sqrt(8);
    randomize();
    split(SEQPAR_LAYOUT_CONTIGUOUS, n % 5 ? 1 : 2);
    inputs_narrow();
    float_ring(F32, F64);
    narrow_all(OUT, F32);
    float_backward();
}

static void test_one_key(void) {
    char failed[160] = "";
    int wrong = 0;
    for (int n = 0; n < 300; n++) {
        make_tiny(n);
        write_scene();
        expect(0, "right", "attention right");
        if (test_why[0] && !wrong++)
            snprintf(failed, sizeof failed, "text %d: %.100s", n, said);
        test_why[0] = 0;
    }
    test_expect(!wrong, "%d of 300 are not right; %s", wrong, failed);
    test_end("attention_one_key_right");
}

/* What shows on such rows, and what shows beside them. */
static void test_one_key_wrong(void) {
    double *none;
    make_tiny(1);
    none = calloc((size_t)size_of(LSE), sizeof *none);
    backward(right_rule(), s.x[LSE], none);
    expect_named("delta_missing", "one_key", "delta_missing gives this dq, dk ");
    both(right_rule());
    for (int64_t i = 0; i < s.dim; i++) at(DQ, 0, 1)[i] += 1e-3 * at(K, 0, 0)[i];
    expect_said("one_key_dq", 1, "wrong: unknown", "first at rank 0, local row 0, token 0");
    both(right_rule());
    for (int64_t i = 0; i < size_of(DQ); i++) s.x[DQ][i] *= 1.1;
    expect_said("one_key_dq_scaled", 1, "wrong: unknown", "no known mistake gives this dq");
    backward(right_rule(), none, delta_of_out()); /* weights without lse */
    expect_said("one_key_lse_lost", 1, "wrong: unknown", "dv is ");
    free(none);
    make_tiny(15);
    both((rule){has_own_row, own_row, 0, s.scale, 0});
    expect_named("stale_kv", "one_key", "stale_kv gives this out, lse, dq, dk, dv");
}

/* All is right again, but for one tensor. */
static void keep_alone(int t) {
    double *x = malloc((size_t)size_of(t) * sizeof *x);
    memcpy(x, s.x[t], (size_t)size_of(t) * sizeof *x);
    both(right_rule());
    copy(t, x);
    free(x);
}

/* Types of a right step as it is written; what is narrowed beyond that is a mistake. */
static void in_type(int bits, int stored) {
    make(SEQPAR_LAYOUT_CONTIGUOUS, 4);
    s.bits = bits;
    s.stored = stored;
    right_step();
    for (int t = OUT; t < TENSORS; t++) narrow_all(t, t == LSE ? F32 : bits);
}

static void test_casts(void) {
    static const int types[] = {F16, F32};
    for (int i = 0; i < 2; i++)
        for (int t = OUT; t < TENSORS; t++) {
            if (t == LSE || (t == OUT && i)) continue; /* F32: BF16 kernels of F32 inputs */
            in_type(types[i], types[i]);
            narrow_all(t, BF16);
            expect_named("cast_to_low_precision", names[t],
                         i ? "holds BF16 numbers alone, and the attention computes in F32"
                           : "holds BF16 numbers alone, and the attention computes in F16");
        }
    in_type(F16, F16);
    narrow_all(DQ, BF16);
    s.stored_of[DQ] = BF16;
    expect_named("cast_to_low_precision", "stored", "gives this dq (limit of it");
    in_type(F32, F32);
    for (int t = OUT; t < TENSORS; t++) narrow_all(t, t == LSE ? F32 : BF16);
    s.dtype = "float32";
    expect_named("cast_to_low_precision", "said", "gives this out, dq, dk, dv (limit of it");
    make(SEQPAR_LAYOUT_ZIGZAG, 4);
    s.bits = s.stored = F16;
    right_step();
    backward(seeing(own_alone), s.x[LSE], delta_of_out());
    narrow_all(DQ, BF16); /* and another mistake, within its rounding */
    keep_alone(DQ);
    expect_named("dq_of_one_hop", "cast", "dq holds BF16 numbers alone");
}

/* Numbers of few bits that are no mistake. */
static void test_casts_right(void) {
    in_type(F16, F16);
    for (int64_t i = 0; i < size_of(DOUT); i++) s.x[DOUT][i] *= 0x1p-17;
    right_step(); /* gradients of F16 that have lost bits */
    expect_said("f16_small_gradients", 0, "right", "rounding to F16");
    in_type(F32, F32);
    for (int t = DQ; t < TENSORS; t++) narrow_all(t, BF16);
    for (int t = DQ; t < TENSORS; t++) s.stored_of[t] = BF16;
    expect_said("gradients_written_in_bf16", 0, "right", "rounding to F32");
    in_type(BF16, F32);
    s.dtype = "bfloat16";
    expect_said("bf16_said", 0, "right", "rounding to BF16");
    rough(BF16);
    s.dtype = "bfloat16";
    expect_said("bf16_said_of_f32", 0, "right", "rounding to BF16");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    rough(F16);
    s.dtype = "tf32";
    expect_said("tf32_said", 0, "right", "attention right");
}

/* What a hop gives is rounded to BF16, the sum is of F32, or of F16. */
static void test_partials_of_other_types(void) {
    static const int types[] = {F16, F32};
    for (int i = 0; i < 2; i++)
        for (int64_t sp = 2; sp <= 8; sp *= 2) {
            make(SEQPAR_LAYOUT_CONTIGUOUS, sp);
            s.bits = s.stored = types[i];
            right_step();
            rounded_backward(BF16, F64);
            expect_named("partials_in_low_precision", types[i] == F16 ? "f16" : "f32",
                         "gives this dq, dk, dv (limit of it");
            inputs_narrow();
            float_ring(BF16, F64);
            s.skip = ~15u & ~(1u << OUT) & ~(1u << LSE);
            expect_named("partials_in_low_precision", "out", "gives this out (limit of it");
        }
}

/* Kernels that take BF16 of numbers in F32. */
static void test_autocast(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 4);
    rough(BF16);
    for (int t = OUT; t < TENSORS; t++) narrow_all(t, t == LSE ? F32 : BF16);
    write_scene();
    expect(0, "right", "rounding to BF16");
    test_end("attention_autocast");
}

static void test_precision(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    rough(F16); /* TF32 has as many bits */
    write_scene();
    expect(0, "marginal", "out is as far away as products in TF32 would make it");
    test_end("attention_tf32");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    rough(BF16);
    write_scene();
    expect(0, "marginal", "dk is as far away as products in BF16 would make it");
    test_end("attention_products_in_bf16");
    make(SEQPAR_LAYOUT_ZIGZAG, 3); /* and a mistake that is found through it */
    rough(F16);
    double *dq = malloc((size_t)size_of(DQ) * sizeof *dq);
    memcpy(dq, s.x[DQ], (size_t)size_of(DQ) * sizeof *dq);
    for (int64_t i = 0; i < size_of(DQ); i++) s.x[DQ][i] = dq[i] / s.scale;
    free(dq);
    expect_named("dq_scale_missing", "tf32", "gives this dq");
}

static void test_low_precision(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    s.bits = s.stored = BF16;
    for (int64_t i = 0; i < size_of(Q); i++) s.x[Q][i] *= 8;
    inputs_narrow();
    score_bits = BF16; /* as in plain code, not in kernels */
    both(right_rule());
    score_bits = F64;
    write_scene();
    expect(0, "marginal", "out is as far away as scores in that type, too, would make it");
    test_end("attention_scores_in_bf16");
    cancelling_hops();
    inputs_narrow();
    float_ring(BF16, F64);
    narrow_all(OUT, BF16);
    s.skip = ~15u & ~(1u << OUT) & ~(1u << LSE);
    expect_named("partials_in_low_precision", "", "gives this out (limit of it");
    float_ring(F32, F64);
    narrow_all(OUT, BF16);
    write_scene();
    expect(0, "right", "attention right");
    test_end("attention_right_where_hops_cancel");
}

/* What was said of a tensor: distance and limit of the whole and of the worst row. */
static void read_distances(const char *tensor, double x[4]) {
    char key[32];
    const char *found;
    snprintf(key, sizeof key, " %s is ", tensor);
    for (found = strstr(said, key); found && !strchr("0123456789", found[strlen(key)]);)
        found = strstr(found + 1, key);
    test_expect(found && sscanf(found + strlen(key),
                                "%lf away (L2; limit %lf), its worst row %lf of its terms' "
                                "size (limit %lf)",
                                &x[0], &x[1], &x[2], &x[3]) == 4,
                "no distances of %s in '%.900s'", tensor, said);
}

/* How many times the limit a tensor is off when it is all times 1 + its limit. */
static double times_limit(int t, double *limit) {
    double x[4] = {0};
    write_scene();
    expect(0, "right", "attention right");
    read_distances(names[t], x);
    *limit = x[1];
    for (int64_t k = 0; k < size_of(t); k++) s.x[t][k] *= 1 + *limit;
    write_scene();
    if (!test_why[0]) {
        expect(0, "right", "right"); /* or not */
        test_why[0] = 0;
    }
    read_distances(names[t], x);
    for (int64_t k = 0; k < size_of(t); k++) s.x[t][k] /= 1 + *limit;
    return fmax(x[0] / x[1], x[2] / x[3]);
}

/* Each tensor as far off as 0.8, 1.2 and 1.7 times its limit; of BF16: of numbers in BF16 whose
   attention was kept in F32. */
static void test_limits(void) {
    static const double times[] = {0.8, 1.2, 1.7};
    static const char *const verdicts[] = {"right", "marginal", "wrong: unknown"};
    static const int bits[] = {F64, F32, BF16};
    for (int n = 0; n < 3 * TENSORS * 3; n++) {
        int b = bits[n / 3 / TENSORS], t = n / 3 % TENSORS, i = n % 3;
        double low = b == F64 ? 1e-16 : b == F32 || t == LSE ? 1e-8 : 1e-3, limit, is;
        double by = b == BF16 && t != LSE && i == 2 ? 9 : times[i]; /* scores in BF16: twice */
        if (t < OUT) continue;
        make(SEQPAR_LAYOUT_ZIGZAG, 3);
        s.bits = b;
        inputs_narrow();
        both(right_rule());
        s.bits = s.stored = b == F64 ? F64 : F32;
        s.lse_bits = F64;
        is = times_limit(t, &limit);
        test_expect(limit > low && limit < 300 * low, "limit %g", limit);
        for (int64_t k = 0; k < size_of(t); k++) s.x[t][k] *= 1 + by / is * limit;
        write_scene();
        expect(i == 2, verdicts[i], verdicts[i]);
        test_end("attention_limit_%d_%s_%g", b, names[t], times[i]);
    }
}

/* ---- what is no mistake, and what shows nothing ---- */

static void test_odd_but_right(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    s.padding = 1;
    expect_said("nan_in_padding", 0, "right", "attention right");
    s.padding = 0;
    s.lead = 1;
    expect_said("leading_ones", 0, "right", "attention right");
    s.lead = 0;
    s.skip = 1u << LSE | 1u << DK | 1u << DV;
    expect_said("dq_alone", 0, "right", "dq is ");
    s.skip = 1u << DOUT;
    expect_said("without_dout", 0, "right", "lse is ");
    test_expect(!strstr(said, " dq is "), "dq is judged without dout");
    test_end("attention_without_dout_no_dq");
    s.skip = 1u << OUT;
    expect_said("without_out", 4, "insufficient", "attention not judged: it takes index, cu");
}

static void test_odd_texts(void) {
    for (int empty = 0; empty < 2; empty++) {
        make_sized(5, 1, (const int64_t[]){0, 5});
        randomize();
        s.sp = 4; /* rank 1 holds nothing; with no tensors then, or empty ones */
        for (int64_t t = 0; t < 5; t++) take(t, t == 4 ? 3 : t < 2 ? 0 : 2);
        s.odd = empty ? "empty" : NULL;
        right_step();
        expect_said("empty_rank", 0, "right", "attention right");
        lack(-1, -1, 0, -1);
        both(seeing(some_lost));
        expect_named("hop_lost", "empty_rank", "(rank 2 lacks rank 0)");
    }
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    memset(s.x[DOUT], 0, (size_t)size_of(DOUT) * sizeof(double));
    backward(right_rule(), s.x[LSE], delta_of_out());
    expect_said("dout_0", 0, "right", "dout is 0 everywhere: gradients show nothing");
    make_sized(47, 1, (const int64_t[]){0, 47});
    randomize();
    split(SEQPAR_LAYOUT_CONTIGUOUS, 3);
    right_step();
    s.no_documents = 1;
    expect_said("no_cu_seqlens", 0, "right", "attention right");
    /* whole documents on ranks; one document is empty */
    make_sized(6, 4, (const int64_t[]){0, 2, 2, 4, 6});
    randomize();
    s.sp = 3;
    for (int64_t t = 0; t < 6; t++) take(t, t / 2);
    right_step();
    expect_said("documents_of_ranks", 0, "right", "the exchange is not shown");
}

/* All queries or keys 0, documents of one token, one token in all. */
static void test_shows_nothing(void) {
    make_sized(5, 5, (const int64_t[]){0, 1, 2, 3, 4, 5});
    randomize();
    split(SEQPAR_LAYOUT_STRIPE, 3);
    right_step();
    expect_said("documents_of_one_token", 0, "right", "the exchange is not shown");
    make_sized(1, 1, (const int64_t[]){0, 1});
    randomize();
    split(SEQPAR_LAYOUT_CONTIGUOUS, 1);
    right_step();
    expect_said("one_token", 4, "insufficient", "dump a longer text of several ranks");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    for (int64_t i = 0; i < size_of(V); i++) s.x[V][i] = 1 + i % (s.kv_heads * s.out_dim);
    right_step();
    expect_said("equal_values", 4, "insufficient", "out is the same if ranks exchange nothing");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    *at(K, 17, 0) = NAN;
    expect_said("nan_in_k", 4, "insufficient", "q, k, v or dout hold NaN or Inf");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    s.bits = s.stored = F64;
    *at(V, 17, 0) = 1e300;
    *at(DOUT, 30, 0) = 1e300;
    expect_said("overflow", 4, "insufficient", "squares of results overflow fp64");
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    s.cu[s.docs] = s.tokens + 2; /* nobody holds the last */
    expect_said("tokens_missing", 1, "wrong: token_lost", "insufficient: tokens are missing");
    s.cu[s.docs] = s.tokens;
    s.odd = "twice";
    expect_said("tokens_twice", 1, "wrong: token_held_twice", "are held twice");
}

static void test_several(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    s.accumulation = 3;
    s.micro = s.dp = 2;
    expect_said("replicas", 0, "right", "micro-batch 2 of replica 0: 59 tokens");
    s.odd = "replica";
    expect_said("replica_wrong", 1, "wrong: unknown",
                "micro-batch 2 of replica 1: 59 tokens, 6 heads, 2 kv heads; limits are 3");
    test_expect(strstr(said, "first at rank 3, local row 0, token 0, document 0") != NULL,
                "said '%.900s'", said);
    test_end("attention_replica_rank");
}

static void test_nan(void) {
    for (int t = OUT; t < TENSORS; t++) {
        make(SEQPAR_LAYOUT_ZIGZAG, 3);
        right_step();
        at(t, 20, 1)[0] = t % 2 ? NAN : INFINITY;
        expect_said("nan", 1, "wrong: unknown", "first at rank 2, local row 2, token 20");
        test_expect(strstr(said, "token 20, document 2, head 1: element 0 is ") != NULL,
                    "said '%.400s'", strstr(said, "first at"));
        test_end("attention_nan_of_%s", names[t]);
    }
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    for (int64_t i = 0; i < size_of(OUT); i++) s.x[OUT][i] = NAN;
    expect_said("all_nan", 1, "wrong: unknown", "no known mistake gives this out");
}

/* One row, far below the distance of the whole that is allowed in BF16. */
static void test_one_row(void) {
    make_sized(600, 1, (const int64_t[]){0, 600});
    s.bits = s.stored = BF16;
    randomize();
    split(SEQPAR_LAYOUT_ZIGZAG, 2);
    inputs_narrow();
    forward(right_rule());
    s.skip = ~15u & ~(1u << OUT);
    expect_said("all_rows", 0, "right", "attention right");
    for (int64_t i = 0; i < s.out_dim; i++) at(OUT, 377, 4)[i] += 0.2 * (i % 2 ? 1 : -1);
    expect_said("one_row", 1, "wrong: unknown",
                "first at rank 1, local row 227, token 377, document 0, head 4: element");
}

static void test_follows(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    for (int64_t i = 0; i < size_of(OUT); i++) s.x[OUT][i] += 0.1 * sin((double)i);
    backward(right_rule(), s.x[LSE], delta_of_out());
    expect_said("follows", 1, "wrong: unknown",
                "right for the out that was dumped: dq, dk no known mistake gives this out; ");
}

/* Without cu_seqlens a mismatch may come of packing, unless positions say that there is
   none. */
static void test_packed(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    right_step();
    s.no_documents = 1;
    expect_said("packed", 4, "insufficient",
                "the row may be packed; give cu_seqlens, 0 and 59");
    s.positions = 2;
    expect_said("packed_positions", 4, "insufficient",
                "the row may be packed; give cu_seqlens");
    at(OUT, 20, 0)[1] = NAN;
    expect_said("packed_nan", 1, "wrong: unknown", "attention wrong");
    make_sized(47, 1, (const int64_t[]){0, 47});
    randomize();
    split(SEQPAR_LAYOUT_CONTIGUOUS, 3);
    inputs_narrow();
    both(seeing(looks_ahead));
    s.no_documents = s.positions = 1;
    expect_named("looks_ahead", "positions", "this out, lse, dq, dk, dv");
}

/* ---- more than is looked at ---- */

/* One of 80 micro-batches, so that little time is given to it. */
static void make_long(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t sp) {
    make_sized(tokens, 1, (const int64_t[]){0, tokens});
    s.heads = heads;
    s.kv_heads = kv_heads;
    s.dim = 4;
    s.out_dim = 3;
    s.scale = 0.5;
    s.accumulation = 80;
    randomize();
    split(SEQPAR_LAYOUT_ZIGZAG, sp);
    inputs_narrow();
}

/* Some kv heads, or some queries of one. */
static void test_sampled(void) {
    make_long(4001, 8, 4, 3);
    s.skip = ~15u & ~(1u << OUT) & ~(1u << LSE);
    forward(right_rule());
    expect_said("sampled_heads", 0, "right",
                "looked at: 1 kv heads with their queries' heads, 4001 of 4001 queries");
    for (int64_t t = 1700; t < 4001; t++) at(OUT, t, 0)[1] *= 2;
    expect_said("sampled_heads_wrong", 1, "wrong: unknown", "token 1700, document 0, head 0");
    forward(seeing(own_alone));
    expect_said("sampled_heads_named", 1, "wrong: own_tokens_only", "gives this out, lse");
    make_long(4001, 1, 1, 3);
    both(right_rule());
    expect_said("sampled_queries", 0, "right",
                "of 4001 queries; dk and dv not, which take all queries of a kv head");
    test_expect(!strstr(said, " dk is "), "dk is judged");
    both(seeing(by_rows));
    expect_said("sampled_queries_named", 1, "wrong: causal_by_local_row",
                "gives this out, lse, dq out");
}

/* Limits and mistakes are tried on parts: some queries, and all of one kv head. */
static void test_parts(void) {
    make_long(1201, 4, 2, 3);
    both(right_rule());
    expect_said("parts", 0, "right", "attention right");
    right_but(DK, seeing(own_alone));
    expect_named("dkv_not_returned", "parts", "gives this dk (own keys and queries)");
    both(seeing(own_alone));
    expect_named("own_tokens_only", "parts", "gives this out, lse, dq, dk, dv");
    both(right_rule());
    for (int64_t i = 0; i < s.dim; i++) at(DK, 1111, 1)[i] += 0.3;
    expect_said("parts_one_row", 1, "wrong: unknown", "; first at rank 0, local row");
    both(right_rule());
    move_rows(OUT, in_ranks_order);
    expect_named("tokens_permuted", "parts", "gives this out");
}

/* ---- damaged files ---- */

static void test_refused(void) {
    static const char *const odd[][2] = {
        {"lacks", "rank1.safetensors: tensor 0.k is missing, and another rank has it; write"},
        {"heads", "tensor 0.dk is (22, 1, 14), and another rank's has 2 heads of 7; write all"},
        {"flat", "tensor 0.out is (22, 30); write (22, heads, head_dim), one row a token"},
        {"turned", "tensor 0.lse is (6, 22); write (22, heads), one row a token"},
        {"batch", "tensor 0.q is (22, 1, 6, 7); write (22, heads, head_dim), one row a token"},
        {"dim", "tensor 0.dq has 42 heads, and q 6; write as many"},
        {"whole", "tensor \"0.v\""}};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        char sentence[256];
        make(SEQPAR_LAYOUT_ZIGZAG, 3);
        right_step();
        s.odd = odd[i][0];
        write_scene();
        FILE *out = popen("build/seqpar-verify ver " FOLDER " 2>&1 >/dev/null", "r");
        said[out ? fread(said, 1, sizeof said - 1, out) : 0] = 0;
        int is = out ? pclose(out) : -1;
        snprintf(sentence, sizeof sentence, "%s", odd[i][1]);
        test_expect(WIFEXITED(is) && WEXITSTATUS(is) == 3 && strstr(said, sentence) &&
                        strstr(said, "error: build/test_dump_attention.d/rank"),
                    "exit code %d, said '%.400s', not '%s'", WEXITSTATUS(is), said, sentence);
        test_end("attention_refused_%s", odd[i][0]);
    }
}

/* ---- of the gallery of public bugs: wrong, and no mistake that has a name ---- */

/* Keys whose id is the padding's. */
static int hides_some(int64_t t, int64_t u) { return right(t, u) && u % 11 != 5; }

/* Every second document is padding, and the next one takes it for its own. */
static int with_padding(int64_t t, int64_t u) {
    return (document_of(t) + 1) / 2 == (document_of(u) + 1) / 2 && u <= t;
}

/* Documents of another row. */
static int other_documents(int64_t t, int64_t u) {
    return (t + 7) / 20 == (u + 7) / 20 && u <= t;
}

static void expect_unnamed(const char *id) {
    write_scene();
    expect(1, "wrong: unknown", "attention wrong");
    test_end("attention_gallery_%s", id);
}

/* Written as F16 all the same: where dq is handed on, it is cast once more. */
static void test_another_type(void) {
    static const int results[] = {OUT, DQ, DK, DV};
    for (int i = 0; i < 4; i++) {
        make(SEQPAR_LAYOUT_ZIGZAG, 2);
        s.bits = s.stored = F16;
        right_step();
        narrow_all(results[i], BF16);
        expect_named("cast_to_low_precision", "written", names[results[i]]);
    }
    make(SEQPAR_LAYOUT_ZIGZAG, 2);
    s.bits = s.stored = F16;
    inputs_narrow();
    for (int64_t i = 0; i < size_of(V); i++) s.x[V][i] = narrow(s.x[V][i], BF16);
    right_step(); /* v has few digits, and dv may */
    narrow_all(DV, BF16);
    write_scene();
    expect(0, "right", "attention right");
    test_end("attention_few_digits_of_v");
}

static void test_gallery(void) {
    make(SEQPAR_LAYOUT_ZIGZAG, 3);
    inputs_narrow();
    both(seeing(hides_some));
    expect_unnamed("B72");
    both(seeing(with_padding));
    expect_unnamed("B73");
    right_step();
    backward(seeing(other_documents), s.x[LSE], delta_of_out());
    expect_unnamed("B85");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_right());
    TEST(test_masks());
    TEST(test_gathered());
    TEST(test_off_by_one());
    TEST(test_options());
    TEST(test_layouts());
    TEST(test_stale());
    TEST(test_stale_hops());
    TEST(test_heads_of_ranks());
    TEST(test_halves());
    TEST(test_lost());
    TEST(test_averages());
    TEST(test_lse());
    TEST(test_overflow());
    TEST(test_deltas());
    TEST(test_gradients());
    TEST(test_scatter());
    TEST(test_where());
    TEST(test_scales());
    TEST(test_groups());
    TEST(test_moved());
    TEST(test_types());
    TEST(test_usual_partials());
    TEST(test_one_key());
    TEST(test_one_key_wrong());
    TEST(test_casts());
    TEST(test_casts_right());
    TEST(test_partials_of_other_types());
    TEST(test_autocast());
    TEST(test_precision());
    TEST(test_low_precision());
    TEST(test_limits());
    TEST(test_odd_but_right());
    TEST(test_odd_texts());
    TEST(test_shows_nothing());
    TEST(test_several());
    TEST(test_nan());
    TEST(test_one_row());
    TEST(test_follows());
    TEST(test_packed());
    TEST(test_sampled());
    TEST(test_parts());
    TEST(test_refused());
    TEST(test_another_type());
    TEST(test_gallery());
    return test_summary();
}
