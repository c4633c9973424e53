#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Runs the named suites, JOBS at a time (2), and adds up their closing lines. The last line is 'N passed, N failed, N skipped',
# and above it stands each test that was skipped. Beside each suite: its seconds, and the processor's. A suite that ran no
# test is a failure.
cd "$(dirname "$0")/.." || exit 1
export MALLOC_PERTURB_=${MALLOC_PERTURB_:-165} # memory that is not written holds no zeros, which would pass for right values
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} # suites beside each other: who waits leaves the core to others
logs=build/logs
mkdir -p $logs
if [ "$1" != --one ]; then
    rm -f $logs/*.verdict $logs/*.skips
    printf '%s\n' "$@" | xargs -P "${JOBS:-2}" -n 1 bash ci/run.sh --one
    for suite in "$@"; do # one that was killed, or that nobody started any more, is not left out of the sum
        [ -e $logs/$suite.verdict ] && continue
        echo "FAIL $suite: it was not run to its end; again: make check SUITES=$suite"
        echo "0 1 0" >$logs/$suite.verdict
    done
    for suite in "$@"; do [ ! -s $logs/$suite.skips ] || sed "s/^/skipped in $suite: /" $logs/$suite.skips; done
    cat $logs/*.verdict | awk '{ p += $1; f += $2; s += $3 } END { printf "%d passed, %d failed", p, f; if (s) printf ", %d skipped", s; print ""; exit f > 0 || p == 0 }'
    exit
fi

suite=$2 log=$logs/$2.log
if [ -f "verify/tests/test_$suite.sh" ]; then command=(bash "verify/tests/test_$suite.sh")
elif [ -f "build/test_$suite" ]; then command=("build/test_$suite")
else echo "FAIL $suite: there is no such suite, or it was not built; they are $(cd verify/tests && echo test_*.c test_*.sh | sed -E 's/test_|\.(c|sh)//g')"; echo "0 1 0" >"$logs/$suite.verdict"; exit 0; fi
TIMEFORMAT='%R %U %S'
# Seconds of processor time; and ten minutes without progress, as what a suite itself ends for that takes less.
{ time ci/limit.sh "${SEQPAR_SUITE_SECONDS:-$([ -n "$TEST_ALL" ] && echo 30000 || echo 6000)}:600" "${command[@]}" >"$log" 2>&1; } 2>"$log.time"
code=$?
read -r wall user system < <(tail -n 1 "$log.time")
last=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1)
read -r p f s < <(echo "${last:-0 passed, 0 failed}" | sed -E 's/^([0-9]+) passed, ([0-9]+) failed(, ([0-9]+) skipped)?$/\1 \2 \4/')
# a skip that the suite does not count, or does not name
grep -E '^skip ' "$log" | cut -c6-205 >"$logs/$suite.skips"
named=$(wc -l <"$logs/$suite.skips")
[ "$named" -ge "${s:-0}" ] || echo "$((s - named)) tests that it does not name" >>"$logs/$suite.skips"
[ "$named" -le "${s:-0}" ] || s=$named
why=""
if [ $code -ge 128 ] && tail -n 1 "$log" | grep -q '^limit: '; then why=$(tail -n 1 "$log"); elif [ -z "$last" ]; then why="it ended with exit code $code before its closing line"; elif [ "$code" -ne 0 ] && [ "$f" -eq 0 ]; then why="it says '$last' but exits with $code"
elif [ $((p + f + ${s:-0})) -eq 0 ]; then why="it ran no test"; fi
[ -n "$why" ] && f=$((f + 1))
{ # in one piece, as another suite may end at the same time
    printf '%-14s %4d passed %3d failed %3d skipped  %4.0f s  %5.0f s of processor\n' "$suite" "$p" "$f" "${s:-0}" "$wall" "$(echo "$user $system" | awk '{ print $1 + $2 }')"
    [ -n "$why" ] && echo "FAIL $suite: $why" && tail -n 15 "$log"
    grep -A 1 -E '^(FAIL|skip)' "$log" | grep -E '^(FAIL|skip| +replay:)' | cut -c1-300 | head -n 20
    [ "$f" -gt 0 ] && echo "     log: $log    again: make check SUITES=$suite"
} >"$log.verdict_text"
cat "$log.verdict_text"
rm -f "$log.verdict_text" "$log.time"
echo "$p $f ${s:-0}" >"$logs/$suite.verdict"
exit 0
