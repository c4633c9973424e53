/* SPDX-License-Identifier: MIT OR Unlicense */
/*
 * test_safetensors.c - what seqpar_safetensors.h reads, refuses, writes and leaves alone.
 *
 * cc -std=gnu11 -O2 -I. -Iverify verify/tests/test_safetensors.c -lcjson -lm -lpthread
 * ./a.out [--seed 1]    the seed is that of the random bytes and of the 20,000 mutations
 *
 * Works in a folder of its own under TMPDIR (or /tmp), which it removes again.
 */
#define _XOPEN_SOURCE 700

#include <dirent.h>
#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include "support/test.h"

/* Every allocation of the header and of cJSON goes through here, to be counted and to be
   made to fail. */
static void *test_malloc(size_t bytes);
static void test_free(void *memory);
#define SEQPAR_MALLOC(size) test_malloc(size)
#define SEQPAR_FREE(ptr)    test_free(ptr)

/* So does every step on the way to the disk and back that could fail. fclose closes even
   when it fails. */
static bool fails(const char *call);
static void note_folder(int descriptor);
#define fdopen(descriptor, mode)         (fails("fdopen") ? NULL : fdopen(descriptor, mode))
#define fread(data, each, count, stream) (fails("fread") ? 0 : fread(data, each, count, stream))
#define fseeko(stream, offset, from)     (fails("fseeko") ? -1 : fseeko(stream, offset, from))
#define fwrite(data, each, count, stream) \
    (fails("fwrite") ? 0 : fwrite(data, each, count, stream))
#define fflush(stream)    (fails("fflush") ? EOF : fflush(stream))
#define fsync(descriptor) (note_folder(descriptor), fails("fsync") ? -1 : fsync(descriptor))
#define fclose(stream) \
    (fails("fclose") ? (void)fclose(stream), errno = EIO, EOF : fclose(stream))
#define rename(from, to) (fails("rename") ? -1 : rename(from, to))

#define SEQPAR_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"

#define COUNT(array) ((int64_t)(sizeof(array) / sizeof(array)[0]))

static const seqpar_safetensors_dtype floats[] = {
    SEQPAR_SAFETENSORS_F16, SEQPAR_SAFETENSORS_BF16, SEQPAR_SAFETENSORS_F32,
    SEQPAR_SAFETENSORS_F64};

/* ---- faults: memory and the disk --------------------------------------------------------- */

static int64_t live_allocations;
static int64_t allocations_until_failure = -1; /* below 0: none fails */

static void *test_malloc(size_t bytes) {
    void *memory;

    if (allocations_until_failure >= 0 && allocations_until_failure-- == 0) return NULL;
    memory = malloc(bytes);
    live_allocations += memory != NULL;
    return memory;
}

static void test_free(void *memory) {
    live_allocations -= memory != NULL;
    free(memory);
}

static const char *failing_call; /* NULL: none fails */
static int calls_until_failure;

static bool fails(const char *call) {
    if (!failing_call || strcmp(call, failing_call) != 0 || calls_until_failure-- != 0)
        return false;
    errno = EIO;
    return true;
}

static ino_t synced_folder; /* the last one */

static void note_folder(int descriptor) {
    struct stat about;

    if (fstat(descriptor, &about) == 0 && S_ISDIR(about.st_mode)) synced_folder = about.st_ino;
}

/* ---- the end of each test ---------------------------------------------------------------- */

static int temporary_files(void);

/* Whatever a test did, nothing may be left over. */
static void finish(const char *name) {
    test_expect(live_allocations == 0, "%" PRId64 " allocations leaked", live_allocations);
    test_expect(temporary_files() == 0, "%d temporary files left behind", temporary_files());
    live_allocations = 0;
    test_end("%s", name);
}

static int64_t random_below(int64_t limit) {
    return (int64_t)(test_random() % (uint64_t)limit);
}

static void random_fill(unsigned char *bytes, int64_t count) {
    for (int64_t i = 0; i < count; i++) bytes[i] = (unsigned char)test_random();
}

/* ---- files, by plain means --------------------------------------------------------------- */

static char folder[512];

/* The path of a file in the folder; the string of the last call but three is overwritten. */
static const char *in_folder(const char *name) {
    static char paths[4][1024];
    static unsigned next;
    char *path = paths[next++ % 4];

    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static int temporary_files(void) {
    DIR *listing = opendir(folder);
    const struct dirent *entry;
    int count = 0;

    while (listing && (entry = readdir(listing)))
        count += strstr(entry->d_name, ".tmp.") != NULL;
    if (listing) closedir(listing);
    return count;
}

static void remove_folder(void) {
    DIR *listing = opendir(folder);
    const struct dirent *entry;

    while (listing && (entry = readdir(listing)))
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            remove(in_folder(entry->d_name));
    if (listing) closedir(listing);
    rmdir(folder);
}

static void spit(const char *name, const void *bytes, int64_t count) {
    FILE *stream = fopen(in_folder(name), "wb");

    if (!stream || (count > 0 && fwrite(bytes, 1, (size_t)count, stream) != (size_t)count) ||
        fclose(stream) != 0) {
        perror("test_safetensors cannot write its own files");
        exit(2);
    }
}

typedef struct {
    unsigned char *bytes;
    int64_t count; /* -1: no such file */
} contents;

static contents slurp(const char *name) {
    contents all = {NULL, -1};
    FILE *stream = fopen(in_folder(name), "rb");

    if (!stream) return all;
    fseek(stream, 0, SEEK_END);
    all.count = ftell(stream);
    rewind(stream);
    all.bytes = malloc((size_t)all.count + 1);
    if (!all.bytes || fread(all.bytes, 1, (size_t)all.count, stream) != (size_t)all.count)
        all.count = -1;
    fclose(stream);
    return all;
}

static int holds(const char *name, const void *bytes, int64_t count) {
    contents all = slurp(name);
    int same = all.count == count && memcmp(all.bytes, bytes, (size_t)count) == 0;

    free(all.bytes);
    return same;
}

static int exists(const char *name) { return access(in_folder(name), F_OK) == 0; }

/* A file of that header as it stands and so many bytes of data, 0 1 2 ... */
static void craft(const char *name, const char *header, int64_t header_bytes,
                  int64_t data_bytes) {
    unsigned char bytes[4096];
    int64_t used = 8;

    for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)(header_bytes >> (8 * i));
    memcpy(bytes + used, header, (size_t)header_bytes);
    used += header_bytes;
    for (int64_t i = 0; i < data_bytes; i++) bytes[used++] = (unsigned char)i;
    spit(name, bytes, used);
}

/* ---- the header under test, with an error of its own each time --------------------------- */

static seqpar_error last; /* of the last call through one of these */

static seqpar_error *fresh(void) {
    memset(&last, 0, sizeof last);
    return &last;
}

static seqpar_safetensors_file *opened(const char *name) {
    seqpar_safetensors_file *file = NULL;

    test_expect(seqpar_safetensors_open(&file, in_folder(name), fresh()) == 0, "open %s: %s",
                name, last.text);
    return file;
}

/* ---- whole sentences: all that is said, each once, stands in a list ---- */

#define SAID_LIST "verify/tests/safetensors_said.txt"
#define SAID_HEAD "# SPDX-License-Identifier: MIT OR Unlicense"
enum { SAID_MOST = 1000 };
static char *said[SAID_MOST];
static int said_count, said_pause; /* pause: many calls that differ in a number alone */

/* The sentence without the folder, which has another name each time. */
static void note_said(void) {
    char line[600], *end = line;

    if (said_pause) return;
    for (const char *at = last.text; *at && end < line + sizeof line - 1;) {
        int here = !strncmp(at, folder, strlen(folder));
        *end++ = here ? '@' : *at;
        at += here ? strlen(folder) : 1;
    }
    *end = 0;
    for (int i = 0; i < said_count; i++)
        if (!strcmp(said[i], line)) return;
    if (said_count < SAID_MOST) said[said_count++] = strdup(line);
}

/* SAID=1 writes the list anew, to be read before it is committed. */
static void said_is_listed(void) {
    test_text = NULL;
    char line[600];
    int i = 0;
    FILE *file;

    if (strlen(folder) > 48) { /* of a long path a part is said */
        test_skip("said_is_listed", "TMPDIR has a long name");
        return;
    }
    file = fopen(SAID_LIST, getenv("SAID") ? "w" : "r");
    test_expect(file != NULL, "%s cannot be opened", SAID_LIST);
    if (!file) return finish("said_is_listed");
    if (getenv("SAID")) {
        fprintf(file, "%s\n", SAID_HEAD);
        for (; i < said_count; i++) fprintf(file, "%s\n", said[i]);
    } else
        for (; fgets(line, sizeof line, file); i++) {
            line[strcspn(line, "\n")] = 0;
            if (!strcmp(line, SAID_HEAD)) {
                i--;
                continue;
            }
            test_expect(i < said_count && !strcmp(said[i], line), "'%s' instead of '%s'",
                        i < said_count ? said[i] : "nothing", line);
        }
    fclose(file);
    test_expect(i == said_count && i > 0, "%d sentences were said, %d are listed", said_count,
                i);
    finish("said_is_listed");
}

/* That the call failed as it should, and said it with those words (NULL: no more of them). */
static void refused(const char *what, seqpar_status got, seqpar_status wanted, const char *word,
                    const char *other_word) {
    test_expect(got == wanted, "%s: status %d where %d was due (%s)", what, got, wanted,
                last.text);
    test_expect(got == last.status, "%s: returns %d but notes %d", what, got, last.status);
    test_expect(!word || strstr(last.text, word), "%s: no '%s' in: %s", what, word, last.text);
    test_expect(!other_word || strstr(last.text, other_word), "%s: no '%s' in: %s", what,
                other_word, last.text);
    test_expect(strlen(last.text) < sizeof last.text - 1, "%s: the text was cut off: %s", what,
                last.text);
    note_said();
}

static seqpar_safetensors_tensor tensor_of(const char *name, seqpar_safetensors_dtype dtype,
                                           int64_t elements) {
    seqpar_safetensors_tensor tensor = {
        .name = name, .dtype = dtype, .dims = 1, .shape = {elements}};

    return tensor;
}

static seqpar_status save(const char *name, const seqpar_safetensors_tensor *tensors,
                          int64_t count, const void *const *data) {
    seqpar_safetensors_desc desc = {
        .path = in_folder(name), .tensors = tensors, .count = count};

    return seqpar_safetensors_save(&desc, data, fresh());
}

static void save_one(const char *name, const char *tensor_name, seqpar_safetensors_dtype dtype,
                     int64_t elements, const void *data) {
    seqpar_safetensors_tensor tensor = tensor_of(tensor_name, dtype, elements);

    test_expect(save(name, &tensor, 1, &data) == 0, "save %s: %s", name, last.text);
}

static seqpar_safetensors_part part_of(const char *name, int64_t first, int64_t count) {
    seqpar_safetensors_part part = {.name = name, .first = first, .count = count};

    return part;
}

/* ---- golden file ------------------------------------------------------------------------- */

static const char golden[] =
    "\x88\0\0\0\0\0\0\0"
    "{\"__metadata__\":{\"k\":\"v\"},"
    "\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
    "\"b\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[3,7]}}      "
    "\x01\x02\x03"
    "\0\0\xC0\x3F";
enum { GOLDEN_BYTES = sizeof golden - 1 };

static const unsigned char golden_a[3] = {1, 2, 3};
static const float golden_b = 1.5f;
static const seqpar_safetensors_pair golden_metadata = {"k", "v"};

static seqpar_safetensors_desc golden_desc(const char *name) {
    static seqpar_safetensors_tensor tensors[2];
    seqpar_safetensors_desc desc = {.path = in_folder(name),
                                    .tensors = tensors,
                                    .count = 2,
                                    .metadata = &golden_metadata,
                                    .metadata_count = 1};

    tensors[0] = tensor_of("a", SEQPAR_SAFETENSORS_U8, 3);
    tensors[1] = tensor_of("b", SEQPAR_SAFETENSORS_F32, 0);
    tensors[1].dims = 0;
    return desc;
}

static seqpar_status save_golden(const char *name) {
    const void *data[2] = {golden_a, &golden_b};
    seqpar_safetensors_desc desc = golden_desc(name);

    return seqpar_safetensors_save(&desc, data, fresh());
}

static void golden_bytes_whole(void) {
    test_expect(save_golden("golden") == 0, "%s", last.text);
    test_expect(holds("golden", golden, GOLDEN_BYTES), "other bytes were written");
}

static void golden_bytes_in_pieces(void) {
    seqpar_safetensors_desc desc = golden_desc("pieces");
    seqpar_safetensors_writer *writer = NULL;

    test_expect(seqpar_safetensors_create(&writer, &desc, fresh()) == 0, "%s", last.text);
    for (int i = 0; i < 3; i++) seqpar_safetensors_append(writer, "a", golden_a + i, 1, &last);
    seqpar_safetensors_append(writer, "b", &golden_b, 0, &last);
    for (int i = 0; i < 4; i++)
        seqpar_safetensors_append(writer, "b", (const char *)&golden_b + i, 1, &last);
    test_expect(!exists("pieces"), "the file is there before it is finished");
    test_expect(seqpar_safetensors_finish(writer, &last) == 0, "%s", last.text);
    test_expect(holds("pieces", golden, GOLDEN_BYTES), "other bytes were written");
}

static void golden_reads_back(void) {
    seqpar_safetensors_file *file;
    const seqpar_safetensors_tensor *b;
    seqpar_safetensors_part part;
    float value = 0;

    spit("golden", golden, GOLDEN_BYTES);
    file = opened("golden");
    if (!file) return;
    b = seqpar_safetensors_find(file, "b");
    test_expect(seqpar_safetensors_count(file) == 2, "%" PRId64 " tensors",
                seqpar_safetensors_count(file));
    test_expect(b && b == seqpar_safetensors_at(file, 1) && b->dims == 0 && b->count == 1 &&
                    b->bytes == 4 && b->offset == 3 && b->dtype == SEQPAR_SAFETENSORS_F32,
                "b is not as written");
    test_expect(!seqpar_safetensors_at(file, 2) && !seqpar_safetensors_at(file, -1),
                "tensors past the end");
    test_expect(!seqpar_safetensors_find(file, "c"), "found what is not there");
    part = seqpar_safetensors_whole(b);
    test_expect(seqpar_safetensors_read_f32(file, &value, &part, fresh()) == 0 && value == 1.5f,
                "%s", last.text);
    test_expect(strcmp(seqpar_safetensors_metadata(file, "k"), "v") == 0,
                "metadata is not as written");
    test_expect(!seqpar_safetensors_metadata(file, "K"), "found metadata that is not there");
    test_expect(seqpar_safetensors_metadata_count(file) == 1 &&
                    !seqpar_safetensors_metadata_at(file, 1),
                "metadata past the end");
    seqpar_safetensors_close(file);
}

/* ---- round trips ------------------------------------------------------------------------- */

static const struct {
    int64_t dims, shape[SEQPAR_SAFETENSORS_MAX_DIMS];
} shapes[] = {{1, {0}},    {0, {0}},       {1, {5}},

              {2, {2, 3}}, {3, {3, 0, 2}}, {8, {1, 2, 1, 3, 1, 1, 2, 1}}};

enum { ROUND_TRIP = (SEQPAR_SAFETENSORS_DTYPE_COUNT - 1) * 6, ROUND_TRIP_BYTES = 12 * 8 };

static void compare_tensor(seqpar_safetensors_file *file, int64_t index,
                           const unsigned char *written,
                           const seqpar_safetensors_tensor *wanted) {
    const seqpar_safetensors_tensor *tensor = seqpar_safetensors_at(file, index);
    unsigned char read[ROUND_TRIP_BYTES] = {0};
    seqpar_safetensors_part part = seqpar_safetensors_whole(tensor);

    test_expect(seqpar_safetensors_expect(file, wanted, fresh()) == 0, "%s", last.text);
    test_expect(strcmp(tensor->name, wanted->name) == 0, "%s out of order", tensor->name);
    test_expect(seqpar_safetensors_find(file, wanted->name) == tensor, "%s not found by name",
                wanted->name);
    test_expect(tensor->bytes == tensor->count * seqpar_safetensors_dtype_bytes(tensor->dtype),
                "bytes");
    test_expect(seqpar_safetensors_read(file, read, &part, fresh()) == 0, "%s", last.text);
    test_expect(memcmp(read, written, (size_t)tensor->bytes) == 0, "%s: other bytes",
                wanted->name);
}

static void round_trip_all_dtypes_and_shapes(void) {
    static unsigned char data[ROUND_TRIP][ROUND_TRIP_BYTES];
    static char names[ROUND_TRIP][32];
    seqpar_safetensors_tensor tensors[ROUND_TRIP];
    const void *pointers[ROUND_TRIP];
    seqpar_safetensors_file *file;

    for (int i = 0; i < ROUND_TRIP; i++) {
        int dtype = 1 + i / 6, shape = i % 6;

        tensors[i] = tensor_of(names[i], (seqpar_safetensors_dtype)dtype, 0);
        snprintf(names[i], sizeof names[i], "%s.%d",
                 seqpar_safetensors_dtype_name(tensors[i].dtype), shape);
        tensors[i].dims = shapes[shape].dims;
        memcpy(tensors[i].shape, shapes[shape].shape, sizeof tensors[i].shape);
        random_fill(data[i], ROUND_TRIP_BYTES);
        pointers[i] = data[i];
    }
    test_expect(save("round", tensors, ROUND_TRIP, pointers) == 0, "%s", last.text);
    file = opened("round");
    test_expect(file && seqpar_safetensors_count(file) == ROUND_TRIP, "number of tensors");
    for (int i = 0; file && i < ROUND_TRIP; i++) compare_tensor(file, i, data[i], &tensors[i]);
    seqpar_safetensors_close(file);
}

static void round_trip_odd_names(void) {
    static char very_long[5001];
    const char *names[] = {"",
                           " ",
                           "\"",
                           "\\",
                           "a/b\\\"c\"",
                           "tab\tnew\nline\r\b\f\x01\x1F\x7F",
                           "\xC3\xA9",
                           "\xE6\xBC\xA2\xE5\xAD\x97",
                           "\xF0\x9F\x99\x82\xF4\x8F\xBF\xBF",
                           "\\u0041",
                           "__metadata",
                           "model.layers.0.self_attn.q_proj.weight",
                           "%s%n",
                           very_long};
    seqpar_safetensors_tensor tensors[COUNT(names)];
    seqpar_safetensors_pair metadata[COUNT(names)];
    seqpar_safetensors_desc desc = {.path = in_folder("names"),
                                    .tensors = tensors,
                                    .count = COUNT(names),
                                    .metadata = metadata,
                                    .metadata_count = COUNT(names)};
    unsigned char data[COUNT(names)];
    const void *pointers[COUNT(names)];
    seqpar_safetensors_file *file;

    memset(very_long, 'x', sizeof very_long - 1);
    for (int64_t i = 0; i < COUNT(names); i++) {
        tensors[i] = tensor_of(names[i], SEQPAR_SAFETENSORS_U8, 1);
        metadata[i].key = names[i];
        metadata[i].value = names[COUNT(names) - 1 - i];
        data[i] = (unsigned char)(100 + i);
        pointers[i] = &data[i];
    }
    test_expect(seqpar_safetensors_save(&desc, pointers, fresh()) == 0, "%s", last.text);
    file = opened("names");
    for (int64_t i = 0; file && i < COUNT(names); i++) {
        const char *value = seqpar_safetensors_metadata(file, names[i]);

        compare_tensor(file, i, &data[i], &tensors[i]);
        test_expect(value && strcmp(value, metadata[i].value) == 0, "metadata %" PRId64, i);
        if (i > 0)
            test_expect(strcmp(seqpar_safetensors_metadata_at(file, i - 1)->key,
                               seqpar_safetensors_metadata_at(file, i)->key) < 0,
                        "metadata is not sorted");
    }
    seqpar_safetensors_close(file);
}

static void round_trip_nothing(void) {
    seqpar_safetensors_file *file;

    test_expect(save("nothing", NULL, 0, NULL) == 0, "%s", last.text);
    test_expect(holds("nothing", "\x08\0\0\0\0\0\0\0{}      ", 16), "other bytes were written");
    file = opened("nothing");
    if (!file) return;
    test_expect(seqpar_safetensors_count(file) == 0 &&
                    seqpar_safetensors_metadata_count(file) == 0,
                "not empty");
    test_expect(!seqpar_safetensors_find(file, "w") && !seqpar_safetensors_metadata(file, "k"),
                "found something");
    seqpar_safetensors_close(file);
}

static void round_trip_many_tensors(void) {
    enum { MANY = 5000 };
    seqpar_safetensors_tensor *tensors = calloc(MANY, sizeof *tensors);
    const void **pointers = calloc(MANY, sizeof *pointers);
    char(*names)[16] = calloc(MANY, sizeof *names);
    int64_t zero = 0;
    seqpar_safetensors_file *file;

    for (int i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof names[i], "t%d", i * 7919 % MANY);
        tensors[i] = tensor_of(names[i], SEQPAR_SAFETENSORS_I64, i % 2);
        pointers[i] = &zero;
    }
    test_expect(save("many", tensors, MANY, pointers) == 0, "%s", last.text);
    file = opened("many");
    for (int i = 0; file && i < MANY; i++)
        test_expect(seqpar_safetensors_find(file, names[i]) == seqpar_safetensors_at(file, i),
                    "%s", names[i]);
    seqpar_safetensors_close(file);
    free(tensors);
    free(pointers);
    free(names);
}

static void empty_tensors_need_no_bytes(void) {
    seqpar_safetensors_tensor tensors[] = {tensor_of("e", SEQPAR_SAFETENSORS_F32, 0),
                                           tensor_of("w", SEQPAR_SAFETENSORS_U8, 1),
                                           tensor_of("f", SEQPAR_SAFETENSORS_F32, 0)};
    seqpar_safetensors_desc desc = {.path = in_folder("empty"), .tensors = tensors, .count = 3};
    seqpar_safetensors_writer *writer = NULL;

    test_expect(seqpar_safetensors_create(&writer, &desc, fresh()) == 0, "%s", last.text);
    test_expect(seqpar_safetensors_append(writer, "w", "x", 1, &last) == 0, "%s", last.text);
    test_expect(seqpar_safetensors_finish(writer, &last) == 0, "%s", last.text);
    seqpar_safetensors_close(opened("empty"));
}

/* ---- slices ------------------------------------------------------------------------------ */

static void slices_of_every_kind(void) {
    enum { LENGTH = 13 };
    int16_t data[LENGTH], out[LENGTH + 1];
    seqpar_safetensors_file *file;

    for (int i = 0; i < LENGTH; i++) data[i] = (int16_t)(1000 - 77 * i);
    save_one("slices", "s", SEQPAR_SAFETENSORS_I16, LENGTH, data);
    file = opened("slices");
    for (int first = 0; file && first <= LENGTH; first++)
        for (int count = 0; first + count <= LENGTH; count++) {
            seqpar_safetensors_part part = part_of("s", first, count);

            memset(out, 0x55, sizeof out);
            test_expect(seqpar_safetensors_read(file, out, &part, fresh()) == 0, "%s",
                        last.text);
            test_expect(memcmp(out, data + first, (size_t)count * 2) == 0,
                        "[%d, %d): other values", first, first + count);
            test_expect(out[count] == 0x5555, "[%d, %d): wrote past the end", first,
                        first + count);
        }
    seqpar_safetensors_close(file);
}

/* Longer than what is converted at a time, at offsets that do not divide anything. */
static void slices_converted_across_chunks(void) {
    enum { LENGTH = 5003 };
    static float data[LENGTH], narrow[LENGTH + 1];
    static double wide[LENGTH + 1];
    seqpar_safetensors_file *file;

    for (int i = 0; i < LENGTH; i++) data[i] = (float)(i * 0.37 - 900);
    save_one("chunks", "c", SEQPAR_SAFETENSORS_F32, LENGTH, data);
    file = opened("chunks");
    for (int first = 0; file && first < LENGTH; first += 619) {
        int64_t count = LENGTH - first - first % 7, wrong = 0;
        seqpar_safetensors_part part = part_of("c", first, count);

        narrow[count] = -1;
        wide[count] = -1;
        test_expect(seqpar_safetensors_read_f32(file, narrow, &part, fresh()) == 0, "%s",
                    last.text);
        test_expect(seqpar_safetensors_read_f64(file, wide, &part, fresh()) == 0, "%s",
                    last.text);
        for (int64_t i = 0; i < count; i++)
            wrong += narrow[i] != data[first + i] || wide[i] != (double)data[first + i];
        test_expect(wrong == 0, "%" PRId64 " other values from %d on", wrong, first);
        test_expect(narrow[count] == -1 && wide[count] == -1, "wrote past the end");
    }
    seqpar_safetensors_close(file);
}

static void slices_outside_are_refused(void) {
    static const int64_t bad[][2] = {{-1, 1},        {0, -1},        {0, 6},
                                     {5, 1},         {6, 0},         {4, 2},
                                     {1, INT64_MAX}, {INT64_MAX, 1}, {INT64_MIN, INT64_MIN}};
    double data[5] = {0}, out[5];
    seqpar_safetensors_file *file;

    save_one("outside", "five", SEQPAR_SAFETENSORS_F64, 5, data);
    file = opened("outside");
    for (int64_t i = 0; file && i < COUNT(bad); i++) {
        seqpar_safetensors_part part = part_of("five", bad[i][0], bad[i][1]);

        refused("read", seqpar_safetensors_read(file, out, &part, fresh()),
                SEQPAR_ERR_FILE_TENSOR, "\"five\"", "has 5");
        refused("read_f64", seqpar_safetensors_read_f64(file, out, &part, fresh()),
                SEQPAR_ERR_FILE_TENSOR, "\"five\"", "has 5");
    }
    seqpar_safetensors_close(file);
}

/* ---- conversion -------------------------------------------------------------------------- */

/* By the definition of the formats: sign, exponent bits, mantissa bits. */
static double by_arithmetic(unsigned bits, int exponent_bits, int mantissa_bits) {
    int bias = (1 << (exponent_bits - 1)) - 1, all_ones = (1 << exponent_bits) - 1;
    int exponent = (int)(bits >> mantissa_bits) & all_ones;
    int mantissa = (int)bits & ((1 << mantissa_bits) - 1);
    double value;

    if (exponent == all_ones)
        value = mantissa ? (double)NAN : (double)INFINITY;
    else if (exponent == 0)
        value = ldexp(mantissa, 1 - bias - mantissa_bits);
    else
        value = ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
    return bits >> 15 ? -value : value;
}

static int same_value(double a, double b) {
    return isnan(a) ? isnan(b) : a == b && !signbit(a) == !signbit(b);
}

static void all_patterns(seqpar_safetensors_dtype dtype, int exponent_bits, int mantissa_bits,
                         float (*convert)(uint16_t)) {
    enum { PATTERNS = 65536 };
    static uint16_t bits[PATTERNS];
    static float narrow[PATTERNS];
    static double wide[PATTERNS];
    seqpar_safetensors_part part = part_of("all", 0, PATTERNS);
    seqpar_safetensors_file *file;

    for (unsigned i = 0; i < PATTERNS; i++) bits[i] = (uint16_t)i;
    save_one("patterns", "all", dtype, PATTERNS, bits);
    file = opened("patterns");
    if (!file) return;
    test_expect(seqpar_safetensors_read_f32(file, narrow, &part, fresh()) == 0, "%s",
                last.text);
    test_expect(seqpar_safetensors_read_f64(file, wide, &part, fresh()) == 0, "%s", last.text);
    for (unsigned i = 0; i < PATTERNS; i++) {
        double wanted = by_arithmetic(i, exponent_bits, mantissa_bits);
        double converted = (double)convert(bits[i]);

        test_expect(same_value(wanted, converted) && same_value(wanted, (double)narrow[i]) &&
                        same_value(wanted, wide[i]),
                    "0x%04x: %g, %g, %g where %g is due", i, converted, (double)narrow[i],
                    wide[i], wanted);
    }
    seqpar_safetensors_close(file);
}

static void convert_all_f16_patterns(void) {
    all_patterns(SEQPAR_SAFETENSORS_F16, 5, 10, seqpar_safetensors_f16_to_f32);
}

/* Every half comes back; between two neighbours the nearer one is taken, half way the even one. */
static void convert_f32_to_f16_rounds_to_nearest(void) {
    for (unsigned i = 0; i < 0x7C00; i++) {
        float x = seqpar_safetensors_f16_to_f32((uint16_t)i);
        float next = i == 0x7BFF ? 65536.0f : seqpar_safetensors_f16_to_f32((uint16_t)(i + 1));
        float middle = (x + next) / 2; /* exact: a float has bits to spare */
        test_expect(seqpar_safetensors_f32_to_f16(x) == i, "0x%04x does not come back", i);
        test_expect(seqpar_safetensors_f32_to_f16(-x) == (i | 0x8000),
                    "-0x%04x does not come back", i);
        test_expect(seqpar_safetensors_f32_to_f16(middle) == i + (i & 1),
                    "half way from 0x%04x", i);
        test_expect(seqpar_safetensors_f32_to_f16(nextafterf(middle, 0)) == i,
                    "below it, 0x%04x", i);
        test_expect(seqpar_safetensors_f32_to_f16(nextafterf(middle, 1e9f)) == i + 1,
                    "above it, 0x%04x", i);
    }
    test_expect(seqpar_safetensors_f32_to_f16(INFINITY) == 0x7C00, "infinity");
    test_expect((seqpar_safetensors_f32_to_f16(NAN) & 0x7FFF) > 0x7C00, "NaN");
}

static void convert_all_bf16_patterns(void) {
    all_patterns(SEQPAR_SAFETENSORS_BF16, 8, 7, seqpar_safetensors_bf16_to_f32);
}

static void convert_f64_to_f32_rounds_to_nearest(void) {
    const double data[] = {1 + ldexp(1, -24),       1 + 3 * ldexp(1, -24),
                           1 + 1.1 * ldexp(1, -24), -0.0,
                           ldexp(1, -149),          ldexp(1, -150),
                           (double)FLT_MAX,         -(double)FLT_MAX,
                           (double)INFINITY,        (double)NAN};
    const float wanted[] = {1,
                            1 + 2 * FLT_EPSILON,
                            1 + FLT_EPSILON,
                            -0.0f,
                            FLT_MIN * FLT_EPSILON,
                            0,
                            FLT_MAX,
                            -FLT_MAX,
                            INFINITY,
                            NAN};
    seqpar_safetensors_part part = part_of("d", 0, COUNT(data));
    float out[COUNT(data)];
    seqpar_safetensors_file *file;

    save_one("rounding", "d", SEQPAR_SAFETENSORS_F64, COUNT(data), data);
    file = opened("rounding");
    if (!file) return;
    test_expect(seqpar_safetensors_read_f32(file, out, &part, fresh()) == 0, "%s", last.text);
    for (int64_t i = 0; i < COUNT(data); i++)
        test_expect(same_value((double)out[i], (double)wanted[i]), "%.17g became %.9g", data[i],
                    (double)out[i]);
    seqpar_safetensors_close(file);
}

static void convert_f64_beyond_float_is_refused(void) {
    const double data[] = {1, 2, -1e39, 4};
    seqpar_safetensors_part part = part_of("d", 1, 3);
    seqpar_safetensors_file *file;
    double wide[3];
    float out[3];

    save_one("beyond", "d", SEQPAR_SAFETENSORS_F64, 4, data);
    file = opened("beyond");
    if (!file) return;
    refused("read_f32", seqpar_safetensors_read_f32(file, out, &part, fresh()),
            SEQPAR_ERR_NOT_FINITE, "element 2 of 4", "\"d\"");
    part.finite = 1;
    test_expect(seqpar_safetensors_read_f64(file, wide, &part, fresh()) == 0 &&
                    wide[1] == -1e39,
                "%s", last.text);
    seqpar_safetensors_close(file);
}

static void convert_integers_is_refused(void) {
    int64_t data[8] = {0};

    for (int d = 1; d < SEQPAR_SAFETENSORS_DTYPE_COUNT; d++) {
        seqpar_safetensors_dtype dtype = (seqpar_safetensors_dtype)d;
        seqpar_safetensors_part part = part_of("n", 0, 3);
        seqpar_safetensors_file *file;
        float out[3];
        int is_float = 0;

        for (int64_t i = 0; i < COUNT(floats); i++) is_float |= floats[i] == dtype;
        save_one("integers", "n", dtype, 3, data);
        file = opened("integers");
        if (file && is_float)
            test_expect(seqpar_safetensors_read_f32(file, out, &part, fresh()) == 0, "%s",
                        last.text);
        else if (file)
            refused("read_f32", seqpar_safetensors_read_f32(file, out, &part, fresh()),
                    SEQPAR_ERR_FILE_TENSOR, "\"n\"", seqpar_safetensors_dtype_name(dtype));
        part.finite = 1;
        test_expect(file && seqpar_safetensors_read(file, data, &part, fresh()) == 0, "%s",
                    last.text);
        seqpar_safetensors_close(file);
    }
}

/* ---- NaN and Inf ------------------------------------------------------------------------- */

/* The bits of NaN, Inf and -Inf, of a quiet and a signalling NaN, and of the largest finite
   number. */
static const uint64_t not_finite[][4] = {
    {0x7E00, 0x7C00, 0xFC00, 0x7C01},
    {0x7FC0, 0x7F80, 0xFF80, 0x7F81},
    {0x7FC00000, 0x7F800000, 0xFF800000, 0x7F800001},
    {0x7FF8000000000000, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF0000000000001},
};

static const uint64_t largest[] = {0x7BFF, 0x7F7F, 0x7F7FFFFF,
                                   0x47EFFFFFE0000000 /* FLT_MAX */};

enum { LENGTH = 2100 }; /* more than one chunk */
static void refuse_one(seqpar_safetensors_dtype dtype, uint64_t poison, uint64_t fine,
                       int64_t at) {
    static unsigned char data[LENGTH * 8], raw[LENGTH * 8];
    static double wide[LENGTH];
    static float narrow[LENGTH];
    int64_t each = seqpar_safetensors_dtype_bytes(dtype);
    seqpar_safetensors_part part = {"poisoned", 1, LENGTH - 1, 1};
    seqpar_safetensors_part before = {"poisoned", 0, at, 1};
    seqpar_safetensors_file *file;
    char index[64];

    for (int64_t i = 0; i < LENGTH; i++)
        memcpy(data + i * each, i == at ? &poison : &fine, (size_t)each);
    snprintf(index, sizeof index, "element %" PRId64 " of %d ", at, LENGTH);
    save_one("poison", "poisoned", dtype, LENGTH, data);
    file = opened("poison");
    if (!file) return;
    refused("read", seqpar_safetensors_read(file, raw, &part, fresh()), SEQPAR_ERR_NOT_FINITE,
            "\"poisoned\"", index);
    refused("read_f32", seqpar_safetensors_read_f32(file, narrow, &part, fresh()),
            SEQPAR_ERR_NOT_FINITE, "\"poisoned\"", index);
    refused("read_f64", seqpar_safetensors_read_f64(file, wide, &part, fresh()),
            SEQPAR_ERR_NOT_FINITE, "\"poisoned\"", index);
    test_expect(seqpar_safetensors_read_f32(file, narrow, &before, fresh()) == 0,
                "before it: %s", last.text);
    part.finite = 0;
    test_expect(seqpar_safetensors_read(file, raw, &part, fresh()) == 0 &&
                    seqpar_safetensors_read_f32(file, narrow, &part, fresh()) == 0 &&
                    seqpar_safetensors_read_f64(file, wide, &part, fresh()) == 0,
                "let through: %s", last.text);
    test_expect(!isfinite(wide[at - 1]) && !isfinite(narrow[at - 1]), "it got lost");
    seqpar_safetensors_close(file);
}

static void nan_and_inf_are_refused(void) {
    /* the first and the last element of a part, and of a chunk */
    static const int64_t at[] = {1, 7, 2047, 2048, 2049, 2099};

    for (int64_t d = 0; d < COUNT(floats); d++)
        for (int64_t k = 0; k < 4; k++, said_pause = 1)
            for (int64_t i = 0; i < COUNT(at); i++)
                refuse_one(floats[d], not_finite[d][k], largest[d], at[i]);
    said_pause = 0;
}

/* ---- what is asked of a file and not in it ----------------------------------------------- */

static void missing_tensor_is_refused(void) {
    seqpar_safetensors_tensor wanted = tensor_of("nope", SEQPAR_SAFETENSORS_U8, 1);
    seqpar_safetensors_part part = part_of("nope", 0, 1);
    seqpar_safetensors_file *file;
    float out;

    save_golden("golden");
    file = opened("golden");
    if (!file) return;
    refused("read", seqpar_safetensors_read(file, &out, &part, fresh()), SEQPAR_ERR_FILE_TENSOR,
            "\"nope\"", "2 tensors");
    refused("read_f32", seqpar_safetensors_read_f32(file, &out, &part, fresh()),
            SEQPAR_ERR_FILE_TENSOR, "\"nope\"", "golden");
    refused("expect", seqpar_safetensors_expect(file, &wanted, fresh()), SEQPAR_ERR_FILE_TENSOR,
            "\"nope\"", NULL);
    test_expect(seqpar_safetensors_expect(file, &wanted, NULL) == SEQPAR_ERR_FILE_TENSOR,
                "error = NULL");
    seqpar_safetensors_close(file);
    save("nothing", NULL, 0, NULL);
    file = opened("nothing");
    if (file)
        refused("read", seqpar_safetensors_read(file, &out, &part, fresh()),
                SEQPAR_ERR_FILE_TENSOR, "\"nope\"", "no tensors");
    seqpar_safetensors_close(file);
}

static void unexpected_shape_or_dtype_is_refused(void) {
    seqpar_safetensors_tensor wanted = {
        .name = "w", .dtype = SEQPAR_SAFETENSORS_F32, .dims = 2, .shape = {2, 3}};
    float data[6] = {0};
    const void *pointer = data;
    seqpar_safetensors_file *file;

    test_expect(save("shape", &wanted, 1, &pointer) == 0, "%s", last.text);
    file = opened("shape");
    if (!file) return;
    test_expect(seqpar_safetensors_expect(file, &wanted, fresh()) == 0, "%s", last.text);
    wanted.dtype = SEQPAR_SAFETENSORS_NONE;
    test_expect(seqpar_safetensors_expect(file, &wanted, fresh()) == 0, "any dtype: %s",
                last.text);
    wanted.shape[1] = 4;
    refused("shape", seqpar_safetensors_expect(file, &wanted, fresh()), SEQPAR_ERR_FILE_TENSOR,
            "is F32 [2, 3]", "but [2, 4] is");
    wanted.shape[1] = 3;
    wanted.dtype = SEQPAR_SAFETENSORS_BF16;
    refused("dtype", seqpar_safetensors_expect(file, &wanted, fresh()), SEQPAR_ERR_FILE_TENSOR,
            "F32 [2, 3]", "BF16 [2, 3]");
    wanted.dtype = SEQPAR_SAFETENSORS_F32;
    wanted.dims = 1;
    refused("dims", seqpar_safetensors_expect(file, &wanted, fresh()), SEQPAR_ERR_FILE_TENSOR,
            "\"w\"", "F32 [2] is");
    seqpar_safetensors_close(file);
}

static void first_error_stays(void) {
    seqpar_safetensors_file *file;
    seqpar_safetensors_part part = part_of("nope", 0, 1);
    char out;

    save_golden("golden");
    file = opened("golden");
    if (!file) return;
    last.status = SEQPAR_ERR_FILE_READ;
    snprintf(last.text, sizeof last.text, "the first");
    test_expect(seqpar_safetensors_read(file, &out, &part, &last) == SEQPAR_ERR_FILE_TENSOR,
                "its own status");
    test_expect(last.status == SEQPAR_ERR_FILE_READ && strcmp(last.text, "the first") == 0,
                "%s", last.text);
    seqpar_safetensors_close(file);
}

/* The parts of a sentence that matter survive long paths and names. */
static void long_paths_and_names_leave_room(void) {
    char path[301], name[301], folders[420];
    seqpar_safetensors_file *file = NULL;
    seqpar_safetensors_tensor wanted;

    said_pause = 1;
    memset(path, 'p', 240);
    strcpy(path + 240, "/end.safetensors");
    memset(name, 'n', 300);
    name[300] = '\0';
    snprintf(folders, sizeof folders, "missing/%s", path);
    refused("open", seqpar_safetensors_open(&file, in_folder(folders), fresh()),
            SEQPAR_ERR_FILE_OPEN, "/end.safetensors", "No such file");
    save_golden("golden");
    file = opened("golden");
    wanted = tensor_of(name, SEQPAR_SAFETENSORS_U8, 1);
    if (file)
        refused("expect", seqpar_safetensors_expect(file, &wanted, fresh()),
                SEQPAR_ERR_FILE_TENSOR, "nnn...", "2 tensors");
    seqpar_safetensors_close(file);
    said_pause = 0;
}

/* ---- malformed files --------------------------------------------------------------------- */

#define T(name, dtype, shape, offsets) \
    "\"" name "\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define U8 "\"U8\""

static const struct {
    const char *name;   /* of the case */
    const char *header; /* as it stands, without padding */
    int64_t data_bytes;
    const char *word, *other_word; /* that the message has to have */
} malformed[] = {

    {"empty_header", "", 0, "does not begin with '{'", NULL},
    {"space_first", " {}", 0, "does not begin with '{'", NULL},
    {"list", "[]", 0, "does not begin with '{'", NULL},
    {"not_closed", "{\"w\":{", 0, "not JSON from byte", NULL},
    {"only_a_brace", "{", 0, "not JSON from byte", NULL},
    {"two_objects", "{}{}", 0, "not JSON from byte 2", NULL},
    {"text_after_the_end", "{} x", 0, "not JSON from byte", NULL},
    {"comma_too_many", "{" T("w", U8, "[1]", "[0,1]") ",}", 1, "not JSON", NULL},
    {"string_not_closed", "{\"w", 0, "not JSON", NULL},
    {"nested_2000_deep", NULL, 0, "not JSON", NULL}, /* filled in below */
    {"single_quotes", "{'w':1}", 0, "not JSON", NULL},
    {"name_not_utf8", "{" T("w\xFF", U8, "[1]", "[0,1]") "}", 1, "0xff", "not UTF-8"},
    {"name_overlong_utf8", "{" T("\xC0\x80", U8, "[1]", "[0,1]") "}", 1, "0xc0", "not UTF-8"},
    {"name_surrogate_utf8", "{" T("\xED\xA0\x80", U8, "[1]", "[0,1]") "}", 1, "0xed",
     "not UTF-8"},
    {"name_utf8_cut_off", "{" T("\xE6\xBC", U8, "[1]", "[0,1]") "}", 1, "0xe6", "not UTF-8"},
    {"name_beyond_unicode", "{" T("\xF4\x90\x80\x80", U8, "[1]", "[0,1]") "}", 1, "0xf4",
     "not UTF-8"},
    {"name_with_newline", "{" T("w\n", U8, "[1]", "[0,1]") "}", 1, "0x0a", "control character"},
    {"name_with_nul_escape", "{" T("w\\u0000x", U8, "[1]", "[0,1]") "}", 1, "byte 3", "NUL"},
    {"name_with_bad_escape", "{" T("w\\u123Gx", U8, "[1]", "[0,1]") "}", 1, "byte 3",
     "four digits"},
    {"name_with_lone_surrogate", "{" T("\\ud800", U8, "[1]", "[0,1]") "}", 1, "not JSON", NULL},
    {"control_character_outside", "{\x01}", 0, "0x01", "control character"},
    {"tensor_is_a_number", "{\"w\":17}", 0, "\"w\"", "is 17"},
    {"tensor_is_null", "{\"w\":null}", 0, "\"w\"", "is null"},
    {"tensor_is_a_list", "{\"w\":[]}", 0, "\"w\"", "a list"},
    {"name_twice", "{" T("w", U8, "[1]", "[0,1]") "," T("w", U8, "[1]", "[1,2]") "}", 2,
     "\"w\"", "twice"},
    {"name_twice_by_escape",
     "{" T("w", U8, "[1]", "[0,1]") "," T("\\u0077", U8, "[1]", "[1,2]") "}", 2, "\"w\"",
     "twice"},
    {"dtype_missing", "{\"w\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "\"w\"",
     "\"dtype\" is missing"},
    {"shape_missing", "{\"w\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "\"w\"",
     "\"shape\" is missing"},
    {"offsets_missing", "{\"w\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "\"w\"",
     "\"data_offsets\" is missing"},
    {"dtype_twice",
     "{\"w\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
     "\"w\"", "\"dtype\" comes twice"},
    {"field_unknown",
     "{\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"strides\":[1]}}", 1,
     "\"w\"", "\"strides\""},
    {"dtype_unknown", "{" T("w", "\"F8_E4M3\"", "[1]", "[0,1]") "}", 1, "\"w\"", "F8_E4M3"},
    {"dtype_lower_case", "{" T("w", "\"f32\"", "[1]", "[0,4]") "}", 4, "\"w\"", "dtype f32"},
    {"dtype_none", "{" T("w", "\"NONE\"", "[1]", "[0,4]") "}", 4, "\"w\"", "NONE"},
    {"dtype_a_number", "{" T("w", "8", "[1]", "[0,1]") "}", 1, "\"w\"", "dtype 8"},
    {"shape_a_number", "{" T("w", U8, "1", "[0,1]") "}", 1, "\"w\"", "shape is 1"},
    {"shape_negative", "{" T("w", U8, "[2,-3]", "[0,6]") "}", 6, "\"w\"", "shape[1] is -3"},
    {"shape_a_fraction", "{" T("w", U8, "[1.5]", "[0,1]") "}", 1, "1.5", "plain digits"},
    {"shape_with_exponent", "{" T("w", U8, "[1e0]", "[0,1]") "}", 1, "1e0", "plain digits"},
    {"shape_with_leading_zero", "{" T("w", U8, "[01]", "[0,1]") "}", 1, "01", "plain digits"},
    {"shape_of_strings", "{" T("w", U8, "[\"1\"]", "[0,1]") "}", 1, "\"w\"", "shape[0] is 1"},
    {"shape_of_2_to_the_53", "{" T("w", U8, "[9007199254740993]", "[0,1]") "}", 1, "\"w\"",
     "shape[0] is 9007199254740992"},
    {"shape_of_19_digits", "{" T("w", U8, "[1000000000000000000]", "[0,1]") "}", 1,
     "shape[0] is 1e+18", "not a size"},
    {"shape_of_20_digits", "{" T("w", U8, "[10000000000000000000]", "[0,1]") "}", 1,
     "number 10000000000000000000 at", "plain digits"},
    {"shape_of_41_digits",
     "{" T("w", U8, "[12345678901234567890123456789012345678901]", "[0,1]") "}", 1,
     "number 1234567890123456789012345678901234567890 at", "plain digits"},
    {"shape_of_30_digits", "{" T("w", U8, "[123456789012345678901234567890]", "[0,1]") "}", 1,
     "123456789012345678901234567890", "plain digits"},
    {"shape_of_nine_sizes", "{" T("w", U8, "[1,1,1,1,1,1,1,1,1]", "[0,1]") "}", 1, "\"w\"",
     "9 dimensions"},
    {"elements_overflow", "{" T("w", U8, "[4294967296,4294967296]", "[0,0]") "}", 0, "\"w\"",
     "[4294967296, 4294967296]"},
    {"bytes_overflow", "{" T("w", "\"F64\"", "[2147483648,2147483648]", "[0,0]") "}", 0,
     "\"w\"", "[2147483648, 2147483648]"},
    {"offsets_a_number", "{" T("w", U8, "[1]", "0") "}", 1, "\"w\"", "data_offsets"},
    {"offsets_only_one", "{" T("w", U8, "[1]", "[0]") "}", 1, "\"w\"", "two offsets"},
    {"offsets_three", "{" T("w", U8, "[1]", "[0,1,1]") "}", 1, "\"w\"", "two offsets"},
    {"offsets_negative", "{" T("w", U8, "[1]", "[-1,0]") "}", 1, "\"w\"", "[-1, 0]"},
    {"offsets_reversed", "{" T("w", U8, "[1]", "[1,0]") "}", 1, "\"w\"", "[1, 0]"},
    {"offsets_past_the_end", "{" T("w", U8, "[7]", "[0,7]") "}", 6, "\"w\"", "only 6 bytes"},
    {"offsets_too_short", "{" T("w", "\"F32\"", "[2,3]", "[0,23]") "}", 23, "\"w\"",
     "takes 24 bytes"},
    {"offsets_too_long", "{" T("w", "\"F32\"", "[2,3]", "[0,25]") "}", 25, "F32 [2, 3]",
     "hold 25"},
    {"scalar_without_bytes", "{" T("w", "\"F32\"", "[]", "[0,0]") "}", 0, "\"w\"",
     "takes 4 bytes"},
    {"empty_tensor_with_bytes", "{" T("w", "\"F32\"", "[0]", "[0,4]") "}", 4, "\"w\"",
     "takes 0 bytes"},
    {"overlap", "{" T("v", U8, "[4]", "[0,4]") "," T("w", U8, "[3]", "[3,6]") "}", 6,
     "tensor \"w\"", "\"v\""},
    {"same_place_twice", "{" T("v", U8, "[4]", "[0,4]") "," T("w", U8, "[4]", "[0,4]") "}", 4,
     "inside tensor", "ends at 4"},
    {"empty_tensor_inside_another",
     "{" T("v", U8, "[4]", "[0,4]") "," T("w", U8, "[0]", "[2,2]") "}", 4, "tensor \"w\"",
     "byte 2"},
    {"hole", "{" T("w", U8, "[2]", "[4,6]") "," T("v", U8, "[3]", "[0,3]") "}", 6,
     "tensor \"w\"", "the 1 bytes from 3"},
    {"hole_at_the_start", "{" T("w", U8, "[2]", "[1,3]") "}", 3, "\"w\"", "the 1 bytes from 0"},
    {"bytes_after_the_last", "{" T("w", U8, "[2]", "[0,2]") "}", 5, "last 3 bytes", "byte 2"},
    {"bytes_of_nobody", "{}", 1, "last 1 bytes", NULL},
    {"metadata_a_string", "{\"__metadata__\":\"x\"}", 0, "__metadata__ is x", NULL},
    {"metadata_null", "{\"__metadata__\":null}", 0, "__metadata__ is null", NULL},
    {"metadata_a_number", "{\"__metadata__\":{\"step\":17}}", 0, "\"step\"", "17"},
    {"metadata_nested", "{\"__metadata__\":{\"step\":{\"a\":\"b\"}}}", 0, "\"step\"",
     "an object"},
    {"metadata_key_twice", "{\"__metadata__\":{\"a\":\"1\",\"b\":\"2\",\"a\":\"3\"}}", 0,
     "\"a\"", "twice"},
    {"metadata_twice", "{\"__metadata__\":{},\"__metadata__\":{}}", 0,
     "__metadata__ comes twice", NULL},
};

static void malformed_headers(void) {
    static char deep[2001];

    memset(deep, '[', 2000);
    memcpy(deep, "{\"w\":", 5);
    for (int64_t i = 0; i < COUNT(malformed); i++) {
        const char *header = malformed[i].header ? malformed[i].header : deep;
        seqpar_safetensors_file *file = (seqpar_safetensors_file *)&header;
        char name[96];
        snprintf(name, sizeof name, "malformed_%s", malformed[i].name);
        if (!test_wanted(name, 0)) continue;
        craft("malformed", header, (int64_t)strlen(header), malformed[i].data_bytes);
        refused("open", seqpar_safetensors_open(&file, in_folder("malformed"), fresh()),
                SEQPAR_ERR_FILE_FORMAT, malformed[i].word, malformed[i].other_word);
        test_expect(!file, "*file is not NULL");
        test_expect(strstr(last.text, "malformed: ") != NULL, "the file is not named: %s",
                    last.text);
        test_expect(strstr(last.text, "; ") || strstr(last.text, ", get"), "no advice: %s",
                    last.text);
        finish(name);
    }
}

/* Where the length in front is what is wrong. */
static void malformed_lengths(void) {
    static const struct {
        const char *name, *bytes;
        int64_t count;
        const char *word;
    } cases[] = {
        {"malformed_file_of_0_bytes", "", 0, "has 0 bytes"},
        {"malformed_file_of_7_bytes", "\0\0\0\0\0\0\0", 7, "has 7 bytes"},
        {"malformed_header_of_0_bytes", "\0\0\0\0\0\0\0\0{}", 10, "does not begin"},
        {"malformed_header_cut_off", "\3\0\0\0\0\0\0\0{}", 10, "has 3 bytes, but only 2"},
        {"malformed_header_length_negative", "\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF{}", 10,
         "18446744073709551615"},
        {"malformed_header_length_huge", "\0\0\0\0\0\0\0\1{}", 10, "72057594037927936"},
        {"malformed_header_with_nul", "\3\0\0\0\0\0\0\0{}\0", 11, "0x00"},
    };

    for (int64_t i = 0; i < COUNT(cases); i++) {
        seqpar_safetensors_file *file = NULL;
        if (!test_wanted(cases[i].name, 0)) continue;
        spit("malformed", cases[i].bytes, cases[i].count);
        refused("open", seqpar_safetensors_open(&file, in_folder("malformed"), fresh()),
                SEQPAR_ERR_FILE_FORMAT, "malformed", cases[i].word);
        finish(cases[i].name);
    }
}

/* So many letters, then the end of a text. */
static const char *long_text(char letter, int letters, const char *end) {
    static char text[512];

    memset(text, letter, (size_t)letters);
    strcpy(text + letters, end);
    return text;
}

/* The format, with so many letters for each ~. */
static void fill_in(char *out, const char *format, int letters) {
    for (; *format; format++) {
        int count = *format == '~' ? letters : 1;

        memset(out, *format == '~' ? 'n' : *format, (size_t)count);
        out += count;
    }
    *out = '\0';
}

/* A hundred bytes are shown: names from the front, paths from the back, cut between characters. */
static void texts_are_cut_between_characters(void) {
    static const struct {
        int letters;
        const char *end;
        int shown; /* letters; -1: all of the text */
    } cuts[] = {{100, "", -1},        {101, "", 100},           {98, "\xC3\xA9", -1},
                {99, "\xC3\xA9", 99}, {98, "\xE6\xBC\xA2", 98}, {97, "\xF0\x9F\x99\x82", 97}};
    char wanted[600], text[512];
    float out;
    seqpar_safetensors_file *file;

    save_golden("golden");
    file = opened("golden");
    for (int64_t i = 0; file && i < COUNT(cuts); i++) {
        const char *name = long_text('n', cuts[i].letters, cuts[i].end);
        seqpar_safetensors_part part = part_of(name, 0, 1);

        snprintf(wanted, sizeof wanted, ": tensor \"%.*s%s\": is not in",
                 cuts[i].shown < 0 ? 512 : cuts[i].shown, name, cuts[i].shown < 0 ? "" : "...");
        refused("read", seqpar_safetensors_read(file, &out, &part, fresh()),
                SEQPAR_ERR_FILE_TENSOR, wanted, NULL);
    }
    seqpar_safetensors_close(file);
    for (int64_t i = 0; i < COUNT(cuts); i++) {
        const char *letters = long_text('p', cuts[i].letters, "");

        snprintf(text, sizeof text, "%s%s", cuts[i].end, letters);
        snprintf(wanted, sizeof wanted, "%s%s: cannot", cuts[i].shown < 0 ? cuts[i].end : "...",
                 cuts[i].shown < 0 ? letters : letters + cuts[i].letters - cuts[i].shown);
        refused("open", seqpar_safetensors_open(&file, text, fresh()), SEQPAR_ERR_FILE_OPEN,
                wanted, "No such file");
        test_expect(strstr(last.text, wanted) == last.text, "begins otherwise: %s", last.text);
    }
}

/* Wherever a sentence shows a text of the header, a long one is cut; its buffer is as long. */
static void long_texts_of_headers_are_cut(void) {
    static const struct {
        const char *header; /* each ~ is a long text */
        int64_t data_bytes;
        const char *word;
    } cases[] = {
        {"{\"w\":\"~\"}", 0, "\"w\": is ~... where"},
        {"{\"w\":{\"~\":1}}", 0, "field \"~...\" is not"},
        {"{\"w\":{\"dtype\":\"~\",\"shape\":[],\"data_offsets\":[0,1]}}", 1,
         "dtype ~... is none"},
        {"{\"w\":{\"dtype\":\"U8\",\"shape\":\"~\",\"data_offsets\":[0,1]}}", 1,
         "shape is ~..., not"},
        {"{\"w\":{\"dtype\":\"U8\",\"shape\":[1,\"~\"],\"data_offsets\":[0,1]}}", 1,
         "shape[1] is ~..., not"},
        {"{\"w\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,\"~\"]}}", 1,
         "data_offsets [0, ~...] are"},
        {"{\"w\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[\"~\",1]}}", 1,
         "data_offsets [~..., 1] are"},
        {"{\"__metadata__\":\"~\"}", 0, "__metadata__ is ~..., not"},
        {"{\"__metadata__\":{\"~\":1}}", 0, "__metadata__ \"~...\" is 1"},
        {"{\"__metadata__\":{\"~\":\"\",\"~\":\"\"}}", 0, "the key \"~...\" twice"},
        {"{\"~\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"w\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[3,7]}}",
         7, "begins at data byte 3, inside tensor \"~...\", which"},
    };

    for (int64_t i = 0; i < COUNT(cases); i++) {
        char header[1024], word[256];
        seqpar_safetensors_file *file = NULL;

        fill_in(header, cases[i].header, 101);
        fill_in(word, cases[i].word, 100);
        craft("long", header, (int64_t)strlen(header), cases[i].data_bytes);
        refused("open", seqpar_safetensors_open(&file, in_folder("long"), fresh()),
                SEQPAR_ERR_FILE_FORMAT, word, "long: ");
    }
}

/* The same of a list of tensors, of its metadata and of a file's first tensor. */
static void long_texts_of_lists_are_cut(void) {
    const char *text = long_text('n', 101, "");
    unsigned char byte = 1;
    char shown[128];
    seqpar_safetensors_tensor tensor = tensor_of(text, SEQPAR_SAFETENSORS_U8, 1);
    seqpar_safetensors_pair pairs[2] = {{text, "v"}, {text, "w"}};
    seqpar_safetensors_desc desc = {
        .path = in_folder("long"), .tensors = &tensor, .count = 1, .metadata = pairs};
    seqpar_safetensors_part part = part_of("w", 0, 1);
    seqpar_safetensors_writer *writer = NULL;
    seqpar_safetensors_file *file;

    fill_in(shown, "\"~...\"", 100);
    desc.metadata_count = 2;
    refused("twice", seqpar_safetensors_create(&writer, &desc, fresh()), SEQPAR_ERR_FILE_FORMAT,
            shown, "is there twice");
    pairs[0].value = NULL;
    refused("half", seqpar_safetensors_create(&writer, &desc, fresh()), SEQPAR_ERR_FILE_FORMAT,
            shown, "entry 0");
    desc.metadata_count = 0;
    test_expect(seqpar_safetensors_create(&writer, &desc, fresh()) == 0, "%s", last.text);
    refused("append", seqpar_safetensors_append(writer, "w", &byte, 1, &last),
            SEQPAR_ERR_FILE_TENSOR, shown, "is next");
    seqpar_safetensors_abort(writer);
    save_one("long", text, SEQPAR_SAFETENSORS_U8, 1, &byte);
    file = opened("long");
    if (file)
        refused("read", seqpar_safetensors_read(file, &byte, &part, fresh()),
                SEQPAR_ERR_FILE_TENSOR, shown, "the first");
    seqpar_safetensors_close(file);
}

static void header_over_the_limit_is_refused(void) {
    static const unsigned char length[8] = {0x01, 0xE1, 0xF5, 0x05}; /* 100,000,001 */
    seqpar_safetensors_file *file = NULL;

    spit("limit", length, 8);
    test_expect(truncate(in_folder("limit"), 200000000) == 0, "truncate");
    refused("open", seqpar_safetensors_open(&file, in_folder("limit"), fresh()),
            SEQPAR_ERR_FILE_FORMAT, "100000001", "100000000 allowed");
}

/* What looks odd but is legal. */
static void odd_but_legal_headers_are_read(void) {
    static const struct {
        const char *header;
        int64_t data_bytes, count;
    } cases[] = {
        {"{}", 0, 0},
        {"{}   \n", 0, 0},
        {"{\t\"w\" :\r\n{\"data_offsets\":[ 0 , 1 ],\"shape\":[],\"dtype\":\"BOOL\"} }", 1, 1},
        {"{\"__metadata__\":{}}", 0, 0},
        {"{" T("w", U8, "[2]", "[3,5]") "," T("v", U8, "[3]", "[0,3]") "}", 5, 2},
        {"{" T("e", U8, "[0]", "[3,3]") "," T("w", U8, "[2]", "[3,5]") "," T(
             "v", U8, "[3]", "[0,3]") "," T("f", U8, "[7,0]",
                                            "[5,5]") "," T("g", "\"F64\"", "[0]", "[0,0]") "}",
         5, 5},
        {"{" T("\\u00e9\\ud83d\\ude42\\n", U8, "[1]", "[0,1]") "}", 1, 1},
        {"{" T("w", "\"\\u00558\"", "[1]", "[0,1]") "}", 1, 1},
    };

    for (int64_t i = 0; i < COUNT(cases); i++) {
        seqpar_safetensors_file *file;

        craft("legal", cases[i].header, (int64_t)strlen(cases[i].header), cases[i].data_bytes);
        file = opened("legal");
        test_expect(file && seqpar_safetensors_count(file) == cases[i].count, "case %" PRId64,
                    i);
        seqpar_safetensors_close(file);
    }
}

static void truncation_at_every_byte_is_refused(void) {
    seqpar_safetensors_file *file = NULL;

    said_pause = 1;
    for (int64_t bytes = 0; bytes < GOLDEN_BYTES; bytes++) {
        spit("cut", golden, bytes);
        refused("cut", seqpar_safetensors_open(&file, in_folder("cut"), fresh()),
                SEQPAR_ERR_FILE_FORMAT, "/cut", NULL);
    }
    said_pause = 0;
    spit("cut", golden, GOLDEN_BYTES + 1); /* the NUL of the literal */
    refused("one byte more", seqpar_safetensors_open(&file, in_folder("cut"), fresh()),
            SEQPAR_ERR_FILE_FORMAT, "last 1 bytes", NULL);
}

/* ---- mutations --------------------------------------------------------------------------- */

enum { MUTANT_ROOM = 2048 };

typedef struct {
    unsigned char bytes[MUTANT_ROOM];
    int64_t count;
} mutant;

static void replace_span(mutant *m, int64_t at, int64_t removed, const void *inserted,
                         int64_t count) {
    int64_t rest = m->count - at - removed;

    if (rest < 0 || at + count + rest > MUTANT_ROOM) return;
    memmove(m->bytes + at + count, m->bytes + at + removed, (size_t)rest);
    memcpy(m->bytes + at, inserted, (size_t)count);
    m->count = at + count + rest;
}

static void mutate(mutant *m) {
    static const char *const tokens[] = {"{",
                                         "}",
                                         "[",
                                         "]",
                                         ",",
                                         ":",
                                         "\"",
                                         "\\",
                                         "\\u0000",
                                         "\\ud800",
                                         "-",
                                         "-1",
                                         "0",
                                         "9",
                                         "1e9",
                                         "null",
                                         "true",
                                         "9007199254740991",
                                         "9223372036854775807",
                                         "18446744073709551616",
                                         "[[[[[[",
                                         "\"a\"",
                                         "\"dtype\"",
                                         "\"__metadata__\":{\"x\":\"y\"},",
                                         "\"F64\"",
                                         "\xFF",
                                         "\xE6\xBC"};
    const char *token = tokens[random_below(COUNT(tokens))];
    int64_t at = random_below(m->count ? m->count : 1), span = random_below(9);
    unsigned char chunk[16];

    switch (random_below(7)) {
    case 0: m->bytes[at] = (unsigned char)(m->bytes[at] ^ 1u << random_below(8)); break;
    case 1: m->bytes[at] = (unsigned char)test_random(); break;
    case 2: replace_span(m, at, span, "", 0); break;
    case 3: replace_span(m, at, random_below(2), token, (int64_t)strlen(token)); break;
    case 4: /* a piece from elsewhere */
        memcpy(chunk, m->bytes + random_below(MUTANT_ROOM - 16), sizeof chunk);
        replace_span(m, at, span, chunk, random_below(16));
        break;
    case 5: m->count = at; break;
    default: /* a digit becomes another */
        while (at < m->count && (m->bytes[at] < '0' || m->bytes[at] > '9')) at++;
        if (at < m->count) m->bytes[at] = (unsigned char)('0' + random_below(10));
    }
}

/* A length that fits the file again, or else hardly a mutant would get past the first check. */
static void mend_length(mutant *m, int64_t data_bytes) {
    int64_t length = m->count - 8 - data_bytes;

    for (int i = 0; length >= 0 && i < 8; i++) m->bytes[i] = (unsigned char)(length >> (8 * i));
}

/* Whatever is accepted must hold together and be readable, into memory of exactly the right
   size. */
static void use_everything(seqpar_safetensors_file *file, int64_t file_bytes) {
    int64_t sum = 0;

    for (int64_t i = 0; i < seqpar_safetensors_count(file); i++) {
        const seqpar_safetensors_tensor *tensor = seqpar_safetensors_at(file, i);
        seqpar_safetensors_part part = seqpar_safetensors_whole(tensor);
        void *raw = malloc((size_t)tensor->bytes + 1);
        double *wide = malloc((size_t)tensor->count * sizeof *wide + 1);
        seqpar_status status;

        sum += tensor->bytes;
        test_expect(tensor->bytes <= file_bytes && tensor->offset <= file_bytes - tensor->bytes,
                    "out of bounds");
        test_expect(seqpar_safetensors_find(file, tensor->name) == tensor, "not found by name");
        test_expect(seqpar_safetensors_read(file, raw, &part, fresh()) == 0, "%s", last.text);
        part.finite = 1;
        status = seqpar_safetensors_read_f64(file, wide, &part, fresh());
        test_expect(status == 0 || status == SEQPAR_ERR_NOT_FINITE ||
                        status == SEQPAR_ERR_FILE_TENSOR,
                    "%s", last.text);
        free(raw);
        free(wide);
    }
    test_expect(sum <= file_bytes, "%" PRId64 " bytes of tensors", sum);
    for (int64_t i = 0; i < seqpar_safetensors_metadata_count(file); i++) {
        const seqpar_safetensors_pair *pair = seqpar_safetensors_metadata_at(file, i);

        test_expect(seqpar_safetensors_metadata(file, pair->key) == pair->value,
                    "metadata not found by key");
    }
}

static mutant mutation_base(void) {
    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\",\"step\":\"17\"}," T(
        "a", "\"F32\"", "[2,3]",
        "[0,24]") "," T("b", "\"BF16\"", "[3]",
                        "[24,30]") "," T("cc", "\"I64\"", "[]",
                                         "[30,38]") "," T("d", U8, "[0,4]", "[38,38]") "}  ";
    mutant base = {{0}, 0};
    contents all;

    craft("base", header, sizeof header - 1, 38);
    all = slurp("base");
    memcpy(base.bytes, all.bytes, (size_t)all.count);
    base.count = all.count;
    free(all.bytes);
    return base;
}

static void mutations_never_crash(void) {
#ifdef __SANITIZE_ADDRESS__
    enum { MUTATIONS = 2000 }; /* a file each takes several times as long */
#else
    enum { MUTATIONS = 20000 };
#endif
    const mutant base = mutation_base();
    int accepted = 0, refusals = 0;

    for (int round = 0; round < MUTATIONS; round++) {
        mutant m = base;
        seqpar_safetensors_file *file = NULL;
        seqpar_status status;

        for (int64_t n = 1 + random_below(4); n > 0; n--) mutate(&m);
        if (random_below(2)) mend_length(&m, 38);
        spit("mutant", m.bytes, m.count);
        status = seqpar_safetensors_open(&file, in_folder("mutant"), fresh());
        accepted += status == 0;
        refusals += status != 0;
        test_expect(status == last.status && (status == 0 || status == SEQPAR_ERR_FILE_FORMAT),
                    "round %d: %d, %s", round, status, last.text);
        test_expect((status == 0) == (file != NULL),
                    "round %d: the file does not match the status", round);
        if (file) use_everything(file, m.count - 8);
        seqpar_safetensors_close(file);
    }
    test_expect(accepted > MUTATIONS / 100 && refusals > MUTATIONS / 2,
                "%d accepted, %d refused: no good mix", accepted, refusals);
}

/* ---- files that cannot be read ----------------------------------------------------------- */

static void what_is_no_file_is_refused(void) {
    seqpar_safetensors_file *file = NULL;

    refused("missing", seqpar_safetensors_open(&file, in_folder("missing"), fresh()),
            SEQPAR_ERR_FILE_OPEN, "missing", "No such file");
    refused("folder", seqpar_safetensors_open(&file, folder, fresh()), SEQPAR_ERR_FILE_OPEN,
            folder, "not a regular file");
    refused("device", seqpar_safetensors_open(&file, "/dev/null", fresh()),
            SEQPAR_ERR_FILE_OPEN, "/dev/null", "not a regular file");
    refused("empty path", seqpar_safetensors_open(&file, "", fresh()), SEQPAR_ERR_FILE_OPEN,
            "No such", NULL);
    refused("NULL", seqpar_safetensors_open(&file, NULL, fresh()), SEQPAR_ERR_FILE_OPEN,
            "a path is", NULL);
    test_expect(mkfifo(in_folder("fifo"), 0600) == 0, "mkfifo");
    refused("fifo", seqpar_safetensors_open(&file, in_folder("fifo"), fresh()),
            SEQPAR_ERR_FILE_OPEN, "fifo", "not a regular file");
    test_expect(!file, "*file is not NULL");
}

static void file_that_shrinks_is_noticed(void) {
    seqpar_safetensors_part part = part_of("b", 0, 1);
    seqpar_safetensors_file *file;
    float value;

    spit("shrinks", golden, GOLDEN_BYTES);
    file = opened("shrinks");
    if (!file) return;
    test_expect(truncate(in_folder("shrinks"), GOLDEN_BYTES - 1) == 0, "truncate");
    refused("read_f32", seqpar_safetensors_read_f32(file, &value, &part, fresh()),
            SEQPAR_ERR_FILE_READ, "\"b\"", "3 of 4");
    refused("read", seqpar_safetensors_read(file, &value, &part, fresh()), SEQPAR_ERR_FILE_READ,
            "\"b\"", "became shorter");
    seqpar_safetensors_close(file);
}

/* A file with holes, so that it takes next to no room on the disk. */
static void offsets_beyond_4_gib_are_read(void) {
    const char *header = "{" T("big", "\"F32\"", "[1500000000]", "[0,6000000000]") "," T(
        "end", "\"U8\"", "[3]", "[6000000000,6000000003]") "}";
    seqpar_safetensors_part part = part_of("big", 1499999998, 2), end = part_of("end", 0, 3);
    const float value = -2.5f;
    float out[2] = {1, 1};
    char bytes[3];
    seqpar_safetensors_file *file;
    FILE *stream;

    craft("big", header, (int64_t)strlen(header), 0);
    stream = fopen(in_folder("big"), "r+b");
    fseeko(stream, (off_t)(8 + strlen(header)) + (off_t)5999999996, SEEK_SET);
    fwrite(&value, sizeof value, 1, stream);
    fwrite("end", 3, 1, stream);
    test_expect(fclose(stream) == 0, "a file of 6 GB with holes cannot be made here");
    file = opened("big");
    if (!file) return;
    test_expect(seqpar_safetensors_read_f32(file, out, &part, fresh()) == 0, "%s", last.text);
    test_expect(out[0] == 0 && out[1] == value, "%g %g", (double)out[0], (double)out[1]);
    test_expect(seqpar_safetensors_read(file, bytes, &end, fresh()) == 0 &&
                    memcmp(bytes, "end", 3) == 0,
                "%s", last.text);
    seqpar_safetensors_close(file);
    remove(in_folder("big"));
}

/* ---- writing that fails ------------------------------------------------------------------ */

static const char old_file[] = "what was there before";

static int old_file_is_intact(const char *name) {
    return holds(name, old_file, sizeof old_file);
}

static void limit_file_size(rlim_t bytes) {
    struct rlimit limit;

    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
}

/* A file size limit stands in for a full disk: write() fails at exactly that byte. */
static void full_disk_leaves_the_old_file(void) {
    for (int64_t room = 0; room <= GOLDEN_BYTES; room++) {
        seqpar_status status;

        spit("full", old_file, sizeof old_file);
        limit_file_size((rlim_t)room);
        status = save_golden("full");
        limit_file_size(RLIM_INFINITY);
        if (room < GOLDEN_BYTES) {
            refused("save", status, SEQPAR_ERR_FILE_WRITE, "full", "File too large");
            test_expect(old_file_is_intact("full"),
                        "room for %" PRId64 " bytes: the old file is gone", room);
        } else {
            test_expect(status == 0 && holds("full", golden, GOLDEN_BYTES),
                        "with room for all: %s", last.text);
        }
        test_expect(temporary_files() == 0,
                    "room for %" PRId64 " bytes: a temporary file is left", room);
    }
}

/* The same for pieces too large to wait in stdio's buffer, and what the writer does
   afterwards. */
static void full_disk_in_the_middle_of_a_tensor(void) {
    static const char piece[100000];
    seqpar_safetensors_tensor tensor = tensor_of("w", SEQPAR_SAFETENSORS_U8,
                                                 10 * (int64_t)sizeof piece);
    seqpar_safetensors_desc desc = {
        .path = in_folder("middle"), .tensors = &tensor, .count = 1};
    seqpar_safetensors_writer *writer = NULL;
    seqpar_status status = 0;
    int written = 0;

    spit("middle", old_file, sizeof old_file);
    test_expect(seqpar_safetensors_create(&writer, &desc, fresh()) == 0, "%s", last.text);
    limit_file_size(250000);
    for (; written < 10 && !status; written++)
        status = seqpar_safetensors_append(writer, "w", piece, sizeof piece, &last);
    limit_file_size(RLIM_INFINITY);
    refused("append", status, SEQPAR_ERR_FILE_WRITE, "middle", "File too large");
    test_expect(written == 3, "noticed at piece %d", written);
    test_expect(temporary_files() == 0, "the temporary file outlives the error");
    test_expect(seqpar_safetensors_append(writer, "w", piece, 1, NULL) == SEQPAR_ERR_FILE_WRITE,
                "goes on writing");
    refused("finish", seqpar_safetensors_finish(writer, fresh()), SEQPAR_ERR_FILE_WRITE,
            "middle", "earlier error");
    test_expect(old_file_is_intact("middle"), "the old file is gone");
}

static void every_failing_step_of_writing_is_reported(void) {
    static const struct {
        const char *call;
        seqpar_status status;
    } steps[] = {{"fdopen", SEQPAR_ERR_FILE_OPEN},  {"fwrite", SEQPAR_ERR_FILE_WRITE},
                 {"fflush", SEQPAR_ERR_FILE_WRITE}, {"fsync", SEQPAR_ERR_FILE_WRITE},
                 {"fclose", SEQPAR_ERR_FILE_WRITE}, {"rename", SEQPAR_ERR_FILE_WRITE}};

    for (int64_t i = 0; i < COUNT(steps); i++) {
        seqpar_status status;

        spit("steps", old_file, sizeof old_file);
        failing_call = steps[i].call;
        calls_until_failure = 0;
        status = save_golden("steps");
        failing_call = NULL;
        refused(steps[i].call, status, steps[i].status, "Input/output error",
                i > 0 ? steps[i].call : NULL);
        test_expect(old_file_is_intact("steps"), "%s: the old file is gone", steps[i].call);
        test_expect(temporary_files() == 0, "%s: a temporary file is left", steps[i].call);
    }
}

static void every_failing_step_of_reading_is_reported(void) {
    static const struct {
        const char *call;
        int skipped;
        seqpar_status status;
    } steps[] = {{"fdopen", 0, SEQPAR_ERR_FILE_OPEN},
                 {"fread", 0, SEQPAR_ERR_FILE_READ},
                 {"fread", 1, SEQPAR_ERR_FILE_READ},
                 {"fread", 2, SEQPAR_ERR_FILE_READ},
                 {"fseeko", 0, SEQPAR_ERR_FILE_READ}};
    seqpar_safetensors_part part = part_of("b", 0, 1);
    float value;

    save_golden("steps");
    for (int64_t i = 0; i < COUNT(steps); i++) {
        seqpar_safetensors_file *file = NULL;
        seqpar_status status;

        failing_call = steps[i].call;
        calls_until_failure = steps[i].skipped;
        status = seqpar_safetensors_open(&file, in_folder("steps"), fresh());
        if (!status) status = seqpar_safetensors_read_f32(file, &value, &part, &last);
        failing_call = NULL;
        refused(steps[i].call, status, steps[i].status, "steps: ", "check the");
        seqpar_safetensors_close(file);
    }
}

static void abort_leaves_the_old_file(void) {
    seqpar_safetensors_desc desc = golden_desc("aborted");
    seqpar_safetensors_writer *writer = NULL;

    spit("aborted", old_file, sizeof old_file);
    for (int pieces = 0; pieces < 3; pieces++) {
        test_expect(seqpar_safetensors_create(&writer, &desc, fresh()) == 0, "%s", last.text);
        test_expect(temporary_files() == 1, "no temporary file");
        if (pieces > 0) seqpar_safetensors_append(writer, "a", golden_a, 3, &last);
        if (pieces > 1) seqpar_safetensors_append(writer, "b", &golden_b, 4, &last);
        seqpar_safetensors_abort(writer);
        test_expect(temporary_files() == 0 && old_file_is_intact("aborted"), "after %d pieces",
                    pieces);
    }
    remove(in_folder("aborted"));
    test_expect(seqpar_safetensors_create(&writer, &desc, fresh()) == 0, "%s", last.text);
    seqpar_safetensors_abort(writer);
    test_expect(!exists("aborted"), "a file has appeared");
    seqpar_safetensors_abort(NULL);
}

/* Begins the golden file with so many bytes of "a", then appends what does not belong there. */
static void misuse(int64_t of_a, const char *name, int64_t bytes, const char *word,
                   const char *other_word) {
    static const char zeros[16];
    seqpar_safetensors_desc desc = golden_desc("misused");
    seqpar_safetensors_writer *writer = NULL;

    spit("misused", old_file, sizeof old_file);
    test_expect(seqpar_safetensors_create(&writer, &desc, fresh()) == 0, "%s", last.text);
    test_expect(seqpar_safetensors_append(writer, "a", golden_a, of_a, &last) == 0, "%s",
                last.text);
    refused(name, seqpar_safetensors_append(writer, name, zeros, bytes, &last),
            SEQPAR_ERR_FILE_TENSOR, word, other_word);
    test_expect(temporary_files() == 0, "the temporary file outlives the error");
    test_expect(seqpar_safetensors_finish(writer, &last) == SEQPAR_ERR_FILE_TENSOR,
                "finished all the same");
    test_expect(old_file_is_intact("misused"), "the old file is gone");
}

static void bytes_of_the_wrong_tensor_are_refused(void) {
    misuse(0, "b", 4, "tensor \"b\": 4 bytes", "\"a\" is next and lacks 3 of its 3");
    misuse(0, "a", 4, "tensor \"a\": 4 bytes", "lacks 3 of its 3");
    misuse(2, "a", 2, "tensor \"a\": 2 bytes", "lacks 1 of its 3");
    misuse(3, "a", 1, "tensor \"a\": 1 bytes", "\"b\" is next");
    misuse(0, "c", 1, "tensor \"c\"", "\"a\" is next");
    misuse(0, "a", -1, "tensor \"a\": -1 bytes", NULL);
    misuse(3, "b", 5, "tensor \"b\": 5 bytes", "lacks 4 of its 4");
}

static void bytes_missing_or_too_many_are_refused(void) {
    seqpar_safetensors_desc desc = golden_desc("missing_bytes");
    seqpar_safetensors_writer *writer = NULL;

    spit("missing_bytes", old_file, sizeof old_file);
    seqpar_safetensors_create(&writer, &desc, fresh());
    seqpar_safetensors_append(writer, "a", golden_a, 2, &last);
    refused("finish", seqpar_safetensors_finish(writer, &last), SEQPAR_ERR_FILE_TENSOR,
            "\"a\": lacks 1 of its 3 bytes", "1 tensors come after");
    seqpar_safetensors_create(&writer, &desc, fresh());
    seqpar_safetensors_append(writer, "a", golden_a, 3, &last);
    seqpar_safetensors_append(writer, "b", &golden_b, 4, &last);
    refused("append", seqpar_safetensors_append(writer, "b", &golden_b, 1, &last),
            SEQPAR_ERR_FILE_TENSOR, "\"b\"", "after all tensors");
    test_expect(seqpar_safetensors_finish(writer, NULL) == SEQPAR_ERR_FILE_TENSOR,
                "finished all the same");
    test_expect(old_file_is_intact("missing_bytes"), "the old file is gone");
    refused("append", seqpar_safetensors_append(NULL, "a", golden_a, 3, fresh()),
            SEQPAR_ERR_FILE_WRITE, "no writer", NULL);
    refused("finish", seqpar_safetensors_finish(NULL, fresh()), SEQPAR_ERR_FILE_WRITE,
            "no writer", NULL);
}

static void bad_lists_are_refused(void) {
    static const struct {
        seqpar_safetensors_tensor tensor;
        const char *word, *other_word;
    } cases[] = {
        {{NULL, SEQPAR_SAFETENSORS_U8, 1, {1}, 0, 0, 0}, "entry 1", "no name"},
        {{"__metadata__", SEQPAR_SAFETENSORS_U8, 1, {1}, 0, 0, 0}, "__metadata__", "another"},
        {{"n\xFF", SEQPAR_SAFETENSORS_U8, 1, {1}, 0, 0, 0}, "tensor \"n", "not UTF-8"},
        {{"n\xE6\xBC", SEQPAR_SAFETENSORS_U8, 1, {1}, 0, 0, 0}, "tensor \"n", "not UTF-8"},
        {{"first", SEQPAR_SAFETENSORS_U8, 1, {1}, 0, 0, 0}, "\"first\"", "twice"},
        {{"n", SEQPAR_SAFETENSORS_NONE, 1, {1}, 0, 0, 0}, "\"n\"", "dtype 0"},
        {{"n", SEQPAR_SAFETENSORS_DTYPE_COUNT, 1, {1}, 0, 0, 0}, "\"n\"", "dtype 14"},
        {{"n", SEQPAR_SAFETENSORS_U8, -1, {1}, 0, 0, 0}, "\"n\"", "-1 dimensions"},
        {{"n", SEQPAR_SAFETENSORS_U8, 9, {1}, 0, 0, 0}, "\"n\"", "9 dimensions"},
        {{"n", SEQPAR_SAFETENSORS_U8, 2, {1, -7}, 0, 0, 0}, "\"n\"", "shape[1] is -7"},
        {{"n", SEQPAR_SAFETENSORS_F64, 2, {1LL << 31, 1LL << 31}, 0, 0, 0},
         "\"n\"",
         "2147483648"},
        {{"n", SEQPAR_SAFETENSORS_U8, 1, {(1LL << 53) - 3}, 0, 0, 0},
         "\"n\"",
         "9007199254740989"},
        {{"n", SEQPAR_SAFETENSORS_U8, 2, {INT64_MAX, INT64_MAX}, 0, 0, 0},
         "\"n\"",
         "9223372036854775807"},
    };

    for (int64_t i = 0; i < COUNT(cases); i++) {
        seqpar_safetensors_tensor first = tensor_of("first", SEQPAR_SAFETENSORS_U8, 3);
        seqpar_safetensors_tensor tensors[2] = {first, cases[i].tensor};
        seqpar_safetensors_desc desc = {
            .path = in_folder("bad"), .tensors = tensors, .count = 2};
        seqpar_safetensors_writer *writer = (seqpar_safetensors_writer *)&desc;

        refused("create", seqpar_safetensors_create(&writer, &desc, fresh()),
                SEQPAR_ERR_FILE_TENSOR, cases[i].word, cases[i].other_word);
        test_expect(!writer && !exists("bad"), "something came of it");
    }
}

static void bad_metadata_is_refused(void) {
    static const struct {
        seqpar_safetensors_pair pair;
        const char *word;
    } cases[] = {
        {{"k", "w"}, "\"k\" is there twice"},  {{NULL, "w"}, "entry 1, key \"\""},
        {{"l", NULL}, "entry 1, key \"l\""},   {{"\xFF", "w"}, "entry 1, key"},
        {{"l", "\xC3"}, "entry 1, key \"l\""},
    };

    for (int64_t i = 0; i < COUNT(cases); i++) {
        seqpar_safetensors_pair metadata[2] = {{"k", "v"}, cases[i].pair};
        seqpar_safetensors_desc desc = {
            .path = in_folder("bad"), .metadata = metadata, .metadata_count = 2};
        seqpar_safetensors_writer *writer = NULL;

        refused("create", seqpar_safetensors_create(&writer, &desc, fresh()),
                SEQPAR_ERR_FILE_FORMAT, cases[i].word, "bad");
        test_expect(!writer && !exists("bad"), "something came of it");
    }
}

/* Whether a header with one value of so many letters is written, and read again. */
static int long_header_is_written(char *value, int64_t letters) {
    seqpar_safetensors_pair metadata = {"long", value};
    seqpar_safetensors_desc desc = {
        .path = in_folder("long"), .metadata = &metadata, .metadata_count = 1};
    seqpar_safetensors_writer *writer = NULL;
    seqpar_safetensors_file *file = NULL;
    seqpar_error error = {0};

    memset(value, 'x', (size_t)letters);
    value[letters] = '\0';
    if (seqpar_safetensors_create(&writer, &desc, &error)) return 0;
    test_expect(!seqpar_safetensors_finish(writer, &error), "it is not finished");
    test_expect(!seqpar_safetensors_open(&file, desc.path, &error), "%s", error.text);
    test_expect(file && !strcmp(seqpar_safetensors_metadata(file, "long"), value),
                "another text is read");
    seqpar_safetensors_close(file);
    remove(desc.path);
    return 1;
}

/* Headers are filled up to multiples of eight bytes, and the limit is one. */
static void longest_header(void) {
    int64_t letters = SEQPAR_SAFETENSORS_MAX_HEADER -
                      (int64_t)strlen("{\"__metadata__\":{\"long\":\"\"}}");
    char *value = malloc((size_t)letters + 2);

    test_expect(long_header_is_written(value, letters), "a header at the limit is refused");
    test_expect(!long_header_is_written(value, letters + 1), "a header beyond it is written");
    free(value);
}

/* A control character takes six bytes of JSON. */
static void header_too_long_to_be_read_is_not_written(void) {
    enum { LENGTH = SEQPAR_SAFETENSORS_MAX_HEADER / 6 + 1 };
    char *value = malloc(LENGTH + 1);
    seqpar_safetensors_pair metadata = {"long", value};
    seqpar_safetensors_desc desc = {
        .path = in_folder("bad"), .metadata = &metadata, .metadata_count = 1};
    seqpar_safetensors_writer *writer = NULL;

    memset(value, 1, LENGTH);
    value[LENGTH] = '\0';
    refused("create", seqpar_safetensors_create(&writer, &desc, fresh()),
            SEQPAR_ERR_FILE_FORMAT, "bad", "100000000 allowed");
    test_expect(!writer && !exists("bad"), "something came of it");
    free(value);
}

static void bad_targets_are_refused(void) {
    seqpar_safetensors_desc desc = {.path = folder};
    seqpar_safetensors_writer *writer = NULL;

    refused("folder", seqpar_safetensors_create(&writer, &desc, fresh()), SEQPAR_ERR_FILE_OPEN,
            folder, "not a regular file");
    desc.path = "/dev/full";
    refused("device", seqpar_safetensors_create(&writer, &desc, fresh()), SEQPAR_ERR_FILE_OPEN,
            "/dev/full", "not a regular file");
    desc.path = in_folder("no/such/folder");
    refused("no folder", seqpar_safetensors_create(&writer, &desc, fresh()),
            SEQPAR_ERR_FILE_OPEN, "no/such/folder", "No such file");
    desc.path = NULL;
    refused("NULL", seqpar_safetensors_create(&writer, &desc, fresh()), SEQPAR_ERR_FILE_OPEN,
            "path", NULL);
    desc.path = "";
    refused("empty", seqpar_safetensors_create(&writer, &desc, fresh()), SEQPAR_ERR_FILE_OPEN,
            "path", NULL);
    test_expect(!writer, "*writer is not NULL");
}

/* The target turns into a folder while the file is being written. */
static void rename_that_fails_is_reported(void) {
    seqpar_safetensors_desc desc = {.path = in_folder("renamed")};
    seqpar_safetensors_writer *writer = NULL;

    test_expect(seqpar_safetensors_create(&writer, &desc, fresh()) == 0, "%s", last.text);
    test_expect(mkdir(in_folder("renamed"), 0700) == 0, "mkdir");
    refused("finish", seqpar_safetensors_finish(writer, &last), SEQPAR_ERR_FILE_WRITE,
            "renamed", "rename");
    test_expect(temporary_files() == 0, "the temporary file outlives the error");
}

/* What a killed process of the same pid left behind is neither used nor removed. */
static void taken_temporary_name_is_avoided(void) {
    char taken[64];

    snprintf(taken, sizeof taken, "taken.tmp.%ld", (long)getpid());
    spit(taken, old_file, sizeof old_file);
    test_expect(save_golden("taken") == 0, "%s", last.text);
    test_expect(holds("taken", golden, GOLDEN_BYTES) && old_file_is_intact(taken),
                "the two got mixed up");
    remove(in_folder(taken));
}

static void two_writers_of_one_file_do_not_mix(void) {
    seqpar_safetensors_desc desc = golden_desc("shared");
    seqpar_safetensors_writer *one = NULL, *two = NULL;

    test_expect(seqpar_safetensors_create(&one, &desc, fresh()) == 0, "%s", last.text);
    test_expect(seqpar_safetensors_create(&two, &desc, fresh()) == 0, "%s", last.text);
    seqpar_safetensors_append(one, "a", golden_a, 3, &last);
    seqpar_safetensors_append(two, "a", "xyz", 3, &last);
    seqpar_safetensors_append(one, "b", &golden_b, 4, &last);
    test_expect(seqpar_safetensors_finish(one, &last) == 0, "%s", last.text);
    test_expect(holds("shared", golden, GOLDEN_BYTES), "after the first");
    seqpar_safetensors_append(two, "b", &golden_b, 4, &last);
    test_expect(seqpar_safetensors_finish(two, &last) == 0, "%s", last.text);
    test_expect(!holds("shared", golden, GOLDEN_BYTES) && exists("shared"), "after the second");
}

static void write_atomic_writes_replaces_and_fails_whole(void) {
    const char *path = in_folder("config.json");

    test_expect(seqpar_file_write_atomic(path, "{}", 2, fresh()) == 0 &&
                    holds("config.json", "{}", 2),
                "%s", last.text);
    test_expect(seqpar_file_write_atomic(path, old_file, sizeof old_file, fresh()) == 0, "%s",
                last.text);
    limit_file_size(5);
    refused("full", seqpar_file_write_atomic(path, golden, GOLDEN_BYTES, fresh()),
            SEQPAR_ERR_FILE_WRITE, "config.json", "File too large");
    limit_file_size(RLIM_INFINITY);
    test_expect(old_file_is_intact("config.json"), "the old file is gone");
    test_expect(seqpar_file_write_atomic(path, NULL, 0, fresh()) == 0 &&
                    holds("config.json", "", 0),
                "%s", last.text);
    refused("NULL", seqpar_file_write_atomic(NULL, "", 0, fresh()), SEQPAR_ERR_FILE_OPEN,
            "path", NULL);
    refused("folder", seqpar_file_write_atomic(folder, "", 0, fresh()), SEQPAR_ERR_FILE_OPEN,
            folder, NULL);
}

/* A rename lasts only once the folder has been synced. A path without a folder means ".". */
static void folder_is_synced(void) {
    char before[4096];
    struct stat about;

    test_expect(stat(folder, &about) == 0, "stat");
    synced_folder = 0;
    test_expect(seqpar_file_write_atomic(in_folder("absolute"), "x", 1, fresh()) == 0, "%s",
                last.text);
    test_expect(synced_folder == about.st_ino, "not the folder of an absolute path");
    synced_folder = 0;
    test_expect(getcwd(before, sizeof before) != NULL && chdir(folder) == 0, "chdir");
    test_expect(seqpar_file_write_atomic("relative", "x", 1, fresh()) == 0, "%s", last.text);
    test_expect(chdir(before) == 0, "chdir back");
    test_expect(synced_folder == about.st_ino, "not the folder of a relative path");
    test_expect(holds("relative", "x", 1), "it is not there");
}

/* ---- memory ------------------------------------------------------------------------------ */

static seqpar_status open_and_close(void) {
    seqpar_safetensors_file *file = NULL;
    seqpar_status status = seqpar_safetensors_open(&file, in_folder("memory"), fresh());

    seqpar_safetensors_close(file);
    return status;
}

static seqpar_status save_memory(void) { return save_golden("memory"); }

static seqpar_status write_memory(void) {
    return seqpar_file_write_atomic(in_folder("memory"), golden, GOLDEN_BYTES, fresh());
}

/* Lets the first, the second, ... allocation fail until the operation gets by without another
 * one. cJSON does not tell a lack of memory from bad JSON, so that the reader cannot either. */
static void out_of_memory(const char *what, seqpar_status (*operation)(void), int is_writing) {
    seqpar_status status = SEQPAR_ERR_MEMORY;
    int64_t n = 0;

    for (; status != 0 && n < 1000; n++) {
        spit("memory", is_writing ? old_file : golden,
             is_writing ? (int64_t)sizeof old_file : GOLDEN_BYTES);
        allocations_until_failure = n;
        status = operation();
        allocations_until_failure = -1;
        test_expect(status == 0 || status == SEQPAR_ERR_MEMORY ||
                        (!is_writing && strstr(last.text, "memory")),
                    "%s without allocation %" PRId64 ": %d, %s", what, n, status, last.text);
        test_expect(live_allocations == 0, "%s without allocation %" PRId64 " leaks", what, n);
        if (status == 0 && is_writing)
            test_expect(holds("memory", golden, GOLDEN_BYTES), "%s wrote other bytes", what);
        else if (is_writing)
            test_expect(old_file_is_intact("memory"),
                        "%s without allocation %" PRId64 ": the old file is gone", what, n);
    }
    test_expect(n > 1 && n < 1000, "%s: %" PRId64 " allocations", what, n);
}

/* Where the input is closed, the next file that is opened is descriptor 0. */
static void descriptor_0_is_as_good_as_any(void) {
    int kept = dup(0);
    seqpar_safetensors_file *file;
    struct stat about;

    test_expect(stat(folder, &about) == 0, "stat");
    close(0);
    synced_folder = 0;
    test_expect(save_golden("zero") == 0, "%s", last.text);
    test_expect(synced_folder == about.st_ino, "the folder is not synced");
    file = opened("zero");
    test_expect(file && fileno(file->stream) == 0, "descriptor 0 was taken");
    seqpar_safetensors_close(file);
    failing_call = "fdopen";
    calls_until_failure = 0;
    refused("fdopen", save_golden("none"), SEQPAR_ERR_FILE_OPEN, "none", "Input/output");
    calls_until_failure = 0;
    refused("fdopen", seqpar_safetensors_open(&file, in_folder("zero"), fresh()),
            SEQPAR_ERR_FILE_OPEN, "zero", "Input/output");
    failing_call = NULL;
    test_expect(fcntl(0, F_GETFD) == -1, "descriptor 0 is open still");
    if (kept >= 0) dup2(kept, 0), close(kept);
}

static void lack_of_memory_is_reported(void) {
    out_of_memory("open", open_and_close, 0);
    out_of_memory("save", save_memory, 1);
    out_of_memory("write_atomic", write_memory, 1);
}

/* ------------------------------------------------------------------------------------------ */

#define NAMED(name) \
    { #name, name }
static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {

    NAMED(golden_bytes_whole),
    NAMED(golden_bytes_in_pieces),
    NAMED(golden_reads_back),
    NAMED(round_trip_all_dtypes_and_shapes),
    NAMED(round_trip_odd_names),
    NAMED(round_trip_nothing),
    NAMED(round_trip_many_tensors),
    NAMED(empty_tensors_need_no_bytes),
    NAMED(slices_of_every_kind),
    NAMED(slices_converted_across_chunks),
    NAMED(slices_outside_are_refused),
    NAMED(convert_all_f16_patterns),
    NAMED(convert_all_bf16_patterns),
    NAMED(convert_f32_to_f16_rounds_to_nearest),
    NAMED(convert_f64_to_f32_rounds_to_nearest),
    NAMED(convert_f64_beyond_float_is_refused),
    NAMED(convert_integers_is_refused),
    NAMED(nan_and_inf_are_refused),
    NAMED(missing_tensor_is_refused),
    NAMED(unexpected_shape_or_dtype_is_refused),
    NAMED(first_error_stays),
    NAMED(long_paths_and_names_leave_room),
    NAMED(texts_are_cut_between_characters),
    NAMED(long_texts_of_headers_are_cut),
    NAMED(long_texts_of_lists_are_cut),
    NAMED(header_over_the_limit_is_refused),
    NAMED(odd_but_legal_headers_are_read),
    NAMED(truncation_at_every_byte_is_refused),
    NAMED(mutations_never_crash),
    NAMED(what_is_no_file_is_refused),
    NAMED(file_that_shrinks_is_noticed),
    NAMED(offsets_beyond_4_gib_are_read),
    NAMED(full_disk_leaves_the_old_file),
    NAMED(full_disk_in_the_middle_of_a_tensor),
    NAMED(every_failing_step_of_writing_is_reported),
    NAMED(every_failing_step_of_reading_is_reported),
    NAMED(abort_leaves_the_old_file),
    NAMED(bytes_of_the_wrong_tensor_are_refused),
    NAMED(bytes_missing_or_too_many_are_refused),
    NAMED(bad_lists_are_refused),
    NAMED(bad_metadata_is_refused),
    NAMED(longest_header),
    NAMED(header_too_long_to_be_read_is_not_written),
    NAMED(bad_targets_are_refused),
    NAMED(rename_that_fails_is_reported),
    NAMED(taken_temporary_name_is_avoided),
    NAMED(two_writers_of_one_file_do_not_mix),
    NAMED(write_atomic_writes_replaces_and_fails_whole),
    NAMED(folder_is_synced),
    NAMED(descriptor_0_is_as_good_as_any),
    NAMED(lack_of_memory_is_reported),
};

int main(int argc, char **argv) {
    cJSON_Hooks hooks = {test_malloc, test_free};
    const char *temporary = getenv("TMPDIR");

    test_begin(argc, argv);
    snprintf(folder, sizeof folder, "%s/seqpar_safetensors_XXXXXX",
             temporary ? temporary : "/tmp");
    if (!mkdtemp(folder)) {
        perror(folder);
        return 2;
    }
    alarm(1800);              /* a hang ends, in failure */
    signal(SIGXFSZ, SIG_IGN); /* or else going over the file size limit would end the process */
    cJSON_InitHooks(&hooks);
    for (int64_t i = 0; i < COUNT(tests); i++) {
        if (!test_wanted(tests[i].name, 0)) continue;
        tests[i].run();
        finish(tests[i].name);
    }
    malformed_headers();
    malformed_lengths();
    if (!getenv("TEST_ONLY")) said_is_listed(); /* all tests together say what is listed */
    remove_folder();
    return test_summary();
}
