#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# make check-gpu: the device suites, make verify and a trainer on a GPU, and compute-sanitizer over the first. Skipped without one.
cd "$(dirname "$0")/.." || exit 1
if ! nvidia-smi -L >/dev/null 2>&1; then echo "skip gpu: nvidia-smi finds no GPU"; echo "0 passed, 0 failed, 1 skipped"; exit 0; fi
failed=0 passed=0 skipped=0
run() { # NAME COMMAND...
    local name=$1 began; shift
    began=$(date +%s)
    if timeout 400 "$@" >build/gpu_"$name".log 2>&1; then passed=$((passed + 1)); echo "ok gpu_$name ($(($(date +%s) - began)) s): $(tail -n 1 build/gpu_"$name".log)"
    else failed=$((failed + 1)); echo "FAIL gpu_$name: $(grep -m 1 -E '^FAIL|ERROR|error' build/gpu_"$name".log || tail -n 1 build/gpu_"$name".log)"; fi
}
run device build/on_gpu_test_device
run attn build/on_gpu_test_attn
run queue build/on_gpu_test_queue
run verify build/on_gpu_verify --device cuda
if [ -x build/on_gpu_test_nccl_gpus ]; then run nccl build/on_gpu_test_nccl_gpus # the conformance suite, a rank for every GPU
else echo "skip gpu_nccl: there is no NCCL"; skipped=$((skipped + 1)); fi
run cublas build/on_gpu_test_cublas # is a row's sum the same at any place of cuBLAS's tile?
run verify_cublas env TEST_CUBLAS=1 build/on_gpu_verify --device cuda
if [ -x build/09_cudnn_attention ]; then run cudnn build/09_cudnn_attention
else echo "skip gpu_cudnn: there is no cuDNN (pip's nvidia-cudnn-cu13, or CUDNN=folder)"; skipped=$((skipped + 1)); fi
if command -v compute-sanitizer >/dev/null 2>&1; then
    for tool in memcheck racecheck synccheck; do run $tool compute-sanitizer --error-exitcode 1 --tool $tool build/on_gpu_test_device; done
else echo "skip gpu_sanitizer: compute-sanitizer is not installed"; skipped=$((skipped + 1)); fi

# A trainer with a process for every GPU, over NCCL, saves the bytes of a trainer that nobody launched.
train() { # NAME RANKS
    build/cuda_train_sft --device cuda --dataset build/gpu_arith.jsonl --input_key question --output_key answer --packing_samples --max_len 200 --pack_len 300 --train_batch_size 12 \
        --max_steps 4 --num_hidden_layers 2 --hidden_size 64 --ring_attn_size "$2" --save_path build/gpu_train_"$1" --ckpt_path build/gpu_train_"$1"/ckpt
}
launched() { # RANKS: as torchrun starts them
    local rank pid pids="" wrong=0
    rm -rf build/gpu_train_"$1"
    for ((rank = 0; rank < $1; rank++)); do
        WORLD_SIZE=$1 RANK=$rank LOCAL_RANK=$rank MASTER_ADDR=127.0.0.1 MASTER_PORT=$PORT train "$1" "$1" & pids="$pids $!"
    done
    for pid in $pids; do wait "$pid" || wrong=1; done
    [ $wrong -eq 0 ] && cmp build/gpu_train_"$1"/model.safetensors build/gpu_train_alone/model.safetensors
}
export -f train launched
export PORT=$((20000 + $$ % 10000))
build/make_arith build/gpu_arith.jsonl 60 5 >/dev/null
run train env -u WORLD_SIZE bash -c 'train alone 1'
if ! ldd build/cuda_train_sft | grep -q libnccl; then echo "skip gpu_train_nccl: build/cuda_train_sft was built without NCCL"; skipped=$((skipped + 1))
else
    run train_nccl_1 bash -c 'launched 1'
    if [ "$(nvidia-smi -L | wc -l)" -ge 2 ]; then run train_nccl_2 bash -c 'launched 2'
    else echo "skip gpu_train_nccl_2: there is one GPU"; skipped=$((skipped + 1)); fi
fi
if [ $skipped -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"; else echo "$passed passed, $failed failed"; fi
[ $failed -eq 0 ]
