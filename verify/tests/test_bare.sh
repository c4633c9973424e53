#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# make demo, make verify and make check on a Debian that has git, gcc and make alone (ci/bare.sh). It takes the network and as
# long as the check itself, so it runs with TEST_ALL=1 (make check-all) alone.
cd "$(dirname "$0")/../.." || exit 1
skip() { echo "skip bare: $1"; echo "0 passed, 0 failed, 1 skipped"; exit 0; }
[ -n "$TEST_ALL" ] || skip "TEST_ALL is not set"
command -v debootstrap >/dev/null || skip "no debootstrap"
[ "$(id -u)" = 0 ] || skip "chroot needs root"
unshare --mount --pid --fork true 2>/dev/null || skip "no namespaces of mounts and processes here"
passed=0 failed=0
while IFS= read -r line; do
    echo "$line"
    case $line in
    *' s  ok') passed=$((passed + 1)) ;;
    *' s  exit code '*) failed=$((failed + 1)) ;;
    FAIL*) echo "     log: build/bare/check.log" ;;
    esac
done < <(ci/bare.sh)
[ $((passed + failed)) -ge 5 ] || { echo "FAIL bare: it was not run to its end"; failed=$((failed + 1)); }
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
