#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Turns on the mistakes of verify/faults.tsv one at a time, in copies of the headers that hold them all: a suite must turn
# red for each.
cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-cc}
passed=0 failed=0
rows() { grep -v '^#' verify/faults.tsv | awk -F'\t' '$4 != "" && $2 !~ /^cuda/ { print $1 "|" $2 "|" $4 "|" $3 }'; } # test_cuda.sh has its own
programs=build/faults/test_ seconds=600
. verify/support/faults.sh
suites=$(rows | cut -d'|' -f2 | tr ' ' '\n' | sed 's/:.*//' | sort -u)
make --no-print-directory -s planted build/faults/seqpar.o || { echo "FAIL faults_planted: see above"; failed=1; }
# The library with faults is compiled once; what looks inside it has its own.
flags="-std=gnu11 ${ARCH:--march=native} -fopenmp -DTEST_FAULTS -Ibuild/faults -Ibuild/faults/demos -I. -Ibuild -Idemos -Iverify"
linked=$(make --no-print-directory -s linked-flags)
# smallest_NAME: the suite where every block is at its smallest, so that there is a second one (verify/support/smallest.h).
for suite in $suites; do
    case $suite in smallest_*) how="-O1 -include verify/support/smallest.h" ;; attn | device | plan) how="-O2" ;; numerics) how="-O1" ;; absolute) how="-O1 $linked build/faults/seqpar.o -lcurl" ;; *) how="-O2 $linked build/faults/seqpar.o" ;; esac
    $cc $flags verify/tests/test_${suite#smallest_}.c $how -o build/faults/test_$suite -lcjson -lz -lm -lpthread 2>build/faults/$suite.log || {
        echo "FAIL faults_build_$suite: $(head -n 1 build/faults/$suite.log)"; failed=$((failed + 1)); }
done
run() { planted "build/faults/$1.${2%%:*}.log" "$1" "$2"; } # NUMBER SUITE[:TEXT]
# The controls: no suite may be red, or too slow, without a fault. check: of a long one what is needed below.
for suite in $suites; do
    if run 0 "$(control "$suite")"; then echo "ok fault_none $suite"; passed=$((passed + 1))
    else echo "FAIL fault_none: $suite ends with $? without a fault $(grep '^limit: ' "build/faults/0.$suite.log")"; failed=$((failed + 1)); fi
done
# number, suites that should notice, what is wrong, which published mistakes it is
covered="" planted=0
while IFS='|' read -r number noticing what bugs; do
    caught="" planted=$((planted + 1))
    for suite in $noticing; do
        run "$number" "$suite"
        code=$?
        if [ $code -eq 1 ] || [ $code -ge 128 ]; then caught=${suite%%:*}; break; fi
    done
    if [ -n "$caught" ]; then echo "ok fault_$number $what: seen by $caught"; passed=$((passed + 1)); covered="$covered $bugs"
    else echo "FAIL fault_$number $what: not noticed by $noticing"; failed=$((failed + 1)); fi
done < <(rows)
every_row $planted
for bug in $(grep -oE '^# +B[0-9]+' verify/faults.tsv | grep -o 'B.*'); do
    if [[ " $covered " = *" $bug "* ]]; then echo "ok published_$bug"; passed=$((passed + 1)); else echo "FAIL published_$bug: no planted fault stands for it and is seen"; failed=$((failed + 1)); fi
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
