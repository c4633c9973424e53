# SPDX-License-Identifier: MIT OR Unlicense
# What test_headers.sh, test_headers_transports.sh and test_compiled.sh share: jobs that compile, some at a time, with ok or FAIL for each. Needs
# $out exported, with a folder log and without a file jobs.
passed=0 failed=0 skipped=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }

# ---- jobs: a name and a shell command that must succeed; as many at a time as there are cores ----
job() { printf '%s\n%s\n' "$1" "$2" >>$out/jobs; }
work() { # NAME COMMAND
    local log=$out/log/$1.log
    if bash -c "set -o pipefail; $2" >"$log" 2>&1; then echo "ok $1 ($SECONDS s)"
    else echo "FAIL $1: $( (grep -m 1 '^FAIL' "$log" || grep -m 1 -E 'error|undefined|multiple' "$log" || tail -n 1 "$log") | cut -c1-250)"; fi
}
export -f work
run_jobs() {
    xargs -P "$(nproc)" -d '\n' -n 2 bash -c 'work "$@"' _ <$out/jobs >$out/verdicts
    cat $out/verdicts
    passed=$((passed + $(grep -c '^ok ' $out/verdicts)))
    failed=$((failed + $(grep -c '^FAIL ' $out/verdicts)))
}
has() { command -v "$1" >/dev/null 2>&1; }
strict="-Wall -Wextra -Werror -I. -Iverify"
cuda=${CUDA_HOME:-/usr/local/cuda}
