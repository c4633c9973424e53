/* SPDX-License-Identifier: MIT OR Unlicense */
/* locked.h - mutexes that abort if the library misuses them, and a pthread_create of which any
   one call can fail. Include before the library's implementation. */
#ifndef TEST_LOCKED_H
#define TEST_LOCKED_H
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* refused: number of the thread that cannot be started */
static int64_t threads_made, thread_refused;

static int lock_checked(int code, const char *what) {
    if (!code) return 0;
    fprintf(stderr, "FAIL locks: %s: %s\n", what, strerror(code));
    abort();
}

static int lock_made(pthread_mutex_t *lock) {
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_ERRORCHECK);
    lock_checked(pthread_mutex_init(lock, &kind), "a lock begins");
    return pthread_mutexattr_destroy(&kind);
}

/* As pthread_create, but for the one that is refused. */
static int thread_started(pthread_t *thread, void *(*main)(void *), void *user) {
    int64_t number = __atomic_add_fetch(&threads_made, 1, __ATOMIC_SEQ_CST);
    return number == thread_refused ? EAGAIN : pthread_create(thread, NULL, main, user);
}
#define pthread_mutex_init(lock, kind)     lock_made(lock)
#define pthread_mutex_lock(lock)           lock_checked(pthread_mutex_lock(lock), "lock")
#define pthread_mutex_unlock(lock)         lock_checked(pthread_mutex_unlock(lock), "unlock")
#define pthread_mutex_destroy(lock)        lock_checked(pthread_mutex_destroy(lock), "a lock ends")
#define pthread_cond_wait(wake, lock)      lock_checked(pthread_cond_wait(wake, lock), "wait")
#define pthread_join(thread, result)       lock_checked(pthread_join(thread, result), "join")
#define pthread_create(thread, kind, f, u) thread_started(thread, f, u)
#endif
