/* SPDX-License-Identifier: MIT OR Unlicense */
/* axolotl.h - reads axolotl's yaml files: which trainer a file selects, and its list of data
 * sets. */
#ifndef PROGRAM_AXOLOTL_H
#define PROGRAM_AXOLOTL_H

#include "sets.h"

/* ---- which trainer ---- */

/* The keys rl and reward_model select the trainer; without them it is SFT. */
static int program_axolotl_tool(program_keys *k) {
    program_key rl = {0}, reward = {0};
    bool is_rl = program_key_take(k, "rl", &rl),
         rewards = program_key_take(k, "reward_model", &reward) && reward.value.text &&
                   demo_truth(reward.value.text) == 1;
    const char *kind = is_rl && rl.value.text ? rl.value.text : is_rl ? "a list" : "";
    k->p->tool = rewards ? "rm" : is_rl ? kind : "sft";
    if (!strcmp(kind, "ipo")) {
        const program_origin origin = {"ipo", k->path, rl.line};
        k->p->tool = "dpo";
        program_said(k->p, "ipo", "true", &origin);
    }
    if (!is_rl || !strcmp(k->p->tool, "dpo") || !strcmp(kind, "kto")) return 0;
    return program_key_wrong(k, &rl,
                             "rl is %.60s, but only dpo, ipo and kto are supported; give one "
                             "of them, or leave rl out for SFT",
                             kind);
}

/* ---- data sets ---- */

static const char *const program_axolotl_set[] = {"path",
                                                  "type",
                                                  "split",
                                                  "ds_type",
                                                  "data_files",
                                                  "name",
                                                  "field",
                                                  "chat_template",
                                                  "field_messages",
                                                  "field_chosen",
                                                  "field_rejected",
                                                  "field_label",
                                                  "message_field_role",
                                                  "message_field_content",
                                                  "message_property_mappings",
                                                  "roles",
                                                  "roles_to_train",
                                                  "train_on_eos",
                                                  "shards",
                                                  "trust_remote_code",
                                                  NULL};
static const char *const program_axolotl_roles[] = {"user", "assistant", "system", "tool",
                                                    NULL};
static const char *const program_axolotl_properties[] = {"role", "content", NULL};

/* Refuses keys whose value would change which data is read or which tokens are trained on. */
static int program_axolotl_refused(const program_keys *k, const program_node *set) {
    static const struct {
        const char *key, *harmless, *fix;
    } refused[] = {
        {"split", "train", "write the split into a file and give that as path"},
        {"name", "default", "write that subset into a file and give that as path"},
        {"chat_template", "tokenizer_default",
         "all data sets have the same template; write chat_template beside base_model"},
        {"roles_to_train", "assistant",
         "only the assistant's messages are trained on; leave "
         "it out"},
        {"train_on_eos", "turn", "each message is trained on with its end token; leave it out"},
        {"shards", "1", "give max_samples, or write the shard into a file"}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const program_node *value = program_entry(set, refused[i].key);
        char *text = value && !program_is_null(value) ? program_joined(value) : NULL;
        if (value && !program_is_null(value) && (!text || strcmp(text, refused[i].harmless)))
            return program_at(k->p, k->path, value->line,
                              "%s is %.60s, which is not supported: %s", refused[i].key,
                              text ? text : "{...}", refused[i].fix);
    }
    return 0;
}

static void program_axolotl_name(cJSON *to, const program_node *set, const char *key,
                                 const char *name, const char *otherwise) {
    const char *text = program_entry_text(set, key);
    if (text || otherwise) cJSON_AddStringToObject(to, name, text ? text : otherwise);
}

/* Translates, for prepare.py, the names of the keys of a conversation and of its roles. */
static int program_axolotl_chat(const program_keys *k, const program_node *set, cJSON *info) {
    const program_node *roles = program_entry(set, "roles"),
                       *mapped = program_entry(set, "message_property_mappings");
    cJSON *columns = cJSON_AddObjectToObject(info, "columns"),
          *tags = cJSON_AddObjectToObject(info, "tags");
    cJSON_AddStringToObject(info, "formatting", "messages");
    program_axolotl_name(columns, set, "field_messages", "messages", "messages");
    program_axolotl_name(columns, set, "field_chosen", "chosen", "chosen");
    program_axolotl_name(columns, set, "field_rejected", "rejected", "rejected");
    program_axolotl_name(columns, set, "field_label", "kto_tag", "label");
    program_axolotl_name(tags, set, "message_field_role", "role_tag", NULL);
    program_axolotl_name(tags, set, "message_field_content", "content_tag", NULL);
    if (mapped && program_names_map(k->p, k->path, mapped, "message_property_mappings",
                                    program_axolotl_properties))
        return -1;
    if (mapped && program_entry_text(mapped, "role"))
        program_axolotl_name(tags, mapped, "role", "role_tag", NULL);
    if (mapped && program_entry_text(mapped, "content"))
        program_axolotl_name(tags, mapped, "content", "content_tag", NULL);
    if (!roles || program_is_null(roles)) return 0;
    if (program_map_wanted(k->p, k->path, roles, "roles") ||
        program_keys_known(k->p, k->path, roles, "roles", program_axolotl_roles))
        return -1;
    for (int64_t i = 1; i < arrlen(roles->items); i += 2)
        if (roles->items[i].shape != PROGRAM_LIST || !program_joined(&roles->items[i]))
            return program_at(k->p, k->path, roles->items[i].line,
                              "%.60s of roles is not a list of words; write [%.60s]",
                              roles->items[i - 1].text, roles->items[i - 1].text);
    cJSON_AddItemToObject(info, "roles", program_json(roles));
    return 0;
}

static int program_axolotl_completion(const program_node *set, cJSON *info) {
    cJSON *columns = cJSON_AddObjectToObject(info, "columns");
    cJSON_AddStringToObject(info, "formatting", "completion");
    program_axolotl_name(columns, set, "field", "prompt", "text");
    return 0;
}

/* The path of the data set: the file in data_files, as given or relative to the folder `path`;
   without data_files, `path` itself. ds_type is not needed, since the file name extension gives
   the format. */
static char *program_axolotl_path(const program_keys *k, const program_node *set) {
    const char *path = program_entry_text(set, "path");
    const program_node *files = program_entry(set, "data_files");
    char *one = files && !program_is_null(files) ? program_joined(files) : NULL;
    if (!path || (one && strchr(one, ','))) {
        program_at(k->p, k->path, set->line,
                   "a data set needs path, and at most one file in data_files; write path: "
                   "FILE, and one data set for each file");
        return NULL;
    }
    if (one && access(one, F_OK) && !access(program_text("%s/%s", path, one), F_OK))
        return program_text("%s/%s", path, one);
    return program_text("%s", one ? one : path);
}

/* Checks one entry of the list and adds its path and its JSON object to sets. chats: set if the
   entry holds conversations. */
static int program_axolotl_set_add(const program_keys *k, program_sets *sets,
                                   const program_node *set, bool *chats) {
    cJSON *info = cJSON_CreateObject();
    if (program_map_wanted(k->p, k->path, set, "a data set") ||
        program_keys_known(k->p, k->path, set, "a data set", program_axolotl_set) ||
        program_axolotl_refused(k, set))
        return -1;
    const char *type = program_entry_text(set, "type");
    char *path = program_axolotl_path(k, set);
    bool completion = type && !strcmp(type, "completion") && !strcmp(k->p->tool, "sft");
    bool chat = type && (!strcmp(type, "chat_template") ||
                         (strcmp(k->p->tool, "sft") && !strcmp(type, "chat_template.default")));
    if (!path) return -1;
    if (!chat && !completion)
        return program_at(
            k->p, k->path,
            program_entry(set, "type") ? program_entry(set, "type")->line : set->line,
            "type is %.60s, but only chat_template%s are supported; write the records as "
            "messages with role and content",
            type ? type : "not there",
            strcmp(k->p->tool, "sft") ? " and chat_template.default" : " and completion");
    if (chat ? program_axolotl_chat(k, set, info) : program_axolotl_completion(set, info))
        return -1;
    *chats |= chat;
    program_set_add(sets, path, info);
    return 0;
}

/* Reads a list of data sets. key: its name in axolotl; option: its name here. */
static int program_axolotl_sets(program_keys *k, const char *key, const char *option,
                                bool *chats) {
    program_key list;
    program_sets sets = {0};
    if (!program_key_take(k, key, &list)) return 0;
    const program_origin origin = {option, k->path, list.line};
    if (list.value.shape != PROGRAM_LIST || !arrlen(list.value.items))
        return program_key_wrong(k, &list,
                                 "%s is not a list of data sets; write - path: FILE and "
                                 "type: chat_template below it",
                                 key);
    for (int64_t i = 0; i < arrlen(list.value.items); i++)
        if (program_axolotl_set_add(k, &sets, &list.value.items[i], chats)) return -1;
    program_sets_said(k->p, &sets, option, &origin);
    return 0;
}

/* ---- the chat template: that of the model, or one given in the yaml file ---- */

/* Conversations always need a chat template, so --apply_chat_template is added for them. */
static int program_axolotl_template(program_keys *k, bool chats) {
    program_key name = {0}, text = {0};
    bool named = program_key_take(k, "chat_template", &name),
         written = program_key_take(k, "chat_template_jinja", &text);
    const char *what = !named            ? "tokenizer_default"
                       : name.value.text ? name.value.text
                                         : "{...}";
    const program_origin origin = {"chat_template", k->path, name.line};
    if (strcmp(what, "tokenizer_default") && !(written && !strcmp(what, "jinja")))
        return program_key_wrong(k, &name,
                                 "chat_template is %.60s, but only tokenizer_default (the "
                                 "template in the model's folder) and jinja (with "
                                 "chat_template_jinja) are supported; give one of them",
                                 what);
    if (!chats) return 0;
    program_said(k->p, "apply_chat_template", "true", &origin);
    if (written)
        program_said(k->p, "tokenizer_chat_template",
                     text.value.text ? text.value.text : "a list", &origin);
    return 0;
}

/* Does this tokenizer.json have the token? Also true if the file is not a valid tokenizer.json;
   later code refuses that. */
static bool program_has_token(const cJSON *json, const char *text) {
    const cJSON *model = cJSON_GetObjectItemCaseSensitive(json, "model"), *token;
    const cJSON *vocab = cJSON_GetObjectItemCaseSensitive(model, "vocab");
    if (!model || cJSON_HasObjectItem(vocab, text)) return true;
    cJSON_ArrayForEach(token, cJSON_GetObjectItemCaseSensitive(json, "added_tokens")) {
        const char *content = cJSON_GetStringValue(
            cJSON_GetObjectItemCaseSensitive(token, "content"));
        if (content && !strcmp(content, text)) return true;
    }
    cJSON_ArrayForEach(token, vocab) { /* a Unigram vocabulary is a list of pairs */
        const char *content = cJSON_GetStringValue(cJSON_GetArrayItem(token, 0));
        if (content && !strcmp(content, text)) return true;
    }
    return false;
}

/* Accepts only pad_token, which changes no result if the tokenizer already has it. Other
   special tokens would change results. */
static int program_axolotl_tokens(program_keys *k) {
    program_key tokens;
    if (!program_key_take(k, "special_tokens", &tokens)) return 0;
    const program_node *pad = program_entry(&tokens.value, "pad_token");
    for (int64_t i = 0; tokens.value.shape == PROGRAM_MAP && i < arrlen(tokens.value.items);
         i += 2)
        if (strcmp(tokens.value.items[i].text, "pad_token"))
            return program_at(
                k->p, k->path, tokens.value.items[i].line,
                "%.60s of special_tokens cannot be set here, as the tokens are those of the "
                "model's folder; write it into tokenizer_config.json there",
                tokens.value.items[i].text);
    if (!pad || pad->shape != PROGRAM_VALUE || program_is_null(pad)) return 0;
    k->p->pad = pad->text;
    k->p->pad_line = pad->line;
    return 0;
}

/* Refuses a pad token that the tokenizer lacks: axolotl would add a row for it to the embedding
   and to the head. */
static int program_axolotl_pad(program *p) {
    const char *model = program_given(p, "pretrain");
    char *path = program_text("%s/tokenizer.json", model ? model : ".");
    size_t size = 0;
    char *bytes = p->pad && model ? demo_read_file(path, &size) : NULL;
    cJSON *json = bytes ? cJSON_ParseWithLength(bytes, size) : NULL;
    free(bytes);
    bool there = !json || program_has_token(json, p->pad);
    cJSON_Delete(json);
    if (!there)
        program_at(p, p->file, p->pad_line,
                   "pad_token %.60s is not in the vocabulary of %.300s, and embeddings are "
                   "never resized; give a token that it has, or leave it out: nothing is "
                   "padded",
                   p->pad, path);
    free(path);
    return there ? 0 : -1;
}

static int program_yaml_of_axolotl(program_keys *k) {
    bool chats = false;
    k->p->from = DEMO_FROM_AXOLOTL;
    if (program_axolotl_tool(k)) return -1;
    if (program_axolotl_sets(k, "datasets", "dataset", &chats))
        program_complain(k->p, "dataset");
    if (program_axolotl_sets(k, "test_datasets", "eval_dataset", &chats))
        program_complain(k->p, "eval_dataset");
    if (program_axolotl_template(k, chats)) program_complain(k->p, "chat_template");
    if (program_axolotl_tokens(k)) program_complain(k->p, NULL);
    program_betas(k);
    program_keys_options(k);
    return 0;
}

#endif
