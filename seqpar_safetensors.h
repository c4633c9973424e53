/* seqpar_safetensors.h - v0.2.0 - safetensors files in and out, atomically - MIT or
   Unlicense */
/* SPDX-License-Identifier: MIT OR Unlicense */
/*
>>doc ------------------------------------------------------------------------------------------

    A safetensors file is 8 bytes of header length (little-endian), a JSON header
    { name: {dtype, shape, data_offsets} }, then the bytes of the tensors, end to end.
    Hugging Face weights come in it, and seqpar keeps checkpoints and oracle cases in it.

    In exactly one C or C++ file:

        #define SEQPAR_IMPLEMENTATION               (the core, unless another file has it)
        #define SEQPAR_SAFETENSORS_IMPLEMENTATION
        #include "seqpar_safetensors.h"

    and link with -lcjson (Debian: libcjson-dev).

    CONTENTS: >>doc >>api >>text >>dtype >>scan >>parse >>layout >>open >>read >>output >>write
    >>licence

DOES
    - read: open checks the whole header before anything is handed out; tensors are then read
      whole or in part, as stored or converted to float or double, with NaN and Inf refused on
      request.
    - write: pass the list of tensors, then append their bytes in that order, in pieces of any
      size, so a whole model need not be in memory. The same calls always give the same bytes.
    - replace files atomically: a writer writes the file `path.tmp.<pid>` in the same folder,
      flushes and syncs it, and at the end renames it to `path`. If anything fails before the
      rename, it removes the temporary file, and an older file at `path` is unchanged.

DOES NOT
    - map files into memory, or read shards through an index file; open each shard.
    - know dtypes other than the thirteen of SEQPAR_SAFETENSORS_DTYPES (no FP8, FP4 or complex).
    - run on Windows or on big-endian machines; both are an #error.
    - follow a symbolic link when writing: the link itself is replaced by the file.
    - accept everything that the reference implementation reads. It refuses, and never ignores:
      fields other than the three of the format; a name or metadata key that occurs twice or
      contains a NUL; "__metadata__": null; a header that does not begin with '{'; sizes of 2^53
      or more; more than 8 dimensions.
    - limit the memory for parsing, except by the size of the header: a hostile header of the
      largest permitted size (100 MB) can need some gigabytes.

    An open file or a writer belongs to one thread at a time. Opening in several threads at once
    is fine. A race detector may report a global variable of cJSON, which stores where parsing
    last failed; seqpar never reads it.

OPTIONS
    SEQPAR_STATIC                  everywhere: all functions become static (defined by seqpar.h)
    SEQPAR_MALLOC, SEQPAR_FREE     implementation file: the allocator, shared with seqpar.h; cJSON's own
                                   allocations go through cJSON_InitHooks
    _FILE_OFFSET_BITS              implementation file: must be 64 if off_t is 32 bits wide
                                   by default. This header defines it, which works if it comes
                                   before every other header

SAMPLE

    #define SEQPAR_IMPLEMENTATION
    #define SEQPAR_SAFETENSORS_IMPLEMENTATION
    #include "seqpar_safetensors.h"
    #include <stdio.h>

    int main(void)
    {
        const float w[6] = { 1, 2, 3, 4, 5, 6 };
        const void *data[1] = { w };
        float row[3];
        seqpar_error error = { 0 };
        seqpar_safetensors_file *file = NULL;
        seqpar_safetensors_tensor tensor = { .name = "w", .dtype = SEQPAR_SAFETENSORS_F32,
                                             .dims = 2, .shape = { 2, 3 } };
        seqpar_safetensors_pair note = { "step", "17" };
        seqpar_safetensors_desc desc = { .path = "sample.safetensors", .tensors = &tensor, .count = 1,
                                         .metadata = &note, .metadata_count = 1 };
        seqpar_safetensors_part second_row = { .name = "w", .first = 3, .count = 3, .finite = 1 };
        seqpar_safetensors_part bias = { .name = "b", .count = 3 };

        if (seqpar_safetensors_save(&desc, data, &error) == 0
            && seqpar_safetensors_open(&file, "sample.safetensors", &error) == 0
            && seqpar_safetensors_read_f32(file, row, &second_row, &error) == 0)
            printf("step %s: %g %g %g\n", seqpar_safetensors_metadata(file, "step"),
                   (double)row[0], (double)row[1], (double)row[2]);
        seqpar_safetensors_read_f32(file, row, &bias, &error);
        printf("%s\n", error.text);
        seqpar_safetensors_close(file);
        return 0;
    }

    prints

    step 17: 4 5 6
    sample.safetensors: tensor "b": is not in the file, which has 1 tensors, the first "w"; check the name

A DUMP
    This function writes a dump for `seqpar-verify ver`: what one of two ranks, which holds n
    tokens of a row, computed in a step. verify/oracle/dump/dump.h lists what else a dump may hold.
    Pass the labels and positions that the program itself used.

    static int dump_rank(const char *path, const char *rank, int64_t n, const int64_t *index,
                         const int64_t *ids, const int64_t *labels, const double *logp,
                         const int64_t *cu_seqlens, int64_t docs, const double *loss)
    {
        const seqpar_safetensors_dtype I64 = SEQPAR_SAFETENSORS_I64;
        const seqpar_safetensors_dtype F64 = SEQPAR_SAFETENSORS_F64;
        seqpar_safetensors_tensor tensors[] = {
            { "0.index", I64, 1, { n } }, { "0.ids", I64, 1, { n } },
            { "0.labels", I64, 1, { n } }, { "0.logp", F64, 1, { n } },
            { "0.cu_seqlens", I64, 1, { docs + 1 } }, { .name = "loss", .dtype = F64 } };
        const void *data[] = { index, ids, labels, logp, cu_seqlens, loss };
        seqpar_safetensors_pair metadata[] = {
            { "seqpar_dump", "1" }, { "rank", rank }, { "world", "2" }, { "sp", "2" } };
        seqpar_safetensors_desc desc = { .path = path, .tensors = tensors, .count = 6,
                                         .metadata = metadata, .metadata_count = 4 };
        seqpar_error error = { 0 };
        if (seqpar_safetensors_save(&desc, data, &error))
            fprintf(stderr, "%s\n", error.text);
        return error.status;
    }

ERRORS
    Each comes with a sentence that names the file, the tensor, the values and what to do about
    them.

    SEQPAR_ERR_MEMORY       SEQPAR_MALLOC returned NULL
    SEQPAR_ERR_FILE_OPEN    no such file, no permission, or a path that is not a regular file
    SEQPAR_ERR_FILE_READ    the disk failed, or the file became shorter after it was opened
    SEQPAR_ERR_FILE_WRITE   disk full, size limit, no permission; also append or finish without
                            a writer. A writer that has failed returns its first error's code
    SEQPAR_ERR_FILE_FORMAT  the file breaks a rule of the format, or the metadata or header to
                            be written would
    SEQPAR_ERR_FILE_TENSOR  no tensor of that name; another dtype or shape than expected; a part
                            that is not inside the tensor; a list of tensors that cannot be
                            written; bytes that do not belong to the next tensor, or are missing
    SEQPAR_ERR_NOT_FINITE   a NaN or Inf where they were refused, or a double too large for a float
*/

#ifndef SEQPAR_SAFETENSORS_H
#define SEQPAR_SAFETENSORS_H

/* -std=c11 hides fseeko, fsync and fdopen unless POSIX is asked for before the first system
   header. */
#ifdef SEQPAR_SAFETENSORS_IMPLEMENTATION
#if defined(__STRICT_ANSI__) && !defined(_POSIX_C_SOURCE) && !defined(_XOPEN_SOURCE) && \
    !defined(_GNU_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif
#ifndef _FILE_OFFSET_BITS
#define _FILE_OFFSET_BITS 64
#endif
#endif

#include "seqpar.h"
#if SEQPAR_VERSION_MAJOR != 0 || SEQPAR_VERSION_MINOR != 2 || SEQPAR_VERSION_PATCH != 0
#error "seqpar_safetensors.h 0.2.0 needs seqpar.h 0.2.0; take both from one release"
#endif

#include <stdint.h>

/* >>api ---------------------------------------------------------------------------------------
 *
 * The rules for all functions: `error` may be NULL. Otherwise the caller has zeroed it, and it
 * keeps the first failure. Sizes are elements where they are called count or first, bytes where
 * they are called bytes. Names are UTF-8 and end in NUL. Memory is allocated only by
 * seqpar_safetensors_open, _create and _save, and by seqpar_file_write_atomic.
 */

#ifdef __cplusplus
extern "C" {
#endif

#define SEQPAR_SAFETENSORS_MAX_DIMS 8
#define SEQPAR_SAFETENSORS_MAX_HEADER \
    100000000 /* bytes; the limit of the reference implementation */

/* X(name in the file, bytes of an element) */
/* clang-format off */
#define SEQPAR_SAFETENSORS_DTYPES(X) \
    X(BOOL, 1) X(U8, 1) X(I8, 1) X(U16, 2) X(I16, 2) X(F16, 2) X(BF16, 2) \
    X(U32, 4) X(I32, 4) X(F32, 4) X(U64, 8) X(I64, 8) X(F64, 8)
/* clang-format on */

typedef enum seqpar_safetensors_dtype {
    SEQPAR_SAFETENSORS_NONE, /* no dtype: the value of a field that was not set */
#define SEQPAR_SAFETENSORS_X(name, bytes) SEQPAR_SAFETENSORS_##name,
    SEQPAR_SAFETENSORS_DTYPES(SEQPAR_SAFETENSORS_X)
#undef SEQPAR_SAFETENSORS_X
        SEQPAR_SAFETENSORS_DTYPE_COUNT
} seqpar_safetensors_dtype;

typedef struct seqpar_safetensors_tensor {
    const char *name;
    seqpar_safetensors_dtype dtype;
    int64_t dims; /* 0 is a scalar, which has one element */
    /* (dims) sizes, which may be 0; the last index varies fastest */
    int64_t shape[SEQPAR_SAFETENSORS_MAX_DIMS];
    /* set by seqpar_safetensors_open; ignored in a list of tensors to be written: */
    int64_t count; /* elements */
    int64_t bytes;
    int64_t offset; /* bytes from the start of the data, the first byte after the header */
} seqpar_safetensors_tensor;

typedef struct seqpar_safetensors_pair {
    const char *key;
    const char *value;
} seqpar_safetensors_pair;

typedef struct seqpar_safetensors_file seqpar_safetensors_file;
typedef struct seqpar_safetensors_writer seqpar_safetensors_writer;

/* ---- dtypes */

SEQPAR_DEF const char *seqpar_safetensors_dtype_name(seqpar_safetensors_dtype dtype);
/* "F32", "BF16", ... as in the file; "NONE" for anything that is not a dtype. Static
   storage. */

SEQPAR_DEF int64_t seqpar_safetensors_dtype_bytes(seqpar_safetensors_dtype dtype);
/* Bytes of one element; 0 for anything that is not a dtype. */

SEQPAR_DEF float seqpar_safetensors_f16_to_f32(uint16_t bits);
SEQPAR_DEF float seqpar_safetensors_bf16_to_f32(uint16_t bits);
/* Exact for all 65,536 patterns, subnormal, infinite and NaN ones included. */

SEQPAR_DEF uint16_t seqpar_safetensors_f32_to_f16(float x);
/* Rounds to nearest, ties to even; from 65520 on to infinity. seqpar_bf16_from_float does the
   same for bfloat16. */

/* ---- reading */

SEQPAR_DEF seqpar_status seqpar_safetensors_open(seqpar_safetensors_file **file,
                                                 const char *path, seqpar_error *error);
/* Reads the header, and checks every rule of the format: known dtypes, sizes that agree with
 * the offsets, no overlap, no gap, no name twice, nothing after the data. Also checks that the
 * file is long enough for its data. Does not read the data.
 * On success the caller closes *file; otherwise *file is NULL.
 * Errors: FILE_OPEN, FILE_READ, FILE_FORMAT, MEMORY. */

SEQPAR_DEF void seqpar_safetensors_close(seqpar_safetensors_file *file);
/* Frees the file and every name, key, value and tensor obtained from it. NULL is fine. */

SEQPAR_DEF int64_t seqpar_safetensors_count(const seqpar_safetensors_file *file);
SEQPAR_DEF const seqpar_safetensors_tensor *seqpar_safetensors_at(
    const seqpar_safetensors_file *file, int64_t index);
/* The tensors in the order of the header, index from 0; NULL past the end. Valid until
   close. */

SEQPAR_DEF const seqpar_safetensors_tensor *seqpar_safetensors_find(
    const seqpar_safetensors_file *file, const char *name);
/* The tensor of that name, or NULL. Valid until close. */

SEQPAR_DEF seqpar_status seqpar_safetensors_expect(const seqpar_safetensors_file *file,
                                                   const seqpar_safetensors_tensor *wanted,
                                                   seqpar_error *error);
/* Succeeds if the file has a tensor of wanted's name, dtype (NONE: any) and shape.
 * Errors: FILE_TENSOR, with both sides printed. */

SEQPAR_DEF int64_t seqpar_safetensors_metadata_count(const seqpar_safetensors_file *file);
SEQPAR_DEF const seqpar_safetensors_pair *seqpar_safetensors_metadata_at(
    const seqpar_safetensors_file *file, int64_t index);
/* The entries of __metadata__, sorted by key, index from 0; NULL past the end. Valid until
   close. */

SEQPAR_DEF const char *seqpar_safetensors_metadata(const seqpar_safetensors_file *file,
                                                   const char *key);
/* The value of that key in __metadata__, or NULL. Valid until close. */

/* Which elements to read, counted row by row as they lie in the file. */
typedef struct seqpar_safetensors_part {
    const char *name;
    int64_t first;
    int64_t count; /* reads exactly this many; may be 0, since a rank's share may be empty */
    int finite;    /* 1: refuse NaN and Inf; 0: let them through. Integers always pass. */
} seqpar_safetensors_part;

SEQPAR_DEF seqpar_safetensors_part
seqpar_safetensors_whole(const seqpar_safetensors_tensor *tensor);
/* All elements of the tensor, with finite = 0. */

SEQPAR_DEF seqpar_status seqpar_safetensors_read(seqpar_safetensors_file *file, void *out,
                                                 const seqpar_safetensors_part *part,
                                                 seqpar_error *error);
/* out: (part->count) elements of the tensor's own dtype, in the caller's memory.
 * After an error the contents of out are unspecified.
 * Errors: FILE_TENSOR (no such tensor, or part not inside it), FILE_READ, NOT_FINITE. */

SEQPAR_DEF seqpar_status seqpar_safetensors_read_f32(seqpar_safetensors_file *file, float *out,
                                                     const seqpar_safetensors_part *part,
                                                     seqpar_error *error);
SEQPAR_DEF seqpar_status seqpar_safetensors_read_f64(seqpar_safetensors_file *file, double *out,
                                                     const seqpar_safetensors_part *part,
                                                     seqpar_error *error);
/* out: (part->count). Like seqpar_safetensors_read, but converts tensors of F64, F32, F16 or
 * BF16 to float or double. The conversion is exact, except that it rounds F64 to the nearest
 * float. A finite double beyond the range of float is refused, even if part->finite is 0.
 * Errors: as seqpar_safetensors_read; FILE_TENSOR also for integers and BOOL. */

/* ---- writing */

/* What is to be written. Nothing in it needs to live longer than the call it is given to. */
typedef struct seqpar_safetensors_desc {
    const char *path;
    /* (count) in the order in which their bytes will be appended */
    const seqpar_safetensors_tensor *tensors;
    int64_t count;
    const seqpar_safetensors_pair *metadata; /* (metadata_count) */
    int64_t metadata_count;
} seqpar_safetensors_desc;

SEQPAR_DEF seqpar_status seqpar_safetensors_create(seqpar_safetensors_writer **writer,
                                                   const seqpar_safetensors_desc *desc,
                                                   seqpar_error *error);
/* Checks the list, opens `path.tmp.<pid>` (with a number appended if that name is taken) and
 * writes the header. The caller chooses the order of the tensors; readers that map the file
 * prefer wide dtypes first. On success *writer must be passed to finish or abort. Otherwise
 * *writer is NULL: abort ignores it, and finish returns FILE_WRITE.
 * Errors: FILE_TENSOR, FILE_FORMAT (metadata, header too long), FILE_OPEN, FILE_WRITE,
 * MEMORY. */

SEQPAR_DEF seqpar_status seqpar_safetensors_append(seqpar_safetensors_writer *writer,
                                                   const char *name, const void *data,
                                                   int64_t bytes, seqpar_error *error);
/* Writes the next `bytes` bytes of tensor `name`, which must be the first tensor of the list
 * that is not complete. The name makes a wrong order an error instead of a wrong file.
 * `bytes` may be 0, with any name.
 * An error removes the temporary file, and all later calls with this writer fail. finish or
 * abort still frees it. So it is enough to check what finish returns.
 * Errors: FILE_TENSOR (wrong tensor, too many bytes), FILE_WRITE. */

SEQPAR_DEF seqpar_status seqpar_safetensors_finish(seqpar_safetensors_writer *writer,
                                                   seqpar_error *error);
/* Flushes, syncs, closes and renames; on success the file at `path` is the new one, on any
 * error the old one. The folder is synced too where the system allows it. Frees the writer in
 * either case. Errors: FILE_TENSOR (bytes still missing), FILE_WRITE. */

SEQPAR_DEF void seqpar_safetensors_abort(seqpar_safetensors_writer *writer);
/* Removes the temporary file and frees the writer. NULL is fine. */

SEQPAR_DEF seqpar_status seqpar_safetensors_save(const seqpar_safetensors_desc *desc,
                                                 const void *const *data, seqpar_error *error);
/* Creates, appends and finishes, for tensors in memory. data: (desc->count) pointers, each to a
   whole tensor. */

SEQPAR_DEF seqpar_status seqpar_file_write_atomic(const char *path, const void *data,
                                                  int64_t bytes, seqpar_error *error);
/* Writes any small file, such as config.json, atomically, in the same way.
 * Errors: FILE_OPEN, FILE_WRITE, MEMORY. */

#ifdef __cplusplus
}
#endif
#endif /* SEQPAR_SAFETENSORS_H */

/* Everything below is implementation. */

#if defined(SEQPAR_SAFETENSORS_IMPLEMENTATION) && !defined(SEQPAR__SAFETENSORS_IMPLEMENTED)
#define SEQPAR__SAFETENSORS_IMPLEMENTED

#ifdef _WIN32
#error \
    "seqpar_safetensors.h needs POSIX files (fsync, rename over an existing file); leave it out on Windows"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error \
    "seqpar_safetensors.h reads little-endian bytes as they are; it has no byte swapping for this machine"
#endif

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#if defined(__GLIBC__) && !defined(__USE_XOPEN2K8)
#error \
    "seqpar_safetensors.h: include it before system headers, or compile with -D_POSIX_C_SOURCE=200809L"
#endif

#ifndef SEQPAR_MALLOC
#define SEQPAR_MALLOC(size) malloc(size)
#define SEQPAR_FREE(ptr)    free(ptr)
#endif

typedef char
    seqpar__st_off_t_is_too_small_define_FILE_OFFSET_BITS_64[sizeof(off_t) >= 8 ? 1 : -1];

struct seqpar_safetensors_file {
    FILE *stream;
    char *path;
    int64_t bytes;      /* of the whole file */
    int64_t data_start; /* where the data begins in it */
    cJSON *json;        /* the header; owns every name, key and value handed out */
    seqpar_safetensors_tensor *tensors;        /* (count) in the order of the header */
    const seqpar_safetensors_tensor **by_name; /* (count) sorted */
    int64_t count;
    /* (metadata_count) sorted by key; NULL if there is none */
    seqpar_safetensors_pair *metadata;
    int64_t metadata_count;
};

/* >>text -------------------------------------------------------- memory, and error messages */

#define SEQPAR__ST_SHOWN \
    100 /* bytes of a path or name that an error shows, so that the values fit too */

/* Zeroed memory; never NULL for a count of 0, so that NULL always means failure. */
static void *seqpar__st_new(int64_t count, size_t each) {
    size_t bytes = count > 0 ? (size_t)count * each : 1;
    void *memory = count >= 0 && (uint64_t)count <= SIZE_MAX / each ? SEQPAR_MALLOC(bytes)
                                                                    : NULL;

    return memory ? memset(memory, 0, bytes) : NULL;
}

static void seqpar__st_free(void *memory) {
    if (memory) SEQPAR_FREE(memory);
}

static int seqpar__st_is_continuation(char byte) {
    return ((unsigned char)byte & 0xC0) == 0x80;
}

/* Shortens a text for an error, so that the values fit too. Cuts between characters; cuts a
 * path in front, because its end tells more. Returns `shown`, which has SEQPAR__ST_SHOWN + 4
 * bytes. seqpar_fail escapes the text. */
static const char *seqpar__st_show(char *shown, const char *text, int is_path) {
    size_t length = strlen(text), from = 0, to = length, used;

    if (length > SEQPAR__ST_SHOWN && is_path)
        for (from = length - SEQPAR__ST_SHOWN; seqpar__st_is_continuation(text[from]); from++) {
        }
    if (length > SEQPAR__ST_SHOWN && !is_path)
        for (to = SEQPAR__ST_SHOWN; to > 0 && seqpar__st_is_continuation(text[to]); to--) {
        }
    memcpy(shown, "...", 3);
    used = from > 0 ? 3 : 0;
    memcpy(shown + used, text + from, to - from);
    used += to - from;
    memcpy(shown + used, to < length ? "..." : "", to < length ? 4 : 1);
    return shown;
}

/* Writes "path: tensor "name": what". name NULL: the error is not about one tensor. */
#ifdef __GNUC__
__attribute__((format(printf, 5, 6)))
#endif
static seqpar_status
seqpar__st_fail(seqpar_error *error, seqpar_status status, const char *path, const char *name,
                const char *format, ...) {
    char shown_path[SEQPAR__ST_SHOWN + 4], shown_name[SEQPAR__ST_SHOWN + 4], what[292];
    va_list values;

    va_start(values, format);
    vsnprintf(what, sizeof what, format, values);
    va_end(values);
    seqpar__st_show(shown_path, path, 1);
    if (!name) return seqpar_fail(error, status, "%s: %s", shown_path, what);
    return seqpar_fail(error, status, "%s: tensor \"%s\": %s", shown_path,
                       seqpar__st_show(shown_name, name, 0), what);
}

static seqpar_status seqpar__st_no_memory(seqpar_error *error, const char *path) {
    return seqpar__st_fail(
        error, SEQPAR_ERR_MEMORY, path, NULL,
        "SEQPAR_MALLOC returned NULL while the header was being handled; free memory");
}

/* Every broken rule of the format ends in the same advice. */
#define SEQPAR__ST_BAD \
    "; the file is damaged or was written wrongly, get it again or write it again"

#define seqpar__st_bad(error, file, name, ...) \
    seqpar__st_fail(error, SEQPAR_ERR_FILE_FORMAT, (file)->path, name, __VA_ARGS__)

/* >>dtype ----------------------------------------------------------------- dtypes and sizes */

typedef struct seqpar__st_dtype_row {
    const char *name;
    int64_t bytes;
} seqpar__st_dtype_row;

static const seqpar__st_dtype_row seqpar__st_dtypes[SEQPAR_SAFETENSORS_DTYPE_COUNT] = {
    {"NONE", 0},
#define SEQPAR_SAFETENSORS_X(name, bytes) {#name, bytes},
    SEQPAR_SAFETENSORS_DTYPES(SEQPAR_SAFETENSORS_X)
#undef SEQPAR_SAFETENSORS_X
};

static const seqpar__st_dtype_row *seqpar__st_dtype(seqpar_safetensors_dtype dtype) {
    int row = (int)dtype;

    return &seqpar__st_dtypes[row > 0 && row < SEQPAR_SAFETENSORS_DTYPE_COUNT ? row : 0];
}

SEQPAR_DEF const char *seqpar_safetensors_dtype_name(seqpar_safetensors_dtype dtype) {
    return seqpar__st_dtype(dtype)->name;
}

SEQPAR_DEF int64_t seqpar_safetensors_dtype_bytes(seqpar_safetensors_dtype dtype) {
    return seqpar__st_dtype(dtype)->bytes;
}

static seqpar_safetensors_dtype seqpar__st_dtype_by_name(const char *name) {
    for (int row = 1; row < SEQPAR_SAFETENSORS_DTYPE_COUNT; row++)
        if (strcmp(name, seqpar__st_dtypes[row].name) == 0)
            return (seqpar_safetensors_dtype)row;
    return SEQPAR_SAFETENSORS_NONE;
}

static float seqpar__st_float_from_bits(uint32_t bits) {
    float value;

    memcpy(&value, &bits, sizeof value);
    return value;
}

SEQPAR_DEF float seqpar_safetensors_bf16_to_f32(uint16_t bits) {
    return seqpar__st_float_from_bits((uint32_t)bits << 16);
}

SEQPAR_DEF float seqpar_safetensors_f16_to_f32(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits >> 15) << 31, exponent = bits >> 10 & 31u;
    uint32_t mantissa = bits & 1023u;
    float subnormal = (float)mantissa / 16777216.0f; /* mantissa * 2^-24, zero included */

    if (exponent == 31) return seqpar__st_float_from_bits(sign | 0x7F800000u | mantissa << 13);
    if (exponent > 0) /* the biases are 15 and 127 */
        return seqpar__st_float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    return sign ? -subnormal : subnormal;
}

SEQPAR_DEF uint16_t seqpar_safetensors_f32_to_f16(float x) {
    uint32_t bits, sign;
    float small;

    memcpy(&bits, &x, sizeof bits);
    sign = bits >> 16 & 0x8000u;
    bits &= 0x7FFFFFFFu;
    if (bits > 0x7F800000u) return (uint16_t)(sign | 0x7E00u);  /* not a number */
    if (bits >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u); /* 65520 */
    if (bits >= 0x38800000u) /* from 2^-14: round the mantissa from 23 bits to 10 */
        return (uint16_t)(sign | ((bits + 0xFFFu + (bits >> 13 & 1u) - 0x38000000u) >> 13));
    /* A subnormal half is a multiple of 2^-24. Scale by 2^24, which adds 24 to the exponent.
       Then adding 2^23 rounds to an integer, since floats have no fraction from 2^23 on.
       Subnormal floats are far below half of 2^-24, so they become 0 */
    bits = bits < 0x00800000u ? 0 : bits + (24u << 23);
    small = seqpar__st_float_from_bits(bits) + 8388608.0f;
    return (uint16_t)(sign | (uint32_t)(small - 8388608.0f));
}

/* Sets count and bytes. Returns 0 if they do not fit into int64_t. */
static int seqpar__st_measure(seqpar_safetensors_tensor *tensor) {
    int64_t each = seqpar_safetensors_dtype_bytes(tensor->dtype);

    tensor->count = 1;
    for (int64_t i = 0; i < tensor->dims; i++) {
        if (tensor->shape[i] > 0 && tensor->count > INT64_MAX / each / tensor->shape[i])
            return 0;
        tensor->count *= tensor->shape[i];
    }
    tensor->bytes = tensor->count * each;
    return 1;
}

/* "F32 [2, 3]", cut off if it is very long; `shown` has 128 bytes. */
static const char *seqpar__st_show_shape(char *shown, const seqpar_safetensors_tensor *tensor) {
    int used = snprintf(shown, 128, "%s [", seqpar_safetensors_dtype_name(tensor->dtype));

    for (int64_t i = 0; i < tensor->dims && i < SEQPAR_SAFETENSORS_MAX_DIMS && used < 100; i++)
        used += snprintf(shown + used, (size_t)(128 - used), "%s%lld", i ? ", " : "",
                         (long long)tensor->shape[i]);
    snprintf(shown + used, (size_t)(128 - used), "]");
    return shown;
}

static int seqpar__st_order_by_name(const void *a, const void *b) {
    return strcmp((*(const seqpar_safetensors_tensor *const *)a)->name,
                  (*(const seqpar_safetensors_tensor *const *)b)->name);
}

static int seqpar__st_order_by_key(const void *a, const void *b) {
    return strcmp(((const seqpar_safetensors_pair *)a)->key,
                  ((const seqpar_safetensors_pair *)b)->key);
}

/* At equal offsets, empty tensors come first: behind another one they would seem to overlap. */
static int seqpar__st_order_by_offset(const void *a, const void *b) {
    const seqpar_safetensors_tensor *x = *(const seqpar_safetensors_tensor *const *)a;
    const seqpar_safetensors_tensor *y = *(const seqpar_safetensors_tensor *const *)b;

    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* Pointers to the tensors (count), sorted; NULL if memory ran out. */
static const seqpar_safetensors_tensor **seqpar__st_sorted(
    const seqpar_safetensors_tensor *tensors, int64_t count,
    int (*order)(const void *, const void *)) {
    const seqpar_safetensors_tensor **sorted =
        (const seqpar_safetensors_tensor **)seqpar__st_new(count, sizeof *sorted);

    for (int64_t i = 0; sorted && i < count; i++) sorted[i] = &tensors[i];
    if (sorted && count > 1) qsort((void *)sorted, (size_t)count, sizeof *sorted, order);
    return sorted;
}

/* The first name that occurs twice, or NULL. */
static const char *seqpar__st_twice_name(const seqpar_safetensors_tensor *const *by_name,
                                         int64_t count) {
    for (int64_t i = 1; i < count; i++)
        if (strcmp(by_name[i - 1]->name, by_name[i]->name) == 0) return by_name[i]->name;
    return NULL;
}

static const char *seqpar__st_twice_key(const seqpar_safetensors_pair *by_key, int64_t count) {
    for (int64_t i = 1; i < count; i++)
        if (strcmp(by_key[i - 1].key, by_key[i].key) == 0) return by_key[i].key;
    return NULL;
}

/* >>scan --------------------------------------------------------------------------------------
 *
 * Refuses what the format forbids but cJSON accepts: bytes that are not UTF-8, control
 * characters, \u0000 and \uZZZZ (which would cut a name short), and numbers such as 1.0, 1e3 or
 * 007. Negative numbers pass: >>parse refuses them, since it knows the tensor they belong to.
 */

typedef struct seqpar__st_cursor {
    const seqpar_safetensors_file *file;
    const char *text; /* (bytes) and a NUL */
    int64_t bytes;
    int64_t at;
} seqpar__st_cursor;

static int seqpar__st_is_utf8(const char *text) {
    int64_t left = (int64_t)strlen(text), length;

    for (; left > 0; text += length, left -= length)
        if ((length = seqpar__utf8_length(text, left)) == 0) return 0;
    return 1;
}

/* Called at a backslash. Moves past an escaped quote or backslash, or past \u with four digits;
   else past the backslash alone. cJSON refuses escapes that JSON does not have. */
static seqpar_status seqpar__st_scan_escape(seqpar__st_cursor *c, seqpar_error *error) {
    const char *escape = c->text + c->at;
    size_t digits;

    if (escape[1] != 'u') {
        c->at += escape[1] == '"' || escape[1] == '\\' ? 2 : 1;
        return 0;
    }
    digits = strspn(escape + 2, "0123456789abcdefABCDEF");
    if (digits < 4 || memcmp(escape + 2, "0000", 4) == 0)
        return seqpar__st_bad(
            error, c->file, NULL, "the escape \\u at byte %lld of the header %s" SEQPAR__ST_BAD,
            (long long)c->at,
            digits < 4 ? "lacks its four digits" : "is a NUL, which would end the name");
    c->at += 6;
    return 0;
}

/* Called at an opening quote. Moves past the closing quote; cJSON refuses a header without. */
static seqpar_status seqpar__st_scan_string(seqpar__st_cursor *c, seqpar_error *error) {
    seqpar_status status = 0;

    for (c->at++; !status && c->at < c->bytes && c->text[c->at] != '"';) {
        int64_t length = seqpar__utf8_length(c->text + c->at, c->bytes - c->at);
        unsigned byte = (unsigned char)c->text[c->at];

        if (length == 0 || byte < 0x20)
            return seqpar__st_bad(
                error, c->file, NULL,
                "byte %lld of the header, 0x%02x, is %s inside a string" SEQPAR__ST_BAD,
                (long long)c->at, byte, length ? "a control character" : "not UTF-8");
        if (byte == '\\')
            status = seqpar__st_scan_escape(c, error);
        else
            c->at += length;
    }
    c->at++;
    return status;
}

/* Called at a number. Moves past it. The limit of 19 characters is more than any size needs,
   and less than the length at which cJSON cuts a number off. */
static seqpar_status seqpar__st_scan_number(seqpar__st_cursor *c, seqpar_error *error) {
    const char *number = c->text + c->at;
    size_t length = strspn(number, "0123456789+-.eE"), sign = number[0] == '-';
    size_t digits = strspn(number + sign, "0123456789");

    if (sign + digits < length || length > 19 || (digits > 1 && number[sign] == '0'))
        return seqpar__st_bad(
            error, c->file, NULL,
            "the number %.*s at byte %lld of the header is not a whole number in plain "
            "digits" SEQPAR__ST_BAD,
            (int)(length < 40 ? length : 40), number, (long long)c->at);
    c->at += (int64_t)length;
    return 0;
}

static seqpar_status seqpar__st_scan(const seqpar_safetensors_file *file, const char *header,
                                     seqpar_error *error) {
    seqpar__st_cursor c = {file, header, file->data_start - 8, 0};
    seqpar_status status = 0;

    while (!status && c.at < c.bytes) {
        char byte = header[c.at];

        if (byte == '"')
            status = seqpar__st_scan_string(&c, error);
        else if (byte == '-' || (byte >= '0' && byte <= '9'))
            status = seqpar__st_scan_number(&c, error);
        else if ((unsigned char)byte < 0x20 && byte != '\t' && byte != '\n' && byte != '\r')
            return seqpar__st_bad(error, file, NULL,
                                  "byte %lld of the header is the control character "
                                  "0x%02x" SEQPAR__ST_BAD,
                                  (long long)c.at, (unsigned)byte);
        else
            c.at++;
    }
    return status;
}

/* >>parse --------------------------------------------------- from JSON to tensors and pairs */

/* Accepts 0 to 2^53 - 1: cJSON stores numbers as doubles, which are exact for integers in this
 * range. seqpar__st_scan has checked that the number is an integer. */
static int seqpar__st_is_size(const cJSON *item, int64_t *size) {
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0) ||
        !(item->valuedouble < 9007199254740992.0))
        return 0;
    *size = (int64_t)item->valuedouble;
    return 1;
}

/* A JSON value in a few words; `shown` has SEQPAR__ST_SHOWN + 4 bytes. */
static const char *seqpar__st_show_json(char *shown, const cJSON *item) {
    if (cJSON_IsString(item)) return seqpar__st_show(shown, item->valuestring, 0);
    if (cJSON_IsNumber(item))
        snprintf(shown, SEQPAR__ST_SHOWN, "%.17g", item->valuedouble);
    else
        snprintf(shown, SEQPAR__ST_SHOWN, "%s",
                 cJSON_IsNull(item)     ? "null"
                 : cJSON_IsArray(item)  ? "a list"
                 : cJSON_IsObject(item) ? "an object"
                                        : "a truth value");
    return shown;
}

typedef struct seqpar__st_fields {
    const cJSON *dtype, *shape, *offsets;
} seqpar__st_fields;

/* Finds the fields of a tensor: each of the three must occur once, and no other. */
static seqpar_status seqpar__st_parse_fields(const seqpar_safetensors_file *file,
                                             const cJSON *entry, seqpar__st_fields *fields,
                                             seqpar_error *error) {
    char shown[SEQPAR__ST_SHOWN + 4];
    const cJSON *field;

    if (!cJSON_IsObject(entry))
        return seqpar__st_bad(error, file, entry->string,
                              "is %s where {dtype, shape, data_offsets} belongs" SEQPAR__ST_BAD,
                              seqpar__st_show_json(shown, entry));
    cJSON_ArrayForEach(field, entry) {
        const cJSON **slot = strcmp(field->string, "dtype") == 0          ? &fields->dtype
                             : strcmp(field->string, "shape") == 0        ? &fields->shape
                             : strcmp(field->string, "data_offsets") == 0 ? &fields->offsets
                                                                          : NULL;

        if (!slot || *slot)
            return seqpar__st_bad(error, file, entry->string, "field \"%s\" %s" SEQPAR__ST_BAD,
                                  seqpar__st_show(shown, field->string, 0),
                                  slot ? "comes twice" : "is not part of the format");
        *slot = field;
    }
    if (!fields->dtype || !fields->shape || !fields->offsets)
        return seqpar__st_bad(error, file, entry->string,
                              "field \"%s\" is missing" SEQPAR__ST_BAD,
                              !fields->dtype   ? "dtype"
                              : !fields->shape ? "shape"
                                               : "data_offsets");
    return 0;
}

static seqpar_status seqpar__st_parse_dtype(const seqpar_safetensors_file *file,
                                            const cJSON *dtype,
                                            seqpar_safetensors_tensor *tensor,
                                            seqpar_error *error) {
    char shown[SEQPAR__ST_SHOWN + 4];

    if (cJSON_IsString(dtype)) tensor->dtype = seqpar__st_dtype_by_name(dtype->valuestring);
    if (tensor->dtype) return 0;
    return seqpar__st_bad(error, file, tensor->name,
                          "dtype %s is none of BOOL U8 I8 U16 I16 F16 BF16 U32 "
                          "I32 F32 U64 I64 F64; convert the file to one of these",
                          seqpar__st_show_json(shown, dtype));
}

static seqpar_status seqpar__st_parse_shape(const seqpar_safetensors_file *file,
                                            const cJSON *shape,
                                            seqpar_safetensors_tensor *tensor,
                                            seqpar_error *error) {
    char shown[SEQPAR__ST_SHOWN + 4];
    const cJSON *size;

    if (!cJSON_IsArray(shape))
        return seqpar__st_bad(error, file, tensor->name,
                              "shape is %s, not a list of sizes" SEQPAR__ST_BAD,
                              seqpar__st_show_json(shown, shape));
    cJSON_ArrayForEach(size, shape) {
        if (tensor->dims == SEQPAR_SAFETENSORS_MAX_DIMS)
            return seqpar__st_bad(error, file, tensor->name,
                                  "has %d dimensions, more than the %d that are "
                                  "supported; reshape it",
                                  cJSON_GetArraySize(shape), SEQPAR_SAFETENSORS_MAX_DIMS);
        if (!seqpar__st_is_size(size, &tensor->shape[tensor->dims]))
            return seqpar__st_bad(error, file, tensor->name,
                                  "shape[%lld] is %s, not a size from 0 to "
                                  "2^53 - 1" SEQPAR__ST_BAD,
                                  (long long)tensor->dims, seqpar__st_show_json(shown, size));
        tensor->dims++;
    }
    return 0;
}

static seqpar_status seqpar__st_parse_offsets(const seqpar_safetensors_file *file,
                                              const cJSON *offsets,
                                              seqpar_safetensors_tensor *tensor,
                                              seqpar_error *error) {
    char shown[128], begin_shown[SEQPAR__ST_SHOWN + 4], end_shown[SEQPAR__ST_SHOWN + 4];
    const cJSON *begin = cJSON_IsArray(offsets) ? offsets->child : NULL,
                *end = begin ? begin->next : NULL;
    int64_t stop, data_bytes = file->bytes - file->data_start;

    if (!end || end->next)
        return seqpar__st_bad(error, file, tensor->name,
                              "data_offsets is not a list of two offsets, "
                              "begin and end" SEQPAR__ST_BAD);
    if (!seqpar__st_is_size(begin, &tensor->offset) || !seqpar__st_is_size(end, &stop) ||
        tensor->offset > stop)
        return seqpar__st_bad(error, file, tensor->name,
                              "data_offsets [%s, %s] are not a begin and an end "
                              "from 0 to 2^53 - 1" SEQPAR__ST_BAD,
                              seqpar__st_show_json(begin_shown, begin),
                              seqpar__st_show_json(end_shown, end));
    if (stop > data_bytes)
        return seqpar__st_bad(error, file, tensor->name,
                              "ends at data byte %lld, but the file has only %lld "
                              "bytes of data; it was cut off, get it again",
                              (long long)stop, (long long)data_bytes);
    if (!seqpar__st_measure(tensor))
        return seqpar__st_bad(error, file, tensor->name,
                              "%s has more than 2^63 - 1 bytes" SEQPAR__ST_BAD,
                              seqpar__st_show_shape(shown, tensor));
    if (stop - tensor->offset != tensor->bytes)
        return seqpar__st_bad(error, file, tensor->name,
                              "%s takes %lld bytes, but data_offsets [%lld, %lld] "
                              "hold %lld" SEQPAR__ST_BAD,
                              seqpar__st_show_shape(shown, tensor), (long long)tensor->bytes,
                              (long long)tensor->offset, (long long)stop,
                              (long long)(stop - tensor->offset));
    return 0;
}

static seqpar_status seqpar__st_parse_tensor(const seqpar_safetensors_file *file,
                                             const cJSON *entry,
                                             seqpar_safetensors_tensor *tensor,
                                             seqpar_error *error) {
    seqpar__st_fields fields = {NULL, NULL, NULL};
    seqpar_status status = seqpar__st_parse_fields(file, entry, &fields, error);

    tensor->name = entry->string;
    if (!status) status = seqpar__st_parse_dtype(file, fields.dtype, tensor, error);
    if (!status) status = seqpar__st_parse_shape(file, fields.shape, tensor, error);
    if (!status) status = seqpar__st_parse_offsets(file, fields.offsets, tensor, error);
    return status;
}

static seqpar_status seqpar__st_parse_metadata(seqpar_safetensors_file *file,
                                               const cJSON *entry, seqpar_error *error) {
    char shown[SEQPAR__ST_SHOWN + 4], shown_key[SEQPAR__ST_SHOWN + 4];
    const char *twice;
    const cJSON *item;

    if (file->metadata)
        return seqpar__st_bad(error, file, NULL, "__metadata__ comes twice" SEQPAR__ST_BAD);
    if (!cJSON_IsObject(entry))
        return seqpar__st_bad(error, file, NULL,
                              "__metadata__ is %s, not an object of strings" SEQPAR__ST_BAD,
                              seqpar__st_show_json(shown, entry));
    file->metadata = (seqpar_safetensors_pair *)seqpar__st_new(cJSON_GetArraySize(entry),
                                                               sizeof *file->metadata);
    if (!file->metadata) return seqpar__st_no_memory(error, file->path);
    cJSON_ArrayForEach(item, entry) {
        if (!cJSON_IsString(item))
            return seqpar__st_bad(
                error, file, NULL, "__metadata__ \"%s\" is %s, not a string" SEQPAR__ST_BAD,
                seqpar__st_show(shown_key, item->string, 0), seqpar__st_show_json(shown, item));
        file->metadata[file->metadata_count].key = item->string;
        file->metadata[file->metadata_count++].value = item->valuestring;
    }
    qsort(file->metadata, (size_t)file->metadata_count, sizeof *file->metadata,
          seqpar__st_order_by_key);
    twice = seqpar__st_twice_key(file->metadata, file->metadata_count);
    return !twice ? 0
                  : seqpar__st_bad(error, file, NULL,
                                   "__metadata__ has the key \"%s\" twice" SEQPAR__ST_BAD,
                                   seqpar__st_show(shown_key, twice, 0));
}

static seqpar_status seqpar__st_parse(seqpar_safetensors_file *file, const char *header,
                                      seqpar_error *error) {
    const char *end = NULL;
    const cJSON *entry;
    seqpar_status status = 0;

    if (header[0] != '{')
        return seqpar__st_bad(error, file, NULL,
                              "the header does not begin with '{'; this is no safetensors "
                              "file");
    file->json = cJSON_ParseWithOpts(header, &end, 0);
    if (!file->json || end[strspn(end, " \t\r\n")] != '\0')
        return seqpar__st_bad(
            error, file, NULL,
            "the header is not JSON from byte %lld on, or memory ran out" SEQPAR__ST_BAD,
            (long long)(end - header));
    file->tensors = (seqpar_safetensors_tensor *)seqpar__st_new(cJSON_GetArraySize(file->json),
                                                                sizeof *file->tensors);
    if (!file->tensors) return seqpar__st_no_memory(error, file->path);
    for (entry = file->json->child; entry && !status; entry = entry->next)
        status = strcmp(entry->string, "__metadata__") == 0
                     ? seqpar__st_parse_metadata(file, entry, error)
                     : seqpar__st_parse_tensor(file, entry, &file->tensors[file->count++],
                                               error);
    return status;
}

/* >>layout -------------------------------- checks of the names and offsets of all tensors */

static seqpar_status seqpar__st_check_names(seqpar_safetensors_file *file,
                                            seqpar_error *error) {
    const char *twice;

    file->by_name = seqpar__st_sorted(file->tensors, file->count, seqpar__st_order_by_name);
    if (!file->by_name) return seqpar__st_no_memory(error, file->path);
    twice = seqpar__st_twice_name(file->by_name, file->count);
    return !twice ? 0 : seqpar__st_bad(error, file, twice, "comes twice" SEQPAR__ST_BAD);
}

/* In the order of their offsets each tensor must begin where the one before it ended. */
static seqpar_status seqpar__st_check_joints(const seqpar_safetensors_file *file,
                                             const seqpar_safetensors_tensor *const *by_offset,
                                             seqpar_error *error) {
    char shown[SEQPAR__ST_SHOWN + 4];
    int64_t end = 0, data_bytes = file->bytes - file->data_start;

    for (int64_t i = 0; i < file->count; i++) {
        const seqpar_safetensors_tensor *tensor = by_offset[i];

        if (tensor->offset < end)
            return seqpar__st_bad(error, file, tensor->name,
                                  "begins at data byte %lld, inside tensor "
                                  "\"%s\", which ends at %lld" SEQPAR__ST_BAD,
                                  (long long)tensor->offset,
                                  seqpar__st_show(shown, by_offset[i - 1]->name, 0),
                                  (long long)end);
        if (tensor->offset > end)
            return seqpar__st_bad(error, file, tensor->name,
                                  "begins at data byte %lld, but the %lld bytes "
                                  "from %lld on belong to no tensor" SEQPAR__ST_BAD,
                                  (long long)tensor->offset, (long long)(tensor->offset - end),
                                  (long long)end);
        end = tensor->offset + tensor->bytes;
    }
    if (end < data_bytes)
        return seqpar__st_bad(error, file, NULL,
                              "the last %lld bytes of the file, from data byte %lld on, "
                              "belong to no tensor" SEQPAR__ST_BAD,
                              (long long)(data_bytes - end), (long long)end);
    return 0;
}

static seqpar_status seqpar__st_check_layout(const seqpar_safetensors_file *file,
                                             seqpar_error *error) {
    const seqpar_safetensors_tensor **by_offset = seqpar__st_sorted(file->tensors, file->count,
                                                                    seqpar__st_order_by_offset);
    seqpar_status status = by_offset ? seqpar__st_check_joints(file, by_offset, error)
                                     : seqpar__st_no_memory(error, file->path);

    seqpar__st_free((void *)by_offset);
    return status;
}

/* >>open ------------------------------------------------------------------ open and look up */

/* O_NONBLOCK, or else opening a FIFO that nobody writes to would hang. */
static seqpar_status seqpar__st_open_stream(seqpar_safetensors_file *file,
                                            seqpar_error *error) {
    struct stat about;
    int descriptor = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const char *trouble = descriptor < 0 || fstat(descriptor, &about) != 0 ? strerror(errno)
                          : S_ISREG(about.st_mode)                         ? NULL
                                                   : "it is not a regular file";

    if (!trouble && !(file->stream = fdopen(descriptor, "rb"))) trouble = strerror(errno);
    if (trouble) {
        if (descriptor >= 0) close(descriptor);
        return seqpar__st_fail(error, SEQPAR_ERR_FILE_OPEN, file->path, NULL,
                               "cannot be opened for reading (%s); check the path", trouble);
    }
    file->bytes = (int64_t)about.st_size;
    return 0;
}

/* Reads the header's length; checks it against the limit and the size of the file. */
static seqpar_status seqpar__st_read_length(seqpar_safetensors_file *file,
                                            seqpar_error *error) {
    unsigned char prefix[8];
    uint64_t length = 0;

    if (file->bytes < 8)
        return seqpar__st_bad(error, file, NULL,
                              "has %lld bytes, fewer than the 8 of the header's length; "
                              "it was cut off, get it again",
                              (long long)file->bytes);
    if (fread(prefix, 1, 8, file->stream) != 8)
        return seqpar__st_fail(error, SEQPAR_ERR_FILE_READ, file->path, NULL,
                               "the first 8 bytes cannot be read (%s); check the disk",
                               strerror(errno));
    for (int i = 8; i-- > 0;) length = length << 8 | prefix[i];
    if (length > SEQPAR_SAFETENSORS_MAX_HEADER)
        return seqpar__st_bad(error, file, NULL,
                              "says its header has %llu bytes, more than the %d allowed; "
                              "this is no safetensors file, or it is damaged",
                              (unsigned long long)length, SEQPAR_SAFETENSORS_MAX_HEADER);
    if ((int64_t)length > file->bytes - 8)
        return seqpar__st_bad(error, file, NULL,
                              "says its header has %llu bytes, but only %lld follow; it "
                              "was cut off, get it again",
                              (unsigned long long)length, (long long)(file->bytes - 8));
    file->data_start = 8 + (int64_t)length;
    return 0;
}

/* Reads the header and appends a NUL. The caller frees *header, also after an error. */
static seqpar_status seqpar__st_read_header(seqpar_safetensors_file *file, char **header,
                                            seqpar_error *error) {
    seqpar_status status = seqpar__st_read_length(file, error);
    int64_t bytes = file->data_start - 8;

    if (status) return status;
    *header = (char *)seqpar__st_new(bytes + 1, 1);
    if (!*header) return seqpar__st_no_memory(error, file->path);
    if ((int64_t)fread(*header, 1, (size_t)bytes, file->stream) != bytes)
        return seqpar__st_fail(error, SEQPAR_ERR_FILE_READ, file->path, NULL,
                               "its header of %lld bytes cannot be read (%s); check the disk",
                               (long long)bytes, strerror(errno));
    return 0;
}

static seqpar_status seqpar__st_load(seqpar_safetensors_file *file, seqpar_error *error) {
    char *header = NULL;
    seqpar_status status = seqpar__st_open_stream(file, error);

    if (!status) status = seqpar__st_read_header(file, &header, error);
    if (!status) status = seqpar__st_scan(file, header, error);
    if (!status) status = seqpar__st_parse(file, header, error);
    if (!status) status = seqpar__st_check_names(file, error);
    if (!status) status = seqpar__st_check_layout(file, error);
    seqpar__st_free(header);
    return status;
}

SEQPAR_DEF seqpar_status seqpar_safetensors_open(seqpar_safetensors_file **file,
                                                 const char *path, seqpar_error *error) {
    SEQPAR_NEED(error, "file", file);
    seqpar_safetensors_file *opened;
    size_t length = path ? strlen(path) + 1 : 0;
    seqpar_status status;

    *file = NULL;
    if (!path)
        return seqpar__st_fail(error, SEQPAR_ERR_FILE_OPEN, "(no path)", NULL,
                               "a path is needed to read from");
    opened = (seqpar_safetensors_file *)seqpar__st_new(1, sizeof *opened);
    if (opened) opened->path = (char *)seqpar__st_new((int64_t)length, 1);
    if (!opened || !opened->path) {
        seqpar__st_free(opened);
        return seqpar__st_no_memory(error, path);
    }
    memcpy(opened->path, path, length);
    status = seqpar__st_load(opened, error);
    if (status)
        seqpar_safetensors_close(opened);
    else
        *file = opened;
    return status;
}

SEQPAR_DEF void seqpar_safetensors_close(seqpar_safetensors_file *file) {
    if (!file) return;
    if (file->stream) fclose(file->stream); /* nothing was written that could be lost */
    cJSON_Delete(file->json);
    seqpar__st_free((void *)file->by_name);
    seqpar__st_free(file->tensors);
    seqpar__st_free(file->metadata);
    seqpar__st_free(file->path);
    seqpar__st_free(file);
}

SEQPAR_DEF int64_t seqpar_safetensors_count(const seqpar_safetensors_file *file) {
    SEQPAR_MUST("file", file);
    return file->count;
}

SEQPAR_DEF const seqpar_safetensors_tensor *seqpar_safetensors_at(
    const seqpar_safetensors_file *file, int64_t index) {
    SEQPAR_MUST("file", file);
    return index >= 0 && index < file->count ? &file->tensors[index] : NULL;
}

SEQPAR_DEF const seqpar_safetensors_tensor *seqpar_safetensors_find(
    const seqpar_safetensors_file *file, const char *name) {
    SEQPAR_MUST("file, name", file, name);
    int64_t low = 0, high = file->count;

    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        int order = strcmp(name, file->by_name[middle]->name);

        if (order == 0) return file->by_name[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

static seqpar_status seqpar__st_absent(const seqpar_safetensors_file *file, const char *name,
                                       seqpar_error *error) {
    char shown[SEQPAR__ST_SHOWN + 4];

    if (file->count == 0)
        return seqpar__st_fail(error, SEQPAR_ERR_FILE_TENSOR, file->path, name,
                               "is not in the file, which has no tensors; check the path");
    return seqpar__st_fail(
        error, SEQPAR_ERR_FILE_TENSOR, file->path, name,
        "is not in the file, which has %lld tensors, the first \"%s\"; check the name",
        (long long)file->count, seqpar__st_show(shown, file->tensors[0].name, 0));
}

SEQPAR_DEF seqpar_status seqpar_safetensors_expect(const seqpar_safetensors_file *file,
                                                   const seqpar_safetensors_tensor *wanted,
                                                   seqpar_error *error) {
    SEQPAR_NEED(error, "file, wanted", file, wanted);
    const seqpar_safetensors_tensor *found = seqpar_safetensors_find(file, wanted->name);
    char found_shown[128], wanted_shown[128];
    int same = found && found->dims == wanted->dims &&
               (!wanted->dtype || wanted->dtype == found->dtype);

    for (int64_t i = 0; same && i < found->dims; i++)
        same = found->shape[i] == wanted->shape[i];
    if (!found) return seqpar__st_absent(file, wanted->name, error);
    if (!same)
        return seqpar__st_fail(error, SEQPAR_ERR_FILE_TENSOR, file->path, wanted->name,
                               "is %s in the file, but %s is wanted; check the configuration",
                               seqpar__st_show_shape(found_shown, found),
                               seqpar__st_show_shape(wanted_shown, wanted) +
                                   (wanted->dtype ? 0 : 5));
    return 0;
}

SEQPAR_DEF int64_t seqpar_safetensors_metadata_count(const seqpar_safetensors_file *file) {
    SEQPAR_MUST("file", file);
    return file->metadata_count;
}

SEQPAR_DEF const seqpar_safetensors_pair *seqpar_safetensors_metadata_at(
    const seqpar_safetensors_file *file, int64_t index) {
    SEQPAR_MUST("file", file);
    return index >= 0 && index < file->metadata_count ? &file->metadata[index] : NULL;
}

SEQPAR_DEF const char *seqpar_safetensors_metadata(const seqpar_safetensors_file *file,
                                                   const char *key) {
    SEQPAR_MUST("file, key", file, key);
    seqpar_safetensors_pair wanted = {key, NULL};
    const seqpar_safetensors_pair *found = NULL;

    if (file->metadata_count > 0)
        found = (const seqpar_safetensors_pair *)bsearch(
            &wanted, file->metadata, (size_t)file->metadata_count, sizeof wanted,
            seqpar__st_order_by_key);
    return found ? found->value : NULL;
}

/* >>read ---------------------------------------------------------------- data to the caller */

SEQPAR_DEF seqpar_safetensors_part
seqpar_safetensors_whole(const seqpar_safetensors_tensor *tensor) {
    seqpar_safetensors_part part = {tensor->name, 0, tensor->count, 0};

    return part;
}

/* Finds the tensor, checks that the part is inside it and moves the file there. */
static seqpar_status seqpar__st_seek(seqpar_safetensors_file *file,
                                     const seqpar_safetensors_part *part,
                                     const seqpar_safetensors_tensor **tensor,
                                     seqpar_error *error) {
    const seqpar_safetensors_tensor *found = seqpar_safetensors_find(file, part->name);
    int64_t each = found ? seqpar_safetensors_dtype_bytes(found->dtype) : 0;

    if (!found) return seqpar__st_absent(file, part->name, error);
    if (part->first < 0 || part->count < 0 || part->count > found->count - part->first)
        return seqpar__st_fail(
            error, SEQPAR_ERR_FILE_TENSOR, file->path, part->name,
            "%lld elements from element %lld on are asked for, but it has %lld; check "
            "first and count",
            (long long)part->count, (long long)part->first, (long long)found->count);
    if (fseeko(file->stream, (off_t)(file->data_start + found->offset + part->first * each),
               SEEK_SET) != 0)
        return seqpar__st_fail(error, SEQPAR_ERR_FILE_READ, file->path, part->name,
                               "its place in the file cannot be reached (%s); check the disk",
                               strerror(errno));
    *tensor = found;
    return 0;
}

/* Reads the next `bytes` bytes of the stream. */
static seqpar_status seqpar__st_take(seqpar_safetensors_file *file, const char *name, void *out,
                                     int64_t bytes, seqpar_error *error) {
    int64_t got = bytes > 0 ? (int64_t)fread(out, 1, (size_t)bytes, file->stream) : 0;

    if (got == bytes) return 0;
    return seqpar__st_fail(
        error, SEQPAR_ERR_FILE_READ, file->path, name,
        "only %lld of %lld bytes can be read (%s); check the disk, or get the file again",
        (long long)got, (long long)bytes,
        ferror(file->stream) ? strerror(errno) : "the file became shorter");
}

/* Returns the exponent's bits in the two highest bytes of an element. Only NaN and Inf have all
 * of them set. In all four formats these two bytes contain the sign and the whole exponent.
 * Returns 0 for dtypes without NaN. */
static unsigned seqpar__st_exponent_mask(seqpar_safetensors_dtype dtype) {
    switch (dtype) {
    case SEQPAR_SAFETENSORS_F16: return 0x7C00;
    case SEQPAR_SAFETENSORS_BF16: return 0x7F80;
    case SEQPAR_SAFETENSORS_F32: return 0x7F80;
    case SEQPAR_SAFETENSORS_F64: return 0x7FF0;
    default: return 0;
    }
}

/* Is any element NaN or Inf? This is fast because it does not look for the position: files have
 * millions of elements, and mostly none is NaN or Inf. */
static int seqpar__st_any_not_finite(const unsigned char *raw, int64_t each, unsigned mask,
                                     int64_t count) {
    int any = 0;
    uint16_t top;

    for (int64_t i = 0; i < count; i++) {
        memcpy(&top, raw + (i + 1) * each - 2, 2);
        any |= (top & mask) == mask;
    }
    return any;
}

/* raw: (count) elements, the first of which is element `first` of the tensor. */
static seqpar_status seqpar__st_refuse_not_finite(const seqpar_safetensors_file *file,
                                                  const seqpar_safetensors_tensor *tensor,
                                                  const unsigned char *raw, int64_t first,
                                                  int64_t count, seqpar_error *error) {
    int64_t each = seqpar_safetensors_dtype_bytes(tensor->dtype);
    unsigned mask = seqpar__st_exponent_mask(tensor->dtype);

    if (!mask || !seqpar__st_any_not_finite(raw, each, mask, count)) return 0;
    for (int64_t i = 0; i < count; i++) {
        const unsigned char *end = raw + (i + 1) * each;
        unsigned top = (unsigned)end[-1] << 8 | end[-2];

        if ((top & mask) == mask)
            return seqpar__st_fail(
                error, SEQPAR_ERR_NOT_FINITE, file->path, tensor->name,
                "element %lld of %lld is NaN or Inf (%s, its high bytes are 0x%04x); take "
                "another file, or look into what wrote this one",
                (long long)(first + i), (long long)tensor->count,
                seqpar_safetensors_dtype_name(tensor->dtype), top);
    }
    return 0;
}

SEQPAR_DEF seqpar_status seqpar_safetensors_read(seqpar_safetensors_file *file, void *out,
                                                 const seqpar_safetensors_part *part,
                                                 seqpar_error *error) {
    SEQPAR_NEED(error, "file, part", file, part);
    SEQPAR_NEED(error, "part->name, out", part->name, SEQPAR_IF(part->count > 0, out));
    const seqpar_safetensors_tensor *tensor = NULL;
    seqpar_status status = seqpar__st_seek(file, part, &tensor, error);

    if (!status)
        status = seqpar__st_take(file, part->name, out,
                                 part->count * seqpar_safetensors_dtype_bytes(tensor->dtype),
                                 error);
    if (!status && part->finite)
        status = seqpar__st_refuse_not_finite(file, tensor, (const unsigned char *)out,
                                              part->first, part->count, error);
    return status;
}

/* Converts F32, BF16 or F16 to float, exactly. out: (count), raw: (count) elements of dtype. */
static void seqpar__st_floats(float *out, const unsigned char *raw,
                              seqpar_safetensors_dtype dtype, int64_t count) {
    uint16_t half;

    if (dtype == SEQPAR_SAFETENSORS_F32) memcpy(out, raw, (size_t)count * 4);
    for (int64_t i = 0; dtype == SEQPAR_SAFETENSORS_BF16 && i < count; i++) {
        memcpy(&half, raw + i * 2, 2);
        out[i] = seqpar_safetensors_bf16_to_f32(half);
    }
    for (int64_t i = 0; dtype == SEQPAR_SAFETENSORS_F16 && i < count; i++) {
        memcpy(&half, raw + i * 2, 2);
        out[i] = seqpar_safetensors_f16_to_f32(half);
    }
}

/* raw: (count) doubles, the first of which is element `first` of the tensor. */
static seqpar_status seqpar__st_narrow(const seqpar_safetensors_file *file,
                                       const seqpar_safetensors_tensor *tensor, float *out,
                                       const unsigned char *raw, int64_t first, int64_t count,
                                       seqpar_error *error) {
    double value;

    for (int64_t i = 0; i < count; i++) {
        memcpy(&value, raw + i * 8, 8);
        out[i] = (float)value;
        if (isinf(out[i]) && !isinf(value))
            return seqpar__st_fail(
                error, SEQPAR_ERR_NOT_FINITE, file->path, tensor->name,
                "element %lld of %lld, %.17g, is beyond the range of float; read it as "
                "double",
                (long long)(first + i), (long long)tensor->count, value);
    }
    return 0;
}

#ifndef SEQPAR__ST_CHUNK
#define SEQPAR__ST_CHUNK 2048 /* elements converted at a time, on the stack */
#endif

/* Converts the part to wide or to narrow (part->count), whichever is not NULL. */
static seqpar_status seqpar__st_read_as(seqpar_safetensors_file *file, double *wide,
                                        float *narrow, const seqpar_safetensors_part *part,
                                        seqpar_error *error) {
    unsigned char raw[SEQPAR__ST_CHUNK * 8];
    float floats[SEQPAR__ST_CHUNK];
    const seqpar_safetensors_tensor *tensor = NULL;
    seqpar_status status = seqpar__st_seek(file, part, &tensor, error);
    int64_t now;

    if (!status && tensor->dtype == (wide ? SEQPAR_SAFETENSORS_F64 : SEQPAR_SAFETENSORS_F32))
        return seqpar_safetensors_read(file, wide ? (void *)wide : (void *)narrow, part, error);
    if (!status && !seqpar__st_exponent_mask(tensor->dtype))
        return seqpar__st_fail(
            error, SEQPAR_ERR_FILE_TENSOR, file->path, part->name,
            "is %s, not a floating-point tensor; read it with seqpar_safetensors_read",
            seqpar_safetensors_dtype_name(tensor->dtype));
    for (int64_t done = 0; !status && done < part->count; done += now) {
        int64_t each = seqpar_safetensors_dtype_bytes(tensor->dtype), left = part->count - done;

        now = left < SEQPAR__ST_CHUNK ? left : SEQPAR__ST_CHUNK;
        status = seqpar__st_take(file, part->name, raw, now * each, error);
        if (!status && part->finite)
            status = seqpar__st_refuse_not_finite(file, tensor, raw, part->first + done, now,
                                                  error);
        if (status) break;
        if (tensor->dtype == SEQPAR_SAFETENSORS_F64)
            status = seqpar__st_narrow(file, tensor, narrow + done, raw, part->first + done,
                                       now, error);
        else
            seqpar__st_floats(narrow ? narrow + done : floats, raw, tensor->dtype, now);
        for (int64_t i = 0; wide && i < now; i++) wide[done + i] = (double)floats[i];
    }
    return status;
}

SEQPAR_DEF seqpar_status seqpar_safetensors_read_f32(seqpar_safetensors_file *file, float *out,
                                                     const seqpar_safetensors_part *part,
                                                     seqpar_error *error) {
    SEQPAR_NEED(error, "file, part", file, part);
    SEQPAR_NEED(error, "part->name, out", part->name, SEQPAR_IF(part->count > 0, out));
    return seqpar__st_read_as(file, NULL, out, part, error);
}

SEQPAR_DEF seqpar_status seqpar_safetensors_read_f64(seqpar_safetensors_file *file, double *out,
                                                     const seqpar_safetensors_part *part,
                                                     seqpar_error *error) {
    SEQPAR_NEED(error, "file, part", file, part);
    SEQPAR_NEED(error, "part->name, out", part->name, SEQPAR_IF(part->count > 0, out));
    return seqpar__st_read_as(file, out, NULL, part, error);
}

/* >>output ------------------------------------------------------ files, whole or not at all */

typedef struct seqpar__st_output {
    FILE *stream; /* NULL once closed */
    char *path;   /* where the file is to appear */
    /* path of the temporary file, in the allocation of `path`; NULL once renamed or removed */
    char *temporary;
    /* of the first failure; from then on there is neither a stream nor a temporary file */
    seqpar_status status;
} seqpar__st_output;

static void seqpar__st_output_drop(seqpar__st_output *output, seqpar_status status) {
    if (output->stream) fclose(output->stream);
    if (output->temporary) unlink(output->temporary);
    output->stream = NULL;
    output->temporary = NULL;
    output->status = status;
}

static seqpar_status seqpar__st_output_failed(seqpar__st_output *output, const char *step,
                                              seqpar_error *error) {
    int reason = errno;

    seqpar__st_output_drop(output, SEQPAR_ERR_FILE_WRITE);
    return seqpar__st_fail(
        error, SEQPAR_ERR_FILE_WRITE, output->path, NULL,
        "cannot be written (%s: %s); what was there before is untouched, make room or "
        "choose another folder",
        step, strerror(reason));
}

/* Creates the temporary file under an unused name. The plain name may be in use by another
 * thread, or left over from a killed process of the same pid (in a container pids repeat).
 * Returns a descriptor or -1. */
static int seqpar__st_output_claim(const seqpar__st_output *output, size_t room) {
    int descriptor = -1;

    for (int attempt = 1; attempt <= 1000; attempt++) {
        int used = snprintf(output->temporary, room, "%s.tmp.%ld", output->path,
                            (long)getpid());

        if (attempt > 1)
            snprintf(output->temporary + used, room - (size_t)used, ".%d", attempt);
        descriptor = open(output->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (descriptor >= 0 || errno != EEXIST) break;
    }
    return descriptor;
}

/* The caller frees output->path in any case. After an error nothing else is left to release. */
static seqpar_status seqpar__st_output_open(seqpar__st_output *output, const char *path,
                                            seqpar_error *error) {
    size_t length = path ? strlen(path) + 1 : 0, room = length + 64;
    const char *trouble = NULL;
    struct stat about;
    int descriptor;

    memset(output, 0, sizeof *output);
    if (length <= 1)
        return seqpar__st_fail(error, SEQPAR_ERR_FILE_OPEN, "(no path)", NULL,
                               "a path is needed to write to");
    if (stat(path, &about) == 0 && !S_ISREG(about.st_mode))
        return seqpar__st_fail(
            error, SEQPAR_ERR_FILE_OPEN, path, NULL,
            "is there already and is not a regular file; choose another path");
    output->path = (char *)seqpar__st_new((int64_t)(length + room), 1);
    if (!output->path) return seqpar__st_no_memory(error, path);
    memcpy(output->path, path, length);
    output->temporary = output->path + length;
    descriptor = seqpar__st_output_claim(output, room);
    if (descriptor < 0 || !(output->stream = fdopen(descriptor, "wb")))
        trouble = strerror(errno);
    if (!trouble) return 0;
    if (descriptor >= 0) {
        close(descriptor);
        unlink(output->temporary);
    }
    output->temporary = NULL;
    return seqpar__st_fail(error, SEQPAR_ERR_FILE_OPEN, path, NULL,
                           "cannot be opened for writing (%s); check the folder", trouble);
}

static seqpar_status seqpar__st_output_write(seqpar__st_output *output, const void *data,
                                             int64_t bytes, seqpar_error *error) {
    if (output->status)
        return seqpar__st_fail(error, output->status, output->path, NULL,
                               "was given up after an earlier error; see that one");
    if (bytes > 0 && (int64_t)fwrite(data, 1, (size_t)bytes, output->stream) != bytes)
        return seqpar__st_output_failed(output, "fwrite", error);
    return 0;
}

/* Makes the rename itself survive a power cut. Not every file system can do it and the file is
 * whole either way, so failure is no error. */
static void seqpar__st_sync_folder(const char *path, char *scratch) {
    char *slash = strrchr(strcpy(scratch, path), '/');
    int folder;

    if (slash) slash[slash == scratch] = '\0'; /* keeps the slash of "/" */
    folder = open(slash ? scratch : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0) {
        fsync(folder);
        close(folder);
    }
}

static seqpar_status seqpar__st_output_commit(seqpar__st_output *output, seqpar_error *error) {
    seqpar_status status = seqpar__st_output_write(output, NULL, 0, error);
    FILE *stream = output->stream;

    if (status) return status;
    if (fflush(stream) != 0) return seqpar__st_output_failed(output, "fflush", error);
    if (fsync(fileno(stream)) != 0) return seqpar__st_output_failed(output, "fsync", error);
    output->stream = NULL; /* fclose frees it even if it fails */
    if (fclose(stream) != 0) return seqpar__st_output_failed(output, "fclose", error);
    if (rename(output->temporary, output->path) != 0)
        return seqpar__st_output_failed(output, "rename", error);
    seqpar__st_sync_folder(output->path, output->temporary);
    output->temporary = NULL;
    return 0;
}

SEQPAR_DEF seqpar_status seqpar_file_write_atomic(const char *path, const void *data,
                                                  int64_t bytes, seqpar_error *error) {
    SEQPAR_NEED(error, "data", SEQPAR_IF(bytes > 0, data));
    seqpar__st_output output;
    seqpar_status status = seqpar__st_output_open(&output, path, error);

    if (!status) status = seqpar__st_output_write(&output, data, bytes, error);
    if (!status) status = seqpar__st_output_commit(&output, error);
    seqpar__st_free(output.path);
    return status;
}

/* >>write ------------------------------------------------ tensors into a safetensors file */

struct seqpar_safetensors_writer {
    seqpar__st_output output;
    seqpar_safetensors_tensor *tensors; /* (count), their names in `names` */
    char *names;
    int64_t count;
    int64_t current; /* the first tensor that is not complete */
    int64_t written; /* bytes of it so far */
};

/* A string that grows. failed: memory ran out, so the text is incomplete. */
typedef struct seqpar__st_text {
    char *data; /* (bytes) of (capacity) */
    int64_t bytes, capacity;
    int failed;
} seqpar__st_text;

static void seqpar__st_put(seqpar__st_text *text, const char *data) {
    int64_t bytes = (int64_t)strlen(data);

    if (text->bytes + bytes > text->capacity) {
        int64_t capacity = 2 * (text->bytes + bytes) + 256;
        char *larger = (char *)seqpar__st_new(capacity, 1);

        text->failed |= !larger;
        if (!larger) return;
        if (text->data) memcpy(larger, text->data, (size_t)text->bytes);
        seqpar__st_free(text->data);
        text->data = larger;
        text->capacity = capacity;
    }
    memcpy(text->data + text->bytes, data, (size_t)bytes);
    text->bytes += bytes;
}

static void seqpar__st_put_number(seqpar__st_text *text, int64_t number) {
    char digits[32];

    snprintf(digits, sizeof digits, "%lld", (long long)number);
    seqpar__st_put(text, digits);
}

/* Appends a string in quotes, escaped by cJSON. */
static void seqpar__st_put_string(seqpar__st_text *text, const char *string) {
    cJSON *node = cJSON_CreateStringReference(string);
    char *quoted = node ? cJSON_PrintUnformatted(node) : NULL;

    if (quoted) seqpar__st_put(text, quoted);
    text->failed |= !quoted;
    cJSON_free(quoted);
    cJSON_Delete(node);
}

static void seqpar__st_put_metadata(seqpar__st_text *text,
                                    const seqpar_safetensors_desc *desc) {
    seqpar__st_put(text, "\"__metadata__\":{");
    for (int64_t i = 0; i < desc->metadata_count; i++) {
        seqpar__st_put(text, i ? "," : "");
        seqpar__st_put_string(text, desc->metadata[i].key);
        seqpar__st_put(text, ":");
        seqpar__st_put_string(text, desc->metadata[i].value);
    }
    seqpar__st_put(text, "}");
}

static void seqpar__st_put_tensor(seqpar__st_text *text,
                                  const seqpar_safetensors_tensor *tensor) {
    seqpar__st_put_string(text, tensor->name);
    seqpar__st_put(text, ":{\"dtype\":\"");
    seqpar__st_put(text, seqpar_safetensors_dtype_name(tensor->dtype));
    seqpar__st_put(text, "\",\"shape\":[");
    for (int64_t i = 0; i < tensor->dims; i++) {
        seqpar__st_put(text, i ? "," : "");
        seqpar__st_put_number(text, tensor->shape[i]);
    }
    seqpar__st_put(text, "],\"data_offsets\":[");
    seqpar__st_put_number(text, tensor->offset);
    seqpar__st_put(text, ",");
    seqpar__st_put_number(text, tensor->offset + tensor->bytes);
    seqpar__st_put(text, "]}");
}

/* Writes the length, the JSON, and spaces up to the next multiple of 8. The caller frees
   text->data, also after an error. */
static seqpar_status seqpar__st_put_header(seqpar__st_text *text,
                                           const seqpar_safetensors_writer *writer,
                                           const seqpar_safetensors_desc *desc,
                                           seqpar_error *error) {
    int64_t length;

    seqpar__st_put(text, "........{"); /* room for the length */
    if (desc->metadata_count > 0) seqpar__st_put_metadata(text, desc);
    for (int64_t i = 0; i < writer->count; i++) {
        seqpar__st_put(text, i > 0 || desc->metadata_count > 0 ? "," : "");
        seqpar__st_put_tensor(text, &writer->tensors[i]);
    }
    seqpar__st_put(text, "}");
    while (!text->failed && text->bytes % 8 != 0) seqpar__st_put(text, " ");
    if (text->failed) return seqpar__st_no_memory(error, desc->path);
    length = text->bytes - 8;
    if (length > SEQPAR_SAFETENSORS_MAX_HEADER)
        return seqpar__st_fail(
            error, SEQPAR_ERR_FILE_FORMAT, desc->path, NULL,
            "its header would have %lld bytes, more than the %d allowed; shorten the "
            "metadata or split the file",
            (long long)length, SEQPAR_SAFETENSORS_MAX_HEADER);
    for (int i = 0; i < 8; i++) text->data[i] = (char)(unsigned char)(length >> (8 * i) & 0xFF);
    return 0;
}

static seqpar_status seqpar__st_check_name(const char *path, const char *name, int64_t index,
                                           seqpar_error *error) {
    if (!name)
        return seqpar__st_fail(error, SEQPAR_ERR_FILE_TENSOR, path, NULL,
                               "entry %lld of the list of tensors has no name; give it one",
                               (long long)index);
    if (strcmp(name, "__metadata__") == 0)
        return seqpar__st_fail(error, SEQPAR_ERR_FILE_TENSOR, path, name,
                               "the format keeps this name for its metadata; choose another");
    if (!seqpar__st_is_utf8(name))
        return seqpar__st_fail(error, SEQPAR_ERR_FILE_TENSOR, path, name,
                               "the name is not UTF-8, which the format demands; convert it");
    return 0;
}

/* Fills in count, bytes and offset; *offset moves on to the next tensor's. */
static seqpar_status seqpar__st_layout(const char *path, seqpar_safetensors_tensor *tensor,
                                       int64_t *offset, seqpar_error *error) {
    char shown[128];
    const int64_t limit = (int64_t)1 << 53; /* doubles in JSON readers are exact below */

    if (!seqpar_safetensors_dtype_bytes(tensor->dtype))
        return seqpar__st_fail(error, SEQPAR_ERR_FILE_TENSOR, path, tensor->name,
                               "dtype %d is not a SEQPAR_SAFETENSORS_ dtype; set it",
                               (int)tensor->dtype);
    if (tensor->dims < 0 || tensor->dims > SEQPAR_SAFETENSORS_MAX_DIMS)
        return seqpar__st_fail(error, SEQPAR_ERR_FILE_TENSOR, path, tensor->name,
                               "has %lld dimensions, but 0 to %d are supported; reshape it",
                               (long long)tensor->dims, SEQPAR_SAFETENSORS_MAX_DIMS);
    for (int64_t i = 0; i < tensor->dims; i++)
        if (tensor->shape[i] < 0)
            return seqpar__st_fail(error, SEQPAR_ERR_FILE_TENSOR, path, tensor->name,
                                   "shape[%lld] is %lld, below 0; set it", (long long)i,
                                   (long long)tensor->shape[i]);
    if (!seqpar__st_measure(tensor) || tensor->bytes >= limit - *offset)
        return seqpar__st_fail(
            error, SEQPAR_ERR_FILE_TENSOR, path, tensor->name,
            "%s at data byte %lld ends beyond 2^53, where JSON readers lose count; split "
            "the file",
            seqpar__st_show_shape(shown, tensor), (long long)*offset);
    tensor->offset = *offset;
    *offset += tensor->bytes;
    return 0;
}

/* Checks and copies the caller's list. */
static seqpar_status seqpar__st_copy_list(seqpar_safetensors_writer *writer,
                                          const seqpar_safetensors_desc *desc,
                                          seqpar_error *error) {
    int64_t name_bytes = 0, offset = 0;
    seqpar_status status = 0;
    char *name;

    for (int64_t i = 0; !status && i < desc->count; i++) {
        status = seqpar__st_check_name(desc->path, desc->tensors[i].name, i, error);
        name_bytes += status ? 0 : (int64_t)strlen(desc->tensors[i].name) + 1;
    }
    if (status) return status;
    writer->tensors = (seqpar_safetensors_tensor *)seqpar__st_new(desc->count,
                                                                  sizeof *writer->tensors);
    writer->names = name = (char *)seqpar__st_new(name_bytes, 1);
    if (!writer->tensors || !writer->names) return seqpar__st_no_memory(error, desc->path);
    for (; !status && writer->count < desc->count; writer->count++) {
        seqpar_safetensors_tensor *tensor = &writer->tensors[writer->count];

        *tensor = desc->tensors[writer->count];
        tensor->name = strcpy(name, tensor->name);
        name += strlen(name) + 1;
        status = seqpar__st_layout(desc->path, tensor, &offset, error);
    }
    return status;
}

static seqpar_status seqpar__st_check_unique(const seqpar_safetensors_writer *writer,
                                             const char *path, seqpar_error *error) {
    const seqpar_safetensors_tensor **by_name = seqpar__st_sorted(
        writer->tensors, writer->count, seqpar__st_order_by_name);
    const char *twice = by_name ? seqpar__st_twice_name(by_name, writer->count) : NULL;

    seqpar__st_free((void *)by_name);
    if (!by_name) return seqpar__st_no_memory(error, path);
    return !twice ? 0
                  : seqpar__st_fail(error, SEQPAR_ERR_FILE_TENSOR, path, twice,
                                    "is in the list twice; rename one of them");
}

static seqpar_status seqpar__st_check_metadata(const seqpar_safetensors_desc *desc,
                                               seqpar_error *error) {
    size_t bytes = (size_t)desc->metadata_count * sizeof *desc->metadata;
    seqpar_safetensors_pair *by_key;
    char shown[SEQPAR__ST_SHOWN + 4];
    const char *twice;

    for (int64_t i = 0; i < desc->metadata_count; i++) {
        const seqpar_safetensors_pair *pair = &desc->metadata[i];

        if (!pair->key || !pair->value || !seqpar__st_is_utf8(pair->key) ||
            !seqpar__st_is_utf8(pair->value))
            return seqpar__st_fail(
                error, SEQPAR_ERR_FILE_FORMAT, desc->path, NULL,
                "metadata entry %lld, key \"%s\", is not two strings of UTF-8; convert it",
                (long long)i, seqpar__st_show(shown, pair->key ? pair->key : "", 0));
    }
    by_key = (seqpar_safetensors_pair *)seqpar__st_new(desc->metadata_count, sizeof *by_key);
    if (!by_key) return seqpar__st_no_memory(error, desc->path);
    if (bytes > 0)
        qsort(memcpy(by_key, desc->metadata, bytes), (size_t)desc->metadata_count,
              sizeof *by_key, seqpar__st_order_by_key);
    twice = seqpar__st_twice_key(by_key, desc->metadata_count);
    seqpar__st_free(by_key);
    return !twice ? 0
                  : seqpar__st_fail(error, SEQPAR_ERR_FILE_FORMAT, desc->path, NULL,
                                    "metadata key \"%s\" is there twice; rename one of them",
                                    seqpar__st_show(shown, twice, 0));
}

/* Moves past all complete tensors; empty tensors are always complete. */
static void seqpar__st_advance(seqpar_safetensors_writer *writer) {
    while (writer->current < writer->count &&
           writer->written == writer->tensors[writer->current].bytes) {
        writer->current++;
        writer->written = 0;
    }
}

static seqpar_status seqpar__st_begin(seqpar_safetensors_writer *writer,
                                      const seqpar_safetensors_desc *desc,
                                      seqpar_error *error) {
    seqpar__st_text header = {NULL, 0, 0, 0};
    seqpar_status status = seqpar__st_copy_list(writer, desc, error);

    if (!status) status = seqpar__st_check_unique(writer, desc->path, error);
    if (!status) status = seqpar__st_check_metadata(desc, error);
    if (!status) status = seqpar__st_put_header(&header, writer, desc, error);
    if (!status) status = seqpar__st_output_open(&writer->output, desc->path, error);
    if (!status)
        status = seqpar__st_output_write(&writer->output, header.data, header.bytes, error);
    seqpar__st_free(header.data);
    seqpar__st_advance(writer);
    return status;
}

SEQPAR_DEF seqpar_status seqpar_safetensors_create(seqpar_safetensors_writer **writer,
                                                   const seqpar_safetensors_desc *desc,
                                                   seqpar_error *error) {
    SEQPAR_NEED(error, "writer, desc", writer, desc);
    SEQPAR_NEED(error, "desc->tensors, desc->metadata",
                SEQPAR_IF(desc->count > 0, desc->tensors),
                SEQPAR_IF(desc->metadata_count > 0, desc->metadata));
    seqpar_safetensors_writer *made = (seqpar_safetensors_writer *)seqpar__st_new(1,
                                                                                  sizeof *made);
    seqpar_safetensors_desc named = *desc;
    seqpar_status status;

    *writer = NULL;
    named.path = desc->path ? desc->path : "";
    if (!made) return seqpar__st_no_memory(error, named.path);
    status = seqpar__st_begin(made, &named, error);
    if (status)
        seqpar_safetensors_abort(made);
    else
        *writer = made;
    return status;
}

/* Refuses bytes that do not belong to the next tensor of the list, and ends the writer. */
static seqpar_status seqpar__st_misplaced(seqpar_safetensors_writer *writer, const char *name,
                                          int64_t bytes, seqpar_error *error) {
    const char *path = writer->output.path;
    char shown[SEQPAR__ST_SHOWN + 4];

    seqpar__st_output_drop(&writer->output, SEQPAR_ERR_FILE_TENSOR);
    if (writer->current == writer->count)
        return seqpar__st_fail(
            error, SEQPAR_ERR_FILE_TENSOR, path, name,
            "%lld bytes come for it after all tensors of the list are complete; write "
            "them in the order of the list",
            (long long)bytes);
    return seqpar__st_fail(
        error, SEQPAR_ERR_FILE_TENSOR, path, name,
        "%lld bytes come for it where \"%s\" is next and lacks %lld of its %lld; write "
        "the tensors in the order of the list",
        (long long)bytes, seqpar__st_show(shown, writer->tensors[writer->current].name, 0),
        (long long)(writer->tensors[writer->current].bytes - writer->written),
        (long long)writer->tensors[writer->current].bytes);
}

SEQPAR_DEF seqpar_status seqpar_safetensors_append(seqpar_safetensors_writer *writer,
                                                   const char *name, const void *data,
                                                   int64_t bytes, seqpar_error *error) {
    SEQPAR_NEED(error, "name, data", name, SEQPAR_IF(bytes > 0, data));
    const seqpar_safetensors_tensor *next;
    seqpar_status status;

    if (!writer)
        return seqpar__st_fail(
            error, SEQPAR_ERR_FILE_WRITE, "(no file)", name,
            "there is no writer; see what seqpar_safetensors_create returned");
    next = writer->current < writer->count ? &writer->tensors[writer->current] : NULL;
    if (!writer->output.status && bytes != 0 &&
        (!next || strcmp(name, next->name) != 0 || bytes < 0 ||
         bytes > next->bytes - writer->written))
        return seqpar__st_misplaced(writer, name, bytes, error);
    status = seqpar__st_output_write(&writer->output, data, bytes, error);
    if (!status) {
        writer->written += bytes;
        seqpar__st_advance(writer);
    }
    return status;
}

SEQPAR_DEF seqpar_status seqpar_safetensors_finish(seqpar_safetensors_writer *writer,
                                                   seqpar_error *error) {
    seqpar_status status;

    if (!writer)
        return seqpar__st_fail(
            error, SEQPAR_ERR_FILE_WRITE, "(no file)", NULL,
            "there is no writer; see what seqpar_safetensors_create returned");
    if (!writer->output.status && writer->current < writer->count) {
        const seqpar_safetensors_tensor *next = &writer->tensors[writer->current];

        seqpar__st_output_drop(&writer->output, SEQPAR_ERR_FILE_TENSOR);
        status = seqpar__st_fail(
            error, SEQPAR_ERR_FILE_TENSOR, writer->output.path, next->name,
            "lacks %lld of its %lld bytes, and %lld tensors come after it; append them "
            "before finishing",
            (long long)(next->bytes - writer->written), (long long)next->bytes,
            (long long)(writer->count - writer->current - 1));
    } else {
        status = seqpar__st_output_commit(&writer->output, error);
    }
    seqpar_safetensors_abort(writer); /* removes nothing after a commit */
    return status;
}

SEQPAR_DEF void seqpar_safetensors_abort(seqpar_safetensors_writer *writer) {
    if (!writer) return;
    seqpar__st_output_drop(&writer->output, 0);
    seqpar__st_free(writer->output.path);
    seqpar__st_free(writer->tensors);
    seqpar__st_free(writer->names);
    seqpar__st_free(writer);
}

SEQPAR_DEF seqpar_status seqpar_safetensors_save(const seqpar_safetensors_desc *desc,
                                                 const void *const *data, seqpar_error *error) {
    SEQPAR_NEED(error, "desc, data", desc, SEQPAR_IF(desc && desc->count > 0, data));
    seqpar_safetensors_writer *writer = NULL;
    seqpar_status status = seqpar_safetensors_create(&writer, desc, error);

    for (int64_t i = 0; !status && i < desc->count; i++)
        status = seqpar_safetensors_append(writer, desc->tensors[i].name, data[i],
                                           writer->tensors[i].bytes, error);
    if (!status) return seqpar_safetensors_finish(writer, error);
    seqpar_safetensors_abort(writer);
    return status;
}

#endif /* SEQPAR_SAFETENSORS_IMPLEMENTATION */

/*
>>licence --------------------------------------------------------------------------------------

This file is yours under either of two licences, whichever you prefer.

A - MIT. Copyright (c) 2026 the seqpar authors

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction, including
without limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is furnished to do so, subject to the
following conditions:
The above copyright notice and this permission notice shall be included in all copies or substantial
portions of the Software.
THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT
LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO
EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER
IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR
THE USE OR OTHER DEALINGS IN THE SOFTWARE.

B - Unlicense (public domain, www.unlicense.org)

This is free and unencumbered software released into the public domain.
Anyone is free to copy, modify, publish, use, compile, sell, or distribute this software, either in source
code form or as a compiled binary, for any purpose, commercial or non-commercial, and by any means.
In jurisdictions that recognize copyright laws, the author or authors of this software dedicate any and
all copyright interest in the software to the public domain. We make this dedication for the benefit of
the public at large and to the detriment of our heirs and successors. We intend this dedication to be an
overt act of relinquishment in perpetuity of all present and future rights to this software under
copyright law.
THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT
LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO
EVENT SHALL THE AUTHORS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF
CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER
DEALINGS IN THE SOFTWARE.
*/
