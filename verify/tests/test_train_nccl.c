/* SPDX-License-Identifier: MIT OR Unlicense */
/* Trainers whose ranks are processes over NCCL, as torchrun and others start them. Without a
   GPU a process is a thread with a job of its own that it shares with nobody, and NCCL is
   nccl_stand_in.h; with TEST_CUDA it trains on the CUDA device. What is saved has the bytes
   of the one-rank run. */
#ifdef TEST_CUDA
#include "stand_in/nccl_on_cpu.h"
#define DEMO_CUDA
#define DEVICE "cuda"
#define SLOW   1
extern int64_t cuda_on_cpu_late;
extern uint64_t cuda_on_cpu_seed;
#else
#include "stand_in/nccl_stand_in.h"
#define DEVICE "cpu"
#define SLOW   0
#endif
#define DEMO_NCCL
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "trainer/objective/preference.h"
#include "trainer/objective/sft.h"
#include "support/test.h"
#include <fcntl.h>

enum { PLACES = 4, WORDS = 64, DOCUMENTS = 24 };
typedef struct place { /* a process */
    pthread_t thread;
    demo_job job;
    demo_preference_config dpo;
    seqpar_status status;
    char line[1024], *words[WORDS];
    demo_error error;
} place;

/* ---- files of a run ---- */

static char folder[256], log_path[300];

/* documents: of the training data */
static void write_data(int documents) {
    char path[300];
    snprintf(path, sizeof path, "%s/data.jsonl", folder);
    FILE *file = fopen(path, "wb");
    for (int i = 0; file && i < documents; i++)
        fprintf(file, "{\"input\": \"%d+%d=\", \"output\": \"%d\", \"wrong\": \"%d\"}\n", i,
                3 * i, 4 * i, 5 * i + 1);
    if (!file || fclose(file)) exit(fprintf(stderr, "no file %s\n", path));
}

/* What trainers print goes to the log, and with -1 back to where it was. */
static void quiet(int on) {
    static int kept[2];
    fflush(NULL);
    int log = on > 0 ? open(log_path, O_WRONLY | O_CREAT | O_TRUNC, 0666) : -1;
    for (int i = 0; i < 2; i++) {
        if (on > 0) kept[i] = dup(i + 1);
        dup2(on > 0 ? log : kept[i], i + 1);
        if (on < 0) close(kept[i]);
    }
    if (log >= 0) close(log);
}

/* Lines of the log that begin like this; the last of them in line. */
static int logged(const char *begin, char *line, int size) {
    char one[1024];
    int count = 0;
    FILE *file = fopen(log_path, "rb");
    *line = 0;
    while (file && fgets(one, sizeof one, file))
        if (!strncmp(one, begin, strlen(begin))) {
            snprintf(line, (size_t)size, "%s", one);
            count++;
        }
    if (file) fclose(file);
    return count;
}

/* Are these files the same, and not empty? */
static int same_bytes(const char *a, const char *b) {
    FILE *x[2];
    long long bytes = 0;
    int c;
    for (int i = 0; i < 2; i++) {
        char path[400];
        snprintf(path, sizeof path, "%s/%s/model.safetensors", folder, i ? b : a);
        x[i] = fopen(path, "rb");
        if (!x[i] && i) fclose(x[0]);
        if (!x[i]) return 0;
    }
    while ((c = getc(x[0])) == getc(x[1]) && c != EOF) bytes++;
    fclose(x[0]);
    fclose(x[1]);
    return c == EOF && bytes > 1000;
}

/* ---- a run ---- */

static int place_open(place *p, int dpo, const char *save, const char *options) {
    static demo_options parsed;
    int argc = 0;
    memset(p, 0, sizeof *p);
    p->job.objective = dpo ? &demo_dpo : &demo_sft;
    p->job.options = &p->dpo;
    const demo_binding sft_bindings[] = {DEMO_TRAINER_BINDINGS(p->job.config),
                                         DEMO_SFT_BINDINGS(p->job.config)},
                       dpo_bindings[] = {DEMO_TRAINER_BINDINGS(p->job.config),
                                         DEMO_DPO_BINDINGS(p->dpo)};
    snprintf(
        p->line, sizeof p->line,
        "train --device " DEVICE
        " --dataset %s/data.jsonl --input_template {} --packing_samples --max_len 20 "
        "--pack_len 48 --cell 8 --train_batch_size 6 --micro_train_batch_size 1 --max_steps "
        "3 --num_hidden_layers 1 --hidden_size 16 --num_attention_heads 4 --intermediate_size "
        "16 --omp_threads 1 --save_path %s/%s --ckpt_path %s/%s/ckpt %s %s",
        folder, folder, save, folder, save,
        dpo ? "--prompt_key input --chosen_key output --rejected_key wrong"
            : "--input_key input --output_key output",
        options);
    for (char *word = strtok(p->line, " "); word && argc < WORDS; word = strtok(NULL, " "))
        p->words[argc++] = word;
    parsed = (demo_options){
        .tool = dpo ? "dpo" : "sft",
        .bindings = dpo ? dpo_bindings : sft_bindings,
        .binding_count = dpo ? (int)(sizeof dpo_bindings / sizeof *dpo_bindings)
                             : (int)(sizeof sft_bindings / sizeof *sft_bindings)};
    if (demo_options_parse(&parsed, argc, p->words, &p->error) ||
        demo_job_open(&p->job, &p->error))
        return 1;
    return demo_job_begin(&p->job, parsed.bindings, parsed.binding_count, parsed.tool,
                          &p->error)
               ? 1
               : 0;
}

/* What a launcher sets; NULL: nothing. */
static void launched(const char *world_size, const char *rank, const char *local_rank) {
    if (world_size)
        setenv("WORLD_SIZE", world_size, 1);
    else
        unsetenv("WORLD_SIZE");
    if (rank)
        setenv("RANK", rank, 1);
    else
        unsetenv("RANK");
    if (local_rank)
        setenv("LOCAL_RANK", local_rank, 1);
    else
        unsetenv("LOCAL_RANK");
}

/* NCCL from here on, and with 0 no more. */
static void stand_ready(int on, uint64_t seed) {
    if (on) stand_reset(seed, 0);
#ifdef TEST_CUDA
    cuda_on_cpu_late = on;
    cuda_on_cpu_seed = seed;
    stand_runs_kernels(on);
#endif
    (void)seed;
}

static void *place_main(void *argument) {
    place *p = (place *)argument;
    cudaSetDevice((int)p->job.nccl.rank);
    demo_job_say(&p->job);
    p->status = demo_run_and_report_process(&p->job);
    return NULL;
}

/* What the last of several processes is told besides, and how many documents lie on its
   disk. */
static struct {
    const char *options;
    int documents;
} last = {"", DOCUMENTS};

/* ranks places; fails: a call of rank 1 that NCCL refuses, NULL: none. */
static seqpar_status run_places(int64_t ranks, int dpo, const char *save, const char *options,
                                const char *fails) {
    static place places[PLACES];
    static uint64_t worlds;
    char file[300], number[2][8], more[512];
    seqpar_status status = SEQPAR_OK;
    snprintf(file, sizeof file, "%s/meeting", folder);
    quiet(1);
    stand_ready(1, test_seed + worlds++);
    if (fails) stand_fail(fails, 1, 40);
    for (int64_t r = 0; r < ranks; r++) {
        snprintf(number[0], sizeof number[0], "%d", (int)ranks);
        snprintf(number[1], sizeof number[1], "%d", (int)r);
        launched(number[0], number[1], NULL);
        if (r && r == ranks - 1) snprintf(more, sizeof more, "%s %s", options, last.options);
        if (r && r == ranks - 1) write_data(last.documents);
        if (test_expect(
                !place_open(&places[r], dpo, save, r && r == ranks - 1 ? more : options), "%s",
                places[r].error.text))
            continue;
        quiet(-1);
        return SEQPAR_ERR_OPTION;
    }
    write_data(DOCUMENTS);
    test_limit(600);
    for (int64_t r = 0; r < ranks; r++) {
        places[r].job.nccl = (seqpar_nccl_desc){
            .rank = r, .size = ranks, .keep_device = 1, .file = file};
        places[r].job.rank = r;
        if (pthread_create(&places[r].thread, NULL, place_main, &places[r])) abort();
    }
    for (int64_t r = 0; r < ranks; r++) pthread_join(places[r].thread, NULL);
    for (int64_t r = 0; r < ranks; r++) {
        if (places[r].status) status = places[r].status;
        demo_job_close(&places[r].job);
    }
    stand_ready(0, 1);
    launched(NULL, NULL, NULL);
    signal(SIGTERM, SIG_DFL);
    quiet(-1);
    test_expect(fails || (!stand.complaint[0] && !stand_leaks()[0]), "%s%s", stand.complaint,
                stand_leaks());
    return status;
}

/* In this process, as the environment says. Returns the exit code. */
static int run_here(int dpo, const char *save, const char *options) {
    static place p;
    quiet(1);
    int code = place_open(&p, dpo, save, options) ? 2 : demo_run_job(&p.job);
    if (code != 2) demo_job_close(&p.job);
    quiet(-1);
    return code;
}

/* ---- tests ---- */

static void expect_same(int64_t ranks, int dpo, const char *save, const char *options,
                        const char *want) {
    char line[512];
    seqpar_status status = run_places(ranks, dpo, save, options, NULL);
    logged("error: ", line, sizeof line);
    if (!test_expect(!status, "%s", line)) return;
    test_expect(logged("data: ", line, sizeof line) == 1,
                "not rank 0 alone says what is trained on");
    test_expect(same_bytes(save, want), "%s has other bytes than %s", save, want);
}

static int one_rank; /* exit code of the run "one", which tests compare others with */

static void test_worlds(int dpo) {
    static const struct {
        int64_t ranks;
        const char *options;
    } worlds[] = {{2, "--ring_attn_size 2"},
                  {3, "--ring_attn_size 3 --zero_stage 0"},
                  {4, "--ring_attn_size 2 --zero_stage 1"},
                  {2, "--data_parallel_size 2 --schedule llama3"}};
    const char *one = dpo ? "one_dpo" : "one";
    test_expect(!(dpo ? run_here(1, one, "") : one_rank), "one rank fails");
    /* the kernels take their time on the CPU */
    for (int i = dpo; i < (dpo || SLOW ? 3 : 4); i++) {
        expect_same(worlds[i].ranks, dpo, "many", worlds[i].options, one);
        test_end("train_nccl_%s on %lld ranks %s", dpo ? "dpo" : "sft",
                 (long long)worlds[i].ranks, worlds[i].options);
    }
}

/* A checkpoint of two ranks goes on with three. */
static void test_resume(void) {
    test_expect(!run_places(2, 0, "half",
                            "--ring_attn_size 2 --save_steps 2 --max_ckpt_num 1 --max_steps 2 "
                            "--lr_scheduler constant --warmup_steps 0",
                            NULL),
                "no checkpoint");
    test_expect(!run_here(0, "whole", "--lr_scheduler constant --warmup_steps 0"),
                "one rank fails");
    expect_same(3, 0, "half",
                "--ring_attn_size 3 --load_checkpoint --lr_scheduler constant --warmup_steps 0",
                "whole");
    test_expect(!same_bytes("one", "whole"), "two schedules train the same");
    test_end("train_nccl_resume on 2 ranks, then 3");
}

static int free_port(void) {
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t bytes = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof at) ||
        getsockname(fd, (struct sockaddr *)&at, &bytes))
        exit(1);
    close(fd);
    return ntohs(at.sin_port);
}

/* All from the environment: the path a real process takes; LOCAL_RANK is the GPU of
   transport and device. */
static void test_environment(void) {
    char port[16], line[512];
    snprintf(port, sizeof port, "%d", free_port());
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", port, 1);
    stand_ready(1, test_seed);
    launched("1", "0", "0");
    test_expect(!run_here(0, "env", "") && same_bytes("env", "one"),
                "WORLD_SIZE=1 trains something else");
    test_expect(stand_calls("ncclCommInitRankConfig", 0) == 1,
                "WORLD_SIZE=1 does not go over NCCL");
    launched("1", "0", "3");
    int code = run_here(0, "env", "");
    test_expect(stand_calls("ncclCommInitRankConfig", 3) == 1,
                "LOCAL_RANK 3 is not the transport's GPU");
    logged("error: ", line, sizeof line);
#ifdef TEST_CUDA
    test_expect(code == 1 && strstr(line, "no CUDA device 3"),
                "LOCAL_RANK 3 is not the device's GPU: %s", line);
#else
    test_expect(!code, "%s", line);
#endif
    stand_ready(0, 1);
    launched(NULL, NULL, NULL);
    test_end("train_nccl_environment");
}

static void expect_refused(const char *world_size, const char *rank, const char *options,
                           const char *text) {
    static place p;
    launched(world_size, rank, NULL);
    test_expect(place_open(&p, 0, "refused", options) && strstr(p.error.text, text),
                "WORLD_SIZE=%s RANK=%s %s: '%s' is not '%s'", world_size, rank ? rank : "",
                options, p.error.text, text);
    launched(NULL, NULL, NULL);
}

static void test_refused(void) {
    static place p;
    expect_refused(
        "6", "0", "--ring_attn_size 4",
        "6 processes were started, which is not data_parallel_size 1 x ring_attn_size 4");
    expect_refused(
        "2", "0", "--ring_attn_size 4",
        "2 processes were started, which is not data_parallel_size 1 x ring_attn_size 4");
    expect_refused(
        "4", "0", "--data_parallel_size 3",
        "4 processes were started, which is not data_parallel_size 3 x ring_attn_size 1");
    expect_refused("4", "0", "--world_size 2", "4 processes were started, world_size is 2");
    expect_refused("four", "0", "", "WORLD_SIZE is 'four'");
    expect_refused("-4", "0", "", "WORLD_SIZE is '-4'");
    expect_refused("4", "4", "", "RANK is '4'; give each of the 4 processes its own, 0 to 3");
    expect_refused("4", "1x", "", "RANK is '1x'");
    expect_refused("4", NULL, "", "RANK is ''");
    launched("4", "3", NULL);
    test_expect(!place_open(&p, 0, "refused", "--ring_attn_size 2") && p.job.dp == 2 &&
                    p.job.processes == 4 && p.job.rank == 3,
                "WORLD_SIZE 4 with ring_attn_size 2: %s, %lld data-parallel", p.error.text,
                (long long)p.job.dp);
    demo_job_close(&p.job);
    launched(NULL, NULL, NULL);
    test_end("train_nccl_world_size");
}

/* What srun sets instead. */
static void test_slurm(void) {
    static place p;
    setenv("SLURM_STEP_NUM_TASKS", "6", 1);
    setenv("SLURM_PROCID", "4", 1);
    setenv("SLURM_LOCALID", "1", 1);
    test_expect(!place_open(&p, 0, "refused", "--ring_attn_size 3") && p.job.dp == 2 &&
                    p.job.processes == 6 && p.job.rank == 4 && demo_local_rank() == 1,
                "srun: %s, rank %lld of %lld", p.error.text, (long long)p.job.rank,
                (long long)p.job.processes);
    demo_job_close(&p.job);
    launched("4", "2", "0"); /* who asks for something else gets it */
    test_expect(!place_open(&p, 0, "refused", "--ring_attn_size 2") && p.job.processes == 4 &&
                    p.job.rank == 2 && demo_local_rank() == 0,
                "WORLD_SIZE beside srun: %s, rank %lld", p.error.text, (long long)p.job.rank);
    demo_job_close(&p.job);
    unsetenv("SLURM_STEP_NUM_TASKS");
    unsetenv("SLURM_PROCID");
    unsetenv("SLURM_LOCALID");
    launched(NULL, NULL, NULL);
    test_end("train_nccl_slurm");
}

/* The failing rank says what happened, and rank 0; the third is silent. */
static void test_failure(void) {
    char line[512];
    seqpar_status status = run_places(3, 0, "fails", "--ring_attn_size 3", "ncclSend");
    test_expect(status && stand.failed, "a failing ncclSend goes unseen");
    int lines = logged("error: ", line, sizeof line);
    test_expect(lines == 2 && strstr(line, "rank 1"), "%d of 3 processes speak: %s", lines,
                line);
    test_end("train_nccl_failure_is_said_by_two");
}

/* Nobody starts to train with options or data that are not those of rank 0; threads may
   differ. */
static void expect_disagreement(const char *options, int documents, const char *text) {
    char line[512];
    last.options = options;
    last.documents = documents;
    seqpar_status status = run_places(3, 0, "disagree", "--ring_attn_size 3 --max_steps 1",
                                      NULL);
    logged("error: ", line, sizeof line);
    test_expect(text ? status == SEQPAR_ERR_OPTION && strstr(line, text) : !status,
                "%s with %d documents: %s %s", options, documents, seqpar_status_name(status),
                line);
    last.options = "";
    last.documents = DOCUMENTS;
}

static void test_disagreement(void) {
    expect_disagreement("--learning_rate 1e-4", DOCUMENTS,
                        "--learning_rate of rank 2 is not that of rank 0; start all ranks with "
                        "the same options and files");
    expect_disagreement("--adam_betas 0.9,0.96", DOCUMENTS, "--adam_betas of rank 2");
    expect_disagreement("--enable_ema", DOCUMENTS, "--enable_ema of rank 2");
    expect_disagreement("--layout stripe", DOCUMENTS, "--layout of rank 2");
    expect_disagreement("--ring_attn_size 1", DOCUMENTS, "--ring_attn_size of rank 2");
    expect_disagreement("--optim sgd --seed 7", DOCUMENTS, "--optim of rank 2");
    expect_disagreement("", DOCUMENTS - 1, "the training data of rank 2");
    expect_disagreement("--omp_threads 2", DOCUMENTS, NULL);
    test_end("train_nccl_disagreement");
}

/* A launcher ends its processes by SIGTERM: all stop after the same step, with a checkpoint. */
static void *launcher_main(void *path) {
    for (int i = 0; i < 60000 && access((const char *)path, F_OK); i++) usleep(1000);
    kill(getpid(), SIGTERM);
    return NULL;
}

static void test_sigterm(void) {
    char path[300], line[512];
    pthread_t launcher;
    snprintf(path, sizeof path, "%s/stopped/ckpt/latest", folder);
    unlink(path);
    if (pthread_create(&launcher, NULL, launcher_main, path)) abort();
    seqpar_status status = run_places(
        2, 0, "stopped", "--ring_attn_size 2 --save_steps 1 --max_steps 100000", NULL);
    pthread_join(launcher, NULL);
    logged("error: ", line, sizeof line);
    test_expect(!status && demo_interrupted == SIGTERM, "%s", line);
    test_expect(logged("interrupted after step ", line, sizeof line) == 1,
                "not rank 0 alone says where it was interrupted");
    demo_interrupted = 0;
    demo_stopped = 0;
    demo_caught = 0;
    test_end("train_nccl_sigterm");
}

int main(int argc, char **argv) {
    seqpar_error error = {0};
    test_begin(argc, argv);
    snprintf(folder, sizeof folder, "build/train_nccl_%s", DEVICE);
    snprintf(log_path, sizeof log_path, "%s/log", folder);
    char clear[300];
    /* checkpoints of an earlier run are refused */
    snprintf(clear, sizeof clear, "rm -rf %s", folder);
    if (system(clear) || demo_make_folder(folder, &error))
        return fprintf(stderr, "%s\n", error.text), 1;
    write_data(DOCUMENTS);
    launched(NULL, NULL, NULL);
    one_rank = run_here(0, "one", "");
    TEST(test_refused());
    TEST(test_slurm());
    TEST(test_worlds(0));
    TEST(test_environment());
    TEST(test_worlds(1));
    TEST(test_resume());
    TEST(test_failure());
    TEST(test_disagreement());
    TEST(test_sigterm());
    return test_summary();
}
