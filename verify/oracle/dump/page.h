/* SPDX-License-Identifier: MIT OR Unlicense */
/* page.h - a page is one rank's file of a dump: tensors and metadata are added, then saved. */
#ifndef ORACLE_PAGE_H
#define ORACLE_PAGE_H
#include <stdarg.h>
#include "param_ranges.h"

typedef struct page {
    seqpar_safetensors_tensor *tensors; /* (count), allocated: most */
    const void **data;
    int64_t count, most;
    seqpar_safetensors_pair *pairs; /* (metadata), allocated: pairs_most */
    int64_t metadata, pairs_most;
    void **own; /* (owned) memory that is freed with the page, allocated: own_most */
    int64_t owned, own_most;
    int failed; /* no memory */
} page;

static inline void page_free(page *p) {
    for (int64_t i = 0; i < p->count; i++) free((void *)p->tensors[i].name);
    for (int64_t i = 0; i < p->metadata; i++) {
        free((void *)p->pairs[i].key);
        free((void *)p->pairs[i].value);
    }
    for (int64_t i = 0; i < p->owned; i++) free(p->own[i]);
    free(p->tensors);
    free(p->data);
    free(p->pairs);
    free(p->own);
    *p = (page){.count = 0};
}

/* Grows *list if it is full, for one more element of `size` bytes. 0, or -1: no memory. */
static inline int list_grow(void *list, int64_t count, int64_t *most, size_t size) {
    int64_t room = 2 * *most + 32;
    void *old, *more;
    if (count < *most) return 0;
    memcpy(&old, list, sizeof old);
    if (!(more = realloc(old, (size_t)room * size))) return -1;
    memcpy(list, &more, sizeof more);
    *most = room;
    return 0;
}

/* Gives memory to the page, which frees it. NULL says that an allocation has failed, and sets
   p->failed. Returns memory, or NULL. */
static inline void *page_own(page *p, void *memory) {
    if (memory && !list_grow(&p->own, p->owned, &p->own_most, sizeof *p->own))
        return p->own[p->owned++] = memory;
    free(memory);
    p->failed = 1;
    return NULL;
}

/* Adds a key and its value, and copies both. */
static inline void page_note(page *p, const char *key, const char *value) {
    seqpar_safetensors_pair pair = {strdup(key), strdup(value)};
    if (pair.key && pair.value &&
        !list_grow(&p->pairs, p->metadata, &p->pairs_most, sizeof *p->pairs)) {
        p->pairs[p->metadata++] = pair;
        return;
    }
    free((void *)pair.key);
    free((void *)pair.value);
    p->failed = 1;
}

static inline void page_say(page *p, const char *key, const char *format, ...) {
    char text[64];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    page_note(p, key, text);
}

static inline int page_reserve(page *p) {
    int64_t most = 2 * p->most + 32;
    void *tensors, *data;
    if (p->count < p->most) return 0;
    tensors = realloc(p->tensors, (size_t)most * sizeof *p->tensors);
    if (tensors) p->tensors = (seqpar_safetensors_tensor *)tensors;
    data = tensors ? realloc(p->data, (size_t)most * sizeof *p->data) : NULL;
    if (data) p->data = (const void **)data;
    if (data) p->most = most;
    return data ? 0 : -1;
}

/* data is borrowed until the page is saved; shape as in t, whose name is copied */
static inline void page_add(page *p, const seqpar_safetensors_tensor *t, const void *data) {
    char *name = strdup(t->name);
    if (!name || page_reserve(p)) {
        free(name);
        p->failed = 1;
        return;
    }
    p->tensors[p->count] = *t;
    p->tensors[p->count].name = name;
    p->data[p->count++] = data;
}

/* A tensor of a micro-batch: (n) */
static inline void page_row(page *p, int64_t micro, const char *what, const void *data,
                            seqpar_safetensors_dtype dtype, int64_t n) {
    char name[64];
    snprintf(name, sizeof name, "%lld.%s", (long long)micro, what);
    page_add(
        p, &(seqpar_safetensors_tensor){.name = name, .dtype = dtype, .dims = 1, .shape = {n}},
        data);
}

/* 0, or -1 with the error set. */
static inline int page_save(page *p, const char *path, seqpar_error *error) {
    seqpar_safetensors_desc desc = {.path = path,
                                    .tensors = p->tensors,
                                    .count = p->count,
                                    .metadata = p->pairs,
                                    .metadata_count = p->metadata};
    if (p->failed)
        return seqpar_fail(error, SEQPAR_ERR_MEMORY, "%.300s: no memory for it", path), -1;
    return seqpar_safetensors_save(&desc, p->data, error) ? -1 : 0;
}

/* Adds the facts as metadata, without those that are equal to their default. */
static inline void page_facts(page *p, const dump_facts *f) {
    const char *from = (const char *)f;
    page_say(p, "seqpar_dump", "1");
    for (int i = 0; i < WHOLE_FACTS; i++) {
        int64_t x;
        memcpy(&x, from + whole_facts[i].at, sizeof x);
        if (x != whole_facts[i].absent) page_say(p, whole_facts[i].key, "%lld", (long long)x);
    }
    for (int i = 0; i < WORD_FACTS; i++) {
        int64_t x;
        memcpy(&x, from + word_facts[i].at, sizeof x);
        if (x) page_say(p, word_facts[i].key, "%s", word_facts[i].words[x]);
    }
    for (int i = 0; i < NUMBER_FACTS; i++) {
        double x;
        memcpy(&x, from + number_facts[i].at, sizeof x);
        if (x != number_facts[i].absent) page_say(p, number_facts[i].key, "%.17g", x);
    }
}
#endif
