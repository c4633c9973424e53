#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# build/seqpar-verify where memory runs out: at each place of the program that allocates, the first allocation finds no memory
# (verify/support/refuse_at.c). The program says so in one sentence with exit code 3, or does without and gives the same answer.
cd "$(dirname "$0")/../.." || exit 1
oracle=${BUILD:-build}/seqpar-verify out=build/test_oracle_scarce
rm -rf $out; mkdir -p $out
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
${CC:-cc} -std=gnu11 -O1 -Wall -Wextra -shared -fPIC verify/support/refuse_at.c -o $out/refuse_at.so || { echo "FAIL oracle_scarce_build: refuse_at.c"; echo "0 passed, 1 failed"; exit 1; }

run() { # ANSWER ARGUMENTS...
    local answer=$1; shift
    rm -rf $out/made
    LD_PRELOAD=$PWD/$out/refuse_at.so $oracle "$@" >"$out/$answer" 2>"$out/$answer.error"
}
# scarce NAME LEAST ARGUMENTS...: with fewer than LEAST places the test itself is wrong
scarce() {
    local name=$1 least=$2 code is n count=0 wrong=""; shift 2
    run whole "$@"; code=$?
    for n in $(sed -n 's/^refuse_at://p' $out/whole.error); do
        REFUSE_AT=$n run scarce "$@"; is=$?
        count=$((count + 1))
        [ $is -eq $code ] && [ ! -s $out/scarce.error ] && cmp -s $out/whole $out/scarce && continue
        [ $is -eq 3 ] && { [ ! -s $out/scarce ] || cmp -s $out/whole $out/scarce; } && [ "$(wc -l <$out/scarce.error)" -eq 1 ] && grep -q '^error: .*memory' $out/scarce.error && continue
        wrong="allocation $n: exit code $is, '$(head -c 200 $out/scarce.error)'"
        break
    done
    if [ -n "$wrong" ]; then fail "$name" "$wrong; again: REFUSE_AT=$n LD_PRELOAD=$out/refuse_at.so $oracle $*"
    elif [ $count -lt "$least" ]; then fail "$name" "$count places that allocate, fewer than $least: $(head -c 200 $out/whole.error)"
    else ok "$name ($count places)"; fi
}

small="--sp 2 --tokens 24 --docs 4"
$oracle gen --out $out/sft $small --dp 2 >/dev/null && $oracle gen --out $out/dpo $small --objective dpo >/dev/null && $oracle gen --out $out/lost $small --mistake hop_lost >/dev/null || fail oracle_scarce_gen "no dumps"
scarce oracle_scarce_ver 30 ver $out/sft/got --model $out/sft/model
scarce oracle_scarce_want 30 ver $out/dpo/got --want $out/dpo/want
scarce oracle_scarce_mistake 30 ver $out/lost/got --want $out/lost/want
scarce oracle_scarce_html 30 ver $out/lost/got --html $out/made
scarce oracle_scarce_made 30 gen --out $out/made $small
scarce oracle_scarce_step 30 run step $out/sft/got --model $out/sft/model --out $out/made
scarce oracle_scarce_attention 20 run attention-gradient $out/sft/got --out $out/made
scarce oracle_scarce_gather 20 run gather $out/sft/got --out $out/made
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
