/* SPDX-License-Identifier: MIT OR Unlicense */
/* kill_at - a library to preload: the program dies by SIGKILL just before its KILL_AT-th call
 * that changes a folder or makes a file last. Without KILL_AT it says at the end, on stderr,
 * how many such calls there were. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_int calls;

static void count(void) {
    const char *at = getenv("KILL_AT");
    if (atomic_fetch_add(&calls, 1) + 1 == (at ? atoi(at) : -1)) raise(SIGKILL);
}

__attribute__((destructor)) static void say(void) {
    if (!getenv("KILL_AT")) fprintf(stderr, "kill_at: %d calls\n", atomic_load(&calls));
}

#define REAL(name, ...) ((int (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))
int rename(const char *from, const char *to) {
    return count(), REAL("rename", const char *, const char *)(from, to);
}

int unlink(const char *path) { return count(), REAL("unlink", const char *)(path); }
int rmdir(const char *path) { return count(), REAL("rmdir", const char *)(path); }
int mkdir(const char *path, mode_t mode) {
    return count(), REAL("mkdir", const char *, mode_t)(path, mode);
}

int fsync(int file) { return count(), REAL("fsync", int)(file); }
int ftruncate(int file, off_t size) {
    return count(), REAL("ftruncate", int, off_t)(file, size);
}

int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;
    va_end(more);
    if (flags & O_CREAT) count();
    return REAL("open", const char *, int, ...)(path, flags, mode);
}
