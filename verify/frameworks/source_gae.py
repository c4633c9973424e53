# SPDX-License-Identifier: MIT OR Unlicense
# git clone https://github.com/THUDM/slime at 624b824a, radixark/miles at 31f1ca96, verl-project/verl at
# 1dda039b, alibaba/ROLL at 8eb27cc2, OpenRLHF/OpenRLHF at 3c3be623, areal-project/AReaL at cbff54d6;
# SLIME, MILES, VERL, ROLL, OPENRLHF and AREAL are their folders.
"""Advantages of PPO over answers in which a tool writes: its tokens have values and KL, and no
label. The functions are taken out of the sources as they are and get what their callers give
them. Where a caller prepares an argument, a comment says how."""
import ast
import os
import pathlib
import tempfile
from types import SimpleNamespace
from typing import Optional, Tuple

from common import IGNORED, VOCAB, check, ver

import torch

GAMMA, LAMBDA = 0.97, 0.9
ANSWERS, PROMPT = (17, 11, 23), 4
TOOLS = ((5, 9), (0, 0), (3, 8))  # tokens of each answer that a tool wrote


def functions(package, path, *names, **known):
    """Functions of a source file, run without the imports of that file."""
    tree = ast.parse(pathlib.Path(os.environ[package], path).read_text())
    inside = [x for node in tree.body for x in (node.body if isinstance(node, ast.ClassDef) else [node])]
    space = {"torch": torch, "Optional": Optional, "Tuple": Tuple, "AlgoConfig": object, "register_adv_est": lambda _: lambda f: f,
             "AdvantageEstimator": SimpleNamespace(GAE=0, REINFORCE_PLUS_PLUS=1), **known}
    found = [x for x in inside if isinstance(x, ast.FunctionDef) and x.name in names]
    exec(compile(ast.Module(found, []), path, "exec"), space)  # the package's own lines
    return [space[name] for name in names]


def answers(masked):
    """Of each answer: values, KL, mask of trained tokens, reward."""
    draw = torch.Generator().manual_seed(7)
    for n, (first, last) in zip(ANSWERS, TOOLS):
        mask = torch.ones(n)
        if masked:
            mask[first:last] = 0
        yield SimpleNamespace(values=torch.randn(n, generator=draw), kl=0.1 * torch.randn(n, generator=draw), mask=mask,
                              reward=float(torch.randn((), generator=draw)))


def batch(each, name, side=0.0):
    """(answers, longest), filled up behind the end."""
    return torch.nn.utils.rnn.pad_sequence([getattr(x, name) for x in each], batch_first=True, padding_value=side)


def rewarded(each):
    """Rewards of tokens: minus KL, and the reward at the last one, which is trained."""
    rewards = [-x.kl.clone() for x in each]
    for x, r in zip(each, rewards):
        r[-1] += x.reward
    return rewards


# ---- packages: advantages of each answer, and the rewards of its tokens; ROLL's answers get their padding ----


def slime(each):
    mpu = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    import sys
    sys.modules["megatron"] = sys.modules["megatron.core"] = SimpleNamespace(mpu=mpu)
    whole = functions("SLIME", "slime/utils/ppo_utils.py", "get_advantages_and_returns_batch", "vanilla_gae")[0]
    rewards = rewarded(each)  # loss.py: token_level_rewards[-1] += reward
    return whole([PROMPT + n for n in ANSWERS], list(ANSWERS), [x.values for x in each], rewards, GAMMA, LAMBDA,
                 chunked=False)[0], rewards


def miles(each):
    state = SimpleNamespace(cp=SimpleNamespace(size=1))
    whole = functions("MILES", "miles/backends/training_utils/loss_hub/math_utils.py", "get_advantages_and_returns_batch",
                      "vanilla_gae", get_parallel_state=lambda: state)[0]
    got = whole([PROMPT + n for n in ANSWERS], list(ANSWERS), [x.values for x in each], [-x.kl for x in each],
                [x.reward for x in each], "thd", None, [x.mask for x in each], GAMMA, LAMBDA, chunked=False)[0]
    return got, rewarded(each)


def whiten():
    parts = ("masked_sum", "masked_mean", "masked_var", "masked_whiten")
    return SimpleNamespace(masked_whiten=functions("VERL", "verl/utils/torch_functional.py", *parts)[3])


def verl(each):
    gae = functions("VERL", "verl/trainer/ppo/core_algos.py", "compute_gae_advantage_return", verl_F=whiten())[0]
    rewards = rewarded(each)
    padded = torch.nn.utils.rnn.pad_sequence(rewards, batch_first=True)
    return gae(padded, batch(each, "values"), batch(each, "mask"), GAMMA, LAMBDA)[0], rewards


def roll(each):
    gae = functions("ROLL", "roll/utils/functionals.py", "compute_gae_advantage_return")[0]
    # compute_advantage: token_level_rewards * response_mask, and values as they are, which a critic has at padding, too
    whole = [SimpleNamespace(values=v, mask=m) for v, m in zip(batch(each, "values", 0.7), batch(each, "mask"))]
    rewards = torch.nn.utils.rnn.pad_sequence(rewarded(each), batch_first=True) * batch(each, "mask")
    each[:] = whole
    return gae(rewards, batch(whole, "values"), GAMMA, LAMBDA)[0], list(rewards)


def openrlhf(each):
    gae = functions("OPENRLHF", "openrlhf/trainer/ppo_utils/experience_maker.py", "get_advantages_and_returns")[0]
    rewards = rewarded(each)  # compute_reward: at the last 1 of action_mask
    padded = torch.nn.utils.rnn.pad_sequence(rewards, batch_first=True)
    return gae(None, batch(each, "values"), padded, batch(each, "mask"), GAMMA, LAMBDA)[0], rewards


def areal(each):
    gae = functions("AREAL", "areal/trainer/ppo/gae.py", "_compute_token_level_gae")[0]
    rewards = rewarded(each)  # at seqlens - 2 of a text rolled by one
    pad = torch.nn.functional.pad
    rows = torch.nn.utils.rnn.pad_sequence(rewards, batch_first=True)
    return gae(pad(rows, (0, 1)), pad(batch(each, "values"), (0, 1)), pad(batch(each, "mask"), (0, 1)),
               torch.zeros(len(each)), GAMMA, LAMBDA)[0], rewards


# ---- the dump, and the witness ----


def write(folder, each, got, rewards):
    """One row of packed answers, each behind a prompt; token t has the numbers of what it predicts."""
    from seqpar_dump import Dump
    draw = torch.Generator().manual_seed(3)
    names = ("labels", "values", "token_rewards", "advantages")
    rows = {name: [] for name in names}
    for x, a, r in zip(each, got, rewards):
        n = len(x.mask)
        labels = torch.randint(0, VOCAB, (n,), generator=draw)
        for name, of, none in zip(names, (torch.where(x.mask > 0, labels, IGNORED), x.values, r, a[:n]), (IGNORED, 0, 0, 0)):
            before, behind = torch.full((PROMPT - 1,), none, dtype=of.dtype), torch.full((1,), none, dtype=of.dtype)
            rows[name].append(torch.cat([before, of, behind]))
    lengths = torch.tensor([0, *(PROMPT + len(x.mask) for x in each)])
    arrays = {name: torch.cat(x) for name, x in rows.items()}
    out = Dump(folder, 0, 1, objective="ppo", advantage="gae", gamma=GAMMA, gae_lambda=LAMBDA)
    out.micro_batch(0, index=torch.arange(len(arrays["labels"])), cu_seqlens=lengths.cumsum(0), **arrays)
    out.step()


def recursion(x, r, passes):
    """Advantages of the trained tokens: others are passed over, or have neither value nor reward."""
    chain = [i for i in range(len(x.mask)) if x.mask[i] > 0 or not passes]
    a, following, all_of = 0.0, 0.0, {}
    for i in reversed(chain):
        value, reward = (float(y[i] * x.mask[i]) for y in (x.values, r))
        a = reward + GAMMA * following - value + GAMMA * LAMBDA * a
        following, all_of[i] = value, a
    return torch.tensor([all_of[i] for i in chain if x.mask[i] > 0])


def witness(each, got, rewards):
    """How far trained tokens' advantages are from the two recursions, as they are or whitened."""
    mine = torch.cat([a[:len(x.mask)][x.mask > 0] for x, a in zip(each, got)]).double()
    def away(passes):
        want = torch.cat([recursion(x, r, passes) for x, r in zip(each, rewards)]).double()
        white = (want - want.mean()) / want.std()
        return min(float((mine - w).norm() / w.norm()) for w in (want, white))
    return f"from GAE with masked tokens skipped {away(True):.1e}, with V = r = 0 there {away(False):.1e}"


if __name__ == "__main__":
    packages = {"SLIME": (slime, "624b824a"), "MILES": (miles, "31f1ca96"), "VERL": (verl, "1dda039b"),
                "ROLL": (roll, "8eb27cc2"), "OPENRLHF": (openrlhf, "3c3be623"), "AREAL": (areal, "cbff54d6")}
    there = [name for name in packages if name in os.environ]
    if not there:
        raise ImportError(f"{', '.join(packages)} are not set: folders of their sources")
    for name in there:
        package, commit = packages[name]
        for masked in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                each = list(answers(masked))
                got, rewards = package(each)
                write(folder, each, got, rewards)
                check("ROLL" if name == "ROLL" else name.lower(), commit,
                      f"GAE, 3 answers, {'a tool writes in two' if masked else 'all tokens trained'}", ver(folder),
                      witness(each, got, rewards))
