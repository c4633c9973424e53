#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The trainers' suites in C again under AddressSanitizer and UndefinedBehaviorSanitizer. TEST_ONLY=asan_rollout: that one alone.
cd "$(dirname "$0")/../.." || exit 1
out=build/sanitize_trainers
. verify/support/sanitizers.sh
for suite in token_file option_parser data_documents data_files data_pairs arith plot_progress rollout; do run asan "$asan" $suite TEST_WAYS=1; done
sanitized
