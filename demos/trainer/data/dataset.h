/* SPDX-License-Identifier: MIT OR Unlicense */
/* dataset.h - selects the records to keep, truncates long documents, and computes the digest of
 * a set. */
#ifndef DEMO_DATASET_H
#define DEMO_DATASET_H
#include "json_records.h"

/* ---- digests, FNV-1a ---- */

#define DEMO_DIGEST_EMPTY UINT64_C(14695981039346656037)
static inline uint64_t demo_digest(uint64_t digest, const void *data, int64_t bytes) {
    const unsigned char *at = (const unsigned char *)data;
    for (int64_t i = 0; i < bytes; i++) digest = (digest ^ at[i]) * UINT64_C(1099511628211);
    return digest;
}

static inline uint64_t demo_digest_number(uint64_t digest, int64_t number) {
    return demo_digest(digest, &number, sizeof number);
}

/* The header of a token file has checksums of its contents, so the digest covers only the
   header and the number of documents, which max_samples may reduce. */
static inline uint64_t demo_digest_file(const demo_dataset *set) {
    const demo_token_head *head = set->file->head;
    uint64_t digest = demo_digest(
        DEMO_DIGEST_EMPTY, head,
        (int64_t)(sizeof *head + head->sections * sizeof(demo_token_section)));
    return demo_digest_number(digest, arrlen(set->documents));
}

static inline uint64_t demo_digest_documents(const demo_dataset *set) {
    uint64_t digest = DEMO_DIGEST_EMPTY;
    if (set->file) return demo_digest_file(set);
    for (int64_t i = 0; i < arrlen(set->documents); i++) {
        const demo_document *d = &set->documents[i];
        digest = demo_digest(demo_digest_number(digest, d->tokens), d->ids,
                             d->tokens * (int64_t)sizeof *d->ids);
        digest = demo_digest(digest, d->loss_mask, d->tokens);
        if (!d->targets) continue;
        digest = demo_digest(digest, d->targets, d->tokens * (int64_t)sizeof *d->targets);
        digest = demo_digest(digest, d->shares, d->tokens * (int64_t)sizeof *d->shares);
    }
    return digest;
}

/* ---- selecting and truncating records ---- */

static inline int64_t demo_supervised(const demo_document *document) {
    int64_t count = 0;
    for (int64_t t = 0; t < document->tokens; t++) count += document->loss_mask[t];
    return count;
}

/* Truncates a document to its first max_len tokens. If the record ended in EOS, the last of
   them becomes a supervised EOS. */
static inline void demo_record_cut(demo_record *record, int64_t max_len) {
    demo_document *document = &record->document;
    if (!max_len || document->tokens <= max_len) return;
    document->tokens = max_len;
    arrsetlen(document->ids, (size_t)max_len);
    arrsetlen(document->loss_mask, (size_t)max_len);
    if (document->targets) arrsetlen(document->targets, (size_t)max_len);
    if (document->shares) arrsetlen(document->shares, (size_t)max_len);
    if (!record->ends_in_eos) return;
    document->ids[max_len - 1] = DEMO_EOS;
    document->loss_mask[max_len - 1] = max_len > 1;
}

/* The number of response tokens that LLaMA-Factory keeps for these lengths of prompt and
   response. */
static inline int64_t demo_response_share(int64_t prompt, int64_t response, int64_t max_len) {
    int64_t most = 2 * response < max_len ? max_len
                   : 2 * prompt < max_len
                       ? max_len - prompt
                       : (int64_t)((double)max_len *
                                   ((double)response / (double)(prompt + response)));
    return response < most ? response : most;
}

/* Truncates both prompt and response. response: the response length that decides how many
   tokens each keeps; for a pair, the length of the longer response. */
static inline void demo_record_cut_both(demo_record *record, int64_t response,
                                        int64_t max_len) {
    demo_document *d = &record->document;
    int64_t prompt = record->prompt_tokens, own = d->tokens - prompt;
    int64_t share = demo_response_share(prompt, response, max_len);
    int64_t kept = prompt < max_len - share ? prompt : max_len - share;
    if (own > share) own = share;
    memmove(d->ids + kept, d->ids + prompt, (size_t)own * sizeof *d->ids);
    memmove(d->loss_mask + kept, d->loss_mask + prompt, (size_t)own);
    if (!kept && own) d->loss_mask[0] = 0;
    record->prompt_tokens = kept;
    d->tokens = kept + own;
    arrsetlen(d->ids, (size_t)d->tokens);
    arrsetlen(d->loss_mask, (size_t)d->tokens);
}

/* Is the record kept, whole or truncated? With DEMO_LONG_CUT a text is dropped if its prompt
   has max_len - 2 tokens or more, as in OpenRLHF. A record of ids is dropped if max_len leaves
   no token after the prompt. */
static inline bool demo_record_selected(const demo_record *record,
                                        const demo_data_options *options) {
    int64_t prompt = record->prompt_tokens, most = options->max_len;
    bool fits = !most || record->document.tokens <= most;
    if (!most || options->long_documents == DEMO_LONG_CUT_BOTH) return true;
    if (options->long_documents == DEMO_LONG_DROP) return fits;
    if (!prompt || (options->long_prompts && record->ends_in_eos)) return true;
    return record->ends_in_eos ? prompt < most - 2 : fits || prompt + 1 <= most;
}

static inline void demo_record_shorten(demo_record *record, int64_t response,
                                       const demo_data_options *options) {
    if (options->max_len && options->long_documents == DEMO_LONG_CUT_BOTH)
        demo_record_cut_both(record, response, options->max_len);
    else
        demo_record_cut(record, options->max_len);
}

static inline int64_t demo_response_tokens(const demo_record *record) {
    return record->document.tokens - record->prompt_tokens;
}

/* Truncates the record if it is too long and adds it to the set, or drops and frees it. */
static inline void demo_dataset_take(demo_dataset *set, demo_record *record,
                                     const demo_data_options *options) {
    demo_document *document = &record->document;
    int64_t whole = document->tokens;
    set->counts.read++;
    if (!whole || !demo_record_selected(record, options)) {
        *(whole ? &set->counts.dropped_long : &set->counts.zero_length) += 1;
        demo_document_free(document);
        return;
    }
    demo_record_shorten(record, demo_response_tokens(record), options);
    int64_t supervised = demo_supervised(document);
    set->counts.cut += document->tokens < whole;
    set->counts.fully_masked += !supervised;
    set->tokens += document->tokens;
    set->supervised_tokens += supervised;
    arrput(set->documents, *document);
}

/* pretrain_blocks: appends the text, without its BOS, to the unfinished document set->begun.
   When that has max_len tokens, it is added to the set and a new one begins. */
static inline void demo_dataset_take_block(demo_dataset *set, demo_document *text,
                                           const demo_data_options *options) {
    set->counts.read++;
    set->counts.zero_length += !text->tokens;
    for (int64_t t = 1; t < text->tokens; t++) {
        demo_push(&set->begun, text->ids[t], true);
        if (set->begun.tokens < options->max_len) continue;
        set->tokens += set->begun.tokens;
        set->supervised_tokens += set->begun.tokens - 1;
        arrput(set->documents, set->begun);
        set->begun = (demo_document){0};
    }
    demo_document_free(text);
}

/* Refuses a right answer without a number: no response could match it, so its reward would
   always be 0. */
static inline int demo_number_there(const demo_reader *reader, const demo_document *document) {
    for (int64_t t = 0; t < document->tokens; t++)
        if (document->loss_mask[t] && document->ids[t] < 256 && isdigit(document->ids[t]))
            return 0;
    if (!document->tokens) return 0; /* an empty record is dropped later */
    return demo_wrong(reader,
                      "the right answer has no number, but responses are compared with its "
                      "last number; set --%s to a key whose text has a number, or remove the "
                      "line",
                      demo_output_option(reader->options));
}

/* Makes a document of a JSON record, of token ids or of text, and adds it to the set. */
static inline int demo_dataset_take_json(const demo_reader *reader, const cJSON *json) {
    demo_record record = {0};
    bool ids = cJSON_GetObjectItemCaseSensitive(json, "input_ids") != NULL;
    if (ids && reader->options->pretrain_eos)
        return demo_wrong(reader, "\"input_ids\" are tokens already, so no EOS is added; "
                                  "give --pretrain_eos false --pretrain_blocks false");
    int failed = ids ? demo_record_ids(&record, reader, json, "")
                     : demo_record_text(&record, reader, json);
    if (!failed && reader->options->number)
        failed = demo_number_there(reader, &record.document);
    if (failed)
        demo_document_free(&record.document);
    else if (reader->options->pretrain_blocks)
        demo_dataset_take_block((demo_dataset *)reader->set, &record.document, reader->options);
    else
        demo_dataset_take((demo_dataset *)reader->set, &record, reader->options);
    return failed;
}

static inline bool demo_reader_full(const demo_reader *reader) {
    return reader->options->max_samples && *reader->read >= reader->options->max_samples;
}

static inline void demo_token_file_free(demo_token_file *file) {
    if (file) demo_token_file_close(file);
    free(file);
}

static inline void demo_data_free(demo_dataset *set) {
    for (int64_t i = 0; !set->file && !set->lent && i < arrlen(set->documents); i++)
        demo_document_free(&set->documents[i]);
    demo_token_file_free(set->file);
    demo_document_free(&set->begun);
    arrfree(set->documents);
    *set = (demo_dataset){0};
}

/* One line for the log: how many records were read, kept, dropped and truncated. */
static inline void demo_data_summary(const demo_dataset *set, char *text, size_t size) {
    const demo_data_counts *c = &set->counts;
    int used = snprintf(text, size,
                        "%lld read, %lld kept with %lld tokens, %lld of them supervised",
                        (long long)c->read, (long long)arrlen(set->documents),
                        (long long)set->tokens, (long long)set->supervised_tokens);
    if (used < 0 || (size_t)used >= size) return;
    snprintf(text + used, size - (size_t)used,
             "; %lld too long, %lld empty, %lld cut, %lld fully masked",
             (long long)c->dropped_long, (long long)c->zero_length, (long long)c->cut,
             (long long)c->fully_masked);
}
#endif
