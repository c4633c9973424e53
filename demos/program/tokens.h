/* SPDX-License-Identifier: MIT OR Unlicense */
/* tokens.h - tokenizes text data once. The trainer reports which of its data is text, and with
 * which options demos/prepare.py is to tokenize it (--print_prepare). The name of the token
 * file contains a digest of everything it depends on, so the file is reused until any of that
 * changes. */
#ifndef PROGRAM_TOKENS_H
#define PROGRAM_TOKENS_H

#include <sys/wait.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif
#include "digest.h"
#include "trainer/data/token_file.h"

/* A data set that is text and must be tokenized. */
typedef struct {
    const char *option;
    char **words; /* arguments of prepare.py; stb_ds array */
    const char *kind, *pretrain, *paths;
    char **output; /* the argument with the path of the token file */
} program_set;

/* ---- running another program ---- */

/* In the child process: executes the program. On Linux it gets SIGTERM when its parent ends. */
static void program_become(char *const *words, int out, int errors) {
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGTERM);
#endif
    if (dup2(out, 1) >= 0 && dup2(errors, 2) >= 0) execvp(words[0], words);
    fprintf(stderr, "error: %s cannot be started: %s\n", words[0], strerror(errno));
    _exit(2);
}

/* Starts a program with stdout on `out` and stderr on `errors`. Returns its process id, or -1
   with a message. */
static pid_t program_begin(program *p, char *const *words, int out, int errors) {
    fflush(NULL);
    pid_t child = fork();
    if (!child) program_become(words, out, errors);
    if (child < 0) demo_fail(p->error, "%s cannot be started: %s", words[0], strerror(errno));
    return child;
}

static int program_exit_code(pid_t child) {
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Exits with the code of another program, which has already printed its error. */
static int program_end_as(int code) {
    fflush(NULL);
    exit(code);
}

/* Prints what the trainer wrote to stderr. Errors are not printed but recorded, with the line
   of the yaml file if they are about an option from there. */
static void program_say_placed(program *p, FILE *said) {
    static char line[sizeof(demo_error)];
    rewind(said);
    while (fgets(line, sizeof line, said)) {
        if (strncmp(line, "error: ", 7)) {
            fputs(line, stderr);
            continue;
        }
        line[strcspn(line, "\n")] = 0;
        if (program_is_hanging(p, line)) continue;
        demo_fail(p->error, "%s", line + 7);
        program_error_placed(p);
        program_complain_as(p, p->error->text);
        p->error->text[0] = 0;
    }
    fclose(said);
}

/* Runs a program and returns its stdout as a zero-terminated stb_ds array; NULL if it reported
   errors. */
static char *program_output(program *p, char *const *words) {
    int ends[2];
    char *text = NULL, part[4096];
    FILE *said = tmpfile();
    if (!said || pipe(ends))
        return demo_fail(p->error, "cannot make a pipe or a file in /tmp: %s", strerror(errno)),
               (char *)NULL;
    fcntl(ends[0], F_SETFD, FD_CLOEXEC), fcntl(ends[1], F_SETFD, FD_CLOEXEC);
    pid_t child = program_begin(p, words, ends[1], fileno(said));
    close(ends[1]);
    for (ssize_t got; child > 0 && (got = read(ends[0], part, sizeof part)) > 0;)
        memcpy(arraddnptr(text, (size_t)got), part, (size_t)got);
    close(ends[0]);
    if (child < 0) return NULL;
    int code = program_exit_code(child);
    program_say_placed(p, said);
    if (arrlen(p->complaints)) return arrfree(text), (char *)NULL;
    if (code) program_end_as(code);
    arrput(text, 0);
    return text;
}

/* ---- data sets that are text, as the trainer reports them ---- */

/* The value of an option of prepare.py; NULL: it is missing. */
static char **program_set_word(const program_set *set, const char *name) {
    for (int64_t i = 0; i + 1 < arrlen(set->words); i++)
        if (!strcmp(set->words[i], name)) return &set->words[i + 1];
    return NULL;
}

/* Parses a line of --print_prepare. The strings of set point into the JSON, which is not
   freed. */
static int program_set_read(program *p, program_set *set, const char *line) {
    cJSON *json = cJSON_Parse(line), *word;
    const cJSON *option = cJSON_GetObjectItemCaseSensitive(json, "option");
    cJSON_ArrayForEach(word, cJSON_GetObjectItemCaseSensitive(json, "words"))
        arrput(set->words, cJSON_GetStringValue(word));
    set->option = cJSON_GetStringValue(option);
    set->output = program_set_word(set, "--output");
    char **kind = program_set_word(set, "--kind"),
         **model = program_set_word(set, "--pretrain"),
         **data = program_set_word(set, "--dataset");
    if (!set->option || !set->output || !kind || !model || !data)
        return demo_fail(p->error,
                         "the trainer describes its data as '%.300s', which seqpar cannot "
                         "read; build both from the same source",
                         line);
    set->kind = *kind, set->pretrain = *model, set->paths = *data;
    return 0;
}

/* ---- the path of the token file ---- */

/* Is the value of this option of prepare.py a path? Paths are not part of the digest. */
static bool program_is_place(const char *word) {
    return !strcmp(word, "--output") || !strcmp(word, "--pretrain") ||
           !strcmp(word, "--dataset");
}

/* Adds the options of prepare.py to the digest. For a chat template in a file it adds the bytes
   of the file, not its path. */
static int program_digest_words(program *p, uint64_t *digest, const program_set *set) {
    for (int64_t i = 0; i < arrlen(set->words); i++) {
        const char *word = set->words[i];
        bool place = program_is_place(word),
             file = !strcmp(word, "--tokenizer_chat_template") && i + 1 < arrlen(set->words) &&
                    !access(set->words[i + 1], F_OK);
        *digest = program_digest_text(*digest, word);
        if (file && program_digest_file(p, digest, set->words[i + 1])) return -1;
        i += place || file;
    }
    return 0;
}

static int program_digest_all(program *p, uint64_t *digest, const program_set *set,
                              const char *prepare) {
    *digest = UINT64_C(14695981039346656037);
    return program_digest_words(p, digest, set) || program_digest_prepare(p, digest, prepare) ||
                   program_digest_tokenizer(p, digest, set->pretrain) ||
                   program_digest_data(p, digest, set->paths)
               ? -1
               : 0;
}

/* The path of the token file, NAME.KIND.DIGEST.tokens, in the folder of the first data file or
   in --cache_dir. */
static char *program_cached(program *p, const program_set *set, uint64_t digest) {
    char *first = program_text("%.*s", (int)strcspn(set->paths, ","), set->paths);
    char *path = program_text("%s", program_set_path(first));
    for (size_t end = strlen(path); end > 1 && path[end - 1] == '/';) path[--end] = 0;
    const char *name = program_base(path);
    int folder = (int)(name - path);
    char *beside = folder ? program_text("%.*s", folder, path) : program_text("./");
    char *inside = p->cache_dir ? program_text("%s/", p->cache_dir) : beside;
    if (!access(inside, W_OK | X_OK))
        return program_text("%s%s.%s.%016llx.tokens", inside, name[0] == '.' ? "data" : name,
                            set->kind, (unsigned long long)digest);
    demo_fail(p->error,
              "the token file of %.300s cannot be written into %.300s: %s; give --cache_dir "
              "FOLDER",
              set->paths, inside, strerror(errno));
    return NULL;
}

/* Does an undamaged token file exist at this path, made with the tokenizer of this model
   folder? The digest in its name proves neither. */
static bool program_tokens_there(const program_set *set, const char *path) {
    demo_token_file file;
    demo_error why = {0};
    size_t size = 0;
    uint32_t kind = 1;
    while (strcmp(demo_token_kinds[kind], set->kind)) kind++;
    if (access(path, F_OK)) return false;
    if (demo_token_file_open(&file, path, kind, &why)) {
        fprintf(stderr, "notice: %s; it is made again\n", why.text);
        return false;
    }
    char *json = demo_read_file(program_text("%s/tokenizer.json", set->pretrain), &size);
    demo_fingerprint own = {size, json ? demo_crc32(0, (unsigned char *)json, size) : 0};
    bool same = demo_same_tokenizer(own, demo_token_fingerprint(&file));
    if (!same)
        fprintf(stderr,
                "notice: %s was made with another tokenizer; it is made "
                "again\n",
                path);
    demo_token_file_close(&file);
    free(json);
    return same;
}

/* ---- making the token file ---- */

static char *program_prepare_path(program *p) {
    char *path = program_text("%s/../demos/prepare.py", p->folder), whole[PATH_MAX];
    if (realpath(path, whole)) return program_text("%s", whole);
    demo_fail(p->error,
              "%s, which tokenizes text, is missing; give a token file, or start seqpar "
              "where it was built",
              path);
    return NULL;
}

/* The command line of prepare.py, ending with NULL; stb_ds array. */
static char **program_prepare_words(const program_set *set, const char *prepare) {
    const char *python = getenv("PYTHON");
    char **words = NULL;
    arrput(words, program_text("%s", python && *python ? python : "python3"));
    arrput(words, program_text("%s", prepare));
    for (int64_t i = 0; i < arrlen(set->words); i++) arrput(words, set->words[i]);
    /* needed if the file is damaged, or if another seqpar has just made the same file */
    arrput(words, program_text("--overwrite"));
    arrput(words, NULL);
    return words;
}

static int program_tokens_make(program *p, const program_set *set, const char *prepare) {
    char **words = program_prepare_words(set, prepare);
    char *line = demo_shell_line("", words, arrlen(words) - 1);
    int code = 0;
    if (p->print_command || program_is_elsewhere(p)) return puts(line + 1), 0;
    fprintf(stderr, "tokens:%s\n", line);
    /* stdout is only for the output of the trainer */
    pid_t child = program_begin(p, words, 2, 2);
    if (child < 0) return -1;
    code = program_exit_code(child);
    return code ? program_end_as(code) : 0;
}

/* Makes or reuses the token file of one data set, and replaces the data set by it in the
   options. */
static int program_tokens_of(program *p, const char *line) {
    program_set set = {0};
    uint64_t digest;
    char *prepare = program_prepare_path(p);
    if (!prepare || program_set_read(p, &set, line) ||
        program_digest_all(p, &digest, &set, prepare) ||
        !(*set.output = program_cached(p, &set, digest)))
        return -1;
    bool there = program_tokens_there(&set, *set.output);
    if (there) fprintf(stderr, "tokens: %s, made earlier from the same data\n", *set.output);
    if (!there && program_tokens_make(p, &set, prepare)) return -1;
    int i = program_find(p, set.option);
    program_replace(p, program_value_of(p, i), *set.output);
    return 0;
}

/* The trainer's command line, ending with NULL; stb_ds array. */
static char **program_trainer_words(const program *p) {
    char **words = NULL;
    const char *device = program_given(p, "device");
    char *cuda = program_binary(p, "cuda_", p->tool);
    bool gpu = device && !strcmp(device, "cuda") && !access(cuda, X_OK);
    arrput(words, gpu ? cuda : program_binary(p, "", p->tool));
    for (int64_t i = 0; i < arrlen(p->options); i++) arrput(words, p->options[i]);
    arrput(words, NULL);
    return words;
}

/* Prints a notice if text is read as bytes because the model has no tokenizer. That is right
   only for a model that was trained here on bytes. */
static void program_bytes_say(const program *p) {
    const char *model = program_given(p, "pretrain"), *data = program_given(p, "dataset");
    if (!data) data = program_given(p, "prompt_data");
    char *tokenizer = program_text("%s/tokenizer.json", model ? model : "");
    if (model && data && program_is_data(data) && access(tokenizer, F_OK))
        fprintf(stderr,
                "notice: %s has no tokenizer.json, so each byte of text is a token; if the "
                "model has a tokenizer, put tokenizer.json there\n",
                model);
    free(tokenizer);
}

static int program_tokens(program *p) {
    char **asked = program_trainer_words(p);
    arrput(asked, NULL);
    asked[arrlen(asked) - 2] = program_text("--print_prepare");
    char *text = program_output(p, asked);
    if (text && !*text) program_bytes_say(p);
    for (char *line = text, *next; line && *line; line = next) {
        next = line + strcspn(line, "\n");
        if (*next) *next++ = 0;
        if (program_tokens_of(p, line)) return -1;
    }
    return text ? 0 : -1;
}

#endif
