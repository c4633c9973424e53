/* SPDX-License-Identifier: MIT OR Unlicense */
/* mix.h - mixes the records of several data sets, by the same rule as demos/prepare.py. With
 * weights, the set of each record is drawn at random, until a set is drawn that has no records
 * left. Without weights, the sets follow one another; if max_samples is less than the number of
 * records, the same fraction of each set is used, from its beginning. */
#ifndef DEMO_MIX_H
#define DEMO_MIX_H

#include <dirent.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "trainer/base/error.h"
#include "trainer/base/memory.h"

/* ---- numbers in [0, 1) as Python's random.Random(seed).random() draws them: MT19937 ---- */

enum { DEMO_MT_WORDS = 624 };
typedef struct {
    uint32_t word[DEMO_MT_WORDS];
    int at;
} demo_twister;

/* Seeds the generator as Python does, by MT19937's init_by_array. */
static inline void demo_twister_begin(demo_twister *t, uint64_t seed) {
    const uint32_t key[] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t *w = t->word, i = 1, n = DEMO_MT_WORDS, keys = key[1] ? 2 : 1;
    w[0] = 19650218u;
    for (uint32_t k = 1; k < n; k++) w[k] = 1812433253u * (w[k - 1] ^ w[k - 1] >> 30) + k;
    for (uint32_t k = 0; k < n; k++) {
        w[i] = (w[i] ^ (w[i - 1] ^ w[i - 1] >> 30) * 1664525u) + key[k % keys] + k % keys;
        if (++i == n) w[0] = w[n - 1], i = 1;
    }
    for (uint32_t k = 1; k < n; k++) {
        w[i] = (w[i] ^ (w[i - 1] ^ w[i - 1] >> 30) * 1566083941u) - i;
        if (++i == n) w[0] = w[n - 1], i = 1;
    }
    w[0] = 0x80000000u;
    t->at = DEMO_MT_WORDS;
}

/* Returns the next 32-bit output of MT19937. */
static inline uint32_t demo_twister_word(demo_twister *t) {
    if (t->at == DEMO_MT_WORDS) {
        for (int i = 0; i < DEMO_MT_WORDS; i++) {
            uint32_t y = (t->word[i] & 0x80000000u) |
                         (t->word[(i + 1) % DEMO_MT_WORDS] & 0x7fffffffu);
            t->word[i] = t->word[(i + 397) % DEMO_MT_WORDS] ^ y >> 1 ^
                         (y & 1 ? 0x9908b0dfu : 0);
        }
        t->at = 0;
    }
    uint32_t y = t->word[t->at++];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    return y ^ y >> 18;
}

static inline double demo_twister_number(demo_twister *t) {
    uint32_t a = demo_twister_word(t) >> 5, b = demo_twister_word(t) >> 6;
    return ((double)a * 67108864.0 + (double)b) / 9007199254740992.0;
}

/* ---- choosing the records ---- */

/* Reads weights such as "0.1,0.9" into `count` running sums. Returns 0, or -1 with the error
   set. */
static inline int demo_mix_weights(double *ends, int64_t count, const char *text,
                                   demo_error *error) {
    int64_t found = 0;
    double all = 0;
    char *end = (char *)text;
    for (const char *at = text; end && *at; at = *end == ',' ? end + 1 : end) {
        double weight = strtod(at, &end);
        if (end == at || (*end && *end != ',') || !(weight >= 0 && weight < HUGE_VAL))
            return demo_fail(
                error,
                "the weights of the data sets are %.100s, but must be a comma list "
                "of numbers of at least 0",
                text);
        all += weight;
        if (found < count) ends[found] = all;
        found++;
    }
    if (found != count)
        return demo_fail(error, "%lld weights (%.100s) for %lld data sets; give one for each",
                         (long long)found, text, (long long)count);
    if (!(all > 0))
        return demo_fail(error, "the weights of the data sets are all 0; give at least one "
                                "above 0");
    return 0;
}

/* Draws the set of each record until there are `limit` records or the drawn set has none left.
   Returns the indices of the sets, in order, as an stb_ds array. there (sets): the number of
   records of each set. */
static inline int32_t *demo_mix_drawn(const int64_t *there, int64_t sets, const double *ends,
                                      int64_t seed, int64_t limit) {
    int64_t *used = (int64_t *)demo_alloc(sets, sizeof *used);
    int32_t *order = NULL;
    demo_twister draw;
    demo_twister_begin(&draw, (uint64_t)seed);
    while (arrlen(order) < limit) {
        double at = demo_twister_number(&draw) * ends[sets - 1];
        int32_t set = 0;
        while (set + 1 < sets && ends[set] <= at) set++;
        if (used[set]++ == there[set]) break;
        arrput(order, set);
    }
    free(used);
    return order;
}

/* Without weights: takes the same fraction of every set, `limit` records in all, one set after
   another. */
static inline int32_t *demo_mix_shared(const int64_t *there, int64_t sets, int64_t limit) {
    int64_t all = 0, past = 0;
    int32_t *order = NULL;
    for (int64_t i = 0; i < sets; i++) all += there[i];
    if (limit > all) limit = all;
    for (int64_t i = 0; i < sets; past += there[i++]) {
        int64_t share = all ? limit * (past + there[i]) / all - limit * past / all : 0;
        for (int64_t k = 0; k < share; k++) arrput(order, (int32_t)i);
    }
    return order;
}

/* ---- the files of a set ---- */

static inline bool demo_name_ends(const char *name, const char *ending) {
    size_t a = strlen(name), b = strlen(ending);
    return a >= b && !strcmp(name + a - b, ending);
}

static inline bool demo_data_name(const char *name) {
    static const char *const ends[] = {".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet"};
    bool is = false;
    for (int i = 0; i < 5; i++) is |= demo_name_ends(name, ends[i]);
    return is;
}

static inline bool demo_is_letter(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static inline int demo_path_order(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static inline bool demo_is_data_folder(const char *path) {
    struct stat kind;
    return !stat(path, &kind) && S_ISDIR(kind.st_mode);
}

/* Appends the folder's entries whose names `wanted` accepts to *paths (stb_ds), sorted. */
static inline void demo_folder_names(char ***paths, const char *folder,
                                     bool (*wanted)(const char *name)) {
    int64_t first = arrlen(*paths);
    DIR *open = opendir(folder);
    for (struct dirent *entry; open && (entry = readdir(open));) {
        size_t size = strlen(folder) + strlen(entry->d_name) + 2;
        if (!wanted(entry->d_name)) continue;
        char *path = (char *)demo_alloc((int64_t)size, 1);
        snprintf(path, size, "%s/%s", folder, entry->d_name);
        arrput(*paths, path);
    }
    if (open) closedir(open);
    if (arrlen(*paths) > first)
        qsort(*paths + first, (size_t)(arrlen(*paths) - first), sizeof **paths,
              demo_path_order);
}

/* Is it a file of the train split, such as train.jsonl or train-00000-of-00002.json? */
static inline bool demo_is_train_name(const char *name) {
    return demo_data_name(name) && !strncmp(name, "train", 5) && !demo_is_letter(name[5]);
}

static inline bool demo_is_other_split(const char *name) {
    return !strncmp(name, "test", 4) || !strncmp(name, "valid", 5) ||
           !strncmp(name, "dev", 3) || !strncmp(name, "eval", 4);
}

static inline void demo_paths_free(char **paths) {
    for (int64_t i = 0; i < arrlen(paths); i++) free(paths[i]);
    arrfree(paths);
}

/* The files of a folder's train split, as demos/prepare.py finds them. If no file is named
   after a split, all data files of the folder are the train split. */
static inline char **demo_folder_files(const char *folder) {
    char **paths = NULL, **others = NULL, inside[4352];
    demo_folder_names(&paths, folder, demo_is_train_name);
    snprintf(inside, sizeof inside, "%s/train", folder);
    demo_folder_names(&paths, inside, demo_data_name);
    demo_folder_names(&others, folder, demo_is_other_split);
    if (!arrlen(paths) && !arrlen(others)) demo_folder_names(&paths, folder, demo_data_name);
    demo_paths_free(others);
    return paths;
}

/* Returns the files of FILE, FOLDER or json@FOLDER as an stb_ds array; NULL: the error is
   set. */
static inline char **demo_set_files(const char *name, demo_error *error) {
    const char *at = strchr(name, '@');
    char **paths = NULL;
    if (at && strncmp(name, "json@", 5)) {
        demo_fail(error,
                  "%.300s: only json@FOLDER can be read directly; demos/prepare.py also "
                  "reads parquet@FOLDER",
                  name);
        return NULL;
    }
    const char *path = at ? at + 1 : name;
    if (demo_is_data_folder(path)) {
        if (!(paths = demo_folder_files(path)))
            demo_fail(error,
                      "%.300s has no data of a train split (train.jsonl, train-*.jsonl, "
                      "train/*.jsonl); name the file",
                      path);
        return paths;
    }
    char *own = (char *)demo_alloc((int64_t)strlen(path) + 1, 1);
    strcpy(own, path);
    arrput(paths, own);
    return paths;
}
#endif
