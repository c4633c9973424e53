/* SPDX-License-Identifier: MIT OR Unlicense */
/* attention.h - checks a layer's attention: out, lse, dq, dk and dv of all ranks are compared
 * with values recomputed from q, k, v and dout.
 *
 * Work is bounded: if all heads are too much, some kv heads are checked; if one kv head is too
 * much, some of its queries. Limits and mistakes are tried on smaller samples. */
#ifndef ORACLE_ATTENTION_H
#define ORACLE_ATTENTION_H
#include "attention_ways.h"
#include "attention_where.h"
#include "oracle/verdict/stages.h"

/* Budgets in multiplications (1e10 take some seconds): to compare the whole dump, and the least
   for one micro-batch; for the sample of limits and mistakes; for one mistake. */
#ifndef ATTENTION_ALL
#define ATTENTION_ALL 80e9
#endif
#ifndef ATTENTION_ROOM
#define ATTENTION_ROOM 1e9
#endif
#ifndef ATTENTION_PART
#define ATTENTION_PART 1e9
#endif
#ifndef ATTENTION_WAY
#define ATTENTION_WAY 12e9
#endif
/* Most elements: of a loaded tensor; of one head's k and v (a longer text is not recomputed);
   of one read from a file. */
#ifndef ATTENTION_ELEMENTS
#define ATTENTION_ELEMENTS (1 << 23)
#endif
#ifndef ATTENTION_KEYS
#define ATTENTION_KEYS (1 << 25)
#endif
#ifndef ATTENTION_CHUNK
#define ATTENTION_CHUNK (1 << 16)
#endif

/* Inputs, then the tensors to check. Shape (n, heads, dim); lse (n, heads). */
enum { ATTENTION_NAMES = ATTEND_INPUTS + ATTEND_TENSORS };
static const struct {
    const char *name;
    int of_keys, of_out; /* 1: heads as in k, else as in q; 1: dim as in v, else as in q */
} attention_tensors[ATTENTION_NAMES] = {{"q", 0, 0},    {"k", 1, 0},   {"v", 1, 1},
                                        {"dout", 0, 1}, {"out", 0, 1}, {"lse", 0, 0},
                                        {"dq", 0, 0},   {"dk", 1, 0},  {"dv", 1, 1}};
enum { ATTENTION_LSE = ATTEND_INPUTS + ATTEND_LSE };

typedef struct attention_shape {
    int have;
    int64_t heads, dim;
} attention_shape;

typedef struct attention {
    dump *d;
    const dump_row *row;
    int64_t dp, micro;
    attention_shape shape[ATTENTION_NAMES];
    attend whole, rows, keys;        /* whole: compared; rows: some queries; keys: a kv head */
    const attend *of_rows, *of_keys; /* &rows, &keys, or &whole if small; NULL: no sample */
    attend_case right;               /* the right answer for whole */
    attend_kernel kernel[LIMIT_LEVELS];
    int levels;
    attend_limits limits[LIMIT_LEVELS];
    int cast[ATTEND_TENSORS]; /* significant bits, if fewer than allowed; else 0 */
    attend_distance distance[ATTEND_TENSORS];
    attend_matches fits;
    int few_bits[ATTEND_TENSORS]; /* bits of a cast or of rounded partial results; 0: neither */
    int explained[ATTEND_TENSORS]; /* VERDICT_WRONG or _MARGINAL once explained; else 0 */
    int named[ATTEND_TENSORS][MISTAKES];
    int follows[ATTEND_TENSORS]; /* a gradient is right for the out that was dumped */
    double room;                 /* multiplications for this micro-batch */
    int sampled_rows;
    int left_out; /* mistakes that take too long to be tried */
    verdict *v;
} attention;

/* ---- shapes ---- */

static inline int64_t attention_held(const attention *a, int64_t rank) {
    return dump_find(a->d, rank, a->micro, "index")->count;
}

static inline void attention_shape_text(char *text, size_t size,
                                        const seqpar_safetensors_tensor *t) {
    size_t used = (size_t)snprintf(text, size, "(");
    for (int64_t i = 0; i < t->dims && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%lld", i ? ", " : "",
                                 (long long)t->shape[i]);
    if (used < size) snprintf(text + used, size - used, ")");
}

static inline int attention_refuse(attention *a, int64_t rank, int what, const char *text) {
    seqpar_fail(&a->d->error, SEQPAR_ERR_FILE_FORMAT, "%.300s: tensor %lld.%s %s",
                a->d->ranks[rank].path, (long long)a->micro, attention_tensors[what].name,
                text);
    return -1;
}

/* Checks a tensor's shape against its rank's tokens and the other ranks. 0, or -1 with the
   error. */
static inline int attention_check(attention *a, int64_t rank, int what,
                                  const seqpar_safetensors_tensor *t) {
    attention_shape *s = &a->shape[what];
    int64_t wants = what == ATTENTION_LSE ? 2 : 3, lead = t->dims - wants;
    int64_t n = attention_held(a, rank), ones = lead >= 0;
    char shape[120], text[360];
    for (int64_t i = 0; i < lead; i++) ones = ones && t->shape[i] == 1;
    attention_shape_text(shape, sizeof shape, t);
    if (!ones || t->shape[lead] != n || !t->count) {
        snprintf(text, sizeof text,
                 "is %s; write (%lld, heads%s), one row a token that the "
                 "rank holds",
                 shape, (long long)n, wants == 3 ? ", head_dim" : "");
        return attention_refuse(a, rank, what, text);
    }
    if (!s->have) {
        s->heads = t->shape[lead + 1];
        s->dim = wants == 3 ? t->shape[lead + 2] : 1;
    }
    s->have = 1;
    if (s->heads == t->shape[lead + 1] && (wants == 2 || s->dim == t->shape[lead + 2]))
        return 0;
    snprintf(text, sizeof text,
             "is %s, and that of another rank has %lld heads with head_dim %lld; write all "
             "heads on every rank",
             shape, (long long)s->heads, (long long)s->dim);
    return attention_refuse(a, rank, what, text);
}

/* Checks that all ranks that hold a token have the tensor, or none. 0, or -1 with the error. */
static inline int attention_find(attention *a, int what) {
    int64_t first = a->dp * a->d->sp, lacks = -1;
    for (int64_t r = first; r < first + a->d->sp; r++) {
        const seqpar_safetensors_tensor *t = dump_find(a->d, r, a->micro,
                                                       attention_tensors[what].name);
        if (!attention_held(a, r)) continue;
        if (!t) lacks = r;
        if (t && attention_check(a, r, what, t)) return -1;
    }
    return lacks >= 0 && a->shape[what].have
               ? attention_refuse(a, lacks, what,
                                  "is missing, and another rank has it; write it on every "
                                  "rank that holds a token")
               : 0;
}

/* Checks that tensors agree in heads and head_dim. 0, or -1 with the error. */
static inline int attention_agree(attention *a) {
    const attention_shape *s = a->shape;
    char text[360];
    for (int i = 0; i < ATTENTION_NAMES; i++) {
        int64_t heads = s[attention_tensors[i].of_keys ? ATTEND_K : ATTEND_Q].heads;
        int64_t dim = s[attention_tensors[i].of_out ? ATTEND_V : ATTEND_Q].dim;
        if (!s[i].have || i == ATTEND_Q) continue;
        if (i != ATTEND_K && s[i].heads != heads)
            snprintf(text, sizeof text,
                     "has %lld heads, but %s has %lld; write both with the "
                     "same number of heads",
                     (long long)s[i].heads, attention_tensors[i].of_keys ? "k" : "q",
                     (long long)heads);
        else if (i != ATTEND_V && i != ATTENTION_LSE && s[i].dim != dim)
            snprintf(text, sizeof text,
                     "has a head_dim of %lld, but %s has %lld; write both "
                     "with the same head_dim",
                     (long long)s[i].dim, attention_tensors[i].of_out ? "v" : "q",
                     (long long)dim);
        else if (s[ATTEND_Q].heads % s[ATTEND_K].heads)
            snprintf(text, sizeof text,
                     "has %lld heads, which do not divide the %lld heads of q; write the kv "
                     "heads of all ranks",
                     (long long)s[ATTEND_K].heads, (long long)s[ATTEND_Q].heads);
        else
            continue;
        return attention_refuse(a, a->dp * a->d->sp, i, text);
    }
    return 0;
}

/* 1: q, k, v and out are there; 0: not all; -1 with the error. */
static inline int attention_shapes(attention *a) {
    for (int64_t r = a->dp * a->d->sp; r < (a->dp + 1) * a->d->sp; r++)
        if (!dump_find(a->d, r, a->micro, "index")) return 0;
    for (int i = 0; i < ATTENTION_NAMES; i++)
        if (attention_find(a, i)) return -1;
    for (int i = 0; i < ATTEND_DOUT; i++)
        if (!a->shape[i].have) return 0;
    return a->shape[ATTEND_INPUTS + ATTEND_OUT].have ? attention_agree(a) ? -1 : 1 : 0;
}

static inline int attention_has_gradients(const attention *a) {
    const attention_shape *s = a->shape + ATTEND_INPUTS;
    return a->shape[ATTEND_DOUT].have &&
           (s[ATTEND_DQ].have || s[ATTEND_DK].have || s[ATTEND_DV].have);
}

/* ---- loading ---- */

static inline int attention_no_memory(attention *a) {
    seqpar_fail(&a->d->error, SEQPAR_ERR_MEMORY, "no memory for attention");
    return -1;
}

/* Reads as many of one rank's rows as fit in a chunk, from side->token[from] on, and copies p's
   heads of them to `to`. Returns the number of rows, or -1 with the error. */
static inline int64_t attention_read_chunk(attention *a, const attend *p, int what,
                                           const attend_side *side, int64_t from, double *chunk,
                                           double *to) {
    const dump_row *row = a->row;
    const attention_shape *s = &a->shape[what];
    int64_t rank = row->rank[side->token[from]], first = row->local[side->token[from]];
    int64_t per = attention_tensors[what].of_keys ? 1 : p->group, size = s->heads * s->dim;
    int64_t most = ATTENTION_CHUNK / size + 1, n = 0, last = first;
    seqpar_safetensors_part part = {.first = first * size};
    for (; from + n < side->count && row->rank[side->token[from + n]] == rank; n++) {
        int64_t local = row->local[side->token[from + n]];
        if (local - first >= most) break;
        last = local;
    }
    part.count = (last + 1 - first) * size;
    part.name = dump_find(a->d, rank, a->micro, attention_tensors[what].name)->name;
    if (seqpar_safetensors_read_f64(a->d->ranks[rank].file, chunk, &part, &a->d->error))
        return -1;
    for (int64_t i = 0; i < n; i++)
        for (int64_t h = 0; h < p->kv_heads; h++) {
            int64_t at = row->local[side->token[from + i]] - first;
            memcpy(to + ((from + i) * p->kv_heads + h) * per * s->dim,
                   chunk + at * size + p->kv_head[h] * per * s->dim,
                   (size_t)(per * s->dim) * sizeof *to);
        }
    return n;
}

/* One tensor's rows and heads that p selects: (side, heads, dim). NULL with the error. */
static inline double *attention_read(attention *a, const attend *p, int what) {
    const attend_side *side = attention_tensors[what].of_keys ? &p->key : &p->query;
    const attention_shape *s = &a->shape[what];
    int64_t per = attention_tensors[what].of_keys ? 1 : p->group;
    double *to = attend_zeros(side->count * p->kv_heads * per * s->dim);
    double *chunk = attend_zeros(ATTENTION_CHUNK + s->heads * s->dim);
    int64_t from = 0;
    if (!to || !chunk) attention_no_memory(a);
    while (!a->d->error.status && from < side->count)
        from += attention_read_chunk(a, p, what, side, from, chunk, to);
    free(chunk);
    if (!a->d->error.status) return to;
    free(to);
    return NULL;
}

static inline void attention_free(attend *p) {
    free(p->held);
    free(p->kv_head);
    free(p->query.token);
    free(p->query.block);
    free(p->key.token);
    free(p->key.block);
    for (int t = 0; t < ATTEND_INPUTS; t++) free(p->in[t]);
    for (int t = 0; t < ATTEND_TENSORS; t++) free(p->got[t]);
    memset(p, 0, sizeof *p);
}

/* Lists tokens in the order of ranks and their rows, in blocks of at most `most`. A block lies
   in one half of one rank's rows, as masks select halves. chosen: (tokens) 1: listed; NULL: all
   are. */
static inline int attention_side(const attend *p, attend_side *side, int64_t most,
                                 const unsigned char *chosen) {
    const dump_row *row = p->row;
    int64_t slots = 0, n = 0, *token, *begin;
    for (int64_t r = 0; r < p->ranks; r++) slots += p->held[r];
    token = (int64_t *)malloc((size_t)(slots + 1) * sizeof *token);
    begin = (int64_t *)calloc((size_t)p->ranks + 1, sizeof *begin);
    side->token = token;
    side->block = (attend_block *)calloc((size_t)slots + 1, sizeof *side->block);
    for (int64_t r = 0; begin && r < p->ranks; r++) begin[r + 1] = begin[r] + p->held[r];
    for (int64_t i = 0; token && i < slots; i++) token[i] = -1;
    for (int64_t t = 0; token && begin && t < p->end; t++)
        if (!chosen || chosen[t])
            token[begin[row->rank[t] - p->first_rank] + row->local[t]] = t;
    for (int64_t i = 0; token && i < slots; i++)
        if (token[i] >= 0) token[n++] = token[i];
    side->count = n;
    free(begin);
    if (!begin || !token || !side->block) return -1;
    for (int64_t i = 0; i < n; i++) {
        int64_t rank = row->rank[token[i]] - p->first_rank;
        int64_t half = 2 * row->local[token[i]] >= p->held[rank];
        attend_block *b = &side->block[side->blocks - 1];
        if (!i || b->rank != rank || b->half != half || b->count == most)
            *(b = &side->block[side->blocks++]) = (attend_block){i, 0, rank, half};
        b->count++;
    }
    return 0;
}

static inline int attention_fill(attention *a, attend *p) {
    for (int i = 0; i < ATTENTION_NAMES; i++) {
        int judged = i >= ATTEND_INPUTS, t = judged ? i - ATTEND_INPUTS : i;
        double **to = judged ? &p->got[t] : &p->in[t];
        if (!a->shape[i].have || (i == ATTEND_DOUT && !p->backward)) continue;
        if (judged && !attend_shows(p, t)) continue;
        if (!(*to = attention_read(a, p, i))) return -1;
    }
    return 0;
}

/* Describes a sample without reading it: kv_heads heads, evenly spaced from `first` on, and the
   chosen queries (NULL: all). 0, or -1 with the error. */
static inline int attention_place_part(attention *a, attend *p, int64_t first, int64_t kv_heads,
                                       const unsigned char *chosen) {
    const attention_shape *s = a->shape;
    int status;
    memset(p, 0, sizeof *p);
    p->row = a->row;
    p->end = row_end(a->row);
    p->ranks = a->d->sp;
    p->first_rank = a->dp * p->ranks;
    p->kv_heads = kv_heads;
    p->all_heads = kv_heads == s[ATTEND_K].heads;
    p->group = s[ATTEND_Q].heads / s[ATTEND_K].heads;
    p->heads = kv_heads * p->group;
    p->dim = s[ATTEND_Q].dim;
    p->out_dim = s[ATTEND_V].dim;
    p->scale = a->d->facts.softmax_scale > 0 ? a->d->facts.softmax_scale
                                             : 1 / sqrt((double)p->dim);
    p->softcap = a->d->facts.softcap;
    p->window = a->d->facts.window;
    p->backward = attention_has_gradients(a);
    p->held = (int64_t *)calloc((size_t)p->ranks, sizeof *p->held);
    p->kv_head = (int64_t *)calloc((size_t)kv_heads, sizeof *p->kv_head);
    if (!p->held || !p->kv_head) return attention_no_memory(a);
    for (int64_t r = 0; r < p->ranks; r++) p->held[r] = attention_held(a, p->first_rank + r);
    for (int64_t h = 0; h < kv_heads; h++)
        p->kv_head[h] = (first + h * s[ATTEND_K].heads / kv_heads) % s[ATTEND_K].heads;
    status = attention_side(p, &p->query, ATTEND_QUERIES, chosen) |
             attention_side(p, &p->key, ATTEND_KEYS, NULL);
    return status ? attention_no_memory(a) : 0;
}

static inline int attention_load(attention *a, attend *p, int64_t first, int64_t kv_heads,
                                 const unsigned char *chosen) {
    return attention_place_part(a, p, first, kv_heads, chosen) || attention_fill(a, p) ? -1 : 0;
}

/* ---- sample sizes ---- */

/* Multiplications for all pairs of query and key of one kv head. *queries: their number. */
static inline double attention_cost(const attention *a, int64_t *queries) {
    attend p = {.row = a->row, .end = row_end(a->row)};
    const attention_shape *s = a->shape;
    double pairs = 0;
    int backward = attention_has_gradients(a);
    for (int64_t t = 0; t < p.end; t++) {
        int64_t begin, end;
        attend_document(&p, t, &begin, &end);
        if (a->d->facts.window && t - begin >= a->d->facts.window)
            begin = t + 1 - a->d->facts.window;
        pairs += (double)(t + 1 - begin);
    }
    *queries = p.end;
    return pairs * (double)(s[ATTEND_Q].heads / s[ATTEND_K].heads) *
           (double)(s[ATTEND_Q].dim + s[ATTEND_V].dim + ATTEND_EXP) * (backward ? 3.5 : 1);
}

/* Chooses one random query in each of n equal ranges, and the first tokens of up to 8
   documents, to include queries that see few keys. */
static inline unsigned char *attention_choose(const attention *a, int64_t n) {
    int64_t end = row_end(a->row), docs = a->row->docs > 0 ? a->row->docs : 1;
    unsigned char *chosen = (unsigned char *)calloc((size_t)end + 1, 1);
    uint64_t state = 1;
    for (int64_t i = 0; chosen && i < n; i++) {
        double at = ((double)i + (double)(attend_random(&state) >> 11) * 0x1p-53) / (double)n;
        chosen[(int64_t)(at * (double)end)] = 1;
    }
    for (int64_t i = 0; chosen && i < 8; i++) {
        int64_t begin = a->row->docs ? a->row->cu_seqlens[i * docs / 8] : 0;
        for (int64_t t = begin; t < begin + 4 && t < end; t++) chosen[t] = 1;
    }
    return chosen;
}

static inline int64_t attention_between(double x, double low, double high) {
    return (int64_t)(x < low ? low : x > high ? high : x);
}

/* Loads the heads and queries to compare with the dump: all, or what the budget allows. */
static inline int attention_load_whole(attention *a) {
    int64_t kv_heads = a->shape[ATTEND_K].heads, queries, most;
    double one = attention_cost(a, &queries);
    double wide = (double)(queries * (a->shape[ATTEND_Q].heads / kv_heads)) *
                  (double)(a->shape[ATTEND_Q].dim + a->shape[ATTEND_V].dim) / 2;
    unsigned char *chosen = NULL;
    int status;
    a->room = fmax(ATTENTION_ROOM, ATTENTION_ALL / (double)(a->d->world / a->d->sp) /
                                       (double)a->d->accumulation);
    most = attention_between(fmin(a->room / one, ATTENTION_ELEMENTS / wide), 0,
                             (double)kv_heads);
    a->sampled_rows = most < 1;
    if (most < 1) {
        double n = fmin(a->room, ATTENTION_WAY) / (fmax(one, wide) / (double)queries);
        chosen = attention_choose(a, attention_between(n, 16, (double)queries));
        if (!chosen) return attention_no_memory(a);
        most = 1;
    }
    status = attention_load(a, &a->whole, 0, most, chosen);
    free(chosen);
    return status;
}

/* Loads the samples for limits and mistakes: some queries of as many heads as fit, and all
   queries of one kv head, which dk and dv need. tokens: (n) queries to include. */
static inline int attention_load_parts(attention *a, const int64_t *tokens, int n,
                                       int64_t kv_head) {
    int64_t kv_heads = a->shape[ATTEND_K].heads, queries, most;
    double one = attention_cost(a, &queries), part = fmin(ATTENTION_PART, a->room / 8);
    double wide = (double)queries * (double)(a->shape[ATTEND_Q].dim + a->shape[ATTEND_V].dim);
    int all = a->whole.kv_heads == kv_heads && !a->sampled_rows;
    unsigned char *chosen;
    int status;
    a->of_rows = a->of_keys = &a->whole;
    if (all && one * (double)kv_heads <= part) return 0;
    most = attention_between(ATTENTION_ELEMENTS / wide, 1, (double)kv_heads);
    part /= (wide + (double)queries * ATTEND_EXP) * 3 * (double)(most * a->whole.group);
    chosen = attention_choose(a, attention_between(part, 32, (double)queries));
    for (int i = 0; chosen && i < n; i++) chosen[tokens[i]] = 1;
    attention_free(&a->rows);
    attention_free(&a->keys);
    status = chosen ? attention_load(a, &a->rows, most < kv_heads ? kv_head : 0, most, chosen)
                    : attention_no_memory(a);
    free(chosen);
    a->of_rows = &a->rows;
    a->of_keys = NULL;
    if (status || a->sampled_rows) return status;
    a->of_keys = &a->keys;
    return attention_load(a, &a->keys, kv_head, 1, NULL);
}

/* ---- the limits ---- */

static inline int attention_bits_of(const double *x, int64_t n) {
    int bits = 0;
    for (int64_t i = 0; x && i < n && bits < 53; i++)
        if (x[i] != 0 && bits_needed(x[i]) > bits) bits = bits_needed(x[i]);
    return bits; /* 0: all are 0 */
}

/* Significant bits of the type in which the dump stores a tensor. */
static inline int attention_bits_stored(const attention *a, int what) {
    int64_t rank = a->dp * a->d->sp;
    while (!attention_held(a, rank)) rank++;
    switch (dump_find(a->d, rank, a->micro, attention_tensors[what].name)->dtype) {
    case SEQPAR_SAFETENSORS_BF16: return 8;
    case SEQPAR_SAFETENSORS_F16: return 11;
    case SEQPAR_SAFETENSORS_F64: return 53;
    default: return 24;
    }
}

/* Significant bits that the kernel computes in: those of metadata dtype, or of the values of q,
   k and v if these have fewer, as a dump in F32 may hold BF16. Without dtype, out may have
   fewer still: a kernel may round F32 inputs first. */
static inline int attention_bits_computed(const attention *a, const attend_kernel *k) {
    static const int said[] = {53, 53, 24, 11, 11, 8}; /* by DUMP_... of metadata.h */
    int bits = 0, own = k->own_bits[ATTEND_OUT], stated = said[a->d->facts.dtype];
    for (int t = 0; t < ATTEND_DOUT; t++) bits = k->in_bits[t] > bits ? k->in_bits[t] : bits;
    if (!bits) bits = 8;
    if (a->d->facts.dtype == DUMP_F64 && own == 53) return own;
    if (stated < bits) return stated;
    return own && own < bits && bits >= 24 && !a->d->facts.dtype ? own : bits;
}

/* Significant bits that a tensor may be rounded to: the least of the kernel's type, its input's
   values and, if that input is stored in F32 or F64, the tensor's stored type. */
static inline int attention_bits_allowed(const attention *a, const attend_kernel *k, int t) {
    static const int inputs[ATTEND_TENSORS] = {ATTEND_V, ATTEND_Q, ATTEND_Q, ATTEND_K,
                                               ATTEND_V};
    int bits = k->bits, like = k->in_bits[inputs[t]];
    int stored = attention_bits_stored(a, ATTEND_INPUTS + t);
    if (a->d->facts.dtype == DUMP_TF32) bits = 24;
    if (like && like < bits) bits = like;
    return stored < bits && attention_bits_stored(a, inputs[t]) >= 24 ? stored : bits;
}

static inline void attention_kernels(attention *a) {
    static const int like[ATTEND_INPUTS] = {ATTEND_DQ, ATTEND_DK, ATTEND_DV, ATTEND_OUT};
    attend_kernel *k = a->kernel;
    const attend *p = &a->whole;
    for (int t = 0; t < ATTEND_INPUTS; t++)
        k->in_bits[t] = attention_bits_of(p->in[t],
                                          attend_rows(p, like[t]) * attend_width(p, like[t]));
    for (int t = 0; t < ATTEND_TENSORS; t++)
        k->own_bits[t] = attention_bits_of(p->got[t], attend_rows(p, t) * attend_width(p, t));
    k->bits = attention_bits_computed(a, k);
    for (int t = 0; t < ATTEND_TENSORS; t++) {
        int own = k->own_bits[t];
        k->bits_of[t] = own ? own : k->bits;
        if (!own || t == ATTEND_LSE || own >= attention_bits_allowed(a, k, t)) continue;
        k->bits_of[t] = attention_bits_allowed(a, k, t);
        a->cast[t] = own;
    }
    k->half_range = k->bits == 11 && a->d->facts.dtype != DUMP_TF32;
    for (int i = 1; i < LIMIT_LEVELS; i++) k[i] = *k;
    a->levels = k->bits == 53 ? 1 : k->bits == 24 ? 3 : 2;
    if (k->bits < 24) k[1].scores = 1;
    k[1].bits = k->bits == 24 ? 11 : k->bits;
    k[2].bits = 8;
}

static inline const char *attention_type(int bits) {
    return bits == 8 ? "BF16" : bits == 11 ? "F16" : bits == 24 ? "F32" : "F64";
}

static inline int attention_limit(attention *a, const attend_kernel *kernel,
                                  attend_limits *limits) {
    attend_case c;
    attend_way w;
    int only = a->of_keys == a->of_rows ? -1 : 0;
    int status = attend_case_begin(&c, a->of_rows, -1);
    w = attend_right_way(a->of_rows);
    if (!status) status = attend_limit(a->of_rows, &w, &c.right, kernel, 0, limits);
    attend_case_end(&c);
    if (status || !a->of_keys || only || !a->of_keys->backward) return status;
    status = attend_case_begin(&c, a->of_keys, only);
    w.only_head = only;
    if (!status) status = attend_limit(a->of_keys, &w, &c.right, kernel, ATTEND_DK, limits);
    attend_case_end(&c);
    return status;
}

static inline int attention_is_wrong(const attention *a, int t) {
    return a->whole.got[t] &&
           (a->few_bits[t] || !(attention_times(&a->distance[t], &a->limits[0], t) <= 1));
}

/* Whether mistake m explains tensor t. Rows get twice the limit, as the size of a mistake's
   terms is only estimated. The mistake must also be clearly nearer than the right answer. */
static inline int attention_matches(const attention *a, int t, int m,
                                    const attend_limits *limits) {
    const attend_distance *distance = &a->fits.of[t][m].distance;
    const attend_distance *right = &a->fits.right[t];
    if (!(distance->all <= limits->all[t] && distance->row <= 2 * limits->row[t])) return 0;
    return distance->all <= 0.5 * right->all || distance->row <= 0.25 * right->row;
}

/* ---- numbers of too few bits ---- */

enum { PART_OF_NONE = -1, PART_OF_SEVERAL = -2, COARSE_NUMBERS = 16 };

/* For each token: the only rank that contributes to its row of tensor t, or PART_OF_... */
static inline int64_t *attention_parts(const attention *a, int t) {
    const attend *p = &a->whole;
    attend_way w = attend_right_way(p);
    int64_t *part = (int64_t *)malloc((size_t)(p->end + 1) * sizeof *part);
    for (int64_t i = 0; part && i < p->end; i++) part[i] = PART_OF_NONE;
    for (int64_t i = 0; part && i < p->query.count; i++) {
        int64_t token = p->query.token[i];
        attend_sight s = attend_sight_of(p, &w, token);
        for (int64_t u = s.lo; u < s.hi; u++) {
            int64_t *own = &part[t < ATTEND_DK ? token : u];
            int64_t rank = a->row->rank[t < ATTEND_DK ? u : token];
            if (*own != rank) *own = *own == PART_OF_NONE ? rank : PART_OF_SEVERAL;
        }
    }
    return part;
}

static inline int attention_bits_rounded(double x, int bits) {
    attend_cut nearest = {UINT64_C(1) << (52 - bits), ~((UINT64_C(1) << (53 - bits)) - 1), 0};
    return bits < 53 ? bits_needed(attend_cut_sum(x, nearest)) : bits_needed(x);
}

/* Whether all numbers fit in `bits` bits, while COARSE_NUMBERS of the right ones do not. By
   chance 1 of 8 F16 numbers fits in 8 bits, 1 of 2^13 F32 numbers in 11. part: only tokens with
   one contributing rank; NULL: all. Small numbers are skipped: F16 keeps fewer bits of them. */
static inline int attention_has_few_bits(const attention *a, int t, int bits,
                                         const int64_t *part) {
    const attend *p = &a->whole;
    const attend_side *side = t < ATTEND_DK ? &p->query : &p->key;
    int64_t wide = attend_rows(p, t) * attend_width(p, t) / side->count, found = 0;
    const double *right = a->right.right.x[t];
    for (int64_t i = 0; i < side->count * wide; i++) {
        double x = p->got[t][i];
        if ((part && part[side->token[i / wide]] < 0) || fabs(right[i]) < 0x1p-11) continue;
        if (bits_needed(x) > bits) return 0;
        found += attention_bits_rounded(right[i], a->kernel[0].bits_of[t]) > bits;
    }
    return found >= COARSE_NUMBERS;
}

/* Quick test before attention_parts: a tensor in F32 hardly has numbers of 11 bits or less. */
static inline int attention_has_coarse(const attention *a, int t) {
    int64_t n = attend_rows(&a->whole, t) * attend_width(&a->whole, t), found = 0;
    for (int64_t i = 0; i < n && found < COARSE_NUMBERS; i++) {
        double x = a->whole.got[t][i];
        found += x != 0 && bits_needed(x) <= 11;
    }
    return found == COARSE_NUMBERS;
}

/* A cast shows in all numbers of a tensor, rounded partial results in rows made in one hop. */
static inline void attention_find_coarse(attention *a, int t) {
    static const int types[] = {8, 11};
    int64_t *part;
    if (t == ATTEND_LSE) return;
    if (a->cast[t]) {
        if (attention_has_few_bits(a, t, a->cast[t], NULL)) a->few_bits[t] = a->cast[t];
        return;
    }
    if (a->d->sp == 1 || !attention_has_coarse(a, t)) return;
    part = attention_parts(a, t);
    for (int i = 0; part && i < 2 && !a->few_bits[t]; i++)
        if (types[i] < a->kernel[0].bits && types[i] < a->kernel[0].own_bits[t] &&
            attention_has_few_bits(a, t, types[i], part))
            a->few_bits[t] = types[i];
    free(part);
}

/* ---- evidence ---- */

static inline const char *attention_name(int t) {
    return attention_tensors[ATTEND_INPUTS + t].name;
}

/* The row of a tensor that is beyond the limit and first in the text; -1: none is. */
static inline int64_t attention_first(const attention *a, int t) {
    const attend *p = &a->whole;
    const attend_side *side = t < ATTEND_DK ? &p->query : &p->key;
    int64_t n = attend_width(p, t), heads = attend_rows(p, t) / side->count, first = -1;
    for (int64_t i = 0; i < attend_rows(p, t); i++) {
        double size,
            distance = attend_squares(p->got[t] + i * n, a->right.right.x[t] + i * n, n, &size);
        if (sqrt(distance) <= a->limits[0].row[t] * a->right.right.scale[t][i]) continue;
        if (first < 0 || side->token[i / heads] < side->token[first / heads]) first = i;
    }
    return first;
}

/* "rank 1, local row 3, token 14, document 0, head 2" */
static inline void attention_place(const attention *a, int t, int64_t row, char *text,
                                   size_t size) {
    const attend *p = &a->whole;
    const attend_side *side = t < ATTEND_DK ? &p->query : &p->key;
    int64_t heads = attend_rows(p, t) / side->count, per = t < ATTEND_DK ? p->group : 1;
    int64_t head = row % heads;
    size_t used;
    place_text(text, size, a->row, side->token[row / heads]);
    used = strlen(text);
    snprintf(text + used, size - used, ", head %lld",
             (long long)(p->kv_head[head / per] * per + head % per));
}

/* Says the distance of tensor t and, if it is wrong, its first wrong row and its worst row. */
static inline void attention_say_tensor(attention *a, int t) {
    int64_t n = attend_width(&a->whole, t), most = 0, row;
    const double *got, *want;
    char first[200], worst[200], where[320] = "";
    if (attention_is_wrong(a, t)) {
        row = attention_first(a, t);
        if (row < 0) row = a->distance[t].worst;
        got = a->whole.got[t] + row * n;
        want = a->right.right.x[t] + row * n;
        for (int64_t i = 1; i < n && isfinite(got[most]); i++)
            if (!(fabs(got[i] - want[i]) <= fabs(got[most] - want[most]))) most = i;
        attention_place(a, t, row, first, sizeof first);
        attention_place(a, t, a->distance[t].worst, worst, sizeof worst);
        snprintf(where, sizeof where,
                 "; first at %s: element %lld is %.9g, right %.9g; most at %s", first,
                 (long long)most, got[most], want[most], worst);
    }
    verdict_say(a->v,
                "%s is %.3g away (L2; limit %.3g), its worst row %.3g of its terms' size "
                "(limit %.3g)%s",
                attention_name(t), a->distance[t].all, a->limits[0].all[t], a->distance[t].row,
                a->limits[0].row[t], where);
}

static inline void attention_say_looked(attention *a) {
    const attend *p = &a->whole;
    const attend_kernel *k = a->kernel;
    verdict_say(a->v,
                "micro-batch %lld of replica %lld: %lld tokens, %lld heads, %lld kv heads; "
                "limits are %d times what rounding to %s makes of these numbers, the worst of "
                "%d seeds",
                (long long)a->micro, (long long)a->dp, (long long)p->end,
                (long long)a->shape[ATTEND_Q].heads, (long long)a->shape[ATTEND_K].heads,
                LIMIT_TIMES, attention_type(k->bits), LIMIT_SEEDS);
    if (p->kv_heads < a->shape[ATTEND_K].heads || a->sampled_rows)
        verdict_say(a->v,
                    "looked at: %lld kv heads with their queries' heads, %lld of %lld "
                    "queries%s",
                    (long long)p->kv_heads, (long long)p->query.count, (long long)p->end,
                    a->sampled_rows && p->backward
                        ? "; dk and dv not, which take all queries of a kv head: dump a "
                          "shorter text for them"
                        : "");
}

/* ---- right, or vacuous ---- */

/* Whether out is another without the exchange (bit 0), without documents (1) and without
   causality (2). -1 with d->error. */
static inline int attention_shows(attention *a) {
    attend_case c;
    int status = attend_case_begin(&c, a->of_rows, -1), differs = 0;
    unsigned char *sees = (unsigned char *)malloc((size_t)(2 * a->d->sp * a->d->sp));
    if (sees) attend_see_hops(a->of_rows, sees, 0, 0);
    for (int i = 0; !status && sees && i < 3; i++) {
        attend_way w = attend_right_way(a->of_rows);
        attend_distance distance;
        w.sight = i == 1 ? SEES_ANY_DOCUMENT : i == 2 ? SEES_AHEAD : 0;
        if (i == 0) w.sees = sees;
        if ((status = attend_forward(a->of_rows, &w, NULL, &c.x))) break;
        distance = attend_measure(a->of_rows, ATTEND_OUT, c.x.x[ATTEND_OUT],
                                  c.right.x[ATTEND_OUT], c.right.scale[ATTEND_OUT], 0);
        differs |= (attention_times(&distance, &a->limits[0], ATTEND_OUT) > 1) << i;
    }
    attend_case_end(&c);
    free(sees);
    return status || !sees ? attention_no_memory(a) : differs;
}

static inline int attention_is_zero(const double *x, int64_t n) {
    for (int64_t i = 0; x && i < n; i++)
        if (x[i] != 0) return 0;
    return x != NULL;
}

static inline int attention_finite(const attend *p) {
    static const int like[ATTEND_INPUTS] = {ATTEND_DQ, ATTEND_DK, ATTEND_DV, ATTEND_OUT};
    for (int t = 0; t < ATTEND_INPUTS; t++)
        for (int64_t i = 0; p->in[t] && i < attend_rows(p, like[t]) * attend_width(p, like[t]);
             i++)
            if (!isfinite(p->in[t][i])) return 0;
    return 1;
}

/* ---- wrong: which mistake ---- */

/* Marks gradients that follow from the dump's wrong out, or out and lse: the backward pass is
   right. */
static inline int attention_follow(attention *a, attend_case *c) {
    const attend *p = c->p;
    attend_way w = attend_right_way(p);
    for (int i = 0; i < 2; i++) {
        if (!p->backward || !attention_is_wrong(a, ATTEND_OUT) || (i && !p->got[ATTEND_LSE]))
            return 0;
        attend_answer_clear(&c->x, p, ATTEND_DQ);
        attend_delta(p, p->got[ATTEND_OUT], c->delta);
        if (attend_backward(p, &w, NULL, i ? p->got[ATTEND_LSE] : c->right.x[ATTEND_LSE],
                            c->delta, &c->x))
            return -1;
        for (int t = ATTEND_DQ; t < ATTEND_TENSORS; t++) {
            attend_distance distance;
            if (!c->open[t] || !c->x.x[t]) continue;
            distance = attend_measure(p, t, p->got[t], c->x.x[t], c->right.scale[t], 1);
            if (attention_times(&distance, &a->limits[0], t) <= 1) a->follows[t] = 1;
        }
    }
    return 0;
}

/* Whether an open (wrong) tensor is not explained by any mistake yet. */
static inline int attention_is_open(const attention *a, const attend_case *c) {
    for (int t = 0; t < ATTEND_TENSORS; t++) {
        int found = 0;
        for (int m = 0; m < MISTAKES && !found; m++)
            found = attention_matches(a, t, m, &a->limits[0]);
        if (c->open[t] && !found) return 1;
    }
    return 0;
}

/* The sample of a whole kv head takes long: there, first tries only the mistakes that match
   out, lse or dq on the sample of queries. */
static inline int attention_try_in_turn(attention *a, attend_case *c) {
    c->likely_alone = c->p == &a->keys;
    c->forward_is_right = c->likely_alone && a->whole.got[ATTEND_OUT] &&
                          !attention_is_wrong(a, ATTEND_OUT);
    if (c->likely_alone && attend_try_all(c)) return -1;
    if (c->likely_alone && !attention_is_open(a, c)) return 0;
    c->likely_alone = 0;
    return attend_try_all(c);
}

/* Tries all mistakes on one sample, for tensors in `of` (OF_...). 0, or -1 with the error. */
static inline int attention_try(attention *a, const attend *p, int of) {
    attend_case c;
    int status = attend_case_begin(&c, p, -1);
    c.fits = &a->fits;
    c.most = ATTENTION_WAY;
    for (int t = 0; !status && t < ATTEND_TENSORS; t++) {
        if (!(of & (1 << t)) || !p->got[t] || !attention_is_wrong(a, t)) continue;
        a->fits.right[t] = attend_measure(p, t, p->got[t], c.right.x[t], c.right.scale[t], 0);
        c.open[t] = attention_times(&a->fits.right[t], &a->limits[0], t) > 1;
    }
    if (!status && attend_open(&c, of)) status = attention_try_in_turn(a, &c);
    if (!status && attention_is_open(a, &c)) status = attention_follow(a, &c);
    a->left_out += c.left_out;
    attend_case_end(&c);
    return status ? attention_no_memory(a) : 0;
}

/* Notes which mistakes would show in these tensors of a right dump. 0, or -1 with the error. */
static inline int attention_note(attention *a, const attend *p, int of) {
    attend_case c;
    int status = attend_case_begin(&c, p, -1);
    c.fits = &a->fits;
    c.most = ATTENTION_WAY;
    c.right_verdict = a->v;
    for (int t = 0; t < ATTEND_TENSORS; t++) c.open[t] = of & (1 << t) && p->got[t];
    if (!status) status = attend_try_all(&c);
    attend_case_end(&c);
    return status ? attention_no_memory(a) : 0;
}

static inline void attention_clear_fits(attention *a) {
    a->fits.limits = a->limits[0];
    for (int t = 0; t < ATTEND_TENSORS; t++)
        for (int m = 0; m < MISTAKES; m++) a->fits.of[t][m].distance.all = INFINITY;
}

static inline int attention_note_mistakes(attention *a) {
    attention_clear_fits(a);
    if (a->of_keys == a->of_rows)
        return attention_note(a, a->of_rows, OF_FORWARD | OF_BACKWARD);
    if (attention_note(a, a->of_rows, OF_FORWARD | OF_DQ)) return -1;
    return a->of_keys ? attention_note(a, a->of_keys, OF_DK | OF_DV) : 0;
}

/* A moved row may come from anywhere, so it is searched in whole, not in a sample. */
static inline void attention_try_moved(attention *a) {
    attend_case c = a->right;
    c.fits = &a->fits;
    for (int t = 0; t < ATTEND_TENSORS; t++) {
        a->fits.right[t] = a->distance[t];
        if (attention_is_wrong(a, t) && t != ATTEND_LSE) attend_try_moved(&c, t);
    }
}

static inline int attention_try_mistakes(attention *a) {
    int64_t tokens[2 * ATTEND_DK], kv = 0;
    int n = 0;
    attention_clear_fits(a);
    for (int t = 0; t < ATTEND_TENSORS; t++) {
        int64_t first = attention_is_wrong(a, t) ? attention_first(a, t) : -1;
        int64_t per = t < ATTEND_DK ? a->whole.heads : a->whole.kv_heads;
        if (!attention_is_wrong(a, t)) continue;
        kv =
            a->whole.kv_head[a->distance[t].worst % per / (t < ATTEND_DK ? a->whole.group : 1)];
        if (t >= ATTEND_DK) continue;
        tokens[n++] = a->whole.query.token[a->distance[t].worst / per];
        if (first >= 0) tokens[n++] = a->whole.query.token[first / per];
    }
    attention_try_moved(a);
    if (attention_load_parts(a, tokens, n, kv)) return -1;
    if (a->of_keys == a->of_rows) return attention_try(a, a->of_rows, OF_FORWARD | OF_BACKWARD);
    if (attention_try(a, a->of_rows, OF_FORWARD | OF_DQ)) return -1;
    return a->of_keys ? attention_try(a, a->of_keys, OF_DK | OF_DV) : 0;
}

/* How many of a tensor's rows are beyond the limit. */
static inline int64_t attention_count_off(const attention *a, int t) {
    int64_t n = attend_width(&a->whole, t), count = 0;
    for (int64_t i = 0; i < attend_rows(&a->whole, t); i++) {
        const double *want = a->right.right.x[t] + i * n;
        double size, distance = attend_squares(a->whole.got[t] + i * n, want, n, &size);
        count += !(sqrt(distance) <= a->limits[0].row[t] * a->right.right.scale[t][i]);
    }
    return count;
}

/* Whether a level's lower precision explains the distance: it is within the level's limit and
   not far below. In F32, whose own limit is far smaller, most rows must exceed that, too. */
static inline int attention_is_coarse(const attention *a, int t, int level) {
    const attend_limits *limits = &a->limits[level];
    if (!(attention_times(&a->distance[t], limits, t) <= 1)) return 0;
    if (a->distance[t].all * LIMIT_RANGE < limits->all[t]) return 0;
    return a->kernel[0].bits < 24 || 2 * attention_count_off(a, t) > attend_rows(&a->whole, t);
}

/* Names the mistakes that explain each wrong tensor within one level's limits. If none does,
   the tensor may be marginal. */
static inline void attention_solve(attention *a, int level) {
    for (int t = 0; t < ATTEND_TENSORS; t++) {
        if (a->explained[t] || !attention_is_wrong(a, t)) continue;
        for (int m = 0; m < MISTAKES; m++) {
            a->named[t][m] = attention_matches(a, t, m, &a->limits[level]);
            a->explained[t] |= a->named[t][m];
        }
        if (a->explained[t]) continue; /* it is 1, VERDICT_WRONG */
        if (level
                ? attention_is_coarse(a, t, level)
                : !a->few_bits[t] && attention_times(&a->distance[t], &a->limits[0], t) <= 1.5)
            a->explained[t] = VERDICT_MARGINAL;
        if (a->explained[t] == VERDICT_MARGINAL && level)
            verdict_say(a->v, "%s is as far away as %s would make it (limit %.3g)",
                        attention_name(t),
                        a->kernel[0].bits < 24 ? "scores in that type, too,"
                        : level == 1           ? "products in TF32"
                                               : "products in BF16",
                        a->limits[level].all[t]);
    }
}

static inline int attention_is_unsolved(const attention *a) {
    for (int t = 0; t < ATTEND_TENSORS; t++)
        if (attention_is_wrong(a, t) && !a->explained[t]) return 1;
    return 0;
}

/* Names a rounding mistake if the tensor is within the limits of a kernel that makes it. */
static inline void attention_solve_rounding(attention *a, int t, const char *name,
                                            const attend_limits *limits) {
    int m = (int)(mistake_named(name) - mistakes);
    if (!attention_is_wrong(a, t) || a->explained[t]) return;
    if (!(attention_times(&a->distance[t], limits, t) <= 1)) return;
    a->explained[t] = VERDICT_WRONG;
    a->named[t][m] = 1;
    a->fits.of[t][m].distance = a->distance[t];
    snprintf(a->fits.of[t][m].form, sizeof a->fits.of[t][m].form, "limit of it %.3g",
             limits->all[t]);
}

/* Names a rounding mistake for those tensors with of[t] != 0 that are within the limits of
   `kernel`, which makes the mistake. */
static inline int attention_try_rounding(attention *a, const char *name, const int *of,
                                         const attend_kernel *kernel) {
    attend_limits limits = {{0}, {0}};
    int any = 0;
    for (int t = 0; t < ATTEND_TENSORS; t++) any |= of[t];
    if (!any) return 0;
    if (attention_limit(a, kernel, &limits)) return attention_no_memory(a);
    for (int t = 0; t < ATTEND_TENSORS; t++) {
        if (!of[t]) continue;
        attention_solve_rounding(a, t, name, &limits);
        if (a->explained[t] || !a->few_bits[t]) continue;
        a->limits[0].all[t] = limits.all[t]; /* to find another mistake within these */
        a->limits[0].row[t] = limits.row[t];
    }
    return 0;
}

/* Tries rounding mistakes, of tensors and of partial results, where numbers have few bits. */
static inline int attention_try_coarse(attention *a) {
    attend_kernel kernel = a->kernel[0];
    int of[ATTEND_TENSORS] = {0};
    for (int t = 0; t < ATTEND_TENSORS; t++) {
        if (!a->few_bits[t]) continue;
        verdict_say(a->v, "%s holds %s numbers alone%s, and the attention computes in %s",
                    attention_name(t), attention_type(a->few_bits[t]),
                    a->cast[t] ? "" : " where one rank's tokens make it",
                    attention_type(a->kernel[0].bits));
        if ((of[t] = a->cast[t])) kernel.bits_of[t] = a->few_bits[t];
    }
    if (attention_try_rounding(a, "cast_to_low_precision", of, &kernel)) return -1;
    for (int bits = 8; bits <= 11; bits += 3) {
        kernel = a->kernel[0];
        kernel.partials = bits;
        for (int t = 0; t < ATTEND_TENSORS; t++) of[t] = a->few_bits[t] == bits && !a->cast[t];
        if (attention_try_rounding(a, "partials_in_low_precision", of, &kernel)) return -1;
    }
    return 0;
}

/* Tries partial results that are rounded before the merge of hops. Not in F32, where products
   in TF32 or BF16 give a similar distance: there, only the bits of numbers are evidence. */
static inline int attention_try_partials(attention *a) {
    attend_kernel kernel = a->kernel[0];
    int of[ATTEND_TENSORS];
    if (kernel.bits >= 24 || a->d->sp == 1) return 0;
    kernel.partials = kernel.bits;
    for (int t = 0; t < ATTEND_TENSORS; t++)
        of[t] = attention_is_wrong(a, t) && !a->explained[t];
    return attention_try_rounding(a, "partials_in_low_precision", of, &kernel);
}

/* "hop_lost gives this out, lse (rank 2 lacks rank 0)" */
static inline void attention_say_mistake(attention *a, int m, const int *most, int count) {
    char text[160] = "", form[80] = "";
    for (int t = 0; t < ATTEND_TENSORS; t++) {
        const char *own = a->fits.of[t][m].form;
        size_t used = strlen(text);
        if (!a->named[t][m] || count < most[t]) continue;
        snprintf(text + used, sizeof text - used, "%s%s", used ? ", " : "", attention_name(t));
        if (*own && !*form) snprintf(form, sizeof form, " (%s)", own);
    }
    if (!*text) return;
    verdict_name(a->v, &mistakes[m]);
    verdict_say(a->v, "%s gives this %s%s", mistakes[m].name, text, form);
}

/* Of the mistakes that explain a tensor, names those that explain the most tensors. */
static inline void attention_name_mistakes(attention *a) {
    int most[ATTEND_TENSORS] = {0}, count[MISTAKES] = {0};
    for (int m = 0; m < MISTAKES; m++)
        for (int t = 0; t < ATTEND_TENSORS; t++) count[m] += a->named[t][m];
    for (int t = 0; t < ATTEND_TENSORS; t++)
        for (int m = 0; m < MISTAKES; m++)
            if (a->named[t][m] && count[m] > most[t]) most[t] = count[m];
    for (int m = 0; m < MISTAKES; m++) attention_say_mistake(a, m, most, count[m]);
}

/* "out, lse": the wrong tensors for which is() holds; NULL: none. */
static inline const char *attention_list(const attention *a, char *text, size_t size,
                                         int (*is)(const attention *a, int t)) {
    *text = 0;
    for (int t = 0; t < ATTEND_TENSORS; t++) {
        size_t used = strlen(text);
        if (attention_is_wrong(a, t) && is(a, t))
            snprintf(text + used, size - used, "%s%s", used ? ", " : "", attention_name(t));
    }
    return *text ? text : NULL;
}
static inline int attention_follows(const attention *a, int t) { return a->follows[t]; }
static inline int attention_is_unknown(const attention *a, int t) {
    return !a->explained[t] && !a->follows[t];
}
static inline int attention_is_elsewhere(const attention *a, int t) {
    return attention_is_unknown(a, t) &&
           attention_times(&a->fits.right[t], &a->limits[0], t) <= 1;
}

/* (rows) 1 where a row of the tensor is off; the caller frees it. NULL: no memory. */
static inline unsigned char *attention_off(const attention *a, int t) {
    const attend *p = &a->whole;
    int64_t n = attend_width(p, t), rows = attend_rows(p, t);
    unsigned char *off = (unsigned char *)calloc((size_t)rows + 1, 1);
    for (int64_t i = 0; off && i < rows; i++) {
        double size,
            distance = attend_squares(p->got[t] + i * n, a->right.right.x[t] + i * n, n, &size);
        off[i] = !(sqrt(distance) <= a->limits[0].row[t] * a->right.right.scale[t][i]);
    }
    return off;
}

/* Keeps which tokens have wrong rows, for the pictures of a report. Without memory there are
   none. */
static inline void attention_mark(attention *a, int t) {
    const attend *p = &a->whole;
    const attend_side *side = t >= ATTEND_DK ? &p->key : &p->query;
    int64_t heads = t >= ATTEND_DK ? p->kv_heads : p->heads, of_row = a->dp;
    dump *d = a->d;
    unsigned char *off = attention_off(a, t), **of;
    of_row = of_row * d->accumulation + a->micro;
    if (!d->attention_off)
        d->attention_off = (unsigned char **)calloc(
            (size_t)(d->world / d->sp * d->accumulation), sizeof *d->attention_off);
    of = d->attention_off ? &d->attention_off[of_row] : NULL;
    if (of && !*of) *of = (unsigned char *)calloc((size_t)a->row->tokens + 1, 1);
    for (int64_t i = 0; off && of && *of && i < side->count * heads; i++)
        if (off[i]) (*of)[side->token[i / heads]] |= (unsigned char)(1 << t);
    free(off);
}

/* Which rows of a tensor are off: what they have in common. */
static inline void attention_say_where(attention *a, int t) {
    const attend *p = &a->whole;
    unsigned char *off = attention_off(a, t);
    char text[240];
    if (off && attend_where(p, t, off, text, sizeof text))
        verdict_say(a->v, "of %s %s", attention_name(t), text);
    free(off);
}

static inline void attention_say_unnamed(attention *a) {
    char text[80];
    int said = 0;
    for (int t = 0; t < ATTEND_TENSORS && said < 2; t++) {
        if (!attention_is_wrong(a, t) || !attention_is_unknown(a, t)) continue;
        attention_say_where(a, t);
        said++;
    }
    if (attention_list(a, text, sizeof text, attention_follows))
        verdict_say(a->v, "right for the out that was dumped: %s", text);
    if (attention_list(a, text, sizeof text, attention_is_unknown))
        verdict_say(a->v,
                    "no known mistake gives this %s; dropout, sinks and biases are not "
                    "recomputed",
                    text);
    if (a->left_out && attention_list(a, text, sizeof text, attention_is_unknown))
        verdict_say(a->v, "some mistakes take too long to be tried on so long a text; a dump "
                          "of a shorter one says more");
    if (attention_list(a, text, sizeof text, attention_is_elsewhere))
        verdict_say(a->v,
                    "mistakes were tried on a part of it that does not show what is "
                    "wrong with %s",
                    text);
}

static inline int attention_diagnose(attention *a) {
    if (attention_try_coarse(a) || attention_try_mistakes(a)) return -1;
    attention_solve(a, 0);
    if (attention_is_unsolved(a) && attention_try_partials(a)) return -1;
    for (int level = 1; level < a->levels && attention_is_unsolved(a); level++) {
        if (attention_limit(a, &a->kernel[level], &a->limits[level]))
            return attention_no_memory(a);
        attention_solve(a, level);
    }
    for (int t = 0; t < ATTEND_TENSORS; t++) {
        a->follows[t] &= !a->explained[t] && a->explained[ATTEND_OUT] != VERDICT_MARGINAL;
        if (attention_is_wrong(a, t) && a->explained[t] != VERDICT_MARGINAL)
            a->v->kind = VERDICT_WRONG;
    }
    attention_name_mistakes(a);
    attention_say_unnamed(a);
    return 0;
}

/* ---- one micro-batch ---- */

/* Without cu_seqlens, a row may be packed unless its positions are 0, 1, 2, ... to its end. */
static inline int attention_may_be_packed(const dump_row *row) {
    if (row->docs) return 0;
    for (int64_t t = 0; row->positions && t < row->tokens; t++)
        if (row->positions[t] != t) return 1;
    return !row->positions;
}

static inline int attention_has_nan(const attention *a) {
    for (int t = 0; t < ATTEND_TENSORS; t++)
        if (a->whole.got[t] && !isfinite(a->distance[t].all)) return 1;
    return 0;
}

/* shows: what attention_shows found. */
static inline void attention_conclude(attention *a, int shows) {
    verdict *v = a->v;
    if (v->kind == VERDICT_WRONG && attention_may_be_packed(a->row) && !attention_has_nan(a)) {
        v->kind = VERDICT_INSUFFICIENT;
        v->count = 0;
        verdict_say(v, "the row may be packed; give cu_seqlens, 0 and %lld of one document",
                    (long long)a->whole.end);
    }
    if (v->kind == VERDICT_WRONG) return;
    if (!shows) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, "out is the same if ranks exchange nothing, if documents are ignored "
                       "and if tokens look ahead; dump a longer text of several ranks");
    } else if (!(shows & 1)) {
        verdict_say(v, "no query needs a key of another rank here: the exchange is not shown");
    }
    if (a->d->sp > 1) verdict_try(v, "own_tokens_only", NULL, shows & 1);
    verdict_try(v, "documents_ignored", NULL, shows >> 1 & 1);
    verdict_try(v, "looks_ahead", NULL, shows >> 2 & 1);
}

/* Whether fp64 holds the squares of the right answers. */
static inline int attention_is_held(const attention *a) {
    for (int t = 0; t < ATTEND_TENSORS; t++) {
        const double *x = a->right.right.x[t];
        int64_t n = attend_rows(&a->whole, t) * attend_width(&a->whole, t);
        for (int64_t i = 0; a->whole.got[t] && x && i < n; i++)
            if (!(fabs(x[i]) < 1e150)) return 0;
    }
    return 1;
}

/* A tensor beyond its limit makes the verdict marginal. Mistakes are tried only then, as they
   take longest; the verdict becomes wrong unless attention_diagnose finds all of these tensors
   marginal. */
static inline int attention_compare(attention *a) {
    int shows;
    if (attention_load_parts(a, NULL, 0, a->whole.kv_head[a->whole.kv_heads / 2])) return -1;
    attention_kernels(a);
    if (attention_limit(a, a->kernel, &a->limits[0])) return attention_no_memory(a);
    if (attend_case_begin(&a->right, &a->whole, -1)) return attention_no_memory(a);
    if (!attention_is_held(a)) {
        a->v->kind = VERDICT_INSUFFICIENT;
        verdict_say(a->v, "q, k, v or dout are so large that squares of results overflow fp64");
        return 0;
    }
    attention_say_looked(a);
    for (int t = 0; t < ATTEND_TENSORS; t++) {
        if (!a->whole.got[t]) continue;
        a->distance[t] = attend_measure(&a->whole, t, a->whole.got[t], a->right.right.x[t],
                                        a->right.right.scale[t], 0);
        attention_find_coarse(a, t);
        if (!attention_is_wrong(a, t)) continue;
        a->v->kind = VERDICT_MARGINAL;
        attention_mark(a, t);
    }
    if ((shows = attention_shows(a)) < 0) return -1;
    if (attention_is_zero(a->whole.in[ATTEND_DOUT],
                          attend_rows(&a->whole, ATTEND_OUT) * a->whole.out_dim))
        verdict_say(a->v, "dout is 0 everywhere: gradients show nothing");
    if (a->v->kind == VERDICT_MARGINAL && attention_diagnose(a)) return -1;
    if (a->v->kind == VERDICT_RIGHT && a->d->tries_all && attention_note_mistakes(a)) return -1;
    attention_conclude(a, shows);
    for (int t = 0; t < ATTEND_TENSORS; t++)
        if (a->whole.got[t]) attention_say_tensor(a, t);
    return 0;
}

static inline void attention_end(attention *a) {
    attend_case_end(&a->right);
    attention_free(&a->whole);
    attention_free(&a->rows);
    attention_free(&a->keys);
    free(a);
}

/* Whether the ranks hold every token of the documents, and each once. */
static inline int attention_is_placed(const dump_row *row, const dump_places *found) {
    for (int64_t t = 0; t < row_end(row); t++)
        if (row->rank[t] < 0) return 0;
    return !found->twice && row_end(row) > 0;
}

static inline void attention_judge(attention *a, const dump_places *found) {
    double wide = (double)row_end(a->row) *
                  (double)(a->shape[ATTEND_Q].dim + a->shape[ATTEND_V].dim);
    const char *lacks = !attention_is_placed(a->row, found)
                            ? "tokens are missing, or are held twice"
                        : wide > ATTENTION_KEYS ? "the text is too long to be recomputed"
                                                : NULL;
    if (!lacks && attention_load_whole(a)) return;
    if (!lacks && !attention_finite(&a->whole)) lacks = "q, k, v or dout hold NaN or Inf";
    a->v->kind = lacks ? VERDICT_INSUFFICIENT : VERDICT_RIGHT;
    if (lacks)
        verdict_say(a->v, "%s", lacks);
    else
        attention_compare(a);
}

/* Judges one micro-batch of one replica. Sets d->error if a file is bad or memory is out. */
static inline void check_attention(stage *s, dump *d, const dump_row *row,
                                   const dump_places *found, int64_t dp, int64_t micro) {
    attention *a = (attention *)calloc(1, sizeof *a);
    if (!a) seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for attention");
    if (!a || d->error.status) {
        free(a);
        return;
    }
    a->d = d;
    a->row = row;
    a->dp = dp;
    a->micro = micro;
    if (attention_shapes(a) > 0) {
        a->v = stage_begin(s, VERDICT_RIGHT);
        attention_judge(a, found);
    }
    attention_end(a);
}
#endif
