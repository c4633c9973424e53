/* SPDX-License-Identifier: MIT OR Unlicense */
/* run_dumps.h - dumps for the suites of `seqpar-verify run`: tokens dealt to ranks at random, what
   the ranks hold of them, and what the operation wrote. FOLDER: where dumps are written, another
   one in each suite. */
#ifndef RUN_DUMPS_H
#define RUN_DUMPS_H
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "support/deal.h"
#include "seqpar_safetensors.h"
#include "support/oracle_says.h"

#define ORACLE "build/seqpar-verify"

/* ---- files of ranks ---- */

enum { RANKS = 16, KEYS = 48 };
typedef struct item {
    char name[120];
    seqpar_safetensors_dtype dtype;
    int64_t dims, shape[4], count;
    double *x; /* (count) integers, too */
} item;
typedef struct book { /* one rank's */
    item *of;
    int64_t count, most, keys;
    char key[KEYS][2][96];
} book;
typedef struct books {
    book rank[RANKS];
    int64_t world;
} books;

static inline void book_free(book *b) {
    for (int64_t i = 0; i < b->count; i++) free(b->of[i].x);
    free(b->of);
    memset(b, 0, sizeof *b);
}

static inline void books_free(books *b) {
    for (int64_t r = 0; r < RANKS; r++) book_free(&b->rank[r]);
    b->world = 0;
}

static inline item *find(const book *b, const char *name) {
    for (int64_t i = 0; i < b->count; i++)
        if (!strcmp(b->of[i].name, name)) return &b->of[i];
    return NULL;
}

static const char *said_of(const book *b, const char *key) {
    for (int64_t i = 0; i < b->keys; i++)
        if (!strcmp(b->key[i][0], key)) return b->key[i][1];
    return NULL;
}

static inline void say(book *b, const char *key, const char *format, double a, double c) {
    int64_t i = 0;
    while (i < b->keys && strcmp(b->key[i][0], key)) i++;
    if (i == KEYS) exit(1);
    if (i == b->keys) b->keys++;
    snprintf(b->key[i][0], sizeof b->key[i][0], "%s", key);
    snprintf(b->key[i][1], sizeof b->key[i][1], format, a, c);
}

/* A tensor of zeros; one that is there is made anew. */
static inline item *put(book *b, const char *name, seqpar_safetensors_dtype dtype, int64_t dims,
                        int64_t n, int64_t heads, int64_t dim) {
    item *t = find(b, name);
    if (!t && b->count == b->most)
        b->of = realloc(b->of, (size_t)(b->most = 2 * b->most + 16) * sizeof *b->of);
    if (!b->of) exit(1);
    if (!t) memset(t = &b->of[b->count++], 0, sizeof *t);
    free(t->x);
    snprintf(t->name, sizeof t->name, "%s", name);
    t->dtype = dtype;
    t->dims = dims;
    t->shape[0] = n;
    t->shape[1] = heads;
    t->shape[2] = dim;
    t->count = dims == 0 ? 1 : n * (dims > 1 ? heads : 1) * (dims > 2 ? dim : 1);
    t->x = calloc((size_t)t->count + 1, sizeof *t->x);
    if (!t->x) exit(1);
    return t;
}

static inline int is_integer(seqpar_safetensors_dtype dtype) {
    return dtype == SEQPAR_SAFETENSORS_I64 || dtype == SEQPAR_SAFETENSORS_I32;
}

static inline void read_item(seqpar_safetensors_file *file, const seqpar_safetensors_tensor *t,
                             book *b) {
    seqpar_error error = {0};
    seqpar_safetensors_part all = seqpar_safetensors_whole(t);
    item *to = put(b, t->name, t->dtype, 1, t->count, 1, 1);
    char *raw = malloc((size_t)t->bytes + 1);
    int status;
    to->dims = t->dims;
    for (int64_t i = 0; i < t->dims && i < 4; i++) to->shape[i] = t->shape[i];
    if (!raw) exit(1);
    status = is_integer(t->dtype) ? seqpar_safetensors_read(file, raw, &all, &error)
                                  : seqpar_safetensors_read_f64(file, to->x, &all, &error);
    for (int64_t i = 0; !status && i < t->count; i++) {
        if (t->dtype == SEQPAR_SAFETENSORS_I64) to->x[i] = (double)((int64_t *)raw)[i];
        if (t->dtype == SEQPAR_SAFETENSORS_I32) to->x[i] = ((int32_t *)raw)[i];
    }
    test_expect(!status, "%s", error.text);
    free(raw);
}

static inline void read_book(const char *path, book *b) {
    seqpar_error error = {0};
    seqpar_safetensors_file *file = NULL;
    memset(b, 0, sizeof *b);
    if (!test_expect(!seqpar_safetensors_open(&file, path, &error), "%s", error.text)) return;
    for (int64_t i = 0; i < seqpar_safetensors_count(file); i++)
        read_item(file, seqpar_safetensors_at(file, i), b);
    for (int64_t i = 0; i < seqpar_safetensors_metadata_count(file) && i < KEYS; i++) {
        const seqpar_safetensors_pair *pair = seqpar_safetensors_metadata_at(file, i);
        snprintf(b->key[i][0], sizeof b->key[i][0], "%s", pair->key);
        snprintf(b->key[i][1], sizeof b->key[i][1], "%s", pair->value);
        b->keys++;
    }
    seqpar_safetensors_close(file);
}

static inline void read_books(const char *folder, books *b) {
    char path[200];
    memset(b, 0, sizeof *b);
    do {
        snprintf(path, sizeof path, FOLDER "/%s/rank%lld.safetensors", folder,
                 (long long)b->world);
        read_book(path, &b->rank[b->world]);
        b->world++;
    } while (!*test_why && b->world < atoi(said_of(&b->rank[0], "world")));
}

static inline uint16_t bf16_of(double x) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline void *stored(const item *t) {
    char *to = malloc((size_t)(8 * t->count) + 1);
    for (int64_t i = 0; to && i < t->count; i++) {
        float f = (float)t->x[i];
        int64_t i64 = is_integer(t->dtype) ? (int64_t)t->x[i] : 0;
        int32_t i32 = (int32_t)i64;
        uint16_t half = bf16_of(t->x[i]);
        if (t->dtype == SEQPAR_SAFETENSORS_F64) memcpy(to + 8 * i, &t->x[i], 8);
        if (t->dtype == SEQPAR_SAFETENSORS_F32) memcpy(to + 4 * i, &f, 4);
        if (t->dtype == SEQPAR_SAFETENSORS_BF16) memcpy(to + 2 * i, &half, 2);
        if (t->dtype == SEQPAR_SAFETENSORS_I64) memcpy(to + 8 * i, &i64, 8);
        if (t->dtype == SEQPAR_SAFETENSORS_I32) memcpy(to + 4 * i, &i32, 4);
    }
    return to;
}

static inline void write_book(const char *path, const book *b) {
    seqpar_error error = {0};
    seqpar_safetensors_tensor *tensors = calloc((size_t)b->count + 1, sizeof *tensors);
    const void **data = calloc((size_t)b->count + 1, sizeof *data);
    seqpar_safetensors_pair pairs[KEYS];
    if (!tensors || !data) exit(1);
    for (int64_t i = 0; i < b->keys; i++)
        pairs[i] = (seqpar_safetensors_pair){b->key[i][0], b->key[i][1]};
    for (int64_t i = 0; i < b->count; i++) {
        const item *t = &b->of[i];
        tensors[i] = (seqpar_safetensors_tensor){
            .name = t->name, .dtype = t->dtype, .dims = t->dims};
        for (int64_t k = 0; k < t->dims; k++) tensors[i].shape[k] = t->shape[k];
        data[i] = stored(t);
    }
    seqpar_safetensors_desc desc = {.path = path,
                                    .tensors = tensors,
                                    .count = b->count,
                                    .metadata = pairs,
                                    .metadata_count = b->keys};
    test_expect(!seqpar_safetensors_save(&desc, data, &error), "%s", error.text);
    for (int64_t i = 0; i < b->count; i++) free((void *)data[i]);
    free(tensors);
    free(data);
}

static inline void write_books(const char *folder, const books *b) {
    char path[200];
    mkdir(FOLDER, 0777);
    snprintf(path, sizeof path, "rm -rf " FOLDER "/%s", folder);
    if (system(path)) exit(1);
    snprintf(path, sizeof path, FOLDER "/%s", folder);
    mkdir(path, 0777);
    for (int64_t r = 0; r < b->world; r++) {
        snprintf(path, sizeof path, FOLDER "/%s/rank%lld.safetensors", folder, (long long)r);
        write_book(path, &b->rank[r]);
    }
}

/* ---- running it ---- */

static char said[16384];
static inline int code_of(const char *command) { return said_by(command, said, sizeof said); }

/* FOLDER/in to FOLDER/out, which is made anew. */
static inline int run(const char *operation, const char *in, const char *out,
                      const char *options) {
    char line[700];
    snprintf(line, sizeof line, "rm -rf " FOLDER "/%s", out);
    if (system(line)) exit(1);
    snprintf(line, sizeof line, ORACLE " run %s " FOLDER "/%s --out " FOLDER "/%s %s 2>&1",
             operation, in, out, options);
    return code_of(line);
}

static inline void runs(const char *operation, const char *in, const char *out,
                        const char *options) {
    int code = run(operation, in, out, options);
    test_expect(code == 0, "run %s %s: exit code %d, '%.400s'", operation, options, code, said);
}

static inline void judged(const char *folder, const char *model, const char *headline) {
    char line[400];
    snprintf(line, sizeof line, ORACLE " ver " FOLDER "/%s%s%s 2>&1", folder,
             *model ? " --model " FOLDER "/" : "", model);
    code_of(line);
    test_expect(!strncmp(said, headline, strlen(headline)), "ver %s: '%.900s', not '%s'",
                folder, said, headline);
}

/* ---- a step at random ---- */

enum { ROWS = 6, MOST = 48, DOCS = 6, HEADS = 4, KV = 2, DIM = 3, OUT = 2 };
typedef struct row {
    int64_t n, pads, docs, cu[DOCS + 1];
    int64_t member[MOST], local[MOST], held[8];
    double ids[MOST], labels[MOST], logp[MOST], ref[MOST], old[MOST], advantages[MOST];
    double values[MOST], rewards[DOCS], groups[DOCS], desirable[DOCS], kl[DOCS];
    double q[MOST * HEADS * DIM], k[MOST * KV * DIM], v[MOST * KV * OUT];
    double dout[MOST * HEADS * OUT];
} row;
static struct {
    int64_t sp, dp, accumulation;
    row of[ROWS];
} s;
static books made, got;

static inline int64_t rows(void) { return s.dp * s.accumulation; }

/* Every token to some rank, in any order there; with several ranks one may be empty. */
static inline void deal(row *w) {
    int64_t order[MOST], last = s.sp > 2 && test_integer(0, 1) ? s.sp - 2 : s.sp - 1;
    memset(w->held, 0, sizeof w->held);
    for (int64_t t = 0; t < w->n; t++) order[t] = t;
    for (int64_t t = w->n - 1; t > 0; t--) {
        int64_t other = test_integer(0, t), at = order[t];
        order[t] = order[other];
        order[other] = at;
    }
    for (int64_t i = 0; i < w->n; i++) {
        int64_t t = order[i];
        w->member[t] = test_integer(0, last);
        w->local[t] = w->held[w->member[t]]++;
    }
}

static inline void fill(double *x, int64_t n, double size) {
    for (int64_t i = 0; i < n; i++) x[i] = size * test_normal();
}

static inline void make_row(row *w) {
    memset(w, 0, sizeof *w);
    w->docs = 2 * test_integer(1, DOCS / 2);
    for (int64_t i = 0; i < w->docs; i++)
        w->cu[i + 1] = w->cu[i] + (i % 3 == 1 ? 1 : test_integer(i ? 1 : 2, 7));
    w->pads = test_integer(0, 3);
    w->n = w->cu[w->docs] + w->pads;
    deal(w);
    for (int64_t t = 0; t < w->n; t++) w->ids[t] = (double)test_integer(0, 5);
    for (int64_t t = 0; t < w->n; t++) w->labels[t] = -100;
    for (int64_t i = 0; i < w->docs; i++) {
        for (int64_t t = w->cu[i]; t + 1 < w->cu[i + 1]; t++)
            if (test_integer(0, 3)) w->labels[t] = w->ids[t + 1];
        w->rewards[i] = (double)test_integer(-3, 3);
        w->groups[i] = (double)test_integer(0, 2);
        w->desirable[i] = (double)test_integer(0, 1);
        w->kl[i] = test_normal();
    }
    fill(w->logp, w->n, 1);
    fill(w->ref, w->n, 1);
    fill(w->old, w->n, 0.3);
    for (int64_t t = 0; t < w->n; t++) w->old[t] += w->logp[t];
    fill(w->advantages, w->n, 1);
    fill(w->values, w->n, 1);
    fill(w->q, w->n * HEADS * DIM, 1);
    fill(w->k, w->n * KV * DIM, 1);
    fill(w->v, w->n * KV * OUT, 1);
    fill(w->dout, w->n * HEADS * OUT, 1);
}

/* A tensor of the tokens that member m of row i's ranks holds. */
static inline void put_row(int64_t i, const char *what, const double *x,
                           seqpar_safetensors_dtype dtype, int64_t dims, int64_t heads,
                           int64_t dim) {
    const row *w = &s.of[i];
    char name[64];
    snprintf(name, sizeof name, "%lld.%s", (long long)(i % s.accumulation), what);
    for (int64_t m = 0; m < s.sp; m++) {
        item *t = put(&made.rank[i / s.accumulation * s.sp + m], name, dtype, dims, w->held[m],
                      heads, dim);
        for (int64_t k = 0; k < w->n; k++)
            for (int64_t c = 0; w->member[k] == m && c < heads * dim; c++)
                t->x[w->local[k] * heads * dim + c] = x ? x[k * heads * dim + c] : (double)k;
    }
}

static inline void put_documents(int64_t i, const char *what, const double *x, int64_t n,
                                 seqpar_safetensors_dtype dtype) {
    char name[64];
    snprintf(name, sizeof name, "%lld.%s", (long long)(i % s.accumulation), what);
    for (int64_t m = 0; m < s.sp; m++) {
        item *t = put(&made.rank[i / s.accumulation * s.sp + m], name, dtype, 1, n, 1, 1);
        for (int64_t k = 0; k < n; k++) t->x[k] = x ? x[k] : (double)s.of[i].cu[k];
    }
}

static inline void say_all(const char *key, const char *format, double x) {
    for (int64_t r = 0; r < made.world; r++) say(&made.rank[r], key, format, x, 0);
}

static inline void make(int64_t sp, int64_t dp, int64_t accumulation) {
    books_free(&made);
    s.sp = sp;
    s.dp = dp;
    s.accumulation = accumulation;
    made.world = sp * dp;
    say_all("seqpar_dump", "1", 0);
    say_all("world", "%.0f", (double)made.world);
    say_all("sp", "%.0f", (double)sp);
    say_all("accumulation", "%.0f", (double)accumulation);
    say_all("note", "kept as it is", 0);
    for (int64_t r = 0; r < made.world; r++) say(&made.rank[r], "rank", "%.0f", (double)r, 0);
    for (int64_t i = 0; i < rows(); i++) {
        make_row(&s.of[i]);
        if (!i) s.of[0].labels[0] = s.of[0].ids[1]; /* others may have none */
        put_row(i, "index", NULL, SEQPAR_SAFETENSORS_I32, 1, 1, 1);
        put_documents(i, "cu_seqlens", NULL, s.of[i].docs + 1, SEQPAR_SAFETENSORS_I64);
    }
}

/* What a row's tensor of `got` has for token t; NaN: none. */
static inline double token_of(int64_t i, const char *what, int64_t t, int64_t columns,
                              int64_t c) {
    const row *w = &s.of[i];
    char name[64];
    item *x;
    snprintf(name, sizeof name, "%lld.%s", (long long)(i % s.accumulation), what);
    x = find(&got.rank[i / s.accumulation * s.sp + w->member[t]], name);
    if (!x || x->count != w->held[w->member[t]] * columns) return NAN;
    return x->x[w->local[t] * columns + c];
}

static inline void compare(int64_t i, const char *what, const double *want, int64_t columns,
                           double limit) {
    const row *w = &s.of[i];
    double *own = calloc((size_t)(w->n * columns) + 1, sizeof *own);
    double far;
    if (!own) exit(1);
    for (int64_t t = 0; t < w->cu[w->docs]; t++)
        for (int64_t c = 0; c < columns; c++)
            own[t * columns + c] = token_of(i, what, t, columns, c);
    far = test_distance(own, want, w->cu[w->docs] * columns);
    test_expect(far <= limit, "row %lld: %s is %g away, limit %g", (long long)i, what, far,
                limit);
    free(own);
}

static inline void open_result(void) {
    books_free(&got);
    read_books("out", &got);
    test_expect(!*test_why && said_of(&got.rank[0], "note") &&
                    !strcmp(said_of(&got.rank[0], "note"), "kept as it is"),
                "metadata is not kept");
}

static inline int64_t document_of(const row *w, int64_t t) {
    int64_t i = 0;
    while (i < w->docs && w->cu[i + 1] <= t) i++;
    return i; /* docs: padding */
}
/* ---- attention, of parts of the keys, too ---- */

static double scale, softcap;
static int64_t window;

static inline double score_of(const row *w, int64_t i, int64_t j, int64_t h) {
    double sum = 0;
    const double *q = w->q + (i * HEADS + h) * DIM;
    const double *k = w->k + (j * KV + h / (HEADS / KV)) * DIM;
    for (int64_t c = 0; c < DIM; c++) sum += q[c] * k[c];
    sum *= scale;
    return softcap > 0 ? softcap * tanh(sum / softcap) : sum;
}

static inline int seen(const row *w, int64_t i, int64_t j) {
    return j <= i && document_of(w, i) == document_of(w, j) && (!window || j > i - window);
}

/* keys: of what part each is; part -1: all. Without a key lse is -Inf and out 0. */
static inline void attend(const row *w, const int64_t *keys, int64_t part, double *out,
                          double *lse) {
    for (int64_t i = 0; i < w->n; i++)
        for (int64_t h = 0; h < HEADS; h++) {
            double sum = 0, *o = out + (i * HEADS + h) * OUT;
            for (int64_t c = 0; c < OUT; c++) o[c] = 0;
            for (int64_t j = 0; j < w->n; j++) {
                double e;
                if (!seen(w, i, j) || (part >= 0 && keys[j] != part)) continue;
                e = exp(score_of(w, i, j, h));
                sum += e;
                for (int64_t c = 0; c < OUT; c++)
                    o[c] += e * w->v[(j * KV + h / (HEADS / KV)) * OUT + c];
            }
            for (int64_t c = 0; sum > 0 && c < OUT; c++) o[c] /= sum;
            lse[i * HEADS + h] = log(sum);
        }
}

/* Keys in parts at random; what a part without a key gives for out may be NaN. */
static inline void put_parts(int64_t i, int64_t parts) {
    static double out[MOST * HEADS * OUT], lse[MOST * HEADS];
    row *w = &s.of[i];
    int64_t keys[MOST];
    char name[2][64];
    for (int64_t t = 0; t < w->n; t++) keys[t] = test_integer(0, parts - 1);
    snprintf(name[0], 64, "%lld.part_out", (long long)(i % s.accumulation));
    snprintf(name[1], 64, "%lld.part_lse", (long long)(i % s.accumulation));
    for (int64_t part = 0; part < parts; part++) {
        attend(w, keys, part, out, lse);
        for (int64_t m = 0; m < s.sp; m++) {
            book *b = &made.rank[i / s.accumulation * s.sp + m];
            int64_t n = w->held[m];
            item *o = find(b, name[0]), *l = find(b, name[1]);
            if (!part) put(b, name[0], SEQPAR_SAFETENSORS_F64, 3, parts * n, HEADS, OUT);
            if (!part) put(b, name[1], SEQPAR_SAFETENSORS_F64, 3, parts, n, HEADS);
            o = find(b, name[0]);
            l = find(b, name[1]);
            o->dims = 4;
            o->shape[0] = parts;
            o->shape[1] = n;
            o->shape[2] = HEADS;
            o->shape[3] = OUT;
            for (int64_t t = 0; t < w->n; t++)
                for (int64_t h = 0; w->member[t] == m && h < HEADS; h++) {
                    int64_t at = (part * n + w->local[t]) * HEADS + h, from = t * HEADS + h;
                    l->x[at] = lse[from];
                    for (int64_t c = 0; c < OUT; c++)
                        o->x[at * OUT + c] = lse[from] == -HUGE_VAL ? NAN : out[from * OUT + c];
                }
        }
    }
}

/* ---- losses ---- */

static inline double softplus(double x) { return log1p(exp(-fabs(x))) + (x > 0 ? x : 0); }

/* Sum of a document's policy - reference. */
static inline double margin(const row *w, int64_t i) {
    double sum = 0;
    for (int64_t t = w->cu[i]; t < w->cu[i + 1]; t++)
        if (w->labels[t] != -100) sum += w->logp[t] - w->ref[t];
    return sum;
}

static inline double token_loss(const row *w, int64_t t, int ppo) {
    double r, d, a = w->advantages[t], cut;
    if (!ppo) return -w->logp[t];
    r = exp(w->logp[t] - w->old[t]);
    d = w->ref[t] - w->logp[t];
    cut = r < 0.9 ? 0.9 : r > 1.3 ? 1.3 : r;
    return -(a * r < a * cut ? a * r : a * cut) + 0.05 * (exp(d) - d - 1);
}

/* sequence: the mean over documents of their tokens' means */
static inline double loss_of_tokens(int ppo, int sequence) {
    double sum = 0, count = 0;
    for (int64_t i = 0; i < rows(); i++)
        for (int64_t k = 0; k < s.of[i].docs; k++) {
            const row *w = &s.of[i];
            double own = 0, n = 0;
            for (int64_t t = w->cu[k]; t < w->cu[k + 1]; t++)
                if (w->labels[t] != -100) {
                    own += token_loss(w, t, ppo);
                    n++;
                }
            sum += !sequence ? own : n > 0 ? own / n : 0;
            count += !sequence ? n : n > 0;
        }
    return sum / count;
}

static inline void put_loss_inputs(void) {
    for (int64_t i = 0; i < rows(); i++) {
        row *w = &s.of[i];
        put_row(i, "labels", w->labels, SEQPAR_SAFETENSORS_I64, 1, 1, 1);
        put_row(i, "logp", w->logp, SEQPAR_SAFETENSORS_F64, 1, 1, 1);
        put_row(i, "ref_logp", w->ref, SEQPAR_SAFETENSORS_F64, 1, 1, 1);
        put_row(i, "old_logp", w->old, SEQPAR_SAFETENSORS_F64, 1, 1, 1);
        put_row(i, "advantages", w->advantages, SEQPAR_SAFETENSORS_F64, 1, 1, 1);
        put_row(i, "values", w->values, SEQPAR_SAFETENSORS_F64, 1, 1, 1);
        put_documents(i, "desirable", w->desirable, w->docs, SEQPAR_SAFETENSORS_I64);
        put_documents(i, "kl", w->kl, w->docs, SEQPAR_SAFETENSORS_F64);
    }
    for (int64_t r = 0; r < made.world; r++)
        put(&made.rank[r], "loss", SEQPAR_SAFETENSORS_F64, 0, 1, 1, 1)->x[0] = 1e3;
}

/* ---- parameters, and all of it ---- */

enum { WEIGHTS = 19 };
static double weights[5][WEIGHTS]; /* grad, param, m, v, after */

static inline void put_weights(int64_t r, const char *prefix, const double *x, int sharded,
                               seqpar_safetensors_dtype dtype) {
    int64_t first = sharded ? WEIGHTS * r / made.world : 0;
    int64_t last = sharded ? WEIGHTS * (r + 1) / made.world : WEIGHTS;
    char name[32], key[64];
    item *t;
    snprintf(name, sizeof name, "%s.w", prefix);
    snprintf(key, sizeof key, "part.%s.w", prefix);
    t = put(&made.rank[r], name, dtype, 1, last - first, 1, 1);
    memcpy(t->x, x + first, (size_t)(last - first) * sizeof *x);
    if (sharded) say(&made.rank[r], key, "%.0f %.0f", (double)first, WEIGHTS);
}

static inline void put_everything(void) {
    for (int64_t i = 0; i < rows(); i++) {
        row *w = &s.of[i];
        put_row(i, "ids", w->ids, SEQPAR_SAFETENSORS_I32, 1, 1, 1);
        put_row(i, "q", w->q, SEQPAR_SAFETENSORS_F64, 3, HEADS, DIM);
        put_row(i, "k", w->k, SEQPAR_SAFETENSORS_BF16, 3, KV, DIM);
        put_row(i, "lse", w->v, SEQPAR_SAFETENSORS_F32, 2, HEADS, 1);
        put_documents(i, "groups", w->groups, w->docs, SEQPAR_SAFETENSORS_I64);
        put_documents(i, "scores", w->kl, w->docs, SEQPAR_SAFETENSORS_F32);
    }
    put_loss_inputs();
    for (int64_t r = 0; r < made.world; r++) {
        put_weights(r, "grad", weights[0], 0, SEQPAR_SAFETENSORS_F64);
        put_weights(r, "param", weights[1], 0, SEQPAR_SAFETENSORS_F32);
        put_weights(r, "local", weights[0], 0, SEQPAR_SAFETENSORS_F64);
    }
}

/* FOLDER/name, in which got, want and model are. */
static inline int gen(const char *name, const char *options) {
    char line[500];
    snprintf(line, sizeof line,
             "rm -rf " FOLDER "/%s; " ORACLE " gen --out " FOLDER "/%s %s 2>&1", name, name,
             options);
    return code_of(line);
}

#endif
