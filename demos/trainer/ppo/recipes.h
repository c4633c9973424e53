/* SPDX-License-Identifier: MIT OR Unlicense */
/* recipes.h - turns texts and their rewards into training data, as OpenRLHF's processors do.
 * Texts with the same input form a group. All recipes except "none" leave out empty texts,
 * which cannot be trained on.
 *
 *   none       every text: input, output, reward if there is one, stopped
 *   rs         rejection sampling: for each input the text with the highest reward, the first
 *              of equals: input, output, reward
 *   iter_dpo   iterative DPO: for each input the texts with the highest and the lowest reward,
 *              the first of equals: prompt, chosen, chosen_reward, rejected, rejected_reward
 *   csft       conditional SFT: every text, with its reward in its input: input, output,
 *              reward */
#ifndef DEMO_RECIPES_H
#define DEMO_RECIPES_H

#include "generated.h"

enum { DEMO_RECIPE_NONE, DEMO_RECIPE_RS, DEMO_RECIPE_DPO, DEMO_RECIPE_CSFT };

typedef struct {
    int kind;
    const char *form; /* csft: the template, with {input} and {reward} */
    /* csft: subtract the mean of the rewards, divide by their standard deviation (n - 1) */
    bool normalize;
} demo_recipe;

typedef struct {
    int64_t texts, inputs, lines; /* texts read; distinct inputs; lines written */
    int64_t cut;                  /* texts cut off at the length limit */
    /* pairs with equal rewards, in which neither text is preferred */
    int64_t even;
    int64_t empty;          /* empty texts, left out */
    double mean, deviation; /* of rewards; 0 where there are none */
} demo_recipe_counts;

/* One text of the file. */
typedef struct {
    off_t at; /* offset of its line */
    double reward;
} demo_scored;

typedef struct {
    char *key;             /* input */
    demo_scored high, low; /* iter_dpo's chosen and rejected */
} demo_input_best;

typedef struct {
    const demo_generated *g;
    const demo_recipe *recipe;
    FILE *out;
    char *line; /* the last line read, and its capacity (getline) */
    size_t room;
    demo_input_best *inputs; /* in the order of their first texts; stb_ds map */
    demo_recipe_counts counts;
    double squares; /* sum of squared differences of rewards from their mean */
    demo_error *error;
} demo_recipe_work;

/* ---- reading ---- */

static int demo_recipe_torn(const demo_recipe_work *w, demo_error *error) {
    return demo_fail(error,
                     "%.300s: line %lld was not written by generate; remove the file to "
                     "start again",
                     w->g->part, (long long)w->counts.texts + 1);
}

/* Reads the line at offset `at`. The caller calls cJSON_Delete. NULL with a message. */
static cJSON *demo_recipe_read(demo_recipe_work *w, off_t at) {
    bool there = !fseeko(w->g->file, at, SEEK_SET) &&
                 getline(&w->line, &w->room, w->g->file) > 0;
    cJSON *json = there ? cJSON_Parse(w->line) : NULL;
    bool whole = cJSON_IsString(cJSON_GetObjectItem(json, "input")) &&
                 cJSON_IsString(cJSON_GetObjectItem(json, "output"));
    if (whole) return json;
    cJSON_Delete(json);
    demo_recipe_torn(w, w->error);
    return NULL;
}

static const char *demo_recipe_text(const cJSON *json, const char *key) {
    return cJSON_GetObjectItem(json, key)->valuestring;
}

static bool demo_recipe_leaves(const demo_recipe_work *w, const cJSON *json) {
    return w->recipe->kind && !*demo_recipe_text(json, "output");
}

static double demo_recipe_reward(const cJSON *json) {
    const cJSON *reward = cJSON_GetObjectItem(json, "reward");
    return reward ? reward->valuedouble : 0;
}

/* Updates the best and worst text of an input. The first text is both. A later one replaces
   chosen if its reward is higher, and rejected if its reward is lower. */
static void demo_recipe_rank(demo_recipe_work *w, const char *input, demo_scored text) {
    ptrdiff_t i = shgeti(w->inputs, input);
    if (i < 0) {
        demo_input_best first = {NULL, text, text};
        first.key = (char *)input;
        shputs(w->inputs, first);
    } else if (text.reward > w->inputs[i].high.reward)
        w->inputs[i].high = text;
    else if (text.reward < w->inputs[i].low.reward)
        w->inputs[i].low = text;
}

/* Counts a text and updates mean and squares by Welford's method, in the order of the file. */
static void demo_recipe_count(demo_recipe_work *w, const cJSON *json) {
    demo_recipe_counts *n = &w->counts;
    double reward = demo_recipe_reward(json), delta = reward - n->mean;
    n->texts++;
    n->cut += cJSON_IsFalse(cJSON_GetObjectItem(json, "stopped"));
    n->mean += delta / (double)n->texts;
    w->squares += delta * (reward - n->mean);
}

/* Reads all texts once: counts them and finds the best and worst text of each input. */
static int demo_recipe_look(demo_recipe_work *w) {
    off_t at = w->g->begin;
    while (w->counts.texts < w->g->texts) {
        cJSON *json = demo_recipe_read(w, at);
        if (!json) return -1;
        bool left = demo_recipe_leaves(w, json);
        demo_recipe_count(w, json);
        w->counts.empty += left;
        if (!left)
            demo_recipe_rank(w, demo_recipe_text(json, "input"),
                             (demo_scored){at, demo_recipe_reward(json)});
        cJSON_Delete(json);
        at = ftello(w->g->file);
    }
    w->counts.inputs = shlen(w->inputs);
    if (w->counts.texts > 1)
        w->counts.deviation = sqrt(w->squares / (double)(w->counts.texts - 1));
    return 0;
}

/* ---- writing ---- */

static void demo_recipe_put(demo_recipe_work *w, cJSON *json) {
    char *text = cJSON_PrintUnformatted(json);
    fprintf(w->out, "%s\n", text);
    free(text);
    cJSON_Delete(json);
    w->counts.lines++;
}

static cJSON *demo_recipe_line(const char *input, const char *output, double reward) {
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "input", input);
    cJSON_AddStringToObject(json, "output", output);
    demo_reward_add(json, "reward", reward);
    return json;
}

/* Copies `text` with every occurrence of `word` replaced. The caller calls free(). */
static char *demo_replaced(const char *text, const char *word, const char *by) {
    size_t room = strlen(text) + 1, used = 0;
    const char *next;
    for (const char *at = text; (at = strstr(at, word)); at += strlen(word)) room += strlen(by);
    char *made = (char *)demo_alloc((int64_t)room, 1);
    for (; (next = strstr(text, word)); text = next + strlen(word))
        used += (size_t)snprintf(made + used, room - used, "%.*s%s", (int)(next - text), text,
                                 by);
    snprintf(made + used, room - used, "%s", text);
    return made;
}

/* Fills the template of csft. {reward} is replaced before {input}, so that "{reward}" in an
   input is left alone. */
static cJSON *demo_recipe_conditioned(const demo_recipe_work *w, const cJSON *json) {
    double reward = demo_recipe_reward(json);
    char number[400];
    if (w->recipe->normalize && w->counts.deviation > 0)
        reward = (reward - w->counts.mean) / w->counts.deviation;
    snprintf(number, sizeof number, "%.2f", reward);
    char *form = demo_replaced(w->recipe->form, "{reward}", number);
    char *input = demo_replaced(form, "{input}", demo_recipe_text(json, "input"));
    cJSON *made = demo_recipe_line(input, demo_recipe_text(json, "output"), reward);
    free(form);
    free(input);
    return made;
}

/* Writes a line for every text. */
static int demo_recipe_each(demo_recipe_work *w) {
    off_t at = w->g->begin;
    for (int64_t i = 0; i < w->counts.texts; i++) {
        cJSON *json = demo_recipe_read(w, at);
        if (!json) return -1;
        at = ftello(w->g->file);
        if (!w->recipe->kind)
            fputs(w->line, w->out), w->counts.lines++;
        else if (!demo_recipe_leaves(w, json))
            demo_recipe_put(w, demo_recipe_conditioned(w, json));
        cJSON_Delete(json);
    }
    return 0;
}

static cJSON *demo_recipe_pair(const cJSON *chosen, const cJSON *rejected) {
    const cJSON *both[] = {chosen, rejected};
    static const char *const keys[][2] = {{"chosen", "chosen_reward"},
                                          {"rejected", "rejected_reward"}};
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "prompt", demo_recipe_text(chosen, "input"));
    for (int i = 0; i < 2; i++) {
        cJSON_AddStringToObject(json, keys[i][0], demo_recipe_text(both[i], "output"));
        demo_reward_add(json, keys[i][1], demo_recipe_reward(both[i]));
    }
    return json;
}

/* Writes a line for each input. */
static int demo_recipe_best(demo_recipe_work *w) {
    for (int64_t i = 0; i < w->counts.inputs; i++) {
        const demo_input_best *best = &w->inputs[i];
        cJSON *high = demo_recipe_read(w, best->high.at);
        cJSON *low = high ? demo_recipe_read(w, best->low.at) : NULL;
        if (low && w->recipe->kind == DEMO_RECIPE_DPO)
            demo_recipe_put(w, demo_recipe_pair(high, low));
        else if (low)
            demo_recipe_put(w, demo_recipe_line(demo_recipe_text(high, "input"),
                                                demo_recipe_text(high, "output"),
                                                best->high.reward));
        w->counts.even += best->high.at == best->low.at;
        cJSON_Delete(high);
        cJSON_Delete(low);
        if (!low) return -1;
    }
    return 0;
}

static int demo_recipe_work_do(demo_recipe_work *w, const char *temporary) {
    bool each = w->recipe->kind == DEMO_RECIPE_NONE || w->recipe->kind == DEMO_RECIPE_CSFT;
    if (demo_recipe_look(w)) return -1;
    w->out = fopen(temporary, "wb");
    int wrong = !w->out ? 0 : each ? demo_recipe_each(w) : demo_recipe_best(w);
    bool written = w->out && !fflush(w->out) && !ferror(w->out) && !fsync(fileno(w->out));
    if (w->out && fclose(w->out)) written = false;
    if (!wrong && written && !rename(temporary, w->g->path)) return 0;
    if (!wrong)
        demo_fail(w->error, "cannot write %.300s: %s; make room and go on with --resume",
                  w->g->path, strerror(errno));
    if (w->out) unlink(temporary);
    return -1;
}

/* Makes OUT from OUT.part, which is removed on success. */
static int demo_recipe_end(demo_generated *g, const demo_recipe *recipe,
                           demo_recipe_counts *counts, demo_error *error) {
    char temporary[DEMO_PATH_LIMIT + 8];
    demo_recipe_work w = {.g = g, .recipe = recipe, .error = error};
    sh_new_strdup(w.inputs);
    snprintf(temporary, sizeof temporary, "%s.tmp", g->path); /* safe: OUT.part is locked */
    int wrong = demo_recipe_work_do(&w, temporary);
    if (!wrong) unlink(g->part);
    *counts = w.counts;
    shfree(w.inputs);
    free(w.line);
    return wrong;
}
#endif
