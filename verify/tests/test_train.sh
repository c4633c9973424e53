#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The trainer as a user meets it: whole runs, resumed runs, other worlds, and everything that can be wrong.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_train
data=${SEQPAR_DATA:-../shared/data}
rm -rf $out; mkdir -p $out
passed=0 failed=0 skipped=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }

build/make_arith $out/arith.jsonl 300 5 >/dev/null
build/make_arith $out/eval.jsonl 40 6 >/dev/null
base="--dataset $out/arith.jsonl --input_key question --output_key answer --packing_samples --max_len 200 --pack_len 300
      --train_batch_size 12 --micro_train_batch_size 2 --max_steps 6 --num_hidden_layers 1 --cell 16 --hidden_size 32 --num_attention_heads 4 --logging_steps 1000"
# train NAME OPTIONS...: a run of 6 steps in $out/NAME
train() { name=$1; shift; build/train_sft $base --save_path $out/$name --ckpt_path $out/$name/ckpt --metrics_path $out/$name.jsonl "$@" >$out/$name.log 2>&1; }
losses() { sed -E 's/, "tokens_per_second.*//' "$1"; }
same() { # NAME RUN REFERENCE
    if ! cmp -s $out/$2/model.safetensors $out/$3/model.safetensors; then fail "$1" "weights differ"
    elif [ "$(losses $out/$2.jsonl)" != "$(losses $out/$3.jsonl)" ]; then fail "$1" "metrics differ"
    else ok "$1"; fi
}

mkdir -p $out/one
train one --eval_dataset $out/eval.jsonl || fail train_one "$(tail -n 1 $out/one.log)"
if cmp -s $out/one/model.safetensors <(build/train_sft $base --max_steps 1 --save_path $out/none >/dev/null 2>&1; cat $out/none/model.safetensors); then fail train_moves "six steps equal one"; else ok train_moves; fi
# the same run in other worlds: weights, losses, norms and evaluation loss to the bit
i=0
while read -r options; do
    i=$((i + 1))
    train world$i --eval_dataset $out/eval.jsonl $options || fail "train_world $options" "$(tail -n 1 $out/world$i.log)"
    same "train_world $options" world$i one
done <<'LIST'
--ring_attn_size 4
--ring_attn_size 2 --data_parallel_size 2 --zero_stage 1
--ring_attn_size 3 --world_size 6 --zero_stage 0 --gradient_checkpointing
--ring_attn_size 5 --layout contiguous --schedule llama3 --ring_head_stride 2
--data_parallel_size 4 --gradient_accumulation_steps 3 --micro_train_batch_size 1 --omp_threads 2
--sequence_parallel_size 8 --sequence_parallel_mode zigzag-ring --micro_train_batch_size 100
--sequence_parallel_degree 2 --heads_k_stride 1 --ring_attn_func varlen_llama3
--ring_attn_size 2 --data_parallel_size 2 --zero_stage 3
--ring_attn_size 5 --zero_stage 3 --gradient_checkpointing --gradient_accumulation_steps 2 --micro_train_batch_size 6
--sequence_parallel_size 8 --sequence_parallel_mode ulysses
--sequence_parallel_size 4 --sequence_parallel_mode usp --sequence_parallel_ring_degree 2
--ring_attn_size 4 --ulysses_size 2 --schedule llama3 --layout contiguous
--ring_attn_size 3 --activation_offloading --zero_stage 3 --param_offload
--data_parallel_size 2 --activation_offloading legacy --gradient_accumulation_steps 3
--ring_attn_size 2 --tiled_mlp --micro_train_batch_size 100
--tiled_mlp --tiled_mlp_num_shards 4 --gradient_checkpointing --zero_stage 3 --data_parallel_size 2
LIST
train activations_disk --eval_dataset $out/eval.jsonl --activation_offloading disk --offload_path $out --ring_attn_size 2; same train_activations_disk activations_disk one

# OpenMP threads sleep while they wait where there are more than cores, unless the user says otherwise; elsewhere they spin first
told() { local policy=$1; shift; OMP_DISPLAY_ENV=verbose env $policy build/train_sft --dataset $out/nowhere "$@" 2>&1 | sed -n "s/.*GOMP_SPINCOUNT = '\([0-9]*\)'.*/\1/p" | tail -n 1; }
cores=$(getconf _NPROCESSORS_ONLN)
waits() { # NAME SLEEPS POLICY OPTIONS...
    local name=$1 sleeps=$2 spins; shift 2
    spins=$(told "$@")
    [ -n "$spins" ] && [ $((spins == 0)) = "$sleeps" ] && ok "train_waits_$name" || fail "train_waits_$name" "spins '$spins' times"
}
waits fit 0 -uOMP_WAIT_POLICY
waits typed 0 -uOMP_WAIT_POLICY --omp_threads "$cores"
waits crowded 1 -uOMP_WAIT_POLICY --omp_threads $((cores + 1))
waits ranks 1 -uOMP_WAIT_POLICY --omp_threads "$((cores > 1 ? cores : 2))" --ring_attn_size 2
waits replicas 1 -uOMP_WAIT_POLICY --omp_threads "$((cores > 1 ? cores : 2))" --data_parallel_size 2
waits processes 1 "-uOMP_WAIT_POLICY WORLD_SIZE=2" --omp_threads 1
waits as_told 0 OMP_WAIT_POLICY=active --omp_threads $((cores + 1))

# relaxed attention: the same training but for rounding
train relaxed --ring_attn_size 3 --relaxed_attention || fail train_relaxed "$(tail -n 1 $out/relaxed.log)"
awk -F'"loss": ' 'FNR == NR { want[FNR] = $2 + 0; next } { d = $2 - want[FNR]; if (d < 0) d = -d; n++; if (!(d < 1e-4 && $2 > 1)) bad = 1 } END { exit bad || n < 6 }' $out/one.jsonl $out/relaxed.jsonl &&
    ! cmp -s $out/relaxed/model.safetensors $out/one/model.safetensors && ok train_relaxed || fail train_relaxed "losses are not those of one rank, or the bits are"

# stop and go on, at another P, D and ZeRO stage: the bits of the uninterrupted run
cat > $out/interrupt.sh <<'STOP'
# runs the given command and presses Ctrl-C when the first checkpoint is there
"$@" & pid=$!
for _ in $(seq 1 600); do
    [ -e "$CKPT/latest" ] && break
    sleep 0.05
done
kill -INT $pid
wait $pid
STOP
for world in "--ring_attn_size 1|--ring_attn_size 4 --zero_stage 0" "--ring_attn_size 4 --zero_stage 1|--data_parallel_size 3 --zero_stage 3" "--ring_attn_size 2 --data_parallel_size 2 --zero_stage 3|--ring_attn_size 3 --gradient_checkpointing"; do
    name=resume_$((++n)); rm -rf $out/$name; mkdir -p $out/$name
    CKPT=$out/$name/ckpt bash $out/interrupt.sh build/train_sft $base --max_steps 60 --lr_scheduler constant_with_warmup --save_steps 1 --sharded_checkpoint --save_path $out/$name --ckpt_path $out/$name/ckpt ${world%%|*} >$out/$name.log 2>&1
    code=$?
    at=$(sed 's/global_step//' $out/$name/ckpt/latest)
    build/train_sft $base --max_steps 60 --lr_scheduler constant_with_warmup --save_path $out/$name --ckpt_path $out/$name/ckpt --load_checkpoint ${world##*|} >>$out/$name.log 2>&1 || fail $name "$(tail -n 1 $out/$name.log)"
    [ -f $out/whole/model.safetensors ] || build/train_sft $base --max_steps 60 --lr_scheduler constant_with_warmup --save_path $out/whole >$out/whole.log 2>&1
    if [ $code -ne 130 ] && [ "$at" != 60 ]; then fail "train_$name" "exit code $code after an interrupt at step $at"
    elif cmp -s $out/$name/model.safetensors $out/whole/model.safetensors; then ok "train_$name interrupted at step $at, ${world##*|}"
    else fail "train_$name" "weights differ from the uninterrupted run (stopped at $at)"; fi
    kept=$(ls -d $out/$name/ckpt/global_step* | wc -l)
    if [ "$kept" -le 3 ] && ! ls $out/$name/ckpt/*.tmp >/dev/null 2>&1; then ok "train_${name}_retention"; else fail "train_${name}_retention" "$kept checkpoints kept"; fi
done

# bf16: weights and activations rounded, masters in fp32. On any ranks, and with a stop at step 3 and another world after it,
# the weights, the moments and the masters of one rank
bf16="--param_dtype bf16 --lr_scheduler constant_with_warmup --save_steps 3"
train bf16_1 $bf16 || fail train_bf16 "$(tail -n 1 $out/bf16_1.log)"
for ranks in 2 3 5; do
    train bf16_$ranks $bf16 --ring_attn_size $ranks || fail train_bf16 "$(tail -n 1 $out/bf16_$ranks.log)"
    same "train_bf16 on $ranks ranks" bf16_$ranks bf16_1
    cmp -s $out/bf16_$ranks/ckpt/global_step6/optimizer.safetensors $out/bf16_1/ckpt/global_step6/optimizer.safetensors && ok "train_bf16_state on $ranks ranks" || fail "train_bf16_state on $ranks ranks" "moments or masters differ"
done
mkdir -p $out/bf16_on; cp -r $out/bf16_2/ckpt $out/bf16_on/; rm -r $out/bf16_on/ckpt/global_step6; printf global_step3 > $out/bf16_on/ckpt/latest
train bf16_on $bf16 --load_checkpoint --ring_attn_size 3 --zero_stage 0 &&
    cmp -s $out/bf16_on/model.safetensors $out/bf16_1/model.safetensors && cmp -s $out/bf16_on/ckpt/global_step6/optimizer.safetensors $out/bf16_1/ckpt/global_step6/optimizer.safetensors &&
    grep -q '"master.model.norm.weight":{"dtype":"F32"' $out/bf16_on/ckpt/global_step6/optimizer.safetensors && grep -q '"dtype":"BF16"' $out/bf16_on/model.safetensors && ok train_bf16_resumed || fail train_bf16_resumed "$(tail -n 1 $out/bf16_on.log)"

train bf16_off $bf16 --ring_attn_size 2 --data_parallel_size 2 --zero_stage 3 --adam_offload --param_offload && cmp -s $out/bf16_off/ckpt/global_step6/optimizer.safetensors $out/bf16_1/ckpt/global_step6/optimizer.safetensors && ok train_bf16_offloaded || fail train_bf16_offloaded "$(tail -n 1 $out/bf16_off.log)"
train bf16_reference $bf16 --device reference && train bf16_reference_3 $bf16 --device reference --ring_attn_size 3 && same "train_bf16 on the reference device" bf16_reference_3 bf16_reference || fail train_bf16_reference "$(tail -n 1 $out/bf16_reference.log)"

# moments in 8 bits, and no masters: the same, and a checkpoint holds what the bytes say
chance="$bf16 --stochastic_rounding --optim adamw_8bit"
train chance_1 $chance && train chance_3 $chance --ring_attn_size 3 --zero_stage 3 && same "train_8_bits_by_chance on 3 ranks" chance_3 chance_1 || fail train_8_bits_by_chance "$(tail -n 1 $out/chance_3.log)"
mkdir -p $out/chance_on; cp -r $out/chance_3/ckpt $out/chance_on/; rm -r $out/chance_on/ckpt/global_step6; printf global_step3 > $out/chance_on/ckpt/latest
train chance_on $chance --load_checkpoint --ring_attn_size 2 --zero_stage 0 --sharded_checkpoint && cmp -s $out/chance_on/model.safetensors $out/chance_1/model.safetensors && ! cmp -s $out/chance_1/model.safetensors $out/bf16_1/model.safetensors &&
    ! grep -q '"master\.' $out/chance_1/ckpt/global_step6/optimizer.safetensors && ok train_8_bits_resumed || fail train_8_bits_resumed "$(tail -n 1 $out/chance_on.log)"
rm -r $out/chance_on/ckpt/global_step6; printf global_step3 > $out/chance_on/ckpt/latest
train chance_on $bf16 --load_checkpoint; [ $? -ne 0 ] && grep -q '^error: .*--optim adamw_8bit, this run has adamw' $out/chance_on.log && ok train_8_bits_kept || fail train_8_bits_kept "$(tail -n 1 $out/chance_on.log)"

# starting from saved weights: zero steps change nothing, other shapes are refused
train again --pretrain $out/one --learning_rate 1e-30 --lr_scheduler constant --warmup_steps 0 --max_steps 1 && cmp -s $out/again/model.safetensors $out/one/model.safetensors && ok train_pretrain || fail train_pretrain "weights did not come through"

# ---- what must be refused: one sentence, a non-zero exit code, nothing written ----
refuse() { # NAME PATTERN OPTIONS...
    local name=$1 pattern=$2; shift 2
    rm -rf $out/refused
    ci/limit.sh 120 build/train_sft --save_path $out/refused --ckpt_path $out/refused/ckpt "$@" >$out/refused.log 2>&1
    local code=$? lines
    lines=$(grep -c '^error: ' $out/refused.log)
    if [ $code -eq 0 ] || [ $code -ge 124 ]; then fail "refuse_$name" "exit code $code"
    elif [ "$lines" -ne 1 ]; then fail "refuse_$name" "$lines error lines: $(head -c 300 $out/refused.log)"
    elif ! grep -qE "$pattern" $out/refused.log; then fail "refuse_$name" "says: $(grep '^error' $out/refused.log)"
    elif [ -e $out/refused/model.safetensors ]; then fail "refuse_$name" "wrote a model all the same"
    else ok "refuse_$name"; fi
}
io="--input_key question --output_key answer --max_steps 1"
: > $out/empty.jsonl
printf '{"question": "a", "answer": "b"}\n{"question": "a", "answer" "b"}\n' > $out/broken.jsonl
printf '{"question": "a", "reply": "b"}\n' > $out/nokey.jsonl
printf '{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}\n' > $out/nolabel.jsonl
printf '{"input_ids": [1, 2, 999], "labels": [-100, 2, 999]}\n' > $out/vocab.jsonl
refuse missing_file 'nowhere.jsonl' --dataset $out/nowhere.jsonl $io
refuse cuda "needs a program built with CUDA" --dataset $out/arith.jsonl $io --device cuda
refuse chance_of_floats 'stochastic_rounding is for weights in bf16; add --param_dtype bf16' --dataset $out/arith.jsonl $io --stochastic_rounding
refuse bytes_offloaded 'adam_offload does not support --optim adamw_8bit' --dataset $out/arith.jsonl $io --optim adamw_8bit --adam_offload
refuse cublas_on_cpu 'cublas is for the GPU' --dataset $out/arith.jsonl $io --cublas
refuse bf16_checkpoint 'written in bf16' $base --device reference --load_checkpoint --ckpt_path $out/bf16_1/ckpt
refuse empty_file 'empty' --dataset $out/empty.jsonl $io
refuse broken_json ':2: ' --dataset $out/broken.jsonl $io
refuse missing_key 'answer' --dataset $out/nokey.jsonl $io
refuse no_target 'no supervised token' --dataset $out/nolabel.jsonl
refuse token_id '999' --dataset $out/vocab.jsonl
refuse no_dataset 'give --dataset' $io
refuse unknown_option 'did you mean --ring_attn_size' --dataset $out/arith.jsonl --ring_atn_size 2
refuse world 'world_size 6' --dataset $out/arith.jsonl $io --world_size 6 --ring_attn_size 4
refuse zero_ranks 'ring_attn_size' --dataset $out/arith.jsonl $io --ring_attn_size 0
refuse negative_lr 'learning_rate' --dataset $out/arith.jsonl $io --learning_rate -1
refuse zero_hidden 'hidden_size' --dataset $out/arith.jsonl $io --hidden_size 0
refuse text_for_number 'max_len' --dataset $out/arith.jsonl $io --max_len many
refuse odd_heads 'heads' --dataset $out/arith.jsonl $io --num_attention_heads 3 --num_key_value_heads 2 --head_dim 8
refuse head_stride 'heads_k_stride 3' --dataset $out/arith.jsonl $io --ring_attn_size 2 --schedule llama3 --ring_head_stride 3
refuse ulysses_size 'ulysses_size 3' --dataset $out/arith.jsonl $io --ring_attn_size 4 --ulysses_size 3
refuse ulysses_heads 'ulysses_size 4' --dataset $out/arith.jsonl $io --ring_attn_size 4 --ulysses_size 4
refuse zero_stage 'zero_stage' --dataset $out/arith.jsonl $io --zero_stage 4
refuse pack_len 'pack_len 50' --dataset $out/arith.jsonl $io --packing_samples --pack_len 50 --max_len 100
refuse save_path_is_file 'a part of this path is a file' --dataset $out/arith.jsonl $io --save_path $out/arith.jsonl
refuse diverged 'step [0-9]+: the loss of row|gradient norm of step' --dataset $out/arith.jsonl $io --max_steps 50 --learning_rate 1e30 --max_norm 0 --optim sgd --lr_scheduler constant --warmup_steps 0
cp -r $out/one $out/nan
python3 - $out/nan/model.safetensors 2>/dev/null <<'PY' || printf '\xff\xff\xff\x7f' | dd of=$out/nan/model.safetensors bs=1 seek=$(($(stat -c %s $out/nan/model.safetensors) - 4)) conv=notrunc 2>/dev/null
import sys
f = open(sys.argv[1], 'r+b'); f.seek(-4, 2); f.write(b'\x00\x00\xc0\x7f')
PY
refuse nan_weights 'NaN|nan|finite' --dataset $out/arith.jsonl $io --pretrain $out/nan
cp -r $out/one $out/short; truncate -s -100 $out/short/model.safetensors
refuse truncated_file 'model.safetensors' --dataset $out/arith.jsonl $io --pretrain $out/short
cp -r $out/one $out/lying; printf '\xff\xff\xff\xff\xff\xff\xff\x7f' | dd of=$out/lying/model.safetensors bs=1 conv=notrunc 2>/dev/null
refuse lying_header 'model.safetensors' --dataset $out/arith.jsonl $io --pretrain $out/lying
cp -r $out/one $out/shape; sed -i 's/"intermediate_size": [0-9]*/"intermediate_size": 64/' $out/shape/config.json
refuse other_shape 'mlp' --dataset $out/arith.jsonl $io --pretrain $out/shape
refuse checkpoint_shape "has hidden_size 32, but this run's model has 48" $base --max_steps 60 --hidden_size 48 --load_checkpoint --ckpt_path $out/resume_1/ckpt
mkdir -p $out/full; cp $out/one/model.safetensors $out/full/; before=$(cksum < $out/full/model.safetensors)
(ulimit -f 8; trap '' XFSZ; build/train_sft --dataset $out/arith.jsonl $io --num_hidden_layers 1 --hidden_size 64 --save_path $out/full --ckpt_path $out/full/c >$out/full.log 2>&1); code=$?
if [ $code -ne 0 ] && grep -q '^error: ' $out/full.log && [ "$before" = "$(cksum < $out/full/model.safetensors)" ] && ! ls $out/full/*.tmp* >/dev/null 2>&1; then ok refuse_disk_full; else fail refuse_disk_full "exit $code: $(tail -n 1 $out/full.log)"; fi

# ---- what a command line means: done as its program does it, said, or refused ----
tiny="--input_key q --output_key a --input_template {} --num_hidden_layers 1 --hidden_size 32 --logging_steps 1000"
for i in $(seq 1 50); do printf '{"q": "a%02d", "a": "b"}\n' $i; done > $out/short.jsonl   # 6 tokens each
for i in $(seq 1 150); do printf '{"q": "a%03d", "a": "bcd"}\n' $i; done > $out/long.jsonl # 9 each
# says NAME PATTERN OPTIONS...: a run whose messages hold the pattern; says_not: do not
says() { local name=$1 pattern=$2; shift 2; ci/limit.sh 120 build/train_sft $tiny --dataset $out/short.jsonl --save_path $out/says "$@" >$out/says.log 2>&1; local code=$?; [ $code -eq 0 ] && grep -qE "$pattern" $out/says.log && ok "option_$name" || fail "option_$name" "code $code, no '$pattern' in: $(head -c 900 $out/says.log)"; }
dry=--dry_run
says batch_360 '^batch: 2 documents a step = about 1 row x 1 replica x 2 micro-batches$' --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --sequence_parallel_size 4 --max_steps 1
says batch_axolotl '^batch: 4 documents a step = about 2 rows x 2 replicas x 1 micro-batch$' --micro_batch_size 2 --sequence_parallel_degree 4 --world_size 8 --heads_k_stride 1 $dry
says batch_large '^notice: a batch of 64 documents is more than the data has; every step takes all 50$' --train_batch_size 64 $dry
says rate_fresh '^learning rate: at most 0.002 \(for a new model\)' $dry
says rate_given "^learning rate: at most 5e-06 \(openrlhf's default with --pretrain\), cosine_with_min_lr, 1 of 1 steps warm up$" --pretrain $out/one $dry
says rate_typed '^learning rate: at most 0.001, constant' --pretrain $out/one --learning_rate 1e-3 --lr_scheduler constant $dry
says rate_zero '^notice: the only step has learning rate 0 \(1 of 1 steps warm up\), so no weight changes' --max_steps 1
says left_over '^notice: 50 documents are not a multiple of 16: each epoch leaves out 2 of them$' --train_batch_size 16 --max_epochs 2 $dry
says evaluation_none '^evaluation: none, as there is no --eval_dataset$' $dry
says evaluation '^evaluation: .*short.jsonl, 50 documents, every 3 steps \(an epoch\) and at the end$' --train_batch_size 16 --eval_dataset $out/short.jsonl $dry
refuse activations 'activation_offloading is maybe, but it must be true, false, legacy, hidden_states or disk$' --dataset $out/arith.jsonl $io --activation_offloading maybe
refuse activations_disk 'activation_offloading disk needs a folder; add --offload_path FOLDER$' --dataset $out/arith.jsonl $io --activation_offloading disk
says idle_offload '^notice: nothing is offloaded, so --offload_path is not used' --offload_path $out $dry
says idle_experts '^notice: the model has no experts, so --aux_loss_coef adds nothing' --aux_loss_coef 0.1 $dry
says stride '\(contiguous, llama3\)' --ring_attn_size 2 --ring_head_stride 2 $dry
says bf16 'cpu in bf16$' --bf16 $dry
rm -rf $out/says; build/train_sft $tiny --dataset $out/short.jsonl --eval_dataset $out/short.jsonl --train_batch_size 16 --max_epochs 2 --save_path $out/says --metrics_path $out/epochs.jsonl >$out/says.log 2>&1; [ "$(grep -n eval_loss $out/epochs.jsonl | cut -d: -f1 | tr '\n' ' ')" = "4 8 " ] && ok option_once_an_epoch || fail option_once_an_epoch "$(cat $out/epochs.jsonl | cut -c1-60)"
few="--dataset $out/short.jsonl $tiny --max_steps 1"
refuse option_eval_steps 'eval_steps is 1, but there is nothing to evaluate on; give --eval_dataset' $few --eval_steps 1
refuse option_eight_bit '\-\-load_in_8bit true is not supported: weights are never quantised' $few --load_in_8bit
refuse option_stage '\-\-stage dpo is not supported: each stage is a program of its own' $few --stage dpo
refuse option_resume '\-\-resume_from_checkpoint nowhere is not supported: checkpoints are found in --ckpt_path' $few --resume_from_checkpoint nowhere
refuse option_val_size '\-\-val_size 50 asks for 50 of 50 documents, which leaves none to train on' $few --val_size 50
refuse option_template '\-\-apply_chat_template: .*short.jsonl is not a token file' $few --apply_chat_template
refuse option_batch 'train_batch_size 12 is not --micro_train_batch_size 2 x 1 data-parallel ranks x --gradient_accumulation_steps 3 = 6' $few --train_batch_size 12 --micro_train_batch_size 2 --gradient_accumulation_steps 3
refuse option_packed_rows 'with --sample_packing, axolotl counts packed rows' $few --micro_batch_size 2 --sample_packing
refuse option_stride_ring 'ring_head_stride 2 needs --schedule llama3, but the schedule is ring' $few --ring_attn_size 2 --ring_head_stride 2 --schedule ring
refuse option_stride_model 'heads_k_stride 2 .* does not divide the 1 kv heads of the model in --pretrain' --dataset $out/arith.jsonl $io --ring_attn_size 2 --ring_head_stride 2 --pretrain $(build/train_sft $few --num_attention_heads 2 --num_key_value_heads 1 --save_path $out/single >/dev/null 2>&1; echo $out/single)
cp $out/short.jsonl $out/precious.jsonl
refuse option_metrics_kept 'metrics_path .*precious.jsonl exists and has no metrics in it' $few --metrics_path $out/precious.jsonl
cmp -s $out/short.jsonl $out/precious.jsonl && ok option_metrics_whole || fail option_metrics_whole "the file was changed"
cp $out/epochs.jsonl $out/shared.jsonl; exec 9>>$out/shared.jsonl; flock 9
refuse option_metrics_shared 'metrics_path .*shared.jsonl is being written by another run' $few --metrics_path $out/shared.jsonl
cmp -s $out/epochs.jsonl $out/shared.jsonl && ok option_metrics_alone || fail option_metrics_alone "the other run's file was changed"
exec 9>&-
# 8 billion parameters on 16 ranks: sizes are counted, nothing is kept of the tensors
(ulimit -d 500000; build/train_sft $tiny --dataset $out/short.jsonl --num_hidden_layers 32 --hidden_size 4096 --num_attention_heads 32 --num_key_value_heads 8 --intermediate_size 14336 --omp_threads 1 --ring_attn_size 16 --save_path $out/says $dry >$out/large.log 2>&1) && grep -q '^at one time' $out/large.log && ok option_dry_run_memory || fail option_dry_run_memory "$(tail -n 1 $out/large.log)"
# mixed sets: the limit counts after mixing; with weights every record is drawn, without them each set gives its share
says mix_drawn '^data: 80 read, 80 kept with 597 tokens' --dataset $out/short.jsonl,$out/long.jsonl --dataset_probs 0.5,0.5 --max_samples 80 $dry
says mix_shared '^data: 80 read, 80 kept with 660 tokens' --dataset $out/short.jsonl,$out/long.jsonl --max_samples 80 $dry
says mix_whole '^data: 200 read, 200 kept with 1650 tokens' --dataset $out/short.jsonl,$out/long.jsonl $dry
mkdir -p $out/folder; cp $out/short.jsonl $out/folder/train.jsonl; cp $out/long.jsonl $out/folder/test.jsonl
says folder '^data: 50 read, 50 kept with 300 tokens' --dataset json@$out/folder $dry
refuse mix_weights '1 weights \(1.0\) for 2 data sets' $few --dataset $out/short.jsonl,$out/long.jsonl --dataset_probs 1.0
mkdir $out/bare; refuse mix_folder 'has no data of a train split' $few --dataset json@$out/bare
# long documents: as the program cuts whose name for the length was typed
says cut_openrlhf '^data: 150 read, 150 kept with 1200 tokens, 450 of them .*; 0 too long, 0 empty, 150 cut' --dataset $out/long.jsonl --max_len 8 $dry
says cut_360 '^data: 150 read, 150 kept with 1200 tokens, 450 of them .*; 0 too long, 0 empty, 150 cut' --dataset $out/long.jsonl --cutoff_len 8 $dry
says cut_axolotl '^data: 200 read, 50 kept .*; 150 too long' --dataset $out/short.jsonl,$out/long.jsonl --sequence_len 8 $dry
says cut_dropped '^data: 200 read, 50 kept .*; 150 too long' --dataset $out/short.jsonl,$out/long.jsonl --max_len 8 --truncation drop $dry

# ---- input forms ----
printf '\xef\xbb\xbf{"question": "2 + 3?", "answer": "5"}\r\n{"question": "4 + 4?", "answer": "8"}\r\n' > $out/bom.jsonl
build/train_sft --dataset $out/bom.jsonl $io --save_path $out/bom >/dev/null 2>$out/bom.log && grep -q '2 read, 2 kept' $out/bom.log && ok input_bom_crlf || fail input_bom_crlf "$(tail -n 1 $out/bom.log)"
build/train_sft --dataset $out/bom.jsonl $io --ring_attn_size 8 --save_path $out/idle >/dev/null 2>$out/idle.log && [ "$(grep -c 'notice: of 8 sequence-parallel ranks the busiest has [0-9]* tokens of the first micro-batch, but the mean is [0-9]*, and [1-7] ha[sv]e* none' $out/idle.log)" = 1 ] && ok notice_idle_ranks || fail notice_idle_ranks "$(tail -n 1 $out/idle.log)"
build/train_sft --dataset $out/arith.jsonl $io --use_wandb token --zpg 1 --flash_attn --save_path $out/ignored >/dev/null 2>$out/ignored.log && grep -q '^no effect here: .*--zpg' $out/ignored.log && ok option_noeffect || fail option_noeffect "$(head -n 2 $out/ignored.log)"
build/train_sft $base --json --plot_loss --save_path $out/json >$out/json.txt 2>/dev/null && python3 -c 'import json,sys; json.load(open(sys.argv[1]))["loss_last"]' $out/json.txt 2>/dev/null || grep -q '^{.*"loss_last": .*}$' $out/json.txt && grep -q '</svg>' $out/json/training_loss.svg && ok option_json_plot || fail option_json_plot "$(head -c 200 $out/json.txt)"
unbound=$(awk -F'\t' '$3 == "real" && $4 ~ /sft/ { print $1 }' demos/trainer/run/options.tsv | while read -r o; do grep -qE "(^ *|[{])\"$o\"," demos/trainer/run/config.h demos/trainer/objective/sft.h || echo "$o"; done)
[ -z "$unbound" ] && ok options_all_bound || fail options_all_bound "$unbound"
build/train_sft --help > $out/help.txt && grep -q -- '--ring_attn_size' $out/help.txt && grep -q -- '--sequence_parallel_degree' $out/help.txt && ok option_help || fail option_help "no help"
if [ -f "$data/tinyshakespeare.txt" ]; then
    for ranks in 1 8; do
        build/train_sft --dataset $data/tinyshakespeare.txt --pretrain_mode --max_len 4096 --max_steps 2 --train_batch_size 1 --num_hidden_layers 1 --hidden_size 32 --ring_attn_size $ranks --save_path $out/text$ranks --metrics_path $out/text$ranks.jsonl >$out/text$ranks.log 2>&1
    done
    same real_text_8_ranks text8 text1
else skip real_text_8_ranks "no tinyshakespeare.txt in $data"; fi
if [ -f "$data/gsm8k_train.jsonl" ]; then
    for ranks in 1 4; do
        build/train_sft --dataset $data/gsm8k_train.jsonl --input_key question --output_key answer --packing_samples --max_steps 2 --train_batch_size 8 --num_hidden_layers 2 --hidden_size 64 --ring_attn_size $ranks --save_path $out/gsm$ranks --metrics_path $out/gsm$ranks.jsonl >$out/gsm$ranks.log 2>&1
    done
    same real_gsm8k_4_ranks gsm4 gsm1
else skip real_gsm8k_4_ranks "no gsm8k_train.jsonl in $data"; fi

printf '%d passed, %d failed' $passed $failed; [ $skipped -gt 0 ] && printf ', %d skipped' $skipped; echo
[ $failed -eq 0 ]
