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
    int64_t untaught;                     /* as in seqpar_llama_batch_desc */
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

static int demo_wants_bf16(const demo_config *c) {
    return c->param_dtype && !strcmp(c->param_dtype, "bf16");
}
#endif
