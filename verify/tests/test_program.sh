#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The program seqpar: every row of verify/tests/program.tsv is typed in an empty folder, and its exit code and what it says are
# compared. Rows may use B (the build), F (what is made below) and the functions that are exported. Where no python has tokenizers,
# rows that make tokens (tokens_*, run_*) are skipped.
# shellcheck disable=SC2016,SC2317 # functions are called by rows, in another shell
cd "$(dirname "$0")/../.." || exit 1
. verify/support/rows.sh
export S=$PWD
export B=$S/build F=$S/build/test_program/made
out=$S/build/test_program
rm -rf "$out"; mkdir -p "$F" "$out/rows"
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
page_options() { grep -E '^page_(sp|readme|article)' "$S/verify/tests/program.tsv" | cut -f2 | grep -oE -- ' --[a-z0-9_]+' | sort -u | grep -vxE -- ' --(address|module|no|runtime)'; }
export -f seqpar page hosts copies sft made until_it meant page_options
# words KIND MODEL DATA: a line of --print_prepare; fake LINES...: in b the program, and a trainer that says these lines, and runs
words() { echo "{\"option\": \"dataset\", \"words\": [\"--kind\", \"$1\", \"--pretrain\", \"$2\", \"--dataset\", \"$3\", \"--output\", \"o\"]}"; }
fake() {
    mkdir -p b demos/tokens; cp "$B/seqpar" b; : >demos/prepare.py; : >b/lines
    [ $# = 0 ] || printf '%s\n' "$@" >b/lines
    printf '#!/bin/sh\nfor word; do [ "$word" = --print_prepare ] && exec cat "%s/b/lines"; done\necho "run: $0 $*"\n' "$PWD" >b/train_sft
    chmod +x b/train_sft
}
# digest OPTIONS...: is the digest in the name of the token file what another program makes of the same?
digest() {
    local keys="--input_key question --output_key answer" said want
    said=$(page train_sft $keys "$@" 2>&1 | grep -oE -- '--output [^ ]*' | grep -oE '[0-9a-f]{16}')
    want=$("$B/train_sft" $keys "$@" --print_prepare | python3 "$S/verify/python/digest_by_hand.py" "$S/demos/prepare.py")
    if [ -n "$want" ] && [ "$said" = "$want" ]; then echo same; else echo "$said instead of $want"; fi
}
export -f words fake digest

# ---- what rows read ----
tiny_model program
cd "$F" || exit 1
awk '{ sub(/"wrong": .*/, ""); print $0 "\"label\": " (NR % 3 ? "true" : "false") "}" }' arith.jsonl >labelled.jsonl
for name in meta-llama/Meta-Llama-3-8B OpenRLHF/Llama-3-8b-sft-mixture OpenRLHF/Llama-3-8b-rm-mixture meta-llama/Llama-2-70b-chat-hf \
    OpenLLMAI/Llama-2-7b-sft-model-ocra-500k meta-llama/Llama-2-7b-hf; do printf '%s\t%s\n' $name "$F/words"; done >names.tsv
for name in Open-Orca/OpenOrca OpenRLHF/preference_dataset_mixture2_and_safe_pku OpenRLHF/prompt-collection-v0.1 Dahoas/full-hh-rlhf \
    tasksource/oasst1_pairwise_rlhf_reward Anthropic/hh-rlhf lmsys/chatbot_arena_conversations openai/webgpt_comparisons json@hub; do
    printf '%s\t%s\n' $name "$F/arith.jsonl"
done >>names.tsv
cd "$S" || exit 1

rows program verify/tests/program.tsv '^(tokens|run)_'
end
