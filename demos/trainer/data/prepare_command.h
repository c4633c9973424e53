/* SPDX-License-Identifier: MIT OR Unlicense */
/* prepare_command.h - builds the command line of demos/prepare.py that makes a token file of
 * text, for a model with a tokenizer. Messages show it, and --print_prepare prints it for other
 * programs. */
#ifndef DEMO_PREPARE_COMMAND_H
#define DEMO_PREPARE_COMMAND_H

#include "trainer/run/settle.h"
#include "trainer/base/shell.h"

static bool demo_folder_has_tokenizer(const char *folder) {
    return folder && (demo_folder_has(folder, "tokenizer.json") ||
                      demo_folder_has(folder, "tokenizer.model") ||
                      demo_folder_has(folder, "vocab.json"));
}

typedef struct {
    char **words; /* stb_ds array; demo_command_free frees the words */
    const demo_job *job;
} demo_command;

static void demo_command_word(demo_command *line, const char *dashes, const char *word) {
    size_t size = strlen(dashes) + strlen(word) + 1;
    char *copy = (char *)demo_alloc((int64_t)size, 1);
    snprintf(copy, size, "%s%s", dashes, word);
    arrput(line->words, copy);
}

static void demo_command_add(demo_command *line, const char *name, const char *value) {
    demo_command_word(line, "--", name);
    if (value) demo_command_word(line, "", value);
}

static void demo_command_number(demo_command *line, const char *name, int64_t value) {
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)value);
    demo_command_add(line, name, text);
}

static void demo_command_free(demo_command *line) {
    for (int64_t i = 0; i < arrlen(line->words); i++) free(line->words[i]);
    arrfree(line->words);
}

/* Adds an option if the user gave it. here, there: its names in the trainer and in
   prepare.py. */
static void demo_command_typed(demo_command *line, const char *here, const char *there) {
    const char *text = line->job->parsed ? demo_options_text(line->job->parsed, here) : NULL;
    bool flag = text && demo_type_of(demo_known_find(here)->kind) == DEMO_FLAG;
    if (text && (!flag || demo_truth(text) == 1))
        demo_command_add(line, there, flag ? NULL : text);
}

/* Did the user set this flag, which no variable is bound to? */
static bool demo_command_on(const demo_command *line, const char *name) {
    const char *text = line->job->parsed ? demo_options_text(line->job->parsed, name) : NULL;
    return text && demo_truth(text) == 1;
}

/* By kind of token file: options that have the same name and default in prepare.py. Only those
   that the user gave are passed on. */
static const char *const demo_shared_options[] = {
    "",
    "input_key output_key pretrain_mode input_template",
    "prompt_key chosen_key rejected_key margin_key input_template",
    "input_key output_key label_key input_template",
    "input_key label_key input_template",
    "input_key label_key placeholder_token reward_tokens"};

/* Adds the options that decide how a record becomes a document, so that prepare.py makes the
   documents that the user asked the trainer for. learns_more: the set is --pretrain_data, whose
   texts have no prompt. */
static void demo_command_shape(demo_command *line, uint32_t kind, bool learns_more) {
    const demo_config *c = &line->job->config;
    char name[32];
    int length;
    for (const char *at = demo_shared_options[kind]; *at; at += length, at += *at == ' ') {
        length = (int)strcspn(at, " ");
        snprintf(name, sizeof name, "%.*s", length, at);
        if (!(learns_more || c->pretrain_mode) || strcmp(name, "input_template"))
            demo_command_typed(line, name, name);
    }
    if (learns_more) demo_command_add(line, "pretrain_mode", NULL);
    /* with dataset_info, prepare.py does not use pretrain_eos and pretrain_blocks */
    bool told = demo_job_typed(line->job, "dataset_info");
    if (c->pretrain_eos && !told) demo_command_add(line, "pretrain_eos", NULL);
    if (c->pretrain_blocks && !told) demo_command_add(line, "pretrain_blocks", NULL);
    demo_command_typed(line, "apply_chat_template", "apply_chat_template");
    demo_command_typed(line, "tokenizer_chat_template", "tokenizer_chat_template");
    demo_command_typed(line, "template", "template");
    demo_command_typed(line, "default_system", "default_system");
    const demo_binding *asked = demo_binding_of(line->job->bindings, line->job->binding_count,
                                                "csft_prompt");
    if (asked && demo_option_on(line->job->bindings, line->job->binding_count, "enable_csft"))
        demo_command_add(line, "csft_prompt", *(const char *const *)asked->variable);
    if (c->train_on_inputs)
        demo_command_add(line, "train_on", "all");
    else if (demo_command_on(line, "mask_history"))
        demo_command_add(line, "train_on", "last");
    if (kind != DEMO_TOKENS_PROMPTS && c->long_documents != DEMO_LONG_CUT)
        demo_command_add(line, "truncation", demo_long_words[c->long_documents]);
}

/* Does --prompt_data (PPO) name these prompts? Otherwise --dataset does. */
static bool demo_prompts_option(const demo_job *job, uint32_t kind) {
    return kind == DEMO_TOKENS_PROMPTS && !job->objective->generates;
}

/* Adds the options that choose records of this set. An evaluation set is read whole. */
static void demo_command_records(demo_command *line, const char *paths, uint32_t kind,
                                 bool learns_more) {
    const char *probs = learns_more                            ? "pretrain_data_probs"
                        : demo_prompts_option(line->job, kind) ? "prompt_data_probs"
                                                               : "dataset_probs";
    bool evaluates = paths == line->job->config.eval_dataset;
    demo_command_typed(line, evaluates ? "eval_dataset_info" : "dataset_info", "dataset_info");
    if (evaluates) return;
    demo_command_typed(line, probs, "dataset_probs");
    if (strchr(paths, ',')) demo_command_typed(line, "seed", "seed");
    demo_command_typed(line, "max_samples", "max_samples");
}

/* The arguments of prepare.py. */
static demo_command demo_prepare_words(const demo_job *job, const char *paths, uint32_t kind) {
    demo_command line = {NULL, job};
    const demo_config *c = &job->config;
    const demo_binding *most = kind == DEMO_TOKENS_PROMPTS
                                   ? demo_binding_of(job->bindings, job->binding_count,
                                                     "prompt_max_len")
                                   : NULL;
    bool learns_more = kind == DEMO_TOKENS_SFT &&
                       demo_binding_of(job->bindings, job->binding_count, "pretrain_data");
    char output[1200];
    snprintf(output, sizeof output, "%.*s.tokens", (int)strcspn(paths, ","), paths);
    demo_command_add(&line, "kind", demo_token_kinds[kind]);
    demo_command_add(&line, "pretrain", c->pretrain);
    demo_command_add(&line, "dataset", paths);
    demo_command_add(&line, "output", output);
    demo_command_shape(&line, kind, learns_more);
    demo_command_records(&line, paths, kind, learns_more);
    demo_command_number(&line, "max_len", most ? *(const int64_t *)most->variable : c->max_len);
    return line;
}

enum { DEMO_COMMAND_SAID = 4096 }; /* bytes that fit into an error message */

/* Returns the command line that makes a token file of this text, valid until the next call.
   NULL: the model has no tokenizer, so a byte is a token. A command too long for a message is
   described instead, since a truncated command is useless. */
static const char *demo_prepare_command(const demo_job *job, const char *paths, uint32_t kind) {
    static char *text;
    if (!demo_folder_has_tokenizer(job->config.pretrain)) return NULL;
    demo_command line = demo_prepare_words(job, paths, kind);
    free(text);
    text = demo_shell_line("python3 demos/prepare.py", line.words, arrlen(line.words));
    bool templated = strstr(text, " --apply_chat_template") != NULL;
    size_t length = strlen(text);
    demo_command_free(&line);
    if (length > DEMO_COMMAND_SAID)
        snprintf(text, length,
                 "python3 demos/prepare.py with the arguments that --print_prepare prints "
                 "(%zu characters, too many to print here)%s",
                 length, templated ? " --apply_chat_template" : "");
    return text;
}

/* ---- --print_prepare ---- */

/* Do the first records hold token ids, not text? The search includes the closing quote of the
   key, which JSON would escape inside a text. */
static bool demo_begins_with_ids(const char *paths) {
    static char bytes[1 << 16];
    char path[DEMO_PATH_LIMIT + 1];
    snprintf(path, sizeof path, "%.*s", (int)strcspn(paths, ","), paths);
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t got = file < 0 ? 0 : read(file, bytes, sizeof bytes - 1);
    if (file >= 0) close(file);
    bytes[got > 0 ? got : 0] = 0;
    return strstr(bytes, "input_ids\"") || strstr(bytes, "\"chosen_ids\"");
}

/* Prints the arguments of prepare.py for a data set of text, as one line of JSON. */
static void demo_prepare_print(const demo_job *job, const char *option, const char *paths,
                               uint32_t kind) {
    if (!paths || demo_is_token_file(paths) || demo_begins_with_ids(paths)) return;
    demo_command line = demo_prepare_words(job, paths, kind);
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "option", option);
    cJSON_AddItemToObject(
        json, "words",
        cJSON_CreateStringArray((const char *const *)line.words, (int)arrlen(line.words)));
    char *text = cJSON_PrintUnformatted(json);
    puts(text);
    free(text);
    cJSON_Delete(json);
    demo_command_free(&line);
}

/* Prints a line for each data set that is text, if the model has a tokenizer. */
static void demo_prepare_print_all(const demo_job *job) {
    const demo_config *c = &job->config;
    uint32_t kind = job->objective->kind;
    if (!demo_folder_has_tokenizer(c->pretrain)) return;
    demo_prepare_print(job, demo_prompts_option(job, kind) ? "prompt_data" : "dataset",
                       c->dataset, kind);
    demo_prepare_print(job, "eval_dataset", c->eval_dataset, kind);
    demo_prepare_print(job, "pretrain_data",
                       demo_option_path(job->bindings, job->binding_count, "pretrain_data"),
                       DEMO_TOKENS_SFT);
}
#endif
