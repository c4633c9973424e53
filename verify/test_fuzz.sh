#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Everything foreign that is read, under libFuzzer with AddressSanitizer and UndefinedBehaviorSanitizer: a second for each
# target here, FUZZ_SECONDS=600 for each by hand. What is found lies in build/fuzz; verify/fuzz/fuzz.c says what the targets are.
cd "$(dirname "$0")/.." || exit 1
out=build/fuzz seconds=${FUZZ_SECONDS:-1}
targets=${FUZZ_TARGETS:-safetensors data pairs config options checkpoint reward dump}
mkdir -p $out
flags="-std=gnu11 -g1 -D_GNU_SOURCE -I. -Ibuild -Idemos -Idemos/trainer -Iverify -Wno-unused-function"
skip() { for target in $targets; do echo "skip fuzz_$target: $1"; done; echo "0 passed, 0 failed, $(echo $targets | wc -w) skipped"; exit 0; }
command -v clang >/dev/null 2>&1 || skip "clang is not installed"
echo 'int LLVMFuzzerTestOneInput(const unsigned char *b, unsigned long n) { (void)b, (void)n; return 0; }' | clang -fsanitize=fuzzer,address,undefined -x c - -o $out/try 2>/dev/null || skip "this clang has no libFuzzer"
clang -O0 $flags -DFUZZ_LIBRARY -c verify/fuzz/fuzz.c -o $out/library.o 2>$out/library.log & library=$!
clang -O1 $flags -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined -c verify/fuzz/fuzz.c -o $out/fuzz.o 2>$out/build.log
clang -O1 $flags -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined -c verify/fuzz/fuzz_dump.c -o $out/dump.o 2>>$out/build.log
wait $library && clang -fsanitize=fuzzer,address,undefined $out/fuzz.o $out/dump.o $out/library.o -o $out/fuzz -lcjson -lcurl -lz -lm -lpthread 2>>$out/build.log || { echo "FAIL fuzz_build: $(cat $out/library.log $out/build.log | grep -m 1 error)"; echo "0 passed, 1 failed"; exit 1; }

# ---- seeds: one good input of each kind, and words that are worth putting in ----
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
printf '"%s"\n' 0.index 0.labels 0.logp 0.rewards 0.groups 0.scores 0.values grad.w local.w part.grad.w objective accumulation input_ids labels loss_mask attention_mask prompt_ids chosen rejected rewards hidden_size rope_parameters __metadata__ data_offsets 1e999 -100 '\\ud800' '\\x1b' '--' > $out/words

passed=0 failed=0
export FUZZ_FOLDER=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$FUZZ_FOLDER"' EXIT
for target in $targets; do
    FUZZ_TARGET=$target ci/limit.sh $((seconds + 120)) $out/fuzz $out/$target -dict=$out/words -max_total_time=$(case $target in dump) echo $((seconds + 4)) ;; *) echo $seconds ;; esac) -max_len=$(case $target in dump) echo 600000 ;; *) echo 4096 ;; esac) -timeout=10 -rss_limit_mb=4096 -artifact_prefix=$out/found_$target. -print_final_stats=1 >$out/$target.log 2>&1
    code=$?
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' $out/$target.log)
    if [ $code -eq 0 ] && [ "${runs:-0}" -gt 10 ]; then echo "ok fuzz_$target"; passed=$((passed + 1))
    else echo "FAIL fuzz_$target: exit code $code after ${runs:-no} runs: $(grep -m 1 -E 'ERROR|runtime error' $out/$target.log | head -c 300)"; failed=$((failed + 1)); fi
    [ $seconds -gt 1 ] && echo "     $runs runs"
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
