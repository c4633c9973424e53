# shellcheck shell=bash
# SPDX-License-Identifier: MIT OR Unlicense
# What shell suites share, which source it: how tests are counted, a tiny model with a tokenizer, and tables of rows that are
# typed. S is this source tree, B its build, F what is made, out the suite's folder, P a python with tokenizers.
# shellcheck disable=SC2154 # the suite sets them
passed=0 failed=0 skipped=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }
end() {
    if [ $skipped -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"; else echo "$passed passed, $failed failed"; fi
    [ $failed -eq 0 ]; exit
}
# tiny_model SUITE: F/arith.jsonl, records of make_arith; F/bytes, a model of a step; F/words, the same with a tokenizer
tiny_model() {
    cd "$F" || exit 1
    "$B/make_arith" arith.jsonl 24 5 >/dev/null
    # shellcheck disable=SC2086
    "$B/train_sft" --dataset arith.jsonl --input_key question --output_key answer --num_hidden_layers 1 --hidden_size 32 --num_attention_heads 4 \
        --num_key_value_heads 2 $R --save_path words >made.log 2>&1 || { fail "$1_made" "$(tail -n 1 made.log)"; end; }
    cp -r words bytes
    echo '{}' >words/tokenizer.json
    [ -z "$P" ] || $P - words <<'WORDS' || { fail "$1_words" "no tokenizer was made"; end; }
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
    cd "$S" || exit 1
}

# ---- rows: name, words (a line of bash), exit code and a regular expression that a line matches; more of them ----

# row NUMBER: runs it; leaves what it says in NUMBER.log and its exit code in NUMBER.code
row() {
    local folder=$out/rows/$1
    mkdir "$folder"; cd "$folder" || exit 1
    "$S/ci/limit.sh" 60 bash -c "$(cat "$folder.sh")" >"$folder.log" 2>&1 </dev/null
    echo $? >"$folder.code"
}
export -f row
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
# rows SUITE TABLE NEEDS: types every row in an empty folder, and counts it; those whose names match NEEDS need P
rows() {
    local line name input names=() count=0 i wrong
    export out
    while IFS= read -r line; do
        case $line in '#'* | '') continue ;; esac
        IFS=$'\t' read -r name input _ <<<"$line"
        if [ -z "$P" ] && [[ $name =~ $3 ]]; then skip "$1_$name" "no python3 here has tokenizers and jinja2"; continue; fi
        names[count]=$name
        printf '%s\n' "$input" >"$out/rows/$count.sh"
        cut -f 3- <<<"$line" | tr '\t' '\n' >"$out/rows/$count.wants"
        count=$((count + 1))
    done <"$2"
    seq 0 $((count - 1)) | xargs -P 2 -n 1 bash -c 'row "$0"'
    for ((i = 0; i < count; i++)); do
        wrong=$(judge $i)
        if [ -z "$wrong" ]; then ok "$1_${names[i]}"; else fail "$1_${names[i]}" "$wrong"; fi
    done
}
