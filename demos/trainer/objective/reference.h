/* SPDX-License-Identifier: MIT OR Unlicense */
/* reference.h - the frozen reference model. It runs in every step, or once before training
 * (--precompute_ref).
 *
 * Before training, the log-probs of every document of all steps and of the evaluation are
 * computed, summed over the document's tokens, and stored in CKPT/reference.safetensors.
 * Another run can read the file if it has the same documents in each step. It may have another
 * number of ranks, unless the layout changes the order of summation. Metadata of the file
 * records everything else that the sums depend on, and a run refuses a file with other
 * metadata. */
#ifndef DEMO_REFERENCE_H
#define DEMO_REFERENCE_H
#include "trainer/run/trainer.h"
#include "trainer/base/escape.h"

#define DEMO_OFFLOAD_BINDING(p) \
    { \
        "ref_offload", &(p).ref_offload, DEMO_FLAG, NULL, \
            "offload the reference's weights: at most two layers are in the device's memory", \
            DEMO_ANY \
    }
#define DEMO_REFERENCE_BINDINGS(p) \
    {"ref_pretrain", \
     &(p).ref_pretrain, \
     DEMO_STRING, \
     NULL, \
     "folder of the reference model; without it the initial model", \
     DEMO_ANY}, \
        DEMO_OFFLOAD_BINDING(p), { \
        "precompute_ref", &(p).precompute_ref, DEMO_FLAG, NULL, \
            "compute the reference's log-probs once, before the first step, and keep them " \
            "in ckpt_path", \
            DEMO_ANY \
    }

enum { DEMO_TRAINING, DEMO_EVALUATION, DEMO_SETS };
typedef struct { /* stored sums of a dataset, one window after the other */
    int64_t windows, documents;
    /* (documents) sums of the documents; of KTO's mismatched documents, or NULL */
    double *sums[2];
    uint64_t *rows; /* (windows) digests of the documents in each window */
} demo_stored;

typedef struct {
    /* used if `there` is set; else the reference is r->model without adapters */
    seqpar_llama model;
    int there;
    demo_stored stored[DEMO_SETS];
} demo_reference;

/* ---- the model ---- */

static const char *demo_frozen_name(const demo_job *job) {
    return job->objective->frozen ? job->objective->frozen : "reference";
}

/* Reads the config of the reference. Its size and family may differ from those of the trained
   model, but its vocabulary must be the same. */
static seqpar_status demo_reference_config(demo_rank *r, const char *folder,
                                           seqpar_llama_config *config) {
    seqpar_error why = {0};
    if (!folder) *config = r->job->model;
    if (folder && demo_load_config(folder, config, &why))
        return seqpar_fail(r->ctx.error, why.status, "%s", why.text);
    if (config->vocab == r->job->model.vocab) return SEQPAR_OK;
    return seqpar_fail(r->ctx.error, SEQPAR_ERR_OPTION,
                       "the %s in %s has a vocabulary of %lld, but the trained model one of "
                       "%lld; take a model with the same tokens",
                       demo_frozen_name(r->job), folder, (long long)config->vocab,
                       (long long)r->job->model.vocab);
}

/* Is the reference the trained model without its adapters? The weights of that model are
   frozen, so it needs no copy. */
static bool demo_reference_is_base(const demo_job *job, const char *folder) {
    return job->adapter.rank && (!folder || demo_same_file(folder, job->config.pretrain));
}

static seqpar_llama *demo_reference_model(demo_rank *r) {
    demo_reference *reference = (demo_reference *)r->own;
    return reference->there ? &reference->model : &r->model;
}

static seqpar_status demo_reference_digest(demo_rank *r) {
    uint64_t digests[DEMO_REFERENCES];
    seqpar_status status = demo_digest_model(&r->ctx, demo_reference_model(r),
                                             &digests[DEMO_REFERENCE],
                                             &digests[DEMO_REFERENCE_OLD]);
    if (!status && r->job->adapter.rank)
        demo_lora_hangs(r, DEMO_OF_REFERENCE, digests[DEMO_REFERENCE]);
    else if (!status)
        memcpy(r->reference, digests, sizeof digests);
    return status;
}

/* Opens the reference: the model of the folder, or the model that training starts from. Loads
   its weights, unless it is the trained model without adapters. */
static seqpar_status demo_reference_open(demo_rank *r, const char *folder, bool offload) {
    const demo_config *c = &r->job->config;
    demo_reference *reference = (demo_reference *)demo_alloc(1, sizeof *reference);
    r->own = reference;
    seqpar_llama_config config;
    /* only the actor's group has the trained model */
    if (!r->group && demo_reference_is_base(r->job, folder)) {
        if (offload && !r->world->rank)
            fprintf(stderr,
                    "notice: the %s is the model without its adapters, so --%s_offload is not "
                    "used\n",
                    demo_frozen_name(r->job), r->job->objective->frozen ? "teacher" : "ref");
        if (c->adapter_name_or_path && !r->world->rank)
            fprintf(stderr,
                    "notice: the %s is the model without adapters; for a reference with the "
                    "adapters of --adapter_name_or_path, merge them first (--save_merged)\n",
                    demo_frozen_name(r->job));
        if (r->base) demo_lora_hangs(r, DEMO_OF_REFERENCE, r->base);
        return SEQPAR_OK;
    }
    if (!folder) folder = c->pretrain;
    seqpar_status status = demo_reference_config(r, folder, &config);
    if (!status)
        status = demo_model_open(&r->ctx, &reference->model, &config, r->job->shared, offload);
    reference->there = !status;
    if (status) return status;
    status = demo_begin_model(&r->ctx, &reference->model, folder, c->seed);
    if (status || demo_is_planned(r->device) ||
        (r->ctx.world->rank && !reference->model.shards))
        return status;
    return demo_reference_digest(r);
}

static void demo_reference_close(demo_rank *r) {
    demo_reference *reference = (demo_reference *)r->own;
    if (reference && reference->there) seqpar_llama_close(&r->ctx, &reference->model);
    for (int i = 0; reference && i < DEMO_SETS; i++) {
        free(reference->stored[i].sums[0]);
        free(reference->stored[i].sums[1]);
        free(reference->stored[i].rows);
    }
    free(reference);
    r->own = NULL;
}

/* Runs forward of the reference or teacher, without adapters, on these rows. values: also
   computes the log-probs, in b->logp. The caller closes the batch. */
static seqpar_status demo_reference_pass(demo_rank *r, seqpar_llama_batch *b,
                                         const seqpar_row *rows, int64_t count, int values) {
    seqpar_llama *model = demo_reference_model(r), *adapters = model->adapters;
    seqpar_llama_batch_desc run = demo_batch_desc(r->job);
    model->adapters = NULL;
    seqpar_status status = seqpar_llama_open_batch(&r->ctx, model, b, rows, count, &run);
    if (!status) status = seqpar_llama_forward(&r->ctx, model, b, 0);
    if (!status && values) status = seqpar_llama_values(&r->ctx, model, b);
    model->adapters = adapters;
    return status;
}

/* Runs the reference on these rows and reads its log-probs (tokens) back to the host. */
static inline seqpar_status demo_reference_logp(demo_rank *r, const seqpar_row *rows,
                                                int64_t count, double *logp) {
    seqpar_llama_batch b;
    seqpar_status status = demo_reference_pass(r, &b, rows, count, 1);
    if (!status)
        seqpar_device_read(r->device, logp, b.logp.data, 0, b.tokens, r->device->accumulator);
    seqpar_llama_close_batch(&r->ctx, demo_reference_model(r), &b);
    return status;
}

/* ---- digests ---- */

/* Adds to the digest everything that the sums of these documents depend on, except the model.
   Rows are not part of it, since the sum of a document does not depend on its row. */
static uint64_t demo_digest_rows(uint64_t digest, const seqpar_batch *batch) {
    for (int64_t i = 0; i < batch->rows; i++) {
        const seqpar_row *row = &batch->row[i];
        for (int64_t d = 0; d < row->docs; d++) {
            int64_t at = row->cu_seqlens[d], tokens = row->cu_seqlens[d + 1] - at;
            const int64_t numbers[] = {row->doc_source[d], tokens, row->cell};
            digest = demo_digest(digest, numbers, sizeof numbers);
            digest = demo_digest(digest, row->ids + at, tokens * (int64_t)sizeof *row->ids);
            digest = demo_digest(digest, row->targets + at,
                                 tokens * (int64_t)sizeof *row->targets);
        }
    }
    return digest;
}

/* ---- metadata of the file: what its sums depend on ---- */

enum { DEMO_NOTES = 7, DEMO_EVAL_NOTE = 1 };
static const char *const demo_note_keys[DEMO_NOTES] = {
    "training data", "evaluation data", "reference model", "seed", "train_batch_size",
    "cell",          "attention"};
typedef struct {
    char text[DEMO_NOTES][128];
} demo_notes;

/* Describes how attention is computed. If the layout does not change any bit, the file is valid
   for any number of ranks and any packing; otherwise the text names both. */
static void demo_note_attention(const demo_rank *r, char *text, size_t size) {
    const demo_config *c = &r->job->config;
    int bits = !c->relaxed_attention && seqpar_layout_at(r->job->layout)->whole_cells;
    bool cublas = c->cublas && !strcmp(c->device, "cuda");
    int used = snprintf(text, size, "%s%s%s", c->device, demo_wants_bf16(c) ? " in bf16" : "",
                        cublas ? " with cuBLAS" : "");
    if (bits)
        snprintf(text + used, size - (size_t)used, ", any ranks");
    else
        snprintf(text + used, size - (size_t)used,
                 ", %s %s on %lld ranks, ulysses %lld%s, %s %lld",
                 seqpar_layout_name(r->job->layout), seqpar_schedule_name(r->job->schedule),
                 (long long)c->ring_attn_size, (long long)c->ulysses_size,
                 c->relaxed_attention ? ", relaxed" : "",
                 c->packing_samples ? "rows of" : "alone in rows of", (long long)c->pack_len);
}

/* Fills the metadata of this run. Collective, since the digest of the reference's weights
   is. */
static seqpar_status demo_notes_of(demo_rank *r, demo_notes *notes) {
    const demo_job *job = r->job;
    const demo_config *c = &job->config;
    const int64_t numbers[] = {c->seed, c->train_batch_size, c->cell};
    size_t size = sizeof notes->text[0];
    snprintf(notes->text[0], size, "%016llx",
             (unsigned long long)demo_digest_documents(&job->train));
    snprintf(notes->text[DEMO_EVAL_NOTE], size, "%016llx",
             (unsigned long long)demo_digest_documents(&job->eval));
    uint64_t digest = 0, old;
    seqpar_status status = demo_digest_model(&r->ctx, demo_reference_model(r), &digest, &old);
    snprintf(notes->text[2], size, "%016llx", (unsigned long long)digest);
    for (int i = 0; i < 3; i++)
        snprintf(notes->text[3 + i], size, "%lld", (long long)numbers[i]);
    demo_note_attention(r, notes->text[DEMO_NOTES - 1], size);
    return status;
}

/* Refuses a file whose metadata differ from those of this run. A run without evaluation accepts
   any evaluation data. */
static seqpar_status demo_notes_compare(demo_rank *r, const seqpar_safetensors_file *file,
                                        const char *path, const demo_notes *notes) {
    for (int i = 0; i < DEMO_NOTES; i++) {
        const char *there = seqpar_safetensors_metadata(file, demo_note_keys[i]);
        if (i == DEMO_EVAL_NOTE && !arrlen(r->job->eval.documents)) continue;
        if (!there || strcmp(there, notes->text[i]))
            return seqpar_fail(r->ctx.error, SEQPAR_ERR_OPTION,
                               "%s was made with %s %s, this run has %s; use the same, or "
                               "remove the file, and it is made again",
                               path, demo_note_keys[i], there ? there : "unknown",
                               notes->text[i]);
    }
    return SEQPAR_OK;
}

/* ---- computing the sums ---- */

/* Adds the reference's log-probs of these rows to the sums of their documents. */
static seqpar_status demo_stored_rows(demo_rank *r, demo_window *w, int64_t first,
                                      int64_t count, int64_t micro) {
    const seqpar_row *rows = w->batch.row + first;
    seqpar_llama_batch b;
    (void)micro;
    seqpar_status status = demo_reference_pass(r, &b, rows, count, 1);
    double *logp = (double *)demo_alloc(b.tokens + 1, sizeof *logp);
    if (!status)
        seqpar_device_read(r->device, logp, b.logp.data, 0, b.tokens, r->device->accumulator);
    for (int64_t t = 0; !status && t < b.tokens; t++)
        if (b.targets[t] == SEQPAR_IGNORE) logp[t] = 0.0;
    w->seen.width = 1;
    if (!status) status = seqpar_segments_add(r->ctx.error, &w->seen, logp, b.share);
    seqpar_llama_close_batch(&r->ctx, demo_reference_model(r), &b);
    free(logp);
    return status;
}

/* Computes the sums (documents of the window), the same on all ranks. */
static seqpar_status demo_stored_ask(demo_rank *r, demo_window *w, double *sums) {
    seqpar_status status = demo_window_values(r, w, demo_stored_rows);
    w->seen.width = 1;
    if (!status) status = seqpar_segments_sum(r->ctx.world, sums, arrlen(w->which), &w->seen);
    for (int64_t i = 0; !status && i < arrlen(w->which); i++)
        if (!isfinite(sums[i]))
            status = seqpar_fail(r->ctx.error, SEQPAR_ERR_NOT_FINITE,
                                 "the reference's log-prob of document %lld is %g; check the "
                                 "weights of --ref_pretrain",
                                 (long long)w->which[i], sums[i]);
    return status;
}

/* ---- all windows ---- */

/* For KTO: opens a window over the mismatched documents of a window. */
typedef seqpar_status (*demo_mismatch_fn)(demo_rank *r, const demo_window *w, demo_dataset *set,
                                          demo_window *mismatched);

static int64_t demo_stored_most(const demo_job *job, int kind) {
    return kind == DEMO_TRAINING
               ? job->config.train_batch_size * job->objective->documents_per_unit
               : demo_eval_most(job);
}

/* Computes the digest of one window and, if `ask`, the sums of its documents and of the
   mismatched ones. */
static seqpar_status demo_stored_window(demo_rank *r, int kind, int64_t number,
                                        demo_mismatch_fn mismatch, int ask) {
    demo_stored *stored = &((demo_reference *)r->own)->stored[kind];
    demo_window w = {.set = kind == DEMO_TRAINING ? &r->job->train : &r->job->eval},
                mismatched = {0};
    demo_dataset set = {0};
    int64_t at = number * demo_stored_most(r->job, kind);
    w.which = kind == DEMO_TRAINING ? demo_step_documents(r, number)
                                    : demo_eval_documents(r->job, number);
    seqpar_status status = demo_window_open(r, &w, r->job->objective->documents_per_unit,
                                            kind == DEMO_EVALUATION);
    if (!status && mismatch) status = mismatch(r, &w, &set, &mismatched);
    stored->rows[number] = demo_digest_rows(demo_digest_rows(DEMO_DIGEST_EMPTY, &w.batch),
                                            &mismatched.batch);
    if (!status && ask) status = demo_stored_ask(r, &w, stored->sums[0] + at);
    if (!status && ask && mismatch)
        status = demo_stored_ask(r, &mismatched, stored->sums[1] + at);
    demo_window_close(&w);
    demo_window_close(&mismatched);
    demo_data_free(&set);
    return status;
}

/* Computes the digests of all windows and, if `ask`, their sums. *stop: set if a signal ended
   it early. */
static seqpar_status demo_stored_windows(demo_rank *r, demo_mismatch_fn mismatch, int ask,
                                         int *stop) {
    seqpar_status status = SEQPAR_OK;
    for (int kind = 0; kind < DEMO_SETS; kind++) {
        const demo_stored *stored = &((demo_reference *)r->own)->stored[kind];
        for (int64_t i = 0; !status && !*stop && i < stored->windows; i++) {
            status = demo_stored_window(r, kind, i, mismatch, ask);
            if (!status) status = demo_stop_wanted(r, stop);
        }
    }
    return status;
}

static void demo_stored_alloc(demo_rank *r, int mismatched) {
    const demo_job *job = r->job;
    const int64_t windows[] = {job->total_steps, demo_eval_windows(job)};
    const int64_t documents[] = {job->total_steps * demo_stored_most(job, DEMO_TRAINING),
                                 arrlen(job->eval.documents)};
    for (int kind = 0; kind < DEMO_SETS; kind++) {
        demo_stored *stored = &((demo_reference *)r->own)->stored[kind];
        *stored = (demo_stored){.windows = windows[kind], .documents = documents[kind]};
        for (int i = 0; i < 1 + mismatched; i++)
            stored->sums[i] = (double *)demo_alloc(documents[kind] + 1,
                                                   sizeof *stored->sums[i]);
        stored->rows = (uint64_t *)demo_alloc(windows[kind] + 1, sizeof *stored->rows);
    }
}

/* ---- the file ---- */

enum { DEMO_STORED_TENSORS = 3 };
static const char *const demo_stored_names[DEMO_SETS][DEMO_STORED_TENSORS] = {
    {"training.logp", "training.mismatched_logp", "training.rows"},
    {"evaluation.logp", "evaluation.mismatched_logp", "evaluation.rows"}};

/* metadata key of the CRC-32 of all tensors' bytes */
static const char demo_stored_sum[] = "crc32";

static void demo_stored_sum_text(char text[16], uint32_t sum) {
    snprintf(text, 16, "%08x", sum);
}

/* Checks the CRC-32 of the file's tensors. A bit that a disk has flipped would change the
   trained weights without an error. */
static seqpar_status demo_stored_whole(demo_rank *r, seqpar_safetensors_file *file,
                                       const char *path) {
    const char *said = seqpar_safetensors_metadata(file, demo_stored_sum);
    uint32_t sum = 0;
    char has[16];
    seqpar_status status = SEQPAR_OK;
    for (int64_t i = 0; !status && i < seqpar_safetensors_count(file); i++) {
        const seqpar_safetensors_tensor *t = seqpar_safetensors_at(file, i);
        seqpar_safetensors_part whole = seqpar_safetensors_whole(t);
        unsigned char *values = (unsigned char *)demo_alloc(t->bytes, 1);
        status = seqpar_safetensors_read(file, values, &whole, r->ctx.error);
        sum = demo_crc32(sum, values, (uint64_t)t->bytes);
        free(values);
    }
    demo_stored_sum_text(has, sum);
    if (status || (said && !strcmp(said, has))) return status;
    return seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_FORMAT,
                       "%s: its log-probs have the CRC-32 %s, but the file says %.40s; "
                       "remove the file, and it is made again",
                       path, has, said ? said : "none, as files of 0.2.0");
}

/* Rank 0 writes the file, under its final name only when it is complete. */
static seqpar_status demo_stored_save(demo_rank *r, const char *path, const demo_notes *notes) {
    seqpar_safetensors_tensor tensors[sizeof demo_stored_names / sizeof **demo_stored_names];
    seqpar_safetensors_pair metadata[DEMO_NOTES + 1];
    const void *data[sizeof demo_stored_names / sizeof **demo_stored_names];
    int64_t count = 0;
    uint32_t sum = 0;
    char text[16];
    for (int kind = 0; kind < DEMO_SETS; kind++) {
        const demo_stored *stored = &((demo_reference *)r->own)->stored[kind];
        const void *parts[DEMO_STORED_TENSORS] = {stored->sums[0], stored->sums[1],
                                                  stored->rows};
        for (int i = 0; i < DEMO_STORED_TENSORS; i++) {
            if (!parts[i]) continue;
            tensors[count] = (seqpar_safetensors_tensor){
                .name = demo_stored_names[kind][i],
                .dtype = i < 2 ? SEQPAR_SAFETENSORS_F64 : SEQPAR_SAFETENSORS_U64,
                .dims = 1,
                .shape = {i < 2 ? stored->documents : stored->windows}};
            sum = demo_crc32(sum, (const unsigned char *)parts[i],
                             8 * (uint64_t)tensors[count].shape[0]);
            data[count++] = parts[i];
        }
    }
    for (int i = 0; i < DEMO_NOTES; i++)
        metadata[i] = (seqpar_safetensors_pair){demo_note_keys[i], notes->text[i]};
    demo_stored_sum_text(text, sum);
    metadata[DEMO_NOTES] = (seqpar_safetensors_pair){demo_stored_sum, text};
    seqpar_safetensors_desc desc = {.path = path,
                                    .tensors = tensors,
                                    .count = count,
                                    .metadata = metadata,
                                    .metadata_count = DEMO_NOTES + 1};
    seqpar_status status = demo_make_folder(r->job->config.ckpt_path, r->ctx.error);
    return status ? status : seqpar_safetensors_save(&desc, data, r->ctx.error);
}

/* Reads the sums of one dataset. The file may have more steps than this run, and the digests of
   all windows must be the same. */
static seqpar_status demo_stored_read(demo_rank *r, seqpar_safetensors_file *file,
                                      const char *path, int kind) {
    demo_stored *stored = &((demo_reference *)r->own)->stored[kind];
    const char *const *names = demo_stored_names[kind];
    const seqpar_safetensors_tensor *rows = seqpar_safetensors_find(file, names[2]);
    uint64_t *there = (uint64_t *)demo_alloc(stored->windows + 1, sizeof *there);
    seqpar_safetensors_part part = {.name = names[2], .count = stored->windows};
    seqpar_status status = SEQPAR_OK;
    if (rows && rows->shape[0] < stored->windows)
        status = seqpar_fail(r->ctx.error, SEQPAR_ERR_OPTION,
                             "%s holds the rows of %lld steps, but this run has %lld; remove "
                             "the file, and it is made again",
                             path, (long long)rows->shape[0], (long long)stored->windows);
    if (!status) status = seqpar_safetensors_read(file, there, &part, r->ctx.error);
    for (int64_t i = 0; !status && i < stored->windows; i++)
        if (there[i] != stored->rows[i])
            status = seqpar_fail(
                r->ctx.error, SEQPAR_ERR_OPTION,
                "%s has other rows than this run, first in window %lld of %s; use the same "
                "data and options, or remove the file, and it is made again",
                path, (long long)i, names[2]);
    for (int i = 0; !status && i < 2; i++) {
        seqpar_safetensors_part sums = {
            .name = names[i], .count = stored->documents, .finite = 1};
        if (stored->sums[i])
            status = seqpar_safetensors_read_f64(file, stored->sums[i], &sums, r->ctx.error);
    }
    free(there);
    return status;
}

static seqpar_status demo_stored_load(demo_rank *r, const char *path, const demo_notes *notes,
                                      demo_mismatch_fn mismatch, int *stop) {
    seqpar_safetensors_file *file = NULL;
    seqpar_status status = seqpar_safetensors_open(&file, path, r->ctx.error);
    if (!status) status = demo_notes_compare(r, file, path, notes);
    if (!status) status = demo_stored_whole(r, file, path);
    if (!status) status = demo_stored_windows(r, mismatch, 0, stop);
    for (int kind = 0; !status && !*stop && kind < DEMO_SETS; kind++)
        if (((demo_reference *)r->own)->stored[kind].windows)
            status = demo_stored_read(r, file, path, kind);
    seqpar_safetensors_close(file);
    return status;
}

static seqpar_status demo_stored_make(demo_rank *r, const char *path, const demo_notes *notes,
                                      demo_mismatch_fn mismatch, int *stop) {
    seqpar_status status = demo_stored_windows(r, mismatch, 1, stop);
    return status || *stop || r->ctx.world->rank ? status : demo_stored_save(r, path, notes);
}

/* Reads the file if there is one, else computes and writes it. Then closes the reference model,
   which is no longer needed. Collective. */
static inline seqpar_status demo_stored_open(demo_rank *r, demo_mismatch_fn mismatch) {
    demo_reference *reference = (demo_reference *)r->own;
    char path[1280], shown[1024];
    demo_notes notes;
    int stop = 0;
    snprintf(path, sizeof path, "%s/reference.safetensors", r->job->config.ckpt_path);
    int64_t there = r->ctx.world->rank == 0 && !access(path, F_OK);
    /* a dry run neither reads nor writes the file */
    if (demo_is_planned(r->device)) return SEQPAR_OK;
    seqpar_status status = seqpar_comm_max_i64(r->ctx.world, &there, 1);
    if (!status) status = demo_notes_of(r, &notes);
    demo_stored_alloc(r, mismatch != NULL);
    if (!status)
        status = (there ? demo_stored_load : demo_stored_make)(r, path, &notes, mismatch,
                                                               &stop);
    if (reference->there) seqpar_llama_close(&r->ctx, &reference->model);
    reference->there = 0;
    if (!status && !stop && r->ctx.world->rank == 0)
        fprintf(stderr, "reference: log-probs of %lld steps %s %s\n",
                (long long)reference->stored[DEMO_TRAINING].windows, there ? "from" : "now in",
                demo_escape(shown, sizeof shown, path));
    return status;
}

/* The stored sums (documents) of a training or evaluation window; NULL if none are stored. */
static inline const double *demo_stored_sums(const demo_rank *r, const demo_window *w,
                                             int mismatched) {
    int kind = w->set == &r->job->eval ? DEMO_EVALUATION : DEMO_TRAINING;
    const double *sums = r->own
                             ? ((const demo_reference *)r->own)->stored[kind].sums[mismatched]
                             : NULL;
    return sums ? sums + (kind == DEMO_TRAINING ? r->step * demo_stored_most(r->job, kind)
                                                : w->which[0])
                : NULL;
}
#endif
