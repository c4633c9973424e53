#!/bin/sh
# SPDX-License-Identifier: MIT OR Unlicense
# SFT, DPO and PPO on several hosts, started by mpirun. First `make mpi build/make_arith`, and put this folder on every host.
#     sh demos/cluster_mpirun.sh                                  on this machine, with more ranks than cores
#     HOSTFILE=hosts RANKS=16 RING=4 sh demos/cluster_mpirun.sh   on the hosts of a file with lines "host slots=8"
set -eu
cd "$(dirname "$0")/.."
RANKS=${RANKS:-4}   # of all hosts together, an even number
HOSTFILE=${HOSTFILE:-}
RING=${RING:-2}     # ranks that share a sequence; it divides half of RANKS
BIN=${BIN:-build}   # where mpi_train_sft, mpi_train_dpo and mpi_train_ppo are
OUT=${OUT:-cluster} # models and checkpoints; on a disk that all hosts share
DATA=${DATA:-}      # records with question, answer and wrong, a worse answer; empty: sums
STEPS=${STEPS:-20}  # of each stage
hosts=--oversubscribe
[ -z "$HOSTFILE" ] || hosts="--hostfile $HOSTFILE"
stage() { # TRAINER OPTIONS...
    program=$BIN/mpi_train_$1 && shift
    # shellcheck disable=SC2086 # these are words
    mpirun -n "$RANKS" $hosts "$program" $rows "$@"
}

# ---- the stages ----
mkdir -p "$OUT"
[ -n "$DATA" ] || { DATA=$OUT/sums.jsonl && build/make_arith "$DATA" 400 7; }
half=$((RANKS / 2))
rows="--packing_samples --max_len 256 --pack_len 512 --ring_attn_size $RING --max_steps $STEPS"

# a small model from nothing; --pretrain FOLDER begins with one
stage sft --dataset "$DATA" --input_key question --output_key answer --train_batch_size 16 --learning_rate 4e-3 \
    --num_hidden_layers 2 --hidden_size 64 --data_parallel_size $((RANKS / RING)) --save_path "$OUT/sft"
stage dpo --dataset "$DATA" --prompt_key question --chosen_key answer --rejected_key wrong --train_batch_size 16 \
    --learning_rate 5e-4 --pretrain "$OUT/sft" --data_parallel_size $((RANKS / RING)) --save_path "$OUT/dpo"
# actor and reference on the first half of the ranks, the critic on the second
stage ppo --prompt_data "$DATA" --input_key question --label_key answer --reward_rule last_number \
    --prompt_max_len 200 --generate_max_len 48 --rollout_batch_size 16 --train_batch_size 16 --pretrain "$OUT/dpo" \
    --actor_num_nodes 1 --actor_num_gpus_per_node "$half" --critic_num_nodes 1 --critic_num_gpus_per_node "$half" \
    --colocate_actor_ref --save_value_network --save_path "$OUT/ppo"
echo "models: $OUT/sft, $OUT/dpo, $OUT/ppo"
