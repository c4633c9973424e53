#!/bin/sh
# SPDX-License-Identifier: MIT OR Unlicense
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=4
# SFT, DPO and PPO on several hosts, started by srun. First `make mpi build/make_arith`, on a disk that all hosts share.
#     sbatch demos/cluster_srun.sh                                nodes and ranks as above, or as sbatch is told
#     salloc -N 2 -n 16 env RING=4 sh demos/cluster_srun.sh       by hand
set -eu
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" # sbatch runs a copy of this file that lies elsewhere
RANKS=${SLURM_NTASKS:?run this by sbatch or salloc, which say how many ranks there are} # an even number
MPI=${MPI:-pmix}    # of Open MPI; pmi2 for MPICH. srun --mpi=list says what there is
RING=${RING:-2}     # ranks that share a sequence; it divides half of RANKS
BIN=${BIN:-build}   # where mpi_train_sft, mpi_train_dpo and mpi_train_ppo are
OUT=${OUT:-cluster} # models and checkpoints; on a disk that all hosts share
DATA=${DATA:-}      # records with question, answer and wrong, a worse answer; empty: sums
STEPS=${STEPS:-20}  # of each stage
CORES=${SLURM_CPUS_PER_TASK:-1} # of each rank
stage() { # TRAINER OPTIONS...
    program=$BIN/mpi_train_$1 && shift
    # shellcheck disable=SC2086 # these are words
    srun --ntasks="$RANKS" --cpus-per-task="$CORES" --mpi="$MPI" --kill-on-bad-exit=1 "$program" --omp_threads "$CORES" $rows "$@"
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
