#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The trainers with a process for every rank, over demos/unix_sockets.h: what a rank writes to memory no other sees.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_processes name=processes
launch() { local trainer=$2; shift 2; exec ci/limit.sh 240 $out/train_$trainer "$@"; }
. verify/support/processes.sh

for trainer in sft dpo kto rm ppo; do
    ${CC:-cc} -std=gnu11 -O2 -march=native -fopenmp -Wall -Wextra -Wno-format-truncation -Wno-missing-field-initializers -I. -Ibuild -Idemos -include stddef.h -include demos/unix_sockets.h -DDEMO_RUN_RANKS=run_processes \
        demos/train_$trainer.c -o $out/train_$trainer -lcjson -lcurl -lz -lm -lpthread 2>$out/$trainer.build.log && [ ! -s $out/$trainer.build.log ] || fail "processes_build_$trainer" "$(head -n 1 $out/$trainer.build.log)"
done

run threads sft sft $texts || fail processes_sft "$(tail -n 1 $out/sft.log)"
worlds=("--ring_attn_size 2" "--ring_attn_size 3 --zero_stage 0" "--ring_attn_size 2 --data_parallel_size 2 --zero_stage 3")
compare sft sft "ema/model.safetensors training_loss.svg" $texts --enable_ema --plot_loss
worlds=("--ring_attn_size 3" "--ring_attn_size 2 --data_parallel_size 2 --zero_stage 1")
compare dpo dpo ckpt/reference.safetensors $pairs --pretrain $out/sft --precompute_ref
compare kto kto "" $labelled --pretrain $out/sft
compare rm rm config.json $pairs --pretrain $out/sft
compare ppo ppo critic/model.safetensors $prompts --pretrain $out/sft --reward_pretrain $out/rm.one --reward_rule last_number --save_value_network
compare grpo ppo "" $prompts --eval_dataset $out/eval.jsonl --pretrain $out/sft --reward_rule last_number --advantage_estimator group_norm --n_samples_per_prompt 2 --dynamic_filtering --pretrain_data $out/arith.jsonl
goes_on
interrupted
killed 1 '^error: .*rank 1.*'
fails

# processes of a launcher, and a program that cannot be one rank among them: they would overwrite each other's files
for launcher in WORLD_SIZE OMPI_COMM_WORLD_SIZE PMI_SIZE SLURM_STEP_NUM_TASKS; do
    export $launcher=4
    RANK=1 run threads alone sft $texts; code=$?
    unset $launcher
    [ $code -eq 2 ] && [ "$(grep -c '^error: ' $out/alone.log)" = 1 ] && grep -q "$launcher is 4, but this program was built without NCCL" $out/alone.log && [ ! -e $out/alone ] && ok refuse_$launcher || fail refuse_$launcher "exit code $code: $(tail -n 1 $out/alone.log)"
done
export WORLD_SIZE=1
RANK=0 run threads single sft $texts --enable_ema --plot_loss && same world_size_1 single sft.one || fail world_size_1 "$(tail -n 1 $out/single.log)"
summary
