# SPDX-License-Identifier: MIT OR Unlicense
# awk -f verify/support/constants.awk verify/support/smallest.h HEADER...: names the numbers of the headers that a build cannot make smaller: a
# macro or an enumerator of 8 or more that neither verify/support/smallest.h has, nor its list of those that stay, with a reason; a
# loop's step or an array's length of that size without a name. Says also where a default is another than listed, where a
# listed name has no #ifndef, and what is listed and gone. Exit code 1 if it says anything.
function say(text) { print text; wrong = 1 }
function plain(s) { gsub(/\/\*.*/, "", s); gsub(/[ \t]+/, " ", s); gsub(/^ | $/, "", s); return s }
# a number, or made of numbers: 1 << 19, (8 * SEQPAR__MR), INT64_C(1); not a string, a type or a call
function numeric(s) {
    gsub(/INT64_C|U?INT[0-9]+_MAX|\(int64_t\)|\(uintptr_t\)/, "", s)
    return s ~ /[0-9]/ && s !~ /[a-df-wyz"{};,\\]/
}
function small(s) { return s ~ /^\(?-?[0-7]\)?$/ || s ~ /^\(?-/ }
function kept(name,    i) { for (i = 1; i <= stays; i++) if (name ~ "^(" stay[i] ")$") { used[i] = 1; return 1 } return 0 }
function found(name, value, guarded) {
    if (small(value)) return
    if (name in smallest) {
        met[name] = 1
        if (!guarded) say(FILENAME ": " name " has no #ifndef")
        if (value != default_of[name]) say(FILENAME ": " name " is " value "; verify/support/smallest.h says " default_of[name])
    } else if (!kept(name)) say(FILENAME ": " name " = " value " is not in verify/support/smallest.h")
}
FNR == 1 { file++; guard = ""; comment = 0 }
file == 1 && /^#define [A-Z]/ && NF > 3 {
    smallest[$2] = 1
    value = substr($0, index($0, "/*") + 3); sub(/ \*\/.*/, "", value)
    default_of[$2] = value
}
file == 1 && /^   [A-Za-z_0-9.*()|:\\]+  / { stay[++stays] = $1 }
file == 1 { next }
comment { if (/\*\//) comment = 0; next }
/^ *\/\*/ && !/\*\// { comment = 1; next }
/^ *#ifndef/ { guard = $2; next }
/^ *#define [A-Z][A-Za-z_0-9]* / {
    value = $0; sub(/^ *#define [A-Za-z_0-9]* */, "", value); value = plain(value)
    if (value == "\\") { name = $2; getline; value = plain($0) } else name = $2
    if (numeric(value)) found(name, value, guard == name)
}
/enum [a-z_]* *\{/ || enumerates {
    text = $0; gsub(/\/\*[^*]*\*\//, "", text); enumerates = /enum/ ? !/\}/ : !/\}/
    sub(/.*enum[^{]*\{/, "", text); sub(/\}.*/, "", text)
    n = split(text, part, ",")
    for (k = 1; k <= n; k++) if (split(part[k], half, "=") == 2) {
        name = plain(half[1]); value = plain(half[2])
        if (numeric(value)) found(name, value, 0)
    }
}
/(\+|-)= [0-9][0-9]+[);]/ { unnamed("step", "(\\+|-)= [0-9]+") }
/^ .*[^r] \*?[a-z_]+\[[0-9][0-9]+\]/ && !/char / { unnamed("length", "[a-z]\\[[0-9]+") }
function unnamed(what, pattern,    base, number) {
    match($0, pattern)
    number = substr($0, RSTART, RLENGTH); gsub(/[^0-9]/, "", number)
    base = FILENAME; sub(/.*\//, "", base)
    if (!kept(base ":" number)) say(FILENAME ":" FNR ": a " what " of " number " without a name")
}
END {
    for (name in smallest) if (!(name in met)) say("verify/support/smallest.h: no header has " name)
    for (i = 1; i <= stays; i++) if (!used[i]) say("verify/support/smallest.h: nothing is called " stay[i])
    exit wrong
}
