/* SPDX-License-Identifier: MIT OR Unlicense */
/* run_step.h - operations on a step: its loss, advantages, gradient norm, the optimizer's step,
 * and the whole step from a model. */
#ifndef ORACLE_RUN_STEP_H
#define ORACLE_RUN_STEP_H
#include "run.h"
#include "oracle/reference/truth.h"

/* ---- loss ---- */

/* Writes into text, and returns, the tensors that the loss needs of each micro-batch. */
static inline const char *run_loss_takes(const dump_facts *f, char *text, size_t size) {
    static const char *const takes[] = {"labels logp",
                                        "labels logp",
                                        "",
                                        "labels logp ref_logp desirable kl",
                                        "labels logp old_logp advantages",
                                        "labels values returns"};
    int documents = !loss_is_of_tokens(f) || f->reduction == DUMP_BY_SEQUENCE;
    int reference = (f->objective == DUMP_DPO && preference_has_reference(f)) ||
                    (f->objective == DUMP_PPO && f->kl_coef > 0);
    snprintf(text, size, "index%s%s%s%s%s", documents ? " cu_seqlens" : "",
             *takes[f->objective] ? " " : "", takes[f->objective], reference ? " ref_logp" : "",
             f->objective == DUMP_VALUE && f->clip_value > 0 ? " old_values" : "");
    return text;
}

/* Computes scores from values if all rows have values: dumped scores may be wrong. Else the
   rows keep their dumped scores. 0, or -1 with the error. */
static inline int run_scores(run *r) {
    int values = 1, scores = 1, status = 0;
    for (int64_t n = 0; n < r->row_count; n++) {
        values = values && r->rows[n].values;
        scores = scores && r->rows[n].scores;
    }
    if (!values && !scores) {
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor values is missing in some micro-batch, and so is scores; "
                    "write one of the two for every micro-batch",
                    r->desc->in);
        return -1;
    }
    for (int64_t n = 0; values && !status && n < r->row_count; n++) {
        dump_row *row = &r->rows[n];
        double *x = (double *)calloc((size_t)row->docs + 1, sizeof *x);
        for (int64_t i = 0; x && i < row->docs; i++)
            if (row->cu_seqlens[i + 1] > row->cu_seqlens[i])
                x[i] = row->values[row->cu_seqlens[i + 1] - 1];
        status = x ? run_put_documents(r, n / r->d.accumulation, n % r->d.accumulation,
                                       "scores", x, row->docs)
                   : run_no_memory(r);
        free(row->scores);
        row->scores = x;
    }
    return status;
}

/* The right loss of rows, which have the tensors it needs. 0, or -1 with the error. */
static inline int run_right_loss(run *r, const dump_row *rows, double *loss) {
    static loss_parts parts; /* large */
    int status;
    loss_begin(&parts, &r->d.facts, 1e-3);
    for (int64_t n = 0; n < r->row_count; n++)
        loss_add_row(&parts, &r->d.facts, &rows[n], n / r->d.accumulation,
                     n % r->d.accumulation);
    status = loss_end(&parts, &r->d.facts) ? run_no_memory(r) : 0;
    if (!status && (parts.answers.lacks || !parts.complete)) {
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT, "%.300s: tensor loss: %s", r->desc->in,
                    parts.answers.lacks ? parts.answers.lacks
                                        : "a micro-batch lacks what it is made of");
        status = -1;
    }
    *loss = parts.answers.right;
    loss_free(&parts);
    return status;
}

static inline int run_supervised(const run *r) {
    for (int64_t n = 0; n < r->row_count; n++)
        for (int64_t t = 0; r->rows[n].labels && t < row_end(&r->rows[n]); t++)
            if (r->rows[n].labels[t] != DUMP_IGNORE) return 1;
    return 0;
}

static inline int run_loss(run *r) {
    double loss;
    char takes[120];
    if (r->d.facts.objective == DUMP_OTHER) {
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: metadata objective is other, whose loss is not known here; write "
                    "the objective that it is",
                    r->d.ranks[0].path);
        return -1;
    }
    if (run_needs(r, run_loss_takes(&r->d.facts, takes, sizeof takes))) return -1;
    if (r->d.facts.objective == DUMP_RM ? run_scores(r) : 0) return -1;
    if (r->d.facts.objective != DUMP_RM && !run_supervised(r)) {
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor labels has no token to be learnt in any micro-batch; write "
                    "one at least",
                    r->desc->in);
        return -1;
    }
    return run_right_loss(r, r->rows, &loss) || run_put_step(r, "loss", loss) ? -1 : 0;
}

/* ---- advantages ---- */

/* Adds the advantages of row n. document: the number in the step of the row's first document.
   Tokens without a label get 0. */
static inline int run_advantages_row(run *r, int64_t n, const reward_table *t,
                                     int64_t document) {
    const dump_row *row = &r->rows[n];
    double *x = (double *)calloc((size_t)row->tokens + 1, sizeof *x);
    int status = x ? 0 : run_no_memory(r);
    for (int64_t k = 0; x && k < row_end(row); k++)
        if (!row->labels || row->labels[k] != DUMP_IGNORE)
            x[k] = t->way(t, document + row_document(row, k), 0, 0);
    if (!status)
        status = run_put_row(r, row, n / r->d.accumulation, n % r->d.accumulation, "advantages",
                             x, 1, 1, 1);
    free(x);
    return status;
}

static inline int run_advantages_rows(run *r, const step_documents *s) {
    static advantage_step step;
    reward_table t;
    int64_t document = 0;
    int status = advantages_begin(&step, &t, s, &r->d.facts, 1e-3) ? run_no_memory(r) : 0;
    for (int64_t n = 0; !status && n < r->row_count; n++) {
        status = run_advantages_row(r, n, &t, document);
        document += r->rows[n].docs;
    }
    advantages_free(&step);
    return status;
}

static inline int run_advantages(run *r) {
    step_documents s;
    int64_t way = r->d.facts.advantage;
    int status = 0;
    if (r->d.facts.objective != DUMP_PPO || way == DUMP_ADVANTAGE_GIVEN ||
        way == DUMP_ADVANTAGE_GAE) {
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: metadata objective is %s and advantage is %s; write objective "
                    "ppo, and advantage group, group_mean or rloo; for gae give run "
                    "gae",
                    r->d.ranks[0].path, word_facts[FACT_OBJECTIVE].words[r->d.facts.objective],
                    word_facts[FACT_ADVANTAGE].words[r->d.facts.advantage]);
        return -1;
    }
    documents_begin(&s, r->d.sp);
    for (int64_t n = 0; !status && n < r->row_count; n++)
        if (documents_add_row(&s, &r->rows[n], n / r->d.accumulation, n % r->d.accumulation))
            status = run_no_memory(r);
    if (!status) status = run_advantages_rows(r, &s);
    documents_free(&s);
    return status;
}

/* ---- norm ---- */

/* Sums the squares of all grad. tensors. Fails if ranks hold copies that differ, since the
   right one is not known. n: zeroed; the caller frees n->held. 0, or -1 with the error. */
static inline int run_norms(run *r, step_norms *n, stage *copies) {
    n->d = &r->d;
    n->tolerance = 1e-3;
    n->copies = copies;
    n->held = (double *)calloc((size_t)r->d.world * 2, sizeof *n->held);
    if (!n->held) return run_no_memory(r);
    n->local = n->held + r->d.world;
    if (each_parameter(&r->d, "grad.", add_norms, n)) return -1;
    if (n->parameters && !copies->judged) return 0;
    seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT, "%.300s: %s; %s", r->desc->in,
                copies->judged ? copies->v.line[0] : "tensors grad.NAME are missing",
                copies->judged ? "write equal copies, or compute the gradients from a model "
                                 "with run step"
                               : "write the gradients of all parameters");
    return -1;
}

static inline int run_norm(run *r) {
    stage copies = {.judged = 0};
    step_norms n = {.d = NULL};
    int status = run_norms(r, &n, &copies);
    if (!status) status = run_put_step(r, "norm", sqrt(n.all));
    free(n.held);
    return status;
}

/* ---- parameters ---- */

/* The range of a parameter that a rank holds. */
typedef struct run_range {
    const seqpar_safetensors_tensor *like; /* has its shape and range; NULL: the whole */
    part p;
} run_range;

/* Takes the range of the rank's first tensor PREFIX + parameter, in the order of prefixes.
   Without any: the whole parameter. 0, or -1 with the error. */
static inline int run_range_of(run *r, int64_t rank, const char *const *prefixes,
                               const char *parameter, int64_t count, run_range *to) {
    tensor_name name;
    *to = (run_range){NULL, {0, count, count}};
    for (; *prefixes && !to->like; prefixes++)
        to->like = seqpar_safetensors_find(r->d.ranks[rank].file,
                                           tensor_of(&name, *prefixes, parameter));
    if (!to->like) return 0;
    if (part_of(&r->d, rank, to->like, &to->p)) return -1;
    if (to->p.total == count) return 0;
    seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: tensor %.100s has %lld elements in all, but parameter %.100s has "
                "%lld; write both with the same total",
                r->d.ranks[rank].path, to->like->name, (long long)to->p.total, parameter,
                (long long)count);
    return -1;
}

/* Adds to a rank its range of the numbers in whole. shape: that of the whole parameter, used if
   range->like is NULL. */
static inline int run_put_range(run *r, int64_t rank, const char *name, const run_range *range,
                                const seqpar_safetensors_tensor *shape, const double *whole) {
    seqpar_safetensors_tensor t = range->like ? *range->like : *shape;
    char key[560], text[64];
    double *own = (double *)malloc((size_t)(range->p.count + 1) * sizeof *own);
    if (own) memcpy(own, whole + range->p.offset, (size_t)range->p.count * sizeof *own);
    t.name = name;
    snprintf(key, sizeof key, "part.%s", name);
    snprintf(text, sizeof text, "%lld %lld", (long long)range->p.offset,
             (long long)range->p.total);
    if (range->p.count < range->p.total && run_note_down(r, rank, key, text))
        return free(own), -1;
    return run_put(r, rank, &t, own, 0);
}

/* ---- the optimizer's step ---- */

static inline int run_needs_optimizer(run *r) {
    if (r->d.facts.optimizer != DUMP_NO_OPTIMIZER && r->d.facts.lr > 0) return 0;
    seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: metadata optimizer is %s and lr %g; write optimizer adamw or sgd, and "
                "an lr above 0",
                r->d.ranks[0].path, word_facts[FACT_OPTIMIZER].words[r->d.facts.optimizer],
                r->d.facts.lr);
    return -1;
}

/* The parameter after the optimizer's step (count); NULL: no memory. clip: factor of the
   gradient. */
static inline double *run_after(run *r, const step_inputs *in, double clip) {
    way_numbers numbers = way_begin(&r->d.facts, &step_ways[0], clip);
    way_factors right = way_factors_of(&in->facts, &step_ways[0], &numbers, in->vector,
                                       in->m.values || in->v.values);
    double *after = (double *)malloc((size_t)(in->grad.count + 1) * sizeof *after);
    for (int64_t i = 0; after && i < in->grad.count; i++)
        after[i] = in->param.values[i] + way_step(&right, element_at(in, i));
    if (!after) run_no_memory(r);
    return after;
}

typedef struct run_stepping {
    run *r;
    const step_norms *n;
    double clip;
} run_stepping;

/* Adds after.NAME to every rank that holds a range of the parameter. */
static inline int run_put_after(run *r, const char *parameter, const double *after,
                                int64_t count) {
    static const char *const prefixes[] = {"after.", "param.", NULL};
    tensor_name name;
    int status = 0;
    tensor_of(&name, "after.", parameter);
    for (int64_t q = 0; !status && q < r->d.world; q++) {
        run_range range;
        status = run_range_of(r, q, prefixes, parameter, count, &range);
        if (!status && range.like) status = run_put_range(r, q, name.text, &range, NULL, after);
    }
    return status;
}

static inline int run_step_parameter(void *user, const char *parameter) {
    const run_stepping *s = (const run_stepping *)user;
    step_inputs in;
    double *after = NULL;
    int status = step_inputs_read(s->n, parameter, &in);
    if (!status && !in.param.values) {
        seqpar_fail(&s->r->d.error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor param.%.100s is missing, and grad. is there; write the "
                    "parameter before the step",
                    s->r->desc->in, parameter);
        status = -1;
    }
    if (!status) status = (after = run_after(s->r, &in, s->clip)) ? 0 : -1;
    if (!status) status = run_put_after(s->r, parameter, after, in.grad.count);
    free(after);
    whole_free(&in.param);
    whole_free(&in.grad);
    whole_free(&in.m);
    whole_free(&in.v);
    free(in.clipped);
    return status;
}

static inline int run_optimizer(run *r) {
    stage copies = {.judged = 0};
    step_norms n = {.d = NULL};
    int status = run_needs_optimizer(r) || settings_are_of_parameters(&r->d) ||
                 run_norms(r, &n, &copies);
    if (!status) {
        run_stepping s = {r, &n, clip_factor(r->d.facts.max_norm, sqrt(n.all))};
        status = each_parameter(&r->d, "grad.", run_step_parameter, &s);
    }
    free(n.held);
    return status ? -1 : 0;
}

/* ---- the whole step from a model ---- */

/* Adds the log-probs of labels, 0 at a token without a label. Also puts them into the rows,
   from which the loss is computed. */
static inline int run_put_logp(run *r, reference *f) {
    int status = 0;
    for (int64_t n = 0; !status && n < f->count; n++) {
        dump_row *row = &f->rows[n];
        double *x = (double *)calloc((size_t)row->tokens + 1, sizeof *x);
        for (int64_t t = 0; x && t < row_end(row); t++)
            x[t] = row->labels[t] == DUMP_IGNORE ? 0 : f->logp[n][t];
        status = x ? run_put_row(r, row, n / r->d.accumulation, n % r->d.accumulation, "logp",
                                 x, 1, 1, 1)
                   : run_no_memory(r);
        free(row->logp);
        row->logp = x;
    }
    return status;
}

/* Adds one model tensor's gradient to all ranks. */
static inline int run_put_gradient(run *r, const reference *f, const seqpar_tensor *t) {
    static const char *const prefixes[] = {"grad.", "param.", NULL};
    const double *gradient = f->gradient + t->offset;
    seqpar_safetensors_tensor shape = {.dims = t->rows > 1 ? 2 : 1,
                                       .shape = {t->rows > 1 ? t->rows : t->cols, t->cols}};
    tensor_name name;
    int status = 0;
    tensor_of(&name, "grad.", t->name);
    for (int64_t q = 0; !status && q < r->world; q++) {
        run_range range;
        status = run_range_of(r, q, prefixes, t->name, t->rows * t->cols, &range) ||
                 run_put_range(r, q, name.text, &range, &shape, gradient);
    }
    return status;
}

/* Adds one model tensor after the optimizer's step to all ranks. Parameter and gradient are
   those of the model; only the moments m. and v. are read from the dump. */
static inline int run_put_model_after(run *r, const reference *f, const seqpar_tensor *t,
                                      double clip) {
    static const char *const prefixes[] = {"after.", "param.", NULL};
    int64_t count = t->rows * t->cols;
    seqpar_safetensors_tensor shape = {.dims = t->rows > 1 ? 2 : 1,
                                       .shape = {t->rows > 1 ? t->rows : t->cols, t->cols}};
    step_inputs in = {.clipped = NULL};
    tensor_name name;
    double *after = NULL;
    int status = param_settings(&r->d, t->name, &in) ||
                 whole_read(&r->d, tensor_of(&name, "m.", t->name), 0, r->d.world, &in.m) ||
                 whole_read(&r->d, tensor_of(&name, "v.", t->name), 0, r->d.world, &in.v) ||
                 whole_alloc(&r->d, &in.param, count) || whole_alloc(&r->d, &in.grad, count) ||
                 step_sizes_differ(&r->d, t->name, &in);
    if (!status) {
        seqpar_device_read(f->device, in.param.values, f->model.params.data, t->offset, count,
                           f->device->storage);
        memcpy(in.grad.values, f->gradient + t->offset, (size_t)count * sizeof(double));
        status = (after = run_after(r, &in, clip)) ? 0 : -1;
    }
    tensor_of(&name, "after.", t->name);
    for (int64_t q = 0; !status && q < r->world; q++) {
        run_range range;
        status = run_range_of(r, q, prefixes, t->name, count, &range) ||
                 run_put_range(r, q, name.text, &range, &shape, after);
    }
    free(after);
    whole_free(&in.m);
    whole_free(&in.v);
    whole_free(&in.param);
    whole_free(&in.grad);
    return status ? -1 : 0;
}

static inline int run_put_gradients(run *r, const reference *f) {
    double norm = sqrt(sum_of_squares(f->gradient, f->model.elements));
    double clip = clip_factor(r->d.facts.max_norm, norm);
    int steps = r->d.facts.optimizer != DUMP_NO_OPTIMIZER && r->d.facts.lr > 0;
    int status = run_put_step(r, "norm", norm);
    for (int64_t i = 0; !status && i < f->model.tensor_count; i++) {
        status = run_put_gradient(r, f, &f->model.tensors[i]);
        if (!status && steps) status = run_put_model_after(r, f, &f->model.tensors[i], clip);
    }
    return status;
}

/* Checks the reference against slow.h, as ver does. 0 also if slow.h cannot check it; -1 with
   the error if they disagree. */
static inline int run_second(run *r, const reference *f, double *const *logp,
                             double *const *seeds) {
    char text[200];
    if (second_agrees(f, logp, seeds, f->gradient, text, sizeof text)) return 0;
    seqpar_fail(&r->d.error, SEQPAR_ERR_ARITHMETIC, "%.300s: tensors logp and grad.: %s",
                r->desc->in, text);
    return -1;
}

static inline int run_seeds(run *r, reference *f) {
    double **logp = copy_logp(f), loss;
    seed_set seeds = {.f = f};
    int status = logp && !seed_set_open(&seeds, logp) ? 0 : run_no_memory(r);
    if (!status && !seed_set_make(&seeds, SEEDS_RIGHT)) {
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor ref_logp or cu_seqlens is missing, or the last document of "
                    "a row has no partner; write both tensors, and documents 2i and 2i + 1 as "
                    "a pair",
                    r->desc->in);
        status = -1;
    }
    if (!status) status = reference_gradient(f, &right_way, seeds.of);
    if (!status) status = run_second(r, f, logp, seeds.of);
    if (!status) status = run_put_logp(r, f) || run_right_loss(r, f->rows, &loss);
    if (!status) status = run_put_step(r, "loss", loss) || run_put_gradients(r, f);
    seed_set_close(&seeds);
    free_logp(logp, f->count);
    return status ? -1 : 0;
}

/* Checks all tensors before the model's weights are read. 0, or -1 with the error. */
static inline int run_step(run *r) {
    reference f = {.d = NULL};
    int status;
    if (r->d.facts.objective > DUMP_DPO) {
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: metadata objective is %s; step computes sft and dpo",
                    r->d.ranks[0].path, word_facts[FACT_OBJECTIVE].words[r->d.facts.objective]);
        return -1;
    }
    if (has_terms(&r->d.facts)) {
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: metadata label_smoothing is %g and z_loss %g; step computes SFT "
                    "without them: leave them out",
                    r->d.ranks[0].path, r->d.facts.label_smoothing, r->d.facts.z_loss);
        return -1;
    }
    if (r->d.facts.objective == DUMP_DPO &&
        run_needs(r, preference_has_reference(&r->d.facts)
                         ? "index ids labels cu_seqlens ref_logp"
                         : "index ids labels cu_seqlens"))
        return -1;
    if (!run_supervised(r)) {
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor labels has no token to be learnt in any micro-batch; write "
                    "one at least",
                    r->desc->in);
        return -1;
    }
    status = reference_open(&f, &r->d, r->desc->model, NULL, seqpar_device_reference());
    if (status > 0) status = run_needs(r, "index ids labels");
    if (!status) status = reference_logp(&f, &right_way) || run_seeds(r, &f);
    reference_close(&f);
    return status ? -1 : 0;
}
#endif
