#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The trainers over MPI on 2 and 4 hosts. A host is a network namespace of this machine, and what lies between them is verify/support/network.c:
# TCP alone crosses it, late or with losses where that is wanted, and its lines can be cut. Needs root, `ip` and /dev/net/tun.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_hosts name=hosts
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
hosts=
. verify/support/processes.sh
none() { skip hosts "$1"; summary; exit; }
[ "$(id -u)" = 0 ] || none "network namespaces need root"
command -v ip >/dev/null || none "no ip (ci/setup.sh test_hosts)"
[ -c /dev/net/tun ] || none "no /dev/net/tun"
ip netns add seqpar0 2>$out/why && ip netns del seqpar0 || none "no network namespaces: $(head -n 1 $out/why)"

# one machine, and yet hosts of their own name: how the launchers reach host 10.77.0.K
cat >$out/agent <<'AGENT'
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done # ssh's options
host=$1; shift
exec ip netns exec "seqpar${host##*.}" unshare --uts sh -c "echo host${host##*.} >/proc/sys/kernel/hostname; $*"
AGENT
chmod +x $out/agent
# begin DELAY_MS LOSS_PERCENT: a network between $hosts hosts; end: says what it carried
begin() {
    local all=() i
    for i in $(seq 1 $hosts); do ip netns del seqpar$i 2>/dev/null; ip netns add seqpar$i; all+=(seqpar$i); done
    rm -f $out/carried; $out/network "$1" "$2" "${all[@]}" >$out/carried 2>&1 & network=$!
    for _ in $(seq 1 100); do grep -q ready $out/carried && break; sleep 0.05; done
    for i in $(seq 1 $hosts); do ip -n seqpar$i addr add 10.77.0.$i/24 dev wire; ip -n seqpar$i link set wire mtu 32000 up; ip -n seqpar$i link set lo up; done
}
end() {
    kill $network; wait $network
    # a launcher's daemon that was cut off
    for i in $(seq 1 $hosts); do kill $(ip netns pids seqpar$i) 2>/dev/null; ip netns del seqpar$i; done
}
carried() { sed -nE "s/.* ([0-9]+) $1.*/\1/p" $out/carried; } # carried|lost|cut
trap 'kill $network 2>/dev/null; for i in 1 2 3 4; do ip netns del seqpar$i 2>/dev/null; done' EXIT
mpi_run() {
    local ranks=$1 each=$(($1 / hosts)) list= i; shift
    for i in $(seq 1 $hosts); do list=$list,10.77.0.$i; [ $library = openmpi ] && list=$list:$each; done
    case $library in
    openmpi) $out/agent 10.77.0.1 exec ci/limit.sh $limit mpirun.openmpi --oversubscribe --host ${list#,} -n $ranks --mca plm_rsh_agent $PWD/$out/agent --mca pml ob1 --mca btl self,tcp \
        --mca btl_tcp_if_include wire --mca oob_tcp_if_include wire --mca orte_base_help_aggregate 0 "$@" ;;
    mpich) UCX_TLS=tcp,self UCX_NET_DEVICES=wire $out/agent 10.77.0.1 exec ci/limit.sh $limit mpirun.mpich -iface wire -localhost 10.77.0.1 -launcher ssh -launcher-exec $PWD/$out/agent -hosts ${list#,} -ppn $each -n $ranks "$@" ;;
    esac
}
launch() { local ranks=$1 trainer=$2; shift 2; mpi_run $ranks $out/$library/train_$trainer "$@"; }

gcc -O2 -Wall -Wextra verify/support/network.c -o $out/network || fail hosts_network "does not build"
flags="-std=gnu11 -O2 -march=native -fopenmp -Wno-format-truncation -Wno-missing-field-initializers -I. -Ibuild -Idemos -Iverify $(make --no-print-directory -s linked-flags)"

# crosses NAME lossy|cut: the run went over the network, which lost some of it where it should
crosses() {
    end
    if [ "$(carried carried)" -ge 1000 ] && { [ "$2" != lossy ] || [ "$(carried lost)" -ge 10 ]; } && { [ "$2" != cut ] || [ "$(carried cut)" -ge 1 ]; }; then ok "${name}_$1 $(tail -n 1 $out/carried)"
    else fail "${name}_$1" "$(tail -n 1 $out/carried)"; fi
}
# a run of two hosts, whose lines are cut when its first checkpoint is there, and mended after so long
cut_run() { # NAME SECONDS|never OPTIONS...
    local run=$1 seconds=$2; shift 2
    begin 0 0
    detached_run processes $run sft $texts --max_steps 400 --save_steps 5 --ring_attn_size 2 --data_parallel_size 2 "$@"
    await_checkpoint $run
    kill -USR1 $network
    if [ $seconds != never ]; then sleep $seconds; kill -USR2 $network; fi
    finish; code=$?
}
mended() {
    cut_run short 2
    if [ $code -eq 0 ] && cmp -s $out/short/model.safetensors $out/long/model.safetensors; then ok ${name}_short_cut
    else fail ${name}_short_cut "exit code $code: $(tail -n 1 $out/short.log)"; fi
    crosses short_cut_is_met cut; rm -rf $out/short
}
stopped() {
    local left
    cut_run stopped never --ddp_timeout 5
    for _ in $(seq 1 100); do left=$(ranks_of $out/stopped); [ -z "$left" ] && break; sleep 0.1; done
    if [ $code -ne 0 ] && [ -z "$left" ] && grep -qE '^error: .*rank [0-9] waits in .* for rank [0-9]' $out/stopped.log && [ ! -e $out/stopped/model.safetensors ]; then ok "${name}_cut $(grep -m 1 -oE 'rank [0-9] waits in .* for rank [0-9]' $out/stopped.log)"
    else fail ${name}_cut "exit code $code, left behind: ${left:-none}: $(tail -n 1 $out/stopped.log)"; fi
    end
    hosts=4; begin 0 0
    run processes stopped sft $texts --max_steps 400 --ring_attn_size 4 --load_checkpoint || fail ${name}_cut_goes_on "$(tail -n 1 $out/stopped.log)"
    cmp -s $out/stopped/model.safetensors $out/long/model.safetensors && ok ${name}_cut_goes_on || fail ${name}_cut_goes_on "weights differ from those of the whole run"
    end; rm -rf $out/stopped
}

limit=600
run threads long sft $texts --max_steps 400 || fail hosts_long "$(tail -n 1 $out/long.log)"
# MPICH 4.0.2 of Debian 12 hangs in MPI_Finalize over UCX's TCP in one run of three, also of a program of ten lines
for library in openmpi ${TEST_ALL:+mpich}; do
    name=hosts_$library
    if ! command -v mpicc.$library >/dev/null || ! command -v mpirun.$library >/dev/null; then skip $name "no mpicc.$library and mpirun.$library (ci/setup.sh test_hosts)"; continue; fi
    mkdir -p $out/$library
    for trainer in sft dpo; do mpicc.$library $flags -DDEMO_MPI demos/train_$trainer.c build/seqpar.o -o $out/$library/train_$trainer -lcjson -lcurl -lz -lm -lpthread || fail ${name}_build $trainer; done
    # sequences within a host, data-parallel ranks across; then a ring across hosts
    for hosts in 2 4; do
        begin 0 0
        worlds=("--ring_attn_size 2 --data_parallel_size $hosts" "--ring_attn_size 4 --zero_stage 3")
        compare sft sft "" $texts
        compare dpo dpo "" $pairs --pretrain $out/sft.one
        crosses ${hosts}_cross
    done
    hosts=2; begin 2 1
    worlds=("--ring_attn_size 4 --zero_stage 3")
    compare sft sft "" $texts
    crosses late_and_lossy lossy
    mended
    stopped
done
summary
