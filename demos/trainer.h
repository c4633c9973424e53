/* SPDX-License-Identifier: MIT OR Unlicense */
/* trainer.h - what the trainers share: options, the step loop, evaluation, logs, checkpoints.
 *
 * A step is an optimizer step over train_batch_size documents, drawn by a shuffle that belongs to (seed, epoch), packed
 * into rows, and split over data-parallel ranks, micro-batches and sequence-parallel ranks. None of these splits changes
 * a bit of the result. */
#ifndef DEMO_TRAINER_H
#define DEMO_TRAINER_H

#include <signal.h>
#include "checkpoint.h"
#include "data.h"
#include "options.h"
#include "plot.h"
#include "progress.h"

typedef struct {
    const char *dataset, *eval_dataset, *input_key, *output_key, *input_template, *truncation;
    const char *pretrain, *save_path, *ckpt_path, *metrics_path, *lr_scheduler, *optim, *device;
    const char *layout, *schedule, *ring_attn_func, *sequence_parallel_mode;
    bool pretrain_mode, train_on_inputs, packing_samples, load_checkpoint, gradient_checkpointing, relaxed_attention, tie_word_embeddings, plot_loss, json;
    int64_t max_len, pack_len, chunks, max_samples, train_batch_size, micro_train_batch_size, max_steps, warmup_steps;
    int64_t save_steps, eval_steps, logging_steps, max_ckpt_num, seed, zero_stage, omp_threads;
    int64_t ring_attn_size, ring_head_stride, ulysses_size, data_parallel_size, world_size, gradient_accumulation_steps;
    int64_t hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, intermediate_size;
    double max_epochs, max_norm, learning_rate, lr_warmup_ratio, min_lr_ratio, l2, adam_eps, label_smoothing, z_loss, rope_theta;
    double adam_betas[2];
} demo_config;

/* Options every trainer has. Defaults teach a fresh small model something in minutes on two cores. */
#define DEMO_TRAINER_BINDINGS(c)                                                                                              \
    {"dataset", &(c).dataset, DEMO_STRING, NULL, "training data: .jsonl or .txt, a comma list", DEMO_ANY},                    \
    {"eval_dataset", &(c).eval_dataset, DEMO_STRING, NULL, "data to evaluate on", DEMO_ANY},                                  \
    {"input_key", &(c).input_key, DEMO_STRING, "input", "JSON key of the prompt", DEMO_ANY},                                  \
    {"output_key", &(c).output_key, DEMO_STRING, NULL, "JSON key of the response; without it all text is trained", DEMO_ANY}, \
    {"input_template", &(c).input_template, DEMO_STRING, "User: {}\nAssistant: ", "prompt around {}", DEMO_ANY},              \
    {"pretrain_mode", &(c).pretrain_mode, DEMO_FLAG, NULL, "plain text, every token trained", DEMO_ANY},                      \
    {"train_on_inputs", &(c).train_on_inputs, DEMO_FLAG, NULL, "the prompt is trained too", DEMO_ANY},                        \
    {"max_len", &(c).max_len, DEMO_INT, "1024", "longest document, in tokens", DEMO_AT_LEAST(2)},                             \
    {"truncation", &(c).truncation, DEMO_STRING, "drop", "what happens to longer ones: drop or cut", DEMO_ANY},               \
    {"max_samples", &(c).max_samples, DEMO_INT, "100000000", "read at most this many records", DEMO_AT_LEAST(1)},             \
    {"packing_samples", &(c).packing_samples, DEMO_FLAG, NULL, "several documents in a row", DEMO_ANY},                       \
    {"pack_len", &(c).pack_len, DEMO_INT, "0", "tokens of a packed row; 0: 2048 or max_len", DEMO_AT_LEAST(0)},               \
    {"chunks", &(c).chunks, DEMO_INT, "0", "chunks a row is cut into; 0: 32, fewer for short rows", DEMO_AT_LEAST(0)},        \
    {"pretrain", &(c).pretrain, DEMO_STRING, NULL, "folder with config.json and model.safetensors to start from", DEMO_ANY},  \
    {"save_path", &(c).save_path, DEMO_STRING, "./ckpt", "folder for the final model", DEMO_ANY},                             \
    {"ckpt_path", &(c).ckpt_path, DEMO_STRING, "./ckpt/checkpoints_sft", "folder for checkpoints", DEMO_ANY},                 \
    {"save_steps", &(c).save_steps, DEMO_INT, "-1", "checkpoint every so many steps; -1: only when interrupted", DEMO_AT_LEAST(-1)}, \
    {"max_ckpt_num", &(c).max_ckpt_num, DEMO_INT, "3", "checkpoints kept", DEMO_AT_LEAST(1)},                                 \
    {"load_checkpoint", &(c).load_checkpoint, DEMO_FLAG, NULL, "go on from the newest checkpoint in ckpt_path", DEMO_ANY},    \
    {"eval_steps", &(c).eval_steps, DEMO_INT, "-1", "evaluate every so many steps; -1: at the end", DEMO_AT_LEAST(-1)},       \
    {"logging_steps", &(c).logging_steps, DEMO_INT, "10", "a line every so many steps", DEMO_AT_LEAST(1)},                    \
    {"metrics_path", &(c).metrics_path, DEMO_STRING, NULL, "JSON lines: every step and evaluation", DEMO_ANY},                \
    {"plot_loss", &(c).plot_loss, DEMO_FLAG, NULL, "draw the loss into save_path/training_loss.svg", DEMO_ANY},               \
    {"json", &(c).json, DEMO_FLAG, NULL, "the closing figures as one JSON object", DEMO_ANY},                                 \
    {"train_batch_size", &(c).train_batch_size, DEMO_INT, "32", "documents of an optimizer step, over all ranks", DEMO_AT_LEAST(1)}, \
    {"micro_train_batch_size", &(c).micro_train_batch_size, DEMO_INT, "4", "rows of a micro-batch on a data-parallel rank", DEMO_AT_LEAST(1)}, \
    {"gradient_accumulation_steps", &(c).gradient_accumulation_steps, DEMO_INT, "0", "micro-batches of a step; 0: from micro_train_batch_size", DEMO_AT_LEAST(0)}, \
    {"max_epochs", &(c).max_epochs, DEMO_FLOAT, "1", "passes over the data", DEMO_ABOVE(0)},                                  \
    {"max_steps", &(c).max_steps, DEMO_INT, "-1", "optimizer steps; -1: from max_epochs", DEMO_AT_LEAST(-1)},                 \
    {"learning_rate", &(c).learning_rate, DEMO_FLOAT, "2e-3", "peak learning rate", DEMO_ABOVE(0)},                           \
    {"lr_scheduler", &(c).lr_scheduler, DEMO_STRING, "cosine_with_min_lr", "constant, linear, cosine, cosine_with_min_lr", DEMO_ANY}, \
    {"lr_warmup_ratio", &(c).lr_warmup_ratio, DEMO_FLOAT, "0.03", "share of the steps that warm up", DEMO_BETWEEN(0, 1)},     \
    {"warmup_steps", &(c).warmup_steps, DEMO_INT, "-1", "warm-up in steps; -1: from lr_warmup_ratio", DEMO_AT_LEAST(-1)},     \
    {"min_lr_ratio", &(c).min_lr_ratio, DEMO_FLOAT, "0.1", "floor of cosine_with_min_lr", DEMO_BETWEEN(0, 1)},                \
    {"optim", &(c).optim, DEMO_STRING, "adamw", "adamw or sgd", DEMO_ANY},                                                    \
    {"adam_betas", &(c).adam_betas, DEMO_FLOATS2, "0.9,0.95", "decay of the moments", DEMO_BETWEEN(0, 1)},                    \
    {"adam_eps", &(c).adam_eps, DEMO_FLOAT, "1e-8", "added to the root of the second moment", DEMO_AT_LEAST(0)},              \
    {"l2", &(c).l2, DEMO_FLOAT, "0", "weight decay; gains have none", DEMO_AT_LEAST(0)},                                      \
    {"max_norm", &(c).max_norm, DEMO_FLOAT, "1.0", "clip of the gradient norm; 0: none", DEMO_AT_LEAST(0)},                   \
    {"zero_stage", &(c).zero_stage, DEMO_INT, "2", "0: all state everywhere, 1: moments sharded, 2: gradients too", DEMO_BETWEEN(0, 2)}, \
    {"gradient_checkpointing", &(c).gradient_checkpointing, DEMO_FLAG, NULL, "keep three tensors a layer, compute the rest again", DEMO_ANY}, \
    {"ring_attn_size", &(c).ring_attn_size, DEMO_INT, "1", "sequence-parallel ranks", DEMO_AT_LEAST(1)},                      \
    {"ring_head_stride", &(c).ring_head_stride, DEMO_INT, "1", "llama3: kv heads gathered at a time", DEMO_AT_LEAST(1)},      \
    {"data_parallel_size", &(c).data_parallel_size, DEMO_INT, "0", "data-parallel ranks; 0: from world_size, else 1", DEMO_AT_LEAST(0)}, \
    {"world_size", &(c).world_size, DEMO_INT, "0", "ranks in all; 0: data_parallel_size x ring_attn_size", DEMO_AT_LEAST(0)}, \
    {"layout", &(c).layout, DEMO_STRING, NULL, "contiguous, zigzag, stripe or zigzag-doc; default zigzag", DEMO_ANY},                     \
    {"schedule", &(c).schedule, DEMO_STRING, NULL, "ring, llama3 or ulysses; default ring", DEMO_ANY},                        \
    {"ulysses_size", &(c).ulysses_size, DEMO_INT, "0", "of these ranks exchange tokens for heads, a ring joins the rest; 0: 1, with ulysses all", DEMO_AT_LEAST(0)}, \
    {"ring_attn_func", &(c).ring_attn_func, DEMO_STRING, NULL, "layout and schedule by axolotl's name", DEMO_ANY},            \
    {"sequence_parallel_mode", &(c).sequence_parallel_mode, DEMO_STRING, NULL, "layout and schedule by 360-LLaMA-Factory's name", DEMO_ANY}, \
    {"relaxed_attention", &(c).relaxed_attention, DEMO_FLAG, NULL, "sums in order of arrival: a little faster, not bit for bit", DEMO_ANY}, \
    {"omp_threads", &(c).omp_threads, DEMO_INT, "0", "threads of a rank; 0: cores / ranks", DEMO_AT_LEAST(0)},                \
    {"device", &(c).device, DEMO_STRING, "cpu", "cpu (fp32, fast) or reference (fp64, naive)", DEMO_ANY},                     \
    {"seed", &(c).seed, DEMO_INT, "42", "of weights and order of documents", DEMO_AT_LEAST(0)},                               \
    {"hidden_size", &(c).hidden_size, DEMO_INT, "128", "of a fresh model, like all below", DEMO_AT_LEAST(1)},                 \
    {"num_hidden_layers", &(c).num_hidden_layers, DEMO_INT, "4", "layers", DEMO_AT_LEAST(1)},                                 \
    {"num_attention_heads", &(c).num_attention_heads, DEMO_INT, "4", "query heads", DEMO_AT_LEAST(1)},                        \
    {"num_key_value_heads", &(c).num_key_value_heads, DEMO_INT, "2", "key and value heads", DEMO_AT_LEAST(1)},                \
    {"head_dim", &(c).head_dim, DEMO_INT, "0", "0: hidden_size / heads", DEMO_AT_LEAST(0)},                                   \
    {"intermediate_size", &(c).intermediate_size, DEMO_INT, "0", "0: 3 x hidden_size", DEMO_AT_LEAST(0)},                     \
    {"tie_word_embeddings", &(c).tie_word_embeddings, DEMO_FLAG, NULL, "head and embedding share a table", DEMO_ANY},         \
    {"rope_theta", &(c).rope_theta, DEMO_FLOAT, "10000", "base of the rotary embedding", DEMO_ABOVE(0)},                      \
    {"label_smoothing", &(c).label_smoothing, DEMO_FLOAT, "0", "share of the target given to all", DEMO_BETWEEN(0, 0.999)},   \
    {"z_loss", &(c).z_loss, DEMO_FLOAT, "0", "coefficient of the squared log-sum-exp", DEMO_AT_LEAST(0)}

typedef struct {
    demo_config config;
    demo_dataset train, eval;
    int64_t *usable;      /* training documents with a target, in file order */
    int64_t usable_count, total_steps, warmup;
    seqpar_llama_config model;
    int layout, schedule, lr_kind;
    int64_t dp;
} demo_job;

typedef struct { /* one rank at work */
    const demo_job *job;
    seqpar_ctx ctx;
    seqpar_device *device;
    seqpar_llama model;
    seqpar_optim optim;
    int64_t step;
    demo_progress progress;
    FILE *metrics;
    double *losses, *steps; /* stb_ds arrays, rank 0: what this process did */
    double norm_last, eval_loss, seconds;
    int64_t tokens;
} demo_rank;

static volatile sig_atomic_t demo_interrupted;
static void demo_on_interrupt(int signal_number) {
    (void)signal_number;
    demo_interrupted = 1;
}

/* ---- from options to a job ---- */

static int demo_pick(const char *text, const char *const *names, int count) {
    for (int i = 0; i < count; i++) if (text && !strcmp(text, names[i])) return i;
    return -1;
}

/* Layout and schedule by our names or by those of others, who must not contradict one another. Default: zigzag ring. */
static int demo_pick_attention(demo_job *job, char *error, size_t size) {
    static const char *const layouts[] = {"contiguous", "zigzag", "stripe", "zigzag-doc"}, *const schedules[] = {"ring", "llama3", "ulysses"};
    demo_config *c = &job->config;
    if (demo_placement_settle(&c->layout, &c->schedule, c->ring_attn_func, error, size)) return -1;
    if (demo_placement_settle(&c->layout, &c->schedule, c->sequence_parallel_mode, error, size)) return -1;
    job->layout = demo_pick(c->layout ? c->layout : "zigzag", layouts, 4);
    job->schedule = demo_pick(c->schedule ? c->schedule : "ring", schedules, 3);
    return 0;
}

static int demo_job_world(demo_job *job, char *error, size_t size) {
    demo_config *c = &job->config;
    int64_t dp = c->data_parallel_size ? c->data_parallel_size : c->world_size ? c->world_size / c->ring_attn_size : 1;
    if (c->world_size && (c->world_size % c->ring_attn_size || c->world_size != dp * c->ring_attn_size)) {
        snprintf(error, size, "world_size %lld is not data_parallel_size %lld x ring_attn_size %lld; change one of them", (long long)c->world_size, (long long)dp, (long long)c->ring_attn_size);
        return -1;
    }
    job->dp = dp;
    if (!c->omp_threads) {
        c->omp_threads = sysconf(_SC_NPROCESSORS_ONLN) / (dp * c->ring_attn_size);
        if (c->omp_threads < 1) c->omp_threads = 1;
    }
    return 0;
}

static int demo_job_model(demo_job *job, char *error, size_t size) {
    demo_config *c = &job->config;
    seqpar_error why = {0};
    job->model = (seqpar_llama_config){c->num_hidden_layers, c->hidden_size, c->num_attention_heads, c->num_key_value_heads,
        c->head_dim ? c->head_dim : c->hidden_size / c->num_attention_heads, c->intermediate_size ? c->intermediate_size : 3 * c->hidden_size,
        DEMO_VOCAB, c->rope_theta, 1e-5, c->tie_word_embeddings};
    if (c->pretrain && demo_load_config(c->pretrain, &job->model, &why)) {
        snprintf(error, size, "%s", why.text);
        return -1;
    }
    return 0;
}

static int demo_job_data(demo_job *job, char *error, size_t size) {
    demo_config *c = &job->config;
    demo_data_options options = {.input_key = c->input_key, .output_key = c->output_key, .input_template = c->output_key ? c->input_template : NULL, .pretrain_mode = c->pretrain_mode,
        .train_on_inputs = c->train_on_inputs, .max_len = c->max_len, .cut_long = !strcmp(c->truncation, "cut"), .max_samples = c->max_samples, .vocab_size = job->model.vocab};
    if (!c->dataset) {
        snprintf(error, size, "no training data; give --dataset FILE (.jsonl or .txt)");
        return -1;
    }
    if (!c->pack_len) c->pack_len = c->packing_samples && c->max_len < 2048 ? 2048 : c->max_len;
    if (c->pack_len < c->max_len) {
        snprintf(error, size, "pack_len %lld is shorter than max_len %lld; a document never leaves its row", (long long)c->pack_len, (long long)c->max_len);
        return -1;
    }
    if (demo_data_load(&job->train, c->dataset, &options, error, size)) return -1;
    options.max_samples = 0;
    if (c->eval_dataset && demo_data_load(&job->eval, c->eval_dataset, &options, error, size)) return -1;
    job->usable = calloc((size_t)arrlen(job->train.documents) + 1, sizeof *job->usable);
    for (int64_t i = 0; i < arrlen(job->train.documents); i++)
        if (demo_supervised(&job->train.documents[i])) job->usable[job->usable_count++] = i;
    return 0;
}

/* Steps: floor(documents / train_batch_size) an epoch, at least one; the rest of an epoch is left out. */
static void demo_job_steps(demo_job *job) {
    static const char *const kinds[] = {"constant", "linear", "cosine", "cosine_with_min_lr"};
    demo_config *c = &job->config;
    if (c->train_batch_size > job->usable_count) c->train_batch_size = job->usable_count;
    int64_t per_epoch = job->usable_count / c->train_batch_size;
    job->total_steps = c->max_steps > 0 ? c->max_steps : (int64_t)ceil(c->max_epochs * (double)per_epoch);
    job->warmup = c->warmup_steps >= 0 ? c->warmup_steps : (int64_t)ceil(c->lr_warmup_ratio * (double)job->total_steps);
    job->lr_kind = demo_pick(c->lr_scheduler, kinds, 4);
}

/* Fills the job from parsed options. Returns 0, or -1 with one sentence. */
static int demo_job_open(demo_job *job, char *error, size_t size) {
    if (demo_pick_attention(job, error, size) || demo_job_world(job, error, size) || demo_job_model(job, error, size) || demo_job_data(job, error, size)) return -1;
    demo_job_steps(job);
    return 0;
}

/* ---- rows of a step ---- */

/* Documents of step `step`: the same on all ranks. */
static void demo_step_documents(const demo_job *job, int64_t step, seqpar_document *documents) {
    int64_t batch = job->config.train_batch_size, per_epoch = job->usable_count / batch;
    int64_t *order = calloc((size_t)job->usable_count, sizeof *order);
    seqpar_shuffle(order, job->usable_count, (uint64_t)job->config.seed, (uint64_t)(step / per_epoch));
    for (int64_t i = 0; i < batch; i++) {
        const demo_document *d = &job->train.documents[job->usable[order[step % per_epoch * batch + i]]];
        documents[i] = (seqpar_document){.ids = d->ids, .loss_mask = d->loss_mask, .tokens = d->tokens, .unit = i};
    }
    free(order);
}

static seqpar_pack_desc demo_pack_desc(const demo_job *job, int keep_masked) {
    seqpar_pack_desc desc = {.pack_len = job->config.pack_len, .chunks = job->config.chunks, .vocab = job->model.vocab, .keep_masked = keep_masked,
                             .order = job->config.packing_samples ? SEQPAR_PACK_DECREASING : SEQPAR_PACK_UNIT_PER_ROW};
    return desc;
}

/* Micro-batches of a step: enough that none has more than micro_train_batch_size rows. */
static int64_t demo_accumulation(const demo_job *job, int64_t rows) {
    int64_t most = (rows + job->dp - 1) / job->dp, micro = job->config.micro_train_batch_size;
    return job->config.gradient_accumulation_steps ? job->config.gradient_accumulation_steps : (most + micro - 1) / micro;
}

static seqpar_llama_run demo_run_desc(const demo_job *job) {
    seqpar_llama_run run = {.layout = job->layout, .schedule = job->schedule, .heads_k_stride = job->config.ring_head_stride, .ulysses_size = job->config.ulysses_size, .relaxed = job->config.relaxed_attention, .recompute = job->config.gradient_checkpointing};
    return run;
}

/* ---- loss of the tokens this rank holds: one row of sums a piece ---- */

typedef struct { int64_t *leaf; double *value; } demo_sums; /* stb_ds arrays; value has two columns: loss, nll */

static seqpar_status demo_add_sums(demo_rank *r, const seqpar_llama_batch *b, const seqpar_row *rows, const seqpar_sft_desc *sft, demo_sums *sums) {
    double *values = calloc((size_t)b->tokens * 3 + 1, sizeof *values);
    seqpar_device_read(r->device, values, b->logp.data, 0, b->tokens);
    seqpar_device_read(r->device, values + b->tokens, b->smooth.data, 0, b->tokens);
    seqpar_device_read(r->device, values + 2 * b->tokens, b->lse.data, 0, b->tokens);
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; !status && i < b->share->count; i++) {
        const seqpar_piece *p = &b->share->pieces[i];
        double loss = 0, nll = 0;
        for (int64_t t = p->local; t < p->local + p->count; t++) {
            if (b->targets[t] == SEQPAR_IGNORE) continue;
            loss += seqpar_sft_token_loss(values[t], values[b->tokens + t], values[2 * b->tokens + t], sft);
            nll -= values[t];
        }
        if (!(fabs(loss) <= 1e300))
            status = seqpar_fail(r->ctx.error, SEQPAR_ERR_NOT_FINITE, "step %lld: the loss of row %lld on rank %lld is %g; lower the learning rate or look at the data of this step", (long long)r->step + 1,
                                 (long long)rows[p->row].index, (long long)r->ctx.world->rank, loss);
        arrput(sums->leaf, p->leaf);
        arrput(sums->value, loss);
        arrput(sums->value, nll);
    }
    free(values);
    return status;
}

static seqpar_status demo_total(demo_rank *r, demo_sums *sums, double total[2]) {
    seqpar_status status = seqpar_sum_pieces(&r->ctx, total, sums->leaf, sums->value, arrlen(sums->leaf), 2);
    arrfree(sums->leaf);
    arrfree(sums->value);
    return status;
}

/* ---- one step ---- */

typedef struct { seqpar_buffer dlogp, dsmooth, dzloss; } demo_seed_buffers;

static seqpar_status demo_seeds(demo_rank *r, const seqpar_llama_batch *b, const seqpar_sft_desc *sft, demo_seed_buffers *out, seqpar_head_seeds *seeds) {
    int64_t n = b->tokens, bytes = n * seqpar_dtype_bytes(r->device->accumulator);
    double *host = calloc((size_t)(3 * n + 1), sizeof *host);
    memset(out, 0, sizeof *out);
    memset(seeds, 0, sizeof *seeds);
    seqpar_status status = seqpar_sft_seeds(r->ctx.error, host, host + n, host + 2 * n, b->targets, NULL, n, sft);
    if (!status) status = seqpar_buffer_new(&r->ctx, &out->dlogp, bytes, SEQPAR_MEM_ACTIVATIONS);
    if (!status) status = seqpar_buffer_new(&r->ctx, &out->dsmooth, bytes, SEQPAR_MEM_ACTIVATIONS);
    if (!status) status = seqpar_buffer_new(&r->ctx, &out->dzloss, bytes, SEQPAR_MEM_ACTIVATIONS);
    if (!status && n) {
        seqpar_device_write(r->device, out->dlogp.data, 0, host, n);
        seqpar_device_write(r->device, out->dsmooth.data, 0, host + n, n);
        seqpar_device_write(r->device, out->dzloss.data, 0, host + 2 * n, n);
    }
    seeds->dlogp = out->dlogp.data;
    if (sft->label_smoothing > 0) seeds->dsmooth = out->dsmooth.data;
    if (sft->z_loss > 0) seeds->dzloss = out->dzloss.data;
    free(host);
    return status;
}

static seqpar_status demo_micro(demo_rank *r, const seqpar_batch *batch, int64_t index, const seqpar_sft_desc *sft, demo_sums *sums) {
    seqpar_llama_batch b;
    seqpar_head_seeds seeds;
    demo_seed_buffers buffers;
    seqpar_llama_run run = demo_run_desc(r->job);
    int64_t first, count;
    memset(&buffers, 0, sizeof buffers);
    seqpar_step_rows(&r->ctx, &r->optim, index, &first, &count);
    seqpar_status status = seqpar_llama_open_batch(&r->ctx, &r->model, &b, batch->row + first, count, &run);
    if (!status) status = demo_seeds(r, &b, sft, &buffers, &seeds);
    if (!status) status = seqpar_llama_forward(&r->ctx, &r->model, &b, 1);
    if (!status) status = seqpar_llama_backward(&r->ctx, &r->model, &b, &r->optim, index, &seeds);
    if (!status) status = demo_add_sums(r, &b, batch->row + first, sft, sums);
    seqpar_buffer_free(&r->ctx, &buffers.dlogp);
    seqpar_buffer_free(&r->ctx, &buffers.dsmooth);
    seqpar_buffer_free(&r->ctx, &buffers.dzloss);
    seqpar_llama_close_batch(&r->ctx, &r->model, &b);
    return status;
}

static double demo_learning_rate(const demo_job *job, int64_t step) {
    return job->config.learning_rate * seqpar_schedule_factor(job->lr_kind, step, job->warmup, job->total_steps, job->config.min_lr_ratio);
}

static void demo_log_step(demo_rank *r, double loss, double lr, const seqpar_batch *batch, double seconds) {
    const seqpar_pack_counts *n = &batch->counts;
    if (r->ctx.world->rank) return;
    arrput(r->losses, loss);
    arrput(r->steps, (double)r->step);
    r->norm_last = r->optim.norm;
    r->tokens += n->tokens;
    r->seconds += seconds;
    demo_progress_step(&r->progress, r->step, loss, n->tokens);
    if (!r->metrics) return;
    fprintf(r->metrics, "{\"step\": %lld, \"loss\": %.17g, \"grad_norm\": %.17g, \"learning_rate\": %.17g, \"rows\": %lld, \"tokens\": %lld, \"supervised_tokens\": %lld, \"tokens_per_second\": %.1f}\n",
            (long long)r->step, loss, r->optim.norm, lr, (long long)batch->rows, (long long)n->tokens, (long long)n->supervised, (double)n->tokens / seconds);
    fflush(r->metrics);
}

/* Said once: rows so short that some rank never has a token waste it. */
static void demo_notice_idle(demo_rank *r, const seqpar_batch *batch) {
    int64_t ranks = r->ctx.sp_size, busiest = 0;
    for (int64_t i = 0; i < batch->rows; i++) {
        int64_t busy = 0;
        for (int64_t p = 0; p < ranks; p++) {
            seqpar_share share;
            if (seqpar_split(NULL, &share, &batch->row[i], 1, r->job->layout, ranks, p)) return;
            busy += share.tokens > 0;
            seqpar_share_free(&share);
        }
        if (busy > busiest) busiest = busy;
    }
    if (busiest < ranks)
        demo_progress_say(&r->progress, "notice: no row of the first step has tokens for more than %lld of %lld ranks; use longer rows (--packing_samples, --pack_len), more --chunks or fewer ranks",
                          (long long)busiest, (long long)ranks);
}

static seqpar_status demo_step(demo_rank *r) {
    const demo_job *job = r->job;
    seqpar_document *documents = calloc((size_t)job->config.train_batch_size, sizeof *documents);
    seqpar_pack_desc pack = demo_pack_desc(job, 0);
    seqpar_batch batch;
    demo_sums sums = {0};
    double total[2] = {0}, lr = demo_learning_rate(job, r->step), began = demo_seconds();
    demo_step_documents(job, r->step, documents);
    seqpar_status status = seqpar_pack(r->ctx.error, &batch, documents, job->config.train_batch_size, &pack);
    free(documents);
    if (status) return status;
    if (r->ctx.world->rank == 0 && !arrlen(r->losses)) demo_notice_idle(r, &batch);
    seqpar_sft_desc sft = {batch.counts.supervised, job->config.label_smoothing, job->config.z_loss};
    int64_t accumulation = demo_accumulation(job, batch.rows);
    status = seqpar_step_begin(&r->ctx, &r->optim, batch.row, batch.rows, job->layout, accumulation);
    for (int64_t i = 0; !status && i < accumulation; i++) status = demo_micro(r, &batch, i, &sft, &sums);
    if (!status) status = demo_total(r, &sums, total);
    if (!status) status = seqpar_step_end(&r->ctx, &r->optim, r->model.params.data, lr);
    if (!status) {
        r->step++;
        demo_log_step(r, total[0] / (double)sft.count, lr, &batch, demo_seconds() - began);
    }
    seqpar_batch_free(&batch);
    return status;
}

/* ---- evaluation: the token mean over the whole set, in windows of rows ---- */

static seqpar_status demo_eval_rows(demo_rank *r, const seqpar_batch *batch, demo_sums *sums) {
    seqpar_llama_run run = demo_run_desc(r->job);
    seqpar_sft_desc plain = {.count = 1};
    int64_t micro = r->job->config.micro_train_batch_size, first = seqpar_grid_begin(batch->rows, r->ctx.dp_size, r->ctx.dp_rank);
    int64_t end = seqpar_grid_begin(batch->rows, r->ctx.dp_size, r->ctx.dp_rank + 1), count;
    seqpar_status status = SEQPAR_OK;
    for (; !status && first < end; first += count) {
        seqpar_llama_batch b;
        count = end - first < micro ? end - first : micro;
        status = seqpar_llama_open_batch(&r->ctx, &r->model, &b, batch->row + first, count, &run);
        if (!status) status = seqpar_llama_forward(&r->ctx, &r->model, &b, 0);
        if (!status) status = seqpar_llama_values(&r->ctx, &r->model, &b);
        if (!status) status = demo_add_sums(r, &b, batch->row + first, &plain, sums);
        seqpar_llama_close_batch(&r->ctx, &r->model, &b);
    }
    return status;
}

static seqpar_status demo_evaluate(demo_rank *r) {
    const demo_job *job = r->job;
    int64_t count = arrlen(job->eval.documents), window = job->config.train_batch_size * 4, supervised = 0;
    double nll = 0, total[2];
    seqpar_pack_desc pack = demo_pack_desc(job, 1);
    seqpar_status status = SEQPAR_OK;
    for (int64_t first = 0; !status && first < count; first += window) {
        seqpar_batch batch;
        demo_sums sums = {0};
        int64_t n = count - first < window ? count - first : window;
        seqpar_document *documents = calloc((size_t)n, sizeof *documents);
        for (int64_t i = 0; i < n; i++) {
            const demo_document *d = &job->eval.documents[first + i];
            documents[i] = (seqpar_document){.ids = d->ids, .loss_mask = d->loss_mask, .tokens = d->tokens, .unit = i};
        }
        status = seqpar_pack(r->ctx.error, &batch, documents, n, &pack);
        free(documents);
        if (status) return status;
        status = demo_eval_rows(r, &batch, &sums);
        if (!status) status = demo_total(r, &sums, total);
        if (!status) { nll += total[1]; supervised += batch.counts.supervised; }
        seqpar_batch_free(&batch);
    }
    if (status || r->ctx.world->rank) return status;
    r->eval_loss = nll / (double)supervised;
    demo_progress_say(&r->progress, "step %lld: evaluation loss %.6f nats over %lld tokens", (long long)r->step, r->eval_loss, (long long)supervised);
    if (r->metrics) fprintf(r->metrics, "{\"step\": %lld, \"eval_loss\": %.17g, \"eval_tokens\": %lld}\n", (long long)r->step, r->eval_loss, (long long)supervised);
    return SEQPAR_OK;
}

/* ---- the run ---- */

static seqpar_status demo_checkpoint(demo_rank *r) {
    const demo_config *c = &r->job->config;
    demo_state state = {r->step, c->seed, c->train_batch_size, r->job->usable_count};
    seqpar_status status = demo_save_checkpoint(&r->ctx, &r->model, &r->optim, c->ckpt_path, &state, c->max_ckpt_num);
    if (!status && r->ctx.world->rank == 0) demo_progress_say(&r->progress, "step %lld: checkpoint in %s", (long long)r->step, c->ckpt_path);
    return status;
}

static seqpar_status demo_resume(demo_rank *r) {
    const demo_config *c = &r->job->config;
    demo_state state = {0};
    seqpar_status status = demo_load_checkpoint(&r->ctx, &r->model, &r->optim, c->ckpt_path, &state);
    if (status) return status;
    if (state.seed != c->seed || state.train_batch_size != c->train_batch_size || state.documents != r->job->usable_count)
        return seqpar_fail(r->ctx.error, SEQPAR_ERR_OPTION, "the checkpoint was written with seed %lld, train_batch_size %lld and %lld documents, this run has %lld, %lld and %lld; use the same to go on",
            (long long)state.seed, (long long)state.train_batch_size, (long long)state.documents, (long long)c->seed, (long long)c->train_batch_size, (long long)r->job->usable_count);
    r->step = state.step;
    return SEQPAR_OK;
}

static seqpar_status demo_rank_open(demo_rank *r, seqpar_comm *world) {
    const demo_config *c = &r->job->config;
    seqpar_optim_desc optim = {!strcmp(c->optim, "sgd") ? SEQPAR_SGD : SEQPAR_ADAMW, (int)c->zero_stage, c->adam_betas[0], c->adam_betas[1], c->adam_eps, c->l2, c->max_norm};
    r->device = !strcmp(c->device, "reference") ? seqpar_device_reference() : seqpar_device_cpu(c->omp_threads);
    seqpar_status status = seqpar_ctx_open(&r->ctx, world, r->device, c->ring_attn_size);
    if (!status) status = seqpar_llama_open(&r->ctx, &r->model, &r->job->model);
    if (!status) status = seqpar_optim_open(&r->ctx, &r->optim, r->model.tensors, r->model.tensor_count, &optim);
    if (!status) seqpar_llama_init(&r->ctx, &r->model, (uint64_t)c->seed);
    if (!status && c->pretrain) status = demo_load_weights(&r->ctx, &r->model, c->pretrain);
    if (!status && c->load_checkpoint) status = demo_resume(r);
    if (!status && world->rank == 0 && c->metrics_path) {
        r->metrics = fopen(c->metrics_path, c->load_checkpoint ? "ab" : "wb");
        if (!r->metrics) status = seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_OPEN, "cannot open %s: %s", c->metrics_path, strerror(errno));
    }
    return status;
}

static seqpar_status demo_draw_loss(demo_rank *r) {
    char path[1280], why[512];
    demo_series series = {.name = "training loss", .x = r->steps, .y = r->losses, .points = arrlen(r->losses)};
    demo_plot plot = {.title = "Training loss", .x_label = "optimizer step", .y_label = "loss, nats a token", .series = &series, .series_count = 1};
    snprintf(path, sizeof path, "%s/training_loss.svg", r->job->config.save_path);
    return demo_plot_write(path, &plot, why, sizeof why) ? seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_WRITE, "%s", why) : SEQPAR_OK;
}

/* Did anybody press Ctrl-C? Everybody must answer alike. */
static seqpar_status demo_stop_wanted(demo_rank *r, int *stop) {
    int64_t flag = demo_interrupted;
    seqpar_status status = seqpar_comm_max_i64(r->ctx.world, &flag, 1);
    *stop = flag != 0;
    return status;
}

static seqpar_status demo_train(demo_rank *r) {
    const demo_config *c = &r->job->config;
    int stop = 0, evaluates = arrlen(r->job->eval.documents) > 0;
    seqpar_status status = r->ctx.world->rank ? SEQPAR_OK : demo_make_folder(c->save_path, r->ctx.error); /* before the work, not after */
    while (!status && !stop && r->step < r->job->total_steps) {
        status = demo_step(r);
        if (!status) status = demo_stop_wanted(r, &stop);
        int due = c->save_steps > 0 && r->step % c->save_steps == 0;
        if (!status && (due || stop)) status = demo_checkpoint(r);
        int evaluate = evaluates && !stop && (r->step == r->job->total_steps || (c->eval_steps > 0 && r->step % c->eval_steps == 0));
        if (!status && evaluate) status = demo_evaluate(r);
    }
    if (!status && !stop && r->ctx.world->rank == 0) {
        status = demo_save_model(&r->ctx, &r->model, c->save_path);
        if (!status && c->plot_loss) status = demo_draw_loss(r);
    }
    if (!status && !stop) status = seqpar_comm_barrier(r->ctx.world);
    return status;
}

static void demo_say_totals(demo_rank *r) {
    double first = arrlen(r->losses) ? r->losses[0] : NAN, last = arrlen(r->losses) ? arrlast(r->losses) : NAN;
    double speed = r->seconds > 0 ? (double)r->tokens / r->seconds : 0.0;
    bool evaluated = arrlen(r->job->eval.documents) > 0;
    demo_progress_end(&r->progress);
    if (demo_interrupted) {
        fprintf(stderr, "interrupted after step %lld; go on with --load_checkpoint\n", (long long)r->step);
        return;
    }
    if (r->job->config.json) {
        printf("{\"steps\": %lld, \"loss_first\": %.17g, \"loss_last\": %.17g, \"grad_norm\": %.17g, \"tokens_per_second\": %.1f", (long long)r->step, first, last, r->norm_last, speed);
        if (evaluated) printf(", \"eval_loss\": %.17g", r->eval_loss);
        printf("}\n");
        return;
    }
    printf("loss %.6f -> %.6f, gradient norm %.6f, %.0f tokens/s, model in %s\n", first, last, r->norm_last, speed, r->job->config.save_path);
    if (evaluated) printf("evaluation loss %.6f nats\n", r->eval_loss);
}

static seqpar_status demo_rank_main(seqpar_comm *world, void *user) {
    demo_rank r;
    memset(&r, 0, sizeof r);
    r.job = user;
    seqpar_status status = demo_rank_open(&r, world);
    if (world->rank == 0) demo_progress_begin(&r.progress, r.step, r.job->total_steps, r.job->config.logging_steps);
    if (!status) status = demo_train(&r);
    if (!status && world->rank == 0) demo_say_totals(&r);
    if (status && world->rank == 0) demo_progress_end(&r.progress);
    if (r.metrics) fclose(r.metrics);
    arrfree(r.losses);
    arrfree(r.steps);
    seqpar_optim_close(&r.ctx, &r.optim);
    seqpar_llama_close(&r.ctx, &r.model);
    seqpar_ctx_close(&r.ctx);
    seqpar_device_close(r.device);
    return status;
}

/* OpenMP threads that spin while they wait take the cores from the other ranks. The runtime reads this when it is
   loaded, so the program starts itself once more. */
static void demo_wait_passively(char **argv) {
    if (getenv("OMP_WAIT_POLICY")) return;
    setenv("OMP_WAIT_POLICY", "passive", 1);
    execv("/proc/self/exe", argv);
}

static void demo_job_close(demo_job *job) {
    demo_data_free(&job->train);
    demo_data_free(&job->eval);
    free(job->usable);
}

/* Runs the job on its ranks. Returns the exit code. */
static int demo_job_run(demo_job *job) {
    seqpar_error error;
    struct sigaction action = {.sa_handler = demo_on_interrupt, .sa_flags = SA_RESTART};
    sigaction(SIGINT, &action, NULL);
    seqpar_status status = seqpar_run_threads(job->dp * job->config.ring_attn_size, demo_rank_main, job, &error);
    if (status) fprintf(stderr, "error: %s (%s)\n", error.text, seqpar_status_name(status));
    return status ? 1 : demo_interrupted ? 130 : 0;
}
#endif
