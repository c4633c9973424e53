/* SPDX-License-Identifier: MIT OR Unlicense */
/* seqpar.c - runs commands of OpenRLHF, 360-LLaMA-Factory and axolotl: type seqpar before the
 * command.
 *
 *     seqpar deepspeed --module openrlhf.cli.train_sft --dataset d.jsonl --pretrain model
 *
 * It selects the trainer, takes the number of ranks from the launcher's options, replaces names
 * on a hub by local paths, tokenizes text data, and then replaces itself by the trainer
 * (exec). */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#include "program/deepspeed.h"
#include "program/meanings.h"
#include "program/names.h"
#include "program/targets.h"
#include "program/tokens.h"
#include "program/world.h"

static const char program_help[] =
    "usage: seqpar [options of seqpar] COMMAND\n"
    "\n"
    "COMMAND is one of OpenRLHF, 360-LLaMA-Factory or axolotl, as in their documentation:\n"
    "  train_sft | train_dpo | train_rm | train_kto | train_kd | train_prm | train_ppo "
    "OPTIONS\n"
    "  generate OPTIONS: prompts in, texts out; also openrlhf.cli.batch_inference\n"
    "  deepspeed [--num_gpus N | --hostfile FILE] --module openrlhf.cli.train_sft OPTIONS\n"
    "  deepspeed --include localhost:0,1 ..., which is two ranks\n"
    "  deepspeed ./train_rm.py OPTIONS, or src/train.py --stage sft|pt|dpo|kto|rm|ppo OPTIONS\n"
    "  ray job submit --address=... -- python3 -m openrlhf.cli.train_ppo_ray OPTIONS\n"
    "  torchrun --nnodes N --nproc_per_node N, accelerate launch --num_processes N, python3\n"
    "  llamafactory-cli train FILE.yaml KEY=VALUE..., src/train.py FILE.yaml KEY=VALUE...\n"
    "  axolotl train FILE.yaml --KEY VALUE..., accelerate launch -m axolotl.cli.train "
    "FILE.yaml\n"
    "\n"
    "options of seqpar, before COMMAND or among its options:\n"
    "  --cache_dir FOLDER    where token files made from text are kept [beside the data]\n"
    "  --local_names FILE    a path for each name on a hub: lines of name, tab, path "
    "[./names.tsv]\n"
    "  --local               run all ranks of a hostfile on this host\n"
    "  --print_command       print the commands that would be run, and stop\n"
    "  --help                this; behind a trainer's name, its options\n"
    "  --help openrlhf       the options of OpenRLHF's commands; also llamafactory, axolotl\n"
    "\n"
    "PYTHON in the environment is the python that tokenizes text (tokenizers, jinja2).\n";

/* ---- help ---- */

static void program_help_option(const demo_known *known, program_meaning *all) {
    const demo_known *target = demo_known_target(known);
    const char *text = target->note;
    const char *role = !strcmp(target->role, "noeffect")      ? "no effect: "
                       : !strncmp(target->role, "refused", 7) ? "refused: "
                                                              : "";
    if (!strcmp(target->role, "real"))
        text = shgeti(all, target->name) < 0 ? "" : shget(all, target->name);
    printf("  --%-40s %-28s %s%s%s%s%s\n", known->name, known->tools,
           known != target ? "= --" : "", known != target ? target->name : "",
           known != target ? ": " : "", role, text);
}

/* Prints the options that are accepted from one program. Returns 2 if the program is
   unknown. */
static int program_help_of(const program *p, const char *name) {
    static const char *const sources[DEMO_FROMS] = {"seqpar", "openrlhf", "360lf", "axolotl"};
    int from = DEMO_FROM_OPENRLHF;
    while (from < DEMO_FROMS && strcmp(name, demo_from_name[from])) from++;
    if (from == DEMO_FROMS) {
        fprintf(stderr,
                "error: --help %.60s is not known; give openrlhf, llamafactory, axolotl, "
                "or nothing\n",
                name);
        return 2;
    }
    program_meaning *all = program_meanings(p);
    for (int i = 0; i < DEMO_KNOWN_COUNT; i++)
        if (strstr(demo_known_options[i].source, sources[from]))
            program_help_option(&demo_known_options[i], all);
    shfree(all);
    return demo_print_failed("the help");
}

/* ---- seqpar's own options ---- */

/* Reads one option of seqpar itself. Returns the number of words it takes, 1 or 2; 0 if the
   next word is no such option; -1 with a message. */
static int program_own(program *p, char **words, int64_t count) {
    const struct {
        const char *name;
        const char **text;
        bool *on;
    } own[] = {{"--cache_dir", &p->cache_dir, NULL},
               {"--local_names", &p->local_names, NULL},
               {"--local", NULL, &p->local},
               {"--print_command", NULL, &p->print_command}};
    for (int i = 0; i < 4; i++) {
        size_t length = strlen(own[i].name);
        char *end = words[0] + length;
        if (strncmp(words[0], own[i].name, length) || (*end && *end != '=')) continue;
        if (own[i].on && !*end) return *own[i].on = true, 1;
        const char *value = *end ? end + 1 : count > 1 ? words[1] : "";
        if (own[i].on || !*value || (!*end && !strncmp(value, "--", 2)))
            return demo_fail(p->error, "%s %s", own[i].name,
                             own[i].on ? "takes no value; leave it out" : "needs a value");
        *own[i].text = value;
        return *end ? 1 : 2;
    }
    return 0;
}

/* ---- mistakes in a command that was copied from a page ---- */

/* Is word i the value of the option before it? */
static bool program_is_value(const program *p, int i) {
    const char *before = p->words[i - 1];
    const demo_known *known = program_known(before);
    return i > p->at && !strncmp(before, "--", 2) && !strchr(before, '=') &&
           !(known && (!strcmp(known->kind, "flag") || !strcmp(known->kind, "optional")));
}

/* Refuses words that are blank or a comment. They mean that a blank follows the backslash at
   the end of a line, so the shell did not join the lines. */
static int program_words_check(program *p) {
    for (int i = p->at; i < p->count; i++) {
        const char *word = p->words[i];
        if (demo_word_blank(word))
            return demo_fail(
                p->error,
                "word %d is a space: a backslash at the end of a line has a space after it, "
                "so the shell did not pass on the lines below; remove everything after the "
                "backslash",
                i);
        if (*word == '#' && !program_is_value(p, i))
            return demo_fail(p->error,
                             "word %d is '%.60s', a comment that the shell passed on; remove "
                             "it from the command",
                             i, word);
    }
    return 0;
}

/* ---- from the command to the trainer ---- */

static int program_options_take(program *p) {
    while (p->at < p->count) {
        int own = program_own(p, p->words + p->at, p->count - p->at);
        if (own < 0) return -1;
        if (!own) arrput(p->options, p->words[p->at]);
        p->at += own ? own : 1;
    }
    return 0;
}

/* Checks that the trainer, a separate program in the folder of this one, can be executed. */
static int program_trainer_check(program *p) {
    char **words = program_trainer_words(p);
    if (!access(words[0], X_OK)) return 0;
    return demo_fail(p->error, "cannot start the trainer %.1000s: %s; type make demos",
                     words[0], strerror(errno));
}

static int program_read(program *p) {
    bool module = false;
    if (program_words_check(p) || program_launchers_read(p, &module)) return -1;
    if (p->at >= p->count)
        return demo_fail(p->error, "no trainer is named; seqpar --help lists what to type");
    const char *word = p->words[p->at++];
    return program_options_take(p) || program_target(p, word, module) ||
                   program_trainer_check(p)
               ? -1
               : 0;
}

static bool program_asks_help(const program *p) {
    for (int64_t i = 0; i < arrlen(p->options); i++)
        if (!strcmp(p->options[i], "--help") || !strcmp(p->options[i], "-h")) return true;
    return false;
}

/* Translates the options of the other program into options of the trainer. */
static int program_translate(program *p) {
    bool theirs = p->from == DEMO_FROM_LLAMAFACTORY || p->from == DEMO_FROM_AXOLOTL;
    if (theirs && program_deepspeed_options(p)) program_complain(p, "deepspeed");
    if (p->from == DEMO_FROM_LLAMAFACTORY) program_llamafactory(p);
    if (p->launch.bf16 && program_find(p, "bf16") < 0) program_add(p, "bf16", NULL);
    if (program_names_replace(p)) return -1;
    if (program_axolotl_pad(p)) program_complain(p, NULL);
    if (program_world(p)) program_complain(p, "world_size");
    if (p->from && program_find(p, "from") < 0) program_add(p, "from", demo_from_name[p->from]);
    return program_tokens(p);
}

static int program_become_trainer(program *p) {
    char **words = program_trainer_words(p);
    fflush(NULL);
    execv(words[0], words);
    return demo_fail(p->error, "%.1000s cannot be started: %s", words[0], strerror(errno));
}

/* For --print_command: prints the trainer's command line. */
static void program_print(const program *p) {
    char **words = program_trainer_words(p);
    puts(demo_shell_line("", words, arrlen(words) - 1) + 1);
}

/* For several hosts prints the launcher commands, since this program starts ranks only on its
   own host. Returns 0 if the trainer is to run here, else the exit code. */
static int program_hosts(program *p) {
    bool elsewhere = program_is_elsewhere(p);
    if (p->nodes > 1) program_hosts_say(p, elsewhere ? stdout : stderr);
    if (!elsewhere) return 0;
    fprintf(
        stderr,
        "notice: %lld hosts: nothing was started; type one of the lines above (make mpi builds "
        "its trainer), or add --local to run all %lld ranks here\n",
        (long long)p->nodes, (long long)p->ranks);
    return 2;
}

static int program_find_folder(program *p) {
    ssize_t length = readlink("/proc/self/exe", p->folder, sizeof p->folder - 1);
    char *slash;
    if (length > 0) p->folder[length] = 0;
    slash = strrchr(p->folder, '/');
    if (length > 0 && slash) return *slash = 0, 0;
    return demo_fail(p->error, "this program's own folder is not known (/proc/self/exe: %s)",
                     strerror(errno));
}

/* Returns the exit code, or -1 with a message. Does not return if it executes the trainer. */
static int program_main(program *p) {
    int own = 1, code;
    while (p->at < p->count && (own = program_own(p, p->words + p->at, p->count - p->at)) > 0)
        p->at += own;
    if (own < 0 || program_find_folder(p)) return -1;
    if (p->at >= p->count || !strcmp(p->words[p->at], "--help") ||
        !strcmp(p->words[p->at], "-h")) {
        if (p->at + 1 < p->count) return program_help_of(p, p->words[p->at + 1]);
        fputs(program_help, p->at < p->count ? stdout : stderr);
        return p->at < p->count ? demo_print_failed("the help") : 2;
    }
    if (p->at + 1 < p->count && !strcmp(p->words[p->at], "ray") &&
        !strcmp(p->words[p->at + 1], "start"))
        return fprintf(stderr, "notice: ray start: no Ray cluster is needed here, nothing was "
                               "done; go on with the command that trains\n"),
               0;
    if (program_read(p)) return -1;
    if (program_asks_help(p)) return program_become_trainer(p);
    if (program_translate(p)) return -1;
    if ((code = program_hosts(p))) return code;
    if (p->print_command) return program_print(p), demo_print_failed("the command");
    return program_become_trainer(p);
}

int main(int argc, char **argv) {
    demo_error error = {""};
    program p = {argv, argc, 1};
    p.error = &error;
    int code = program_main(&p);
    if (code >= 0) return code;
    if (*error.text) program_complain(&p, NULL);
    program_complaints_say(&p);
    return 2;
}
