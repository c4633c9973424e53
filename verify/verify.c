/* SPDX-License-Identifier: MIT OR Unlicense */
/* verify.c - make verify: sequence parallelism changes nothing. One optimizer step of every
 * objective on 2, 3, 4 and 8 ranks in every schedule against one rank: logits, loss, gradient
 * of every parameter, updated parameters; the first DPO loss against -log(sigmoid(0)); the same
 * step packed otherwise and in micro-batches; and log-probs of sampled text against training's.
 *
 *     verify [--json] [--device cpu|cuda] [--ring_attn_size P] [--layout NAME]
 *
 * The tensors stay in build/verify, for anyone to compare. Which device there is, is settled
 * when this is built (on_cuda.h). */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "seqpar_llama.h"
#include "seqpar_safetensors.h"
#include <sys/stat.h>
#include "support/run_objective.h"
#include "trainer/base/escape.h"
#include "trainer/base/files.h"
#include "support/layouts.h"
#include "support/sampled_world.h"

typedef struct {
    const char *name;
    int schedule;
    int64_t ulysses;
} mode;

static const mode modes[] = {{"ring", SEQPAR_SCHEDULE_RING, 0},
                             {"llama3", SEQPAR_SCHEDULE_LLAMA3, 0},
                             {"Ulysses", SEQPAR_SCHEDULE_ULYSSES, 0},
                             {"2D", SEQPAR_SCHEDULE_RING, 2}};
static int64_t ranks[] = {2, 3, 4, 8}, rank_count = 4; /* one of them, if asked for */
static int layout = SEQPAR_LAYOUT_ZIGZAG;
/* how far off the sums of a layout that cuts cells may be: a guard against mistakes; the error
   rule itself is verify/tests/test_truth.c's */
static const double cutting_limit = 1e-5;
enum {
    MODES = sizeof modes / sizeof *modes,
    RANKS = sizeof ranks / sizeof *ranks,
    MOST_CELLS = MODES * RANKS
};
#define CELLS (MODES * (int)rank_count)

enum { SAME, DIFFERS, CANNOT }; /* CANNOT: the mode does not exist for this number of ranks */
typedef struct {
    int state;
    double error;
} cell;

typedef struct {
    char name[48], value[32];
    cell cells[MOST_CELLS];
} row;

/* What is verified beside the objectives: SFT of a model with experts, and of adapters (LoRA). */
enum { EXPERTS = OBJECTIVES, ADAPTERS, KINDS };
/* loss and gradient of each; logits, step and two first DPO losses */
enum { MOST_ROWS = 2 * KINDS + 4 };
static row rows[MOST_ROWS];
static int row_count, wrong;

/* Packed otherwise: each document or pair in a row of its own (0), rows of so many tokens, or so
   many micro-batches. */
static const struct {
    int64_t pack_len, micro_batches;
} packings[] = {{0, 1}, {121, 1}, {260, 1}, {720, 1}, {130, 2}, {130, 3}, {130, 4}};
enum { PACKINGS = sizeof packings / sizeof *packings, LENGTHS = 4 };

typedef struct {
    char name[48];
    cell cells[PACKINGS];
} packed_row;

static packed_row packed[KINDS];
static int packed_count;
static comparison sampled; /* log-probs of sampled text, sampled and in training */
static double first_ratio; /* the one that lies farthest from 1 */

static double distance(const double *got, const double *want, int64_t n) {
    double difference = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
    }
    return size > 0 ? sqrt(difference / size) : sqrt(difference);
}

static row *row_new(const char *what, const char *name) {
    row *r = &rows[row_count++];
    snprintf(r->name, sizeof r->name, "%s%s%s", what, name[0] ? " " : "", name);
    return r;
}

static row *row_value(row *r, const char *before, double value) {
    snprintf(r->value, sizeof r->value, "%s%.15g", before, value);
    return r;
}

static cell compared(const double *got, const double *want, int64_t n) {
    int same = !memcmp(got, want, (size_t)n * sizeof *got);
    double error = same ? 0.0 : distance(got, want, n);
    wrong += !same && (layout_on_grid(layout) || !(error <= cutting_limit));
    return (cell){same ? SAME : DIFFERS, error};
}

static void compare(row *r, int which, const double *got, const double *want, int64_t n) {
    r->cells[which] = compared(got, want, n);
}

/* Way number `which`; 0 where there is none. */
static int way_of(int which, objective_way *way) {
    const mode *m = &modes[which / rank_count];
    *way = (objective_way){.dp = 1,
                           .sp = ranks[which % rank_count],
                           .accumulation = 1,
                           .layout = layout,
                           .schedule = m->schedule,
                           .ulysses_size = m->ulysses};
    return !m->ulysses || way->sp % m->ulysses == 0;
}

static void keep(const objective_task *t, const objective_result *r, const char *where) {
    char path[256];
    seqpar_error error = {0};
    const void *data[] = {&r->loss, r->logits, r->gradient, r->params};
    const char *const names[] = {"loss", "logits", "gradient", "params"};
    int64_t counts[] = {1, r->tokens * r->width, r->elements, r->elements}, i;
    seqpar_safetensors_tensor tensors[4];
    snprintf(path, sizeof path, "build/verify/%s.%s.safetensors", objective_name(t->kind),
             where);
    for (char *c = path; *c; c++)
        if (*c == ' ') *c = '_';
    for (i = 0; i < 4; i++) {
        tensors[i] = (seqpar_safetensors_tensor){
            .name = names[i], .dtype = SEQPAR_SAFETENSORS_F64, .dims = 1};
        tensors[i].shape[0] = counts[i];
    }
    seqpar_safetensors_desc desc = {.path = path, .tensors = tensors, .count = 4};
    if (seqpar_safetensors_save(&desc, data, &error)) {
        fprintf(stderr, "%s\n", error.text);
        exit(2);
    }
}

static void run(const objective_task *t, const objective_way *way, objective_result *result) {
    objective_run(t, way, result);
    if (result->status) {
        fprintf(stderr, "%s on %lld ranks: %s\n", objective_name(t->kind), (long long)way->sp,
                result->error.text);
        exit(2);
    }
}

static const seqpar_adapter_desc adapters = {3, 1.25, SEQPAR_ADAPT_ALL};

/* Six pairs. A gradient of experts has that of a load-balancing loss in it. */
static const char *task_open(objective_task *t, int kind, const seqpar_pack_desc *pack) {
    static const double balance[] = {0.3, -0.1, 0.2, 0.05, -0.25};
    objective_task_packed(t, kind < OBJECTIVES ? kind : OBJECTIVE_SFT, 6, 60, pack, 5);
    if (kind < OBJECTIVES) return objective_name(kind);
    if (kind == ADAPTERS) {
        t->adapter = adapters;
        t->start = objective_adapters(t);
        return "LoRA";
    }
    t->config.experts = 5;
    t->config.experts_per_token = 2;
    t->config.expert_intermediate = 23;
    t->balance = balance;
    return "MoE";
}

static void task_close(objective_task *t) {
    free((void *)t->start);
    objective_task_close(t);
}

static const seqpar_pack_desc usual = {.pack_len = 130, .cell = 5};

/* Rows of one objective: logits (of the first only), loss, gradient, and the step. */
static void verify_objective(int kind) {
    objective_task t;
    objective_way alone = {.dp = 1, .sp = 1, .accumulation = 1}, way;
    objective_result one, r;
    row *logits, *loss, *gradient, *step;
    const char *name = task_open(&t, kind, &usual);
    run(&t, &alone, &one);
    if (kind < OBJECTIVES) keep(&t, &one, "sp1");
    logits = kind == OBJECTIVE_SFT ? row_new("logits", "") : NULL;
    loss = row_value(row_new(name, "loss"), "", one.loss);
    gradient = row_value(row_new(name, "gradient"), "norm ", one.norm);
    step = kind == OBJECTIVE_SFT ? row_new("AdamW step", "") : NULL;
    for (int i = 0; i < CELLS; i++) {
        char where[64];
        if (!way_of(i, &way)) {
            loss->cells[i].state = gradient->cells[i].state = CANNOT;
            if (logits) logits->cells[i].state = step->cells[i].state = CANNOT;
            continue;
        }
        run(&t, &way, &r);
        snprintf(where, sizeof where, "%s %s.sp%lld", seqpar_layout_name(layout),
                 modes[i / rank_count].name, (long long)way.sp);
        if (kind < OBJECTIVES) keep(&t, &r, where);
        compare(loss, i, &r.loss, &one.loss, 1);
        compare(gradient, i, r.gradient, one.gradient, one.elements);
        if (logits) compare(logits, i, r.logits, one.logits, one.tokens * one.width);
        if (step) compare(step, i, r.params, one.params, one.elements);
        objective_result_free(&r);
    }
    objective_result_free(&one);
    task_close(&t);
}

/* The gradient of one objective, packed otherwise on two ranks, against the usual rows on one. */
static void verify_packings(int kind) {
    objective_way alone = {.dp = 1, .sp = 1, .accumulation = 1},
                  two = {.dp = 1, .sp = 2, .layout = layout};
    packed_row *line = &packed[packed_count++];
    objective_result one, r;
    objective_task t;
    snprintf(line->name, sizeof line->name, "%s gradient", task_open(&t, kind, &usual));
    run(&t, &alone, &one);
    task_close(&t);
    for (int i = 0; i < PACKINGS; i++) {
        seqpar_pack_desc pack = usual;
        if (packings[i].pack_len) pack.pack_len = packings[i].pack_len;
        if (!packings[i].pack_len) pack.order = SEQPAR_PACK_UNIT_PER_ROW;
        pack.micro_batches = two.accumulation = packings[i].micro_batches;
        task_open(&t, kind, &pack);
        run(&t, &two, &r);
        line->cells[i] = compared(r.gradient, one.gradient, one.elements);
        objective_result_free(&r);
        task_close(&t);
    }
    objective_result_free(&one);
}

static seqpar_device *sampler_device(int64_t threads) { return test_device(0, threads); }

/* Text is sampled on one rank. Training on the most ranks, packed into two rows, is to have the
   same log-probs: then the ratio of a first PPO update is exp(0). */
static void verify_sampled(void) {
    static const int64_t prompts[] = {1, 29, 12, 47};
    seqpar_error error = {0};
    objective_task t;
    world w = {.device = sampler_device,
               .sample = {.max_new_tokens = 40,
                          .temperature = 0.7,
                          .top_p = 1,
                          .seed = 5,
                          .cell = usual.cell},
               .count = 4,
               .row_docs = {3, 1},
               .rows = 2,
               .ranks = ranks[rank_count - 1],
               .layout = layout};
    task_open(&t, OBJECTIVE_SFT, &usual);
    w.config = t.config;
    task_close(&t);
    for (int64_t i = 0; i < w.count; i++) {
        w.prompt_tokens[i] = prompts[i];
        w.prompt[i] = (int32_t *)calloc((size_t)prompts[i], sizeof *w.prompt[i]);
        for (int64_t k = 0; k < prompts[i]; k++) w.prompt[i][k] = (int32_t)(7 * i + 5 * k) % 61;
    }
    if (!world_sample(&w, &error) || !world_compare(&w, &sampled, &error)) {
        fprintf(stderr, "sampled text: %s\n", error.text);
        exit(2);
    }
    first_ratio = 1;
    for (int64_t i = 0; i < w.count; i++)
        for (int64_t k = 0; k < w.text[i].count; k++) {
            double ratio = seqpar_exp(w.logp[i][k] - w.text[i].logp[k]);
            if (!(fabs(ratio - 1) <= fabs(first_ratio - 1))) first_ratio = ratio;
        }
    wrong += layout_on_grid(layout) && (sampled.differ || sampled.missing || first_ratio != 1);
    world_free(&w);
}

/* The first DPO loss: of this process, before anything else, then with the reference's
   log-probs from one rank. Of adapters the reference is the model without them. */
static double verify_first_loss(const char *name, const seqpar_adapter_desc *adapter,
                                int *bitwise) {
    /* -log(sigmoid(0)) */
    const double ln2 = seqpar_softplus(-0.0), want = 0.693147180559945309417;
    objective_task t;
    objective_way way = {.dp = 1,
                         .sp = ranks[rank_count - 1],
                         .accumulation = 1,
                         .layout = layout},
                  alone = {.dp = 1, .sp = 1, .accumulation = 1};
    objective_result first, one, r;
    row *line;
    objective_task_open(&t, OBJECTIVE_DPO, 6, 60, 130, 5);
    t.same_reference = 1;
    t.adapter = *adapter;
    run(&t, &way, &first);
    run(&t, &alone, &one);
    line = row_value(row_new("first DPO loss", name), "", one.loss);
    t.reference = one.reference;
    *bitwise &= !memcmp(&ln2, &want, 8) && !memcmp(&first.loss, &want, 8) &&
                !memcmp(&one.loss, &want, 8);
    for (int i = 0; i < CELLS; i++) {
        if (!way_of(i, &way)) {
            line->cells[i].state = CANNOT;
            continue;
        }
        run(&t, &way, &r);
        compare(line, i, &r.loss, &want, 1);
        *bitwise &= line->cells[i].state == SAME || !layout_on_grid(layout);
        objective_result_free(&r);
    }
    objective_result_free(&first);
    objective_result_free(&one);
    task_close(&t);
    return first.loss;
}

/* On the grid a cell is the number of ranks, which stands for equal bits; elsewhere an error. */
static int width(void) { return layout_on_grid(layout) ? 2 : 7; }

static int mode_width(void) {
    int wide = width() * (int)rank_count;
    return wide < 8 ? 8 : wide;
}

static void print_cell(const cell *c, int64_t p) {
    if (c->state == CANNOT)
        printf("%*s", width(), "-");
    else if (layout_on_grid(layout) && c->state == DIFFERS)
        printf("%*s", width(), "!");
    else if (layout_on_grid(layout))
        printf("%*lld", width(), (long long)p);
    else if (c->state == SAME)
        printf("%*s", width(), "bits");
    else
        printf("%*.0e", width(), c->error);
}

static void print_row(const row *r) {
    printf("%-21s", r->name);
    for (int m = 0; m < MODES; m++) {
        for (int i = 0; i < rank_count; i++)
            print_cell(&r->cells[m * rank_count + i], ranks[i]);
        if (m + 1 < MODES) printf("%*s", mode_width() + 1 - width() * (int)rank_count, "");
    }
    printf("\n");
}

/* What differs on the grid is a mistake: each with its distance. */
static void print_wrong(const row *r) {
    for (int i = 0; i < CELLS && layout_on_grid(layout); i++)
        if (r->cells[i].state == DIFFERS)
            printf("WRONG: %s, %s, %lld ranks: relative distance %.1e from 1 rank\n", r->name,
                   modes[i / rank_count].name, (long long)ranks[i % rank_count],
                   r->cells[i].error);
}

static void print_table(void) {
    printf("%-21s", seqpar_layout_name(layout));
    for (int m = 0; m < MODES; m++)
        printf(" %-*s", m + 1 < MODES ? mode_width() : 0, modes[m].name);
    printf("\n");
    if (!layout_on_grid(layout)) {
        printf("%-21s", "ranks");
        for (int m = 0; m < MODES; m++)
            for (int i = 0; i < rank_count; i++) {
                printf("%*lld", width(), (long long)ranks[i]);
                if (m + 1 < MODES && i + 1 == rank_count)
                    printf("%*s", mode_width() + 1 - width() * (int)rank_count, "");
            }
        printf("\n");
    }
    for (int i = 0; i < row_count; i++) print_row(&rows[i]);
    for (int i = 0; i < row_count; i++) print_wrong(&rows[i]);
}

/* The number stands where every bit is that of the usual rows. */
static void print_number(const cell *c, int64_t number) {
    char text[24];
    int wide = snprintf(text, sizeof text, "%lld", (long long)number);
    printf(" %*s", wide, c->state == SAME ? text : "!");
}

static void print_packed(void) {
    printf("\n%-21s alone", "packed on 2 ranks");
    for (int i = 1; i < LENGTHS; i++) printf(" %lld", (long long)packings[i].pack_len);
    printf(" micro-batches");
    for (int i = LENGTHS; i < PACKINGS; i++)
        printf(" %lld", (long long)packings[i].micro_batches);
    printf("\n");
    for (int r = 0; r < packed_count; r++) {
        const cell *c = packed[r].cells;
        printf("%-21s %-5s", packed[r].name, c[0].state == SAME ? "yes" : "!");
        for (int i = 1; i < LENGTHS; i++) print_number(&c[i], packings[i].pack_len);
        printf(" %13s", "");
        for (int i = LENGTHS; i < PACKINGS; i++) print_number(&c[i], packings[i].micro_batches);
        printf("\n");
    }
    printf("\nalone, in rows of 121 to 720 tokens, in 2 to 4 micro-batches: every\n"
           "bit is that of rows of %lld on 1 rank\n",
           (long long)usual.pack_len);
    for (int r = 0; r < packed_count; r++)
        for (int i = 0; i < PACKINGS; i++)
            if (packed[r].cells[i].state == DIFFERS)
                printf("WRONG: %s, rows of %lld (0: each alone), %lld micro-batches: relative "
                       "distance %.1e\n",
                       packed[r].name, (long long)packings[i].pack_len,
                       (long long)packings[i].micro_batches, packed[r].cells[i].error);
}

static void print_sampled(void) {
    printf("sampled on 1 rank, trained on %lld: %lld of %lld log-probs differ\n",
           (long long)ranks[rank_count - 1], (long long)(sampled.differ + sampled.missing),
           (long long)sampled.all);
    printf("first PPO ratio %.18f = 1: %s\n", first_ratio, first_ratio == 1 ? "bits" : "NO");
}

static void print_packed_json(FILE *f) {
    fprintf(f, "\n], \"packed\": [");
    for (int r = 0; r < packed_count; r++) {
        fprintf(f, "%s\n  {\"what\": \"%s\"", r ? "," : "", packed[r].name);
        for (int i = 0; i < PACKINGS; i++)
            fprintf(f, ", \"rows of %lld, micro-batches %lld\": \"%s\"",
                    (long long)packings[i].pack_len, (long long)packings[i].micro_batches,
                    packed[r].cells[i].state == SAME ? "bits" : "differs");
        fprintf(f, "}");
    }
    fprintf(f,
            "\n], \"sampled_logps\": %lld, \"sampled_logps_that_differ\": %lld, "
            "\"first_ppo_ratio\": %.17g}\n",
            (long long)sampled.all, (long long)(sampled.differ + sampled.missing), first_ratio);
}

static void print_json(FILE *f, double first, int bitwise) {
    static const char *const states[] = {"bits", "differs", "none"};
    fprintf(
        f,
        "{\"layout\": \"%s\", \"dpo_first_loss\": %.17g, \"dpo_first_loss_is_ln2_bitwise\": %s, \"wrong\": %d, "
        "\"rows\": [",
        seqpar_layout_name(layout), first, bitwise ? "true" : "false", wrong);
    for (int r = 0; r < row_count; r++) {
        fprintf(f, "%s\n  {\"what\": \"%s\", \"sp1\": \"%s\"", r ? "," : "", rows[r].name,
                rows[r].value);
        for (int i = 0; i < CELLS; i++)
            fprintf(f, ", \"%s SP=%lld\": \"%s\"", modes[i / rank_count].name,
                    (long long)ranks[i % rank_count], states[rows[r].cells[i].state]);
        fprintf(f, "}");
    }
    print_packed_json(f);
}

#ifdef TEST_CUDA
static const char here[] = "cuda",
                  other[] = "--device cpu needs a program built without CUDA; type make verify";
#else
static const char
    here[] = "cpu",
    other[] = "--device cuda needs a program built with CUDA; type make verify DEVICE=cuda";
#endif

static const char help[] =
    "Every objective on 2, 3, 4 and 8 ranks in every schedule against 1 rank, by memcmp; exit "
    "code 1 if a bit differs,\nor with a layout that cuts cells a number by more than 1e-5."
    "\n\n"
    "  --layout NAME        who holds which tokens: a name of seqpar.h's SEQPAR_LAYOUTS; without "
    "it zigzag\n"
    "  --ring_attn_size P   one number of ranks, 2 to 8, in place of four\n"
    "  --device NAME        cpu, or cuda in a program built with CUDA\n"
    "  --json               the table as JSON; it is in build/verify/verify.json anyway\n";

/* The layout of this name, or -1 with one sentence. */
static int layout_named(const char *name) {
    char shown[256];
    for (int i = 0; i < SEQPAR_LAYOUT_COUNT; i++)
        if (!strcmp(name, seqpar_layout_name(i))) return i;
    fprintf(stderr, "error: --layout is '%s'; give one of",
            demo_escape(shown, sizeof shown, name));
    for (int i = 0; i < SEQPAR_LAYOUT_COUNT; i++)
        fprintf(stderr, "%s %s", i ? "," : "", seqpar_layout_name(i));
    fprintf(stderr, "\n");
    return -1;
}

/* 0, -1 after --help, or 2 with one sentence. */
static int options(int argc, char **argv, int *json) {
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "", *name = argv[i];
        if (!strcmp(name, "--help") || !strcmp(name, "-h"))
            return fputs(help, stdout), demo_print_failed("the options") ? 1 : -1;
        if (!strcmp(name, "--json")) {
            *json = 1;
            continue;
        }
        i++;
        if (!strcmp(name, "--device") && (!strcmp(value, "cpu") || !strcmp(value, "cuda"))) {
            if (strcmp(value, here)) return fprintf(stderr, "error: %s\n", other), 2;
        } else if (!strcmp(name, "--ring_attn_size") && strlen(value) == 1 && *value >= '2' &&
                   *value <= '8') {
            ranks[0] = *value - '0';
            rank_count = 1;
        } else if (!strcmp(name, "--layout")) {
            layout = layout_named(value);
            if (layout < 0) return 2;
        } else
            return fprintf(stderr,
                           "error: %s%s%s is none of --json, --device cpu, --device cuda, "
                           "--ring_attn_size 2 to 8, --layout NAME, --help\n",
                           name, *value ? " " : "", value),
                   2;
    }
    return 0;
}

int main(int argc, char **argv) {
    int bitwise = 1, json = 0;
    double first;
    FILE *file;
    int asked = options(argc, argv, &json);
    row_count = packed_count = wrong = 0; /* seqpar-verify calls it more than once */
    if (asked) return asked < 0 ? 0 : asked;
#ifdef TEST_CUDA
    seqpar_error error = {0};
    /* before ranks look for it, each for itself */
    seqpar_device *gpu = seqpar_device_cuda(&error, NULL);
    if (!gpu) return fprintf(stderr, "error: %s\n", error.text), 1;
    seqpar_device_close(gpu);
#endif
    mkdir("build/verify", 0777); /* in a folder of seqpar's alone */
    first = verify_first_loss("", &(seqpar_adapter_desc){0}, &bitwise);
    verify_first_loss("LoRA", &adapters, &bitwise);
    for (int kind = 0; kind < KINDS; kind++) verify_objective(kind);
    for (int kind = 0; kind < KINDS && layout_on_grid(layout); kind++) verify_packings(kind);
    verify_sampled();
    file = fopen("build/verify/verify.json", "w");
    if (file) {
        print_json(file, first, bitwise);
        fclose(file);
    }
    if (json)
        print_json(stdout, first, bitwise);
    else {
        print_table();
        printf("\n%s\n-: these ranks form no such grid\n",
               layout_on_grid(layout)
                   ? "2 3 4 8: on so many ranks every bit is that of 1 rank"
                   : "relative distance from 1 rank: this layout cuts cells");
        if (packed_count) print_packed();
        print_sampled();
        printf("first DPO loss %.18f = -log(sigmoid(0)): %s\n", first, bitwise ? "bits" : "NO");
    }
    return demo_print_failed("the table") || wrong || !bitwise;
}
