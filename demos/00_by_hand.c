/* SPDX-License-Identifier: MIT OR Unlicense */
/* 00_by_hand.c - the idea of seqpar on one page, without the library: causal ring attention on
   four ranks has the bits of one rank.  cc -O2 00_by_hand.c -lm

   Because of rounding, (a + b) + c and a + (b + c) differ. The usual ring keeps one running sum
   for each query and adds keys in order of arrival. A rank's own keys come first, so four ranks
   add in another order than one. Here the tokens are cut at fixed positions into cells. Every
   cell gives a partial sum. A binary tree over the cell numbers
   adds those. Who computed a cell, and when its keys arrived, then changes nothing. */
#include <math.h>
#include <stdio.h>
#include <string.h>

/* Compilers may round a * b + c once (a fused multiply-add) or twice, and decide this at each
   place: gcc fuses by default where the machine can, as with -march=native. Then two copies of
   one line of source, inlined in two places, may differ. So we forbid it. */
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

enum { TOKENS = 64, DIM = 8, CELL = 4, CELLS = TOKENS / CELL, RANKS = 4 };

static float q[TOKENS][DIM], k[TOKENS][DIM], v[TOKENS][DIM];

/* The softmax of one query over some keys, not yet divided. With it, keys can be taken in
   pieces: s is the score of a key, and exp(s - max) never overflows. */
typedef struct state {
    int keys;       /* how many; 0: an absent state, whose numbers are not read */
    float max;      /* m: the largest score */
    float sum;      /* l: the sum of exp(s - max) */
    float out[DIM]; /* o: the sum of exp(s - max) v */
} state;

/* Keys and values of neighbouring tokens: what a rank owns at first, and what travels. */
typedef struct keys {
    int first, count;
    float k[TOKENS][DIM], v[TOKENS][DIM];
} keys;

typedef struct rank {
    int first, count;          /* its tokens, whose queries stay here */
    keys visiting;             /* the keys that are here now */
    state running[TOKENS];     /* the usual ring: one state a query, in order of arrival */
    state cell[TOKENS][CELLS]; /* seqpar: one state a query and cell, filed by its number */
} rank;

/* The state over the keys of both. An absent state is skipped: x + nothing is x, bit by bit.
   a and b may change places; only where the brackets stand changes bits. */
static state combine(const state *a, const state *b) {
    if (a->keys == 0) return *b;
    if (b->keys == 0) return *a;
    state c;
    c.keys = a->keys + b->keys;
    c.max = a->max > b->max ? a->max : b->max;
    float scale_a = expf(a->max - c.max), scale_b = expf(b->max - c.max);
    c.sum = a->sum * scale_a + b->sum * scale_b;
    for (int d = 0; d < DIM; d++) c.out[d] = a->out[d] * scale_a + b->out[d] * scale_b;
    return c;
}

/* A query x a cell: all of its keys that the query sees (causal: none behind it), in order. */
static state attend_cell(int query, int cell, const keys *from) {
    state s;
    memset(&s, 0, sizeof s);
    for (int t = cell * CELL; t < (cell + 1) * CELL && t <= query; t++) {
        state one;
        one.keys = 1;
        one.max = 0;
        for (int d = 0; d < DIM; d++) one.max += q[query][d] * from->k[t - from->first][d];
        one.sum = 1;
        memcpy(one.out, from->v[t - from->first], sizeof one.out);
        s = combine(&s, &one);
    }
    return s;
}

/* The state over cells first .. first + count. The brackets depend on the cell numbers alone.
   (seqpar keeps fewer states: it adds siblings as soon as both are there. The tree is this.) */
static state tree(const state *cell, int first, int count) {
    if (count == 1) return cell[first];
    state left = tree(cell, first, count / 2);
    state right = tree(cell, first + count / 2, count / 2);
    return combine(&left, &right);
}

/* Attention of all tokens on `ranks` ranks, with both orders of additions. */
static void ring(int ranks, float by_arrival[TOKENS][DIM], float by_tree[TOKENS][DIM]) {
    static rank all[RANKS];
    memset(all, 0, sizeof all);
    for (int r = 0; r < ranks; r++) { /* rank r holds one stretch of the tokens, whole cells */
        rank *me = &all[r];
        me->first = me->visiting.first = r * TOKENS / ranks;
        me->count = me->visiting.count = TOKENS / ranks;
        memcpy(me->visiting.k, k[me->first], (size_t)me->count * sizeof k[0]);
        memcpy(me->visiting.v, v[me->first], (size_t)me->count * sizeof v[0]);
    }
    for (int hop = 0; hop < ranks; hop++) {
        for (int r = 0; r < ranks; r++) { /* each rank: its queries x the keys that visit it */
            rank *me = &all[r];
            int begin = me->visiting.first / CELL, cells = me->visiting.count / CELL;
            for (int i = 0; i < me->count; i++)
                for (int c = begin; c < begin + cells; c++) {
                    state s = attend_cell(me->first + i, c, &me->visiting);
                    me->running[i] = combine(&me->running[i], &s);
                    me->cell[i][c] = s;
                }
        }
        keys last = all[ranks - 1].visiting; /* then all keys travel one hop to the next rank */
        for (int r = ranks - 1; r > 0; r--) all[r].visiting = all[r - 1].visiting;
        all[0].visiting = last;
    }
    for (int r = 0; r < ranks; r++)
        for (int i = 0; i < all[r].count; i++) {
            state a = all[r].running[i], t = tree(all[r].cell[i], 0, CELLS);
            for (int d = 0; d < DIM; d++) {
                by_arrival[all[r].first + i][d] = a.out[d] / a.sum;
                by_tree[all[r].first + i][d] = t.out[d] / t.sum;
            }
        }
}

/* Numbers from -1 to 1, the same in every run. */
static void fill(float x[TOKENS][DIM], unsigned seed) {
    for (int i = 0; i < TOKENS * DIM; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i / DIM][i % DIM] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

static int equal(const char *order, float one[TOKENS][DIM], float four[TOKENS][DIM]) {
    int differ = 0;
    for (int i = 0; i < TOKENS * DIM; i++)
        differ += memcmp(&one[i / DIM][i % DIM], &four[i / DIM][i % DIM], sizeof(float)) != 0;
    printf("%s: 4 ranks equal 1 rank: %s (%d of %d numbers differ)\n", order,
           differ ? "no" : "yes", differ, TOKENS * DIM);
    return !differ;
}

int main(void) {
    static float arrival[2][TOKENS][DIM], cells[2][TOKENS][DIM];
    fill(q, 1), fill(k, 2), fill(v, 3);
    ring(1, arrival[0], cells[0]);
    ring(RANKS, arrival[1], cells[1]);
    int unexpected = equal("arrival order  ", arrival[0], arrival[1]);
    unexpected += !equal("tree over cells", cells[0], cells[1]);
    return unexpected;
}
