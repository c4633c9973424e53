#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# What a visitor compiles first: the README's snippet, the idea without the library, losses and optimizer alone. They are
# short, C and C++ at once, without a warning, and say what they claim. (The sanitize suite runs them under sanitizers.)
cd "$(dirname "$0")/../.." || exit 1
out=build/test_snippet
cc=${CC:-cc} cxx=${CXX:-c++}
rm -rf $out; mkdir -p $out
passed=0 failed=0 skipped=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }
has() { command -v "$1" >/dev/null 2>&1; }
short() { # FILE LINES COLUMNS
    local lines columns
    lines=$(wc -l <"$1") columns=$(expand "$1" | awk '{ if (length > most) most = length } END { print most + 0 }')
    if [ "$lines" -le "$2" ] && [ "$columns" -le "$3" ]; then ok "short_${1##*/} ($lines lines, $columns columns)"
    else fail "short_${1##*/}" "$lines lines of $columns columns; at most $2 of $3"; fi
}
strict="-Wall -Wextra -Wpedantic -Werror"
prints() { # NAME WANTED COMPILER FLAGS SOURCE LIBRARIES: compiles without a warning, ends with 0, prints the file WANTED
    local x=$out/$1
    if ! eval "$3 $4 $strict $5 -o $x $6" >$x.log 2>&1; then fail "$1" "$(grep -m 1 -E 'error|warning|undefined' $x.log)"
    elif ! $x >$x.txt 2>>$x.log; then fail "$1" "exit code not 0: $(tail -n 1 $x.txt) $(tail -n 1 $x.log)"
    elif ! cmp -s $x.txt "$2"; then fail "$1" "$(diff $x.txt "$2" | head -n 3 | tr '\n' ' ')"
    else ok "$1"; fi
}

# ---- the README's text is the file without its licence line ----
sed 1d demos/snippet.c >$out/readme.c
short $out/readme.c 30 80
# whole, as a user compiles it
strict="-Wall -Wextra -Werror"
printf '%s\n' "ranks: 1, last of out: 0.050119" "ranks: 4, last of out: 0.050119" "identical bits: yes" >$out/snippet.want
prints snippet_c11 $out/snippet.want "$cc" "-std=c11 -I." demos/snippet.c "-lm -lpthread"
if has "${cxx%% *}"; then prints snippet_cxx17 $out/snippet.want "$cxx" "-x c++ -std=c++17 -I." demos/snippet.c "-lm -lpthread"
else skip snippet_cxx17 "no $cxx"; fi
strict="-Wall -Wextra -Wpedantic -Werror"
linked=$(make --no-print-directory -s linked-flags) # prototypes alone
# its own lines with all that optimizers warn of
for way in "gcc -std=c11" "g++ -x c++ -std=c++17" "clang -std=c11" "clang++ -x c++ -std=c++17"; do
    name=snippet_warnings_${way%% *}
    if ! has "${way%% *}"; then skip "$name" "no ${way%% *}"
    elif $way -O2 $strict -I. $linked -c demos/snippet.c -o $out/warnings.o 2>$out/$name.log; then ok "$name"
    else fail "$name" "$(grep -m 1 -E 'error|warning' $out/$name.log)"; fi
done
# attention in order of arrival has other bits: then it says so, and ends with 1
sed 's/desc.layout = /desc.relaxed = 1, &/' demos/snippet.c >$out/relaxed.c
$cc -std=c11 -I. $out/relaxed.c -o $out/relaxed -lm -lpthread
$out/relaxed >$out/relaxed.txt; code=$?
if [ $code = 1 ] && [ "$(tail -n 1 $out/relaxed.txt)" = "identical bits: no" ]; then ok snippet_can_say_no; else fail snippet_can_say_no "exit code $code, $(tail -n 1 $out/relaxed.txt)"; fi

# ---- the idea without the library ----
short demos/00_by_hand.c 150 96
if grep -q '#include "' demos/00_by_hand.c; then fail by_hand_alone "$(grep -m 1 '#include "' demos/00_by_hand.c)"; else ok by_hand_alone; fi
$cc -O2 demos/00_by_hand.c -o $out/by_hand -lm && $out/by_hand >$out/by_hand.want
if [ "$(cut -d'(' -f1 $out/by_hand.want)" = "arrival order  : 4 ranks equal 1 rank: no 
tree over cells: 4 ranks equal 1 rank: yes " ]; then ok by_hand_says_no_and_yes; else fail by_hand_says_no_and_yes "$(tr '\n' ' ' <$out/by_hand.want)"; fi
# The same numbers from every compiler, where the machine can fuse, and under sanitizers.
sanitize="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
echo 'int main(void) { return 0; }' >$out/main.c
for way in "gcc -std=c11" "g++ -x c++ -std=c++17" "clang -std=c11" "clang++ -x c++ -std=c++17"; do
    has "${way%% *}" || { skip "by_hand_${way%% *}" "no ${way%% *}"; continue; }
    prints by_hand_${way%% *}_O0 $out/by_hand.want "$way" -O0 demos/00_by_hand.c -lm
    prints by_hand_${way%% *}_O3 $out/by_hand.want "$way" "-O3 -march=native" demos/00_by_hand.c -lm
    if $way $sanitize $out/main.c -o $out/main 2>/dev/null; then prints by_hand_${way%% *}_asan_ubsan $out/by_hand.want "$way" "$sanitize" demos/00_by_hand.c -lm
    else skip by_hand_${way%% *}_asan_ubsan "${way%% *} does not link with its sanitizers here"; fi
done

# ---- losses and optimizer alone ----
short demos/10_loss_and_optimizer.c 80 96
build/10_loss_and_optimizer >$out/loss.txt; code=$?
if [ $code = 0 ] && [ "$(tail -n 1 $out/loss.txt)" = "identical bits: yes" ]; then ok loss_demo_says_yes; else fail loss_demo_says_yes "exit code $code, $(tail -n 1 $out/loss.txt)"; fi
of_ranks() { sed -n "s/^ranks: $1, //p" $out/loss.txt; }
if [ "$(of_ranks 1)" = "$(of_ranks 4)" ] && of_ranks 4 | awk '{ falls += $2 + 0 < last; last = $2 + 0; norms += $4 > 0 } END { exit !(NR == 3 && falls == 2 && norms == 3) }'; then ok loss_demo_learns; else fail loss_demo_learns "$(tr '\n' ' ' <$out/loss.txt)"; fi

printf '%d passed, %d failed' $passed $failed; [ $skipped -gt 0 ] && printf ', %d skipped' $skipped; echo
[ $failed -eq 0 ]
