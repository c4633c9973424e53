#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Every whole-number option of every trainer, and every key of config.json, at sizes nobody means: a run trains, or ends in one
# sentence that names the option; none crashes, hangs, or prints nonsense. Here the three that break most in the four trainers
# whose options differ; with TEST_ALL=1 all of them. BUILD: where the trainers are, if not in build.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_sizes build=${BUILD:-build}
rm -rf $out; mkdir -p $out
passed=0 failed=0
ok() { passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }

$build/make_arith $out/arith.jsonl 12 5 >/dev/null
awk '{ sub(/"wrong": .*/, ""); label = NR % 3 ? "true" : "false"; print $0 "\"label\": " label "}" }' $out/arith.jsonl > $out/labelled.jsonl
sft="--input_key question --output_key answer --dataset $out/arith.jsonl"
pairs="--prompt_key question --chosen_key answer --rejected_key wrong --dataset $out/arith.jsonl"
kto="--input_key question --output_key answer --dataset $out/labelled.jsonl"
ppo="--input_key question --label_key answer --prompt_data $out/arith.jsonl --reward_rule last_number --generate_max_len 4 --prompt_max_len 160 --rollout_batch_size 2 --advantage_estimator reinforce"
common="--max_len 200 --num_hidden_layers 1 --hidden_size 32 --num_attention_heads 4 --train_batch_size 4 --max_steps 1"

# tried NAME WORDS COMMAND...: ends by itself, and where it fails with one sentence that holds one of the words and no negative size
tried() {
    local name=$1 words=$2 code errors; shift 2
    rm -rf $out/ckpt $out/model/checkpoints_*
    ci/limit.sh 60 "$@" >$out/log 2>&1 </dev/null; code=$?
    errors=$(grep -cE '^(error: |libgomp: )' $out/log)
    if [ $code -ge 3 ]; then fail "$name" "exit code $code: $(tail -n 1 $out/log | head -c 200)"
    elif grep -qE 'Sanitizer|runtime error' $out/log; then fail "$name" "$(grep -m 1 -E 'Sanitizer|runtime error' $out/log | head -c 300)"
    elif [ $code -eq 0 ]; then ok
    elif [ "$errors" -ne 1 ]; then fail "$name" "$errors sentences: $(head -n 1 $out/log | head -c 200)"
    elif ! grep -qE "^error: .*($words)" $out/log; then fail "$name" "does not name it: $(grep '^error' $out/log | head -c 300)"
    elif grep -E '^error: ' $out/log | sed -E 's/(is|of) -[0-9]+//' | grep -qE '[ (]-[0-9]{2,}'; then fail "$name" "a size that was never given: $(grep '^error' $out/log | head -c 300)"
    else ok; fi
}

few="1000000000 4611686018427387904 9223372036854775807"
all="0 -1 1 100000 1000000 10000000 100000000 $few 2147483647 2147483648 99999999999999999999"
values=${TEST_ALL:+$all}; values=${values:-$few}
for trainer in sft ppo ${TEST_ALL:+dpo rm kto}; do
    case $trainer in sft) data=$sft;; ppo) data=$ppo;; kto) data="$kto";; *) data=$pairs;; esac
    while read -r option; do
        [ -z "$TEST_ALL" ] && [ $trainer = ppo ] && [ $option != ulysses_size ] && awk -F'\t' -v o="$option" '$1 == o && $4 ~ /sft/ { found = 1 } END { exit !found }' demos/trainer/run/options.tsv && continue # tried with train_sft
        for value in $values; do
            # what there is more of than data, and steps that may well be many, only take their time
            case $option:$value in head_dim:10000*|intermediate_size:10000*|hidden_size:10000*) [ ${#value} -lt 8 ] && continue;; esac # a large model, which may take a while
            case $option in max_steps|generate_max_len|num_episodes|n_samples_per_prompt) [ ${#value} -gt 4 ] && [ ${#value} -lt 11 ] && [ $value -lt 2147483648 ] && continue;; esac
            tried "sizes_$trainer --$option $value" "$option|max_len|memory|$value" $build/train_$trainer $data $common --save_path $out/model --ckpt_path $out/ckpt --$option $value
        done
    done < <(awk -F'\t' -v t=$trainer '$2 == "int" && $3 == "real" && ("," $4 ",") ~ ("," t ",") { print $1 }' demos/trainer/run/options.tsv)
done
[ $failed -eq 0 ] && echo "ok sizes_options"

# ---- config.json: every size at every value, and not whole, not a number, not finite, twice ----
$build/train_sft $sft $common --save_path $out/model --ckpt_path $out/ckpt >$out/log 2>&1 || fail sizes_model "$(tail -n 1 $out/log)"
before=$failed
cp -r $out/model $out/odd
values="0 -1 1 3 1000000000000 1e21 4611686018427387904 1e999 1.5 \"4\" null true [4] {}"
for key in num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size rope_theta rms_norm_eps; do
    for value in $values; do
        sed -E "s/\"$key\": [0-9.e+-]+/\"$key\": $value/" $out/model/config.json > $out/odd/config.json
        tried "sizes_config $key $value" "$key|tensor|heads|head_dim|hidden|vocab|memory|parameters" $build/train_sft $sft $common --pretrain $out/odd --save_path $out/again --ckpt_path $out/ckpt
    done
done
[ $failed -eq $before ] && echo "ok sizes_config"

# ---- less memory than is needed: a sentence, wherever it runs out ----
before=$failed
for megabytes in 60 90 120 180 ${TEST_ALL:+70 80 100 110 130 140 150 160 200 250 300 400}; do
    for more in "--ring_attn_size 500 --omp_threads 1" "--hidden_size 512 --num_hidden_layers 8 --omp_threads 2"; do
        tried "sizes_memory $megabytes MB $more" "memory|threads|thread" bash -c "ulimit -v $((megabytes * 1024)); exec $build/train_sft $sft $common --save_path $out/small --ckpt_path $out/ckpt $more"
    done
done
[ $failed -eq $before ] && echo "ok sizes_memory"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
