#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Texts for prompts: the same on any ranks, in slices, and where a run was killed and went on; what they are worth, by other ways;
# training data that is made of them, against a second implementation; the recipes, killed; what is refused.
cd "$(dirname "$0")/../.." || exit 1
. verify/support/rows.sh
export S=$PWD
export B=$S/build F=$S/build/test_generate/made R="--omp_threads 1 --train_batch_size 8 --max_steps 90 --max_epochs 90 --learning_rate 1e-2 --warmup_steps 0"
out=$S/build/test_generate
rm -rf "$out"; mkdir -p "$F"
check() { local name=$1 why=$2; shift 2; if "$@"; then ok "$name"; else fail "$name" "$why"; fi; } # NAME WHY COMMAND...
export OMP_WAIT_POLICY=passive # a program need not start itself again
P=$(ci/python_with.sh tokenizers jinja2) || P=
export PYTHON=$P
tiny_model generate
cd "$out" || exit 1
"$B/make_arith" prompts.jsonl 23 9 >/dev/null
# two of them are alike, and one is a byte
{ cat prompts.jsonl; head -n 1 prompts.jsonl; echo '{"question": "7", "answer": "7"}'; } >more.jsonl && mv more.jsonl prompts.jsonl
tuned() { "$B/$1" --dataset "$F/arith.jsonl" --pretrain "$F/bytes" --omp_threads 1 --train_batch_size 8 --max_steps 3 --learning_rate 1e-2 --warmup_steps 0 --save_path "$2" "${@:3}" >"$2.log" 2>&1 || fail "generate_made $2" "$(tail -n 1 "$2.log")"; }
tuned train_rm rm --prompt_key question --chosen_key answer --rejected_key wrong
tuned train_rm rm2 --prompt_key question --chosen_key answer --rejected_key wrong --seed 7
tuned train_sft adapters --input_key question --output_key answer --lora_rank 3

base="--omp_threads 1 --dataset prompts.jsonl --input_key question --pretrain $F/bytes --prompt_max_len 190 --logging_steps 1000"
few="--max_new_tokens 31"
rule="--label_key answer --reward_rule last_number"
# made NAME OPTIONS...: NAME.jsonl
made() { local name=$1; shift; "$S/ci/limit.sh" 120 "$B/generate" $base $few --output_path "$name.jsonl" "$@" >"$name.out" 2>"$name.log"; }
same() { cmp -s "$1.jsonl" "$2.jsonl"; }
lines() { wc -l <"$1"; }

# ---- the same texts on any ranks ----
n=0
for way in "" "$rule --n_samples_per_prompt 3" "--greedy_sampling" "--temperature 0.7 --top_p 0.9 --top_k 17 --seed 3" "--reward_pretrain rm --n_samples_per_prompt 2" "--bf16" "--adapter_name_or_path adapters" "--device reference --max_samples 5" "--enable_csft"; do
    n=$((n + 1)) one=one$n
    made $one $way || fail "generate_run $way" "$(tail -n 1 $one.log)"
    for world in "--data_parallel_size 3 --micro_batch_size 1" "--ring_attn_size 2 --data_parallel_size 2 --zero_stage 3" "--ring_attn_size 5 --zero_stage 0 --micro_train_batch_size 7"; do
        if made world $way $world && same world $one && cmp -s world.out <(sed "s/$one/world/" $one.out); then ok "generate_world $way $world"; else fail "generate_world $way $world" "$(tail -n 1 world.log)"; fi
    done
    rm -f world.*
done
check generate_ways "options change no text" [ "$(cat one[1-9].jsonl | sed 's/"input".*"output"//; s/,"reward.*//' | md5sum)" != "" ] && for a in 1 3 4 6 7; do for b in 1 3 4 6 7; do [ $a -ge $b ] || check "generate_differs $a $b" "one$a and one$b are alike" eval "! same one$a one$b"; done; done
texts_of() { sed -E 's/,"reward":[-0-9.e+]*//' "$1.jsonl"; }
# rewards are beside the texts; the first of three texts has another number than an only one
check generate_rewards_beside "texts with a reward are others" [ "$(texts_of one5 | head -n 1)" != "" ]
made plain2 --n_samples_per_prompt 2; check generate_scored "a reward model changes the texts" [ "$(texts_of one5)" = "$(cat plain2.jsonl)" ]
check generate_counts "$(lines one2.jsonl) lines of 25 prompts x 3" [ "$(lines one2.jsonl)" = 75 ]
check generate_alike_prompts "texts of one prompt under two numbers are alike" eval '[ "$(head -n 1 one1.jsonl)" != "$(tail -n 2 one1.jsonl | head -n 1)" ] && [ "$(head -n 1 one3.jsonl)" = "$(tail -n 2 one3.jsonl | head -n 1)" ]'
check generate_template "the prompt is not in its form: $(head -n 1 one1.jsonl)" grep -q '^{"input":"User: .*\\nAssistant: ","output":' one1.jsonl
check generate_csft_prompt "$(head -n 1 one9.jsonl)" eval '[ "$(grep -c "Assistant: <rm_score>: 5.00 \",\"output\":" one9.jsonl)" = 25 ] && ! same one9 one1'
# a prompt is known by its own text alone: those of a template that writes the same are the same
sed -E 's/"question": "([^"]*)"/"question": "User: \1\\nAssistant: "/' prompts.jsonl >forms.jsonl
made formed --dataset forms.jsonl --input_template '{}'; check generate_formed "$(tail -n 1 formed.log)" same formed one1

# ---- slices of the prompts are the whole ----
rm -f all.jsonl; for i in 0 1 2; do made slice --iter $i --rollout_batch_size 9 --n_samples_per_prompt 2 --data_parallel_size 2 || fail "generate_iter $i" "$(tail -n 1 slice.log)"; cat slice.jsonl >>all.jsonl; done
check generate_slices "$(lines all.jsonl) lines" cmp -s all.jsonl plain2.jsonl

# ---- what texts are worth ----
python3 - one2.jsonl prompts.jsonl <<'JUDGE' && ok generate_rule || fail generate_rule "a reward is not that of the last number"
import json, re, sys
rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
right = [re.findall(r"\d+", json.loads(line)["answer"])[-1] for line in open(sys.argv[2], encoding="utf-8")]
for i, row in enumerate(rows):
    found = re.findall(r"[0-9]+", row["output"])
    assert row["reward"] == (1 if found and found[-1] == right[i // 3] else 0), (i, row)
JUDGE
# a reward model's: what train_rm says of the same texts; less the mean, by the deviation that its folder says; of two the sum
grep -v '"output":""' one5.jsonl | python3 -c '
import json, sys
rows = [json.loads(line) for line in sys.stdin]
for row in rows:
    if row["stopped"] and "\ufffd" not in row["output"]: print(json.dumps({"prompt": row["input"], "chosen": row["output"], "rejected": "x", "reward": row["reward"]}))' >judged.jsonl
"$B/train_rm" --dataset judged.jsonl --eval_dataset judged.jsonl --prompt_key prompt --input_template '{}' --pretrain rm --max_steps 0 --omp_threads 1 --max_len 400 --save_path judged --metrics_path judged.m >judged.log 2>&1
python3 - judged.jsonl judged.m rm/config.json <<'JUDGE' && ok generate_reward_model || fail generate_reward_model "rewards are not train_rm's: $(tail -n 1 judged.log) $(tail -n 1 judged.m)"
import json, sys
rows = [json.loads(line)["reward"] for line in open(sys.argv[1], encoding="utf-8")]
chosen = [json.loads(line)["eval_chosen_reward"] for line in open(sys.argv[2], encoding="utf-8")][-1]
config = json.load(open(sys.argv[3], encoding="utf-8"))
assert len(rows) > 4 and abs(sum(rows) / len(rows) * config["std"] + config["mean"] - chosen) < 1e-5, (len(rows), sum(rows) / len(rows), config["mean"], config["std"], chosen)
JUDGE
made second --reward_pretrain rm2 --n_samples_per_prompt 2 && made both --reward_pretrain rm,rm2 --n_samples_per_prompt 2 --data_parallel_size 2
cp -r rm raw; python3 -c 'import json; c = json.load(open("raw/config.json")); c["mean"], c["std"] = 0, 1; json.dump(c, open("raw/config.json", "w"))'
made raw --reward_pretrain raw --n_samples_per_prompt 2
python3 - one5.jsonl second.jsonl both.jsonl raw.jsonl rm/config.json <<'JUDGE' && ok generate_reward_models || fail generate_reward_models "$(tail -n 1 both.log)"
import json, sys
one, second, both, raw = ([json.loads(line)["reward"] for line in open(path, encoding="utf-8")] for path in sys.argv[1:5])
config = json.load(open(sys.argv[5], encoding="utf-8"))
assert len(set(one)) > 9 and config["std"] > 0 and config["std"] != 1
for a, b, c, d in zip(one, second, both, raw):
    assert a + b == c and abs(a - (d - config["mean"]) / config["std"]) < 1e-12, (a, b, c, d)
JUDGE
# a server's
rm -f port; "$B/reward_server_for_tests" port rule >server.log 2>&1 & server=$!
for i in $(seq 100); do [ -s port ] && break; sleep 0.1; done
made served --n_samples_per_prompt 3 --label_key answer --remote_rm_url "http://127.0.0.1:$(cat port)/reward" --data_parallel_size 2
check generate_server "$(tail -n 1 served.log)" same served one2
kill $server 2>/dev/null; wait $server 2>/dev/null
rm -f port; "$B/reward_server_for_tests" port gone 1 >server.log 2>&1 & server=$!
for i in $(seq 100); do [ -s port ] && break; sleep 0.1; done
gone() { made gone --n_samples_per_prompt 3 --label_key answer --remote_rm_url "http://127.0.0.1:$(cat port)/reward" --remote_rm_retries 0 --micro_batch_size 2; }
! gone && [ -s gone.jsonl.part ] && [ ! -e gone.jsonl ] && grep -q '^stopped after [1-9][0-9]* of 25 prompts; go on with --resume$' gone.log && grep -q '^error: reward server ' gone.log && ok generate_server_gone || fail generate_server_gone "$(tail -n 2 gone.log)"
kill $server 2>/dev/null; wait $server 2>/dev/null

# ---- training data of texts and rewards, against a second implementation ----
for kind in rs iter_dpo csft "csft --normalize_reward --reward_template {reward}|{input}|{reward}"; do
    set -f; made processed --n_samples_per_prompt 2 --reward_pretrain rm --post_processor $kind --ring_attn_size 2; set +f
    python3 - one5.jsonl processed.jsonl $kind <<'SECOND' && ok "generate_processor $kind" || fail "generate_processor $kind" "$(tail -n 1 processed.log)"
import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
made = [json.loads(line) for line in open(sys.argv[2], encoding="utf-8")]
kept = [row for row in rows if row["output"]]
groups = {}
for row in kept:
    groups.setdefault(row["input"], []).append(row)
kind = sys.argv[3]
wanted = []
if kind == "rs":
    for of in groups.values():
        best = max(of, key=lambda row: row["reward"])
        wanted.append({"input": best["input"], "output": best["output"], "reward": best["reward"]})
elif kind == "iter_dpo":
    for prompt, of in groups.items():
        high = low = of[0]
        for row in of[1:]:
            if row["reward"] > high["reward"]:
                high = row
            elif row["reward"] < low["reward"]:
                low = row
        wanted.append({"prompt": prompt, "chosen": high["output"], "chosen_reward": high["reward"],
                       "rejected": low["output"], "rejected_reward": low["reward"]})
else:
    all_of_them = [row["reward"] for row in rows]
    mean, deviation = statistics.fmean(all_of_them), statistics.stdev(all_of_them)
    normal = "--normalize_reward" in sys.argv
    template = sys.argv[-1] if normal else "{input} <rm_score>: {reward} "
    for row in kept:
        reward = (row["reward"] - mean) / deviation if normal else row["reward"]
        wanted.append({"input": template.replace("{reward}", f"{reward:.2f}").replace("{input}", row["input"]),
                       "output": row["output"], "reward": reward})
assert len(made) == len(wanted) and len(groups) == 24, (len(made), len(wanted), len(groups))
for a, b in zip(made, wanted):
    assert list(a) == list(b), (a, b)
    for key in b:
        assert abs(a[key] - b[key]) < 1e-9 if isinstance(b[key], float) else a[key] == b[key], (a, b)
SECOND
done
made rs --n_samples_per_prompt 2 --reward_pretrain rm --post_processor rs && made best --best_of_n 2 --reward_pretrain rm && same best rs && ok generate_best_of_n || fail generate_best_of_n "$(tail -n 1 best.log)"

# ---- a run that was ended goes on: anywhere, with the same bytes ----
more="$rule --n_samples_per_prompt 3 --micro_batch_size 1"
made one2.killed $more --max_samples 25 && same one2.killed one2 || fail generate_whole "$(tail -n 1 one2.killed.log)"
begun() { # SIGNAL: at least a group is there, and not all of them; a run that was faster is begun again
    local pid i try
    for try in $(seq 20); do
        rm -f killed.*
        "$B/generate" $base $few --output_path killed.jsonl $more >killed.out 2>&1 & pid=$!
        for i in $(seq 2000); do [ -s killed.jsonl.part ] && [ "$(lines killed.jsonl.part)" -gt 3 ] && break; [ ! -e killed.jsonl ] || break; sleep 0.002; done
        kill -$1 $pid 2>/dev/null; wait $pid; code=$?
        [ ! -e killed.jsonl ] && return
    done
}
for end in KILL INT TERM; do
    begun $end 2>/dev/null
    [ $end = KILL ] || grep -q '^interrupted after [1-9][0-9]* of 25 prompts; go on with --resume$' killed.out && [ -s killed.jsonl.part ] && [ ! -e killed.jsonl ] && [ $code -gt 128 ] || fail "generate_ended $end" "exit code $code: $(tail -n 1 killed.out)"
    cp killed.jsonl.part kept.part
    # torn within a line, within a group, behind the header, within it
    for torn in whole line group header begun; do
        case $torn in
        whole) cp kept.part killed.jsonl.part ;;
        line) { head -n 4 kept.part; printf '{"input":"User: to'; } >killed.jsonl.part ;;
        group) head -n 6 kept.part >killed.jsonl.part ;;
        header) head -n 1 kept.part >killed.jsonl.part ;;
        begun) head -c 9 kept.part >killed.jsonl.part ;;
        esac
        rm -f killed.jsonl
        if made killed $more --resume --data_parallel_size 3 && same killed one2 && [ ! -e killed.jsonl.part ]; then ok "generate_resume $end $torn"; else fail "generate_resume $end $torn" "$(tail -n 1 killed.log)"; fi
    done
done
made late $more --resume && same late one2 && grep -q '^notice: there is nothing to resume in late.jsonl.part; generation starts with the first prompt$' late.log && ok generate_resume_nothing || fail generate_resume_nothing "$(tail -n 1 late.log)"
# killed when the last text was there
{ cat kept.part | head -n 1; cat one2.jsonl; } >done.jsonl.part; made done $more --resume --post_processor rs && [ "$(lines done.jsonl)" -le 24 ] && [ ! -e done.jsonl.part ] && ok generate_resume_end || fail generate_resume_end "$(tail -n 1 done.log)"
resume_refused() { # NAME REGEX OPTIONS...
    local name=$1 regex=$2; shift 2
    cp kept.part killed.jsonl.part; rm -f killed.jsonl
    if ! made killed $more "$@" && [ "$(grep -c '^error: ' killed.log)" = 1 ] && grep -qE "^error: $regex" killed.log && cmp -s kept.part killed.jsonl.part && [ ! -e killed.jsonl ]; then ok "generate_refuse_$name"; else fail "generate_refuse_$name" "$(tail -n 1 killed.log)"; fi
}
was="killed.jsonl.part was started with" fix="use the same to go on, or remove the file to start again$"
resume_refused again "killed.jsonl.part holds [0-9]+ texts of a run that did not end; go on with --resume, or remove the file to start again$"
sed 's/plums/pears/' prompts.jsonl >changed.jsonl
resume_refused prompts "$was prompts [0-9a-f]{16}, but this run has [0-9a-f]{16}; $fix" --resume --dataset changed.jsonl
resume_refused fewer "$was prompts .*; $fix" --resume --max_samples 24
cp -r "$F/bytes" other; printf '\x01' | dd of=other/model.safetensors bs=1 seek=$(($(wc -c <other/model.safetensors) - 3)) conv=notrunc 2>/dev/null
resume_refused a_weight "$was model .*; $fix" --resume --pretrain other
resume_refused adapters "$was adapters .*; $fix" --resume --adapter_name_or_path adapters
resume_refused reward "$was reward models .*; $fix" --resume --reward_pretrain rm
resume_refused seed "$was --seed 42, but this run has 43; $fix" --resume --seed 43
resume_refused texts "$was --n_samples_per_prompt 3, but this run has 2; $fix" --resume --n_samples_per_prompt 2
resume_refused length "$was --max_new_tokens 31, but this run has 20; $fix" --resume --max_new_tokens 20
resume_refused temperature "$was --temperature 1, but this run has 0.5; $fix" --resume --temperature 0.5
resume_refused top_p "$was --top_p 1, but this run has 0.5; $fix" --resume --top_p 0.5
resume_refused top_k "$was --top_k 0, but this run has 5; $fix" --resume --top_k 5
resume_refused dtype "$was --param_dtype auto, but this run has bf16; $fix" --resume --bf16
resume_refused device "$was --device cpu, but this run has reference; $fix" --resume --device reference
resume_refused cell "$was --cell 0, but this run has 16; $fix" --resume --cell 16
resume_refused iter "$was --iter -1, but this run has 0; $fix" --resume --iter 0
resume_refused template "$was prompts .*; $fix" --resume --input_template 'Q: {} A: '
cp kept.part whole.part; echo 'texts of somebody' >kept.part; resume_refused foreign "killed.jsonl.part exists and was not written by generate; move it away, or give another --output_path$" --resume; resume_refused foreign_anew "killed.jsonl.part exists and was not written by generate" ; cp whole.part kept.part
{ head -n 4 whole.part; echo '{"input": 3}'; sed -n 5,6p whole.part; } >kept.part
cp kept.part killed.jsonl.part; ! made killed $more --resume && grep -q '^error: killed.jsonl.part: line 4 was not written by generate; remove the file to start again (SEQPAR' killed.log && [ ! -e killed.jsonl ] && ok generate_refuse_line || fail generate_refuse_line "$(tail -n 1 killed.log)"
# two runs on one file
exec 9>>held.jsonl.part; flock 9; ! made held && grep -q '^error: held.jsonl.part is being written by another run; wait for it, or give another --output_path$' held.log && ok generate_refuse_held || fail generate_refuse_held "$(tail -n 1 held.log)"; exec 9>&-

# ---- refused ----
refuse() { # NAME REGEX OPTIONS...
    local name=$1 regex=$2 code; shift 2
    rm -f refused.jsonl*
    "$S/ci/limit.sh" 60 "$B/generate" $base $few --output_path refused.jsonl "$@" >refused.out 2>refused.log; code=$?
    if [ $code = ${want:-2} ] && [ "$(grep -c '^error: ' refused.log)" = 1 ] && grep -qE "^error: $regex" refused.log && [ ! -e refused.jsonl ] && [ ! -e refused.jsonl.part ]; then ok "generate_refuse_$name"; else fail "generate_refuse_$name" "exit code $code: $(tail -n 1 refused.log)"; fi
}
refuse best_of_n '--best_of_n 2 needs a reward to choose by; give --reward_pretrain FOLDER, --remote_rm_url URL or --reward_rule last_number \(or --n_samples_per_prompt, for all of the texts\)$' --best_of_n 2
refuse both_counts '--best_of_n and --n_samples_per_prompt both say how many texts a prompt has; leave one of them out$' --best_of_n 1 --n_samples_per_prompt 1
refuse no_texts '--n_samples_per_prompt is 0, but it must be a whole number from 1' --n_samples_per_prompt 0
refuse greedy_texts '--greedy_sampling would write the same text 2 times; leave it out, or ask for one text a prompt$' --greedy_sampling --n_samples_per_prompt 2
for option in "temperature 0.5" "top_p 0.5" "top_k 5"; do refuse "greedy_${option% *}" "--greedy_sampling takes the most probable token, whatever --${option% *} is; leave one of the two out$" --greedy_sampling --$option; done
refuse temperature '--temperature is 0, but it must be a number above 0' --temperature 0
refuse processor '--post_processor rs needs rewards' --post_processor rs --n_samples_per_prompt 2
refuse processor_csft '--post_processor csft needs rewards' --post_processor csft
refuse processor_name '--post_processor is best, but it must be one of rs, csft, iter_dpo$' --post_processor best $rule
for kind in rs iter_dpo; do refuse "one_text_$kind" "--post_processor $kind compares the texts of a prompt, but each prompt has one; give --n_samples_per_prompt 2 or more$" --post_processor $kind $rule; done
refuse normalize '--normalize_reward acts only with --post_processor csft, which writes rewards into prompts' --normalize_reward $rule
refuse form '--reward_template acts only with --post_processor csft, which writes rewards into prompts' --reward_template '{input}{reward}' $rule
refuse form_input "--reward_template is '\{reward\}'; it must hold \{input\} and \{reward\}$" --reward_template '{reward}' --post_processor csft $rule
refuse form_reward "--reward_template is '\{input\}'; it must hold \{input\} and \{reward\}$" --reward_template '{input}' --post_processor csft $rule
refuse csft_prompt '--csft_prompt acts only with --enable_csft; add that, or leave it out$' --csft_prompt x
refuse slice '--rollout_batch_size is the number of prompts of one --iter; add that, or leave it out$' --rollout_batch_size 3
refuse iter '--iter 3 skips the first 27 prompts, but there are only 25; give a smaller --iter$' --iter 3 --rollout_batch_size 9
refuse iter_next '--iter 5 skips the first 25 prompts, but there are only 25; give a smaller --iter$' --iter 5 --rollout_batch_size 5
refuse iter_below '--iter is -1, but it must be a whole number from 0' --iter -1
refuse rule_label 'reward_rule last_number compares with the right answer; name its key by --label_key$' --reward_rule last_number
refuse label_idle '--label_key names the right answer, which only --reward_rule and reward servers use; add one of them, or leave it out$' --label_key answer
sed 's/"answer"/"name": "none", "answer"/' prompts.jsonl >named.jsonl
refuse label_number 'named.jsonl:1: the right answer has no number' --label_key name --reward_rule last_number --dataset named.jsonl
want=1; "$B/generate" $base $few --output_path rm_name.jsonl --n_samples_per_prompt 2 --rm rm >rm_name.log 2>&1; check generate_rm "$(tail -n 1 rm_name.log)" same rm_name one5
refuse rm_folder '.*nowhere' --reward_pretrain nowhere
refuse no_head '.*there is no tensor "score.weight", so this is no reward model' --reward_pretrain "$F/bytes"; want=2
refuse scored "--eval_task rm is not supported, as texts are scored when they are generated; leave it out, and add --reward_pretrain to the command that generates$" --eval_task rm
refuse repetition '--repetition_penalty 1.1 is not supported: texts are sampled from the model.s own probabilities; leave it out$' --repetition_penalty 1.1
refuse trainer_option '--learning_rate is an option of sft,dpo,rm,kto,kd,prm; this is generate$' --learning_rate 1
refuse short 'nothing is left: all 25 are longer|.*prompt_max_len' --prompt_max_len 3
refuse template 'input_template must have \{\} once, in the place of the prompt' --input_template x
head -n 3 prompts.jsonl >kept.jsonl; cp kept.jsonl still.jsonl
refuse over_data '--output_path would overwrite kept.jsonl, which --dataset reads; give another --output_path$' --dataset kept.jsonl --output_path kept.jsonl
refuse over_model '--output_path would overwrite .*/model.safetensors, which --pretrain reads' --output_path "$F/bytes/model.safetensors"
refuse over_other '--output_path still.jsonl exists and was not written by generate; give another, or move it away$' --output_path still.jsonl
check generate_kept "what is somebody else's was written to" cmp -s still.jsonl kept.jsonl
refuse nowhere 'cannot open nowhere/x.part: No such file or directory; give another --output_path$' --output_path nowhere/x
mkdir folder; refuse folder '--output_path would write folder, but it exists and is not a regular file; move it away or give another --output_path$' --output_path folder
ln -s "$PWD/still.jsonl" linked.jsonl.part; refuse link 'cannot open linked.jsonl.part: it is a link; give another --output_path$' --output_path linked.jsonl
base_of=$base
base=${base_of/--dataset prompts.jsonl/}; refuse no_prompts 'no prompts; give --dataset FILE$'
base=${base_of/--pretrain $F\/bytes/}; refuse no_model 'no model; give --pretrain FOLDER$'
base=$base_of
"$B/generate" $base >refused.out 2>refused.log; grep -q '^error: no output file; give --output_path FILE$' refused.log && ok generate_refuse_no_output || fail generate_refuse_no_output "$(tail -n 1 refused.log)"
# a full disk: a sentence, nothing under the name, and it goes on
(ulimit -f 1; made full $more); code=$?
[ $code = 1 ] && grep -q '^error: cannot write full.jsonl.part: File too large; make room and go on with --resume' full.log && [ ! -e full.jsonl ] && made full $more --resume && same full one2 && ok generate_full || fail generate_full "exit code $code: $(tail -n 1 full.log)"

# ---- figures ----
made json $more --json; check generate_json "$(cat json.out)" grep -qE '^\{"prompts": 25, "texts": 75, "cut_off": [0-9]+, "lines": 75, "reward": [0-9.e-]+, "deviation": [0-9.e-]+\}$' json.out
made json_plain --json; check generate_json_plain "$(cat json_plain.out)" grep -qE '^\{"prompts": 25, "texts": 25, "cut_off": [0-9]+, "lines": 25\}$' json_plain.out
check generate_cut_off "$(cat json_plain.out)" [ "$(sed -E 's/.*"cut_off": ([0-9]+).*/\1/' json_plain.out)" = "$(grep -c '"stopped":false' json_plain.jsonl)" ]

# ---- OpenRLHF's command, and a tokenizer's words ----
"$B/seqpar" deepspeed --num_gpus 2 --module openrlhf.cli.batch_inference --eval_task generate_vllm --pretrain "$F/bytes" --bf16 --flash_attn --max_new_tokens 31 --prompt_max_len 190 --dataset prompts.jsonl --input_key question --temperature 1.0 --zero_stage 0 --tp_size 4 --enable_prefix_caching --max_num_seqs 64 --micro_batch_size 4 --seed 42 --output_path page.jsonl >page.log 2>&1
check generate_page "$(tail -n 1 page.log)" same page one6
"$B/seqpar" generate $base $few --output_path own.jsonl >own.log 2>&1; check generate_program "$(tail -n 1 own.log)" same own one1
with_words() {
    local words="--omp_threads 1 --dataset prompts.jsonl --input_key question --pretrain $F/words --prompt_max_len 190 $few $rule --n_samples_per_prompt 2"
    "$B/seqpar" --cache_dir . generate $words --apply_chat_template --output_path chat.jsonl >chat.log 2>&1
    check generate_chat "$(tail -n 1 chat.log) $(head -n 1 chat.jsonl)" eval 'grep -q "<|im_start|>user.n.*<|im_end|>.n<|im_start|>assistant.n\",\"output\":" chat.jsonl && [ "$(lines chat.jsonl)" = 50 ]'
    "$B/seqpar" --cache_dir . generate $words --enable_csft --csft_prompt ' great ' --output_path asked.jsonl >asked.log 2>&1
    check generate_asked "$(tail -n 1 asked.log)" eval '[ "$(grep -c "Assistant: great \",\"output\":" asked.jsonl)" = 50 ]'
    "$P" "$S/demos/prepare.py" --kind prompts --pretrain "$F/words" --dataset prompts.jsonl --input_key question --label_key answer --output plain.tokens >plain.log 2>&1
    "$P" "$S/demos/prepare.py" --kind prompts --pretrain "$F/words" --dataset prompts.jsonl --input_key question --label_key answer --csft_prompt 'great' --output great.tokens >great.log 2>&1
    check generate_tokens_counted "$(cat plain.log)" grep -q '^plain.tokens: prompts, 25 records read, 25 kept .* 0 fully masked;' plain.log
    refuse asked_not '--enable_csft is true, but plain.tokens was made with prompts without a reward to ask for \(--csft_prompt\); make it again' --pretrain "$F/words" --dataset plain.tokens --enable_csft
    refuse asked_other '--csft_prompt is good, but great.tokens was made with great; make it again' --pretrain "$F/words" --dataset great.tokens --enable_csft --csft_prompt good
    refuse text "prompts.jsonl is not a token file, but the model in .*words has a tokenizer, so prompts must be in one; make a token file and give it .*: python3 demos/prepare.py --kind prompts" --pretrain "$F/words"
    refuse tokens_kind '.*is of kind sft' --pretrain "$F/words" --dataset sft.tokens
}
if [ -z "$P" ]; then skip generate_words "no python3 here has tokenizers and jinja2"; else
    "$P" "$S/demos/prepare.py" --kind sft --pretrain "$F/words" --dataset prompts.jsonl --input_key question --output_key answer --output sft.tokens >sft.log 2>&1
    with_words
fi

# ---- the recipes: to their end, and killed on the way ----
export MODEL=$F/bytes PROMPTS=prompts.jsonl REWARD="--reward_pretrain rm" ROUNDS=2 N=3 BATCH=12 WANTED='<rm_score>: 1.00' BUILD=$B
export GENERATE="--max_new_tokens 19 --prompt_max_len 190 --micro_batch_size 1" TRAIN="--max_len 400 --train_batch_size 5 --learning_rate 1e-3 --warmup_steps 0 --lr_scheduler constant --save_steps 1" BOTH="--omp_threads 1 --logging_steps 1000"
files_of() { (cd "$1" && find . -name '*.jsonl' -o -name model.safetensors -not -path '*checkpoints*' | sort | xargs md5sum); }
for recipe in rejection_sampling iterative_dpo conditional_sft; do
    OUT=$recipe.one "$S/ci/limit.sh" 120 "$S/demos/recipes/$recipe.sh" >$recipe.log 2>&1 || fail "generate_recipe $recipe" "$(tail -n 1 $recipe.log)"
    # on two ranks, ended in the middle of what it does then, over and over
    tries=0
    while tries=$((tries + 1)); do
        pause=$(awk -v n=$tries 'BEGIN { print 0.05 + n * 0.037 }')
        OUT=$recipe.killed BOTH="$BOTH --ring_attn_size 2" setsid "$S/demos/recipes/$recipe.sh" >$recipe.killed.log 2>&1 & pid=$!
        sleep $pause
        kill -0 $pid 2>/dev/null || { wait $pid; break; }
        kill -KILL -$pid 2>/dev/null; wait $pid 2>/dev/null
        while kill -0 -$pid 2>/dev/null; do sleep 0.01; done # what it started holds its file until it is gone
        [ $tries -lt 60 ] || break
    done 2>/dev/null
    [ $tries -gt 1 ] && [ "$(files_of $recipe.one)" = "$(files_of $recipe.killed)" ] && [ "$(files_of $recipe.one | wc -l)" -ge 3 ] && ok "generate_recipe $recipe" || fail "generate_recipe $recipe" "ended $tries times: $(tail -n 1 $recipe.killed.log)"
done
check generate_dpo_first "$(grep -h 'loss 0.69' iterative_dpo.one/round0/model.log)" grep -q '^loss 0.693147 -> ' iterative_dpo.one/round0/model.log
unset MODEL; OUT=none "$S/demos/recipes/rejection_sampling.sh" >none.log 2>&1; [ $? = 2 ] && grep -q '^error: MODEL is not set; the first lines of .* say what it is$' none.log && ok generate_recipe_refused || fail generate_recipe_refused "$(tail -n 1 none.log)"
end
