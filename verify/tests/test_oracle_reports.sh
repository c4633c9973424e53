#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# seqpar-verify ver --html and --junit: what they show is counted anew from the dump by verify/python/test_reports.py; hostile names
# are escaped, a file that cannot be written is refused, a browser finds nothing to complain of.
cd "$(dirname "$0")/../.." || exit 1
oracle=build/seqpar-verify out=build/test_oracle_reports
rm -rf $out; mkdir -p $out
passed=0 failed=0 skipped=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }
python=$(ci/python_with.sh numpy || echo "${PYTHON:-python3}")
can_python=0
command -v "$python" >/dev/null 2>&1 && can_python=1
look() { PYTHONDONTWRITEBYTECODE=1 $python verify/python/test_reports.py "$@"; }
made() { $oracle gen --out "$out/$1" "${@:2}" >/dev/null || fail "reports_gen_$1" "exit code $?"; }

# judged NAME CODE HEADLINE DUMP ARGUMENTS...: text as without files, JSON, both files
judged() {
    local name=$1 code=$2 want=$3 dump=$4 is; shift 4
    $oracle ver "$dump" "$@" --html "$out/$name.html" --junit "$out/$name.xml" >"$out/$name.txt" 2>"$out/stderr"; is=$?
    $oracle ver "$dump" "$@" --json --html "$out/$name.again" >"$out/$name.json" 2>>"$out/stderr"
    if [ $is -ne "$code" ] || [ "$(head -n 1 "$out/$name.txt" | sed -E "s/^(right|marginal|insufficient):.*/\1/")" != "$want" ] || [ -s "$out/stderr" ]; then
        fail "reports_$name" "exit code $is, not $code; '$(head -n 1 "$out/$name.txt")', not '$want' $(head -c 200 "$out/stderr")"
    elif ! cmp -s "$out/$name.html" "$out/$name.again"; then fail "reports_$name" "two pages of one dump differ"
    elif ! grep -qE ">$want(: [^<]*)?</h1>" "$out/$name.html" || ! grep -qE "value=\"$want(: [^\"]*)?\"" "$out/$name.xml"; then fail "reports_$name" "no headline '$want'"
    else return 0; fi
    return 1
}
# shown NAME WHAT-page-IS-GIVEN...: and what is in both files
shown() {
    local name=$1 dump=$2 said; shift 2
    [ $can_python = 1 ] || { skip "reports_$name" "no $python to read the files"; return; }
    if ! said=$(look page "$out/$name.html" "$dump" "$out/$name.json" "$@" 2>&1); then fail "reports_$name" "page: $(echo "$said" | tail -n 1)"
    elif ! said=$(look junit "$out/$name.xml" "$out/$name.json" 2>&1); then fail "reports_$name" "junit: $(echo "$said" | tail -n 1)"
    elif ! $oracle ver "$dump" ${compare:-} | cmp -s - "$out/$name.txt"; then fail "reports_$name" "the text differs from that without files"
    else ok "reports_$name"; fi
}

# ---- steps made by gen, against the model ----
model() { local name=$1 code=$2 want=$3 rows=${rows:-1}; shift 3; compare="--model $out/$name/model"; judged "$name" "$code" "$want" "$out/$name/got" $compare && shown "$name" "$out/$name/got" heat=$rows "$@"; }
made right --sp 4
model right 0 right bad=0 bars=21 "says=All that was judged is right|Nothing is wrong in this row's places, positions, labels|0 of 21 tensors"
made positions --sp 4 --layout stripe --mistake positions_local
model positions 1 "wrong: positions_local" bad=21 says="position differs|21 of 21 tensors"
made shift --sp 4 --layout contiguous --mistake shift_after_split
model shift 1 "wrong: shift_after_split" bad=0 "says=no label at a cut|all of them next to a cut"
made crossing --sp 3 --layout zigzag --mistake labels_cross_documents
model crossing 1 "wrong: labels_cross_documents" "says=label differs"
made over --sp 4 --mistake over_sp
model over 1 "wrong: over_sp" bad=21 "says=× 0.25"
made home --sp 4 --mistake dkv_not_returned
model home 1 "wrong: dkv_not_returned" says="dk differs at a key|dv differs at a key"
made alone --sp 5 --layout zigzag --mistake own_tokens_only
model alone 1 "wrong: own_tokens_only" says="out or lse differs at a query|dq differs at a query"
made home_rows --sp 3 --dp 2 --accumulation 2 --tokens 37 --mistake dkv_not_returned
rows=4 model home_rows 1 "wrong: dkv_not_returned" says="dk differs at a key"
made four_rows --sp 2 --dp 2 --accumulation 2 --tokens 37
echo '{}' >$out/nothing.changed
rows=4 model four_rows 0 right bad=0 changed=$out/nothing.changed
made one_rank --sp 1
model one_rank 4 insufficient bad=0

# ---- the same against one rank; many rows ----
wanted() { local name=$1 code=$2 want=$3 of=$4; shift 4; compare="--want $out/$of/want"; judged "$name" "$code" "$want" "$out/$name/got" $compare && shown "$name" "$out/$name/got" heat=0 "$@"; }
made rows --sp 3 --dp 2 --accumulation 5 --docs 5 --tokens 200 --layout contiguous --mistake shift_after_split
wanted rows 1 "wrong: shift_after_split" rows bad=21 "says=6 of 10 rows are left out"
made several --sp 2 --dp 2 --mistake over_sp
wanted several 1 "wrong: one of over_sp, over_dp" several bad=21 "says=Each of the first 2 gives"

# ---- dumps written by Python ----
if [ $can_python = 1 ]; then
    written() { look write "$@" || fail "reports_write_$1" "Python could not"; }
    alone() { local name=$1 code=$2 want=$3; shift 3; written "$name" "$out/$name/got"; compare=""; judged "$name" "$code" "$want" "$out/$name/got" && shown "$name" "$out/$name/got" heat=0 "$@"; }
    alone lost 1 "wrong: token_lost" "says=held by nobody"
    alone twice 1 "wrong: token_held_twice" "says=held once more"
    alone padded 0 right "says=What stands behind token 60 is padding"
    alone masked_cut 4 insufficient "says=Nothing is wrong in what was judged, and it is not enough"
    alone one_cut 0 right "says=Nothing is wrong in this row's places, positions, labels"
    alone stripe 1 "wrong: unknown" "says=A column is 8 tokens|position differs, 12 times: the first is token 2000|None that is known gives these numbers"
    alone zigzag 1 "wrong: unknown" "says=A column is 5 tokens|position differs, 12 times: the first is token 2000"
    alone one 0 right
    alone wide 0 right "says=and so on"
    # of the steps above: log-probs behind token 40 of one rank, one of them NaN; a row that is not among the first; no rows at all
    tampered() { local name=$1 of=$2; written "$name" "$out/$name/got" "$out/$of/got"; [ -e "$out/$name/got.changed" ] && changed="changed=$out/$name/got.changed" || changed=""; }
    made zigzagged --sp 4 --tokens 97 --docs 3 --layout zigzag
    compare="--model $out/zigzagged/model"
    tampered logp zigzagged && judged logp 1 "wrong: unknown" "$out/logp/got" $compare && shown logp "$out/logp/got" heat=1 "$changed" "says=alone"
    tampered logp_round zigzagged && judged logp_round 0 right "$out/logp_round/got" $compare && shown logp_round "$out/logp_round/got" heat=1 "$changed"
    tampered logp_nan zigzagged && judged logp_nan 1 "wrong: unknown" "$out/logp_nan/got" $compare && shown logp_nan "$out/logp_nan/got" heat=1 "$changed" "says=1 of them NaN"
    for type in "" float64 float32; do
        tampered mixed$type zigzagged; $oracle ver $out/mixed$type/got $compare >$out/mixed.txt; code=$?
        if [ "$type" = float32 ]; then want="0 right: "; else want="4 insufficient: "; fi
        if [[ "$code $(head -n 1 $out/mixed.txt)" == "$want"* ]] && { [ $code = 0 ] || [ "$(tr -s ' \n' ' ' <$out/mixed.txt | grep -o 'log-probs show nothing: as near as\|gradients show nothing: as near as\|declare it: metadata dtype float32' | wc -l)" -ge 6 ]; }; then ok "reports_mixed_$type"; else fail "reports_mixed_$type" "exit code $code: $(head -n 3 $out/mixed.txt)"; fi
    done
    made long --sp 2 --tokens 1101 --layout contiguous
    compare="--model $out/long/model --budget 0"
    tampered logp_long long && judged logp_long 1 "wrong: unknown" "$out/logp_long/got" $compare && shown logp_long "$out/logp_long/got" heat=1 "$changed" "says=A column is 2 tokens"
    made all_right --sp 3 --dp 2 --accumulation 5 --tokens 37
    compare="--want $out/all_right/want"
    tampered last_rows_wrong all_right && judged last_rows_wrong 1 "wrong: unknown" "$out/last_rows_wrong/got" $compare && shown last_rows_wrong "$out/last_rows_wrong/got" "says=Row 9: replica 1, micro-batch 4|Row 2: "
    tampered twice_later all_right && judged twice_later 1 "wrong: token_held_twice" "$out/twice_later/got" $compare && shown twice_later "$out/twice_later/got" "says=Row 7: replica 1, micro-batch 2|held once more"
    tampered marginal all_right && judged marginal 0 marginal "$out/marginal/got" $compare && shown marginal "$out/marginal/got" "says=by less than half of it"
    $oracle ver "$out/marginal/got" $compare --strict >$out/stdout; code=$?
    if [ $code -eq 5 ] && grep -q '^marginal: norm marginal; places, .* right (' $out/stdout; then ok strict_marginal; else fail strict_marginal "exit code $code: $(head -n 1 $out/stdout)"; fi
    tampered unknown all_right && judged unknown 1 "wrong: unknown" "$out/unknown/got" $compare && shown unknown "$out/unknown/got" "says=None that is known"
    # ---- gradients: many tensors, one is wrong; hostile names ----
    written many "$out/many/got"; written many_want "$out/many/want"
    compare="--want $out/many/want"
    judged many 1 "wrong: unknown" "$out/many/got" $compare && shown many "$out/many/got" bad=1 bars=40 farthest=grad.layers.55.w "says=Shown are the 40 farthest of 60|1 of 60 tensors are beyond"
    written many_nan "$out/many_nan/got"
    judged many_nan 1 "wrong: unknown" "$out/many_nan/got" $compare && shown many_nan "$out/many_nan/got" bad=1 bars=40 farthest=grad.layers.50.w "says=1 of 60 tensors are beyond|The farthest is grad.layers.50.w"
    hostile="$out/<b>\"&'"$'\xc0\xbc\xed\xa0\x80' # and an overlong <, and a surrogate
    written hostile "$hostile/got"; written hostile_want "$hostile/want"
    $oracle ver "$hostile/got" --want "$hostile/want" --html $out/hostile.html --junit $out/hostile.xml >$out/hostile.txt 2>$out/stderr; code=$?
    $oracle ver "$hostile/got" --want "$hostile/want" --json >$out/hostile.json
    said=$(look page $out/hostile.html "$hostile/got" $out/hostile.json bad=8 bars=9 2>&1 && look junit $out/hostile.xml $out/hostile.json 2>&1)
    if [ $code -ne 1 ] || [ -s $out/stderr ]; then fail reports_hostile "exit code $code: $(cat $out/stderr)"
    elif grep -qE '<script|<b>|--><' $out/hostile.html $out/hostile.xml; then fail reports_hostile "a name became markup"
    elif ! grep -qF '\x1b[31m\x07' $out/hostile.html || ! grep -qF 'grad.&lt;script&gt;' $out/hostile.html; then fail reports_hostile "a name is not shown"
    elif LC_ALL=C grep -q "$(printf '[\001-\010\016-\037]')" $out/hostile.html $out/hostile.xml; then fail reports_hostile "a control character"
    elif grep -qF 'éz</text>' $out/hostile.html && grep -qE '>…?\\xa9' $out/hostile.html; then fail reports_hostile "a label begins within a character"
    elif ! grep -qF '&#39;\xc0\xbc\xed\xa0\x80/got' $out/hostile.html || [ "$(grep -cF 'w\xc3</text>' $out/hostile.html)" != 1 ] || [ "$(grep -cF '\xef\xbf\xbf</text>' $out/hostile.html)" != 1 ]; then fail reports_hostile "bytes that are no characters are not shown"
    elif [ "$said" != "12 1 8" ]; then fail reports_hostile "$(echo "$said" | tail -n 1)"
    else ok reports_hostile; fi
    tampered no_places all_right
    $oracle ver $out/no_places/got --want $out/all_right/want --html $out/no_places.html >/dev/null 2>&1; code=$?
    if [ $code -le 1 ] && [ "$(grep -c 'the dump does not say who holds which token' $out/no_places.html)" -eq 4 ]; then ok reports_no_places; else fail reports_no_places "exit code $code"; fi
else skip reports_written "no $python to write dumps"; fi

# ---- files: whole or not at all ----
# refuses NAME CODE SENTENCE ARGUMENTS...
refuses() {
    local name=$1 code=$2 want=$3 is; shift 3
    $oracle ver "$@" >$out/stdout 2>$out/stderr; is=$?
    if [ $is -eq "$code" ] && [ "$(wc -l <$out/stderr)" -eq 1 ] && grep -qF -- "$want" $out/stderr; then ok "$name"
    else fail "$name" "exit code $is, '$(head -c 200 $out/stderr)', not '$want'"; fi
}
echo '<!DOCTYPE html>old' >$out/old.html
refuses reports_no_folder 3 "nowhere/page.html: cannot be opened for writing" $out/right/got --html $out/nowhere/page.html
grep -q '^right' $out/stdout && ok reports_verdict_all_the_same || fail reports_verdict_all_the_same "the verdict is lost: $(head -n 1 $out/stdout)"
refuses reports_no_junit 3 "nowhere/x.xml: cannot be opened for writing" $out/right/got --junit $out/nowhere/x.xml
refuses reports_a_folder 3 "is not a regular file" $out/right/got --html $out
refuses reports_full 3 "is not a regular file" $out/right/got --junit /dev/full
refuses reports_same 2 "--html and --junit are the same file" $out/right/got --html $out/x --junit $out/x
refuses reports_same_by_another_name 2 "--html and --junit are the same file" $out/right/got --html $out/x --junit $out/../test_oracle_reports/x
refuses reports_lacks 2 "--html lacks its value" $out/right/got --html
refuses reports_no_dump 3 "cannot be opened as a folder" $out/nothing --html $out/old.html --junit $out/new.xml
[ "$(cat $out/old.html)" = '<!DOCTYPE html>old' ] && [ ! -e $out/new.xml ] && [ ! -e $out/x ] && ok reports_untouched || fail reports_untouched "a refused run has written"
ls $out | grep -qE '\.tmp|\.part' && fail reports_leftovers "$(ls $out | grep -E '\.tmp|\.part' | head -n 1)" || ok reports_leftovers
(ulimit -f 8; trap '' XFSZ; $oracle ver $out/right/got --html $out/old.html >$out/stdout 2>$out/stderr); code=$?
if [ $code -eq 3 ] && [ "$(wc -l <$out/stderr)" -eq 1 ] && [ "$(cat $out/old.html)" = '<!DOCTYPE html>old' ]; then ok reports_disk_full; else fail reports_disk_full "exit code $code, $(cat $out/stderr)"; fi

# a report takes the place of an earlier one, and of nothing else
mkdir $out/mine; cp -r $out/right/got $out/right/model $out/mine
ln -s got/rank1.safetensors $out/mine/link; ln $out/mine/got/rank2.safetensors $out/mine/hard.html
sums() { find $out/mine -type f | sort | xargs sha256sum; }
sums >$out/before
refuses reports_over_the_dump 2 "would be read as a file of a dump" $out/mine/got --html $out/mine/got/rank0.safetensors
refuses reports_beside_the_dump 2 "would be read as a file of a dump" $out/mine/got --junit $out/mine/got/more.safetensors
refuses reports_over_a_link 2 "which is there and is no report" $out/mine/got --html $out/mine/link
refuses reports_over_a_hard_link 2 "which is there and is no report" $out/mine/got --html $out/mine/hard.html
refuses reports_over_a_config 2 "--junit is $out/mine/model/config.json, which is there and is no report" $out/mine/got --junit $out/mine/model/config.json
refuses reports_over_the_other_kind 2 "which is there and is no report" $out/mine/got --junit $out/right.html
sums | cmp -s - $out/before && ok reports_dump_untouched || fail reports_dump_untouched "$(sums | diff - $out/before | head -n 1)"
: >$out/empty.html
if $oracle ver $out/right/got --html $out/empty.html --junit $out/again.xml >/dev/null && $oracle ver $out/right/got --html $out/empty.html --junit $out/again.xml >/dev/null && grep -q '</html>' $out/empty.html; then ok reports_again; else fail reports_again "exit code $?"; fi

# ---- what was judged, and what was not ----
said="places, positions, labels, attention, loss, norm, step (7 of 12 stages); gradients of parameters were NOT judged: give --want or --model"
flat() { sed '/^ \{4\}[a-z]/,$d' | tr -s ' \n' ' ' | sed 's/ $//'; }
$oracle ver $out/right/got --html $out/unjudged.html --junit $out/unjudged.xml | flat >$out/unjudged.txt
$oracle ver $out/right/got --json >$out/unjudged.json
if [ "$(cat $out/unjudged.txt)" = "right: $said" ]; then ok headline_text; else fail headline_text "$(cat $out/unjudged.txt)"; fi
if grep -qF "\"summary\":	\"$said\"" $out/unjudged.json && tr -d ' \t\n' <$out/unjudged.json | grep -qF '"not_judged":["logits","log-probs","counts","reduction","gradients"]'; then ok headline_json; else fail headline_json "$(grep summary $out/unjudged.json)"; fi
if grep -qF "<h1 class=\"badge right unjudged\">right: $said</h1>" $out/unjudged.html && grep -qF "<title>right: $said - seqpar-verify" $out/unjudged.html; then ok headline_html; else fail headline_html "$(grep -o '<h1.*</h1>' $out/unjudged.html)"; fi
if grep -qF "name=\"verdict\" value=\"right: $said\"" $out/unjudged.xml; then ok headline_junit; else fail headline_junit "$(grep verdict $out/unjudged.xml)"; fi
if grep -qF '<h1 class="badge right">right: ' $out/right.html && ! grep -q 'NOT judged' $out/right.html $out/right.xml $out/right.txt $out/right.json; then ok headline_of_gradients; else fail headline_of_gradients "$(head -n 2 $out/right.txt)"; fi
# stages of other objectives are shown nowhere
if grep -q '"rewards"\|>rewards<\|^    rewards' $out/unjudged.json $out/unjudged.html $out/unjudged.xml $out/right.txt; then fail headline_other_objectives "rewards of sft"; else ok headline_other_objectives; fi
# requires NAME CODE HEADLINE ARGUMENTS...
requires() {
    local name=$1 code=$2 want=$3 is; shift 3
    $oracle ver "$@" >$out/stdout 2>$out/stderr; is=$?
    if [ $is -eq "$code" ] && [[ "$(flat <$out/stdout)" == $want ]] && [ ! -s $out/stderr ]; then ok "$name"; else fail "$name" "exit code $is: '$(flat <$out/stdout)' $(cat $out/stderr)"; fi
}
requires require_gradients 4 "insufficient: *right; gradients not judged: it takes --model, or --want*" $out/right/got --require gradients
requires require_given 0 "right: *, gradients, norm, step (9 of 12 stages)" $out/right/got --require gradients,norm,log-probs --model $out/right/model
requires require_several 4 "insufficient: *; counts not judged: it takes *; reduction not judged: it takes *" $out/right/got --require counts,reduction,norm --want $out/right/want
requires require_foreign 4 "insufficient: *; rewards not judged: the dump's objective has no such stage*" $out/right/got --require rewards
requires require_of_wrong 1 "wrong: over_sp" $out/over/got --require gradients,counts --want $out/over/want
requires strict_gradients 4 "insufficient: *; gradients not judged: *" $out/right/got --strict
requires strict_given 0 "right: *, gradients, *" $out/right/got --strict --model $out/right/model
refuses require_unknown 2 "--require is 'gradients,grads'; give stages with commas between: places, positions, labels, " $out/right/got --require gradients,grads
refuses require_empty 2 "--require is ''; give stages" $out/right/got --require ""
refuses ver_of_what_gen_made 3 "$out/right: no .safetensors file, but there are dumps inside; give $out/right/got or $out/right/want" $out/right
refuses ver_want_of_what_gen_made 3 "give $out/right/got or $out/right/want" $out/right/got --want $out/right
cp -r $out/right/model $out/mine/got/model
requires headline_names_the_model 0 "right: *; gradients of parameters were NOT judged: give --model $out/mine/got/model" $out/mine/got
# Python's door: a pass without gradients is a warning; asked for, it is none
if command -v python3 >/dev/null 2>&1; then
    cat >$out/expect.py <<END
import pathlib, warnings
import seqpar_verify

got, model, said = pathlib.Path("$out/right/got"), "$out/right/model", []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    said.append(seqpar_verify.expect_right(got))
    assert [w.category for w in caught] == [seqpar_verify.GradientsNotJudged] and "gradients of parameters were NOT judged" in str(caught[0].message)
    said.append(seqpar_verify.expect_right(got, model=model, require=["gradients", "norm"]))
    assert len(caught) == 1
assert said[0] == "right: $said" and said[1].endswith("gradients, norm, step (9 of 12 stages)"), said
assert "gradients" in seqpar_verify.ver(got)["not_judged"]
for options in dict(strict=True), dict(require="gradients"), dict(require=("gradients",)):
    try:
        seqpar_verify.expect_right(got, **options)
    except AssertionError as e:
        assert "gradients not judged" in " ".join(str(e).split())
    else:
        raise SystemExit(f"{options} passed")
END
    if SEQPAR_VERIFY=$oracle PYTHONPATH=verify/python PYTHONDONTWRITEBYTECODE=1 python3 $out/expect.py 2>$out/stderr; then ok headline_python; else fail headline_python "$(tail -n 1 $out/stderr)"; fi
else skip headline_python "no python3"; fi

# ---- a browser ----
browser=""
for name in chromium chromium-browser google-chrome chrome; do [ -n "$browser" ] || browser=$(command -v $name); done
if [ -z "$browser" ]; then skip reports_browser "no Chromium"
else
    for name in right positions logp hostile; do
        [ -e $out/$name.html ] || continue
        ci/limit.sh 240 "$browser" --headless --no-sandbox --disable-gpu --user-data-dir=$PWD/$out/browser --enable-logging=stderr --v=0 --dump-dom "file://$PWD/$out/$name.html" >$out/$name.dom 2>$out/$name.console
        if [ ! -s $out/$name.dom ]; then skip "reports_browser_$name" "Chromium does not start here"
        elif grep -q ':CONSOLE' $out/$name.console; then fail "reports_browser_$name" "$(grep -m 1 ':CONSOLE' $out/$name.console | cut -c1-200)"
        elif ! grep -qF ">$(head -n 1 $out/$name.txt 2>/dev/null)" $out/$name.dom; then fail "reports_browser_$name" "no headline"
        elif [ "$(grep -o '<svg' $out/$name.dom | wc -l)" != "$(grep -o '<svg' $out/$name.html | wc -l)" ] || [ "$(grep -oE '<(rect|path|p|td)\b' $out/$name.dom | wc -l)" != "$(grep -oE '<(rect|path|p|td)\b' $out/$name.html | wc -l)" ]; then fail "reports_browser_$name" "its elements are others than were written"
        else ok "reports_browser_$name"; fi
    done
fi

# ---- what a right verdict does not exclude ----
if [ $can_python = 1 ]; then
    mkdir -p $out/excluded; $python verify/python/test_excluded.py $oracle $out/excluded >$out/excluded.log 2>&1; is=$?
    while read -r word line; do case $word in ok) ok "$line" ;; FAIL) fail "${line%%:*}" "${line#*: }" ;; esac; done <$out/excluded.log
    if [ $is -ne 0 ] && ! grep -q '^FAIL' $out/excluded.log; then fail excluded "exit code $is: $(tail -n 1 $out/excluded.log)"; fi
else skip excluded "no python3"; fi
if [ $skipped -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"; else echo "$passed passed, $failed failed"; fi
[ $failed -eq 0 ]
