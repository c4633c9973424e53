# SPDX-License-Identifier: MIT OR Unlicense
"""The trainer against itself on one rank, and its parts against PyTorch's own. Needs torch alone.

    test_trainer.py [WORD...]      runs all checks, or those whose names have one of the words in them
"""
import itertools
import json
import sys
import tempfile
from dataclasses import replace

import numpy
import torch
import torch.nn.functional as F

import model
import optimizer
import trainer
from attention import Attention, Setting
from ranks import Ranks
from rows import IGNORED, MicroBatch, make_rows, split
from seqpar_dump import Dump
from trainer import Config, MISTAKES, Workers, random_config, variants

torch.set_num_threads(1)
WAYS, LAYOUTS = ("ring", "llama3", "ulysses"), ("contiguous", "zigzag", "zigzag_doc", "stripe")
NUMPY = {"F64": "f8", "F32": "f4", "I64": "i8", "BF16": "u2"}


def read(path):
    """Tensors of a safetensors file, widened to fp64."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    header.pop("__metadata__")
    return {name: _wide(x["dtype"], data[slice(*x["data_offsets"])], x["shape"]) for name, x in header.items()}


def _wide(dtype, data, shape):
    x = numpy.frombuffer(data, NUMPY[dtype])
    return ((x.astype("u4") << 16).view("f4") if dtype == "BF16" else x).astype("f8").reshape(shape)


def dump_of(workers, c, folder):
    """All ranks' tensors of a step, by file."""
    workers.run(c, folder)
    return [read(f"{folder}/rank{r}.safetensors") for r in range(1 if c.want else c.world)]


def apart(a, b):
    """The largest difference, relative to the largest element; a gradient that cancels is rounding alone."""
    return float(numpy.abs(a - b).max(initial=0) / max(numpy.abs(b).max(initial=0), 1e-5))


# ---- any number of ranks computes what one computes ----

def check_ranks_agree(workers, folder):
    """Gradients, loss, norm and step of 2, 3, 4 ranks in every way and layout, to 1e-10."""
    worst = 0
    for seed, (objective, way, layout) in enumerate(itertools.product(trainer.ALL, WAYS, LAYOUTS)):
        sp, dp = ((2, 1), (3, 1), (4, 1), (2, 2))[seed % 4]
        c = random_config(seed, dtype="fp64", objective=objective, attention=way, layout=layout, sp=sp, dp=dp,
                          shard="none", leave_out=(), documents="ordinary")
        one = dump_of(workers, c.wanted(), f"{folder}/one")[0]
        for rank in dump_of(workers, c, f"{folder}/several"):
            for name, x in one.items():
                if name.split(".")[0] in ("grad", "loss", "norm"):
                    worst = max(worst, apart(rank[name], x))
                    assert apart(rank[name], x) < 1e-10, (name, apart(rank[name], x), c)
    return f"largest relative difference {worst:.1e}"


def check_shards_are_of_the_whole(workers, folder):
    """Shards put side by side are what one rank has."""
    for seed, shard in enumerate(("world", "sp", "dp")):
        c = random_config(seed, dtype="fp64", sp=2, dp=2, shard=shard, leave_out=(), warm_up=True, optimizer="adamw")
        one = dump_of(workers, c.wanted(), f"{folder}/one")[0]
        several = dump_of(workers, c, f"{folder}/several")
        holders = {"world": (0, 1, 2, 3), "sp": (0, 1), "dp": (0, 2)}[shard]
        for name, x in one.items():
            if name.split(".")[0] in ("grad", "param", "m", "v"):
                assert apart(numpy.concatenate([several[r][name] for r in holders]), x.flatten()) < 1e-10, (name, c)


def check_rows_smaller_than_ranks(workers, folder):
    for seed in range(6):
        c = random_config(seed, dtype="fp64", objective="sft", documents="tiny", sp=4, dp=1, leave_out=(), shard="none")
        one, several = dump_of(workers, c.wanted(), f"{folder}/one")[0], dump_of(workers, c, f"{folder}/several")
        for rank, name in itertools.product(several, one):
            assert not name.startswith("grad.") or apart(rank[name], one[name]) < 1e-10, (name, c)


# ---- parts against PyTorch's and plain formulas ----

def check_attention(*_):
    """Against scaled_dot_product_attention with an explicit mask; softcap against autograd of the plain formula."""
    for seed in range(12):
        c = random_config(seed, dtype="fp64", sp=1, dp=1, documents="several", heads=6, kv_heads=(1, 2, 3)[seed % 3])
        row = make_rows(c)[0][0]
        draw = torch.Generator().manual_seed(seed)
        shapes = [(len(row), heads, c.head_dim) for heads in (c.heads, c.kv_heads, c.kv_heads, c.heads)]
        q, k, v, seed_of_out = (torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)
                                for shape in shapes)
        got = Attention.apply(q, k, v, Setting(c, MicroBatch(c, row, Ranks()), Ranks()))
        want = plain_attention(c, row, q, k, v)
        assert torch.allclose(got, want, atol=1e-12), c
        for a, b in zip(*(torch.autograd.grad(x, (q, k, v), seed_of_out) for x in (got, want))):
            assert torch.allclose(a, b, atol=1e-11), c


def plain_attention(c, row, q, k, v):
    document = torch.repeat_interleave(torch.arange(row.documents), row.cu_seqlens.diff())
    distance = torch.arange(len(row))[:, None] - torch.arange(len(row))
    mask = (distance >= 0) & (document[:, None] == document) & (distance < (c.window or len(row)))
    scale = c.softmax_scale or 1 / c.head_dim ** 0.5
    q, k, v = (x.repeat_interleave(c.heads // x.shape[1], 1).transpose(0, 1) for x in (q, k, v))
    if not c.softcap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(0, 1)
    scores = c.softcap * torch.tanh(q @ k.transpose(1, 2) * scale / c.softcap)
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v).transpose(0, 1)


def check_losses(workers, folder):
    """The reported loss by plain formulas, from the arrays of the dump of one rank."""
    plain = {"sft": plain_sft, "dpo": plain_dpo, "rm": plain_rm, "kto": plain_kto, "ppo": plain_ppo}
    for seed in range(40):
        c = random_config(seed, dtype="fp64", sp=1, dp=1, leave_out=())
        d = dump_of(workers, c, f"{folder}/one")[0]
        rows = [{name.split(".")[1]: x for name, x in d.items() if name.startswith(f"{a}.")}
                for a in range(c.accumulation)]
        want = plain[c.objective](c, rows)
        assert abs(d["loss"] - want) < 1e-12 * max(1, abs(want)), (c, d["loss"], want)


def documents(row):
    """Slices of a row, and which of their tokens have a label."""
    for begin, end in zip(row["cu_seqlens"][:-1].astype(int), row["cu_seqlens"][1:].astype(int)):
        yield slice(begin, end), row["labels"][begin:end] != IGNORED


def sums(row, name):
    return numpy.array([row[name][where][has].sum() for where, has in documents(row)])


def mean_by(c, losses_of_documents):
    if c.reduction == "sequence":
        return numpy.mean([x.mean() for x in losses_of_documents if len(x)])
    return numpy.concatenate(losses_of_documents).mean()


def plain_sft(c, rows):
    return mean_by(c, [-row["logp"][where][has] for row in rows for where, has in documents(row)])


def softplus(x):
    return numpy.log1p(numpy.exp(x))


def plain_dpo(c, rows):
    h = numpy.concatenate([sums(row, "logp") - sums(row, "ref_logp") for row in rows])
    return softplus(-c.beta * (h[0::2] - h[1::2])).mean()


def plain_rm(c, rows):
    scores = numpy.concatenate([row["values"][row["cu_seqlens"][1:].astype(int) - 1] for row in rows])
    assert numpy.array_equal(scores, numpy.concatenate([row["scores"] for row in rows]))
    return softplus(scores[1::2] - scores[0::2]).mean()


def plain_kto(c, rows):
    losses = []
    for row in rows:
        gain = sums(row, "logp") - sums(row, "ref_logp") - max(0, row["kl"].mean())
        losses += [1 - 1 / (1 + numpy.exp(-c.beta * (g if good else -g))) for g, good in zip(gain, row["desirable"])]
    return numpy.mean(losses)


def plain_ppo(c, rows):
    rewards, groups = (numpy.concatenate([row[name] for row in rows]) for name in ("rewards", "groups"))
    losses, number = [], 0
    for row in rows:
        for where, has in documents(row):
            same = rewards[groups == groups[number]]
            a = rewards[number] - same.mean() if c.advantage else rewards[number]
            a /= same.std() + c.advantage_eps if c.advantage == "group" else 1
            ratio = numpy.exp(row["logp"] - row["old_logp"])[where][has]
            loss = -numpy.minimum(a * ratio, a * ratio.clip(1 - c.clip_low, 1 + c.clip_high))
            if c.kl_coef:
                less = (row["ref_logp"] - row["logp"])[where][has]
                loss = loss + c.kl_coef * (numpy.exp(less) - less - 1)
            losses.append(loss)
            number += 1
    return mean_by(c, losses)


def check_gradient(*_):
    """The hand-written backward passes, through the model, against differences of the loss."""
    for objective in trainer.ALL:
        c = random_config(11, dtype="fp64", objective=objective, sp=1, dp=1, accumulation=1, frozen="")
        rows, w = make_rows(c)[0], model.weights(c)
        got, _, _ = trainer.gradients(c, Ranks(), w, rows)
        draw = torch.Generator().manual_seed(1)
        direction = {n: torch.randn(x.shape, generator=draw, dtype=x.dtype) for n, x in w.items()}
        if objective == "kto":  # z is a constant of the gradient, and kept out of this check
            c = replace(c, mistake="kl_missing")
            got, _, _ = trainer.gradients(c, Ranks(), w, rows)
        ahead, behind = ({n: x + h * direction[n] for n, x in w.items()} for h in (1e-6, -1e-6))
        ends = [float(trainer.gradients(c, Ranks(), x, rows)[1]) for x in (ahead, behind)]
        want, along = (ends[0] - ends[1]) / 2e-6, float(sum((got[n] * direction[n]).sum() for n in w))
        assert abs(along - want) < 1e-6 * max(1, abs(want)), (objective, along, want)


def check_adamw(*_):
    for seed in range(20):
        c = random_config(seed, dtype="fp64", optimizer="adamw", eps=(1e-8, 1e-3)[seed % 2])
        draw = torch.Generator().manual_seed(seed)
        p = torch.nn.Parameter(torch.randn(50, generator=draw, dtype=torch.float64))
        theirs = torch.optim.AdamW([p], c.lr, (c.beta1, c.beta2), c.eps, c.weight_decay)
        mine, m, v = p.detach().clone(), torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
        for t in (1, 2, 3):
            p.grad = torch.randn(50, generator=draw, dtype=torch.float64)
            theirs.step()
            mine, m, v = optimizer.update(c, mine, p.grad, m, v, t)
        assert torch.allclose(mine, p.detach(), rtol=1e-12, atol=1e-14), c


def check_splits(*_):
    """Every token is held once, whatever the length."""
    for seed in range(40):
        c = random_config(seed)
        row = make_rows(c)[0][0]
        for layout, sp in itertools.product(LAYOUTS, (1, 2, 3, 4)):
            held = torch.cat(split(row, layout, sp))
            assert torch.equal(held.sort().values, torch.arange(len(row))), (layout, sp, len(row))


# ---- the writer of dumps ----

def check_dump(_, folder):
    """A batch of one row is a row; ranges and keywords are in the metadata; what is wrong is refused by name."""
    dump = Dump(folder, 0, 1, window=3, softcap=1.5)
    dump.attention(0, q=numpy.zeros((1, 5, 2, 4)), lse=numpy.zeros((1, 5, 2)))
    grads = {"w": torch.ones(3, dtype=torch.bfloat16), "frozen": None}
    dump.step(2.5, grads, norm=1, m={"w": numpy.zeros(2)}, part={"m.w": (1, 3)}, optimizer="adamw", step=7, lr=1e-4)
    got = read(f"{folder}/rank0.safetensors")
    assert {name: x.shape for name, x in got.items()} == {"0.q": (5, 2, 4), "0.lse": (5, 2), "loss": (), "norm": (),
                                                          "grad.w": (3,), "m.w": (2,)}, got
    wanted = {"window": "3", "softcap": "1.5", "step": "7", "lr": "0.0001", "part.m.w": "1 3"}
    assert wanted.items() <= dump.metadata.items(), dump.metadata
    for mistake, word in ((lambda: dump.step(part={"grad.w": (1, 3)}), "3 elements from 1 on"),
                          (lambda: dump.step(part={"grad.x": (0, 3)}), "grad.x"),
                          (lambda: dump.step(learning_rate=1), "learning_rate"),
                          (lambda: dump.attention(0, q=numpy.zeros((2, 5, 2, 4))), "one row"),
                          (lambda: dump.micro_batch(0, old_logp=numpy.zeros(5)), "old_logp"),
                          (lambda: Dump(folder, 0, 1, objective="grpo"), "grpo")):
        try:
            mistake()
        except ValueError as e:
            assert word in str(e), (word, str(e))
        else:
            raise AssertionError(f"accepted: {word}")


# ---- mistakes ----

def check_mistakes_show(workers, folder):
    """Each, in each variant, changes a tensor of the dump against the right run; in fp64 by more than rounding."""
    silent = []
    for name, variant in ((name, variant) for name in MISTAKES for variant in variants(name)):
        c = random_config(1, name, variant, dtype="fp64")
        wrong = dump_of(workers, c, f"{folder}/wrong")
        right = dump_of(workers, replace(c, mistake="", variant=""), f"{folder}/right")
        if not any(differs(a, b) for a, b in zip(wrong, right)):
            silent.append((name, variant, c))
    assert not silent, silent


def differs(wrong, right):
    return any(name not in right or x.shape != right[name].shape or not apart(x, right[name]) < 1e-6
               for name, x in wrong.items())


def check_same_seed_same_bytes(workers, folder):
    for seed in range(4):
        c, paths = random_config(seed, dtype="bf16"), []
        for name in ("first", "second"):
            workers.run(c, f"{folder}/{name}{seed}")
            paths.append(f"{folder}/{name}{seed}/rank0.safetensors")
        a, b = (open(path, "rb").read() for path in paths)
        assert a == b, c


def main():
    checks = {name: check for name, check in globals().items() if name.startswith("check_")}
    words, failed = sys.argv[1:], 0
    with Workers() as workers, tempfile.TemporaryDirectory() as folder:
        for name, check in checks.items():
            if words and not any(word in name for word in words):
                continue
            try:
                said = check(workers, folder)
                print("ok", name[6:], f"({said})" if said else "")
            except AssertionError as e:
                print("FAIL", name[6:], str(e)[:2000])
                failed += 1
    print(f"{failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
