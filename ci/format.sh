#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# ci/format.sh formats the C and CUDA sources as .clang-format says; --check changes nothing, lists the files
# that differ and exits with 1. Other versions of clang-format break lines elsewhere, so one is the rule.
cd "$(dirname "$0")/.." || exit 1
version=14
case $*: in
: | --check:) ;;
*) echo "ci/format.sh: '$*' is not known; give nothing, or --check" >&2; exit 2 ;;
esac
format=""
for program in clang-format-$version clang-format; do
    found=$("$program" --version 2>/dev/null | sed -nE 's/.*version ([0-9]+)\..*/\1/p')
    if [ "$found" = $version ]; then format=$program; break; fi
done
if [ -z "$format" ]; then echo "skip format: clang-format $version is wanted, ${found:-none} is installed; apt-get install clang-format-$version"; exit 0; fi
# golden_families.h is as verify/python/golden_families.py writes it.
sources() { { git ls-files 2>/dev/null || find . -type f -not -path './build/*'; } | grep -E '\.(c|h|cu)$' | grep -v 'verify/second/golden_families.h$'; }
if [ $# -eq 0 ]; then sources | xargs "$format" -i; exit; fi
differ=$(sources | while read -r file; do "$format" "$file" | cmp -s - "$file" || echo "$file"; done)
[ -z "$differ" ] && exit 0
echo "$differ"
exit 1
