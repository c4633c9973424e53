# SPDX-License-Identifier: MIT OR Unlicense
# awk -v file=seqpar.h -f verify/support/plant.awk verify/faults.tsv seqpar.h: the file with every fault of the list planted, all
# turned off. Ends with a sentence where an old text does not occur exactly once.
BEGIN { FS = "\t" }
function pattern(text) { # the text as a regular expression, any white space for a blank
    gsub(/[][\\.*+?(){}|^$\/&]/, "\\\\&", text)
    gsub(/ +/, "[ \t\n]+", text)
    return text
}
function refuse(number, why) {
    printf "verify/faults.tsv: fault %s: its old text %s in %s\n", number, why, file >"/dev/stderr"
    refused = 1
    exit 1
}
FNR == NR { if (!/^#/ && $5 == file) { number[++count] = $1; old[count] = $6; new[count] = $7; } next }
{ text = text $0 "\n" }
END {
    if (refused) exit 1
    clean = text
    for (i = 1; i <= count; i++) {
        if (!match(clean, pattern(old[i]))) refuse(number[i], "does not occur")
        if (match(substr(clean, RSTART + 1), pattern(old[i]))) refuse(number[i], "occurs more than once")
        if (!match(text, pattern(old[i]))) refuse(number[i], "is gone, by another fault,")
        gsub(/FAULT/, "(seqpar__fault == " number[i] ")", new[i])
        gsub(/\\n/, "\n", new[i])
        text = substr(text, 1, RSTART - 1) new[i] substr(text, RSTART + RLENGTH)
    }
    printf "extern int seqpar__fault;\n%s", text
}
