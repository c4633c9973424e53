#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# A test that is not run is said: skipped ones are named in the last lines, and what was asked for and did not run is a failure.
# Each absence is planted once, in suites of a few lines beside a copy of ci/run.sh; and every suite of verify/ is run by one.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_absence
rm -rf $out; mkdir -p $out/ci $out/verify/tests $out/build
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
cp ci/run.sh ci/limit.sh $out/ci/

# suite NAME: a shell suite of the lines of stdin
suite() { cat >"$out/verify/tests/test_$1.sh"; }
# says NAME CODE SUITES LINE...: they end so, and each line stands among the last ones, behind the suites' own
says() {
    local name=$1 want=$2 suites=$3 code line; shift 3
    env -u TEST_ALL JOBS=1 bash $out/ci/run.sh $suites >$out/$name.log 2>&1; code=$?
    [ $code -eq "$want" ] || { fail "$name" "exit code $code: $(tail -n 1 $out/$name.log)"; return; }
    for line in "$@"; do
        grep -qxF -- "$line" $out/$name.log || { fail "$name" "no line '$line': $(tail -n 3 $out/$name.log | tr '\n' '|')"; return; }
    done
    [ "$(tail -n 1 $out/$name.log)" = "${!#}" ] && ok "$name" || fail "$name" "ends with '$(tail -n 1 $out/$name.log)'"
}

suite good <<<'echo "ok one"; echo "1 passed, 0 failed"'
suite skips <<<'echo "ok one"; echo "skip two: no tool"; echo "skip three: no card"; echo "1 passed, 0 failed, 2 skipped"'
suite uncounted <<<'echo "ok one"; echo "skip two: no tool"; echo "1 passed, 0 failed"'
suite unnamed <<<'echo "ok one"; echo "1 passed, 0 failed, 3 skipped"'
suite all_skipped <<<'echo "skip all: no tool"; echo "0 passed, 0 failed, 1 skipped"'
suite empty <<<'echo "0 passed, 0 failed"'
suite silent <<<'echo "ok one"'
suite killed <<<'kill -9 $$'
says nothing_absent 0 "good" "1 passed, 0 failed"
says skip_is_named 0 "skips good" "skipped in skips: two: no tool" "skipped in skips: three: no card" "2 passed, 0 failed, 2 skipped"
says skip_is_counted 0 "uncounted" "skipped in uncounted: two: no tool" "1 passed, 0 failed, 1 skipped"
says skip_without_a_name 0 "unnamed" "skipped in unnamed: 3 tests that it does not name" "1 passed, 0 failed, 3 skipped"
says suite_all_skipped 0 "good all_skipped" "skipped in all_skipped: all: no tool" "1 passed, 0 failed, 1 skipped"
says suite_of_no_test 1 "good empty" "FAIL empty: it ran no test" "1 passed, 1 failed"
says suite_without_an_end 1 "good silent" "FAIL silent: it ended with exit code 0 before its closing line" "1 passed, 1 failed"
says suite_killed 1 "good killed" "FAIL killed: it ended with exit code 137 before its closing line" "1 passed, 1 failed"
says suite_missing 1 "good nowhere" "1 passed, 1 failed"
says suites_none 1 "" "0 passed, 0 failed"

# what TEST_ONLY names, and what it does not
cat >$out/some.c <<'C'
#include "support/test.h"
static void test_one(int n) { test_end("one %d", n); }
static void test_two(void) { test_end("two"); }
int main(int argc, char **argv) {
    test_begin(argc, argv);
    if (getenv("NO_TEST")) return test_summary();
    for (int n = 1; n < 3; n++) TEST(test_one(1));
    TEST(test_two());
    return test_summary();
}
C
${CC:-cc} -std=gnu11 -O0 -Wno-unused -Iverify -I. $out/some.c -o $out/some -lm || fail build "see above"
# only NAME CODE TEST_ONLY LAST LINE...
only() {
    local name=$1 want=$2 texts=$3 last=$4 code line; shift 4
    TEST_ONLY=$texts $out/some >$out/$name.log 2>&1; code=$?
    for line in "$@"; do grep -qxF -- "$line" $out/$name.log || { fail "$name" "no line '$line'"; return; }; done
    [ $code -eq "$want" ] && [ "$(tail -n 1 $out/$name.log)" = "$last" ] && ok "$name" || fail "$name" "exit code $code: $(tail -n 1 $out/$name.log)"
}
only only_one 0 "test_two" "1 passed, 0 failed" "ok two"
only only_both 0 "test_two+test_ one(1)" "3 passed, 0 failed" "ok one 1" "ok two"
only only_none 2 "test_three" "0 passed, 1 failed" "FAIL test_three: TEST_ONLY names it, but no test here begins so"
only only_some 2 "test_two+test_one(2)" "1 passed, 1 failed" "ok two" "FAIL test_one(2): TEST_ONLY names it, but no test here begins so"
only only_first 2 "tset_two+test_two" "1 passed, 1 failed" "ok two" "FAIL tset_two: TEST_ONLY names it, but no test here begins so"
NO_TEST=1 $out/some >$out/none.log; [ $? -eq 2 ] && ok program_of_no_test || fail program_of_no_test "$(tail -n 1 $out/none.log)"

# Every suite in C gives its tests by TEST or from a table, so that TEST_ONLY and --seed mean in it what they mean in any other.
for file in verify/tests/test_*.c; do
    grep -q '^int main(' "$file" || continue # one that includes another
    sed -n '/^int main(/,$p' "$file" | grep -qE 'TEST\(|trainer_cases\(|test_wanted\(' && ok "by_name_$(basename "$file" .c)" || fail "by_name_$(basename "$file" .c)" "main calls its tests without TEST of verify/support/test.h"
done

# Every suite is in one of the parts, and nothing else is.
env -u MAKEFLAGS -u SUITES make --no-print-directory -s parts >$out/parts
different=$(diff <(cut -d' ' -f2- $out/parts | tr ' ' '\n' | sort) <(env -u MAKEFLAGS -u SUITES make --no-print-directory -s suites | tr ' ' '\n' | sort) | grep '^[<>]' | tr '\n' ' ')
[ -z "$different" ] && [ "$(awk 'NF > 5' $out/parts | wc -l)" = 4 ] && ok parts_of_check || fail parts_of_check "${different:-$(cut -c1-60 $out/parts)}"

# Every suite of verify/ is in SUITES, or another one runs it.
suites=" $(env -u MAKEFLAGS make --no-print-directory -s suites) " # all, whatever is checked now
for file in verify/tests/test_*.c verify/tests/test_*.sh; do
    name=${file#verify/tests/test_}; name=${name%.*}
    case $suites in *" $name "*) ok "suite_$name"; continue ;; esac
    by=""
    for other in verify/tests/test_*.sh; do
        [ "$other" != "$file" ] && [ "$other" != "$0" ] && grep -qw "test_$name\|$name" "$other" && by=$other && break
    done
    case $suites in *" $(basename "${by:-none}" .sh | sed 's/^test_//') "*) ok "suite_$name, by $by" ;; *) fail "suite_$name" "no suite of make check runs it; add it to SUITES" ;; esac
done

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
