#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The life of a run: whose checkpoints are whose, who may write where, signals, what a resumed run must have in common with the
# one before, outputs that are inputs, writes that fail. BUILD names another folder of programs.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_runs build=${BUILD:-build}
rm -rf $out; mkdir -p $out
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
exec 2>$out/shell.log
export OMP_WAIT_POLICY=passive

$build/make_arith $out/arith.jsonl 120 5 >/dev/null
model="--packing_samples --num_hidden_layers 1 --hidden_size 32 --num_attention_heads 4 --omp_threads 1 --logging_steps 1000 --max_len 200 --pack_len 300"
keys="--input_key question --output_key answer --train_batch_size 8 --lr_scheduler constant --warmup_steps 0"
base="--dataset $out/arith.jsonl $keys $model"
# run NAME OPTIONS...: $out/NAME is save_path, $out/NAME/checkpoints_sft has the checkpoints
run() { local name=$1; shift; ci/limit.sh 120 $build/train_sft $base --save_path $out/$name --ckpt_path $out/$name/checkpoints_sft "$@" >$out/$name.log 2>&1; }
ckpt() { echo $out/$1/checkpoints_sft; }
equal() { cmp -s $out/$1/model.safetensors $out/$2/model.safetensors; }
why() { grep '^error: ' $out/$1.log | cut -c1-400 | head -n 2; }
# refused NAME RUN PATTERN OPTIONS...: one sentence, a code
refused() {
    local name=$1 it=$2 pattern=$3 code; shift 3
    run $it "$@"; code=$?
    if [ $code -eq 0 ] || [ $code -ge 124 ]; then fail "$name" "exit code $code: $(tail -n 1 $out/$it.log)"
    elif [ "$(grep -c '^error: ' $out/$it.log)" -ne 1 ] || ! grep -qE "^error: .*$pattern" $out/$it.log; then fail "$name" "$(why $it)"
    else ok "$name"; fi
}
names() { ls $1 | tr '\n' ' '; }
fresh() { rm -rf $out/$1; mkdir -p $out/$1; cp -r $(ckpt ${2:-six}) $(ckpt $1); } # a copy of a run's checkpoints
latest() { printf global_step$2 > $(ckpt $1)/latest; }
# manifest FOLDER PYTHON: changes m, what its manifest.json says; seal(FILES...) gives the sums that they have now
manifest() { python3 -c '
import json, sys, zlib
folder, change = sys.argv[1:]
with open(f"{folder}/manifest.json") as file: m = json.load(file)
files = m["files"]
def seal(*names):
    for name in names:
        with open(f"{folder}/{name}", "rb") as file: data = file.read()
        files[name] = dict(bytes=len(data), crc32="%08x" % zlib.crc32(data))
exec(change)
with open(f"{folder}/manifest.json", "w") as file: json.dump(m, file)' "$@"; }
body() { tail -c +$((9 + $(od -An -t u8 -N 8 $1))) $1; } # a file of tensors without its header

run six --max_steps 6 --save_steps 2 || fail runs_six "$(why six)"

# ---- checkpoints of others ----
fresh lost
before=$(find $(ckpt lost) -type f -exec cksum {} + | sort | cksum)
refused runs_other_run lost 'holds checkpoints of an earlier run, the newest is global_step6; go on from it with --load_checkpoint, give another --ckpt_path' --max_steps 3 --save_steps 1 --max_ckpt_num 1
[ "$before" = "$(find $(ckpt lost) -type f -exec cksum {} + | sort | cksum)" ] && ok runs_other_run_kept || fail runs_other_run_kept "$(names $(ckpt lost))"
# what latest names stays, whatever is newer by its number; only the run's own go, oldest first
fresh back; latest back 2
run back --max_steps 3 --save_steps 1 --max_ckpt_num 1 --load_checkpoint
[ "$(cat $(ckpt back)/latest)" = global_step3 ] && [ "$(names $(ckpt back))" = "global_step3 latest " ] && ok runs_latest_stays || fail runs_latest_stays "$(names $(ckpt back))"
run back --max_steps 6 --load_checkpoint && equal back six && ok runs_latest_goes_on || fail runs_latest_goes_on "$(why back)"
# names that are not exactly global_stepN, a file of that name, a folder that holds something else
mkdir -p $(ckpt odd)/global_step01 $(ckpt odd)/global_step2/sub $(ckpt odd)/global_step9x; echo mine > $(ckpt odd)/global_step1; echo mine > $(ckpt odd)/global_step2/sub/file
run odd --max_steps 6 --save_steps 1 --max_ckpt_num 1 && equal odd six && [ "$(cat $(ckpt odd)/global_step1.other $(ckpt odd)/global_step2.other/sub/file | tr '\n' ' ')" = "mine mine " ] &&
    [ "$(names $(ckpt odd))" = "global_step01 global_step1.other global_step2.other global_step6 global_step9x latest " ] && ok runs_odd_names || fail runs_odd_names "$(names $(ckpt odd)) $(why odd)"
fresh guest; latest guest 2; echo mine > $(ckpt guest)/global_step2/notes
run guest --max_steps 6 --save_steps 1 --max_ckpt_num 1 --load_checkpoint && [ "$(names $(ckpt guest))" = "global_step2 global_step6 latest " ] && ok runs_own_file_kept || fail runs_own_file_kept "$(names $(ckpt guest)) $(why guest)"
# without a manifest nobody knows what the files should be
fresh old; rm $(ckpt old)/*/manifest.json; before=$(find $(ckpt old) -type f -exec cksum {} + | sort | cksum)
refused runs_without_manifest old 'global_step6 in ckpt_path is damaged, and so are all others there; .*manifest.json is missing \(0.1.0 wrote none\)' --max_steps 7 --load_checkpoint
[ "$before" = "$(find $(ckpt old) -type f -exec cksum {} + | sort | cksum)" ] && ok runs_without_manifest_kept || fail runs_without_manifest_kept "$(names $(ckpt old))"
# one whose files are not what was written is passed over, by name, for the one before; the run ends with the same weights
damaged() { # NAME WHAT SENTENCE [RUN]: the newest checkpoint of a run is damaged by WHAT, a command that is given its folder
    local name=damaged_$1; fresh $name ${4:-six}; (cd $(ckpt $name)/global_step6 && eval "$2")
    run $name --max_steps 7 --load_checkpoint || { fail runs_$name "$(why $name)"; return; }
    grep -qE "^notice: .*global_step6/$3: the checkpoint is damaged, training goes on from global_step4" $out/$name.log && equal $name seven && ok runs_$name || fail runs_$name "$(grep -m 1 notice $out/$name.log) $(why $name)"
}
run seven --max_steps 7 --save_steps 7 || fail runs_seven "$(why seven)"
damaged bit 'byte=$(od -An -t u1 -j 5000 -N 1 model.safetensors); printf "\\$(printf %o $((byte ^ 4)))" | dd of=model.safetensors bs=1 seek=5000 conv=notrunc 2>/dev/null' 'model.safetensors has the CRC-32 [0-9a-f]{8}, its manifest says [0-9a-f]{8}'
damaged tail 'truncate -s -8 optimizer.safetensors' 'optimizer.safetensors has [0-9]+ bytes, its manifest says [0-9]+'
damaged hole 'rm config.json' 'config.json cannot be read: No such file or directory'
damaged other 'cp ../global_step4/model.safetensors .' 'model.safetensors has the CRC-32 [0-9a-f]*, its manifest says [0-9a-f]*'
damaged list 'echo nonsense > manifest.json' 'manifest.json lists no files'
damaged unlisted 'rm manifest.json' 'manifest.json is missing \(0\.1\.0 wrote none\), so the files cannot be checked'
damaged emptied 'manifest . "files.clear()"' 'manifest.json does not list config.json, so nothing says whether it is what was written'
damaged thinned 'manifest . "del files[\"model.safetensors\"]"' 'manifest.json does not list model.safetensors, so nothing says whether it is what was written'
damaged whole_other 'cp ../global_step4/* .' 'manifest.json is of step 4 of the run [0-9a-f]{16}, its folder of step 6 of the run [0-9a-f]{16}'
damaged half_named 'manifest . "del m[\"step\"]"' 'manifest.json is of step .* of the run [0-9a-f]{16}, its folder of step 6 of the run [0-9a-f]{16}'
# one bit of the run's name: the manifest has it; where that does not say it, of 0.2.0, any whole one before is of the run, if all are of one
damaged run 'tr 0-9a-f 1-9a-f0 <run >run.new; mv run.new run' 'run has the CRC-32 [0-9a-f]{8}, its manifest says [0-9a-f]{8}'
damaged run_of_before 'for step in ../*/; do manifest $step "m.pop(\"run\"); m.pop(\"step\")"; done; tr 0-9a-f 1-9a-f0 <run >run.new; mv run.new run' 'run has the CRC-32 [0-9a-f]{8}, its manifest says [0-9a-f]{8}'
fresh damaged_all; truncate -s -8 $(ckpt damaged_all)/*/model.safetensors
refused runs_damaged_all damaged_all 'global_step6 in ckpt_path is damaged, and so are all others there; remove the folder and start training again \(.*global_step6/model.safetensors has .* bytes, its manifest says ' --max_steps 7 --load_checkpoint
# 0.2.0's manifests name neither run nor step
fresh of_before; for step in $(ckpt of_before)/*/; do manifest $step 'm.pop("run"); m.pop("step")'; done
run of_before --max_steps 7 --load_checkpoint && equal of_before seven && ok runs_of_before || fail runs_of_before "$(why of_before)"
# the same of shards, whoever wrote them; and without a manifest what they lack is named
shards=$(ckpt shards)
run shards --max_steps 6 --save_steps 2 --sharded_checkpoint --ring_attn_size 3 --zero_stage 3 && equal shards six && [ "$(names $shards/global_step6)" = "config.json manifest.json optimizer.safetensors run shard-00001-of-00003.safetensors shard-00002-of-00003.safetensors shard-00003-of-00003.safetensors " ] && ok runs_sharded || fail runs_sharded "$(names $shards/global_step6) $(why shards)"
run async --max_steps 6 --save_steps 2 --async_save --ring_attn_size 3 --zero_stage 1 && equal async six && [ "$(names $(ckpt async))" = "$(names $shards)" ] && cmp -s <(body $(ckpt async)/global_step6/shard-00003-of-00003.safetensors) <(body $shards/global_step6/shard-00003-of-00003.safetensors) && ok runs_async || fail runs_async "$(names $(ckpt async)) $(why async)"
fresh resharded shards
run resharded --max_steps 7 --save_steps 7 --load_checkpoint --data_parallel_size 2 --zero_stage 1 && equal resharded seven && cmp -s $(ckpt resharded)/global_step7/optimizer.safetensors $(ckpt seven)/global_step7/optimizer.safetensors && ok runs_resharded || fail runs_resharded "$(why resharded)"
# runs of more elements than are read and written at a time
wide="--hidden_size 512 --train_batch_size 2"
run wide --max_steps 2 $wide && run wide_one --max_steps 1 --save_steps 1 $wide --sharded_checkpoint && cp -r $out/wide_one $out/wide_async && rm -r $(ckpt wide_async) && run wide_async --max_steps 1 --save_steps 1 $wide --async_save && cmp -s <(body $(ckpt wide_one)/global_step1/shard-00001-of-00001.safetensors) <(body $(ckpt wide_async)/global_step1/shard-00001-of-00001.safetensors) &&
    run wide_one --max_steps 2 $wide --load_checkpoint --ring_attn_size 2 && equal wide_one wide && ok runs_wide_shards || fail runs_wide_shards "$(why wide) $(why wide_one) $(why wide_async)"
damaged shard_bit 'byte=$(od -An -t u1 -j 9000 -N 1 shard-00002-of-00003.safetensors); printf "\\$(printf %o $((byte ^ 4)))" | dd of=shard-00002-of-00003.safetensors bs=1 seek=9000 conv=notrunc 2>/dev/null' 'shard-00002-of-00003.safetensors has the CRC-32 [0-9a-f]{8}, its manifest says [0-9a-f]{8}' shards
damaged shard_gone 'rm shard-00003-of-00003.safetensors' 'shard-00003-of-00003.safetensors cannot be read: No such file or directory' shards
damaged shard_of_another_step 'cp ../global_step2/shard-00001-of-00003.safetensors .' 'shard-00001-of-00003.safetensors has the CRC-32 [0-9a-f]*, its manifest says [0-9a-f]*' shards
damaged shard_unlisted 'manifest . "del files[\"shard-00002-of-00003.safetensors\"]"' 'manifest.json does not list shard-00002-of-00003.safetensors, so nothing says whether it is what was written' shards
# a shard says of which run and step it is, whatever the manifest says; those of 0.2.0 do not
fresh unlisted shards; six=$(ckpt unlisted)/global_step6 two=shard-00002-of-00003.safetensors
cp $(ckpt unlisted)/global_step4/$two $six; manifest $six "seal('$two')"
refused runs_shard_of_another_step unlisted "$two belongs to step 4, but the checkpoint to step 6; restore the checkpoint's file, or take another checkpoint" --max_steps 7 --load_checkpoint
cp $(ckpt async)/global_step6/$two $six; manifest $six "seal('$two')"
refused runs_shard_of_another_run unlisted "$two belongs to run [0-9a-f]{16}, but the checkpoint to run [0-9a-f]{16}" --max_steps 7 --load_checkpoint
fresh shards_before shards; for file in $(ckpt shards_before)/*/shard-*; do LC_ALL=C sed -i 's/"run":"/"rum":"/; s/"step":"/"stop":"/' $file; manifest ${file%/*} "seal('${file##*/}'); m.pop('run', 0); m.pop('step', 0)"; done
run shards_before --max_steps 7 --load_checkpoint --data_parallel_size 2 && equal shards_before seven && ok runs_shards_of_before || fail runs_shards_of_before "$(why shards_before)"
cp $shards/global_step6/$two $(ckpt shards_before)/global_step6; manifest $(ckpt shards_before)/global_step6 "seal('$two')"
refused runs_shards_mixed shards_before "$two belongs to run [0-9a-f]{16}, but the checkpoint to run " --max_steps 7 --load_checkpoint
fresh unlisted shards; (cd $six; cp shard-00001-of-00003.safetensors $two); manifest $six "seal('$two')"
refused runs_shard_twice unlisted 'the shards in .*global_step6 have model\..* only up to its element [0-9]+ of [0-9]+; they are of another model, or one of them is missing; take another checkpoint' --max_steps 7 --load_checkpoint
rm $six/$two; manifest $six "del files['$two']"
refused runs_shard_missing unlisted 'shard-00002-of-00003.safetensors' --max_steps 7 --load_checkpoint
refused runs_shard_of_a_larger_model shards 'hidden_size' --max_steps 7 --load_checkpoint --hidden_size 48
# which one to go on from
fresh others; rm -r $(ckpt others)/global_step4; cp -r $(ckpt async)/global_step4 $(ckpt others)/
truncate -s -8 $(ckpt others)/global_step2/model.safetensors; truncate -s -8 $(ckpt others)/global_step6/model.safetensors
refused runs_damaged_others others 'global_step6 in ckpt_path is damaged, and no earlier checkpoint is known to be of the same run; undamaged are global_step4: write one of these names into the file latest to go on from it' --max_steps 7 --load_checkpoint
latest others 4; run others --max_steps 7 --load_checkpoint && equal others seven && ok runs_damaged_others_mended || fail runs_damaged_others_mended "$(why others)"
fresh unknown; rm -r $(ckpt unknown)/global_step4; cp -r $(ckpt async)/global_step4 $(ckpt unknown)/; manifest $(ckpt unknown)/global_step6 'm.pop("run"); m.pop("step")'; echo nobody >$(ckpt unknown)/global_step6/run
refused runs_damaged_unknown unknown 'global_step6 in ckpt_path is damaged, and no earlier checkpoint is known to be of the same run; undamaged are global_step4, global_step2: write' --max_steps 7 --load_checkpoint
fresh dangling; truncate -s -100 $(ckpt dangling)/global_step6/model.safetensors; latest dangling 5
refused runs_latest_dangling dangling 'latest names global_step5, which does not exist; the newest undamaged one is global_step4' --max_steps 6 --load_checkpoint
rm $(ckpt dangling)/latest
refused runs_latest_missing dangling 'latest is missing; the newest undamaged one is global_step4: write that name' --max_steps 6 --load_checkpoint
echo newest > $(ckpt dangling)/latest
refused runs_latest_other dangling 'latest names no checkpoint; the newest undamaged one is global_step4' --max_steps 6 --load_checkpoint
echo global_step4 > $(ckpt dangling)/latest # as an editor leaves it, with a new line
run dangling --max_steps 6 --load_checkpoint && equal dangling six && ok runs_latest_mended || fail runs_latest_mended "$(why dangling)"
# what a killed run leaves
fresh killed; latest killed 6; mv $(ckpt killed)/global_step6 $(ckpt killed)/global_step6.tmp; mkdir $(ckpt killed)/global_step{3.tmp,1.gone}
mkdir $out/killed/ema; touch $out/killed/{model.safetensors.tmp.5,ema/config.json.tmp.5.2,training_loss.svg.5.tmp} $(ckpt killed)/latest.tmp.123 $(ckpt killed)/global_step3.tmp/model.safetensors.tmp.7.2 $(ckpt killed)/lock
run killed --max_steps 6 --load_checkpoint && equal killed six && [ "$(names $(ckpt killed))" = "global_step2 global_step4 global_step6 latest " ] && [ -z "$(find $out/killed -name '*.tmp*')" ] && ok runs_left_over || fail runs_left_over "$(names $(ckpt killed)) $(why killed)"

# ---- nothing saved yet, nothing left ----
run nothing --max_steps 6 --load_checkpoint --metrics_path $out/nothing.jsonl && equal nothing six && grep -q '^notice: nothing is saved in .*; training starts from the beginning' $out/nothing.log && ok runs_nothing_saved || fail runs_nothing_saved "$(tail -n 1 $out/nothing.log)"
[ "$(names $out/nothing)" = "config.json model.safetensors " ] && ok runs_no_trace || fail runs_no_trace "$(names $out/nothing)"
json() { python3 -c 'import json, sys; json.loads(sys.stdin.read(), parse_constant=lambda c: sys.exit(c))' 2>/dev/null <<<"$1" || { ! command -v python3 >/dev/null && ! grep -qE '[ :](-?nan|-?inf)' <<<"$1"; }; }
fresh done
run done --max_steps 6 --load_checkpoint --json --eval_dataset $out/arith.jsonl && equal done six && grep -q '^notice: training is complete, step 6 of 6 is done' $out/done.log && line=$(grep '^{' $out/done.log) && json "$line" && grep -q '"loss_last": null.*"eval_loss": [1-9]' <<<"$line" && ok runs_done || fail runs_done "$(tail -n 1 $out/done.log)"
run done --max_steps 6 --load_checkpoint && grep -q '^nothing to train: step 6 of 6 is done' $out/done.log && ! grep -q nan $out/done.log && ok runs_done_text || fail runs_done_text "$(tail -n 1 $out/done.log)"
rm $out/done/model.safetensors
refused runs_past_end done 'is of step 6, this run ends after step 4; raise --max_steps' --max_steps 4 --load_checkpoint
[ ! -e $out/done/model.safetensors ] && ok runs_past_end_writes_nothing || fail runs_past_end_writes_nothing "a model of step 6 passes for one of step 4"
run zero --max_steps 0 --json --eval_dataset $out/arith.jsonl && [ "$(grep -c '^{"steps": 0' $out/zero.log)" = 1 ] && [ -e $out/zero/model.safetensors ] && ok runs_zero_steps || fail runs_zero_steps "$(tail -n 1 $out/zero.log)"
$build/train_sft --help | grep -q -- '--max_steps .* 0: evaluate and save only' && ok runs_zero_steps_help || fail runs_zero_steps_help "--help does not say what 0 is"

# ---- two runs, signals ----
# Where whoever runs this ignores SIGHUP (nohup), the run would, too.
start() { local name=$1; shift; $hears $build/train_sft $base --save_path $out/$name --ckpt_path $out/$name/checkpoints_sft "$@" >$out/$name.log 2>&1 & running=$!; for _ in $(seq 1 400); do grep -q "${until:-^ranks: }" $out/$name.log && break; sleep 0.02; done; }
start both --max_steps 2000000
ci/limit.sh 120 $build/train_sft $base --save_path $out/second --ckpt_path $out/both/checkpoints_sft --max_steps 1 >$out/second.log 2>&1; code=$?
[ $code -ne 0 ] && grep -q "^error: ckpt_path .* is in use by train_sft, process $running on .*, since 20.* with $out/arith.jsonl; wait for it, or give another --ckpt_path" $out/second.log && ok runs_locked || fail runs_locked "exit code $code: $(why second)"
ci/limit.sh 120 $build/train_sft $base --save_path $out/both --ckpt_path $out/second --max_steps 1 >$out/second.log 2>&1; code=$?
[ $code -ne 0 ] && grep -q "^error: save_path .* is in use by train_sft, process $running on " $out/second.log && [ ! -e $out/second ] && ok runs_locked_model || fail runs_locked_model "exit code $code: $(why second)"
sleep 0.3; kill -TERM $running; wait $running; code=$?
[ $code -eq 143 ] && grep -q '^step [0-9]*: checkpoint in ' $out/both.log && grep -q '^interrupted after step [0-9]*; go on with --load_checkpoint' $out/both.log && [ -e $(ckpt both)/$(cat $(ckpt both)/latest)/optimizer.safetensors ] && ok runs_sigterm || fail runs_sigterm "exit code $code: $(tail -n 1 $out/both.log)"
at=$(sed 's/global_step//' $(ckpt both)/latest); at=${at:-1}
run both --max_steps $((at + 2)) --load_checkpoint; run both_whole --max_steps $((at + 2))
equal both both_whole && ok "runs_sigterm_goes_on from $at" || fail runs_sigterm_goes_on "$(why both)"
# a signal in the middle of an evaluation
until='^step 1: evaluation' start evaluates --eval_dataset $out/arith.jsonl,$out/arith.jsonl,$out/arith.jsonl,$out/arith.jsonl,$out/arith.jsonl,$out/arith.jsonl,$out/arith.jsonl,$out/arith.jsonl --eval_steps 1 --max_steps 2000000; sleep 0.05; kill -TERM $running; wait $running; code=$?
[ $code -eq 143 ] && [ "$(sed 's/global_//; s/step/step /' $(ckpt evaluates)/latest)" = "$(grep -o 'step [0-9]*;' $out/evaluates.log | tr -d ';')" ] && ok runs_sigterm_in_evaluation || fail runs_sigterm_in_evaluation "exit code $code: $(tail -n 1 $out/evaluates.log)"
hears="env --default-signal=HUP"; $hears true 2>/dev/null || hears=
start hangup --max_steps 2000000; hears=; sleep 0.2; kill -HUP $running; ( sleep 60; kill -KILL $running 2>/dev/null ) >/dev/null 2>&1 & guard=$!
wait $running; code=$?; kill $guard
[ $code -eq 129 ] && grep -q '^interrupted after step' $out/hangup.log && ok runs_sighup || fail runs_sighup "exit code $code"
# a step that takes its time: the first signal waits for it, the second does not; twice at once is one
slow="--device reference --hidden_size 128 --num_hidden_layers 2 --train_batch_size 32 --max_steps 3"
for wait in 0.3 3 10; do # on a slow machine the first step begins later
    start slow $slow; sleep $wait; kill -INT $running; sleep 0.3; began=$SECONDS; kill -TERM $running; wait $running; code=$?
    grep -q '^interrupted before the first step' $out/slow.log || break
done
[ $code -eq 143 ] && [ $((SECONDS - began)) -le 1 ] && ! grep -q '^interrupted' $out/slow.log && ok runs_second_signal || fail runs_second_signal "exit code $code after $((SECONDS - began)) s: $(tail -n 1 $out/slow.log)"
start twice --max_steps 2000000; sleep 0.2; kill -TERM $running; kill -TERM $running; wait $running; code=$?
[ $code -eq 143 ] && grep -q '^interrupted after step' $out/twice.log && ok runs_signal_twice || fail runs_signal_twice "exit code $code"

# ---- what a resumed run must have in common ----
resume="--max_steps 6 --load_checkpoint"
number() { fresh bad; latest bad 4; LC_ALL=C sed -i "s/\"$1\":\"[^\"]*\"/\"$1\":\"$2\"/" $(ckpt bad)/global_step4/optimizer.safetensors; manifest $(ckpt bad)/global_step4 'seal("optimizer.safetensors")'; }
while read -r key value pattern; do
    number $key $value
    refused "runs_metadata_$key=$value" bad "global_step4/optimizer.safetensors:? $pattern" $resume
done <<'LIST'
step z "step" is "z", but it must be a whole number of at least 0
step 7 is of step 7, its folder's name says 4
step - "step" is "-"
documents -20 "documents" is "-20", but it must be a whole number of at least 1
documents 1e2 "documents" is "1e2"
optimizer_t 9 "optimizer_t" is 9, more than its "step" 4
cell x "cell" is "x"
LIST
fresh bad; LC_ALL=C sed -i 's/"step"/"stop"/' $(ckpt bad)/global_step6/optimizer.safetensors; manifest $(ckpt bad)/global_step6 'seal("optimizer.safetensors")'; refused runs_metadata_missing bad 'does not say "step"' $resume
fresh run_name; echo damaged > $(ckpt run_name)/global_step6/run; manifest $(ckpt run_name)/global_step6 'seal("run")'
run run_name --max_steps 7 --load_checkpoint && grep -q '^notice: .*global_step6/run does not hold the 16 digits of a run.s name: the checkpoint is damaged, training goes on from global_step4' $out/run_name.log && equal run_name seven && ok runs_damaged_name || fail runs_damaged_name "$(why run_name)"
# one of an earlier 0.2.0 has chunks of rows in the place of cells: weights, moments and step are taken, in other sums from there on
run cells --max_steps 6 --save_steps 4 --cell 100; fresh chunks cells; latest chunks 4
LC_ALL=C sed -i 's/"cell":"100"/"chunks":"8"/' $(ckpt chunks)/global_step4/optimizer.safetensors; manifest $(ckpt chunks)/global_step4 'seal("optimizer.safetensors")'
run chunks $resume && grep -q '^notice: .*global_step4/optimizer.safetensors was written by 0.2.0, which summed gradients by rows; from here on they are summed by documents, so their last bits can differ$' $out/chunks.log && [ -e $out/chunks/model.safetensors ] && ! equal chunks cells && ok runs_chunks_of_rows || fail runs_chunks_of_rows "$(tail -n 1 $out/chunks.log)"
# other data, as many documents: another word, another order, another reading
fresh data; latest data 4; tac $out/arith.jsonl > $out/order.jsonl; sed '7s/How many/How  any/' $out/arith.jsonl > $out/word.jsonl
for other in order word; do refused runs_other_$other data "was trained on other data than $out/$other.jsonl" $resume --dataset $out/$other.jsonl; done
refused runs_other_template data 'was trained on other data' $resume --input_template 'Q: {} A: '
cp $out/arith.jsonl $out/copy.jsonl; run data $resume --dataset $out/copy.jsonl && equal data six && ok runs_same_data || fail runs_same_data "$(why data)"
# other rows change no bit
fresh data; latest data 4; run data $resume --pack_len 400 && equal data six && ok runs_other_rows || fail runs_other_rows "$(why data)"
fresh data; latest data 4
refused runs_other_optim data 'written with --optim adamw, this run has sgd' $resume --optim sgd
refused runs_other_heads data 'has num_attention_heads 4, but this run.s model has 8' $resume --num_attention_heads 8 --num_key_value_heads 4 --head_dim 8
refused runs_other_theta data 'has rope_theta 10000, but this run.s model has 20000' $resume --rope_theta 20000
run data $resume --learning_rate 1e-3 --adam_betas 0.9,0.999 && grep -q '^notice: other options than before (in brackets): --learning_rate 0.001 (0.002), --adam_betas 0.9,0.999 (0.9,0.95)$' $out/data.log && ! equal data six && ok runs_options_said || fail runs_options_said "$(head -n 1 $out/data.log)"
# the cells are those of the checkpoint
run eight --max_steps 6 --save_steps 3 --cell 8; equal eight six && fail runs_cells_differ "cells of 8 tokens have the bits of longer ones"
fresh cells eight; latest cells 3
refused runs_other_cells cells 'written with --cell 8, this run has --cell 9' $resume --cell 9
run cells $resume --ring_attn_size 2 && equal cells eight && ok runs_cells_kept || fail runs_cells_kept "$(why cells)"
# a second moment that cannot be
fresh moment; file=$(ckpt moment)/global_step6/optimizer.safetensors; header=$(od -An -t u8 -N 8 $file | tr -d ' ')
begin=$(head -c $((8 + header)) $file | tail -c $header | sed -E 's/.*"exp_avg_sq.model.norm.weight":\{[^}]*"data_offsets":\[([0-9]+),.*/\1/')
printf '\x00\x00\x80\xbf' | dd of=$file bs=1 seek=$((8 + header + begin + 4 * 5)) conv=notrunc 2>/dev/null
manifest $(ckpt moment)/global_step6 'seal("optimizer.safetensors")'
refused runs_negative_moment moment 'element 5 of exp_avg_sq.model.norm.weight is -1, but a second moment is never negative' --max_steps 7 --load_checkpoint
# runs of another kind, against another reference
pairs="--dataset $out/arith.jsonl --prompt_key question --chosen_key answer --rejected_key wrong --train_batch_size 6 --learning_rate 2e-3 --lr_scheduler constant --warmup_steps 0 ${model/--pack_len 300/--pack_len 420}"
tuned() { local name=$1 trainer=$2; shift 2; ci/limit.sh 120 $build/train_$trainer $pairs --save_path $out/$name --ckpt_path $out/$name/ckpt "$@" >$out/$name.log 2>&1; }
tuned dpo dpo --pretrain $out/six --max_steps 2 --save_steps 1; code=$?
tuned dpo rm --pretrain $out/six --max_steps 3 --load_checkpoint; [ $? -ne 0 ] && [ $code -eq 0 ] && grep -q '^error: .*was written by train_dpo, this is train_rm' $out/dpo.log && ok runs_other_trainer || fail runs_other_trainer "$(tail -n 1 $out/dpo.log)"
tuned dpo dpo --max_steps 3 --load_checkpoint; [ $? -ne 0 ] && grep -q '^error: .*was trained against another reference model; give the same --pretrain' $out/dpo.log && ok runs_other_reference || fail runs_other_reference "$(tail -n 1 $out/dpo.log)"
tuned rm rm --pretrain $out/six --max_steps 2 --save_steps 2; code=$?
tuned rm rm --pretrain $out/six --max_steps 3 --load_checkpoint --value_head_prefix other; [ $? -ne 0 ] && [ $code -eq 0 ] && grep -q '^error: .*there is no tensor .*other.weight' $out/rm.log && ok runs_other_head || fail runs_other_head "$(tail -n 1 $out/rm.log)"
tuned dpo dpo --pretrain $out/six --max_steps 3 --load_checkpoint && ok runs_same_reference || fail runs_same_reference "$(tail -n 1 $out/dpo.log)"
mkdir $out/pool
tuned off_dpo dpo --pretrain $out/six --max_steps 2 && tuned off_rm rm --pretrain $out/six --max_steps 1 && tuned off_ref dpo --pretrain $out/six --max_steps 2 --ref_offload --offload_path $out/pool --ring_attn_size 2 --zero_stage 1 && equal off_ref off_dpo && ok runs_ref_offload || fail runs_ref_offload "$(tail -n 1 $out/off_ref.log)"
tuned noise dpo --max_steps 1 && [ "$(grep -c '^notice: without --pretrain a new model with random weights is trained' $out/noise.log)" = 1 ] && ! grep -q 'random weights' $out/dpo.log && ok runs_noise || fail runs_noise "$(head -n 1 $out/noise.log)"
sed 's/"wrong": "[^"]*"/"label": true/' $out/arith.jsonl | awk 'NR % 2 { sub(/true/, "false") } 1' > $out/labels.jsonl; sed '3s/"label": false/"label": true/' $out/labels.jsonl > $out/relabelled.jsonl
pairs="$keys $model --pretrain $out/six"
tuned kto kto --dataset $out/labels.jsonl --max_steps 2 --save_steps 1; code=$?
tuned kto kto --dataset $out/relabelled.jsonl --max_steps 3 --load_checkpoint; [ $? -ne 0 ] && [ $code -eq 0 ] && grep -q '^error: .*was trained on other data' $out/kto.log && ok runs_other_labels || fail runs_other_labels "$(tail -n 1 $out/kto.log)"

# ---- PPO ----
prompts="--prompt_data $out/arith.jsonl --input_key question --label_key answer --prompt_max_len 160 --generate_max_len 6 --rollout_batch_size 4 --train_batch_size 2 --actor_learning_rate 2e-4 --critic_learning_rate 1e-3 --reward_rule last_number --lr_scheduler constant --warmup_steps 0 ${model/--logging_steps 1000/--logging_steps 2}"
ppo() { local name=$1; shift; ci/limit.sh 120 $build/train_ppo $prompts --save_path $out/$name --ckpt_path $out/$name/ckpt "$@" >$out/$name.log 2>&1; }
ppo whole --max_steps 7 --save_steps 1 && grep -q '^notice: a rollout is trained on in 2 steps, so training ends after step 8, not 7' $out/whole.log && grep -q '^rollout 4/4  reward ' $out/whole.log && ! grep -q 'loss ' $out/whole.log && ok runs_ppo_progress || fail runs_ppo_progress "$(grep -m 1 /4 $out/whole.log)"
mkdir -p $out/half; cp -r $out/whole/ckpt $out/half/; rm -r $out/half/ckpt/global_step8; printf global_step4 > $out/half/ckpt/latest
ppo half --max_steps 7 --load_checkpoint --max_ckpt_num 1 && equal half whole && grep -q '^rollout 4/4  reward .* 0:00 left' $out/half.log && ok runs_ppo_goes_on || fail runs_ppo_goes_on "$(tail -n 1 $out/half.log)"
mkdir -p $out/listed; cp -r $out/whole/ckpt $out/listed/; printf global_step6 > $out/listed/ckpt/latest; rm -r $out/listed/ckpt/global_step8; manifest $out/listed/ckpt/global_step6 'del files["critic/model.safetensors"]'
ppo listed --max_steps 7 --load_checkpoint && grep -q '^notice: .*global_step6/manifest.json does not list critic/model.safetensors, .*training goes on from global_step4' $out/listed.log && equal listed whole && ok runs_ppo_critic_unlisted || fail runs_ppo_critic_unlisted "$(tail -n 1 $out/listed.log)"
ppo half --max_steps 7 --load_checkpoint --rollout_batch_size 2; [ $? -ne 0 ] && grep -q '^error: .*--rollout_batch_size 4, this run has 2' $out/half.log && ok runs_ppo_other_rollout || fail runs_ppo_other_rollout "$(tail -n 1 $out/half.log)"
ppo none --max_steps 0 --json && json "$(grep '^{' $out/none.log)" && grep -q '^{"steps": 0, "reward_first": null' $out/none.log && ok runs_ppo_zero_steps || fail runs_ppo_zero_steps "$(tail -n 1 $out/none.log)"

# ---- offload: state and weights outside of the device's memory, in the host's or in files that are mapped ----
run off_state --max_steps 6 --adam_offload --ring_attn_size 2 --zero_stage 0 && equal off_state six && ok runs_adam_offload || fail runs_adam_offload "$(why off_state)"
run off_files --max_steps 3 --save_steps 3 --adam_offload --offload_path $out/pool --data_parallel_size 2 --zero_stage 1 --async_save &&
    run off_files --max_steps 6 --load_checkpoint --adam_offload --param_offload --zero_stage 3 --ring_attn_size 3 && equal off_files six && ok runs_offload_goes_on || fail runs_offload_goes_on "$(why off_files)"
# a model that the limit has no room for, but for what is offloaded; nothing is left in the folder
big="--hidden_size 512 --num_hidden_layers 6 --num_attention_heads 8 --train_batch_size 2 --max_steps 1 --gradient_checkpointing"
off="--adam_offload --param_offload --zero_stage 3 --offload_path $out/pool"
run off_big $big || fail runs_off_big "$(why off_big)"
(ulimit -d 220000; run off_little $big); [ $? -eq 1 ] && [ "$(grep -c '^error: out of memory: [0-9]* bytes on device cpu' $out/off_little.log)" = 1 ] && ok runs_limit_without_offload || fail runs_limit_without_offload "$(tail -n 1 $out/off_little.log)"
(ulimit -d 220000; run off_limit $big $off) && equal off_limit off_big && ok runs_limit_with_offload || fail runs_limit_with_offload "$(why off_limit)"
(ulimit -f 2000; run off_full $big $off); [ $? -eq 1 ] && grep -qE '^error: [0-9]+ bytes to offload cannot be written to a file in .*pool: File too large; give another folder, or none' $out/off_full.log && ok runs_offload_full || fail runs_offload_full "$(tail -n 1 $out/off_full.log)"
refused runs_offload_nowhere off_bad 'offload_path .*/nowhere is no folder that can be written to' --max_steps 1 --adam_offload --offload_path $out/nowhere
refused runs_offload_stage off_bad 'param_offload needs sharded weights, but zero_stage is 2; add --zero_stage 3' --max_steps 1 --param_offload
ppo off_ppo --max_steps 7 --adam_offload --param_offload --zero_stage 3 --ref_reward_offload --offload_path $out/pool --data_parallel_size 2 && equal off_ppo whole && ok runs_ppo_offload || fail runs_ppo_offload "$(tail -n 1 $out/off_ppo.log)"
scored="--max_steps 2 --reward_pretrain $out/off_rm"
prompts=${prompts/--reward_rule last_number/}; ppo scored $scored && ppo off_scored $scored --ref_reward_offload --ring_attn_size 2 && equal off_scored scored && ok runs_reward_offload || fail runs_reward_offload "$(tail -n 1 $out/scored.log) $(tail -n 1 $out/off_scored.log)"
[ -z "$(ls $out/pool)" ] && ok runs_offload_leaves_nothing || fail runs_offload_leaves_nothing "$(names $out/pool)"

# ---- PPO's roles on groups of ranks of their own: texts, weights, averages and checkpoints of one rank ----
roles="--actor_num_gpus_per_node 2 --ref_num_gpus_per_node 1 --critic_num_gpus_per_node 2 --reward_num_gpus_per_node 1 --vllm_num_engines 1"
played="--max_steps 8 --reward_pretrain $out/off_rm --enable_ema --save_value_network --actor_learning_rate 1e-3"
alike() { for file in model.safetensors critic/model.safetensors ema/model.safetensors; do cmp -s $out/$1/$file $out/roles_none/$file || return 1; done; }
ppo roles_none $played --save_steps 1 && [ "$(sha256sum <$out/roles_none/model.safetensors)" != "$(sha256sum <$out/six/model.safetensors)" ] || fail runs_roles_none "$(tail -n 1 $out/roles_none.log)"
ppo roles_five $played --save_steps 1 $roles && alike roles_five && grep -q '^groups: actor on 2, reference on 1, critic on 2, reward on 1, generator on 1 ranks' $out/roles_five.log &&
    cmp -s $out/roles_five/ckpt/global_step8/optimizer.safetensors $out/roles_none/ckpt/global_step8/optimizer.safetensors && cmp -s $out/roles_five/ckpt/global_step8/critic/optimizer.safetensors $out/roles_none/ckpt/global_step8/critic/optimizer.safetensors && ok runs_roles || fail runs_roles "$(tail -n 1 $out/roles_five.log)"
back() { rm -r $out/$1/ckpt/global_step8; printf global_step4 > $out/$1/ckpt/latest; shift; }
back roles_five; ppo roles_five $played --load_checkpoint --ring_attn_size 2 && alike roles_five && ok runs_roles_on_one_group || fail runs_roles_on_one_group "$(tail -n 1 $out/roles_five.log)"
cp -r $out/roles_none $out/roles_zero; back roles_zero; ppo roles_zero $played --load_checkpoint --save_steps 1 $roles --colocate_actor_ref --zero_stage 3 --param_offload --sharded_checkpoint && alike roles_zero && ok runs_roles_sharded || fail runs_roles_sharded "$(tail -n 1 $out/roles_zero.log)"
back roles_zero; ppo roles_zero $played --load_checkpoint --save_steps 1 $roles --ring_attn_size 2 --ref_num_nodes 2 --vllm_tensor_parallel_size 2 --colocate_critic_reward --async_save && alike roles_zero && ok runs_roles_async || fail runs_roles_async "$(tail -n 1 $out/roles_zero.log)"
back roles_zero; ppo roles_zero $played --load_checkpoint $roles --colocate_all_models && alike roles_zero && ! grep -q '^groups' $out/roles_zero.log && ok runs_roles_colocated || fail runs_roles_colocated "$(tail -n 1 $out/roles_zero.log)"
ppo roles_bad $played $roles --ring_attn_size 2; [ $? -ne 0 ] && grep -q '^error: the group of the reference has 1 rank (.*), but must have a multiple of ring_attn_size 2' $out/roles_bad.log && ok runs_roles_indivisible || fail runs_roles_indivisible "$(tail -n 1 $out/roles_bad.log)"
ppo roles_bad $played $roles --world_size 3; [ $? -ne 0 ] && grep -q '^error: world_size is 3, the roles have 7 ranks' $out/roles_bad.log && ok runs_roles_world || fail runs_roles_world "$(tail -n 1 $out/roles_bad.log)"
ppo roles_bad $played $roles --data_parallel_size 3; [ $? -ne 0 ] && grep -q "^error: data_parallel_size 3 x ring_attn_size 1 is not the actor's 2 ranks" $out/roles_bad.log && ok runs_roles_actor || fail runs_roles_actor "$(tail -n 1 $out/roles_bad.log)"
# ---- outputs that are inputs ----
cp $out/arith.jsonl $out/mine.jsonl; ln $out/mine.jsonl $out/hard.jsonl; ln -s mine.jsonl $out/soft.jsonl; mkdir -p $out/seen; cp $out/six/*.* $out/seen/
for other in $out/mine.jsonl $PWD/$out/./mine.jsonl $out/hard.jsonl $out/soft.jsonl $out/kept/../mine.jsonl; do
    mkdir -p $out/kept
    refused "runs_dataset_is_output ${other##*/}" kept "metrics_path would overwrite .*, which --dataset reads" --dataset $out/copy.jsonl,$out/mine.jsonl --metrics_path $other --max_steps 1
done
refused runs_eval_is_output kept 'metrics_path would overwrite .*, which --eval_dataset reads' --eval_dataset $out/mine.jsonl --metrics_path $out/soft.jsonl --max_steps 1
refused runs_pretrain_is_output seen 'save_path would overwrite .*config.json|save_path would overwrite .*model.safetensors, which --pretrain reads' --pretrain $out/seen --max_steps 1
refused runs_weights_are_output kept 'metrics_path would overwrite .*model.safetensors, which --pretrain reads' --pretrain $out/seen --metrics_path $out/seen/model.safetensors --max_steps 1
refused runs_two_outputs kept 'metrics_path .* is also where --save_path writes' --metrics_path $out/seen/../kept/model.safetensors --save_path $out/kept --max_steps 1
refused runs_two_outputs_new kept 'metrics_path .* is also where --save_path writes' --metrics_path $out/kept/new/model.safetensors --save_path $out/kept/new --max_steps 1
fresh inner; refused runs_pretrain_goes inner 'is a checkpoint in ckpt_path, where old ones are removed' --pretrain $(ckpt inner)/global_step2 --max_steps 7 --load_checkpoint
cmp -s $out/mine.jsonl $out/arith.jsonl && cmp -s $out/seen/model.safetensors $out/six/model.safetensors && ok runs_inputs_whole || fail runs_inputs_whole "an input was overwritten"

# ---- paths, and writes that fail ----
long=$(printf 'xxxxxxxxx/%.0s' {1..130})
for option in ckpt_path save_path metrics_path pretrain; do refused runs_long_$option kept "$option: .* has 13[0-9]{2} characters, at most 1000 are possible" --$option $out/$long --max_steps 1; done
mkdir -p $out/$(printf 'xxxxxxxxx/%.0s' {1..90}); almost=$out/$(printf 'xxxxxxxxx/%.0s' {1..97})x
run almost --max_steps 2 --save_steps 1 --max_ckpt_num 1 --ckpt_path $almost && [ "$(names $almost)" = "global_step2 latest " ] && ok "runs_path_of_${#almost}" || fail "runs_path_of_${#almost}" "$(names $almost) $(why almost)"
: > $out/file; refused runs_ckpt_path_first kept 'a part of this path is a file' --ckpt_path $out/file --max_steps 2000000
if [ -w /dev/full ]; then
    refused runs_metrics_full full 'cannot write /dev/full: No space left' --metrics_path /dev/full --max_steps 6
    grep -q '^stopped after step 1; go on with --load_checkpoint' $out/full.log && run full --max_steps 6 --load_checkpoint && equal full six && ok runs_metrics_full_kept || fail runs_metrics_full_kept "$(why full)"
    $build/train_sft $base --save_path $out/kept --max_steps 1 --json >/dev/full 2>$out/kept.log; code=$?
    [ $code -eq 1 ] && grep -q '^error: cannot write the final summary: No space left' $out/kept.log && ok runs_json_full || fail runs_json_full "exit code $code: $(tail -n 1 $out/kept.log)"
    mkdir -p $out/a; cp $out/six/model.safetensors $out/a/; echo '{"loss": 0.69314718055994529, "grad_norm": 1, "tokens_per_second": 1}' > $out/a/metrics.jsonl
    $build/compare_runs $out/a $out/a $out/a $out/a >$out/compare.log 2>&1 && ! $build/compare_runs $out/a $out/a $out/a $out/a >/dev/full 2>$out/compare.log && grep -q '^error: cannot write the comparison: No space left' $out/compare.log && ok runs_compare_full || fail runs_compare_full "$(tail -n 1 $out/compare.log)"
fi
# a folder that goes while training is on comes back; one that cannot leaves a checkpoint
run late --max_steps 6 --ckpt_path $out/late_ckpt --metrics_path /dev/fd/3 3> >(read -r line; rm -rf $out/late; : > $out/late; cat >/dev/null); code=$?
[ $code -eq 1 ] && grep -q '^stopped after step 6; go on' $out/late.log && grep -q '^error: .*late exists but is not a folder' $out/late.log && [ "$(names $out/late_ckpt)" = "global_step6 latest " ] && rm $out/late &&
    run late --max_steps 6 --ckpt_path $out/late_ckpt --load_checkpoint && equal late six && ok runs_model_kept || fail runs_model_kept "exit code $code: $(tail -n 1 $out/late.log)"
# what is in the way is said before training
for way in model.safetensors config.json; do
    mkdir -p $out/way/$way
    refused "runs_in_the_way $way" way "save_path would write .*$way, but it exists and is not a regular file" --max_steps 2000000
    rm -r $out/way/$way
done
mkdir -p $out/way; : > $out/way/ema; refused "runs_in_the_way ema" way 'would write .*ema/model.safetensors, but a part of this path is a file' --enable_ema --max_steps 2000000
mkdir -p $out/linked; echo mine > $out/precious; ln -s ../precious $out/linked/lock
refused runs_lock_is_a_link linked 'linked/lock: it is a link; move it away' --max_steps 1; [ "$(cat $out/precious)" = mine ] && ok runs_link_kept || fail runs_link_kept "$(cat $out/precious)"
rm $out/linked/lock; echo notes > $out/linked/lock; refused runs_lock_of_others linked 'linked/lock was not written by seqpar; move it away' --max_steps 1; [ "$(cat $out/linked/lock)" = notes ] && ok runs_notes_kept || fail runs_notes_kept "$(cat $out/linked/lock)"
# a folder that is made for the run gives a path another end
cp $out/arith.jsonl $out/again.jsonl
refused runs_input_by_a_new_folder none 'metrics_path would overwrite .*again.jsonl, which --dataset reads' --dataset $out/again.jsonl --save_path $out/newly --metrics_path $out/newly/../again.jsonl --max_steps 1
cmp -s $out/again.jsonl $out/arith.jsonl && [ ! -e $out/newly ] && ok runs_new_folder_gone || fail runs_new_folder_gone "$(names $out/newly)"
# a whole checkpoint that cannot get its name stays
fresh unnamed; mv $(ckpt unnamed)/global_step6 $(ckpt unnamed)/global_step6.tmp; ln -s nowhere $(ckpt unnamed)/global_step6
refused runs_unnamed unnamed 'cannot rename .*global_step6.tmp.*; the checkpoint is complete' --max_steps 6 --load_checkpoint; rm $(ckpt unnamed)/global_step6; run unnamed --max_steps 6 --load_checkpoint && equal unnamed six && ok runs_unnamed_kept || fail runs_unnamed_kept "$(names $(ckpt unnamed))"
# metrics go on where the checkpoint was: no step twice, no part of a line
run whole --max_steps 6 --metrics_path $out/whole.jsonl; run part --max_steps 6 --save_steps 4 --metrics_path $out/part.jsonl; printf '{"step": 7, "lo' >> $out/part.jsonl
run part --max_steps 6 --metrics_path $out/part.jsonl --load_checkpoint && [ "$(grep -c step $out/part.jsonl)" = 6 ] && diff <(sed 's/, "tokens_per.*//' $out/part.jsonl) <(sed 's/, "tokens_per.*//' $out/whole.jsonl) >/dev/null && ok runs_metrics_once || fail runs_metrics_once "$(cut -c1-12 $out/part.jsonl | tr '\n' ' ') $(why part)"
mkfifo $out/fifo; ci/limit.sh 60 $build/make_arith $out/fifo 3 >$out/make.log 2>&1; code=$?
[ $code -eq 1 ] && [ -p $out/fifo ] && grep -q 'is not a regular file' $out/make.log && ok runs_make_arith_fifo || fail runs_make_arith_fifo "exit code $code: $(tail -n 1 $out/make.log)"
(ulimit -f 1; ci/limit.sh 60 $build/make_arith $out/much.jsonl 3000 >$out/make.log 2>&1); code=$?
[ $code -eq 1 ] && grep -q 'File too large' $out/make.log && ! ls $out/much.jsonl* >/dev/null 2>&1 && ok runs_make_arith_limit || fail runs_make_arith_limit "exit code $code: $(tail -n 1 $out/make.log)"
limited() { (ulimit -f $1; shift; run limit "$@"); }
limited 4 --metrics_path $out/limit.jsonl --max_steps 2000000; code=$? # of what is kept then the limit has no room either
[ $code -eq 1 ] && grep -q '^notice: a checkpoint could not be written either: .*File too large' $out/limit.log && grep -q '^error: cannot write .*limit.jsonl: File too large' $out/limit.log && ok runs_metrics_limit || fail runs_metrics_limit "exit code $code: $(tail -n 1 $out/limit.log)"
fresh limited_async; latest limited_async 2
(ulimit -f 80; run limited_async --max_steps 6 --save_steps 1 --async_save --ring_attn_size 2 --load_checkpoint); code=$?
[ $code -eq 1 ] && grep -qE '^error: .*shard-0000[12]-of-00002.safetensors.*File too large' $out/limited_async.log && [ "$(cat $(ckpt limited_async)/latest)" = global_step2 ] && [ -z "$(ls -d $(ckpt limited_async)/*.tmp 2>/dev/null)" ] && ok runs_async_limit || fail runs_async_limit "exit code $code: $(names $(ckpt limited_async)) $(why limited_async)"
run limited_async --max_steps 6 --load_checkpoint && equal limited_async six && ok runs_async_limit_goes_on || fail runs_async_limit_goes_on "$(why limited_async)"
fresh limit; latest limit 2
limited 8 --max_steps 6 --save_steps 1 --load_checkpoint; code=$?
[ $code -eq 1 ] && grep -q '^error: .*File too large' $out/limit.log && [ "$(names $(ckpt limit))" = "global_step2 global_step4 global_step6 latest " ] && ok runs_checkpoint_limit || fail runs_checkpoint_limit "exit code $code, $(names $(ckpt limit)): $(tail -n 1 $out/limit.log)"
run limit --max_steps 6 --load_checkpoint && equal limit six && ok runs_limit_goes_on || fail runs_limit_goes_on "$(why limit)"
# streams that were closed, and one that nobody reads
$build/train_sft $base --save_path $out/closed --max_steps 6 --save_steps 2 >&- 2>&- <&-; code=$?
[ $code -eq 0 ] && equal closed six && cmp -s $(ckpt closed)/global_step6/optimizer.safetensors $(ckpt six)/global_step6/optimizer.safetensors && ok runs_closed_streams || fail runs_closed_streams "exit code $code"
{ $build/train_sft $base --save_path $out/piped --max_steps 6 2>&1; echo $? > $out/piped.code; } | true
[ "$(cat $out/piped.code)" = 1 ] && equal piped six && ok runs_closed_pipe || fail runs_closed_pipe "exit code $(cat $out/piped.code)"

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
