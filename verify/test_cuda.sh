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
build() { "$nvcc" -std=c++17 -O3 -fmad=false -Xptxas -v -I. -gencode=arch=compute_"$1",code=sm_"$1" -c seqpar_cuda.cu -o $out/sm_"$1".o >$out/sm_"$1".log 2>&1 || touch $out/sm_"$1".failed; }
rm -f $out/sm_*.failed
[ -n "$nvcc" ] && for target in $targets; do build "$target"; done &

if ! command -v "${CXX:-c++}" >/dev/null 2>&1; then skip cuda "no C++ compiler"; finish; fi
for suite in test_device test_attn test_cuda_step; do
    if make --no-print-directory build/on_cpu_$suite >$out/$suite.build.log 2>&1 && ! grep -q 'warning:' $out/$suite.build.log; then add ${suite#test_} build/on_cpu_$suite
    else fail "cuda_$suite" "$(grep -E 'error|warning' $out/$suite.build.log | head -n 1)"; fi
done

# A barrier that is left out must show: the same suite, a kernel without one of them.
mutant() { # NAME PATTERN REPLACEMENT
    sed -E "s/$2/$3/" seqpar_cuda.cu >$out/"$1".cu
    cmp -s $out/"$1".cu seqpar_cuda.cu && { fail "cuda_fault_$1" "the line it changes is gone"; return; }
    ${CXX:-c++} -std=c++17 -O2 -march=native -w -I. -x c++ -include verify/cuda_on_cpu.h -c $out/"$1".cu -o $out/"$1".o 2>$out/"$1".log || { fail "cuda_fault_$1" "does not build"; return; }
    ${CC:-cc} -std=gnu11 -O2 -march=native -w -fopenmp -DTEST_CUDA -I. -Ibuild -Iverify verify/"$4".c $out/"$1".o -o $out/"$1" -lm -lpthread -ldl -lstdc++ 2>>$out/"$1".log
    if { TEST_FIRST=1 timeout 300 $out/"$1" >$out/"$1".log 2>&1; } 2>/dev/null; then fail "cuda_fault_$1" "$4 stays green"; else pass "cuda_fault_$1"; fi
}
mutant store_before_load '__syncwarp\(\); \/\* all lanes have loaded.*' '' test_attn
mutant tile_in_use '^        __syncthreads\(\);$' '' test_device
mutant rows_beyond_the_end 'r < rows_left \&\& c < columns_left' 'c < columns_left' test_device
mutant tf32_alone '^    seqpar_cuda_mma_tf32\(c, (low_a, high_b|high_a, low_b)\);' '' test_device
mutant bf16_halves_swapped 'b\[0\]\.r\[1\] = r\[1\]; b\[1\]\.r\[0\] = r\[2\]' 'b[0].r[1] = r[2]; b[1].r[0] = r[1]' test_device
mutant no_masters 'working \&\& first' 'working' test_device

# ---- nvcc ----
[ -n "$nvcc" ] || { skip cuda_nvcc "no nvcc"; finish; }
wait
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
