#!/bin/sh
# SPDX-License-Identifier: MIT OR Unlicense
# ci/setup.sh TARGET...: installs what these targets of the Makefile need and is missing, nothing else. A suite is test_NAME.
# The command, and how many packages it brings of what size, is said first. If nothing is missing, nothing is said and no
# network is needed. SETUP=print: the command is only said. SETUP=check: so, too, and a missing package is a failure.
cd "$(dirname "$0")/.." || exit 1

# What can be needed: its Debian package, and a command that succeeds where it is there.
tools() {
    cat <<'LIST'
make     make                  command -v make
awk      mawk                  command -v awk
cc       gcc                   command -v cc
libc     libc6-dev             compiles stdio.h
cjson    libcjson-dev          compiles cjson/cJSON.h -lcjson
stb      libstb-dev            compiles stb/stb_ds.h
zlib     zlib1g-dev            compiles zlib.h -lz
curl     libcurl4-openssl-dev  compiles curl/curl.h -lcurl
yaml     libyaml-dev           compiles yaml.h -lyaml
c++      g++                   command -v g++
objdump  binutils              command -v objdump
mpicc    libopenmpi-dev        command -v "${MPICC:-mpicc}"
mpirun   openmpi-bin           command -v mpirun
openmpi  libopenmpi-dev        command -v mpicc.openmpi
openrun  openmpi-bin           command -v mpirun.openmpi
mpich    libmpich-dev          command -v mpicc.mpich
mpichrun mpich                 command -v mpirun.mpich
ip       iproute2              command -v ip
python   python3               command -v python3
venv     python3-venv          python3 -c "import ensurepip"
dpkgdev  dpkg-dev              command -v dpkg-source
qemu     qemu-user             command -v qemu-aarch64
armlibc  libc6-arm64-cross     test -e /usr/aarch64-linux-gnu/lib/ld-linux-aarch64.so.1
numpy    python3-numpy         ci/python_with.sh numpy
cmark    cmark-gfm             command -v cmark-gfm
chromium chromium              command -v chromium
driver   chromium-driver       command -v chromedriver
selenium python3-selenium      ci/python_with.sh selenium
LIST
}
compiles() { echo 'int main(void) { return 0; }' | cc -include "$1" -x c - $2 -o /dev/null; }

# What a target needs beside what all need. With a question mark: without it some tests are skipped.
needs() {
    case $1 in
    setup | demos | certificate) echo curl yaml ;;
    cuda | check-gpu | bench-gpu | gpu-bundle | test_rollout | test_options | test_absolute | test_faults | test_memory | test_sanitize | test_sanitize_nccl | test_sanitize_trainers | test_fuzz | test_parsers | test_smallest) echo curl ;;
    mpi) echo curl mpicc mpirun ;;
    lessons) echo cmark ;;
    wheel) echo python venv; [ -n "$CJSON" ] || echo dpkgdev ;;
    test_wheel) [ -z "$TEST_ALL" ] || echo 'python? objdump? qemu? armlibc?' ;;
    test_lessons) echo 'python? cmark? chromium? driver? selenium?' ;;
    test_headers) echo c++ objdump ;;
    test_headers_transports) echo 'c++ openmpi? openrun? mpich? mpichrun?' ;;
    test_compiled) echo c++ curl yaml ;;
    test_cuda) echo c++ ;;
    test_bad_input | test_oracle_refused | test_lora) echo python ;;
    test_oracle | test_oracle_bar | test_train | test_program | test_pages | test_prm | test_generate | test_evaluation | test_yaml) echo 'python?' ;;
    test_python | test_oracle_reports) echo 'numpy?' ;;
    test_mpi) echo 'openmpi? openrun? mpich? mpichrun?' ;;
    test_hosts) echo 'openmpi? openrun? ip?' ;;
    esac
}

missing() { # TOOL...: the packages of those that are not there
    tools | while read -r tool package command; do
        case " $* " in *" $tool "*) ;; *) continue ;; esac
        eval "$command" >/dev/null 2>&1 && continue
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || echo "$package"
    done | awk '!seen[$0]++ { printf "%s%s", sep, $0; sep = " " }'
}
musts="make awk cc libc cjson stb zlib" mays=""
for target in "$@"; do
    for need in $(needs "$target"); do
        case $need in *\?) mays="$mays ${need%\?}" ;; *) musts="$musts $need" ;; esac
    done
done
musts=$(missing $musts) mays=$(missing $mays)
if [ -z "$musts$mays" ]; then
    [ "$SETUP" = print ] && echo "setup: nothing is missing"
    exit 0
fi

how="install --no-install-recommends"
# " (15 packages: 6604 kB to download, 26.3 MB installed)"; nothing where apt-get does not know the packages
size() {
    LC_ALL=C apt-get --print-uris -y $how "$@" 2>/dev/null | awk '
        / newly installed/ { count = $1 + $3 }
        /^Need to get / { sub("/.*", "", $5); load = $4 " " $5 }
        /^After this operation/ { disk = $4 " " $5 }
        END { if (disk) printf " (%d package%s: %s to download, %s installed)", count, count == 1 ? "" : "s", load, disk }'
}
root=""
[ "$(id -u)" = 0 ] || root="sudo "
typed() { echo "${root}apt-get $how $*"; }
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
# without REASON: the end, which is bad only where tests cannot do without
without() {
    if [ -z "$musts" ]; then echo "setup: not installed: $mays ($1); what needs them is skipped"; exit 0; fi
    echo "setup: $1; please type: $(typed $musts)" >&2
    exit 1
}

[ "$SETUP" != check ] || [ -n "$musts" ] || exit 0
if ! command -v apt-get >/dev/null 2>&1; then
    echo "setup: please install what Debian calls $musts${mays:+ $mays}" >&2
    [ -z "$musts" ]; exit
fi
case $SETUP in
print) echo "setup: $(typed $musts $mays)$(size $musts $mays)"; exit 0 ;;
check) without "this needs $musts" ;;
esac

as_root() { # COMMAND...: said, then done
    echo "setup: $root$*$more"
    if [ -n "$root" ]; then
        command -v sudo >/dev/null 2>&1 || without "you are not root"
        sudo -n true 2>/dev/null || without "sudo asks for a password"
    fi
    ${root:+sudo -n} env DEBIAN_FRONTEND=noninteractive "$@" -y -qq </dev/null >"$log" 2>&1
}
install() { # PACKAGE...: by new lists of packages where those here are none, or too old
    more=$(size "$@")
    [ -n "$more" ] && more="$more; SETUP=print only says this" && as_root apt-get $how "$@" && return
    more="" && as_root apt-get update && more=$(size "$@") && as_root apt-get $how "$@"
}
install $musts $mays && exit 0
reason=$(tail -n 1 "$log")
[ -n "$musts" ] && [ -n "$mays" ] && install $musts && musts=""
without "$reason"
