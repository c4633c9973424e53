/* SPDX-License-Identifier: MIT OR Unlicense */
/* dump_support.h - dumps of RM, KTO, PPO, DPO and SFT for the suites of
   `seqpar-verify ver`: right steps in every layout, and what the oracle says of them. Losses
   of mistakes are computed here a second time, token by token. FOLDER: where dumps are written,
   another one in each suite. */
#ifndef DUMP_SUPPORT_H
#define DUMP_SUPPORT_H
#include "dump_page.h"

enum { TOKENS = 113, DOCS = 8, SP = 4, DP = 3, MICRO = 2, RANKS = SP * DP, NONE = -100 };
enum { MORE = 6 };
#ifndef SEED_OF_SCENES
#define SEED_OF_SCENES 3
#endif
static const int64_t cu_seqlens[DOCS + 1] = {0, 23, 24, 47, 53, 72, 79, 98, 107};

typedef struct row {
    int64_t docs; /* what is behind the last one is padding */
    int32_t ids[TOKENS], labels[TOKENS];
    double logp[TOKENS], ref_logp[TOKENS], old_logp[TOKENS], advantages[TOKENS], values[TOKENS];
    double returns[TOKENS], token_rewards[TOKENS], old_values[TOKENS], weights[TOKENS];
    double mean_logp[TOKENS], logits_lse[TOKENS], entropy[TOKENS];
    double scores[DOCS], rewards[DOCS], desirable[DOCS], kl[DOCS], margins[DOCS];
    int64_t groups[DOCS];
} row;

/* Which numbers of a side tensor (ref_logp, ...) a rank takes: those of its tokens, the row's
   first ones, or a contiguous slice. */
enum { SPLIT, FIRST, CONTIGUOUS };
typedef struct scene {
    int64_t sp, dp, micro, world;
    row of[DP][MICRO];
    int32_t index[SP][TOKENS], member[TOKENS], local[TOKENS]; /* the same for every row */
    int64_t held[SP];
    const char *objective, *reduction, *advantage;
    double desirable_weight, undesirable_weight; /* of KTO */
    double beta, kl_coef, clip_value,
        constant; /* divides the sum of losses in the reduction "constant" */
    double loss[RANKS];
    const char *key[MORE]; /* metadata beside those of every scene */
    char value[MORE][32];
    int keys;
    int with_margins, with_values, with_token_rewards; /* tensors that not every scene has */
    int with_weights;
    double dual_clip, cispo;           /* 0: none */
    int64_t used_docs, used[DOCS + 1]; /* cu_seqlens, beside boundaries; 0 documents: not */
    int kl_ratio;                      /* the KL term is multiplied by the ratio */
    int grpo; /* the metadata call objective ppo so, and leave out the rest */
    double smoothing, z_loss, entropy_coef;
    seqpar_safetensors_dtype dtype, loss_dtype; /* of numbers */
    const char *without, *side;                 /* a tensor not written; one split by source */
    int64_t without_below;                      /* only lower ranks lack it; 0: all do */
    int without_values;                         /* 1: the other ranks lack "values" */
    const char *rough;                          /* a tensor written as BF16 */
    int source;
    int64_t empty;   /* this many empty documents follow the others */
    int padded;      /* padding is a document of its own */
    int no_row;      /* the last replica's last micro-batch has no token (leave_out_row) */
    int whole;       /* rewards and desirable: 0: dtype, 1: I64, else U8 */
    const char *odd; /* what is wrong with rank 1's file */
} scene;
static scene s;

/* ---- a right step ---- */

static inline int64_t document_of(const row *r, int64_t t) {
    int64_t d = 0;
    while (d < r->docs && cu_seqlens[d + 1] <= t) d++;
    return d;
}

static inline int64_t last_of(int64_t d) { return cu_seqlens[d + 1] - 1; }

static inline void deal(int layout) {
    memset(s.held, 0, sizeof s.held);
    for (int32_t t = 0; t < TOKENS; t++) {
        int64_t r = deal_rank(layout, s.sp, TOKENS, cu_seqlens, DOCS, t);
        s.index[r][s.held[r]++] = t;
    }
}

static inline void note_places(void) {
    for (int64_t r = 0; r < s.sp; r++)
        for (int64_t i = 0; i < s.held[r]; i++) {
            s.member[s.index[r][i]] = (int32_t)r;
            s.local[s.index[r][i]] = (int32_t)i;
        }
}

static inline void fill_row(row *r, int64_t number) {
    static const int64_t docs[DP * MICRO] = {8, 6, 4, 8, 6, 8};
    r->docs = docs[number];
    for (int64_t t = 0; t < TOKENS; t++) {
        int64_t d = document_of(r, t);
        r->ids[t] = (int32_t)((number * TOKENS + t) * 7 % 2003);
        r->labels[t] = (int32_t)((number * TOKENS + t + 1) * 7 % 2003);
        if (d == r->docs || t == last_of(d) || t - cu_seqlens[d] < 2) r->labels[t] = NONE;
        r->logp[t] = -0.2 - 0.3 * s.member[t] - 0.2 * (double)d - 0.1 * fabs(test_normal());
        r->ref_logp[t] = r->logp[t] + 0.8 * test_normal() +
                         (d % 3 ? 0.1 : -0.1) * (1 + s.member[t]);
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

/* Does the reward of a document at (dp, a) in `group` count in the mean for a document at
   (own_dp, own_a) in own_group? */
typedef int (*scope)(int64_t dp, int64_t a, int64_t group, int64_t own_dp, int64_t own_a,
                     int64_t own_group);
static inline int in_group(int64_t dp, int64_t a, int64_t g, int64_t own_dp, int64_t own_a,
                           int64_t own_g) {
    return (void)dp, (void)a, (void)own_dp, (void)own_a, g == own_g;
}
static inline int in_replica(int64_t dp, int64_t a, int64_t g, int64_t own_dp, int64_t own_a,
                             int64_t own_g) {
    return (void)a, (void)own_a, g == own_g && dp == own_dp;
}
static inline int in_row(int64_t dp, int64_t a, int64_t g, int64_t own_dp, int64_t own_a,
                         int64_t own_g) {
    return g == own_g && dp == own_dp && a == own_a;
}
static inline int in_batch(int64_t dp, int64_t a, int64_t g, int64_t own_dp, int64_t own_a,
                           int64_t own_g) {
    return (void)dp, (void)a, (void)g, (void)own_dp, (void)own_a, (void)own_g, 1;
}

/* Mean and standard deviations of the rewards that `in` accepts for document (dp, a, d). */
static inline void moments(scope in, int64_t dp, int64_t a, int64_t d, double *mean,
                           double *pop, double *unbiased) {
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

/* The reward minus the mean of the other rewards that `in` accepts; 0 if there are none. */
static inline double others(scope in, int64_t dp, int64_t a, int64_t d) {
    double n = 0, sum = 0, x = s.of[dp][a].rewards[d];
    EACH_ROW(j, b)
    for (int64_t e = 0; e < s.of[j][b].docs; e++)
        if (in(j, b, s.of[j][b].groups[e], dp, a, s.of[dp][a].groups[d]) &&
            !(j == dp && b == a && e == d)) {
            n++;
            sum += s.of[j][b].rewards[e];
        }
    return n > 0 ? x - sum / n : 0;
}

static inline double advantage(scope in, int64_t dp, int64_t a, int64_t d, int unbiased) {
    double mean, pop, sample, x = s.of[dp][a].rewards[d];
    moments(in, dp, a, d, &mean, &pop, &sample);
    if (!strcmp(s.advantage, "group_mean")) return x - mean;
    if (!strcmp(s.advantage, "rloo")) return others(in, dp, a, d);
    return (x - mean) / ((unbiased ? sample : pop) + 1e-4);
}

static inline void set_advantages(scope in, int unbiased) {
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        row *r = &s.of[dp][a];
        int64_t d = document_of(r, t);
        r->advantages[t] = d < r->docs ? advantage(in, dp, a, d, unbiased) : 0;
    }
}

static inline double right_loss(void);
static inline void say(const char *key, double value) {
    s.key[s.keys] = key;
    snprintf(s.value[s.keys++], sizeof s.value[0], "%.17g", value);
}
static inline void say_word(const char *key, const char *word) {
    s.key[s.keys] = key;
    snprintf(s.value[s.keys++], sizeof s.value[0], "%s", word);
}
static inline void set_loss(double loss) {
    for (int64_t r = 0; r < s.world; r++) s.loss[r] = loss;
}

/* Resets the random numbers, so that a scene does not depend on those before it. The numbers
   are such that no two mistakes give the same loss. */
static inline void begin(const char *objective, int64_t sp, int64_t dp, int64_t micro) {
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
    s.desirable_weight = s.undesirable_weight = 1;
    s.kl_coef = 0.15;
    s.constant = 700.5;
    s.dtype = s.loss_dtype = SEQPAR_SAFETENSORS_F64;
}

static inline void fill(void) {
    note_places();
    EACH_ROW(dp, a) fill_row(&s.of[dp][a], dp * s.micro + a);
    set_advantages(in_group, 0);
    set_loss(right_loss());
}

static inline void make(const char *objective, int layout, int64_t sp, int64_t dp,
                        int64_t micro) {
    begin(objective, sp, dp, micro);
    deal(layout);
    fill();
}

/* ---- losses, token by token ---- */

static inline int is(const char *objective) { return !strcmp(s.objective, objective); }
static inline int by_sequence(void) { return !strcmp(s.reduction, "sequence"); }

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
    SIDE_ADVANTAGES,
    SIDE_RETURNS,
    SIDE_OLD_VALUES
};

static inline double number_from(const double *x, int64_t t, int source) {
    int64_t before = 0;
    if (source == FIRST) return x[s.local[t]];
    for (int64_t r = 0; r < s.member[t]; r++) before += s.held[r];
    return source == CONTIGUOUS ? x[before + s.local[t]] : x[t];
}

/* max((V - G)^2, (near - G)^2) / 2; near is V, at most clip_value away from the old value.
   clip_value 0: no clip. */
static inline double critic_loss(const row *r, int64_t t, int way) {
    double G = number_from(r->returns, t, way == SIDE_RETURNS ? s.source : SPLIT);
    double old = number_from(r->old_values, t, way == SIDE_OLD_VALUES ? s.source : SPLIT);
    double V = r->values[t], near = V, one, two;
    if (V > old + s.clip_value) near = old + s.clip_value;
    if (V < old - s.clip_value) near = old - s.clip_value;
    if (s.clip_value == 0) near = V;
    one = (V - G) * (V - G) / 2;
    two = way == NO_CLIP ? one : (near - G) * (near - G) / 2;
    return (way == WRONG_SIDE) == (one > two) ? two : one;
}

static inline double token_loss_alone(const row *r, int64_t t, int way) {
    double logp = r->logp[t];
    double old = number_from(r->old_logp, t, way == SIDE_OLD ? s.source : SPLIT);
    double ref = number_from(r->ref_logp, t, way == SIDE_REFERENCE ? s.source : SPLIT);
    double a = number_from(r->advantages, t, way == SIDE_ADVANTAGES ? s.source : SPLIT);
    double ratio = exp(way == INVERTED ? old - logp : logp - old), cut, one, two, k3;
    if (is("sft")) return -logp;
    if (is("value")) return critic_loss(r, t, way);
    cut = ratio < 0.8 ? 0.8 : ratio > 1.3 ? 1.3 : ratio;
    one = -a * ratio;
    two = way == NO_CLIP ? one : -a * cut;
    one = (way == WRONG_SIDE) == (one < two) ? one : two;
    if (s.cispo > 0) one = -a * logp * (way != NO_CLIP && ratio > s.cispo ? s.cispo : ratio);
    if (s.dual_clip > 0 && a < 0 && one > -a * s.dual_clip) one = -a * s.dual_clip;
    k3 = exp(ref - logp) - (ref - logp) - 1;
    if (way == NO_KL) k3 = 0;
    if (way == K1) k3 = logp - ref;
    if (way == K2) k3 = (logp - ref) * (logp - ref) / 2;
    if (way == K3_TURNED) k3 = exp(logp - ref) - (logp - ref) - 1;
    if (way == K3_CUT && k3 > 10) k3 = 10;
    if (s.kl_ratio) k3 *= exp(logp - old);
    return one + s.kl_coef * k3;
}

static inline double token_loss(const row *r, int64_t t, int way) {
    double loss = token_loss_alone(r, t, way);
    if (is("sft")) loss = loss * (1 - s.smoothing) - s.smoothing * r->mean_logp[t];
    if (is("sft")) loss += s.z_loss * r->logits_lse[t] * r->logits_lse[t];
    if (is("ppo")) loss -= s.entropy_coef * r->entropy[t];
    return loss * (s.with_weights ? r->weights[t] : 1);
}

/* Sum of the losses, and number n, of document d's trained tokens on members first to
   last - 1. */
static inline double document_loss(const row *r, int64_t d, int64_t first, int64_t last,
                                   int way, double *n) {
    double sum = 0;
    *n = 0;
    for (int64_t t = cu_seqlens[d]; t <= last_of(d); t++)
        if (r->labels[t] != NONE && s.member[t] >= first && s.member[t] < last) {
            sum += token_loss(r, t, way);
            ++*n;
        }
    return sum;
}

static inline double mean_of_tokens(int way) {
    double sum = 0, count = 0, n;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++) {
        sum += document_loss(&s.of[dp][a], d, 0, s.sp, way, &n);
        count += n;
    }
    return sum / count;
}

static inline double mean_of_documents(int way) {
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

static inline int by_what(const char *reduction) { return !strcmp(s.reduction, reduction); }

/* The mean over rows, or over replicas, of their tokens' means; without a token: 0. */
static inline double mean_of_groups(int way, int by_replica) {
    double sum = 0, own = 0, count = 0, groups = 0, n;
    EACH_ROW(dp, a) {
        for (int64_t d = 0; d < s.of[dp][a].docs; d++) {
            own += document_loss(&s.of[dp][a], d, 0, s.sp, way, &n);
            count += n;
        }
        if (by_replica && a + 1 < s.micro) continue;
        sum += count > 0 ? own / count : 0;
        own = count = 0;
        groups++;
    }
    return sum / groups;
}

static inline double sum_of_tokens(int way) {
    double sum = 0, n;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++)
        sum += document_loss(&s.of[dp][a], d, 0, s.sp, way, &n);
    return sum;
}

static inline double mean_loss(int way) {
    return by_sequence()         ? mean_of_documents(way)
           : by_what("constant") ? sum_of_tokens(way) / s.constant
           : by_what("micro")    ? mean_of_groups(way, 0)
           : by_what("replica")  ? mean_of_groups(way, 1)
                                 : mean_of_tokens(way);
}

static inline double log_sigmoid_loss(double x) { return log(1 + exp(-x)); }

/* Sum of logp - reference * ref_logp over document d's tokens on members first to last - 1. */
static inline double h_of(const row *r, int64_t d, int64_t first, int64_t last,
                          double reference, double *n) {
    double h = 0;
    *n = 0;
    for (int64_t t = cu_seqlens[d]; t <= last_of(d); t++)
        if (r->labels[t] != NONE && s.member[t] >= first && s.member[t] < last) {
            h += r->logp[t] - reference * number_from(r->ref_logp, t, s.source);
            ++*n;
        }
    return h;
}

static inline double pair_mean(double factor, double reference, int by_length, int64_t first,
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

static inline double score_mean(double factor) {
    double sum = 0, count = 0;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d += 2, count++)
        sum += log_sigmoid_loss(factor * (s.of[dp][a].scores[d] - s.of[dp][a].scores[d + 1]));
    return sum / count;
}

/* ---- KTO ---- */

enum { Z, Z_REPLICA, Z_CLAMPED, Z_MEANS, Z_FREE, Z_NONE, Z_TIMES, Z_OVER };

static inline double kl_mean(int64_t from, int64_t to, int64_t a) {
    double sum = 0, count = 0;
    for (int64_t dp = from; dp < to; dp++)
        for (int64_t d = 0; d < s.of[dp][a].docs; d++, count++) sum += s.of[dp][a].kl[d];
    return sum / count;
}

static inline double kl_mean_of_all(void) { return kl_mean(0, s.dp, 0); }

static inline double positive(double x) { return x > 0 ? x : 0; }

static inline double z_of(int64_t dp, int64_t a, int way) {
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

static inline double kto_mean(double factor, double reference, int way, int swapped,
                              int64_t first, int64_t last) {
    double sum = 0, count = 0, n;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++, count++) {
        const row *r = &s.of[dp][a];
        double h = factor * h_of(r, d, first, last, reference, &n);
        double x = s.beta * (h - z_of(dp, a, way));
        int desirable = (r->desirable[d] != 0) != swapped;
        sum += (desirable ? s.desirable_weight : s.undesirable_weight) *
               (1 - 1 / (1 + exp(desirable ? -x : x)));
    }
    return sum / count;
}

static inline double right_loss(void) {
    return is("dpo")   ? pair_mean(1, 1, 0, 0, s.sp)
           : is("rm")  ? score_mean(1)
           : is("kto") ? kto_mean(1, 1, Z, 0, 0, s.sp)
                       : mean_loss(RIGHT);
}

#include "dump_write.h" /* which takes scenes from above */

/* ---- what is said of it ---- */

static const char *more_options = "";

static inline int ask(char *said, size_t size) { return ask_with(more_options, said, size); }

static char said[32768];

static inline void expect(int code, const char *headline, const char *text) {
    int got;
    size_t line;
    write_scene();
    got = ask(said, sizeof said);
    line = strcspn(said, code == 1 || code == 3 ? "\n" : ":\n"); /* what is right follows */
    for (char *c = said + line; *c; c++) /* lines are wrapped: one long line */
        if (*c == '\n') *c = ' ';
    for (char *from = said + line, *to = from; (*to = *from); from++)
        to += !(*from == ' ' && from[1] == ' ');
    test_expect(got == code && strlen(headline) == line && !strncmp(said, headline, line) &&
                    strstr(said, text),
                "exit code %d, not %d; said '%.600s', not '%s' with '%s'", got, code, said,
                headline, text);
}

static inline void expect_named(const char *name, const char *text) {
    char headline[96];
    snprintf(headline, sizeof headline, "wrong: %s", name);
    expect(1, headline, text);
    test_end("objectives_%s_%s", s.objective, name);
}

static inline void expect_loss(double loss, const char *name, const char *text) {
    set_loss(loss);
    expect_named(name, text);
}

/* ---- right ones ---- */

static inline void expect_right(const char *name, const char *text) {
    expect(0, "right", text);
    test_end("objectives_right_%s_%s", s.objective, name);
}

/* Right, and these words are not said. */
static inline void expect_unsaid(const char *name, const char *text) {
    expect(0, "right", "loss right: got");
    test_expect(!strstr(said, text), "it says '%s'", text);
    test_end("objectives_right_%s_%s", s.objective, name);
}

static inline void make_by(const char *objective, const char *reduction) {
    begin(objective, 3, 2, 2);
    s.reduction = reduction;
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
}

static inline void make_ppo(const char *how) {
    begin("ppo", 3, 2, 2);
    s.advantage = how;
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
}

/* Rank member(t) of the sequence holds token t; fills the scene. */
static inline void deal_by(int64_t (*member)(int64_t t)) {
    memset(s.held, 0, sizeof s.held);
    for (int64_t t = 0; t < TOKENS; t++) {
        int64_t m = member(t);
        s.index[m][s.held[m]++] = (int32_t)t;
    }
    fill();
}

static inline void expect_nothing(const char *name, const char *text) {
    expect(4, "insufficient", text);
    test_end("objectives_%s_%s", s.objective, name);
}

static inline void expect_refused(const char *odd, const char *sentence) {
    int code;
    s.odd = odd;
    write_scene();
    code = ask(said, sizeof said);
    test_expect(code == 3 && strstr(said, sentence), "exit code %d, said '%.400s', not '%s'",
                code, said, sentence);
    test_end("objectives_refused_%s_%s", s.objective, odd ? odd : s.without);
}

/* What is said of a number that is off by so many limits. */
__attribute__((unused)) static const struct {
    double times;
    int code;
    const char *headline;
} around_a_limit[] = {{0.99, 0, "right"},
                      {1.01, 0, "marginal"},
                      {1.49, 0, "marginal"},
                      {1.51, 1, "wrong: unknown"}};
#endif
