/* SPDX-License-Identifier: MIT OR Unlicense */
/* run_seeds.h - operations on tokens: log-probs from logits, the derivatives of the step's loss
 * by what it is made of, and generalised advantage estimation. */
#ifndef ORACLE_RUN_SEEDS_H
#define ORACLE_RUN_SEEDS_H
#include "oracle/loss/gae.h"
#include "oracle/loss/logits.h"
#include "run_step.h"

/* ---- log-probs from logits ---- */

/* What a row of logits gives: (tokens) each. */
enum { LOGITS_LOGP, LOGITS_MEAN, LOGITS_LSE, LOGITS_ENTROPY, LOGITS_GIVE };
static const char *const logits_gives[LOGITS_GIVE] = {"logp", "mean_logp", "logits_lse",
                                                      "entropy"};

/* c has the logits of the token. p log p is 0 where p is 0, as at a logit of -Inf. */
static inline void logits_statistics(const logits_check *c, int64_t t, double **x) {
    int64_t label = c->row->labels[t];
    double mean = 0, entropy = 0;
    for (int64_t k = 0; k < c->vocab; k++) {
        double logp = c->logits[k] - c->lse, p = exp(logp);
        mean += logp / (double)c->vocab;
        if (p > 0) entropy -= p * logp;
    }
    x[LOGITS_LOGP][t] = label == DUMP_IGNORE ? 0 : c->logits[label] - c->lse;
    x[LOGITS_MEAN][t] = mean;
    x[LOGITS_LSE][t] = c->lse;
    x[LOGITS_ENTROPY][t] = entropy;
}

/* A label outside of the vocabulary has no log-prob. 0, or -1 with the error. */
static inline int run_label_fits(run *r, const logits_check *c, int64_t rank, int64_t t) {
    int64_t label = c->row->labels[t];
    if (label == DUMP_IGNORE || (label >= 0 && label < c->vocab)) return 0;
    seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: tensor %lld.labels has label %lld, and %lld.logits a vocabulary of "
                "%lld; write the whole vocabulary on every rank",
                r->d.ranks[rank].path, (long long)c->micro, (long long)label,
                (long long)c->micro, (long long)c->vocab);
    return -1;
}

/* Adds the statistics of one rank's tokens to x. 0, or -1 with the error. */
static inline int run_logits_rank(run *r, logits_check *c, int64_t rank, double **x) {
    const seqpar_safetensors_tensor *t = dump_find(c->d, rank, c->micro, "logits");
    int64_t count, *token;
    int status = 0;
    if (logits_shape(c, rank, t)) return -1;
    count = t->count / c->vocab;
    token = logits_tokens(c->row, rank, count);
    c->logits = (double *)calloc((size_t)c->vocab, sizeof *c->logits);
    c->before = (double *)calloc((size_t)c->vocab, sizeof *c->before);
    if (!token || !c->logits || !c->before) status = run_no_memory(r);
    for (int64_t i = 0; !status && i < count; i++) {
        status = logits_read(c, rank, i, t);
        if (!status && token[i] >= 0) status = run_label_fits(r, c, rank, token[i]);
        if (!status && token[i] >= 0) logits_statistics(c, token[i], x);
    }
    free(token);
    free(c->logits);
    free(c->before);
    return status ? -1 : 0;
}

static inline int run_logits_row(run *r, int64_t n) {
    const dump_row *row = &r->rows[n];
    int64_t dp = n / r->d.accumulation, micro = n % r->d.accumulation;
    logits_check c = {.d = &r->d, .row = row, .micro = micro};
    double *x[LOGITS_GIVE];
    int status = 0;
    for (int i = 0; i < LOGITS_GIVE; i++)
        if (!(x[i] = (double *)calloc((size_t)row->tokens + 1, sizeof **x)))
            status = run_no_memory(r);
    for (int64_t q = dp * r->d.sp; !status && q < (dp + 1) * r->d.sp; q++)
        status = run_logits_rank(r, &c, q, x);
    for (int i = 0; !status && i < LOGITS_GIVE; i++)
        status = run_put_row(r, row, dp, micro, logits_gives[i], x[i], 1, 1, 1);
    for (int i = 0; i < LOGITS_GIVE; i++) free(x[i]);
    return status;
}

static inline int run_log_probs(run *r) {
    int status = 0;
    for (int64_t n = 0; n < r->row_count && !status; n++) status = run_logits_row(r, n);
    return status;
}

/* ---- derivatives of the loss ---- */

/* The derivative of a critic's token loss by its value. */
static inline double value_derivative(const dump_facts *f, const value_side *s) {
    double free = s->value - s->returns, bound = value_clipped(f, s) - s->returns;
    int clipped = f->clip_value > 0 && fabs(s->value - s->old) > f->clip_value;
    if (square(free) > square(bound) || !clipped) return free;
    return 0;
}

/* Seeds of a critic: seed_set_make has none. */
static inline void run_value_seeds(seed_set *s) {
    const dump_facts *f = &s->f->d->facts;
    make_mean_seeds(s, SEEDS_RIGHT);
    for (int64_t i = 0; i < s->f->count; i++)
        for (int64_t t = 0; t < row_end(&s->f->rows[i]); t++) {
            value_side side;
            if (!is_target(&s->f->rows[i], t)) continue;
            side = value_side_of(f, &s->f->rows[i], t);
            s->of[i][t] *= -value_derivative(f, &side);
        }
}

/* The derivative by a term's tensor. x: the token's number there; weight: minus the token's. */
static inline double term_derivative(const dump_facts *f, int term, double x, double weight) {
    double factor = term_factor(f, term) * weight;
    return term == TERM_Z ? -2 * factor * x : factor;
}

/* Adds to the ranks, as dlogp and so on, the derivatives by each tensor that the loss of row n
   is made of. 0, or -1 with the error. */
static inline int run_put_seeds(run *r, const seed_set *s, int64_t n) {
    static const char *const of_terms[TERMS] = {"dmean_logp", "dlogits_lse", "dentropy"};
    const dump_facts *f = &r->d.facts;
    const dump_row *row = &r->rows[n];
    int64_t dp = n / r->d.accumulation, micro = n % r->d.accumulation;
    int of_values = f->objective == DUMP_RM || f->objective == DUMP_VALUE;
    double *x = (double *)calloc((size_t)row->tokens + 1, sizeof *x);
    int status = x ? 0 : run_no_memory(r);
    for (int64_t t = 0; !status && t < row->tokens; t++)
        x[t] = (1 - term_factor(f, TERM_SMOOTHING)) * s->of[n][t];
    if (!status)
        status = run_put_row(r, row, dp, micro, of_values ? "dvalues" : "dlogp", x, 1, 1, 1);
    for (int k = 0; k < TERMS && !status; k++) {
        const double *from = *term_of(row, k);
        if (!(term_factor(f, k) > 0)) continue;
        for (int64_t t = 0; t < row->tokens; t++)
            x[t] = is_target(row, t) ? term_derivative(f, k, from[t], s->weights[n][t]) : 0;
        status = run_put_row(r, row, dp, micro, of_terms[k], x, 1, 1, 1);
    }
    free(x);
    return status;
}

/* The log-probs or values of all rows; NULL: no memory. */
static inline double **run_outputs(run *r) {
    int of_values = r->d.facts.objective == DUMP_RM || r->d.facts.objective == DUMP_VALUE;
    double **x = (double **)calloc((size_t)r->row_count + 1, sizeof *x);
    for (int64_t n = 0; x && n < r->row_count; n++)
        x[n] = of_values ? r->rows[n].values : r->rows[n].logp;
    return x;
}

static inline int run_no_seeds(run *r) {
    seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: the loss of objective %s, with importance %s, has no derivative here; "
                "write what its loss takes, documents 2i and 2i + 1 as a pair, and importance "
                "token",
                r->desc->in, word_facts[FACT_OBJECTIVE].words[r->d.facts.objective],
                word_facts[FACT_RATIO].words[r->d.facts.importance]);
    return -1;
}

/* The loss, and its derivatives. A reward model's scores are its values here. */
static inline int run_seeds_of(run *r) {
    reference f = {.d = &r->d, .rows = r->rows, .count = r->row_count};
    double **outputs = run_outputs(r);
    seed_set s = {.f = &f};
    int status = outputs && !seed_set_open(&s, outputs) ? 0 : run_no_memory(r);
    if (!status && r->d.facts.objective == DUMP_VALUE)
        run_value_seeds(&s);
    else if (!status && !seed_set_make(&s, SEEDS_RIGHT))
        status = run_no_seeds(r);
    for (int64_t n = 0; n < r->row_count && !status; n++) status = run_put_seeds(r, &s, n);
    seed_set_close(&s);
    free(outputs);
    return status;
}

static inline int run_loss_gradient(run *r) {
    if (r->d.facts.objective == DUMP_RM && run_needs(r, "index cu_seqlens values")) return -1;
    return run_loss(r) || run_seeds_of(r) ? -1 : 0;
}

/* ---- generalised advantage estimation ---- */

/* Adds advantages and returns of row n; tokens without a label get 0. */
static inline int run_gae_row(run *r, int64_t n) {
    const dump_row *row = &r->rows[n];
    gae_step g = {.f = &r->d.facts};
    gae_token *at = (gae_token *)calloc((size_t)row->tokens + 1, sizeof *at);
    double *x = (double *)calloc((size_t)(2 * row->tokens) + 1, sizeof *x);
    double *returns = x ? x + row->tokens : NULL;
    int64_t dp = n / r->d.accumulation, micro = n % r->d.accumulation;
    int status = at && x ? 0 : run_no_memory(r);
    for (int64_t d = 0; d < row->docs && !status; d++) {
        gae_state state = {0, 0, -1};
        gae_run(&g, row, d, -1, GAE_RIGHT, &state, at);
    }
    for (int64_t t = 0; t < row_end(row) && !status; t++) {
        if (!row_supervised(row, t)) continue;
        x[t] = at[row->gathered[t]].way[GAE_RIGHT];
        returns[t] = x[t] + row->values[t];
    }
    if (!status) status = run_put_row(r, row, dp, micro, "advantages", x, 1, 1, 1);
    if (!status) status = run_put_row(r, row, dp, micro, "returns", returns, 1, 1, 1);
    free(at);
    free(x);
    return status;
}

/* The reward of a document, or those of its tokens; the latter are taken if they are there. */
static inline int run_gae(run *r) {
    int64_t elements;
    int by_token = dump_count(&r->d, 0, 0, "token_rewards", &elements) > 0, status = 0;
    if (r->d.facts.objective != DUMP_PPO || r->d.facts.advantage != DUMP_ADVANTAGE_GAE) {
        seqpar_fail(&r->d.error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: metadata objective is %s and advantage is %s; write objective ppo "
                    "and advantage gae",
                    r->d.ranks[0].path, word_facts[FACT_OBJECTIVE].words[r->d.facts.objective],
                    word_facts[FACT_ADVANTAGE].words[r->d.facts.advantage]);
        return -1;
    }
    if (run_needs(r, by_token ? "index cu_seqlens labels values token_rewards"
                              : "index cu_seqlens labels values rewards"))
        return -1;
    for (int64_t n = 0; n < r->row_count && !status; n++) status = run_gae_row(r, n);
    return status;
}
#endif
