/* SPDX-License-Identifier: MIT OR Unlicense */
/* files.h - reads whole files, and writes files atomically. */
#ifndef DEMO_FILES_H
#define DEMO_FILES_H

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "error.h"

/* Returns why a file cannot be read, or NULL if it can. A pipe is refused: reading would wait
   for its writer, and a resumed run has to read the data again. A device may never end. */
static inline const char *demo_file_refused(int descriptor, size_t most) {
    struct stat about;
    double memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    if (descriptor < 0 || fstat(descriptor, &about)) return strerror(errno);
    if (S_ISDIR(about.st_mode)) return "it is a folder, not a file";
    if (!S_ISREG(about.st_mode))
        return "it is a pipe, socket or device, not a regular file; write its contents to a "
               "file first";
    if ((double)about.st_size > (double)most) return "it is too large for a file of this kind";
    return (double)about.st_size > memory ? "it is larger than this machine's memory; split it"
                                          : NULL;
}

/* Reads a regular file of at most `most` bytes into a zero-terminated buffer, for which the
   caller calls free(). NULL with the reason in *why. */
static inline char *demo_read_whole(const char *path, size_t most, size_t *size,
                                    const char **why) {
    /* without O_NONBLOCK, opening a pipe without a writer blocks */
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    FILE *file = (*why = demo_file_refused(descriptor, most)) ? NULL : fdopen(descriptor, "rb");
    char *bytes = NULL, *larger;
    size_t capacity = 1 << 16, got = 0, part = 1;
    if (!file && descriptor >= 0) close(descriptor);
    while (file && part) {
        if (!(larger = (char *)realloc(bytes, capacity + 1))) {
            *why = "out of memory";
            break;
        }
        bytes = larger;
        got += part = fread(bytes + got, 1, capacity - got, file);
        if (got == capacity) capacity *= 2;
    }
    if (file && ferror(file)) *why = strerror(errno);
    if (file)
        fclose(file);
    else if (!*why)
        *why = strerror(errno);
    if (*why) {
        free(bytes);
        return NULL;
    }
    bytes[got] = 0;
    *size = got;
    return bytes;
}

static inline char *demo_read_file(const char *path, size_t *size) {
    const char *why;
    return demo_read_whole(path, SIZE_MAX, size, &why);
}

/* Opens a file for writing, or for appending. NULL with errno set, also for a pipe without a
 * reader, for which open() would otherwise wait. */
static inline FILE *demo_open_output(const char *path, int append) {
    int descriptor = open(path,
                          O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOCTTY |
                              (append ? O_APPEND : O_TRUNC),
                          0666);
    FILE *file = descriptor < 0 ? NULL : fdopen(descriptor, append ? "ab" : "wb");
    /* writes to a pipe must wait for a slow reader */
    if (file)
        fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) & ~O_NONBLOCK);
    else if (descriptor >= 0)
        close(descriptor);
    return file;
}

/* Flushes stdout. Returns 0, or 1 with one sentence on stderr if output was lost. A pipe closed
   by its reader, such as head, is no failure. */
__attribute__((unused)) static int demo_print_failed(const char *what) {
    if ((!fflush(stdout) && !ferror(stdout)) || errno == EPIPE) return 0;
    return fprintf(stderr, "error: cannot write %s: %s\n", what, strerror(errno)), 1;
}

/* Writes a temporary file in the same folder and renames it, so that `path` never names a
   half-written file. */
static inline int demo_write_atomically(const char *path, const char *bytes, size_t size,
                                        demo_error *error) {
    char temporary[4096];
    struct stat about;
    int length = snprintf(temporary, sizeof temporary, "%s.%ld.tmp", path, (long)getpid());
    if (!stat(path, &about) && !S_ISREG(about.st_mode)) /* rename() would replace a device */
        return demo_fail(
            error, "cannot write %s: it exists and is not a regular file; choose another path",
            path);
    errno = ENAMETOOLONG;
    FILE *file = length < (int)sizeof temporary ? fopen(temporary, "wb") : NULL;
    bool written = file && fwrite(bytes, 1, size, file) == size;
    if (file && fclose(file)) written = false;
    if (written && !rename(temporary, path)) return 0;
    demo_fail(error, "cannot write %s: %s; choose another path or make its folder", path,
              strerror(errno));
    if (file) remove(temporary);
    return -1;
}

#endif
