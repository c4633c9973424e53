/* SPDX-License-Identifier: MIT OR Unlicense */
/* step_ways.h - the optimizer's step, computed rightly and with each known mistake, and
 * compared with the steps of the ranks (step.h has the formulas). A way is one variant of the
 * step: the right one, one with a mistake, or the one clipped by the norm that ranks report. */
#ifndef ORACLE_STEP_WAYS_H
#define ORACLE_STEP_WAYS_H
#include "norms.h"

/* ---- the optimizer's step ---- */

/* BY: by the way's own norm. TURNED: with max_norm -1, which was to mean no clip, or with the
   limit's sign turned */
enum { CLIP_RIGHT, CLIP_NOT, CLIP_BY, CLIP_BEFORE, CLIP_TURNED };
enum { DECAY_ALL, DECAY_NONE, DECAY_VECTORS };
enum { MOMENTS_RIGHT, MOMENTS_LOST, MOMENTS_KEPT_WHOLE, MOMENTS_ADDED };
typedef struct step_way {
    const char *name; /* of the mistake; NULL: none that has a name */
    const char *how;  /* which form of it; NULL: it has one */
    int clip;
    wrong_norm norm;
    int no_bias_correction, decay_coupled, decay_after, decay, eps_inside, by_micro_batches;
    int moments, first; /* first: t is 1 */
    int later;          /* added to t */
} step_way;

static inline double norm_of_own(const step_norms *n, int64_t r) {
    double shard = norm_of_shard(n, r);
    return isnan(shard) ? norm_of_local(n, r) : shard;
}
static inline double norm_as_reported(const step_norms *n, int64_t r) { return n->shown[r]; }

static const step_way step_ways[] = {
    {.name = NULL},
    {.name = "not_clipped", .clip = CLIP_NOT},
    {.name = "clip_by_own_norm", .clip = CLIP_BY, .norm = norm_of_own},
    {.name = "clip_before_reduction", .clip = CLIP_BEFORE},
    {.name = "norms_added",
     .how = "over all ranks",
     .clip = CLIP_BY,
     .norm = norms_added_over_all},
    {.name = "norms_added",
     .how = "over a sequence",
     .clip = CLIP_BY,
     .norm = norms_added_over_sequence},
    {.name = "norms_added",
     .how = "over replicas",
     .clip = CLIP_BY,
     .norm = norms_added_over_replicas},
    {.name = "norms_added",
     .how = "of local gradients",
     .clip = CLIP_BY,
     .norm = norms_of_locals_added},
    {.name = "norm_counts_copies",
     .how = "on all ranks",
     .clip = CLIP_BY,
     .norm = again_over_all},
    {.name = "norm_counts_copies",
     .how = "in a sequence",
     .clip = CLIP_BY,
     .norm = again_over_sequence},
    {.name = "norm_counts_copies",
     .how = "on replicas",
     .clip = CLIP_BY,
     .norm = again_over_replicas},
    {.name = "clip_turns_sign", .clip = CLIP_TURNED},
    {.name = "bias_correction_missing", .no_bias_correction = 1},
    {.name = "decay_coupled", .decay_coupled = 1},
    {.name = "decay_after_step", .decay_after = 1},
    {.name = "decay_missing", .decay = DECAY_NONE},
    {.name = "decay_groups_swapped", .decay = DECAY_VECTORS},
    {.name = "moments_lost", .moments = MOMENTS_LOST},
    {.name = "moments_lost", .how = "and t is 1", .moments = MOMENTS_LOST, .first = 1},
    {.name = "moments_not_scaled", .how = "old ones", .moments = MOMENTS_KEPT_WHOLE},
    {.name = "moments_not_scaled", .how = "gradient", .moments = MOMENTS_ADDED},
    {.name = "eps_inside_root", .eps_inside = 1},
    {.name = "steps_counted_by_micro_batches", .by_micro_batches = 1},
    {.name = "another_step_number", .how = "one more", .later = 1},
    {.name = "another_step_number", .how = "one less", .later = -1},
    {.name = NULL, .clip = CLIP_BY, .norm = norm_as_reported}};
enum { STEP_WAYS = sizeof step_ways / sizeof *step_ways, WAY_REPORTED = STEP_WAYS - 1 };

/* The way of a missing decay. */
static inline int way_no_decay(void) {
    int way = 0;
    while (step_ways[way].decay != DECAY_NONE) way++;
    return way;
}

/* Can the way be computed without the ranks' local gradients and the parameters' names? */
static inline int way_is_plain(const step_way *way) {
    return (way->clip <= CLIP_NOT || way->clip == CLIP_TURNED) && way->decay != DECAY_VECTORS;
}

/* Numbers that hold for all elements of a rank; NaN: the dump does not say. */
typedef struct way_numbers {
    double clip, mean, square; /* mean, square: bias corrections 1 / (1 - beta^t) */
} way_numbers;

static inline way_numbers way_begin(const dump_facts *f, const step_way *way, double clip) {
    double t = way->first ? 1 : (double)f->step;
    way_numbers w = {clip, 1, 1};
    if (way->by_micro_batches) t *= (double)f->accumulation;
    t += way->later;
    if (way->no_bias_correction) return w;
    w.mean = 1 / (1 - pow(f->beta1, t));
    w.square = 1 / (1 - pow(f->beta2, t));
    return w;
}

/* Does the name say that this is a bias, or the weight of a LayerNorm or RMSNorm? Most
   frameworks do not decay these. */
static inline int is_vector(const char *parameter) {
    return strstr(parameter, "bias") || strstr(parameter, "norm") || strstr(parameter, "ln_");
}

/* One element before the step. */
typedef struct element {
    double p, g, m, v;
} element;

/* A way's step as factors, so that one loop without branches computes all ways. Ways with equal
   factors make the same step. */
typedef struct way_factors {
    double clip, coupled;              /* the gradient is clip g + coupled p */
    double old_m, new_m, old_v, new_v; /* of the moments before, and of the gradient */
    double square, eps_inside, eps;    /* the root is sqrt(square v + eps_inside) + eps */
    double update, decay;              /* after - param is -update m / root - decay p */
    double before;                     /* 1: the gradients that ranks clipped */
} way_factors;

/* What the way multiplies moments by, where the dump has some. */
static inline void way_moments(const dump_facts *f, const step_way *way, int has_moments,
                               way_factors *k) {
    int whole = way->moments == MOMENTS_KEPT_WHOLE, added = way->moments == MOMENTS_ADDED;
    int lost = way->moments == MOMENTS_LOST || !has_moments;
    k->old_m = lost ? 0 : whole ? 1 : f->beta1;
    k->old_v = lost ? 0 : whole ? 1 : f->beta2;
    k->new_m = added ? 1 : 1 - f->beta1;
    k->new_v = added ? 1 : 1 - f->beta2;
}

/* vector: the parameter is a bias or of a norm. */
static inline way_factors way_factors_of(const dump_facts *f, const step_way *way,
                                         const way_numbers *w, int vector, int has_moments) {
    int skipped = way->decay == DECAY_NONE || (way->decay == DECAY_VECTORS && !vector);
    double decay = skipped ? 0 : f->weight_decay;
    way_factors k = {.clip = w->clip, .before = way->clip == CLIP_BEFORE};
    if (f->optimizer == DUMP_SGD) { /* the moment is the gradient, and the root is 1 */
        k.new_m = k.eps = 1;
        k.update = f->lr;
        k.decay = f->lr * decay;
        return k;
    }
    way_moments(f, way, has_moments, &k);
    k.square = w->square;
    k.eps_inside = way->eps_inside ? f->eps : 0;
    k.eps = way->eps_inside ? 0 : f->eps;
    k.update = f->lr * w->mean;
    if (way->decay_coupled)
        k.coupled = decay;
    else
        k.decay = f->lr * decay;
    if (way->decay_after) k.update *= 1 - k.decay;
    return k;
}

/* after - param of one element */
static inline double way_step(const way_factors *k, element e) {
    double g = e.g * k->clip + k->coupled * e.p;
    double m = k->old_m * e.m + k->new_m * g, v = k->old_v * e.v + k->new_v * g * g;
    return -k->update * m / (sqrt(v * k->square + k->eps_inside) + k->eps) - k->decay * e.p;
}

/* Sums over one rank's elements; doubles alone, so that ranks are added as arrays. The actual
   step is after - param. */
typedef struct step_match {
    double distance[STEP_WAYS];   /* squared, of the way's step from the actual one */
    double from_right[STEP_WAYS]; /* squared, of the way's step from the right one */
    likeness step;                /* got: the actual step, want: the right one */
    likeness decay;               /* got: the actual step - the right update, want: param */
    likeness update; /* got: the actual step - the right decay, want: the right update */
    double rounding, elements;
} step_match;

typedef struct step_check {
    const step_norms *n;
    step_match *of;         /* (world) */
    way_numbers *numbers;   /* (world, STEP_WAYS) */
    int vectors_skip_decay; /* biases and norms do not decay, unless weight_decay.NAME is given */
    int per_parameter;      /* some parameter has an lr or a weight_decay of its own */
    int64_t parameters, vectors;
    char first[128];     /* the first parameter whose step is not the right one */
    char undecayed[200]; /* names of parameters that lack the decay alone */
    /* how many ranks' ranges of parameters have the right step, the right one but for a missing
       decay, or another one */
    int64_t right_ranges, undecayed_ranges, wrong_ranges;
} step_check;

/* One parameter's whole tensors. clipped: the sum of local gradients that were each clipped by
   their rank; NULL: not known. */
typedef struct step_inputs {
    whole param, grad, m, v;
    double *clipped;
    int vector;
    dump_facts facts; /* the dump's, with the parameter's own lr and weight_decay */
    int own_lr, own_decay;
} step_inputs;

/* What the gradient is multiplied by before the step; NaN if the way needs the norm and it is
   NaN. */
static inline double way_clip_by(const step_way *way, double max_norm, double norm) {
    if (way->clip == CLIP_NOT || way->clip == CLIP_BEFORE) return 1;
    if (isnan(norm)) return NAN;
    if (way->clip == CLIP_TURNED) return -(max_norm > 0 ? max_norm : 1) / (norm + 1e-6);
    return clip_factor(max_norm, norm);
}

/* The same by the norm that the way takes; NaN: the dump does not say it. */
static inline double way_clip(const step_norms *n, const step_way *way, int64_t rank) {
    double norm = way->clip == CLIP_BY ? way->norm(n, rank) : sqrt(n->all);
    return way_clip_by(way, n->d->facts.max_norm, norm);
}

static inline element element_at(const step_inputs *in, int64_t at) {
    return (element){in->param.values[at], in->grad.values[at],
                     in->m.values ? in->m.values[at] : 0, in->v.values ? in->v.values[at] : 0};
}

static inline way_factors step_factors(const step_check *c, int64_t rank, int way,
                                       const step_inputs *in) {
    return way_factors_of(&in->facts, &step_ways[way], &c->numbers[rank * STEP_WAYS + way],
                          in->vector, in->m.values || in->v.values);
}

/* Some elements of one rank's range, held as arrays for the compiler to compute several at once. */
#ifndef STEP_BLOCK
#define STEP_BLOCK 256
#endif
typedef struct step_block {
    int64_t count;
    double p[STEP_BLOCK], g[STEP_BLOCK], m[STEP_BLOCK], v[STEP_BLOCK];
    double clipped[STEP_BLOCK]; /* g as the ranks clipped it; NaN: not known */
    double moved[STEP_BLOCK];   /* after - p */
    double right[STEP_BLOCK], step[STEP_BLOCK];
} step_block;

static inline void block_read(step_block *b, const step_inputs *in, int64_t at,
                              const double *after, int64_t count) {
    b->count = count;
    for (int64_t i = 0; i < count; i++) {
        element e = element_at(in, at + i);
        b->p[i] = e.p;
        b->g[i] = e.g;
        b->m[i] = e.m;
        b->v[i] = e.v;
        b->clipped[i] = in->clipped ? in->clipped[at + i] : NAN;
        b->moved[i] = after[i] - e.p;
    }
}

static inline void block_step(const step_block *b, const way_factors *k, double *step) {
    const double *g = k->before > 0 ? b->clipped : b->g;
    for (int64_t i = 0; i < b->count; i++)
        step[i] = way_step(k, (element){b->p[i], g[i], b->m[i], b->v[i]});
}

/* The squared distance, in several sums that do not wait for each other. */
enum { STEP_SUMS = 8 };
static inline double block_distance(const double *x, const double *y, int64_t count) {
    double sums[STEP_SUMS] = {0};
    int64_t i = 0;
    for (; i + STEP_SUMS <= count; i += STEP_SUMS)
        for (int s = 0; s < STEP_SUMS; s++)
            sums[s] += (x[i + s] - y[i + s]) * (x[i + s] - y[i + s]);
    for (; i < count; i++) sums[0] += (x[i] - y[i]) * (x[i] - y[i]);
    for (int s = 1; s < STEP_SUMS; s++) sums[0] += sums[s];
    return sums[0];
}

/* rounding: of after. */
static inline void block_sums(const step_block *b, const dump_facts *f, double rounding,
                              step_match *to) {
    for (int64_t i = 0; i < b->count; i++) {
        double p = b->p[i], moved = b->moved[i], right = b->right[i], after = moved + p, actual;
        double decay = -f->lr * f->weight_decay * p, update = right - decay;
        liken(&to->step, &moved, &right, 1);
        actual = moved - update;
        liken(&to->decay, &actual, &p, 1);
        actual = moved - decay;
        liken(&to->update, &actual, &update, 1);
        to->rounding += 2 * rounding * rounding * (after * after + p * p);
    }
    to->elements += (double)b->count;
}

/* Adds the block's distances of all ways that are not known. factors: of all ways; way 0, the
   right one, is never known. */
static inline void block_match(step_block *b, const way_factors *factors, const int *known,
                               step_match *to) {
    block_step(b, &factors[0], b->right);
    for (int i = 0; i < STEP_WAYS; i++) {
        const double *step = i ? b->step : b->right;
        if (known[i]) continue;
        if (i) block_step(b, &factors[i], b->step);
        to->distance[i] += block_distance(b->moved, step, b->count);
        to->from_right[i] += block_distance(step, b->right, b->count);
    }
}

/* The sum of the ranks' local gradients, each clipped by its own norm, times the reducer's
   factor. 0, or -1 with d->error. */
static inline int clip_locals(const step_norms *n, const char *parameter, step_inputs *in) {
    tensor_name name;
    local_sums l = {0};
    int found = local_sums_read(n->d, tensor_of(&name, "local.", parameter), NULL, &l);
    double reducer = likeness_factor(&n->sum);
    if (found > 0 && l.count == in->grad.count)
        in->clipped = (double *)calloc((size_t)l.count + 1, sizeof *in->clipped);
    for (int64_t r = 0; in->clipped && r < n->d->world; r++) {
        /* a rank clips before the reducer, so max_norm limits the norm of its local gradient */
        double clip = clip_factor(n->d->facts.max_norm, sqrt(n->local[r]));
        for (int64_t i = 0; i < l.count; i++)
            in->clipped[i] += reducer * clip * l.sum[sum_of(n->d, ADDED_OWN, r)][i];
    }
    local_sums_free(n->d, &l);
    return found < 0 ? -1 : 0;
}

static inline int step_sizes_differ(dump *d, const char *parameter, const step_inputs *in) {
    const whole *all[] = {&in->param, &in->m, &in->v};
    for (int i = 0; i < 3; i++)
        if (in->grad.values && all[i]->values && all[i]->count != in->grad.count) {
            seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                        "%.300s: parameter %.100s has %lld elements in its param., m. or v. "
                        "tensor, but %lld in grad.; write all of them with the same total",
                        d->ranks[0].path, parameter, (long long)all[i]->count,
                        (long long)in->grad.count);
            return -1;
        }
    return 0;
}

/* ---- settings of one parameter ---- */

/* Reads metadata key.PARAMETER into *to and sets *own to 1; if no file has it, both stay. Fails
   unless all files agree. 0, or -1 with d->error. */
static inline int param_setting(dump *d, const char *key, const char *parameter, double *to,
                                int *own) {
    char name[512];
    const char *first, *text;
    int i = 0;
    snprintf(name, sizeof name, "%s.%s", key, parameter);
    first = seqpar_safetensors_metadata(d->ranks[0].file, name);
    for (int64_t r = 1; r < d->world; r++) {
        text = seqpar_safetensors_metadata(d->ranks[r].file, name);
        if (!text == !first && (!text || !strcmp(text, first))) continue;
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: metadata %.200s differs from that of another file; write the same "
                    "on every rank",
                    d->ranks[r].path, name);
        return -1;
    }
    if (!first) return 0;
    *own = 1;
    while (strcmp(number_facts[i].key, key)) i++;
    return dump_read_number(d->ranks[0].file, d->ranks[0].path, i, name, to, &d->error);
}

static inline int param_settings(dump *d, const char *parameter, step_inputs *in) {
    in->facts = d->facts;
    return param_setting(d, "lr", parameter, &in->facts.lr, &in->own_lr) ||
                   param_setting(d, "weight_decay", parameter, &in->facts.weight_decay,
                                 &in->own_decay)
               ? -1
               : 0;
}

/* settings_are_of_parameters, for one rank's file. */
static inline int settings_of_rank(dump *d, int64_t rank) {
    const seqpar_safetensors_file *file = d->ranks[rank].file;
    for (int64_t i = 0; i < seqpar_safetensors_metadata_count(file); i++) {
        const char *key = seqpar_safetensors_metadata_at(file, i)->key;
        const char *parameter = after_prefix(key, "lr.");
        tensor_name name;
        int64_t r = 0;
        if (!parameter) parameter = after_prefix(key, "weight_decay.");
        if (!parameter) continue;
        tensor_of(&name, "param.", parameter);
        while (r < d->world && !seqpar_safetensors_find(d->ranks[r].file, name.text)) r++;
        if (r < d->world) continue;
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: metadata %.200s is of no parameter: tensor %.200s is in no file; "
                    "write the name as in param.NAME",
                    d->ranks[rank].path, key, name.text);
        return -1;
    }
    return 0;
}

/* Refuses settings whose parameter is in no file: a misspelt name would be passed over. 0, or -1
   with d->error. */
static inline int settings_are_of_parameters(dump *d) {
    for (int64_t r = 0; r < d->world; r++)
        if (settings_of_rank(d, r)) return -1;
    return 0;
}

static inline void step_inputs_free(step_inputs *in) {
    whole_free(&in->param);
    whole_free(&in->grad);
    whole_free(&in->m);
    whole_free(&in->v);
    free(in->clipped);
}

static inline int step_inputs_read(const step_norms *n, const char *parameter,
                                   step_inputs *in) {
    dump *d = n->d;
    tensor_name name;
    memset(in, 0, sizeof *in);
    in->vector = is_vector(parameter) != 0;
    return param_settings(d, parameter, in) ||
                   whole_read(d, tensor_of(&name, "param.", parameter), 0, d->world,
                              &in->param) ||
                   whole_read(d, tensor_of(&name, "grad.", parameter), 0, d->world,
                              &in->grad) ||
                   whole_read(d, tensor_of(&name, "m.", parameter), 0, d->world, &in->m) ||
                   whole_read(d, tensor_of(&name, "v.", parameter), 0, d->world, &in->v) ||
                   step_sizes_differ(d, parameter, in) ||
                   (in->grad.values && clip_locals(n, parameter, in))
               ? -1
               : 0;
}

/* The largest squared distance that still matches. It allows for the dump's rounding: the
   optimizer may have had gradients that were not rounded to 16 bits. */
static inline double step_limit(const step_check *c, const step_match *m) {
    double limit = 4 * dump_rounding(c->n->d);
    if (limit < c->n->tolerance) limit = c->n->tolerance;
    return m->rounding + limit * limit * m->step.want_want;
}

/* Counts the parameter's step as right, as right but for a missing decay, or as neither. */
static inline void note_decay(step_check *c, const step_match *m, const char *parameter) {
    double limit = step_limit(c, m);
    size_t length = strlen(c->undecayed);
    if (m->distance[0] <= limit) {
        c->right_ranges++;
    } else if (m->distance[way_no_decay()] <= limit) {
        c->undecayed_ranges++;
        if (!strstr(c->undecayed, parameter) &&
            length + strlen(parameter) + 3 < sizeof c->undecayed)
            snprintf(c->undecayed + length, sizeof c->undecayed - length, "%s%s",
                     length ? ", " : "", parameter);
    } else {
        c->wrong_ranges++;
    }
}

/* One rank's range of after., and how its step compares with all ways. */
typedef struct rank_match {
    int64_t rank;
    double *after; /* (p.count) owned; NULL: no rank */
    part p;
    way_factors factors[STEP_WAYS];
    step_match of;
} rank_match;

/* Reads the range, of tensor t. 0, or -1 with d->error. */
static inline int rank_match_read(dump *d, const seqpar_safetensors_tensor *t,
                                  const step_inputs *in, rank_match *m) {
    if (part_of(d, m->rank, t, &m->p)) return -1;
    if (m->p.total != in->grad.count) {
        seqpar_fail(&d->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: tensor %.100s has %lld elements in all, but its grad. tensor has "
                    "%lld; write both with the same total",
                    d->ranks[m->rank].path, t->name, (long long)m->p.total,
                    (long long)in->grad.count);
        return -1;
    }
    return (m->after = dump_doubles(d, m->rank, t)) ? 0 : -1;
}

static inline int ranges_equal(const rank_match *x, const rank_match *y) {
    return x->after && x->p.count == y->p.count && x->p.offset == y->p.offset &&
           !memcmp(x->after, y->after, (size_t)x->p.count * sizeof *x->after);
}

/* known[i]: the sums of way i need no computing. They are from[i]'s sums of way[i]: of an
   earlier way with the same factors, or of the rank before, if its range is identical. */
static inline void ways_known(const rank_match *m, const rank_match *last, int *known,
                              const rank_match **from, int *way) {
    int copy = ranges_equal(last, m);
    for (int i = 0; i < STEP_WAYS; i++) {
        from[i] = m;
        way[i] = 0;
        while (memcmp(&m->factors[way[i]], &m->factors[i], sizeof *m->factors)) way[i]++;
        known[i] = way[i] < i;
        if (known[i] || i == 0 || !copy ||
            memcmp(&last->factors[i], &m->factors[i], sizeof *m->factors))
            continue;
        known[i] = 1;
        from[i] = last;
    }
}

/* The sums begin at 0 for each parameter, to find the first one with a wrong step. u: rounding
   of after. */
static inline void rank_match_add(const step_inputs *in, const rank_match *last, double u,
                                  rank_match *m) {
    const rank_match *from[STEP_WAYS];
    int known[STEP_WAYS], way[STEP_WAYS];
    step_block b;
    ways_known(m, last, known, from, way);
    for (int64_t i = 0; i < m->p.count; i += b.count) {
        int64_t left = m->p.count - i;
        block_read(&b, in, m->p.offset + i, m->after + i,
                   left < STEP_BLOCK ? left : STEP_BLOCK);
        block_match(&b, m->factors, known, &m->of);
        block_sums(&b, &in->facts, u, &m->of);
    }
    for (int i = 0; i < STEP_WAYS; i++) {
        m->of.distance[i] = from[i]->of.distance[way[i]];
        m->of.from_right[i] = from[i]->of.from_right[way[i]];
    }
}

/* Compares one rank's range of after. with all ways; *last: of the rank before, and then of this
   one. 0, or -1 with d->error. */
static inline int match_rank(step_check *c, int64_t rank, const char *parameter,
                             const step_inputs *in, rank_match *last) {
    dump *d = c->n->d;
    tensor_name name;
    const seqpar_safetensors_tensor *t = seqpar_safetensors_find(
        d->ranks[rank].file, tensor_of(&name, "after.", parameter));
    rank_match m = {.rank = rank};
    double *sum = (double *)&m.of, *all = (double *)&c->of[rank];
    if (!t) return 0;
    if (rank_match_read(d, t, in, &m)) return -1;
    for (int i = 0; i < STEP_WAYS; i++) m.factors[i] = step_factors(c, rank, i, in);
    rank_match_add(in, last, dtype_rounding(t->dtype), &m);
    if (!*c->first && !(m.of.distance[0] <= step_limit(c, &m.of)))
        snprintf(c->first, sizeof c->first, "%s", parameter);
    note_decay(c, &m.of, parameter);
    for (size_t i = 0; i < sizeof m.of / sizeof *sum; i++) all[i] += sum[i];
    free(last->after);
    *last = m;
    return 0;
}

static inline int add_step(void *user, const char *parameter) {
    step_check *c = (step_check *)user;
    step_inputs in;
    rank_match last = {.after = NULL};
    int status = step_inputs_read(c->n, parameter, &in);
    if (!status && in.param.values && in.grad.values) {
        c->parameters++;
        c->vectors += in.vector && !in.own_decay;
        c->per_parameter |= in.own_lr || in.own_decay;
        if (c->vectors_skip_decay && in.vector && !in.own_decay) in.facts.weight_decay = 0;
        for (int64_t r = 0; !status && r < c->n->d->world; r++)
            status = match_rank(c, r, parameter, &in, &last);
    }
    free(last.after);
    step_inputs_free(&in);
    return status;
}
#endif
