/* SPDX-License-Identifier: MIT OR Unlicense */
/* kd.h - knowledge distillation as in OpenRLHF's train_kd: a student learns from documents and
 * from a teacher model with the same vocabulary.
 *     loss = (1 - kd_coef) gpt_loss + kd_coef distil_loss
 * Both terms are means over all supervised tokens of the optimizer step. distil_loss is the
 * cross-entropy with the teacher's distribution: KL(teacher, student) plus the teacher's
 * entropy. With --kd_reverse the KL is KL(student, teacher), as in MiniLLM. */
#ifndef DEMO_KD_H
#define DEMO_KD_H
#include "reference.h"
#include "sft.h"

typedef struct {
    const char *teacher_model;
    double kd_coef;
    bool kd_reverse, teacher_offload;
} demo_kd_config;

#define DEMO_KD_BINDINGS(k) \
    {"teacher_model", \
     &(k).teacher_model, \
     DEMO_STRING, \
     NULL, \
     "folder of the teacher, a model of the same vocabulary", \
     DEMO_ANY}, \
        {"kd_coef", \
         &(k).kd_coef, \
         DEMO_FLOAT, \
         "0.4", \
         "weight of the KL term; the cross entropy of the labels has weight 1 - this", \
         DEMO_BETWEEN(0, 1)}, \
        {"kd_reverse", \
         &(k).kd_reverse, \
         DEMO_FLAG, \
         NULL, \
         "KL(student, teacher), as MiniLLM has it, in place of KL(teacher, student)", \
         DEMO_ANY}, \
    { \
        "teacher_offload", &(k).teacher_offload, DEMO_FLAG, NULL, \
            "offload the teacher's weights: at most two layers are in the device's memory", \
            DEMO_ANY \
    }

static const demo_kd_config *demo_kd_options(const demo_rank *r) {
    return (const demo_kd_config *)r->job->options;
}

static int demo_kd_prepare(demo_job *job, demo_error *error) {
    if (!((const demo_kd_config *)job->options)->teacher_model)
        return demo_fail(error, "no teacher model; give its folder by --teacher_model");
    return demo_sft_prepare(job, error);
}

static seqpar_status demo_kd_open(demo_rank *r) {
    const demo_kd_config *k = demo_kd_options(r);
    return demo_reference_open(r, k->teacher_model, k->teacher_offload);
}

/* Computes the seeds of each token: the derivatives of the step's mean loss by the token's
   log-prob and by its KL. */
static seqpar_status demo_kd_seeds(demo_rank *r, const seqpar_llama_batch *b, int64_t count,
                                   demo_seeds *out, seqpar_vocab_seeds *seeds,
                                   seqpar_llama_teacher *teacher) {
    double c = demo_kd_options(r)->kd_coef, *host;
    int64_t n = b->tokens;
    host = (double *)demo_alloc(2 * n + 1, sizeof *host);
    for (int64_t t = 0; t < n; t++) {
        int live = b->targets[t] != SEQPAR_IGNORE;
        host[t] = live ? -(1 - c) / (double)count : 0;
        host[n + t] = live ? c / (double)count : 0;
    }
    seqpar_status status = demo_seeds_write(r, out, 2, host, n, r->device->accumulator);
    memset(seeds, 0, sizeof *seeds);
    seeds->dlogp = out->part[0].data;
    teacher->dkl = out->part[1].data;
    free(host);
    return status;
}

/* Adds a token's loss, gpt_loss, distil_loss and KL to sum. */
static void demo_kd_add(double sum[4], double coefficient, double logp, double kl,
                        double entropy) {
    double distil = kl + entropy;
    sum[0] += (1 - coefficient) * -logp + coefficient * distil;
    sum[1] -= logp;
    sum[2] += distil;
    sum[3] += kl;
}

/* Sums the columns of the log over the tokens of each piece on this rank. */
static seqpar_status demo_kd_sums(demo_rank *r, const seqpar_llama_batch *b,
                                  const seqpar_row *rows, demo_window *w) {
    const seqpar_buffer *from[] = {&b->logp, &b->kl, &b->teacher_entropy};
    int64_t n = b->tokens;
    double *x = (double *)demo_alloc(3 * n + 1, sizeof *x);
    seqpar_status status = SEQPAR_OK;
    for (int i = 0; i < 3; i++)
        seqpar_device_read(r->device, x + i * n, from[i]->data, 0, n, r->device->accumulator);
    for (int64_t i = 0; !status && i < b->share->count; i++) {
        const seqpar_piece *p = &b->share->pieces[i];
        double sum[4] = {0};
        for (int64_t t = p->local; t < p->local + p->count; t++)
            if (b->targets[t] != SEQPAR_IGNORE)
                demo_kd_add(sum, demo_kd_options(r)->kd_coef, x[t], x[n + t], x[2 * n + t]);
        status = demo_piece_seen(r, w, rows, p, sum);
    }
    free(x);
    return status;
}

/* Runs the teacher, then the student, on these rows. micro >= 0: also runs backward. */
static seqpar_status demo_kd_rows(demo_rank *r, demo_window *w, int64_t first, int64_t count,
                                  int64_t micro) {
    const seqpar_row *rows = w->batch.row + first;
    seqpar_llama_batch_desc run = demo_batch_desc_of(r, micro);
    seqpar_llama_batch b, taught = {0};
    seqpar_llama_teacher teacher = {demo_reference_model(r), &taught,
                                    demo_kd_options(r)->kd_reverse, NULL};
    seqpar_vocab_seeds seeds;
    demo_seeds buffers = {0};
    seqpar_status status = seqpar_llama_open_batch(&r->ctx, &r->model, &b, rows, count, &run);
    if (!status) status = demo_reference_pass(r, &taught, rows, count, 0);
    if (!status) status = seqpar_llama_forward(&r->ctx, &r->model, &b, micro >= 0);
    b.teacher = &teacher;
    if (!status && micro < 0) status = seqpar_llama_values(&r->ctx, &r->model, &b);
    if (!status && micro >= 0)
        status = demo_kd_seeds(r, &b, w->batch.counts.supervised, &buffers, &seeds, &teacher);
    if (!status && micro >= 0)
        status = demo_backward(&r->ctx, &r->experts, &r->model, &b, &r->optim, micro, &seeds);
    if (!status) status = demo_kd_sums(r, &b, rows, w);
    demo_seeds_free(r, &buffers);
    seqpar_llama_close_batch(&r->ctx, teacher.model, &taught);
    seqpar_llama_close_batch(&r->ctx, &r->model, &b);
    return status;
}

static const demo_objective demo_kd = {.unit = "documents",
                                       .weight = "tokens",
                                       .measure = " nats",
                                       .documents_per_unit = 1,
                                       .columns = 4,
                                       .kind = DEMO_TOKENS_SFT,
                                       .column = {"loss", "gpt_loss", "distil_loss", "kl"},
                                       .fixed = "kd_coef,kd_reverse",
                                       .frozen = "teacher",
                                       .open = demo_kd_open,
                                       .close = demo_reference_close,
                                       .load = demo_sft_load,
                                       .rows = demo_kd_rows,
                                       .total = demo_tokens_total,
                                       .prepare = demo_kd_prepare};
#endif
