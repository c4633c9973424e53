/* SPDX-License-Identifier: MIT OR Unlicense */
/* generate.h - generates texts (responses) for a file of prompts, and scores them.
 *
 * A text depends only on the model, the seed, its prompt and its index in the whole set. It
 * does not depend on the number of ranks, on the texts generated in the same batch, or on how
 * often the run was interrupted and resumed. */
#ifndef DEMO_GENERATE_H
#define DEMO_GENERATE_H
#include "generate_options.h"
#include "trainer/base/escape.h"

/* ---- prompts ---- */

/* Sets the prompts of this run: all prompts, or the slice of --iter. */
static int demo_generate_slice(const demo_job *job, int64_t all, demo_error *error) {
    demo_generate_config *g = demo_generate_of(job);
    g->first = 0;
    g->prompts = all;
    if (g->iter < 0) return 0;
    if ((double)g->iter * (double)g->slice >= (double)all)
        return demo_fail(error,
                         "--iter %lld skips the first %.15g prompts, but there are only "
                         "%lld; give a smaller --iter",
                         (long long)g->iter, (double)g->iter * (double)g->slice,
                         (long long)all);
    g->first = g->iter * g->slice;
    g->prompts = all - g->first < g->slice ? all - g->first : g->slice;
    return 0;
}

static int demo_generate_load(const demo_job *job, demo_dataset *set, const char *paths,
                              int64_t max_samples, demo_error *error) {
    return demo_prompts_read(job, set, paths, max_samples, error)
               ? -1
               : demo_generate_slice(job, arrlen(set->documents), error);
}

/* Sets up the progress line, which counts prompts. */
static void demo_generate_count(demo_job *job) {
    job->epoch_units = job->round_steps = 1;
    job->rounds = demo_generate_of(job)->prompts;
}

/* ---- beginning ---- */

static void demo_generate_note(demo_generate_config *g, const char *key, uint64_t digest) {
    demo_note note;
    snprintf(note.key, sizeof note.key, "%s", key);
    snprintf(note.value, sizeof note.value, "%016llx", (unsigned long long)digest);
    arrput(g->notes, note);
}

/* Records the options that a text or its reward depends on. */
static void demo_generate_options_note(const demo_job *job) {
    static const char *const names[] = {"seed",           "n_samples_per_prompt",
                                        "max_new_tokens", "temperature",
                                        "top_p",          "top_k",
                                        "iter",           "rollout_batch_size",
                                        "device",         "param_dtype",
                                        "cublas",         "cell",
                                        "reward_rule"};
    demo_generate_config *g = demo_generate_of(job);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        demo_note note;
        const demo_binding *b = demo_binding_of(job->bindings, job->binding_count, names[i]);
        demo_option_text(b, note.value, sizeof note.value);
        snprintf(note.key, sizeof note.key, "--%s", names[i]);
        arrput(g->notes, note);
    }
}

static void demo_generate_notes(const demo_job *job) {
    demo_generate_config *g = demo_generate_of(job);
    const char *urls = g->ppo.servers.urls;
    demo_generate_note(g, "prompts", demo_job_digest(job, &job->train));
    demo_generate_note(g, "model", demo_digest_folder(DEMO_DIGEST_EMPTY, job->config.pretrain));
    demo_generate_note(g, "adapters", demo_digest_folders(job->config.adapter_name_or_path));
    demo_generate_note(g, "reward models", demo_digest_folders(g->ppo.reward_pretrain));
    demo_generate_note(g, "--remote_rm_url",
                       urls ? demo_digest(DEMO_DIGEST_EMPTY, urls, (int64_t)strlen(urls)) : 0);
    demo_generate_options_note(job);
}

/* Refuses to replace a file that does not look like the output of generate. */
static int demo_generate_ours(const char *path, demo_error *error) {
    static const char *const begins[] = {"{\"input\":", "{\"prompt\":"};
    char begin[16] = "";
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    ssize_t length = file < 0 ? 0 : read(file, begin, sizeof begin - 1);
    if (file >= 0) close(file);
    for (int i = 0; i < 2 && length > 0; i++)
        if (!strncmp(begin, begins[i], strlen(begins[i]))) return 0;
    return length <= 0 ? 0
                       : demo_fail(error,
                                   "--output_path %.300s exists and was not written by "
                                   "generate; give another, or move it away",
                                   path);
}

static int demo_generate_begin(demo_job *job, demo_error *error) {
    demo_generate_config *g = demo_generate_of(job);
    const demo_binding *bindings = job->bindings;
    int64_t n = g->ppo.n_samples_per_prompt;
    job->data = demo_job_digest(job, &job->train);
    if (demo_job_paths(bindings, job->binding_count, error)) return -1;
    demo_job_tell(job, bindings, job->binding_count);
    if (job->rank) return 0;
    if (demo_generate_ours(g->output_path, error)) return -1;
    demo_generate_notes(job);
    return demo_generated_open(&g->out, g->output_path, g->resume, g->notes, n, g->prompts * n,
                               error);
}

static void demo_generate_say(const demo_job *job) {
    const demo_generate_config *g = demo_generate_of(job);
    const demo_ppo_config *p = &g->ppo;
    const demo_config *c = &job->config;
    char shown[1024];
    fprintf(stderr, "ranks: %lld data-parallel x %lld sequence-parallel, %sZeRO %lld\n",
            (long long)job->dp, (long long)c->ring_attn_size,
            job->processes ? "a process each, over " DEMO_PROCESSES_OVER ", " : "",
            (long long)c->zero_stage);
    fprintf(
        stderr,
        "texts: %lld prompts from number %lld on, %lld text%s each, of at most %lld tokens, ",
        (long long)g->prompts, (long long)g->first + 1, (long long)p->n_samples_per_prompt,
        demo_plural(p->n_samples_per_prompt), (long long)p->generate_max_len);
    fprintf(stderr,
            p->temperature > 0 ? "temperature %g\n" : "always the most probable token\n",
            p->temperature);
    if (g->resume && g->out.texts)
        fprintf(stderr, "resume: %lld of %lld prompts are in %s\n",
                (long long)(g->out.texts / p->n_samples_per_prompt), (long long)g->prompts,
                demo_escape(shown, sizeof shown, g->out.part));
    else if (g->resume)
        fprintf(stderr,
                "notice: there is nothing to resume in %s; generation starts with the first "
                "prompt\n",
                demo_escape(shown, sizeof shown, g->out.part));
}

/* ---- ranks ---- */

static seqpar_status demo_generate_open(demo_rank *r) {
    r->own = demo_alloc(1, sizeof(demo_ppo));
    return demo_rewards_open(r);
}

static void demo_generate_close(demo_rank *r) {
    demo_ppo *p = demo_ppo_of(r);
    if (p) {
        demo_rollout_free(&p->rollout);
        demo_rewards_close(r);
    }
    free(p);
    r->own = NULL;
    if (r->world && r->world->rank == 0) demo_generated_close(&demo_generate_of(r->job)->out);
}

/* Generates texts for prompts first .. first + count - 1 of this run, without scoring them. */
static seqpar_status demo_generate_draw(demo_rank *r, int64_t first, int64_t count) {
    const demo_generate_config *g = demo_generate_of(r->job);
    const demo_document *documents = r->job->train.documents + g->first + first;
    demo_rollout *o = &demo_ppo_of(r)->rollout;
    int64_t n = g->ppo.n_samples_per_prompt, begin = (g->first + first) * n;
    seqpar_llama_sample_desc desc = demo_sample_desc(r);
    seqpar_llama_prompt *prompts = (seqpar_llama_prompt *)demo_alloc(count * n,
                                                                     sizeof *prompts);
    demo_texts all = {0};
    for (int64_t i = 0; i < count * n; i++)
        prompts[i] = (seqpar_llama_prompt){documents[i / n].ids,
                                           demo_prompt_tokens(r, &documents[i / n]), begin + i};
    seqpar_status status = demo_generate(r, &all, prompts, count * n, &desc);
    demo_rollout_new(o, count * n);
    for (int64_t i = 0; !status && i < count * n; i++)
        demo_rollout_take(o, demo_text_document(&prompts[i], demo_text_ids(&all, i)),
                          all.logp + i * all.longest, prompts[i].tokens, &documents[i / n],
                          0.0);
    free(prompts);
    demo_texts_free(&all);
    return status;
}

/* Formats the texts of the rollout as lines of JSON. Returns an stb_ds array. */
static char *demo_generate_lines(const demo_rank *r, const demo_rollout *o) {
    const demo_words words = demo_rank_words(r);
    bool scored = demo_generate_scores(demo_generate_of(r->job));
    char *lines = NULL;
    for (int64_t i = 0; i < o->texts; i++) {
        const demo_document *d = &o->set.documents[i];
        char *input = demo_prompt_text(r, &r->job->train, o->source[i]);
        char *output = demo_tokens_as_text(&words, d->ids + o->prompt[i],
                                           d->tokens - o->prompt[i]);
        char *line = demo_generated_line(input, output, scored ? o->score[i] : NAN,
                                         demo_is_stop(&words, d->ids[d->tokens - 1]));
        memcpy(arraddnptr(lines, strlen(line)), line, strlen(line));
        arrput(lines, '\n');
        free(line);
        free(output);
        free(input);
    }
    return lines;
}

static seqpar_status demo_generate_keep(demo_rank *r) {
    const demo_rollout *o = &demo_ppo_of(r)->rollout;
    demo_error why;
    if (r->world->rank) return SEQPAR_OK;
    char *lines = demo_generate_lines(r, o);
    int wrong = demo_generated_write(&demo_generate_of(r->job)->out, lines,
                                     (size_t)arrlen(lines), o->texts, &why);
    arrfree(lines);
    return wrong ? seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_WRITE, "%s", why.text) : SEQPAR_OK;
}

/* The number of prompts that are generated before their texts are written. It gives every rank
   several micro-batches of texts, so that ranks rarely wait for one that generates a long
   text. */
static int64_t demo_generate_round(const demo_rank *r) {
    int64_t texts = 4 * r->job->micro_values * r->world->size;
    int64_t n = demo_generate_of(r->job)->ppo.n_samples_per_prompt;
    return (texts + n - 1) / n;
}

/* Generates, scores and writes the texts of the next prompts; *done is advanced. */
static seqpar_status demo_generate_some(demo_rank *r, int64_t *done) {
    const demo_generate_config *g = demo_generate_of(r->job);
    demo_ppo *p = demo_ppo_of(r);
    int64_t left = g->prompts - *done, count = demo_generate_round(r);
    if (count > left) count = left;
    seqpar_status status = demo_generate_draw(r, *done, count);
    if (!status) status = demo_score_texts(r);
    if (status || p->given_up) return status;
    status = demo_generate_keep(r);
    *done += count;
    r->step++;
    r->tokens += p->rollout.entries;
    r->progress.logging_steps = r->step % r->job->config.logging_steps == 0;
    if (!status && r->world->rank == 0)
        demo_progress_step(&r->progress, *done, seqpar_mean(p->rollout.score, p->rollout.texts),
                           p->rollout.entries);
    return status;
}

/* ---- the end: rank 0 writes the final file ---- */

static void demo_generate_totals(const demo_rank *r, const demo_recipe_counts *n) {
    const demo_generate_config *g = demo_generate_of(r->job);
    bool scored = demo_generate_scores(g);
    char number[2][32], path[1024];
    demo_escape(path, sizeof path, g->output_path);
    if (r->job->config.json) {
        printf("{\"prompts\": %lld, \"texts\": %lld, \"cut_off\": %lld, \"lines\": %lld",
               (long long)g->prompts, (long long)n->texts, (long long)n->cut,
               (long long)n->lines);
        if (scored)
            printf(", \"reward\": %s, \"deviation\": %s", demo_json_number(number[0], n->mean),
                   demo_json_number(number[1], n->deviation));
        printf("}\n");
        return;
    }
    printf("%lld prompts, %lld text%s (%lld cut off by --max_new_tokens)",
           (long long)g->prompts, (long long)n->texts, demo_plural(n->texts),
           (long long)n->cut);
    if (scored) printf(", reward %.6f, deviation %.6f", n->mean, n->deviation);
    printf("; %lld lines in %s\n", (long long)n->lines, path);
}

/* Rank 0: makes the output file from OUT.part and prints the summary. */
static seqpar_status demo_generate_end(demo_rank *r) {
    demo_generate_config *g = demo_generate_of(r->job);
    demo_recipe_counts counts;
    demo_error why;
    if (r->world->rank) return SEQPAR_OK;
    demo_progress_end(&r->progress);
    if (demo_recipe_end(&g->out, &g->recipe, &counts, &why))
        return seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_WRITE, "%s", why.text);
    if (counts.empty)
        fprintf(stderr, "notice: empty texts are left out: %lld\n", (long long)counts.empty);
    if (counts.even && g->recipe.kind == DEMO_RECIPE_DPO)
        fprintf(stderr,
                "notice: for %lld of %lld prompts all texts have the same reward, so chosen "
                "is not better than rejected\n",
                (long long)counts.even, (long long)counts.inputs);
    demo_generate_totals(r, &counts);
    if (!fflush(stdout) && !ferror(stdout)) return SEQPAR_OK;
    return seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_WRITE,
                       "cannot write the final summary: %s; the texts are in %.300s",
                       strerror(errno), g->output_path);
}

/* The loop of generate, in place of the training loop. */
static seqpar_status demo_generate_run(demo_rank *r) {
    const demo_generate_config *g = demo_generate_of(r->job);
    int64_t done = g->out.texts / g->ppo.n_samples_per_prompt;
    int stop = 0;
    r->progress.value = demo_generate_scores(g) ? "reward" : "";
    r->progress.resumed = r->progress.step = done;
    /* only rank 0 has opened OUT.part */
    seqpar_status status = seqpar_comm_broadcast(r->world, &done, sizeof done, 0);
    if (!status) status = demo_stop_wanted(r, &stop);
    while (!status && !stop && done < g->prompts) {
        status = demo_generate_some(r, &done);
        if (!status) status = demo_stop_wanted(r, &stop);
    }
    r->stopped = stop;
    if (!status && !stop) return demo_generate_end(r);
    if (!status && r->world->rank == 0)
        fprintf(stderr, "%s after %lld of %lld prompts; go on with --resume\n",
                r->trouble.status ? "stopped" : "interrupted", (long long)done,
                (long long)g->prompts);
    return status;
}

static const demo_objective demo_generate_objective = {.unit = "prompts",
                                                       .weight = "prompts",
                                                       .measure = "",
                                                       .documents_per_unit = 1,
                                                       .columns = 1,
                                                       .kind = DEMO_TOKENS_PROMPTS,
                                                       .column = {"reward"},
                                                       .round = "prompt",
                                                       .generates = true,
                                                       .open = demo_generate_open,
                                                       .close = demo_generate_close,
                                                       .load = demo_generate_load,
                                                       .begin = demo_generate_begin,
                                                       .say = demo_generate_say,
                                                       .prepare = demo_generate_prepare,
                                                       .count = demo_generate_count,
                                                       .train = demo_generate_run};
#endif
