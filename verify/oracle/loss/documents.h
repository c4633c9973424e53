/* SPDX-License-Identifier: MIT OR Unlicense */
/* documents.h - what the losses of whole documents are made of: each one's sums, by the ranks
 * that hold a part of it, for all documents of the step. */
#ifndef ORACLE_DOCUMENTS_H
#define ORACLE_DOCUMENTS_H
#include "policy.h"

/* A document on one rank. */
typedef struct document_part {
    double policy, reference; /* sums over supervised tokens */
    double tokens;            /* supervised ones */
    double low, high;         /* of their advantages */
    double value;             /* of the rank's last token of it */
    int held;                 /* whether the rank has a token of it */
} document_part;

/* What else may be taken for a document's score. */
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
    int64_t dp, micro, number;     /* its place: row, and which of the row's documents */
    int64_t tokens, labels;        /* all, supervised ones */
    int64_t last_rank, last_local; /* who holds its last token; -1: nobody */
    int64_t group;
    double score, desirable, kl, reward, margin;
    document_part gathered;         /* cut from ranks one behind the other */
    double reference_from[SOURCES]; /* with ref_logp from elsewhere */
    double zeros, zero_labels; /* policy - reference of targets with id 0; how many these are */
    double rounding;           /* squares of what rounding may do to policy - reference */
    double values[SCORES];
} document;

typedef struct step_documents {
    document *of;        /* (count) */
    document_part *part; /* (count, sp) */
    int64_t count, room, sp;
    struct { /* the coarsest of all rows */
        double logp, values, scores, kl, rewards, advantages;
    } unit;
    int has_scores, has_values, has_groups; /* all rows have them */
    int odd;                                /* a row has a document without a partner */
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

/* A supervised token: its log-probs, as policy and reference have it and as it may be taken. */
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

/* The values that may be taken for its score. */
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

/* The rank's last token of the document is that of its last row. */
static inline void document_add_value(document_part *p, int64_t *last_local,
                                      const dump_row *row, int64_t t) {
    if (p->held && *last_local > row->local[t]) return;
    p->held = 1;
    p->value = number_of(row->values, t);
    *last_local = row->local[t];
}

/* Squares of what roundings make of the sum of policy - reference: of numbers as they were
   written, and of log-probs in float32 in another order. room: (tokens) of the document. */
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

/* last_local: (sp), room of the caller's. */
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

/* 0, or -1: no memory. */
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

/* All of a document's ranks together. */
static inline document_part document_whole(const step_documents *s, int64_t i) {
    document_part whole = {0};
    for (int64_t r = 0; r < s->sp; r++) {
        whole.policy += s->part[i * s->sp + r].policy;
        whole.reference += s->part[i * s->sp + r].reference;
        whole.tokens += s->part[i * s->sp + r].tokens;
    }
    return whole;
}

/* The document after it, if they are a pair: documents 2i and 2i + 1 of a row. Pairs of two
   documents without a token are room that was not used. */
static inline int document_begins_pair(const step_documents *s, int64_t i) {
    return s->of[i].number % 2 == 0 && i + 1 < s->count &&
           s->of[i + 1].number == s->of[i].number + 1 &&
           s->of[i].tokens + s->of[i + 1].tokens > 0;
}
#endif
