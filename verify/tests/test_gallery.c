/* SPDX-License-Identifier: MIT OR Unlicense */
/* The gallery of public bugs: its table is sound; what it says of mistakes that gen can plant
   is what the oracle says of them, stage by stage; and where it says `wrong` without a name, a
   right dump in which the bug's numbers are put says so, too. Attention that takes other sums
   is in test_dump_attention.c. */
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#define STB_DS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "oracle/verdict/gallery.h"
#include "oracle/verdict/summary.h"
#include "oracle/synthetic/synthetic.h"
#include "support/oracle_says.h"

#define FOLDER "build/test_gallery.d"

/* ---- the table ---- */

static void test_ids(void) {
    char seen[GALLERY + 1] = {0};
    for (int i = 0; i < GALLERY; i++) {
        int n = atoi(gallery_bugs[i].id + 1);
        test_expect(*gallery_bugs[i].id == 'B' && n >= 1 && n <= GALLERY && !seen[n],
                    "id %s is odd, or there twice", gallery_bugs[i].id);
        if (n >= 1 && n <= GALLERY) seen[n] = 1;
    }
    test_expect(GALLERY == 131, "%d entries", GALLERY);
    test_end("gallery_ids");
}

static void test_entries(void) {
    for (int i = 0; i < GALLERY; i++) {
        const gallery_bug *b = &gallery_bugs[i];
        int n = gallery_count(b);
        test_expect(*b->where && *b->what && b->what[strlen(b->what) - 1] == '.' &&
                        !strpbrk(b->what, "|\n"),
                    "%s: its texts", b->id);
        test_expect(!b->how || b->how[strlen(b->how) - 1] == '.', "%s: how", b->id);
        test_expect(!b->of_tests || !n, "%s: a test's bug is in no stage", b->id);
        test_expect(n || b->how || b->of_tests, "%s: why is it not seen?", b->id);
        for (int k = 0; k < n; k++) {
            const char *name = b->seen[k].name;
            int stage = b->seen[k].stage;
            test_expect(stage >= 0 && stage < STAGES, "%s: stage %d", b->id, stage);
            test_expect(!*name || mistake_named(name), "%s: no mistake is called %s", b->id,
                        name);
            for (int l = 0; l < k; l++)
                test_expect(b->seen[l].stage != stage || strcmp(b->seen[l].name, name),
                            "%s: %s twice", b->id, name);
        }
    }
    test_end("gallery_entries");
}

/* Whether the text has this number, and not as part of a longer one. */
static int has_number(const char *text, const char *digits, int length) {
    for (const char *at = text; (at = strchr(at, *digits)); at++)
        if (!strncmp(at, digits, (size_t)length) && !isdigit((unsigned char)at[length]) &&
            (at == text || !isdigit((unsigned char)at[-1])))
            return 1;
    return 0;
}

/* The first thread of an entry is in `seen` of a mistake that it is named by. */
static void test_threads(void) {
    for (int i = 0; i < GALLERY; i++) {
        const gallery_bug *b = &gallery_bugs[i];
        const char *number = strpbrk(b->where, " ");
        int length, found = 0;
        while (number && *number && !(number[0] == ' ' && isdigit((unsigned char)number[1])))
            number++;
        if (!gallery_has_name(b) || !number || !*number) continue;
        length = (int)strspn(++number, "0123456789");
        if (number[length] == '.') continue; /* a version */
        for (int k = 0; k < gallery_count(b); k++) {
            const mistake *m = *b->seen[k].name ? mistake_named(b->seen[k].name) : NULL;
            found |= m && m->seen && has_number(m->seen, number, length);
        }
        test_expect(found, "%s: %.*s is in `seen` of none of its mistakes", b->id, length,
                    number);
    }
    test_end("gallery_threads");
}

/* ---- names of several stages ---- */

static void stage_names_two(stage *s, const char *one, const char *other) {
    verdict *v = stage_begin(s, VERDICT_WRONG);
    verdict_name(v, mistake_named(one));
    if (other) verdict_name(v, mistake_named(other));
}

/* The loss may be of two mistakes: the headline has the one that is the gradients', too. */
static void test_common_names(void) {
    static stage stages[STAGES];
    static const struct {
        const char *gradients[2];
        int all, count;
    } cases[] = {{{"mean_of_means", "own_mean_alone"}, 0, 1},
                 {{"mean_of_means", NULL}, 0, 1},
                 {{"own_mean_alone", NULL}, 0, 2},
                 {{"sequence_counts_local", "mean_of_means"}, 0, 2},
                 {{"mean_of_means", "own_mean_alone"}, 1, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memset(stages, 0, sizeof stages);
        stage_names_two(&stages[LOSS], "sequence_counts_local", "mean_of_means");
        stage_names_two(&stages[GRADIENTS], cases[i].gradients[0], cases[i].gradients[1]);
        stages[GRADIENTS].v.all = cases[i].all;
        verdict v = whole_verdict(stages, 0, 0);
        test_expect(v.count == cases[i].count &&
                        verdict_names(&v, mistake_named("mean_of_means")),
                    "%d names", v.count);
        test_end("gallery_common_names_%zu", i);
    }
}

/* ---- what the oracle says ---- */

static cJSON *said;

/* Its JSON of FOLDER/got, with these words behind it. */
static void judge(const char *words) {
    static char text[1 << 20];
    char command[200];
    cJSON_Delete(said);
    snprintf(command, sizeof command, "build/seqpar-verify ver " FOLDER "/got %s --json 2>&1",
             words);
    (void)said_by(command, text, sizeof text);
    said = cJSON_Parse(text);
    test_expect(said != NULL, "said '%.300s'", text);
}

static const char *text_of(const cJSON *o, const char *key) {
    const cJSON *text = cJSON_GetObjectItem(o, key);
    return cJSON_IsString(text) ? text->valuestring : "";
}

static const cJSON *stage_said(int stage) {
    const cJSON *one;
    cJSON_ArrayForEach(
        one,
        cJSON_GetObjectItem(said, "stages")) if (!strcmp(text_of(one, "stage"),
                                                         stage_names[stage].name)) return one;
    return NULL;
}

/* Whether the stage says wrong, and names this; "": wrong, and names nothing. */
static int stage_names_it(int stage, const char *name) {
    const cJSON *one = stage_said(stage), *m, *list = cJSON_GetObjectItem(one, "mistakes");
    if (strcmp(text_of(one, "verdict"), "wrong")) return 0;
    if (!*name) return cJSON_GetArraySize(list) == 0;
    cJSON_ArrayForEach(m, list) if (!strcmp(text_of(m, "name"), name)) return 1;
    return 0;
}

/* ---- planted by gen ---- */

/* 0: it cannot be planted. */
static int make(const char *objective, const char *name) {
    made_desc desc = {.out = FOLDER,
                      .layout = "zigzag",
                      .objective = objective,
                      .mistake = name,
                      .sp = 3,
                      .dp = 2,
                      .accumulation = 2,
                      .tokens = 37,
                      .docs = 4,
                      .seed = 1};
    seqpar_error error = {0};
    remove_folder(FOLDER);
    return !made_make(&desc, &error);
}

static void test_right(const char *objective) {
    test_expect(make(objective, NULL), "no right step");
    judge("--model " FOLDER "/model");
    test_expect(!strcmp(text_of(said, "verdict"), "right"), "it is %s",
                text_of(said, "verdict"));
    test_end("gallery_right_%s", objective);
}

/* Whether an entry before this one says the same. */
static int is_said(int bug, int k) {
    for (int i = 0; i <= bug; i++)
        for (int l = 0; l < (i < bug ? gallery_count(&gallery_bugs[i]) : k); l++)
            if (gallery_bugs[i].seen[l].stage == gallery_bugs[bug].seen[k].stage &&
                !strcmp(gallery_bugs[i].seen[l].name, gallery_bugs[bug].seen[k].name))
                return 1;
    return 0;
}

/* Made dumps have no gradients before the reduction: test_dump_step.c has that stage. */
static int plant(const gallery_bug *b, int k) {
    const char *name = b->seen[k].name;
    int stage = b->seen[k].stage;
    const char *objective = stage == LOSS && !strcmp(name, "log_probs_of_one_rank") ? "dpo"
                                                                                    : "sft";
    if (!*name || stage == REDUCTION || !make(objective, name)) return 0;
    judge("--model " FOLDER "/model");
    test_expect(stage_names_it(stage, name), "%s: %s says %s, not %s", b->id,
                stage_names[stage].name, text_of(stage_said(stage), "verdict"), name);
    test_end("gallery_%s_%s", stage_names[stage].name, name);
    return 1;
}

static void test_planted(void) {
    int planted = 0;
    for (int i = 0; i < GALLERY; i++)
        for (int k = 0; k < gallery_count(&gallery_bugs[i]); k++)
            if (!is_said(i, k)) planted += plant(&gallery_bugs[i], k);
    test_expect(planted >= 20, "only %d are planted", planted);
    test_end("gallery_planted");
}

/* ---- a right step in which numbers are changed ---- */

/* A rank's file, in memory. */
typedef struct file_text {
    char path[64], *bytes;
    int64_t size;
    seqpar_safetensors_file *opened;
} file_text;
enum { RANKS = 6 };
static file_text files[RANKS];

static void read_files(void) {
    for (int r = 0; r < RANKS; r++) {
        file_text *f = &files[r];
        FILE *in;
        snprintf(f->path, sizeof f->path, FOLDER "/got/rank%d.safetensors", r);
        if (!(in = fopen(f->path, "rb"))) exit(1);
        fseek(in, 0, SEEK_END);
        f->size = ftell(in);
        rewind(in);
        f->bytes = malloc((size_t)f->size);
        if (fread(f->bytes, 1, (size_t)f->size, in) != (size_t)f->size) exit(1);
        fclose(in);
        if (seqpar_safetensors_open(&f->opened, f->path, NULL)) exit(1);
    }
}

static void write_files(void) {
    for (int r = 0; r < RANKS; r++) {
        FILE *out;
        seqpar_safetensors_close(files[r].opened);
        if (!(out = fopen(files[r].path, "wb"))) exit(1);
        fwrite(files[r].bytes, 1, (size_t)files[r].size, out);
        fclose(out);
        free(files[r].bytes);
    }
}

static int64_t count_of(int rank, const char *name) {
    return seqpar_safetensors_find(files[rank].opened, name)->count;
}

/* Where the numbers of a tensor are, all of which have 8 bytes. */
static void *data_of(int rank, const char *name) {
    uint64_t header;
    memcpy(&header, files[rank].bytes, sizeof header);
    return files[rank].bytes + 8 + header +
           seqpar_safetensors_find(files[rank].opened, name)->offset;
}

/* Numbers may lie at any byte. */
static double get(int rank, const char *name, int64_t i) {
    double x;
    memcpy(&x, (char *)data_of(rank, name) + 8 * i, 8);
    return x;
}
static void put(int rank, const char *name, int64_t i, double x) {
    memcpy((char *)data_of(rank, name) + 8 * i, &x, 8);
}
static void scale(int rank, const char *name, double factor) {
    for (int64_t i = 0; i < count_of(rank, name); i++)
        put(rank, name, i, factor * get(rank, name, i));
}

static void scale_all(const char *name, double factor) {
    for (int r = 0; r < RANKS; r++) scale(r, name, factor);
}

/* Each number by another factor near 1. */
static void blur(const char *name, double size) {
    for (int r = 0; r < RANKS; r++)
        for (int64_t i = 0; i < count_of(r, name); i++)
            put(r, name, i, get(r, name, i) * (1 + size * sin(1.7 * (double)(i + r))));
}

/* What `from` has of it, as far as both go. */
static void copy(int rank, const char *name, int from, const char *other) {
    int64_t n = count_of(rank, name), m = count_of(from, other);
    memmove(data_of(rank, name), data_of(from, other), 8 * (size_t)(n < m ? n : m));
}

static void one_lse(void) { put(1, "0.lse", 5, get(1, "0.lse", 5) + 0.5); }
static void far_gradients(void) {
    blur("0.dq", 0.9);
    blur("0.dk", 0.9);
}

/* (tokens, heads, head_dim) read as (heads, tokens, head_dim): 2 kv heads of 4. */
static void transposed(void) {
    for (int r = 0; r < RANKS; r++) {
        int64_t n = count_of(r, "0.dk") / 8;
        double *was = malloc((size_t)n * 64);
        memcpy(was, data_of(r, "0.dk"), (size_t)n * 64);
        for (int64_t i = 0; i < 8 * n; i++)
            put(r, "0.dk", i, was[(i / 4 % 2 * n + i / 8) * 4 + i % 4]);
        free(was);
    }
}

static void of_other_group(void) {
    for (int r = 3; r < RANKS; r++) copy(r, "0.out", r - 3, "0.out");
}
static void not_cleared(void) { /* the second kv head has the first one's as well */
    for (int r = 0; r < RANKS; r++)
        for (int64_t i = 0; i < count_of(r, "0.dk"); i++)
            if (i / 4 % 2) put(r, "0.dk", i, get(r, "0.dk", i) + get(r, "0.dk", i - 4));
}
static void infinite(void) {
    put(2, "1.dk", 3, INFINITY);
    for (int r = 0; r < RANKS; r++) put(r, "grad.model.norm.weight", 3, INFINITY);
}
/* Real rows that no hop has written. */
static void rows_of_zeros(void) {
    for (int r = 0; r < RANKS; r++)
        for (int64_t i = 0; i < count_of(r, "0.out"); i++)
            if (i / 16 % 5 == 4) put(r, "0.out", i, 0);
}
static void all_zeros(void) {
    for (int r = 0; r < RANKS; r++) {
        scale(r, "0.out", 0);
        for (int64_t i = 0; i < count_of(r, "0.lse"); i++) put(r, "0.lse", i, -INFINITY);
    }
}
static void other_output(void) { blur("0.out", 0.3); }
static void rows_mixed(void) {
    for (int r = 0; r < RANKS; r++) copy(r, "0.out", r, "1.out");
}
/* Of a main loss and a lesser one, whose factor is wrong: no power of a size. */
static void one_tensor(void) { scale_all("grad.model.layers.1.mlp.up_proj.weight", 0.7); }
static void not_divided(void) {
    for (int64_t i = 0; i < seqpar_safetensors_count(files[0].opened); i++) {
        const char *name = seqpar_safetensors_at(files[0].opened, i)->name;
        if (!strncmp(name, "grad.", 5)) scale_all(name, 47);
    }
}
static void first_forward(void) { blur("0.logp", 0.01); }
static void nan_of_padding(void) {
    for (int r = 0; r < RANKS; r++) put(r, "loss", 0, NAN);
}
static void other_loss(void) { scale_all("loss", 1.07); }
static void cut_twice(void) {
    for (int r = 0; r < RANKS; r++)
        for (int64_t i = 0, n = count_of(r, "0.positions"); i < n; i++)
            copy(r, "0.positions", 0, "0.positions");
}
static void other_rows(void) {
    copy(1, "0.ids", 4, "0.ids");
    copy(1, "0.labels", 4, "0.labels");
}
static void other_shares(void) {
    copy(1, "0.ids", 0, "1.ids");
    copy(1, "0.labels", 0, "1.labels");
}

static const struct {
    const char *ids; /* of entries, with blanks between */
    int stage;
    void (*change)(void);
    const char *against;
} changes[] = {
    {"B05", ATTENTION, one_lse, "model"},
    {"B06", ATTENTION, far_gradients, "model"},
    {"B08", ATTENTION, transposed, "model"},
    {"B10", ATTENTION, of_other_group, "model"},
    {"B14", ATTENTION, not_cleared, "model"},
    {"B15", ATTENTION, infinite, "model"},
    {"B15", GRADIENTS, infinite, "want"},
    {"B18 B23 B24", ATTENTION, other_output, "model"},
    {"B22", ATTENTION, rows_mixed, "model"},
    {"B100", ATTENTION, rows_of_zeros, "model"},
    {"B101", ATTENTION, all_zeros, "model"},
    {"B20 B27 B34 B35 B36 B42 B43 B74 B84 B102 B124 B125", GRADIENTS, one_tensor, "want"},
    {"B37", GRADIENTS, not_divided, "want"},
    {"B20 B28 B69", LOG_PROBS, first_forward, "model"},
    {"B51", LOSS, nan_of_padding, "want"},
    {"B56", LOSS, other_loss, "dpo"},
    {"B75", POSITIONS, cut_twice, "want"},
    {"B77", LABELS, other_rows, "want"},
    {"B80", LABELS, other_shares, "want"}};
enum { CHANGES = sizeof changes / sizeof *changes };

static void test_changed(int i) {
    int dpo = !strcmp(changes[i].against, "dpo");
    test_expect(make(dpo ? "dpo" : "sft", NULL), "no right step");
    read_files();
    changes[i].change();
    write_files();
    judge(!strcmp(changes[i].against, "model") ? "--model " FOLDER "/model"
                                               : "--want " FOLDER "/want");
    test_expect(stage_names_it(changes[i].stage, ""), "%s: %s says %s", changes[i].ids,
                stage_names[changes[i].stage].name,
                cJSON_PrintUnformatted(stage_said(changes[i].stage)));
    test_end("gallery_changed_%s_%.*s", stage_names[changes[i].stage].name,
             (int)strcspn(changes[i].ids, " "), changes[i].ids);
}

/* Whether this id is one of those, not the beginning of one. */
static int has_id(const char *ids, const char *id) {
    size_t length = strlen(id);
    for (const char *at = ids; (at = strstr(at, id)); at += length)
        if (!isdigit((unsigned char)at[length])) return 1;
    return 0;
}

/* Entries that are wrong without a name are changed here, or in test_dump_attention.c. */
static void test_all_are_shown(void) {
    static const char elsewhere[] = "B72 B73 B85";
    for (int i = 0; i < GALLERY; i++)
        for (int k = 0; k < gallery_count(&gallery_bugs[i]); k++) {
            int found = has_id(elsewhere, gallery_bugs[i].id);
            for (int c = 0; c < CHANGES; c++)
                found |= has_id(changes[c].ids, gallery_bugs[i].id) &&
                         changes[c].stage == gallery_bugs[i].seen[k].stage;
            test_expect(*gallery_bugs[i].seen[k].name || found, "nothing shows %s in %s",
                        gallery_bugs[i].id, stage_names[gallery_bugs[i].seen[k].stage].name);
        }
    test_end("gallery_all_are_shown");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_ids());
    TEST(test_entries());
    TEST(test_threads());
    TEST(test_common_names());
    TEST(test_right("sft"));
    TEST(test_right("dpo"));
    TEST(test_planted());
    for (int i = 0; i < CHANGES; i++) TEST(test_changed(i));
    TEST(test_all_are_shown());
    cJSON_Delete(said);
    remove_folder(FOLDER);
    return test_summary();
}
