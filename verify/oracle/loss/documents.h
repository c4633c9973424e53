/* SPDX-License-Identifier: MIT OR Unlicense */
/* documents.h - inputs of losses that are computed per document: for all documents of the step,
 * the sums over each rank's part of the document. */
#ifndef ORACLE_DOCUMENTS_H
#define ORACLE_DOCUMENTS_H
#include "policy.h"

/* One rank's part of a document. */
typedef struct document_part {
    double policy, reference; /* sums of log-probs over supervised tokens */
    double tokens;            /* number of supervised tokens */
    double low, high;         /* least and greatest of their advantages */
    double value;             /* at the rank's last token of the document */
    int held;                 /* whether the rank has a token of the document */
} document_part;

/* Tokens whose value is taken as a document's score; all but SCORE_RIGHT are mistakes. */
enum {
    SCORE_RIGHT,
    SCORE_RANK_END,
    SCORE_FIRST,
    SCORE_ROW_END,
    SCORE_ROW_END_PADDED,
    SCORE_PADDING,
    SCORE_GATHERED,
    SCORES
};

typedef struct document {
    int64_t dp, micro, number;     /* replica and micro-batch of its row, index in the row */
    int64_t tokens, labels;        /* number of all tokens, of supervised tokens */
    int64_t last_rank, last_local; /* rank and local row of its last token; -1: no rank */
    int64_t group;
    double score, desirable, kl, reward, margin;
    document_part gathered;         /* sums, if the row is gathered in rank order, then cut */
    double reference_from[SOURCES]; /* sum of ref_logp of wrong tokens, by source (policy.h) */
    double zeros, zero_labels;      /* policy - reference at targets with id 0; their number */
    double rounding;                /* sum of squared roundings of policy - reference */
    double values[SCORES];
} document;

typedef struct step_documents {
    document *of;        /* (count) */
    document_part *part; /* (count, sp) */
    int64_t count, room, sp;
    struct { /* relative rounding: the largest of all rows */
        double logp, values, scores, kl, rewards, advantages;
    } unit;
    int has_scores, has_values, has_groups; /* all rows have them */
    int odd;                                /* the last document of some row has no pair */
} step_documents;

static inline void documents_begin(step_documents *s, int64_t sp) {
    memset(s, 0, sizeof *s);
    s->sp = sp;
    s->has_scores = s->has_values = s->has_groups = 1;
}

static inline void documents_free(step_documents *s) {
    free(s->of);
    free(s->part);
}

/* 0, or -1: no memory. */
static inline int documents_grow(step_documents *s, int64_t more) {
    int64_t room = s->count + more;
    document *of;
    document_part *part;
    if (room <= s->room) return 0;
    if (room < 2 * s->room) room = 2 * s->room;
    of = (document *)realloc(s->of, (size_t)room * sizeof *of);
    if (of) s->of = of;
    part = of ? (document_part *)realloc(s->part, (size_t)(room * s->sp) * sizeof *part) : NULL;
    if (!part) return -1;
    s->part = part;
    s->room = room;
    return 0;
}

static inline double number_of(const double *x, int64_t i) { return x ? x[i] : NAN; }

/* Adds a supervised token to the right sums and to those of mistakes. */
static inline void document_add_token(document *o, document_part *p, const dump_row *row,
                                      int64_t t) {
    double advantage = number_of(row->advantages, t);
    p->policy += number_of(row->logp, t);
    p->reference += number_of(row->ref_logp, t);
    if (!p->tokens || isnan(advantage)) p->low = p->high = advantage; /* NaN stays */
    if (advantage < p->low) p->low = advantage;
    if (advantage > p->high) p->high = advantage;
    p->tokens++;
    o->labels++;
    if (row->labels[t] == 0) {
        o->zeros += number_of(row->logp, t) - (row->ref_logp ? row->ref_logp[t] : 0);
        o->zero_labels++;
    }
    for (int source = 0; source < SOURCES; source++) {
        int64_t from = row_source(row, source, t);
        o->reference_from[source] += from < 0 ? NAN : number_of(row->ref_logp, from);
    }
}

static inline double value_at(const dump_row *row, int64_t t) {
    return t < 0 || row->rank[t] < 0 ? NAN : row->values[t];
}

/* Fills the values that a trainer may take as the document's score. */
static inline void document_values(document *o, const document_part *part, int64_t sp,
                                   const dump_row *row, int64_t begin, int64_t end) {
    int64_t padded = row->tokens - 1;
    if (!row->values || end == begin) return;
    o->values[SCORE_RIGHT] = value_at(row, end - 1);
    for (int64_t r = 0; r < sp; r++)
        if (part[r].held) o->values[SCORE_RANK_END] = part[r].value;
    o->values[SCORE_FIRST] = value_at(row, begin);
    o->values[SCORE_ROW_END] = value_at(row, row_end(row) - 1);
    o->values[SCORE_ROW_END_PADDED] = value_at(row, padded);
    o->values[SCORE_PADDING] = value_at(row, o->number == row->docs - 1 ? padded : end - 1);
    o->values[SCORE_GATHERED] = value_at(row, row->order[end - 1]);
}

/* Keeps the value of the rank's last token of the document. A rank may hold tokens in another
   order than the row: its last token is the one with the highest local row. */
static inline void document_add_value(document_part *p, int64_t *last_local,
                                      const dump_row *row, int64_t t) {
    if (p->held && *last_local > row->local[t]) return;
    p->held = 1;
    p->value = number_of(row->values, t);
    *last_local = row->local[t];
}

/* Sum of squared roundings of policy - reference: of written numbers, and of log-probs computed
   in float32 in another order (roundings.h). room: scratch space for the document's tokens. */
static inline double document_rounding(const dump_row *row, int64_t begin, int64_t end,
                                       double *room) {
    const double *each[] = {row->logp, row->ref_logp};
    const double unit[] = {row->unit.logp, row->unit.ref_logp};
    double squares = 0;
    for (int i = 0; i < 2; i++) {
        int64_t n = 0;
        for (int64_t t = begin; each[i] && t < end; t++)
            if (row_supervised(row, t)) room[n++] = each[i][t];
        squares += sum_squares(room, n, unit[i]) + (double)n * square(LOGITS_MOST * UNIT_F32);
    }
    return squares;
}

/* last_local: (sp), scratch space. */
static inline void document_fill(document *o, document_part *part, int64_t sp,
                                 const dump_row *row, int64_t *last_local) {
    int64_t begin = row->cu_seqlens[o->number], end = row->cu_seqlens[o->number + 1];
    o->tokens = end - begin;
    o->last_rank = end > begin ? row->rank[end - 1] : -1;
    o->last_local = end > begin ? row->local[end - 1] : -1;
    for (int64_t t = begin; t < end; t++) {
        int64_t member = row->rank[t] - o->dp * sp;
        int64_t gathered = row->order[t];
        if (gathered >= 0 && row_supervised(row, gathered)) {
            o->gathered.policy += number_of(row->logp, gathered);
            o->gathered.reference += number_of(row->ref_logp, gathered);
            o->gathered.tokens++;
        }
        if (row->rank[t] < 0) continue;
        document_add_value(&part[member], &last_local[member], row, t);
        if (row_supervised(row, t)) document_add_token(o, &part[member], row, t);
    }
    document_values(o, part, sp, row, begin, end);
}

static inline void documents_note_row(step_documents *s, const dump_row *row) {
    s->has_scores = s->has_scores && row->scores;
    s->has_values = s->has_values && row->values;
    s->has_groups = s->has_groups && row->groups && row->rewards && row->advantages &&
                    row->labels;
    s->unit.logp = fmax(s->unit.logp, fmax(row->unit.logp, row->unit.ref_logp));
    s->unit.values = fmax(s->unit.values, row->unit.values);
    s->unit.scores = fmax(s->unit.scores, row->unit.scores);
    s->unit.kl = fmax(s->unit.kl, row->unit.kl);
    s->unit.rewards = fmax(s->unit.rewards, row->unit.rewards);
    s->unit.advantages = fmax(s->unit.advantages, row->unit.advantages);
}

/* Adds the row's documents. A number that the dump lacks is NaN, so that a loss made of it is
   NaN, too; absent margins and groups are 0. Returns 0, or -1: no memory. */
static inline int documents_add_row(step_documents *s, const dump_row *row, int64_t dp,
                                    int64_t micro) {
    int64_t *last_local = (int64_t *)calloc((size_t)s->sp, sizeof *last_local);
    double *room = (double *)malloc((size_t)(row->tokens + 1) * sizeof *room);
    if (!last_local || !room || documents_grow(s, row->docs)) {
        free(last_local);
        free(room);
        return -1;
    }
    documents_note_row(s, row);
    for (int64_t i = 0; i < row->docs; i++) {
        document *o = &s->of[s->count];
        document_part *part = &s->part[s->count * s->sp];
        memset(o, 0, sizeof *o);
        memset(part, 0, (size_t)s->sp * sizeof *part);
        o->dp = dp;
        o->micro = micro;
        o->number = i;
        o->group = row->groups ? row->groups[i] : 0;
        o->score = number_of(row->scores, i);
        o->desirable = number_of(row->desirable, i);
        o->kl = number_of(row->kl, i);
        o->margin = row->margins ? row->margins[i] : 0;
        o->reward = number_of(row->rewards, i);
        for (int k = 0; k < SCORES; k++) o->values[k] = NAN;
        document_fill(o, part, s->sp, row, last_local);
        o->rounding = document_rounding(row, row->cu_seqlens[i], row->cu_seqlens[i + 1], room);
        s->count++;
        if (i + 1 == row->docs && i % 2 == 0 && o->tokens && (o->labels || !row->labels))
            s->odd = 1;
    }
    free(last_local);
    free(room);
    return 0;
}

/* A document's sums over all ranks. */
static inline document_part document_whole(const step_documents *s, int64_t i) {
    document_part whole = {0};
    for (int64_t r = 0; r < s->sp; r++) {
        whole.policy += s->part[i * s->sp + r].policy;
        whole.reference += s->part[i * s->sp + r].reference;
        whole.tokens += s->part[i * s->sp + r].tokens;
    }
    return whole;
}

/* Whether document i is the first of a pair: documents 2k and 2k + 1 of a row. If neither has a
   token, they are unused slots and no pair. */
static inline int document_begins_pair(const step_documents *s, int64_t i) {
    return s->of[i].number % 2 == 0 && i + 1 < s->count &&
           s->of[i + 1].number == s->of[i].number + 1 &&
           s->of[i].tokens + s->of[i + 1].tokens > 0;
}
#endif
