#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The commands of the published pages, run as they are printed, on small models and data sets of their form: pages.py says how.
# TEST_PAGE=1 writes verify/pages/COMMANDS.md.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_pages
rm -rf $out; mkdir -p $out/made $out/cache
export OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE=1
if ! PYTHON=$(ci/python_with.sh tokenizers jinja2); then
    echo "skip pages: no python3 here has tokenizers and jinja2"
    echo "0 passed, 0 failed, 1 skipped"
    exit
fi
export PYTHON
"$PYTHON" verify/support/stand_ins.py $out/made 80 && exec "$PYTHON" verify/support/pages.py $out
