/* SPDX-License-Identifier: MIT OR Unlicense */
/* Transports against one suite: the threads of seqpar.h, and the processes of
   demos/unix_sockets.h. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "support/transport.h"
#include "unix_sockets.h"

static void sockets_patience(double seconds) { own_patience = seconds > 0 ? seconds : 600; }

int main(int argc, char **argv) {
    static const transport_maker makers[] = {{.name = "threads", .run = seqpar_run_threads},
                                             {.name = "sockets",
                                              .run = run_processes,
                                              .processes = 1,
                                              .patience = sockets_patience}};
    int64_t i;
    test_begin(argc, argv);
    for (i = 0; i < COUNT(makers); i++) TEST(transport_conformance(&makers[i]));
    return test_summary();
}
