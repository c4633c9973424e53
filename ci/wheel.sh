#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# ci/wheel.sh ARCH...: makes a wheel of each build/wheel/ARCH/seqpar-verify, and SHA256SUMS, in dist/. The last part of `make wheel`.
cd "$(dirname "$0")/.." || exit 1
made=$PWD/build/wheel
fail() { echo "make wheel: $1" >&2; exit 1; }
quietly() { "$@" >"$made/log" 2>&1; }
reason() { tail -n 1 "$made/log"; }
export SOURCE_DATE_EPOCH=315532800 # 1980, the oldest that a zip file has: equal sources make equal wheels
[ -x "$made/$(uname -m)/seqpar-verify" ] || fail "WHEELS is '$*'; $(uname -m), which this machine is, has to be one, since its binary writes the manual page"

# The manual page and completions are those that a binary for this machine writes.
pack() { # ARCH
    local folder=$made/$1 python=$made/venv/bin/python wheel
    rm -rf "$folder/source" "$folder/dist"
    cp -r verify/python "$folder/source"
    (cd "$folder/source" && SEQPAR_WHEEL=$folder quietly "$python" setup.py -q bdist_wheel --dist-dir "$folder/dist") || fail "$1: $(reason)"
    quietly "$python" -m wheel tags --remove --python-tag py3 --abi-tag none \
        --platform-tag "manylinux_2_17_$1.manylinux2014_$1" "$folder"/dist/*.whl || fail "$1: $(reason)"
    wheel=$(echo "$folder"/dist/*.whl)
    rm -f dist/seqpar_verify-*_"$1".whl; mkdir -p dist
    cp "$wheel" dist/
    echo "dist/$(basename "$wheel")  $(wc -c <"$wheel") bytes"
}

for arch in "$@"; do pack "$arch"; done
(cd dist && sha256sum -- *.whl >SHA256SUMS)
echo "dist/SHA256SUMS"
