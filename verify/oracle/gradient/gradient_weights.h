/* SPDX-License-Identifier: MIT OR Unlicense */
/* gradient_weights.h - a gradient that is a sum of shares with wrong weights: shares of ranks,
 * replicas or rows.
 *
 * There are two tests. If the wanted dump has one row per rank, its local. tensors are shares
 * W_q of the right gradient: got = sum_q c_q W_q, and each mistake has known c_q.
 * Else the dump's own local. tensors G_r are the shares: wanted = sum_r x_r G_r. If ranks share
 * a sequence, this holds only for parameters behind the last exchange of keys and values: for
 * others, a rank's gradient includes parts of other ranks' losses. */
#ifndef ORACLE_GRADIENT_WEIGHTS_H
#define ORACLE_GRADIENT_WEIGHTS_H
#include "factors.h"

#ifndef SHARES
#define SHARES 32
#endif
enum { SHARE_FORMS = 12 };

/* ---- inner products of a target and of shares ---- */

typedef struct share_products {
    double of[SHARES + 1][SHARES + 1]; /* 0: the target */
    int64_t elements;
} share_products;

static inline void products_add(share_products *p, const double *const *x, int64_t shares,
                                int64_t count) {
    for (int64_t i = 0; i <= shares; i++)
        for (int64_t k = 0; k <= i; k++) {
            double sum = 0;
            for (int64_t at = 0; at < count; at++) sum += x[i][at] * x[k][at];
            p->of[i][k] += sum;
            if (i != k) p->of[k][i] += sum;
        }
    p->elements += count;
}

/* The likeness of the target with the sum of the shares, weighted by w. */
static inline likeness products_like(const share_products *p, const double *w, int64_t n) {
    likeness l = {.got_got = p->of[0][0]};
    for (int64_t i = 0; i < n; i++) {
        l.got_want += w[i] * p->of[0][i + 1];
        for (int64_t k = 0; k < n; k++) l.want_want += w[i] * w[k] * p->of[i + 1][k + 1];
    }
    return l;
}

/* Weights w of the sum of shares that is nearest to the target: least squares by Gauss-Jordan
   elimination. A share that is 0, or depends linearly on those before it, has weight 0. */
static inline void products_solve(const share_products *p, int64_t n, double *w) {
    static double a[SHARES][SHARES + 1];
    int used[SHARES] = {0};
    for (int64_t i = 0; i < n; i++) {
        for (int64_t k = 0; k < n; k++) a[i][k] = p->of[i + 1][k + 1];
        a[i][n] = p->of[0][i + 1];
    }
    for (int64_t c = 0; c < n; c++) {
        if (!(a[c][c] > 1e-10 * p->of[c + 1][c + 1])) continue;
        used[c] = 1;
        for (int64_t i = 0; i < n; i++) {
            double factor = a[i][c] / a[c][c];
            for (int64_t k = 0; i != c && k <= n; k++) a[i][k] -= factor * a[c][k];
        }
    }
    for (int64_t i = 0; i < n; i++) w[i] = used[i] ? a[i][n] / a[i][i] : 0;
}

/* ---- rows and their counts ---- */

typedef struct share_row {
    uint64_t key; /* hash of documents and ids */
    double count; /* supervised labels */
    double ranks; /* that hold a token of it */
} share_row;

typedef struct share_rows {
    share_row *of;      /* (replicas, accumulation) */
    double *by_rank;    /* (world) labels */
    char *holds;        /* (world) scratch of row_ranks */
    double all, tokens; /* labels; tokens, with a label or not */
    int64_t replicas, accumulation;
    int has_labels, has_ids;
} share_rows;

static inline void share_rows_free(share_rows *s) {
    free(s->of);
    free(s->by_rank);
    free(s->holds);
}

static inline uint64_t share_mix(uint64_t key, uint64_t x) {
    key = (key ^ x) * 0x9e3779b97f4a7c15u;
    return key ^ key >> 29;
}

static inline void share_row_add(share_rows *s, int64_t at, const dump_row *row) {
    share_row *to = &s->of[at];
    s->has_labels &= row->labels != NULL;
    s->has_ids &= row->ids != NULL;
    for (int64_t d = 0; d <= row->docs && row->docs; d++)
        to->key = share_mix(to->key, (uint64_t)row->cu_seqlens[d]);
    s->tokens += (double)row->tokens;
    for (int64_t t = 0; t < row_end(row); t++) {
        if (row->ids) to->key = share_mix(to->key, (uint64_t)row->ids[t]);
        if (!row_supervised(row, t)) continue;
        to->count++;
        s->all++;
        s->by_rank[row->rank[t]]++;
    }
}

/* How many ranks hold a token of the row. holds (world): all 0, before and after. */
static inline double row_ranks(const dump_row *row, char *holds) {
    double ranks = 0;
    for (int64_t t = 0; t < row_end(row); t++) {
        ranks += !holds[row->rank[t]];
        holds[row->rank[t]] = 1;
    }
    for (int64_t t = 0; t < row_end(row); t++) holds[row->rank[t]] = 0;
    return ranks;
}

/* 0, or -1 with d->error. To be freed in either case. */
static inline int share_rows_read(dump *d, share_rows *s) {
    *s = (share_rows){.replicas = d->world / d->sp,
                      .accumulation = d->accumulation,
                      .has_labels = 1,
                      .has_ids = 1};
    s->of = (share_row *)calloc((size_t)(s->replicas * s->accumulation), sizeof *s->of);
    s->by_rank = (double *)calloc((size_t)d->world, sizeof *s->by_rank);
    s->holds = (char *)calloc((size_t)d->world, 1);
    if (!s->of || !s->by_rank || !s->holds) {
        seqpar_fail(&d->error, SEQPAR_ERR_MEMORY, "no memory for rows");
        return -1;
    }
    for (int64_t i = 0; i < s->replicas * s->accumulation; i++) {
        dump_row row;
        dump_places found;
        int status = dump_read_row(d, i / d->accumulation, i % d->accumulation, &row, &found);
        if (!status) share_row_add(s, i, &row);
        if (!status) s->of[i].ranks = row_ranks(&row, s->holds);
        dump_row_free(&row);
        if (status) return -1;
    }
    return 0;
}

static inline double share_replica_count(const share_rows *s, int64_t replica) {
    double sum = 0;
    for (int64_t a = 0; a < s->accumulation; a++)
        sum += s->of[replica * s->accumulation + a].count;
    return sum;
}

static inline double share_micro_count(const share_rows *s, int64_t micro) {
    double sum = 0;
    for (int64_t d = 0; d < s->replicas; d++) sum += s->of[d * s->accumulation + micro].count;
    return sum;
}

/* ---- weights of the shares, by mistake ---- */

/* groups: how many means are averaged, 0: rows are lost; filled: how many of them have a
   token. scale: a mistake that gives each row its own factor; NULL: none does. */
typedef struct share_form {
    const char *of, *scale;
    double w[SHARES];
    double groups, filled;
} share_form;

typedef struct share_forms {
    share_form form[SHARE_FORMS];
    int count;
    int64_t shares;
} share_forms;

static inline share_form *form_begin(share_forms *f, const char *of, double groups) {
    share_form *one = &f->form[f->count++];
    memset(one, 0, sizeof *one);
    one->of = of;
    one->groups = groups;
    return one;
}

/* If a mean over N tokens becomes a mean of groups' means, a token of a group of n tokens gets
   N / (groups n) times its weight. */
static inline double mean_weight(double all, double groups, double own) {
    return own > 0 ? all / (groups * own) : 0;
}

/* ---- verdict ---- */

/* A pair of mistakes must fit more closely than one mistake: there are more pairs. For 16-bit
   types the tolerance is 16 roundings, so a fourth of it is four. */
static inline double pair_limit(const gradient_check *c) {
    return c->tolerance > 4e-3 ? c->tolerance / 4 : 1e-3;
}

/* The form fits the gradient up to a factor, which tells how the groups' means were combined:
   averaged, averaged over non-empty groups, or summed. */
static inline void name_means_of(const gradient_check *c, const share_form *form, double factor,
                                 double noise, verdict *v) {
    double filled = form->groups / form->filled, sum = form->groups;
    int empty = form->filled < form->groups;
    law l = factor_law(c, &c->all);
    verdict one;
    l.got = factor;
    l.tolerance = noise > 1e-3 ? noise : 1e-3;
    l.noise = 0;
    if (v->all && (law_equal(&l, factor, 1) || law_equal(&l, factor, sum)))
        v->count = v->all = 0; /* one mistake is likelier than a pair */
    if (law_equal(&l, factor, 1)) {
        verdict_name(v, mistake_named("mean_of_means"));
        if (strstr(form->of, "ranks")) verdict_name(v, mistake_named("own_mean_alone"));
    } else if (empty && law_equal(&l, factor, filled)) {
        verdict_name(v, mistake_named("mean_of_non_empty_means"));
    } else if (law_equal(&l, factor, sum)) {
        verdict_name(v, mistake_named("sum_of_means"));
        verdict_name(v, mistake_named("local_count"));
    } else if (!v->count && noise <= pair_limit(c)) {
        law_judge(&l, &one);
        v->all = one.kind == VERDICT_WRONG && one.count == 1;
        if (v->all) verdict_name(v, mistake_named("mean_of_means"));
        if (v->all) verdict_name(v, one.named[0]);
    }
    verdict_say(v,
                "they are %.6g times the gradients of a mean of %s' means; a sum of means, "
                "or a sum of all over an own count, is %g times it",
                factor, form->of, form->groups);
}

static inline void name_lost(const gradient_check *c, const share_form *form, double factor,
                             verdict *v) {
    law l = factor_law(c, &c->all);
    verdict one;
    verdict_name(v, mistake_named("micro_batches_lost"));
    verdict_say(v, "they are %.6g times the gradient of %s", factor, form->of);
    l.got = factor;
    law_judge(&l, &one);
    if (v->count > 1 || one.kind != VERDICT_WRONG || one.count != 1) return;
    verdict_name(v, one.named[0]);
    v->all = v->count > 1;
}

/* Each row has the factor of a step whose sequences are all split over that row's ranks. */
static inline void name_own_scale(const gradient_check *c, const share_form *form,
                                  double factor, verdict *v) {
    if (fabs(factor - 1) > c->tolerance) return;
    verdict_name(v, mistake_named(form->scale));
    verdict_say(v, "%s: of each row %s", form->scale, form->of);
}

/* ---- rows of the wanted dump ---- */

typedef struct want_shares {
    gradient_check *c;
    share_products products;
    int64_t missing; /* parameters whose local. tensor is not on all ranks in the right size */
} want_shares;

static inline void free_all(double **x, int64_t n) {
    for (int64_t i = 0; i < n; i++) free(x[i]);
}

/* Reads one parameter's local. tensors of all ranks into x[1], x[2], ... Returns 1; 0: some
   rank has none, or one of another size; -1 with d->error. */
static inline int read_locals(dump *d, const char *parameter, int64_t count, double **x) {
    tensor_name name;
    tensor_of(&name, "local.", parameter);
    for (int64_t r = 0; r < d->world; r++) {
        const seqpar_safetensors_tensor *t = seqpar_safetensors_find(d->ranks[r].file,
                                                                     name.text);
        if (!t || t->count != count) return 0;
        if (!(x[1 + r] = dump_doubles(d, r, t))) return -1;
    }
    return 1;
}

static inline int add_want_shares(void *user, const char *parameter) {
    want_shares *s = (want_shares *)user;
    double *x[SHARES + 1] = {NULL};
    tensor_name name;
    whole got;
    int found = 0, status = whole_read(s->c->d, tensor_of(&name, "grad.", parameter), 0,
                                       s->c->d->world, &got);
    if (!status && got.values) found = read_locals(s->c->want, parameter, got.count, x);
    x[0] = got.values;
    if (found > 0)
        products_add(&s->products, (const double *const *)x, s->c->want->world, got.count);
    s->missing += found == 0 && got.values;
    free_all(x + 1, SHARES);
    whole_free(&got);
    return status || found < 0 ? -1 : 0;
}

/* Finds for each rank of the wanted dump the dump's row with the same documents and ids; equal
   rows are taken in order. 0: some rank has none, or the two dumps' rows do not correspond. */
static inline int match_rows(const share_rows *got, const share_rows *want, int64_t *row) {
    for (int64_t q = 0; q < want->replicas; q++) {
        row[q] = -1;
        for (int64_t i = 0; i < got->replicas * got->accumulation && row[q] < 0; i++) {
            int64_t taken = 0;
            while (taken < q && row[taken] != i) taken++;
            if (taken == q && got->of[i].key == want->of[q * want->accumulation].key)
                row[q] = i;
        }
        if (row[q] < 0) return 0;
    }
    return got->has_ids && want->has_ids && want->accumulation == 1 &&
           want->replicas == got->replicas * got->accumulation;
}

static inline void fill_row_form(share_form *form, const share_rows *got, const int64_t *row,
                                 int64_t shares, int which) {
    int64_t a = got->accumulation, groups = (int64_t)form->groups;
    for (int64_t q = 0; q < shares; q++) {
        double own = which == 0   ? got->of[row[q]].count
                     : which == 1 ? share_replica_count(got, row[q] / a)
                                  : share_micro_count(got, row[q] % a);
        form->w[q] = mean_weight(got->all, form->groups, own);
    }
    for (int64_t i = 0; i < groups; i++)
        form->filled += (which == 0   ? got->of[i].count
                         : which == 1 ? share_replica_count(got, i)
                                      : share_micro_count(got, i)) > 0;
}

static inline int counts_tokens(const dump_facts *f) {
    return (f->objective == DUMP_SFT || f->objective == DUMP_PPO) &&
           f->reduction == DUMP_BY_TOKEN;
}

static inline void row_forms(share_forms *f, const share_rows *got, const int64_t *row,
                             const dump_facts *facts) {
    static const char *const of[] = {"rows", "replicas", "micro-batches"};
    double groups[] = {(double)(got->replicas * got->accumulation), (double)got->replicas,
                       (double)got->accumulation};
    for (int last = 1; last >= 0 && got->accumulation > 1; last--) {
        share_form *one = form_begin(f, last ? "the last micro-batch" : "the first micro-batch",
                                     0);
        int64_t kept = last ? got->accumulation - 1 : 0;
        for (int64_t q = 0; q < f->shares; q++) one->w[q] = row[q] % got->accumulation == kept;
    }
    for (int i = 0; i < 3 && counts_tokens(facts) && got->has_labels; i++) {
        if (groups[i] < 2 || (i && groups[i] == groups[0])) continue;
        fill_row_form(form_begin(f, of[i], groups[i]), got, row, f->shares, i);
    }
}

/* Sequences of a step may be split over different numbers of ranks. */
static inline void row_scales(share_forms *f, const share_rows *got, const int64_t *row) {
    share_form *times, *over;
    int64_t differ = 0;
    for (int64_t q = 1; q < f->shares; q++)
        differ += got->of[row[q]].ranks != got->of[row[0]].ranks;
    if (!differ) return;
    times = form_begin(f, "times the number of ranks that hold it", 0);
    over = form_begin(f, "over the number of ranks that hold it", 0);
    times->scale = "times_sp";
    over->scale = "over_sp";
    for (int64_t q = 0; q < f->shares; q++) {
        double ranks = got->of[row[q]].ranks;
        times->w[q] = ranks;
        over->w[q] = ranks > 0 ? 1 / ranks : 0;
    }
}

/* 1: something was named. -1 with the error of one of the dumps. */
static inline int judge_want_shares(gradient_check *c, const share_rows *got) {
    int64_t row[SHARES];
    want_shares s = {.c = c};
    share_forms f = {.shares = c->want->world};
    share_rows want = {.of = NULL};
    verdict *v = &c->s->v;
    int status = 0, fits = 0;
    if (c->want->world > SHARES || c->want->world < 2) return 0;
    if (!share_rows_read(c->want, &want)) fits = match_rows(got, &want, row);
    if (c->want->error.status) status = -1;
    if (!status && fits) status = each_parameter(c->want, "grad.", add_want_shares, &s);
    if (!status && fits && !s.missing) {
        row_forms(&f, got, row, &c->d->facts);
        row_scales(&f, got, row);
    }
    for (int i = 0; i < f.count && !status; i++) {
        likeness l = products_like(&s.products, f.form[i].w, f.shares);
        double distance = distance_from(&l, likeness_factor(&l));
        if (!(distance <= c->tolerance)) continue;
        if (f.form[i].scale)
            name_own_scale(c, &f.form[i], likeness_factor(&l), v);
        else if (f.form[i].groups > 0)
            name_means_of(c, &f.form[i], likeness_factor(&l), distance, v);
        else
            name_lost(c, &f.form[i], likeness_factor(&l), v);
    }
    share_rows_free(&want);
    return status ? -1 : v->count > 0;
}

/* ---- ranks of the dump ---- */

typedef struct rank_shares {
    gradient_check *c;
    const share_forms *forms;
    likeness like[SHARE_FORMS];             /* of the wanted gradient with each form's sum */
    likeness reduced;                       /* of the dump's gradient with the sum of local. */
    int64_t judged, fit[SHARE_FORMS], even; /* parameters; even: fit with equal weights */
} rank_shares;

static inline void judge_rank_shares(rank_shares *s, const share_products *p, int64_t shares) {
    double w[SHARES], even[SHARES];
    likeness l, other;
    products_solve(p, shares, w);
    l = products_like(p, w, shares);
    if (p->elements < FACTOR_SHOWS + 2 * shares || p->of[0][0] == 0 ||
        !(distance_from(&l, 1) <= s->c->tolerance))
        return;
    s->judged++;
    for (int64_t i = 0; i < shares; i++) even[i] = 1;
    l = products_like(p, even, shares);
    s->even += distance_from(&l, likeness_factor(&l)) <= s->c->tolerance;
    for (int i = 0; i < s->forms->count; i++) {
        other = products_like(p, s->forms->form[i].w, shares);
        s->fit[i] += distance_from(&other, likeness_factor(&other)) <= s->c->tolerance;
        likeness_add(&s->like[i], &other);
    }
}

/* Fits a parameter's wanted gradient by the ranks' local. tensors. Compares the dump's gradient
   with their plain sum, too: judge_own_shares takes the reducer's factor from it. */
static inline int add_rank_shares(void *user, const char *parameter) {
    rank_shares *s = (rank_shares *)user;
    dump *d = s->c->d;
    double *x[SHARES + 1] = {NULL};
    share_products products = {.elements = 0};
    tensor_name name;
    whole want, got = {.copy = -1};
    int found = 0, status = whole_read(s->c->want, tensor_of(&name, "grad.", parameter), 0,
                                       s->c->want->world, &want);
    if (!status) status = whole_read(d, name.text, 0, d->world, &got);
    if (!status && want.values && got.values && got.count == want.count)
        found = read_locals(d, parameter, want.count, x);
    x[0] = want.values;
    if (found > 0) {
        products_add(&products, (const double *const *)x, d->world, want.count);
        judge_rank_shares(s, &products, d->world);
        for (int64_t r = 1; r < d->world; r++)
            for (int64_t i = 0; i < want.count; i++) x[1][i] += x[1 + r][i];
        liken(&s->reduced, got.values, x[1], got.count);
    }
    free_all(x + 1, SHARES);
    whole_free(&want);
    whole_free(&got);
    return status || found < 0 ? -1 : 0;
}

/* Weights that undo a mean of means: x_r is proportional to the token count of r's group. */
static inline void rank_forms(share_forms *f, const share_rows *got, const dump *d) {
    int64_t world = d->world, sp = d->sp, replicas = world / sp;
    share_form *one;
    if (sp > 1) {
        one = form_begin(f, "ranks", (double)world);
        for (int64_t r = 0; r < world; r++) {
            one->w[r] = got->by_rank[r] * (double)world / got->all;
            one->filled += got->by_rank[r] > 0;
        }
    }
    if (sp > 1 && replicas > 1) {
        one = form_begin(f, "a sequence's ranks", (double)sp);
        one->filled = (double)sp; /* may differ by replica; then no factor shows it */
        for (int64_t r = 0; r < world; r++) {
            double of_replica = share_replica_count(got, r / sp);
            one->w[r] = of_replica > 0 ? got->by_rank[r] * (double)sp / of_replica : 0;
        }
    }
    if (sp > 1 && replicas > 1) {
        one = form_begin(f, "places in the sequence, each over all replicas", (double)sp);
        for (int64_t r = 0; r < world; r++) {
            double of_place = 0;
            for (int64_t q = r % sp; q < world; q += sp) of_place += got->by_rank[q];
            one->w[r] = of_place * (double)sp / got->all;
            one->filled += r < sp && of_place > 0;
        }
    }
    if (replicas < 2) return;
    one = form_begin(f, "replicas", (double)replicas);
    for (int64_t r = 0; r < world; r++)
        one->w[r] = share_replica_count(got, r / sp) * (double)replicas / got->all;
    for (int64_t i = 0; i < replicas; i++) one->filled += share_replica_count(got, i) > 0;
}

/* 1: something was named. -1 with the error of one of the dumps. */
static inline int judge_own_shares(gradient_check *c, const share_rows *got) {
    static share_forms f; /* large */
    rank_shares s = {.c = c, .forms = &f};
    verdict *v = &c->s->v;
    memset(&f, 0, sizeof f);
    if (c->d->world > SHARES || c->d->world < 2 || !got->has_labels || !(got->all > 0) ||
        !counts_tokens(&c->d->facts))
        return 0;
    rank_forms(&f, got, c->d);
    if (each_parameter(c->want, "grad.", add_rank_shares, &s)) return -1;
    for (int i = 0; i < f.count; i++) {
        double right = likeness_factor(&s.like[i]), reduced = likeness_factor(&s.reduced);
        if (!s.judged || s.fit[i] < s.judged || s.even == s.judged) continue;
        name_means_of(c, &f.form[i], reduced / right, distance_from(&s.like[i], right), v);
        verdict_say(v,
                    "that is what %lld parameters say whose local gradients come from a "
                    "rank's own tokens alone",
                    (long long)s.judged);
    }
    return v->count > 0;
}

/* If all gradients are one multiple of the wanted ones, the sum may be over a wrong count:
   names the mistake that gives this count. */
static inline void judge_count(const gradient_check *c, const share_rows *got) {
    law_counts counts = {got->all, got->tokens, c->d->sp, c->d->world / c->d->sp,
                         c->d->accumulation};
    double factor = likeness_factor(&c->all), off = distance_from(&c->all, factor);
    double by = got->all / factor;
    if (counts_tokens(&c->d->facts) && got->has_labels && off <= c->tolerance)
        law_name_count(&counts, law_whole(&counts, by, by * off), &c->s->v);
}

/* Judges wrong gradients that the mistakes of factors.h do not explain. 0, or -1 with the error
   of one of the dumps. */
static inline int judge_shares(gradient_check *c) {
    share_rows got;
    int found = share_rows_read(c->d, &got);
    if (!found) found = judge_want_shares(c, &got);
    if (!found) found = judge_own_shares(c, &got);
    if (!found) judge_count(c, &got);
    if (!found) found = c->s->v.count > 0;
    share_rows_free(&got);
    if (!found && c->d->world * c->d->accumulation > 1)
        verdict_say(&c->s->v, "whether a mean of means or a lost micro-batch gives them, the "
                              "dump does not show: give --want a dump of a rank a row, sp 1, "
                              "with its local. tensors");
    return found < 0 ? -1 : 0;
}
#endif
