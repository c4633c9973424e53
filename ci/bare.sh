#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# ci/bare.sh [SUITE...]: what a new user meets. Makes a Debian with git, gcc and make and nothing else (debootstrap --variant=minbase,
# from the mirror that this machine's apt uses), clones HEAD into it and types there: make demo, make verify, make check, or
# make check SUITES="..." of the suites given. Prints seconds and last lines; logs are in build/bare. Exit code 0: all is green.
# Needs root, 2 GB of disk, 4 minutes, and the time of the check (40 minutes on two cores). Of the kernel's file systems /proc
# alone is mounted, as shells need it: /sys, /dev/pts and /dev/net/tun are not there, as in many containers, and what needs
# them must say so. All runs in mount and process namespaces of its own, so nothing stays behind.
cd "$(dirname "$0")/.." || exit 1
stop() { echo "bare: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || stop "chroot needs root; please type: sudo ci/bare.sh $*"
command -v debootstrap >/dev/null || stop "please type: apt-get install --no-install-recommends debootstrap"
unshare --mount --pid --fork true 2>/dev/null || stop "no namespaces of mounts and processes here"
# the release and its mirror, whatever file of /etc/apt they stand in
read -r mirror release < <(apt-get indextargets --format '$(ORIGIN) $(COMPONENT) $(REPO_URI) $(CODENAME)' 'Created-By: Packages' |
    awk '$1 == "Debian" && $2 == "main" && $4 !~ /-/ { print $3, $4; exit }')
[ -n "$release" ] || stop "apt knows no mirror of Debian; please type: apt-get update"

logs=build/bare
rm -rf $logs; mkdir -p $logs
root=$(mktemp -d "${TMPDIR:-/var/tmp}/seqpar-bare.XXXXXX") && chmod 755 "$root" || exit 1
trap 'rm -rf --one-file-system "$root"' EXIT
trap 'exit 130' INT TERM
failed=0
# step NAME COMMAND...: its seconds, whether it ended well, its last two lines
step() {
    local name=$1 began=$SECONDS code; shift
    "$@" >$logs/"$name".log 2>&1 </dev/null; code=$?
    printf '%-12s %5d s  %s\n' "$name" $((SECONDS - began)) "$([ $code = 0 ] && echo ok || echo "exit code $code")"
    [ "$name" = debootstrap ] && [ $code = 0 ] || { grep '^setup: ' $logs/"$name".log; tail -n 2 $logs/"$name".log; } | sed 's/^/    /'
    [ $code = 0 ] || failed=1
}
inside() { # COMMAND...: in the clone, with nothing of this machine's environment
    unshare --mount --pid --fork --kill-child --mount-proc="$root/proc" chroot "$root" \
        env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C ${http_proxy:+http_proxy="$http_proxy"} ${JOBS:+JOBS="$JOBS"} \
        sh -c 'cd /root/seqpar && exec "$@"' sh "$@"
}
echo "bare: debootstrap --variant=minbase --include=git,gcc,make $release $root"
step debootstrap unshare --mount debootstrap --variant=minbase --include=git,gcc,make "$release" "$root" "$mirror"
[ $failed = 0 ] && step clone git clone -q --no-hardlinks . "$root/root/seqpar"
[ $failed = 0 ] || exit 1
step demo inside make demo
step verify inside make verify
step check inside make check ${1:+SUITES="$*"}
grep '^FAIL' $logs/check.log
exit $failed
