/* SPDX-License-Identifier: MIT OR Unlicense */
/* holdout.h - holds out a part of the training data for evaluation.
 *
 * val_size     k of n units (documents or pairs) are evaluated and never trained on:
 *              k = val_size or, if it is below 1, val_size n rounded up. They depend only on
 *              n and the seed: p = numpy's default_rng(seed).permutation(n), as in `datasets`;
 *              LLaMA-Factory takes the first k of p, axolotl the last k.
 * reward       without evaluation data, a reward model is evaluated on the first units of the
 *              training data, which stay training data. */
#ifndef DEMO_HOLDOUT_H
#define DEMO_HOLDOUT_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include "trainer/base/error.h"
#include "trainer/base/memory.h"

/* ---- numpy's generator: SeedSequence, PCG64 (O'Neill 2014), a shuffle from the end ---- */

typedef struct {
    uint64_t high, low; /* the halves of a 128-bit integer */
} demo_wide;

typedef struct {
    demo_wide state, step;
    uint32_t kept; /* the upper half of a word whose lower half was used */
    bool has;
} demo_pcg;

static inline uint32_t demo_seed_stir(uint32_t value, uint32_t *constant, uint32_t factor) {
    value ^= *constant;
    *constant *= factor;
    value *= *constant;
    return value ^ value >> 16;
}

/* words = numpy's SeedSequence(seed).generate_state(4, uint64). */
static inline void demo_seed_words(uint64_t words[4], uint64_t seed) {
    uint32_t pool[4], out[8], constant = 0x43b0d7e5u;
    for (int i = 0; i < 4; i++)
        pool[i] = demo_seed_stir(i < 2 ? (uint32_t)(seed >> 32 * i) : 0, &constant,
                                 0x931e8875u);
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++) {
            if (from == to) continue;
            uint32_t stirred = demo_seed_stir(pool[from], &constant, 0x931e8875u);
            pool[to] = 0xca01f9ddu * pool[to] - 0x4973f715u * stirred;
            pool[to] ^= pool[to] >> 16;
        }
    constant = 0x8b51f9ddu;
    for (int i = 0; i < 8; i++) out[i] = demo_seed_stir(pool[i % 4], &constant, 0x58f38dedu);
    for (int i = 0; i < 4; i++) words[i] = out[2 * i] | (uint64_t)out[2 * i + 1] << 32;
}

static inline demo_wide demo_wide_sum(demo_wide a, demo_wide b) {
    uint64_t low = a.low + b.low;
    return (demo_wide){a.high + b.high + (low < a.low), low};
}

static inline demo_wide demo_wide_product(demo_wide a, demo_wide b) {
    const uint64_t half = 0xffffffffu;
    uint64_t ll = (a.low & half) * (b.low & half), lh = (a.low & half) * (b.low >> 32);
    uint64_t hl = (a.low >> 32) * (b.low & half), hh = (a.low >> 32) * (b.low >> 32);
    uint64_t middle = (ll >> 32) + (lh & half) + (hl & half);
    uint64_t carried = hh + (lh >> 32) + (hl >> 32) + (middle >> 32);
    return (demo_wide){carried + a.high * b.low + a.low * b.high, a.low * b.low};
}

static inline void demo_pcg_step(demo_pcg *g) {
    const demo_wide factor = {0x2360ed051fc65da4u, 0x4385df649fccf645u};
    g->state = demo_wide_sum(demo_wide_product(g->state, factor), g->step);
}

static inline void demo_pcg_begin(demo_pcg *g, uint64_t seed) {
    uint64_t w[4];
    demo_seed_words(w, seed);
    *g = (demo_pcg){.step = {w[2] << 1 | w[3] >> 63, w[3] << 1 | 1}};
    demo_pcg_step(g);
    g->state = demo_wide_sum(g->state, (demo_wide){w[0], w[1]});
    demo_pcg_step(g);
}

static inline uint32_t demo_pcg_word(demo_pcg *g) {
    if (g->has) return g->has = false, g->kept;
    demo_pcg_step(g);
    int turn = (int)(g->state.high >> 58);
    uint64_t mixed = g->state.high ^ g->state.low;
    mixed = mixed >> turn | mixed << (-turn & 63);
    g->kept = (uint32_t)(mixed >> 32);
    g->has = true;
    return (uint32_t)mixed;
}

/* Returns a random integer from 0 to `most` (at least 1) by rejection sampling: draws words
   until the low bits of one are at most `most`. */
static inline uint32_t demo_pcg_up_to(demo_pcg *g, uint32_t most) {
    uint32_t mask = most, number;
    for (int bits = 1; bits < 32; bits *= 2) mask |= mask >> bits;
    do number = demo_pcg_word(g) & mask;
    while (number > most);
    return number;
}

/* order (count) becomes numpy's default_rng(seed).permutation(count). */
static inline void demo_permutation(int64_t *order, int64_t count, uint64_t seed) {
    demo_pcg g;
    demo_pcg_begin(&g, seed);
    for (int64_t i = 0; i < count; i++) order[i] = i;
    for (int64_t i = count - 1; i > 0; i--) {
        int64_t j = demo_pcg_up_to(&g, (uint32_t)i), other = order[j];
        order[j] = order[i];
        order[i] = other;
    }
}

/* ---- which units ---- */

/* The number of units to hold out of `count`. A fraction is rounded up, as LLaMA-Factory and
   axolotl do. */
static inline int64_t demo_held_count(double val_size, int64_t count) {
    return (int64_t)(val_size < 1 ? ceil(val_size * (double)count) : val_size);
}

/* Sets held[i] (count) to 1 if unit i is held out, else to 0. last: take the end of the
   permutation, as axolotl does. */
static inline void demo_held_mark(uint8_t *held, int64_t count, int64_t wanted, uint64_t seed,
                                  bool last) {
    int64_t *order = (int64_t *)demo_alloc(count + 1, sizeof *order);
    demo_permutation(order, count, seed);
    for (int64_t i = 0; i < count; i++) held[i] = 0;
    for (int64_t i = 0; i < wanted; i++) held[order[last ? count - 1 - i : i]] = 1;
    free(order);
}

/* Moves the held-out units of the stb_ds array `from`, of n elements each, to the end of
   `into`. stays: copies them instead. */
#define DEMO_PART(into, from, n, held, stays) \
    do { \
        int64_t part_left = 0; \
        for (int64_t part_i = 0; part_i < arrlen(from); part_i++) { \
            if ((held)[part_i / (n)]) arrput(into, (from)[part_i]); \
            if (!(held)[part_i / (n)] || (stays)) (from)[part_left++] = (from)[part_i]; \
        } \
        arrsetlen(from, (size_t)part_left); \
    } while (0)

/* 0 if val_size is a valid size, else -1 with one sentence. */
static inline int demo_held_size_wrong(const char *option, double val_size, demo_error *error) {
    bool count = val_size >= 2 && floor(val_size) >= val_size && val_size < 2147483648.0;
    if ((val_size >= 0 && val_size < 1) || count) return 0;
    return demo_fail(error,
                     "--%s is %g, but it must be a fraction below 1 or a whole number of at "
                     "least 2 (for LLaMA-Factory and axolotl 1 means all documents, and they "
                     "refuse it)",
                     option, val_size);
}
#endif
