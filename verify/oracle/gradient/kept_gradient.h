/* SPDX-License-Identifier: MIT OR Unlicense */
/* kept_gradient.h - names a gradient to which that of the step before was added, because nobody
 * zeroed it. AdamW's first moment after step 1 is (1 - beta1) times the gradient of that step,
 * after clip. In step 2 the difference to the wanted gradient is therefore a multiple of m. */
#ifndef ORACLE_KEPT_GRADIENT_H
#define ORACLE_KEPT_GRADIENT_H
#include "gradient_pairs.h"

typedef struct kept_gradient {
    likeness like;  /* of the difference to the wanted gradient with the moment */
    double squares; /* of the wanted gradient */
    int lacks;      /* a parameter has no moment */
} kept_gradient;

static inline void kept_add(kept_gradient *k, const double *got, const double *want,
                            const double *m, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        double difference = got[i] - want[i];
        liken(&k->like, &difference, &m[i], 1);
        k->squares += want[i] * want[i];
    }
}

/* Named if the difference exceeds 8 times the limit, and what is left of it after x m is
   subtracted is within the limit. */
static inline void kept_name(const kept_gradient *k, const dump *d, double tolerance,
                             verdict *v) {
    double x = likeness_factor(&k->like);
    double away = k->like.got_got - x * k->like.got_want;
    double limit = tolerance * tolerance * k->squares;
    if (k->lacks || !(x > 0) || !(away <= limit) || !(k->like.got_got > 64 * limit)) return;
    verdict_name(v, mistake_named("gradient_kept"));
    verdict_say(
        v,
        "they are the wanted ones plus %.6g times the moments m.; in step 2, %.6g times "
        "these are the gradient of step 1, if it was not clipped",
        x, 1 / (1 - d->facts.beta1));
}

static inline int kept_add_pair(kept_gradient *k, gradient_check *c, const char *parameter) {
    tensor_name grad, moment;
    whole got, wanted, m;
    int status = whole_read(c->d, tensor_of(&grad, "grad.", parameter), 0, c->d->world, &got);
    if (whole_read(c->want, grad.text, 0, c->want->world, &wanted)) status = -1;
    if (whole_read(c->d, tensor_of(&moment, "m.", parameter), 0, c->d->world, &m)) status = -1;
    k->lacks |= !m.values || m.count != wanted.count;
    if (!status && !k->lacks) kept_add(k, got.values, wanted.values, m.values, got.count);
    whole_free(&got);
    whole_free(&wanted);
    whole_free(&m);
    return status ? -1 : 0;
}

/* After a wrong verdict that no mistake explains. 0, or -1 with the error of one of the dumps. */
static inline int name_kept_gradient(gradient_check *c) {
    kept_gradient k = {.lacks = c->d->facts.optimizer != DUMP_ADAMW};
    for (int64_t i = 0; i < c->n && !k.lacks; i++)
        if (kept_add_pair(&k, c, after_prefix(c->each[i].name, "grad."))) return -1;
    kept_name(&k, c->d, c->tolerance, &c->s->v);
    return 0;
}
#endif
