#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# ci/gpu.sh FOLDER [OUT]: tests and times the CUDA device on a machine with a GPU, in under 8 minutes. FOLDER is what
# `make gpu-bundle` made; nothing is compiled or fetched here. OUT (FOLDER/out) receives gpu.json, a page for
# bench/results/, bench.json, ncu.txt and the logs.
# A part that fails, hangs or lacks its tool is a row of the last table, not a stop. The exit code is 1 if a row says FAIL.
# GPU_SECONDS: for all of it (460). GPU_LIMIT: seconds a part may take at most. GPU_PARTS="verify attn": only these.
# BENCH_RESULTS=1: the page also goes to bench/results/.
if [ ! -d "$1" ]; then echo "usage: ci/gpu.sh FOLDER [OUT]; FOLDER is build/gpu, made by make gpu-bundle" >&2; exit 2; fi
order="verify attn device train train_bf16 step queue cublas verify_cublas memcheck racecheck cudnn nccl train_nccl ncu bench"
for part in $GPU_PARTS; do
    case " $order " in *" $part "*) ;; *) echo "ci/gpu.sh: GPU_PARTS names '$part'; the parts are $order" >&2; exit 2 ;; esac
done
for limit in GPU_SECONDS GPU_LIMIT BENCH_SECONDS; do
    case ${!limit} in *[!0-9]*) echo "ci/gpu.sh: $limit is '${!limit}'; give whole seconds" >&2; exit 2 ;; esac
done
bundle=$(cd "$1" && pwd) repository=$(pwd)
mkdir -p "${2:-$bundle/out}" || exit 2
out=$(cd "${2:-$bundle/out}" && pwd)
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 2 # programs write into build/ below
mkdir -p build/bench build/verify rows logs
began=$(date +%s)
if ! gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0 2>/dev/null) || [ -z "$gpu" ]; then
    echo "ci/gpu.sh: nvidia-smi finds no GPU; run it on a machine that has one"
    exit 3
fi
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader -i 0 2>/dev/null)
name=$(echo "$gpu" | tr -c 'A-Za-z0-9\n' '_')

# The folders of cuBLAS, cuDNN and NCCL: the toolkit's, or those of PyTorch's packages.
libraries() {
    ls -d /usr/local/cuda/lib64 /usr/local/cuda-*/lib64 2>/dev/null
    python3 - 2>/dev/null <<'PYTHON'
import glob, importlib.util, os
spec = importlib.util.find_spec("nvidia")
for root in spec.submodule_search_locations if spec else ():
    print(*sorted({os.path.dirname(f) for f in glob.glob(root + "/**/lib*.so.*", recursive=True)}), sep="\n")
PYTHON
}
LD_LIBRARY_PATH=$(libraries | paste -sd: -)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH OMP_WAIT_POLICY=passive

left() { echo $((began + ${GPU_SECONDS:-460} - $(date +%s))); }
row() { # PART RESULT SECONDS WHAT
    printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$(printf %s "$4" | tr '\t\n|' '  /' | cut -c1-400)" >"rows/$1"
    printf '%-16s %-8s %4s s  %s\n' "$1" "$2" "$3" "$(cut -f 4 "rows/$1" | cut -c1-100)"
}
wanted() { [ -z "$GPU_PARTS" ] || [[ " $GPU_PARTS " == *" $1 "* ]]; }
# What a part says of itself: the first failure, else its last line.
says() { { grep -m 1 -E '^FAIL|ERROR|[Ee]rror:|WRONG' "$1" || grep -v '^ *$' "$1" | tail -n 1; } | sed 's/^=* *//'; }
part() { # NAME SECONDS COMMAND...; $tool: what it needs of the machine
    local part=$1 limit=$2 start code; shift 2
    export log=$work/logs/$part.log
    wanted "$part" || return 0
    [ -n "$GPU_LIMIT" ] && [ "$GPU_LIMIT" -lt "$limit" ] && limit=$GPU_LIMIT
    if [ -n "$tool" ] && ! command -v $tool >/dev/null 2>&1; then row "$part" skipped 0 "$tool is not there"; return; fi
    if [ "$(left)" -le 0 ]; then row "$part" "left out" 0 "the ${GPU_SECONDS:-460} s are over"; return; fi
    [ "$(left)" -lt "$limit" ] && limit=$(left)
    if ! command -v "$1" >/dev/null 2>&1 && [ "$(type -t "$1")" != function ]; then row "$part" skipped 0 "$(basename "$1") is not there"; return; fi
    start=$(date +%s)
    if [ "$(type -t "$1")" = function ]; then timeout -k 5 "$limit" bash -c '"$@"' part "$@" >"$log" 2>&1; else timeout -k 5 "$limit" "$@" >"$log" 2>&1; fi
    code=$?
    case $code in
    0) row "$part" ok $(($(date +%s) - start)) "$(says "$log")" ;;
    77 | 127) row "$part" skipped $(($(date +%s) - start)) "$(says "$log")" ;;
    124 | 137) row "$part" FAIL $(($(date +%s) - start)) "not done in $limit s; last: $(tail -n 1 "$log")" ;;
    *) row "$part" FAIL $(($(date +%s) - start)) "exit code $code: $(says "$log")" ;;
    esac
}
# Parts whose time is not measured run beside each other where there are cores: `beside`, then `wait`.
together=$(($(nproc) / 3)); [ $together -ge 1 ] || together=1
beside() {
    while [ "$(jobs -rp | wc -l)" -ge $together ]; do wait -n; done
    part "$@" &
}

# ---- a trainer on 1 rank and on 4: equal bytes; the first DPO loss ----
sft() { # NAME RANKS OPTIONS...
    local folder=$1 ranks=$2; shift 2
    "$bundle/${trainer:-train_sft}" --device cuda --dataset arith.jsonl --input_key question --output_key answer --packing_samples --max_len 256 --pack_len 512 \
        --train_batch_size 24 --max_steps 20 --learning_rate 4e-3 --num_hidden_layers 2 --hidden_size 96 --ring_attn_size "$ranks" --logging_steps 10 \
        --save_path "$folder" --metrics_path "$folder/metrics.jsonl" "$@"
}
dpo() { # NAME RANKS PRETRAIN
    "$bundle/train_dpo" --device cuda --dataset arith.jsonl --prompt_key question --chosen_key answer --rejected_key wrong --pretrain "$3" --packing_samples \
        --max_len 256 --pack_len 512 --train_batch_size 16 --max_steps 6 --learning_rate 5e-4 --ring_attn_size "$2" --logging_steps 4 --save_path "$1" \
        --metrics_path "$1/metrics.jsonl"
}
train() { # auto (fp32) or bf16
    mkdir -p "$1" && cd "$1" && mkdir -p sft1 sft4 dpo1 dpo4 && "$bundle/make_arith" arith.jsonl 2000 7 || return
    sft sft1 1 --param_dtype "$1" && sft sft4 4 --param_dtype "$1" && dpo dpo1 1 sft4 --param_dtype "$1" && dpo dpo4 4 sft4 --param_dtype "$1" || return
    cmp dpo1/model.safetensors dpo4/model.safetensors && "$bundle/compare_runs" sft1 sft4 dpo4 .
}
# A process for each GPU, over NCCL, as torchrun starts them: the bytes of a run that nobody launched.
train_nccl() {
    local gpus rank pid pids="" wrong=0
    gpus=$(nvidia-smi -L | wc -l)
    mkdir -p nccl && cd nccl && mkdir -p alone launched && "$bundle/make_arith" arith.jsonl 2000 7 && sft alone 1 || return
    for ((rank = 0; rank < gpus; rank++)); do
        trainer=train_sft_nccl WORLD_SIZE=$gpus RANK=$rank LOCAL_RANK=$rank MASTER_ADDR=127.0.0.1 MASTER_PORT=29871 sft launched "$gpus" &
        pids="$pids $!"
    done
    for pid in $pids; do wait "$pid" || wrong=$?; done
    [ $wrong -eq 0 ] || return $wrong
    cmp alone/model.safetensors launched/model.safetensors && echo "$gpus GPU(s) over NCCL: the bytes of one alone"
}
verify_part() { "$bundle/verify" --device cuda; }
cublas_verify() { TEST_CUBLAS=1 "$bundle/verify" --device cuda; }
device_suites() { # COMMAND...: what each of them is an argument of
    local suite
    for suite in "$bundle/test_device"*; do "$@" "$suite" || return; done
    awk '/^[0-9]+ passed, / { passed += $1 } END { print passed " passed, 0 failed" }' "$log"
}
sanitize() { # TOOL: the smallest cases of every kernel
    TEST_SMALL=1 device_suites compute-sanitizer --error-exitcode 1 --tool "$1"
}
bench() {
    "$bundle/bench_gpu" --seconds "${BENCH_SECONDS:-150}" --dtype "${DTYPE:-bf16}" --peer "$bundle/peer_torch_gpu.py" --gpu "$gpu" --driver "$driver" --page bench.md
}
profile() { # --kill ends the program: what counts is that kernels were seen
    local job
    for job in forward gradient; do # a forward kernel; those of dq and of dk, dv
        ncu --clock-control none --target-processes application-only --kernel-name-base demangled --kernel-name "regex:${job}_job" \
            --launch-count $([ $job = forward ] && echo 1 || echo 2) --kill yes \
            --section SpeedOfLight --section WarpStateStats --section Occupancy --section LaunchStats --section MemoryWorkloadAnalysis \
            --section ComputeWorkloadAnalysis "$bundle/bench_gpu" --seconds 30 --dtype bf16 --only goals
    done
    # Of each kernel: time, registers, warps of those there is room for, arithmetic of its peak.
    awk '/^  void.*attn_kernel</ { sub(/^.*attn_kernel</, ""); sub(/>>.*/, ">"); name = $0 } /^ *Duration/ { time = $NF } /^ *Compute \(SM\) Thr/ { busy = $NF }
        /^ *Registers Per Thread/ { registers = $NF } /^ *Achieved Occupancy/ { printf "%s%s: %s ms, %s registers, %s %% of the warps, %s %% busy", n++ ? "; " : "", name, time, registers, $NF, busy } END { print ""; exit !n }' "$log"
}
export bundle gpu driver BENCH_SECONDS DTYPE
export -f sft dpo train train_nccl verify_part cublas_verify device_suites sanitize bench profile

echo "$gpu, driver $driver, $(nproc) cores, $together parts beside each other"
beside verify 120 verify_part
beside attn 240 "$bundle/test_attn"
beside device 150 device_suites
beside train 90 train auto
beside train_bf16 90 train bf16
beside step 120 "$bundle/test_cuda_step"
beside queue 120 "$bundle/test_queue"
beside cublas 60 "$bundle/test_cublas"
beside verify_cublas 120 cublas_verify
tool=compute-sanitizer beside memcheck 120 sanitize memcheck
tool=compute-sanitizer beside racecheck 120 sanitize racecheck
beside cudnn 60 "$bundle/cudnn_attention"
beside nccl 90 "$bundle/test_nccl_gpus"
beside train_nccl 90 train_nccl
wait
tool=ncu part ncu 70 profile
part bench 240 bench

# ---- what came of it ----
rows() { for p in $order; do [ -e "rows/$p" ] && cat "rows/$p"; done; }
verdict() { rows | awk -F'\t' '{ n[$2]++ } END { printf "%d passed, %d failed", n["ok"], n["FAIL"]; s = n["skipped"] + n["left out"]; if (s) printf ", %d skipped", s; print "" }'; }
# Our speed over FlashAttention's in the first such line of the benchmark.
ratio() {
    [ -e bench.md ] && awk -F' *[|] *' -v what="$1" '$2 == what && $6 == "flash" && $8 + 0 > 0 { printf "%s at %s of FlashAttention'"'"'s speed, ", what, $8; exit }' bench.md
}
quoted() { sed 's/[\\"]/\\&/g' | tr -d '\000-\010\013-\037'; }
{
    echo "{\"gpu\": \"$gpu\", \"driver\": \"$driver\", \"date\": \"$(date -u +%F)\", \"seconds\": $(($(date +%s) - began)), \"parts\": ["
    rows | quoted | awk -F'\t' '{ printf "%s  {\"part\": \"%s\", \"result\": \"%s\", \"seconds\": %d, \"says\": \"%s\"}", (NR > 1 ? ",\n" : ""), $1, $2, $3, $4 } END { print "\n]}" }'
} >"$out/gpu.json"
{
    echo "# $gpu"
    echo
    echo "<!-- SPDX-License-Identifier: MIT OR Unlicense -->"
    echo
    echo "Summary: $(verdict), $(ratio "attention forward")$(ratio "attention backward")$(date -u +%F)."
    echo
    echo "$(date -u +%F), driver $driver, made by \`bash ci/gpu.sh build/gpu\` in $(($(date +%s) - began)) s."
    echo
    echo "| part | result | seconds | what it says |"
    echo "|---|---|---:|---|"
    rows | awk -F'\t' '{ printf "| %s | %s | %d | %s |\n", $1, $2, $3, $4 }'
    if [ -e logs/verify.log ]; then echo; echo "\`make verify\` on the GPU:"; echo; echo '```'; cat logs/verify.log; echo '```'; fi
    [ -e bench.md ] && sed -e 's/^# .*/## Speed/' bench.md
} >"$out/$name.md"
[ -e build/bench/gpu.json ] && cp build/bench/gpu.json "$out/bench.json"
[ -e logs/ncu.log ] && cp logs/ncu.log "$out/ncu.txt"
for log in logs/*.log; do [ -e "$log" ] && echo "==== $(basename "$log" .log)" && cat "$log"; done >"$out/logs.txt"
echo
rows | awk -F'\t' '{ printf "%-16s %-8s %4d s  %s\n", $1, $2, $3, $4 }' | cut -c1-150
echo "page: $out/$name.md"
[ "$BENCH_RESULTS" = 1 ] && mkdir -p "$repository/bench/results" && cp "$out/$name.md" "$repository/bench/results/"
verdict
! rows | cut -f 2 | grep -q FAIL
