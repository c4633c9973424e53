#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Runs the named suites one after the other and adds up their closing lines. The last line is 'N passed, N failed, N skipped'.
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0 skipped=0
mkdir -p build/logs
for suite in "$@"; do
    log=build/logs/$suite.log
    if [ -f "verify/test_$suite.sh" ]; then command=(bash "verify/test_$suite.sh"); else command=("build/test_$suite"); fi
    [ "$suite" = demos_support ] && command+=("${SEQPAR_DATA:-../shared/data}")
    seconds=${SEQPAR_SUITE_SECONDS:-1200}
    [ "$suite" = cuda ] && seconds=3000 # nvcc takes minutes for each of three targets
    began=$(date +%s)
    timeout "$seconds" "${command[@]}" >"$log" 2>&1
    code=$?
    last=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1)
    if [ -z "$last" ]; then
        echo "FAIL $suite ended with exit code $code before its closing line"
        tail -n 15 "$log"
        failed=$((failed + 1))
        continue
    fi
    p=$(echo "$last" | sed -E 's/^([0-9]+) passed.*/\1/')
    f=$(echo "$last" | sed -E 's/.* ([0-9]+) failed.*/\1/')
    s=$(echo "$last" | grep -oE '[0-9]+ skipped' | grep -oE '[0-9]+' || echo 0)
    if [ "$code" -ne 0 ] && [ "$f" -eq 0 ]; then
        echo "FAIL $suite says '$last' but exits with $code"
        tail -n 15 "$log"
        f=1
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    printf '%-14s %4d passed %3d failed %3d skipped  %4d s\n' "$suite" "$p" "$f" "$s" $(($(date +%s) - began))
    grep -E '^(FAIL|skip)' "$log" | cut -c1-300 | head -n 20
done
if [ "$skipped" -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"; else echo "$passed passed, $failed failed"; fi
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
