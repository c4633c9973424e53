#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# make certificate: one hash for each objective, whoever computes. Twenty steps of SFT, DPO, a reward model, KTO, PPO and GRPO:
# every factor by itself, and every two values of two factors in some run. The hash is over the weights and over every loss,
# figure and gradient norm of every step, as printed with 17 digits.
#   STEPS=20    steps of a run
#   EVERY=1     of the runs after the first every so many are made
#   STAGES=...  of sft dpo rm kto ppo grpo; and kd and prm, which are asked for
#   WORLDS=0    so many worlds drawn by SEED in the place of those, with rows of any length
#   LAYOUTS=... dealt by (stripe cuts cells, and is to fail)
#   RANK=0      adapters (LoRA) of that rank learn in the place of all weights, with dropout
#   KILLS=0     each run after the first is killed so often, and goes on in the worlds that follow
# Writes build/certificate/runs.tsv and CERTIFICATE.md; exit code 1 where a run has another hash than the first of its objective.
cd "$(dirname "$0")/.." || exit 2
steps=${STEPS:-20} every=${EVERY:-1} stages=${STAGES-sft dpo rm kto ppo grpo} layouts=${LAYOUTS:-zigzag contiguous zigzag-doc}
worlds=${WORLDS:-0} seed=${SEED:-7} out=${OUT:-build/certificate}
rank=${RANK:-0} kills=${KILLS:-0}
rm -rf "$out"; mkdir -p "$out"
export OMP_NUM_THREADS=1

build/make_arith "$out/arith.jsonl" 160 5 >/dev/null || exit 2
awk '{ sub(/"wrong": .*/, ""); label = NR % 3 ? "true" : "false"; print $0 "\"label\": " label "}" }' "$out/arith.jsonl" >"$out/labelled.jsonl"
awk '{ sub(/^[^:]*: "/, ""); sub(/".*/, ""); n = gsub(/ /, " @"); printf "{\"input\": \"%s@\", \"label\": [0.5", $0; for (i = 0; i < n; i++) printf ", %.3f", (i * 7 + NR) % 9 / 8; print "]}" }' "$out/arith.jsonl" >"$out/steps.jsonl"
model="--num_hidden_layers 1 --hidden_size 32 --num_attention_heads 8 --num_key_value_heads 8"
shape="--max_len 200 --omp_threads 1 --cell 16 --logging_steps 1000 --max_steps $steps"
texts="--dataset $out/arith.jsonl --input_key question --output_key answer --train_batch_size 12 --learning_rate 2e-3"
pairs="--dataset $out/arith.jsonl --prompt_key question --chosen_key answer --rejected_key wrong --train_batch_size 7 --learning_rate 2e-3"
labelled="--dataset $out/labelled.jsonl --input_key question --output_key answer --train_batch_size 12 --learning_rate 2e-3"
prompts="--prompt_data $out/arith.jsonl --input_key question --label_key answer --prompt_max_len 160 --generate_max_len 12 --rollout_batch_size 6 --train_batch_size 12 --actor_learning_rate 2e-3 --critic_learning_rate 2e-3 --num_episodes 9 --temperature 0.9"
declare -A trainer=([sft]=sft [dpo]=dpo [rm]=rm [kto]=kto [kd]=kd [prm]=prm [ppo]=ppo [grpo]=ppo)
declare -A options=([sft]="$texts" [dpo]="$pairs" [rm]="$pairs" [kto]="$labelled"
    [kd]="$texts --teacher_model $out/teacher"
    [prm]="--dataset $out/steps.jsonl --placeholder_token @ --reward_tokens + - --train_batch_size 12 --learning_rate 2e-3"
    [ppo]="$prompts --reward_pretrain $out/rewards --n_samples_per_prompt 2"
    [grpo]="$prompts --reward_pretrain $out/rewards --n_samples_per_prompt 4 --advantage_estimator group_norm")

# ---- the runs: ranks, schedule, layout, data-parallel size, rows of a micro-batch, ZeRO, tokens of a row, transport ----

# Lines of levels; the first is the simplest, then every factor by itself, then pairs of values until all have met.
cases() {
    awk -v layouts="$layouts" -v worlds="$worlds" -v seed="$seed" -v mpi="$([ -x build/mpi_train_sft ] && command -v mpirun >/dev/null && echo mpi)" '
    function draw(n) { seed = seed * 16807 % 2147483647; return int(seed / 128) % n } # products are exact in 53 bits
    function level(f) { return value[f, draw(count[f])] }
    function possible(x) {
        if (x[1] * x[4] > 12 || (x[8] == "mpi" && x[1] * x[4] > 4)) return 0
        return x[2] != "2d" || x[1] % 2 == 0
    }
    function fresh(x,   f, g, n) { for (f = 1; f < factors; f++) for (g = f + 1; g <= factors; g++) n += !((f, x[f], g, x[g]) in met); return n }
    function take(x,   f, g, line) {
        for (f = 1; f <= factors; f++) { line = line (f > 1 ? " " : "") x[f]; for (g = f + 1; g <= factors; g++) met[f, x[f], g, x[g]] }
        if (!(line in made)) { print line; lines++ }
        made[line]
    }
    BEGIN {
        seed = seed % 2147483646 + 1
        factors = split("1 2 3 4 8|ring llama3 ulysses 2d|" layouts "|1 2 3|2 1 5|2 0 1 3|0 200 420 1700|threads " mpi, list, "|")
        for (f = 1; f <= factors; f++) { count[f] = split(list[f], part, " "); for (i = 1; i <= count[f]; i++) value[f, i - 1] = part[i] }
        for (f = 1; f <= factors; f++) x[f] = value[f, 0]
        take(x)
        while (lines <= worlds && worlds) {
            for (f = 1; f <= factors; f++) x[f] = level(f)
            x[4] = 1 + draw(4); x[5] = 1 + draw(7); if (x[7]) x[7] = 200 + draw(1800)
            if (possible(x)) take(x)
        }
        if (worlds) exit
        x[1] = 4
        for (f = 1; f <= factors; f++) for (i = 0; i < count[f]; i++) { was = x[f]; x[f] = value[f, i]; if (possible(x)) take(x); x[f] = was }
        for (empty = 0; empty < 40;) {
            best = 0
            for (n = 0; n < 200; n++) {
                for (f = 1; f <= factors; f++) x[f] = level(f)
                if (!possible(x) || (new = fresh(x)) <= best) continue
                best = new; for (f = 1; f <= factors; f++) y[f] = x[f]
            }
            if (best) take(y); else empty++
        }
    }'
}

# Without a stdin: mpirun would read the cases that are left. kill_at: a library that kills, or nothing.
# run NAME STAGE RANKS SCHEDULE LAYOUT DP MICRO ZERO PACK TRANSPORT
run() {
    local name=$1 stage=$2 world="--ring_attn_size $3 --layout $5 --data_parallel_size $6 --micro_train_batch_size $7 --zero_stage $8"
    case $4 in 2d) world="$world --schedule ring --ulysses_size 2" ;; *) world="$world --schedule $4" ;; esac
    [ "$9" = 0 ] || world="$world --packing_samples --pack_len $(([[ $stage =~ dpo|rm ]] && [ "$9" -lt 400 ]) && echo 400 || echo "$9")"
    local start=(build/train_${trainer[$stage]})
    [ "${10}" = mpi ] && start=(mpirun --allow-run-as-root --oversubscribe -np $(($3 * $6)) build/mpi_train_${trainer[$stage]})
    # shellcheck disable=SC2086
    LD_PRELOAD=$kill_at "${start[@]}" $shape $model ${options[$stage]} $world $goes_on --save_path "$out/$name" --metrics_path "$out/$name.jsonl" >"$out/$name.log" 2>&1 </dev/null
}

# interrupted NAME STAGE RANKS ...: killed before a call that changes a folder or makes a file last, drawn among those of the first
# run, and again; then to its end. In each life another world.
interrupted() {
    local name=$1 stage=$2 life n; shift 2
    for ((life = 0; life < kills; life++)); do
        n=$(awk -v n=$((n_of[$stage] + 7 * life)) -v lines="$(wc -l <"$out/cases")" 'BEGIN { print 1 + n * 5 % lines }')
        read -r -a other < <(sed -n "${n}p" "$out/cases")
        [ "${other[7]}" = mpi ] && other[7]=threads
        KILL_AT=$((1 + (n_of[$stage] * 37 + life * 11) % calls[$stage])) kill_at=$PWD/$out/kill_at.so run "$name" "$stage" "${other[@]}" && break
        grep -q '^error: ' "$out/$name.log" && return 1
        killed=$((killed + 1))
    done 2>/dev/null
    run "$name" "$stage" "$@"
}

# of the weights and of every number that is logged, but for times and rows
hash_of() { { cat "$out/$1"/{,adapter_}model.safetensors "$out/$1"/critic/{,adapter_}model.safetensors 2>/dev/null; sed -E 's/, "(tokens_per_second|generate_seconds).*//' "$out/$1.jsonl"; } | sha256sum | cut -c1-16; }

cases >"$out/cases" || exit 2
echo "# SPDX-License-Identifier: MIT OR Unlicense" >"$out/runs.tsv"
printf '# objective\tranks\tschedule\tlayout\tdata-parallel\tmicro-batch\tZeRO\tpack_len\ttransport\thash\n' >>"$out/runs.tsv"
wrong=0 killed=0 goes_on= kill_at= whole=$model
declare -A calls n_of
[ "$kills" -gt 0 ] && ! cc -std=gnu11 -O1 -shared -fPIC verify/support/kill_at.c -o "$out/kill_at.so" -ldl && exit 2
if [ "$rank" -gt 0 ]; then # of a model that has learnt a little
    run base sft 1 ring zigzag 1 2 2 0 threads || { echo "error: base: $(tail -n 1 "$out/base.log")" >&2; exit 2; }
    model="--pretrain $out/base --lora_rank $rank --lora_dropout 0.1"
fi
for stage in $stages; do
    n=0 same=0 first=
    if [ "$stage" = kd ]; then # of another width
        # shellcheck disable=SC2086
        build/train_sft $shape $texts --num_hidden_layers 2 --hidden_size 48 --num_attention_heads 8 --save_path "$out/teacher" >"$out/teacher.log" 2>&1 || { echo "error: teacher: $(tail -n 1 "$out/teacher.log")" >&2; exit 2; }
    fi
    if [[ $stage =~ ppo|grpo && ! -e "$out/rewards/model.safetensors" ]]; then
        model=$whole run rewards rm 1 ring zigzag 1 2 2 0 threads || { echo "error: rewards: $(tail -n 1 "$out/rewards.log")" >&2; exit 2; }
    fi
    while read -r -a levels; do
        n=$((n + 1)) name=$stage.$n
        [ $n -gt 1 ] && [ $((n % every)) -ne 0 ] && continue
        n_of[$stage]=$n work=run goes_on=
        if [ "$kills" -gt 0 ]; then # the first run counts the calls among which the others are killed
            goes_on="--ckpt_path $out/$name.ckpt --save_steps 1 --load_checkpoint"
            [ $n -gt 1 ] && work=interrupted
        fi
        [ "$kills" -gt 0 ] && [ $n = 1 ] && kill_at=$PWD/$out/kill_at.so
        if $work "$name" "$stage" "${levels[@]}"; then hash=$(hash_of "$name"); else hash=failed; echo "error: $stage ${levels[*]}: $(tail -n 1 "$out/$name.log")" >&2; fi
        [ $n = 1 ] && first=$hash && [ "$hash" = failed ] && exit 1
        kill_at=
        [ $n = 1 ] && calls[$stage]=$(sed -n 's/^kill_at: \([0-9]*\) calls/\1/p' "$out/$name.log")
        rm -rf "${out:?}/$name.ckpt"
        if [ "$hash" = "$first" ]; then same=$((same + 1)); else wrong=$((wrong + 1)); echo "WRONG: $stage ${levels[*]}: $hash, not $first" >&2; fi
        (IFS=$'\t'; printf '%s\t%s\t%s\n' "$stage" "${levels[*]}" "$hash") >>"$out/runs.tsv"
        rm -rf "${out:?}/$name"
    done <"$out/cases"
    echo "$stage: $same runs, hash $first"
done

# ---- the page ----

machine="$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1), $(cc --version | head -n 1), seqpar $(sed -n 's/^#define SEQPAR_VERSION  *"\(.*\)"/\1/p' seqpar.h)"
{
    echo "# The certificate"; echo
    echo "<!-- SPDX-License-Identifier: MIT OR Unlicense -->"; echo
    echo "$(grep -vc '^#' "$out/runs.tsv") runs of $steps steps, $(date -u +%Y-%m-%d), $machine. \`make certificate\` makes them again. The hash is over the weights and"
    echo "over every loss, figure and gradient norm of every step as printed with 17 digits. $wrong runs have another hash than the first of"
    echo "their objective. Another compiler or machine may give other hashes, but one for each objective. 2d: a ring of Ulysses pairs; pack_len 0:"
    echo "each document alone; micro-batch: rows of one, about."; echo
    echo "| objective | ranks | schedule | layout | data-parallel | micro-batch | ZeRO | pack_len | transport | hash |"
    echo "|---|--:|---|---|--:|--:|--:|--:|---|---|"
    grep -v '^#' "$out/runs.tsv" | sed 's/\t/ | /g; s/.*/| & |/'
} >"$out/CERTIFICATE.md"
echo "$(grep -vc '^#' "$out/runs.tsv") runs, $wrong with another hash than the first of their objective"
[ "$kills" = 0 ] || echo "killed $killed times before a call that changes a folder or makes a file last, and gone on with in other worlds"
[ $wrong = 0 ]
