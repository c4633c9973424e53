/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on what becomes of gradients: ranks' own ones reduced, the norm, clip and
   the optimizer's step. Right ones, whole and in shards, and one with each mistake; what a
   mistake gives is made anew here. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "seqpar_safetensors.h"
#include "support/oracle_says.h"

#define FOLDER "build/test_dump_step.d"
enum { RANKS = 8, TENSORS = 2, MOST = 17, EACH = 6 };
static const int64_t sizes[TENSORS] = {17, 5};
static const char *names[TENSORS] = {"down", "up"};
enum { LOCAL, GRAD, PARAM, AFTER, M, V };
static const char *const prefixes[EACH] = {"local", "grad", "param", "after", "m", "v"};

typedef double tensors[TENSORS][MOST];
typedef struct scene {
    int64_t world, sp, accumulation, step;
    tensors of[RANKS][EACH];
    double norm[RANKS];
    double lr, decay, max_norm, eps;
    int sharded, sgd, bf16; /* grad., after., m. and v. in shards; parameters in bf16 */
    int even;               /* shards of even sizes */
    int bf16_gradient;
    int own;             /* the second tensor has a tenth of lr, the first no decay */
    double divisor;      /* loss_count over the step's count of labels; 0: it is not written */
    const char *without; /* a prefix or a tensor that is not written, or "norm" */
    const char *odd;
} scene;
static scene s;

/* ---- a right step ---- */

/* The elements of tensor i that rank r holds as its shard: uneven, of some ranks none. */
static void shard(int64_t r, int i, int64_t *first, int64_t *last) {
    *first = sizes[i] * r * r / (s.world * s.world);
    *last = sizes[i] * (r + 1) * (r + 1) / (s.world * s.world);
    if (!s.even) return;
    *first = sizes[i] * r / s.world;
    *last = sizes[i] * (r + 1) / s.world;
}

static void each_element(void (*set)(int64_t r, int i, int64_t at)) {
    for (int64_t r = 0; r < s.world; r++)
        for (int i = 0; i < TENSORS; i++)
            for (int64_t at = 0; at < sizes[i]; at++) set(r, i, at);
}

static void set_inputs(int64_t r, int i, int64_t at) {
    s.of[r][LOCAL][i][at] = 0.01 * (double)test_integer(-90, 90) * (double)(r + 1);
    if (r) {
        memcpy(s.of[r][PARAM], s.of[0][PARAM], sizeof s.of[r][PARAM]);
        memcpy(s.of[r][M], s.of[0][M], sizeof s.of[r][M]);
        memcpy(s.of[r][V], s.of[0][V], sizeof s.of[r][V]);
        return;
    }
    s.of[r][PARAM][i][at] = 0.03 * (double)test_integer(-90, 90);
    s.of[r][M][i][at] = 0.01 * (double)test_integer(-50, 50);
    s.of[r][V][i][at] = 0.02 * (double)test_integer(1, 50);
}

static double local_sum(int i, int64_t at, int64_t first, int64_t step, int64_t last) {
    double sum = 0;
    for (int64_t r = first; r < last; r += step) sum += s.of[r][LOCAL][i][at];
    return sum;
}

static void reduce_all(int64_t r, int i, int64_t at) {
    s.of[r][GRAD][i][at] = local_sum(i, at, 0, 1, s.world);
}

static double norm_of(tensors t, int64_t rank) { /* of the shard; -1: of all */
    double sum = 0;
    for (int i = 0; i < TENSORS; i++) {
        int64_t first = 0, last = sizes[i];
        if (rank >= 0) shard(rank, i, &first, &last);
        for (; first < last; first++) sum += t[i][first] * t[i][first];
    }
    return sqrt(sum);
}

static double clip(double norm) { return norm > s.max_norm ? s.max_norm / norm : 1; }

/* AdamW as a mistake may have it. */
static struct {
    int no_bias, coupled, after, eps_inside;
    int m_0, old_whole, new_whole, decay_not[TENSORS];
    double lr_less[TENSORS]; /* lr is over 1 + this */
    int64_t t;
} how;

static double adamw(int i, int64_t at, double g) {
    double p = s.of[0][PARAM][i][at], m = s.of[0][M][i][at], v = s.of[0][V][i][at], u;
    double decay = how.decay_not[i] ? 0 : s.decay, lr = s.lr / (1 + how.lr_less[i]);
    if (how.coupled) g = g + s.decay * p;
    if (how.m_0) m = v = 0;
    m = m * (how.old_whole ? 1 : 0.9) + g * (how.new_whole ? 1 : 0.1);
    v = v * (how.old_whole ? 1 : 0.95) + g * g * (how.new_whole ? 1 : 0.05);
    if (!how.no_bias) m = m / (1 - pow(0.9, (double)how.t));
    if (!how.no_bias) v = v / (1 - pow(0.95, (double)how.t));
    u = lr * m / (how.eps_inside ? sqrt(v + s.eps) : sqrt(v) + s.eps);
    if (how.coupled) return p - u;
    return how.after ? (p - u) - (p - u) * lr * decay : p - p * lr * decay - u;
}

static double sgd(int i, int64_t at, double g) {
    double p = s.of[0][PARAM][i][at], lr = s.lr / (1 + how.lr_less[i]);
    return p - lr * g - lr * (how.decay_not[i] ? 0 : s.decay) * p;
}

static double stepped(int i, int64_t at, double g) {
    return s.sgd ? sgd(i, at, g) : adamw(i, at, g);
}

static void step_right(int64_t r, int i, int64_t at) {
    double g = s.of[0][GRAD][i][at] * clip(norm_of(s.of[0][GRAD], -1));
    s.of[r][AFTER][i][at] = stepped(i, at, g);
}

static void finish(void) {
    each_element(step_right);
    for (int64_t r = 0; r < s.world; r++) s.norm[r] = norm_of(s.of[0][GRAD], -1);
}

static void make(int64_t world, int64_t sp, int sharded) {
    memset(&s, 0, sizeof s);
    s.world = world;
    s.sp = sp;
    s.sharded = sharded;
    s.accumulation = 3;
    s.step = 7;
    s.lr = 0.25;
    s.decay = 0.2;
    s.max_norm = 1.25;
    s.eps = 0.3;
    memset(&how, 0, sizeof how);
    how.t = s.step;
    each_element(set_inputs);
    each_element(reduce_all);
    finish();
}

/* ---- writing it ---- */

static uint16_t bf16_of(double x) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

typedef struct page {
    seqpar_safetensors_tensor tensors[32];
    const void *data[32];
    char name[32][32];
    uint16_t half[32][MOST];
    seqpar_safetensors_pair pairs[40];
    char text[40][2][32];
    int64_t count, metadata;
} page;

static void say(page *p, const char *key, const char *format, double a, double b) {
    char(*text)[32] = p->text[p->metadata];
    snprintf(text[0], sizeof text[0], "%s", key);
    snprintf(text[1], sizeof text[1], format, a, b);
    p->pairs[p->metadata++] = (seqpar_safetensors_pair){text[0], text[1]};
}

static void put(page *p, const char *prefix, int i, const double *data, int64_t count,
                int bf16) {
    int64_t at = p->count++;
    snprintf(p->name[at], sizeof p->name[at], "%s%s%s", prefix, *names[i] ? "." : "", names[i]);
    p->tensors[at] = (seqpar_safetensors_tensor){.name = p->name[at],
                                                 .dtype = bf16 ? SEQPAR_SAFETENSORS_BF16
                                                               : SEQPAR_SAFETENSORS_F64,
                                                 .dims = 1,
                                                 .shape = {count}};
    p->data[at] = data;
    if (bf16) p->data[at] = p->half[at];
    for (int64_t k = 0; bf16 && k < count; k++) p->half[at][k] = bf16_of(data[k]);
}

static void put_tensor(page *p, int64_t r, int what, int i) {
    int64_t first = 0, last = sizes[i];
    char key[32];
    snprintf(key, sizeof key, "%s.%s", prefixes[what], names[i]);
    if (s.without && (!strcmp(s.without, prefixes[what]) || !strcmp(s.without, key))) return;
    if (s.sharded && what != LOCAL && what != PARAM) {
        shard(r, i, &first, &last);
        snprintf(key, sizeof key, "part.%s.%s", prefixes[what], names[i]);
        if (s.odd && r == 1 && !strcmp(s.odd, "range"))
            say(p, key, "%.0f %.0f", (double)first + 1000, (double)sizes[i]);
        else if (s.odd && r == 1 && !strcmp(s.odd, "total"))
            say(p, key, "%.0f %.0f", (double)first, (double)sizes[i] + 1);
        else
            say(p, key, "%.0f %.0f", (double)first, (double)sizes[i]);
        if (s.odd && !strcmp(s.odd, "gap") && r == s.world - 1 && what == GRAD) return;
    }
    if (s.odd && !strcmp(s.odd, "short") && r == 0 && what == AFTER) {
        last = sizes[i] / 2;
        snprintf(key, sizeof key, "part.%s.%s", prefixes[what], names[i]);
        say(p, key, "%.0f %.0f", 0, (double)sizes[i]);
    }
    put(p, prefixes[what], i, s.of[r][what][i] + first, last - first,
        (s.bf16 && (what == PARAM || what == AFTER)) || (s.bf16_gradient && what == GRAD));
}

/* Rows of four tokens a rank, of which some have a label, and what each rank divides by. */
enum { MICRO = 5, HELD = 4 };
static int labels_of(int64_t r, int64_t a) {
    return 1 + (int)((r * r + 3 * a + r * a + r / 3) % 4);
}

static void put_micro(page *p, int64_t a, const char *what, const void *data,
                      seqpar_safetensors_dtype dtype, int dims) {
    snprintf(p->name[p->count], sizeof p->name[0], "%lld.%s", (long long)a, what);
    p->tensors[p->count] = (seqpar_safetensors_tensor){
        .name = p->name[p->count], .dtype = dtype, .dims = dims, .shape = {HELD}};
    p->data[p->count++] = data;
}

static void put_counts(page *p, int64_t r) {
    static int32_t index[HELD], labels[MICRO][HELD];
    static double count;
    count = 0;
    for (int64_t q = 0; q < s.world; q++)
        for (int64_t a = 0; a < MICRO; a++) count += s.divisor * labels_of(q, a);
    for (int64_t a = 0; a < MICRO; a++) {
        for (int i = 0; i < HELD; i++) index[i] = (int32_t)(r % s.sp * HELD + i);
        for (int i = 0; i < HELD; i++) labels[a][i] = i < labels_of(r, a) ? 7 : -100;
        put_micro(p, a, "index", index, SEQPAR_SAFETENSORS_I32, 1);
        put_micro(p, a, "labels", labels[a], SEQPAR_SAFETENSORS_I32, 1);
        put_micro(p, a, "loss_count", &count, SEQPAR_SAFETENSORS_F64, 0);
    }
}

static void write_rank(int64_t r) {
    static page p; /* large */
    char path[64];
    seqpar_error error = {0};
    memset(&p, 0, sizeof p);
    say(&p, "seqpar_dump", "1", 0, 0);
    say(&p, "rank", "%.0f", (double)r, 0);
    say(&p, "world", "%.0f", (double)s.world, 0);
    say(&p, "sp", "%.0f", (double)s.sp, 0);
    say(&p, "accumulation", "%.0f", (double)s.accumulation, 0);
    say(&p, "optimizer",
        s.sgd                                  ? "sgd"
        : s.odd && !strcmp(s.odd, "optimizer") ? "lion"
                                               : "adamw",
        0, 0);
    say(&p, "lr", "%.17g", s.lr, 0);
    say(&p, "beta2", "%.17g", s.odd && !strcmp(s.odd, "beta2") ? 1 : 0.95, 0);
    say(&p, "eps", "%.17g", s.eps, 0);
    say(&p, "weight_decay", "%.17g", s.decay, 0);
    if (s.own) say(&p, "lr.up", "%.17g", s.lr / 10, 0);
    if (s.own) say(&p, "weight_decay.down", "%.17g", 0, 0);
    if (s.odd && !strcmp(s.odd, "setting")) say(&p, "lr.uq", "%.17g", s.lr, 0);
    if (s.odd && !strcmp(s.odd, "one") && r == 2) say(&p, "lr.up", "%.17g", s.lr, 0);
    if (s.odd && !strcmp(s.odd, "high")) say(&p, "lr.up", "%.17g", 1e7, 0);
    say(&p, "max_norm", "%.17g", s.max_norm, 0);
    say(&p, "step", "%.0f", (double)s.step, 0);
    for (int what = 0; what < EACH; what++)
        for (int i = 0; i < TENSORS; i++) put_tensor(&p, r, what, i);
    if (!s.without || strcmp(s.without, "norm")) {
        p.tensors[p.count] = (seqpar_safetensors_tensor){.name = "norm",
                                                         .dtype = SEQPAR_SAFETENSORS_F64};
        p.data[p.count++] = &s.norm[r];
    }
    if (s.divisor > 0) put_counts(&p, r);
    snprintf(path, sizeof path, FOLDER "/rank%lld.safetensors", (long long)r);
    seqpar_safetensors_desc desc = {.path = path,
                                    .tensors = p.tensors,
                                    .count = p.count,
                                    .metadata = p.pairs,
                                    .metadata_count = p.metadata};
    test_expect(!seqpar_safetensors_save(&desc, p.data, &error), "%s", error.text);
}

static void write_scene(void) {
    if (system("rm -rf " FOLDER)) exit(1);
    mkdir(FOLDER, 0777);
    for (int64_t r = 0; r < s.world; r++) write_rank(r);
}

/* ---- what is said of it ---- */

static char said[16384];

static void expect(int code, const char *headline, const char *text) {
    write_scene();
    int is = said_by("build/seqpar-verify ver " FOLDER " 2>&1", said, sizeof said);
    squeeze(said);
    expect_says(is, said, code, headline, text);
}

static void expect_named(const char *name, const char *text) {
    char headline[64];
    snprintf(headline, sizeof headline, "wrong: %s places", name);
    expect(1, headline, text);
    test_end("dump_step_%s", name);
}

static void test_right(void) {
    static const int64_t shapes[][2] = {{2, 2}, {3, 3}, {4, 2}, {6, 3}, {3, 1}};
    for (int i = 0; i < 10; i++) {
        make(shapes[i / 2][0], shapes[i / 2][1], i % 2);
        expect(0, "right: ", "step right:");
        test_end("dump_step_right_W%lld_P%lld_%s", (long long)s.world, (long long)s.sp,
                 i % 2 ? "shards" : "whole");
    }
    make(4, 2, 0);
    s.sgd = 1;
    finish();
    expect(0, "right: ", "SGD would move them");
    test_end("dump_step_right_sgd");
    make(4, 2, 1);
    s.max_norm = 1000; /* no clip */
    finish();
    expect(0, "right: ",
           "norms_added, norm_counts_copies, norm_after_clip, not_clipped, clip_by_own_norm, "
           "clip_before_reduction");
    test_end("dump_step_right_without_clip");
    make(4, 2, 0);
    s.bf16 = 1;
    for (int i = 0; i < TENSORS; i++) /* as bf16 has them */
        for (int64_t at = 0; at < sizes[i]; at++)
            for (int64_t r = 0; r < s.world; r++)
                s.of[r][PARAM][i][at] = floor(s.of[r][PARAM][i][at] * 16) / 16;
    finish();
    expect(0, "right: ", "step right:");
    test_end("dump_step_right_bf16");
}

/* ---- reduction ---- */

static void set_norms(double (*of)(int64_t r)) {
    for (int64_t r = 0; r < s.world; r++) s.norm[r] = of(r);
}

static void reduce_sequence(int64_t r, int i, int64_t at) {
    int64_t first = r / s.sp * s.sp;
    s.of[r][GRAD][i][at] = local_sum(i, at, first, 1, first + s.sp);
}
static void reduce_replicas(int64_t r, int i, int64_t at) {
    s.of[r][GRAD][i][at] = local_sum(i, at, r % s.sp, s.sp, s.world);
}
static void reduce_nothing(int64_t r, int i, int64_t at) {
    s.of[r][GRAD][i][at] = s.of[r][LOCAL][i][at] / 3;
}
static void reduce_mean(int64_t r, int i, int64_t at) {
    s.of[r][GRAD][i][at] = local_sum(i, at, 0, 1, s.world) / (double)s.world;
}
static void reduce_too_few(int64_t r, int i, int64_t at) {
    s.of[r][GRAD][i][at] = local_sum(i, at, 0, 1, s.world - 1);
}
static void locals_alike(int64_t r, int i, int64_t at) {
    s.of[r][LOCAL][i][at] = s.of[0][LOCAL][i][at] * (double)(r + 1);
}

static void no_gradient(int64_t r, int i, int64_t at) {
    s.of[r][LOCAL][i][at] = s.of[r][GRAD][i][at] = 0;
}
static void some_gradient(int64_t r, int i, int64_t at) {
    s.of[r][GRAD][i][at] = 0.1 * (double)(at + 1);
}
static double whole_but_up(int64_t r) {
    double sum = 0;
    for (int64_t at = 0; at < sizes[0]; at++)
        sum += s.of[r][GRAD][0][at] * s.of[r][GRAD][0][at];
    return sqrt(sum);
}

static void test_reduction(void) {
    make(4, 2, 0);
    s.without = "norm";
    each_element(reduce_mean);
    finish();
    expect(0, "right: ", "are 0.25 times the sum");
    test_end("dump_step_mean");
    each_element(reduce_sequence);
    s.lr = 0; /* and no step */
    expect_named("replicas_not_reduced", "reduction wrong: rank 0's gradients");
    each_element(reduce_replicas);
    expect_named("sequence_not_reduced", "reduction wrong: rank 0's gradients");
    each_element(reduce_nothing);
    expect_named("never_synchronised", "reduction wrong: rank 0's gradients");
    make(3, 3, 0);
    s.lr = 0;
    each_element(reduce_nothing);
    expect_named("never_synchronised", "reduction wrong: rank 0's gradients");
    make(3, 3, 0);
    s.lr = 0;
    each_element(reduce_too_few);
    finish();
    expect_named("unknown", "reduction wrong: rank 0's gradients");
    s.without = "local";
    s.of[2][GRAD][1][3] += 1;
    expect_named("never_synchronised", "grad.up of rank 2 is");
    make(4, 2, 0);
    each_element(locals_alike);
    each_element(reduce_all);
    finish();
    s.lr = 0;
    expect(4, "insufficient: norm right; reduction shows nothing: sums of fewer ranks",
           "give ranks and replicas different tokens");
    test_end("dump_step_locals_alike");
    make(4, 2, 0);
    s.of[1][LOCAL][0][0] = NAN;
    expect(1, "wrong", "reduction wrong");
    test_end("dump_step_nan");
    make(4, 2, 0);
    s.without = "grad";
    expect(4, "insufficient: nothing was judged places",
           "reduction not judged: it takes grad.down, which is in no file");
    test_end("dump_step_without_grad");
    make(4, 2, 0);
    s.without = "grad.up";
    s.lr = 0;
    set_norms(whole_but_up);
    expect(0, "right: ",
           "1 parameters could not be judged without grad. tensors, the "
           "first grad.up");
    test_end("dump_step_without_one_grad");
    make(4, 2, 0);
    each_element(no_gradient);
    finish();
    expect(4, "insufficient: step right; reduction shows nothing: rank 0's gradients are 0",
           "reduction insufficient: rank 0's gradients are 0, and so");
    test_end("dump_step_zero_gradients");
    each_element(some_gradient);
    expect(1, "wrong: unknown also norm_of_part (norm)",
           "are not 0, and the sum of all ranks' local ones is");
    test_end("dump_step_gradients_from_nothing");
}

/* ---- norm ---- */

static double own_shard(int64_t r) { return norm_of(s.of[r][GRAD], r); }
static double own_local(int64_t r) { return norm_of(s.of[r][LOCAL], -1); }
static double shards_added(int64_t r) {
    double sum = 0;
    for (int64_t q = 0; q < s.world; q++) sum += own_shard(q);
    return (void)r, sum;
}
static double locals_added(int64_t r) {
    double sum = 0;
    for (int64_t q = 0; q < s.world; q++) sum += own_local(q);
    return (void)r, sum;
}
static double copies(int64_t r) { return (void)r, 2 * norm_of(s.of[0][GRAD], -1); }
static double sp_copies(int64_t r) { return copies(r) / sqrt(2); }
static double limit(int64_t r) { return (void)r, s.max_norm; }
static double squares_added_again(int64_t r) {
    return (void)r, sqrt((double)s.world) * norm_of(s.of[0][GRAD], -1);
}
static double too_large(int64_t r) { return (void)r, 1.3 * norm_of(s.of[0][GRAD], -1); }
static double nearly(int64_t r) { return (void)r, 1.0012 * norm_of(s.of[0][GRAD], -1); }

/* Shard q has norm 1 + q / 100, so that their sum is 3e-5 of it away from sqrt(W) times the
   norm of all. */
static void even_norms(int64_t r, int i, int64_t at) {
    for (int64_t q = 0; q < s.world; q++) {
        int64_t first, last;
        double unit = 0;
        shard(q, i, &first, &last);
        if (at < first || at >= last) continue;
        for (int k = 0; k < TENSORS; k++) {
            int64_t begin, end;
            shard(q, k, &begin, &end);
            unit += (double)(end - begin);
        }
        s.of[r][GRAD][i][at] = (at % 3 ? 1 : -1) * (1 + (double)q / 100) / sqrt(unit);
    }
}

static void test_norms_nearly_equal(int bf16) {
    make(4, 2, 1);
    s.without = "local";
    s.even = 1;
    s.bf16_gradient = bf16;
    s.lr = 0;
    each_element(even_norms);
    finish();
    expect(0, "right: ", "norm right");
    test_end("dump_step_even_shards");
    set_norms(shards_added);
    if (!bf16) expect_named("norms_added", "norm wrong: got");
    if (bf16) expect_named("one of norms_added, norm_counts_copies", "whose shards have norms");
    set_norms(squares_added_again);
    if (!bf16) expect_named("norm_counts_copies", "norm wrong: got");
}

static void test_norm(void) {
    make(4, 2, 1);
    set_norms(own_shard);
    expect_named("norm_of_part", "as rank 0 reports it");
    set_norms(shards_added);
    expect_named("norms_added", "norm wrong: got");
    make(4, 2, 0);
    set_norms(own_local);
    expect_named("norm_of_part", "norm wrong: got");
    set_norms(locals_added);
    expect_named("norms_added", "norm wrong: got");
    set_norms(copies);
    expect_named("norm_counts_copies", "norm wrong: got");
    set_norms(sp_copies);
    expect_named("norm_counts_copies", "norm wrong: got");
    set_norms(limit);
    expect_named("norm_after_clip", "norm wrong: got");
    set_norms(too_large);
    expect_named("unknown", "parameters that the dump lacks");
    make(4, 2, 0);
    s.norm[3] = own_local(3);
    expect_named("norm_of_part", "as rank 3 reports it");
    make(4, 2, 0);
    s.norm[1] = NAN;
    expect_named("unknown", "got nan as rank 1 reports it");
    make(4, 2, 0);
    set_norms(nearly);
    expect(0, "marginal: norm marginal", "norm marginal: got");
    test_end("dump_step_norm_marginal");
    make(1, 1, 0);
    expect(4, "insufficient: step right; norm shows nothing: one rank",
           "one rank has nothing to put together");
    test_end("dump_step_norm_of_one_rank");
}

/* ---- the step ---- */

static void step_unclipped(int64_t r, int i, int64_t at) {
    s.of[r][AFTER][i][at] = stepped(i, at, s.of[0][GRAD][i][at]);
}
static void step_clipped_by_shard(int64_t r, int i, int64_t at) {
    s.of[r][AFTER][i][at] = stepped(i, at, s.of[0][GRAD][i][at] * clip(own_shard(r)));
}
static void step_clipped_by_local(int64_t r, int i, int64_t at) {
    s.of[r][AFTER][i][at] = stepped(i, at, s.of[0][GRAD][i][at] * clip(own_local(r)));
}
static void step_clipped_before(int64_t r, int i, int64_t at) {
    double g = 0;
    for (int64_t q = 0; q < s.world; q++) g += clip(own_local(q)) * s.of[q][LOCAL][i][at];
    s.of[r][AFTER][i][at] = stepped(i, at, g);
}
/* A clip by norms that are not the gradient's. */
static void step_clipped_by(int64_t r, int i, int64_t at, double norm) {
    s.of[r][AFTER][i][at] = stepped(i, at, s.of[0][GRAD][i][at] * clip(norm));
}
static void step_clipped_by_added(int64_t r, int i, int64_t at) {
    step_clipped_by(r, i, at, shards_added(r));
}
static void step_clipped_by_locals(int64_t r, int i, int64_t at) {
    step_clipped_by(r, i, at, locals_added(r));
}
static void step_clipped_by_copies(int64_t r, int i, int64_t at) {
    step_clipped_by(r, i, at, copies(r));
}
static void step_clipped_by_sp_copies(int64_t r, int i, int64_t at) {
    step_clipped_by(r, i, at, sp_copies(r));
}
static void step_clipped_by_shown(int64_t r, int i, int64_t at) {
    step_clipped_by(r, i, at, s.norm[r]);
}
static void step_longer(int64_t r, int i, int64_t at) {
    s.lr *= 1.5;
    step_right(r, i, at);
    s.lr /= 1.5;
}
static void step_further(int64_t r, int i, int64_t at) {
    step_right(r, i, at);
    if (i == 1) s.of[r][AFTER][i][at] += 0.01;
}
static void stay(int64_t r, int i, int64_t at) {
    s.of[r][AFTER][i][at] = s.of[r][PARAM][i][at];
}

static void step_turned(int64_t r, int i, int64_t at) {
    double norm = norm_of(s.of[0][GRAD], -1);
    s.of[r][AFTER][i][at] = stepped(i, at, -s.of[0][GRAD][i][at] * s.max_norm / norm);
}

static void test_clip(int use_sgd) {
    make(4, 2, 1);
    s.sgd = use_sgd;
    each_element(step_clipped_by_shard);
    expect_named("clip_by_own_norm", "step wrong");
    make(4, 2, 0);
    s.sgd = use_sgd;
    each_element(step_unclipped);
    expect_named("not_clipped", "step wrong");
    each_element(step_clipped_by_local);
    expect_named("clip_by_own_norm", "step wrong");
    each_element(step_clipped_before);
    expect_named("clip_before_reduction", "step wrong");
    for (int limited = 0; limited < 2; limited++) {
        make(4, 2, limited);
        s.sgd = use_sgd;
        s.max_norm = limited ? 1.5 : 1;
        each_element(step_turned);
        if (!limited) s.max_norm = 0;
        expect_named("clip_turns_sign", "step wrong");
    }
}

static void step_clipped_by_rank_0(int64_t r, int i, int64_t at) {
    (void)r;
    step_clipped_by_local(0, i, at);
    s.of[r][AFTER][i][at] = s.of[0][AFTER][i][at];
}
static void step_half_unclipped(int64_t r, int i, int64_t at) {
    if (at < sizes[i] / 2)
        step_unclipped(r, i, at);
    else
        step_right(r, i, at);
}

/* Ranks whose new parameters are equal, in full or as far as the first one has them: a mistake
   has to explain the step of each. */
static void test_equal_ranks(void) {
    make(4, 2, 0);
    each_element(step_clipped_by_rank_0);
    expect(1, "wrong: unknown places", "step wrong");
    test_end("dump_step_of_rank_0_on_all");
    make(4, 2, 0);
    s.odd = "short";
    each_element(step_half_unclipped);
    expect(1, "wrong: unknown places", "step wrong");
    test_end("dump_step_of_more_than_the_rank_before");
}

/* With the norm right, or not there: the step alone shows what clip went by. */
static void test_clip_by_wrong_norms(int use_sgd) {
    make(4, 2, 1);
    s.sgd = use_sgd;
    each_element(step_clipped_by_added);
    expect_named("norms_added", "step wrong");
    s.without = "norm";
    expect_named("norms_added", "step wrong");
    make(4, 2, 0);
    s.sgd = use_sgd;
    each_element(step_clipped_by_locals);
    expect_named("norms_added", "step wrong");
    each_element(step_clipped_by_copies);
    expect_named("norm_counts_copies", "step wrong");
    each_element(step_clipped_by_sp_copies);
    expect_named("norm_counts_copies", "step wrong");
    set_norms(too_large);
    each_element(step_clipped_by_shown);
    expect_named("unknown", "with the norm that ranks report in the clip the step is right");
}

/* A right step that BF16 hides, and one without clip, which it does not. */
static void test_clip_beside_rounding(void) {
    make(4, 2, 0);
    s.sgd = s.bf16 = 1;
    s.max_norm = 0.01;
    s.lr = 1;
    s.decay = 0;
    for (int i = 0; i < TENSORS; i++) /* as bf16 has them */
        for (int64_t at = 0; at < sizes[i]; at++)
            for (int64_t r = 0; r < s.world; r++)
                s.of[r][PARAM][i][at] = floor(s.of[r][PARAM][i][at] * 16) / 16;
    finish();
    expect(4, "insufficient: reduction, norm right; step shows nothing: the step is lost",
           "the step is lost in the rounding of parameters");
    test_end("dump_step_clipped_beside_rounding");
    each_element(step_unclipped);
    expect_named("not_clipped", "step wrong");
}

/* One mistake of `how` alone. */
static void expect_how(int sharded, int *wrong, const char *name) {
    make(4, 2, sharded);
    *wrong = 1;
    finish();
    expect_named(name, "step wrong");
}

static void test_moments(void) {
    make(4, 2, 1);
    how.m_0 = 1;
    finish();
    expect_named("moments_lost", "step wrong");
    how.t = 1;
    finish();
    expect_named("moments_lost", "step wrong");
    expect_how(0, &how.old_whole, "moments_not_scaled");
    expect_how(0, &how.new_whole, "moments_not_scaled");
    make(4, 2, 1);
    each_element(step_longer);
    expect_named("another_lr", "it is 1.5 times the right step, as with lr 0.375");
}

/* Decay on all, on matrices alone, which is right, too, on none, and on norms alone. */
static void test_decay(void) {
    make(4, 2, 1);
    how.decay_not[0] = how.decay_not[1] = 1;
    finish();
    expect_named("decay_missing", "step wrong");
    names[1] = "up_norm";
    expect_named("decay_missing", "step wrong");
    how.decay_not[0] = 0;
    finish();
    expect(0, "right: ", "no decay acts on the 1 biases and norms");
    test_end("dump_step_right_norms_do_not_decay");
    how.no_bias = 1;
    finish();
    expect_named("bias_correction_missing", "no decay acts on the 1 biases and norms");
    how.no_bias = how.decay_not[1] = 0;
    finish();
    expect(0, "right: ", "step right");
    test_end("dump_step_right_norms_decay");
    how.decay_not[0] = 1;
    finish();
    expect_named("decay_groups_swapped", "step wrong");
    names[1] = "up";
}

/* Parameters with an lr or a decay of their own. */
static void test_own_settings(int use_sgd) {
    make(4, 2, 1);
    s.own = 1;
    s.sgd = use_sgd;
    how.lr_less[1] = 9;
    how.decay_not[0] = 1;
    finish();
    expect(0, "right: ", "step right");
    test_end("dump_step_own_settings");
    s.own = 0;
    expect_named("unknown", "step wrong");
    s.own = 1;
    how.decay_not[1] = 1;
    finish();
    expect_named("decay_missing", "step wrong");
    how.decay_not[1] = 0;
    each_element(step_longer);
    expect_named(use_sgd ? "unknown" : "another_lr", "as with 1.5 times each lr");
}

static void test_own_settings_refused(void) {
    static const char *const odd[][2] = {
        {"setting", "metadata lr.uq is of no parameter: tensor param.uq is in no file; write"},
        {"one", "metadata lr.up differs from that of another file; write the same on every"},
        {"high", "metadata lr.up is '10000000'; write a number from 0 to 1000000"}};
    for (int i = 0; i < 3; i++) {
        make(4, 2, 1);
        s.odd = odd[i][0];
        expect(3, "error: ", odd[i][1]);
        test_end("dump_step_setting_refused_%s", s.odd);
    }
}

/* ---- shards ---- */

/* Of ranks 0 and 1: the range of after, or (form 1) the gradient that the step is made with. */
static void swap_ranges(int form) {
    for (int64_t r = 0; r < 2; r++)
        for (int i = 0; i < TENSORS; i++) {
            int64_t own, others, last;
            shard(1 - r, i, &others, &last);
            shard(r, i, &own, &last);
            for (int64_t k = 0; own + k < last; k++) {
                double g = s.of[0][GRAD][i][others + k] * clip(norm_of(s.of[0][GRAD], -1));
                s.of[r][AFTER][i][own + k] = form ? stepped(i, own + k, g)
                                                  : stepped(i, others + k, g);
            }
        }
}

static void test_shards(void) {
    make(4, 2, 1);
    for (int i = 0; i < TENSORS; i++)
        memcpy(s.of[1][AFTER][i], s.of[1][PARAM][i], sizeof s.of[1][PARAM][i]);
    expect_named("shard_not_updated", "1 ranks did not move at all, the first is rank 1");
    make(4, 2, 1);
    each_element(stay);
    s.of[3][AFTER][0][16] += 0.1; /* neither */
    expect_named("unknown", "step wrong");
    for (int form = 0; form < 2; form++) {
        make(5, 5, 1);
        s.even = 1;
        finish();
        expect(0, "right: ", "step right");
        test_end("dump_step_right_even_shards");
        swap_ranges(form);
        expect_named("shards_swapped", form ? "with the gradient of rank 1's"
                                            : "rank 0 has what the right step makes of rank 1");
    }
}

static void test_adamw(void) {
    expect_how(0, &how.no_bias, "bias_correction_missing");
    expect_how(0, &how.coupled, "decay_coupled");
    expect_how(0, &how.after, "decay_after_step");
    expect_how(1, &how.eps_inside, "eps_inside_root");
    make(4, 2, 0);
    how.t = s.step * s.accumulation;
    finish();
    expect_named("steps_counted_by_micro_batches", "step wrong");
    test_moments();
    test_decay();
    make(4, 2, 0);
    each_element(step_further);
    expect_named("unknown", "the first parameter with another step is up");
    make(4, 2, 0);
    s.of[3][AFTER][0][2] += 0.1;
    expect_named("unknown", "the first parameter with another step is down");
    make(4, 2, 0);
    s.of[0][AFTER][0][0] = NAN;
    expect_named("unknown", "step wrong");
}

static void test_shows_nothing(void) {
    make(4, 2, 0);
    each_element(stay);
    expect(4, "insufficient: reduction, norm right; step shows nothing: no parameter moved",
           "no parameter moved");
    test_end("dump_step_not_moved");
    test_expect(!system("build/seqpar-verify ver " FOLDER " --json | grep -q "
                        "'\"summary\":.\"reduction, norm right; step shows nothing: no par'"),
                "no summary in JSON");
    test_end("dump_step_summary_json");
    make(4, 2, 0);
    s.bf16 = 1;
    s.lr = 5e-3;
    finish();
    expect(4, "insufficient: reduction, norm right; step shows nothing: the step",
           "lost in the rounding of parameters");
    test_end("dump_step_lost_in_bf16");
    make(4, 2, 0);
    s.without = "after";
    expect(0, "right: ", "step not judged");
    test_end("dump_step_without_after");
    make(4, 2, 0);
    s.without = "local";
    expect(0, "right: ", "reduction not judged");
    test_end("dump_step_without_local");
}

static void test_files(void) {
    static const char *const odd[][2] = {
        {"range", "write OFFSET TOTAL: where its first element is in the whole"},
        {"total", "elements in all, and"},
        {"gap", "is in no file; dump the ranges of all ranks"},
        {"optimizer", "metadata optimizer is 'lion'; write none, adamw or sgd"},
        {"beta2", "metadata beta2 is '1'; write a number from 0 to 0.999999999"}};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        make(4, 2, 1);
        s.odd = odd[i][0];
        expect(3, "error: " FOLDER, odd[i][1]);
        test_end("dump_step_refused_%s", odd[i][0]);
    }
}

/* loss_count says what ranks' gradients are of, so that one factor alone is right. */
static void test_counts(void) {
    static const struct {
        double divisor, reduced; /* reduced: times the sum */
        const char *name, *text;
    } cases[] = {{1, 1, NULL, "so 1 is right"},
                 {1.0 / 6, 1.0 / 6, NULL, "so 0.166667 is right"},
                 {1.0 / 3, 1.0 / 3, NULL, "so 0.333333 is right"},
                 {1, 1.0 / 3, "over_sp", "so 1 is right"},
                 {1, 1.0 / 2, "over_dp", "so 1 is right"},
                 {1, 1.0 / 6, "over_sp and over_dp", "so 1 is right"},
                 {1.0 / 6, 1, "times_sp and times_dp", "so 0.166667 is right"},
                 {1.0 / 6, 1.0 / 2, "times_sp", "so 0.166667 is right"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        make(6, 3, 0);
        s.accumulation = MICRO;
        s.divisor = cases[i].divisor;
        for (int64_t r = 0; r < s.world; r++)
            for (int n = 0; n < TENSORS; n++)
                for (int64_t at = 0; at < sizes[n]; at++)
                    s.of[r][GRAD][n][at] *= cases[i].reduced;
        finish();
        if (cases[i].name)
            expect_named(cases[i].name, cases[i].text);
        else
            expect(0, "right: ", cases[i].text);
        test_end("dump_step_counts_%zu", i);
    }
    s.divisor = 0; /* and without it nobody can tell */
    expect(0, "right: ", "--want, --model or loss_count say it");
    test_end("dump_step_counts_unknown");
}

/* ---- both sides of the limits ---- */

static double off_by; /* of a norm, or of a step: relative */
static double off_norm(int64_t r) { return (void)r, (1 + off_by) * norm_of(s.of[0][GRAD], -1); }

static void test_norm_limits(void) {
    static const struct {
        double off;
        int code;
        const char *headline;
    } table[] = {{0.999e-3, 0, "right: "},    {-0.999e-3, 0, "right: "},
                 {1.001e-3, 0, "marginal: "}, {-1.001e-3, 0, "marginal: "},
                 {1.499e-3, 0, "marginal: "}, {-1.499e-3, 0, "marginal: "},
                 {1.501e-3, 1, "wrong: "},    {-1.501e-3, 1, "wrong: unknown"}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        make(4, 2, 0);
        off_by = table[i].off;
        set_norms(off_norm);
        expect(table[i].code, table[i].headline, "norm ");
        test_expect(strstr(said, "a larger one may be") == NULL || off_by > 0,
                    "a smaller norm is taken for a larger one");
        test_end("dump_step_norm_off_by_%g", off_by);
    }
}

/* One rank's step is off in one element, that which moves least: off along the step itself
   would be another learning rate. */
static void test_step_limits(void) {
    for (int i = 0; i < 4; i++) {
        int64_t q = i % 2 ? 3 : 0;
        double squares = 0, least = HUGE_VAL, *still = NULL;
        make(4, 2, 0);
        for (int k = 0; k < TENSORS; k++)
            for (int64_t at = 0; at < sizes[k]; at++) {
                double moved = s.of[q][AFTER][k][at] - s.of[q][PARAM][k][at];
                squares += moved * moved;
                if (fabs(moved) >= least) continue;
                least = fabs(moved);
                still = &s.of[q][AFTER][k][at];
            }
        off_by = i / 2 ? 1.01e-3 : 0.99e-3;
        *still += off_by * sqrt(squares);
        expect(i / 2, i / 2 ? "wrong: unknown" : "right: ", "step ");
        test_end("dump_step_off_by_%g_rank%lld", off_by, (long long)q);
    }
}

/* ---- some parameters are reduced, or counted, otherwise ---- */

static void test_some_parameters(void) {
    make(4, 2, 0);
    for (int64_t r = 0; r < s.world; r++)
        memcpy(s.of[r][GRAD][1], s.of[r][LOCAL][1], sizeof s.of[r][GRAD][1]);
    expect(1, "wrong: never_synchronised", "of up it is 1 times the rank's own alone");
    for (int64_t r = 0; r < s.world; r++)
        for (int64_t at = 0; at < sizes[1]; at++)
            s.of[r][GRAD][1][at] = local_sum(1, at, r / 2 * 2, 1, r / 2 * 2 + 2);
    expect(1, "wrong: replicas_not_reduced", "of up it is 1 times the sum over the ranks of a");
    for (int64_t r = 0; r < s.world; r++)
        for (int64_t at = 0; at < sizes[1]; at++)
            s.of[r][GRAD][1][at] = local_sum(1, at, r % 2, 2, s.world);
    expect(1, "wrong: sequence_not_reduced", "of up it is 1 times the sum over replicas");
    each_element(reduce_all);
    for (int64_t r = 0; r < s.world; r++)
        for (int64_t at = 0; at < sizes[1]; at++) s.of[r][GRAD][1][at] *= 4;
    expect(1, "wrong: ", "of up it is 4 times the sum of all ranks' local ones");
    make(3, 3, 0);
    for (int64_t r = 0; r < s.world; r++)
        memcpy(s.of[r][GRAD][1], s.of[r][LOCAL][1], sizeof s.of[r][GRAD][1]);
    expect(1, "wrong: never_synchronised", "of up it is 1 times the rank's own alone");
    for (int64_t r = 0; r < s.world; r++)
        for (int64_t at = 0; at < sizes[1]; at++)
            s.of[r][GRAD][1][at] = 3 * local_sum(1, at, 0, 1, s.world);
    expect(1, "wrong: one of times_sp, times_accumulation",
           "of up it is 3 times the sum of all ranks' local ones");
    test_end("dump_step_some_reduced");
}

/* The squares of some parameters left out, or counted several times. */
static void test_some_norms(void) {
    double squares[TENSORS];
    static const char *const said_of[] = {"the squares of down count 2 times",
                                          "the squares of up count 2 times"};
    make(4, 2, 0);
    for (int i = 0; i < TENSORS; i++) {
        squares[i] = 0;
        for (int64_t at = 0; at < sizes[i]; at++)
            squares[i] += s.of[0][GRAD][i][at] * s.of[0][GRAD][i][at];
    }
    for (int i = 0; i < TENSORS; i++) {
        for (int64_t r = 0; r < 4; r++) s.norm[r] = sqrt(squares[0] + squares[1] + squares[i]);
        expect_named("norm_counts_copies", said_of[i]);
        for (int64_t r = 0; r < 4; r++)
            s.norm[r] = sqrt(squares[0] + squares[1] + 3 * squares[i]);
        expect_named("norm_counts_copies", "count 4 times");
        for (int64_t r = 0; r < 4; r++) s.norm[r] = sqrt(squares[1 - i]);
        expect_named("norm_of_part",
                     i ? "the squares of up are left out" : "the squares of down are left out");
    }
    for (int64_t r = 0; r < 4; r++) s.norm[r] = sqrt(squares[0] + 1.7 * squares[1]);
    expect_named("unknown", "norm wrong: got");
}

/* ---- numbers that give a step where no mistake does ---- */

static void step_with_decay(double decay) {
    double meant = s.decay;
    s.decay = decay;
    each_element(step_right);
    s.decay = meant;
}

static void step_of(int64_t t) {
    how.t = t;
    each_element(step_right);
    how.t = s.step;
}

/* bf16 hides whether the update is 1.5 or 1.37 times the right one, but not from the mean over
   all elements: step 2's update, and that of step 1 and of another learning rate. */
static void test_numbers_in_bf16(void) {
    make(4, 2, 0);
    s.bf16 = 1;
    s.step = how.t = 2;
    s.lr = 0.03;
    s.eps = 1e-8;
    s.decay = 0;
    for (int i = 0; i < TENSORS; i++)
        for (int64_t at = 0; at < sizes[i]; at++)
            for (int64_t r = 0; r < s.world; r++)
                s.of[r][PARAM][i][at] = floor(s.of[r][PARAM][i][at] * 16) / 16;
    finish();
    expect(0, "right: ", "step right");
    step_of(1);
    expect_named("another_step_number", "bias corrections of step 1 give it, where step is 2");
    each_element(step_longer);
    expect_named("another_lr", "times the right step, as with lr 0.04");
}

static void test_other_numbers(int sharded) {
    for (s.sgd = 0; s.sgd < 2; s.sgd++) {
        int use_sgd = s.sgd;
        make(4, 2, sharded);
        s.sgd = use_sgd;
        finish();
        step_with_decay(0.05);
        expect_named("another_decay", "weight decay 0.05 gives it, where it is 0.2");
        step_with_decay(0.4);
        expect_named("another_decay", "weight decay 0.4 gives it, where it is 0.2");
        step_with_decay(-0.1);
        expect_named("unknown", "step wrong");
        s.decay = 0;
        step_with_decay(0.1);
        s.decay = 0.2;
    }
    make(4, 2, sharded);
    how.decay_not[1] = 1;
    each_element(step_right);
    expect_named("another_decay", "decay acts on all parameters but up; if that is meant");
    s.of[0][AFTER][0][0] += 0.1;
    expect_named("unknown", "step wrong");
    make(4, 2, sharded);
    s.eps = 1e-8;
    finish();
    step_of(14);
    expect_named("another_step_number", "bias corrections of step 14 give it, where step is 7");
    step_of(8);
    expect_named("another_step_number", "bias corrections of step 8 give it");
    step_of(1);
    s.of[0][AFTER][0][0] += 0.1;
    expect_named("unknown", "step wrong");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_right());
    TEST(test_reduction());
    TEST(test_norm());
    TEST(test_norms_nearly_equal(0));
    TEST(test_norms_nearly_equal(1));
    TEST(test_clip(0));
    TEST(test_clip(1));
    TEST(test_equal_ranks());
    TEST(test_clip_by_wrong_norms(0));
    TEST(test_clip_by_wrong_norms(1));
    TEST(test_own_settings(0));
    TEST(test_own_settings(1));
    TEST(test_own_settings_refused());
    TEST(test_shards());
    TEST(test_clip_beside_rounding());
    TEST(test_adamw());
    TEST(test_shows_nothing());
    TEST(test_files());
    TEST(test_counts());
    TEST(test_norm_limits());
    TEST(test_step_limits());
    TEST(test_some_parameters());
    TEST(test_some_norms());
    TEST(test_other_numbers(0));
    TEST(test_other_numbers(1));
    TEST(test_numbers_in_bf16());
    return test_summary();
}
