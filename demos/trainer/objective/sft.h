/* SPDX-License-Identifier: MIT OR Unlicense */
/* sft.h - supervised fine-tuning: the mean loss over all supervised tokens of the optimizer
 * step. The derivative of the loss by a log-prob does not depend on log-probs, so a single pass
 * through the vocabulary projection is enough. */
#ifndef DEMO_SFT_H
#define DEMO_SFT_H
#include "trainer/run/trainer.h"

/* Options of this trainer in addition to the shared ones: the keys of the text, and the
   loss. */
#define DEMO_TEXT_BINDINGS(c) \
    {"input_key", &(c).input_key, DEMO_STRING, "input", "JSON key of the prompt", DEMO_ANY}, \
        {"output_key", \
         &(c).output_key, \
         DEMO_STRING, \
         NULL, \
         "JSON key of the response; without it all text is trained on", \
         DEMO_ANY}, \
        {"pretrain_mode", \
         &(c).pretrain_mode, \
         DEMO_FLAG, \
         NULL, \
         "plain text, every token is trained on", \
         DEMO_ANY}, \
        {"pretrain_eos", \
         &(c).pretrain_eos, \
         DEMO_FLAG, \
         NULL, \
         "with --pretrain_mode: append EOS to each text that is not cut, as " \
         "LLaMA-Factory's stage pt", \
         DEMO_ANY}, \
        {"pretrain_blocks", \
         &(c).pretrain_blocks, \
         DEMO_FLAG, \
         NULL, \
         "with --pretrain_mode: join the texts and cut them into documents of max_len " \
         "tokens, in which texts attend to each other; the rest is left out; as " \
         "LLaMA-Factory's stage pt without --packing false", \
         DEMO_ANY}, \
    { \
        "train_on_inputs", &(c).train_on_inputs, DEMO_FLAG, NULL, "train on the prompt, too", \
            DEMO_ANY \
    }

#define DEMO_SFT_BINDINGS(c) \
    DEMO_TEXT_BINDINGS(c), \
        {"label_smoothing", \
         &(c).label_smoothing, \
         DEMO_FLOAT, \
         "0", \
         "label smoothing: probability that is spread over the vocabulary", \
         DEMO_BETWEEN(0, 0.999)}, \
    { \
        "z_loss", &(c).z_loss, DEMO_FLOAT, "0", "coefficient of the squared log-sum-exp", \
            DEMO_AT_LEAST(0) \
    }

/* Applies the defaults of LLaMA-Factory's stage pt: an EOS after each document, and documents
   joined into blocks unless packing is false. */
static int demo_sft_prepare(demo_job *job, demo_error *error) {
    demo_config *c = &job->config;
    bool plain = c->pretrain_mode &&
                 demo_job_from(job, "pretrain_mode") == DEMO_FROM_LLAMAFACTORY;
    if (plain && !demo_job_typed(job, "pretrain_eos")) c->pretrain_eos = true;
    if (plain && !demo_job_typed(job, "pretrain_blocks"))
        c->pretrain_blocks = c->packing_samples || !demo_job_typed(job, "packing_samples");
    if (!c->pretrain_mode && (c->pretrain_eos || c->pretrain_blocks))
        return demo_fail(error, "--%s needs --pretrain_mode; add it, or leave this out",
                         c->pretrain_eos ? "pretrain_eos" : "pretrain_blocks");
    if (c->pretrain_blocks && !c->pretrain_eos)
        return demo_fail(error, "--pretrain_blocks needs --pretrain_eos, as joined texts "
                                "must have an end; add it, or leave --pretrain_blocks out");
    return 0;
}

static int demo_sft_load(const demo_job *job, demo_dataset *set, const char *paths,
                         int64_t max_samples, demo_error *error) {
    const demo_config *c = &job->config;
    if (c->pretrain_mode && c->output_key)
        return demo_fail(error,
                         "--pretrain_mode trains on the text of --input_key only; leave out "
                         "--output_key %s",
                         c->output_key);
    demo_data_options options = demo_data_asked(job, paths, max_samples,
                                                demo_set_probs(job, set), DEMO_TOKENS_SFT);
    options.input_key = demo_named_key(job, "input_key", c->input_key);
    options.output_key = c->output_key;
    options.input_template = c->output_key ? c->input_template : NULL;
    options.pretrain_mode = c->pretrain_mode;
    options.pretrain_eos = c->pretrain_eos;
    options.pretrain_blocks = c->pretrain_blocks;
    options.train_on_inputs = c->train_on_inputs;
    if (demo_data_load(set, paths, &options, error)) return -1;
    demo_data_summary(set, set->summary, sizeof set->summary);
    return 0;
}

/* Sums the loss over the tokens of each piece on this rank. */
static seqpar_status demo_sft_sums(demo_rank *r, const seqpar_llama_batch *b,
                                   const seqpar_row *rows, const seqpar_sft_desc *sft,
                                   demo_window *w) {
    double *values = (double *)demo_alloc(b->tokens * 3 + 1, sizeof *values);
    seqpar_device_read(r->device, values, b->logp.data, 0, b->tokens, r->device->accumulator);
    seqpar_device_read(r->device, values + b->tokens, b->smooth.data, 0, b->tokens,
                       r->device->accumulator);
    seqpar_device_read(r->device, values + 2 * b->tokens, b->lse.data, 0, b->tokens,
                       r->device->accumulator);
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; !status && i < b->share->count; i++) {
        const seqpar_piece *p = &b->share->pieces[i];
        double loss = 0;
        for (int64_t t = p->local; t < p->local + p->count; t++)
            if (b->targets[t] != SEQPAR_IGNORE)
                loss += seqpar_sft_token_loss(values[t], values[b->tokens + t],
                                              values[2 * b->tokens + t], sft);
        status = demo_piece_seen(r, w, rows, p, &loss);
    }
    free(values);
    return status;
}

/* Computes the seeds of the local tokens: the derivatives of the step's mean loss by each
   log-prob. */
static seqpar_status demo_sft_seeds(demo_rank *r, const seqpar_llama_batch *b,
                                    const seqpar_sft_desc *sft, demo_seeds *out,
                                    seqpar_vocab_seeds *seeds) {
    int64_t n = b->tokens;
    double *host = (double *)demo_alloc(3 * n + 1, sizeof *host);
    seqpar_host_seeds parts = {host, host + n, host + 2 * n};
    seqpar_status status = seqpar_sft_seeds(r->ctx.error, &parts, b->targets, NULL, n, sft);
    if (!status) status = demo_seeds_write(r, out, 3, host, n, r->device->accumulator);
    memset(seeds, 0, sizeof *seeds);
    seeds->dlogp = out->part[0].data;
    if (sft->label_smoothing > 0) seeds->dsmooth = out->part[1].data;
    if (sft->z_loss > 0) seeds->dzloss = out->part[2].data;
    free(host);
    return status;
}

/* Training uses label smoothing and z-loss if they are given; evaluation never does. */
static seqpar_status demo_sft_rows(demo_rank *r, demo_window *w, int64_t first, int64_t count,
                                   int64_t micro) {
    const demo_config *c = &r->job->config;
    const seqpar_row *rows = w->batch.row + first;
    seqpar_sft_desc sft = {.count = w->batch.counts.supervised};
    seqpar_llama_batch_desc run = demo_batch_desc_of(r, micro);
    seqpar_llama_batch b;
    seqpar_vocab_seeds seeds;
    demo_seeds buffers = {0};
    if (micro >= 0) {
        sft.label_smoothing = c->label_smoothing;
        sft.z_loss = c->z_loss;
    }
    seqpar_status status = seqpar_llama_open_batch(&r->ctx, &r->model, &b, rows, count, &run);
    if (!status) status = seqpar_llama_forward(&r->ctx, &r->model, &b, micro >= 0);
    if (!status && micro < 0) status = seqpar_llama_values(&r->ctx, &r->model, &b);
    if (!status && micro >= 0) status = demo_sft_seeds(r, &b, &sft, &buffers, &seeds);
    if (!status && micro >= 0)
        status = demo_backward(&r->ctx, &r->experts, &r->model, &b, &r->optim, micro, &seeds);
    if (!status) status = demo_sft_sums(r, &b, rows, &sft, w);
    demo_seeds_free(r, &buffers);
    seqpar_llama_close_batch(&r->ctx, &r->model, &b);
    return status;
}

static const demo_objective demo_sft = {.unit = "documents",
                                        .weight = "tokens",
                                        .measure = " nats",
                                        .documents_per_unit = 1,
                                        .columns = 1,
                                        .kind = DEMO_TOKENS_SFT,
                                        .column = {"loss"},
                                        .load = demo_sft_load,
                                        .rows = demo_sft_rows,
                                        .total = demo_tokens_total,
                                        .prepare = demo_sft_prepare};
#endif
