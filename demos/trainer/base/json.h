/* SPDX-License-Identifier: MIT OR Unlicense */
/* json.h - finds duplicate keys, for which cJSON does not check. */
#ifndef DEMO_JSON_H
#define DEMO_JSON_H

#include <stdlib.h>
#include <string.h>
#include <cjson/cJSON.h>
#include "memory.h"

static inline int demo_order_of_keys(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Returns a key that occurs twice in an object, or in an object inside it; NULL: none does.
   cJSON would ignore one of the two values. */
static inline const char *demo_json_twice(const cJSON *json) {
    const char **keys = NULL, *twice = NULL;
    for (const cJSON *item = json->child; item && !twice; item = item->next) {
        if (cJSON_IsObject(json)) arrput(keys, item->string);
        if (item->child) twice = demo_json_twice(item);
    }
    if (arrlen(keys) > 1) qsort(keys, (size_t)arrlen(keys), sizeof *keys, demo_order_of_keys);
    for (int64_t i = 1; i < arrlen(keys) && !twice; i++)
        if (!strcmp(keys[i - 1], keys[i])) twice = keys[i];
    arrfree(keys);
    return twice;
}

#endif
