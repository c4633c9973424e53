/* SPDX-License-Identifier: MIT OR Unlicense */
/* digest.h - a digest of everything that a token file depends on: the bytes of the data and of
 * the model folder's tokenizer, prepare.py with its modules, and its options. Paths are not
 * included, so moving the files does not change the digest. */
#ifndef PROGRAM_DIGEST_H
#define PROGRAM_DIGEST_H

#include <dirent.h>
#include "program.h"

/* FNV-1a, in which one changed byte always changes the sum. */
static uint64_t program_digest(uint64_t digest, const void *bytes, size_t count) {
    const unsigned char *at = (const unsigned char *)bytes;
    for (size_t i = 0; i < count; i++) digest = (digest ^ at[i]) * UINT64_C(1099511628211);
    return digest;
}

static uint64_t program_digest_text(uint64_t digest, const char *text) {
    return program_digest(digest, text, strlen(text) + 1);
}

/* Adds the file's bytes and their number to the digest. 0, or -1 with a message. */
static int program_digest_file(program *p, uint64_t *digest, const char *path) {
    static char bytes[1 << 16];
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat about;
    const char *refused = file < 0 || fstat(file, &about) ? strerror(errno)
                          : S_ISREG(about.st_mode)        ? NULL
                                                          : "it is no regular file";
    int64_t size = 0;
    ssize_t got = 0;
    while (!refused && (got = read(file, bytes, sizeof bytes)) > 0) {
        *digest = program_digest(*digest, bytes, (size_t)got);
        size += got;
    }
    if (!refused && got < 0) refused = strerror(errno);
    if (file >= 0) close(file);
    *digest = program_digest(*digest, &size, sizeof size);
    if (!refused) return 0;
    return demo_fail(p->error, "%.300s: %s; give data that can be read", path, refused);
}

/* ---- data: files, and folders with files below them ---- */

static bool program_is_data(const char *name) {
    static const char *const endings[] = {".jsonl", ".json", ".gz", ".parquet"};
    size_t length = strlen(name);
    for (int i = 0; i < 4; i++) {
        size_t ending = strlen(endings[i]);
        if (length > ending && !strcmp(name + length - ending, endings[i])) return true;
    }
    return false;
}

static int program_order(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static int program_digest_set(program *p, uint64_t *digest, const char *path, int depth);

/* Adds the data files of a folder, sorted by name, and those of its direct subfolders, which
   hold the splits of a data set. */
static int program_digest_folder(program *p, uint64_t *digest, const char *path, int depth) {
    char **names = NULL;
    struct stat about;
    DIR *folder = opendir(path);
    if (!folder)
        return demo_fail(p->error, "%.300s: %s; give data that can be read", path,
                         strerror(errno));
    for (struct dirent *entry; (entry = readdir(folder));) {
        char *inside = program_text("%s/%s", path, entry->d_name);
        bool below = !depth && entry->d_name[0] != '.' && !stat(inside, &about) &&
                     S_ISDIR(about.st_mode);
        if (below || program_is_data(entry->d_name)) arrput(names, inside);
    }
    closedir(folder);
    if (names) qsort(names, (size_t)arrlen(names), sizeof *names, program_order);
    for (int64_t i = 0; i < arrlen(names); i++)
        if (program_digest_set(p, digest, names[i], depth + 1)) return -1;
    return 0;
}

static int program_digest_set(program *p, uint64_t *digest, const char *path, int depth) {
    struct stat about;
    bool folder = !stat(path, &about) && S_ISDIR(about.st_mode);
    *digest = program_digest_text(*digest, program_base(path));
    return folder ? program_digest_folder(p, digest, path, depth)
                  : program_digest_file(p, digest, path);
}

/* The path of a data set; the prefix of json@FOLDER is removed. */
static const char *program_set_path(const char *name) {
    const char *at = strchr(name, '@');
    return at && access(name, F_OK) ? at + 1 : name;
}

static int program_digest_data(program *p, uint64_t *digest, const char *paths) {
    for (const char *at = paths;; at++) {
        char *one = program_text("%.*s", (int)strcspn(at, ","), at);
        if (program_digest_set(p, digest, program_set_path(one), 0)) return -1;
        at += strlen(one);
        if (!*at) return 0;
    }
}

/* ---- the tokenizer: the files of a model folder that prepare.py reads ---- */

static int program_digest_tokenizer(program *p, uint64_t *digest, const char *folder) {
    static const char *const files[] = {
        "tokenizer.json",      "tokenizer_config.json", "special_tokens_map.json",
        "chat_template.jinja", "chat_template.json",    "generation_config.json",
        "config.json"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char *path = program_text("%s/%s", folder, files[i]);
        *digest = program_digest_text(*digest, files[i]);
        if (!access(path, F_OK) && program_digest_file(p, digest, path)) return -1;
    }
    return 0;
}

/* ---- prepare.py, and its modules in the folder tokens/ next to it ---- */

static int program_is_module(const struct dirent *entry) {
    size_t length = strlen(entry->d_name);
    return entry->d_name[0] != '.' && length > 3 && !strcmp(entry->d_name + length - 3, ".py");
}

/* Adds prepare.py, then the name and bytes of each module, sorted by name. */
static int program_digest_prepare(program *p, uint64_t *digest, const char *path) {
    int beside = (int)(program_base(path) - path);
    char *folder = program_text("%.*stokens", beside, path);
    struct dirent **modules = NULL;
    int failed = program_digest_file(p, digest, path);
    int count = failed ? 0 : scandir(folder, &modules, program_is_module, alphasort);
    if (count < 0)
        return demo_fail(p->error, "%.300s: %s; start seqpar where it was built", folder,
                         strerror(errno));
    for (int i = 0; i < count; i++) {
        char *module = program_text("%s/%s", folder, modules[i]->d_name);
        *digest = program_digest_text(*digest, modules[i]->d_name);
        failed = failed || program_digest_file(p, digest, module);
        free(modules[i]);
    }
    free(modules);
    return failed ? -1 : 0;
}

#endif
