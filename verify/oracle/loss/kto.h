/* SPDX-License-Identifier: MIT OR Unlicense */
/* kto.h - KTO's loss. A document has h = sum of logp - ref_logp over all ranks. A micro-batch
 * has z = max(0, mean of kl over its documents on all replicas).
 *
 *     desirable      desirable_weight (1 - sigmoid(beta (h - z)))
 *     undesirable    undesirable_weight (1 - sigmoid(beta (z - h)))
 *     L = mean over the documents of the step */
#ifndef ORACLE_KTO_H
#define ORACLE_KTO_H
#include "pairs.h"

enum {
    Z_RIGHT,
    Z_OF_REPLICA,
    Z_OF_ROW_CLAMPED, /* clamped in each replica, then averaged */
    Z_OF_MEANS,
    Z_FREE,
    Z_NONE,
    Z_ADDED,
    Z_AVERAGED,
    Z_WAYS
};
static const char *const z_names[Z_WAYS] = {NULL,
                                            "kl_of_one_replica",
                                            "kl_clamped_before_mean",
                                            "kl_mean_of_means",
                                            "kl_not_clamped",
                                            "kl_missing",
                                            "kl_added",
                                            "kl_averaged"};

/* kl of a row, or of all rows of a micro-batch */
typedef struct kl_mean {
    double sum, count;
} kl_mean;

typedef struct kto_step {
    const step_documents *s;
    const dump_facts *f;
    kl_mean *rows;         /* (accumulation, replicas) */
    double *z;             /* (accumulation, Z_WAYS); kto_z takes Z_OF_REPLICA from rows */
    double *alone;         /* (sp) the loss, with h of one rank's tokens */
    double count, trained; /* number of documents with a token, with a supervised token */
    double slack;
} kto_step;

static inline double kto_weight(const dump_facts *f, double desirable) {
    return desirable != 0 ? f->desirable_weight : f->undesirable_weight;
}

/* 1 - sigmoid(..) of a document. */
static inline double kto_sigmoid(const dump_facts *f, double desirable, double h, double z) {
    double x = desirable != 0 ? f->beta * (h - z) : f->beta * (z - h);
    return 1 / (1 + exp(x));
}

static inline double kto_loss(const dump_facts *f, double desirable, double h, double z) {
    return kto_weight(f, desirable) * kto_sigmoid(f, desirable, h, z);
}

static inline double kl_of(const kl_mean *k) { return k->count > 0 ? k->sum / k->count : 0; }

static inline double at_least_0(double x) { return x < 0 ? 0 : x; } /* NaN stays NaN */

/* Fills one micro-batch's z, the right one and those of mistakes; rows: (replicas) */
static inline void kto_fill_z(double *z, const kl_mean *rows, int64_t replicas, double sp) {
    kl_mean whole = {0, 0};
    double means = 0, clamped = 0, filled = 0;
    for (int64_t i = 0; i < replicas; i++) {
        whole.sum += rows[i].sum;
        whole.count += rows[i].count;
        means += kl_of(&rows[i]);
        clamped += at_least_0(kl_of(&rows[i]));
        filled += rows[i].count > 0;
    }
    z[Z_RIGHT] = at_least_0(kl_of(&whole));
    z[Z_OF_ROW_CLAMPED] = filled > 0 ? clamped / filled : 0;
    z[Z_OF_MEANS] = at_least_0(filled > 0 ? means / filled : 0);
    z[Z_FREE] = kl_of(&whole);
    z[Z_NONE] = 0;
    z[Z_ADDED] = sp * z[Z_RIGHT];
    z[Z_AVERAGED] = z[Z_RIGHT] / sp;
}

static inline double kto_z(const kto_step *k, const document *o, int way) {
    int64_t replicas = k->f->world / k->f->sp;
    if (way == Z_OF_REPLICA) return at_least_0(kl_of(&k->rows[o->micro * replicas + o->dp]));
    return k->z[o->micro * Z_WAYS + way];
}

/* 0, or -1: no memory. To be freed in either case. */
static inline int kto_begin(kto_step *k, const step_documents *s, const dump_facts *f) {
    int64_t replicas = f->world / f->sp, rows = replicas * f->accumulation;
    memset(k, 0, sizeof *k);
    k->s = s;
    k->f = f;
    k->rows = (kl_mean *)calloc((size_t)rows, sizeof *k->rows);
    k->z = (double *)calloc((size_t)(f->accumulation * Z_WAYS), sizeof *k->z);
    k->alone = (double *)calloc((size_t)f->sp, sizeof *k->alone);
    if (!k->rows || !k->z || !k->alone) return -1;
    for (int64_t i = 0; i < s->count; i++) {
        kl_mean *row = &k->rows[s->of[i].micro * replicas + s->of[i].dp];
        if (!s->of[i].tokens) continue; /* an unused slot */
        row->sum += s->of[i].kl;
        row->count++;
        k->count++;
        k->trained += s->of[i].labels > 0;
    }
    for (int64_t a = 0; a < f->accumulation; a++)
        kto_fill_z(&k->z[a * Z_WAYS], &k->rows[a * replicas], replicas, (double)f->sp);
    return 0;
}

static inline void kto_free(kto_step *k) {
    free(k->rows);
    free(k->z);
    free(k->alone);
}

/* ---- losses ---- */

/* Ways to compute a document's h; all but H_RIGHT are mistakes. */
enum {
    H_RIGHT,
    H_AVERAGED,
    H_ADDED,
    H_NO_REFERENCE,
    H_BY_LENGTH,
    H_GATHERED,
    H_FROM, /* ref_logp of wrong tokens: + source (policy.h) */
    H_WAYS = H_FROM + SOURCES
};
static const char *const h_names[H_WAYS] = {NULL,
                                            "log_probs_averaged",
                                            "log_probs_added",
                                            "reference_missing",
                                            "log_probs_by_length",
                                            "gathered_in_rank_order",
                                            "side_tensor_not_split",
                                            "side_tensor_not_split"};

static inline double kto_h(const kto_step *k, int64_t i, int way) {
    const document *o = &k->s->of[i];
    document_part whole = document_whole(k->s, i);
    double h = part_margin(&whole), sp = (double)k->f->sp;
    if (way == H_AVERAGED) return h / sp;
    if (way == H_ADDED) return h * sp;
    if (way == H_NO_REFERENCE) return whole.policy;
    if (way == H_BY_LENGTH) return part_mean(&whole);
    if (way == H_GATHERED) return part_margin(&o->gathered);
    return way >= H_FROM ? whole.policy - o->reference_from[way - H_FROM] : h;
}

/* The mean loss over documents, with these ways of h and z. swapped 1: exchanges desirable and
   undesirable. trained 1: only documents with a supervised token. */
static inline double kto_mean(const kto_step *k, int h, int z, int swapped, int trained) {
    double sum = 0;
    for (int64_t i = 0; i < k->s->count; i++) {
        const document *o = &k->s->of[i];
        double desirable = swapped ? 1 - o->desirable : o->desirable;
        if (!o->tokens || (trained && !o->labels)) continue;
        sum += kto_loss(k->f, desirable, kto_h(k, i, h), kto_z(k, o, z));
    }
    return sum / (trained ? k->trained : k->count);
}

/* The mean loss, with h of one member's tokens. */
static inline double kto_mean_alone(const kto_step *k, int64_t member) {
    double sum = 0;
    for (int64_t i = 0; i < k->s->count; i++) {
        const document *o = &k->s->of[i];
        double h = part_margin(&k->s->part[i * k->f->sp + member]);
        if (o->tokens) sum += kto_loss(k->f, o->desirable, h, kto_z(k, o, Z_RIGHT));
    }
    return sum / k->count;
}

/* Adds the losses to means, and computes slack: the slope of sigmoid is 1/4 at most. */
static inline void kto_add_rows(kto_step *k, step_means *means) {
    double rounding = 0, kl = 0, most = fmax(kto_weight(k->f, 0), kto_weight(k->f, 1));
    for (int64_t i = 0; i < k->s->count; i++) {
        const document *o = &k->s->of[i];
        document_part whole = document_whole(k->s, i);
        double loss;
        if (!o->tokens) continue;
        loss = kto_loss(k->f, o->desirable, part_margin(&whole), kto_z(k, o, Z_RIGHT));
        means_add(means, k->f, -1, o->dp, o->micro, loss, 1);
        rounding += square(k->f->beta / 4) * (o->rounding + sum_rounding(&whole));
        kl += fabs(o->kl) * k->s->unit.kl;
    }
    k->slack = most * (3 * sqrt(rounding) + k->f->beta / 4 * kl) / k->count;
}

/* ---- kl of one rank's tokens ---- */

/* The mean loss with this z. Only for a step of one micro-batch: each would have its own z. */
static inline double kto_mean_at(const kto_step *k, double z) {
    double sum = 0;
    for (int64_t i = 0; i < k->s->count; i++)
        if (k->s->of[i].tokens)
            sum += kto_loss(k->f, k->s->of[i].desirable, kto_h(k, i, H_RIGHT), z);
    return sum / k->count;
}

/* The least z >= 0 that gives this loss, by bisection; NaN: none up to twice the largest |kl|.
   limit: how far the loss may be off; *off: how far z may then be off. */
static inline double kto_solve(const kto_step *k, double loss, double limit, double *off) {
    double step = 0, low = 0, high, slope;
    for (int64_t i = 0; i < k->s->count; i++)
        if (k->s->of[i].tokens) step = fmax(step, fabs(k->s->of[i].kl) / 32);
    for (int n = 0; n < 64 && step > 0; n++, low += step) {
        double at_low = kto_mean_at(k, low) - loss, at_high;
        high = low + step;
        at_high = kto_mean_at(k, high) - loss;
        if (at_low * at_high > 0) continue;
        for (int half = 0; half < 60; half++) {
            double middle = (low + high) / 2, at = kto_mean_at(k, middle) - loss;
            if (at * at_low > 0)
                low = middle;
            else
                high = middle;
        }
        slope = (kto_mean_at(k, low + step / 64) - kto_mean_at(k, low)) / (step / 64);
        *off = limit / fabs(slope);
        return low;
    }
    return NAN;
}

/* Whether each rank used kl of its own tokens only: each loss gives a z, and these z add up to
   the mean of kl. losses: (sp) of one replica. */
static inline int kto_is_of_parts(const kto_step *k, const double *losses, const law *l,
                                  verdict *v) {
    double whole = k->z[Z_FREE], sum = 0, distance = 0, low = INFINITY, high = 0;
    if (k->f->accumulation > 1 || k->f->sp == 1) return 0;
    for (int64_t m = 0; m < k->f->sp; m++) {
        double off, z = kto_solve(k, losses[m], law_limit(l, losses[m]), &off);
        if (isnan(z)) return 0;
        sum += z;
        distance += off;
        low = fmin(low, z);
        high = fmax(high, z);
    }
    if (!(fabs(sum - whole) <= distance && distance <= 0.2 * whole)) return 0;
    verdict_say(v,
                "ranks' losses are those of z from %.6g to %.6g, which add up to %.6g; the "
                "mean of kl is %.6g",
                low, high, sum, whole);
    return 1;
}

/* ---- losses of mistakes ---- */

/* The loss where the classes' weights are not applied. */
static inline void kto_add_plain(const kto_step *k, answers *a) {
    dump_facts f = *k->f;
    kto_step plain = *k;
    f.desirable_weight = f.undesirable_weight = 1;
    plain.f = &f;
    answers_add(a, "option_not_applied", kto_mean(&plain, H_RIGHT, Z_RIGHT, 0, 0),
                "desirable_weight and undesirable_weight of 1 give it");
}

static inline void kto_add_ways(const kto_step *k, answers *a) {
    double several = k->f->sp > 1 ? 1 : NAN, parts = 0;
    double replicas = k->f->world > k->f->sp ? 1 : NAN;
    for (int64_t r = 0; r < k->f->sp; r++) parts += k->alone[r] / (double)k->f->sp;
    answers_add(a, "sigmoid_of_parts", several * parts, NULL);
    for (int h = H_RIGHT + 1; h < H_WAYS; h++) {
        double only = h == H_AVERAGED || h == H_ADDED ? several : 1;
        answers_add(a, h_names[h], only * kto_mean(k, h, Z_RIGHT, 0, 0),
                    h < H_FROM ? NULL : token_ways[TOKEN_REFERENCE + h - H_FROM].how);
    }
    for (int z = Z_RIGHT + 1; z < Z_WAYS; z++) {
        double only = z <= Z_OF_MEANS ? replicas : z >= Z_ADDED ? several : 1;
        answers_add(a, z_names[z], only * kto_mean(k, H_RIGHT, z, 0, 0), NULL);
    }
    answers_add(a, "desirable_swapped", kto_mean(k, H_RIGHT, Z_RIGHT, 1, 0), NULL);
    if (kto_weight(k->f, 0) != 1 || kto_weight(k->f, 1) != 1) kto_add_plain(k, a);
}

static inline const char *kto_vacuous(const kto_step *k, const answers *a, const law *l) {
    int shown = k->f->sp == 1 ? answers_show(a, l, NULL)
                              : answers_show(a, l, "log_probs_averaged") &&
                                    answers_show(a, l, "sigmoid_of_parts");
    return shown ? NULL
                 : "other ways to put log-probs together give the same: policy and reference "
                   "are close, or what documents change cancels; dump a later step";
}

/* 0, or -1: no memory. k is to be freed in either case. */
static inline int kto_answers(kto_step *k, step_means *means, const step_documents *s,
                              answers *a, const dump_facts *f) {
    if (kto_begin(k, s, f)) return -1;
    means_begin(means, f, 0);
    kto_add_rows(k, means);
    for (int64_t r = 0; r < f->sp; r++) k->alone[r] = kto_mean_alone(k, r);
    memset(a, 0, sizeof *a);
    a->right = kto_mean(k, H_RIGHT, Z_RIGHT, 0, 0);
    a->size = fabs(a->right);
    a->slack = k->slack + added_rounding(k->count, fmax(kto_weight(f, 0), kto_weight(f, 1)));
    a->low_precision = fmax(s->unit.logp, s->unit.kl) > NARROW;
    snprintf(a->what, sizeof a->what, "%.0f documents", k->count);
    answers_accept(a, k->trained < k->count ? kto_mean(k, H_RIGHT, Z_RIGHT, 0, 1) : NAN,
                   "documents without a supervised token are left out: no mistake");
    kto_add_ways(k, a);
    return 0;
}
#endif
