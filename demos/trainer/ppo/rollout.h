/* SPDX-License-Identifier: MIT OR Unlicense */
/* rollout.h - generates the texts of a rollout. A text is a sampled response to a prompt.
 *
 * Each generating rank makes some of the texts, and all ranks gather all of them. Random
 * numbers depend only on the index of the text and the position of the token, so the number of
 * ranks changes no text. */
#ifndef DEMO_ROLLOUT_H
#define DEMO_ROLLOUT_H
#include "advantage.h"
#include "ppo_config.h"

/* ---- a rollout: texts, and an entry for every generated token ---- */

enum { OLD_LOGP, REF_LOGP_OF, VALUE, KL, REWARD, ADVANTAGE, RETURN, ENTRY };
typedef struct {
    /* one document per text: the prompt followed by the text; the texts of a prompt are
       adjacent */
    demo_dataset set;
    int64_t *prompt, *first; /* (texts) tokens of the prompt; index of the first entry */
    int64_t texts, entries;
    /* (entries, ENTRY); entry t of a text is its token t, which position prompt - 1 + t of the
       document predicts */
    double *entry;
    double *sampled;              /* (entries) log-probs from sampling, stb_ds array */
    double *score, *kl;           /* (texts) reward; mean KL */
    const demo_document **source; /* (texts) document of the prompt in the training set */
} demo_rollout;

enum { DEMO_REWARDS = 8, UPDATE_COLUMNS = 8 };
typedef struct {
    double mean, std;
} demo_moments;

typedef struct { /* PPO's state on a rank */
    demo_reference reference;
    seqpar_llama critic, critic_adapters, reward[DEMO_REWARDS];
    seqpar_optim critic_optim;
    /* aux loss of the critic, whose experts may differ from the actor's */
    demo_experts critic_experts;
    char critic_source[DEMO_PATH_LIMIT + 1];
    int64_t critic_untaught; /* as in seqpar_llama_batch_desc */
    /* mean and standard deviation that normalize the scores of each reward model */
    demo_moments moments[DEMO_REWARDS];
    bool has_critic;
    int rewards, scorer; /* number of reward models; index of the current one */
    demo_rollout rollout;
    int64_t drawn; /* prompts drawn so far */
    bool used_up;  /* filtering left too few prompts for a whole rollout */
    /* a reward server failed, or a signal came before it answered: the rollout is discarded,
       and its prompts count as not drawn */
    bool given_up;
    /* the texts of the rollout followed by the pretraining documents; not owned */
    demo_dataset mixed;
    kl_controller kl;
    /* column: filled by the current pass. place, seen: for each column, the entries that this
       rank has computed and their values, until all ranks gather them; stb_ds arrays */
    int column;
    int64_t *place[ENTRY];
    double *seen[ENTRY];
    /* over the actor's first rank and the generator ranks; NULL: no generators */
    seqpar_comm *handing;
    bool handed; /* all weights have been sent to the generators once */
    /* means of the last update; seconds[0] to [2]: to generate, to score, to train; [3], part
       of [0]: to send weights to the generators */
    double policy[UPDATE_COLUMNS], value[UPDATE_COLUMNS], seconds[4];
} demo_ppo;

static demo_ppo *demo_ppo_of(demo_rank *r) { return (demo_ppo *)r->own; }
static const demo_ppo_config *demo_ppo_options(const demo_rank *r) {
    return (const demo_ppo_config *)r->job->options;
}

static bool demo_has_role(const demo_rank *r, int role) {
    return demo_ppo_options(r)->roles.group[role] == r->group;
}

static void demo_rollout_free(demo_rollout *o) {
    demo_data_free(&o->set);
    free(o->prompt);
    free(o->entry);
    arrfree(o->sampled);
    free(o->score);
    free(o->source);
    memset(o, 0, sizeof *o);
}

/* ---- prompts ---- */

/* Checks that every right answer of a token file contains a number, since texts are compared
   with it. */
static int demo_answers_there(const demo_dataset *set, const char *path, demo_error *error) {
    for (int64_t i = 0; i < arrlen(set->documents); i++) {
        demo_slice answer = demo_token_slice(set->file, DEMO_ANSWER_OFFSETS, DEMO_ANSWER_TEXT,
                                             i);
        size_t at = 0;
        while (at < answer.size && !isdigit((unsigned char)answer.bytes[at])) at++;
        if (at == answer.size)
            return demo_fail(
                error,
                "%s: the right answer %lld, '%.*s', has no number, but responses are "
                "compared with its last number; make the file again with a --label_key whose "
                "text has a number",
                path, (long long)i + 1, (int)(at < 60 ? at : 60), answer.bytes);
    }
    return 0;
}

/* Loads prompts. For a model with a tokenizer they must be a token file: token ids in JSON do
   not say which tokens end a text, or which bytes a token stands for. */
static int demo_prompts_load(demo_dataset *set, const char *paths,
                             const demo_data_options *options, demo_error *error) {
    if (demo_token_file_among(paths, error)) return -1;
    if (!demo_is_token_file(paths) && options->prepare)
        return demo_fail(
            error,
            "%s is not a token file, but the model in %s has a tokenizer, so prompts must be in "
            "one; make a token file and give it%s: %s",
            paths, options->folder, demo_template_hint(options), options->prepare);
    if (!demo_is_token_file(paths)) return demo_data_load(set, paths, options, error);
    *set = (demo_dataset){0};
    if (!demo_data_of_file(set, paths, DEMO_TOKENS_PROMPTS, options, error) &&
        (!options->number || !demo_answers_there(set, paths, error)))
        return 0;
    demo_data_free(set);
    return -1;
}

/* Loads prompts by the options of the job. With label_key, the document of a prompt also
   contains the right answer, after the prompt. */
static int demo_prompts_read(const demo_job *job, demo_dataset *set, const char *paths,
                             int64_t max_samples, demo_error *error) {
    const demo_ppo_config *p = (const demo_ppo_config *)job->options;
    demo_data_options options = demo_data_asked(job, paths, max_samples,
                                                demo_set_probs(job, set), DEMO_TOKENS_PROMPTS);
    options.input_key = demo_named_key(job, "input_key", p->input_key);
    options.output_key = p->label_key;
    options.input_template = job->config.input_template;
    options.max_len = p->prompt_max_len;
    options.long_documents = DEMO_LONG_DROP; /* prompts are never cut: long ones are left out */
    options.number = (p->label_key || demo_is_token_file(paths)) &&
                     (p->reward_rule || set == &job->eval);
    options.output_option = p->label_key ? "label_key" : "input_key";
    options.length_option = "prompt_max_len";
    if (demo_prompts_load(set, paths, &options, error)) return -1;
    demo_data_summary(set, set->summary, sizeof set->summary);
    return 0;
}

/* ---- generating ---- */

static demo_words demo_rank_words(const demo_rank *r) {
    return demo_words_of(r->job->train.file);
}

/* The number of tokens of a prompt: in a token file the whole document; else all tokens before
   the right answer or, without one, all except EOS. */
static int64_t demo_prompt_tokens(const demo_rank *r, const demo_document *d) {
    int64_t n = 0;
    if (r->job->train.file) return d->tokens;
    if (!demo_ppo_options(r)->label_key) return d->tokens - (d->ids[d->tokens - 1] == DEMO_EOS);
    while (n < d->tokens && !d->loss_mask[n]) n++;
    return n;
}

/* Sets *first and *count to the range of ranks of a role's group. */
static void demo_role_group(const demo_rank *r, int role, int64_t *first, int64_t *count) {
    int group = demo_ppo_options(r)->roles.group[role];
    *first = 0;
    *count = r->job->groups > 1 ? r->job->group_ranks[group] : r->world->size;
    for (int g = 0; r->job->groups > 1 && g < group; g++) *first += r->job->group_ranks[g];
}

/* The role whose ranks generate the texts. */
static int demo_who_generates(const demo_rank *r) {
    return demo_ppo_options(r)->roles.group[DEMO_GENERATOR] > 0 ? DEMO_GENERATOR : DEMO_ACTOR;
}

/* Gathers rows of `width` bytes, one row per text, on all ranks. mine: the rows of this rank's
   texts. */
static seqpar_status demo_share_rows(demo_rank *r, void *all, const void *mine, int64_t total,
                                     int64_t width, const char *what) {
    int64_t *bytes = (int64_t *)demo_alloc(r->world->size, sizeof *bytes), begin, ranks;
    demo_role_group(r, demo_who_generates(r), &begin, &ranks);
    for (int64_t w = 0; w < ranks; w++)
        bytes[begin + w] = (seqpar_part_begin(total, ranks, w + 1) -
                            seqpar_part_begin(total, ranks, w)) *
                           width;
    seqpar_status status = seqpar_comm_all_gather(r->world, all, mine, bytes, what);
    free(bytes);
    return status;
}

/* The texts of all ranks. ids (total, longest + 1): the number of tokens, then the tokens. logp
   (total, longest). */
typedef struct {
    int32_t *ids;
    double *logp;
    int64_t longest;
} demo_texts;

static demo_texts demo_texts_new(int64_t total, int64_t longest) {
    return (demo_texts){(int32_t *)demo_alloc(total * (longest + 1) + 1, sizeof(int32_t)),
                        (double *)demo_alloc(total * longest + 1, sizeof(double)), longest};
}

static void demo_texts_free(demo_texts *t) {
    free(t->ids);
    free(t->logp);
}

static const int32_t *demo_text_ids(const demo_texts *t, int64_t i) {
    return t->ids + i * (t->longest + 1);
}

/* Gathers all `total` texts on all ranks; this rank contributes `count`. */
static seqpar_status demo_share_texts(demo_rank *r, demo_texts *all,
                                      const seqpar_llama_text *texts, int64_t count,
                                      int64_t total) {
    int64_t longest = all->longest;
    demo_texts mine = demo_texts_new(count, longest);
    for (int64_t i = 0; i < count; i++) {
        int32_t *ids = mine.ids + i * (longest + 1);
        ids[0] = (int32_t)texts[i].count;
        memcpy(ids + 1, texts[i].ids, (size_t)texts[i].count * sizeof *ids);
        memcpy(mine.logp + i * longest, texts[i].logp,
               (size_t)texts[i].count * sizeof *mine.logp);
    }
    seqpar_status status = demo_share_rows(r, all->ids, mine.ids, total, (longest + 1) * 4,
                                           "texts");
    if (!status)
        status = demo_share_rows(r, all->logp, mine.logp, total, longest * 8, "log-probs");
    demo_texts_free(&mine);
    return status;
}

#ifndef DEMO_HANDED_BYTES
#define DEMO_HANDED_BYTES (1 << 24)
#endif
/* Sends the weights from the actor's first rank to the generators, piece by piece, in their
   storage type. */
static seqpar_status demo_hand_over_to(demo_rank *r, const seqpar_llama *model) {
    demo_ppo *p = demo_ppo_of(r);
    int64_t bytes = model->elements * seqpar_dtype_bytes(r->device->storage), n;
    char *host = p->handing ? (char *)demo_alloc(DEMO_HANDED_BYTES, 1) : NULL;
    seqpar_status status = SEQPAR_OK;
    for (int64_t at = 0; !status && p->handing && at < bytes; at += n) {
        char *part = (char *)model->params.data + at;
        n = bytes - at < DEMO_HANDED_BYTES ? bytes - at : (int64_t)DEMO_HANDED_BYTES;
        if (r->group == 0) r->device->copy(r->device, host, part, n, NULL);
        status = seqpar_comm_broadcast(p->handing, host, n, 0);
        if (r->group) r->device->copy(r->device, part, host, n, NULL);
    }
    free(host);
    return status;
}

/* Sends the generators the weights that have changed: the adapters or, without adapters, all
   weights. The actor's ranks gather sharded weights for this. Collective over all ranks. */
static seqpar_status demo_hand_weights(demo_rank *r) {
    demo_ppo *p = demo_ppo_of(r);
    double began = demo_seconds();
    seqpar_status status = SEQPAR_OK;
    if (demo_who_generates(r) == DEMO_ACTOR) return SEQPAR_OK;
    if (r->group == 0) status = seqpar_llama_gather(&r->ctx, &r->model);
    if (!status && (!r->job->adapter.rank || !p->handed))
        status = demo_hand_over_to(r, &r->model);
    if (!status && r->job->adapter.rank) status = demo_hand_over_to(r, &r->adapters);
    p->handed = true;
    if (r->group == 0) seqpar_llama_drop(&r->ctx, &r->model);
    p->seconds[3] += demo_seconds() - began;
    return status;
}

/* Generates texts for these prompts (total); one rank generates each text. Call demo_texts_free
   later. */
static seqpar_status demo_generate(demo_rank *r, demo_texts *all,
                                   const seqpar_llama_prompt *prompts, int64_t total,
                                   const seqpar_llama_sample_desc *desc) {
    bool mine = demo_has_role(r, demo_who_generates(r));
    int64_t ranks = r->ctx.world->size, rank = r->ctx.world->rank;
    int64_t first = mine ? seqpar_part_begin(total, ranks, rank) : 0;
    int64_t end = mine ? seqpar_part_begin(total, ranks, rank + 1) : 0;
    seqpar_llama_text *texts = (seqpar_llama_text *)demo_alloc(end - first + 1, sizeof *texts);
    *all = demo_texts_new(total, desc->max_new_tokens);
    /* each rank generates whole texts, so it needs all weights: gather sharded ones */
    seqpar_status status = demo_hand_weights(r);
    if (!status && mine) status = seqpar_llama_gather(&r->ctx, &r->model);
    if (!status && mine)
        status = seqpar_llama_generate(&r->ctx, &r->model, texts, prompts + first, end - first,
                                       desc);
    if (mine) seqpar_llama_drop(&r->ctx, &r->model);
    if (!status) status = demo_share_texts(r, all, texts, end - first, total);
    if (!status && mine) seqpar_llama_texts_free(texts, end - first);
    free(texts);
    return status;
}

static void demo_rollout_new(demo_rollout *o, int64_t room) {
    demo_rollout_free(o);
    o->prompt = (int64_t *)demo_alloc(2 * room, sizeof *o->prompt);
    o->first = o->prompt + room;
    o->source = (const demo_document **)demo_alloc(room, sizeof *o->source);
    o->score = (double *)demo_alloc(2 * room, sizeof *o->score);
    o->kl = o->score + room;
}

/* Adds a text to a rollout. Takes ownership of its document, which begins with the prompt, and
   copies its log-probs. */
static void demo_rollout_take(demo_rollout *o, demo_document text, const double *logp,
                              int64_t prompt, const demo_document *source, double score) {
    arrput(o->set.documents, text);
    for (int64_t t = 0; t < text.tokens - prompt; t++) arrput(o->sampled, logp[t]);
    o->prompt[o->texts] = prompt;
    o->first[o->texts] = o->entries;
    o->source[o->texts] = source;
    o->score[o->texts++] = score;
    o->entries += text.tokens - prompt;
}

static demo_document demo_text_document(const seqpar_llama_prompt *prompt,
                                        const int32_t *text) {
    demo_document d = {0};
    for (int64_t t = 0; t < prompt->tokens; t++) demo_push(&d, prompt->ids[t], false);
    for (int64_t t = 0; t < text[0]; t++) demo_push(&d, text[1 + t], true);
    return d;
}

static seqpar_llama_sample_desc demo_sample_desc(const demo_rank *r) {
    const demo_ppo_config *c = demo_ppo_options(r);
    const demo_words words = demo_rank_words(r);
    return (seqpar_llama_sample_desc){.max_new_tokens = c->generate_max_len,
                                      .batch = c->micro_rollout_batch_size,
                                      .temperature = c->temperature,
                                      .top_p = c->top_p,
                                      .top_k = c->top_k,
                                      .stops = words.stops,
                                      .stop_count = words.stop_count,
                                      .seed = (uint64_t)r->job->config.seed,
                                      .cell = r->job->config.cell};
}

#endif
