#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Data, weights and options that cannot be trained on: each is one sentence and a non-zero exit code, or left out, counted
# and said. What a batch may well be - ranks without a target, rows or pairs - gives the bits of one rank. Nothing that was
# saved before a failure is lost.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_bad_input
rm -rf $out; mkdir -p $out
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }

build/make_arith $out/arith.jsonl 60 5 >/dev/null
awk '{ sub(/"wrong": .*/, ""); label = NR % 3 ? "true" : "false"; print $0 "\"label\": " label "}" }' $out/arith.jsonl > $out/labelled.jsonl
model="--num_hidden_layers 1 --hidden_size 32 --num_attention_heads 4 --logging_steps 1000"
shape="--packing_samples --max_len 200 --pack_len 420 $model"
build/train_sft --dataset $out/arith.jsonl --input_key question --output_key answer $shape --train_batch_size 12 --max_steps 5 --learning_rate 5e-3 --save_path $out/sft --ckpt_path $out/sft.ckpt >$out/sft.log 2>&1 || fail bad_sft "$(tail -n 1 $out/sft.log)"
keys="--prompt_key question --chosen_key answer --rejected_key wrong --train_batch_size 6 --max_steps 2"
labels="--input_key question --output_key answer --train_batch_size 6 --max_steps 2"

# run NAME TRAINER OPTIONS...
run() { local name=$1 trainer=$2; shift 2; ci/limit.sh 120 build/train_$trainer $shape --pretrain $out/sft --lr_scheduler constant --warmup_steps 0 --save_path $out/$name --ckpt_path $out/$name.ckpt "$@" >$out/$name.log 2>&1; }
refuse() { # NAME TRAINER PATTERN OPTIONS...
    local name=$1 trainer=$2 pattern=$3 code; shift 3
    rm -rf $out/refused $out/refused.ckpt
    run refused $trainer "$@"; code=$?
    if [ $code -eq 0 ] || [ $code -ge 124 ]; then fail "bad_$name" "exit code $code"
    elif [ "$(grep -c '^error: ' $out/refused.log)" -ne 1 ] || ! grep -qE "^error: .*$pattern" $out/refused.log; then fail "bad_$name" "$(grep '^error' $out/refused.log | head -c 300)"
    elif [ -e $out/refused/model.safetensors ]; then fail "bad_$name" "wrote a model all the same"
    else ok "bad_$name"; fi
}
# left_out NAME TRAINER PATTERN GOOD BAD OPTIONS...: the records of BAD are said and change nothing
left_out() {
    local name=$1 trainer=$2 pattern=$3 good=$4 bad=$5; shift 5
    cat $bad $good > $out/$name.jsonl
    run $name.good $trainer --dataset $good "$@" || { fail "bad_$name" "$(tail -n 1 $out/$name.good.log)"; return; }
    if ! run $name.both $trainer --dataset $out/$name.jsonl "$@"; then fail "bad_$name" "$(tail -n 1 $out/$name.both.log)"
    elif ! grep -qE "$pattern" $out/$name.both.log; then fail "bad_$name" "does not say so: $(head -n 1 $out/$name.both.log)"
    elif ! cmp -s $out/$name.both/model.safetensors $out/$name.good/model.safetensors; then fail "bad_$name" "what is left out changes the weights"
    else ok "bad_$name"; fi
}

# a pair without its partner, a response without a token, a token the model does not have
bad() { { head -n 3 $out/arith.jsonl; echo "$2"; tail -n 3 $out/arith.jsonl; } > $out/$1.jsonl; }
bad half '{"question": "a", "answer": "b"}'
bad null '{"question": "a", "answer": "b", "wrong": null}'
bad list '{"question": "a", "answer": ["b"], "wrong": "c"}'
bad empty '{"question": "a", "answer": "", "wrong": "c"}'
for trainer in dpo rm; do
    refuse ${trainer}_half $trainer ':4: .*"wrong"' $keys --dataset $out/half.jsonl
    refuse ${trainer}_null $trainer ':4: "wrong" is null' $keys --dataset $out/null.jsonl
    refuse ${trainer}_list $trainer ':4: "answer"' $keys --dataset $out/list.jsonl
    refuse ${trainer}_empty $trainer ':4: "answer" is empty' $keys --dataset $out/empty.jsonl
    : > $out/nothing.jsonl
    refuse ${trainer}_no_pair $trainer 'nothing.jsonl' $keys --dataset $out/nothing.jsonl
    while IFS='|' read -r name pattern line; do
        echo "$line" > $out/ids.jsonl
        refuse ${trainer}_$name $trainer ":1: .*$pattern" --dataset $out/ids.jsonl --max_steps 1
    done <<'IDS'
ids_half|rejected_ids|{"prompt_ids": [1, 2], "chosen_ids": [3]}
ids_empty|leaves no response token|{"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": []}
ids_vocab|rejected_ids.0. is 259|{"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [259]}
ids_negative|prompt_ids.1. is -1|{"prompt_ids": [1, -1], "chosen_ids": [3], "rejected_ids": [4]}
whole_half|rejected_input_ids|{"chosen_input_ids": [1, 2], "chosen_labels": [-100, 2]}
whole_masked|leaves no response token|{"chosen_input_ids": [1, 2], "chosen_labels": [-100, -100], "rejected_input_ids": [1, 3], "rejected_labels": [-100, 3]}
whole_label|chosen_labels.1. is 300|{"chosen_input_ids": [1, 2], "chosen_labels": [-100, 300], "rejected_input_ids": [1, 3], "rejected_labels": [-100, 3]}
whole_shifted|must not be shifted|{"chosen_input_ids": [1, 2], "chosen_labels": [2, -100], "rejected_input_ids": [1, 3], "rejected_labels": [-100, 3]}
IDS
done
while IFS='|' read -r name pattern line; do
    { head -n 3 $out/labelled.jsonl; echo "$line"; } > $out/kto.jsonl
    refuse kto_$name kto ":4: .*$pattern" $labels --dataset $out/kto.jsonl
done <<'LABELS'
no_label|"label"|{"question": "a", "answer": "b"}
odd_label|"label" is 2|{"question": "a", "answer": "b", "label": 2}
empty|"answer" is empty|{"question": "a", "answer": "", "label": true}
vocab|input_ids.1. is 259|{"input_ids": [1, 259], "labels": [-100, 259], "label": true}
masked|leaves no response token|{"input_ids": [1, 2], "labels": [-100, -100], "label": true}
LABELS

# responses that max_len cuts off, rows too short for a pair, pairs that are alike once cut
printf '{"question": "%s", "answer": "b", "wrong": "c"}\n' $(printf 'x%.0s' {1..250}) > $out/long.jsonl
printf '{"question": "%s", "answer": "b", "label": true}\n' $(printf 'x%.0s' {1..250}) > $out/long_label.jsonl
for trainer in dpo rm; do
    left_out ${trainer}_long $trainer '61 pairs read, 60 kept .*; 1 too long' $out/arith.jsonl $out/long.jsonl $keys --truncation drop
    [ $trainer = rm ] || left_out ${trainer}_long_cut $trainer '61 pairs read, 60 kept .*; 1 too long' $out/arith.jsonl $out/long.jsonl $keys
    refuse ${trainer}_all_long $trainer '60 too long' $keys --dataset $out/arith.jsonl --max_len 60 --truncation drop
    refuse ${trainer}_alike $trainer 'all (47|60) pairs chosen and rejected are the same \((47|60) cut\)' $keys --dataset $out/arith.jsonl --max_len 100 --truncation cut
    refuse ${trainer}_row $trainer 'pack_len 210; raise --pack_len to 400' $keys --dataset $out/arith.jsonl --pack_len 210
    shape=${shape/--pack_len 420/} run $trainer.rows $trainer $keys --dataset $out/arith.jsonl && ok "bad_${trainer}_default_row" || fail "bad_${trainer}_default_row" "$(tail -n 1 $out/$trainer.rows.log)"
done
# an evaluation leaves out pairs that are alike: which of the two has the higher reward would be a matter of rounding
head -n 4 $out/arith.jsonl > $out/apart.jsonl
sed -E 's/"answer": ("[^"]*"), "wrong": "[^"]*"/"answer": \1, "wrong": \1/' $out/apart.jsonl > $out/alike.jsonl; cat $out/alike.jsonl $out/apart.jsonl > $out/mixed.jsonl
for trainer in dpo rm; do
    refuse ${trainer}_alike_evaluation $trainer 'alike.jsonl: in all 4 pairs chosen and rejected are the same' $keys --dataset $out/arith.jsonl --eval_dataset $out/alike.jsonl
    run $trainer.apart $trainer $keys --dataset $out/arith.jsonl --eval_dataset $out/apart.jsonl && run $trainer.mixed $trainer $keys --dataset $out/arith.jsonl --eval_dataset $out/mixed.jsonl
    grep -q 'mixed.jsonl: in 4 of 8 pairs chosen and rejected are the same' $out/$trainer.mixed.log && [ "$(sed -n '/^step 2: evaluation/,/margin/p' $out/$trainer.mixed.log)" = "$(sed -n '/^step 2: evaluation/,/margin/p' $out/$trainer.apart.log)" ] && ok bad_${trainer}_alike_left_out || fail bad_${trainer}_alike_left_out "$(tail -n 1 $out/$trainer.mixed.log)"
done
left_out kto_long kto '61 read, 60 kept .*; 1 too long' $out/labelled.jsonl $out/long_label.jsonl $labels
refuse kto_all_long kto '60 too long' $labels --dataset $out/labelled.jsonl --max_len 60

# documents without any target: left out of training; a window of an evaluation that has none has no say in the mean
yes '{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}' | head -n 8 > $out/masked.jsonl
{ cat $out/masked.jsonl; echo '{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}'; } > $out/eval.jsonl
left_out sft_masked sft '8 fully masked' $out/arith.jsonl $out/masked.jsonl $labels
tail -n 1 $out/eval.jsonl > $out/last.jsonl
run masked_window sft $labels --dataset $out/arith.jsonl --train_batch_size 2 --eval_dataset $out/eval.jsonl
run masked_alone sft $labels --dataset $out/arith.jsonl --train_batch_size 2 --eval_dataset $out/last.jsonl
grep -q 'evaluation loss [0-9]' $out/masked_window.log && [ "$(grep '^evaluation loss' $out/masked_window.log)" = "$(grep '^evaluation loss' $out/masked_alone.log)" ] && ok bad_masked_window || fail bad_masked_window "$(tail -n 1 $out/masked_window.log)"
refuse sft_all_masked sft 'no supervised token' --dataset $out/masked.jsonl --max_steps 1

# an evaluation whose last window would be a single document, which has no other response to pair its prompt with
head -n 49 $out/labelled.jsonl > $out/odd.jsonl; head -n 1 $out/labelled.jsonl > $out/single.jsonl
run odd kto $labels --dataset $out/labelled.jsonl --eval_dataset $out/odd.jsonl && grep -q 'over 49 documents' $out/odd.log && ok bad_kto_odd_evaluation || fail bad_kto_odd_evaluation "$(tail -n 1 $out/odd.log)"
refuse kto_single_evaluation kto 'single.jsonl: KTO.s KL term pairs each prompt with another document.s response' $labels --dataset $out/labelled.jsonl --eval_dataset $out/single.jsonl

# ranks without a target (long prompts, responses of a token), without a token, without a row or a pair
for i in 1 2 3 4 5 6; do printf '{"question": "%s%d", "answer": "b", "wrong": "c", "label": true}\n' $(printf 'x%.0s' {1..150}) $i; done > $out/prompts.jsonl
for stage in "sft $labels" "dpo $keys" "rm $keys" "kto $labels --beta 0.1"; do
    trainer=${stage%% *} options=${stage#* }
    run $trainer.one $trainer $options --dataset $out/prompts.jsonl --learning_rate 1e-2
    cmp -s $out/$trainer.one/model.safetensors $out/sft/model.safetensors && fail "bad_${trainer}_learns" "nothing was learnt"
    for world in "--ring_attn_size 8 --layout contiguous" "--ring_attn_size 8 --layout zigzag --schedule llama3" "--data_parallel_size 8" "--data_parallel_size 4 --ring_attn_size 2 --cell 3"; do
        single="$options --learning_rate 1e-2"; [ "${world/cell/}" != "$world" ] && run $trainer.three $trainer $options --dataset $out/prompts.jsonl --learning_rate 1e-2 --cell 3
        want=$out/$trainer.one; [ "${world/cell/}" != "$world" ] && want=$out/$trainer.three
        if run $trainer.idle $trainer $single --dataset $out/prompts.jsonl $world && cmp -s $out/$trainer.idle/model.safetensors $want/model.safetensors; then ok "bad_${trainer}_idle $world"; else fail "bad_${trainer}_idle $world" "$(tail -n 1 $out/$trainer.idle.log)"; fi
    done
done

# weights that are no numbers, or give none: whose they are is said. spoil NAME TENSOR BYTES: a float32 of the tensor becomes BYTES
spoil() {
    local file=$out/$1/model.safetensors header begin
    cp -r $out/sft $out/$1
    header=$(od -An -t u8 -N 8 $file | tr -d ' ')
    begin=$(head -c $((8 + header)) $file | tail -c $header | sed -E "s/.*\"$2\":\{[^}]*\"data_offsets\":\[([0-9]+),.*/\1/")
    printf "$3" | dd of=$file bs=1 seek=$((8 + header + begin)) conv=notrunc 2>/dev/null
}
spoil nan model.norm.weight '\x00\x00\xc0\x7f'
spoil inf model.norm.weight '\x00\x00\x80\xff'
spoil huge model.norm.weight '\xff\xff\x7f\x7f'
for kind in nan inf; do
    for stage in "dpo $keys --dataset $out/arith.jsonl" "rm $keys --dataset $out/arith.jsonl" "kto $labels --dataset $out/labelled.jsonl"; do
        trainer=${stage%% *} options=${stage#* }
        refuse ${trainer}_policy_$kind $trainer "$kind/model.safetensors: tensor .model.norm.weight.: element 0 of 32 is NaN or Inf .*; take another file, or look into what wrote this one" $options --pretrain $out/$kind
        [ $trainer = rm ] || refuse ${trainer}_reference_$kind $trainer "$kind/model.safetensors: tensor .model.norm.weight" $options --ref_pretrain $out/$kind
        [ $trainer = rm ] || refuse ${trainer}_stored_$kind $trainer "$kind/model.safetensors: tensor .model.norm.weight" $options --ref_pretrain $out/$kind --precompute_ref
    done
done
refuse dpo_policy_huge dpo "step 1: the policy's log-prob" $keys --dataset $out/arith.jsonl --pretrain $out/huge --ref_pretrain $out/sft
refuse dpo_reference_huge dpo "step 1: the reference's log-prob" $keys --dataset $out/arith.jsonl --ref_pretrain $out/huge
refuse dpo_stored_huge dpo "the reference's log-prob" $keys --dataset $out/arith.jsonl --ref_pretrain $out/huge --precompute_ref
[ -e $out/refused.ckpt/reference.safetensors ] && fail bad_stored_file "stored what is no number" || ok bad_stored_file
refuse kto_reference_huge kto "step 1: the reference's log-prob" $labels --dataset $out/labelled.jsonl --ref_pretrain $out/huge
refuse kto_policy_huge kto "step 1: the policy's log-prob" $labels --dataset $out/labelled.jsonl --pretrain $out/huge --ref_pretrain $out/sft
refuse rm_policy_huge rm 'step 1: the loss of unit|gradient norm of step 1 is' $keys --dataset $out/arith.jsonl --pretrain $out/huge

# options that contradict one another
refuse two_losses dpo '\-\-ipo and --pref_loss simpo' $keys --dataset $out/arith.jsonl --ipo --pref_loss simpo
refuse simpo_reference dpo 'simpo has no reference model; leave out --ref_pretrain' $keys --dataset $out/arith.jsonl --pref_loss simpo --ref_pretrain $out/sft
refuse hinge_smoothing dpo 'label_smoothing' $keys --dataset $out/arith.jsonl --pref_loss hinge --label_smoothing 0.1
refuse smoothing_half dpo 'label_smoothing' $keys --dataset $out/arith.jsonl --label_smoothing 0.7
refuse beta_nan dpo 'beta is nan' $keys --dataset $out/arith.jsonl --beta nan
refuse logexp_margin rm 'logexp has no margins' $keys --dataset $out/arith.jsonl --loss logexp --margin_loss
refuse no_weight kto 'both 0' $labels --dataset $out/labelled.jsonl --desirable_loss_weight 0 --undesirable_loss_weight 0
refuse weight_negative kto 'desirable_loss_weight' $labels --dataset $out/labelled.jsonl --desirable_loss_weight -1
# the range is said where a number is too large
ci/limit.sh 120 build/train_sft $shape $labels --dataset $out/arith.jsonl --rope_theta 1e308 --save_path $out/far >$out/far.log 2>&1; [ $? -eq 1 ] && grep -qE '^error: rope_theta is 1e\+308 .*above 0, up to 1e300' $out/far.log && ok bad_range_theta || fail bad_range_theta "$(tail -n 1 $out/far.log)"
refuse range_seed sft 'seed is 18446744073709551616, but it must be a whole number from 0 to 9223372036854775807' $labels --dataset $out/arith.jsonl --seed 18446744073709551616
refuse range_rate sft 'learning_rate is inf, but it must be a finite number above 0' $labels --dataset $out/arith.jsonl --learning_rate inf
refuse range_theta_folder sft 'config.json: "rms_norm_eps" is 1e\+308, but it must be a number above 0, up to 1e300' $labels --dataset $out/arith.jsonl --pretrain $(rm -rf $out/far; cp -r $out/sft $out/far; sed -i -E 's/("rms_norm_eps": )[^,]*/\11e308/' $out/far/config.json; echo $out/far)
refuse template dpo 'input_template must have \{\} once, in the place of the prompt, but has none: User: ' $keys --dataset $out/arith.jsonl --input_template 'User: '
refuse heads dpo 'ulysses_size 4' $keys --dataset $out/arith.jsonl --ring_attn_size 4 --ulysses_size 4
refuse world dpo 'world_size 6' $keys --dataset $out/arith.jsonl --world_size 6 --ring_attn_size 4
run backslash dpo $keys --dataset $out/arith.jsonl --input_template 'User: {}\nAssistant: ' && grep -q '^notice: .*backslash' $out/backslash.log && ok bad_backslash || fail bad_backslash "$(head -n 2 $out/backslash.log)"

# model folders: plain Llamas as transformers 4 and 5 write them are read; every key and tensor that is not understood is refused
# add_tensor FILE NAME SHAPE FLOATS [SOURCE]: a tensor behind all others, of zeros or of a file's bytes
add_tensor() {
    local file=$1 length data header
    length=$(od -An -t u8 -N 8 $file | tr -d ' ')
    data=$(($(wc -c <$file) - 8 - length))
    header=$(head -c $((8 + length)) $file | tail -c $length | sed -E "s/\} *$/,\"$2\":{\"dtype\":\"F32\",\"shape\":[$3],\"data_offsets\":[$data,$((data + 4 * $4))]}}/")
    { for ((i = 0; i < 8; i++)); do printf "\\x$(printf %02x $(((${#header} >> (8 * i)) & 255)))"; done; printf %s "$header"; tail -c $data $file; head -c $((4 * $4)) ${5:-/dev/zero}; } > $file.new && mv $file.new $file
}
# folder NAME KEYS: the model, config.json with these keys instead of its rope_theta and what transformers writes
folder() {
    rm -rf $out/$1; cp -r $out/sft $out/$1
    sed -i -E "s/^  \"rope_theta\": .*/  \"attention_bias\": false, \"attention_dropout\": 0.0, \"initializer_range\": 0.02, \"max_position_embeddings\": 2048, \"mlp_bias\": false, \"pretraining_tp\": 1, \"use_cache\": true, \"id2label\": {\"0\": \"LABEL_0\"}, \"_name_or_path\": \"x\", $2/" $out/$1/config.json
}
folder v4 '"rope_theta": 10000.0, "rope_scaling": null, "torch_dtype": "float32", "transformers_version": "4.57.6",'
folder v5 '"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "dtype": "float32", "transformers_version": "5.24.0",'
for version in v4 v5; do
    add_tensor $out/$version/model.safetensors model.layers.0.self_attn.rotary_emb.inv_freq 4 4
    run from_$version sft $labels --dataset $out/arith.jsonl --pretrain $out/$version
done
run from_ours sft $labels --dataset $out/arith.jsonl
for version in v4 v5; do cmp -s $out/from_$version/model.safetensors $out/from_ours/model.safetensors && ok "bad_folder_of_transformers_$version" || fail "bad_folder_of_transformers_$version" "$(tail -n 1 $out/from_$version.log)"; done
while IFS="|" read -r name lines pattern; do
    folder odd "$lines"
    refuse "folder_$name" sft "odd/config.json: .*$pattern" $labels --dataset $out/arith.jsonl --pretrain $out/odd
done <<'FOLDERS'
rope_scaling|"rope_scaling": {"rope_type": "longrope", "factor": 8.0},|"rope_scaling.rope_type" is "longrope"
rope_number|"rope_scaling": {"rope_type": "llama3", "factor": "8"},|"rope_scaling.factor" is "8"
rope_missing|"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},|"rope_scaling.original_max_position_embeddings" is missing
rope_other_key|"rope_scaling": {"type": "linear", "factor": 8.0, "beta_fast": 32},|"rope_scaling.beta_fast" \(32\) is unknown
rope_two_types|"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 8.0},|"rope_scaling.rope_type" and "rope_scaling.type" are different
rope_two_places|"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_parameters": {"rope_type": "linear", "factor": 8.0},|both scale
rope_factor|"rope_scaling": {"rope_type": "default", "factor": 8.0},|"rope_scaling.factor" \(8\) is unknown
rope_parameters|"rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 8.0},|"rope_parameters.original_max_position_embeddings" is missing
rope_twice|"rope_theta": 10000, "rope_parameters": {"rope_theta": 20000.0},|rope_theta is 10000 and rope_parameters.rope_theta 20000
window|"sliding_window": 4096,|"sliding_window" is 4096
unknown|"logit_scale": 0.5,|"logit_scale" \(0.5\) is unknown
twice|"use_cache": false,|"use_cache" occurs twice
escape|"a\\u001b[31mb\\n": 1,|key "a\\x1b\[31mb\\n"
quantized|"quantization_config": {"quant_method": "gptq"},|"quantization_config" is
FOLDERS
# scaled rotary frequencies: read in both spellings, written so that the next run reads the same, and what is too long is refused
yarn='"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 3.5, "beta_slow": 0.25, "truncate": false'
folder yarn4 "\"rope_theta\": 10000.0, \"rope_scaling\": {$yarn},"
folder yarn5 "\"rope_parameters\": {\"rope_theta\": 10000.0, $yarn},"
for version in yarn4 yarn5; do run from_$version sft $labels --dataset $out/arith.jsonl --pretrain $out/$version --ckpt_path $out/$version.ckpt --save_steps 1; done
written=$(ls -d $out/yarn4.ckpt/global_step*/config.json | head -n 1)
if cmp -s $out/from_yarn4/model.safetensors $out/from_yarn5/model.safetensors && ! cmp -s $out/from_yarn4/model.safetensors $out/from_ours/model.safetensors && grep -qF '"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_slow": 0.25, "beta_fast": 3.5, "original_max_position_embeddings": 16, "truncate": false},' "$written"; then ok bad_folder_rope_read; else fail bad_folder_rope_read "$(tail -n 1 $out/from_yarn4.log) $(grep rope "$written")"; fi
folder yarn_default "\"rope_theta\": 10000.0, \"rope_scaling\": {$yarn, \"attn_factor\": 1.0},"
run from_yarn_default sft $labels --dataset $out/arith.jsonl --pretrain $out/yarn_default
if cmp -s $out/from_yarn_default/model.safetensors $out/from_yarn4/model.safetensors; then ok bad_folder_rope_default; else fail bad_folder_rope_default "$(tail -n 1 $out/from_yarn_default.log)"; fi
rm -rf $out/again; cp -r $out/yarn4 $out/again; cp "$written" $out/again/config.json
run from_again sft $labels --dataset $out/arith.jsonl --pretrain $out/again
if cmp -s $out/from_again/model.safetensors $out/from_yarn4/model.safetensors; then ok bad_folder_rope_written; else fail bad_folder_rope_written "$(tail -n 1 $out/from_again.log)"; fi
# keys that no number hangs on
folder harmless '"rope_theta": 10000.0, "use_mrope": false, "auto_map": {"AutoConfig": "a.B"}, "_attn_implementation_autoset": true, "max_length": 20, "temperature": 0.5, "top_p": 0.9,'
sed -i 's/"pretraining_tp": 1/"pretraining_tp": 2/' $out/harmless/config.json
run from_harmless sft $labels --dataset $out/arith.jsonl --pretrain $out/harmless
if cmp -s $out/from_harmless/model.safetensors $out/from_ours/model.safetensors; then ok bad_folder_harmless; else fail bad_folder_harmless "$(tail -n 1 $out/from_harmless.log)"; fi
# attention_dropout: the same bits on any number of ranks, kept in what is written, gone on with after a checkpoint; none where nothing is learnt
folder dropped '"rope_theta": 10000.0,'
sed -i 's/"attention_dropout": 0.0/"attention_dropout": 0.25/' $out/dropped/config.json
drop() { run drop_$1 ${2:-sft} ${3:-$labels} --dataset $out/arith.jsonl --pretrain $out/dropped "${@:4}"; }
drop one; drop seed sft "$labels" --seed 7; drop none sft "$labels" --max_steps 0
for world in "--ring_attn_size 4" "--ring_attn_size 3 --layout contiguous --schedule llama3" "--data_parallel_size 2 --ring_attn_size 2 --zero_stage 3" "--ring_attn_size 2 --ulysses_size 2" "--gradient_checkpointing"; do
    drop world sft "$labels" $world
    if cmp -s $out/drop_world/model.safetensors $out/drop_one/model.safetensors; then ok "bad_dropout $world"; else fail "bad_dropout $world" "$(tail -n 1 $out/drop_world.log)"; fi
done
for other in from_ours drop_seed drop_none; do cmp -s $out/drop_one/model.safetensors $out/$other/model.safetensors && fail bad_dropout_drops "$other has the same weights"; done
grep -q '^model: .*, attention_dropout 0.25; ' $out/drop_one.log && tr -d ' \t' <$out/drop_one/config.json | grep -q '"attention_dropout":0.25' && ok bad_dropout_said || fail bad_dropout_said "$(grep '^model' $out/drop_one.log)"
drop half sft "$labels" --max_steps 1 --save_steps 1; drop half sft "$labels" --load_checkpoint
if cmp -s $out/drop_half/model.safetensors $out/drop_one/model.safetensors; then ok bad_dropout_goes_on; else fail bad_dropout_goes_on "$(tail -n 1 $out/drop_half.log)"; fi
for ranks in 1 4; do drop dpo$ranks dpo "$keys" --ring_attn_size $ranks; done
if cmp -s $out/drop_dpo1/model.safetensors $out/drop_dpo4/model.safetensors; then ok bad_dropout_dpo; else fail bad_dropout_dpo "$(tail -n 1 $out/drop_dpo4.log)"; fi
evaluation() { run $1 sft $labels --max_steps 0 --dataset $out/arith.jsonl --eval_dataset $out/arith.jsonl --pretrain $2; grep '^step 0: evaluation' $out/$1.log; }
if [ -n "$(evaluation eval_dropped $out/dropped)" ] && [ "$(evaluation eval_dropped $out/dropped)" = "$(evaluation eval_ours $out/sft)" ]; then ok bad_dropout_evaluation; else fail bad_dropout_evaluation "$(evaluation eval_dropped $out/dropped | tail -n 1)"; fi
# what is trained keeps what its source had beside weights
folder complete '"rope_theta": 10000.0, "transformers_version": "5.24.0", "dtype": "bfloat16", "eos_token_id": 7,'
echo '{"a tokenizer": 1}' >$out/complete/tokenizer.json; echo '{{ a template }}' >$out/complete/chat_template.jinja; echo '{"eos_token_id": [7, 8]}' >$out/complete/generation_config.json
sed -i '/"eos_token_id": 257/d; s/"bos_token_id": 256,/"bos_token_id": 1,/' $out/complete/config.json
printf '{"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4]}\n%.0s' 1 2 3 4 5 6 >$out/whole.jsonl
run from_kept sft --dataset $out/whole.jsonl --max_steps 1 --pretrain $out/complete
# text for a model with a tokenizer is not trained as bytes: what to type instead is said
command='python3 demos/prepare.py --kind %s --pretrain '$out'/complete --dataset '$out'/%s.jsonl --output '$out'/%s.jsonl.tokens'
for stage in "sft sft arith $labels" "dpo pairs arith $keys" "rm pairs arith $keys" "kto labelled labelled $labels"; do
    read -r trainer kind data options <<<"$stage"
    line=$(printf "$command" $kind $data $data)
    refuse ${trainer}_text_for_a_tokenizer $trainer "$data.jsonl:1: is text, which only demos/prepare.py can tokenize with the tokenizer in $out/complete; make a token file and give it \(add --apply_chat_template for the model's chat template\): $line( --[a-z]*_key [a-z]*)* --max_len 200$" $options --dataset $out/$data.jsonl --pretrain $out/complete
    refuse ${trainer}_keeps_what_is_given $trainer "give it: $line .*--apply_chat_template( --tokenizer_chat_template T)? --truncation drop --max_samples 7 --max_len 200$" $options --dataset $out/$data.jsonl --pretrain $out/complete --apply_chat_template $([ $trainer = kto ] || echo --tokenizer_chat_template T) --truncation drop --max_samples 7
    refuse ${trainer}_keeps_its_template $trainer "$line .*--input_template .'<\{\}\\\\n>' --max_len 200$" $options --dataset $out/$data.jsonl --pretrain $out/complete --input_template $'<{}\n>'
done
refuse sft_keeps_probs sft "--dataset $out/arith.jsonl,$out/labelled.jsonl --output $out/arith.jsonl.tokens --input_key question --output_key answer --dataset_probs 0.25,0.75 --seed 3 --max_len 200$" $labels --dataset $out/arith.jsonl,$out/labelled.jsonl --dataset_probs 0.25,0.75 --seed 3 --pretrain $out/complete
# half a command is none: one that no sentence holds is named, and the words that are printed are whole
long=$(printf '{}%09000d' 0)
refuse sft_long_command sft "give it \(add .*\): python3 demos/prepare.py with the arguments that --print_prepare prints \([0-9]+ characters, too many to print here\)$" $labels --dataset $out/arith.jsonl --pretrain $out/complete --input_template "$long"
refuse sft_long_template sft "too many to print here\) --apply_chat_template$" $labels --dataset $out/arith.jsonl --pretrain $out/complete --tokenizer_chat_template "$long" --apply_chat_template
template() { printf "{}%0$1d" 0; }
words="$labels --dataset $out/arith.jsonl --pretrain $out/complete"
refuse sft_short_command sft "0000' --max_len 200$" $words --input_template "$(template 3000)"
said=$(grep -o 'python3 demos/prepare.py .*' $out/refused.log)
longest=$((3000 + 4096 - ${#said}))
refuse sft_longest_command sft "0000' --max_len 200$" $words --input_template "$(template $longest)"
refuse sft_longer_command sft "\(4097 characters, too many to print here\)$" $words --input_template "$(template $((longest + 1)))"
build/train_sft $labels --dataset $out/arith.jsonl --pretrain $out/complete --input_template "$long" --print_prepare 2>/dev/null | grep -qF "\"$long\"" && ok bad_long_words || fail bad_long_words "--print_prepare cuts words"
refuse ppo_text_for_a_tokenizer ppo "is not a token file, but the model in .* has a tokenizer, so prompts must be in one; make a token file and give it.*: $(printf "$command" prompts arith arith) --input_key question --label_key answer --max_len 77$" --prompt_data $out/arith.jsonl --input_key question --label_key answer --reward_rule last_number --prompt_max_len 77 --pretrain $out/complete
# lists of messages are what prepare.py reads
printf '{"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "a"}]}\n' >$out/listed.jsonl
for trainer in dpo rm; do
    refuse ${trainer}_messages $trainer 'listed.jsonl:1: "chosen" is a list, but text is needed; demos/prepare.py makes a token file of lists of messages' --dataset $out/listed.jsonl
    refuse ${trainer}_messages_for_a_tokenizer $trainer 'listed.jsonl:1: "chosen" is a list, .*: python3 demos/prepare.py --kind pairs .* --max_len 200 --apply_chat_template$' --dataset $out/listed.jsonl --pretrain $out/complete
done
printf '\x89SEQTOK\n' >$out/x.tokens
for stage in "sft $labels --dataset" "dpo $keys --dataset" "kto $labels --dataset" "ppo --input_key question --label_key answer --reward_rule last_number --prompt_data"; do
    refuse ${stage%% *}_token_files ${stage%% *} 'x.tokens: is a token file, which cannot be combined with other data; let demos/prepare.py make one token file of all data sets' --max_samples 1 $([ ${stage%% *} = ppo ] && echo --prompt_max_len 77 --generate_max_len 20) ${stage#* } $out/arith.jsonl,$out/x.tokens --pretrain $out/complete
done
refuse ppo_ids_for_a_tokenizer ppo 'not a token file, but the model in ' --prompt_data $out/whole.jsonl --remote_rm_url http://127.0.0.1:9 --prompt_max_len 77 --pretrain $out/complete
echo 'plain text' >$out/plain.txt
refuse sft_stream_for_a_tokenizer sft 'plain.txt: is text, .*--output .*plain.txt.tokens --input_key question --pretrain_mode --max_len 200' --dataset $out/plain.txt --input_key question --pretrain_mode --pretrain $out/complete
if cmp -s $out/complete/tokenizer.json $out/from_kept/tokenizer.json && cmp -s $out/complete/chat_template.jinja $out/from_kept/chat_template.jinja && cmp -s $out/complete/generation_config.json $out/from_kept/generation_config.json && [ ! -e $out/from_kept/merges.txt ]; then ok bad_folder_files_kept; else fail bad_folder_files_kept "$(tail -n 1 $out/from_kept.log; ls $out/from_kept)"; fi
if python3 - $out/complete/config.json $out/from_kept/config.json <<'KEPT' 2>$out/kept.log; then ok bad_folder_config_kept; else fail bad_folder_config_kept "$(tail -n 1 $out/kept.log)"; fi
import json, sys
before, after = (json.load(open(path)) for path in sys.argv[1:])
assert dict(before, dtype="float32") == after, after
assert after["eos_token_id"] == 7 and after["max_position_embeddings"] == 2048
KEPT
# types and files of what is written: those of the source, or as one likes; a file's bytes come back without a step
types() { python3 - "$@" <<'TYPES'
import json, struct, sys
folder, wanted, files = sys.argv[1:4]
names = sorted(set(json.load(open(f"{folder}/model.safetensors.index.json"))["weight_map"].values())) if int(files) > 1 else ["model.safetensors"]
assert len(names) == int(files), names
read = {}
for name in names:
    data = open(f"{folder}/{name}", "rb").read()
    size, = struct.unpack("<Q", data[:8])
    for key, t in json.loads(data[8:8 + size]).items():
        if key == "__metadata__": continue
        assert t["dtype"] == wanted, (key, t)
        read[key] = data[8 + size + t["data_offsets"][0]:8 + size + t["data_offsets"][1]]
import hashlib
print(hashlib.sha256(b"".join(key.encode() + read[key] for key in sorted(read))).hexdigest())
TYPES
}
# each in the type before: what is written without a step, in one file or in many, is what was read
before=$out/sft
for type in float32 float16 bfloat16; do
    case $type in float32) code=F32 ;; float16) code=F16 ;; *) code=BF16 ;; esac
    run as_$type sft $labels --dataset $out/arith.jsonl --pretrain $before --save_dtype $type
    run again_$type sft $labels --dataset $out/arith.jsonl --pretrain $out/as_$type --max_steps 0
    run shards_$type sft $labels --dataset $out/arith.jsonl --pretrain $out/as_$type --max_steps 0 --max_shard_size 20KB
    run back_$type sft $labels --dataset $out/arith.jsonl --pretrain $out/shards_$type --max_steps 0
    files=$(ls $out/shards_$type/model-*.safetensors 2>/dev/null | wc -l)
    one=$(types $out/as_$type $code 1 2>&1)
    if [ "$files" -gt 2 ] && [ "$one" = "$(types $out/again_$type $code 1 2>&1)" ] && [ "$one" = "$(types $out/shards_$type $code $files 2>&1)" ] && [ "$one" = "$(types $out/back_$type $code 1 2>&1)" ] && tr -d ' \t' <$out/as_$type/config.json | grep -qE "dtype\":\"$type" && [ ! -e $out/shards_$type/model.safetensors ]; then ok bad_save_$type; else fail bad_save_$type "$files files, $one, $(types $out/again_$type $code 1 2>&1 | tail -n 1)"; fi
done
run rounded sft $labels --dataset $out/arith.jsonl --pretrain $out/as_float16
grep -q "^notice: weights in .*rounded are rounded to float16" $out/rounded.log && types $out/rounded F16 1 >/dev/null && ok bad_save_rounded || fail bad_save_rounded "$(tail -n 1 $out/rounded.log)"
# one file after several and several after one: what was there before goes
run shards_float32 sft $labels --dataset $out/arith.jsonl --pretrain $before --max_steps 0
if [ -z "$(ls $out/shards_float32 | grep -E 'model-|index')" ] && types $out/shards_float32 F32 1 >/dev/null; then ok bad_save_one_after_several; else fail bad_save_one_after_several "$(ls $out/shards_float32)"; fi
run shards_float32 sft $labels --dataset $out/arith.jsonl --pretrain $before --max_steps 0 --max_shard_size 30KB
if [ ! -e $out/shards_float32/model.safetensors ] && [ -e $out/shards_float32/model.safetensors.index.json ]; then ok bad_save_several_after_one; else fail bad_save_several_after_one "$(ls $out/shards_float32)"; fi
refuse shard_size sft 'max_shard_size is 5 GB, but it must be a size such as 700MB or 5GB' $labels --dataset $out/arith.jsonl --max_shard_size '5 GB'
# what a float16 cannot hold
rm -rf $out/odd; cp -r $out/sft $out/odd
python3 - $out/odd/model.safetensors <<'LARGE'
import struct, sys
data = bytearray(open(sys.argv[1], "rb").read()); data[-4:] = struct.pack("<f", 70000.0); open(sys.argv[1], "wb").write(data)
LARGE
refuse float16 sft 'holds 70000, which float16 cannot hold; give --save_dtype bfloat16 or float32' $labels --dataset $out/arith.jsonl --pretrain $out/odd --max_steps 0 --save_dtype float16
# a model that seqpar did not write is not replaced without a word
mkdir -p $out/foreign; python3 - $out/sft/model.safetensors $out/foreign/model.safetensors <<'FOREIGN'
import json, struct, sys
data = open(sys.argv[1], "rb").read()
size, = struct.unpack("<Q", data[:8])
header = json.loads(data[8:8 + size]); header["__metadata__"] = {"format": "pt"}
text = json.dumps(header).encode()
open(sys.argv[2], "wb").write(struct.pack("<Q", len(text)) + text + data[8 + size:])
FOREIGN
sum=$(sha256sum <$out/foreign/model.safetensors)
if build/train_sft --dataset $out/arith.jsonl $labels $shape --save_path $out/foreign --ckpt_path $out/foreign.ckpt >$out/foreign.log 2>&1; then fail bad_foreign "exit code 0"
elif grep -q 'holds a model that seqpar did not write; give another --save_path, or --overwrite' $out/foreign.log && [ "$sum" = "$(sha256sum <$out/foreign/model.safetensors)" ] && [ "$(ls $out/foreign)" = model.safetensors ] && build/train_sft --dataset $out/arith.jsonl $labels $shape --save_path $out/foreign --ckpt_path $out/foreign.ckpt --overwrite >$out/foreign.log 2>&1 && [ "$sum" != "$(sha256sum <$out/foreign/model.safetensors)" ]; then ok bad_foreign; else fail bad_foreign "$(tail -n 1 $out/foreign.log)"; fi
# Mistral's window, on one rank and on two; and in what is written
folder mistral '"rope_theta": 10000.0, "sliding_window": 3,'
sed -i 's/"llama"/"mistral"/; s/LlamaFor/MistralFor/' $out/mistral/config.json
run from_mistral sft $labels --dataset $out/arith.jsonl --pretrain $out/mistral --ckpt_path $out/mistral.ckpt --save_steps 1
run from_mistral_2 sft $labels --dataset $out/arith.jsonl --pretrain $out/mistral --ring_attn_size 2
written=$(ls -d $out/mistral.ckpt/global_step*/config.json | head -n 1)
if cmp -s $out/from_mistral/model.safetensors $out/from_mistral_2/model.safetensors && ! cmp -s $out/from_mistral/model.safetensors $out/from_ours/model.safetensors; then ok bad_folder_mistral; else fail bad_folder_mistral "$(tail -n 1 $out/from_mistral.log)"; fi
for file in "$written" $out/from_mistral/config.json; do grep -q MistralForCausalLM "$file" && tr -d ' \t' <"$file" | grep -qF '"sliding_window":3' || fail bad_folder_mistral_written "$file: $(grep -E 'arch|window' "$file")"; done
folder odd '"rope_scaling": {"type": "dynamic", "factor": 2.0}, '
sed -i 's/"max_position_embeddings": 2048/"max_position_embeddings": 3/' $out/odd/config.json
refuse folder_rope_dynamic sft 'document has [0-9]+ tokens; with rope type dynamic 3 are the most' $labels --dataset $out/arith.jsonl --pretrain $out/odd
folder odd '"sliding_window": 4096, "use_sliding_window": false,'
run unused_window sft $labels --dataset $out/arith.jsonl --pretrain $out/odd && ok bad_folder_unused_window || fail bad_folder_unused_window "$(tail -n 1 $out/unused_window.log)"
for change in 's/"llama"/"gemma2"/|"model_type" is "gemma2", but only these are supported: llama, mistral, qwen2, qwen3, smollm3, phi3' 's/LlamaForCausalLM/MistralForCausalLM/|"architectures" is \["MistralForCausalLM"\]' 's/"model_type".*//|"model_type" is missing' 's/"hidden_size": 32/"hidden_size": 32.5/|"hidden_size" is 32.5' 's/"hidden_size": 32/"hidden_size": 1e999/|"hidden_size" is' 's/"vocab_size": 259/"vocab_size": NaN/|not a JSON object' 's/false/"false"/|"tie_word_embeddings" is "false"' 's/^\{/[{/|not a JSON object' 's/"silu"/"gelu"/|"hidden_act" is "gelu"' 's/"llama"/"mistral"/; s/LlamaFor/MistralFor/|"sliding_window" is missing' 's/"llama"/"mistral"/; s/LlamaFor/MistralFor/; s/^\{/{"sliding_window": null, "attention_bias": true,/|"attention_bias" is true, but only false' 's/"llama"/"qwen2"/; s/LlamaFor/Qwen2For/; s/"num_key_value_heads.*//|"num_key_value_heads" is missing' 's/"rms_norm_eps.*//|"rms_norm_eps" is missing' 's/"llama"/"qwen2"/; s/LlamaFor/Qwen2For/; s/^\{/{"layer_types": ["sliding_attention"],/|"layer_types" has sliding_attention, but' 's/"llama"/"qwen2"/; s/LlamaFor/Qwen2For/; s/^\{/{"layer_types": ["chunked_attention"],/|"layer_types" must name 1 layers' 's/"llama"/"qwen3"/; s/LlamaFor/Qwen3For/; s/^\{/{"use_sliding_window": true, "sliding_window": 4,/|"max_window_layers" is missing' 's/"llama"/"smollm3"/; s/LlamaFor/SmolLM3For/; s/^\{/{"no_rope_layers": [],/|"no_rope_layers" must be 1 numbers' 's/"llama"/"phi3"/; s/LlamaFor/Phi3For/; s/^\{/{"sliding_window": null, "resid_pdrop": 0.1,/|"resid_pdrop" is 0.1' 's/"llama"/"phi3"/; s/LlamaFor/Phi3For/; s/^\{/{"sliding_window": null, "rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 8},/|type phi3 has rope_type "yarn"' 's/^\{/{"attention_dropout": 1,/|"attention_dropout" is 1, but it must be a number from 0 on, below 1' 's/^\{/{"use_mrope": true,/|"use_mrope" is true, but only false' 's/^\{/{"rope_scaling": {"type": "linear", "factor": 2, "attn_factor": 2},/|"rope_scaling.attn_factor" is 2, but only 1'; do
    rm -rf $out/odd; cp -r $out/sft $out/odd; sed -i -E "${change%%|*}" $out/odd/config.json
    refuse "folder_${change%%|*}" sft "odd/config.json: .*${change#*|}" $labels --dataset $out/arith.jsonl --pretrain $out/odd
done
for change in 's/^\{/{"attention_bias": true,/|self_attn.q_proj.bias' 's/^\{/{"mlp_bias": true,/|mlp.gate_proj.bias' 's/"llama"/"qwen2"/; s/LlamaFor/Qwen2For/|self_attn.q_proj.bias' 's/"llama"/"qwen3"/; s/LlamaFor/Qwen3For/|self_attn.q_norm.weight'; do
    rm -rf $out/odd; cp -r $out/sft $out/odd; sed -i -E "${change%%|*}" $out/odd/config.json
    refuse "folder_lacks_${change%%|*}" sft "odd/model.safetensors: tensor \"model.layers.0.${change#*|}\"" $labels --dataset $out/arith.jsonl --pretrain $out/odd
done
rm -rf $out/odd; cp -r $out/sft $out/odd; add_tensor $out/odd/model.safetensors model.layers.0.self_attn.q_proj.bias 32 32
refuse folder_tensor sft 'tensor "model.layers.0.self_attn.q_proj.bias" is not a tensor of the model that config.json describes' $labels --dataset $out/arith.jsonl --pretrain $out/odd
refuse folder_reference dpo 'tensor "model.layers.0.self_attn.q_proj.bias" is not a tensor of the model that config.json describes' $keys --dataset $out/arith.jsonl --ref_pretrain $out/odd
# a tied head may be in the file all the same, if it is the embedding
build/train_sft --dataset $out/arith.jsonl $labels $shape --tie_word_embeddings --save_path $out/tied --ckpt_path $out/tied.ckpt >$out/tied.log 2>&1 || fail bad_tied "$(tail -n 1 $out/tied.log)"
tail -c $(($(wc -c <$out/tied/model.safetensors) - 8 - $(od -An -t u8 -N 8 $out/tied/model.safetensors))) $out/tied/model.safetensors > $out/embedding # the first tensor
for source in embedding zero; do cp -r $out/tied $out/tied_$source; done
add_tensor $out/tied_embedding/model.safetensors lm_head.weight 259,32 8288 $out/embedding
add_tensor $out/tied_zero/model.safetensors lm_head.weight 259,32 8288
run from_tied sft $labels --dataset $out/arith.jsonl --pretrain $out/tied && run from_tied_twice sft $labels --dataset $out/arith.jsonl --pretrain $out/tied_embedding && cmp -s $out/from_tied/model.safetensors $out/from_tied_twice/model.safetensors && ok bad_folder_tied || fail bad_folder_tied "$(tail -n 1 $out/from_tied.log $out/from_tied_twice.log | grep error)"
refuse folder_tied sft 'tensor "lm_head.weight" is not equal to "model.embed_tokens.weight"' $labels --dataset $out/arith.jsonl --pretrain $out/tied_zero
for file in pytorch_model.bin:"PyTorch's pickle" adapter_config.json:adapter; do
    rm -rf $out/odd; cp -r $out/sft $out/odd; mv $out/odd/model.safetensors $out/odd/${file%%:*}
    refuse "folder_${file%%:*}" sft "${file%%:*} is .*${file#*:}.*save" $labels --dataset $out/arith.jsonl --pretrain $out/odd
done

# weights in several files: as one file has them; and indexes that lie
rm -rf $out/shards; cp -r $out/sft $out/shards; rm $out/shards/model.safetensors
if python3 - $out/sft/model.safetensors $out/shards <<'SHARDS' 2>$out/shards.log; then
import json, struct, sys
source, folder = sys.argv[1:]
data = open(source, "rb").read()
size, = struct.unpack("<Q", data[:8])
header, where, parts = json.loads(data[8:8 + size]), {}, ({}, {}, {})
names = [name for name in header if name != "__metadata__"]
for number, name in enumerate(names):
    parts[number * number % 3][name] = header[name]
for number, part in enumerate(parts):
    if not part: continue
    at, bytes_of, file = 0, b"", f"model-{number}.safetensors"
    for name, t in part.items():
        begin, end = t["data_offsets"]
        bytes_of += data[8 + size + begin:8 + size + end]
        part[name] = dict(t, data_offsets=[at, at + end - begin])
        at, where[name] = at + end - begin, file
    text = json.dumps(part).encode()
    open(f"{folder}/{file}", "wb").write(struct.pack("<Q", len(text)) + text + bytes_of)
json.dump({"metadata": {"total_size": 1}, "weight_map": where}, open(f"{folder}/model.safetensors.index.json", "w"))
SHARDS
    run from_shards sft $labels --dataset $out/arith.jsonl --pretrain $out/shards
    run from_whole sft $labels --dataset $out/arith.jsonl --pretrain $out/sft
    if [ "$(ls $out/shards/model-*.safetensors | wc -l)" -ge 2 ] && cmp -s $out/from_shards/model.safetensors $out/from_whole/model.safetensors; then ok bad_folder_shards; else fail bad_folder_shards "$(tail -n 1 $out/from_shards.log)"; fi
    while IFS="|" read -r name change pattern; do
        rm -rf $out/odd; cp -r $out/shards $out/odd; (cd $out/odd && eval "$change")
        refuse "folder_shards_$name" sft "$pattern" $labels --dataset $out/arith.jsonl --pretrain $out/odd
    done <<'LIES'
missing|rm model-1.safetensors|odd/model-1.safetensors
elsewhere|sed -i 's/"model.norm.weight": "model-[01]/"model.norm.weight": "model-9/' *.index.json|odd/model-9.safetensors
swapped|sed -i 's/"model.norm.weight": "model-0/"model.norm.weight": "model-X/; s/"model.norm.weight": "model-1/"model.norm.weight": "model-0/; s/model-X/model-1/' *.index.json|"model.norm.weight" is in model-[01].safetensors, which does not have it
unlisted|sed -i -E 's/"model.norm.weight": "[^"]*", //' *.index.json|lists [0-9]+ tensors, but the files that it names have [0-9]+
outside|sed -i 's/"model-0/"..\/model-0/' *.index.json|is in '../model-0.safetensors', but it must name a file in the same folder; correct it
twice|sed -i 's/"weight_map": {/"weight_map": {"model.norm.weight": "model-0.safetensors", /' *.index.json|no object "weight_map"
empty|echo '{"weight_map": {}}' >model.safetensors.index.json|no object "weight_map"
garbage|echo 'x' >model.safetensors.index.json|no JSON object
truncated|truncate -s -5 model-1.safetensors|odd/model-1.safetensors
LIES
else fail bad_folder_shards "$(tail -n 1 $out/shards.log)"; fi

# what a new user may give instead of data: nothing is waited for, nothing foreign reaches the terminal as it is
mkfifo $out/fifo.jsonl; ln -s loop.jsonl $out/loop.jsonl; mkdir $out/dir.jsonl $out/pipes; mkfifo $out/pipes/config.json; ln -s /dev/zero $out/zero.jsonl
refuse data_fifo sft 'fifo.jsonl: cannot be read: it is a pipe.*write its contents to a file' $labels --dataset $out/fifo.jsonl
refuse data_device sft 'zero.jsonl: cannot be read: it is a pipe, socket or device' $labels --dataset $out/zero.jsonl
refuse data_folder sft 'dir.jsonl has no data of a train split' $labels --dataset $out/dir.jsonl
refuse data_loop sft 'loop.jsonl: cannot be read: .*symbolic links' $labels --dataset $out/loop.jsonl
refuse data_substituted sft '/dev/fd/[0-9]*: the name does not end in ' $labels --dataset <(cat $out/arith.jsonl)
refuse config_fifo sft 'config.json cannot be read: it is a pipe' $labels --dataset $out/arith.jsonl --pretrain $out/pipes
refuse metrics_fifo sft 'cannot open .*fifo.jsonl: it is a pipe that nobody reads; give another --metrics_path' $labels --dataset $out/arith.jsonl --metrics_path $out/fifo.jsonl
refuse weights_fifo sft 'not a regular file' $labels --dataset $out/arith.jsonl --pretrain $(rm -rf $out/odd; cp -r $out/sft $out/odd; rm $out/odd/model.safetensors; mkfifo $out/odd/model.safetensors; echo $out/odd)
refuse data_long_name sft 'characters, at most 1000 are possible; give a shorter path' $labels --dataset "$(printf 'abcdefg/%.0s' {1..600})x.jsonl"
refuse data_twice sft ':4: key "answer" occurs twice' $labels --dataset $(bad twice '{"question": "a", "answer": "b", "answer": "c"}'; echo $out/twice.jsonl)
refuse option_empty sft 'pretrain is empty; give it a value' $labels --dataset $out/arith.jsonl --pretrain ''
refuse option_shape sft 'num_hidden_layers is 9, but the model in --pretrain .* has 1; leave it out' $labels --dataset $out/arith.jsonl --num_hidden_layers 9
# escaped NAME TEXT OPTIONS...: the sentence holds TEXT, and no byte of it moves a cursor
escaped() {
    local name=$1 text=$2; shift 2
    run escaped sft $labels "$@" && fail "bad_escaped_$name" "accepted"
    if grep -qaP '[\x00-\x09\x0b-\x1f\x7f]' $out/escaped.log || [ "$(grep -c '^error: ' $out/escaped.log)" -ne 1 ] || ! grep -qF -- "$text" $out/escaped.log; then fail "bad_escaped_$name" "$(tail -n 2 $out/escaped.log | cat -v | head -c 300)"
    else ok "bad_escaped_$name"; fi
}
escaped name '\x1b[31mred\n\xe9\xe2\x80\xae.jsonl' --dataset $'\e[31mred\n\xe9\xe2\x80\xae.jsonl'
escaped option '--\x1b[31mx' --dataset $out/arith.jsonl $'--\e[31mx'
escaped value '1\n2' --dataset $out/arith.jsonl $'--max_steps=1\n2'
printf '{"\\u001b]0;title\\u0007\\n": 1, "answer": "b"}\n' > $out/keys.jsonl
escaped key '"\x1b]0;title\x07\n"' --dataset $out/keys.jsonl
rm -rf $out/odd; cp -r $out/sft $out/odd; add_tensor $out/odd/model.safetensors 'a\\u001bb' 1 1
escaped tensor '"a\x1bb"' --dataset $out/arith.jsonl --pretrain $out/odd

# notices and closing figures too
run $'turned\e[31m' sft $labels --dataset $out/arith.jsonl --save_steps 1
! grep -qaP '[\x00-\x09\x0b-\x1f\x7f]' $out/$'turned\e[31m'.log && grep -qF 'checkpoint in build/test_bad_input/turned\x1b[31m.ckpt' $out/$'turned\e[31m'.log && grep -qF 'model in build/test_bad_input/turned\x1b[31m' $out/$'turned\e[31m'.log && ok bad_escaped_notice || fail bad_escaped_notice "$(tail -n 2 $out/$'turned\e[31m'.log | cat -v)"

# closed streams: the next file that is opened does not take their place; figures that nobody gets are an error
run streams sft $labels --dataset $out/arith.jsonl --metrics_path $out/streams.jsonl
for closed in '2>&-' '>&- 2>&- <&-'; do
    bash -c "exec build/train_sft $shape $labels --pretrain $out/sft --lr_scheduler constant --warmup_steps 0 --dataset $out/arith.jsonl --metrics_path $out/closed.jsonl --save_path $out/closed --ckpt_path $out/closed.ckpt $closed" >/dev/null
    [ "$(grep -vc '^{"step"' $out/closed.jsonl)" -eq 0 ] && cmp -s $out/closed/model.safetensors $out/streams/model.safetensors && ok "bad_closed $closed" || fail "bad_closed $closed" "$(grep -v '^{"step"' $out/closed.jsonl | head -n 1)"
done
if [ -c /dev/full ]; then
    build/train_sft $shape $labels --pretrain $out/sft --dataset $out/arith.jsonl --save_path $out/full --ckpt_path $out/full.ckpt >/dev/full 2>$out/full.log; [ $? -eq 1 ] && grep -q '^error: cannot write the final summary' $out/full.log && ok bad_full_output || fail bad_full_output "$(tail -n 1 $out/full.log)"
    while IFS='|' read -r what command; do # nobody gets what was asked for
        ci/limit.sh 240 build/$command >/dev/full 2>$out/full.log; [ $? -eq 1 ] && grep -q "^error: cannot write $what: " $out/full.log && ok "bad_full_output $command" || fail "bad_full_output $command" "$(tail -n 1 $out/full.log)"
    done <<'LIST'
the options|train_sft --help
the options|verify_sp --help
the table|verify_sp --ring_attn_size 2
the drawing|02_layouts
the usage|02_layouts --help
the usage|make_arith --help
the usage|compare_runs --help
LIST
else echo "skip bad_full_output: there is no /dev/full here"; fi
{ sleep 0.2; build/train_sft --help 2>$out/pipe.log; echo $? >$out/pipe.code; } | : # a reader that has read enough
[ "$(cat $out/pipe.code)" = 0 ] && [ ! -s $out/pipe.log ] && ok bad_pipe_closed || fail bad_pipe_closed "$(head -n 1 $out/pipe.log)"
ln -s /dev/null $out/device; build/make_arith $out/device 5 2>$out/device.log; [ $? -eq 1 ] && grep -q 'is not a regular file' $out/device.log && [ -L $out/device ] && ok bad_device_output || fail bad_device_output "$(head -n 1 $out/device.log)"
build/make_arith $out/wrong.jsonl 5 1 0 101 2>$out/wrong.log; [ $? -eq 2 ] && [ ! -e $out/wrong.jsonl ] && grep -q '101 wrong answers' $out/wrong.log && ok bad_wrong_share || fail bad_wrong_share "$(head -n 1 $out/wrong.log)"
mkdir $out/runs; printf '{"loss": 1}\n{"loss": nan}\n' > $out/runs/metrics.jsonl; build/compare_runs $out/runs $out/runs $out/runs $out >$out/runs.log 2>&1; [ $? -eq 2 ] && grep -q '^error: .*metrics.jsonl: a line is no JSON object' $out/runs.log && ok bad_compare_runs || fail bad_compare_runs "$(head -n 1 $out/runs.log)"
for program in compare_runs make_arith 02_layouts; do
    build/$program --help >$out/help.log 2>/dev/null; [ $? -eq 0 ] && grep -q '^usage: ' $out/help.log && ok "bad_help $program" || fail "bad_help $program" "$(head -n 1 $out/help.log)"
done
mkdir $out/half $out/whole; run whole sft $labels --dataset $out/arith.jsonl --metrics_path $out/whole/metrics.jsonl
for seconds in soon 0 -1 nan ''; do
    build/compare_runs $out/whole $out/whole $out/whole $out/curves 1 "$seconds" 2>$out/runs.log; [ $? -eq 2 ] && grep -q "^error: '$seconds' is no processor time; give seconds above 0" $out/runs.log && ok "bad_compare_seconds '$seconds'" || fail "bad_compare_seconds '$seconds'" "$(head -n 1 $out/runs.log)"
done
build/compare_runs $out/whole $out/half $out/whole $out/curves 2>$out/runs.log; [ $? -eq 2 ] && grep -q '^error: .*half/metrics.jsonl: No such file or directory; each DIR holds metrics.jsonl' $out/runs.log && ok bad_compare_half || fail bad_compare_half "$(head -n 1 $out/runs.log)"
build/compare_runs $out/whole $out/whole $out/whole $out/curves >$out/runs.log 2>&1; grep -q "^curves: $out/curves/loss.svg" $out/runs.log && [ -s $out/curves/loss.svg ] && [ -s $out/curves/summary.json ] && ok bad_compare_makes || fail bad_compare_makes "$(head -n 1 $out/runs.log)"
build/compare_runs $out/whole $out/whole $out/whole $out/arith.jsonl >$out/runs.log 2>&1; [ $? -eq 2 ] && [ "$(wc -l <$out/runs.log)" -eq 1 ] && grep -q '^error: .*arith.jsonl: is there but is no folder' $out/runs.log && ok bad_compare_file || fail bad_compare_file "$(head -n 1 $out/runs.log)"

# a run that fails leaves what was saved before: the checkpoint goes on to the weights of the undisturbed run
for stage in "dpo $keys --dataset $out/arith.jsonl" "rm $keys --dataset $out/arith.jsonl" "kto $labels --dataset $out/labelled.jsonl"; do
    trainer=${stage%% *} options="${stage#* } --learning_rate 1e-3"
    run $trainer.whole $trainer $options --max_steps 3
    run $trainer.saved $trainer $options --max_steps 2 --save_steps 2
    before=$(cat $out/$trainer.saved.ckpt/latest $out/$trainer.saved.ckpt/global_step2/* | cksum)
    for world in 1 4; do # fails in the step after, or when its weights, which are no numbers, are to be saved
        refuse ${trainer}_diverged_$world $trainer 'step [0-9]+|holds' $options --max_steps 9 --save_steps 1 --max_ckpt_num 1 --load_checkpoint --ckpt_path $out/$trainer.saved.ckpt --learning_rate 1e300 --max_norm 0 --ring_attn_size $world
    done
    [ "$before" = "$(cat $out/$trainer.saved.ckpt/latest $out/$trainer.saved.ckpt/global_step2/* | cksum)" ] && [ "$(ls $out/$trainer.saved.ckpt)" = "$(printf 'global_step2\nlatest')" ] && ok "bad_${trainer}_kept" || fail "bad_${trainer}_kept" "$(ls $out/$trainer.saved.ckpt | tr '\n' ' ')"
    run $trainer.after $trainer $options --max_steps 3 --load_checkpoint --ckpt_path $out/$trainer.saved.ckpt && cmp -s $out/$trainer.after/model.safetensors $out/$trainer.whole/model.safetensors && ok "bad_${trainer}_goes_on" || fail "bad_${trainer}_goes_on" "$(tail -n 1 $out/$trainer.after.log)"
done

# make verify: a device that was not built in, numbers of ranks and layouts that it does not have
while IFS='|' read -r options pattern; do
    ci/limit.sh 120 build/verify_sp $options >$out/verify.log 2>&1; code=$?
    [ $code -eq 2 ] && [ "$(wc -l <$out/verify.log)" -eq 1 ] && grep -q "^error: .*$pattern" $out/verify.log && ok "bad_verify $options" || fail "bad_verify $options" "exit code $code: $(head -n 1 $out/verify.log)"
done <<'LIST'
--device cuda|type make verify DEVICE=cuda
--device gpu|none of --json
--ring_attn_size 9|ring_attn_size 2 to 8
--ring_attn_size|ring_attn_size 2 to 8
--layout none|--layout is 'none'; give one of 
--layout|--layout is ''
LIST
build/verify_sp --ring_attn_size 8 --device cpu >$out/verify.log 2>&1 && grep -qE '^GRPO gradient( +8){4}$' $out/verify.log && ok verify_ranks || fail verify_ranks "$(head -n 2 $out/verify.log | tail -n 1)"
layouts=$(awk '/^#define SEQPAR_LAYOUTS/ { on = 1 } on && match($0, /"[^"]+"/) { print substr($0, RSTART + 1, RLENGTH - 2) } on && !/\\$/ { exit }' seqpar.h)
build/verify_sp --layout none 2>&1 | grep -qF "give one of $(echo $layouts | sed 's/ /, /g')" && ok verify_names_layouts || fail verify_names_layouts "$(build/verify_sp --layout none 2>&1)"
for layout in $layouts; do
    build/verify_sp --ring_attn_size 3 --layout $layout >$out/verify.log 2>&1 && grep -qE "^$layout +ring +llama3 +Ulysses +2D$" $out/verify.log && ok "verify_$layout" || fail "verify_$layout" "$(head -n 2 $out/verify.log | tail -n 1)"
done
build/verify_sp --help >$out/verify.log 2>&1 && grep -q -- '--ring_attn_size P' $out/verify.log && ok verify_help || fail verify_help "$(head -n 1 $out/verify.log)"

# the drawing of layouts
while IFS='|' read -r options pattern; do
    ci/limit.sh 120 build/02_layouts $options >$out/layouts.log 2>&1; code=$?
    [ $code -eq 2 ] && [ "$(wc -l <$out/layouts.log)" -eq 1 ] && grep -q "^error: .*$pattern" $out/layouts.log && ok "bad_layouts $options" || fail "bad_layouts $options" "exit code $code: $(head -n 1 $out/layouts.log)"
done <<'LIST'
0|S, the tokens, is '0'
16 1000000|P, the ranks, is '1000000'; give a whole number from 1 to 64
16 4 0|C, the tokens of a cell, is '0'; give a whole number from 1 to 1000000
16 4 1000001|C, the tokens of a cell, is '1000001'
16 4 x|C, the tokens of a cell, is 'x'
16 4 16 3|'3' is one too many
LIST

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
