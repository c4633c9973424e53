/* SPDX-License-Identifier: MIT OR Unlicense */
/* token_file.h - token files: tokenized documents, which demos/prepare.py makes with a model's
 * own tokenizer. They are memory-mapped and used in place.
 *
 * The format, version 1, all numbers little-endian:
 *
 *   byte  0   8 bytes   89 "SEQTOK" 0A
 *         8   u32       version
 *        12   u32       crc32 of all that follows, up to the end of the table
 *        16   u64       bytes of the file
 *        24   u32       kind: 1 sft, 2 pairs, 3 labelled, 4 prompts, 5 steps
 *        28   u32       sections
 *        32   i32 x 3   ids of BOS, EOS and PAD; -1: none
 *        44   i32       words: vocabulary size of the tokenizer; all ids are below it
 *        48   u64       documents
 *        56   u64       tokens
 *        64   u64, u32  bytes and crc32 of the tokenizer.json that made the ids
 *        76             zeros
 *        96             the table, 32 bytes a section: u32 name, u32 crc32 of its bytes,
 *                       u64 its first byte, u64 its bytes, u64 0
 *
 * The sections follow the table in ascending order of their names. Each begins at a multiple of
 * 64, after zeros as padding; the file ends with the last section:
 *
 *   1  offsets         u64 x (documents + 1): the tokens of document i are offsets[i] ..
 *                      offsets[i + 1]; no document is empty
 *   2  ids             i32 x tokens
 *   3  loss mask       u8 x tokens: 1 is supervised, 0 is not; it is not shifted, so a
 *                      document's first token has 0
 *   4  stops           i32 each: ids that end a generated text, EOS first
 *   5  word offsets    u64 x (words + 1)
 *   6  words           the bytes of each id: a special token has its name, an id without a
 *                      token has none
 *   7  flags           u8 x words: 1 is special
 *   8  about           JSON of prepare.py:
 *                      {"options": {..}, "counts": {"read": n, ..}, "summary": ".."}
 *   9  margins         pairs: f64 x (documents / 2), NaN: none; documents 2 i and 2 i + 1 are
 *                      chosen and rejected of pair i
 *  10  labels          labelled: u8 x documents, 1: desirable
 *  11  prompt offsets  prompts: u64 x (documents + 1)
 *  12  prompts         prompts: UTF-8, as the model gets them
 *  13  answer offsets  prompts: u64 x (documents + 1)
 *  14  answers         prompts: UTF-8, the right answers; empty if there are none
 *  15  targets         steps: i32 x tokens: the id to predict at this token, not the next
 *                      token; -100 where the loss mask is 0; a first token's mask may be 1 here
 *  16  shares          steps: f32 x tokens, 0 to 1: the probability of the target; the other
 *                      one of two choices has the rest
 *  17  choices         steps: i32 x 2 to 16: the reward tokens, one of which each target is;
 *                      none: any token
 *
 * Functions return 0, or -1 with one sentence in error. Needs zlib. */
#ifndef DEMO_TOKEN_FILE_H
#define DEMO_TOKEN_FILE_H

#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <sys/mman.h>
#include <cjson/cJSON.h>
#include <zlib.h>
#include "trainer/base/error.h"
#include "trainer/base/escape.h"
#include "trainer/base/files.h"
#include "trainer/base/memory.h"
#include "seqpar.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "token files are used in place, which needs a little-endian machine"
#endif

enum {
    DEMO_TOKENS_SFT = 1,
    DEMO_TOKENS_PAIRS,
    DEMO_TOKENS_LABELLED,
    DEMO_TOKENS_PROMPTS,
    DEMO_TOKENS_STEPS
};
enum { DEMO_TOKENS_VERSION = 1, DEMO_TOKENS_ALIGNED = 64, DEMO_SECTIONS = 17 };
enum {
    DEMO_OFFSETS = 1,
    DEMO_IDS,
    DEMO_MASK,
    DEMO_STOPS,
    DEMO_WORD_OFFSETS,
    DEMO_WORDS,
    DEMO_WORD_FLAGS,
    DEMO_ABOUT,
    DEMO_MARGINS,
    DEMO_LABELS,
    DEMO_PROMPT_OFFSETS,
    DEMO_PROMPT_TEXT,
    DEMO_ANSWER_OFFSETS,
    DEMO_ANSWER_TEXT,
    DEMO_TARGETS,
    DEMO_SHARES,
    DEMO_CHOICES
};

typedef struct {
    char magic[8];
    uint32_t version, crc;
    uint64_t bytes;
    uint32_t kind, sections;
    int32_t bos, eos, pad, words;
    uint64_t documents, tokens, tokenizer_bytes;
    uint32_t tokenizer_crc, zeros[5];
} demo_token_head;

typedef struct {
    uint32_t name, crc;
    uint64_t begin, bytes, zero;
} demo_token_section;

typedef struct {
    const unsigned char *map;
    size_t size;
    const demo_token_head *head;
    const demo_token_section *section[DEMO_SECTIONS + 1]; /* by name; NULL: missing */
    int64_t documents, longest, stop_count;
    const uint64_t *offsets, *word_offsets;
    const int32_t *ids, *stops, *targets, *choices;
    const uint8_t *mask, *flags, *labels;
    const double *margins;
    const float *shares;
    int32_t largest; /* the largest id of the documents */
    cJSON *about;
    int opened; /* file descriptor + 1; 0: none */
    struct timespec written;
} demo_token_file;

static const char *const demo_token_kinds[] = {"none",     "sft",     "pairs",
                                               "labelled", "prompts", "steps"};
/* By kind: the programs that read it, for messages. */
static const char *const demo_token_readers[] = {"",
                                                 "train_sft, train_kd and --pretrain_data",
                                                 "train_dpo and train_rm",
                                                 "train_kto",
                                                 "train_ppo and generate",
                                                 "train_prm"};

/* One call of zlib takes less than 4 GiB, so a larger section takes several calls. */
static inline uint32_t demo_crc32(uint32_t crc, const unsigned char *bytes, uint64_t count) {
    for (uint64_t done = 0, part; done < count; done += part) {
        part = count - done < 1 << 30 ? count - done : 1 << 30;
        crc = (uint32_t)crc32(crc, bytes + done, (uInt)part);
    }
    return crc;
}

/* ---- recognizing and mapping ---- */

static const char demo_token_magic[8] = {'\x89', 'S', 'E', 'Q', 'T', 'O', 'K', '\n'};

/* A token file is recognized by its first bytes, not by its name. */
static inline bool demo_is_token_file(const char *path) {
    char begin[8] = "";
    int file = path ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY) : -1;
    bool is = file >= 0 && read(file, begin, 8) == 8 && !memcmp(begin, demo_token_magic, 8);
    if (file >= 0) close(file);
    return is;
}

/* The file that is checked, and its path for messages. */
typedef struct {
    demo_token_file *file;
    const char *path;
    demo_error *error;
} demo_token_reader;

/* Writes "path: sentence". Returns -1. */
__attribute__((format(printf, 2, 3))) static inline int demo_token_wrong(
    const demo_token_reader *r, const char *format, ...) {
    va_list arguments;
    demo_fail(r->error, "%.1000s: ", r->path);
    va_start(arguments, format);
    demo_fail_more(r->error, format, arguments);
    va_end(arguments);
    return -1;
}

static const char demo_token_again[] = "make it again by demos/prepare.py";

/* ---- a mapped file that is truncated: reading beyond its new end raises SIGBUS ---- */

#ifndef DEMO_TOKEN_MAPS
#define DEMO_TOKEN_MAPS 8
#endif
static struct {
    const unsigned char *begin; /* NULL: this entry is unused */
    size_t size;
    char sentence[1400]; /* formatted beforehand, since a signal handler may not format */
} demo_token_maps[DEMO_TOKEN_MAPS];
static struct sigaction demo_token_bus; /* the previous handler */

/* SIGBUS handler: if the address is in a mapped token file, prints the sentence of that file
   and exits. */
static inline void demo_token_cut(int number, siginfo_t *about, void *context) {
    const unsigned char *at = (const unsigned char *)about->si_addr;
    (void)context;
    for (int i = 0; i < DEMO_TOKEN_MAPS; i++) {
        if (!demo_token_maps[i].begin || at < demo_token_maps[i].begin ||
            at >= demo_token_maps[i].begin + demo_token_maps[i].size)
            continue;
        const char *text = demo_token_maps[i].sentence;
        if (write(2, text, strlen(text)) < 0) _exit(1);
        _exit(1);
    }
    /* not a token file: restores the previous handler, which gets the repeated fault */
    sigaction(number, &demo_token_bus, NULL);
}

/* Registers a mapped file with the SIGBUS handler. If all DEMO_TOKEN_MAPS entries are in use,
   the file is not watched. */
static inline void demo_token_watch(const demo_token_file *f, const char *path) {
    struct sigaction action, before;
    char shown[1024];
    int i = 0;
    while (i < DEMO_TOKEN_MAPS && demo_token_maps[i].begin) i++;
    if (i == DEMO_TOKEN_MAPS) return;
    snprintf(demo_token_maps[i].sentence, sizeof demo_token_maps[i].sentence,
             "error: %s was truncated or became unreadable during training; restore the file "
             "and go on with --load_checkpoint\n",
             demo_escape(shown, sizeof shown, path));
    demo_token_maps[i].begin = f->map;
    demo_token_maps[i].size = f->size;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = demo_token_cut;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGBUS, &action, &before);
    if (before.sa_sigaction != demo_token_cut) demo_token_bus = before;
}

static inline void demo_token_unwatch(const demo_token_file *f) {
    for (int i = 0; i < DEMO_TOKEN_MAPS; i++)
        if (demo_token_maps[i].begin == f->map) demo_token_maps[i].begin = NULL;
}

/* ---- the map ---- */

/* Maps the file, and stores its size and modification time, by which later changes are
   found. */
static inline int demo_token_map(const demo_token_reader *r) {
    struct stat about = {0};
    int file = open(r->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    const char *why = demo_file_refused(file, SIZE_MAX);
    void *map = MAP_FAILED;
    if (!why && !fstat(file, &about) && about.st_size > 0)
        map = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_SHARED, file, 0);
    if (!why && map == MAP_FAILED) why = about.st_size ? strerror(errno) : "it is empty";
    if (file >= 0 && why) close(file);
    if (why) return demo_token_wrong(r, "cannot be read: %s", why);
    r->file->opened = file + 1;
    r->file->written = about.st_mtim;
    r->file->map = (const unsigned char *)map;
    r->file->size = (size_t)about.st_size;
    r->file->head = (const demo_token_head *)map;
    demo_token_watch(r->file, r->path);
    return 0;
}

static inline void demo_token_file_close(demo_token_file *file) {
    if (file->map) demo_token_unwatch(file);
    if (file->map) munmap((void *)file->map, file->size);
    if (file->opened) close(file->opened - 1);
    cJSON_Delete(file->about);
    memset(file, 0, sizeof *file);
}

/* Was the mapped file written to? Its new tokens would not be checked. If another file replaces
   it under its name, the mapping keeps the old contents. */
static inline bool demo_token_file_changed(const demo_token_file *f) {
    struct stat now;
    return f && f->opened && !fstat(f->opened - 1, &now) &&
           ((size_t)now.st_size != f->size || now.st_mtim.tv_sec != f->written.tv_sec ||
            now.st_mtim.tv_nsec != f->written.tv_nsec);
}

/* ---- the header and the table ---- */

/* Checks magic, version and size of the file, and the checksum of header and table. */
static inline int demo_token_head_checked(const demo_token_reader *r) {
    const demo_token_file *f = r->file;
    if (f->size < sizeof *f->head || memcmp(f->map, demo_token_magic, 8))
        return demo_token_wrong(r, "is no token file; %s", demo_token_again);
    if (f->head->version != DEMO_TOKENS_VERSION)
        return demo_token_wrong(r,
                                "is a token file of version %u, but only version %d is "
                                "supported; %s",
                                f->head->version, DEMO_TOKENS_VERSION, demo_token_again);
    if (f->head->bytes != f->size)
        return demo_token_wrong(r, "has %llu bytes, but its header says %llu; %s",
                                (unsigned long long)f->size, (unsigned long long)f->head->bytes,
                                f->head->bytes > f->size
                                    ? "copy it once more, the end is missing"
                                    : demo_token_again);
    size_t table = f->head->sections * sizeof(demo_token_section);
    if (f->head->sections > DEMO_SECTIONS || sizeof *f->head + table > f->size)
        return demo_token_wrong(r, "has a header with %u sections, which is impossible; %s",
                                f->head->sections, demo_token_again);
    if (crc32(0, f->map + 16, (uInt)(sizeof *f->head - 16 + table)) != f->head->crc)
        return demo_token_wrong(r, "the checksum of its header is wrong; %s", demo_token_again);
    return 0;
}

/* Refuses impossible numbers in the header. */
static inline int demo_token_numbers_checked(const demo_token_reader *r) {
    const demo_token_head *h = r->file->head;
    int32_t least = h->bos < h->pad ? h->bos : h->pad, most = h->bos > h->pad ? h->bos : h->pad;
    if (h->kind < DEMO_TOKENS_SFT || h->kind > DEMO_TOKENS_STEPS)
        return demo_token_wrong(r, "is of the unknown kind %u; %s", h->kind, demo_token_again);
    if (h->eos < 0 || h->eos >= h->words || least < -1 || most >= h->words)
        return demo_token_wrong(r,
                                "BOS %d, EOS %d or PAD %d is outside of its vocabulary of "
                                "%d; %s",
                                h->bos, h->eos, h->pad, h->words, demo_token_again);
    if (!h->documents || h->documents > r->file->size || h->tokens > r->file->size ||
        (h->kind == DEMO_TOKENS_PAIRS && h->documents % 2))
        return demo_token_wrong(r, "%llu documents with %llu tokens are impossible; %s",
                                (unsigned long long)h->documents, (unsigned long long)h->tokens,
                                demo_token_again);
    return 0;
}

static inline bool demo_all_zero(const unsigned char *bytes, uint64_t count) {
    for (uint64_t i = 0; i < count; i++)
        if (bytes[i]) return false;
    return true;
}

/* Checks that each section begins where the one before ends, aligned, and that all are inside
   the file. */
static inline int demo_token_table_checked(const demo_token_reader *r) {
    demo_token_file *f = r->file;
    const demo_token_section *table = (const demo_token_section *)(f->head + 1);
    uint64_t end = sizeof *f->head + f->head->sections * sizeof *table;
    uint32_t before = 0;
    for (uint32_t i = 0; i < f->head->sections; before = table[i++].name) {
        const demo_token_section *s = &table[i];
        uint64_t begin = (end + DEMO_TOKENS_ALIGNED - 1) / DEMO_TOKENS_ALIGNED *
                         DEMO_TOKENS_ALIGNED;
        if (s->name <= before || s->name > DEMO_SECTIONS || s->zero)
            return demo_token_wrong(r,
                                    "section %u follows section %u, which is the wrong "
                                    "order; %s",
                                    s->name, before, demo_token_again);
        if (s->begin != begin || begin > f->size || s->bytes > f->size - begin)
            return demo_token_wrong(
                r,
                "section %u has %llu bytes from byte %llu on, but must lie between bytes "
                "%llu and %llu; %s",
                s->name, (unsigned long long)s->bytes, (unsigned long long)s->begin,
                (unsigned long long)begin, (unsigned long long)f->size, demo_token_again);
        if (!demo_all_zero(f->map + end, begin - end))
            return demo_token_wrong(r, "the bytes before section %u are not zero; %s", s->name,
                                    demo_token_again);
        f->section[s->name] = s;
        end = begin + s->bytes;
    }
    return end == f->size
               ? 0
               : demo_token_wrong(r, "%llu bytes follow its last section; %s",
                                  (unsigned long long)(f->size - end), demo_token_again);
}

/* The size that a section must have, in bytes; UINT64_MAX: any size. */
static inline uint64_t demo_token_section_bytes(const demo_token_head *h, int name) {
    switch (name) {
    case DEMO_OFFSETS:
    case DEMO_PROMPT_OFFSETS:
    case DEMO_ANSWER_OFFSETS: return (h->documents + 1) * 8;
    case DEMO_IDS:
    case DEMO_TARGETS:
    case DEMO_SHARES: return h->tokens * 4;
    case DEMO_MASK: return h->tokens;
    case DEMO_WORD_OFFSETS: return ((uint64_t)h->words + 1) * 8;
    case DEMO_WORD_FLAGS: return (uint64_t)h->words;
    case DEMO_MARGINS: return h->documents / 2 * 8;
    case DEMO_LABELS: return h->documents;
    default: return UINT64_MAX;
    }
}

static inline bool demo_token_section_needed(uint32_t kind, int name) {
    return name < DEMO_MARGINS || (name == DEMO_MARGINS && kind == DEMO_TOKENS_PAIRS) ||
           (name == DEMO_LABELS && kind == DEMO_TOKENS_LABELLED) ||
           (name > DEMO_LABELS && name < DEMO_TARGETS && kind == DEMO_TOKENS_PROMPTS) ||
           (name >= DEMO_TARGETS && kind == DEMO_TOKENS_STEPS);
}

/* Checks that the file has exactly the sections of its kind, with the right sizes and
   checksums. */
static inline int demo_token_sections_checked(const demo_token_reader *r) {
    const demo_token_file *f = r->file;
    for (int name = 1; name <= DEMO_SECTIONS; name++) {
        const demo_token_section *s = f->section[name];
        uint64_t bytes = demo_token_section_bytes(f->head, name);
        if (!s != !demo_token_section_needed(f->head->kind, name))
            return demo_token_wrong(r, "a file of %s %s section %d; %s",
                                    demo_token_kinds[f->head->kind], s ? "has no" : "needs",
                                    name, demo_token_again);
        if (s && bytes != UINT64_MAX && s->bytes != bytes)
            return demo_token_wrong(r, "section %d has %llu bytes instead of %llu; %s", name,
                                    (unsigned long long)s->bytes, (unsigned long long)bytes,
                                    demo_token_again);
        if (s && demo_crc32(0, f->map + s->begin, s->bytes) != s->crc)
            return demo_token_wrong(
                r, "the checksum of section %d is wrong; copy the file once more, or %s", name,
                demo_token_again);
    }
    return 0;
}

/* ---- contents of the sections ---- */

static inline const void *demo_token_bytes(const demo_token_file *f, int name) {
    return f->section[name] ? f->map + f->section[name]->begin : NULL;
}

/* Checks that offsets rise from 0 to `end`, the size of the data that they point into, by at
   least `least` each. */
static inline int demo_token_offsets_rise(const demo_token_reader *r, int name, uint64_t count,
                                          uint64_t end, uint64_t least) {
    const uint64_t *at = (const uint64_t *)demo_token_bytes(r->file, name);
    uint64_t i = 0;
    if (!at) return 0;
    while (i < count && at[i] <= at[i + 1] && at[i + 1] - at[i] >= least) i++;
    if (i == count && !at[0] && at[count] == end) return 0;
    if (at[0]) i = 0;
    return demo_token_wrong(
        r, "the offsets of section %d do not rise from 0 to %llu (number %llu is %llu); %s",
        name, (unsigned long long)end, (unsigned long long)i, (unsigned long long)at[i],
        demo_token_again);
}

static inline uint64_t demo_token_size(const demo_token_file *f, int name) {
    return f->section[name] ? f->section[name]->bytes : 0;
}

static inline int demo_token_offsets_checked(const demo_token_reader *r) {
    const demo_token_file *f = r->file;
    const demo_token_head *h = f->head;
    return demo_token_offsets_rise(r, DEMO_OFFSETS, h->documents, h->tokens, 1) ||
                   demo_token_offsets_rise(r, DEMO_WORD_OFFSETS, (uint64_t)h->words,
                                           demo_token_size(f, DEMO_WORDS), 0) ||
                   demo_token_offsets_rise(r, DEMO_PROMPT_OFFSETS, h->documents,
                                           demo_token_size(f, DEMO_PROMPT_TEXT), 0) ||
                   demo_token_offsets_rise(r, DEMO_ANSWER_OFFSETS, h->documents,
                                           demo_token_size(f, DEMO_ANSWER_TEXT), 0)
               ? -1
               : 0;
}

/* The largest of these ids. A negative id counts as larger than all others, so that callers
   refuse it. */
static inline uint32_t demo_token_largest(const int32_t *ids, uint64_t count) {
    uint32_t largest = 0;
    for (uint64_t t = 0; t < count; t++)
        largest = (uint32_t)ids[t] > largest ? (uint32_t)ids[t] : largest;
    return largest;
}

/* Checks that stop tokens and ids are in the vocabulary. */
static inline int demo_token_ids_checked(const demo_token_reader *r) {
    demo_token_file *f = r->file;
    const demo_token_head *h = f->head;
    uint64_t bytes = demo_token_size(f, DEMO_STOPS);
    f->stop_count = (int64_t)(bytes / 4);
    if (!bytes || bytes % 4 || f->stops[0] != h->eos ||
        demo_token_largest(f->stops, bytes / 4) >= (uint32_t)h->words)
        return demo_token_wrong(r,
                                "its stop tokens (%llu bytes) do not begin with EOS %d, or "
                                "are outside of its vocabulary of %d; %s",
                                (unsigned long long)bytes, h->eos, h->words, demo_token_again);
    uint32_t largest = demo_token_largest(f->ids, h->tokens);
    f->largest = (int32_t)largest;
    if (largest < (uint32_t)h->words) return 0;
    return demo_token_wrong(r, "an id is %d, but its vocabulary has %d tokens; %s", f->largest,
                            h->words, demo_token_again);
}

/* Checks the loss mask, and finds the longest document. */
static inline int demo_token_masks_checked(const demo_token_reader *r) {
    demo_token_file *f = r->file;
    uint8_t all = 0;
    for (uint64_t t = 0; t < f->head->tokens; t++) all |= f->mask[t];
    if (all > 1)
        return demo_token_wrong(r, "its loss mask has bytes other than 0 and 1; %s",
                                demo_token_again);
    for (int64_t i = 0; i < f->documents; i++) {
        int64_t tokens = (int64_t)(f->offsets[i + 1] - f->offsets[i]);
        if (tokens > f->longest) f->longest = tokens;
        if (f->mask[f->offsets[i]] && !f->targets)
            return demo_token_wrong(
                r,
                "the first token of document %lld is supervised, but nothing predicts it; %s",
                (long long)i + 1, demo_token_again);
    }
    return 0;
}

static inline int demo_token_choices_checked(const demo_token_reader *r) {
    const demo_token_file *f = r->file;
    uint64_t bytes = demo_token_size(f, DEMO_CHOICES), count = bytes / 4, twice = 0;
    for (uint64_t i = 0; f->choices && i < count && count <= SEQPAR_MAX_CHOICES; i++)
        for (uint64_t k = 0; k < i; k++) twice += f->choices[i] == f->choices[k];
    if (bytes % 4 || count == 1 || count > SEQPAR_MAX_CHOICES || twice ||
        demo_token_largest(f->choices, count) >= (uint32_t)f->head->words)
        return demo_token_wrong(
            r,
            "its reward tokens (%llu bytes) are not 2 to %d different ids of its vocabulary "
            "of %d; %s",
            (unsigned long long)bytes, SEQPAR_MAX_CHOICES, f->head->words, demo_token_again);
    return 0;
}

/* Is the target of token t valid? It must be one of the choices, with a share of 1 unless there
   are two choices. If the loss mask is 0, it must be SEQPAR_IGNORE with a share of 0. */
static inline bool demo_token_target_right(const demo_token_file *f, uint64_t t) {
    uint64_t count = demo_token_size(f, DEMO_CHOICES) / 4, i = 0;
    int32_t target = f->targets[t];
    float share = f->shares[t];
    if (!f->mask[t]) return target == SEQPAR_IGNORE && share == 0;
    while (i < count && f->choices[i] != target) i++;
    return target >= 0 && target < f->head->words && (!count || i < count) && share >= 0 &&
           share <= 1 && (count == 2 || share == 1);
}

static inline int demo_token_targets_checked(const demo_token_reader *r) {
    const demo_token_file *f = r->file;
    if (!f->targets) return 0;
    if (demo_token_choices_checked(r)) return -1;
    for (uint64_t t = 0; t < f->head->tokens; t++)
        if (!demo_token_target_right(f, t))
            return demo_token_wrong(
                r,
                "token %llu, with loss mask %d, has the label %d with probability %g; "
                "%s",
                (unsigned long long)t, f->mask[t], f->targets[t], (double)f->shares[t],
                demo_token_again);
    return 0;
}

static inline int demo_token_values_checked(const demo_token_reader *r) {
    const demo_token_file *f = r->file;
    for (int64_t i = 0; f->labels && i < f->documents; i++)
        if (f->labels[i] > 1)
            return demo_token_wrong(r, "label %lld is %d, not 0 or 1; %s", (long long)i + 1,
                                    f->labels[i], demo_token_again);
    for (int64_t i = 0; f->margins && i < f->documents / 2; i++)
        if (isinf(f->margins[i]))
            return demo_token_wrong(r, "margin %lld is %g; %s", (long long)i + 1, f->margins[i],
                                    demo_token_again);
    return 0;
}

static inline int demo_token_about_checked(const demo_token_reader *r) {
    demo_token_file *f = r->file;
    f->about = cJSON_ParseWithLength((const char *)demo_token_bytes(f, DEMO_ABOUT),
                                     (size_t)demo_token_size(f, DEMO_ABOUT));
    return cJSON_IsObject(f->about)
               ? 0
               : demo_token_wrong(r, "its description is not a JSON object; %s",
                                  demo_token_again);
}

static inline void demo_token_set_pointers(demo_token_file *f) {
    f->documents = (int64_t)f->head->documents;
    f->offsets = (const uint64_t *)demo_token_bytes(f, DEMO_OFFSETS);
    f->ids = (const int32_t *)demo_token_bytes(f, DEMO_IDS);
    f->mask = (const uint8_t *)demo_token_bytes(f, DEMO_MASK);
    f->stops = (const int32_t *)demo_token_bytes(f, DEMO_STOPS);
    f->word_offsets = (const uint64_t *)demo_token_bytes(f, DEMO_WORD_OFFSETS);
    f->flags = (const uint8_t *)demo_token_bytes(f, DEMO_WORD_FLAGS);
    f->margins = (const double *)demo_token_bytes(f, DEMO_MARGINS);
    f->labels = (const uint8_t *)demo_token_bytes(f, DEMO_LABELS);
    f->targets = (const int32_t *)demo_token_bytes(f, DEMO_TARGETS);
    f->shares = (const float *)demo_token_bytes(f, DEMO_SHARES);
    f->choices = (const int32_t *)demo_token_bytes(f, DEMO_CHOICES);
}

/* Maps a token file of this kind, and checks all of it. On failure it is closed. */
static inline int demo_token_file_open(demo_token_file *file, const char *path, uint32_t kind,
                                       demo_error *error) {
    const demo_token_reader r = {file, path, error};
    memset(file, 0, sizeof *file);
    int failed = demo_token_map(&r) || demo_token_head_checked(&r) ||
                 demo_token_numbers_checked(&r);
    if (!failed && file->head->kind != kind)
        failed = demo_token_wrong(&r, "is of kind %s, for %s; make one of --kind %s",
                                  demo_token_kinds[file->head->kind],
                                  demo_token_readers[file->head->kind], demo_token_kinds[kind]);
    if (!failed) failed = demo_token_table_checked(&r) || demo_token_sections_checked(&r);
    if (!failed) demo_token_set_pointers(file);
    if (!failed)
        failed = demo_token_offsets_checked(&r) || demo_token_ids_checked(&r) ||
                 demo_token_masks_checked(&r) || demo_token_values_checked(&r) ||
                 demo_token_targets_checked(&r) || demo_token_about_checked(&r);
    if (failed) demo_token_file_close(file);
    return failed ? -1 : 0;
}

/* ---- reading an open token file ---- */

typedef struct {
    const char *bytes;
    size_t size;
} demo_slice;

static inline demo_slice demo_token_slice(const demo_token_file *f, int offsets, int bytes,
                                          int64_t i) {
    const uint64_t *at = (const uint64_t *)demo_token_bytes(f, offsets);
    return (demo_slice){(const char *)demo_token_bytes(f, bytes) + at[i],
                        (size_t)(at[i + 1] - at[i])};
}

/* The bytes of an id in a text. They are empty for a special token, and for an id outside of
   the tokenizer's vocabulary (a model may have more rows than its tokenizer has tokens). */
static inline demo_slice demo_token_word(const demo_token_file *f, int32_t id) {
    if (id < 0 || id >= f->head->words || f->flags[id]) return (demo_slice){NULL, 0};
    return demo_token_slice(f, DEMO_WORD_OFFSETS, DEMO_WORDS, id);
}

/* A number in "counts" of section "about"; 0 if it is missing. */
static inline int64_t demo_token_count(const demo_token_file *f, const char *key) {
    const cJSON *counts = cJSON_GetObjectItemCaseSensitive(f->about, "counts");
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(counts, key);
    return cJSON_IsNumber(item) && fabs(item->valuedouble) < 9e15 ? (int64_t)item->valuedouble
                                                                  : 0;
}

/* Identifies a tokenizer.json, to compare the tokenizers of two token files, or of a token file
   and a model folder. */
typedef struct {
    uint64_t bytes;
    uint32_t crc;
} demo_fingerprint;

static inline demo_fingerprint demo_token_fingerprint(const demo_token_file *f) {
    return (demo_fingerprint){f->head->tokenizer_bytes, f->head->tokenizer_crc};
}

static inline bool demo_same_tokenizer(demo_fingerprint a, demo_fingerprint b) {
    return a.bytes == b.bytes && a.crc == b.crc;
}

#endif
