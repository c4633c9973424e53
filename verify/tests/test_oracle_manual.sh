#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# seqpar-verify's manual page and shell completions: each verb and option of its help is in them, bash offers what fits, and the
# page is roff that groff, or mandoc, takes. What verbs say without a dump, in full (oracle_said.txt).
cd "$(dirname "$0")/../.." || exit 1
oracle=build/seqpar-verify out=build/test_oracle_manual
rm -rf $out; mkdir -p $out
passed=0 failed=0 skipped=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }
same() { if [ "$2" = "$3" ]; then ok "$1"; else fail "$1" "'$2', not '$3'"; fi; }

# ---- what there is, from help ----
$oracle --help >$out/help
verbs=$(awk '/^    [a-z]/ { print $1 }' $out/help)
options() { $oracle "$1" --help | awk '/^    --/ { print $1 }'; } # of a verb
[ "$(echo "$verbs" | wc -l)" -ge 7 ] && ok manual_verbs || fail manual_verbs "$verbs"

# ---- the page ----
$oracle --man >$out/page.1
plain() { sed -E 's/\\f[BIR]//g; s/\\-/-/g; s/\\&//g; s/\\e/\\/g' $out/page.1; }
plain >$out/page.txt
missing=""
for section in NAME SYNOPSIS VERBS "EXIT STATUS" FILES EXAMPLES; do grep -qx ".SH $section" $out/page.1 || missing="$missing $section"; done
for verb in $verbs; do
    sed -n "/^\.SS $verb\$/,/^\.S[SH] /p" $out/page.txt | tail -n +2 >$out/section
    [ -s $out/section ] || missing="$missing $verb"
    for option in $(options "$verb"); do
        grep -qE -- "^$option( |$)" $out/section || missing="$missing $verb$option"
        grep -E "^seqpar-verify $verb( |$)" $out/page.txt | grep -qE -- "\[$option( [^]]*)?\]" || missing="$missing synopsis:$verb$option"
    done
done
for code in $($oracle --help | sed -n '/^exit codes/,$p' | grep -oE '\b[0-9]\b'); do grep -qx "$code" $out/page.txt || missing="$missing code:$code"; done
if [ -z "$missing" ]; then ok manual_names_all; else fail manual_names_all "missing:$missing"; fi
# no line is a request but those that are meant, and no hyphen of an option is a bare one
odd=$(grep -nE "^[.']" $out/page.1 | grep -vE ':\.(\\"|TH|SH|SS|TP)' | head -n 1)$(grep -nE '(^|[^\\])--' $out/page.1 | head -n 1)
if [ -z "$odd" ]; then ok manual_roff; else fail manual_roff "$odd"; fi
if command -v groff >/dev/null 2>&1; then
    groff -man -Tascii -ww -z $out/page.1 >$out/groff 2>&1; same manual_groff "$(cat $out/groff)" ""
    groff -man -Tascii $out/page.1 | sed -E 's/.\x08//g; s/\x1b\[[0-9;]*m//g' | tr -s ' \n' ' ' >$out/shown
    grep -qF -- '--junit FILE write the verdict' $out/shown && ok manual_shown || fail manual_shown "$(head -c 300 $out/shown)"
else skip manual_groff "no groff"; fi
if command -v mandoc >/dev/null 2>&1; then mandoc -T lint -W error $out/page.1 >$out/mandoc 2>&1 && ok manual_mandoc || fail manual_mandoc "$(head -n 2 $out/mandoc)"
else skip manual_mandoc "no mandoc"; fi

# ---- what is said in full ----
# each "$ WORDS" of oracle_said.txt with what follows it there; of law what mistakes.h says of a mistake is left out
said() {
    local _ words
    echo "# SPDX-License-Identifier: MIT OR Unlicense"
    grep '^\$ ' verify/tests/oracle_said.txt | while read -r _ words; do
        echo "\$ $words"
        $oracle $words >$out/words 2>&1; local code=$?
        case $words in law*--json | law*--help) cat $out/words ;; law*) sed '/^$/,$d' $out/words ;; *) sed -E 's/"seqpar [0-9.]+"/"seqpar VERSION"/' $out/words ;; esac
        echo "exit code $code"
    done
}
said >$out/said.txt
if cmp -s $out/said.txt verify/tests/oracle_said.txt; then ok "manual_said ($(grep -c '^\$ ' $out/said.txt))"; else fail manual_said "$(diff verify/tests/oracle_said.txt $out/said.txt | sed -n 2,3p | tr '\n' ' '); what is meant goes into verify/tests/oracle_said.txt from $out/said.txt"; fi

# ---- pages ----
if $oracle list --markdown | cmp -s - verify/pages/MISTAKES.md; then ok manual_mistakes_page; else fail manual_mistakes_page "run make readme: verify/pages/MISTAKES.md is another"; fi
if $oracle list --gallery --markdown | cmp -s - verify/pages/GALLERY.md; then ok manual_gallery_page; else fail manual_gallery_page "run make readme: verify/pages/GALLERY.md is another"; fi
# what comparisons see is counted from a table; that the table is what the command says, the suite oracle sees
if python=$(ci/python_with.sh json); then
    if $python -B verify/frameworks/comparisons.py --page | cmp -s - verify/pages/TESTS.md; then ok manual_tests_page; else fail manual_tests_page "run make readme: verify/pages/TESTS.md is another"; fi
else skip manual_tests_page "no python3"; fi

# ---- words of options ----
for word in contiguous zigzag zigzag-doc stripe; do $oracle gen --out $out/layout_$word --sp 2 --layout $word >/dev/null 2>&1 || fail manual_words "layout $word is in the table and cannot be made"; done
$oracle gen --help | grep -q 'contiguous, zigzag, stripe or zigzag-doc$' && ok manual_words || fail manual_words "help does not list layouts"
$oracle gen --out $out/none --objective dppo 2>$out/stderr; code=$?
if [ $code -eq 2 ] && [ ! -e $out/none ] && grep -qx "error: --objective is 'dppo'; give $($oracle gen --help | sed -n 's/.*--objective.*: //p')" $out/stderr; then ok manual_bad_word; else fail manual_bad_word "exit code $code, $(cat $out/stderr)"; fi

# ---- bash ----
$oracle --completion bash >$out/completion.bash
bash -n $out/completion.bash 2>$out/stderr && ok completion_bash_syntax || fail completion_bash_syntax "$(cat $out/stderr)"
mkdir -p "$out/place/dump one" $out/place/other; touch "$out/place/d.html"
# offered WORDS...: what is offered for the last of them, which is being typed
offered() {
    (cd $out/place && bash --norc -c 'source ../completion.bash || exit 1
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); $(complete -p seqpar-verify | sed -E "s/.*-F ([^ ]*).*/\1/") 2>/dev/null
        printf "%s\n" "${COMPREPLY[@]}"' bash "$@" | sort | paste -sd,)
}
sorted() { printf '%s\n' "$@" | sort | paste -sd,; }
same completion_verbs "$(offered seqpar-verify '')" "$(sorted $verbs --help --man --completion)"
same completion_a_verb "$(offered seqpar-verify ex)" explain
wrong=""
for verb in $verbs; do
    [ "$(offered seqpar-verify "$verb" --)" = "$(sorted $(options "$verb") --help)" ] || wrong="$wrong $verb: $(offered seqpar-verify "$verb" --)"
done
same completion_options "$wrong" ""
names=$(sorted $($oracle list | awk '{ print $1 }'))
same completion_explain "$(offered seqpar-verify explain '')" "$names"
same completion_explain_begun "$(offered seqpar-verify explain shift_)" shift_after_split
operations=$(sorted $($oracle run --help | awk '/^    [a-z]/ { print $1 }')) # as help has them
same completion_operations "$(offered seqpar-verify run '')" "$operations"
same completion_dump_of_an_operation "$(offered seqpar-verify run pack '')" "dump one,other"
same completion_mistake "$(offered seqpar-verify gen --sp 2 --mistake '')" "$names"
same completion_layout "$(offered seqpar-verify gen --layout z)" zigzag,zigzag-doc
same completion_objective "$(offered seqpar-verify gen --objective '')" dpo,sft
same completion_folders "$(offered seqpar-verify ver '')" "dump one,other"
same completion_folder_of_an_option "$(offered seqpar-verify ver 'dump one' --want o)" other
same completion_folders_on_policy "$(offered seqpar-verify on_policy '')" "dump one,other"
same completion_files "$(offered seqpar-verify ver other --html d)" "d.html,dump one"
same completion_numbers "$(offered seqpar-verify law --got '')" ""
same completion_after_a_flag "$(offered seqpar-verify law --json --s)" --sp,--strict,--sums
same completion_shells "$(offered seqpar-verify --completion '')" bash,zsh
same completion_no_verb "$(offered seqpar-verify nothing '')" ""

# ---- zsh ----
$oracle --completion zsh >$out/_seqpar-verify
missing=""
for verb in $verbs; do
    grep -q "^        '$verb:" $out/_seqpar-verify || missing="$missing $verb"
    sed -n "/^        $verb) _arguments/,/;;\$/p" $out/_seqpar-verify >$out/section
    for option in $(options "$verb"); do grep -q -- "'$option\[" $out/section || missing="$missing $verb$option"; done
done
same completion_zsh_names_all "$missing" ""
same completion_zsh_operations "$(sorted $(sed -nE "s/.*'1:OPERATION:\((.*)\)'.*/\1/p" $out/_seqpar-verify))" "$operations"
# words without a name are numbered: two of one number are refused by zsh
same completion_zsh_places "$(sed -n '/^        run) _arguments/,/;;$/p' $out/_seqpar-verify | grep -oE "'[0-9]:[A-Z]+" | tr -d "'" | paste -sd,)" 1:OPERATION,2:DUMP
# texts are quoted: outside of '...' there is no blank but between words
if [ -n "$(sed "s/'\\\\''//g" $out/_seqpar-verify | awk -F"'" '/^            .--|^        .[a-z-]+:/ && NF != 3 && !/verbs=|_arguments/' | head -n 1)" ]; then fail completion_zsh_quotes "$(sed "s/'\\\\''//g" $out/_seqpar-verify | awk -F"'" '/^            .--|^        .[a-z-]+:/ && NF != 3' | head -n 1)"; else ok completion_zsh_quotes; fi
if command -v zsh >/dev/null 2>&1; then zsh -fn $out/_seqpar-verify 2>$out/stderr && ok completion_zsh_syntax || fail completion_zsh_syntax "$(cat $out/stderr)"
else skip completion_zsh_syntax "no zsh"; fi

# ---- refused ----
for words in "--completion" "--completion fish"; do
    $oracle $words >$out/stdout 2>$out/stderr; code=$?
    if [ $code -eq 2 ] && [ ! -s $out/stdout ] && [ "$(cat $out/stderr)" = "error: --completion needs a shell, bash or zsh" ]; then ok "manual_refuses_$(echo "$words" | tr -d ' -')"; else fail "manual_refuses_$(echo "$words" | tr -d ' -')" "exit code $code, $(cat $out/stderr)"; fi
done
$oracle --man >/dev/full 2>$out/stderr; code=$?
[ $code -eq 3 ] && ok manual_full_disk || fail manual_full_disk "exit code $code"

rm -rf $out/layout_*
if [ $skipped -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"; else echo "$passed passed, $failed failed"; fi
[ $failed -eq 0 ]
