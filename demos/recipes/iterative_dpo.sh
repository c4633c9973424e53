#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# iterative_dpo.sh - ROUNDS times: N texts for each of the next BATCH prompts, the best is preferred to the worst (DPO). The reference
# is always the model that begins.
#
#     MODEL=sft PROMPTS=prompts.jsonl REWARD="--reward_pretrain rm" OUT=dpo demos/recipes/iterative_dpo.sh
#
# MODEL    folder of the model that begins          REWARD   what scores: --reward_pretrain FOLDERS, --remote_rm_url URL,
# PROMPTS  .jsonl; KEY (question) holds the prompt           or --reward_rule last_number --label_key answer
# OUT      folder of all that is made               ROUNDS (5), N (8), BATCH (1024)
# TRAIN, GENERATE, BOTH  further options of the trainer, of generate, of both (--ring_attn_size 2 --bf16)
#
# A run that was killed goes on where it was when it is started again, and ends with the same bytes.
. "$(dirname "$0")/steps.sh"
model=$MODEL
for ((round = 0; round < ${ROUNDS:-5}; round++)); do
    texts round$round/pairs "$model" --n_samples_per_prompt "${N:-8}" --post_processor iter_dpo
    train round$round/model dpo --pretrain "$model" --ref_pretrain "$MODEL" --dataset "$OUT/round$round/pairs.jsonl" --prompt_key prompt
    model=$OUT/round$round/model
done
