# SPDX-License-Identifier: MIT OR Unlicense
"""What seqpar_record leaves of plain torch loops and of attentions on two ranks, judged: right and with mistakes; and what it refuses.

    test_record.py ORACLE FOLDER
"""
import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "frameworks"))
from common import on_ranks

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as across
from torch.nn.functional import cross_entropy, log_softmax, nll_loss, pad, scaled_dot_product_attention

import seqpar_record

IGNORED, TOKENS, WORLD = -100, 24, 2


def ver(oracle, folder, *options):
    """Exit code and the headline in one line."""
    said = subprocess.run([oracle, "ver", folder, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return said.returncode, " ".join(re.split(r"\n {4}(?=\S)", said.stdout)[0].split())


def check(name, got, code, *words):
    missing = [word for word in words if word not in got[1]]
    print(f"ok record_{name}" if got[0] == code and not missing else f"FAIL record_{name}: {got}, not {code} with {missing}")


# ---- loops ----


class Split(torch.nn.Sequential):
    """Gets the whole row, and splits it behind the embedding."""

    def __init__(self, places):
        super().__init__(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64))
        self.places = places

    def forward(self, ids):
        return self[1](self[0](ids)[:, self.places])


def net(places=None):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)) if places is None else Split(places)


def row(number, prompt=7):
    ids = torch.randint(64, (1, TOKENS), generator=torch.Generator().manual_seed(number))
    targets = ids.clone()
    targets[:, :prompt] = IGNORED
    return ids, pad(targets[:, 1:], (0, 1), value=IGNORED)


def token_losses(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)


def reduce(x, share=1):
    dist.all_reduce(x)
    x *= share


def shared(rank, folder, wrong="", whole=False):
    """Two rows whose tokens the ranks share, a micro-batch each; on one rank, the same step to compare with."""
    world = dist.get_world_size()
    places = torch.arange(TOKENS).chunk(world)[rank]
    model = net(places if whole else None)
    optimizer = (torch.optim.SGD if wrong == "clip" else torch.optim.AdamW)(model.parameters(), lr=1e-2)
    rows = [row(1), row(2, 15)]
    count = sum(int((labels != IGNORED).sum()) for _, labels in rows)
    described = dict(index=places, cu_seqlens=torch.tensor([0, TOKENS]))
    with seqpar_record.record(model, optimizer, folder, sp=world, row=(lambda ids, number: described) if whole else described) as step:
        total = torch.zeros(())
        for ids, labels in rows:
            mine = labels[:, places]
            if wrong == "shift":  # each rank shifts what it has
                mine = pad(ids[:, places][:, 1:], (0, 1), value=IGNORED)
            loss = token_losses(model(ids if whole else ids[:, places]), mine) / count
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        for p in model.parameters():
            reduce(p.grad, 0.3 if wrong == "reduction" else 1)
        kept = [p.grad.clone() for p in model.parameters()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if wrong == "clip":  # what was clipped is not used
            for p, x in zip(model.parameters(), kept):
                p.grad.copy_(x)
        step.loss = total
        optimizer.step()


def own(rank, folder, wrong="", kind=torch.optim.SGD):
    """Each rank has a row of its own, in two micro-batches of DistributedDataParallel; no more than the one line."""
    model = torch.nn.parallel.DistributedDataParallel(net())
    optimizer = kind(model.parameters(), lr=0.1)
    rows = [row(2 * a + rank, (7, 15, 3, 11)[2 * a + rank]) for a in range(2)]
    counts = torch.tensor([float(sum((labels != IGNORED).sum() for _, labels in rows))])
    if wrong != "means":
        dist.all_reduce(counts)
        counts /= WORLD
    with seqpar_record.record(model, optimizer, folder, sp=1):
        for a, (ids, labels) in enumerate(rows):
            with contextlib.nullcontext() if a else model.no_sync():
                logp = log_softmax(model(ids).flatten(0, 1), -1)
                (nll_loss(logp, labels.flatten(), reduction="sum", ignore_index=IGNORED) / counts[0]).backward()
        optimizer.step()


def refused(rank, folder):
    """Sentences on this rank."""
    model, (ids, labels) = net(), row(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(again=1, smoothing=0.0, of=None, update=True, **named):
        with seqpar_record.record(of or model, optimizer, folder, **named):
            for _ in range(again):
                cross_entropy(model(ids)[0], labels[0], ignore_index=IGNORED, label_smoothing=smoothing).backward()
            if update:
                optimizer.step()

    def twice():
        with seqpar_record.record(model, optimizer, folder, sp=1), seqpar_record.record(model, optimizer, folder, sp=1):
            pass

    said = []
    for mistake in (loop, lambda: loop(sp=3), lambda: loop(sp=2), lambda: loop(sp=1, update=False), lambda: loop(sp=1, again=0), twice,
                    lambda: loop(sp=2, row=dict(index=torch.arange(30))), lambda: loop(sp=1, smoothing=0.1),
                    lambda: loop(sp=1, again=1 + rank), lambda: loop(sp=1, of=model[1]),
                    lambda: loop(sp=2, row=lambda ids, number: dict(index=torch.arange(12 * rank, 12 * rank + 10)))):
        try:
            mistake()
            said.append("accepted")
        except ValueError as error:
            said.append(str(error))
    return said


# ---- attentions ----


def attention_inputs(tokens):
    draw = torch.Generator().manual_seed(4)
    return [torch.randn(tokens, heads, 8, generator=draw) for heads in (4, 2, 2, 4)]


def gathered(q, k, v, places, lost=False, causal=True):
    """Attention of this rank's tokens to those of all ranks: a ring in one hop. lost: gradients of other ranks' keys are dropped."""
    keys, values = (torch.cat(across.all_gather(x)) for x in (k, v))
    if lost:
        there = torch.zeros(len(keys), 1, 1, dtype=bool).index_fill(0, places, True)
        keys, values = (torch.where(there, x, x.detach()) for x in (keys, values))
    seen = (places[:, None] >= torch.arange(len(keys))) if causal else torch.ones(len(places), len(keys), dtype=bool)
    keys, values = (x.repeat_interleave(2, 1).transpose(0, 1) for x in (keys, values))
    return scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=seen).transpose(0, 1)


class Attention(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value):
        return gathered(query, key, value, **self.options), None


def ring(rank, folder, lost=False):
    """A module on two ranks."""
    places = torch.arange(TOKENS).chunk(WORLD)[rank]
    q, k, v, dout = (x[places].requires_grad_() for x in attention_inputs(TOKENS))
    module = Attention(places=places, lost=lost)
    with seqpar_record.record_attention(module, folder, sp=WORLD, index=places, cu_seqlens=torch.tensor([0, TOKENS])):
        out, _ = module(query=q * 1, key=k * 1, value=v * 1)  # views of leaves take no hook on gradients of one use
        out.backward(dout)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, causal=False, window_size=(-1, -1), dropout_p=0.0):
    """flash_attn's signature; each document by itself."""
    parts = zip(*(x.split(cu_seqlens_q.diff().tolist()) for x in (q, k, v)))
    mask = lambda n: (torch.arange(n)[:, None] >= torch.arange(n)) & (torch.arange(n)[:, None] - torch.arange(n) <= window_size[0] % 1000)
    return torch.cat([scaled_dot_product_attention(*(x.repeat_interleave(4 // x.shape[1], 1).transpose(0, 1) for x in part),
                                                   attn_mask=mask(len(part[0]))).transpose(0, 1) for part in parts])


def alone(folder):
    """A function on one rank, and torch's own of two rows."""
    q, k, v, dout = (x.requires_grad_() for x in attention_inputs(TOKENS))
    for name, window in ("varlen", (4, 0)), ("varlen_window", (-1, -1)):
        with seqpar_record.record_attention(flash_attn_varlen_func, f"{folder}/{name}") as attention:
            attention(q, k, v, torch.tensor([0, 7, TOKENS]), causal=True, window_size=window).backward(dout)
    rows = [torch.stack([x, 2 * x]).transpose(1, 2) for x in (q, k, v, dout)]
    with seqpar_record.record_attention((torch.nn.functional, "scaled_dot_product_attention"), f"{folder}/torch"):
        torch.nn.functional.scaled_dot_product_attention(*rows[:3], is_causal=True, enable_gqa=True).backward(rows[3])
    with seqpar_record.record_attention((torch.nn.functional, "scaled_dot_product_attention"), f"{folder}/forward"):
        torch.nn.functional.scaled_dot_product_attention(*rows[:3], is_causal=True, enable_gqa=True)


def refused_attention(folder):
    x = torch.randn(1, 2, TOKENS, 8)
    attend = torch.nn.functional.scaled_dot_product_attention

    def of(target, given, given_to=None, **named):
        with seqpar_record.record_attention(target, folder, **named) as attention:
            if given:
                (given_to or attention)(*given[0], **given[1])

    def four(query, key, value):
        return query

    for mistake in (lambda: of(3, ()), lambda: of(attend, ()), lambda: of(attend, ((x, x, x), {})), lambda: of(four, ((x, x, x), {})),
                    lambda: of(attend, ((x, x, x), dict(dropout_p=0.5, is_causal=True))), lambda: of(attend, (), layout="sbhd"),
                    lambda: of(attend, (), sp=2), lambda: of(attend, ((x, x, x), dict(is_causal=True)), index=torch.arange(5)),
                    lambda: of(lambda qkv: qkv, ((x,), {})), lambda: of(flash_attn_varlen_func, ((x[0], x[0], x[0], None), {}))):
        try:
            mistake()
            yield "accepted"
        except ValueError as error:
            yield str(error)


# ---- all ----


def cases(rank, out):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for wrong in "", "shift", "reduction", "clip":
            shared(rank, f"{out}/shared{wrong}", wrong)
        shared(rank, f"{out}/whole", whole=True)
        own(rank, f"{out}/own")
        own(rank, f"{out}/ownmeans", "means")
        own(rank, f"{out}/rprop", kind=torch.optim.Rprop)
        ring(rank, f"{out}/ring")
        ring(rank, f"{out}/ringlost", True)
    return said.getvalue(), refused(rank, f"{out}/refused")


LOOP = (
    "2 ranks: give sp=1 if each has rows of its own, or sp=2 and row= if they share sequences",
    "sp is 3, and there are 2 ranks; give a divisor of that",
    "sp is 2: give row=dict(index=..., cu_seqlens=...), the places of its tokens in the whole row",
    "rank 0: the block ended without a call of optimizer.step(); put the whole step into it",
    "rank 0: no call of torch.nn.functional.cross_entropy or nll_loss was seen",
    "is recorded to", "rank 0: row 0 has 30 places up to 29 in row=, and the model was given 24 tokens; give the places",
    "rank 0: the loss has label_smoothing=", "ranks have 1, 2 rows in this step", "Linear has no torch.nn.Embedding", "accepted")
ATTENTION = (
    "a int is no attention", "the block did not call the attention", "scaled_dot_product_attention has no causal mask",
    "four has q, k and v of shape [1, 2, 24, 8]: give layout=\"bhsd\"", "has dropout_p=0.5",
    "layout is sbhd; give thd for (tokens, heads, head_dim)",
    "sp is 2: give index=", "index= has 5 places, and the attention was called with 24 tokens", "was not called with q, k and v of 3 or 4",
    "flash_attn_varlen_func has no causal mask")


def main(oracle, out):
    os.makedirs(out, exist_ok=True)
    (printed, said), (nothing, other) = on_ranks(cases, out)
    six = "right: places, labels, loss, reduction, norm, step (6 of 12 stages)"
    check("shared", ver(oracle, f"{out}/shared"), 0, six)
    on_ranks(shared, f"{out}/want", world=1)
    check("shared_all", ver(oracle, f"{out}/shared", "--want", f"{out}/want", "--strict"), 0, "right: ", ", gradients, ")
    check("whole", ver(oracle, f"{out}/whole"), 0, six)
    check("shifted", ver(oracle, f"{out}/sharedshift"), 1, "wrong: shift_after_split")
    check("reduction", ver(oracle, f"{out}/sharedreduction", "--want", f"{out}/want"), 1, "wrong: ")
    check("clip", ver(oracle, f"{out}/sharedclip"), 1, "wrong: ", "not_clipped")
    check("own", ver(oracle, f"{out}/own"), 0, "right: places, labels, loss, step (4 of 12 stages)")
    check("own_means", ver(oracle, f"{out}/ownmeans"), 1, "wrong: mean_of_means")
    check("other_optimizer", ver(oracle, f"{out}/rprop"), 0, "right: places, labels, loss (3 of 12 stages)")
    check("one_rank_speaks", (0, nothing or "nothing"), 0, "nothing")
    check("says_what_lacks", (0, printed), 0, f"seqpar-verify ver {out}/shared\n", "the update of Rprop is not written")
    for number, (got, words) in enumerate(zip(said, LOOP)):
        check(f"loop_refuses_{number}", (0, got), 0, words)
    check("all_ranks_are_refused", (int([x.startswith("rank 0") for x in said] != [x.startswith("rank 0") for x in other]), ""), 0)

    check("ring", ver(oracle, f"{out}/ring"), 0, "right: places, attention (2 of 12 stages)")
    check("ring_lost", ver(oracle, f"{out}/ringlost"), 1, "wrong: ")
    alone(out)
    for name in "varlen", "varlen_window", "torch", "forward":
        check(name, ver(oracle, f"{out}/{name}", "--require", "attention"), 0, "right: places, attention")
    for number, (got, words) in enumerate(zip(refused_attention(f"{out}/refused"), ATTENTION)):
        check(f"attention_refuses_{number}", (0, got), 0, words)


if __name__ == "__main__":
    main(*sys.argv[1:])
