#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# build/seqpar-verify: every mistake of its table is named from numbers that are worked out here, right ones are not accused,
# evidence that shows nothing is no pass, and bad input gets one sentence.
cd "$(dirname "$0")/../.." || exit 1
oracle=${BUILD:-build}/seqpar-verify out=build/test_oracle
rm -rf $out; mkdir -p $out
passed=0 failed=0 skipped=0 named=""
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }

# says NAME CODE HEADLINE ARGUMENTS...
says() {
    local name=$1 code=$2 want=$3 got; shift 3
    got=$($oracle "$@" 2>$out/stderr); local is=$?
    if [ $is -eq "$code" ] && [ "$(echo "$got" | head -n 1 | sed -E 's/^(right|insufficient): .*/\1/')" = "$want" ] && [ ! -s $out/stderr ]; then ok "$name"; named="$named ${want#wrong: }"
    else fail "$name" "exit code $is, not $code; '$(echo "$got" | head -n 1)', not '$want' $(cat $out/stderr)"; fi
}
# refuses NAME SENTENCE ARGUMENTS...: exit code 2, that sentence on stderr and nothing on stdout
refuses() {
    local name=$1 want=$2 is; shift 2
    $oracle "$@" >$out/stdout 2>$out/stderr; is=$?
    if [ $is -eq 2 ] && [ ! -s $out/stdout ] && [ "$(wc -l <$out/stderr)" -eq 1 ] && grep -qF -- "$want" $out/stderr; then ok "$name"
    else fail "$name" "exit code $is, '$(head -c 200 $out/stderr)', not '$want'"; fi
}
number() { awk "BEGIN { printf \"%.12g\", $1 }"; }

# ---- a factor: P = 3, D = 5, A = 7, so that all products of powers differ ----
sizes="--norm --sp 3 --dp 5 --accumulation 7"
while read -r name factor; do says "oracle_law_$name" 1 "wrong: $name" law --want 2.26449 --got "$(number "2.26449 * $factor")" $sizes; done <<END
times_sp 3
over_sp 1/3
times_sp_squared 9
over_sp_squared 1/9
times_dp 5
over_dp 1/5
times_accumulation 7
over_accumulation 1/7
END
says oracle_law_right 0 right law --want 2.26449 --got 2.26449 $sizes
says oracle_law_rounding 0 right law --want 2.26449 --got 2.2657 $sizes
says oracle_law_marginal 0 marginal law --want 1 --got 1.0012 $sizes
says oracle_law_marginal_strict 5 marginal law --want 1 --got 1.0012 $sizes --strict
says oracle_law_beyond_marginal 1 "wrong: unknown" law --want 1 --got 1.0016 $sizes
says oracle_law_bf16 0 right law --want 1 --got 1.0016 $sizes --tolerance 0.02
says oracle_law_unknown 1 "wrong: unknown" law --want 1 --got 0.41 $sizes
says oracle_law_nan 1 "wrong: unknown" law --want 1 --got nan $sizes
says oracle_law_negative 1 "wrong: unknown" law --want 1 --got -3 $sizes
says oracle_law_want_nan 4 insufficient law --want nan --got 1 $sizes
says oracle_law_want_zero 4 insufficient law --want 0 --got 0 $sizes
says oracle_law_one_rank 4 insufficient law --want 1 --got 1
says oracle_law_one_rank_off 1 "wrong: unknown" law --want 1 --got 2
says oracle_law_several 1 "wrong: one of over_sp, over_dp" law --want 1 --got 0.25 --sp 4 --dp 4 --norm
# of losses, of either, of a window, of a shard's norm
while read -r name got words; do says "oracle_law_loss_$name" 1 "wrong: $name" law --loss --want 6.9805 --got "$(number "6.9805 * $got")" $words; done <<END
losses_added 2 --sp 2
losses_added 3 --sp 2 --dp 3
losses_added 6 --sp 2 --dp 3
shares_averaged 1/2 --sp 2 --dp 3
over_accumulation 1/5 --sp 2 --accumulation 5
times_accumulation 5 --sp 2 --accumulation 5
END
says oracle_law_loss_unknown 1 "wrong: unknown" law --loss --want 1 --got 0.25 --sp 2
says oracle_law_loss_no_pair 1 "wrong: unknown" law --loss --want 1 --got 0.3 --sp 2 --dp 5
says oracle_law_either 1 "wrong: one of times_sp, losses_added" law --want 6.9805 --got 13.9609 --sp 2
says oracle_law_either_one 1 "wrong: over_sp_squared" law --want 1 --got 0.25 --sp 2
says oracle_law_window 1 "wrong: another_window" law --want 1 --got 0.75 --window 3/4
says oracle_law_window_more 1 "wrong: another_window" law --want 1 --got 4 --window 8/2 --dp 2
says oracle_law_window_or 1 "wrong: one of times_dp, another_window" law --norm --want 1 --got 2 --window 4/2 --dp 2
says oracle_law_window_by_itself 1 "wrong: another_window" law --want 1 --got 0.75 --sp 2 --accumulation 3
says oracle_law_window_last 1 "wrong: another_window" law --norm --want 1 --got "$(number 3/5)" --dp 7 --accumulation 3
says oracle_law_window_none 1 "wrong: unknown" law --norm --want 1 --got "$(number 3/7)" --sp 5 --accumulation 3
says oracle_law_window_right 0 right law --want 1 --got 1 --window 3/4
says oracle_law_part_sp 1 "wrong: norm_of_part" law --want 1 --got "$(number '1/sqrt(3)')" --sp 3 --dp 5
says oracle_law_part_all 1 "wrong: norm_of_part" law --want 1 --got "$(number '1/sqrt(15)')" --sp 3 --dp 5
says oracle_law_no_root_of_loss 1 "wrong: unknown" law --loss --want 2 --got 3.4641 --sp 3
says oracle_law_copies_sp 1 "wrong: norm_counts_copies" law --want 2 --got 3.4641 --sp 3
says oracle_law_copies_dp 1 "wrong: norm_counts_copies" law --want 2 --got 4.4721 --sp 3 --dp 5
says oracle_law_copies_all 1 "wrong: norm_counts_copies" law --want 2 --got 7.746 --sp 3 --dp 5
if $oracle law --want 1 --got 0.52 --sp 4 | tr -s ' \n' ' ' | grep -qF '1 / sqrt(sp) is 0.5'; then ok oracle_law_shard_hint; else fail oracle_law_shard_hint "no word of the norm of a part"; fi

# ---- sums and counts: 27 / 16 = 1.6875; means 4, 1, none, 2 ----
parts="--sums 4,7,0,16 --counts 1,7,0,8"
while read -r name got; do says "oracle_count_$name" 1 "wrong: $name" law --got "$got" $parts --all_tokens 50; done <<END
mean_of_means 1.75
mean_of_non_empty_means 2.3333333
local_count 27
own_mean_alone 4
own_mean_alone 2
share_alone 0.25
share_alone 0.4375
local_count 3.857142857
local_count 3.375
sum_of_means 7
all_tokens_counted 0.54
nan_of_an_empty_rank nan
END
says oracle_count_shares_averaged 1 "wrong: shares_averaged" law --got 0.421875 $parts --all_tokens 99
says oracle_count_several 1 "wrong: one of shares_averaged, all_tokens_counted" law --got 0.421875 $parts --all_tokens 64
says oracle_count_own_or_share 1 "wrong: one of own_mean_alone, share_alone" law --got 1 $parts --all_tokens 99
scale() { # NAME GOT SENTENCE
    if $oracle law --want 1 --got "$2" --sp 3 --dp 5 | tr -s ' \n' ' ' | grep -qE "$3"; then ok oracle_law_scale_$1; else fail oracle_law_scale_$1 "no word of a loss scale"; fi
}
scale left 65536 'it is 2\^16: a loss scale, as of fp16, that was not divided out gives it'
scale twice -0.0009765625 'it is 2\^-10: a loss scale, as of fp16, that was divided out twice gives it'
scale least 64.06 'it is 2\^6: a loss'
scale none 32 '32 a factor that changes'
scale not_quite 64.1 '64.1 a factor that changes'
says oracle_count_right 0 right law --got 1.6875 $parts
says oracle_count_marginal 0 marginal law --got 1.0007 --sums 1.0005,2.9979 --counts 1,3
says oracle_count_unknown 1 "wrong: unknown" law --got 1.9 $parts
says oracle_count_inf 1 "wrong: unknown" law --got inf $parts
says oracle_count_nan_without_reason 1 "wrong: unknown" law --got nan --sums 2,3 --counts 1,3
says oracle_count_equal 4 insufficient law --got 1.25 --sums 2,3 --counts 2,2
says oracle_count_one_group 4 insufficient law --got 2 --sums 4 --counts 2
says oracle_count_none 4 insufficient law --got 0 --sums 0,0 --counts 0,0

# ---- bad input ----
refuses oracle_no_verb "no verb is called 'lwa'" lwa
refuses oracle_no_got "law needs --got" law --want 1 --sp 2
refuses oracle_no_want "law needs --want, or --sums and --counts" law --got 1 --sp 2
refuses oracle_both "and not both" law --got 1 --want 1 --sums 1,2 --counts 1,2
refuses oracle_sums_alone "--sums and --counts go together" law --got 1 --sums 1,2
refuses oracle_unequal "--sums has 2 numbers and --counts has 3" law --got 1 --sums 1,2 --counts 1,2,3
refuses oracle_count_half "--counts[1] is 2.5" law --got 1 --sums 1,2 --counts 1,2.5
refuses oracle_count_below "--counts[0] is -1" law --got 1 --sums 1,2 --counts -1,2
refuses oracle_sum_nan "wrong from 'nan,2' on" law --got 1 --sums nan,2 --counts 1,2
refuses oracle_sum_text "wrong from 'x' on" law --got 1 --sums 1,x --counts 1,2
refuses oracle_sum_gap "wrong from ',2' on" law --got 1 --sums 1,,2 --counts 1,2
refuses oracle_sp_zero "--sp is '0'; give a whole number from 1" law --got 1 --want 1 --sp 0
refuses oracle_sp_half "--sp is '2.5'" law --got 1 --want 1 --sp 2.5
refuses oracle_got_text "--got is '1e'; give a number" law --got 1e --want 1
refuses oracle_got_lacks "--got lacks its value" law --got
refuses oracle_tolerance "--tolerance is a relative distance" law --got 1 --want 1 --sp 2 --tolerance nan
refuses oracle_unknown_option "what is '--spp'?" law --spp 2
refuses oracle_ver_nothing "ver needs the folder of a dump" ver
refuses oracle_on_policy_nothing "on_policy needs the folder of a dump" on_policy
refuses oracle_explain_nothing "explain needs the name" explain
refuses oracle_explain_escaped "no mistake is called '\\x1b[31mred'" explain $'\e[31mred'
refuses oracle_explain_unknown "no mistake is called 'over_spp'" explain over_spp
refuses oracle_explain_alike "no mistake is called 'sp_squared'; is it times_sp_squared, over_sp_squared?" explain sp_squared
refuses oracle_explain_two "what is 'times_sp'?" explain over_sp times_sp
refuses oracle_ver_two "what is 'b'? Put --want before it if it is a dump of the same step on one rank" ver a b
refuses oracle_run_no_operation "run has no operation 'a'; give run OPERATION DUMP --out DIR" run a
if [ "$($oracle explain over-sp)" = "$($oracle explain over_sp)" ]; then ok oracle_explain_hyphen; else fail oracle_explain_hyphen "over-sp is not over_sp"; fi
many=$(seq -s, 1 4097)
refuses oracle_too_many "give 1 to 4096 numbers" law --got 1 --sums "$many" --counts 1
$oracle list >/dev/full 2>$out/stderr
if [ $? -eq 3 ] && grep -q 'could not be written' $out/stderr; then ok oracle_full_disk; else fail oracle_full_disk "$(cat $out/stderr)"; fi

# ---- the table ----
names=$($oracle list | awk '{ print $1 }')
if [ "$(echo "$names" | sort -u | wc -l)" = "$(echo "$names" | wc -l)" ] && [ "$(echo "$names" | wc -l)" -ge 15 ]; then ok oracle_names_differ; else fail oracle_names_differ "$names"; fi
for name in $names; do
    [[ "$named " = *" $name "* ]] || grep -qE "\"(wrong: )?$name\"" verify/tests/test_dump*.c || fail oracle_named "no case here or in test_dump*.c is $name"
    $oracle explain "$name" >$out/explained && [ "$(head -n 1 $out/explained | cut -d' ' -f1)" = "$name" ] && [ "$(grep -cE '^    (symptom|cause|right|wrong|by hand|fix|seen) ' $out/explained)" -eq 7 ] && awk 'length > 96 { exit 1 }' $out/explained || fail "oracle_explain_$name" "$(head -n 1 $out/explained)"
done
ok oracle_explains
# a table whose columns begin where they should, of every entry once, and no line wider than a page
$oracle list --gallery >$out/gallery
if [ "$(grep -cE '^B[0-9]{2,3} +(named|wrong|score|unseen) ' $out/gallery)" = 131 ] && [ -z "$(sed '/^$/,$d' $out/gallery | awk '/ $/ || substr($0, 5, 1) substr($0, 13, 1) substr($0, 24, 1) != "   " || (length > 52 && (substr($0, 53, 1) != " " || substr($0, 54, 1) == " "))')" ] && awk 'length > 96 { exit 1 }' $out/gallery && tail -n 1 $out/gallery | grep -qE '^[0-9]+ named, [0-9]+ wrong, [0-9]+ score, [0-9]+ unseen of 131$'; then ok "oracle_gallery ($(tail -n 1 $out/gallery))"; else fail oracle_gallery "$(tail -n 1 $out/gallery)"; fi
if command -v python3 >/dev/null 2>&1; then
    reads() { $oracle "${@:2}" --json | python3 -c "import json, sys; d = json.load(sys.stdin); sys.exit(not ($1))"; }
    if reads 'd["verdict"] == "wrong" and [m["name"] for m in d["mistakes"]] == ["over_sp"] and d["mistakes"][0]["fix"] and d["evidence"]' law --norm --got 0.25 --want 1 --sp 4 && reads 'len(d) >= 15 and d[0]["name"] == "times_sp"' list && reads 'len(d) == 131 and d[0]["id"] == "B01" and {"stage": "attention", "mistake": "merge_overflows"} in d[0]["seen"]' list --gallery && reads 'd["name"] == "over_dp"' explain over_dp && reads 'd["verdict"] == "right" and d["mistakes"] == []' law --got 1 --want 1 --sp 4; then ok oracle_json; else fail oracle_json "is not what was asked for"; fi
    # what a dump's verdict is of, and each mistake explained once
    $oracle gen --mistake mean_of_means --sp 2 --tokens 24 --docs 3 --out $out/once >/dev/null
    if reads 'd["version"] and d["dump"] == "'$out'/once/got" and [list(m) for s in d["stages"] for m in s.get("mistakes", [])] == [["name"]] and d["mistakes"][0]["fix"]' ver $out/once/got --want $out/once/want; then ok oracle_json_once; else fail oracle_json_once "is not what was asked for"; fi
    if reads 'all(e["seen"] or e["sight"] == "score" or e["how"].endswith(".") for e in d) and sum("how" in e for e in d) >= 40' list --gallery; then ok oracle_gallery_how; else fail oracle_gallery_how "what no dump shows has no reason"; fi
else echo "skip oracle_json: no python3"; fi
# ---- steps that are made here ----
refuses oracle_gen_nothing "gen needs --out" gen
refuses oracle_gen_layout "--layout is 'zigzak'; give contiguous, zigzag, stripe or zigzag-doc" gen --out $out/made --layout zigzak
refuses oracle_gen_objective "--objective is 'kto'; give sft or dpo" gen --out $out/made --objective kto
refuses oracle_gen_mistake "no mistake is called 'over_spp'" gen --out $out/made --mistake over_spp
refuses oracle_gen_mistake_of_another "cannot be planted" gen --out $out/made --mistake kl_missing
refuses oracle_gen_no_label "no token of these documents is learnt" gen --out $out/made --tokens 5 --docs 5
refuses oracle_gen_sizes "70 documents in 61 tokens" gen --out $out/made --docs 70
refuses oracle_test_level "--level is neither 1 nor 2" test --level 3
if [ ! -e $out/made ]; then ok oracle_gen_leaves_nothing; else fail oracle_gen_leaves_nothing "$(ls $out/made)"; fi
says oracle_gen_right 0 "$out/made/got  the step on 4 ranks, right" gen --out $out/made
$oracle gen --out $out/made 2>$out/stderr >/dev/null
if [ $? -eq 3 ] && grep -q 'it is there already; give another --out' $out/stderr; then ok oracle_gen_is_there; else fail oracle_gen_is_there "$(cat $out/stderr)"; fi
# WANT is the right step, whatever the mistake
$oracle gen --out $out/made_wrong --mistake shift_after_split >/dev/null
if cmp -s $out/made/want/rank0.safetensors $out/made_wrong/want/rank0.safetensors; then ok oracle_gen_want_is_right; else fail oracle_gen_want_is_right "with shift_after_split OUT/want is another"; fi
says oracle_ver_model 0 right ver $out/made/got --model $out/made/model
# what a program dropped is not in a dump
cp -r $out/made/model $out/dropped; sed -i 's/^{/{"attention_dropout": 0.25,/' $out/dropped/config.json
$oracle ver $out/made/got --model $out/dropped >$out/stdout 2>$out/stderr
if [ $? -eq 3 ] && grep -q '"attention_dropout" is 0.25, but a dump does not hold dropout masks' $out/stderr; then ok oracle_ver_dropout; else fail oracle_ver_dropout "$(cat $out/stderr)"; fi
says oracle_ver_want 0 right ver $out/made/got --want $out/made/want
$oracle mutants >$out/mutants; code=$?
if [ $code -eq 0 ] && [ "$(grep -cE ' named( among several)? *$' $out/mutants)" -ge 65 ]; then ok "oracle_mutants ($(tail -n 1 $out/mutants))"; else fail oracle_mutants "exit code $code: $(grep -vE ' named( among several)? *$' $out/mutants | tr -s ' \n' ' ')"; fi
# a test that compares losses alone, as many do, sees few of them: that of transformers, as verify/pages/TESTS.md has it
printf '#!/bin/sh\n! %s ver "$2" --want "$1" | grep -q "^    loss      wrong"\n' $oracle >$out/losses_alone.sh
compare="sh $out/losses_alone.sh"
python=$(ci/python_with.sh json) && compare="$python -B verify/frameworks/comparisons.py --record $out/record transformers"
$oracle mutants --score "$compare" >$out/scored; code=$?
if [ $code -eq 7 ] && grep -q 'over_sp .* not seen by CMD' $out/scored && grep -q 'mean_of_means .* seen by CMD' $out/scored && tail -n 1 $out/scored | grep -qE '^[0-9]+ mutants, [0-9]+ named, [1-9][0-9] seen by CMD$'; then ok "oracle_mutants_score ($(tail -n 1 $out/scored))"; else fail oracle_mutants_score "exit code $code: $(tail -n 1 $out/scored)"; fi
if [ -n "$python" ]; then
    awk '/^<!-- score says/ { on = 1; next } on && /^```/ { if (++fences == 2) exit; next } on && !/^(\.\.\.|\$ .*)$/' verify/pages/TESTS.md >$out/score_says
    if [ "$(wc -l <$out/score_says)" -ge 4 ] && [ "$(grep -cxFf $out/scored $out/score_says)" = "$(wc -l <$out/score_says)" ]; then ok oracle_score_says; else fail oracle_score_says "verify/pages/TESTS.md shows what the command does not print: $(grep -vxFf $out/scored $out/score_says | head -n 1); make scores"; fi
    # every comparison saw each of these dumps, in the order of the lines
    awk '$1 == "sft" || $1 == "dpo" { print $1 "\t" $2 }' $out/scored | paste - $out/record >$out/score_table
    grep -vE '^(#|objective)' verify/frameworks/comparisons.tsv | cut -f 1,2,4- >$out/score_want
    if [ -s $out/score_want ] && cmp -s $out/score_table $out/score_want; then ok "oracle_score_table ($(wc -l <$out/score_want))"; else fail oracle_score_table "verify/frameworks/comparisons.tsv is another, make scores: $(diff $out/score_want $out/score_table | sed -n 2,3p | tr '\n' ' ')"; fi
else skip oracle_score_table "no python3"; fi
says oracle_test 0 "$(build/verify_sp --ring_attn_size 2 | head -n 1)" test
# every name that a verdict may give is of a mistake in the table
unknown=$(grep -ohE 'mistake_named\("[a-z_0-9]+"\)|\.name = "[a-z_0-9]+"' verify/oracle/*/*.h | grep -oE '"[a-z_0-9]+"' | tr -d '"' | grep -vxE "loss|norm" | sort -u | while read -r name; do $oracle explain "$name" >/dev/null 2>&1 || echo "$name"; done)
if [ -z "$unknown" ]; then ok oracle_names_are_known; else fail oracle_names_are_known "$unknown"; fi

if [ $skipped -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"; else echo "$passed passed, $failed failed"; fi
[ $failed -eq 0 ]
