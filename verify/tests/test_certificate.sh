#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# make certificate in small; and that a layout with other bits is seen.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_certificate
rm -rf $out; mkdir -p $out
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }

STEPS=3 EVERY=7 OUT=$out/small ci/certificate.sh >$out/small.log 2>&1; code=$?
[ $code = 0 ] && [ "$(grep -cE '^(sft|dpo|rm|kto|ppo|grpo): [4-9] runs, hash [0-9a-f]{16}$' $out/small.log)" = 6 ] && ok certificate_small || fail certificate_small "exit code $code: $(grep -m 1 -E 'WRONG|error' $out/small.log || tail -n 1 $out/small.log)"
[ "$(grep -v '^#' $out/small/runs.tsv | cut -f10 | sort -u | wc -l)" = 6 ] && ok certificate_hashes_differ || fail certificate_hashes_differ "$(grep -v '^#' $out/small/runs.tsv | cut -f1,10 | sort -u | tr '\n' ' ')"
# none is left out: a run that reads the list itself would take cases away
[ "$(grep -vc '^#' $out/small/runs.tsv)" = $((6 * (1 + $(wc -l <$out/small/cases) / 7))) ] && ok certificate_all_cases || fail certificate_all_cases "$(grep -vc '^#' $out/small/runs.tsv) of $(wc -l <$out/small/cases) cases"
# every value of every factor in some run, and every two of two factors that go together
awk '{ for (f = 1; f <= NF; f++) { seen[f, $f]; for (g = f + 1; g <= NF; g++) pair[f, g, $f, $g] } } END { for (k in seen) n++; for (k in pair) m++; exit !(n >= 23 && m >= 200) }' $out/small/cases && ok certificate_pairs || fail certificate_pairs "$(wc -l <$out/small/cases) cases"
[ "$(grep -c '^| [a-z]* | [1-8] | ' $out/small/CERTIFICATE.md)" = "$(grep -vc '^#' $out/small/runs.tsv)" ] && ok certificate_page || fail certificate_page "$(tail -n 1 $out/small/CERTIFICATE.md)"
# a reward and an advantage that are not 0
[ -n "$(sed -nE 's/.*"reward": (-?[0-9.e-]+).*"policy_loss": (-?[0-9.e-]+).*"grad_norm": ([0-9.e-]+).*/\1 \2 \3/p' $out/small/grpo.1.jsonl | awk '$1 != 0 && $2 != 0 && $3 > 0')" ] && ok certificate_rewards || fail certificate_rewards "$(head -n 1 $out/small/grpo.1.jsonl)"
# stripe cuts cells: other bits
STEPS=2 EVERY=9 STAGES=sft LAYOUTS="zigzag stripe" OUT=$out/stripe ci/certificate.sh >$out/stripe.log 2>&1; code=$?
[ $code = 1 ] && grep -q '^WRONG: sft .* stripe ' $out/stripe.log && ! grep '^WRONG' $out/stripe.log | grep -qv stripe && ok certificate_sees_other_bits || fail certificate_sees_other_bits "exit code $code: $(tail -n 1 $out/stripe.log)"
# a run that fails is no equal one
STEPS=2 EVERY=9 STAGES=sft LAYOUTS="zigzag none" OUT=$out/none ci/certificate.sh >$out/none.log 2>&1; code=$?
[ $code = 1 ] && grep -q '^error: sft .*layout' $out/none.log && ok certificate_sees_failures || fail certificate_sees_failures "exit code $code: $(tail -n 1 $out/none.log)"
# worlds drawn by a seed, with rows of any length; another seed draws others
STEPS=2 WORLDS=6 SEED=5 STAGES=sft OUT=$out/drawn ci/certificate.sh >$out/drawn.log 2>&1; code=$?
[ $code = 0 ] && [ "$(grep -vc '^#' $out/drawn/runs.tsv)" = 7 ] && ok certificate_drawn || fail certificate_drawn "exit code $code: $(tail -n 1 $out/drawn.log)"
STEPS=1 WORLDS=6 SEED=6 STAGES=sft EVERY=9 OUT=$out/other ci/certificate.sh >$out/other.log 2>&1
[ "$(cat $out/drawn/cases $out/other/cases | sort -u | wc -l)" -gt 10 ] && ok certificate_seed || fail certificate_seed "$(head -n 3 $out/other/cases | tr '\n' ',')"
# a student and its teacher
STEPS=3 WORLDS=8 SEED=3 STAGES=kd OUT=$out/kd ci/certificate.sh >$out/kd.log 2>&1; code=$?
[ $code = 0 ] && grep -q '^kd: 9 runs, hash ' $out/kd.log && ok certificate_kd || fail certificate_kd "exit code $code: $(tail -n 1 $out/kd.log)"
# steps with labels of shares
STEPS=3 WORLDS=8 SEED=4 STAGES=prm OUT=$out/prm ci/certificate.sh >$out/prm.log 2>&1; code=$?
[ $code = 0 ] && grep -q '^prm: 9 runs, hash ' $out/prm.log && ok certificate_prm || fail certificate_prm "exit code $code: $(tail -n 1 $out/prm.log)"
# adapters, dropout and kills: a run that is killed goes on in another world, and ends alike
RANK=3 KILLS=2 WORLDS=5 SEED=4 STEPS=4 STAGES="sft rm ppo" OUT=$out/killed ci/certificate.sh >$out/killed.log 2>&1; code=$?
killed=$(sed -n 's/^killed \([0-9]*\) times .*/\1/p' $out/killed.log)
[ $code = 0 ] && [ "$(grep -cE '^(sft|rm|ppo): 6 runs, hash ' $out/killed.log)" = 3 ] && [ "${killed:-0}" -ge 15 ] && ok "certificate_killed ($killed kills)" || fail certificate_killed "exit code $code, ${killed:-no} kills: $(tail -n 1 $out/killed.log)"
RANK=2 STEPS=4 STAGES=sft EVERY=99 OUT=$out/rank ci/certificate.sh >$out/rank.log 2>&1
[ "$(tail -n 1 $out/rank/runs.tsv | cut -f10)" != "$(sed -n 's/^sft: .* hash //p' $out/killed.log)" ] && ok certificate_rank || fail certificate_rank "$(tail -n 1 $out/rank.log)"
# any seed draws to an end
for seed in 0 1 9 2147483646 2147483647 4294967296; do STEPS=1 WORLDS=200 SEED=$seed STAGES= OUT=$out/seed ci/limit.sh 60 ci/certificate.sh >$out/seed.log 2>&1; [ "$(sort -u $out/seed/cases | wc -l)" = 201 ] || fail "certificate_seed_$seed" "$(wc -l <$out/seed/cases) cases"; done
ok certificate_seeds
echo "$passed passed, $failed failed"
[ $failed = 0 ]
