#!/bin/sh
# SPDX-License-Identifier: MIT OR Unlicense
# ci/words.sh SUITE...: gives the suites that make tokens of text a python with the packages tokenizers and jinja2, if none here has
# them: build/python, from PyPI. The command is said first. Without a network, or venv, one sentence is said, and they skip those tests.
# SETUP=print, SETUP=check: nothing is done.
cd "$(dirname "$0")/.." || exit 1
packages="tokenizers==0.23.3 jinja2==3.1.6"
needed=""
for suite in "$@"; do
    case $suite in evaluation | inputs | pages | program | python | yaml) needed=$suite ;; esac
done
[ -n "$needed" ] && [ -z "$SETUP" ] || exit 0
ci/python_with.sh tokenizers jinja2 >/dev/null && exit 0
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
echo "setup: ${PYTHON:-python3} -m venv build/python, and pip install $packages there"
rm -rf build/python
mkdir -p build
if "${PYTHON:-python3}" -m venv build/python >"$log" 2>&1 && build/python/bin/pip -q install --disable-pip-version-check $packages >"$log" 2>&1; then exit 0; fi
rm -rf build/python
echo "setup: not installed: $packages ($(tail -n 1 "$log")); what needs them is skipped"
