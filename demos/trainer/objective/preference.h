/* SPDX-License-Identifier: MIT OR Unlicense */
/* preference.h - objectives over whole responses: DPO and related losses with a frozen
 * reference model, and reward models.
 *
 * First the log-prob of a response is summed over all ranks that hold tokens of it. Then every
 * rank computes the loss of each pair in its rows, and the derivative of the loss by the summed
 * log-prob. This derivative is the seed (the gradient with which backward starts) of every
 * token of the response. */
#ifndef DEMO_PREFERENCE_H
#define DEMO_PREFERENCE_H
#include "trainer/data/pairs.h"
#include "reference.h"
#include "trainer/base/escape.h"

typedef struct {
    const char *prompt_key, *chosen_key, *rejected_key, *margin_key, *ref_pretrain, *pref_loss;
    const char *loss, *value_head_prefix;
    bool ipo, margin_loss, precompute_ref, ref_offload;
    double beta, label_smoothing, nll_loss_coef, simpo_gamma;
    double *margins[2]; /* of the training pairs, of the evaluation pairs; stb_ds arrays */
} demo_preference_config;

#define DEMO_PAIR_BINDINGS(p) \
    {"prompt_key", \
     &(p).prompt_key, \
     DEMO_STRING, \
     NULL, \
     "JSON key of the prompt; without it, chosen and rejected include the prompt", \
     DEMO_ANY}, \
        {"chosen_key", \
         &(p).chosen_key, \
         DEMO_STRING, \
         "chosen", \
         "JSON key of the chosen response", \
         DEMO_ANY}, \
    { \
        "rejected_key", &(p).rejected_key, DEMO_STRING, "rejected", \
            "JSON key of the rejected response", DEMO_ANY \
    }

#define DEMO_DPO_BINDINGS(p) \
    DEMO_PAIR_BINDINGS(p), DEMO_REFERENCE_BINDINGS(p), \
        {"beta",       &(p).beta, DEMO_FLOAT, "0.1", "temperature of the implicit reward", \
         DEMO_ABOVE(0)}, \
        {"pref_loss", &(p).pref_loss, DEMO_STRING, "sigmoid", "the loss; sigmoid is DPO", \
         DEMO_ANY}, \
        {"ipo", &(p).ipo, DEMO_FLAG, NULL, "the same as --pref_loss ipo", DEMO_ANY}, \
        {"label_smoothing", \
         &(p).label_smoothing, \
         DEMO_FLOAT, \
         "0", \
         "assumed fraction of pairs whose labels are flipped (cDPO)", \
         DEMO_BETWEEN(0, 0.5)}, \
        {"simpo_gamma", \
         &(p).simpo_gamma, \
         DEMO_FLOAT, \
         "0.5", \
         "simpo: target margin of rewards", \
         DEMO_AT_LEAST(0)}, \
    { \
        "nll_loss_coef", &(p).nll_loss_coef, DEMO_FLOAT, "0", \
            "weight of an added NLL loss: the chosen response's mean per token (TRL: the " \
            "mean over all chosen tokens)", \
            DEMO_AT_LEAST(0) \
    }

#define DEMO_RM_BINDINGS(p) \
    DEMO_PAIR_BINDINGS(p), \
        {"loss", \
         &(p).loss, \
         DEMO_STRING, \
         "sigmoid", \
         "sigmoid or logexp: the same function, the second without margins", \
         DEMO_ANY}, \
        {"margin_loss", \
         &(p).margin_loss, \
         DEMO_FLAG, \
         NULL, \
         "subtract the pair's margin from the difference of its scores", \
         DEMO_ANY}, \
        {"margin_key", &(p).margin_key,           DEMO_STRING, \
         "margin",     "JSON key of that margin", DEMO_ANY}, \
    { \
        "value_head_prefix", &(p).value_head_prefix, DEMO_STRING, "score", \
            "name of the value head's tensor: score stands for score.weight", DEMO_ANY \
    }

/* Does the definition of the loss have this value of the option? 0, or -1 with a message. */
static int demo_definition_has(const demo_job *job, const char *list, const char *option,
                               const char *value, demo_error *error) {
    const demo_definition *by = demo_definition_of(job);
    if (demo_list_has(list, value)) return 0;
    return demo_fail(error,
                     "--%s %s is not defined by %s, which has %s; leave it out, or give a "
                     "--loss_definition other than %s",
                     option, value, by->releases, *list ? list : "none", by->name);
}

/* ---- data: each pair is two documents ---- */

/* Loads pairs as consecutive documents, chosen then rejected. An evaluation leaves out pairs of
   identical responses. */
static int demo_pairs_as_documents(const demo_job *job, demo_dataset *set, const char *paths,
                                   int64_t max_samples, demo_error *error) {
    demo_preference_config *p = (demo_preference_config *)job->options;
    demo_pair_options options = {.data = demo_data_asked(job, paths, max_samples,
                                                         demo_set_probs(job, set),
                                                         DEMO_TOKENS_PAIRS),
                                 .prompt_key = p->prompt_key,
                                 .chosen_key = p->chosen_key,
                                 .rejected_key = p->rejected_key,
                                 .margin_key = p->margin_key,
                                 .margins = p->margin_loss};
    options.data.input_template = p->prompt_key ? job->config.input_template : NULL;
    options.data.long_prompts = job->score != NULL;
    demo_pair_set pairs = {0};
    double **margins = &p->margins[set == &job->eval];
    char shown[1024];
    if (demo_pairs_load(&pairs, paths, &options, error)) return -1;
    set->file = pairs.file;
    bool evaluates = set == &job->eval;
    if (pairs.counts.identical == arrlen(pairs.pairs)) {
        demo_fail(error,
                  "%s: in all %lld pairs chosen and rejected are the same (%lld cut), so no "
                  "response is preferred; raise --max_len or check the keys",
                  paths, (long long)pairs.counts.identical, (long long)pairs.counts.cut);
        set->file = NULL;
        demo_pairs_free(&pairs);
        return -1;
    }
    if (evaluates && pairs.counts.identical && !job->rank)
        fprintf(stderr,
                "notice: %s: in %lld of %lld pairs chosen and rejected are the same; the "
                "evaluation leaves these pairs out\n",
                demo_escape(shown, sizeof shown, paths), (long long)pairs.counts.identical,
                (long long)arrlen(pairs.pairs));
    for (int64_t i = 0; i < arrlen(pairs.pairs); i++) {
        /* rounding alone would decide whether this pair counts as correct */
        if (evaluates && demo_same_document(&pairs.pairs[i].chosen, &pairs.pairs[i].rejected)) {
            demo_pair_free(&pairs, &pairs.pairs[i]);
            continue;
        }
        arrput(set->documents, pairs.pairs[i].chosen);
        arrput(set->documents, pairs.pairs[i].rejected);
        arrput(*margins, pairs.pairs[i].margin);
    }
    demo_pairs_summary(&pairs, set->summary, sizeof set->summary);
    arrfree(pairs.pairs); /* the set owns the documents now */
    return 0;
}

static void demo_pairs_part(demo_job *job, const uint8_t *held) {
    double **margins = ((demo_preference_config *)job->options)->margins;
    DEMO_PART(margins[1], margins[0], 1, held, job->eval_trained);
}

static uint64_t demo_pairs_digest(const demo_job *job, const demo_dataset *set,
                                  uint64_t digest) {
    const double *margins =
        ((const demo_preference_config *)job->options)->margins[set == &job->eval];
    return demo_digest(digest, margins, arrlen(margins) * (int64_t)sizeof *margins);
}

/* ---- shared by all of these objectives ---- */

enum {
    LOSS,
    ACCURACY,
    CHOSEN_REWARD,
    REJECTED_REWARD,
    MARGIN,
    PAIR_COLUMNS,
    SQUARED_REWARD = PAIR_COLUMNS,
    RM_COLUMNS
};

/* Records the columns of a unit, the loss first. Only the first rank of a sequence-parallel
   group records them, so that each unit counts once. */
static seqpar_status demo_unit_seen(demo_rank *r, demo_window *w, int64_t unit,
                                    const double *columns) {
    if (!(fabs(columns[LOSS]) <= 1e300))
        return seqpar_fail(r->ctx.error, SEQPAR_ERR_NOT_FINITE,
                           "step %lld: the loss of unit %lld (%s) is %g; lower the learning "
                           "rate or check the data of this step",
                           (long long)r->step + 1, (long long)unit, r->job->objective->unit,
                           columns[LOSS]);
    w->seen.width = r->job->objective->columns;
    return r->ctx.sp_rank ? SEQPAR_OK
                          : seqpar_segments_push(r->ctx.error, &w->seen, unit, 0, columns);
}

static seqpar_status demo_pair_seen(demo_rank *r, demo_window *w, int64_t unit,
                                    const seqpar_pair_result *pair) {
    const double columns[RM_COLUMNS] = {pair->loss,
                                        pair->reward_chosen > pair->reward_rejected ? 1.0 : 0.0,
                                        pair->reward_chosen,
                                        pair->reward_rejected,
                                        pair->reward_chosen - pair->reward_rejected,
                                        0.5 * (pair->reward_chosen * pair->reward_chosen +
                                               pair->reward_rejected * pair->reward_rejected)};
    return demo_unit_seen(r, w, unit, columns);
}

/* Means over the units of the window. If all values are equal, the mean is exactly that
   value. */
static seqpar_status demo_units_total(demo_rank *r, demo_window *w, double *means,
                                      double *weight) {
    int64_t columns = w->seen.width = r->job->objective->columns;
    double *all = (double *)demo_alloc(w->units * (columns + 1), sizeof *all);
    double *column = all + w->units * columns;
    seqpar_status status = seqpar_segments_sum(r->ctx.world, all, w->units, &w->seen);
    for (int64_t c = 0; !status && c < columns; c++) {
        for (int64_t i = 0; i < w->units; i++) column[i] = all[i * columns + c];
        means[c] = seqpar_mean(column, w->units);
    }
    *weight = (double)w->units;
    free(all);
    return status;
}

/* The next unit of per_unit documents in these rows, in the order of the rows; -1 if there is
   none. */
static int64_t demo_next_unit(const seqpar_row *rows, int64_t count, int64_t per_unit,
                              int64_t *row, int64_t *doc) {
    for (; *row < count; (*row)++, *doc = 0)
        while (*doc < rows[*row].docs) {
            int64_t source = rows[*row].doc_source[(*doc)++];
            if (source % per_unit == 0) return source / per_unit;
        }
    return -1;
}

/* Sets the seed of every token with live 1 to the derivative of its document (dsum), then runs
   backward. */
static seqpar_status demo_spread_backward(demo_rank *r, demo_window *w, seqpar_llama_batch *b,
                                          const double *dsum, const double *live,
                                          int64_t micro) {
    double *host = (double *)demo_alloc(b->tokens + 1, sizeof *host);
    demo_seeds buffers = {0};
    seqpar_vocab_seeds seeds = {0};
    seqpar_segments_spread(host, dsum, b->share);
    for (int64_t t = 0; t < b->tokens; t++)
        host[t] = live[t] == 0.0 ? 0.0 : host[t] / (double)w->units;
    seqpar_status status = demo_seeds_write(r, &buffers, 1, host, b->tokens,
                                            demo_value_dtype(r, &r->model));
    seeds.dlogp = buffers.part[0].data;
    if (!status)
        status = demo_backward(&r->ctx, &r->experts, &r->model, b, &r->optim, micro, &seeds);
    demo_seeds_free(r, &buffers);
    free(host);
    return status;
}

/* ---- log-probs of whole responses ---- */

enum { LOGP, REF_LOGP, TOKENS, SUMS }; /* per document of the window */

/* Runs forward of policy and reference, and adds the log-probs on this rank to the sums of
   their documents. alone: without the reference. live (tokens): set to 1 where the token has a
   target. */
static seqpar_status demo_response_terms(demo_rank *r, seqpar_llama_batch *b,
                                         const seqpar_row *rows, int64_t count, int keep,
                                         int alone, seqpar_segments *segments, double *live) {
    double *logp = (double *)demo_alloc(5 * b->tokens + 1, sizeof *logp);
    double *ref = logp + b->tokens, *terms = ref + b->tokens;
    seqpar_status status = seqpar_llama_forward(&r->ctx, &r->model, b, keep);
    segments->width = SUMS;
    if (!status) status = seqpar_llama_values(&r->ctx, &r->model, b);
    if (!status && !alone) status = demo_reference_logp(r, rows, count, ref);
    if (!status)
        seqpar_device_read(r->device, logp, b->logp.data, 0, b->tokens, r->device->accumulator);
    for (int64_t t = 0; !status && t < b->tokens; t++) {
        live[t] = b->targets[t] != SEQPAR_IGNORE;
        terms[t * SUMS + LOGP] = live[t] == 0.0 ? 0.0 : logp[t];
        terms[t * SUMS + REF_LOGP] = live[t] == 0.0 ? 0.0 : ref[t];
        terms[t * SUMS + TOKENS] = live[t];
    }
    if (!status) status = seqpar_segments_add(r->ctx.error, segments, terms, b->share);
    free(logp);
    return status;
}

/* With --precompute_ref: copies the reference's sums from those computed before training. */
static void demo_use_stored(const demo_window *w, double *sums) {
    for (int64_t i = 0; w->reference && i < arrlen(w->which); i++)
        sums[i * SUMS + REF_LOGP] = w->reference[i];
}

/* Refuses a log-prob that is not finite. The message names the model and the document. */
static seqpar_status demo_sums_finite(demo_rank *r, const demo_window *w, const double *sums) {
    for (int64_t i = 0; i < arrlen(w->which); i++)
        for (int k = LOGP; k <= REF_LOGP; k++)
            if (!isfinite(sums[i * SUMS + k]))
                return seqpar_fail(
                    r->ctx.error, SEQPAR_ERR_NOT_FINITE,
                    "step %lld: the %s log-prob of document %lld is %g; %s",
                    (long long)r->step + 1, k == LOGP ? "policy's" : "reference's",
                    (long long)w->which[i], sums[i * SUMS + k],
                    k == LOGP
                        ? "lower the learning rate, or check the weights of --pretrain"
                        : "check the weights of --ref_pretrain (without it, of --pretrain)");
    return SEQPAR_OK;
}

/* Computes the sums (documents, SUMS) of the responses in these rows on all sequence-parallel
   ranks. */
static seqpar_status demo_response_sums(demo_rank *r, const demo_window *w,
                                        seqpar_llama_batch *b, const seqpar_row *rows,
                                        int64_t count, int keep, int alone, double *sums,
                                        double *live) {
    seqpar_segments segments = {0};
    seqpar_status status = demo_response_terms(r, b, rows, count, keep, alone || w->reference,
                                               &segments, live);
    if (!status) status = seqpar_segments_sum(r->ctx.sp, sums, arrlen(w->which), &segments);
    demo_use_stored(w, sums);
    if (!status) status = demo_sums_finite(r, w, sums);
    seqpar_segments_free(&segments);
    return status;
}

/* Records the sums of the responses in these rows, for losses that need the sums of all pairs
   before the loss of any pair. */
static seqpar_status demo_sums_rows(demo_rank *r, demo_window *w, int64_t first, int64_t count,
                                    int64_t micro) {
    const seqpar_row *rows = w->batch.row + first;
    seqpar_llama_batch_desc run = demo_batch_desc(r->job);
    seqpar_llama_batch b;
    (void)micro;
    seqpar_status status = seqpar_llama_open_batch(&r->ctx, &r->model, &b, rows, count, &run);
    double *live = (double *)demo_alloc(b.tokens + 1, sizeof *live);
    if (!status)
        status = demo_response_terms(r, &b, rows, count, 0, w->reference != NULL, &w->seen,
                                     live);
    seqpar_llama_close_batch(&r->ctx, &r->model, &b);
    free(live);
    return status;
}

/* Computes the log-ratios h of policy to reference for all documents of an open window, on all
   ranks. */
static seqpar_status demo_window_ratios(demo_rank *r, demo_window *w, double *h) {
    int64_t n = arrlen(w->which);
    double *sums = (double *)demo_alloc(n * SUMS + 1, sizeof *sums);
    seqpar_status status = demo_window_values(r, w, demo_sums_rows);
    w->seen.width = SUMS;
    if (!status) status = seqpar_segments_sum(r->ctx.world, sums, n, &w->seen);
    demo_use_stored(w, sums);
    if (!status) status = demo_sums_finite(r, w, sums);
    for (int64_t i = 0; i < n; i++) h[i] = sums[i * SUMS + LOGP] - sums[i * SUMS + REF_LOGP];
    free(sums);
    return status;
}

/* ---- DPO ---- */

static const char *demo_preference_name(int kind) { return seqpar_preference_at(kind)->name; }

static const char *demo_pair_loss(const demo_preference_config *p) {
    return p->ipo ? "ipo" : p->pref_loss;
}

/* kto_pair is the only loss here whose value for a pair depends on other pairs, so seqpar.h
   does not have it. */
static bool demo_is_kto_pair(const demo_preference_config *p) {
    return !strcmp(demo_pair_loss(p), "kto_pair");
}

/* chosen_mean: as in demo_defined_pair. */
static seqpar_preference_desc demo_preference_desc(const demo_job *job, double chosen_mean) {
    const demo_preference_config *p = (const demo_preference_config *)job->options;
    seqpar_preference_desc d = {.kind = demo_pick_named(demo_pair_loss(p), demo_preference_name,
                                                        SEQPAR_PREFERENCE_COUNT),
                                .beta = p->beta,
                                .label_smoothing = p->label_smoothing,
                                .gamma = p->simpo_gamma,
                                .nll_coef = p->nll_loss_coef};
    demo_defined_pair(demo_definition_of(job), &d, chosen_mean);
    return d;
}

static int demo_has_reference(const demo_job *job) {
    return demo_is_kto_pair((const demo_preference_config *)job->options) ||
           seqpar_preference_at(demo_preference_desc(job, 0).kind)->reference;
}

static seqpar_status demo_pair_of(demo_rank *r, const demo_window *w, const double *chosen,
                                  const double *rejected, seqpar_pair_result *result) {
    const demo_preference_config *p = (const demo_preference_config *)r->job->options;
    seqpar_preference_desc desc = demo_preference_desc(r->job, w->statistic);
    seqpar_preference pair = {
        chosen[LOGP],       rejected[LOGP],          chosen[REF_LOGP],
        rejected[REF_LOGP], (int64_t)chosen[TOKENS], (int64_t)rejected[TOKENS]};
    if (!demo_is_kto_pair(p)) return seqpar_preference_loss(r->ctx.error, result, &pair, &desc);
    *result = demo_kto_pair(pair.chosen - pair.ref_chosen, pair.rejected - pair.ref_rejected,
                            p->beta, &w->means);
    return SEQPAR_OK;
}

/* Computes the loss of every pair in the rows; dsum (documents) gets its derivatives by the
   sums. */
static seqpar_status demo_dpo_pairs(demo_rank *r, demo_window *w, const seqpar_row *rows,
                                    int64_t count, const double *sums, double *dsum) {
    seqpar_status status = SEQPAR_OK;
    for (int64_t row = 0, doc = 0, unit;
         !status && (unit = demo_next_unit(rows, count, 2, &row, &doc)) >= 0;) {
        const double *chosen = sums + 2 * unit * SUMS;
        seqpar_pair_result result;
        status = demo_pair_of(r, w, chosen, chosen + SUMS, &result);
        if (!status) status = demo_pair_seen(r, w, unit, &result);
        dsum[2 * unit] = result.dchosen;
        dsum[2 * unit + 1] = result.drejected;
    }
    return status;
}

/* Computes the sums of the responses in these rows, calls the objective, and runs backward if
   micro >= 0. alone: without the reference. */
typedef seqpar_status (*demo_responses_fn)(demo_rank *r, demo_window *w, const seqpar_row *rows,
                                           int64_t count, const double *sums, double *dsum);
static seqpar_status demo_response_rows(demo_rank *r, demo_window *w, int64_t first,
                                        int64_t count, int64_t micro, int alone,
                                        demo_responses_fn objective) {
    const seqpar_row *rows = w->batch.row + first;
    int64_t documents = arrlen(w->which);
    seqpar_llama_batch_desc run = demo_batch_desc_of(r, micro);
    seqpar_llama_batch b;
    seqpar_status status = seqpar_llama_open_batch(&r->ctx, &r->model, &b, rows, count, &run);
    double *sums = (double *)demo_alloc(documents * (SUMS + 1) + b.tokens + 1, sizeof *sums);
    double *dsum = sums + documents * SUMS, *live = dsum + documents;
    if (!status)
        status = demo_response_sums(r, w, &b, rows, count, micro >= 0, alone, sums, live);
    if (!status) status = objective(r, w, rows, count, sums, dsum);
    if (!status && micro >= 0) status = demo_spread_backward(r, w, &b, dsum, live, micro);
    seqpar_llama_close_batch(&r->ctx, &r->model, &b);
    free(sums);
    return status;
}

static seqpar_status demo_dpo_rows(demo_rank *r, demo_window *w, int64_t first, int64_t count,
                                   int64_t micro) {
    return demo_response_rows(r, w, first, count, micro, !demo_has_reference(r->job),
                              demo_dpo_pairs);
}

static seqpar_status demo_dpo_open(demo_rank *r) {
    const demo_preference_config *p = (const demo_preference_config *)r->job->options;
    if (!demo_has_reference(r->job)) return SEQPAR_OK;
    seqpar_status status = demo_reference_open(r, p->ref_pretrain, p->ref_offload);
    return status || !p->precompute_ref ? status : demo_stored_open(r, NULL);
}

/* Mean number of supervised tokens of a chosen response in the window. */
static double demo_chosen_mean(const demo_window *w) {
    double tokens = 0;
    for (int64_t i = 0; i < arrlen(w->which); i += 2) {
        const demo_document *d = &w->set->documents[w->which[i]];
        tokens += (double)demo_supervised(d) - (d->tokens ? d->loss_mask[0] : 0);
    }
    return tokens / (double)w->units;
}

/* Computes the means of kto_pair by a forward pass over all pairs of the step. */
static seqpar_status demo_kto_pair_before(demo_rank *r, demo_window *w) {
    const demo_preference_config *p = (const demo_preference_config *)r->job->options;
    demo_window all = {.set = w->set, .reference = w->reference};
    int64_t n = w->units;
    double *h = (double *)demo_alloc(6 * n + 1, sizeof *h), *chosen = h + 2 * n,
           *rejected = chosen + n;
    for (int64_t i = 0; i < 2 * n; i++) arrput(all.which, w->which[i]);
    seqpar_status status = demo_window_open(r, &all, 2, 0);
    if (!status) status = demo_window_ratios(r, &all, h);
    for (int64_t i = 0; i < n; i++) chosen[i] = h[2 * i], rejected[i] = h[2 * i + 1];
    if (!status) w->means = demo_kto_means_of(chosen, rejected, n, p->beta, rejected + n);
    demo_window_close(&all);
    free(h);
    return status;
}

static seqpar_status demo_dpo_before(demo_rank *r, demo_window *w) {
    w->reference = demo_stored_sums(r, w, 0);
    w->statistic = demo_chosen_mean(w);
    return demo_is_kto_pair((const demo_preference_config *)r->job->options)
               ? demo_kto_pair_before(r, w)
               : SEQPAR_OK;
}

/* Writes a description of the loss that follows from definition and options. */
static void demo_dpo_text(const demo_job *job, char *text, size_t size) {
    const demo_preference_config *p = (const demo_preference_config *)job->options;
    seqpar_preference_desc d = demo_preference_desc(job, 1);
    const char *name = demo_pair_loss(p);
    bool means = d.length_normalized || !strcmp(name, "simpo");
    size_t used = (size_t)snprintf(text, size, "%s%s", name,
                                   demo_is_kto_pair(p) ? ", means of all pairs of the step"
                                   : means             ? " by per-token means"
                                                       : " by sums");
    if (p->label_smoothing > 0)
        used += (size_t)snprintf(text + used, size - used, ", label smoothing %g",
                                 p->label_smoothing);
    if (p->nll_loss_coef > 0)
        snprintf(text + used, size - used, ", with the NLL (%s)",
                 d.nll_tokens > 0 ? "mean over the step's chosen tokens"
                                  : "mean over each chosen response");
}

static int demo_dpo_defined(const demo_job *job, demo_error *error) {
    const demo_preference_config *p = (const demo_preference_config *)job->options;
    const demo_definition *by = demo_definition_of(job);
    const char *name = demo_pair_loss(p), *had = p->label_smoothing > 0 ? by->smoothed : NULL;
    const char *option = had ? "label_smoothing" : "nll_loss_coef";
    if (demo_definition_has(job, by->pairs, "pref_loss", name, error)) return -1;
    if (had && demo_list_has(had, name)) had = NULL, option = "nll_loss_coef";
    if (!had && p->nll_loss_coef > 0 && !demo_list_has(by->with_nll, name)) had = by->with_nll;
    if (!had) return 0;
    return demo_fail(error,
                     "--%s is not defined for %s by %s, only for %s; set it to 0, or give "
                     "another --pref_loss",
                     option, name, by->releases, had);
}

/* Refuses contradicting options before data is read. */
static int demo_dpo_prepare(demo_job *job, demo_error *error) {
    const demo_preference_config *p = (const demo_preference_config *)job->options;
    if (p->ipo && strcmp(p->pref_loss, "sigmoid") && strcmp(p->pref_loss, "ipo"))
        return demo_fail(error,
                         "--ipo and --pref_loss %s are two losses; leave out one of them",
                         p->pref_loss);
    if (demo_dpo_defined(job, error)) return -1;
    if (!demo_has_reference(job) && (p->ref_pretrain || p->precompute_ref))
        return demo_fail(error, "pref_loss %s has no reference model; leave out --%s",
                         p->pref_loss, p->ref_pretrain ? "ref_pretrain" : "precompute_ref");
    return 0;
}

static const demo_objective demo_dpo = {
    .unit = "pairs",
    .weight = "pairs",
    .measure = "",
    .documents_per_unit = 2,
    .columns = PAIR_COLUMNS,
    .kind = DEMO_TOKENS_PAIRS,
    .column = {"loss", "accuracy", "chosen_reward", "rejected_reward", "reward_margin"},
    .needs_model = true,
    .open = demo_dpo_open,
    .close = demo_reference_close,
    .before = demo_dpo_before,
    .load = demo_pairs_as_documents,
    .part = demo_pairs_part,
    .digest = demo_pairs_digest,
    .rows = demo_dpo_rows,
    .total = demo_units_total,
    .prepare = demo_dpo_prepare,
    .loss_text = demo_dpo_text};

/* ---- reward model: the score of a response's last token ---- */

/* Adds the scores of last tokens on this rank to `segments`. The score of a document is that of
   its last token, so exactly one rank has it. last (tokens): set to 1 at a last token. */
static seqpar_status demo_last_terms(demo_rank *r, seqpar_llama_batch *b,
                                     const seqpar_row *rows, seqpar_segments *segments,
                                     double *last) {
    double *terms = (double *)demo_alloc(b->tokens + 1, sizeof *terms);
    segments->width = 1;
    seqpar_device_read(r->device, terms, b->score.data, 0, b->tokens, r->device->storage);
    for (int64_t i = 0; i < b->share->count; i++) {
        const seqpar_piece *p = &b->share->pieces[i];
        for (int64_t d = 0; d < rows[p->row].docs; d++) {
            int64_t from_start = rows[p->row].cu_seqlens[d + 1] - 1 - p->start;
            if (from_start >= 0 && from_start % p->stride == 0 &&
                from_start / p->stride < p->count)
                last[p->local + from_start / p->stride] = 1.0;
        }
    }
    for (int64_t t = 0; t < b->tokens; t++)
        if (last[t] == 0.0) terms[t] = 0.0;
    seqpar_status status = seqpar_segments_add(r->ctx.error, segments, terms, b->share);
    free(terms);
    return status;
}

static seqpar_status demo_last_scores(demo_rank *r, seqpar_llama_batch *b,
                                      const seqpar_row *rows, int64_t documents, double *scores,
                                      double *last) {
    seqpar_segments segments = {0};
    seqpar_status status = demo_last_terms(r, b, rows, &segments, last);
    if (!status) status = seqpar_segments_sum(r->ctx.sp, scores, documents, &segments);
    seqpar_segments_free(&segments);
    return status;
}

/* Computes the reward loss of every pair in the rows; dscore (documents) gets its derivatives
   by the scores. */
static seqpar_status demo_rm_pairs(demo_rank *r, demo_window *w, const seqpar_row *rows,
                                   int64_t count, const double *scores, double *dscore) {
    const demo_preference_config *p = (const demo_preference_config *)r->job->options;
    seqpar_status status = SEQPAR_OK;
    for (int64_t row = 0, doc = 0, unit;
         !status && (unit = demo_next_unit(rows, count, 2, &row, &doc)) >= 0;) {
        double margin = p->margin_loss
                            ? p->margins[w->set == &r->job->eval][w->which[2 * unit] / 2]
                            : 0.0;
        seqpar_pair_result result = seqpar_reward_loss(scores[2 * unit], scores[2 * unit + 1],
                                                       margin, 0.0);
        status = demo_pair_seen(r, w, unit, &result);
        dscore[2 * unit] = result.dchosen;
        dscore[2 * unit + 1] = result.drejected;
    }
    return status;
}

/* Scores the documents of these rows and computes the reward loss. micro >= 0: also runs
   backward. */
static seqpar_status demo_rm_rows(demo_rank *r, demo_window *w, int64_t first, int64_t count,
                                  int64_t micro) {
    const seqpar_row *rows = w->batch.row + first;
    int64_t documents = arrlen(w->which);
    seqpar_llama_batch_desc run = demo_batch_desc_of(r, micro);
    seqpar_llama_batch b;
    seqpar_status status = seqpar_llama_open_batch(&r->ctx, &r->model, &b, rows, count, &run);
    double *scores = (double *)demo_alloc(2 * documents + b.tokens + 1, sizeof *scores);
    double *dscore = scores + documents, *last = dscore + documents;
    if (!status) status = seqpar_llama_forward(&r->ctx, &r->model, &b, micro >= 0);
    if (!status) status = seqpar_llama_values(&r->ctx, &r->model, &b);
    if (!status) status = demo_last_scores(r, &b, rows, documents, scores, last);
    if (!status) status = demo_rm_pairs(r, w, rows, count, scores, dscore);
    if (!status && micro >= 0) status = demo_spread_backward(r, w, &b, dscore, last, micro);
    seqpar_llama_close_batch(&r->ctx, &r->model, &b);
    free(scores);
    return status;
}

static int demo_rm_prepare(demo_job *job, demo_error *error) {
    const demo_preference_config *p = (const demo_preference_config *)job->options;
    const demo_definition *by = demo_definition_of(job);
    if (demo_definition_has(job, by->rewards, "loss", p->loss, error)) return -1;
    if (p->margin_loss &&
        demo_definition_has(job, by->margins ? "true" : "", "margin_loss", "true", error))
        return -1;
    if (p->margin_loss && !strcmp(p->loss, "logexp"))
        return demo_fail(error, "--loss logexp has no margins; leave out --margin_loss or take "
                                "--loss sigmoid");
    return 0;
}

/* Writes mean and unbiased standard deviation of all scores of the evaluation into config.json,
   where PPO's normalize_reward reads them. After an evaluation on training data it keeps values
   that config.json already has: they belong to the same weights, and to held-out data. */
static seqpar_status demo_rm_saved(demo_rank *r, const char *folder) {
    const double *m = r->eval_means;
    double scores = 2.0 * (double)(arrlen(r->job->eval.documents) / 2);
    double mean = 0.5 * (m[CHOSEN_REWARD] + m[REJECTED_REWARD]);
    double variance = (m[SQUARED_REWARD] - mean * mean) * scores / (scores - 1.0);
    char path[1280];
    if (!(scores > 0)) return SEQPAR_OK;
    snprintf(path, sizeof path, "%s/config.json", folder);
    char *text = demo_read_text(path, r->ctx.error);
    cJSON *json = text ? cJSON_Parse(text) : NULL;
    bool keeps = r->job->eval_trained && cJSON_HasObjectItem(json, "std");
    if (!keeps) demo_source_set(json, "mean", cJSON_CreateNumber(mean));
    /* lower bound of OpenRLHF */
    double deviation = variance > 1e-16 ? sqrt(variance) : 1e-8;
    if (!keeps) demo_source_set(json, "std", cJSON_CreateNumber(deviation));
    char *with = json ? cJSON_Print(json) : NULL;
    seqpar_status status =
        with ? seqpar_file_write_atomic(path, with, (int64_t)strlen(with), r->ctx.error)
             : seqpar_fail(r->ctx.error, SEQPAR_ERR_FILE_FORMAT,
                           "%s could not be read again to add mean and std", path);
    cJSON_free(with);
    cJSON_Delete(json);
    free(text);
    return status;
}

static const demo_objective demo_rm = {.unit = "pairs",
                                       .weight = "pairs",
                                       .measure = "",
                                       .documents_per_unit = 2,
                                       .columns = RM_COLUMNS,
                                       .kind = DEMO_TOKENS_PAIRS,
                                       .column = {"loss", "accuracy", "chosen_reward",
                                                  "rejected_reward", "reward_margin",
                                                  "squared_reward"},
                                       .needs_model = true,
                                       .load = demo_pairs_as_documents,
                                       .part = demo_pairs_part,
                                       .digest = demo_pairs_digest,
                                       .rows = demo_rm_rows,
                                       .total = demo_units_total,
                                       .saved = demo_rm_saved,
                                       .prepare = demo_rm_prepare};
#endif
