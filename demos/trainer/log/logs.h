/* SPDX-License-Identifier: MIT OR Unlicense */
/* logs.h - where reports go: --metrics_path (JSON lines), --use_tensorboard (event files) and
 * --wandb_offline (the files of a run of Weights & Biases). Rank 0 writes them, and flushes
 * them after each report. A run that resumes from a checkpoint shows no step twice: the JSON
 * lines are truncated to the checkpoint's step, and TensorBoard is told to drop later steps.
 *
 * In --use_tensorboard and --wandb_offline every run has a subfolder named after the run, so
 * that the folder holds several runs and a resumed run finds its own. */
#ifndef DEMO_LOGS_H
#define DEMO_LOGS_H

#include <sys/file.h>
#include "progress.h"
#include "tensorboard.h"
#include "wandb.h"

enum { DEMO_METRICS, DEMO_EVENTS, DEMO_HISTORY, DEMO_SINKS };
static const char *const demo_sink_option[] = {"metrics_path", "use_tensorboard",
                                               "wandb_offline"};

typedef struct {
    const char *given[DEMO_SINKS]; /* the options; NULL: no such log */
    char name[64];                 /* of the run's folder */
    bool goes_on;
    int64_t from; /* step of the checkpoint; 0: none */
    bool again;   /* the evaluation at step `from` is repeated */
    const demo_binding *bindings;
    int binding_count;
} demo_logs_desc;

typedef struct {
    FILE *file[DEMO_SINKS];
    char path[DEMO_SINKS][DEMO_PATH_LIMIT + 512];
    demo_wandb wandb;
    demo_error why; /* what failed */
} demo_logs;

static double demo_wall_time(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- truncating logs to a checkpoint ---- */

typedef void (*demo_line_fn)(void *user, const char *line);

/* How the lines of a log are parsed. step: the text before the number of the step. evaluates: a
   text that only lines of an evaluation have; NULL: no evaluation is repeated. */
typedef struct {
    const char *step, *evaluates;
} demo_line_keys;

/* Returns the offset after the last line of steps up to `step`; `kept` is called for each line
   before it. A killed run may have logged later steps, and an incomplete line. */
static int64_t demo_lines_end(FILE *file, const demo_line_keys *keys, int64_t step,
                              demo_line_fn kept, void *user) {
    char *line = NULL;
    size_t room = 0;
    int64_t end = 0, trained = 0;
    for (ssize_t length; (length = getline(&line, &room, file)) > 0 && line[length - 1] == '\n';
         end += length) {
        const char *at = strstr(line, keys->step);
        int64_t of = at ? strtoll(at + strlen(keys->step), NULL, 10) : trained;
        bool again = keys->evaluates && trained == step && strstr(line, keys->evaluates);
        if (of > step || again) break;
        trained = of;
        if (kept) kept(user, line);
    }
    free(line);
    return end;
}

/* Truncates a log after `step`, since later steps are repeated and logged again. */
static int demo_lines_cut(demo_logs *l, int sink, const demo_line_keys *keys, int64_t step,
                          demo_line_fn kept, void *user) {
    const char *path = l->path[sink];
    struct stat kind;
    if (stat(path, &kind) || !S_ISREG(kind.st_mode)) return 0;
    FILE *file = fopen(path, "rb");
    bool cut = file && !truncate(path, (off_t)demo_lines_end(file, keys, step, kept, user));
    if (!cut)
        demo_fail(&l->why, "%.300s cannot be cut back to step %lld: %s; give another --%s",
                  path, (long long)step, strerror(errno), demo_sink_option[sink]);
    if (file) fclose(file);
    return cut ? 0 : -1;
}

/* ---- opening ---- */

static int demo_sink_open(demo_logs *l, int sink, bool append) {
    l->file[sink] = demo_open_output(l->path[sink], append);
    if (l->file[sink]) return 0;
    return demo_fail(&l->why, "cannot open %s: %s; give another --%s", l->path[sink],
                     errno == ENXIO ? "it is a pipe that nobody reads" : strerror(errno),
                     demo_sink_option[sink]);
}

/* Makes DIR/NAME, the folder of this run's files; folder has DEMO_PATH_LIMIT + 128 bytes. */
static int demo_sink_folder(demo_logs *l, const demo_logs_desc *d, int sink, char *folder) {
    seqpar_error why = {0};
    snprintf(folder, DEMO_PATH_LIMIT + 128, "%s/%s", d->given[sink], d->name);
    if (!demo_make_folder(folder, &why)) return 0;
    return demo_fail(&l->why, "%s (--%s)", why.text, demo_sink_option[sink]);
}

/* Opens --metrics_path, locks it against other runs, and truncates it: to the checkpoint, or to
   nothing in a new run. */
static int demo_metrics_open(demo_logs *l, const demo_logs_desc *d) {
    struct stat kind;
    snprintf(l->path[DEMO_METRICS], sizeof *l->path, "%s", d->given[DEMO_METRICS]);
    if (demo_sink_open(l, DEMO_METRICS, true)) return -1;
    int file = fileno(l->file[DEMO_METRICS]);
    if (fstat(file, &kind) || !S_ISREG(kind.st_mode)) return 0;
    if (flock(file, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
        return demo_fail(
            &l->why,
            "--metrics_path %.300s is being written by another run; wait for it, or "
            "give another",
            l->path[DEMO_METRICS]);
    const demo_line_keys keys = {"\"step\": ", d->again ? "\"eval_" : NULL};
    if (d->goes_on) return demo_lines_cut(l, DEMO_METRICS, &keys, d->from, NULL, NULL);
    if (!ftruncate(file, 0)) return 0;
    return demo_fail(&l->why, "cannot write %.300s: %s; give another --%s",
                     l->path[DEMO_METRICS], strerror(errno), demo_sink_option[DEMO_METRICS]);
}

/* Finds the newest event file. user: int64_t, becomes the time in its name, in seconds. */
static bool demo_visit_events(const char *folder, const char *name, void *user) {
    int64_t *newest = (int64_t *)user;
    (void)folder;
    if (strncmp(name, "events.out.tfevents.", 20)) return true;
    int64_t second = strtoll(name + 20, NULL, 10);
    if (second > *newest) *newest = second;
    return true;
}

/* Every process writes a new file. Readers take files in the order of their names, so this
   name must come after the existing ones, even if the clock has gone back. A repeated
   evaluation is a second point at the same step. */
static int demo_events_open(demo_logs *l, const demo_logs_desc *d) {
    char folder[DEMO_PATH_LIMIT + 128], host[256] = "";
    int64_t newest = 0, second = (int64_t)demo_wall_time();
    if (demo_sink_folder(l, d, DEMO_EVENTS, folder)) return -1;
    demo_each_name(folder, demo_visit_events, &newest);
    if (second <= newest) second = newest + 1;
    gethostname(host, sizeof host - 1);
    snprintf(l->path[DEMO_EVENTS], sizeof *l->path,
             "%s/events.out.tfevents.%010lld.%.100s.%ld.0", folder, (long long)second, host,
             (long)getpid());
    if (demo_sink_open(l, DEMO_EVENTS, false)) return -1;
    if (demo_events_begin(l->file[DEMO_EVENTS], demo_wall_time(), d->goes_on ? d->from + 1 : 0))
        return 0;
    return demo_fail(&l->why, "cannot write %.300s: %s; make room or give another --%s",
                     l->path[DEMO_EVENTS], strerror(errno), demo_sink_option[DEMO_EVENTS]);
}

/* Removes the temporary files of a killed process. */
static bool demo_visit_half_log(const char *folder, const char *name, void *user) {
    char path[DEMO_PATH_LIMIT + 512];
    size_t length = strlen(name);
    (void)user;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    if ((!strncmp(name, "wandb-summary.json.", 19) || !strncmp(name, "config.yaml.", 12)) &&
        length > 4 && !strcmp(name + length - 4, ".tmp"))
        unlink(path);
    return true;
}

static int demo_history_open(demo_logs *l, const demo_logs_desc *d) {
    const demo_line_keys keys = {"\"_step\":", d->again ? "\"eval/" : NULL};
    demo_wandb *w = &l->wandb;
    w->began = demo_seconds();
    w->summary = cJSON_CreateObject();
    if (demo_sink_folder(l, d, DEMO_HISTORY, w->folder)) return -1;
    demo_each_name(w->folder, demo_visit_half_log, NULL);
    snprintf(l->path[DEMO_HISTORY], sizeof *l->path, "%s/wandb-history.jsonl", w->folder);
    if (d->goes_on &&
        demo_lines_cut(l, DEMO_HISTORY, &keys, d->from, demo_wandb_earlier_line, w))
        return -1;
    if (demo_wandb_config(w, d->bindings, d->binding_count, &l->why)) return -1;
    return demo_sink_open(l, DEMO_HISTORY, d->goes_on);
}

/* 0, or -1 with a sentence in why. Call demo_logs_close in either case. */
static int demo_logs_open(demo_logs *l, const demo_logs_desc *d) {
    static int (*const open[])(demo_logs *, const demo_logs_desc *) = {
        demo_metrics_open, demo_events_open, demo_history_open};
    for (int i = 0; i < DEMO_SINKS; i++)
        if (d->given[i] && open[i](l, d)) return -1;
    return 0;
}

/* ---- writing ---- */

static void demo_text_json(FILE *out, const char *text) {
    cJSON *string = cJSON_CreateString(text);
    char *json = cJSON_PrintUnformatted(string);
    fputs(json, out);
    cJSON_free(json);
    cJSON_Delete(string);
}

static void demo_metrics_samples(FILE *out, const demo_report *r) {
    char number[32];
    fprintf(out, ", \"samples\": [");
    for (int64_t i = 0; i < r->sample_count; i++) {
        fprintf(out, "%s{\"prompt\": ", i ? ", " : "");
        demo_text_json(out, r->samples[i].prompt);
        fprintf(out, ", \"text\": ");
        demo_text_json(out, r->samples[i].text);
        fprintf(out, ", \"reward\": %s}", demo_json_number(number, r->samples[i].reward));
    }
    fputc(']', out);
}

static bool demo_metrics_write(demo_logs *l, const demo_report *r) {
    FILE *out = l->file[DEMO_METRICS];
    char text[32];
    for (int i = 0; i < r->count; i++) {
        const demo_figure *f = &r->figure[i];
        bool eval = demo_report_evaluates(r) && f->form != DEMO_PLACE;
        fprintf(out, "%s\"%s%s\": %s", i ? ", " : "{", eval ? "eval_" : "", f->name,
                demo_figure_text(text, f));
    }
    if (r->sample_count) demo_metrics_samples(out, r);
    fprintf(out, "}\n");
    return !fflush(out) && !ferror(out);
}

static bool demo_events_add(demo_logs *l, const demo_report *r) {
    return demo_events_write(l->file[DEMO_EVENTS], demo_wall_time(), r);
}

static bool demo_history_write(demo_logs *l, const demo_report *r) {
    FILE *out = l->file[DEMO_HISTORY];
    cJSON *row = demo_wandb_row(&l->wandb, r, demo_wall_time(), demo_seconds());
    char *line = cJSON_PrintUnformatted(row);
    fprintf(out, "%s\n", line);
    cJSON_free(line);
    demo_wandb_merge(&l->wandb, row);
    return !fflush(out) && !ferror(out) && !demo_wandb_summary(&l->wandb, &l->why);
}

/* Writes a report to all logs. A log that fails is closed, so that nothing follows an
   incomplete report. 0, or -1 with a sentence in why. */
static int demo_logs_write(demo_logs *l, const demo_report *r) {
    static bool (*const write[])(demo_logs *, const demo_report *) = {
        demo_metrics_write, demo_events_add, demo_history_write};
    int wrong = 0;
    for (int i = 0; i < DEMO_SINKS; i++) {
        if (!l->file[i] || write[i](l, r)) continue;
        wrong = -1;
        if (!*l->why.text)
            demo_fail(&l->why, "cannot write %.300s: %s; make room or give another --%s",
                      l->path[i], strerror(errno), demo_sink_option[i]);
        fclose(l->file[i]);
        l->file[i] = NULL;
    }
    return wrong;
}

static int demo_logs_close(demo_logs *l) {
    int wrong = 0;
    for (int i = 0; i < DEMO_SINKS; i++) {
        FILE *file = l->file[i];
        l->file[i] = NULL;
        if (!file || !fclose(file)) continue;
        wrong = -1;
        demo_fail(&l->why, "cannot write %.300s: %s; make room or give another --%s",
                  l->path[i], strerror(errno), demo_sink_option[i]);
    }
    cJSON_Delete(l->wandb.summary);
    l->wandb.summary = NULL;
    return wrong;
}
#endif
