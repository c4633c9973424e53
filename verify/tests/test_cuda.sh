#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The CUDA device without a GPU: its kernels run thread by thread on the CPU (cuda_on_cpu.h) through the suites of any device,
# and nvcc builds them for every target, where it is installed, with a gate on registers and spills.
cd "$(dirname "$0")/../.." || exit 1
out=build/cuda
mkdir -p $out
passed=0 failed=0 skipped=0
pass() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }
add() { # NAME PROGRAM: a suite's own tests count
    ci/limit.sh 3600 "$2" >$out/"$1".log 2>&1
    local code=$? last
    last=$(grep -E '^[0-9]+ passed, [0-9]+ failed' $out/"$1".log | tail -n 1)
    [ -n "$last" ] || { fail "cuda_$1" "ended with exit code $code before its closing line: $(tail -n 1 $out/"$1".log)"; return; }
    passed=$((passed + $(echo "$last" | sed -E 's/^([0-9]+).*/\1/'))) failed=$((failed + $(echo "$last" | sed -E 's/.* ([0-9]+) failed.*/\1/')))
    grep -E '^(ok|FAIL)' $out/"$1".log | sed -E 's/^(ok|FAIL) /\1 on_cpu_/'
}
finish() {
    if [ $skipped -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"; else echo "$passed passed, $failed failed"; fi
    [ $failed -eq 0 ]
    exit
}

# nvcc takes minutes for each target: it works beside the suites.
nvcc=$(command -v nvcc || true)
# check: one target and heads up to 64, a quarter of the kernels of attention; check-all: all
targets=90a widths=-DSEQPAR_CUDA_HEAD_DIM_MAX=64
[ -n "$TEST_ALL" ] && targets="80 90a" widths="" && [ -n "$nvcc" ] && "$nvcc" --list-gpu-arch 2>/dev/null | grep -q compute_100 && targets="$targets 100"
build() { "$nvcc" -std=c++17 -O3 -fmad=false -Xptxas -v -DSEQPAR_CUBLAS $widths -I. -gencode=arch=compute_"$1",code=sm_"$1" -c seqpar_cuda.cu -o $out/sm_"$1".o >$out/sm_"$1".log 2>&1 || touch $out/sm_"$1".failed; }
rm -f $out/sm_*.failed
[ -n "$nvcc" ] && for target in $targets; do build "$target"; done &

if ! command -v "${CXX:-c++}" >/dev/null 2>&1; then skip cuda "no C++ compiler"; finish; fi
devices=$(basename -s .c verify/tests/test_device*.c)
for suite in $devices test_attn test_cuda_step test_cuda_steps test_cuda_pairs test_queue test_queue_nccl test_train_nccl test_cuda_banks test_cublas; do
    if make --no-print-directory build/on_cpu_$suite >$out/$suite.build.log 2>&1 && ! grep -q 'warning:' $out/$suite.build.log; then add ${suite#test_} build/on_cpu_$suite
    else fail "cuda_$suite" "$(grep -E 'error|warning' $out/$suite.build.log | head -n 1)"; fi
done

if [ -z "$TEST_ALL" ]; then skip cuda_step_with_cublas "in make check-all"
elif TEST_CUBLAS=1 ci/limit.sh 3600 build/on_cpu_test_cuda_step >$out/step_cublas.log 2>&1; then pass cuda_step_with_cublas; else fail cuda_step_with_cublas "$(grep -m 1 -E '^(FAIL|limit: )' $out/step_cublas.log)"; fi

# cuDNN's attention over ranks, upon a stand-in that keeps to the graphs it is given; and the comparison sees wrong strides and
# a wrong mask.
if ! make --no-print-directory build/on_cpu_cudnn_attention >$out/cudnn.build.log 2>&1 || grep -q 'warning:' $out/cudnn.build.log; then fail cuda_cudnn "$(grep -E 'error|warning' $out/cudnn.build.log | head -n 1)"
else
    if ci/limit.sh 2400 build/on_cpu_cudnn_attention 150 >$out/cudnn.log 2>&1; then pass cuda_cudnn; else fail cuda_cudnn "$(tail -n 1 $out/cudnn.log)"; fi
    for wrong in strides mask; do
        if ! CUDNN_ON_CPU_WRONG=$wrong ci/limit.sh 2400 build/on_cpu_cudnn_attention 150 >$out/cudnn_$wrong.log 2>&1 && grep -q 'rounding: no' $out/cudnn_$wrong.log; then pass cuda_cudnn_wrong_$wrong
        else fail cuda_cudnn_wrong_$wrong "wrong $wrong are within rounding"; fi
    done
fi

# Mistakes of the kernels and of the queue must show (verify/faults.tsv): one build that holds them all.
plain="-w -I. -Ibuild -Idemos -Iverify -DTEST_CUDA" linked=$(make --no-print-directory -s linked-flags)
flawing="-std=gnu11 -O2 -march=native -fopenmp -DTEST_FAULTS -Ibuild/faults $plain"
make --no-print-directory -s planted build/faults/seqpar.o build/faults/cuda_on_cpu.o >$out/planted.log 2>&1 || fail cuda_faults_planted "$(grep -m 1 -E 'error|fault' $out/planted.log)"
for suite in attn device_matmul device_update device_vocab queue cublas cuda_pairs cuda_steps; do
    ${CC:-cc} $flawing verify/tests/test_$suite.c $linked build/faults/seqpar.o build/faults/cuda_on_cpu.o -o $out/flawed_$suite -lcjson -lm -lpthread -ldl -lstdc++ 2>$out/flawed_$suite.log || fail cuda_faults_$suite "does not build: $(grep -m 1 error $out/flawed_$suite.log)"
done
rows() { awk -F'\t' '$2 ~ /^cuda / && $2 !~ /sanitized|races/ { sub("cuda ", "", $2); print $1 "|" $2 "|" $4 }' verify/faults.tsv; }
programs=$out/flawed_ seconds=1800
. verify/support/faults.sh
flawed() { planted "$out/fault_$1.log" "$1" "$2" --seed "$3"; } # NUMBER SUITE[:TEXT] SEED
flaw() { # NUMBER SUITE WHAT
    local seed suite=${2%%:*}
    for seed in 1 2 3; do # ranks race: another order may be needed to see it
        flawed "$1" "$2" $seed
        case $? in 0 | 2) ;; 126 | 127) fail "cuda_fault_$1" "test_$suite was not built"; return ;; 137 | 143) fail "cuda_fault_$1" "$3: test_$suite was ended: $(tail -n 1 "$out/fault_$1.log")"; return ;; *) pass "cuda_fault_$1 $3: seen by $suite"; return ;; esac
        [ $suite = queue ] || break
    done
    fail "cuda_fault_$1" "$3: test_$suite stays green"
}
# The controls: none may be red without a fault. check: of a long suite what is needed below.
for suite in attn device_matmul device_update device_vocab queue cublas cuda_pairs cuda_steps; do
    if flawed 0 "$(control $suite)" 1; then pass cuda_fault_none_$suite; else fail cuda_fault_none_$suite "$(grep -m 1 -E '^(FAIL|limit: )' $out/fault_0.log)"; fi
done
planted=0
while IFS='|' read -r number suite what _; do planted=$((planted + 1)); flaw "$number" "$suite" "$what"; done < <(rows)
every_row $planted

# The kernels under AddressSanitizer, which knows the fibers, what of shared memory a launch asked for and where an allocation
# ends, and under UndefinedBehaviorSanitizer (alignment of 16-byte loads too); and that they see a launch with too little.
sanitizers="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
sanitized() { # SUITE OBJECT LOG FAULT
    [ -e $out/san_$1 ] || ${CC:-cc} -std=gnu11 -O1 -g -march=native $sanitizers -DTEST_FAULTS -Ibuild/faults $plain $linked verify/tests/test_"$1".c "$2" build/faults/seqpar.o -o $out/san_$1 -fopenmp -lcjson -lm -lpthread -ldl -lstdc++ >$out/$3.log 2>&1 || return 2
    SEQPAR_FAULT=$4 ci/limit.sh 3600 $out/san_$1 >$out/$3.log 2>&1
}
rm -f $out/san_*
if ! echo 'int main(void) { return 0; }' | ${CXX:-c++} $sanitizers -x c++ - -o $out/san_here 2>/dev/null; then skip cuda_sanitized "this compiler has no sanitizers"
else
    ${CXX:-c++} -std=c++17 -O1 -g -march=native -w $sanitizers -DSEQPAR_CUBLAS -I. -x c++ -include verify/stand_in/cublas_on_cpu.h -c build/faults/seqpar_cuda.cu -o $out/san.o >$out/san.log 2>&1
    clean=cuda_banks; [ -n "$TEST_ALL" ] && clean="cuda_banks $(echo $devices | sed 's/test_//g') cublas" # products and attention in every width; check-all: every operation
    for suite in $clean; do
        if sanitized $suite $out/san.o sanitized_$suite 0; then pass cuda_sanitized_$suite; else fail cuda_sanitized_$suite "$(grep -E 'error|ERROR|FAIL|cuda_on_cpu|^limit: ' $out/san.log $out/sanitized_$suite.log | head -n 1)"; fi
    done
    if ! sanitized cuda_banks $out/san.o too_little 115 2>/dev/null && grep -q 'AddressSanitizer' $out/too_little.log; then pass cuda_sanitizer_sees_shared_memory
    else fail cuda_sanitizer_sees_shared_memory "a launch with too little of it goes unseen"; fi
fi

# What no barrier orders, whatever the order of threads was (verify/stand_in/races_on_cpu.h); and that a missing one shows.
races() { SEQPAR_FAULT=$1 TEST_ONLY=$3 ci/limit.sh 3600 $out/races_$2 >$out/races_$2.txt 2>&1; } # FAULT SUITE TESTS
races_build() { # of every suite of operations
    local suite
    ${CXX:-c++} -std=c++17 -O1 -g -march=native -w -fsanitize=thread -DSEQPAR_CUBLAS -DSEQPAR_CUDA_HEAD_DIM_MAX=64 -I. -x c++ -include verify/stand_in/cublas_on_cpu.h -c build/faults/seqpar_cuda.cu -o $out/races.o || return
    for suite in $raced; do
        ${CC:-cc} -std=gnu11 -O1 -march=native -fopenmp -DTEST_FAULTS -Ibuild/faults $plain verify/tests/test_device_$suite.c $linked $out/races.o build/faults/seqpar.o -o $out/races_$suite -lcjson -lm -lpthread -ldl -lstdc++ || return
    done
}
raced="attention experts update vocab"
[ -n "$TEST_ALL" ] && raced="attention experts matmul rows update vocab"
if ! ${CXX:-c++} -dM -E -fsanitize=thread -x c++ /dev/null 2>/dev/null | grep -q __SANITIZE_THREAD__; then skip cuda_races "this compiler is not g++, or has no -fsanitize=thread"
elif ! races_build >$out/races.log 2>&1; then fail cuda_races "does not build: $(grep -m 1 -E 'error|undefined' $out/races.log)"
else # check: the operations that take seconds; check-all: all
    for suite in $raced; do
        case $suite in
        attention) tests='test_op("attn_m' ;;
        experts) tests='test_op("route"' ;;
        update) tests='test_op("nf4' ;;
        *) tests='test_op("vocab+test_op("distill+test_op("choose' ;;
        esac
        [ -n "$TEST_ALL" ] && tests=test_op
        if ! races 0 $suite "$tests"; then fail cuda_races_$suite "$(grep -m 1 -E '^(FAIL|cuda_on_cpu|limit: )' $out/races_$suite.txt)"
        elif ! grep -q '^[1-9][0-9]* passed' $out/races_$suite.txt; then fail cuda_races_$suite "it ran no test"
        else pass cuda_races_$suite; fi
    done
    if ! races 265 experts 'test_op("route"' 2>/dev/null && grep -q 'no barrier lies in between' $out/races_experts.txt; then pass cuda_races_are_seen; else fail cuda_races_are_seen "a missing barrier goes unseen"; fi
fi

# The benchmark of a GPU, at shapes for the stand-in: all of its cases are right, its page is written, and a device that is
# less exact than it says is found out.
benchmark() { # PROGRAM ARGUMENTS...
    ci/limit.sh 2400 "$@" --tiny --peer bench/peer_torch_gpu.py --page $out/page.md >$out/bench.log 2>&1
}
if make --no-print-directory build/on_cpu_bench_gpu >$out/bench.build.log 2>&1 && ! grep -q 'warning:' $out/bench.build.log && benchmark build/on_cpu_bench_gpu --dtype bf16 && benchmark build/on_cpu_bench_gpu && [ "$(grep -c '^| ' $out/page.md)" -ge 31 ]; then pass cuda_bench
else fail cuda_bench "$(grep -hE 'error|warning|WRONG|bench_gpu:' $out/bench.build.log $out/bench.log | head -n 1)"; fi
echo 'int seqpar__fault = 111;' >$out/tf32_alone.c
if ${CC:-cc} -std=gnu11 -O2 -march=native -w -fopenmp -Ibuild/faults -I. -Ibuild bench/bench_gpu.c $out/tf32_alone.c $linked build/faults/seqpar.o build/faults/cuda_on_cpu.o -o $out/bench_tf32 -lcjson -lm -lpthread -lstdc++ && ! benchmark $out/bench_tf32 --only goals && grep -q WRONG $out/bench.log; then pass cuda_bench_finds_errors
else fail cuda_bench_finds_errors "products in tf32 alone pass for fp32"; fi
if command -v python3 >/dev/null 2>&1; then
    if PYTHONPYCACHEPREFIX=$out python3 -m py_compile bench/peer_torch_gpu.py && python3 bench/peer_torch_gpu.py --list | grep -q '^attention_forward flash'; then pass cuda_bench_peer; else fail cuda_bench_peer "bench/peer_torch_gpu.py"; fi
else skip cuda_bench_peer "no python3"; fi

# Included instead of linked: a trainer and the device are one unit, whose demos are C++ then. Wider heads than are compiled in
# are refused.
printf '#include "demos/train_sft.c"\n#include "seqpar_cuda.cu"\n' >$out/included.c
included() {
    make --no-print-directory build/options.inc build/make_arith && build/make_arith $out/arith.jsonl 6 7 || return
    ${CXX:-c++} -std=c++20 -O1 -march=native -w -fopenmp -DDEMO_CUDA -DSEQPAR_CUDA_HEAD_DIM_MAX=64 -I. -Ibuild -Idemos -x c++ -include verify/stand_in/cuda_on_cpu.h $out/included.c -o $out/included -lcjson -lz -lm -lpthread || return
    for ranks in 1 2; do
        mkdir -p $out/included_$ranks
        ci/limit.sh 600 $out/included --device cuda --dataset $out/arith.jsonl --input_key question --output_key answer --train_batch_size 4 --max_steps 1 --num_hidden_layers 1 --hidden_size 16 --ring_attn_size $ranks --save_path $out/included_$ranks || return
    done
    cmp $out/included_1/model.safetensors $out/included_2/model.safetensors || return
    ! $out/included --device cuda --dataset $out/arith.jsonl --input_key question --output_key answer --max_steps 1 --num_hidden_layers 1 --hidden_size 16 --head_dim 80 >$out/wide.log 2>&1 &&
        grep -q 'head_dim is 80; the CUDA device takes up to 64, as SEQPAR_CUDA_HEAD_DIM_MAX says' $out/wide.log || return
    ! $out/included --device cuda --cublas --dataset $out/arith.jsonl --input_key question --output_key answer 2>&1 | tee $out/no_cublas.log | grep -q 'compiled without cuBLAS; compile it with' && return 1
    return 0
}
if included >$out/included.log 2>&1; then pass cuda_included_in_a_trainer; else fail cuda_included_in_a_trainer "$(grep -E 'error|differ' $out/included.log | head -n 1)"; fi

# ---- nvcc ----
[ -n "$nvcc" ] || { skip cuda_nvcc "no nvcc"; finish; }
wait
# The demos as CUDA C++: one of each kind is built, the small one runs (it needs no GPU).
if make --no-print-directory CC="$nvcc" OPT=-O1 build/nvcc/01_ring build/nvcc/train_dpo >$out/demos.log 2>&1 && build/nvcc/01_ring | grep -q 'identical bits: yes'; then pass cuda_demos_nvcc
else fail cuda_demos_nvcc "$(grep error $out/demos.log | head -n 1)"; fi
for target in $targets; do
    if [ -e $out/sm_"$target".failed ]; then fail "cuda_builds_sm_$target" "$(grep error $out/sm_"$target".log | head -n 1)"; continue; fi
    pass "cuda_builds_sm_$target"
    # Everything in registers, but in attention with softcap or dropout and with heads wider than 128; attention may put aside
    # 64 bytes a thread forward, half a KiB backward and with heads of 96.
    awk '/Compiling entry function/ { kernel = $7 }
         /bytes stack frame/ { if (kernel ~ /Li256E|ELb1EEEEE/) next
                               most = kernel ~ /gradient_job|Li96E/ ? 512 : kernel ~ /forward_job/ ? 64 : 0
                               if ($5 > most || (most == 0 && $1 > 0)) print kernel ": " $0; else kept++ }
         END { if (kept < 20) print kept " kernels were seen" }' $out/sm_$target.log >$out/sm_$target.spills
    if [ -s $out/sm_$target.spills ]; then fail "cuda_registers_sm_$target" "$(head -n 1 $out/sm_$target.spills)"; else pass "cuda_registers_sm_$target"; fi
done

# Where cuDNN is: it finds an engine for each of its graphs on GPUs that need not be here, and the demo builds; without a GPU it
# says so. cuDNN's libraries want a driver's, if only nvcc's stub.
cudnn=$(make --no-print-directory -s cudnn-folder) stub=${nvcc%/bin/nvcc}/lib64/stubs/libcuda.so
with_cudnn() { # PROGRAM SOURCE [ARGUMENTS OF NVCC]
    local program=$1 libraries=$cudnn/lib:${nvcc%/bin/nvcc}/lib64
    shift
    ldconfig -p | grep -q 'libcuda[.]so[.]1' || { mkdir -p $out/driver && ln -sf "$stub" $out/driver/libcuda.so.1 && libraries=$libraries:$out/driver; }
    "$nvcc" -std=c++17 -O2 -arch=sm_80 -I. -Idemos -I"$cudnn/include" $linked "$@" build/seqpar.o -o "$program" -lcjson -lm -lpthread -Xcompiler -fopenmp -Xlinker "$cudnn/lib/libcudnn.so.9" >"$program.log" 2>&1 || return
    LD_LIBRARY_PATH="$libraries:$LD_LIBRARY_PATH" ci/limit.sh 600 "$program" >"$program.log" 2>&1
}
if [ ! -e "$cudnn/include/cudnn.h" ]; then skip cuda_cudnn_graphs "no cuDNN: neither CUDNN=folder nor pip's nvidia-cudnn-cu13"
else
    if with_cudnn $out/cudnn_graphs verify/support/cudnn_graphs.cu; then pass cuda_cudnn_graphs; else fail cuda_cudnn_graphs "$(tail -n 1 $out/cudnn_graphs.log)"; fi
    if with_cudnn $out/cudnn_demo demos/09_cudnn_attention.cu $out/sm_90a.o -lcublas && grep -qE '^skipped: no GPU|rounding: yes$' $out/cudnn_demo.log; then pass cuda_cudnn_demo; else fail cuda_cudnn_demo "$(tail -n 1 $out/cudnn_demo.log)"; fi
fi
finish
