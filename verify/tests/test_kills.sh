#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Two trainers want one folder, and the first is killed: at a call that changes a folder or makes a file last (every one of them
# can be chosen: verify/support/kill_at.c), or at any time. The second is refused while the first lives, goes on from what it left, and
# ends with the bits of the undisturbed run; nothing half done stays behind. Either has ranks of its own, in number and ZeRO stage.
#   KILLS=24     kill points, spread over all
#   KILL_SEED=1  where they begin
cd "$(dirname "$0")/../.." || exit 1
out=build/test_kills kills=${KILLS:-24} seed=${KILL_SEED:-1}
rm -rf $out; mkdir -p $out
passed=0 failed=0 refused=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
RANDOM=$seed
export OMP_WAIT_POLICY=passive # the program need not start itself again

${CC:-cc} -std=gnu11 -O1 -Wall -Wextra -shared -fPIC verify/support/kill_at.c -o $out/kill_at.so -ldl || { echo "FAIL kills_build: kill_at.c"; echo "0 passed, 1 failed"; exit 1; }
build/make_arith $out/arith.jsonl 120 5 >/dev/null
shape="--packing_samples --num_hidden_layers 1 --cell 16 --hidden_size 32 --num_attention_heads 4 --omp_threads 1 --logging_steps 1000 --max_ckpt_num 2 --save_steps 1"
sft="train_sft $shape --dataset $out/arith.jsonl --input_key question --output_key answer --max_len 200 --pack_len 300 --train_batch_size 8 --max_steps 5 --enable_ema"
ppo="train_ppo $shape --prompt_data $out/arith.jsonl --input_key question --label_key answer --prompt_max_len 160 --generate_max_len 8 --rollout_batch_size 4 --train_batch_size 2 --reward_rule last_number --max_steps 8 --save_value_network"
files="model.safetensors config.json"
worlds=("" "--ring_attn_size 2" "--ring_attn_size 3 --zero_stage 3" "--ring_attn_size 2 --data_parallel_size 2 --zero_stage 3" "--data_parallel_size 3 --zero_stage 0" "--ring_attn_size 4 --zero_stage 1")

# the undisturbed runs: what they write, in how many calls, in how many milliseconds
declare -A calls span
for kind in sft ppo; do
    began=$(date +%s%N)
    LD_PRELOAD=$PWD/$out/kill_at.so build/${!kind} --ring_attn_size 2 --save_path $out/$kind >$out/$kind.log 2>&1 || fail "kills_$kind" "$(tail -n 1 $out/$kind.log)"
    span[$kind]=$((($(date +%s%N) - began) / 1000000))
    calls[$kind]=$(sed -n 's/^kill_at: \([0-9]*\) calls/\1/p' $out/$kind.log)
    [ "${calls[$kind]:-0}" -gt 100 ] || fail "kills_$kind" "only '${calls[$kind]}' calls were seen"
done

# the second trainer: asks again until it is let in and comes to its end
second() { # KIND
    local code=2
    for _ in $(seq 1 500); do
        build/${!1} $theirs --save_path $out/run --load_checkpoint >$out/second.log 2>&1; code=$?
        [ $code -eq 2 ] && grep -qE '^error: (ckpt|save)_path .* is in use by ' $out/second.log || break
        refused=$((refused + 1))
        sleep 0.02
    done
    return $code
}
left() { find $out/run \( -name '*.tmp*' -o -name '*.gone' -o -name lock -o -name '*.other' \) | head -n 3 | tr '\n' ' '; }

exec 2>>$out/shell.log # where bash says who was killed
for i in $(seq 0 $((kills - 1))); do
    kind=sft; [ $((i % 3)) -eq 2 ] && kind=ppo
    rm -rf $out/run; mkdir -p $out/run
    ours=${worlds[$((RANDOM % ${#worlds[@]}))]}; case $((RANDOM % 3)) in 0) ours="$ours --sharded_checkpoint" ;; 1) ours="$ours --async_save" ;; esac
    theirs=${worlds[$((RANDOM % ${#worlds[@]}))]}
    if [ $((i % 4)) -eq 3 ]; then
        at=$((RANDOM % (${span[$kind]} + 20))) point="after $at ms"
        build/${!kind} $ours --save_path $out/run --load_checkpoint >$out/first.log 2>&1 & first=$!
        { sleep "$(printf '0.%03d' $at)"; kill -KILL $first 2>/dev/null; } 2>/dev/null &
    else
        at=$((1 + (i * ${calls[$kind]} / kills + RANDOM % (${calls[$kind]} / kills + 1)) % ${calls[$kind]})) point="before call $at of ${calls[$kind]}"
        KILL_AT=$at LD_PRELOAD=$PWD/$out/kill_at.so build/${!kind} $ours --save_path $out/run --load_checkpoint >$out/first.log 2>&1 & first=$!
    fi
    for _ in $(seq 1 100); do [ -e $out/run/checkpoints_${kind} ] || ! kill -0 $first 2>/dev/null && break; sleep 0.005; done
    second $kind; code=$?
    wait $first 2>/dev/null; gone=$?
    bad=""
    for file in $files $([ $kind = sft ] && echo ema/model.safetensors || echo critic/model.safetensors); do cmp -s $out/run/$file $out/$kind/$file || bad="$file differs from the undisturbed run's"; done
    newest=$(cat $out/run/checkpoints_$kind/latest)
    [ -e $out/run/checkpoints_$kind/$newest/model.safetensors ] && ! cmp -s "$out/run/checkpoints_$kind/$newest/optimizer.safetensors" "$out/$kind/checkpoints_$kind/$newest/optimizer.safetensors" && bad="the moments of $newest differ"
    [ "$(ls -d $out/run/checkpoints_$kind/global_step* | wc -l)" -le 2 ] || bad="more than 2 checkpoints are left"
    if [ $code -ne 0 ]; then fail "kill_$kind $point" "the second ends with $code: $(tail -n 1 $out/second.log | cut -c1-300)"
    elif [ $gone -ne 137 ] && [ $gone -ne 0 ] && [ $gone -ne 2 ]; then fail "kill_$kind $point" "the first ends with $gone: $(tail -n 1 $out/first.log | cut -c1-300)"
    elif [ -n "$bad" ]; then fail "kill_$kind $point" "$bad"
    elif [ -n "$(left)" ]; then fail "kill_$kind $point" "left behind: $(left)"
    else ok "kill_$kind $point, ${ours:-one rank}, then ${theirs:-one rank}"; fi
done

[ $refused -gt 0 ] && ok "kills_refused $refused times" || fail kills_refused "the two never met"

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
