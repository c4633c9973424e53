# SPDX-License-Identifier: MIT OR Unlicense
# pip install torch; pip download --no-deps --dest FOLDER openrlhf==0.11.2 openrlhf==0.8.11 \
#     trl==1.16.0 trl==0.24.0 trl==0.18.0 trl==0.9.6 trl==0.8.6 llamafactory==0.9.5
# python verify/second/golden/definitions.py FOLDER > verify/second/golden_definitions.tsv
"""What OpenRLHF, TRL and LLaMA-Factory make of the same small numbers, in float64, with torch's
own derivatives. Their functions are read from the wheels and run as they are, without the rest
of the packages, which needs GPUs. Nothing of them is kept but the numbers."""
import ast
import math
import pathlib
import sys
import textwrap
import types
import zipfile
from collections import defaultdict
from types import SimpleNamespace

import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
torch.Tensor.float = torch.Tensor.double  # OpenRLHF rounds to float32 in places
FOLDER = pathlib.Path(sys.argv[1])

# ---- functions out of wheels ----


def text_of(package, path):
    wheel = next(FOLDER.glob(package + "-*.whl"))
    with zipfile.ZipFile(wheel) as files:
        name = next(n for n in files.namelist() if n.endswith("/" + path) or n == path)
        return files.read(name).decode()


def taken(package, path, *names, **known):
    """The functions and classes of these names, of methods those that come first."""
    known = {"torch": torch, "F": F, "nn": torch.nn, "math": math, **known}
    source = text_of(package, path)
    kinds = (ast.FunctionDef, ast.ClassDef)
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, kinds)]
    for name in names:
        node = next(n for n in nodes if n.name == name)
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
        body = "from __future__ import annotations\n" + ast.unparse(node)
        exec(compile(body, f"{package}/{path}", "exec"), known)
    return SimpleNamespace(**{name: known[name] for name in names})


# ---- rows ----


def shown(value):
    return ",".join(
        repr(float(x)).removesuffix(".0") for x in torch.as_tensor(value).reshape(-1))


def row(what, program, package, inputs, expected, **parameters):
    parameters = {"program": program, "package": package, **parameters}
    fields = [{k: v if isinstance(v, str) else shown(v) for k, v in d.items()}
              for d in (parameters, inputs, expected)]
    print("\t".join([what, *(" ".join(f"{k}={v}" for k, v in d.items()) for d in fields)]))


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


# ---- pairs: three of them, sums of log-probs and lengths of responses ----

CHOSEN, REJECTED = (-12.5, -7.25, -31.0), (-15.25, -6.5, -30.0)
REF = torch.tensor([-13.0, -7.75, -30.5]), torch.tensor([-14.5, -6.75, -31.25])
LENGTHS = torch.tensor([5, 3, 11]), torch.tensor([8, 2, 9])
BETA, GAMMA = 0.3, 0.5


def pair_row(what, program, package, loss_of, **parameters):
    chosen, rejected = leaf(*CHOSEN), leaf(*REJECTED)
    loss = loss_of(chosen, rejected)
    loss.backward()
    row(what, program, package,
        dict(chosen=chosen.detach(), rejected=rejected.detach(), ref_chosen=REF[0],
             ref_rejected=REF[1], chosen_length=LENGTHS[0], rejected_length=LENGTHS[1]),
        dict(loss=loss.detach(), dchosen=chosen.grad, drejected=rejected.grad), beta=BETA,
        **parameters)


def openrlhf_pairs():
    utils = taken("openrlhf-0.11.2", "models/utils.py", "masked_mean", Optional=None)
    code = taken("openrlhf-0.11.2", "models/loss.py", "DPOLoss", Optional=None, Tuple=None,
                 masked_mean=utils.masked_mean)
    old = taken("openrlhf-0.8.11", "models/loss.py", "VanillaKTOLoss")
    trainer = taken("openrlhf-0.11.2", "trainer/dpo_trainer.py", "concatenated_forward",
                    "_get_batch_logps")

    def dpo(smoothing=0.0, ipo=False, nll=0.0):
        """As its train loop adds the terms up: the loss by the sums, the NLL by their means."""

        def loss(chosen, rejected):
            value = code.DPOLoss(BETA, smoothing, ipo)(chosen, rejected, *REF)[0]
            return value + nll * nll_of(chosen) if nll else value

        return loss

    def nll_of(chosen):
        """concatenated_forward, with log-probs that are spread evenly over the responses."""
        n, width = LENGTHS[0], int(LENGTHS[0].max())
        at = torch.arange(width)[None]
        mask = torch.cat((torch.ones(3, 1), (at < n[:, None]).double()), 1)
        logp = torch.where(at < n[:, None], (chosen / n)[:, None], 0.0)
        model = lambda *_, **__: (torch.cat((logp, logp)), {})
        this = SimpleNamespace(
            concatenated_inputs=lambda *_: (None, torch.cat((mask, mask)), [1] * 6),
            strategy=SimpleNamespace(ring_attn_group=None),
            _get_batch_logps=lambda *a: trainer._get_batch_logps(None, *a))
        return trainer.concatenated_forward(this, model, mask, mask, mask, mask, None)[3]

    name = "openrlhf-0.11.2"
    pair_row("sigmoid", "openrlhf", name, dpo())
    pair_row("sigmoid", "openrlhf", name, dpo(0.1), label_smoothing=0.1)
    pair_row("ipo", "openrlhf", name, dpo(ipo=True))
    pair_row("sigmoid", "openrlhf", name, dpo(nll=0.7), nll_coef=0.7)
    pair_row("kto_pair", "openrlhf", "openrlhf-0.8.11",
             lambda c, r: old.VanillaKTOLoss(BETA)(c, r, *REF)[0])


def trl_pairs():
    code = taken("trl-1.16.0", "trainer/dpo_trainer.py", "_compute_loss")

    def dpo(kinds=("sigmoid",), weights=(1.0,), smoothing=0.0):
        """_compute_loss, with log-probs that are spread evenly over the responses."""

        def loss(chosen, rejected):
            n, width = torch.cat(LENGTHS), int(torch.cat(LENGTHS).max())
            live = (torch.arange(width)[None] < n[:, None]).double()
            logp = live * (torch.cat((chosen, rejected)) / n)[:, None]
            mask = torch.cat((torch.zeros(6, 1), live), 1)
            outputs = SimpleNamespace(log_probs=logp, entropy=live, mean_logits=live,
                                      is_top1=live.bool())
            this = SimpleNamespace(
                model=SimpleNamespace(training=True), aux_loss_enabled=False, ld_alpha=None,
                accelerator=SimpleNamespace(device="cpu", gather=lambda x: x,
                                            gather_for_metrics=lambda x: x),
                precompute_ref_logps=True, beta=BETA, f_divergence_type="reverse_kl",
                loss_types=kinds, loss_weights=weights, label_smoothing=smoothing,
                use_weighting=False, _tp_size=1, _total_train_tokens=0,
                _metrics=defaultdict(lambda: defaultdict(list)), args=SimpleNamespace())
            batch = dict(input_ids=mask.long(), attention_mask=mask, completion_mask=mask,
                         ref_chosen_logps=REF[0], ref_rejected_logps=REF[1])
            return code._compute_loss(this, lambda **_: outputs, batch, False)

        return loss

    name = "trl-1.16.0"
    pair_row("sigmoid", "trl", name, dpo())
    pair_row("ipo", "trl", name, dpo(("ipo",)))
    pair_row("hinge", "trl", name, dpo(("hinge",)))
    pair_row("robust", "trl", name, dpo(("robust",), smoothing=0.1), label_smoothing=0.1)
    pair_row("sigmoid", "trl", name, dpo(("sigmoid", "sft"), (1.0, 0.7)), nll_coef=0.7)


def llamafactory_pairs():
    path = "train/dpo/trainer.py"
    enough = {"Optional": None, "Union": None, "Literal": None, "override": lambda f: f}
    divergence = SimpleNamespace(ALPHA_DIVERGENCE=SimpleNamespace(value="alpha"),
                                 JS_DIVERGENCE=SimpleNamespace(value="js"))

    def dpo(kind, smoothing=0.0, ftx=0.0, trl="trl-0.18.0"):
        """get_batch_loss_metrics, with sums in the place of a model's."""
        theirs = taken(trl, "trainer/dpo_trainer.py", "dpo_loss", FDivergenceType=divergence,
                       Tuple=None, Literal=None)

        def loss(chosen, rejected):
            sums = [torch.cat((chosen, rejected)), torch.cat(REF)]
            code = taken("llamafactory-0.9.5", path, "get_batch_loss_metrics",
                         "concatenated_forward", "compute_preference_loss", "simpo_loss",
                         "compute_reference_log_probs",
                         nested_detach=lambda batch, **_: dict(batch), **enough,
                         nullcontext=__import__("contextlib").nullcontext,
                         get_batch_logps=lambda **_: (sums.pop(0), torch.cat(LENGTHS)))
            logits = SimpleNamespace(logits=torch.zeros(6, 1, 1))
            model = lambda **_: logits
            this = SimpleNamespace(
                finetuning_args=SimpleNamespace(use_ref_model=kind != "simpo"), ld_alpha=None,
                loss_type=kind, beta=BETA, simpo_gamma=GAMMA, label_smoothing=smoothing,
                reference_free=False, f_divergence_type="reverse_kl", bco_gemma=0.0,
                ftx_gamma=ftx, accelerator=SimpleNamespace(device="cpu"), ref_model=model)
            for name, function in vars(code).items():
                setattr(this, name, types.MethodType(function, this))
            this.dpo_loss = types.MethodType(theirs.dpo_loss, this)
            batch = dict(labels=torch.zeros(6, 2), input_ids=torch.zeros(6, 2))
            return this.get_batch_loss_metrics(model, batch)[0]

        return loss

    name = "llamafactory-0.9.5+"
    pair_row("sigmoid", "llamafactory", name + "trl-0.18.0", dpo("sigmoid"))
    pair_row("sigmoid", "llamafactory", name + "trl-0.18.0", dpo("sigmoid", 0.1),
             label_smoothing=0.1)
    pair_row("hinge", "llamafactory", name + "trl-0.18.0", dpo("hinge"))
    pair_row("ipo", "llamafactory", name + "trl-0.18.0", dpo("ipo"))
    pair_row("simpo", "llamafactory", name + "trl-0.18.0", dpo("simpo"), gamma=GAMMA)
    pair_row("sigmoid", "llamafactory", name + "trl-0.18.0", dpo("sigmoid", ftx=0.7),
             nll_coef=0.7)
    pair_row("kto_pair", "llamafactory", name + "trl-0.8.6", dpo("kto_pair", trl="trl-0.8.6"))


# ---- policies: two texts of 4 and 2 tokens; one log-ratio is beyond 20 ----

LOGP, OLD = (-1.0, -0.5, -2.0, -0.9, -3.0, -0.25), (-1.3, -0.4, -1.95, -0.5, -1.5, -2.5)
SIZES, CLIP = (4, 2), 0.2
ADVANTAGES = (0.7, -1.1)


def padded(flat, fill=0.0):
    return torch.nn.utils.rnn.pad_sequence(list(flat.split(SIZES)), batch_first=True,
                                           padding_value=fill)


def policy_row(mode, program, package, loss_of, advantages=ADVANTAGES, old=OLD, **parameters):
    logp, old = leaf(*LOGP), torch.tensor(old)
    loss = loss_of(padded(logp), padded(old), torch.tensor(advantages)[:, None])
    loss.backward()
    row("policy", program, package,
        dict(logp=logp.detach(), old_logp=old, advantages=advantages, length=SIZES),
        dict(loss=loss.detach(), dlogp=logp.grad), mean=mode, clip=CLIP, **parameters)


MASK = padded(torch.ones(sum(SIZES)))
ABOVE = (LOGP[0] - 21.0, *OLD[1:])  # log-ratios of 21, of -21, and of 21 and 24.25
BELOW = (LOGP[0] + 21.0, *OLD[1:])
ABOVE_MEAN = (*OLD[:4], LOGP[4] - 21.0, LOGP[5] - 24.25)


def openrlhf_policies():
    masked_mean = taken("openrlhf-0.11.2", "models/utils.py", "masked_mean",
                        Optional=None).masked_mean
    code = taken("openrlhf-0.11.2", "models/loss.py", "aggregate_loss", "PolicyLoss",
                 Optional=None, masked_mean=masked_mean)

    def policy(**how):
        return lambda logp, old, a: code.PolicyLoss(CLIP, CLIP, **how)(
            logp, old, a.expand_as(logp), MASK)[0]

    name = "openrlhf-0.11.2"
    policy_row("token-mean", "openrlhf", name, policy())
    policy_row("seq-mean-token-mean", "openrlhf", name, policy(token_level_loss=False))
    policy_row("token-mean", "openrlhf", name, policy(dual_clip=3.0), bound=3.0)
    policy_row("token-mean", "openrlhf", name, policy(dual_clip=1.1), bound=1.1)
    policy_row("token-mean", "openrlhf", name, policy(), old=BELOW)
    policy_row("token-mean", "openrlhf", name, policy(), (-0.7, 1.1), ABOVE)
    policy_row("gspo", "openrlhf", name, policy(policy_loss_type="gspo"))
    policy_row("gspo", "openrlhf", name, policy(policy_loss_type="gspo"),
               old=ABOVE_MEAN)


def trl_policies():
    metrics = taken("trl-1.16.0", "trainer/utils.py", "nanmin", "nanmax")
    code = taken("trl-1.16.0", "trainer/grpo_trainer.py", "_compute_loss", **vars(metrics))
    identity = lambda x, **_: x

    def policy(kind, delta=None, level="token"):

        def loss(logp, old, a):
            this = SimpleNamespace(
                _get_per_token_logps_and_entropies=lambda *_, **__: (logp, MASK, None),
                aux_loss_enabled=False, top_entropy_quantile=1.0,
                off_policy_mask_threshold=None, importance_sampling_level=level, beta=0.0,
                loss_type=kind, epsilon_low=CLIP, epsilon_high=CLIP, use_vllm=False,
                args=SimpleNamespace(delta=delta, steps_per_generation=1),
                model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
                accelerator=SimpleNamespace(num_processes=1, gather=identity, reduce=identity,
                                            gather_for_metrics=identity, sync_gradients=True),
                max_completion_length=8, _entropy_bonus_enabled=False,
                _metrics=defaultdict(lambda: defaultdict(list)))
            inputs = dict(prompt_ids=MASK[:, :1], prompt_mask=MASK[:, :1],
                          completion_ids=MASK, completion_mask=MASK, advantages=a[:, 0],
                          old_per_token_logps=old, num_items_in_batch=MASK.sum())
            return code._compute_loss(this, None, inputs)

        return loss

    name = "trl-1.16.0"
    policy_row("token-mean", "trl", name, policy("dapo"))
    policy_row("seq-mean-token-mean", "trl", name, policy("grpo"))
    policy_row("dr_grpo", "trl", name, policy("dr_grpo"), length_max=8)
    policy_row("token-mean", "trl", name, policy("dapo", 3.0), bound=3.0)
    policy_row("token-mean", "trl", name, policy("dapo", 1.1), bound=1.1)
    policy_row("token-mean", "trl", name, policy("dapo"), old=BELOW)
    policy_row("token-mean", "trl", name, policy("dapo"), (-0.7, 1.1), ABOVE)
    policy_row("gspo", "trl", name, policy("grpo", level="sequence"))
    policy_row("gspo", "trl", name, policy("grpo", level="sequence"), old=ABOVE_MEAN)


def llamafactory_policies():
    core = taken("trl-0.9.6", "trl/core.py", "masked_mean", "masked_var", "masked_whiten",
                 "clip_by_value", "entropy_from_logits", Optional=None)
    code = taken("trl-0.9.6", "trainer/ppo_trainer.py", "loss", flatten_dict=lambda d: d,
                 **vars(core))
    config = SimpleNamespace(cliprange=CLIP, cliprange_value=CLIP, vf_coef=0.1,
                             ratio_threshold=1e30)

    def policy(logp, old, a):
        zeros = torch.zeros_like(logp)
        return code.loss(SimpleNamespace(config=config), old, zeros, zeros[..., None], zeros,
                         logp, MASK, a.expand_as(logp), zeros)[0]

    name = "llamafactory-0.9.5+trl-0.9.6"
    policy_row("token-mean", "llamafactory", name, policy)
    policy_row("token-mean", "llamafactory", name, policy, old=BELOW)
    policy_row("token-mean", "llamafactory", name, policy, (-0.7, 1.1), ABOVE)


# ---- advantages: two groups of four, and a text of a value a token ----

REWARDS = (1.0, 0.0, 0.5, 0.0, 0.3, 0.3, 0.30001, 0.3)
VALUES = (0.3, 0.4, 0.1, 0.6)
TOKEN_REWARDS = (-0.01, 0.02, -0.005, 1.5)
ALIKE = (0.0, 1e-4, 0.0, 0.0)  # whose variance is near the floor


def openrlhf_advantages():
    import itertools
    utils = taken("openrlhf-0.11.2", "models/utils.py", "compute_reward", Optional=None,
                  Union=None, Tuple=None)
    code = taken("openrlhf-0.11.2", "ppo_utils/experience_maker.py",
                 "compute_advantages_and_returns", "get_advantages_and_returns",
                 "get_cumulative_returns", List=None, Tuple=None, Optional=None, Experience=None,
                 itertools=itertools, apply_length_penalties=lambda *_: None,
                 compute_reward=utils.compute_reward)

    def of(estimator, rewards, values, kl, samples):
        one = torch.ones_like(kl)
        batch = SimpleNamespace(rewards=rewards, index=list(range(len(rewards))), kl=kl,
                                action_mask=one, values=values, info={})
        args = SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=samples),
            reward=SimpleNamespace(clip_range=(-10, 10)),
            algo=SimpleNamespace(advantage=SimpleNamespace(estimator=estimator, gamma=1.0,
                                                           lambd=0.95, no_std_norm=False)))
        this = SimpleNamespace(strategy=SimpleNamespace(args=args),
                               kl_ctl=SimpleNamespace(value=1.0),
                               advantage_estimator=estimator)
        for name in ("get_advantages_and_returns", "get_cumulative_returns"):
            setattr(this, name, types.MethodType(getattr(code, name), this))
        code.compute_advantages_and_returns(this, [batch])
        return batch.advantages

    groups = of("group_norm", torch.tensor(REWARDS), None, torch.zeros(8, 1), 4)
    row("group_norm", "openrlhf", "openrlhf-0.11.2", dict(reward=REWARDS),
        dict(advantage=groups), samples=4)
    for rewards in (TOKEN_REWARDS, ALIKE):
        kl = -torch.tensor(rewards)[None]
        values = torch.tensor(VALUES)[None] * (rewards is TOKEN_REWARDS)
        row("whiten", "openrlhf", "openrlhf-0.11.2",
            dict(rewards=rewards, values=values),
            dict(advantage=of("gae", torch.zeros(1), values, kl, 1)))


def slice_of(package, path, begins, ends):
    """Lines of a method, from one that begins so to the one before that which ends it."""
    lines = text_of(package, path).splitlines()
    first = next(i for i, line in enumerate(lines) if line.strip().startswith(begins))
    last = next(i for i in range(first, len(lines)) if lines[i].strip().startswith(ends))
    return textwrap.dedent("\n".join(lines[first:last]))


def trl_advantages():
    lines = slice_of("trl-1.16.0", "trainer/grpo_trainer.py",
                     "if self.multi_objective_aggregation ==", "# Unscorable")
    nanstd = taken("trl-1.16.0", "trainer/utils.py", "nanstd").nanstd
    for scale, what in (("group", "group_norm"), ("none", "dr_grpo")):
        known = dict(
            torch=torch, nanstd=nanstd, num_generations=4, device="cpu",
            rewards_per_func=torch.tensor(REWARDS)[:, None],
            unscorable_mask=torch.zeros(8).bool(),
            self=SimpleNamespace(multi_objective_aggregation="sum_then_normalize",
                                 scale_rewards=scale, reward_weights=torch.ones(1)))
        exec(lines, known)
        row(what, "trl", "trl-1.16.0", dict(reward=REWARDS), dict(advantage=known["advantages"]),
            samples=4)


def whitened_by_trl(program, package, path, take):
    """GAE as trl 0.9.6 has it, whitened as this package does."""
    whiten = taken(package, path, "masked_mean", "masked_var", "masked_whiten",
                   Optional=None).masked_whiten
    code = taken("trl-0.9.6", "trainer/ppo_trainer.py", "compute_advantages",
                 masked_whiten=whiten)
    config = SimpleNamespace(whiten_rewards=False, gamma=1.0, lam=0.95)
    for rewards in (TOKEN_REWARDS, ALIKE):
        values = torch.tensor(VALUES)[None] * (rewards is TOKEN_REWARDS)
        got = code.compute_advantages(SimpleNamespace(config=config), values,
                                      torch.tensor(rewards)[None], torch.ones(1, 4))
        row("whiten", program, take, dict(rewards=rewards, values=values),
            dict(advantage=got[1]))


# ---- KL to the reference: near, and beyond what OpenRLHF limits ----


def kl_rows():
    code = taken("openrlhf-0.11.2", "models/utils.py", "compute_approx_kl", Optional=None)
    logp, ref = (-1.0, -0.5, -2.0, -30.0, -1.0, -14.0), (-1.3, -0.4, -2.0, -1.0, -30.0, -1.5)
    for kind in ("k1", "k2", "k3"):
        x = leaf(*logp)
        value = code.compute_approx_kl(x, torch.tensor(ref), kl_estimator=kind)
        value.sum().backward()
        row("kl", "openrlhf", "openrlhf-0.11.2", dict(logp=logp, ref_logp=ref),
            dict(kl=value.detach(), dlogp=x.grad), kind=kind)
    lines = slice_of("trl-1.16.0", "trainer/grpo_trainer.py", "per_token_kl = (", "# Importance")
    x = leaf(*logp)
    known = dict(torch=torch, ref_per_token_logps=torch.tensor(ref), per_token_logps=x)
    exec(lines, known)
    known["per_token_kl"].sum().backward()
    row("kl", "trl", "trl-1.16.0", dict(logp=logp, ref_logp=ref),
        dict(kl=known["per_token_kl"].detach(), dlogp=x.grad), kind="k3")


print("""# SPDX-License-Identifier: MIT OR Unlicense
# What packages make of the same numbers: written by verify/second/golden/definitions.py, which says which packages and how.
# Columns, between tabs: what, parameters (program and package among them), inputs, expected. test_definitions.c reads it.""")
for make in (openrlhf_pairs, trl_pairs, llamafactory_pairs, openrlhf_policies, trl_policies,
             llamafactory_policies, openrlhf_advantages, trl_advantages):
    make()
whitened_by_trl("trl", "trl-0.24.0", "trl/core.py", "trl-0.24.0")
whitened_by_trl("llamafactory", "trl-0.9.6", "trl/core.py", "llamafactory-0.9.5+trl-0.9.6")
kl_rows()
