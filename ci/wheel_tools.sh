#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# What `make wheel` compiles with, in build/wheel: in venv/, Zig's compiler from PyPI, which links with the symbols of glibc 2.17,
# and what makes wheels; cJSON.c and include/ from Debian's source package cjson (CJSON=FOLDER: from there) and this machine.
cd "$(dirname "$0")/.." || exit 1
made=$PWD/build/wheel
packages="ziglang==0.17.1 setuptools==84.2.1 wheel==0.48.0"
fail() { echo "make wheel: $1" >&2; exit 1; }
quietly() { "$@" >"$made/log" 2>&1; }
reason() { tail -n 1 "$made/log"; }

compiler() {
    echo "make wheel: ${PYTHON:-python3} -m venv build/wheel/venv, and pip install $packages there (440 MB)"
    rm -rf "$made/venv"
    quietly "${PYTHON:-python3}" -m venv "$made/venv" || fail "no virtual environment: $(reason); apt-get install python3-venv"
    # shellcheck disable=SC2086
    quietly "$made/venv/bin/pip" -q install --disable-pip-version-check $packages || fail "not installed: $packages ($(reason))"
}

# Debian's source package, with lists of this folder's own: those of the machine seldom have sources, and need not be root's.
debian_source() {
    local apt=(apt-get -q -o Dir::Etc::SourceList="$made/apt/none" -o Dir::Etc::SourceParts="$made/apt/parts"
        -o Dir::State::lists="$made/apt/lists" -o Dir::Cache="$made/apt/cache" -o APT::Sandbox::User=)
    command -v apt-get >/dev/null || fail "no apt-get to take cJSON's source with; give CJSON=FOLDER, one with cJSON.c, cJSON.h and LICENSE"
    echo "make wheel: apt-get source cjson, into build/wheel/apt (10 MB of lists)"
    rm -rf "$made/apt"; mkdir -p "$made/apt/parts" "$made/apt/lists/partial" "$made/apt/cache/archives/partial"
    : >"$made/apt/none"
    for list in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
        [ -e "$list" ] && sed -E 's/^(Types:).*/\1 deb-src/; s/^deb /deb-src /' "$list" >"$made/apt/parts/$(basename "$list")"
    done
    quietly "${apt[@]}" update # a list without sources is an error of its own, which does not matter here
    (cd "$made/apt" && quietly "${apt[@]}" source --download-only cjson) || fail "no source of cjson: $(reason); or give CJSON=FOLDER"
    quietly dpkg-source -x "$made"/apt/cjson_*.dsc "$made/apt/cjson" || fail "cjson: $(reason); apt-get install dpkg-dev"
}

# The headers that the oracle includes, without those of this machine's C library beside them.
headers() {
    local stb
    stb=$(echo '#include <stb/stb_ds.h>' | ${CC:-cc} -M -x c - | tr ' ' '\n' | grep 'stb_ds\.h$')
    rm -rf "$made/include"; mkdir -p "$made/include/cjson" "$made/include/stb" "$made/licenses"
    cp "$stb" "$made/include/stb/" || fail "no stb/stb_ds.h; make setup"
    cp "$1/cJSON.h" "$made/include/cjson/" && cp "$1/cJSON.c" "$made/" && cp "$1/LICENSE" "$made/licenses/LICENSE.cJSON" ||
        fail "CJSON=$1: give a folder with cJSON.c, cJSON.h and LICENSE"
    cp LICENSE "$made/licenses/LICENSE"
    cp "$made"/venv/lib/python*/site-packages/ziglang/LICENSE "$made/licenses/LICENSE.zig" # of its part of the C runtime
}

mkdir -p "$made"
compiler
[ -n "$CJSON" ] || debian_source
headers "${CJSON:-$made/apt/cjson}"
touch "$made/tools"
