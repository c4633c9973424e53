#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The compile matrix of the transports (test_headers.sh has that of the other headers): seqpar_nccl.h and seqpar_mpi.h alone, in C
# and C++, in one and in several units, and the samples of their first pages.
cd "$(dirname "$0")/../.." || exit 1
export out=build/test_headers_transports
rm -rf $out; mkdir -p $out/log
. verify/support/jobs.sh
printf '#define SEQPAR_IMPLEMENTATION\n#include "seqpar.h"\n' >$out/impl_seqpar.c

# ---- the NCCL transport with the real headers and library, where they are: NCCL answers to its version without a GPU ----
printf '#include "seqpar_nccl.h"\n#include "seqpar_nccl.h"\nextern int unit;\nint unit = SEQPAR_VERSION_MAJOR;\n' >$out/api_nccl.c
printf '#define SEQPAR_NCCL_IMPLEMENTATION\n#include "seqpar_nccl.h"\n#include "seqpar_nccl.h"\n' >$out/apart_nccl.c
printf '#define SEQPAR_IMPLEMENTATION\n' | cat - $out/apart_nccl.c >$out/impl_nccl.c
cat >$out/main_nccl.c <<'C'
#include "seqpar_nccl.h"
#include <stdio.h>
int main(void) { /* a world of no ranks is refused before a GPU is asked for */
    seqpar_nccl_desc desc = {-1, 1};
    seqpar_error error;
    seqpar_comm *world;
    int version = 0;
    if (ncclGetVersion(&version) != ncclSuccess || version < NCCL_VERSION_CODE || seqpar_nccl_open(&world, &desc, &error) != SEQPAR_ERR_RANK) return 1;
    return printf("NCCL %d: %s\n", version, error.text) < 0;
}
C
{ # the sample of its first page; without a GPU two processes meet by TCP and both are told that there is none
    printf '#define SEQPAR_IMPLEMENTATION\n#define SEQPAR_NCCL_IMPLEMENTATION\n#include "seqpar_nccl.h"\n'
    awk '/^SAMPLE/ { on = 1; next } /^OPTIONS/ { exit } on' seqpar_nccl.h
} >$out/nccl_sample.c
cat >$out/nccl_sample.sh <<'SH'
export WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=$((20000 + $$ % 20000))
RANK=1 LOCAL_RANK=1 $1 >$1.1.txt 2>&1 &
RANK=0 LOCAL_RANK=0 $1 >$1.0.txt 2>&1; first=$?
wait $!; second=$?
cat $1.0.txt $1.1.txt
[ $first$second = 00 ] || { [ $first$second = 11 ] && [ "$(grep -lE 'has no CUDA device|this machine has [01] CUDA' $1.0.txt $1.1.txt | wc -l)" = 2 ]; }
SH
if [ -f $cuda/include/nccl.h ] && [ -e $cuda/lib64/libnccl.so ]; then
    nccl="-isystem $cuda/include" nccl_link="-L$cuda/lib64 -Wl,-rpath,$cuda/lib64 -lnccl -lcudart -lm -lpthread" loose="-Wno-missing-field-initializers"
    job nccl_api_c99 "gcc -std=c99 -pedantic $strict $nccl -c $out/api_nccl.c -o $out/nccl_c99.o"
    job nccl_api_cxx17 "g++ -x c++ -std=c++17 -pedantic $strict $nccl -c $out/api_nccl.c -o $out/nccl_api17.o"
    job nccl_c11 "gcc -std=c11 $strict $nccl -c $out/impl_nccl.c -o $out/nccl_c11.o && gcc -std=c11 $strict $loose $nccl $out/main_nccl.c $out/nccl_c11.o -o $out/nccl_c11 $nccl_link && $out/nccl_c11"
    job nccl_cxx17 "g++ -x c++ -std=c++17 $strict $nccl -c $out/impl_nccl.c -o $out/nccl_17.o && g++ -x c++ -std=c++17 $strict $loose $nccl -c $out/main_nccl.c -o $out/nccl_main17.o && g++ $out/nccl_main17.o $out/nccl_17.o -o $out/nccl_17 $nccl_link && $out/nccl_17"
    job nccl_sample "gcc -std=c11 $strict $nccl $out/nccl_sample.c -o $out/nccl_sample $nccl_link && ci/limit.sh 100 bash $out/nccl_sample.sh $out/nccl_sample"
    job nccl_apart "gcc -std=c11 $strict $nccl -c $out/apart_nccl.c -o $out/nccl_apart.o && gcc -std=c11 $strict $loose $nccl $out/main_nccl.c $out/nccl_apart.o $out/impl_seqpar.c -o $out/nccl_apart $nccl_link && $out/nccl_apart"
    job nccl_names "[ \"\$(gcc -std=c11 $nccl -I. -c $out/apart_nccl.c -o $out/nccl_names.o && nm -g --defined-only $out/nccl_names.o | awk '{ print \$3 }' | sort | tr '\n' ' ')\" = 'seqpar_nccl_open seqpar_nccl_run seqpar_nccl_verdict ' ]"
    job nccl_static "gcc -std=c11 -DSEQPAR_STATIC $strict $nccl -c $out/impl_nccl.c -o $out/nccl_static.o && ! nm -g --defined-only $out/nccl_static.o | grep seqpar"
    if has clang; then job nccl_clang "clang -std=c11 $strict $nccl -c $out/impl_nccl.c -o $out/nccl_clang.o"; else skip nccl_clang "no clang"; fi
    if has nvcc; then job nccl_nvcc "nvcc -x cu -I. -O1 -c $out/impl_nccl.c -o $out/nccl_nvcc.o && nm $out/nccl_nvcc.o | grep ' T seqpar_nccl_open'"; else skip nccl_nvcc "no nvcc"; fi
else skip nccl_headers "no nccl.h and libnccl.so under $cuda; set CUDA_HOME"; fi

# ---- the MPI transport, with every MPI that is there ----
printf '#include "seqpar_mpi.h"\n#include "seqpar_mpi.h"\nextern int unit;\nint unit = SEQPAR_VERSION_MAJOR;\n' >$out/api_mpi.c
printf '#define SEQPAR_MPI_IMPLEMENTATION\n#include "seqpar_mpi.h"\n#include "seqpar_mpi.h"\n' >$out/apart_mpi.c
printf '#define SEQPAR_IMPLEMENTATION\n' | cat - $out/apart_mpi.c >$out/impl_mpi.c
printf '#include "seqpar_mpi.h"\nint main(void) { int64_t rank, size; return seqpar_mpi_world(&rank, &size, NULL) || size != 2; }\n' >$out/main_mpi.c
{ # the sample of its first page
    printf '#define SEQPAR_IMPLEMENTATION\n#define SEQPAR_MPI_IMPLEMENTATION\n#include "seqpar_mpi.h"\n'
    awk '/^SAMPLE/ { on = 1; next } /^HOW BYTES/ { exit } on' seqpar_mpi.h
} >$out/mpi_sample.c
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
for mpi in openmpi mpich; do
    if ! has mpicc.$mpi || ! has mpirun.$mpi; then skip mpi_headers_$mpi "no mpicc.$mpi and mpirun.$mpi"; continue; fi
    crowd=""
    [ $mpi = openmpi ] && crowd=--oversubscribe
    loose="-Wno-missing-field-initializers"
    job mpi_api_c99_$mpi "mpicc.$mpi -std=c99 -pedantic $strict -c $out/api_mpi.c -o $out/mpi_c99_$mpi.o"
    job mpi_api_cxx17_$mpi "mpicxx.$mpi -x c++ -std=c++17 -pedantic $strict -c $out/api_mpi.c -o $out/mpi_cxx17_$mpi.o"
    job mpi_c11_$mpi "mpicc.$mpi -std=c11 $strict -c $out/impl_mpi.c -o $out/mpi_c11_$mpi.o"
    job mpi_c99_$mpi "mpicc.$mpi -std=c99 $strict -c $out/apart_mpi.c -o $out/mpi_apart99_$mpi.o"
    job mpi_cxx17_$mpi "mpicxx.$mpi -x c++ -std=c++17 $strict -c $out/impl_mpi.c -o $out/mpi_17_$mpi.o"
    job mpi_sample_$mpi "mpicc.$mpi -std=c11 $strict $loose $out/mpi_sample.c -o $out/mpi_sample_$mpi -lm -lpthread && ci/limit.sh 120 mpirun.$mpi $crowd -n 4 $out/mpi_sample_$mpi"
    job mpi_apart_$mpi "mpicc.$mpi -std=c11 $strict -c $out/apart_mpi.c -o $out/mpi_apart_$mpi.o && mpicc.$mpi -std=c11 -I. $out/mpi_apart_$mpi.o $out/impl_seqpar.c $out/main_mpi.c -o $out/mpi_apart_$mpi -lm -lpthread && ci/limit.sh 120 mpirun.$mpi $crowd -n 2 $out/mpi_apart_$mpi"
    job mpi_names_$mpi "[ \"\$(mpicc.$mpi -std=c11 -I. -c $out/apart_mpi.c -o $out/mpi_names_$mpi.o && nm -g --defined-only $out/mpi_names_$mpi.o | awk '{ print \$3 }' | sort | tr '\n' ' ')\" = 'seqpar_mpi_end seqpar_mpi_limit seqpar_mpi_open seqpar_mpi_run seqpar_mpi_world ' ]"
    job mpi_static_$mpi "mpicc.$mpi -std=c11 -DSEQPAR_STATIC $strict -c $out/impl_mpi.c -o $out/mpi_static_$mpi.o && ! nm -g --defined-only $out/mpi_static_$mpi.o | grep seqpar"
done

run_jobs
printf '%d passed, %d failed' $passed $failed; [ $skipped -gt 0 ] && printf ', %d skipped' $skipped; echo
[ $failed -eq 0 ]
