/* SPDX-License-Identifier: MIT OR Unlicense */
/* ppo_options.h - what train_ppo can be told, and which of it does not go together. */
#ifndef DEMO_PPO_OPTIONS_H
#define DEMO_PPO_OPTIONS_H
#include "preference.h"
#include "reward_server.h"

typedef struct {
    const char *input_key, *label_key, *ref_pretrain, *reward_pretrain, *reward_rule, *critic_pretrain, *value_head_prefix, *advantage_estimator, *kl_estimator;
    bool use_kl_loss, no_advantage_std_norm;
    int64_t rollout_batch_size, n_samples_per_prompt, num_episodes, prompt_max_len, generate_max_len, kl_horizon, freezing_actor_steps, top_k;
    double actor_learning_rate, critic_learning_rate, eps_clip, value_clip, lambd, gamma, init_kl_coef, kl_target, temperature, top_p, dual_clip, entropy_loss_coef;
    double reward_clip_range[2], eps_clip_low_high[2];
    demo_reward_servers servers;
} demo_ppo_config;

#define DEMO_PPO_BINDINGS(c, p) \
    {"prompt_data", &(c).dataset, DEMO_STRING, NULL, "prompts: .jsonl, a comma list", DEMO_ANY}, \
    {"input_key", &(p).input_key, DEMO_STRING, "input", "JSON key of the prompt", DEMO_ANY}, \
    {"label_key", &(p).label_key, DEMO_STRING, NULL, "JSON key of the right answer, for --reward_rule", DEMO_ANY}, \
    {"ref_pretrain", &(p).ref_pretrain, DEMO_STRING, NULL, "folder of the reference model; without it the model training starts from", DEMO_ANY}, \
    {"reward_pretrain", &(p).reward_pretrain, DEMO_STRING, NULL, "folders of reward models, a comma list; their scores are added", DEMO_ANY}, \
    {"reward_rule", &(p).reward_rule, DEMO_STRING, NULL, "last_number: 1 if the text's last number is the label's, else 0", DEMO_ANY}, \
    {"remote_rm_url", &(p).servers.urls, DEMO_STRING, NULL, "http servers that give rewards, a comma list; what they say is added", DEMO_ANY}, \
    {"remote_rm_timeout", &(p).servers.timeout, DEMO_FLOAT, "180", "seconds a server may take", {0, 1e6, true}}, \
    {"remote_rm_retries", &(p).servers.retries, DEMO_INT, "4", "further tries when a server cannot be reached or is busy", DEMO_AT_LEAST(0)}, \
    {"remote_rm_backoff", &(p).servers.backoff, DEMO_FLOAT, "1", "seconds before the second try, twice as many before each one after", DEMO_BETWEEN(0, 1e6)}, \
    {"critic_pretrain", &(p).critic_pretrain, DEMO_STRING, NULL, "folder the critic starts from; without it the reward model, or the actor", DEMO_ANY}, \
    {"value_head_prefix", &(p).value_head_prefix, DEMO_STRING, "score", "name of the heads of critic and reward model", DEMO_ANY}, \
    {"advantage_estimator", &(p).advantage_estimator, DEMO_STRING, "gae", "gae, reinforce, rloo, reinforce_baseline, group_norm or dr_grpo", DEMO_ANY}, \
    {"kl_estimator", &(p).kl_estimator, DEMO_STRING, "k1", "k1, k2 or k3", DEMO_ANY}, \
    {"use_kl_loss", &(p).use_kl_loss, DEMO_FLAG, NULL, "the KL term is part of the loss, not of the reward", DEMO_ANY}, \
    {"no_advantage_std_norm", &(p).no_advantage_std_norm, DEMO_FLAG, NULL, "advantages lose their mean only", DEMO_ANY}, \
    {"rollout_batch_size", &(p).rollout_batch_size, DEMO_INT, "32", "prompts of a rollout", DEMO_AT_LEAST(1)}, \
    {"n_samples_per_prompt", &(p).n_samples_per_prompt, DEMO_INT, "1", "texts for every prompt", DEMO_AT_LEAST(1)}, \
    {"num_episodes", &(p).num_episodes, DEMO_INT, "1", "passes over the prompts", DEMO_AT_LEAST(1)}, \
    {"prompt_max_len", &(p).prompt_max_len, DEMO_INT, "1024", "longest prompt, in tokens", DEMO_AT_LEAST(1)}, \
    {"generate_max_len", &(p).generate_max_len, DEMO_INT, "64", "longest text, in tokens", DEMO_AT_LEAST(1)}, \
    {"temperature", &(p).temperature, DEMO_FLOAT, "1", "of sampling", DEMO_ABOVE(0)}, \
    {"top_p", &(p).top_p, DEMO_FLOAT, "1", "share of probability that is sampled from", DEMO_BETWEEN(0, 1)}, \
    {"top_k", &(p).top_k, DEMO_INT, "0", "so many most probable tokens are sampled from; 0: all", DEMO_AT_LEAST(0)}, \
    {"actor_learning_rate", &(p).actor_learning_rate, DEMO_FLOAT, "2e-4", "of the actor", DEMO_ABOVE(0)}, \
    {"critic_learning_rate", &(p).critic_learning_rate, DEMO_FLOAT, "1e-3", "of the critic", DEMO_ABOVE(0)}, \
    {"eps_clip", &(p).eps_clip, DEMO_FLOAT, "0.2", "the ratio is clipped to 1 +- this", DEMO_ABOVE(0)}, \
    {"eps_clip_low_high", &(p).eps_clip_low_high, DEMO_FLOATS2, "0,0", "the two sides apart; 0: eps_clip", DEMO_AT_LEAST(0)}, \
    {"dual_clip", &(p).dual_clip, DEMO_FLOAT, "0", "bound on the ratio where the advantage is negative; 0: none", DEMO_AT_LEAST(0)}, \
    {"value_clip", &(p).value_clip, DEMO_FLOAT, "0.2", "values move at most so far from the old ones; 0: no clip", DEMO_AT_LEAST(0)}, \
    {"lambd", &(p).lambd, DEMO_FLOAT, "0.95", "lambda of GAE", DEMO_BETWEEN(0, 1)}, \
    {"gamma", &(p).gamma, DEMO_FLOAT, "1", "discount of rewards", DEMO_BETWEEN(0, 1)}, \
    {"init_kl_coef", &(p).init_kl_coef, DEMO_FLOAT, "0.01", "coefficient of the KL to the reference", DEMO_AT_LEAST(0)}, \
    {"kl_target", &(p).kl_target, DEMO_FLOAT, "0", "KL that the coefficient is steered to; 0: it is fixed", DEMO_AT_LEAST(0)}, \
    {"kl_horizon", &(p).kl_horizon, DEMO_INT, "10000", "texts over which it is steered", DEMO_AT_LEAST(1)}, \
    {"reward_clip_range", &(p).reward_clip_range, DEMO_FLOATS2, "-10,10", "rewards are clipped to it", DEMO_ANY}, \
    {"entropy_loss_coef", &(p).entropy_loss_coef, DEMO_FLOAT, "0", "weight of the entropy bonus", DEMO_AT_LEAST(0)}, \
    {"freezing_actor_steps", &(p).freezing_actor_steps, DEMO_INT, "-1", "the critic alone learns for so many steps", DEMO_AT_LEAST(-1)}

/* Options that do not go together are refused before anything is read. */
static int demo_ppo_prepare(demo_job *job, char *error, size_t size) {
    const demo_ppo_config *p = job->options;
    job->config.max_len = p->prompt_max_len + p->generate_max_len;
    job->temperature = p->temperature;
    if (!job->config.dataset) return snprintf(error, size, "no prompts; give --prompt_data FILE"), -1;
    if (p->reward_rule && strcmp(p->reward_rule, "last_number")) return snprintf(error, size, "reward_rule %s is unknown; use last_number", p->reward_rule), -1;
    if (p->reward_rule && !p->label_key) return snprintf(error, size, "reward_rule %s compares with a right answer; name it by --label_key", p->reward_rule), -1;
    if (!(p->reward_clip_range[0] < p->reward_clip_range[1])) return snprintf(error, size, "reward_clip_range runs from %g to %g; give the lower bound first", p->reward_clip_range[0], p->reward_clip_range[1]), -1;
    if (job->config.max_epochs < 1 || job->config.max_epochs != floor(job->config.max_epochs)) return snprintf(error, size, "max_epochs is %g; a rollout is gone through a whole number of times, at least once", job->config.max_epochs), -1;
    if (job->config.eval_dataset && !p->label_key) return snprintf(error, size, "an evaluation counts right answers; name them by --label_key"), -1;
    if (!p->reward_rule && !p->reward_pretrain && !p->servers.urls) return snprintf(error, size, "nothing gives a reward; give --reward_pretrain FOLDER, --remote_rm_url URL or --reward_rule last_number"), -1;
    if (p->servers.urls && demo_servers_check(&p->servers, error, size)) return -1;
    if (strcmp(p->advantage_estimator, "gae") && strcmp(p->advantage_estimator, "reinforce") && p->n_samples_per_prompt < 2)
        return snprintf(error, size, "advantage_estimator %s compares texts of one prompt, n_samples_per_prompt is %lld; give 2 or more", p->advantage_estimator, (long long)p->n_samples_per_prompt), -1;
    return 0;
}
#endif
