/* SPDX-License-Identifier: MIT OR Unlicense */
/* adapters.h - LoRA adapters of a reference model, read from a folder that PEFT wrote. The
 * model's weights are W + scale B A; by the chain rule dA = scale B^T dW, dB = scale dW A^T. */
#ifndef ORACLE_ADAPTERS_H
#define ORACLE_ADAPTERS_H
#include "trainer/model/peft.h"
#include "reference_tensors.h"

/* The trained tensors: the adapters if there are any, else the model. */
static inline const seqpar_llama *reference_learns(const reference *f) {
    return f->adapters_open ? &f->adapters : &f->model;
}

/* Whether `adapter` is PEFT's prefix, then `name` without "weight", then `part`. */
static inline int is_adapter_of(const char *adapter, const char *part, const char *name) {
    static const char root[] = "base_model.model.", end[] = "weight";
    const char *at = adapter + strlen(root), *found = strstr(adapter, part);
    size_t length = strlen(name) - strlen(end);
    return found && (size_t)(found - at) == length && !strncmp(at, name, length);
}

/* Index of the tensor's A among the adapters' tensors; its B is next. -1: no adapter. */
static inline int64_t adapter_of(const reference *f, int64_t tensor) {
    for (int64_t i = 0; f->adapters_open && i < f->adapters.tensor_count; i++)
        if (is_adapter_of(f->adapters.tensors[i].name, "lora_A.weight",
                          f->model.tensors[tensor].name))
            return i;
    return -1;
}

/* Index of the reward model's head in the model: PEFT trains it whole, without A and B. -1: no
   adapters or no such head. */
static inline int64_t adapter_head(const reference *f) {
    return f->adapters_open && f->model.config.score ? f->model.tensor_count - 1 : -1;
}

/* PEFT's name of the tensor in a folder (at_work 0) or in a running model (1), which inserts
   "default" or "modules_to_save.default". Returns 0 if there are no more names. */
static inline int adapter_name(char *name, size_t size, const seqpar_tensor *t, int at_work) {
    static const char end[] = ".weight";
    int length = (int)(strlen(t->name) - strlen(end));
    if (!at_work)
        snprintf(name, size, "%s", t->name);
    else
        snprintf(name, size, "%.*s%s%s", length, t->name,
                 strstr(t->name, ".lora_") ? ".default" : ".modules_to_save.default", end);
    return at_work < 2;
}

/* Reads the dump's tensor of an adapter; w->values NULL: the dump has none. 0, or -1 with
   d->error. */
static inline int adapter_part(const reference *f, const char *prefix, int64_t i,
                               tensor_name *name, whole *w) {
    const seqpar_tensor *t = &f->adapters.tensors[i];
    char own[200];
    memset(w, 0, sizeof *w);
    for (int way = 0; !w->values && adapter_name(own, sizeof own, t, way); way++)
        if (whole_read(f->d, tensor_of(name, prefix, own), 0, f->d->world, w)) return -1;
    if (!w->values || w->count == t->rows * t->cols) return 0;
    seqpar_fail(&f->d->error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: tensor %.100s has %lld elements; the adapters in --adapter have %lld",
                f->d->ranks[0].path, name->text, (long long)w->count,
                (long long)(t->rows * t->cols));
    return -1;
}

/* ---- the folder ---- */

/* Refuses dropout: a dump does not hold its masks. */
static inline int adapters_dropout(reference *f, const demo_peft *p, const char *folder) {
    if (p->dropout <= 0) return 0;
    seqpar_fail(&f->d->error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s/adapter_config.json: \"lora_dropout\" is %g, but a dump does not hold "
                "dropout masks; train and judge with dropout 0",
                folder, p->dropout);
    return -1;
}

/* Refuses a tensor that these adapters do not have: the reference would leave it out. */
static inline int adapters_foreign(reference *f, const seqpar_safetensors_file *file,
                                   const char *path) {
    for (int64_t i = 0; i < seqpar_safetensors_count(file); i++) {
        const char *name = seqpar_safetensors_at(file, i)->name;
        int64_t k = 0;
        while (k < f->adapters.tensor_count && strcmp(f->adapters.tensors[k].name, name)) k++;
        if (k < f->adapters.tensor_count) continue;
        seqpar_fail(&f->d->error, SEQPAR_ERR_FILE_TENSOR,
                    "%.300s has %.100s, which adapters of this model have not", path, name);
        return -1;
    }
    return 0;
}

/* Reads one tensor from the folder. If the dump has it too, both must agree, and the dump's
   values are used, which may have more digits. */
static inline int adapters_value(reference *f, seqpar_safetensors_file *file,
                                 const char *folder, int64_t i) {
    const seqpar_tensor *t = &f->adapters.tensors[i];
    seqpar_safetensors_part all = {.name = t->name, .count = t->rows * t->cols};
    whole own, other = {.values = f->adapter + t->offset, .count = all.count};
    tensor_name name;
    if (seqpar_safetensors_read_f64(file, other.values, &all, &f->d->error) ||
        adapter_part(f, "param.", i, &name, &own))
        return -1;
    int status = own.values ? reference_compare(f, "--adapter", folder, name.text, &own, &other,
                                                reference_rounding(file, t->name))
                            : 0;
    if (own.values) memcpy(other.values, own.values, (size_t)all.count * sizeof *own.values);
    whole_free(&own);
    return status;
}

static inline int adapters_values(reference *f, const char *folder) {
    char path[1100];
    seqpar_safetensors_file *file = NULL;
    snprintf(path, sizeof path, "%.1000s/adapter_model.safetensors", folder);
    if (seqpar_safetensors_open(&file, path, &f->d->error)) return -1;
    int status = adapters_foreign(f, file, path);
    for (int64_t i = 0; !status && i < f->adapters.tensor_count; i++)
        status = adapters_value(f, file, folder, i);
    seqpar_safetensors_close(file);
    return status;
}

/* Opens and reads the adapters of an open model, before its weights are loaded: reference_load
   adds the adapters to them. 0, or -1 with d->error. */
static inline int reference_adapters(reference *f, const char *folder) {
    static demo_error error; /* large */
    demo_peft p;
    if (demo_peft_read(folder, &p, &error)) {
        seqpar_fail(&f->d->error, SEQPAR_ERR_FILE_FORMAT, "%s", error.text);
        return -1;
    }
    double rank = (double)p.rank;
    seqpar_adapter_desc desc = {.rank = p.rank,
                                .scale = (double)p.alpha / (p.rooted ? sqrt(rank) : rank),
                                .targets = p.targets};
    if (adapters_dropout(f, &p, folder)) return -1;
    if (seqpar_llama_open_adapters(&f->ctx, &f->adapters, &f->model, &desc, 0, 0))
        return reference_failed(f);
    f->adapters_open = 1;
    f->adapter = (double *)calloc((size_t)f->adapters.elements + 1, sizeof *f->adapter);
    f->gradient = (double *)calloc((size_t)f->adapters.elements + 1, sizeof *f->gradient);
    if (!f->adapter || !f->gradient) return reference_no_memory(f);
    return adapters_values(f, folder);
}

/* ---- computing ---- */

/* w, the values of a tensor of the model, += scale B A. A trained head replaces w. */
static inline void adapters_add(const reference *f, double *w, int64_t tensor) {
    const seqpar_tensor *t = &f->model.tensors[tensor], *all = f->adapters.tensors;
    int64_t n = adapter_of(f, tensor), rank = f->adapters.adapter.rank;
    if (tensor == adapter_head(f))
        memcpy(w, f->adapter + all[f->adapters.tensor_count - 1].offset,
               (size_t)t->cols * sizeof *w);
    if (n < 0) return;
    const double *a = f->adapter + all[n].offset, *b = f->adapter + all[n + 1].offset;
    for (int64_t i = 0; i < t->rows; i++)
        for (int64_t k = 0; k < rank; k++)
            for (int64_t j = 0; j < t->cols; j++)
                w[i * t->cols + j] += f->adapters.adapter.scale * b[i * rank + k] *
                                      a[k * t->cols + j];
}

/* Adds dA and dB of one matrix, whose gradient is dw. n: the index of A. */
static inline void adapters_chain(const reference *f, const double *dw, int64_t tensor,
                                  int64_t n) {
    const seqpar_tensor *t = &f->model.tensors[tensor], *all = f->adapters.tensors;
    const double *a = f->adapter + all[n].offset, *b = f->adapter + all[n + 1].offset;
    double *da = f->gradient + all[n].offset, *db = f->gradient + all[n + 1].offset;
    int64_t rank = f->adapters.adapter.rank;
    for (int64_t i = 0; i < t->rows; i++)
        for (int64_t k = 0; k < rank; k++)
            for (int64_t j = 0; j < t->cols; j++) {
                double d = f->adapters.adapter.scale * dw[i * t->cols + j];
                da[k * t->cols + j] += d * b[i * rank + k];
                db[i * rank + k] += d * a[k * t->cols + j];
            }
}

/* Sets f->gradient, of the adapters, from f->whole, the gradient of all weights. */
static inline void adapters_gradient(const reference *f) {
    memset(f->gradient, 0, (size_t)f->adapters.elements * sizeof *f->gradient);
    for (int64_t i = 0; i < f->model.tensor_count; i++) {
        const double *dw = f->whole + f->model.tensors[i].offset;
        int64_t n = adapter_of(f, i);
        if (n >= 0) adapters_chain(f, dw, i, n);
        if (i == adapter_head(f))
            memcpy(f->gradient + f->adapters.tensors[f->adapters.tensor_count - 1].offset, dw,
                   (size_t)f->model.tensors[i].cols * sizeof *dw);
    }
}
#endif
