/* SPDX-License-Identifier: MIT OR Unlicense */
/* job_model.h - the config of the trained model, and a check that this machine has enough
 * memory for it. */
#ifndef DEMO_JOB_MODEL_H
#define DEMO_JOB_MODEL_H
#include "job.h"
#include "trainer/model/lora.h"

/* Refuses a model if a lower bound of its memory exceeds that of the machine. Otherwise
   allocation would succeed, and the kernel would kill the process when it uses the memory. */
static int demo_job_memory(const demo_job *job, demo_error *error) {
    const seqpar_llama_config *m = &job->model;
    double hidden = (double)m->hidden;
    double heads = (double)(2 * m->heads + 2 * m->kv_heads) * (double)m->head_dim;
    double layer = hidden * (heads + 3.0 * (double)m->intermediate);
    double values = (double)m->layers * layer +
                    (double)m->vocab * hidden * (m->tied ? 1.0 : 2.0);
    double ranks = job->processes ? 1.0 : (double)job->ranks;
    bool frozen = job->config.lora_rank || job->objective->generates;
    double needed = values * (frozen ? 4.0 : 4.0 * ranks + 12.0);
    double there = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    if (!strcmp(job->config.device, "cuda") || job->config.dry_run || needed < there) return 0;
    return demo_fail(error,
                     "the model (%lld layers, hidden %lld, intermediate %lld, %lld heads of "
                     "%lld, vocab %lld) has %.3g parameters; weights of %.0f ranks, gradients "
                     "and moments take at least %.3g GB, this machine has %.3g; take a smaller "
                     "model or fewer ranks",
                     (long long)m->layers, (long long)m->hidden, (long long)m->intermediate,
                     (long long)m->heads, (long long)m->head_dim, (long long)m->vocab, values,
                     ranks, needed / 1e9, there / 1e9);
}

/* Options that name other models; some trainers accept comma lists. */
static const char *const demo_other_models[] = {"ref_pretrain", "reward_pretrain",
                                                "critic_pretrain", "teacher_model"};
enum { DEMO_OTHER_MODELS = 4 };

/* The vocabulary of a new model: that of the tokenizer with which the data was made. */
static int64_t demo_fresh_vocab(const demo_config *c) {
    demo_token_head head;
    int file = demo_is_token_file(c->dataset) ? open(c->dataset, O_RDONLY | O_CLOEXEC) : -1;
    bool whole = file >= 0 && read(file, &head, sizeof head) == (ssize_t)sizeof head;
    if (file >= 0) close(file);
    return whole && head.words > 0 ? head.words : DEMO_VOCAB;
}

/* Checks that ring_head_stride divides the number of kv heads of every model of the run. */
static int demo_strides_divide(const demo_job *job, demo_error *error) {
    char one[DEMO_PATH_LIMIT + 1];
    const demo_config *c = &job->config;
    if (c->pretrain && demo_stride_divides(job, "pretrain", c->pretrain, &job->model, error))
        return -1;
    for (int i = 0; i < DEMO_OTHER_MODELS; i++)
        for (const char *at =
                 demo_option_path(job->bindings, job->binding_count, demo_other_models[i]);
             at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
            seqpar_llama_config model = job->model;
            seqpar_error why = {0};
            snprintf(one, sizeof one, "%.*s", (int)strcspn(at, ","), at);
            if (!demo_load_config(one, &model, &why) &&
                demo_stride_divides(job, demo_other_models[i], one, &model, error))
                return -1;
        }
    return 0;
}

static int demo_job_model(demo_job *job, demo_error *error) {
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
        demo_fail(error, "%s", why.text);
        return -1;
    }
    if (!c->pretrain && job->model.head_dim < 1)
        return demo_fail(error,
                         "hidden_size %lld is less than num_attention_heads %lld, so "
                         "head_dim would be 0; lower the number of heads, or give --head_dim",
                         (long long)c->hidden_size, (long long)c->num_attention_heads);
    if (job->score) job->model.score = *job->score;
    job->untaught = demo_definition_of(job)->padding
                        ? demo_untaught(c->pretrain, job->model.vocab)
                        : 0;
    return demo_strides_divide(job, error) || demo_job_memory(job, error) ? -1 : 0;
}
#endif
