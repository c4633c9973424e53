/* SPDX-License-Identifier: MIT OR Unlicense */
/* write.h - functions for all programs that write dumps: make the folder, split a row's tokens
 * over ranks, take a rank's tokens from a tensor, convert numbers to the type of a file. */
#ifndef ORACLE_WRITE_H
#define ORACLE_WRITE_H
#include <errno.h>
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>
#include "page.h"
#include "rows.h"
#include "seqpar_llama.h"

/* ---- folders ---- */

static inline int remove_one(const char *path, const struct stat *s, int kind,
                             struct FTW *walk) {
    return (void)s, (void)kind, (void)walk, remove(path);
}

static inline void remove_folder(const char *path) {
    nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* Makes folder OUT/NAME, or OUT if the name is "". 0, or -1 with the error set. */
static inline int write_folder(seqpar_error *error, const char *out, const char *name) {
    char path[1200];
    snprintf(path, sizeof path, "%.1000s%s%s", out, *name ? "/" : "", name);
    if (!mkdir(path, 0777)) return 0;
    seqpar_fail(error, SEQPAR_ERR_FILE_OPEN, "%.300s: cannot be made: %s", path,
                errno == EEXIST ? "it is there already; give another --out" : strerror(errno));
    return -1;
}

/* ---- tokens ---- */

/* Allocates rank, local, next, gathered and order of the row. 0, or -1: no memory. */
static inline int write_row_room(dump_row *row) {
    int64_t **each[] = {&row->rank, &row->local, &row->next, &row->gathered, &row->order};
    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        *each[i] = (int64_t *)malloc(((size_t)row->tokens + 1) * sizeof **each[i]);
        if (!*each[i]) return -1;
        for (int64_t t = 0; t < row->tokens; t++) (*each[i])[t] = -1;
    }
    return 0;
}

/* The document of token t as [*begin, *end); padding counts as one more document. */
static inline void write_document(const dump_row *row, int64_t t, int64_t *begin,
                                  int64_t *end) {
    *begin = row->docs ? row->cu_seqlens[row->docs] : 0;
    *end = row->tokens;
    for (int64_t d = 0; d < row->docs && t < row->cu_seqlens[row->docs]; d++) {
        if (t >= row->cu_seqlens[d + 1]) continue;
        *begin = row->cu_seqlens[d];
        *end = row->cu_seqlens[d + 1];
        return;
    }
}

/* The member of the sequence's ranks that holds token t, as frameworks split a row. All layouts
   but stripe cut it, or each document, into slots whose lengths differ by at most one token; in
   a zigzag, member p has slots p and 2 sp - 1 - p. -1: the layout has no map here. */
static inline int64_t write_holder(const dump_row *row, int64_t t, int64_t sp, int layout) {
    int64_t begin = 0, end = row->tokens;
    int64_t slots = layout == SEQPAR_LAYOUT_CONTIGUOUS ? sp : 2 * sp;
    switch (layout) {
    case SEQPAR_LAYOUT_STRIPE: return t % sp;
    case SEQPAR_LAYOUT_CONTIGUOUS:
    case SEQPAR_LAYOUT_ZIGZAG: break;
    case SEQPAR_LAYOUT_ZIGZAG_DOC: write_document(row, t, &begin, &end); break;
    default: return -1;
    }
    int64_t slot = ((t - begin + 1) * slots - 1) / (end - begin);
    return slot < sp ? slot : 2 * sp - 1 - slot;
}

/* Splits the row by layout over sp ranks from `first` on: fills rank, local, next, gathered and
   order. 0, or -1 with the error set. */
static inline int write_deal(seqpar_error *error, dump_row *row, int64_t first, int64_t sp,
                             int layout) {
    int64_t *own = (int64_t *)calloc((size_t)row->tokens + 1, sizeof *own), before = 0;
    dump_places found = {0};
    if (!own) return seqpar_fail(error, SEQPAR_ERR_MEMORY, "no memory for a row"), -1;
    for (int64_t t = 0; t < row->tokens; t++) row->rank[t] = row->next[t] = -1;
    for (int64_t p = 0; p < sp; p++) {
        int64_t count = 0;
        for (int64_t t = 0; t < row->tokens; t++)
            if (write_holder(row, t, sp, layout) == p) own[count++] = t;
        dump_place_rank(row, first + p, own, count, before, &found);
        before += count;
    }
    free(own);
    if (before == row->tokens) return 0;
    seqpar_fail(error, SEQPAR_ERR_LAYOUT, "layout %s has no map in dump/write.h",
                seqpar_layout_name(layout));
    return -1;
}

/* How many of the row's tokens a rank holds; rank -1: all of them. */
static inline int64_t write_held(const dump_row *row, int64_t rank) {
    int64_t n = 0;
    for (int64_t t = 0; t < row->tokens; t++) n += rank < 0 || row->rank[t] == rank;
    return n;
}

/* A rank's tokens of a row's tensor, in the rank's order: `columns` elements of 8 bytes per
   token. rank -1: all tokens, in the row's order. To be freed; NULL: no memory. */
static inline void *write_share(const dump_row *row, int64_t rank, const void *from,
                                int64_t columns) {
    char *to = (char *)calloc((size_t)(row->tokens * columns) + 1, 8);
    for (int64_t t = 0; to && t < row->tokens; t++)
        if (rank < 0 || row->rank[t] == rank)
            memcpy(to + 8 * columns * (rank < 0 ? t : row->local[t]),
                   (const char *)from + 8 * columns * t, 8 * (size_t)columns);
    return to;
}

static inline int write_is_integer(const char *what) {
    return !strcmp(what, "index") || !strcmp(what, "ids") || !strcmp(what, "positions") ||
           !strcmp(what, "labels") || !strcmp(what, "cu_seqlens") ||
           !strcmp(what, "boundaries");
}

/* Adds a rank's tokens of a row's tensor to its page. heads 0: shape (n); else (n, heads), or
   (n, heads, columns / heads). from NULL: adds nothing. */
static inline void page_put(page *p, const dump_row *row, int64_t rank, int64_t micro,
                            const char *what, const void *from, int64_t columns,
                            int64_t heads) {
    char name[64];
    void *share = from ? page_own(p, write_share(row, rank, from, columns)) : NULL;
    if (!share) return;
    snprintf(name, sizeof name, "%lld.%s", (long long)micro, what);
    page_add(
        p,
        &(seqpar_safetensors_tensor){
            .name = name,
            .dtype = write_is_integer(what) ? SEQPAR_SAFETENSORS_I64 : SEQPAR_SAFETENSORS_F64,
            .dims = heads ? columns > heads ? 3 : 2 : 1,
            .shape = {write_held(row, rank), heads, heads ? columns / heads : 1}},
        share);
}

/* Adds all parameters of the model to the page, names get the prefix. elements is borrowed. */
static inline void page_parameters(page *p, const char *prefix, const seqpar_llama *model,
                                   const double *elements) {
    for (int64_t i = 0; i < model->tensor_count; i++) {
        const seqpar_tensor *t = &model->tensors[i];
        tensor_name name;
        seqpar_safetensors_tensor one = {.name = tensor_of(&name, prefix, t->name),
                                         .dtype = SEQPAR_SAFETENSORS_F64,
                                         .dims = t->rows > 1 ? 2 : 1,
                                         .shape = {t->rows > 1 ? t->rows : t->cols, t->cols}};
        page_add(p, &one, elements + t->offset);
    }
}

/* ---- numbers ---- */

/* Rounds x to `bits` bits of significand, ties to even. Numbers below 2^(least - 1) are
   subnormal: they have the spacing of numbers at that limit. */
static inline double write_rounded(double x, int bits, int least) {
    int exponent;
    double unit;
    if (!isfinite(x) || x == 0) return x;
    frexp(x, &exponent);
    unit = ldexp(1, (exponent < least ? least : exponent) - bits);
    return rint(x / unit) * unit;
}

/* x is already rounded to 11 bits; |x| of 65536 and more becomes Inf. */
static inline uint16_t write_f16(double x) {
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    double size = fabs(x);
    int exponent;
    if (isnan(x)) return 0x7e00;
    if (size >= 65536) return sign | 0x7c00;
    if (size < 0x1p-14) return sign | (uint16_t)(size * 0x1p24);
    size = frexp(size, &exponent) * 2048 - 1024;
    return (uint16_t)(sign | (((exponent + 14) << 10) + (int)size));
}

/* Writes x in that type to `to`. Returns the number that a reader gets. */
static inline double write_number(char *to, double x, seqpar_safetensors_dtype dtype) {
    float f = (float)x;
    uint16_t half;
    uint32_t bits;
    if (dtype == SEQPAR_SAFETENSORS_F64) return memcpy(to, &x, 8), x;
    if (dtype == SEQPAR_SAFETENSORS_F32) return memcpy(to, &f, 4), (double)f;
    if (dtype == SEQPAR_SAFETENSORS_F16) {
        half = write_f16(write_rounded(x, 11, -13));
        memcpy(to, &half, 2);
        return (double)seqpar_safetensors_f16_to_f32(half);
    }
    f = (float)write_rounded(x, 8, -125);
    memcpy(&bits, &f, 4);
    half = isnan(x) ? 0x7fc0 : (uint16_t)(bits >> 16);
    memcpy(to, &half, 2);
    return (double)seqpar_safetensors_bf16_to_f32(half);
}

/* Writes n numbers in that type. Returns the first finite one that it makes Inf; -1: none. */
static inline int64_t write_numbers(char *to, const double *x, int64_t n,
                                    seqpar_safetensors_dtype dtype) {
    int64_t bytes = seqpar_safetensors_dtype_bytes(dtype), first = -1;
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(write_number(to + i * bytes, x[i], dtype)) && isfinite(x[i]) && first < 0)
            first = i;
    return first;
}

/* Writes n integers as I64 or I32. Returns the first that does not fit; -1: none. */
static inline int64_t write_integers(char *to, const int64_t *x, int64_t n,
                                     seqpar_safetensors_dtype dtype) {
    int64_t first = -1;
    for (int64_t i = 0; i < n; i++) {
        int32_t small = (int32_t)x[i];
        if (dtype == SEQPAR_SAFETENSORS_I64)
            memcpy(to + 8 * i, &x[i], 8);
        else
            memcpy(to + 4 * i, &small, 4);
        if (dtype != SEQPAR_SAFETENSORS_I64 && small != x[i] && first < 0) first = i;
    }
    return first;
}
#endif
