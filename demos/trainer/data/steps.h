/* SPDX-License-Identifier: MIT OR Unlicense */
/* steps.h - data of process reward models: texts with a placeholder token after every step,
 * and a label for each placeholder, which rates the step. A .jsonl line each:
 *
 *   text   {"input": "1 + 1 = 2 * so 3 *", "label": ["+", "-"]}
 *          a label for each placeholder, in their order
 *   ids    {"input_ids": [..], "labels": [..]}
 *          labels[t]: the id to predict at token t, or -100
 *
 * A hard label is a token; if reward tokens are given (--reward_tokens, "marks" in the code),
 * it must be one of them. A soft label is a number from 0 to 1: the probability of the first of
 * two reward tokens (true and false are 1 and 0). A label is at the index of its placeholder,
 * not shifted. Neither BOS nor EOS is added to a text. A text that is too long is truncated,
 * with its labels.
 *
 * Functions return 0, or -1 with one sentence in error and nothing read. */
#ifndef DEMO_STEPS_H
#define DEMO_STEPS_H

#include "data.h"

/* The reward tokens, one of which a label must be; count 0: any token. */
typedef struct {
    int32_t ids[SEQPAR_MAX_CHOICES];
    int64_t count;
} demo_marks;

typedef struct {
    demo_data_options data; /* fields in use: input_key, max_len, long_documents, max_samples */
    const char *label_key;
    int32_t placeholder;
    demo_marks marks;
} demo_step_options;

typedef struct {
    demo_dataset *set;
    const demo_step_options *how;
} demo_step_target;

/* The index of a token among the reward tokens; -1: it is none of them. */
static inline int64_t demo_mark_of(const demo_marks *marks, int32_t id) {
    for (int64_t i = 0; i < marks->count; i++)
        if (marks->ids[i] == id) return i;
    return -1;
}

static inline bool demo_same_marks(const demo_marks *a, const demo_marks *b) {
    return a->count == b->count && !memcmp(a->ids, b->ids, (size_t)a->count * sizeof *a->ids);
}

/* Sets *id to the token that an option names, for models without a tokenizer, where a byte is a
   token. */
static inline int demo_byte_token(const char *option, const char *text, size_t length,
                                  int32_t *id, demo_error *error) {
    if (length != 1)
        return demo_fail(error,
                         "--%s: \"%.*s\" is %zu tokens, as without a tokenizer each byte is "
                         "a token; give one ASCII character",
                         option, (int)(length < 80 ? length : 80), text, length);
    *id = (unsigned char)*text;
    return 0;
}

/* Reads reward tokens separated by blanks; text NULL: there are none. */
static inline int demo_byte_marks(const char *text, demo_marks *marks, demo_error *error) {
    marks->count = 0;
    for (const char *at = text ? text : ""; *(at += strspn(at, " ")); at += strcspn(at, " ")) {
        int32_t id = 0;
        if (demo_byte_token("reward_tokens", at, strcspn(at, " "), &id, error)) return -1;
        if (demo_mark_of(marks, id) >= 0)
            return demo_fail(error, "--reward_tokens names \"%c\" twice; name each once", *at);
        if (marks->count == SEQPAR_MAX_CHOICES)
            return demo_fail(error, "--reward_tokens are more than %d; give 2 to %d",
                             SEQPAR_MAX_CHOICES, SEQPAR_MAX_CHOICES);
        marks->ids[marks->count++] = id;
    }
    return !text || marks->count >= 2
               ? 0
               : demo_fail(error, "--reward_tokens %s is only one token; give 2 to %d", text,
                           SEQPAR_MAX_CHOICES);
}

/* ---- labels ---- */

static inline void demo_push_step(demo_document *d, int32_t id, int32_t target, float share) {
    arrput(d->ids, id);
    arrput(d->loss_mask, target != SEQPAR_IGNORE);
    arrput(d->targets, target);
    arrput(d->shares, share);
    d->tokens++;
}

/* Reads a soft label: the probability of the first of two reward tokens. */
static inline int demo_step_number(const demo_reader *reader, const cJSON *item, int64_t k,
                                   const demo_step_options *how, int32_t *target,
                                   float *share) {
    double number = cJSON_IsNumber(item) ? item->valuedouble : cJSON_IsTrue(item);
    if (how->marks.count != 2)
        return demo_wrong(
            reader,
            "%s[%lld] is %g, a soft label (the probability of the first of two tokens), but "
            "--reward_tokens names %lld; name two, or give tokens as labels",
            how->label_key, (long long)k, number, (long long)how->marks.count);
    if (!(number >= 0 && number <= 1))
        return demo_wrong(reader, "%s[%lld] is %.15g, but a soft label must be from 0 to 1",
                          how->label_key, (long long)k, number);
    *target = how->marks.ids[0];
    *share = (float)number;
    return 0;
}

/* Reads the label of placeholder k: a soft label, or a hard label of one byte. */
static inline int demo_step_label(const demo_reader *reader, const cJSON *item, int64_t k,
                                  const demo_step_options *how, int32_t *target, float *share) {
    if (cJSON_IsNumber(item) || cJSON_IsBool(item))
        return demo_step_number(reader, item, k, how, target, share);
    if (!cJSON_IsString(item))
        return demo_wrong(reader, "%s[%lld] is %s, but a token or a number is needed",
                          how->label_key, (long long)k, demo_json_type(item));
    const char *text = item->valuestring;
    *target = (unsigned char)*text;
    *share = 1;
    if (strlen(text) != 1)
        return demo_wrong(reader,
                          "%s[%lld] is \"%.40s\", which is %zu tokens, as without a "
                          "tokenizer each byte is a token; give one ASCII character",
                          how->label_key, (long long)k, text, strlen(text));
    if (!how->marks.count || demo_mark_of(&how->marks, *target) >= 0) return 0;
    return demo_wrong(reader, "%s[%lld] is \"%.40s\", which is none of --reward_tokens",
                      how->label_key, (long long)k, text);
}

/* Checks that there are as many labels as placeholders, and at least one. */
static inline int demo_steps_counted(const demo_reader *reader, const cJSON *labels,
                                     int64_t steps, const demo_step_options *how) {
    if (!steps)
        return demo_wrong(
            reader,
            "the text has no placeholder \"%c\", so no step has a label; put it after each "
            "step, or name another by --placeholder_token",
            (int)how->placeholder);
    if (cJSON_GetArraySize(labels) == steps) return 0;
    return demo_wrong(
        reader, "%d labels in \"%s\" for %lld placeholders \"%c\"; give one for each",
        cJSON_GetArraySize(labels), how->label_key, (long long)steps, (int)how->placeholder);
}

/* Makes a document of a text and its labels. The number of labels is checked before the first
   is read, so that there is one for every placeholder. */
static inline int demo_steps_text(demo_document *d, const demo_reader *reader,
                                  const cJSON *json, const demo_step_options *how) {
    const char *key = how->data.input_key;
    const char *text = demo_json_text(reader, json, key, "input_key");
    const cJSON *labels = text ? demo_json_key(reader, json, how->label_key, "label_key")
                               : NULL;
    int64_t k = 0, steps = 0;
    if (!labels || demo_text_allowed(reader)) return -1;
    if (!cJSON_IsArray(labels))
        return demo_wrong(reader, "\"%s\" is %s, but a list is needed, a label for each step",
                          how->label_key, demo_json_type(labels));
    if (!*text) return 0; /* an empty document is dropped later */
    for (const char *at = text; *at; at++) steps += (unsigned char)*at == how->placeholder;
    if (demo_steps_counted(reader, labels, steps, how)) return -1;
    const cJSON *label = labels->child;
    for (const char *at = text; *at; at++) {
        int32_t id = (unsigned char)*at, target = SEQPAR_IGNORE;
        float share = 0;
        if (id == how->placeholder) {
            if (demo_step_label(reader, label, k++, how, &target, &share)) return -1;
            label = label->next;
        }
        demo_push_step(d, id, target, share);
    }
    return 0;
}

/* Reads labels[t] of a record of ids: the token to predict at t, or -100. */
static inline int demo_steps_id(const demo_reader *reader, const demo_json_tokens *tokens,
                                const cJSON *item, int64_t t, const demo_step_options *how,
                                int32_t *target) {
    double vocab = demo_vocab(reader->options);
    if (demo_json_whole(reader, item, tokens->labels.name, t, DEMO_IGNORED_LABEL, vocab,
                        target))
        return -1;
    if (*target == DEMO_IGNORED_LABEL) return 0;
    if (*target < 0)
        return demo_wrong(reader, "%s[%lld] is %d; give an id, or -100", tokens->labels.name,
                          (long long)t, *target);
    if (!how->marks.count || demo_mark_of(&how->marks, *target) >= 0) return 0;
    return demo_wrong(reader, "%s[%lld] is %d, which is none of --reward_tokens",
                      tokens->labels.name, (long long)t, *target);
}

/* Makes a document of token ids and their labels. Padding is left out, but must have no label.
   A record without tokens is no error: demo_dataset_take drops and counts it. */
static inline int demo_steps_ids(demo_document *d, const demo_reader *reader, const cJSON *json,
                                 const demo_step_options *how) {
    demo_json_tokens tokens;
    int64_t t = 0, steps = 0;
    if (demo_json_find_tokens(reader, json, "", &tokens)) return -1;
    if (!tokens.labels.list)
        return demo_wrong(reader,
                          "no key \"labels\"; add it, with -100 for all tokens but those "
                          "that have a label");
    const cJSON *label = tokens.labels.list->child;
    for (const cJSON *item = tokens.ids.list->child; item;
         item = item->next, label = label->next, t++) {
        int32_t id = 0, target = SEQPAR_IGNORE;
        bool padding = t < tokens.begin || t >= tokens.end;
        if (padding ? demo_json_skip(reader, &tokens, label, t)
                    : demo_json_whole(reader, item, tokens.ids.name, t, 0,
                                      demo_vocab(reader->options), &id) ||
                          demo_steps_id(reader, &tokens, label, t, how, &target))
            return -1;
        steps += target != SEQPAR_IGNORE;
        if (!padding) demo_push_step(d, id, target, target != SEQPAR_IGNORE);
    }
    if (steps || !d->tokens) return 0;
    return demo_wrong(reader,
                      "\"labels\" are -100 everywhere; label a step, or remove the line");
}

static inline int demo_steps_take(const demo_reader *reader, const cJSON *json) {
    const demo_step_target *target = (const demo_step_target *)reader->set;
    demo_record record = {0};
    int failed = demo_json_find(json, "input_ids")
                     ? demo_steps_ids(&record.document, reader, json, target->how)
                     : demo_steps_text(&record.document, reader, json, target->how);
    if (failed)
        demo_document_free(&record.document);
    else
        demo_dataset_take(target->set, &record, reader->options);
    return failed;
}

/* ---- a set ---- */

static inline int demo_steps_read(demo_dataset *set, const char *paths,
                                  const demo_step_options *how, demo_error *error) {
    demo_step_target target = {set, how};
    demo_reader reader = {.options = &how->data,
                          .error = error,
                          .set = &target,
                          .read = &set->counts.read,
                          .take = demo_steps_take};
    return demo_read_dataset(&reader, paths);
}

/* Loads a token file, or a comma-separated list of files. On failure the set is empty. */
static inline int demo_steps_load(demo_dataset *set, const char *paths,
                                  const demo_step_options *how, demo_error *error) {
    char summary[256];
    *set = (demo_dataset){0};
    int failed = demo_is_token_file(paths)
                     ? demo_data_of_file(set, paths, DEMO_TOKENS_STEPS, &how->data, error)
                     : demo_steps_read(set, paths, how, error);
    demo_data_summary(set, summary, sizeof summary);
    if (!failed && !set->supervised_tokens)
        failed = demo_fail(error, "%s: no label is left (%s); raise --max_len", paths, summary);
    if (failed) demo_data_free(set);
    return failed ? -1 : 0;
}

/* The reward tokens that a token file was made for. */
static inline demo_marks demo_token_marks(const demo_token_file *f) {
    demo_marks marks = {{0}, (int64_t)(demo_token_size(f, DEMO_CHOICES) / 4)};
    memcpy(marks.ids, demo_token_bytes(f, DEMO_CHOICES), (size_t)marks.count * 4);
    return marks;
}

#endif
