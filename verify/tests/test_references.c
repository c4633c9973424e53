/* SPDX-License-Identifier: MIT OR Unlicense */
/* The two references that seqpar-verify asks, in configurations drawn at random: the fp64 device
   with the oracle's own attention, and slow.h. Thousands here, a hundred thousand with
   TEST_ALL. And that their disagreement is seen. */
#include <errno.h>
#include <stdint.h>
#define STB_DS_IMPLEMENTATION
#include "oracle/verdict/fault_names.h"
#include "oracle/reference/model_ways.h"
#include "oracle/gradient/objective_seeds.h"
#include "oracle/reference/second_reference.h"
#include "oracle/loss/on_policy.h"
#include "support/test.h"

enum { ROWS = 3, MOST = 24 };
static const reference_way right = {.name = NULL};

/* ---- faults of faults.tsv, and the mistakes that they are ---- */

static const struct fault_name *fault_of(int number) {
    for (int i = 0; i < FAULT_NAMES; i++)
        if (fault_names[i].number == number) return &fault_names[i];
    return NULL;
}

/* Whether --model tries it out: in the model, in the loss's seeds, or as a factor. */
static int is_tried(const char *name) {
    const mistake *m = mistake_named(name);
    for (int i = 0; i < WRONG_WAYS; i++)
        if (!strcmp(wrong_ways[i].name, name)) return 1;
    for (int objective = DUMP_SFT; objective <= DUMP_PPO; objective++) {
        dump d = {.facts.objective = objective};
        for (int i = 1; i < seed_ways(&d); i++)
            if (seed_way_name(&d, i) && !strcmp(seed_way_name(&d, i), name)) return 1;
    }
    /* beside others: these are named by the factor, or with sigmoid_of_parts */
    return law_scales(m) || !strcmp(name, "local_count") || !strcmp(name, "scores_of_one_rank");
}

/* Every fault of the table is one mistake that is tried out, or there is a reason. */
static void test_fault_names(void) {
    FILE *f = fopen("verify/faults.tsv", "r");
    char line[4096];
    int number, seen = 0, last = 0, tried = 0;
    test_expect(f != NULL, "verify/faults.tsv cannot be read");
    while (f && fgets(line, sizeof line, f)) {
        const struct fault_name *name;
        if (sscanf(line, "%d\t", &number) != 1 || number == last) continue;
        last = number;
        seen++;
        name = fault_of(number);
        test_expect(name != NULL, "fault %d is not in fault_names.h", number);
        if (!name) continue;
        test_expect(name->mistake || name->reason, "fault %d has no reason", number);
        if (!name->mistake) continue;
        test_expect(mistake_named(name->mistake) != NULL, "fault %d is %s, which is no mistake",
                    number, name->mistake);
        test_expect(name->reason || is_tried(name->mistake), "fault %d is %s, not tried",
                    number, name->mistake);
        tried += is_tried(name->mistake);
    }
    if (f) fclose(f);
    test_expect(seen == FAULT_NAMES, "%d faults, %d names", seen, (int)FAULT_NAMES);
    test_end("references_know_faults: %d of %d are tried", tried, seen);
}

/* ---- configurations ---- */

static int64_t *whole_numbers(int64_t n) {
    int64_t *x = calloc((size_t)n + 1, sizeof *x);
    if (!x) exit(1);
    return x;
}

/* Documents of 1 to MOST tokens, some of them one long; labels with holes. */
static void fill_row(dump_row *row, int64_t vocab) {
    int64_t docs = test_integer(1, 4), n = 0;
    row->docs = docs;
    row->cu_seqlens = whole_numbers(docs);
    for (int64_t d = 0; d < docs; d++)
        row->cu_seqlens[d + 1] = n += d == 1 ? 1 : test_integer(1, MOST / 4);
    row->tokens = n;
    row->rank = whole_numbers(n);
    row->local = whole_numbers(n);
    row->next = whole_numbers(n);
    row->ids = whole_numbers(n);
    row->labels = whole_numbers(n);
    for (int64_t t = 0; t < n; t++) {
        row->local[t] = t;
        row->next[t] = t + 1 < n ? t + 1 : -1;
        row->ids[t] = test_integer(0, vocab - 1);
        row->labels[t] = test_integer(0, 3) ? test_integer(0, vocab - 1) : DUMP_IGNORE;
    }
}

static seqpar_llama_rope random_rope(void) {
    double low = (double)test_integer(1, 9) / 8;
    return (seqpar_llama_rope){.type = (int)test_integer(0, SEQPAR_ROPE_YARN),
                               .factor = (double)test_integer(1, 16) / 2,
                               .first_positions = (double)test_integer(MOST, 40),
                               .low = low,
                               .high = low + (double)test_integer(1, 24) / 8,
                               .attention_factor = (double)test_integer(0, 3) / 2,
                               .exact = (int)test_integer(0, 1)};
}

static seqpar_llama_config random_config(void) {
    seqpar_llama_config c = {.layers = test_integer(1, 2),
                             .kv_heads = test_integer(1, 2),
                             .head_dim = 2 * test_integer(1, 3),
                             .hidden = test_integer(3, 7),
                             .intermediate = test_integer(2, 9),
                             .vocab = test_integer(2, 13),
                             .rope_theta = test_integer(0, 1) ? 10000 : 100,
                             .rms_eps = 1e-5,
                             .tied = (int)test_integer(0, 1)};
    c.heads = c.kv_heads * test_integer(1, 3);
    c.rope = random_rope();
    c.window = test_integer(0, 2) ? 0 : test_integer(2, 7);
    return c;
}

static void random_weights(reference *f) {
    double *x = calloc((size_t)f->model.elements + 1, sizeof *x);
    double size = (double)test_integer(1, 12) / 10;
    for (int64_t i = 0; x && i < f->model.elements; i++) x[i] = size * test_normal();
    seqpar_device_write(f->device, f->model.params.data, 0, x, f->model.elements,
                        f->device->storage);
    free(x);
}

/* One configuration. harm: to the gradient or a log-prob, which must show. */
static int agree(int harm, char *text, size_t size) {
    dump d = {.world = 1, .sp = 1, .accumulation = test_integer(1, ROWS)};
    seqpar_llama_config config = random_config();
    double *seeds[ROWS];
    reference f;
    d.facts.window = config.window;
    int verdict = -1;
    if (reference_begin(&f, &d, seqpar_device_reference())) exit(1);
    for (int64_t i = 0; i < f.count; i++) {
        fill_row(&f.rows[i], config.vocab);
        seeds[i] = calloc((size_t)f.rows[i].tokens + 1, sizeof *seeds[i]);
        for (int64_t t = 0; t < f.rows[i].tokens; t++)
            if (f.rows[i].labels[t] != DUMP_IGNORE) seeds[i][t] = test_normal();
    }
    f.rows[0].labels[0] = 0;
    seeds[0][0] = 1;
    if (!reference_config(&f, &config)) {
        random_weights(&f);
        if (!reference_logp(&f, &right) && !reference_gradient(&f, &right, seeds)) {
            if (harm == 1) f.logp[0][0] *= 1 + 1e-6;
            if (harm == 2)
                f.gradient[f.model.tensors[1].offset] += 1e-6 * slow_norm(f.model.elements,
                                                                          f.gradient);
            verdict = second_agrees(&f, f.logp, seeds, f.gradient, text, size);
        }
    }
    if (d.error.status) snprintf(text, size, "%.150s", d.error.text);
    for (int64_t i = 0; i < f.count; i++) free(seeds[i]);
    reference_close(&f);
    return verdict;
}

static void test_agree(int64_t count) {
    char text[200] = "";
    for (int64_t i = 0; i < count; i++)
        test_expect(agree(0, text, sizeof text) == 1, "configuration %lld: %s", (long long)i,
                    text);
    test_end("references_agree in %lld configurations", (long long)count);
}

/* harm: as of agree() */
static void test_seen(int harm, const char *what) {
    int64_t seen = 0;
    char text[200] = "";
    for (int64_t i = 0; i < 40; i++) seen += agree(harm, text, sizeof text) == 0;
    test_expect(seen >= 36, "a wrong %s is seen in %lld of 40", what, (long long)seen);
    test_end("references_see_a_%s", what);
}

/* Positions by powers of two: what is longer than the last one counts there. */
static void test_powers(void) {
    for (int i = 0; i < 63; i++) {
        int64_t x = INT64_C(1) << i;
        int want = i < POLICY_POWERS ? i : POLICY_POWERS - 1;
        test_expect(power_of(x) == want && power_of(x + (x - 1)) == want, "2^%d is in %d", i,
                    power_of(x));
    }
    test_end("references_powers");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_fault_names());
    TEST(test_agree(getenv("TEST_ALL") ? 100000 : 3000));
    TEST(test_seen(1, "log_prob"));
    TEST(test_seen(2, "gradient"));
    TEST(test_powers());
    return test_summary();
}
