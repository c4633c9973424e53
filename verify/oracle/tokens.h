/* SPDX-License-Identifier: MIT OR Unlicense */
/* tokens.h - the loss of SFT and PPO from that of each token: the mean over all supervised
 * tokens of the step, or over all documents of their tokens' means. */
#ifndef ORACLE_TOKENS_H
#define ORACLE_TOKENS_H
#include "means.h"
#include "policy.h"

/* A document's losses, or those of its part on one rank. */
typedef struct token_part {
    double sum, count;
} token_part;

typedef struct token_sums {
    step_means means; /* of tokens, each by its weight in the right mean */
    step_means own;   /* of documents' means by each rank's own count */
    double tokens, documents, rows; /* that have a supervised token */
    double all;                     /* tokens, supervised or not */
    double by_token[TOKEN_WAYS];    /* sums of losses */
    double by_document[TOKEN_WAYS]; /* sums of documents' means */
    double by_row;                  /* sum of rows' means over documents */
    double parts, pieces;  /* sum over documents and ranks of their own means; how many */
    double filled;         /* the same, averaged over the ranks that have a token of it */
    double not_zero, of_not_zero; /* losses of tokens whose label is not 0, and how many */
    double size, rounding; /* weighted: |loss|, squares of what rounding may do */
    double unit;           /* the coarsest of the numbers in it */
    int unknown_documents; /* a row does not say where documents begin */
    int gaps;              /* a rank has no supervised token of some document */
    token_part *part;      /* (sp) */
} token_sums;

/* 0, or -1: no memory. */
static inline int tokens_begin(token_sums *s, const dump_facts *f) {
    memset(s, 0, sizeof *s);
    means_begin(&s->means, f, 1);
    means_begin(&s->own, f, 1);
    s->part = (token_part *)calloc((size_t)f->sp, sizeof *s->part);
    return s->part ? 0 : -1;
}

/* Each rank divides its part of the document by its own count. */
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

/* Tokens begin to end, a document. Returns its mean; count: its supervised tokens. */
static inline double tokens_add_document(token_sums *s, const dump_facts *f,
                                         const dump_row *row, int64_t dp, int64_t micro,
                                         int64_t begin, int64_t end, double count) {
    double sums[TOKEN_WAYS] = {0}, loss[TOKEN_WAYS];
    double weight = f->reduction == DUMP_BY_SEQUENCE ? 1 / count : 1;
    memset(s->part, 0, (size_t)f->sp * sizeof *s->part);
    for (int64_t t = begin; t < end; t++) {
        double rounding;
        token_part *p;
        if (!row_supervised(row, t)) continue;
        rounding = weight * token_losses(f, row, t, loss);
        for (int way = 0; way < TOKEN_WAYS; way++) sums[way] += loss[way];
        means_add(&s->means, f, row->rank[t], dp, micro, loss[0], weight);
        p = &s->part[row->rank[t] - dp * f->sp];
        p->sum += loss[0];
        p->count++;
        s->not_zero += row->labels[t] ? loss[0] : 0;
        s->of_not_zero += row->labels[t] != 0;
        s->size += weight * fabs(loss[0]);
        s->rounding += rounding * rounding;
    }
    for (int way = 0; way < TOKEN_WAYS; way++) {
        s->by_token[way] += sums[way];
        s->by_document[way] += sums[way] / count;
    }
    s->tokens += count;
    tokens_add_parts(s, f, dp, micro);
    return sums[TOKEN_RIGHT] / count;
}

static inline void tokens_add_row(token_sums *s, const dump_facts *f, const dump_row *row,
                                  int64_t dp, int64_t micro) {
    int64_t docs = row->docs ? row->docs : 1;
    double means = 0, documents = 0;
    for (int64_t i = 0; i < docs; i++) {
        int64_t begin = row->docs ? row->cu_seqlens[i] : 0;
        int64_t end = row->docs ? row->cu_seqlens[i + 1] : row->tokens;
        double count = 0;
        for (int64_t t = begin; t < end; t++) count += row_supervised(row, t);
        if (count == 0) continue;
        means += tokens_add_document(s, f, row, dp, micro, begin, end, count);
        documents++;
    }
    s->all += (double)row->tokens;
    s->unknown_documents |= !row->docs;
    s->documents += documents;
    s->by_row += documents > 0 ? means / documents : 0;
    s->rows += documents > 0;
    s->unit = fmax(s->unit, row->unit.logp);
    if (f->objective != DUMP_PPO) return;
    s->unit = fmax(s->unit, fmax(row->unit.old_logp, row->unit.advantages));
    if (f->kl_coef > 0) s->unit = fmax(s->unit, row->unit.ref_logp);
}

/* ---- what mistakes make of it ---- */

static inline double tokens_mean(const token_sums *s, int64_t reduction, int way) {
    return reduction == DUMP_BY_SEQUENCE ? s->by_document[way] / s->documents
                                         : s->by_token[way] / s->tokens;
}

/* The mean over ranks, or their micro-batches, of each one's own mean over documents. */
static inline void tokens_add_own(const token_sums *s, answers *a, int grouping,
                                  const char *how) {
    const law *own = &s->own.by[grouping];
    if (!own->groups) return;
    answers_add(a, "sequence_counts_local", law_mean(own, MEAN_OF_MEANS, 0), how);
    answers_add(a, "sequence_counts_local", law_mean(own, MEAN_OF_NON_EMPTY, 0), how);
}

/* Means that are of documents where tokens are meant, or the reverse. One rank has all of every
   document, so that its own counts are the whole ones. */
static inline void tokens_add_means(const token_sums *s, answers *a, const dump_facts *f) {
    double several = f->sp > 1 ? 1 : NAN;
    if (s->unknown_documents) return;
    if (f->reduction == DUMP_BY_SEQUENCE) {
        answers_add(a, "mean_over_tokens", s->by_token[TOKEN_RIGHT] / s->tokens, NULL);
    } else {
        answers_add(a, "mean_over_sequences", s->by_document[TOKEN_RIGHT] / s->documents,
                    NULL);
        answers_add(a, "mean_over_sequences", s->by_row / s->rows,
                    "of each row, and then the mean of rows");
    }
    answers_add(a, "sequence_counts_local", several * s->parts / s->documents,
                "added over ranks");
    answers_add(a, "sequence_counts_local",
                several * s->parts / s->documents / (double)f->sp, "averaged over ranks");
    answers_add(a, "sequence_counts_local", several * s->filled / s->documents,
                "averaged over the ranks that have a token of the document");
    answers_add(a, "sequence_counts_local", several * s->parts / s->pieces,
                "averaged over documents and ranks together");
    if (f->sp == 1) return;
    tokens_add_own(s, a, BY_RANK, "the mean over ranks of each one's mean over documents");
    tokens_add_own(s, a, BY_RANK_MICRO,
                   "the mean over ranks' micro-batches of each one's mean over documents");
}

/* Whether a mean of means, and what mean a rank takes of documents, is the right one here. */
static inline int tokens_means_hidden(const token_sums *s, const answers *a, const law *l,
                                      int64_t reduction) {
    int grouping = reduction == DUMP_BY_SEQUENCE         ? BY_REPLICA_MICRO
                   : s->means.by[BY_RANK_MICRO].groups ? BY_RANK_MICRO
                                                       : BY_RANK;
    const law *means = &s->means.by[grouping];
    return means->groups <= 1 || law_equal(l, law_mean(means, MEAN_OF_MEANS, 0), a->right);
}

/* Whether no document's parts have other means than the document. */
static inline int tokens_parts_hidden(const token_sums *s, const answers *a, const law *l) {
    return law_equal(l, s->parts / s->documents, a->right) &&
           law_equal(l, s->filled / s->documents, a->right);
}

static inline const char *tokens_vacuous(const token_sums *s, const answers *a, const law *l,
                                         const dump_facts *f) {
    int hidden = tokens_means_hidden(s, a, l, f->reduction);
    if (f->objective == DUMP_SFT && f->reduction == DUMP_BY_TOKEN)
        return hidden ? "a mean of means is the same here; give a step whose ranks or "
                        "micro-batches have unequal counts and losses"
                      : NULL;
    if (f->objective == DUMP_SFT && f->sp > 1)
        return tokens_parts_hidden(s, a, l)
                   ? "documents' means by each rank's own counts are the same here; give a "
                     "step with documents that several ranks hold, in parts of unequal means"
                   : NULL;
    return hidden && !answers_show(a, l, NULL)
               ? "all known mistakes give the same here; give a step with several documents of "
                 "unequal lengths and losses"
               : NULL;
}

/* Targets of id 0 are taken for padding. */
static inline void tokens_add_zero(const token_sums *s, answers *a, const dump_facts *f) {
    if (f->reduction != DUMP_BY_TOKEN || s->of_not_zero == s->tokens) return;
    answers_add(a, "token_zero_lost", s->not_zero / s->of_not_zero, NULL);
    answers_add(a, "token_zero_lost", s->not_zero / s->tokens, "they count all the same");
}

/* l: with the tolerance alone, gets the slack. */
static inline void tokens_answers(token_sums *s, answers *a, law *l, const dump_facts *f) {
    double count = f->reduction == DUMP_BY_SEQUENCE ? s->documents : s->tokens;
    memset(a, 0, sizeof *a);
    a->right = tokens_mean(s, f->reduction, TOKEN_RIGHT);
    a->slack = 4 * sqrt(s->rounding) / count;
    if (f->objective == DUMP_PPO) a->slack += 0.1 * l->tolerance * s->size / count;
    a->low_precision = s->unit > 1e-6;
    a->unknown = "way to divide these sums";
    snprintf(a->what, sizeof a->what, "the sums %.9g over the counts %.9g", a->right * count,
             count);
    l->slack = a->slack;
    answers_accept(a, tokens_mean(s, f->reduction, TOKEN_KL_CUT), token_ways[TOKEN_KL_CUT].how);
    for (int way = 0; way < TOKEN_WAYS; way++)
        if (token_ways[way].name)
            answers_add(a, token_ways[way].name, tokens_mean(s, f->reduction, way),
                        token_ways[way].how);
    tokens_add_means(s, a, f);
    tokens_add_zero(s, a, f);
    a->vacuous = tokens_vacuous(s, a, l, f);
    for (int i = 0; i < GROUPINGS; i++) {
        s->means.by[i].all_tokens = f->reduction == DUMP_BY_TOKEN ? s->all : 0;
        s->means.by[i].shares = f->reduction == DUMP_BY_SEQUENCE && i <= BY_RANK;
    }
}

/* What is a rank's own alone, of documents: law has it where tokens are meant. */
static inline void tokens_name_own(const token_sums *s, const law *l, const answers *a,
                                   int64_t rank, const dump_facts *f, verdict *v) {
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
