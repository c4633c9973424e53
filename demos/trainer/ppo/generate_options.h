/* SPDX-License-Identifier: MIT OR Unlicense */
/* generate_options.h - the options of generate, and checks for contradictions between them. */
#ifndef DEMO_GENERATE_OPTIONS_H
#define DEMO_GENERATE_OPTIONS_H
#include "recipes.h"
#include "reward.h"

typedef struct {
    demo_ppo_config ppo; /* must be first: PPO's code for sampling and scoring reads it */
    const char *output_path, *post_processor, *reward_template, *csft_prompt, *eval_task;
    int64_t best_of_n, iter, slice;
    bool greedy_sampling, enable_csft, resume, normalize;
    demo_recipe recipe;
    demo_generated out; /* used by rank 0 only */
    demo_note *notes;   /* for the first line of OUT.part; stb_ds array */
    /* the prompts of this run: index of the first in the set, and number */
    int64_t first, prompts;
} demo_generate_config;

/* These are listed before the shared options. If two bindings have the same name the first one
   counts, and some of these replace help or default of a shared option. */
#define DEMO_GENERATE_BINDINGS(c, g, p) \
    {"dataset", \
     &(c).dataset, \
     DEMO_STRING, \
     NULL, \
     "prompts: a comma list of .jsonl, folders, json@FOLDER; or a token file (prepare.py)", \
     DEMO_ANY}, \
        {"pretrain", \
         &(c).pretrain, \
         DEMO_STRING, \
         NULL, \
         "folder of the model: config.json and model.safetensors", \
         DEMO_ANY}, \
        {"adapter_name_or_path", \
         &(c).adapter_name_or_path, \
         DEMO_STRING, \
         NULL, \
         "folder with adapter_config.json: adapters of the model", \
         DEMO_ANY}, \
        {"micro_train_batch_size", \
         &(c).micro_train_batch_size, \
         DEMO_INT, \
         "16", \
         "texts that a rank generates, and rows that it scores, at a time", \
         DEMO_COUNT(1)}, \
        {"zero_stage", \
         &(c).zero_stage, \
         DEMO_INT, \
         "0", \
         "3: weights are sharded until generation starts; 0 to 2: whole on each rank", \
         DEMO_BETWEEN(0, 3)}, \
        {"seed", &(c).seed, DEMO_INT, "42", "seed of sampling", DEMO_AT_LEAST(0)}, \
        {"logging_steps", \
         &(c).logging_steps, \
         DEMO_INT, \
         "10", \
         "print a line every N writes to the output file", \
         DEMO_COUNT(1)}, \
        {"json",  &(c).json, DEMO_FLAG, NULL, "print the final summary as one JSON object", \
         DEMO_ANY}, \
        DEMO_SAMPLING_BINDINGS(p), \
        {"output_path", \
         &(g).output_path, \
         DEMO_STRING, \
         NULL, \
         "output file, JSON lines; named OUT.part until all texts are written", \
         DEMO_ANY}, \
        {"resume", \
         &(g).resume, \
         DEMO_FLAG, \
         NULL, \
         "go on after the texts in OUT.part, if it exists", \
         DEMO_ANY}, \
        {"best_of_n", \
         &(g).best_of_n, \
         DEMO_INT, \
         "1", \
         "generate N texts for each prompt and keep the one with the best reward: the same " \
         "as --n_samples_per_prompt N --post_processor rs", \
         DEMO_COUNT(1)}, \
        {"max_new_tokens", &(p).generate_max_len,     DEMO_INT, \
         "1024",           "longest text, in tokens", DEMO_COUNT(1)}, \
        {"greedy_sampling", \
         &(g).greedy_sampling, \
         DEMO_FLAG, \
         NULL, \
         "always the most probable token", \
         DEMO_ANY}, \
        {"post_processor", \
         &(g).post_processor, \
         DEMO_STRING, \
         NULL, \
         "write training data instead of the texts: rs, the best text of each prompt; " \
         "iter_dpo, the best and the worst; csft, every text with its reward in the prompt", \
         DEMO_ANY}, \
        {"reward_template", \
         &(g).reward_template, \
         DEMO_STRING, \
         "{input} <rm_score>: {reward} ", \
         "csft: template of the prompt with its reward", \
         DEMO_ANY}, \
        {"normalize_reward", \
         &(g).normalize, \
         DEMO_FLAG, \
         NULL, \
         "csft: normalize rewards to mean 0 and standard deviation 1 over all texts", \
         DEMO_ANY}, \
        {"enable_csft", \
         &(g).enable_csft, \
         DEMO_FLAG, \
         NULL, \
         "append --csft_prompt and a space to every prompt", \
         DEMO_ANY}, \
        {"csft_prompt", \
         &(g).csft_prompt, \
         DEMO_STRING, \
         "<rm_score>: 5.00", \
         "with --enable_csft: the text that asks for a reward", \
         DEMO_ANY}, \
        {"iter", \
         &(g).iter, \
         DEMO_INT, \
         "-1", \
         "generate for rollout_batch_size prompts only, from number iter x " \
         "rollout_batch_size on; -1: for all", \
         DEMO_COUNT(0)}, \
        {"rollout_batch_size", &(g).slice, DEMO_INT, "2048", "number of prompts with --iter", \
         DEMO_COUNT(1)}, \
    { \
        "eval_task", &(g).eval_task, DEMO_STRING, "generate", \
            "task by OpenRLHF's name; rm, which scores texts of another run, is not supported", \
            DEMO_ANY \
    }

static demo_generate_config *demo_generate_of(const demo_job *job) {
    return (demo_generate_config *)job->options;
}

/* ---- options that contradict each other: 0, or -1 with a message ---- */

static bool demo_generate_scores(const demo_generate_config *g) {
    return g->ppo.reward_pretrain || g->ppo.reward_rule || g->ppo.servers.urls;
}

static int demo_generate_files(const demo_job *job, demo_error *error) {
    const demo_generate_config *g = demo_generate_of(job);
    if (!job->config.dataset) return demo_fail(error, "no prompts; give --dataset FILE");
    if (!job->config.pretrain) return demo_fail(error, "no model; give --pretrain FOLDER");
    if (!g->output_path) return demo_fail(error, "no output file; give --output_path FILE");
    if (strcmp(g->eval_task, "generate"))
        return demo_fail(
            error, "--eval_task rm is not supported, as texts are scored when they are "
                   "generated; leave it out, and add --reward_pretrain to the command that "
                   "generates");
    return 0;
}

/* Checks and sets the number of texts per prompt and the sampling parameters. */
static int demo_generate_sampling(demo_job *job, demo_error *error) {
    demo_generate_config *g = demo_generate_of(job);
    demo_ppo_config *p = &g->ppo;
    static const char *const drawn[] = {"temperature", "top_p", "top_k"};
    if (demo_job_typed(job, "best_of_n") && demo_job_typed(job, "n_samples_per_prompt"))
        return demo_fail(error,
                         "--best_of_n and --n_samples_per_prompt both say how many texts "
                         "a prompt has; leave one of them out");
    if (g->best_of_n > 1 && !demo_generate_scores(g))
        return demo_fail(error,
                         "--best_of_n %lld needs a reward to choose by; give "
                         "--reward_pretrain FOLDER, --remote_rm_url URL or --reward_rule "
                         "last_number (or --n_samples_per_prompt, for all of the texts)",
                         (long long)g->best_of_n);
    if (g->best_of_n > 1) p->n_samples_per_prompt = g->best_of_n;
    if (g->best_of_n > 1 && !g->post_processor) g->post_processor = "rs";
    for (int i = 0; i < 3 && g->greedy_sampling; i++)
        if (demo_job_typed(job, drawn[i]))
            return demo_fail(error,
                             "--greedy_sampling takes the most probable token, whatever --%s "
                             "is; leave one of the two out",
                             drawn[i]);
    if (g->greedy_sampling && p->n_samples_per_prompt > 1)
        return demo_fail(
            error,
            "--greedy_sampling would write the same text %lld times; leave it out, "
            "or ask for one text a prompt",
            (long long)p->n_samples_per_prompt);
    if (g->greedy_sampling) p->temperature = 0;
    return 0;
}

/* Checks and sets the recipe that turns texts and rewards into training data
   (--post_processor). */
static int demo_generate_recipe(demo_job *job, demo_error *error) {
    static const char *const names[] = {"", "rs", "iter_dpo", "csft"};
    demo_generate_config *g = demo_generate_of(job);
    int kind = g->post_processor ? demo_pick(g->post_processor, names, 4) : DEMO_RECIPE_NONE;
    bool csft = kind == DEMO_RECIPE_CSFT;
    g->recipe = (demo_recipe){kind, g->reward_template, g->normalize};
    if (kind && !demo_generate_scores(g))
        return demo_fail(error,
                         "--post_processor %s needs rewards; give --reward_pretrain FOLDER, "
                         "--remote_rm_url URL or --reward_rule last_number",
                         g->post_processor);
    if (kind && !csft && g->ppo.n_samples_per_prompt < 2)
        return demo_fail(
            error,
            "--post_processor %s compares the texts of a prompt, but each prompt has one; "
            "give --n_samples_per_prompt 2 or more",
            g->post_processor);
    if (!csft && (g->normalize || demo_job_typed(job, "reward_template")))
        return demo_fail(error,
                         "--%s acts only with --post_processor csft, which writes rewards "
                         "into prompts; add that, or leave it out",
                         g->normalize ? "normalize_reward" : "reward_template");
    if (csft &&
        (!strstr(g->reward_template, "{input}") || !strstr(g->reward_template, "{reward}")))
        return demo_fail(error,
                         "--reward_template is '%.300s'; it must hold {input} and {reward}",
                         g->reward_template);
    if (demo_job_typed(job, "csft_prompt") && !g->enable_csft)
        return demo_fail(
            error, "--csft_prompt acts only with --enable_csft; add that, or leave it out");
    return 0;
}

static int demo_generate_rewards(const demo_job *job, demo_error *error) {
    const demo_ppo_config *p = &demo_generate_of(job)->ppo;
    if (p->reward_rule && !p->label_key && !demo_is_token_file(job->config.dataset))
        return demo_fail(error,
                         "reward_rule %s compares with the right answer; name its key by "
                         "--label_key",
                         p->reward_rule);
    if (p->label_key && !p->reward_rule && !p->servers.urls)
        return demo_fail(error,
                         "--label_key names the right answer, which only --reward_rule and "
                         "reward servers use; add one of them, or leave it out");
    return p->servers.urls ? demo_servers_check(&p->servers, error) : 0;
}

/* The prompt template followed by `asked`, trimmed, and one blank. */
static const char *demo_csft_template(const char *form, const char *asked) {
    static char *text;
    static const char blanks[] = " \t\r\n";
    size_t begin = strspn(asked, blanks), end = strlen(asked);
    while (end > begin && strchr(blanks, asked[end - 1])) end--;
    free(text);
    text = (char *)demo_alloc((int64_t)(strlen(form) + end - begin + 2), 1);
    sprintf(text, "%s%.*s ", form, (int)(end - begin), asked + begin);
    return text;
}

static int demo_generate_prepare(demo_job *job, demo_error *error) {
    demo_generate_config *g = demo_generate_of(job);
    demo_ppo_config *p = &g->ppo;
    demo_config *c = &job->config;
    if (demo_generate_files(job, error) || demo_generate_sampling(job, error) ||
        demo_generate_recipe(job, error) || demo_generate_rewards(job, error))
        return -1;
    if (demo_job_typed(job, "rollout_batch_size") && g->iter < 0)
        return demo_fail(error,
                         "--rollout_batch_size is the number of prompts of one --iter; add "
                         "that, or leave it out");
    demo_roles_lay(&p->roles, false, p->reward_pretrain != NULL);
    p->micro_rollout_batch_size = job->micro_values = c->micro_train_batch_size;
    p->servers.interrupted = &demo_interrupted;
    c->max_len = p->prompt_max_len + p->generate_max_len;
    if (g->enable_csft)
        c->input_template = demo_csft_template(c->input_template, g->csft_prompt);
    return 0;
}
#endif
