#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Adapters (LoRA) as a user meets them: SFT, DPO, KTO, reward model and PPO on one rank and in other worlds, their folder, the merged
# model, how a run goes on, what other programs' options mean, and what is refused.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_lora
rm -rf $out; mkdir -p $out
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
check() { local name=$1 why=$2; shift 2; if "$@"; then ok "$name"; else fail "$name" "$why"; fi; } # NAME WHY COMMAND...
export OMP_WAIT_POLICY=passive # a program need not start itself again

build/make_arith $out/arith.jsonl 60 5 >/dev/null
build/make_arith $out/eval.jsonl 8 6 >/dev/null
for set in arith eval; do awk '{ sub(/"wrong": .*/, ""); label = NR % 3 ? "true" : "false"; print $0 "\"label\": " label "}" }' $out/$set.jsonl >$out/$set.labelled.jsonl; done
tiny="--omp_threads 1 --lr_scheduler constant --warmup_steps 0 --logging_steps 1000 --max_len 200"
shape="$tiny --packing_samples --pack_len 420"
texts="--dataset $out/arith.jsonl --eval_dataset $out/eval.jsonl --input_key question --output_key answer --train_batch_size 8 --max_steps 3 --learning_rate 5e-3"
pairs="--dataset $out/arith.jsonl --eval_dataset $out/eval.jsonl --prompt_key question --chosen_key answer --rejected_key wrong --train_batch_size 6 --max_steps 3 --learning_rate 5e-3"
labelled="--dataset $out/arith.labelled.jsonl --eval_dataset $out/eval.labelled.jsonl --input_key question --output_key answer --train_batch_size 8 --max_steps 3 --learning_rate 5e-3 --beta 0.1"
build/train_sft $texts $shape --num_hidden_layers 2 --hidden_size 32 --num_attention_heads 4 --max_steps 8 --save_path $out/base >$out/base.log 2>&1 || fail lora_base "$(tail -n 1 $out/base.log)"
base=$(sha256sum <$out/base/model.safetensors)

# run NAME TRAINER OPTIONS...
run() { local name=$1 trainer=$2 micro="--micro_train_batch_size 2"; shift 2; [[ "$*" == *accumulation* ]] && micro=; build/train_$trainer $shape $micro --pretrain $out/base --lora_rank 4 --save_path $out/$name --ckpt_path $out/$name.ckpt --metrics_path $out/$name.jsonl "$@" >$out/$name.log 2>&1; }
losses() { sed -E 's/, "tokens_per_second.*//' "$1"; }
first() { grep -m 1 "\"$2\": " $out/$1.jsonl | sed -nE "s/.*\"$2\": ([-0-9.e+]*).*/\1/p"; }
last() { grep "\"$2\": " $out/$1.jsonl | tail -n 1 | sed -nE "s/.*\"$2\": ([-0-9.e+]*).*/\1/p"; }
alike() { cmp -s $out/$1/adapter_model.safetensors $out/$2/adapter_model.safetensors; }
# same STAGE TRAINER OPTIONS...: one rank, then every world; adapters and metrics to the bit
worlds=("--ring_attn_size 4" "--ring_attn_size 2 --data_parallel_size 2 --zero_stage 3 --param_offload --schedule llama3 --pack_len 1003" "--data_parallel_size 3 --zero_stage 1 --gradient_checkpointing" "--ring_attn_size 3 --zero_stage 0 --gradient_accumulation_steps 4")
same() {
    local stage=$1 trainer=$2 i=0 world; shift 2
    run $stage.one $trainer "$@" || { fail "lora_$stage" "$(tail -n 1 $out/$stage.one.log)"; return; }
    check lora_learns_$stage "the loss stays at $(first $stage.one loss)" [ "$(first $stage.one loss)" != "$(last $stage.one loss)" ]
    for world in "${worlds[@]}"; do
        i=$((i + 1))
        if ! run $stage.$i $trainer "$@" $world; then fail "lora_$stage $world" "$(tail -n 1 $out/$stage.$i.log)"
        elif ! alike $stage.$i $stage.one; then fail "lora_$stage $world" "adapters differ"
        elif [ "$(losses $out/$stage.$i.jsonl | sed 's/, "rows.*//')" != "$(losses $out/$stage.one.jsonl | sed 's/, "rows.*//')" ]; then fail "lora_$stage $world" "metrics differ"
        else ok "lora_$stage $world"; fi
    done
}
same sft sft $texts
same dpo dpo $pairs
same kto kto $labelled
same rm rm $pairs --save_merged
worlds=("--ring_attn_size 2 --param_dtype bf16 --zero_stage 3")
same bf16 sft $texts --param_dtype bf16 --enable_ema
check lora_ema "the averages differ, or are no averages" eval 'alike bf16.1/ema bf16.one/ema && ! alike bf16.one/ema bf16.one'

worlds=("--ring_attn_size 3 --zero_stage 3" "--data_parallel_size 2 --ring_attn_size 2 --gradient_accumulation_steps 2 --gradient_checkpointing --pack_len 1003")
same dropout sft $texts --lora_dropout 0.2 --enable_ema
check lora_drops "nothing is dropped, or evaluation drops, too" eval '! alike dropout.one sft.one && [ "$(first dropout.one loss)" = "$(first sft.one loss)" ] && [ "$(sed -n 2p $out/dropout.one.jsonl)" != "$(sed -n 2p $out/sft.one.jsonl)" ]'

# the reference is the model without its adapters: it gives what a second copy gives
for stage in dpo.one dpo.1 dpo.2; do check lora_first_loss_$stage "$(first $stage loss)" [ "$(first $stage loss)" = 0.69314718055994529 ]; done
cp -r $out/base $out/copy
run dpo.copy dpo $pairs --ref_pretrain $out/copy --ring_attn_size 2
check lora_reference "$(tail -n 1 $out/dpo.copy.log)" alike dpo.copy dpo.one
run dpo.itself dpo $pairs --ref_pretrain $out/base/../base --ref_offload
check lora_reference_offload "$(head -n 2 $out/dpo.itself.log)" grep -q '^notice: the reference is the model without its adapters, so --ref_offload is not used' $out/dpo.itself.log
memory() { build/train_dpo $shape $pairs --pretrain $out/base --lora_rank 4 --dry_run --json "$@" 2>/dev/null | grep -o '"weights":{"rank":[0-9]*' | head -n 1; }
check lora_reference_itself "$(memory) $(memory --ref_pretrain $out/base) $(memory --ref_pretrain $out/copy)" eval 'alike dpo.itself dpo.one && [ -n "$(memory)" ] && [ "$(memory)" = "$(memory --ref_pretrain $out/base)" ] && [ "$(memory)" != "$(memory --ref_pretrain $out/copy)" ]'
for stage in "dpo $pairs" "kto $labelled"; do
    trainer=${stage%% *}
    run $trainer.stored $trainer ${stage#* } --precompute_ref --ring_attn_size 2
    check lora_stored_$trainer "$(tail -n 1 $out/$trainer.stored.log)" alike $trainer.stored $trainer.one
done

# PPO: actor and critic learn adapters, and the reference is the actor without its own, wherever the roles are
texts_of="--prompt_data $out/arith.jsonl --input_key question --label_key answer --prompt_max_len 160 --max_samples 24 --generate_max_len 16 --reward_rule last_number --rollout_batch_size 6 --n_samples_per_prompt 2 --train_batch_size 6 --max_steps 4 --actor_learning_rate 3e-3 --critic_learning_rate 3e-3 --save_value_network"
ppo() { local name=$1; shift; run $name ppo $texts_of "$@"; }
ppo ppo.one --save_merged || fail lora_ppo "$(tail -n 1 $out/ppo.one.log)"
sampled() { sed 's/, "generate_seconds.*//' $out/$1.jsonl; }
both() { alike $1 $2 && alike $1/critic $2/critic; }
n=0
for world in "--ring_attn_size 3" "--data_parallel_size 2 --ring_attn_size 2 --zero_stage 3 --save_merged" "--actor_num_gpus_per_node 2 --ref_num_gpus_per_node 1 --critic_num_gpus_per_node 2 --vllm_num_engines 2 --zero_stage 3" "--recompute_old_logp"; do
    n=$((n + 1))
    if ppo ppo.$n $world && both ppo.$n ppo.one && [ "$(sampled ppo.$n)" = "$(sampled ppo.one)" ]; then ok "lora_ppo $world"; else fail "lora_ppo $world" "$(tail -n 1 $out/ppo.$n.log)"; fi
done
grep -qE '^first step: ratio exactly 1 for ([0-9]+) of \1 tokens, KL against the reference exactly 0 for \1$' $out/ppo.one.log && ok lora_ppo_first || fail lora_ppo_first "$(grep first $out/ppo.one.log)"
check lora_ppo_learns "nothing has moved, or everything alike" eval '! alike ppo.one ppo.one/critic && [ "$(last ppo.one kl)" != "$(first ppo.one kl)" ]'
check lora_ppo_merged "$(ls $out/ppo.2)" eval 'cmp -s $out/ppo.2/merged/model.safetensors $out/ppo.one/merged/model.safetensors && cmp -s $out/ppo.2/critic/merged/model.safetensors $out/ppo.one/critic/merged/model.safetensors'
ppo ppo.copy --ref_pretrain $out/copy
check lora_ppo_reference "$(tail -n 1 $out/ppo.copy.log)" both ppo.copy ppo.one
ppo ppo.half --max_steps 2 --save_steps 1 && cp -r $out/ppo.half.ckpt $out/ppo.kept && ppo ppo.half --load_checkpoint --actor_num_gpus_per_node 2 --ref_num_gpus_per_node 1 --critic_num_gpus_per_node 2
check lora_resume_ppo "$(tail -n 1 $out/ppo.half.log)" both ppo.half ppo.one

# the folder that PEFT reads, and no more
for pair in 'sft "task_type":	"CAUSAL_LM"' 'rm "task_type":	"SEQ_CLS"' 'rm "modules_to_save":	["score"]' 'sft "modules_to_save":	null' "sft \"base_model_name_or_path\":	\"$out/base\"" 'sft "r":	4' 'sft "lora_alpha":	16' 'sft "bias":	"none"'; do
    check "lora_config $pair" "$(head -c 400 $out/${pair%% *}.one/adapter_config.json)" grep -qF "${pair#* }" $out/${pair%% *}.one/adapter_config.json
done
names() { head -c $((8 + $(od -An -t u8 -N 8 $1))) $1 | tail -c +9 | grep -oE '"[^"]*(weight|bias)"' | tr -d '"' | sort; }
wanted() { for layer in 0 1; do for part in self_attn.{q,k,v,o}_proj mlp.{gate,up,down}_proj; do echo base_model.model.model.layers.$layer.$part.lora_{A,B}.weight | tr ' ' '\n'; done; done; [ "$1" = rm ] && echo base_model.model.score.weight; }
for stage in sft rm; do check lora_names_$stage "$(names $out/$stage.one/adapter_model.safetensors | head -n 3)" [ "$(names $out/$stage.one/adapter_model.safetensors)" = "$(wanted $stage | sort)" ]; done
check lora_alone "$(ls $out/sft.one)" [ "$(ls $out/sft.one | tr '\n' ' ')" = "adapter_config.json adapter_model.safetensors " ]
grep -q '^adapters: LoRA of rank 4, alpha 16, of q_proj,.*; 4864 parameters are trained, ' $out/sft.one.log && grep -q 'adapters (4864 parameters, [0-9]* frozen) in ' $out/sft.one.log && ok lora_said || fail lora_said "$(grep adapters $out/sft.one.log)"

# merged: a model like any other, which gives the adapters' losses
for stage in "sft $texts" "rm $pairs"; do
    trainer=${stage%% *}
    run $trainer.merged $trainer ${stage#* } --save_merged --ring_attn_size 2 --zero_stage 3
    run $trainer.shared $trainer ${stage#* } --save_merged --ring_attn_size 2
    cmp -s $out/$trainer.merged/merged/model.safetensors $out/$trainer.shared/merged/model.safetensors && alike $trainer.merged $trainer.one && ok lora_merged_ranks_$trainer || fail lora_merged_ranks_$trainer "$(tail -n 1 $out/$trainer.shared.log)"
    run $trainer.again $trainer ${stage#* } --pretrain $out/$trainer.merged/merged --lora_rank 0 --max_steps 0
    run $trainer.before $trainer ${stage#* } --lora_rank 0 --max_steps 0
    echo "$(last $trainer.merged eval_loss) $(last $trainer.again eval_loss) $(last $trainer.before eval_loss)" >$out/merged
    awk '{ d = $1 - $2; off = $1 - $3; exit !(NF == 3 && $1 > 0 && d * d <= 1e-10 && off * off > 1e-8) }' $out/merged && ok lora_merged_$trainer || fail lora_merged_$trainer "$(cat $out/merged): $(tail -n 1 $out/$trainer.again.log)"
done
check lora_merged_scores "$(head -n 3 $out/rm.merged/merged/config.json)" grep -q '"std"' $out/rm.merged/merged/config.json
check lora_not_merged "save_merged was not asked for" [ ! -e $out/sft.one/merged ]

# stopped after a step and gone on at another world size; a checkpoint holds adapters and their state alone
half() { # STAGE TRAINER OPTIONS...
    local stage=$1 trainer=$2; shift 2
    run $stage.half $trainer "$@" --max_steps 1 --save_steps 1 --ring_attn_size 2 --zero_stage 3 && run $stage.half $trainer "$@" --load_checkpoint --data_parallel_size 2 && grep -q '"step": 2' $out/$stage.half.jsonl &&
        alike $stage.half $stage.one && ok "lora_resume_$stage $*" || fail "lora_resume_$stage $*" "$(tail -n 1 $out/$stage.half.log)"
}
half sft sft $texts
names $out/sft.half.ckpt/global_step1/model.safetensors | sort >$out/kept
check lora_checkpoint "$(head -n 3 $out/kept)" [ "$(cat $out/kept)" = "$(wanted sft | sort)" ]
half dpo dpo $pairs
half kto kto $labelled
half rm rm $pairs
half bf16 sft $texts --param_dtype bf16 --enable_ema
rm -rf $out/sft.half*; half sft sft $texts --async_save

# a model in four bits: the same bytes in every world, others than of the whole one; the reference is it, without adapters
worlds=("--ring_attn_size 3 --zero_stage 3" "--ring_attn_size 2 --data_parallel_size 2 --schedule llama3 --pack_len 1003 --zero_stage 2" "--data_parallel_size 3 --zero_stage 0 --gradient_checkpointing")
same four.sft sft $texts --load_in_4bit
same four.dpo dpo $pairs --load_in_4bit
worlds=("--ring_attn_size 2 --zero_stage 3")
same four.kto kto $labelled --load_in_4bit
same four.rm rm $pairs --load_in_4bit
same four.bf16 sft $texts --load_in_4bit --param_dtype bf16
ppo four.ppo --load_in_4bit && ppo four.ppo.1 --load_in_4bit --ring_attn_size 2 --zero_stage 3 && both four.ppo four.ppo.1 && [ "$(sampled four.ppo)" = "$(sampled four.ppo.1)" ] && ok lora_four.ppo || fail lora_four.ppo "$(tail -n 1 $out/four.ppo.1.log)"
check lora_four_differs "the loss is that of the whole model, or far from it: $(first four.sft.one loss), $(first sft.one loss)" awk -v a="$(first four.sft.one loss)" -v b="$(first sft.one loss)" 'BEGIN { d = a - b; exit !(d != 0 && d * d < 0.01) }'
check lora_four_first "$(first four.dpo.one loss), $(first four.dpo.1 loss)" [ "$(first four.dpo.one loss) $(first four.dpo.1 loss)" = "0.69314718055994529 0.69314718055994529" ]
half four.sft sft $texts --load_in_4bit
half four.dpo dpo $pairs --load_in_4bit
run four.whole sft $texts --adapter_name_or_path $out/four.sft.one --lora_rank 4 --max_steps 0
check lora_four_loaded "$(tail -n 1 $out/four.whole.log)" eval '[ "$(last four.whole eval_loss)" != "$(last sft.one eval_loss)" ] && cmp -s $out/four.whole/adapter_model.safetensors $out/four.sft.one/adapter_model.safetensors'
# two layers of 4 x 32 x 32 + 3 x 32 x 96 values in four bits: 0.516 bytes of each, and what rounds them up
weights() { build/train_sft $shape $texts --pretrain $out/base --lora_rank 4 --micro_train_batch_size 2 --dry_run --json "$@" 2>/dev/null | grep -o '"weights":{"rank":[0-9]*' | grep -o '[0-9]*$' | head -n 1; }
saved=$(($(weights) - $(weights --load_in_4bit)))
check lora_four_memory "$saved bytes less" [ $saved -gt 90000 -a $saved -lt $((2 * 13312 * 4)) ]

# what other programs say
from() { local name=$1; shift; build/train_sft $shape $texts --from openrlhf --micro_train_batch_size 2 --pretrain $out/base --save_path $out/from.$name "$@" >$out/from.$name.log 2>&1 || fail "lora_from_$name" "$(tail -n 1 $out/from.$name.log)"; }
from here --lora_rank 8 --lora_alpha 16 --target_modules q_proj v_proj
from commas --lora_rank 8 --target_modules v_proj,q_proj
from llamafactory --finetuning_type lora --lora_target q_proj,v_proj
from axolotl --adapter lora --lora_r 8 --lora_alpha 16 --lora_target_modules q_proj v_proj --lora_dropout 0
from head --ds.lora.rank 8 --ds.lora.alpha 16 --ds.lora.target_modules q_proj v_proj
for name in commas llamafactory axolotl head; do check lora_from_$name "$(tail -n 1 $out/from.$name.log)" alike from.$name from.here; done
from all --lora_rank 8
from linear --adapter lora --lora_r 8 --lora_alpha 16 --lora_target_linear
from alpha --lora_rank 8 --lora_alpha 32 --target_modules q_proj v_proj
check lora_from_linear "$(tail -n 1 $out/from.linear.log)" eval 'alike from.linear from.all && ! alike from.all from.here && ! alike from.alpha from.here'
from rooted --lora_rank 4 --lora_alpha 16 --target_modules q_proj v_proj --use_rslora
from by_hand --lora_rank 4 --lora_alpha 32 --target_modules q_proj v_proj
check lora_rslora "alpha / sqrt(rank) is not 16 / 2" eval 'alike from.rooted from.by_hand && grep -q "\"use_rslora\":	true" $out/from.rooted/adapter_config.json'
from full --finetuning_type full --lora_alpha 32
grep -q '^notice: there are no adapters, so --lora_alpha is not used' $out/from.full.log && [ -e $out/from.full/model.safetensors ] && ok lora_idle || fail lora_idle "$(head -n 1 $out/from.full.log)"
build/train_sft $shape $texts --pretrain $out/base --save_path $out/dry --lora_rank 4 --dry_run >$out/dry.log 2>&1
grep -q '^adapters: .*, 4864 parameters' $out/dry.log && grep -q 'parameters, frozen' $out/dry.log && [ ! -e $out/dry ] && ok lora_dry_run || fail lora_dry_run "$(tail -n 1 $out/dry.log)"

# adapters that are there begin as they are: of what is trained with a rate of 0 nothing changes, and what goes on does
run begun sft $texts --lora_rank 0 --max_steps 0 # the model alone, to compare with
on() { local name=$1; shift; build/train_sft $shape $texts --micro_train_batch_size 2 --pretrain $out/base --save_path $out/$name --metrics_path $out/$name.jsonl "$@" >$out/$name.log 2>&1; }
on on.one --adapter_name_or_path $out/sft.one --max_steps 0 && alike on.one sft.one && [ "$(last on.one eval_loss)" = "$(last sft.one eval_loss)" ] && [ "$(last on.one eval_loss)" != "$(last begun eval_loss)" ] && ok lora_begins || fail lora_begins "$(tail -n 1 $out/on.one.log): $(last on.one eval_loss), not $(last sft.one eval_loss)"
on on.2 --adapter_name_or_path $out/sft.one && on on.3 --lora_model_dir $out/sft.one --ring_attn_size 3 --zero_stage 3 --lora_rank 4 --lora_alpha 16 --target_modules all-linear && alike on.2 on.3 && ! alike on.2 on.one && cmp -s $out/on.2/adapter_config.json $out/sft.one/adapter_config.json && ok lora_goes_on || fail lora_goes_on "$(tail -n 1 $out/on.2.log) $(tail -n 1 $out/on.3.log)"
run on.dpo dpo $pairs --adapter_name_or_path $out/dpo.one && grep -q '^notice: the reference is the model without adapters; for a reference' $out/on.dpo.log && [ "$(first on.dpo loss)" != "$(first dpo.one loss)" ] && ok lora_goes_on_dpo || fail lora_goes_on_dpo "$(tail -n 1 $out/on.dpo.log)"
on on.some --adapter_name_or_path $out/from.here && grep -q ' of rank 8, alpha 16, of q_proj,v_proj;' $out/on.some.log && ok lora_targets_there || fail lora_targets_there "$(grep adapters $out/on.some.log)"

# three steps of PEFT and torch in float64, as lora_peft.py wrote them down: losses and adapters, by AdamW and by SGD
plain="--dataset verify/second/golden_lora.jsonl --device reference --omp_threads 1 --train_batch_size 4 --lr_scheduler constant --warmup_steps 0 --max_norm 0 --packing_samples --max_len 64"
build/train_sft $plain --num_hidden_layers 1 --hidden_size 8 --num_attention_heads 2 --num_key_value_heads 1 --intermediate_size 8 --seed 3 --max_steps 0 --save_path $out/golden >$out/golden.log 2>&1 || fail lora_golden "$(tail -n 1 $out/golden.log)"
off() { awk -v n=$1 '{ d = $1 - $2; off += d * d; all += $2 * $2 } END { off = sqrt(off / all); print off; exit !(NR == n && off <= 1e-12) }'; } # NUMBERS: pairs of them, relative L2 error
golden() { # WAY OPTIONS...
    local way=$1 file=$out/golden.$1/adapter_model.safetensors; shift
    build/train_sft $plain --pretrain $out/golden --lora_rank 2 --lora_alpha 5 --max_steps 3 --save_path $out/golden.$way --metrics_path $out/golden.$way.jsonl "$@" >$out/golden.$way.log 2>&1
    paste <(sed -nE 's/.*"loss": ([^,]*),.*/\1/p' $out/golden.$way.jsonl) <(awk -F'\t' -v w=$way '$1 == w && $2 == "loss" { for (i = 3; i <= NF; i++) print $i }' verify/second/golden_lora.tsv) | off 3 >$out/off && ok lora_golden_loss_$way || fail lora_golden_loss_$way "off by $(cat $out/off): $(tail -n 1 $out/golden.$way.log)"
    paste <(tail -c +$((9 + $(od -An -t u8 -N 8 $file))) $file | od -An -v -t f8 -w8) <(awk -F'\t' -v w=$way '$1 == w && $2 != "loss" { for (i = 3; i <= NF; i++) print $i }' verify/second/golden_lora.tsv) | off 208 >$out/off && ok lora_golden_$way || fail lora_golden_$way "off by $(cat $out/off): $(tail -n 1 $out/golden.$way.log)"
}
golden adamw --optim adamw --learning_rate 0.01 --adam_betas 0.9,0.95 --l2 0.1
golden sgd --optim sgd --learning_rate 0.5 --l2 0

# families: experts have none, and one matrix of several parts is refused
python3 verify/support/family_folders.py $out/of || fail lora_families "no folders"
moe() { local name=$1; shift; build/train_sft $tiny $texts --pretrain $out/of/qwen3_moe.lm --lora_rank 2 --max_steps 2 --save_path $out/$name "$@" >$out/$name.log 2>&1; }
moe moe.one --aux_loss_coef 0.1 && moe moe.2 --aux_loss_coef 0.1 --ring_attn_size 2 --zero_stage 3 && moe moe.plain && alike moe.one moe.2 && ! alike moe.one moe.plain && grep -q ' of q_proj,k_proj,v_proj,o_proj (experts have none)' $out/moe.one.log && ok lora_experts || fail lora_experts "$(tail -n 1 $out/moe.one.log) $(tail -n 1 $out/moe.2.log)"

# refused: one sentence, a code, nothing written
refuse() { # NAME TRAINER PATTERN OPTIONS...
    local name=$1 trainer=$2 pattern=$3 code; shift 3
    rm -rf $out/refused
    ci/limit.sh 120 build/train_$trainer $shape --save_path $out/refused "$@" >$out/refused.log 2>&1
    code=$?
    if [ $code -eq 0 ] || [ $code -ge 124 ]; then fail "refuse_$name" "exit code $code"
    elif [ "$(grep -c '^error: ' $out/refused.log)" -ne 1 ] || ! grep -qE "^error: .*($pattern)" $out/refused.log; then fail "refuse_$name" "$(head -c 400 $out/refused.log)"
    elif [ -e $out/refused/adapter_model.safetensors ]; then fail "refuse_$name" "wrote adapters all the same"
    else ok "refuse_$name"; fi
}
lora="$texts --pretrain $out/base --lora_rank 4"
refuse target sft 'target_modules names qproj, which no layer has; give some of q_proj,k_proj,.*down_proj, or all-linear' $lora --target_modules q_proj,qproj
refuse no_target sft 'target_modules names no module; give all-linear' $lora --target_modules ,
refuse rank sft 'lora_rank is -1, but it must be' $lora --lora_rank -1
refuse alpha sft 'lora_alpha is 0, but it must be' $lora --lora_alpha 0
refuse dropout sft 'lora_dropout is 1, but it must be' $lora --lora_dropout 1
there="$texts --pretrain $out/base --adapter_name_or_path"
changed() { rm -rf $out/changed; cp -r $out/sft.one $out/changed; sed -i "$1" $out/changed/adapter_config.json; } # SED
# as PEFT 0.21 writes all that it knows, most of it null
changed 's/"r":.*/"r": 4, "alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": null, "corda_config": null, "ensure_weight_tying": false, "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false, "inference_mode": true, "init_lora_weights": true, "kasa_config": null, "layer_replication": null, "layers_pattern": null, "layers_to_transform": null, "loftq_config": {}, "lora_bias": false, "lora_ga_config": null, "megatron_config": null, "megatron_core": "megatron.core", "monteclora_config": null, "peft_version": "0.21.2", "qalora_group_size": 16, "rank_pattern": {}, "revision": null, "target_parameters": null, "trainable_token_indices": null, "use_bdlora": null, "use_dora": false, "use_qalora": false, "velora_config": null,/'
on on.whole --adapter_name_or_path $out/changed --max_steps 0 && alike on.whole sft.one && ok lora_whole_config || fail lora_whole_config "$(tail -n 1 $out/on.whole.log)"
changed 's/"r":.*/"r": 4, "megatron_config": {"a": 1},/'; refuse there_megatron sft 'adapter_config.json: megatron_config is set, which is not supported; give another adapter' $there $out/changed
refuse there_rank sft 'have lora_rank 4, and --lora_r is 8; leave that out' $there $out/sft.one --adapter lora --lora_r 8 --lora_alpha 16 --lora_target_linear
refuse there_alpha sft 'have lora_alpha 16, and --lora_alpha is 32; leave that out' $there $out/sft.one --lora_alpha 32
refuse there_rslora sft 'have use_rslora 0, and --use_rslora is 1; leave that out' $there $out/sft.one --use_rslora
refuse there_targets sft 'are of q_proj,k_proj,.*; leave --target_modules out' $there $out/sft.one --target_modules q_proj
refuse there_none sft 'adapter_config.json cannot be read: .*give the folder of an adapter' $there $out/base
changed 's/"LORA"/"IA3"/'; refuse there_kind sft 'peft_type is IA3, but only LORA is supported; give another adapter' $there $out/changed
changed 's/"use_dora":.*/"use_dora": true,/'; refuse there_dora sft 'adapter_config.json: use_dora is set, which is not supported; give another adapter' $there $out/changed
changed 's/"bias":.*/"bias": "all",/'; refuse there_bias sft 'adapter_config.json: bias is set, which is not supported; give another adapter' $there $out/changed
changed 's/"r":.*/"r": 4, "rank_pattern": {"q_proj": 2},/'; refuse there_pattern sft 'rank_pattern is set, which is not supported; give another adapter' $there $out/changed
changed 's/"r":.*/"r": 0,/'; refuse there_zero sft ': r is 0, but must be a number from 1 to 1048576' $there $out/changed
changed 's/"lora_alpha":.*/"lora_alpha": 0.5,/'; refuse there_half sft ': lora_alpha is 0.5, but must be a number from 1 to 2147483647' $there $out/changed
changed 's/"q_proj"/"qkv_proj"/'; refuse there_module sft 'target_modules has qkv_proj, but no layer has a module of that name; give another adapter' $there $out/changed
changed 's/"modules_to_save":.*/"modules_to_save": ["lm_head"],/'; refuse there_saved sft 'modules_to_save has lm_head, but only score is supported; give another adapter' $there $out/changed
changed 's/"q_proj", *//; /^.*"q_proj",$/d'; refuse there_more sft 'has base_model.*self_attn.q_proj.lora_A.weight, which no adapter of this model has' $there $out/changed
changed 's/"r":.*/"r": 2,/'; refuse there_shape sft 'lora_A.weight is \[4, 32\].*\[2, 32\]|shape|2, 32' $there $out/changed
rm $out/changed/adapter_model.safetensors; changed 's/x/x/'; rm $out/changed/adapter_model.safetensors; refuse there_gone sft 'adapter_model.safetensors' $there $out/changed
refuse four_alone sft 'load_in_4bit keeps the model in four bits, which cannot be trained without adapters; add --lora_rank, or leave it out' $texts --pretrain $out/base --load_in_4bit
refuse four_merged sft 'save_merged would round the merged weights to the four bits of --load_in_4bit; leave one of them out' $lora --load_in_4bit --save_merged
refuse four_offload sft 'param_offload keeps weights outside .* but --load_in_4bit keeps all of them there; leave one of them out' $lora --load_in_4bit --zero_stage 3 --param_offload
refuse four_reference dpo 'load_in_4bit does not support a model that is offloaded; leave out --load_in_4bit or the offload' $pairs --pretrain $out/base --lora_rank 4 --load_in_4bit --ref_pretrain $out/copy --ref_offload
refuse four_qlora sft 'adapter qlora keeps the model in four bits; add --load_in_4bit, or take lora' $texts --pretrain $out/base --adapter qlora --lora_r 4 --lora_alpha 8 --lora_target_linear
refuse four_resume sft 'another|base' $lora --load_checkpoint --ckpt_path $out/four.sft.half.ckpt
refuse no_model sft 'give its folder by --pretrain' $texts --lora_rank 4
refuse adapters_of_adapters sft 'adapter_config.json is an adapter' $lora --pretrain $out/sft.one
refuse full sft 'finetuning_type full trains every weight' $lora --finetuning_type full
refuse zero sft 'lora_rank 0 means no adapters' $texts --pretrain $out/base --finetuning_type lora --lora_rank 0
refuse merged sft 'save_merged needs adapters' $texts --pretrain $out/base --save_merged
refuse no_adapter sft 'without --adapter axolotl ignores --lora_r 8 and trains every weight' $texts --pretrain $out/base --lora_r 8
refuse axolotl_alpha sft 'axolotl has no default for lora_alpha' $texts --pretrain $out/base --adapter lora --lora_r 8
refuse vera sft 'adapter is vera, but it must be one of lora, qlora' $texts --pretrain $out/base --adapter vera
refuse experts sft 'the model has experts, whose MLPs cannot have adapters' $lora --pretrain $out/of/qwen3_moe.lm --target_modules q_proj,up_proj
refuse fused sft 'as one matrix, .*give --target_modules o_proj,down_proj' $lora --pretrain $out/of/phi3.lm
refuse beside_model sft 'holds a whole model \(model.safetensors\), and in that folder adapters' $lora --save_path $out/copy
refuse beside_adapters sft 'holds adapters \(adapter_config.json\), and in that folder a whole model' $texts --pretrain $out/base --save_path $out/sft.one
cp -r $out/sft.one $out/theirs; LC_ALL=C sed -i 's/written_by/written_at/' $out/theirs/adapter_model.safetensors
refuse foreign sft 'holds a model that seqpar did not write' $lora --save_path $out/theirs
# a checkpoint of other adapters, of another model, or of none
goes() { refuse "$1" "${3:-sft}" "$2" ${5:-$texts} --pretrain ${4:-$out/base} --ckpt_path $out/kept.ckpt --load_checkpoint "${@:6}"; }
run kept.run sft $texts --max_steps 1 --save_steps 1; mv $out/kept.run.ckpt $out/kept.ckpt
goes resume_rank 'written with --lora_rank 4, this run has 8' sft $out/base "$texts" --lora_rank 8
goes resume_alpha 'written with --lora_alpha 16, this run has 8' sft $out/base "$texts" --lora_rank 4 --lora_alpha 8
goes resume_targets 'has adapters of q_proj,k_proj,.*, this run of q_proj; give the same --target_modules' sft $out/base "$texts" --lora_rank 4 --target_modules q_proj
goes resume_full 'written with --lora_rank 4, this run has 0' sft $out/base "$texts"
goes resume_critic 'are of another model, .*--ref_pretrain, and --critic_pretrain, to go on' ppo $out/base "$texts_of" --lora_rank 4 --ckpt_path $out/ppo.kept --critic_pretrain $out/sft.merged/merged
goes resume_model 'are of another model, .*give the same --pretrain' sft $out/sft.merged/merged "$texts" --lora_rank 4
run plain sft $texts --lora_rank 0 --max_steps 1 --save_steps 1; rm -rf $out/kept.ckpt; mv $out/plain.ckpt $out/kept.ckpt
goes resume_none 'written with --lora_rank 0, this run has 4' sft $out/base "$texts" --lora_rank 4

check lora_base_untouched "the weights of --pretrain have changed" [ "$(sha256sum <$out/base/model.safetensors)" = "$base" ]
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
