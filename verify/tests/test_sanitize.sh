#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The core's suites again under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer (without OpenMP, whose runtime
# ThreadSanitizer does not know), and one under Valgrind where that is installed. TEST_ONLY=asan_sample: that one alone.
cd "$(dirname "$0")/../.." || exit 1
out=build/sanitize
. verify/support/sanitizers.sh
for suite in pack split fold comm transport; do run asan "$asan" $suite TEST_WAYS=1; done
# check: one distribution, because the others draw from other numbers in the same way
only=TEST_WAYS=1
[ -n "$TEST_ALL" ] || only='TEST_ONLY=test_greedy+test_company+test_keys+test_distribution("top_k_then+test_ties+test_ends+test_refusals+test_not_finite'
run asan "$asan" sample TEST_WAYS=1 "$only"
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
run tsan "-fsanitize=thread" bits TEST_WAYS=1 "TEST_ONLY=test_checkpoints(2+test_mlp_tiles(2+test_ways(0+test_ways(2, 0"
if ! is_wanted valgrind_fold; then :
elif command -v valgrind >/dev/null 2>&1; then
    # Valgrind knows no AVX-512
    if $cc -std=gnu11 -O1 -g -I. -Iverify verify/tests/test_fold.c -o $out/valgrind_fold -lm -lpthread && valgrind -q --error-exitcode=9 --leak-check=full $out/valgrind_fold > $out/valgrind.log 2>&1; then echo "ok valgrind_fold"; passed=$((passed + 1))
    else echo "FAIL valgrind_fold: $(grep '==' $out/valgrind.log | head -n 1)"; failed=$((failed + 1)); fi
else echo "skip valgrind_fold: valgrind is not installed"; skipped=$((skipped + 1)); fi
sanitized
