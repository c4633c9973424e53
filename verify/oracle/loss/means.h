/* SPDX-License-Identifier: MIT OR Unlicense */
/* means.h - sums and counts of losses by rank, replica and micro-batch, to compute the means
 * that mistakes give. */
#ifndef ORACLE_MEANS_H
#define ORACLE_MEANS_H
#include "answers.h"

/* A place is a rank's number within its sequence. A reduction over replicas that leaves out the
   other ranks of the sequence combines the ranks of one place. */
enum {
    BY_RANK_MICRO,
    BY_RANK,
    BY_MICRO,
    BY_REPLICA,
    BY_REPLICA_MICRO,
    BY_PLACE,
    BY_PLACE_MICRO,
    GROUPINGS
};
static const char *const grouping_names[GROUPINGS] = {
    "ranks' micro-batches",
    "ranks",
    "micro-batches",
    "replicas",
    "replicas' micro-batches",
    "places in the sequence, each over all replicas",
    "micro-batches of places in the sequence, each over all replicas"};

typedef struct step_means {
    law by[GROUPINGS]; /* groups 0: not used */
} step_means;

/* own_of (law.h) says whose own mean a rank may report by mistake: that of its rank, replica or
   place. Groups of BY_MICRO are of all ranks, so none of them is the rank's own. */
static inline void means_begin(step_means *m, const dump_facts *f, int by_ranks) {
    int64_t dp = f->world / f->sp;
    int64_t groups[] = {f->world * f->accumulation, f->world, f->accumulation,        dp,
                        dp * f->accumulation,       f->sp,    f->sp * f->accumulation};
    memset(m, 0, sizeof *m);
    for (int i = by_ranks ? 0 : BY_MICRO; i < (by_ranks ? GROUPINGS : BY_PLACE); i++) {
        m->by[i].groups = groups[i] <= LAW_GROUPS ? groups[i] : 0;
        m->by[i].own_of = i <= BY_RANK    ? f->world
                          : i == BY_MICRO ? -1
                          : i < BY_PLACE  ? dp
                                          : f->sp;
    }
}

/* One loss, which counts `weight` times; rank -1: it is of no rank. */
static inline void means_add(step_means *m, const dump_facts *f, int64_t rank, int64_t dp,
                             int64_t micro, double loss, double weight) {
    int64_t replicas = f->world / f->sp;
    int64_t place = rank < 0 ? -1 : rank % f->sp;
    int64_t group[] = {micro * f->world + rank, rank, micro, dp, micro * replicas + dp, place,
                       micro * f->sp + place};
    for (int i = 0; i < GROUPINGS; i++) {
        if (!m->by[i].groups || group[i] < 0) continue;
        m->by[i].sums[group[i]] += weight * loss;
        m->by[i].counts[group[i]] += weight;
    }
}

/* Whether some group's own mean is not the right one. */
static inline int means_show(const step_means *m, const law *l, double right) {
    for (int i = 0; i < GROUPINGS; i++)
        for (int64_t g = 0; g < m->by[i].groups; g++)
            if (m->by[i].counts[g] > 0 &&
                !law_equal(l, m->by[i].sums[g] / m->by[i].counts[g], right))
                return 1;
    return 0;
}

static const char means_hidden_text[] =
    "a mean of replicas' or micro-batches' means is the same here; give a step of one "
    "micro-batch, or whose micro-batches have unequal numbers of documents and losses";

/* Whether the mean of micro-batches' means equals the right mean here, as with equal counts:
   then that mistake does not show. With one micro-batch of one replica it cannot be made. */
static inline int means_are_hidden(const step_means *m, const law *l, double right) {
    const law *by = &m->by[BY_REPLICA_MICRO];
    return by->groups > 1 && law_equal(l, law_mean(by, MEAN_OF_MEANS, 0), right);
}

/* Whether a grouping is the same as another one in this step: with one micro-batch, one replica
   or one rank a sequence. */
static inline int means_are_others(const dump_facts *f, int grouping) {
    int place = grouping >= BY_PLACE;
    return (f->accumulation == 1 && (grouping == BY_RANK || grouping == BY_REPLICA_MICRO ||
                                     grouping == BY_PLACE_MICRO)) ||
           (place && (f->world == f->sp || f->sp == 1));
}

/* The grouping with the number and limits of `l`, which the rank reports; NULL: not used. */
static inline law *means_by(step_means *m, int i, const law *l, int64_t rank,
                            const dump_facts *f) {
    law *by = &m->by[i];
    if (!by->groups || means_are_others(f, i)) return NULL;
    by->got = l->got;
    by->tolerance = l->tolerance;
    by->slack = l->slack;
    by->right = l->right;
    by->has_right = 1;
    by->copies = l->copies;
    by->own = i <= BY_RANK ? rank : i < BY_PLACE ? rank / f->sp : rank % f->sp;
    return by;
}

/* Notes which mistakes would change a right number, grouping by grouping. */
static inline void means_try(step_means *m, const law *l, int64_t rank, const dump_facts *f,
                             verdict *v) {
    for (int i = 0; i < GROUPINGS; i++) {
        law *by = means_by(m, i, l, rank, f);
        if (by && by->groups > 1) law_try_means(by, grouping_names[i], v);
    }
}

/* Names the mistakes that explain a wrong number, grouping by grouping. */
static inline void means_name(step_means *m, const law *l, int64_t rank, const dump_facts *f,
                              verdict *v) {
    char names[200] = "";
    for (int i = 0; i < GROUPINGS; i++) {
        law *by = means_by(m, i, l, rank, f);
        verdict one = {.count = 0};
        if (!by) continue;
        law_name_means(by, &one);
        /* MEAN_OVER_GROUPS only scales the right mean, so it does not point to places. */
        for (int k = one.count - 1; k >= 0 && i >= BY_PLACE; k--)
            if (one.named[k]->mean == MEAN_OVER_GROUPS) one.named[k] = one.named[--one.count];
        for (int k = 0; k < one.count; k++) verdict_name(v, one.named[k]);
        if (one.count)
            snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s",
                     *names ? ", " : "", grouping_names[i]);
    }
    if (*names) verdict_say(v, "groups are %s", names);
}
#endif
