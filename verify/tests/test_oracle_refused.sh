#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# What seqpar-verify refuses, by verify/tests/oracle_refused.tsv: with one word or number just inside it judges, with that just outside it says
# one sentence, which is compared whole, and writes nothing. Each sentence of its sources is in the table, or excused there.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_oracle_refused table=verify/tests/oracle_refused.tsv awk=${AWK:-awk}
oracle=$PWD/build/seqpar-verify
rm -rf $out; mkdir -p $out/empty
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }

# ---- dumps and models ----
gen() { local name=$1; shift; $oracle gen --out $out/$name "$@" >$out/gen.log 2>&1 || fail "gen_$name" "$(tail -n 1 $out/gen.log)"; }
gen sft --sp 2 --tokens 13 --docs 2
gen dpo --sp 2 --tokens 13 --docs 2 --objective dpo
gen one --sp 2 --tokens 61 --docs 2
gen other --sp 2 --tokens 73 --docs 2 --seed 2
gen two --sp 2 --tokens 14 --docs 2 --accumulation 2
# model NAME KEY VALUE: that of sft with one more key in its config.json
model() { cp -r $out/sft/model $out/"$1"; sed -i "s/{/{\n  \"$2\": $3,/" $out/"$1"/config.json; }
model dropped attention_dropout 0.125
model undropped attention_dropout 0
model window sliding_window 5
sed -i 's/LlamaForCausalLM/MistralForCausalLM/; s/"llama"/"mistral"/' $out/window/config.json
# lora NAME DROPOUT MORE: adapters of rank 2 of its q_proj; MORE: a tensor that is of none
lora() {
    mkdir $out/"$1"; python3 - $out/"$1" "$2" "${3:-}" <<'PY' || fail "lora_$1" "not written"
import json, struct, sys
folder, dropout, more = sys.argv[1:]
json.dump(dict(peft_type="LORA", r=2, lora_alpha=4, lora_dropout=float(dropout), target_modules=["q_proj"]), open(folder + "/adapter_config.json", "w"))
root = "base_model.model.model.layers."
shapes = {f"{root}{i}.self_attn.q_proj.lora_{x}.weight": (2, 16) if x == "A" else (16, 2) for i in (0, 1) for x in "AB"}
shapes.update({f"{root}0.self_attn.{more}.lora_A.weight": (2, 16)} if more else {})
header, at = {}, 0
for name in sorted(shapes):
    header[name] = dict(dtype="F32", shape=shapes[name], data_offsets=(at, at + 128))
    at += 128
text = json.dumps(header).encode()
open(folder + "/adapter_model.safetensors", "wb").write(struct.pack("<Q", len(text)) + text + bytes(at))
PY
}
lora lora 0
lora lora_dropped 0.25
lora lora_more 0 k_proj
echo "no report" >$out/text
$oracle ver $out/sft/got --html $out/html >/dev/null 2>&1
python3 verify/python/change_dumps.py $table $out >$out/table 2>$out/python.log || fail oracle_dumps "$(tail -n 1 $out/python.log)"

# ---- rows ----
# words TEXT: @ is this suite's folder, DOTS7 and ONES7 are ./ and 1, seven times
words() {
    local word many
    for word in ${1//@/$out}; do
        if [[ $word =~ ^(.*)(DOTS|ONES)([0-9]+)$ ]]; then
            printf -v many '%*s' "${BASH_REMATCH[3]}" ""
            case ${BASH_REMATCH[2]} in DOTS) many=${many// /./} ;; *) many=${many// /1,} many=${many%,} ;; esac
            printf '%s\n' "${BASH_REMATCH[1]}$many"
        else printf '%s\n' "$word"; fi
    done
}
# sentence TEXT FOLDER FOLDER: whole, with the dumps for # and ##, and the first 300 letters of a word for CUT(WORD)
sentence() {
    local text=${1//##/$3} word
    text=${text//#/$2} text=${text//@/$out}
    if [[ $text =~ ^(.*)CUT\((.*)\)(.*)$ ]]; then word=$(words "${BASH_REMATCH[2]}"); text=${BASH_REMATCH[1]}${word:0:300}${BASH_REMATCH[3]}; fi
    printf '%s' "$text"
}
# run LOG WORDS; FULL in front: where nothing can be written
run() {
    local log=$1 given to=$out/said
    mapfile -t given < <(words "$2")
    [ "${given[0]}" = FULL ] && to=/dev/full && given=("${given[@]:1}")
    rm -rf $out/out $out/page* $out/a $out/b
    ci/limit.sh 60 $oracle "${given[@]}" >$to 2>"$log" </dev/null
}
# refused NAME CODE INSIDE OUTSIDE SENTENCE
refused() {
    local name=$1 code=$2 inside=$3 outside=$4 sentence=$5 is said
    if [ "$inside" != - ]; then
        run $out/inside.log "$inside"; is=$?
        case $is in 0 | 1 | 4) ;; *) fail "$name" "inside ($inside): exit code $is, $(head -c 300 $out/inside.log)"; return ;; esac
    fi
    run $out/outside.log "$outside"; is=$?
    said=$(cat $out/outside.log)
    if [[ $sentence = *rank\?.* ]]; then said=$(sed -E 's/rank[0-9]+\./rank?./' <<<"$said"); fi # folders have no order
    if [ $is -ne "$code" ]; then fail "$name" "outside ($outside): exit code $is, not $code: $said"
    elif [ "$said" != "error: $sentence" ]; then fail "$name" "'$said' instead of 'error: $sentence'"
    elif [ -e $out/out ] || [ -e $out/page.html ] || compgen -G "$out/out.partial*" >/dev/null; then fail "$name" "wrote something all the same"
    else ok "$name"; fi
}
rows=0
while IFS=$'\t' read -r name code inside outside sentence; do
    rows=$((rows + 1))
    mapfile -t dumps < <(grep -oE "$out/d[0-9]+" <<<"$outside")
    refused "$name" "$code" "$inside" "$outside" "$(sentence "$sentence" "${dumps[0]}" "${dumps[1]}")"
done <$out/table
listed=$(grep -cvE '^([#=-]|$)' $table)
[ $rows -eq "$listed" ] && [ $rows -gt 0 ] && ok "oracle_rows ($rows)" || fail oracle_rows "$rows of $listed were tried"

# ---- no sentence without a row ----
said=$($awk -f verify/support/sentences.awk $table verify/seqpar_verify.c verify/oracle/*/*.h 2>$out/sentences.log) && [ -z "$said" ] && ok "oracle_sentences ($(cat $out/sentences.log))" || { fail oracle_sentences "no row has what follows"; echo "$said"; }
printf 'static int f(void) {\n    seqpar_fail(e, SEQPAR_ERR_SIZE, x ? "%%s: nobody tries %%lld"\n        " of these" : "%%s is %%g", text);\n}\n' >$out/planted.h
said=$($awk -f verify/support/sentences.awk $table $out/planted.h 2>/dev/null | grep -c planted.h)
[ "$said" = 1 ] && ok oracle_sentences_sees || fail oracle_sentences_sees "$said of 1 planted sentence is named"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
