/* SPDX-License-Identifier: MIT OR Unlicense */
/* ppo_config.h - the options for sampling texts, scoring them and training on them. */
#ifndef DEMO_PPO_CONFIG_H
#define DEMO_PPO_CONFIG_H
#include "trainer/objective/preference.h"
#include "roles.h"
#include "reward_server.h"

typedef struct {
    const char *input_key, *label_key, *ref_pretrain, *reward_pretrain, *reward_rule;
    const char *critic_pretrain, *value_head_prefix, *advantage_estimator, *kl_estimator;
    const char *policy_loss_type, *loss_agg_mode, *pretrain_data, *pretrain_data_probs;
    bool use_kl_loss, use_kl_estimator_k3, no_advantage_std_norm, normalize_reward,
        recompute_old_logp, dynamic_filtering, save_value_network, ref_offload,
        ref_reward_offload;
    int64_t rollout_batch_size, micro_rollout_batch_size, n_samples_per_prompt;
    int64_t eval_n_samples_per_prompt, num_episodes, prompt_max_len, generate_max_len;
    int64_t kl_horizon, freezing_actor_steps, top_k, log_samples;
    double actor_learning_rate, critic_learning_rate, eps_clip, value_clip, lambd, gamma;
    double init_kl_coef, kl_target, temperature, eval_temperature, top_p, dual_clip;
    double entropy_loss_coef, ptx_coef;
    double reward_clip_range[2], eps_clip_low_high[2], dynamic_filtering_reward_range[2];
    double overlong_buffer_len, overlong_penalty_factor, stop_properly_penalty_coef;
    demo_reward_servers servers;
    demo_roles roles;
    struct { /* options of the critic; the default is the actor's value */
        const char *optim, *lr_scheduler;
        double adam_betas[2], adam_eps, l2, max_norm, lr_warmup_ratio, min_lr_ratio;
    } critic;
    demo_dataset pretraining; /* the data of pretrain_data */
} demo_ppo_config;

/* Options of all programs that sample and score texts. */
#define DEMO_SAMPLING_BINDINGS(p) \
    {"input_key", &(p).input_key, DEMO_STRING, "input", "JSON key of the prompt", DEMO_ANY}, \
        {"label_key", \
         &(p).label_key, \
         DEMO_STRING, \
         NULL, \
         "JSON key of the right answer, for --reward_rule, reward servers and evaluations", \
         DEMO_ANY}, \
        {"reward_pretrain", \
         &(p).reward_pretrain, \
         DEMO_STRING, \
         NULL, \
         "folders of reward models, a comma list; their scores are added", \
         DEMO_ANY}, \
        {"reward_rule", \
         &(p).reward_rule, \
         DEMO_STRING, \
         NULL, \
         "last_number: 1 if the text's last number is the label's, else 0", \
         DEMO_ANY}, \
        {"remote_rm_url", \
         &(p).servers.urls, \
         DEMO_STRING, \
         NULL, \
         "URLs of HTTP reward servers, a comma list; their rewards are added", \
         DEMO_ANY}, \
        {"remote_rm_timeout", \
         &(p).servers.timeout, \
         DEMO_FLOAT, \
         "180", \
         "timeout for a server's answer, in seconds", \
         {0, 1e6, true}}, \
        {"remote_rm_retries", \
         &(p).servers.retries, \
         DEMO_INT, \
         "4", \
         "retries if a server cannot be reached or is busy", \
         DEMO_COUNT(0)}, \
        {"remote_rm_backoff", \
         &(p).servers.backoff, \
         DEMO_FLOAT, \
         "1", \
         "seconds before the first retry, doubled for each further one, at most 60", \
         DEMO_BETWEEN(0, 60)}, \
        {"value_head_prefix", \
         &(p).value_head_prefix, \
         DEMO_STRING, \
         "score", \
         "name of the heads of critic and reward model", \
         DEMO_ANY}, \
        {"n_samples_per_prompt", \
         &(p).n_samples_per_prompt, \
         DEMO_INT, \
         "1", \
         "texts for each prompt", \
         DEMO_COUNT(1)}, \
        {"prompt_max_len", &(p).prompt_max_len,         DEMO_INT, \
         "1024",           "longest prompt, in tokens", DEMO_COUNT(1)}, \
        {"temperature", &(p).temperature,          DEMO_FLOAT, \
         "1",           "temperature of sampling", {0, 1e30, true}}, \
        {"top_p", \
         &(p).top_p, \
         DEMO_FLOAT, \
         "1", \
         "nucleus sampling: sample from the most probable tokens that have this " \
         "probability together", \
         DEMO_BETWEEN(0, 1)}, \
    { \
        "top_k", &(p).top_k, DEMO_INT, "0", "sample from the N most probable tokens; 0: all", \
            DEMO_COUNT(0) \
    }
#endif
