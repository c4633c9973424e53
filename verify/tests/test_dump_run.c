/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify run`: every operation against numbers that are worked out here, on tokens
   dealt to ranks at random; steps that gen asks and the operations answer; planted mistakes
   undone; bad input. */
#include <dirent.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <cjson/cJSON.h>
#include "support/deal.h"
#include "seqpar_safetensors.h"
#include "support/oracle_says.h"

#define FOLDER "build/test_dump_run.d"
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

static void book_free(book *b) {
    for (int64_t i = 0; i < b->count; i++) free(b->of[i].x);
    free(b->of);
    memset(b, 0, sizeof *b);
}

static void books_free(books *b) {
    for (int64_t r = 0; r < RANKS; r++) book_free(&b->rank[r]);
    b->world = 0;
}

static item *find(const book *b, const char *name) {
    for (int64_t i = 0; i < b->count; i++)
        if (!strcmp(b->of[i].name, name)) return &b->of[i];
    return NULL;
}

static const char *said_of(const book *b, const char *key) {
    for (int64_t i = 0; i < b->keys; i++)
        if (!strcmp(b->key[i][0], key)) return b->key[i][1];
    return NULL;
}

static void say(book *b, const char *key, const char *format, double a, double c) {
    int64_t i = 0;
    while (i < b->keys && strcmp(b->key[i][0], key)) i++;
    if (i == KEYS) exit(1);
    if (i == b->keys) b->keys++;
    snprintf(b->key[i][0], sizeof b->key[i][0], "%s", key);
    snprintf(b->key[i][1], sizeof b->key[i][1], format, a, c);
}

/* A tensor of zeros; one that is there is made anew. */
static item *put(book *b, const char *name, seqpar_safetensors_dtype dtype, int64_t dims,
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

static int is_integer(seqpar_safetensors_dtype dtype) {
    return dtype == SEQPAR_SAFETENSORS_I64 || dtype == SEQPAR_SAFETENSORS_I32;
}

static void read_item(seqpar_safetensors_file *file, const seqpar_safetensors_tensor *t,
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

static void read_book(const char *path, book *b) {
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

static void read_books(const char *folder, books *b) {
    char path[200];
    memset(b, 0, sizeof *b);
    do {
        snprintf(path, sizeof path, FOLDER "/%s/rank%lld.safetensors", folder,
                 (long long)b->world);
        read_book(path, &b->rank[b->world]);
        b->world++;
    } while (!*test_why && b->world < atoi(said_of(&b->rank[0], "world")));
}

static uint16_t bf16_of(double x) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void *stored(const item *t) {
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

static void write_book(const char *path, const book *b) {
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

static void write_books(const char *folder, const books *b) {
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
static int code_of(const char *command) { return said_by(command, said, sizeof said); }

/* FOLDER/in to FOLDER/out, which is made anew. */
static int run(const char *operation, const char *in, const char *out, const char *options) {
    char line[700];
    snprintf(line, sizeof line, "rm -rf " FOLDER "/%s", out);
    if (system(line)) exit(1);
    snprintf(line, sizeof line, ORACLE " run %s " FOLDER "/%s --out " FOLDER "/%s %s 2>&1",
             operation, in, out, options);
    return code_of(line);
}

static void runs(const char *operation, const char *in, const char *out, const char *options) {
    int code = run(operation, in, out, options);
    test_expect(code == 0, "run %s %s: exit code %d, '%.400s'", operation, options, code, said);
}

static void judged(const char *folder, const char *model, const char *headline) {
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

static int64_t rows(void) { return s.dp * s.accumulation; }

/* Every token to some rank, in any order there; with several ranks one may be empty. */
static void deal(row *w) {
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

static void fill(double *x, int64_t n, double size) {
    for (int64_t i = 0; i < n; i++) x[i] = size * test_normal();
}

static void make_row(row *w) {
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
static void put_row(int64_t i, const char *what, const double *x,
                    seqpar_safetensors_dtype dtype, int64_t dims, int64_t heads, int64_t dim) {
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

static void put_documents(int64_t i, const char *what, const double *x, int64_t n,
                          seqpar_safetensors_dtype dtype) {
    char name[64];
    snprintf(name, sizeof name, "%lld.%s", (long long)(i % s.accumulation), what);
    for (int64_t m = 0; m < s.sp; m++) {
        item *t = put(&made.rank[i / s.accumulation * s.sp + m], name, dtype, 1, n, 1, 1);
        for (int64_t k = 0; k < n; k++) t->x[k] = x ? x[k] : (double)s.of[i].cu[k];
    }
}

static void say_all(const char *key, const char *format, double x) {
    for (int64_t r = 0; r < made.world; r++) say(&made.rank[r], key, format, x, 0);
}

static void make(int64_t sp, int64_t dp, int64_t accumulation) {
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
static double token_of(int64_t i, const char *what, int64_t t, int64_t columns, int64_t c) {
    const row *w = &s.of[i];
    char name[64];
    item *x;
    snprintf(name, sizeof name, "%lld.%s", (long long)(i % s.accumulation), what);
    x = find(&got.rank[i / s.accumulation * s.sp + w->member[t]], name);
    if (!x || x->count != w->held[w->member[t]] * columns) return NAN;
    return x->x[w->local[t] * columns + c];
}

static void compare(int64_t i, const char *what, const double *want, int64_t columns,
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

static void open_result(void) {
    books_free(&got);
    read_books("out", &got);
    test_expect(!*test_why && said_of(&got.rank[0], "note") &&
                    !strcmp(said_of(&got.rank[0], "note"), "kept as it is"),
                "metadata is not kept");
}

static int64_t document_of(const row *w, int64_t t) {
    int64_t i = 0;
    while (i < w->docs && w->cu[i + 1] <= t) i++;
    return i; /* docs: padding */
}

/* ---- positions, labels ---- */

static void test_tokens(void) {
    double wrong[MOST];
    for (int64_t sp = 1; sp <= 5; sp++) {
        make(sp, 1 + sp % 2, 1 + sp % 3);
        for (int64_t i = 0; i < rows(); i++) {
            put_row(i, "ids", s.of[i].ids, SEQPAR_SAFETENSORS_I64, 1, 1, 1);
            for (int64_t t = 0; t < s.of[i].n; t++) /* wrong ones, masked where they are */
                wrong[t] = s.of[i].labels[t] == -100 ? -100 : 5 - floor(s.of[i].labels[t] / 2);
            put_row(i, "labels", wrong, SEQPAR_SAFETENSORS_I32, 1, 1, 1);
        }
        write_books("in", &made);
        runs("positions", "in", "mid", "");
        runs("labels", "mid", "out", "");
        open_result();
        for (int64_t i = 0; i < rows(); i++) {
            const row *w = &s.of[i];
            double places[MOST];
            for (int64_t t = 0; t < w->n; t++)
                places[t] = (double)(t - w->cu[document_of(w, t)]);
            compare(i, "positions", places, 1, 0);
            compare(i, "labels", w->labels, 1, 0);
        }
        test_expect(find(&got.rank[0], "0.labels")->dtype == SEQPAR_SAFETENSORS_I32,
                    "labels are no I32 any more");
        runs("labels", "mid", "out", "--unmasked");
        open_result();
        for (int64_t i = 0; i < rows(); i++) {
            const row *w = &s.of[i];
            double all[MOST];
            for (int64_t t = 0; t < w->n; t++)
                all[t] = t + 1 < w->n && document_of(w, t) == document_of(w, t + 1)
                             ? w->ids[t + 1]
                             : -100;
            compare(i, "labels", all, 1, 0);
        }
        test_end("run_positions_and_labels_P%lld", (long long)sp);
    }
}

/* ---- attention ---- */

static double scale, softcap;
static int64_t window;

static double score_of(const row *w, int64_t i, int64_t j, int64_t h) {
    double sum = 0;
    const double *q = w->q + (i * HEADS + h) * DIM;
    const double *k = w->k + (j * KV + h / (HEADS / KV)) * DIM;
    for (int64_t c = 0; c < DIM; c++) sum += q[c] * k[c];
    sum *= scale;
    return softcap > 0 ? softcap * tanh(sum / softcap) : sum;
}

static int seen(const row *w, int64_t i, int64_t j) {
    return j <= i && document_of(w, i) == document_of(w, j) && (!window || j > i - window);
}

/* keys: of what part each is; part -1: all. Without a key lse is -Inf and out 0. */
static void attend(const row *w, const int64_t *keys, int64_t part, double *out, double *lse) {
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

static double of_dout(const row *w) {
    static double out[MOST * HEADS * OUT], lse[MOST * HEADS];
    double sum = 0;
    attend(w, NULL, -1, out, lse);
    for (int64_t i = 0; i < w->cu[w->docs] * HEADS * OUT; i++) sum += out[i] * w->dout[i];
    return sum;
}

/* By central differences. */
static void slopes(row *w, double *x, int64_t n, double *to) {
    for (int64_t i = 0; i < n; i++) {
        double at = x[i], step = 1e-4, f[4];
        for (int k = 0; k < 4; k++) {
            x[i] = at + step * (double)(k < 2 ? k - 2 : k - 1);
            f[k] = of_dout(w);
        }
        x[i] = at;
        to[i] = (8 * (f[2] - f[1]) - (f[3] - f[0])) / (12 * step);
        if (fabs(to[i]) < 1e-9) to[i] = 0; /* differences of nothing */
    }
}

static void test_attention(void) {
    static double out[MOST * HEADS * OUT], lse[MOST * HEADS], dx[MOST * HEADS * DIM];
    for (int64_t sp = 1; sp <= 5; sp++) {
        make(sp, 1 + sp % 2, 1 + sp % 2);
        scale = sp % 2 ? 1 / sqrt(DIM) : 0.8;
        softcap = sp == 3 || sp == 4 ? 1.5 : 0;
        window = sp > 1 && sp < 5 ? 3 : 0;
        if (!(sp % 2)) say_all("softmax_scale", "%.17g", scale);
        if (softcap > 0) say_all("softcap", "%.17g", softcap);
        if (window) say_all("window", "%.0f", (double)window);
        for (int64_t i = 0; i < rows(); i++) {
            put_row(i, "q", s.of[i].q, SEQPAR_SAFETENSORS_F64, 3, HEADS, DIM);
            put_row(i, "k", s.of[i].k, SEQPAR_SAFETENSORS_F64, 3, KV, DIM);
            put_row(i, "v", s.of[i].v, SEQPAR_SAFETENSORS_F64, 3, KV, OUT);
            put_row(i, "dout", s.of[i].dout, SEQPAR_SAFETENSORS_F64, 3, HEADS, OUT);
            put_row(i, "out", s.of[i].q, SEQPAR_SAFETENSORS_F32, 3, HEADS, OUT);
        }
        write_books("in", &made);
        runs("attention", "in", "mid", "");
        runs("attention-gradient", "mid", "out", "");
        open_result();
        for (int64_t i = 0; i < rows(); i++) {
            row *w = &s.of[i];
            attend(w, NULL, -1, out, lse);
            compare(i, "out", out, HEADS * OUT, 0x1p-23); /* it replaces F32 */
            compare(i, "lse", lse, HEADS, 1e-14);
            slopes(w, w->q, w->n * HEADS * DIM, dx);
            compare(i, "dq", dx, HEADS * DIM, 1e-9);
            slopes(w, w->k, w->n * KV * DIM, dx);
            compare(i, "dk", dx, KV * DIM, 1e-9);
            slopes(w, w->v, w->n * KV * OUT, dx);
            compare(i, "dv", dx, KV * OUT, 1e-9);
        }
        test_end("run_attention_P%lld", (long long)sp);
    }
}

/* Keys in parts at random; what a part without a key gives for out may be NaN. */
static void put_parts(int64_t i, int64_t parts) {
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

static void test_merge(void) {
    static double out[MOST * HEADS * OUT], lse[MOST * HEADS];
    scale = 3; /* scores are far apart */
    softcap = 0;
    window = 0;
    for (int64_t sp = 1; sp <= 5; sp++) {
        make(sp, 1, 2);
        for (int64_t i = 0; i < rows(); i++) put_parts(i, sp);
        write_books("in", &made);
        runs("merge", "in", "out", "");
        open_result();
        for (int64_t i = 0; i < rows(); i++) {
            attend(&s.of[i], NULL, -1, out, lse);
            compare(i, "out", out, HEADS * OUT, 1e-14);
            compare(i, "lse", lse, HEADS, 1e-14);
        }
        test_end("run_merge_P%lld", (long long)sp);
    }
}

/* ---- losses ---- */

static double softplus(double x) { return log1p(exp(-fabs(x))) + (x > 0 ? x : 0); }

/* Sum of a document's policy - reference. */
static double margin(const row *w, int64_t i) {
    double sum = 0;
    for (int64_t t = w->cu[i]; t < w->cu[i + 1]; t++)
        if (w->labels[t] != -100) sum += w->logp[t] - w->ref[t];
    return sum;
}

static double token_loss(const row *w, int64_t t, int ppo) {
    double r, d, a = w->advantages[t], cut;
    if (!ppo) return -w->logp[t];
    r = exp(w->logp[t] - w->old[t]);
    d = w->ref[t] - w->logp[t];
    cut = r < 0.9 ? 0.9 : r > 1.3 ? 1.3 : r;
    return -(a * r < a * cut ? a * r : a * cut) + 0.05 * (exp(d) - d - 1);
}

/* sequence: the mean over documents of their tokens' means */
static double loss_of_tokens(int ppo, int sequence) {
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

static double loss_of_pairs(int rm) {
    double sum = 0, count = 0;
    for (int64_t i = 0; i < rows(); i++)
        for (int64_t k = 0; k < s.of[i].docs; k += 2) {
            const row *w = &s.of[i];
            double h = rm ? w->values[w->cu[k + 1] - 1] - w->values[w->cu[k + 2] - 1]
                          : 0.3 * (margin(w, k) - margin(w, k + 1));
            sum += softplus(-h);
            count++;
        }
    return sum / count;
}

static double loss_of_kto(void) {
    double sum = 0, count = 0;
    for (int64_t a = 0; a < s.accumulation; a++) {
        double z = 0, docs = 0;
        for (int64_t dp = 0; dp < s.dp; dp++) {
            const row *w = &s.of[dp * s.accumulation + a];
            for (int64_t k = 0; k < w->docs; k++) z += w->kl[k];
            docs += (double)w->docs;
        }
        z = z > 0 ? z / docs : 0;
        for (int64_t dp = 0; dp < s.dp; dp++) {
            const row *w = &s.of[dp * s.accumulation + a];
            for (int64_t k = 0; k < w->docs; k++) {
                double x = 0.3 * (margin(w, k) - z);
                sum += 1 - 1 / (1 + exp(w->desirable[k] > 0 ? -x : x));
            }
        }
        count += docs;
    }
    return sum / count;
}

static void put_loss_inputs(void) {
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

static void expect_loss(const char *what, double want) {
    write_books("in", &made);
    runs("loss", "in", "out", "");
    open_result();
    for (int64_t r = 0; r < got.world; r++) {
        item *t = find(&got.rank[r], "loss");
        test_expect(t && t->dims == 0 && fabs(t->x[0] - want) <= 1e-13 * (1 + fabs(want)),
                    "rank %lld: loss is %.17g, not %.17g", (long long)r, t ? t->x[0] : NAN,
                    want);
    }
    test_end("run_loss_%s_P%lld", what, (long long)s.sp);
}

static void test_losses(void) {
    for (int64_t sp = 1; sp <= 5; sp++) {
        make(sp, 1 + sp % 2, 1 + sp % 3);
        put_loss_inputs();
        expect_loss("sft", loss_of_tokens(0, 0));
        say_all("reduction", "sequence", 0);
        expect_loss("sft_by_sequence", loss_of_tokens(0, 1));
        say_all("objective", "ppo", 0);
        say_all("clip_low", "%.17g", 0.1);
        say_all("clip_high", "%.17g", 0.3);
        say_all("kl_coef", "%.17g", 0.05);
        expect_loss("ppo_by_sequence", loss_of_tokens(1, 1));
        say_all("reduction", "token", 0);
        expect_loss("ppo", loss_of_tokens(1, 0));
        say_all("objective", "dpo", 0);
        say_all("beta", "%.17g", 0.3);
        expect_loss("dpo", loss_of_pairs(0));
        say_all("objective", "kto", 0);
        expect_loss("kto", loss_of_kto());
        say_all("objective", "rm", 0);
        for (int64_t i = 0; i < rows(); i++) /* wrong ones, which are not asked */
            put_documents(i, "scores", s.of[i].kl, s.of[i].docs, SEQPAR_SAFETENSORS_F32);
        expect_loss("rm", loss_of_pairs(1));
        for (int64_t i = 0; i < rows(); i++)
            for (int64_t m = 0; m < sp; m++) {
                char name[64];
                item *t;
                snprintf(name, sizeof name, "%lld.scores", (long long)(i % s.accumulation));
                t = find(&got.rank[i / s.accumulation * sp + m], name);
                for (int64_t k = 0; k < s.of[i].docs; k++)
                    test_expect(t && (float)t->x[k] ==
                                         (float)s.of[i].values[s.of[i].cu[k + 1] - 1],
                                "score %lld is not the value at the last token", (long long)k);
            }
        test_end("run_scores_P%lld", (long long)sp);
    }
}

/* SimPO's margin is of mean log-probs, without a reference. */
static double loss_of_simpo(double beta, double gamma) {
    double sum = 0, count = 0;
    for (int64_t i = 0; i < rows(); i++)
        for (int64_t k = 0; k < s.of[i].docs; k += 2, count++) {
            const row *w = &s.of[i];
            double mean[2] = {0, 0};
            for (int side = 0; side < 2; side++) {
                double n = 0;
                for (int64_t t = w->cu[k + side]; t < w->cu[k + side + 1]; t++) {
                    mean[side] += w->labels[t] != -100 ? w->logp[t] : 0;
                    n += w->labels[t] != -100;
                }
                mean[side] = n > 0 ? mean[side] / n : 0;
            }
            sum += softplus(gamma - beta * (mean[0] - mean[1]));
        }
    return sum / count;
}

static void test_simpo(void) {
    for (int64_t sp = 1; sp <= 4; sp++) {
        make(sp, 1 + sp % 2, 1 + sp % 3);
        for (int64_t i = 0; i < rows(); i++) {
            put_row(i, "labels", s.of[i].labels, SEQPAR_SAFETENSORS_I64, 1, 1, 1);
            put_row(i, "logp", s.of[i].logp, SEQPAR_SAFETENSORS_F64, 1, 1, 1);
        }
        say_all("objective", "dpo", 0);
        say_all("loss_type", "simpo", 0);
        say_all("beta", "%.17g", 2);
        say_all("simpo_gamma", "%.17g", 0.7);
        expect_loss("simpo", loss_of_simpo(2, 0.7));
    }
}

/* ---- advantages ---- */

static double advantage_of(int64_t i, int64_t k, int divide) {
    double sum = 0, count = 0, squares = 0, group = s.of[i].groups[k];
    for (int64_t j = 0; j < rows(); j++)
        for (int64_t d = 0; d < s.of[j].docs; d++)
            if (s.of[j].groups[d] == group) {
                sum += s.of[j].rewards[d];
                count++;
            }
    for (int64_t j = 0; j < rows(); j++)
        for (int64_t d = 0; d < s.of[j].docs; d++)
            if (s.of[j].groups[d] == group) squares += pow(s.of[j].rewards[d] - sum / count, 2);
    sum = s.of[i].rewards[k] - sum / count;
    return divide ? sum / (sqrt(squares / count) + 1e-3) : sum;
}

static void test_advantages(void) {
    for (int64_t sp = 1; sp <= 5; sp++)
        for (int divide = 0; divide < 2; divide++) {
            make(sp, 1 + sp % 2, 1 + sp % 3);
            say_all("objective", "ppo", 0);
            say_all("advantage", divide ? "group" : "group_mean", 0);
            say_all("advantage_eps", "%.17g", 1e-3);
            for (int64_t i = 0; i < rows(); i++) {
                row *w = &s.of[i];
                put_documents(i, "rewards", w->rewards, w->docs, SEQPAR_SAFETENSORS_I32);
                put_documents(i, "groups", w->groups, w->docs, SEQPAR_SAFETENSORS_I64);
                put_row(i, "labels", w->labels, SEQPAR_SAFETENSORS_I64, 1, 1, 1);
            }
            write_books("in", &made);
            runs("advantages", "in", "out", "--dtype float64");
            open_result();
            for (int64_t i = 0; i < rows(); i++) {
                row *w = &s.of[i];
                double want[MOST] = {0};
                for (int64_t t = 0; t < w->cu[w->docs]; t++)
                    if (w->labels[t] != -100)
                        want[t] = advantage_of(i, document_of(w, t), divide);
                compare(i, "advantages", want, 1, 1e-13);
            }
            test_end("run_advantages_%s_P%lld", divide ? "group" : "group_mean", (long long)sp);
        }
}

/* ---- norm, optimizer ---- */

enum { WEIGHTS = 19 };
static double weights[5][WEIGHTS]; /* grad, param, m, v, after */

static void put_weights(int64_t r, const char *prefix, const double *x, int sharded,
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

static double stepped(int64_t i, int sgd, double norm) {
    double g = weights[0][i] * (norm > 2 ? 2 / (norm + 1e-6) : 1), p = weights[1][i];
    double m = 0.8 * weights[2][i] + 0.2 * g, v = 0.95 * weights[3][i] + 0.05 * g * g;
    if (sgd) return p - 0.1 * (g + 0.25 * p);
    m /= 1 - 0.8 * 0.8 * 0.8;
    v /= 1 - 0.95 * 0.95 * 0.95;
    return p * (1 - 0.1 * 0.25) - 0.1 * m / (sqrt(v) + 1e-3);
}

static void test_step(void) {
    for (int64_t sp = 1; sp <= 5; sp++)
        for (int way = 0; way < 4; way++) {
            int sgd = way % 2, sharded = way / 2;
            double norm = 0;
            make(sp, 1 + sp % 2, 1);
            say_all("optimizer", sgd ? "sgd" : "adamw", 0);
            if (sp == 2) say_all("lr", "%.17g", 0.7); /* w has its own settings */
            if (sp == 2) say_all("weight_decay", "%.17g", 0.9);
            say_all(sp == 2 ? "lr.w" : "lr", "%.17g", 0.1);
            say_all(sp == 2 ? "weight_decay.w" : "weight_decay", "%.17g", 0.25);
            say_all("beta1", "%.17g", 0.8);
            say_all("beta2", "%.17g", 0.95);
            say_all("eps", "%.17g", 1e-3);
            say_all("max_norm", "%.17g", sharded ? 2 : 1e3);
            say_all("step", "3", 0);
            for (int k = 0; k < 3; k++) fill(weights[k], WEIGHTS, 1);
            for (int64_t i = 0; i < WEIGHTS; i++) {
                weights[3][i] = fabs(test_normal());
                norm += weights[0][i] * weights[0][i];
            }
            norm = sqrt(norm);
            for (int64_t r = 0; r < made.world; r++) {
                put_weights(r, "grad", weights[0], sharded, SEQPAR_SAFETENSORS_F64);
                put_weights(r, "param", weights[1], 0, SEQPAR_SAFETENSORS_F64);
                put_weights(r, "m", weights[2], sharded, SEQPAR_SAFETENSORS_F64);
                put_weights(r, "v", weights[3], sharded, SEQPAR_SAFETENSORS_F64);
                if (sharded) put_weights(r, "after", weights[0], 1, SEQPAR_SAFETENSORS_F32);
            }
            write_books("in", &made);
            runs("norm", "in", "mid", "");
            runs("optimizer", "mid", "out", "");
            open_result();
            for (int64_t r = 0; r < got.world; r++) {
                item *n = find(&got.rank[r], "norm"), *after = find(&got.rank[r], "after.w");
                int64_t first = sharded ? WEIGHTS * r / got.world : 0;
                int64_t last = sharded ? WEIGHTS * (r + 1) / got.world : WEIGHTS;
                test_expect(n && fabs(n->x[0] - norm) < 1e-13 * norm, "norm %g, not %g",
                            n ? n->x[0] : NAN, norm);
                test_expect(after && after->count == last - first, "after is of other size");
                for (int64_t i = first; after && i < last; i++) {
                    double want = stepped(i, sgd, sharded ? norm : 0);
                    test_expect(fabs(after->x[i - first] - want) <=
                                    (sharded ? 0x1p-24 : 1e-14) * (1 + fabs(want)),
                                "after %lld is %.17g, not %.17g", (long long)i,
                                after->x[i - first], want);
                }
            }
            test_end("run_norm_and_optimizer_%s_%s_P%lld", sgd ? "sgd" : "adamw",
                     sharded ? "shards" : "whole", (long long)sp);
        }
}

/* ---- split, gather, pack ---- */

static void put_everything(void) {
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

static void same_item(const item *a, const item *b) {
    if (!test_expect(a && b && a->count == b->count && a->dtype == b->dtype &&
                         a->dims == b->dims,
                     "tensor %s is not there or another", a ? a->name : "?"))
        return;
    test_expect(!memcmp(a->x, b->x, (size_t)a->count * sizeof *a->x), "%s differs", a->name);
}

static int is_of_documents(const char *what) {
    return !strcmp(what, "groups") || !strcmp(what, "scores") || !strcmp(what, "desirable") ||
           !strcmp(what, "kl") || !strcmp(what, "cu_seqlens");
}

/* A row of the one-rank dump on rank m of sp: index by the layout's rule, all else by index. */
static void check_share(int64_t i, int layout, int64_t sp, int64_t m) {
    const row *w = &s.of[i];
    const book *from = &made.rank[i / s.accumulation];
    const book *to = &got.rank[i / s.accumulation * sp + m];
    int64_t micro = i % s.accumulation, at = 0;
    char name[64], prefix[16];
    const item *index;
    snprintf(prefix, sizeof prefix, "%lld.", (long long)micro);
    snprintf(name, sizeof name, "%sindex", prefix);
    if (!test_expect((index = find(to, name)) != NULL, "no index")) return;
    for (int64_t t = 0; t < w->n; t++)
        if (deal_rank(layout, sp, w->n, w->cu, w->docs, t) == m)
            test_expect(at < index->count && index->x[at++] == (double)t,
                        "row %lld, rank %lld: token %lld is not where it belongs", (long long)i,
                        (long long)m, (long long)t);
    test_expect(at == index->count, "rank %lld holds others, too", (long long)m);
    for (int64_t k = 0; k < from->count && !*test_why; k++) {
        const item *a = &from->of[k], *b = find(to, a->name);
        int64_t each = a->count / a->shape[0];
        if (strncmp(a->name, prefix, strlen(prefix)) || !strcmp(a->name, name)) continue;
        if (is_of_documents(a->name + strlen(prefix))) {
            same_item(a, b);
            continue;
        }
        test_expect(b && b->count == index->count * each, "%s has another size", a->name);
        for (int64_t l = 0; !*test_why && l < index->count; l++) {
            int64_t t = s.of[i].local[(int64_t)index->x[l]];
            test_expect(!memcmp(b->x + l * each, a->x + t * each, (size_t)each * 8),
                        "%s of local row %lld is another token's", a->name, (long long)l);
        }
    }
}

static void test_split(void) {
    for (int64_t sp = 1; sp <= 8; sp += sp == 5 ? 3 : 1)
        for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
            char options[64];
            make(1, sp == 8 ? 1 : 2, 2);
            put_everything();
            write_books("in", &made);
            books_free(&made);
            read_books("in", &made); /* as it is rounded there */
            snprintf(options, sizeof options, "--sp %lld --layout %s", (long long)sp,
                     seqpar_layout_name(layout));
            for (int64_t i = 0, most = 0; i < rows(); i++) {
                if (s.of[i].n > most) most = s.of[i].n;
                if (i + 1 == rows() && most < sp) s.of[0].n = 0; /* too few tokens */
            }
            if (!s.of[0].n) {
                layout--;
                continue;
            }
            runs("split", "in", "out", options);
            open_result();
            test_expect(got.world == s.dp * sp, "world is %lld", (long long)got.world);
            for (int64_t i = 0; i < rows(); i++)
                for (int64_t m = 0; m < sp; m++) check_share(i, layout, sp, m);
            for (int64_t r = 0; r < got.world; r++) {
                same_item(find(&made.rank[r / sp], "grad.w"), find(&got.rank[r], "grad.w"));
                same_item(find(&made.rank[r / sp], "loss"), find(&got.rank[r], "loss"));
                test_expect(!find(&got.rank[r], "local.w"), "a local gradient was copied");
            }
            test_expect(strstr(said, "left out: local.NAME") != NULL, "'%s'", said);
            runs("gather", "out", "back", "");
            books_free(&got);
            read_books("back", &got);
            for (int64_t i = 0; i < rows(); i++) check_share(i, 0, 1, 0);
            test_end("run_split_%s_P%lld", seqpar_layout_name(layout), (long long)sp);
        }
}

/* Ranges of parameters on several ranks become one. */
static void test_gather(void) {
    for (int64_t sp = 2; sp <= 5; sp++) {
        make(sp, 2, 1);
        for (int k = 0; k < 2; k++) fill(weights[k], WEIGHTS, 1);
        for (int64_t r = 0; r < made.world; r++)
            put_weights(r, "grad", weights[0], 1, SEQPAR_SAFETENSORS_F64);
        write_books("in", &made);
        runs("gather", "in", "out", "");
        open_result();
        test_expect(got.world == 2, "world is %lld", (long long)got.world);
        for (int64_t r = 0; r < got.world; r++) {
            item *t = find(&got.rank[r], "grad.w");
            test_expect(t && t->count == WEIGHTS &&
                            !memcmp(t->x, weights[0], sizeof weights[0]) &&
                            !said_of(&got.rank[r], "part.grad.w"),
                        "grad.w is not whole");
        }
        test_end("run_gather_P%lld", (long long)sp);
    }
}

/* The document of the dump that begins with this log-prob. */
static int document_with(double logp, int64_t *i, int64_t *k) {
    for (*i = 0; *i < rows(); ++*i)
        for (*k = 0; *k < s.of[*i].docs; ++*k)
            if (s.of[*i].logp[s.of[*i].cu[*k]] == logp) return 1;
    return 0;
}

static item *of_row(int64_t micro, const char *what) {
    char name[64];
    item *t;
    snprintf(name, sizeof name, "%lld.%s", (long long)micro, what);
    t = find(&got.rank[0], name);
    test_expect(t != NULL, "no %s", name);
    if (!t) test_end("run_pack");
    if (!t) exit(1);
    return t;
}

static void check_packed_document(int64_t micro, int64_t d, int pairs, int *times) {
    item *cu = of_row(micro, "cu_seqlens"), *logp = of_row(micro, "logp");
    item *q = of_row(micro, "q");
    int64_t begin = (int64_t)cu->x[d], n = (int64_t)cu->x[d + 1] - begin, i = 0, k = 0;
    const row *w;
    if (!test_expect(document_with(logp->x[begin], &i, &k), "a document of nowhere")) return;
    w = &s.of[i];
    times[i * DOCS + k]++;
    test_expect(n == w->cu[k + 1] - w->cu[k], "a document has %lld tokens", (long long)n);
    test_expect(!pairs || d % 2 == k % 2, "the sides of a pair are changed");
    test_expect(of_row(micro, "groups")->x[d] == w->groups[k] &&
                    of_row(micro, "kl")->x[d] == w->kl[k],
                "numbers of documents did not move along");
    for (int64_t t = 0; t < n; t++) {
        int64_t from = w->cu[k] + t;
        test_expect(of_row(micro, "ids")->x[begin + t] == w->ids[from] &&
                        of_row(micro, "index")->x[begin + t] == (double)(begin + t) &&
                        of_row(micro, "positions")->x[begin + t] == (double)t &&
                        of_row(micro, "labels")->x[begin + t] == w->labels[from] &&
                        logp->x[begin + t] == w->logp[from] &&
                        !memcmp(q->x + (begin + t) * HEADS * DIM, w->q + from * HEADS * DIM,
                                HEADS * DIM * sizeof *q->x),
                    "token %lld of document %lld is another", (long long)t, (long long)d);
    }
}

static void test_pack(void) {
    for (int way = 0; way < 8; way++) {
        int pairs = way % 2, times[ROWS * DOCS] = {0};
        int64_t most = pairs ? 14 : 7 + way, last = most + 1, micros;
        char options[32];
        make(1, 1, 2 + way / 2);
        put_everything();
        say_all("objective", pairs ? "dpo" : "kto", 0);
        write_books("in", &made);
        snprintf(options, sizeof options, "--tokens %lld", (long long)most);
        runs("pack", "in", "out", options);
        open_result();
        micros = atoi(said_of(&got.rank[0], "accumulation"));
        for (int64_t a = 0; a < micros && !*test_why; a++) {
            item *cu = of_row(a, "cu_seqlens");
            int64_t tokens = (int64_t)cu->x[cu->count - 1];
            test_expect(tokens <= most && (pairs || tokens + last > most),
                        "row %lld has %lld tokens", (long long)a, (long long)tokens);
            last = tokens;
            for (int64_t d = 0; d + 1 < cu->count; d++)
                check_packed_document(a, d, pairs, times);
        }
        for (int64_t i = 0; i < rows(); i++)
            for (int64_t k = 0; k < s.of[i].docs; k++)
                test_expect(times[i * DOCS + k] == 1, "a document is there %d times",
                            times[i * DOCS + k]);
        test_expect(!find(&got.rank[0], "loss") && find(&got.rank[0], "param.w"),
                    "what is of the old micro-batches stays, or what is not goes");
        test_end("run_pack_%s_%lld", pairs ? "pairs" : "documents", (long long)most);
    }
}

/* ---- steps that gen makes ---- */

/* FOLDER/name, in which got, want and model are. */
static int gen(const char *name, const char *options) {
    char line[500];
    snprintf(line, sizeof line,
             "rm -rf " FOLDER "/%s; " ORACLE " gen --out " FOLDER "/%s %s 2>&1", name, name,
             options);
    return code_of(line);
}

/* One operation after the other, from FOLDER/in; to FOLDER/out at the end. */
static void run_all(const char *in, const char *operations) {
    char list[300], folder[2][16] = {"even", "odd"};
    int turn = 0;
    snprintf(list, sizeof list, "%s", operations);
    for (char *one = strtok(list, ","); one; one = strtok(NULL, ",")) {
        char *options = strchr(one, ' ');
        if (options) *options++ = 0;
        runs(one, turn ? folder[turn % 2] : in, folder[(turn + 1) % 2], options ? options : "");
        turn++;
    }
    if (system("rm -rf " FOLDER "/out")) exit(1);
    snprintf(list, sizeof list, FOLDER "/%s", folder[turn % 2]);
    test_expect(!rename(list, FOLDER "/out"), "%s is not there", list);
}

static void expect_answers(void) {
    books want;
    read_books("gen/got", &want);
    books_free(&got);
    read_books("out", &got);
    for (int64_t r = 0; r < want.world && !*test_why; r++)
        for (int64_t i = 0; i < want.rank[r].count; i++) {
            const item *a = &want.rank[r].of[i], *b = find(&got.rank[r], a->name);
            double far;
            if (!strncmp(a->name, "param.", 6) || !strncmp(a->name, "after.", 6) ||
                !strncmp(a->name, "m.", 2) || !strncmp(a->name, "v.", 2))
                continue;
            far = b && b->count == a->count && b->dims == a->dims
                      ? test_distance(b->x, a->x, a->count)
                      : HUGE_VAL;
            test_expect(far <= 1e-12, "%s of rank %lld is %g from gen's", a->name, (long long)r,
                        far);
        }
    books_free(&want);
}

#define ANSWERS \
    "positions,labels,attention,attention-gradient,step --model " FOLDER "/questions/model," \
    "loss,norm"
static void test_questions(void) {
    static const char *const options[] = {
        "--sp 1",
        "--sp 2 --layout contiguous --tokens 53 --docs 3",
        "--sp 3 --layout zigzag --dp 2 --accumulation 3 --tokens 37",
        "--sp 4 --layout zigzag-doc --objective dpo",
        "--sp 5 --layout stripe --dp 2 --objective dpo --tokens 71 --docs 6",
        "--sp 3 --layout stripe --accumulation 2 --docs 7"};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        char with[160];
        snprintf(with, sizeof with, "%s --questions", options[i]);
        test_expect(!gen("questions", with) && !gen("gen", options[i]), "%s", said);
        run_all("questions/got", ANSWERS);
        expect_answers();
        judged("out", "questions/model", i ? "right: " : "insufficient"); /* of one rank */
        test_expect(!strstr(said, " wrong: "), "%s", said);
        test_end("run_questions (%s)", options[i]);
    }
}

static void move_along(item *t, double by) {
    for (int64_t i = 0; t && i < t->count; i++) t->x[i] += by * sin((double)(i + 1)) * 1e-3;
}

/* Finite differences of the loss are what the gradient says. The model's folder, which is to be
   what the dump began with, moves with it. */
static void test_slope(void) {
    static const double parts[] = {-2, -1, 1, 2};
    const char *name = "model.layers.1.self_attn.k_proj.weight";
    const char *weights = FOLDER "/gen/model/model.safetensors";
    char param[100], grad[100];
    double loss[4] = {0}, along = 0, slope;
    books b;
    book model;
    item *g, *from;
    snprintf(param, sizeof param, "param.%s", name);
    snprintf(grad, sizeof grad, "grad.%s", name);
    test_expect(!gen("gen", "--sp 2 --objective dpo"), "%s", said);
    read_books("gen/got", &b);
    read_book(weights, &model);
    runs("step", "gen/got", "mid", "--model " FOLDER "/gen/model");
    from = find(&b.rank[0], param);
    for (int k = 0; k < 4 && !*test_why; k++) {
        double by = parts[k] - (k ? parts[k - 1] : 0);
        for (int64_t r = 0; r < b.world; r++) move_along(find(&b.rank[r], param), by);
        move_along(find(&model, name), by);
        write_book(weights, &model);
        write_books("in", &b);
        books_free(&got);
        runs("step", "in", "out", "--model " FOLDER "/gen/model");
        read_books("out", &got);
        g = find(&got.rank[0], "loss");
        if (test_expect(g != NULL, "no loss")) loss[k] = g->x[0];
    }
    books_free(&got);
    read_books("mid", &got);
    g = find(&got.rank[0], grad);
    for (int64_t i = 0; g && from && i < g->count; i++)
        along += g->x[i] * sin((double)(i + 1)) * 1e-3;
    slope = (8 * (loss[2] - loss[1]) - (loss[3] - loss[0])) / 12;
    test_expect(fabs(slope - along) <= 1e-7 * fabs(along) && along != 0,
                "the slope is %.12g, and the gradient says %.12g", slope, along);
    book_free(&model);
    books_free(&b);
    test_end("run_step_slope");
}

/* ---- mistakes undone ---- */

#define STEP "step --model " FOLDER "/gen/model"
static void test_mistakes(void) {
    static const struct {
        const char *name, *objective, *operations;
    } all[] = {{"positions_local", "sft", "positions," STEP},
               {"positions_run_on", "dpo", "positions," STEP},
               {"shift_after_split", "sft", "labels --unmasked," STEP},
               {"labels_not_shifted", "sft", "labels," STEP},
               {"labels_shifted_twice", "dpo", "labels," STEP},
               {"labels_cross_documents", "sft", "labels," STEP},
               {"hop_lost", "sft", "attention,attention-gradient," STEP},
               {"causal_by_local_row", "dpo", "attention,attention-gradient," STEP},
               {"own_tokens_only", "sft", "attention,attention-gradient," STEP},
               {"documents_ignored", "sft", "positions,attention,attention-gradient," STEP},
               {"dkv_not_returned", "sft", "attention-gradient," STEP},
               {"delta_missing", "dpo", "attention-gradient," STEP},
               {"mean_of_means", "sft", "loss," STEP},
               {"all_tokens_counted", "sft", "loss"},
               {"losses_added", "sft", "loss"},
               {"sigmoid_of_parts", "dpo", STEP},
               {"reference_missing", "dpo", STEP},
               {"over_sp", "sft", STEP},
               {"never_synchronised", "sft", STEP},
               {"norm_counts_copies", "sft", "norm"},
               {"norm_after_clip", "dpo", "norm"},
               {"not_clipped", "sft", "optimizer"},
               {"bias_correction_missing", "sft", "optimizer"},
               {"decay_coupled", "sft", "optimizer"},
               {"decay_after_step", "dpo", "optimizer"},
               {"eps_inside_root", "sft", "optimizer"},
               {"steps_counted_by_micro_batches", "sft", "optimizer"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        char options[200];
        snprintf(options, sizeof options,
                 "--sp 3 --dp 2 --accumulation 3 --tokens 37 --objective %s --mistake %s",
                 all[i].objective, all[i].name);
        test_expect(!gen("gen", options), "%s", said);
        judged("gen/got", "gen/model", "wrong: ");
        test_expect(strstr(said, all[i].name) != NULL, "%s is not named", all[i].name);
        run_all("gen/got", all[i].operations);
        judged("out", "gen/model", "right: ");
        test_end("run_undoes_%s", all[i].name);
    }
}

/* ---- bad input ---- */

static int nothing_left(void) {
    DIR *dir = opendir(FOLDER);
    struct dirent *entry;
    int left = 0;
    while (dir && (entry = readdir(dir)))
        left |= !strcmp(entry->d_name, "out") || strstr(entry->d_name, ".partial.") != NULL;
    if (dir) closedir(dir);
    return !left;
}

/* One sentence on stderr and nothing on stdout, nothing written. */
static void refuses(const char *test, int code, const char *sentence, const char *arguments) {
    char line[700];
    int is;
    snprintf(line, sizeof line,
             "rm -rf " FOLDER "/out; " ORACLE " run %s 2>&1 >" FOLDER "/stdout", arguments);
    is = code_of(line);
    test_expect(is == code && !strncmp(said, "error: ", 7) && strstr(said, sentence) &&
                    strchr(said, '\n') == said + strlen(said) - 1,
                "run %s: exit code %d, not %d; '%.500s', not '%s'", arguments, is, code, said,
                sentence);
    test_expect(code_of("cat " FOLDER "/stdout") == 0 && !*said, "stdout has '%.100s'", said);
    test_expect(nothing_left(), "something is left of it");
    test_end("run_refuses_%s", test);
}

static void refuses_dump(const char *test, int code, const char *sentence,
                         const char *operation) {
    char arguments[300];
    write_books("in", &made);
    snprintf(arguments, sizeof arguments, "%s " FOLDER "/in --out " FOLDER "/out%s", operation,
             "");
    if (strchr(operation, ' ')) /* with options */
        snprintf(arguments, sizeof arguments, "%.*s " FOLDER "/in --out " FOLDER "/out %s",
                 (int)strcspn(operation, " "), operation, strchr(operation, ' '));
    refuses(test, code, sentence, arguments);
}

#define IN FOLDER "/in"
#define TO " --out " FOLDER "/out"
static void test_usage(void) {
    make(1, 1, 1);
    put_everything();
    write_books("in", &made);
    refuses("no_operation", 2, "run needs an operation; give run OPERATION DUMP --out DIR", "");
    refuses("unknown", 2, "run has no operation 'atention'; give run OPERATION DUMP --out DIR",
            "atention " IN TO);
    refuses("no_dump", 2, "run needs the folder of a dump", "labels" TO);
    refuses("no_out", 2, "run needs --out", "labels " IN);
    refuses("three", 2, "what is 'more'?", "labels " IN " more" TO);
    refuses("split_of_what", 2, "run split needs --sp", "split " IN TO);
    refuses("pack_of_what", 2, "run pack needs --tokens", "pack " IN TO);
    refuses("step_of_what", 2, "run step needs --model", "step " IN TO);
    refuses("others_option", 2, "run attention takes no --sp", "attention " IN TO " --sp 2");
    refuses("others_flag", 2, "run positions takes no --unmasked",
            "positions " IN TO " --unmasked");
    refuses("dtype", 2, "--dtype is the type of the computed tensors; give float32",
            "loss " IN TO " --dtype float16");
    refuses("layout", 2, "--layout is 'zigzak'; give contiguous, zigzag",
            "split " IN TO " --sp 2 --layout zigzak");
    refuses("sp_zero", 2, "--sp is '0'; give a whole number", "split " IN TO " --sp 0");
    refuses("sp_of_tokens", 2, "run split: --sp is 900, and the longest row of index has",
            "split " IN TO " --sp 900");
    refuses("tokens_too_small", 2,
            "run pack: --tokens is 1, and document 0 of 0.cu_seqlens has ",
            "pack " IN TO " --tokens 1");
    refuses("no_folder", 3, "run labels: nowhere: cannot be opened as a folder; give",
            "labels nowhere" TO);
    refuses("out_in_nowhere", 3, "cannot be made: No such file or directory",
            "positions " IN " --out " FOLDER "/nowhere/out");
    refuses("no_model", 3, "run step: ", "step " IN TO " --model nowhere");
}

static void test_missing(void) {
    static const struct {
        const char *operation, *without, *takes;
    } all[] = {{"pack --tokens 90", "0.ids", "index and ids"},
               {"positions", "0.cu_seqlens", "index and cu_seqlens"},
               {"labels", "1.ids", "index, ids and cu_seqlens"},
               {"split --sp 2", "1.index", "index"},
               {"gather", "0.index", "index"},
               {"attention", "1.k", "index, cu_seqlens, q, k and v"},
               {"attention-gradient", "0.dout", "index, cu_seqlens, q, k, v and dout"},
               {"merge", "0.part_out", "part_out and part_lse"},
               {"loss", "1.logp", "index, labels and logp"},
               {"advantages", "0.groups", "index, cu_seqlens, rewards and groups"},
               {"step --model build", "0.labels", "index, ids and labels"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        char sentence[200], test[64];
        make(1, 1, 2);
        put_everything();
        for (int64_t k = 0; k < rows(); k++) {
            put_row(k, "v", s.of[k].v, SEQPAR_SAFETENSORS_F64, 3, KV, OUT);
            put_row(k, "dout", s.of[k].dout, SEQPAR_SAFETENSORS_F64, 3, HEADS, OUT);
            put_documents(k, "rewards", s.of[k].rewards, s.of[k].docs, SEQPAR_SAFETENSORS_F64);
        }
        for (int64_t k = 0; k < made.rank[0].count; k++)
            if (!strcmp(made.rank[0].of[k].name, all[i].without))
                snprintf(made.rank[0].of[k].name, 32, "grad.other");
        snprintf(sentence, sizeof sentence,
                 "run %.*s: " FOLDER
                 "/in/rank0.safetensors: tensor %s is missing; the operation takes %s of every "
                 "micro-batch",
                 (int)strcspn(all[i].operation, " "), all[i].operation, all[i].without,
                 all[i].takes);
        snprintf(test, sizeof test, "without_%s", all[i].without);
        refuses_dump(test, 3, sentence, all[i].operation);
    }
}

/* A dump for all that goes wrong: of two ranks, or of one. */
static void make_bad(int64_t sp) {
    make(sp, 1, 2);
    put_everything();
    for (int64_t i = 0; i < rows(); i++) {
        put_row(i, "k", s.of[i].k, SEQPAR_SAFETENSORS_F64, 3, KV, DIM);
        put_row(i, "v", s.of[i].v, SEQPAR_SAFETENSORS_F64, 3, KV, OUT);
    }
}

static item *bad(const char *name) {
    item *t = find(&made.rank[made.world - 1], name);
    for (int64_t r = made.world - 1; r > 0 && (!t || !t->count); r--)
        t = find(&made.rank[r - 1], name);
    if (!t) exit(1);
    return t;
}

static void test_numbers(void) {
    make_bad(2);
    for (int64_t r = 0; r < 2; r++) /* padding is not looked at */
        for (int64_t i = 0; i < s.of[0].held[r]; i++)
            find(&made.rank[r], "0.q")->x[i * HEADS * DIM] = NAN;
    refuses_dump("nan_in_q", 3, "tensor 0.q or k, v or dout of this micro-batch", "attention");
    make_bad(2);
    for (int64_t r = 0; r < 2; r++)
        for (int64_t i = 0; i < s.of[0].held[r]; i++) find(&made.rank[r], "0.logp")->x[i] = NAN;
    refuses_dump("nan_in_logp", 3, "run loss: " IN ": tensor loss becomes NaN or Inf at",
                 "loss");
    make_bad(2);
    for (int64_t r = 0; r < 2; r++) {
        find(&made.rank[r], "loss")->dtype = SEQPAR_SAFETENSORS_F32;
        for (int64_t i = 0; i < s.of[0].held[r]; i++)
            find(&made.rank[r], "0.logp")->x[i] = -1e200;
    }
    refuses_dump("too_large", 3, "for which F32 has no room; give --dtype float64", "loss");
    make_bad(2);
    bad("grad.w")->x[3] = NAN;
    refuses_dump("nan_in_grad", 3, "run norm: " IN ": grad.w holds NaN or Inf", "norm");
    make_bad(2);
    bad("grad.w")->x[3] += 5;
    refuses_dump("grads_differ", 3, "away from that of another rank; write equal", "norm");
    make_bad(2);
    bad("0.index")->x[0] = 900;
    refuses_dump("index_outside", 3, "tensor 0.index is wrong: 0 tokens are held twice, 1 by",
                 "positions");
    make_bad(1);
    bad("0.ids")->dtype = SEQPAR_SAFETENSORS_I64;
    bad("0.ids")->x[0] = 3e9;
    refuses_dump("ids_too_large", 3, "tensor 0.ids has 3000000000 at", "pack --tokens 900");
    make_bad(1);
    bad("1.logp")->dtype = SEQPAR_SAFETENSORS_F32;
    refuses_dump("types_differ", 3, "tensor 1.logp has another type or shape than on another",
                 "split --sp 2");
}

static void test_states(void) {
    make_bad(2);
    refuses_dump("split_of_split", 2, "its sp is 2 already; run gather first", "split --sp 3");
    refuses_dump("pack_of_split", 2, "it packs the rows of one rank; run gather first",
                 "pack --tokens 900");
    refuses_dump("no_optimizer", 3, "metadata optimizer is none and lr 0; write optimizer",
                 "optimizer");
    say_all("optimizer", "sgd", 0);
    say_all("lr", "%g", 0.1);
    snprintf(bad("param.w")->name, 32, "param.b");
    snprintf(find(&made.rank[0], "param.w")->name, 32, "param.b");
    refuses_dump("no_param", 3, "tensor param.w is missing, and grad. is there", "optimizer");
    for (int64_t r = 0; r < 2; r++)
        snprintf(find(&made.rank[r], "grad.w")->name, 32, "local.g");
    refuses_dump("no_grad", 3, "tensors grad.NAME are missing", "norm");
    for (int64_t i = 0; i < rows(); i++)
        put_documents(i, "rewards", s.of[i].rewards, s.of[i].docs, SEQPAR_SAFETENSORS_F64);
    refuses_dump("advantage_given", 3, "metadata objective is sft and advantage is given",
                 "advantages");
    say_all("objective", "kto", 0);
    refuses_dump("step_of_kto", 3, "metadata objective is kto; step computes sft and dpo",
                 "step --model build");
    say_all("objective", "rm", 0);
    for (int64_t r = 0; r < 2; r++) {
        snprintf(find(&made.rank[r], "1.values")->name, 32, "local.x");
        snprintf(find(&made.rank[r], "0.scores")->name, 32, "local.y");
    }
    refuses_dump("no_scores", 3, "tensor values is missing in some micro-batch", "loss");
    say_all("objective", "sft", 0);
    for (int64_t i = 0; i < rows(); i++) {
        for (int64_t t = 0; t < s.of[i].n; t++) s.of[i].labels[t] = -100;
        put_row(i, "labels", s.of[i].labels, SEQPAR_SAFETENSORS_I64, 1, 1, 1);
    }
    refuses_dump("no_label", 3, "tensor labels has no token to be learnt", "loss");
    make(1, 1, 1);
    s.of[0].docs = 1;
    s.of[0].cu[1] = s.of[0].n;
    put_documents(0, "cu_seqlens", NULL, 2, SEQPAR_SAFETENSORS_I64);
    put_everything();
    say_all("objective", "dpo", 0);
    refuses_dump("odd_pair", 3, "a row has a document without a partner", "loss");
    make(2, 1, 1);
    scale = 1;
    put_parts(0, 3);
    bad("0.part_lse")->shape[0] = bad("0.part_lse")->shape[0] == 3 ? 1 : 3;
    bad("0.part_lse")->shape[1] *= 3;
    refuses_dump("parts_differ", 3, "tensors 0.part_out and 0.part_lse have shapes that do",
                 "merge");
    make(2, 1, 1);
    put_parts(0, 3);
    bad("0.part_lse")->x[0] = NAN;
    refuses_dump("nan_in_lse", 3, "tensor 0.part_lse has nan at element 0", "merge");
}

/* --out is there: a folder, a file, one that is empty; nothing of it changes. Files cut off. */
static void test_files(void) {
    make_bad(2);
    write_books("in", &made);
    mkdir(FOLDER "/there", 0777);
    refuses("out_is_there", 3, "there: it is there already; give another --out",
            "positions " IN " --out " FOLDER "/there");
    refuses("out_is_there_slash", 3, "there: it is there already; give another --out",
            "positions " IN " --out " FOLDER "/there//");
    refuses("out_is_the_dump", 3, "in: it is there already", "positions " IN " --out " IN);
    if (system("touch " FOLDER "/file; rmdir " FOLDER "/there")) exit(1);
    refuses("out_is_a_file", 3, "file: it is there already",
            "positions " IN " --out " FOLDER "/file");
    if (system("truncate -s -1 " IN "/rank1.safetensors")) exit(1);
    refuses("cut_off", 3, "run positions: " IN "/rank1.safetensors", "positions " IN TO);
    if (system("truncate -s 5 " IN "/rank1.safetensors")) exit(1);
    refuses("cut_off_early", 3, "run positions: " IN "/rank1.safetensors", "positions " IN TO);
    if (system("rm " IN "/rank1.safetensors")) exit(1);
    refuses("rank_missing", 3, "no file of rank 1 of 2", "positions " IN TO);
    if (system("rm " IN "/*")) exit(1);
    refuses("nothing", 3, "no .safetensors file", "positions " IN TO);
}

/* ---- what is said of it ---- */

static const cJSON *tensor_said(const cJSON *all, int rank, const char *name) {
    const cJSON *one = cJSON_GetArrayItem(cJSON_GetObjectItem(all, "ranks"), rank), *t;
    cJSON_ArrayForEach(t, cJSON_GetObjectItem(one, "tensors")) {
        if (!strcmp(cJSON_GetObjectItem(t, "name")->valuestring, name)) return t;
    }
    return NULL;
}

static void test_json(void) {
    cJSON *all;
    const cJSON *t;
    make_bad(3);
    write_books("in", &made);
    runs("loss", "in", "out", "--json");
    all = cJSON_Parse(said);
    t = all ? tensor_said(all, 2, "loss") : NULL;
    test_expect(t && cJSON_IsTrue(cJSON_GetObjectItem(t, "replaced")) &&
                    fabs(cJSON_GetObjectItem(t, "value")->valuedouble - loss_of_tokens(0, 0)) <
                        1e-12 &&
                    !strcmp(cJSON_GetObjectItem(all, "operation")->valuestring, "loss") &&
                    cJSON_GetArraySize(cJSON_GetObjectItem(all, "ranks")) == 3,
                "'%s'", said);
    cJSON_Delete(all);
    runs("positions", "in", "out", "--json");
    all = cJSON_Parse(said);
    t = all ? tensor_said(all, 0, "1.positions") : NULL;
    test_expect(t && cJSON_IsFalse(cJSON_GetObjectItem(t, "replaced")) &&
                    cJSON_GetArrayItem(cJSON_GetObjectItem(t, "shape"), 0)->valueint ==
                        s.of[1].held[0] &&
                    !tensor_said(all, 0, "0.ids"),
                "'%s'", said);
    cJSON_Delete(all);
    runs("gather", "in", "out", "--json");
    all = cJSON_Parse(said);
    t = all ? cJSON_GetArrayItem(cJSON_GetObjectItem(all, "left_out"), 0) : NULL;
    test_expect(t && !strcmp(t->valuestring, "local.NAME"), "'%s'", said);
    cJSON_Delete(all);
    test_end("run_json");
}

/* Numbers of 16 bits are replaced by the nearest of 16 bits. */
static void test_half(void) {
    make_bad(2);
    for (int64_t r = 0; r < 2; r++)
        find(&made.rank[r], "loss")->dtype = SEQPAR_SAFETENSORS_BF16;
    write_books("in", &made);
    runs("loss", "in", "out", "");
    open_result();
    for (int64_t r = 0; r < 2; r++) {
        item *t = find(&got.rank[r], "loss");
        double want = loss_of_tokens(0, 0), unit = pow(2, floor(log2(fabs(want))) - 7);
        test_expect(t && t->dtype == SEQPAR_SAFETENSORS_BF16 &&
                        fabs(t->x[0] - want) <= unit / 2 && fmod(t->x[0], unit) == 0,
                    "bf16 of %g is %g", want, t ? t->x[0] : NAN);
    }
    runs("loss", "in", "out", "--dtype float64");
    open_result();
    test_expect(fabs(find(&got.rank[0], "loss")->x[0] - loss_of_tokens(0, 0)) < 1e-13,
                "--dtype does not hold");
    test_end("run_dtypes");
}

/* ---- what stays as it was ---- */

/* The type of computed numbers: of what they replace, else F64 where any file has that, last
   file or first, else F32; or what is said. */
static void test_types(void) {
    static const struct {
        int64_t wide; /* the rank that has a tensor of F64; -1: none */
        const char *options;
        seqpar_safetensors_dtype want;
    } table[] = {{-1, "", SEQPAR_SAFETENSORS_F32},
                 {2, "", SEQPAR_SAFETENSORS_F64},
                 {0, "", SEQPAR_SAFETENSORS_F64},
                 {2, "--dtype float32", SEQPAR_SAFETENSORS_F32},
                 {-1, "--dtype float64", SEQPAR_SAFETENSORS_F64}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        make(3, 1, 2);
        for (int64_t n = 0; n < rows(); n++) {
            put_row(n, "labels", s.of[n].labels, SEQPAR_SAFETENSORS_I64, 1, 1, 1);
            put_row(n, "logp", s.of[n].logp, SEQPAR_SAFETENSORS_F32, 1, 1, 1);
        }
        if (table[i].wide >= 0)
            put_weights(table[i].wide, "local", weights[0], 0, SEQPAR_SAFETENSORS_F64);
        write_books("in", &made);
        runs("loss", "in", "out", table[i].options);
        open_result();
        for (int64_t r = 0; r < 3; r++)
            test_expect(find(&got.rank[r], "loss") &&
                            find(&got.rank[r], "loss")->dtype == table[i].want,
                        "the loss of rank %lld has another type", (long long)r);
        test_end("run_type_%zu", i);
    }
}

/* Labels that have no room in I32 become I64; others stay. */
static void test_large_labels(void) {
    make(2, 1, 2);
    for (int64_t n = 0; n < rows(); n++) {
        for (int64_t t = 0; t < s.of[n].n; t++)
            s.of[n].ids[t] = n ? 3e9 + (double)t : INT32_MAX - (double)(t % 2);
        put_row(n, "ids", s.of[n].ids, SEQPAR_SAFETENSORS_I64, 1, 1, 1);
        put_row(n, "labels", s.of[n].labels, SEQPAR_SAFETENSORS_I32, 1, 1, 1);
    }
    write_books("in", &made);
    runs("labels", "in", "out", "--unmasked");
    open_result();
    for (int64_t n = 0; n < rows(); n++) {
        const row *w = &s.of[n];
        double want[MOST];
        for (int64_t t = 0; t < w->n; t++)
            want[t] = t + 1 < w->n && document_of(w, t) == document_of(w, t + 1) ? w->ids[t + 1]
                                                                                 : -100;
        compare(n, "labels", want, 1, 0);
        for (int64_t r = 0; r < 2; r++) {
            item *t = find(&got.rank[r], n ? "1.labels" : "0.labels");
            int large = 0;
            for (int64_t k = 0; k < w->n; k++)
                large |= w->member[k] == r && want[k] > INT32_MAX;
            test_expect(t && t->dtype ==
                                 (large ? SEQPAR_SAFETENSORS_I64 : SEQPAR_SAFETENSORS_I32),
                        "labels of row %lld have another type", (long long)n);
        }
    }
    test_end("run_labels_without_room");
}

/* Each rank's own metadata stays its own; where tokens move, a replica's first rank's. */
static void test_notes(void) {
    static const struct {
        const char *operation, *options;
        int64_t sp, to;
    } table[] = {{"positions", "", 3, 3}, {"gather", "", 3, 1}, {"split", "--sp 2", 1, 2}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        make(table[i].sp, 2, 2);
        for (int64_t r = 0; r < made.world; r++)
            say(&made.rank[r], "note.own", "%.0f", (double)(r + 40), 0);
        write_books("in", &made);
        runs(table[i].operation, "in", "out", table[i].options);
        open_result();
        test_expect(got.world == 2 * table[i].to, "%lld ranks", (long long)got.world);
        for (int64_t r = 0; r < got.world; r++) {
            int64_t from = table[i].sp == table[i].to ? r : r / table[i].to * table[i].sp;
            const char *own = said_of(&got.rank[r], "note.own"),
                       *number = said_of(&got.rank[r], "rank");
            test_expect(own && atoi(own) == from + 40 && number && atoi(number) == r,
                        "rank %lld has the metadata of %s", (long long)r, own ? own : "none");
            test_expect(atoi(said_of(&got.rank[r], "sp")) == table[i].to, "another sp");
        }
        test_end("run_metadata_of_%s", table[i].operation);
    }
}

/* Files keep their names where no token moves. */
static void test_file_names(void) {
    make_bad(2);
    write_books("in", &made);
    if (rename(FOLDER "/in/rank1.safetensors", FOLDER "/in/of b.safetensors")) exit(1);
    runs("loss", "in", "out", "");
    test_expect(!access(FOLDER "/out/of b.safetensors", R_OK) &&
                    !access(FOLDER "/out/rank0.safetensors", R_OK) &&
                    access(FOLDER "/out/rank1.safetensors", R_OK),
                "files have other names");
    runs("gather", "in", "out", "");
    test_expect(!access(FOLDER "/out/rank0.safetensors", R_OK) &&
                    access(FOLDER "/out/of b.safetensors", R_OK),
                "the gathered file has another name");
    test_end("run_file_names");
}

/* Parameters keep their shape and type when ranks are gathered, those of a later rank, too;
   what is not written is said, each once. */
static void test_shapes(void) {
    make(2, 2, 1);
    fill(weights[0], WEIGHTS, 1);
    for (int64_t r = 0; r < made.world; r++) {
        item *t = put(&made.rank[r], "grad.wide", SEQPAR_SAFETENSORS_F64, 2, 3, 4, 1);
        memcpy(t->x, weights[0], (size_t)t->count * sizeof *t->x);
        if (r < 2) continue;
        t = put(&made.rank[r], "param.late", SEQPAR_SAFETENSORS_F32, 2, 2, 3, 1);
        for (int64_t i = 0; i < t->count; i++) t->x[i] = (float)weights[0][i];
    }
    put_weights(3, "local", weights[0], 0, SEQPAR_SAFETENSORS_F64);
    put_weights(1, "local", weights[0], 0, SEQPAR_SAFETENSORS_F64);
    put(&made.rank[0], "0.part_lse", SEQPAR_SAFETENSORS_F64, 1, 3, 1, 1);
    write_books("in", &made);
    runs("gather", "in", "out", "");
    test_expect(strstr(said, "left out: part_lse local.NAME\n") != NULL, "'%s'", said);
    open_result();
    for (int64_t r = 0; r < 2; r++) {
        item *wide = find(&got.rank[r], "grad.wide"), *late = find(&got.rank[r], "param.late");
        test_expect(wide && wide->dims == 2 && wide->shape[0] == 3 && wide->shape[1] == 4 &&
                        wide->dtype == SEQPAR_SAFETENSORS_F64 && wide->count == 12 &&
                        !memcmp(wide->x, weights[0], 12 * sizeof *wide->x),
                    "grad.wide is another");
        test_expect(late && late->dims == 2 && late->shape[0] == 2 && late->shape[1] == 3 &&
                        late->dtype == SEQPAR_SAFETENSORS_F32 && late->count == 6 &&
                        late->x[5] == (float)weights[0][5],
                    "param.late is another");
    }
    test_end("run_gather_shapes");
}

/* A step whose parameters the dump has not: all are written, whole, as the model has them. */
static void test_bare_step(void) {
    books want;
    test_expect(!gen("gen", "--sp 2 --accumulation 2 --tokens 37"), "%s", said);
    books_free(&made);
    read_books("gen/got", &made);
    read_books("gen/got", &want);
    for (int64_t r = 0; r < made.world; r++)
        for (int64_t i = 0; i < made.rank[r].count; i++)
            for (int k = 0; k < 3; k++) {
                static const char *const prefixes[] = {"grad.", "param.", "after."};
                item *t = &made.rank[r].of[i];
                if (strncmp(t->name, prefixes[k], strlen(prefixes[k]))) continue;
                free(t->x);
                *t = made.rank[r].of[--made.rank[r].count];
                i--;
                break;
            }
    write_books("in", &made);
    runs("step", "in", "out", "--model " FOLDER "/gen/model");
    books_free(&got);
    read_books("out", &got);
    for (int64_t r = 0; r < want.world; r++)
        for (int64_t i = 0; i < want.rank[r].count; i++) {
            const item *a = &want.rank[r].of[i], *b = find(&got.rank[r], a->name);
            if (strncmp(a->name, "grad.", 5) && strncmp(a->name, "after.", 6)) continue;
            test_expect(b && b->dims == a->dims && b->shape[0] == a->shape[0] &&
                            (a->dims < 2 || b->shape[1] == a->shape[1]) &&
                            test_distance(b->x, a->x, a->count) <= 1e-12,
                        "%s of rank %lld is another, or not there", a->name, (long long)r);
        }
    books_free(&want);
    test_end("run_step_without_parameters");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    if (system("rm -rf " FOLDER)) return 1;
    mkdir(FOLDER, 0777);
    TEST(test_tokens());
    TEST(test_attention());
    TEST(test_merge());
    TEST(test_losses());
    TEST(test_simpo());
    TEST(test_advantages());
    TEST(test_step());
    TEST(test_split());
    TEST(test_gather());
    TEST(test_pack());
    TEST(test_questions());
    TEST(test_slope());
    TEST(test_mistakes());
    TEST(test_usage());
    TEST(test_missing());
    TEST(test_numbers());
    TEST(test_states());
    TEST(test_files());
    TEST(test_json());
    TEST(test_half());
    TEST(test_types());
    TEST(test_large_labels());
    TEST(test_notes());
    TEST(test_file_names());
    TEST(test_shapes());
    TEST(test_bare_step());
    books_free(&made);
    books_free(&got);
    return test_summary();
}
