/* SPDX-License-Identifier: MIT OR Unlicense */
/* Tests of what the trainers stand on, in a table: each ends at the first thing that is
   wrong. They may work in a folder of their own, and read real data where SEQPAR_DATA has
   it. */
#ifndef TRAINER_CASES_H
#define TRAINER_CASES_H
#include <dirent.h>
#include "trainer/base/files.h"
#include "test.h"

static char scratch[256]; /* a directory of our own, removed at the end */
static demo_error message;

#define EXPECT(condition) \
    do { \
        if (!(condition)) \
            return test_expect(0, "%d: %s   (last message: %s)", __LINE__, #condition, \
                               message.text), \
                   false; \
    } while (0)
#define EXPECT_TEXT(got, want) \
    do { \
        if (strcmp((got), (want))) \
            return test_expect(0, "%d: got \"%.340s\", want \"%.340s\"", __LINE__, (got), \
                               (want)), \
                   false; \
    } while (0)

__attribute__((unused)) static bool holds(const char *text, const char *part) {
    return strstr(text, part) != NULL;
}

__attribute__((unused)) static const char *in_scratch(const char *name) {
    static char paths[4][512];
    static int turn;
    char *path = paths[turn++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", scratch, name);
    return path;
}

__attribute__((unused)) static const char *make_file_sized(const char *name, const char *bytes,
                                                           size_t size) {
    const char *path = in_scratch(name);
    demo_error error;
    if (demo_write_atomically(path, bytes, size, &error)) printf("# %s\n", error.text);
    return path;
}

__attribute__((unused)) static const char *make_file(const char *name, const char *text) {
    return make_file_sized(name, text, strlen(text));
}

/* A file of real data; NULL: it is not there. */
__attribute__((unused)) static const char *real_path(const char *name) {
    static char path[1024];
    const char *folder = getenv("SEQPAR_DATA");
    snprintf(path, sizeof path, "%s/%s", folder ? folder : "../shared/data", name);
    return access(path, R_OK) ? NULL : path;
}

typedef struct trainer_case {
    const char *name;
    bool (*run)(void);
    const char *file; /* of real data, without which the test does not run */
} trainer_case;
#define CASE(name) \
    { #name, name, NULL }
#define CASE_ON(name, file) \
    { #name, name, file }

static void remove_scratch(void) {
    DIR *folder = opendir(scratch);
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        if (entry->d_name[0] != '.') remove(in_scratch(entry->d_name));
    if (folder) closedir(folder);
    if (rmdir(scratch)) printf("# left behind: %s\n", scratch);
}

static void trainer_case_run(const trainer_case *c) {
    char why[300];
    if (!test_wanted(c->name, 0)) return;
    snprintf(why, sizeof why, "SEQPAR_DATA has no %s", c->file ? c->file : "");
    if (c->file && !real_path(c->file)) return test_skip(c->name, why);
    message.text[0] = 0;
    test_expect(c->run(), "it returns false");
    test_end("%s", c->name);
}

static void trainer_cases(const trainer_case *cases, size_t count) {
    const char *temporary = getenv("TMPDIR");
    snprintf(scratch, sizeof scratch, "%s/trainer-XXXXXX", temporary ? temporary : P_tmpdir);
    if (!mkdtemp(scratch)) {
        fprintf(stderr, "cannot make %s; set TMPDIR to a writable folder\n", scratch);
        exit(2);
    }
    for (size_t i = 0; i < count; i++) trainer_case_run(&cases[i]);
    remove_scratch();
}
#endif
