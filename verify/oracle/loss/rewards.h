/* SPDX-License-Identifier: MIT OR Unlicense */
/* rewards.h - compares dumped numbers of documents with the right ones and with what mistakes
 * give; here the scores of a reward model: the value at each document's last token. */
#ifndef ORACLE_REWARDS_H
#define ORACLE_REWARDS_H
#include "documents.h"
#include "oracle/verdict/verdict.h"

/* The dump's numbers of document i on member r of its sequence. Numbers of one rank, or the
   same on all, have r = 0 only. */
typedef struct reward_table reward_table;
struct reward_table {
    const step_documents *s;
    const dump_facts *f;
    int64_t members;               /* sp, or 1 */
    double tolerance, unit, floor; /* floor: absolute, for numbers about 0 */
    double (*way)(const reward_table *t, int64_t i, int64_t r, int way); /* 0: right */
    double (*slack)(const reward_table *t, int64_t i); /* absolute, from rounding; NULL: 0 */
    int (*beside)(int way); /* the right way that this mistake is compared with; NULL: 0 */
    int (*range)(const reward_table *t, int64_t i, int64_t r, double *low, double *high);
    const void *own;
};

static inline double reward_limit(const reward_table *t, int64_t i, double want) {
    return (t->tolerance + 2 * t->unit) * fabs(want) + t->floor +
           (t->slack ? t->slack(t, i) : 0);
}

/* The largest distance of the dump's numbers from the way's, as a multiple of the limit. The
   way's NaN is skipped; the dump's NaN or Inf is infinitely far. *at: the first above 1. */
static inline double rewards_off(const reward_table *t, int way, int64_t *at) {
    double worst = 0;
    for (int64_t n = 0; n < t->s->count * t->members; n++) {
        int64_t i = n / t->members, r = n % t->members;
        double low, high, off, want = t->way(t, i, r, way);
        if (isnan(want) || !t->range(t, i, r, &low, &high)) continue;
        off = fmax(fabs(low - want), fabs(high - want)) / reward_limit(t, i, want);
        if (!(isfinite(low) && isfinite(high))) off = INFINITY;
        if (at && off > 1 && !(worst > 1)) *at = n;
        if (off > worst) worst = off;
    }
    return worst;
}

/* 1: some number of the way differs from the right one; 0: none does; -1: the mistake cannot
   be made here. */
static inline int rewards_show(const reward_table *t, int way) {
    double low, high;
    int shows = -1;
    for (int64_t n = 0; n < t->s->count * t->members; n++) {
        int64_t i = n / t->members, r = n % t->members;
        double want = t->way(t, i, r, way);
        double right = t->way(t, i, r, t->beside ? t->beside(way) : 0);
        if (!t->range(t, i, r, &low, &high) || isnan(want)) continue;
        if (fabs(want - right) > reward_limit(t, i, right)) return 1;
        shows = 0;
    }
    return shows;
}

/* Numbers of the dump that are judged; -1: a right one is NaN or Inf. */
static inline int64_t rewards_counted(const reward_table *t) {
    int64_t count = 0;
    double low, high;
    for (int64_t n = 0; n < t->s->count * t->members; n++) {
        int64_t i = n / t->members, r = n % t->members;
        if (!t->range(t, i, r, &low, &high)) continue;
        if (!isfinite(t->way(t, i, r, 0))) return -1;
        count++;
    }
    return count;
}

typedef struct reward_way {
    const char *name, *how;
} reward_way;

static inline void rewards_name(const reward_table *t, const reward_way *ways, int count,
                                verdict *v) {
    for (int way = 1; way < count; way++) {
        int named = v->count;
        if (!ways[way].name || rewards_off(t, way, NULL) > 1 || rewards_show(t, way) <= 0)
            continue;
        verdict_name(v, mistake_named(ways[way].name));
        if (v->count > named && ways[way].how)
            verdict_say(v, "%s: %s", ways[way].name, ways[way].how);
    }
}

static inline int rewards_any_shows(const reward_table *t, const reward_way *ways, int from,
                                    int to) {
    for (int way = from; way < to; way++)
        if (ways[way].name && rewards_show(t, way) > 0) return 1;
    return 0;
}

/* Notes which mistakes would give other numbers. Some are variants of another right way, as with
   the unbiased deviation: these count only if that way gives the dump's numbers. */
static inline void rewards_try(const reward_table *t, const reward_way *ways, int count,
                               verdict *v) {
    for (int way = 1; way < count; way++) {
        int goes = ways[way].name &&
                   !(rewards_off(t, t->beside ? t->beside(way) : 0, NULL) > 1);
        int shows = goes ? rewards_show(t, way) : -1;
        if (shows >= 0) verdict_try(v, ways[way].name, ways[way].how, shows);
    }
}

/* Begins the verdict. Returns the count of numbers to judge; 0: the verdict says why. */
static inline int64_t rewards_begin(const reward_table *t, const char *what, verdict *v) {
    int64_t count = rewards_counted(t);
    memset(v, 0, sizeof *v);
    v->kind = VERDICT_INSUFFICIENT;
    if (count < 0)
        verdict_say(v, "what %s are made of is NaN or Inf already", what);
    else if (!count)
        verdict_say(v, "there are no %s to judge", what);
    return count < 0 ? 0 : count;
}

static inline void rewards_say_limit(const reward_table *t, verdict *v) {
    if (t->unit > 1e-6)
        verdict_say(v, "within %.3g, as tolerance %g and rounding to 16 bits have it",
                    t->tolerance + 2 * t->unit, t->tolerance);
}

/* ---- scores of a reward model ---- */

enum {
    SCORE_AVERAGED = SCORES,
    SCORE_ADDED,
    SCORE_PARTS,
    SCORE_PARTS_AVERAGED,
    SCORE_PARTS_MEAN,
    SCORE_NEXT,
    SCORE_PREVIOUS,
    SCORE_WAYS
};
static const reward_way score_ways[SCORE_WAYS] = {
    {NULL, NULL},
    {"score_of_rank_end", NULL},
    {"score_of_first_token", NULL},
    {"score_of_row_end", NULL},
    {"score_of_row_end", "of the row with its padding"},
    {"score_of_padding", NULL},
    {"gathered_in_rank_order", NULL},
    {"scores_averaged", NULL},
    {"scores_added", NULL},
    {"scores_of_parts", "added over ranks"},
    {"scores_of_parts", "averaged over ranks"},
    {"scores_of_parts", "averaged over the ranks that have a token of the document"},
    {"reward_on_wrong_document", "the score is that of the document behind it"},
    {"reward_on_wrong_document", "the score is that of the document before it"}};

/* Document i + distance, if it is in the same row and has a token; else -1. */
static inline int64_t document_beside(const step_documents *s, int64_t i, int64_t distance) {
    int64_t j = i + distance;
    if (j < 0 || j >= s->count || s->of[j].dp != s->of[i].dp ||
        s->of[j].micro != s->of[i].micro || !s->of[j].tokens)
        return -1;
    return j;
}

static inline double score_of_parts(const reward_table *t, int64_t i, int way) {
    double sum = 0, count = 0;
    if (t->s->sp == 1) return NAN;
    for (int64_t r = 0; r < t->s->sp; r++) {
        const document_part *p = &t->s->part[i * t->s->sp + r];
        if (!p->held) continue;
        sum += p->value;
        count++;
    }
    return way == SCORE_PARTS            ? sum
           : way == SCORE_PARTS_AVERAGED ? sum / (double)t->s->sp
                                         : sum / count;
}

static inline double score_way(const reward_table *t, int64_t i, int64_t r, int way) {
    const document *o = &t->s->of[i];
    double right = o->values[SCORE_RIGHT], sp = t->s->sp > 1 ? (double)t->s->sp : NAN;
    int64_t beside;
    (void)r;
    if (way < SCORES) return o->values[way];
    if (way == SCORE_AVERAGED) return right / sp;
    if (way == SCORE_ADDED) return right * sp;
    if (way < SCORE_NEXT) return score_of_parts(t, i, way);
    beside = document_beside(t->s, i, way == SCORE_NEXT ? 1 : -1);
    return beside < 0 ? NAN : t->s->of[beside].values[SCORE_RIGHT];
}

static inline int score_range(const reward_table *t, int64_t i, int64_t r, double *low,
                              double *high) {
    (void)r;
    *low = *high = t->s->of[i].score;
    return t->s->of[i].tokens > 0;
}

/* Root mean square of the right numbers. */
static inline double rewards_size(const reward_table *t) {
    double sum = 0, count = 0, low, high;
    for (int64_t n = 0; n < t->s->count * t->members; n++)
        if (t->range(t, n / t->members, n % t->members, &low, &high)) {
            sum += square(t->way(t, n / t->members, n % t->members, 0));
            count++;
        }
    return count > 0 ? sqrt(sum / count) : 0;
}

static inline void scores_say_first(const reward_table *t, int64_t i, verdict *v) {
    const document *o = &t->s->of[i];
    verdict_say(v,
                "first at micro-batch %lld, document %lld, whose last token is at rank %lld, "
                "local row %lld: score %.9g, value %.9g",
                (long long)o->micro, (long long)o->number, (long long)o->last_rank,
                (long long)o->last_local, o->score, o->values[SCORE_RIGHT]);
}

/* Whether the value of a wrong token would differ from some score. */
static inline int scores_show(const reward_table *t) {
    return rewards_any_shows(t, score_ways, SCORE_RIGHT + 1, SCORES) ||
           rewards_any_shows(t, score_ways, SCORE_NEXT, SCORE_WAYS);
}

/* The limit is relative, so scores near 0 need a floor: 1 % of tolerance, times the scores'
   root mean square. Values that are all equal prove nothing. */
static inline void judge_scores(verdict *v, const step_documents *s, const dump_facts *f,
                                double tolerance) {
    reward_table t = {.s = s,
                      .f = f,
                      .members = 1,
                      .tolerance = tolerance,
                      .unit = fmax(s->unit.scores, s->unit.values),
                      .way = score_way,
                      .range = score_range};
    int64_t first = 0, count = rewards_begin(&t, "scores", v);
    double off;
    if (!count) return;
    t.floor = 0.01 * tolerance * rewards_size(&t);
    off = rewards_off(&t, 0, &first);
    v->kind = off <= 1 ? VERDICT_RIGHT : off <= 1.5 ? VERDICT_MARGINAL : VERDICT_WRONG;
    if (v->kind != VERDICT_RIGHT) scores_say_first(&t, first, v);
    if (v->kind == VERDICT_WRONG) rewards_name(&t, score_ways, SCORE_WAYS, v);
    if (v->kind == VERDICT_RIGHT && !scores_show(&t)) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, "all values are the same, so a wrong token's would not show; dump a "
                       "later step");
    } else if (v->kind == VERDICT_RIGHT) {
        verdict_say(v, "%lld scores, each the value at its document's last token",
                    (long long)count);
        rewards_try(&t, score_ways, SCORE_WAYS, v);
    }
    rewards_say_limit(&t, v);
}
#endif
