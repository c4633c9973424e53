/* SPDX-License-Identifier: MIT OR Unlicense */
/* on_policy.h - how far the log-probs that came with a sampled text (old_logp) are from those
 * that training computes for the same tokens before any update (logp), by position, and what
 * PPO's ratio becomes. On policy the two are equal.
 *
 * If they differ, rounding may be the reason. Its size is measured (policy_roundings) with
 * log-probs of SmolLM2-135M on 1,500 tokens of English: float32 and bfloat16 against fp64.
 * Sampler and trainer both round, which gives sqrt(2) times this; the limit is twice as much.
 * The rounding of a number x when it is written, u |x| (roundings.h), is subtracted first. */
#ifndef ORACLE_ON_POLICY_H
#define ORACLE_ON_POLICY_H
#include "reference_logprobs.h"
#include "oracle/reference/truth.h"

enum { POLICY_POWERS = 26, POLICY_BINS = 8 };

/* Distances of a set of tokens. */
typedef struct policy_gap {
    int64_t tokens;
    double sum, worst;
} policy_gap;

/* old_logp of a token is compared with logp of that token, the token before, the next. */
enum { SHIFT_NONE, SHIFT_LATE, SHIFT_EARLY, SHIFTS };
static const int64_t shift_from[SHIFTS] = {0, -1, 1};

typedef struct on_policy {
    dump *d;
    int64_t tokens, equal, not_finite, outside; /* outside: ratio beyond clip */
    int64_t whole_rows;                         /* rows without cu_seqlens */
    policy_gap all, by_power[POLICY_POWERS];    /* of finite log-probs */
    policy_gap beyond[SHIFTS];                  /* less the rounding of writing */
    double ratios, k1, k3;                      /* sums */
    int type;                                   /* TYPE_..., of the model's computation */
    double worst[2];                            /* logp, old_logp at the largest distance */
    char worst_place[200], odd_place[200];      /* odd: the first token that is not finite */
    verdict side;                               /* wrong: old_logp is that of other tokens */
    verdict v;
} on_policy;

/* Distances of log-probs from fp64. float32 and bfloat16 are measured. float64 is scaled from
   float32, tf32 and float16 from bfloat16, by the ratio of units. */
static const struct {
    double mean, worst;
} policy_roundings[TYPES] = {{0x1p-29 * 3.5e-6, 0x1p-29 * 2.2e-5},
                             {3.5e-6, 2.2e-5},
                             {0.0049, 0.07},
                             {0.0049, 0.07},
                             {0.039, 0.56}};

static inline int type_of(double unit) {
    return unit == UNIT_BF16 ? TYPE_BF16 : unit == UNIT_F16 ? TYPE_F16 : TYPE_F32;
}

static inline void gap_add(policy_gap *g, double distance) {
    g->tokens++;
    g->sum += distance;
    g->worst = fmax(g->worst, distance);
}

static inline double share_of(double sum, int64_t count) {
    return count ? sum / (double)count : 0;
}

/* ---- tokens ---- */

/* Position of the predicted token in its document; 1: the document's second token. */
static inline int64_t policy_position(const dump_row *row, int64_t t) {
    return t + 1 - row_document_begin(row, t);
}

static inline int power_of(int64_t x) {
    int power = 0;
    while (x >> (power + 1)) power++;
    return power < POLICY_POWERS ? power : POLICY_POWERS - 1;
}

static inline void policy_place(char *text, size_t size, const dump_row *row, int64_t t,
                                int64_t micro) {
    char place[160];
    snprintf(text, size, "%s, position %lld, of micro-batch %lld",
             place_text(place, sizeof place, row, t), (long long)policy_position(row, t),
             (long long)micro);
}

/* The distance less the rounding of both numbers when they were written, at least 0. */
static inline double policy_beyond(const dump_row *row, int64_t t, int64_t from) {
    double logp = row->logp[from], old = row->old_logp[t];
    double written = row->unit.logp * fabs(logp) + row->unit.old_logp * fabs(old);
    return fmax(fabs(logp - old) - written, 0);
}

/* Whether old_logp of token t can be compared with logp of token `from`. */
static inline int policy_may_shift(const dump_row *row, int64_t t, int64_t from) {
    return from >= 0 && from < row_end(row) && row_supervised(row, from) &&
           isfinite(row->logp[from]) && isfinite(row->old_logp[t]) &&
           row_document(row, from) == row_document(row, t);
}

static inline void policy_add_finite(on_policy *p, const dump_row *row, int64_t t,
                                     int64_t micro) {
    const dump_facts *f = &p->d->facts;
    double logp = row->logp[t], old = row->old_logp[t], d = logp - old, ratio = exp(d);
    p->equal += !memcmp(&logp, &old, sizeof logp);
    if (!p->all.tokens || fabs(d) > p->all.worst) {
        p->worst[0] = logp;
        p->worst[1] = old;
        policy_place(p->worst_place, sizeof p->worst_place, row, t, micro);
    }
    gap_add(&p->all, fabs(d));
    gap_add(&p->by_power[power_of(policy_position(row, t))], fabs(d));
    p->outside += !(ratio >= 1 - f->clip_low && ratio <= 1 + f->clip_high);
    p->ratios += ratio;
    p->k1 -= d;
    p->k3 += k3(d);
}

static inline void policy_add_token(on_policy *p, const dump_row *row, int64_t t,
                                    int64_t micro) {
    p->tokens++;
    for (int s = 0; s < SHIFTS; s++)
        if (policy_may_shift(row, t, t + shift_from[s]))
            gap_add(&p->beyond[s], policy_beyond(row, t, t + shift_from[s]));
    if (isfinite(row->logp[t]) && isfinite(row->old_logp[t]))
        policy_add_finite(p, row, t, micro);
    else if (!p->not_finite++)
        policy_place(p->odd_place, sizeof p->odd_place, row, t, micro);
}

/* ---- rows ---- */

/* Refuses a dump that lacks what is compared: then -1 with d->error. */
static inline int policy_lacks(dump *d, const dump_row *row, int64_t dp, int64_t micro) {
    const char *path = d->ranks[dp * d->sp].path;
    const char *lacks = !row->rank       ? "index"
                        : !row->labels   ? "labels"
                        : !row->logp     ? "logp"
                        : !row->old_logp ? "old_logp"
                                         : NULL;
    if (lacks)
        seqpar_fail(
            &d->error, SEQPAR_ERR_FILE_FORMAT,
            "%.300s: no tensor %lld.%s; on_policy compares logp, which training "
            "computes, with old_logp, which came with the sampled text: write both with "
            "seqpar_dump.Dump(..., objective=\"ppo\") and micro_batch(%lld, index=, "
            "labels=, logp=, old_logp=)",
            path, (long long)micro, lacks, (long long)micro);
    return lacks ? -1 : 0;
}

/* Refuses a row whose index lacks or repeats tokens: these would not be compared. */
static inline int policy_misplaced(dump *d, const dump_places *found, int64_t dp,
                                   int64_t micro) {
    if (!(found->outside + found->twice + found->missing)) return 0;
    seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: %lld.index of the ranks together does not have each token of the row "
                "once; seqpar-verify ver says where",
                d->ranks[dp * d->sp].path, (long long)micro);
    return -1;
}

static inline void policy_add_row(on_policy *p, const dump_row *row, int64_t dp,
                                  int64_t micro) {
    p->whole_rows += !row->docs;
    if (!p->d->facts.dtype)
        p->type = (int)fmax(p->type, type_of(fmax(row->unit.logp, row->unit.old_logp)));
    for (int64_t t = 0; t < row_end(row); t++)
        if (row_supervised(row, t)) policy_add_token(p, row, t, micro);
    if (!p->side.count)
        side_is_wrong(&p->side, row, "old_logp", row->old_logp, row->unit.old_logp,
                      dp * p->d->sp);
}

/* 0, or -1 with d->error. */
static inline int policy_read(on_policy *p) {
    dump *d = p->d;
    int status = 0;
    for (int64_t n = 0; !status && n < d->world / d->sp * d->accumulation; n++) {
        int64_t dp = n / d->accumulation, micro = n % d->accumulation;
        dump_row row;
        dump_places found;
        status = dump_read_row(d, dp, micro, &row, &found) ||
                         policy_lacks(d, &row, dp, micro) ||
                         policy_misplaced(d, &found, dp, micro)
                     ? -1
                     : 0;
        if (!status) policy_add_row(p, &row, dp, micro);
        dump_row_free(&row);
    }
    return status;
}

/* ---- verdict ---- */

static inline double policy_mean_limit(const on_policy *p) {
    return 2 * sqrt(2) * policy_roundings[p->type].mean;
}

static inline double policy_worst_limit(const on_policy *p) {
    return 2 * sqrt(2) * policy_roundings[p->type].worst;
}

static inline int policy_is_near(const on_policy *p, int shift) {
    const policy_gap *g = &p->beyond[shift];
    return share_of(g->sum, g->tokens) <= policy_mean_limit(p) &&
           g->worst <= policy_worst_limit(p);
}

/* Names a shift by one token, if at least half of the tokens have such a neighbour and the
   distances from the neighbours are within the limits. */
static inline void policy_name_shift(on_policy *p) {
    for (int s = SHIFT_LATE; s < SHIFTS; s++) {
        if (2 * p->beyond[s].tokens < p->tokens || !policy_is_near(p, s)) continue;
        verdict_name(&p->v, mistake_named("old_log_probs_shifted"));
        verdict_say(&p->v, "old_logp of a token is logp of the token %s it, in all %lld places",
                    s == SHIFT_LATE ? "before" : "behind", (long long)p->beyond[s].tokens);
    }
}

static inline void policy_name_side(on_policy *p) {
    for (int i = 0; i < p->side.count; i++) verdict_name(&p->v, p->side.named[i]);
    for (int i = 0; i < p->side.lines; i++) verdict_say(&p->v, "%s", p->side.line[i]);
}

static inline void policy_say_wrong(on_policy *p) {
    if (p->not_finite)
        verdict_say(&p->v, "logp or old_logp of %lld tokens is not finite, first at %s",
                    (long long)p->not_finite, p->odd_place);
    if (p->all.tokens && !policy_is_near(p, SHIFT_NONE)) {
        policy_name_shift(p);
        if (!p->v.count) policy_name_side(p);
    }
    if (p->v.count || p->not_finite) return;
    verdict_say(&p->v,
                "no shift by a token explains it; a temperature or a penalty that one side "
                "alone applies, other weights or another template cannot be told from "
                "log-probs alone");
}

/* Every verdict begins with these figures. Ratios, clip and KL show what the distance does to
   PPO; they are not judged. */
static inline void policy_say_figures(on_policy *p) {
    const dump_facts *f = &p->d->facts;
    int64_t n = p->all.tokens;
    verdict_say(&p->v, "%lld of %lld supervised tokens have logp = old_logp to the bit",
                (long long)p->equal, (long long)p->tokens);
    if (!n) return;
    if (p->all.worst > 0)
        verdict_say(
            &p->v, "|logp - old_logp|: mean %.6g, worst %.6g, at %s: logp %.9g, old_logp %.9g",
            share_of(p->all.sum, n), p->all.worst, p->worst_place, p->worst[0], p->worst[1]);
    verdict_say(&p->v,
                "ratio exp(logp - old_logp): mean %.9g, worst %.9g; %lld of %lld tokens (%.3g "
                "%%) outside the clip, %.6g to %.6g",
                share_of(p->ratios, n), exp(p->worst[0] - p->worst[1]), (long long)p->outside,
                (long long)n, 100 * share_of((double)p->outside, n), 1 - f->clip_low,
                1 + f->clip_high);
    verdict_say(&p->v, "KL of sampler and trainer: k1 %.6g, k3 %.6g", share_of(p->k1, n),
                share_of(p->k3, n));
    if (f->importance == DUMP_RATIO_OF_SEQUENCE)
        verdict_say(&p->v, "these are ratios of tokens; metadata importance says that a "
                           "document has one, exp of its tokens' mean");
    if (p->whole_rows)
        verdict_say(&p->v, "%lld rows have no cu_seqlens: each is taken for one document",
                    (long long)p->whole_rows);
}

static inline void policy_judge(on_policy *p) {
    policy_say_figures(p);
    p->v.kind = VERDICT_WRONG;
    if (!p->tokens) {
        p->v.kind = VERDICT_INSUFFICIENT;
        verdict_say(&p->v, "no token is supervised, so nothing is compared");
        return;
    }
    if (p->equal == p->tokens) {
        p->v.kind = VERDICT_RIGHT;
        return;
    }
    verdict_say(&p->v, "roundings of %s explain a mean of %.3g and a worst of %.3g",
                compute_types[p->type].name, policy_mean_limit(p), policy_worst_limit(p));
    if (!p->not_finite && policy_is_near(p, SHIFT_NONE))
        p->v.kind = VERDICT_CLOSE;
    else
        policy_say_wrong(p);
}

/* 0, or -1 with d->error. */
static inline int on_policy_check(on_policy *p, dump *d) {
    memset(p, 0, sizeof *p);
    p->d = d;
    p->type = computed_in(d);
    if (policy_read(p)) return -1;
    policy_judge(p);
    return 0;
}

/* Of `ver`: adds the verdict to the stage of the loss, where the metadata say that old_logp is to
   equal logp. 0, or -1 with d->error. */
static inline int on_policy_stage(stage *s, dump *d) {
    static on_policy p; /* large */
    stage one = {.judged = 1};
    if (!d->facts.on_policy) return 0;
    if (on_policy_check(&p, d)) return -1;
    one.v = p.v;
    if (one.v.kind == VERDICT_CLOSE || one.v.kind == VERDICT_RIGHT) {
        if (s->judged)
            verdict_say(&s->v, "on_policy: %s", one.v.line[one.v.kind == VERDICT_CLOSE]);
        return 0;
    }
    stage_add(s, &one);
    return 0;
}

/* ---- by position ---- */

typedef struct policy_bin {
    int64_t first, last;
    policy_gap gap;
} policy_bin;

/* One bin for each of the last POLICY_BINS - 1 powers of two, one for all positions before.
   Returns the number of bins that have a token. */
static inline int policy_bins(const on_policy *p, policy_bin bins[POLICY_BINS]) {
    int top = POLICY_POWERS - 1, low, count = 0;
    policy_bin bin = {.first = 1};
    while (top && !p->by_power[top].tokens) top--;
    low = top < POLICY_BINS ? 0 : top - POLICY_BINS + 1;
    for (int power = 0; power <= top; power++) {
        const policy_gap *g = &p->by_power[power];
        bin.last = ((int64_t)2 << power) - 1;
        bin.gap.tokens += g->tokens;
        bin.gap.sum += g->sum;
        bin.gap.worst = fmax(bin.gap.worst, g->worst);
        if (power < low) continue;
        if (bin.gap.tokens) bins[count++] = bin;
        bin = (policy_bin){.first = bin.last + 1};
    }
    return count;
}

/* ---- text, JSON ---- */

static inline void on_policy_print(const on_policy *p) {
    policy_bin bins[POLICY_BINS];
    int count = policy_bins(p, bins);
    verdict_headline(stdout, &p->v);
    for (int i = 0; i < p->v.lines; i++)
        print_wrapped(stdout, i ? "" : "evidence", p->v.line[i]);
    if (count) printf("\n    %-24s %10s %12s %12s\n", "position", "tokens", "mean", "worst");
    for (int i = 0; i < count; i++) {
        char range[48];
        snprintf(range, sizeof range, "%lld to %lld", (long long)bins[i].first,
                 (long long)bins[i].last);
        printf("    %-24s %10lld %12.6g %12.6g\n", range, (long long)bins[i].gap.tokens,
               share_of(bins[i].gap.sum, bins[i].gap.tokens), bins[i].gap.worst);
    }
    verdict_print_mistakes(stdout, &p->v);
}

static inline void gap_json(cJSON *o, const policy_gap *g) {
    cJSON_AddNumberToObject(o, "tokens", (double)g->tokens);
    cJSON_AddNumberToObject(o, "mean", share_of(g->sum, g->tokens));
    cJSON_AddNumberToObject(o, "worst", g->worst);
}

static inline void policy_bins_json(cJSON *o, const on_policy *p) {
    policy_bin bins[POLICY_BINS];
    int count = policy_bins(p, bins);
    cJSON *list = cJSON_AddArrayToObject(o, "by_position");
    for (int i = 0; i < count; i++) {
        cJSON *one = cJSON_CreateObject();
        cJSON_AddNumberToObject(one, "first", (double)bins[i].first);
        cJSON_AddNumberToObject(one, "last", (double)bins[i].last);
        gap_json(one, &bins[i].gap);
        cJSON_AddItemToArray(list, one);
    }
}

/* Means and worst are of tokens whose log-probs are finite. */
static inline cJSON *on_policy_json(const on_policy *p) {
    cJSON *o = verdict_json(&p->v);
    int64_t n = p->all.tokens;
    cJSON_AddNumberToObject(o, "supervised", (double)p->tokens);
    cJSON_AddNumberToObject(o, "equal", (double)p->equal);
    cJSON_AddNumberToObject(o, "not_finite", (double)p->not_finite);
    gap_json(cJSON_AddObjectToObject(o, "distance"), &p->all);
    cJSON_AddStringToObject(o, "worst_at", p->worst_place);
    cJSON_AddNumberToObject(o, "ratio_mean", share_of(p->ratios, n));
    cJSON_AddNumberToObject(o, "ratio_worst", exp(p->worst[0] - p->worst[1]));
    cJSON_AddNumberToObject(o, "outside_clip", share_of((double)p->outside, n));
    cJSON_AddNumberToObject(o, "k1", share_of(p->k1, n));
    cJSON_AddNumberToObject(o, "k3", share_of(p->k3, n));
    policy_bins_json(o, p);
    return o;
}
#endif
