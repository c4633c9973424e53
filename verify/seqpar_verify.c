/* SPDX-License-Identifier: MIT OR Unlicense */
/* seqpar-verify - says whether a framework's sequence parallelism is right and, if not, which
 * mistake it is.
 *
 *     seqpar-verify law --got 0.25 --want 1 --sp 4
 *     seqpar-verify law --got 1.75 --sums 4,7,0,16 --counts 1,7,0,8
 *     seqpar-verify explain over_sp
 *     seqpar-verify list
 *
 *     seqpar-verify ver DUMP                  a folder as oracle/dump.h describes it
 *     seqpar-verify ver DUMP --want DUMP      gradients, too, against those of another run
 *     seqpar-verify ver DUMP --model FOLDER   or against the model in fp64, computed here
 *     seqpar-verify ver DUMP --html FILE      the verdict as a page; --junit FILE: for CI
 *
 * Exit codes: 0 right, 1 wrong, 2 usage, 3 file, 4 insufficient evidence, 5 marginal with
 * --strict, 6 the reference and slow.h disagree, so that there is no verdict, 7 a mutant
 * survived. */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "oracle/html.h"
#include "oracle/junit.h"
#include "oracle/mutants.h"
#include "oracle/options.h"

static law numbers = {.sp = 1, .dp = 1, .accumulation = 1, .tolerance = 1e-3};
static option_list sums = {.values = numbers.sums, .most = LAW_GROUPS};
static option_list counts = {.values = numbers.counts, .most = LAW_GROUPS};
static const char *name, *folder, *wanted, *model, *score, *html, *junit;
static double budget = 60;
static made_desc making = {.layout = "zigzag",
                           .objective = "sft",
                           .sp = 4,
                           .dp = 1,
                           .accumulation = 1,
                           .tokens = 61,
                           .docs = 4,
                           .seed = 1};
static int as_json, as_markdown, strict;
static int64_t level = 1;

static option options[] = {
    {"law", "got", "X", OPTION_NUMBER, &numbers.got,
     "a gradient norm before clip, or a loss, of the run in question", 0},
    {"law", "want", "X", OPTION_NUMBER, &numbers.want,
     "the same of one rank on the same step", 0},
    {"law", "sp", "P", OPTION_SIZE, &numbers.sp, "ranks that share a sequence (1)", 0},
    {"law", "dp", "D", OPTION_SIZE, &numbers.dp, "data-parallel replicas (1)", 0},
    {"law", "accumulation", "A", OPTION_SIZE, &numbers.accumulation,
     "micro-batches of a step (1)", 0},
    {"law", "sums", "S,S,...", OPTION_LIST, &sums,
     "in place of want: sums of losses, one a rank or micro-batch,", 0},
    {"law", "counts", "N,N,...", OPTION_LIST, &counts, "and counts of supervised tokens", 0},
    {"law", "all_tokens", "N", OPTION_NUMBER, &numbers.all_tokens,
     "tokens of the step, supervised or not", 0},
    {"law", "tolerance", "X", OPTION_NUMBER, &numbers.tolerance,
     "relative distance that rounding may make (0.001)", 0},
    {"ver", "DUMP", "", OPTION_NAME, &folder, "a folder with a file of every rank", 0},
    {"ver", "want", "DUMP", OPTION_TEXT, &wanted, "of the same step on one rank: gradients", 0},
    {"ver", "model", "FOLDER", OPTION_TEXT, &model,
     "a Llama-type model in Hugging Face's form: log-probs and gradients", 0},
    {"ver", "budget", "SECONDS", OPTION_NUMBER, &budget,
     "time for mistakes that --model tries (60)", 0},
    {"ver", "tolerance", "X", OPTION_NUMBER, &numbers.tolerance,
     "relative distance that rounding may make (0.001)", 0},
    {"ver", "html", "FILE", OPTION_TEXT, &html, "a page of it, with pictures of where", 0},
    {"ver", "junit", "FILE", OPTION_TEXT, &junit, "JUnit's XML of it, a case a stage", 0},
    {"ver", "strict", "", OPTION_FLAG, &strict, "exit code 5 for a marginal verdict", 0},
    {"gen", "out", "DIR", OPTION_TEXT, &making.out, "a folder that is made", 0},
    {"gen", "layout", "NAME", OPTION_TEXT, &making.layout,
     "contiguous, zigzag, zigzag-doc or stripe (zigzag)", 0},
    {"gen", "objective", "NAME", OPTION_TEXT, &making.objective, "sft or dpo (sft)", 0},
    {"gen", "sp", "P", OPTION_SIZE, &making.sp, "ranks that share a sequence (4)", 0},
    {"gen", "dp", "D", OPTION_SIZE, &making.dp, "data-parallel replicas (1)", 0},
    {"gen", "accumulation", "A", OPTION_SIZE, &making.accumulation,
     "micro-batches of a step (1)", 0},
    {"gen", "tokens", "T", OPTION_SIZE, &making.tokens,
     "of the first row; the next has one more (61)", 0},
    {"gen", "docs", "N", OPTION_SIZE, &making.docs, "documents of a row (4)", 0},
    {"gen", "seed", "N", OPTION_SIZE, &making.seed, "of all that is drawn (1)", 0},
    {"gen", "mistake", "NAME", OPTION_TEXT, &making.mistake, "to be planted", 0},
    {"gen", "questions", "", OPTION_FLAG, &making.questions,
     "without what is to be computed", 0},
    {"test", "level", "N", OPTION_SIZE, &level,
     "1: two ranks, zigzag; 2: all layouts on 2 to 8 ranks (1)", 0},
    {"mutants", "score", "CMD", OPTION_TEXT, &score,
     "a test of yours, run as CMD WANT GOT; 0: it finds the two alike", 0},
    {"mutants", "seed", "N", OPTION_SIZE, &making.seed, "of all that is drawn (1)", 0},
    {"explain", "NAME", "", OPTION_NAME, &name, "of a mistake; seqpar-verify list has all", 0},
    {"list", "markdown", "", OPTION_FLAG, &as_markdown, "the page of mistakes", 0},
    {"law", "strict", "", OPTION_FLAG, &strict, "exit code 5 for a marginal verdict", 0},
    {"", "json", "", OPTION_FLAG, &as_json, "the same as JSON", 0}};
enum { OPTIONS = sizeof options / sizeof *options };

static int given(const char *option_name) {
    char text[32];
    snprintf(text, sizeof text, "--%s", option_name);
    return option_named(options, OPTIONS, "law", text)->given;
}

static int usage(const char *sentence) {
    fprintf(stderr, "error: %s\n", sentence);
    return VERDICT_USAGE;
}

/* ---- law ---- */

static int check_counts(void) {
    numbers.groups = counts.count;
    if (sums.count != counts.count) {
        fprintf(stderr, "error: %lld sums and %lld counts; give one of each a rank or "
                        "micro-batch\n",
                (long long)sums.count, (long long)counts.count);
        return VERDICT_USAGE;
    }
    for (int64_t i = 0; i < counts.count; i++)
        if (counts.values[i] < 0 || counts.values[i] != floor(counts.values[i])) {
            fprintf(stderr, "error: count %lld is %g; a count of tokens is whole and not below "
                            "0\n",
                    (long long)i, counts.values[i]);
            return VERDICT_USAGE;
        }
    return 0;
}

static int check_tolerance(void) {
    if (numbers.tolerance > 0 && numbers.tolerance < 0.5) return 0;
    return usage("--tolerance is a relative distance; give a number between 0 and 0.5");
}

static int check_law(void) {
    int parts = given("sums") + given("counts");
    if (!given("got")) return usage("law needs --got, the number of the run in question");
    if (parts == 1) return usage("--sums and --counts go together; give both");
    if (given("want") == (parts == 2))
        return usage("law needs --want, or --sums and --counts, and not both");
    if (check_tolerance()) return VERDICT_USAGE;
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

static const stage *worst_stage(const stage *stages) {
    const stage *worst = NULL;
    for (int i = 0; i < STAGES; i++)
        if (stages[i].judged &&
            (!worst || verdict_weight(stages[i].v.kind) > verdict_weight(worst->v.kind)))
            worst = &stages[i];
    return worst;
}

/* Attention that is wrong in no way that its own numbers tell may be told by what becomes of
   the model with it. */
static const stage *named_by_model(const stage *stages, const stage *worst) {
    for (int i = LOG_PROBS; i <= GRADIENTS && worst == &stages[ATTENTION]; i++) {
        const verdict *v = &stages[i].v;
        int of_model = model && (i == LOG_PROBS || i == GRADIENTS) && stages[i].judged;
        if (!worst->v.count && of_model && v->kind == VERDICT_WRONG && v->count &&
            !strcmp((*v->named)->family, "attention"))
            return &stages[i];
    }
    return worst;
}

/* A pass needs all that was judged to be right, and more than places and positions. */
static verdict whole_verdict(const stage *stages) {
    const stage *worst = named_by_model(stages, worst_stage(stages));
    verdict v = {.kind = VERDICT_INSUFFICIENT};
    int more = 0;
    if (worst) v = worst->v;
    for (int i = 0; i < STAGES; i++) more += i > POSITIONS && stages[i].judged;
    if (v.kind == VERDICT_RIGHT && !more) v.kind = VERDICT_INSUFFICIENT;
    for (int i = 0; i < STAGES; i++) {
        int shows_nothing = stages[i].judged ? stages[i].v.kind == VERDICT_INSUFFICIENT
                                             : i == GRADIENTS && (wanted || model);
        if (v.kind != VERDICT_WRONG && shows_nothing) v.kind = VERDICT_INSUFFICIENT;
    }
    return v;
}

static void print_stages(const stage *stages) {
    for (int i = 0; i < STAGES; i++) {
        const stage *s = &stages[i];
        char label[32], text[400];
        snprintf(label, sizeof label, "%-10s", stage_names[i].name);
        snprintf(text, sizeof text, "not judged: it takes %s", stage_names[i].needs);
        if (!s->judged) print_wrapped(stdout, label, text);
        for (int k = 0; s->judged && k < s->v.lines; k++) {
            snprintf(text, sizeof text, "%s%s", k ? "" : verdict_word(&s->v), k ? "" : ": ");
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s", s->v.line[k]);
            print_wrapped(stdout, k ? "          " : label, text);
        }
    }
}

static void print_stages_json(const stage *stages, const verdict *v) {
    cJSON *o = verdict_json(v), *list = cJSON_AddArrayToObject(o, "stages");
    for (int i = 0; i < STAGES; i++) {
        cJSON *one = stages[i].judged ? verdict_json(&stages[i].v) : cJSON_CreateObject();
        cJSON_AddStringToObject(one, "stage", stage_names[i].name);
        if (!stages[i].judged) cJSON_AddStringToObject(one, "verdict", "not judged");
        if (!stages[i].judged) cJSON_AddStringToObject(one, "needs", stage_names[i].needs);
        cJSON_AddItemToArray(list, one);
    }
    json_print(stdout, o);
}

static int check_wanted(dump *want) {
    if (want->sp > 1)
        seqpar_fail(&want->error, SEQPAR_ERR_FILE_FORMAT,
                    "%.300s: its sp is %lld; give --want a dump with sp 1", wanted,
                    (long long)want->sp);
    return want->error.status != 0;
}

/* more: NULL, or takes what a page shows. 0, or an exit code with one sentence on stderr. */
static int judge_folders(stage *stages, details *more) {
    dump d, want = {.world = 0};
    int status, voided = 0;
    status = dump_open(&d, folder) || judge_dump(&d, stages, numbers.tolerance) ||
                 check_steps(stages, &d, numbers.tolerance);
    if (!status && model) {
        status = check_truth(stages, &d, model, numbers.tolerance, budget, more);
        voided = status > 0;
    }
    if (!status && wanted)
        status = dump_open(&want, wanted) || check_wanted(&want) ||
                 check_gradients(&stages[GRADIENTS], &d, &want, numbers.tolerance, more);
    dump_close(&d);
    dump_close(&want);
    if (status)
        fprintf(stderr, "error: %s\n",
                d.error.status ? d.error.text : want.error.text);
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

static int judge_and_say(details *more) {
    stage stages[STAGES] = {{0}};
    int status = judge_folders(stages, more);
    verdict v;
    if (status) return status;
    v = whole_verdict(stages);
    if (as_json) {
        print_stages_json(stages, &v);
    } else {
        verdict_headline(stdout, &v);
        print_stages(stages);
        verdict_print_mistakes(stdout, &v);
    }
    status = write_reports(&(report){folder, wanted, model, stages, &v, more});
    if (status) return status;
    return v.kind == VERDICT_MARGINAL && !strict ? 0 : (int)v.kind;
}

static int run_ver(void) {
    details more = {.n = 0};
    int status;
    if (!folder) return usage("ver needs the folder of a dump");
    if (wanted && model) return usage("give --want or --model, and not both");
    if (!(budget >= 0)) return usage("--budget is a time; give seconds from 0");
    if (check_tolerance()) return VERDICT_USAGE;
    if (html && junit && !strcmp(html, junit))
        return usage("--html and --junit are the same file; give two");
    status = judge_and_say(&more);
    details_free(&more);
    return status;
}

/* ---- gen ---- */

static int run_gen(void) {
    seqpar_error error = {0};
    cJSON *o;
    if (!making.out) return usage("gen needs --out, a folder to be made");
    if (made_make(&making, &error)) {
        fprintf(stderr, "error: %s\n", error.text);
        return error.status == SEQPAR_ERR_OPTION ? VERDICT_USAGE : VERDICT_FILE;
    }
    if (!as_json) {
        printf("%s/got  the step on %lld ranks%s%s\n%s/want  the same on one rank\n"
               "%s/model  a Llama folder\n",
               making.out, (long long)(making.sp * making.dp),
               making.mistake ? ", with " : ", right", making.mistake ? making.mistake : "",
               making.out, making.out);
        return 0;
    }
    o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "out", making.out);
    cJSON_AddStringToObject(o, "mistake", making.mistake ? making.mistake : "");
    json_print(stdout, o);
    return 0;
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
    char *words[] = {(char *)"test", (char *)"--ring_attn_size", (char *)"2",
                     (char *)"--json"};
    int wrong = 0;
    if (level > 2) return usage("--level is 1, seconds, or 2, all layouts on 2 to 8 ranks");
    if (level == 1) return seqpar_verify_test(as_json ? 4 : 3, words);
    for (int i = 0; i < SEQPAR_LAYOUT_COUNT; i++) {
        if (as_json) printf("%s", i ? ", " : "[");
        wrong |= test_layout(i);
    }
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
    *v = whole_verdict(stages);
    return status;
}

static void print_mutant(const mutant *m) {
    char said[160];
    snprintf(said, sizeof said, "%s%.63s",
             m->kind == VERDICT_RIGHT      ? "right"
             : m->kind != VERDICT_WRONG    ? "insufficient"
             : m->named && m->among == 1 ? "named"
             : m->named                    ? "named among several"
             : m->among                    ? "taken for "
                                           : "wrong, not named",
             m->other);
    printf("%-4s %-32s %-22s%s\n", m->objective, *m->name ? m->name : "(none)", said,
           m->seen < 0 ? "" : m->seen ? " seen by CMD" : " not seen by CMD");
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

static int run_mutants(void) {
    static const char *const objectives[] = {"sft", "dpo"};
    cJSON *all = as_json ? cJSON_CreateArray() : NULL;
    int well = 0, seen = 0, mutants = 0, right_seen = 0;
    mutants_desc desc = {score, making, judge_mutant};
    desc.make.sp = 3;
    desc.make.dp = 2;
    desc.make.accumulation = 5;
    desc.make.tokens = 37;
    for (int i = -1; i < 2 * MISTAKES; i++) {
        mutant m = {.name = i < 0 ? "" : mistakes[i % MISTAKES].name,
                    .objective = objectives[i < 0 ? 0 : i / MISTAKES]};
        int status;
        if (i >= 0 && !can_be_planted(m.objective, m.name)) continue;
        if ((status = mutant_run(&m, &desc)) != 0) return status;
        if (m.skipped) continue;
        mutants += i >= 0;
        well += i >= 0 && mutant_is_well(&m);
        seen += i >= 0 && m.seen > 0;
        right_seen |= i < 0 && (m.seen > 0 || !mutant_is_well(&m));
        if (all) cJSON_AddItemToArray(all, mutant_json(&m));
        if (!all) print_mutant(&m);
    }
    if (all) json_print(stdout, all);
    if (!all) printf("%d mutants, %d named%s", mutants, well, score ? "" : "\n");
    if (!all && score)
        printf(", %d seen by CMD%s\n", seen,
               right_seen ? ", which does not pass the right step" : "");
    return right_seen || (score ? seen : well) < mutants ? VERDICT_SURVIVED : 0;
}

/* ---- explain, list ---- */

static int run_explain(void) {
    const mistake *m = name ? mistake_named(name) : NULL;
    if (!name) return usage("explain needs the name of a mistake; seqpar-verify list has all");
    if (!m) {
        fprintf(stderr, "error: no mistake is called '%.60s'; seqpar-verify list has all\n",
                name);
        return VERDICT_USAGE;
    }
    if (as_json) {
        json_print(stdout, mistake_json(m));
        return 0;
    }
    printf("%s (%s)\n", m->name, m->family);
    mistake_print(stdout, m);
    return 0;
}

static void print_markdown(void) {
    printf("# Mistakes of sequence parallelism\n\n<!-- SPDX-License-Identifier: MIT OR "
           "Unlicense -->\n\nGenerated by `seqpar-verify list --markdown` from "
           "`verify/oracle/mistakes.h`. P ranks share a sequence, D replicas,\nA micro-batches "
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
    }
}

static int run_list(void) {
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

/* ---- verbs ---- */

static const struct {
    const char *name, *help;
    int (*run)(void);
} verbs[] = {{"law", "two numbers, or a loss and its sums and counts: which mistake is it?",
              run_law},
             {"ver", "a dump of a step: what is right, what is wrong, which mistake", run_ver},
             {"gen", "dumps of a step, right or with a mistake, and the same on one rank",
              run_gen},
             {"test", "seqpar itself: N ranks against one, every objective, by bits", run_test},
             {"mutants", "plants every mistake that gen can: which are named, or seen by a "
                         "test of yours",
              run_mutants},
             {"explain", "a mistake: symptom, cause, formulas, example, fix", run_explain},
             {"list", "all mistakes that have a name", run_list}};
enum { VERBS = sizeof verbs / sizeof *verbs };

static void print_help(int verb) {
    printf("seqpar-verify %s\n\n", verb < 0 ? "VERB" : verbs[verb].name);
    for (int i = 0; verb < 0 && i < VERBS; i++)
        printf("    %-26s %s\n", verbs[i].name, verbs[i].help);
    if (verb >= 0) options_help(options, OPTIONS, verbs[verb].name);
    printf("\nexit codes: 0 right, 1 wrong, 2 usage, 3 file, 4 insufficient, 5 marginal with "
           "--strict,\n            6 the reference and slow.h disagree, 7 a mutant survived\n");
}

int main(int argc, char **argv) {
    int verb = 0, status;
    if (argc < 2 || !strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
        print_help(-1);
        return argc < 2 ? VERDICT_USAGE : 0;
    }
    while (verb < VERBS && strcmp(verbs[verb].name, argv[1])) verb++;
    if (verb == VERBS) {
        fprintf(stderr, "error: no verb is called '%.60s'; seqpar-verify --help lists them\n",
                argv[1]);
        return VERDICT_USAGE;
    }
    status = options_read(options, OPTIONS, verbs[verb].name, argc - 2, argv + 2);
    if (status > 0) print_help(verb);
    if (status) return status < 0 ? VERDICT_USAGE : 0;
    status = verbs[verb].run();
    if (fflush(stdout) || ferror(stdout)) {
        fprintf(stderr, "error: the output could not be written: %s\n", strerror(errno));
        return VERDICT_FILE;
    }
    return status;
}
