#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# yaml files of LLaMA-Factory and axolotl given to the program seqpar: every row of verify/tests/yaml.tsv is typed in an empty folder,
# and its exit code and what it says are compared; and demos/prepare.py against what LLaMA-Factory makes of the same records
# (verify/second/golden_templates.json). Where no python has tokenizers, rows that make tokens (run_*) and these are skipped.
# shellcheck disable=SC2016,SC2317 # functions are called by rows, in another shell
cd "$(dirname "$0")/../.." || exit 1
. verify/support/rows.sh
export S=$PWD
export B=$S/build F=$S/build/test_yaml/made
out=$S/build/test_yaml
rm -rf "$out"; mkdir -p "$F" "$out/rows"
export OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE=1
P=$(ci/python_with.sh tokenizers jinja2) || P=
export PYTHON=$P

# ---- what rows type ----
export R="--omp_threads 1 --train_batch_size 8 --max_steps 1 --warmup_steps 0 --save_path out"
seqpar() { "$B/seqpar" --cache_dir . "$@"; }
# lf SED WORDS...: what LLaMA-Factory's command becomes with a changed x.yaml and these words behind it
lf() { cp -r "$F/data" .; sed "$1" "$F/sft.yaml" >x.yaml; seqpar --print_command llamafactory-cli train x.yaml "${@:2}"; }
# ax SED WORDS...: the same of axolotl
ax() { sed "$1" "$F/ax.yaml" >x.yaml; seqpar --print_command axolotl train x.yaml "${@:2}"; }
# info SED: LLaMA-Factory's command with a changed dataset_info.json
info() { cp -r "$F/data" .; sed -i "$1" data/dataset_info.json; seqpar --print_command llamafactory-cli train "$F/sft.yaml" "${@:2}"; }
# ds JSON: the same with a DeepSpeed file
ds() { echo "$1" >ds.json; lf '$a deepspeed: ds.json' "${@:2}"; }
# written TEXT: a yaml file that holds this and no more
written() { printf '%b' "$1" >x.yaml; seqpar --print_command llamafactory-cli train x.yaml; }
# alike: the model is the same on 1 rank and on 4, typed by hand, and another than before; it needs one.yaml's command
alike() {
    for model in two typed; do cmp one/model.safetensors $model/model.safetensors || return 1; done
    cmp -s one/model.safetensors "$F/words/model.safetensors" && { echo nothing was learnt; return 1; }
    echo the same bytes
}
# try FUNCTION WORD WANT WORD WANT...: FUNCTION WORD says a line like WANT; ok: no error, and what would be run
try() {
    local function=$1
    shift
    while [ $# -gt 0 ]; do
        rm -rf data
        $function "$1" >said 2>&1
        if [ "$2" = ok ]; then grep -q '/train_' said && ! grep -q '^error' said; else grep -qE -- "$2" said; fi || { echo "$function $1: not $2"; cat said; exit 1; }
        shift 2
    done
    echo all
}
export -f try seqpar lf ax info ds written alike

# ---- what rows read ----
tiny_model yaml
cd "$F" || exit 1
mkdir data
cp arith.jsonl data/
awk -F'"' '{ printf "{\"messages\": [{\"role\": \"user\", \"content\": \"%s\"}, {\"role\": \"assistant\", \"content\": \"%s\"}], \"text\": \"%s %s\"}\n", $4, $8, $4, $8 }' \
    arith.jsonl >data/chat.jsonl
cat >data/dataset_info.json <<'END'
{
	"arith": {"file_name": "arith.jsonl", "columns": {"prompt": "question", "response": "answer"}},
  "pairs": {
    "file_name": "arith.jsonl",
    "ranking": true,
    "columns": {"prompt": "question", "chosen": "answer", "rejected": "wrong"}
  },
  "chat": {"file_name": "chat.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"},
           "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}},
  "text": {"file_name": "chat.jsonl", "columns": {"prompt": "text"}},
  "hub": {"hf_hub_url": "org/set", "columns": {"prompt": "question", "response": "answer"}}
}
END
cat >sft.yaml <<END
### model
model_name_or_path: $F/words
stage: sft
do_train: true
finetuning_type: full
dataset: arith
template: chatml
cutoff_len: 300
max_samples: 1000
overwrite_cache: true
sequence_parallel_size: 4
output_dir: one
logging_steps: 10
save_steps: 500
plot_loss: false
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 1.0e-3
num_train_epochs: 1.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
report_to: [none]
END
cat >ax.yaml <<END
base_model: $F/words
datasets:
  - path: $F/data/chat.jsonl
    type: chat_template
sequence_len: 300
sequence_parallel_degree: 4
heads_k_stride: 1
ring_attn_func:
flash_attention: true
micro_batch_size: 4
gradient_accumulation_steps: 2
num_epochs: 1
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 1e-3
warmup_ratio: 0.1
weight_decay: 0.0
val_set_size: 0
bf16: auto
tf32: false
wandb_project:
output_dir: one
END
cd "$S" || exit 1

rows yaml verify/tests/yaml.tsv '^run_'

# ---- records and templates, against LLaMA-Factory itself ----
if [ -z "$P" ]; then skip yaml_templates "no python3 here has tokenizers and jinja2"; end; fi
$P verify/python/test_templates.py "$out/templates" >"$out/templates.log" 2>&1; code=$?
while read -r word line; do
    case $word in
        ok) ok "$line" ;;
        FAIL) fail "${line%%:*}" "${line#*: }" ;;
    esac
done <"$out/templates.log"
[ $code -eq 0 ] || fail yaml_templates "exit code $code: $(tail -n 1 "$out/templates.log")"
end
