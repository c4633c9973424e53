/* SPDX-License-Identifier: MIT OR Unlicense */
/* ppo_options.h - the options of train_ppo, and checks for contradictions between them. */
#ifndef DEMO_PPO_OPTIONS_H
#define DEMO_PPO_OPTIONS_H
#include "ppo_config.h"

#ifndef DEMO_MOST_TEXTS
/* limit of texts per rollout: all are in memory during the updates */
#define DEMO_MOST_TEXTS (1 << 24)
#endif

#define DEMO_PPO_BINDINGS(c, p) \
    DEMO_SAMPLING_BINDINGS(p), \
        {"prompt_data", \
         &(c).dataset, \
         DEMO_STRING, \
         NULL, \
         "prompts: a comma list of .jsonl, folders, json@FOLDER; or a token file", \
         DEMO_ANY}, \
        {"prompt_data_probs", \
         &(c).dataset_probs, \
         DEMO_STRING, \
         NULL, \
         "sampling weights of these data sets, a comma list", \
         DEMO_ANY}, \
        {"ref_pretrain", \
         &(p).ref_pretrain, \
         DEMO_STRING, \
         NULL, \
         "folder of the reference model; without it the initial model", \
         DEMO_ANY}, \
        DEMO_ROLE_BINDINGS(p, "actor", DEMO_ACTOR), DEMO_ROLE_BINDINGS(p, "ref", DEMO_REF), \
        DEMO_ROLE_BINDINGS(p, "critic", DEMO_CRITIC), \
        DEMO_ROLE_BINDINGS(p, "reward", DEMO_REWARD), \
        {"colocate_actor_ref", \
         &(p).roles.actor_ref, \
         DEMO_FLAG, \
         NULL, \
         "the reference shares the actor's ranks", \
         DEMO_ANY}, \
        {"colocate_critic_reward", \
         &(p).roles.critic_reward, \
         DEMO_FLAG, \
         NULL, \
         "the reward models share the critic's ranks", \
         DEMO_ANY}, \
        {"colocate_all_models", \
         &(p).roles.all, \
         DEMO_FLAG, \
         NULL, \
         "all models share the actor's ranks", \
         DEMO_ANY}, \
        {"vllm_num_engines", \
         &(p).roles.nodes[DEMO_GENERATOR], \
         DEMO_INT, \
         "0", \
         "groups of ranks that only generate texts; 0: the actor's ranks generate", \
         DEMO_COUNT(0)}, \
        {"vllm_tensor_parallel_size", \
         &(p).roles.per_node[DEMO_GENERATOR], \
         DEMO_INT, \
         "1", \
         "ranks in each of these groups", \
         DEMO_COUNT(1)}, \
        DEMO_OFFLOAD_BINDING(p), \
        {"ref_reward_offload", \
         &(p).ref_reward_offload, \
         DEMO_FLAG, \
         NULL, \
         "--ref_offload for the reference and the reward models", \
         DEMO_ANY}, \
        {"log_samples", \
         &(p).log_samples, \
         DEMO_INT, \
         "0", \
         "number of prompts per rollout whose texts and rewards are printed and logged", \
         DEMO_COUNT(0)}, \
        {"critic_pretrain", \
         &(p).critic_pretrain, \
         DEMO_STRING, \
         NULL, \
         "folder the critic starts from; without it the reward model, or the actor", \
         DEMO_ANY}, \
        {"save_value_network", \
         &(p).save_value_network, \
         DEMO_FLAG, \
         NULL, \
         "also save the critic, in save_path/critic", \
         DEMO_ANY}, \
        {"advantage_estimator", \
         &(p).advantage_estimator, \
         DEMO_STRING, \
         "gae", \
         "gae, reinforce, rloo, reinforce_baseline, group_norm or dr_grpo", \
         DEMO_ANY}, \
        {"kl_estimator", &(p).kl_estimator, DEMO_STRING, NULL, "k1, k2 or k3; without it k1", \
         DEMO_ANY}, \
        {"use_kl_estimator_k3", \
         &(p).use_kl_estimator_k3, \
         DEMO_FLAG, \
         NULL, \
         "the same as --kl_estimator k3", \
         DEMO_ANY}, \
        {"use_kl_loss", \
         &(p).use_kl_loss, \
         DEMO_FLAG, \
         NULL, \
         "add the KL term to the loss, not to the reward", \
         DEMO_ANY}, \
        {"no_advantage_std_norm", \
         &(p).no_advantage_std_norm, \
         DEMO_FLAG, \
         NULL, \
         "subtract the mean of advantages, but do not divide by their standard deviation", \
         DEMO_ANY}, \
        {"rollout_batch_size", &(p).rollout_batch_size, DEMO_INT, "32", "prompts of a rollout", \
         DEMO_COUNT(1)}, \
        {"micro_rollout_batch_size", \
         &(p).micro_rollout_batch_size, \
         DEMO_INT, \
         "0", \
         "texts that a rank generates, and rows that it scores, at a time; 0: 16, and " \
         "micro_train_batch_size", \
         DEMO_COUNT(0)}, \
        {"dynamic_filtering", \
         &(p).dynamic_filtering, \
         DEMO_FLAG, \
         NULL, \
         "replace prompts whose texts have a mean reward outside of the range below by " \
         "further prompts (DAPO)", \
         DEMO_ANY}, \
        {"dynamic_filtering_reward_range", \
         &(p).dynamic_filtering_reward_range, \
         DEMO_FLOATS2, \
         "0,1", \
         "range of mean rewards for --dynamic_filtering; both ends are excluded", \
         DEMO_ANY}, \
        {"eval_temperature", \
         &(p).eval_temperature, \
         DEMO_FLOAT, \
         "0", \
         "temperature of sampling in evaluations; 0: the most probable token", \
         DEMO_BETWEEN(0, 1e30)}, \
        {"eval_n_samples_per_prompt", \
         &(p).eval_n_samples_per_prompt, \
         DEMO_INT, \
         "1", \
         "texts for each prompt of an evaluation", \
         DEMO_COUNT(1)}, \
        {"num_episodes", &(p).num_episodes, DEMO_INT, "1", "passes over the prompts", \
         DEMO_COUNT(1)}, \
        {"generate_max_len",        &(p).generate_max_len, DEMO_INT, "64", \
         "longest text, in tokens", DEMO_COUNT(1)}, \
        {"recompute_old_logp", \
         &(p).recompute_old_logp, \
         DEMO_FLAG, \
         NULL, \
         "recompute the old log-probs in a forward pass, instead of using the sampler's", \
         DEMO_ANY}, \
        {"actor_learning_rate", \
         &(p).actor_learning_rate, \
         DEMO_FLOAT, \
         "2e-4", \
         "learning rate of the actor; with --pretrain 1e-6", \
         DEMO_ABOVE(0)}, \
        {"critic_learning_rate", \
         &(p).critic_learning_rate, \
         DEMO_FLOAT, \
         "1e-3", \
         "learning rate of the critic; with --pretrain 9e-6", \
         DEMO_ABOVE(0)}, \
        {"critic.optim", \
         &(p).critic.optim, \
         DEMO_STRING, \
         NULL, \
         "optimizer of the critic; without it the actor's", \
         DEMO_ANY}, \
        {"critic.adam.betas", &(p).critic.adam_betas, DEMO_FLOATS2, "-1,-1", \
         "-1: the actor's",   DEMO_BETWEEN(0, 1)}, \
        {"critic.adam.eps", &(p).critic.adam_eps,     DEMO_FLOAT, "-1", \
         "-1: the actor's", DEMO_BETWEEN(1e-30, 1e30)}, \
        {"critic.adam.weight_decay", &(p).critic.l2,  DEMO_FLOAT, "-1", \
         "-1: the actor's",          DEMO_AT_LEAST(0)}, \
        {"critic.max_norm", &(p).critic.max_norm, DEMO_FLOAT, "-1", \
         "-1: the actor's", DEMO_AT_LEAST(0)}, \
        {"critic.lr_scheduler", \
         &(p).critic.lr_scheduler, \
         DEMO_STRING, \
         NULL, \
         "without it the actor's", \
         DEMO_ANY}, \
        {"critic.lr_warmup_ratio",  &(p).critic.lr_warmup_ratio, DEMO_FLOAT, "-1", \
         "-1: the actor's warm-up", DEMO_BETWEEN(0, 1)}, \
        {"critic.min_lr_ratio", &(p).critic.min_lr_ratio, DEMO_FLOAT, "-1", \
         "-1: the actor's",     DEMO_BETWEEN(0, 1)}, \
        {"policy_loss_type", \
         &(p).policy_loss_type, \
         DEMO_STRING, \
         "ppo", \
         "ppo: a ratio for each token; gspo: one ratio for the whole text, and a mean over " \
         "texts", \
         DEMO_ANY}, \
        {"loss_agg_mode", \
         &(p).loss_agg_mode, \
         DEMO_STRING, \
         NULL, \
         "the policy loss is a mean over the step's tokens, over texts of the mean over " \
         "their tokens, or over texts of the sum divided by generate_max_len (Dr. GRPO); " \
         "without it: over tokens, for gspo over texts", \
         DEMO_ANY}, \
        {"eps_clip",   &(p).eps_clip, DEMO_FLOAT, "0.2", "the ratio is clipped to 1 +- this", \
         DEMO_ABOVE(0)}, \
        {"eps_clip_low_high", \
         &(p).eps_clip_low_high, \
         DEMO_FLOATS2, \
         "0,0", \
         "lower and upper clip, instead of one eps_clip; 0: eps_clip", \
         DEMO_AT_LEAST(0)}, \
        {"dual_clip", \
         &(p).dual_clip, \
         DEMO_FLOAT, \
         "0", \
         "bound on the ratio where the advantage is negative; 0: none; with TRL's " \
         "definition delta, which bounds it for any advantage", \
         DEMO_AT_LEAST(0)}, \
        {"value_clip", \
         &(p).value_clip, \
         DEMO_FLOAT, \
         "0.2", \
         "clip of the difference between new and old values; 0: no clip", \
         DEMO_AT_LEAST(0)}, \
        {"lambd", &(p).lambd, DEMO_FLOAT, "0.95", "lambda of GAE", DEMO_BETWEEN(0, 1)}, \
        {"gamma", &(p).gamma, DEMO_FLOAT, "1", "discount of rewards", DEMO_BETWEEN(0, 1)}, \
        {"init_kl_coef", \
         &(p).init_kl_coef, \
         DEMO_FLOAT, \
         "0.01", \
         "coefficient of the KL to the reference", \
         DEMO_AT_LEAST(0)}, \
        {"kl_target", \
         &(p).kl_target, \
         DEMO_FLOAT, \
         "0", \
         "target KL of an adaptive KL coefficient; 0: the coefficient is fixed", \
         DEMO_AT_LEAST(0)}, \
        {"kl_horizon", \
         &(p).kl_horizon, \
         DEMO_INT, \
         "10000", \
         "horizon of the adaptive KL coefficient, in texts", \
         DEMO_COUNT(1)}, \
        {"reward_clip_range", \
         &(p).reward_clip_range, \
         DEMO_FLOATS2, \
         "-10,10", \
         "range that rewards are clipped to", \
         DEMO_ANY}, \
        {"normalize_reward", \
         &(p).normalize_reward, \
         DEMO_FLAG, \
         NULL, \
         "normalize scores of reward models by the mean and standard deviation that " \
         "train_rm measured (on its evaluation data, or a part of its training data)", \
         DEMO_ANY}, \
        {"overlong_buffer_len", \
         &(p).overlong_buffer_len, \
         DEMO_FLOAT, \
         "0", \
         "overlong penalty: reward falls linearly over the last N tokens of " \
         "generate_max_len; 0: none", \
         DEMO_AT_LEAST(0)}, \
        {"overlong_penalty_factor", \
         &(p).overlong_penalty_factor, \
         DEMO_FLOAT, \
         "1", \
         "overlong penalty at generate_max_len tokens", \
         DEMO_AT_LEAST(0)}, \
        {"reward.stop_properly_penalty_coef", \
         &(p).stop_properly_penalty_coef, \
         DEMO_FLOAT, \
         "1", \
         "reward of a text that is cut off at generate_max_len: multiplied by this, or " \
         "replaced by it if it is negative", \
         {-HUGE_VAL, 1, false}}, \
        {"pretrain_data", \
         &(p).pretrain_data, \
         DEMO_STRING, \
         NULL, \
         "pretraining data, all of whose tokens the actor is also trained on (PTX loss): " \
         ".txt or .jsonl, a comma list", \
         DEMO_ANY}, \
        {"pretrain_data_probs", \
         &(p).pretrain_data_probs, \
         DEMO_STRING, \
         NULL, \
         "sampling weights of these data sets, a comma list", \
         DEMO_ANY}, \
        {"ptx_coef", \
         &(p).ptx_coef, \
         DEMO_FLOAT, \
         "0.05", \
         "weight of the PTX loss, a mean over the tokens of train_batch_size documents per " \
         "step", \
         DEMO_AT_LEAST(0)}, \
        {"entropy_loss_coef",           &(p).entropy_loss_coef, DEMO_FLOAT, "0", \
         "weight of the entropy bonus", DEMO_AT_LEAST(0)}, \
    { \
        "freezing_actor_steps", &(p).freezing_actor_steps, DEMO_INT, "-1", \
            "train only the critic in the first N rollouts, as in OpenRLHF", DEMO_COUNT(-1) \
    }

/* ---- contradictions, refused before data is read: 0, or -1 with a message ---- */

/* tokens: the prompts are in a token file, which also has the right answers. */
static int demo_ppo_rewards_check(const demo_ppo_config *p, bool tokens, demo_error *error) {
    if (!p->reward_rule && !p->reward_pretrain && !p->servers.urls)
        return demo_fail(error, "no reward; give --reward_pretrain FOLDER, --remote_rm_url "
                                "URL or --reward_rule last_number");
    if (p->reward_rule && !p->label_key && !tokens)
        return demo_fail(error,
                         "reward_rule %s compares with the right answer; name its key by "
                         "--label_key",
                         p->reward_rule);
    if (p->servers.urls && demo_servers_check(&p->servers, error)) return -1;
    if (p->normalize_reward && !p->reward_pretrain)
        return demo_fail(error, "normalize_reward normalizes scores of reward models; give "
                                "--reward_pretrain FOLDER or leave it out");
    if (!(p->reward_clip_range[0] < p->reward_clip_range[1]))
        return demo_fail(error,
                         "reward_clip_range runs from %g to %g; give the lower bound first",
                         p->reward_clip_range[0], p->reward_clip_range[1]);
    if (p->overlong_buffer_len > (double)p->generate_max_len)
        return demo_fail(
            error, "overlong_buffer_len %g is longer than generate_max_len %lld; lower it",
            p->overlong_buffer_len, (long long)p->generate_max_len);
    if (!(p->overlong_buffer_len > 0) &&
        (p->overlong_penalty_factor < 1 || p->overlong_penalty_factor > 1))
        return demo_fail(error,
                         "overlong_penalty_factor %g needs the number of tokens over which "
                         "it grows; give --overlong_buffer_len TOKENS",
                         p->overlong_penalty_factor);
    return 0;
}

/* Checks the number of texts per prompt against estimator and filtering, which compare the
   texts of a prompt. */
static int demo_ppo_groups_check(const demo_ppo_config *p, demo_error *error) {
    const double *range = p->dynamic_filtering_reward_range;
    int alone = p->n_samples_per_prompt < 2;
    int compared = strcmp(p->advantage_estimator, "gae") &&
                   strcmp(p->advantage_estimator, "reinforce");
    if (p->rollout_batch_size * p->n_samples_per_prompt > DEMO_MOST_TEXTS)
        return demo_fail(
            error,
            "rollout_batch_size %lld x n_samples_per_prompt %lld are more than the limit of "
            "%d texts per rollout; lower one of them",
            (long long)p->rollout_batch_size, (long long)p->n_samples_per_prompt,
            DEMO_MOST_TEXTS);
    if (compared && alone)
        return demo_fail(error,
                         "advantage_estimator %s compares texts of one prompt, "
                         "n_samples_per_prompt is %lld; give 2 or more",
                         p->advantage_estimator, (long long)p->n_samples_per_prompt);
    if (p->dynamic_filtering && alone)
        return demo_fail(error,
                         "dynamic_filtering looks at the mean reward of a prompt's texts, "
                         "n_samples_per_prompt is %lld; give 2 or more",
                         (long long)p->n_samples_per_prompt);
    if (!(range[0] < range[1]))
        return demo_fail(error,
                         "dynamic_filtering_reward_range runs from %g to %g; give the lower "
                         "bound first",
                         range[0], range[1]);
    if (p->eval_n_samples_per_prompt > 1 && !(p->eval_temperature > 0))
        return demo_fail(error,
                         "eval_n_samples_per_prompt is %lld, but the most probable tokens "
                         "always make the same text; give an --eval_temperature above 0",
                         (long long)p->eval_n_samples_per_prompt);
    return 0;
}

static int demo_ppo_models_check(const demo_job *job, demo_error *error) {
    const demo_ppo_config *p = (const demo_ppo_config *)job->options;
    if (p->use_kl_estimator_k3 && p->kl_estimator && strcmp(p->kl_estimator, "k3"))
        return demo_fail(error,
                         "use_kl_estimator_k3 contradicts kl_estimator %s; drop one of them",
                         p->kl_estimator);
    if (p->save_value_network && strcmp(p->advantage_estimator, "gae"))
        return demo_fail(error,
                         "save_value_network: advantage_estimator %s has no critic to save; "
                         "leave it out or use gae",
                         p->advantage_estimator);
    if (p->pretrain_data && (p->temperature < 1 || p->temperature > 1))
        return demo_fail(error,
                         "pretrain_data needs temperature 1, but temperature is %g, and a "
                         "step has one temperature for all log-probs; leave out one of them",
                         p->temperature);
    if (job->config.max_epochs < 1 || job->config.max_epochs != floor(job->config.max_epochs))
        return demo_fail(error,
                         "max_epochs is %g, but the passes over a rollout must be a whole "
                         "number of at least 1",
                         job->config.max_epochs);
    if (job->config.eval_dataset && !p->label_key &&
        !demo_is_token_file(job->config.eval_dataset))
        return demo_fail(error, "an evaluation compares with the right answers; name their "
                                "key by --label_key");
    return 0;
}

/* Computes the groups of ranks from the options of the roles. */
static int demo_ppo_roles(demo_job *job, demo_error *error) {
    static const char *const names[DEMO_ROLES][2] = {
        {"actor_num_nodes", "actor_num_gpus_per_node"},
        {"ref_num_nodes", "ref_num_gpus_per_node"},
        {"critic_num_nodes", "critic_num_gpus_per_node"},
        {"reward_num_nodes", "reward_num_gpus_per_node"},
        {"vllm_num_engines", "vllm_tensor_parallel_size"}};
    demo_ppo_config *p = (demo_ppo_config *)job->options;
    demo_roles *roles = &p->roles;
    for (int i = 0; i < DEMO_ROLES; i++)
        if ((double)roles->nodes[i] * (double)roles->per_node[i] > (double)SEQPAR_MAX_RANKS)
            return demo_fail(
                error,
                "%s %lld x %s %lld are more than the limit of %lld ranks per group; lower "
                "one of them",
                names[i][0], (long long)roles->nodes[i], names[i][1],
                (long long)roles->per_node[i], (long long)SEQPAR_MAX_RANKS);
    int64_t sp = job->config.ring_attn_size, dp = job->config.data_parallel_size;
    bool asked = roles->nodes[DEMO_GENERATOR] > 0 && !roles->all;
    for (int i = DEMO_ACTOR; i <= DEMO_REWARD; i++) asked |= roles->per_node[i] > 0;
    if (!roles->per_node[DEMO_ACTOR]) /* by default as many ranks as a run without groups has */
        roles->nodes[DEMO_ACTOR] = 1,
        roles->per_node[DEMO_ACTOR] = asked ? sp * (dp ? dp : 1) : 0;
    demo_roles_lay(roles, !strcmp(p->advantage_estimator, "gae"), p->reward_pretrain != NULL);
    job->groups = asked ? roles->groups : 0;
    for (int i = 0; i < job->groups; i++) job->group_ranks[i] = roles->ranks[i];
    return 0;
}

/* Refuses options that would cut prompts: the meaning of a prompt can change when it is cut. */
static int demo_ppo_lengths_check(const demo_job *job, demo_error *error) {
    const demo_ppo_config *p = (const demo_ppo_config *)job->options;
    if (demo_job_typed(job, "max_len") &&
        job->config.max_len < p->prompt_max_len + p->generate_max_len)
        return demo_fail(
            error,
            "--%s is %lld, but prompt_max_len %lld + generate_max_len %lld are more "
            "tokens; lower one of them, or leave it out",
            demo_job_spelled(job, "max_len"), (long long)job->config.max_len,
            (long long)p->prompt_max_len, (long long)p->generate_max_len);
    if (job->config.truncation && strcmp(job->config.truncation, "drop") && !p->pretrain_data)
        return demo_fail(error,
                         "--truncation %s: prompts are never cut, and longer ones are left "
                         "out; leave the option out, or raise --prompt_max_len",
                         job->config.truncation);
    return 0;
}

/* Refuses options that the definition of the loss does not have. */
static int demo_ppo_defined(const demo_job *job, demo_error *error) {
    const demo_ppo_config *p = (const demo_ppo_config *)job->options;
    const demo_definition *by = demo_definition_of(job);
    bool grouped = strcmp(p->advantage_estimator, "gae");
    const struct {
        const char *list, *option, *value;
    } asked[] = {
        {by->estimators, "advantage_estimator", p->advantage_estimator},
        {by->policies, "policy_loss_type", p->policy_loss_type},
        {by->means, "loss_agg_mode", p->loss_agg_mode},
        {by->bounded ? "above 0" : "", "dual_clip", p->dual_clip > 0 ? "above 0" : NULL},
        {by->centers_only ? "true" : "", "no_advantage_std_norm",
         p->no_advantage_std_norm ? "true" : NULL}};
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++)
        if (asked[i].value &&
            demo_definition_has(job, asked[i].list, asked[i].option, asked[i].value, error))
            return -1;
    if (by == &demo_definitions[DEMO_DEFINED_OPENRLHF] && p->loss_agg_mode &&
        !strcmp(p->policy_loss_type, "gspo") && strcmp(p->loss_agg_mode, "seq-mean-token-mean"))
        return demo_fail(error,
                         "--loss_agg_mode %s is not defined for gspo by OpenRLHF, whose gspo "
                         "is a mean over texts; leave it out",
                         p->loss_agg_mode);
    /* TRL has a separate trainer for PPO with a critic, which lacks these options */
    if (by == &demo_definitions[DEMO_DEFINED_TRL] && !grouped &&
        (p->dual_clip > 0 || p->loss_agg_mode || strcmp(p->policy_loss_type, "ppo")))
        return demo_fail(error,
                         "dual_clip, loss_agg_mode and policy_loss_type gspo are of TRL's "
                         "GRPO, which has no critic; leave them out, or give "
                         "--advantage_estimator group_norm");
    return 0;
}

static bool demo_is_gspo(const demo_ppo_config *p) {
    return !strcmp(p->policy_loss_type, "gspo");
}

static void demo_ppo_text(const demo_job *job, char *text, size_t size) {
    static const char *const over[] = {"the step's tokens", "texts and their tokens", "texts",
                                       "texts and generate_max_len"};
    const demo_ppo_config *p = (const demo_ppo_config *)job->options;
    const demo_definition *by = demo_definition_of(job);
    bool gspo = demo_is_gspo(p);
    int mean = demo_defined_mean(by, p->loss_agg_mode, gspo, p->advantage_estimator);
    size_t used = (size_t)snprintf(
        text, size, "%s, a mean over %s, log-ratios %s", p->policy_loss_type, over[mean],
        (gspo ? by->uncut_gspo : by->uncut) ? "not cut" : "cut at +-20");
    if (p->dual_clip > 0)
        used += (size_t)snprintf(text + used, size - used, ", ratios bounded by %g for %s",
                                 p->dual_clip,
                                 by->both_signs ? "any advantage" : "negative advantages");
    if (!strcmp(p->advantage_estimator, "group_norm"))
        used += (size_t)snprintf(text + used, size - used, ", by a group's deviation + %g",
                                 by->group_eps);
    if (demo_list_has("gae,reinforce,reinforce_baseline", p->advantage_estimator) &&
        !p->no_advantage_std_norm)
        used += (size_t)snprintf(text + used, size - used, ", advantages whitened over %s",
                                 by->whiten == WHITEN_UNBIASED ? "n - 1" : "n");
    if (by->kl_limit > 0)
        snprintf(text + used, size - used, ", KL of a token within +-%g", by->kl_limit);
}

static int demo_ppo_prepare(demo_job *job, demo_error *error) {
    demo_ppo_config *p = (demo_ppo_config *)job->options;
    if (!job->config.dataset) return demo_fail(error, "no prompts; give --prompt_data FILE");
    bool tokens = demo_is_token_file(job->config.dataset);
    if (demo_ppo_defined(job, error)) return -1;
    if (demo_ppo_rewards_check(p, tokens, error) || demo_ppo_groups_check(p, error) ||
        demo_ppo_models_check(job, error))
        return -1;
    if (demo_ppo_roles(job, error) || demo_ppo_lengths_check(job, error)) return -1;
    if (!p->kl_estimator) p->kl_estimator = p->use_kl_estimator_k3 ? "k3" : "k1";
    job->config.max_len = p->prompt_max_len + p->generate_max_len;
    job->temperature = p->temperature;
    job->micro_values = p->micro_rollout_batch_size;
    p->servers.interrupted = &demo_interrupted;
    return 0;
}
#endif
