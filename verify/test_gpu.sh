#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# make check-gpu: the device suites and make verify on a GPU, and compute-sanitizer over the first. Skipped without one.
cd "$(dirname "$0")/.." || exit 1
if ! nvidia-smi -L >/dev/null 2>&1; then echo "skip gpu: nvidia-smi finds no GPU"; echo "0 passed, 0 failed, 1 skipped"; exit 0; fi
failed=0 passed=0
run() { # NAME COMMAND...
    local name=$1 began; shift
    began=$(date +%s)
    if timeout 400 "$@" >build/gpu_"$name".log 2>&1; then passed=$((passed + 1)); echo "ok gpu_$name ($(($(date +%s) - began)) s): $(tail -n 1 build/gpu_"$name".log)"
    else failed=$((failed + 1)); echo "FAIL gpu_$name: $(grep -E '^FAIL|ERROR|error' build/gpu_"$name".log | head -n 1)"; fi
}
run device build/on_gpu_test_device
run attn build/on_gpu_test_attn
run queue build/on_gpu_test_queue
run verify build/on_gpu_verify --device cuda
run cublas build/on_gpu_test_cublas # is a row's sum the same at any place of cuBLAS's tile?
run verify_cublas env TEST_CUBLAS=1 build/on_gpu_verify --device cuda
if command -v compute-sanitizer >/dev/null 2>&1; then
    for tool in memcheck racecheck synccheck; do run $tool compute-sanitizer --error-exitcode 1 --tool $tool build/on_gpu_test_device; done
else echo "skip gpu_sanitizer: compute-sanitizer is not installed"; fi
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
