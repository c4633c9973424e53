#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# make wheel, and what its files are worth: symbols of glibc 2.17 at most, no instruction of a newer processor, the same verdicts as
# build/seqpar-verify, and, in an environment without a compiler, the command, the modules, the pytest plugin, manual page and
# completions, and ci/action. ARM's binary runs under qemu-user. It takes the network and minutes, so it runs with TEST_ALL=1 (make check-all) alone.
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MAKEOVERRIDES MFLAGS # of the make around this
out=$PWD/build/test_wheel oracle=$PWD/build/seqpar-verify version=$(sed -nE 's/^#define SEQPAR_VERSION +"(.*)"/\1/p' seqpar.h)
passed=0 failed=0 skipped=0
ok() { echo "ok wheel_$1"; passed=$((passed + 1)); }
fail() { echo "FAIL wheel_$1: $(tr '\n' ' ' <<<"$2" | cut -c1-250)"; failed=$((failed + 1)); }
skip() { echo "skip wheel_$1: $2"; skipped=$((skipped + 1)); }
end() { printf '%d passed, %d failed' $passed $failed; [ $skipped -gt 0 ] && printf ', %d skipped' $skipped; echo; [ $failed -eq 0 ]; exit; }
expect() { if [ "$2" = "$3" ]; then ok "$1"; else fail "$1" "'$3', not '$2'"; fi; } # NAME WANT GOT
without() { echo "skip wheel: $1"; echo "0 passed, 0 failed, 1 skipped"; exit 0; }
[ -n "$TEST_ALL" ] || without "TEST_ALL is not set"
[ -n "$CJSON" ] || command -v apt-get >/dev/null || without "no apt-get to take cJSON's source with, and CJSON is not set"
rm -rf "$out"; mkdir -p "$out"
python3 -m venv "$out/venv" >"$out/venv.log" 2>&1 || without "python3 makes no virtual environment"
"$out/venv/bin/pip" download -q --no-deps -d "$out" pluggy >"$out/pip.log" 2>&1 || without "PyPI does not answer"

# ---- the files ----
rm -rf dist
if make wheel >"$out/make.log" 2>&1; then ok made; else fail made "$(tail -n 2 "$out/make.log")"; end; fi
wheel() { echo "dist/seqpar_verify-$version-py3-none-manylinux2014_$1.manylinux_2_17_$1.whl"; } # ARCH
expect files "$(printf '%s\n' dist/SHA256SUMS "$(wheel aarch64)" "$(wheel x86_64)")" "$(ls dist/*)"
if (cd dist && sha256sum --quiet -c SHA256SUMS) && [ "$(wc -l <dist/SHA256SUMS)" = 2 ]; then ok sums; else fail sums "$(cat dist/SHA256SUMS)"; fi
large=$(find dist -name '*.whl' -size +5000k)
expect size "" "$large"
for arch in x86_64 aarch64; do
    binary=$out/$arch/seqpar_verify/seqpar-verify
    python3 -m zipfile -e "$(wheel $arch)" "$out/$arch" && chmod +x "$binary"
    for licence in LICENSE LICENSE.cJSON LICENSE.zig; do [ -s "$out/$arch/seqpar_verify/licenses/$licence" ] || fail "licence_$arch" "no $licence"; done
    if ! command -v objdump >/dev/null; then skip "symbols_$arch" "no objdump"; continue; fi
    newest=$(objdump -T "$binary" | grep -oE 'GLIBC_[0-9.]+' | sort -Vu | tail -n 1)
    expect "symbols_$arch" GLIBC_2.17 "$newest"
    expect "libraries_$arch" "libc.so.6 libm.so.6 libpthread.so.0 " "$(objdump -p "$binary" | awk '$1 == "NEEDED" { print $2 }' | sort | tr '\n' ' ')"
done
binary=$out/x86_64/seqpar_verify/seqpar-verify
if command -v objdump >/dev/null; then # AVX has other registers, and the names of all of its instructions begin with v
    objdump -d --no-show-raw-insn "$binary" >"$out/code" 2>&1
    if ! grep -q 'mulsd' "$out/code"; then fail instructions "objdump reads no code: $(head -n 1 "$out/code")"
    else expect instructions "" "$(grep -m 3 -E '%[yz]mm|	v[a-z0-9]+ |	(pshufb|roundsd|popcnt|mulx) ' "$out/code")"; fi
fi
if [ "$(uname -m)" != x86_64 ]; then skip installed "this machine is $(uname -m)"; end; fi

# ---- the same verdicts as the binary that was built for this processor, which has other roundings ----
# verdict BINARY... DUMP OPTIONS: exit code and headline
verdict() { local said; said=$("$@" 2>&1); echo "$? $(head -n 1 <<<"$said")"; }
# same NAME STEP BINARY...: it says of the step what this processor's binary says, which knows what is wrong with it
same() {
    local test=$1_$2 step=$2 against words want; shift 2
    for against in model want; do
        words=(ver "$out/steps/$step/got" --$against "$out/steps/$step/$against")
        want=$(verdict "$oracle" "${words[@]}")
        case $want in
        "0 right: "* | "1 wrong: $step"*) expect "${test}_$against" "$want" "$(verdict "$@" "${words[@]}")" ;;
        *) fail "${test}_$against" "$want" ;;
        esac
    done
}
mkdir "$out/steps"
while read -r name options; do
    # shellcheck disable=SC2086
    $oracle gen --out "$out/steps/$name" --seed 5 $options >/dev/null || fail "verdict_$name" "gen"
    same verdict "$name" "$binary"
done <<'STEPS'
sft --sp 4 --dp 2 --accumulation 2
dpo --sp 3 --objective dpo --layout stripe
zigzag-doc --sp 2 --layout zigzag-doc
over_sp --sp 4 --mistake over_sp
shift_after_split --sp 2 --mistake shift_after_split
stale_kv --sp 4 --mistake stale_kv
positions_local --sp 2 --mistake positions_local
mean_of_means --sp 2 --accumulation 2 --mistake mean_of_means
not_clipped --sp 2 --mistake not_clipped
kv_group_not_summed --sp 4 --objective dpo --mistake kv_group_not_summed
STEPS
said=$("$binary" test 2>&1); code=$?
if [ $code -eq 0 ] && grep -q 'first DPO loss.*: bits' <<<"$said"; then ok self_test; else fail self_test "exit code $code: $(tail -n 1 <<<"$said")"; fi

# ---- installed where there is no compiler, no header and nothing of this folder ----
(
    unset PYTHONPATH SEQPAR_VERIFY
    export PATH=$out/venv/bin PYTHONDONTWRITEBYTECODE=1
    ! command -v cc && ! command -v gcc && ! command -v make && cd "$out" && pip install -q --only-binary :all: "$OLDPWD/$(wheel x86_64)" pytest
) >"$out/install.log" 2>&1
code=$?
if [ $code -eq 0 ]; then ok installed; else fail installed "$(tail -n 2 "$out/install.log")"; end; fi
there() { (unset PYTHONPATH SEQPAR_VERIFY; cd "$out" && PATH=$out/venv/bin PYTHONDONTWRITEBYTECODE=1 exec "$@"); } # COMMAND...
law=(law --norm --got 0.25 --want 1 --sp 4)
expect command "wrong: over_sp" "$(there seqpar-verify "${law[@]}" 2>&1 | head -n 1)"
expect module "wrong: over_sp" "$(there python -m seqpar_verify "${law[@]}" 2>&1 | head -n 1)"
expect manual "$($oracle --man | sha256sum)" "$(sha256sum - <"$out/venv/share/man/man1/seqpar-verify.1")"
expect completion_bash "$($oracle --completion bash | sha256sum)" "$(sha256sum - <"$out/venv/share/bash-completion/completions/seqpar-verify")"
expect completion_zsh "$($oracle --completion zsh | sha256sum)" "$(sha256sum - <"$out/venv/share/zsh/site-functions/_seqpar-verify")"
expect command_loop "error: $out/venv/bin/seqpar-verify is this command itself" "$(SEQPAR_VERIFY=$out/venv/bin/seqpar-verify PATH=$out/venv/bin seqpar-verify law 2>&1 | cut -d, -f1)"
for module in seqpar_dump seqpar_reference seqpar_convert seqpar_trainer; do
    expect "has_$module" "$out/venv/lib" "$(there python -c "import $module; print($module.__file__)" 2>&1 | grep -oF "$out/venv/lib")"
done
cp verify/python/test_reference.py "$out/"; mkdir "$out/reference"
inside=$(there python -c 'import seqpar_verify; print(seqpar_verify.binary())')
there python test_reference.py "$inside" "$out/reference" >"$out/reference.log" 2>&1; code=$?
if [ $code -eq 0 ] && [ "$(grep -c '^ok' "$out/reference.log")" -gt 100 ]; then ok reference; else fail reference "exit code $code: $(grep -v '^ok' "$out/reference.log" | tail -n 1)"; fi

# ---- pytest: what a test requires itself, and what --seqpar-require adds ----
cat >"$out/test_steps.py" <<END
import shutil
import pytest

def test_plain(seqpar):
    shutil.copytree("$out/steps/sft/got", seqpar.folder)
    assert seqpar.expect_right(require="loss").startswith("right:")

def test_gradients(seqpar):
    shutil.copytree("$out/steps/sft/got", seqpar.folder)
    seqpar.expect_right(want="$out/steps/sft/want", require=["loss"])

def test_wrong(seqpar):
    shutil.copytree("$out/steps/over_sp/got", seqpar.folder)
    with pytest.raises(AssertionError, match="wrong: over_sp"):
        seqpar.expect_right(want="$out/steps/over_sp/want")
END
# pytest_says NAME PASSED FAILED TEXT OPTIONS...
pytest_says() {
    local name=$1 want="$2 passed, $3 failed" text=$4 said last; shift 4
    said=$(there pytest -q -p no:cacheprovider test_steps.py "$@" 2>&1) last=$(tail -n 1 <<<"$said")
    count() { grep -oE "[0-9]+ $1" <<<"$last" || echo "0 $1"; }
    if [ "$(count passed), $(count failed)" = "$want" ] && grep -qF -- "$text" <<<"$said"; then ok "$name"; else fail "$name" "$last"; fi
}
pytest_says pytest 3 0 "gradients of parameters were NOT judged"
pytest_says pytest_require 2 1 "gradients not judged" --seqpar-require gradients,norm
pytest_says pytest_require_adds 1 2 "logits not judged" --seqpar-require logits
pytest_says pytest_require_refused 0 3 "--require is 'loss,gradints'; give stages" --seqpar-require gradints

# ---- ci/action, whose step install takes the wheel ----
. verify/support/action.sh
mkdir "$out/action"
said=$(export RUNNER_TEMP=$out/action GITHUB_PATH=$out/action/path GITHUB_ACTION_PATH=$PWD/ci/action file=$PWD/$(wheel x86_64)
    cd "$out/action" && action_step install "wheel=$file" && PATH=$(cat path):$PATH action_step judge "dump=$out/steps/sft/got" "model=$out/steps/sft/model" strict=true 2>&1); code=$?
if [ $code -eq 0 ] && [[ $said = "right: "* ]] && [ -x "$out/action/seqpar/bin/seqpar-verify" ] && [ -s "$out/action/verdict.html" ]; then ok action; else fail action "exit code $code: $said"; fi

# ---- ARM's ----
arm=$out/aarch64/seqpar_verify/seqpar-verify libraries=/usr/aarch64-linux-gnu
if ! command -v qemu-aarch64 >/dev/null; then skip aarch64 "no qemu-aarch64"
elif [ ! -e $libraries/lib/ld-linux-aarch64.so.1 ]; then skip aarch64 "no $libraries/lib/ld-linux-aarch64.so.1 (libc6-arm64-cross)"
else
    on_arm=(qemu-aarch64 -L $libraries "$arm")
    expect aarch64_law "$("$binary" "${law[@]}")" "$("${on_arm[@]}" "${law[@]}")"
    for name in sft dpo over_sp stale_kv kv_group_not_summed; do same aarch64 "$name" "${on_arm[@]}"; done
fi
end
