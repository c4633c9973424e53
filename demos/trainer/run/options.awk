# SPDX-License-Identifier: MIT OR Unlicense
# Turns options.tsv into the C initialisers that options.h includes: awk -f options.awk options.tsv > options.inc
# choice:@TABLE takes its words from a table of seqpar.h; more of them may follow behind a comma.
BEGIN { FS = "\t" }
NF != 7 { print FILENAME ":" NR ": " NF " columns instead of 7" > "/dev/stderr"; exit 1 }
NR > 1 {
    gsub(/["\\]/, "\\\\&")
    kind = "\"" $2 "\""
    if (sub(/^choice:@/, "", $2)) {
        more = index($2, ",") ? substr($2, index($2, ",") + 1) : ""
        sub(/,.*/, "", $2)
        kind = "\"choice:\" " $2 "(DEMO_WORD) \"" more "\""
    }
    printf "{\"%s\", %s, \"%s\", \"%s\", \"%s\", \"%s\", \"%s\"},\n", $1, kind, $3, $4, $5, $6, $7
}
