/* SPDX-License-Identifier: MIT OR Unlicense */
/* settled.h - options that demos/prepare.py already applied when it made a token file. The
 * trainer cannot apply them again, so a value that differs from the one in the file is refused.
 * Without a token file, options that only prepare.py implements are refused. */
#ifndef DEMO_SETTLED_H
#define DEMO_SETTLED_H
#include "settle.h"

static const char *const demo_settled_options[] = {"input_key",
                                                   "output_key",
                                                   "input_template",
                                                   "prompt_key",
                                                   "chosen_key",
                                                   "rejected_key",
                                                   "label_key",
                                                   "placeholder_token",
                                                   "reward_tokens",
                                                   "margin_key",
                                                   "truncation",
                                                   "pretrain_mode",
                                                   "pretrain_eos",
                                                   "pretrain_blocks",
                                                   "train_on_inputs",
                                                   "dataset_probs",
                                                   "prompt_data_probs",
                                                   "apply_chat_template",
                                                   "tokenizer_chat_template",
                                                   "chat_template",
                                                   "template",
                                                   "default_system",
                                                   "dataset_info",
                                                   "eval_dataset_info",
                                                   "mask_history",
                                                   "multiturn",
                                                   "enable_csft",
                                                   "csft_prompt"};
enum { DEMO_SETTLED = (int)(sizeof demo_settled_options / sizeof *demo_settled_options) };

/* The option value with which the file was made, as text; NULL if the file does not record
   it. */
static const char *demo_made_text(const cJSON *made, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(made, key);
    return cJSON_IsString(item)  ? item->valuestring
           : cJSON_IsBool(item)  ? (cJSON_IsTrue(item) ? "true" : "false")
           : cJSON_IsArray(item) ? "several weights"
           : item                ? "none"
                                 : NULL;
}

static bool demo_made_with(const cJSON *made, const char *key, const char *value) {
    const char *text = demo_made_text(made, key);
    return text && !strcmp(text, value);
}

/* Compares sampling weights. A file without weights was made from a single dataset, for which a
   single weight has no effect. */
static bool demo_same_weights(const cJSON *made, const char *text) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(made, "dataset_probs"), *item;
    if (!cJSON_IsArray(list)) return !strchr(text, ',');
    for (item = list->child; item && text; item = item->next) {
        double here = strtod(text, NULL);
        if (here < item->valuedouble || here > item->valuedouble) return false;
        text = strchr(text, ',') ? strchr(text, ',') + 1 : NULL;
    }
    return !item && !text;
}

/* Does the file agree with the option? there: set to the value in the file, for messages. */
static bool demo_settled_alike(const cJSON *made, const char *name, const char *text,
                               const char **there) {
    bool on = demo_truth(text) == 1,
         templated = demo_made_with(made, "apply_chat_template", "true");
    bool own = templated && demo_made_with(made, "tokenizer_chat_template", "none");
    if (!strcmp(name, "train_on_inputs")) {
        *there = demo_made_text(made, "train_on");
        return !*there || on == !strcmp(*there, "all");
    }
    if (!strcmp(name, "mask_history")) {
        *there = demo_made_text(made, "train_on");
        return !*there || on == !strcmp(*there, "last");
    }
    if (strstr(name, "dataset_info")) name = "dataset_info";
    if (!strcmp(name, "enable_csft")) {
        *there = demo_made_text(made, "csft_prompt");
        bool has = *there && strcmp(*there, "none");
        if (!has) *there = "prompts without a reward to ask for (--csft_prompt)";
        return on == has;
    }
    if (strstr(name, "_probs")) {
        *there = demo_made_text(made, "dataset_probs");
        return !*there || demo_same_weights(made, text);
    }
    if (!strcmp(name, "chat_template")) {
        *there = own ? "the template of the model's folder" : "another one";
        return own && !strcmp(text, "tokenizer_default");
    }
    if (!strcmp(name, "multiturn")) {
        *there = "options that are not for lists of messages";
        return !on || (templated && demo_made_with(made, "output_key", "none") &&
                       demo_made_with(made, "train_on", "assistant"));
    }
    *there = demo_made_text(made, name);
    if (!strcmp(name, "input_template") && templated) return *there = "a chat template", false;
    return !*there || demo_same_value(*there, text);
}

/* Refuses an option that has an effect only on tokenization, since the data is not a token
   file. */
static int demo_unprepared(const demo_known *spelling, const char *text, const char *path,
                           demo_error *error) {
    const demo_known *target = demo_known_target(spelling);
    if (!demo_is_role(target, "prepared") || demo_truth(text) == 0) return 0;
    return demo_fail(error,
                     "--%s: %.300s is not a token file, and chat templates are applied only "
                     "by demos/prepare.py --apply_chat_template; give the token file that it "
                     "makes, or leave the option out",
                     spelling->name, path);
}

/* Does the option apply to this dataset? Evaluation datasets have no sampling weights, and have
   a separate eval_dataset_info. */
static bool demo_settled_of(const demo_job *job, const demo_dataset *set, const char *name) {
    return set == &job->eval ? !strstr(name, "_probs") && strcmp(name, "dataset_info")
                             : strcmp(name, "eval_dataset_info") != 0;
}

/* Refuses options that differ from those with which the token file was made. */
static int demo_settled_agrees(const demo_job *job, const demo_dataset *set, const char *path,
                               demo_error *error) {
    const cJSON *made = set->file
                            ? cJSON_GetObjectItemCaseSensitive(set->file->about, "options")
                            : NULL;
    for (int i = 0; job->parsed && path && i < DEMO_SETTLED; i++) {
        const char *name = demo_settled_options[i], *there = NULL, *text;
        const demo_known *spelling = demo_options_spelling(job->parsed, name);
        if (!spelling || !demo_settled_of(job, set, name)) continue;
        text = job->parsed->text[spelling - demo_known_options];
        if (!set->file && demo_unprepared(spelling, text, path, error)) return -1;
        if (!made || demo_settled_alike(made, name, text, &there)) continue;
        return demo_fail(error,
                         "--%s is %.100s, but %.300s was made with %.100s; make it again by "
                         "demos/prepare.py, or leave the option out",
                         spelling->name, text, path, there);
    }
    return 0;
}
#endif
