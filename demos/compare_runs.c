/* SPDX-License-Identifier: MIT OR Unlicense */
/* compare_runs.c - are two training runs the same, to the bit? Reads their metrics and models,
 * draws both loss curves.
 *
 *     compare_runs DIR_A DIR_B DPO_DIR OUT_DIR [SECONDS_A SECONDS_B]
 *
 * Each DIR holds metrics.jsonl, A (1 rank) and B (4 ranks) model.safetensors, too. SECONDS: the
 * processor time of A and B, all threads together, to be shown beside their speed.
 * Exit code 0 only if every loss, gradient norm and parameter of A and B is equal by memcmp,
 * and the first loss of the DPO run is -log(sigmoid(0)). */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include <signal.h>
#include "trainer/data/data.h"
#include "trainer/log/plot.h"
#include "trainer/log/report.h"
#include "trainer/base/escape.h"

enum { LONGEST = 1000 }; /* bytes of a folder's path */

typedef struct {
    double *loss, *norm; /* stb_ds arrays, a value a step */
    double tokens, seconds, processor_seconds;
} run;

static double number(const cJSON *line, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(line, key);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

static int wrong(const char *path, const char *what) {
    char shown[1024];
    return fprintf(stderr, "error: %s: %s\n", demo_escape(shown, sizeof shown, path), what), -1;
}

static int read_run(run *r, const char *folder) {
    char path[LONGEST + 64];
    char why_not[256];
    const char *why;
    size_t size;
    snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
    char *text = demo_read_whole(path, SIZE_MAX, &size, &why), *rest = text;
    if (!text)
        return snprintf(why_not, sizeof why_not,
                        "%s; each DIR holds metrics.jsonl, a trainer's --metrics_path, and the "
                        "first two its model.safetensors",
                        why),
               wrong(path, why_not);
    for (char *line; !why && (line = strsep(&rest, "\n"));) {
        cJSON *json = cJSON_Parse(line);
        if (*line && !cJSON_IsObject(json))
            why = "a line is no JSON object; give the --metrics_path of a trainer";
        if (cJSON_HasObjectItem(json, "loss")) {
            arrput(r->loss, number(json, "loss"));
            arrput(r->norm, number(json, "grad_norm"));
            r->tokens += number(json, "tokens");
            r->seconds += number(json, "tokens") / number(json, "tokens_per_second");
        }
        cJSON_Delete(json);
    }
    free(text);
    return why ? wrong(path, why) : arrlen(r->loss) ? 0 : wrong(path, "holds no step");
}

/* The smallest difference of all bits: lengths and bytes. */
static bool equal_series(const double *a, const double *b) {
    return arrlen(a) == arrlen(b) && !memcmp(a, b, (size_t)arrlen(a) * sizeof *a);
}

static bool equal_models(const char *a, const char *b, int64_t *tensors, int64_t *values,
                         seqpar_error *error) {
    char path[2][LONGEST + 64];
    seqpar_safetensors_file *file[2] = {0};
    bool equal = true;
    snprintf(path[0], sizeof path[0], "%s/model.safetensors", a);
    snprintf(path[1], sizeof path[1], "%s/model.safetensors", b);
    for (int i = 0; i < 2; i++)
        if (seqpar_safetensors_open(&file[i], path[i], error)) equal = false;
    for (int64_t i = 0; equal && i < seqpar_safetensors_count(file[0]); i++) {
        const seqpar_safetensors_tensor *t = seqpar_safetensors_at(file[0], i);
        seqpar_safetensors_part part = seqpar_safetensors_whole(t);
        char *x = (char *)demo_alloc(2 * t->bytes, 1), *y = x + t->bytes;
        equal = !seqpar_safetensors_expect(file[1], t, error) &&
                !seqpar_safetensors_read(file[0], x, &part, error) &&
                !seqpar_safetensors_read(file[1], y, &part, error) &&
                !memcmp(x, y, (size_t)t->bytes);
        free(x);
        *tensors += 1;
        *values += t->count;
    }
    if (equal && seqpar_safetensors_count(file[0]) != seqpar_safetensors_count(file[1]))
        equal = false;
    for (int i = 0; i < 2; i++)
        if (file[i]) seqpar_safetensors_close(file[i]);
    return equal;
}

/* Makes the folder; 0 where files can be written into it. */
static int make_folder(const char *folder) {
    struct stat about;
    if (mkdir(folder, 0777) && errno != EEXIST) return wrong(folder, strerror(errno));
    if (stat(folder, &about) || !S_ISDIR(about.st_mode))
        return wrong(folder, "is there but is no folder; give another OUT_DIR");
    return access(folder, W_OK | X_OK) ? wrong(folder, strerror(errno)) : 0;
}

/* A positive number in seconds, or NaN. */
static double seconds_of(const char *text) {
    char *end;
    double seconds = strtod(text, &end);
    return *text && !*end && isfinite(seconds) && seconds > 0 ? seconds : NAN;
}

/* NaN: the metrics do not say. */
static double tokens_per_second(const run *r) { return r->tokens / r->seconds; }
static double per_token_us(const run *r) { return 1e6 * r->processor_seconds / r->tokens; }

/* The ranks are threads of one machine. So the time of day says how they share its cores, and
   the processor's what it costs to split a sequence. */
static void print_speed(const run *r) {
    const char *name[] = {"1 rank", "4 ranks"};
    bool timed = isfinite(per_token_us(&r[0]) + per_token_us(&r[1]));
    if (!isfinite(tokens_per_second(&r[0]) + tokens_per_second(&r[1]))) return;
    printf("\n%-8s %10s%s\n", "", "tokens/s", timed ? "   processor time a token" : "");
    for (int i = 0; i < 2; i++) {
        printf("%-8s %10.0f", name[i], tokens_per_second(&r[i]));
        if (timed) printf(" %22.1f us", per_token_us(&r[i]));
        printf("\n");
    }
    printf("4 ranks share the %ld cores that 1 rank has alone, and wait for each other.",
           sysconf(_SC_NPROCESSORS_ONLN));
    if (timed)
        printf("\nA token takes them %.2f times the processor time.",
               per_token_us(&r[1]) / per_token_us(&r[0]));
    printf("\n\n");
}

int main(int argc, char **argv) {
    run r[3] = {0};
    const double ln2 = 0.693147180559945309417;
    seqpar_error error = {0};
    char path[LONGEST + 64], text[1024], shown[1024], speed[32];
    demo_error why = {""};
    int64_t tensors = 0, values = 0;
    bool help = argc > 1 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"));
    if (help || (argc != 5 && argc != 7))
        return fprintf(help ? stdout : stderr,
                       "usage: compare_runs DIR_A DIR_B DPO_DIR OUT_DIR [SECONDS_A "
                       "SECONDS_B]\n"),
               help ? demo_print_failed("the usage") : 2;
    for (int i = 1; i < 5; i++)
        if (strlen(argv[i]) > LONGEST)
            return fprintf(stderr,
                           "error: a folder's path has %lld characters, at most %d are "
                           "possible; give a shorter one\n",
                           (long long)strlen(argv[i]), LONGEST),
                   2;
    for (int i = 0; i < 2; i++) {
        r[i].processor_seconds = argc == 7 ? seconds_of(argv[5 + i]) : NAN;
        if (argc == 7 && isnan(r[i].processor_seconds))
            return fprintf(stderr, "error: '%s' is no processor time; give seconds above 0\n",
                           demo_escape(shown, sizeof shown, argv[5 + i])),
                   2;
    }
    signal(SIGXFSZ, SIG_IGN); /* a file at its limit is an error with a sentence */
    if (read_run(&r[0], argv[1]) || read_run(&r[1], argv[2]) || read_run(&r[2], argv[3]) ||
        make_folder(argv[4]))
        return 2;
    bool losses = equal_series(r[0].loss, r[1].loss) && equal_series(r[0].norm, r[1].norm);
    bool first = !memcmp(&r[2].loss[0], &ln2, sizeof ln2),
         params = equal_models(argv[1], argv[2], &tensors, &values, &error);
    if (error.text[0]) fprintf(stderr, "error: %s\n", error.text);
    for (int i = 0; i < 2; i++)
        printf("%-20s loss %.17g -> %.17g   gradient norm %.17g\n",
               demo_escape(shown, sizeof shown, argv[1 + i]), r[i].loss[0], arrlast(r[i].loss),
               arrlast(r[i].norm));
    print_speed(r);
    demo_series series[] = {{.name = "1 rank", .y = r[0].loss, .points = arrlen(r[0].loss)},
                            {.name = "4 ranks", .y = r[1].loss, .points = arrlen(r[1].loss)}};
    demo_plot plot = {.title = "Training loss, 1 rank and 4 ranks",
                      .x_label = "optimizer step",
                      .y_label = "loss, nats a token",
                      .series = series,
                      .series_count = 2};
    snprintf(path, sizeof path, "%s/loss.svg", argv[4]);
    if (demo_plot_write(path, &plot, &why))
        fprintf(stderr, "error: %s\n", demo_escape(shown, sizeof shown, why.text));
    else
        printf("curves: %s\n", demo_escape(shown, sizeof shown, path));
    int size = snprintf(
        text, sizeof text,
        "{\n  \"steps\": %lld,\n  \"sp\": 4,\n  \"loss_first\": %.17g,\n  \"loss_last\": "
        "%.17g,\n  \"loss_bits_equal\": %s,\n  \"param_bits_equal\": %s,\n  "
        "\"dpo_first_loss\": %.17g,\n  \"dpo_first_loss_is_ln2_bitwise\": %s,\n  "
        "\"tokens_per_second\": %s\n}\n",
        (long long)arrlen(r[1].loss), r[1].loss[0], arrlast(r[1].loss),
        losses ? "true" : "false", params ? "true" : "false", r[2].loss[0],
        first ? "true" : "false", demo_json_number(speed, tokens_per_second(&r[1])));
    snprintf(path, sizeof path, "%s/summary.json", argv[4]);
    bool written = !seqpar_file_write_atomic(path, text, size, &error);
    if (!written) fprintf(stderr, "error: %s\n", error.text);
    printf("identical bits: %s (%lld tensors, %lld values)\n", losses && params ? "yes" : "NO",
           (long long)tensors, (long long)values);
    printf("first DPO loss %.18f = -log(sigmoid(0)): %s\n", r[2].loss[0],
           first ? "bits" : "NO");
    bool said = !demo_print_failed("the comparison");
    return losses && params && first && written && said && !why.text[0] ? 0 : 1;
}
