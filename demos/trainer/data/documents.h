/* SPDX-License-Identifier: MIT OR Unlicense */
/* documents.h - documents (token ids, and which of them are supervised), sets of documents, and
 * the reader that fills a set. */
#ifndef DEMO_DOCUMENTS_H
#define DEMO_DOCUMENTS_H
#include <cjson/cJSON.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "trainer/base/error.h"
#include "trainer/base/memory.h"
#include "token_file.h"

enum {
    DEMO_BOS = 256,
    DEMO_EOS = 257,
    DEMO_PAD = 258,
    DEMO_VOCAB = 259,
    DEMO_IGNORED_LABEL = -100
};

/* How a document of more than max_len tokens is treated. DROP: left out. CUT: its end is
   truncated, as in OpenRLHF. CUT_BOTH: prompt and response are truncated, as in
   LLaMA-Factory. */
enum { DEMO_LONG_DROP, DEMO_LONG_CUT, DEMO_LONG_CUT_BOTH };

typedef struct {
    /* (tokens) stb_ds arrays, or read-only pointers into a token file */
    int32_t *ids;
    uint8_t *loss_mask;
    int64_t tokens;
    /* NULL except for process reward models (steps.h). targets[t]: the id to predict at token
       t, not the next token; SEQPAR_IGNORE if loss_mask[t] is 0. shares[t]: the soft label, the
       probability of targets[t] */
    int32_t *targets;
    float *shares;
} demo_document;

typedef struct {
    /* key of the prompt, or of the whole text; NULL: none was given, and it is "input" */
    const char *input_key;
    const char *output_key;     /* key of the response; NULL: all of the input is trained on */
    const char *input_template; /* every {} becomes the prompt; NULL: the prompt as it is */
    bool pretrain_mode;         /* BOS and input only, all supervised, no EOS */
    bool pretrain_eos;          /* pretrain_mode: also EOS at the end */
    bool pretrain_blocks;       /* pretrain_mode: join texts, split every max_len tokens */
    bool train_on_inputs;       /* the prompt is supervised too */
    /* the largest number of tokens of a document, and the length of documents split from a
       .txt; 0: no limit */
    int64_t max_len;
    int long_documents;  /* DEMO_LONG_ */
    bool long_prompts;   /* reward models: keep a record of which only the prompt is left */
    int64_t max_samples; /* use at most this many records; 0: all */
    const char *probs;   /* comma-separated sampling weights; NULL: one set after another */
    int64_t seed;        /* of drawing the sets */
    int64_t vocab_size;  /* ids must be below it; 0: DEMO_VOCAB */
    const char *folder;  /* the model's; token files must use its tokenizer; NULL: none */
    const int64_t *end;  /* the folder's eos_token_id; NULL: it is DEMO_EOS or unknown */
    /* the command that makes a token file of text, shown when text is refused because the
       folder has a tokenizer; NULL: text is read as bytes */
    const char *prepare;
    /* rewards compare a generated text with the last number of the response, so it needs one */
    bool number;
    /* names of the options for output_key and max_len, for messages; NULL: those names */
    const char *output_option, *length_option;
} demo_data_options;

/* read = kept + dropped_long + zero_length. Kept documents may be truncated (cut), or without a
   supervised token (fully_masked). */
typedef struct {
    int64_t read, dropped_long, cut, zero_length, fully_masked;
} demo_data_counts;

typedef struct {
    demo_document *documents; /* stb_ds array */
    demo_token_file *file;    /* the documents point into it; NULL: they own their arrays */
    bool lent;                /* another set owns and frees ids and masks */
    demo_document begun;      /* pretrain_blocks: the unfinished document */
    demo_data_counts counts;
    int64_t tokens, supervised_tokens;
    char summary[256]; /* one line for the log */
} demo_dataset;

/* Reads files and passes their records to callbacks, which fill the set. path and line: the
   position, for messages. */
typedef struct demo_reader {
    const demo_data_options *options;
    demo_error *error;
    void *set;           /* the dataset being filled */
    const int64_t *read; /* records in it so far */
    int (*take)(const struct demo_reader *reader, const cJSON *record); /* a line of a .jsonl */
    /* the contents of a .txt; NULL: a .txt is refused */
    int (*take_stream)(const struct demo_reader *reader, const char *bytes, size_t size);
    const char *path;
    int64_t line;
} demo_reader;

/* A document while it is read. */
typedef struct {
    demo_document document;
    int64_t prompt_tokens;
    bool ends_in_eos; /* truncation keeps EOS at the end */
} demo_record;

/* Sets the error to "path:line: sentence"; line 0 is left out. Returns -1. */
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

/* Checks a template as OpenRLHF does. Returns the template, or NULL if it has no {} for the
 * prompt. warning becomes a sentence or is empty. */
static inline const char *demo_template_checked(const char *form, char *warning, size_t size) {
    *warning = 0;
    if (!form || !*form) return NULL;
    if (!strstr(form, "{}"))
        snprintf(warning, size,
                 "--input_template has no {} in the place of the prompt, so "
                 "it is not used: %s",
                 form);
    else if (strstr(form, "\\n"))
        snprintf(warning, size,
                 "--input_template holds a backslash and an n, not a new line; in bash write "
                 "$'...\\n'");
    return strstr(form, "{}") ? form : NULL;
}
#endif
