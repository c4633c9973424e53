#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The suites once more where every block, tile, ring and staging buffer is at its smallest (verify/support/smallest.h), so that loops over
# them have a second turn; that each loop had one is counted (verify/support/loops.awk), and that no constant is forgotten is looked up
# (verify/support/constants.awk). TEST_ALL=1: whole suites. SMALLEST_FLAGS="-fsanitize=address,undefined": with sanitizers.
cd "$(dirname "$0")/../.." || exit 1
out=build/smallest cc=${CC:-cc} awk=${AWK:-awk}
rm -rf $out; mkdir -p $out
passed=0 failed=0 skipped=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
export OMP_WAIT_POLICY=passive SEQPAR_LOOPS=$PWD/$out/turns

# ---- the list is complete ----
said=$($awk -f verify/support/constants.awk verify/support/smallest.h seqpar.h seqpar_llama.h seqpar_safetensors.h seqpar_nccl.h seqpar_mpi.h demos/trainer/*/*.h verify/oracle/*/*.h) && ok smallest_list || fail smallest_list "$said"
printf '#define PLAIN 4096\nenum { SOME = 1 << 12 };\nvoid f(void) {\n    int x[77];\n    for (int i = 0; i < 9; i += 32) x[i] = 0;\n}\n' >$out/planted.h
said=$($awk -f verify/support/constants.awk verify/support/smallest.h $out/planted.h | grep -c planted.h)
[ "$said" = 4 ] && ok smallest_list_sees || fail smallest_list_sees "$said of 4 planted constants are named"

# ---- programs ----
headers="seqpar.h seqpar_llama.h seqpar_safetensors.h"
for header in $headers; do $awk -v list=$out/$header.loops -f verify/support/loops.awk $header >$out/$header || fail smallest_loops "$header"; done
cp seqpar_nccl.h seqpar_mpi.h $out/
make --no-print-directory -s build/options.inc
linked=$(make --no-print-directory -s linked-flags)
libraries="-lcjson -lcurl -lz -lm -lpthread -ldl"
# Variables that are not set hold a pattern, where the compiler can do that.
fill=-ftrivial-auto-var-init=pattern
echo 'int main(void) { return 0; }' | ${CC:-cc} $fill -x c - -o $out/fill 2>/dev/null || fill=""
flags="-std=gnu11 -march=native -fopenmp $fill -w -D_GNU_SOURCE -include verify/support/smallest.h -I$out -I. -Ibuild -Idemos -Iverify $SMALLEST_FLAGS"
build() { # PROGRAM OPTIMIZATION SOURCE...
    local program=$1 optimization=$2; shift 2
    $cc $optimization $flags "$@" -o $out/$program 2>$out/$program.log || { fail smallest_build_$program "$(grep -m 1 -E 'error|undefined' $out/$program.log)"; return 1; }
}
# run NAME TESTS ENVIRONMENT...: a suite in C, whole under TEST_ALL
run() {
    local name=$1 only="TEST_ONLY=$2"; shift 2
    [ -x $out/test_$name ] || return
    [ -n "$TEST_ALL" ] && only=TEST_ALL=1
    if env "$@" "$only" ci/limit.sh 6000 $out/test_$name >$out/test_$name.txt 2>&1 && ! grep -qE 'runtime error|ERROR: ' $out/test_$name.txt; then ok "smallest_$name ($(tail -n 1 $out/test_$name.txt))"
    else fail smallest_$name "$(grep -m 1 -E '^FAIL|runtime error|ERROR: |^limit: ' $out/test_$name.txt)"; fi
}
# what looks inside is compiled with the implementation, the rest linked with one; only that is optimized
build seqpar.o -O1 -c verify/library.c
for suite in device attn ${TEST_ALL:+memory safetensors}; do build test_$suite -O1 verify/tests/test_$suite.c $libraries; done
devices=$(basename -s .c verify/tests/test_device_*.c | sed 's/^test_//')
for suite in bits adapters $devices ${TEST_ALL:+objective sample}; do build test_$suite -O0 $linked verify/tests/test_$suite.c $out/seqpar.o $libraries; done
for program in train_sft ${TEST_ALL:+train_ppo train_dpo train_kto train_rm}; do build $program -O0 $linked demos/$program.c $out/seqpar.o $libraries; done
build make_arith -O0 $linked demos/make_arith.c $out/seqpar.o $libraries
printf 'int seqpar_verify_test(int n, char **of) { return n < 0 || !of; }\n' >$out/no_test.c
build seqpar-verify -O0 $linked verify/seqpar_verify.c $out/no_test.c $out/seqpar.o $libraries

for suite in device $devices; do run $suite "test"; done
run attn "test_many_cells+test_probe+test_document_l+test_isol+test_own_k+test_packed(0)+test_arrival+test_long+test_wide+test_gaps(0)+test_lengths+test_bits(2)+test_bits(0)+test_refused+test_relaxed_grid"
run bits "test_ways+test_masters+test_shards+test_room_refused+test_forms(2,8" TEST_WAYS=${TEST_ALL:+11}${TEST_ALL:-2}
run adapters "test_ways(0, OBJECTIVE_SFT, &everywhere, 1"
for suite in ${TEST_ALL:+objective sample}; do run $suite "" TEST_WAYS=1; done
[ -n "$TEST_ALL" ] && run memory "" && run safetensors ""

# ---- a trainer: 3 ranks of 1, shards of 2, a run that goes on; its files are those of other builds ----
sft() { # NAME OPTIONS...
    local name=$1; shift
    ci/limit.sh 300 $out/train_sft --dataset $out/arith.jsonl --input_key question --output_key answer --train_batch_size 4 --lr_scheduler constant --warmup_steps 0 --packing_samples --num_hidden_layers 1 --hidden_size 16 --num_attention_heads 2 --omp_threads 1 --logging_steps 1000 --max_len 128 --pack_len 160 --enable_ema --ema_beta 0.9 --save_path $out/$name --ckpt_path $out/$name.ckpt "$@" >$out/$name.txt 2>&1
}
same() { # TEST RUN RUN
    cmp -s $out/$2/model.safetensors $out/$3/model.safetensors && ok "$1" || fail "$1" "$(grep -h -m 1 -E '^error|runtime error|ERROR: ' $out/$2.txt $out/$3.txt) $(cmp $out/$2/model.safetensors $out/$3/model.safetensors 2>&1)"
}
$out/make_arith $out/arith.jsonl 40 5 >/dev/null 2>$out/arith.txt
sft one --max_steps 3
sft three --max_steps 3 --ring_attn_size 3 --world_size 3
sft shards --max_steps 3 --world_size 2 --zero_stage 3 --save_steps 2
sft goes_on --max_steps 3 --load_checkpoint --ckpt_path $out/shards.ckpt
same smallest_sft_three one three
same smallest_sft_shards one shards
same smallest_sft_goes_on one goes_on

# ---- the oracle: what it says is what the other build says ----
verify() { # NAME OPTIONS OF GEN...
    local name=$1 is; shift
    $out/seqpar-verify gen --out $out/$name "$@" >$out/$name.gen 2>&1
    build/seqpar-verify ver $out/$name/got >$out/$name.want 2>&1; is=$?
    $out/seqpar-verify ver $out/$name/got >$out/$name.got 2>&1; [ $? -eq $is ] || is=other
    sed -i -E 's/(is|row) (0|[0-9.]+e-1[0-9]) /\1 ~ /g; s/[0-9.]+e-1[0-9]/~/g' $out/$name.want $out/$name.got # roundings of sums in another order
    [ $is != other ] && cmp -s <(tr -s ' \n' ' ' <$out/$name.want) <(tr -s ' \n' ' ' <$out/$name.got) && ok smallest_oracle_$name || fail smallest_oracle_$name "$(diff $out/$name.want $out/$name.got | head -n 2 | tr '\n' ' ')"
}
verify right --sp 3 --tokens 67 --docs 3
verify dpo --sp 2 --tokens 31 --docs 2 --objective dpo
if [ -n "$TEST_ALL" ]; then
    BUILD=$out bash verify/tests/test_runs.sh >$out/runs.txt 2>&1 && ok smallest_runs || fail smallest_runs "$(grep -m 1 ^FAIL $out/runs.txt)"
    BUILD=$out bash verify/tests/test_oracle.sh >$out/oracle.txt 2>&1 && ok smallest_oracle || fail smallest_oracle "$(grep -m 1 ^FAIL $out/oracle.txt)"
fi

# ---- second turns ----
once=$($awk -F '\t' -v total=$out/total '
    FILENAME ~ /loops.tsv$/ { if (!/^#/ && NF == 4) { reason[$1, $2, $3] = $4; of[$1, $2, $3] } next }
    FILENAME ~ /turns$/ { if ($3 > turns[$1, $2]) turns[$1, $2] = $3; next }
    { file[++n] = $1; number[n] = $2; line[n] = $3; name[n] = $4; head[n] = $5; known[$1, $4, $5] }
    END {
        for (i = 1; i <= n; i++) {
            t = turns[file[i], number[i]]
            ran += t > 0; again += t > 1
            if (t != 1) continue
            if ((file[i], name[i], head[i]) in reason) listed++
            else print file[i] ":" line[i] ": " name[i] ": " head[i]
        }
        for (key in of) if (!(key in known)) { split(key, part, SUBSEP); print "verify/tests/loops.tsv: no such loop: " part[1] " " part[2] " " part[3] }
        print again " of " ran " loops that ran had a second turn, " listed + 0 " have a reason; " n - ran " did not run" >total
    }' verify/tests/loops.tsv $out/*.loops $out/turns)
[ -z "$once" ] && [ -s $out/turns ] && ok "smallest_turns: $(cat $out/total)" || { fail smallest_turns "$(cat $out/total)"; echo "$once"; }
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
