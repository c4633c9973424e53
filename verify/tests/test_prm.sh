#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Process reward models as a user meets them: labels at placeholders, tokens and shares, one rank and other worlds, token files, what the
# loss is by other ways, how a run goes on, and what is refused.
cd "$(dirname "$0")/../.." || exit 1
. verify/support/rows.sh
export S=$PWD
export B=$S/build F=$S/build/test_prm/made R="--omp_threads 1 --train_batch_size 8 --max_steps 1 --warmup_steps 0"
out=$S/build/test_prm
rm -rf "$out"; mkdir -p "$F"
check() { local name=$1 why=$2; shift 2; if "$@"; then ok "$name"; else fail "$name" "$why"; fi; } # NAME WHY COMMAND...
export OMP_WAIT_POLICY=passive # a program need not start itself again
P=$(ci/python_with.sh tokenizers jinja2) || P=
export PYTHON=$P
tiny_model prm
cd "$out" || exit 1

# sums with a placeholder behind each, right and wrong ones: of 1 to 6 steps; one text begins with a placeholder, one has no other token
awk 'function draw(n) { seed = (seed * 16807) % 2147483647; return seed % n }
    BEGIN { seed = 77
        for (i = 0; i < 40; i++) {
            text = i == 5 || i == 9 ? "*" : ""; labels = text == "" ? "" : "\"-\""
            for (k = draw(6); k >= 0 && i != 9; k--) {
                a = draw(30); b = draw(30); good = draw(5) < 3
                text = text a "+" b "=" a + b + (good ? 0 : 1 + draw(9)) "*"
                labels = labels (labels == "" ? "" : ", ") (good ? "\"+\"" : "\"-\"")
            }
            printf "{\"input\": \"%s\", \"label\": [%s]}\n", text, labels
        } }' >steps.jsonl
head -n 9 steps.jsonl >eval.jsonl
sed 's/"+"/1.0/g; s/"-"/false/g' steps.jsonl >numbers.jsonl
awk '{ n = 0; while (match($0, /"[-+]"/)) $0 = substr($0, 1, RSTART - 1) "0." (3 * n++ + NR) % 8 + 1 substr($0, RSTART + RLENGTH); print }' steps.jsonl >soft.jsonl
marks="--placeholder_token * --reward_tokens + -"
shape="--omp_threads 1 --lr_scheduler constant --warmup_steps 0 --logging_steps 1000 --max_len 200 --packing_samples --pack_len 420 --cell 16 --train_batch_size 8 --learning_rate 5e-3 --num_hidden_layers 1 --hidden_size 32 --num_attention_heads 4"
set -f # a placeholder is a star
begin() { local name=$1; shift; "$B/train_prm" $shape --max_steps 3 --save_path "$name" --ckpt_path "$name.ckpt" --metrics_path "$name.m" "$@" >"$name.log" 2>&1; }
run() { local name=$1; shift; begin "$name" $marks --eval_dataset eval.jsonl "$@"; }
figures() { sed -E 's/, "tokens_per_second.*//' "$1.m"; }
of() { grep -m 1 "\"$2\": " "$1.m" | sed -nE "s/.*\"$2\": ([-0-9.e+]*).*/\1/p"; }
alike() { cmp -s "$1/model.safetensors" "$2/model.safetensors" && [ "$(figures "$1")" = "$(figures "$2")" ]; }
near() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && b != "" && (a - b) ^ 2 < 1e-12) }'; }

n=0
for data in "steps.jsonl --reward_tokens + -" "soft.jsonl --reward_tokens - +" "steps.jsonl --reward_tokens x - y +" "steps.jsonl"; do
    n=$((n + 1)) way="--placeholder_token * --dataset $data"
    begin one$n $way || fail "prm_run $data" "$(tail -n 1 one$n.log)"
    world=0
    for as in "--ring_attn_size 3 --zero_stage 3" "--ring_attn_size 2 --data_parallel_size 2 --schedule llama3 --micro_train_batch_size 2 --pack_len 1003" "--data_parallel_size 3 --micro_train_batch_size 1 --gradient_checkpointing"; do
        world=$((world + 1))
        if begin one$n.$world $way $as && alike one$n.$world one$n; then ok "prm_world $data $as"; else fail "prm_world $data $as" "$(tail -n 1 one$n.$world.log)"; fi
    done
done
check prm_forms "data of other labels teach the same" eval '! alike one1 one2 && ! alike one1 one3 && ! alike one1 one4'

# among two that begin alike the loss is near ln 2, among all words near ln 259; a share of 1 or 0 is the token itself
check prm_begins "losses $(of one1 loss) $(of one3 loss) $(of one4 loss)" awk -v a="$(of one1 loss)" -v b="$(of one3 loss)" -v c="$(of one4 loss)" 'BEGIN { exit !((a - log(2)) ^ 2 < 0.02 && (b - log(4)) ^ 2 < 0.25 && (c - log(259)) ^ 2 < 0.25) }'
begin numbers $marks --dataset numbers.jsonl && alike numbers one1 && ok prm_numbers || fail prm_numbers "$(tail -n 1 numbers.log)"
# the loss is linear in shares, each of which belongs to its own place: three texts with two steps each
share() { printf '{"input": "1*22*", "label": [%s, %s]}\n{"input": "*3*", "label": [%s, %s]}\n{"input": "4444**", "label": [%s, %s]}\n' "$@" >share.jsonl; begin share $marks --dataset share.jsonl --train_batch_size 3 --max_steps 1 --ring_attn_size 2 && of share loss; }
none=$(share 0 0 0 0 0 0) wanted=$none i=0
for s in 0.5 0.25 0.125 0.75 1 0.375; do
    i=$((i + 1)) only=$(share $((i == 1)) $((i == 2)) $((i == 3)) $((i == 4)) $((i == 5)) $((i == 6)))
    wanted=$(awk -v w="$wanted" -v s=$s -v a="$only" -v b="$none" 'BEGIN { printf "%.17g", w + s * (a - b) }')
done
got=$(share 0.5 0.25 0.125 0.75 1 0.375)
check prm_shares "loss $got, by its parts $wanted; without shares $none" near "$got" "$wanted"
# a label that is the next token of its text is SFT's target, to the bit of its weights
awk 'BEGIN { for (i = 0; i < 16; i++) { ids = labels = learnt = ""
    for (k = 0; k < 5 + i % 7; k++) { id[k] = (i * 31 + k * k * 7) % 250; ids = ids (k ? ", " : "") id[k] }
    for (k = 0; k < 5 + i % 7; k++) { last = k == 4 + i % 7; labels = labels (k ? ", " : "") (k % 3 == 1 && !last ? id[k + 1] : -100); learnt = learnt (k ? ", " : "") (k % 3 == 2 ? id[k] : -100) }
    printf "{\"input_ids\": [%s], \"labels\": [%s]}\n", ids, labels >"shifted.jsonl"; printf "{\"input_ids\": [%s], \"labels\": [%s]}\n", ids, learnt >"sft.jsonl" } }'
begin shifted --placeholder_token x --dataset shifted.jsonl && "$B/train_sft" $shape --max_steps 3 --dataset sft.jsonl --save_path sft >sft.log 2>&1
check prm_sft "$(tail -n 1 shifted.log) / $(tail -n 1 sft.log)" cmp -s shifted/model.safetensors sft/model.safetensors

# it learns what is worth what, and says how often it is right, of three in all
awk 'BEGIN { for (i = 0; i < 32; i++) { text = labels = ""
    for (k = 0; k < 1 + i % 5; k++) { good = (i * 7 + k * k * 3 + k) % 5 < 2; text = text substr("xyz", 1 + k % 3, 1) (good ? "a*" : "b*"); labels = labels (k ? ", " : "") (good ? "\"+\"" : "\"-\"") }
    printf "{\"input\": \"%s\", \"label\": [%s]}\n", text, labels } }' >rule.jsonl
begin long --placeholder_token '*' --reward_tokens '?' + - --dataset rule.jsonl --max_steps 40 --max_epochs 40 --learning_rate 1e-2 --eval_dataset rule.jsonl
check prm_learns "$(tail -n 1 long.m)" awk '/eval_loss/ { split($0, a, "\"eval_accuracy\": "); split($0, l, "\"eval_loss\": "); ok = a[2] + 0 == 1 && l[2] + 0 < 0.2 } END { exit !ok }' long.m
run adapters --dataset soft.jsonl --pretrain long --lora_rank 3 && run adapters.2 --dataset soft.jsonl --pretrain long --lora_rank 3 --ring_attn_size 2 --zero_stage 3 && cmp -s adapters/adapter_model.safetensors adapters.2/adapter_model.safetensors && [ "$(of adapters grad_norm)" != 0 ] && ok prm_adapters || fail prm_adapters "$(tail -n 1 adapters.2.log)"
run half --dataset soft.jsonl --pretrain long --param_dtype bf16 && run half.2 --dataset soft.jsonl --pretrain long --param_dtype bf16 --ring_attn_size 2 && alike half half.2 && ok prm_bf16 || fail prm_bf16 "$(tail -n 1 half.2.log)"
# a text that is cut loses its labels there
begin cut $marks --dataset steps.jsonl --max_len 6 && begin cut.2 $marks --dataset steps.jsonl --max_len 6 --ring_attn_size 2 && alike cut cut.2 && grep -q ' [1-9][0-9]* cut, [1-9][0-9]* fully masked' cut.log && ok prm_cut || fail prm_cut "$(grep cut, cut.log)"

# stopped after a step, and gone on elsewhere
run whole --dataset steps.jsonl
run half_way --dataset steps.jsonl --max_steps 1 --save_steps 1 --ring_attn_size 2 && cp -r half_way.ckpt kept && run half_way --dataset steps.jsonl --load_checkpoint --data_parallel_size 2 && cmp -s half_way/model.safetensors whole/model.safetensors && ok prm_resume || fail prm_resume "$(tail -n 1 half_way.log)"
run dry --dataset steps.jsonl --dry_run && [ ! -e dry ] && ok prm_dry_run || fail prm_dry_run "$(tail -n 1 dry.log)"

# ---- token files: a byte is a token of this tokenizer, too ----
tokens() { local name=$1; shift; "$P" "$S/demos/prepare.py" --kind steps --pretrain "$F/words" --output "$name.tokens" --workers 1 "$@" >"$name.log" 2>&1; }
refuse() { # NAME PATTERN COMMAND...
    local name=$1 pattern=$2 code; shift 2
    rm -rf refused refused.tokens
    "$S/ci/limit.sh" 120 "$@" >refused.log 2>&1
    code=$?
    if [ $code -eq 0 ] || [ $code -ge 124 ]; then fail "refuse_$name" "exit code $code"
    elif [ "$(grep -c '^error: ' refused.log)" -ne 1 ] || ! grep -qE "^error: .*($pattern)" refused.log; then fail "refuse_$name" "$(head -c 400 refused.log)"
    elif [ -e refused/model.safetensors ] || [ -e refused.tokens ]; then fail "refuse_$name" "wrote something all the same"
    else ok "refuse_$name"; fi
}
if [ -z "$P" ]; then skip prm_tokens "no python has tokenizers and jinja2"; else
    for how in "steps --reward_tokens + -" "soft --reward_tokens - +" steps; do
        set -- $how
        name=t_$1$#; data=$1; shift
        tokens "$name" --dataset "$data.jsonl" --placeholder_token '*' "$@" || fail "prm_tokens $how" "$(tail -n 1 "$name.log")"
        run_words() { "$B/train_prm" $shape --max_steps 3 --pretrain "$F/words" --save_path "$name" --metrics_path "$name.m" "$@" >"$name.train" 2>&1; }
        run_words --dataset "$name.tokens" && figures "$name" >one && run_words --dataset "$name.tokens" --ring_attn_size 3 --zero_stage 3 && figures "$name" | cmp -s - one && ok "prm_tokens $how" || fail "prm_tokens $how" "$(tail -n 1 "$name.train")"
    done
    # the program makes the file; text as OpenRLHF's command has it, and other ids than bytes
    "$B/seqpar" --cache_dir . deepspeed --module openrlhf.cli.train_prm --pretrain "$F/words" --dataset soft.jsonl --input_key input --label_key label --placeholder_token '*' --reward_tokens - + $R --train_batch_size 8 --save_path page --metrics_path page.m >page.log 2>&1
    "$B/train_prm" --pretrain "$F/words" --dataset t_soft4.tokens $R --save_path direct --metrics_path direct.m >direct.log 2>&1
    check prm_page "$(tail -n 1 page.log)" cmp -s page/model.safetensors direct/model.safetensors
    token_rows() {
        local make=("$P" "$S/demos/prepare.py" --kind steps --pretrain "$F/words" --output refused.tokens)
        line() { printf '%s\n' "$1" >line.jsonl; shift; refuse "$@" --dataset line.jsonl --placeholder_token '*'; }
        printf '%s\n' '{"input": "1*", "label": ["+"]}' >line.jsonl
        refuse tokens_placeholder "--placeholder_token: '\*\*' is 2 tokens, \[9, 9\]; give a text that is one" "${make[@]}" --dataset line.jsonl --placeholder_token '**'
        line '{"input": "1*", "label": ["x"]}' tokens_unknown 'line.jsonl:1: label\[0\] is "x", which is none of --reward_tokens \+ -' "${make[@]}" --reward_tokens + -
        line '{"input": "1*", "label": ["xy"]}' tokens_long "line.jsonl:1: label\[0\]: 'xy' is 2 tokens" "${make[@]}"
        line '{"input": "1*2*", "label": ["+"]}' tokens_count "line.jsonl:1: 1 labels in \"label\" for 2 placeholders '\*'; give one for each" "${make[@]}"
        line '{"input": "12", "label": []}' tokens_none "line.jsonl:1: the text has no placeholder '\*'" "${make[@]}"
        line '{"input": "1*", "label": "+"}' tokens_list 'line.jsonl:1: "label" is "\+", but a list is needed' "${make[@]}"
        line '{"input": "1*", "label": [null]}' tokens_type 'label\[0\] is null, but a token or a number is needed' "${make[@]}"
        line '{"input": "1*", "label": [0.5]}' tokens_marks 'label\[0\] is 0.5, a soft label \(the probability of the first of two tokens\), but --reward_tokens names 3; name two' "${make[@]}" --reward_tokens a b c
        line '{"input": "1*", "label": [1.01]}' tokens_high 'label\[0\] is 1.01, but a soft label must be from 0 to 1' "${make[@]}" --reward_tokens + -
        line '{"input": "1*", "label": [-0.01]}' tokens_low 'label\[0\] is -0.01, but a soft label must be from 0 to 1' "${make[@]}" --reward_tokens + -
        line '{"input": "1*", "label": [NaN]}' tokens_nan 'NaN' "${make[@]}" --reward_tokens + -
        line '{"input": "1*", "label": ["+"]}' tokens_one 'reward_tokens \+ are 1; give 2 to 16' "${make[@]}" --reward_tokens +
        line '{"input": "1*", "label": ["+"]}' tokens_many 'are 17; give 2 to 16' "${make[@]}" --reward_tokens a b c d e f g h i j k l m n o p q
        line '{"input": "1*", "label": ["+"]}' tokens_twice 'reward_tokens \+ - \+ are not all different' "${make[@]}" --reward_tokens + - +
        line '{"input": "1*", "label": ["+"]}' tokens_template '--apply_chat_template shapes prompts and responses' "${make[@]}" --apply_chat_template
        line '{"input": "1*", "label": ["+"]}' tokens_output '--output_key shapes prompts' "${make[@]}" --output_key y
        line '{"input": "1*", "label": ["+"]}' tokens_cut_both '--truncation cut_both needs a prompt and a response' "${make[@]}" --truncation cut_both
        refuse tokens_other_kind '--placeholder_token is for --kind steps, not for sft; leave it out' "${make[@]}" --kind sft --dataset steps.jsonl --placeholder_token '*'
        refuse tokens_no_placeholder 'no placeholder token; give the token after each step' "${make[@]}" --dataset steps.jsonl
        refuse tokens_trainer 't_steps4.tokens: is of kind steps, for train_prm; make one of --kind sft' "$B/train_sft" $shape --pretrain "$F/words" --dataset t_steps4.tokens --save_path refused
        refuse tokens_marks_differ '--reward_tokens is \+ x, but t_steps4.tokens was made with \+ -; make it again' "$B/train_prm" $shape --pretrain "$F/words" --dataset t_steps4.tokens --reward_tokens + x --save_path refused
        refuse tokens_placeholder_differs '--placeholder_token is x, but t_steps4.tokens was made with \*; make it again' "$B/train_prm" $shape --pretrain "$F/words" --dataset t_steps4.tokens --placeholder_token x --save_path refused
        refuse tokens_eval 't_soft4.tokens: was made with other --reward_tokens than t_steps4.tokens; make it again' "$B/train_prm" $shape --pretrain "$F/words" --dataset t_steps4.tokens --eval_dataset t_soft4.tokens --save_path refused
        refuse tokens_text 'is text, which only demos.prepare.py can tokenize .*words; make a token file and give it: python3 demos/prepare.py --kind steps .*--placeholder_token' "$B/train_prm" $shape --pretrain "$F/words" --dataset steps.jsonl $marks --save_path refused
    }
    token_rows
fi

# ---- text without a tokenizer, a byte is a token ----
told() { local name=$1 pattern=$2 text=$3; shift 3; printf '%s\n' "$text" >line.jsonl; refuse "$name" "$pattern" "$B/train_prm" $shape --dataset line.jsonl --save_path refused --placeholder_token '*' "$@"; }
two="--reward_tokens + -"
told count 'line.jsonl:1: 1 labels in "label" for 2 placeholders "\*"; give one for each' '{"input": "1*2*", "label": ["+"]}' $two
told count_high 'line.jsonl:1: 2 labels in "label" for 1 placeholders "\*"; give one for each' '{"input": "1*2", "label": ["+", "+"]}' $two
told none 'line.jsonl:1: the text has no placeholder "\*", so no step has a label' '{"input": "12", "label": []}' $two
told unknown 'line.jsonl:1: label\[1\] is "x", which is none of --reward_tokens' '{"input": "1*2*", "label": ["+", "x"]}' $two
told long 'line.jsonl:1: label\[0\] is "xy", which is 2 tokens, as without a tokenizer each byte is a token; give one ASCII character' '{"input": "1*", "label": ["xy"]}'
told empty 'line.jsonl:1: label\[0\] is "", which is 0 tokens' '{"input": "1*", "label": [""]}'
told number_marks 'label\[0\] is 0.5, a soft label \(the probability of the first of two tokens\), but --reward_tokens names 3; name two' '{"input": "1*", "label": [0.5]}' --reward_tokens + - x
told number_alone 'label\[0\] is 1, a soft label \(the probability of the first of two tokens\), but --reward_tokens names 0; name two' '{"input": "1*", "label": [true]}'
told high 'label\[0\] is 1.01, but a soft label must be from 0 to 1' '{"input": "1*", "label": [1.01]}' $two
told low 'label\[0\] is -0.01, but a soft label must be from 0 to 1' '{"input": "1*", "label": [-0.01]}' $two
told type 'label\[0\] is null, but a token or a number is needed' '{"input": "1*", "label": [null]}' $two
told list 'line.jsonl:1: "label" is text, but a list is needed, a label for each step' '{"input": "1*", "label": "+"}' $two
told no_label 'line.jsonl:1: no key "label"; set --label_key' '{"input": "1*"}' $two
told no_input 'line.jsonl:1: no key "input"; set --input_key' '{"text": "1*", "label": ["+"]}' $two
told placeholder '--placeholder_token: "\*\*" is 2 tokens, as without a tokenizer each byte is a token' '{"input": "1*", "label": ["+"]}' --placeholder_token '**'
told one_mark '--reward_tokens \+ is only one token; give 2 to 16' '{"input": "1*", "label": ["+"]}' --reward_tokens +
told mark_twice '--reward_tokens names "\+" twice' '{"input": "1*", "label": ["+"]}' --reward_tokens + - +
told many_marks '--reward_tokens are more than 16; give 2 to 16' '{"input": "1*", "label": ["+"]}' --reward_tokens a b c d e f g h i j k l m n o p q
told long_mark '--reward_tokens: "ab" is 2 tokens' '{"input": "1*", "label": ["+"]}' --reward_tokens ab -
told ids_labels 'line.jsonl:1: no key "labels"; add it' '{"input_ids": [1, 2]}' $two
told ids_none '"labels" are -100 everywhere; label a step, or remove the line' '{"input_ids": [1, 2], "labels": [-100, -100]}' $two
told ids_mark 'labels\[1\] is 44, which is none of --reward_tokens' '{"input_ids": [1, 2], "labels": [-100, 44]}' $two
told ids_negative 'labels\[1\] is -1; give an id, or -100' '{"input_ids": [1, 2], "labels": [-100, -1]}'
told ids_high 'labels\[1\] is 259, but it must be a whole number from -100 to 258' '{"input_ids": [1, 2], "labels": [-100, 259]}'
told ids_padding 'supervises padding' '{"input_ids": [1, 2], "labels": [43, 43], "attention_mask": [1, 0]}' $two
told short 'no label is left .*; raise --max_len' '{"input": "1234*", "label": ["+"]}' $two --max_len 4
refuse no_placeholder 'no placeholder token; give the token after each step by --placeholder_token' "$B/train_prm" $shape --dataset steps.jsonl --save_path refused
refuse cut_both '--truncation cut_both needs a prompt and a response, but train_prm has a single text; give cut or drop' "$B/train_prm" $shape $marks --dataset steps.jsonl --truncation cut_both --save_path refused
refuse other_marks 'data|reward_tokens' "$B/train_prm" $shape --placeholder_token '*' --reward_tokens - + --dataset steps.jsonl --ckpt_path kept --load_checkpoint --save_path refused
end
