/* SPDX-License-Identifier: MIT OR Unlicense */
/* data_sets.h - reads a comma-separated list of data sets, one after another or mixed at random
 * (mix.h). */
#ifndef DEMO_DATA_SETS_H
#define DEMO_DATA_SETS_H
#include "mix.h"
#include "read_data.h"

typedef struct {
    const char *path, *text;
    size_t length;
    int64_t line;
    const cJSON *json; /* instead of text, if the file is one JSON list */
} demo_line;

typedef struct { /* one data set of the list, a file or a folder */
    char **paths;
    demo_line *lines; /* records of all its files; stb_ds arrays */
    char **bytes;
    cJSON **lists;
} demo_named_set;

static inline void demo_sets_free(demo_named_set *sets) {
    for (int64_t i = 0; i < arrlen(sets); i++) {
        demo_paths_free(sets[i].paths);
        demo_paths_free(sets[i].bytes);
        for (int64_t k = 0; k < arrlen(sets[i].lists); k++) cJSON_Delete(sets[i].lists[k]);
        arrfree(sets[i].lists);
        arrfree(sets[i].lines);
    }
    arrfree(sets);
}

static inline int demo_sets_find(const demo_reader *reader, demo_named_set **sets,
                                 const char *paths) {
    int failed = 0;
    char *list = strdup(paths ? paths : ""), *rest = list;
    for (char *name; !failed && (name = strsep(&rest, ","));) {
        demo_named_set set = {.paths = demo_set_files(name, reader->error)};
        failed = set.paths ? 0 : -1;
        if (set.paths) arrput(*sets, set);
    }
    free(list);
    return failed;
}

static inline int demo_set_list(demo_reader *reader, demo_named_set *set, const char *bytes,
                                size_t size) {
    cJSON *list = demo_json_parse(reader, bytes, size, "a list of objects, or one per line");
    int64_t number = 0;
    if (!list) return -1;
    arrput(set->lists, list);
    for (const cJSON *item = list->child; item; item = item->next)
        arrput(set->lines, ((demo_line){reader->path, NULL, 0, ++number, item}));
    return 0;
}

static inline void demo_set_text(demo_reader *reader, demo_named_set *set, const char *bytes,
                                 size_t size) {
    int64_t number = 0;
    for (const char *at = bytes, *end = bytes + size; at < end;) {
        const char *stop = (const char *)memchr(at, '\n', (size_t)(end - at));
        size_t length = (size_t)((stop ? stop : end) - at);
        number++;
        if (strspn(at, " \t\r") < length)
            arrput(set->lines, ((demo_line){reader->path, at, length, number, NULL}));
        at += length + 1;
    }
}

static inline int demo_set_lines(demo_reader *reader, demo_named_set *set) {
    size_t size = 0, mark = 0;
    char *file = demo_dataset_bytes(reader, false, &mark, &size);
    int64_t before = arrlen(set->lines);
    if (!file) return -1;
    arrput(set->bytes, file);
    bool list = demo_is_list(file + mark);
    if (list && demo_set_list(reader, set, file + mark, size - mark)) return -1;
    if (!list) demo_set_text(reader, set, file + mark, size - mark);
    return list || arrlen(set->lines) > before
               ? 0
               : demo_wrong(reader, "only empty lines; one JSON object per line is needed");
}

/* Reads the records of the sets in the order of mix.h. limit: the largest number of records; 0:
   all. */
static inline int demo_read_mixed(demo_reader *reader, demo_named_set *sets, int64_t limit) {
    int64_t count = arrlen(sets), *there = (int64_t *)demo_alloc(count, sizeof *there), all = 0;
    double *ends = (double *)demo_alloc(count, sizeof *ends);
    const char *probs = reader->options->probs;
    int32_t *order = NULL;
    int failed = probs ? demo_mix_weights(ends, count, probs, reader->error) : 0;
    for (int64_t i = 0; i < count; all += there[i++]) there[i] = arrlen(sets[i].lines);
    if (!limit) limit = all;
    if (!failed)
        order = probs ? demo_mix_drawn(there, count, ends, reader->options->seed, limit)
                      : demo_mix_shared(there, count, limit);
    memset(there, 0, (size_t)count * sizeof *there);
    for (int64_t i = 0; !failed && i < arrlen(order); i++) {
        const demo_line *line = &sets[order[i]].lines[there[order[i]]++];
        reader->path = line->path;
        reader->line = line->line;
        failed = line->json ? demo_take_record(reader, line->json)
                            : demo_read_line(reader, line->text, line->length);
    }
    reader->line = 0;
    arrfree(order);
    free(ends);
    free(there);
    return failed;
}

/* Reads all sets. A .txt is a stream without records, so sets with a .txt are not mixed but
   read one after another. */
static inline int demo_read_sets(demo_reader *reader, demo_named_set *sets) {
    int64_t streams = 0;
    int failed = 0;
    for (int64_t i = 0; i < arrlen(sets); i++)
        for (int64_t k = 0; k < arrlen(sets[i].paths); k++)
            streams += demo_ends_with(sets[i].paths[k], ".txt");
    bool mixes = !streams && (arrlen(sets) > 1 || reader->options->probs);
    if (streams && reader->options->probs)
        return demo_fail(
            reader->error,
            "plain text has no records to sample by weight; leave the weights out");
    for (int64_t i = 0; !failed && i < arrlen(sets); i++)
        for (int64_t k = 0; !failed && k < arrlen(sets[i].paths); k++) {
            if (!mixes && demo_reader_full(reader)) return 0;
            reader->path = sets[i].paths[k];
            failed = mixes ? demo_set_lines(reader, &sets[i]) : demo_read_dataset_file(reader);
        }
    return failed || !mixes ? failed
                            : demo_read_mixed(reader, sets, reader->options->max_samples);
}

/* Reads a comma-separated list of files and folders. */
static inline int demo_read_dataset(demo_reader *reader, const char *paths) {
    const char *form = reader->options->input_template;
    demo_named_set *sets = NULL;
    if (form && !strstr(form, "{}"))
        return demo_fail(reader->error,
                         "input_template must have {} once, in the place of "
                         "the prompt, but has none: %s",
                         form);
    if (form && strstr(strstr(form, "{}") + 2, "{}"))
        return demo_fail(reader->error,
                         "input_template must have {} once, in the place of the prompt, but "
                         "has it twice: %s",
                         form);
    if (demo_token_file_among(paths, reader->error)) return -1;
    int failed = demo_sets_find(reader, &sets, paths) || demo_read_sets(reader, sets) ? -1 : 0;
    demo_sets_free(sets);
    return failed;
}
#endif
