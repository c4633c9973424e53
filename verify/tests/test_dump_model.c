/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver --model`: log-probs and gradients of a dump against the model itself.
   Right and wrong ones are made here with slow.h, which differentiates by complex step; a
   mistake is other rows, other documents or other weights of tokens. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "support/deal.h"
#include "seqpar_safetensors.h"
#include "second/slow.h"
#include "support/oracle_says.h"

#define FOLDER "build/test_dump_model.d"
#define MODEL  "build/test_dump_model.m"
#define LORA   "build/test_dump_model.a"
enum { SMOOTHING, Z_LOSS, ENTROPY, TERMS };
enum { SP = 2, DP = 2, MICRO = 2, ROWS = DP * MICRO, WORLD = SP * DP, DOCS = 3, MOST = 29 };
static slow_config config = {.layers = 1,
                             .hidden = 8,
                             .heads = 2,
                             .kv_heads = 1,
                             .head_dim = 4,
                             .intermediate = 10,
                             .vocab = 17,
                             .rope_theta = 100,
                             .rms_eps = 1e-5};
static const int64_t cu_seqlens[ROWS][DOCS + 1] = {
    {0, 11, 12, 23}, {0, 7, 18, 29}, {0, 2, 15, 19}, {0, 13, 21, 27}};

/* A row of the step, and who holds which token. */
typedef struct step_row {
    int64_t tokens;
    int32_t ids[MOST], targets[MOST];
    int64_t rank[MOST], local[MOST];
    double logp[MOST], ref_logp[MOST], seeds[MOST]; /* logp: of RM, values */
    double old_logp[MOST], advantages[MOST];
    double desirable[DOCS], kl[DOCS];
} step_row;
static step_row rows[ROWS];
static int64_t row_count = ROWS, micro_count = MICRO; /* of the step: all, or one */
static double *parameters, *gradient;
static slow_tensor *table;
static int64_t count;

/* How the dump is made. */
static struct {
    int f32, dpo, without_logp, without_documents, positions_in_dump; /* dpo: pairs alone */
    const char *objective, *without;                                  /* without: a parameter */
    const char *score; /* RM: the name of the head */
    int adapters;      /* they learn, and nothing else */
    double loss[WORLD];
    int with_loss;
    double scale;
    double terms[TERMS];     /* of the metadata: label_smoothing, z_loss, entropy_coef */
    int left_out;            /* 1 + the term that the gradient lacks */
    int kl_ratio;            /* of the metadata */
    const char *loss_type;   /* DPO: of the metadata, with label_smoothing */
    double desirable_weight; /* of KTO; its other class has 1 */
    double smoothing, margin, center; /* margin: RM, of the first pair of each row */
} how;

/* ---- the step ---- */

static int64_t row_of(int64_t rank, int64_t micro) { return rank / SP * micro_count + micro; }

static void deal(int64_t r) {
    step_row *row = &rows[r];
    int64_t held[SP] = {0};
    for (int64_t t = 0; t < row->tokens; t++) {
        int64_t p = deal_rank(SEQPAR_LAYOUT_ZIGZAG, SP, row->tokens, cu_seqlens[r], DOCS, t);
        row->rank[t] = p + r / MICRO * SP;
        row->local[t] = held[p]++;
    }
}

static int64_t document_of(int64_t r, int64_t t) {
    int64_t d = 0;
    while (cu_seqlens[r][d + 1] <= t) d++;
    return d;
}

static void make_rows(void) {
    for (int64_t r = 0; r < ROWS; r++) {
        step_row *row = &rows[r];
        row->tokens = cu_seqlens[r][DOCS];
        deal(r);
        for (int64_t t = 0; t < row->tokens; t++)
            row->ids[t] = (int32_t)test_integer(0, config.vocab - 1);
        for (int64_t t = 0; t < row->tokens; t++) {
            int64_t d = document_of(r, t);
            int last = t + 1 == cu_seqlens[r][d + 1];
            /* uneven: prompts are long in some rows */
            int prompt = t < cu_seqlens[r][d] + r;
            row->targets[t] = last || prompt ? SLOW_IGNORED : row->ids[t + 1];
            row->ref_logp[t] = -2.5 - 0.1 * (double)test_integer(0, 9);
            row->advantages[t] = 0.3 * (double)((5 * r + 3 * d) % 7) - 0.8;
        }
        for (int64_t d = 0; d < DOCS; d++) {
            row->desirable[d] = (double)((r + d) % 2);
            row->kl[d] = 1 + 0.3 * (double)r + 0.2 * (double)d;
        }
    }
}

static double counted(int (*in)(int64_t r, int64_t t, int64_t group), int64_t group) {
    double n = 0;
    for (int64_t r = 0; r < row_count; r++)
        for (int64_t t = 0; t < rows[r].tokens; t++)
            n += rows[r].targets[t] != SLOW_IGNORED && in(r, t, group);
    return n;
}

static int in_all(int64_t r, int64_t t, int64_t group) { return (void)r, (void)t, !group; }
static int in_rank(int64_t r, int64_t t, int64_t group) { return rows[r].rank[t] == group; }
static int in_micro(int64_t r, int64_t t, int64_t group) { return (void)t, r % MICRO == group; }
static int in_document(int64_t r, int64_t t, int64_t group) {
    return r * DOCS + document_of(r, t) == group;
}
static int in_not_zero(int64_t r, int64_t t, int64_t group) {
    return !group && rows[r].targets[t] != 0;
}
static int in_last(int64_t r, int64_t t, int64_t group) {
    return (void)t, !group && r % MICRO == MICRO - 1;
}

/* The mean over groups of their means, -1 / (groups n) a token. */
static void seed_means(int (*in)(int64_t r, int64_t t, int64_t group), int64_t groups) {
    double filled = 0;
    for (int64_t g = 0; g < groups; g++) filled += counted(in, g) > 0;
    for (int64_t r = 0; r < row_count; r++)
        for (int64_t t = 0; t < rows[r].tokens; t++) {
            rows[r].seeds[t] = 0;
            for (int64_t g = 0; g < groups; g++)
                if (in(r, t, g)) rows[r].seeds[t] = -1 / (filled * counted(in, g));
        }
}

/* Of a document: policy - reference, of tokens that `rank` holds, -1: of all. */
static double margin_of(int64_t r, int64_t d, int64_t rank, double reference) {
    double sum = 0;
    for (int64_t t = cu_seqlens[r][d]; t < cu_seqlens[r][d + 1]; t++)
        if (rows[r].targets[t] != SLOW_IGNORED && (rank < 0 || rows[r].rank[t] % SP == rank))
            sum += rows[r].logp[t] - reference * rows[r].ref_logp[t];
    return sum;
}

/* DPO, whose pairs are here documents 0 and 1; the third document is cut off then. */
enum { RIGHT_PAIRS, OF_PARTS, AVERAGED, WITHOUT_REFERENCE };
static void seed_pairs(int wrong) {
    for (int64_t r = 0; r < row_count; r++)
        for (int64_t t = 0; t < rows[r].tokens; t++) {
            int64_t part = wrong == OF_PARTS ? rows[r].rank[t] % SP : -1;
            double reference = wrong == WITHOUT_REFERENCE ? 0 : 1;
            double h = margin_of(r, 0, part, reference) - margin_of(r, 1, part, reference);
            if (wrong == AVERAGED) h = h / SP;
            rows[r].seeds[t] = 0.3 / (1 + exp(0.3 * h)) / (double)row_count *
                               (document_of(r, t) == 1 ? 1 : -1);
        }
}

/* The loss of a pair by loss_type, from its responses' log-probs; wrong: a mistake in it. */
enum { PREFERENCE_RIGHT, BY_THE_OTHER_LENGTH, NOT_SMOOTHED, NO_REFERENCE };
static double response_h(int64_t r, int64_t d, int wrong) {
    int is_mean = !strcmp(how.loss_type, "ipo_mean") || !strcmp(how.loss_type, "simpo");
    double reference = strcmp(how.loss_type, "simpo") && wrong != NO_REFERENCE ? 1 : 0, n = 0;
    for (int64_t t = cu_seqlens[r][d]; t < cu_seqlens[r][d + 1]; t++)
        n += rows[r].targets[t] != SLOW_IGNORED;
    if (wrong == BY_THE_OTHER_LENGTH) is_mean = !is_mean;
    return margin_of(r, d, -1, reference) / (is_mean && n > 0 ? n : 1);
}

static double preference_of(int64_t r, int wrong) {
    double x = response_h(r, 0, wrong) - response_h(r, 1, wrong), z = 0.3 * x;
    double e = wrong == NOT_SMOOTHED ? 0 : how.smoothing;
    if (!strncmp(how.loss_type, "ipo", 3)) return pow(x - 1 / 0.6, 2);
    if (!strcmp(how.loss_type, "hinge")) return z < 1 ? 1 - z : 0;
    if (!strcmp(how.loss_type, "simpo")) z -= 0.5;
    if (!strcmp(how.loss_type, "robust"))
        return ((1 - e) * log1p(exp(-z)) - e * log1p(exp(z))) / (1 - 2 * e);
    return (1 - e) * log1p(exp(-z)) + e * log1p(exp(z));
}

static void seed_preferences(int wrong) {
    for (int64_t r = 0; r < row_count; r++)
        for (int64_t t = 0; t < rows[r].tokens; t++) {
            double *x = &rows[r].logp[t], was = *x, high, h = 1e-5;
            *x = was + h;
            high = preference_of(r, wrong);
            *x = was - h;
            rows[r].seeds[t] = (high - preference_of(r, wrong)) / (2 * h) / (double)row_count;
            *x = was;
        }
}

/* ---- RM, KTO and PPO: losses as functions of log-probs or values, differentiated by central
   differences. Each token's seed is the slope of its own rank's loss. ---- */

enum {
    NOTHING_WRONG,
    RM_AVERAGED,
    RM_FIRST_TOKEN,
    RM_RANK_END,
    RM_SWAPPED,
    RM_OF_PARTS,
    RM_NO_MARGIN,
    RM_NO_CENTER,
    KTO_AVERAGED,
    KTO_ONE_REPLICA,
    KTO_NO_Z,
    KTO_Z_OVER_P,
    KTO_SWAPPED,
    KTO_WEIGHED_ALIKE,
    KTO_FIRST_REFERENCE,
    KTO_OWN_KL,
    PPO_NO_CLIP,
    PPO_INVERTED,
    PPO_NO_KL,
    PPO_KL_RATIO, /* no mistake where the metadata say it */
    PPO_WHITENED,
    PPO_BY_RANK,
    PPO_FIRST_ADVANTAGES
};

/* The place whose value is the document's score. */
static int64_t score_place(int64_t r, int64_t d, int wrong) {
    int64_t begin = cu_seqlens[r][d], end = cu_seqlens[r][d + 1], at = -1;
    if (wrong == RM_FIRST_TOKEN) return begin;
    if (wrong != RM_RANK_END) return end - 1;
    for (int64_t rank = 0; rank < WORLD; rank++) { /* ranks one after the other, by rows */
        int64_t most = -1;
        for (int64_t t = begin; t < end; t++)
            if (rows[r].rank[t] == rank && rows[r].local[t] > most) {
                most = rows[r].local[t];
                at = t;
            }
    }
    return at;
}

static double softplus_of(double x) { return log1p(exp(x)); }

static double rm_loss(int wrong, int64_t rank) {
    double sum = 0;
    for (int64_t r = 0; r < row_count; r++) {
        double score[2];
        for (int64_t d = 0; d < 2; d++) {
            int64_t at = score_place(r, d, wrong);
            score[d] = rows[r].logp[at] / (wrong == RM_AVERAGED ? SP : 1);
            if (wrong == RM_OF_PARTS && rows[r].rank[at] != rank) score[d] = 0;
        }
        sum += softplus_of((wrong == RM_SWAPPED ? score[0] - score[1] : score[1] - score[0]) +
                           (wrong == RM_NO_MARGIN ? 0 : how.margin));
        sum += (wrong == RM_NO_CENTER ? 0 : how.center) * pow(score[0] + score[1], 2);
    }
    return sum / (double)row_count / (wrong == RM_OF_PARTS ? SP : 1);
}

/* The mean of kl over documents of a micro-batch, of all replicas or one. */
static double kto_z_of(int64_t r, int wrong, int64_t rank) {
    double sum = 0, count = 0;
    if (wrong == KTO_NO_Z) return 0;
    for (int64_t other = 0; other < row_count; other++)
        for (int64_t d = 0; d < DOCS && other % MICRO == r % MICRO; d++) {
            if (wrong == KTO_ONE_REPLICA && other != r) continue;
            sum += rows[other].kl[d];
            count++;
        }
    sum /= count;
    if (wrong == KTO_OWN_KL) return sum * (rank % SP ? 0.375 : 0.625);
    return sum / (wrong == KTO_Z_OVER_P ? SP : 1);
}

/* Of a document, where each rank takes the first n of the row's ref_logp. */
static double first_reference(int64_t r, int64_t d) {
    double sum = 0;
    for (int64_t t = cu_seqlens[r][d]; t < cu_seqlens[r][d + 1]; t++)
        if (rows[r].targets[t] != SLOW_IGNORED) sum += rows[r].ref_logp[rows[r].local[t]];
    return sum;
}

static double kto_loss_of(int wrong, int64_t rank) {
    double sum = 0;
    for (int64_t r = 0; r < row_count; r++)
        for (int64_t d = 0; d < DOCS; d++) {
            double h = wrong == KTO_FIRST_REFERENCE
                           ? margin_of(r, d, -1, 0) - first_reference(r, d)
                           : margin_of(r, d, -1, 1) / (wrong == KTO_AVERAGED ? SP : 1);
            int good = (rows[r].desirable[d] != 0) != (wrong == KTO_SWAPPED);
            double gain = h - kto_z_of(r, wrong, rank);
            double weight = wrong == KTO_WEIGHED_ALIKE ? 1 : good ? how.desirable_weight : 1;
            sum += weight * (1 - 1 / (1 + exp(-0.3 * (good ? gain : -gain))));
        }
    return sum / (double)(row_count * DOCS);
}

static double whitened(int64_t r, int64_t t) {
    double n = 0, mean = 0, squares = 0;
    for (int64_t pass = 0; pass < 2; pass++)
        for (int64_t i = 0; i < row_count; i++)
            for (int64_t k = 0; k < rows[i].tokens; k++) {
                if (rows[i].targets[k] == SLOW_IGNORED || rows[i].rank[k] != rows[r].rank[t])
                    continue;
                if (!pass) n++;
                if (!pass) mean += rows[i].advantages[k];
                if (pass) squares += pow(rows[i].advantages[k] - mean / n, 2);
            }
    return (rows[r].advantages[t] - mean / n) / (sqrt(squares / n) + 1e-8);
}

static double advantage_taken(int64_t r, int64_t t, int wrong) {
    if (wrong == PPO_WHITENED) return whitened(r, t);
    return rows[r].advantages[wrong == PPO_FIRST_ADVANTAGES ? rows[r].local[t] : t];
}

static double ppo_token(int64_t r, int64_t t, int wrong) {
    double apart = rows[r].logp[t] - rows[r].old_logp[t];
    double ratio = exp(wrong == PPO_INVERTED ? -apart : apart);
    double bound = ratio < 0.8 ? 0.8 : ratio > 1.2 ? 1.2 : ratio;
    double a = advantage_taken(r, t, wrong), k = rows[r].ref_logp[t] - rows[r].logp[t];
    double loss = fmax(-a * ratio, -a * (wrong == PPO_NO_CLIP ? ratio : bound));
    double weight = wrong == PPO_NO_KL ? 0 : wrong == PPO_KL_RATIO ? 0.05 * ratio : 0.05;
    return loss + weight * (exp(k) - k - 1);
}

static double ppo_loss(int wrong) {
    double sum = 0;
    for (int64_t r = 0; r < row_count; r++)
        for (int64_t t = 0; t < rows[r].tokens; t++) {
            double count = wrong == PPO_BY_RANK ? WORLD * counted(in_rank, rows[r].rank[t])
                                                : counted(in_all, 0);
            if (rows[r].targets[t] != SLOW_IGNORED) sum += ppo_token(r, t, wrong) / count;
        }
    return sum;
}

static double loss_of(int wrong, int64_t rank) {
    if (!strcmp(how.objective, "rm")) return rm_loss(wrong, rank);
    return !strcmp(how.objective, "kto") ? kto_loss_of(wrong, rank) : ppo_loss(wrong);
}

static void seed_by_differences(int wrong) {
    for (int64_t r = 0; r < row_count; r++)
        for (int64_t t = 0; t < rows[r].tokens; t++) {
            double *x = &rows[r].logp[t], was = *x, high, h = 1e-5;
            *x = was + h;
            high = loss_of(wrong, rows[r].rank[t]);
            *x = was - h;
            rows[r].seeds[t] = (high - loss_of(wrong, rows[r].rank[t])) / (2 * h);
            *x = was;
        }
}

/* ---- slow.h's rows ---- */

typedef struct slow_rows {
    slow_row row[2 * ROWS * DOCS];
    int64_t cu[2 * ROWS][DOCS + 1];
    int32_t ids[2 * ROWS][MOST], targets[2 * ROWS][MOST];
    double seeds[2 * ROWS][MOST], logp[2 * ROWS][MOST];
    int64_t n;
} slow_rows;
static slow_rows slow;

static void push_row(int64_t docs) {
    slow.row[slow.n] = (slow_row){.tokens = slow.cu[slow.n][docs],
                                  .docs = docs,
                                  .cu_seqlens = slow.cu[slow.n],
                                  .ids = slow.ids[slow.n],
                                  .targets = slow.targets[slow.n],
                                  .weights = NULL,
                                  .logp_seeds = slow.seeds[slow.n]};
    slow.n++;
}

static void push_token(int64_t at, int64_t r, int64_t t) {
    slow.ids[slow.n][at] = rows[r].ids[t];
    slow.targets[slow.n][at] = rows[r].targets[t];
    slow.seeds[slow.n][at] = rows[r].seeds[t];
}

static void whole_rows(int documents) {
    slow.n = 0;
    for (int64_t r = 0; r < row_count; r++) {
        for (int64_t t = 0; t < rows[r].tokens; t++) push_token(t, r, t);
        memcpy(slow.cu[slow.n], cu_seqlens[r], sizeof slow.cu[0]);
        slow.cu[slow.n][documents ? DOCS : 1] = rows[r].tokens;
        push_row(documents ? DOCS : 1);
    }
}

/* Each rank alone with its tokens, in its order; positions count them. */
static void rows_of_ranks(void) {
    slow.n = 0;
    for (int64_t r = 0; r < row_count; r++)
        for (int64_t p = 0; p < SP; p++) {
            int64_t at = 0, docs = 0, last = -1;
            for (int64_t t = 0; t < rows[r].tokens; t++) {
                if (rows[r].rank[t] % SP != p) continue;
                push_token(at, r, t);
                if (document_of(r, t) != last) slow.cu[slow.n][docs++] = at;
                last = document_of(r, t);
                at++;
            }
            slow.cu[slow.n][docs] = at;
            push_row(docs);
        }
}

static slow_problem problem_of(void) {
    return (slow_problem){.config = &config,
                          .rows = slow.n,
                          .row = slow.row,
                          /* the cross-entropy itself counts nothing */
                          .objective = {.count = INFINITY}};
}

static double term(int i) { return how.left_out == 1 + i ? 0 : how.terms[i]; }

/* SFT: slow.h's own smoothing and z loss, of tokens weighted by minus their seeds. PPO: the
   entropy of every supervised token, with minus its coefficient over their number. */
static void add_terms(slow_problem *p) {
    static double of_token[ROWS * SP][MOST];
    int sft = how.terms[SMOOTHING] > 0 || how.terms[Z_LOSS] > 0;
    if (sft) p->objective = (slow_objective){term(SMOOTHING), term(Z_LOSS), 1, 0};
    for (int64_t i = 0; i < slow.n && (sft || how.terms[ENTROPY] > 0); i++) {
        for (int64_t t = 0; t < slow.row[i].tokens; t++)
            of_token[i][t] = sft ? -slow.seeds[i][t]
                             : slow.targets[i][t] == SLOW_IGNORED
                                 ? 0
                                 : -term(ENTROPY) / counted(in_all, 0);
        if (sft)
            slow.row[i].weights = of_token[i];
        else
            slow.row[i].entropy_seeds = of_token[i];
        if (sft) slow.row[i].logp_seeds = NULL;
    }
}

static void run_slow(void) {
    slow_problem p = problem_of();
    add_terms(&p);
    double lse[MOST], entropy[MOST];
    slow_gradient(&p, parameters, gradient);
    for (int64_t i = 0; i < slow.n; i++)
        slow_statistics(&config, parameters, &slow.row[i], slow.logp[i], lse, entropy);
}

/* Log-probs back to the rows: of whole ones, or of ranks'. */
static void take_logp(int of_ranks) {
    for (int64_t r = 0; r < row_count; r++) {
        int64_t at[SP] = {0};
        for (int64_t t = 0; t < rows[r].tokens; t++) {
            int64_t p = rows[r].rank[t] % SP;
            rows[r].logp[t] = of_ranks ? slow.logp[r * SP + p][at[p]++] : slow.logp[r][t];
        }
    }
}

static void right_step(void) {
    whole_rows(1);
    run_slow();
    take_logp(0);
}

/* ---- writing it ---- */

typedef struct page {
    seqpar_safetensors_tensor tensors[48];
    const void *data[48];
    char name[48][120];
    float f32[48][400];
    int64_t count;
} page;
static page paper; /* large */

static void put(const char *name, const void *data, seqpar_safetensors_dtype dtype,
                int64_t elements, int64_t columns) {
    int64_t at = paper.count++;
    snprintf(paper.name[at], sizeof paper.name[at], "%s", name);
    paper.tensors[at] = (seqpar_safetensors_tensor){
        .name = paper.name[at], .dtype = dtype, .dims = 1, .shape = {elements}};
    if (columns) {
        paper.tensors[at].dims = 2;
        paper.tensors[at].shape[0] = elements / columns;
        paper.tensors[at].shape[1] = columns;
    }
    paper.data[at] = data;
    for (int64_t i = 0; how.f32 && dtype == SEQPAR_SAFETENSORS_F64 && i < elements; i++)
        paper.f32[at][i] = (float)((const double *)data)[i];
    if (how.f32 && dtype == SEQPAR_SAFETENSORS_F64) {
        paper.tensors[at].dtype = SEQPAR_SAFETENSORS_F32;
        paper.data[at] = paper.f32[at];
    }
}

static void save(const char *path, const seqpar_safetensors_pair *pairs, int64_t n) {
    seqpar_error error = {0};
    seqpar_safetensors_desc desc = {.path = path,
                                    .tensors = paper.tensors,
                                    .count = paper.count,
                                    .metadata = pairs,
                                    .metadata_count = n};
    test_expect(!seqpar_safetensors_save(&desc, paper.data, &error), "%s", error.text);
}

static void put_tensors(const char *prefix, const double *values) {
    char name[80];
    for (int64_t i = 0; i < slow_tensors(&config); i++) {
        if (how.without && !strcmp(how.without, table[i].name)) continue;
        snprintf(name, sizeof name, "%s%s", prefix, table[i].name);
        if (how.score && !strcmp(table[i].name, "lm_head.weight")) {
            snprintf(name, sizeof name, "%s%s", prefix, how.score);
            put(name, values + table[i].offset, SEQPAR_SAFETENSORS_F64, table[i].cols,
                table[i].cols);
            continue;
        }
        put(name, values + table[i].offset, SEQPAR_SAFETENSORS_F64,
            table[i].rows * table[i].cols, table[i].rows > 1 ? table[i].cols : 0);
    }
}

/* ---- adapters (LoRA): the parameters are those of the model with them in it ---- */

enum { RANK = 2, ADAPTED = 2, WIDEST = 10 };
static const struct {
    const char *name;
    int64_t rows, cols;
} adapted[ADAPTED] = {{"model.layers.0.self_attn.q_proj", 8, 8},
                      {"model.layers.0.mlp.down_proj", 8, 10}};
static const double adapter_scale = 1.5; /* alpha 3, rank 2 */
/* 0: A (rank, cols), 1: B (rows, rank) */
static double adapter[ADAPTED][2][RANK * WIDEST], adapter_gradient[ADAPTED][2][RANK * WIDEST];

static int64_t adapter_count(int64_t n, int64_t of) {
    return RANK * (of ? adapted[n].rows : adapted[n].cols);
}

static double *weights_of(double *all, int64_t n) {
    char name[80];
    snprintf(name, sizeof name, "%s.weight", adapted[n].name);
    for (int64_t i = 0; i < slow_tensors(&config); i++)
        if (!strcmp(table[i].name, name)) return all + table[i].offset;
    exit(1);
}

/* to += scale (B A), of these. */
static void add_product(double *to, int64_t n, const double *b, const double *a) {
    for (int64_t i = 0; i < adapted[n].rows; i++)
        for (int64_t j = 0; j < adapted[n].cols; j++)
            for (int64_t k = 0; k < RANK; k++)
                to[i * adapted[n].cols + j] += adapter_scale * b[i * RANK + k] *
                                               a[k * adapted[n].cols + j];
}

/* The slope of the loss by one number of an adapter: along what W moves by. */
static double adapter_slope(const slow_problem *p, int64_t n, int64_t of, int64_t i) {
    double one[RANK * WIDEST] = {0}, *along = slow_allocate(count, sizeof *along), slope;
    memset(along, 0, (size_t)count * sizeof *along);
    one[i] = 1;
    add_product(weights_of(along, n), n, of ? one : adapter[n][1], of ? adapter[n][0] : one);
    slope = slow_directional(p, parameters, along);
    free(along);
    return slope;
}

static void adapters_step(void) {
    slow_problem p = problem_of();
    for (int64_t n = 0; n < ADAPTED; n++)
        for (int64_t of = 0; of < 2; of++)
            for (int64_t i = 0; i < adapter_count(n, of); i++)
                adapter_gradient[n][of][i] = adapter_slope(&p, n, of, i);
}

/* end: of PEFT's names, in a folder ".weight", in a model at work ".default.weight" */
static void put_adapters(const char *prefix, const char *end, double *values[ADAPTED][2]) {
    char name[120];
    for (int64_t n = 0; n < ADAPTED; n++)
        for (int64_t of = 0; of < 2; of++) {
            int64_t cols = of ? RANK : adapted[n].cols;
            snprintf(name, sizeof name, "%sbase_model.model.%s.lora_%s%s", prefix,
                     adapted[n].name, of ? "B" : "A", end);
            put(name, values[n][of], SEQPAR_SAFETENSORS_F64, adapter_count(n, of), cols);
        }
}

static void put_adapter_gradients(void) {
    static double scaled[ADAPTED][2][RANK * WIDEST];
    double *values[ADAPTED][2];
    for (int64_t n = 0; n < ADAPTED * 2; n++) {
        for (int64_t i = 0; i < RANK * WIDEST; i++)
            scaled[n / 2][n % 2][i] = adapter_gradient[n / 2][n % 2][i] * how.scale;
        values[n / 2][n % 2] = scaled[n / 2][n % 2];
    }
    put_adapters("grad.", ".default.weight", values);
}

/* more: JSON behind the last key */
static void write_adapters(const char *more) {
    double *values[ADAPTED][2] = {{adapter[0][0], adapter[0][1]},
                                  {adapter[1][0], adapter[1][1]}};
    FILE *f;
    if (system("rm -rf " LORA)) exit(1);
    mkdir(LORA, 0777);
    paper.count = 0;
    put_adapters("", ".weight", values);
    save(LORA "/adapter_model.safetensors", NULL, 0);
    f = fopen(LORA "/adapter_config.json", "w");
    if (!f) exit(1);
    fprintf(f,
            "{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 3, \"bias\": \"none\",\n"
            "\"target_modules\": [\"q_proj\", \"down_proj\"], \"lora_dropout\": %s}\n",
            more);
    fclose(f);
}

static void write_model(const char *more) {
    FILE *f;
    if (system("rm -rf " MODEL)) exit(1);
    mkdir(MODEL, 0777);
    paper.count = 0;
    put_tensors("", parameters);
    save(MODEL "/model.safetensors", NULL, 0);
    f = fopen(MODEL "/config.json", "w");
    if (!f) exit(1);
    fprintf(f,
            "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\",\n"
            "\"num_hidden_layers\": %d, \"hidden_size\": %d, \"num_attention_heads\": %d,\n"
            "\"num_key_value_heads\": %d, \"head_dim\": %d, \"intermediate_size\": %d,\n"
            "\"vocab_size\": %d, \"rope_theta\": %g, \"rms_norm_eps\": %g%s}\n",
            (int)config.layers, (int)config.hidden, (int)config.heads, (int)config.kv_heads,
            (int)config.head_dim, (int)config.intermediate, (int)config.vocab,
            config.rope_theta, config.rms_eps, more);
    fclose(f);
}

/* What PPO and KTO have beside. */
static void put_sides(int64_t a, int64_t n, int64_t docs, const step_row *row,
                      double logp[4][MOST]) {
    static const char *const names[] = {"old_logp", "advantages", "desirable", "kl"};
    const double *const data[] = {logp[2], logp[3], row->desirable, row->kl};
    char name[80];
    int first = !strcmp(how.objective, "ppo") ? 0 : !strcmp(how.objective, "kto") ? 2 : 4;
    for (int i = first; i < first + 2 && i < 4; i++) {
        snprintf(name, sizeof name, "%lld.%s", (long long)a, names[i]);
        put(name, data[i], SEQPAR_SAFETENSORS_F64, i < 2 ? n : docs, 0);
    }
}

/* A rank's tokens of micro-batch a. */
static void put_micro(int64_t rank, int64_t a) {
    static int32_t ids[MICRO][3][MOST];
    static double logp[MICRO][4][MOST];
    static int64_t documents[ROWS][DOCS + 1];
    step_row *row = &rows[row_of(rank, a)];
    int64_t n = 0, docs = how.dpo ? 2 : DOCS;
    char name[80];
    memcpy(documents[row_of(rank, a)], cu_seqlens[row_of(rank, a)], sizeof documents[0]);
    for (int64_t t = 0; t < row->tokens; t++) {
        int64_t at = row->local[t];
        if (row->rank[t] != rank || (how.dpo && t >= cu_seqlens[row_of(rank, a)][2])) continue;
        ids[a][0][at] = (int32_t)t;
        ids[a][1][at] = row->ids[t];
        ids[a][2][at] = row->targets[t];
        logp[a][0][at] = row->logp[t];
        logp[a][1][at] = row->ref_logp[t];
        logp[a][2][at] = row->old_logp[t];
        logp[a][3][at] = row->advantages[t];
        n++;
    }
    static const char *const integers[] = {"index", "ids", "labels"};
    for (int i = 0; i < (how.score ? 2 : 3); i++) {
        snprintf(name, sizeof name, "%lld.%s", (long long)a, integers[i]);
        put(name, ids[a][i], SEQPAR_SAFETENSORS_I32, n, 0);
    }
    snprintf(name, sizeof name, "%lld.cu_seqlens", (long long)a);
    if (!how.without_documents)
        put(name, documents[row_of(rank, a)], SEQPAR_SAFETENSORS_I64, docs + 1, 0);
    snprintf(name, sizeof name, "%lld.%s", (long long)a, how.score ? "values" : "logp");
    if (!how.without_logp) put(name, logp[a][0], SEQPAR_SAFETENSORS_F64, n, 0);
    snprintf(name, sizeof name, "%lld.ref_logp", (long long)a);
    if ((how.dpo || !how.score) && strcmp(how.loss_type, "simpo"))
        put(name, logp[a][1], SEQPAR_SAFETENSORS_F64, n, 0);
    if (how.margin != 0) {
        static double margins[ROWS][DOCS];
        snprintf(name, sizeof name, "%lld.margins", (long long)a);
        margins[row_of(rank, a)][0] = how.margin;
        put(name, margins[row_of(rank, a)], SEQPAR_SAFETENSORS_F64, docs, 0);
    }
    put_sides(a, n, docs, row, logp[a]);
}

static void write_dump(void) {
    double *scaled = slow_allocate(count, sizeof *scaled);
    char terms[TERMS][24], center[24], weight[24];
    if (system("rm -rf " FOLDER)) exit(1);
    mkdir(FOLDER, 0777);
    if (how.dpo) how.terms[SMOOTHING] = how.smoothing;
    for (int i = 0; i < TERMS; i++) snprintf(terms[i], sizeof terms[i], "%g", how.terms[i]);
    snprintf(center, sizeof center, "%g", how.center);
    snprintf(weight, sizeof weight, "%g", how.desirable_weight);
    for (int64_t i = 0; i < count; i++) scaled[i] = gradient[i] * how.scale;
    for (int64_t r = 0; r < row_count / micro_count * SP; r++) {
        char text[24], path[64];
        seqpar_safetensors_pair pairs[] = {{"seqpar_dump", "1"},
                                           {"rank", text},
                                           {"world", row_count > 1 ? "4" : "2"},
                                           {"sp", "2"},
                                           {"accumulation", row_count > 1 ? "2" : "1"},
                                           {"objective", how.objective},
                                           {"beta", "0.3"},
                                           {"kl_coef", "0.05"},
                                           {"label_smoothing", terms[SMOOTHING]},
                                           {"z_loss", terms[Z_LOSS]},
                                           {"entropy_coef", terms[ENTROPY]},
                                           {"loss_type", how.loss_type},
                                           {"simpo_gamma", "0.5"},
                                           {"center", center},
                                           {"desirable_weight", weight},
                                           {"kl_ratio", how.kl_ratio ? "token" : "none"}};
        snprintf(text, sizeof text, "%lld", (long long)r);
        snprintf(path, sizeof path, FOLDER "/rank%lld.safetensors", (long long)r);
        paper.count = 0;
        for (int64_t a = 0; a < micro_count; a++) put_micro(r, a);
        if (how.adapters)
            put_adapter_gradients();
        else
            put_tensors("grad.", scaled);
        if (how.with_loss) put("loss", &how.loss[r], SEQPAR_SAFETENSORS_F64, 1, 0);
        save(path, pairs, sizeof pairs / sizeof *pairs);
    }
    free(scaled);
}

/* ---- what is said of it ---- */

static void expect_with(const char *options, int code, const char *headline, const char *text) {
    char said[16384], command[200];
    snprintf(command, sizeof command,
             "build/seqpar-verify ver " FOLDER " --model " MODEL " %s 2>&1", options);
    int is = said_by(command, said, sizeof said);
    squeeze(said);
    expect_says(is, said, code, headline, text);
}

static void expect(int code, const char *headline, const char *text) {
    write_dump();
    expect_with("", code, headline, text);
}

static void expect_named(const char *name, const char *text) {
    char headline[64];
    snprintf(headline, sizeof headline, "wrong: %s places", name);
    expect(1, headline, text);
    test_end("dump_model_%s", name);
}

/* name NULL: the step is right. */
static void expect_case(const char *name, const char *text) {
    if (name)
        expect_named(name, text);
    else
        expect(0, "right: places", text);
}

static void restart(void) {
    memset(&how, 0, sizeof how);
    how.scale = how.desirable_weight = 1;
    how.objective = "sft";
    how.loss_type = "sigmoid";
    seed_means(in_all, 1);
    right_step();
}

static void test_right(void) {
    restart();
    expect(0, "right: places", "gradients right: got 1, wanted 1");
    test_end("dump_model_right_fp64");
    how.f32 = 1;
    expect(0, "right: places", "log-probs right");
    test_end("dump_model_right_fp32");
    how.without = "model.layers.0.mlp.up_proj.weight";
    how.without_logp = 1;
    expect(0, "right: places", "gradients right: got 1");
    test_end("dump_model_right_in_part");
}

static void test_gradients(void) {
    static const struct {
        const char *name;
        int (*in)(int64_t r, int64_t t, int64_t group);
        int64_t groups;
    } means[] = {{"mean_of_means", in_rank, WORLD},
                 {"mean_of_means", in_micro, MICRO},
                 {"mean_over_sequences", in_document, ROWS * DOCS},
                 {"token_zero_ignored", in_not_zero, 1},
                 {"micro_batches_lost", in_last, 1}};
    restart();
    how.scale = 0.5;
    expect(1, "wrong: one of over_sp, over_dp, over_accumulation places", "gradients wrong");
    test_end("dump_model_factor");
    restart();
    double tokens = 0;
    for (int64_t r = 0; r < row_count; r++) tokens += (double)rows[r].tokens;
    how.scale = counted(in_all, 0) / tokens;
    expect_named("all_tokens_counted", "gradients wrong");
    for (size_t i = 0; i < sizeof means / sizeof *means; i++) {
        restart();
        seed_means(means[i].in, means[i].groups);
        right_step();
        expect_named(means[i].name, "log-probs right");
    }
    restart();
    for (int64_t i = 0; i < 8; i++) gradient[table[1].offset + i] += 1e-3;
    expect_named("unknown", "factor is grad.model.layers.0");
    restart();
    gradient[3] = NAN;
    expect(1, "wrong: unknown", "gradients wrong");
    test_end("dump_model_nan");
}

/* The step of a model whose embedding is its head. slow.h has two tables of equal values, and so
   both gradients of the one table. half 0: the embedding's gradient is its own; 1: that of the
   head; -1: their sum, as it has to be. */
static void tied_step(int half) {
    const slow_tensor *table_of = &table[0], *head = &table[slow_tensors(&config) - 1];
    int64_t elements = head->rows * head->cols;
    double *own = gradient + table_of->offset, *other = gradient + head->offset;
    restart();
    for (int64_t i = 0; i < elements; i++)
        own[i] = half < 0 ? own[i] + other[i] : half ? other[i] : own[i];
    how.without = head->name;
}

static void test_tied(void) {
    static const char *const uses[] = {"as the embedding alone", "as the head alone"};
    const slow_tensor *first = &table[0], *head = &table[slow_tensors(&config) - 1];
    int64_t elements = head->rows * head->cols;
    double *before = slow_allocate(elements, sizeof *before);
    test_expect(!strcmp(first->name, "model.embed_tokens.weight") &&
                    !strcmp(head->name, "lm_head.weight"),
                "the tables are %s and %s", first->name, head->name);
    memcpy(before, parameters + head->offset, (size_t)elements * sizeof *before);
    memcpy(parameters + head->offset, parameters + first->offset,
           (size_t)elements * sizeof *before);
    how.without = head->name;
    write_model(", \"tie_word_embeddings\": true");
    tied_step(-1);
    expect(0, "right: places", "gradients right");
    test_end("dump_model_tied");
    for (int half = 0; half < 2; half++) {
        tied_step(half);
        expect(1, "wrong: tables_untied places", uses[half]);
        test_end("dump_model_untied_%d", half);
    }
    tied_step(0);
    gradient[first->offset] *= 1.01; /* of no use alone */
    expect(1, "wrong: unknown places", "10 of 11 tensors");
    test_end("dump_model_untied_not");
    memcpy(parameters + head->offset, before, (size_t)elements * sizeof *before);
    restart(); /* the head is another table, and both are in the dump */
    expect(1, "wrong: tables_untied places",
           "the dump has grad.lm_head.weight: a head of its own");
    test_end("dump_model_untied_head");
    how.without = NULL;
    write_model("");
    free(before);
}

/* transformers does not train the embedding of pad_token_id, other trainers do. */
static void test_pad(void) {
    const slow_tensor *first = &table[0];
    int64_t pad = rows[0].ids[3];
    char more[48];
    snprintf(more, sizeof more, ", \"pad_token_id\": %lld", (long long)pad);
    for (int trained = 0; trained < 2; trained++) {
        restart();
        write_model(more);
        for (int64_t i = 0; i < first->cols && !trained; i++)
            gradient[first->offset + pad * first->cols + i] = 0;
        expect(0, "right: places",
               trained ? "gradients right" : "add nothing to the embedding's gradient");
        test_end("dump_model_pad_%d", trained);
    }
    restart();
    write_model("");
    for (int64_t i = 0; i < first->cols; i++)
        gradient[first->offset + pad * first->cols + i] = 0;
    expect(1, "wrong: unknown places", "the wanted ones");
    test_end("dump_model_pad_none");
}

static void pairs_alone(void) {
    how.dpo = 1;
    how.objective = "dpo";
    for (int64_t r = 0; r < row_count; r++)
        for (int64_t t = cu_seqlens[r][2]; t < rows[r].tokens; t++)
            rows[r].targets[t] = SLOW_IGNORED;
}

static void test_pairs(void) {
    static const char *const names[] = {"", "one of sigmoid_of_parts, log_probs_of_one_rank",
                                        "log_probs_averaged", "reference_missing"};
    for (int wrong = RIGHT_PAIRS; wrong <= WITHOUT_REFERENCE; wrong++) {
        restart();
        pairs_alone();
        right_step();
        seed_pairs(wrong);
        right_step();
        expect_case(wrong ? names[wrong] : NULL, wrong ? "log-probs right" : "gradients right");
        test_end("dump_model_pairs_%d", wrong);
        make_rows();
    }
}

static void test_preferences(void) {
    static const struct {
        const char *loss_type;
        double smoothing;
        const char *other_length, *not_smoothed, *no_reference;
    } cases[] = {
        {"sigmoid", .1, "log_probs_by_length", "option_not_applied", "reference_missing"},
        {"robust", .2, "log_probs_by_length", "option_not_applied", "reference_missing"},
        {"hinge", 0, "log_probs_by_length", NULL, NULL}, /* its slope has no h in it */
        {"ipo", 0, "log_probs_by_length", NULL, "reference_missing"},
        {"ipo_mean", 0, "log_probs_not_by_length", NULL, "reference_missing"},
        {"simpo", .15, "log_probs_not_by_length", "option_not_applied", NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int wrong = PREFERENCE_RIGHT; wrong <= NO_REFERENCE; wrong++) {
            const char *names[] = {"", cases[i].other_length, cases[i].not_smoothed,
                                   cases[i].no_reference};
            if (!names[wrong]) continue;
            restart();
            pairs_alone();
            how.loss_type = cases[i].loss_type;
            how.smoothing = cases[i].smoothing;
            right_step();
            seed_preferences(wrong);
            right_step();
            expect_case(wrong ? names[wrong] : NULL,
                        wrong ? "log-probs right" : "gradients right");
            test_end("dump_model_preference_%s_%d", how.loss_type, wrong);
            make_rows();
        }
}

/* Log-prob l of token 0 where the head has one row, and else 0, is a value. */
static void values_of_logp(void) {
    for (int64_t r = 0; r < row_count; r++)
        for (int64_t t = 0; t < rows[r].tokens; t++)
            rows[r].logp[t] += log((double)config.vocab - 1) - log(-expm1(rows[r].logp[t]));
}

static void begin_values(void) {
    int64_t head = table[slow_tensors(&config) - 1].offset;
    for (int64_t i = head + config.hidden; i < count; i++) parameters[i] = 0;
    for (int64_t r = 0; r < row_count; r++)
        for (int64_t t = 0; t < rows[r].tokens; t++) rows[r].targets[t] = 0;
}

/* slow.h's gradient, of a loss that is wrong so. */
static void wrong_step(int wrong) {
    right_step();
    if (how.score) values_of_logp();
    for (int64_t r = 0; r < row_count; r++)
        for (int64_t t = 0; t < rows[r].tokens; t++)
            rows[r].old_logp[t] = rows[r].logp[t] + 0.1 * (double)((3 * t + r) % 7) - 0.3;
    seed_by_differences(wrong);
    for (int64_t r = 0; r < row_count; r++)
        for (int64_t t = 0; how.score && t < rows[r].tokens; t++)
            rows[r].seeds[t] *= 1 + exp(rows[r].logp[t]) / ((double)config.vocab - 1);
    right_step();
    if (how.score) values_of_logp();
}

static void test_objectives(void) {
    static const struct {
        const char *objective;
        int wrong;
        const char *name, *text;
    } cases[] = {
        {"rm", NOTHING_WRONG, NULL, "gradients right"},
        {"rm", RM_AVERAGED, "scores_averaged", "log-probs right"},
        {"rm", RM_FIRST_TOKEN, "score_of_first_token", "log-probs right"},
        {"rm", RM_RANK_END, "score_of_rank_end", "log-probs right"},
        {"rm", RM_SWAPPED, "pair_swapped", "log-probs right"},
        {"rm", RM_OF_PARTS, "one of sigmoid_of_parts, scores_of_one_rank", "log-probs right"},
        {"kto", NOTHING_WRONG, NULL, "gradients right"},
        {"kto", KTO_AVERAGED, "log_probs_averaged", "log-probs right"},
        {"kto", KTO_ONE_REPLICA, "kl_of_one_replica", "log-probs right"},
        {"kto", KTO_NO_Z, "kl_missing", "log-probs right"},
        {"kto", KTO_Z_OVER_P, "kl_averaged", "log-probs right"},
        {"kto", KTO_SWAPPED, "desirable_swapped", "log-probs right"},
        {"ppo", NOTHING_WRONG, NULL, "gradients right"},
        {"ppo", PPO_NO_CLIP, "clip_missing", "log-probs right"},
        {"ppo", PPO_INVERTED, "ratio_inverted", "log-probs right"},
        {"ppo", PPO_NO_KL, "kl_missing", "log-probs right"},
        {"ppo", PPO_WHITENED, "whitened_by_rank", "over the tokens of each rank"},
        {"ppo", PPO_BY_RANK, "mean_of_means", "log-probs right"},
        {"ppo", PPO_FIRST_ADVANTAGES, "side_tensor_not_split", "each rank takes the first n"}};
    double *kept = slow_allocate(count, sizeof *kept);
    memcpy(kept, parameters, (size_t)count * sizeof *kept);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        restart();
        how.objective = cases[i].objective;
        how.dpo = !strcmp(how.objective, "rm");
        if (how.dpo) how.score = i % 2 ? "v_head.weight" : "score.weight";
        if (how.dpo) begin_values();
        write_model("");
        wrong_step(cases[i].wrong);
        expect_case(cases[i].name, cases[i].text);
        test_end("dump_model_%s_%d", how.objective, cases[i].wrong);
        memcpy(parameters, kept, (size_t)count * sizeof *kept);
        if (how.dpo) make_rows();
    }
    free(kept);
    restart();
    write_model("");
}

/* The KL term times the ratio: as the metadata say, not said, and said and not so. */
static void test_kl_ratio(void) {
    restart();
    how.objective = "ppo";
    wrong_step(PPO_KL_RATIO);
    expect_named("unknown", "metadata kl_ratio 'token' gives them: if that is meant, write it");
    how.kl_ratio = 1;
    expect(0, "right: places", "gradients right");
    test_end("dump_model_ppo_kl_ratio");
    wrong_step(NOTHING_WRONG);
    expect_named("option_not_applied", "kl_ratio");
}

/* How often the name stands in the verdict as JSON: once for all, once for each stage. */
/* Margins and the term that centers scores: right, left out, and with another mistake. */
static void test_margins(void) {
    static const struct {
        int wrong;
        const char *name, *text;
    } cases[] = {
        {NOTHING_WRONG, NULL, "gradients right"},
        {RM_NO_MARGIN, "margin_missing", "log-probs right"},
        {RM_NO_CENTER, "option_not_applied", "center 0 gives them"},
        {RM_SWAPPED, "pair_swapped", "log-probs right"},
        {RM_OF_PARTS, "one of sigmoid_of_parts, scores_of_one_rank", "log-probs right"},
        {RM_AVERAGED, "scores_averaged", "log-probs right"}};
    double *kept = slow_allocate(count, sizeof *kept);
    memcpy(kept, parameters, (size_t)count * sizeof *kept);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        restart();
        how.objective = "rm";
        how.dpo = 1;
        how.score = "score.weight";
        how.margin = 0.7;
        how.center = 0.3;
        begin_values();
        write_model("");
        wrong_step(cases[i].wrong);
        expect_case(cases[i].name, cases[i].text);
        test_end("dump_model_margins_%d", cases[i].wrong);
        memcpy(parameters, kept, (size_t)count * sizeof *kept);
        make_rows();
    }
    free(kept);
    how.score = NULL;
    write_model("");
}

/* Factors of the losses of KTO's classes: right, left out, and with another mistake. */
static void test_class_weights(void) {
    static const struct {
        int wrong;
        const char *name, *text;
    } cases[] = {{NOTHING_WRONG, NULL, "gradients right"},
                 {KTO_WEIGHED_ALIKE, "option_not_applied", "weight of 1 give them"},
                 {KTO_SWAPPED, "desirable_swapped", "log-probs right"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        restart();
        how.objective = "kto";
        how.desirable_weight = 1.7;
        wrong_step(cases[i].wrong);
        expect_case(cases[i].name, cases[i].text);
        test_end("dump_model_class_weights_%d", cases[i].wrong);
    }
}

/* Options that add a term to the loss: right; left out; with a mean of means. */
static void test_terms(void) {
    static const struct {
        double terms[TERMS];
        const char *left[TERMS]; /* what is said if the term is left out; NULL: it is 0 */
    } cases[] = {{{.1, 0, 0}, {"label_smoothing 0 gives them", NULL, NULL}},
                 {{0, .01, 0}, {NULL, "z_loss 0 gives them", NULL}},
                 {{.2, .03, 0}, {"label_smoothing 0 gives", "z_loss 0 gives them", NULL}},
                 {{0, 0, .04}, {NULL, NULL, "entropy_coef 0 gives them"}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int left = -1; left <= TERMS; left++) {
            int by_rank = left == TERMS, ppo = cases[i].terms[ENTROPY] > 0;
            if (left >= 0 && !by_rank && !cases[i].left[left]) continue;
            if (by_rank && ppo) continue;
            restart();
            memcpy(how.terms, cases[i].terms, sizeof how.terms);
            how.left_out = by_rank ? 0 : left + 1;
            if (by_rank) seed_means(in_rank, WORLD);
            if (ppo) how.objective = "ppo";
            if (ppo)
                wrong_step(NOTHING_WRONG);
            else
                right_step();
            if (left < 0)
                expect(0, "right: places", "gradients right");
            else if (by_rank)
                expect_named("mean_of_means", "log-probs right");
            else
                expect_named("option_not_applied", cases[i].left[left]);
            test_end("dump_model_terms_%d_%d", (int)i, left);
        }
}

static int times_named(const char *name) {
    char command[200];
    int times = -1;
    snprintf(command, sizeof command,
             "build/seqpar-verify ver " FOLDER " --model " MODEL
             " --json | grep -c '\"name\":.*\"%s\"'",
             name);
    FILE *out = popen(command, "r");
    if (out && fscanf(out, "%d", &times) != 1) times = -1;
    if (out) pclose(out);
    return times;
}

/* KTO on the ranks of one row, where no micro-batch is the last of several. */
static void test_one_row(void) {
    static const struct {
        int wrong;
        const char *name, *text;
    } cases[] = {{NOTHING_WRONG, NULL, "gradients right"},
                 {KTO_FIRST_REFERENCE, "side_tensor_not_split", "gradients wrong"},
                 {KTO_OWN_KL, "kl_of_own_part", "which add up to"}};
    row_count = micro_count = 1;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        restart();
        how.objective = "kto";
        for (int64_t d = 0; d < DOCS; d++) rows[0].desirable[d] = 1; /* a loss is of one z */
        wrong_step(cases[i].wrong);
        how.with_loss = cases[i].wrong == KTO_OWN_KL; /* by which z is found */
        for (int64_t r = 0; r < SP; r++) how.loss[r] = kto_loss_of(cases[i].wrong, r);
        expect_case(cases[i].name, cases[i].text);
        if (cases[i].wrong == KTO_OWN_KL)
            test_expect(times_named(cases[i].name) == 3, "loss or gradients do not name it");
        test_end("dump_model_one_row_%d", cases[i].wrong);
    }
    row_count = ROWS;
    micro_count = MICRO;
    for (int64_t d = 0; d < DOCS; d++) rows[0].desirable[d] = (double)(d % 2);
}

static void test_forward(void) {
    restart();
    whole_rows(0);
    run_slow();
    take_logp(0);
    expect_named("documents_ignored", "log-probs wrong");
    how.without_logp = 1;
    expect_named("documents_ignored", "gradients wrong");
    restart();
    rows_of_ranks();
    run_slow();
    take_logp(1);
    expect_named("own_tokens_only", "the farthest is at rank");
    restart();
    for (int64_t t = 0; t < rows[1].tokens; t++) rows[1].logp[t] += 0.01;
    expect_named("unknown", "row 1 of the step");
}

/* slow.h turns queries and keys alike: without either of them; log-probs, then gradients. */
static void test_rotary(void) {
    restart();
    whole_rows(1);
    config.no_rope_every = 1;
    run_slow();
    take_logp(0);
    config.no_rope_every = 0;
    expect_named("rotary_missing", "rotary_missing: queries and keys");
    how.without_logp = 1;
    expect_named("rotary_missing", "rotary_missing: queries and keys");
}

static void begin_adapters(double lora_b) {
    for (int64_t n = 0; n < ADAPTED; n++)
        for (int64_t of = 0; of < 2; of++)
            for (int64_t i = 0; i < adapter_count(n, of); i++)
                adapter[n][of][i] = (of ? lora_b : 1) * 0.01 * (double)test_integer(-70, 70);
    write_model("");
    write_adapters("0.0");
    for (int64_t n = 0; n < ADAPTED; n++)
        add_product(weights_of(parameters, n), n, adapter[n][1], adapter[n][0]);
    restart();
    adapters_step();
    how.adapters = 1;
}

static void expect_adapters(int code, const char *headline, const char *text) {
    write_dump();
    expect_with("--adapter " LORA, code, headline, text);
}

/* Of adapters alone there are gradients; the model's own weights have none, and lack none. */
static void test_adapters(double lora_b) {
    double *kept = slow_allocate(count, sizeof *kept);
    memcpy(kept, parameters, (size_t)count * sizeof *kept);
    begin_adapters(lora_b);
    expect_adapters(0, "right: places", "gradients right: got 1, wanted 1");
    how.f32 = 1;
    expect_adapters(0, "right: places", "gradients right: got ");
    how.f32 = 0;
    how.scale = 0.5;
    expect_adapters(1, "wrong: one of over_sp, over_dp, over_accumulation places",
                    "gradients wrong");
    how.scale = 1;
    adapter_gradient[1][0][3] += 1e-3;
    adapter_gradient[1][1][3] += 1e-3;
    expect_adapters(1, "wrong: unknown", "grad.base_model.model.model.layers.0.mlp.down_proj");
    seed_means(in_rank, WORLD);
    right_step();
    adapters_step();
    expect_adapters(1, "wrong: mean_of_means places", "log-probs right");
    test_end("dump_model_adapters_%g", lora_b);
    memcpy(parameters, kept, (size_t)count * sizeof *kept);
    free(kept);
}

static void test_adapters_refused(void) {
    double *kept = slow_allocate(count, sizeof *kept);
    memcpy(kept, parameters, (size_t)count * sizeof *kept);
    begin_adapters(1);
    write_dump();
    expect_with("", 3, "error: ",
                "tensor grad.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default."
                "weight is of an adapter; give --adapter FOLDER, too");
    adapter[0][1][0] += 0.5;
    write_adapters("0.0");
    expect_with("--adapter " LORA, 1, "wrong: unknown places", "log-probs wrong");
    write_adapters("0.1");
    expect_with("--adapter " LORA, 3, "error: ",
                LORA "/adapter_config.json: \"lora_dropout\" is 0.1, but a dump does not "
                     "hold dropout masks; train and judge with dropout 0");
    write_adapters("0.0, \"use_dora\": true");
    expect_with("--adapter " LORA, 3, "error: ",
                "use_dora is set, which is not supported; "
                "give another adapter");
    expect_with("--adapter " MODEL, 3, "error: ", MODEL "/adapter_config.json cannot be read");
    write_adapters("0.0, \"x\": null");
    if (system("cp " MODEL "/model.safetensors " LORA "/adapter_model.safetensors")) exit(1);
    expect_with("--adapter " LORA, 3, "error: ", ", which adapters of this model have not");
    if (system("build/seqpar-verify ver " FOLDER " --adapter " LORA " 2>" LORA "/said")) {
        FILE *f = fopen(LORA "/said", "r");
        char said[200] = "";
        if (f) said[fread(said, 1, sizeof said - 1, f)] = 0;
        if (f) fclose(f);
        test_expect(!strcmp(said, "error: --adapter needs --model, too; give both\n"), "%s",
                    said);
    } else
        test_expect(0, "--adapter alone is taken");
    test_end("dump_model_adapters_refused");
    memcpy(parameters, kept, (size_t)count * sizeof *kept);
    free(kept);
    restart();
}

/* Losses of supervised tokens that rank r holds, of all: -1. */
static double losses_of(int64_t r, double *n) {
    double sum = *n = 0;
    for (int64_t i = 0; i < row_count; i++)
        for (int64_t t = 0; t < rows[i].tokens; t++) {
            if (rows[i].targets[t] == SLOW_IGNORED || (r >= 0 && rows[i].rank[t] != r))
                continue;
            sum -= rows[i].logp[t];
            ++*n;
        }
    return sum;
}

/* Without log-probs the loss that ranks report is compared with the model's. */
static void test_loss(void) {
    double n, own, right;
    restart();
    how.without_logp = how.with_loss = 1;
    right = losses_of(-1, &n) / n;
    for (int64_t r = 0; r < WORLD; r++) how.loss[r] = right;
    expect(0, "right: places", "loss right: got");
    expect(0, "right: places", "log-probs are the model's: the dump has none");
    test_end("dump_model_loss_right");
    for (int64_t r = 0; r < WORLD; r++) how.loss[r] = losses_of(r, &own) / n;
    expect_named("share_alone", "loss wrong: got");
    for (int64_t r = 0; r < WORLD; r++) how.loss[r] = right * 1.02;
    expect(1, "wrong: unknown", "loss wrong: got");
    test_end("dump_model_loss_wrong");
}

/* Packed or wrong: without cu_seqlens nobody can tell. */
static void test_packing_unknown(void) {
    restart();
    how.without_documents = 1;
    expect(4, "insufficient", "log-probs insufficient");
    expect(4, "insufficient", "gradients insufficient");
    test_end("dump_model_without_documents");
}

static void test_files(void) {
    restart();
    expect_with("--want " FOLDER, 2, "error: ", "give --want or --model, and not both");
    restart();
    gradient[5] += 1e-2;
    write_dump();
    expect_with("--budget 0", 1, "wrong: unknown places",
                "not tried within --budget 0: mean_of_means, mean_over_sequences,");
    expect_with("--budget 0", 1, "wrong: unknown places", "dk_dv_swapped");
    expect_with("--budget -1", 2, "error: ", "--budget is a time");
    test_end("dump_model_options");
    rows[0].ids[4] = 17;
    write_dump();
    rows[0].ids[4] = 3;
    expect_with("", 3, "error: ", "the model has ids 0..16");
    test_end("dump_model_refused_id");
    restart();
    write_dump();
    write_model(", \"rope_scaling\": {\"rope_type\": \"longrope\"}");
    expect_with("", 3, "error: ", "longrope");
    test_end("dump_model_refused_model");
    if (system("rm -r " MODEL)) exit(1);
    expect_with("", 3, "error: ", MODEL);
    test_end("dump_model_refused_no_folder");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    count = slow_parameters(&config, NULL);
    table = slow_allocate(slow_tensors(&config), sizeof *table);
    slow_parameters(&config, table);
    parameters = slow_allocate(count, sizeof *parameters);
    gradient = slow_allocate(count, sizeof *gradient);
    for (int64_t i = 0; i < count; i++) parameters[i] = 0.01 * (double)test_integer(-70, 70);
    make_rows();
    write_model("");
    TEST(test_right());
    TEST(test_gradients());
    TEST(test_tied());
    TEST(test_pad());
    TEST(test_pairs());
    TEST(test_preferences());
    TEST(test_objectives());
    TEST(test_kl_ratio());
    TEST(test_margins());
    TEST(test_class_weights());
    TEST(test_terms());
    TEST(test_one_row());
    TEST(test_forward());
    TEST(test_rotary());
    TEST(test_packing_unknown());
    TEST(test_loss());
    TEST(test_adapters(1));
    TEST(test_adapters(0)); /* as they begin: gradients of A are 0 */
    TEST(test_adapters_refused());
    TEST(test_files());
    return test_summary();
}
