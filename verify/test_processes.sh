#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The trainers with a process for every rank, over demos/unix_sockets.h: what a rank writes to memory no other sees. Weights and
# metrics are those of the same trainer with threads, or one rank's; Ctrl-C of one process stops all of them.
cd "$(dirname "$0")/.." || exit 1
out=build/test_processes
rm -rf $out; mkdir -p $out
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }

for trainer in sft dpo kto rm ppo; do
    ${CC:-cc} -std=gnu11 -O2 -march=native -fopenmp -Wall -Wextra -Wno-format-truncation -Wno-missing-field-initializers -I. -Ibuild -Idemos -Idemos/trainer -include stddef.h -include demos/unix_sockets.h -DDEMO_RUN_RANKS=run_processes \
        demos/train_$trainer.c -o $out/train_$trainer -lcjson -lcurl -lz -lm -lpthread 2>$out/$trainer.build.log && [ ! -s $out/$trainer.build.log ] || fail "processes_build_$trainer" "$(head -n 1 $out/$trainer.build.log)"
done

build/make_arith $out/arith.jsonl 120 5 >/dev/null
build/make_arith $out/eval.jsonl 12 6 >/dev/null
awk '{ sub(/"wrong": .*/, ""); label = NR % 3 ? "true" : "false"; print $0 "\"label\": " label "}" }' $out/arith.jsonl > $out/labelled.jsonl
shape="--packing_samples --max_len 200 --pack_len 420 --num_hidden_layers 1 --hidden_size 32 --num_attention_heads 4 --omp_threads 1 --logging_steps 1000 --lr_scheduler constant --warmup_steps 0 --micro_train_batch_size 2"
texts="--dataset $out/arith.jsonl --eval_dataset $out/eval.jsonl --input_key question --output_key answer --train_batch_size 8 --max_steps 3 --learning_rate 2e-3"
pairs="--dataset $out/arith.jsonl --eval_dataset $out/eval.jsonl --prompt_key question --chosen_key answer --rejected_key wrong --train_batch_size 6 --max_steps 3 --learning_rate 2e-3"
labelled="--dataset $out/labelled.jsonl --input_key question --output_key answer --train_batch_size 8 --max_steps 3 --learning_rate 2e-3"
prompts="--prompt_data $out/arith.jsonl --input_key question --label_key answer --prompt_max_len 160 --generate_max_len 24 --rollout_batch_size 6 --train_batch_size 6 --max_steps 3"

# run WHERE NAME TRAINER OPTIONS...; WHERE: build, ranks are threads, or $out, they are processes
run() { local where=$1 name=$2 trainer=$3; shift 3; timeout -k 5 120 $where/train_$trainer $shape --save_path $out/$name --ckpt_path $out/$name/ckpt --metrics_path $out/$name.jsonl "$@" >$out/$name.log 2>&1; }
metrics() { sed -E 's/, "(tokens_per_second|generate_seconds).*//' "$1"; }
# same NAME GOT WANT FILES...: these files of two runs, and the metrics
same() {
    local name=$1 got=$2 want=$3 file; shift 3
    for file in model.safetensors "$@"; do cmp -s $out/$got/$file $out/$want/$file || { fail "$name" "$file differs or is missing: $(tail -n 1 $out/$got.log)"; return; }; done
    if [ "$(metrics $out/$got.jsonl)" = "$(metrics $out/$want.jsonl)" ]; then ok "$name"; else fail "$name" "metrics differ"; fi
}

# compare STAGE TRAINER FILES OPTIONS...: threads of one rank, then processes in every world
run build sft sft $texts || fail processes_sft "$(tail -n 1 $out/sft.log)"
worlds=("--ring_attn_size 2" "--ring_attn_size 3 --zero_stage 0" "--ring_attn_size 2 --data_parallel_size 2 --zero_stage 1")
compare() {
    local stage=$1 trainer=$2 files=$3 world i=0; shift 3
    run build $stage.one $trainer "$@" || { fail "processes_$stage" "$(tail -n 1 $out/$stage.one.log)"; return; }
    for world in "${worlds[@]}"; do
        run $out $stage.$((++i)) $trainer "$@" $world || fail "processes_$stage $world" "exit code $?"
        same "processes_$stage $world" $stage.$i $stage.one $files
    done
}
compare sft sft "ema/model.safetensors training_loss.svg" $texts --enable_ema --plot_loss
worlds=("--ring_attn_size 3" "--ring_attn_size 2 --data_parallel_size 2 --zero_stage 1")
compare dpo dpo ckpt/reference.safetensors $pairs --pretrain $out/sft --precompute_ref
compare kto kto "" $labelled --pretrain $out/sft
compare rm rm config.json $pairs --pretrain $out/sft
compare ppo ppo critic/model.safetensors $prompts --pretrain $out/sft --reward_pretrain $out/rm.one --reward_rule last_number --save_value_network
compare grpo ppo "" $prompts --eval_dataset $out/eval.jsonl --pretrain $out/sft --reward_rule last_number --advantage_estimator group_norm --n_samples_per_prompt 2 --dynamic_filtering --pretrain_data $out/arith.jsonl

# half a run of two processes, the rest by four: the weights and the moments of the whole run
run build whole sft $texts --max_steps 6 --save_steps 6 --enable_ema
run $out half sft $texts --save_steps 3 --ring_attn_size 2 --enable_ema || fail processes_resume "$(tail -n 1 $out/half.log)"
run $out half sft $texts --max_steps 6 --save_steps 6 --enable_ema --load_checkpoint --ring_attn_size 2 --data_parallel_size 2 || fail processes_resume "$(tail -n 1 $out/half.log)"
for file in model.safetensors ema/model.safetensors ckpt/global_step6/optimizer.safetensors ckpt/global_step6/average.safetensors; do cmp -s $out/half/$file $out/whole/$file && ok "processes_resume $file" || fail "processes_resume $file" "differs from the whole run's"; done

# Ctrl-C of one process, which is not rank 0: all stop at the same step, and rank 0 says so
children() { sed -nE "s/^([0-9]+) \(.*\) [A-Z] $1 .*/\1/p" /proc/[0-9]*/stat 2>/dev/null | sort -n; }
run build long sft $texts --max_steps 400
timeout -k 5 120 $out/train_sft $shape $texts --max_steps 400 --save_steps 5 --ring_attn_size 3 --save_path $out/stopped --ckpt_path $out/stopped/ckpt >$out/stopped.log 2>&1 & runner=$!
for _ in $(seq 1 600); do [ -e $out/stopped/ckpt/latest ] && break; sleep 0.05; done
kill -INT "$(children "$(children $runner)" | sed -n 2p)"
wait $runner
if grep -q '^interrupted after step' $out/stopped.log && [ ! -e $out/stopped/model.safetensors ]; then ok "processes_interrupt $(grep -o 'after step [0-9]*' $out/stopped.log)"; else fail processes_interrupt "$(tail -n 1 $out/stopped.log)"; fi
run $out stopped sft $texts --max_steps 400 --ring_attn_size 2 --load_checkpoint || fail processes_goes_on "$(tail -n 1 $out/stopped.log)"
cmp -s $out/stopped/model.safetensors $out/long/model.safetensors && ok processes_goes_on || fail processes_goes_on "weights differ from those of the whole run"

# a process that is killed: the others name it and end, what was saved before stays whole
timeout -k 5 120 $out/train_sft $shape $texts --max_steps 4000 --save_steps 5 --ring_attn_size 3 --save_path $out/killed --ckpt_path $out/killed/ckpt >$out/killed.log 2>&1 & runner=$!
for _ in $(seq 1 600); do [ -e $out/killed/ckpt/latest ] && break; sleep 0.05; done
ranks=$(children "$(children $runner)")
kill -KILL "$(sed -n 2p <<<"$ranks")"
wait $runner; code=$?
left=$(for rank in $ranks; do [ -e /proc/$rank ] && echo $rank; done)
if [ $code -eq 1 ] && [ -z "$left" ] && grep -q '^error: .*rank 1' $out/killed.log && [ ! -e $out/killed/model.safetensors ]; then ok "processes_killed $(grep -m 1 '^error: ' $out/killed.log)"
else fail processes_killed "exit code $code, left behind: ${left:-none}: $(tail -n 1 $out/killed.log)"; fi
run $out killed sft $texts --max_steps 400 --ring_attn_size 2 --load_checkpoint || fail processes_killed_goes_on "$(tail -n 1 $out/killed.log)"
[ "$(cat $out/killed/ckpt/latest)" != "" ] && cmp -s $out/killed/model.safetensors $out/long/model.safetensors && ok processes_killed_goes_on || fail processes_killed_goes_on "weights differ from those of the whole run"

# a failure of one process is said once, and ends all
: > $out/file
run $out failed sft $texts --ring_attn_size 3 --metrics_path $out/file/metrics; code=$?
[ $code -eq 1 ] && [ "$(grep -c '^error: ' $out/failed.log)" = 1 ] && grep -q 'cannot open .*metrics: Not a directory' $out/failed.log && ok processes_failure || fail processes_failure "exit code $code: $(grep -m 1 error $out/failed.log)"

# processes of a launcher, and a program that cannot be one rank among them: they would overwrite each other's files
WORLD_SIZE=4 RANK=1 run build alone sft $texts; code=$?
[ $code -eq 2 ] && [ "$(grep -c '^error: ' $out/alone.log)" = 1 ] && grep -q 'WORLD_SIZE is 4, but this program was built without NCCL' $out/alone.log && [ ! -e $out/alone ] && ok refuse_world_size || fail refuse_world_size "exit code $code: $(tail -n 1 $out/alone.log)"
WORLD_SIZE=1 RANK=0 run build single sft $texts --enable_ema --plot_loss && same world_size_1 single sft.one || fail world_size_1 "$(tail -n 1 $out/single.log)"

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
