#!/bin/sh
# SPDX-License-Identifier: MIT OR Unlicense
# make demo: the same training on 1 rank and on 4, and whether their bits agree; then DPO on 4.
set -e
out=build/demo
rm -rf "$out"
mkdir -p "$out/sp1" "$out/sp4" "$out/dpo"
build/make_arith "$out/arith.jsonl" 4000 7
train() {
    ranks=$1
    echo "training on $ranks rank(s), zigzag ring, packed rows"
    build/train_sft --dataset "$out/arith.jsonl" --input_key question --output_key answer --packing_samples \
        --max_len 256 --pack_len 512 --train_batch_size 24 --max_steps 110 --learning_rate 4e-3 --num_hidden_layers 2 --hidden_size 96 \
        --ring_attn_size "$ranks" --logging_steps 40 --save_path "$out/sp$ranks" --metrics_path "$out/sp$ranks/metrics.jsonl"
}
train 1
train 4
echo "preferring right answers to wrong ones (DPO), 4 ranks"
build/train_dpo --dataset "$out/arith.jsonl" --prompt_key question --chosen_key answer --rejected_key wrong --pretrain "$out/sp4" --packing_samples \
    --max_len 256 --pack_len 512 --train_batch_size 16 --max_steps 12 --learning_rate 5e-4 --ring_attn_size 4 --logging_steps 4 --save_path "$out/dpo" --metrics_path "$out/dpo/metrics.jsonl"
build/compare_runs "$out/sp1" "$out/sp4" "$out/dpo" "$out"
