/* SPDX-License-Identifier: MIT OR Unlicense */
/* fuzz.c - everything foreign that is read, under libFuzzer: FUZZ_TARGET=data build/fuzz/fuzz CORPUS -max_total_time=600
 *
 *     safetensors   a file, opened, every tensor read          config      a model folder's config.json
 *     data          a .jsonl of documents                      checkpoint  a file whose metadata say where training stood
 *     pairs         a .jsonl of pairs and of labelled texts    reward      what a reward server answers
 *     options       a command line, one word a line            dump        two ranks' files of a step, for seqpar-verify:
 *                                                                          the first one's size in three bytes goes before
 *
 * An input is taken, or refused with a sentence that fits a line of a terminal; anything else ends the fuzzer. */
#ifdef FUZZ_LIBRARY /* the rest of the library, which reads nothing foreign, is compiled without sanitizers: minutes less */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "seqpar_llama.h"
#else
#define STB_DS_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "trainer/ppo/ppo_options.h"
#include "trainer/base/escape.h"

static char path[512]; /* what the readers are given, in FUZZ_FOLDER */

/* What every refusal must be. */
static void expect_sentence(int failed, const char *text) {
    char shown[8192];
    if (!failed) return;
    if (!*text) abort();
    for (const char *at = demo_escape(shown, sizeof shown, text); *at; at++)
        if ((unsigned char)*at < 0x20 || *at == 0x7F) abort();
}
static void expect_error(const seqpar_error *error) {
    for (const char *at = error->text; *at; at++)
        if ((unsigned char)*at < 0x20 || *at == 0x7F) abort();
    if (error->status && !error->text[0]) abort();
}

static void put(const char *name, const uint8_t *bytes, size_t size) {
    FILE *file = fopen(name, "wb");
    if (!file || fwrite(bytes, 1, size, file) != size || fclose(file)) abort();
}

static void fuzz_safetensors(const uint8_t *bytes, size_t size) {
    seqpar_error error = {0};
    seqpar_safetensors_file *file;
    put(path, bytes, size);
    if (!seqpar_safetensors_open(&file, path, &error))
        for (int64_t i = 0; i < seqpar_safetensors_count(file); i++) {
            seqpar_safetensors_part part = seqpar_safetensors_whole(
                seqpar_safetensors_at(file, i));
            double *values = (double *)demo_alloc(part.count, sizeof *values);
            seqpar_error ignored = {0};
            part.finite = 1;
            seqpar_safetensors_read_f64(file, values, &part, &ignored);
            expect_error(&ignored);
            free(values);
        }
    seqpar_safetensors_close(file);
    expect_error(&error);
}

/* What a checkpoint says of itself. */
static void fuzz_checkpoint(const uint8_t *bytes, size_t size) {
    seqpar_error error = {0};
    seqpar_safetensors_file *file;
    demo_state state;
    put(path, bytes, size);
    if (!seqpar_safetensors_open(&file, path, &error) &&
        !demo_read_state(file, path, &state, &error))
        if (state.step < 0 || state.optimizer_t < 0 || state.optimizer_t > state.step ||
            state.documents < 1)
            abort();
    seqpar_safetensors_close(file);
    expect_error(&error);
}

static void fuzz_config(const uint8_t *bytes, size_t size) {
    seqpar_error error = {0};
    seqpar_llama_config config = {0};
    char file[1024];
    snprintf(file, sizeof file, "%s/config.json", path);
    put(file, bytes, size);
    demo_load_config(path, &config, &error);
    (void)demo_config_positions(path);
    expect_error(&error);
}

static void fuzz_data(const uint8_t *bytes, size_t size) {
    demo_error error = {""};
    for (int kind = 0; kind < 3; kind++) {
        const demo_data_options options = {.output_key = kind ? "output" : NULL,
                                           .input_template = kind ? "a{}b" : NULL,
                                           .pretrain_mode = kind == 2,
                                           .max_len = 64,
                                           .long_documents = kind};
        demo_dataset set;
        put(path, bytes, size);
        int failed = demo_data_load(&set, path, &options, &error);
        for (int64_t i = 0; i < arrlen(set.documents); i++)
            if (set.documents[i].tokens < 1 || set.documents[i].tokens > 64 ||
                set.documents[i].loss_mask[0])
                abort();
        expect_sentence(failed, error.text);
        demo_data_free(&set);
    }
}

static void fuzz_pairs(const uint8_t *bytes, size_t size) {
    demo_error error = {""};
    demo_pair_set pairs;
    demo_labelled_set labelled;
    put(path, bytes, size);
    for (int kind = 0; kind < 2; kind++) {
        const demo_pair_options how = {.data = {.input_template = kind ? "a{}b" : NULL,
                                                .max_len = 64,
                                                .long_documents = 2 * kind},
                                       .prompt_key = kind ? "prompt" : NULL,
                                       .margins = kind};
        expect_sentence(demo_pairs_load(&pairs, path, &how, &error), error.text);
        demo_pairs_free(&pairs);
    }
    const demo_labelled_options how = {.data = {.max_len = 64}};
    expect_sentence(demo_labelled_load(&labelled, path, &how, &error), error.text);
    for (int64_t i = 0; i < arrlen(labelled.records); i++) {
        demo_document d = demo_mismatched(&labelled.records[i],
                                          &labelled.records[(i + 1) % arrlen(labelled.records)],
                                          &how.data);
        demo_document_free(&d);
    }
    demo_labelled_free(&labelled);
}

static void fuzz_options(const uint8_t *bytes, size_t size) {
    static demo_job job;
    static demo_ppo_config ppo;
    const demo_binding bindings[] = {DEMO_TRAINER_BINDINGS(job.config),
                                     DEMO_PPO_BINDINGS(job.config, ppo)};
    demo_options options = {.tool = "ppo",
                            .bindings = bindings,
                            .binding_count = (int)(sizeof bindings / sizeof *bindings)};
    demo_error error = {""};
    char *words[64] = {(char *)"train_ppo"}, *text = (char *)demo_alloc((int64_t)size + 1, 1),
         *rest = text, *word;
    int count = 1;
    memcpy(text, bytes, size);
    while (count < 64 && (word = strsep(&rest, "\n"))) words[count++] = word;
    memset(&job, 0, sizeof job);
    memset(&ppo, 0, sizeof ppo);
    int failed = demo_options_parse(&options, count, words, &error);
    job.options = &ppo;
    if (!failed && !options.help_wanted)
        failed = demo_ppo_prepare(&job, &error) || demo_pick_attention(&job, &error);
    expect_sentence(failed, error.text);
    free(text);
}

static void fuzz_reward(const uint8_t *bytes, size_t size) {
    demo_error error = {""};
    char *copy = (char *)demo_alloc((int64_t)size + 1, 1);
    double rewards[3] = {0};
    memcpy(copy, bytes, size);
    int failed = demo_answer_read(copy, size, "http://x", rewards, 3, &error);
    for (int i = 0; i < 3; i++)
        if (!failed && !isfinite(rewards[i])) abort();
    expect_sentence(failed, error.text);
    free(copy);
}

seqpar_error fuzz_files(const char *folder, const uint8_t *bytes,
                        size_t size); /* fuzz_dump.c */
static void fuzz_dump(const uint8_t *bytes, size_t size) {
    seqpar_error error = fuzz_files(path, bytes, size);
    expect_error(&error);
}

static const struct {
    const char *name, *ending;
    void (*run)(const uint8_t *bytes, size_t size);
} targets[] = {{"safetensors", "safetensors", fuzz_safetensors},
               {"data", "jsonl", fuzz_data},
               {"pairs", "jsonl", fuzz_pairs},
               {"config", "folder", fuzz_config},
               {"options", "txt", fuzz_options},
               {"checkpoint", "safetensors", fuzz_checkpoint},
               {"reward", "json", fuzz_reward},
               {"dump", "folder", fuzz_dump}};
static int target = -1;

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    const char *wanted = getenv("FUZZ_TARGET");
    (void)argc, (void)argv;
    for (int i = 0; i < (int)(sizeof targets / sizeof *targets); i++)
        if (wanted && !strcmp(wanted, targets[i].name)) target = i;
    if (target < 0)
        return fprintf(
                   stderr,
                   "error: FUZZ_TARGET is '%s'; set it to safetensors, data, pairs, config, options, checkpoint, reward or dump\n",
                   wanted ? wanted : ""),
               exit(2), 0;
    snprintf(path, sizeof path, "%s/%s.%ld.%s",
             getenv("FUZZ_FOLDER") ? getenv("FUZZ_FOLDER") : ".", wanted, (long)getpid(),
             targets[target].ending);
    if ((targets[target].run == fuzz_config || targets[target].run == fuzz_dump) &&
        mkdir(path, 0700))
        abort();
    return 0;
}
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    targets[target].run(bytes, size);
    return 0;
}
#endif
