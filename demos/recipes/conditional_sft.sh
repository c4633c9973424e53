#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# conditional_sft.sh - N texts for each of BATCH prompts are learnt, all of them, each behind its reward in words; then the model is
# asked for texts of a high one.
#
#     MODEL=sft PROMPTS=prompts.jsonl REWARD="--reward_pretrain rm" OUT=csft demos/recipes/conditional_sft.sh
#
# MODEL    folder of the model that begins          REWARD   what scores: --reward_pretrain FOLDERS, --remote_rm_url URL,
# PROMPTS  .jsonl; KEY (question) holds the prompt           or --reward_rule last_number --label_key answer
# OUT      folder of all that is made               N (4), BATCH (1024), WANTED (<rm_score>: 5.00)
# TRAIN, GENERATE, BOTH  further options of the trainer, of generate, of both (--ring_attn_size 2 --bf16)
#
# A run that was killed goes on where it was when it is started again, and ends with the same bytes.
. "$(dirname "$0")/steps.sh"
round=0
# the reward follows the prompt as WANTED does: nothing but a blank behind it
texts scored "$MODEL" --n_samples_per_prompt "${N:-4}" --post_processor csft --reward_template '{input}<rm_score>: {reward} '
train model sft --pretrain "$MODEL" --dataset "$OUT/scored.jsonl" --input_key input --output_key output
texts asked "$OUT/model" --enable_csft --csft_prompt "${WANTED:-<rm_score>: 5.00}"
