#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The benchmarks of `make bench` with small cases: every result is right, and a planted mistake is found, so that no time is
# taken of a wrong answer. Times are not looked at.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_bench
rm -rf $out; mkdir -p $out
passed=0 failed=0 skipped=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
make() { command make --no-print-directory -s "$@"; }
linked=$(make linked-flags)

# cases LOG: how many are right, of how many
cases() { sed -nE 's/^([0-9]+) of ([0-9]+) cases are correct.*/\1 \2/p' "$1"; }

# bench NAME CASES FAULT: at least so many cases, and with the fault not all of them right
bench() {
    local name=$1 least=$2 fault=$3 right of
    if ! ci/limit.sh 600 "build/bench_$name" --tiny >$out/$name.log 2>&1; then fail "bench_$name" "$(grep -hE 'WRONG|DIFFER|bench_|^limit: ' $out/$name.log | head -n 1)"; return; fi
    read -r right of < <(cases $out/$name.log)
    cp "build/bench/tiny_$name.json" $out/
    if [ "${right:-0}" -ge "$least" ] && [ "$right" = "$of" ] && [ "$(grep -c '"correct": true' "build/bench/tiny_$name.json")" = "$right" ]; then ok "bench_$name ($right cases)"
    else fail "bench_$name" "${right:-no} of ${of:-no} cases, at least $least are expected"; fi
    echo "int seqpar__fault = $fault;" >$out/$name.c
    case $name in layers) library="-O0" ;; *) library="-O1 $linked build/faults/seqpar.o" ;; esac
    ${CC:-cc} -std=gnu11 -march=native -fopenmp -w -Ibuild/faults -I. -Iverify "bench/bench_$name.c" $out/$name.c $library -o "$out/$name" -lcjson -lm -lpthread -ldl 2>$out/$name.build.log || { fail "bench_${name}_built" "$(head -n 1 $out/$name.build.log)"; return; }
    ci/limit.sh 600 "$out/$name" --tiny >$out/$name.fault.log 2>&1
    code=$?
    read -r right of < <(cases $out/$name.fault.log)
    if [ $code -eq 1 ] && [ "${of:-0}" -ge "$least" ] && [ "$right" -lt "$of" ]; then ok "bench_${name}_finds_fault_$fault"; else fail "bench_${name}_finds_fault_$fault" "exit code $code, ${right:-no} of ${of:-no} cases pass for correct"; fi
}

make planted build/faults/seqpar.o || fail bench_planted "see above"
for program in cpu chunks layers ranks sample step vocab; do make build/bench_$program || fail bench_built "build/bench_$program"; done
if make build/steps; then ok bench_steps_built; else fail bench_steps_built "build/steps, which bench_transformers.py asks"; fi
bench cpu 14 12
bench chunks 64 50
bench layers 18 24
bench ranks 16 4
bench step 9 32
bench sample 2 47
bench vocab 3 31

# The page of a CPU, from what was written; a case that is wrong has none.
if ! command -v python3 >/dev/null 2>&1; then echo "skip bench_page: no python3"; skipped=$((skipped + 1))
else
    cp $out/tiny_*.json build/bench/ # not those of the planted mistakes
    page=$(python3 bench/page.py $out/pages --tiny 2>$out/page.log)
    if [ -s "$page" ] && [ "$(wc -l <"$page")" -le 95 ] && [ "$(grep -c '^| ' "$page")" -ge 30 ] && grep -qE '^Summary: attention at [0-9]+\.[0-9]{2} to [0-9]+\.[0-9]{2} of the peak' "$page"; then ok "bench_page ($(wc -l <"$page") lines)"; else fail bench_page "$(tail -n 1 $out/page.log) $page"; fi
    # A real page: a share above 1 is no share, and shapes that are left out are told by their range.
    python3 - $out/real <<'PYTHON' >$out/page.log 2>&1 && ok bench_page_of_a_real_run || fail bench_page_of_a_real_run "$(tail -n 1 $out/page.log)"
import importlib.util, sys
spec = importlib.util.spec_from_file_location("page", "bench/page.py")
page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(page)
case = lambda shape, share, peer: {"case": "attention forward", "shape": shape, "gflops": 50.0, "share_of_peak": share, "PyTorch_over_ours": peer}
cases = [case("S=768 d=64", 0.25, 0.5), case("S=2304 d=64", 0.75, 1.5)]
text = "\n".join(page.cpu(cases))
assert "Not shown: 1 smaller shapes, 0.25 to 0.25 of peak, peers 0.50 to 0.50." in text and "S=768" not in text, text
assert "attention at 0.25 to 0.75 of the peak" in page.summary(cases, None)
page.check_peak(cases, False)
for share in (1.01, float("nan")):
    try:
        page.check_peak(cases + [case("S=2304 d=64", share, 1)], False)
    except SystemExit as said:
        assert "quiet machine" in str(said)
    else:
        raise AssertionError(f"a share of {share} has a page")
PYTHON
    sed -i '0,/"correct": true/s//"correct": false/' build/bench/tiny_vocab.json
    if ! python3 bench/page.py $out/wrong --tiny >/dev/null 2>$out/page.log && grep -q '1 of 3 cases are wrong' $out/page.log && [ ! -e $out/wrong ]; then ok bench_page_refuses; else fail bench_page_refuses "$(tail -n 1 $out/page.log)"; fi
fi

# ---- beside transformers, whose answers are compared too ----
if ! python=$(ci/python_with.sh torch transformers); then
    echo "skip bench_transformers: no python3 here has torch and transformers"; skipped=$((skipped + 1))
else
    make build/steps || fail bench_built build/steps
    beside() { ci/limit.sh 600 $python bench/bench_transformers.py --tiny --steps "$1" --json $out/$2.json >$out/$2.log 2>&1; }
    if beside build/steps transformers && [ "$(grep -c '"correct": true' $out/transformers.json)" = 2 ]; then ok bench_transformers; else fail bench_transformers "$(tail -n 1 $out/transformers.log)"; fi
    echo "int seqpar__fault = 12;" >$out/steps.c
    ${CC:-cc} -std=gnu11 -march=native -fopenmp -w -Ibuild/faults -I. -Ibuild -Idemos -Iverify bench/steps.c $out/steps.c -O1 $linked build/faults/seqpar.o -o $out/steps -lcjson -lz -lm -lpthread -ldl 2>$out/steps.build.log || fail bench_transformers_built "$(head -n 1 $out/steps.build.log)"
    beside $out/steps planted; code=$?
    if [ $code -eq 1 ] && grep -q '"correct": false' $out/planted.json; then ok bench_transformers_finds_fault_12; else fail bench_transformers_finds_fault_12 "exit code $code: $(tail -n 1 $out/planted.log)"; fi
fi
for program in cpu chunks layers ranks sample step vocab; do
    ci/limit.sh 120 build/bench_$program --tinny longg >$out/typo.log 2>&1
    code=$?
    if [ $code -eq 2 ] && [ "$(wc -l <$out/typo.log)" -eq 1 ]; then ok "bench_${program}_refuses_a_typo"; else fail "bench_${program}_refuses_a_typo" "exit code $code, $(head -n 1 $out/typo.log)"; fi
done
if [ $skipped -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"; else echo "$passed passed, $failed failed"; fi
[ $failed -eq 0 ]
