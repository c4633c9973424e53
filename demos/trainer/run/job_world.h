/* SPDX-License-Identifier: MIT OR Unlicense */
/* job_world.h - the ranks: processes that a launcher started, or threads of this process; the
 * number of ranks that share a sequence, and the number of data-parallel replicas. */
#ifndef DEMO_JOB_WORLD_H
#define DEMO_JOB_WORLD_H
#include "job.h"
#include "settle.h"

/* The integer in an environment variable; -1 if it is not an integer, `unset` if the variable
   is missing or empty. */
static int64_t demo_environment(const char *name, int64_t unset) {
    const char *text = getenv(name);
    char *end;
    if (!text || !*text) return unset;
    int64_t value = strtoll(text, &end, 10);
    return *end ? -1 : value;
}

/* If a launcher started several processes, each is a rank. They communicate over MPI (started
   by mpirun, mpiexec or srun) or over NCCL (started by torchrun or by a loop in a shell). */
#ifdef DEMO_MPI
#define DEMO_PROCESSES_OVER "MPI"
#elif defined DEMO_NCCL
#define DEMO_PROCESSES_OVER "NCCL"
#else
#define DEMO_PROCESSES_OVER ""
#endif

/* The number of processes that the launcher started; *name: the variable that gives it. 0:
   there is no launcher. */
__attribute__((unused)) static int64_t demo_launched(const char **name) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
                                        "SLURM_STEP_NUM_TASKS"};
    for (int i = 0; i < 3; i++)
        if (demo_environment(names[i], 0) > 0) return demo_environment(*name = names[i], 0);
    return 0;
}

/* The local rank: the number of this process on its host, which selects its GPU. Reads the
   variables of all launchers. */
__attribute__((unused)) static int64_t demo_local_rank(void) {
    static const char *const names[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "MPI_LOCALRANKID", "SLURM_LOCALID"};
    for (int i = 0; i < 4; i++)
        if (getenv(names[i])) return demo_environment(names[i], 0);
    return 0;
}

#ifdef DEMO_MPI
static int demo_find_processes(demo_job *job, demo_error *error) {
    const char *name = "";
    const seqpar_mpi_desc desc = {.limit_s = 3600}; /* until --ddp_timeout is known */
    int64_t told = demo_launched(&name);
    if (told < 2 || job->world) return 0;
    if (seqpar_mpi_open(&job->world, &desc, &job->world_error))
        return demo_fail(error, "%s", job->world_error.text);
    job->processes = job->world->size;
    job->rank = job->world->rank;
    if (job->processes == told) return 0;
    return demo_fail(
        error,
        "the launcher has started %lld processes (%s), but the MPI of this program "
        "knows %lld; start it by the mpirun of the library it was built with, or by "
        "srun --mpi=pmix",
        (long long)told, name, (long long)job->processes);
}
#elif defined DEMO_NCCL
/* Sets torchrun's variables from those of srun. MASTER_ADDR cannot be set, since srun has no
   variable for it. */
static void demo_take_slurm(void) {
    static const char *const names[][2] = {{"WORLD_SIZE", "SLURM_STEP_NUM_TASKS"},
                                           {"RANK", "SLURM_PROCID"},
                                           {"LOCAL_RANK", "SLURM_LOCALID"}};
    if (getenv("WORLD_SIZE") || demo_environment("SLURM_STEP_NUM_TASKS", 0) < 2) return;
    for (int i = 0; i < 3; i++)
        if (getenv(names[i][1])) setenv(names[i][0], getenv(names[i][1]), 0);
}

static int demo_find_processes(demo_job *job, demo_error *error) {
    demo_take_slurm();
    job->processes = demo_environment("WORLD_SIZE", 0);
    job->rank = job->processes ? demo_environment("RANK", -1) : 0;
    if (job->processes < 0)
        return demo_fail(error,
                         "the environment's WORLD_SIZE is '%s'; set it to the number of "
                         "processes that were started, or unset it",
                         getenv("WORLD_SIZE"));
    if (job->processes && (job->rank < 0 || job->rank >= job->processes))
        return demo_fail(error,
                         "the environment's RANK is '%s'; give each of the %lld processes its "
                         "own, 0 to %lld",
                         getenv("RANK") ? getenv("RANK") : "", (long long)job->processes,
                         (long long)job->processes - 1);
    return 0;
}
#else
static int demo_find_processes(demo_job *job, demo_error *error) {
    const char *name = "WORLD_SIZE";
    int64_t told = demo_environment(name, 0);
    (void)job;
    if (!told) told = demo_launched(&name);
    if (told < 0 || told > 1)
        return demo_fail(
            error,
            "the environment's %s is %.40s, but this program was built without NCCL and MPI, "
            "so each process would run all ranks; type make cuda where nccl.h is and start "
            "build/cuda_train_*, or make mpi where mpicc is and start build/mpi_train_*, or "
            "unset %s",
            name, getenv(name), name);
    return 0;
}
#endif

/* Checks that there are as many processes as ranks. */
static int demo_job_processes(demo_job *job, demo_error *error) {
    demo_config *c = &job->config;
    if (demo_find_processes(job, error)) return -1;
    int64_t processes = job->processes;
    int64_t dp = c->data_parallel_size ? c->data_parallel_size : processes / c->ring_attn_size;
    if (!processes) return 0;
    if (c->world_size && c->world_size != processes)
        return demo_fail(error,
                         "%lld processes were started, world_size is %lld; leave out "
                         "--world_size",
                         (long long)processes, (long long)c->world_size);
    if (job->groups && job->ranks != processes)
        return demo_fail(
            error,
            "%lld processes were started, but the roles have %lld ranks (*_num_nodes x "
            "*_num_gpus_per_node); start that many processes, or one process, whose threads "
            "are the ranks",
            (long long)processes, (long long)job->ranks);
    if (!job->groups && dp * c->ring_attn_size != processes)
        return demo_fail(
            error,
            "%lld processes were started, which is not data_parallel_size %lld x "
            "ring_attn_size %lld; start that many processes, or one process, whose threads "
            "are the ranks",
            (long long)processes, (long long)(dp ? dp : 1), (long long)c->ring_attn_size);
    c->world_size = processes;
    return 0;
}

static void *demo_idle_thread(void *lock) {
    pthread_mutex_lock((pthread_mutex_t *)lock);
    pthread_mutex_unlock((pthread_mutex_t *)lock);
    return NULL;
}

/* Starts as many threads as the run will have, and ends them again. Returns how many could be
   started. If a limit on memory or threads allows fewer, the job is refused with a message;
   without this check OpenMP or malloc would abort the program later. */
static int64_t demo_threads_there(int64_t wanted) {
    pthread_t *threads = (pthread_t *)demo_alloc(wanted, sizeof *threads);
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    int64_t count = 0;
    pthread_mutex_lock(&lock);
    while (count < wanted && !pthread_create(&threads[count], NULL, demo_idle_thread, &lock))
        count++;
    pthread_mutex_unlock(&lock);
    for (int64_t i = 0; i < count; i++) pthread_join(threads[i], NULL);
    free(threads);
    return count;
}

static int demo_job_threads(const demo_job *job, demo_error *error) {
    int64_t ranks = job->processes ? 1 : job->ranks;
    int64_t threads = job->config.omp_threads, there;
    if (ranks * threads > SEQPAR_MAX_RANKS)
        return demo_fail(error,
                         "%lld ranks of %lld threads (--omp_threads) are more than the limit "
                         "of %lld threads per process; lower one of them",
                         (long long)ranks, (long long)threads, (long long)SEQPAR_MAX_RANKS);
    there = demo_threads_there(ranks * threads);
    if (there == ranks * threads) return 0;
    return demo_fail(error,
                     "only %lld of %lld threads can be started here (%lld ranks of %lld, "
                     "--omp_threads): %s; lower one of them, or raise the limit (ulimit -v, "
                     "ulimit -u)",
                     (long long)there, (long long)(ranks * threads), (long long)ranks,
                     (long long)threads, strerror(EAGAIN));
}

/* Refuses a group whose number of ranks is not a multiple of ring_attn_size. The message names
   the options of the first role in the group. */
static int demo_group_odd(const demo_job *job, int group, demo_error *error) {
    char name[64], options[96];
    job->objective->group_name(job, group, name);
    bool generates = !strcmp(name, "generator"), frozen = !strncmp(name, "reference", 9);
    size_t first = frozen ? 3 : strcspn(name, " ");
    if (generates)
        snprintf(options, sizeof options, "--vllm_num_engines x --vllm_tensor_parallel_size");
    else
        snprintf(options, sizeof options, "--%.*s_num_nodes x --%.*s_num_gpus_per_node",
                 (int)first, name, (int)first, name);
    return demo_fail(error,
                     "the group of the %s has %lld rank%s (%s), but must have a multiple of "
                     "ring_attn_size %lld; give other numbers",
                     name, (long long)job->group_ranks[group],
                     demo_plural(job->group_ranks[group]), options,
                     (long long)job->config.ring_attn_size);
}

/* Refuses a world_size that is not dp x ring_attn_size. */
static int demo_world_uneven(const demo_config *c, int64_t dp, demo_error *error) {
    if (!c->data_parallel_size)
        return demo_fail(error,
                         "world_size %lld is no multiple of ring_attn_size %lld; change one of "
                         "them",
                         (long long)c->world_size, (long long)c->ring_attn_size);
    return demo_fail(error,
                     "world_size %lld is not data_parallel_size %lld x ring_attn_size %lld; "
                     "change one of them",
                     (long long)c->world_size, (long long)dp, (long long)c->ring_attn_size);
}

/* Counts the ranks of a run with several groups. data_parallel_size is that of the first
   group. */
static int demo_job_groups(demo_job *job, demo_error *error) {
    demo_config *c = &job->config;
    int64_t sp = c->ring_attn_size, ranks = 0;
    for (int g = 0; g < job->groups; g++) {
        ranks += job->group_ranks[g];
        if (job->group_ranks[g] % sp) return demo_group_odd(job, g, error);
    }
    if (!job->groups) return 0;
    if (c->data_parallel_size && c->data_parallel_size * sp != job->group_ranks[0])
        return demo_fail(
            error,
            "data_parallel_size %lld x ring_attn_size %lld is not the actor's %lld ranks "
            "(actor_num_nodes x actor_num_gpus_per_node); leave --data_parallel_size out",
            (long long)c->data_parallel_size, (long long)sp, (long long)job->group_ranks[0]);
    if (c->world_size && c->world_size != ranks)
        return demo_fail(error,
                         "world_size is %lld, the roles have %lld ranks (*_num_nodes x "
                         "*_num_gpus_per_node); leave --world_size out",
                         (long long)c->world_size, (long long)ranks);
    c->data_parallel_size = job->group_ranks[0] / sp;
    job->ranks = ranks;
    return 0;
}

/* Checks the options about devices and memory, and sets the number of ranks, replicas and
   threads. */
static int demo_job_world(demo_job *job, demo_error *error) {
    demo_config *c = &job->config;
    if (demo_job_groups(job, error) || demo_job_processes(job, error)) return -1;
    int64_t dp = c->data_parallel_size ? c->data_parallel_size
                 : c->world_size       ? c->world_size / c->ring_attn_size
                                       : 1;
    if (demo_size_named(c->max_shard_size) < 0)
        return demo_fail(error,
                         "max_shard_size is %.60s, but it must be a size such as 700MB or 5GB",
                         c->max_shard_size);
    if (c->cublas && strcmp(c->device, "cuda"))
        return demo_fail(error,
                         "--cublas is for the GPU, not for --device %s; add --device cuda or "
                         "leave it out",
                         c->device);
    if (c->stochastic_rounding && !demo_wants_bf16(c))
        return demo_fail(
            error, "--stochastic_rounding is for weights in bf16; add --param_dtype bf16");
    if (c->adam_offload && !strcmp(c->optim, "adamw_8bit"))
        return demo_fail(
            error, "--adam_offload does not support --optim adamw_8bit; leave one of the two "
                   "out");
    if (c->param_offload && c->zero_stage != 3)
        return demo_fail(
            error,
            "--param_offload needs sharded weights, but zero_stage is %lld; add --zero_stage 3",
            (long long)c->zero_stage);
    if (c->offload_path && (access(c->offload_path, W_OK | X_OK) || !strcmp(c->device, "cuda")))
        return demo_fail(
            error, "offload_path %.300s %s", c->offload_path,
            !strcmp(c->device, "cuda")
                ? "is not for a GPU, which offloads to the host's memory; leave it out"
                : "is no folder that can be written to; make it, or give another");
#ifndef DEMO_CUDA
    if (!strcmp(c->device, "cuda"))
        return demo_fail(error,
                         "--device cuda needs a program built with CUDA; type make cuda and "
                         "start build/cuda_train_*");
#endif
    if (c->world_size && !job->groups && c->world_size != dp * c->ring_attn_size)
        return demo_world_uneven(c, dp, error);
    job->dp = dp;
    if (!job->groups) job->ranks = dp * c->ring_attn_size;
    if (!job->processes && job->ranks > SEQPAR_MAX_RANKS)
        return demo_fail(
            error,
            "data_parallel_size %lld x ring_attn_size %lld%s are more than the limit of %lld "
            "ranks per process; lower one of them",
            (long long)dp, (long long)c->ring_attn_size,
            job->groups ? " and those of the other roles (*_num_gpus_per_node)" : "",
            (long long)SEQPAR_MAX_RANKS);
    if (!c->omp_threads) {
        c->omp_threads = sysconf(_SC_NPROCESSORS_ONLN) / job->ranks;
        if (c->omp_threads < 1) c->omp_threads = 1;
    }
    return demo_job_threads(job, error);
}
#endif
