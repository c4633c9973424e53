/* SPDX-License-Identifier: MIT OR Unlicense */
/* prm.h - process reward models, as in OpenRLHF's train_prm. A placeholder token follows each
 * step of a solution. At the placeholder the model predicts how good the step is. The loss is
 * the cross-entropy at the placeholder's own position, without a shift to the next token. Its
 * target is a token, among the whole vocabulary or among the marks (the tokens of
 * --reward_tokens), or a probability for each of two marks. The loss of an optimizer step is
 * the mean over all its placeholders. */
#ifndef DEMO_PRM_H
#define DEMO_PRM_H
#include "trainer/data/steps.h"
#include "trainer/run/trainer.h"

typedef struct {
    const char *input_key, *label_key, *placeholder_token, *reward_tokens;
    demo_marks marks; /* the tokens of --reward_tokens; none: labels can be any token */
} demo_prm_config;

#define DEMO_PRM_BINDINGS(p) \
    {"input_key", \
     &(p).input_key, \
     DEMO_STRING, \
     "input", \
     "JSON key of the text with its placeholders", \
     DEMO_ANY}, \
        {"label_key", \
         &(p).label_key, \
         DEMO_STRING, \
         "label", \
         "JSON key of the list of labels, one for each placeholder", \
         DEMO_ANY}, \
        {"placeholder_token", \
         &(p).placeholder_token, \
         DEMO_STRING, \
         NULL, \
         "the token after each step, at which the model predicts the step's label", \
         DEMO_ANY}, \
    { \
        "reward_tokens", &(p).reward_tokens, DEMO_STRING, NULL, \
            "tokens to choose the label from, separated by spaces; without it, all tokens", \
            DEMO_ANY \
    }

static demo_prm_config *demo_prm_options(const demo_job *job) {
    return (demo_prm_config *)job->options;
}

static int demo_prm_prepare(demo_job *job, demo_error *error) {
    const demo_prm_config *p = demo_prm_options(job);
    if (job->config.long_documents == DEMO_LONG_CUT_BOTH)
        return demo_fail(error,
                         "--truncation cut_both needs a prompt and a response, but train_prm "
                         "has a single text; give cut or drop");
    if (!p->placeholder_token && !demo_is_token_file(job->config.dataset))
        return demo_fail(error, "no placeholder token; give the token after each step by "
                                "--placeholder_token");
    return 0;
}

static demo_step_options demo_prm_data(const demo_job *job, const demo_dataset *set,
                                       const char *paths, int64_t max_samples) {
    const demo_prm_config *p = demo_prm_options(job);
    demo_step_options how = {.data = demo_data_asked(job, paths, max_samples,
                                                     demo_set_probs(job, set),
                                                     DEMO_TOKENS_STEPS),
                             .label_key = p->label_key};
    how.data.input_key = p->input_key;
    how.data.end = NULL; /* no EOS is appended to a document */
    return how;
}

/* Sets placeholder and marks from the text of the options. Used without a tokenizer, where each
   byte is a token. */
static int demo_prm_bytes(const demo_prm_config *p, const char *paths, demo_step_options *how,
                          demo_error *error) {
    const char *placeholder = p->placeholder_token;
    if (demo_is_token_file(paths) || how->data.prepare) return 0;
    if (!placeholder)
        return demo_fail(error,
                         "%s: is not a token file, so the placeholder token is unknown; give "
                         "it by --placeholder_token",
                         paths);
    return demo_byte_token("placeholder_token", placeholder, strlen(placeholder),
                           &how->placeholder, error) ||
                   demo_byte_marks(p->reward_tokens, &how->marks, error)
               ? -1
               : 0;
}

/* Loads the documents. The evaluation data must have the same marks as the training data. */
static int demo_prm_load(const demo_job *job, demo_dataset *set, const char *paths,
                         int64_t max_samples, demo_error *error) {
    demo_prm_config *p = demo_prm_options(job);
    demo_step_options how = demo_prm_data(job, set, paths, max_samples);
    if (demo_prm_bytes(p, paths, &how, error) || demo_steps_load(set, paths, &how, error))
        return -1;
    demo_marks marks = set->file ? demo_token_marks(set->file) : how.marks;
    demo_data_summary(set, set->summary, sizeof set->summary);
    if (set != &job->eval) p->marks = marks;
    return demo_same_marks(&marks, &p->marks)
               ? 0
               : demo_fail(error,
                           "%s: was made with other --reward_tokens than %s; make it again "
                           "with the same",
                           paths, job->config.dataset);
}

/* Adds the marks to the digest of the data, since the documents do not contain them. */
static uint64_t demo_prm_digest(const demo_job *job, const demo_dataset *set, uint64_t digest) {
    const demo_marks *marks = &demo_prm_options(job)->marks;
    (void)set;
    digest = demo_digest_number(digest, marks->count);
    return demo_digest(digest, marks->ids, marks->count * (int64_t)sizeof *marks->ids);
}

/* ---- a micro-batch ---- */

/* The state of a micro-batch, by local token. shares (tokens): the probability that the label
   gives the target. With marks, logp (tokens, marks) has the log-prob of every mark. Without
   marks, logp (tokens) has that of the target in the whole vocabulary, and best (tokens) the
   most probable token. */
typedef struct {
    seqpar_llama_batch b;
    const demo_marks *marks;
    seqpar_llama_choices choices;
    double *shares, *logp;
    int32_t *best;
} demo_prm_micro;

static double demo_prm_share(const demo_window *w, const seqpar_row *row, int64_t position) {
    int64_t d = 0;
    while (d + 1 < row->docs && row->cu_seqlens[d + 1] <= position) d++;
    return (double)w->set->documents[w->which[row->doc_source[d]]]
        .shares[position - row->cu_seqlens[d]];
}

/* Allocates the numbers of a micro-batch and collects the label of each local token. */
static void demo_prm_micro_open(demo_prm_micro *m, const demo_window *w,
                                const seqpar_row *rows) {
    int64_t width = m->marks->count ? m->marks->count : 1;
    m->shares = (double *)demo_alloc(m->b.tokens + 1, sizeof *m->shares);
    m->logp = (double *)demo_alloc(m->b.tokens * width + 1, sizeof *m->logp);
    m->best = (int32_t *)demo_alloc(m->b.tokens + 1, sizeof *m->best);
    memcpy(m->choices.ids, m->marks->ids, sizeof m->choices.ids);
    m->choices.count = m->marks->count;
    if (m->marks->count)
        m->b.choices = &m->choices;
    else
        m->b.best = m->best;
    for (int64_t i = 0; i < m->b.share->count; i++) {
        const seqpar_piece *p = &m->b.share->pieces[i];
        for (int64_t k = 0; k < p->count; k++)
            m->shares[p->local + k] = demo_prm_share(w, &rows[p->row],
                                                     p->start + k * p->stride);
    }
}

static void demo_prm_micro_close(demo_rank *r, demo_prm_micro *m) {
    free(m->shares);
    free(m->logp);
    free(m->best);
    seqpar_llama_close_batch(&r->ctx, &r->model, &m->b);
}

/* The other mark, if there are two. */
static int64_t demo_prm_other(int64_t mark) { return !mark; }

/* Computes the seeds: the derivatives of the step's mean loss by each log-prob of every local
   token. */
static seqpar_status demo_prm_seeds(demo_rank *r, demo_prm_micro *m, int64_t count,
                                    demo_seeds *out, seqpar_vocab_seeds *seeds) {
    int64_t width = m->marks->count ? m->marks->count : 1, n = m->b.tokens * width;
    double *host = (double *)demo_alloc(n + 1, sizeof *host);
    for (int64_t t = 0; t < m->b.tokens; t++) {
        if (m->b.targets[t] == SEQPAR_IGNORE) continue;
        int64_t mark = m->marks->count ? demo_mark_of(m->marks, m->b.targets[t]) : 0;
        host[t * width + mark] = -m->shares[t] / (double)count;
        if (m->shares[t] < 1)
            host[t * width + demo_prm_other(mark)] = -(1 - m->shares[t]) / (double)count;
    }
    seqpar_status status = demo_seeds_write(r, out, 1, host, n, r->device->accumulator);
    memset(seeds, 0, sizeof *seeds);
    if (m->marks->count)
        m->choices.dlogq = out->part[0].data;
    else
        seeds->dlogp = out->part[0].data;
    free(host);
    return status;
}

/* Adds the loss of local token t to sum[0]. Adds 1 to sum[1] if the prediction is correct: if
   the most probable token is the one with the larger probability in the label. */
static void demo_prm_add(const demo_prm_micro *m, int64_t t, double sum[2]) {
    int64_t width = m->marks->count, best = 0;
    double share = m->shares[t];
    if (!width) {
        sum[0] -= m->logp[t];
        sum[1] += m->best[t] == m->b.targets[t];
        return;
    }
    const double *logq = m->logp + t * width;
    int64_t mark = demo_mark_of(m->marks, m->b.targets[t]), other = demo_prm_other(mark);
    for (int64_t k = 1; k < width; k++)
        if (logq[k] > logq[best]) best = k;
    sum[0] -= share * logq[mark];
    if (share < 1) sum[0] -= (1 - share) * logq[other];
    sum[1] += best == (share >= 0.5 ? mark : other);
}

/* Sums losses and correct predictions over the tokens of each piece on this rank. */
static seqpar_status demo_prm_sums(demo_rank *r, const demo_prm_micro *m,
                                   const seqpar_row *rows, demo_window *w) {
    const seqpar_buffer *from = m->marks->count ? &m->b.logq : &m->b.logp;
    int64_t width = m->marks->count ? m->marks->count : 1;
    seqpar_status status = SEQPAR_OK;
    seqpar_device_read(r->device, m->logp, from->data, 0, m->b.tokens * width,
                       r->device->accumulator);
    for (int64_t i = 0; !status && i < m->b.share->count; i++) {
        const seqpar_piece *p = &m->b.share->pieces[i];
        double sum[2] = {0};
        for (int64_t t = p->local; t < p->local + p->count; t++)
            if (m->b.targets[t] != SEQPAR_IGNORE) demo_prm_add(m, t, sum);
        status = demo_piece_seen(r, w, rows, p, sum);
    }
    return status;
}

/* Runs forward on these rows and adds their losses. micro >= 0: also runs backward. */
static seqpar_status demo_prm_rows(demo_rank *r, demo_window *w, int64_t first, int64_t count,
                                   int64_t micro) {
    const seqpar_row *rows = w->batch.row + first;
    seqpar_llama_batch_desc run = demo_batch_desc_of(r, micro);
    demo_prm_micro m = {.marks = &demo_prm_options(r->job)->marks};
    seqpar_vocab_seeds seeds;
    demo_seeds buffers = {0};
    seqpar_status status = seqpar_llama_open_batch(&r->ctx, &r->model, &m.b, rows, count, &run);
    if (!status) demo_prm_micro_open(&m, w, rows);
    if (!status) status = seqpar_llama_forward(&r->ctx, &r->model, &m.b, micro >= 0);
    if (!status && micro < 0) status = seqpar_llama_values(&r->ctx, &r->model, &m.b);
    if (!status && micro >= 0)
        status = demo_prm_seeds(r, &m, w->batch.counts.supervised, &buffers, &seeds);
    if (!status && micro >= 0)
        status = demo_backward(&r->ctx, &r->experts, &r->model, &m.b, &r->optim, micro, &seeds);
    if (!status) status = demo_prm_sums(r, &m, rows, w);
    demo_seeds_free(r, &buffers);
    demo_prm_micro_close(r, &m);
    return status;
}

static const demo_objective demo_prm = {.unit = "documents",
                                        .weight = "labels",
                                        .measure = " nats",
                                        .documents_per_unit = 1,
                                        .columns = 2,
                                        .kind = DEMO_TOKENS_STEPS,
                                        .column = {"loss", "accuracy"},
                                        .load = demo_prm_load,
                                        .digest = demo_prm_digest,
                                        .rows = demo_prm_rows,
                                        .total = demo_tokens_total,
                                        .prepare = demo_prm_prepare};
#endif
