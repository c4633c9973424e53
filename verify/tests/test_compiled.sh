#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Demos compile without a warning as C and as C++, seqpar_verify.c as C, seqpar_cuda.cu as C++; each header in demos/trainer,
# demos/program and verify/oracle compiles alone.
cd "$(dirname "$0")/../.." || exit 1
export out=build/test_compiled
rm -rf $out; mkdir -p $out/log
. verify/support/jobs.sh

# ---- the programs: what gcc warns of is most often a mistake. Not in the build itself, as other compilers warn of other things ----
warned="-std=gnu11 -D_GNU_SOURCE -march=native -fopenmp $strict -Ibuild -Idemos -Wno-format-truncation -Wno-missing-field-initializers -fsyntax-only"
for unit in verify/seqpar_verify.c demos/*.c; do
    case $unit in *_mpi.c | *_nccl.c | *_cuda*.c) continue ;; esac
    job no_warning_$(basename $unit .c) "gcc $warned $unit"
done
job no_warning_cuda "g++ -std=c++17 -march=native $strict -Wno-unused-function -Wno-missing-field-initializers -DSEQPAR_CUBLAS -include verify/stand_in/cublas_on_cpu.h -x c++ seqpar_cuda.cu -fsyntax-only"

# ---- the demos are C and C++ at once, so that nvcc takes them too (make demos CC=nvcc) ----
make --no-print-directory build/options.inc >/dev/null
as_cxx="g++ -x c++ -std=c++20 -fopenmp $strict -Wno-missing-field-initializers -Wno-format-truncation -Wno-extra -Ibuild -Idemos"
for demo in demos/*.c; do job cxx20_$(basename $demo .c) "$as_cxx -fsyntax-only $demo"; done
job cxx20_demo_runs "$as_cxx -O1 demos/03_own_kernel.c -o $out/own_kernel -lm -lpthread && $out/own_kernel"
# what MPI changes stands in headers of all trainers
if has mpicxx.openmpi; then for demo in demos/train_sft.c demos/train_ppo.c; do job cxx20_mpi_$(basename $demo .c) "mpicxx.openmpi -DDEMO_MPI ${as_cxx#g++} -fsyntax-only $demo"; done; fi
if [ -f $cuda/include/nccl.h ] && [ -f $cuda/include/cuda_runtime_api.h ]; then job cxx20_nccl "printf '#define SEQPAR_IMPLEMENTATION\n#define SEQPAR_NCCL_IMPLEMENTATION\n#include \"seqpar_nccl.h\"\n' >$out/nccl.c && $as_cxx -isystem $cuda/include -fsyntax-only $out/nccl.c"; else skip cxx20_nccl "no nccl.h and cuda_runtime_api.h under $cuda"; fi

# ---- headers of the trainers, of the program and of the oracle: each compiles alone ----
for folder in demos/trainer/* demos/program verify/oracle/*; do
    for header in $folder/*.h; do job alone_$(echo ${header%.h} | tr / _) "gcc -std=gnu11 -D_GNU_SOURCE $strict -Wno-format-truncation -Wno-missing-field-initializers -Wno-unknown-pragmas -Wno-unused -Ibuild -Idemos -fsyntax-only -x c $header"; done
done

run_jobs
printf '%d passed, %d failed' $passed $failed; [ $skipped -gt 0 ] && printf ', %d skipped' $skipped; echo
[ $failed -eq 0 ]
