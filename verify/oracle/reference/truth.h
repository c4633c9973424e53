/* SPDX-License-Identifier: MIT OR Unlicense */
/* truth.h - compares a dump's log-probs and gradients with those of the reference.
 *
 * The limit of the distance is measured: the same step is computed on a device that rounds
 * weights, activations and gradients to bf16, with sums in fp32. Rounding errors are
 * proportional to a type's unit, so those of another type are bf16's distance times the ratio
 * of the units. The limit is four times that. */
#ifndef ORACLE_TRUTH_H
#define ORACLE_TRUTH_H
#include <time.h>
#include "model_ways.h"
#include "oracle/gradient/objective_seeds.h"
#include "second_reference.h"
#include "tied_halves.h"
#include "oracle/gradient/step.h"

typedef struct truth {
    reference exact, rounded;     /* fp64, bf16 */
    reference turned;             /* fp64, with rotary angles as wrong as in float32 */
    const char *folder, *adapter; /* adapter: NULL where there is none */
    dump *d;
    double ratio;     /* of the unit of the dump's type to that of bf16 */
    const char *unit; /* the name of that type */
    double budget;    /* seconds */
    double *got;      /* (elements) of grad. tensors */
    char *have;       /* (tensors) whether the dump has the tensor */
    double logp_limit, gradient_limit;
    double logp_noise, gradient_noise; /* how far bf16 is from fp64 */
    int logp_is_right, is_void;
    double logp_distance;  /* the largest of one log-prob between bf16 and fp64 */
    char second[200];      /* what slow.h says of the reference */
    details *more;         /* NULL: nothing is kept */
    double **dumped;       /* (rows) log-probs of the dump, borrowed; NULL: it has none */
    struct timespec begin; /* when the first mistake was tried */
    int begun;
} truth;

static inline double seconds_since(const struct timespec *begin) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - begin->tv_sec) + 1e-9 * (double)(now.tv_nsec - begin->tv_nsec);
}

/* Whether the budget is used up. The first call, before the first mistake, starts the clock. */
static inline int out_of_time(truth *t) {
    if (!t->begun) clock_gettime(CLOCK_MONOTONIC, &t->begin);
    t->begun = 1;
    return seconds_since(&t->begin) >= t->budget;
}

/* Mistakes that were not tried in time, each name once. */
typedef struct untried {
    const char *names[MISTAKES];
    int count;
} untried;

static inline void untried_add(untried *u, const char *name) {
    for (int i = 0; i < u->count; i++)
        if (!strcmp(u->names[i], name)) return;
    u->names[u->count++] = name;
}

static inline void untried_say(const untried *u, double budget, verdict *v) {
    char line[300];
    int used = snprintf(line, sizeof line, "not tried within --budget %g: ", budget);
    for (int i = 0; i < u->count; i++) {
        if (used + strlen(u->names[i]) + 3 > sizeof line) {
            verdict_say(v, "%s", line);
            used = snprintf(line, sizeof line, "nor: ");
        }
        used += snprintf(line + used, sizeof line - (size_t)used, "%s%s", u->names[i],
                         i + 1 < u->count ? ", " : "");
    }
    if (u->count) verdict_say(v, "%s", line);
}

/* ---- the limit ---- */

/* The types that tensors in files can have, all but TF32, are in order from fine to coarse. */
enum { TYPE_F64, TYPE_F32, TYPE_TF32, TYPE_F16, TYPE_BF16, TYPES };
static const struct {
    seqpar_safetensors_dtype dtype;
    const char *name;
    double ratio; /* of units, to bf16 */
} compute_types[TYPES] = {{SEQPAR_SAFETENSORS_F64, "float64", 0x1p-44},
                          {SEQPAR_SAFETENSORS_F32, "float32", 0x1p-15},
                          {SEQPAR_SAFETENSORS_NONE, "tf32", 0x1p-2},
                          {SEQPAR_SAFETENSORS_F16, "float16", 0x1p-3},
                          {SEQPAR_SAFETENSORS_BF16, "bfloat16", 1}};

/* The coarsest type among a rank's parameters, gradients and log-probs, or `found`. */
static inline int coarsest_type(const seqpar_safetensors_file *file, int found) {
    for (int64_t i = 0; i < seqpar_safetensors_count(file); i++) {
        const seqpar_safetensors_tensor *x = seqpar_safetensors_at(file, i);
        int matters = after_prefix(x->name, "grad.") || after_prefix(x->name, "param.") ||
                      strstr(x->name, ".logp") || strstr(x->name, ".values");
        for (int k = 0; matters && k < TYPES; k++)
            if (compute_types[k].dtype == x->dtype && k > found) found = k;
    }
    return found;
}

/* The type that the metadata declare, or else the coarsest one of all ranks. */
static inline int computed_in(const dump *d) {
    int found = TYPE_F64;
    if (d->facts.dtype) return (int)d->facts.dtype - 1;
    for (int64_t r = 0; r < d->world; r++) found = coarsest_type(d->ranks[r].file, found);
    return found;
}

static inline void truth_unit(truth *t) {
    int type = computed_in(t->d);
    t->ratio = compute_types[type].ratio;
    t->unit = compute_types[type].name;
}

/* Log-probs of the dump, or values of RM. */
static inline double *dumped_logp(const reference *f, int64_t i) {
    return f->model.config.score ? f->rows[i].values : f->rows[i].logp;
}

/* A reward model has a value for every token, a language model a log-prob for each label. */
static inline int has_output(const reference *f, int64_t i, int64_t t) {
    return f->model.config.score || is_target(&f->rows[i], t);
}

/* Compares the dump's log-probs (of_dump), or those of f's last run, with `wanted`. */
static inline likeness compare_logp(const reference *f, double *const *wanted, int of_dump) {
    likeness l = {0};
    for (int64_t i = 0; i < f->count; i++)
        for (int64_t t = 0; t < row_end(&f->rows[i]); t++)
            if (has_output(f, i, t))
                liken(&l, of_dump ? &dumped_logp(f, i)[t] : &f->logp[i][t], &wanted[i][t], 1);
    return l;
}

static inline double limit_at(double ratio, double noise) {
    double limit = 4 * noise * ratio;
    return limit > 1e-7 ? limit : 1e-7; /* distances from squares have half of the digits */
}

static inline double limit_of(const truth *t, double noise) {
    return limit_at(t->ratio, noise);
}

/* A dump in float64 may come from float32: transformers computes norms, softmaxes and rotary
   angles in float32 whatever the type of parameters. A distance that this explains proves
   neither a mistake nor its absence, so the verdict becomes insufficient. */
static inline void doubt_float32(const truth *t, double distance, double noise, double angles,
                                 verdict *v) {
    double limit = limit_at(0x1p-15, noise) + angles;
    if ((v->kind != VERDICT_WRONG && v->kind != VERDICT_MARGINAL) || v->count ||
        t->ratio > 0x1p-44 || !(distance <= limit))
        return;
    v->kind = VERDICT_INSUFFICIENT;
    verdict_say(v,
                "as near as float32 makes them (limit %.3g): transformers computes norms, "
                "softmaxes and rotary angles in float32 whatever the type of parameters; "
                "if that is so here, declare it: metadata dtype float32; else this is wrong",
                limit);
    verdict_say_earlier(v);
}

/* ---- rotary angles in float32 ---- */

/* Opens t->turned, once. The error of float32 angles grows with the position, and the distance
   of bf16 does not contain it. It is measured only beyond the limit: it takes as long as the
   model. 0; 1: the dump's type is coarser than float32; -1 with d->error. */
static inline int angles_begin(truth *t) {
    int status;
    if (t->ratio > 0x1p-15) return 1;
    if (t->turned.d) return 0;
    status = reference_open(&t->turned, t->d, t->folder, t->adapter, seqpar_device_reference());
    if (status) return -1;
    t->turned.weights = t->exact.weights;
    /* Pair i of d / 2 has the frequency theta^(-2i / d), which this theta changes by i 2^-25 of
       itself: float32's rounding at pair 1, more at later pairs, whose angles are smaller. */
    t->turned.model.config.rope_theta *= 1 + 0x1p-26 * (double)t->turned.model.config.head_dim;
    return 0;
}

/* *more: what float32 angles add to the limit of log-probs. 0, or -1 with d->error. */
static inline int angles_logp(truth *t, double *const *right, double *more) {
    likeness l;
    int status = angles_begin(t);
    *more = 0;
    if (!status) status = reference_logp(&t->turned, &right_way);
    if (status) return status < 0 ? -1 : 0;
    l = compare_logp(&t->turned, right, 0);
    *more = 4 * distance_from(&l, 1);
    return 0;
}

/* ---- log-probs ---- */

static inline int has_logp(const reference *f) {
    for (int64_t i = 0; i < f->count; i++)
        if (!dumped_logp(f, i)) return 0;
    return 1;
}

/* The token whose log-prob is farthest off. */
static inline void say_worst_logp(verdict *v, const reference *f) {
    int64_t row = 0, token = -1;
    double worst = -1;
    char place[160];
    for (int64_t i = 0; i < f->count; i++)
        for (int64_t t = 0; t < row_end(&f->rows[i]); t++) {
            double distance = fabs(dumped_logp(f, i)[t] - f->logp[i][t]);
            if (!has_output(f, i, t) || distance <= worst || worst != worst) continue;
            worst = distance;
            row = i;
            token = t;
        }
    if (token < 0) return;
    verdict_say(v, "the farthest is at %s, row %lld of the step: %.9g, right %.9g",
                place_text(place, sizeof place, &f->rows[row], token), (long long)row,
                dumped_logp(f, row)[token], f->logp[row][token]);
}

/* Names the mistakes that give the dump's log-probs and not the right ones. */
static inline int name_logp_ways(truth *t, verdict *v, double *const *right) {
    untried late = {.count = 0};
    for (int i = 0; i < WRONG_WAYS; i++) {
        likeness l, other;
        const reference_way *way = &wrong_ways[i];
        if (!way_is_of_forward(way) || way->backward ||
            !way_has_meaning(t->d, way, &t->exact.model.config))
            continue;
        if (out_of_time(t)) {
            untried_add(&late, way->name);
            continue;
        }
        if (reference_logp(&t->exact, way)) return -1;
        l = compare_logp(&t->exact, t->exact.logp, 1);
        other = compare_logp(&t->exact, right, 0);
        if (!(distance_from(&l, 1) <= t->logp_limit) ||
            !(distance_from(&other, 1) > t->logp_limit))
            continue;
        verdict_name(v, mistake_named(way->name));
        if (way->form) verdict_say(v, "%s: %s", way->name, way->form);
    }
    untried_say(&late, t->budget, v);
    return 0;
}

/* Names a head that the dump has beside an embedding that is the head in the model. */
static inline void name_own_head(const truth *t, verdict *v) {
    static const char *const kinds[] = {"grad.", "param.", "local."};
    for (int i = 0; i < 3 && !v->count && has_tied_table(&t->exact); i++) {
        tensor_name name;
        if (!seqpar_safetensors_find(t->d->ranks[0].file,
                                     tensor_of(&name, kinds[i], tied_head)))
            continue;
        verdict_name(v, mistake_named("tables_untied"));
        verdict_say(v,
                    "the model's head is its embedding, and the dump has %s: a head of "
                    "its own",
                    name.text);
    }
}

static inline double **copy_logp(const reference *f) {
    double **copy = (double **)calloc((size_t)f->count + 1, sizeof *copy);
    for (int64_t i = 0; copy && i < f->count; i++) {
        size_t bytes = ((size_t)f->rows[i].tokens + 1) * sizeof **copy;
        if (!(copy[i] = (double *)malloc(bytes))) return NULL; /* the program ends then */
        memcpy(copy[i], f->logp[i], bytes);
    }
    return copy;
}

static inline void free_logp(double **logp, int64_t count) {
    for (int64_t i = 0; logp && i < count; i++) free(logp[i]);
    free(logp);
}

/* A row without cu_seqlens may hold several documents. That its numbers are not those of one
   document is then no evidence of a mistake. 1: the verdict is insufficient. */
static inline int doubt_packing(const truth *t, verdict *v) {
    for (int64_t i = 0; i < t->exact.count; i++) {
        if (t->exact.rows[i].docs) continue;
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v, "they are not those of a row of one document; give cu_seqlens if it "
                       "has several");
        return 1;
    }
    return 0;
}

/* Angles in float32 and mistakes are tried only beyond the limit, since each takes a pass of
   the model. Such angles are part of float32's limit; for float64 see doubt_float32. */
static inline int judge_logp(truth *t, stage *s, double *const *right) {
    likeness l = compare_logp(&t->exact, right, 1);
    double distance = distance_from(&l, 1), angles = 0;
    int status;
    verdict *v = stage_begin(s, VERDICT_RIGHT);
    if (!(distance <= t->logp_limit) && angles_logp(t, right, &angles)) return -1;
    if (t->ratio == 0x1p-15) t->logp_limit += angles;
    verdict_say(v, "%.3g away from those of the model in fp64; limit %.3g, from %s", distance,
                t->logp_limit, t->unit);
    t->logp_is_right = distance <= t->logp_limit;
    if (l.want_want == 0) {
        v->kind = VERDICT_INSUFFICIENT;
        verdict_say(v,
                    t->exact.model.config.score ? "all values are 0" : "no token has a label");
    }
    if (t->logp_is_right) return 0;
    v->kind = VERDICT_WRONG;
    say_worst_logp(v, &t->exact);
    if (doubt_packing(t, v)) return 0;
    bar_begin("mistakes in log-probs", WRONG_WAYS * t->exact.count);
    status = name_logp_ways(t, v, right);
    bar_end();
    if (status) return -1;
    name_own_head(t, v);
    if (!v->count && distance <= 1.5 * t->logp_limit) v->kind = VERDICT_MARGINAL;
    doubt_float32(t, distance, t->logp_noise, angles, v);
    return 0;
}

/* ---- gradients ---- */

/* Reads the grad. tensors of all trained parameters to t->got. */
static inline int truth_gradients(truth *t, stage *s, double tolerance) {
    const seqpar_llama *m = reference_learns(&t->exact);
    t->got = (double *)calloc((size_t)m->elements + 1, sizeof *t->got);
    t->have = (char *)calloc((size_t)m->tensor_count + 1, 1);
    if (!t->got || !t->have)
        return seqpar_fail(&t->d->error, SEQPAR_ERR_MEMORY, "no memory for gradients"), -1;
    for (int64_t i = 0; i < m->tensor_count; i++) {
        int64_t count = m->tensors[i].rows * m->tensors[i].cols;
        tensor_name name;
        whole w;
        int status = t->adapter ? adapter_part(&t->exact, "grad.", i, &name, &w)
                                : reference_part(&t->exact, "grad.", i, &name, &w);
        t->have[i] = !status && w.values;
        if (t->have[i]) memcpy(t->got + m->tensors[i].offset, w.values, (size_t)count * 8);
        if (t->have[i]) judge_copies(s, &w, name.text, tolerance);
        whole_free(&w);
        if (status) return -1;
    }
    return 0;
}

/* Inner products tensor by tensor and in all, for tensors of t->have. 0, or -1: no memory. */
static inline int compare_gradients(const truth *t, const double *got, const double *wanted,
                                    gradient_check *c) {
    const seqpar_llama *m = reference_learns(&t->exact);
    c->n = 0;
    c->all = (likeness){0};
    for (int64_t i = 0; i < m->tensor_count; i++) {
        gradient_pair *one;
        if (!t->have[i]) continue;
        if (gradient_reserve(c)) return -1;
        one = &c->each[c->n++];
        memset(one, 0, sizeof *one);
        snprintf(one->name, sizeof one->name, "grad.%s", m->tensors[i].name);
        one->count = m->tensors[i].rows * m->tensors[i].cols;
        liken(&one->like, got + m->tensors[i].offset, wanted + m->tensors[i].offset,
              one->count);
        likeness_add(&c->all, &one->like);
    }
    return 0;
}

/* Tries one mistake. 1: its gradient times *factor is the dump's, and is no multiple of the
   right one; 0: not so; -1 with d->error. */
static inline int try_gradient(truth *t, gradient_check *c, const double *right,
                               const reference_way *way, double *const *seeds, double *factor) {
    likeness from_right;
    double none;
    if (reference_gradient(&t->exact, way, seeds) ||
        compare_gradients(t, t->exact.gradient, right, c))
        return -1;
    from_right = c->all;
    if (compare_gradients(t, t->got, t->exact.gradient, c)) return -1;
    *factor = likeness_factor(&c->all);
    none = square(t->gradient_limit) * from_right.want_want;
    if (from_right.got_got <= none && c->all.got_got <= none) { /* both cancel to about 0 */
        *factor = 1;
        return 1;
    }
    return distance_from(&c->all, *factor) <= t->gradient_limit && c->all.want_want > 0 &&
           distance_from(&from_right, likeness_factor(&from_right)) > 2 * t->gradient_limit;
}

/* Sets the log-probs that a mistake's seeds are made of: the dump's or, without these, those of
   the mistake's own forward pass. */
static inline int way_logp(truth *t, const reference_way *way, seed_set *seeds) {
    if (t->dumped) seeds->logp = t->dumped;
    if (t->dumped || !way_is_of_forward(way)) return 0;
    if (reference_logp(&t->exact, way)) return -1;
    seeds->logp = t->exact.logp;
    return 0;
}

/* Tries variants of the seeds that are no mistake. 1: one gives the dump's gradient, said in v;
   0: none does; -1 with d->error. */
static inline int accept_gradient(truth *t, verdict *v, gradient_check *c,
                                  const seed_set *seeds) {
    for (int i = 1; i < seed_ways(t->d); i++) {
        if (seed_way_name(t->d, i) || !seed_set_make(seeds, i)) continue;
        if (reference_gradient(&t->exact, &right_way, seeds->of) ||
            compare_gradients(t, t->got, t->exact.gradient, c))
            return -1;
        if (distance_from(&c->all, 1) > t->gradient_limit) continue;
        v->kind = VERDICT_RIGHT;
        verdict_say(v, "%s", seed_way_how(t->d, i));
        return 1;
    }
    return 0;
}

static inline int name_seed_way(truth *t, verdict *v, gradient_check *c, const double *right,
                                const seed_set *seeds, int way) {
    double factor;
    int status;
    if (!seed_way_name(t->d, way) || !seed_set_make(seeds, way)) return 0;
    status = try_gradient(t, c, right, &right_way, seeds->of, &factor);
    if (status <= 0) return status;
    seed_way_say(seeds, way, factor, t->gradient_limit, v);
    c->way_factor = seed_way_takes_factor(v) ? 1 : factor;
    return 0;
}

static inline int name_model_way(truth *t, verdict *v, gradient_check *c, const double *right,
                                 const seed_set *seeds, const reference_way *way) {
    double *const *logp = seeds->logp;
    double factor;
    int status = way_logp(t, way, (seed_set *)seeds);
    if (!status && seed_set_make(seeds, SEEDS_RIGHT))
        status = try_gradient(t, c, right, way, seeds->of, &factor);
    ((seed_set *)seeds)->logp = logp;
    if (status <= 0) return status;
    verdict_name(v, mistake_named(way->name));
    c->way_factor = factor;
    if (way->form) verdict_say(v, "%s: %s", way->name, way->form);
    if (fabs(factor - 1) > t->gradient_limit)
        verdict_say(v, "they are those of %s times %.6g", way->name, factor);
    return 0;
}

/* Names an option that adds a term to the loss, if the gradient is that without the term. */
static inline int name_terms_left(truth *t, verdict *v, gradient_check *c, const double *right,
                                  const seed_set *seeds) {
    for (int k = 0; k < TERMS; k++) {
        double factor;
        int status;
        if (!t->exact.weights || !(term_factor(&t->d->facts, k) > 0) || out_of_time(t))
            continue;
        if (!seed_set_make(seeds, SEEDS_RIGHT)) return 0;
        t->exact.without[k] = 1;
        status = try_gradient(t, c, right, &right_way, seeds->of, &factor);
        t->exact.without[k] = 0;
        if (status < 0) return -1;
        if (!status || fabs(factor - 1) > t->gradient_limit) continue;
        verdict_name(v, mistake_named("option_not_applied"));
        verdict_say(v, "%s 0 gives them", option_texts[k]);
    }
    return 0;
}

/* Says if the gradient is that of a KL term times the ratio, which the metadata do not say: on
   policy the loss is the same. 0, or -1 with d->error. */
static inline int say_kl_ratio(truth *t, verdict *v, gradient_check *c, const double *right,
                               const seed_set *seeds) {
    dump_facts *f = &t->d->facts;
    double factor;
    int status, may = f->objective == DUMP_PPO && f->kl_coef > 0 && !f->kl_ratio &&
                      f->importance == DUMP_RATIO_OF_TOKEN;
    if (!may || v->count || out_of_time(t)) return 0;
    f->kl_ratio = 1;
    status = !seed_set_make(seeds, SEEDS_RIGHT)
                 ? 0
                 : try_gradient(t, c, right, &right_way, seeds->of, &factor);
    f->kl_ratio = 0;
    if (status > 0 && fabs(factor - 1) <= t->gradient_limit)
        verdict_say(v, "metadata kl_ratio 'token' gives them: if that is meant, write it");
    return status < 0 ? -1 : 0;
}

/* Names the mistakes that give the dump's gradient, up to a factor, and not the right one. */
static inline int name_gradient_ways(truth *t, verdict *v, gradient_check *c,
                                     const double *right, const seed_set *seeds) {
    untried late = {.count = 0};
    for (int i = 1; i < seed_ways(t->d) + WRONG_WAYS; i++) {
        int of_seeds = i < seed_ways(t->d), k = i - seed_ways(t->d);
        const char *name = of_seeds ? seed_way_name(t->d, i) : wrong_ways[k].name;
        if (!name) continue;
        if (!of_seeds && way_is_of_forward(&wrong_ways[k]) && t->logp_is_right) continue;
        if (!of_seeds && !way_has_meaning(t->d, &wrong_ways[k], &t->exact.model.config))
            continue;
        if (out_of_time(t)) {
            untried_add(&late, name);
            continue;
        }
        if (of_seeds ? name_seed_way(t, v, c, right, seeds, i)
                     : name_model_way(t, v, c, right, seeds, &wrong_ways[k]))
            return -1;
    }
    untried_say(&late, t->budget, v);
    return name_terms_left(t, v, c, right, seeds);
}

/* Names a table that is embedding and head, with the gradient of one use alone. 0, or -1 with
   d->error. */
static inline int name_tied_half(truth *t, verdict *v, gradient_check *c, const double *right,
                                 const seed_set *seeds) {
    static const char *const uses[] = {"embedding", "head"};
    reference untied = {.d = NULL};
    double *half = (double *)malloc((size_t)t->exact.model.elements * sizeof *half);
    int status = half && seed_set_make((seed_set *)seeds, SEEDS_RIGHT) ? 0 : -1;
    if (!status) status = untied_open(&untied, &t->exact);
    if (!status) status = reference_gradient(&untied, &right_way, seeds->of);
    for (int use = 0; !status && use < 2; use++) {
        tied_half(&t->exact, &untied, right, use, half);
        status = compare_gradients(t, t->got, half, c);
        if (status || !(distance_from(&c->all, 1) <= t->gradient_limit)) continue;
        verdict_name(v, mistake_named("tables_untied"));
        verdict_say(v, "%s has the gradient of its use as the %s alone", tied_embedding,
                    uses[use]);
    }
    if (untied.d) reference_close(&untied);
    free(half);
    return status;
}

/* Names a gradient to which that of the step before was added. 0, or -1 with d->error. */
static inline int name_kept(truth *t, verdict *v, const double *right) {
    const seqpar_llama *m = &t->exact.model;
    kept_gradient k = {.lacks = t->d->facts.optimizer != DUMP_ADAMW || t->adapter};
    for (int64_t i = 0; i < m->tensor_count && !k.lacks; i++) {
        tensor_name name;
        whole moment;
        int64_t first = m->tensors[i].offset;
        if (!t->have[i]) continue;
        if (reference_part(&t->exact, "m.", i, &name, &moment)) return -1;
        k.lacks = !moment.values;
        if (moment.values)
            kept_add(&k, t->got + first, right + first, moment.values, moment.count);
        whole_free(&moment);
    }
    kept_name(&k, t->d, t->gradient_limit, v);
    return 0;
}

/* A wrong gradient that no mistake explains is insufficient if PPO ratios lie at the clip's
   edge, where rounding turns a token's gradient on or off. */
static inline void doubt_near_clip(const truth *t, verdict *v, const seed_set *seeds) {
    int64_t near = 0;
    if (t->d->facts.objective != DUMP_PPO || v->count) return;
    near = ppo_near_clip(seeds, t->dumped ? 0 : 4 * t->ratio * t->logp_distance);
    if (!near) return;
    v->kind = VERDICT_INSUFFICIENT;
    verdict_say(v,
                "%lld tokens have a ratio so near to the clip's edge that rounding of "
                "log-probs may turn their gradient off%s",
                (long long)near, t->dumped ? "" : "; dump logp");
}

/* One factor on all tensors is a mistake of scale, found without computing the mistakes'
   gradients. Factors of single tensors are named only if no mistake explains the gradient. */
static inline int judge_wrong_gradient(truth *t, stage *s, gradient_check *c,
                                       const double *right, const seed_set *seeds,
                                       double factor) {
    verdict factors;
    int status = accept_gradient(t, stage_begin(s, VERDICT_WRONG), c, seeds);
    if (status) return status < 0 ? -1 : 0;
    if (compare_gradients(t, t->got, right, c)) return -1;
    if (isfinite(c->all.got_got) && !(distance_from(&c->all, factor) <= c->tolerance) &&
        doubt_packing(t, &s->v))
        return 0;
    if (distance_from(&c->all, factor) <= c->tolerance && fabs(factor) > c->tolerance) {
        judge_factor(c);
        if (!s->v.count && seeds_are_of_all_tokens(seeds, factor, c->tolerance))
            verdict_name(&s->v, mistake_named("all_tokens_counted"));
        /* KTO: swapping desirable changes only the sign of the gradient */
        if (t->d->facts.objective == DUMP_KTO && fabs(factor + 1) <= c->tolerance)
            verdict_name(&s->v, mistake_named("desirable_swapped"));
        return 0;
    }
    judge_factors(c);
    factors = s->v;
    s->v.count = s->v.all = 0;
    bar_begin("mistakes in gradients", (seed_ways(t->d) + WRONG_WAYS - 1) * t->exact.count);
    status = name_gradient_ways(t, &s->v, c, right, seeds);
    if (!status && !s->v.count && has_tied_table(&t->exact) && !t->adapter)
        status = name_tied_half(t, &s->v, c, right, seeds);
    bar_end();
    if (status) return -1;
    if (s->v.count == 1) name_way_factor(c, &s->v);
    if (!s->v.count) names_take(&s->v, &factors);
    if (!s->v.count && name_kept(t, &s->v, right)) return -1;
    if (say_kl_ratio(t, &s->v, c, right, seeds)) return -1;
    doubt_near_clip(t, &s->v, seeds);
    return 0;
}

/* *more: what float32 angles add to the limit of gradients. 0, or -1 with d->error. */
static inline int angles_gradient(truth *t, const double *right, const seed_set *seeds,
                                  double *more) {
    gradient_check c = {.d = t->d};
    int status = angles_begin(t);
    *more = 0;
    if (!status && !seed_set_make(seeds, SEEDS_RIGHT)) return 0;
    if (!status) status = reference_gradient(&t->turned, &right_way, seeds->of);
    if (!status) status = compare_gradients(t, t->turned.gradient, right, &c);
    if (!status) *more = 4 * distance_from(&c.all, 1);
    free(c.each);
    return status < 0 ? -1 : 0;
}

static inline void take_seeds(double *to, const seed_set *seeds) {
    for (int64_t i = 0, n = 0; i < seeds->f->count; n += seeds->f->rows[i++].tokens)
        memcpy(to + n, seeds->of[i], (size_t)seeds->f->rows[i].tokens * sizeof *to);
}

/* Notes which mistakes in the seeds would show. A gradient is linear in its seeds, so it is
   about as far off as they are. 0, or -1: no memory. */
static inline int try_seed_ways(truth *t, verdict *v, const seed_set *seeds) {
    int64_t n = 0;
    double *right, *other;
    for (int64_t i = 0; i < seeds->f->count; i++) n += seeds->f->rows[i].tokens;
    right = (double *)calloc((size_t)n * 2 + 1, sizeof *right);
    if (!right) return reference_no_memory(&t->exact);
    other = right + n;
    seed_set_make(seeds, SEEDS_RIGHT);
    take_seeds(right, seeds);
    for (int i = 1; i < seed_ways(t->d); i++) {
        int by = seed_way_grouping(t->d, i), of_groups = by < GROUPINGS;
        likeness l = {0};
        if (of_groups && (means_are_others(&t->d->facts, by) || groups_in(seeds, by) == 1))
            continue;
        if (!seed_way_name(t->d, i) || !seed_set_make(seeds, i)) continue;
        take_seeds(other, seeds);
        liken(&l, other, right, n);
        verdict_try(v, seed_way_name(t->d, i),
                    of_groups ? grouping_names[by] : seed_way_how(t->d, i),
                    !(distance_from(&l, 1) <= t->gradient_limit));
    }
    free(right);
    return 0;
}

/* Judges one distance over all tensors, since the limit is measured over all of them, too.
   Angles in float32 count as in judge_logp. */
static inline int judge_truth_gradient(truth *t, stage *s, const double *right,
                                       const seed_set *seeds) {
    gradient_check c = {.d = t->d, .s = s, .tolerance = t->gradient_limit};
    int status = compare_gradients(t, t->got, right, &c) ? -1 : 0;
    double factor = likeness_factor(&c.all), distance = distance_from(&c.all, 1), angles = 0;
    if (!status && c.n && !s->judged && !(distance <= c.tolerance))
        status = angles_gradient(t, right, seeds, &angles);
    if (t->ratio == 0x1p-15) c.tolerance = t->gradient_limit += angles;
    if (!status) status = details_keep(t->more, &c);
    if (!status && c.n && !s->judged) {
        if (!isfinite(c.all.want_want) || (c.all.want_want == 0 && c.all.got_got == 0))
            verdict_say(stage_begin(s, VERDICT_INSUFFICIENT),
                        "all gradients are 0, or one of the reference is NaN or Inf");
        else if (distance <= c.tolerance) {
            judge_factor(&c);
            if (s->v.kind == VERDICT_RIGHT) status = try_seed_ways(t, &s->v, seeds);
        } else
            status = judge_wrong_gradient(t, s, &c, right, seeds, factor);
        doubt_float32(t, distance, t->gradient_noise, angles, &s->v);
        verdict_say(&s->v, "%s", t->second);
        if (t->exact.untaught)
            verdict_say(
                &s->v,
                "tokens of pad_token_id, %lld, add nothing to the embedding's gradient, "
                "as in transformers",
                (long long)t->exact.untaught - 1);
        verdict_say(&s->v, "wanted are those of the model in fp64; limit %.3g, from %s",
                    t->gradient_limit, t->unit);
    }
    free(c.each);
    return status;
}

/* ---- limits ---- */

/* The largest difference of one log-prob. */
static inline double farthest_logp(const reference *f, double *const *other) {
    double worst = 0;
    for (int64_t i = 0; i < f->count; i++)
        for (int64_t t = 0; t < row_end(&f->rows[i]); t++)
            if (has_output(f, i, t)) worst = fmax(worst, fabs(f->logp[i][t] - other[i][t]));
    return worst;
}

static inline int truth_logp(truth *t, stage *s, double *const *right) {
    likeness l;
    if (reference_logp(&t->rounded, &right_way)) return -1;
    l = compare_logp(&t->rounded, right, 0);
    t->logp_noise = distance_from(&l, 1);
    t->logp_limit = limit_of(t, t->logp_noise);
    t->logp_distance = farthest_logp(&t->rounded, right);
    if (!has_logp(&t->exact)) return 0;
    t->dumped = (double **)calloc((size_t)t->exact.count + 1, sizeof *t->dumped);
    if (!t->dumped) return -1;
    for (int64_t i = 0; i < t->exact.count; i++) t->dumped[i] = dumped_logp(&t->exact, i);
    return judge_logp(t, s, right);
}

/* Computes the right gradient, and the limit from the bf16 one. Seeds are made of the dump's
   log-probs if these are right: their rounding is no mistake of the gradient. Else each
   reference's seeds are made of its own log-probs. 1: the dump lacks what seeds are made of; 0,
   or -1 with d->error. */
static inline int truth_limits(truth *t, double *const *logp, double *right, seed_set *seeds) {
    gradient_check c = {.d = t->d};
    int status;
    seeds->logp = t->dumped && t->logp_is_right ? t->dumped : logp;
    if (!seed_set_make(seeds, SEEDS_RIGHT)) return 1;
    if (reference_gradient(&t->exact, &right_way, seeds->of)) return -1;
    memcpy(right, t->exact.gradient,
           (size_t)reference_learns(&t->exact)->elements * sizeof *right);
    t->is_void = !second_agrees(&t->exact, logp, seeds->of, t->exact.whole, t->second,
                                sizeof t->second);
    if (seeds->logp == logp) {
        seeds->logp = t->rounded.logp;
        seed_set_make(seeds, SEEDS_RIGHT);
        seeds->logp = logp;
    }
    if (reference_gradient(&t->rounded, &right_way, seeds->of)) return -1;
    memset(t->have, 1, (size_t)reference_learns(&t->exact)->tensor_count);
    status = compare_gradients(t, t->rounded.gradient, right, &c);
    t->gradient_noise = distance_from(&c.all, 1);
    t->gradient_limit = limit_of(t, t->gradient_noise);
    if (t->ratio >= 0x1p-15) t->gradient_limit += 4 * seeds_rounding(seeds); /* not in F64 */
    free(c.each);
    return status;
}

/* The limit is measured over all tensors, also those that the dump lacks. */
static inline int truth_limits_of_all(truth *t, double *const *logp, double *right,
                                      seed_set *seeds) {
    char *have = t->have;
    int status;
    t->have = (char *)calloc((size_t)reference_learns(&t->exact)->tensor_count + 1, 1);
    status = t->have ? truth_limits(t, logp, right, seeds) : -1;
    free(t->have);
    t->have = have;
    return status;
}

/* ---- the loss ---- */

/* Lets rows without log-probs (of RM, without values and scores) borrow the model's; take_back
   undoes it. */
static inline void lend_logp(const reference *f, double *const *logp, int take_back) {
    for (int64_t i = 0; i < f->count; i++) {
        dump_row *row = &f->rows[i];
        double **own = f->model.config.score ? &row->values : &row->logp;
        if (take_back && *own == logp[i]) *own = NULL;
        if (!take_back && !*own && !row->scores) *own = logp[i];
    }
}

/* How far log-probs within their limit may move the loss, by Cauchy-Schwarz: its slopes are the
   seeds. */
static inline double loss_apart(const truth *t, double *const *logp, const seed_set *seeds) {
    double slopes = 0, all = 0;
    for (int64_t i = 0; i < t->exact.count; i++)
        for (int64_t k = 0; k < row_end(&t->exact.rows[i]); k++) {
            slopes += square(seeds->of[i][k]);
            all += has_output(&t->exact, i, k) ? square(logp[i][k]) : 0;
        }
    return sqrt(slopes * all) * t->logp_limit;
}

/* Stage LOSS of a dump without log-probs: compares the losses that ranks report with the loss
   of the model's log-probs. 0, or -1 with d->error. */
static inline int truth_loss(truth *t, stage *s, double *const *logp, const seed_set *seeds) {
    static loss_parts parts; /* large */
    dump *d = t->d;
    int status = 0;
    if (s->judged || t->dumped || !seed_set_make(seeds, SEEDS_RIGHT)) return 0;
    loss_begin(&parts, &d->facts, 1e-3);
    parts.widened = d->widened;
    parts.apart = loss_apart(t, logp, seeds);
    lend_logp(&t->exact, logp, 0);
    for (int64_t i = 0; i < t->exact.count; i++)
        loss_add_row(&parts, &d->facts, &t->exact.rows[i], i / d->accumulation,
                     i % d->accumulation);
    lend_logp(&t->exact, logp, 1);
    if (loss_end(&parts, &d->facts)) status = -1;
    if (!status) check_loss(s, d, &parts);
    if (!status && s->judged)
        verdict_say(&s->v, "log-probs are the model's: the dump has none");
    loss_free(&parts);
    return status || d->error.status ? -1 : 0;
}

/* ---- all of it ---- */

/* Notes what the stage lacks, unless it was judged or lacks something already. */
static inline void truth_lacks(stage *s, const char *what) {
    if (!s->judged && !*s->lacks) snprintf(s->lacks, sizeof s->lacks, "%s", what);
}

/* Is `id` a token of a row? */
static inline int rows_have_id(const reference *f, int64_t id) {
    for (int64_t i = 0; i < f->count; i++)
        for (int64_t k = 0; k < row_end(&f->rows[i]); k++)
            if (f->rows[i].ids[k] == id) return 1;
    return 0;
}

/* transformers does not train the embedding of pad_token_id, other trainers do: `right` becomes
   the one of both that is nearer to the dump. 0, or -1 with d->error. */
static inline int truth_pad(truth *t, double *right, const seed_set *seeds) {
    int64_t untaught = t->adapter ? 0 : demo_untaught(t->folder, t->exact.model.config.vocab);
    gradient_check c = {.d = t->d};
    double trained;
    int status;
    if (!untaught || !rows_have_id(&t->exact, untaught - 1) ||
        !seed_set_make(seeds, SEEDS_RIGHT))
        return 0;
    status = compare_gradients(t, t->got, right, &c);
    trained = distance_from(&c.all, 1);
    t->exact.untaught = untaught;
    if (!status) status = reference_gradient(&t->exact, &right_way, seeds->of);
    if (!status) status = compare_gradients(t, t->got, t->exact.gradient, &c);
    if (!status && distance_from(&c.all, 1) < trained) {
        memcpy(right, t->exact.gradient, (size_t)t->exact.model.elements * sizeof *right);
        t->rounded.untaught = t->turned.untaught = untaught;
    } else {
        t->exact.untaught = 0;
    }
    free(c.each);
    return status;
}

/* Log-probs come first: their verdict decides which log-probs the gradient's seeds are made of.
   t->more takes logp over. */
static inline int truth_judge(truth *t, stage *stages, double tolerance) {
    double **logp, *right;
    seed_set seeds = {.f = &t->exact};
    int status;
    bar_begin("the model in fp64", t->exact.count);
    status = reference_logp(&t->exact, &right_way);
    bar_end();
    if (status) return -1;
    logp = copy_logp(&t->exact);
    right = (double *)calloc((size_t)reference_learns(&t->exact)->elements + 1, sizeof *right);
    status = logp && right ? seed_set_open(&seeds, logp) : -1;
    if (!status && has_terms(&t->d->facts))
        t->exact.weights = t->rounded.weights = seeds.weights;
    if (!status) status = truth_gradients(t, &stages[GRADIENTS], tolerance);
    if (!status) status = truth_logp(t, &stages[LOG_PROBS], logp);
    if (!status) status = truth_limits_of_all(t, logp, right, &seeds);
    if (!status) status = truth_loss(t, &stages[LOSS], logp, &seeds);
    if (!status) status = truth_pad(t, right, &seeds);
    if (!status) status = judge_truth_gradient(t, &stages[GRADIENTS], right, &seeds);
    if (status > 0)
        truth_lacks(&stages[GRADIENTS],
                    t->d->facts.objective == DUMP_OTHER
                        ? "--want, as --model cannot compute the loss of objective other"
                        : "what the objective's loss is made of, beside --model");
    if (status < 0 && !t->d->error.status)
        seqpar_fail(&t->d->error, SEQPAR_ERR_MEMORY, "no memory for the reference");
    t->exact.weights = t->rounded.weights = t->turned.weights = NULL;
    seed_set_close(&seeds);
    if (t->more && status >= 0 && has_logp(&t->exact)) {
        t->more->logp = logp;
        t->more->rows = t->exact.count;
        t->more->logp_limit = t->logp_limit;
        logp = NULL;
    }
    free_logp(logp, t->exact.count);
    free(right);
    free(t->dumped);
    return status < 0 ? -1 : 0;
}

/* Refuses a dump with gradients of adapters if --adapter is missing. 0, or -1 with d->error. */
static inline int truth_kind(dump *d, const char *adapter) {
    for (int64_t r = 0; r < d->world && !adapter; r++)
        for (int64_t i = 0; i < seqpar_safetensors_count(d->ranks[r].file); i++) {
            const char *name = seqpar_safetensors_at(d->ranks[r].file, i)->name;
            if (!after_prefix(name, "grad.") || !strstr(name, ".lora_A.")) continue;
            seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                        "%.300s: tensor %.100s is of an adapter; give --adapter FOLDER, too, "
                        "as PEFT wrote it before the step",
                        d->ranks[r].path, name);
            return -1;
        }
    return 0;
}

/* Judges LOG_PROBS and GRADIENTS, and LOSS if the dump has no log-probs, by the model in
   `folder`. adapter: the folder of adapters, if these alone are trained; NULL: all weights are.
   more: gets the details; may be NULL. 0; 1: slow.h disagrees with the reference, so there is
   no verdict; -1 with d->error. */
static inline int check_truth(stage *stages, dump *d, const char *folder, const char *adapter,
                              double tolerance, double budget, details *more) {
    truth t = {.d = d, .folder = folder, .adapter = adapter, .budget = budget, .more = more};
    int status;
    truth_unit(&t);
    if (truth_kind(d, adapter)) return -1;
    status = reference_open(&t.exact, d, folder, adapter, seqpar_device_reference());
    if (!status)
        status = reference_open(&t.rounded, d, folder, adapter, seqpar_device_reference_bf16());
    if (status > 0)
        truth_lacks(&stages[GRADIENTS], "index, ids and labels of all tokens, beside --model");
    if (!status) status = truth_judge(&t, stages, tolerance);
    reference_close(&t.exact);
    if (t.rounded.d) reference_close(&t.rounded);
    if (t.turned.d) reference_close(&t.turned);
    free(t.got);
    free(t.have);
    if (t.is_void) seqpar_fail(&d->error, SEQPAR_ERR_ARITHMETIC, "%s", t.second);
    return status < 0 ? -1 : t.is_void;
}
#endif
