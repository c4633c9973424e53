/* SPDX-License-Identifier: MIT OR Unlicense */
/* attention_scene.h - writes dumps of one layer's attention, in any layout and type, and
   compares what `seqpar-verify ver` says of them. Attention is computed here a second time,
   pair by pair. A mistake is another rule: which keys a query sees, which keys and values it
   uses, from which lse and delta its gradient is computed. FOLDER: where dumps are written,
   another one in each suite. */
#ifndef ATTENTION_SCENE_H
#define ATTENTION_SCENE_H
#include "dump_page.h"
#include "oracle_says.h"

enum { RANKS = 8, MOST = 8200 };
enum { Q, K, V, DOUT, OUT, LSE, DQ, DK, DV, TENSORS };
static const char *const names[TENSORS] = {"q",   "k",  "v",  "dout", "out",
                                           "lse", "dq", "dk", "dv"};
enum { F64 = 53, F32 = 24, F16 = 11, BF16 = 8 };

/* A text, who holds it, and all of its attention by tokens: (tokens, heads, dim). positions: 1
   counts from the start of the row, 2 of the document. lead: shapes begin with two 1s. */
static struct scene {
    int64_t tokens, docs, cu[9], heads, kv_heads, dim, out_dim, window;
    double scale, softcap;
    int64_t sp, held[RANKS], rank[MOST], local[MOST], token[RANKS][MOST];
    double *x[TENSORS];
    int bits, stored; /* numbers are rounded to `bits` and written as type `stored` */
    int lse_bits;
    int stored_of[TENSORS];                                   /* 0: as `stored` */
    const char *dtype;                                        /* metadata; NULL: none */
    unsigned skip;                                            /* tensors that are not written */
    int no_documents, positions, lead, padding, accumulation; /* padding: 3 NaN rows a rank */
    int micro, dp;   /* the micro-batch that is dumped; replicas, all with the same numbers */
    const char *odd; /* what is wrong with rank 1's file */
} s;

/* ---- numbers ---- */

/* To the nearest number of so many bits; F16 ends at 2^-24. */
static inline double narrow(double x, int bits) {
    int exponent;
    double step;
    if (x == 0 || bits == F64 || !isfinite(x)) return x;
    frexp(x, &exponent);
    if (bits == F16 && exponent < -13) exponent = -13;
    step = ldexp(1, exponent - bits);
    return nearbyint(x / step) * step;
}

static inline int64_t width(int t) {
    int of_out = t == V || t == DOUT || t == OUT || t == DV;
    return t == LSE ? 1 : of_out ? s.out_dim : s.dim;
}
static inline int64_t heads_of(int t) {
    return t == K || t == V || t == DK || t == DV ? s.kv_heads : s.heads;
}
static inline int64_t size_of(int t) { return s.tokens * heads_of(t) * width(t); }
static inline double *at(int t, int64_t token, int64_t head) {
    return s.x[t] + (token * heads_of(t) + head) * width(t);
}

static inline void narrow_all(int t, int bits) {
    for (int64_t i = 0; i < size_of(t); i++) s.x[t][i] = narrow(s.x[t][i], bits);
}

/* ---- a text and its layout ---- */

static inline void take(int64_t token, int64_t rank) {
    s.rank[token] = rank;
    s.local[token] = s.held[rank];
    s.token[rank][s.held[rank]++] = token;
}

static inline void split(int layout, int64_t sp) {
    s.sp = sp;
    memset(s.held, 0, sizeof s.held);
    for (int64_t t = 0; t < s.tokens; t++)
        take(t, deal_rank(layout, sp, s.tokens, s.cu, s.docs, t));
}

static inline void randomize(void) {
    for (int t = 0; t < TENSORS; t++) {
        free(s.x[t]);
        s.x[t] = calloc((size_t)size_of(t) + 1, sizeof(double));
        for (int64_t i = 0; t <= DOUT && i < size_of(t); i++) s.x[t][i] = 1.5 * test_normal();
    }
}

static inline void make_sized(int64_t tokens, int64_t docs, const int64_t *cu) {
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
static inline void make(int layout, int64_t sp) {
    static const int64_t cu[] = {0, 17, 18, 41, 59};
    make_sized(59, 4, cu);
    randomize();
    split(layout, sp);
}

/* Shares are equal, of the row and of documents, for 2 and 4 ranks. */
static inline void make_even(int layout, int64_t sp) {
    static const int64_t cu[] = {0, 16, 24, 48};
    make_sized(48, 3, cu);
    randomize();
    split(layout, sp);
}

/* ---- attention, pair after pair ---- */

/* How the query of token t uses token u. Further arguments of a rule are globals. */
typedef struct rule {
    int (*sees)(int64_t t, int64_t u);
    int64_t (*source)(int64_t t, int64_t u); /* the token whose k and v are used; NULL: u */
    /* kv head of head h. 0: h / group, 1: h mod kv_heads, 2: number of h's rank mod kv_heads,
       3: h / group counted from 0 on each rank */
    int in_turn;
    double scale, softcap;
} rule;

static inline int64_t document_of(int64_t token) {
    int64_t d = 0;
    while (s.cu[d + 1] <= token) d++;
    return d;
}
static inline int together(int64_t t, int64_t u) { return document_of(t) == document_of(u); }
static inline int in_window(int64_t distance) { return !s.window || distance < s.window; }
static inline int right(int64_t t, int64_t u) {
    return together(t, u) && u <= t && in_window(t - u);
}

static inline rule right_rule(void) { return (rule){right, NULL, 0, s.scale, s.softcap}; }

static inline double dot(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static inline int64_t kv_of(const rule *r, int64_t h) {
    int64_t of_rank = s.heads / s.sp, group = s.heads / s.kv_heads;
    if (r->in_turn == 3) return h % of_rank / group;
    if (r->in_turn == 2) return h / of_rank % s.kv_heads;
    return r->in_turn ? h % s.kv_heads : h / group;
}
static inline int64_t source_of(const rule *r, int64_t t, int64_t u) {
    return r->source ? r->source(t, u) : u;
}

static int score_bits = F64;
static inline double score(const rule *r, int64_t t, int64_t u, int64_t h, double *slope) {
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
static inline double attend_one(const rule *r, int64_t t, int64_t h, int bits, double *out) {
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

static inline void forward_bits(const rule *r, int bits) {
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t h = 0; h < s.heads; h++)
            *at(LSE, t, h) = attend_one(r, t, h, bits, at(OUT, t, h));
}
static inline void forward(rule r) { forward_bits(&r, F64); }

static inline double *delta_of_out(void) {
    static double delta[MOST * 8];
    for (int64_t n = 0; n < s.tokens * s.heads; n++)
        delta[n] = dot(s.x[OUT] + n * s.out_dim, s.x[DOUT] + n * s.out_dim, s.out_dim);
    return delta;
}

/* Adds to dq, dk, dv the gradients of all pairs that the rule allows. p and ds are rounded to
   `bits` before their products. */
static inline void backward_bits(const rule *r, const double *lse, const double *delta,
                                 int bits) {
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

static inline void clear(int from) {
    for (int t = from; t < TENSORS; t++) memset(s.x[t], 0, (size_t)size_of(t) * sizeof(double));
}

static inline void backward(rule r, const double *lse, const double *delta) {
    clear(DQ);
    backward_bits(&r, lse, delta, F64);
}

static inline void both(rule r) {
    forward(r);
    backward(r, s.x[LSE], delta_of_out());
}

static inline void inputs_narrow(void) {
    for (int t = Q; t <= DOUT; t++) narrow_all(t, s.bits);
}

static inline void right_step(void) {
    inputs_narrow();
    both(right_rule());
}

/* ---- writing it ---- */

static inline uint16_t f16_of(double x) {
    int exponent;
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    double m = frexp(fabs(x), &exponent);
    if (x == 0) return sign;
    if (!isfinite(x)) return (uint16_t)(sign | 0x7c00 | (isnan(x) ? 1 : 0));
    if (exponent < -13) return (uint16_t)(sign | (uint16_t)ldexp(m, exponent + 24));
    return (uint16_t)(sign | (uint16_t)((exponent + 14) << 10) |
                      (uint16_t)(ldexp(m, 11) - 1024));
}

static inline void store(void *to, int64_t i, double x, int bits) {
    float f = (float)x;
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    if (bits == F64) ((double *)to)[i] = x;
    if (bits == F32) ((float *)to)[i] = f;
    if (bits == F16) ((uint16_t *)to)[i] = f16_of(x);
    if (bits == BF16) ((uint16_t *)to)[i] = (uint16_t)(u >> 16);
}

static inline seqpar_safetensors_dtype type_of(int bits) {
    return bits == F64   ? SEQPAR_SAFETENSORS_F64
           : bits == F32 ? SEQPAR_SAFETENSORS_F32
           : bits == F16 ? SEQPAR_SAFETENSORS_F16
                         : SEQPAR_SAFETENSORS_BF16;
}

static inline int is_odd(int64_t rank, const char *how) {
    return rank == 1 && s.odd && !strcmp(s.odd, how);
}

static inline void *add(page *p, const char *name, seqpar_safetensors_dtype dtype,
                        int64_t bytes, int dims, const int64_t *shape) {
    void *data = calloc(1, (size_t)bytes + 8);
    put(p, s.micro, name, data, dtype, dims, shape);
    return data;
}

/* Rows of this rank; those of padding hold NaN. */
static inline void add_tensor(page *p, int64_t rank, int t) {
    int bits = t == LSE ? s.lse_bits : s.stored_of[t] ? s.stored_of[t] : s.stored;
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

static inline void add_tokens(page *p, int64_t rank) {
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

static inline void write_rank(int64_t rank) {
    char text[7][32];
    seqpar_safetensors_pair pairs[] = {
        {"seqpar_dump", "1"},      {"rank", text[0]},
        {"world", text[6]},        {"sp", text[1]},
        {"window", text[2]},       {"softcap", text[3]},
        {"accumulation", text[5]}, {"dtype", s.dtype ? s.dtype : "tensors"},
        {"softmax_scale", text[4]}};
    page p = {.count = 0};
    snprintf(text[0], sizeof text[0], "%lld", (long long)rank);
    snprintf(text[1], sizeof text[1], "%lld", (long long)s.sp);
    snprintf(text[2], sizeof text[2], "%lld", (long long)s.window);
    snprintf(text[3], sizeof text[3], "%.17g", s.softcap);
    snprintf(text[4], sizeof text[4], "%.17g", s.scale);
    snprintf(text[5], sizeof text[5], "%d", s.accumulation);
    snprintf(text[6], sizeof text[6], "%lld", (long long)s.sp * s.dp);
    add_tokens(&p, rank);
    for (int t = 0; t < TENSORS; t++) add_tensor(&p, rank, t);
    save(&p, rank, pairs, s.scale == 1 / sqrt((double)s.dim) ? 8 : 9);
    free_data(&p);
}

static inline void write_scene(void) {
    for (int t = OUT; t < TENSORS; t++) narrow_all(t, t == LSE ? s.lse_bits : s.bits);
    write_ranks(s.sp * s.dp, write_rank);
}

/* ---- what is said of it ---- */

static char said[16384];

/* Exit code and first line of the oracle, and whether the rest has `text` in it. */
static inline void expect(int code, const char *headline, const char *text) {
    int is = ask_with("", said, sizeof said);
    size_t line = strcspn(said,
                          code == 1 || code == 3 ? "\n" : ":\n"); /* what is right follows */
    squeeze(said + line);
    test_expect(is == code && strlen(headline) == line && !strncmp(said, headline, line) &&
                    strstr(said, text),
                "exit code %d, not %d; said '%.600s', not '%s' with '%s'", is, code, said,
                headline, text);
}

static inline void expect_named(const char *name, const char *form, const char *text) {
    char headline[80];
    snprintf(headline, sizeof headline, "wrong: %s", name);
    write_scene();
    expect(1, headline, text);
    test_end("attention_%s%s%s", name, *form ? "_" : "", form);
}

/* Expects that the verdict names this mistake, alone or with others that give the same numbers
   here. */
static inline void expect_among(const char *name, const char *form) {
    char sentence[160];
    write_scene();
    expect(1, "wrong", name);
    test_why[0] = 0; /* expect() fails: the headline is longer than "wrong" */
    snprintf(sentence, sizeof sentence, "%s gives this out, lse, dq, dk, dv %s", name, form);
    test_expect(!strncmp(said, "wrong: ", 7) && strstr(said, sentence),
                "said '%.600s', not '%s'", said, sentence);
    test_end("attention_%s_%s", name, form);
}

/* The same with any verdict, as a test of its own. */
static inline void expect_said(const char *name, int code, const char *headline,
                               const char *text) {
    write_scene();
    expect(code, headline, text);
    test_end("attention_%s", name);
}

/* ---- mistakes that more than one suite makes ---- */

static inline int own_alone(int64_t t, int64_t u) {
    return right(t, u) && s.rank[t] == s.rank[u];
}

static int64_t lacks[RANKS]; /* of each rank: the rank whose keys it misses; -1: none */
static inline int some_lost(int64_t t, int64_t u) {
    return right(t, u) && lacks[s.rank[t]] != s.rank[u];
}
static inline void lack(int64_t a, int64_t b, int64_t c, int64_t d) {
    const int64_t all[] = {a, b, c, d};
    memcpy(lacks, all, sizeof all);
}

static int64_t hop; /* the one that is computed */
static inline int64_t hop_of(int64_t t, int64_t u) {
    return (s.rank[t] - s.rank[u] + s.sp) % s.sp;
}
static inline int in_hop(int64_t t, int64_t u) { return right(t, u) && hop_of(t, u) == hop; }

/* The token at u's local row number on the rank of t. */
static inline int64_t own_row(int64_t t, int64_t u) { return s.token[s.rank[t]][s.local[u]]; }
static inline int has_own_row(int64_t t, int64_t u) {
    return right(t, u) && s.local[u] < s.held[s.rank[t]];
}

static inline rule seeing(int (*sees)(int64_t t, int64_t u)) {
    return (rule){sees, NULL, 0, s.scale, s.softcap};
}

/* A mistake of both passes, then of the forward pass alone, whose gradients are right. */
static inline void test_rule(const char *name, const char *form, rule r, const char *text) {
    inputs_narrow();
    both(r);
    expect_named(name, form, text);
    both(right_rule());
    forward(r);
    expect_named(name, form, " gives this out, lse");
}

static inline void copy(int to, const double *from) {
    memcpy(s.x[to], from, (size_t)size_of(to) * sizeof *from);
}

/* Recomputes all tensors right, but leaves tensor t as it is. */
static inline void keep_alone(int t) {
    double *x = malloc((size_t)size_of(t) * sizeof *x);
    memcpy(x, s.x[t], (size_t)size_of(t) * sizeof *x);
    both(right_rule());
    copy(t, x);
    free(x);
}

/* A right step in which gradient t alone is computed by the rule. */
static inline void right_but(int t, rule r) {
    right_step();
    backward(r, s.x[LSE], delta_of_out());
    keep_alone(t);
}

/* Row (token, head) of tensor t gets row from(token, head), a number over tokens and heads. */
static inline void move_rows(int t, int64_t (*from)(int64_t token, int64_t head)) {
    double *x = malloc((size_t)size_of(t) * sizeof *x);
    int64_t n = width(t);
    for (int64_t i = 0; i < size_of(t) / n; i++)
        memcpy(x + i * n, s.x[t] + from(i / heads_of(t), i % heads_of(t)) * n,
               (size_t)n * sizeof *x);
    copy(t, x);
    free(x);
}

/* The row that holds the token if ranks' rows lie one after another: a gather that does not
   undo the layout. */
static inline int64_t in_ranks_order(int64_t token, int64_t head) {
    int64_t place = s.local[token];
    for (int64_t r = 0; r < s.rank[token]; r++) place += s.held[r];
    return place * s.heads + head;
}
#endif
