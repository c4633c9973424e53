#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# seqpar_mpi.h with Open MPI and with MPICH, whichever are installed: the suite of transports, and the trainers under mpirun.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_mpi name=mpi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
flags="-std=gnu11 -O2 -march=native -fopenmp -Wall -Wextra -Wno-format-truncation -Wno-missing-field-initializers -I. -Ibuild -Idemos -Iverify"
linked=$(make --no-print-directory -s linked-flags)
# more processes than cores
mpi_run() {
    local ranks=$1; shift
    case $library in
    openmpi) ci/limit.sh 600 mpirun.openmpi --oversubscribe -n $ranks "$@" ;;
    mpich) ci/limit.sh 600 mpirun.mpich -n $ranks "$@" ;;
    esac
}
launch() { local ranks=$1 trainer=$2; shift 2; mpi_run $ranks $out/$library/train_$trainer "$@"; }
. verify/support/processes.sh

build_trainers() { # TRAINERS...
    for trainer in "$@"; do
        mpicc.$library $flags $linked -DDEMO_MPI demos/train_$trainer.c build/seqpar.o -o $out/$library/train_$trainer -lcjson -lcurl -lz -lm -lpthread 2>$out/$trainer.build.log && [ ! -s $out/$trainer.build.log ] || fail "${name}_build_$trainer" "$(head -n 1 $out/$trainer.build.log)"
    done
}
transport() {
    mkdir -p $out/$library/shared
    mpicc.$library $flags -O1 verify/tests/mpi_transport.c -o $out/$library/mpi_transport -lm -lpthread 2>$out/build.log && [ ! -s $out/build.log ] || fail ${name}_build "$(head -n 1 $out/build.log)"
    mpi_run 8 $out/$library/mpi_transport $out/$library/shared >$out/$library.log 2>&1; local code=$?
    sed -nE "s/^ok mpi_/ok ${name}_/p; s/^FAIL mpi_/FAIL ${name}_/p" $out/$library.log
    read -r p f < <(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed.*/\1 \2/p' $out/$library.log)
    passed=$((passed + ${p:-0})) failed=$((failed + ${f:-0}))
    [ $code -eq 0 ] && [ -n "$p" ] || fail ${name}_transport "exit code $code: $(tail -n 1 $out/$library.log)"
}
# one process, which wants no launcher
alone() {
    mkdir -p $out/$library
    mpicc.$library $flags -O1 verify/tests/mpi_alone.c -o $out/$library/mpi_alone -lm -lpthread 2>$out/alone.build.log && [ ! -s $out/alone.build.log ] || fail ${name}_alone_build "$(head -n 1 $out/alone.build.log)"
    ci/limit.sh 60 $out/$library/mpi_alone >$out/$library.alone.log 2>&1; local code=$?
    sed -nE "s/^ok mpi_/ok ${name}_/p; s/^FAIL mpi_/FAIL ${name}_/p" $out/$library.alone.log
    read -r p f < <(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed.*/\1 \2/p' $out/$library.alone.log)
    passed=$((passed + ${p:-0})) failed=$((failed + ${f:-0}))
    [ $code -eq 0 ] && [ -n "$p" ] || fail ${name}_alone "exit code $code: $(tail -n 1 $out/$library.alone.log)"
    # how it ends: MPI is ended once, by seqpar or by who began it; or all ranks are, where one was lost
    for way in "leaves finalized 0" "ends finalized 0" "lost aborted.1.1 1"; do
        set -- $way
        ci/limit.sh 60 $out/$library/mpi_alone $1 >$out/$library.$1.log 2>&1; code=$?
        [ $code -eq $3 ] && [ "$(grep -cE '^(finalized|aborted)' $out/$library.$1.log)" = 1 ] && grep -q "^$2\$" $out/$library.$1.log && ok ${name}_alone_$1 || fail ${name}_alone_$1 "exit code $code: $(tail -n 1 $out/$library.$1.log)"
    done
}
# a rank that never begins ends the others, and says why
never_begins() {
    printf '#!/bin/sh\n[ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 2 ] && exec "$@" --dataset %s/none.jsonl\nexec "$@"\n' $out >$out/odd.sh
    mpi_run 4 sh $out/odd.sh $out/$library/train_sft $shape $texts --ring_attn_size 2 --save_path $out/odd >$out/odd.log 2>&1; local code=$?
    [ $code -ne 0 ] && [ "$(grep -c '^error: .*none.jsonl: cannot be read' $out/odd.log)" = 2 ] && [ ! -e $out/odd/model.safetensors ] && ok ${name}_never_begins || fail ${name}_never_begins "exit code $code: $(grep -m 1 error $out/odd.log)"
    mpi_run 4 $out/$library/train_sft $shape $texts --ring_attn_size 3 --save_path $out/odd >$out/odd.log 2>&1; code=$?
    [ $code -ne 0 ] && [ "$(grep -c '^error: 4 processes were started, which is not data_parallel_size 1 x ring_attn_size 3' $out/odd.log)" = 1 ] && ok ${name}_refuses_a_world || fail ${name}_refuses_a_world "exit code $code: $(tail -n 1 $out/odd.log)"
}
# another program on one rank, given the same options
another_program() {
    local program=$out/$library/train_sft
    cp $program $out/another; echo more >>$out/another
    printf '#!/bin/sh\n[ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 1 ] && exec %s "$@"\nexec %s "$@"\n' $out/another $program >$out/either.sh
    mpi_run 2 sh $out/either.sh $shape $texts --ring_attn_size 2 --save_path $out/either >$out/either.log 2>&1; local code=$?
    [ $code -ne 0 ] && grep -q '^error: the program of rank 1 is not that of rank 0' $out/either.log && [ ! -e $out/either/model.safetensors ] && ok ${name}_another_program || fail ${name}_another_program "exit code $code: $(grep -m 1 error $out/either.log)"
}
# an MPI_Finalize that never returns is given up, with a sentence and a code
never_finalizes() {
    printf '#define SEQPAR_MPI_GRACE 1\n#define SEQPAR_IMPLEMENTATION\n#define SEQPAR_MPI_IMPLEMENTATION\n#include "seqpar_mpi.h"\n#include <unistd.h>\nint MPI_Finalize(void) { for (;;) pause(); }\nint main(void) { int64_t r, n; seqpar_error e = {0}; return seqpar_mpi_world(&r, &n, &e); }\n' >$out/hangs.c
    mpicc.$library $flags $out/hangs.c -o $out/hangs -lm -lpthread 2>$out/hangs.build.log || { fail ${name}_never_finalizes "$(head -n 1 $out/hangs.build.log)"; return; }
    ci/limit.sh 40 $out/hangs >$out/hangs.out 2>$out/hangs.log; local code=$?
    [ $code -eq 1 ] && [ ! -s $out/hangs.out ] && grep -q '^notice: MPI_Finalize does not return and is given up' $out/hangs.log && ok ${name}_never_finalizes || fail ${name}_never_finalizes "exit code $code: $(tail -n 1 $out/hangs.log)"
}
# a typing error, and --help, are said once, not by every process
says_once() {
    mpi_run 3 $out/$library/train_sft $shape $texts --ring_attn_szie 3 --save_path $out/typo >$out/typo.log 2>&1; local code=$?
    [ $code -ne 0 ] && [ "$(grep -c '^error: ' $out/typo.log)" = 1 ] && grep -q '^error: .*ring_attn_szie' $out/typo.log && [ ! -e $out/typo ] && ok ${name}_typo || fail ${name}_typo "exit code $code: $(grep -c '^error: ' $out/typo.log) errors: $(grep -m 1 error $out/typo.log)"
    mpi_run 3 $out/$library/train_sft --help >$out/help.txt 2>$out/help.err; code=$? # MPI may speak of the machine it is on, in either stream
    [ $code -eq 0 ] && ! grep -q '^usage' $out/help.err && [ "$(build/train_sft --help | tee $out/help.want | wc -l)" = "$(grep -cxFf $out/help.want $out/help.txt)" ] && ok ${name}_help || fail ${name}_help "exit code $code, $(wc -l < $out/help.txt) lines"
}
# the launcher of one library, a program of the other: every process would take itself for the whole world
foreign() {
    local program=$out/$library/train_sft other=mpich
    [ $library = mpich ] && other=openmpi
    command -v mpirun.$other >/dev/null || { skip ${name}_foreign_launcher "no mpirun.$other"; return; }
    library=$other mpi_run 2 $program $shape $texts --ring_attn_size 2 --save_path $out/foreign >$out/foreign.log 2>&1; local code=$?
    [ $code -ne 0 ] && grep -q '^error: the launcher has started 2 processes (.*), but the MPI of this program knows 1' $out/foreign.log && [ ! -e $out/foreign ] && ok ${name}_foreign_launcher || fail ${name}_foreign_launcher "exit code $code: $(grep -m 1 error $out/foreign.log)"
}
# the scripts for several hosts, on this one: the same stages, the same models however many ranks there are and whoever starts them
scripts() {
    local bin=$PWD/$out/$library started=$PWD/$out/started trainer model by
    mkdir -p $started
    for trainer in sft dpo ppo; do ln -sf train_$trainer $bin/mpi_train_$trainer; done
    printf '#!/bin/sh\nexec mpirun.openmpi "$@"\n' >$started/mpirun
    # takes what srun --help has, of what a script may use
    cat >$started/srun <<'SRUN'
#!/bin/sh
while :; do
    case $1 in
    --ntasks=[0-9]*) ranks=${1#*=} ;;
    --cpus-per-task=[0-9]* | --mpi=pmix | --kill-on-bad-exit=1) ;;
    -*) echo "srun: unrecognized option '$1'" >&2; exit 1 ;;
    *) exec mpirun.openmpi --oversubscribe -n "$ranks" "$@" ;;
    esac
    shift
done
SRUN
    chmod +x $started/*
    echo "localhost slots=2" >$out/hosts
    by() { local script=$1; shift; env PATH="$started:$PATH" BIN=$bin OUT=$out/by.$script DATA=$out/arith.jsonl STEPS=2 "$@" ci/limit.sh 400 sh demos/cluster_$script.sh >$out/by.$script.log 2>&1; }
    [ "$(sed -n '/^# ---- the stages/,$p' demos/cluster_mpirun.sh)" = "$(sed -n '/^# ---- the stages/,$p' demos/cluster_srun.sh)" ] && grep -q '^stage ppo' demos/cluster_srun.sh && ok ${name}_scripts_agree || fail ${name}_scripts_agree "the stages of demos/cluster_mpirun.sh and demos/cluster_srun.sh differ"
    by mpirun RANKS=4 && ok ${name}_script_mpirun || fail ${name}_script_mpirun "$(grep -m 1 error $out/by.mpirun.log) $(tail -n 1 $out/by.mpirun.log)"
    mv $out/by.mpirun $out/by.four
    by mpirun RANKS=2 RING=1 HOSTFILE=$out/hosts && by srun SLURM_NTASKS=4 && for model in sft dpo ppo ppo/critic; do
        for by in mpirun srun; do cmp -s $out/by.$by/$model/model.safetensors $out/by.four/$model/model.safetensors && ok "${name}_script_$by $model" || fail "${name}_script_$by $model" "another model than that of four ranks"; done
    done || fail ${name}_scripts "$(grep -h -m 1 error $out/by.mpirun.log $out/by.srun.log) $(tail -n 1 $out/by.srun.log)"
    by srun && fail ${name}_script_alone "trains without Slurm" || { grep -q 'run this by sbatch or salloc' $out/by.srun.log && ok ${name}_script_alone || fail ${name}_script_alone "$(tail -n 1 $out/by.srun.log)"; }
}

for library in openmpi mpich; do
    name=mpi_$library
    if ! command -v mpicc.$library >/dev/null || ! command -v mpirun.$library >/dev/null; then skip $name "no mpicc.$library and mpirun.$library (ci/setup.sh test_mpi)"; continue; fi
    alone
    transport
    build_trainers sft dpo ppo
    worlds=("--ring_attn_size 2" "--ring_attn_size 2 --data_parallel_size 2 --zero_stage 3" "--ring_attn_size 3 --zero_stage 0")
    compare sft sft "ema/model.safetensors training_loss.svg" $texts --enable_ema --plot_loss
    worlds=("--ring_attn_size 3 --zero_stage 3")
    compare dpo dpo ckpt/reference.safetensors $pairs --pretrain $out/sft.one --precompute_ref
    compare grpo ppo "" $prompts --eval_dataset $out/eval.jsonl --pretrain $out/sft.one --reward_rule last_number --advantage_estimator group_norm --n_samples_per_prompt 2 --dynamic_filtering --pretrain_data $out/arith.jsonl
    goes_on
    interrupted
    # the launcher says so; or UCX under MPICH, which ends a process that was just reading the killed one's memory
    killed any 'rank 1 .*signal 9|EXIT CODE: 9|process_vm_readv\(pid=[0-9]+.* No such process'
    fails
    never_begins
    says_once
    another_program
    never_finalizes
    foreign
    [ $library = mpich ] || scripts
done
summary
