/* SPDX-License-Identifier: MIT OR Unlicense */
/* data.h - datasets to documents, and files written whole or not at all.
 *
 * A token file (token_file.h) holds documents as a model's own tokenizer makes them. For models
 * without one a tokenizer is built in: a byte is a token. What is read besides:
 *
 *   .jsonl, text   {"question": "...", "answer": "..."}    BOS prompt response EOS; response and EOS are supervised
 *   .jsonl, ids    {"input_ids": [..], "labels": [..]}     labels repeat input_ids or say -100, unshifted;
 *                                                          or "loss_mask": [0,1,..]; neither: all supervised;
 *                                                          "attention_mask" 0 is padding left or right, cut off
 *   .txt           one stream of bytes, cut into documents of max_len tokens; all supervised; --pretrain_mode only
 *
 * With --pretrain_mode a text is BOS and the input; with pretrain_eos EOS ends it, unless it is cut. With pretrain_blocks the texts
 * follow each other without BOS, cut into documents of max_len tokens; tokens at the end that fill none are left out.
 *
 * A .jsonl, which may be a .jsonl.gz, may also be one list of such objects. A key a.b is b inside
 * a. All text is UTF-8.
 *
 * loss_mask[t] = 1 says that token t is a supervised target, i.e. it is not shifted.
 * loss_mask[0] is always 0: nothing stands before a document's first token to predict it.
 * Functions return 0, or -1 with one sentence in error. */
#ifndef DEMO_DATA_H
#define DEMO_DATA_H

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cjson/cJSON.h>
#include "files.h"
#include "json.h"
#include "memory.h"
#include "mix.h"
#include "token_file.h"

enum {
    DEMO_BOS = 256,
    DEMO_EOS = 257,
    DEMO_PAD = 258,
    DEMO_VOCAB = 259,
    DEMO_IGNORED_LABEL = -100
};

/* What happens to a document longer than max_len: it is left out; its end is cut off, as
   OpenRLHF does; prompt and response are cut both, as LLaMA-Factory does. */
enum { DEMO_LONG_DROP, DEMO_LONG_CUT, DEMO_LONG_CUT_BOTH };

typedef struct {
    /* (tokens), stb_ds arrays; those of a token file are a part of it, and only read */
    int32_t *ids;
    uint8_t *loss_mask;
    int64_t tokens;
    /* of process reward models (steps.h), else NULL: what a token is to predict in the place of the
       next one, SEQPAR_IGNORE where loss_mask is 0; and its share of the label */
    int32_t *targets;
    float *shares;
} demo_document;

typedef struct {
    /* text of the prompt, or all text; NULL: "input", and nobody has said so */
    const char *input_key;
    const char *output_key;     /* text of the response; NULL: the input is trained whole */
    const char *input_template; /* every {} becomes the prompt; NULL: the prompt as it is */
    bool pretrain_mode;         /* BOS and input only, all supervised, no EOS */
    bool pretrain_eos;          /* and EOS */
    bool pretrain_blocks;       /* such texts side by side, cut every max_len tokens */
    bool train_on_inputs;       /* the prompt is supervised too */
    /* longest document in tokens, and the piece of a .txt; 0: no limit */
    int64_t max_len;
    int long_documents;  /* DEMO_LONG_ */
    bool long_prompts;   /* cut even where only the prompt is left: reward models */
    int64_t max_samples; /* use this many records in all; 0: all */
    const char *probs;   /* weights of the sets, a comma list; NULL: one after the other */
    int64_t seed;        /* of the draws among them */
    int64_t vocab_size;  /* ids must be below; 0: DEMO_VOCAB */
    const char *folder; /* of the model, whose tokenizer a token file is to be of; NULL: none */
    const int64_t *end; /* of the folder's texts; NULL: DEMO_EOS, or nobody says */
    /* the command that makes a token file of the text, where the folder has a tokenizer and
       bytes would be wrong; NULL: a byte is a token */
    const char *prepare;
    /* texts are to end in the response's last number: it must hold one */
    bool number;
    /* what chose output_key and max_len, for messages; NULL: the options of these names */
    const char *output_option, *length_option;
} demo_data_options;

/* read = kept + dropped_long + zero_length; cut and fully_masked documents are among the
   kept. */
typedef struct {
    int64_t read, dropped_long, cut, zero_length, fully_masked;
} demo_data_counts;

typedef struct {
    demo_document *documents; /* stb_ds array */
    demo_token_file *file;    /* which the documents are a part of; NULL: they are their own */
    bool lent;                /* ids and masks are another set's, which frees them */
    demo_document begun;      /* pretrain_blocks: tokens that fill no document yet */
    demo_data_counts counts;
    int64_t tokens, supervised_tokens;
    char summary[256]; /* what there is, for the log */
} demo_dataset;

/* Where reading stands, for messages, and what becomes of what is read. */
typedef struct demo_reader {
    const demo_data_options *options;
    demo_error *error;
    void *set;           /* the dataset being filled */
    const int64_t *read; /* records in it so far */
    int (*take)(const struct demo_reader *reader, const cJSON *record); /* a line of a .jsonl */
    /* a .txt; NULL: refused */
    int (*take_stream)(const struct demo_reader *reader, const char *bytes, size_t size);
    const char *path;
    int64_t line;
} demo_reader;

/* A document on its way in. */
typedef struct {
    demo_document document;
    int64_t prompt_tokens;
    bool ends_in_eos; /* text that was cut ends in EOS again */
} demo_record;

/* Writes "path:line: sentence" (no line where there is none). Returns -1. */
__attribute__((format(printf, 2, 3))) static inline int demo_wrong(const demo_reader *reader,
                                                                   const char *format, ...) {
    va_list arguments;
    char line[24] = "", sentence[6000];
    if (reader->line) snprintf(line, sizeof line, ":%lld", (long long)reader->line);
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    demo_fail(reader->error, "%s%s: %s", reader->path, line, sentence);
    return -1;
}

/* ---- building one document ---- */

static inline void demo_push(demo_document *document, int32_t id, bool supervised) {
    arrput(document->ids, id);
    arrput(document->loss_mask, supervised && document->tokens);
    document->tokens++;
}

static inline void demo_push_text(demo_document *document, const char *text, size_t length,
                                  bool supervised) {
    for (size_t i = 0; i < length; i++) demo_push(document, (unsigned char)text[i], supervised);
}

static inline void demo_document_free(demo_document *document) {
    arrfree(document->ids);
    arrfree(document->loss_mask);
    arrfree(document->targets);
    arrfree(document->shares);
}

static inline bool demo_same_ids(const demo_document *one, const demo_document *other,
                                 int64_t tokens) {
    return !tokens || !memcmp(one->ids, other->ids, (size_t)tokens * sizeof *one->ids);
}

static inline bool demo_same_document(const demo_document *one, const demo_document *other) {
    return one->tokens == other->tokens && demo_same_ids(one, other, one->tokens) &&
           !memcmp(one->loss_mask, other->loss_mask, (size_t)one->tokens);
}

static inline void demo_push_prompt(demo_document *document, const char *form,
                                    const char *prompt, bool supervised) {
    demo_push(document, DEMO_BOS, false);
    for (const char *hole; form && (hole = strstr(form, "{}")); form = hole + 2) {
        demo_push_text(document, form, (size_t)(hole - form), supervised);
        demo_push_text(document, prompt, strlen(prompt), supervised);
    }
    if (!form) form = prompt;
    demo_push_text(document, form, strlen(form), supervised);
}

/* What OpenRLHF warns about: returns NULL for a template that cannot take a prompt, otherwise
 * the template; warning is filled or made empty. */
static inline const char *demo_template_checked(const char *form, char *warning, size_t size) {
    *warning = 0;
    if (!form || !*form) return NULL;
    if (!strstr(form, "{}"))
        snprintf(warning, size, "--input_template has no {} for the prompt and is not used: %s",
                 form);
    else if (strstr(form, "\\n"))
        snprintf(warning, size,
                 "--input_template holds a backslash and an n, not a new line; in bash write "
                 "$'...\\n'");
    return strstr(form, "{}") ? form : NULL;
}

/* ---- JSON records ---- */

static inline const char *demo_json_type(const cJSON *item) {
    return cJSON_IsString(item)   ? "text"
           : cJSON_IsNumber(item) ? "a number"
           : cJSON_IsArray(item)  ? "a list"
           : cJSON_IsObject(item) ? "an object"
           : cJSON_IsBool(item)   ? "true or false"
                                  : "null";
}

static inline double demo_vocab(const demo_data_options *options) {
    return options->vocab_size ? (double)options->vocab_size : (double)DEMO_VOCAB;
}

static inline bool demo_folder_has(const char *folder, const char *name) {
    char path[4352];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return !access(path, F_OK);
}

static inline bool demo_folder_has_template(const char *folder) {
    char path[4352];
    size_t size;
    snprintf(path, sizeof path, "%s/tokenizer_config.json", folder);
    char *text = demo_read_file(path, &size);
    bool has = demo_folder_has(folder, "chat_template.jinja") ||
               demo_folder_has(folder, "chat_template.json") ||
               (text && strstr(text, "\"chat_template\""));
    free(text);
    return has;
}

/* The line to type is for text as it would be read here; a chat model may want another. */
static inline const char *demo_template_hint(const demo_data_options *options) {
    bool other = options->pretrain_mode || strstr(options->prepare, "--kind steps") ||
                 strstr(options->prepare, "--apply_chat_template");
    return !other && demo_folder_has_template(options->folder)
               ? " (add --apply_chat_template for the model's chat template)"
               : "";
}

static inline int demo_text_allowed(const demo_reader *reader) {
    const demo_data_options *options = reader->options;
    double vocab = demo_vocab(options);
    if (options->prepare)
        return demo_wrong(reader,
                          "is text, and %s has a tokenizer, which is not built in; make tokens "
                          "of it and give those%s: %s",
                          options->folder, demo_template_hint(options), options->prepare);
    if (vocab < (double)DEMO_VOCAB)
        return demo_wrong(reader,
                          "text needs a vocabulary of %d, but the model has %g; give input_ids",
                          DEMO_VOCAB, vocab);
    if (options->end)
        return demo_wrong(reader,
                          "is text, whose bytes become tokens and which ends in %d, but "
                          "\"eos_token_id\" of %s/config.json is %lld; set it to %d, or give "
                          "input_ids",
                          DEMO_EOS, options->folder, (long long)*options->end, DEMO_EOS);
    return 0;
}

/* What stands under a key: "a.b" is b inside a, unless a key is called that; NULL: nothing. */
static inline const cJSON *demo_json_find(const cJSON *record, const char *key) {
    const cJSON *found = cJSON_GetObjectItemCaseSensitive(record, key);
    char part[256];
    if (found || !strchr(key, '.')) return found;
    for (found = record; found && *key; key += strcspn(key, "."), key += *key == '.') {
        snprintf(part, sizeof part, "%.*s", (int)strcspn(key, "."), key);
        found = cJSON_IsObject(found) ? cJSON_GetObjectItemCaseSensitive(found, part) : NULL;
    }
    return found;
}

/* Finds a key, or fails naming it, the option that chose it, and the keys there are. */
static inline const cJSON *demo_json_key(const demo_reader *reader, const cJSON *record,
                                         const char *key, const char *option) {
    char present[256] = "none";
    size_t used = 0;
    const cJSON *found = demo_json_find(record, key);
    if (found) return found;
    for (const cJSON *item = record->child; item && used < sizeof present; item = item->next)
        used += (size_t)snprintf(present + used, sizeof present - used, "%s\"%s\"",
                                 used ? ", " : "", item->string);
    demo_wrong(reader, "no key \"%s\"; set --%s to one of those present: %s", key, option,
               present);
    return NULL;
}

static inline const char *demo_json_text(const demo_reader *reader, const cJSON *record,
                                         const char *key, const char *option) {
    const cJSON *item = demo_json_key(reader, record, key, option);
    if (!item || cJSON_IsString(item)) return item ? item->valuestring : NULL;
    if (!cJSON_IsArray(item) && !cJSON_IsObject(item))
        demo_wrong(reader, "\"%s\" is %s, but text is needed", key, demo_json_type(item));
    else if (reader->options->prepare)
        demo_wrong(reader,
                   "\"%s\" is %s, but text is needed; lists of messages become a token file, "
                   "give that: %s%s",
                   key, demo_json_type(item), reader->options->prepare,
                   strstr(reader->options->prepare, "--apply_chat_template")
                       ? ""
                       : " --apply_chat_template");
    else
        demo_wrong(reader,
                   "\"%s\" is %s, but text is needed; demos/prepare.py makes a token file of "
                   "lists of messages, for a model with a tokenizer (--pretrain)",
                   key, demo_json_type(item));
    return NULL;
}

/* The prompt of Alpaca's records is two texts; one alone would be another. */
static inline int demo_one_prompt(const demo_reader *reader, const cJSON *json,
                                  const char *key) {
    const demo_data_options *options = reader->options;
    const char *other = demo_json_find(json, "input") ? "input" : "output";
    if (key || options->pretrain_mode || !cJSON_IsString(demo_json_find(json, "instruction")) ||
        !demo_json_find(json, other))
        return 0;
    return demo_wrong(reader,
                      "\"instruction\" stands beside \"%s\": set the key of the prompt, or let "
                      "demos/prepare.py join such a record's instruction and input%s%s",
                      other, options->prepare ? ": " : "",
                      options->prepare ? options->prepare : "");
}

static inline const char *demo_output_option(const demo_data_options *options) {
    return options->output_option ? options->output_option : "output_key";
}

static inline int demo_record_text(demo_record *record, const demo_reader *reader,
                                   const cJSON *json) {
    const demo_data_options *options = reader->options;
    demo_document *document = &record->document;
    bool paired = options->output_key && !options->pretrain_mode;
    if (demo_one_prompt(reader, json, options->input_key)) return -1;
    const char *input = demo_json_text(
        reader, json, options->input_key ? options->input_key : "input", "input_key");
    const char *output = input && paired ? demo_json_text(reader, json, options->output_key,
                                                          demo_output_option(options))
                                         : "";
    if (!input || !output || demo_text_allowed(reader)) return -1;
    demo_push_prompt(document, options->pretrain_mode ? NULL : options->input_template, input,
                     !paired || options->train_on_inputs);
    if (document->tokens == 1 || (paired && !*output))
        return demo_document_free(document), document->tokens = 0, 0;
    record->prompt_tokens = paired ? document->tokens : 0;
    record->ends_in_eos = !options->pretrain_mode;
    demo_push_text(document, output, strlen(output), true);
    if (record->ends_in_eos || options->pretrain_eos) demo_push(document, DEMO_EOS, true);
    return 0;
}

/* Reads element t of a list into a whole number within [low, high). */
static inline int demo_json_whole(const demo_reader *reader, const cJSON *item, const char *key,
                                  int64_t t, double low, double high, int32_t *value) {
    double number = cJSON_IsNumber(item) ? item->valuedouble : cJSON_IsTrue(item);
    if (!cJSON_IsNumber(item) && !cJSON_IsBool(item))
        return demo_wrong(reader, "%s[%lld] is %s, but a number is needed", key, (long long)t,
                          demo_json_type(item));
    if (!(number >= low && number < high) || number != floor(number))
        return demo_wrong(reader,
                          "%s[%lld] is %.15g, but it must be a whole number from %g to %g", key,
                          (long long)t, number, low, high - 1);
    *value = (int32_t)number;
    return 0;
}

/* A list of a record with one element for each token. */
typedef struct {
    char name[40];
    const cJSON *list; /* NULL: not in the record */
} demo_json_list;

static inline int demo_json_find_list(const demo_reader *reader, const cJSON *record,
                                      const char *side, const char *name,
                                      demo_json_list *found) {
    snprintf(found->name, sizeof found->name, "%s%s", side, name);
    found->list = demo_json_find(record, found->name);
    if (!found->list || cJSON_IsArray(found->list)) return 0;
    return demo_wrong(reader, "\"%s\" is %s, but a list is needed", found->name,
                      demo_json_type(found->list));
}

static inline int demo_json_same_length(const demo_reader *reader, const demo_json_list *some,
                                        const demo_json_list *ids) {
    if (!some->list || cJSON_GetArraySize(some->list) == cJSON_GetArraySize(ids->list))
        return 0;
    return demo_wrong(reader, "%d %s for %d %s; give one for each token",
                      cJSON_GetArraySize(some->list), some->name, cJSON_GetArraySize(ids->list),
                      ids->name);
}

/* The lists that make a document: ids, and what says which of them are supervised and which
   are padding. */
typedef struct {
    demo_json_list ids, labels, loss_mask, attention;
    int64_t begin, end; /* without padding */
} demo_json_tokens;

/* Padding is a run of zeros at the left, at the right or both; a zero between two ones has
   no meaning here. */
static inline int demo_json_padding(const demo_reader *reader, demo_json_tokens *tokens) {
    int64_t t = 0, begin = -1, end = 0;
    for (const cJSON *item = tokens->attention.list->child; item; item = item->next, t++) {
        int32_t attended = 0;
        if (demo_json_whole(reader, item, tokens->attention.name, t, 0, 2, &attended))
            return -1;
        if (attended && begin >= 0 && end < t)
            return demo_wrong(reader,
                              "%s[%lld] is 0 and %s[%lld] is 1; zeros may stand only at the "
                              "left and right end",
                              tokens->attention.name, (long long)end, tokens->attention.name,
                              (long long)t);
        if (attended && begin < 0) begin = t;
        if (attended) end = t + 1;
    }
    tokens->begin = begin < 0 ? 0 : begin;
    tokens->end = end;
    return 0;
}

/* Positions that begin anew are those of a row of several documents, which a record is not. */
static inline int demo_json_positions(const demo_reader *reader, const cJSON *record,
                                      const char *side, const demo_json_tokens *tokens) {
    demo_json_list positions;
    int64_t t = 0;
    if (demo_json_find_list(reader, record, side, "position_ids", &positions)) return -1;
    if (demo_json_same_length(reader, &positions, &tokens->ids)) return -1;
    for (const cJSON *item = positions.list ? positions.list->child : NULL; item;
         item = item->next, t++)
        if (t >= tokens->begin && t < tokens->end &&
            !(item->valuedouble == (double)(t - tokens->begin)))
            return demo_wrong(
                reader,
                "%s[%lld] is %.17g, but the tokens of a document count from 0; give "
                "each document a record of its own",
                positions.name, (long long)t, item->valuedouble);
    return 0;
}

static inline int demo_json_find_tokens(const demo_reader *reader, const cJSON *record,
                                        const char *side, demo_json_tokens *tokens) {
    if (demo_json_find_list(reader, record, side, "input_ids", &tokens->ids) ||
        demo_json_find_list(reader, record, side, "labels", &tokens->labels) ||
        demo_json_find_list(reader, record, side, "loss_mask", &tokens->loss_mask) ||
        demo_json_find_list(reader, record, side, "attention_mask", &tokens->attention))
        return -1;
    if (tokens->labels.list && tokens->loss_mask.list)
        return demo_wrong(reader,
                          "%s and %s both say which tokens are learnt; leave one of them out",
                          tokens->labels.name, tokens->loss_mask.name);
    if (demo_json_same_length(reader, &tokens->labels, &tokens->ids) ||
        demo_json_same_length(reader, &tokens->loss_mask, &tokens->ids) ||
        demo_json_same_length(reader, &tokens->attention, &tokens->ids))
        return -1;
    tokens->begin = 0;
    tokens->end = cJSON_GetArraySize(tokens->ids.list);
    if (tokens->attention.list && demo_json_padding(reader, tokens)) return -1;
    return demo_json_positions(reader, record, side, tokens);
}

/* Supervision of one token: from its label, its loss_mask, or by default. */
static inline int demo_json_supervised(const demo_reader *reader,
                                       const demo_json_tokens *tokens, const cJSON *item,
                                       int64_t t, int32_t id, int32_t *supervised) {
    *supervised = 1;
    if (!item) return 0;
    if (tokens->loss_mask.list)
        return demo_json_whole(reader, item, tokens->loss_mask.name, t, 0, 2, supervised);
    const char *ids = tokens->ids.name, *labels = tokens->labels.name;
    double vocab = demo_vocab(reader->options);
    int32_t label = 0;
    if (demo_json_whole(reader, item, labels, t, DEMO_IGNORED_LABEL, vocab, &label)) return -1;
    *supervised = label == id;
    if (label == id || label == DEMO_IGNORED_LABEL) return 0;
    return demo_wrong(
        reader,
        "%s[%lld] is %d but %s[%lld] is %d; a label repeats the id at its own place"
        " or is -100 (labels must not be shifted)",
        labels, (long long)t, label, ids, (long long)t, id);
}

/* Padding is not read, whatever its ids are; but it cannot be a target. */
static inline int demo_json_skip(const demo_reader *reader, const demo_json_tokens *tokens,
                                 const cJSON *target, int64_t t) {
    int ignored = tokens->labels.list ? DEMO_IGNORED_LABEL : 0;
    if (!target || (cJSON_IsNumber(target) && target->valuedouble == ignored) ||
        cJSON_IsFalse(target))
        return 0;
    return demo_wrong(reader, "%s[%lld] supervises padding, for %s[%lld] is 0; make it %d",
                      tokens->labels.list ? tokens->labels.name : tokens->loss_mask.name,
                      (long long)t, tokens->attention.name, (long long)t, ignored);
}

/* Reads SIDEinput_ids with SIDElabels, SIDEloss_mask and SIDEattention_mask, where they are
   there. */
static inline int demo_record_ids(demo_record *record, const demo_reader *reader,
                                  const cJSON *json, const char *side) {
    demo_json_tokens tokens;
    int64_t t = 0;
    if (demo_json_find_tokens(reader, json, side, &tokens)) return -1;
    const cJSON *targets = tokens.labels.list ? tokens.labels.list : tokens.loss_mask.list;
    const cJSON *target = targets ? targets->child : NULL;
    for (const cJSON *item = tokens.ids.list->child; item;
         item = item->next, target = target ? target->next : NULL) {
        int32_t id = 0, supervised = 0;
        bool padding = t < tokens.begin || t >= tokens.end;
        if (padding ? demo_json_skip(reader, &tokens, target, t)
                    : demo_json_whole(reader, item, tokens.ids.name, t, 0,
                                      demo_vocab(reader->options), &id) ||
                          demo_json_supervised(reader, &tokens, target, t, id, &supervised))
            return -1;
        if (!padding) demo_push(&record->document, id, supervised);
        t++;
    }
    return 0;
}

/* ---- what is kept ---- */

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

/* A token file's checksums stand for what is in it. */
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

static inline int64_t demo_supervised(const demo_document *document) {
    int64_t count = 0;
    for (int64_t t = 0; t < document->tokens; t++) count += document->loss_mask[t];
    return count;
}

/* A cut document keeps its first max_len tokens; text ends in a supervised EOS all the same. */
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

/* Tokens of a response that LLaMA-Factory keeps of a prompt and a response of so many. */
static inline int64_t demo_response_share(int64_t prompt, int64_t response, int64_t max_len) {
    int64_t most = 2 * response < max_len ? max_len
                   : 2 * prompt < max_len
                       ? max_len - prompt
                       : (int64_t)((double)max_len *
                                   ((double)response / (double)(prompt + response)));
    return response < most ? response : most;
}

/* Both lose their ends. response: the length that decides, of a pair that of the longer one. */
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

/* Is it kept, whole or cut? Of text OpenRLHF leaves out a prompt of max_len - 2 tokens or more;
   ids need room for a token that is learnt. */
static inline bool demo_record_kept(const demo_record *record,
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

static inline void demo_dataset_take(demo_dataset *set, demo_record *record,
                                     const demo_data_options *options) {
    demo_document *document = &record->document;
    int64_t whole = document->tokens;
    set->counts.read++;
    if (!whole || !demo_record_kept(record, options)) {
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

/* The text without its BOS goes on where the one before ended. */
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

/* Nothing written could be equal to what is not there: the reward would be 0 whatever is
   learnt. */
static inline int demo_number_there(const demo_reader *reader, const demo_document *document) {
    for (int64_t t = 0; t < document->tokens; t++)
        if (document->loss_mask[t] && document->ids[t] < 256 && isdigit(document->ids[t]))
            return 0;
    if (!document->tokens) return 0; /* is left out */
    return demo_wrong(reader,
                      "the right answer holds no number, but texts are compared with its last "
                      "one; set --%s to a key whose text holds one, or remove the line",
                      demo_output_option(reader->options));
}

static inline int demo_dataset_take_json(const demo_reader *reader, const cJSON *json) {
    demo_record record = {0};
    bool ids = cJSON_GetObjectItemCaseSensitive(json, "input_ids") != NULL;
    if (ids && reader->options->pretrain_eos)
        return demo_wrong(reader, "\"input_ids\" are tokens already, to which no EOS is added; "
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

/* ---- lines and files ---- */

/* Bytes of the character that text begins with; 0: it is no UTF-8. */
static inline size_t demo_utf8_bytes(const unsigned char *text, size_t left) {
    unsigned char first = *text;
    size_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    /* what would be written shorter, half characters of UTF-16, and what is beyond Unicode */
    unsigned char low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
    unsigned char high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    if (first < 0x80) return 1;
    if (first < 0xC2 || first > 0xF4 || left < bytes || text[1] < low || text[1] > high)
        return 0;
    for (size_t i = 2; i < bytes; i++)
        if ((text[i] & 0xC0) != 0x80) return 0;
    return bytes;
}

/* The same sentence as prepare.py's. */
static inline int demo_utf8_only(const demo_reader *reader, const char *bytes, size_t size) {
    for (size_t at = 0, next; at < size; at += next) {
        next = demo_utf8_bytes((const unsigned char *)bytes + at, size - at);
        if (!next)
            return demo_wrong(reader, "byte %zu is no UTF-8; write the file anew as UTF-8", at);
    }
    return 0;
}

static inline int demo_dataset_take_stream(const demo_reader *reader, const char *bytes,
                                           size_t size) {
    const demo_data_options *options = reader->options;
    if (!options->pretrain_mode)
        return demo_wrong(reader, "plain text needs --pretrain_mode; or give a .jsonl file");
    if (options->pretrain_eos)
        return demo_wrong(
            reader, "is one text without an end, where LLaMA-Factory's stage pt ends every "
                    "line in EOS; give a .jsonl of a text a record, or --pretrain_eos false "
                    "--pretrain_blocks false");
    if (options->max_len < 2)
        return demo_wrong(reader,
                          "plain text is cut every --max_len tokens; set it to 2 or more");
    if (demo_text_allowed(reader) || demo_utf8_only(reader, bytes, size)) return -1;
    size_t piece = (size_t)options->max_len;
    for (size_t at = 0; at < size && !demo_reader_full(reader); at += piece) {
        demo_record record = {0};
        demo_push_text(&record.document, bytes + at, size - at < piece ? size - at : piece,
                       true);
        demo_dataset_take((demo_dataset *)reader->set, &record, options);
    }
    return 0;
}

/* cJSON hands out zero-ended text, which a zero inside would silently shorten. */
static inline bool demo_has_zero(const char *line, size_t length) {
    for (size_t i = 0; i < length; i++) {
        if (!line[i]) return true;
        if (line[i] == '\\' && i + 5 < length && !strncmp(line + i + 1, "u0000", 5))
            return true;
        if (line[i] == '\\') i++;
    }
    return false;
}

static inline int demo_take_record(const demo_reader *reader, const cJSON *json) {
    const char *twice;
    if (!cJSON_IsObject(json))
        return demo_wrong(reader, "the line is %s, but an object {...} is needed",
                          demo_json_type(json));
    if ((twice = demo_json_twice(json)))
        return demo_wrong(reader, "key \"%s\" stands there twice; remove one of them", twice);
    return reader->take(reader, json);
}

/* Parses UTF-8 with one value and nothing behind it; NULL with one sentence that says what is
   wanted. */
static inline cJSON *demo_json_parse(const demo_reader *reader, const char *text, size_t size,
                                     const char *wanted) {
    const char *end = text;
    if (demo_utf8_only(reader, text, size)) return NULL;
    cJSON *json = cJSON_ParseWithLengthOpts(text, size, &end, 0);
    while (json && end < text + size && isspace((unsigned char)*end)) end++;
    if (json && end == text + size && !demo_has_zero(text, size)) return json;
    if (json && end == text + size)
        demo_wrong(reader,
                   "the line holds a zero character, which text cannot hold; remove it");
    else
        demo_wrong(reader, "broken JSON at column %lld; %s is needed",
                   (long long)(end - text) + 1, wanted);
    cJSON_Delete(json);
    return NULL;
}

static inline int demo_read_line(const demo_reader *reader, const char *line, size_t length) {
    cJSON *json = demo_json_parse(reader, line, length, "one whole object {...} per line");
    int failed = json ? demo_take_record(reader, json) : -1;
    cJSON_Delete(json);
    return failed;
}

/* One list of records; the line that is named is their number. */
static inline int demo_read_list(demo_reader *reader, const char *bytes, size_t size) {
    cJSON *list = demo_json_parse(reader, bytes, size, "a list of objects, or one per line");
    int failed = list ? 0 : -1;
    for (const cJSON *item = list ? list->child : NULL;
         item && !failed && !demo_reader_full(reader); item = item->next) {
        reader->line++;
        failed = demo_take_record(reader, item);
    }
    reader->line = 0;
    cJSON_Delete(list);
    return failed;
}

/* [ and an object, or nothing: not a line that is a list, which is refused as that. */
static inline bool demo_is_list(const char *bytes) {
    bytes += strspn(bytes, " \t\r\n");
    if (*bytes++ != '[') return false;
    bytes += strspn(bytes, " \t\r\n");
    return *bytes == '{' || *bytes == ']';
}

static inline int demo_read_jsonl(demo_reader *reader, const char *bytes, size_t size) {
    const char *end = bytes + size;
    int64_t before = *reader->read;
    for (const char *line = bytes; line < end && !demo_reader_full(reader);) {
        const char *stop = (const char *)memchr(line, '\n', (size_t)(end - line));
        size_t length = (size_t)((stop ? stop : end) - line);
        reader->line++;
        if (strspn(line, " \t\r") < length && demo_read_line(reader, line, length)) return -1;
        line += length + 1;
    }
    reader->line = 0;
    if (*reader->read == before && !demo_reader_full(reader))
        return demo_wrong(reader, "only empty lines; one JSON object per line is needed");
    return 0;
}

static inline bool demo_ends_with(const char *text, const char *ending) {
    size_t a = strlen(text), b = strlen(ending);
    return a >= b && !strcmp(text + a - b, ending);
}

/* What a gzip file, of one part or several, holds, zero-ended; NULL with the reason in *why. */
static inline char *demo_unzipped(const char *bytes, size_t size, size_t *whole,
                                  const char **why) {
    z_stream z = {.next_in = (unsigned char *)bytes};
    size_t room = 1 << 16;
    char *text = (char *)demo_room((int64_t)room + 1, 1);
    int status = inflateInit2(&z, 16 + MAX_WBITS);
    *whole = 0;
    while (status == Z_OK) {
        if (*whole == room) text = (char *)demo_grown(text, (room *= 2) + 1);
        z.avail_in = size < UINT_MAX ? (unsigned)size : UINT_MAX;
        z.avail_out = room - *whole < UINT_MAX ? (unsigned)(room - *whole) : UINT_MAX;
        const unsigned before_in = z.avail_in, before_out = z.avail_out;
        z.next_out = (unsigned char *)text + *whole;
        status = inflate(&z, Z_NO_FLUSH);
        size -= before_in - z.avail_in;
        *whole += before_out - z.avail_out;
        if (status == Z_STREAM_END && size) status = inflateReset(&z);
    }
    inflateEnd(&z);
    text[*whole] = 0;
    if (status == Z_STREAM_END) return text;
    *why = "it is no whole gzip file";
    free(text);
    return NULL;
}

static inline char *demo_read_data(const char *path, size_t *size, const char **why) {
    size_t packed;
    char *bytes = demo_read_whole(path, SIZE_MAX, &packed, why);
    *size = packed;
    if (!bytes || !demo_ends_with(path, ".gz")) return bytes;
    char *text = demo_unzipped(bytes, packed, size, why);
    free(bytes);
    return text;
}

static inline bool demo_is_jsonl(const char *path) {
    static const char *const ends[] = {".jsonl", ".json", ".jsonl.gz", ".json.gz"};
    bool is = false;
    for (int i = 0; i < 4; i++) is |= demo_ends_with(path, ends[i]);
    return is;
}

/* The bytes of reader->path, behind a byte order mark, zero-ended; NULL with a sentence. */
static inline char *demo_dataset_bytes(demo_reader *reader, bool stream, size_t *mark,
                                       size_t *size) {
    const char *why;
    if (!stream && !demo_is_jsonl(reader->path))
        return demo_wrong(reader,
                          "the name ends in neither .jsonl nor .txt; only these (and "
                          ".jsonl.gz) are read, and token files (prepare.py), which this is "
                          "not"),
               (char *)NULL;
    if (stream && !reader->take_stream)
        return demo_wrong(reader, "plain text holds no records to compare; give a .jsonl file"),
               (char *)NULL;
    char *file = demo_read_data(reader->path, size, &why);
    if (!file)
        return demo_wrong(reader, "cannot be read: %s; give the path of a .jsonl or .txt file",
                          why),
               (char *)NULL;
    *mark = *size >= 3 && !memcmp(file, "\xEF\xBB\xBF", 3) ? 3 : 0;
    if (*size > *mark) return file;
    free(file);
    return demo_wrong(reader, "the file is empty; give one with at least one record"),
           (char *)NULL;
}

static inline int demo_read_dataset_file(demo_reader *reader) {
    size_t size = 0, mark = 0;
    bool stream = demo_ends_with(reader->path, ".txt");
    char *file = demo_dataset_bytes(reader, stream, &mark, &size);
    if (!file) return -1;
    int failed = stream ? reader->take_stream(reader, file + mark, size - mark)
                 : demo_is_list(file + mark)
                     ? demo_read_list(reader, file + mark, size - mark)
                     : demo_read_jsonl(reader, file + mark, size - mark);
    free(file);
    return failed;
}

/* A token file that is one of a list; 0: none is. */
static inline int demo_token_file_among(const char *paths, demo_error *error) {
    char one[4352];
    for (const char *at = paths; at && strchr(paths, ',');
         at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        snprintf(one, sizeof one, "%.*s", (int)strcspn(at, ","), at);
        if (demo_is_token_file(one))
            return demo_fail(error,
                             "%s: is a token file, which stands alone; let demos/prepare.py "
                             "make one file of the sets: --dataset ONE,OTHER",
                             one);
    }
    return 0;
}

/* ---- several sets (mix.h) ---- */

typedef struct {
    const char *path, *text;
    size_t length;
    int64_t line;
    const cJSON *json; /* in the place of the text: of a file that is one list */
} demo_line;

typedef struct { /* one of a comma list */
    char **paths;
    demo_line *lines; /* of all its files; stb_ds arrays */
    char **bytes;
    cJSON **lists;
} demo_named_set;

static inline void demo_sets_free(demo_named_set *sets) {
    for (int64_t i = 0; i < arrlen(sets); i++) {
        demo_paths_free(sets[i].paths);
        demo_paths_free(sets[i].bytes);
        for (int64_t k = 0; k < arrlen(sets[i].lists); k++) cJSON_Delete(sets[i].lists[k]);
        arrfree(sets[i].lists);
        arrfree(sets[i].lines);
    }
    arrfree(sets);
}

static inline int demo_sets_find(const demo_reader *reader, demo_named_set **sets,
                                 const char *paths) {
    int failed = 0;
    char *list = strdup(paths ? paths : ""), *rest = list;
    for (char *name; !failed && (name = strsep(&rest, ","));) {
        demo_named_set set = {.paths = demo_set_files(name, reader->error)};
        failed = set.paths ? 0 : -1;
        if (set.paths) arrput(*sets, set);
    }
    free(list);
    return failed;
}

static inline int demo_set_list(demo_reader *reader, demo_named_set *set, const char *bytes,
                                size_t size) {
    cJSON *list = demo_json_parse(reader, bytes, size, "a list of objects, or one per line");
    int64_t number = 0;
    if (!list) return -1;
    arrput(set->lists, list);
    for (const cJSON *item = list->child; item; item = item->next)
        arrput(set->lines, ((demo_line){reader->path, NULL, 0, ++number, item}));
    return 0;
}

static inline void demo_set_text(demo_reader *reader, demo_named_set *set, const char *bytes,
                                 size_t size) {
    int64_t number = 0;
    for (const char *at = bytes, *end = bytes + size; at < end;) {
        const char *stop = (const char *)memchr(at, '\n', (size_t)(end - at));
        size_t length = (size_t)((stop ? stop : end) - at);
        number++;
        if (strspn(at, " \t\r") < length)
            arrput(set->lines, ((demo_line){reader->path, at, length, number, NULL}));
        at += length + 1;
    }
}

static inline int demo_set_lines(demo_reader *reader, demo_named_set *set) {
    size_t size = 0, mark = 0;
    char *file = demo_dataset_bytes(reader, false, &mark, &size);
    int64_t before = arrlen(set->lines);
    if (!file) return -1;
    arrput(set->bytes, file);
    bool list = demo_is_list(file + mark);
    if (list && demo_set_list(reader, set, file + mark, size - mark)) return -1;
    if (!list) demo_set_text(reader, set, file + mark, size - mark);
    return list || arrlen(set->lines) > before
               ? 0
               : demo_wrong(reader, "only empty lines; one JSON object per line is needed");
}

/* The sets' records in the order of the rule. */
static inline int demo_read_mixed(demo_reader *reader, demo_named_set *sets, int64_t limit) {
    int64_t count = arrlen(sets), *there = (int64_t *)demo_room(count, sizeof *there), all = 0;
    double *ends = (double *)demo_room(count, sizeof *ends);
    const char *probs = reader->options->probs;
    int32_t *order = NULL;
    int failed = probs ? demo_mix_weights(ends, count, probs, reader->error) : 0;
    for (int64_t i = 0; i < count; all += there[i++]) there[i] = arrlen(sets[i].lines);
    if (!limit) limit = all;
    if (!failed)
        order = probs ? demo_mix_drawn(there, count, ends, reader->options->seed, limit)
                      : demo_mix_shared(there, count, limit);
    memset(there, 0, (size_t)count * sizeof *there);
    for (int64_t i = 0; !failed && i < arrlen(order); i++) {
        const demo_line *line = &sets[order[i]].lines[there[order[i]]++];
        reader->path = line->path;
        reader->line = line->line;
        failed = line->json ? demo_take_record(reader, line->json)
                            : demo_read_line(reader, line->text, line->length);
    }
    reader->line = 0;
    arrfree(order);
    free(ends);
    free(there);
    return failed;
}

static inline int demo_read_sets(demo_reader *reader, demo_named_set *sets) {
    int64_t streams = 0;
    int failed = 0;
    for (int64_t i = 0; i < arrlen(sets); i++)
        for (int64_t k = 0; k < arrlen(sets[i].paths); k++)
            streams += demo_ends_with(sets[i].paths[k], ".txt");
    bool mixes = !streams && (arrlen(sets) > 1 || reader->options->probs);
    if (streams && reader->options->probs)
        return demo_fail(reader->error,
                         "plain text has no records that weights could draw; leave them out");
    for (int64_t i = 0; !failed && i < arrlen(sets); i++)
        for (int64_t k = 0; !failed && k < arrlen(sets[i].paths); k++) {
            if (!mixes && demo_reader_full(reader)) return 0;
            reader->path = sets[i].paths[k];
            failed = mixes ? demo_set_lines(reader, &sets[i]) : demo_read_dataset_file(reader);
        }
    return failed || !mixes ? failed
                            : demo_read_mixed(reader, sets, reader->options->max_samples);
}

/* Reads a comma list of files and folders. */
static inline int demo_read_dataset(demo_reader *reader, const char *paths) {
    const char *form = reader->options->input_template;
    demo_named_set *sets = NULL;
    if (form && !strstr(form, "{}"))
        return demo_fail(reader->error, "input_template has no {} for the prompt: %s", form);
    if (form && strstr(strstr(form, "{}") + 2, "{}"))
        return demo_fail(reader->error,
                         "input_template has {} twice, but there is one prompt: %s", form);
    if (demo_token_file_among(paths, reader->error)) return -1;
    int failed = demo_sets_find(reader, &sets, paths) || demo_read_sets(reader, sets) ? -1 : 0;
    demo_sets_free(sets);
    return failed;
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

/* One line for people: what was read and what became of it. */
static inline void demo_data_summary(const demo_dataset *set, char *text, size_t size) {
    const demo_data_counts *c = &set->counts;
    int used = snprintf(text, size,
                        "%lld read, %lld kept with %lld tokens, %lld of them supervised",
                        (long long)c->read, (long long)arrlen(set->documents),
                        (long long)set->tokens, (long long)set->supervised_tokens);
    if (used < 0 || (size_t)used >= size) return;
    snprintf(text + used, size - (size_t)used,
             "; %lld too long, %lld empty, %lld cut, %lld masked whole",
             (long long)c->dropped_long, (long long)c->zero_length, (long long)c->cut,
             (long long)c->fully_masked);
}

/* ---- token files as documents ---- */

/* What a folder's tokenizer is recognized by; false: there is no tokenizer.json. */
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

/* Are its tokens those of the model, and does it go with these options? */
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
            "(%llu bytes, crc32 %08x); make it anew: %s",
            (unsigned long long)own.bytes, own.crc, options->folder,
            (unsigned long long)folders.bytes, folders.crc,
            options->prepare ? options->prepare : "demos/prepare.py");
    if ((double)f->head->words > vocab)
        return demo_token_wrong(r,
                                "has words for ids up to %d and uses them up to %d, but the "
                                "model's vocab_size is %.0f; take the tokenizer that the model "
                                "was made with, or a model with a row for each",
                                f->head->words - 1, f->largest, vocab);
    if (options->max_len && f->longest > options->max_len)
        return demo_token_wrong(
            r,
            "a document has %lld tokens, --%s is %lld; raise it, or make the "
            "file anew by demos/prepare.py with --max_len %lld",
            (long long)f->longest, options->length_option ? options->length_option : "max_len",
            (long long)options->max_len, (long long)options->max_len);
    return 0;
}

/* Opens the file for a set; NULL with one sentence where that is not possible. */
static inline demo_token_file *demo_token_file_for(const char *path, uint32_t kind,
                                                   const demo_data_options *options,
                                                   demo_error *error) {
    demo_token_file *file = (demo_token_file *)demo_room(1, sizeof *file);
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

/* How many of the file's records are wanted. */
static inline int64_t demo_token_records(int64_t there, const demo_data_options *options) {
    return options->max_samples && options->max_samples < there ? options->max_samples : there;
}

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

/* ---- what ids stand for ---- */

typedef struct {
    const demo_token_file *file; /* whose words they are; NULL: a byte is a token */
    const int32_t *stops;        /* end a text that is sampled */
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

/* A token file, or a comma list of files, one after the other. On failure the set is empty. */
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
