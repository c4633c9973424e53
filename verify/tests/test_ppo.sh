#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The options of train_ppo: each does something, the same on any number of ranks, and where a number can be foretold, that number.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_ppo
rm -rf $out; mkdir -p $out
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }

build/make_arith $out/arith.jsonl 600 5 >/dev/null
build/make_arith $out/eval.jsonl 12 6 >/dev/null
build/make_arith $out/text.jsonl 12 7 >/dev/null
shape="--packing_samples --max_len 210 --pack_len 420 --num_hidden_layers 1 --cell 16 --hidden_size 64 --num_attention_heads 4 --logging_steps 1000"
build/train_sft --dataset $out/arith.jsonl --input_key question --output_key answer $shape --train_batch_size 16 --max_steps 300 --learning_rate 5e-3 --save_path $out/sft >$out/sft.log 2>&1 || fail ppo_sft "$(tail -n 1 $out/sft.log)"
build/train_rm $shape --dataset $out/arith.jsonl --eval_dataset $out/eval.jsonl --prompt_key question --chosen_key answer --rejected_key wrong --train_batch_size 12 --max_steps 3 --learning_rate 2e-3 --pretrain $out/sft --save_path $out/rm >$out/rm.log 2>&1 || fail ppo_rm "$(tail -n 1 $out/rm.log)"
prompts="--prompt_data $out/arith.jsonl --input_key question --label_key answer --prompt_max_len 160 --max_samples 96"
group="--generate_max_len 48 --reward_rule last_number --rollout_batch_size 8 --n_samples_per_prompt 4 --train_batch_size 16 --max_steps 4 --advantage_estimator rloo"
critic="--generate_max_len 24 --reward_pretrain $out/rm --rollout_batch_size 12 --train_batch_size 6 --max_steps 4 --save_value_network"
# run NAME OPTIONS...
run() { local name=$1; shift; rm -rf $out/$name; again $name "$@"; }
again() { local name=$1; shift; ci/limit.sh 240 build/train_ppo $shape --micro_train_batch_size 4 --pretrain $out/sft --lr_scheduler constant --warmup_steps 0 --actor_learning_rate 2e-4 --critic_learning_rate 1e-3 --save_path $out/$name --ckpt_path $out/$name/ckpt --metrics_path $out/$name.jsonl $prompts "$@" >$out/$name.log 2>&1; }
metrics() { sed 's/, "generate_seconds.*//' $out/$1.jsonl; }
first() { grep -m 1 "\"$2\": " $out/$1.jsonl | sed -nE "s/.*\"$2\": ([-0-9.e+]*).*/\1/p"; }
near() { # NAME A B: equal to a millionth
    echo "$2 $3" | awk '{ d = $1 - $2; if (d < 0) d = -d; s = $2 < 0 ? -$2 : $2; exit !(NF == 2 && s > 0 && d <= 1e-6 * s) }' && ok "$1" || fail "$1" "$2 is not $3"
}
weights_equal() { cmp -s $out/$1/model.safetensors $out/$2/model.safetensors && { [ ! -d $out/$2/critic ] || cmp -s $out/$1/critic/model.safetensors $out/$2/critic/model.safetensors; }; }

run group $group || fail ppo_group "$(tail -n 1 $out/group.log)"
run critic $critic || fail ppo_critic "$(tail -n 1 $out/critic.log)"
awk -F'"reward": ' '{ sum += $2 } END { exit !(sum > 0) }' $out/group.jsonl && ok ppo_rewards_seen || fail ppo_rewards_seen "no text was answered rightly"

# acts NAME BASE OPTIONS...: other weights (of actor or critic) than without the options, and the same in other worlds
worlds=("--ring_attn_size 4" "--ring_attn_size 2 --data_parallel_size 2 --schedule llama3 --zero_stage 3")
acts() {
    local name=$1 base=$2 world i=0; shift 2
    run $name ${!base} "$@" || { fail "ppo_$name" "$(tail -n 1 $out/$name.log)"; return; }
    weights_equal $name $base && { fail "ppo_$name" "the option does nothing"; return; }
    for world in "${worlds[@]}"; do
        i=$((i + 1))
        if ! run $name.$i ${!base} "$@" $world; then fail "ppo_$name $world" "$(tail -n 1 $out/$name.$i.log)"
        elif ! weights_equal $name.$i $name; then fail "ppo_$name $world" "weights differ"
        elif [ "$(metrics $name.$i)" != "$(metrics $name)" ]; then fail "ppo_$name $world" "metrics differ"
        else ok "ppo_$name $world"; fi
    done
}
acts gspo group --policy_loss_type gspo --eps_clip_low_high 0.003,0.004
acts gspo_kl critic --policy_loss_type gspo --use_kl_loss --use_kl_estimator_k3 --entropy_loss_coef 0.01
acts filtered group --dynamic_filtering --max_samples 400
acts overlong group --overlong_buffer_len 24 --overlong_penalty_factor 0.5
acts stop group --stop_properly_penalty_coef -0.5
acts normalized critic --normalize_reward
acts ptx group --pretrain_data $out/text.jsonl --ptx_coef 0.3
acts ptx_critic critic --pretrain_data $out/text.jsonl,$out/eval.jsonl
acts ema critic --enable_ema --ema_beta 0.9 --critic.max_norm 0.01
acts critic_sgd critic --critic.optim sgd
acts critic_adam critic --critic.adam.betas 0.5,0.6 --critic.adam.eps 1e-3
acts critic_decay critic --critic.adam.weight_decay 0.3
acts critic_schedule critic --critic.lr_scheduler linear --critic.lr_warmup_ratio 0.5
# attention_dropout: of the actor, and of the critic, which begins as the reward model
for model in sft rm; do cp -r $out/$model $out/dropped_$model; sed -i 's/^{/{"attention_dropout": 0.25,/' $out/dropped_$model/config.json; done
acts dropout group --pretrain $out/dropped_sft
acts dropout_critic critic --reward_pretrain $out/dropped_rm
acts critic_cosine critic --critic.lr_scheduler cosine_with_min_lr --critic.min_lr_ratio 0.5
[ "$(metrics critic_schedule | head -n 1 | sed 's/, "critic_loss.*//')" = "$(metrics critic | head -n 1 | sed 's/, "critic_loss.*//')" ] && cmp -s $out/ema.1/ema/model.safetensors $out/ema/ema/model.safetensors && ok ppo_ema_ranks || fail ppo_ema_ranks "the mean of the weights differs, or the critic's schedule moves the actor"

# ---- numbers that can be foretold ----
# one ratio a text is one ratio a token while it is 1, for texts of one length
run short $group --generate_max_len 6 --reward_pretrain $out/rm --train_batch_size 32 --max_steps 1
run short_gspo $group --generate_max_len 6 --reward_pretrain $out/rm --train_batch_size 32 --max_steps 1 --policy_loss_type gspo
near ppo_gspo_first_norm "$(first short_gspo grad_norm)" "$(first short grad_norm)"
# all texts are cut off, and by all of the buffer too long
run brief $group --reward_pretrain $out/rm --generate_max_len 3 --max_steps 1
run cut $group --reward_pretrain $out/rm --generate_max_len 3 --max_steps 1 --stop_properly_penalty_coef -0.75 && [ "$(first cut reward)" = -0.75 ] && ok ppo_cut_off || fail ppo_cut_off "$(first cut reward)"
run half_cut $group --reward_pretrain $out/rm --generate_max_len 3 --max_steps 1 --stop_properly_penalty_coef 0.5 && near ppo_cut_off_half "$(first half_cut reward)" "$(awk "BEGIN { printf \"%.17g\", 0.5 * $(first brief reward) }")"
run long $group --reward_pretrain $out/rm --generate_max_len 3 --max_steps 1 --overlong_buffer_len 2 --overlong_penalty_factor 0.25 && near ppo_overlong_whole "$(first long reward)" "$(awk "BEGIN { printf \"%.17g\", $(first brief reward) - 0.25 }")"
number() { sed -nE "s/.*\"$1\":[[:space:]]*([-0-9.e+]*).*/\1/p" $out/rm/config.json; }
near ppo_normalized_reward "$(first normalized reward)" "$(awk "BEGIN { printf \"%.17g\", ($(first critic reward) - $(number mean)) / $(number std) }")"
scores=$(sed -nE 's/ +(chosen|rejected)_reward ([-0-9.]+)/\2/p' $out/rm.log | awk '{ sum += $1 } END { print sum / 2 }')
echo "$scores $(number mean) $(number std)" | awk '{ d = $1 - $2; exit !(NF == 3 && d < 2e-6 && d > -2e-6 && $3 > 0) }' && ok ppo_rm_moments || fail ppo_rm_moments "$scores $(number mean) $(number std)"
# every group is kept: the run without filtering
run all $group --dynamic_filtering --dynamic_filtering_reward_range -1,2 && weights_equal all group && ok ppo_filter_none || fail ppo_filter_none "$(tail -n 1 $out/all.log)"
[ "$(first filtered prompts_drawn)" -gt 8 ] && ok ppo_filter_draws || fail ppo_filter_draws "$(first filtered prompts_drawn) prompts were drawn"
run dry $group --dynamic_filtering --max_samples 32 --max_steps -1 && grep -q 'notice: all 32 prompts are used up after [1-3] of 4 rollouts' $out/dry.log && [ -f $out/dry/model.safetensors ] && ok ppo_filter_used_up || fail ppo_filter_used_up "$(tail -n 2 $out/dry.log | head -n 1)"
# the mean of the weights, at both ends
run ema0 $critic --enable_ema --ema_beta 0 && cmp -s $out/ema0/ema/model.safetensors $out/ema0/model.safetensors && ok ppo_ema_0 || fail ppo_ema_0 "not the last weights"
run ema1 $critic --enable_ema --ema_beta 1 && cmp -s $out/ema1/ema/model.safetensors $out/sft/model.safetensors && ok ppo_ema_1 || fail ppo_ema_1 "not the first weights"
# nothing to win and nothing to pay: what is left is ptx_coef times the step of SFT on the same documents
flat="--generate_max_len 3 --stop_properly_penalty_coef 0 --init_kl_coef 0 --max_norm 0 --max_steps 1 --train_batch_size 32"
run flat $group $flat --pretrain_data $out/text.jsonl --ptx_coef 0.25
build/train_sft --dataset $out/text.jsonl --input_key question --pretrain_mode $shape --train_batch_size 12 --max_steps 1 --max_norm 0 --pretrain $out/sft --save_path $out/flat_sft --metrics_path $out/flat_sft.jsonl >$out/flat_sft.log 2>&1
near ppo_ptx_loss "$(first flat ptx_loss)" "$(first flat_sft loss)"
near ppo_ptx_norm "$(first flat grad_norm)" "$(awk "BEGIN { printf \"%.17g\", 0.25 * $(first flat_sft grad_norm) }")"
# every step other documents, while the weights stand still
run standing $group --max_steps 2 --train_batch_size 32 --actor_learning_rate 1e-30 --pretrain_data $out/arith.jsonl
[ "$(grep -o '"ptx_loss": [0-9.]*' $out/standing.jsonl | sort -u | wc -l)" = 2 ] && cmp -s $out/standing/model.safetensors $out/sft/model.safetensors && ok ppo_ptx_documents || fail ppo_ptx_documents "$(tail -n 1 $out/standing.log)"
# other names for the same
run k3 $critic --use_kl_loss --use_kl_estimator_k3 && run k3_same $critic --use_kl_loss --kl_estimator k3 && run k1 $critic --use_kl_loss && weights_equal k3 k3_same && ! weights_equal k3 k1 && ok ppo_k3 || fail ppo_k3 "use_kl_estimator_k3 is not kl_estimator k3"
run head ${critic/--reward_pretrain*--rollout/--reward_rule last_number --rollout} --critic_pretrain $out/sft --value_prefix_head value && head -c 4000 $out/head/critic/model.safetensors | grep -aq '"value.weight"' && ok ppo_head_name || fail ppo_head_name "$(tail -n 1 $out/head.log)"
[ -f $out/critic/critic/model.safetensors ] && run unsaved ${critic/--save_value_network/} && [ ! -e $out/unsaved/critic ] && ok ppo_save_value_network || fail ppo_save_value_network "the critic was written unasked, or not when asked"
# texts and rows at a time: memory, not bits
run alone $critic --micro_rollout_batch_size 1 --micro_train_batch_size 1 && run many $critic --micro_rollout_batch_size 12 --micro_train_batch_size 1 && weights_equal alone many && weights_equal alone critic && [ "$(first alone peak_bytes)" -lt "$(first many peak_bytes)" ] && ok ppo_micro_rollout || fail ppo_micro_rollout "$(first alone peak_bytes) bytes alone, $(first many peak_bytes) for 12"
# evaluation with samples
run sampled $group --max_steps 2 --eval_dataset $out/eval.jsonl --eval_temperature 0.8 --eval_n_samples_per_prompt 5 && run sampled.4 $group --max_steps 2 --eval_dataset $out/eval.jsonl --eval_temperature 0.8 --eval_n_samples_per_prompt 5 --ring_attn_size 4
[ "$(metrics sampled)" = "$(metrics sampled.4)" ] && grep -q 'of 60 texts for held-out prompts are correct' $out/sampled.log && weights_equal sampled sampled.4 && ok ppo_eval_samples || fail ppo_eval_samples "$(tail -n 1 $out/sampled.log)"
# nothing has moved before the first update; where the sampler sums otherwise there is a pass, which is said
first_step() { sed -nE 's/^first step: ratio exactly 1 for ([0-9]+) of ([0-9]+) tokens, KL against the reference exactly 0 for ([0-9]+)(; .*)?$/\1 \2 \3\4/p' $out/$1.log; }
for name in sampled sampled.4; do
    [[ "$(first_step $name)" =~ ^([1-9][0-9]*)\ ([0-9]+)\ ([0-9]+)$ ]] && [ "${BASH_REMATCH[1]} ${BASH_REMATCH[1]}" = "${BASH_REMATCH[2]} ${BASH_REMATCH[3]}" ] && ok ppo_first_step_$name || fail ppo_first_step_$name "'$(first_step $name)'"
done
run relaxed $group --max_steps 2 --ring_attn_size 3 --relaxed_attention && [[ "$(first_step relaxed)" =~ ^[0-9]+\ [1-9][0-9]*\ [0-9]+\;\ old\ log-probs\ are\ not\ the\ sampler\'s:\ --relaxed_attention ]] && ok ppo_first_step_relaxed || fail ppo_first_step_relaxed "'$(first_step relaxed)' $(tail -n 1 $out/relaxed.log)"
run cold $group --max_steps 2 --eval_dataset $out/eval.jsonl && ! [ "$(first sampled eval_exact)" = "$(first cold eval_exact)" ] && weights_equal sampled cold && ok ppo_eval_temperature || fail ppo_eval_temperature "$(first sampled eval_exact) at temperature 0.8 and at 0"

# ---- resume in the middle, elsewhere: what was drawn, the mean of the weights, the pretraining documents ----
long="$group --max_samples 400 --dynamic_filtering --enable_ema --ema_beta 0.9 --pretrain_data $out/text.jsonl"
run whole $long
run half $long --max_steps 2 --save_steps 1 --ring_attn_size 2 && again half $long --load_checkpoint --data_parallel_size 2 && weights_equal half whole && cmp -s $out/half/ema/model.safetensors $out/whole/ema/model.safetensors && ok ppo_resume || fail ppo_resume "$(tail -n 1 $out/half.log)"

# ---- refused: one sentence, a code, nothing written ----
refuse() { # NAME PATTERN BASE OPTIONS...
    local name=$1 pattern=$2 base=$3 code; shift 3
    run refused ${!base} "$@"
    code=$?
    if [ $code -eq 0 ] || [ $code -ge 124 ]; then fail "refuse_$name" "exit code $code"
    elif [ "$(grep -c '^error: ' $out/refused.log)" -ne 1 ] || ! grep '^error: ' $out/refused.log | grep -qE "$pattern"; then fail "refuse_$name" "$(tail -n 1 $out/refused.log | cut -c1-300)"
    elif [ -e $out/refused/model.safetensors ]; then fail "refuse_$name" "wrote a model all the same"
    else ok "refuse_$name"; fi
}
refuse filter_alone 'dynamic_filtering .*n_samples_per_prompt is 1' critic --dynamic_filtering
refuse filter_range 'dynamic_filtering_reward_range runs from 1 to 0' group --dynamic_filtering --dynamic_filtering_reward_range 1,0
refuse filter_nothing 'dynamic_filtering kept 0 of 96 prompts' group --dynamic_filtering --dynamic_filtering_reward_range 2,3 --ring_attn_size 2
refuse overlong 'overlong_buffer_len 49' group --overlong_buffer_len 49
refuse overlong_factor 'overlong_penalty_factor 2' group --overlong_penalty_factor 2
refuse stop 'stop_properly_penalty_coef is 1.5' group --stop_properly_penalty_coef 1.5
refuse normalize_what 'normalize_reward' group --normalize_reward
cp -r $out/rm $out/bare; sed -i 's/"std":[^}]*/"std": 0/' $out/bare/config.json
refuse reward_head 'tensor "score.weight" is not a tensor of the model .* name the head by --value_head_prefix' critic --value_head_prefix value
refuse reward_headless 'there is no tensor "score.weight", so this is no reward model' critic --reward_pretrain $out/sft
refuse normalize_moments 'normalize_reward needs "mean" and a positive "std"' critic --reward_pretrain $out/bare --normalize_reward --ring_attn_size 2
# what a config says of a reward model's scores holds for its own weights alone: trained further they are made anew, once
further() { build/train_rm $shape --dataset $out/arith.jsonl --prompt_key question --chosen_key answer --rejected_key wrong --train_batch_size 12 --max_steps 2 --learning_rate 2e-3 --pretrain $out/rm "$@" >$out/further.log 2>&1; }
further --save_path $out/further && further --save_path $out/measured --eval_dataset $out/eval.jsonl && scores=$(sed -nE 's/ +(chosen|rejected)_reward ([-0-9.]+)/\2/p' $out/further.log | awk '{ sum += $1 } END { print sum / 2 }') || fail ppo_further "$(tail -n 1 $out/further.log)"
[ "$(grep -cE '"(mean|std)"' $out/further/config.json)" = 2 ] && ! grep -qF "$(grep -E '"mean"' $out/rm/config.json)" $out/further/config.json && ok ppo_moments_not_the_old || fail ppo_moments_not_the_old "$(grep -E 'mean|std' $out/further/config.json)"
further --save_path $out/kept --max_steps 0; [ "$(grep -E '"(mean|std)"' $out/kept/config.json)" = "$(grep -E '"(mean|std)"' $out/rm/config.json)" ] && ok ppo_moments_kept || fail ppo_moments_kept "$(grep -E 'mean|std' $out/kept/config.json)"
run further_normalized $critic --reward_pretrain $out/further --normalize_reward && ok ppo_moments_of_training_data || fail ppo_moments_of_training_data "$(tail -n 1 $out/further_normalized.log)"
[ "$(grep -cE '"(mean|std)"' $out/measured/config.json)" = 2 ] && echo "$scores $(sed -nE 's/.*"mean":[[:space:]]*([-0-9.e+]*).*/\1/p' $out/measured/config.json) $(number mean)" | awk '{ d = $1 - $2; exit !(NF == 3 && d < 6e-6 && d > -6e-6 && $2 != $3) }' && run remeasured $critic --reward_pretrain $out/measured --normalize_reward && ok ppo_moments_anew || fail ppo_moments_anew "$scores $(grep -E 'mean|std' $out/measured/config.json | tr '\n' ' ')"
# rewards whose sum over texts would overflow
cp -r $out/rm $out/steep; sed -i 's/"std":[^}]*/"std": 1e-300/' $out/steep/config.json
refuse reward_overflow 'text 0 of the rollout has a reward of -?[0-9.]*e\+[0-9]*, but the limit is 1e\+100' critic --reward_pretrain $out/steep --normalize_reward
refuse penalty_overflow 'text [0-9]* of the rollout has a reward of -1e\+308' group --generate_max_len 3 --stop_properly_penalty_coef -1e308 --ring_attn_size 2
refuse k3 'contradicts kl_estimator k2' critic --use_kl_estimator_k3 --kl_estimator k2
refuse eval_samples 'eval_n_samples_per_prompt is 3' group --eval_n_samples_per_prompt 3 --eval_dataset $out/eval.jsonl
refuse save_critic 'rloo has no critic' group --save_value_network
refuse ptx_temperature 'temperature is 0.7' group --pretrain_data $out/text.jsonl --temperature 0.7
refuse ptx_file 'nowhere.jsonl' group --pretrain_data $out/nowhere.jsonl
refuse temperature 'temperature is 1e300, but it must be a number above 0, up to 1e\+30' group --temperature 1e300
refuse stop_endless 'stop_properly_penalty_coef is -inf, but it must be a finite number up to 1' group --stop_properly_penalty_coef -inf
refuse policy 'policy_loss_type' group --policy_loss_type best
refuse ema 'ema_beta is 2' group --enable_ema --ema_beta 2
refuse max_len 'max_len is 200, but prompt_max_len 160 . generate_max_len 48 are more tokens' group --max_len 200
refuse cut_prompt 'truncation cut: prompts are never cut' group --truncation cut
refuse generator_group 'the group of the generator has 1 rank \(--vllm_num_engines x --vllm_tensor_parallel_size\), but must have a multiple of ring_attn_size 2' group --vllm_num_engines 1 --ring_attn_size 2 --actor_num_gpus_per_node 2
refuse reference_group 'the group of the reference has 1 rank \(--ref_num_nodes x --ref_num_gpus_per_node\)' group --ref_num_gpus_per_node 1 --ring_attn_size 2
build/train_rm $shape --num_attention_heads 2 --num_key_value_heads 1 --dataset $out/arith.jsonl --eval_dataset $out/eval.jsonl --prompt_key question --chosen_key answer --rejected_key wrong --train_batch_size 12 --max_steps 1 --save_path $out/one_head >/dev/null 2>&1
refuse stride_reward 'heads_k_stride 2 .* does not divide the 1 kv heads of the model in --reward_pretrain .*/one_head' critic --reward_pretrain $out/one_head --ring_attn_size 2 --ring_head_stride 2
build/train_ppo --help | grep -qE '^  --(dataset|learning_rate|dataset_probs) ' && fail ppo_help "lists options of others" || ok ppo_help
refuse critic_betas 'critic.adam.betas' critic --critic.adam.betas 0.5,2

# every option that is acted on is there
unbound=$(awk -F'\t' '$3 == "real" && ("," $4 ",") ~ ",ppo," { print $1 }' demos/trainer/run/options.tsv | while read -r o; do build/train_ppo --help | grep -q -- "^  --$o " || echo "$o"; done)
[ -z "$unbound" ] && ok ppo_options || fail ppo_options "$unbound"

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
