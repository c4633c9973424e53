/* SPDX-License-Identifier: MIT OR Unlicense */
/* gradients.h - judges gradients of a dump after all reductions and before clip: against sums
 * of the ranks' local. tensors, and against another run of the same step, usually on one
 * rank. */
#ifndef ORACLE_GRADIENTS_H
#define ORACLE_GRADIENTS_H
#include "trainer/base/memory.h" /* stb_ds */
#include "oracle/verdict/checks.h"
#include "factors.h"
#include "gradient_pairs.h"
#include "gradient_weights.h"
#include "kept_gradient.h"
#include "tied_table.h"

/* more: NULL, or receives the compared gradients and the limit. 0, or -1 with the error of one
   of the dumps. */
static inline int check_gradients(stage *s, dump *d, dump *want, double tolerance,
                                  details *more) {
    gradient_check c = {
        .d = d, .want = want, .s = s, .tolerance = gradient_limit(d, tolerance)};
    int status = each_parameter(want, "grad.", add_gradient, &c);
    if (!status && c.n && !s->judged) {
        if (!isfinite(c.all.want_want) || (c.all.want_want == 0 && c.all.got_got == 0))
            verdict_say(stage_begin(s, VERDICT_INSUFFICIENT),
                        c.all.want_want == 0 ? "all gradients are 0"
                                             : "a wanted gradient is NaN or Inf");
        else if (distance_from(&c.all, likeness_factor(&c.all)) <= c.tolerance)
            judge_factor(&c);
        else
            judge_factors(&c);
        if (s->v.kind == VERDICT_WRONG && !s->v.count) status = judge_shares(&c);
        if (!status && s->v.kind == VERDICT_WRONG && !s->v.count) status = name_tied_table(&c);
        if (!status && s->v.kind == VERDICT_WRONG && !s->v.count)
            status = name_kept_gradient(&c);
        if (s->v.kind == VERDICT_RIGHT) judge_small_ones(&c);
    }
    if (s->judged && c.missing)
        verdict_say(&s->v, "%lld wanted parameters have no gradient in the dump",
                    (long long)c.missing);
    if (!status) status = details_keep(more, &c);
    free(c.each);
    return status;
}

/* ---- against sums of the ranks' local gradients ---- */

/* Whose gradients a rank may have summed: all ranks'; its replica's; those of its sp rank in
   all replicas; its own alone; all ranks', each clipped by its own norm. */
enum { ADDED_ALL, ADDED_SEQUENCE, ADDED_REPLICAS, ADDED_OWN, ADDED_CLIPPED, ADDITIONS };

static inline double clip_factor(double max_norm, double norm) {
    double factor = max_norm / (norm + 1e-6);
    return max_norm > 0 && factor < 1 ? factor : 1;
}

/* A parameter's gradient on one rank: which sum it is a multiple of, and which multiple. what
   ADDITIONS: none. */
typedef struct reduced_param {
    char name[120];
    int64_t rank;
    int what;
    double factor;
} reduced_param;

typedef struct reduction_check {
    dump *d;
    reduced_param *each; /* stb_ds */
    double tolerance;
    const double *clip;          /* (world) clip factors by each local gradient's norm */
    likeness *like;              /* (world, ADDITIONS) of grad. with each sum */
    int64_t *held;               /* (world) grad. tensors that were compared */
    int64_t parameters, missing; /* missing: those with local. tensors but no grad. tensor */
    char first_missing[128];
} reduction_check;

/* Sums of one parameter's local gradients: over all ranks; by replica; by sp rank; each rank's
   own; over all ranks, clipped first. */
typedef struct local_sums {
    int64_t count;
    double **sum; /* (1 + dp + sp + world + 1) */
} local_sums;

static inline int64_t sum_of(const dump *d, int what, int64_t rank) {
    int64_t dp = d->world / d->sp;
    return what == ADDED_ALL        ? 0
           : what == ADDED_SEQUENCE ? 1 + rank / d->sp
           : what == ADDED_REPLICAS ? 1 + dp + rank % d->sp
           : what == ADDED_OWN      ? 1 + dp + d->sp + rank
                                    : 1 + dp + d->sp + d->world;
}

static inline void local_sums_free(const dump *d, local_sums *l) {
    for (int64_t i = 0; l->sum && i <= sum_of(d, ADDED_CLIPPED, 0); i++) free(l->sum[i]);
    free(l->sum);
}

static inline int add_local(const dump *d, local_sums *l, int64_t rank, double clip,
                            const double *own) {
    for (int what = 0; what < ADDITIONS; what++) {
        double **sum = &l->sum[sum_of(d, what, rank)];
        double factor = what == ADDED_CLIPPED ? clip : 1;
        if (!*sum) *sum = (double *)calloc((size_t)l->count + 1, sizeof **sum);
        for (int64_t i = 0; *sum && i < l->count; i++) (*sum)[i] += factor * own[i];
        if (!*sum) return -1;
    }
    return 0;
}

/* clip: (world) factors; NULL: all 1. Returns 1; 0: some rank lacks the tensor; -1 with
   d->error. */
static inline int local_sums_read(dump *d, const char *name, const double *clip,
                                  local_sums *l) {
    l->sum = (double **)calloc((size_t)(d->world * 3 + 2), sizeof *l->sum);
    for (int64_t r = 0; l->sum && r < d->world; r++) {
        const seqpar_safetensors_tensor *t = seqpar_safetensors_find(d->ranks[r].file, name);
        double *own;
        int status;
        if (!t) return 0;
        if (!r) l->count = t->count;
        if (t->count != l->count) {
            seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                        "%.300s: tensor %.100s has %lld elements, but %lld in another file; "
                        "write the local gradient of the whole parameter on every rank",
                        d->ranks[r].path, name, (long long)t->count, (long long)l->count);
            return -1;
        }
        if (!(own = dump_doubles(d, r, t))) return -1;
        status = add_local(d, l, r, clip ? clip[r] : 1, own);
        free(own);
        if (!status) continue;
        l->count = -1;
        break;
    }
    if (l->sum && l->count >= 0) return 1;
    seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for gradients");
    return -1;
}

/* Compares rank r's range of grad. with that range of each sum. 0, or -1 with d->error. */
static inline int liken_reduced(reduction_check *c, int64_t r, const char *name,
                                const local_sums *l) {
    const seqpar_safetensors_tensor *t = seqpar_safetensors_find(c->d->ranks[r].file, name);
    double *got;
    part p;
    if (!t) return 0;
    c->held[r]++;
    if (part_of(c->d, r, t, &p)) return -1;
    if (p.total != l->count) {
        seqpar_fail(&c->d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor %.100s has %lld elements in all, but its local. tensor has "
                    "%lld; write both of the whole parameter",
                    c->d->ranks[r].path, name, (long long)p.total, (long long)l->count);
        return -1;
    }
    if (!(got = dump_doubles(c->d, r, t))) return -1;
    reduced_param one = {.rank = r, .what = ADDITIONS};
    /* then ADDED_SEQUENCE and ADDED_REPLICAS are the same sums as ADDED_OWN and ADDED_ALL */
    int some = c->d->sp == 1 || c->d->sp == c->d->world;
    snprintf(one.name, sizeof one.name, "%s", name + strlen("grad."));
    for (int what = 0; what < ADDITIONS; what++) {
        likeness like = {0};
        liken(&like, got, l->sum[sum_of(c->d, what, r)] + p.offset, p.count);
        likeness_add(&c->like[r * ADDITIONS + what], &like);
        if ((what == ADDED_SEQUENCE || what == ADDED_REPLICAS) && some) continue;
        if (one.what < ADDITIONS ||
            !(distance_from(&like, likeness_factor(&like)) <= c->tolerance))
            continue;
        one.what = what;
        one.factor = likeness_factor(&like);
    }
    arrput(c->each, one);
    free(got);
    return 0;
}

static inline int add_reduced(void *user, const char *parameter) {
    reduction_check *c = (reduction_check *)user;
    tensor_name local, grad;
    local_sums sums = {0};
    int found = local_sums_read(c->d, tensor_of(&local, "local.", parameter), c->clip, &sums);
    int status = found < 0 ? -1 : 0;
    tensor_of(&grad, "grad.", parameter);
    c->parameters += found > 0;
    if (found > 0 && is_in_no_file(c->d, grad.text) && !c->missing++)
        snprintf(c->first_missing, sizeof c->first_missing, "%s", grad.text);
    for (int64_t r = 0; found > 0 && !status && r < c->d->world; r++)
        status = liken_reduced(c, r, grad.text, &sums);
    local_sums_free(c->d, &sums);
    return status;
}

/* Whether the rank's gradients are a multiple of that sum. */
static inline int is_reduced(const reduction_check *c, int64_t rank, int what) {
    const likeness *l = &c->like[rank * ADDITIONS + what];
    return distance_from(l, likeness_factor(l)) <= c->tolerance;
}

static const char *const added_texts[ADDITIONS] = {
    "the sum of all ranks' local ones", "the sum over the ranks of a sequence",
    "the sum over replicas", "the rank's own alone", "the sum of local ones that were clipped"};
static const char *const added_names[ADDITIONS] = {NULL, "replicas_not_reduced",
                                                   "sequence_not_reduced", "never_synchronised",
                                                   "clip_before_reduction"};

/* Names the mistakes whose sums fit. Returns how many sums over fewer ranks fit. */
static inline int name_reductions(const reduction_check *c, int64_t rank, verdict *v) {
    int64_t sp = c->d->sp, dp = c->d->world / sp;
    int own = is_reduced(c, rank, ADDED_OWN), fit = own;
    if (own) verdict_name(v, mistake_named("never_synchronised"));
    if (!is_reduced(c, rank, ADDED_ALL) && is_reduced(c, rank, ADDED_CLIPPED))
        verdict_name(v, mistake_named("clip_before_reduction"));
    if (sp == 1 || dp == 1) return fit;
    if (is_reduced(c, rank, ADDED_SEQUENCE) && ++fit)
        verdict_name(v, mistake_named("replicas_not_reduced"));
    if (is_reduced(c, rank, ADDED_REPLICAS) && ++fit)
        verdict_name(v, mistake_named("sequence_not_reduced"));
    return fit;
}

/* Notes which sums of fewer ranks would give the rank another gradient. */
static inline void try_reductions(const reduction_check *c, int64_t rank, verdict *v) {
    int64_t sp = c->d->sp, dp = c->d->world / sp;
    for (int what = ADDED_SEQUENCE; what < ADDITIONS; what++) {
        int of_some = what == ADDED_SEQUENCE || what == ADDED_REPLICAS;
        if ((of_some && (sp == 1 || dp == 1)) || sp * dp == 1) continue;
        if (what == ADDED_CLIPPED && c->d->facts.max_norm == 0) continue;
        verdict_try(v, added_names[what], NULL, !is_reduced(c, rank, what));
    }
}

/* A sum that is 0, NaN or Inf gives no factor. 1: it is such a sum, and s says so. */
static inline int reduced_shows_nothing(const reduction_check *c, int64_t rank, stage *s) {
    const likeness *l = &c->like[rank * ADDITIONS + ADDED_ALL];
    double all = l->got_got + l->want_want;
    if (isfinite(all) && l->want_want != 0) return 0;
    stage_begin(s, isfinite(all) && all == 0 ? VERDICT_INSUFFICIENT : VERDICT_WRONG);
    verdict_say(&s->v, "rank %lld's gradients %s", (long long)rank,
                !isfinite(all) ? "or some rank's local ones hold NaN or Inf"
                : all == 0     ? "are 0, and so is the sum of all ranks' local ones"
                               : "are not 0, and the sum of all ranks' local ones is");
    return 1;
}

/* ---- parameter by parameter ---- */

/* The most frequent factor among parameters that are multiples of the sum over all ranks; 0:
   there is no such parameter. */
static inline double reduced_factor(const reduction_check *c, int64_t rank) {
    double factor = 0;
    int64_t most = 0;
    for (int64_t i = 0; i < arrlen(c->each); i++) {
        int64_t count = 0;
        if (c->each[i].rank != rank || c->each[i].what != ADDED_ALL) continue;
        for (int64_t k = 0; k < arrlen(c->each); k++)
            count += c->each[k].rank == rank && c->each[k].what == ADDED_ALL &&
                     fabs(c->each[k].factor / c->each[i].factor - 1) <= c->tolerance;
        if (count > most) factor = c->each[i].factor;
        if (count > most) most = count;
    }
    return factor;
}

/* "grad.head: the rank's own alone", for up to four parameters. */
static inline void say_reduced(const reduction_check *c, int64_t rank, int what, double factor,
                               verdict *v) {
    char text[200] = "";
    int64_t left = 0, count = 0;
    for (int64_t i = 0; i < arrlen(c->each); i++) {
        const reduced_param *p = &c->each[i];
        if (p->rank != rank || p->what != what || fabs(p->factor / factor - 1) > c->tolerance)
            continue;
        if (count++ < 4 && strlen(text) + strlen(p->name) + 3 < sizeof text)
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", *text ? ", " : "",
                     p->name);
        else
            left++;
    }
    if (left)
        snprintf(text + strlen(text), sizeof text - strlen(text), " and %lld more",
                 (long long)left);
    verdict_say(v, "of %s it is %.6g times %s", text, factor, added_texts[what]);
}

/* If every parameter is a multiple of some sum: names the mistake of each sum that is not over
   all ranks. For a sum over all ranks with another factor than the most frequent one, names the
   mistakes that give the ratio of the two. */
static inline void name_by_parameter(const reduction_check *c, int64_t rank, verdict *v) {
    double most = reduced_factor(c, rank);
    for (int64_t i = 0; i < arrlen(c->each); i++)
        if (c->each[i].rank == rank && c->each[i].what == ADDITIONS) return;
    if (most == 0) return;
    for (int64_t i = 0; i < arrlen(c->each); i++) {
        const reduced_param *p = &c->each[i];
        int seen = p->rank != rank ||
                   (p->what == ADDED_ALL && fabs(p->factor / most - 1) <= c->tolerance);
        for (int64_t k = 0; k < i && !seen; k++)
            seen = c->each[k].rank == rank && c->each[k].what == p->what &&
                   fabs(c->each[k].factor / p->factor - 1) <= c->tolerance;
        if (seen) continue;
        say_reduced(c, rank, p->what, p->factor, v);
        if (added_names[p->what]) {
            verdict_name(v, mistake_named(added_names[p->what]));
        } else {
            law l = {.got = p->factor,
                     .want = most,
                     .sp = c->d->sp,
                     .dp = c->d->world / c->d->sp,
                     .accumulation = c->d->accumulation,
                     .tolerance = c->tolerance};
            law_name_gradients(&l, v);
        }
    }
    say_reduced(c, rank, ADDED_ALL, most, v);
}

/* If loss_count tells what ranks divide by, only one factor is right. */
static inline void judge_reduced_factor(const reduction_check *c, double factor, verdict *v) {
    verdict said;
    law l = {.got = factor,
             .want = c->d->divisor,
             .sp = c->d->sp,
             .dp = c->d->world / c->d->sp,
             .accumulation = c->d->accumulation,
             .tolerance = c->tolerance};
    law_judge(&l, &said);
    v->kind = said.kind;
    v->all = said.all;
    for (int i = 0; i < said.count; i++) verdict_name(v, said.named[i]);
    verdict_say(v,
                "ranks divide sums of their own losses by %.6g times the step's count "
                "(loss_count), so %.6g is right",
                l.want, l.want);
    if (v->kind == VERDICT_RIGHT) return;
    for (int i = 1; i < said.lines; i++) verdict_say(v, "%s", said.line[i]);
    verdict_say(v, "if a rank's sum is of more than its own tokens, write loss_sum, too");
}

/* Judges a rank's gradients by their factor to the sum of all local ones. Without loss_count
   any factor may be right: it depends on what the backward passes start from. If sums over
   fewer ranks fit, too, the step shows nothing. */
static inline void judge_reduced(const reduction_check *c, int64_t rank, stage *s) {
    const likeness *l = &c->like[rank * ADDITIONS + ADDED_ALL];
    double factor = likeness_factor(l);
    int right = is_reduced(c, rank, ADDED_ALL), others;
    verdict *v;
    if (reduced_shows_nothing(c, rank, s)) return;
    v = stage_begin(s, right ? VERDICT_RIGHT : VERDICT_WRONG);
    verdict_say(v,
                "rank %lld's gradients are %.6g times the sum of all ranks' local ones, within "
                "%.3g (tolerance %g)",
                (long long)rank, factor, distance_from(l, factor), c->tolerance);
    others = name_reductions(c, rank, v);
    if (!right && !v->count) name_by_parameter(c, rank, v);
    if (!right) return;
    v->count = 0;
    try_reductions(c, rank, v);
    if (others) v->kind = VERDICT_INSUFFICIENT;
    if (others)
        verdict_say(v, "sums of fewer ranks are the same here: give ranks and replicas "
                       "different tokens");
    else if (c->d->divisor > 0)
        judge_reduced_factor(c, factor, v);
    else
        verdict_say(v,
                    "1 is a sum and %.6g a mean over all ranks; which is right depends on what "
                    "each rank's backward pass starts from: --want, --model or loss_count say "
                    "it",
                    1 / (double)c->d->world);
}

/* Says which grad. tensor is in no file although all ranks have its local. tensor. */
static inline void say_missing(const reduction_check *c, stage *s) {
    char text[200];
    snprintf(text, sizeof text, "%.100s, which is in no file though all have its local. tensor",
             c->first_missing);
    text_mend(text);
    if (!s->judged)
        memcpy(s->lacks, text, sizeof s->lacks);
    else
        verdict_say(&s->v,
                    "%lld parameters could not be judged without grad. tensors, the "
                    "first %.100s",
                    (long long)c->missing, c->first_missing);
}

/* clip: (world) each rank's clip factor by the norm of its local gradient. 0, or -1 with
   d->error. */
static inline int check_reduction(stage *s, dump *d, double tolerance, const double *clip) {
    reduction_check c = {.d = d, .tolerance = gradient_limit(d, tolerance), .clip = clip};
    int status = 0;
    c.like = (likeness *)calloc((size_t)(d->world * ADDITIONS), sizeof *c.like);
    c.held = (int64_t *)calloc((size_t)d->world, sizeof *c.held);
    if (!c.like || !c.held)
        status = (seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory"), -1);
    if (!status && d->world > 1) status = each_parameter(d, "local.", add_reduced, &c);
    for (int64_t r = 0; !status && c.parameters && r < d->world; r++) {
        stage one = {.judged = 0};
        if (!c.held[r]) continue; /* a shard may be empty */
        judge_reduced(&c, r, &one);
        stage_add(s, &one);
    }
    if (!status && c.missing) say_missing(&c, s);
    arrfree(c.each);
    free(c.like);
    free(c.held);
    return status;
}
#endif
