/* SPDX-License-Identifier: MIT OR Unlicense */
/* pairs.h - preference data: pairs of responses for DPO and reward models, labelled responses
 * for KTO.
 *
 * A document is BOS prompt response EOS; the response and EOS are supervised. Pairs, a .jsonl
 * line each:
 *
 *   text        {"prompt": "...", "chosen": "...", "rejected": "..."}
 *               with prompt_key
 *   texts       {"chosen": "...", "rejected": "..."}
 *               without prompt_key: the prompt is what both begin with (demo_common_prompt)
 *   ids         {"prompt_ids": [..], "chosen_ids": [..], "rejected_ids": [..]}
 *   whole ids   {"chosen_input_ids": [..], "chosen_labels": [..],
 *                "rejected_input_ids": [..], "rejected_labels": [..]}
 *
 * and any of them with "margin": 0.5. Labelled responses, a line each:
 *
 *   text        {"input": "...", "output": "...", "label": true}
 *               the label may also be false, 1, 0, "1" or "0"
 *   ids         {"input_ids": [..], "labels": [..], "label": true}
 *
 * Ids are used unchanged: neither BOS nor EOS is added. A label is the token's id, or -100 for
 * the tokens of the prompt; "loss_mask" may replace "labels". Left and right padding, where
 * "attention_mask" is 0 (chosen_attention_mask and so on in pairs), is removed.
 *
 * Functions return 0, or -1 with a message in error and nothing read. */
#ifndef DEMO_PAIRS_H
#define DEMO_PAIRS_H

#include "data.h"

typedef struct {
    /* fields in use: input_template, max_len, long_documents, max_samples and vocab_size */
    demo_data_options data;
    /* NULL: chosen and rejected hold the prompt, and input_template is not used */
    const char *prompt_key;
    const char *chosen_key;   /* NULL: "chosen" */
    const char *rejected_key; /* NULL: "rejected" */
    const char *margin_key;   /* NULL: "margin" */
    bool margins;             /* read the margins; else all are 0 */
} demo_pair_options;

typedef struct {
    demo_document chosen, rejected;
    double margin;
} demo_pair;

/* read = kept + dropped_long; the other counts are of kept pairs. */
typedef struct {
    int64_t read, dropped_long, cut;
    /* chosen equals rejected: the gradient is 0 in most objectives; evaluations leave such
       pairs out */
    int64_t identical;
    int64_t two_prompts;    /* chosen and rejected have different prompts: whole ids only */
    int64_t without_margin; /* the margin is missing and taken as 0 */
} demo_pair_counts;

typedef struct {
    demo_pair *pairs;      /* stb_ds array */
    demo_token_file *file; /* the documents point into it; NULL: they own memory */
    demo_pair_counts counts;
    int64_t tokens, supervised_tokens; /* of chosen and rejected */
    bool margins;
} demo_pair_set;

typedef struct {
    /* fields in use: input_key, output_key (NULL: "output") and those of pairs */
    demo_data_options data;
    const char *label_key; /* NULL: "label" */
} demo_labelled_options;

typedef struct {
    demo_document document;
    int64_t prompt_tokens; /* the response begins here */
    bool ends_in_eos;      /* made of text: truncation keeps EOS at the end */
    bool desirable;
} demo_labelled;

/* read = kept + dropped_long, kept = desirable + undesirable. */
typedef struct {
    int64_t read, dropped_long, cut, desirable, undesirable;
} demo_labelled_counts;

typedef struct {
    demo_labelled *records; /* stb_ds array */
    demo_token_file *file;  /* as in pairs */
    demo_labelled_counts counts;
    int64_t tokens, supervised_tokens;
} demo_labelled_set;

/* ---- prompt and response ---- */

static inline bool demo_json_has(const cJSON *record, const char *key) {
    return demo_json_find(record, key) != NULL;
}

static inline void demo_record_respond(demo_record *record, const char *response) {
    record->prompt_tokens = record->document.tokens;
    record->ends_in_eos = true;
    demo_push_text(&record->document, response, strlen(response), true);
    demo_push(&record->document, DEMO_EOS, true);
}

/* Finds where the response begins in a record of ids: at the first supervised token. */
static inline int demo_record_find_response(demo_record *record, const demo_reader *reader,
                                            const char *ids) {
    const demo_document *document = &record->document;
    int64_t t = 0;
    while (t < document->tokens && !document->loss_mask[t]) t++;
    record->prompt_tokens = t;
    if (t < document->tokens) return 0;
    return demo_wrong(reader,
                      "\"%s\" leaves no response token in a document of %lld tokens; give "
                      "one or remove the line (the first token of a document does not count, "
                      "as nothing predicts it)",
                      ids, (long long)document->tokens);
}

/* Reads ids that hold prompt and response. labels or loss_mask mark the response. */
static inline int demo_record_whole_ids(demo_record *record, const demo_reader *reader,
                                        const cJSON *json, const char *side) {
    char ids[40], labels[40], mask[40];
    snprintf(ids, sizeof ids, "%sinput_ids", side);
    snprintf(labels, sizeof labels, "%slabels", side);
    snprintf(mask, sizeof mask, "%sloss_mask", side);
    if (!demo_json_has(json, ids))
        return demo_wrong(reader, "no key \"%s\"; both halves of a pair are needed", ids);
    if (!demo_json_has(json, labels) && !demo_json_has(json, mask))
        return demo_wrong(
            reader,
            "no key \"%s\"; add it, with -100 for the tokens of \"%s\" that are the prompt",
            labels, ids);
    return demo_record_ids(record, reader, json, side)
               ? -1
               : demo_record_find_response(record, reader, ids);
}

static inline int demo_check_response(const demo_reader *reader, const char *key,
                                      const char *response) {
    if (*response) return 0;
    return demo_wrong(
        reader, "\"%s\" is empty, but a response needs a token; fill it or remove the line",
        key);
}

/* ---- reading pairs ---- */

/* A pair while it is read. */
typedef struct {
    demo_record chosen, rejected;
    double margin;
    bool has_margin;
} demo_pair_record;

typedef struct {
    demo_pair_set *set;
    const demo_pair_options *how;
} demo_pair_target;

/* Finds the last line that begins with `name`; returns the offset after the name, or 0. */
static inline size_t demo_last_turn(const char *text, size_t length, const char *name) {
    size_t size = strlen(name), last = 0;
    for (size_t at = 0; at + size <= length; at++)
        if ((!at || text[at - 1] == '\n') && !strncmp(text + at, name, size)) last = at + size;
    return last;
}

/* Is this a byte of a word? No word ends between two such bytes. */
static inline bool demo_in_word(char byte) {
    return (byte & 0x80) || isalnum((unsigned char)byte) || byte == '_' || byte == '\'';
}

/* Returns the length in bytes of the prompt that both texts begin with. If the last
 * "Assistant:" is at the same offset in both, the prompt ends there. Otherwise it ends at the
 * turn in which the texts differ or, without turns, before the first word that differs. As in
 * TRL, a space before that word belongs to the responses. If one text is the beginning of the
 * other, the last word of the shorter one is its response. */
static inline size_t demo_common_prompt(const char *one, const char *other) {
    static const char *const turns[] = {"Assistant:", "Human:", "User:"};
    size_t n = 0, turn = 0, asked = 0;
    size_t answer = demo_last_turn(one, strlen(one), turns[0]);
    while (one[n] && one[n] == other[n]) n++;
    if (answer && answer <= n && answer == demo_last_turn(other, strlen(other), turns[0]))
        return answer;
    for (int i = 0; i < 3; i++) {
        size_t end = demo_last_turn(one, n, turns[i]);
        if (end > turn) asked = (turn = end) - (i ? strlen(turns[i]) : 0);
    }
    if (turn) return asked;
    if (n && (!one[n] || !other[n])) n--;
    while (n && demo_in_word(one[n - 1]) && (demo_in_word(one[n]) || demo_in_word(other[n])))
        n--;
    return n && one[n - 1] == ' ' ? n - 1 : n;
}

static inline void demo_pair_push_prompt(demo_pair_record *pair, const char *form,
                                         const char *prompt, size_t length) {
    demo_record *halves[] = {&pair->chosen, &pair->rejected};
    for (int i = 0; i < 2; i++) {
        demo_document *document = &halves[i]->document;
        if (form)
            demo_push_prompt(document, form, prompt, false);
        else
            demo_push(document, DEMO_BOS, false),
                demo_push_text(document, prompt, length, false);
    }
}

/* Reads a pair of texts. Without prompt_key, the prompt is what both texts begin with. */
static inline int demo_pair_text(demo_pair_record *pair, const demo_reader *reader,
                                 const demo_pair_options *how, const cJSON *json) {
    const char *keys[] = {how->chosen_key ? how->chosen_key : "chosen",
                          how->rejected_key ? how->rejected_key : "rejected"};
    if (demo_one_prompt(reader, json, how->prompt_key)) return -1;
    const char *prompt = how->prompt_key
                             ? demo_json_text(reader, json, how->prompt_key, "prompt_key")
                             : "";
    const char *chosen = prompt ? demo_json_text(reader, json, keys[0], "chosen_key") : NULL;
    const char *rejected = chosen ? demo_json_text(reader, json, keys[1], "rejected_key")
                                  : NULL;
    if (!rejected || demo_text_allowed(reader)) return -1;
    size_t shared = how->prompt_key ? 0 : demo_common_prompt(chosen, rejected);
    if (demo_check_response(reader, keys[0], chosen + shared) ||
        demo_check_response(reader, keys[1], rejected + shared))
        return -1;
    if (how->prompt_key)
        demo_pair_push_prompt(pair, how->data.input_template, prompt, strlen(prompt));
    else
        demo_pair_push_prompt(pair, NULL, chosen, shared);
    demo_record_respond(&pair->chosen, chosen + shared);
    demo_record_respond(&pair->rejected, rejected + shared);
    return 0;
}

/* Appends a list of ids, such as "prompt_ids", to a document. */
static inline int demo_push_ids(demo_document *document, const demo_reader *reader,
                                const cJSON *json, const char *key, bool supervised) {
    demo_json_list ids;
    int64_t t = 0;
    if (demo_json_find_list(reader, json, "", key, &ids)) return -1;
    if (!ids.list)
        return demo_wrong(reader,
                          "no key \"%s\"; a pair of ids is \"prompt_ids\", \"chosen_ids\" and"
                          " \"rejected_ids\"",
                          key);
    for (const cJSON *item = ids.list->child; item; item = item->next, t++) {
        int32_t id = 0;
        if (demo_json_whole(reader, item, key, t, 0, demo_vocab(reader->options), &id))
            return -1;
        demo_push(document, id, supervised);
    }
    return 0;
}

static inline int demo_pair_half_ids(demo_record *record, const demo_reader *reader,
                                     const cJSON *json, const char *response) {
    if (demo_push_ids(&record->document, reader, json, "prompt_ids", false) ||
        demo_push_ids(&record->document, reader, json, response, true))
        return -1;
    return demo_record_find_response(record, reader, response);
}

static inline int demo_pair_ids(demo_pair_record *pair, const demo_reader *reader,
                                const cJSON *json) {
    return demo_pair_half_ids(&pair->chosen, reader, json, "chosen_ids") ||
                   demo_pair_half_ids(&pair->rejected, reader, json, "rejected_ids")
               ? -1
               : 0;
}

static inline int demo_pair_whole_ids(demo_pair_record *pair, const demo_reader *reader,
                                      const cJSON *json) {
    return demo_record_whole_ids(&pair->chosen, reader, json, "chosen_") ||
                   demo_record_whole_ids(&pair->rejected, reader, json, "rejected_")
               ? -1
               : 0;
}

/* Reads the margin, which is 0 if it is missing, null or not asked for. */
static inline int demo_pair_margin(demo_pair_record *pair, const demo_reader *reader,
                                   const demo_pair_options *how, const cJSON *json) {
    const char *key = how->margin_key ? how->margin_key : "margin";
    const cJSON *item = how->margins ? demo_json_find(json, key) : NULL;
    pair->has_margin = item && !cJSON_IsNull(item);
    if (!pair->has_margin) return 0;
    if (!cJSON_IsNumber(item))
        return demo_wrong(reader, "\"%s\" is %s, but a number is needed; or set --margin_key",
                          key, demo_json_type(item));
    if (!isfinite(item->valuedouble))
        return demo_wrong(reader, "\"%s\" is %g, but a finite number is needed", key,
                          item->valuedouble);
    pair->margin = item->valuedouble;
    return 0;
}

static inline int demo_pair_read(demo_pair_record *pair, const demo_reader *reader,
                                 const demo_pair_options *how, const cJSON *json) {
    bool ids = demo_json_has(json, "prompt_ids") || demo_json_has(json, "chosen_ids") ||
               demo_json_has(json, "rejected_ids");
    bool whole = demo_json_has(json, "chosen_input_ids") ||
                 demo_json_has(json, "rejected_input_ids");
    if (ids && whole)
        return demo_wrong(
            reader, "ids in two forms, chosen_ids and chosen_input_ids; leave out one of them");
    if (demo_pair_margin(pair, reader, how, json)) return -1;
    return ids     ? demo_pair_ids(pair, reader, json)
           : whole ? demo_pair_whole_ids(pair, reader, json)
                   : demo_pair_text(pair, reader, how, json);
}

static inline bool demo_pair_two_prompts(const demo_pair_record *pair) {
    return pair->chosen.prompt_tokens != pair->rejected.prompt_tokens ||
           !demo_same_ids(&pair->chosen.document, &pair->rejected.document,
                          pair->chosen.prompt_tokens);
}

/* Truncates chosen and rejected, counts the pair and adds it to the set. */
static inline void demo_pair_keep(demo_pair_set *set, demo_pair_record *record,
                                  const demo_data_options *options) {
    demo_pair pair = {.margin = record->margin};
    int64_t whole = record->chosen.document.tokens + record->rejected.document.tokens;
    int64_t chosen = demo_response_tokens(&record->chosen),
            rejected = demo_response_tokens(&record->rejected),
            longer = chosen > rejected ? chosen : rejected;
    demo_record_shorten(&record->chosen, longer, options);
    demo_record_shorten(&record->rejected, longer, options);
    pair.chosen = record->chosen.document;
    pair.rejected = record->rejected.document;
    set->counts.cut += pair.chosen.tokens + pair.rejected.tokens < whole;
    set->counts.identical += demo_same_document(&pair.chosen, &pair.rejected);
    set->counts.two_prompts += demo_pair_two_prompts(record);
    set->counts.without_margin += set->margins && !record->has_margin;
    set->tokens += pair.chosen.tokens + pair.rejected.tokens;
    set->supervised_tokens += demo_supervised(&pair.chosen) + demo_supervised(&pair.rejected);
    arrput(set->pairs, pair);
}

/* Adds a record to the set. If chosen or rejected is too long, the whole pair is dropped. */
static inline int demo_pair_take(const demo_reader *reader, const cJSON *json) {
    demo_pair_target *target = (demo_pair_target *)reader->set;
    demo_pair_record pair = {0};
    int failed = demo_pair_read(&pair, reader, target->how, json);
    bool fits = !failed && demo_record_selected(&pair.chosen, reader->options) &&
                demo_record_selected(&pair.rejected, reader->options);
    target->set->counts.read += !failed;
    target->set->counts.dropped_long += !failed && !fits;
    if (fits) return demo_pair_keep(target->set, &pair, reader->options), 0;
    demo_document_free(&pair.chosen.document);
    demo_document_free(&pair.rejected.document);
    return failed;
}

/* ---- a set of pairs ---- */

static inline void demo_pair_free(const demo_pair_set *set, demo_pair *pair) {
    if (set->file) return;
    demo_document_free(&pair->chosen);
    demo_document_free(&pair->rejected);
}

static inline void demo_pairs_free(demo_pair_set *set) {
    for (int64_t i = 0; i < arrlen(set->pairs); i++) demo_pair_free(set, &set->pairs[i]);
    demo_token_file_free(set->file);
    arrfree(set->pairs);
    *set = (demo_pair_set){0};
}

/* One line for the log: how many pairs were read, kept, dropped and truncated. */
static inline void demo_pairs_summary(const demo_pair_set *set, char *text, size_t size) {
    const demo_pair_counts *c = &set->counts;
    char margins[64] = "", prompts[64] = "";
    if (c->without_margin)
        snprintf(margins, sizeof margins, ", %lld without margin",
                 (long long)c->without_margin);
    if (c->two_prompts)
        snprintf(prompts, sizeof prompts, ", %lld with two prompts", (long long)c->two_prompts);
    snprintf(text, size,
             "%lld pairs read, %lld kept with %lld tokens, %lld of them supervised; %lld too "
             "long, %lld"
             " cut, %lld identical%s%s",
             (long long)c->read, (long long)arrlen(set->pairs), (long long)set->tokens,
             (long long)set->supervised_tokens, (long long)c->dropped_long, (long long)c->cut,
             (long long)c->identical, margins, prompts);
}

/* Refuses a set without a pair, or without any margin although margins are asked for. */
static inline int demo_pairs_checked(const demo_pair_set *set, const char *paths,
                                     const char *margin_key, demo_error *error) {
    char summary[320];
    int64_t kept = arrlen(set->pairs);
    demo_pairs_summary(set, summary, sizeof summary);
    if (!kept)
        demo_fail(error, "%s: no pair is left (%s); raise --max_len", paths, summary);
    else if (set->margins && set->counts.without_margin == kept)
        demo_fail(error,
                  "%s: margins are asked for, but no pair has a \"%s\"; set --margin_key",
                  paths, margin_key ? margin_key : "margin");
    else
        return 0;
    return -1;
}

/* The index of the first response token, which is the first supervised one. */
static inline int64_t demo_response_begin(const demo_document *document) {
    int64_t t = 0;
    while (t < document->tokens && !document->loss_mask[t]) t++;
    return t;
}

static inline int demo_response_there(const char *path, int64_t i,
                                      const demo_document *document, demo_error *error) {
    if (demo_response_begin(document) < document->tokens) return 0;
    return demo_fail(error, "%s: document %lld has no supervised token; %s", path,
                     (long long)i + 1, demo_token_again);
}

static inline bool demo_same_begin(const demo_pair *pair) {
    int64_t prompt = demo_response_begin(&pair->chosen);
    return prompt == demo_response_begin(&pair->rejected) &&
           demo_same_ids(&pair->chosen, &pair->rejected, prompt);
}

static inline void demo_pairs_take(demo_pair_set *set, const demo_token_file *f, int64_t i) {
    demo_pair pair = {demo_token_document(f, 2 * i), demo_token_document(f, 2 * i + 1),
                      f->margins[i]};
    bool none = isnan(pair.margin);
    if (none || !set->margins) pair.margin = 0;
    set->counts.identical += demo_same_document(&pair.chosen, &pair.rejected);
    set->counts.two_prompts += !demo_same_begin(&pair);
    set->counts.without_margin += set->margins && none;
    set->tokens += pair.chosen.tokens + pair.rejected.tokens;
    set->supervised_tokens += demo_supervised(&pair.chosen) + demo_supervised(&pair.rejected);
    arrput(set->pairs, pair);
}

/* Reads the pairs of a token file, in which chosen and rejected are neighbours. */
static inline int demo_pairs_of_file(demo_pair_set *set, const char *path,
                                     const demo_data_options *options, demo_error *error) {
    demo_token_file *f = demo_token_file_for(path, DEMO_TOKENS_PAIRS, options, error);
    if (!f) return -1;
    int64_t count = demo_token_records(f->documents / 2, options);
    set->file = f;
    set->counts.read = demo_token_count(f, "read");
    set->counts.dropped_long = demo_token_count(f, "dropped_long");
    set->counts.cut = demo_token_count(f, "cut");
    for (int64_t i = 0; i < count; i++) {
        demo_pairs_take(set, f, i);
        if (demo_response_there(path, 2 * i, &set->pairs[i].chosen, error) ||
            demo_response_there(path, 2 * i + 1, &set->pairs[i].rejected, error))
            return -1;
    }
    return 0;
}

/* Loads a token file, or a comma-separated list of files. On failure the set is empty. */
static inline int demo_pairs_load(demo_pair_set *set, const char *paths,
                                  const demo_pair_options *how, demo_error *error) {
    demo_pair_target target = {set, how};
    demo_reader reader = {.options = &how->data,
                          .error = error,
                          .set = &target,
                          .read = &set->counts.read,
                          .take = demo_pair_take};
    *set = (demo_pair_set){.margins = how->margins};
    int failed = demo_is_token_file(paths) ? demo_pairs_of_file(set, paths, &how->data, error)
                                           : demo_read_dataset(&reader, paths);
    if (!failed && !demo_pairs_checked(set, paths, how->margin_key, error)) return 0;
    demo_pairs_free(set);
    return -1;
}

/* ---- labelled responses ---- */

typedef struct {
    demo_labelled_set *set;
    const demo_labelled_options *how;
} demo_labelled_target;

/* Reads the label of a response: true, 1 or "1" is desirable; false, 0 or "0" is not. */
static inline int demo_json_label(const demo_reader *reader, const cJSON *json, const char *key,
                                  bool *desirable) {
    const cJSON *item = demo_json_key(reader, json, key, "label_key");
    if (!item) return -1;
    const char *text = cJSON_IsString(item) ? item->valuestring : "";
    double number = cJSON_IsNumber(item) ? item->valuedouble : -1;
    *desirable = cJSON_IsTrue(item) || number == 1 || !strcmp(text, "1");
    if (*desirable || cJSON_IsFalse(item) || number == 0 || !strcmp(text, "0")) return 0;
    char value[48];
    if (cJSON_IsString(item))
        snprintf(value, sizeof value, "\"%.40s\"", text);
    else if (cJSON_IsNumber(item))
        snprintf(value, sizeof value, "%g", number);
    else
        snprintf(value, sizeof value, "%s", demo_json_type(item));
    return demo_wrong(reader, "\"%s\" is %s, but it must be true or false, 1 or 0", key, value);
}

static inline int demo_labelled_text(demo_record *record, const demo_reader *reader,
                                     const cJSON *json) {
    const demo_data_options *options = reader->options;
    const char *key = options->output_key ? options->output_key : "output";
    if (demo_one_prompt(reader, json, options->input_key)) return -1;
    const char *input = demo_json_text(
        reader, json, options->input_key ? options->input_key : "input", "input_key");
    const char *output = input ? demo_json_text(reader, json, key, "output_key") : NULL;
    if (!output || demo_text_allowed(reader) || demo_check_response(reader, key, output))
        return -1;
    demo_push_prompt(&record->document, options->input_template, input, false);
    demo_record_respond(record, output);
    return 0;
}

static inline void demo_labelled_keep(demo_labelled_set *set, demo_record *record,
                                      bool desirable, const demo_data_options *options) {
    int64_t whole = record->document.tokens;
    demo_record_shorten(record, demo_response_tokens(record), options);
    demo_labelled kept = {record->document, record->prompt_tokens, record->ends_in_eos,
                          desirable};
    set->counts.cut += kept.document.tokens < whole;
    *(desirable ? &set->counts.desirable : &set->counts.undesirable) += 1;
    set->tokens += kept.document.tokens;
    set->supervised_tokens += demo_supervised(&kept.document);
    arrput(set->records, kept);
}

/* Adds a record, of token ids or of text, to the set, or drops it if it is too long. */
static inline int demo_labelled_take(const demo_reader *reader, const cJSON *json) {
    demo_labelled_target *target = (demo_labelled_target *)reader->set;
    const char *key = target->how->label_key ? target->how->label_key : "label";
    demo_record record = {0};
    bool desirable = false, ids = demo_json_has(json, "input_ids");
    int failed = demo_json_label(reader, json, key, &desirable) ||
                 (ids ? demo_record_whole_ids(&record, reader, json, "")
                      : demo_labelled_text(&record, reader, json));
    bool fits = !failed && demo_record_selected(&record, reader->options);
    target->set->counts.read += !failed;
    target->set->counts.dropped_long += !failed && !fits;
    if (fits)
        demo_labelled_keep(target->set, &record, desirable, reader->options);
    else
        demo_document_free(&record.document);
    return failed ? -1 : 0;
}

static inline void demo_labelled_free(demo_labelled_set *set) {
    for (int64_t i = 0; !set->file && i < arrlen(set->records); i++)
        demo_document_free(&set->records[i].document);
    demo_token_file_free(set->file);
    arrfree(set->records);
    *set = (demo_labelled_set){0};
}

static inline void demo_labelled_summary(const demo_labelled_set *set, char *text,
                                         size_t size) {
    const demo_labelled_counts *c = &set->counts;
    snprintf(
        text, size,
        "%lld read, %lld kept with %lld tokens, %lld of them supervised; %lld desirable, %lld"
        " undesirable; %lld too long, %lld cut",
        (long long)c->read, (long long)arrlen(set->records), (long long)set->tokens,
        (long long)set->supervised_tokens, (long long)c->desirable, (long long)c->undesirable,
        (long long)c->dropped_long, (long long)c->cut);
}

/* Reads the labelled responses of a token file. */
static inline int demo_labelled_of_file(demo_labelled_set *set, const char *path,
                                        const demo_data_options *options, demo_error *error) {
    demo_token_file *f = demo_token_file_for(path, DEMO_TOKENS_LABELLED, options, error);
    if (!f) return -1;
    int64_t count = demo_token_records(f->documents, options);
    set->file = f;
    set->counts.read = demo_token_count(f, "read");
    set->counts.dropped_long = demo_token_count(f, "dropped_long");
    set->counts.cut = demo_token_count(f, "cut");
    for (int64_t i = 0; i < count; i++) {
        demo_labelled kept = {.document = demo_token_document(f, i),
                              .desirable = f->labels[i] != 0};
        kept.prompt_tokens = demo_response_begin(&kept.document);
        if (demo_response_there(path, i, &kept.document, error)) return -1;
        *(kept.desirable ? &set->counts.desirable : &set->counts.undesirable) += 1;
        set->tokens += kept.document.tokens;
        set->supervised_tokens += demo_supervised(&kept.document);
        arrput(set->records, kept);
    }
    return 0;
}

/* Loads a token file, or a comma-separated list of files. On failure the set is empty. */
static inline int demo_labelled_load(demo_labelled_set *set, const char *paths,
                                     const demo_labelled_options *how, demo_error *error) {
    demo_labelled_target target = {set, how};
    demo_reader reader = {.options = &how->data,
                          .error = error,
                          .set = &target,
                          .read = &set->counts.read,
                          .take = demo_labelled_take};
    char summary[320];
    *set = (demo_labelled_set){0};
    int failed = demo_is_token_file(paths)
                     ? demo_labelled_of_file(set, paths, &how->data, error)
                     : demo_read_dataset(&reader, paths);
    demo_labelled_summary(set, summary, sizeof summary);
    if (!failed && arrlen(set->records)) return 0;
    if (!failed)
        demo_fail(error, "%s: no response is left (%s); raise --max_len", paths, summary);
    demo_labelled_free(set);
    return -1;
}

/* ---- the mismatched documents of KTO's KL term ---- */

/* Joins the prompt of one record and the response of another, truncated to max_len as documents
 * are (0: no limit). The caller calls demo_document_free. A response token always fits, since a
 * record whose prompt leaves no room for one was dropped. */
static inline demo_document demo_mismatched(const demo_labelled *prompt,
                                            const demo_labelled *response,
                                            const demo_data_options *options) {
    demo_record record = {.prompt_tokens = prompt->prompt_tokens,
                          .ends_in_eos = response->ends_in_eos};
    const demo_document *tail = &response->document;
    for (int64_t t = 0; t < prompt->prompt_tokens; t++)
        demo_push(&record.document, prompt->document.ids[t], false);
    for (int64_t t = response->prompt_tokens; t < tail->tokens; t++)
        demo_push(&record.document, tail->ids[t], tail->loss_mask[t]);
    demo_record_shorten(&record, demo_response_tokens(&record), options);
    return record.document;
}

/* For the records of a step, in step order: mismatched[i] is prompt i with response (i + 1)
   mod count. */
static inline int demo_mismatched_step(demo_document *mismatched, const demo_labelled_set *set,
                                       const int64_t *step, int64_t count,
                                       const demo_data_options *options, demo_error *error) {
    if (count < 2) {
        demo_fail(
            error,
            "KTO's KL term pairs each prompt with another document's response, but a step "
            "has %lld document; set --train_batch_size to 2 or more",
            (long long)count);
        return -1;
    }
    for (int64_t i = 0; i < count; i++)
        mismatched[i] = demo_mismatched(&set->records[step[i]],
                                        &set->records[step[(i + 1) % count]], options);
    return 0;
}

#endif
