/* SPDX-License-Identifier: MIT OR Unlicense */
/* swapped_ranges.h - whether ranks exchanged ranges of parameters: a rank's after is the right
 * one of another rank's range, or its step was made with the gradient of another rank's
 * range. */
#ifndef ORACLE_SWAPPED_RANGES_H
#define ORACLE_SWAPPED_RANGES_H
#include "step_ways.h"

#ifndef SWAP_RANKS
#define SWAP_RANKS 64
#endif
enum { SWAP_OF_ALL, SWAP_OF_GRADIENT, SWAPS };
typedef struct swap_check {
    step_check *c;
    double *away; /* (world, world, SWAPS) squared distances of rank r from rank q's range */
} swap_check;

/* Compares rank r's range of one parameter, `to`, with rank q's, `from`, and adds the squared
   distances. */
static inline void swap_match(swap_check *s, int64_t r, int64_t q, const step_inputs *in,
                              const double *after, const part *to, const part *from) {
    way_factors right = step_factors(s->c, r, 0, in);
    double *away = &s->away[(r * s->c->n->d->world + q) * SWAPS];
    for (int64_t i = 0; i < to->count; i++) {
        element own = element_at(in, to->offset + i), other = element_at(in, from->offset + i);
        double all = after[i] - other.p - way_step(&right, other), mixed;
        own.g = other.g;
        mixed = after[i] - own.p - way_step(&right, own);
        away[SWAP_OF_ALL] += all * all;
        away[SWAP_OF_GRADIENT] += mixed * mixed;
    }
}

/* The range that a rank has of after.; count -1: none. 0, or -1 with d->error. */
static inline int swap_part(dump *d, int64_t rank, const char *name, part *p) {
    const seqpar_safetensors_tensor *t = seqpar_safetensors_find(d->ranks[rank].file, name);
    *p = (part){.count = -1};
    return t ? part_of(d, rank, t, p) : 0;
}

static inline int swap_ranks(swap_check *s, int64_t r, const char *name,
                             const step_inputs *in) {
    dump *d = s->c->n->d;
    const seqpar_safetensors_tensor *t = seqpar_safetensors_find(d->ranks[r].file, name);
    double *after;
    part to = {.count = -1}, from = {.count = -1};
    int status = 0;
    if (!t) return 0;
    if (swap_part(d, r, name, &to) || !(after = dump_doubles(d, r, t))) return -1;
    for (int64_t q = 0; !status && q < d->world; q++) {
        status = swap_part(d, q, name, &from);
        if (!status && from.count == to.count)
            swap_match(s, r, q, in, after, &to, &from);
        else /* ranges of other sizes cannot be exchanged */
            for (int i = 0; i < SWAPS; i++) s->away[(r * d->world + q) * SWAPS + i] = INFINITY;
    }
    free(after);
    return status;
}

static inline int add_swap(void *user, const char *parameter) {
    swap_check *s = (swap_check *)user;
    tensor_name name;
    step_inputs in;
    int status = step_inputs_read(s->c->n, parameter, &in);
    tensor_of(&name, "after.", parameter);
    if (!status && in.param.values && in.grad.values)
        for (int64_t r = 0; !status && r < s->c->n->d->world; r++)
            status = swap_ranks(s, r, name.text, &in);
    step_inputs_free(&in);
    return status;
}

/* The rank whose range rank r has: r itself, if that fits; -1: no rank's range fits. */
static inline int64_t swap_source(const swap_check *s, int64_t r, int form) {
    int64_t world = s->c->n->d->world;
    double limit = step_limit(s->c, &s->c->of[r]);
    for (int64_t i = 0; i < world; i++) {
        int64_t q = (r + i) % world;
        if (s->away[(r * world + q) * SWAPS + form] <= limit) return q;
    }
    return -1;
}

static inline void name_swaps(const swap_check *s, int form, verdict *v) {
    int64_t first = -1;
    for (int64_t r = 0; r < s->c->n->d->world; r++) {
        int64_t q = swap_source(s, r, form);
        if (q < 0) return;
        if (q != r && first < 0) first = r;
    }
    if (first < 0) return;
    verdict_name(v, mistake_named("shards_swapped"));
    verdict_say(v,
                form == SWAP_OF_ALL
                    ? "rank %lld has what the right step makes of rank %lld's range"
                    : "rank %lld's step is that of its range with the gradient of rank "
                      "%lld's",
                (long long)first, (long long)swap_source(s, first, form));
}

/* Looks for exchanged ranges if nothing else explains the step. 0, or -1 with d->error. */
static inline int check_swaps(verdict *v, step_check *c) {
    int64_t world = c->n->d->world;
    swap_check s = {.c = c};
    int status;
    if (world == 1 || world > SWAP_RANKS) return 0;
    s.away = (double *)calloc((size_t)(world * world * SWAPS), sizeof *s.away);
    if (!s.away) return seqpar_fail(&c->n->d->error, SEQPAR_ERR_MEMORY, "no memory"), -1;
    status = each_parameter(c->n->d, "after.", add_swap, &s);
    for (int form = 0; !status && form < SWAPS; form++) name_swaps(&s, form, v);
    free(s.away);
    return status;
}
#endif
