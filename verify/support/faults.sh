# SPDX-License-Identifier: MIT OR Unlicense
# Sourced by the suites that plant verify/faults.tsv. They set `programs`: where the suites with faults lie, up to their names;
# `seconds`: of processor time, how long one may run; and rows(): NUMBER|SUITES|WHAT|PUBLISHED, a line each.

# planted LOG NUMBER SUITE[:TEXT] ARGUMENTS...: that suite with the fault, of a long one the tests that begin with TEXT
planted() {
    local log=$1 number=$2 suite=${3%%:*} only=${3#"${3%%:*}"}
    shift 3
    { env ${only:+TEST_ONLY="${only#:}"} SEQPAR_FAULT="$number" TEST_FIRST=1 ci/limit.sh "$seconds" "$programs$suite" "$@" >"$log" 2>&1; } 2>/dev/null
}

# What a control runs of a suite, as SUITE:TEXT: all that a row needs of it; all of it where a row names it alone, or with TEST_ALL.
control() {
    local texts
    texts=$(rows | cut -d'|' -f2 | tr ' ' '\n' | grep -E "^$1(:|\$)" | sort -u)
    if [ -n "$TEST_ALL" ] || printf '%s\n' "$texts" | grep -qx "$1"; then echo "$1"; else echo "$1:$(printf '%s\n' "$texts" | sed 's/^[^:]*://' | paste -sd+ -)"; fi
}

# every_row COUNT: so many rows were planted, which are all. Without the check, a command that reads the loop's stdin eats rows.
every_row() {
    local rows; rows=$(rows | wc -l)
    if [ "$1" -eq "$rows" ] && [ "$rows" -gt 0 ]; then echo "ok fault_rows: $rows"; passed=$((passed + 1))
    else echo "FAIL fault_rows: $1 of $rows rows were planted"; failed=$((failed + 1)); fi
}
