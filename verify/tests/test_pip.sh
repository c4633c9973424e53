#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# pip install ./verify/python into an environment of its own: the command, the module, the pytest plugin. It takes the network
# and a minute, so it runs with TEST_ALL=1 (make check-all) alone.
cd "$(dirname "$0")/../.." || exit 1
out=$PWD/build/test_pip oracle=$PWD/build/seqpar-verify
skip() { echo "skip pip: $1"; echo "0 passed, 0 failed, 1 skipped"; exit 0; }
[ -n "$TEST_ALL" ] || skip "TEST_ALL is not set"
rm -rf "$out"; mkdir -p "$out"
python3 -m venv "$out/venv" >"$out/venv.log" 2>&1 || skip "python3 makes no virtual environment"
"$out/venv/bin/pip" download -q --no-deps -d "$out" setuptools >"$out/pip.log" 2>&1 || skip "PyPI does not answer"
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }

if "$out/venv/bin/pip" install -q ./verify/python pytest >"$out/install.log" 2>&1; then ok pip_install; else fail pip_install "$(tail -n 3 "$out/install.log" | tr '\n' ' ')"; fi
rm -rf verify/python/build verify/python/*.egg-info
if [ "$("$out/venv/bin/seqpar-verify" law --norm --got 0.25 --want 1 --sp 4 | head -n 1)" = "wrong: over_sp" ]; then ok pip_command; else fail pip_command "does not say over_sp"; fi
for file in man/man1/seqpar-verify.1 bash-completion/completions/seqpar-verify zsh/site-functions/_seqpar-verify; do [ -s "$out/venv/share/$file" ] || missing="$missing $file"; done
if [ -z "$missing" ] && "$out/venv/bin/seqpar-verify" --man | cmp -s - "$out/venv/share/man/man1/seqpar-verify.1"; then ok pip_share; else fail pip_share "not there or another:$missing"; fi
if [ "$(sed -n 's/^version = "\(.*\)"/\1/p' verify/python/pyproject.toml)" = "$(sed -nE 's/^#define SEQPAR_VERSION +"(.*)"/\1/p' seqpar.h)" ]; then ok pip_version; else fail pip_version "pyproject.toml has another than seqpar.h"; fi
$oracle gen --out "$out/right" --sp 2 --accumulation 2 >/dev/null && $oracle gen --out "$out/wrong" --sp 2 --mistake labels_not_shifted >/dev/null
cat >"$out/test_steps.py" <<END
import shutil
import pytest
import seqpar_dump
import seqpar_verify

def test_right(seqpar):
    shutil.copytree("$out/right/got", seqpar.folder)
    seqpar.expect_right(want="$out/right/want")
    assert seqpar.ver(model="$out/right/model")["verdict"] == "right"

def test_unjudged(seqpar):
    shutil.copytree("$out/right/got", seqpar.folder)
    with pytest.warns(seqpar_verify.GradientsNotJudged, match="gradients of parameters were NOT judged"):
        seqpar.expect_right()
    with pytest.raises(AssertionError, match="gradients not judged"):
        seqpar.expect_right(strict=True)

def test_wrong(seqpar):
    shutil.copytree("$out/wrong/got", seqpar.folder)
    with pytest.raises(AssertionError, match="wrong: labels_not_shifted"):
        seqpar.expect_right()
    assert [m["name"] for m in seqpar.ver()["mistakes"]] == ["labels_not_shifted"]

def test_nothing(seqpar):
    with pytest.raises(ValueError, match="cannot be opened as a folder"):
        seqpar.expect_right()
END
if (cd "$out" && PYTHONDONTWRITEBYTECODE=1 venv/bin/pytest -q test_steps.py >pytest.log 2>&1); then ok pip_pytest; else fail pip_pytest "$(grep -E '^E ' "$out/pytest.log" | head -n 2 | tr '\n' ' ')"; fi
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
