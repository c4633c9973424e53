# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps skyrl==0.3.0 areal==1.0.4 verl==0.9.1 loguru
"""The all-to-alls and gathers of Ulysses in verl, SkyRL and AReaL, which have one origin: 23
tokens on 2 ranks, padded by the package; and a loss of what was gathered."""
from common import (IGNORED, attention_inputs, check_attention, check_losses, loss_case,
                    module_file, on_ranks, token_losses, version)

import torch

TOKENS = 23
FILES = {"verl": "verl/utils/ulysses.py", "areal": "areal/models/fsdp/ulysses.py",
         "skyrl": "skyrl/backends/skyrl_train/distributed/ulysses/utils.py"}


def _package(name):
    package = module_file(name, FILES[name])
    package.set_ulysses_sequence_parallel_group(torch.distributed.group.WORLD)
    return package


def _attention(q, k, v):
    """Of one row, (1, tokens, heads, width), heads of k and v as many as those of q."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    later = torch.ones(q.shape[1], k.shape[1]).triu(1).bool()
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def attend(rank, names):
    results = []
    for name in names:
        package = _package(name)
        x = {n: torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 1))
             for n, t in attention_inputs(TOKENS, heads=4, kv_heads=4).items()}
        own = torch.arange(TOKENS + 1).view(2, -1)[rank]
        q, k, v = (package.slice_input_tensor(x[n][None], 1).requires_grad_() for n in "qkv")
        wide = [package.gather_seq_scatter_heads(t, 1, 2, unpadded_dim_size=TOKENS)
                for t in (q, k, v)]
        out = package.gather_heads_scatter_seq(_attention(*wide), 2, 1)
        out.backward(x["dout"][own][None])
        there = own < TOKENS
        arrays = dict(out=out.detach(), dq=q.grad, dk=k.grad, dv=v.grad)
        results.append(dict({n: t[0][there] for n, t in arrays.items()}, index=own[there]))
    return results


def _gathered(name, place, logits, labels):
    losses = _package(name).gather_outputs_and_unpad(token_losses(logits, labels), gather_dim=0)
    return losses.sum() / (place["whole"] != IGNORED).sum()


def skyrl(place, logits, labels):
    return _gathered("skyrl", place, logits, labels)


if __name__ == "__main__":
    there = []
    for name in FILES:
        try:
            version(name)
            there.append(name)
        except ModuleNotFoundError:
            pass
    x = attention_inputs(TOKENS, heads=4, kv_heads=4)
    for name, got in zip(there, zip(*on_ranks(attend, there))):
        check_attention(name, "Ulysses 2, 23 tokens", got, x, [0, TOKENS])
    check_losses("skyrl", [loss_case("gather_outputs_and_unpad, Ulysses 2", skyrl)])
