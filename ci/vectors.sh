#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Writes the golden vectors of verify/tests/vectors.tsv, judges each, and lists their SHA-256. FOLDER: build/vectors.
cd "$(dirname "$0")/.." || exit 1
out=${1:-build/vectors} oracle=build/seqpar-verify
rm -rf "$out"; mkdir -p "$out"
grep -v '^#' verify/tests/vectors.tsv | while IFS=$'\t' read -r id what options; do
    # shellcheck disable=SC2086
    $oracle gen --out "$out/$id" --seed "$id" $options >/dev/null || exit 1
    case $options in
    *--questions*) ;; # nothing to be judged
    *) $oracle ver "$out/$id/got" --model "$out/$id/model" >"$out/verdict" 2>&1; code=$?
       # one rank shows nothing about sequence parallelism, and a row without a cut in trained text little
       [ $code -eq 0 ] || { [ $code -eq 4 ] && ! grep -q ' wrong: ' "$out/verdict"; } || { echo "error: vector $id is not right: $(head -n 1 "$out/verdict")" >&2; exit 1; } ;;
    esac
    printf '%s\t%s\t%s\n' "$id" "$what" "$options" >>"$out/index.tsv"
done || exit 1
rm -f "$out/verdict"
(cd "$out" && find . -name '*.safetensors' -o -name config.json -o -name index.tsv | sort | xargs sha256sum >SHA256SUMS)
echo "$out: $(wc -l <"$out/index.tsv") vectors, $(du -sk "$out" | cut -f1) KB, SHA256SUMS"
