#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The CUDA device without a GPU: its kernels run thread by thread on the CPU (cuda_on_cpu.h) through the suites of any device,
# and nvcc builds them for every target, where it is installed, with a gate on registers and spills.
cd "$(dirname "$0")/.." || exit 1
out=build/cuda
mkdir -p $out
passed=0 failed=0 skipped=0
pass() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }
add() { # NAME PROGRAM: a suite's own tests count
    timeout 900 "$2" >$out/"$1".log 2>&1
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
targets="80 90a"
[ -n "$nvcc" ] && "$nvcc" --list-gpu-arch 2>/dev/null | grep -q compute_100 && targets="$targets 100"
build() { "$nvcc" -std=c++17 -O3 -fmad=false -Xptxas -v -DSEQPAR_CUBLAS -I. -gencode=arch=compute_"$1",code=sm_"$1" -c seqpar_cuda.cu -o $out/sm_"$1".o >$out/sm_"$1".log 2>&1 || touch $out/sm_"$1".failed; }
rm -f $out/sm_*.failed
[ -n "$nvcc" ] && for target in $targets; do build "$target"; done &

if ! command -v "${CXX:-c++}" >/dev/null 2>&1; then skip cuda "no C++ compiler"; finish; fi
for suite in test_device test_attn test_cuda_step test_queue test_queue_nccl test_train_nccl test_cuda_banks test_cublas; do
    if make --no-print-directory build/on_cpu_$suite >$out/$suite.build.log 2>&1 && ! grep -q 'warning:' $out/$suite.build.log; then add ${suite#test_} build/on_cpu_$suite
    else fail "cuda_$suite" "$(grep -E 'error|warning' $out/$suite.build.log | head -n 1)"; fi
done

if [ -z "$TEST_ALL" ]; then skip cuda_step_with_cublas "in make check-all"
elif TEST_CUBLAS=1 timeout 900 build/on_cpu_test_cuda_step >$out/step_cublas.log 2>&1; then pass cuda_step_with_cublas; else fail cuda_step_with_cublas "$(grep -m 1 FAIL $out/step_cublas.log)"; fi

# A barrier that is left out must show: the same suite, a kernel without one of them.
mutant() { # NAME PATTERN REPLACEMENT
    sed -E "s/$2/$3/" seqpar_cuda.cu >$out/"$1".cu
    cmp -s $out/"$1".cu seqpar_cuda.cu && { fail "cuda_fault_$1" "the line it changes is gone"; return; }
    ${CXX:-c++} -std=c++17 -O2 -march=native -w -DSEQPAR_CUBLAS -I. -x c++ -include verify/cublas_on_cpu.h -c $out/"$1".cu -o $out/"$1".o 2>$out/"$1".log || { fail "cuda_fault_$1" "does not build"; return; }
    ${CC:-cc} -std=gnu11 -O2 -march=native -w -fopenmp -DTEST_CUDA -I. -Ibuild -Iverify verify/"$4".c $out/"$1".o -o $out/"$1" -lm -lpthread -ldl -lstdc++ 2>>$out/"$1".log
    { TEST_FIRST=1 timeout 600 $out/"$1" >$out/"$1".log 2>&1; } 2>/dev/null
    case $? in 0) fail "cuda_fault_$1" "$4 stays green" ;; 124) fail "cuda_fault_$1" "$4 ran out of time" ;; *) pass "cuda_fault_$1" ;; esac
}
mutant store_before_load '__syncwarp\(\); \/\* all lanes have loaded.*' '' test_attn
mutant tile_in_use '^        __syncthreads\(\);$' '' test_device
mutant rows_beyond_the_end 'r < rows_left \&\& c < columns_left' 'c < columns_left' test_device
mutant staged_too_early 'if \(cudaEventSynchronize\(self->left\[self->half\]\)\) return NULL;' '' test_queue
mutant host_reads_too_early 'queue \? cudaSuccess : cudaStreamSynchronize\(self->stream\)' 'cudaSuccess' test_queue
mutant memory_of_a_graph '\|\| \(p->captured \&\& !captured\)' '' test_queue
mutant tf32_alone '^    seqpar_cuda_mma_tf32\(c, (low_a, high_b|high_a, low_b)\);' '' test_device
mutant bf16_halves_swapped 'b\[0\]\.r\[1\] = r\[1\]; b\[1\]\.r\[0\] = r\[2\]' 'b[0].r[1] = r[2]; b[1].r[0] = r[1]' test_device
mutant rows_as_they_come 'CUBLAS_OP_N, \(int\)a->out, CUBLAS_ROWS, ' 'CUBLAS_OP_N, (int)a->out, (int)(a->rows < CUBLAS_ROWS ? a->rows : CUBLAS_ROWS), ' test_cublas
mutant no_masters 'working \&\& first' 'working' test_device

# Mistakes about the queue in seqpar.h (verify/faults.tsv).
flaw() { # NUMBER NAME
    [ -e $out/flawed ] || ${CC:-cc} -std=gnu11 -O2 -march=native -w -fopenmp -DTEST_CUDA -DTEST_FAULTS -Ibuild/faults -I. -Ibuild -Iverify verify/test_queue.c build/cuda_on_cpu.o -o $out/flawed -lm -lpthread -ldl -lstdc++ 2>$out/flawed.log || { fail "cuda_fault_$2" "does not build"; return; }
    for seed in 1 2 3; do # ranks race: another order may be needed to see it
        { SEQPAR_FAULT=$1 TEST_FIRST=1 timeout 600 $out/flawed --seed $seed >$out/"$2".log 2>&1; } 2>/dev/null
        case $? in 0) ;; 124) fail "cuda_fault_$2" "test_queue ran out of time"; return ;; *) pass "cuda_fault_$2"; return ;; esac
    done
    fail "cuda_fault_$2" "test_queue stays green"
}
rm -f $out/flawed
make --no-print-directory -s planted || fail cuda_faults_planted "see above"
flaw 81 transport_does_not_settle
flaw 82 parameters_sent_as_of_the_host

# The kernels under AddressSanitizer, which knows the fibers, what of shared memory a launch asked for and where an allocation
# ends, and under UndefinedBehaviorSanitizer (alignment of 16-byte loads too); and that they see a launch with too little.
sanitizers="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
sanitized() { # SOURCE SUITE
    ${CXX:-c++} -std=c++17 -O1 -g -march=native -w $sanitizers -DSEQPAR_CUBLAS -I. -x c++ -include verify/cublas_on_cpu.h -c "$1" -o $out/san.o >$out/san_"$2".log 2>&1 || return 2
    ${CC:-cc} -std=gnu11 -O1 -g -march=native -w $sanitizers -DTEST_CUDA -I. -Ibuild -Iverify verify/test_"$2".c $out/san.o -o $out/san_"$2" -lm -lpthread -ldl -lstdc++ >>$out/san_"$2".log 2>&1 || return 2
    timeout 900 $out/san_"$2" >$out/san_"$2".log 2>&1
}
if ! echo 'int main(void) { return 0; }' | ${CXX:-c++} $sanitizers -x c++ - -o $out/san_here 2>/dev/null; then skip cuda_sanitized "this compiler has no sanitizers"
else
    clean=cuda_banks; [ -n "$TEST_ALL" ] && clean="cuda_banks device cublas" # products and attention in every width; check-all: every operation
    for suite in $clean; do
        if sanitized seqpar_cuda.cu $suite; then pass cuda_sanitized_$suite; else fail cuda_sanitized_$suite "$(grep -E 'error|ERROR|FAIL|cuda_on_cpu' $out/san_$suite.log | head -n 1)"; fi
    done
    sed 's/size_t shared = (size_t)(2 \* SIDE \* (traits/size_t shared = (size_t)(SIDE * (traits/' seqpar_cuda.cu >$out/too_little.cu
    if ! cmp -s $out/too_little.cu seqpar_cuda.cu && ! sanitized $out/too_little.cu cuda_banks 2>/dev/null && grep -q 'AddressSanitizer' $out/san_cuda_banks.log; then pass cuda_sanitizer_sees_shared_memory
    else fail cuda_sanitizer_sees_shared_memory "a launch with too little of it goes unseen"; fi
fi

# The benchmark of a GPU, at shapes for the stand-in: all of its cases are right, its page is written, and a device that is
# less exact than it says is found out.
benchmark() { # PROGRAM ARGUMENTS...
    timeout 600 "$@" --tiny --peer bench/peer_torch_gpu.py --page $out/page.md >$out/bench.log 2>&1
}
if make --no-print-directory build/on_cpu_bench_gpu >$out/bench.build.log 2>&1 && ! grep -q 'warning:' $out/bench.build.log && benchmark build/on_cpu_bench_gpu --dtype bf16 && benchmark build/on_cpu_bench_gpu && [ "$(grep -c '^| ' $out/page.md)" -ge 31 ]; then pass cuda_bench
else fail cuda_bench "$(grep -hE 'error|warning|WRONG|bench_gpu:' $out/bench.build.log $out/bench.log | head -n 1)"; fi
if ${CC:-cc} -std=gnu11 -O2 -march=native -w -I. -Ibuild bench/bench_gpu.c $out/tf32_alone.o -o $out/bench_tf32 -lm -lpthread -lstdc++ && ! benchmark $out/bench_tf32 --only goals && grep -q WRONG $out/bench.log; then pass cuda_bench_finds_errors
else fail cuda_bench_finds_errors "products in tf32 alone pass for fp32"; fi
if command -v python3 >/dev/null 2>&1; then
    if PYTHONPYCACHEPREFIX=$out python3 -m py_compile bench/peer_torch_gpu.py && python3 bench/peer_torch_gpu.py --list | grep -q '^attention_forward flash'; then pass cuda_bench_peer; else fail cuda_bench_peer "bench/peer_torch_gpu.py"; fi
else skip cuda_bench_peer "no python3"; fi

# Included instead of linked: a trainer and the device are one unit, whose demos are C++ then.
printf '#include "demos/train_sft.c"\n#include "seqpar_cuda.cu"\n' >$out/included.c
included() {
    make --no-print-directory build/options.inc build/make_arith && build/make_arith $out/arith.jsonl 6 7 || return
    ${CXX:-c++} -std=c++20 -O1 -march=native -w -fopenmp -DDEMO_CUDA -I. -Ibuild -Idemos -x c++ -include verify/cuda_on_cpu.h $out/included.c -o $out/included -lcjson -lm -lpthread || return
    for ranks in 1 2; do
        mkdir -p $out/included_$ranks
        timeout 300 $out/included --device cuda --dataset $out/arith.jsonl --input_key question --output_key answer --train_batch_size 4 --max_steps 1 --num_hidden_layers 1 --hidden_size 16 --ring_attn_size $ranks --save_path $out/included_$ranks || return
    done
    cmp $out/included_1/model.safetensors $out/included_2/model.safetensors || return
    ! $out/included --device cuda --cublas --dataset $out/arith.jsonl --input_key question --output_key answer 2>&1 | tee $out/no_cublas.log | grep -q 'compiled without cuBLAS; compile it with' && return 1
    return 0
}
if included >$out/included.log 2>&1; then pass cuda_included_in_a_trainer; else fail cuda_included_in_a_trainer "$(grep -E 'error|differ' $out/included.log | head -n 1)"; fi

# ---- nvcc ----
[ -n "$nvcc" ] || { skip cuda_nvcc "no nvcc"; finish; }
wait
# The demos as CUDA C++: one of each kind is built, the small one runs (it needs no GPU).
if make --no-print-directory CC="$nvcc" build/nvcc/01_ring build/nvcc/train_dpo >$out/demos.log 2>&1 && build/nvcc/01_ring | grep -q 'identical bits: yes'; then pass cuda_demos_nvcc
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
finish
