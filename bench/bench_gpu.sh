#!/bin/sh
# SPDX-License-Identifier: MIT OR Unlicense
# make bench-gpu: builds bench_gpu for the GPU that is there and runs it with PyTorch as its peer. Skipped without one.
# DTYPE=f32 for another storage type than bf16; BENCH_SECONDS for another limit; BENCH_RESULTS=1 writes the page into bench/results/.
cd "$(dirname "$0")/.." || exit 1
if ! gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0 2>/dev/null); then echo "bench-gpu is skipped: nvidia-smi finds no GPU"; exit 0; fi
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader -i 0)
pages=build/bench
[ "$BENCH_RESULTS" = 1 ] && pages=bench/results
mkdir -p build/bench "$pages"
"${1:-make}" --no-print-directory build/on_gpu_bench_gpu || exit 1
exec build/on_gpu_bench_gpu --seconds "${BENCH_SECONDS:-400}" --dtype "${DTYPE:-bf16}" --peer bench/peer_torch_gpu.py --gpu "$gpu" --driver "$driver" \
    --page "$pages/$(echo "$gpu" | tr -c 'A-Za-z0-9\n' '_').md"
