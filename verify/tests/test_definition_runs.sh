#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# --loss_definition as a user meets it: each definition says what it is, has the bits of one rank on four, and the loss that other
# runs' figures come to by its formula; a resume by another definition is refused, and so is what it has no meaning for.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_definition_runs
rm -rf $out; mkdir -p $out
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }

build/make_arith $out/arith.jsonl 40 5 >/dev/null
head -n 1 $out/arith.jsonl > $out/first.jsonl; sed -n 2p $out/arith.jsonl > $out/second.jsonl; cat $out/first.jsonl $out/second.jsonl > $out/both.jsonl
shape="--packing_samples --max_len 200 --pack_len 420 --num_hidden_layers 1 --cell 16 --hidden_size 32 --num_attention_heads 4 --logging_steps 1000 --lr_scheduler constant --warmup_steps 0"
for steps in 4 8; do
    build/train_sft --dataset $out/arith.jsonl --input_key question --output_key answer $shape --train_batch_size 12 --max_steps $steps --max_epochs 9 --learning_rate 5e-3 --save_path $out/sft$steps >$out/sft.log 2>&1 || fail definition_sft "$(tail -n 1 $out/sft.log)"
done
pairs="--prompt_key question --chosen_key answer --rejected_key wrong --ref_pretrain $out/sft4 --beta 0.3"
prompts="--prompt_data $out/arith.jsonl --input_key question --label_key answer --prompt_max_len 160 --generate_max_len 24 --rollout_batch_size 6 --n_samples_per_prompt 4 --train_batch_size 24 --max_steps 2 --init_kl_coef 0 --actor_learning_rate 2e-4"

run() { local name=$1 trainer=$2; shift 2; build/train_$trainer $shape --pretrain $out/sft8 --save_path $out/$name --ckpt_path $out/$name.ckpt --metrics_path $out/$name.jsonl "$@" >$out/$name.log 2>&1; }
first() { grep -m 1 "\"$2\": " $out/$1.jsonl | sed -nE "s/.*\"$2\": ([-0-9.e+]*).*/\1/p"; }
# near GOT WANT
near() { awk -v a="$1" -v b="$2" 'BEGIN { d = a - b; if (d < 0) d = -d; s = b < 0 ? -b : b; exit !(a != "" && b != "" && a == a + 0 && d <= 1e-4 * (s + 1e-3)) }'; }
of() { awk "BEGIN { printf \"%.12g\", $1 }"; }

# same NAME SAYS TRAINER OPTIONS...: what the run says of its loss; the bits of one rank on four
same() {
    local name=$1 says=$2 trainer=$3; shift 3
    run $name $trainer "$@" && run $name.4 $trainer "$@" --ring_attn_size 4 || { fail definition_$name "$(tail -n 1 $out/$name.log) $(tail -n 1 $out/$name.4.log)"; return; }
    grep -qF "loss: $says" $out/$name.log && ok definition_${name}_says || fail definition_${name}_says "$(grep '^loss: ' $out/$name.log)"
    cmp -s $out/$name/model.safetensors $out/$name.4/model.safetensors && ! cmp -s $out/$name/model.safetensors $out/sft8/model.safetensors && [ -n "$(first $name grad_norm)$(first $name actor_grad_norm)$(first $name reward)" ] &&
        [ "$(sed -E 's/, "(tokens_per_second|generate_seconds).*//' $out/$name.jsonl)" = "$(sed -E 's/, "(tokens_per_second|generate_seconds).*//' $out/$name.4.jsonl)" ] && ok definition_${name}_ranks || fail definition_${name}_ranks "four ranks have other bits than one"
}
one="$pairs --train_batch_size 1 --max_steps 1 --learning_rate 1e-3"
two="$pairs --train_batch_size 2 --max_steps 1 --learning_rate 1e-3"

# IPO: the second has the first one's log-ratios by the lengths of the responses
length() { sed -nE "s/.*\"$2\": \"([^\"]*)\".*/\1/p" $out/$1.jsonl | sed 's/\\n/N/g' | awk '{ print length($0) + 1 }'; }
same ipo.openrlhf 'ipo by sums (openrlhf)' dpo --dataset $out/first.jsonl $one --ipo --loss_definition openrlhf
same ipo.trl 'ipo by per-token means (trl)' dpo --dataset $out/first.jsonl $one --ipo --loss_definition trl
same ipo.llamafactory 'ipo by per-token means (llamafactory)' dpo --dataset $out/first.jsonl $one --pref_loss ipo --loss_definition llamafactory
same ipo.from 'ipo by per-token means (trl)' dpo --dataset $out/first.jsonl $one --ipo --from axolotl
w=$(first ipo.openrlhf chosen_reward) l=$(first ipo.openrlhf rejected_reward)
near "$(first ipo.openrlhf loss)" "$(of "(($w - ($l)) / 0.3 - 1 / 0.6) ^ 2")" && ok definition_ipo_sums || fail definition_ipo_sums "$(first ipo.openrlhf loss) of $w and $l"
want=$(of "(($w) / 0.3 / $(length first answer) - ($l) / 0.3 / $(length first wrong) - 1 / 0.6) ^ 2")
for by in trl llamafactory from; do near "$(first ipo.$by loss)" "$want" && ok definition_ipo_means_$by || fail definition_ipo_means_$by "$(first ipo.$by loss), want $want"; done

# the NLL: of each pair alone, then of both
for set in first second; do for nll in 0 1; do run alone.$set.$nll dpo --dataset $out/$set.jsonl $one --nll_loss_coef $nll || fail definition_nll "$(tail -n 1 $out/alone.$set.$nll.log)"; done; done
same nll.none 'sigmoid by sums (openrlhf)' dpo --dataset $out/both.jsonl $two --loss_definition openrlhf
same nll.openrlhf "sigmoid by sums, with the NLL (mean over each chosen response) (openrlhf)" dpo --dataset $out/both.jsonl $two --nll_loss_coef 1 --loss_definition openrlhf
same nll.trl "sigmoid by sums, with the NLL (mean over the step's chosen tokens) (trl)" dpo --dataset $out/both.jsonl $two --nll_loss_coef 1 --loss_definition trl
a=$(of "$(first alone.first.1 loss) - $(first alone.first.0 loss)") b=$(of "$(first alone.second.1 loss) - $(first alone.second.0 loss)")
n=$(length first answer) m=$(length second answer)
near "$(first nll.openrlhf loss)" "$(of "$(first nll.none loss) + ($a + $b) / 2")" && ok definition_nll_responses || fail definition_nll_responses "$(first nll.openrlhf loss) of $a and $b"
near "$(first nll.trl loss)" "$(of "$(first nll.none loss) + ($n * $a + $m * $b) / ($n + $m)")" && [ "$n" != "$m" ] && ok definition_nll_tokens || fail definition_nll_tokens "$(first nll.trl loss) of $n x $a and $m x $b"

# kto_pair, by the figures of both pairs
same kto_pair 'kto_pair, means of all pairs of the step (llamafactory)' dpo --dataset $out/both.jsonl $two --pref_loss kto_pair --loss_definition llamafactory
want=$(for set in first second; do echo "$(first alone.$set.0 chosen_reward) $(first alone.$set.0 rejected_reward)"; done | awk '
    { w[NR] = $1; l[NR] = $2; W += $1 / 2; L += $2 / 2 }
    END { if (W < 0) W = 0; if (L < 0) L = 0; for (i = 1; i <= NR; i++) s += 1 / (1 + exp(w[i] - L)) + 1 / (1 + exp(W - l[i])); printf "%.12g", s / 4 }')
near "$(first kto_pair loss)" "$want" && ok definition_kto_pair || fail definition_kto_pair "$(first kto_pair loss), want $want"
same robust 'robust by sums, label smoothing 0.1 (trl)' dpo --dataset $out/both.jsonl $two --pref_loss robust --label_smoothing 0.1 --loss_definition trl
same cdpo 'sigmoid by sums, label smoothing 0.1 (llamafactory)' dpo --dataset $out/both.jsonl $two --label_smoothing 0.1 --loss_definition llamafactory

# policies: Dr. GRPO's divisor, by the first update, whose ratios are 1
rule="--reward_rule last_number --advantage_estimator"
build/train_rm $shape --pretrain $out/sft8 --dataset $out/arith.jsonl --prompt_key question --chosen_key answer --rejected_key wrong --train_batch_size 6 --max_steps 2 --learning_rate 2e-3 --save_path $out/rm >$out/rm.log 2>&1 || fail definition_rm "$(tail -n 1 $out/rm.log)"
scored="--reward_pretrain $out/rm --advantage_estimator"
same dr_grpo.openrlhf "ppo, a mean over the step's tokens, log-ratios cut at +-20, KL of a token within +-10 (openrlhf)" ppo $prompts $scored dr_grpo --loss_definition openrlhf
same dr_grpo.trl 'ppo, a mean over texts and generate_max_len, log-ratios not cut (trl)' ppo $prompts $scored dr_grpo --loss_definition trl
near "$(first dr_grpo.trl policy_loss)" "$(of "$(first dr_grpo.openrlhf policy_loss) * $(first dr_grpo.openrlhf response_length) / 24")" && ! near "$(first dr_grpo.openrlhf policy_loss)" 0 && ok definition_dr_grpo || fail definition_dr_grpo "$(first dr_grpo.trl policy_loss), $(first dr_grpo.openrlhf policy_loss), length $(first dr_grpo.openrlhf response_length)"
same group_norm.trl "ppo, a mean over the step's tokens, log-ratios not cut, ratios bounded by 1.1 for any advantage, by a group's deviation + 0.0001 (trl)" ppo $prompts $scored group_norm --dual_clip 1.1 --max_epochs 2 --loss_definition trl
same gspo.openrlhf "gspo, a mean over texts and their tokens, log-ratios not cut, by a group's deviation + 1e-09, KL of a token within +-10 (openrlhf)" ppo $prompts $scored group_norm --policy_loss_type gspo --max_epochs 2 --loss_definition openrlhf
same gae.llamafactory "ppo, a mean over the step's tokens, log-ratios not cut, advantages whitened over n - 1 (llamafactory)" ppo $prompts $scored gae --max_epochs 2 --loss_definition llamafactory

# padding: a token that occurs, in a copy of the folder
cp -r $out/sft8 $out/padded; sed -i -E 's/"pad_token_id": *[0-9]+/"pad_token_id": 32/' $out/padded/config.json
texts="--dataset $out/arith.jsonl --input_key question --output_key answer --train_batch_size 8 --max_steps 2 --learning_rate 2e-3 --pretrain $out/padded"
run plain sft $texts
for by in openrlhf trl llamafactory; do same pad.$by "the embedding of token 32, the pad_token_id of --pretrain ($by), gets no gradient from inputs" sft $texts --loss_definition $by; done
cmp -s $out/pad.trl/model.safetensors $out/pad.openrlhf/model.safetensors && cmp -s $out/pad.trl/model.safetensors $out/pad.llamafactory/model.safetensors && ! cmp -s $out/pad.trl/model.safetensors $out/plain/model.safetensors && [ -s $out/plain/model.safetensors ] && ok definition_pad || fail definition_pad "the padding token learns as any other"
grep -q '^loss: ' $out/plain.log && fail definition_silent "$(grep '^loss: ' $out/plain.log)" || ok definition_silent

# resume where the padding token is another one, of the model and of the critic; where nothing hangs on it, and the same, it goes on
pads() { # NAME FOLDER PATTERN TRAINER OPTIONS...
    local name=$1 folder=$2 pattern=$3 trainer=$4; shift 4
    run pads.$name $trainer "$@" --save_steps 1 || fail definition_pads_$name "$(tail -n 1 $out/pads.$name.log)"
    sed -i -E 's/("pad_token_id":[[:space:]]*)[0-9]+/\146/' $folder/config.json
    run pads.$name $trainer "$@" --load_checkpoint --overwrite && [ "$pattern" ] && fail definition_pads_$name "went on"
    { [ -z "$pattern" ] && [ -s $out/pads.$name/model.safetensors ] && ! grep -q '^error' $out/pads.$name.log; } || { [ "$pattern" ] && grep -q "^error: the checkpoint was written with $pattern: the embedding of that token gets no gradient from inputs" $out/pads.$name.log; } && ok definition_pads_$name || fail definition_pads_$name "$(tail -n 1 $out/pads.$name.log)"
    sed -i -E 's/("pad_token_id":[[:space:]]*)[0-9]+/\132/' $folder/config.json
    run pads.$name $trainer "$@" --load_checkpoint --overwrite && ok definition_pads_${name}_same || fail definition_pads_${name}_same "$(tail -n 1 $out/pads.$name.log)"
}
cp -r $out/rm $out/padded_rm; sed -i -E 's/("pad_token_id":[[:space:]]*)[0-9]+/\132/' $out/padded_rm/config.json
pads model $out/padded 'pad_token_id 32, this run has 46' sft $texts --loss_definition trl
pads free $out/padded '' sft $texts
pads critic $out/padded_rm 'critic_pad_token_id 32, this run has 46' ppo $prompts --reward_pretrain $out/padded_rm --pretrain $out/padded --loss_definition trl

# resume: by the same definition, and refused by another
steps="--dataset $out/arith.jsonl $pairs --train_batch_size 6 --learning_rate 1e-4 --ipo"
run whole dpo $steps --loss_definition trl --max_steps 4
run half dpo $steps --loss_definition trl --max_steps 2 --save_steps 2
for by in "--loss_definition openrlhf" "" "--from openrlhf"; do
    run half dpo $steps $by --max_steps 4 --load_checkpoint && fail "definition_resume $by" "went on" || { grep -q '^error: the checkpoint was written with --loss_definition trl, this run has \(openrlhf\|seqpar\); use the same to go on' $out/half.log && ok "definition_resume $by" || fail "definition_resume $by" "$(tail -n 1 $out/half.log)"; }
done
run half dpo $steps --loss_definition trl --max_steps 4 --load_checkpoint --ring_attn_size 2 && cmp -s $out/half/model.safetensors $out/whole/model.safetensors && ok definition_resume_same || fail definition_resume_same "$(tail -n 1 $out/half.log)"

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
