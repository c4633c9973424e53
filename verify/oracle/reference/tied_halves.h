/* SPDX-License-Identifier: MIT OR Unlicense */
/* tied_halves.h - the gradient of a model whose embedding is its head, with the two halves of
 * that table's gradient apart: the same model is opened once more with tables of their own. */
#ifndef ORACLE_TIED_HALVES_H
#define ORACLE_TIED_HALVES_H
#include "reference.h"

static const char tied_embedding[] = "model.embed_tokens.weight",
                  tied_head[] = "lm_head.weight";

/* Copies the weights of f; the head gets the embedding's. 0, or -1 with d->error. */
static inline int untied_weights(reference *to, const reference *f) {
    for (int64_t i = 0; i < to->model.tensor_count; i++) {
        const seqpar_tensor *t = &to->model.tensors[i];
        const char *name = strcmp(t->name, tied_head) ? t->name : tied_embedding;
        int64_t count = t->rows * t->cols;
        double *values = (double *)calloc((size_t)count + 1, sizeof *values);
        if (!values) return reference_no_memory(to);
        seqpar_device_read(f->device, values, f->model.params.data,
                           model_tensor(f, name)->offset, count, f->device->storage);
        seqpar_device_write(to->device, to->model.params.data, t->offset, values, count,
                            to->device->storage);
        free(values);
    }
    return 0;
}

/* Opens `to` as f with tables of their own. reference_close is to be called in any case. */
static inline int untied_open(reference *to, const reference *f) {
    seqpar_llama_config config = f->model.config;
    config.tied = 0;
    if (reference_begin(to, f->d, seqpar_device_reference()) || reference_rows(to) ||
        reference_config(to, &config))
        return -1;
    to->weights = f->weights;
    to->untaught = f->untaught;
    return untied_weights(to, f);
}

/* Whether the model has a table that is embedding and head at once. */
static inline int has_tied_table(const reference *f) {
    return f->model.config.tied && !f->model.config.score;
}

/* `gradient` becomes `right` with the table's gradient from one use alone: half 0: as the
   embedding; 1: as the head. untied->gradient is computed. */
static inline void tied_half(const reference *f, const reference *untied, const double *right,
                             int half, double *gradient) {
    const seqpar_tensor *table = model_tensor(f, tied_embedding);
    const seqpar_tensor *from = model_tensor(untied, half ? tied_head : tied_embedding);
    memcpy(gradient, right, (size_t)f->model.elements * sizeof *right);
    memcpy(gradient + table->offset, untied->gradient + from->offset,
           (size_t)(table->rows * table->cols) * sizeof *right);
}
#endif
