#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The suites again under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer (without OpenMP, whose runtime
# ThreadSanitizer does not know), and one under Valgrind where that is installed. TEST_ONLY=asan_sample: that one alone.
cd "$(dirname "$0")/../.." || exit 1
out=build/sanitize
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
for suite in pack split fold comm transport sample token_file option_parser data_documents data_files data_pairs arith plot_progress rollout; do run asan "$asan" $suite TEST_WAYS=1; done
run asan "$asan" plan TEST_ONLY=test_sound+test_mutations+test_refused+test_mask+test_balance+test_formulas+test_as_far+test_long
# check: attention of each kind once; check-all: at every number of ranks
only=TEST_WAYS=1
[ -n "$TEST_ALL" ] || only="TEST_ONLY=test_truth+test_product+test_lengths+test_long+test_gaps+test_many+test_relaxed_truth(0)+test_relaxed_grid+test_relaxed_rule+test_refused+test_own_attention(0)+test_packed(0)+test_own_attention_re+test_own_kernel_re+test_document_lengths(3)"
run asan "$asan" attn "$only"
run asan "$asan" bits TEST_WAYS=5 TEST_ONLY=test_room_refused+test_shards_refused+test_masters+test_checkpoints+test_mlp_tiles+test_ways
# what a visitor compiles first, leaks included
for demo in snippet 05_attention 10_loss_and_optimizer; do
    is_wanted asan_$demo && library asan "$asan" || continue
    libraries="-lcjson -lz -lm -lpthread" build asan_$demo "$asan" demos/$demo.c $linked $out/asan.o || continue
    if $out/asan_$demo >$out/asan_$demo.txt 2>&1; then echo "ok asan_$demo"; passed=$((passed + 1))
    else echo "FAIL asan_$demo: $(grep -m 1 -E 'runtime error|Sanitizer' $out/asan_$demo.txt || tail -n 1 $out/asan_$demo.txt)"; failed=$((failed + 1)); fi
done
run tsan "-fsanitize=thread" comm TEST_WAYS=1
run tsan "-fsanitize=thread" nccl TEST_WAYS=1
run tsan "-fsanitize=thread" bits TEST_WAYS=1 "TEST_ONLY=test_checkpoints(2+test_mlp_tiles(2+test_ways(0+test_ways(2, 0"
if ! is_wanted valgrind_fold; then :
elif command -v valgrind >/dev/null 2>&1; then
    # Valgrind knows no AVX-512
    if $cc -std=gnu11 -O1 -g -I. -Iverify verify/tests/test_fold.c -o $out/valgrind_fold -lm -lpthread && valgrind -q --error-exitcode=9 --leak-check=full $out/valgrind_fold > $out/valgrind.log 2>&1; then echo "ok valgrind_fold"; passed=$((passed + 1))
    else echo "FAIL valgrind_fold: $(grep '==' $out/valgrind.log | head -n 1)"; failed=$((failed + 1)); fi
else echo "skip valgrind_fold: valgrind is not installed"; skipped=$((skipped + 1)); fi
printf '%d passed, %d failed' $passed $failed; [ $skipped -gt 0 ] && printf ', %d skipped' $skipped; echo
[ $failed -eq 0 ]
