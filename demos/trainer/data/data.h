/* SPDX-License-Identifier: MIT OR Unlicense */
/* data.h - reads data sets into documents: the token ids of a sample, and its loss mask.
 *
 * A token file (token_file.h) holds documents made by the model's own tokenizer. Models without
 * a tokenizer are trained on bytes: each byte is a token. Other inputs:
 *
 *   .jsonl, text   {"question": "...", "answer": "..."}
 *                  BOS prompt response EOS; response and EOS are supervised
 *   .jsonl, ids    {"input_ids": [..], "labels": [..]}
 *                  a label is the token's id or -100, unshifted; or "loss_mask": [0,1,..];
 *                  neither: all supervised; "attention_mask" 0 is padding at an end, cut off
 *   .txt           one stream of bytes, split into documents of max_len tokens;
 *                  all supervised; --pretrain_mode only
 *
 * With --pretrain_mode a document is BOS and the input. pretrain_eos adds EOS, unless the
 * document is truncated. pretrain_blocks concatenates the texts without BOS and splits them
 * into documents of max_len tokens; a shorter last one is dropped.
 *
 * A .jsonl may be compressed (.jsonl.gz). Instead of lines it may be one JSON list of such
 * objects. The key a.b means b inside a. All text is UTF-8.
 *
 * loss_mask[t] is 1 if token t is a supervised target: the mask is not shifted. loss_mask[0] is
 * always 0, since no token before the first one predicts it.
 * Functions return 0, or -1 with one sentence in error. */
#ifndef DEMO_DATA_H
#define DEMO_DATA_H
#include "data_sets.h"

/* ---- token files as documents ---- */

/* Size and checksum of a folder's tokenizer.json; false: there is none. */
static inline bool demo_folder_fingerprint(const char *folder, demo_fingerprint *print) {
    char path[4352];
    size_t size;
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    char *text = demo_read_file(path, &size);
    if (!text) return false;
    *print = (demo_fingerprint){size, demo_crc32(0, (const unsigned char *)text, size)};
    free(text);
    return true;
}

/* Returns 0 if the file was made with the model's tokenizer, and its ids and document lengths
   fit the options; else -1 with one sentence. */
static inline int demo_token_file_suits(const demo_token_reader *r,
                                        const demo_data_options *options) {
    const demo_token_file *f = r->file;
    demo_fingerprint own = demo_token_fingerprint(f), folders;
    double vocab = demo_vocab(options);
    if (options->folder && demo_folder_fingerprint(options->folder, &folders) &&
        !demo_same_tokenizer(own, folders))
        return demo_token_wrong(
            r,
            "was made with another tokenizer (%llu bytes, crc32 %08x) than %.1000s/tokenizer.json "
            "(%llu bytes, crc32 %08x); make it again: %s",
            (unsigned long long)own.bytes, own.crc, options->folder,
            (unsigned long long)folders.bytes, folders.crc,
            options->prepare ? options->prepare : "demos/prepare.py");
    if ((double)f->head->words > vocab)
        return demo_token_wrong(r,
                                "has a tokenizer with ids up to %d and uses ids up to %d, "
                                "but the model's vocab_size is %.0f; take the model's own "
                                "tokenizer, or a model with a larger vocabulary",
                                f->head->words - 1, f->largest, vocab);
    if (options->max_len && f->longest > options->max_len)
        return demo_token_wrong(
            r,
            "a document has %lld tokens, --%s is %lld; raise it, or make the "
            "file again by demos/prepare.py with --max_len %lld",
            (long long)f->longest, options->length_option ? options->length_option : "max_len",
            (long long)options->max_len, (long long)options->max_len);
    return 0;
}

/* Opens and checks a token file. Returns NULL with one sentence if that fails. */
static inline demo_token_file *demo_token_file_for(const char *path, uint32_t kind,
                                                   const demo_data_options *options,
                                                   demo_error *error) {
    demo_token_file *file = (demo_token_file *)demo_alloc(1, sizeof *file);
    const demo_token_reader r = {file, path, error};
    if (!demo_token_file_open(file, path, kind, error) && !demo_token_file_suits(&r, options))
        return file;
    demo_token_file_free(file);
    return NULL;
}

static inline demo_document demo_token_document(const demo_token_file *f, int64_t i) {
    demo_document document = {(int32_t *)f->ids + f->offsets[i],
                              (uint8_t *)f->mask + f->offsets[i],
                              (int64_t)(f->offsets[i + 1] - f->offsets[i])};
    if (f->targets) document.targets = (int32_t *)f->targets + f->offsets[i];
    if (f->shares) document.shares = (float *)f->shares + f->offsets[i];
    return document;
}

/* The number of records to read from a file with `there` records. */
static inline int64_t demo_token_records(int64_t there, const demo_data_options *options) {
    return options->max_samples && options->max_samples < there ? options->max_samples : there;
}

/* Opens a token file as a set, whose documents point into the mapped file. */
static inline int demo_data_of_file(demo_dataset *set, const char *path, uint32_t kind,
                                    const demo_data_options *options, demo_error *error) {
    demo_token_file *f = demo_token_file_for(path, kind, options, error);
    if (!f) return -1;
    int64_t count = demo_token_records(f->documents, options);
    set->file = f;
    set->counts = (demo_data_counts){
        demo_token_count(f, "read"), demo_token_count(f, "dropped_long"),
        demo_token_count(f, "cut"), demo_token_count(f, "zero_length"),
        demo_token_count(f, "fully_masked")};
    arrsetlen(set->documents, (size_t)count);
    for (int64_t i = 0; i < count; i++) {
        set->documents[i] = demo_token_document(f, i);
        set->tokens += set->documents[i].tokens;
        set->supervised_tokens += demo_supervised(&set->documents[i]);
    }
    return 0;
}

/* ---- ids as text ---- */

typedef struct {
    const demo_token_file *file; /* has the text of each id; NULL: a byte is a token */
    const int32_t *stops;        /* ids that end a generated text */
    int64_t stop_count;
} demo_words;

static inline demo_words demo_words_of(const demo_token_file *file) {
    static const int32_t stop = DEMO_EOS;
    return file ? (demo_words){file, file->stops, file->stop_count}
                : (demo_words){NULL, &stop, 1};
}

static inline bool demo_is_stop(const demo_words *words, int32_t id) {
    for (int64_t i = 0; i < words->stop_count; i++)
        if (words->stops[i] == id) return true;
    return false;
}

/* ---- loading ---- */

static inline int demo_data_read(demo_dataset *set, const char *paths,
                                 const demo_data_options *options, demo_error *error) {
    demo_reader reader = {options,
                          error,
                          set,
                          &set->counts.read,
                          demo_dataset_take_json,
                          demo_dataset_take_stream};
    return demo_read_dataset(&reader, paths);
}

/* Loads a token file, or a comma-separated list of files and folders. On failure the set is
   empty. */
static inline int demo_data_load(demo_dataset *set, const char *paths,
                                 const demo_data_options *options, demo_error *error) {
    char summary[256];
    *set = (demo_dataset){0};
    int failed = demo_is_token_file(paths)
                     ? demo_data_of_file(set, paths, DEMO_TOKENS_SFT, options, error)
                     : demo_data_read(set, paths, options, error);
    demo_data_summary(set, summary, sizeof summary);
    if (!failed && !set->supervised_tokens) {
        demo_fail(error, "%s: no supervised token in the whole set (%s); check --%s and --%s",
                  paths, summary, demo_output_option(options),
                  options->length_option ? options->length_option : "max_len");
        failed = -1;
    }
    if (failed) demo_data_free(set);
    return failed;
}

#endif
