#!/bin/sh
# SPDX-License-Identifier: MIT OR Unlicense
# Prints a python that has the modules which are named: $PYTHON, the first in PATH, the system's, or that of words.sh.
# Exit code 1: none.
modules=$(echo "$*" | tr ' ' ',')
for python in ${PYTHON:-python3} python3 /usr/bin/python3 "$PWD/build/python/bin/python"; do
    if command -v "$python" >/dev/null 2>&1 && "$python" -c "import $modules" 2>/dev/null; then echo "$python"; exit 0; fi
done
exit 1
