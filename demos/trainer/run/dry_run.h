/* SPDX-License-Identifier: MIT OR Unlicense */
/* dry_run.h - reports what a run would do, without training and without writing to disk
 * (--dry_run).
 *
 * Options, data, model folders and the checkpoint to resume from are read as for training; of
 * weights only names and shapes are read. To measure memory, every rank runs steps on a device
 * that computes nothing (plan_device.h), and the library counts its buffers. DEMO_WALKED steps
 * are run, spread from the next step to the last, and one step with the longest documents. One
 * step would not be enough: partial sums that wait for other documents take memory, and how
 * many wait depends on where documents end in a row. Memory outside of the library's buffers
 * (data, workspace of the device) is not counted. */
#ifndef DEMO_DRY_RUN_H
#define DEMO_DRY_RUN_H
#include "launch.h"
#include "trainer/base/escape.h"

/* Kinds of memory, in addition to those of the library. */
enum { DEMO_KIND_AVERAGE = SEQPAR_MEM_KINDS, DEMO_KIND_TOTAL, DEMO_KINDS };
static const char *const demo_kind_name[DEMO_KINDS] = {
    "weights",   "optimizer state", "saved activations", "scratch",    "exchange",
    "gradients", "offloaded",       "moving average",    "at one time"};

typedef struct {
    /* largest number of bytes on any rank; sum over ranks */
    int64_t rank[DEMO_KINDS], all[DEMO_KINDS];
} demo_memory;

typedef struct { /* the measurements of a dry run */
    const demo_job *job;
    demo_memory memory;
    int64_t parameters, learning, checkpoint_bytes, storage_bytes;
    /* counts of the next step; tokens and supervised as in seqpar_pack_counts */
    int64_t tokens, supervised, rows, micro_batches;
} demo_rehearsal;

typedef struct {
    const demo_job *job;
    const char *tool;
    /* with the options as given; with gradient_checkpointing inverted */
    demo_rehearsal walk[2];
    /* learning rates: at the peak, at the last step, at the end of the schedule */
    double peak, last, end;
} demo_forecast;

/* ---- steps: a sample from the next one to the last, and the largest ---- */

enum { DEMO_WALKED = 16 };

static int demo_by_length(const void *a, const void *b) {
    const int64_t *x = (const int64_t *)a, *y = (const int64_t *)b;
    if (x[0] != y[0]) return x[0] < y[0] ? 1 : -1;
    return x[1] < y[1] ? -1 : x[1] > y[1];
}

/* The first documents of the `count` longest usable units. Returns an stb_ds array of
   indices. */
static int64_t *demo_longest_units(const demo_job *job, int64_t count) {
    int64_t per_unit = job->objective->documents_per_unit, *which = NULL;
    int64_t *units = (int64_t *)demo_alloc(2 * job->usable_count, sizeof *units);
    for (int64_t i = 0; i < job->usable_count; i++) {
        units[2 * i + 1] = job->usable[i] * per_unit;
        for (int64_t k = 0; k < per_unit; k++)
            units[2 * i] += job->train.documents[job->usable[i] * per_unit + k].tokens;
    }
    qsort(units, (size_t)job->usable_count, 2 * sizeof *units, demo_by_length);
    for (int64_t i = 0; i < count && i < job->usable_count; i++)
        arrput(which, units[2 * i + 1]);
    free(units);
    return which;
}

/* Runs one step on the documents `which` and frees that list. walk: gets the counts of the
   step; may be NULL. */
static seqpar_status demo_walk_step(demo_rank *r, int64_t *which, demo_rehearsal *walk) {
    demo_window w = {.set = &r->job->train, .which = which};
    double means[DEMO_COLUMNS] = {0};
    seqpar_status status = demo_window_open(r, &w, r->job->objective->documents_per_unit, 0);
    if (!status) status = demo_step_window(r, &w, 0.0, means);
    if (walk) {
        walk->tokens = w.batch.counts.tokens;
        walk->supervised = w.batch.counts.supervised;
        walk->rows = w.batch.rows;
        walk->micro_batches = w.batch.micro_batches;
    }
    demo_window_close(&w);
    return status;
}

/* Runs the sample of steps and the step with the longest documents; walk gets the counts of the
   next step. */
static seqpar_status demo_walk_steps(demo_rank *r, demo_rehearsal *walk) {
    const demo_job *job = r->job;
    int64_t *units = demo_longest_units(job, job->config.train_batch_size), *which = NULL;
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; i < arrlen(units); i++)
        for (int64_t k = 0; k < job->objective->documents_per_unit; k++)
            arrput(which, units[i] + k);
    arrfree(units);
    int64_t left = job->last_step - r->step, some = left < DEMO_WALKED ? left : DEMO_WALKED;
    for (int64_t i = 0; !status && i < some; i++) {
        int64_t step = r->step + (i ? i * (left - 1) / (some - 1) : 0);
        status = demo_walk_step(r, demo_step_documents(r, step), i ? NULL : walk);
    }
    if (!status) return demo_walk_step(r, which, NULL);
    arrfree(which);
    return status;
}

/* Bytes of this rank's shard of the moving average. It is host memory, which a dry run does not
   allocate. */
static int64_t demo_average_bytes(const demo_rank *r) {
    int64_t rank = r->ctx.world->rank;
    const seqpar_llama *of = demo_learner(r);
    return r->job->config.enable_ema ? 8 * (demo_average_begin(&r->ctx, of, rank + 1) -
                                            demo_average_begin(&r->ctx, of, rank))
                                     : 0;
}

/* Gathers the peak of every kind of memory: the maximum and the sum over ranks. Collective. */
static seqpar_status demo_memory_gather(demo_rank *r, demo_memory *m) {
    int64_t ranks = r->world->size, own[DEMO_KINDS];
    int64_t *bytes = (int64_t *)demo_alloc(ranks * (1 + DEMO_KINDS), sizeof *bytes);
    int64_t *all = bytes + ranks;
    memcpy(own, r->ctx.memory.peak, sizeof r->ctx.memory.peak);
    own[DEMO_KIND_AVERAGE] = demo_average_bytes(r);
    own[SEQPAR_MEM_WEIGHTS] += demo_shared_bytes(r);
    own[DEMO_KIND_TOTAL] = demo_peak_bytes(r) + own[DEMO_KIND_AVERAGE];
    for (int64_t i = 0; i < ranks; i++) bytes[i] = (int64_t)sizeof own;
    seqpar_status status = seqpar_comm_all_gather(r->world, all, own, bytes, "memory");
    memset(m, 0, sizeof *m);
    for (int64_t i = 0; i < ranks * DEMO_KINDS; i++) {
        int64_t *most = &m->rank[i % DEMO_KINDS];
        if (all[i] > *most) *most = all[i];
        m->all[i % DEMO_KINDS] += all[i];
    }
    free(bytes);
    return status;
}

static void demo_walk_sizes(const demo_rank *r, demo_rehearsal *walk) {
    static const int states[] = {SEQPAR_STATE_M, SEQPAR_STATE_V, SEQPAR_STATE_MASTER};
    walk->parameters = demo_values_of(&r->model);
    walk->learning = demo_values_of(demo_learner(r));
    walk->storage_bytes = seqpar_dtype_bytes(r->device->storage);
    walk->checkpoint_bytes = walk->learning * walk->storage_bytes;
    for (int i = 0; i < 3; i++)
        if (seqpar_optim_keeps(&r->ctx, &r->optim, states[i]))
            walk->checkpoint_bytes += walk->learning *
                                      seqpar_dtype_bytes(r->device->accumulator);
}

/* A rank of the dry run: opens everything, runs the steps, and measures memory. */
static seqpar_status demo_walk_main(seqpar_comm *world, void *user) {
    demo_rehearsal walk = *(const demo_rehearsal *)user;
    demo_rank r;
    memset(&r, 0, sizeof r);
    r.job = walk.job;
    seqpar_status status = demo_rank_open(&r, world);
    if (!status) demo_walk_sizes(&r, &walk);
    if (!status)
        status = r.job->objective->walk ? r.job->objective->walk(&r)
                                        : demo_walk_steps(&r, &walk);
    if (!status) status = demo_memory_gather(&r, &walk.memory);
    if (!status && world->rank == 0) *(demo_rehearsal *)user = walk;
    demo_rank_close(&r);
    return status;
}

/* Runs the ranks of a dry run. They are threads, even if the ranks of the real run are
   processes. other: invert gradient_checkpointing. */
static seqpar_status demo_walk_through(const demo_job *job, demo_rehearsal *walk, bool other,
                                       seqpar_error *error) {
    demo_job *own = (demo_job *)demo_alloc(1, sizeof *own);
    *own = *job;
    if (other) own->config.gradient_checkpointing = !own->config.gradient_checkpointing;
    walk->job = own;
    seqpar_status status = demo_run_with(own, seqpar_run_threads, demo_walk_main, walk, error);
    walk->job = job;
    free(own);
    return status;
}

/* ---- the report as text ---- */

static double demo_machine_bytes(void) {
    return (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
}

/* Sets the learning rates of the forecast; for PPO those of the actor. */
static void demo_forecast_rates(demo_forecast *f) {
    const demo_job *job = f->job;
    const demo_binding *actor = demo_binding_of(job->logs.bindings, job->logs.binding_count,
                                                "actor_learning_rate");
    f->peak = actor ? *(const double *)actor->variable : job->config.learning_rate;
    int64_t steps = job->total_steps;
    f->last = f->peak * seqpar_lr_factor(job->lr_kind, steps > 0 ? steps - 1 : 0, job->warmup,
                                         steps, job->config.min_lr_ratio);
    f->end = f->peak * seqpar_lr_factor(job->lr_kind, steps, job->warmup, steps,
                                        job->config.min_lr_ratio);
}

static int64_t demo_forecast_from(const demo_job *job) {
    return job->run.from == DEMO_NOTHING_SAVED ? 0 : job->run.from;
}

/* Formats a number of bytes as a text such as 3.2 MiB. */
static const char *demo_size_text(char text[32], double bytes) {
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    for (; bytes >= 1024 && unit < 4; unit++) bytes /= 1024;
    snprintf(text, 32, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
    return text;
}

static void demo_say_steps(const demo_forecast *f) {
    const demo_job *job = f->job;
    const demo_config *c = &job->config;
    const demo_rehearsal *w = &f->walk[0];
    int64_t from = demo_forecast_from(job);
    printf("steps: %lld of %lld %s each", (long long)(job->last_step - from),
           (long long)c->train_batch_size, job->objective->unit);
    if (from)
        printf(", from step %lld of %lld on", (long long)from + 1, (long long)job->last_step);
    printf("; %lld %s to train on", (long long)job->usable_count,
           job->objective->walk ? "prompts" : job->objective->unit);
    if (job->objective->walk)
        printf(", %lld rollouts\n", (long long)job->rounds);
    else
        printf(", %lld steps an epoch, %.4g epochs in all\n",
               (long long)(job->usable_count / c->train_batch_size),
               (double)job->total_steps / (double)(job->usable_count / c->train_batch_size));
    if (w->rows)
        printf("next step: %lld tokens (%lld supervised) in %lld rows of at most %lld, %lld "
               "micro-batches\n",
               (long long)w->tokens, (long long)w->supervised, (long long)w->rows,
               (long long)c->pack_len, (long long)w->micro_batches);
    printf("ranks: %lld data-parallel x %lld sequence-parallel, %lld threads each\n",
           (long long)job->dp, (long long)c->ring_attn_size, (long long)c->omp_threads);
    printf("learning rate: %s, %lld warm-up steps, peak %.6g, %.6g in the last step, floor "
           "%.6g\n",
           c->lr_scheduler, (long long)job->warmup, f->peak, f->last, f->end);
}

static void demo_say_path(const char *what, const char *path) {
    char shown[1024];
    if (path) printf("%s: %s\n", what, demo_escape(shown, sizeof shown, path));
}

static void demo_say_files(const demo_forecast *f) {
    const demo_config *c = &f->job->config;
    const demo_rehearsal *w = &f->walk[0];
    const char *more = f->job->objective->walk ? " and the critic's files" : "";
    char size[32], shown[1024];
    printf("checkpoints: %s, ", demo_escape(shown, sizeof shown, c->ckpt_path));
    if (c->save_steps > 0)
        printf("every %lld %ss, the last %lld are kept", (long long)c->save_steps,
               f->job->objective->round ? f->job->objective->round : "step",
               (long long)c->max_ckpt_num);
    else
        printf("only when interrupted");
    printf(", %s each%s\n", demo_size_text(size, (double)w->checkpoint_bytes), more);
    printf("%s: %s, %lld parameters, %s\n", f->job->adapter.rank ? "adapters" : "model",
           demo_escape(shown, sizeof shown, c->save_path), (long long)w->learning,
           demo_size_text(size, (double)(w->learning * w->storage_bytes)));
    if (f->job->adapter.rank)
        printf("model: %lld parameters, frozen%s\n", (long long)w->parameters,
               c->save_merged ? "; merged with the adapters in the folder merged" : "");
    if (c->enable_ema) printf("moving average: the model's folder, in ema\n");
    if (c->plot_loss) printf("loss curve: the model's folder, as training_loss.svg\n");
    demo_say_path("metrics", c->metrics_path);
    demo_say_path("TensorBoard, a folder for the run in", c->use_tensorboard);
    demo_say_path("Weights & Biases (offline), a folder for the run in", c->wandb_offline);
}

/* Does the run need more memory than this machine has? False if ranks are processes or use a
   GPU, whose memory is not compared. */
static bool demo_too_much(const demo_forecast *f) {
    const int64_t *kinds = f->walk[0].memory.all;
    double all = (double)kinds[DEMO_KIND_TOTAL];
    if (!f->job->config.offload_path) all += (double)kinds[SEQPAR_MEM_OFFLOADED];
    return !f->job->processes && strcmp(f->job->config.device, "cuda") &&
           all > demo_machine_bytes();
}

static void demo_say_memory(const demo_forecast *f) {
    const demo_memory *m = &f->walk[0].memory, *other = &f->walk[1].memory;
    bool saves = f->job->config.gradient_checkpointing;
    char size[32];
    printf("\n%-20s %14s %14s  %s --gradient_checkpointing\n%-20s %14s %14s %14s %14s\n",
           "memory in MiB", "", "", saves ? "without" : "with", "", "a rank", "all ranks",
           "a rank", "all ranks");
    for (int i = 0; i < DEMO_KINDS; i++) {
        if ((i == DEMO_KIND_AVERAGE || i == SEQPAR_MEM_OFFLOADED) && !m->all[i]) continue;
        printf("%-20s %14.2f %14.2f %14.2f %14.2f\n", demo_kind_name[i],
               (double)m->rank[i] / 1048576, (double)m->all[i] / 1048576,
               (double)other->rank[i] / 1048576, (double)other->all[i] / 1048576);
    }
    printf("data and the device's workspace are not counted; this machine has %s%s\n",
           demo_size_text(size, demo_machine_bytes()),
           demo_too_much(f) ? ", which is too little" : "");
}

/* ---- the report as JSON ---- */

static void demo_forecast_add(cJSON *to, const char *name, double value) {
    cJSON_AddNumberToObject(to, name, value);
}

static void demo_forecast_text(cJSON *to, const char *name, const char *text) {
    if (text) cJSON_AddStringToObject(to, name, text);
}

static void demo_json_memory(cJSON *to, const char *name, const demo_memory *m) {
    cJSON *all = cJSON_AddObjectToObject(to, name);
    for (int i = 0; i < DEMO_KINDS; i++) {
        char key[32];
        snprintf(key, sizeof key, "%s", demo_kind_name[i]);
        for (char *at = key; *at; at++)
            if (*at == ' ') *at = '_';
        cJSON *kind = cJSON_AddObjectToObject(all, key);
        demo_forecast_add(kind, "rank", (double)m->rank[i]);
        demo_forecast_add(kind, "all", (double)m->all[i]);
    }
}

static void demo_json_files(cJSON *to, const demo_forecast *f) {
    const demo_config *c = &f->job->config;
    const demo_rehearsal *w = &f->walk[0];
    demo_forecast_text(to, "save_path", c->save_path);
    demo_forecast_text(to, "ckpt_path", c->ckpt_path);
    cJSON_AddBoolToObject(to, "enable_ema", c->enable_ema);
    cJSON_AddBoolToObject(to, "plot_loss", c->plot_loss);
    demo_forecast_text(to, "metrics_path", c->metrics_path);
    demo_forecast_text(to, "use_tensorboard", c->use_tensorboard);
    demo_forecast_text(to, "wandb_offline", c->wandb_offline);
    demo_forecast_add(to, "save_steps", (double)c->save_steps);
    demo_forecast_add(to, "max_ckpt_num", (double)c->max_ckpt_num);
    demo_forecast_add(to, "checkpoint_bytes", (double)w->checkpoint_bytes);
    demo_forecast_add(to, "model_bytes", (double)(w->learning * w->storage_bytes));
}

static void demo_json_steps(cJSON *to, const demo_forecast *f) {
    const demo_job *job = f->job;
    const demo_config *c = &job->config;
    const demo_rehearsal *w = &f->walk[0];
    demo_forecast_add(to, "from_step", (double)demo_forecast_from(job));
    demo_forecast_add(to, "last_step", (double)job->last_step);
    demo_forecast_add(to, "train_batch_size", (double)c->train_batch_size);
    demo_forecast_add(to, "usable", (double)job->usable_count);
    if (job->objective->walk) demo_forecast_add(to, "rollouts", (double)job->rounds);
    demo_forecast_add(to, "next_tokens", (double)w->tokens);
    demo_forecast_add(to, "next_supervised_tokens", (double)w->supervised);
    demo_forecast_add(to, "next_rows", (double)w->rows);
    demo_forecast_add(to, "next_micro_batches", (double)w->micro_batches);
    demo_forecast_add(to, "data_parallel_size", (double)job->dp);
    demo_forecast_add(to, "ring_attn_size", (double)c->ring_attn_size);
    demo_forecast_add(to, "omp_threads", (double)c->omp_threads);
    demo_forecast_text(to, "lr_scheduler", c->lr_scheduler);
    demo_forecast_add(to, "warmup_steps", (double)job->warmup);
    demo_forecast_add(to, "learning_rate", f->peak);
    demo_forecast_add(to, "last_learning_rate", f->last);
    demo_forecast_add(to, "learning_rate_floor", f->end);
    demo_forecast_add(to, "parameters", (double)w->parameters);
    demo_forecast_add(to, "learning", (double)w->learning);
}

static void demo_say_json(const demo_forecast *f) {
    cJSON *json = cJSON_CreateObject();
    bool saves = f->job->config.gradient_checkpointing;
    demo_forecast_text(json, "trainer", f->tool);
    demo_json_steps(json, f);
    demo_json_files(json, f);
    cJSON_AddBoolToObject(json, "gradient_checkpointing", saves);
    demo_json_memory(json, "memory", &f->walk[0].memory);
    demo_json_memory(json,
                     saves ? "memory_without_gradient_checkpointing"
                           : "memory_with_gradient_checkpointing",
                     &f->walk[1].memory);
    demo_forecast_add(json, "machine_bytes", demo_machine_bytes());
    char *text = cJSON_PrintUnformatted(json);
    puts(text);
    cJSON_free(text);
    cJSON_Delete(json);
}

/* Makes and prints the report. If there are several processes, only the first one prints.
   Returns the exit code. */
static int demo_dry_run(const demo_job *job, const char *tool) {
    demo_forecast f = {.job = job, .tool = tool};
    seqpar_error error = {0};
    if (job->rank) return 0;
    for (int i = 0; i < 2; i++)
        if (demo_walk_through(job, &f.walk[i], i, &error))
            return fprintf(stderr, "error: %s (%s)\n", error.text,
                           seqpar_status_name(error.status)),
                   1;
    demo_forecast_rates(&f);
    if (job->config.json)
        demo_say_json(&f);
    else {
        demo_say_steps(&f);
        demo_say_files(&f);
        demo_say_memory(&f);
    }
    return demo_print_failed("the plan");
}
#endif
