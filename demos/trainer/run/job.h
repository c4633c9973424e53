/* SPDX-License-Identifier: MIT OR Unlicense */
/* job.h - a training job: the model, the data and the ranks. It is filled from options and
 * checked; what is wrong is refused with one sentence before any rank starts. Also the state of
 * a rank, and what an objective consists of. */
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
enum { DEMO_REFERENCE, DEMO_REFERENCE_OLD /* as in 0.2.0 */, DEMO_REFERENCES };
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
    demo_told *told;            /* digests that must be equal on all ranks; stb_ds array */
    const demo_objective *objective;
    void *options;      /* of the objective */
    const char **score; /* the option that names the score head; NULL: a language model */
    demo_dataset train, eval;
    /* eval_trained: eval is a part of the training data (reward models). eval_scores: it is
       evaluated only at the end, for mean and deviation of the scores */
    bool eval_trained, eval_scores;
    int64_t eval_of; /* units that eval was drawn from; 0: it has data of its own */
    int64_t *usable; /* training units whose documents all have a target, in file order */
    int64_t usable_count, total_steps, rounds, warmup; /* rounds: what progress counts */
    /* epoch_units, round_steps: units and steps of a round. eval_every: rounds between
       evaluations; 0: only at the end. asked_batch: train_batch_size as typed; 0: it was not */
    int64_t epoch_units, round_steps, eval_every, asked_batch;
    /* the step after which training ends: total_steps, or the last step of the last rollout */
    int64_t last_step;
    demo_run run;
    demo_logs_desc logs;
    uint64_t data;    /* digest of the training data */
    demo_note *notes; /* for checkpoints; stb_ds array */
    seqpar_llama_config model;
    seqpar_adapter_desc adapter;          /* adapter.rank 0: no LoRA, all weights are trained */
    char adapter_targets[DEMO_LORA_TEXT]; /* names, if the adapters begin from a folder */
    int64_t untaught;                     /* as in seqpar_llama_batch_desc */
    int layout, schedule, lr_kind;
    double temperature; /* of log-probs; 0: 1 */
    /* rows of a micro-batch in passes without gradients; 0: micro_train_batch_size */
    int64_t micro_values;
    int64_t dp;
    /* ranks in all, and those of each group. A group has its own world (roles.h); groups 0: all
       ranks are one group */
    int64_t ranks, group_ranks[DEMO_GROUPS];
    int groups;
    /* processes: ranks that were started as processes; rank: this one's. processes 0: all ranks
       are threads of this process */
    int64_t processes, rank;
    seqpar_comm *world; /* of the processes, if it is opened at the start (MPI); else NULL */
    seqpar_error world_error;
#ifdef DEMO_NCCL
    seqpar_nccl_desc nccl; /* zeros: rank and size are the environment's */
#endif
    demo_shared *shared; /* while it runs */
} demo_job;

typedef struct { /* the state of one rank */
    const demo_job *job;
    seqpar_comm *world;     /* of all ranks; ctx uses own_world if it is set, else this one */
    seqpar_comm *own_world; /* of the rank's group; NULL: there is one group */
    int group;
    seqpar_ctx ctx;
    seqpar_device *device;
    seqpar_llama model;    /* in the first group, and in the generators' */
    seqpar_llama adapters; /* of the model, if adapters are trained */
    seqpar_llama *critic;  /* PPO's, if it has one */
    bool saves_critic;
    const char *critic_source; /* the folder that it began with; NULL: none */
    seqpar_optim optim;
    demo_average average; /* of the weights, if one is kept */
    demo_async async;     /* a checkpoint written in the background */
    demo_state saving;    /* the state of the last checkpoint */
    demo_sum *sums;       /* stb_ds array: checksums of its shards */
    int64_t step, saved;  /* steps done; at the last checkpoint */
    int stopped;          /* before the end, by a signal or by `trouble` */
    /* digests of the frozen model, on rank 0; 0: there is none */
    uint64_t reference[DEMO_REFERENCES];
    uint64_t base;         /* digest of the model whose adapters are trained */
    char run[DEMO_RUN_ID]; /* the run's name, the same on all ranks */
    demo_progress progress;
    demo_logs logs;         /* rank 0 */
    double *losses, *steps; /* stb_ds arrays, rank 0: since this process began */
    double norm_last, eval_means[DEMO_COLUMNS], seconds;
    int64_t tokens;
    int64_t *order, order_epoch; /* (usable units) order_epoch's shuffle; NULL: none yet */
    /* rank 0: a failure outside of training, such as a log. Training stops, a checkpoint is
       written, and the run ends with this error */
    seqpar_error trouble;
    demo_experts experts;
    void *own; /* of the objective */
} demo_rank;

/* ---- what a trainer adds: an objective over the rows of a window ---- */

/* documents packed into rows: those of an optimizer step, or some of an evaluation */
typedef struct demo_window {
    const demo_dataset *set;
    int64_t *which; /* (documents) indices into the set, stb_ds array */
    seqpar_batch batch;
    int64_t units;
    /* token objectives: leaves and sums of the tokens this rank holds, stb_ds arrays */
    int64_t *leaf;
    double *value;
    seqpar_segments seen; /* unit objectives: columns of the units that this rank reports */
    /* computed over the whole window, before its rows: KTO's KL, or DPO's mean number of chosen
       tokens per pair */
    double statistic;
    demo_kto_means means; /* for kto_pair, also computed before the rows */
    /* (documents) sums of the reference's log-probs, computed before training; NULL: the
       reference runs in the step */
    const double *reference;
} demo_window;

struct demo_objective {
    const char *unit; /* what train_batch_size counts: "documents", "pairs" */
    /* what an evaluation's mean is over: "tokens", "pairs"; the mean's unit: " nats", "" */
    const char *weight, *measure;
    int documents_per_unit, columns;
    int least_evaluated;              /* fewest units that an evaluation needs */
    uint32_t kind;                    /* of the token files that it reads */
    const char *column[DEMO_COLUMNS]; /* of the log; the first is the loss */
    const char *evaluates;            /* name of an evaluation's mean; NULL: column[0] */
    const char *round;                /* what progress counts, if not steps */
    /* options that a resumed run must repeat, beside those of all trainers; a comma list,
       NULL: none */
    const char *fixed;
    bool needs_model;   /* training from random weights is pointless: print a notice */
    bool generates;     /* only generates texts: no training, no checkpoints */
    const char *frozen; /* name of the frozen model; NULL: reference */
    /* called when the trained model is open; NULL: nothing */
    seqpar_status (*open)(demo_rank *r);
    void (*close)(demo_rank *r);
    /* called before a window's first rows, for what needs all of them; NULL: nothing */
    seqpar_status (*before)(demo_rank *r, demo_window *w);
    /* Fills a dataset from files. A unit is documents_per_unit consecutive documents. 0, or -1
       with one sentence. */
    int (*load)(const demo_job *job, demo_dataset *set, const char *paths, int64_t max_samples,
                demo_error *error);
    /* Moves the objective's own data of held-out units from the training data to the
       evaluation data, as demo_part_documents does with documents. NULL: it has none. */
    void (*part)(demo_job *job, const uint8_t *held);
    /* Adds the objective's own data, beside the documents, to the digest; NULL: it has none. */
    uint64_t (*digest)(const demo_job *job, const demo_dataset *set, uint64_t digest);
    /* Computes rows first .. first + count of this rank and adds their values to the window.
       micro >= 0: also the gradients, as those of that micro-batch. */
    seqpar_status (*rows)(demo_rank *r, demo_window *w, int64_t first, int64_t count,
                          int64_t micro);
    /* Means over the window, the same on all ranks, and their weight. Collective over the
       world. */
    seqpar_status (*total)(demo_rank *r, demo_window *w, double *means, double *weight);
    /* after the final model is written into the folder; NULL: nothing to add */
    seqpar_status (*saved)(demo_rank *r, const char *folder);
    /* begin is called instead of demo_job_begin, which makes folders and finds checkpoints; say
       prints instead of demo_job_say's last lines. NULL: those are used. */
    int (*begin)(demo_job *job, demo_error *error);
    void (*say)(const demo_job *job);
    /* before data is read; NULL: nothing */
    int (*prepare)(demo_job *job, demo_error *error);
    void (*count)(demo_job *job);         /* sets total_steps and rounds; NULL: by documents */
    seqpar_status (*train)(demo_rank *r); /* replaces demo_train; NULL: it is used */
    /* with --dry_run: does everything that takes memory once, at its largest size */
    seqpar_status (*walk)(demo_rank *r);
    /* saves what a checkpoint holds beside the model; called before the model is saved */
    seqpar_status (*save)(demo_rank *r, demo_state *state, const char *folder);
    seqpar_status (*load_state)(demo_rank *r, const demo_state *state);
    /* writes the roles of a group of ranks; needed if ranks are in groups */
    void (*group_name)(const demo_job *job, int group, char text[64]);
    /* writes the folder (DEMO_PATH_LIMIT + 1) that a second trained model, PPO's critic, begins
       from; false, or NULL: there is none */
    bool (*beside)(const demo_job *job, char *folder);
    /* describes the loss, if another program's definition is used; NULL: the trainer's name */
    void (*loss_text)(const demo_job *job, char *text, size_t size);
};

/* ---- from options to a job ---- */

static int demo_pick(const char *text, const char *const *names, int count) {
    for (int i = 0; i < count; i++)
        if (text && !strcmp(text, names[i])) return i;
    return -1;
}

/* The same, for names that a function of the library gives. */
static int demo_pick_named(const char *text, const char *name(int), int count) {
    for (int i = 0; i < count; i++)
        if (text && !strcmp(text, name(i))) return i;
    return -1;
}

static int demo_wants_bf16(const demo_config *c) {
    return c->param_dtype && !strcmp(c->param_dtype, "bf16");
}
#endif
