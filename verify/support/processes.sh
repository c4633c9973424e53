# SPDX-License-Identifier: MIT OR Unlicense
# processes.sh - what suites share whose ranks are processes (test_processes.sh, test_mpi.sh). They set `out` and `name`, and define
#   launch RANKS TRAINER OPTIONS...   a trainer with so many processes
# Weights and metrics are those of the same trainer with threads, or one rank's.
rm -rf $out; mkdir -p $out
passed=0 failed=0 skipped=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }

build/make_arith $out/arith.jsonl 120 5 >/dev/null
build/make_arith $out/eval.jsonl 12 6 >/dev/null
awk '{ sub(/"wrong": .*/, ""); label = NR % 3 ? "true" : "false"; print $0 "\"label\": " label "}" }' $out/arith.jsonl > $out/labelled.jsonl
shape="--packing_samples --max_len 200 --pack_len 420 --num_hidden_layers 1 --hidden_size 32 --num_attention_heads 4 --omp_threads 1 --logging_steps 1000 --lr_scheduler constant --warmup_steps 0 --micro_train_batch_size 2"
texts="--dataset $out/arith.jsonl --eval_dataset $out/eval.jsonl --input_key question --output_key answer --train_batch_size 8 --max_steps 3 --learning_rate 2e-3"
pairs="--dataset $out/arith.jsonl --eval_dataset $out/eval.jsonl --prompt_key question --chosen_key answer --rejected_key wrong --train_batch_size 6 --max_steps 3 --learning_rate 2e-3"
labelled="--dataset $out/labelled.jsonl --input_key question --output_key answer --train_batch_size 8 --max_steps 3 --learning_rate 2e-3"
prompts="--prompt_data $out/arith.jsonl --input_key question --label_key answer --prompt_max_len 160 --generate_max_len 24 --rollout_batch_size 6 --train_batch_size 6 --max_steps 3 --actor_learning_rate 2e-4 --critic_learning_rate 1e-3"

# run threads|processes NAME TRAINER OPTIONS...
run() {
    local where=$1 name=$2 trainer=$3; shift 3
    local ranks=$(awk '{ p = d = 1; for (i = 1; i < NF; i++) { if ($i == "--ring_attn_size") p = $(i + 1); if ($i == "--data_parallel_size") d = $(i + 1) } print p * d }' <<<"$*")
    local start=(ci/limit.sh 240 build/train_$trainer)
    [ $where = processes ] && start=(launch $ranks $trainer)
    "${start[@]}" $shape --save_path $out/$name --ckpt_path $out/$name/ckpt --metrics_path $out/$name.jsonl "$@" >$out/$name.log 2>&1 & runner=$!
    [ -n "$detached" ] && return
    wait $runner
}
metrics() { sed -E 's/, "(tokens_per_second|generate_seconds).*//' "$1"; }
# same NAME GOT WANT FILES...: these files of two runs, and the metrics
same() {
    local name=$1 got=$2 want=$3 file; shift 3
    for file in model.safetensors "$@"; do cmp -s $out/$got/$file $out/$want/$file || { fail "$name" "$file differs or is missing: $(tail -n 1 $out/$got.log)"; return; }; done
    if [ "$(metrics $out/$got.jsonl)" = "$(metrics $out/$want.jsonl)" ]; then ok "$name"; else fail "$name" "metrics differ"; fi
}

# compare STAGE TRAINER FILES OPTIONS...: one rank, then processes in every world of `worlds`
compare() {
    local stage=$1 trainer=$2 files=$3 world i=0; shift 3
    [ -e $out/$stage.one/model.safetensors ] || run threads $stage.one $trainer "$@" || { fail "${name}_$stage" "$(tail -n 1 $out/$stage.one.log)"; return; }
    for world in "${worlds[@]}"; do
        rm -rf $out/$stage.$((++i)) $out/$stage.$i.jsonl
        run processes $stage.$i $trainer "$@" $world || fail "${name}_$stage $world" "exit code $?"
        same "${name}_$stage $world" $stage.$i $stage.one $files
    done
}

# half a run of two processes, the rest by four: the weights and the moments of the whole run
goes_on() {
    [ -e $out/whole/model.safetensors ] || run threads whole sft $texts --max_steps 6 --save_steps 6 --enable_ema
    run processes half sft $texts --save_steps 3 --sharded_checkpoint --ring_attn_size 2 --enable_ema || fail ${name}_resume "$(tail -n 1 $out/half.log)"
    run processes half sft $texts --max_steps 6 --save_steps 6 --enable_ema --load_checkpoint --ring_attn_size 2 --data_parallel_size 2 || fail ${name}_resume "$(tail -n 1 $out/half.log)"
    for file in model.safetensors ema/model.safetensors ckpt/global_step6/optimizer.safetensors ckpt/global_step6/average.safetensors; do cmp -s $out/half/$file $out/whole/$file && ok "${name}_resume $file" || fail "${name}_resume $file" "differs from the whole run's"; done
    rm -rf $out/half
}

# ranks_of FOLDER: the processes that train into it, the oldest first, but for one that only waits for those it started
ranks_of() {
    local file pid
    for file in $(grep -lazE '^--save_path$' /proc/[0-9]*/cmdline 2>/dev/null); do
        pid=${file//[^0-9]/}
        tr '\0' '\n' <$file 2>/dev/null | grep -qx "$1" && sed -nE 's/^([0-9]+) \((exe|train_.*)\) [A-Z] ([0-9]+) .*/\1 \3/p' /proc/$pid/stat 2>/dev/null
    done | awk '{ parent[$1] = $2; has[$2] = 1 } END { for (pid in parent) if (!(pid in has)) print pid }' | sort -n
}
await_checkpoint() { for _ in $(seq 1 600); do [ -e $out/$1/ckpt/latest ] && break; sleep 0.05; done; }
detached_run() { detached=1; run "$@"; detached=; }
finish() { wait $runner; }

# a signal to one process, which is not rank 0: all stop at the same step, and rank 0 says so; the run goes on to the same weights
interrupted() {
    [ -e $out/long/model.safetensors ] || run threads long sft $texts --max_steps 400
    detached_run processes stopped sft $texts --max_steps 400 --save_steps 5 --ring_attn_size 3
    await_checkpoint stopped
    kill -INT "$(ranks_of $out/stopped | sed -n 2p)"
    finish
    if grep -q '^interrupted after step' $out/stopped.log && [ ! -e $out/stopped/model.safetensors ]; then ok "${name}_interrupt $(grep -o 'after step [0-9]*' $out/stopped.log | head -n 1)"; else fail ${name}_interrupt "$(tail -n 1 $out/stopped.log)"; fi
    run processes stopped sft $texts --max_steps 400 --ring_attn_size 2 --load_checkpoint || fail ${name}_goes_on "$(tail -n 1 $out/stopped.log)"
    cmp -s $out/stopped/model.safetensors $out/long/model.safetensors && ok ${name}_goes_on || fail ${name}_goes_on "weights differ from those of the whole run"
    rm -rf $out/stopped
}

# killed CODE PATTERN: a process is killed; the others end with this code (any: not 0), a line that matches names it, and what was
# saved before stays whole
killed() {
    detached_run processes killed sft $texts --max_steps 4000 --save_steps 5 --ring_attn_size 3
    await_checkpoint killed
    local code left
    kill -KILL "$(ranks_of $out/killed | sed -n 2p)"
    finish; code=$?
    for _ in $(seq 1 40); do [ -z "$(ranks_of $out/killed)" ] && break; sleep 0.1; done
    left=$(ranks_of $out/killed)
    if { [ $code = $1 ] || { [ $1 = any ] && [ $code -ne 0 ]; }; } && [ -z "$left" ] && grep -qE "$2" $out/killed.log && [ ! -e $out/killed/model.safetensors ]; then ok "${name}_killed $(grep -m 1 -oE "$2" $out/killed.log)"
    else fail ${name}_killed "exit code $code, left behind: ${left:-none}: $(tail -n 1 $out/killed.log)"; fi
    run processes killed sft $texts --max_steps 400 --ring_attn_size 2 --load_checkpoint || fail ${name}_killed_goes_on "$(tail -n 1 $out/killed.log)"
    [ "$(cat $out/killed/ckpt/latest)" != "" ] && cmp -s $out/killed/model.safetensors $out/long/model.safetensors && ok ${name}_killed_goes_on || fail ${name}_killed_goes_on "weights differ from those of the whole run"
    rm -rf $out/killed
}

# a failure of one process is said once, and ends all
fails() {
    : > $out/file
    run processes failed sft $texts --ring_attn_size 3 --metrics_path $out/file/metrics; local code=$?
    [ $code -eq 1 ] && [ "$(grep -c '^error: ' $out/failed.log)" = 1 ] && grep -q 'cannot open .*metrics: Not a directory' $out/failed.log && ok ${name}_failure || fail ${name}_failure "exit code $code: $(grep -m 1 error $out/failed.log)"
}
summary() { echo "$passed passed, $failed failed$([ $skipped -gt 0 ] && echo ", $skipped skipped")"; [ $failed -eq 0 ]; }
