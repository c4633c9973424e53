#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# rejection_sampling.sh - ROUNDS times: N texts for each of the next BATCH prompts, the best of each is learnt (SFT).
#
#     MODEL=sft PROMPTS=prompts.jsonl REWARD="--reward_pretrain rm" OUT=rs demos/recipes/rejection_sampling.sh
#
# MODEL    folder of the model that begins          REWARD   what scores: --reward_pretrain FOLDERS, --remote_rm_url URL,
# PROMPTS  .jsonl; KEY (question) holds the prompt           or --reward_rule last_number --label_key answer
# OUT      folder of all that is made               ROUNDS (3), N (4), BATCH (1024)
# TRAIN, GENERATE, BOTH  further options of the trainer, of generate, of both (--ring_attn_size 2 --bf16)
#
# A run that was killed goes on where it was when it is started again, and ends with the same bytes.
. "$(dirname "$0")/steps.sh"
model=$MODEL
for ((round = 0; round < ${ROUNDS:-3}; round++)); do
    texts round$round/best "$model" --n_samples_per_prompt "${N:-4}" --post_processor rs
    train round$round/model sft --pretrain "$model" --dataset "$OUT/round$round/best.jsonl" --input_key input --output_key output
    model=$OUT/round$round/model
done
