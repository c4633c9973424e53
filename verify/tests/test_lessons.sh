#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The lessons: their numbers and pictures are what the programs print, each quiz has the mistake that explain names and says so
# nowhere, the page of all of them needs nothing but itself, and a browser can click through it.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_lessons lessons=demos/lessons oracle=build/seqpar-verify
rm -rf $out; mkdir -p $out
passed=0 failed=0 skipped=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }

# ---- pages and pictures are as the programs print them ----
# Distances and limits of roundings (3.1e-16) and the points of a curve belong to a build's instructions.
plain() { case $1 in */curves.svg | */norms.svg) sed -E 's/[0-9.]+/N/g' "$1" ;; *) sed -E 's/[0-9.]+e-[0-9]+/N/g' "$1" ;; esac; }
if bash ci/lessons.sh $out/new 2>$out/log; then ok lessons_made; else fail lessons_made "$(head -n 2 $out/log | tr '\n' ' ')"; fi
for file in $(cd $out/new && echo *.md zh/*.md pictures/*.svg); do
    [ -e "$out/new/$file" ] || continue
    if [ -e "$lessons/$file" ] && cmp -s <(plain "$out/new/$file") <(plain "$lessons/$file"); then ok "lesson_$file"
    else fail "lesson_$file" "make lessons writes another one: $(diff <(plain "$out/new/$file") <(plain "$lessons/$file" 2>/dev/null) | sed -n 2p)"; fi
done
extra=$(cd $lessons && for file in *.md zh/*.md pictures/*.svg; do [ ! -e "$file" ] || [ -e "$OLDPWD/$out/new/$file" ] || echo "$file"; done)
[ -z "$extra" ] && ok lesson_files || fail lesson_files "no page shows $extra"
[ "$(ls $out/new/[1-9]_*.md | wc -l)" = 9 ] && ok lessons_nine || fail lessons_nine "$(ls $out/new)"
# Two screens of text are about 60 lines of it. Numbers belong to programs: every block with digits is one of theirs.
for page in $lessons/[1-9]_*.md $lessons/zh/[1-9]_*.md; do
    [ -e "$page" ] || continue
    name=$(basename "$page" .md)
    lines=$(awk '/^```/ { block = !block; next } !block && NF && !/^<!--/' "$page" | wc -l)
    [ "$lines" -le 60 ] && ok "lesson_short_$name" || fail "lesson_short_$name" "$lines lines of text"
    typed=$(awk '/^<!-- (numbers|output): / { made = 1; next } /^```/ { block = !block; if (block && !made) print "line " FNR; if (!block) made = 0 }' "$page")
    [ -z "$typed" ] && ok "lesson_printed_$name" || fail "lesson_printed_$name" "a block that no program prints: $typed"
done
# Every number of the text stands in a block or picture of its page, or is what its example is made of.
given() { case $1 in 2) echo 100,000 ;; 3) echo -100 ;; 4) echo 100 300 2024 ;; 5) echo 1e-8 ;; 6 | 8) echo fp32 ;; 7) echo quiz 11 12 ;; 9) echo 0.693147 ;; esac; }
for page in $lessons/[1-9]_*.md $lessons/zh/[1-9]_*.md; do
    [ -e "$page" ] || continue
    name=${page#$lessons/} number=$(basename "$page" | cut -c1)
    pictures=$(grep -oE 'pictures/[a-z]+\.svg' "$page" | sed "s#^#$lessons/#")
    typed=$(awk -v given="$(given "$number")" -f verify/support/lesson_numbers.awk "$page" $pictures)
    [ -z "${typed% }" ] && ok "lesson_numbers_$name" || fail "lesson_numbers_$name" "no program prints $typed"
done
said=$(build/lesson no_part 2>&1); [ $? = 2 ] && [ "$said" = "error: no part is called 'no_part'; build/lesson lists them" ] && ok lesson_refuses || fail lesson_refuses "$said"
unused=$(build/lesson | while read -r part; do grep -qE "numbers: $part -->|pictures/$part\)" $lessons/*.md || echo "$part"; done)
[ -z "$unused" ] && ok lesson_parts || fail lesson_parts "no page shows $unused"
# explain names pages that are there
pages=$(sed -n '/mistake_lesson(/,$p' verify/oracle/verdict/mistakes.h | grep -oE 'demos/lessons/[a-z0-9_]+\.md' | sort -u)
for page in $pages; do [ -e "$page" ] && ok "explained_in_$(basename "$page" .md)" || fail "explained_in_$(basename "$page" .md)" "there is no $page"; done
[ "$($oracle explain over_sp | tail -n 1)" = "    lesson   demos/lessons/5_factor.md" ] && ok explain_lesson || fail explain_lesson "$($oracle explain over_sp | tail -n 1)"

# ---- quizzes ----
$oracle list | cut -d' ' -f1 >$out/names
n=1
while $oracle explain --quiz $n >$out/explained 2>/dev/null; do
    name=$(head -n 1 $out/explained | cut -d' ' -f1)
    $oracle gen --quiz $n --out $out/quiz$n >$out/said 2>&1 || fail "quiz_$n" "$(cat $out/said)"
    $oracle ver $out/quiz$n/got --want $out/quiz$n/want >$out/verdict
    verdict=$(head -n 1 $out/verdict)
    [[ $verdict = "wrong: $name" || $verdict = "wrong: one of "*"$name"* ]] && ok "quiz_$n" || fail "quiz_$n" "it is $name, but $verdict"
    if grep -qFf $out/names $out/said || grep -raqFf $out/names $out/quiz$n; then fail "quiz_secret_$n" "it says $(grep -haoFf $out/names -r $out/said $out/quiz$n | head -n 1)"; else ok "quiz_secret_$n"; fi
    shown=$(grep -hoE -- '--mistake [a-z_]+' $lessons/[1-9]_*.md | grep -c -- " $name\$")
    [ "$shown" = 0 ] && ok "quiz_new_$n" || fail "quiz_new_$n" "a lesson shows $name"
    n=$((n + 1))
done
[ $n = 13 ] && [ "$($oracle explain --quiz $n 2>&1)" = "error: --quiz is 13; give 1 to 12" ] && ok quizzes || fail quizzes "$((n - 1)): $($oracle explain --quiz $n 2>&1)"

# ---- the page of all of them ----
page=$PWD/$out/new/lessons.html
if [ ! -e "$page" ]; then skip lessons_page "no cmark-gfm"
else
    size=$(stat -c %s "$page")
    [ "$size" -lt 1000000 ] && ok "lessons_page ($((size / 1000)) kB)" || fail lessons_page "$size bytes"
    outside=$(grep -oE '(src|href)="[^#"][^"]*"|url\([^#)][^)]*\)|@import' "$page" | head -n 2)
    [ -z "$outside" ] && ok lessons_alone || fail lessons_alone "$outside"
    dead=$(grep -oE 'href="#[a-z0-9]+"' "$page" | sort -u | tr -d '"' | sed 's/href=#//' | while read -r id; do grep -q "id=\"$id\"" "$page" || echo "$id"; done)
    [ -z "$dead" ] && ok lessons_links || fail lessons_links "no such place: $dead"
    python=$(ci/python_with.sh selenium) driver=$(command -v chromedriver)
    if [ -z "$python" ] || [ -z "$driver" ]; then skip lessons_browser "no python3 with selenium and chromedriver"
    else
        ci/limit.sh 240 "$python" verify/support/lessons_browser.py "$page" "$driver" $out >$out/browser 2>$out/browser.log
        if grep -q '^skip ' $out/browser; then skip lessons_browser "$(sed -n 's/^skip //p' $out/browser | head -n 1)"
        else
            grep -E '^(ok|FAIL) ' $out/browser
            passed=$((passed + $(grep -c '^ok ' $out/browser))) failed=$((failed + $(grep -c '^FAIL ' $out/browser)))
            [ "$(grep -cE '^(ok|FAIL) ' $out/browser)" -ge 8 ] || fail lessons_browser "$(tail -n 1 $out/browser.log)"
        fi
    fi
fi
rm -rf $out/quiz*
if [ $skipped -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"; else echo "$passed passed, $failed failed"; fi
[ $failed -eq 0 ]
