#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The suites of the NCCL transport again under AddressSanitizer (leaks included), UndefinedBehaviorSanitizer and ThreadSanitizer.
# TEST_ONLY=asan_nccl: that one alone.
cd "$(dirname "$0")/../.." || exit 1
out=build/sanitize_nccl
. verify/support/sanitizers.sh
run asan "$asan" nccl_parts
run asan "$asan" nccl TEST_WAYS=1 # one transport of two
run tsan "-fsanitize=thread" nccl TEST_WAYS=1
sanitized
