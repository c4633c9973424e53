/* SPDX-License-Identifier: MIT OR Unlicense */
/* kto.h - KTO: learns from responses labelled desirable or undesirable. The reward of a
 * response is compared with the KL term of the whole optimizer step. The KL term needs a
 * separate forward pass over mismatched documents, each a prompt with the response to another
 * prompt. */
#ifndef DEMO_KTO_H
#define DEMO_KTO_H
#include "preference.h"

typedef struct {
    const char *input_key, *output_key, *label_key, *ref_pretrain;
    bool precompute_ref, ref_offload;
    double beta, desirable_loss_weight, undesirable_loss_weight;
    demo_labelled_set sets[2]; /* training, evaluation */
} demo_kto_config;

#define DEMO_KTO_BINDINGS(k) \
    {"input_key", &(k).input_key, DEMO_STRING, "input", "JSON key of the prompt", DEMO_ANY}, \
        {"output_key", &(k).output_key, DEMO_STRING, "output", "JSON key of the response", \
         DEMO_ANY}, \
        {"label_key", \
         &(k).label_key, \
         DEMO_STRING, \
         "label", \
         "JSON key of the label: true if the response is desirable", \
         DEMO_ANY}, \
        DEMO_REFERENCE_BINDINGS(k), \
        {"beta",       &(k).beta, DEMO_FLOAT, "0.01", "temperature of the implicit reward", \
         DEMO_ABOVE(0)}, \
        {"desirable_loss_weight", \
         &(k).desirable_loss_weight, \
         DEMO_FLOAT, \
         "1", \
         "weight of the loss of desirable responses", \
         DEMO_AT_LEAST(0)}, \
    { \
        "undesirable_loss_weight", &(k).undesirable_loss_weight, DEMO_FLOAT, "1", \
            "weight of the loss of undesirable responses", DEMO_AT_LEAST(0) \
    }

static demo_labelled_set *demo_kto_set(const demo_job *job, const demo_dataset *set) {
    return &((demo_kto_config *)job->options)->sets[set == &job->eval];
}

static int demo_kto_load(const demo_job *job, demo_dataset *set, const char *paths,
                         int64_t max_samples, demo_error *error) {
    const demo_kto_config *k = (const demo_kto_config *)job->options;
    demo_labelled_set *labelled = demo_kto_set(job, set);
    demo_labelled_options options = {.data = demo_data_asked(job, paths, max_samples,
                                                             demo_set_probs(job, set),
                                                             DEMO_TOKENS_LABELLED),
                                     .label_key = k->label_key};
    options.data.input_key = demo_named_key(job, "input_key", k->input_key);
    options.data.output_key = k->output_key;
    options.data.input_template = job->config.input_template;
    if (demo_labelled_load(labelled, paths, &options, error)) return -1;
    set->file = labelled->file;
    if (set == &job->eval && arrlen(labelled->records) < 2)
        return demo_fail(error,
                         "%s: KTO's KL term pairs each prompt with another document's "
                         "response, but the evaluation has 1 document; give 2 or more",
                         paths);
    /* from here on the set owns the documents */
    for (int64_t i = 0; i < arrlen(labelled->records); i++)
        arrput(set->documents, labelled->records[i].document);
    demo_labelled_summary(labelled, set->summary, sizeof set->summary);
    return 0;
}

static void demo_kto_part(demo_job *job, const uint8_t *held) {
    demo_labelled_set *sets = ((demo_kto_config *)job->options)->sets;
    DEMO_PART(sets[1].records, sets[0].records, 1, held, false);
}

static uint64_t demo_kto_digest(const demo_job *job, const demo_dataset *set, uint64_t digest) {
    const demo_labelled_set *labelled = demo_kto_set(job, set);
    for (int64_t i = 0; i < arrlen(labelled->records); i++)
        digest = demo_digest_number(digest, labelled->records[i].desirable);
    return digest;
}

/* ---- the KL term: every prompt with the response to the next prompt ---- */

/* Makes the mismatched documents of a window, in `set`, and opens a window over them. */
static seqpar_status demo_mismatched_open(demo_rank *r, const demo_window *w, demo_dataset *set,
                                          demo_window *mismatched) {
    const demo_data_options how = {.max_len = r->job->config.max_len,
                                   .long_documents = r->job->config.long_documents};
    int64_t n = arrlen(w->which);
    demo_error why;
    *mismatched = (demo_window){.set = set};
    arrsetlen(set->documents, n);
    memset(set->documents, 0, (size_t)n * sizeof *set->documents);
    for (int64_t i = 0; i < n; i++) arrput(mismatched->which, i);
    if (demo_mismatched_step(set->documents, demo_kto_set(r->job, w->set), w->which, n, &how,
                             &why))
        return seqpar_fail(r->ctx.error, SEQPAR_ERR_OPTION, "%s", why.text);
    return demo_window_open(r, mismatched, 1, 0);
}

static seqpar_status demo_kto_kl_of(demo_rank *r, demo_window *mismatched, double *kl) {
    int64_t n = mismatched->units;
    double *h = (double *)demo_alloc(n + 1, sizeof *h);
    seqpar_status status = demo_window_ratios(r, mismatched, h);
    *kl = seqpar_kto_kl(h, n);
    free(h);
    return status;
}

static seqpar_status demo_kto_before(demo_rank *r, demo_window *w) {
    demo_dataset set = {0};
    demo_window mismatched;
    seqpar_status status = demo_mismatched_open(r, w, &set, &mismatched);
    w->reference = demo_stored_sums(r, w, 0);
    mismatched.reference = demo_stored_sums(r, w, 1);
    if (!status) status = demo_kto_kl_of(r, &mismatched, &w->statistic);
    demo_window_close(&mismatched);
    demo_data_free(&set);
    return status;
}

/* ---- the loss of the responses ---- */

enum { KTO_KL = 1, DESIRABLE_REWARD, UNDESIRABLE_REWARD, DESIRABLE, KTO_COLUMNS };

/* Computes the loss of each response in the rows; dsum gets its derivative by the response's
   log-prob. */
static seqpar_status demo_kto_responses(demo_rank *r, demo_window *w, const seqpar_row *rows,
                                        int64_t count, const double *sums, double *dsum) {
    const demo_kto_config *k = (const demo_kto_config *)r->job->options;
    const demo_labelled_set *set = demo_kto_set(r->job, w->set);
    const seqpar_kto_desc desc = {k->beta, k->desirable_loss_weight, k->undesirable_loss_weight,
                                  w->statistic};
    seqpar_status status = SEQPAR_OK;
    for (int64_t row = 0, doc = 0, i;
         !status && (i = demo_next_unit(rows, count, 1, &row, &doc)) >= 0;) {
        int desirable = set->records[w->which[i]].desirable;
        seqpar_kto_result result;
        status = seqpar_kto_loss(r->ctx.error, &result, sums[i * SUMS + LOGP],
                                 sums[i * SUMS + REF_LOGP], desirable, &desc);
        const double columns[KTO_COLUMNS] = {
            result.loss, w->statistic, desirable ? result.reward : 0.0,
            desirable ? 0.0 : result.reward, desirable ? 1.0 : 0.0};
        if (!status) status = demo_unit_seen(r, w, i, columns);
        dsum[i] = result.dlogp;
    }
    return status;
}

static seqpar_status demo_kto_rows(demo_rank *r, demo_window *w, int64_t first, int64_t count,
                                   int64_t micro) {
    return demo_response_rows(r, w, first, count, micro, 0, demo_kto_responses);
}

/* Corrects the means of rewards: each is over the responses of its label, not over all
   responses. */
static seqpar_status demo_kto_total(demo_rank *r, demo_window *w, double *means,
                                    double *weight) {
    seqpar_status status = demo_units_total(r, w, means, weight);
    if (means[DESIRABLE] > 0) means[DESIRABLE_REWARD] /= means[DESIRABLE];
    if (means[DESIRABLE] < 1) means[UNDESIRABLE_REWARD] /= 1.0 - means[DESIRABLE];
    return status;
}

static seqpar_status demo_kto_open(demo_rank *r) {
    const demo_kto_config *k = (const demo_kto_config *)r->job->options;
    seqpar_status status = demo_reference_open(r, k->ref_pretrain, k->ref_offload);
    return status || !k->precompute_ref ? status : demo_stored_open(r, demo_mismatched_open);
}

static int demo_kto_prepare(demo_job *job, demo_error *error) {
    const demo_kto_config *k = (const demo_kto_config *)job->options;
    if (k->desirable_loss_weight > 0 || k->undesirable_loss_weight > 0) return 0;
    demo_fail(error, "desirable_loss_weight and undesirable_loss_weight are both 0, so nothing "
                     "would be trained; raise one of them");
    return -1;
}

static const demo_objective demo_kto = {
    .unit = "documents",
    .weight = "documents",
    .measure = "",
    .documents_per_unit = 1,
    .columns = KTO_COLUMNS,
    .least_evaluated = 2,
    .kind = DEMO_TOKENS_LABELLED,
    .column = {"loss", "kl", "desirable_reward", "undesirable_reward", "desirable"},
    .needs_model = true,
    .open = demo_kto_open,
    .close = demo_reference_close,
    .before = demo_kto_before,
    .load = demo_kto_load,
    .part = demo_kto_part,
    .digest = demo_kto_digest,
    .rows = demo_kto_rows,
    .total = demo_kto_total,
    .prepare = demo_kto_prepare};
#endif
