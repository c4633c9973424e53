/* SPDX-License-Identifier: MIT OR Unlicense */
/* factors.h - gradients that are multiples of the wanted ones: one factor on all tensors, or
 * different factors on groups of tensors. */
#ifndef ORACLE_FACTORS_H
#define ORACLE_FACTORS_H
#include "gradient_pairs.h"
#include "oracle/verdict/law.h"

enum { FACTOR_GROUPS = 4, FACTOR_SHOWS = 8 }; /* SHOWS: fewer elements may fit by chance */
typedef struct factor_group {
    likeness like; /* of its tensors together */
    int64_t count;
} factor_group;

typedef struct factor_groups {
    factor_group of[FACTOR_GROUPS + 1]; /* 0: tensors that are right */
    int count;                          /* groups, without group 0 */
    int64_t rest;                       /* tensors in no group, see group_factors */
} factor_groups;

/* law.noise is the error of the factor. The relative residual bounds it: noise that is
   independent of the gradient changes the factor by less than the noise's own length. */
static inline law factor_law(const gradient_check *c, const likeness *like) {
    double distance = distance_from(like, likeness_factor(like));
    return (law){.got = likeness_factor(like),
                 .want = 1,
                 .sp = c->d->sp,
                 .dp = c->d->world / c->d->sp,
                 .accumulation = c->d->accumulation,
                 .tolerance = c->tolerance,
                 .noise = distance > 1e-3 ? distance : 1e-3};
}

static inline void judge_factor(gradient_check *c) {
    law l = factor_law(c, &c->all);
    c->s->judged = 1;
    law_judge(&l, &c->s->v);
    if (c->s->v.kind == VERDICT_RIGHT) law_try_factors(&l, &c->s->v);
}

/* A mistake explains the gradient up to a factor. If just one mistake gives the factor, names
   it, too. */
static inline void name_way_factor(const gradient_check *c, verdict *v) {
    law l = factor_law(c, &c->all);
    verdict one;
    l.got = c->way_factor;
    law_judge(&l, &one);
    if (one.kind != VERDICT_WRONG || one.count != 1) return;
    verdict_name(v, one.named[0]);
    v->all = v->count > 1;
}

static inline void names_take(verdict *v, const verdict *from) {
    for (int i = 0; i < from->count; i++) verdict_name(v, from->named[i]);
    v->all = from->all;
}

/* ---- different factors on groups of tensors ---- */

static inline int is_multiple(const gradient_check *c, int64_t i, double factor) {
    return distance_from(&c->each[i].like, factor) <= c->tolerance;
}

static inline void factor_group_add(gradient_check *c, factor_groups *g, int64_t i, int group) {
    c->each[i].group = group;
    g->of[group].count++;
    likeness_add(&g->of[group].like, &c->each[i].like);
}

/* Puts each tensor into the group of its factor. group -1: no multiple, a factor beyond the
   first FACTOR_GROUPS, or all zeros, which would be a factor of 0. */
static inline void group_factors(gradient_check *c, factor_groups *g) {
    memset(g, 0, sizeof *g);
    for (int64_t i = 0; i < c->n; i++) {
        c->each[i].group = -1;
        if (is_multiple(c, i, 1)) factor_group_add(c, g, i, 0);
    }
    for (int64_t i = 0; i < c->n && g->count < FACTOR_GROUPS; i++) {
        double factor = likeness_factor(&c->each[i].like);
        if (c->each[i].group >= 0 || c->each[i].like.got_got == 0 || factor == 0 ||
            !is_multiple(c, i, factor))
            continue;
        g->count++;
        for (int64_t k = i; k < c->n; k++)
            if (c->each[k].group < 0 && is_multiple(c, k, factor))
                factor_group_add(c, g, k, g->count);
    }
    for (int64_t i = 0; i < c->n; i++) g->rest += c->each[i].group < 0;
}

/* ---- names of a group's tensors ---- */

/* Is `part` a component of the name between dots, such as layers or q_proj? */
static inline int has_part(const char *name, const char *part, size_t length) {
    while (*name) {
        size_t own = strcspn(name, ".");
        if (own == length && !strncmp(name, part, length)) return 1;
        name += own + (name[own] == '.');
    }
    return 0;
}

/* Is the component in the names of at least two tensors, and are all of these in the group? */
static inline int part_is_of_group(const gradient_check *c, const char *part, size_t length,
                                   int group) {
    int64_t count = 0;
    for (int64_t i = 0; i < c->n; i++) {
        if (!has_part(c->each[i].name, part, length)) continue;
        if (c->each[i].group != group) return 0;
        count++;
    }
    return count > 1;
}

/* The first component of tensor i's name that is not a number and that only tensors of its
   group have; NULL: none. */
static inline const char *part_of_group(const gradient_check *c, int64_t i, size_t *length) {
    const char *name = c->each[i].name;
    while (*name) {
        int number = *name >= '0' && *name <= '9';
        *length = strcspn(name, ".");
        if (!number && part_is_of_group(c, name, *length, c->each[i].group)) return name;
        name += *length + (name[*length] == '.');
    }
    return NULL;
}

/* "all of q_proj, all of k_proj, grad.embed and 3 more" */
static inline void group_text(const gradient_check *c, int group, char *text, size_t size) {
    int64_t left = 0;
    *text = 0;
    for (int64_t i = 0; i < c->n; i++) {
        size_t part = 0, room = strlen(text);
        const char *name = c->each[i].group == group ? part_of_group(c, i, &part) : NULL;
        char word[160];
        if (c->each[i].group != group) continue;
        if (name)
            snprintf(word, sizeof word, "all of %.*s", (int)part, name);
        else
            snprintf(word, sizeof word, "%.120s", c->each[i].name);
        if (name && strstr(text, word)) continue;
        if (room + strlen(word) + 20 > size)
            left++;
        else
            snprintf(text + room, size - room, "%s%s", room ? ", " : "", word);
    }
    if (left)
        snprintf(text + strlen(text), size - strlen(text), " and %lld more", (long long)left);
}

static inline int group_is_of(const gradient_check *c, int group, const char *const *words) {
    for (int64_t i = 0; i < c->n; i++) {
        int has = 0;
        for (int k = 0; words[k]; k++) has |= strstr(c->each[i].name, words[k]) != NULL;
        if (c->each[i].group == group && !has) return 0;
    }
    return 1;
}

/* ---- verdict ---- */

/* Names in v the mistakes that give the group's factor. v->all is set if it takes two of them
   together. */
static inline void name_group(const gradient_check *c, const factor_group *g, int group,
                              verdict *v) {
    static const char *const of_keys[] = {"k_proj", "v_proj", "kv", NULL};
    law l = factor_law(c, &g->like);
    verdict own;
    double shares = 1 / l.got;
    if (l.noise < l.tolerance) l.tolerance = l.noise;
    law_judge(&l, &own);
    if (own.kind == VERDICT_WRONG)
        for (int i = 0; i < own.count; i++) verdict_name(v, own.named[i]);
    v->all = own.all;
    if (shares > 1.5 && fabs(shares - round(shares)) < l.tolerance * shares &&
        group_is_of(c, group, of_keys) && !v->all)
        verdict_name(v, mistake_named("kv_group_not_summed"));
}

static inline int group_shows(const gradient_check *c, int group) {
    int64_t count = 0;
    for (int64_t i = 0; i < c->n; i++)
        if (c->each[i].group == group) count += c->each[i].count;
    return count >= FACTOR_SHOWS;
}

/* Names the mistakes of all groups. With one group, they may be alternatives. With several
   groups, each group has its own mistake, so each needs exactly one explanation; else nothing
   is named. */
static inline void name_groups(const gradient_check *c, const factor_groups *g, verdict *v) {
    for (int group = 1; group <= g->count; group++) {
        verdict one = {.count = 0};
        name_group(c, &g->of[group], group, &one);
        if (!one.count || !group_shows(c, group) ||
            (g->count > 1 && one.count > 1 && !one.all)) {
            v->count = 0;
            return;
        }
        v->all = one.all || g->count > 1;
        for (int i = 0; i < one.count; i++) verdict_name(v, one.named[i]);
    }
}

static inline void say_group(const gradient_check *c, const factor_groups *g, int group,
                             verdict *v) {
    char text[200];
    group_text(c, group, text, sizeof text);
    verdict_say(v, "x %.6g on %lld of %lld tensors: %s", likeness_factor(&g->of[group].like),
                (long long)g->of[group].count, (long long)c->n, text);
}

/* Which is the first in the file that no factor explains? */
static inline void say_rest(const gradient_check *c, const factor_groups *g, verdict *v) {
    double factor = g->count ? likeness_factor(&g->of[1].like) : 1;
    for (int64_t i = 0; i < c->n; i++) {
        double distance = distance_from(&c->each[i].like, 1), other;
        if (c->each[i].group >= 0) continue;
        other = distance_from(&c->each[i].like, factor);
        if (c->each[i].like.got_got == 0)
            verdict_say(v, "the first in the file without a factor is %.100s, which is 0",
                        c->each[i].name);
        else
            verdict_say(v, "the first in the file without a factor is %.100s, %.3g away",
                        c->each[i].name, other < distance ? other : distance);
        return;
    }
}

/* No single factor explains all tensors: finds several factors and the tensors of each. */
static inline void judge_factors(gradient_check *c) {
    verdict *v = stage_begin(c->s, VERDICT_WRONG);
    factor_groups g;
    group_factors(c, &g);
    verdict_say(v, "%lld of %lld tensors are the wanted ones within %g%s",
                (long long)g.of[0].count, (long long)c->n, c->tolerance,
                g.rest ? "" : ", all others times a factor");
    for (int group = 1; group <= g.count; group++) say_group(c, &g, group, v);
    if (g.rest)
        say_rest(c, &g, v);
    else
        name_groups(c, &g, v);
}

/* Judges tensors too small to show in the distance over all. A factor is wrong only if a
   mistake gives it or it is far from 1, because rounding bias can be parallel to a gradient. A
   tensor that is no multiple may have a gradient that cancels down to rounding. */
static inline void judge_small_ones(gradient_check *c) {
    factor_groups g;
    int wrong = 0;
    group_factors(c, &g);
    for (int group = 1; group <= g.count && !wrong; group++) {
        verdict one = {.kind = VERDICT_WRONG};
        double off = fabs(likeness_factor(&g.of[group].like) - 1);
        name_group(c, &g.of[group], group, &one);
        wrong = group_shows(c, group) && (one.count || off > 10 * c->tolerance);
        if (!wrong) continue;
        say_group(c, &g, group, &one);
        verdict_say(&one, "the others are right; these are too small to show in all together");
        c->s->v = one;
    }
    if (!wrong && g.of[0].count < c->n)
        verdict_say(&c->s->v,
                    "%lld small tensors are farther than the tolerance by "
                    "themselves: rounding, where gradients cancel",
                    (long long)(c->n - g.of[0].count));
}
#endif
