#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The figures of demos/README.md of mending a careless model by GRPO: the command given there, over builds whose fp32 bits differ and over
# seeds. Minutes for each; by hand. Prints a line a run and the range.   verify/tests/claims.sh [SEEDS]
cd "$(dirname "$0")/../.." || exit 1
make --no-print-directory build/options.inc build/make_arith >/dev/null || exit 1
out=build/claims; mkdir -p $out
[ -f $out/careless.jsonl ] || { build/make_arith $out/careless.jsonl 20000 3 0 81; build/make_arith $out/train.jsonl 20000 1; build/make_arith $out/eval.jsonl 500 1 100000; } >/dev/null
recipe=$(awk '/^build\/train_sft --dataset careless/ { on = 1 } /^```$/ { on = 0 } on' demos/README.md | sed -E "s#build/train#\$x/train#; s#(careless|train|eval)\\.jsonl#$out/\\1.jsonl#g; s#--(save_path|pretrain) (careless|mended)#--\\1 \$x/\\2#g")
flags="-std=gnu11 -I. -Ibuild -Idemos -fopenmp"
for seed in ${1:-42 43 44}; do
    for machine in x86-64-v2 x86-64-v3 x86-64-v4; do
        x=$out/$machine.$seed; mkdir -p $x
        ${CC:-cc} $flags -O3 -march=$machine demos/train_sft.c -o $x/train_sft -lcjson -lz -lm -lpthread && ${CC:-cc} $flags -O3 -march=$machine demos/train_ppo.c -o $x/train_ppo -lcjson -lcurl -lz -lm -lpthread || exit 1
        $x/train_sft --help >/dev/null 2>&1 || { echo "$machine: not on this machine"; continue; }
        eval "$(echo "$recipe" | sed -E "s#(--save_path [^ ]+)#\\1 --seed $seed --ckpt_path \$x/ckpt#")" >$x/log 2>&1 || { echo "$machine, seed $seed: $(grep -m 1 error $x/log)"; continue; }
        echo "$machine, seed $seed: $(grep -E 'evaluation' $x/log | head -n 1) ... $(tail -n 1 $x/log)"
    done
done
