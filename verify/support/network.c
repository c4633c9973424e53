/* SPDX-License-Identifier: MIT OR Unlicense */
/* A network between hosts that are network namespaces of one machine: packets that leave a
   host's interface `wire` arrive at the one whose address they bear, late, or now and then not
   at all. TCP above it is the kernel's own.

       network DELAY_MS LOSS_PERCENT NAMESPACE...

   Host k, from 1 on, is 10.77.0.k. Prints "ready" once the interfaces are there. SIGUSR1 cuts
   all lines, SIGUSR2 mends them. SIGTERM ends it: the interfaces go, and it prints how many
   packets were carried, lost, and sent into a cut. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { HOSTS = 8, PACKET = 65536, QUEUE = 4096 };

typedef struct {
    double due;
    int64_t bytes;
    int to;
    char *data;
} packet;

static volatile sig_atomic_t cut, ends;
static void on_signal(int number) {
    if (number == SIGTERM)
        ends = 1;
    else
        cut = number == SIGUSR1;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void fail(const char *what, const char *of) {
    fprintf(stderr, "network: ");
    fprintf(stderr, "%s %s: ", what, of);
    perror(NULL);
    exit(1);
}

/* A TUN device belongs to the namespace in which it is opened, wherever it is then used. */
static int open_wire(const char *name) {
    char path[256];
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), there, wire;
    snprintf(path, sizeof path, "/var/run/netns/%s", name);
    there = open(path, O_RDONLY | O_CLOEXEC);
    if (there < 0 || setns(there, CLONE_NEWNET)) fail("cannot enter namespace", name);
    snprintf(request.ifr_name, sizeof request.ifr_name, "wire");
    wire = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (wire < 0 || ioctl(wire, TUNSETIFF, &request)) fail("no TUN device in", name);
    if (setns(home, CLONE_NEWNET)) fail("cannot come back from", name);
    close(there);
    close(home);
    return wire;
}

/* The host an IPv4 packet is for; -1: none of ours. */
static int host_of(const char *data, int64_t bytes, int hosts) {
    const unsigned char *p = (const unsigned char *)data;
    int k = bytes >= 20 && p[0] >> 4 == 4 && p[16] == 10 && p[17] == 77 && p[18] == 0 ? p[19]
                                                                                      : 0;
    return k >= 1 && k <= hosts ? k - 1 : -1;
}

/* The same packets in every run, as far as the hosts send the same. */
static int is_lost(double loss) {
    static uint64_t state = 1;
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (double)(state >> 11) / (double)(UINT64_C(1) << 53) < loss;
}

/* Packets leave the queue in the order in which they came, as all have the same delay. While
   the queue is full, packets stay in the kernel's devices. */
int main(int argc, char **argv) {
    static packet queue[QUEUE];
    static char data[PACKET];
    struct pollfd wires[HOSTS];
    struct sigaction action = {.sa_handler = on_signal};
    int hosts = argc - 3;
    int64_t first = 0, count = 0, carried = 0, lost = 0, into_cut = 0;
    if (hosts < 1 || hosts > HOSTS) {
        fprintf(stderr, "use: network DELAY_MS LOSS_PERCENT NAMESPACE... (1 to %d)\n", HOSTS);
        return 2;
    }
    double delay = atof(argv[1]) * 1e-3, loss = atof(argv[2]) * 1e-2;
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGUSR2, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    for (int i = 0; i < hosts; i++)
        wires[i] = (struct pollfd){.fd = open_wire(argv[3 + i]), .events = POLLIN};
    puts("ready");
    fflush(stdout);
    while (!ends) {
        double wait = count ? queue[first].due - seconds() : 1;
        struct timespec limit = {0};
        if (wait > 0)
            limit = (struct timespec){(time_t)wait,
                                      (long)((wait - (double)(time_t)wait) * 1e9)};
        ppoll(wires, (nfds_t)hosts, &limit, NULL);
        for (int i = 0; i < hosts; i++)
            for (int64_t n; count < QUEUE && (n = read(wires[i].fd, data, PACKET)) > 0;) {
                int to = host_of(data, n, hosts);
                int gone = to >= 0 && !cut && is_lost(loss);
                into_cut += to >= 0 && cut;
                lost += gone;
                if (to < 0 || cut || gone) continue;
                carried++;
                packet *p = &queue[(first + count++) % QUEUE];
                *p = (packet){seconds() + delay, n, to, malloc((size_t)n)};
                memcpy(p->data, data, (size_t)n);
            }
        for (; count && queue[first].due <= seconds(); first = (first + 1) % QUEUE, count--) {
            /* a host that takes no more loses it, as a network's does */
            if (write(wires[queue[first].to].fd, queue[first].data,
                      (size_t)queue[first].bytes) < 0) {
            }
            free(queue[first].data);
        }
    }
    printf("packets: %lld carried, %lld lost, %lld cut\n", (long long)carried, (long long)lost,
           (long long)into_cut);
    return 0;
}
