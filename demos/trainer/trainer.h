/* SPDX-License-Identifier: MIT OR Unlicense */
/* trainer.h - what the trainers share: options, the step loop, evaluation, logs, checkpoints.
 *
 * A step is an optimizer step over train_batch_size documents, drawn by a shuffle that belongs
 * to (seed, epoch), packed into rows, and split over data-parallel ranks, micro-batches and
 * sequence-parallel ranks. None of these splits changes a bit of the result. */
#ifndef DEMO_TRAINER_H
#define DEMO_TRAINER_H

#include <pthread.h>
#include <signal.h>
#include "average.h"
#include "checkpoint.h"
#include "data.h"
#include "experts.h"
#include "logs.h"
#include "options.h"
#include "plot.h"
#include "progress.h"
#include "run.h"
#ifdef DEMO_NCCL /* ranks can be processes, each with a GPU: make cuda */
#define SEQPAR_NCCL_IMPLEMENTATION
#include "seqpar_nccl.h"
#endif
#ifdef DEMO_RUN_RANKS /* a function like this one, whose ranks are processes */
#define DEMO_RANKS_ARE_THREADS 0
#else
#define DEMO_RUN_RANKS         seqpar_run_threads
#define DEMO_RANKS_ARE_THREADS 1
#endif

typedef struct {
    const char *dataset, *eval_dataset, *input_key, *output_key, *input_template, *truncation;
    const char *pretrain, *save_path, *ckpt_path, *metrics_path, *lr_scheduler, *optim, *device;
    const char *param_dtype, *save_dtype, *max_shard_size, *use_tensorboard, *wandb_offline;
    const char *layout, *schedule, *ring_attn_func, *sequence_parallel_mode;
    bool pretrain_mode, train_on_inputs, packing_samples, load_checkpoint,
        gradient_checkpointing, relaxed_attention, cublas, tie_word_embeddings, plot_loss, json,
        overwrite, enable_ema, dry_run;
    int64_t max_len, pack_len, chunks, max_samples, train_batch_size, micro_train_batch_size;
    int64_t max_steps, warmup_steps;
    int64_t save_steps, eval_steps, logging_steps, max_ckpt_num, seed, zero_stage, omp_threads;
    int64_t ring_attn_size, ring_head_stride, ulysses_size, data_parallel_size, world_size;
    int64_t gradient_accumulation_steps;
    int64_t hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim;
    int64_t intermediate_size;
    double max_epochs, max_norm, learning_rate, lr_warmup_ratio, min_lr_ratio, l2, adam_eps;
    double label_smoothing, z_loss, rope_theta, ema_beta, aux_loss_coef;
    double adam_betas[2];
} demo_config;

/* Options every trainer has. Defaults teach a fresh small model something in minutes on two
   cores. */
#define DEMO_TRAINER_BINDINGS(c) \
    { \
        "dataset", \
        &(c).dataset, \
        DEMO_STRING, \
        NULL, \
        "training data: .jsonl or .txt, a comma list; or a token file (prepare.py)", \
        DEMO_ANY}, \
        {"eval_dataset", &(c).eval_dataset, DEMO_STRING, NULL, "data to evaluate on", DEMO_ANY}, \
        {"input_template",        &(c).input_template, DEMO_STRING, \
         "User: {}\nAssistant: ", "prompt around {}",  DEMO_ANY}, \
        {"max_len",    &(c).max_len, DEMO_INT, "1024", "longest document, in tokens", \
         DEMO_COUNT(2)}, \
        {"truncation", \
         &(c).truncation, \
         DEMO_STRING, \
         "drop", \
         "what happens to longer ones: drop or cut", \
         DEMO_ANY}, \
        {"max_samples", \
         &(c).max_samples, \
         DEMO_INT, \
         "100000000", \
         "read at most this many records", \
         DEMO_COUNT(1)}, \
        {"packing_samples", &(c).packing_samples, DEMO_FLAG, NULL, "several documents in a row", \
         DEMO_ANY}, \
        {"pack_len", \
         &(c).pack_len, \
         DEMO_INT, \
         "0", \
         "tokens of a packed row; 0: 2048 or max_len", \
         DEMO_COUNT(0)}, \
        {"chunks", \
         &(c).chunks, \
         DEMO_INT, \
         "0", \
         "chunks a row is cut into; 0: 32, fewer for short rows, more for those beyond 8,192 " \
         "tokens", \
         DEMO_BETWEEN(0, SEQPAR_MAX_CHUNKS)}, \
        {"pretrain", \
         &(c).pretrain, \
         DEMO_STRING, \
         NULL, \
         "folder with config.json and model.safetensors to start from", \
         DEMO_ANY}, \
        {"save_path", &(c).save_path, DEMO_STRING, "./ckpt", "folder for the final model", \
         DEMO_ANY}, \
        {"save_dtype", \
         &(c).save_dtype, \
         DEMO_STRING, \
         "auto", \
         "of the final model's numbers; auto: those of --pretrain, or as computed", \
         DEMO_ANY}, \
        {"max_shard_size", \
         &(c).max_shard_size, \
         DEMO_STRING, \
         "5GB", \
         "most of one file of the final model, as 700MB or 5GB", \
         DEMO_ANY}, \
        {"overwrite", \
         &(c).overwrite, \
         DEMO_FLAG, \
         NULL, \
         "save_path may hold a model that seqpar did not write", \
         DEMO_ANY}, \
        {"ckpt_path", \
         &(c).ckpt_path, \
         DEMO_STRING, \
         NULL, \
         "folder for checkpoints; without it save_path/checkpoints_ and the trainer's name", \
         DEMO_ANY}, \
        {"save_steps", \
         &(c).save_steps, \
         DEMO_INT, \
         "-1", \
         "checkpoint every so many steps; -1: only when interrupted", \
         DEMO_COUNT(-1)}, \
        {"max_ckpt_num", &(c).max_ckpt_num, DEMO_INT, "3", "checkpoints kept", DEMO_COUNT(1)}, \
        {"load_checkpoint", \
         &(c).load_checkpoint, \
         DEMO_FLAG, \
         NULL, \
         "go on from the newest checkpoint in ckpt_path, if there is one", \
         DEMO_ANY}, \
        {"eval_steps", \
         &(c).eval_steps, \
         DEMO_INT, \
         "-1", \
         "evaluate every so many steps; -1: at the end", \
         DEMO_COUNT(-1)}, \
        {"logging_steps", &(c).logging_steps, DEMO_INT, "10", "a line every so many steps", \
         DEMO_COUNT(1)}, \
        {"metrics_path", \
         &(c).metrics_path, \
         DEMO_STRING, \
         NULL, \
         "JSON lines: every step and evaluation", \
         DEMO_ANY}, \
        {"use_tensorboard", \
         &(c).use_tensorboard, \
         DEMO_STRING, \
         NULL, \
         "folder for TensorBoard's event files, in one for every run", \
         DEMO_ANY}, \
        {"wandb_offline", \
         &(c).wandb_offline, \
         DEMO_STRING, \
         NULL, \
         "folder for files as Weights & Biases keeps them, in one for every run; nothing is sent", \
         DEMO_ANY}, \
        {"plot_loss", \
         &(c).plot_loss, \
         DEMO_FLAG, \
         NULL, \
         "draw the loss into save_path/training_loss.svg", \
         DEMO_ANY}, \
        {"dry_run", \
         &(c).dry_run, \
         DEMO_FLAG, \
         NULL, \
         "read everything, say what would happen and what memory it takes, and stop", \
         DEMO_ANY}, \
        {"json",  &(c).json, DEMO_FLAG, NULL, "the closing figures as one JSON object, with --dry_run what it says", \
         DEMO_ANY}, \
        {"train_batch_size", \
         &(c).train_batch_size, \
         DEMO_INT, \
         "32", \
         "documents of an optimizer step, over all ranks", \
         DEMO_COUNT(1)}, \
        {"micro_train_batch_size", \
         &(c).micro_train_batch_size, \
         DEMO_INT, \
         "4", \
         "rows of a micro-batch on a data-parallel rank", \
         DEMO_COUNT(1)}, \
        {"gradient_accumulation_steps", \
         &(c).gradient_accumulation_steps, \
         DEMO_INT, \
         "0", \
         "micro-batches of a step; 0: from micro_train_batch_size", \
         DEMO_COUNT(0)}, \
        {"max_epochs", &(c).max_epochs,        DEMO_FLOAT, \
         "1",          "passes over the data", {0, DEMO_MOST, true}}, \
        {"max_steps", \
         &(c).max_steps, \
         DEMO_INT, \
         "-1", \
         "optimizer steps; 0: evaluate and save only; -1: from max_epochs", \
         DEMO_COUNT(-1)}, \
        {"learning_rate", &(c).learning_rate,   DEMO_FLOAT, \
         "2e-3",          "peak learning rate", DEMO_ABOVE(0)}, \
        {"lr_scheduler", \
         &(c).lr_scheduler, \
         DEMO_STRING, \
         "cosine_with_min_lr", \
         "constant, linear, cosine, cosine_with_min_lr", \
         DEMO_ANY}, \
        {"lr_warmup_ratio", \
         &(c).lr_warmup_ratio, \
         DEMO_FLOAT, \
         "0.03", \
         "share of the steps that warm up", \
         DEMO_BETWEEN(0, 1)}, \
        {"warmup_steps", \
         &(c).warmup_steps, \
         DEMO_INT, \
         "-1", \
         "warm-up in steps; -1: from lr_warmup_ratio", \
         DEMO_COUNT(-1)}, \
        {"min_lr_ratio",    &(c).min_lr_ratio, DEMO_FLOAT, "0.1", "floor of cosine_with_min_lr", \
         DEMO_BETWEEN(0, 1)}, \
        {"optim", &(c).optim, DEMO_STRING, "adamw", "adamw or sgd", DEMO_ANY}, \
        {"adam_betas", &(c).adam_betas,        DEMO_FLOATS2, \
         "0.9,0.95",   "decay of the moments", DEMO_BETWEEN(0, 1)}, \
        {"adam_eps", \
         &(c).adam_eps, \
         DEMO_FLOAT, \
         "1e-8", \
         "added to the root of the second moment; with 0 a weight that has no gradient would " \
         "become 0/0", \
         DEMO_BETWEEN(1e-30, 1e30)}, \
        {"l2", &(c).l2, DEMO_FLOAT, "0", "weight decay; gains have none", DEMO_AT_LEAST(0)}, \
        {"max_norm", \
         &(c).max_norm, \
         DEMO_FLOAT, \
         "1.0", \
         "clip of the gradient norm; 0: none", \
         DEMO_AT_LEAST(0)}, \
        {"enable_ema", \
         &(c).enable_ema, \
         DEMO_FLAG, \
         NULL, \
         "keep a moving average of the weights, saved in save_path/ema", \
         DEMO_ANY}, \
        {"ema_beta", \
         &(c).ema_beta, \
         DEMO_FLOAT, \
         "0.992", \
         "share of the average that stays in a step", \
         DEMO_BETWEEN(0, 1)}, \
        {"aux_loss_coef", \
         &(c).aux_loss_coef, \
         DEMO_FLOAT, \
         "0", \
         "coefficient of the load-balancing loss of a model with experts", \
         DEMO_AT_LEAST(0)}, \
        {"zero_stage", \
         &(c).zero_stage, \
         DEMO_INT, \
         "2", \
         "0: moments on every rank, 1 and 2: sharded; gradients always are", \
         DEMO_BETWEEN(0, 2)}, \
        {"gradient_checkpointing", \
         &(c).gradient_checkpointing, \
         DEMO_FLAG, \
         NULL, \
         "keep three tensors a layer, compute the rest again", \
         DEMO_ANY}, \
        {"ring_attn_size",          &(c).ring_attn_size, DEMO_INT, "1", \
         "sequence-parallel ranks", DEMO_COUNT(1)}, \
        {"ring_head_stride", \
         &(c).ring_head_stride, \
         DEMO_INT, \
         "1", \
         "llama3: kv heads gathered at a time", \
         DEMO_COUNT(1)}, \
        {"data_parallel_size", \
         &(c).data_parallel_size, \
         DEMO_INT, \
         "0", \
         "data-parallel ranks; 0: from world_size, else 1", \
         DEMO_COUNT(0)}, \
        {"world_size", \
         &(c).world_size, \
         DEMO_INT, \
         "0", \
         "ranks in all; 0: data_parallel_size x ring_attn_size", \
         DEMO_COUNT(0)}, \
        {"layout", \
         &(c).layout, \
         DEMO_STRING, \
         NULL, \
         "who holds which tokens; default zigzag", \
         DEMO_ANY}, \
        {"schedule", &(c).schedule, DEMO_STRING, NULL, "how ranks meet keys; default ring", \
         DEMO_ANY}, \
        {"ulysses_size", \
         &(c).ulysses_size, \
         DEMO_INT, \
         "0", \
         "of these ranks exchange tokens for heads, a ring joins the rest; 0: 1, with " \
         "ulysses all", \
         DEMO_COUNT(0)}, \
        {"ring_attn_func", \
         &(c).ring_attn_func, \
         DEMO_STRING, \
         NULL, \
         "layout and schedule by axolotl's name", \
         DEMO_ANY}, \
        {"sequence_parallel_mode", \
         &(c).sequence_parallel_mode, \
         DEMO_STRING, \
         NULL, \
         "layout and schedule by 360-LLaMA-Factory's name", \
         DEMO_ANY}, \
        {"relaxed_attention", \
         &(c).relaxed_attention, \
         DEMO_FLAG, \
         NULL, \
         "sums in order of arrival: a little faster, not bit for bit", \
         DEMO_ANY}, \
        {"omp_threads", &(c).omp_threads, DEMO_INT, "0", "threads of a rank; 0: cores / ranks", \
         DEMO_COUNT(0)}, \
        {"device", \
         &(c).device, \
         DEMO_STRING, \
         "cpu", \
         "cpu (fp32, fast), reference (fp64, naive) or cuda (make cuda)", \
         DEMO_ANY}, \
        {"param_dtype", \
         &(c).param_dtype, \
         DEMO_STRING, \
         "auto", \
         "auto: what the device computes in; bf16 (reference, cuda): weights and activations " \
         "in bf16, sums and optimizer in fp32", \
         DEMO_ANY}, \
        {"cublas", \
         &(c).cublas, \
         DEMO_FLAG, \
         NULL, \
         "with --device cuda: products by cuBLAS, at a fixed number of rows", \
         DEMO_ANY}, \
        {"seed",          &(c).seed, DEMO_INT, "42", "of weights and order of documents", \
         DEMO_AT_LEAST(0)}, \
        {"hidden_size", \
         &(c).hidden_size, \
         DEMO_INT, \
         "128", \
         "of a fresh model, like all below", \
         DEMO_BETWEEN(1, SEQPAR_MAX_WIDTH)}, \
        {"num_hidden_layers", \
         &(c).num_hidden_layers, \
         DEMO_INT, \
         "4", \
         "layers", \
         DEMO_BETWEEN(1, SEQPAR_MAX_LAYERS)}, \
        {"num_attention_heads", &(c).num_attention_heads,         DEMO_INT, "4", \
         "query heads",         DEMO_BETWEEN(1, SEQPAR_MAX_WIDTH)}, \
        {"num_key_value_heads", &(c).num_key_value_heads,         DEMO_INT, "2", \
         "key and value heads", DEMO_BETWEEN(1, SEQPAR_MAX_WIDTH)}, \
        {"head_dim", \
         &(c).head_dim, \
         DEMO_INT, \
         "0", \
         "0: hidden_size / heads", \
         DEMO_BETWEEN(0, SEQPAR_MAX_WIDTH)}, \
        {"intermediate_size",  &(c).intermediate_size,           DEMO_INT, "0", \
         "0: 3 x hidden_size", DEMO_BETWEEN(0, SEQPAR_MAX_WIDTH)}, \
        {"tie_word_embeddings", \
         &(c).tie_word_embeddings, \
         DEMO_FLAG, \
         NULL, \
         "head and embedding share a table", \
         DEMO_ANY}, \
    { \
        "rope_theta", &(c).rope_theta, DEMO_FLOAT, "10000", "base of the rotary embedding", \
            DEMO_ABOVE(0) \
    }

enum { DEMO_COLUMNS = 8 }; /* most numbers an objective reports */
typedef struct demo_objective demo_objective;
typedef struct {
    const char *dashes, *name;
    int64_t digest;
} demo_told;

typedef struct {
    demo_config config;
    const demo_binding *bindings; /* its options */
    int binding_count;
    demo_told *told; /* what every rank must have been told alike; stb_ds array */
    const demo_objective *objective;
    void *options;      /* of the objective */
    const char **score; /* the option that names the score head; NULL: a language model */
    demo_dataset train, eval;
    int64_t *usable; /* training units whose documents all have a target, in file order */
    int64_t usable_count, total_steps, rounds, warmup; /* rounds: what progress counts */
    /* at which training ends: total_steps, or the end of the last rollout */
    int64_t last_step;
    demo_run run;
    demo_logs_desc logs;
    uint64_t data;    /* digest of what is trained on */
    demo_note *notes; /* for checkpoints; stb_ds array */
    seqpar_llama_config model;
    int layout, schedule, lr_kind;
    double temperature; /* of log-probs; 0: 1 */
    /* rows at a time where there are no gradients; 0: micro_train_batch_size */
    int64_t micro_values;
    int64_t dp;
    /* ranks that were started as processes, and which of them this is; 0: ranks share this
       one */
    int64_t processes, rank;
    demo_shared *shared; /* while it runs */
} demo_job;

typedef struct { /* one rank at work */
    const demo_job *job;
    seqpar_ctx ctx;
    seqpar_device *device;
    seqpar_llama model;
    seqpar_optim optim;
    demo_average average; /* of the weights, where one is kept */
    int64_t step, saved;  /* steps done; at the last checkpoint */
    int stopped;          /* by a signal, before the end */
    /* digest of the frozen model's weights, on rank 0; 0: there is none */
    uint64_t reference;
    demo_progress progress;
    demo_logs logs; /* rank 0 */
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
    double statistic;     /* of the whole window, taken before its rows: KTO's KL */
    /* (documents) sums of the reference's log-probs, taken beforehand; NULL: it is asked in
       the step */
    const double *reference;
} demo_window;

struct demo_objective {
    const char *unit; /* what train_batch_size counts: "documents", "pairs" */
    /* what an evaluation's mean is over: "tokens", "pairs"; " nats" or "" behind it */
    const char *weight, *measure;
    int documents_per_unit, columns;
    const char *column[DEMO_COLUMNS]; /* of the log; the first is the loss */
    const char *evaluates;            /* what an evaluation is called, if not that */
    const char *round;                /* what progress counts, if not steps */
    /* options that a resumed run must repeat, beside those of all trainers; a comma list,
       NULL: none */
    const char *fixed;
    bool needs_model; /* a model with random weights has nothing to teach it */
    /* after the policy is there; NULL: nothing */
    seqpar_status (*open)(demo_rank *r);
    void (*close)(demo_rank *r);
    /* a pass over all rows before the first; NULL: none */
    seqpar_status (*before)(demo_rank *r, demo_window *w);
    /* Fills a dataset from files, units being neighbours of documents_per_unit. 0, or -1
       with one sentence. */
    int (*load)(const demo_job *job, demo_dataset *set, const char *paths, int64_t max_samples,
                char *error, size_t size);
    /* What it keeps of them beside the documents goes into the digest; NULL: nothing. */
    uint64_t (*digest)(const demo_job *job, const demo_dataset *set, uint64_t digest);
    /* Rows first .. first + count of this rank, values into the window; micro >= 0: and
       gradients, of that micro-batch. */
    seqpar_status (*rows)(demo_rank *r, demo_window *w, int64_t first, int64_t count,
                          int64_t micro);
    /* Means over the window, the same on all ranks, and their weight. Collective over the
       world. */
    seqpar_status (*total)(demo_rank *r, demo_window *w, double *means, double *weight);
    /* after the final model is written; NULL: nothing to add */
    seqpar_status (*saved)(demo_rank *r);
    /* Where steps are not drawn from the documents in turn: */
    /* before data is read; NULL: nothing */
    int (*prepare)(demo_job *job, char *error, size_t size);
    void (*count)(demo_job *job);         /* sets total_steps and rounds */
    seqpar_status (*train)(demo_rank *r); /* the whole of it */
    /* with --dry_run: all that takes memory, once, as large as it may be */
    seqpar_status (*walk)(demo_rank *r);
    /* what a checkpoint holds beside the model, before that */
    seqpar_status (*save)(demo_rank *r, demo_state *state, const char *folder);
    seqpar_status (*load_state)(demo_rank *r, const demo_state *state);
};

/* ---- signals: the first stops after the step at hand, with a checkpoint; the second ends at once ---- */

enum { DEMO_TROUBLE = 1000 }; /* is no signal: something failed at rank 0, demo_rank.trouble */
/* by this signal, which may have come to another process */
static volatile sig_atomic_t demo_interrupted;
/* training ended before its time, by this signal */
static volatile sig_atomic_t demo_stopped;
static volatile sig_atomic_t demo_caught; /* the first that came here */
static struct timespec demo_caught_at;

/* Who starts programs may send a signal to the process and to its group: within a tenth of a
   second that is one. */
static void demo_on_interrupt(int signal_number) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double passed = (double)(now.tv_sec - demo_caught_at.tv_sec) +
                    1e-9 * (double)(now.tv_nsec - demo_caught_at.tv_nsec);
    if (demo_caught && passed > 0.1) {
        signal(signal_number, SIG_DFL);
        raise(signal_number);
    } else if (!demo_caught) {
        demo_caught_at = now;
        demo_caught = signal_number;
        demo_interrupted = signal_number;
    }
}

static void demo_catch(int signal_number) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = demo_on_interrupt;
    action.sa_flags = SA_RESTART;
    sigaction(signal_number, &action, NULL);
}

/* SIGHUP comes when a terminal is closed; nohup has it ignored. */
static void demo_catch_all(void) {
    struct sigaction hangup;
    demo_catch(SIGINT);
    demo_catch(SIGTERM);
    if (!sigaction(SIGHUP, NULL, &hangup) && hangup.sa_handler != SIG_IGN) demo_catch(SIGHUP);
}

/* Writing into a full disk, a file at its limit or a pipe that nobody reads is to fail with
   a sentence. */
static void demo_writes_may_fail(void) {
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
}

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

/* Layout and schedule by our names or by those of others, who must not contradict one
   another. Default: zigzag ring. */
static int demo_pick_attention(demo_job *job, char *error, size_t size) {
    demo_config *c = &job->config;
    if (demo_placement_settle(&c->layout, &c->schedule, c->ring_attn_func, error, size))
        return -1;
    if (demo_placement_settle(&c->layout, &c->schedule, c->sequence_parallel_mode, error, size))
        return -1;
    job->layout = demo_pick_named(c->layout ? c->layout : "zigzag", seqpar_layout_name,
                                  SEQPAR_LAYOUT_COUNT);
    job->schedule = demo_pick_named(c->schedule ? c->schedule : "ring", seqpar_schedule_name,
                                    SEQPAR_SCHEDULE_COUNT);
    return 0;
}

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

/* Where something has started WORLD_SIZE processes (torchrun, mpirun, a loop in a shell),
   they are the ranks, over NCCL. */
static int demo_job_processes(demo_job *job, char *error, size_t size) {
    demo_config *c = &job->config;
    int64_t processes = demo_environment("WORLD_SIZE", 0);
    int64_t dp = c->data_parallel_size ? c->data_parallel_size : processes / c->ring_attn_size;
    if (processes < 0)
        return snprintf(error, size,
                        "the environment's WORLD_SIZE is '%s'; set it to the number of "
                        "processes that were started, or unset it",
                        getenv("WORLD_SIZE")),
               -1;
#ifdef DEMO_NCCL
    if (processes < 1) return 0;
    job->processes = processes;
    job->rank = demo_environment("RANK", -1);
    if (job->rank < 0 || job->rank >= processes)
        return snprintf(error, size,
                        "the environment's RANK is '%s'; give each of the %lld processes its "
                        "own, 0 to %lld",
                        getenv("RANK") ? getenv("RANK") : "", (long long)processes,
                        (long long)processes - 1),
               -1;
    if (c->world_size && c->world_size != processes)
        return snprintf(error, size,
                        "the environment's WORLD_SIZE is %lld, world_size is %lld; leave out "
                        "--world_size",
                        (long long)processes, (long long)c->world_size),
               -1;
    if (dp * c->ring_attn_size != processes)
        return snprintf(error, size,
                        "the environment's WORLD_SIZE %lld is not data_parallel_size %lld x "
                        "ring_attn_size %lld; start as many processes as that, or unset "
                        "WORLD_SIZE and all ranks share one process",
                        (long long)processes, (long long)(dp ? dp : 1),
                        (long long)c->ring_attn_size),
               -1;
    c->world_size = processes;
#else
    (void)job, (void)dp;
    if (processes > 1)
        return snprintf(
                   error, size,
                   "the environment's WORLD_SIZE is %lld, but this program was built without "
                   "NCCL and each of the processes would train the whole world; type make cuda "
                   "where nccl.h is and start build/cuda_train_*, or unset WORLD_SIZE",
                   (long long)processes),
               -1;
#endif
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

static int demo_job_threads(const demo_job *job, char *error, size_t size) {
    int64_t ranks = job->processes ? 1 : job->dp * job->config.ring_attn_size;
    int64_t threads = job->config.omp_threads, there;
    if (ranks * threads > SEQPAR_MAX_RANKS)
        return snprintf(error, size,
                        "%lld ranks of %lld threads (--omp_threads) are more than the %lld "
                        "threads one process takes; lower one of them",
                        (long long)ranks, (long long)threads, (long long)SEQPAR_MAX_RANKS),
               -1;
    there = demo_threads_there(ranks * threads);
    if (there == ranks * threads) return 0;
    return snprintf(error, size,
                    "only %lld of %lld threads can be started here (%lld ranks of %lld, "
                    "--omp_threads): %s; lower one of them, or raise the limit (ulimit -v, "
                    "ulimit -u)",
                    (long long)there, (long long)(ranks * threads), (long long)ranks,
                    (long long)threads, strerror(EAGAIN)),
           -1;
}

static int demo_job_world(demo_job *job, char *error, size_t size) {
    demo_config *c = &job->config;
    if (demo_job_processes(job, error, size)) return -1;
    int64_t dp = c->data_parallel_size ? c->data_parallel_size
                 : c->world_size       ? c->world_size / c->ring_attn_size
                                       : 1;
    if (demo_size_named(c->max_shard_size) < 0)
        return snprintf(error, size,
                        "max_shard_size is %.60s, but it must be a size such as 700MB or 5GB",
                        c->max_shard_size),
               -1;
    if (!strcmp(c->device, "cpu") && demo_wants_bf16(c))
        return snprintf(error, size,
                        "--param_dtype bf16 is not for the cpu device, which computes in fp32; "
                        "add --device reference or --device cuda"),
               -1;
    if (c->cublas && strcmp(c->device, "cuda"))
        return snprintf(error, size,
                        "--cublas is for the GPU, not for --device %s; add --device cuda or "
                        "leave it out",
                        c->device),
               -1;
#ifndef DEMO_CUDA
    if (!strcmp(c->device, "cuda"))
        return snprintf(error, size,
                        "--device cuda needs a program built with CUDA; type make cuda and "
                        "start build/cuda_train_*"),
               -1;
#endif
    if (c->world_size &&
        (c->world_size % c->ring_attn_size || c->world_size != dp * c->ring_attn_size)) {
        snprintf(error, size,
                 "world_size %lld is not data_parallel_size %lld x ring_attn_size %lld; change "
                 "one of them",
                 (long long)c->world_size, (long long)dp, (long long)c->ring_attn_size);
        return -1;
    }
    job->dp = dp;
    if (!job->processes && dp * c->ring_attn_size > SEQPAR_MAX_RANKS)
        return snprintf(error, size,
                        "data_parallel_size %lld x ring_attn_size %lld are more ranks than one "
                        "process takes, which is %lld; lower one of them",
                        (long long)dp, (long long)c->ring_attn_size,
                        (long long)SEQPAR_MAX_RANKS),
               -1;
    if (!c->omp_threads) {
        c->omp_threads = sysconf(_SC_NPROCESSORS_ONLN) / (dp * c->ring_attn_size);
        if (c->omp_threads < 1) c->omp_threads = 1;
    }
    return demo_job_threads(job, error, size);
}

/* What is needed at least: a model beyond the machine's memory would not fail when it is
   asked for, but be killed when it is used. */
static int demo_job_memory(const demo_job *job, char *error, size_t size) {
    const seqpar_llama_config *m = &job->model;
    double hidden = (double)m->hidden;
    double heads = (double)(2 * m->heads + 2 * m->kv_heads) * (double)m->head_dim;
    double layer = hidden * (heads + 3.0 * (double)m->intermediate);
    double values = (double)m->layers * layer +
                    (double)m->vocab * hidden * (m->tied ? 1.0 : 2.0);
    double ranks = job->processes ? 1.0 : (double)(job->dp * job->config.ring_attn_size);
    double needed = values * (4.0 * ranks + 12.0);
    double there = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    if (!strcmp(job->config.device, "cuda") || job->config.dry_run || needed < there) return 0;
    return snprintf(error, size,
                    "the model (%lld layers, hidden %lld, intermediate %lld, %lld heads of "
                    "%lld, vocab %lld) has %.3g parameters; weights of %.0f ranks, gradients "
                    "and moments take at least %.3g GB, this machine has %.3g; take a smaller "
                    "model or fewer ranks",
                    (long long)m->layers, (long long)m->hidden, (long long)m->intermediate,
                    (long long)m->heads, (long long)m->head_dim, (long long)m->vocab, values,
                    ranks, needed / 1e9, there / 1e9),
           -1;
}

/* ---- data: text for a model with a tokenizer becomes a token file first ---- */

static bool demo_folder_has(const char *folder, const char *name) {
    char path[4352];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return !access(path, F_OK);
}

static bool demo_folder_has_tokenizer(const char *folder) {
    return folder && (demo_folder_has(folder, "tokenizer.json") ||
                      demo_folder_has(folder, "tokenizer.model") ||
                      demo_folder_has(folder, "vocab.json"));
}

static bool demo_folder_has_template(const char *folder) {
    char path[4352];
    size_t size;
    snprintf(path, sizeof path, "%s/tokenizer_config.json", folder);
    char *text = demo_read_file(path, &size);
    bool has = demo_folder_has(folder, "chat_template.jinja") ||
               demo_folder_has(folder, "chat_template.json") ||
               (text && strstr(text, "\"chat_template\""));
    free(text);
    return has;
}

/* A word of a command line as a shell reads it. */
static void demo_shell_word(char *to, size_t size, const char *word) {
    bool plain = *word && !word[strspn(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"
                                             "XYZ0123456789_./,:@%+=-")];
    size_t used = (size_t)snprintf(to, size, "%s", plain ? " " : " $'");
    for (; *word && used + 5 < size; word++)
        used += (size_t)snprintf(to + used, size - used,
                                 *word == '\n'                                ? "\\n"
                                 : !plain && (*word == '\'' || *word == '\\') ? "\\%c"
                                                                            : "%c",
                                 *word);
    if (!plain) snprintf(to + used, size - used, "'");
}

/* Options of prepare.py that this trainer has by the same name, by kind. */
static const char *const demo_shared_options[] = {
    "", "input_key,output_key,pretrain_mode", "prompt_key,chosen_key,rejected_key,margin_key",
    "input_key,output_key,label_key", "input_key,label_key"};

static void demo_command_option(char *to, size_t size, const demo_binding *b) {
    const char *text = b->type == DEMO_STRING ? *(const char *const *)b->variable : NULL;
    bool on = b->type == DEMO_FLAG && *(const bool *)b->variable;
    if (!text && !on) return;
    snprintf(to, size, " --%s", b->name);
    if (text) demo_shell_word(to + strlen(to), size - strlen(to), text);
}

/* How its text becomes what is written here for it. */
static void demo_command_shape(char *to, size_t size, const demo_job *job, uint32_t kind) {
    const demo_config *c = &job->config;
    const demo_binding *b = demo_binding_of(job->bindings, job->binding_count, "input_template");
    bool learns_more = kind == DEMO_TOKENS_SFT &&
                       demo_binding_of(job->bindings, job->binding_count, "pretrain_data");
    if (learns_more || c->pretrain_mode)
        snprintf(to, size, learns_more ? " --pretrain_mode" : "");
    else if (demo_folder_has_template(c->pretrain))
        snprintf(to, size, " --apply_chat_template");
    else if (b && c->input_template && strcmp(c->input_template, b->fallback))
        demo_command_option(to, size, b);
    if (c->train_on_inputs) snprintf(to + strlen(to), size - strlen(to), " --train_on all");
    if (!strcmp(c->truncation, "cut") && kind != DEMO_TOKENS_PROMPTS)
        snprintf(to + strlen(to), size - strlen(to), " --truncation cut");
}

/* The command line that makes a token file of this text, until the next call; NULL: a byte is
   a token. */
static const char *demo_prepare_command(const demo_job *job, const char *paths, uint32_t kind) {
    static char text[4096];
    const demo_config *c = &job->config;
    char output[1200];
    int64_t most = c->max_len;
    if (!demo_folder_has_tokenizer(c->pretrain)) return NULL;
    snprintf(output, sizeof output, "%.*s.tokens", (int)strcspn(paths, ","), paths);
    snprintf(text, sizeof text, "python3 demos/prepare.py --kind %s --pretrain",
             demo_token_kinds[kind]);
    demo_shell_word(text + strlen(text), sizeof text - strlen(text), c->pretrain);
    strcat(text, " --dataset");
    demo_shell_word(text + strlen(text), sizeof text - strlen(text), paths);
    strcat(text, " --output");
    demo_shell_word(text + strlen(text), sizeof text - strlen(text), output);
    for (int i = 0; i < job->binding_count; i++) {
        const demo_binding *b = &job->bindings[i];
        if (demo_list_has(demo_shared_options[kind], b->name))
            demo_command_option(text + strlen(text), sizeof text - strlen(text), b);
        if (kind == DEMO_TOKENS_PROMPTS && !strcmp(b->name, "prompt_max_len"))
            most = *(const int64_t *)b->variable;
    }
    demo_command_shape(text + strlen(text), sizeof text - strlen(text), job, kind);
    snprintf(text + strlen(text), sizeof text - strlen(text), " --max_len %lld",
             (long long)most);
    return text;
}

/* A fresh model has a row for every word of the tokenizer its data was made with. */
static int64_t demo_fresh_vocab(const demo_config *c) {
    demo_token_head head;
    int file = demo_is_token_file(c->dataset) ? open(c->dataset, O_RDONLY | O_CLOEXEC) : -1;
    bool whole = file >= 0 && read(file, &head, sizeof head) == (ssize_t)sizeof head;
    if (file >= 0) close(file);
    return whole && head.words > 0 ? head.words : DEMO_VOCAB;
}

static int demo_job_model(demo_job *job, char *error, size_t size) {
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
        snprintf(error, size, "%s", why.text);
        return -1;
    }
    if (!c->pretrain && job->model.head_dim < 1)
        return snprintf(error, size,
                        "hidden_size %lld is less than num_attention_heads %lld, so that a "
                        "head has no dimension; lower the heads, or give --head_dim",
                        (long long)c->hidden_size, (long long)c->num_attention_heads),
               -1;
    if (job->score) job->model.score = *job->score;
    return demo_job_memory(job, error, size);
}

/* A unit that no row can hold would be missing from its step. */
static int demo_units_fit(const demo_job *job, const demo_dataset *set, const char *paths,
                          char *error, size_t size) {
    int64_t per_unit = job->objective->documents_per_unit;
    for (int64_t i = 0; i + per_unit <= arrlen(set->documents); i += per_unit) {
        int64_t tokens = 0;
        for (int64_t k = 0; k < per_unit; k++) tokens += set->documents[i + k].tokens;
        if (tokens <= job->config.pack_len) continue;
        snprintf(error, size,
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
                           char *error, size_t size) {
    const demo_token_file *a = job->train.file, *b = other->file;
    if (!arrlen(other->documents) || (!a && !b)) return 0;
    if (a && b && demo_same_tokenizer(demo_token_fingerprint(a), demo_token_fingerprint(b)))
        return 0;
    return snprintf(error, size,
                    "%.1000s and %.1000s are not tokens of one tokenizer; make a token file of "
                    "each by demos/prepare.py with the same --pretrain",
                    job->config.dataset, path),
           -1;
}

/* Models that read the same ids: one with another tokenizer would read another text. */
static int demo_folders_agree(const demo_job *job, char *error, size_t size) {
    static const char *const names[] = {"ref_pretrain", "reward_pretrain", "critic_pretrain"};
    demo_fingerprint there;
    char one[DEMO_PATH_LIMIT + 1];
    for (int i = 0; job->train.file && i < 3; i++)
        for (const char *at = demo_option_path(job->bindings, job->binding_count, names[i]); at;
             at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
            snprintf(one, sizeof one, "%.*s", (int)strcspn(at, ","), at);
            if (demo_folder_fingerprint(one, &there) &&
                !demo_same_tokenizer(there, demo_token_fingerprint(job->train.file)))
                return snprintf(error, size,
                                "--%s %.1000s has another tokenizer.json than the one that "
                                "%.1000s was made with; take a model of the same tokenizer, or "
                                "copy the file if it is only written otherwise",
                                names[i], one, job->config.dataset),
                       -1;
        }
    return 0;
}

/* Does something learn from each of its documents? What is said to a prompt is not there
   yet. */
static bool demo_unit_usable(const demo_job *job, int64_t unit) {
    int64_t per_unit = job->objective->documents_per_unit;
    if (job->train.file && job->train.file->head->kind == DEMO_TOKENS_PROMPTS) return true;
    for (int64_t k = 0; k < per_unit; k++)
        if (!demo_supervised(&job->train.documents[unit * per_unit + k])) return false;
    return true;
}

static int demo_job_data(demo_job *job, char *error, size_t size) {
    demo_config *c = &job->config;
    const demo_objective *o = job->objective;
    if (!c->dataset) {
        snprintf(error, size, "no training data; give --dataset FILE (.jsonl or .txt)");
        return -1;
    }
    int64_t longest = o->documents_per_unit * c->max_len; /* a unit never leaves its row */
    if (longest > SEQPAR_MAX_TOKENS)
        return snprintf(error, size,
                        "max_len %lld is too long: one of the %s may have %lld tokens, a row "
                        "at most %lld; lower --max_len",
                        (long long)c->max_len, o->unit, (long long)longest,
                        (long long)SEQPAR_MAX_TOKENS),
               -1;
    if (c->gradient_accumulation_steps > c->train_batch_size)
        return snprintf(error, size,
                        "gradient_accumulation_steps %lld is more than train_batch_size %lld, "
                        "so micro-batches would be empty; lower it",
                        (long long)c->gradient_accumulation_steps,
                        (long long)c->train_batch_size),
               -1;
    if (!c->pack_len) c->pack_len = c->packing_samples && longest < 2048 ? 2048 : longest;
    if (c->chunks > c->pack_len)
        return snprintf(error, size,
                        "chunks %lld are more than pack_len %lld has tokens; lower --chunks, 0 "
                        "takes the default",
                        (long long)c->chunks, (long long)c->pack_len),
               -1;
    if (c->pack_len < c->max_len) {
        snprintf(error, size,
                 "pack_len %lld is shorter than max_len %lld; a document never leaves its row",
                 (long long)c->pack_len, (long long)c->max_len);
        return -1;
    }
    if (o->load(job, &job->train, c->dataset, c->max_samples, error, size)) return -1;
    if (c->eval_dataset && o->load(job, &job->eval, c->eval_dataset, 0, error, size)) return -1;
    if (demo_sets_agree(job, &job->eval, c->eval_dataset, error, size) ||
        demo_folders_agree(job, error, size) ||
        demo_units_fit(job, &job->train, c->dataset, error, size) ||
        demo_units_fit(job, &job->eval, c->eval_dataset, error, size))
        return -1;
    int64_t units = arrlen(job->train.documents) / o->documents_per_unit;
    job->usable = (int64_t *)demo_room(units + 1, sizeof *job->usable);
    for (int64_t i = 0; i < units; i++)
        if (demo_unit_usable(job, i)) job->usable[job->usable_count++] = i;
    return 0;
}

/* Steps: floor(documents / train_batch_size) an epoch, at least one; the rest of an epoch is
   left out. */
static void demo_job_steps(demo_job *job) {
    static const char *const kinds[] = {"constant", "linear", "cosine", "cosine_with_min_lr"};
    demo_config *c = &job->config;
    if (job->objective->count)
        job->objective->count(job);
    else {
        if (c->train_batch_size > job->usable_count) c->train_batch_size = job->usable_count;
        int64_t per_epoch = job->usable_count / c->train_batch_size;
        job->rounds = job->last_step = job->total_steps =
            c->max_steps >= 0 ? c->max_steps : (int64_t)ceil(c->max_epochs * (double)per_epoch);
    }
    job->warmup = c->warmup_steps >= 0
                      ? c->warmup_steps
                      : (int64_t)ceil(c->lr_warmup_ratio * (double)job->total_steps);
    job->lr_kind = demo_pick(c->lr_scheduler, kinds, 4);
}

/* Fills the job from parsed options. Returns 0, or -1 with one sentence. */
static int demo_job_open(demo_job *job, char *error, size_t size) {
    job->run.from = DEMO_NOTHING_SAVED; /* until demo_job_begin has looked */
    if (job->objective->prepare && job->objective->prepare(job, error, size)) return -1;
    if (demo_pick_attention(job, error, size) || demo_job_world(job, error, size) ||
        demo_job_model(job, error, size) || demo_job_data(job, error, size))
        return -1;
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
}

/* ---- beginning, or going on ---- */

static void demo_job_note(demo_job *job, const char *key, const char *value) {
    demo_note note;
    snprintf(note.key, sizeof note.key, "%s", key);
    snprintf(note.value, sizeof note.value, "%s", value);
    arrput(job->notes, note);
}

/* Chunks of a row that is full. */
static int64_t demo_row_chunks(const demo_config *c) {
    return c->chunks ? c->chunks : seqpar_grid_default_chunks(c->pack_len);
}

/* What a checkpoint of this job is recognized by, and what a resumed run is compared by. */
static void demo_job_notes(demo_job *job, const demo_binding *bindings, int count,
                           const char *tool) {
    char text[32];
    job->notes = demo_option_notes(bindings, count);
    demo_job_note(job, "trainer", tool);
    snprintf(text, sizeof text, "%016llx", (unsigned long long)job->data);
    demo_job_note(job, "training_data", text);
    snprintf(text, sizeof text, "%lld", (long long)job->config.chunks);
    demo_job_note(job, "chunks", text);
    snprintf(text, sizeof text, "%lld", (long long)demo_row_chunks(&job->config));
    demo_job_note(job, "row_chunks", text);
}

/* A checkpoint goes on with the chunks it was written with: they decide the order of all
   sums. One that does not say so has had the default of its time. */
static int demo_resume_chunks(demo_job *job, const seqpar_safetensors_file *file,
                              const char *path, char *error, size_t size) {
    demo_config *c = &job->config;
    seqpar_error why = {0};
    int64_t full = c->pack_len / 16 < 1 ? 1 : c->pack_len / 16 > 32 ? 32 : c->pack_len / 16;
    int64_t option = demo_metadata_number(file, path, "chunks", 0, 0, &why);
    int64_t row = demo_metadata_number(file, path, "row_chunks", 1, full, &why);
    bool recorded = seqpar_safetensors_metadata(file, "chunks") != NULL;
    if (why.status) return snprintf(error, size, "%s", why.text), -1;
    if (recorded && c->chunks && c->chunks != option)
        return snprintf(error, size,
                        "the checkpoint was written with %lld chunks a row%s, this run has "
                        "--chunks %lld; leave it out to go on",
                        (long long)row, option ? "" : " or fewer", (long long)c->chunks),
               -1;
    if (c->chunks || row == demo_row_chunks(c)) return 0;
    c->chunks = row;
    if (!recorded && !job->rank)
        fprintf(
            stderr,
            "notice: the checkpoint is of version 0.1.0, where rows under 512 tokens had fewer "
            "than the %lld chunks that all have now; their sums are rounded otherwise\n",
            (long long)row);
    return 0;
}

static int demo_resume_compare(demo_job *job, const char *tool,
                               const seqpar_safetensors_file *file, const demo_state *state,
                               char *error, size_t size) {
    const demo_config *c = &job->config;
    const char *trainer = seqpar_safetensors_metadata(file, "trainer");
    const char *data = seqpar_safetensors_metadata(file, "training_data");
    char own[32];
    snprintf(own, sizeof own, "%016llx", (unsigned long long)job->data);
    if (trainer && strcmp(trainer, tool))
        return snprintf(error, size,
                        "the checkpoint in %.300s was written by train_%.20s, this is "
                        "train_%s; give another --ckpt_path",
                        c->ckpt_path, trainer, tool),
               -1;
    if (state->seed != c->seed || state->train_batch_size != c->train_batch_size ||
        state->documents != job->usable_count)
        return snprintf(
                   error, size,
                   "the checkpoint was written with seed %lld, train_batch_size %lld and %lld "
                   "documents, this run has %lld, %lld and %lld; use the same to go on",
                   (long long)state->seed, (long long)state->train_batch_size,
                   (long long)state->documents, (long long)c->seed,
                   (long long)c->train_batch_size, (long long)job->usable_count),
               -1;
    if (data && strcmp(data, own))
        return snprintf(error, size,
                        "the checkpoint in %.200s was trained on other data than %.200s: as "
                        "many documents, but others, in another order or read otherwise; use "
                        "the same to go on",
                        c->ckpt_path, c->dataset),
               -1;
    if (state->step > job->last_step)
        return snprintf(error, size,
                        "the checkpoint in %.300s is of step %lld, this run ends after step "
                        "%lld; raise --max_steps, or give another --ckpt_path",
                        c->ckpt_path, (long long)state->step, (long long)job->last_step),
               -1;
    return 0;
}

/* Is the checkpoint one that this job can go on from? */
static int demo_job_resume(demo_job *job, const demo_binding *bindings, int count,
                           const char *tool, char *error, size_t size) {
    char folder[1110], path[1280];
    seqpar_safetensors_file *file = NULL;
    demo_state state;
    seqpar_error why = {0};
    demo_checkpoint_path(folder, sizeof folder, job->config.ckpt_path, job->run.from);
    /* until the process that holds the lock has named it */
    if (access(folder, F_OK))
        demo_checkpoint_temporary(folder, sizeof folder, job->config.ckpt_path, job->run.from);
    snprintf(path, sizeof path, "%s/optimizer.safetensors", folder);
    int wrong = demo_open_state(&file, &state, folder, job->run.from, &why)
                    ? (snprintf(error, size, "%s", why.text), -1)
                    : 0;
    if (!wrong)
        wrong = demo_resume_compare(job, tool, file, &state, error, size) ||
                demo_model_compare(&job->model, folder, error, size) ||
                demo_resume_chunks(job, file, path, error, size);
    demo_note *notes = wrong ? NULL : demo_option_notes(bindings, count);
    if (!wrong)
        wrong = demo_options_compare(notes, file,
                                     job->objective->fixed ? job->objective->fixed : "",
                                     !job->rank, error, size);
    seqpar_safetensors_close(file);
    arrfree(notes);
    return wrong;
}

static int demo_job_paths(const demo_binding *bindings, int count, char *error, size_t size) {
    return demo_inputs_kept(bindings, count, error, size) ||
                   demo_outputs_apart(bindings, count, error, size) ||
                   demo_outputs_free(bindings, count, error, size)
               ? -1
               : 0;
}

static void demo_job_logs(demo_job *job, const demo_binding *bindings, int count,
                          const char *tool) {
    bool goes_on = job->run.from != DEMO_NOTHING_SAVED;
    job->logs = (demo_logs_desc){.goes_on = goes_on,
                                 .from = goes_on ? job->run.from : 0,
                                 .bindings = bindings,
                                 .binding_count = count};
    for (int i = 0; i < DEMO_SINKS; i++)
        if (!job->config.dry_run)
            job->logs.given[i] = demo_option_path(bindings, count, demo_sink_option[i]);
    snprintf(job->logs.name, sizeof job->logs.name, "%s_%s", tool, job->run.id);
}

/* The last before training: from here on the folder of the checkpoints belongs to this job.
   0, or -1 with one sentence. */
static int demo_job_begin(demo_job *job, const demo_binding *bindings, int count,
                          const char *tool, char *error, size_t size) {
    const demo_config *c = &job->config;
    seqpar_error why = {0};
    job->run.root = c->ckpt_path;
    job->data = demo_job_digest(job, &job->train);
    if (demo_job_paths(bindings, count, error, size)) return -1;
    if (!job->rank && !c->overwrite && demo_check_foreign(c->save_path, &why))
        return snprintf(error, size, "%s", why.text), -1;
    if (demo_run_open(&job->run, !job->rank && !c->dry_run, c->load_checkpoint, c->save_path,
                      tool, c->dataset, &why) ||
        (c->dry_run && !c->load_checkpoint && demo_refuse_others(&job->run, &why)))
        return snprintf(error, size, "%s", why.text), -1;
    /* folders that were made just now may give a path with .. another end */
    if (demo_job_paths(bindings, count, error, size)) return -1;
    if (job->run.from != DEMO_NOTHING_SAVED &&
        demo_job_resume(job, bindings, count, tool, error, size))
        return -1;
    demo_job_notes(job, bindings, count, tool);
    demo_job_tell(job, bindings, count);
    demo_job_logs(job, bindings, count, tool);
    return 0;
}

/* ---- rows of a step ---- */

/* Documents of step `step`, places in the set: the same on all ranks. A whole set is
   shuffled once an epoch, not once a step. */
static int64_t *demo_step_documents(demo_rank *r, int64_t step) {
    const demo_job *job = r->job;
    int64_t batch = job->config.train_batch_size, per_epoch = job->usable_count / batch;
    int64_t per_unit = job->objective->documents_per_unit;
    int64_t *which = NULL;
    if (!r->order || r->order_epoch != step / per_epoch) {
        if (!r->order) r->order = (int64_t *)demo_room(job->usable_count, sizeof *r->order);
        r->order_epoch = step / per_epoch;
        seqpar_shuffle(r->order, job->usable_count, (uint64_t)job->config.seed,
                       (uint64_t)r->order_epoch);
    }
    for (int64_t i = 0; i < batch; i++)
        for (int64_t k = 0; k < per_unit; k++)
            arrput(which, job->usable[r->order[step % per_epoch * batch + i]] * per_unit + k);
    return which;
}

/* An evaluation takes its documents in file order, four steps' worth at a time; a single
   unit left over joins those before it. */
static int64_t demo_eval_most(const demo_job *job) {
    return job->config.train_batch_size * 4 * job->objective->documents_per_unit;
}

static int64_t demo_eval_windows(const demo_job *job) {
    int64_t documents = arrlen(job->eval.documents), most = demo_eval_most(job);
    int64_t windows = (documents + most - 1) / most;
    return windows > 1 && documents - (windows - 1) * most == job->objective->documents_per_unit
               ? windows - 1
               : windows;
}

static int64_t *demo_eval_documents(const demo_job *job, int64_t window) {
    int64_t first = window * demo_eval_most(job);
    int64_t end = window + 1 < demo_eval_windows(job) ? first + demo_eval_most(job)
                                                      : arrlen(job->eval.documents);
    int64_t *which = NULL;
    for (int64_t i = first; i < end; i++) arrput(which, i);
    return which;
}

static seqpar_pack_desc demo_pack_desc(const demo_job *job, int keep_masked) {
    seqpar_pack_desc desc = {.pack_len = job->config.pack_len,
                             .chunks = job->config.chunks,
                             .order = job->config.packing_samples ? SEQPAR_PACK_DECREASING
                                                                  : SEQPAR_PACK_UNIT_PER_ROW,
                             .keep_masked = keep_masked,
                             .vocab = job->model.vocab};
    return desc;
}

/* Micro-batches of a step: enough that none has more than micro_train_batch_size rows. */
static int64_t demo_accumulation(const demo_job *job, int64_t rows) {
    int64_t most = (rows + job->dp - 1) / job->dp, micro = job->config.micro_train_batch_size;
    return job->config.gradient_accumulation_steps ? job->config.gradient_accumulation_steps
                                                   : (most + micro - 1) / micro;
}

static seqpar_llama_run demo_run_desc(const demo_job *job) {
    seqpar_llama_run run = {.layout = job->layout,
                            .schedule = job->schedule,
                            .heads_k_stride = job->config.ring_head_stride,
                            .recompute = job->config.gradient_checkpointing,
                            .ulysses_size = job->config.ulysses_size,
                            .relaxed = job->config.relaxed_attention,
                            .temperature = job->temperature};
    return run;
}

/* ---- a window of documents ---- */

/* Packs the documents named by `which`, units being neighbours. */
static seqpar_status demo_window_open(demo_rank *r, demo_window *w, int64_t per_unit,
                                      int keep_masked) {
    int64_t count = arrlen(w->which);
    seqpar_pack_desc pack = demo_pack_desc(r->job, keep_masked);
    seqpar_document *documents = (seqpar_document *)demo_room(count + 1, sizeof *documents);
    for (int64_t i = 0; i < count; i++) {
        const demo_document *d = &w->set->documents[w->which[i]];
        documents[i] = (seqpar_document){.ids = d->ids,
                                         .loss_mask = d->loss_mask,
                                         .tokens = d->tokens,
                                         .unit = i / per_unit};
    }
    seqpar_status status = seqpar_pack(r->ctx.error, &w->batch, documents, count, &pack);
    w->units = count / per_unit;
    free(documents);
    return status;
}

static void demo_window_close(demo_window *w) {
    seqpar_batch_free(&w->batch);
    seqpar_segments_free(&w->seen);
    arrfree(w->which);
    arrfree(w->leaf);
    arrfree(w->value);
}

typedef seqpar_status (*demo_rows_fn)(demo_rank *r, demo_window *w, int64_t first,
                                      int64_t count, int64_t micro);

/* All rows of a window without gradients: an aligned run of them for every data-parallel
   rank, a few at a time. */
static seqpar_status demo_window_values(demo_rank *r, demo_window *w, demo_rows_fn rows) {
    int64_t micro = r->job->micro_values ? r->job->micro_values
                                         : r->job->config.micro_train_batch_size;
    int64_t first = seqpar_grid_begin(w->batch.rows, r->ctx.dp_size, r->ctx.dp_rank);
    int64_t end = seqpar_grid_begin(w->batch.rows, r->ctx.dp_size, r->ctx.dp_rank + 1), count;
    seqpar_status status = SEQPAR_OK;
    for (; !status && first < end; first += count) {
        count = end - first < micro ? end - first : micro;
        status = rows(r, w, first, count, -1);
    }
    return status;
}

/* Of the values of one token (log-prob or score), and of the seed that goes back. */
__attribute__((unused)) static int demo_value_dtype(const demo_rank *r,
                                                    const seqpar_llama *model) {
    return model->config.score ? r->device->storage : r->device->accumulator;
}

/* Seeds of the local tokens on the device. */
typedef struct {
    seqpar_buffer part[3];
} demo_seeds;

static seqpar_status demo_seeds_write(demo_rank *r, demo_seeds *seeds, int parts,
                                      const double *host, int64_t tokens, int dtype) {
    seqpar_status status = SEQPAR_OK;
    for (int i = 0; !status && i < parts; i++) {
        status = seqpar_buffer_new(&r->ctx, &seeds->part[i], tokens * seqpar_dtype_bytes(dtype),
                                   SEQPAR_MEM_ACTIVATIONS);
        if (!status && tokens)
            seqpar_device_write(r->device, seeds->part[i].data, 0, host + i * tokens, tokens,
                                dtype);
    }
    return status;
}

static void demo_seeds_free(demo_rank *r, demo_seeds *seeds) {
    for (int i = 0; i < 3; i++) seqpar_buffer_free(&r->ctx, &seeds->part[i]);
}

/* ---- one step ---- */

static double demo_learning_rate(const demo_job *job, int64_t step) {
    return job->config.learning_rate * seqpar_lr_factor(job->lr_kind, step, job->warmup,
                                                        job->total_steps,
                                                        job->config.min_lr_ratio);
}

/* To everything that shows reports. One that cannot be kept ends the run. Rank 0. */
static void demo_log(demo_rank *r, const demo_report *report) {
    double value = demo_report_value(report, r->job->objective->column[0]);
    if (!demo_report_evaluates(report)) {
        arrput(r->losses, value);
        arrput(r->steps, (double)report->round);
        r->norm_last = r->optim.norm;
        r->tokens += report->tokens;
        r->seconds += report->seconds;
        demo_progress_step(&r->progress, report->round, value, report->tokens);
    }
    if (!demo_logs_write(&r->logs, report)) return;
    (void)seqpar_fail(&r->trouble, SEQPAR_ERR_FILE_WRITE, "%s", r->logs.why);
    demo_interrupted = DEMO_TROUBLE;
}

static void demo_log_step(demo_rank *r, const double *means, double lr,
                          const seqpar_batch *batch, double seconds) {
    const seqpar_pack_counts *n = &batch->counts;
    const demo_objective *o = r->job->objective;
    demo_report report = {.phase = "train",
                          .step = r->step,
                          .round = r->step,
                          .tokens = n->tokens,
                          .seconds = seconds};
    if (r->ctx.world->rank) return;
    demo_report_add(&report, "step", (double)r->step, DEMO_PLACE);
    for (int i = 0; i < o->columns; i++)
        demo_report_add(&report, o->column[i], means[i], DEMO_EXACT);
    if (r->experts.on) demo_report_add(&report, "aux_loss", r->experts.loss, DEMO_EXACT);
    demo_report_add(&report, "grad_norm", r->optim.norm, DEMO_EXACT);
    demo_report_add(&report, "learning_rate", lr, DEMO_EXACT);
    demo_report_add(&report, "rows", (double)batch->rows, DEMO_WHOLE);
    demo_report_add(&report, "tokens", (double)n->tokens, DEMO_WHOLE);
    demo_report_add(&report, "supervised_tokens", (double)n->supervised, DEMO_WHOLE);
    demo_report_add(&report, "tokens_per_second", (double)n->tokens / seconds, DEMO_TENTHS);
    demo_log(r, &report);
}

/* Said once: ranks that stand idle, or wait for the busiest. */
static void demo_notice_balance(demo_rank *r, const seqpar_batch *batch) {
    int64_t ranks = r->ctx.sp_size;
    seqpar_balance b;
    char fix[128] = "use longer rows (--packing_samples, --pack_len) or fewer ranks";
    if (seqpar_split_balance(NULL, &b, batch->row, batch->rows, r->job->layout, ranks) ||
        !seqpar_balance_poor(&b, ranks))
        return;
    if (b.better_chunks)
        snprintf(fix, sizeof fix,
                 "--chunks %lld would even it out (the longest row is cut into %lld)",
                 (long long)b.better_chunks, (long long)b.chunks);
    demo_progress_say(&r->progress,
                      "notice: of %lld sequence-parallel ranks %lld have no token in the first "
                      "step, and the busiest has %lld where the mean is %lld; %s",
                      (long long)ranks, (long long)b.idle, (long long)b.most,
                      (long long)(b.tokens / ranks), fix);
}

/* The optimizer's step over a window that is open. */
static seqpar_status demo_step_window(demo_rank *r, demo_window *w, double lr, double *means) {
    const demo_job *job = r->job;
    const seqpar_llama_run run = demo_run_desc(job);
    const demo_objective *o = job->objective;
    int64_t accumulation = demo_accumulation(job, w->batch.rows), first, count;
    double weight;
    seqpar_status status = o->before ? o->before(r, w) : SEQPAR_OK;
    if (!status)
        status = seqpar_step_begin(&r->ctx, &r->optim, w->batch.row, w->batch.rows, job->layout,
                                   accumulation);
    if (!status)
        status = demo_experts_begin(&r->ctx, &r->experts, &r->model, &r->optim, w->batch.row,
                                    accumulation, &run, job->config.aux_loss_coef);
    for (int64_t i = 0; !status && i < accumulation; i++) {
        status = seqpar_step_rows(&r->ctx, &r->optim, i, &first, &count);
        if (!status) status = o->rows(r, w, first, count, i);
    }
    if (!status) status = o->total(r, w, means, &weight);
    if (!status) status = demo_experts_end(&r->ctx, &r->experts);
    return status ? status
                  : seqpar_step_end(&r->ctx, &r->optim, r->model.params.data,
                                    r->model.elements, lr);
}

static seqpar_status demo_step(demo_rank *r) {
    const demo_job *job = r->job;
    demo_window w = {.set = &job->train, .which = demo_step_documents(r, r->step)};
    double means[DEMO_COLUMNS] = {0}, lr = demo_learning_rate(job, r->step);
    double began = demo_seconds();
    seqpar_status status = demo_window_open(r, &w, job->objective->documents_per_unit, 0);
    if (!status && r->ctx.world->rank == 0 && !arrlen(r->losses))
        demo_notice_balance(r, &w.batch);
    if (!status) status = demo_step_window(r, &w, lr, means);
    if (!status) {
        demo_average_step(&r->ctx, &r->model, &r->average);
        r->step++;
        demo_log_step(r, means, lr, &w.batch, demo_seconds() - began);
    }
    demo_window_close(&w);
    return status;
}

/* Did anybody press Ctrl-C? Everybody must answer alike, also where one process alone was
   told. */
static seqpar_status demo_stop_wanted(demo_rank *r, int *stop) {
    int64_t flag = demo_interrupted;
    seqpar_status status = seqpar_comm_max_i64(r->ctx.world, &flag, 1);
    *stop = flag != 0;
    if (*stop) demo_interrupted = (sig_atomic_t)flag;
    if (*stop) demo_stopped = (sig_atomic_t)flag;
    return status;
}

/* ---- evaluation: the mean over the whole set, in windows; equal means stay what they are ---- */

static void demo_say_evaluation(demo_rank *r, double weight) {
    const demo_objective *o = r->job->objective;
    demo_report report = {.phase = "eval", .step = r->step};
    if (r->ctx.world->rank) return;
    demo_progress_say(&r->progress, "step %lld: evaluation loss %.6f%s over %.0f %s",
                      (long long)r->step, r->eval_means[0], o->measure, weight, o->weight);
    for (int i = 1; i < o->columns; i++)
        demo_progress_say(&r->progress, "           %s %.6f", o->column[i], r->eval_means[i]);
    demo_report_add(&report, "step", (double)r->step, DEMO_PLACE);
    for (int i = 0; i < o->columns; i++)
        demo_report_add(&report, o->column[i], r->eval_means[i], DEMO_EXACT);
    demo_report_add(&report, o->weight, weight, DEMO_WHOLE);
    demo_log(r, &report);
}

static seqpar_status demo_evaluate(demo_rank *r, int *stop) {
    const demo_job *job = r->job;
    const demo_objective *o = job->objective;
    double weight = 0, all = 0, means[DEMO_COLUMNS];
    seqpar_status status = SEQPAR_OK;
    memset(r->eval_means, 0, sizeof r->eval_means);
    for (int64_t i = 0; !status && !*stop && i < demo_eval_windows(job); i++) {
        demo_window w = {.set = &job->eval, .which = demo_eval_documents(job, i)};
        status = demo_window_open(r, &w, o->documents_per_unit, 1);
        if (!status && o->before) status = o->before(r, &w);
        if (!status) status = demo_window_values(r, &w, o->rows);
        if (!status) status = o->total(r, &w, means, &weight);
        all += weight;
        for (int i = 0; !status && weight > 0 && i < o->columns; i++)
            r->eval_means[i] += (means[i] - r->eval_means[i]) * (weight / all);
        demo_window_close(&w);
        if (!status) status = demo_stop_wanted(r, stop);
    }
    if (!status && !*stop) demo_say_evaluation(r, all);
    return status;
}

/* ---- the run ---- */

/* NULL: no memory, or no GPU, which *error then says. Processes of one machine have a GPU
   each, the one the transport takes. */
static seqpar_device *demo_device(const demo_job *job, seqpar_error *error) {
    const demo_config *c = &job->config;
    int naive = !strcmp(c->device, "reference") && !demo_wants_bf16(c);
    if (c->dry_run)
        return demo_plan_device_new(demo_wants_bf16(c) ? SEQPAR_DTYPE_BF16
                                    : naive            ? SEQPAR_DTYPE_F64
                                                       : SEQPAR_DTYPE_F32,
                                    naive ? SEQPAR_DTYPE_F64 : SEQPAR_DTYPE_F32);
#ifdef DEMO_CUDA
    seqpar_cuda_desc cuda = {.ordinal = job->processes ? demo_environment("LOCAL_RANK", 0) : 0,
                             .storage = demo_wants_bf16(c) ? SEQPAR_DTYPE_BF16
                                                           : SEQPAR_DTYPE_F32,
                             .cublas = c->cublas};
    if (!strcmp(c->device, "cuda")) return seqpar_device_cuda(error, &cuda);
#endif
    (void)error;
    if (strcmp(c->device, "reference")) return seqpar_device_cpu(c->omp_threads);
    return demo_wants_bf16(c) ? seqpar_device_reference_bf16() : seqpar_device_reference();
}

/* Threads share weights that owners update; those on a GPU are left to each. */
static bool demo_shares_weights(const demo_job *job) {
    const demo_config *c = &job->config;
    return DEMO_RANKS_ARE_THREADS && !job->processes && job->dp * c->ring_attn_size > 1 &&
           c->zero_stage > 0 && strcmp(c->device, "cuda");
}

/* Runs the job's ranks by `run`, a function like seqpar_run_threads. */
typedef seqpar_status (*demo_run_fn)(int64_t ranks, seqpar_rank_fn fn, void *user,
                                     seqpar_error *error);
static seqpar_status demo_run_with(demo_job *job, demo_run_fn run, seqpar_rank_fn main,
                                   void *user, seqpar_error *error) {
    demo_shared shared = {0};
    if (demo_shares_weights(job)) shared.device = demo_device(job, error);
    job->shared = &shared;
    seqpar_status status = run(job->dp * job->config.ring_attn_size, main, user, error);
    job->shared = NULL;
    demo_shared_close(&shared);
    return status;
}

static seqpar_status demo_checkpoint(demo_rank *r) {
    const demo_config *c = &r->job->config;
    demo_state state = {.step = r->step,
                        .seed = c->seed,
                        .train_batch_size = c->train_batch_size,
                        .documents = r->job->usable_count,
                        .reference = r->reference};
    seqpar_safetensors_pair *notes = NULL;
    char folder[1110], shown[1024];
    if (r->saved == r->step) return SEQPAR_OK;
    snprintf(state.run, sizeof state.run, "%s", r->job->run.id);
    for (int64_t i = 0; i < arrlen(r->job->notes); i++)
        arrput(notes,
               ((seqpar_safetensors_pair){r->job->notes[i].key, r->job->notes[i].value}));
    state.notes = notes;
    state.note_count = arrlen(notes);
    demo_checkpoint_temporary(folder, sizeof folder, c->ckpt_path, r->step);
    seqpar_status status = r->ctx.world->rank
                               ? SEQPAR_OK
                               : demo_begin_checkpoint(c->ckpt_path, &state, r->ctx.error);
    if (!status && r->job->objective->save) status = r->job->objective->save(r, &state, folder);
    if (r->average.share) state.average = &r->average;
    if (!status) status = demo_save_checkpoint(&r->ctx, &r->model, &r->optim, folder, &state);
    if (!status && state.average)
        status = demo_save_average(&r->ctx, &r->model, folder, state.average);
    if (r->ctx.world->rank == 0)
        status = demo_end_checkpoint(status, c->ckpt_path, &state, r->ctx.error);
    arrfree(notes);
    r->saved = r->step;
    if (status || r->ctx.world->rank) return status;
    demo_forget_checkpoints(c->ckpt_path, r->job->run.id, c->max_ckpt_num, r->step);
    demo_progress_say(&r->progress, "step %lld: checkpoint in %s", (long long)r->step,
                      seqpar_escape(shown, sizeof shown, c->ckpt_path));
    return SEQPAR_OK;
}

static seqpar_status demo_resume(demo_rank *r) {
    const demo_config *c = &r->job->config;
    demo_state state = {0};
    char folder[1100];
    demo_checkpoint_path(folder, sizeof folder, c->ckpt_path, r->job->run.from);
    seqpar_status status = demo_load_checkpoint(&r->ctx, &r->model, &r->optim, folder,
                                                r->job->run.from, &state);
    if (!status) status = demo_load_average(&r->ctx, &r->model, folder, &r->average);
    if (status) return status;
    if (r->reference && state.reference && r->reference != state.reference)
        return seqpar_fail(r->ctx.error, SEQPAR_ERR_OPTION,
                           "the checkpoint in %.300s was trained against another reference "
                           "model; give the same --pretrain or --ref_pretrain to go on",
                           c->ckpt_path);
    r->saved = r->step = state.step;
    return r->job->objective->load_state ? r->job->objective->load_state(r, &state) : SEQPAR_OK;
}

/* Ranks that are processes may have been started with different options or files: they would
   wait for each other, or train something that nobody asked for. */
static seqpar_status demo_ranks_agree(const demo_job *job, seqpar_comm *world) {
    int64_t count = arrlen(job->told);
    int64_t *own = (int64_t *)demo_room(count * (world->size + 1) + world->size, sizeof *own);
    int64_t *all = own + count, *bytes = all + count * world->size;
    for (int64_t i = 0; i < count; i++) own[i] = job->told[i].digest;
    for (int64_t p = 0; p < world->size; p++) bytes[p] = count * 8;
    seqpar_status status = seqpar_comm_all_gather(world, all, own, bytes, "options");
    for (int64_t i = 0; !status && i < count * world->size; i++)
        if (all[i] != all[i % count])
            status = seqpar_fail(world->error, SEQPAR_ERR_OPTION,
                                 "%s%s of rank %lld is not that of rank 0; start all ranks "
                                 "with the same options and files",
                                 job->told[i % count].dashes, job->told[i % count].name,
                                 (long long)(i / count));
    free(own);
    return status;
}

/* Of weights that all ranks share, which rank 0 has in its count. */
static int64_t demo_shared_bytes(const demo_rank *r) {
    return r->ctx.world->rank == 0 ? r->job->shared->bytes : 0;
}

/* The most that a rank has had at one time. */
static int64_t demo_peak_bytes(const demo_rank *r) {
    return r->ctx.memory.total_peak + demo_shared_bytes(r);
}

static seqpar_status demo_rank_open(demo_rank *r, seqpar_comm *world) {
    const demo_config *c = &r->job->config;
    seqpar_optim_desc optim = {.kind = !strcmp(c->optim, "sgd") ? SEQPAR_OPTIM_SGD
                                                                : SEQPAR_OPTIM_ADAMW,
                               .zero_stage = (int)c->zero_stage,
                               .beta1 = c->adam_betas[0],
                               .beta2 = c->adam_betas[1],
                               .eps = c->adam_eps,
                               .decay = c->l2,
                               .max_norm = c->max_norm,
                               .params_shared = r->job->shared->device != NULL};
    /* before a group is made of different numbers of ranks */
    seqpar_status status = demo_ranks_agree(r->job, world);
    if (status) return status;
    r->device = demo_device(r->job, world->error);
    status = seqpar_ctx_open(&r->ctx, world, r->device, c->ring_attn_size);
    if (!status) status = demo_model_open(&r->ctx, &r->model, &r->job->model, r->job->shared);
    if (!status)
        status = seqpar_optim_open(&r->ctx, &r->optim, r->model.tensors, r->model.tensor_count,
                                   &optim);
    if (!status) status = demo_begin_model(&r->ctx, &r->model, c->pretrain, c->seed);
    if (!status && c->enable_ema)
        status = demo_average_open(&r->ctx, &r->model, &r->average, c->ema_beta);
    if (!status && r->job->objective->open) status = r->job->objective->open(r);
    r->saved = DEMO_NOTHING_SAVED;
    if (!status && r->job->run.from != DEMO_NOTHING_SAVED) status = demo_resume(r);
    if (!status && world->rank == 0 && demo_logs_open(&r->logs, &r->job->logs))
        status = seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_OPEN, "%s", r->logs.why);
    return status;
}

/* In the form of the folder that training began with; without one, with the ids of a token file. */
static seqpar_status demo_save_model(demo_rank *r, const seqpar_llama *model,
                                     const char *folder, demo_average *average) {
    const demo_config *c = &r->job->config;
    demo_save_form form = {.source = c->pretrain,
                      .dtype = demo_dtype_named(c->save_dtype),
                      .shard_bytes = demo_size_named(c->max_shard_size)};
    const demo_token_file *f = c->pretrain ? NULL : r->job->train.file;
    seqpar_status status = demo_save_folder(&r->ctx, model, folder, &form, average);
    return status || !f || r->ctx.world->rank
               ? status
               : demo_source_ids(folder, f->head->bos, f->head->eos, f->head->pad, r->ctx.error);
}

/* Collective: the average as a model folder of its own. */
static seqpar_status demo_average_save(demo_rank *r) {
    char folder[1280];
    if (!r->average.share) return SEQPAR_OK;
    snprintf(folder, sizeof folder, "%s/ema", r->job->config.save_path);
    seqpar_status status = r->ctx.world->rank == 0 ? demo_make_folder(folder, r->ctx.error)
                                                   : SEQPAR_OK;
    return status ? status : demo_save_model(r, &r->model, folder, &r->average);
}

static seqpar_status demo_draw_loss(demo_rank *r) {
    char path[1280], why[512];
    demo_series series = {
        .name = "training loss", .x = r->steps, .y = r->losses, .points = arrlen(r->losses)};
    demo_plot plot = {.title = "Training loss",
                      .x_label = "optimizer step",
                      .y_label = r->job->objective->measure[0] ? "loss, nats a token" : "loss",
                      .series = &series,
                      .series_count = 1};
    snprintf(path, sizeof path, "%s/training_loss.svg", r->job->config.save_path);
    return demo_plot_write(path, &plot, why, sizeof why)
               ? seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_WRITE, "%s", why)
               : SEQPAR_OK;
}

/* The final model, by rank 0. Where it cannot be written, a checkpoint keeps it. */
static seqpar_status demo_finish(demo_rank *r, seqpar_status (*write)(demo_rank *r),
                                 int *stop) {
    seqpar_error *error = r->ctx.error;
    int64_t failed = 0;
    r->ctx.error = &r->trouble;
    if (r->ctx.world->rank == 0) failed = write(r) != SEQPAR_OK;
    r->ctx.error = error;
    seqpar_status status = seqpar_comm_max_i64(r->ctx.world, &failed, 1);
    *stop = failed != 0;
    return !status && failed && r->step ? demo_checkpoint(r) : status;
}

static seqpar_status demo_write_model(demo_rank *r) {
    /* it may have gone since */
    seqpar_status status = demo_make_folder(r->job->config.save_path, r->ctx.error);
    if (!status) status = demo_save_model(r, &r->model, r->job->config.save_path, NULL);
    if (!status && r->job->objective->saved) status = r->job->objective->saved(r);
    return status || !r->job->config.plot_loss ? status : demo_draw_loss(r);
}

static seqpar_status demo_train(demo_rank *r) {
    const demo_config *c = &r->job->config;
    int stop = 0, evaluates = arrlen(r->job->eval.documents) > 0;
    seqpar_status status = demo_stop_wanted(r, &stop);
    /* nothing is left to train */
    if (!status && !stop && evaluates && r->step == r->job->total_steps)
        status = demo_evaluate(r, &stop);
    while (!status && !stop && r->step < r->job->total_steps) {
        status = demo_step(r);
        if (!status) status = demo_stop_wanted(r, &stop);
        int due = c->save_steps > 0 && r->step % c->save_steps == 0;
        if (!status && (due || stop)) status = demo_checkpoint(r);
        int evaluate = evaluates && !stop &&
                       (r->step == r->job->total_steps ||
                        (c->eval_steps > 0 && r->step % c->eval_steps == 0));
        if (!status && evaluate) status = demo_evaluate(r, &stop);
        if (!status && evaluate && stop) status = demo_checkpoint(r);
    }
    if (!status && !stop) status = demo_finish(r, demo_write_model, &stop);
    r->stopped = stop;
    return status;
}

static seqpar_status demo_say_totals(demo_rank *r) {
    const demo_objective *o = r->job->objective;
    bool trained = arrlen(r->losses) > 0;
    double first = trained ? r->losses[0] : NAN, last = trained ? arrlast(r->losses) : NAN;
    const char *evaluates = o->evaluates ? o->evaluates : o->column[0];
    char number[4][32];
    double speed = r->seconds > 0 ? (double)r->tokens / r->seconds : 0.0;
    bool evaluated = arrlen(r->job->eval.documents) > 0;
    char shown[1024];
    demo_progress_end(&r->progress);
    if (r->stopped) {
        const char *how = r->trouble.status ? "stopped" : "interrupted";
        if (r->step)
            fprintf(stderr, "%s after step %lld; go on with --load_checkpoint\n", how,
                    (long long)r->step);
        else
            fprintf(stderr, "%s before the first step\n", how);
        return SEQPAR_OK;
    }
    if (r->job->config.json) {
        printf("{\"steps\": %lld, \"%s_first\": %s, \"%s_last\": %s, \"grad_norm\": %s, "
               "\"tokens_per_second\": %.1f",
               (long long)r->step, o->column[0], demo_json_number(number[0], first),
               o->column[0], demo_json_number(number[1], last),
               demo_json_number(number[2], trained ? r->norm_last : NAN), speed);
        if (evaluated)
            printf(", \"eval_%s\": %s", evaluates,
                   demo_json_number(number[3], r->eval_means[0]));
        printf("}\n");
    } else {
        if (trained)
            printf("%s %.6f -> %.6f, gradient norm %.6f, %.0f tokens/s, model in %s\n",
                   o->column[0], first, last, r->norm_last, speed,
                   seqpar_escape(shown, sizeof shown, r->job->config.save_path));
        else
            printf("nothing to train: step %lld of %lld is done, model in %s\n",
                   (long long)r->step, (long long)r->job->last_step,
                   seqpar_escape(shown, sizeof shown, r->job->config.save_path));
        if (evaluated)
            printf("evaluation %s %.6f%s\n", evaluates, r->eval_means[0], o->measure);
    }
    if (!fflush(stdout) && !ferror(stdout)) return SEQPAR_OK;
    return seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_WRITE,
                       "cannot write the closing figures: %s; the model is in %.300s",
                       strerror(errno), r->job->config.save_path);
}

static seqpar_status demo_rank_logs_close(demo_rank *r) {
    return demo_logs_close(&r->logs)
               ? seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_WRITE, "%s", r->logs.why)
               : SEQPAR_OK;
}

static void demo_rank_close(demo_rank *r) {
    (void)demo_logs_close(&r->logs);
    arrfree(r->losses);
    arrfree(r->steps);
    free(r->order);
    if (r->job->objective->close) r->job->objective->close(r);
    demo_average_close(&r->average);
    demo_experts_free(&r->experts);
    seqpar_optim_close(&r->ctx, &r->optim);
    seqpar_llama_close(&r->ctx, &r->model);
    seqpar_ctx_close(&r->ctx);
    seqpar_device_close(r->device);
}

static seqpar_status demo_rank_main(seqpar_comm *world, void *user) {
    demo_rank r;
    memset(&r, 0, sizeof r);
    r.job = (const demo_job *)user;
    seqpar_status status = demo_rank_open(&r, world);
    if (world->rank == 0)
        demo_progress_begin(
            &r.progress, r.step * r.job->rounds / (r.job->last_step > 0 ? r.job->last_step : 1),
            r.job->rounds, r.job->config.logging_steps);
    r.progress.round = r.job->objective->round;
    r.progress.value = r.job->objective->column[0];
    if (!status)
        status = r.job->objective->train ? r.job->objective->train(&r) : demo_train(&r);
    if (!status && !r.stopped) status = demo_average_save(&r);
    /* a run that was killed while it did */
    if (!status && world->rank == 0 && r.saved != DEMO_NOTHING_SAVED)
        demo_forget_checkpoints(r.job->config.ckpt_path, r.job->run.id,
                                r.job->config.max_ckpt_num, r.saved);
    if (!status) status = demo_rank_logs_close(&r);
    if (!status && world->rank == 0) status = demo_say_totals(&r);
    /* the cause, also where its checkpoint could not be written either */
    if (r.trouble.status) {
        if (status)
            demo_progress_say(&r.progress, "notice: nor could a checkpoint be written: %s",
                              world->error->text);
        *world->error = (seqpar_error){0};
        status = seqpar_fail(world->error, r.trouble.status, "%s", r.trouble.text);
    }
    if (status && world->rank == 0) demo_progress_end(&r.progress);
    demo_rank_close(&r);
    return status;
}

/* OpenMP threads that spin while they wait take the cores from the other ranks. The runtime
   reads this when it is loaded, so the program starts itself once more. */
static void demo_wait_passively(char **argv) {
    if (getenv("OMP_WAIT_POLICY")) return;
    setenv("OMP_WAIT_POLICY", "passive", 1);
    execv("/proc/self/exe", argv);
}

static void demo_job_close(demo_job *job) {
    demo_run_close(&job->run);
    arrfree(job->notes);
    demo_data_free(&job->train);
    demo_data_free(&job->eval);
    free(job->usable);
    arrfree(job->told);
}

static void demo_job_say(const demo_job *job) {
    const demo_config *c = &job->config;
    char warning[512], shown[512];
    int64_t positions;
    if (job->rank) return; /* one process speaks */
    demo_template_checked(c->input_template, warning, sizeof warning);
    if (*warning) fprintf(stderr, "notice: %s\n", seqpar_escape(shown, sizeof shown, warning));
    if (c->pretrain && (positions = demo_config_positions(c->pretrain)) &&
        positions < c->max_len)
        fprintf(stderr,
                "notice: the model was made for texts of %lld tokens "
                "(max_position_embeddings), --max_len is %lld\n",
                (long long)positions, (long long)c->max_len);
    if (c->pretrain && job->train.file && !demo_folder_has(c->pretrain, "tokenizer.json"))
        fprintf(stderr,
                "notice: %s has no tokenizer.json, so nothing says whether its tokens are those "
                "of the token file\n",
                seqpar_escape(shown, sizeof shown, c->pretrain));
    if (c->load_checkpoint && job->run.from == DEMO_NOTHING_SAVED)
        fprintf(stderr,
                "notice: nothing is saved in %s yet; training starts from the beginning\n",
                seqpar_escape(shown, sizeof shown, c->ckpt_path));
    if (job->run.from != DEMO_NOTHING_SAVED && job->run.from == job->last_step)
        fprintf(stderr,
                "notice: nothing is left to train, step %lld of %lld is done; the model is "
                "written once more\n",
                (long long)job->run.from, (long long)job->last_step);
    if (job->objective->needs_model && !c->pretrain && job->run.from == DEMO_NOTHING_SAVED)
        fprintf(stderr, "notice: without --pretrain a model with random weights is trained; "
                        "give the folder of one that was trained before\n");
    fprintf(stderr, "data: %s\n", job->train.summary);
    fprintf(
        stderr,
        "model: %lld layers, hidden %lld, %lld heads over %lld kv heads, vocab %lld; %s%s\n",
        (long long)job->model.layers, (long long)job->model.hidden, (long long)job->model.heads,
        (long long)job->model.kv_heads, (long long)job->model.vocab, c->device,
        demo_wants_bf16(c) ? " in bf16" : "");
    fprintf(stderr,
            "ranks: %lld data-parallel x %lld sequence-parallel (%s, %s), %sZeRO %lld, %lld "
            "steps of %lld %s\n",
            (long long)job->dp, (long long)c->ring_attn_size, seqpar_layout_name(job->layout),
            seqpar_schedule_name(job->schedule),
            job->processes ? "a process each, over NCCL, " : "", (long long)c->zero_stage,
            (long long)job->total_steps, (long long)c->train_batch_size, job->objective->unit);
}

#ifdef DEMO_NCCL
/* Launchers end processes by SIGTERM. While a process still waits for the others, a signal
   ends it at once. */
static seqpar_status demo_process_main(seqpar_comm *world, void *user) {
    demo_catch_all();
    return demo_rank_main(world, user);
}

/* All processes hear of the world's first failure: rank 0 says it, and the rank it happened
   on. */
static seqpar_status demo_process_run(demo_job *job, const seqpar_nccl_desc *desc) {
    demo_shared none = {0};
    seqpar_error error;
    job->shared = &none;
    seqpar_status status = seqpar_nccl_run(desc, demo_process_main, job, &error);
    job->shared = NULL;
    int64_t rank = desc->size ? desc->rank : job->rank;
    if (status && (!rank || error.rank == rank))
        fprintf(stderr, "error: %s (%s, rank %lld)\n", error.text, seqpar_status_name(status),
                (long long)error.rank);
    return status;
}
#endif

static seqpar_status demo_ranks_run(demo_job *job) {
    seqpar_error error;
#ifdef DEMO_NCCL
    /* others wait while rank 0 writes a checkpoint or asks a reward server */
    const seqpar_nccl_desc from_environment = {.limit_s = 3600};
    if (job->processes) return demo_process_run(job, &from_environment);
#endif
    demo_catch_all();
    seqpar_status status = demo_run_with(job, DEMO_RUN_RANKS, demo_rank_main, job, &error);
    if (status) fprintf(stderr, "error: %s (%s)\n", error.text, seqpar_status_name(status));
    return status;
}

/* Runs the job on its ranks. Returns the exit code. */
static int demo_job_run(demo_job *job) {
    seqpar_status status = demo_ranks_run(job);
    return status ? 1 : demo_stopped ? 128 + demo_stopped : 0;
}

#include "dry_run.h"

/* Where standard input, output or error is closed, the next file that is opened would take
   its number, and messages go into it. */
static void demo_standard_streams(void) {
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) _exit(2);
}

/* A folder says what its model is like: an option that says otherwise would not be followed. */
static int demo_shape_agrees(const demo_job *job, const demo_options *options, char *error,
                             size_t size) {
    const demo_config *c = &job->config;
    const seqpar_llama_config *m = &job->model;
    const struct {
        const char *name;
        double told, there;
    } shape[] = {{"hidden_size", (double)c->hidden_size, (double)m->hidden},
                 {"num_hidden_layers", (double)c->num_hidden_layers, (double)m->layers},
                 {"num_attention_heads", (double)c->num_attention_heads, (double)m->heads},
                 {"num_key_value_heads", (double)c->num_key_value_heads, (double)m->kv_heads},
                 {"head_dim", (double)c->head_dim, (double)m->head_dim},
                 {"intermediate_size", (double)c->intermediate_size, (double)m->intermediate},
                 {"tie_word_embeddings", (double)c->tie_word_embeddings, (double)m->tied},
                 {"rope_theta", c->rope_theta, m->rope_theta}};
    for (size_t i = 0; c->pretrain && i < sizeof shape / sizeof *shape; i++)
        if (demo_options_given(options, shape[i].name) &&
            (shape[i].told < shape[i].there || shape[i].told > shape[i].there))
            return snprintf(
                       error, size,
                       "--%s is %.15g, but the model in --pretrain %s has %.15g; leave it out",
                       shape[i].name, shape[i].told, c->pretrain, shape[i].there),
                   -1;
    return 0;
}

/* What a token file was made with is not changed any more. */
static void demo_say_settled(const demo_job *job, const demo_options *options) {
    static const char *const names[] = {"input_key",    "output_key",    "input_template",
                                        "prompt_key",   "chosen_key",    "rejected_key",
                                        "label_key",    "margin_key",    "truncation",
                                        "pretrain_mode", "train_on_inputs"};
    bool any = false;
    for (size_t i = 0; job->train.file && i < sizeof names / sizeof *names; i++) {
        if (!demo_options_given(options, names[i])) continue;
        fprintf(stderr, "%s--%s", any ? ", " : "notice: no effect on a token file, which "
                                               "demos/prepare.py has made: ", names[i]);
        any = true;
    }
    if (any) fputc('\n', stderr);
}

/* A trainer's main: from the command line to the exit code. */
__attribute__((unused)) static int demo_main(demo_job *job, const char *tool,
                                             const demo_binding *bindings, int count, int argc,
                                             char **argv) {
    demo_options options = {.tool = tool, .bindings = bindings, .binding_count = count};
    char error[8192], shown[1024], ckpt_path[DEMO_PATH_LIMIT + 64];
    cJSON_Hooks memory = {demo_json_room, free};
    demo_standard_streams();
    demo_writes_may_fail();
    demo_wait_passively(argv);
    cJSON_InitHooks(&memory);
    job->bindings = bindings;
    job->binding_count = count;
    int wrong = demo_options_parse(&options, argc, argv, error, sizeof error);
    if (!wrong && options.help_wanted)
        return demo_options_help(&options, stdout), demo_print_failed("the options");
    if (!wrong) {
        snprintf(ckpt_path, sizeof ckpt_path, "%s/checkpoints_%s", job->config.save_path, tool);
        if (!job->config.ckpt_path) job->config.ckpt_path = ckpt_path;
        wrong = demo_paths_fit(bindings, count, error, sizeof error) ||
                demo_job_open(job, error, sizeof error) ||
                demo_shape_agrees(job, &options, error, sizeof error) ||
                demo_job_begin(job, bindings, count, tool, error, sizeof error);
        if (!job->rank) demo_options_print_ignored(&options, stderr);
        if (!job->rank && !wrong) demo_say_settled(job, &options);
    }
    if (wrong) {
        demo_job_close(job);
        return fprintf(stderr, "error: %s\n", seqpar_escape(shown, sizeof shown, error)), 2;
    }
    demo_job_say(job);
    int code = job->config.dry_run ? demo_dry_run(job, tool) : demo_job_run(job);
    demo_job_close(job);
    return code;
}
#endif
