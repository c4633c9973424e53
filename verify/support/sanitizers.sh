# SPDX-License-Identifier: MIT OR Unlicense
# What test_sanitize.sh and test_sanitize_trainers.sh have in common, with $out set: suites built under sanitizers and run.
# TEST_ONLY=asan_sample: that one alone.
cc=${CC:-cc}
mkdir -p $out
passed=0 failed=0 skipped=0 wanted=$TEST_ONLY
unset TEST_ONLY
make --no-print-directory -s build/options.inc
linked=$(make --no-print-directory -s linked-flags)
build() { # PROGRAM FLAGS SOURCE...: 0, or the reason is said
    local program=$1 flags=$2; shift 2
    $cc -std=gnu11 -O1 -g -march=native $flags -I. -Ibuild -Idemos -Iverify "$@" -o $out/$program $libraries 2>$out/$program.log && return 0
    if grep -qE 'cannot find -l(asan|ubsan|tsan)|unrecognized.*sanitize' $out/$program.log; then echo "skip $program: this compiler has no such sanitizer"; skipped=$((skipped + 1))
    else echo "FAIL $program: $(grep -m 1 error $out/$program.log)"; failed=$((failed + 1)); fi
    return 1
}
is_wanted() { [ -z "$wanted" ] || [ "$1" = "$wanted" ]; }
library() { [ -e $out/$1.o ] || libraries="" build $1.o "$2 -DSEQPAR_COUNT_WORK -c" verify/library.c; } # NAME FLAGS
run() { # NAME FLAGS SUITE ENVIRONMENT...
    is_wanted "$1_$3" || return
    local name=$1 flags=$2 suite=$3 library="$linked $out/$1.o" libraries="-lcjson -lcurl -lz -lm -lpthread" begin=$SECONDS; shift 3
    case $suite in fold | plan | attn) library="" ;; esac
    library $name "$flags" || return
    build ${name}_$suite "$flags" verify/tests/test_$suite.c $library || return
    if env "$@" ci/limit.sh 3600 $out/${name}_$suite > $out/$name.$suite.log 2>&1 && ! grep -qE 'runtime error|WARNING: ThreadSanitizer|ERROR: ' $out/$name.$suite.log; then echo "ok ${name}_$suite ($((SECONDS - begin)) s)"; passed=$((passed + 1))
    else echo "FAIL ${name}_$suite: $(grep -E 'runtime error|Sanitizer|^FAIL|^limit: ' $out/$name.$suite.log | head -n 1)"; failed=$((failed + 1)); fi
}
asan="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
# Variables that are not set hold a pattern, where the compiler can do that.
fill=-ftrivial-auto-var-init=pattern
echo 'int main(void) { return 0; }' | $cc $fill -x c - -o $out/fill 2>/dev/null && asan="$asan $fill"
rm -f $out/asan.o $out/tsan.o
sanitized() { # the last line, and whether all passed
    printf '%d passed, %d failed' $passed $failed; [ $skipped -gt 0 ] && printf ', %d skipped' $skipped; echo
    [ $failed -eq 0 ]
}
