/* SPDX-License-Identifier: MIT OR Unlicense */
/* gae.h - generalised advantage estimation, token by token. At tokens without a label V = r =
 * 0. After a document's last token V = A = 0:
 *
 *     delta_t = r_t + gamma V_{t+1} - V_t
 *     A_t     = delta_t + gamma lambda A_{t+1}          G_t = A_t + V_t
 *
 * r is token_rewards, or the document's reward at its last supervised token. To skip tokens
 * without a label is no mistake, either. A may then be whitened over all supervised tokens of
 * the step; to whiten over one rank's or one replica's tokens is a mistake. */
#ifndef ORACLE_GAE_H
#define ORACLE_GAE_H
#include "oracle/verdict/tell_apart.h"
#include "rewards.h"

enum {
    GAE_RIGHT,
    GAE_PASSED_OVER, /* no mistake, either */
    GAE_OWN,         /* from here on: mistakes */
    GAE_RESTARTED,
    GAE_RESTARTED_ALL,
    GAE_NO_VALUE,
    GAE_ACROSS,
    GAE_REWARD_EVERY,
    GAE_REWARD_LAST,
    GAE_REWARD_END, /* from here on: mistakes that one rank can make, too */
    GAE_REWARD_LOST,
    GAE_MASKED_VALUES,
    GAE_MASKED_INSIDE,
    GAE_MASKED_REWARDS,
    GAE_MASKED_BOTH,
    GAE_MASKED_RESTART,
    GAE_WAYS
};
static const reward_way gae_ways[GAE_WAYS] = {
    {NULL, NULL},
    {NULL, "tokens without a label are passed over: no mistake"},
    {"gae_of_own_tokens", NULL},
    {"gae_restarted_at_cut", NULL},
    {"gae_restarted_at_cut", "the value behind the cut is lost, too"},
    {"value_lost_at_cut", NULL},
    {"gae_across_documents", NULL},
    {"reward_on_every_rank", NULL},
    {"reward_on_wrong_rank", NULL},
    {"reward_on_masked_token", "the document's last token has it"},
    {"reward_on_masked_token", "the document's last token has it, and a mask removes it"},
    {"gae_over_masked_tokens", "their values enter"},
    {"gae_over_masked_tokens", "their values enter, up to the last token with a label"},
    {"gae_over_masked_tokens", "their rewards enter"},
    {"gae_over_masked_tokens", "their values and rewards enter"},
    {"gae_restarted_at_mask", NULL}};

/* The tokens over which A is whitened. The first two, none and all of the step, are right. */
enum {
    GAE_AS_IT_IS,
    GAE_OF_STEP,
    GAE_OF_RANK,
    GAE_OF_RANK_MICRO,
    GAE_OF_REPLICA,
    GAE_OF_REPLICA_MICRO,
    GAE_WHITENINGS
};
static const char *const gae_white_texts[GAE_WHITENINGS] = {
    NULL,
    "whitened over all supervised tokens of the step",
    "over the tokens of each rank",
    "over the tokens of each rank's micro-batch",
    "over the tokens of each replica",
    "over the tokens of each replica's micro-batch"};

typedef struct gae_token {
    double way[GAE_WAYS], got, value, returns; /* way: A; NaN: not computed or not dumped */
    double slack;                              /* how far rounded V and r may move A */
    int64_t rank, local, micro, document, token;
} gae_token;

typedef struct gae_step {
    const dump_facts *f;
    gae_token *of; /* (count) supervised tokens */
    int64_t count;
    double tolerance, unit;
    int has_returns, lacks;
    const char *what;             /* name of the numbers being judged */
    int returns;                  /* 1: these are returns, 0: advantages */
    double *mean, *deviation, *n; /* (groups) statistics that gae_whiten computes */
} gae_step;

/* ---- recursions ---- */

static inline int gae_row_has(const dump_row *row) {
    return row->docs && row->labels && row->values && row->advantages &&
           (row->token_rewards || row->rewards);
}

/* The document's last supervised token on this rank; on any if rank is -1. Returns -1: none. */
static inline int64_t gae_last(const dump_row *row, int64_t begin, int64_t end, int64_t rank) {
    for (int64_t t = end - 1; t >= begin; t--)
        if (row_supervised(row, t) && (rank < 0 || row->rank[t] == rank)) return t;
    return -1;
}

static inline int64_t gae_highest_rank(const dump_row *row, int64_t begin, int64_t end) {
    int64_t highest = -1;
    for (int64_t t = begin; t < end; t++)
        if (row_supervised(row, t) && row->rank[t] > highest) highest = row->rank[t];
    return highest;
}

/* The token's r. The way decides which token has the document's reward, and whether tokens
   without a label have one. */
static inline double gae_reward(const dump_row *row, int64_t t, int64_t document, int way) {
    int64_t begin = row->cu_seqlens[document], end = row->cu_seqlens[document + 1], at;
    int masked = way == GAE_MASKED_REWARDS || way == GAE_MASKED_BOTH || way == GAE_REWARD_END;
    if (!row_supervised(row, t) && !masked) return 0;
    if (row->token_rewards) return row->token_rewards[t];
    at = way == GAE_REWARD_EVERY  ? gae_last(row, begin, end, row->rank[t])
         : way == GAE_REWARD_LAST ? gae_last(row, begin, end, gae_highest_rank(row, begin, end))
         : way == GAE_REWARD_END || way == GAE_REWARD_LOST ? end - 1
                                                           : gae_last(row, begin, end, -1);
    return at == t ? row->rewards[document] : 0;
}

/* The token's V. last: the document's last supervised token. */
static inline double gae_value(const dump_row *row, int64_t t, int64_t last, int way) {
    int masked = way == GAE_MASKED_VALUES || way == GAE_MASKED_BOTH ||
                 (way == GAE_MASKED_INSIDE && t < last);
    return masked || row_supervised(row, t) ? row->values[t] : 0;
}

/* State of the recursion: A and V of the following token, and its rank; -1: there is none. */
typedef struct gae_state {
    double advantage, value;
    int64_t rank;
} gae_state;

static inline void gae_cut(gae_state *s, int way) {
    if (way == GAE_RESTARTED || way == GAE_RESTARTED_ALL) s->advantage = 0;
    if (way == GAE_NO_VALUE || way == GAE_RESTARTED_ALL) s->value = 0;
}

/* Runs the recursion over a document's tokens, last to first; rank -1: over all ranks' tokens,
   else over this rank's only. */
static inline void gae_run(const gae_step *g, const dump_row *row, int64_t document,
                           int64_t rank, int way, gae_state *s, gae_token *at) {
    int64_t begin = row->cu_seqlens[document], end = row->cu_seqlens[document + 1];
    int64_t last = gae_last(row, begin, end, -1);
    for (int64_t t = end - 1; t >= begin; t--) {
        int trained = row_supervised(row, t);
        double value = gae_value(row, t, last, way);
        if (row->rank[t] < 0 || (rank >= 0 && row->rank[t] != rank)) continue;
        if (!trained && (way == GAE_PASSED_OVER || rank >= 0)) continue;
        if (s->rank >= 0 && s->rank != row->rank[t]) gae_cut(s, way);
        s->advantage = gae_reward(row, t, document, way) + g->f->gamma * s->value - value +
                       g->f->gamma * g->f->gae_lambda * s->advantage;
        s->value = value;
        s->rank = row->rank[t];
        if (!trained && way == GAE_MASKED_RESTART) s->advantage = 0;
        if (trained) at[row->gathered[t]].way[way] = s->advantage;
    }
}

/* Whether the mistake is possible: some need several ranks of a sequence, some a reward of the
   document, some token_rewards. */
static inline int gae_way_can_be(const gae_step *g, const dump_row *row, int way) {
    int of_documents = way >= GAE_REWARD_EVERY && way <= GAE_REWARD_LOST;
    int of_tokens = way == GAE_MASKED_REWARDS || way == GAE_MASKED_BOTH;
    if (row->token_rewards ? of_documents : of_tokens) return 0;
    return g->f->sp > 1 || way < GAE_OWN || way == GAE_ACROSS || way >= GAE_REWARD_END;
}

/* at: (tokens) of the row, indexed by row->gathered. first: the replica's first rank. */
static inline void gae_document(const gae_step *g, const dump_row *row, int64_t document,
                                int64_t first, gae_state *across, gae_token *at) {
    for (int way = 0; way < GAE_WAYS; way++) {
        gae_state state = {0, 0, -1};
        if (!gae_way_can_be(g, row, way)) continue;
        if (way == GAE_OWN) {
            for (int64_t r = 0; r < g->f->sp; r++) {
                state = (gae_state){0, 0, -1};
                gae_run(g, row, document, first + r, way, &state, at);
            }
        } else {
            gae_run(g, row, document, -1, way, way == GAE_ACROSS ? across : &state, at);
        }
    }
}

/* How far rounded V and r may move A: in A, all V together have weight 2 at most, each r 1. */
static inline double gae_slack(const dump_row *row, int64_t document) {
    double value = 0, rewards = 0;
    for (int64_t t = row->cu_seqlens[document]; t < row->cu_seqlens[document + 1]; t++) {
        if (!row_supervised(row, t)) continue;
        value = fmax(value, fabs(row->values[t]));
        if (row->token_rewards)
            rewards += row->unit.token_rewards * fabs(row->token_rewards[t]);
    }
    if (!row->token_rewards) rewards = row->unit.rewards * fabs(row->rewards[document]);
    return 2 * row->unit.values * value + rewards;
}

static inline void gae_fill(gae_token *k, const dump_row *row, int64_t t, int64_t micro) {
    for (int way = 0; way < GAE_WAYS; way++) k->way[way] = NAN;
    k->got = row->advantages[t];
    k->value = row->values[t];
    k->returns = row->returns ? row->returns[t] : NAN;
    k->rank = row->rank[t];
    k->local = row->local[t];
    k->micro = micro;
    k->token = t;
    k->document = row_document(row, t);
}

/* Gives the document's supervised tokens its slack. */
static inline void gae_fill_slack(gae_token *all, const dump_row *row, int64_t document) {
    double slack = gae_slack(row, document);
    for (int64_t t = row->cu_seqlens[document]; t < row->cu_seqlens[document + 1]; t++)
        if (row->rank[t] >= 0 && row_supervised(row, t)) all[row->gathered[t]].slack = slack;
}

/* Appends the row's supervised tokens to g->of. all: indexed by row->gathered. */
static inline void gae_keep(gae_step *g, const dump_row *row, const gae_token *all) {
    for (int64_t i = 0; i < row->tokens; i++) {
        int64_t t = row->order[i];
        if (t >= 0 && t < row_end(row) && row_supervised(row, t)) g->of[g->count++] = all[i];
    }
}

/* 0, or -1: no memory. */
static inline int gae_add_row(gae_step *g, const dump_row *row, int64_t dp, int64_t micro) {
    gae_token *all, *of;
    gae_state across = {0, 0, -1};
    g->lacks |= row->rank && !gae_row_has(row);
    if (!row->rank || g->lacks) return 0;
    all = (gae_token *)calloc((size_t)row->tokens + 1, sizeof *all);
    of = (gae_token *)realloc(g->of, (size_t)(g->count + row->tokens + 1) * sizeof *of);
    if (of) g->of = of;
    if (!all || !of) {
        free(all);
        return -1;
    }
    for (int64_t t = 0; t < row->tokens; t++)
        if (row->rank[t] >= 0) gae_fill(&all[row->gathered[t]], row, t, micro);
    for (int64_t d = row->docs - 1; d >= 0; d--) {
        gae_fill_slack(all, row, d);
        gae_document(g, row, d, dp * g->f->sp, &across, all);
    }
    g->unit = fmax(g->unit, fmax(row->unit.advantages, row->unit.returns));
    g->has_returns = g->has_returns && row->returns;
    gae_keep(g, row, all);
    free(all);
    return 0;
}

/* ---- whitening ---- */

static inline int64_t gae_group(const gae_step *g, const gae_token *k, int whitening) {
    int64_t dp = k->rank / g->f->sp;
    return whitening == GAE_OF_RANK            ? k->rank
           : whitening == GAE_OF_RANK_MICRO    ? k->micro * g->f->world + k->rank
           : whitening == GAE_OF_REPLICA       ? dp
           : whitening == GAE_OF_REPLICA_MICRO ? k->micro * (g->f->world / g->f->sp) + dp
                                               : 0;
}

/* Computes each group's mean and deviation of A; unbiased 1: divides by n - 1. */
static inline void gae_whiten(gae_step *g, int way, int whitening, int unbiased) {
    int64_t groups = g->f->world * g->f->accumulation;
    memset(g->mean, 0, (size_t)(3 * groups) * sizeof *g->mean);
    for (int64_t i = 0; i < g->count; i++) {
        int64_t at = gae_group(g, &g->of[i], whitening);
        g->mean[at] += g->of[i].way[way];
        g->n[at]++;
    }
    for (int64_t at = 0; at < groups; at++)
        if (g->n[at] > 0) g->mean[at] /= g->n[at];
    for (int64_t i = 0; i < g->count; i++) {
        int64_t at = gae_group(g, &g->of[i], whitening);
        g->deviation[at] += square(g->of[i].way[way] - g->mean[at]);
    }
    for (int64_t at = 0; at < groups; at++) {
        double n = g->n[at] - unbiased;
        g->deviation[at] = n > 0 ? sqrt(g->deviation[at] / n) : 0;
    }
}

/* The token's number by this way; call gae_whiten first. *by: whitening divides by it, so the
   caller divides the token's slack by it, too. */
static inline double gae_want(const gae_step *g, const gae_token *k, int way, int whitening,
                              double *by) {
    int64_t at = gae_group(g, k, whitening);
    double x = k->way[way];
    *by = 1;
    if (g->returns) return x + k->value;
    if (whitening == GAE_AS_IT_IS) return x;
    if (g->deviation[at] > 1e-8) *by = g->deviation[at];
    return g->deviation[at] > 1e-8 ? (x - g->mean[at]) / *by : 0;
}

static inline double gae_size(const gae_step *g, int way, int whitening) {
    double sum = 0, by;
    for (int64_t i = 0; i < g->count; i++)
        sum += square(gae_want(g, &g->of[i], way, whitening, &by));
    return g->count ? sqrt(sum / (double)g->count) : 0;
}

/* The largest difference between the dump and the way, in units of the limit. NaN: the way
   cannot be computed here. *first: the first token beyond its limit. */
static inline double gae_off(gae_step *g, int way, int whitening, int unbiased,
                             const gae_token **first) {
    double worst = 0, size;
    gae_whiten(g, way, whitening, unbiased);
    size = gae_size(g, way, whitening);
    for (int64_t i = 0; i < g->count; i++) {
        const gae_token *k = &g->of[i];
        double by, want = gae_want(g, k, way, whitening, &by), off;
        double got = g->returns ? k->returns : k->got;
        double limit = (g->tolerance + 2 * g->unit) * fabs(want) + 0.1 * g->tolerance * size +
                       2 * k->slack / by;
        if (isnan(want)) return NAN;
        off = fabs(got - want) / limit;
        if (!isfinite(got)) off = INFINITY;
        if (off > 1 && !(worst > 1) && first) *first = k;
        if (off > worst) worst = off;
    }
    return worst;
}

/* Whether the way's A differs from the right A at any token. */
static inline int gae_shows(const gae_step *g, int way) {
    double size = gae_size(g, GAE_RIGHT, GAE_AS_IT_IS);
    for (int64_t i = 0; i < g->count; i++) {
        const gae_token *k = &g->of[i];
        double right = k->way[GAE_RIGHT];
        if (fabs(k->way[way] - right) > (g->tolerance + 2 * g->unit) * fabs(right) +
                                            0.1 * g->tolerance * size + 2 * k->slack)
            return 1;
    }
    return 0;
}

/* ---- the verdict ---- */

static inline void gae_name(gae_step *g, verdict *v) {
    int whitenings = g->returns ? 1 : GAE_OF_RANK;
    for (int way = GAE_OWN; way < GAE_WAYS; way++)
        for (int n = 0; n < 2 * whitenings; n++) {
            double off = gae_off(g, way, n / 2, n % 2, NULL);
            if (!(off <= 1) || !gae_shows(g, way)) continue;
            verdict_name(v, mistake_named(gae_ways[way].name));
            if (gae_ways[way].how) verdict_say(v, "%s", gae_ways[way].how);
            break;
        }
    for (int n = 2 * GAE_OF_RANK; n < 2 * GAE_WHITENINGS && !g->returns; n++) {
        if (!(gae_off(g, GAE_RIGHT, n / 2, n % 2, NULL) <= 1) || v->count) continue;
        verdict_name(v, mistake_named("whitened_by_rank"));
        verdict_say(v, "%s", gae_white_texts[n / 2]);
    }
}

/* Describes the right way that gives the dump's numbers; NULL: none does. */
static inline const char *gae_accepted(gae_step *g) {
    for (int way = GAE_RIGHT; way <= GAE_PASSED_OVER; way++)
        for (int n = 0; n < (g->returns ? 1 : 2 * GAE_OF_RANK); n++)
            if (gae_off(g, way, n / 2, n % 2, NULL) <= 1)
                return n >= 2 ? gae_white_texts[GAE_OF_STEP]
                       : way  ? gae_ways[way].how
                              : "what values and rewards give";
    return NULL;
}

/* Whether any mistake between ranks, or documents, would show. */
static inline int gae_any_shows(const gae_step *g) {
    for (int way = GAE_OWN; way < GAE_REWARD_END; way++)
        if (gae_shows(g, way)) return 1;
    return 0;
}

/* Notes which mistakes would give other numbers, of those that were computed. */
static inline void gae_try(const gae_step *g, verdict *v) {
    for (int way = GAE_OWN; way < GAE_WAYS; way++)
        if (g->count && !isnan(g->of[0].way[way]))
            verdict_try(v, gae_ways[way].name, gae_ways[way].how, gae_shows(g, way));
}

static inline void gae_say_first(gae_step *g, verdict *v) {
    const gae_token *k = NULL;
    double by, want;
    if (!(gae_off(g, GAE_RIGHT, GAE_AS_IT_IS, 0, &k) > 1) || !k) return;
    want = gae_want(g, k, GAE_RIGHT, GAE_AS_IT_IS, &by);
    verdict_say(v,
                "%s, first at rank %lld, local row %lld, token %lld, document %lld of "
                "micro-batch %lld: %.9g, right %.9g before any whitening",
                g->what, (long long)k->rank, (long long)k->local, (long long)k->token,
                (long long)k->document, (long long)k->micro, g->returns ? k->returns : k->got,
                want);
}

/* Judges advantages, or returns if `returns` is 1. If sp > 1 and no mistake would change A in
   this step, a match would prove nothing: the verdict is INSUFFICIENT. */
static inline void gae_judge(gae_step *g, verdict *v, int returns) {
    const char *accepted;
    g->returns = returns;
    g->what = returns ? "returns" : "advantages";
    memset(v, 0, sizeof *v);
    v->kind = VERDICT_INSUFFICIENT;
    for (int64_t i = 0; i < g->count; i++)
        if (!isfinite(g->of[i].way[GAE_RIGHT])) {
            verdict_say(v, "a value or a reward is NaN or Inf already");
            return;
        }
    accepted = gae_accepted(g);
    if (!g->count || (accepted && !gae_any_shows(g) && g->f->sp > 1)) {
        verdict_say(v, "no recursion that is cut between ranks would show; dump a step with "
                       "responses that several ranks hold, unequal values and rewards");
        return;
    }
    v->kind = accepted ? VERDICT_RIGHT : VERDICT_WRONG;
    if (accepted) {
        verdict_say(v, "%s of %lld tokens: %s", g->what, (long long)g->count, accepted);
        gae_try(g, v);
        return;
    }
    gae_name(g, v);
    apart_say(v);
    gae_say_first(g, v);
}

/* 0, or -1: no memory. */
static inline int gae_begin(gae_step *g, const dump_facts *f, double tolerance) {
    int64_t groups = f->world * f->accumulation;
    memset(g, 0, sizeof *g);
    g->f = f;
    g->tolerance = tolerance;
    g->has_returns = 1;
    g->mean = (double *)calloc((size_t)(3 * groups), sizeof *g->mean);
    g->deviation = g->mean ? g->mean + groups : NULL;
    g->n = g->mean ? g->mean + 2 * groups : NULL;
    return g->mean ? 0 : -1;
}

static inline void gae_free(gae_step *g) {
    free(g->of);
    free(g->mean);
}
#endif
