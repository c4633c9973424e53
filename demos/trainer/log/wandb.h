/* SPDX-License-Identifier: MIT OR Unlicense */
/* wandb.h - writes the files of a Weights & Biases run without its library: config.yaml,
 * wandb-history.jsonl and wandb-summary.json. Nothing is sent anywhere; demos/README.md has the
 * lines of Python that upload them. */
#ifndef DEMO_WANDB_H
#define DEMO_WANDB_H

#include "report.h"
#include "trainer/run/run.h"

typedef struct {
    char folder[DEMO_PATH_LIMIT + 128];
    cJSON *summary; /* the last value of every key */
    double earlier; /* seconds of this run in earlier processes */
    double began;   /* on the monotonic clock */
} demo_wandb;

/* ---- config.yaml ---- */

/* YAML reads 1e-08 as a text, but 1.0e-08 as a number. */
static inline void demo_yaml_number(FILE *out, const char *text, size_t length) {
    size_t digits = strspn(text, "-0123456789");
    bool bare = digits < length && text[digits] == 'e';
    fprintf(out, "%.*s%s%.*s", (int)digits, text, bare ? ".0" : "", (int)(length - digits),
            text + digits);
}

/* Writes a text as a JSON string, or null. YAML reads both. */
static inline void demo_yaml_word(FILE *out, const char *word) {
    cJSON *json = word ? cJSON_CreateString(word) : cJSON_CreateNull();
    char *text = cJSON_PrintUnformatted(json);
    fputs(text, out);
    cJSON_free(text);
    cJSON_Delete(json);
}

/* Writes the value of an option; two numbers with a comma between them become a list. */
static inline void demo_yaml_value(FILE *out, const demo_binding *b) {
    char text[128];
    if (b->type == DEMO_STRING) {
        demo_yaml_word(out, *(const char *const *)b->variable);
        return;
    }
    demo_option_text(b, text, sizeof text);
    size_t first = strcspn(text, ",");
    if (text[first]) fputc('[', out);
    demo_yaml_number(out, text, first);
    if (!text[first]) return;
    fputs(", ", out);
    demo_yaml_number(out, text + first + 1, strlen(text + first + 1));
    fputc(']', out);
}

/* Writes config.yaml with the values of all options. */
static inline int demo_wandb_config(const demo_wandb *w, const demo_binding *bindings,
                                    int count, demo_error *error) {
    char path[DEMO_PATH_LIMIT + 160], *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    if (!out) demo_out_of_memory(4096);
    fprintf(out, "wandb_version: 1\n");
    for (int i = 0; i < count; i++) {
        fprintf(out, "\n%s:\n  desc: null\n  value: ", bindings[i].name);
        demo_yaml_value(out, &bindings[i]);
        fputc('\n', out);
    }
    if (fclose(out)) demo_out_of_memory((double)length);
    snprintf(path, sizeof path, "%s/config.yaml", w->folder);
    int wrong = demo_write_atomically(path, text, length, error);
    free(text);
    return wrong;
}

/* ---- rows of the history ---- */

/* Updates the summary, which has the last value of every key, as wandb's has. Frees the row. */
static inline void demo_wandb_merge(demo_wandb *w, cJSON *row) {
    while (row && row->child) {
        cJSON *item = cJSON_DetachItemViaPointer(row, row->child);
        char *key = item->string;
        item->string = NULL;
        cJSON_DeleteItemFromObjectCaseSensitive(w->summary, key);
        cJSON_AddItemToObject(w->summary, key, item);
        cJSON_free(key);
    }
    cJSON_Delete(row);
}

/* Reads a line of the history that an earlier process of this run has written. */
static inline void demo_wandb_earlier_line(void *user, const char *line) {
    demo_wandb *w = (demo_wandb *)user;
    demo_wandb_merge(w, cJSON_Parse(line));
    const cJSON *runtime = cJSON_GetObjectItemCaseSensitive(w->summary, "_runtime");
    if (cJSON_IsNumber(runtime)) w->earlier = runtime->valuedouble;
}

static inline void demo_wandb_samples(cJSON *row, const demo_report *r) {
    char tag[64];
    cJSON *all = cJSON_AddArrayToObject(row, demo_report_tag(tag, r, "samples"));
    for (int64_t i = 0; i < r->sample_count; i++) {
        cJSON *one = cJSON_CreateArray();
        cJSON_AddItemToArray(one, cJSON_CreateString(r->samples[i].prompt));
        cJSON_AddItemToArray(one, cJSON_CreateString(r->samples[i].text));
        cJSON_AddItemToArray(one, cJSON_CreateNumber(r->samples[i].reward));
        cJSON_AddItemToArray(all, one);
    }
}

/* A row of the history: the figures of a report, and the keys that wandb adds to each row. */
static inline cJSON *demo_wandb_row(const demo_wandb *w, const demo_report *r, double wall,
                                    double now) {
    cJSON *row = cJSON_CreateObject();
    char tag[64];
    cJSON_AddNumberToObject(row, "_step", (double)r->step);
    cJSON_AddNumberToObject(row, "_timestamp", wall);
    cJSON_AddNumberToObject(row, "_runtime", w->earlier + now - w->began);
    cJSON_AddNumberToObject(row, demo_report_tag(tag, r, "global_step"), (double)r->step);
    for (int i = 0; i < r->count; i++)
        if (strcmp(r->figure[i].name, "step"))
            cJSON_AddNumberToObject(row, demo_report_tag(tag, r, r->figure[i].name),
                                    r->figure[i].value);
    if (r->sample_count) demo_wandb_samples(row, r);
    return row;
}

static inline int demo_wandb_summary(const demo_wandb *w, demo_error *error) {
    char path[DEMO_PATH_LIMIT + 160];
    char *text = cJSON_PrintUnformatted(w->summary);
    snprintf(path, sizeof path, "%s/wandb-summary.json", w->folder);
    int wrong = demo_write_atomically(path, text, strlen(text), error);
    cJSON_free(text);
    return wrong;
}
#endif
