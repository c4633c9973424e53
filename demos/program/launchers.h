/* SPDX-License-Identifier: MIT OR Unlicense */
/* launchers.h - the launchers of other programs and their options, which precede the trainer's
 * name in a command. Options that give the number of ranks are followed. Options that have no
 * effect here are listed in one notice. All others are refused. */
#ifndef PROGRAM_LAUNCHERS_H
#define PROGRAM_LAUNCHERS_H

#include "program.h"

enum {
    PROGRAM_NOTHING,
    PROGRAM_MODULE, /* the next word is a module, not a script */
    PROGRAM_HOSTFILE,
    PROGRAM_NODES,
    PROGRAM_PER_NODE,
    PROGRAM_INCLUDE,
    PROGRAM_PROCESSES,
    PROGRAM_PRECISION,
    PROGRAM_REFUSED
};

typedef struct {
    const char *launcher, *name;
    bool valued;
    int means;
    const char *fix; /* if it is refused: what to do instead */
} program_launcher_option;

#define PROGRAM_GPUS_WANTED \
    "give --num_gpus N for the number of GPUs to use on each host; to exclude a host, remove " \
    "it from the hostfile"
// clang-format off
static const program_launcher_option program_launcher_options[] = {
    {"deepspeed", "--module", false, PROGRAM_MODULE},
    {"deepspeed", "--hostfile", true, PROGRAM_HOSTFILE},
    {"deepspeed", "-H", true, PROGRAM_HOSTFILE},
    {"deepspeed", "--num_nodes", true, PROGRAM_NODES},
    {"deepspeed", "--num_gpus", true, PROGRAM_PER_NODE},
    {"deepspeed", "--include", true, PROGRAM_INCLUDE},
    {"deepspeed", "-i", true, PROGRAM_INCLUDE},
    {"deepspeed", "--exclude", true, PROGRAM_REFUSED, PROGRAM_GPUS_WANTED},
    {"deepspeed", "-e", true, PROGRAM_REFUSED, PROGRAM_GPUS_WANTED},
    {"deepspeed", "--autotuning", true, PROGRAM_REFUSED,
        "give the trainer --dry_run, which prints the memory that training needs"},
    {"deepspeed", "--master_port", true, PROGRAM_NOTHING},
    {"deepspeed", "--master_addr", true, PROGRAM_NOTHING},
    {"deepspeed", "--node_rank", true, PROGRAM_NOTHING},
    {"deepspeed", "--launcher", true, PROGRAM_NOTHING},
    {"deepspeed", "--launcher_args", true, PROGRAM_NOTHING},
    {"deepspeed", "--no_python", false, PROGRAM_NOTHING},
    {"deepspeed", "--no_local_rank", false, PROGRAM_NOTHING},
    {"deepspeed", "--no_ssh", false, PROGRAM_NOTHING},
    {"deepspeed", "--no_ssh_check", false, PROGRAM_NOTHING},
    {"deepspeed", "--ssh_port", true, PROGRAM_NOTHING},
    {"deepspeed", "--force_multi", false, PROGRAM_NOTHING},
    {"deepspeed", "--save_pid", false, PROGRAM_NOTHING},
    {"deepspeed", "--enable_each_rank_log", true, PROGRAM_NOTHING},
    {"deepspeed", "--bind_cores_to_rank", false, PROGRAM_NOTHING},
    {"deepspeed", "--bind_core_list", true, PROGRAM_NOTHING},
    {"torchrun", "--module", false, PROGRAM_MODULE},
    {"torchrun", "-m", false, PROGRAM_MODULE},
    {"torchrun", "--nnodes", true, PROGRAM_NODES},
    {"torchrun", "--nproc_per_node", true, PROGRAM_PER_NODE},
    {"torchrun", "--standalone", false, PROGRAM_NOTHING},
    {"torchrun", "--node_rank", true, PROGRAM_NOTHING},
    {"torchrun", "--master_addr", true, PROGRAM_NOTHING},
    {"torchrun", "--master_port", true, PROGRAM_NOTHING},
    {"torchrun", "--local_addr", true, PROGRAM_NOTHING},
    {"torchrun", "--rdzv_backend", true, PROGRAM_NOTHING},
    {"torchrun", "--rdzv_endpoint", true, PROGRAM_NOTHING},
    {"torchrun", "--rdzv_id", true, PROGRAM_NOTHING},
    {"torchrun", "--rdzv_conf", true, PROGRAM_NOTHING},
    {"torchrun", "--max_restarts", true, PROGRAM_NOTHING},
    {"torchrun", "--monitor_interval", true, PROGRAM_NOTHING},
    {"torchrun", "--start_method", true, PROGRAM_NOTHING},
    {"torchrun", "--role", true, PROGRAM_NOTHING},
    {"torchrun", "--log_dir", true, PROGRAM_NOTHING},
    {"torchrun", "--redirects", true, PROGRAM_NOTHING},
    {"torchrun", "-r", true, PROGRAM_NOTHING},
    {"torchrun", "--tee", true, PROGRAM_NOTHING},
    {"torchrun", "-t", true, PROGRAM_NOTHING},
    {"torchrun", "--use_env", false, PROGRAM_NOTHING},
    {"accelerate launch", "--module", false, PROGRAM_MODULE},
    {"accelerate launch", "-m", false, PROGRAM_MODULE},
    {"accelerate launch", "--num_machines", true, PROGRAM_NODES},
    {"accelerate launch", "--num_processes", true, PROGRAM_PROCESSES},
    {"accelerate launch", "--config_file", true, PROGRAM_REFUSED,
     "that file is not read; give --num_processes in its place"},
    {"accelerate launch", "--deepspeed_config_file", true, PROGRAM_REFUSED,
     "that file is not read; give the trainer --zero_stage, --adam_offload and the like"},
    {"accelerate launch", "--gradient_accumulation_steps", true, PROGRAM_REFUSED,
     "give it to the trainer"},
    {"accelerate launch", "--mixed_precision", true, PROGRAM_PRECISION},
    {"accelerate launch", "--multi_gpu", false, PROGRAM_NOTHING},
    {"accelerate launch", "--cpu", false, PROGRAM_NOTHING},
    {"accelerate launch", "--use_deepspeed", false, PROGRAM_NOTHING},
    {"accelerate launch", "--use_fsdp", false, PROGRAM_NOTHING},
    {"accelerate launch", "--machine_rank", true, PROGRAM_NOTHING},
    {"accelerate launch", "--main_process_ip", true, PROGRAM_NOTHING},
    {"accelerate launch", "--main_process_port", true, PROGRAM_NOTHING},
    {"accelerate launch", "--num_cpu_threads_per_process", true, PROGRAM_NOTHING},
    {"accelerate launch", "--gpu_ids", true, PROGRAM_NOTHING},
    {"accelerate launch", "--same_network", false, PROGRAM_NOTHING},
    {"accelerate launch", "--dynamo_backend", true, PROGRAM_NOTHING},
    {"accelerate launch", "--rdzv_backend", true, PROGRAM_NOTHING},
    {"ray job submit", "--address", true, PROGRAM_NOTHING},
    {"ray job submit", "--runtime-env-json", true, PROGRAM_NOTHING},
    {"ray job submit", "--runtime-env", true, PROGRAM_NOTHING},
    {"ray job submit", "--working-dir", true, PROGRAM_NOTHING},
    {"ray job submit", "--submission-id", true, PROGRAM_NOTHING},
    {"ray job submit", "--job-id", true, PROGRAM_NOTHING},
    {"ray job submit", "--no-wait", false, PROGRAM_NOTHING},
    {"ray job submit", "--log-style", true, PROGRAM_NOTHING},
    {"ray job submit", "--log-color", true, PROGRAM_NOTHING},
    {"ray job submit", "--headers", true, PROGRAM_NOTHING},
    {"ray job submit", "--verify", true, PROGRAM_NOTHING},
    {"ray job submit", "--metadata-json", true, PROGRAM_NOTHING},
    {"ray job submit", "--entrypoint-num-cpus", true, PROGRAM_NOTHING},
    {"ray job submit", "--entrypoint-num-gpus", true, PROGRAM_NOTHING},
    {"ray job submit", "--entrypoint-resources", true, PROGRAM_NOTHING},
    {"python", "-m", false, PROGRAM_MODULE},
    {"python", "-u", false, PROGRAM_NOTHING},
    {"python", "-O", false, PROGRAM_NOTHING},
    {"python", "-B", false, PROGRAM_NOTHING}};
// clang-format on
enum {
    PROGRAM_LAUNCHER_OPTIONS = (int)(sizeof program_launcher_options /
                                     sizeof *program_launcher_options)
};

/* The first words of a launcher's command, and its name in the table above. */
typedef struct {
    const char *words[3], *launcher;
} program_launcher;
static const program_launcher program_launchers[] = {
    {{"deepspeed"}, "deepspeed"},
    {{"torchrun"}, "torchrun"},
    {{"torch.distributed.run"}, "torchrun"},
    {{"torch.distributed.launch"}, "torchrun"},
    {{"accelerate", "launch"}, "accelerate launch"},
    {{"ray", "job", "submit"}, "ray job submit"},
    {{"python"}, "python"},
    {{"python3"}, "python"}};
enum { PROGRAM_LAUNCHERS = (int)(sizeof program_launchers / sizeof *program_launchers) };

/* The number of words with which this launcher's command begins; 0 if the next words are not
   this launcher. python3.11 counts as python3. */
static int program_launcher_words(const program *p, const program_launcher *l) {
    int n = 0;
    for (; n < 3 && l->words[n]; n++) {
        if (p->at + n >= p->count) return 0;
        const char *word = n ? p->words[p->at + n] : program_base(p->words[p->at]);
        size_t length = strlen(l->words[n]);
        bool version = !strcmp(l->launcher, "python") && word[length] == '.' &&
                       isdigit((unsigned char)word[length + 1]);
        if (strncmp(word, l->words[n], length) || (word[length] && !version)) return 0;
    }
    return n;
}

static const program_launcher_option *program_launcher_option_of(const char *launcher,
                                                                 const char *word) {
    char name[DEMO_NAME_LIMIT];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(word, "="), word);
    for (int i = 0; i < PROGRAM_LAUNCHER_OPTIONS; i++)
        if (!strcmp(program_launcher_options[i].launcher, launcher) &&
            demo_same_name(program_launcher_options[i].name, name))
            return &program_launcher_options[i];
    return NULL;
}

/* The option's value; NULL with a message if it is missing. */
static const char *program_launcher_value(program *p, const program_launcher_option *o) {
    const char *word = p->words[p->at++], *equals = strchr(word, '=');
    if (equals) return equals + 1;
    if (p->at < p->count) return p->words[p->at++];
    demo_fail(p->error, "%s %s needs a value, but nothing follows", o->launcher, o->name);
    return NULL;
}

/* The launcher option for mixed precision, for trainers that are not given the type
   otherwise. */
static int program_launcher_precision(program *p, const char *what, const char *value) {
    p->launch.bf16 = !strcmp(value, "bf16");
    if (p->launch.bf16 || !strcmp(value, "no")) return 0;
    return demo_fail(p->error, "%s is %.60s; give no, or bf16 (weights are fp32 or bf16 here)",
                     what, value);
}

/* Applies one option. --nnodes 2:4 and --nproc_per_node gpu are refused: only the cluster or
   the machine knows the number they stand for. */
static int program_launcher_take(program *p, const program_launcher_option *o,
                                 const char *value) {
    program_launch *l = &p->launch;
    char what[DEMO_NAME_LIMIT];
    int64_t *count = o->means == PROGRAM_NODES      ? &l->nodes
                     : o->means == PROGRAM_PER_NODE ? &l->per_node
                                                    : &l->processes;
    snprintf(what, sizeof what, "%s %s", o->launcher, o->name);
    if (o->means == PROGRAM_REFUSED)
        return demo_fail(p->error, "%s %.60s is not supported: %s", what, value, o->fix);
    if (o->means == PROGRAM_PRECISION) return program_launcher_precision(p, what, value);
    if (o->means == PROGRAM_HOSTFILE) return l->hostfile = value, 0;
    if (o->means == PROGRAM_INCLUDE) return l->include = value, 0;
    return o->means == PROGRAM_NOTHING || o->means == PROGRAM_MODULE
               ? 0
               : program_count(p, what, value, count);
}

/* Reads all options of the launcher. module: set if the next word is a module. idle: the
   options that have no effect here; stb_ds array. */
static int program_launcher_walk(program *p, const char *launcher, bool *module,
                                 const char ***idle) {
    while (p->at < p->count && p->words[p->at][0] == '-' && p->words[p->at][1]) {
        if (!strcmp(p->words[p->at], "--")) return p->at++, 0;
        const program_launcher_option *o = program_launcher_option_of(launcher,
                                                                      p->words[p->at]);
        if (!o)
            return demo_fail(p->error, "%s %.200s is not known here; leave it out", launcher,
                             p->words[p->at]);
        if (!o->valued && strchr(p->words[p->at], '='))
            return demo_fail(p->error, "%s %s takes no value, but %.200s gives one", launcher,
                             o->name, p->words[p->at]);
        const char *value = o->valued ? program_launcher_value(p, o) : p->words[p->at++];
        if (!value || program_launcher_take(p, o, value)) return -1;
        if (o->means == PROGRAM_MODULE) *module = true;
        if (o->means == PROGRAM_NOTHING) arrput(*idle, o->name);
    }
    return 0;
}

/* Reads one launcher with its options. Returns 1, 0 if the next word is no launcher, or -1 with
   a message. */
static int program_launcher_read(program *p, bool *module, const char ***idle) {
    for (int i = 0; i < PROGRAM_LAUNCHERS; i++) {
        int words = program_launcher_words(p, &program_launchers[i]);
        bool python = !strcmp(program_launchers[i].launcher, "python");
        if (!words) continue;
        p->at += words;
        *module = false;
        if (!python || !p->launch.launcher) p->launch.launcher = program_launchers[i].launcher;
        return program_launcher_walk(p, program_launchers[i].launcher, module, idle) ? -1 : 1;
    }
    return 0;
}

/* Sets an environment variable if the next word is NAME=VALUE, as a shell does. */
static bool program_environment(program *p) {
    size_t name = strspn(p->words[p->at], "ABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789");
    if (!name || p->words[p->at][name] != '=') return false;
    putenv(p->words[p->at++]);
    return true;
}

static void program_idle_say(const char **idle) {
    for (int64_t i = 0; i < arrlen(idle); i++)
        fprintf(stderr, "%s%s", i ? ", " : "launcher options without effect here: ", idle[i]);
    if (arrlen(idle)) fputc('\n', stderr);
}

/* Reads all launchers before the trainer's name, such as accelerate launch. */
static int program_launchers_read(program *p, bool *module) {
    const char **idle = NULL;
    int read = 1;
    while (read > 0 && p->at < p->count)
        read = program_environment(p) ? 1 : program_launcher_read(p, module, &idle);
    program_idle_say(idle);
    arrfree(idle);
    return read < 0 ? -1 : 0;
}

#endif
