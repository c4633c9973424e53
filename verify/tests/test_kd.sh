#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Knowledge distillation as a user meets it: a teacher of another width, one rank and other worlds, both forms of the KL, adapters, how a
# run goes on, and what is refused.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_kd
rm -rf $out; mkdir -p $out
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
check() { local name=$1 why=$2; shift 2; if "$@"; then ok "$name"; else fail "$name" "$why"; fi; } # NAME WHY COMMAND...
export OMP_WAIT_POLICY=passive # a program need not start itself again

build/make_arith $out/arith.jsonl 60 5 >/dev/null
build/make_arith $out/eval.jsonl 8 6 >/dev/null
shape="--dataset $out/arith.jsonl --eval_dataset $out/eval.jsonl --input_key question --output_key answer --omp_threads 1 --lr_scheduler constant --warmup_steps 0 --logging_steps 1000 --max_len 200 --packing_samples --pack_len 420 --cell 16 --train_batch_size 8 --learning_rate 5e-3"
model() { local name=$1; shift; build/train_sft $shape "$@" --save_path $out/$name >$out/$name.log 2>&1 || fail "kd_$name" "$(tail -n 1 $out/$name.log)"; }
model teacher --num_hidden_layers 2 --hidden_size 48 --num_attention_heads 6 --max_steps 8
model other --num_hidden_layers 1 --hidden_size 24 --num_attention_heads 4 --max_steps 1
model student --num_hidden_layers 1 --hidden_size 32 --num_attention_heads 4 --max_steps 2
taught=$(sha256sum <$out/teacher/model.safetensors)
run() { local name=$1; shift; build/train_kd $shape --pretrain $out/student --teacher_model $out/teacher --max_steps 3 --save_path $out/$name --ckpt_path $out/$name.ckpt --metrics_path $out/$name.jsonl "$@" >$out/$name.log 2>&1; }
figures() { sed -E 's/, "tokens_per_second.*//' $out/$1.jsonl; }
of() { grep -m 1 "\"$2\": " $out/$1.jsonl | sed -nE "s/.*\"$2\": ([-0-9.e+]*).*/\1/p"; }
alike() { cmp -s $out/$1/model.safetensors $out/$2/model.safetensors && [ "$(figures $1)" = "$(figures $2)" ]; }

for way in "" --kd_reverse; do
    one=one$way n=0
    run "$one" $way || fail "kd_run $way" "$(tail -n 1 $out/$one.log)"
    # loss = (1 - c) gpt_loss + c distil_loss, the KL is a part of it that falls, and evaluation has them, too
    awk 'function v(name,   s) { match($0, "\"(eval_)?" name "\": [-0-9.e+]+"); s = substr($0, RSTART, RLENGTH); sub(/.*: /, "", s); return s + 0 }
        { d = v("loss") - 0.6 * v("gpt_loss") - 0.4 * v("distil_loss"); kl[NR] = v("kl"); if (d * d > 1e-18 || kl[NR] <= 0 || kl[NR] >= v("distil_loss")) exit 1 } END { exit !(NR == 4 && kl[3] < kl[1]) }' $out/$one.jsonl && ok "kd_figures $way" || fail "kd_figures $way" "$(head -n 2 $out/$one.jsonl)"
    for world in "--ring_attn_size 3 --zero_stage 3 --teacher_offload" "--ring_attn_size 2 --data_parallel_size 2 --schedule llama3 --micro_train_batch_size 2 --pack_len 1003" "--data_parallel_size 3 --micro_train_batch_size 1 --gradient_checkpointing"; do
        n=$((n + 1))
        if run "$one.$n" $way $world && cmp -s $out/$one.$n/model.safetensors $out/$one/model.safetensors && [ "$(figures $one.$n)" = "$(figures $one | sed 's/, "rows.*//')" ]; then ok "kd_world $way $world"; else fail "kd_world $way $world" "$(tail -n 1 $out/$one.$n.log)"; fi
    done
done
check kd_forms "both forms of the KL teach the same" eval '! alike one one--kd_reverse'
check kd_teacher_untouched "the teacher has changed" [ "$(sha256sum <$out/teacher/model.safetensors)" = "$taught" ]

# coefficient 0 is SFT, to the bit of its weights; 1 learns from the teacher alone
run none --kd_coef 0
build/train_sft $shape --pretrain $out/student --max_steps 3 --save_path $out/sft >$out/sft.log 2>&1
check kd_none "$(tail -n 1 $out/none.log)" cmp -s $out/none/model.safetensors $out/sft/model.safetensors
# what a student is itself teaches it nothing: adapters of the teacher begin where it is
run itself --pretrain $out/teacher --lora_rank 3 --kd_coef 1
check kd_itself "kl $(of itself kl), norm $(of itself grad_norm)" [ "$(of itself kl) $(of itself grad_norm)" = "0 0" ]
run adapters --lora_rank 3 && run adapters.2 --lora_rank 3 --ring_attn_size 2 --zero_stage 3 && cmp -s $out/adapters/adapter_model.safetensors $out/adapters.2/adapter_model.safetensors && [ "$(of adapters grad_norm)" != 0 ] && ok kd_adapters || fail kd_adapters "$(tail -n 1 $out/adapters.2.log)"
# bf16, and experts as students
run half --param_dtype bf16 && run half.2 --param_dtype bf16 --ring_attn_size 2 && alike half half.2 && ok kd_bf16 || fail kd_bf16 "$(tail -n 1 $out/half.2.log)"

# stopped after a step, and gone on elsewhere
run half_way --max_steps 1 --save_steps 1 --ring_attn_size 2 && cp -r $out/half_way.ckpt $out/kept && run half_way --load_checkpoint --data_parallel_size 2 && cmp -s $out/half_way/model.safetensors $out/one/model.safetensors && ok kd_resume || fail kd_resume "$(tail -n 1 $out/half_way.log)"
build/train_kd $shape --pretrain $out/student --teacher_model $out/teacher --dry_run >$out/dry.log 2>&1 && [ ! -e $out/dry ] && ok kd_dry_run || fail kd_dry_run "$(tail -n 1 $out/dry.log)"

refuse() { # NAME PATTERN OPTIONS...
    local name=$1 pattern=$2 code; shift 2
    rm -rf $out/refused
    ci/limit.sh 120 build/train_kd $shape --pretrain $out/student --save_path $out/refused "$@" >$out/refused.log 2>&1
    code=$?
    if [ $code -eq 0 ] || [ $code -ge 124 ]; then fail "refuse_$name" "exit code $code"
    elif [ "$(grep -c '^error: ' $out/refused.log)" -ne 1 ] || ! grep -qE "^error: .*($pattern)" $out/refused.log; then fail "refuse_$name" "$(head -c 400 $out/refused.log)"
    elif [ -e $out/refused/model.safetensors ]; then fail "refuse_$name" "wrote a model all the same"
    else ok "refuse_$name"; fi
}
with="--teacher_model $out/teacher"
refuse no_teacher 'no teacher model; give its folder by --teacher_model'
refuse no_folder "$out/nobody" --teacher_model $out/nobody
refuse coefficient_low 'kd_coef is -0.1, but it must be' $with --kd_coef -0.1
refuse coefficient_high 'kd_coef is 1.1, but it must be' $with --kd_coef 1.1
cp -r $out/teacher $out/wide; sed -i 's/"vocab_size":.*/"vocab_size": 300,/' $out/wide/config.json
refuse vocabulary "the teacher in $out/wide has a vocabulary of 300, but the trained model one of 259; take a model with the same tokens" --teacher_model $out/wide
goes="--ckpt_path $out/kept --load_checkpoint"
refuse other_teacher "the checkpoint in $out/kept is of another teacher; give the same --teacher_model" --teacher_model $out/other $goes
refuse other_coefficient 'kd_coef' $with $goes --kd_coef 0.5
refuse other_form 'kd_reverse' $with $goes --kd_reverse
refuse smoothing 'label_smoothing' $with --label_smoothing 0.1
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
