#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# What the trainers refuse, by verify/tests/refused.tsv, and demos/prepare.py: with one option just inside a run is accepted (--dry_run: it settles all and
# trains nothing), with it just outside it is refused by one sentence, which is compared whole, and writes nothing.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_refused
rm -rf $out; mkdir -p $out/folder
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }

build/make_arith $out/arith.jsonl 60 5 >/dev/null
head -n 40 $out/arith.jsonl >$out/fewer.jsonl
tail -n 60 $out/arith.jsonl | tac >$out/turned.jsonl
echo "not a line of metrics" >$out/text
sed -E 's/"wrong": .*/"label": true}/' $out/arith.jsonl >$out/labelled.jsonl
for i in $(seq 12); do echo "{\"input_ids\": [65, 66, 67], \"loss_mask\": [0, 0, $((i % 2 ? 0 : i > 6))]}"; done >$out/masked.jsonl
printf 'a text without an end\n' >$out/plain.txt
tiny="--num_hidden_layers 1 --hidden_size 32 --num_attention_heads 4 --train_batch_size 12 --max_len 200"
sft="--dataset $out/arith.jsonl --input_key question --output_key answer $tiny"
dpo="--dataset $out/arith.jsonl --prompt_key question --chosen_key answer --rejected_key wrong $tiny"
rm="$dpo"
kto="--dataset $out/labelled.jsonl --input_key question --output_key answer $tiny"
ppo="--prompt_data $out/arith.jsonl --input_key question --label_key answer --reward_rule last_number --num_hidden_layers 1 --hidden_size 32 --num_attention_heads 4 --rollout_batch_size 8 --train_batch_size 8 --n_samples_per_prompt 2 --prompt_max_len 160 --generate_max_len 16"
# a model and a checkpoint after two steps
build/train_sft $sft --max_steps 2 --save_steps 2 --save_path $out/model --ckpt_path $out/saved >$out/saved.log 2>&1 || fail saved "$(tail -n 1 $out/saved.log)"
build/train_rm $rm --eval_dataset $out/fewer.jsonl --max_steps 1 --save_path $out/reward --ckpt_path $out/reward.ckpt >$out/reward.log 2>&1 || fail reward "$(tail -n 1 $out/reward.log)"

# words TEXT: @ is this suite's folder, LONG7 a name of 7 letters
words() {
    local word
    for word in ${1//@/$out}; do
        if [[ $word =~ ^LONG([0-9]+)$ ]]; then printf 'a%.0s' $(seq "${BASH_REMATCH[1]}"); echo; else printf '%s\n' "$word"; fi
    done
}
# run LOG TRAINER OPTIONS: words like NAME=VALUE in front are the environment; "-" alone: without the trainer's own options
run() {
    local log=$1 trainer=$2 own=${!2} environment=() given=()
    mapfile -t given < <(words "$3")
    while [[ ${given[0]} =~ ^[A-Z_]+= ]]; do environment+=("${given[0]}"); given=("${given[@]:1}"); done
    [ "${given[0]}" = - ] && own="" && given=("${given[@]:1}")
    rm -rf $out/save $out/ckpt
    env "${environment[@]}" ci/limit.sh 60 build/train_$trainer $own --save_path $out/save --ckpt_path $out/ckpt "${given[@]}" --dry_run >"$log" 2>&1 </dev/null
}
# refused NAME TRAINER INSIDE OUTSIDE SENTENCE: with the options inside a run is accepted (-: none are known), with those outside not
refused() {
    local name=$1 trainer=$2 inside=$3 outside=$4 sentence=$5 code said
    if [ "$inside" != - ] && ! run $out/inside.log "$trainer" "$inside"; then fail "$name" "inside ($inside): $(grep '^error' $out/inside.log | head -c 300)"; return; fi
    run $out/outside.log "$trainer" "$outside"; code=$?
    said=$(grep '^error: ' $out/outside.log)
    if [ $code -ne 2 ] && [ $code -ne 1 ]; then fail "$name" "outside ($outside): exit code $code"
    elif [ "$said" != "error: $sentence" ]; then fail "$name" "'$said' instead of 'error: $sentence'"
    elif [ -e $out/save ] || [ -e $out/ckpt ]; then fail "$name" "wrote something all the same"
    else ok "$name"; fi
}
# every_row TABLE COUNT
every_row() {
    local listed; listed=$(grep -cvE '^(#|$)' "$1")
    [ "$2" -eq "$listed" ] && [ "$2" -gt 0 ] && ok "rows_of_$1" || fail "rows_of_$1" "$2 of $listed were tried"
}
rows=0
while IFS=$'\t' read -r name trainer inside outside sentence; do
    case $name in "#"* | "") continue ;; esac
    rows=$((rows + 1))
    refused "$name" "$trainer" "$inside" "$outside" "${sentence//@/$out}"
done <verify/tests/refused.tsv
every_row verify/tests/refused.tsv $rows
# the second line of a file
rows=0
while IFS=$'\t' read -r name trainer inside outside sentence; do
    case $name in "#"* | "") continue ;; esac
    rows=$((rows + 1)) option=--dataset more="--train_batch_size 2"
    [ "$trainer" = ppo ] && option=--prompt_data more="$more --rollout_batch_size 2"
    [ "$trainer" = rm ] && more="$more --margin_loss"
    for side in inside outside; do { head -n 1 $out/labelled.jsonl | sed 's/}$/, "wrong": "x"}/'; printf '%s\n' "${!side}"; } >$out/$side.jsonl; done
    refused "data_$name" "$trainer" "$option @/inside.jsonl $more" "$option @/outside.jsonl $more" "$out/outside.jsonl:2: $sentence"
done <verify/tests/refused_data.tsv
every_row verify/tests/refused_data.tsv $rows

if ! command -v python3 >/dev/null; then echo "skip refused_prepare: there is no python3"; skipped=1
else
    # what it refuses, and what its functions give
    for table in refused folder records tokens files; do
        python3 verify/python/test_prepare_$table.py $out/prepare_$table >$out/prepare_$table.log 2>&1
        if last=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' $out/prepare_$table.log); then
            grep -v '^[0-9]* passed' $out/prepare_$table.log
            passed=$((passed + ${last%% *})) last=${last#*, } failed=$((failed + ${last%% *}))
        else fail "refused_prepare_$table" "$(tail -n 1 $out/prepare_$table.log)"; fi
    done
    # the prompt of the last turn in place of the first one's: conversations that are cut would be left out
    mkdir -p $out/planted/tokens
    cp demos/prepare.py $out/planted && cp demos/tokens/*.py $out/planted/tokens
    sed -i 's/d.prompt_tokens = min(d.prompt_tokens, first)/d.prompt_tokens = first/' $out/planted/tokens/encoder.py
    python3 verify/python/test_prepare_refused.py $out/prepare_planted $out/planted >$out/planted.log 2>&1
    if cmp -s demos/tokens/encoder.py $out/planted/tokens/encoder.py; then fail refused_prepare_planted "the line is gone"
    elif grep -q '^FAIL prepare_chats_cut: ' $out/planted.log; then ok refused_prepare_planted
    else fail refused_prepare_planted "$(tail -n 1 $out/planted.log)"; fi
fi

echo "$passed passed, $failed failed${skipped:+, $skipped skipped}"
[ $failed -eq 0 ]
