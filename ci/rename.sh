#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Renames by ci/renames.tsv in all files but that one and CHANGES.md, word by word. Twice is the same as once. A new name
# that some file already has, without any of the old one, is refused: two things would have one name.
cd "$(dirname "$0")/.." || exit 1
files=$(git ls-files | grep -vE '^(ci/renames\.tsv|CHANGES\.md)$')
script=$(awk -F '\t' '!/^#/ && NF == 2 { printf "s/\\b%s\\b/%s/g\n", $1, $2 }' ci/renames.tsv)
old=$(awk -F '\t' '!/^#/ && NF == 2 { print $1 }' ci/renames.tsv)
awk -F '\t' '!/^#/ && NF == 2 { if (from[$1]++) print "twice from: " $1; if (to[$2]++) print "twice to: " $2 }' ci/renames.tsv
if [ "$1" = check ]; then
    awk -F '\t' '!/^#/ && NF == 2' ci/renames.tsv | while IFS=$'\t' read -r from name; do
        if grep -qwF -- "$from" $files; then grep -lwF -- "$name" $files | sed "s/^/$from: $name is already in /"; fi
    done
    exit
fi
grep -lwF -- "$old" $files | xargs -r sed -i -f <(echo "$script")
