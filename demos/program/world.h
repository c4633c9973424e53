/* SPDX-License-Identifier: MIT OR Unlicense */
/* world.h - how many ranks the launcher would start, and on which hosts, from its options and
 * its hostfile. On one host the ranks are threads of the trainer. On several hosts they are
 * processes under mpirun or srun: this program prints the commands of these launchers and does
 * not run them. */
#ifndef PROGRAM_WORLD_H
#define PROGRAM_WORLD_H

#include "program.h"

/* ---- the hostfile: lines "host slots=N"; # begins a comment ---- */

static int program_host_twice(program *p, const char *path, int line, const char *name) {
    for (int64_t i = 0; i < arrlen(p->hosts); i++)
        if (!strcmp(p->hosts[i].name, name))
            return demo_fail(p->error,
                             "%.300s:%d: host %.100s occurs twice; give it one line, with "
                             "all its slots",
                             path, line, name);
    return 0;
}

/* Parses one line of the hostfile and adds its host to p->hosts. */
static int program_host_read(program *p, const char *path, int line, char *text) {
    char what[512], *save, *name, *slots, *more;
    text[strcspn(text, "#")] = 0;
    name = strtok_r(text, " \t\r", &save);
    if (!name) return 0;
    slots = strtok_r(NULL, " \t\r", &save);
    more = strtok_r(NULL, " \t\r", &save);
    if (!slots || strncmp(slots, "slots=", 6) || more)
        return demo_fail(p->error,
                         "%.300s:%d: %.100s must be followed by slots=N and nothing else; "
                         "write %.100s slots=8 for 8 ranks there",
                         path, line, name, name);
    program_host host = {program_text("%s", name), 0};
    snprintf(what, sizeof what, "%.300s:%d: slots of %.100s", path, line, name);
    if (program_host_twice(p, path, line, name) ||
        program_count(p, what, slots + 6, &host.slots))
        return -1;
    arrput(p->hosts, host);
    return 0;
}

static int program_hosts_read(program *p, const char *path) {
    const char *why = NULL;
    size_t size;
    int line = 0;
    char *bytes = demo_read_whole(path, 1 << 24, &size, &why);
    if (!bytes)
        return demo_fail(p->error, "--hostfile %.300s: %s; give a file of lines host slots=N",
                         path, why);
    for (char *at = bytes, *next; at; at = next) {
        next = strchr(at, '\n');
        if (next) *next++ = 0;
        if (program_host_read(p, path, ++line, at)) return -1;
    }
    free(bytes);
    if (arrlen(p->hosts)) return 0;
    return demo_fail(p->error,
                     "%.300s:1: the hostfile names no host; write a line host slots=N for each",
                     path);
}

/* Applies --num_nodes and --num_gpus as DeepSpeed does: the first N hosts, and M ranks on
   each. */
static int program_hosts_take(program *p) {
    const program_launch *l = &p->launch;
    if (program_hosts_read(p, l->hostfile)) return -1;
    if (l->nodes > arrlen(p->hosts))
        return demo_fail(p->error, "--num_nodes is %lld, but %.300s has %lld host%s; lower it",
                         (long long)l->nodes, l->hostfile, (long long)arrlen(p->hosts),
                         arrlen(p->hosts) == 1 ? "" : "s");
    if (l->nodes) arrsetlen(p->hosts, (size_t)l->nodes);
    p->nodes = arrlen(p->hosts);
    for (int64_t i = 0; i < p->nodes; i++) {
        if (l->per_node) p->hosts[i].slots = l->per_node;
        p->ranks += p->hosts[i].slots;
    }
    return 0;
}

/* ---- --include HOST:0,1 gives one rank for each GPU that it lists ---- */

/* The number of ids in a comma list; 0 if it is no list of distinct ids. */
static int64_t program_ids(const char *text) {
    bool seen[SEQPAR_MAX_RANKS] = {false};
    int64_t count = 0;
    for (char *end;; text = end + 1, count++) {
        long id = strtol(text, &end, 10);
        bool number = isdigit((unsigned char)*text) && id < SEQPAR_MAX_RANKS;
        if (!number || (*end && *end != ',') || seen[id]) return 0;
        seen[id] = true;
        if (!*end) return count + 1;
    }
}

/* Refuses a host other than the only known one: this machine, or that of the hostfile. */
static int program_include_host(program *p, const char *name, size_t length) {
    const char *here = p->hosts ? p->hosts[0].name : "localhost";
    if (strlen(here) == length && !strncmp(here, name, length)) return 0;
    return demo_fail(
        p->error,
        "--include %.200s names a host other than %.100s, the only known host; write several "
        "hosts into a hostfile, with a line host slots=N for each",
        p->launch.include, here);
}

/* Sets the number of ranks from --include, which is supported for one host only. */
static int program_include_take(program *p) {
    const program_launch *l = &p->launch;
    const char *colon = l->include ? strchr(l->include, ':') : NULL;
    if (!l->include) return 0;
    if (l->nodes || l->per_node)
        return demo_fail(
            p->error,
            "--include %.200s and --%s both say how many GPUs there are; leave one "
            "of them out",
            l->include, l->per_node ? "num_gpus" : "num_nodes");
    if (strchr(l->include, '@') || p->nodes > 1)
        return demo_fail(p->error,
                         "--include %.200s does not work with several hosts; write the hosts "
                         "to use into a hostfile, with a line host slots=N for each",
                         l->include);
    if (program_include_host(p, l->include, strcspn(l->include, ":"))) return -1;
    int64_t ids = colon ? program_ids(colon + 1) : 0;
    if (!ids && !(p->hosts && !colon))
        return demo_fail(
            p->error,
            "--include %.200s names no GPUs; give localhost:0,1 for two ranks, each "
            "number once",
            l->include);
    if (p->hosts && ids > p->hosts[0].slots)
        return demo_fail(p->error,
                         "--include %.200s names %lld GPUs, but %.300s has %lld slots; name "
                         "fewer",
                         l->include, (long long)ids, l->hostfile, (long long)p->ranks);
    if (ids) p->ranks = ids;
    return 0;
}

/* ---- the number of ranks ---- */

/* Sets the numbers of hosts and ranks from the launcher's options; 0 ranks: they do not say
   it. */
static int program_world_of_launcher(program *p) {
    const program_launch *l = &p->launch;
    if (l->hostfile) return program_hosts_take(p) || program_include_take(p) ? -1 : 0;
    p->nodes = l->nodes ? l->nodes : 1;
    if (l->include) return program_include_take(p);
    if (l->launcher && !strcmp(l->launcher, "deepspeed") && p->nodes > 1)
        return demo_fail(
            p->error,
            "deepspeed --num_nodes %lld does not say which hosts; give --hostfile FILE, with "
            "a line host slots=N for each",
            (long long)p->nodes);
    if (l->processes % p->nodes)
        return demo_fail(p->error,
                         "--num_processes %lld is not a multiple of --num_machines %lld; "
                         "change one of them",
                         (long long)l->processes, (long long)p->nodes);
    p->ranks = l->processes              ? l->processes
               : l->per_node || l->nodes ? p->nodes * (l->per_node ? l->per_node : 1)
                                         : 0;
    return 0;
}

/* Do options give PPO's roles their own groups of ranks? Then the trainer computes the number
   of ranks. */
static bool program_has_roles(const program *p) {
    for (int i = 0; i < arrlen(p->options); i++) {
        const demo_known *known = program_known(p->options[i]);
        if (known && (strstr(known->name, "_num_gpus_per_node") ||
                      !strcmp(known->name, "vllm_num_engines")))
            return true;
    }
    return false;
}

static void program_world_say(const program *p) {
    const char *ring = program_given(p, "ring_attn_size");
    const char *word = ring ? p->options[program_find(p, "ring_attn_size")] + 2 : "";
    /* the options are from a yaml file of LLaMA-Factory */
    bool equals = program_origin_of(p, "finetuning_type") != NULL;
    if (!p->launch.launcher || p->ranks || program_has_roles(p) ||
        program_given(p, "data_parallel_size") || program_given(p, "world_size"))
        return;
    fprintf(stderr,
            "notice: the options of %s do not say how many ranks to start, so it starts "
            "%s%s%.*s; add %sworld_size%sN for more\n",
            p->launch.launcher, ring ? ring : "1", ring ? ", the " : "",
            (int)strcspn(word, "="), word, equals ? "" : "--", equals ? "=" : " ");
}

/* Passes the launcher's number of ranks to the trainer. 0, or -1 with a message. */
static int program_world(program *p) {
    const char *typed = program_given(p, "world_size");
    char ranks[24];
    if (program_world_of_launcher(p)) return -1;
    program_world_say(p);
    snprintf(ranks, sizeof ranks, "%lld", (long long)p->ranks);
    if (p->ranks && typed && strcmp(typed, ranks))
        return demo_fail(p->error,
                         "--world_size is %.60s, but the options of %s say %s ranks; leave "
                         "one of the two out",
                         typed, p->launch.launcher, ranks);
    if (p->ranks && !typed) program_add(p, "world_size", ranks);
    return 0;
}

/* ---- several hosts ---- */

/* Ranks per host; 0 if it is not the same on all hosts. */
static int64_t program_slots(const program *p) {
    if (!p->hosts) return p->ranks / p->nodes;
    for (int64_t i = 1; i < p->nodes; i++)
        if (p->hosts[i].slots != p->hosts[0].slots) return 0;
    return p->hosts[0].slots;
}

/* Prints the commands of mpirun and srun that start the trainer on these hosts. */
static void program_hosts_say(const program *p, FILE *out) {
    char *line = demo_shell_line("", p->options, arrlen(p->options));
    int64_t slots = program_slots(p);
    fprintf(out, "mpirun -n %lld --hostfile %s", (long long)p->ranks,
            p->launch.hostfile ? p->launch.hostfile : "HOSTS");
    if (p->launch.per_node || !p->hosts)
        fprintf(out, " --map-by ppr:%lld:node", (long long)slots);
    fprintf(out, " %s%s\n", program_binary(p, "mpi_", p->tool), line);
    if (slots)
        fprintf(out, "srun -N %lld -n %lld --ntasks-per-node=%lld", (long long)p->nodes,
                (long long)p->ranks, (long long)slots);
    for (int64_t i = 0; slots && i < arrlen(p->hosts); i++)
        fprintf(out, "%s%s", i ? "," : " -w ", p->hosts[i].name);
    if (slots)
        fprintf(out, " --mpi=pmix %s%s\n", program_binary(p, "mpi_", p->tool), line);
    else
        fprintf(out, "srun starts the same number of ranks on every host, but this hostfile "
                     "has different numbers; use mpirun\n");
    free(line);
}

#endif
