/* SPDX-License-Identifier: MIT OR Unlicense */
/* job.h - what is to be trained, on what, by whom: filled from options, checked, and refused with
 * one sentence before a rank is there. */
#ifndef DEMO_JOB_H
#define DEMO_JOB_H

#include <pthread.h>
#include "average.h"
#include "config.h"
#include "data.h"
#include "definitions.h"
#include "experts.h"
#include "holdout.h"
#include "logs.h"
#include "peft.h"
#include "progress.h"
#include "run.h"
#ifdef DEMO_NCCL /* ranks can be processes, each with a GPU: make cuda */
#define SEQPAR_NCCL_IMPLEMENTATION
#include "seqpar_nccl.h"
#endif
#ifdef DEMO_MPI /* ranks can be processes: make mpi */
#define SEQPAR_MPI_IMPLEMENTATION
#include "seqpar_mpi.h"
#endif

enum { DEMO_GROUPS = 5 };
enum { DEMO_COLUMNS = 8 }; /* most numbers an objective reports */
enum { DEMO_REFERENCE, DEMO_REFERENCE_OLD /* as 0.2.0 has it */, DEMO_REFERENCES };
typedef struct demo_objective demo_objective;
typedef struct {
    const char *dashes, *name;
    int64_t digest;
} demo_told;

typedef struct {
    demo_config config;
    const demo_binding *bindings; /* its options */
    int binding_count;
    const demo_options *parsed; /* which of them were typed, and how; NULL: none were */
    demo_told *told;            /* what every rank must have been told alike; stb_ds array */
    const demo_objective *objective;
    void *options;      /* of the objective */
    const char **score; /* the option that names the score head; NULL: a language model */
    demo_dataset train, eval;
    /* eval is a part of what is trained on: a reward model's; then it may be asked at the end
       alone, for mean and deviation of its scores */
    bool eval_trained, eval_scores;
    int64_t eval_of; /* units that eval was drawn from; 0: it has data of its own */
    int64_t *usable; /* training units whose documents all have a target, in file order */
    int64_t usable_count, total_steps, rounds, warmup; /* rounds: what progress counts */
    /* units that a round takes, and its steps; rounds between evaluations, 0: one at the end;
       train_batch_size as it was typed, 0: it was not */
    int64_t epoch_units, round_steps, eval_every, asked_batch;
    /* at which training ends: total_steps, or the end of the last rollout */
    int64_t last_step;
    demo_run run;
    demo_logs_desc logs;
    uint64_t data;    /* digest of what is trained on */
    demo_note *notes; /* for checkpoints; stb_ds array */
    seqpar_llama_config model;
    seqpar_adapter_desc adapter;          /* rank 0: the model itself is trained */
    char adapter_targets[DEMO_LORA_TEXT]; /* of a folder that they begin with */
    int64_t untaught;                     /* as in seqpar_llama_run */
    int layout, schedule, lr_kind;
    double temperature; /* of log-probs; 0: 1 */
    /* rows at a time where there are no gradients; 0: micro_train_batch_size */
    int64_t micro_values;
    int64_t dp;
    /* of all; groups of them that are worlds of their own (roles.h), 0: all are one */
    int64_t ranks, group_ranks[DEMO_GROUPS];
    int groups;
    /* ranks that were started as processes, and which of them this is; 0: ranks share this
       one */
    int64_t processes, rank;
    seqpar_comm *world; /* of processes that hold together from the start; NULL: none */
    seqpar_error world_error;
#ifdef DEMO_NCCL
    seqpar_nccl_desc nccl; /* zeros: the environment says who is who */
#endif
    demo_shared *shared; /* while it runs */
} demo_job;

typedef struct { /* one rank at work */
    const demo_job *job;
    seqpar_comm *world; /* of all ranks; that of ctx is this one, or the rank's group of them */
    seqpar_comm *own_world; /* the latter; NULL: the former */
    int group;
    seqpar_ctx ctx;
    seqpar_device *device;
    seqpar_llama model;    /* of the first group, and the generators */
    seqpar_llama adapters; /* of the model, where those are trained */
    seqpar_llama *critic;  /* PPO's, where it has one */
    bool saves_critic;
    const char *critic_source; /* the folder that it began with; NULL: none */
    seqpar_optim optim;
    demo_average average; /* of the weights, where one is kept */
    demo_async async;     /* a checkpoint that is being written, and */
    demo_state saving;    /* its state; */
    demo_sum *sums;       /* stb_ds array: what its shards are */
    int64_t step, saved;  /* steps done; at the last checkpoint */
    int stopped;          /* by a signal, before the end */
    /* digests of the frozen model, on rank 0; 0: there is none */
    uint64_t reference[DEMO_REFERENCES];
    uint64_t base;         /* digest of the model whose adapters are trained */
    char run[DEMO_RUN_ID]; /* what the run is called, the same on all ranks */
    demo_progress progress;
    demo_logs logs;         /* rank 0 */
    double *losses, *steps; /* stb_ds arrays, rank 0: what this process did */
    double norm_last, eval_means[DEMO_COLUMNS], seconds;
    int64_t tokens;
    int64_t *order, order_epoch; /* (usable units) the shuffle of that epoch; NULL: none yet */
    /* rank 0: what failed outside of training, which ends with it once a checkpoint is
       written */
    seqpar_error trouble;
    demo_experts experts;
    void *own; /* of the objective */
} demo_rank;

/* ---- what a trainer adds: an objective over the rows of a window ---- */

/* documents packed into rows: those of an optimizer step, or some of an evaluation */
typedef struct demo_window {
    const demo_dataset *set;
    int64_t *which; /* (documents) places in the set, stb_ds array */
    seqpar_batch batch;
    int64_t units;
    /* token objectives: leaves and sums of the tokens this rank holds, stb_ds arrays */
    int64_t *leaf;
    double *value;
    seqpar_segments seen; /* unit objectives: columns of the units this rank answers for */
    /* of the whole window, taken before its rows: KTO's KL, DPO's chosen tokens a pair */
    double statistic;
    demo_kto_means means; /* the same of kto_pair */
    /* (documents) sums of the reference's log-probs, taken beforehand; NULL: it is asked in
       the step */
    const double *reference;
} demo_window;

struct demo_objective {
    const char *unit; /* what train_batch_size counts: "documents", "pairs" */
    /* what an evaluation's mean is over: "tokens", "pairs"; " nats" or "" behind it */
    const char *weight, *measure;
    int documents_per_unit, columns;
    int least_evaluated;              /* units that an evaluation needs */
    uint32_t kind;                    /* of the token files that it reads */
    const char *column[DEMO_COLUMNS]; /* of the log; the first is the loss */
    const char *evaluates;            /* what an evaluation is called, if not that */
    const char *round;                /* what progress counts, if not steps */
    /* options that a resumed run must repeat, beside those of all trainers; a comma list,
       NULL: none */
    const char *fixed;
    bool needs_model;   /* a model with random weights has nothing to teach it */
    bool generates;     /* texts alone: nothing is learnt, and there are no folders of a run */
    const char *frozen; /* what the model that does not learn is called; NULL: reference */
    /* after the policy is there; NULL: nothing */
    seqpar_status (*open)(demo_rank *r);
    void (*close)(demo_rank *r);
    /* a pass over all rows before the first; NULL: none */
    seqpar_status (*before)(demo_rank *r, demo_window *w);
    /* Fills a dataset from files, units being neighbours of documents_per_unit. 0, or -1
       with one sentence. */
    int (*load)(const demo_job *job, demo_dataset *set, const char *paths, int64_t max_samples,
                demo_error *error);
    /* What it keeps of them follows the units that become eval's: DEMO_PART. NULL: nothing. */
    void (*part)(demo_job *job, const uint8_t *held);
    /* What it keeps of them beside the documents goes into the digest; NULL: nothing. */
    uint64_t (*digest)(const demo_job *job, const demo_dataset *set, uint64_t digest);
    /* Rows first .. first + count of this rank, values into the window; micro >= 0: and
       gradients, of that micro-batch. */
    seqpar_status (*rows)(demo_rank *r, demo_window *w, int64_t first, int64_t count,
                          int64_t micro);
    /* Means over the window, the same on all ranks, and their weight. Collective over the
       world. */
    seqpar_status (*total)(demo_rank *r, demo_window *w, double *means, double *weight);
    /* after the final model is written into the folder; NULL: nothing to add */
    seqpar_status (*saved)(demo_rank *r, const char *folder);
    /* In the place of demo_job_begin's folders and checkpoints; what is said then. NULL: those. */
    int (*begin)(demo_job *job, demo_error *error);
    void (*say)(const demo_job *job);
    /* Where steps are not drawn from the documents in turn: */
    /* before data is read; NULL: nothing */
    int (*prepare)(demo_job *job, demo_error *error);
    void (*count)(demo_job *job);         /* sets total_steps and rounds */
    seqpar_status (*train)(demo_rank *r); /* the whole of it */
    /* with --dry_run: all that takes memory, once, as large as it may be */
    seqpar_status (*walk)(demo_rank *r);
    /* what a checkpoint holds beside the model, before that */
    seqpar_status (*save)(demo_rank *r, demo_state *state, const char *folder);
    seqpar_status (*load_state)(demo_rank *r, const demo_state *state);
    /* what a group of ranks is for; of a run in groups */
    void (*group_name)(const demo_job *job, int group, char text[64]);
    /* the folder (DEMO_PATH_LIMIT + 1) where a model begins that learns beside the trained one;
       false, or NULL: there is none */
    bool (*beside)(const demo_job *job, char *folder);
    /* which loss it is, where a program's definition was asked for; NULL: just its name */
    void (*loss_text)(const demo_job *job, char *text, size_t size);
};

/* ---- from options to a job ---- */

static int demo_pick(const char *text, const char *const *names, int count) {
    for (int i = 0; i < count; i++)
        if (text && !strcmp(text, names[i])) return i;
    return -1;
}

/* The same of the library's own tables. */
static int demo_pick_named(const char *text, const char *name(int), int count) {
    for (int i = 0; i < count; i++)
        if (text && !strcmp(text, name(i))) return i;
    return -1;
}

#include "settle.h"
#include "settled.h"
#include "lora.h"

static int demo_wants_bf16(const demo_config *c) {
    return c->param_dtype && !strcmp(c->param_dtype, "bf16");
}

/* A number of the environment; -1 where it is none, `unset` where there is nothing. */
static int64_t demo_environment(const char *name, int64_t unset) {
    const char *text = getenv(name);
    char *end;
    if (!text || !*text) return unset;
    int64_t value = strtoll(text, &end, 10);
    return *end ? -1 : value;
}

/* Where a launcher has started processes, they are the ranks: over MPI by mpirun, mpiexec and
   srun, over NCCL by torchrun or a loop in a shell. */
#ifdef DEMO_MPI
#define DEMO_PROCESSES_OVER "MPI"
#elif defined DEMO_NCCL
#define DEMO_PROCESSES_OVER "NCCL"
#else
#define DEMO_PROCESSES_OVER ""
#endif

/* How many processes the launcher says that it has started, and the variable that says so; 0:
   there is none. */
__attribute__((unused)) static int64_t demo_launched(const char **name) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
                                        "SLURM_STEP_NUM_TASKS"};
    for (int i = 0; i < 3; i++)
        if (demo_environment(names[i], 0) > 0) return demo_environment(*name = names[i], 0);
    return 0;
}

/* Which of its host's processes this one is, as any launcher says it: whose GPU it takes. */
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
/* srun has names of its own for what torchrun says; MASTER_ADDR it does not say. */
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
            "the environment's %s is %.40s, but this program was built without NCCL "
            "and MPI and each of the processes would train the whole world; type "
            "make cuda where nccl.h is and start build/cuda_train_*, or make mpi "
            "where mpicc is and start build/mpi_train_*, or unset %s",
            name, getenv(name), name);
    return 0;
}
#endif

/* As many processes as ranks. */
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
            "%lld processes were started, but the roles have %lld ranks "
            "(*_num_nodes x *_num_gpus_per_node); start as many processes as that, or "
            "one, and all ranks are its threads",
            (long long)processes, (long long)job->ranks);
    if (!job->groups && dp * c->ring_attn_size != processes)
        return demo_fail(
            error,
            "%lld processes were started, which is not data_parallel_size %lld x "
            "ring_attn_size %lld; start as many processes as that, or one, and all "
            "ranks are its threads",
            (long long)processes, (long long)(dp ? dp : 1), (long long)c->ring_attn_size);
    c->world_size = processes;
    return 0;
}

static void *demo_idle_thread(void *lock) {
    pthread_mutex_lock((pthread_mutex_t *)lock);
    pthread_mutex_unlock((pthread_mutex_t *)lock);
    return NULL;
}

/* Starts as many threads as the run will have, and lets them go: where a limit of memory or
   of threads forbids them, OpenMP and malloc would end the program later and less politely.
   Returns how many there were. */
static int64_t demo_threads_there(int64_t wanted) {
    pthread_t *threads = (pthread_t *)demo_room(wanted, sizeof *threads);
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
                         "%lld ranks of %lld threads (--omp_threads) are more than the %lld "
                         "threads one process takes; lower one of them",
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

/* Its ranks are said by the options of the first role that it has. */
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
                     "the group of the %s has %lld rank%s (%s), which ring_attn_size %lld does "
                     "not divide; give other numbers",
                     name, (long long)job->group_ranks[group],
                     demo_plural(job->group_ranks[group]), options,
                     (long long)job->config.ring_attn_size);
}

/* Ranks that do not come out: dp is what they would be divided by. */
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

/* Of a run in groups: data parallelism is the first one's. */
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
            "data_parallel_size %lld x ring_attn_size %lld are not the actor's %lld "
            "ranks (actor_num_nodes x actor_num_gpus_per_node); leave "
            "--data_parallel_size out",
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
            error, "--adam_offload is not for --optim adamw_8bit, whose moments stay where "
                   "they are; leave one of the two out");
    if (c->param_offload && c->zero_stage != 3)
        return demo_fail(
            error,
            "--param_offload is for weights at their owners alone, and zero_stage is "
            "%lld; add --zero_stage 3",
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
            "data_parallel_size %lld x ring_attn_size %lld%s are more ranks than one "
            "process takes, which is %lld; lower one of them",
            (long long)dp, (long long)c->ring_attn_size,
            job->groups ? " and those of the other roles (*_num_gpus_per_node)" : "",
            (long long)SEQPAR_MAX_RANKS);
    if (!c->omp_threads) {
        c->omp_threads = sysconf(_SC_NPROCESSORS_ONLN) / job->ranks;
        if (c->omp_threads < 1) c->omp_threads = 1;
    }
    return demo_job_threads(job, error);
}

/* What is needed at least: a model beyond the machine's memory would not fail when it is
   asked for, but be killed when it is used. */
static int demo_job_memory(const demo_job *job, demo_error *error) {
    const seqpar_llama_config *m = &job->model;
    double hidden = (double)m->hidden;
    double heads = (double)(2 * m->heads + 2 * m->kv_heads) * (double)m->head_dim;
    double layer = hidden * (heads + 3.0 * (double)m->intermediate);
    double values = (double)m->layers * layer +
                    (double)m->vocab * hidden * (m->tied ? 1.0 : 2.0);
    double ranks = job->processes ? 1.0 : (double)job->ranks;
    bool frozen = job->config.lora_rank || job->objective->generates;
    double needed = values * (frozen ? 4.0 : 4.0 * ranks + 12.0);
    double there = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    if (!strcmp(job->config.device, "cuda") || job->config.dry_run || needed < there) return 0;
    return demo_fail(error,
                     "the model (%lld layers, hidden %lld, intermediate %lld, %lld heads of "
                     "%lld, vocab %lld) has %.3g parameters; weights of %.0f ranks, gradients "
                     "and moments take at least %.3g GB, this machine has %.3g; take a smaller "
                     "model or fewer ranks",
                     (long long)m->layers, (long long)m->hidden, (long long)m->intermediate,
                     (long long)m->heads, (long long)m->head_dim, (long long)m->vocab, values,
                     ranks, needed / 1e9, there / 1e9);
}

#include "prepare_command.h"

/* In what the model's texts end, where its config says another end than a text of bytes has;
   NULL: it does not. */
__attribute__((unused)) static const int64_t *demo_other_end(const demo_job *job) {
    static int64_t end;
    const char *folder = job->config.pretrain;
    return folder && demo_config_ends_otherwise(folder, DEMO_EOS, &end) ? &end : NULL;
}

/* NULL where the user has not named it, so that the reader may see what the records are. */
__attribute__((unused)) static const char *demo_named_key(const demo_job *job,
                                                          const char *option, const char *key) {
    return job->parsed && !demo_options_given(job->parsed, option) ? NULL : key;
}

/* Options that name further models; a comma list where the trainer takes one. */
static const char *const demo_other_models[] = {"ref_pretrain", "reward_pretrain",
                                                "critic_pretrain", "teacher_model"};
enum { DEMO_OTHER_MODELS = 4 };

/* A fresh model has a row for every word of the tokenizer its data was made with. */
static int64_t demo_fresh_vocab(const demo_config *c) {
    demo_token_head head;
    int file = demo_is_token_file(c->dataset) ? open(c->dataset, O_RDONLY | O_CLOEXEC) : -1;
    bool whole = file >= 0 && read(file, &head, sizeof head) == (ssize_t)sizeof head;
    if (file >= 0) close(file);
    return whole && head.words > 0 ? head.words : DEMO_VOCAB;
}

/* Also the heads of the models beside the one that is trained. */
static int demo_strides_divide(const demo_job *job, demo_error *error) {
    char one[DEMO_PATH_LIMIT + 1];
    const demo_config *c = &job->config;
    if (c->pretrain && demo_stride_divides(job, "pretrain", c->pretrain, &job->model, error))
        return -1;
    for (int i = 0; i < DEMO_OTHER_MODELS; i++)
        for (const char *at =
                 demo_option_path(job->bindings, job->binding_count, demo_other_models[i]);
             at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
            seqpar_llama_config model = job->model;
            seqpar_error why = {0};
            snprintf(one, sizeof one, "%.*s", (int)strcspn(at, ","), at);
            if (!demo_load_config(one, &model, &why) &&
                demo_stride_divides(job, demo_other_models[i], one, &model, error))
                return -1;
        }
    return 0;
}

static int demo_job_model(demo_job *job, demo_error *error) {
    demo_config *c = &job->config;
    seqpar_error why = {0};
    job->model = (seqpar_llama_config){
        c->num_hidden_layers,
        c->hidden_size,
        c->num_attention_heads,
        c->num_key_value_heads,
        c->head_dim ? c->head_dim : c->hidden_size / c->num_attention_heads,
        c->intermediate_size ? c->intermediate_size : 3 * c->hidden_size,
        demo_fresh_vocab(c),
        c->rope_theta,
        1e-5,
        c->tie_word_embeddings};
    if (c->pretrain && demo_load_config(c->pretrain, &job->model, &why)) {
        demo_fail(error, "%s", why.text);
        return -1;
    }
    if (!c->pretrain && job->model.head_dim < 1)
        return demo_fail(error,
                         "hidden_size %lld is less than num_attention_heads %lld, so that a "
                         "head has no dimension; lower the heads, or give --head_dim",
                         (long long)c->hidden_size, (long long)c->num_attention_heads);
    if (job->score) job->model.score = *job->score;
    job->untaught = demo_definition_of(job)->padding
                        ? demo_untaught(c->pretrain, job->model.vocab)
                        : 0;
    return demo_strides_divide(job, error) || demo_job_memory(job, error) ? -1 : 0;
}

/* A unit that no row can hold would be missing from its step. */
static int demo_units_fit(const demo_job *job, const demo_dataset *set, const char *paths,
                          demo_error *error) {
    int64_t per_unit = job->objective->documents_per_unit;
    for (int64_t i = 0; i + per_unit <= arrlen(set->documents); i += per_unit) {
        int64_t tokens = 0;
        for (int64_t k = 0; k < per_unit; k++) tokens += set->documents[i + k].tokens;
        if (tokens <= job->config.pack_len) continue;
        demo_fail(error,
                  "%s: number %lld of the %s kept has %lld tokens, a row holds pack_len %lld; "
                  "raise --pack_len to %lld or lower --max_len",
                  paths, (long long)(i / per_unit + 1), job->objective->unit, (long long)tokens,
                  (long long)job->config.pack_len, (long long)(per_unit * job->config.max_len));
        return -1;
    }
    return 0;
}

/* Ids of two tokenizers are not for one model. */
static int demo_sets_agree(const demo_job *job, const demo_dataset *other, const char *path,
                           demo_error *error) {
    const demo_token_file *a = job->train.file, *b = other->file;
    if (!arrlen(other->documents) || (!a && !b)) return 0;
    if (a && b && demo_same_tokenizer(demo_token_fingerprint(a), demo_token_fingerprint(b)))
        return 0;
    return demo_fail(
        error,
        "%.1000s and %.1000s are not tokens of one tokenizer; make a token file of "
        "each by demos/prepare.py with the same --pretrain",
        job->config.dataset, path);
}

/* Models that read the same ids: one with another tokenizer would read another text. */
static int demo_folders_agree(const demo_job *job, demo_error *error) {
    demo_fingerprint there;
    char one[DEMO_PATH_LIMIT + 1];
    for (int i = 0; job->train.file && i < DEMO_OTHER_MODELS; i++)
        for (const char *at =
                 demo_option_path(job->bindings, job->binding_count, demo_other_models[i]);
             at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
            snprintf(one, sizeof one, "%.*s", (int)strcspn(at, ","), at);
            if (demo_folder_fingerprint(one, &there) &&
                !demo_same_tokenizer(there, demo_token_fingerprint(job->train.file)))
                return demo_fail(
                    error,
                    "--%s %.1000s has another tokenizer.json than the one that "
                    "%.1000s was made with; take a model of the same tokenizer, or "
                    "copy the file if it is only written otherwise",
                    demo_other_models[i], one, job->config.dataset);
        }
    return 0;
}

/* Does something learn from each of its documents? What is said to a prompt is not there
   yet. */
static bool demo_unit_usable(const demo_job *job, const demo_dataset *set, int64_t unit) {
    int64_t per_unit = job->objective->documents_per_unit;
    if (set->file && set->file->head->kind == DEMO_TOKENS_PROMPTS) return true;
    for (int64_t k = 0; k < per_unit; k++)
        if (!demo_supervised(&set->documents[unit * per_unit + k])) return false;
    return true;
}

/* ---- evaluation on a part of the training data (holdout.h) ---- */

static int64_t demo_units(const demo_job *job, const demo_dataset *set) {
    return arrlen(set->documents) / job->objective->documents_per_unit;
}

/* A pair that prefers nothing: its accuracy would be that of roundings. */
static bool demo_unit_idle(const demo_job *job, int64_t unit) {
    const demo_document *d = job->train.documents + 2 * unit;
    return job->objective->documents_per_unit == 2 && demo_same_document(d, d + 1);
}

/* The units that are evaluated; idle ones among them are not, and are trained on. */
static void demo_part_documents(demo_job *job, uint8_t *held) {
    int64_t idle = 0;
    for (int64_t i = 0; i < job->eval_of; i++)
        if (held[i] && demo_unit_idle(job, i)) held[i] = 0, idle++;
    if (idle && !job->rank)
        fprintf(stderr,
                "notice: %lld of the pairs drawn for the evaluation are twice the same "
                "document, of which neither is preferred; they are trained on in its place\n",
                (long long)idle);
    job->eval.lent = job->eval_trained || job->train.file;
    DEMO_PART(job->eval.documents, job->train.documents, job->objective->documents_per_unit,
              held, job->eval_trained);
    if (job->objective->part) job->objective->part(job, held);
}

static bool demo_any_usable(const demo_job *job, const demo_dataset *set) {
    for (int64_t i = 0; i < demo_units(job, set); i++)
        if (demo_unit_usable(job, set, i)) return true;
    return false;
}

/* Both parts must have something to say, and KTO's evaluation two responses. */
static int demo_parts_wrong(const demo_job *job, const char *option, demo_error *error) {
    const char *unit = job->objective->unit;
    int64_t evaluated = demo_units(job, &job->eval), least = job->objective->least_evaluated;
    if (!demo_any_usable(job, &job->train))
        return demo_fail(error,
                         "--%s %g: none of the %lld %s that are left to train on has a target; "
                         "give a smaller one, or another --seed",
                         option, job->config.val_size, (long long)demo_units(job, &job->train),
                         unit);
    if (!demo_any_usable(job, &job->eval))
        return demo_fail(error,
                         "--%s %g: none of the %lld %s to evaluate on has a target; give a "
                         "larger one, or another --seed",
                         option, job->config.val_size, (long long)evaluated, unit);
    if (evaluated < least)
        return demo_fail(error,
                         "--%s %g: an evaluation of 1 document has no other response to pair "
                         "its prompt with, as the KL term needs; give 2 or more",
                         option, job->config.val_size);
    return 0;
}

/* Takes val_size of the training units. */
static int demo_hold_out(demo_job *job, demo_error *error) {
    const char *option = demo_job_spelled(job, "val_size");
    int64_t units = demo_units(job, &job->train);
    int64_t wanted = demo_held_count(job->config.val_size, units);
    if (wanted >= units)
        return demo_fail(error,
                         "--%s %g asks for %lld of %lld %s, which leaves none to train on; "
                         "give a smaller one, or --eval_dataset",
                         option, job->config.val_size, (long long)wanted, (long long)units,
                         job->objective->unit);
    uint8_t *held = (uint8_t *)demo_room(units + 1, sizeof *held);
    demo_held_mark(held, units, wanted, (uint64_t)job->config.seed,
                   demo_job_from(job, "val_size") == DEMO_FROM_AXOLOTL);
    job->eval_of = units;
    demo_part_documents(job, held);
    free(held);
    return demo_parts_wrong(job, option, error);
}

/* A reward model's scores are measured on the first pairs of the training data where it has no
   other evaluation: OpenRLHF's one in a hundred; elsewhere, and where that is none, at least
   DEMO_SCORED. */
enum { DEMO_SCORED = 100 };

static void demo_score_trained(demo_job *job) {
    int64_t units = demo_units(job, &job->train), wanted = units / 100;
    bool origin = demo_job_from(job, "eval_dataset") == DEMO_FROM_OPENRLHF;
    if (wanted < DEMO_SCORED && (!origin || !wanted)) wanted = DEMO_SCORED;
    uint8_t *held = (uint8_t *)demo_room(units + 1, sizeof *held);
    for (int64_t i = 0; i < units && wanted; i++)
        if (!demo_unit_idle(job, i)) held[i] = 1, wanted--;
    job->eval_of = units;
    demo_part_documents(job, held);
    free(held);
}

static int demo_job_part(demo_job *job, demo_error *error) {
    if (job->config.val_size > 0) return demo_hold_out(job, error);
    if (job->eval_trained) demo_score_trained(job);
    return 0;
}

/* A packed row has sequence_len tokens in axolotl, cutoff_len in LLaMA-Factory; in OpenRLHF as
   many as the documents of a micro-batch. */
static int64_t demo_row_tokens(const demo_job *job, int64_t longest) {
    int from = demo_job_from(job, "packing_samples");
    bool fixed = from == DEMO_FROM_AXOLOTL || from == DEMO_FROM_LLAMAFACTORY;
    return job->config.packing_samples && longest < 2048 && !fixed ? 2048 : longest;
}

static int demo_job_data(demo_job *job, demo_error *error) {
    demo_config *c = &job->config;
    const demo_objective *o = job->objective;
    if (!c->dataset) {
        demo_fail(error, "no training data; give --dataset FILE (.jsonl or .txt)");
        return -1;
    }
    int64_t longest = o->documents_per_unit * c->max_len; /* a unit never leaves its row */
    if (longest > SEQPAR_MAX_TOKENS)
        return demo_fail(error,
                         "max_len %lld is too long: one of the %s may have %lld tokens, a row "
                         "at most %lld; lower --max_len",
                         (long long)c->max_len, o->unit, (long long)longest,
                         (long long)SEQPAR_MAX_TOKENS);
    if (c->gradient_accumulation_steps > c->train_batch_size)
        return demo_fail(error,
                         "gradient_accumulation_steps %lld is more than train_batch_size %lld, "
                         "so micro-batches would be empty; lower it",
                         (long long)c->gradient_accumulation_steps,
                         (long long)c->train_batch_size);
    if (!c->pack_len) c->pack_len = demo_row_tokens(job, longest);
    if (c->pack_len < c->max_len) {
        demo_fail(error,
                  "pack_len %lld is shorter than max_len %lld; a document never leaves its row",
                  (long long)c->pack_len, (long long)c->max_len);
        return -1;
    }
    if (o->load(job, &job->train, c->dataset, c->max_samples, error)) return -1;
    if (c->eval_dataset && o->load(job, &job->eval, c->eval_dataset, 0, error)) return -1;
    if (demo_settled_agrees(job, &job->train, c->dataset, error) ||
        demo_settled_agrees(job, &job->eval, c->eval_dataset, error) ||
        demo_sets_agree(job, &job->eval, c->eval_dataset, error) ||
        demo_folders_agree(job, error) || demo_units_fit(job, &job->train, c->dataset, error) ||
        demo_units_fit(job, &job->eval, c->eval_dataset, error) || demo_job_part(job, error))
        return -1;
    int64_t units = demo_units(job, &job->train);
    job->usable = (int64_t *)demo_room(units + 1, sizeof *job->usable);
    for (int64_t i = 0; i < units; i++)
        if (demo_unit_usable(job, &job->train, i)) job->usable[job->usable_count++] = i;
    return 0;
}

/* Steps: floor(documents / train_batch_size) an epoch, at least one; the rest of an epoch is
   left out. */
static void demo_job_steps(demo_job *job) {
    demo_config *c = &job->config;
    job->asked_batch = demo_job_given(job, "train_batch_size") ? c->train_batch_size : 0;
    if (job->objective->count)
        job->objective->count(job);
    else {
        if (c->train_batch_size > job->usable_count) c->train_batch_size = job->usable_count;
        int64_t per_epoch = job->usable_count / c->train_batch_size;
        job->epoch_units = c->train_batch_size;
        job->round_steps = 1;
        job->rounds = job->last_step = job->total_steps =
            c->max_steps >= 0 ? c->max_steps : (int64_t)ceil(c->max_epochs * (double)per_epoch);
        demo_settle_often(job, job->rounds);
        job->eval_every = demo_eval_every(job, per_epoch);
    }
    job->warmup = c->warmup_steps >= 0
                      ? c->warmup_steps
                      : (int64_t)ceil(c->lr_warmup_ratio * (double)job->total_steps);
    job->lr_kind = demo_lr_kind(c->lr_scheduler);
}

/* The objective's own options. */
static int demo_job_prepare(demo_job *job, demo_error *error) {
    return job->objective->prepare ? job->objective->prepare(job, error) : 0;
}

/* A sentence for each that is wrong. */
static int demo_settle_all(demo_job *job, int (*const *settle)(demo_job *, demo_error *),
                           int count, demo_error *error) {
    int wrong = 0;
    for (int i = 0; i < count; i++) {
        demo_error one = {""};
        if (settle[i](job, &one)) wrong = demo_fail_too(error, &one);
    }
    return wrong;
}

/* All that is known before data is read: a sentence for each thing that is wrong. */
static int demo_job_settle(demo_job *job, demo_error *error) {
    typedef int (*const settle)(demo_job *, demo_error *);
    settle alone[] = {demo_settle_types,      demo_settle_rates,  demo_settle_schedule,
                      demo_settle_evaluation, demo_settle_output, demo_settle_lora,
                      demo_settle_activations};
    settle needed[] = {demo_job_prepare, demo_pick_attention, demo_job_world};
    settle last[] = {demo_settle_batch, demo_job_model, demo_settle_targets};
    int lost = 0;
    error->text[0] = 0;
    demo_settle_definition(job);
    demo_settle_truncation(job);
    for (int i = 0; i < 3 && !lost; i++) lost = demo_settle_all(job, &needed[i], 1, error);
    int wrong = demo_settle_all(job, alone, 7, error);
    if (!lost && demo_settle_all(job, last, 3, error)) wrong = -1;
    return wrong || lost ? -1 : 0;
}

/* Fills the job from parsed options. Returns 0, or -1 with one sentence. */
static int demo_job_open(demo_job *job, demo_error *error) {
    job->run.from = DEMO_NOTHING_SAVED; /* until demo_job_begin has looked */
    if (demo_job_settle(job, error) || demo_job_data(job, error)) return -1;
    demo_job_steps(job);
    return 0;
}

/* Of all that is read of a set, in its order. */
static uint64_t demo_job_digest(const demo_job *job, const demo_dataset *set) {
    uint64_t digest = demo_digest_documents(set);
    return job->objective->digest ? job->objective->digest(job, set, digest) : digest;
}

/* Digests of the options and of the data, for demo_ranks_agree. Threads never change a bit. */
static void demo_job_tell(demo_job *job, const demo_binding *bindings, int count) {
    /* by type; texts have their own length */
    static const int64_t bytes[] = {sizeof(bool), 8, sizeof(double), 0, 2 * sizeof(double)};
    for (int i = 0; i < count; i++) {
        const char *text = bindings[i].type == DEMO_STRING
                               ? *(const char *const *)bindings[i].variable
                               : NULL;
        uint64_t digest = demo_digest(DEMO_DIGEST_EMPTY, text ? text : bindings[i].variable,
                                      text ? (int64_t)strlen(text) + 1
                                           : bytes[bindings[i].type]);
        if (strcmp(bindings[i].name, "omp_threads"))
            arrput(job->told, ((demo_told){"--", bindings[i].name, (int64_t)digest}));
    }
    arrput(job->told, ((demo_told){"", "the training data", (int64_t)job->data}));
    arrput(job->told,
           ((demo_told){"", "the evaluation data", (int64_t)demo_job_digest(job, &job->eval)}));
    arrput(job->told, ((demo_told){"", "the checkpoint in ckpt_path", job->run.from}));
    int64_t size;
    uint32_t program = 0; /* where it cannot be read, nobody knows */
    if (job->processes > 1) demo_file_sum("/proc/self/exe", &size, &program);
    arrput(job->told, ((demo_told){"", "the program", (int64_t)program}));
}
#endif
