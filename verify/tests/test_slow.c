/* SPDX-License-Identifier: MIT OR Unlicense */
/*
 * test_slow.c - checks slow.h against what it cannot have copied from itself: values worked out
 * by hand or by Hugging Face's and PyTorch's own code, finite differences, and properties that
 * must hold whatever the values.
 *
 * cc -std=gnu11 -O2 -Iverify verify/tests/test_slow.c -lm
 */
#include "second/golden_families.h"
#include "second/slow.h"
#include "support/test.h"

enum { TOKENS = 8, OTHER_TOKENS = 3, VOCAB = 9 };

/* Written so that a NaN fails. */
static void check(const char *name, double error, double tolerance) {
    test_expect(error <= tolerance, "off by %.3g, allowed %.3g", error, tolerance);
    test_end("%s", name);
}

static void check_of(const char *model, const char *name, double error, double tolerance) {
    char both[80];
    snprintf(both, sizeof both, "%s: %s", model, name);
    check(both, error, tolerance);
}

/* The sum of |a - b|, which a NaN cannot slip through as it can through a maximum. */
static double distance(int64_t count, const double *a, const double *b) {
    double sum = 0;
    for (int64_t k = 0; k < count; k++) sum += fabs(a[k] - b[k]);
    return sum;
}

static double size(int64_t count, const double *a) {
    double sum = 0;
    for (int64_t k = 0; k < count; k++) sum += fabs(a[k]);
    return sum;
}

static double inner(int64_t count, const double *a, const double *b) {
    double sum = 0;
    for (int64_t k = 0; k < count; k++) sum += a[k] * b[k];
    return sum;
}

static double *reals(int64_t count) { return slow_allocate(count, sizeof(double)); }

/* Numbers without a pattern that any language's sin can reproduce. */
static double *wave(int64_t count, double amplitude) {
    double *x = reals(count);
    for (int64_t k = 0; k < count; k++)
        x[k] = amplitude * sin(0.37 * (double)(k + 1) * (double)(k + 1));
    return x;
}

/* Without a pattern either, and not along `wave`. */
static double *other_wave(int64_t count) {
    double *x = reals(count);
    for (int64_t k = 0; k < count; k++) x[k] = cos(0.53 * (double)(k + 1) * (double)(k + 1));
    return x;
}

/* ---- a tiny model and two rows: three documents, one of a single token, and a row of its own ---- */

static const slow_config untied = {.layers = 2,
                                   .hidden = 8,
                                   .heads = 4,
                                   .kv_heads = 2,
                                   .head_dim = 6,
                                   .intermediate = 7,
                                   .vocab = VOCAB,
                                   .rope_theta = 100,
                                   .rms_eps = 1e-5};
static const slow_config tied = {.layers = 1,
                                 .hidden = 6,
                                 .heads = 3,
                                 .kv_heads = 1,
                                 .head_dim = 2,
                                 .intermediate = 5,
                                 .vocab = VOCAB,
                                 .rope_theta = 1e4,
                                 .rms_eps = 1e-6,
                                 .tied = true};

/* With heads wide enough for elements that stay, that are in between and that are slowed
   down. */
static slow_config scaled(int rope) {
    slow_config c = tied;
    c.head_dim = 8;
    c.rope_theta = 10;
    c.rope = rope;
    c.rope_factor = 3;
    c.rope_low = .5;
    c.rope_high = 2;
    c.rope_first = 16;
    c.rope_attention = 1.7;
    return c;
}

static const int64_t documents[] = {0, 4, 5, TOKENS}, one_document[] = {0, OTHER_TOKENS};
static const int32_t ids[TOKENS] = {3, 1, 4, 1, 5, 8, 2, 6},
                     other_ids[OTHER_TOKENS] = {0, 7, 7};
static const int32_t targets[TOKENS] = {1, 4, 1, SLOW_IGNORED, 7, 2, 6, SLOW_IGNORED};
static const int32_t other_targets[OTHER_TOKENS] = {7, 7, SLOW_IGNORED};
static const double weights[TOKENS] = {1, .5, 2, 1, 1, 0, 1.5, 1};
static const double entropy_seeds[TOKENS] = {.1, 0, -.2, .3, .1, .1, 0, .2};
static const double logp_seeds[TOKENS] = {0, .3, -.1, .2, .5, -.4, 0, 1};

static const slow_row rows[] = {
    {TOKENS, 3, documents, ids, targets, weights, entropy_seeds, logp_seeds},
    {OTHER_TOKENS, 1, one_document, other_ids, other_targets, NULL, NULL, NULL},
};

static slow_problem problem_of(const slow_config *config) {
    return (slow_problem){config, 2, rows, {.smoothing = .1, .zloss = .01, .count = 7}};
}

static double *logits_of(const slow_config *config, const slow_row *row) {
    double *parameters = wave(slow_parameters(config, NULL), .5);
    double *logits = reals(row->tokens * config->vocab);
    slow_logits_real(config, parameters, row, logits);
    free(parameters);
    return logits;
}

/* ---- the parts ---- */

static void test_rmsnorm(void) {
    slow_complex x[] = {3, 4}, gain[] = {1, 10}, y[2];
    double got[2], want[] = {3 / sqrt(13), 40 / sqrt(13)};
    slow_rmsnorm(1, 2, .5, x, gain, y);
    slow_real_parts(2, y, got);
    check("rmsnorm", distance(2, got, want), 1e-14);
}

static void test_silu(void) {
    double got[3] = {creal(slow_silu(1)), creal(slow_silu(-1)), creal(slow_silu(-800))};
    double want[3] = {.7310585786300049, -.2689414213699951, 0};
    check("silu", distance(3, got, want), 1e-14);
    check("silu slope at 0", fabs(cimag(slow_silu(SLOW_STEP * _Complex_I)) / SLOW_STEP - .5),
          1e-14);
}

static double tanh_slope(double x) {
    return cimag(slow_tanh(x + SLOW_STEP * _Complex_I)) / SLOW_STEP;
}

/* The slope at 10 is 4 exp(-20) / (1 + exp(-20))^2, far below what 1 - tanh^2 could tell
   from rounding. */
static void test_tanh(void) {
    static const double x[] = {0, 1e-9, .5, -2, 20, 1e6, -1e6};
    double slope = 4 * exp(-20) / ((1 + exp(-20)) * (1 + exp(-20))), error = 0;
    for (int k = 0; k < 7; k++) error += fabs(creal(slow_tanh(x[k])) - tanh(x[k]));
    check("tanh", error, 1e-15);
    check("tanh of little", fabs(creal(slow_tanh(1e-9)) / 1e-9 - 1), 1e-15);
    check("tanh slope", fabs(tanh_slope(-.5) - .7864477329659274) + fabs(tanh_slope(0) - 1),
          1e-15);
    check("tanh slope, either side of 1", fabs(tanh_slope(1 - 1e-15) - tanh_slope(1 + 1e-15)),
          1e-14);
    check("tanh slope where flat",
          fabs(tanh_slope(10) / slope - 1) + fabs(tanh_slope(-10) / slope - 1), 1e-13);
    check("tanh slope where flatter", fabs(tanh_slope(1e6)) + fabs(tanh_slope(-1e6)), 0);
}

/* Position 3, theta 16, head_dim 4: element 0 turns with 2 by 3 radians, element 1 with 3 by
   3/4. */
static void test_rope(void) {
    slow_complex x[] = {1, 2, 10, 20};
    double got[4], want[] = {cos(3) - 10 * sin(3), 2 * cos(.75) - 20 * sin(.75),
                             10 * cos(3) + sin(3), 20 * cos(.75) + 2 * sin(.75)};
    slow_rope(&(slow_config){.head_dim = 4, .rope_theta = 16}, 3, x);
    slow_real_parts(4, x, got);
    check("rope", distance(4, got, want), 1e-13);
}

/* ---- scaled rotary embedding ---- */

enum { GOLDEN_ELEMENTS = 5 };

typedef struct {
    const char *name;
    slow_config config;
    double attention;
    struct {
        int64_t element;
        double frequency;
    } want[GOLDEN_ELEMENTS];
} golden_rope;

/*
 * By the formulas alone, in Python's doubles.  llama3's elements are fast, in between and slow,
 * yarn's before, on and after the ramp, which then is cut off by the first element, by
 * head_dim - 1 and by having no length.
 */
static const golden_rope golden_ropes[] = {
    {"linear",
     {.head_dim = 10, .rope_theta = 1e4, .rope = SLOW_ROPE_LINEAR, .rope_factor = 4},
     1,
     {{0, .25},
      {1, .039622329811527836},
      {2, .0062797160787739486},
      {3, .00099526792638374335},
      {4, .00015773933612004825}}},
    {"linear, more elements",
     {.head_dim = 128, .rope_theta = 5e5, .rope = SLOW_ROPE_LINEAR, .rope_factor = 2.5},
     1,
     {{0, .40000000000000002},
      {1, .32584689354261787},
      {17, .012253808357289616},
      {40, .00010969927027048292},
      {63, 9.8205631645264363e-07}}},
    {"llama3",
     {.head_dim = 128,
      .rope_theta = 5e5,
      .rope = SLOW_ROPE_LLAMA3,
      .rope_factor = 8,
      .rope_low = 1,
      .rope_high = 4,
      .rope_first = 8192},
     1,
     {{0, 1},
      {28, .0032114459947525909},
      {29, .0021665707635033591},
      {34, .00017850781276799641},
      {35, 9.5562123539646833e-05}}},
    {"llama3, few elements",
     {.head_dim = 16,
      .rope_theta = 1e4,
      .rope = SLOW_ROPE_LLAMA3,
      .rope_factor = 5,
      .rope_low = .75,
      .rope_high = 3,
      .rope_first = 300},
     1,
     {{0, 1},
      {2, .10000000000000001},
      {3, .014868342156356582},
      {4, .002},
      {7, 6.3245553203367591e-05}}},
    {"yarn",
     {.head_dim = 128,
      .rope_theta = 1e6,
      .rope = SLOW_ROPE_YARN,
      .rope_factor = 4,
      .rope_low = 1,
      .rope_high = 32,
      .rope_first = 32768},
     1.1386294361119891,
     {{0, 1},
      {23, .0069783058485986633},
      {24, .0053753214907901019},
      {39, 6.4903943208370293e-05},
      {40, 4.4456985250973067e-05}}},
    {"yarn, exact, its own attention",
     {.head_dim = 128,
      .rope_theta = 1e6,
      .rope = SLOW_ROPE_YARN,
      .rope_factor = 4,
      .rope_low = 1,
      .rope_high = 32,
      .rope_first = 32768,
      .rope_attention = .8,
      .rope_exact = true},
     .8,
     {{23, .0069783058485986633},
      {24, .0055172704751341225},
      {31, .00081172537458141115},
      {39, 6.1878068124506951e-05},
      {40, 4.4456985250973067e-05}}},
    {"yarn, few elements, its own attention",
     {.head_dim = 16,
      .rope_theta = 100,
      .rope = SLOW_ROPE_YARN,
      .rope_factor = 3,
      .rope_low = .5,
      .rope_high = 4,
      .rope_first = 64,
      .rope_attention = 1.3},
     1.3,
     {{0, 1},
      {2, .27406406388125959},
      {4, .060000000000000012},
      {5, .026242595175549624},
      {7, .0059275980334630761}}},
    {"yarn, few elements, exact",
     {.head_dim = 16,
      .rope_theta = 100,
      .rope = SLOW_ROPE_YARN,
      .rope_factor = 3,
      .rope_low = .5,
      .rope_high = 4,
      .rope_first = 64,
      .rope_exact = true},
     1.109861228866811,
     {{1, .56234132519034907},
      {2, .29427030296897738},
      {4, .056146128347562635},
      {5, .021195191291131291},
      {7, .0059275980334630761}}},
    {"yarn, all beyond",
     {.head_dim = 10,
      .rope_theta = 100,
      .rope = SLOW_ROPE_YARN,
      .rope_factor = 2.5,
      .rope_low = 1,
      .rope_high = 32,
      .rope_first = 5},
     1.0916290731874154,
     {{0, 1},
      {1, .15924286822139888},
      {2, .063395727698444537},
      {3, .025238293779207732},
      {4, .010047545726038318}}},
    {"yarn, wider than the head",
     {.head_dim = 10,
      .rope_theta = 10,
      .rope = SLOW_ROPE_YARN,
      .rope_factor = 2,
      .rope_low = .001,
      .rope_high = 50,
      .rope_first = 200},
     1.0693147180559945,
     {{0, 1},
      {1, .59590415867573798},
      {2, .35387304049199753},
      {3, .20932386929246502},
      {4, .12326947052475326}}},
    {"yarn, one and the same turns",
     {.head_dim = 12,
      .rope_theta = 100,
      .rope = SLOW_ROPE_YARN,
      .rope_factor = 2,
      .rope_low = 2,
      .rope_high = 2,
      .rope_first = 100,
      .rope_exact = true},
     1.0693147180559945,
     {{0, 1},
      {2, .21544346900318839},
      {3, .050000000000000003},
      {4, .023207944168063897},
      {5, .010772173450159416}}},
    {"yarn, faster",
     {.head_dim = 10,
      .rope_theta = 100,
      .rope = SLOW_ROPE_YARN,
      .rope_factor = .5,
      .rope_low = 1,
      .rope_high = 4,
      .rope_first = 64},
     1,
     {{0, 1},
      {1, .3981071705534972},
      {2, .23773397886916703},
      {3, .12619146889603866},
      {4, .050237728630191589}}},
};

/* Where position 1 turns the unit vector along an element: its angle is the frequency. */
static slow_complex turned(const slow_config *config, int64_t element) {
    slow_complex *x = slow_array(config->head_dim);
    x[element] = 1;
    slow_rope(config, 1, x);
    slow_complex end = x[element] + x[element + config->head_dim / 2] * _Complex_I;
    free(x);
    return end;
}

static void test_golden_rope(const golden_rope *g) {
    double frequency = 0, attention = 0;
    for (int k = 0; k < GOLDEN_ELEMENTS; k++) {
        slow_complex end = turned(&g->config, g->want[k].element);
        frequency += fabs(carg(end) / g->want[k].frequency - 1);
        attention += fabs(cabs(end) / g->attention - 1);
    }
    check_of(g->name, "rope frequencies", frequency, 1e-14);
    check_of(g->name, "rope attention factor", attention, 1e-14);
}

static void test_golden_ropes(void) {
    for (size_t k = 0; k < sizeof golden_ropes / sizeof *golden_ropes; k++)
        test_golden_rope(&golden_ropes[k]);
}

/* ---- masks, positions, parameters ---- */

static void test_mask(void) {
    static const int64_t ends[] = {0, 2, 3};
    static const char *const causal = "1000"
                                      "1100"
                                      "0010"
                                      "0000",
                             *const full = "1100"
                                           "1100"
                                           "0010"
                                           "0000";
    bool mask[2][16];
    int wrong = 0;
    slow_mask(4, 2, ends, true, mask[0]);
    slow_mask(4, 2, ends, false, mask[1]);
    for (int k = 0; k < 16; k++)
        wrong += (mask[0][k] != (causal[k] == '1')) + (mask[1][k] != (full[k] == '1'));
    check("mask", wrong, 0);
}

/* Documents of four tokens and of three, then padding; the prefixes count from each
   document's start. */
static void test_mask_general(void) {
    static const int64_t ends[] = {0, 4, 7}, prefixes[] = {2, 9}, other_prefixes[] = {3, 2};
    static const int64_t none[] = {0, 0};
    static const char causal[] = "10000000"
                                 "11000000"
                                 "11100000"
                                 "11110000"
                                 "00001000"
                                 "00001100"
                                 "00001110"
                                 "00000000";
    static const char full[] = "11110000"
                               "11110000"
                               "11110000"
                               "11110000"
                               "00001110"
                               "00001110"
                               "00001110"
                               "00000000";
    static const char full_window[] = "11000000"
                                      "11100000"
                                      "01110000"
                                      "00110000"
                                      "00001100"
                                      "00001110"
                                      "00000110"
                                      "00000000";
    static const struct {
        const char *name;
        bool causal;
        int64_t window;
        const int64_t *prefix_lens;
        const char *want;
    } masks[] = {
        {"causal", true, 0, NULL, causal},
        {"window wider than any document", true, 4, NULL, causal},
        {"empty prefixes", true, 0, none, causal},
        {"full", false, 0, NULL, full},
        {"prefix without causality", false, 0, other_prefixes, full},
        {"full window", false, 2, NULL, full_window},
        {"prefix and full window", false, 2, other_prefixes, full_window},
        {"causal window", true, 2, NULL,
         "10000000"
         "11000000"
         "01100000"
         "00110000"
         "00001000"
         "00001100"
         "00000110"
         "00000000"},
        {"window of one", true, 1, NULL,
         "10000000"
         "01000000"
         "00100000"
         "00010000"
         "00001000"
         "00000100"
         "00000010"
         "00000000"},
        {"prefix, one longer than its document", true, 0, prefixes,
         "11000000"
         "11000000"
         "11100000"
         "11110000"
         "00001110"
         "00001110"
         "00001110"
         "00000000"},
        {"prefix and window", true, 2, other_prefixes,
         "11100000"
         "11100000"
         "01100000"
         "00110000"
         "00001100"
         "00001100"
         "00000110"
         "00000000"},
    };
    for (size_t m = 0; m < sizeof masks / sizeof *masks; m++) {
        bool mask[64];
        int wrong = 0;
        slow_mask_general(8, 2, ends, masks[m].causal, masks[m].window, masks[m].prefix_lens,
                          mask);
        for (int k = 0; k < 64; k++) wrong += mask[k] != (masks[m].want[k] == '1');
        check_of("mask", masks[m].name, wrong, 0);
    }
}

/* RoPE being relative, no logit would show a position counted from elsewhere. */
static void test_position(void) {
    static const int64_t want[] = {0, 1, 2, 3, 0, 0, 1, 2, 0};
    int wrong = 0;
    for (int64_t t = 0; t <= TOKENS; t++) wrong += slow_position(3, documents, t) != want[t];
    check("position in the document", wrong, 0);
}

static void test_parameter_table(void) {
    slow_tensor table[21];
    int64_t count = slow_parameters(&untied, table);
    const slow_tensor *k_proj = &table[12];
    check("parameter count", (double)llabs(count - 1672), 0);
    check("tensor count", (double)llabs(slow_tensors(&untied) - 21), 0);
    check("tensor name", abs(strcmp(k_proj->name, "model.layers.1.self_attn.k_proj.weight")),
          0);
    check("tensor place", (double)llabs(k_proj->offset - (72 + 760 + 8 + 192)), 0);
    check("tensor shape", (double)(llabs(k_proj->rows - 12) + llabs(k_proj->cols - 8)), 0);
    check("tied parameter count", (double)llabs(slow_parameters(&tied, NULL) - 258), 0);
}

/* ---- attention ---- */

/* With q = 0 every key in sight counts the same; the last query and key are padding. */
static void test_uniform_attention(void) {
    slow_shape s = {4, 4, 2, 1, 1};
    bool mask[16];
    double q[8] = {0}, k[4] = {5, 6, 7, 8}, v[4] = {1, 3, 8, 9}, out[8], lse[8];
    double want_out[8] = {1, 1, 2, 2, 8, 8, 0, 0}, want_lse[6] = {0, 0, log(2), log(2), 0, 0};
    slow_mask(4, 2, (const int64_t[]){0, 2, 3}, true, mask);
    slow_attention_real(&s, mask, q, k, v, out, lse);
    check("uniform attention, out", distance(8, out, want_out), 1e-14);
    check("uniform attention, lse", distance(6, lse, want_lse), 1e-14);
    check("fully masked lse is -inf", lse[6] == -INFINITY && lse[7] == -INFINITY ? 0 : 1, 0);
}

/* Two keys, scores 3*4/sqrt(2) and 0. */
static void test_attention_scale(void) {
    slow_shape s = {1, 2, 1, 1, 2};
    bool mask[2] = {true, true};
    double q[2] = {3, 0}, k[4] = {4, 9, 0, 9}, v[4] = {1, 0, 0, 1}, out[2], lse[1];
    double score = 12 / sqrt(2);
    double want[2] = {1 / (1 + exp(-score)), 1 / (1 + exp(score))};
    slow_attention_real(&s, mask, q, k, v, out, lse);
    check("attention scale", distance(2, out, want), 1e-14);
    check("attention lse", fabs(lse[0] - log(1 + exp(score))), 1e-14);
}

/* Fourth-order central difference of f along coordinate k. */
static double finite_difference(slow_scalar *f, const void *context, int64_t count, double *x,
                                int64_t k) {
    static const double coefficient[] = {1, -8, 8, -1}, step[] = {-2, -1, 1, 2}, h = 1e-3;
    double here = x[k], sum = 0;
    for (int i = 0; i < 4; i++) {
        x[k] = here + step[i] * h;
        sum += coefficient[i] * slow_value_of(f, context, count, x);
    }
    x[k] = here;
    return sum / (12 * h);
}

/* sum(dout * out) of q, k, v and the sinks laid end to end: what finite differences may be
   taken of. */
typedef struct {
    const slow_shape *shape;
    const bool *mask;
    slow_extras extras;
    const double *dout;
} attention_problem;

static slow_complex attention_loss(const slow_complex *z, const void *context) {
    const attention_problem *p = context;
    const slow_shape *s = p->shape;
    int64_t q = s->queries * s->heads * s->head_dim, kv = s->keys * s->kv_heads * s->head_dim;
    double *x = reals(q + 2 * kv + s->heads), *out = reals(q);
    double *lse = reals(s->queries * s->heads);
    slow_extras extras = p->extras;
    slow_real_parts(q + 2 * kv + s->heads, z, x);
    if (extras.sinks) extras.sinks = x + q + 2 * kv;
    slow_attention_extra_real(s, p->mask, &extras, x, x + q, x + q + kv, out, lse);
    double loss = inner(q, p->dout, out);
    free(x);
    free(out);
    free(lse);
    return loss;
}

/* The four gradients' errors, each relative to itself, so that a small one cannot hide,
   unless it is all 0. */
static void test_attention_gradient(const char *name, const slow_shape *s, const bool *mask,
                                    const slow_extras *extras) {
    int64_t q = s->queries * s->heads * s->head_dim, kv = s->keys * s->kv_heads * s->head_dim;
    int64_t begin[] = {0, q, q + kv, q + 2 * kv, q + 2 * kv + s->heads}, count = begin[4];
    double *x = wave(count, 1), *dout = wave(q, .7), *gradient = reals(count);
    double *difference = reals(count);
    attention_problem problem = {s, mask, *extras, dout};
    if (extras->sinks) memcpy(x + begin[3], extras->sinks, (size_t)s->heads * sizeof *x);
    slow_attention_extra_gradient(s, mask, extras, x, x + begin[1], x + begin[2], dout,
                                  gradient, gradient + begin[1], gradient + begin[2],
                                  gradient + begin[3]);
    double error = 0;
    for (int64_t k = 0; k < count; k++)
        difference[k] = finite_difference(attention_loss, &problem, count, x, k);
    for (int part = 0; part < 4; part++) {
        int64_t at = begin[part], n = begin[part + 1] - at;
        double whole = size(n, gradient + at);
        error += distance(n, gradient + at, difference + at) / (whole > 0 ? whole : 1);
    }
    check_of("attention gradient", name, error, 1e-9);
    free(x);
    free(dout);
    free(gradient);
    free(difference);
}

/* Four query heads on two kv heads; documents of three tokens and of two, then padding. */
enum { N = 6, HEADS = 4, KV_HEADS = 2, DIM = 3, Q = N * HEADS * DIM, KV = N * KV_HEADS * DIM };
static const slow_shape grouped = {N, N, HEADS, KV_HEADS, DIM};
static const int64_t grouped_ends[] = {0, 3, 5}, grouped_prefixes[] = {2, 2};
static const double sinks[HEADS] = {.5, -1, 0, 2};

/* Inverted dropout at a half, off and on without a pattern. */
static const double *dropouts(void) {
    static double factor[HEADS * N * N];
    for (int k = 0; k < HEADS * N * N; k++)
        factor[k] = sin(1.7 * (k + 1) * (k + 1)) > 0 ? 2 : 0;
    return factor;
}

static void test_attention_gradients(void) {
    bool causal[N * N], full[N * N], window[N * N], prefix[N * N], blind[N * N] = {false};
    slow_extras none = {0}, sunk = {.sinks = sinks}, all = {.8, 1.5, sinks, dropouts()};
    slow_mask(N, 2, grouped_ends, true, causal);
    slow_mask(N, 2, grouped_ends, false, full);
    slow_mask_general(N, 2, grouped_ends, true, 2, NULL, window);
    slow_mask_general(N, 2, grouped_ends, true, 2, grouped_prefixes, prefix);
    test_attention_gradient("causal", &grouped, causal, &none);
    test_attention_gradient("full", &grouped, full, &none);
    test_attention_gradient("window", &grouped, window, &none);
    test_attention_gradient("prefix", &grouped, prefix, &none);
    test_attention_gradient("scale", &grouped, causal, &(slow_extras){.scale = -.3});
    test_attention_gradient("softcap", &grouped, causal, &(slow_extras){.softcap = .9});
    test_attention_gradient("sinks", &grouped, causal, &sunk);
    test_attention_gradient("dropout", &grouped, causal, &(slow_extras){.dropout = dropouts()});
    test_attention_gradient("all together", &grouped, prefix, &all);
    test_attention_gradient("all together, full", &grouped, full, &all);
    test_attention_gradient("nothing to see", &grouped, blind, &none);
    test_attention_gradient("nothing to see but sinks", &grouped, blind, &all);
}

/* Queries that are not the keys, one of them blind, every one with a mask no rule would
   make. */
static const slow_shape oblong = {3, 5, HEADS, KV_HEADS, DIM};
static const bool oblong_mask[15] = {1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1};

/* The formula as one would write it, without a thought for range. */
static void plain_attention(const slow_extras *x, const double *q, const double *k,
                            const double *v, double *out, double *lse) {
    for (int i = 0; i < 3; i++)
        for (int h = 0; h < HEADS; h++) {
            double sum = exp(x->sinks[h]), value[DIM] = {0};
            for (int j = 0; j < 5; j++) {
                double score = 0;
                for (int e = 0; e < DIM; e++)
                    score += x->scale * q[(i * HEADS + h) * DIM + e] *
                             k[(j * KV_HEADS + h / 2) * DIM + e];
                double term = oblong_mask[i * 5 + j] *
                              exp(x->softcap * tanh(score / x->softcap));
                for (int e = 0; e < DIM; e++)
                    value[e] += x->dropout[(h * 3 + i) * 5 + j] * term *
                                v[(j * KV_HEADS + h / 2) * DIM + e];
                sum += term;
            }
            for (int e = 0; e < DIM; e++) out[(i * HEADS + h) * DIM + e] = value[e] / sum;
            lse[i * HEADS + h] = log(sum);
        }
}

/* The sink only enlarges the sum: its derivative is minus its probability times dout . out. */
static void test_attention_together(void) {
    enum { ROWS = 3 * HEADS, QS = ROWS * DIM, KVS = 5 * KV_HEADS * DIM };
    slow_extras all = {.7, 1.2, sinks, dropouts()};
    double *q = wave(QS, 2), *k = wave(KVS, 1.5), *v = wave(KVS, 1), *dout = wave(QS, .7);
    double out[QS], lse[ROWS], want_out[QS], want_lse[ROWS], want_dsinks[HEADS] = {0};
    double dq[QS], dk[KVS], dv[KVS], dsinks[HEADS];
    plain_attention(&all, q, k, v, want_out, want_lse);
    for (int r = 0; r < ROWS; r++)
        want_dsinks[r % HEADS] -= exp(sinks[r % HEADS] - want_lse[r]) *
                                  inner(DIM, dout + r * DIM, want_out + r * DIM);
    slow_attention_extra_real(&oblong, oblong_mask, &all, q, k, v, out, lse);
    slow_attention_extra_gradient(&oblong, oblong_mask, &all, q, k, v, dout, dq, dk, dv,
                                  dsinks);
    check("all together, out", distance(QS, out, want_out), 1e-14);
    check("all together, lse", distance(ROWS, lse, want_lse), 1e-14);
    check("all together, sinks' gradient", distance(HEADS, dsinks, want_dsinks), 1e-14);
    test_attention_gradient("all together, oblong", &oblong, oblong_mask, &all);
    free(q);
    free(k);
    free(v);
    free(dout);
}

/* Two keys with scores 12 and 0 before the scale or the cap; out[0] is the first one's
   probability. */
static double first_probability(const slow_extras *extras, double factor, double *lse) {
    slow_shape s = {1, 2, 1, 1, 2};
    bool mask[2] = {true, true};
    double q[2] = {3 * factor, 0}, k[4] = {4, 9, 0, 9}, v[4] = {1, 0, 0, 1}, out[2];
    slow_attention_extra_real(&s, mask, extras, q, k, v, out, lse);
    return out[0];
}

static void test_scale_and_softcap(void) {
    slow_extras quarter = {.scale = .25}, cap = {.scale = .25, .softcap = 2},
                loose = {.softcap = 1e9};
    double lse, score = 2 * tanh(1.5);
    check("scale of its own", fabs(first_probability(&quarter, 1, &lse) - 1 / (1 + exp(-3))),
          1e-15);
    check("scale of its own, lse", fabs(lse - log(1 + exp(3))), 1e-14);
    check("softcap", fabs(first_probability(&cap, 1, &lse) - 1 / (1 + exp(-score))), 1e-15);
    check("softcap, lse", fabs(lse - log(1 + exp(score))), 1e-14);
    check("softcap, far above", fabs(first_probability(&cap, 1e6, &lse) - 1 / (1 + exp(-2))),
          1e-15);
    check("softcap, far below", fabs(first_probability(&cap, -1e6, &lse) - 1 / (1 + exp(2))),
          1e-15);
    score = 12 / sqrt(2);
    check("softcap out of reach",
          fabs(first_probability(&loose, 1, &lse) - 1 / (1 + exp(-score))), 1e-14);
}

/*
 * The first probability, p = 1 / (1 + exp(-s)) with s = 2 tanh(3 f / 2), has by its score
 * before the cap, 3 f, the slope p (1 - p) / cosh^2, and by the other one -p (1 - p).  Far out
 * the cap lets nothing through.
 */
static void test_softcap_gradient(const char *name, double f) {
    slow_shape s = {1, 2, 1, 1, 2};
    slow_extras cap = {.scale = .25, .softcap = 2};
    bool mask[2] = {true, true};
    double q[2] = {3 * f, 0}, k[4] = {4, 9, 0, 9}, v[4] = {1, 0, 0, 1}, dout[2] = {1, 0};
    double dq[2], dk[4], dv[4];
    double p = 1 / (1 + exp(-2 * tanh(1.5 * f)));
    double slope = p * (1 - p) / (cosh(1.5 * f) * cosh(1.5 * f));
    double other = -p * (1 - p), want_dq[2] = {.25 * 4 * slope, .25 * 9 * (slope + other)};
    double want_dk[4] = {.25 * 3 * f * slope, 0, .25 * 3 * f * other, 0};
    double want_dv[4] = {p, 0, 1 - p, 0};
    slow_attention_extra_gradient(&s, mask, &cap, q, k, v, dout, dq, dk, dv, NULL);
    check_of(name, "q", distance(2, dq, want_dq), 1e-14);
    check_of(name, "k", distance(4, dk, want_dk) / fabs(f), 1e-14);
    check_of(name, "v", distance(4, dv, want_dv), 1e-14);
}

/* q = 0: every score is 0, so the sums are counts; the third query sees nothing.  v: 1, 3. */
static void test_sinks(void) {
    slow_shape s = {3, 2, 2, 1, 1};
    bool mask[6] = {true, true, true, false, false, false};
    double q[6] = {0}, k[2] = {5, 6}, v[2] = {1, 3};
    double sink[2] = {log(2), -.25}, nothing[2] = {-INFINITY, -INFINITY}, rest = exp(-.25);
    double out[6], lse[6], plain_out[6], plain_lse[6];
    double want_out[6] = {1, 4 / (2 + rest), 1. / 3, 1 / (1 + rest), 0, 0};
    double want_lse[6] = {log(4), log(2 + rest), log(3), log(1 + rest), sink[0], sink[1]};
    slow_attention_extra_real(&s, mask, &(slow_extras){.sinks = sink}, q, k, v, out, lse);
    check("sinks, out", distance(6, out, want_out), 1e-14);
    check("sinks, lse", distance(6, lse, want_lse), 1e-14);
    check("sinks alone",
          fabs(out[4]) + fabs(out[5]) + fabs(lse[4] - sink[0]) + fabs(lse[5] - sink[1]), 0);
    slow_attention_real(&s, mask, q, k, v, plain_out, plain_lse);
    slow_attention_extra_real(&s, mask, &(slow_extras){.sinks = nothing}, q, k, v, out, lse);
    check("sinks of -inf, out", distance(6, out, plain_out), 0);
    check("sinks of -inf, lse", distance(4, lse, plain_lse), 0);
    check("sinks of -inf alone", lse[4] == -INFINITY && lse[5] == -INFINITY ? 0 : 1, 0);
}

/* A sink a thousand above the scores must not overflow, nor a thousand below. */
static void test_far_sinks(void) {
    slow_shape s = {1, 1, 2, 1, 1};
    bool mask[1] = {true};
    double q[2] = {0}, k[1] = {5}, v[1] = {3}, sink[2] = {1000, -1000}, out[2], lse[2];
    double want_out[2] = {0, 3}, want_lse[2] = {1000, 0};
    slow_attention_extra_real(&s, mask, &(slow_extras){.sinks = sink}, q, k, v, out, lse);
    check("far sinks, out", distance(2, out, want_out), 0);
    check("far sinks, lse", distance(2, lse, want_lse), 0);
}

/* Uniform probabilities of a half; what is dropped still counts in the sum.  v: 1, 3. */
static void test_dropout(void) {
    slow_shape s = {2, 2, 2, 1, 1};
    bool mask[4] = {true, true, true, true};
    double q[4] = {0}, k[2] = {5, 6}, v[2] = {1, 3}, dout[4] = {1, 1, 1, 1};
    double out[4], lse[4], dq[4], dk[2], dv[2];
    double factor[8] = {2, 0, 0, 2, 0, 0, 1.5, 1}; /* head 0: queries 0 and 1; head 1 */
    double want_out[4] = {1, 0, 3, 2.25}, want_lse[4] = {log(2), log(2), log(2), log(2)};
    double want_dv[2] = {1.75, 1.5};
    slow_extras extras = {.dropout = factor};
    slow_attention_extra_real(&s, mask, &extras, q, k, v, out, lse);
    slow_attention_extra_gradient(&s, mask, &extras, q, k, v, dout, dq, dk, dv, NULL);
    check("dropout, out", distance(4, out, want_out), 1e-14);
    check("dropout, lse", distance(4, lse, want_lse), 1e-14);
    check("dropout, v's gradient", distance(2, dv, want_dv), 1e-14);
}

/* Factors of 1 are no dropout, and without sinks there is no gradient by them. */
static void test_no_extras(void) {
    bool mask[N * N];
    double *x = wave(Q + 2 * KV, 1), ones[HEADS * N * N], got[2][Q], lse[2][N * HEADS], dout[Q];
    double gradient[2][Q + 2 * KV], dsinks[HEADS], none[HEADS] = {0};
    for (int k = 0; k < HEADS * N * N; k++) ones[k] = 1;
    for (int k = 0; k < Q; k++) dout[k] = sin(k);
    slow_extras extras = {.dropout = ones};
    slow_mask(N, 1, (const int64_t[]){0, N}, true, mask);
    slow_attention_real(&grouped, mask, x, x + Q, x + Q + KV, got[0], lse[0]);
    slow_attention_extra_real(&grouped, mask, &extras, x, x + Q, x + Q + KV, got[1], lse[1]);
    slow_attention_gradient(&grouped, mask, x, x + Q, x + Q + KV, dout, gradient[0],
                            gradient[0] + Q, gradient[0] + Q + KV);
    slow_attention_extra_gradient(&grouped, mask, &extras, x, x + Q, x + Q + KV, dout,
                                  gradient[1], gradient[1] + Q, gradient[1] + Q + KV, dsinks);
    check("no extras, out", distance(Q, got[0], got[1]), 0);
    check("no extras, lse", distance(N * HEADS, lse[0], lse[1]), 0);
    check("no extras, gradient", distance(Q + 2 * KV, gradient[0], gradient[1]), 0);
    check("no sinks, no gradient", distance(HEADS, dsinks, none), 0);
    free(x);
}

/* A query's output changes with a key, and with its value, just where the mask is true. */
static void test_mask_probes(void) {
    bool mask[N * N];
    double *x = wave(Q + 2 * KV, 1), *k = x + Q, *v = x + Q + KV, before[Q], after[Q];
    double lse[N * HEADS];
    slow_extras extras = {.8, 1.5, sinks, NULL};
    int wrong = 0;
    slow_mask_general(N, 2, grouped_ends, true, 2, grouped_prefixes, mask);
    slow_attention_extra_real(&grouped, mask, &extras, x, k, v, before, lse);
    for (int probe = 0; probe < 2 * N; probe++) {
        double *changed = (probe < N ? k : v) + probe % N * KV_HEADS * DIM;
        for (int e = 0; e < KV_HEADS * DIM; e++) changed[e] += 1;
        slow_attention_extra_real(&grouped, mask, &extras, x, k, v, after, lse);
        for (int r = 0; r < N * HEADS; r++)
            wrong += mask[r / HEADS * N + probe % N] ==
                     !(distance(DIM, before + r * DIM, after + r * DIM) > 0);
        for (int e = 0; e < KV_HEADS * DIM; e++) changed[e] -= 1;
        slow_attention_extra_real(&grouped, mask, &extras, x, k, v, before, lse);
    }
    check("mask probes", wrong, 0);
    free(x);
}

/* ---- the loss ---- */

static const double golden_logits[] = {1, -.5, 2, .25};
static const int32_t golden_target[] = {2};
static const slow_row golden_row = {.tokens = 1, .targets = golden_target};

static slow_complex golden_loss(const slow_complex *logits, const void *objective) {
    return slow_token_loss(objective, &golden_row, 0, 4, logits);
}

static void test_loss(void) {
    slow_complex x[] = {1, -.5, 2, .25};
    slow_token y = slow_token_of(4, x, 2);
    slow_objective plain = {0, 0, 1}, smooth = {.1, .01, 1};
    check("cross-entropy", fabs(creal(golden_loss(x, &plain)) - .484731134701968), 1e-14);
    check("smoothing and z-loss", fabs(creal(golden_loss(x, &smooth)) - .677720022819541),
          1e-14);
    check("entropy", fabs(creal(y.entropy) - 1.02496369175712), 1e-13);
    check("log-sum-exp", fabs(creal(y.lse) - 2.484731134701968), 1e-14);
}

static void test_loss_gradient(void) {
    slow_objective plain = {0, 0, 1}, smooth = {.1, 0, 1};
    double got[4], want[4];
    for (int j = 0; j < 4; j++) want[j] = exp(golden_logits[j] - 2.484731134701968) - (j == 2);
    slow_gradient_of(golden_loss, &plain, 4, golden_logits, got);
    check("softmax minus one-hot", distance(4, got, want), 1e-14);
    check("gradient row sums to 0", fabs(got[0] + got[1] + got[2] + got[3]), 1e-14);
    slow_gradient_of(golden_loss, &smooth, 4, golden_logits, got);
    check("smoothed gradient row sums to 0", fabs(got[0] + got[1] + got[2] + got[3]), 1e-14);
}

/* An ignored token has no loss but what is seeded on its entropy. */
static void test_ignored(void) {
    slow_complex x[] = {1, -.5, 2, .25};
    int32_t ignored[] = {SLOW_IGNORED};
    double two[] = {2};
    slow_row row = {.tokens = 1,
                    .targets = ignored,
                    .weights = two,
                    .entropy_seeds = two,
                    .logp_seeds = two};
    slow_objective all = {.1, .01, 3};
    check("ignored target",
          fabs(creal(slow_token_loss(&all, &row, 0, 4, x)) - 2 * 1.02496369175712), 1e-13);
    row.targets = golden_target;
    double want = 2 * 1.02496369175712 + 2 * .677720022819541 / 3 - 2 * .484731134701968;
    check("weight, count and seeds", fabs(creal(slow_token_loss(&all, &row, 0, 4, x)) - want),
          1e-13);
}

/* ---- the model ---- */

/*
 * What Hugging Face's LlamaForCausalLM (transformers 4.46.3 on torch 1.13.1, its float32 casts
 * made float64) gives for these parameters, documents and losses, a document at a time: the
 * last token's logits, the loss, and by autograd the gradient's norm and its inner product with
 * `wave`.
 */
typedef struct {
    const char *name;
    double logits[VOCAB], loss, norm, along;
} golden_model;

static const golden_model untied_golden = {"untied",
                                           {.0212368447635, -.0805253078313, -.3183179331194,
                                            -.3148428066085, -.4092205926557, -.0631412951693,
                                            -.5134410773107, -.0165461234281, -.3674105383608},
                                           2.98284935125998,
                                           2.09319660005484,
                                           -.86776594738032};
static const golden_model tied_golden = {"tied",
                                         {.0225915546048, -.1446345599979, .1798234984109,
                                          -.3865292018534, .5520682420690, .5076066998601,
                                          .5986122048387, -.3815325742301, .1558325924772},
                                         3.18776360366853,
                                         1.43847211097477,
                                         .37009943247117};

/* Of transformers 5.24 on torch 2.15, which gives the two above as well. */
static const golden_model linear_golden = {"linear",
                                           {.1145305812137, .3285948856156, .0566875455942,
                                            -.2593207762475, -.0981931717814, .1103015683120,
                                            -.3458577865361, .2215267147275, -.5930069354414},
                                           3.19428965591491,
                                           1.34016200542602,
                                           -.101862903003257};
static const golden_model llama3_golden = {"llama3",
                                           {.1143093299377, .3300433891961, .0545846899702,
                                            -.2584881259172, -.0986002521865, .1081664903166,
                                            -.3453805697298, .2222103158282, -.5934506612572},
                                           3.20198032026831,
                                           1.34696300622687,
                                           .0133344441182123};
static const golden_model yarn_golden = {"yarn",
                                         {.1210581746592, .3344252998584, .0446574420603,
                                          -.2520705067834, -.1088273943841, .1003067208802,
                                          -.3532575523545, .2179120304056, -.5990633352612},
                                         3.20775289792196,
                                         1.33005905246943,
                                         .105970831579418};

static void test_golden_model(const slow_config *config, const golden_model *want) {
    slow_problem p = problem_of(config);
    int64_t count = slow_parameters(config, NULL);
    double *x = wave(count, .5), *direction = wave(count, 1), *gradient = reals(count);
    double *logits = logits_of(config, &rows[0]), *last = logits + (TOKENS - 1) * VOCAB;
    slow_gradient(&p, x, gradient);
    double norm = slow_norm(count, gradient), along = inner(count, gradient, direction);
    check_of(want->name, "Hugging Face logits", distance(VOCAB, last, want->logits), 1e-12);
    check_of(want->name, "Hugging Face loss", fabs(slow_loss(&p, x) - want->loss), 1e-13);
    check_of(want->name, "Hugging Face gradient", fabs(norm - want->norm), 1e-13);
    check_of(want->name, "Hugging Face gradient, along", fabs(along - want->along), 1e-13);
    check_of(want->name, "directional derivative",
             fabs(slow_directional(&p, x, direction) - along), 1e-13);
    free(x);
    free(direction);
    free(gradient);
    free(logits);
}

/* The worst tensor's error, each relative to itself, so that one with a small gradient
   cannot hide. */
static double worst_tensor(const slow_config *config, const double *a, const double *b) {
    slow_tensor table[21];
    double worst = 0;
    slow_parameters(config, table);
    for (int64_t i = 0; i < slow_tensors(config); i++) {
        int64_t n = table[i].rows * table[i].cols, at = table[i].offset;
        double error = distance(n, a + at, b + at) / size(n, a + at);
        if (!(error <= worst)) worst = isnan(error) ? INFINITY : error;
    }
    return worst;
}

static void test_model_gradient(const char *name, const slow_config *config) {
    slow_problem p = problem_of(config);
    int64_t count = slow_parameters(config, NULL);
    double *x = wave(count, .5), *gradient = reals(count), *difference = reals(count);
    slow_gradient(&p, x, gradient);
    for (int64_t k = 0; k < count; k++)
        difference[k] = finite_difference(slow_loss_complex, &p, count, x, k);
    check_of(name, "gradient, finite differences", worst_tensor(config, gradient, difference),
             1e-8);
    free(x);
    free(gradient);
    free(difference);
}

static void test_scaled_model(int rope, const golden_model *want) {
    slow_config config = scaled(rope);
    test_golden_model(&config, want);
    test_model_gradient(want->name, &config);
}

/* Multiplies the weights of the first layer's queries and keys, or their gradient. */
static void lengthen(const slow_config *config, double factor, double *x) {
    slow_tensor table[21];
    slow_parameters(config, table);
    for (int64_t i = 2; i < 4; i++)
        for (int64_t k = 0; k < table[i].rows * table[i].cols; k++)
            x[table[i].offset + k] *= factor;
}

/* Yarn's attention factor does what longer weights of queries and keys would, by the chain rule
   in the gradient too. */
static void test_attention_factor(void) {
    slow_config within = scaled(SLOW_ROPE_YARN), without = within;
    without.rope_attention = 1;
    slow_problem p = problem_of(&within), q = problem_of(&without);
    int64_t count = slow_parameters(&within, NULL);
    double *x = wave(count, .5), *got = reals(count), *want = reals(count);
    double loss = slow_loss(&p, x);
    slow_gradient(&p, x, got);
    lengthen(&without, within.rope_attention, x);
    slow_gradient(&q, x, want);
    lengthen(&without, within.rope_attention, want);
    check("attention factor, loss", fabs(loss - slow_loss(&q, x)), 1e-14);
    check("attention factor, gradient", worst_tensor(&within, got, want), 1e-13);
    free(x);
    free(got);
    free(want);
}

/*
 * ---- the families ----
 *
 * Errors are sums over about a hundred numbers, none far above 1 and each some ten roundings of
 * float64 off: 1e-14 is what is seen. A mistake is off by 1e-3 or more.
 */

/* Documents of five tokens, of one and of three, then padding; and a row of its own. */
enum { PADDED = 11, SPOKEN = 9 };
static const int64_t padded_documents[] = {0, 5, 6, SPOKEN};
static const int32_t padded_ids[PADDED] = {3, 1, 4, 1, 5, 8, 2, 6, 2, 7, 0};
static const int32_t padded_targets[PADDED] = {
    1, 4, 1, SLOW_IGNORED, 7, 2, 6, 3, SLOW_IGNORED, SLOW_IGNORED, SLOW_IGNORED};
static const double padded_weights[PADDED] = {1, .5, 2, 1, 1, 0, 1.5, 1, 1, 1, 1};
static const double padded_entropy_seeds[PADDED] = {.1, 0, -.2, .3, .1, .1, 0, .2, .1, 0, 0};
static const double padded_logp_seeds[PADDED] = {0, .3, -.1, .2, .5, -.4, 0, 1, .2, 0, 0};
static const slow_row padded_rows[] = {
    {PADDED, 3, padded_documents, padded_ids, padded_targets, padded_weights,
     padded_entropy_seeds, padded_logp_seeds},
    {OTHER_TOKENS, 1, one_document, other_ids, other_targets, NULL, NULL, NULL},
};

static slow_config family_of(int64_t layers) {
    return (slow_config){.layers = layers,
                         .hidden = 8,
                         .heads = 4,
                         .kv_heads = 2,
                         .head_dim = 4,
                         .intermediate = 5,
                         .vocab = VOCAB,
                         .rope_theta = 100,
                         .rms_eps = 1e-5};
}

/* Every layer but the first has a window. */
static slow_config qwen2(void) {
    slow_config c = family_of(3);
    c.tied = c.qkv_bias = true;
    c.window = 2;
    c.window_from = 1;
    return c;
}

static slow_config llama_biases(void) {
    slow_config c = family_of(2);
    c.qkv_bias = c.o_bias = c.mlp_bias = true;
    return c;
}

/* With an eps that shows. */
static slow_config qwen3(void) {
    slow_config c = family_of(2);
    c.qk_norm = true;
    c.rms_eps = 1e-2;
    return c;
}

/* Of three layers the middle one does not turn, nor does yarn lengthen it. */
static slow_config smollm3(void) {
    slow_config c = family_of(3), yarn = scaled(SLOW_ROPE_YARN);
    c.tied = c.qkv_bias = c.o_bias = true;
    c.rope = yarn.rope;
    c.rope_theta = yarn.rope_theta;
    c.rope_factor = yarn.rope_factor;
    c.rope_low = yarn.rope_low;
    c.rope_high = yarn.rope_high;
    c.rope_first = yarn.rope_first;
    c.rope_attention = yarn.rope_attention;
    c.no_rope_every = 2;
    return c;
}

static slow_config mixtral(void) {
    slow_config c = family_of(2);
    c.window = 3;
    c.experts = 4;
    c.experts_per_token = 2;
    c.expert_intermediate = 3;
    c.topk_norm = c.mixtral_names = true;
    return c;
}

/* The second layer and the fourth have experts. */
static slow_config qwen3_moe(void) {
    slow_config c = family_of(4);
    c.tied = c.qkv_bias = c.o_bias = c.qk_norm = true;
    c.experts = 5;
    c.experts_per_token = 3;
    c.sparse_every = 2;
    c.expert_intermediate = 3;
    return c;
}

static slow_config qwen3_moe_normed(void) {
    slow_config c = family_of(2);
    c.qk_norm = c.topk_norm = true;
    c.experts = 3;
    c.experts_per_token = 2;
    c.sparse_every = 1;
    c.expert_intermediate = 2;
    return c;
}

static slow_problem family_problem(const slow_config *config, double balance) {
    return (slow_problem){config,
                          2,
                          padded_rows,
                          {.smoothing = .1, .zloss = .01, .count = 7, .balance = balance}};
}

/* The same tensors in the same order as the files of transformers have them. */
static void test_family_table(const slow_config *config, const golden_family *want) {
    int64_t tensors = slow_tensors(config), wrong = 0;
    slow_tensor *table = slow_allocate(tensors, sizeof *table);
    slow_parameters(config, table);
    for (int64_t i = 0; i < tensors && i < want->tensors; i++)
        wrong += strcmp(table[i].name, want->tensor[i].name) != 0 ||
                 table[i].rows != want->tensor[i].rows || table[i].cols != want->tensor[i].cols;
    check_of(want->name, "Hugging Face tensors",
             (double)(wrong + llabs(tensors - want->tensors)), 0);
    free(table);
}

/* Padding comes after all documents' tokens in its row. */
static void test_family_logits(const slow_config *config, const golden_family *want) {
    double *padded = logits_of(config, &padded_rows[0]);
    double *other = logits_of(config, &padded_rows[1]);
    double error = distance(SPOKEN * VOCAB, padded, want->logits) +
                   distance(OTHER_TOKENS * VOCAB, other, want->logits + SPOKEN * VOCAB);
    check_of(want->name, "Hugging Face logits", error, 1e-13);
    free(padded);
    free(other);
}

/* Two numbers of every tensor's gradient, so that none can hide behind the others. */
static void test_family_gradient(const slow_config *config, const golden_family *want) {
    slow_problem p = family_problem(config, want->balance);
    int64_t count = slow_parameters(config, NULL), tensors = slow_tensors(config);
    double *x = wave(count, .5), *direction = other_wave(count), *gradient = reals(count);
    slow_tensor *table = slow_allocate(tensors, sizeof *table);
    double along = 0, norm = 0;
    slow_parameters(config, table);
    slow_gradient(&p, x, gradient);
    for (int64_t i = 0; i < tensors && i < want->tensors; i++) {
        int64_t n = table[i].rows * table[i].cols, at = table[i].offset;
        along += fabs(inner(n, gradient + at, direction + at) - want->tensor[i].along);
        norm += fabs(slow_norm(n, gradient + at) - want->tensor[i].norm);
    }
    check_of(want->name, "Hugging Face gradients, along", along, 1e-13);
    check_of(want->name, "Hugging Face gradients, norms", norm, 1e-13);
    free(x);
    free(direction);
    free(gradient);
    free(table);
}

static void test_family(slow_config config, const golden_family *want) {
    slow_problem p = family_problem(&config, want->balance);
    double *x = wave(slow_parameters(&config, NULL), .5);
    test_family_table(&config, want);
    test_family_logits(&config, want);
    check_of(want->name, "Hugging Face loss", fabs(slow_loss(&p, x) - want->loss), 1e-14);
    test_family_gradient(&config, want);
    free(x);
}

/* Experts in the last layer alone; numbers of three digits fit into the names. */
static void test_long_names(void) {
    slow_config c = mixtral();
    c.layers = c.sparse_every = 1000;
    c.experts = 128;
    int64_t tensors = 999 * 9 + 6 + 1 + 3 * 128 + 3;
    slow_tensor *table = slow_allocate(tensors, sizeof *table);
    check("long names, count", (double)llabs(slow_tensors(&c) - tensors), 0);
    slow_parameters(&c, table);
    check("long names",
          abs(strcmp(table[tensors - 3].name,
                     "model.layers.999.block_sparse_moe.experts.127.w2.weight")),
          0);
    free(table);
}

/* ---- experts ---- */

enum { MANY = 6 };

static int wrongly_chosen(const double *probability, int64_t most, const char *want) {
    slow_complex *z = slow_promote(MANY, probability);
    bool chosen[MANY];
    int wrong = 0;
    slow_choose(MANY, most, &(slow_route){z, chosen});
    for (int e = 0; e < MANY; e++) wrong += chosen[e] != (want[e] == '1');
    free(z);
    return wrong;
}

static void test_choice(void) {
    static const double apart[MANY] = {.1, .3, .05, .25, .2, .1}, even[MANY] = {0};
    static const double ties[MANY] = {.1, .2, .15, .2, .15, .2};
    check("experts chosen", wrongly_chosen(apart, 3, "010110"), 0);
    check("one expert chosen", wrongly_chosen(apart, 1, "010000"), 0);
    check("all experts chosen", wrongly_chosen(apart, MANY, "111111"), 0);
    check("of equals the first", wrongly_chosen(even, 2, "110000"), 0);
    check("of the best equals the first", wrongly_chosen(ties, 2, "010100"), 0);
    check("of the last equals the first", wrongly_chosen(ties, 4, "011101"), 0);
}

static double balance_of(const double *chosen, const double *probability) {
    slow_complex *z = slow_promote(2, probability);
    double copy[2] = {chosen[0], chosen[1]};
    double balance = creal(slow_balance(2, &(slow_routing){4, copy, z}));
    free(z);
    return balance;
}

static void test_balance(void) {
    double counts[2] = {3, 1}, sums[2] = {2.5, 1.5}, even[2] = {2, 2};
    slow_complex none[2] = {0};
    slow_routing nothing = {0, even, none};
    check("balance", fabs(balance_of(counts, sums) - 2 * (3 * 2.5 + 1 * 1.5) / 16), 1e-15);
    check("balanced", fabs(balance_of(even, even) - 1), 1e-15);
    check("balance of nothing", cabs(slow_balance(2, &nothing)), 0);
}

/* Fills the tensors with `part` in their names with *value, or as the first of them is. */
static void fill(const slow_config *config, const char *part, const double *value, double *x) {
    int64_t tensors = slow_tensors(config), first = -1;
    slow_tensor *table = slow_allocate(tensors, sizeof *table);
    slow_parameters(config, table);
    for (int64_t i = 0; i < tensors; i++) {
        if (!strstr(table[i].name, part)) continue;
        if (first < 0) first = table[i].offset;
        for (int64_t k = 0; k < table[i].rows * table[i].cols; k++)
            x[table[i].offset + k] = value ? *value : x[first + k];
    }
    free(table);
}

/* A router of zeros prefers no expert: every token goes to the first two of four, and the
   balance is two. */
static void test_indifferent_router(void) {
    slow_config c = mixtral();
    slow_problem without = family_problem(&c, 0), with = family_problem(&c, .25);
    double *x = wave(slow_parameters(&c, NULL), .5), zero = 0, large = 1e3;
    fill(&c, "moe.gate.", &zero, x);
    double plain = slow_loss(&without, x);
    check("indifferent router", fabs(slow_loss(&with, x) - plain - .25 * 2), 1e-14);
    fill(&c, "experts.2.", &large, x);
    fill(&c, "experts.3.", &large, x);
    check("experts that are not chosen say nothing", fabs(slow_loss(&without, x) - plain), 0);
    fill(&c, "experts.1.", &large, x);
    check("experts that are chosen do", fabs(slow_loss(&without, x) - plain) > 1e-3 ? 0 : 1, 0);
    free(x);
}

/* Experts that all say the same say what a dense MLP would, whatever the router thinks, if
   the probabilities of the chosen sum to 1. */
static void test_equal_experts(bool topk_norm, int64_t most) {
    slow_config sparse = mixtral(), dense = family_of(1);
    sparse.layers = 1;
    sparse.topk_norm = topk_norm;
    sparse.experts_per_token = most;
    dense.window = sparse.window;
    dense.intermediate = sparse.expert_intermediate;
    int64_t count = slow_parameters(&sparse, NULL), matrices = 3 * 3 * 8;
    double *x = wave(count, .5), *y = reals(count);
    fill(&sparse, ".w1.", NULL, x);
    fill(&sparse, ".w2.", NULL, x);
    fill(&sparse, ".w3.", NULL, x);
    int64_t rest = 8 + VOCAB * 8, router = count - rest - 4 * matrices - 4 * 8;
    memcpy(y, x, (size_t)router * sizeof *x);
    memcpy(y + router, x + router + 4 * 8, (size_t)matrices * sizeof *x);
    memcpy(y + router + matrices, x + count - rest, (size_t)rest * sizeof *x);
    slow_problem routed = family_problem(&sparse, 0), plain = family_problem(&dense, 0);
    check_of(topk_norm ? "probabilities of some, made to sum to 1" : "all probabilities",
             "equal experts", fabs(slow_loss(&routed, x) - slow_loss(&plain, y)), 1e-14);
    free(x);
    free(y);
}

/* What is said in other documents or later cannot be heard. */
static void test_isolation(void) {
    slow_row row = rows[0];
    int32_t changed[TOKENS];
    double *before = logits_of(&untied, &row);
    memcpy(changed, ids, sizeof changed);
    row.ids = changed;
    changed[1] = changed[4] = changed[7] = 0;
    double *after = logits_of(&untied, &row);
    static const bool hears[TOKENS] = {false, true, true, true, true, false, false, true};
    int wrong = 0;
    for (int64_t t = 0; t < TOKENS; t++)
        wrong += hears[t] != !(distance(VOCAB, before + t * VOCAB, after + t * VOCAB) <= 0);
    check("document isolation and causality", wrong, 0);
    free(before);
    free(after);
}

static void test_packing(void) {
    double *packed = logits_of(&untied, &rows[0]), error = 0;
    for (int d = 0; d < 3; d++) {
        int64_t first = documents[d], ends[] = {0, documents[d + 1] - first};
        slow_row alone = {.tokens = ends[1], .docs = 1, .cu_seqlens = ends, .ids = ids + first};
        double *separate = logits_of(&untied, &alone);
        error += distance(ends[1] * VOCAB, packed + first * VOCAB, separate);
        free(separate);
    }
    check("a packed row is its documents", error, 1e-13);
    free(packed);
}

static void test_statistics(void) {
    double *x = wave(slow_parameters(&untied, NULL), .5);
    double logp[TOKENS], lse[TOKENS], entropy[TOKENS], want = 0;
    slow_problem p = {&untied, 1, rows, {.zloss = .01, .count = 7}};
    slow_statistics(&untied, x, rows, logp, lse, entropy);
    for (int t = 0; t < TOKENS; t++) {
        want += entropy_seeds[t] * entropy[t];
        if (targets[t] != SLOW_IGNORED)
            want += logp_seeds[t] * logp[t] +
                    weights[t] * (.01 * lse[t] * lse[t] - logp[t]) / 7;
    }
    check("loss from statistics", fabs(slow_loss(&p, x) - want), 1e-13);
    free(x);
}

/* ---- optimizers and schedules ---- */

static void test_adamw(void) {
    slow_adamw a = {.9, .95, 1e-8, .1};
    static const double g[] = {.5, -.25, .1};
    static const double want[] = {.9890000002, .985327305787383, .981129127774162};
    double theta = 1, m = 0, v = 0, error = 0;
    for (int t = 1; t <= 3; t++) {
        slow_adamw_step(&a, .01, t, 1, &g[t - 1], &m, &v, &theta);
        error += fabs(theta - want[t - 1]);
    }
    check("AdamW", error, 1e-14);
}

static void test_sgd(void) {
    double theta = 1, buffer = 0, g = .5;
    slow_sgd_step(.1, .9, .2, 1, &g, &buffer, &theta); /* buffer .7, theta .93 */
    slow_sgd_step(.1, .9, .2, 1, &g, &buffer, &theta); /* buffer .63 + .5 + .186 */
    check("SGD", fabs(theta - (.93 - .1316)), 1e-14);
}

static void test_clip(void) {
    double g[] = {3, 4};
    double want[] = {.599999880000024, .799999840000032};
    double small[] = {.3, .4}, same[] = {.3, .4};
    check("norm", fabs(slow_clip(2, 1, g) - 5), 1e-14);
    check("clip", distance(2, g, want), 1e-14);
    slow_clip(2, 1, small);
    check("nothing to clip", distance(2, small, same), 0);
}

static void test_schedule(const char *name, slow_schedule_kind kind, const double want[12]) {
    slow_schedule s = {kind, 3, 10, .1};
    double got[12];
    for (int64_t step = 0; step < 12; step++) got[step] = slow_schedule_factor(&s, step);
    check(name, distance(12, got, want), 1e-11);
}

static void test_schedules(void) {
    static const double third = 1. / 3;
    const double constant[12] = {0, third, 2 * third, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const double linear[12] = {0,      third,  2 * third, 1,      6. / 7, 5. / 7,
                               4. / 7, 3. / 7, 2. / 7,    1. / 7, 0,      0};
    const double cosine[12] = {0,
                               third,
                               2 * third,
                               1,
                               .950484433951,
                               .811744900929,
                               .611260466978,
                               .388739533022,
                               .188255099071,
                               .049515566049,
                               0,
                               .049515566049};
    const double min_lr[12] = {0,
                               third,
                               2 * third,
                               1,
                               .955435990556,
                               .830570410836,
                               .65013442028,
                               .44986557972,
                               .269429589164,
                               .144564009444,
                               .1,
                               .144564009444};
    test_schedule("constant", SLOW_CONSTANT, constant);
    test_schedule("linear", SLOW_LINEAR, linear);
    test_schedule("cosine", SLOW_COSINE, cosine);
    test_schedule("cosine_with_min_lr", SLOW_COSINE_WITH_MIN_LR, min_lr);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_rmsnorm());
    TEST(test_silu());
    TEST(test_tanh());
    TEST(test_rope());
    TEST(test_golden_ropes());
    TEST(test_mask());
    TEST(test_mask_general());
    TEST(test_position());
    TEST(test_parameter_table());
    TEST(test_uniform_attention());
    TEST(test_attention_scale());
    TEST(test_scale_and_softcap());
    TEST(test_softcap_gradient("softcap gradient", 1));
    TEST(test_softcap_gradient("softcap gradient, far above", 1e6));
    TEST(test_softcap_gradient("softcap gradient, far below", -1e6));
    TEST(test_sinks());
    TEST(test_far_sinks());
    TEST(test_dropout());
    TEST(test_no_extras());
    TEST(test_mask_probes());
    TEST(test_attention_together());
    TEST(test_attention_gradients());
    TEST(test_loss());
    TEST(test_loss_gradient());
    TEST(test_ignored());
    TEST(test_golden_model(&untied, &untied_golden));
    TEST(test_golden_model(&tied, &tied_golden));
    TEST(test_model_gradient("untied", &untied));
    TEST(test_model_gradient("tied", &tied));
    TEST(test_scaled_model(SLOW_ROPE_LINEAR, &linear_golden));
    TEST(test_scaled_model(SLOW_ROPE_LLAMA3, &llama3_golden));
    TEST(test_scaled_model(SLOW_ROPE_YARN, &yarn_golden));
    TEST(test_attention_factor());
    TEST(test_family(qwen2(), &qwen2_golden));
    TEST(test_family(llama_biases(), &llama_biases_golden));
    TEST(test_family(qwen3(), &qwen3_golden));
    TEST(test_family(smollm3(), &smollm3_golden));
    TEST(test_family(mixtral(), &mixtral_golden));
    TEST(test_family(qwen3_moe(), &qwen3_moe_golden));
    TEST(test_family(qwen3_moe_normed(), &qwen3_moe_normed_golden));
    TEST(test_long_names());
    TEST(test_choice());
    TEST(test_balance());
    TEST(test_indifferent_router());
    TEST(test_equal_experts(true, 2));
    TEST(test_equal_experts(false, 4));
    TEST(test_isolation());
    TEST(test_packing());
    TEST(test_statistics());
    TEST(test_adamw());
    TEST(test_sgd());
    TEST(test_clip());
    TEST(test_schedules());
    return test_summary();
}
