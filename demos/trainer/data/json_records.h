/* SPDX-License-Identifier: MIT OR Unlicense */
/* json_records.h - turns a record of a .jsonl, of texts or of token ids, into a document. */
#ifndef DEMO_JSON_RECORDS_H
#define DEMO_JSON_RECORDS_H
#include <cjson/cJSON.h>
#include <ctype.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "documents.h"
#include "trainer/base/files.h"
#include "trainer/base/json.h"

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

/* The suggested command applies no chat template, as text is read here. If the model has one,
   the hint names the option that applies it. */
static inline const char *demo_template_hint(const demo_data_options *options) {
    bool other = options->pretrain_mode || strstr(options->prepare, "--kind steps") ||
                 strstr(options->prepare, "--apply_chat_template");
    return !other && demo_folder_has_template(options->folder)
               ? " (add --apply_chat_template for the model's chat template)"
               : "";
}

/* Refuses text unless it can be read as bytes: the model has no tokenizer, its vocabulary has
   DEMO_VOCAB ids, and its EOS is DEMO_EOS. */
static inline int demo_text_allowed(const demo_reader *reader) {
    const demo_data_options *options = reader->options;
    double vocab = demo_vocab(options);
    if (options->prepare)
        return demo_wrong(reader,
                          "is text, which only demos/prepare.py can tokenize with the "
                          "tokenizer in %s; make a token file and give it%s: %s",
                          options->folder, demo_template_hint(options), options->prepare);
    if (vocab < (double)DEMO_VOCAB)
        return demo_wrong(reader,
                          "text without a tokenizer needs a vocabulary of %d (bytes, BOS and "
                          "EOS), but the model has %g; give input_ids",
                          DEMO_VOCAB, vocab);
    if (options->end)
        return demo_wrong(reader,
                          "is text, which without a tokenizer is read as bytes and ends in "
                          "EOS %d, but \"eos_token_id\" of %s/config.json is %lld; set it to "
                          "%d, or give input_ids",
                          DEMO_EOS, options->folder, (long long)*options->end, DEMO_EOS);
    return 0;
}

/* Returns the value of a key, or NULL. The key "a.b" means b inside a, unless the record has a
   key "a.b". */
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

/* Finds a key. If it is missing, the error names it, the option that chose it, and the keys of
   the record. */
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

/* Returns the text of a key, or NULL with one sentence. For a list of messages, the sentence
   suggests demos/prepare.py. */
static inline const char *demo_json_text(const demo_reader *reader, const cJSON *record,
                                         const char *key, const char *option) {
    const cJSON *item = demo_json_key(reader, record, key, option);
    if (!item || cJSON_IsString(item)) return item ? item->valuestring : NULL;
    if (!cJSON_IsArray(item) && !cJSON_IsObject(item))
        demo_wrong(reader, "\"%s\" is %s, but text is needed", key, demo_json_type(item));
    else if (reader->options->prepare)
        demo_wrong(reader,
                   "\"%s\" is %s, but text is needed; make a token file of lists of messages "
                   "and give it: %s%s",
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

/* Refuses a record in Alpaca's form if no key is set for the prompt: its prompt is
   "instruction" and "input" joined, and one of them alone is another prompt. */
static inline int demo_one_prompt(const demo_reader *reader, const cJSON *json,
                                  const char *key) {
    const demo_data_options *options = reader->options;
    const char *other = demo_json_find(json, "input") ? "input" : "output";
    if (key || options->pretrain_mode || !cJSON_IsString(demo_json_find(json, "instruction")) ||
        !demo_json_find(json, other))
        return 0;
    return demo_wrong(reader,
                      "the record has both \"instruction\" and \"%s\": set the key of the "
                      "prompt, or let demos/prepare.py join instruction and input%s%s",
                      other, options->prepare ? ": " : "",
                      options->prepare ? options->prepare : "");
}

static inline const char *demo_output_option(const demo_data_options *options) {
    return options->output_option ? options->output_option : "output_key";
}

/* Makes a document of a text record. Without prompt or response it stays empty, and is dropped
   later. */
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

/* Reads element t of a list, which must be a whole number in [low, high). */
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

/* The lists of a record of token ids: the ids, which of them are supervised, and which are
   padding. */
typedef struct {
    demo_json_list ids, labels, loss_mask, attention;
    int64_t begin, end; /* the tokens that are not padding */
} demo_json_tokens;

/* Finds the tokens between left and right padding. attention_mask must not be 0 between
   them. */
static inline int demo_json_padding(const demo_reader *reader, demo_json_tokens *tokens) {
    int64_t t = 0, begin = -1, end = 0;
    for (const cJSON *item = tokens->attention.list->child; item; item = item->next, t++) {
        int32_t attended = 0;
        if (demo_json_whole(reader, item, tokens->attention.name, t, 0, 2, &attended))
            return -1;
        if (attended && begin >= 0 && end < t)
            return demo_wrong(reader,
                              "%s[%lld] is 0 and %s[%lld] is 1; zeros are allowed only at "
                              "the left and right end",
                              tokens->attention.name, (long long)end, tokens->attention.name,
                              (long long)t);
        if (attended && begin < 0) begin = t;
        if (attended) end = t + 1;
    }
    tokens->begin = begin < 0 ? 0 : begin;
    tokens->end = end;
    return 0;
}

/* Checks position_ids, which must count from 0. If they restart, the record is a packed row of
   several documents, which is refused. */
static inline int demo_json_positions(const demo_reader *reader, const cJSON *record,
                                      const char *side, const demo_json_tokens *tokens) {
    demo_json_list positions;
    int64_t t = 0;
    if (demo_json_find_list(reader, record, side, "position_ids", &positions)) return -1;
    if (demo_json_same_length(reader, &positions, &tokens->ids)) return -1;
    for (const cJSON *item = positions.list ? positions.list->child : NULL; item;
         item = item->next, t++) {
        int32_t at = 0;
        if (t < tokens->begin || t >= tokens->end) continue; /* padding */
        if (demo_json_whole(reader, item, positions.name, t, 0, 2147483647, &at)) return -1;
        if (at != t - tokens->begin)
            return demo_wrong(reader,
                              "%s[%lld] is %d, but a document's positions must be 0, 1, 2, "
                              "...; give each document its own record",
                              positions.name, (long long)t, at);
    }
    return 0;
}

/* Finds the lists of a record of token ids, and checks lengths, padding and positions. side:
   prefix of the keys, such as "chosen_". */
static inline int demo_json_find_tokens(const demo_reader *reader, const cJSON *record,
                                        const char *side, demo_json_tokens *tokens) {
    if (demo_json_find_list(reader, record, side, "input_ids", &tokens->ids) ||
        demo_json_find_list(reader, record, side, "labels", &tokens->labels) ||
        demo_json_find_list(reader, record, side, "loss_mask", &tokens->loss_mask) ||
        demo_json_find_list(reader, record, side, "attention_mask", &tokens->attention))
        return -1;
    if (tokens->labels.list && tokens->loss_mask.list)
        return demo_wrong(reader,
                          "%s and %s both say which tokens are trained on; leave one of them "
                          "out",
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

/* Sets *supervised for a token, from its label or loss_mask (item), or to 1 if it has
   neither. */
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
        "%s[%lld] is %d but %s[%lld] is %d; a label must be -100 or the id at the same index "
        "(labels must not be shifted)",
        labels, (long long)t, label, ids, (long long)t, id);
}

/* Skips a padding token, whatever its id is. It must not be a target. */
static inline int demo_json_skip(const demo_reader *reader, const demo_json_tokens *tokens,
                                 const cJSON *target, int64_t t) {
    int ignored = tokens->labels.list ? DEMO_IGNORED_LABEL : 0;
    if (!target || (cJSON_IsNumber(target) && target->valuedouble == ignored) ||
        cJSON_IsFalse(target))
        return 0;
    return demo_wrong(reader, "%s[%lld] supervises padding, because %s[%lld] is 0; make it %d",
                      tokens->labels.list ? tokens->labels.name : tokens->loss_mask.name,
                      (long long)t, tokens->attention.name, (long long)t, ignored);
}

/* Makes a document of the list input_ids and, if the record has them, labels, loss_mask and
   attention_mask; all keys begin with `side`. */
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
#endif
