/* SPDX-License-Identifier: MIT OR Unlicense */
/* seqpar_mpi.h against the suite of transports. mpirun -n 8 build/mpi_transport FOLDER
   All processes go through the suite in step; a world of fewer ranks leaves the others out. The
   first one reports. What the suite shares between ranks (ledger, bell) is a file and a pipe in
   FOLDER, which all processes are on one host for. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_MPI_IMPLEMENTATION
#define SEQPAR_MPI_PIECE 1000003 /* so that large messages go in pieces */
#include "seqpar_mpi.h"
#include "support/transport.h"
#include <sys/stat.h>

static int place;            /* of this process */
static double most_patience; /* 0: the default */
static void mpi_patience(double seconds) { most_patience = seconds; }

/* If the first process has found something wrong, the others cannot follow it any more. */
static void all_well(void) {
    int wrong = test_why[0] || test_failed;
    MPI_Bcast(&wrong, 1, MPI_INT, 0, MPI_COMM_WORLD);
    if (!wrong) return;
    if (place == 0) {
        if (test_why[0]) test_end("the_last_one");
        test_summary();
        fflush(NULL);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    for (;;) pause();
}

static seqpar_status run_mpi(int64_t ranks, seqpar_rank_fn fn, void *user,
                             seqpar_error *error) {
    MPI_Comm part;
    seqpar_error own = {0};
    all_well();
    MPI_Comm_split(MPI_COMM_WORLD, place < ranks ? 0 : MPI_UNDEFINED, place, &part);
    if (place < ranks) {
        seqpar_mpi_desc desc = {.comm = &part, .limit_s = most_patience};
        seqpar_mpi_run(&desc, fn, user, &own);
        MPI_Comm_free(&part);
    }
    MPI_Bcast(&own, (int)sizeof own, MPI_BYTE, 0, MPI_COMM_WORLD);
    *error = own;
    MPI_Barrier(MPI_COMM_WORLD); /* the ledger is whole */
    return own.status;
}

/* As many bytes as one call of MPI cannot take, where there is memory for them. */
static seqpar_status rank_sends_gigabytes(seqpar_comm *world, void *user) {
    int64_t bytes = *(const int64_t *)user;
    char *data = (char *)malloc((size_t)bytes);
    seqpar_transfer t = {1 - world->rank, data, bytes};
    seqpar_group group = {"gigabytes", 0, &t, world->rank == 0, &t, world->rank == 1};
    seqpar_request request;
    if (!data) return seqpar_fail(world->error, SEQPAR_ERR_MEMORY, "no memory for the test");
    memset(data, world->rank == 0 ? 7 : 1, (size_t)bytes);
    if (world->rank == 0) data[bytes - 1] = 9;
    TRY(seqpar_comm_begin(world, &group, NULL, &request));
    TRY(seqpar_comm_wait(world, &request, NULL));
    for (int64_t i = 0; i < bytes; i += 4095)
        EXPECT(data[i] == 7 || i == bytes - 1, "byte %lld is %d", (long long)i, data[i]);
    EXPECT(data[bytes - 1] == 9, "the last byte is %d", data[bytes - 1]);
    free(data);
    return SEQPAR_OK;
}

static void share(const char *folder) {
    char path[1024];
    snprintf(path, sizeof path, "%s/ledger", folder);
    ledger = open(path, O_RDWR | O_CREAT | O_APPEND, 0600);
    snprintf(path, sizeof path, "%s/bell", folder);
    mkfifo(path, 0600);
    bell[0] = bell[1] = open(path, O_RDWR);
    if (ledger < 0 || bell[0] < 0) {
        fprintf(stderr, "error: %s is no folder to write in\n", folder);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
}

int main(int argc, char **argv) {
    static const transport_maker maker = {
        .name = "mpi", .run = run_mpi, .patience = mpi_patience};
    int64_t rank, size, bytes = (INT64_C(1) << 31) + 77;
    seqpar_error error = {0};
    if (argc < 2 || seqpar_mpi_world(&rank, &size, &error) || size < RANKS)
        return fprintf(stderr, "error: mpirun -n %d build/mpi_transport FOLDER %s\n", RANKS,
                       error.text),
               2;
    place = (int)rank;
    ledger_reads = place == 0;
    share(argv[1]);
    if (place && !freopen("/dev/null", "w", stdout)) return 2;
    test_begin(argc - 1, argv + 1);
    if (getenv("TEST_ALL")) transport_run_well(&maker, 2, rank_sends_gigabytes, &bytes);
    if (getenv("TEST_ALL")) test_end("mpi_2_gigabytes");
    TEST(transport_conformance(&maker));
    all_well();
    return place ? 0 : test_summary();
}
