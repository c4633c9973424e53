#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# What a new user types: every row of verify/tests/inputs.tsv is run in an empty folder, and its exit code and its words are
# compared. Rows may use S (this folder), B (its build), F (what is made below), P (a python with tokenizers), options of a tiny
# model (M, R, Q, D, K, G) and the functions that are exported. Without such a python rows that need it are skipped.
# shellcheck disable=SC2016,SC2317 # functions are called by rows, in another shell
cd "$(dirname "$0")/../.." || exit 1
. verify/support/rows.sh
export S=$PWD
export B=$S/build F=$S/build/test_inputs/made
out=$S/build/test_inputs
rm -rf "$out"; mkdir -p "$F" "$out/rows"
export OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE=1
P=$(ci/python_with.sh tokenizers jinja2) || P=
export P

# ---- what rows are short for: options of a tiny model, keys of make_arith's records ----
export M="--num_hidden_layers 1 --hidden_size 16 --num_attention_heads 2 --num_key_value_heads 1"
export R="--omp_threads 1 --train_batch_size 8 --lr_scheduler cosine --warmup_steps 0 --save_path out"
export Q="--dataset $F/arith.jsonl --input_key question --output_key answer"
export D="--dataset $F/arith.jsonl --prompt_key question --chosen_key answer --rejected_key wrong"
export K="--dataset $F/labelled.jsonl --input_key question --output_key answer"
export G="--prompt_data $F/arith.jsonl --input_key question --label_key answer --prompt_max_len 160 --generate_max_len 4
    --rollout_batch_size 4 --omp_threads 1 --train_batch_size 4 --max_steps 1 --save_path out"
# c_program: a program on stdin that is compiled against the header, linked with the library and run
c_program() {
    ${CC:-cc} -w -O0 -std=c11 -include "$S/seqpar.h" -x c - -x none "$B/seqpar.o" -o c_program -fopenmp -lcjson -lm -lpthread && ./c_program
}
# api CODE: a main() that checks what it calls by is()
api() {
    c_program <<CODE
#include <stdio.h>
#include <math.h>
#include <string.h>
static seqpar_error error;
static void is(seqpar_status status) { printf("%s: %s\n", seqpar_status_name(status), status ? error.text : ""); }
int main(void) { $1 return 0; }
CODE
}
# ranks A B C D: a step of AdamW on 2 ranks; A stands before the optimizer is opened, B before the step, C before gradients are
# given, D before it ends. Statements see rank, adam, optim, nodes, lr and accumulation.
ranks() {
    c_program <<CODE
#include <stdio.h>
#include <math.h>
#include <string.h>
static const seqpar_tensor table = {"table", 2, 2048, 0, 1, 0};
static seqpar_status rank_main(seqpar_comm *world, void *user) {
    static float gradient[2][4096], params[2][4096];
    const int rank = (int)world->rank;
    double lr = 0.1;
    int64_t accumulation = 1, elements = 4096;
    seqpar_optim_desc adam = {.beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .max_norm = 1, .zero_stage = 1};
    seqpar_step_nodes nodes = {.nodes = gradient[rank], .elements = 4096};
    seqpar_device *device = seqpar_device_cpu(1);
    seqpar_ctx ctx;
    seqpar_optim optim = {0};
    seqpar_status status;
    status = seqpar_ctx_open(&ctx, world, device, 2);
    for (int i = 0; i < 4096; i++) gradient[rank][i] = 1;
    $1
    if (!status) status = seqpar_optim_open(&ctx, &optim, &table, 1, &adam);
    $2
    if (!status) status = seqpar_step_begin_plain(&ctx, &optim, accumulation);
    $3
    if (!status) status = seqpar_step_gradient(&ctx, &optim, &nodes);
    $4
    if (!status) status = seqpar_step_end(&ctx, &optim, params[rank], elements, lr);
    if (!status) printf("rank %d: norm %g, weights %g and %g\n", rank, optim.norm, params[rank][0], params[rank][4095]);
    return status;
}
int main(void) {
    seqpar_error error;
    seqpar_status status = seqpar_run_threads(2, rank_main, NULL, &error);
    if (status) printf("%s: %s\n", seqpar_status_name(status), error.text);
    return status != 0;
}
CODE
}
# model FOLDER OLD NEW: a copy of the tiny model, whose config.json has NEW for OLD
model() { cp -r "${4:-$F/sft}" "$1" && sed -i "s|$2|$3|" "$1/config.json"; }
# tokens RECORD OPTIONS...: prepare.py on one record (lines, where RECORD has some), into t.tokens
tokens() {
    local record=$1; shift
    printf '%b\n' "$record" >t.jsonl; $P "$S/demos/prepare.py" --pretrain "$F/words" --dataset t.jsonl --output t.tokens --workers 1 "$@"
}
# learnt: all of the first document of t.tokens as text, the learnt tokens in [[ ]]
learnt() { $P "$F/learnt.py" t.tokens "$S/demos"; }
# sft RECORD OPTIONS...: a step of train_sft on one record, given as it is
sft() {
    local record=$1; shift
    printf '%b\n' "$record" >t.jsonl
    # shellcheck disable=SC2086
    "$B/train_sft" --dataset t.jsonl $M $R --train_batch_size 1 --max_steps 1 "$@"
}
export -f c_program api ranks model tokens learnt sft

# ---- what rows read ----
cd "$F" || exit 1
"$B/make_arith" arith.jsonl 24 5 >/dev/null
awk '{ sub(/"wrong": .*/, ""); print $0 "\"label\": " (NR % 3 ? "true" : "false") "}" }' arith.jsonl >labelled.jsonl
# shellcheck disable=SC2086
{
    "$B/train_sft" $Q $M $R --max_steps 2 --save_path sft && "$B/train_rm" $D $R --pretrain sft --max_steps 1 --save_path reward &&
        "$B/train_sft" $Q $M $R --max_steps 2 --save_steps 1 --save_path run && "$B/seqpar-verify" gen --out dump --sp 2 &&
        "$B/seqpar-verify" gen --out other --sp 2 --seed 2
} >made.log 2>&1 || { fail inputs_made "$(tail -n 1 made.log)"; end; }
if [ -n "$P" ]; then
    cp -r sft words
    $P - words <<'WORDS' || { fail inputs_words "no tokenizer was made"; end; }
import json, sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
names = sorted(pre_tokenizers.ByteLevel.alphabet())
t = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
t.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|pad|>"])
t.save(sys.argv[1] + "/tokenizer.json")
template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
            "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
json.dump({"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "chat_template": template}, open(sys.argv[1] + "/tokenizer_config.json", "w"))
WORDS
    cat >learnt.py <<'LEARNT'
import struct, sys
raw = open(sys.argv[1], "rb").read()
sections = {}
for i in range(struct.unpack_from("<I", raw, 28)[0]):
    name, _, begin, size, _ = struct.unpack_from("<IIQQQ", raw, 96 + 32 * i)
    sections[name] = raw[begin:begin + size]
sys.path.insert(0, sys.argv[2])
from tokens import token_file
def numbers(name, code): return struct.unpack(f"<{len(sections[name]) // struct.calcsize(code)}{code}", sections[name])
offsets, at = numbers(token_file.OFFSETS, "Q"), numbers(token_file.WORD_OFFSETS, "Q")
said, learning = b"", 0
for id, on in list(zip(numbers(token_file.IDS, "i"), sections[token_file.MASK]))[:offsets[1]] + [(None, 0)]:
    if on != learning: said += b"[[" if on else b"]]"
    learning = on
    if id is not None: said += sections[token_file.WORDS][at[id]:at[id + 1]]
sys.stdout.buffer.write(said.replace(b"\n", b"|") + b"\n")
LEARNT
fi
cd "$S" || exit 1

# row NUMBER: runs it; leaves its words in NUMBER.log and its exit code in NUMBER.code
row() {
    local folder=$out/rows/$1
    mkdir "$folder"; cd "$folder" || exit 1
    "$S/ci/limit.sh" 20 bash -c "$(cat "$folder.sh")" >"$folder.log" 2>&1 </dev/null
    echo $? >"$folder.code"
}
export -f row; export out
names=() wants=() count=0
while IFS=$'\t' read -r kind name input expected _; do
    case $kind in '#'*) continue ;; esac
    names[count]=$name wants[count]=$expected
    printf '%s\n' "$input" >"$out/rows/$count.sh"
    count=$((count + 1))
done <verify/tests/inputs.tsv
seq 0 $((count - 1)) | xargs -P 2 -n 1 bash -c 'row "$0"'
for ((i = 0; i < count; i++)); do
    code=$(cat "$out/rows/$i.code" 2>/dev/null) want=${wants[i]%% *} regex=
    case ${wants[i]} in *' '*) regex=${wants[i]#* } ;; esac
    if [ -z "$P" ] && grep -qE '^tokens |[$]P ' "$out/rows/$i.sh"; then skip "inputs_${names[i]}" "no python3 here has tokenizers and jinja2"
    elif ! [[ $code =~ ^$want$ ]]; then fail "inputs_${names[i]}" "exit code $code, not $want: $(tail -n 1 "$out/rows/$i.log" | head -c 200)"
    elif [ -n "$regex" ] && ! grep -qE -- "$regex" "$out/rows/$i.log"; then
        fail "inputs_${names[i]}" "not /$regex/: $(grep -m 1 error "$out/rows/$i.log" || tail -n 1 "$out/rows/$i.log" | head -c 200)"
    else ok "inputs_${names[i]}"; fi
done
end
