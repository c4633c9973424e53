#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Evaluation without data of its own: --val_size takes the documents that LLaMA-Factory and axolotl take, never trains on them, and
# is the run of two files that hold the same; a reward model's scores are measured on its training data. One rank and four alike.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_evaluation
rm -rf $out; mkdir -p $out
passed=0 failed=0 skipped=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }

# Records of 23, from 0, that datasets 5.2.0 with numpy 2.4.6 puts into the test split:
first=" 10 16 17 18 22 "  # train_test_split(test_size=0.2, seed=42), LLaMA-Factory 0.9.5's call
three=" 4 15 18 "         # train_test_split(test_size=3, seed=7)
last=" 1 4 8 13 20 "      # shuffle(seed=42), then train_test_split(test_size=0.2, shuffle=False), axolotl 0.19.0's calls

build/make_arith $out/bare.jsonl 230 5 >/dev/null
awk '{ sub(/}$/, ""); print $0 ", \"label\": " (NR % 3 ? "true" : "false") ", \"margin\": " NR % 7 / 10 "}" }' $out/bare.jsonl > $out/many.jsonl
head -n 23 $out/many.jsonl > $out/arith.jsonl
# split NAME NUMBERS: those records in NAME.held.jsonl, the others in NAME.rest.jsonl
split() { awk -v held="$2" -v name=$out/$1 '{ print > (name (index(held, " " NR - 1 " ") ? ".held.jsonl" : ".rest.jsonl")) }' $out/arith.jsonl; }
split first "$first"; split three "$three"; split last "$last"

shape="--max_len 200 --pack_len 420 --packing_samples --num_hidden_layers 1 --cell 16 --hidden_size 32 --num_attention_heads 4 --logging_steps 1000 --train_batch_size 4 --max_epochs 2"
build/train_sft --dataset $out/arith.jsonl --input_key question --output_key answer $shape --max_steps 2 --save_path $out/model >$out/model.log 2>&1 || fail evaluation_model "$(tail -n 1 $out/model.log)"
texts="--input_key question --output_key answer"
pairs="--pretrain $out/model --prompt_key question --chosen_key answer --rejected_key wrong"
run() { local name=$1 trainer=$2; shift 2; build/train_$trainer $shape --save_path $out/$name --ckpt_path $out/$name.ckpt --metrics_path $out/$name.m.jsonl "$@" >$out/$name.log 2>&1; }
metrics() { sed -E 's/, "tokens_per_second": .*//' $out/$1.m.jsonl; }
# alike NAME ONE OTHER: weights, config.json and metrics
alike() {
    local file
    for file in model.safetensors config.json; do cmp -s $out/$2/$file $out/$3/$file || { fail "$1" "$file differs"; return; }; done
    if [ "$(metrics $2)" != "$(metrics $3)" ]; then fail "$1" "metrics differ"
    elif [ "$(metrics $2 | grep -c '"eval_loss"')" != "${4:-2}" ]; then fail "$1" "$(metrics $2 | grep -c '"eval_loss"') evaluations"
    else ok "$1"; fi
}
# held NAME SPLIT TRAINER SIZE OPTIONS...: --val_size is the run of two files, also on four ranks
held() {
    local name=$1 split=$2 trainer=$3 size=$4; shift 4
    run $name $trainer --dataset $out/arith.jsonl $size "$@" && run $name.4 $trainer --dataset $out/arith.jsonl $size "$@" --ring_attn_size 4 &&
        run $name.files $trainer --dataset $out/$split.rest.jsonl --eval_dataset $out/$split.held.jsonl "$@" ||
        { fail held_$name "$(tail -qn 1 $out/$name.log $out/$name.4.log $out/$name.files.log)"; return; }
    alike held_${name}_ranks $name $name.4
    alike held_${name}_files $name $name.files
}
held sft first sft '--val_size 0.2' $texts
held sft_axolotl last sft '--val_set_size 0.2' $texts
held sft_from_axolotl last sft '--val_size 5' $texts --from axolotl --lr_scheduler constant --gradient_accumulation_steps 1 --micro_train_batch_size 4
held sft_count three sft '--val_size 3' $texts --seed 7
held dpo first dpo '--val_size 0.2' $pairs
held rm first rm '--val_size 0.2' $pairs --margin_loss
held kto first kto '--val_size 0.2' --pretrain $out/model $texts --label_key label
# what the screen says of an evaluation has the names and numbers of the metrics
shown() {
    local said logged
    said=$(awk '/^step [0-9]+: evaluation loss /{ print "loss", $5 } /^           [a-z_]+ [-0-9.]+$/{ print $1, $2 }' $out/$1.log)
    logged=$(grep '"eval_loss"' $out/$1.m.jsonl | tr -d '{},:"' | awk '{ for (i = 3; i < NF - 1; i += 2) printf "%s %.6f\n", substr($i, 6), $(i + 1) }')
    if [ "$said" = "$logged" ] && [ "$(echo "$said" | wc -l)" = "$2" ]; then ok held_$1_shown; else fail held_$1_shown "$(diff <(echo "$said") <(echo "$logged") | head -n 4 | tr '\n' ' ')"; fi
}
shown dpo 10; shown rm 12; shown kto 10; shown sft 2
# one that is not due any more stays as it is: the last of a shorter run, beside those of step 5, an epoch, and of the end
short="--dataset $out/arith.jsonl $texts --val_size 3 --lr_scheduler constant --save_steps 2"
run short sft $short --max_steps 4 && grep eval_loss $out/short.m.jsonl >$out/short.was && run short sft $short --max_steps 6 --load_checkpoint && [ "$(grep -c eval_loss $out/short.m.jsonl)" = 3 ] && [ "$(grep eval_loss $out/short.m.jsonl | head -n 1)" = "$(cat $out/short.was)" ] && ok again_kept || fail again_kept "$(grep -c eval_loss $out/short.m.jsonl) evaluations: $(tail -n 1 $out/short.log)"
# a run may be killed before or behind an evaluation of what its checkpoint holds: it is made once more, and stands in the logs once
again="--dataset $out/arith.jsonl $texts --val_size 3 --eval_steps 2 --lr_scheduler constant --save_steps 2"
run again sft $again --max_steps 6 || fail again "$(tail -n 1 $out/again.log)"
for dies in before behind; do
    again="$again --wandb_offline $out/again.$dies.wb"
    run again.$dies sft $again --max_steps 4 || fail again_$dies "$(tail -n 1 $out/again.$dies.log)"
    [ $dies = behind ] || sed -i '$d' $out/again.$dies.m.jsonl $out/again.$dies.wb/*/wandb-history.jsonl
    run again.$dies sft $again --max_steps 6 --load_checkpoint && alike again_$dies again again.$dies 3 || fail again_$dies "$(tail -n 1 $out/again.$dies.log)"
    [ "$(cat $out/again.$dies.wb/*/wandb-history.jsonl | grep -c '"eval/loss"')" = 3 ] && ok again_${dies}_history || fail again_${dies}_history "$(cat $out/again.$dies.wb/*/wandb-history.jsonl | grep -c '"eval/loss"') evaluations"
done
says() { if grep -qE -- "$2" $out/$3.log; then ok $1; else fail $1 "$(grep '^evaluation' $out/$3.log)"; fi; }
says held_says '^evaluation: 5 of 23 documents by --seed 42, which are not trained on, every 4 steps \(an epoch\) and at the end$' sft

# a pair that prefers nothing is not evaluated, but trained on in its place
awk -v same=10 '{ if (NR - 1 == same) { a = $0; sub(/.*"answer": /, "", a); sub(/, "wrong".*/, "", a); sub(/"wrong": .*, "label"/, "\"wrong\": " a ", \"label\""); } print }' $out/arith.jsonl > $out/idle.jsonl
awk -v held=" 16 17 18 22 " -v name=$out/idle '{ print > (name (index(held, " " NR - 1 " ") ? ".held.jsonl" : ".rest.jsonl")) }' $out/idle.jsonl
run idle dpo --dataset $out/idle.jsonl --val_size 0.2 $pairs && run idle.files dpo --dataset $out/idle.rest.jsonl --eval_dataset $out/idle.held.jsonl $pairs || fail held_idle_runs "$(tail -qn 1 $out/idle.log $out/idle.files.log)"
alike held_idle idle idle.files
says held_idle_says '^notice: in 1 of the pairs drawn for the evaluation chosen and rejected are the same' idle

# ---- reward models: mean and deviation of the scores, always ----
# scored NAME FILE PART EVALUATIONS OPTIONS...: config.json has what an evaluation on the first PART records measures
scored() {
    local name=$1 file=$2 part=$3 evaluations=$4; shift 4
    head -n $part $out/$file.jsonl > $out/$name.part.jsonl
    run $name rm --dataset $out/$file.jsonl $pairs "$@" && run $name.4 rm --dataset $out/$file.jsonl $pairs "$@" --ring_attn_size 4 &&
        run $name.files rm --dataset $out/$file.jsonl --eval_dataset $out/$name.part.jsonl $pairs "$@" ||
        { fail scored_$name "$(tail -qn 1 $out/$name.log $out/$name.4.log $out/$name.files.log)"; return; }
    alike scored_${name}_ranks $name $name.4 $evaluations
    if ! cmp -s $out/$name/config.json $out/$name.files/config.json; then fail scored_$name "config.json differs"
    elif ! grep -q '"mean":.*[0-9]' $out/$name/config.json || ! grep -q '"std":.*[1-9]' $out/$name/config.json; then fail scored_$name "no mean or std"
    elif ! cmp -s $out/$name/model.safetensors $out/$name.files/model.safetensors; then fail scored_$name "weights differ"
    else ok scored_$name; fi
}
other="--from llamafactory --learning_rate 1e-3 --micro_train_batch_size 4 --gradient_accumulation_steps 1"
scored few arith 23 0 $other --train_batch_size 4
scored hundred many 100 0 $other --max_steps 2
scored openrlhf many 2 1 --from openrlhf --max_steps 2 --margin_loss
scored spelled many 2 1 --max_steps 2
says scored_says '^evaluation: none, as there is no --eval_dataset; mean and deviation of the scores, for config.json, are measured after training on the first 100 of 230 pairs$' hundred
says scored_openrlhf_says '^evaluation: the first 2 of 230 pairs, which are trained on, too, as OpenRLHF does, every 57 steps \(an epoch\) and at the end$' openrlhf
# a pair that prefers nothing is none of the hundred: the one behind them takes its place
awk -v same=7 '{ if (NR - 1 == same) { a = $0; sub(/.*"answer": /, "", a); sub(/, "wrong".*/, "", a); sub(/"wrong": .*, "label"/, "\"wrong\": " a ", \"label\""); } print }' $out/many.jsonl > $out/gap.jsonl
sed 8d $out/gap.jsonl | head -n 100 > $out/gap.part.jsonl
run gap rm --dataset $out/gap.jsonl $pairs $other --max_steps 2 && run gap.files rm --dataset $out/gap.jsonl --eval_dataset $out/gap.part.jsonl $pairs $other --max_steps 2 || fail scored_gap_runs "$(tail -qn 1 $out/gap.log $out/gap.files.log)"
if cmp -s $out/gap/config.json $out/gap.files/config.json && ! cmp -s $out/gap/config.json $out/hundred/config.json; then ok scored_gap; else fail scored_gap "config.json is not that of the 100 pairs"; fi
says scored_gap_says 'are measured after training on the first 100 of 230 pairs$' gap
run silent rm --dataset $out/many.jsonl $pairs --from openrlhf --max_steps 2 --eval_strategy no
if [ "$(metrics silent | grep -c '"eval_loss"')" = 0 ] && grep -q '"std":' $out/silent/config.json; then ok scored_silent; else fail scored_silent "$(tail -n 1 $out/silent.log)"; fi
if run ppo ppo --pretrain $out/model --reward_pretrain $out/few --normalize_reward --prompt_data $out/arith.jsonl --input_key question --prompt_max_len 160 --generate_max_len 4 --rollout_batch_size 4 --max_epochs 1 --max_steps 1; then ok scored_ppo; else fail scored_ppo "$(tail -n 1 $out/ppo.log)"; fi

# ---- plain text of two files, as LLaMA-Factory's stage pt: texts end in EOS and follow each other ----
plain="--dataset $out/first.rest.jsonl,$out/first.held.jsonl --input_key question --pretrain_mode --val_size 0.2 --max_len 97"
run plain sft $plain $other && run plain.4 sft $plain $other --ring_attn_size 4 && run plain.said sft $plain $other --pretrain_eos --pretrain_blocks true && shape="${shape/--packing_samples/--packing false}" run plain.apart sft $plain $other && run plain.openrlhf sft $plain --from openrlhf || fail plain_runs "$(tail -qn 1 $out/plain.*log)"
alike plain_ranks plain plain.4
alike plain_options plain plain.said
# of 23 texts; EOS is a token of each, BOS too where they stand apart
tokens() { sed -nE 's/^data: ([0-9]+) read, ([0-9]+) kept with ([0-9]+) tokens.*/\1 \2 \3/p' $out/$1.log; }
letters=$(sed -E 's/^\{"question": "([^"]*)".*/\1/' $out/arith.jsonl | tr -d '\n' | wc -c)
whole=$(((letters + 23) / 97))
got="$(tokens plain), $(tokens plain.openrlhf | cut -d' ' -f1,2), $(tokens plain.apart | cut -d' ' -f1,2)"
[ "$got" = "23 $whole $((whole * 97)), 23 23, 23 23" ] && ok plain_tokens || fail plain_tokens "$got, for $letters letters"

# ---- a token file: its documents stay where they are ----
P=$(ci/python_with.sh tokenizers jinja2) || P=
if [ -z "$P" ]; then skip held_tokens "no python has tokenizers and jinja2"; else
    mkdir -p $out/words; cp $out/model/* $out/words; sed -i 's/"eos_token_id": *[0-9]*/"eos_token_id": 0/' $out/words/config.json
    $P - $out/words <<'WORDS'
import json, sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
names = ["<|end|>"] + sorted(pre_tokenizers.ByteLevel.alphabet())
t = Tokenizer(models.BPE({c: i for i, c in enumerate(names)}, []))
t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
t.add_special_tokens(["<|end|>"])
t.save(sys.argv[1] + "/tokenizer.json")
json.dump({"eos_token": "<|end|>"}, open(sys.argv[1] + "/tokenizer_config.json", "w"))
WORDS
    for file in arith first.rest first.held; do $P demos/prepare.py --pretrain $out/words --dataset $out/$file.jsonl $texts --max_len 200 --output $out/$file.tokens >$out/prepare.log 2>&1 || fail held_prepare "$(tail -n 1 $out/prepare.log)"; done
    run tokens sft --pretrain $out/words --dataset $out/arith.tokens --val_size 0.2 && run tokens.files sft --pretrain $out/words --dataset $out/first.rest.tokens --eval_dataset $out/first.held.tokens || fail held_tokens_runs "$(tail -qn 1 $out/tokens.log $out/tokens.files.log)"
    alike held_tokens tokens tokens.files
fi

# ---- sizes that are none ----
head -n 1 $out/arith.jsonl > $out/alone.jsonl
sed 's/^/{"input_ids": [65, 66, 67], "labels": [-100, -100, -100]}\n/;s/\n.*//' $out/arith.jsonl | head -n 22 > $out/masked.jsonl; echo '{"input_ids": [65, 66, 67], "labels": [-100, 66, 67]}' >> $out/masked.jsonl
# refuse NAME WANT TRAINER OPTIONS...
refuse() {
    local name=$1 want=$2 trainer=$3 code; shift 3; rm -rf $out/refused
    timeout 60 build/train_$trainer $shape --save_path $out/refused "$@" >$out/refused.log 2>&1; code=$?
    if [ $code -eq 0 ] || [ $code -ge 124 ] || [ "$(grep -c . $out/refused.log)" != 1 ] || ! grep -qF -- "$want" $out/refused.log || [ -e $out/refused/config.json ]; then fail refuse_$name "$code: $(head -n 2 $out/refused.log)"; else ok refuse_$name; fi
}
refuse all '--val_size 23 asks for 23 of 23 documents, which leaves none to train on; give a smaller one, or --eval_dataset' sft --dataset $out/arith.jsonl $texts --val_size 23
refuse more '--val_set_size 24 asks for 24 of 23 documents' sft --dataset $out/arith.jsonl $texts --val_set_size 24
refuse nearly '--val_size 0.99 asks for 23 of 23 pairs' dpo --dataset $out/arith.jsonl $pairs --val_size 0.99
refuse alone '--val_size 0.1 asks for 1 of 1 documents' sft --dataset $out/alone.jsonl $texts --val_size 0.1
refuse one_response "--val_size 0.02: KTO's KL term pairs each prompt with another document's response, but the evaluation has 1 document; give 2 or more" kto --pretrain $out/model --dataset $out/arith.jsonl $texts --label_key label --val_size 0.02
refuse no_target '--val_size 0.2: none of the 18 documents that are left to train on has a target' sft --dataset $out/masked.jsonl --val_size 0.2
refuse no_target_held '--val_size 0.1: none of the 3 documents to evaluate on has a target' sft --dataset $out/masked.jsonl --val_size 0.1
if [ $skipped -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"; else echo "$passed passed, $failed failed"; fi
[ $failed -eq 0 ]
