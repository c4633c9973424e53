/* SPDX-License-Identifier: MIT OR Unlicense */
/* gradient_pairs.h - compares gradients of a dump, parameter by parameter, with those of
 * another run of the same step, usually on one rank: after all reductions and before clip. */
#ifndef ORACLE_GRADIENT_PAIRS_H
#define ORACLE_GRADIENT_PAIRS_H
#include <math.h>
#include "oracle/dump/param_ranges.h"
#include "oracle/verdict/stages.h"

/* ---- the dump's gradients against the wanted ones ---- */

typedef struct gradient_pair {
    char name[128];
    likeness like;
    int64_t count; /* of elements */
    int group;     /* of tensors with the same factor, by group_factors (factors.h) */
} gradient_pair;

typedef struct gradient_check {
    dump *d, *want;
    stage *s;
    double tolerance;
    gradient_pair *each; /* (n), allocated for (most) */
    int64_t n, most;
    int64_t missing; /* wanted, and not in the dump: frozen, perhaps */
    likeness all;
    double way_factor; /* of the dump's gradient to that of the mistake that was named last */
} gradient_check;

/* What an HTML page shows beside the verdict. */
typedef struct details {
    gradient_pair *each; /* (n) */
    int64_t n;
    double limit;                  /* of the gradients' distance */
    double **logp;                 /* (rows) right log-probs by token; NULL: none */
    int64_t rows;                  /* in the order of replicas, then micro-batches */
    double logp_limit;             /* relative, of all log-probs together */
    unsigned char **attention_off; /* (attention_rows) as in dump.h */
    int64_t attention_rows;
} details;

static inline void details_free(details *more) {
    for (int64_t i = 0; more->logp && i < more->rows; i++) free(more->logp[i]);
    free(more->logp);
    for (int64_t i = 0; more->attention_off && i < more->attention_rows; i++)
        free(more->attention_off[i]);
    free(more->attention_off);
    free(more->each);
    *more = (details){.n = 0};
}

/* Takes attention's wrong rows from the dump. */
static inline void details_take_attention(details *more, dump *d) {
    if (!more || !d->attention_off) return;
    more->attention_off = d->attention_off;
    more->attention_rows = d->world / d->sp * d->accumulation;
    d->attention_off = NULL;
}

/* more NULL: nothing is kept. 0, or -1 with d->error. */
static inline int details_keep(details *more, const gradient_check *c) {
    size_t bytes = (size_t)c->n * sizeof *c->each;
    if (!more || !c->n) return 0;
    if (!(more->each = (gradient_pair *)malloc(bytes))) {
        seqpar_fail(&c->d->error, SEQPAR_ERR_MEMORY, "no memory for gradients");
        return -1;
    }
    memcpy(more->each, c->each, bytes);
    more->n = c->n;
    more->limit = c->tolerance;
    return 0;
}

/* Says if ranks' copies of a gradient differ: after a reduction all copies are equal. */
static inline void judge_copies(stage *s, const whole *w, const char *name, double tolerance) {
    verdict *v;
    if (w->distance <= tolerance || s->judged) return;
    v = stage_begin(s, VERDICT_WRONG);
    if (isnan(w->distance)) {
        verdict_say(v, "%.100s holds NaN or Inf on rank 0 or %lld", name, (long long)w->copy);
        return;
    }
    verdict_name(v, mistake_named("never_synchronised"));
    verdict_say(v, "%.100s of rank %lld is %.3g away from that of another rank", name,
                (long long)w->copy, w->distance);
}

static inline int gradient_reserve(gradient_check *c) {
    gradient_pair *more;
    if (c->n < c->most) return 0;
    c->most = 2 * c->most + 16;
    more = (gradient_pair *)realloc(c->each, (size_t)c->most * sizeof *more);
    if (more) c->each = more;
    if (more) return 0;
    seqpar_fail(&c->d->error, SEQPAR_ERR_MEMORY, "no memory for gradients");
    return -1;
}

/* If both dumps have the parameter, its sizes must be equal. 0, or -1 with d->error. */
static inline int gradients_match(gradient_check *c, const char *name, const whole *got,
                                  const whole *wanted) {
    if (!got->values || got->count == wanted->count) return 0;
    seqpar_fail(&c->d->error, SEQPAR_ERR_FILE_FORMAT,
                "%.300s: tensor %.100s has %lld elements, but %lld in the dump of --want; dump "
                "the same model in both",
                c->d->ranks[0].path, name, (long long)got->count, (long long)wanted->count);
    return -1;
}

static inline int add_gradient(void *user, const char *parameter) {
    gradient_check *c = (gradient_check *)user;
    whole got, wanted = {.copy = -1};
    tensor_name name;
    int status = gradient_reserve(c) ||
                 whole_read(c->d, tensor_of(&name, "grad.", parameter), 0, c->d->world, &got);
    if (status) return -1;
    status = whole_read(c->want, name.text, 0, c->want->world, &wanted) ||
             gradients_match(c, name.text, &got, &wanted);
    c->missing += !status && !got.values;
    if (!status && got.values) {
        gradient_pair *one = &c->each[c->n++];
        memset(one, 0, sizeof *one);
        snprintf(one->name, sizeof one->name, "%s", name.text);
        judge_copies(c->s, &got, name.text, c->tolerance);
        one->count = got.count;
        liken(&one->like, got.values, wanted.values, got.count);
        likeness_add(&c->all, &one->like);
    }
    whole_free(&got);
    whole_free(&wanted);
    return status ? -1 : 0;
}
#endif
