/* SPDX-License-Identifier: MIT OR Unlicense */
/* run.h - writes a copy of a dump with tensors that an operation (operations.h) computed. The
 * output folder gets its name only when it is complete.
 *
 * Tensors and metadata that are not computed are copied. An operation that moves tokens to
 * other ranks or rows makes all tensors of micro-batches; of the step's tensors, only those
 * with a prefix in `copied` are copied. */
#ifndef ORACLE_RUN_H
#define ORACLE_RUN_H
#include "oracle/verdict/checks.h"
#include "oracle/dump/write.h"

typedef struct run_desc {
    const char *operation, *in, *out, *layout, *model, *dtype; /* model, dtype: may be NULL */
    int64_t tokens, sp;
    int unmasked;
} run_desc;

typedef struct run_tensor {
    int64_t rank;
    seqpar_safetensors_tensor t; /* its name is allocated */
    char *data;
    int replaced; /* the dump has a tensor of this name, which is not copied */
} run_tensor;

typedef struct run_note { /* metadata of one rank's file; rank -1: of all files */
    int64_t rank;
    char *key, *value; /* value NULL: the key is removed */
} run_note;

typedef struct run {
    const run_desc *desc;
    dump d;
    dump_row *rows; /* (row_count) replica after replica; NULL: the operation needs none */
    int64_t row_count;
    int64_t world, sp, accumulation; /* of the output */
    int moved;                       /* tokens move: no tensor of a row is copied */
    const char *const *copied; /* if moved: prefixes of step tensors to copy; NULL: none */
    run_tensor *made;          /* (count), room for (most) */
    int64_t count, most;
    run_note *notes; /* (note_count), room for (note_most) */
    int64_t note_count, note_most;
    char left_out[240]; /* tensors of the dump that are not written, with blanks between */
    seqpar_safetensors_dtype real; /* dtype of computed numbers that replace no tensor; with
                                      --dtype, of all computed numbers */
    char out[1000], partial[1100]; /* the folder's name; the name while it is written, "": no
                                      folder is left to remove */
} run;

static inline int run_no_memory(run *r) {
    seqpar_fail(&r->d.error, SEQPAR_ERR_MEMORY, "no memory");
    return -1;
}

/* ---- inputs ---- */

/* The first name of a list that a micro-batch lacks; NULL: it has all. */
static inline const char *run_lacks(run *r, int64_t dp, int64_t micro, const char *names,
                                    char *name, size_t size) {
    while (*names) {
        size_t length = strcspn(names, " ");
        int64_t elements = 0;
        snprintf(name, size, "%.*s", (int)length, names);
        if (!dump_count(&r->d, dp, micro, name, &elements)) return name;
        names += length + strspn(names + length, " ");
    }
    return NULL;
}

/* "ids cu_seqlens" -> "ids and cu_seqlens" */
static inline void run_name_list(char *text, size_t size, const char *names) {
    size_t used = 0;
    *text = 0;
    while (*names && used < size) {
        size_t length = strcspn(names, " "), gap = strspn(names + length, " ");
        const char *more = names + length + gap;
        used += (size_t)snprintf(text + used, size - used, "%.*s%s", (int)length, names,
                                 !*more              ? ""
                                 : strchr(more, ' ') ? ", "
                                                     : " and ");
        names = more;
    }
}

/* Checks that every micro-batch has these tensors. 0, or -1 with the error. */
static inline int run_needs(run *r, const char *names) {
    char name[64], list[200];
    for (int64_t n = 0; n < r->d.world / r->d.sp * r->d.accumulation; n++) {
        int64_t dp = n / r->d.accumulation, micro = n % r->d.accumulation;
        if (!run_lacks(r, dp, micro, names, name, sizeof name)) continue;
        run_name_list(list, sizeof list, names);
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor %lld.%s is missing; the operation takes %s of every "
                    "micro-batch, so write them on all ranks",
                    r->d.ranks[dp * r->d.sp].path, (long long)micro, name, list);
        return -1;
    }
    return 0;
}

static inline int run_misplaced(run *r, int64_t n, const dump_places *found) {
    if (!(found->outside + found->twice + found->missing)) return 0;
    seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: tensor %lld.index is wrong: %lld tokens are held twice, %lld by "
                "nobody, %lld places are outside; write each token's place in its row",
                r->d.ranks[n / r->d.accumulation * r->d.sp].path,
                (long long)(n % r->d.accumulation), (long long)found->twice,
                (long long)found->missing, (long long)found->outside);
    return -1;
}

/* Reads all rows. Fails unless `index` holds each token exactly once. 0, or -1 with the
   error. */
static inline int run_rows(run *r) {
    r->row_count = r->d.world / r->d.sp * r->d.accumulation;
    r->rows = (dump_row *)calloc((size_t)r->row_count, sizeof *r->rows);
    if (!r->rows) return run_no_memory(r);
    for (int64_t n = 0; n < r->row_count; n++) {
        dump_places found;
        if (dump_read_row(&r->d, n / r->d.accumulation, n % r->d.accumulation, &r->rows[n],
                          &found) ||
            run_misplaced(r, n, &found))
            return -1;
    }
    return 0;
}

/* ---- computed tensors ---- */

static inline const run_tensor *run_find(const run *r, int64_t rank, const char *name) {
    for (int64_t i = 0; i < r->count; i++)
        if (r->made[i].rank == rank && !strcmp(r->made[i].t.name, name)) return &r->made[i];
    return NULL;
}

/* The dump's tensor that the new one replaces; NULL: none. If tokens move, rank 0's, since an
   output rank may not exist in the dump. */
static inline const seqpar_safetensors_tensor *run_replaced(const run *r, int64_t rank,
                                                            const char *name) {
    return seqpar_safetensors_find(r->d.ranks[r->moved ? 0 : rank].file, name);
}

static inline seqpar_safetensors_dtype run_dtype(const run *r,
                                                 const seqpar_safetensors_tensor *old,
                                                 int integers) {
    if (integers)
        return old && old->dtype == SEQPAR_SAFETENSORS_I32 ? old->dtype
                                                           : SEQPAR_SAFETENSORS_I64;
    if (r->desc->dtype) return r->real;
    return old && dump_is_real(old->dtype) ? old->dtype : r->real;
}

/* Sets r->real: --dtype if given; else F64 if any tensor of the dump is F64; else F32. */
static inline void run_real(run *r) {
    r->real = SEQPAR_SAFETENSORS_F32;
    for (int64_t q = 0; q < r->d.world && !r->desc->dtype; q++)
        for (int64_t i = 0; i < seqpar_safetensors_count(r->d.ranks[q].file); i++)
            if (seqpar_safetensors_at(r->d.ranks[q].file, i)->dtype == SEQPAR_SAFETENSORS_F64)
                r->real = SEQPAR_SAFETENSORS_F64;
    if (r->desc->dtype && !strcmp(r->desc->dtype, "float64")) r->real = SEQPAR_SAFETENSORS_F64;
}

/* Adds a tensor. t: name (copied), dtype and shape. Owns data from here on, also on failure.
   0, or -1 with the error. */
static inline int run_keep(run *r, int64_t rank, const seqpar_safetensors_tensor *t,
                           char *data) {
    char *name = strdup(t->name);
    if (!name || !data || list_grow(&r->made, r->count, &r->most, sizeof *r->made)) {
        free(name);
        free(data);
        return run_no_memory(r);
    }
    r->made[r->count] = (run_tensor){rank, *t, data, run_replaced(r, rank, t->name) != NULL};
    r->made[r->count++].t.name = name;
    return 0;
}

static inline int64_t run_elements(const seqpar_safetensors_tensor *t) {
    int64_t n = 1;
    for (int64_t i = 0; i < t->dims; i++) n *= t->shape[i];
    return n;
}

/* Fails if x cannot be written. first: its first element that overflows the dtype, -1: none.
   infinite: Inf is allowed. 0, or -1 with the error. */
static inline int run_unfit(run *r, const seqpar_safetensors_tensor *t, const double *x,
                            int64_t first, int infinite) {
    for (int64_t i = 0; first < 0 && i < run_elements(t); i++)
        if (isnan(x[i]) || (isinf(x[i]) && !infinite)) {
            seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                        "%.300s: tensor %.100s becomes NaN or Inf at element %lld: its inputs "
                        "have NaN or Inf, or are too large; dump a step with finite inputs",
                        r->desc->in, t->name, (long long)i);
            return -1;
        }
    if (first < 0) return 0;
    seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: tensor %.100s becomes %g at element %lld, for which %s has no room; "
                "give --dtype float64",
                r->desc->in, t->name, x[first], (long long)first,
                seqpar_safetensors_dtype_name(t->dtype));
    return -1;
}

/* Adds a tensor of the numbers x, and frees x. t: name and shape. infinite: Inf is allowed.
   0, or -1 with the error. */
static inline int run_put(run *r, int64_t rank, const seqpar_safetensors_tensor *t, double *x,
                          int infinite) {
    seqpar_safetensors_tensor as = *t;
    int64_t n = run_elements(t);
    char *data = NULL;
    int status = x ? 0 : run_no_memory(r);
    as.dtype = run_dtype(r, run_replaced(r, rank, t->name), 0);
    if (!status && !(data = (char *)malloc((size_t)(8 * n) + 1))) status = run_no_memory(r);
    if (!status) status = run_unfit(r, &as, x, write_numbers(data, x, n, as.dtype), infinite);
    free(x);
    if (!status) return run_keep(r, rank, &as, data);
    free(data);
    return -1;
}

/* The same for integers. They become I64 if they overflow the I32 of the replaced tensor. */
static inline int run_put_integers(run *r, int64_t rank, const seqpar_safetensors_tensor *t,
                                   int64_t *x) {
    seqpar_safetensors_tensor as = *t;
    int64_t n = run_elements(t);
    char *data = x ? (char *)malloc((size_t)(8 * n) + 1) : NULL;
    as.dtype = run_dtype(r, run_replaced(r, rank, t->name), 1);
    if (data && write_integers(data, x, n, as.dtype) >= 0) {
        as.dtype = SEQPAR_SAFETENSORS_I64;
        write_integers(data, x, n, as.dtype);
    }
    free(x);
    return data ? run_keep(r, rank, &as, data) : run_no_memory(r);
}

/* Name and shape of a tensor of micro-batch `micro`. The name is stored in `name`. */
typedef struct run_name {
    char text[64];
} run_name;
static inline seqpar_safetensors_tensor run_tensor_of(run_name *name, int64_t micro,
                                                      const char *what, int64_t dims, int64_t n,
                                                      int64_t heads, int64_t dim) {
    snprintf(name->text, sizeof name->text, "%lld.%s", (long long)micro, what);
    return (seqpar_safetensors_tensor){
        .name = name->text, .dims = dims, .shape = {n, heads, dim}};
}

/* Adds to each rank its tokens of a row's tensor (tokens, heads, dim), 8 bytes an element.
   dims: the tensor has the first 1 to 3 of these dimensions. 0, or -1 with the error. */
static inline int run_put_row(run *r, const dump_row *row, int64_t dp, int64_t micro,
                              const char *what, const void *from, int64_t dims, int64_t heads,
                              int64_t dim) {
    int status = 0;
    for (int64_t q = dp * r->sp; !status && q < (dp + 1) * r->sp; q++) {
        run_name name;
        seqpar_safetensors_tensor t = run_tensor_of(&name, micro, what, dims,
                                                    write_held(row, q), heads, dim);
        void *share = write_share(row, q, from, heads * dim);
        status = write_is_integer(what) ? run_put_integers(r, q, &t, (int64_t *)share)
                                        : run_put(r, q, &t, (double *)share, 0);
    }
    return status;
}

/* Adds a tensor of n numbers about documents: the same to every rank of the sequence. */
static inline int run_put_documents(run *r, int64_t dp, int64_t micro, const char *what,
                                    const void *from, int64_t n) {
    int status = 0;
    for (int64_t q = dp * r->sp; !status && q < (dp + 1) * r->sp; q++) {
        run_name name;
        seqpar_safetensors_tensor t = run_tensor_of(&name, micro, what, 1, n, 1, 1);
        void *copy = malloc((size_t)(8 * n) + 1);
        if (copy) memcpy(copy, from, (size_t)(8 * n));
        status = write_is_integer(what) ? run_put_integers(r, q, &t, (int64_t *)copy)
                                        : run_put(r, q, &t, (double *)copy, 0);
    }
    return status;
}

/* A number of the step, on every rank. */
static inline int run_put_step(run *r, const char *what, double x) {
    int status = 0;
    for (int64_t q = 0; !status && q < r->world; q++) {
        double *copy = (double *)malloc(sizeof *copy);
        if (copy) *copy = x;
        status = run_put(r, q, &(seqpar_safetensors_tensor){.name = what}, copy, 0);
    }
    return status;
}

/* Sets a metadata key of a rank's file; rank -1: of all files. value NULL removes the key. 0,
   or -1 with the error. */
static inline int run_note_down(run *r, int64_t rank, const char *key, const char *value) {
    run_note note = {rank, strdup(key), value ? strdup(value) : NULL};
    if (note.key && (note.value || !value) &&
        !list_grow(&r->notes, r->note_count, &r->note_most, sizeof *r->notes)) {
        r->notes[r->note_count++] = note;
        return 0;
    }
    free(note.key);
    free(note.value);
    return run_no_memory(r);
}

static inline int run_note_number(run *r, int64_t rank, const char *key, int64_t x) {
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)x);
    return run_note_down(r, rank, key, text);
}

/* ---- writing it ---- */

static inline const run_note *run_noted(const run *r, int64_t rank, const char *key) {
    for (int64_t i = 0; i < r->note_count; i++)
        if ((r->notes[i].rank == rank || r->notes[i].rank < 0) && !strcmp(r->notes[i].key, key))
            return &r->notes[i];
    return NULL;
}

/* The dump's rank whose metadata and copied tensors an output rank gets. If tokens move, it is
   the first rank of the same replica. */
static inline int64_t run_source(const run *r, int64_t rank) {
    return r->moved ? rank / r->sp * r->d.sp : rank;
}

static inline void run_page_notes(const run *r, page *p, int64_t rank) {
    const seqpar_safetensors_file *file = r->d.ranks[run_source(r, rank)].file;
    for (int64_t i = 0; i < seqpar_safetensors_metadata_count(file); i++) {
        const seqpar_safetensors_pair *pair = seqpar_safetensors_metadata_at(file, i);
        if (!run_noted(r, rank, pair->key)) page_note(p, pair->key, pair->value);
    }
    for (int64_t i = 0; i < r->note_count; i++)
        if (r->notes[i].value && (r->notes[i].rank == rank || r->notes[i].rank < 0))
            page_note(p, r->notes[i].key, r->notes[i].value);
}

/* A tensor of the dump as it is. 0, or -1 with the error. */
static inline int run_copy(run *r, page *p, int64_t rank, const seqpar_safetensors_tensor *t) {
    seqpar_safetensors_part all = seqpar_safetensors_whole(t);
    char *data = (char *)page_own(p, malloc((size_t)t->bytes + 1));
    if (!data) return run_no_memory(r);
    if (seqpar_safetensors_read(r->d.ranks[rank].file, data, &all, &r->d.error)) return -1;
    page_add(p, t, data);
    return 0;
}

static inline void run_path(const run *r, int64_t rank, char *path, size_t size) {
    const char *own = r->moved ? NULL : strrchr(r->d.ranks[rank].path, '/');
    if (own)
        snprintf(path, size, "%s%s", r->partial, own);
    else
        snprintf(path, size, "%s/rank%lld.safetensors", r->partial, (long long)rank);
}

/* Whether a tensor of the dump is written as it is. */
static inline int run_is_copied(const run *r, const char *name) {
    const char *const *prefix = r->copied;
    if (!r->moved) return 1;
    while (prefix && *prefix && strncmp(name, *prefix, strlen(*prefix))) prefix++;
    return prefix && *prefix;
}

static inline int run_save_rank(run *r, int64_t rank) {
    int64_t source = run_source(r, rank);
    const seqpar_safetensors_file *file = r->d.ranks[source].file;
    char path[2200];
    page p = {.count = 0};
    int status = 0;
    run_page_notes(r, &p, rank);
    for (int64_t i = 0; !status && i < seqpar_safetensors_count(file); i++) {
        const seqpar_safetensors_tensor *t = seqpar_safetensors_at(file, i);
        if (run_is_copied(r, t->name) && !run_find(r, rank, t->name))
            status = run_copy(r, &p, source, t);
    }
    for (int64_t i = 0; i < r->count; i++)
        if (r->made[i].rank == rank) page_add(&p, &r->made[i].t, r->made[i].data);
    run_path(r, rank, path, sizeof path);
    if (!status) status = page_save(&p, path, &r->d.error);
    page_free(&p);
    return status;
}

static inline int run_not_made(run *r) {
    seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_WRITE, "%.300s: cannot be made: %s", r->out,
                strerror(errno));
    return -1;
}

/* Makes a temporary folder beside --out before anything is computed, so that an --out that
   cannot be written fails early. 0, or -1 with the error. */
static inline int run_make_folder(run *r) {
    size_t length = strlen(r->desc->out);
    struct stat there;
    while (length > 1 && r->desc->out[length - 1] == '/') length--;
    if (length >= sizeof r->out) {
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_OPEN, "%.300s...: the path is too long",
                    r->desc->out);
        return -1;
    }
    snprintf(r->out, sizeof r->out, "%.*s", (int)length, r->desc->out);
    if (!lstat(r->out, &there)) {
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_OPEN,
                    "%.300s: it is there already; give another --out", r->out);
        return -1;
    }
    snprintf(r->partial, sizeof r->partial, "%s.partial.%ld", r->out, (long)getpid());
    if (!mkdir(r->partial, 0777)) return 0;
    *r->partial = 0;
    return run_not_made(r);
}

static inline int run_save(run *r) {
    for (int64_t q = 0; q < r->world; q++)
        if (run_save_rank(r, q)) return -1;
    if (!rename(r->partial, r->out)) return *r->partial = 0;
    return run_not_made(r);
}

static inline void run_close(run *r) {
    for (int64_t n = 0; r->rows && n < r->row_count; n++) dump_row_free(&r->rows[n]);
    for (int64_t i = 0; i < r->count; i++) {
        free((void *)r->made[i].t.name);
        free(r->made[i].data);
    }
    for (int64_t i = 0; i < r->note_count; i++) {
        free(r->notes[i].key);
        free(r->notes[i].value);
    }
    free(r->rows);
    free(r->made);
    free(r->notes);
    if (*r->partial) remove_folder(r->partial); /* an incomplete output */
    dump_close(&r->d);
}
#endif
