/* SPDX-License-Identifier: MIT OR Unlicense */
/* sets.h - data sets that are described in LLaMA-Factory's dataset_info.json or in axolotl's
 * list `datasets`. Their paths become --dataset. Their descriptions become a list of JSON
 * objects for demos/prepare.py (--dataset_info). */
#ifndef PROGRAM_SETS_H
#define PROGRAM_SETS_H

#include <cjson/cJSON.h>
#include "keys.h"

typedef struct {
    char *paths; /* comma list; NULL: none yet */
    cJSON *infos;
} program_sets;

static void program_set_add(program_sets *s, const char *path, cJSON *info) {
    if (!s->infos) s->infos = cJSON_CreateArray();
    s->paths = program_text("%s%s%s", s->paths ? s->paths : "", s->paths ? "," : "", path);
    cJSON_AddItemToArray(s->infos, info);
}

/* Adds the options --dataset and --dataset_info for the sets, or --eval_dataset and
   --eval_dataset_info. */
static void program_sets_said(program *p, const program_sets *s, const char *option,
                              const program_origin *origin) {
    char *info = program_text("%sdataset_info", !strncmp(option, "eval_", 5) ? "eval_" : "");
    program_said(p, option, s->paths, origin);
    program_said(p, info, cJSON_PrintUnformatted(s->infos), origin);
}

static bool program_is_listed(const char *const *list, const char *word) {
    for (; *list; list++)
        if (!strcmp(*list, word)) return true;
    return false;
}

/* Joins the words of a list for an error message. */
static char *program_listed(const char *const *list) {
    char *text = program_text("%s", *list);
    while (*++list) text = program_text("%s, %s", text, *list);
    return text;
}

/* Refuses keys of a map that are not in the list. */
static int program_keys_known(program *p, const char *path, const program_node *map,
                              const char *of, const char *const *list) {
    for (int64_t i = 0; i < arrlen(map->items); i += 2)
        if (!program_is_listed(list, map->items[i].text))
            return program_at(p, path, map->items[i].line,
                              "%.100s is not a supported key of %.100s (%s); leave it out",
                              map->items[i].text, of, program_listed(list));
    return 0;
}

static int program_map_wanted(program *p, const char *path, const program_node *node,
                              const char *what) {
    if (node->shape == PROGRAM_MAP) return 0;
    return program_at(p, path, node->line,
                      "%.100s is not a map; write key: value lines below it", what);
}

static cJSON *program_json_value(const program_node *node) {
    double number;
    if (program_is_null(node)) return cJSON_CreateNull();
    if (node->plain && (!strcmp(node->text, "true") || !strcmp(node->text, "false")))
        return cJSON_CreateBool(node->text[0] == 't');
    if (node->plain && demo_read_float(node->text, 0, &number))
        return cJSON_CreateNumber(number);
    return cJSON_CreateString(node->text);
}

/* Converts a yaml tree to JSON. */
static cJSON *program_json(const program_node *node) {
    if (node->shape == PROGRAM_VALUE) return program_json_value(node);
    cJSON *json = node->shape == PROGRAM_LIST ? cJSON_CreateArray() : cJSON_CreateObject();
    for (int64_t i = 0; i < arrlen(node->items); i++)
        if (node->shape == PROGRAM_LIST)
            cJSON_AddItemToArray(json, program_json(&node->items[i]));
        else if (i % 2 == 0)
            cJSON_AddItemToObject(json, node->items[i].text, program_json(&node->items[i + 1]));
    return json;
}

/* Checks that the keys of a map are in the list and that its values are texts or null. */
static int program_names_map(program *p, const char *path, const program_node *map,
                             const char *of, const char *const *list) {
    if (program_map_wanted(p, path, map, of) || program_keys_known(p, path, map, of, list))
        return -1;
    for (int64_t i = 1; i < arrlen(map->items); i += 2)
        if (map->items[i].shape != PROGRAM_VALUE)
            return program_at(p, path, map->items[i].line,
                              "%.100s is not text; write the name of a key of the records",
                              map->items[i - 1].text);
    return 0;
}

#endif
