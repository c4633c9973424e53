/* SPDX-License-Identifier: MIT OR Unlicense */
/* synthetic.h - generates dumps: random rows, a small model, the step as the reference computes
 * it, and on request one mistake in it.
 *
 *     OUT/model   a Llama folder      OUT/want   the right step on one rank
 *     OUT/got     the same on ranks, right or with the mistake
 */
#ifndef ORACLE_SYNTHETIC_H
#define ORACLE_SYNTHETIC_H
#include "oracle/reference/truth.h"
#include "oracle/dump/write.h"

typedef struct made_desc {
    const char *out, *layout, *objective, *mistake; /* mistake NULL: none */
    int64_t sp, dp, accumulation, tokens, docs, seed;
    int questions; /* inputs only: no positions, logp, attention results, step's tensors */
} made_desc;

/* The mistake to plant, and what it changes. */
typedef struct made_plant {
    const mistake *m;
    const reference_way *way;
    token_rule labels, positions;
    int seeds, step; /* indices of a seed way (seed_way_name) and of a step way; 0: right */
    int loss;        /* it may change the reported loss */
    int shows;       /* the dump shows it, in the reported loss or elsewhere */
    int changes;     /* some written value differs from that of a right step */
} made_plant;

typedef struct made {
    const made_desc *desc;
    dump d; /* has facts, but no files */
    reference f;
    made_plant plant;
    double *right, *gradient, *param, *after, *m, *v; /* (elements) */
    double *loss, *norm;                              /* (world) */
    double want_loss;
} made;

/* ---- what can be planted ---- */

/* Whether the token is of a response, whose tokens are trained. Every third document has no
   prompt. */
static inline int made_answers(const dump_row *row, int64_t t) {
    int64_t d = document_at(row, t), begin = row->cu_seqlens[d], end = row->cu_seqlens[d + 1];
    return d % 3 == 2 || t >= begin + (end - begin) / (2 + d % 4);
}

static inline int64_t made_label(const dump_row *row, int64_t next) {
    return next >= 0 && next < row_end(row) && made_answers(row, next) ? row->ids[next]
                                                                       : DUMP_IGNORE;
}
static inline int64_t made_label_right(const dump_row *row, int64_t t) {
    return row_ends_document(row, t) ? DUMP_IGNORE : made_label(row, t + 1);
}
static inline int64_t made_label_after_split(const dump_row *row, int64_t t) {
    return made_label(row, row->next[t]);
}
static inline int64_t made_label_unshifted(const dump_row *row, int64_t t) {
    return made_label(row, t);
}
static inline int64_t made_label_twice(const dump_row *row, int64_t t) {
    return made_label(row, t + 2);
}
static inline int64_t made_label_crosses(const dump_row *row, int64_t t) {
    return made_label(row, t + 1);
}

static const struct {
    const char *name;
    token_rule labels, positions;
} made_rules[] = {{"shift_after_split", made_label_after_split, NULL},
                  {"labels_not_shifted", made_label_unshifted, NULL},
                  {"labels_shifted_twice", made_label_twice, NULL},
                  {"labels_cross_documents", made_label_crosses, NULL},
                  {"positions_local", NULL, position_local},
                  {"positions_run_on", NULL, position_runs_on}};

static inline void plant_rules(made_plant *p, const char *name) {
    for (size_t i = 0; i < sizeof made_rules / sizeof *made_rules; i++)
        if (!strcmp(made_rules[i].name, name)) {
            p->labels = made_rules[i].labels;
            p->positions = made_rules[i].positions;
        }
}

/* Looks the name up in all tables of mistakes: it may be in several. 0, or -1 with
   the error: the name is unknown, or the objective does not allow the mistake. */
static inline int made_plant_find(made_plant *p, const dump *d, const char *name,
                                  seqpar_error *error) {
    *p = (made_plant){.way = &right_way, .shows = !name};
    if (!name) return 0;
    p->m = mistake_named(name);
    plant_rules(p, name);
    for (int i = 0; i < WRONG_WAYS; i++)
        if (p->way == &right_way && !strcmp(wrong_ways[i].name, name) &&
            way_has_facts(&d->facts, &wrong_ways[i]))
            p->way = &wrong_ways[i];
    for (int i = 1; i < seed_ways(d); i++)
        if (!p->seeds && !seed_way_is_of_option(d, i) && seed_way_name(d, i) &&
            !strcmp(seed_way_name(d, i), name))
            p->seeds = i;
    /* Only ways that need no local gradients and no parameter names: made_step has neither. */
    for (int i = 1; i < STEP_WAYS; i++)
        if (!p->step && step_ways[i].name && !strcmp(step_ways[i].name, name) &&
            way_is_plain(&step_ways[i]))
            p->step = i;
    /* Refuses a mistake that makes NaN: for made_loss a NaN says that the loss is right. */
    if (p->m && p->m->mean == MEAN_NAN) p->m = NULL;
    p->loss = p->m && (!strcmp(p->m->family, "count") || !strcmp(p->m->family, "pairs"));
    p->shows = p->m &&
               (law_scales(p->m) || p->labels || p->positions || p->way != &right_way ||
                p->seeds || p->step || !strcmp(name, "never_synchronised") ||
                !strcmp(name, "norm_counts_copies") || !strcmp(name, "norm_after_clip"));
    if (p->loss || p->shows) return 0;
    seqpar_fail(error, SEQPAR_ERR_OPTION,
                mistake_named(name)
                    ? "mistake %.60s cannot be planted with objective %s; give another "
                      "--mistake or --objective"
                    : "no mistake is called '%.60s' with objective %s; seqpar-verify list has "
                      "all",
                name, word_facts[FACT_OBJECTIVE].words[d->facts.objective]);
    return -1;
}

/* ---- rows ---- */

static inline int64_t made_integer(const made *m, int64_t stream, int64_t index, int64_t low,
                                   int64_t high) {
    double u = seqpar_random_uniform((uint64_t)m->desc->seed, (uint64_t)stream,
                                     (uint64_t)index);
    int64_t x = low + (int64_t)(u * (double)(high - low + 1));
    return x > high ? high : x;
}

/* Lengths at random, at least 1; the second document has one token, unless it is the last. */
static inline void made_documents(const made *m, int64_t i, dump_row *row) {
    int64_t left = row->tokens;
    for (int64_t d = 0; d < row->docs; d++) {
        int64_t rest = row->docs - 1 - d, mean = left / (rest + 1);
        int64_t length = made_integer(m, i, d, mean / 2, mean + mean / 2);
        if (length < 1 || (d == 1 && rest)) length = 1;
        if (length > left - rest || !rest) length = left - rest;
        row->cu_seqlens[d + 1] = row->cu_seqlens[d] + length;
        left -= length;
    }
}

/* Every second row of DPO has one more pair, if it has enough tokens. If all rows had equally
   many, a mean of micro-batches' means would be right. */
static inline int64_t made_document_count(const made *m, int64_t i, int64_t tokens) {
    int64_t docs = m->desc->docs;
    int more = m->d.facts.objective == DUMP_DPO && i % 2 && docs + 2 <= tokens;
    return more ? docs + 2 : docs;
}

static inline int made_alloc(made *m, int64_t i, dump_row *row) {
    size_t bytes;
    row->tokens = m->desc->tokens + i; /* rows differ in length */
    row->docs = made_document_count(m, i, row->tokens);
    bytes = ((size_t)row->tokens + 1) * 8;
    row->cu_seqlens = (int64_t *)calloc((size_t)row->docs + 1, 8);
    if (write_row_room(row)) return reference_no_memory(&m->f);
    int64_t **arrays[] = {&row->ids, &row->positions, &row->labels, (int64_t **)&row->logp,
                          (int64_t **)&row->ref_logp};
    for (size_t k = 0; k < sizeof arrays / sizeof *arrays; k++)
        if (!(*arrays[k] = (int64_t *)calloc(bytes, 1))) return reference_no_memory(&m->f);
    return row->cu_seqlens ? 0 : reference_no_memory(&m->f);
}

static inline int made_rows(made *m, int layout, int64_t vocab) {
    token_rule labels = m->plant.labels ? m->plant.labels : made_label_right;
    token_rule positions = m->plant.positions ? m->plant.positions : position_right;
    for (int64_t i = 0; i < m->f.count; i++) {
        dump_row *row = &m->f.rows[i];
        if (made_alloc(m, i, row)) return -1;
        made_documents(m, i, row);
        if (write_deal(&m->d.error, row, i / m->d.accumulation * m->d.sp, m->d.sp, layout))
            return -1;
        for (int64_t t = 0; t < row->tokens; t++)
            row->ids[t] = made_integer(m, 1000 + i, t, 0, vocab - 1);
        for (int64_t t = 0; t < row->tokens; t++) {
            row->labels[t] = labels(row, t);
            row->positions[t] = positions(row, t);
            m->plant.changes |= row->labels[t] != made_label_right(row, t) ||
                                row->positions[t] != position_right(row, t);
        }
    }
    return 0;
}

/* ---- the model ---- */

enum { MADE_VOCAB = 37 };
static inline seqpar_llama_config made_config(void) {
    return (seqpar_llama_config){.layers = 2,
                                 .hidden = 16,
                                 .heads = 4,
                                 .kv_heads = 2,
                                 .head_dim = 4,
                                 .intermediate = 20,
                                 .vocab = MADE_VOCAB,
                                 .rope_theta = 10000,
                                 .rms_eps = 1e-5};
}

/* Writes OUT/model with random weights by the seed. 0, or -1 with the error. */
static inline int made_model(made *m, const char *folder) {
    seqpar_llama_config config = made_config();
    seqpar_comm *comm = seqpar_comm_self();
    seqpar_device *device = seqpar_device_reference();
    seqpar_ctx ctx;
    seqpar_llama model;
    page p = {.count = 0};
    char path[1200];
    double *elements = NULL;
    int status = seqpar_ctx_open(&ctx, comm, device, 1);
    if (!status) status = seqpar_llama_open(&ctx, &model, &config);
    if (!status) status = seqpar_llama_init(&ctx, &model, (uint64_t)m->desc->seed);
    if (!status) {
        elements = (double *)calloc((size_t)model.elements + 1, sizeof *elements);
        if (!elements) status = reference_no_memory(&m->f);
        if (!status)
            seqpar_device_read(device, elements, model.params.data, 0, model.elements,
                               device->storage);
        if (!status) page_parameters(&p, "", &model, elements);
        snprintf(path, sizeof path, "%.1000s/model.safetensors", folder);
        if (!status) status = page_save(&p, path, &m->d.error);
        if (!status) status = demo_save_config(folder, &config, &m->d.error);
        page_free(&p);
        free(elements);
        seqpar_llama_close(&ctx, &model);
    }
    if (status && !m->d.error.status) m->d.error = *ctx.error;
    seqpar_ctx_close(&ctx);
    seqpar_device_close(device);
    seqpar_comm_free(comm);
    return status ? -1 : 0;
}

/* ---- the step ---- */

/* Computes log-probs, with the mistake in the forward pass. Those of the reference model are
   the same plus noise. */
static inline int made_logp(made *m) {
    if (reference_logp(&m->f, m->plant.way)) return -1;
    for (int64_t i = 0; i < m->f.count; i++)
        for (int64_t t = 0; t < m->f.rows[i].tokens; t++) {
            double noise = seqpar_random_normal((uint64_t)m->desc->seed, 2000 + (uint64_t)i,
                                                (uint64_t)t);
            m->f.rows[i].logp[t] = m->f.logp[i][t];
            m->f.rows[i].ref_logp[t] = m->f.logp[i][t] + 0.3 * noise;
        }
    return 0;
}

/* The loss that rank r reports with the mistake; NaN: the mistake does not change the loss. */
static inline double made_wrong_loss(const made *m, loss_parts *p, int64_t r) {
    const law *by = &p->tokens.means.by[BY_RANK];
    for (int i = 0; i < p->answers.count; i++)
        if (!strcmp(p->answers.other[i].name, m->plant.m->name) &&
            fabs(p->answers.other[i].loss - p->answers.right) >
                3e-3 * fabs(p->answers.right)) /* detectable */
            return p->answers.other[i].loss;
    if (m->d.facts.objective != DUMP_SFT || !m->plant.m->mean) return NAN;
    if (m->plant.m->mean == MEAN_OF_NON_EMPTY && !law_has_empty(by)) return NAN;
    return law_mean(by, m->plant.m->mean, r);
}

/* Sets the loss that each rank reports. Fails if no token is trained, or if the mistake
   could only change the loss and does not. 0, or -1 with the error. */
static inline int made_loss(made *m) {
    static loss_parts parts;
    int status;
    loss_begin(&parts, &m->d.facts, 1e-3);
    for (int64_t i = 0; i < m->f.count; i++)
        loss_add_row(&parts, &m->d.facts, &m->f.rows[i], i / m->d.accumulation,
                     i % m->d.accumulation);
    status = loss_end(&parts, &m->d.facts) ? reference_no_memory(&m->f) : 0;
    m->want_loss = parts.answers.right;
    for (int64_t r = 0; !status && r < m->d.world; r++) {
        double wrong = m->plant.loss ? made_wrong_loss(m, &parts, r) : NAN;
        m->loss[r] = isnan(wrong) ? m->want_loss : wrong;
        m->plant.shows |= !isnan(wrong);
        m->plant.changes |= !isnan(wrong);
    }
    loss_free(&parts);
    if (!status && !isfinite(m->want_loss)) {
        seqpar_fail(&m->d.error, SEQPAR_ERR_OPTION,
                    "no token of these documents is learnt; give more tokens or fewer "
                    "documents");
        return -1;
    }
    if (m->plant.shows || status) return status;
    seqpar_fail(&m->d.error, SEQPAR_ERR_OPTION,
                "mistake %.60s cannot be planted in this step; "
                "give another --mistake, or other documents, "
                "ranks or micro-batches",
                m->plant.m->name);
    return -1;
}

/* Refuses a mistake that leaves the gradient right, as a mean of means does if the means are
   over equally many tokens. 0, or -1 with the error. */
static inline int made_shows(made *m) {
    likeness l = {0};
    liken(&l, m->gradient, m->right, m->f.model.elements);
    if (m->plant.labels || m->plant.positions) return 0; /* those tensors are wrong */
    if (m->plant.way == &right_way && !m->plant.seeds) return 0;
    if (distance_from(&l, 1) > 1e-6) return 0;
    seqpar_fail(&m->d.error, SEQPAR_ERR_OPTION,
                "mistake %.60s does not change the gradient of this step; give another "
                "--mistake, or more documents, ranks or micro-batches",
                m->plant.m->name);
    return -1;
}

static inline int made_gradients(made *m, double *const *logp) {
    seed_set seeds = {.f = &m->f};
    size_t bytes = (size_t)m->f.model.elements * sizeof *m->right;
    int status = seed_set_open(&seeds, logp) ? reference_no_memory(&m->f) : 0;
    if (!status && !seed_set_make(&seeds, SEEDS_RIGHT)) {
        seqpar_fail(&m->d.error, SEQPAR_ERR_OPTION, "objective %s has no gradient here",
                    word_facts[FACT_OBJECTIVE].words[m->d.facts.objective]);
        status = -1;
    }
    if (!status) status = reference_gradient(&m->f, &right_way, seeds.of);
    if (!status) memcpy(m->right, m->f.gradient, bytes);
    if (!status && !seed_set_make(&seeds, m->plant.seeds))
        seed_set_make(&seeds, SEEDS_RIGHT); /* made_shows refuses the mistake then */
    if (!status) status = reference_gradient(&m->f, m->plant.way, seeds.of);
    if (!status) memcpy(m->gradient, m->f.gradient, bytes);
    if (!status) status = made_shows(m);
    seed_set_close(&seeds);
    for (int64_t i = 0; !status && m->plant.m && i < m->f.model.elements; i++) {
        law l = {.sp = m->d.sp, .dp = m->d.world / m->d.sp, .accumulation = m->d.accumulation};
        m->gradient[i] *= law_factor(&l, &m->plant.m->scale);
    }
    m->plant.changes |= !status && memcmp(m->gradient, m->right, bytes);
    return status;
}

/* Draws AdamW's moments and computes its step from them. eps and max_norm are scaled to
   the gradient, so that eps matters and the gradient is clipped. */
static inline void made_step(made *m) {
    int64_t n = m->f.model.elements;
    double square = sum_of_squares(m->gradient, n);
    const step_way *way = &step_ways[m->plant.step];
    way_numbers numbers, of_right;
    way_factors made, right;
    m->d.facts.optimizer = DUMP_ADAMW;
    m->d.facts.lr = 0.1;
    m->d.facts.weight_decay = 0.5;
    m->d.facts.step = 3;
    m->d.facts.eps = 0.3 * sqrt(square / (double)n);
    m->d.facts.max_norm = 0.6 * sqrt(square);
    numbers = way_begin(&m->d.facts, way, way_clip_by(way, m->d.facts.max_norm, sqrt(square)));
    made = way_factors_of(&m->d.facts, way, &numbers, 0, 1);
    of_right = way_begin(&m->d.facts, &step_ways[0],
                         clip_factor(m->d.facts.max_norm, sqrt(square)));
    right = way_factors_of(&m->d.facts, &step_ways[0], &of_right, 0, 1);
    seqpar_device_read(m->f.device, m->param, m->f.model.params.data, 0, n,
                       m->f.device->storage);
    for (int64_t i = 0; i < n; i++) {
        double u = seqpar_random_normal((uint64_t)m->desc->seed, 3000, (uint64_t)i);
        m->m[i] = 0.2 * u * sqrt(square / (double)n);
        m->v[i] = (0.1 + u * u) * 0.02 * square / (double)n;
        element e = {m->param[i], m->gradient[i], m->m[i], m->v[i]};
        double step = way_step(&made, e);
        double as_right = way_step(&right, e);
        m->after[i] = m->param[i] + step;
        /* up to 1e-9 it is rounding */
        m->plant.changes |= !(fabs(step - as_right) <= 1e-9 * fabs(as_right));
    }
    for (int64_t r = 0; r < m->d.world; r++) {
        const char *name = m->plant.m ? m->plant.m->name : "";
        m->norm[r] = sqrt(square);
        if (!strcmp(name, "norm_counts_copies")) m->norm[r] *= sqrt((double)m->d.world);
        if (!strcmp(name, "norm_after_clip")) m->norm[r] = m->d.facts.max_norm;
        m->plant.changes |= m->norm[r] != sqrt(square);
        m->plant.changes |= !strcmp(name, "never_synchronised") && m->d.world > 1;
    }
}

/* Refuses a mistake that changes nothing with these sizes, such as a factor P on one rank. 0,
   or -1 with the error. */
static inline int made_changes(made *m) {
    if (!m->plant.m || m->plant.changes) return 0;
    seqpar_fail(&m->d.error, SEQPAR_ERR_OPTION,
                "mistake %.60s changes nothing with --sp %lld, --dp %lld and --accumulation "
                "%lld; give more ranks or micro-batches",
                m->plant.m->name, (long long)m->d.sp, (long long)(m->d.world / m->d.sp),
                (long long)m->d.accumulation);
    return -1;
}

/* ---- writing ---- */

/* Adds the tensors of row i as micro-batch `micro`: those tokens that the rank holds; rank -1:
   all tokens. With --questions, positions, log-probs and results of attention are left
   out. */
static inline void made_micro(made *m, page *p, int64_t i, int64_t rank, int64_t micro) {
    const dump_row *row = &m->f.rows[i];
    const seqpar_llama_config *c = &m->f.model.config;
    const reference_tape *t = &m->f.tapes[i];
    int64_t wide = c->heads * c->head_dim, narrow = c->kv_heads * c->head_dim;
    int64_t *places = (int64_t *)calloc((size_t)row->tokens + 1, sizeof *places);
    int answers = !m->desc->questions;
    for (int64_t k = 0; places && k < row->tokens; k++) places[k] = k;
    page_put(p, row, rank, micro, "index", places, 1, 0);
    free(places);
    page_row(p, micro, "cu_seqlens", row->cu_seqlens, SEQPAR_SAFETENSORS_I64, row->docs + 1);
    page_put(p, row, rank, micro, "ids", row->ids, 1, 0);
    page_put(p, row, rank, micro, "positions", answers ? row->positions : NULL, 1, 0);
    page_put(p, row, rank, micro, "labels", row->labels, 1, 0);
    page_put(p, row, rank, micro, "logp", answers ? row->logp : NULL, 1, 0);
    page_put(p, row, rank, micro, "ref_logp",
             m->d.facts.objective == DUMP_DPO ? row->ref_logp : NULL, 1, 0);
    page_put(p, row, rank, micro, "q", t->q, wide, c->heads);
    page_put(p, row, rank, micro, "k", t->k, narrow, c->kv_heads);
    page_put(p, row, rank, micro, "v", t->v, narrow, c->kv_heads);
    page_put(p, row, rank, micro, "dout", t->dout, wide, c->heads);
    if (!answers) return;
    page_put(p, row, rank, micro, "out", t->out, wide, c->heads);
    page_put(p, row, rank, micro, "lse", t->lse, c->heads, c->heads);
    page_put(p, row, rank, micro, "dq", t->dq, wide, c->heads);
    page_put(p, row, rank, micro, "dk", t->dk, narrow, c->kv_heads);
    page_put(p, row, rank, micro, "dv", t->dv, narrow, c->kv_heads);
}

/* Adds the tensors of the step. rank -1: of OUT/want, which has the loss and gradients only. */
static inline void made_page_step(made *m, page *p, int64_t rank, const double *gradient) {
    const double *loss = rank < 0 ? &m->want_loss : &m->loss[rank];
    if (m->desc->questions) return;
    page_add(p, &(seqpar_safetensors_tensor){.name = "loss", .dtype = SEQPAR_SAFETENSORS_F64},
             loss);
    page_parameters(p, "grad.", &m->f.model, gradient);
    if (rank < 0) return;
    page_add(p, &(seqpar_safetensors_tensor){.name = "norm", .dtype = SEQPAR_SAFETENSORS_F64},
             &m->norm[rank]);
    page_parameters(p, "param.", &m->f.model, m->param);
    page_parameters(p, "after.", &m->f.model, m->after);
    page_parameters(p, "m.", &m->f.model, m->m);
    page_parameters(p, "v.", &m->f.model, m->v);
}

/* Writes a rank's file in OUT/got; rank -1: the only file in OUT/want, which has all rows.
   0, or -1 with the error. */
static inline int made_file(made *m, int64_t rank) {
    dump_facts facts = m->d.facts;
    page p = {.count = 0};
    char path[1200];
    int status;
    if (rank < 0) {
        facts.world = facts.sp = 1;
        facts.accumulation = m->f.count;
        facts.optimizer = DUMP_NO_OPTIMIZER;
    }
    if (m->desc->questions) facts.optimizer = DUMP_NO_OPTIMIZER;
    page_facts(&p, &facts);
    page_say(&p, "rank", "%lld", (long long)(rank < 0 ? 0 : rank));
    for (int64_t micro = 0; micro < facts.accumulation; micro++)
        made_micro(m, &p, rank < 0 ? micro : rank / m->d.sp * m->d.accumulation + micro, rank,
                   micro);
    made_page_step(m, &p, rank, rank < 0 ? m->right : m->gradient);
    snprintf(path, sizeof path, "%.1000s/%s/rank%lld.safetensors", m->desc->out,
             rank < 0 ? "want" : "got", (long long)(rank < 0 ? 0 : rank));
    status = page_save(&p, path, &m->d.error);
    page_free(&p);
    return status;
}

/* For never_synchronised: the gradient from a rank's own tokens only. 0, or -1 with the
   error. */
static inline int made_own_gradient(made *m, int64_t rank) {
    reference_tape *tapes = m->f.tapes;
    seed_set seeds = {.f = &m->f};
    int status = seed_set_open(&seeds, m->f.logp) ? reference_no_memory(&m->f) : 0;
    if (!status) seed_set_make(&seeds, SEEDS_RIGHT);
    for (int64_t i = 0; !status && i < m->f.count; i++)
        for (int64_t t = 0; t < m->f.rows[i].tokens; t++)
            if (m->f.rows[i].rank[t] != rank) seeds.of[i][t] = 0;
    m->f.tapes = NULL; /* keep the recorded attention of the whole step */
    if (!status) status = reference_gradient(&m->f, &right_way, seeds.of);
    m->f.tapes = tapes;
    if (!status)
        memcpy(m->gradient, m->f.gradient, (size_t)m->f.model.elements * sizeof *m->gradient);
    seed_set_close(&seeds);
    return status;
}

static inline int made_files(made *m) {
    int own = m->plant.m && !strcmp(m->plant.m->name, "never_synchronised");
    int status = 0;
    bar_begin("files", own ? m->d.world * (1 + m->f.count) : m->d.world);
    for (int64_t r = 0; !status && r < m->d.world; r++) {
        if (own) status = made_own_gradient(m, r);
        if (!status) status = made_file(m, r);
        bar_step(1);
    }
    bar_end();
    return status;
}

/* ---- the whole dump ---- */

static inline int made_arrays_open(made *m) {
    size_t n = (size_t)m->f.model.elements + 1;
    double **arrays[] = {&m->right, &m->gradient, &m->param, &m->after, &m->m, &m->v};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        if (!(*arrays[i] = (double *)calloc(n, sizeof **arrays)))
            return reference_no_memory(&m->f);
    m->loss = (double *)calloc((size_t)m->d.world * 2, sizeof *m->loss);
    m->norm = m->loss ? m->loss + m->d.world : NULL;
    m->f.tapes = (reference_tape *)calloc((size_t)m->f.count, sizeof *m->f.tapes);
    return m->loss && m->f.tapes ? 0 : reference_no_memory(&m->f);
}

static inline void made_close(made *m) {
    reference_close(&m->f);
    free(m->right);
    free(m->gradient);
    free(m->param);
    free(m->after);
    free(m->m);
    free(m->v);
    free(m->loss);
}

/* Checks the description and sets the facts. Number facts get the values that absent metadata
   mean, so that they are not written. 0, or -1 with the error. */
static inline int made_facts(made *m, int *layout) {
    const made_desc *c = m->desc;
    m->d.facts = (dump_facts){
        .world = c->sp * c->dp, .sp = c->sp, .accumulation = c->accumulation, .step = 1};
    for (int i = 0; i < NUMBER_FACTS; i++)
        memcpy((char *)&m->d.facts + number_facts[i].at, &number_facts[i].absent, 8);
    m->d.world = m->d.facts.world;
    m->d.sp = c->sp;
    m->d.accumulation = c->accumulation;
    m->d.facts.objective = !strcmp(c->objective, "dpo") ? DUMP_DPO : DUMP_SFT;
    for (*layout = 0; *layout < SEQPAR_LAYOUT_COUNT; ++*layout)
        if (!strcmp(seqpar_layout_name(*layout), c->layout)) break;
    if (strcmp(c->objective, "sft") && strcmp(c->objective, "dpo"))
        seqpar_fail(&m->d.error, SEQPAR_ERR_OPTION, "--objective is '%.40s'; give sft or dpo",
                    c->objective);
    else if (c->docs > c->tokens || c->tokens > 4096 || m->d.world > 256 ||
             (m->d.facts.objective == DUMP_DPO && c->docs % 2))
        seqpar_fail(&m->d.error, SEQPAR_ERR_OPTION,
                    "%lld documents in %lld tokens on %lld ranks; give at most 4096 tokens and "
                    "256 ranks, no more documents than tokens, and an even number of documents "
                    "for dpo",
                    (long long)c->docs, (long long)c->tokens, (long long)m->d.world);
    return m->d.error.status ? -1 : 0;
}

/* Finds the mistake and makes the rows. What is refused here leaves no folder. 0, or -1 with
   the error. */
static inline int made_open(made *m) {
    int layout, status = made_facts(m, &layout);
    if (!status) status = made_plant_find(&m->plant, &m->d, m->desc->mistake, &m->d.error);
    if (!status) status = reference_begin(&m->f, &m->d, seqpar_device_reference());
    if (!status) status = made_rows(m, layout, MADE_VOCAB);
    return status ? -1 : 0;
}

/* Computes the step by the model in the folder. 0, or -1 with the error. */
static inline int made_compute(made *m, const char *folder) {
    double **logp = NULL;
    int status = reference_model(&m->f, folder, NULL) || made_arrays_open(m);
    bar_begin("log-probs", m->f.count);
    if (!status) status = made_logp(m);
    bar_end();
    if (!status && !(logp = copy_logp(&m->f))) status = reference_no_memory(&m->f);
    bar_begin("gradients", 2 * m->f.count);
    if (!status) status = made_loss(m) || made_gradients(m, logp);
    bar_end();
    if (!status) made_step(m);
    free_logp(logp, m->f.count);
    return status ? -1 : 0;
}

/* Writes OUT/want. With a mistake the right step is computed for it: labels, positions,
   log-probs, attention, loss and gradients of m are all wrong, or may be. 0, or -1 with the
   error in m. */
static inline int made_want(made *m, const char *folder) {
    made_desc desc = *m->desc;
    made right = {.desc = &desc};
    int status;
    if (!desc.mistake) return made_file(m, -1);
    desc.mistake = NULL;
    status = made_open(&right) || made_compute(&right, folder) || made_file(&right, -1);
    if (status) m->d.error = right.d.error;
    if (right.f.d) made_close(&right);
    return status ? -1 : 0;
}

/* Makes the whole dump. On failure it removes the folder, if it made the folder. 0, or -1 with
   *error set. */
static inline int made_make(const made_desc *desc, seqpar_error *error) {
    made m = {.desc = desc};
    char folder[1200];
    int begun = 0, status = made_open(&m);
    snprintf(folder, sizeof folder, "%.1000s/model", desc->out);
    if (!status) begun = !(status = write_folder(&m.d.error, desc->out, ""));
    if (!status)
        status = write_folder(&m.d.error, desc->out, "model") ||
                 write_folder(&m.d.error, desc->out, "got") ||
                 write_folder(&m.d.error, desc->out, "want") || made_model(&m, folder);
    if (!status) status = made_compute(&m, folder);
    if (!status) status = made_changes(&m) || made_want(&m, folder) || made_files(&m) ? -1 : 0;
    if (m.f.d) made_close(&m);
    if (status && begun) remove_folder(desc->out); /* no incomplete dump stays */
    *error = m.d.error;
    return status ? -1 : 0;
}
#endif
