#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# What trainers leave for those who watch them: event files for TensorBoard (read by verify/support/read_events.c, and by TensorBoard where
# it is), the files of a run of Weights & Biases, texts of rollouts; and --dry_run, which leaves nothing. All logs have the figures
# of --metrics_path, and a run that goes on shows no step twice.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_logs build=${BUILD:-build}
rm -rf $out; mkdir -p $out
passed=0 failed=0 skipped=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }
export OMP_WAIT_POLICY=passive

${CC:-cc} -std=c11 -O1 -Wall -Wextra verify/support/read_events.c -o $out/read_events || { echo "FAIL logs_build: read_events.c"; echo "0 passed, 1 failed"; exit 1; }
$build/make_arith $out/arith.jsonl 120 5 >/dev/null
$build/make_arith $out/eval.jsonl 12 6 >/dev/null
awk '{ sub(/"wrong": .*/, ""); label = NR % 3 ? "true" : "false"; print $0 "\"label\": " label "}" }' $out/arith.jsonl > $out/labelled.jsonl
shape="--packing_samples --max_len 200 --pack_len 420 --num_hidden_layers 1 --cell 16 --hidden_size 32 --num_attention_heads 4 --omp_threads 1 --logging_steps 1000 --lr_scheduler constant --warmup_steps 0"
declare -A data=(
    [sft]="--dataset $out/arith.jsonl --eval_dataset $out/eval.jsonl --input_key question --output_key answer --train_batch_size 8"
    [dpo]="--dataset $out/arith.jsonl --eval_dataset $out/eval.jsonl --prompt_key question --chosen_key answer --rejected_key wrong --train_batch_size 6"
    [rm]="--dataset $out/arith.jsonl --eval_dataset $out/eval.jsonl --prompt_key question --chosen_key answer --rejected_key wrong --train_batch_size 6"
    [kto]="--dataset $out/labelled.jsonl --input_key question --output_key answer --train_batch_size 8"
    [ppo]="--prompt_data $out/arith.jsonl --input_key question --label_key answer --prompt_max_len 160 --generate_max_len 12 --rollout_batch_size 4 --train_batch_size 4 --reward_rule last_number")
# run NAME TRAINER OPTIONS...: all three logs, each in $out/NAME.*
run() {
    local name=$1 trainer=$2; shift 2
    ci/limit.sh 240 $build/train_$trainer $shape ${data[$trainer]} --save_path $out/$name --ckpt_path $out/$name/ckpt --metrics_path $out/$name.jsonl --use_tensorboard $out/$name.tb --wandb_offline $out/$name.wb "$@" >$out/$name.log 2>&1
}
why() { tail -n 1 $out/$1.log | cut -c1-300; }
# "STEP TAG VALUE" of each log, sorted. A reader forgets what an earlier file said of later steps; an evaluation of the checkpoint's
# own step is made once more by a run that goes on, and stands there twice at one point.
events() {
    $out/read_events $(ls $out/$1.tb/*/events.out.tfevents.* | LC_ALL=C sort) >$out/$1.events 2>$out/$1.events.why || { echo "the reader says: $(cat $out/$1.events.why)"; return; }
    awk '$1 == "start" { for (i = 0; i < n; i++) if (step[i] + 0 >= $2) line[i] = ""; next }
         $1 + 0 == $1 && NF == 3 { step[n] = $1; line[n++] = $0 }
         END { for (i = 0; i < n; i++) if (line[i] != "") print line[i] }' $out/$1.events | LC_ALL=C sort -u
}
history() { sed 's/[{}"]//g' $out/$1.wb/*/wandb-history.jsonl | awk -F, '{ split($1, s, ":"); for (i = 4; i <= NF; i++) { split($i, f, ":"); if (f[1] !~ /global_step|rollout/) print s[2], f[1], f[2] } }' | LC_ALL=C sort; }
# the metrics under the names of the others; a line of PPO's evaluation has no step, but follows one
metrics() {
    sed 's/, "samples": .*/}/; s/[{}" ]//g' $out/$1.jsonl | awk -F, '{ for (i = 1; i <= NF; i++) { split($i, f, ":"); if (f[1] == "step") step = f[2] }
        for (i = 1; i <= NF; i++) { split($i, f, ":"); name = f[1]; if (name ~ /^(step|rollout)$/) continue
            phase = sub(/^eval_/, "", name) ? "eval" : "train"
            sub(/^learning_rate$/, "lr", name); sub(/^accuracy$/, "acc", name); sub(/^rejected_reward$/, "reject_reward", name); sub(/^clipfrac$/, "ppo_clip_ratio", name)
            print step + 0, phase "/" name, f[2] } }' | LC_ALL=C sort
}
# close A B TOLERANCE: the same steps and tags, values this near; rounded for print are times and rates
close() {
    [ -s $1 ] && paste -d ' ' $1 $2 | awk -v most=$3 '{ d = $3 - $6; if (d < 0) d = -d; size = $6 < 0 ? -$6 : $6; near = $2 ~ /seconds|per_second/ ? 2e-3 + 1e-3 * size : most * size + 1e-30
        if (NF != 6 || $1 != $4 || $2 != $5 || !(d <= near) && $3 != $6) { print; exit 1 } }'
}
told() { for log in metrics events history; do $log $1 >$out/$1.$log.list; done; }

# ---- every trainer: three logs, one set of figures ----
for trainer in sft dpo kto rm ppo; do
    more=--eval_steps=2; [ $trainer = sft ] || more="$more --pretrain $out/sft"; [ $trainer = kto ] && more="--pretrain $out/sft"
    [ $trainer = ppo ] && more="$more --eval_dataset $out/eval.jsonl"
    run $trainer $trainer --max_steps 4 $more || fail logs_$trainer "$(why $trainer)"
    told $trainer
    lines=$(wc -l <$out/$trainer.metrics.list)
    if [ "$lines" -lt 28 ]; then fail logs_$trainer "only $lines figures in the metrics"
    elif ! wrong=$(close $out/$trainer.events.list $out/$trainer.metrics.list 1e-7); then fail logs_${trainer}_events "$wrong $(head -n 1 $out/$trainer.events.list)"
    elif ! wrong=$(close $out/$trainer.history.list $out/$trainer.metrics.list 1e-15); then fail logs_${trainer}_history "$wrong"
    else ok "logs_$trainer, $lines figures"; fi
done
for tag in train/loss train/lr train/grad_norm train/tokens_per_second eval/loss; do grep -q " $tag " $out/sft.events.list || fail logs_tags "sft has no $tag"; done
for tag in train/reward train/kl train/policy_loss train/response_length eval/exact; do grep -q " $tag " $out/ppo.events.list || fail logs_tags "ppo has no $tag"; done
grep -q ' train/acc ' $out/dpo.events.list && grep -q ' train/reject_reward ' $out/dpo.events.list && ok logs_tags || fail logs_tags "dpo's are $(cut -d ' ' -f 2 $out/dpo.events.list | sort -u | tr '\n' ' ')"
[ "$(head -n 1 $out/sft.events)" = 'version brain.Event:2' ] && ls $out/sft.tb/*/* | grep -qE "^$out/sft.tb/sft_[0-9a-f]{16}/events.out.tfevents.[0-9]{10}\.$(hostname)\.[0-9]+\.0$" && [ "$(find $out/sft.tb -type f | wc -l)" = 1 ] && ok logs_one_file || fail logs_one_file "$(find $out/sft.tb -type f | tr '\n' ' ')"
# the last of everything, and the options, as wandb has them
tail -n 1 $out/sft.wb/*/wandb-history.jsonl | tr -d '{}' | tr , '\n' >$out/last
tr -d '{}' <$(echo $out/sft.wb/*/wandb-summary.json) | tr , '\n' | LC_ALL=C sort >$out/summary
[ "$(LC_ALL=C sort $out/last | LC_ALL=C comm -23 - $out/summary | wc -l)" = 0 ] && grep -q '^"train/loss":' $out/summary && grep -q '^"_step":4$' $out/summary && ok logs_summary || fail logs_summary "$(tr '\n' ' ' <$out/summary)"
config=$(echo $out/sft.wb/*/config.yaml)
grep -A 2 '^adam_betas:' $config | grep -q 'value: \[0.9, 0.95\]' && grep -A 2 '^adam_eps:' $config | grep -q 'value: 1.0e-08$' && grep -A 2 '^packing_samples:' $config | grep -q 'value: true' && grep -A 2 '^input_template:' $config | grep -qF 'value: "User: {}\nAssistant: "' && grep -A 2 '^pretrain:' $config | grep -q 'value: null' && ok logs_config || fail logs_config "$(head -n 8 $config | tr '\n' ' ')"

# ---- ranks: rank 0 writes, and no world changes a figure ----
some() { grep -vE 'per_second|seconds|peak_bytes|rows' $1; }
run world sft --max_steps 4 --eval_steps 2 --ring_attn_size 3 --data_parallel_size 2 && told world && [ "$(some $out/world.events.list)" = "$(some $out/sft.events.list)" ] && [ "$(some $out/world.history.list)" = "$(some $out/sft.history.list)" ] && [ "$(find $out/world.tb -type f | wc -l)" = 1 ] && ok logs_world || fail logs_world "$(why world)"

# ---- going on: from a checkpoint before the last step, after SIGKILL, and with a record that is not whole ----
run whole sft --max_steps 7 --eval_steps 2 --save_steps 2; told whole
part() { mkdir -p $out/$1; cp -r $out/whole/ckpt $out/$1/; rm -r $out/$1/ckpt/global_step6; printf global_step4 >$out/$1/ckpt/latest; for log in jsonl tb wb; do cp -r $out/whole.$log $out/$1.$log; done; }
same_figures() { for log in metrics events history; do [ "$(some $out/$1.$log.list)" = "$(some $out/whole.$log.list)" ] || { echo "$log: $(diff <(some $out/$1.$log.list) <(some $out/whole.$log.list) | head -n 3 | tr '\n' ' ')"; return 1; }; done; }
part on; run on sft --max_steps 7 --eval_steps 2 --save_steps 2 --load_checkpoint; told on
if wrong=$(same_figures on) && [ "$(grep -c ' train/loss ' $out/on.events.list)" = 7 ] && grep -q '^start 5$' $out/on.events && [ "$(find $out/on.tb -name 'events*' | wc -l)" = 2 ] && [ "$(find $out/on.wb -name wandb-history.jsonl | wc -l)" = 1 ]; then ok logs_goes_on; else fail logs_goes_on "$wrong $(why on) $(grep -c ' train/loss ' $out/on.events.list) losses"; fi
part torn; for file in $out/torn.tb/*/events*; do truncate -s -9 $file; done; truncate -s -9 $out/torn.wb/*/wandb-history.jsonl; touch $(echo $out/torn.wb/sft_*)/wandb-summary.json.77.tmp
run torn sft --max_steps 7 --eval_steps 2 --save_steps 2 --load_checkpoint; told torn
if wrong=$(same_figures torn) && grep -q '^part ' $out/torn.events && [ -z "$(find $out/torn.wb -name '*.tmp')" ]; then ok logs_torn; else fail logs_torn "$wrong $(why torn)"; fi
monotone() { sed -E 's/.*"_runtime":([0-9.e+-]*),.*/\1/' $out/$1.wb/*/wandb-history.jsonl | awk '$1 < last { exit 1 } { last = $1 }'; }
monotone on && ok logs_runtime_goes_on || fail logs_runtime_goes_on "$(cut -c1-90 $out/on.wb/*/wandb-history.jsonl | tr '\n' ' ')"
$build/train_sft $shape ${data[sft]} --save_path $out/killed --ckpt_path $out/killed/ckpt --metrics_path $out/killed.jsonl --use_tensorboard $out/killed.tb --wandb_offline $out/killed.wb --max_steps 2000000 --save_steps 5 >$out/killed.log 2>&1 & running=$!
for _ in $(seq 1 400); do [ "$(wc -l 2>/dev/null <$out/killed.jsonl || echo 0)" -gt 12 ] && break; sleep 0.02; done
kill -KILL $running; wait $running 2>/dev/null
told killed; [ "$(grep -c ' train/loss ' $out/killed.events.list)" -ge 12 ] && ok logs_killed_is_readable || fail logs_killed_is_readable "$(cat $out/killed.events.why) $(why killed)"
at=$(($(sed 's/global_step//' $out/killed/ckpt/latest) + 2))
run killed sft --max_steps $at --load_checkpoint; told killed
for log in metrics events history; do [ "$(awk '$2 == "train/loss" { print $1 }' $out/killed.$log.list | sort -n | tr '\n' ' ')" = "$(seq 1 $at | tr '\n' ' ')" ] && ok "logs_killed_goes_on $log" || fail logs_killed_goes_on "$log has steps $(awk '$2 == "train/loss" { print $1 }' $out/killed.$log.list | sort -n | tr '\n' ' ') of 1 to $at"; done
# a run that begins anew is another run
run sft sft --max_steps 2 --save_path $out/anew --ckpt_path $out/anew/ckpt && [ "$(ls $out/sft.tb | wc -l)" = 2 ] && [ "$(ls $out/sft.wb | wc -l)" = 2 ] && ok logs_runs_beside || fail logs_runs_beside "$(ls $out/sft.tb $out/sft.wb | tr '\n' ' ')"

# ---- texts of rollouts ----
run texts ppo --max_steps 2 --pretrain $out/sft --advantage_estimator group_norm --n_samples_per_prompt 2 --log_samples 3 || fail logs_texts "$(why texts)"
told texts
shown=$(grep -c '^rollout 1, prompt [123]: User: ' $out/texts.log) rewards=$(grep -cE '^    -?[0-9]+\.[0-9]{4}: ' $out/texts.log)
asked=$(grep -m 1 '^rollout 1, prompt 1: ' $out/texts.log | sed 's/^rollout 1, prompt 1: User: //; s/\\n.*//')
rollouts=$(wc -l <$out/texts.jsonl)
[ $shown = 3 ] && [ $rewards = $((6 * rollouts)) ] && [ -n "$asked" ] && ok logs_texts_printed || fail logs_texts_printed "$shown prompts, $rewards texts of $rollouts rollouts"
grep -qF "train/samples prompt|text|reward|User: $asked" $out/texts.events && ok logs_texts_events || fail logs_texts_events "$(grep -a samples $out/texts.events | head -n 1 | cut -c1-200)"
[ "$(grep -o '"prompt": "User: ' $out/texts.jsonl | wc -l)" = $((6 * rollouts)) ] && grep -qF "\"samples\": [{\"prompt\": \"User: $asked" $out/texts.jsonl && grep -qF "\"train/samples\":[[\"User: $asked" $out/texts.wb/*/wandb-history.jsonl && ok logs_texts_lines || fail logs_texts_lines "$(head -n 1 $out/texts.jsonl | cut -c1-200)"

# ---- what cannot be written ----
refused() { # NAME PATTERN OPTIONS...
    local name=$1 pattern=$2 code; shift 2
    run refused sft --max_steps 2000000 "$@"; code=$?
    if [ $code -eq 0 ] || [ $code -ge 124 ]; then fail "$name" "exit code $code: $(why refused)"
    elif [ "$(grep -c '^error: ' $out/refused.log)" -ne 1 ] || ! grep -qE "^error: .*$pattern" $out/refused.log; then fail "$name" "$(grep '^error' $out/refused.log)"
    else ok "$name"; fi
    rm -rf $out/refused $out/refused.*
}
: >$out/file
refused logs_events_in_a_file 'use_tensorboard would write .*, but a part of this path is a file; move it away or give another --use_tensorboard' --use_tensorboard $out/file
refused logs_history_in_a_file 'wandb_offline would write .*, but a part of this path is a file; move it away or give another --wandb_offline' --wandb_offline $out/file
refused logs_long_path 'use_tensorboard: .* has 1[0-9]{3} characters, at most 1000 are possible' --use_tensorboard $out/$(printf 'xxxxxxxxx/%.0s' {1..130})
# the longest path that is possible: every file of each log is there
long=$out/far; while [ ${#long} -lt 987 ]; do long+=/xxxxxxxxx; done; while [ ${#long} -lt 997 ]; do long+=x; done
run long sft --max_steps 1 --use_tensorboard $long.tb --wandb_offline $long.wb
found=$(find $out/far -type f | sed -E 's,.*/,,; s/tfevents.*/tfevents/' | LC_ALL=C sort | tr '\n' ' ')
[ "$found" = "config.yaml events.out.tfevents wandb-history.jsonl wandb-summary.json " ] && ok logs_longest_path || fail logs_longest_path "$found $(why long)"
rm -rf $out/far
# a limit of 8 KiB, which the event file meets before the others
(ulimit -f 8; run limit sft --max_steps 2000000 --metrics_path /dev/null); code=$?
[ $code -eq 1 ] && grep -qE '^error: cannot write .*(events.out.tfevents.*; make room or give another --use_tensorboard|wandb-history.jsonl: .*; make room or give another --wandb_offline)' $out/limit.log && ok logs_limit || fail logs_limit "exit code $code: $(why limit)"
$out/read_events $out/limit.tb/*/* >/dev/null && ok logs_limit_readable || fail logs_limit_readable "$($out/read_events $out/limit.tb/*/* 2>&1 | tail -n 1)"
run named sft --max_steps 1 --report_to tensorboard --use_wandb key --logging_dir $out/named.tb && [ -d $out/named.tb ] && grep -q 'use_wandb (nothing is uploaded; --wandb_offline DIR writes' $out/named.log && ok logs_other_names || fail logs_other_names "$(why named)"

# ---- --dry_run: says what would happen, writes nothing ----
traces() { (cd $out && find . -path './dry*' -prune -o ! -name . -printf '%p %s %T@ %C@\n' | LC_ALL=C sort | cksum); }
mkdir $out/dry
dry() { local name=$1 trainer=$2; shift 2; ci/limit.sh 120 $build/train_$trainer $shape ${data[$trainer]} --save_path $out/never --metrics_path $out/never.jsonl --use_tensorboard $out/never.tb --wandb_offline $out/never.wb --dry_run "$@" >$out/dry/$name 2>$out/dry/$name.err; }
dry sft sft --max_steps 6 --save_steps 2 --lr_scheduler cosine_with_min_lr --warmup_steps 3 --ring_attn_size 3 || fail logs_dry_run "$(tail -n 1 $out/dry/sft.err)"
while IFS='|' read -r name line; do grep -qE "$line" $out/dry/sft && ok "logs_dry_run $name" || fail "logs_dry_run $name" "$(cat $out/dry/sft | tr '\n' '/' | cut -c1-600)"; done <<LIST
steps|^steps: 6 of 8 documents each; 120 documents to train on, 15 steps an epoch, 0.4 epochs in all$
step|^next step: $(sed -n 's/.*"tokens": \([0-9]*\), "supervised_tokens": \([0-9]*\),.* "rows": \([0-9]*\).*/\1 tokens \\(\2 supervised\\) in \3 rows of at most 420, 1 micro-batches/p' $out/whole.jsonl | head -n 1)$
ranks|^ranks: 1 data-parallel x 3 sequence-parallel, 1 threads each$
rate|^learning rate: cosine_with_min_lr, 3 warm-up steps, peak 0.002, 0.000[0-9]* in the last step, floor 0.0002$
checkpoints|^checkpoints: $out/never/checkpoints_sft, every 2 steps, the last 3 are kept, [0-9.]+ KiB each$
LIST
[ "$(awk '/^memory in MiB/ { on = 1; next } on && /^(weights|optimizer|saved|scratch|exchange|gradients|at one)/ { n++; print length($0) }' $out/dry/sft | sort -u | wc -l)" = 1 ] && [ "$(grep -cE '^(weights|optimizer state|saved activations|scratch|exchange|gradients|at one time)( +[0-9]+\.[0-9]{2}){4}$' $out/dry/sft)" = 7 ] && ok logs_dry_run_table || fail logs_dry_run_table "$(tail -n 10 $out/dry/sft)"
saved() { awk -v field=$1 '/^saved activations/ { print $field }' $out/dry/sft; }
awk -v all=$(saved 3) -v few=$(saved 5) 'BEGIN { exit !(few > 0 && few < all) }' && ok logs_dry_run_recompute || fail logs_dry_run_recompute "$(grep saved $out/dry/sft)"
for trainer in dpo kto rm ppo; do dry $trainer $trainer --max_steps 4 --pretrain $out/sft --json && [ "$(wc -l <$out/dry/$trainer)" = 1 ] && grep -q "^{\"trainer\":\"$trainer\".*\"memory\":{\"weights\":{\"rank\":[1-9]" $out/dry/$trainer && ok logs_dry_run_$trainer || fail logs_dry_run_$trainer "$(tail -n 1 $out/dry/$trainer.err)"; done
dry precomputed dpo --max_steps 4 --pretrain $out/sft --precompute_ref --enable_ema && grep -q '^moving average ' $out/dry/precomputed && ok logs_dry_run_precomputed || fail logs_dry_run_precomputed "$(tail -n 1 $out/dry/precomputed.err)"
# PPO counts its memory itself; texts may have ended before they were as long as they may be, and fill rows better than the longest
for world in "--ring_attn_size 1" "--ring_attn_size 2" "--ring_attn_size 3 --advantage_estimator group_norm --n_samples_per_prompt 2"; do
    dry peak ppo --max_steps 4 --pretrain $out/sft $world --json; run peak ppo --max_steps 4 --pretrain $out/sft $world
    said=$(sed 's/.*"memory":{.*"at_one_time":{"rank":\([0-9]*\),.*"memory_with.*/\1/' $out/dry/peak) counted=$(sed -n 's/.*"peak_bytes": \([0-9]*\).*/\1/p' $out/peak.jsonl | tail -n 1)
    awk -v said=$said -v counted=$counted 'BEGIN { exit !(counted > 0 && said >= 0.97 * counted && said <= 1.35 * counted) }' && ok "logs_dry_run_ppo_peak $world: $said for $counted" || fail "logs_dry_run_ppo_peak $world" "$said is forecast, $counted was counted"
    rm -rf $out/peak $out/peak.*
done
going() { ci/limit.sh 120 $build/train_sft $shape ${data[sft]} --save_path $out/whole --ckpt_path $out/whole/ckpt --dry_run --load_checkpoint "$@" >$out/dry/going 2>$out/dry/going.err; }
before=$(traces)
going --max_steps 9 && grep -q '^steps: 3 of 8 documents each, from step 7 of 9 on;' $out/dry/going && ok logs_dry_run_goes_on || fail logs_dry_run_goes_on "$(head -n 1 $out/dry/going) $(tail -n 1 $out/dry/going.err)"
no() { local name=$1 pattern=$2; shift 2; "$@"; local code=$?; if [ $code -ne 0 ] && [ $code -lt 124 ] && grep -qE "^error: .*$pattern" $out/dry/$file.err; then ok "$name"; else fail "$name" "exit code $code: $(tail -n 1 $out/dry/$file.err)"; fi; }
file=going no logs_dry_run_other_model 'has hidden_size 32, but this run.s model has 64' going --max_steps 9 --hidden_size 64
file=going no logs_dry_run_past_end 'is of step 6, this run ends after step 4' going --max_steps 4
file=fresh no logs_dry_run_earlier_run 'holds checkpoints of an earlier run' dry fresh sft --max_steps 4 --ckpt_path $out/whole/ckpt
file=overwrites no logs_dry_run_overwrites 'would overwrite .*, which --dataset reads' dry overwrites sft --max_steps 4 --metrics_path $out/arith.jsonl
[ "$before" = "$(traces)" ] && [ ! -e $out/never ] && [ -z "$(ls -d $out/never* 2>/dev/null)" ] && ok logs_dry_run_no_trace || fail logs_dry_run_no_trace "something was written: $(find $out -newer $out/dry/sft ! -path '*/dry*' | head -n 3 | tr '\n' ' ')"
mkdir $out/torn_model; cp $out/sft/config.json $out/torn_model/; head -c 3000 $out/sft/model.safetensors >$out/torn_model/model.safetensors
file=torn no logs_dry_run_torn_model 'torn_model/model.safetensors' dry torn sft --max_steps 4 --pretrain $out/torn_model
dry huge sft --max_steps 1 --hidden_size 16384 --num_hidden_layers 16 --num_attention_heads 128 --num_key_value_heads 8 && grep -q 'which is too little$' $out/dry/huge && ok logs_dry_run_huge || fail logs_dry_run_huge "$(tail -n 1 $out/dry/huge) $(tail -n 1 $out/dry/huge.err)"

# the example of the manual; only the last line is of a machine
shown() { awk -v mark="<!-- $1 -->" '$0 == mark { on = 1; next } on && /^```/ { if (++fences == 2) exit; next } on' demos/README.md; }
mkdir $out/dry/manual; shown 'dry run' >$out/dry/manual/command; shown 'dry run says' >$out/dry/manual/wanted
(cd $out/dry/manual && ln -s ../../../../$build build && bash command >said 2>why)
diff <(grep -v '^data and the' $out/dry/manual/wanted) <(grep -v '^data and the' $out/dry/manual/said) >$out/dry/manual/differs && [ "$(wc -l <$out/dry/manual/said)" -gt 10 ] && ok logs_dry_run_manual || fail logs_dry_run_manual "$(head -n 4 $out/dry/manual/differs | tr '\n' ' ') $(tail -n 1 $out/dry/manual/why)"

# ---- the real reader, and the real wandb, offline ----
if ! python=$(ci/python_with.sh tensorboard); then
    skip logs_tensorboard "no python3 here has tensorboard"
else
    PYTHONDONTWRITEBYTECODE=1 $python verify/python/test_logs.py $out >$out/tensorboard.log 2>$out/tensorboard.err; code=$?
    while read -r word line; do case $word in ok) ok "$line" ;; FAIL) fail "${line%%:*}" "${line#*: }" ;; esac; done <$out/tensorboard.log
    [ $code -eq 0 ] || grep -q '^FAIL' $out/tensorboard.log || fail logs_tensorboard "exit code $code: $(tail -n 1 $out/tensorboard.err)"
fi
shown 'wandb' >$out/send.py
if ! python=$(ci/python_with.sh wandb yaml); then
    skip logs_wandb "no python3 here has wandb and yaml"
else
    (cd $out && for run in on texts; do WANDB_MODE=offline WANDB_SILENT=true $OLDPWD/ci/limit.sh 240 $python send.py $run.wb/* seqpar || exit 1; done) >$out/send.log 2>&1 && [ "$(ls -d $out/wandb/offline-run-* | wc -l)" = 2 ] && ok logs_wandb || fail logs_wandb "$(tail -n 1 $out/send.log)"
fi
if [ $skipped -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"; else echo "$passed passed, $failed failed"; fi
[ $failed -eq 0 ]
