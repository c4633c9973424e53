# shellcheck shell=bash
# SPDX-License-Identifier: MIT OR Unlicense
# For a suite that reads it: makes one good input of each kind for $targets, in folders of $out. build/seqpar-verify makes the dumps.
seed() { mkdir -p $out/$1; printf -- "$3" > $out/$1/$2; }
tensors='{"__metadata__":{"step":"3","seed":"42","train_batch_size":"4","documents":"9","optimizer_t":"3","extra":"0","extra_1":"0","reference":"0123456789abcdef"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[1,2],"data_offsets":[8,12]}}'
for target in safetensors checkpoint; do seed $target good "\\x$(printf %02x ${#tensors})\0\0\0\0\0\0\0$tensors\0\0\x80\x3f\0\0\0\x40\x80\x3f\0\x40"; done
seed data text '{"input": "a", "output": "b"}\n{"input": "\\u00e9", "output": ""}\n'
seed data ids '{"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [0, 1, 1]}\n{"input_ids": [4], "loss_mask": [0]}\n'
seed pairs text '{"prompt": "p", "chosen": "a b", "rejected": "a c", "margin": 0.5}\n'
seed pairs ids '{"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}\n{"chosen_input_ids": [1, 2], "chosen_labels": [-100, 2], "rejected_input_ids": [1, 3], "rejected_loss_mask": [0, 1]}\n'
seed pairs labelled '{"input": "a", "output": "b", "label": true}\n{"input_ids": [1, 2], "labels": [-100, 2], "label": "0"}\n'
seed config v4 '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 96, "vocab_size": 259, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": null, "tie_word_embeddings": false}'
seed config v5 '{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 259, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "sliding_window": 4, "use_sliding_window": false}'
seed options good '--prompt_data\na.jsonl\n--reward_rule=last_number\n--label_key\nanswer\n--max_len\n64\n--adam_betas\n0.9\n0.95\n--packing_samples\n--learning_rate=1e-3\n--ring_attn_func\nzigzag_ring'
seed reward good '{"rewards": [0.5, -1, 2e3]}'
# two ranks of a step, small
mkdir -p $out/dump
for objective in sft dpo; do
    rm -rf $out/made; build/seqpar-verify gen --out $out/made --sp 2 --tokens 7 --docs 2 --objective $objective >/dev/null
    size=$(stat -c %s $out/made/got/rank0.safetensors)
    { printf "\\x$(printf %02x $((size % 256)))\\x$(printf %02x $((size / 256 % 256)))\\x$(printf %02x $((size / 65536)))"; cat $out/made/got/rank0.safetensors $out/made/got/rank1.safetensors; } > $out/dump/$objective
done
