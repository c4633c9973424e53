/* SPDX-License-Identifier: MIT OR Unlicense */
/* Transports against one suite: the threads of seqpar.h, and the processes of
   demos/unix_sockets.h. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "transport.h"
#include "unix_sockets.h"

int main(int argc, char **argv) {
    static const transport_maker makers[] = {{"threads", seqpar_run_threads, 0},
                                             {"sockets", run_processes, 1}};
    int64_t i;
    test_begin(argc, argv);
    for (i = 0; i < COUNT(makers); i++) transport_conformance(&makers[i]);
    return test_summary();
}
