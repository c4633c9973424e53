/* SPDX-License-Identifier: MIT OR Unlicense */
/* document_seeds.h - dL/dlogp of DPO and KTO, and dL/dvalue of RM. Their losses are functions
 * of whole documents (pairs.h, kto.h): a token's seed is the derivative of its document's or
 * pair's loss. */
#ifndef ORACLE_DOCUMENT_SEEDS_H
#define ORACLE_DOCUMENT_SEEDS_H
#include "oracle/loss/losses.h"
#include "seeds.h"

/* Ways to compute h beside those of kto.h. H_OF_PARTS: each rank uses its own tokens only.
   H_OF_PARTS_WITH_Z: h is right, but each rank has its own z. */
enum { H_OF_PARTS = H_WAYS, H_OF_PARTS_WITH_Z };
enum { Z_OF_PARTS = Z_WAYS }; /* each rank's z, solved from the loss that it reports */

typedef struct document_way {
    const char *name, *how;
    int h, z, swapped;
    int grouping, last; /* grouping: of the means; last: only the last micro-batch counts */
    int trained;        /* KTO: documents without a supervised token are left out */
    int plain; /* without label_smoothing of DPO, weights of KTO's classes, RM's margins; 2:
                  without center of RM */
} document_way;

/* Wrong ways to compute h from log-probs, for DPO and for KTO. */
/* clang-format off */
#define LOG_PROB_WAYS \
    {.name = "sigmoid_of_parts", .h = H_OF_PARTS, .grouping = BY_ALL}, \
    {.name = "log_probs_averaged", .h = H_AVERAGED, .grouping = BY_ALL}, \
    {.name = "log_probs_added", .h = H_ADDED, .grouping = BY_ALL}, \
    {.name = "reference_missing", .h = H_NO_REFERENCE, .grouping = BY_ALL}, \
    {.name = "log_probs_by_length", .h = H_BY_LENGTH, .grouping = BY_ALL}, \
    {.name = "gathered_in_rank_order", .h = H_GATHERED, .grouping = BY_ALL}, \
    {.name = "side_tensor_not_split", .h = H_FROM + FROM_FIRST, .grouping = BY_ALL, \
     .how = "ref_logp: each rank takes the first n of the row"}, \
    {.name = "side_tensor_not_split", .h = H_FROM + FROM_GATHERED, .grouping = BY_ALL, \
     .how = "ref_logp: as a contiguous split has it"}
/* clang-format on */

static const document_way dpo_ways[] = {
    {.name = NULL, .grouping = BY_ALL},
    LOG_PROB_WAYS,
    {.name = "option_not_applied",
     .plain = 1,
     .grouping = BY_ALL,
     .how = "label_smoothing 0 gives them"},
    {.name = "pair_swapped", .swapped = 1, .grouping = BY_ALL},
    {.name = "mean_of_means", .grouping = BY_MICRO},
    {.name = "mean_of_means", .grouping = BY_REPLICA},
    {.name = "mean_of_means", .grouping = BY_REPLICA_MICRO},
    {.name = "micro_batches_lost", .grouping = BY_ALL, .last = 1}};

static const document_way kto_ways[] = {
    {.name = NULL, .grouping = BY_ALL},
    {.name = NULL,
     .grouping = BY_ALL,
     .trained = 1,
     .how = "documents without a supervised token are left out: no mistake"},
    LOG_PROB_WAYS,
    {.name = "kl_of_one_replica", .z = Z_OF_REPLICA, .grouping = BY_ALL},
    {.name = "kl_clamped_before_mean", .z = Z_OF_ROW_CLAMPED, .grouping = BY_ALL},
    {.name = "kl_mean_of_means", .z = Z_OF_MEANS, .grouping = BY_ALL},
    {.name = "kl_not_clamped", .z = Z_FREE, .grouping = BY_ALL},
    {.name = "kl_missing", .z = Z_NONE, .grouping = BY_ALL},
    {.name = "kl_added", .z = Z_ADDED, .grouping = BY_ALL},
    {.name = "kl_averaged", .z = Z_AVERAGED, .grouping = BY_ALL},
    {.name = "kl_of_own_part", .h = H_OF_PARTS_WITH_Z, .z = Z_OF_PARTS, .grouping = BY_ALL},
    {.name = "desirable_swapped", .swapped = 1, .grouping = BY_ALL},
    {.name = "option_not_applied",
     .plain = 1,
     .grouping = BY_ALL,
     .how = "desirable_weight and undesirable_weight of 1 give them"},
    {.name = "mean_of_means", .grouping = BY_MICRO},
    {.name = "mean_of_means", .grouping = BY_REPLICA},
    {.name = "mean_of_means", .grouping = BY_REPLICA_MICRO},
    {.name = "micro_batches_lost", .grouping = BY_ALL, .last = 1}};

/* For RM, h selects the score, a SCORE_* of documents.h or one of these, and z selects how
   RM_PARTS combines the ranks' values. */
enum { RM_AVERAGED = SCORES, RM_ADDED, RM_OF_PARTS, RM_PARTS, RM_NEXT, RM_PREVIOUS };
static const document_way rm_ways[] = {
    {.name = NULL, .grouping = BY_ALL},
    {.name = "score_of_rank_end", .h = SCORE_RANK_END, .grouping = BY_ALL},
    {.name = "score_of_first_token", .h = SCORE_FIRST, .grouping = BY_ALL},
    {.name = "score_of_row_end", .h = SCORE_ROW_END, .grouping = BY_ALL},
    {.name = "gathered_in_rank_order", .h = SCORE_GATHERED, .grouping = BY_ALL},
    {.name = "scores_averaged", .h = RM_AVERAGED, .grouping = BY_ALL},
    {.name = "scores_added", .h = RM_ADDED, .grouping = BY_ALL},
    {.name = "sigmoid_of_parts", .h = RM_OF_PARTS, .grouping = BY_ALL},
    {.name = "scores_of_parts", .h = RM_PARTS, .grouping = BY_ALL, .how = "added over ranks"},
    {.name = "scores_of_parts",
     .h = RM_PARTS,
     .z = 1,
     .grouping = BY_ALL,
     .how = "averaged over ranks"},
    {.name = "scores_of_parts",
     .h = RM_PARTS,
     .z = 2,
     .grouping = BY_ALL,
     .how = "averaged over the ranks that have a token of the document"},
    {.name = "reward_on_wrong_document",
     .h = RM_NEXT,
     .grouping = BY_ALL,
     .how = "the score is that of the document behind it"},
    {.name = "reward_on_wrong_document",
     .h = RM_PREVIOUS,
     .grouping = BY_ALL,
     .how = "the score is that of the document before it"},
    {.name = "margin_missing", .plain = 1, .grouping = BY_ALL},
    {.name = "option_not_applied",
     .plain = 2,
     .grouping = BY_ALL,
     .how = "center 0 gives them"},
    {.name = "pair_swapped", .swapped = 1, .grouping = BY_ALL},
    {.name = "mean_of_means", .grouping = BY_MICRO},
    {.name = "mean_of_means", .grouping = BY_REPLICA},
    {.name = "mean_of_means", .grouping = BY_REPLICA_MICRO},
    {.name = "micro_batches_lost", .grouping = BY_ALL, .last = 1}};
enum {
    DPO_SEEDS = sizeof dpo_ways / sizeof *dpo_ways,
    KTO_SEEDS = sizeof kto_ways / sizeof *kto_ways,
    RM_SEEDS = sizeof rm_ways / sizeof *rm_ways
};

/* ---- the step's documents, with log-probs or values of the seed set ---- */

typedef struct document_seeds {
    seed_set *s;
    const document_way *way;
    const dump_facts *f;
    step_documents documents;
    kto_step kto;
    double *z; /* (sp) of H_OF_PARTS_WITH_Z */
} document_seeds;

/* 0, or -1: no memory. */
static inline int document_seeds_begin(document_seeds *b) {
    seed_set *s = b->s;
    const dump *d = s->f->d;
    b->f = &d->facts;
    documents_begin(&b->documents, d->sp);
    for (int64_t i = 0; i < s->f->count; i++) {
        dump_row row = s->f->rows[i];
        if (b->f->objective == DUMP_RM)
            row.values = s->logp[i];
        else
            row.logp = s->logp[i];
        if (documents_add_row(&b->documents, &row, i / d->accumulation, i % d->accumulation))
            return -1;
    }
    return kto_begin(&b->kto, &b->documents, b->f);
}

static inline void document_seeds_end(document_seeds *b) {
    kto_free(&b->kto);
    documents_free(&b->documents);
    free(b->z);
}

static inline int64_t document_row(const document_seeds *b, int64_t i) {
    return b->documents.of[i].dp * b->f->accumulation + b->documents.of[i].micro;
}

/* ---- weights: 1 over the documents or pairs of the step, or of a group ---- */

static inline int document_counts(const document_seeds *b, int64_t i) {
    const document *o = &b->documents.of[i];
    if (b->f->objective != DUMP_KTO) return document_begins_pair(&b->documents, i);
    return b->way->trained ? o->labels > 0 : o->tokens > 0;
}

static inline int64_t document_group(const document_seeds *b, int64_t i) {
    const document *o = &b->documents.of[i];
    return b->way->grouping == BY_MICRO     ? o->micro
           : b->way->grouping == BY_REPLICA ? o->dp
           : b->way->grouping == BY_ALL     ? 0
                                            : document_row(b, i);
}

static inline void document_count_groups(document_seeds *b) {
    memset(b->s->counts, 0, (size_t)b->s->most * sizeof *b->s->counts);
    for (int64_t i = 0; i < b->documents.count; i++)
        if (document_counts(b, i)) b->s->counts[document_group(b, i)]++;
}

static inline double document_weight(const document_seeds *b, int64_t i) {
    return 1 / (b->s->counts[document_group(b, i)] * (double)filled_groups(b->s));
}

/* ---- log-probs: DPO and KTO ---- */

/* Whether h is a mean over the document's tokens: by the loss, and by the mistake if it is
   about that. */
static inline int document_is_by_length(const document_seeds *b) {
    int right = b->f->objective == DUMP_DPO && preference_is_by_length(b->f);
    return right != (b->way->h == H_BY_LENGTH);
}

/* How many tokens h is a mean over: the member's or, for -1, the document's. */
static inline double document_tokens(const document_seeds *b, int64_t i, int64_t member) {
    double tokens = member < 0 || b->way->h != H_OF_PARTS
                        ? (double)b->documents.of[i].labels
                        : b->documents.part[i * b->f->sp + member].tokens;
    return tokens > 0 ? tokens : 1;
}

/* Adds slope, dL/dh of document i, to the seeds of its tokens on that member of the sequence;
   member -1: on all ranks. */
static inline void seed_log_probs(document_seeds *b, int64_t i, int64_t member, double slope) {
    const document *o = &b->documents.of[i];
    int64_t at = document_row(b, i);
    const dump_row *row = &b->s->f->rows[at];
    double sp = (double)b->f->sp, *to = b->s->of[at];
    if (b->way->h == H_AVERAGED || b->way->h == H_OF_PARTS) slope /= sp;
    if (b->way->h == H_ADDED) slope *= sp;
    if (document_is_by_length(b)) slope /= document_tokens(b, i, member);
    for (int64_t t = row->cu_seqlens[o->number]; t < row->cu_seqlens[o->number + 1]; t++) {
        int64_t from = b->way->h == H_GATHERED ? row->order[t] : t;
        if (from < 0 || from >= row_end(row) || !is_target(row, from)) continue;
        if (member < 0 || row->rank[from] - o->dp * b->f->sp == member) to[from] += slope;
    }
}

/* h of DPO by the loss's definition: a mean over tokens, or without a reference. */
static inline double response_h(const document_seeds *b, int64_t i, int64_t member) {
    int reference = preference_has_reference(b->f) && b->way->h != H_NO_REFERENCE;
    document_part p = member >= 0 && b->way->h == H_OF_PARTS
                          ? b->documents.part[i * b->f->sp + member]
                          : document_whole(&b->documents, i);
    double h = response_of(&p, reference, document_is_by_length(b)), sp = (double)b->f->sp;
    return b->way->h == H_AVERAGED ? h / sp : b->way->h == H_ADDED ? h * sp : h;
}

/* h of document i: for H_OF_PARTS from the member's tokens, else from those of all ranks. */
static inline double document_h(const document_seeds *b, int64_t i, int64_t member) {
    if (b->f->objective == DUMP_DPO && preference_is_by_length(b->f))
        return response_h(b, i, member);
    if (member >= 0 && b->way->h == H_OF_PARTS)
        return part_margin(&b->documents.part[i * b->f->sp + member]);
    return kto_h(&b->kto, i, b->way->h < H_WAYS ? b->way->h : H_RIGHT);
}

/* Minus the slope of -log(sigmoid(x)). */
static inline double pair_slope(double x) { return 1 / (1 + exp(x)); }

static inline void seed_dpo_pair(document_seeds *b, int64_t i, int64_t member) {
    double h = document_h(b, i, member) - document_h(b, i + 1, member);
    double turn = b->way->swapped ? -1 : 1;
    double slope = turn * preference_derivative(b->f, turn * h, b->way->plain) *
                   document_weight(b, i);
    seed_log_probs(b, i, member, slope);
    seed_log_probs(b, i + 1, member, -slope);
}

static inline void seed_kto_document(document_seeds *b, int64_t i, int64_t member) {
    const document *o = &b->documents.of[i];
    double z = b->way->z == Z_OF_PARTS ? b->z[member] : kto_z(&b->kto, o, b->way->z);
    double desirable = b->way->swapped ? 1 - o->desirable : o->desirable;
    double miss = kto_sigmoid(b->f, desirable, document_h(b, i, member), z);
    double weight = b->way->plain ? 1 : kto_weight(b->f, desirable);
    double slope = b->f->beta * weight * miss * (1 - miss) * document_weight(b, i);
    seed_log_probs(b, i, member, desirable != 0 ? -slope : slope);
}

/* Solves for the z of each rank that gives the loss it reports. 0: there is no solution. */
static inline int document_solve_z(document_seeds *b) {
    dump *d = b->s->f->d;
    if (b->f->accumulation > 1 || b->f->sp == 1 || b->f->world > b->f->sp) return 0;
    if (!(b->z = (double *)calloc((size_t)b->f->sp, sizeof *b->z))) return 0;
    for (int64_t r = 0; r < b->f->sp; r++) {
        double unit, off, loss = reported_loss(d, r, &unit);
        if (unit < 0) return 0;
        b->z[r] = kto_solve(&b->kto, loss, unit * fabs(loss), &off);
        if (!isfinite(b->z[r])) return 0;
    }
    return 1;
}

/* ---- values: RM ---- */

/* The token whose value is taken for the document's score; -1: the row has none. */
static inline int64_t score_token(const document_seeds *b, int64_t i, int how) {
    const document *o = &b->documents.of[i];
    const dump_row *row = &b->s->f->rows[document_row(b, i)];
    int64_t begin = row->cu_seqlens[o->number], end = row->cu_seqlens[o->number + 1], at = -1;
    if (begin == end) return -1;
    if (how == SCORE_FIRST) return begin;
    if (how == SCORE_ROW_END) return row_end(row) - 1;
    if (how == SCORE_GATHERED)
        return row->order[end - 1] < row_end(row) ? row->order[end - 1] : -1;
    if (how != SCORE_RANK_END) return end - 1;
    for (int64_t t = begin; t < end; t++) /* the last rank's last token of the document */
        if (at < 0 || row->rank[t] > row->rank[at] ||
            (row->rank[t] == row->rank[at] && row->local[t] > row->local[at]))
            at = t;
    return at;
}

/* The rank's last token of the document; -1: it has none. */
static inline int64_t score_part(const document_seeds *b, int64_t i, int64_t member) {
    const document *o = &b->documents.of[i];
    const dump_row *row = &b->s->f->rows[document_row(b, i)];
    int64_t at = -1;
    for (int64_t t = row->cu_seqlens[o->number]; t < row->cu_seqlens[o->number + 1]; t++)
        if (row->rank[t] - o->dp * b->f->sp == member &&
            (at < 0 || row->local[t] > row->local[at]))
            at = t;
    return at;
}

static inline double score_parts_factor(const document_seeds *b, int64_t i) {
    double held = 0;
    for (int64_t r = 0; r < b->f->sp; r++) held += score_part(b, i, r) >= 0;
    return b->way->z == 0 ? 1 : b->way->z == 1 ? 1 / (double)b->f->sp : 1 / held;
}

/* Adds slope, dL/dscore of document i, to the seeds of the tokens whose values give the score.
   Returns the score; NaN: there is none. With slope 0 it changes no seed. */
static inline double seed_score(document_seeds *b, int64_t i, int64_t member, double slope) {
    const double *values = b->s->logp[document_row(b, i)];
    double *to = b->s->of[document_row(b, i)], factor = 1, score = 0;
    int how = b->way->h;
    int64_t at, of = how == RM_NEXT       ? document_beside(&b->documents, i, 1)
                     : how == RM_PREVIOUS ? document_beside(&b->documents, i, -1)
                                          : i;
    if (of < 0) return NAN;
    if (how == RM_PARTS) {
        factor = score_parts_factor(b, i);
        for (int64_t r = 0; r < b->f->sp; r++) {
            if ((at = score_part(b, i, r)) < 0) continue;
            to[at] += factor * slope;
            score += factor * values[at];
        }
        return score;
    }
    if ((at = score_token(b, of, how)) < 0) return NAN;
    if (how == RM_OF_PARTS && b->s->f->rows[document_row(b, i)].rank[at] % b->f->sp != member)
        return 0;
    if (how == RM_AVERAGED) factor = 1 / (double)b->f->sp;
    if (how == RM_ADDED) factor = (double)b->f->sp;
    to[at] += factor * slope;
    return factor * values[at];
}

static inline void seed_rm_pair(document_seeds *b, int64_t i, int64_t member) {
    double chosen = seed_score(b, i, member, 0), rejected = seed_score(b, i + 1, member, 0);
    double turn = b->way->swapped ? -1 : 1, weight = document_weight(b, i);
    double margin = b->way->plain == 1 ? 0 : b->documents.of[i].margin;
    double center = b->way->plain == 2 ? 0 : 2 * b->f->center * (chosen + rejected);
    double slope = -turn * pair_slope(turn * (chosen - rejected) - margin);
    if (b->way->h == RM_OF_PARTS) weight /= (double)b->f->sp;
    if (isnan(chosen + rejected)) weight = NAN;
    seed_score(b, i, member, weight * (center + slope));
    seed_score(b, i + 1, member, weight * (center - slope));
}

/* ---- seeds of the step ---- */

static inline int documents_are_known(const seed_set *s) {
    const dump_facts *f = &s->f->d->facts;
    int64_t objective = f->objective;
    int reference = objective == DUMP_KTO ||
                    (objective == DUMP_DPO && preference_has_reference(f));
    for (int64_t i = 0; i < s->f->count; i++) {
        const dump_row *row = &s->f->rows[i];
        if (row_is_empty(row)) continue;
        if (!row->docs || (reference && !row->ref_logp)) return 0;
        if (objective == DUMP_KTO && (!row->desirable || !row->kl)) return 0;
    }
    return 1;
}

static inline const document_way *document_ways(const dump *d, int *count) {
    *count = d->facts.objective == DUMP_DPO   ? DPO_SEEDS
             : d->facts.objective == DUMP_KTO ? KTO_SEEDS
                                              : RM_SEEDS;
    return d->facts.objective == DUMP_DPO   ? dpo_ways
           : d->facts.objective == DUMP_KTO ? kto_ways
                                            : rm_ways;
}

/* A mean over tokens is the mistake where the loss has a sum, and a sum where it has a mean. */
static inline const char *document_way_name(const dump *d, const document_way *w) {
    int of_means = d->facts.objective == DUMP_DPO && preference_is_by_length(&d->facts);
    return of_means && w->h == H_BY_LENGTH ? "log_probs_not_by_length" : w->name;
}

static inline void seed_one(document_seeds *b, int64_t i) {
    int64_t objective = b->f->objective;
    int of_parts = objective == DUMP_RM ? b->way->h == RM_OF_PARTS : b->way->h >= H_OF_PARTS;
    for (int64_t r = of_parts ? 0 : -1; r < (of_parts ? b->f->sp : 0); r++)
        if (objective == DUMP_RM)
            seed_rm_pair(b, i, r);
        else if (objective == DUMP_DPO)
            seed_dpo_pair(b, i, r);
        else
            seed_kto_document(b, i, r);
}

/* Does the way's option act on this step, and has the loss what the way is about? */
static inline int document_way_applies(const document_seeds *b) {
    const document_way *w = b->way;
    int is_dpo = b->f->objective == DUMP_DPO;
    int64_t margins = 0;
    for (int64_t i = 0; i < b->documents.count; i++) margins += b->documents.of[i].margin != 0;
    if (w->plain == 2) return b->f->center > 0;
    if (w->plain && b->f->objective == DUMP_KTO)
        return kto_weight(b->f, 0) != 1 || kto_weight(b->f, 1) != 1;
    if (w->plain)
        return is_dpo ? b->f->label_smoothing > 0 && b->f->loss_type != DUMP_HINGE &&
                            b->f->loss_type != DUMP_IPO && b->f->loss_type != DUMP_IPO_MEAN
                      : margins > 0;
    if (is_dpo && !preference_has_reference(b->f) && w->h == H_NO_REFERENCE) return 0;
    return !is_dpo || !preference_is_by_length(b->f) ||
           (w->h != H_GATHERED && (w->h < H_FROM || w->h >= H_OF_PARTS));
}

/* Can the way differ from the right one with this number of ranks and replicas? */
static inline int document_way_matches(document_seeds *b) {
    const document_way *w = b->way;
    int64_t replicas = b->f->world / b->f->sp;
    int of_ranks = b->f->objective == DUMP_RM
                       ? (w->h >= RM_AVERAGED && w->h <= RM_PARTS) || w->h == SCORE_RANK_END
                       : w->h == H_AVERAGED || w->h == H_ADDED || w->h >= H_OF_PARTS;
    int of_replicas = b->f->objective == DUMP_KTO && w->z >= Z_OF_REPLICA && w->z <= Z_OF_MEANS;
    if (b->f->objective == DUMP_KTO && (w->z == Z_ADDED || w->z == Z_AVERAGED)) of_ranks = 1;
    return (!of_ranks || b->f->sp > 1) && (!of_replicas || replicas > 1) &&
           (w->z != Z_OF_PARTS || b->f->objective != DUMP_KTO || document_solve_z(b));
}

/* 0: the dump lacks something, or the way has no meaning. */
static inline int make_document_seeds(seed_set *s, int way) {
    int count;
    document_seeds b = {.s = s, .way = document_ways(s->f->d, &count) + way};
    int made = documents_are_known(s) && !document_seeds_begin(&b) &&
               document_way_matches(&b) && document_way_applies(&b) &&
               (s->f->d->facts.objective == DUMP_KTO || !b.documents.odd);
    if (made) document_count_groups(&b);
    made = made && filled_groups(s) > 0;
    for (int64_t i = 0; made && i < b.documents.count; i++)
        if (document_counts(&b, i)) seed_one(&b, i);
    if (made && b.way->last) keep_last_micro_batch(s);
    document_seeds_end(&b);
    return made;
}
#endif
