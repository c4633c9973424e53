# SPDX-License-Identifier: MIT OR Unlicense
# Turns options.tsv into the C initialisers that options.h includes: awk -f options.awk options.tsv > options.inc
BEGIN { FS = "\t" }
NF != 6 { print FILENAME ":" NR ": " NF " columns instead of 6" > "/dev/stderr"; exit 1 }
NR > 1 { gsub(/["\\]/, "\\\\&"); printf "{\"%s\", \"%s\", \"%s\", \"%s\", \"%s\", \"%s\"},\n", $1, $2, $3, $4, $5, $6 }
