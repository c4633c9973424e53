/* SPDX-License-Identifier: MIT OR Unlicense */
/* manifest.h - writes and checks the manifest of a checkpoint. manifest.json names the run and
 * the step, and lists each file with its size in bytes and its CRC-32. So a damaged file, or a
 * file of another checkpoint, is found before a run resumes from it. */
#ifndef DEMO_MANIFEST_H
#define DEMO_MANIFEST_H

#include <cjson/cJSON.h>
#include <dirent.h>
#include <errno.h>
#include <sys/stat.h>
#include <zlib.h>
#include "trainer/data/data.h"
#include "trainer/base/files.h"
#include "seqpar_safetensors.h"

#define DEMO_MANIFEST "manifest.json"

typedef struct { /* size and CRC-32 of a file, computed by the rank that wrote it */
    char path[1400];
    int64_t bytes, crc;
} demo_sum;

#ifndef DEMO_SUMMED_BYTES
#define DEMO_SUMMED_BYTES (1 << 20)
#endif
/* Computes size and CRC-32 of a file. False if it cannot be read; errno has the reason. */
static bool demo_file_sum(const char *path, int64_t *bytes, uint32_t *crc) {
    FILE *file = fopen(path, "rb");
    unsigned char *part = (unsigned char *)demo_alloc(DEMO_SUMMED_BYTES, 1);
    size_t got;
    *bytes = 0;
    *crc = (uint32_t)crc32(0, NULL, 0);
    while (file && (got = fread(part, 1, DEMO_SUMMED_BYTES, file)) > 0) {
        *crc = (uint32_t)crc32(*crc, part, (uInt)got);
        *bytes += (int64_t)got;
    }
    bool good = file && !ferror(file);
    int why = errno;
    if (file) fclose(file);
    free(part);
    errno = why;
    return good;
}

/* Size and CRC-32 of a file: from `known` (an stb_ds array) if that lists the path, else
   computed. */
static bool demo_known_sum(const demo_sum *known, const char *path, int64_t *bytes,
                           uint32_t *crc) {
    for (int64_t i = 0; i < arrlen(known); i++)
        if (!strcmp(known[i].path, path)) {
            *bytes = known[i].bytes;
            *crc = (uint32_t)known[i].crc;
            return true;
        }
    return demo_file_sum(path, bytes, crc);
}

/* Adds the files of a folder and its subfolders to the manifest. `below` is the prefix of their
   names. */
static bool demo_manifest_add(cJSON *files, const char *folder, const char *below,
                              const demo_sum *known) {
    DIR *open = opendir(folder);
    bool good = open != NULL;
    for (struct dirent *entry; good && (entry = readdir(open));) {
        char path[1400], name[300], sum[16];
        struct stat kind;
        int64_t bytes;
        uint32_t crc;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        snprintf(name, sizeof name, "%s%.250s", below, entry->d_name);
        if (entry->d_name[0] == '.' || stat(path, &kind)) continue;
        if (S_ISDIR(kind.st_mode)) {
            strcat(name, "/");
            good = demo_manifest_add(files, path, name, known);
            continue;
        }
        good = demo_known_sum(known, path, &bytes, &crc);
        snprintf(sum, sizeof sum, "%08x", crc);
        cJSON *file = cJSON_CreateObject();
        cJSON_AddNumberToObject(file, "bytes", (double)bytes);
        cJSON_AddStringToObject(file, "crc32", sum);
        cJSON_AddItemToObject(files, name, file);
    }
    if (open) closedir(open);
    return good;
}

/* Writes the manifest. All other files must be complete. Files in `known` are not read
   again. */
static seqpar_status demo_manifest_write(const char *folder, const char *run, int64_t step,
                                         const demo_sum *known, seqpar_error *error) {
    char path[1400];
    cJSON *json = cJSON_CreateObject(), *files;
    cJSON_AddStringToObject(json, "run", run);
    cJSON_AddNumberToObject(json, "step", (double)step);
    files = cJSON_AddObjectToObject(json, "files");
    bool good = demo_manifest_add(files, folder, "", known);
    int why = errno;
    char *text = cJSON_Print(json);
    snprintf(path, sizeof path, "%s/" DEMO_MANIFEST, folder);
    seqpar_status status =
        !good  ? seqpar_fail(error, SEQPAR_ERR_FILE_READ,
                             "cannot read what was written to %.300s: %s", folder, strerror(why))
        : text ? seqpar_file_write_atomic(path, text, (int64_t)strlen(text), error)
               : seqpar_fail(error, SEQPAR_ERR_MEMORY, "out of memory for %.300s", path);
    cJSON_free(text);
    cJSON_Delete(json);
    return status;
}

/* Checks size and CRC-32 of one file against its entry in the manifest. */
static seqpar_status demo_manifest_file(const char *folder, const cJSON *file,
                                        seqpar_error *error) {
    const cJSON *bytes = cJSON_GetObjectItemCaseSensitive(file, "bytes");
    const cJSON *sum = cJSON_GetObjectItemCaseSensitive(file, "crc32");
    char path[1400], has[16];
    int64_t length;
    uint32_t crc;
    snprintf(path, sizeof path, "%s/%.250s", folder, file->string);
    if (!cJSON_IsNumber(bytes) || !cJSON_IsString(sum) || strstr(file->string, ".."))
        return seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                           "%.300s/" DEMO_MANIFEST " has no valid entry for %.100s", folder,
                           file->string);
    if (!demo_file_sum(path, &length, &crc))
        return seqpar_fail(error, SEQPAR_ERR_FILE_READ, "%.400s cannot be read: %s", path,
                           strerror(errno));
    snprintf(has, sizeof has, "%08x", crc);
    if ((double)length != bytes->valuedouble)
        return seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                           "%.400s has %lld bytes, its manifest says %.0f", path,
                           (long long)length, bytes->valuedouble);
    if (strcmp(has, sum->valuestring))
        return seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                           "%.400s has the CRC-32 %s, its manifest says %.16s", path, has,
                           sum->valuestring);
    return SEQPAR_OK;
}

/* Reads the manifest of a folder. The caller calls cJSON_Delete. NULL with a message. */
static cJSON *demo_manifest_read(const char *folder, seqpar_error *error) {
    char path[1400];
    const char *why;
    size_t size;
    snprintf(path, sizeof path, "%s/" DEMO_MANIFEST, folder);
    if (access(path, F_OK))
        return seqpar_fail(error, SEQPAR_ERR_FILE_OPEN,
                           "%.400s is missing (0.1.0 wrote none), so the files cannot be "
                           "checked",
                           path),
               (cJSON *)NULL;
    char *text = demo_read_whole(path, 1 << 26, &size, &why);
    cJSON *json = text ? cJSON_Parse(text) : NULL;
    free(text);
    if (cJSON_IsObject(cJSON_GetObjectItemCaseSensitive(json, "files"))) return json;
    seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT, "%.400s lists no files%s%s", path,
                why ? ": " : "", why ? why : "");
    cJSON_Delete(json);
    return NULL;
}

static const cJSON *demo_manifest_entry(const cJSON *json, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(json, "files"),
                                            name);
}

/* Checks size and CRC-32 of every file that the manifest lists. */
static seqpar_status demo_manifest_sums(const cJSON *json, const char *folder,
                                        seqpar_error *error) {
    const cJSON *file;
    seqpar_status status = SEQPAR_OK;
    cJSON_ArrayForEach(file, cJSON_GetObjectItemCaseSensitive(json, "files")) {
        if (!status) status = demo_manifest_file(folder, file, error);
    }
    return status;
}

/* Checks that the manifest belongs to this run and step. A manifest of version 0.2.0 names
   neither and is accepted. */
static seqpar_status demo_manifest_names(const cJSON *json, const char *folder, const char *run,
                                         int64_t step, seqpar_error *error) {
    const cJSON *its = cJSON_GetObjectItemCaseSensitive(json, "run"),
                *of = cJSON_GetObjectItemCaseSensitive(json, "step");
    if (!its && !of) return SEQPAR_OK;
    if (cJSON_IsString(its) && cJSON_IsNumber(of) && !strcmp(its->valuestring, run) &&
        of->valuedouble == (double)step)
        return SEQPAR_OK;
    return seqpar_fail(error, SEQPAR_ERR_FILE_FORMAT,
                       "%.300s/" DEMO_MANIFEST " is of step %g of the run %.16s, its folder of "
                       "step %lld of the run %.16s",
                       folder, cJSON_IsNumber(of) ? of->valuedouble : NAN,
                       cJSON_IsString(its) ? its->valuestring : "?", (long long)step, run);
}
#endif
