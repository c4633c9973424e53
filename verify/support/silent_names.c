/* SPDX-License-Identifier: MIT OR Unlicense */
/* A library to preload: getaddrinfo hangs for silent.host, as with a name server that does not
   answer, and fails for unknown.host. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
#include <unistd.h>

int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                struct addrinfo **list) {
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
        (int (*)(const char *, const char *, const struct addrinfo *, struct addrinfo **))dlsym(
            RTLD_NEXT, "getaddrinfo");
    if (host && !strcmp(host, "unknown.host")) return EAI_NONAME;
    if (!host || strcmp(host, "silent.host")) return real(host, service, hints, list);
    sleep(600);
    return EAI_AGAIN;
}
