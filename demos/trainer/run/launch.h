/* SPDX-License-Identifier: MIT OR Unlicense */
/* launch.h - runs the ranks, as threads of this process or as processes of a launcher, and
 * prints the messages before and after. */
#ifndef DEMO_LAUNCH_H
#define DEMO_LAUNCH_H
#include "rank_main.h"
#include "trainer/base/escape.h"

/* Makes idle OpenMP threads sleep instead of spin. Spinning threads take cores from other
   ranks, but sleeping threads wake slowly. So this is called only if there may be more threads
   than cores. The OpenMP runtime reads the variable when it is loaded, so the program executes
   itself again. */
static void demo_wait_passively(char **argv) {
    if (getenv("OMP_WAIT_POLICY")) return;
    setenv("OMP_WAIT_POLICY", "passive", 1);
    execv("/proc/self/exe", argv);
}

/* Are the ranks processes? Then idle threads always sleep, since a process does not know how
   many threads the other processes on its host have. */
static bool demo_are_processes(void) {
    const char *name = "";
    return demo_launched(&name) > 1 || demo_environment("WORLD_SIZE", 0) > 1;
}

/* Does --omp_threads give more threads than there are cores? Without the option the cores are
   divided among the ranks. */
static bool demo_threads_crowd(const demo_config *c) {
    int64_t dp = c->data_parallel_size > 1 ? c->data_parallel_size : 1;
    double threads = (double)c->omp_threads * (double)dp * (double)c->ring_attn_size;
    return c->omp_threads > 1 && threads > (double)sysconf(_SC_NPROCESSORS_ONLN);
}

static void demo_job_close(demo_job *job) {
    demo_run_close(&job->run);
    arrfree(job->notes);
    demo_data_free(&job->train);
    demo_data_free(&job->eval);
    free(job->usable);
    arrfree(job->told);
}

/* Prints the groups of ranks. The line about ranks, printed before, describes only the first
   group. */
static void demo_groups_say(const demo_job *job) {
    char name[64], first[64] = "";
    for (int g = 0; job->groups > 1 && g < job->groups; g++) {
        job->objective->group_name(job, g, name);
        if (!g) snprintf(first, sizeof first, "%s", name);
        fprintf(stderr, "%s %s on %lld", g ? "," : "groups:", name,
                (long long)job->group_ranks[g]);
    }
    if (job->groups > 1) fprintf(stderr, " ranks; the line above is of %s\n", first);
}

static void demo_job_notices(const demo_job *job) {
    const demo_config *c = &job->config;
    char warning[512], shown[512];
    int64_t positions;
    demo_template_checked(c->input_template, warning, sizeof warning);
    if (*warning) fprintf(stderr, "notice: %s\n", demo_escape(shown, sizeof shown, warning));
    if (c->pretrain && (positions = demo_config_positions(c->pretrain)) &&
        positions < c->max_len)
        fprintf(stderr,
                "notice: the model was made for at most %lld positions "
                "(max_position_embeddings), but --max_len is %lld\n",
                (long long)positions, (long long)c->max_len);
    if (c->pretrain && job->train.file && !demo_folder_has(c->pretrain, "tokenizer.json"))
        fprintf(stderr,
                "notice: %s has no tokenizer.json, so it is unknown whether the token file was "
                "made with the same tokenizer\n",
                demo_escape(shown, sizeof shown, c->pretrain));
    if (c->load_checkpoint && job->run.from == DEMO_NOTHING_SAVED)
        fprintf(stderr,
                "notice: nothing is saved in %s yet; training starts from the beginning\n",
                demo_escape(shown, sizeof shown, c->ckpt_path));
    if (job->run.from != DEMO_NOTHING_SAVED && job->run.from == job->last_step)
        fprintf(stderr,
                "notice: training is complete, step %lld of %lld is done; the model is "
                "written again\n",
                (long long)job->run.from, (long long)job->last_step);
    if (job->objective->needs_model && !c->pretrain && job->run.from == DEMO_NOTHING_SAVED)
        fprintf(stderr, "notice: without --pretrain a new model with random weights is "
                        "trained; give --pretrain the folder of a model to start from that\n");
}

static void demo_job_say(const demo_job *job) {
    const demo_config *c = &job->config;
    char shown[512];
    if (job->rank) return; /* only one process prints */
    demo_job_notices(job);
    fprintf(stderr, "data: %s\n", job->train.summary);
    snprintf(shown, sizeof shown,
             job->model.attention_dropout > 0 ? ", attention_dropout %g" : "",
             job->model.attention_dropout);
    fprintf(
        stderr,
        "model: %lld layers, hidden %lld, %lld heads over %lld kv heads, vocab %lld%s; %s%s\n",
        (long long)job->model.layers, (long long)job->model.hidden, (long long)job->model.heads,
        (long long)job->model.kv_heads, (long long)job->model.vocab, shown, c->device,
        demo_wants_bf16(c) ? " in bf16" : "");
    if (job->objective->say) {
        job->objective->say(job);
        return;
    }
    fprintf(stderr,
            "ranks: %lld data-parallel x %lld sequence-parallel (%s, %s), %sZeRO %lld, %lld "
            "steps of %lld %s\n",
            (long long)job->dp, (long long)c->ring_attn_size, seqpar_layout_name(job->layout),
            seqpar_schedule_name(job->schedule),
            job->processes ? "a process each, over " DEMO_PROCESSES_OVER ", " : "",
            (long long)c->zero_stage, (long long)job->total_steps,
            (long long)c->train_batch_size, job->objective->unit);
    demo_groups_say(job);
    demo_settled_say(job);
}

#if defined DEMO_NCCL || defined DEMO_MPI
/* Catches signals from here on, since launchers end processes with SIGTERM. Earlier, while a
   process waits for the other processes to connect, a signal ends it at once. */
static seqpar_status demo_process_main(seqpar_comm *world, void *user) {
    demo_catch_all();
    return demo_rank_main(world, user);
}

#ifdef DEMO_MPI
static seqpar_status demo_run_process(demo_job *job, seqpar_error *error) {
    seqpar_mpi_limit(job->world, (double)job->config.ddp_timeout);
    seqpar_status status = seqpar_mpi_end(job->world, demo_process_main(job->world, job));
    job->world = NULL;
    *error = job->world_error;
    return status;
}
#else
static seqpar_status demo_run_process(demo_job *job, seqpar_error *error) {
    seqpar_nccl_desc desc = job->nccl;
    desc.limit_s = (double)job->config.ddp_timeout;
    return seqpar_nccl_run(&desc, demo_process_main, job, error);
}
#endif

/* Runs this process's rank. The first failure of any rank reaches all processes; rank 0 and the
   rank where it happened print it. */
static seqpar_status demo_run_and_report_process(demo_job *job) {
    demo_shared none = demo_shared_of(&job->config);
    seqpar_error error;
    job->shared = &none;
    seqpar_status status = demo_run_process(job, &error);
    job->shared = NULL;
    if (status && (!job->rank || error.rank == job->rank))
        fprintf(stderr, "error: %s (%s, rank %lld)\n", error.text, seqpar_status_name(status),
                (long long)error.rank);
    return status;
}
#endif

/* Closes the communicator of a process that has not trained. */
static void demo_leave(demo_job *job) {
#ifdef DEMO_MPI
    if (job->world) seqpar_mpi_end(job->world, SEQPAR_OK);
#endif
    job->world = NULL;
}

/* Prints each message on its own line. */
static void demo_errors_say(const char *text) {
    static char shown[4 * sizeof(demo_error)];
    demo_error one;
    for (size_t length; *text; text += length + !!text[length]) {
        length = strcspn(text, (const char[]){DEMO_ERROR_NEXT, 0});
        snprintf(one.text, sizeof one.text, "%.*s", (int)length, text);
        fprintf(stderr, "error: %s\n", demo_escape(shown, sizeof shown, one.text));
    }
}

/* Ends a job that failed before training. If the processes are connected, only one of them
   prints the error, and all of them end. Returns the exit code. */
static int demo_never_began(demo_job *job, const char *text) {
    bool mine = true;
#ifdef DEMO_MPI
    if (job->world) {
        seqpar_fail(job->world->error, SEQPAR_ERR_OPTION, "%s", text);
        seqpar_mpi_end(job->world, SEQPAR_ERR_OPTION);
        mine = job->world_error.rank == job->rank;
        job->world = NULL;
    }
#endif
    demo_job_close(job);
    if (mine) demo_errors_say(text);
    return 2;
}

static seqpar_status demo_run_ranks(demo_job *job) {
    seqpar_error error;
#if defined DEMO_NCCL || defined DEMO_MPI
    if (job->processes) return demo_run_and_report_process(job);
#endif
    demo_catch_all();
    seqpar_status status = demo_run_with(job, DEMO_RUN_RANKS, demo_rank_main, job, &error);
    if (status) fprintf(stderr, "error: %s (%s)\n", error.text, seqpar_status_name(status));
    return status;
}

/* Runs the job on its ranks. Returns the exit code. */
static int demo_run_job(demo_job *job) {
    seqpar_status status = demo_run_ranks(job);
    return status ? 1 : demo_stopped ? 128 + demo_stopped : 0;
}
#endif
