/* SPDX-License-Identifier: MIT OR Unlicense */
/* job.h - a training job: the model, the data and the ranks. It is filled from options and
 * checked; errors are reported before any rank starts. Also the state of a rank, and the
 * interface of an objective. */
#ifndef DEMO_JOB_H
#define DEMO_JOB_H

#include <pthread.h>
#include "trainer/model/average.h"
#include "config.h"
#include "trainer/data/data.h"
#include "trainer/objective/definitions.h"
#include "trainer/model/backward.h"
#include "trainer/data/holdout.h"
#include "trainer/log/logs.h"
#include "trainer/model/peft.h"
#include "trainer/log/progress.h"
#include "run.h"
#ifdef DEMO_NCCL /* ranks can be processes with a GPU each (make cuda) */
#define SEQPAR_NCCL_IMPLEMENTATION
#include "seqpar_nccl.h"
#endif
#ifdef DEMO_MPI /* ranks can be processes (make mpi) */
#define SEQPAR_MPI_IMPLEMENTATION
#include "seqpar_mpi.h"
#endif

enum { DEMO_GROUPS = 5 };
enum { DEMO_COLUMNS = 8 }; /* limit of numbers that an objective reports */
enum { DEMO_REFERENCE, DEMO_REFERENCE_OLD /* as in 0.2.0 */, DEMO_REFERENCES };
typedef struct demo_objective demo_objective;
typedef struct {
    const char *dashes, *name;
    int64_t digest;
} demo_told;

typedef struct {
    demo_config config;
    const demo_binding *bindings; /* options of the trainer */
    int binding_count;
    /* which options were typed, and how; NULL: no command line was read */
    const demo_options *parsed;
    /* digests that must be equal on all ranks (demo_ranks_agree); stb_ds array */
    demo_told *told;
    const demo_objective *objective;
    void *options;      /* of the objective */
    const char **score; /* the option with the name of the score head; NULL: a language model */
    demo_dataset train, eval;
    /* eval_trained: eval is a copy of some training data (reward models). eval_scores: eval is
       used only at the end, for mean and standard deviation of the scores */
    bool eval_trained, eval_scores;
    int64_t eval_of; /* number of units that eval was drawn from; 0: eval has separate data */
    int64_t *usable; /* training units in which every document has a target, in file order */
    /* rounds: what the progress line counts, steps or rollouts */
    int64_t usable_count, total_steps, rounds, warmup;
    /* epoch_units, round_steps: units and steps of a round. eval_every: rounds between
       evaluations; 0: only at the end. asked_batch: train_batch_size as typed; 0: not typed */
    int64_t epoch_units, round_steps, eval_every, asked_batch;
    /* training ends after this step: total_steps, or the last step of the last rollout */
    int64_t last_step;
    demo_run run;
    demo_logs_desc logs;
    uint64_t data;    /* digest of the training data */
    demo_note *notes; /* metadata for checkpoints; stb_ds array */
    seqpar_llama_config model;
    seqpar_adapter_desc adapter; /* adapter.rank 0: no LoRA, all weights are trained */
    /* target modules, if adapters are loaded from a folder */
    char adapter_targets[DEMO_LORA_TEXT];
    int64_t untaught; /* as in seqpar_llama_batch_desc */
    int layout, schedule, lr_kind;
    double temperature; /* of log-probs; 0: 1 */
    /* rows of a micro-batch in forward-only passes; 0: micro_train_batch_size */
    int64_t micro_values;
    int64_t dp;
    /* ranks: number of all ranks. group_ranks: number in each group; a group has its own
       communicator (roles.h). groups 0: all ranks form one group */
    int64_t ranks, group_ranks[DEMO_GROUPS];
    int groups;
    /* processes: number of ranks that a launcher started as processes; 0: all ranks are threads
       of this process. rank: the rank of this process */
    int64_t processes, rank;
    /* communicator of the processes, if it is opened at the start (MPI); else NULL */
    seqpar_comm *world;
    seqpar_error world_error;
#ifdef DEMO_NCCL
    seqpar_nccl_desc nccl; /* zeros: rank and size are taken from the environment */
#endif
    demo_shared *shared; /* set while the job runs */
} demo_job;

typedef struct { /* the state of one rank */
    const demo_job *job;
    /* communicator of all ranks; ctx uses own_world if it is set, else this one */
    seqpar_comm *world;
    /* communicator of the rank's group; NULL: there is only one group */
    seqpar_comm *own_world;
    int group;
    seqpar_ctx ctx;
    seqpar_device *device;
    seqpar_llama model;    /* open in the first group and in the generators' group */
    seqpar_llama adapters; /* adapters of the model, if adapters are trained */
    seqpar_llama *critic;  /* critic of PPO; NULL: none */
    bool saves_critic;
    const char *critic_source; /* folder of its initial weights; NULL: none */
    seqpar_optim optim;
    demo_average average; /* moving average of the weights, if enabled */
    demo_async async;     /* a checkpoint written in the background */
    demo_state saving;    /* state of the last checkpoint */
    demo_sum *sums;       /* stb_ds array: checksums of the shards of that checkpoint */
    int64_t step, saved;  /* steps done; steps done at the last checkpoint */
    int stopped;          /* training stopped early, by a signal or by `trouble` */
    /* digests of the frozen model, on rank 0; 0: none */
    uint64_t reference[DEMO_REFERENCES];
    uint64_t base;         /* digest of the model whose adapters are trained */
    char run[DEMO_RUN_ID]; /* id of the run, the same on all ranks */
    demo_progress progress;
    demo_logs logs;         /* on rank 0 only */
    double *losses, *steps; /* stb_ds arrays, on rank 0: since this process started */
    double norm_last, eval_means[DEMO_COLUMNS], seconds;
    int64_t tokens;
    /* (usable units) shuffled order of epoch order_epoch; NULL: none yet */
    int64_t *order, order_epoch;
    /* rank 0: a failure that is not part of training, such as that of a log. Training stops, a
       checkpoint is written, and the run ends with this error */
    seqpar_error trouble;
    demo_experts experts;
    void *own; /* of the objective */
} demo_rank;

/* ---- what a trainer implements: an objective over the rows of a window ---- */

/* documents packed into rows: the documents of an optimizer step, or some documents of an
   evaluation */
typedef struct demo_window {
    const demo_dataset *set;
    int64_t *which; /* (documents) indices into the set, stb_ds array */
    seqpar_batch batch;
    int64_t units;
    /* token objectives: leaves and sums of the tokens on this rank, stb_ds arrays */
    int64_t *leaf;
    double *value;
    seqpar_segments seen; /* unit objectives: columns of the units that this rank reports */
    /* computed over the whole window before its first rows: KTO's KL term, or DPO's mean number
       of chosen tokens per pair */
    double statistic;
    demo_kto_means means; /* for kto_pair, also computed before the first rows */
    /* (documents) sums of the reference's log-probs, if they were computed before training;
       NULL: the reference runs in every step */
    const double *reference;
} demo_window;

struct demo_objective {
    const char *unit; /* unit: what train_batch_size counts, such as "documents" or "pairs" */
    /* weight: what an evaluation averages over, "tokens" or "pairs". measure: unit of the mean,
       " nats" or "" */
    const char *weight, *measure;
    int documents_per_unit, columns;
    int least_evaluated;              /* smallest number of units of an evaluation */
    uint32_t kind;                    /* kind of the token files that it reads */
    const char *column[DEMO_COLUMNS]; /* columns of the log; the first is the loss */
    const char *evaluates;            /* name of the mean of an evaluation; NULL: column[0] */
    const char *round;                /* what the progress line counts; NULL: steps */
    /* further options whose value a resumed run must not change; comma list, NULL: none */
    const char *fixed;
    /* print a notice if training starts from random weights, which is useless here */
    bool needs_model;
    bool generates;     /* generates texts without training and without checkpoints */
    const char *frozen; /* name of the frozen model in messages; NULL: reference */
    /* Called after the trained model is opened; NULL: nothing to do. */
    seqpar_status (*open)(demo_rank *r);
    void (*close)(demo_rank *r);
    /* Called before the first rows of a window, for values that need the whole window; NULL:
       nothing to do. */
    seqpar_status (*before)(demo_rank *r, demo_window *w);
    /* Fills a dataset from files. A unit is documents_per_unit consecutive documents. Returns
       0, or -1 with a message. */
    int (*load)(const demo_job *job, demo_dataset *set, const char *paths, int64_t max_samples,
                demo_error *error);
    /* Moves data that the objective keeps for each unit, such as margins, from the training to
       the evaluation data for held-out units, as demo_part_documents does with documents. NULL:
       there is no such data. */
    void (*part)(demo_job *job, const uint8_t *held);
    /* Adds data that the objective keeps outside of the documents to the digest of a dataset;
       NULL: there is none. */
    uint64_t (*digest)(const demo_job *job, const demo_dataset *set, uint64_t digest);
    /* Computes rows first .. first + count - 1 of this rank and adds their values to the
       window. micro >= 0: also computes the gradients, as those of that micro-batch. */
    seqpar_status (*rows)(demo_rank *r, demo_window *w, int64_t first, int64_t count,
                          int64_t micro);
    /* Means over the window, the same on all ranks, and their weight. Collective over the
       world. */
    seqpar_status (*total)(demo_rank *r, demo_window *w, double *means, double *weight);
    /* Called after the final model is written into the folder; NULL: nothing to add. */
    seqpar_status (*saved)(demo_rank *r, const char *folder);
    /* begin replaces demo_job_begin, which makes folders and finds checkpoints. say replaces
       the last lines of demo_job_say. NULL: no replacement. */
    int (*begin)(demo_job *job, demo_error *error);
    void (*say)(const demo_job *job);
    /* Called before data is read; NULL: nothing to do. */
    int (*prepare)(demo_job *job, demo_error *error);
    /* sets total_steps and rounds; NULL: computed from the documents */
    void (*count)(demo_job *job);
    seqpar_status (*train)(demo_rank *r); /* replaces demo_train; NULL: no replacement */
    /* For --dry_run: performs every operation that takes memory once, at its largest size. */
    seqpar_status (*walk)(demo_rank *r);
    /* Saves the part of a checkpoint that the objective adds. Called before the model is
       saved. */
    seqpar_status (*save)(demo_rank *r, demo_state *state, const char *folder);
    seqpar_status (*load_state)(demo_rank *r, const demo_state *state);
    /* Writes the names of the roles of a group; required if ranks are in several groups. */
    void (*group_name)(const demo_job *job, int group, char text[64]);
    /* Writes the folder (DEMO_PATH_LIMIT + 1) that a second trained model, the critic of PPO,
       starts from. False, or a NULL function: there is no second model. */
    bool (*beside)(const demo_job *job, char *folder);
    /* Describes the loss if the definition of another program is used; NULL: the trainer's name
       is used. */
    void (*loss_text)(const demo_job *job, char *text, size_t size);
};

/* ---- from options to a job ---- */

static int demo_pick(const char *text, const char *const *names, int count) {
    for (int i = 0; i < count; i++)
        if (text && !strcmp(text, names[i])) return i;
    return -1;
}

/* Like demo_pick, for names that a function of the library returns. */
static int demo_pick_named(const char *text, const char *name(int), int count) {
    for (int i = 0; i < count; i++)
        if (text && !strcmp(text, name(i))) return i;
    return -1;
}

static int demo_wants_bf16(const demo_config *c) {
    return c->param_dtype && !strcmp(c->param_dtype, "bf16");
}
#endif
