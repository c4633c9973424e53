#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# ci/limit.sh SECONDS[:STALL] COMMAND...: becomes the command, which is ended when it and its children have used so many seconds
# of processor time, or when it makes no progress: for STALL seconds (150) it neither wrote to its stdout nor used a 300th of
# that time of the processor, nor had a thread that waits for a core or a disk. So a slow or busy machine is no reason. The
# reason goes to the command's stderr; its exit code is then 143 (SIGTERM) or, five seconds later, 137 (SIGKILL).
limit=${1%:*} stall=150 program=$$
case $1 in *:*) stall=${1#*:} ;; esac
shift
command="$*"

declare -A parent used
# Sets `field`, which begins with the third of proc(5), the state: [1] is the parent, [11] to [14] are ticks, [19] is when it began.
stat_of() { read -r line 2>/dev/null <"$1" && read -ra field <<<"${line##*) }"; }
look() { # sets `tree`, the program and its descendants, and `ticks`, their processor time and that of their ended children
    local file line field pid more=1
    parent=() used=() tree=" $program " ticks=0
    for file in /proc/[0-9]*/stat; do
        stat_of "$file" || continue
        pid=${line%% *} parent[${line%% *}]=${field[1]} used[${line%% *}]=$((field[11] + field[12] + field[13] + field[14]))
    done
    while [ $more = 1 ]; do
        more=0
        for pid in "${!parent[@]}"; do
            if [[ $tree = *" ${parent[$pid]} "* && $tree != *" $pid "* ]]; then tree="$tree$pid " more=1; fi
        done
    done
    for pid in $tree; do ticks=$((ticks + ${used[$pid]:-0})); done
}
ready() { # whether a thread could run, if it were let (R), or waits for a disk (D)
    local pid file line field
    for pid in $tree; do
        for file in /proc/$pid/task/*/stat; do stat_of "$file" && [[ ${field[0]} = [RD] ]] && return; done
    done
    return 1
}
runs() { local line field; stat_of /proc/$program/stat && [ "${field[19]}" = "$begin" ] && [ "${field[0]}" != Z ]; }
end() { # REASON
    if [ -f /dev/fd/2 ]; then echo "limit: $1: ${command:0:200}" >&2; else echo "limit: $1: ${command:0:200}" 2>/dev/null >/proc/$program/fd/2; fi
    kill -TERM $tree
    sleep 5
    kill -KILL $tree 2>/dev/null # those that are left
    exit
}
watch() {
    # Linux counts 100 ticks a second. Turns of the loop are the clock: where the machine stands still, so does it.
    local turn=0 step=2 idle=0 last=0 size="" now line field begin
    stat_of /proc/$program/stat && begin=${field[19]}
    while sleep $step && runs; do
        [ $((++turn)) -lt 5 ] || step=10
        look
        now=$(stat -L -c %s /proc/$program/fd/1 2>/dev/null)
        [ $ticks -lt $((limit * 100)) ] || end "$limit seconds of processor time are used"
        if [ $((ticks - last)) -ge $(((stall + 2) / 3)) ] || [ "$now" != "$size" ] || ready; then idle=0 last=$ticks size=$now; else idle=$((idle + step)); fi
        [ $idle -lt "$stall" ] || end "no progress for $stall seconds"
    done
}
# A process of nobody's, as the command waits for its own children alone. It keeps no pipe open that somebody reads to its end.
if [ -f /dev/fd/2 ]; then (watch </dev/null >/dev/null &); else (watch </dev/null >/dev/null 2>&1 &); fi
exec "$@"
