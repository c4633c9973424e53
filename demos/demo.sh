#!/bin/sh
# SPDX-License-Identifier: MIT OR Unlicense
# make demo: the same training on 1 rank and on 4, and whether their bits agree; then DPO on 4.
set -e
out=build/demo
rm -rf "$out"
mkdir -p "$out/sp1" "$out/sp4" "$out/dpo"
build/make_arith "$out/arith.jsonl" 4000 7
# Sets `used`: the processor seconds of all programs so far. Of these a subshell knows nothing: no pipe here and no $(...).
count() {
    times >"$out/times"
    used=$(awk 'NR == 2 { for (i = 1; i <= 2; i++) { split($i, t, "m"); sum += 60 * t[1] + t[2] } print sum }' "$out/times")
}
train() { # RANKS: sets `seconds`, of the processor
    ranks=$1
    count; before=$used
    echo "training on $ranks rank(s), zigzag ring, packed rows"
    build/train_sft --dataset "$out/arith.jsonl" --input_key question --output_key answer --packing_samples \
        --max_len 256 --pack_len 512 --train_batch_size 24 --max_steps 110 --learning_rate 4e-3 --num_hidden_layers 2 --hidden_size 96 --cell 32 \
        --ring_attn_size "$ranks" --logging_steps 40 --save_path "$out/sp$ranks" --metrics_path "$out/sp$ranks/metrics.jsonl"
    count; seconds=$(awk "BEGIN { print $used - $before }")
}
train 1; seconds1=$seconds
train 4; seconds4=$seconds
echo "preferring right answers to wrong ones (DPO), 4 ranks"
build/train_dpo --dataset "$out/arith.jsonl" --prompt_key question --chosen_key answer --rejected_key wrong --pretrain "$out/sp4" --packing_samples \
    --max_len 256 --pack_len 512 --train_batch_size 16 --max_steps 12 --learning_rate 5e-4 --cell 32 --ring_attn_size 4 --logging_steps 4 --save_path "$out/dpo" --metrics_path "$out/dpo/metrics.jsonl"
build/compare_runs "$out/sp1" "$out/sp4" "$out/dpo" "$out" "$seconds1" "$seconds4"
