#!/bin/sh
# SPDX-License-Identifier: MIT OR Unlicense
# Installs what is missing to build and test seqpar; does nothing, and needs no network, when all is there.
# `ci/setup.sh check` also installs numpy, for the tests of verify/python, Open MPI and MPICH, for those of seqpar_mpi.h, and ip; without
# them they are skipped.
packages="gcc libc6-dev make libstb-dev libcjson-dev libcurl4-openssl-dev zlib1g-dev binutils gawk"
missing=""
for p in $packages; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing="$missing $p"
done
# awk, cc and libcurl (in one of three flavours) may come from elsewhere
command -v awk >/dev/null 2>&1 && missing=$(echo "$missing" | sed 's/ gawk//')
command -v cc >/dev/null 2>&1 && missing=$(echo "$missing" | sed 's/ gcc//')
has_curl() { ls /usr/include/curl/curl.h /usr/include/*/curl/curl.h /usr/local/include/curl/curl.h 2>/dev/null | grep -q .; }
has_curl && missing=$(echo "$missing" | sed 's/ libcurl4-openssl-dev//')
if [ "$1" = check ] && ! ci/python_with.sh numpy >/dev/null && dpkg-query -W python3 >/dev/null 2>&1; then missing="$missing python3-numpy"; fi
optional=""
if [ "$1" = check ]; then
    for p in libopenmpi-dev openmpi-bin libmpich-dev mpich iproute2; do
        dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || optional="$optional $p"
    done
fi
[ -z "$missing$optional" ] && exit 0
if ! command -v apt-get >/dev/null 2>&1; then
    [ -z "$missing" ] && exit 0
    if has_curl && { [ -f /usr/include/cjson/cJSON.h ] || [ -f /usr/local/include/cjson/cJSON.h ]; }; then exit 0; fi
    echo "setup: not a Debian machine; install the equivalents of:$missing" >&2
    exit 1
fi
if [ "$(id -u)" = 0 ]; then sudo=""
elif sudo -n true 2>/dev/null; then sudo="sudo -n"
else
    [ -z "$missing" ] && exit 0
    echo "setup: missing packages; please type: sudo apt-get install -y$missing" >&2
    exit 1
fi
install_optional() {
    [ -z "$optional" ] && return
    echo "setup: installing$optional"
    $sudo apt-get install -y -qq --no-install-recommends $optional >/dev/null 2>&1 ||
        { $sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends $optional; } >/dev/null 2>&1 ||
        echo "setup: could not install$optional; what needs them is skipped"
}
if [ -z "$missing" ]; then
    install_optional
    exit 0
fi
echo "setup: installing$missing"
$sudo apt-get install -y -qq $missing >/dev/null 2>&1 || { $sudo apt-get update -qq && $sudo apt-get install -y -qq $missing >/dev/null; } || {
    echo "setup: could not install$missing; please type: apt-get update && apt-get install -y$missing" >&2
    exit 1
}
install_optional
exit 0
