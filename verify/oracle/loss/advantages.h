/* SPDX-License-Identifier: MIT OR Unlicense */
/* advantages.h - PPO's advantages from rewards. A group is all documents that answer
 * one prompt. A document's advantage is (reward - mean of the group) / (deviation of the group
 * + eps), or the same without the division. All its supervised tokens have this advantage. */
#ifndef ORACLE_ADVANTAGES_H
#define ORACLE_ADVANTAGES_H
#include "rewards.h"

/* The documents whose rewards give the baseline: the mean and the deviation. */
enum {
    OF_GROUP,
    OF_TRAINED,  /* the group's documents with a supervised token */
    OF_REPLICA,  /* the group's documents in the same replica */
    OF_ROW,      /* the group's documents in the same replica and micro-batch */
    OF_BATCH,    /* all documents of the step */
    OF_NEXT,     /* the group, but each document has the reward of the next one in its row */
    OF_PREVIOUS, /* likewise, of the previous one */
    OF_STRIDE,   /* every `stride` documents in turn, whatever their group */
    SCOPES
};
typedef struct reward_stat {
    double mean, squares, count, largest; /* squares: sum of squared deviations */
} reward_stat;

/* The tokens over which advantages are whitened. */
enum {
    WHITE_STEP,
    WHITE_RANK,
    WHITE_RANK_MICRO,
    WHITE_REPLICA,
    WHITE_REPLICA_MICRO,
    WHITENINGS
};
/* The number that is whitened: the right advantage, reward - mean of the group, or reward. */
enum { BASE_RIGHT, BASE_MEAN, BASE_REWARD, BASES };

enum {
    ADVANTAGE_RIGHT,
    ADVANTAGE_UNBIASED, /* from here on: no mistakes */
    ADVANTAGE_TRAINED,
    ADVANTAGE_TRAINED_UNBIASED,
    ADVANTAGE_LEAVE_ONE_OUT,
    ADVANTAGE_REPLICA, /* from here on: mistakes */
    ADVANTAGE_REPLICA_UNBIASED,
    ADVANTAGE_ROW,
    ADVANTAGE_ROW_UNBIASED,
    ADVANTAGE_BATCH,
    ADVANTAGE_BATCH_UNBIASED,
    ADVANTAGE_BATCH_DEVIATION,
    ADVANTAGE_BATCH_DEVIATION_UNBIASED,
    ADVANTAGE_NO_DEVIATION,
    ADVANTAGE_NEXT,
    ADVANTAGE_PREVIOUS,
    ADVANTAGE_REWARD_NEXT,
    ADVANTAGE_REWARD_PREVIOUS,
    ADVANTAGE_STRIDE,
    ADVANTAGE_STRIDE_UNBIASED,
    ADVANTAGE_WHITENED, /* + (base * WHITENINGS + whitening) * 2 + unbiased */
    ADVANTAGE_WAYS = ADVANTAGE_WHITENED + BASES * WHITENINGS * 2
};

/* Ways to compute advantages, right or wrong. name: of the mistake; NULL: it is none. Whitened
   ways are not in this table: advantage_whitened computes them. */
static const struct {
    const char *name, *how;
    int scope, unbiased;
} advantage_ways[ADVANTAGE_WHITENED] = {
    {NULL, NULL, OF_GROUP, 0},
    {NULL, "with the unbiased deviation (n - 1): no mistake of sequence parallelism", OF_GROUP,
     1},
    {NULL, "documents without a supervised token are left out: no mistake", OF_TRAINED, 0},
    {NULL, "documents without a supervised token are left out, unbiased deviation: no mistake",
     OF_TRAINED, 1},
    {NULL, "the baseline is the mean of the others: no mistake of sequence parallelism",
     OF_GROUP, 0},
    {"baseline_of_one_replica", NULL, OF_REPLICA, 0},
    {"baseline_of_one_replica", "with the unbiased deviation", OF_REPLICA, 1},
    {"baseline_of_one_replica", "of one micro-batch of it", OF_ROW, 0},
    {"baseline_of_one_replica", "of one micro-batch of it, with the unbiased deviation", OF_ROW,
     1},
    {"baseline_of_batch", NULL, OF_BATCH, 0},
    {"baseline_of_batch", "with the unbiased deviation", OF_BATCH, 1},
    {"baseline_of_batch", "the mean is the group's, the deviation that of all", OF_GROUP, 0},
    {"baseline_of_batch", "the mean is the group's, the unbiased deviation that of all",
     OF_GROUP, 1},
    {"std_missing", NULL, OF_GROUP, 0},
    {"reward_on_wrong_document", "the advantage is that of the document behind it", OF_GROUP,
     0},
    {"reward_on_wrong_document", "the advantage is that of the document before it", OF_GROUP,
     0},
    {"reward_on_wrong_document", "the reward is that of the document behind it", OF_NEXT, 0},
    {"reward_on_wrong_document", "the reward is that of the document before it", OF_PREVIOUS,
     0},
    {"groups_by_stride", NULL, OF_STRIDE, 0},
    {"groups_by_stride", "with the unbiased deviation", OF_STRIDE, 1}};
static const char *const whitening_texts[WHITENINGS] = {
    "whitened over all supervised tokens of the step afterwards: no mistake of sequence "
    "parallelism",
    "over the tokens of each rank", "over the tokens of each rank's micro-batch",
    "over the tokens of each replica", "over the tokens of each replica's micro-batch"};

typedef struct advantage_step {
    reward_stat *stat;                     /* (SCOPES, documents) */
    reward_stat *white[BASES][WHITENINGS]; /* arrays, indexed by white_at */
    reward_way ways[ADVANTAGE_WAYS];
    int64_t stride; /* documents of the largest group; 0: all groups have as many */
} advantage_step;

/* ---- groups ---- */

typedef struct group_key {
    int64_t key[3], document;
} group_key;

static inline int group_order(const void *a, const void *b) {
    const group_key *x = (const group_key *)a, *y = (const group_key *)b;
    for (int i = 0; i < 3; i++)
        if (x->key[i] != y->key[i]) return x->key[i] < y->key[i] ? -1 : 1;
    return 0;
}

/* The next (distance 1) or previous (-1) document of the row; wraps around at its ends. */
static inline int64_t document_around(const step_documents *s, int64_t i, int64_t distance) {
    int64_t j = document_beside(s, i, distance);
    if (j >= 0) return j;
    for (j = i; document_beside(s, j, -distance) >= 0;) j -= distance;
    return j;
}

static inline double reward_of(const step_documents *s, int64_t i, int scope) {
    int64_t from = scope == OF_NEXT       ? document_around(s, i, 1)
                   : scope == OF_PREVIOUS ? document_around(s, i, -1)
                                          : i;
    return s->of[from].reward;
}

/* Statistics of the rewards of keys[from] to keys[to - 1]. */
static inline reward_stat group_stat(const step_documents *s, const group_key *keys,
                                     int64_t from, int64_t to, int scope) {
    reward_stat out = {0, 0, (double)(to - from), 0};
    for (int64_t n = from; n < to; n++) {
        double reward = reward_of(s, keys[n].document, scope);
        out.mean += reward / out.count;
        out.largest = fmax(out.largest, fabs(reward));
    }
    for (int64_t n = from; n < to; n++)
        out.squares += square(reward_of(s, keys[n].document, scope) - out.mean);
    return out;
}

/* Fills keys with the scope's documents, sorted: those with equal keys share one baseline.
   Returns their number. */
static inline int64_t group_keys(const step_documents *s, int scope, int64_t stride,
                                 group_key *keys) {
    int64_t n = 0;
    for (int64_t i = 0; i < s->count; i++) {
        const document *o = &s->of[i];
        int by_replica = scope == OF_REPLICA || scope == OF_ROW;
        if (!o->tokens || (scope == OF_TRAINED && !o->labels)) continue;
        keys[n] = (group_key){{scope == OF_BATCH    ? 0
                               : scope == OF_STRIDE ? n / (stride ? stride : 1)
                                                    : o->group,
                               by_replica ? o->dp : 0, scope == OF_ROW ? o->micro : 0},
                              i};
        n++;
    }
    qsort(keys, (size_t)n, sizeof *keys, group_order);
    return n;
}

/* The size of the largest group; 0: all have one size, so a stride finds them. */
static inline int64_t group_stride(const advantage_step *a, const step_documents *s) {
    double most = 0, least = INFINITY;
    for (int64_t i = 0; i < s->count; i++) {
        double count = a->stat[OF_GROUP * s->count + i].count;
        if (count == 0) continue; /* a document without a token */
        most = fmax(most, count);
        least = fmin(least, count);
    }
    return least < most ? (int64_t)most : 0;
}

/* 0, or -1: no memory. */
static inline int groups_fill(advantage_step *a, const step_documents *s) {
    group_key *keys = (group_key *)malloc((size_t)(s->count + 1) * sizeof *keys);
    a->stat = (reward_stat *)calloc((size_t)(SCOPES * s->count + 1), sizeof *a->stat);
    for (int scope = 0; keys && a->stat && scope < SCOPES; scope++) {
        int64_t n;
        if (scope == OF_STRIDE) a->stride = group_stride(a, s);
        n = group_keys(s, scope, a->stride, keys);
        for (int64_t from = 0, to; from < n; from = to) {
            reward_stat stat;
            for (to = from + 1; to < n && !group_order(&keys[from], &keys[to]);) to++;
            stat = group_stat(s, keys, from, to, scope);
            for (int64_t k = from; k < to; k++)
                a->stat[scope * s->count + keys[k].document] = stat;
        }
    }
    free(keys);
    return keys && a->stat ? 0 : -1;
}

/* 0 where the divisor is not positive, as for a single number if unbiased. */
static inline double stat_deviation(const reward_stat *s, int unbiased) {
    return s->count > unbiased ? sqrt(s->squares / (s->count - unbiased)) : 0;
}

/* ---- ways ---- */

static inline const reward_stat *stat_at(const reward_table *t, int scope, int64_t i) {
    return &((const advantage_step *)t->own)->stat[scope * t->s->count + i];
}

static inline int advantage_divides(const dump_facts *f) {
    return f->advantage == DUMP_ADVANTAGE_GROUP;
}

/* Converts a difference from the mean of all to the difference from the mean of the others. */
static inline double leave_one_out(double off, const reward_stat *s) {
    return s->count < 2 ? off : off * s->count / (s->count - 1);
}

/* The advantage from a mean and, only where the metadata ask for a division, a deviation. */
static inline double advantage_by(const reward_table *t, double reward, const reward_stat *mean,
                                  const reward_stat *spread, int unbiased) {
    double off = reward - mean->mean, by;
    if (t->f->advantage == DUMP_ADVANTAGE_RLOO) return leave_one_out(off, mean);
    if (!advantage_divides(t->f)) return off;
    by = stat_deviation(spread, unbiased) + t->f->advantage_eps;
    return by == 0 ? 0 : off / by;
}

/* Whether the document is in a whole stride. Packages differ in what they do with the rest. */
static inline int advantage_has_stride(const reward_table *t, int64_t i) {
    int64_t stride = ((const advantage_step *)t->own)->stride;
    return stride && stat_at(t, OF_STRIDE, i)->count == (double)stride;
}

static inline double advantage_of(const reward_table *t, int64_t i, int way) {
    int scope = advantage_ways[way].scope;
    int64_t rows = t->f->world / t->f->sp * t->f->accumulation;
    /* A step of one row has no smaller scope, so the mistake cannot be made. */
    if ((scope == OF_REPLICA || scope == OF_ROW) && rows == 1) return NAN;
    if (scope == OF_STRIDE && !advantage_has_stride(t, i)) return NAN;
    return advantage_by(t, reward_of(t->s, i, scope), stat_at(t, scope, i),
                        stat_at(t, scope, i), advantage_ways[way].unbiased);
}

/* The accepted variant: the mean of the others where the metadata say the mean of all, and the
   reverse. With a division there is no variant. */
static inline double advantage_other_mean(const reward_table *t, int64_t i) {
    const reward_stat *s = stat_at(t, OF_GROUP, i);
    double off = t->s->of[i].reward - s->mean;
    if (advantage_divides(t->f)) return advantage_of(t, i, ADVANTAGE_RIGHT);
    return t->f->advantage == DUMP_ADVANTAGE_RLOO ? off : leave_one_out(off, s);
}

static inline double advantage_base(const reward_table *t, int64_t i, int base) {
    double reward = t->s->of[i].reward;
    return base == BASE_RIGHT  ? advantage_of(t, i, ADVANTAGE_RIGHT)
           : base == BASE_MEAN ? reward - stat_at(t, OF_GROUP, i)->mean
                               : reward;
}

/* Index of the statistics that whiten the tokens of document i on member r. */
static inline int64_t white_at(const reward_table *t, int64_t i, int64_t r, int whitening) {
    const document *o = &t->s->of[i];
    int64_t rank = o->dp * t->f->sp + r, dp = t->f->world / t->f->sp;
    return whitening == WHITE_STEP         ? 0
           : whitening == WHITE_RANK       ? rank
           : whitening == WHITE_RANK_MICRO ? o->micro * t->f->world + rank
           : whitening == WHITE_REPLICA    ? o->dp
                                           : o->micro * dp + o->dp;
}

static inline double advantage_whitened(const reward_table *t, int64_t i, int64_t r, int n) {
    const advantage_step *a = (const advantage_step *)t->own;
    int unbiased = n % 2, whitening = n / 2 % WHITENINGS, base = n / 2 / WHITENINGS;
    const reward_stat *s = &a->white[base][whitening][white_at(t, i, r, whitening)];
    double deviation = stat_deviation(s, unbiased);
    if (whitening != WHITE_STEP && t->f->world == 1 && t->f->accumulation == 1) return NAN;
    return deviation > 1e-6 ? (advantage_base(t, i, base) - s->mean) / deviation : 0;
}

static inline double advantage_way(const reward_table *t, int64_t i, int64_t r, int way) {
    double right, deviation;
    int64_t beside;
    if (way >= ADVANTAGE_WHITENED) return advantage_whitened(t, i, r, way - ADVANTAGE_WHITENED);
    if (way == ADVANTAGE_LEAVE_ONE_OUT) return advantage_other_mean(t, i);
    if (way == ADVANTAGE_NEXT || way == ADVANTAGE_PREVIOUS) {
        beside = document_beside(t->s, i, way == ADVANTAGE_NEXT ? 1 : -1);
        return beside < 0 ? NAN : advantage_of(t, beside, ADVANTAGE_RIGHT);
    }
    if (way == ADVANTAGE_BATCH_DEVIATION || way == ADVANTAGE_BATCH_DEVIATION_UNBIASED) {
        if (!advantage_divides(t->f)) return NAN;
        deviation = stat_deviation(stat_at(t, OF_BATCH, i), advantage_ways[way].unbiased);
        right = t->s->of[i].reward - stat_at(t, OF_GROUP, i)->mean;
        return right / (deviation + t->f->advantage_eps);
    }
    if (way == ADVANTAGE_NO_DEVIATION)
        return advantage_divides(t->f) ? advantage_base(t, i, BASE_MEAN) : NAN;
    return advantage_of(t, i, way);
}

static inline int advantage_beside(int way) {
    return way < ADVANTAGE_WHITENED && advantage_ways[way].unbiased ? ADVANTAGE_UNBIASED
                                                                    : ADVANTAGE_RIGHT;
}

/* How far rounded rewards may move an advantage. */
static inline double advantage_slack(const reward_table *t, int64_t i) {
    const reward_stat *s = stat_at(t, OF_GROUP, i);
    double by = advantage_divides(t->f) ? stat_deviation(s, 0) + t->f->advantage_eps : 1;
    return 4 * t->s->unit.rewards * s->largest / by;
}

static inline int advantage_range(const reward_table *t, int64_t i, int64_t r, double *low,
                                  double *high) {
    const document_part *p = &t->s->part[i * t->s->sp + r];
    *low = p->low;
    *high = p->high;
    return p->tokens > 0;
}

/* ---- whitening ---- */

static inline int64_t white_alloc(const dump_facts *f, int whitening) {
    int64_t dp = f->world / f->sp;
    return whitening == WHITE_STEP         ? 1
           : whitening == WHITE_RANK       ? f->world
           : whitening == WHITE_RANK_MICRO ? f->world * f->accumulation
           : whitening == WHITE_REPLICA    ? dp
                                           : dp * f->accumulation;
}

/* Adds up values over tokens, or squared deviations. A document's tokens all have one value, so
   it counts `tokens` times. */
static inline void white_add(const reward_table *t, int base, int whitening, int squares) {
    const advantage_step *a = (const advantage_step *)t->own;
    for (int64_t n = 0; n < t->s->count * t->s->sp; n++) {
        int64_t i = n / t->s->sp, r = n % t->s->sp;
        reward_stat *s = &a->white[base][whitening][white_at(t, i, r, whitening)];
        double tokens = t->s->part[n].tokens, x = tokens > 0 ? advantage_base(t, i, base) : 0;
        if (squares) {
            s->squares += tokens * square(x - s->mean);
        } else {
            s->mean += tokens * x;
            s->count += tokens;
        }
    }
}

/* 0, or -1: no memory. */
static inline int white_fill(advantage_step *a, const reward_table *t) {
    for (int n = 0; n < BASES * WHITENINGS; n++) {
        int base = n / WHITENINGS, whitening = n % WHITENINGS;
        int64_t room = white_alloc(t->f, whitening);
        reward_stat *s = (reward_stat *)calloc((size_t)room, sizeof *s);
        a->white[base][whitening] = s;
        if (!s) return -1;
        white_add(t, base, whitening, 0);
        for (int64_t g = 0; g < room; g++)
            if (s[g].count > 0) s[g].mean /= s[g].count;
        white_add(t, base, whitening, 1);
    }
    return 0;
}

/* ---- setup and verdict ---- */

static inline void advantages_name_ways(advantage_step *a, const dump_facts *f) {
    for (int way = 0; way < ADVANTAGE_WAYS; way++) {
        int whitening = (way - ADVANTAGE_WHITENED) / 2 % WHITENINGS;
        a->ways[way] = way < ADVANTAGE_WHITENED
                           ? (reward_way){advantage_ways[way].name, advantage_ways[way].how}
                           : (reward_way){whitening == WHITE_STEP ? NULL : "whitened_by_rank",
                                          whitening_texts[whitening]};
    }
    if (f->advantage == DUMP_ADVANTAGE_RLOO)
        a->ways[ADVANTAGE_LEAVE_ONE_OUT].how = "the response itself is in the baseline's mean, "
                                               "too: no mistake of sequence parallelism";
}

static inline void advantages_free(advantage_step *a) {
    free(a->stat);
    for (int n = 0; n < BASES * WHITENINGS; n++) free(a->white[n / WHITENINGS][n % WHITENINGS]);
}

/* 0, or -1: no memory. a is to be freed in either case. */
static inline int advantages_begin(advantage_step *a, reward_table *t, const step_documents *s,
                                   const dump_facts *f, double tolerance) {
    memset(a, 0, sizeof *a);
    *t = (reward_table){.s = s,
                        .f = f,
                        .members = s->sp,
                        .tolerance = tolerance,
                        .unit = s->unit.advantages,
                        .way = advantage_way,
                        .slack = advantage_slack,
                        .beside = advantage_beside,
                        .range = advantage_range,
                        .own = a};
    if (groups_fill(a, s) || white_fill(a, t)) return -1;
    advantages_name_ways(a, f);
    t->floor = 0.1 * tolerance * rewards_size(t);
    return 0;
}

/* The first way without a mistake's name that gives the dump's advantages; -1: none. */
static inline int advantages_accepted(const reward_table *t, const advantage_step *a) {
    for (int way = 0; way < ADVANTAGE_WAYS; way++)
        if (!a->ways[way].name && rewards_off(t, way, NULL) <= 1) return way;
    return -1;
}

/* What a group's documents have instead of the right advantages. */
typedef struct alike_seen {
    int64_t groups_off; /* documents of groups with equal rewards that have another number */
    int64_t others_off; /* of other groups */
    int64_t alone_own;  /* of a group of one, whose number is its reward */
    double worst;       /* of groups_off */
} alike_seen;

static inline void alike_see(const reward_table *t, int64_t i, int64_t r, alike_seen *seen) {
    const reward_stat *s = stat_at(t, OF_GROUP, i);
    double low, high, want = advantage_of(t, i, ADVANTAGE_RIGHT);
    double limit = reward_limit(t, i, want), reward = t->s->of[i].reward;
    int off, alike = sqrt(s->squares) <= 1e-6 * s->largest;
    if (!t->range(t, i, r, &low, &high)) return;
    off = !(fabs(low - want) <= limit && fabs(high - want) <= limit);
    if (s->count == 1 && off && fabs(low - reward) <= limit && fabs(high - reward) <= limit)
        seen->alone_own++;
    else if (!alike)
        seen->others_off += off;
    else if (off && fabs(low - high) <= limit)
        seen->groups_off++, seen->worst = fabs(low) > fabs(seen->worst) ? low : seen->worst;
}

/* Groups in which nothing differs have no deviation: what is divided by it then is rounding. */
static inline void name_alike(const reward_table *t, verdict *v) {
    alike_seen seen = {0};
    for (int64_t n = 0; n < t->s->count * t->members; n++)
        alike_see(t, n / t->members, n % t->members, &seen);
    if (seen.others_off) return;
    if (seen.groups_off) {
        verdict_name(v, mistake_named("deviation_by_cancellation"));
        verdict_say(v, "groups whose rewards are all equal have advantages up to %.6g",
                    seen.worst);
    }
    if (seen.alone_own)
        verdict_say(v, "groups of one response have their reward as advantage: a mean of 0 "
                       "and a deviation of 1 for them give it");
}

static inline void judge_advantages(verdict *v, const reward_table *t,
                                    const advantage_step *a) {
    int64_t count = rewards_begin(t, "advantages", v);
    int way;
    if (!count) return;
    way = advantages_accepted(t, a);
    v->kind = way >= 0                         ? VERDICT_RIGHT
              : rewards_off(t, 0, NULL) <= 1.5 ? VERDICT_MARGINAL
                                               : VERDICT_WRONG;
    if (v->kind == VERDICT_WRONG) rewards_name(t, a->ways, ADVANTAGE_WAYS, v);
    if (v->kind == VERDICT_WRONG && !v->count) name_alike(t, v);
    if (v->kind == VERDICT_RIGHT &&
        !rewards_any_shows(t, a->ways, ADVANTAGE_RIGHT + 1, ADVANTAGE_WHITENED)) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, "rewards are so alike that no mistake would show; dump a step whose "
                       "groups have unequal rewards");
    } else if (v->kind == VERDICT_RIGHT) {
        verdict_say(v, "what documents' rewards and groups give");
        if (way > 0) verdict_say(v, "%s", a->ways[way].how);
        rewards_try(t, a->ways, ADVANTAGE_WAYS, v);
    }
    rewards_say_limit(t, v);
}
#endif
