#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Everything foreign that is read, under libFuzzer with AddressSanitizer and UndefinedBehaviorSanitizer: a second for each
# target here, FUZZ_SECONDS=600 for each by hand. What is found lies in build/fuzz; verify/fuzz/fuzz.c says what the targets are.
cd "$(dirname "$0")/../.." || exit 1
out=build/fuzz seconds=${FUZZ_SECONDS:-1}
targets=${FUZZ_TARGETS:-safetensors data pairs config options checkpoint reward dump}
mkdir -p $out
flags="-std=gnu11 -g1 -D_GNU_SOURCE -I. -Ibuild -Idemos -Iverify -Wno-unused-function"
skip() { for target in $targets; do echo "skip fuzz_$target: $1"; done; echo "0 passed, 0 failed, $(echo $targets | wc -w) skipped"; exit 0; }
command -v clang >/dev/null 2>&1 || skip "clang is not installed"
echo 'int LLVMFuzzerTestOneInput(const unsigned char *b, unsigned long n) { (void)b, (void)n; return 0; }' | clang -fsanitize=fuzzer,address,undefined -x c - -o $out/try 2>/dev/null || skip "this clang has no libFuzzer"
clang -O0 $flags -DFUZZ_LIBRARY -c verify/fuzz/fuzz.c -o $out/library.o 2>$out/library.log & library=$!
clang -O1 $flags -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined -c verify/fuzz/fuzz.c -o $out/fuzz.o 2>$out/build.log
clang -O1 $flags -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined -c verify/fuzz/fuzz_dump.c -o $out/dump.o 2>>$out/build.log
wait $library && clang -fsanitize=fuzzer,address,undefined $out/fuzz.o $out/dump.o $out/library.o -o $out/fuzz -lcjson -lcurl -lz -lm -lpthread 2>>$out/build.log || { echo "FAIL fuzz_build: $(cat $out/library.log $out/build.log | grep -m 1 error)"; echo "0 passed, 1 failed"; exit 1; }

# shellcheck source=verify/fuzz/seeds.sh
. verify/fuzz/seeds.sh
# words that are worth putting in
printf '"%s"\n' 0.index 0.labels 0.logp 0.rewards 0.groups 0.scores 0.values grad.w local.w part.grad.w objective accumulation input_ids labels loss_mask attention_mask prompt_ids chosen rejected rewards hidden_size rope_parameters __metadata__ data_offsets 1e999 -100 '\\ud800' '\\x1b' '--' > $out/words

passed=0 failed=0
export FUZZ_FOLDER=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$FUZZ_FOLDER"' EXIT
for target in $targets; do
    FUZZ_TARGET=$target ci/limit.sh $((seconds + 120)) $out/fuzz $out/$target -dict=$out/words -max_total_time=$(case $target in dump) echo $((seconds + 4)) ;; *) echo $seconds ;; esac) -max_len=$(case $target in dump) echo 600000 ;; *) echo 4096 ;; esac) -timeout=10 -rss_limit_mb=4096 -artifact_prefix=$out/found_$target. -print_final_stats=1 >$out/$target.log 2>&1
    code=$?
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' $out/$target.log)
    if [ $code -eq 0 ] && [ "${runs:-0}" -gt 10 ]; then echo "ok fuzz_$target"; passed=$((passed + 1))
    else echo "FAIL fuzz_$target: exit code $code after ${runs:-no} runs: $(grep -m 1 -E 'ERROR|runtime error' $out/$target.log | head -c 300)"; failed=$((failed + 1)); fi
    [ $seconds -gt 1 ] && echo "     $runs runs"
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
