#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# What reads files, under AddressSanitizer and UndefinedBehaviorSanitizer by the compiler alone, where no clang is: the suite
# safetensors; fuzz.c's targets on good inputs, cut and changed ones (the fuzz suite draws its own); seqpar-verify on dumps that
# are right, wrong and damaged, and on those of the suites of dumps.
cd "$(dirname "$0")/../.." || exit 1
out=build/parsers cc=${CC:-cc}
rm -rf $out; mkdir -p $out
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
sanitize="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
echo 'int main(void) { return 0; }' | $cc $sanitize -x c - -o $out/try 2>/dev/null || { echo "skip parsers: this compiler has no sanitizers"; echo "0 passed, 0 failed, 1 skipped"; exit 0; }
make --no-print-directory -s build/options.inc
flags="-std=gnu11 -O0 -g1 -w -D_GNU_SOURCE -I. -Ibuild -Idemos -Iverify"
libraries="-lcjson -lcurl -lz -lm -lpthread"
wrong() { grep -h -m 1 -E 'runtime error|ERROR: |^FAIL|^limit: ' "$@"; }

linked="-DSEQPAR__IMPLEMENTED -DSEQPAR__LLAMA_IMPLEMENTED"

# ---- programs; the rest of the library, which reads nothing foreign, is compiled without ----
compile() { $cc $flags "$@" 2>>$out/build.log; }
{
    compile -DFUZZ_LIBRARY -c verify/fuzz/fuzz.c -o $out/library.o &&
        compile $sanitize verify/fuzz/fuzz.c verify/fuzz/fuzz_dump.c verify/fuzz/corpus.c $out/library.o -o $out/fuzz $libraries
} & fuzz=$!
wait $fuzz || fail parsers_build_fuzz "$(grep -m 1 -E 'error|undefined' $out/build.log)"
compile $sanitize $linked verify/tests/test_safetensors.c $out/library.o -o $out/test_safetensors $libraries || fail parsers_build_safetensors "$(grep -m 1 error $out/build.log)"
printf 'int seqpar_verify_test(int n, char **of) { return n < 0 || !of; }\n' >$out/no_test.c
compile $sanitize $linked -DSEQPAR_CHECK_IMPLEMENTATION -DSEQPAR_SAFETENSORS_IMPLEMENTATION verify/seqpar_verify.c $out/no_test.c $out/library.o -o $out/seqpar-verify $libraries || fail parsers_build_oracle "$(grep -m 1 -E 'error|undefined' $out/build.log)"

# ---- files of tensors ----
if ci/limit.sh 600 $out/test_safetensors >$out/safetensors.txt 2>&1 && [ -z "$(wrong $out/safetensors.txt)" ]; then ok parsers_safetensors
else fail parsers_safetensors "$(wrong $out/safetensors.txt)"; fi

# ---- the fuzzer's targets ----
targets="safetensors data pairs config options checkpoint reward dump"
. verify/fuzz/seeds.sh
FUZZ_FOLDER=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
export FUZZ_FOLDER
trap 'rm -rf "$FUZZ_FOLDER"' EXIT
for target in $targets; do
    count=${FUZZ_COUNT:-100}; [ $target = dump ] && count=$((count / 5))
    if FUZZ_TARGET=$target ci/limit.sh 300 $out/fuzz $count $out/$target/* >$out/$target.txt 2>&1; then ok parsers_$target
    else fail parsers_$target "$(wrong $out/$target.txt) $(tail -n 1 $out/$target.txt | cut -c1-200)"; fi
done

# ---- the oracle: dumps that are right and wrong, then damaged ones, which end with a sentence ----
gen() { local name=$1; shift; $out/seqpar-verify gen --out $out/$name "$@" >$out/$name.gen 2>&1 || fail parsers_gen_$name "$(wrong $out/$name.gen) $(tail -n 1 $out/$name.gen)"; }
says() { # NAME CODE FOLDER
    ci/limit.sh 300 $out/seqpar-verify ver $3 >$out/$1.txt 2>&1; local is=$?
    if [ $is -eq "$2" ] && [ -z "$(wrong $out/$1.txt)" ]; then ok parsers_$1; else fail parsers_$1 "exit code $is, not $2: $(wrong $out/$1.txt) $(head -n 1 $out/$1.txt)"; fi
}
gen right --sp 3 --tokens 41 --docs 3
gen wrong --sp 3 --tokens 41 --docs 1 --mistake shift_after_split
says oracle_right 0 $out/right/got
says oracle_wrong 1 $out/wrong/got
size=$(stat -c %s $out/right/got/rank1.safetensors)
for cut in 5 200 $((size - 1)); do
    cp -r $out/right/got $out/cut$cut; truncate -s $cut $out/cut$cut/rank1.safetensors
    says oracle_cut_$cut 3 $out/cut$cut
done
cp -r $out/right/got $out/gone; rm $out/gone/rank2.safetensors
says oracle_gone 3 $out/gone
# the suites of dumps, which ask this oracle: each kind of step, and nothing is left behind
suites="policy values step pairs objectives logits shares counts gae means preferences on_policy model"
make --no-print-directory -s $(printf 'build/test_dump_%s ' $suites) >>$out/build.log 2>&1 || fail parsers_build_dumps "$(grep -m 1 -E 'error|undefined' $out/build.log)"
mkdir -p $out/dumps/build
ln -sf ../../seqpar-verify $out/dumps/build/seqpar-verify
for suite in $suites; do
    only=""; [ $suite = model ] && only="test_right(+test_forward(+test_adapters(1" # of a suite of minutes
    if (cd $out/dumps && TEST_ONLY=$only ../../../ci/limit.sh 600 ../../test_dump_$suite) >$out/dump_$suite.txt 2>&1; then ok parsers_dump_$suite
    else fail parsers_dump_$suite "$(wrong $out/dump_$suite.txt) $(tail -n 1 $out/dump_$suite.txt)"; fi
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
