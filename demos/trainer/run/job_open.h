/* SPDX-License-Identifier: MIT OR Unlicense */
/* job_open.h - opens a job from parsed options: settles the options, reads the data, and counts
 * the steps. Reports all errors, one message each, before any rank starts. */
#ifndef DEMO_JOB_OPEN_H
#define DEMO_JOB_OPEN_H
#include "job_data.h"
#include "job_model.h"
#include "job_world.h"
#include "trainer/model/lora.h"

/* Computes the number of steps. An epoch has floor(units / train_batch_size) steps, at least
   one; the remaining units are left out. */
static void demo_job_steps(demo_job *job) {
    demo_config *c = &job->config;
    job->asked_batch = demo_job_typed(job, "train_batch_size") ? c->train_batch_size : 0;
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

/* Checks and sets the options of the objective. */
static int demo_job_prepare(demo_job *job, demo_error *error) {
    return job->objective->prepare ? job->objective->prepare(job, error) : 0;
}

/* Calls all functions, and collects the messages of those that fail. */
static int demo_settle_all(demo_job *job, int (*const *settle)(demo_job *, demo_error *),
                           int count, demo_error *error) {
    int wrong = 0;
    for (int i = 0; i < count; i++) {
        demo_error one = {""};
        if (settle[i](job, &one)) wrong = demo_fail_too(error, &one);
    }
    return wrong;
}

/* Settles all options that do not depend on data. Collects a message for each error. */
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

/* Fills the job from parsed options. Returns 0, or -1 with a message. */
static int demo_job_open(demo_job *job, demo_error *error) {
    job->run.from = DEMO_NOTHING_SAVED; /* until demo_job_begin looks for a checkpoint */
    if (demo_job_settle(job, error) || demo_job_data(job, error)) return -1;
    demo_job_steps(job);
    return 0;
}

/* Digest of everything that was read of a dataset, in order. */
static uint64_t demo_job_digest(const demo_job *job, const demo_dataset *set) {
    uint64_t digest = demo_digest_documents(set);
    return job->objective->digest ? job->objective->digest(job, set, digest) : digest;
}

/* Records digests of the options and the data, for demo_ranks_agree. omp_threads is not
   included: the number of threads changes no bit. */
static void demo_job_tell(demo_job *job, const demo_binding *bindings, int count) {
    /* size by type; a string has its own length */
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
    uint32_t program = 0; /* checksum of this executable; 0 if it cannot be read */
    if (job->processes > 1) demo_file_sum("/proc/self/exe", &size, &program);
    arrput(job->told, ((demo_told){"", "the program", (int64_t)program}));
}
#endif
