# SPDX-License-Identifier: MIT OR Unlicense
# git clone https://github.com/THUDM/slime at 624b824a and https://github.com/radixark/miles at
# 31f1ca96; SLIME and MILES are their folders.
"""slime's and miles' context parallelism: which tokens, log-probs and masks of each document a
rank gets, and the means of a loss over them. Neither is on PyPI: cp_utils.py is run from source,
with the ranks of a sequence one after the other in this process."""
import importlib.util
import os
import pathlib
import sys
import tempfile
import types
from types import SimpleNamespace

from common import IGNORED, VOCAB, check, factor, ver

import torch

# tokens and prompts; the third has one token to learn, of the last a rank has no token
DOCUMENTS = ((29, 7), (18, 12), (13, 12), (3, 2))
STATE = SimpleNamespace(cp=SimpleNamespace(rank=0, size=1, group=None))


def slime():
    mpu = SimpleNamespace(get_context_parallel_rank=lambda: STATE.cp.rank,
                          get_context_parallel_world_size=lambda: STATE.cp.size)
    sys.modules["megatron"] = types.ModuleType("megatron")
    sys.modules["megatron.core"] = SimpleNamespace(mpu=mpu)
    return load("cp_utils", os.environ["SLIME"], "slime/backends/megatron_utils/cp_utils.py")


def miles():
    sys.modules["of_miles"] = types.ModuleType("of_miles")
    sys.modules["of_miles.parallel"] = SimpleNamespace(get_parallel_state=lambda: STATE)
    return load("of_miles.cp_utils", os.environ["MILES"],
                "miles/backends/training_utils/cp_utils.py")


def load(name, folder, path):
    spec = importlib.util.spec_from_file_location(name, pathlib.Path(folder, path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts():
    """ids and the masks of answers, some of whose tokens do not count."""
    draw = torch.Generator().manual_seed(11)
    ids = [torch.randint(0, VOCAB, (n,), generator=draw) for n, _ in DOCUMENTS]
    masks = [(torch.rand(n - p, generator=draw) < 0.8).float() for n, p in DOCUMENTS]
    masks[2][:] = masks[3][:] = 1
    return ids, masks


def right_labels(ids, masks):
    for x, mask, (n, p) in zip(ids, masks, DOCUMENTS):
        labels = torch.full_like(x, IGNORED)
        labels[p - 1:n - 1] = torch.where(mask > 0, x[p:], torch.tensor(IGNORED))
        yield labels


def weights():
    draw = torch.Generator().manual_seed(5)
    return (torch.randn(VOCAB, 8, generator=draw).requires_grad_(),
            torch.randn(8, VOCAB, generator=draw).requires_grad_())


def taken(package, ids, masks):
    """Of a document: places that this rank holds, and places and labels of its logits."""
    n, size = len(ids), STATE.cp.size
    p = n - len(masks)
    if size == 1:
        return torch.arange(n), torch.arange(p - 1, n - 1), ids[p:]
    _, chunks, logits, tokens = package.get_logits_and_tokens_offset_with_cp(n, n - p)
    held = torch.cat([torch.arange(min(a, n), min(b, n)) for a, b in chunks])
    own = package.slice_with_cp(ids, -1)
    if not torch.equal(own[own >= 0], ids[held]):
        raise SystemExit("tokens are not those of the chunks")
    return (held, torch.cat([torch.arange(a, b) for a, b in logits]),
            torch.cat([ids[a:b] for a, b in tokens]))


def step(package, folder, sp, by_token):
    """What the ranks of a sequence do; gradients added over them."""
    from seqpar_dump import Dump
    ids, masks = texts()
    begins = torch.tensor([0, *(len(x) for x in ids)]).cumsum(0)
    lengths, answers = [len(x) for x in ids], [len(m) for m in masks]
    count = sum(m.sum() for m in masks) if by_token else len(ids)
    E, W = weights()
    loss, parts = 0, []
    for rank in range(sp):
        STATE.cp.rank, STATE.cp.size = rank, sp
        own = [taken(package, x, m) for x, m in zip(ids, masks)]
        logp = [torch.log_softmax(E[x[at]] @ W, -1).gather(-1, labels[:, None])[:, 0]
                for x, (_, at, labels) in zip(ids, own)]
        mean = package.get_sum_of_sample_mean(lengths, answers, masks,
                                              calculate_per_token_loss=by_token)
        loss = loss + mean(-torch.cat(logp)) / count
        parts.append((own, logp))
    loss.backward()
    for rank, (own, logp) in enumerate(parts):
        right, arrays = list(right_labels(ids, masks)), {}
        for d, ((held, at, labels), x) in enumerate(zip(own, logp)):
            here = torch.full((lengths[d],), IGNORED)
            here[at] = torch.where(right[d][at] == IGNORED, IGNORED, labels)
            value = torch.zeros(lengths[d])
            value[at] = x.detach()
            for name, array in (("index", held + begins[d]), ("ids", ids[d][held]),
                                ("positions", held), ("labels", here[held]),
                                ("logp", value[held])):
                arrays.setdefault(name, []).append(array)
        out = Dump(folder, rank, sp, sp, reduction="token" if by_token else "sequence")
        out.micro_batch(0, cu_seqlens=begins, **{n: torch.cat(x) for n, x in arrays.items()})
        out.step(loss.detach(), {"embed": E.grad, "head": W.grad})
    return {"embed": E.grad, "head": W.grad}


if __name__ == "__main__":
    there = [x for x in (slime, miles) if x.__name__.upper() in os.environ]
    if not there:
        raise ImportError("SLIME and MILES are not set: folders of their sources")
    for make in there:
        package = make()
        for by_token in (False, True):
            for sp in (2, 3):
                with tempfile.TemporaryDirectory() as folder:
                    got = step(package, f"{folder}/got", sp, by_token)
                    want = step(package, f"{folder}/want", 1, by_token)
                    check(make.__name__, {"slime": "624b824a", "miles": "31f1ca96"}[make.__name__],
                          f"cp_utils, cp {sp}, mean over {'tokens' if by_token else 'samples'}",
                          ver(f"{folder}/got", "--want", f"{folder}/want"),
                          f"gradient {factor(got, want)}")
