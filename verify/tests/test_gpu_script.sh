#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# ci/gpu.sh without a GPU: on a folder of stand-ins for the programs and tools it rows up what passed, failed, hung, was skipped or
# left out, within its limits, and writes its files; without a GPU it says so in one line.
cd "$(dirname "$0")/../.." || exit 1
out=$PWD/build/test_gpu_script
rm -rf $out; mkdir -p $out/bundle $out/bin
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
stand_in() { printf '#!/bin/bash\n%s\n' "$2" >"$out/$1"; chmod +x "$out/$1"; }

stand_in bin/nvidia-smi 'case "$*" in *name*) echo "NVIDIA Made Up" ;; *) echo 1.2.3 ;; esac'
stand_in bundle/verify 'echo "zigzag  ring"; echo "first DPO loss 0.693147180559945286 = -log(sigmoid(0)): bits"'
stand_in bundle/test_attn 'echo "ok a"; echo "FAIL test_b: 3 | 4 \"differ\""; echo "1 passed, 1 failed"; exit 1'
stand_in bundle/test_device 'echo "begun"; sleep 60'
stand_in bundle/test_queue 'echo "2 passed, 0 failed"'
stand_in bundle/test_cublas 'kill -SEGV $$'
stand_in bundle/bench_gpu 'echo "{\"cases\": []}" >build/bench/gpu.json; echo "# page" >bench.md; echo >>bench.md; echo "| what |" >>bench.md; echo "3 of 3 cases are correct"'
stand_in bundle/make_arith 'touch "$1"'
for trainer in sft dpo; do stand_in bundle/train_$trainer 'while [ $# -gt 1 ]; do [ "$1" = --save_path ] && echo same >"$2/model.safetensors"; shift; done'; done
stand_in bundle/compare_runs 'echo "identical bits: yes"'
# What the script calls is what make gpu-bundle builds; cuDNN's and NCCL's only where these are.
make -Bn NVCC=nvcc gpu-bundle >$out/bundle.log 2>&1
missing=$(grep -oE '"\$bundle/[a-z_]+' ci/gpu.sh | sort -u | sed 's#.*/##' | grep -vxE 'peer_torch_gpu|cudnn_attention|test_nccl_gpus|train_sft_nccl' | while read -r program; do grep -q -- "-o build/gpu/$program" $out/bundle.log || echo "$program"; done)
[ -z "$missing" ] && ok bundle_is_complete || fail bundle_is_complete "make gpu-bundle does not build "$missing
# no test_cuda_step, no cudnn_attention, no NCCL, no compute-sanitizer, no ncu

run() { env -u GPU_PARTS PATH="$out/bin:$PATH" "$@" bash ci/gpu.sh $out/bundle $out/out >$out/log 2>&1; }
row() { awk -v part="$1" '$1 == part { line = $0 } END { print line }' $out/log; }
rows() { [[ "$(row "$1")" =~ ^$1\ +$2\ +[0-9]+\ s\ +.*$3 ]] && ok "row_$1" || fail "row_$1" "$(row "$1")"; } # PART RESULT SAYS
began=$(date +%s)
run GPU_LIMIT=3; code=$?
[ $code -eq 1 ] && ok exit_code || fail exit_code "$code: $(tail -n 1 $out/log)"
[ $(($(date +%s) - began)) -lt 40 ] && ok a_part_that_hangs_is_ended || fail a_part_that_hangs_is_ended "$(($(date +%s) - began)) s"
rows verify ok 'log\(sigmoid\(0\)\): bits'
rows attn FAIL 'exit code 1: FAIL test_b: 3 / 4 "differ"'
rows device FAIL 'not done in 3 s; last: begun'
[[ "$(row device)" =~ ^device\ +FAIL\ +[3-9]\ s ]] && ok limit_holds || fail limit_holds "$(row device)"
rows queue ok '2 passed, 0 failed'
rows step skipped 'test_cuda_step is not there'
rows cublas FAIL 'exit code'
rows train ok 'identical bits: yes'
rows memcheck skipped 'compute-sanitizer is not there'
rows ncu skipped 'ncu is not there'
rows bench ok '3 of 3 cases are correct'
[ "$(tail -n 1 $out/log)" = "6 passed, 3 failed, 7 skipped" ] && ok verdict || fail verdict "$(tail -n 1 $out/log)"
files=$(cd $out/out && ls | paste -sd' ')
[ "$files" = "NVIDIA_Made_Up.md bench.json gpu.json logs.txt" ] && ok files || fail files "$files"
page=$out/out/NVIDIA_Made_Up.md
[ "$(grep -cE '^\| (verify|attn|device|train|bench) \| (ok|FAIL) \| [0-9]+ \| ' $page)" = 5 ] && grep -q '^## Speed' $page && grep -q '^| what |' $page && grep -q '^zigzag  ring' $page && ok page || fail page "$(head -n 12 $page | tr '\n' ' ')"
if command -v python3 >/dev/null 2>&1; then
    python3 -c 'import json, sys; d = json.load(open(sys.argv[1])); assert d["gpu"] == "NVIDIA Made Up" and len(d["parts"]) == 16 and d["parts"][1]["result"] == "FAIL"' $out/out/gpu.json 2>$out/json.log && ok json || fail json "$(tail -n 1 $out/json.log)"
fi
run GPU_SECONDS=0
rows bench 'left out' 'the 0 s are over'
run GPU_PARTS="queue verify"; code=$?
[ $code -eq 0 ] && [ "$(tail -n 1 $out/log)" = "2 passed, 0 failed" ] && ok some_parts || fail some_parts "exit code $code: $(tail -n 1 $out/log)"

refused() { # NAME TEXT SETTING: exit code 2, one line, nothing is run
    run "$3"; code=$?
    [ $code -eq 2 ] && [ "$(wc -l <$out/log)" = 1 ] && grep -qF -- "$2" $out/log && ok "refuses_$1" || fail "refuses_$1" "exit code $code: $(head -n 1 $out/log)"
}
refused part "GPU_PARTS names 'verfy'; the parts are verify" "GPU_PARTS=attn verfy"
refused seconds "GPU_SECONDS is '4m'; give whole seconds" GPU_SECONDS=4m
refused limit "GPU_LIMIT is '-3'; give whole seconds" GPU_LIMIT=-3

stand_in bin/nvidia-smi 'echo "NVIDIA-SMI has failed" >&2; exit 9'
run; code=$?
[ $code -eq 3 ] && [ "$(wc -l <$out/log)" = 1 ] && grep -q 'finds no GPU' $out/log && ok no_gpu || fail no_gpu "exit code $code: $(head -n 1 $out/log)"
bash ci/gpu.sh $out/nothing >$out/log 2>&1; code=$?
[ $code -eq 2 ] && grep -q 'make gpu-bundle' $out/log && ok no_folder || fail no_folder "exit code $code: $(head -n 1 $out/log)"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
