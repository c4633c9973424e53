/* SPDX-License-Identifier: MIT OR Unlicense */
/* seqpar-verify - says whether a framework's sequence parallelism is right and, if not, which
 * mistake it is.
 *
 *     seqpar-verify law --norm --got 0.25 --want 1 --sp 4
 *     seqpar-verify law --got 1.75 --sums 4,7,0,16 --counts 1,7,0,8
 *     seqpar-verify explain over_sp
 *     seqpar-verify list
 *
 *     seqpar-verify ver DUMP                  a folder as oracle/dump/dump.h describes it
 *     seqpar-verify ver DUMP --want DUMP      gradients, too, against those of another run
 *     seqpar-verify ver DUMP --model FOLDER   or against the model's, computed here in fp64
 *     seqpar-verify ver DUMP --model FOLDER --adapter FOLDER   only adapters (LoRA) are trained
 *     seqpar-verify ver DUMP --html FILE      the verdict as a page; --junit FILE: for CI
 *     seqpar-verify ver DUMP --require gradients,norm   no pass where these were not judged
 *     seqpar-verify on_policy DUMP            log-probs of the sampler against training's
 *     seqpar-verify --man | man -l -          the manual page
 *
 *     seqpar-verify run OPERATION DUMP --out DIR   DUMP with what OPERATION computes: right
 *                                                  values of packing, labels, split, attention,
 *                                                  loss, step, ... (run --help has all)
 *
 * Exit codes: 0 right, 1 wrong, 2 usage, 3 file, 4 insufficient evidence, 5 marginal or close
 * with --strict, 6 the reference and slow.h disagree, so that there is no verdict, 7 a mutant
 * survived. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#define STB_DS_IMPLEMENTATION
/* VERDICT_FILE; 1 would say that the dump is wrong */
#define DEMO_MEMORY_EXIT 3
#define SLOW_MEMORY_EXIT 3
#include "seqpar_safetensors.h"
#include "oracle/verdict/gallery.h"
#include "oracle/report/html.h"
#include "oracle/report/junit.h"
#include "oracle/report/manual.h"
#include "oracle/synthetic/mutants.h"
#include "oracle/loss/on_policy.h"
#include "oracle/synthetic/operations.h"
#include "oracle/synthetic/quiz.h"
#include "oracle/dump/same_step.h"
#include "oracle/verdict/summary.h"
#include "trainer/base/escape.h"
#ifdef __GLIBC__
#include <malloc.h>
#endif

static law numbers = {
    .sp = 1, .dp = 1, .accumulation = 1, .tolerance = 1e-3, .reads = LAW_NORM | LAW_LOSS};
static option_list sums = {.values = numbers.sums, .most = LAW_GROUPS};
static option_list counts = {.values = numbers.counts, .most = LAW_GROUPS};
static const char *name, *folder, *wanted, *model, *adapter, *score, *html, *junit, *require;
static const char *window;
static int are_norms, are_losses;
static double budget = 60;
static made_desc making = {.layout = "zigzag",
                           .objective = "sft",
                           .sp = 4,
                           .dp = 1,
                           .accumulation = 1,
                           .tokens = 61,
                           .docs = 4,
                           .seed = 1};
static run_desc running = {.layout = "zigzag"};
static int as_json, as_markdown, as_gallery, strict, complete;
static int64_t level = 1, quiz_number;

static const char *const objectives[] = {"sft", "dpo", NULL};
static const char *const levels[] = {"1", "2", NULL}, *const shells[] = {"bash", "zsh", NULL};
/* Filled by main. */
static const char *mistake_names[MISTAKES + 1], *operation_names[OPERATIONS + 1];
static const char *stage_words[STAGES + 1], *layouts[SEQPAR_LAYOUT_COUNT + 1];

static option options[] = {
    {"law", "got", "X", OPTION_NUMBER, &numbers.got,
     "the gradient norm before clipping, or the loss, of your run", 0},
    {"law", "want", "X", OPTION_NUMBER, &numbers.want,
     "the same number of the same step on one rank", 0},
    {"law", "sp", "P", OPTION_SIZE, &numbers.sp, "ranks that share a sequence (1)", 0},
    {"law", "dp", "D", OPTION_SIZE, &numbers.dp, "data-parallel replicas (1)", 0},
    {"law", "accumulation", "A", OPTION_SIZE, &numbers.accumulation,
     "micro-batches in a step (1)", 0},
    {"law", "norm", "", OPTION_FLAG, &are_norms, "got and want are gradient norms", 0},
    {"law", "loss", "", OPTION_FLAG, &are_losses, "got and want are losses", 0},
    {"law", "window", "M/N", OPTION_TEXT, &window,
     "micro-batches in this step / as configured, such as 3/4 where the data ended", 0},
    {"law", "sums", "S,S,...", OPTION_LIST, &sums,
     "in place of --want: the sum of losses of each rank or micro-batch", 0},
    {"law", "counts", "N,N,...", OPTION_LIST, &counts,
     "the count of supervised tokens of each, in the same order", 0},
    {"law", "all_tokens", "N", OPTION_NUMBER, &numbers.all_tokens,
     "all tokens of the step, supervised or not", 0},
    {"law", "tolerance", "X", OPTION_NUMBER, &numbers.tolerance,
     "relative distance that is taken for rounding (0.001)", 0},
    {"ver", "DUMP", "", OPTION_NAME, &folder,
     "a folder with one file per rank, as Python's seqpar_trainer, seqpar_record and "
     "seqpar_dump write it",
     0},
    {"ver", "want", "DUMP", OPTION_TEXT, &wanted,
     "a dump of the same step on one rank, to judge gradients", 0},
    {"ver", "model", "FOLDER", OPTION_TEXT, &model,
     "a Llama-type model in Hugging Face's form, to judge log-probs and gradients", 0},
    {"ver", "adapter", "FOLDER", OPTION_TEXT, &adapter,
     "with --model: the adapters (LoRA) before the step, as PEFT writes them", 0},
    {"ver", "budget", "SECONDS", OPTION_NUMBER, &budget,
     "time for trying mistakes with --model (60)", 0},
    {"ver", "tolerance", "X", OPTION_NUMBER, &numbers.tolerance,
     "relative distance of gradients that is taken for rounding (0.001); if given, of the loss, too",
     0},
    {"ver", "html", "FILE", OPTION_TEXT, &html, "write the verdict as a page with pictures", 0},
    {"ver", "junit", "FILE", OPTION_TEXT, &junit,
     "write the verdict as JUnit XML, one case per stage", 0},
    {"ver", "require", "STAGE,...", OPTION_TEXT, &require,
     "exit code 4 unless these stages are judged, such as gradients,norm", 0, stage_words},
    {"ver", "strict", "", OPTION_FLAG, &strict,
     "exit code 5 if the verdict is marginal, 4 if gradients were not judged", 0},
    {"ver", "complete", "", OPTION_FLAG, &complete,
     "exit code 4 if a known mistake would give the same numbers in this step", 0},
    {"on_policy", "DUMP", "", OPTION_NAME, &folder,
     "a folder with one file per rank, which has logp and old_logp", 0},
    {"on_policy", "strict", "", OPTION_FLAG, &strict,
     "exit code 5 if log-probs are close but not equal", 0},
    {"gen", "out", "DIR", OPTION_TEXT, &making.out, "the folder to make", 0},
    {"gen", "layout", "NAME", OPTION_WORD, &making.layout,
     "which rank holds which tokens (zigzag)", 0, layouts},
    {"gen", "objective", "NAME", OPTION_WORD, &making.objective,
     "the objective of the step (sft)", 0, objectives},
    {"gen", "sp", "P", OPTION_SIZE, &making.sp, "ranks that share a sequence (4)", 0},
    {"gen", "dp", "D", OPTION_SIZE, &making.dp, "data-parallel replicas (1)", 0},
    {"gen", "accumulation", "A", OPTION_SIZE, &making.accumulation,
     "micro-batches in a step (1)", 0},
    {"gen", "tokens", "T", OPTION_SIZE, &making.tokens,
     "tokens of the first row; each further row has one more (61)", 0},
    {"gen", "docs", "N", OPTION_SIZE, &making.docs,
     "documents in a row; with dpo every second row has 2 more (4)", 0},
    {"gen", "seed", "N", OPTION_SIZE, &making.seed, "seed of the random numbers (1)", 0},
    {"gen", "mistake", "NAME", OPTION_TEXT, &making.mistake,
     "the mistake to make; seqpar-verify list has all", 0, mistake_names},
    {"gen", "questions", "", OPTION_FLAG, &making.questions,
     "leave out the tensors that an implementation computes", 0},
    {"gen", "quiz", "N", OPTION_SIZE, &quiz_number,
     "a wrong step for the lessons; its mistake is not named", 0},
    {"run", "OPERATION", "", OPTION_NAME, &running.operation, "an operation of the list below",
     0, operation_names},
    {"run", "DUMP", "", OPTION_NAME, &running.in, "a folder with one file per rank", 0},
    {"run", "out", "DIR", OPTION_TEXT, &running.out,
     "the folder to make: DUMP and the tensors that are computed", 0},
    {"run", "dtype", "NAME", OPTION_TEXT, &running.dtype,
     "float32 or float64 (as in the tensor that is replaced, or in the dump)", 0},
    {"run", "tokens", "N", OPTION_SIZE, &running.tokens,
     "pack: largest number of tokens in a row", 0},
    {"run", "unmasked", "", OPTION_FLAG, &running.unmasked,
     "labels: of all tokens, masked ones included", 0},
    {"run", "sp", "P", OPTION_SIZE, &running.sp, "split: ranks that share a sequence", 0},
    {"run", "layout", "NAME", OPTION_WORD, &running.layout,
     "split: which rank holds which tokens (zigzag)", 0, layouts},
    {"run", "model", "FOLDER", OPTION_TEXT, &running.model,
     "step: a Llama-type model in Hugging Face's form", 0},
    {"test", "level", "N", OPTION_SIZE, &level,
     "1: two ranks, zigzag; 2: all layouts on 2 to 8 ranks (1)", 0, levels},
    {"mutants", "score", "CMD", OPTION_TEXT, &score,
     "your test, run as CMD WANT GOT; it exits with 0 if it finds no difference", 0},
    {"mutants", "seed", "N", OPTION_SIZE, &making.seed, "seed of the random numbers (1)", 0},
    {"explain", "NAME", "", OPTION_NAME, &name, "a mistake; seqpar-verify list has all", 0,
     mistake_names},
    {"explain", "quiz", "N", OPTION_SIZE, &quiz_number,
     "in place of NAME: the mistake of gen --quiz N", 0},
    {"list", "markdown", "", OPTION_FLAG, &as_markdown, "print a page in Markdown", 0},
    {"list", "gallery", "", OPTION_FLAG, &as_gallery,
     "list public bugs, and how each would be seen", 0},
    {"law", "strict", "", OPTION_FLAG, &strict, "exit code 5 if the verdict is marginal", 0},
    {"", "json", "", OPTION_FLAG, &as_json, "print JSON", 0}};
enum { OPTIONS = sizeof options / sizeof *options };

static int given_to(const char *verb, const char *option_name) {
    char text[32];
    snprintf(text, sizeof text, "--%s", option_name);
    return option_named(options, OPTIONS, verb, text)->given;
}

static int given(const char *option_name) { return given_to("law", option_name); }

static int usage(const char *sentence) {
    fprintf(stderr, "error: %s\n", sentence);
    return VERDICT_USAGE;
}

/* ---- law ---- */

static int check_counts(void) {
    numbers.groups = counts.count;
    if (sums.count != counts.count) {
        fprintf(stderr,
                "error: --sums has %lld numbers and --counts has %lld; give one sum and one "
                "count for each rank or micro-batch\n",
                (long long)sums.count, (long long)counts.count);
        return VERDICT_USAGE;
    }
    for (int64_t i = 0; i < counts.count; i++)
        if (counts.values[i] < 0 || counts.values[i] != floor(counts.values[i])) {
            fprintf(stderr,
                    "error: --counts[%lld] is %g; give a whole number of tokens, 0 or more\n",
                    (long long)i, counts.values[i]);
            return VERDICT_USAGE;
        }
    return 0;
}

static int check_tolerance(void) {
    if (numbers.tolerance > 0 && numbers.tolerance < 0.5) return 0;
    return usage("--tolerance is a relative distance; give a number between 0 and 0.5");
}

/* --window M/N */
static int check_window(void) {
    char rest;
    long long m, n;
    if (!window) return 0;
    if (sscanf(window, "%lld/%lld%c", &m, &n, &rest) != 2 || m < 1 || n < 1 || m > 1000000 ||
        n > 1000000) {
        fprintf(stderr,
                "error: --window is '%s'; give M/N, two whole numbers from 1 to "
                "1000000, such as 3/4\n",
                option_shown(window));
        return VERDICT_USAGE;
    }
    numbers.window = m;
    numbers.configured = n;
    return 0;
}

/* Sets whether got and want are norms or losses. parts: whether --sums and --counts are given.
   0, or an exit code. */
static int check_reading(int parts) {
    if (are_norms && are_losses) return usage("--norm and --loss exclude each other; give one");
    if (parts && (are_norms || are_losses || window))
        return usage(
            "law judges a loss by --sums and --counts; leave out --norm, --loss and --window");
    if (are_norms || are_losses) numbers.reads = are_norms ? LAW_NORM : LAW_LOSS;
    return check_window();
}

static int check_law(void) {
    int parts = given("sums") + given("counts");
    if (!given("got")) return usage("law needs --got, the number of the run in question");
    if (parts == 1) return usage("--sums and --counts go together; give both");
    if (given("want") == (parts == 2))
        return usage("law needs --want, or --sums and --counts, and not both");
    if (check_tolerance() || check_reading(parts)) return VERDICT_USAGE;
    return parts ? check_counts() : 0;
}

static int run_law(void) {
    verdict v;
    if (check_law()) return VERDICT_USAGE;
    law_judge(&numbers, &v);
    if (as_json)
        json_print(stdout, verdict_json(&v));
    else
        verdict_print(stdout, &v);
    return v.kind == VERDICT_MARGINAL && !strict ? 0 : (int)v.kind;
}

/* ---- ver ---- */

/* Wraps the summary at the page's width. */
static void print_headline(const verdict *v, const summary *said) {
    if (*said->text)
        print_words(stdout, printf("%s: ", verdict_word(v)), said->text);
    else
        verdict_headline(stdout, v);
}

/* Whether one of the stage's names, of which each explains it, is in the headline. */
static int headline_explains(const verdict *stage, const verdict *v) {
    for (int i = 0; i < v->count && !stage->all; i++)
        if (verdict_names(stage, v->named[i])) return 1;
    return 0;
}

/* Mistakes that other stages name: the headline has those of one stage only. */
static void print_also(const stage *stages, const verdict *v) {
    char text[400] = "";
    for (int i = 0; v->kind == VERDICT_WRONG && i < STAGES; i++) {
        const verdict *other = &stages[i].v;
        if (!stages[i].judged || other->kind != VERDICT_WRONG || headline_explains(other, v))
            continue;
        for (int k = 0; k < other->count; k++)
            if (!verdict_names(v, other->named[k]))
                snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s (%s)",
                         *text ? ", " : "", other->named[k]->name, stage_names[i].name);
    }
    if (*text) print_wrapped(stdout, "also      ", text);
}

static void print_stages(const stage *stages) {
    for (int i = 0; i < STAGES; i++) {
        const stage *s = &stages[i];
        char label[32], text[400];
        if (!stage_is_listed(s)) continue;
        snprintf(label, sizeof label, "%-10s", stage_names[i].name);
        snprintf(text, sizeof text, "not judged: it takes %s", stage_needs(s, i));
        if (!s->judged) print_wrapped(stdout, label, text);
        for (int k = 0; s->judged && k < s->v.lines; k++) {
            snprintf(text, sizeof text, "%s%s", k ? "" : verdict_word(&s->v), k ? "" : ": ");
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s", s->v.line[k]);
            print_wrapped(stdout, k ? "          " : label, text);
        }
    }
}

/* Names of the listed stages that were judged, or were not. */
static void add_names(cJSON *o, const char *key, const stage *stages, int judged) {
    cJSON *list = cJSON_AddArrayToObject(o, key);
    for (int i = 0; i < STAGES; i++)
        if (stage_is_listed(&stages[i]) && stages[i].judged == judged)
            cJSON_AddItemToArray(list, cJSON_CreateString(stage_names[i].name));
}

/* Mistakes that the right stages do not exclude. */
static void add_open(cJSON *o, const stage *stages) {
    cJSON *list = cJSON_AddArrayToObject(o, "not_excluded");
    for (int i = 0; i < MISTAKES; i++)
        if (is_left_open(stages, &mistakes[i]))
            cJSON_AddItemToArray(list, cJSON_CreateString(mistakes[i].name));
}

/* The same of one stage, with their forms. */
static void add_hidden(cJSON *o, const verdict *v) {
    cJSON *list = cJSON_AddArrayToObject(o, "not_excluded");
    char text[200];
    for (int i = 0; i < MISTAKES; i++) {
        if (!verdict_hides(v, &mistakes[i])) continue;
        hidden_forms(v, &mistakes[i], text, sizeof text);
        cJSON_AddItemToArray(list, cJSON_CreateString(text));
    }
}

static int is_explained(const cJSON *list, const char *mistake_name) {
    const cJSON *one;
    cJSON_ArrayForEach(one, list) if (!strcmp(cJSON_GetObjectItem(one, "name")->valuestring,
                                              mistake_name)) return 1;
    return 0;
}

/* Explains each mistake once: by the headline, or by the first stage that names it. Later ones
   have its name. */
static void explain_once(const cJSON *headline, const cJSON *stages) {
    const cJSON *stage, *before;
    cJSON_ArrayForEach(stage, stages) {
        cJSON *list = cJSON_GetObjectItem(stage, "mistakes");
        for (int i = 0; i < cJSON_GetArraySize(list); i++) {
            const char *mistake_name =
                cJSON_GetObjectItem(cJSON_GetArrayItem(list, i), "name")->valuestring;
            int seen = is_explained(headline, mistake_name);
            for (before = stages->child; before != stage; before = before->next)
                seen |= is_explained(cJSON_GetObjectItem(before, "mistakes"), mistake_name);
            if (!seen) continue;
            cJSON *short_form = cJSON_CreateObject();
            cJSON_AddStringToObject(short_form, "name", mistake_name);
            cJSON_ReplaceItemInArray(list, i, short_form);
        }
    }
}

static void print_stages_json(const stage *stages, const verdict *v, const summary *said) {
    static char shown[4 * PATH_MAX]; /* a folder's name need not be UTF-8, JSON is */
    cJSON *o = verdict_json(v), *list = cJSON_AddArrayToObject(o, "stages");
    cJSON_AddStringToObject(o, "version", SEQPAR_VERSION);
    cJSON_AddStringToObject(o, "dump", demo_escape(shown, sizeof shown, folder));
    if (*said->text) cJSON_AddStringToObject(o, "summary", said->text);
    add_names(o, "judged", stages, 1);
    add_names(o, "not_judged", stages, 0);
    add_open(o, stages);
    for (int i = 0; i < STAGES; i++) {
        cJSON *one;
        if (!stage_is_listed(&stages[i])) continue;
        one = stages[i].judged ? verdict_json(&stages[i].v) : cJSON_CreateObject();
        cJSON_AddStringToObject(one, "stage", stage_names[i].name);
        if (stages[i].judged) add_hidden(one, &stages[i].v);
        if (!stages[i].judged) cJSON_AddStringToObject(one, "verdict", "not judged");
        if (!stages[i].judged)
            cJSON_AddStringToObject(one, "needs", stage_needs(&stages[i], i));
        cJSON_AddItemToArray(list, one);
    }
    explain_once(cJSON_GetObjectItem(o, "mistakes"), list);
    json_print(stdout, o);
}

static int check_wanted(dump *want) {
    if (want->sp > 1)
        seqpar_fail(&want->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: its sp is %lld; give --want a dump with sp 1", wanted,
                    (long long)want->sp);
    return want->error.status != 0;
}

/* If the dump's metadata have no window, takes that of the model's first layer. Errors in the
   folder are ignored here: they are reported when the model is read. */
static void take_window(dump *d) {
    seqpar_llama_config config = {.layers = 0};
    seqpar_error ignored = {0};
    if (model && !d->facts.window && !demo_load_config(model, &config, &ignored))
        d->facts.window = config.window_from ? 0 : config.window;
}

/* more: NULL, or gets the details that the HTML page shows. 0, or an exit code with one
   sentence on stderr. */
static int judge_folders(stage *stages, details *more) {
    dump d, want = {.world = 0};
    int status, voided = 0;
    status = dump_open(&d, folder);
    d.widened = option_named(options, OPTIONS, "ver", "--tolerance")->given ? numbers.tolerance
                                                                            : 0;
    d.tries_all = complete;
    if (!status) take_window(&d);
    status = status || judge_dump(&d, stages, numbers.tolerance) ||
             check_steps(stages, &d, numbers.tolerance);
    if (!status && model) {
        status = check_truth(stages, &d, model, adapter, numbers.tolerance, budget, more);
        voided = status > 0;
    }
    if (!status) status = on_policy_stage(&stages[LOSS], &d);
    if (!status && wanted)
        status = dump_open(&want, wanted) || check_wanted(&want) || same_step(&d, &want) ||
                 check_gradients(&stages[GRADIENTS], &d, &want, numbers.tolerance, more);
    details_take_attention(more, &d);
    for (int i = 0; i < STAGES; i++) tried_drop(&stages[i].v, &d);
    dump_close(&d);
    dump_close(&want);
    if (status) fprintf(stderr, "error: %s\n", d.error.status ? d.error.text : want.error.text);
    return voided ? VERDICT_VOID : status ? VERDICT_FILE : 0;
}

/* 0, or an exit code with one sentence on stderr. */
static int write_reports(const report *r) {
    seqpar_error error = {0};
    int status = (html && report_write(html, r, html_put, &error)) ||
                 (junit && report_write(junit, r, junit_put, &error));
    if (status) fprintf(stderr, "error: %s\n", error.text);
    return status ? VERDICT_FILE : 0;
}

/* The options that make ver judge gradients. They name the model in the dump's folder if
   seqpar_trainer saved it there. */
static const char *gradient_hint(char *text, size_t size) {
    char adapters[900];
    snprintf(text, size, "%.400s/model/config.json", folder);
    if (access(text, R_OK)) return "--want or --model";
    snprintf(text, size, "--model %.400s/model", folder);
    snprintf(adapters, sizeof adapters, "%.400s/adapter/adapter_config.json", folder);
    if (!access(adapters, R_OK))
        snprintf(text + strlen(text), size - strlen(text), " --adapter %.400s/adapter", folder);
    return text;
}

/* required: bits of the stages that must be judged. */
static int judge_and_say(details *more, int required) {
    stage stages[STAGES] = {{0}};
    int status = judge_folders(stages, more);
    summary said;
    verdict v;
    char hint[900];
    if (status) return status;
    for (int i = 0; i < STAGES; i++) hidden_say(&stages[i].v);
    v = whole_verdict(stages, required, complete);
    summarize(&said, stages, &v, required, gradient_hint(hint, sizeof hint));
    if (as_json) {
        print_stages_json(stages, &v, &said);
    } else {
        print_headline(&v, &said);
        print_also(stages, &v);
        print_stages(stages);
        verdict_print_mistakes(stdout, &v);
    }
    status = write_reports(&(report){folder, wanted, model, stages, &v, said.text, more});
    if (status) return status;
    return v.kind == VERDICT_MARGINAL && !strict ? 0 : (int)v.kind;
}

static int is_stage(int i, const char *text, size_t length) {
    return strlen(stage_names[i].name) == length && !strncmp(stage_names[i].name, text, length);
}

/* "gradients,norm" into bits. 0, or an exit code with one sentence on stderr. */
static int read_required(const char *text, int *required) {
    char all[240] = "";
    int known = 1;
    for (size_t length; known && text; text = text[length] ? text + length + 1 : NULL) {
        int i = 0;
        length = strcspn(text, ",");
        while (i < STAGES && !is_stage(i, text, length)) i++;
        if ((known = i < STAGES)) *required |= stage_bit(i);
    }
    if (known) return 0;
    for (int i = 0; i < STAGES; i++)
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", i ? ", " : "",
                 stage_names[i].name);
    fprintf(stderr, "error: --require is '%s'; give stages with commas between: %s\n",
            option_shown(require), all);
    return VERDICT_USAGE;
}

/* A report must not be named like a file of a dump, nor overwrite a file that is no report. */
static int check_report(const char *option_name, const char *path, const char *begin) {
    if (path && is_safetensors(path)) {
        fprintf(
            stderr,
            "error: --%s is %.300s, but a report that ends with .safetensors would be read as "
            "a file of a dump; give another name\n",
            option_name, path);
        return VERDICT_USAGE;
    }
    if (!path || report_may_replace(path, begin)) return 0;
    fprintf(
        stderr,
        "error: --%s is %.300s, which is there and is no report; remove it, or give another "
        "name\n",
        option_name, path);
    return VERDICT_USAGE;
}

static int check_reports(void) {
    if (html && junit && reports_are_same(html, junit))
        return usage("--html and --junit are the same file; give two");
    return check_report("html", html, "<!DOCTYPE html>") ||
                   check_report("junit", junit, "<?xml")
               ? VERDICT_USAGE
               : 0;
}

static int run_ver(void) {
    details more = {.n = 0};
    int status, required = wanted || model || strict ? stage_bit(GRADIENTS) : 0;
    if (!folder) return usage("ver needs the folder of a dump");
    if (wanted && model) return usage("give --want or --model, and not both");
    if (adapter && !model) return usage("--adapter needs --model, too; give both");
    if (!(budget >= 0))
        return usage("--budget is a time in seconds; give a number that is 0 "
                     "or more");
    if (check_tolerance()) return VERDICT_USAGE;
    if (read_required(require, &required) || check_reports()) return VERDICT_USAGE;
    status = judge_and_say(&more, required);
    details_free(&more);
    return status;
}

/* ---- on_policy ---- */

static int run_on_policy(void) {
    static on_policy p; /* large */
    dump d;
    int status;
    if (!folder) return usage("on_policy needs the folder of a dump");
    status = dump_open(&d, folder) || on_policy_check(&p, &d);
    if (status)
        fprintf(stderr, "error: %s\n", d.error.text);
    else if (as_json)
        json_print(stdout, on_policy_json(&p));
    else
        on_policy_print(&p);
    dump_close(&d);
    if (status) return VERDICT_FILE;
    if (p.v.kind == VERDICT_CLOSE) return strict ? VERDICT_MARGINAL : 0;
    return (int)p.v.kind;
}

/* ---- gen ---- */

/* NULL with a sentence on stderr: there is no quiz with this number. */
static const quiz *find_quiz(void) {
    const quiz *q = quiz_at(quiz_number);
    if (!q)
        fprintf(stderr, "error: --quiz is %lld; give 1 to %d\n", (long long)quiz_number,
                QUIZZES);
    return q;
}

/* A quiz decides everything but where it is written. 0, or an exit code. */
static int gen_quiz(void) {
    static const char *const decided[] = {"layout",  "objective", "sp",   "dp",
                                          "tokens",  "docs",      "seed", "accumulation",
                                          "mistake", "questions"};
    const quiz *q = find_quiz();
    if (!q) return VERDICT_USAGE;
    for (size_t i = 0; i < sizeof decided / sizeof *decided; i++)
        if (given_to("gen", decided[i])) {
            fprintf(stderr,
                    "error: --%s cannot be given with --quiz, which sets it; leave out one of "
                    "them\n",
                    decided[i]);
            return VERDICT_USAGE;
        }
    making = quiz_desc(q, making.out);
    return 0;
}

/* What the output says about the planted mistake: its name, but not that of a quiz, which the
   reader is to find. */
static const char *planted_name(void) {
    return quiz_number ? "a mistake" : making.mistake ? making.mistake : "";
}

static int run_gen(void) {
    seqpar_error error = {0};
    cJSON *o;
    int status = 0;
    if (!making.out) return usage("gen needs --out, a folder to be made");
    if (quiz_number) status = gen_quiz();
    if (status) return status;
    if (made_make(&making, &error)) {
        fprintf(stderr, "error: %s\n", error.text);
        return error.status == SEQPAR_ERR_OPTION ? VERDICT_USAGE : VERDICT_FILE;
    }
    if (!as_json) {
        printf("%s/got  the step on %lld ranks%s%s\n%s/want  the right step on one rank\n"
               "%s/model  a Llama folder\n",
               making.out, (long long)(making.sp * making.dp),
               making.mistake ? ", with " : ", right", planted_name(), making.out, making.out);
        return 0;
    }
    o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "out", making.out);
    cJSON_AddStringToObject(o, "mistake", planted_name());
    json_print(stdout, o);
    return 0;
}

/* ---- run ---- */

/* Checks the options that only some operations take. 0, or an exit code with a sentence on
   stderr. */
static int check_run_options(const operation *o) {
    static const char *const single[] = {"tokens", "unmasked", "sp", "layout", "model"};
    char first[32], text[160];
    snprintf(first, sizeof first, "%.*s", (int)strcspn(o->options, " "), o->options);
    for (size_t i = 0; i < sizeof single / sizeof *single; i++) {
        if (!given_to("run", single[i]) || run_listed(o->options, single[i])) continue;
        snprintf(text, sizeof text, "run %s takes no --%s; leave it out", o->name, single[i]);
        return usage(text);
    }
    if (!*first || given_to("run", first)) return 0;
    snprintf(text, sizeof text, "run %s needs --%s; seqpar-verify run --help describes it",
             o->name, first);
    return usage(text);
}

static const operation *find_operation(void) {
    const operation *o = running.operation ? operation_named(running.operation) : NULL;
    if (o) return o;
    if (running.operation)
        fprintf(stderr, "error: run has no operation '%s'; ", option_shown(running.operation));
    else
        fprintf(stderr, "error: run needs an operation; ");
    fprintf(stderr, "give run OPERATION DUMP --out DIR; seqpar-verify run --help lists the "
                    "operations\n");
    return NULL;
}

static int check_run(const operation *o) {
    if (!running.in) return usage("run needs the folder of a dump behind the operation");
    if (!running.out) return usage("run needs --out, a folder to be made");
    if (running.dtype && strcmp(running.dtype, "float32") && strcmp(running.dtype, "float64"))
        return usage("--dtype is the type of the computed tensors; give float32 or float64");
    return check_run_options(o);
}

static int run_run(void) {
    static run r; /* large */
    const operation *o = find_operation();
    int status;
    if (!o || check_run(o)) return VERDICT_USAGE;
    status = operation_run(&r, o, &running);
    if (status)
        fprintf(stderr, "error: run %s: %s\n", o->name, r.d.error.text);
    else if (as_json)
        json_print(stdout, run_json(&r, o));
    else
        run_print(&r, o);
    if (status)
        status = r.d.error.status == SEQPAR_ERR_OPTION       ? VERDICT_USAGE
                 : r.d.error.status == SEQPAR_ERR_ARITHMETIC ? VERDICT_VOID
                                                             : VERDICT_FILE;
    run_close(&r);
    return status;
}

/* ---- test ---- */

/* make verify's program: 0, or 1 with a table of what differs. */
int seqpar_verify_test(int argc, char **argv);

static int test_layout(int at) {
    char *words[] = {(char *)"test", (char *)"--layout", (char *)seqpar_layout_name(at),
                     (char *)"--json"};
    return seqpar_verify_test(as_json ? 4 : 3, words);
}

static int run_test(void) {
    char *words[] = {(char *)"test", (char *)"--ring_attn_size", (char *)"2", (char *)"--json"};
    int wrong = 0;
    if (level > 2)
        return usage("--level is neither 1 nor 2; give 1 (zigzag on 2 ranks) or 2 "
                     "(all layouts on 2 to 8 ranks)");
    if (level == 1) return seqpar_verify_test(as_json ? 4 : 3, words);
    if (!isatty(STDOUT_FILENO)) bar_begin("layouts", SEQPAR_LAYOUT_COUNT);
    for (int i = 0; i < SEQPAR_LAYOUT_COUNT; i++) {
        if (as_json) printf("%s", i ? ", " : "[");
        wrong |= test_layout(i);
        bar_step(1);
    }
    if (!isatty(STDOUT_FILENO)) bar_end();
    if (as_json) printf("]\n");
    return wrong;
}

/* ---- mutants ---- */

static int judge_mutant(const char *of, const char *its_model, verdict *v) {
    stage stages[STAGES] = {{0}};
    int status;
    folder = of;
    model = its_model;
    status = judge_folders(stages, NULL);
    *v = whole_verdict(stages, stage_bit(GRADIENTS), 0);
    return status;
}

static void print_mutant(const mutant *m) {
    char said[160];
    snprintf(said, sizeof said, "%s%.63s",
             m->kind == VERDICT_RIGHT      ? "right"
             : m->kind == VERDICT_MARGINAL ? "marginal"
             : m->kind != VERDICT_WRONG    ? "insufficient"
             : m->named && m->among == 1   ? "named"
             : m->named                    ? "named among several"
             : m->among                    ? "taken for "
                                           : "wrong, not named",
             m->other);
    printf("%-4s %-32s %-22s%s\n", m->objective, *m->name ? m->name : "(none)", said,
           m->seen < 0 ? ""
           : m->seen   ? " seen by CMD"
                       : " not seen by CMD");
}

static cJSON *mutant_json(const mutant *m) {
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "mistake", m->name);
    cJSON_AddStringToObject(o, "objective", m->objective);
    cJSON_AddBoolToObject(o, "named", m->named);
    cJSON_AddNumberToObject(o, "among", m->among);
    if (m->seen >= 0) cJSON_AddBoolToObject(o, "seen", m->seen);
    return o;
}

typedef struct mutant_tally {
    int mutants, well, seen, right_seen;
    cJSON *all; /* NULL: mutants are printed as text */
} mutant_tally;

static void mutant_count(mutant_tally *tally, const mutant *m) {
    int wrong = *m->name != 0;
    if (m->skipped) return;
    tally->mutants += wrong;
    tally->well += wrong && mutant_is_well(m);
    tally->seen += wrong && m->seen > 0;
    tally->right_seen |= !wrong && (m->seen > 0 || !mutant_is_well(m));
    if (tally->all) {
        cJSON_AddItemToArray(tally->all, mutant_json(m));
        return;
    }
    bar_wipe();
    print_mutant(m);
}

/* Sets mutant i: 0 is the right step, the others are each mistake with each objective. Returns
   0 if the mistake cannot be planted, else 1. */
static int mutant_of(mutant *m, int i) {
    *m = (mutant){.name = i ? mistakes[(i - 1) % MISTAKES].name : "",
                  .objective = objectives[i ? (i - 1) / MISTAKES : 0]};
    return !i || can_be_planted(m->objective, m->name);
}

static int run_all_mutants(mutant_tally *tally, const mutants_desc *desc) {
    mutant m;
    int status = 0, count = 0;
    for (int i = 0; i <= 2 * MISTAKES; i++) count += mutant_of(&m, i);
    bar_begin("mutants", count);
    for (int i = 0; !status && i <= 2 * MISTAKES; i++) {
        if (!mutant_of(&m, i)) continue;
        status = mutant_run(&m, desc);
        if (!status) mutant_count(tally, &m);
        bar_step(1);
    }
    bar_end();
    return status;
}

static int run_mutants(void) {
    mutant_tally tally = {.all = as_json ? cJSON_CreateArray() : NULL};
    mutants_desc desc = {score, making, judge_mutant};
    int status;
    desc.make.sp = 3;
    desc.make.dp = 2;
    desc.make.accumulation = 5;
    desc.make.tokens = 37;
    if ((status = run_all_mutants(&tally, &desc)) != 0) return status;
    if (as_json)
        json_print(stdout, tally.all);
    else
        printf("%d mutants, %d named%s", tally.mutants, tally.well, score ? "" : "\n");
    if (!as_json && score)
        printf(", %d seen by CMD%s\n", tally.seen,
               tally.right_seen ? ", which does not pass the right step" : "");
    return tally.right_seen || (score ? tally.seen : tally.well) < tally.mutants
               ? VERDICT_SURVIVED
               : 0;
}

/* ---- explain, list ---- */

/* Finds a mistake by its name. Hyphens may stand for underscores. */
static const mistake *find_mistake(const char *given_name) {
    char plain[64];
    snprintf(plain, sizeof plain, "%s", given_name);
    for (char *c = plain; *c; c++)
        if (*c == '-') *c = '_';
    return mistake_named(plain);
}

/* "; is it over_sp, over_sp_squared?": mistakes whose names contain a word of the given
   name. */
static void print_alike(const char *given_name) {
    char words[64];
    int count = 0;
    snprintf(words, sizeof words, "%s", given_name);
    for (char *word = strtok(words, "_- "); word; word = strtok(NULL, "_- "))
        for (int i = 0; strlen(word) > 2 && i < MISTAKES && count < 4; i++)
            if (strstr(mistakes[i].name, word))
                fprintf(stderr, "%s%s", count++ ? ", " : "; is it ", mistakes[i].name);
    fprintf(stderr, "%s", count ? "?" : "");
}

static int run_explain(void) {
    const mistake *m;
    if (name && quiz_number)
        return usage("explain takes a name or --quiz; leave out one of them");
    if (quiz_number && !find_quiz()) return VERDICT_USAGE;
    if (quiz_number) name = quiz_at(quiz_number)->mistake;
    if (!name) return usage("explain needs the name of a mistake; seqpar-verify list has all");
    m = find_mistake(name);
    if (!m) {
        fprintf(stderr, "error: no mistake is called '%s'", option_shown(name));
        print_alike(name);
        fprintf(stderr, "; seqpar-verify list has all\n");
        return VERDICT_USAGE;
    }
    if (as_json) {
        json_print(stdout, mistake_json(m));
        return 0;
    }
    printf("%s (%s)\n", m->name, m->family);
    mistake_print(stdout, m);
    if (mistake_lesson(m)) print_wrapped(stdout, "lesson", mistake_lesson(m));
    return 0;
}

static void print_markdown(void) {
    printf(
        "# Mistakes of sequence parallelism\n\n<!-- SPDX-License-Identifier: MIT OR "
        "Unlicense -->\n\nGenerated by `seqpar-verify list --markdown` from "
        "`verify/oracle/verdict/mistakes.h`. P ranks share a sequence, D replicas,\nA micro-batches "
        "of a step; s and n: sum of losses and count of supervised tokens of a rank or "
        "micro-batch, N the\ncount of the whole step, g_r the gradient of rank r's s / N.\n"
        "\n| what people see | mistake |\n|---|---|\n");
    for (int i = 0; i < MISTAKES; i++)
        printf("| %s | [%s](#%s) |\n", mistakes[i].symptom, mistakes[i].name, mistakes[i].name);
    for (int i = 0; i < MISTAKES; i++) {
        const mistake *m = &mistakes[i];
        printf("\n## %s\n\n%s\n\n- Right: `%s`\n- Wrong: `%s`\n- By hand: %s\n- Fix: %s\n"
               "- Seen: %s.\n",
               m->name, m->cause, m->right, m->wrong, m->example, m->fix,
               m->seen ? m->seen : "in no public thread that we know");
        if (mistake_lesson(m))
            printf("- Lesson: [%s](../../%s)\n", mistake_lesson(m), mistake_lesson(m));
    }
}

static int list_mistakes(void) {
    cJSON *all = as_json ? cJSON_CreateArray() : NULL;
    if (as_markdown) print_markdown();
    for (int i = 0; i < MISTAKES && !as_markdown; i++)
        if (all)
            cJSON_AddItemToArray(all, mistake_json(&mistakes[i]));
        else
            printf("%-24s %-6s %s\n", mistakes[i].name, mistakes[i].family,
                   mistakes[i].symptom);
    if (all) json_print(stdout, all);
    return 0;
}

static int list_gallery(void) {
    cJSON *all = as_json ? cJSON_CreateArray() : NULL;
    for (int i = 0; all && i < GALLERY; i++)
        cJSON_AddItemToArray(all, gallery_json(&gallery_bugs[i]));
    if (all)
        json_print(stdout, all);
    else if (as_markdown)
        gallery_print_markdown();
    else
        gallery_print_all();
    return 0;
}

static int run_list(void) { return as_gallery ? list_gallery() : list_mistakes(); }

/* ---- verbs ---- */

static const verb verbs[] = {
    {"law", "says which mistake explains two numbers, or a loss with its sums and counts",
     run_law},
    {"ver", "judges a dump of a step: what is right, what is wrong, and by which mistake",
     run_ver},
    {"on_policy", "compares log-probs of sampler and trainer before any update", run_on_policy},
    {"gen", "makes dumps of a step, right or with a mistake, and of the same step on one rank",
     run_gen},
    {"run", "computes an operation on a dump's tensors: right values in place of a verdict",
     run_run},
    {"test", "tests seqpar itself: N ranks against one, every objective, by bits", run_test},
    {"mutants", "makes every mistake of gen and says which ver names, or which your test sees",
     run_mutants},
    {"explain", "explains a mistake: symptom, cause, formulas, example, fix", run_explain},
    {"list", "lists all mistakes that have a name", run_list}};
enum { VERBS = sizeof verbs / sizeof *verbs };

/* The verb, or word of manual_words, that an unknown word may mean; NULL: none is alike. */
static const char *verb_alike(const char *text) {
    for (int i = 0; i < VERBS; i++)
        if (words_alike(verbs[i].name, text)) return verbs[i].name;
    for (int i = 0; i < MANUAL_WORDS; i++)
        if (words_alike(manual_words[i].name, text)) return manual_words[i].name;
    return NULL;
}

static void print_help(int at) {
    int column = printf("seqpar-verify %s\n\n", at < 0 ? "VERB" : verbs[at].name);
    for (int i = 0; at < 0 && i < VERBS; i++)
        printf("    %-26s %s\n", verbs[i].name, verbs[i].help);
    for (int i = 0; at < 0 && i < MANUAL_WORDS; i++)
        printf("    %-12s %-13s %s\n", manual_words[i].name, manual_words[i].value,
               manual_words[i].help);
    if (at >= 0) options_help(options, OPTIONS, verbs[at].name);
    if (at >= 0 && verbs[at].run == run_run) operations_help();
    column = printf("\nexit codes:") - 1;
    for (int i = 0; i < EXIT_CODES; i++) {
        char text[80];
        int n = snprintf(text, sizeof text, " %d %s%s", exit_codes[i].code, exit_codes[i].text,
                         i + 1 < EXIT_CODES ? "," : "");
        if (column + n > PAGE) column = printf("\n%11s", "") - 1;
        column += printf("%s", text);
    }
    printf("\n");
}

/* Handles --help, --man and --completion, which are given instead of a verb. An exit code, or
   -1: it is none of these. */
static int run_word(int argc, char **argv) {
    const manual m = {verbs, VERBS, options, OPTIONS, shells};
    int status = !strcmp(argv[1], "--man") || !strcmp(argv[1], "--completion");
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
        print_help(-1);
        return 0;
    }
    if (!status) return -1;
    if (!strcmp(argv[1], "--man")) return manual_print(&m);
    if (argc > 2 && !strcmp(argv[2], "bash")) return bash_print(&m);
    if (argc > 2 && !strcmp(argv[2], "zsh")) return zsh_print(&m);
    return usage("--completion needs a shell, bash or zsh");
}

/* Returns status, or if stdout could not be written, another exit code with one sentence on
   stderr. */
static int say_it_is_written(int status) {
    if (!fflush(stdout) && !ferror(stdout)) return status;
    fprintf(stderr, "error: the output could not be written: %s\n", strerror(errno));
    return VERDICT_FILE;
}

/* Keeps freed memory in the process. Otherwise pages of freed tensors go back to the system,
   and each causes a page fault when it is used again: two thirds of the time of a dump of
   1 GB. */
static void keep_memory(void) {
#ifdef __GLIBC__
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, INT32_MAX);
#endif
}

int main(int argc, char **argv) {
    int at = 0, status;
    keep_memory();
    for (int i = 0; i < MISTAKES; i++) mistake_names[i] = mistakes[i].name;
    for (int i = 0; i < OPERATIONS; i++) operation_names[i] = operations[i].name;
    for (int i = 0; i < STAGES; i++) stage_words[i] = stage_names[i].name;
    for (int i = 0; i < SEQPAR_LAYOUT_COUNT; i++) layouts[i] = seqpar_layout_name(i);
    if (argc < 2) {
        print_help(-1);
        return VERDICT_USAGE;
    }
    if ((status = run_word(argc, argv)) >= 0) return say_it_is_written(status);
    while (at < VERBS && strcmp(verbs[at].name, argv[1])) at++;
    if (at == VERBS) {
        fprintf(
            stderr, "error: no verb is called '%s'; %s%s%sseqpar-verify --help lists them\n",
            option_shown(argv[1]), verb_alike(argv[1]) ? "did you mean " : "",
            verb_alike(argv[1]) ? verb_alike(argv[1]) : "", verb_alike(argv[1]) ? "? " : "");
        return VERDICT_USAGE;
    }
    status = options_read(options, OPTIONS, verbs[at].name, argc - 2, argv + 2);
    if (status > 0) print_help(at);
    if (status) return status < 0 ? VERDICT_USAGE : 0;
    return say_it_is_written(verbs[at].run());
}
