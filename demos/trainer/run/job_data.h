/* SPDX-License-Identifier: MIT OR Unlicense */
/* job_data.h - loads the training and evaluation data of a job, and holds out some of it. */
#ifndef DEMO_JOB_DATA_H
#define DEMO_JOB_DATA_H
#include "trainer/data/holdout.h"
#include "job_model.h"
#include "trainer/data/prepare_command.h"
#include "settle.h"
#include "settled.h"

/* The token id that ends the model's texts, if its config.json names one other than DEMO_EOS;
   else NULL. */
__attribute__((unused)) static const int64_t *demo_other_end(const demo_job *job) {
    static int64_t end;
    const char *folder = job->config.pretrain;
    return folder && demo_config_ends_otherwise(folder, DEMO_EOS, &end) ? &end : NULL;
}

/* The key, or NULL if the user has not typed the option. With NULL the reader uses its default
   key, and refuses records such as those of Alpaca, which have the prompt under two keys. */
__attribute__((unused)) static const char *demo_named_key(const demo_job *job,
                                                          const char *option, const char *key) {
    return job->parsed && !demo_options_typed(job->parsed, option) ? NULL : key;
}

/* The options that the readers of all datasets share. The objective adds the keys and what a
   record means. */
__attribute__((unused)) static demo_data_options demo_data_asked(const demo_job *job,
                                                                 const char *paths,
                                                                 int64_t max_samples,
                                                                 const char *probs,
                                                                 uint32_t kind) {
    const demo_config *c = &job->config;
    return (demo_data_options){.max_len = c->max_len,
                               .long_documents = c->long_documents,
                               .max_samples = max_samples,
                               .probs = probs,
                               .seed = c->seed,
                               .vocab_size = job->model.vocab,
                               .folder = c->pretrain,
                               .end = demo_other_end(job),
                               .prepare = demo_prepare_command(job, paths, kind)};
}

/* Refuses a unit that is longer than a row, since it would be missing from its step. */
static int demo_units_fit(const demo_job *job, const demo_dataset *set, const char *paths,
                          demo_error *error) {
    int64_t per_unit = job->objective->documents_per_unit;
    for (int64_t i = 0; i + per_unit <= arrlen(set->documents); i += per_unit) {
        int64_t tokens = 0;
        for (int64_t k = 0; k < per_unit; k++) tokens += set->documents[i + k].tokens;
        if (tokens <= job->config.pack_len) continue;
        demo_fail(error,
                  "%s: number %lld of the %s kept has %lld tokens, a row holds pack_len %lld; "
                  "raise --pack_len to %lld or lower --max_len",
                  paths, (long long)(i / per_unit + 1), job->objective->unit, (long long)tokens,
                  (long long)job->config.pack_len, (long long)(per_unit * job->config.max_len));
        return -1;
    }
    return 0;
}

/* Refuses datasets made with different tokenizers, since one model cannot read both. */
static int demo_sets_agree(const demo_job *job, const demo_dataset *other, const char *path,
                           demo_error *error) {
    const demo_token_file *a = job->train.file, *b = other->file;
    if (!arrlen(other->documents) || (!a && !b)) return 0;
    if (a && b && demo_same_tokenizer(demo_token_fingerprint(a), demo_token_fingerprint(b)))
        return 0;
    return demo_fail(
        error,
        "%.1000s and %.1000s are not tokens of one tokenizer; make a token file of "
        "each by demos/prepare.py with the same --pretrain",
        job->config.dataset, path);
}

/* Refuses a second model (reference, reward, ...) with another tokenizer, for which the same
   token ids would mean another text. */
static int demo_folders_agree(const demo_job *job, demo_error *error) {
    demo_fingerprint there;
    char one[DEMO_PATH_LIMIT + 1];
    for (int i = 0; job->train.file && i < DEMO_OTHER_MODELS; i++)
        for (const char *at =
                 demo_option_path(job->bindings, job->binding_count, demo_other_models[i]);
             at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
            snprintf(one, sizeof one, "%.*s", (int)strcspn(at, ","), at);
            if (demo_folder_fingerprint(one, &there) &&
                !demo_same_tokenizer(there, demo_token_fingerprint(job->train.file)))
                return demo_fail(
                    error,
                    "--%s %.1000s has another tokenizer.json than the one that %.1000s was "
                    "made with; take a model with the same tokenizer, or copy the file if it "
                    "differs only in formatting",
                    demo_other_models[i], one, job->config.dataset);
        }
    return 0;
}

/* Does every document of the unit have a supervised token? A prompt is always usable, since its
   response is generated later. */
static bool demo_unit_usable(const demo_job *job, const demo_dataset *set, int64_t unit) {
    int64_t per_unit = job->objective->documents_per_unit;
    if (set->file && set->file->head->kind == DEMO_TOKENS_PROMPTS) return true;
    for (int64_t k = 0; k < per_unit; k++)
        if (!demo_supervised(&set->documents[unit * per_unit + k])) return false;
    return true;
}

/* ---- evaluation on a part of the training data (holdout.h) ---- */

static int64_t demo_units(const demo_job *job, const demo_dataset *set) {
    return arrlen(set->documents) / job->objective->documents_per_unit;
}

/* Is the unit a pair of equal documents? Rounding alone would decide whether it counts as
   correct. */
static bool demo_unit_idle(const demo_job *job, int64_t unit) {
    const demo_document *d = job->train.documents + 2 * unit;
    return job->objective->documents_per_unit == 2 && demo_same_document(d, d + 1);
}

/* Moves the held-out units to the evaluation data (eval_trained: copies them). Pairs of equal
   documents are not held out but stay in the training data. */
static void demo_part_documents(demo_job *job, uint8_t *held) {
    int64_t idle = 0;
    for (int64_t i = 0; i < job->eval_of; i++)
        if (held[i] && demo_unit_idle(job, i)) held[i] = 0, idle++;
    if (idle && !job->rank)
        fprintf(stderr,
                "notice: in %lld of the pairs drawn for the evaluation chosen and rejected "
                "are the same; they are trained on instead\n",
                (long long)idle);
    job->eval.lent = job->eval_trained || job->train.file;
    DEMO_PART(job->eval.documents, job->train.documents, job->objective->documents_per_unit,
              held, job->eval_trained);
    if (job->objective->part) job->objective->part(job, held);
}

static bool demo_any_usable(const demo_job *job, const demo_dataset *set) {
    for (int64_t i = 0; i < demo_units(job, set); i++)
        if (demo_unit_usable(job, set, i)) return true;
    return false;
}

/* Checks the split: training and evaluation data each need a unit with a target, and KTO needs
   two responses to evaluate. */
static int demo_parts_wrong(const demo_job *job, const char *option, demo_error *error) {
    const char *unit = job->objective->unit;
    int64_t evaluated = demo_units(job, &job->eval), least = job->objective->least_evaluated;
    if (!demo_any_usable(job, &job->train))
        return demo_fail(error,
                         "--%s %g: none of the %lld %s that are left to train on has a target; "
                         "give a smaller one, or another --seed",
                         option, job->config.val_size, (long long)demo_units(job, &job->train),
                         unit);
    if (!demo_any_usable(job, &job->eval))
        return demo_fail(error,
                         "--%s %g: none of the %lld %s to evaluate on has a target; give a "
                         "larger one, or another --seed",
                         option, job->config.val_size, (long long)evaluated, unit);
    if (evaluated < least)
        return demo_fail(error,
                         "--%s %g: KTO's KL term pairs each prompt with another document's "
                         "response, but the evaluation has 1 document; give 2 or more",
                         option, job->config.val_size);
    return 0;
}

/* Holds out val_size of the training units. */
static int demo_hold_out(demo_job *job, demo_error *error) {
    const char *option = demo_job_spelled(job, "val_size");
    int64_t units = demo_units(job, &job->train);
    int64_t wanted = demo_held_count(job->config.val_size, units);
    if (wanted >= units)
        return demo_fail(error,
                         "--%s %g asks for %lld of %lld %s, which leaves none to train on; "
                         "give a smaller one, or --eval_dataset",
                         option, job->config.val_size, (long long)wanted, (long long)units,
                         job->objective->unit);
    uint8_t *held = (uint8_t *)demo_alloc(units + 1, sizeof *held);
    demo_held_mark(held, units, wanted, (uint64_t)job->config.seed,
                   demo_job_from(job, "val_size") == DEMO_FROM_AXOLOTL);
    job->eval_of = units;
    demo_part_documents(job, held);
    free(held);
    return demo_parts_wrong(job, option, error);
}

/* Without other evaluation data, the scores of a reward model are measured on the first pairs
   of the training data: on one hundredth of the pairs, as in OpenRLHF. The number is at least
   DEMO_SCORED, except that for options of OpenRLHF a smaller number above 0 is used. */
enum { DEMO_SCORED = 100 };

static void demo_score_trained(demo_job *job) {
    int64_t units = demo_units(job, &job->train), wanted = units / 100;
    bool origin = demo_job_from(job, "eval_dataset") == DEMO_FROM_OPENRLHF;
    if (wanted < DEMO_SCORED && (!origin || !wanted)) wanted = DEMO_SCORED;
    uint8_t *held = (uint8_t *)demo_alloc(units + 1, sizeof *held);
    for (int64_t i = 0; i < units && wanted; i++)
        if (!demo_unit_idle(job, i)) held[i] = 1, wanted--;
    job->eval_of = units;
    demo_part_documents(job, held);
    free(held);
}

static int demo_job_part(demo_job *job, demo_error *error) {
    if (job->config.val_size > 0) return demo_hold_out(job, error);
    if (job->eval_trained) demo_score_trained(job);
    return 0;
}

/* The length of a row, in tokens. A packed row has sequence_len tokens in axolotl, and
   cutoff_len in LLaMA-Factory. OpenRLHF packs the documents of a micro-batch into one row of
   variable length. So for its options, or if no program is known, a packed row has at least
   2048 tokens here. */
static int64_t demo_row_tokens(const demo_job *job, int64_t longest) {
    int from = demo_job_from(job, "packing_samples");
    bool fixed = from == DEMO_FROM_AXOLOTL || from == DEMO_FROM_LLAMAFACTORY;
    return job->config.packing_samples && longest < 2048 && !fixed ? 2048 : longest;
}

/* Loads and checks the data of the job, splits off the evaluation data, and lists the usable
   training units. */
static int demo_job_data(demo_job *job, demo_error *error) {
    demo_config *c = &job->config;
    const demo_objective *o = job->objective;
    if (!c->dataset) {
        demo_fail(error, "no training data; give --dataset FILE (.jsonl or .txt)");
        return -1;
    }
    int64_t longest = o->documents_per_unit * c->max_len; /* a unit is never split */
    if (longest > SEQPAR_MAX_TOKENS)
        return demo_fail(error,
                         "max_len %lld is too long: one of the %s may have %lld tokens, a row "
                         "at most %lld; lower --max_len",
                         (long long)c->max_len, o->unit, (long long)longest,
                         (long long)SEQPAR_MAX_TOKENS);
    if (c->gradient_accumulation_steps > c->train_batch_size)
        return demo_fail(error,
                         "gradient_accumulation_steps %lld is more than train_batch_size "
                         "%lld, so some micro-batches would be empty; lower it",
                         (long long)c->gradient_accumulation_steps,
                         (long long)c->train_batch_size);
    if (!c->pack_len) c->pack_len = demo_row_tokens(job, longest);
    if (c->pack_len < c->max_len) {
        demo_fail(error,
                  "pack_len %lld is shorter than max_len %lld, but a document must fit into "
                  "one row; raise --pack_len or lower --max_len",
                  (long long)c->pack_len, (long long)c->max_len);
        return -1;
    }
    if (o->load(job, &job->train, c->dataset, c->max_samples, error)) return -1;
    if (c->eval_dataset && o->load(job, &job->eval, c->eval_dataset, 0, error)) return -1;
    if (demo_settled_agrees(job, &job->train, c->dataset, error) ||
        demo_settled_agrees(job, &job->eval, c->eval_dataset, error) ||
        demo_sets_agree(job, &job->eval, c->eval_dataset, error) ||
        demo_folders_agree(job, error) || demo_units_fit(job, &job->train, c->dataset, error) ||
        demo_units_fit(job, &job->eval, c->eval_dataset, error) || demo_job_part(job, error))
        return -1;
    int64_t units = demo_units(job, &job->train);
    job->usable = (int64_t *)demo_alloc(units + 1, sizeof *job->usable);
    for (int64_t i = 0; i < units; i++)
        if (demo_unit_usable(job, &job->train, i)) job->usable[job->usable_count++] = i;
    return 0;
}
#endif
