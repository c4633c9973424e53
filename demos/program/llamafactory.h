/* SPDX-License-Identifier: MIT OR Unlicense */
/* llamafactory.h - LLaMA-Factory 0.9.5: its yaml files, its data sets named in
 * dataset_info.json, and options whose meaning differs from that here. */
#ifndef PROGRAM_LLAMAFACTORY_H
#define PROGRAM_LLAMAFACTORY_H

#include "sets.h"
#include "stage.h"

/* ---- templates by name: demos/prepare.py writes them ---- */

static const char *const program_templates[] = {"llama3", "qwen",   "mistral",
                                                "zephyr", "chatml", NULL};

static int program_template_check(program *p) {
    const char *name = program_given(p, "template");
    if (!name || program_is_listed(program_templates, name)) return 0;
    demo_fail(
        p->error,
        "--template is %.100s, but the built-in templates are %s; give one of them, or make "
        "a token file with the template of the model's folder: demos/prepare.py "
        "--apply_chat_template --train_on assistant",
        name, program_listed(program_templates));
    return program_error_placed(p);
}

/* ---- dataset_info.json ---- */

static const char *const program_info_keys[] = {
    "file_name",   "file_sha1", "hf_hub_url", "ms_hub_url", "om_hub_url",
    "formatting",  "ranking",   "subset",     "split",      "folder",
    "num_samples", "columns",   "tags",       NULL};
static const char *const program_info_columns[] = {
    "prompt", "query",  "response", "history", "messages", "system",  "tools",
    "images", "videos", "audios",   "chosen",  "rejected", "kto_tag", NULL};
static const char *const program_info_tags[] = {
    "role_tag",        "content_tag",  "user_tag",   "assistant_tag",
    "observation_tag", "function_tag", "system_tag", NULL};

typedef struct {
    program *p;
    char *path; /* of dataset_info.json */
    const char *folder;
    program_node root;
} program_infos;

static int program_info_wrong(const program_infos *in, const program_node *node,
                              const char *sentence, const char *name) {
    return program_at(in->p, in->path, node->line, sentence, name);
}

/* Refuses keys whose value would change which data is read. */
static int program_info_refused(const program_infos *in, const program_node *set,
                                const char *name) {
    static const struct {
        const char *key, *harmless, *fix;
    } refused[] = {
        {"subset", "default", "write the subset into a file and give that as file_name"},
        {"split", "train", "write the split into a file and give that as file_name"},
        {"folder", ".", "give the folder itself by --local_names, or as file_name"},
        {"num_samples", "",
         "it would draw other records at random in every run; give max_samples, or write the "
         "records into a file"}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const char *text = program_entry_text(set, refused[i].key);
        if (text && strcmp(text, refused[i].harmless))
            return program_at(in->p, in->path, program_entry(set, refused[i].key)->line,
                              "%s of %.100s is %.100s, which is not supported: %s",
                              refused[i].key, name, text, refused[i].fix);
    }
    return 0;
}

/* Refuses unknown names in columns and tags, and columns of images, videos or audio. */
static int program_info_columns_check(const program_infos *in, const program_node *set) {
    static const char *const media[] = {"images", "videos", "audios"};
    const program_node *columns = program_entry(set, "columns"),
                       *tags = program_entry(set, "tags");
    if (columns && program_names_map(in->p, in->path, columns, "columns", program_info_columns))
        return -1;
    if (tags && program_names_map(in->p, in->path, tags, "tags", program_info_tags)) return -1;
    for (int i = 0; columns && i < 3; i++)
        if (program_entry_text(columns, media[i]))
            return program_info_wrong(in, program_entry(columns, media[i]),
                                      "%s are not text, and only text is supported; leave "
                                      "this data set out",
                                      media[i]);
    return 0;
}

/* Checks that stages dpo and rm get pairs, and that the others get records of one answer. */
static int program_info_suits(const program_infos *in, const program_node *set,
                              const char *name) {
    const char *formatting = program_entry_text(set, "formatting");
    const char *ranking = program_entry_text(set, "ranking");
    bool pairs = !strcmp(in->p->tool, "dpo") || !strcmp(in->p->tool, "rm"),
         ranks = ranking && demo_truth(ranking) == 1;
    if (formatting && strcmp(formatting, "alpaca") && strcmp(formatting, "sharegpt") &&
        strcmp(formatting, "openai"))
        return program_info_wrong(in, program_entry(set, "formatting"),
                                  "formatting is %.100s, but only alpaca and sharegpt are "
                                  "supported; give one of them",
                                  formatting);
    if (pairs != ranks)
        return program_at(in->p, in->path, set->line,
                          "%.100s has %s\"ranking\": true, but stage %s trains on %s; name "
                          "another data set",
                          name, ranks ? "" : "no ", in->p->tool,
                          pairs ? "pairs" : "single responses");
    return 0;
}

/* The path of a data set: file_name in the folder, or a name on a hub, which --local_names maps
   to a path later. NULL with a message. */
static char *program_info_path(const program_infos *in, const program_node *set,
                               const char *name) {
    static const char *const hubs[] = {"hf_hub_url", "ms_hub_url", "om_hub_url"};
    for (int i = 0; i < 3; i++)
        if (program_entry_text(set, hubs[i]))
            return program_text("%s", program_entry_text(set, hubs[i]));
    const char *file = program_entry_text(set, "file_name");
    if (!file) {
        program_info_wrong(
            in, set, "%.100s has neither file_name nor hf_hub_url; write \"file_name\"", name);
        return NULL;
    }
    char *path = *file == '/' ? program_text("%s", file)
                              : program_text("%s/%s", in->folder, file);
    if (!access(path, F_OK)) return path;
    program_at(in->p, in->path, program_entry(set, "file_name")->line,
               "file_name of %.100s is %.300s, but there is no %.300s; correct it", name, file,
               path);
    return NULL;
}

/* The JSON object that describes the data set to prepare.py. */
static cJSON *program_info_json(const program_infos *in, const program_node *set) {
    static const char *const told[] = {"formatting", "columns", "tags"};
    cJSON *json = cJSON_CreateObject();
    const char *most = program_given(in->p, "max_samples");
    const char *packing = program_given(in->p, "packing_samples");
    for (int i = 0; i < 3; i++)
        if (program_entry(set, told[i]))
            cJSON_AddItemToObject(json, told[i], program_json(program_entry(set, told[i])));
    if (most) cJSON_AddNumberToObject(json, "max_samples", strtod(most, NULL));
    if (program_find(in->p, "pretrain_mode") >= 0 && !(packing && demo_truth(packing) == 0))
        cJSON_AddBoolToObject(json, "blocks", true);
    return json;
}

/* The names of all data sets, for an error message. */
static char *program_info_names(const program_infos *in) {
    char *text = program_text("nothing");
    for (int64_t i = 0; i < arrlen(in->root.items) && i < 40; i += 2)
        text = program_text("%s%s%s", i ? text : "", i ? ", " : "", in->root.items[i].text);
    return text;
}

/* Looks one data set up by its name, checks it, and adds its path and its JSON object to
   sets. */
static int program_info_add(const program_infos *in, program_sets *sets, const char *option,
                            const char *name) {
    const program_node *set = program_entry(&in->root, name);
    if (!set) {
        demo_fail(
            in->p->error,
            "--%s %.200s is not in %.300s, which has %.1000s; correct the name, or add it "
            "there",
            option, name, in->path, program_info_names(in));
        return program_error_placed(in->p);
    }
    char *of = program_text("%s", name), *path;
    if (program_map_wanted(in->p, in->path, set, name) ||
        program_keys_known(in->p, in->path, set, of, program_info_keys) ||
        program_info_refused(in, set, name) || program_info_columns_check(in, set) ||
        program_info_suits(in, set, name) || !(path = program_info_path(in, set, name)))
        return -1;
    program_set_add(sets, path, program_info_json(in, set));
    return 0;
}

/* Copies a name without the blanks around it. */
static char *program_word(const char *begin, size_t length) {
    while (length && *begin == ' ') begin++, length--;
    while (length && begin[length - 1] == ' ') length--;
    return program_text("%.*s", (int)length, begin);
}

/* Replaces the set names of one option by paths. */
static int program_info_option(program_infos *in, const char *option) {
    program_sets sets = {0};
    int i = program_find(in->p, option);
    const char *names = program_given(in->p, option);
    if (!names) return 0;
    for (const char *at = names;; at++) {
        size_t length = strcspn(at, ",");
        if (program_info_add(in, &sets, option, program_word(at, length))) return -1;
        at += length;
        if (!*at) break;
    }
    const program_origin *there = program_origin_of(in->p, option);
    program_origin origin = there ? *there : (program_origin){option, in->path, 0};
    program_drop(in->p, i);
    program_sets_said(in->p, &sets, option, &origin);
    return 0;
}

static void program_drop_all(program *p, const char *name) {
    for (int i; (i = program_find(p, name)) >= 0;) program_drop(p, i);
}

/* Requires a template, since conversations in dataset_info.json have none. */
static int program_template_wanted(program *p) {
    if (program_given(p, "template") || program_find(p, "pretrain_mode") >= 0) return 0;
    return demo_fail(p->error,
                     "data sets of dataset_info.json need a template; give that of the "
                     "model, one of %s",
                     program_listed(program_templates));
}

/* Are the data sets named in dataset_info.json? Yes if dataset_dir or a yaml file gives them,
   or if the name is no path and the folder has a dataset_info.json. */
static bool program_has_infos(const program *p, const char *folder) {
    const char *data = program_given(p, "dataset");
    return program_given(p, "dataset_dir") ||
           (data && access(data, F_OK) && !strchr(data, '/') &&
            !access(program_text("%s/dataset_info.json", folder), F_OK)) ||
           program_origin_of(p, "dataset");
}

/* Replaces the names of dataset and eval_dataset by paths, as dataset_info.json says. */
static int program_sets_of_llamafactory(program *p) {
    const char *folder = program_given(p, "dataset_dir");
    program_infos in = {.p = p, .folder = folder ? program_text("%s", folder) : "data"};
    if (!program_has_infos(p, in.folder)) return 0;
    in.path = program_text("%s/dataset_info.json", in.folder);
    program_drop_all(p, "dataset_dir");
    if (access(in.path, F_OK))
        return demo_fail(
            p->error, "%.300s: %s; data sets are named there, give its folder as dataset_dir",
            in.path, strerror(errno));
    if (program_yaml_read(p, in.path, &in.root) || program_info_option(&in, "dataset") ||
        program_info_option(&in, "eval_dataset"))
        return -1;
    /* max_samples limits each data set and is in its JSON object */
    program_drop_all(p, "max_samples");
    return program_template_wanted(p);
}

/* ---- options with another meaning in LLaMA-Factory ---- */

/* With packing, LLaMA-Factory limits documents to cutoff_len - 1 tokens. Plain text is already
   cut into blocks, so packing is dropped for it. */
static void program_packing_of_llamafactory(program *p) {
    const char *packing = program_given(p, "packing_samples"), *most;
    bool on = packing && demo_truth(packing) == 1;
    int64_t length = 2048;
    most = program_given(p, "max_len");
    if (on && (!most || demo_read_int(most, &length))) {
        program_drop_all(p, "max_len");
        program_add(p, "cutoff_len", program_text("%lld", (long long)length - 1));
        fprintf(stderr,
                "notice: with packing, documents have at most cutoff_len - 1 = %lld tokens, "
                "as in LLaMA-Factory\n",
                (long long)length - 1);
    }
    if (program_find(p, "pretrain_mode") >= 0) program_drop_all(p, "packing_samples");
}

static void program_llamafactory(program *p) {
    if (program_template_check(p)) program_complain(p, "template");
    if (program_sets_of_llamafactory(p)) {
        program_complain(p, "dataset");
        program_drop_all(p, "dataset"), program_drop_all(p, "eval_dataset");
    }
    program_packing_of_llamafactory(p);
}

/* ---- LLaMA-Factory's yaml files ---- */

/* Sets the default of LLaMA-Factory: without finetuning_type it trains LoRA adapters. */
static void program_finetuning(program_keys *k) {
    if (!program_key_find(k, "finetuning_type"))
        program_key_override(k, "finetuning_type", "lora");
}

static int program_yaml_of_llamafactory(program_keys *k) {
    program_key stage;
    if (program_key_take(k, "stage", &stage)) {
        const program_origin origin = {"stage", k->path, stage.line};
        program_said(k->p, "stage", stage.value.text ? stage.value.text : "a list", &origin);
    }
    if (program_stage(k->p)) return program_error_placed(k->p);
    program_betas(k);
    program_finetuning(k);
    program_keys_options(k);
    return 0;
}

#endif
