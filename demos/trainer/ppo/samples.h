/* SPDX-License-Identifier: MIT OR Unlicense */
/* samples.h - prints and logs examples of a rollout: the texts of its first prompts
 * (--log_samples). */
#ifndef DEMO_SAMPLES_H
#define DEMO_SAMPLES_H
#include "update.h"
#include "trainer/base/escape.h"

/* All texts of the first `log_samples` prompts. Call demo_samples_free later. */
static demo_sample *demo_samples_of(const demo_rank *r, int64_t *count) {
    const demo_ppo_config *c = demo_ppo_options(r);
    const demo_rollout *o = &((const demo_ppo *)r->own)->rollout;
    *count = c->log_samples * c->n_samples_per_prompt;
    if (*count > o->texts) *count = o->texts;
    const demo_words words = demo_rank_words(r);
    demo_sample *samples = (demo_sample *)demo_alloc(*count, sizeof *samples);
    for (int64_t i = 0; i < *count; i++) {
        const demo_document *d = &o->set.documents[i];
        int64_t prompt = o->prompt[i];
        samples[i] = (demo_sample){
            demo_tokens_as_text(&words, d->ids, prompt),
            demo_tokens_as_text(&words, d->ids + prompt, d->tokens - prompt), o->score[i]};
    }
    return samples;
}

static void demo_samples_free(demo_sample *samples, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        free(samples[i].prompt);
        free(samples[i].text);
    }
    free(samples);
}

/* Prints a text on one line: line ends and control characters are escaped. */
static void demo_text_print(FILE *out, const char *text) {
    int64_t room = 4 * (int64_t)strlen(text) + 1;
    char *shown = (char *)demo_alloc(room, 1);
    fputs(demo_escape(shown, room, text), out);
    free(shown);
}

/* Prints each prompt, and below it its texts with their rewards. */
static void demo_samples_print(FILE *out, const demo_report *report, int64_t per_prompt) {
    for (int64_t i = 0; i < report->sample_count; i++) {
        if (i % per_prompt == 0) {
            fprintf(out, "rollout %lld, prompt %lld: ", (long long)report->round,
                    (long long)(i / per_prompt + 1));
            demo_text_print(out, report->samples[i].prompt);
            fputc('\n', out);
        }
        fprintf(out, "    %.4f: ", report->samples[i].reward);
        demo_text_print(out, report->samples[i].text);
        fputc('\n', out);
    }
}
#endif
