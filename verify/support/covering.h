/* SPDX-License-Identifier: MIT OR Unlicense */
/* covering.h - pairwise test cases: any two values of two factors occur together in a case.
   Greedy and deterministic: a case starts from a pair that no case has yet, and every other
   factor takes the value that adds most new pairs. The best of COVER_TRIES cases is kept. */
#ifndef COVERING_H
#define COVERING_H
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { COVER_FACTORS = 28, COVER_LEVELS = 6, COVER_TRIES = 12, COVER_OPEN = -1 };

typedef struct cover {
    int factors;
    const int *levels; /* (factors) how many values a factor has */
    /* can the factors that are still COVER_OPEN be chosen so that the case is allowed? */
    int (*possible)(const int *level);
    uint64_t draw;
    unsigned char met[COVER_FACTORS][COVER_LEVELS][COVER_FACTORS][COVER_LEVELS];
} cover;

/* A value each of two factors, factor[0] < factor[1]. */
typedef struct cover_pair {
    int factor[2], level[2];
} cover_pair;

/* Steps to the next pair; all zero is the start, before the first. 0: no pair is left. */
static inline int cover_next(const cover *c, cover_pair *p) {
    if (p->factor[1] && ++p->level[1] < c->levels[p->factor[1]]) return 1;
    p->level[1] = 0;
    if (p->factor[1] && ++p->level[0] < c->levels[p->factor[0]]) return 1;
    p->level[0] = 0;
    if (++p->factor[1] < c->factors) return 1;
    p->factor[1] = ++p->factor[0] + 1;
    return p->factor[1] < c->factors;
}

static inline void cover_pair_set(const cover_pair *p, int factors, int *level) {
    for (int f = 0; f < factors; f++) level[f] = COVER_OPEN;
    level[p->factor[0]] = p->level[0];
    level[p->factor[1]] = p->level[1];
}

static inline int cover_pair_possible(const cover *c, const cover_pair *p) {
    int level[COVER_FACTORS];
    cover_pair_set(p, c->factors, level);
    return c->possible(level);
}

static inline int cover_met(const cover *c, const cover_pair *p) {
    return c->met[p->factor[0]][p->level[0]][p->factor[1]][p->level[1]];
}

static inline void cover_meet(cover *c, const int *level) {
    for (int f = 0; f < c->factors; f++)
        for (int g = 0; g < c->factors; g++) c->met[f][level[f]][g][level[g]] = 1;
}

static inline uint64_t cover_draw(cover *c) {
    c->draw = c->draw * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return c->draw >> 33;
}

/* New pairs of this value with those that are chosen. */
static inline int cover_gain(const cover *c, const int *level, int factor, int value) {
    int gain = 0;
    for (int f = 0; f < c->factors; f++)
        gain += f != factor && level[f] != COVER_OPEN && !c->met[factor][value][f][level[f]];
    return gain;
}

/* Chooses the factor's value; the new pairs that it brings. */
static inline int cover_choose(cover *c, int *level, int factor) {
    int best = COVER_OPEN, most = -1, count = c->levels[factor];
    int first = (int)(cover_draw(c) % (uint64_t)count);
    for (int i = 0; i < count; i++) {
        int value = (first + i) % count, gain = cover_gain(c, level, factor, value);
        level[factor] = value;
        if (gain > most && c->possible(level)) best = value, most = gain;
        level[factor] = COVER_OPEN;
    }
    level[factor] = best;
    return most;
}

/* Completes a case that holds the pair, factors in random order; returns how many new pairs
   the case has. */
static inline int cover_fill(cover *c, const cover_pair *p, int *level) {
    int order[COVER_FACTORS], gain = 1;
    cover_pair_set(p, c->factors, level);
    for (int i = 0; i < c->factors; i++) {
        int j = (int)(cover_draw(c) % (uint64_t)(i + 1));
        order[i] = order[j];
        order[j] = i;
    }
    for (int i = 0; i < c->factors; i++)
        if (level[order[i]] == COVER_OPEN) gain += cover_choose(c, level, order[i]);
    return gain;
}

/* Pairs of values, possible or not. */
static inline int64_t cover_pairs(const cover *c) {
    int64_t sum = 0;
    for (int f = 0; f < c->factors; f++)
        for (int g = 0; g < f; g++) sum += c->levels[f] * c->levels[g];
    return sum;
}

/* What a case is called, which is valid until the next call; "no ..." is left out. */
static inline const char *cover_name(int factors, const int *level,
                                     const char *(*value_name)(int factor, int level)) {
    static char text[320];
    size_t used = 0;
    text[0] = 0;
    for (int f = 0; f < factors; f++) {
        const char *value = value_name(f, level[f]);
        if (strncmp(value, "no ", 3))
            used += (size_t)snprintf(text + used, sizeof text - used, " %s", value);
    }
    return text;
}

/* A case with this pair, if one is possible. */
static inline int cover_case(cover *c, const cover_pair *p, int *level) {
    int most = 0, tried[COVER_FACTORS];
    for (int n = 0; n < COVER_TRIES && cover_pair_possible(c, p); n++) {
        int gain = cover_fill(c, p, tried);
        if (gain > most) memcpy(level, tried, sizeof tried);
        most = gain > most ? gain : most;
    }
    if (most) cover_meet(c, level);
    return most > 0;
}

/* Cases with every possible pair that none of those before has, behind `count` cases and up to
   `most` in all; how many there are then. */
static inline int cover_all(cover *c, int (*cases)[COVER_FACTORS], int count, int most) {
    for (cover_pair p = {{0}}; cover_next(c, &p);)
        if (!cover_met(c, &p) && count < most) count += cover_case(c, &p, cases[count]);
    return count;
}
#endif
