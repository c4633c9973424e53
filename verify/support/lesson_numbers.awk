# SPDX-License-Identifier: MIT OR Unlicense
# awk -v given="16 4 ..." -f verify/support/lesson_numbers.awk PAGE PICTURE...: numbers in the text of a lesson that stand in none of
# its blocks and pictures, nor in `given`, what its example is made of. Code, links and comments are not text.
function numbers(text, to,    n, word, i) {
    gsub(/[^0-9.,]+/, " ", text)
    n = split(text, word, " ")
    for (i = 1; i <= n; i++) {
        gsub(/,/, "", word[i]); sub(/^\.+/, "", word[i]); sub(/\.+$/, "", word[i])
        if (word[i] != "") to[word[i]] = 1
    }
}
BEGIN { numbers(given, made) }
FNR == 1 { pages++ }
pages > 1 { numbers($0, made); next }
/^```/ { block = !block; next }
block { numbers($0, made); next }
/^<!--|^#/ { next }
{ gsub(/`[^`]*`/, ""); gsub(/\]\([^)]*\)/, ""); gsub(/[Ll]esson [0-9]/, ""); numbers($0, said) }
END { for (n in said) if (!(n in made)) printf "%s ", n; print "" }
