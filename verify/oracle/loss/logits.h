/* SPDX-License-Identifier: MIT OR Unlicense */
/* logits.h - recomputes log-probs from the dump's logits, token by token: row i of a rank's
 * logits, at the label of the rank's token i. */
#ifndef ORACLE_LOGITS_H
#define ORACLE_LOGITS_H
#include "oracle/verdict/stages.h"

/* Which row of logits and which label a mistake takes for a token's log-prob. */
typedef enum logits_pick {
    PICK_RIGHT,
    PICK_IDS,        /* the token itself is the label */
    PICK_NEXT_LABEL, /* shifted twice: logits of this row, label of the rank's next row */
    PICK_ROW_BEFORE, /* shifted twice: label of this row, logits of the rank's row before */
    PICK_RANK_ORDER, /* logits are concatenated by rank, labels are in the row's order */
    PICKS
} logits_pick;
static const char *const logits_pick_names[PICKS] = {
    NULL, "labels_not_shifted", "labels_shifted_twice", "labels_shifted_twice",
    "gathered_in_rank_order"};

typedef struct logits_check {
    dump *d;
    const dump_row *row;
    int64_t micro, vocab;
    double *logits, *before;  /* (vocab) of the rank's current row, and of the row before */
    double lse, lse_before;   /* log-sum-exp of each */
    double most, most_before; /* largest magnitude of each */
    double unit, logp_unit;   /* relative rounding of a rank's logits, of log-probs */
    double coarsest;          /* the largest unit of all ranks */
    double *logp;             /* (tokens) recomputed, for a dump without log-probs */
    double worst;             /* largest distance, as a multiple of its limit */
    int64_t judged, off[PICKS], shown[PICKS], first, outside;
    double got, want, flat; /* got, want: at `first`; flat: largest range of a row */
    int negative;           /* every log-prob is minus the right one */
} logits_check;

/* ---- the tensor ---- */

/* 0, or -1 with d->error. */
static inline int logits_shape(logits_check *c, int64_t rank,
                               const seqpar_safetensors_tensor *t) {
    const seqpar_safetensors_tensor *index = dump_find(c->d, rank, c->micro, "index");
    int64_t vocab = t->dims >= 2 ? t->shape[t->dims - 1] : 0;
    if (dump_check_row(c->d, rank, index)) return -1;
    if (vocab && t->count == index->count * vocab && (!c->vocab || c->vocab == vocab)) {
        c->vocab = vocab;
        return 0;
    }
    seqpar_fail(&c->d->error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: tensor %s has %lld elements in %d dimensions, and the rank has %lld "
                "tokens; write shape (tokens, vocabulary) with the same vocabulary on every "
                "rank",
                c->d->ranks[rank].path, t->name, (long long)t->count, (int)t->dims,
                (long long)index->count);
    return -1;
}

static inline double logits_lse(const double *x, int64_t n, double *magnitude, double *range) {
    double high = -INFINITY, low = INFINITY, sum = 0;
    for (int64_t i = 0; i < n; i++) {
        high = fmax(high, x[i]);
        if (x[i] > -INFINITY) low = fmin(low, x[i]); /* -Inf: masked out */
        if (isnan(x[i])) high = NAN;
        if (isnan(high)) break;
    }
    for (int64_t i = 0; i < n; i++) sum += exp(x[i] - high);
    *magnitude = isnan(high) ? high : fmax(fabs(high), fabs(low));
    *range = fmax(*range, high - low);
    return high + log(sum);
}

/* 0, or -1 with d->error. */
static inline int logits_read(logits_check *c, int64_t rank, int64_t local,
                              const seqpar_safetensors_tensor *t) {
    seqpar_safetensors_part part = {
        .name = t->name, .first = local * c->vocab, .count = c->vocab};
    double *swap = c->before;
    c->before = c->logits;
    c->logits = swap;
    c->lse_before = c->lse;
    c->most_before = c->most;
    if (seqpar_safetensors_read_f64(c->d->ranks[rank].file, c->logits, &part, &c->d->error))
        return -1;
    c->lse = logits_lse(c->logits, c->vocab, &c->most, &c->flat);
    return 0;
}

/* ---- a token ---- */

/* NAN: there is no such row or label. */
static inline double logits_pick_value(const logits_check *c, int64_t t, logits_pick pick) {
    const dump_row *row = c->row;
    int64_t label = row->labels[t];
    int before = pick == PICK_ROW_BEFORE;
    if (pick == PICK_IDS) label = row->ids ? row->ids[t] : -1;
    if (pick == PICK_NEXT_LABEL) label = row->next[t] < 0 ? -1 : row->labels[row->next[t]];
    if (pick == PICK_RANK_ORDER) label = row->labels[row->gathered[t]];
    if (label < 0 || label >= c->vocab || (before && !row->local[t])) return NAN;
    return before ? c->before[label] - c->lse_before : c->logits[label] - c->lse;
}

/* Rounding limit of a log-prob: logits and log-prob are rounded when they are written, and a
   softmax in fp32 rounds a few times in its sum and logarithm. */
static inline double logits_limit(const logits_check *c, double want, double most) {
    return c->unit * 2 * most + c->logp_unit * fabs(want) + 0x1p-22 * (fabs(want) + most + 4);
}

static inline int logits_are_off(const logits_check *c, double got, double want) {
    return !(fabs(got - want) <= logits_limit(c, want, fmax(c->most, c->most_before)));
}

static inline void logits_compare(logits_check *c, int64_t t) {
    double got = c->row->logp ? c->row->logp[t] : NAN;
    double want = logits_pick_value(c, t, PICK_RIGHT);
    int is_off = logits_are_off(c, got, want);
    double distance;
    if (is_off && !c->off[PICK_RIGHT]) {
        c->first = t;
        c->got = got;
        c->want = want;
    }
    c->judged++;
    c->negative = c->negative && !logits_are_off(c, -got, want);
    distance = fabs(got - want) / logits_limit(c, want, fmax(c->most, c->most_before));
    c->worst = isnan(distance) ? INFINITY : fmax(c->worst, distance);
    c->off[PICK_RIGHT] += is_off;
    for (int pick = PICK_RIGHT + 1; pick < PICKS; pick++) {
        double other = logits_pick_value(c, t, (logits_pick)pick);
        if (isnan(other)) continue; /* what the mistake writes here is not known */
        c->off[pick] += logits_are_off(c, got, other);
        c->shown[pick] += logits_are_off(c, other, want);
    }
}

static inline void logits_token(logits_check *c, int64_t t) {
    int64_t label = c->row->labels[t];
    if (label == DUMP_IGNORE) return;
    if (label < 0 || label >= c->vocab) {
        c->outside++;
        c->first = t;
        return;
    }
    if (c->logp) c->logp[t] = c->logits[label] - c->lse;
    if (c->row->logp) logits_compare(c, t);
}

/* ---- a row ---- */

/* (count) the token of each of the rank's rows; -1: none. NULL: no memory. */
static inline int64_t *logits_tokens(const dump_row *row, int64_t rank, int64_t count) {
    int64_t *token = (int64_t *)malloc((size_t)(count + 1) * sizeof *token);
    for (int64_t i = 0; token && i < count; i++) token[i] = -1;
    for (int64_t t = 0; token && t < row->tokens; t++)
        if (row->rank[t] == rank && row->local[t] < count) token[row->local[t]] = t;
    return token;
}

/* Reads the rank's logits in its own order and holds only two rows, to save memory. The second
   is for the mistake that takes the row before. 0, or -1 with d->error. */
static inline int logits_rank(logits_check *c, int64_t rank) {
    const seqpar_safetensors_tensor *t = dump_find(c->d, rank, c->micro, "logits");
    int64_t count, *token;
    int status = 0;
    if (!t || logits_shape(c, rank, t)) return t ? -1 : 0;
    count = t->count / c->vocab;
    c->most = c->most_before = 0;
    c->unit = t->dtype == SEQPAR_SAFETENSORS_BF16  ? 0x1p-8
              : t->dtype == SEQPAR_SAFETENSORS_F16 ? 0x1p-11
                                                   : 0;
    c->coarsest = fmax(c->coarsest, c->unit);
    token = logits_tokens(c->row, rank, count);
    c->logits = (double *)calloc((size_t)c->vocab, sizeof *c->logits);
    c->before = (double *)calloc((size_t)c->vocab, sizeof *c->before);
    if (!token || !c->logits || !c->before)
        status = seqpar_fail(&c->d->error, SEQPAR_ERR_MEMORY, "no memory for logits");
    for (int64_t i = 0; !status && i < count; i++) {
        status = logits_read(c, rank, i, t);
        if (!status && token[i] >= 0) logits_token(c, token[i]);
    }
    free(token);
    free(c->logits);
    free(c->before);
    c->logits = c->before = NULL;
    return c->d->error.status ? -1 : 0;
}

static inline void logits_say_wrong(const logits_check *c, verdict *v) {
    char place[160];
    for (int pick = PICK_RIGHT + 1; pick < PICKS; pick++)
        if (!c->off[pick] && c->shown[pick])
            verdict_name(v, mistake_named(logits_pick_names[pick]));
    verdict_say(v, "first at %s: log-prob %.9g, the logits give %.9g; %lld of %lld differ",
                place_text(place, sizeof place, c->row, c->first), c->got, c->want,
                (long long)c->off[PICK_RIGHT], (long long)c->judged);
    if (c->negative)
        verdict_say(v, "all are the negatives of what the logits give: losses in the place of "
                       "log-probs");
}

/* Verdict on the dump's log-probs. If each row's logits are all equal, any label fits and a
   match proves nothing. A marginal distance names no mistake. */
static inline void logits_judge(const logits_check *c, stage *s) {
    verdict *v;
    char place[160];
    if (c->outside) {
        v = stage_begin(s, VERDICT_INSUFFICIENT);
        verdict_say(v,
                    "label %lld at %s is outside of logits of %lld entries; give the whole "
                    "vocabulary on every rank",
                    (long long)c->row->labels[c->first],
                    place_text(place, sizeof place, c->row, c->first), (long long)c->vocab);
        return;
    }
    if (!c->judged) return;
    if (c->off[PICK_RIGHT]) {
        v = stage_begin(s, c->worst <= 1.5 ? VERDICT_MARGINAL : VERDICT_WRONG);
        logits_say_wrong(c, v);
        if (v->kind == VERDICT_MARGINAL) v->count = 0;
        return;
    }
    v = stage_begin(s, c->flat > 0 ? VERDICT_RIGHT : VERDICT_INSUFFICIENT);
    if (c->flat > 0)
        verdict_say(v,
                    "%lld log-probs are those of the logits, at most %.2g of what rounding "
                    "may do",
                    (long long)c->judged, c->worst);
    else
        verdict_say(v, "all logits of a token are equal: every label gives the same");
}

/* Relative rounding of log-probs, by the bits of their values: those of a BF16 softmax may be
   written as float32. Fewer than 8 values are too few to tell. */
static inline double logits_logp_unit(const dump_row *row) {
    int64_t labels = 0;
    int bits = 0;
    for (int64_t t = 0; t < row->tokens; t++) {
        if (row->labels[t] == DUMP_IGNORE || row->rank[t] < 0) continue;
        labels++;
        if (bits_needed(row->logp[t]) > bits) bits = bits_needed(row->logp[t]);
    }
    return labels < 8 ? row->unit.logp : fmax(row->unit.logp, ldexp(1, -bits));
}

/* Stage LOGITS. Also fills row->logp if all ranks have logits and none has log-probs. 0, or -1
   with d->error. */
static inline int check_logits(stage *s, dump *d, dump_row *row, int64_t dp, int64_t micro) {
    logits_check c = {.d = d, .row = row, .micro = micro, .negative = 1};
    int64_t elements = 0, have = dump_count(d, dp, micro, "logits", &elements);
    if (!have || !row->rank || !row->labels) return 0;
    c.logp_unit = row->logp ? logits_logp_unit(row) : 0;
    if (!row->logp && have == d->sp)
        c.logp = (double *)calloc((size_t)row->tokens + 1, sizeof *c.logp);
    for (int64_t r = dp * d->sp; r < (dp + 1) * d->sp; r++)
        if (logits_rank(&c, r)) break;
    if (!d->error.status) logits_judge(&c, s);
    if (c.logp && !d->error.status && !c.outside) {
        row->logp = c.logp;
        row->unit.logp = c.coarsest > 0 ? c.coarsest : 0x1p-24;
    } else {
        free(c.logp);
    }
    return d->error.status ? -1 : 0;
}
#endif
