#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Copies demos/01_ring.c into the header's sample.
cd "$(dirname "$0")/.." || exit 1
awk 'FNR == NR { text = text $0 "\n"; next }
     /^#endif \/\* SAMPLE \*\// { skip = 0 }
     !skip
     /^#if 0 \/\* SAMPLE \*\// { printf "%s", text; skip = 1 }' demos/01_ring.c seqpar.h > build/seqpar.h.new && cat build/seqpar.h.new > seqpar.h && rm build/seqpar.h.new
