#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# train_ppo and what gives it rewards over HTTP: the rule, computed by a server, gives the rule's weights; every way a server
# can fail gives one sentence.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_reward
rm -rf $out; mkdir -p $out
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }

build/make_arith $out/arith.jsonl 600 5 >/dev/null
shape="--packing_samples --max_len 210 --pack_len 420 --num_hidden_layers 1 --cell 16 --hidden_size 64 --num_attention_heads 4 --logging_steps 1000"
build/train_sft --dataset $out/arith.jsonl --input_key question --output_key answer $shape --train_batch_size 16 --max_steps 300 --learning_rate 5e-3 --save_path $out/sft >$out/sft.log 2>&1 || fail reward_sft "$(tail -n 1 $out/sft.log)"
base="--prompt_data $out/arith.jsonl --input_key question --label_key answer --prompt_max_len 160 --generate_max_len 48 --rollout_batch_size 12 --n_samples_per_prompt 2
      --train_batch_size 12 --max_steps 6 --advantage_estimator rloo --temperature 0.5 --max_samples 60"
# run NAME OPTIONS...
run() { local name=$1; shift; ci/limit.sh 240 build/train_ppo $shape --micro_train_batch_size 4 --pretrain $out/sft --lr_scheduler constant --warmup_steps 0 --actor_learning_rate 2e-4 --critic_learning_rate 1e-3 --save_path $out/$name --ckpt_path $out/$name/ckpt --metrics_path $out/$name.jsonl $base "$@" >$out/$name.log 2>&1; }

# a server of its own for every test: serve MODE [N] sets url and server
serve() {
    rm -f $out/port
    build/reward_server_for_tests $out/port "$@" & server=$!
    for _ in $(seq 1 200); do [ -s $out/port ] && break; sleep 0.02; done
    url=http://127.0.0.1:$(cat $out/port)/reward
}
stop() { kill $server 2>/dev/null; wait $server 2>/dev/null; }

# ---- the rule, here and there ----
run rule --reward_rule last_number || fail reward_rule "$(tail -n 1 $out/rule.log)"
awk -F'"reward": ' '{ sum += $2 } END { exit !(sum > 0) }' $out/rule.jsonl && ok reward_seen || fail reward_seen "no text was answered rightly, so nothing is tested"
export http_proxy=http://127.0.0.1:9 # nobody listens there
for world in "--ring_attn_size 1" "--ring_attn_size 4" "--ring_attn_size 2 --data_parallel_size 2"; do
    serve rule
    if ! run server --remote_rm_url $url $world; then fail "reward_server $world" "$(tail -n 1 $out/server.log)"
    elif ! cmp -s $out/server/model.safetensors $out/rule/model.safetensors; then fail "reward_server $world" "weights differ from those of the rule"
    elif [ "$(sed 's/, "generate_seconds.*//' $out/server.jsonl)" != "$(sed 's/, "generate_seconds.*//' $out/rule.jsonl)" ]; then fail "reward_server $world" "metrics differ from those of the rule"
    else ok "reward_server $world"; fi
    stop
done
serve busy 2
run busy --remote_rm_url $url --remote_rm_backoff 0.01 --ring_attn_size 2 && cmp -s $out/busy/model.safetensors $out/rule/model.safetensors && ok reward_busy_twice || fail reward_busy_twice "$(tail -n 1 $out/busy.log)"
stop
# two servers and the rule: three times the reward
serve rule
reward() { sed -nE '1s/.*"reward": ([0-9.e-]*).*/\1/p' $out/$1.jsonl; }
wide="--rollout_batch_size 48 --train_batch_size 96 --max_steps 1"
run thrice --remote_rm_url $url,$url --reward_rule last_number $wide && run once --reward_rule last_number $wide || fail reward_added "$(tail -n 1 $out/thrice.log)"
echo "$(reward thrice) $(reward once)" | awk '{ d = $1 - 3 * $2; exit !($2 > 0 && d < 1e-12 && d > -1e-12) }' && ok reward_added || fail reward_added "$(reward thrice) is not three times $(reward once)"
stop

# ---- a server that dies: what was trained is kept, and the run goes on from it ----
serve gone 2
run gone --remote_rm_url $url --remote_rm_retries 1 --remote_rm_backoff 0.01 --ring_attn_size 2
code=$?
stop
if [ $code -eq 0 ] || ! grep -q '^error: .*HTTP status 500' $out/gone.log; then fail reward_gone "exit code $code: $(tail -n 1 $out/gone.log)"
elif [ -e $out/gone/model.safetensors ]; then fail reward_gone "wrote a model all the same"
else ok reward_gone; fi
run gone --reward_rule last_number --load_checkpoint --ring_attn_size 4 && cmp -s $out/gone/model.safetensors $out/rule/model.safetensors && ok reward_gone_resumed || fail reward_gone_resumed "$(tail -n 1 $out/gone.log)"

# ---- what must be refused: one sentence, a code, nothing written ----
refuse() { # MODE PATTERN OPTIONS...
    local mode=$1 pattern=$2 code lines; shift 2
    serve $mode
    rm -rf $out/refused
    run refused --remote_rm_url $url --remote_rm_retries 1 --remote_rm_backoff 0.01 "$@"
    code=$?
    stop
    lines=$(grep -c '^error: ' $out/refused.log)
    if [ $code -eq 0 ] || [ $code -ge 124 ]; then fail "refuse_$mode" "exit code $code"
    elif [ "$lines" -ne 1 ] || ! grep '^error: ' $out/refused.log | grep -qE "$pattern"; then fail "refuse_$mode" "$(tail -n 2 $out/refused.log | cut -c1-300)"
    elif [ -e $out/refused/model.safetensors ]; then fail "refuse_$mode" "wrote a model all the same"
    else ok "refuse_$mode"; fi
}
refuse slow 'no answer in 2 tries over [0-9.]+ s \(Timeout was reached\)' --remote_rm_timeout 0.2 --ring_attn_size 2
refuse short '23 rewards for 24 texts' --ring_attn_size 4
refuse long '25 rewards for 24 texts'
refuse null 'rewards\[1\] is null' --ring_attn_size 2
refuse text 'rewards\[1\] is text'
refuse nan 'not JSON from byte 16 .*: NaN' --ring_attn_size 2
refuse garbage 'not JSON from byte 0 of 17'
refuse empty 'not JSON .*\(empty\)'
refuse keyless '"rewards" is missing'
refuse twice 'has the key "rewards" twice'
refuse behind 'not JSON from byte 17 of 25 on: and more'
refuse mail 'does not speak HTTP .*; check the host and the port' --ring_attn_size 2
refuse endless 'longer than'
refuse 500 'HTTP status 500 in 2 tries, with: out of order' --ring_attn_size 2
refuse 404 'HTTP status 404 in 1 try,'
for mode in "infinite inf" "huge 1e+308"; do # the sum of two of the latter is no number
    serve ${mode% *}
    base="${base/rollout_batch_size 12/rollout_batch_size 3}" run refused --remote_rm_url $url --train_batch_size 6; code=$?
    [ $code -eq 1 ] && grep -qF "rewards[1] is ${mode#* }, which cannot be trained on" $out/refused.log && [ ! -e $out/refused/model.safetensors ] && ok "refuse_${mode% *}" || fail "refuse_${mode% *}" "exit code $code: $(tail -n 1 $out/refused.log)"
    stop
done
# nobody there: the port of a server that is gone
run refused --remote_rm_url $url --remote_rm_retries 2 --remote_rm_backoff 0.01 --data_parallel_size 2
[ $? -eq 1 ] && grep -qE '^error: reward server [^ ]+: no answer in 3 tries over 0\.[0-9] s \(.*onnect.*\); start it, correct remote_rm_url, .*\(SEQPAR_ERR_TIMEOUT\)' $out/refused.log && grep -qE '^reward server [^ ]+: .*onnect.*; try 3 of 3 in 0.02 s' $out/refused.log && ok refuse_nobody || fail refuse_nobody "$(tail -n 1 $out/refused.log)"
# who may ask is nobody else's business
run refused --remote_rm_url "${url/127/somebody:secret@127}" --remote_rm_retries 0
[ $? -eq 1 ] && grep -q "^error: reward server $url: no answer" $out/refused.log && ! grep -q 'somebody\|secret' $out/refused.log && ok refuse_password || fail refuse_password "$(tail -n 1 $out/refused.log)"
# a name server that does not answer is not waited for longer than a server; both names are said
if ${CC:-cc} -shared -fPIC verify/support/silent_names.c -o $out/silent_names.so -ldl 2>/dev/null; then
    for name in silent unknown; do
        rm -rf $out/refused
        LD_PRELOAD=$out/silent_names.so ci/limit.sh 120 build/train_ppo $shape --pretrain $out/sft --save_path $out/refused $base --remote_rm_url http://$name.host/x --remote_rm_timeout 0.3 --remote_rm_retries 1 --remote_rm_backoff 0.01 >$out/refused.log 2>&1
        [ $? -eq 1 ] && grep -qE "^error: reward server http://$name.host/x: no answer in 2 tries" $out/refused.log && ok "refuse_name $name" || fail "refuse_name $name" "$(tail -n 1 $out/refused.log)"
    done
else echo "skip refuse_name: a library cannot be made here"; fi
# Ctrl-C ends the waiting
ci/limit.sh 120 build/train_ppo $shape --pretrain $out/sft --save_path $out/waiting $base --remote_rm_url $url --remote_rm_retries 1000 --ring_attn_size 2 >$out/waiting.log 2>&1 & waiting=$!
for _ in $(seq 1 200); do grep -q '^ranks: ' $out/waiting.log && break; sleep 0.02; done
sleep 1
kill -INT $waiting
wait $waiting; code=$?
[ $code -eq 130 ] && grep -q "^interrupted before the first step" $out/waiting.log && ok reward_interrupted || fail reward_interrupted "exit code $code: $(tail -n 1 $out/waiting.log)"
# so does a signal while a server is silent, and the checkpoint is that of the rollout before
for rollouts in 0 2; do
    serve silent $rollouts
    ci/limit.sh 120 build/train_ppo $shape --micro_train_batch_size 4 --pretrain $out/sft --lr_scheduler constant --warmup_steps 0 --actor_learning_rate 2e-4 --critic_learning_rate 1e-3 --save_path $out/silent$rollouts $base --remote_rm_url $url --ring_attn_size 2 >$out/silent.log 2>&1 & waiting=$!
    for _ in $(seq 1 400); do grep -q '^ranks: ' $out/silent.log && { [ $rollouts = 0 ] || grep -q '^rollout' $out/silent.log; } && break; sleep 0.02; done
    sleep 1
    kill -TERM $waiting; began=$SECONDS
    wait $waiting; code=$?
    stop
    said="^interrupted before the first step"; [ $rollouts = 0 ] || said="^interrupted after step 4; go on with --load_checkpoint"
    [ $code -eq 143 ] && [ $((SECONDS - began)) -le 5 ] && grep -q "$said" $out/silent.log && ok "reward_silent after $rollouts" || fail "reward_silent after $rollouts" "exit code $code after $((SECONDS - began)) s: $(tail -n 1 $out/silent.log)"
done
run silent2 --reward_rule last_number --load_checkpoint --ckpt_path $out/silent2/checkpoints_ppo && cmp -s $out/silent2/model.safetensors $out/rule/model.safetensors && ok reward_silent_goes_on || fail reward_silent_goes_on "$(tail -n 1 $out/silent2.log)"
for bad in reward.py "$url," ftp://127.0.0.1/x; do
    run refused --remote_rm_url $bad
    [ $? -eq 2 ] && grep -qE '^error: remote_rm_url holds' $out/refused.log && ok "refuse_url $bad" || fail "refuse_url $bad" "$(tail -n 1 $out/refused.log)"
done
for bad in http://127.0.0.1:99999/x http://127.0.0.1:0/x http://somebody:secret@127.0.0.1:port/x; do
    run refused --remote_rm_url $bad
    [ $? -eq 2 ] && grep -qE "^error: remote_rm_url holds 'http://127.*, whose port is no number from 1 to 65535" $out/refused.log && ok "refuse_port $bad" || fail "refuse_port $bad" "$(tail -n 1 $out/refused.log)"
done
for bad in $'http://127.0.0.1:9/\e[31m' 'http://127.0.0.1:9/a b' 'http://'; do
    run refused --remote_rm_url "$url,$bad"
    [ $? -eq 2 ] && grep -qE "^error: remote_rm_url holds 'http://.*, which is no URL" $out/refused.log && ok "refuse_malformed $(echo "$bad" | tr -d '\033')" || fail "refuse_malformed" "$(tail -n 1 $out/refused.log)"
done

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
