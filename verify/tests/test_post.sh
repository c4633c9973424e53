#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The stages after SFT as a user meets them: DPO, KTO, reward model, PPO, each on one rank and in other worlds, and what they refuse.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_post
rm -rf $out; mkdir -p $out
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }

build/make_arith $out/arith.jsonl 120 5 >/dev/null
build/make_arith $out/eval.jsonl 12 6 >/dev/null
for set in arith eval; do awk '{ sub(/"wrong": .*/, ""); label = NR % 3 ? "true" : "false"; print $0 "\"label\": " label "}" }' $out/$set.jsonl > $out/$set.labelled.jsonl; done
mv $out/arith.labelled.jsonl $out/labelled.jsonl
shape="--packing_samples --max_len 200 --pack_len 420 --num_hidden_layers 1 --cell 16 --hidden_size 32 --num_attention_heads 4 --logging_steps 1000"
build/train_sft --dataset $out/arith.jsonl --input_key question --output_key answer $shape --train_batch_size 12 --max_steps 12 --learning_rate 5e-3 --save_path $out/sft >$out/sft.log 2>&1 || fail post_sft "$(tail -n 1 $out/sft.log)"
pairs="--dataset $out/arith.jsonl --eval_dataset $out/eval.jsonl --prompt_key question --chosen_key answer --rejected_key wrong --train_batch_size 6 --max_steps 3"
labelled="--dataset $out/labelled.jsonl --eval_dataset $out/eval.labelled.jsonl --input_key question --output_key answer --train_batch_size 8 --max_steps 3"
prompts="--prompt_data $out/arith.jsonl --input_key question --label_key answer --prompt_max_len 160 --generate_max_len 24 --rollout_batch_size 6 --train_batch_size 6 --max_steps 4 --actor_learning_rate 2e-4 --critic_learning_rate 1e-3"

# run NAME TRAINER OPTIONS...
run() { local name=$1 trainer=$2 micro="--micro_train_batch_size 2"; shift 2; [[ "$*" == *accumulation* ]] && micro=; build/train_$trainer $shape $micro --pretrain $out/sft --lr_scheduler constant --warmup_steps 0 --save_path $out/$name --ckpt_path $out/$name/ckpt --metrics_path $out/$name.jsonl "$@" >$out/$name.log 2>&1; }
losses() { sed -E 's/, "(tokens_per_second|generate_seconds).*//' "$1"; }
worlds=("--ring_attn_size 4" "--ring_attn_size 2 --data_parallel_size 2 --zero_stage 3 --schedule llama3" "--data_parallel_size 3 --zero_stage 3 --gradient_checkpointing" "--ring_attn_size 3 --schedule ulysses --gradient_accumulation_steps 4")
# same STAGE TRAINER OPTIONS...: one rank, then every world; weights and metrics to the bit
same() {
    local stage=$1 trainer=$2 i=0 world; shift 2
    run $stage.one $trainer "$@" || { fail "post_$stage" "$(tail -n 1 $out/$stage.one.log)"; return; }
    if cmp -s $out/$stage.one/model.safetensors $out/sft/model.safetensors; then fail "post_$stage" "nothing was learnt"; return; fi
    for world in "${worlds[@]}"; do
        i=$((i + 1))
        if ! run $stage.$i $trainer "$@" $world; then fail "post_$stage $world" "$(tail -n 1 $out/$stage.$i.log)"
        elif ! cmp -s $out/$stage.$i/model.safetensors $out/$stage.one/model.safetensors; then fail "post_$stage $world" "weights differ"
        elif [ "$(losses $out/$stage.$i.jsonl)" != "$(losses $out/$stage.one.jsonl)" ]; then fail "post_$stage $world" "metrics differ"
        else ok "post_$stage $world"; fi
    done
}
same dpo dpo $pairs --learning_rate 2e-3
same ipo dpo $pairs --learning_rate 2e-4 --pref_loss ipo --nll_loss_coef 0.2
same simpo dpo $pairs --learning_rate 2e-3 --pref_loss simpo --beta 2 --label_smoothing 0.1
same rm rm $pairs --learning_rate 2e-3
same kto kto $labelled --learning_rate 2e-3 --beta 0.1 --undesirable_loss_weight 1.3
same grpo ppo $prompts --eval_dataset $out/eval.jsonl --reward_rule last_number --advantage_estimator group_norm --n_samples_per_prompt 8 --use_kl_loss --kl_estimator k3 --max_epochs 2
same ppo ppo $prompts --save_value_network --reward_pretrain $out/rm.one,$out/rm.one --entropy_loss_coef 0.01 --kl_target 0.1
same reinforce ppo $prompts --reward_pretrain $out/rm.one --advantage_estimator reinforce --gamma 0.9 --top_p 0.9 --top_k 20

# what the first step must say
first() { grep -m 1 "\"$2\": " $out/$1.jsonl | sed -nE "s/.*\"$2\": ([-0-9.e+]*).*/\1/p"; }
for stage in dpo.one dpo.1 dpo.2; do [ "$(first $stage loss)" = 0.69314718055994529 ] && ok "post_first_loss_$stage" || fail "post_first_loss_$stage" "$(first $stage loss)"; done
[ "$(first kto.one loss)" = 0.5 ] || awk "BEGIN { exit !($(first kto.one loss) > 0.4) }" && ok post_kto_first || fail post_kto_first "$(first kto.one loss)"
for stage in grpo.one ppo.one; do [ "$(first $stage kl)" = 0 ] && ok "post_first_kl_$stage" || fail "post_first_kl_$stage" "$(first $stage kl)"; done
grep -q 'LlamaForSequenceClassification' $out/rm.one/config.json && ok post_rm_classifier || fail post_rm_classifier "$(head -n 2 $out/rm.one/config.json)"
[ -f $out/ppo.one/critic/model.safetensors ] && cmp -s $out/ppo.one/critic/model.safetensors $out/ppo.1/critic/model.safetensors && ok post_critic || fail post_critic "critics differ or are missing"

# a pair or document a row, and several: other sums, the same mean and so the same gradient
packing() { # STAGE TRAINER OPTIONS...
    local stage=$1 trainer=$2 norms; shift 2
    run $stage.many $trainer "$@" --pack_len 1300 --max_steps 1
    shape=${shape/--packing_samples /} run $stage.alone $trainer "$@" --max_steps 1
    norms="$(first $stage.many grad_norm) $(first $stage.alone grad_norm)"
    echo "$norms" | awk '{ d = $1 - $2; if (d < 0) d = -d; exit !(NF == 2 && $1 > 0 && d <= 1e-6 * $1) }' && [ "$(first $stage.many rows)" -lt "$(first $stage.alone rows)" ] && ok "post_packing_$stage" || fail "post_packing_$stage" "gradient norms $norms"
}
packing dpo dpo $pairs
packing rm rm $pairs
packing kto kto $labelled --beta 0.1 --undesirable_loss_weight 1.3

# resume: stopped after two steps, at another world size
for stage in "dpo $pairs --learning_rate 2e-3" "rm $pairs --learning_rate 2e-3" "kto $labelled --learning_rate 2e-3 --beta 0.1 --undesirable_loss_weight 1.3"; do
    trainer=${stage%% *} options=${stage#* }
    run $trainer.half $trainer $options --max_steps 2 --save_steps 2 --ring_attn_size 2 && run $trainer.half $trainer $options --load_checkpoint --data_parallel_size 2 &&
        cmp -s $out/$trainer.half/model.safetensors $out/$trainer.one/model.safetensors && ok "post_resume_$trainer" || fail "post_resume_$trainer" "$(tail -n 1 $out/$trainer.half.log)"
done

# PPO at a rollout's end: two of four, then the rest elsewhere; actor and critic
ppo="$prompts --save_value_network --reward_pretrain $out/rm.one,$out/rm.one --entropy_loss_coef 0.01 --kl_target 0.1"
run ppo.half ppo $ppo --max_steps 2 --save_steps 2 --ring_attn_size 2 && run ppo.half ppo $ppo --load_checkpoint --data_parallel_size 2 &&
    cmp -s $out/ppo.half/model.safetensors $out/ppo.one/model.safetensors && cmp -s $out/ppo.half/critic/model.safetensors $out/ppo.one/critic/model.safetensors && ok post_resume_ppo || fail post_resume_ppo "$(tail -n 1 $out/ppo.half.log)"

header() { echo $((8 + $(od -An -t u8 -N 8 $1))); } # bytes before a file's numbers
# the reference asked beforehand: the bits of asking it in every step, on any number of ranks, whoever asked
stored() { # STAGE TRAINER OPTIONS...
    local stage=$1 trainer=$2 name file; shift 2
    run $stage.stored1 $trainer "$@" --precompute_ref
    run $stage.stored4 $trainer "$@" --precompute_ref --ring_attn_size 4
    cp -r $out/$stage.stored4/ckpt $out/$stage.kept
    run $stage.used1 $trainer "$@" --precompute_ref --ckpt_path $out/$stage.kept --data_parallel_size 2
    run $stage.packed $trainer "$@" --precompute_ref --ckpt_path $out/$stage.kept --pack_len 1003
    for name in stored1 stored4 used1 packed; do
        if ! cmp -s $out/$stage.$name/model.safetensors $out/$stage.one/model.safetensors; then fail "post_ref_${stage}_$name" "weights differ: $(tail -n 1 $out/$stage.$name.log)"
        elif [ "$(losses $out/$stage.$name.jsonl)" != "$(losses $out/$stage.one.jsonl)" ]; then fail "post_ref_${stage}_$name" "metrics differ"
        else ok "post_ref_${stage}_$name"; fi
    done
    cmp -s $out/$stage.stored1/ckpt/reference.safetensors $out/$stage.stored4/ckpt/reference.safetensors && ok "post_ref_${stage}_file" || fail "post_ref_${stage}_file" "1 and 4 ranks wrote other files"
    grep -q 'reference: .* from ' $out/$stage.used1.log && ok "post_ref_${stage}_reads" || fail "post_ref_${stage}_reads" "$(tail -n 1 $out/$stage.used1.log)"
    # stopped and gone on elsewhere, with the file of more steps
    cp -r $out/$stage.kept $out/$stage.rest
    run $stage.rested $trainer "$@" --precompute_ref --ckpt_path $out/$stage.rest --max_steps 2 --save_steps 2 --ring_attn_size 2 && run $stage.rested $trainer "$@" --precompute_ref --ckpt_path $out/$stage.rest --load_checkpoint &&
        cmp -s $out/$stage.rested/model.safetensors $out/$stage.one/model.safetensors && ok "post_ref_${stage}_resume" || fail "post_ref_${stage}_resume" "$(tail -n 1 $out/$stage.rested.log)"
    # a bit that a disk has flipped is not trained on
    cp -r $out/$stage.kept $out/$stage.flipped; file=$out/$stage.flipped/reference.safetensors
    printf "\\x$(printf %02x $(($(od -An -t u1 -j $(($(header $file) + 9)) -N 1 $file) ^ 16)))" | dd of=$file bs=1 seek=$(($(header $file) + 9)) conv=notrunc 2>/dev/null
    ! run $stage.flipped $trainer "$@" --precompute_ref --ckpt_path $out/$stage.flipped && grep -q '^error: .*reference.safetensors: its log-probs have the CRC-32 [0-9a-f]*, but the file says [0-9a-f]*; remove the file, and it is made again' $out/$stage.flipped.log && [ ! -e $out/$stage.flipped/model.safetensors ] && ok "post_ref_${stage}_flipped" || fail "post_ref_${stage}_flipped" "$(tail -n 1 $out/$stage.flipped.log)"
    # what is stored is what is used: one number changed in the file, and its sum, changes the weights
    cp -r $out/$stage.kept $out/$stage.changed; file=$out/$stage.changed/reference.safetensors
    printf '\x00\x00\x00\x00\x00\x00\x24\xc0' | dd of=$file bs=1 seek=$(header $file) conv=notrunc 2>/dev/null
    LC_ALL=C sed -i "s/\"crc32\":\"[0-9a-f]*\"/\"crc32\":\"$(tail -c +$(($(header $file) + 1)) $file | gzip -c | tail -c 8 | od -An -t x4 -N 4 | tr -d ' ')\"/" $file
    run $stage.other $trainer "$@" --precompute_ref --ckpt_path $out/$stage.changed && ! cmp -s $out/$stage.other/model.safetensors $out/$stage.one/model.safetensors && ok "post_ref_${stage}_used" || fail "post_ref_${stage}_used" "the stored numbers change nothing: $(tail -n 1 $out/$stage.other.log)"
}
stored dpo dpo $pairs --learning_rate 2e-3
stored kto kto $labelled --learning_rate 2e-3 --beta 0.1 --undesirable_loss_weight 1.3

# a moving average of the weights: it moves, obeys its beta, changes nothing else, has the same bits everywhere and goes on
average() { # STAGE TRAINER OPTIONS...
    local stage=$1 trainer=$2 ema=$out/$1.ema/ema/model.safetensors; shift 2
    run $stage.ema $trainer "$@" --enable_ema || { fail "post_ema_$stage" "$(tail -n 1 $out/$stage.ema.log)"; return; }
    if ! cmp -s $out/$stage.ema/model.safetensors $out/$stage.one/model.safetensors; then fail "post_ema_$stage" "the weights themselves differ"
    elif cmp -s $ema $out/$stage.one/model.safetensors || cmp -s $ema $out/sft/model.safetensors; then fail "post_ema_$stage" "the average is no average"
    else ok "post_ema_$stage"; fi
    run $stage.ema4 $trainer "$@" --enable_ema --ring_attn_size 3 && cmp -s $out/$stage.ema4/ema/model.safetensors $ema && ok "post_ema_${stage}_ranks" || fail "post_ema_${stage}_ranks" "$(tail -n 1 $out/$stage.ema4.log)"
    run $stage.emahalf $trainer "$@" --enable_ema --max_steps 2 --save_steps 2 --ring_attn_size 2 && run $stage.emahalf $trainer "$@" --enable_ema --load_checkpoint --data_parallel_size 2 &&
        cmp -s $out/$stage.emahalf/ema/model.safetensors $ema && ok "post_ema_${stage}_resume" || fail "post_ema_${stage}_resume" "$(tail -n 1 $out/$stage.emahalf.log)"
}
average dpo dpo $pairs --learning_rate 2e-3
average rm rm $pairs --learning_rate 2e-3
average kto kto $labelled --learning_rate 2e-3 --beta 0.1 --undesirable_loss_weight 1.3
texts="--dataset $out/arith.jsonl --input_key question --output_key answer --train_batch_size 8 --max_steps 3 --learning_rate 2e-3"
run sft.one sft $texts
average sft sft $texts
average ppo ppo $prompts --reward_pretrain $out/rm.one,$out/rm.one --entropy_loss_coef 0.01 --kl_target 0.1
run ema.last dpo $pairs --learning_rate 2e-3 --enable_ema --ema_beta 0 && cmp -s $out/ema.last/ema/model.safetensors $out/dpo.one/model.safetensors && ok post_ema_beta_0 || fail post_ema_beta_0 "not the last weights"
run ema.first dpo $pairs --learning_rate 2e-3 --enable_ema --ema_beta 1 && cmp -s $out/ema.first/ema/model.safetensors $out/sft/model.safetensors && ok post_ema_beta_1 || fail post_ema_beta_1 "not the first weights"

# a reference of another size is taken whole: its first layer alone would be the policy, and the first loss ln 2
build/train_sft --dataset $out/arith.jsonl --input_key question --output_key answer $shape --num_hidden_layers 2 --train_batch_size 12 --max_steps 4 --learning_rate 5e-3 --save_path $out/two >$out/two.log 2>&1
cp -r $out/two $out/first; sed -i 's/"num_hidden_layers": 2/"num_hidden_layers": 1/' $out/first/config.json
length=$(od -An -t u8 -N 8 $out/two/model.safetensors | tr -d ' ')
header=$(head -c $((8 + length)) $out/two/model.safetensors | tail -c $length | sed -E 's/"(model.layers.1.[^"]*)"/"\1.rotary_emb.inv_freq"/g') # which nobody reads
{ for ((i = 0; i < 8; i++)); do printf "\\x$(printf %02x $(((${#header} >> (8 * i)) & 255)))"; done; printf %s "$header"; tail -c +$((9 + length)) $out/two/model.safetensors; } > $out/first/model.safetensors
run deep.one dpo $pairs --pretrain $out/first --ref_pretrain $out/two --learning_rate 2e-3
run deep.4 dpo $pairs --pretrain $out/first --ref_pretrain $out/two --learning_rate 2e-3 --ring_attn_size 4 --precompute_ref
[ -n "$(first deep.one loss)" ] && [ "$(first deep.one loss)" != 0.69314718055994529 ] && ok post_ref_deep || fail post_ref_deep "first loss $(first deep.one loss): $(tail -n 1 $out/deep.one.log)"
cmp -s $out/deep.one/model.safetensors $out/deep.4/model.safetensors && [ "$(losses $out/deep.one.jsonl)" = "$(losses $out/deep.4.jsonl)" ] && ok post_ref_deep_ranks || fail post_ref_deep_ranks "$(tail -n 1 $out/deep.4.log)"

# ---- families: what a model is like is what its own folder says, whatever the model that is trained is like ----
python3 verify/support/family_folders.py $out/of || fail post_families "no folders"
families=$(cd $out/of; ls -d *.lm | sed 's/\.lm//' | tr '\n' ' ')
tiny="--max_len 200 --omp_threads 1 --lr_scheduler constant --warmup_steps 0 --max_steps 1"
export OMP_WAIT_POLICY=passive # a program need not start itself again
# played NAME ACTOR OTHER OPTIONS...: the other as reference, reward model and critic
played() { local name=$1 actor=$2 other=$3; shift 3; ci/limit.sh 60 build/train_ppo $tiny --pretrain $out/of/$actor.flat --ref_pretrain $out/of/$other.lm --reward_pretrain $out/of/$other.score --prompt_data $out/arith.jsonl --input_key question --label_key answer --max_samples 4 --prompt_max_len 160 --generate_max_len 8 --rollout_batch_size 2 --train_batch_size 2 --save_path $out/of/$name --metrics_path $out/of/$name.jsonl "$@" >$out/of/$name.log 2>&1; }
said() { sed -nE 's/.*("reward": .*, "kl": [^,]*),.*("critic_loss": [^,]*),.*/\1 \2/p' $out/of/$1.jsonl; }
for other in $families; do # all actors write the same texts: what the other says of them is the same, and what it says where it is of the actor's family
    played own.$other $other $other && [ -n "$(said own.$other)" ] || fail "post_family_$other" "$(tail -n 1 $out/of/own.$other.log)"
    wrong=""
    for actor in $families; do
        [ $actor = $other ] || { played to $actor $other && [ "$(said to)" = "$(said own.$other)" ]; } || wrong="beside $actor: $(said to) for $(said own.$other) $(grep -m 1 '^error' $out/of/to.log)"
        rm -rf $out/of/to $out/of/to.jsonl
    done
    [ -z "$wrong" ] && ok "post_family_$other" || fail "post_family_$other" "$wrong"
done
[ "$(for other in $families; do said own.$other; done | sort -u | wc -l)" = "$(wc -w <<<"$families")" ] && ok post_families_differ || fail post_families_differ "two of them say the same"
# DPO: what the policy gains over the reference is what the reference would lose as the policy
tuned() { ci/limit.sh 60 build/train_dpo $tiny --pretrain $out/of/$2.lm --ref_pretrain $out/of/$3.lm --dataset $out/arith.jsonl --prompt_key question --chosen_key answer --rejected_key wrong --max_samples 4 --train_batch_size 4 --save_path $out/of/$1 --metrics_path $out/of/$1.jsonl >$out/of/$1.log 2>&1; }
gains() { sed -nE 's/.*"chosen_reward": ([^,]*), "rejected_reward": ([^,]*),.*/\1 \2/p' $out/of/$1.jsonl; }
losses_of() { gains $1 | sed 's/^/-/; s/ / -/; s/--//g'; }
wrong="" before=${families%% *}
for family in ${families#* } $before; do
    tuned there $before $family && tuned back $family $before || wrong="$before and $family: $(grep -m 1 -h '^error' $out/of/there.log $out/of/back.log)"
    [ -n "$(gains there)" ] && [ "$(gains there)" = "$(losses_of back)" ] || wrong="$before and $family: $(gains there) is not $(losses_of back)"
    rm -rf $out/of/{there,back}*; before=$family
done
[ -z "$wrong" ] && ok post_family_references || fail post_family_references "$wrong"
# a critic is written as the model that it began as, and is read again
played saved smollm3 qwen2 --save_value_network && grep -q '"Qwen2ForSequenceClassification"' $out/of/saved/critic/config.json && grep -q '"SmolLM3ForCausalLM"' $out/of/saved/config.json && mv $out/of/saved/critic $out/of/again.score && cp -r $out/of/qwen2.lm $out/of/again.lm && played again smollm3 again && ok post_family_critic || fail post_family_critic "$(tail -n 1 $out/of/saved.log) $(tail -n 1 $out/of/again.log)"
played step llama qwen2 --save_steps 1 --ckpt_path $out/of/step.ckpt; sed -i 's/"sliding_window": 7/"sliding_window": 3/' $out/of/qwen2.score/config.json
! played step llama qwen2 --max_steps 2 --load_checkpoint --ckpt_path $out/of/step.ckpt && grep -q '^error: the model in .*global_step1/critic has sliding_window 7, but this run.s model has 3' $out/of/step.log && ok post_family_other_critic || fail post_family_other_critic "$(tail -n 1 $out/of/step.log)"
# a critic with experts has their balance loss, whatever the actor has: another step than without, the same on all ranks and on ranks of its own
balanced() { local name=$1; shift; played $name "$@" --save_value_network; sed -i 's/, "generate_seconds.*//' $out/of/$name.jsonl; }
other_critic() { ! cmp -s $out/of/$1/critic/model.safetensors $out/of/$2/critic/model.safetensors; }
for actor in llama qwen3_moe; do
    balanced plain $actor mixtral && balanced whole $actor mixtral --aux_loss_coef 0.3 && other_critic plain whole && grep -q '"critic_aux_loss": 0\.[0-9]' $out/of/whole.jsonl && ! grep -q critic_aux_loss $out/of/plain.jsonl && ! grep -q 'so --aux_loss_coef adds nothing' $out/of/whole.log && ok "post_critic_experts $actor" || fail "post_critic_experts $actor" "$(tail -n 1 $out/of/whole.log) $(cat $out/of/whole.jsonl)"
    while read -r world; do
        balanced split $actor mixtral --aux_loss_coef 0.3 $world && ! other_critic split whole && cmp -s $out/of/split/model.safetensors $out/of/whole/model.safetensors && cmp -s $out/of/split.jsonl $out/of/whole.jsonl && ok "post_critic_experts $actor $world" || fail "post_critic_experts $actor $world" "$(tail -n 1 $out/of/split.log) $(diff $out/of/split.jsonl $out/of/whole.jsonl)"
    done <<'WORLDS'
--ring_attn_size 2
--ring_attn_size 4 --micro_train_batch_size 1
--ring_attn_size 2 --data_parallel_size 2 --zero_stage 3
--actor_num_gpus_per_node 1 --ref_num_gpus_per_node 1 --critic_num_gpus_per_node 2 --reward_num_gpus_per_node 1
WORLDS
done
played idle llama qwen2 --aux_loss_coef 0.3; grep -q '^notice: the model has no experts, so --aux_loss_coef adds nothing' $out/of/idle.log && ok post_critic_no_experts || fail post_critic_no_experts "$(head -n 3 $out/of/idle.log)"
# whatever a config says of a reference is in its digest: log-probs of one that is computed otherwise are not taken, a run against it does not go on
while read -r family change; do
    kept="$tiny --pretrain $out/of/llama.lm --ref_pretrain $out/of/$family.lm --dataset $out/arith.jsonl --prompt_key question --chosen_key answer --rejected_key wrong --max_samples 4 --train_batch_size 2 --save_path $out/of/digest --ckpt_path $out/of/$family.ckpt"
    build/train_dpo $kept --precompute_ref --save_steps 1 >$out/of/digest.log 2>&1 || fail "post_digest_$family" "$(tail -n 1 $out/of/digest.log)"
    sed -i -E "$change" $out/of/$family.lm/config.json
    build/train_dpo $kept --load_checkpoint --max_steps 2 >$out/of/digest.log 2>&1 && fail "post_digest_$family" "went on" || grep -q '^error: .*was trained against another reference model' $out/of/digest.log || fail "post_digest_$family" "$(tail -n 1 $out/of/digest.log)"
    rm -r $out/of/$family.ckpt/global_step1 $out/of/$family.ckpt/latest
    build/train_dpo $kept --precompute_ref >$out/of/digest.log 2>&1; [ $? -eq 1 ] && grep -q '^error: .*reference.safetensors was made with reference model [0-9a-f]*, this run has [0-9a-f]*' $out/of/digest.log && ok "post_digest_$family $change" || fail "post_digest_$family $change" "$(tail -n 1 $out/of/digest.log)"
done <<'CHANGES'
smollm3 s/"no_rope_layers": \[1, 0\]/"no_rope_layers": [1, 1]/
qwen3_moe s/"norm_topk_prob": true/"norm_topk_prob": false/
qwen2 s/"max_window_layers": 1/"max_window_layers": 0/
mixtral s/"num_experts_per_tok": 2/"num_experts_per_tok": 1/
CHANGES

# refused: one sentence, a code, nothing written
refuse() { # NAME TRAINER PATTERN OPTIONS...
    local name=$1 trainer=$2 pattern=$3 code lines; shift 3
    rm -rf $out/refused
    ci/limit.sh 120 build/train_$trainer --save_path $out/refused "$@" >$out/refused.log 2>&1
    code=$?
    lines=$(grep -c '^error: ' $out/refused.log)
    if [ $code -eq 0 ] || [ $code -ge 124 ]; then fail "refuse_$name" "exit code $code"
    elif [ "$lines" -ne 1 ] || ! grep -qE "$pattern" $out/refused.log; then fail "refuse_$name" "$(head -c 300 $out/refused.log)"
    elif [ -e $out/refused/model.safetensors ]; then fail "refuse_$name" "wrote a model all the same"
    else ok "refuse_$name"; fi
}
printf '{"question": "a", "answer": "b", "wrong": ""}\n' > $out/empty.jsonl
refuse dpo_beta dpo 'beta' $pairs --beta 0
refuse dpo_loss dpo 'pref_loss' $pairs --pref_loss best
refuse dpo_smoothing dpo 'label_smoothing' $pairs --pref_loss ipo --label_smoothing 0.2
refuse dpo_key dpo 'nothing' $pairs --rejected_key nothing
refuse dpo_empty dpo ':1: ' --dataset $out/empty.jsonl --prompt_key question --chosen_key answer --rejected_key wrong
refuse dpo_reference dpo 'nowhere' $pairs --ref_pretrain $out/nowhere
refuse kto_one kto 'train_batch_size' $labelled --train_batch_size 1
refuse rm_margin rm 'margin' $pairs --margin_loss
refuse rm_head rm 'value_head_prefix is empty' $pairs --value_head_prefix ''
refuse rm_head_taken rm "named 'model.norm', which is another tensor's name" $pairs --value_head_prefix model.norm
refuse ppo_reward ppo 'reward' $prompts
refuse ppo_rule ppo 'label_key' --prompt_data $out/arith.jsonl --input_key question --reward_rule last_number
refuse ppo_group ppo 'n_samples_per_prompt' $prompts --reward_rule last_number --advantage_estimator rloo
refuse ppo_prompts ppo 'rollout_batch_size' $prompts --reward_rule last_number --rollout_batch_size 1000
refuse ppo_clip ppo 'reward_clip_range' $prompts --reward_rule last_number --reward_clip_range 5,-5
refuse ppo_epochs ppo 'max_epochs' $prompts --reward_rule last_number --max_epochs 0.5
refuse ema_without dpo 'with a moving average' $shape --pretrain $out/sft $pairs --ckpt_path $out/dpo.emahalf/ckpt --load_checkpoint
refuse ema_none dpo 'without a moving average' $shape --pretrain $out/sft $pairs --ckpt_path $out/dpo.half/ckpt --load_checkpoint --enable_ema
refuse ema_beta dpo 'ema_beta' $pairs --enable_ema --ema_beta 1.5
refuse ppo_label_key ppo 'no key "anwser"; set --label_key' ${prompts/label_key answer/label_key anwser} --reward_rule last_number
sed 's/[0-9]//g' $out/arith.jsonl > $out/wordy.jsonl; { head -n 2 $out/arith.jsonl; tail -n +3 $out/wordy.jsonl; } > $out/half_wordy.jsonl
refuse ppo_no_number ppo 'half_wordy.jsonl:3: the right answer has no number, .* set --label_key' $prompts --prompt_data $out/half_wordy.jsonl --reward_rule last_number
refuse ppo_eval_no_number ppo 'wordy.jsonl:1: the right answer has no number' $prompts --eval_dataset $out/wordy.jsonl --reward_rule last_number
refuse ppo_short ppo 'check --label_key and --prompt_max_len$' $prompts --reward_rule last_number --prompt_max_len 3
refuse ppo_dataset ppo 'dataset is an option of sft,dpo,rm,kto,kd,prm,generate; this is ppo, give --prompt_data$' $prompts --reward_rule last_number --dataset x
refuse ppo_critic_eps ppo 'critic.adam.eps is 0' $prompts --reward_rule last_number --critic.adam.eps 0
refuse dpo_eps dpo 'adam_eps is 0, but it must be a number from 1e-30' $pairs --adam_eps 0
refuse ppo_no_data ppo 'prompt_data' --reward_rule last_number

# stored log-probs of other rows or of another model are refused, and so is half a file
sed 's/3/4/' $out/arith.jsonl > $out/other.jsonl
sed 's/3/4/' $out/eval.jsonl > $out/other_eval.jsonl
kept="$shape --pretrain $out/sft $pairs --precompute_ref --ckpt_path $out/dpo.kept"
refuse ref_data dpo 'training data' $kept --dataset $out/other.jsonl
refuse ref_eval_data dpo 'evaluation data' $kept --eval_dataset $out/other_eval.jsonl
refuse ref_order dpo 'seed 42, this run has 43' $kept --seed 43
refuse ref_batch dpo 'train_batch_size 6, this run has 5' $kept --train_batch_size 5
refuse ref_cell dpo 'cell 16, this run has 8' $kept --cell 8
refuse ref_stripe_packing dpo 'stripe ring on 2 ranks.*rows of 500' $kept --layout stripe --ring_attn_size 2 --pack_len 500
refuse ref_model dpo 'reference model' $kept --ref_pretrain $out/dpo.one
cp -r $out/sft $out/theta; sed -i 's/"rope_theta": 10000/"rope_theta": 20000/' $out/theta/config.json
refuse ref_theta dpo 'reference model' $kept --ref_pretrain $out/theta
refuse ref_device dpo 'attention cpu, any ranks, this run has reference' $kept --device reference
refuse ref_layout dpo 'stripe ring on 2 ranks' $kept --layout stripe --ring_attn_size 2
refuse ref_steps dpo '3 steps, but this run has 4' $kept --max_steps 4
for i in 1 2 3 4; do # alike in length, but the mismatched ones are not: max_len cuts those alone
    printf '{"question": "%s%d", "answer": "a", "label": true}\n{"question": "b", "answer": "%s%d", "label": false}\n' $(printf 'x%.0s' {1..60}) $i $(printf 'y%.0s' {1..60}) $i
done > $out/uneven.jsonl
uneven="$shape --pretrain $out/sft --dataset $out/uneven.jsonl --input_key question --output_key answer --train_batch_size 8 --max_steps 1 --precompute_ref --ckpt_path $out/uneven.ckpt"
build/train_kto $uneven --save_path $out/uneven >$out/uneven.log 2>&1 || fail ref_uneven "$(tail -n 1 $out/uneven.log)"
refuse ref_mismatched kto 'other rows than this run, first in window 0 of training' $uneven --max_len 100
cp -r $out/sft $out/tokens; sed -i 's/"vocab_size": [0-9]*/"vocab_size": 300/' $out/tokens/config.json
refuse ref_vocab dpo 'vocabulary of 300' $shape --pretrain $out/sft $pairs --ref_pretrain $out/tokens
refuse ref_simpo dpo 'precompute_ref' $kept --pref_loss simpo
cp -r $out/dpo.kept $out/dpo.unsummed; LC_ALL=C sed -i 's/"crc32":/"crc_2":/' $out/dpo.unsummed/reference.safetensors
refuse ref_unsummed dpo 'the file says none, as files of 0.2.0; remove the file' $kept --ckpt_path $out/dpo.unsummed
cp -r $out/dpo.kept $out/dpo.torn; truncate -s -100 $out/dpo.torn/reference.safetensors
refuse ref_torn dpo 'reference.safetensors' $kept --ckpt_path $out/dpo.torn
mkdir -p $out/dpo.left; cp $out/dpo.torn/reference.safetensors $out/dpo.left/reference.safetensors.tmp.1
run dpo.left dpo $pairs --learning_rate 2e-3 --precompute_ref --ckpt_path $out/dpo.left && cmp -s $out/dpo.left/model.safetensors $out/dpo.one/model.safetensors && ok ref_left_over || fail ref_left_over "$(tail -n 1 $out/dpo.left.log)"

# every option that is acted on is there
for trainer in dpo kto rm; do
    unbound=$(awk -F'\t' -v t=$trainer '$3 == "real" && ("," $4 ",") ~ ("," t ",") { print $1 }' demos/trainer/run/options.tsv | while read -r o; do build/train_$trainer --help | grep -q -- "--$o " || echo "$o"; done)
    [ -z "$unbound" ] && ok "post_options_$trainer" || fail "post_options_$trainer" "$unbound"
done

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
