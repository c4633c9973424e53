/* SPDX-License-Identifier: MIT OR Unlicense */
/* trainer.h - the code that all trainers share: the step loop, evaluation, logs, checkpoints.
 *
 * A step is an optimizer step over train_batch_size units (documents, pairs or prompts). They
 * are drawn in a shuffled order that depends only on seed and epoch, packed into rows, and
 * split over data-parallel ranks, micro-batches and sequence-parallel ranks. None of these
 * splits changes a bit of the result. */
#ifndef DEMO_TRAINER_H
#define DEMO_TRAINER_H
#include "dry_run.h"
#include "launch.h"

/* Opens /dev/null in place of closed standard streams. Otherwise the next opened file would get
   such a descriptor, and messages would be written into it. */
static void demo_standard_streams(void) {
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) _exit(2);
}

/* Refuses an option that contradicts config.json in the folder of the model, which determines
   the shape of the model. */
static int demo_shape_agrees(const demo_job *job, const demo_options *options,
                             demo_error *error) {
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
        if (demo_options_typed(options, shape[i].name) &&
            (shape[i].told < shape[i].there || shape[i].told > shape[i].there))
            return demo_fail(
                error, "--%s is %.15g, but the model in --pretrain %s has %.15g; leave it out",
                shape[i].name, shape[i].told, c->pretrain, shape[i].there);
    return 0;
}

/* Prints the command lines for prepare.py. Runs all checks that need no data first, since
   tokenizing may take hours. */
static int demo_print_prepare(demo_job *job) {
    demo_error error;
    if (demo_paths_fit(job->bindings, job->binding_count, &error) ||
        demo_job_settle(job, &error) || demo_shape_agrees(job, job->parsed, &error))
        return demo_never_began(job, error.text);
    if (!job->rank) demo_prepare_print_all(job);
    demo_leave(job);
    demo_job_close(job);
    return demo_print_failed("which data becomes tokens");
}

static bool demo_sentence_names(const char *sentence, const char *option) {
    char dashes[DEMO_NAME_LIMIT + 4];
    snprintf(dashes, sizeof dashes, "--%s", option);
    return strstr(sentence, dashes) != NULL;
}

/* Is the message about an option whose value was refused? The variable then has the default, so
   the message may be wrong. */
static bool demo_sentence_hangs(const demo_options *options, const char *sentence) {
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++) {
        const demo_known *known = &demo_known_options[i];
        if (options->refused[i] &&
            (demo_sentence_names(sentence, known->name) ||
             demo_sentence_names(sentence, demo_known_target(known)->name)))
            return true;
    }
    return false;
}

/* After errors on the command line: adds the errors of the later checks, so that the user sees
   all errors at once. */
static void demo_settle_besides(demo_job *job, const demo_options *options, demo_error *error) {
    demo_error more = {""}, one = {""};
    if (!demo_job_settle(job, &more)) return;
    for (char *at = more.text, *next; at; at = next) {
        next = strchr(at, DEMO_ERROR_NEXT);
        if (next) *next++ = 0;
        snprintf(one.text, sizeof one.text, "%s", at);
        if (!demo_sentence_hangs(options, at)) demo_fail_too(error, &one);
    }
}

/* The main function of a trainer. Returns the exit code. */
__attribute__((unused)) static int demo_main(demo_job *job, const char *tool,
                                             const demo_binding *bindings, int count, int argc,
                                             char **argv) {
    demo_options options = {.tool = tool, .bindings = bindings, .binding_count = count};
    demo_error error;
    char ckpt_path[DEMO_PATH_LIMIT + 64];
    cJSON_Hooks memory = {demo_json_alloc, free};
    demo_standard_streams();
    demo_writes_may_fail();
    if (demo_are_processes()) demo_wait_passively(argv);
    cJSON_InitHooks(&memory);
    job->bindings = bindings;
    job->binding_count = count;
    job->parsed = &options;
    int wrong = 0;
/* connects the processes first, so that only one rank reports errors of the command line */
#ifdef DEMO_MPI
    wrong = demo_find_processes(job, &error);
#endif
    if (!wrong) wrong = demo_options_parse(&options, argc, argv, &error);
    if (!wrong && !job->world && demo_threads_crowd(&job->config)) demo_wait_passively(argv);
    if (!wrong && options.help_wanted) {
        if (!job->rank) demo_options_help(&options, stdout);
        demo_leave(job);
        return demo_print_failed("the options");
    }
    if (!wrong) {
        snprintf(ckpt_path, sizeof ckpt_path, "%s/checkpoints_%s", job->config.save_path, tool);
        if (!job->config.ckpt_path) job->config.ckpt_path = ckpt_path;
        if (job->config.print_prepare) return demo_print_prepare(job);
        wrong = demo_paths_fit(bindings, count, &error) || demo_job_open(job, &error) ||
                demo_shape_agrees(job, &options, &error) ||
                (job->objective->begin ? job->objective->begin(job, &error)
                                       : demo_job_begin(job, bindings, count, tool, &error));
        if (!job->rank) demo_options_print_ignored(&options, stderr);
    } else if (options.program) /* not NULL once the words are read */
        demo_settle_besides(job, &options, &error);
    if (wrong) return demo_never_began(job, error.text);
    demo_job_say(job);
    int code = job->config.dry_run ? demo_dry_run(job, tool) : demo_run_job(job);
    demo_leave(job);
    demo_job_close(job);
    return code;
}
#endif
