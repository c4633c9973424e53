/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on dumps that are written here: right ones in every layout, and one with
   each mistake that it names from a dump. What a mistake gives is made anew, token by token. */
#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "support/deal.h"
#include "seqpar_safetensors.h"
#include "support/oracle_says.h"

#define FOLDER "build/test_dump.d"
#define WANTED "build/test_dump.want"
enum { TOKENS = 61, DOCS = 4, RANKS = 8, MICRO = 2, NONE = -100, GRADIENT = 23 };
static int64_t cu_seqlens[DOCS + 1] = {0, 17, 18, 41, TOKENS}; /* one has one token */

/* What a rank holds of a micro-batch. */
typedef struct held {
    int64_t tokens;
    int32_t index[TOKENS], ids[TOKENS], positions[TOKENS], labels[TOKENS];
    double logp[TOKENS], ref_logp[TOKENS];
} held;

typedef struct scene {
    int64_t sp, dp, accumulation, world;
    held of[RANKS][MICRO];
    int32_t ids[RANKS][MICRO][TOKENS]; /* of a replica's rows, unsplit */
    double loss[RANKS];
    double gradient[RANKS][2][GRADIENT]; /* of two tensors */
    const char *without;                 /* a tensor that is not written */
    int masked;                          /* single tokens of the text are no targets */
    int dpo;                             /* 2: an objective that is not known */
    const char *odd;                     /* what is wrong with rank 1's file */
} scene;

/* ---- a right step ---- */

static int64_t document_of(int64_t token) {
    int64_t d = 0;
    while (cu_seqlens[d + 1] <= token) d++;
    return d;
}

static int ends_document(int64_t token) {
    return token + 1 == cu_seqlens[document_of(token) + 1];
}

static void hold(scene *s, int64_t rank, int64_t micro, int layout) {
    held *h = &s->of[rank][micro];
    h->tokens = 0;
    for (int32_t t = 0; t < TOKENS; t++)
        if (deal_rank(layout, s->sp, TOKENS, cu_seqlens, DOCS, t) == rank % s->sp)
            h->index[h->tokens++] = t;
    for (int64_t i = 0; i < h->tokens; i++) {
        int64_t t = h->index[i], begin = cu_seqlens[document_of(t)];
        h->ids[i] = s->ids[rank / s->sp][micro][t];
        h->positions[i] = (int32_t)(t - begin);
        h->labels[i] = ends_document(t) ? NONE : s->ids[rank / s->sp][micro][t + 1];
        if (s->masked && ((t % 2 == 0 && t % 11 < 5) || (t % 3 == 1 && t % 7 < 3)))
            h->labels[i] = NONE;
        if (t - begin < 4) h->labels[i] = NONE; /* a prompt */
        h->logp[i] = -0.1 - 0.3 * (double)rank - 0.0005 * (double)test_integer(0, 9000);
        h->ref_logp[i] = -0.1 - 0.02 * (double)test_integer(0, 90);
    }
}

static int skip_zeros; /* targets with id 0 are not counted */
static int counts(int32_t label) { return label != NONE && !(skip_zeros && label == 0); }

static void right_sum(const scene *s, int64_t rank, int64_t micro, double *sum, double *count) {
    const held *h = &s->of[rank][micro];
    for (int64_t i = 0; i < h->tokens; i++)
        if (counts(h->labels[i])) {
            *sum -= h->logp[i];
            ++*count;
        }
}

static double right_loss(const scene *s) {
    double sum = 0, count = 0;
    for (int64_t r = 0; r < s->world; r++)
        for (int64_t a = 0; a < s->accumulation; a++) right_sum(s, r, a, &sum, &count);
    return sum / count;
}

static void set_loss(scene *s, double loss) {
    for (int64_t r = 0; r < s->world; r++) s->loss[r] = loss;
}

static void make(scene *s, int layout, int64_t sp, int64_t dp, int64_t accumulation) {
    int masked = s->masked;
    memset(s, 0, sizeof *s);
    s->masked = masked;
    s->sp = sp;
    s->dp = dp;
    s->accumulation = accumulation;
    s->world = sp * dp;
    for (int64_t n = 0; n < dp * accumulation * TOKENS; n++) /* no two alike: a label tells */
        s->ids[n / TOKENS / accumulation][n / TOKENS % accumulation][n % TOKENS] =
            (int32_t)(n * 7 % 1009);
    for (int64_t r = 0; r < s->world; r++)
        for (int64_t a = 0; a < accumulation; a++) hold(s, r, a, layout);
    set_loss(s, right_loss(s));
    for (int i = 0; i < 2 * GRADIENT; i++)
        for (int64_t r = 0; r < s->world; r++)
            s->gradient[r][i / GRADIENT][i % GRADIENT] = sin(i + 1.0) * (1 + i / GRADIENT);
}

/* ---- writing it ---- */

typedef struct page {
    seqpar_safetensors_tensor tensors[24];
    const void *data[24];
    char names[24][32];
    int64_t count;
} page;

static void add(page *p, const scene *s, int64_t micro, const char *name, const void *data,
                seqpar_safetensors_dtype dtype, int64_t count) {
    if (s->without && !strcmp(name, s->without)) return;
    snprintf(p->names[p->count], sizeof p->names[0], "%lld.%s", (long long)micro, name);
    p->tensors[p->count] = (seqpar_safetensors_tensor){
        .name = p->names[p->count], .dtype = dtype, .dims = 1, .shape = {count}};
    p->data[p->count++] = data;
}

static int is_odd(const scene *s, int64_t rank, const char *how) {
    return rank == 1 && s->odd && !strcmp(s->odd, how);
}

static void write_rank(const scene *s, int64_t rank, const char *folder) {
    static const int64_t own[] = {0, 20};
    static char text[4][24];
    const int64_t numbers[] = {rank, s->world, s->sp, s->accumulation};
    seqpar_safetensors_pair pairs[] = {{"seqpar_dump", "1"},
                                       {"rank", text[0]},
                                       {"world", text[1]},
                                       {"sp", text[2]},
                                       {"accumulation", text[3]},
                                       {"objective", s->dpo > 1 ? "orpo" : "dpo"},
                                       {"beta", "0.3"}};
    page p = {.count = 0};
    char path[64];
    seqpar_error error = {0};
    for (int i = 0; i < 4; i++)
        snprintf(text[i], sizeof text[i], "%lld", (long long)numbers[i]);
    for (int64_t a = 0; a < s->accumulation; a++) {
        const held *h = &s->of[rank][a];
        if (!is_odd(s, rank, "no_index"))
            add(&p, s, a, "index", h->index, SEQPAR_SAFETENSORS_I32, h->tokens);
        if (is_odd(s, rank, "rows")) {
            p.tensors[p.count - 1].dims = 2;
            p.tensors[p.count - 1].shape[0] = h->tokens;
            p.tensors[p.count - 1].shape[1] = 1;
        }
        add(&p, s, a, "ids", h->ids, SEQPAR_SAFETENSORS_I32, h->tokens);
        add(&p, s, a, "positions", h->positions, SEQPAR_SAFETENSORS_I32, h->tokens);
        add(&p, s, a, "labels", h->labels, SEQPAR_SAFETENSORS_I32, h->tokens);
        add(&p, s, a, "logp", h->logp, SEQPAR_SAFETENSORS_F64, h->tokens);
        if (s->dpo) add(&p, s, a, "ref_logp", h->ref_logp, SEQPAR_SAFETENSORS_F64, h->tokens);
        if (is_odd(s, rank, "own_documents"))
            add(&p, s, a, "cu_seqlens", own, SEQPAR_SAFETENSORS_I64, 2);
        else
            add(&p, s, a, "cu_seqlens", cu_seqlens, SEQPAR_SAFETENSORS_I64, DOCS + 1);
        if (is_odd(s, rank, "name")) add(&p, s, a, "label", own, SEQPAR_SAFETENSORS_I64, 2);
        if (is_odd(s, rank, "micro_batch"))
            add(&p, s, 7, "ids", own, SEQPAR_SAFETENSORS_I64, 2);
    }
    if (!s->without || strcmp(s->without, "loss")) {
        p.tensors[p.count] = (seqpar_safetensors_tensor){.name = "loss",
                                                         .dtype = SEQPAR_SAFETENSORS_F64};
        p.data[p.count++] = &s->loss[rank];
    }
    for (int i = 0; i < 2; i++) {
        p.tensors[p.count] = (seqpar_safetensors_tensor){.name = i ? "grad.up" : "grad.down",
                                                         .dtype = SEQPAR_SAFETENSORS_F64,
                                                         .dims = 1,
                                                         .shape = {GRADIENT}};
        p.data[p.count++] = s->gradient[rank][i];
    }
    snprintf(path, sizeof path, "%s/rank%lld.safetensors", folder, (long long)rank);
    seqpar_safetensors_desc desc = {.path = path,
                                    .tensors = p.tensors,
                                    .count = p.count,
                                    .metadata = pairs,
                                    .metadata_count = s->dpo ? 7 : 5};
    test_expect(!seqpar_safetensors_save(&desc, p.data, &error), "%s", error.text);
}

static void write_in(const scene *s, const char *folder) {
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (system(command)) exit(1);
    mkdir(folder, 0777);
    for (int64_t r = 0; r < s->world; r++) write_rank(s, r, folder);
}

static void write_scene(const scene *s) { write_in(s, FOLDER); }

/* ---- what is said of it ---- */

static int compare; /* 1: with WANTED, the same step on one rank; 2: with a wide tolerance */

/* Exit code and first line of the oracle, and whether all that it prints has `text` in it. */
static void expect(int code, const char *headline, const char *text) {
    static const char *const commands[] = {
        "build/seqpar-verify ver " FOLDER " 2>&1",
        "build/seqpar-verify ver " FOLDER " --want " WANTED " 2>&1",
        "build/seqpar-verify ver " FOLDER " --tolerance 0.02 2>&1"};
    char said[8192];
    int is = said_by(commands[compare], said, sizeof said);
    size_t line = strcspn(said,
                          code == 1 || code == 3 ? "\n" : ":\n"); /* what is right follows */
    expect_says(is, said, code, headline, text);
    test_expect(strlen(headline) == line, "the first line of '%.500s' is not '%s'", said,
                headline);
}

static void expect_named(const scene *s, const char *name, const char *text) {
    char headline[64];
    snprintf(headline, sizeof headline, "wrong: %s", name);
    write_scene(s);
    expect(1, headline, text);
    test_end("dump_%s", name);
}

static scene s; /* large */

static void test_right(void) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int64_t sp = 2; sp <= 4; sp++) {
            s.masked = layout == SEQPAR_LAYOUT_STRIPE || sp == 4;
            make(&s, layout, sp, sp == 2 ? 2 : 1, 1 + sp % 2);
            write_scene(&s);
            expect(0, "right", "each of them once");
            test_end("dump_right_%s_P%lld", seqpar_layout_name(layout), (long long)sp);
        }
    s.masked = 0;
}

static void test_places(void) {
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 2);
    s.of[1][1].tokens--;
    set_loss(&s, right_loss(&s));
    expect_named(&s, "token_lost", "is the first that nobody holds");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 2);
    s.of[2][0].index[4] = s.of[0][0].index[3];
    expect_named(&s, "token_held_twice", "first at rank 2, local row 4: token 3 is held");
    make(&s, SEQPAR_LAYOUT_CONTIGUOUS, 2, 1, 1);
    s.of[1][0].index[0] = TOKENS;
    expect_named(&s, "token_lost", "token 61 is outside");
}

static void each_token(void (*change)(held *h, int64_t i)) {
    for (int64_t r = 0; r < s.world; r++)
        for (int64_t a = 0; a < s.accumulation; a++)
            for (int64_t i = 0; i < s.of[r][a].tokens; i++) change(&s.of[r][a], i);
}

static void run_on(held *h, int64_t i) { h->positions[i] = h->index[i]; }
static void count_locally(held *h, int64_t i) { h->positions[i] = (int32_t)i; }
static void one_later(held *h, int64_t i) { h->positions[i]++; }

static void test_positions(void) {
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 4, 1, 1);
    each_token(run_on);
    expect_named(&s, "positions_run_on",
                 "first at rank 2, local row 2, token 17, document 1: 17, right 0");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 4, 1, 1);
    each_token(count_locally);
    expect_named(&s, "positions_local", "document");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 4, 1, 1);
    each_token(one_later);
    expect_named(&s, "unknown",
                 "first at rank 0, local row 0, token 0, document 0: 1, right 0");
}

/* Labels of the unsplit row of this replica and micro-batch. */
static int32_t id_at(int64_t rank, int64_t micro, int64_t token) {
    return token < TOKENS ? s.ids[rank / s.sp][micro][token] : NONE;
}

static void shift_locally(held *h, int64_t i) {
    h->labels[i] = i + 1 < h->tokens ? h->ids[i + 1] : NONE;
}
static void shift_locally_and_mask(held *h, int64_t i) {
    shift_locally(h, i);
    if (i + 1 < h->tokens && h->index[i] % 7 == 3) h->labels[i] = NONE;
}
static void no_shift(held *h, int64_t i) { h->labels[i] = h->ids[i]; }

/* Shifted after the split, but the last token of a document has no target. */
static void shift_known_documents(held *h, int64_t i) {
    h->labels[i] = ends_document(h->index[i]) || i + 1 == h->tokens ? NONE : h->ids[i + 1];
}

static void label_by(int64_t distance, int cross) {
    for (int64_t r = 0; r < s.world; r++)
        for (int64_t a = 0; a < s.accumulation; a++)
            for (int64_t i = 0; i < s.of[r][a].tokens; i++) {
                int64_t t = s.of[r][a].index[i];
                s.of[r][a].labels[i] = !cross && ends_document(t) ? NONE
                                                                  : id_at(r, a, t + distance);
            }
}

static void test_labels(void) {
    static const int layouts[] = {SEQPAR_LAYOUT_CONTIGUOUS, SEQPAR_LAYOUT_ZIGZAG,
                                  SEQPAR_LAYOUT_STRIPE};
    for (int i = 0; i < 3; i++) {
        make(&s, layouts[i], 3, 2, 2);
        each_token(shift_locally);
        expect_named(&s, "shift_after_split", "labels");
        make(&s, layouts[i], 3, 1, 1);
        each_token(shift_known_documents);
        expect_named(&s, "shift_after_split", "right");
    }
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 4, 1, 1);
    each_token(shift_locally_and_mask);
    expect_named(&s, "shift_after_split", "labels");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 2);
    each_token(no_shift);
    expect_named(&s, "labels_not_shifted", "label 0, right 7;");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 2);
    label_by(2, 1);
    expect_named(&s, "labels_shifted_twice", "labels");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 2);
    label_by(1, 1);
    expect_named(&s, "labels_cross_documents", "token 16, document 0: label");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 2);
    label_by(3, 1);
    expect_named(&s, "unknown", "labels");
}

/* The whole row's labels are there on each rank, which takes as many as it holds: from the
   begin on, or from where a contiguous share of its length would begin. */
static void label_unsplit(int contiguous) {
    for (int64_t r = 0; r < s.world; r++)
        for (int64_t a = 0; a < s.accumulation; a++) {
            int64_t begin = 0;
            for (int64_t i = r - r % s.sp; contiguous && i < r; i++) begin += s.of[i][a].tokens;
            for (int64_t i = 0; i < s.of[r][a].tokens; i++)
                s.of[r][a].labels[i] = ends_document(begin + i) ? NONE
                                                                : id_at(r, a, begin + i + 1);
        }
}

static void test_unsplit_labels(void) {
    make(&s, SEQPAR_LAYOUT_CONTIGUOUS, 3, 2, 2);
    label_unsplit(0);
    expect_named(&s, "side_tensor_not_split", "labels");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 4, 1, 1);
    label_unsplit(0);
    expect_named(&s, "side_tensor_not_split", "labels");
    make(&s, SEQPAR_LAYOUT_STRIPE, 2, 1, 2);
    label_unsplit(1);
    expect_named(&s, "side_tensor_not_split", "labels");
    make(&s, SEQPAR_LAYOUT_CONTIGUOUS, 3, 1, 1);
    label_unsplit(1); /* which is the split that there is */
    s.without = "loss";
    write_scene(&s);
    expect(0, "right", "labels    right");
    test_end("dump_labels_contiguous_are_split");
}

/* ---- the loss ---- */

static double mean_of_ranks(int64_t micro_from, int64_t micro_to) {
    double means = 0;
    for (int64_t r = 0; r < s.world; r++) {
        double sum = 0, count = 0;
        for (int64_t a = micro_from; a < micro_to; a++) right_sum(&s, r, a, &sum, &count);
        means += sum / count;
    }
    return means / (double)s.world;
}

static double mean_of_rank(int64_t r) {
    double sum = 0, count = 0;
    for (int64_t a = 0; a < s.accumulation; a++) right_sum(&s, r, a, &sum, &count);
    return sum / count;
}

/* What its tokens add to the loss of the step. */
static double share_of_rank(int64_t r) {
    double sum = 0, own, count = 0;
    for (int64_t a = 0; a < s.accumulation; a++) right_sum(&s, r, a, &sum, &count);
    own = sum;
    for (int64_t other = 0; other < s.world; other++)
        for (int64_t a = 0; other != r && a < s.accumulation; a++)
            right_sum(&s, other, a, &sum, &count);
    return own / count;
}

static double mean_of_micro_batches(void) {
    double means = 0;
    for (int64_t a = 0; a < s.accumulation; a++) {
        double sum = 0, count = 0;
        for (int64_t r = 0; r < s.world; r++) right_sum(&s, r, a, &sum, &count);
        means += sum / count;
    }
    return means / (double)s.accumulation;
}

/* Unequal counts, by ranks and by micro-batches. */
static void make_uneven(void) {
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 2);
    for (int64_t i = 0; i < s.of[1][0].tokens; i++)
        if (i % 3) s.of[1][0].labels[i] = NONE;
    for (int64_t i = 0; i < s.of[0][0].tokens; i++) s.of[0][0].logp[i] *= 3;
    for (int64_t i = 0; i + 4 < s.of[2][1].tokens; i++) s.of[2][1].labels[i] = NONE;
}

static void test_loss(void) {
    make_uneven();
    set_loss(&s, right_loss(&s));
    write_scene(&s);
    expect(0, "right", "loss      right: got");
    test_end("dump_uneven_right");
    set_loss(&s, mean_of_ranks(0, 2));
    expect_named(&s, "mean_of_means", "groups are ranks");
    set_loss(&s, mean_of_micro_batches());
    expect_named(&s, "mean_of_means", "groups are micro-batches");
    set_loss(&s, (mean_of_ranks(0, 1) + mean_of_ranks(1, 2)) / 2);
    expect_named(&s, "mean_of_means", "groups are ranks' micro-batches");
    set_loss(&s, right_loss(&s));
    s.loss[2] = mean_of_ranks(0, 2);
    expect_named(&s, "mean_of_means", "as rank 2 reports it");
    set_loss(&s, right_loss(&s));
    s.loss[2] = mean_of_rank(2);
    expect_named(&s, "own_mean_alone", "as rank 2 reports it");
    set_loss(&s, right_loss(&s));
    s.loss[0] = mean_of_rank(2);
    expect_named(&s, "unknown", "as rank 0 reports it"); /* that is another's */
    set_loss(&s, right_loss(&s));
    s.loss[1] = share_of_rank(1);
    expect_named(&s, "share_alone", "as rank 1 reports it");
    set_loss(&s, right_loss(&s));
    s.loss[1] = share_of_rank(0);
    expect_named(&s, "unknown", "as rank 1 reports it");
    for (int64_t r = 0; r < s.world; r++) s.loss[r] = share_of_rank(r);
    expect_named(&s, "share_alone", "groups are ranks");
    set_loss(&s, right_loss(&s) / 3);
    expect_named(&s, "shares_averaged", "loss");
    set_loss(&s, right_loss(&s) * 1.37);
    expect_named(&s, "unknown", "no known way to divide these sums");
    set_loss(&s, NAN);
    expect_named(&s, "unknown", "got nan");
}

/* ---- right steps that look odd, and steps that show nothing ---- */

static void expect_said(const char *name, int code, const char *headline, const char *text) {
    write_scene(&s);
    expect(code, headline, text);
    test_end("dump_%s", name);
}

/* The label of this token of the row, on whichever rank it is. */
static int32_t *label_at(int64_t micro, int64_t token) {
    for (int64_t r = 0; r < s.sp; r++)
        for (int64_t i = 0; i < s.of[r][micro].tokens; i++)
            if (s.of[r][micro].index[i] == token) return &s.of[r][micro].labels[i];
    return NULL;
}

/* As transformers' Trainer has it: a rank's share of the mean, times the number of ranks. */
static void test_shares(void) {
    double count = 0, own;
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 2, 2);
    for (int64_t r = 0; r < s.world; r++) {
        s.loss[r] = 0;
        for (int64_t a = 0; a < s.accumulation; a++) right_sum(&s, r, a, &s.loss[r], &count);
    }
    for (int64_t r = 0; r < s.world; r++) s.loss[r] *= (double)s.world / count;
    write_scene(&s);
    expect(0, "right", "each rank reports its own share times the number of ranks");
    test_end("dump_loss_of_shares");
    own = s.loss[4];
    s.loss[4] *= 1.01;
    write_scene(&s);
    expect(1, "wrong: unknown", "loss      wrong");
    s.loss[4] = NAN;
    write_scene(&s);
    expect(1, "wrong: unknown", "loss      wrong");
    s.loss[4] = own;
    test_end("dump_loss_of_other_shares");
}

static void test_odd_but_right(void) {
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 1);
    *label_at(0, TOKENS - 1) = 9999; /* the loader knows a token more */
    set_loss(&s, right_loss(&s));
    expect_said("label_behind_the_row", 0, "right", "labels    right");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 2);
    *label_at(0, s.of[0][0].index[9]) = NONE; /* rank 0's first stretch ends about there */
    *label_at(0, s.of[0][0].index[10]) = NONE;
    s.without = "loss";
    expect_said("masks_near_a_cut", 0, "right", "labels    right");
    make(&s, SEQPAR_LAYOUT_CONTIGUOUS, 2, 1, 2);
    *label_at(0, s.of[1][0].index[0] - 1) = NONE; /* the only cut, in one of two rows */
    set_loss(&s, right_loss(&s));
    expect_said("mask_at_one_cut_of_two", 0, "right", "labels    right");
    make_uneven();
    for (int64_t i = 0; i < s.of[1][1].tokens; i++) s.of[1][1].logp[i] *= 4;
    set_loss(&s, right_loss(&s) * 1.008);
    compare = 2;
    expect_said("wide_tolerance", 0, "right", "tolerance");
    compare = 0;
}

static void test_shows_nothing(void) {
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 1);
    s.without = "cu_seqlens";
    expect_said("packed_without_documents", 4, "insufficient", "give cu_seqlens");
    make(&s, SEQPAR_LAYOUT_CONTIGUOUS, 3, 1, 1);
    for (int64_t r = 1; r < 3; r++)
        for (int64_t t = -3; t < 2; t++) *label_at(0, s.of[r][0].index[0] + t) = NONE;
    set_loss(&s, right_loss(&s));
    expect_said("prompts_over_all_cuts", 4, "insufficient", "no cut between two ranks");
    make(&s, SEQPAR_LAYOUT_CONTIGUOUS, 2, 1, 1);
    for (int64_t t = -1; t < 1; t++) *label_at(0, s.of[1][0].index[0] + t) = NONE;
    set_loss(&s, right_loss(&s));
    expect_said("a_turn_ends_at_the_cut", 4, "insufficient", "no cut between two ranks");
    make(&s, SEQPAR_LAYOUT_CONTIGUOUS, 2, 1, 2);
    for (int64_t a = 0; a < 2; a++) *label_at(a, s.of[1][0].index[0] - 1) = NONE;
    *label_at(1, 50) = NONE;
    set_loss(&s, right_loss(&s));
    expect_said("masks_at_cuts_and_elsewhere", 4, "insufficient", "they may be");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 1);
    for (int64_t i = 0; i < s.of[1][0].tokens; i++) s.of[1][0].logp[i] = NAN;
    set_loss(&s, NAN);
    expect_said("nan_in_logp", 4, "insufficient", "NaN or Inf already");
}

static void shift_again_locally(void) {
    for (int64_t r = 0; r < s.world; r++)
        for (int64_t i = 0; i < s.of[r][0].tokens; i++)
            s.of[r][0].labels[i] = i + 1 < s.of[r][0].tokens ? s.of[r][0].labels[i + 1] : NONE;
}

static void test_shapes_of_mistakes(void) {
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 1);
    label_by(1, 0);
    shift_again_locally();
    expect_named(&s, "labels_shifted_twice", "labels");
    make(&s, SEQPAR_LAYOUT_CONTIGUOUS, 1, 1, 1);
    each_token(run_on);
    expect_named(&s, "positions_run_on", "positions wrong");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 2, 2, 1);
    for (int64_t i = 0; i < 9; i++) s.of[3][0].labels[i] = NONE;
    double sum[2] = {0}, count[2] = {0};
    for (int64_t r = 0; r < 4; r++) right_sum(&s, r, 0, &sum[r / 2], &count[r / 2]);
    set_loss(&s, (sum[0] / count[0] + sum[1] / count[1]) / 2);
    expect_named(&s, "mean_of_means", "groups are replicas");
}

/* ---- pairs ---- */

/* Of document `doc` in micro-batch a: sum of logp - ref_logp on ranks first to last; the
   reference times `reference`, and how many labels. */
static double part_of(int64_t doc, int64_t a, int64_t first, int64_t last, double reference,
                      double *labels) {
    double sum = 0;
    *labels = 0;
    for (int64_t r = first; r < last; r++)
        for (int64_t i = 0; i < s.of[r][a].tokens; i++) {
            const held *h = &s.of[r][a];
            if (document_of(h->index[i]) != doc || !counts(h->labels[i])) continue;
            sum += h->logp[i] - reference * h->ref_logp[i];
            ++*labels;
        }
    return sum;
}

static double sigmoid_loss(double h) { return log(1 + exp(-0.3 * h)); }

/* The mean over pairs and micro-batches; from the ranks given, h times `factor`. */
static double pairs_loss(int64_t first, int64_t last, double factor, double reference,
                         int by_length) {
    double sum = 0, n[2];
    for (int64_t a = 0; a < s.accumulation; a++)
        for (int64_t pair = 0; pair < DOCS / 2; pair++) {
            double chosen = part_of(2 * pair, a, first, last, reference, &n[0]);
            double rejected = part_of(2 * pair + 1, a, first, last, reference, &n[1]);
            if (by_length) chosen /= n[0] > 0 ? n[0] : 1;
            if (by_length) rejected /= n[1] > 0 ? n[1] : 1;
            sum += sigmoid_loss(factor * (chosen - rejected));
        }
    return sum / (double)(s.accumulation * DOCS / 2);
}

static void make_pairs(double loss) {
    set_loss(&s, loss);
    s.dpo = 1;
}

/* To the log-prob of one token of the first document that this rank trains. */
static void add_to_chosen(int64_t rank, double x) {
    held *h = &s.of[rank][0];
    int64_t i = 0;
    while (i < h->tokens && (document_of(h->index[i]) != 0 || h->labels[i] == NONE)) i++;
    if (test_expect(i < h->tokens, "rank %lld trains nothing of it", (long long)rank))
        h->logp[i] += x;
}

static void test_pairs(void) {
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 1);
    make_pairs(pairs_loss(0, 3, 1, 1, 0));
    write_scene(&s);
    expect(0, "right", "2 pairs give");
    test_end("dump_pairs_right");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 2);
    make_pairs(pairs_loss(0, 3, 1, 1, 0));
    write_scene(&s);
    expect(4, "insufficient", "whose micro-batches have unequal numbers of documents");
    test_end("dump_pairs_of_equal_numbers");
    make_pairs(
        (pairs_loss(0, 1, 1, 1, 0) + pairs_loss(1, 2, 1, 1, 0) + pairs_loss(2, 3, 1, 1, 0)) /
        3);
    expect_named(&s, "sigmoid_of_parts", "loss      wrong");
    make_pairs(pairs_loss(0, 3, 1.0 / 3, 1, 0));
    expect_named(&s, "log_probs_averaged", "loss      wrong");
    make_pairs(pairs_loss(0, 3, 1, 1, 0));
    s.loss[1] = pairs_loss(1, 2, 1, 1, 0);
    expect_named(&s, "log_probs_of_one_rank", "loss      wrong");
    make_pairs(pairs_loss(0, 3, -1, 1, 0));
    expect_named(&s, "pair_swapped", "loss      wrong");
    make_pairs(pairs_loss(0, 3, 1, 0, 0));
    expect_named(&s, "reference_missing", "loss      wrong");
    make_pairs(pairs_loss(0, 3, 1, 1, 1));
    expect_named(&s, "log_probs_by_length", "loss      wrong");
    make_pairs(pairs_loss(0, 3, 1, 1, 0) * 1.1);
    expect_named(&s, "unknown", "loss      wrong");
    for (int64_t r = 0; r < 3; r++)
        for (int64_t a = 0; a < 2; a++)
            memcpy(s.of[r][a].logp, s.of[r][a].ref_logp, sizeof s.of[r][a].logp);
    make_pairs(log(2));
    write_scene(&s);
    expect(4, "insufficient", "dump a later step");
    test_end("dump_pairs_of_the_first_step");
    for (int64_t r = 0; r < 3; r++)
        for (int64_t i = 0; i < s.of[r][0].tokens; i++)
            s.of[r][0].logp[i] += 1e-4 * (double)(1 + i);
    make_pairs(pairs_loss(0, 3, 1.0 / 3, 1, 0));
    expect_named(&s, "one of sigmoid_of_parts, log_probs_averaged", "loss      wrong");
    for (int64_t r = 0; r < 3; r++)
        for (int64_t i = 0; i < s.of[r][0].tokens; i++)
            s.of[r][0].logp[i] = s.of[r][0].ref_logp[i] + 1e-8;
    make_pairs(pairs_loss(0, 3, 1.0 / 3, 1, 0));
    write_scene(&s);
    expect(4, "insufficient", "dump a later step");
    test_end("dump_pairs_near_the_first_step");
    for (int64_t r = 0; r < 3; r++)
        memcpy(s.of[r][0].logp, s.of[r][0].ref_logp, sizeof s.of[r][0].logp);
    /* large parts that nearly cancel: one third of their sum gives nearly the same */
    add_to_chosen(0, 5);
    add_to_chosen(1, -4.98);
    make_pairs(pairs_loss(0, 3, 1.0 / 3, 1, 0));
    expect_named(&s, "log_probs_averaged", "loss      wrong");
    add_to_chosen(1, -0.0199999);
    make_pairs(pairs_loss(0, 3, 1.0 / 3, 1, 0));
    write_scene(&s);
    expect(4, "insufficient", "dump a later step");
    test_end("dump_pairs_whose_parts_cancel");
    for (int64_t r = 0; r < 3; r++)
        memcpy(s.of[r][0].logp, s.of[r][0].ref_logp, sizeof s.of[r][0].logp);
    make_pairs(0.71);
    expect_named(&s, "unknown", "had other log-probs");
    s.without = "ref_logp";
    write_scene(&s);
    expect(0, "right", "loss      not judged");
    test_end("dump_pairs_without_reference");
}

/* ---- what shows nothing ---- */

static void test_insufficient(void) {
    static const char *const lacks[] = {"index", "labels"};
    for (int i = 0; i < 2; i++) {
        make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 1);
        s.without = lacks[i];
        write_scene(&s);
        expect(4, "insufficient", "not judged");
        test_end("dump_without_%s", lacks[i]);
    }
    make(&s, SEQPAR_LAYOUT_CONTIGUOUS, 1, 1, 1);
    write_scene(&s);
    expect(4, "insufficient", "a mean of means is the same here");
    test_end("dump_of_one_rank");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 1);
    s.without = "loss";
    write_scene(&s);
    expect(0, "right", "loss      not judged");
    test_end("dump_without_loss");
}

/* ---- gradients ---- */

static void scale_gradients(double factor) {
    for (int64_t r = 0; r < s.world; r++)
        for (int i = 0; i < 2 * GRADIENT; i++)
            s.gradient[r][i / GRADIENT][i % GRADIENT] *= factor;
}

static void test_factor(double factor, const char *name) {
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    scale_gradients(factor);
    expect_named(&s, name, "gradients wrong: got");
}

static void scale_tensor(int i, double factor) {
    for (int64_t r = 0; r < s.world; r++)
        for (int at = 0; at < GRADIENT; at++) s.gradient[r][i][at] *= factor;
}

/* A factor that one tensor alone has, or each its own; elements of 0.01 beside those of 100 do
   not show in all together. */
static void test_some_tensors(void) {
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    scale_tensor(1, 3);
    expect_named(&s, "times_sp", "x 3 on 1 of 2 tensors: grad.up");
    expect_named(&s, "times_sp", "1 of 2 tensors are the wanted ones within 0.001, all others");
    scale_tensor(0, 0.5);
    expect_named(&s, "over_dp and times_sp", "x 0.5 on 1 of 2 tensors: grad.down");
    scale_tensor(0, 1.7);
    expect_named(&s, "unknown", "x 0.85 on 1 of 2 tensors: grad.down");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 2, 2, 1);
    scale_tensor(0, 2);
    expect_named(&s, "one of times_sp, times_dp", "x 2 on 1 of 2 tensors: grad.down");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    scale_tensor(1, 0);
    expect_named(&s, "unknown", "without a factor is grad.up, which is 0");
}

static void wanted_small(int small) {
    make(&s, SEQPAR_LAYOUT_CONTIGUOUS, 1, 1, 1);
    if (small) scale_tensor(0, 1e-5);
    write_in(&s, WANTED);
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    if (small) scale_tensor(0, 1e-5);
}

static void test_two_factors(void) {
    test_factor(1.5, "times_sp and over_dp");
    test_factor(2 / 9.0, "over_sp_squared and times_dp");
    test_factor(1.52, "unknown");
    wanted_small(1);
    scale_tensor(0, 3);
    expect_named(&s, "times_sp", "x 3 on 1 of 2 tensors: grad.down");
    scale_tensor(0, 1.1);
    expect_named(&s, "unknown", "x 3.3 on 1 of 2 tensors: grad.down");
    for (int64_t r = 0; r < s.world; r++) /* as rounding, where it cancels */
        for (int i = 0; i < GRADIENT; i++) s.gradient[r][0][i] *= i % 2 ? -1 : 1;
    write_scene(&s);
    expect(0, "right", "1 small tensors are farther than the tolerance by themselves");
    test_end("dump_gradients_small_tensor");
    wanted_small(1);
    write_scene(&s);
    expect(0, "right", "gradients right: got");
    test_end("dump_gradients_right_small");
    wanted_small(0);
}

static void test_gradients(void) {
    make(&s, SEQPAR_LAYOUT_CONTIGUOUS, 1, 1, 1);
    write_in(&s, WANTED);
    compare = 1;
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    write_scene(&s);
    expect(0, "right", "gradients right: got");
    test_end("dump_gradients_right");
    test_factor(3, "times_sp");
    test_factor(1.0 / 3, "over_sp");
    test_factor(1.0 / 9, "over_sp_squared");
    test_factor(2, "times_dp");
    test_factor(0.77, "unknown");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    for (int i = 0; i < GRADIENT; i++) s.gradient[4][1][i] *= 1.01;
    expect_named(&s, "never_synchronised", "grad.up of rank 4 is 0.01 away");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    for (int64_t r = 0; r < s.world; r++)
        for (int i = 0; i < GRADIENT; i++) s.gradient[r][1][i] += i % 3;
    expect_named(&s, "unknown", "without a factor is grad.up");
    scale_gradients(3);
    expect_named(&s, "unknown", "x 3 on 1 of 2 tensors: grad.down");
    test_some_tensors();
    test_two_factors();
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    s.gradient[0][0][5] = NAN;
    expect_named(&s, "unknown", "grad.down holds NaN or Inf");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    scale_gradients(NAN);
    expect_named(&s, "unknown", "grad.down holds NaN or Inf");
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    write_scene(&s);
    write_in(&s, WANTED);
    expect(3, "error: build/test_dump.want: its sp is 3; give --want a dump with sp 1", "sp 1");
    test_end("dump_wanted_of_several_ranks");
    compare = 0;
}

/* ---- as JSON ---- */

static const char *text_of(const cJSON *object, const char *key) {
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(object, key));
    return text ? text : "";
}

static void test_json(void) {
    static char said[65536];
    FILE *out;
    cJSON *all, *stages;
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 1);
    s.without = "loss";
    each_token(no_shift);
    write_scene(&s);
    out = popen("build/seqpar-verify ver " FOLDER " --json", "r");
    said[out ? fread(said, 1, sizeof said - 1, out) : 0] = 0;
    if (out) pclose(out);
    all = cJSON_Parse(said);
    stages = cJSON_GetObjectItem(all, "stages");
    test_expect(!strcmp(text_of(all, "verdict"), "wrong") &&
                    !strcmp(text_of(cJSON_GetArrayItem(cJSON_GetObjectItem(all, "mistakes"), 0),
                                    "name"),
                            "labels_not_shifted"),
                "verdict or mistake of %.200s", said);
    /* rewards are of other objectives */
    test_expect(cJSON_GetArraySize(stages) == 12 &&
                    !strcmp(text_of(cJSON_GetArrayItem(stages, 0), "verdict"), "right") &&
                    !strcmp(text_of(cJSON_GetArrayItem(stages, 2), "stage"), "labels") &&
                    !strcmp(text_of(cJSON_GetArrayItem(stages, 7), "verdict"), "not judged"),
                "stages of %.200s", said);
    test_expect(cJSON_GetArraySize(cJSON_GetObjectItem(all, "judged")) == 3 &&
                    cJSON_GetArraySize(cJSON_GetObjectItem(all, "not_judged")) == 9,
                "judged of %.200s", said);
    cJSON_Delete(all);
    test_end("dump_json");
}

/* ---- files that are no dump ---- */

static void expect_refused(const char *name, const char *sentence) {
    FILE *out = popen("build/seqpar-verify ver " FOLDER " 2>&1 >/dev/null", "r");
    char said[2048];
    size_t bytes = out ? fread(said, 1, sizeof said - 1, out) : 0;
    int is = out ? pclose(out) : -1;
    said[bytes] = 0;
    test_expect(WIFEXITED(is) && WEXITSTATUS(is) == 3 && strstr(said, sentence),
                "exit code %d, said '%.400s', not '%s'", WEXITSTATUS(is), said, sentence);
    test_end("dump_refused_%s", name);
}

static void test_files(void) {
    static const struct {
        const char *name, *command, *sentence;
    } table[] = {
        {"rank_missing", "rm " FOLDER "/rank1.safetensors", "no file of rank 1 of 3"},
        {"empty", "rm " FOLDER "/*", "no .safetensors file"},
        {"no_folder", "rm -r " FOLDER, "cannot be opened as a folder"},
        {"rank_twice", "cp " FOLDER "/rank1.safetensors " FOLDER "/again.safetensors",
         "metadata rank is 1 and world 3; another file has this rank"},
        {"cut_off", "truncate -s -1 " FOLDER "/rank2.safetensors", "rank2.safetensors"},
        {"no_metadata", "sed -i 's/seqpar_dump/seqpar_damp/' " FOLDER "/rank0.safetensors",
         "metadata seqpar_dump is 'missing'"},
        {"other_version",
         "sed -i 's/\"seqpar_dump\":\"1\"/\"seqpar_dump\":\"2\"/' " FOLDER "/rank0.safetensors",
         "seqpar_dump is '2', not '1'"},
        {"mixed_sp", "sed -i 's/\"sp\":\"3\"/\"sp\":\"1\"/' " FOLDER "/rank2.safetensors",
         "metadata sp differs from that of another file; for rows that are split over"},
        {"sp_text", "sed -i 's/\"sp\":\"3\"/\"sp\":\"x\"/' " FOLDER "/rank*.safetensors",
         "metadata sp is 'x'; write a whole number from 1"},
        {"sp_divides", "sed -i 's/\"sp\":\"3\"/\"sp\":\"2\"/' " FOLDER "/rank*.safetensors",
         "world 3 is not divisible by sp 2"},
        {"dtype", "sed -i 's/\"I32\"/\"F32\"/' " FOLDER "/rank0.safetensors",
         "write I64 or I32"}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 1);
        write_scene(&s);
        test_expect(!system(table[i].command), "%s", table[i].command);
        expect_refused(table[i].name, table[i].sentence);
    }
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 1);
    static const char *const odd[][2] = {
        {"no_index", "0.index is on 2 of the 3 ranks"},
        {"own_documents", "write the document boundaries of the whole row, the same on"},
        {"name", "the name of tensor 0.label is unknown"},
        {"micro_batch", "the micro-batch of tensor 7.ids is not below metadata"},
        {"rows", "rows; a micro-batch is one row"}};
    for (int i = 0; i < 5; i++) {
        s.odd = odd[i][0];
        write_scene(&s);
        expect_refused(odd[i][0], odd[i][1]);
    }
    s.odd = NULL;
    s.dpo = 2;
    write_scene(&s);
    expect_refused(
        "objective",
        "metadata objective is 'orpo'; write sft, dpo, rm, kto, ppo, value, other or grpo");
    s.dpo = 0;
    cu_seqlens[1] = 55; /* and then 18 */
    write_scene(&s);
    cu_seqlens[1] = 17;
    expect_refused("cu_seqlens_fall", "has 18 at element 2; write offsets that begin with 0");
    cu_seqlens[DOCS] = (int64_t)1 << 40;
    write_scene(&s);
    cu_seqlens[DOCS] = TOKENS;
    expect_refused("cu_seqlens_far", "ends with 1099511627776");
}

/* Every fifth token has id 0. */
static void put_zeros(void) {
    for (int64_t r = 0; r < s.world; r++)
        for (int64_t a = 0; a < s.accumulation; a++)
            for (int64_t i = 0; i < s.of[r][a].tokens; i++) {
                held *h = &s.of[r][a];
                if (h->index[i] % 5 == 3) h->ids[i] = 0;
                if (h->index[i] % 5 != 2 || h->labels[i] == NONE) continue;
                h->labels[i] = 0;
                h->logp[i] *= 3;
            }
    set_loss(&s, right_loss(&s));
}

static void test_token_zero(void) {
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 2);
    put_zeros();
    expect_said("token_zero_counts", 0, "right", "loss      right");
    skip_zeros = 1;
    set_loss(&s, right_loss(&s));
    expect_named(&s, "token_zero_ignored", "loss      wrong");
    skip_zeros = 0;
    make(&s, SEQPAR_LAYOUT_ZIGZAG, 3, 1, 1);
    put_zeros();
    make_pairs(pairs_loss(0, 3, 1, 1, 0));
    expect_said("token_zero_counts_in_pairs", 0, "right", "loss      right");
    skip_zeros = 1;
    make_pairs(pairs_loss(0, 3, 1, 1, 0));
    expect_named(&s, "token_zero_ignored", "loss      wrong");
    skip_zeros = 0;
    s.dpo = 0;
    make(&s, SEQPAR_LAYOUT_STRIPE, 2, 1, 2); /* no such target: it cannot be */
    skip_zeros = 1;
    set_loss(&s, right_loss(&s));
    skip_zeros = 0;
    expect_said("no_token_zero", 0, "right", "loss      right");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_right());
    TEST(test_places());
    TEST(test_positions());
    TEST(test_labels());
    TEST(test_loss());
    TEST(test_odd_but_right());
    TEST(test_shows_nothing());
    TEST(test_shapes_of_mistakes());
    TEST(test_insufficient());
    TEST(test_pairs());
    TEST(test_json());
    TEST(test_gradients());
    TEST(test_files());
    TEST(test_unsplit_labels());
    TEST(test_token_zero());
    TEST(test_shares());
    return test_summary();
}
