#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The program seqpar: every row of verify/program.tsv is typed in an empty folder, and its exit code and what it says are
# compared. Rows may use B (the build), F (what is made below) and the functions that are exported. Where no python has tokenizers,
# rows that make tokens (tokens_*, run_*) are skipped.
# shellcheck disable=SC2016,SC2317 # functions are called by rows, in another shell
cd "$(dirname "$0")/.." || exit 1
export S=$PWD
export B=$S/build F=$S/build/test_program/made
out=$S/build/test_program
rm -rf "$out"; mkdir -p "$F" "$out/rows"
passed=0 failed=0 skipped=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }
end() {
    if [ $skipped -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"; else echo "$passed passed, $failed failed"; fi
    [ $failed -eq 0 ]; exit
}
export OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE=1
P=$(ci/python_with.sh tokenizers jinja2) || P=
export PYTHON=$P

# ---- what rows type ----
seqpar() { "$B/seqpar" "$@"; }
# page COMMAND...: what a command of a page becomes, where its names are known
page() { seqpar --print_command --local_names "$F/names.tsv" --cache_dir . "$@"; }
# hosts LINES: a hostfile, and the command that reads it
hosts() { printf '%b' "$1" >h; page deepspeed --hostfile=h src/train.py --stage sft $D "${@:2}"; }
export D="--dataset $F/arith.jsonl --pretrain $F/words --input_key question --output_key answer"
# A step that teaches something, on copies d.jsonl and w of data and model
export R="--omp_threads 1 --train_batch_size 8 --max_steps 1 --warmup_steps 0 --save_path out"
copies() { cp "$F/arith.jsonl" d.jsonl && cp -r "$F/words" w; }
sft() { seqpar train_sft --dataset d.jsonl --pretrain w --input_key question --output_key answer $R "$@"; }
# made OPTIONS...: how many token files that run made
made() { sft "$@" >said 2>&1 || { cat said; return 1; }; grep -c '^tokens: .*prepare\.py' said; }
# until_it CONDITION [TURNS]: waits for it, for a minute or so many tenths of a second
until_it() {
    local turn=0
    until eval "$1"; do
        [ $((++turn)) -lt "${2:-600}" ] || { echo "waited in vain: $1"; return 1; }
        sleep 0.1
    done
}
# meant PROGRAM OPTIONS...: which of them seqpar --help PROGRAM lists without saying what they mean
meant() {
    local option wrong=0
    seqpar --help "$1" >help || return; shift
    for option; do grep -qE "^  $option +[a-z,]+ +(= --[a-z_]+: )?[^ ]+ [^ ]+" help || { echo "nothing of $option"; wrong=1; }; done
    [ $wrong = 0 ] && [ $# -gt 1 ] && echo "$# options are meant"
}
# the options of OpenRLHF's pages, by the rows above
page_options() { grep -E '^page_(sp|readme|article)' "$S/verify/program.tsv" | cut -f2 | grep -oE -- ' --[a-z0-9_]+' | sort -u | grep -vxE -- ' --(address|module|no|runtime)'; }
export -f seqpar page hosts copies sft made until_it meant page_options

# ---- what rows read: records of make_arith, a tiny model, a tokenizer for it ----
cd "$F" || exit 1
"$B/make_arith" arith.jsonl 24 5 >/dev/null
awk '{ sub(/"wrong": .*/, ""); print $0 "\"label\": " (NR % 3 ? "true" : "false") "}" }' arith.jsonl >labelled.jsonl
# shellcheck disable=SC2086
"$B/train_sft" --dataset arith.jsonl --input_key question --output_key answer --num_hidden_layers 1 --hidden_size 32 --num_attention_heads 4 \
    --num_key_value_heads 2 $R --save_path words >made.log 2>&1 || { fail program_made "$(tail -n 1 made.log)"; end; }
cp -r words bytes
echo '{}' >words/tokenizer.json
if [ -n "$P" ]; then
    $P - words <<'WORDS' || { fail program_words "no tokenizer was made"; end; }
import json, sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
names = sorted(pre_tokenizers.ByteLevel.alphabet())
t = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
t.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|pad|>"])
t.save(sys.argv[1] + "/tokenizer.json")
template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
json.dump({"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "chat_template": template}, open(sys.argv[1] + "/tokenizer_config.json", "w"))
WORDS
fi
for name in meta-llama/Meta-Llama-3-8B OpenRLHF/Llama-3-8b-sft-mixture OpenRLHF/Llama-3-8b-rm-mixture meta-llama/Llama-2-70b-chat-hf \
    OpenLLMAI/Llama-2-7b-sft-model-ocra-500k meta-llama/Llama-2-7b-hf; do printf '%s\t%s\n' $name "$F/words"; done >names.tsv
for name in Open-Orca/OpenOrca OpenRLHF/preference_dataset_mixture2_and_safe_pku OpenRLHF/prompt-collection-v0.1 Dahoas/full-hh-rlhf \
    tasksource/oasst1_pairwise_rlhf_reward Anthropic/hh-rlhf lmsys/chatbot_arena_conversations openai/webgpt_comparisons json@hub; do
    printf '%s\t%s\n' $name "$F/arith.jsonl"
done >>names.tsv
cd "$S" || exit 1

# row NUMBER: runs it; leaves what it says in NUMBER.log and its exit code in NUMBER.code
row() {
    local folder=$out/rows/$1
    mkdir "$folder"; cd "$folder" || exit 1
    "$S/ci/limit.sh" 60 bash -c "$(cat "$folder.sh")" >"$folder.log" 2>&1 </dev/null
    echo $? >"$folder.code"
}
export -f row; export out
names=() count=0
while IFS= read -r line; do
    case $line in '#'* | '') continue ;; esac
    IFS=$'\t' read -r name input _ <<<"$line"
    if [ -z "$P" ] && [[ $name =~ ^(tokens|run)_ ]]; then skip "program_$name" "no python3 here has tokenizers and jinja2"; continue; fi
    names[count]=$name
    printf '%s\n' "$input" >"$out/rows/$count.sh"
    cut -f 3- <<<"$line" | tr '\t' '\n' >"$out/rows/$count.wants"
    count=$((count + 1))
done <verify/program.tsv
seq 0 $((count - 1)) | xargs -P 2 -n 1 bash -c 'row "$0"'
# judge NUMBER: what is wrong; nothing if it is as the row wants it
judge() {
    local code want regex log=$out/rows/$1.log first=1
    code=$(cat "$out/rows/$1.code" 2>/dev/null)
    while IFS= read -r want; do
        regex=$want
        if [ $first = 1 ]; then
            [ "$code" = "${want%% *}" ] || { echo "exit code $code, not ${want%% *}: $(tail -n 1 "$log" | head -c 200)"; return; }
            regex=${want#* } first=0
        fi
        if [[ $regex = '!'* ]]; then grep -qE -- "${regex#!}" "$log" && { echo "says /${regex#!}/"; return; }
        else grep -qE -- "$regex" "$log" || { echo "not /$regex/: $(tail -n 1 "$log" | head -c 300)"; return; }; fi
    done <"$out/rows/$1.wants"
}
for ((i = 0; i < count; i++)); do
    wrong=$(judge $i)
    if [ -z "$wrong" ]; then ok "program_${names[i]}"; else fail "program_${names[i]}" "$wrong"; fi
done
end
