/* SPDX-License-Identifier: MIT OR Unlicense */
/* generated.h - the output file of generate. While the run goes on, texts are appended to
 * OUT.part, one group (all texts of a prompt) at a time. OUT is made from OUT.part when all
 * texts are generated.
 *
 * The first line of OUT.part records the options and inputs of the run; each further line is a
 * text. If a run is killed, OUT.part ends with whole groups and perhaps an incomplete one,
 * which a resumed run truncates. */
#ifndef DEMO_GENERATED_H
#define DEMO_GENERATED_H

#include "trainer/run/job_open.h"

typedef struct {
    const char *path; /* OUT; not owned */
    char part[DEMO_PATH_LIMIT + 8];
    FILE *file;    /* OUT.part, locked while open; NULL: not open */
    off_t begin;   /* offset of the first text */
    int64_t texts; /* texts in the file */
} demo_generated;

/* Closes OUT.part, and removes it if it holds no text. */
static void demo_generated_close(demo_generated *g) {
    if (g->file && !g->texts) unlink(g->part);
    if (g->file) fclose(g->file);
    g->file = NULL;
}

/* ---- the first line ---- */

/* Formats the first line. The caller calls free(). */
static char *demo_generated_header(const demo_note *notes) {
    cJSON *json = cJSON_CreateObject();
    cJSON_AddNumberToObject(json, "seqpar_generate", 1);
    for (int64_t i = 0; i < arrlen(notes); i++)
        cJSON_AddStringToObject(json, notes[i].key, notes[i].value);
    char *text = cJSON_PrintUnformatted(json);
    cJSON_Delete(json);
    return text;
}

/* Compares the first line of the file with the notes of this run. 0, or -1 with a message. */
static int demo_generated_alike(const demo_generated *g, const char *line,
                                const demo_note *notes, demo_error *error) {
    cJSON *json = cJSON_Parse(line);
    int wrong = 0;
    if (!cJSON_HasObjectItem(json, "seqpar_generate"))
        wrong = demo_fail(
            error,
            "%.300s exists and was not written by generate; move it away, or give another "
            "--output_path",
            g->part);
    for (int64_t i = 0; i < arrlen(notes) && !wrong; i++) {
        const cJSON *there = cJSON_GetObjectItemCaseSensitive(json, notes[i].key);
        const char *text = cJSON_IsString(there) ? there->valuestring : "none";
        if (strcmp(text, notes[i].value))
            wrong = demo_fail(
                error,
                "%.300s was started with %s %.64s, but this run has %.64s; use the same to "
                "go on, or remove the file to start again",
                g->part, notes[i].key, text, notes[i].value);
    }
    cJSON_Delete(json);
    return wrong;
}

/* ---- opening: flock locks OUT.part until the process ends ---- */

/* Opens and locks OUT.part. Returns 0; 1 if another process renamed or removed the file in the
   meantime, so the caller tries again; -1 with a message. */
static int demo_generated_take(demo_generated *g, demo_error *error) {
    struct stat held, named;
    int file = open(g->part, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (file < 0 || fstat(file, &held))
        return demo_fail(error, "cannot open %.300s: %s; give another --output_path", g->part,
                         errno == ELOOP ? "it is a link" : strerror(errno));
    const char *wrong = !S_ISREG(held.st_mode)
                            ? "is no regular file; give another --output_path"
                        : flock(file, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK
                            ? "is being written by another run; wait for it, or give another "
                              "--output_path"
                            : NULL;
    if (wrong) {
        close(file);
        return demo_fail(error, "%.300s %s", g->part, wrong);
    }
    if (stat(g->part, &named) || held.st_dev != named.st_dev || held.st_ino != named.st_ino)
        return close(file), 1;
    g->file = fdopen(file, "r+b");
    return 0;
}

static int demo_generated_failed(const demo_generated *g, demo_error *error) {
    return demo_fail(error, "cannot write %.300s: %s; make room and go on with --resume",
                     g->part, strerror(errno));
}

static int demo_generated_begin(demo_generated *g, const demo_note *notes, demo_error *error) {
    char *header = demo_generated_header(notes);
    rewind(g->file);
    bool good = !ftruncate(fileno(g->file), 0) && fprintf(g->file, "%s\n", header) > 0 &&
                !fflush(g->file);
    free(header);
    g->begin = ftello(g->file);
    g->texts = 0;
    return good ? 0 : demo_generated_failed(g, error);
}

/* Counts whole groups of per_prompt texts and truncates the file after them. */
static int demo_generated_count(demo_generated *g, int64_t per_prompt, int64_t most,
                                demo_error *error) {
    char *line = NULL;
    size_t room = 0;
    off_t end = g->begin;
    int64_t lines = 0;
    for (ssize_t got; (got = getline(&line, &room, g->file)) > 0 && line[got - 1] == '\n';)
        if (++lines % per_prompt == 0) end = ftello(g->file);
    free(line);
    g->texts = lines / per_prompt * per_prompt;
    if (g->texts > most)
        return demo_fail(
            error,
            "%.300s holds %lld texts, but this run has %lld in all; remove the file to start "
            "again",
            g->part, (long long)g->texts, (long long)most);
    clearerr(g->file);
    return ftruncate(fileno(g->file), end) || fseeko(g->file, end, SEEK_SET)
               ? demo_generated_failed(g, error)
               : 0;
}

/* Opens OUT.part: a new file, or with `resume` positioned after its last whole group. texts:
   number of texts when the run is complete. */
static int demo_generated_open(demo_generated *g, const char *path, bool resume,
                               const demo_note *notes, int64_t per_prompt, int64_t texts,
                               demo_error *error) {
    char *line = NULL;
    size_t room = 0;
    int again;
    g->path = path;
    snprintf(g->part, sizeof g->part, "%s.part", path);
    while ((again = demo_generated_take(g, error)) > 0) {
    }
    if (again) return -1;
    ssize_t got = getline(&line, &room, g->file);
    bool begun = got > 0 && line[got - 1] == '\n';
    g->begin = ftello(g->file);
    int wrong = begun ? demo_generated_alike(g, line, resume ? notes : NULL, error) : 0;
    free(line);
    if (!wrong && begun)
        wrong = demo_generated_count(g, per_prompt, resume ? texts : INT64_MAX, error);
    if (!wrong && g->texts && !resume)
        wrong = demo_fail(error,
                          "%.300s holds %lld texts of a run that did not end; go on with "
                          "--resume, or remove the file to start again",
                          g->part, (long long)g->texts);
    return wrong || g->texts ? wrong : demo_generated_begin(g, notes, error);
}

/* ---- texts ---- */

/* Adds a reward with enough digits to read back the same number; cJSON may print fewer. */
static void demo_reward_add(cJSON *json, const char *key, double reward) {
    char number[32];
    cJSON_AddRawToObject(json, key, demo_json_number(number, reward));
}

/* Formats a text as a line of JSON. stopped: a stop token ended the text. reward: NaN if there
   is none. The caller calls free(). */
static char *demo_generated_line(const char *input, const char *output, double reward,
                                 bool stopped) {
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "input", input);
    cJSON_AddStringToObject(json, "output", output);
    if (isfinite(reward)) demo_reward_add(json, "reward", reward);
    cJSON_AddBoolToObject(json, "stopped", stopped);
    char *text = cJSON_PrintUnformatted(json);
    cJSON_Delete(json);
    return text;
}

/* Appends `texts` lines, which form whole groups. Each line ends in a newline. */
static int demo_generated_write(demo_generated *g, const char *lines, size_t size,
                                int64_t texts, demo_error *error) {
    if (fwrite(lines, 1, size, g->file) != size || fflush(g->file))
        return demo_generated_failed(g, error);
    g->texts += texts;
    return 0;
}

/* ---- digest of the weights in a folder, which identifies the model ---- */

static int demo_order_of_names(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static bool demo_is_weights(const char *name) {
    const char *end = strrchr(name, '.');
    return !strcmp(name, "config.json") || !strcmp(name, "adapter_config.json") ||
           (end && !strcmp(end, ".safetensors"));
}

static bool demo_visit_weights(const char *folder, const char *name, void *user) {
    char ***names = (char ***)user;
    char path[PATH_MAX];
    if (!demo_is_weights(name)) return true;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    char *kept = (char *)demo_alloc((int64_t)strlen(path) + 1, 1);
    strcpy(kept, path);
    arrput(*names, kept);
    return true;
}

/* Adds the contents of weights and configs in the folder to the digest. The name of the folder
   does not matter. */
static uint64_t demo_digest_folder(uint64_t digest, const char *folder) {
    char **names = NULL;
    demo_each_name(folder, demo_visit_weights, &names);
    if (arrlen(names)) qsort(names, (size_t)arrlen(names), sizeof *names, demo_order_of_names);
    for (int64_t i = 0; i < arrlen(names); i++) {
        int64_t bytes;
        uint32_t crc;
        demo_file_sum(names[i], &bytes, &crc);
        digest = demo_digest_number(demo_digest_number(digest, bytes), crc);
        free(names[i]);
    }
    arrfree(names);
    return digest;
}

/* Digest of a comma list of model folders; list NULL: of no folder. */
static uint64_t demo_digest_folders(const char *list) {
    uint64_t digest = DEMO_DIGEST_EMPTY;
    char folder[DEMO_PATH_LIMIT + 1];
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        snprintf(folder, sizeof folder, "%.*s", (int)strcspn(at, ","), at);
        digest = demo_digest_folder(digest, folder);
    }
    return digest;
}
#endif
