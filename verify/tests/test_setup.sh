#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# ci/setup.sh upon a stand-in for apt-get, cc and sudo: what it would install for a target, and that nothing is done before it
# is said. ci/limit.sh: what ends a program, and what does not.
cd "$(dirname "$0")/../.." || exit 1
out=$PWD/build/test_setup
rm -rf "$out"; mkdir -p "$out/bin"
passed=0 failed=0 skipped=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }

# ---- limits: begun here, as they wait; looked at in the end ----
ends() { # NAME LIMIT SCRIPT
    (ci/limit.sh "$2" bash -c "$3" >"$out/$1.log" 2>&1; echo $? >"$out/$1.code") 2>/dev/null &
}
ends processor 1 'bash -c "while :; do :; done" '"$out"'/child; echo not reached'
ends stuck 9:2 'sleep 60'
ends deaf 9:2 'trap "" TERM; sleep 60; sleep 60'
ends writing 9:2 'for i in 1 2 3 4 5; do sleep 1; echo $i; done'
ends working 9:2 'for i in 1 2 3 4 5; do sleep 0.8; timeout 0.7 bash -c "while :; do :; done"; done; exit 7'
ends missing 9 'exec /no/such/program'

# ---- a machine with the commands named here and no library; apt-get knows 3 packages for each that it is asked for ----
for command in sh bash make awk sed grep tr tail mktemp rm cat env dirname sort mkdir true; do ln -s "$(type -P $command)" "$out/bin/$command"; done
stand_in() { cat >"$out/bin/$1"; chmod +x "$out/bin/$1"; } # NAME, the script from stdin
echo 'exit 1' | stand_in dpkg-query
echo 'echo ${AS:-0}' | stand_in id
stand_in cc <<'CC'
#!/bin/sh
for header in $THERE; do case "$*" in *"$header"*) exit 0 ;; esac; done
exit 1
CC
stand_in apt-get <<'APT'
#!/bin/sh
case "$*" in
*--print-uris*)
    [ -z "$NO_LISTS" ] || [ -e updated ] || exit 100
    shift 4; packages=$(($# * 3))
    echo "0 upgraded, $packages newly installed, 0 to remove and 0 not upgraded."; echo "Need to get 1 kB/5 kB of archives."; echo "After this operation, 26.3 MB of additional disk space will be used." ;;
update*) echo "did update" >&3; : >updated ;;
*) echo "did $*" >&3; case "$*" in *"${BROKEN:-none}"*) echo "E: no network"; exit 100 ;; esac ;;
esac
APT
stand_in sudo <<'SUDO'
#!/bin/sh
[ "$ASKS" = 1 ] && exit 1
[ "$*" = "-n true" ] || echo "sudo $*" >&3
shift; exec "$@"
SUDO
# setup NAME=VALUE... TARGET...: what was said and, on lines of their own, what was done; then the exit code
setup() { (rm -f updated; unset MAKEFLAGS MAKELEVEL MFLAGS SUITES SETUP; export PATH=$out/bin; env "$@" 3>&1 2>&1; echo "code $?"); }
run() { local words=() targets=() w; for w in "$@"; do case $w in *=*) words+=("$w") ;; *) targets+=("$w") ;; esac; done; setup "${words[@]}" sh ci/setup.sh "${targets[@]}"; }
expect() { # NAME WANT GOT
    if [ "$3" = "$2" ]; then ok "setup_$1"; else fail "setup_$1" "$(diff <(echo "$2") <(echo "$3") | grep '^[<>]' | head -n 3 | tr '\n' ' ')"; fi
}
install="apt-get install --no-install-recommends"
did="did install --no-install-recommends"
base="libc6-dev libcjson-dev libstb-dev zlib1g-dev"
all="THERE=stdio.h cjson/cJSON.h stb/stb_ds.h zlib.h curl/curl.h yaml.h"
brings() { echo "($(($# * 3)) packages: 1 kB to download, 26.3 MB installed)"; } # PACKAGE...
said() { echo "setup: ${root}$install $* $(brings "$@")"; }
hint="; SETUP=print only says this"
for target in demo verify quick bench test_fold; do
    expect $target "$(said $base)$hint
$did $base -y -qq
code 0" "$(run $target)"
done
expect demos "$(said $base libcurl4-openssl-dev libyaml-dev)
code 0" "$(run SETUP=print setup)"
expect suites "$(said $base libcurl4-openssl-dev g++ binutils libopenmpi-dev openmpi-bin libmpich-dev mpich)
code 0" "$(run SETUP=print check test_fold test_headers test_mpi test_rollout)"
expect one_missing "$(said libcjson-dev)
code 0" "$(run SETUP=print "${all/cjson\/cJSON.h/}" demo)"
expect nothing "code 0" "$(run "$all" demo setup test_rollout)"
expect nothing_to_print "setup: nothing is missing
code 0" "$(run "$all" SETUP=print demo)"
expect check "setup: this needs $base; please type: $install $base
code 1" "$(run SETUP=check demo)"
expect check_is_there "code 0" "$(run "$all" SETUP=check demo)"
expect lists "setup: apt-get update
did update
$(said $base)
$did $base -y -qq
code 0" "$(run NO_LISTS=1 demo)"
root="sudo "
expect sudo "$(said $base)$hint
sudo -n env DEBIAN_FRONTEND=noninteractive $install $base -y -qq
$did $base -y -qq
code 0" "$(run AS=1000 demo)"
expect sudo_asks "$(said $base)$hint
setup: sudo asks for a password; please type: sudo $install $base
code 1" "$(run AS=1000 ASKS=1 demo)"
root=""
# what tests can do without is left out where it cannot be had
mpi="libopenmpi-dev openmpi-bin libmpich-dev mpich"
expect optional "code 0
setup: not installed: $mpi (E: no network); what needs them is skipped" "$(run BROKEN=mpich "$all" test_mpi | grep -vE '^did|^setup: apt' | sort)"
expect optional_apart "$(said $base)$hint
$did $base -y -qq
setup: not installed: $mpi (E: no network); what needs them is skipped
code 0" "$(run BROKEN=mpich test_mpi | tail -n 4)"
expect refused "setup: E: no network; please type: $install $base
code 1" "$(run BROKEN=zlib demo | tail -n 2)"
# ---- make asks for the target that was typed; without a library there is one sentence in the place of a compiler's error ----
made() { setup "$@" | grep -v '^make: \*\*\*'; }
expect make_demo "$(said $base)
code 0" "$(made SETUP=print make demo)"
expect make_check "$(said $base)
code 0" "$(made SETUP=print make check SUITES=fold)"
expect make_check_demos "$(said $base libcurl4-openssl-dev libyaml-dev)
code 0" "$(made SETUP=print make check SUITES="fold runs")"
sentence="setup: this needs libcjson-dev; please type: $install libcjson-dev"
expect make_binary "$sentence
code 2" "$(made "${all/cjson\/cJSON.h/}" make -W verify/library.c build/seqpar-verify)"
if ! python=$(ci/python_with.sh setuptools); then skip setup_pip "no python3 here has setuptools"
else
    python=$($python -c 'import sys; print(sys.executable)')
    expect pip "$sentence
code 1" "$(setup -C verify/python "${all/cjson\/cJSON.h/}" "$python" -B setup.py -q build_py --build-lib "$out/lib" | tail -n 2)"
fi
rm -f "$out/bin/apt-get"
expect no_apt "setup: please install what Debian calls $base
code 1" "$(run demo)"

# ---- limits: what was begun above ----
wait
limit() { # NAME CODE LAST-LINE
    local code last
    code=$(cat "$out/$1.code") last=$(grep -v '^/' "$out/$1.log" | tail -n 1 | cut -c1-$((${#3} + 1)))
    if [ "$code" = "$2" ] && [[ $last = "$3"* ]]; then ok "limit_$1"; else fail "limit_$1" "exit code $code: $last"; fi
}
limit processor 143 'limit: 1 seconds of processor time are used: bash -c'
limit stuck 143 'limit: no progress for 2 seconds: bash -c sleep 60'
limit deaf 137 'limit: no progress for 2 seconds: bash -c trap'
limit writing 0 5
limit working 7 ''
limit missing 127 ''
left=$(for file in $(grep -lasF "$out/child" /proc/[0-9]*/cmdline); do tr '\0' ' ' <"$file" | grep -v 'ci/limit.sh'; done 2>/dev/null)
if [ -z "$left" ]; then ok limit_leaves_nothing; else fail limit_leaves_nothing "a child goes on: $left"; fi

if [ $skipped -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"; else echo "$passed passed, $failed failed"; fi
[ $failed -eq 0 ]
