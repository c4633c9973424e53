/* SPDX-License-Identifier: MIT OR Unlicense */
/* tokens.h - the loss of SFT, PPO and value from each token's loss: the mean over all
 * supervised tokens of the step, or another reduction that the metadata name (dump.h). */
#ifndef ORACLE_TOKENS_H
#define ORACLE_TOKENS_H
#include "means.h"
#include "values.h"

/* ---- one token ---- */

static inline void token_losses(const dump_facts *f, const dump_row *row, int64_t t,
                                const sequence_ratio *of, double *loss) {
    if (f->objective == DUMP_PPO) {
        policy_losses(f, row, t, of, loss);
        return;
    }
    if (f->objective == DUMP_VALUE) {
        value_losses(f, row, t, loss);
        return;
    }
    for (int way = 0; way < TOKEN_WAYS; way++) loss[way] = NAN;
    loss[TOKEN_RIGHT] = -row->logp[t];
}

/* ---- terms that options add to a token's loss ---- */

enum { TERM_SMOOTHING, TERM_Z, TERM_ENTROPY, TERMS };

/* What the term is multiplied by; 0: the objective has none. */
static inline double term_factor(const dump_facts *f, int term) {
    int sft = f->objective == DUMP_SFT, ppo = f->objective == DUMP_PPO;
    return term == TERM_SMOOTHING ? (sft ? f->label_smoothing : 0)
           : term == TERM_Z       ? (sft ? f->z_loss : 0)
                                  : (ppo ? f->entropy_coef : 0);
}

static inline double *const *term_of(const dump_row *row, int term) {
    return term == TERM_SMOOTHING ? &row->mean_logp
           : term == TERM_Z       ? &row->logits_lse
                                  : &row->entropy;
}

/* What the term adds to the token's loss; *slope: the derivative by the term's tensor. */
static inline double term_loss(const dump_facts *f, const dump_row *row, int64_t t, int term,
                               double *slope) {
    double factor = term_factor(f, term), x = factor > 0 ? (*term_of(row, term))[t] : 0;
    *slope = term == TERM_Z ? 2 * factor * x : -factor;
    return factor == 0              ? 0
           : term == TERM_SMOOTHING ? factor * (row->logp[t] - x)
           : term == TERM_Z         ? factor * x * x
                                    : -factor * x;
}

static inline double term_unit(const dump_row *row, int term) {
    return term == TERM_SMOOTHING ? row->unit.mean_logp
           : term == TERM_Z       ? row->unit.logits_lse
                                  : row->unit.entropy;
}

/* What an option needs and the row lacks; NULL: nothing. */
static inline const char *term_lacking(const dump_facts *f, const dump_row *row) {
    static const char *const lacks[TERMS] = {"mean_logp, which label_smoothing takes",
                                             "logits_lse, which z_loss takes",
                                             "entropy, which entropy_coef takes"};
    for (int i = 0; i < TERMS; i++)
        if (term_factor(f, i) > 0 && !*term_of(row, i)) return lacks[i];
    return NULL;
}

/* Whether an option adds a term whose gradient does not pass only through labels' log-probs. */
static inline int has_terms(const dump_facts *f) {
    for (int i = 0; i < TERMS; i++)
        if (term_factor(f, i) > 0) return 1;
    return 0;
}

/* Whether the row has the tensors that its tokens' losses need, cu_seqlens aside. */
static inline int row_has_token_losses(const dump_facts *f, const dump_row *row) {
    if (f->objective == DUMP_VALUE) return row_has_values(f, row);
    if (!row->logp || !row->labels) return 0;
    if (term_lacking(f, row)) return 0;
    return f->objective != DUMP_PPO ||
           (row->old_logp && row->advantages && (row->ref_logp || !(f->kl_coef > 0)));
}

/* ---- sums ---- */

/* A document's losses, or those of its part on one rank. */
typedef struct token_part {
    double sum, count;
} token_part;

/* Sums of a row's or a replica's losses, the right ones and those of mistakes. */
typedef struct token_group {
    double sums[TOKEN_WAYS], count;
} token_group;

/* Sums over groups of each one's mean over tokens. all: number of groups; filled: number of
   groups with a supervised token. */
typedef struct token_groups {
    double means[TOKEN_WAYS], all, filled, least; /* least: fewest tokens of a filled one */
} token_groups;

/* Options of the metadata, and weights, that a trainer may fail to apply. */
enum { LEFT_WEIGHTS = TERMS, LEFT_CLIP, OPTIONS_LEFT };
static const char *const option_texts[OPTIONS_LEFT] = {
    "label_smoothing", "z_loss", "entropy_coef", "weights", "dual_clip or cispo"};

typedef struct token_sums {
    step_means means;               /* of tokens, each with its weight in the right mean */
    step_means own;                 /* of each rank's own means of documents */
    double tokens, documents, rows; /* supervised tokens; documents and rows with one */
    double all;                     /* tokens, supervised or not */
    double by_token[TOKEN_WAYS];    /* sums of losses */
    double by_document[TOKEN_WAYS]; /* sums of documents' means */
    double by_row;                  /* sum over rows of the mean of documents' means */
    token_group row, replica;       /* the current ones */
    token_groups micro, replicas;
    int64_t dp;                /* number of `replica` */
    double of_row;             /* supervised tokens of the row */
    double zeros, zero_labels; /* sum of losses of targets with id 0; their number */
    double parts, pieces;      /* sum of ranks' own means of documents; count of terms */
    double filled;             /* the same, averaged over ranks with a token of a document */
    double size;               /* weighted sum of the losses' magnitudes */
    double computed;           /* weighted sum of slopes by log-probs or values */
    written logp, old_logp, advantages, reference;
    double unit;           /* the coarsest rounding of its tensors */
    int unknown_documents; /* a row does not say where documents begin */
    int gaps;              /* a rank has no supervised token of some document */
    /* Sums of losses, and of documents' means, as they are without an option */
    double plain_tokens[OPTIONS_LEFT], plain_documents[OPTIONS_LEFT];
    int has_weights;
    double weights;    /* their sum */
    token_part *part;  /* (sp) */
    token_part *ratio; /* (sp) of logp - old_logp, where a document has one ratio */
} token_sums;

/* 0, or -1: no memory. */
static inline int tokens_begin(token_sums *s, const dump_facts *f) {
    memset(s, 0, sizeof *s);
    means_begin(&s->means, f, 1);
    means_begin(&s->own, f, 1);
    s->part = (token_part *)calloc((size_t)f->sp, sizeof *s->part);
    s->ratio = (token_part *)calloc((size_t)f->sp, sizeof *s->ratio);
    return s->part && s->ratio ? 0 : -1;
}

/* For the mistake that each rank divides its part of the document by its own count. */
static inline void tokens_add_parts(token_sums *s, const dump_facts *f, int64_t dp,
                                    int64_t micro) {
    double sum = 0, filled = 0;
    for (int64_t r = 0; r < f->sp; r++) {
        const token_part *p = &s->part[r];
        if (p->count == 0) continue;
        means_add(&s->own, f, dp * f->sp + r, dp, micro, p->sum / p->count, 1);
        sum += p->sum / p->count;
        filled++;
    }
    s->parts += sum;
    s->pieces += filled;
    s->filled += sum / filled;
    s->gaps |= filled < (double)f->sp;
}

/* A critic's loss has no log-probs or advantages: values, old_values and returns are added to
   the accumulators of logp, old_logp and advantages. */
static inline void tokens_add_value_rounding(token_sums *s, const dump_facts *f,
                                             const dump_row *row, int64_t t, double weight) {
    double by = weight * value_slope(f, row, t);
    if (weight == 0) return;
    s->size += by * by / weight / 2;
    s->computed += by;
    written_add(&s->logp, row->unit.values, row->values[t], by);
    written_add(&s->advantages, row->unit.returns, row->returns[t], by);
    if (f->clip_value > 0)
        written_add(&s->old_logp, row->unit.old_values, row->old_values[t], by);
}

/* Adds what roundings of the token's numbers may do to the weighted sum. */
static inline void tokens_add_rounding(token_sums *s, const dump_facts *f, const dump_row *row,
                                       int64_t t, const sequence_ratio *of, double weight) {
    token_slopes by;
    if (f->objective == DUMP_VALUE) {
        tokens_add_value_rounding(s, f, row, t, weight);
        return;
    }
    by = token_slopes_of(f, row, t, of);
    s->size += weight * by.size;
    s->computed += weight * (fabs(by.logp) + fabs(by.old_logp) + fabs(by.reference));
    written_add(&s->logp, row->unit.logp, row->logp[t], weight * by.logp);
    if (f->objective != DUMP_PPO) return;
    written_add(&s->old_logp, row->unit.old_logp, row->old_logp[t], weight * by.old_logp);
    written_add(&s->advantages, row->unit.advantages, row->advantages[t],
                weight * by.advantage);
    if (f->kl_coef > 0)
        written_add(&s->reference, row->unit.ref_logp, row->ref_logp[t], weight * by.reference);
}

/* How far the weighted sum may be off. */
static inline double tokens_rounding(const token_sums *s) {
    double all = square(written_rounding(&s->logp)) + square(written_rounding(&s->old_logp)) +
                 square(written_rounding(&s->advantages)) +
                 square(written_rounding(&s->reference));
    return sqrt(all) + LOGITS_MOST * UNIT_F32 * s->computed +
           added_rounding(s->tokens, s->size);
}

static inline void group_add(token_group *g, const double *sums, double count) {
    for (int way = 0; way < TOKEN_WAYS; way++) g->sums[way] += sums[way];
    g->count += count;
}

static inline void group_end(token_group *g, token_groups *of) {
    if (g->count > 0) {
        for (int way = 0; way < TOKEN_WAYS; way++) of->means[way] += g->sums[way] / g->count;
        of->least = of->filled++ > 0 ? fmin(of->least, g->count) : g->count;
    }
    of->all++;
    memset(g, 0, sizeof *g);
}

/* Ends the row. Rows are ordered by replica, so a new dp first ends the replica before. */
static inline void tokens_end_row(token_sums *s, int64_t dp) {
    if (dp != s->dp) group_end(&s->replica, &s->replicas);
    s->dp = dp;
    group_add(&s->replica, s->row.sums, s->row.count);
    group_end(&s->row, &s->micro);
}

static inline int has_sequence_ratio(const dump_facts *f) {
    return f->objective == DUMP_PPO && f->importance == DUMP_RATIO_OF_SEQUENCE;
}

/* Sums logp - old_logp of the document by rank; returns the sum over all ranks. */
static inline double tokens_add_ratios(token_sums *s, const dump_facts *f, const dump_row *row,
                                       int64_t dp, int64_t begin, int64_t end) {
    double sum = 0;
    memset(s->ratio, 0, (size_t)f->sp * sizeof *s->ratio);
    for (int64_t t = begin; t < end; t++) {
        token_part *p;
        if (!row_supervised(row, t)) continue;
        p = &s->ratio[row->rank[t] - dp * f->sp];
        p->sum += row->logp[t] - row->old_logp[t];
        p->count++;
        sum += row->logp[t] - row->old_logp[t];
    }
    return sum;
}

/* Whether the metadata name a clip that packages may show and not apply. */
static inline int has_another_clip(const dump_facts *f) {
    return f->objective == DUMP_PPO && (f->dual_clip > 0 || f->cispo > 0);
}

/* Adds the options' terms to the token's losses and multiplies them by its weight. Also sums up
   their rounding, and the losses with one option not applied. */
static inline void tokens_weigh(token_sums *s, const dump_facts *f, const dump_row *row,
                                int64_t t, const sequence_ratio *of, double by_row,
                                double count, double *loss) {
    double w = row->weights ? row->weights[t] : 1, plain[TOKEN_WAYS], terms = 0;
    double of_term[TERMS];
    dump_facts without = *f;
    without.dual_clip = without.cispo = 0;
    for (int i = 0; i < TERMS; i++) {
        double slope;
        terms += of_term[i] = term_loss(f, row, t, i, &slope);
        if (of_term[i] != 0)
            written_add(&s->reference, term_unit(row, i), (*term_of(row, i))[t],
                        by_row * w * slope);
    }
    s->size += by_row * fabs(w * terms);
    for (int way = 0; way < TOKEN_WAYS; way++) loss[way] += terms;
    for (int i = 0; i < TERMS; i++) {
        s->plain_tokens[i] += w * (loss[TOKEN_RIGHT] - of_term[i]);
        s->plain_documents[i] += w * (loss[TOKEN_RIGHT] - of_term[i]) / count;
    }
    s->has_weights |= row->weights != NULL;
    s->weights += w;
    s->plain_tokens[LEFT_WEIGHTS] += loss[TOKEN_RIGHT];
    s->plain_documents[LEFT_WEIGHTS] += loss[TOKEN_RIGHT] / count;
    if (has_another_clip(f)) {
        token_losses(&without, row, t, of, plain);
        s->plain_tokens[LEFT_CLIP] += w * (plain[TOKEN_RIGHT] + terms);
        s->plain_documents[LEFT_CLIP] += w * (plain[TOKEN_RIGHT] + terms) / count;
    }
    tokens_add_rounding(s, f, row, t, of, by_row * fabs(w));
    if (row->weights)
        written_add(&s->advantages, row->unit.weights, w, by_row * loss[TOKEN_RIGHT]);
    for (int way = 0; way < TOKEN_WAYS; way++) loss[way] *= w;
}

/* Adds the document of tokens begin to end; returns its mean. count: its supervised tokens. One
   pass fills the sums of all reductions, because a mistake may be another reduction. */
static inline double tokens_add_document(token_sums *s, const dump_facts *f,
                                         const dump_row *row, int64_t dp, int64_t micro,
                                         int64_t begin, int64_t end, double count) {
    double sums[TOKEN_WAYS] = {0}, loss[TOKEN_WAYS];
    double weight = f->reduction == DUMP_BY_SEQUENCE ? 1 / count : 1;
    double by_row = f->reduction == DUMP_BY_MICRO ? 1 / s->of_row : weight, ratio = 0;
    int of_sequence = has_sequence_ratio(f);
    memset(s->part, 0, (size_t)f->sp * sizeof *s->part);
    if (of_sequence) ratio = tokens_add_ratios(s, f, row, dp, begin, end);
    for (int64_t t = begin; t < end; t++) {
        sequence_ratio of = {.whole = ratio / count};
        token_part *p;
        if (!row_supervised(row, t)) continue;
        p = &s->ratio[row->rank[t] - dp * f->sp];
        of.part = p->sum / p->count;
        of.share = p->sum / count;
        token_losses(f, row, t, of_sequence ? &of : NULL, loss);
        tokens_weigh(s, f, row, t, of_sequence ? &of : NULL, by_row, count, loss);
        for (int way = 0; way < TOKEN_WAYS; way++) sums[way] += loss[way];
        means_add(&s->means, f, row->rank[t], dp, micro, loss[0], weight);
        p = &s->part[row->rank[t] - dp * f->sp];
        p->sum += loss[0];
        p->count++;
        if (row->labels[t] == 0) s->zeros += loss[0];
        s->zero_labels += row->labels[t] == 0;
    }
    for (int way = 0; way < TOKEN_WAYS; way++) {
        s->by_token[way] += sums[way];
        s->by_document[way] += sums[way] / count;
    }
    s->tokens += count;
    group_add(&s->row, sums, count);
    tokens_add_parts(s, f, dp, micro);
    return sums[TOKEN_RIGHT] / count;
}

/* A row without cu_seqlens counts as one document. A document without a supervised token has no
   mean, so it is skipped. */
static inline void tokens_add_row(token_sums *s, const dump_facts *f, const dump_row *row,
                                  int64_t dp, int64_t micro) {
    int64_t docs = row->docs ? row->docs : 1;
    double means = 0, documents = 0;
    s->of_row = 0;
    for (int64_t t = 0; t < row_end(row); t++) s->of_row += row_supervised(row, t);
    for (int64_t i = 0; i < docs; i++) {
        int64_t begin = row->docs ? row->cu_seqlens[i] : 0;
        int64_t end = row->docs ? row->cu_seqlens[i + 1] : row->tokens;
        double count = 0;
        for (int64_t t = begin; t < end; t++) count += row_supervised(row, t);
        if (count == 0) continue;
        means += tokens_add_document(s, f, row, dp, micro, begin, end, count);
        documents++;
    }
    tokens_end_row(s, dp);
    s->all += (double)row->tokens;
    s->unknown_documents |= !row->docs;
    s->documents += documents;
    s->by_row += documents > 0 ? means / documents : 0;
    s->rows += documents > 0;
    s->unit = fmax(s->unit, row->unit.logp);
    if (f->objective == DUMP_VALUE)
        s->unit = fmax(s->unit, fmax(row->unit.values, row->unit.returns));
    if (f->objective != DUMP_PPO) return;
    s->unit = fmax(s->unit, fmax(row->unit.old_logp, row->unit.advantages));
    if (f->kl_coef > 0) s->unit = fmax(s->unit, row->unit.ref_logp);
}

/* ---- the right loss, and that of mistakes ---- */

static inline double tokens_mean(const token_sums *s, const dump_facts *f, int way) {
    switch (f->reduction) {
    case DUMP_BY_SEQUENCE: return s->by_document[way] / s->documents;
    case DUMP_BY_CONSTANT: return s->by_token[way] / f->reduction_constant;
    case DUMP_BY_MICRO: return s->micro.means[way] / s->micro.all;
    case DUMP_BY_REPLICA: return s->replicas.means[way] / s->replicas.all;
    default: return s->by_token[way] / s->tokens;
    }
}

/* The divisor of the weighted sums and of their rounding. Rows are added before their replica's
   count is known; the least count of all replicas makes the rounding an upper bound. */
static inline double tokens_divisor(const token_sums *s, const dump_facts *f) {
    switch (f->reduction) {
    case DUMP_BY_SEQUENCE: return s->documents;
    case DUMP_BY_CONSTANT: return f->reduction_constant;
    case DUMP_BY_MICRO: return s->micro.all;
    case DUMP_BY_REPLICA: return s->replicas.least * s->replicas.all;
    default: return s->tokens;
    }
}

/* Marks a mean over groups as one by design, and accepts it also without the groups that have
   no token, which some frameworks leave out. */
static inline void tokens_accept_filled(const token_sums *s, answers *a, const dump_facts *f) {
    int micro = f->reduction == DUMP_BY_MICRO;
    const token_groups *g = micro ? &s->micro : &s->replicas;
    if (!micro && f->reduction != DUMP_BY_REPLICA) return;
    a->design = micro ? "a mean of micro-batches' means is what the metadata say: it depends "
                        "on how the batch is cut, so N ranks and one rank differ by design"
                      : "a mean of replicas' means is what the metadata say: it depends on "
                        "how the batch is cut, so N ranks and one rank differ by design";
    if (g->filled < g->all)
        answers_accept(a, g->means[TOKEN_RIGHT] / g->filled,
                       "groups without a supervised token are left out: no mistake");
}

/* The mean over ranks, or their micro-batches, of each one's own mean over documents. */
static inline void tokens_add_own(const token_sums *s, answers *a, int grouping,
                                  const char *how) {
    const law *own = &s->own.by[grouping];
    if (!own->groups) return;
    answers_add(a, "sequence_counts_local", law_mean(own, MEAN_OF_MEANS, 0), how);
    answers_add(a, "sequence_counts_local", law_mean(own, MEAN_OF_NON_EMPTY, 0), how);
}

/* Means over documents where the right one is over tokens, and the reverse. With sp 1 a rank
   has whole documents, so its own counts are no mistake. */
static inline void tokens_add_means(const token_sums *s, answers *a, const dump_facts *f) {
    double several = f->sp > 1 ? 1 : NAN;
    if (f->reduction != DUMP_BY_TOKEN)
        answers_add(a, "mean_over_tokens", s->by_token[TOKEN_RIGHT] / s->tokens, NULL);
    if (s->unknown_documents) return;
    if (f->reduction != DUMP_BY_SEQUENCE) {
        answers_add(a, "mean_over_sequences", s->by_document[TOKEN_RIGHT] / s->documents, NULL);
        answers_add(a, "mean_over_sequences", s->by_row / s->rows,
                    "of each row, and then the mean of rows");
    }
    if (f->reduction == DUMP_BY_SEQUENCE)
        answers_add(a, "row_taken_for_sequence", s->micro.means[TOKEN_RIGHT] / s->micro.all,
                    NULL);
    answers_add(a, "sequence_counts_local", several * s->parts / s->documents,
                "added over ranks");
    answers_add(a, "sequence_counts_local", several * s->parts / s->documents / (double)f->sp,
                "averaged over ranks");
    answers_add(a, "sequence_counts_local", several * s->filled / s->documents,
                "averaged over the ranks that have a token of the document");
    answers_add(a, "sequence_counts_local", several * s->parts / s->pieces,
                "averaged over documents and ranks together");
    if (f->sp == 1) return;
    tokens_add_own(s, a, BY_RANK, "the mean over ranks of each one's mean over documents");
    tokens_add_own(s, a, BY_RANK_MICRO,
                   "the mean over ranks' micro-batches of each one's mean over documents");
}

/* Whether the mean of ranks' own means is the right one here. */
static inline int tokens_means_hidden(const token_sums *s, const answers *a, const law *l) {
    const law *of_micro = &s->means.by[BY_RANK_MICRO];
    const law *means = of_micro->groups ? of_micro : &s->means.by[BY_RANK];
    return means->groups <= 1 || law_equal(l, law_mean(means, MEAN_OF_MEANS, 0), a->right);
}

/* Whether ranks' own means of documents, added or averaged, give the right loss here. */
static inline int tokens_parts_hidden(const token_sums *s, const answers *a, const law *l) {
    return law_equal(l, s->parts / s->documents, a->right) &&
           law_equal(l, s->filled / s->documents, a->right);
}

/* For constant, micro and replica: whether the mean over all tokens, or that of ranks' own
   means, is the right one here. */
static inline int tokens_groups_hidden(const token_sums *s, const answers *a, const law *l,
                                       int64_t sp) {
    const law *ranks = &s->means.by[BY_RANK_MICRO];
    double tokens = s->by_token[TOKEN_RIGHT] / s->tokens;
    double means = sp > 1 && ranks->groups ? law_mean(ranks, MEAN_OF_MEANS, 0) : NAN;
    return law_equal(l, tokens, a->right) || law_equal(l, means, a->right);
}

/* tokens_vacuous, for DUMP_BY_SEQUENCE. */
static inline const char *tokens_documents_vacuous(const token_sums *s, const answers *a,
                                                   const law *l, const dump_facts *f) {
    if (means_are_hidden(&s->means, l, a->right)) return means_hidden_text;
    if (f->sp > 1 && tokens_parts_hidden(s, a, l))
        return "documents' means by each rank's own counts are the same here; give a step with "
               "documents that several ranks hold, in parts of unequal means";
    return f->world * f->accumulation == 1 && !answers_show(a, l, NULL)
               ? "all known mistakes give the same here; give a step with several documents of "
                 "unequal lengths and losses"
               : NULL;
}

/* Why a right number proves nothing; NULL: it proves something. The same for all objectives:
   what equal counts hide does not depend on the loss of a token. */
static inline const char *tokens_vacuous(const token_sums *s, const answers *a, const law *l,
                                         const dump_facts *f) {
    if (f->reduction == DUMP_BY_TOKEN)
        return tokens_means_hidden(s, a, l)
                   ? "a mean of means is the same here; give a step whose ranks or "
                     "micro-batches have unequal counts and losses"
                   : NULL;
    if (f->reduction >= DUMP_BY_CONSTANT)
        return tokens_groups_hidden(s, a, l, f->reduction == DUMP_BY_CONSTANT ? 1 : f->sp)
                   ? "the mean over tokens, or of ranks, is the same here; give a step whose "
                     "ranks and micro-batches have unequal counts and losses"
                   : NULL;
    return tokens_documents_vacuous(s, a, l, f);
}

static inline void tokens_free(token_sums *s) {
    free(s->part);
    free(s->ratio);
    written_free(&s->logp);
    written_free(&s->old_logp);
    written_free(&s->advantages);
    written_free(&s->reference);
}

/* Sum of the magnitudes of the sums of ranks' micro-batches: a framework may round each before
   it adds them. */
static inline double tokens_parts_size(const token_sums *s) {
    const law *by = &s->means.by[BY_RANK_MICRO];
    double size = 0;
    if (!by->groups) return s->size;
    for (int64_t g = 0; g < by->groups; g++) size += fabs(by->sums[g]);
    return size;
}

/* The mistake that targets of id 0 are taken for padding. */
static inline void tokens_add_zero(const token_sums *s, answers *a, const dump_facts *f) {
    double others = s->by_token[TOKEN_RIGHT] - s->zeros;
    if (f->reduction != DUMP_BY_TOKEN || s->zero_labels == 0) return;
    answers_add(a, "token_zero_ignored", others / (s->tokens - s->zero_labels), NULL);
    answers_add(a, "token_zero_ignored", others / s->tokens, "they count all the same");
}

static inline void tokens_add_options(const token_sums *s, answers *a, const dump_facts *f) {
    int has[OPTIONS_LEFT];
    for (int i = 0; i < TERMS; i++) has[i] = term_factor(f, i) > 0;
    has[LEFT_WEIGHTS] = s->has_weights;
    has[LEFT_CLIP] = has_another_clip(f);
    for (int i = 0; i < OPTIONS_LEFT; i++)
        if (has[i] && f->reduction <= DUMP_BY_SEQUENCE)
            answers_add(a, "option_not_applied",
                        f->reduction == DUMP_BY_TOKEN ? s->plain_tokens[i] / s->tokens
                                                      : s->plain_documents[i] / s->documents,
                        option_texts[i]);
}

/* The right loss, its rounding and what each mistake gives. The last replica ends here, because
   no row of another replica follows it. */
static inline void tokens_answers(token_sums *s, answers *a, const dump_facts *f) {
    double count;
    if (s->replica.count > 0 || s->replicas.all < (double)(f->world / f->sp))
        group_end(&s->replica, &s->replicas);
    count = tokens_divisor(s, f);
    memset(a, 0, sizeof *a);
    a->right = s->tokens > 0 ? tokens_mean(s, f, TOKEN_RIGHT) : NAN;
    a->slack = tokens_rounding(s) / count;
    a->size = s->size / count;
    a->parts = tokens_parts_size(s) / (f->reduction >= DUMP_BY_MICRO ? s->tokens : count);
    a->low_precision = s->unit > NARROW;
    a->unknown = "way to divide these sums";
    if (f->reduction >= DUMP_BY_MICRO)
        snprintf(a->what, sizeof a->what, "the means of %.0f %s",
                 f->reduction == DUMP_BY_MICRO ? s->micro.all : s->replicas.all,
                 f->reduction == DUMP_BY_MICRO ? "micro-batches" : "replicas");
    else
        snprintf(a->what, sizeof a->what, "the sums %.9g over the counts %.9g",
                 a->right * count, count);
    tokens_accept_filled(s, a, f);
    answers_accept(a, tokens_mean(s, f, TOKEN_KL_CUT), token_ways[TOKEN_KL_CUT].how);
    tokens_add_options(s, a, f);
    for (int way = 0; way < TOKEN_WAYS; way++)
        if (token_ways[way].name)
            answers_add(a, token_ways[way].name, tokens_mean(s, f, way), token_ways[way].how);
    tokens_add_means(s, a, f);
    tokens_add_zero(s, a, f);
    for (int i = 0; i < GROUPINGS; i++) {
        s->means.by[i].all_tokens = f->reduction == DUMP_BY_TOKEN ? s->all : 0;
        s->means.by[i].shares = f->reduction == DUMP_BY_SEQUENCE && i <= BY_RANK;
    }
}

/* The mean over micro-batches of their sums divided by the rank's own counts. whole: sums are
   over all ranks, else over the ranks of the sequence. */
static inline double tokens_local_counts(const law *by, const dump_facts *f, int64_t rank,
                                         int whole) {
    int64_t first = whole ? 0 : rank / f->sp * f->sp;
    int64_t last = whole ? f->world : first + f->sp;
    double mean = 0;
    for (int64_t a = 0; a < f->accumulation; a++) {
        double sum = 0;
        for (int64_t r = first; r < last; r++) sum += by->sums[a * f->world + r];
        mean += sum / by->counts[a * f->world + rank] / (double)f->accumulation;
    }
    return mean;
}

/* law.h divides only the sum of the whole step by a local count. Here each micro-batch's sum is
   divided by a local count. */
static inline void tokens_name_local_counts(const token_sums *s, const law *l, const answers *a,
                                            int64_t rank, const dump_facts *f, verdict *v) {
    const law *by = &s->means.by[BY_RANK_MICRO];
    if (!by->groups || f->world == 1 || f->reduction == DUMP_BY_SEQUENCE) return;
    for (int whole = 0; whole < 2; whole++) {
        double own = tokens_local_counts(by, f, rank, whole), mean = 0;
        for (int64_t r = 0; r < f->world; r++)
            mean += tokens_local_counts(by, f, r, whole) / (double)f->world;
        for (int averaged = 0; averaged < 2; averaged++) {
            double x = averaged ? mean : own;
            if (!law_equal(l, l->got, x) || !answer_shows(l, x, a->right)) continue;
            verdict_name(v, mistake_named("local_count"));
            verdict_say(v,
                        "local_count: of each micro-batch, the sum of %s over the rank's "
                        "own count%s",
                        whole ? "all ranks" : "the sequence's ranks",
                        averaged ? ", averaged over ranks" : "");
        }
    }
}

/* ---- where no known mistake gives the number ---- */

/* The sum of all losses over a count that is not that of this step's labels. */
static inline void tokens_name_divisor(const token_sums *s, const law *l, const answers *a,
                                       const dump_facts *f, verdict *v) {
    law_counts counts = {s->tokens, s->all, f->sp, f->world / f->sp, f->accumulation};
    double by = s->tokens * a->right / l->got, off = by * law_limit(l, l->got) / fabs(l->got);
    if (f->reduction == DUMP_BY_TOKEN) law_name_count(&counts, law_whole(&counts, by, off), v);
}

/* A mean over another number of micro-batches than the step has; over 1: their sum. */
static inline void tokens_name_window(const token_sums *s, const law *l, const answers *a,
                                      const dump_facts *f, verdict *v) {
    static const int groupings[] = {BY_REPLICA_MICRO, BY_RANK_MICRO, -1};
    for (int i = 0; i < 3 && !v->count && f->accumulation > 1; i++) {
        const law *by = groupings[i] < 0 ? NULL : &s->means.by[groupings[i]];
        double mean = !by ? a->right : by->groups ? law_mean(by, MEAN_OF_MEANS, 0) : NAN;
        for (int64_t n = by ? 1 : 2; n <= 2 * f->accumulation && !v->count; n++) {
            if (n == f->accumulation ||
                !law_equal(l, l->got, mean * (double)f->accumulation / (double)n))
                continue;
            if (by) verdict_name(v, mistake_named(n == 1 ? "sum_of_means" : "mean_of_means"));
            if (n > 1) verdict_name(v, mistake_named("another_window"));
            v->all = by && n > 1;
            verdict_say(v,
                        "the means of %s, summed over %lld micro-batches and divided by %lld",
                        by ? grouping_names[groupings[i]] : "tokens",
                        (long long)f->accumulation, (long long)n);
        }
    }
}

/* Whether the number is right by another reduction, which a metadata could say. */
static inline void tokens_say_reduction(const token_sums *s, const law *l, const dump_facts *f,
                                        verdict *v) {
    static const int reductions[] = {DUMP_BY_TOKEN, DUMP_BY_SEQUENCE, DUMP_BY_MICRO,
                                     DUMP_BY_REPLICA};
    for (int i = 0; i < 4; i++) {
        dump_facts other = *f;
        other.reduction = reductions[i];
        if (reductions[i] == f->reduction ||
            (reductions[i] == DUMP_BY_SEQUENCE && s->unknown_documents) ||
            !law_equal(l, l->got, tokens_mean(s, &other, TOKEN_RIGHT)))
            continue;
        verdict_say(v,
                    "it is what reduction %s gives: if that is meant, write it into the "
                    "metadata",
                    word_facts[FACT_REDUCTION].words[reductions[i]]);
    }
}

/* Whether the number is right by the sum of the weights instead of the count of tokens; says how
   the metadata name that. */
static inline int tokens_say_weights(const token_sums *s, const law *l, verdict *v) {
    if (!s->has_weights || !law_equal(l, l->got, s->by_token[TOKEN_RIGHT] / s->weights))
        return 0;
    verdict_say(v,
                "it is the sum of all tokens over the sum of their weights, %.9g: if that is "
                "meant, write reduction constant and reduction_constant %.9g into the metadata",
                s->weights, s->weights);
    return 1;
}

static inline void tokens_name_rest(const token_sums *s, const law *l, const answers *a,
                                    const dump_facts *f, verdict *v) {
    if (!v->count) tokens_name_window(s, l, a, f, v);
    if (!v->count && !tokens_say_weights(s, l, v)) tokens_name_divisor(s, l, a, f, v);
    tokens_say_reduction(s, l, f, v);
}

/* Names a rank's own mean over documents; law.h names a rank's own mean over tokens. */
static inline void tokens_name_own(const token_sums *s, const law *l, const answers *a,
                                   int64_t rank, const dump_facts *f, verdict *v) {
    tokens_name_local_counts(s, l, a, rank, f, v);
    if (f->reduction != DUMP_BY_SEQUENCE) return;
    for (int i = BY_RANK_MICRO; i <= BY_RANK; i++)
        for (int64_t g = rank; g < s->own.by[i].groups; g += f->world) {
            double own = s->own.by[i].sums[g] / s->own.by[i].counts[g];
            if (law_equal(l, l->got, own) && answer_shows(l, own, a->right))
                verdict_name(v, mistake_named("own_mean_alone"));
        }
    if (isnan(l->got) && s->gaps) verdict_name(v, mistake_named("nan_of_an_empty_rank"));
}
#endif
