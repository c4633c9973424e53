/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on dumps of RM, KTO, PPO, DPO and of means over sequences: right ones in
   every layout, and one with each mistake. What a mistake gives is made anew, token by
   token. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include "seqpar_safetensors.h"
#include "test.h"

#define FOLDER "build/test_dump_objectives.d"
enum { TOKENS = 113, DOCS = 8, SP = 4, DP = 3, MICRO = 2, RANKS = SP * DP, NONE = -100 };
#ifndef SEED_OF_SCENES
#define SEED_OF_SCENES 3
#endif
static const int64_t cu_seqlens[DOCS + 1] = {0, 23, 24, 47, 53, 72, 79, 98, 107};

typedef struct row {
    int64_t docs; /* what is behind the last one is padding */
    int32_t ids[TOKENS], labels[TOKENS];
    double logp[TOKENS], ref_logp[TOKENS], old_logp[TOKENS], advantages[TOKENS], values[TOKENS];
    double scores[DOCS], rewards[DOCS], desirable[DOCS], kl[DOCS];
    int64_t groups[DOCS];
} row;

enum { SPLIT, FIRST, CONTIGUOUS }; /* how a side tensor comes to a rank */
typedef struct scene {
    int64_t sp, dp, micro, world;
    row of[DP][MICRO];
    int32_t index[SP][TOKENS], member[TOKENS], local[TOKENS]; /* the same for every row */
    int64_t held[SP];
    const char *objective, *reduction, *advantage;
    double beta, kl_coef;
    double loss[RANKS];
    seqpar_safetensors_dtype dtype, loss_dtype; /* of numbers */
    const char *without, *side;                 /* a tensor that is not written; not split */
    int64_t without_below;                      /* by ranks below this; 0: by all */
    int without_values;                         /* by the others */
    const char *rough;                          /* a tensor of BF16 */
    int source;
    int64_t empty;  /* documents without a token behind the others */
    int padded;     /* padding is a document of its own */
    int whole;      /* rewards and desirable are integers: of 8 bytes, 2: of one */
    const char *odd; /* what is wrong with rank 1's file */
} scene;
static scene s;

/* ---- a right step ---- */

static int64_t document_of(const row *r, int64_t t) {
    int64_t d = 0;
    while (d < r->docs && cu_seqlens[d + 1] <= t) d++;
    return d;
}

static int64_t last_of(int64_t d) { return cu_seqlens[d + 1] - 1; }

static void deal(int layout) {
    static int64_t whole[DOCS + 2] = {0, 23, 24, 47, 53, 72, 79, 98, 107, TOKENS};
    static const seqpar_row plan = {.tokens = TOKENS,
                                    .padded = TOKENS,
                                    .chunks = 16,
                                    .docs = DOCS + 1,
                                    .cu_seqlens = whole};
    int32_t all[TOKENS];
    for (int32_t t = 0; t < TOKENS; t++) all[t] = t;
    for (int64_t r = 0; r < s.sp; r++) {
        seqpar_share share;
        seqpar_split_desc desc = {layout, s.sp, r};
        test_expect(!seqpar_split(NULL, &share, &plan, 1, &desc), "no split");
        s.held[r] = share.tokens;
        seqpar_scatter(s.index[r], all, &share, 0, sizeof *all);
        seqpar_share_free(&share);
    }
}

static void note_places(void) {
    for (int64_t r = 0; r < s.sp; r++)
        for (int64_t i = 0; i < s.held[r]; i++) {
            s.member[s.index[r][i]] = (int32_t)r;
            s.local[s.index[r][i]] = (int32_t)i;
        }
}

static void fill_row(row *r, int64_t number) {
    static const int64_t docs[DP * MICRO] = {8, 6, 4, 8, 6, 8};
    r->docs = docs[number];
    for (int64_t t = 0; t < TOKENS; t++) {
        int64_t d = document_of(r, t);
        r->ids[t] = (int32_t)((number * TOKENS + t) * 7 % 2003);
        r->labels[t] = (int32_t)((number * TOKENS + t + 1) * 7 % 2003);
        if (d == r->docs || t == last_of(d) || t - cu_seqlens[d] < 2) r->labels[t] = NONE;
        r->logp[t] = -0.2 - 0.3 * s.member[t] - 0.2 * (double)d - 0.1 * fabs(test_normal());
        r->ref_logp[t] =
            r->logp[t] + 0.8 * test_normal() + (d % 3 ? 0.1 : -0.1) * (1 + s.member[t]);
        r->old_logp[t] = r->logp[t] + 0.3 * test_normal();
        r->values[t] = test_normal();
    }
    for (int64_t d = 0; d < r->docs; d++) {
        r->scores[d] = r->values[last_of(d)];
        r->rewards[d] = 0.5 * (double)test_integer(0, 6) + 0.25 * (double)d;
        r->groups[d] = 40 + (d + number) % 3;
        r->desirable[d] = (double)((d + number) % 3 == 0);
        r->kl[d] = 0.3 + 0.2 * (double)number + 0.5 * test_normal();
    }
}

/* Over rows as the step has them. */
#define EACH_ROW(dp_, a_) \
    for (int64_t dp_ = 0; dp_ < s.dp; dp_++) \
        for (int64_t a_ = 0; a_ < s.micro; a_++)

/* Mean and deviation of the rewards that `in` lets in beside document (dp, a, d). */
typedef int (*scope)(int64_t dp, int64_t a, int64_t group, int64_t own_dp, int64_t own_a,
                     int64_t own_group);
static int in_group(int64_t dp, int64_t a, int64_t g, int64_t own_dp, int64_t own_a,
                    int64_t own_g) {
    return (void)dp, (void)a, (void)own_dp, (void)own_a, g == own_g;
}
static int in_replica(int64_t dp, int64_t a, int64_t g, int64_t own_dp, int64_t own_a,
                      int64_t own_g) {
    return (void)a, (void)own_a, g == own_g && dp == own_dp;
}
static int in_row(int64_t dp, int64_t a, int64_t g, int64_t own_dp, int64_t own_a,
                  int64_t own_g) {
    return g == own_g && dp == own_dp && a == own_a;
}
static int in_batch(int64_t dp, int64_t a, int64_t g, int64_t own_dp, int64_t own_a,
                    int64_t own_g) {
    return (void)dp, (void)a, (void)g, (void)own_dp, (void)own_a, (void)own_g, 1;
}

static void moments(scope in, int64_t dp, int64_t a, int64_t d, double *mean, double *pop,
                    double *unbiased) {
    double n = 0, sum = 0, squares = 0;
    EACH_ROW(j, b)
    for (int64_t e = 0; e < s.of[j][b].docs; e++)
        if (in(j, b, s.of[j][b].groups[e], dp, a, s.of[dp][a].groups[d])) {
            double x = s.of[j][b].rewards[e];
            n++;
            sum += x;
            squares += x * x;
        }
    *mean = sum / n;
    squares = fabs(squares - sum * sum / n);
    *pop = sqrt(squares / n);
    *unbiased = n > 1 ? sqrt(squares / (n - 1)) : 0;
}

static double advantage(scope in, int64_t dp, int64_t a, int64_t d, int unbiased) {
    double mean, pop, sample, x = s.of[dp][a].rewards[d];
    moments(in, dp, a, d, &mean, &pop, &sample);
    if (!strcmp(s.advantage, "group_mean")) return x - mean;
    return (x - mean) / ((unbiased ? sample : pop) + 1e-4);
}

static void set_advantages(scope in, int unbiased) {
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        row *r = &s.of[dp][a];
        int64_t d = document_of(r, t);
        r->advantages[t] = d < r->docs ? advantage(in, dp, a, d, unbiased) : 0;
    }
}

static double right_loss(void);
static void set_loss(double loss) {
    for (int64_t r = 0; r < s.world; r++) s.loss[r] = loss;
}

/* Each scene's numbers are its own, whatever was made before it. They are such that no two
   mistakes happen to give one number. */
static void begin(const char *objective, int64_t sp, int64_t dp, int64_t micro) {
    memset(&s, 0, sizeof s);
    test_state = SEED_OF_SCENES;
    s.objective = objective;
    s.reduction = "token";
    s.advantage = "group";
    s.sp = sp;
    s.dp = dp;
    s.micro = micro;
    s.world = sp * dp;
    s.beta = 0.3;
    s.kl_coef = 0.15;
    s.dtype = s.loss_dtype = SEQPAR_SAFETENSORS_F64;
}

static void fill(void) {
    note_places();
    EACH_ROW(dp, a) fill_row(&s.of[dp][a], dp * s.micro + a);
    set_advantages(in_group, 0);
    set_loss(right_loss());
}

static void make(const char *objective, int layout, int64_t sp, int64_t dp, int64_t micro) {
    begin(objective, sp, dp, micro);
    deal(layout);
    fill();
}

/* ---- losses, token by token ---- */

static int is(const char *objective) { return !strcmp(s.objective, objective); }
static int by_sequence(void) { return !strcmp(s.reduction, "sequence"); }

enum {
    RIGHT,
    INVERTED,
    WRONG_SIDE,
    NO_CLIP,
    NO_KL,
    K1,
    K2,
    K3_TURNED,
    K3_CUT,
    SIDE_OLD,
    SIDE_REFERENCE,
    SIDE_ADVANTAGES
};

static double number_from(const double *x, int64_t t, int source) {
    int64_t before = 0;
    if (source == FIRST) return x[s.local[t]];
    for (int64_t r = 0; r < s.member[t]; r++) before += s.held[r];
    return source == CONTIGUOUS ? x[before + s.local[t]] : x[t];
}

static double token_loss(const row *r, int64_t t, int way) {
    double logp = r->logp[t];
    double old = number_from(r->old_logp, t, way == SIDE_OLD ? s.source : SPLIT);
    double ref = number_from(r->ref_logp, t, way == SIDE_REFERENCE ? s.source : SPLIT);
    double a = number_from(r->advantages, t, way == SIDE_ADVANTAGES ? s.source : SPLIT);
    double ratio = exp(way == INVERTED ? old - logp : logp - old), cut, one, two, k3;
    if (is("sft")) return -logp;
    cut = ratio < 0.8 ? 0.8 : ratio > 1.3 ? 1.3 : ratio;
    one = -a * ratio;
    two = way == NO_CLIP ? one : -a * cut;
    one = (way == WRONG_SIDE) == (one < two) ? one : two;
    k3 = exp(ref - logp) - (ref - logp) - 1;
    if (way == NO_KL) k3 = 0;
    if (way == K1) k3 = logp - ref;
    if (way == K2) k3 = (logp - ref) * (logp - ref) / 2;
    if (way == K3_TURNED) k3 = exp(logp - ref) - (logp - ref) - 1;
    if (way == K3_CUT && k3 > 10) k3 = 10;
    return one + s.kl_coef * k3;
}

/* Sums over what lies on members first to last, of document d. */
static double document_loss(const row *r, int64_t d, int64_t first, int64_t last, int way,
                            double *n) {
    double sum = 0;
    *n = 0;
    for (int64_t t = cu_seqlens[d]; t <= last_of(d); t++)
        if (r->labels[t] != NONE && s.member[t] >= first && s.member[t] < last) {
            sum += token_loss(r, t, way);
            ++*n;
        }
    return sum;
}

static double mean_of_tokens(int way) {
    double sum = 0, count = 0, n;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++) {
        sum += document_loss(&s.of[dp][a], d, 0, s.sp, way, &n);
        count += n;
    }
    return sum / count;
}

static double mean_of_documents(int way) {
    double sum = 0, count = 0, n;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++) {
        double one = document_loss(&s.of[dp][a], d, 0, s.sp, way, &n);
        if (n == 0) continue;
        sum += one / n;
        count++;
    }
    return sum / count;
}

static double mean_loss(int way) {
    return by_sequence() ? mean_of_documents(way) : mean_of_tokens(way);
}

static double log_sigmoid_loss(double x) { return log(1 + exp(-x)); }

/* Of a document: log-probs of members first to last. `reference`: times that. */
static double h_of(const row *r, int64_t d, int64_t first, int64_t last, double reference,
                   double *n) {
    double h = 0;
    *n = 0;
    for (int64_t t = cu_seqlens[d]; t <= last_of(d); t++)
        if (r->labels[t] != NONE && s.member[t] >= first && s.member[t] < last) {
            h += r->logp[t] - reference * number_from(r->ref_logp, t, s.source);
            ++*n;
        }
    return h;
}

static double pair_mean(double factor, double reference, int by_length, int64_t first,
                        int64_t last) {
    double sum = 0, count = 0, n[2];
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d += 2) {
        double chosen = h_of(&s.of[dp][a], d, first, last, reference, &n[0]);
        double rejected = h_of(&s.of[dp][a], d + 1, first, last, reference, &n[1]);
        if (by_length) chosen /= n[0] > 0 ? n[0] : 1;
        if (by_length) rejected /= n[1] > 0 ? n[1] : 1;
        sum += log_sigmoid_loss(s.beta * factor * (chosen - rejected));
        count++;
    }
    return sum / count;
}

static double score_mean(double factor) {
    double sum = 0, count = 0;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d += 2, count++)
        sum += log_sigmoid_loss(factor *
                                (s.of[dp][a].scores[d] - s.of[dp][a].scores[d + 1]));
    return sum / count;
}

/* ---- KTO ---- */

enum { Z, Z_REPLICA, Z_CLAMPED, Z_MEANS, Z_FREE, Z_NONE, Z_TIMES, Z_OVER };

static double kl_mean(int64_t from, int64_t to, int64_t a) {
    double sum = 0, count = 0;
    for (int64_t dp = from; dp < to; dp++)
        for (int64_t d = 0; d < s.of[dp][a].docs; d++, count++) sum += s.of[dp][a].kl[d];
    return sum / count;
}

static double kl_mean_of_all(void) { return kl_mean(0, s.dp, 0); }

static double positive(double x) { return x > 0 ? x : 0; }

static double z_of(int64_t dp, int64_t a, int way) {
    double means = 0, clamped = 0;
    for (int64_t j = 0; j < s.dp; j++) {
        means += kl_mean(j, j + 1, a) / (double)s.dp;
        clamped += positive(kl_mean(j, j + 1, a)) / (double)s.dp;
    }
    if (way == Z_REPLICA) return positive(kl_mean(dp, dp + 1, a));
    if (way == Z_CLAMPED) return clamped;
    if (way == Z_MEANS) return positive(means);
    if (way == Z_FREE) return kl_mean(0, s.dp, a);
    if (way == Z_NONE) return 0;
    return positive(kl_mean(0, s.dp, a)) * (way == Z_TIMES  ? (double)s.sp
                                            : way == Z_OVER ? 1 / (double)s.sp
                                                            : 1);
}

static double kto_mean(double factor, double reference, int way, int swapped, int64_t first,
                       int64_t last) {
    double sum = 0, count = 0, n;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++, count++) {
        const row *r = &s.of[dp][a];
        double h = factor * h_of(r, d, first, last, reference, &n);
        double x = s.beta * (h - z_of(dp, a, way));
        int desirable = (r->desirable[d] != 0) != swapped;
        sum += 1 - 1 / (1 + exp(desirable ? -x : x));
    }
    return sum / count;
}

static double right_loss(void) {
    return is("dpo")   ? pair_mean(1, 1, 0, 0, s.sp)
           : is("rm")  ? score_mean(1)
           : is("kto") ? kto_mean(1, 1, Z, 0, 0, s.sp)
                       : mean_loss(RIGHT);
}

/* ---- writing it ---- */

typedef struct page {
    seqpar_safetensors_tensor tensors[40];
    void *data[40];
    char names[40][32];
    int64_t count;
} page;

static void *copy(const void *from, size_t bytes) {
    void *to = malloc(bytes + 1);
    if (!to) exit(1);
    memcpy(to, from, bytes);
    return to;
}

static void add(page *p, int64_t micro, const char *name, void *data,
                seqpar_safetensors_dtype dtype, int64_t count) {
    if (s.without && !strcmp(name, s.without)) {
        free(data);
        return;
    }
    if (micro >= 0)
        snprintf(p->names[p->count], sizeof p->names[0], "%lld.%s", (long long)micro, name);
    else
        snprintf(p->names[p->count], sizeof p->names[0], "%s", name);
    p->tensors[p->count] = (seqpar_safetensors_tensor){.name = p->names[p->count],
                                                       .dtype = dtype,
                                                       .dims = micro >= 0,
                                                       .shape = {count}};
    p->data[p->count++] = data;
}

static uint16_t bf16(double x) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    bits += 0x7fff + (bits >> 16 & 1);
    return (uint16_t)(bits >> 16);
}

/* Numbers as they are written down. */
static void *as_dtype(const double *x, int64_t n, seqpar_safetensors_dtype dtype) {
    char *out = (char *)malloc((size_t)n * 8 + 1);
    if (!out) exit(1);
    for (int64_t i = 0; i < n; i++) {
        float f = (float)x[i];
        _Float16 half = (_Float16)x[i];
        uint16_t b = bf16(x[i]);
        if (dtype == SEQPAR_SAFETENSORS_F64) memcpy(out + 8 * i, &x[i], 8);
        if (dtype == SEQPAR_SAFETENSORS_F32) memcpy(out + 4 * i, &f, 4);
        if (dtype == SEQPAR_SAFETENSORS_F16) memcpy(out + 2 * i, &half, 2);
        if (dtype == SEQPAR_SAFETENSORS_BF16) memcpy(out + 2 * i, &b, 2);
    }
    return out;
}

static int is_odd(int64_t rank, const char *how) {
    return rank == 1 && s.odd && !strcmp(s.odd, how);
}

static void add_numbers(page *p, int64_t micro, const char *name, const double *x, int64_t n) {
    int rough = s.rough && !strcmp(s.rough, name);
    seqpar_safetensors_dtype dtype = rough ? SEQPAR_SAFETENSORS_BF16 : s.dtype;
    add(p, micro, name, as_dtype(x, n, dtype), dtype, n);
}

/* Numbers of a rank's tokens, by index or as they come where they are not split; then what is
   never used differs from rank to rank. */
static void add_tokens(page *p, int64_t rank, int64_t micro, const char *name,
                       const double *x) {
    int64_t r = rank % s.sp, n = s.held[r];
    double own[TOKENS];
    int source = s.side && !strcmp(s.side, name) ? s.source : SPLIT;
    for (int64_t i = 0; i < n; i++) {
        int untrained = s.of[rank / s.sp][micro].labels[s.index[r][i]] == NONE;
        own[i] = number_from(x, s.index[r][i], source);
        if (untrained && source != SPLIT) own[i] = (double)(100 * r + i);
    }
    if (is_odd(rank, name)) n--;
    add_numbers(p, micro, name, own, n);
}

static void add_whole(page *p, int64_t micro, const char *name, const double *x, int64_t n) {
    int64_t wide[2 * DOCS];
    uint8_t narrow[2 * DOCS];
    for (int64_t i = 0; i < n; i++) narrow[i] = (uint8_t)(wide[i] = (int64_t)x[i]);
    if (s.whole == 1)
        add(p, micro, name, copy(wide, sizeof wide), SEQPAR_SAFETENSORS_I64, n);
    else
        add(p, micro, name, copy(narrow, sizeof narrow), SEQPAR_SAFETENSORS_U8, n);
}

static void add_documents(page *p, int64_t rank, int64_t micro, const char *name,
                          const double *x, int64_t n) {
    double own[2 * DOCS];
    char differs[32], more[32];
    snprintf(differs, sizeof differs, "%s differ", name);
    memcpy(own, x, DOCS * sizeof *own);
    for (int64_t i = 0; i < s.empty; i++) own[n++] = (double)(i % 2);
    if (is_odd(rank, differs)) own[1] += 0.25;
    snprintf(more, sizeof more, "%s more", name);
    if (is_odd(rank, more)) own[n++] = 1;
    if (is_odd(rank, name)) n--;
    if (s.whole && (!strcmp(name, "rewards") || !strcmp(name, "desirable")))
        add_whole(p, micro, name, own, n);
    else
        add_numbers(p, micro, name, own, n);
}

static void add_groups(page *p, int64_t rank, int64_t micro, const row *r) {
    int64_t own[2 * DOCS], n = r->docs;
    memcpy(own, r->groups, sizeof r->groups);
    for (int64_t i = 0; i < s.empty; i++) own[n++] = 40;
    if (is_odd(rank, "groups differ")) own[1]++;
    add(p, micro, "groups", copy(own, sizeof own), SEQPAR_SAFETENSORS_I64, n);
}

static void add_integers(page *p, int64_t rank, int64_t micro, const row *r) {
    int64_t member = rank % s.sp, n = s.held[member];
    int32_t ids[TOKENS], labels[TOKENS];
    int64_t begins[2 * DOCS + 1], docs = r->docs;
    memcpy(begins, cu_seqlens, sizeof cu_seqlens);
    for (int64_t i = 0; i < s.empty; i++, docs++) begins[docs + 1] = begins[docs];
    if (s.padded) begins[++docs] = TOKENS;
    for (int64_t i = 0; i < n; i++) {
        ids[i] = r->ids[s.index[member][i]];
        labels[i] = r->labels[s.index[member][i]];
    }
    add(p, micro, "index", copy(s.index[member], sizeof ids), SEQPAR_SAFETENSORS_I32, n);
    add(p, micro, "ids", copy(ids, sizeof ids), SEQPAR_SAFETENSORS_I32, n);
    add(p, micro, "labels", copy(labels, sizeof labels), SEQPAR_SAFETENSORS_I32, n);
    add(p, micro, "cu_seqlens", copy(begins, sizeof begins), SEQPAR_SAFETENSORS_I64, docs + 1);
}

static void add_row(page *p, int64_t rank, int64_t micro) {
    row *r = &s.of[rank / s.sp][micro];
    const char *without = s.without;
    if (s.without_below && rank >= s.without_below)
        s.without = s.without_values ? "values" : NULL;
    add_integers(p, rank, micro, r);
    if (!is("rm")) add_tokens(p, rank, micro, "logp", r->logp);
    if (!is("rm") && !is("sft")) add_tokens(p, rank, micro, "ref_logp", r->ref_logp);
    if (is("ppo")) add_tokens(p, rank, micro, "old_logp", r->old_logp);
    if (is("ppo")) add_tokens(p, rank, micro, "advantages", r->advantages);
    if (is("ppo")) add_documents(p, rank, micro, "rewards", r->rewards, r->docs);
    if (is("ppo")) add_groups(p, rank, micro, r);
    if (is("rm")) add_tokens(p, rank, micro, "values", r->values);
    if (is("rm")) add_documents(p, rank, micro, "scores", r->scores, r->docs);
    if (is("kto")) add_documents(p, rank, micro, "desirable", r->desirable, r->docs);
    if (is("kto")) add_documents(p, rank, micro, "kl", r->kl, r->docs);
    s.without = without;
}

static void write_rank(int64_t rank) {
    char text[6][32], path[80];
    const int64_t whole[] = {rank, s.world, s.sp, s.micro};
    seqpar_safetensors_pair pairs[] = {{"seqpar_dump", "1"},       {"rank", text[0]},
                                       {"world", text[1]},         {"sp", text[2]},
                                       {"accumulation", text[3]},  {"objective", s.objective},
                                       {"reduction", s.reduction}, {"beta", text[4]},
                                       {"kl_coef", text[5]},       {"clip_low", "0.2"},
                                       {"clip_high", "0.3"},       {"advantage", s.advantage}};
    page p = {.count = 0};
    seqpar_error error = {0};
    for (int i = 0; i < 4; i++)
        snprintf(text[i], sizeof text[i], "%lld", (long long)whole[i]);
    snprintf(text[4], sizeof text[4], "%.17g", s.beta);
    snprintf(text[5], sizeof text[5], "%.17g", s.kl_coef);
    for (int64_t a = 0; a < s.micro; a++) add_row(&p, rank, a);
    add(&p, -1, "loss", as_dtype(&s.loss[rank], 1, s.loss_dtype), s.loss_dtype, 0);
    snprintf(path, sizeof path, FOLDER "/rank%lld.safetensors", (long long)rank);
    seqpar_safetensors_desc desc = {.path = path,
                                    .tensors = p.tensors,
                                    .count = p.count,
                                    .metadata = pairs,
                                    .metadata_count = 12};
    test_expect(!seqpar_safetensors_save(&desc, (const void *const *)p.data, &error), "%s",
                error.text);
    for (int64_t i = 0; i < p.count; i++) free(p.data[i]);
}

static void write_scene(void) {
    if (system("rm -rf " FOLDER)) exit(1);
    mkdir(FOLDER, 0777);
    for (int64_t r = 0; r < s.world; r++) write_rank(r);
}

/* ---- what is said of it ---- */

/* Numbers are exact here: with a small tolerance no two mistakes happen to give one. */
static int tight;

/* All that the oracle prints, and its exit code. */
static int ask(char *said, size_t size) {
    static const char *const commands[] = {
        "build/seqpar-verify ver " FOLDER " 2>&1",
        "build/seqpar-verify ver " FOLDER " --tolerance 0.000002 2>&1"};
    FILE *out = popen(commands[tight], "r");
    size_t bytes = out ? fread(said, 1, size - 1, out) : 0;
    int is_code = out ? pclose(out) : -1;
    said[bytes] = 0;
    return WIFEXITED(is_code) ? WEXITSTATUS(is_code) : -1;
}

static char said[32768];

static void expect(int code, const char *headline, const char *text) {
    int got;
    size_t line;
    write_scene();
    got = ask(said, sizeof said);
    line = strcspn(said, "\n");
    for (char *c = said + line; *c; c++) /* lines are wrapped: one long line */
        if (*c == '\n') *c = ' ';
    for (char *from = said + line, *to = from; (*to = *from); from++)
        to += !(*from == ' ' && from[1] == ' ');
    test_expect(got == code && strlen(headline) == line && !strncmp(said, headline, line) &&
                    strstr(said, text),
                "exit code %d, not %d; said '%.600s', not '%s' with '%s'", got, code, said,
                headline, text);
}

static void expect_named(const char *name, const char *text) {
    char headline[96];
    snprintf(headline, sizeof headline, "wrong: %s", name);
    tight = 1;
    expect(1, headline, text);
    tight = 0;
    test_end("objectives_%s_%s", s.objective, name);
}

static void expect_loss(double loss, const char *name, const char *text) {
    set_loss(loss);
    expect_named(name, text);
}

/* ---- right ones ---- */

static void expect_right(const char *name, const char *text) {
    expect(0, "right", text);
    test_end("objectives_right_%s_%s", s.objective, name);
}

/* Right, and these words are not said. */
static void expect_unsaid(const char *name, const char *text) {
    expect(0, "right", "loss right: got");
    test_expect(!strstr(said, text), "it says '%s'", text);
    test_end("objectives_right_%s_%s", s.objective, name);
}

static void test_right(const char *objective, const char *reduction) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int64_t sp = 1; sp <= SP; sp++) {
            int alone = sp == 1 && !strcmp(objective, "dpo");
            begin(objective, sp, 1 + (sp + layout) % 3, 1 + layout % 2);
            s.reduction = reduction;
            deal(layout);
            fill();
            expect(alone ? 4 : 0, alone ? "insufficient" : "right",
                   alone ? "one rank has nothing" : "loss right: got");
            test_end("objectives_right_%s_%s_%s_P%lld", objective, reduction,
                     seqpar_layout_name(layout), (long long)sp);
        }
}

/* ---- means ---- */

/* What each rank makes of documents by its own count of their tokens. */
enum { ADDED, AVERAGED, NON_EMPTY, POOLED, OF_RANKS, OWN };
static double local_means(int how, int64_t rank) {
    double total = 0, documents = 0, pieces = 0, ranks = 0;
    for (int64_t r = 0; r < s.world; r++) {
        double own = 0, count = 0, n;
        for (int64_t a = 0; a < s.micro; a++)
            for (int64_t d = 0; d < s.of[r / s.sp][a].docs; d++) {
                double sum = document_loss(&s.of[r / s.sp][a], d, r % s.sp, r % s.sp + 1, RIGHT,
                                           &n);
                if (n > 0) own += sum / n;
                count += n > 0;
            }
        total += own;
        pieces += count;
        ranks += own / count / (double)s.world;
        if (how == OWN && r == rank) return own / count;
    }
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++) {
        double n;
        document_loss(&s.of[dp][a], d, 0, s.sp, RIGHT, &n);
        documents += n > 0;
    }
    return how == ADDED      ? total / documents
           : how == AVERAGED ? total / documents / (double)s.sp
           : how == POOLED   ? total / pieces
                             : ranks;
}

static double local_means_of_non_empty(void) {
    double sum = 0, documents = 0;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++) {
        double means = 0, filled = 0, n;
        for (int64_t m = 0; m < s.sp; m++) {
            double part = document_loss(&s.of[dp][a], d, m, m + 1, RIGHT, &n);
            if (n > 0) means += part / n;
            filled += n > 0;
        }
        if (filled > 0) sum += means / filled;
        documents += filled > 0;
    }
    return sum / documents;
}

/* The mean over rows of their means over documents, or over tokens. */
static double mean_of_rows(int tokens) {
    double sum = 0, rows = 0;
    EACH_ROW(dp, a) {
        double own = 0, count = 0, n;
        for (int64_t d = 0; d < s.of[dp][a].docs; d++) {
            double one = document_loss(&s.of[dp][a], d, 0, s.sp, RIGHT, &n);
            if (n > 0) own += tokens ? one : one / n;
            count += tokens ? n : n > 0;
        }
        if (count > 0) sum += own / count;
        rows += count > 0;
    }
    return sum / rows;
}

static double mean_of_ranks(void) {
    double sum = 0;
    for (int64_t r = 0; r < s.world; r++) {
        double own = 0, count = 0, n;
        for (int64_t a = 0; a < s.micro; a++)
            for (int64_t d = 0; d < s.of[r / s.sp][a].docs; d++) {
                own += document_loss(&s.of[r / s.sp][a], d, r % s.sp, r % s.sp + 1, RIGHT, &n);
                count += n;
            }
        sum += own / count;
    }
    return sum / (double)s.world;
}

/* Each rank's shares of documents' means, by its shares of documents: nobody computes that. */
static double mean_of_shares(void) {
    double sum = 0;
    for (int64_t r = 0; r < s.world; r++) {
        double own = 0, count = 0, whole, n;
        for (int64_t a = 0; a < s.micro; a++)
            for (int64_t d = 0; d < s.of[r / s.sp][a].docs; d++) {
                const row *w = &s.of[r / s.sp][a];
                double part = document_loss(w, d, r % s.sp, r % s.sp + 1, RIGHT, &n);
                document_loss(w, d, 0, s.sp, RIGHT, &whole);
                if (whole > 0) own += part / whole;
                if (whole > 0) count += n / whole;
            }
        sum += own / count;
    }
    return sum / (double)s.world;
}

static void make_by(const char *objective, const char *reduction) {
    begin(objective, 3, 2, 2);
    s.reduction = reduction;
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
}

static void test_sequences(const char *objective) {
    make_by(objective, "sequence");
    expect_loss(mean_of_tokens(RIGHT), "mean_over_tokens", "loss wrong: got");
    expect_loss(local_means(ADDED, 0), "sequence_counts_local", "added over ranks");
    expect_loss(local_means(AVERAGED, 0), "sequence_counts_local", "averaged over ranks");
    expect_loss(local_means(POOLED, 0), "sequence_counts_local", "and ranks together");
    expect_loss(local_means(OF_RANKS, 0), "sequence_counts_local", "the mean over ranks of");
    expect_loss(local_means_of_non_empty(), "sequence_counts_local", "have a token of the");
    expect_loss(mean_of_rows(0), "mean_of_means", "replicas' micro-batches");
    expect_loss(right_loss() / 3, "shares_averaged", "over the ranks of a sequence");
    expect_loss(right_loss() / 6, "shares_averaged", "groups are ranks");
    expect_loss(right_loss() * 3, "losses_added", "over the ranks of a sequence");
    expect_loss(right_loss() * 2, "losses_added", "over replicas");
    expect_loss(NAN, "nan_of_an_empty_rank", "got nan");
    set_loss(right_loss());
    s.loss[4] = local_means(OWN, 4);
    expect_named("own_mean_alone", "as rank 4 reports it");
    set_loss(right_loss());
    s.loss[4] = local_means(OWN, 5);
    expect_named("unknown", "as rank 4 reports it");
    expect_loss(right_loss() * 1.31, "unknown", "no known way to divide these sums");
    expect_loss(mean_of_shares(), "unknown", "no known way to divide these sums");
    begin(objective, 1, 2, 2);
    s.reduction = "sequence";
    deal(SEQPAR_LAYOUT_CONTIGUOUS);
    fill();
    expect_unsaid("one_rank", "sequence_counts_local");
}

/* Some targets have id 0: over all targets they are lost, over the others with their count. */
static double mean_without_zero(int counted) {
    double sum = 0, count = 0;
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        const row *r = &s.of[dp][a];
        if (r->labels[t] == NONE) continue;
        if (r->labels[t]) sum += token_loss(r, t, RIGHT);
        count += counted || r->labels[t];
    }
    return sum / count;
}

static void test_zero(const char *objective) {
    make_by(objective, "token");
    EACH_ROW(dp, a)
    for (int64_t t = 3; t + 1 < TOKENS; t += 5)
        if (s.of[dp][a].labels[t] != NONE)
            s.of[dp][a].labels[t] = s.of[dp][a].ids[t + 1] = 0;
    expect_loss(mean_without_zero(0), "token_zero_lost", "loss wrong: got");
    expect_loss(mean_without_zero(1), "token_zero_lost", "they count all the same");
}

static void test_tokens(const char *objective) {
    make_by(objective, "token");
    expect_loss(mean_of_documents(RIGHT), "mean_over_sequences", "loss wrong: got");
    expect_loss(mean_of_rows(0), "mean_over_sequences", "and then the mean of rows");
    expect_loss(mean_of_rows(1), "mean_of_means", "replicas' micro-batches");
    expect_loss(mean_of_ranks(), "mean_of_means", "groups are ranks");
    expect_loss(local_means(ADDED, 0), "sequence_counts_local", "added over ranks");
    expect_loss(right_loss() / 3, "shares_averaged", "over the ranks of a sequence");
    expect_loss(right_loss() * 6, "losses_added", "over all ranks");
    for (int64_t t = 0; t < TOKENS; t++) s.of[1][1].labels[t] = NONE;
    expect_loss(mean_of_rows(0), "mean_over_sequences", "and then the mean of rows");
}

/* ---- DPO ---- */

/* Of a row, documents' sums where tokens lie one rank behind the other. */
static double gathered_h(const row *r, int64_t d) {
    double h = 0;
    int64_t at = 0;
    for (int64_t m = 0; m < s.sp; m++)
        for (int64_t i = 0; i < s.held[m]; i++, at++) {
            int64_t t = s.index[m][i];
            if (at >= cu_seqlens[d] && at <= last_of(d) && r->labels[t] != NONE)
                h += r->logp[t] - r->ref_logp[t];
        }
    return h;
}

static double gathered_pairs(void) {
    double sum = 0, count = 0;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d += 2, count++)
        sum += log_sigmoid_loss(s.beta * (gathered_h(&s.of[dp][a], d) -
                                          gathered_h(&s.of[dp][a], d + 1)));
    return sum / count;
}

static double pairs_of_replica(int64_t dp) {
    double sum = 0, count = 0, n;
    for (int64_t a = 0; a < s.micro; a++)
        for (int64_t d = 0; d < s.of[dp][a].docs; d += 2, count++)
            sum += log_sigmoid_loss(s.beta * (h_of(&s.of[dp][a], d, 0, s.sp, 1, &n) -
                                              h_of(&s.of[dp][a], d + 1, 0, s.sp, 1, &n)));
    return sum / count;
}

static void test_dpo(void) {
    make("dpo", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    expect_loss((pair_mean(1, 1, 0, 0, 1) + pair_mean(1, 1, 0, 1, 2) +
                 pair_mean(1, 1, 0, 2, 3)) /
                    3,
                "sigmoid_of_parts", "7 pairs give");
    expect_loss(pair_mean(1.0 / 3, 1, 0, 0, 3), "log_probs_averaged", "loss wrong");
    expect_loss(pair_mean(3, 1, 0, 0, 3), "log_probs_added", "loss wrong");
    expect_loss(pair_mean(-1, 1, 0, 0, 3), "pair_swapped", "loss wrong");
    expect_loss(pair_mean(1, 0, 0, 0, 3), "reference_missing", "loss wrong");
    expect_loss(pair_mean(1, 1, 1, 0, 3), "log_probs_by_length", "loss wrong");
    expect_loss(gathered_pairs(), "gathered_in_rank_order", "loss wrong");
    expect_loss((pairs_of_replica(0) + pairs_of_replica(1)) / 2, "mean_of_means",
                "groups are replicas");
    set_loss(right_loss());
    s.loss[2] = pair_mean(1, 1, 0, 2, 3);
    expect_named("log_probs_of_one_rank", "as rank 2 reports it");
    set_loss(right_loss());
    s.loss[2] = pairs_of_replica(0);
    expect_named("own_mean_alone", "as rank 2 reports it");
    s.source = FIRST;
    expect_loss(right_loss(), "side_tensor_not_split", "ref_logp: each rank takes the first n");
    s.source = CONTIGUOUS;
    expect_loss(right_loss(), "side_tensor_not_split", "as a contiguous split has it");
    s.source = SPLIT;
    set_loss(right_loss() * 1.0012);
    expect(0, "marginal", "loss marginal: got");
    test_end("objectives_dpo_marginal");
    expect_loss(right_loss() * 1.0017, "unknown", "no known mistake");
    expect_loss(NAN, "unknown", "got nan");
}

/* ---- RM ---- */

/* The value of a token of the row as this rule has it, for every document. */
typedef double (*score_rule)(const row *r, int64_t d);

static double rank_end(const row *r, int64_t d) {
    int64_t best = -1, at = 0;
    for (int64_t t = cu_seqlens[d]; t <= last_of(d); t++)
        if (best < 0 || s.member[t] > s.member[best] ||
            (s.member[t] == s.member[best] && s.local[t] >= s.local[best]))
            best = t;
    return (void)at, r->values[best];
}
static double first_token(const row *r, int64_t d) { return r->values[cu_seqlens[d]]; }
static double row_end_value(const row *r, int64_t d) {
    return (void)d, r->values[last_of(r->docs - 1)];
}
static double padded_row_end(const row *r, int64_t d) { return (void)d, r->values[TOKENS - 1]; }
static double padding(const row *r, int64_t d) {
    return r->values[d == r->docs - 1 ? TOKENS - 1 : last_of(d)];
}
static double gathered_value(const row *r, int64_t d) {
    int64_t at = 0;
    for (int64_t m = 0; m < s.sp; m++)
        for (int64_t i = 0; i < s.held[m]; i++)
            if (at++ == last_of(d)) return r->values[s.index[m][i]];
    return NAN;
}
static double over_sp(const row *r, int64_t d) { return r->values[last_of(d)] / (double)s.sp; }
static double times_sp(const row *r, int64_t d) { return r->values[last_of(d)] * (double)s.sp; }

/* Each rank's own last token of the document: their sum, and how many have one. */
static double ends_of_ranks(const row *r, int64_t d, double *count) {
    double sum = 0;
    *count = 0;
    for (int64_t m = 0; m < s.sp; m++) {
        int64_t best = -1;
        for (int64_t t = cu_seqlens[d]; t <= last_of(d); t++)
            if (s.member[t] == m && (best < 0 || s.local[t] > s.local[best])) best = t;
        if (best >= 0) sum += r->values[best];
        *count += best >= 0;
    }
    return sum;
}
static double parts_added(const row *r, int64_t d) {
    double count;
    return ends_of_ranks(r, d, &count);
}
static double parts_averaged(const row *r, int64_t d) {
    double count;
    return ends_of_ranks(r, d, &count) / (double)s.sp;
}
static double parts_mean(const row *r, int64_t d) {
    double count, sum = ends_of_ranks(r, d, &count);
    return sum / count;
}
static double next_document(const row *r, int64_t d) {
    return r->values[last_of((d + 1) % r->docs)];
}
static double previous_document(const row *r, int64_t d) {
    return r->values[last_of((d + r->docs - 1) % r->docs)];
}

static void set_scores(score_rule rule) {
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++)
        s.of[dp][a].scores[d] = rule(&s.of[dp][a], d);
    set_loss(right_loss());
}

static const struct {
    const char *name, *how;
    score_rule rule;
} score_table[] = {{"score_of_rank_end", "first at micro-batch 0, document", rank_end},
                   {"score_of_first_token", "rewards wrong", first_token},
                   {"score_of_row_end", "rewards wrong", row_end_value},
                   {"score_of_row_end", "of the row with its padding", padded_row_end},
                   {"score_of_padding", "rewards wrong", padding},
                   {"gathered_in_rank_order", "rewards wrong", gathered_value},
                   {"scores_averaged", "rewards wrong", over_sp},
                   {"scores_added", "rewards wrong", times_sp},
                   {"scores_of_parts", "added over ranks", parts_added},
                   {"scores_of_parts", "averaged over ranks", parts_averaged},
                   {"scores_of_parts", "averaged over the ranks that", parts_mean},
                   {"reward_on_wrong_document", "of the document behind it", next_document},
                   {"reward_on_wrong_document", "of the document before", previous_document}};

static double scores_of_parts_loss(int64_t from, int64_t to) {
    double sum = 0, count = 0;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d += 2, count++)
        for (int64_t m = from; m < to; m++) {
            const row *r = &s.of[dp][a];
            double c = s.member[last_of(d)] == m ? r->scores[d] : 0;
            double j = s.member[last_of(d + 1)] == m ? r->scores[d + 1] : 0;
            sum += log_sigmoid_loss(c - j) / (double)(to - from);
        }
    return sum / count;
}

static void test_rm(void) {
    for (size_t i = 0; i < sizeof score_table / sizeof *score_table; i++) {
        make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
        set_scores(score_table[i].rule);
        expect_named(score_table[i].name, score_table[i].how);
    }
    for (size_t i = 0; i < sizeof score_table / sizeof *score_table; i++) {
        make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
        set_scores(score_table[i].rule);
        s.without = "scores"; /* the loss alone tells */
        if (strcmp(score_table[i].name, "scores_of_parts") &&
            strcmp(score_table[i].name, "reward_on_wrong_document"))
            expect_named(score_table[i].name, "loss wrong");
    }
}

static void test_rm_loss(void) {
    make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    expect_loss(score_mean(-1), "pair_swapped", "7 pairs give");
    expect_loss(score_mean(1.0 / 3), "scores_averaged", "loss wrong");
    expect_loss(score_mean(3), "scores_added", "loss wrong");
    expect_loss(scores_of_parts_loss(0, 3), "sigmoid_of_parts", "loss wrong");
    set_loss(right_loss());
    s.loss[1] = scores_of_parts_loss(1, 2);
    expect_named("scores_of_one_rank", "as rank 1 reports it");
    s.without = "scores";
    expect_loss(right_loss() * 1.1, "unknown", "loss wrong");
    set_loss(right_loss());
    expect_right("from_values_alone", "rewards not judged");
    s.without = "values";
    expect_right("from_scores_alone", "rewards not judged");
    s.without = NULL;
    for (int64_t i = s.local[last_of(3)]; i + 1 < s.held[s.member[last_of(3)]]; i++)
        s.index[s.member[last_of(3)]][i] = s.index[s.member[last_of(3)]][i + 1];
    s.held[s.member[last_of(3)]]--;
    expect_named("token_lost", "rewards insufficient: what scores are made of is NaN");
    make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    s.of[0][0].scores[3] += 0.01 * s.of[0][0].scores[3];
    set_loss(right_loss());
    expect_named("unknown", "document 3, whose last token is at rank");
    s.of[0][0].scores[3] = NAN;
    expect_named("unknown", "rewards wrong");
}

/* ---- KTO ---- */

static double gathered_kto(void) {
    double sum = 0, count = 0;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++, count++) {
        double x = s.beta * (gathered_h(&s.of[dp][a], d) - z_of(dp, a, Z));
        sum += 1 - 1 / (1 + exp(s.of[dp][a].desirable[d] != 0 ? -x : x));
    }
    return sum / count;
}

static double kto_by_length(void) {
    double sum = 0, count = 0, n;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++, count++) {
        double h = h_of(&s.of[dp][a], d, 0, s.sp, 1, &n), x;
        x = s.beta * (h / (n > 0 ? n : 1) - z_of(dp, a, Z));
        sum += 1 - 1 / (1 + exp(s.of[dp][a].desirable[d] != 0 ? -x : x));
    }
    return sum / count;
}

static double kto_at(double z) {
    double sum = 0, count = 0, n;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++, count++) {
        double x = s.beta * (h_of(&s.of[dp][a], d, 0, s.sp, 1, &n) - z);
        sum += 1 - 1 / (1 + exp(s.of[dp][a].desirable[d] != 0 ? -x : x));
    }
    return sum / count;
}

/* Means of kl of unequal signs and sizes, by replica. */
static void set_kl(double first, double second) {
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++)
        s.of[dp][a].kl[d] = (dp ? second : first) + 0.5 * sin((double)(d + 3 * a));
    set_loss(right_loss());
}

/* A mistake that gives the right number within the tolerance is not named, though it is nearer
   to the number that is there. */
static void near_the_right_one(void) {
    double off = 0;
    make("kto", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    for (double z = 0; fabs(off) < 0.8e-3; z += 1e-4) {
        EACH_ROW(dp, a)
        for (int64_t d = 0; d < DOCS; d++) s.of[dp][a].kl[d] = z;
        off = kto_mean(1, 1, Z_NONE, 0, 0, 3) / right_loss() - 1;
    }
    set_loss(right_loss() * (1 + 1.5 * off));
    expect(0, "marginal", "loss marginal: got");
    test_end("objectives_kto_near");
}

static void test_kto(void) {
    make("kto", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    set_kl(4, -1.5);
    expect_loss(kto_mean(1, 1, Z_REPLICA, 0, 0, 3), "kl_of_one_replica", "14 documents give");
    expect_loss(kto_mean(1, 1, Z_CLAMPED, 0, 0, 3), "kl_clamped_before_mean", "loss wrong");
    expect_loss(kto_mean(1, 1, Z_MEANS, 0, 0, 3), "kl_mean_of_means", "loss wrong");
    expect_loss(kto_mean(1, 1, Z_NONE, 0, 0, 3), "kl_missing", "loss wrong");
    expect_loss(kto_mean(1, 1, Z_TIMES, 0, 0, 3), "kl_added", "loss wrong");
    expect_loss(kto_mean(1, 1, Z_OVER, 0, 0, 3), "kl_averaged", "loss wrong");
    expect_loss(kto_mean(1, 1, Z, 1, 0, 3), "desirable_swapped", "loss wrong");
    expect_loss(kto_mean(1, 0, Z, 0, 0, 3), "reference_missing", "loss wrong");
    expect_loss(kto_mean(1.0 / 3, 1, Z, 0, 0, 3), "log_probs_averaged", "loss wrong");
    expect_loss(kto_mean(3, 1, Z, 0, 0, 3), "log_probs_added", "loss wrong");
    expect_loss(kto_by_length(), "log_probs_by_length", "loss wrong");
    expect_loss(gathered_kto(), "gathered_in_rank_order", "loss wrong");
    expect_loss((kto_mean(1, 1, Z, 0, 0, 1) + kto_mean(1, 1, Z, 0, 1, 2) +
                 kto_mean(1, 1, Z, 0, 2, 3)) /
                    3,
                "sigmoid_of_parts", "loss wrong");
    set_loss(right_loss());
    s.loss[4] = kto_mean(1, 1, Z, 0, 1, 2);
    expect_named("log_probs_of_one_rank", "as rank 4 reports it");
}

static void test_kto_more(void) {
    make("kto", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    set_kl(4, -1.5);
    for (int64_t r = 0; r < 6; r++)
        s.loss[r] = kto_at((r % 3 == 0   ? 0.5
                            : r % 3 == 1 ? 0.3
                                         : 0.2) *
                           kl_mean_of_all());
    expect_named("kl_of_own_part", "which add up to");
    for (int64_t r = 0; r < 6; r++)
        s.loss[r] = kto_at((r % 3 ? 0.2 : 0.5) * kl_mean_of_all()); /* a tenth is missing */
    expect_named("unknown", "loss wrong");
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < DOCS; d++) s.of[dp][a].kl[d] = 0.2;
    for (int64_t r = 0; r < 6; r++) s.loss[r] = kto_at((r % 3 ? 0.2 : 0.5) * 0.2);
    expect(1, "wrong: unknown", "loss wrong"); /* so small that any z would do */
    test_end("objectives_kto_small_kl");
    set_kl(4, -1.5);
    s.source = FIRST;
    expect_loss(right_loss(), "side_tensor_not_split", "ref_logp: each rank takes the first n");
    s.source = SPLIT;
    expect_loss(right_loss() * 1.1, "unknown", "loss wrong");
    set_loss(right_loss() * 0.9988);
    expect(0, "marginal", "loss marginal: got");
    test_end("objectives_kto_marginal");
    set_kl(1, -1.2);
    expect_loss(kto_mean(1, 1, Z_MEANS, 0, 0, 3), "one of kl_mean_of_means, kl_missing",
                "loss wrong");
    set_kl(-3, -1.5);
    expect_loss(kto_mean(1, 1, Z_FREE, 0, 0, 3), "kl_not_clamped", "loss wrong");
    set_loss(right_loss());
    expect_right("without_kl", "so not excluded: kl_of_one_replica, kl_clamped_before_mean");
    make("kto", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 2);
    set_kl(4, -1.5);
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < DOCS && a; d++) s.of[dp][a].kl[d] *= 2;
    expect_loss(kto_mean(1, 1, Z_REPLICA, 0, 0, 3), "kl_of_one_replica", "26 documents give");
    near_the_right_one();
}

/* ---- PPO's loss ---- */

static void test_policy(const char *reduction) {
    static const struct {
        int way;
        const char *name, *how;
    } table[] = {{INVERTED, "ratio_inverted", "loss wrong"},
                 {WRONG_SIDE, "clip_wrong_side", "loss wrong"},
                 {NO_CLIP, "clip_missing", "loss wrong"},
                 {NO_KL, "kl_missing", "loss wrong"},
                 {K1, "kl_estimator", "k1, logp - ref_logp"},
                 {K2, "kl_estimator", "k2,"},
                 {K3_TURNED, "kl_estimator", "with its sign turned"}};
    begin("ppo", 3, strcmp(reduction, "token") ? 3 : 2, 1);
    s.reduction = reduction;
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        expect_loss(mean_loss(table[i].way), table[i].name, table[i].how);
    for (s.source = FIRST; s.source <= CONTIGUOUS; s.source++) {
        expect_loss(mean_loss(SIDE_OLD), "side_tensor_not_split", "old_logp: ");
        expect_loss(mean_loss(SIDE_REFERENCE), "side_tensor_not_split", "ref_logp: ");
        expect_loss(mean_loss(SIDE_ADVANTAGES), "side_tensor_not_split", "advantages: ");
    }
    s.source = SPLIT;
    expect_loss(mean_loss(RIGHT) * 1.1 + 0.05, "unknown", "loss wrong");
    expect_loss(NAN, by_sequence() ? "nan_of_an_empty_rank" : "unknown", "got nan");
}

/* ---- PPO's advantages ---- */

static void test_group(const char *how) {
    begin("ppo", 3, 2, 2);
    s.advantage = how;
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
    expect_right(how, "rewards right: what documents' rewards and groups give");
    set_advantages(in_replica, 0);
    set_loss(right_loss());
    expect_named("baseline_of_one_replica", "first at rank 0, local row 2, token 2, document");
    set_advantages(in_row, 0);
    set_loss(right_loss());
    expect_named("baseline_of_one_replica", "of one micro-batch of it");
    set_advantages(in_batch, 0);
    set_loss(right_loss());
    expect_named("baseline_of_batch", "rewards wrong");
}

/* A document's advantage for all of its tokens, `far` documents on in the row. */
static void shift_advantages(int64_t far) {
    EACH_ROW(dp, a) {
        row *r = &s.of[dp][a];
        double of[DOCS];
        for (int64_t d = 0; d < r->docs; d++) of[d] = r->advantages[cu_seqlens[d]];
        for (int64_t t = 0; t < cu_seqlens[r->docs]; t++)
            r->advantages[t] = of[(document_of(r, t) + far + r->docs) % r->docs];
    }
    set_loss(right_loss());
}

static void shift_rewards(int64_t far) {
    double old[DP][MICRO][DOCS];
    EACH_ROW(dp, a) {
        row *r = &s.of[dp][a];
        memcpy(old[dp][a], r->rewards, sizeof r->rewards);
        for (int64_t d = 0; d < r->docs; d++)
            r->rewards[d] = old[dp][a][(d + far + r->docs) % r->docs];
    }
    set_advantages(in_group, 0);
    EACH_ROW(dp, a) memcpy(s.of[dp][a].rewards, old[dp][a], sizeof old[dp][a]);
    set_loss(right_loss());
}

/* Whitens advantages over supervised tokens of ranks or replicas, or of all. */
enum { ALL, RANK, RANK_MICRO, REPLICA };
static int64_t white_group(int how, int64_t dp, int64_t a, int64_t t) {
    int64_t rank = dp * s.sp + s.member[t];
    return how == ALL ? 0 : how == RANK ? rank : how == REPLICA ? dp : rank * s.micro + a;
}

static void whiten(int how, int unbiased) {
    static double sum[RANKS * MICRO], squares[RANKS * MICRO], n[RANKS * MICRO];
    memset(sum, 0, sizeof sum);
    memset(squares, 0, sizeof squares);
    memset(n, 0, sizeof n);
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        double x = s.of[dp][a].advantages[t];
        int64_t g = white_group(how, dp, a, t);
        if (s.of[dp][a].labels[t] == NONE) continue;
        sum[g] += x;
        squares[g] += x * x;
        n[g]++;
    }
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        int64_t g = white_group(how, dp, a, t);
        double mean = sum[g] / n[g];
        double variance = (squares[g] - n[g] * mean * mean) / (n[g] - unbiased);
        s.of[dp][a].advantages[t] -= mean;
        if (variance > 1e-9) s.of[dp][a].advantages[t] /= sqrt(variance);
    }
    set_loss(right_loss());
}

static void make_ppo(const char *how) {
    begin("ppo", 3, 2, 2);
    s.advantage = how;
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
}

static void test_whitening(void) {
    static const int hows[] = {RANK, RANK_MICRO, REPLICA};
    static const char *const texts[] = {"over the tokens of each rank",
                                        "over the tokens of each rank's micro-batch",
                                        "over the tokens of each replica"};
    for (int i = 0; i < 6; i++) {
        make_ppo(i % 2 ? "group" : "group_mean");
        whiten(hows[i / 2], i % 2);
        expect_named("whitened_by_rank", texts[i / 2]);
    }
    make_ppo("group_mean");
    whiten(ALL, 0);
    expect_right("whitened", "no mistake of sequence parallelism");
}

static void test_advantages(void) {
    test_group("group");
    test_group("group_mean");
    make_ppo("group");
    set_advantages(in_group, 1);
    set_loss(right_loss());
    expect_right("unbiased", "with the unbiased deviation (n - 1): no mistake");
    set_advantages(in_replica, 1);
    set_loss(right_loss());
    expect_named("baseline_of_one_replica", "with the unbiased deviation");
    s.advantage = "group_mean";
    set_advantages(in_group, 0);
    set_loss(right_loss());
    s.advantage = "group";
    expect_named("std_missing", "rewards wrong");
}

static void test_wrong_documents(void) {
    for (int64_t far = -1; far <= 1; far += 2) {
        make_ppo("group");
        shift_advantages(far);
        expect_named("reward_on_wrong_document", "the advantage is that of the document");
        make_ppo("group");
        shift_rewards(far);
        expect_named("reward_on_wrong_document", "the reward is that of the document");
    }
}

static void test_unsplit_advantages(void) {
    for (int source = FIRST; source <= CONTIGUOUS; source++) {
        make_ppo("group");
        s.side = "advantages";
        s.source = source;
        EACH_ROW(dp, a)
        for (int64_t t = 0; t < TOKENS; t++) {
            row *r = &s.of[dp][a];
            if (t >= cu_seqlens[r->docs]) r->advantages[t] = 7; /* padding: anything */
            else if (r->labels[t] == NONE) r->advantages[t] = 0; /* prompts: masked */
        }
        set_loss(mean_loss(SIDE_ADVANTAGES));
        expect_named("side_tensor_not_split",
                     source == FIRST ? "advantages: each rank takes the first n of the row"
                                     : "advantages: each rank takes what a contiguous split");
    }
    begin("ppo", 2, 1, 1); /* all 0, and contiguous shares of prompts would be 0, too */
    deal(SEQPAR_LAYOUT_CONTIGUOUS);
    fill();
    for (int64_t t = 0; t < TOKENS; t++) {
        if (t < s.held[0]) s.of[0][0].labels[t] = NONE;
        s.of[0][0].advantages[t] = 0;
    }
    set_loss(right_loss());
    expect_named("unknown", "rewards wrong: first at rank 1");
}

static void test_odd_advantages(void) {
    begin("ppo", 3, 1, 1);
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
    expect_unsaid("of_one_row", "baseline_of_one_replica");
    begin("ppo", 3, 2, 1);
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < DOCS; d++) s.of[dp][a].groups[d] += 10 * dp;
    set_advantages(in_group, 0);
    set_loss(right_loss());
    expect_right("groups_of_replicas", "so not excluded: baseline_of_one_replica");
    make_ppo("group");
    s.of[1][0].advantages[31] += 0.3;
    set_loss(right_loss());
    expect_named("unknown", "token 31, document 2 of micro-batch 0: advantage");
    s.of[1][0].advantages[31] = NAN;
    set_loss(1);
    expect_named("unknown", "rewards wrong");
}

/* ---- side tensors that tell of themselves ---- */

/* As in the first step: policy, reference and the policy at sampling time are one. */
static void make_first_step(const char *objective) {
    begin(objective, 3, 2, 1);
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
    EACH_ROW(dp, a) {
        row *r = &s.of[dp][a];
        memcpy(r->ref_logp, r->logp, sizeof r->logp);
        memcpy(r->old_logp, r->logp, sizeof r->logp);
        memset(r->kl, 0, sizeof r->kl);
        for (int64_t t = 0; t < TOKENS; t++)
            if (r->labels[t] == NONE) r->logp[t] = -50; /* nobody trains it */
    }
    set_loss(right_loss());
}

/* The dump's own ref_logp or old_logp are not split, and the loss is made of them. */
static void unsplit(const char *what, int source) {
    s.source = source;
    s.side = what;
    if (is("ppo")) set_loss(mean_loss(!strcmp(what, "ref_logp") ? SIDE_REFERENCE : SIDE_OLD));
    if (is("dpo") || is("kto")) set_loss(right_loss());
}

static void test_sides(void) {
    static const char *const objectives[] = {"dpo", "kto", "ppo"};
    for (int i = 0; i < 3; i++) {
        make(objectives[i], SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
        unsplit("ref_logp", FIRST);
        expect_named("side_tensor_not_split", "ref_logp: ranks have the same");
        make_first_step(objectives[i]);
        unsplit("ref_logp", CONTIGUOUS);
        expect_named("side_tensor_not_split", "what a contiguous split would give it");
        if (i < 2) continue;
        make(objectives[i], SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
        unsplit("old_logp", FIRST);
        expect_named("side_tensor_not_split", "old_logp: ranks have the same");
        make_first_step(objectives[i]);
        unsplit("old_logp", CONTIGUOUS);
        expect_named("side_tensor_not_split", "old_logp: it is logp of token");
    }
    /* one rank alone holds the row in an order that is not its own */
    make_first_step("dpo");
    s.sp = s.world = 1;
    s.dp = 1;
    s.held[0] = TOKENS;
    for (int32_t t = 0; t < TOKENS; t++) s.index[0][t] = TOKENS - 1 - t;
    note_places();
    unsplit("ref_logp", FIRST);
    expect_named("side_tensor_not_split", "each rank takes the first n of the row");
}

/* ---- right steps that look odd ---- */

/* Every rank holds the tokens that `keep` is for; the first member's are all the others'. */
static void deal_by(int64_t (*member)(int64_t t)) {
    memset(s.held, 0, sizeof s.held);
    for (int64_t t = 0; t < TOKENS; t++) {
        int64_t m = member(t);
        s.index[m][s.held[m]++] = (int32_t)t;
    }
    fill();
}
static int64_t last_is_empty(int64_t t) { return t % 5 == 0; }
static int64_t documents_whole(int64_t t) {
    int64_t d = 0;
    while (d < DOCS && cu_seqlens[d + 1] <= t) d++;
    return d % 3;
}

/* Right, though ranks have the same ref_logp: for all, for equal texts, or by chance. */
static void test_sides_alike(void) {
    int64_t half;
    make("dpo", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) s.of[dp][a].ref_logp[t] = -3;
    set_loss(right_loss());
    expect_right("reference_of_one_number", "loss right: got");
    make("dpo", SEQPAR_LAYOUT_CONTIGUOUS, 2, 2, 1);
    half = s.held[0];
    EACH_ROW(dp, a)
    for (int64_t t = half; t < TOKENS; t++) {
        s.of[dp][a].ref_logp[t] = s.of[dp][a].ref_logp[t - half];
        s.of[dp][a].logp[t] = s.of[dp][a].logp[t - half];
    }
    set_loss(right_loss());
    expect_right("equal_texts", "loss right: got");
    make("dpo", SEQPAR_LAYOUT_CONTIGUOUS, 2, 2, 1);
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        row *r = &s.of[dp][a];
        if (t % half != 5 && t % half != 9) r->labels[t] = NONE;
        if (t >= half) r->ref_logp[t] = r->ref_logp[t - half];
    }
    set_loss(right_loss());
    s.without = "ids";
    expect_right("two_by_chance", "loss right: got");
}

static void each_objective(void (*step)(const char *objective, const char *reduction)) {
    static const char *const all[][2] = {{"sft", "sequence"}, {"rm", "token"},
                                         {"kto", "token"},    {"ppo", "token"},
                                         {"ppo", "sequence"}, {"dpo", "token"}};
    for (int i = 0; i < 6; i++) step(all[i][0], all[i][1]);
}

static void odd_but_right(const char *objective, const char *reduction) {
    static const seqpar_safetensors_dtype types[] = {
        SEQPAR_SAFETENSORS_F32, SEQPAR_SAFETENSORS_F16, SEQPAR_SAFETENSORS_BF16};
    for (int i = 0; i < 3; i++) {
        begin(objective, 3, 2, 2);
        s.reduction = reduction;
        deal(SEQPAR_LAYOUT_STRIPE);
        fill();
        s.dtype = s.loss_dtype = types[i];
        expect(0, "right", i ? "rounding to 16 bits" : "loss right: got");
        test_end("objectives_%s_%s_of_%s", objective, reduction,
                 seqpar_safetensors_dtype_name(types[i]));
    }
    begin(objective, 3, 2, 1);
    s.reduction = reduction;
    deal_by(last_is_empty);
    expect(0, "right", "loss right: got");
    test_end("objectives_%s_%s_of_an_empty_rank", objective, reduction);
    s.empty = 2;
    expect(0, "right", "loss right: got");
    test_end("objectives_%s_%s_with_empty_documents", objective, reduction);
    s.empty = 0;
    EACH_ROW(dp, a) { /* what nobody trains may be anything */
        row *r = &s.of[dp][a];
        for (int64_t t = 0; t < TOKENS; t++)
            if (r->labels[t] == NONE)
                r->logp[t] = r->ref_logp[t] = r->old_logp[t] = r->advantages[t] = NAN;
    }
    expect(0, "right", "loss right: got");
    test_end("objectives_%s_%s_of_untrained_nan", objective, reduction);
    EACH_ROW(dp, a) /* one document has no answer */
    for (int64_t t = cu_seqlens[3]; t < cu_seqlens[4]; t++) s.of[dp][a].labels[t] = NONE;
    set_loss(right_loss());
    expect(0, "right", "loss right: got");
    test_end("objectives_%s_%s_without_an_answer", objective, reduction);
}

static void test_forms(void) {
    static const char *const objectives[] = {"dpo", "sft", "kto", "ppo"};
    for (int i = 0; i < 4; i++) {
        begin(objectives[i], 3, 2, 1);
        s.reduction = is("sft") ? "sequence" : "token";
        s.padded = i < 2;
        s.whole = i - 1;
        deal(SEQPAR_LAYOUT_ZIGZAG);
        fill();
        EACH_ROW(dp, a)
        for (int64_t d = 0; d < DOCS; d++)
            s.of[dp][a].rewards[d] = floor(s.of[dp][a].rewards[d] * 2);
        set_advantages(in_group, 0);
        set_loss(right_loss());
        expect_right(i < 2 ? "padding_is_a_document" : "integers", "loss right: got");
    }
}

/* Numbers are rounded as they are written, and the loss was made of what they were before. */
static void test_rounding(void) {
    static const char *const objectives[] = {"sft", "dpo", "kto", "ppo"};
    static const char *const rough[][2] = {{"rm", "scores"}, {"rm", "values"},
                                           {"ppo", "advantages"}, {"ppo", "rewards"}};
    for (int i = 0; i < 4; i++) {
        make(objectives[i], SEQPAR_LAYOUT_STRIPE, 3, 2, 1);
        EACH_ROW(dp, a)
        for (int64_t t = 0; t < TOKENS; t++) {
            s.of[dp][a].logp[t] -= 9;
            s.of[dp][a].ref_logp[t] -= 9;
            s.of[dp][a].old_logp[t] -= 9;
        }
        set_loss(right_loss());
        s.dtype = SEQPAR_SAFETENSORS_BF16;
        write_scene();
        test_expect(ask(said, sizeof said) != 1, "'%.600s'", said);
        test_end("objectives_%s_of_large_numbers", objectives[i]);
    }
    for (int i = 0; i < 4; i++) {
        make(rough[i][0], SEQPAR_LAYOUT_STRIPE, 3, 2, 1);
        s.rough = rough[i][1];
        for (int64_t d = 0; d < DOCS; d++) s.of[0][0].rewards[d] += 7.031;
        set_advantages(in_group, 0);
        set_loss(right_loss());
        expect_right(rough[i][1], "rewards right: ");
    }
    for (int i = 0; i < 12; i++) { /* the loss alone is rounded */
        begin("rm", 3, 2, 1);
        test_state += (uint64_t)i;
        deal(SEQPAR_LAYOUT_ZIGZAG);
        fill();
        s.loss_dtype = SEQPAR_SAFETENSORS_BF16;
        expect_right("loss_of_BF16", "loss right: got");
    }
}

static double kto_of_trained(void) {
    double sum = 0, count = 0, n;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++) {
        double h = h_of(&s.of[dp][a], d, 0, s.sp, 1, &n), x = s.beta * (h - z_of(dp, a, Z));
        if (n == 0) continue;
        sum += 1 - 1 / (1 + exp(s.of[dp][a].desirable[d] != 0 ? -x : x));
        count++;
    }
    return sum / count;
}

/* Means and deviations without the documents that have no token supervised. */
static void leave_out(void) {
    EACH_ROW(dp, a)
    for (int64_t d = 1; d < s.of[dp][a].docs; d += 2) {
        if (d == 3)
            for (int64_t t = cu_seqlens[d]; t < cu_seqlens[d + 1]; t++)
                s.of[dp][a].labels[t] = NONE;
        if (d <= 3) s.of[dp][a].groups[d] += 1000; /* in no other's, while they are made */
    }
    set_advantages(in_group, 0);
    EACH_ROW(dp, a)
    for (int64_t d = 1; d <= 3; d += 2) s.of[dp][a].groups[d] -= 1000;
    set_loss(right_loss());
}

static void leave_one_out(void) {
    double mean, pop, unbiased;
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < cu_seqlens[s.of[dp][a].docs]; t++) {
        row *r = &s.of[dp][a];
        int64_t d = document_of(r, t);
        double n;
        moments(in_group, dp, a, d, &mean, &pop, &unbiased);
        n = unbiased > 0 ? 1 / (1 - pop * pop / unbiased / unbiased) : 1;
        r->advantages[t] = (r->rewards[d] - mean) * n / (n - 1);
    }
    set_loss(right_loss());
}

static void test_accepted(void) {
    make("kto", SEQPAR_LAYOUT_STRIPE, 3, 2, 1);
    EACH_ROW(dp, a)
    for (int64_t t = cu_seqlens[3]; t < cu_seqlens[4]; t++) s.of[dp][a].labels[t] = NONE;
    set_loss(kto_of_trained());
    expect_right("of_trained_documents", "without a supervised token are left out: no mistake");
    make_ppo("group");
    leave_out();
    expect_right("of_trained_documents", "without a supervised token are left out: no mistake");
    make_ppo("group_mean");
    leave_one_out();
    expect_right("leave_one_out", "the mean of the others: no mistake");
    make_ppo("group");
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t += 9) s.of[dp][a].ref_logp[t] = s.of[dp][a].logp[t] + 4;
    set_loss(mean_loss(K3_CUT));
    expect_right("kl_cut", "cut at 10, as verl and OpenRLHF do: no mistake");
    make_ppo("group"); /* the sum of all is about 0: what rounding makes is no mistake */
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        s.of[dp][a].old_logp[t] = s.of[dp][a].ref_logp[t] = s.of[dp][a].logp[t];
        s.of[dp][a].advantages[t] = s.of[dp][a].ids[t] % 2 ? 1 : -1;
    }
    s.advantage = "given";
    set_loss(right_loss() + 1e-5);
    expect_right("about_0", "so not excluded: ratio_inverted, clip_wrong_side, clip_missing");
}

/* ---- what shows nothing ---- */

static void expect_nothing(const char *name, const char *text) {
    expect(4, "insufficient", text);
    test_end("objectives_%s_%s", s.objective, name);
}

static void test_shows_nothing(void) {
    make_first_step("dpo");
    expect_nothing("first_step", "policy and reference are so close");
    set_loss(0.71);
    expect_named("unknown", "so the loss should be ln 2");
    make_first_step("kto");
    expect_nothing("first_step", "policy and reference are close");
    make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    EACH_ROW(dp, a) {
        memset(s.of[dp][a].values, 0, sizeof s.of[dp][a].values);
        memset(s.of[dp][a].scores, 0, sizeof s.of[dp][a].scores);
    }
    set_loss(log(2));
    expect_nothing("of_zeros", "all values are the same");
    s.without = "values";
    expect_nothing("scores_of_zeros", "the scores of a pair are so close");
    begin("sft", 3, 2, 1);
    s.reduction = "sequence";
    deal_by(documents_whole);
    expect_nothing("documents_whole", "by each rank's own counts are the same here");
}

static void test_rewards_show_nothing(void) {
    make_ppo("group");
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < DOCS; d++) s.of[dp][a].rewards[d] = 0.7;
    set_advantages(in_group, 0);
    set_loss(right_loss());
    expect_nothing("equal_rewards", "rewards are so alike");
    make_ppo("group");
    s.of[0][1].rewards[2] = INFINITY;
    expect_nothing("rewards_of_inf", "what advantages are made of is NaN or Inf already");
    make("kto", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    s.of[0][0].kl[2] = NAN;
    set_loss(NAN);
    expect_nothing("kl_of_nan", "NaN or Inf already");
    make_ppo("group");
    s.of[0][0].old_logp[2] = NAN;
    set_loss(NAN);
    expect_nothing("old_logp_of_nan", "NaN or Inf already");
    begin("ppo", 1, 1, 1);
    deal(SEQPAR_LAYOUT_CONTIGUOUS);
    fill();
    EACH_ROW(dp, a) {
        memset(s.of[dp][a].advantages, 0, sizeof s.of[dp][a].advantages);
        memcpy(s.of[dp][a].ref_logp, s.of[dp][a].logp, sizeof s.of[dp][a].logp);
    }
    s.advantage = "given";
    set_loss(right_loss());
    expect_nothing("of_zeros", "all known mistakes give the same here");
}

static void test_not_judged(void) {
    static const char *const lacks[][2] = {{"dpo", "ref_logp"},    {"kto", "kl"},
                                           {"kto", "desirable"},   {"ppo", "old_logp"},
                                           {"ppo", "ref_logp"},    {"ppo", "advantages"},
                                           {"sft", "cu_seqlens"},  {"rm", "loss"},
                                           {"ppo", "rewards"},     {"ppo", "groups"}};
    for (int i = 0; i < 10; i++) {
        int reward = i >= 8;
        begin(lacks[i][0], 3, 2, 1);
        s.reduction = is("sft") ? "sequence" : "token";
        deal(SEQPAR_LAYOUT_CONTIGUOUS);
        fill();
        s.without = lacks[i][1];
        expect(0, "right", reward ? "rewards not judged" : "loss not judged");
        test_end("objectives_%s_without_%s", lacks[i][0], lacks[i][1]);
    }
    make("kto", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    s.without = "kl";
    s.without_below = 3; /* by one replica's ranks alone */
    expect_right("without_kl_in_a_replica", "loss not judged");
    make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    s.without = "scores";
    s.without_below = 3;
    expect_right("scores_of_one_replica", "rewards not judged");
    s.without_values = 1; /* the other has scores alone */
    expect_right("scores_or_values", "loss not judged");
    make_ppo("given");
    expect_right("advantages_given", "rewards not judged");
    make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    EACH_ROW(dp, a) s.of[dp][a].docs--;
    s.without = "labels";
    expect_nothing("odd", "a document without a partner");
}

/* ---- files ---- */

static void expect_refused(const char *odd, const char *sentence) {
    int code;
    s.odd = odd;
    write_scene();
    code = ask(said, sizeof said);
    test_expect(code == 3 && strstr(said, sentence), "exit code %d, said '%.400s', not '%s'",
                code, said, sentence);
    test_end("objectives_refused_%s_%s", s.objective, odd ? odd : s.without);
}

static void test_files(void) {
    static const char *const of_tokens[] = {"ref_logp", "old_logp", "advantages"};
    char text[200];
    make_ppo("group");
    for (int i = 0; i < 3; i++) {
        snprintf(text, sizeof text, "tensor 0.%s has %lld elements and 0.index %lld",
                 of_tokens[i], (long long)s.held[1] - 1, (long long)s.held[1]);
        expect_refused(of_tokens[i], text);
    }
    expect_refused("rewards", "0.rewards has 7 elements and its row 8 documents");
    expect_refused("rewards differ", "0.rewards differs from another rank's of the sequence at "
                                     "document 1; write what is used");
    expect_refused("groups differ", "0.groups differs from another rank's");
    s.without = "cu_seqlens";
    expect_refused(NULL, "one a document, and there is no cu_seqlens");
    make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    expect_refused("values", "tensor 0.values has");
    expect_refused("scores", "0.scores has 7 elements and its row 8 documents");
    expect_refused("scores more", "0.scores has 9 elements and its row 8 documents");
    expect_refused("scores differ", "0.scores differs from another rank's");
    make("kto", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    expect_refused("kl", "0.kl has 7 elements and its row 8 documents");
    expect_refused("kl differ", "0.kl differs from another rank's");
    s.of[0][0].desirable[3] = 2;
    s.odd = NULL;
    s.without = "none";
    expect_refused(NULL, "0.desirable has 2 at document 3; write 1 or 0");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    each_objective(test_right);
    test_tokens("sft");
    test_tokens("ppo");
    test_zero("sft");
    test_zero("ppo");
    test_sequences("sft");
    test_sequences("ppo");
    test_dpo();
    test_rm();
    test_rm_loss();
    test_kto();
    test_kto_more();
    test_policy("token");
    test_policy("sequence");
    test_advantages();
    test_wrong_documents();
    test_unsplit_advantages();
    test_odd_advantages();
    test_whitening();
    test_sides();
    each_objective(odd_but_right);
    test_forms();
    test_rounding();
    test_sides_alike();
    test_accepted();
    test_shows_nothing();
    test_rewards_show_nothing();
    test_not_judged();
    test_files();
    return test_summary();
}
