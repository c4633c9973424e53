/* SPDX-License-Identifier: MIT OR Unlicense */
/* Steps and texts of a model folder, one at a time as bench_transformers.py asks for them, so that
   both sides take turns.

       steps MODEL THREADS RECOMPUTE        then lines on standard input:
       step IDS N,N,...                     an SFT step of AdamW over the token ids in that file,
                                            int32, one row of documents of so many tokens:
                                            'SECONDS LOSS NORM'
       texts IDS COUNT NEW                  COUNT prompts, all of one length, in that file; the
                                            likeliest NEW tokens of each: 'SECONDS', and a line of
                                            ids for each text */
#define STB_DS_IMPLEMENTATION
#include "seqpar_llama.h"
#include "seqpar_safetensors.h"
#include "trainer/model/tensors.h"
#include <errno.h>
#include <time.h>

enum { LINE = 4096 };
static const double learning_rate = 1e-5;

typedef struct {
    seqpar_comm *self;
    seqpar_ctx ctx;
    seqpar_llama model;
    seqpar_optim optim;
    int recompute;
} server;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void give_up(const char *why) {
    fprintf(stderr, "error: %s\n", why);
    exit(1);
}

static void give_up_file(const char *path) {
    fprintf(stderr, "error: no token ids can be read from %s: %s\n", path, strerror(errno));
    exit(1);
}

/* Token ids of a file, to be freed. */
static int32_t *ids_of(const char *path, int64_t *count) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) give_up_file(path);
    *count = ftell(file) / 4;
    int32_t *ids = (int32_t *)demo_alloc(*count, sizeof *ids);
    rewind(file);
    if (fread(ids, 4, (size_t)*count, file) != (size_t)*count) give_up_file(path);
    fclose(file);
    return ids;
}

/* Documents of these lengths, with commas between, in one row. */
static seqpar_status row_of(server *s, const int32_t *ids, int64_t tokens, const char *lengths,
                            seqpar_batch *batch) {
    enum { MOST = 64 };
    seqpar_document documents[MOST];
    int64_t count = 0, all = 0;
    for (char *rest = NULL; count < MOST && *lengths; lengths = rest + (*rest == ',')) {
        int64_t n = strtoll(lengths, &rest, 10);
        if (rest == lengths || n < 1 || n > tokens - all) break;
        documents[count++] = (seqpar_document){.ids = ids + all, .tokens = n};
        all += n;
    }
    if (all != tokens) give_up("the lengths are not those of the file's tokens");
    seqpar_pack_desc desc = {.pack_len = tokens, .order = SEQPAR_PACK_IN_ORDER};
    return seqpar_pack(s->ctx.error, batch, documents, count, &desc);
}

/* -1/N for each supervised token */
static seqpar_status seeds_of(server *s, const seqpar_llama_batch *b, int64_t count,
                              seqpar_buffer *seeds) {
    double *host = (double *)demo_alloc(3 * b->tokens, sizeof *host);
    seqpar_host_seeds parts = {host, host + b->tokens, host + 2 * b->tokens};
    seqpar_sft_desc desc = {.count = count};
    seqpar_status status = seqpar_sft_seeds(s->ctx.error, &parts, b->targets, NULL, b->tokens,
                                            &desc);
    if (!status)
        status = seqpar_buffer_new(&s->ctx, seeds, b->tokens * 4, SEQPAR_MEM_ACTIVATIONS);
    if (!status)
        seqpar_device_write(s->ctx.device, seeds->data, 0, host, b->tokens, SEQPAR_DTYPE_F32);
    free(host);
    return status;
}

static double loss_of(server *s, const seqpar_llama_batch *b) {
    double sum = 0, logp;
    int64_t count = 0;
    for (int64_t t = 0; t < b->tokens; t++)
        if (b->targets[t] != SEQPAR_IGNORE) {
            seqpar_device_read(s->ctx.device, &logp, b->logp.data, t, 1, SEQPAR_DTYPE_F32);
            sum -= logp;
            count++;
        }
    return sum / (double)count;
}

static seqpar_status step_of(server *s, const seqpar_batch *batch, double *loss) {
    seqpar_llama_batch_desc desc = {.layout = SEQPAR_LAYOUT_ZIGZAG, .recompute = s->recompute};
    seqpar_llama_batch b;
    seqpar_buffer seed = {0};
    seqpar_status status = seqpar_step_begin(&s->ctx, &s->optim, batch->row, 1,
                                             SEQPAR_LAYOUT_ZIGZAG, 1);
    if (!status) status = seqpar_llama_open_batch(&s->ctx, &s->model, &b, batch->row, 1, &desc);
    if (status) return status;
    status = seeds_of(s, &b, batch->counts.supervised, &seed);
    seqpar_vocab_seeds seeds = {.dlogp = seed.data};
    if (!status) status = seqpar_llama_forward(&s->ctx, &s->model, &b, 1);
    if (!status) status = seqpar_llama_backward(&s->ctx, &s->model, &b, &s->optim, 0, &seeds);
    *loss = loss_of(s, &b);
    if (!status)
        status = seqpar_step_end(&s->ctx, &s->optim, s->model.params.data, s->model.elements,
                                 learning_rate);
    seqpar_buffer_free(&s->ctx, &seed);
    seqpar_llama_close_batch(&s->ctx, &s->model, &b);
    return status;
}

static void answer_step(server *s, const char *path, const char *lengths) {
    int64_t tokens;
    int32_t *ids = ids_of(path, &tokens);
    seqpar_batch batch;
    double loss = NAN, began = now();
    if (row_of(s, ids, tokens, lengths, &batch) || step_of(s, &batch, &loss))
        give_up(s->ctx.error->text);
    printf("%.6f %.9f %.9f\n", now() - began, loss, s->optim.norm);
    seqpar_batch_free(&batch);
    free(ids);
}

static void answer_texts(server *s, const char *path, int64_t count, int64_t fresh) {
    int64_t tokens;
    int32_t *ids = ids_of(path, &tokens);
    seqpar_llama_prompt *prompts = (seqpar_llama_prompt *)demo_alloc(count, sizeof *prompts);
    seqpar_llama_text *texts = (seqpar_llama_text *)demo_alloc(count, sizeof *texts);
    seqpar_llama_sample_desc desc = {.max_new_tokens = fresh, .batch = count, .top_p = 1};
    for (int64_t i = 0; i < count; i++)
        prompts[i] = (seqpar_llama_prompt){ids + i * (tokens / count), tokens / count, i};
    double began = now();
    if (seqpar_llama_generate(&s->ctx, &s->model, texts, prompts, count, &desc))
        give_up(s->ctx.error->text);
    printf("%.6f\n", now() - began);
    for (int64_t i = 0; i < count; i++)
        for (int64_t t = 0; t < texts[i].count; t++)
            printf("%d%c", texts[i].ids[t], t + 1 < texts[i].count ? ' ' : '\n');
    seqpar_llama_texts_free(texts, count);
    free(prompts);
    free(texts);
    free(ids);
}

static void server_open(server *s, const char *folder, int64_t threads) {
    seqpar_optim_desc desc = {.kind = SEQPAR_OPTIM_ADAMW,
                              .beta1 = .9,
                              .beta2 = .95,
                              .eps = 1e-8,
                              .decay = .1,
                              .max_norm = 1};
    seqpar_llama_config config = {0};
    seqpar_error error = {0};
    s->self = seqpar_comm_self();
    if (demo_load_config(folder, &config, &error)) give_up(error.text);
    if (seqpar_ctx_open(&s->ctx, s->self, seqpar_device_cpu(threads), 1) ||
        seqpar_llama_open(&s->ctx, &s->model, &config) ||
        demo_load_weights(&s->ctx, &s->model, folder) ||
        seqpar_optim_open(&s->ctx, &s->optim, s->model.tensors, s->model.tensor_count, &desc))
        give_up(s->self->error->text);
}

int main(int argc, char **argv) {
    static server s;
    char line[LINE], path[LINE], lengths[LINE];
    long long count, fresh;
    if (argc != 4) give_up("give MODEL THREADS RECOMPUTE; bench_transformers.py starts it");
    s.recompute = atoi(argv[3]);
    server_open(&s, argv[1], atoll(argv[2]));
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "step %4095s %4095s", path, lengths) == 2)
            answer_step(&s, path, lengths);
        else if (sscanf(line, "texts %4095s %lld %lld", path, &count, &fresh) == 3 && count > 0)
            answer_texts(&s, path, count, fresh);
        else
            give_up("a line is neither 'step IDS N,N,...' nor 'texts IDS COUNT NEW'");
        fflush(stdout);
    }
    seqpar_device *device = s.ctx.device;
    seqpar_optim_close(&s.ctx, &s.optim);
    seqpar_llama_close(&s.ctx, &s.model);
    seqpar_ctx_close(&s.ctx);
    seqpar_device_close(device);
    seqpar_comm_free(s.self);
    return 0;
}
