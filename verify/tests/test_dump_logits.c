/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on dumps with logits: log-probs made of them here, rightly and of the
   wrong row or label, in every layout, as fp64, fp32 and bf16. */
#define FOLDER "build/test_dump_logits.d"
#include "support/dump_page.h"

enum { TOKENS = 29, DOCS = 3, RANKS = 8, VOCAB = 17, NONE = -100, ANY = -1 };
static int64_t cu_seqlens[DOCS + 1] = {0, 13, 14, TOKENS};

static struct {
    int64_t sp;
    int32_t ids[TOKENS], labels[TOKENS];
    double logits[TOKENS][VOCAB], logp[TOKENS], loss;
    int64_t index[RANKS][TOKENS], held[RANKS];
    int bits;      /* of logits and log-probs as they are written: 52, 23 or 7 */
    int64_t vocab; /* that is written */
    int without_logp;
} s;

/* ---- a step ---- */

/* To so many bits behind the first, ties away from zero. */
static double rounded(double x, int bits) {
    int exponent;
    double mantissa = frexp(x, &exponent);
    return ldexp(round(ldexp(mantissa, bits + 1)), exponent - bits - 1);
}

static double log_prob(int64_t row, int32_t label) {
    long double sum = 0;
    for (int v = 0; v < VOCAB; v++) sum += expl((long double)s.logits[row][v]);
    return (double)((long double)s.logits[row][label] - logl(sum));
}

static void hold(int layout) {
    memset(s.held, 0, sizeof s.held);
    for (int64_t t = 0; t < TOKENS; t++) {
        int64_t r = deal_rank(layout, s.sp, TOKENS, cu_seqlens, DOCS, t);
        s.index[r][s.held[r]++] = t;
    }
}

static void set_loss(void) {
    double sum = 0, count = 0;
    for (int t = 0; t < TOKENS; t++) {
        if (s.labels[t] == NONE) continue;
        sum -= s.logp[t];
        count++;
    }
    s.loss = sum / count;
}

static void make(int layout, int64_t sp, int bits) {
    memset(&s, 0, sizeof s);
    s.sp = sp;
    s.bits = bits;
    s.vocab = VOCAB;
    for (int t = 0; t < TOKENS; t++) s.ids[t] = (int32_t)(t * 5 % VOCAB); /* 0 is among them */
    for (int t = 0; t < TOKENS; t++) {
        int last = t + 1 == TOKENS || t == 12 || t == 13;
        s.labels[t] = last || t < 3 ? NONE : s.ids[t + 1];
        for (int v = 0; v < VOCAB; v++)
            s.logits[t][v] = rounded(0.01 * (double)test_integer(-900, 900), bits);
    }
    for (int t = 0; t < TOKENS; t++)
        if (s.labels[t] != NONE) s.logp[t] = log_prob(t, s.labels[t]);
    hold(layout);
    set_loss();
}

/* ---- writing it ---- */

static seqpar_safetensors_dtype type_of(int bits) {
    return bits == 7    ? SEQPAR_SAFETENSORS_BF16
           : bits == 23 ? SEQPAR_SAFETENSORS_F32
                        : SEQPAR_SAFETENSORS_F64;
}

static void put_number(unsigned char **to, double x, int bits) {
    float narrow = (float)rounded(x, bits == 7 ? 7 : 23);
    if (bits == 52) memcpy(*to, &x, 8);
    if (bits == 23) memcpy(*to, &narrow, 4);
    if (bits == 7) memcpy(*to, (char *)&narrow + 2, 2);
    *to += bits == 52 ? 8 : bits == 23 ? 4 : 2;
}

typedef struct rank_data {
    int32_t ids[TOKENS], labels[TOKENS];
    unsigned char logits[TOKENS * VOCAB * 8], logp[TOKENS * 8];
} rank_data;

static void gather(rank_data *d, int64_t r) {
    unsigned char *logits = d->logits, *logp = d->logp;
    for (int64_t i = 0; i < s.held[r]; i++) {
        int64_t t = s.index[r][i];
        d->ids[i] = s.ids[t];
        d->labels[i] = s.labels[t];
        put_number(&logp, s.logp[t], s.bits);
        for (int64_t v = 0; v < s.vocab; v++) put_number(&logits, s.logits[t][v], s.bits);
    }
}

static void write_rank(int64_t r) {
    static rank_data d;
    const int64_t n = s.held[r], of_logits[] = {n, s.vocab}, bounds = DOCS + 1;
    char rank[24], sp[24];
    seqpar_safetensors_pair pairs[] = {
        {"seqpar_dump", "1"}, {"rank", rank}, {"world", sp}, {"sp", sp}};
    seqpar_safetensors_dtype type = type_of(s.bits);
    page p = {.count = 0};
    gather(&d, r);
    snprintf(rank, sizeof rank, "%lld", (long long)r);
    snprintf(sp, sizeof sp, "%lld", (long long)s.sp);
    put(&p, 0, "index", s.index[r], SEQPAR_SAFETENSORS_I64, 1, &n);
    put(&p, 0, "ids", d.ids, SEQPAR_SAFETENSORS_I32, 1, &n);
    put(&p, 0, "labels", d.labels, SEQPAR_SAFETENSORS_I32, 1, &n);
    put(&p, 0, "cu_seqlens", cu_seqlens, SEQPAR_SAFETENSORS_I64, 1, &bounds);
    put(&p, -1, "loss", &s.loss, SEQPAR_SAFETENSORS_F64, 0, NULL);
    put(&p, 0, "logits", d.logits, type, 2, of_logits);
    if (!s.without_logp) put(&p, 0, "logp", d.logp, type, 1, &n);
    save(&p, r, pairs, 4);
}

static char said[8192];

/* Exit code (ANY: right, or insufficient for what other stages lack), the line of stage logits,
   and that of stage loss. */
static void expect(int code, const char *logits, const char *loss) {
    char *at;
    int is;
    write_ranks(s.sp, write_rank);
    is = ask_with("", said, sizeof said);
    test_expect(code == ANY ? is == 0 || is == 4 : is == code, "exit code %d, not %d: %.500s",
                is, code, said);
    at = strstr(said, "\n    logits    ");
    test_expect(at && !strncmp(at + 15, logits, strlen(logits)), "logits: %.200s, not '%s'",
                at ? at + 15 : said, logits);
    at = strstr(said, "\n    loss      ");
    test_expect(at && !strncmp(at + 15, loss, strlen(loss)), "loss: %.200s, not '%s'",
                at ? at + 15 : said, loss);
}

/* ---- right ones ---- */

static const int64_t ranks[] = {1, 2, 3, 4, 5, 8};
static const int types[] = {52, 23, 7};

static void test_right(void) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int p = 0; p < 6; p++) {
            make(layout, ranks[p], types[p % 3]);
            expect(ANY, "right: 23 log-probs", "");
        }
    test_end("dump_logits_right");
    make(SEQPAR_LAYOUT_ZIGZAG, 3, 23);
    s.without_logp = 1;
    expect(ANY, "not judged", "right"); /* and the loss from the logits */
    test_end("dump_logits_alone");
    make(SEQPAR_LAYOUT_ZIGZAG, 3, 52);
    for (int t = 0; t < TOKENS; t++)
        s.logits[t][(t + 1) % VOCAB == s.labels[t] ? t % VOCAB : (t + 1) % VOCAB] = -INFINITY;
    for (int t = 0; t < TOKENS; t++)
        if (s.labels[t] != NONE) s.logp[t] = log_prob(t, s.labels[t]);
    set_loss();
    for (int v = 0; v < VOCAB; v++) s.logits[13][v] = NAN; /* a row without a label */
    expect(ANY, "right: 23", "");
    test_end("dump_logits_masked_entries");
    make(SEQPAR_LAYOUT_STRIPE, 2, 23);
    for (int t = 0; t < TOKENS; t++) s.logp[t] = rounded(s.logp[t], 7); /* widened bf16 */
    set_loss();
    expect(ANY, "right: 23", "");
    test_end("dump_logits_widened");
}

/* ---- wrong ones ---- */

static void test_ids(void) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int p = 0; p < 6; p++) {
            make(layout, ranks[p], types[p % 3]);
            for (int t = 0; t < TOKENS; t++) s.logp[t] = log_prob(t, s.ids[t]);
            set_loss();
            expect(1, "wrong: first at", "");
        }
    test_end("dump_logits_of_ids");
}

/* A model that shifts labels which are shifted already, on each rank: log_prob of row l goes
   with the label of row l + 1, and lies where either is. */
static void shift_again(int where_it_ends) {
    double logp[TOKENS];
    memcpy(logp, s.logp, sizeof logp);
    for (int64_t r = 0; r < s.sp; r++)
        for (int64_t i = 0; i + 1 < s.held[r]; i++) {
            int64_t here = s.index[r][i], next = s.index[r][i + 1];
            if (s.labels[next] == NONE) continue;
            logp[where_it_ends ? next : here] = log_prob(here, s.labels[next]);
        }
    memcpy(s.logp, logp, sizeof logp);
    set_loss();
}

static void test_shifted_again(void) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int p = 0; p < 5; p++)
            for (int where = 0; where < 2; where++) {
                make(layout, ranks[p], types[p % 3]);
                shift_again(where);
                expect(1, "wrong: first at", "");
            }
    test_end("dump_logits_shifted_again");
}

static void expect_named(const char *name) {
    expect(1, "wrong: first at", "");
    test_expect(!strncmp(said, name, strlen(name)), "says %.160s, not %s", said, name);
}

static void test_names(void) {
    make(SEQPAR_LAYOUT_CONTIGUOUS, 3, 23);
    for (int t = 0; t < TOKENS; t++) s.logp[t] = log_prob(t, s.ids[t]);
    set_loss();
    expect_named("wrong: labels_not_shifted\n");
    for (int where = 0; where < 2; where++) {
        make(SEQPAR_LAYOUT_ZIGZAG, 2, 52);
        shift_again(where);
        expect_named("wrong: labels_shifted_twice\n");
    }
    make(SEQPAR_LAYOUT_ZIGZAG, 3, 23); /* logits put one rank behind the other, labels not */
    for (int64_t r = 0, place = 0; r < s.sp; r++)
        for (int64_t i = 0; i < s.held[r]; i++, place++)
            if (s.labels[place] != NONE && s.labels[s.index[r][i]] != NONE)
                s.logp[s.index[r][i]] = log_prob(s.index[r][i], s.labels[place]);
    set_loss();
    expect_named("wrong: gathered_in_rank_order\n");
    test_end("dump_logits_names");
}

static void test_others(void) {
    int64_t t = 19;
    make(SEQPAR_LAYOUT_ZIGZAG, 3, 23);
    s.logp[t] = NAN;
    expect(1, "wrong: first at", "");
    make(SEQPAR_LAYOUT_ZIGZAG, 3, 23);
    s.logp[t] *= 1 + 1e-4;
    expect(1, "wrong: first at", "");
    make(SEQPAR_LAYOUT_ZIGZAG, 3, 7);
    s.logp[t] *= 1.2;
    expect(1, "wrong: first at", "");
    make(SEQPAR_LAYOUT_ZIGZAG, 3, 23);
    s.logits[t][3] = NAN;
    expect(1, "wrong: first at", "");
    make(SEQPAR_LAYOUT_ZIGZAG, 3, 23);
    s.logits[t][3] = INFINITY;
    expect(1, "wrong: first at", "");
    test_end("dump_logits_off");
    make(SEQPAR_LAYOUT_ZIGZAG, 3, 23);
    for (int i = 0; i < TOKENS; i++) s.logp[i] = -s.logp[i];
    set_loss();
    expect(1, "wrong: first at", "");
    test_end("dump_logits_negative");
    make(SEQPAR_LAYOUT_ZIGZAG, 3, 52);
    memset(s.logits, 0, sizeof s.logits);
    for (int i = 0; i < TOKENS; i++) s.logp[i] = -log(VOCAB);
    set_loss();
    expect(4, "insufficient: all logits", "");
    test_end("dump_logits_flat");
    make(SEQPAR_LAYOUT_ZIGZAG, 3, 52);
    s.vocab = 11; /* a part of the vocabulary */
    expect(4, "insufficient: label", "");
    test_end("dump_logits_parts");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_right());
    TEST(test_ids());
    TEST(test_shifted_again());
    TEST(test_names());
    TEST(test_others());
    return test_summary();
}
