# SPDX-License-Identifier: MIT OR Unlicense
"""What all adapters share: ranks on this machine, a tiny model, calls of seqpar-verify, and a
line for each check.

An adapter runs a package's own code on two ranks and on one, and gives what came out to
seqpar-verify. Beside its verdict stands a witness that knows nothing of it: the same numbers
compared in plain torch. A verdict without a witness is not to be believed.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from datetime import timedelta

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = pathlib.Path(__file__).resolve().parent
VERIFY = os.environ.get("SEQPAR_VERIFY", str(HERE.parent.parent / "build" / "seqpar-verify"))
sys.path.insert(0, str(HERE.parent / "python"))

import torch  # after the number of threads is set
import torch.distributed as dist

VOCAB, IGNORED = 64, -100

# ---- ranks ----


def _rank(rank, world, function, folder, arguments):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=open(f"{folder}/port").read(),
                      LOCAL_WORLD_SIZE=str(world))
    sys.stdout = sys.stderr  # what packages say is not part of the table
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=120))
    torch.save(function(rank, *arguments), f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(function, *arguments, world=2):
    """What function(rank, *arguments) returns on each of the ranks: processes of their own,
    joined by gloo."""
    import socket
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            pathlib.Path(folder, "port").write_text(str(s.getsockname()[1]))
        torch.multiprocessing.spawn(_rank, (world, function, folder, arguments), nprocs=world)
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(world)]


# ---- what is computed ----


def tiny_llama(seed=0, attention="sdpa", dtype=torch.float32, **other):
    """A random Llama of two layers, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    config = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                  tie_word_embeddings=False, attn_implementation=attention)
    return LlamaForCausalLM(LlamaConfig(**{**config, **other})).to(dtype)


def row(lengths, prompts, seed=1):
    """A row of packed documents: ids, positions, labels shifted over the whole row,
    cu_seqlens."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (sum(lengths),), generator=draw)
    positions = torch.cat([torch.arange(n) for n in lengths])
    labels, begin = torch.full_like(ids, IGNORED), 0
    for length, prompt in zip(lengths, prompts):
        labels[begin + prompt - 1:begin + length - 1] = ids[begin + prompt:begin + length]
        begin += length
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    return ids, positions, labels, cu_seqlens


def token_losses(logits, labels):
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1),
                                             ignore_index=IGNORED, reduction="none")


def norm(gradients):
    return float(torch.sqrt(sum((g.double() ** 2).sum() for g in gradients.values())))


def factor(got, want):
    """The witness: is got a multiple of want? Arrays by name; the factor and the largest
    relative distance from it."""
    got, want = ({n: x.detach().double().flatten() for n, x in d.items()} for d in (got, want))
    a, b = torch.cat([got[n] for n in want]), torch.cat([want[n] for n in want])
    times = float(a @ b / (b @ b))
    apart = max(
        float((got[n] - times * want[n]).norm() / want[n].norm().clamp(min=1e-30))
        for n in want)
    return f"x {times:.4f}, apart {apart:.1e}"


def apart(got, want):
    """The witness for arrays that are to be the same: relative distances by name."""
    return " ".join(
        f"{n} {float((got[n] - want[n]).double().norm() / want[n].double().norm()):.1e}"
        for n in want)


# ---- attention ----


def attention_inputs(tokens, heads=4, kv_heads=2, width=8, seed=2, dtype=torch.float32):
    """q, k, v and dout of a row, (tokens, heads, width)."""
    draw = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(tokens, h, width, generator=draw).to(dtype)
        for n, h in zip(("q", "k", "v", "dout"), (heads, kv_heads, kv_heads, heads))
    }


def whole_attention(x, cu_seqlens, window=0, scale=None, softcap=0.0):
    """The witness: out, lse, dq, dk, dv of a row on one rank, in fp64 and by autograd."""
    q, k, v = (x[n].double().requires_grad_() for n in ("q", "k", "v"))
    group, place = q.shape[1] // k.shape[1], torch.arange(len(q))
    document = torch.searchsorted(torch.as_tensor(cu_seqlens), place, right=True)
    distance = place[:, None] - place
    seen = (distance >= 0) & (document[:, None] == document)
    if window:
        seen &= distance < window
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1))
    scores = scores * (scale or q.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~seen, float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))
    if "dout" not in x:
        return {"out": out.detach()}
    out.backward(x["dout"].double())
    return {
        "out": out.detach(), "lse": torch.logsumexp(scores, -1).T.detach(), "dq": q.grad,
        "dk": k.grad, "dv": v.grad
    }


def check_attention(package, name, got, x, cu_seqlens, mark="", **facts):
    """got: of each rank the index of its tokens and what it computed, (tokens, heads, width).
    facts: window, softmax_scale, ..."""
    from seqpar_dump import Dump
    if "dq" not in got[0]:  # forward alone
        x = {n: t for n, t in x.items() if n != "dout"}
    right = whole_attention(x, cu_seqlens, facts.get("window", 0), facts.get("softmax_scale"),
                            facts.get("softcap", 0.0))
    whole = {n: torch.full_like(t, float("nan")) for n, t in right.items()}
    with tempfile.TemporaryDirectory() as folder:
        for rank, part in enumerate(got):
            index = part["index"]
            dump = Dump(folder, rank, len(got), sp=len(got), **facts)
            dump.micro_batch(0, index=index, cu_seqlens=torch.as_tensor(cu_seqlens))
            dump.attention(0, **{n: t[index] for n, t in x.items()},
                           **{n: t for n, t in part.items() if n != "index"})
            dump.step()
            for n, t in part.items():
                if n != "index":
                    whole[n][index] = t.double()
        there = [n for n in right if n in got[0]]
        check(package, version(package), name, ver(folder),
              apart(whole, {n: right[n] for n in there}), mark)


# ---- losses ----


def _head():
    """A model that is a head alone: hidden states of a row and the weight that makes logits of
    them."""
    draw = torch.Generator().manual_seed(5)
    hidden = torch.randn(4, 64, 8, generator=draw)
    return hidden, torch.randn(8, VOCAB, generator=draw).requires_grad_()


def _labels(tokens, prompt, number):
    """ids and shifted labels of a row of one document."""
    ids, _, labels, _ = row([tokens], [prompt], seed=number)
    return ids, labels


def contiguous(tokens, member, sp):
    """The tokens of a member of a sequence."""
    return torch.arange(tokens).view(sp, -1)[member]


def zigzag(tokens, member, sp):
    return torch.arange(tokens).view(2 * sp, -1)[[member, 2 * sp - 1 - member]].flatten()


def _loss_step(call, tokens, prompts, sp, mean, order, folder):
    """A step on this rank: call(place, logits, labels) is the package's loss; gradients are
    averaged, or added, over ranks."""
    from seqpar_dump import Dump
    rank, world = dist.get_rank(), dist.get_world_size()
    hidden, weight = _head()
    replicas, shown = world // sp, 0.0
    own_rows = prompts[rank // sp::replicas]
    dump = Dump(folder, rank, world, sp=sp, accumulation=len(own_rows))
    counts = [int((_labels(tokens, p, i)[1] != IGNORED).sum()) for i, p in enumerate(prompts)]
    window = [_labels(tokens, p, a * replicas + rank // sp)[1] for a, p in enumerate(own_rows)]
    for a, prompt in enumerate(own_rows):
        number = a * replicas + rank // sp
        ids, labels = _labels(tokens, prompt, number)
        own = (order or contiguous)(tokens, rank % sp, sp)
        logits = hidden[number, own] @ weight
        place = dict(rank=rank, member=rank % sp, micro_batches=len(own_rows), ids=ids,
                     whole=labels, counts=counts, window=window)
        loss = call(place, logits, labels[own])
        used = place.get("used", labels[own])  # of a package that shifts labels itself
        loss.backward()
        shown += float(loss.detach())
        dump.micro_batch(a, index=own, ids=ids[own], labels=used,
                         logp=-token_losses(logits, used), cu_seqlens=torch.tensor([0, tokens]))
    local, reduced = weight.grad.clone(), weight.grad.clone()
    dist.all_reduce(reduced)
    reduced /= world if mean else 1
    dump.step(None, {"head": reduced}, local={"head": local})
    return reduced, shown


def _loss_steps(rank, cases, folder):
    return [_loss_step(*case, f"{folder}/{number}") for number, case in enumerate(cases)]


def loss_case(name, call, prompts=(6,), tokens=16, sp=2, mean=True, order=None, mark="",
              value=False):
    """A package's loss of rows of one document, with prompts of so many tokens. The optimizer
    takes the mean over ranks, or the sum.
    value: what it reports is the step's loss, averaged over ranks."""
    return (call, tokens, prompts, sp, mean, order), name, mark, value


def check_losses(package, cases, world=2):
    from seqpar_dump import Dump
    with tempfile.TemporaryDirectory() as folder:
        ranks = on_ranks(_loss_steps, [c[0] for c in cases], folder, world=world)
        for number, ((_, tokens, prompts, sp, _, _), name, mark, value) in enumerate(cases):
            hidden, weight = _head()
            logits = hidden[:len(prompts), :tokens] @ weight
            labels = torch.stack([_labels(tokens, p, i)[1] for i, p in enumerate(prompts)])
            losses = token_losses(logits, labels).view(len(prompts), tokens)
            want = losses.sum() / (labels != IGNORED).sum()
            want.backward()
            dump = Dump(f"{folder}/{number}.want", 0, 1, accumulation=len(prompts))
            dump.step(want.detach(), {"head": weight.grad})
            shown = sum(r[number][1] for r in ranks) / world
            times = factor({"head": ranks[0][number][0]}, {"head": weight.grad})
            witness = f"gradient {times}; loss {shown:.4f} of {float(want.detach()):.4f}"
            check(package, version(package), name,
                  ver(f"{folder}/{number}", "--want", f"{folder}/{number}.want"), witness, mark)
            if value:
                sums, counts = (x.view(len(prompts), sp, -1).sum(2).flatten().tolist()
                                for x in (losses, labels != IGNORED))
                check(package, version(package), f"{name}, value",
                      law(shown, sums=sums, counts=counts, sp=sp, dp=world // sp), "", mark)


# ---- seqpar-verify ----


def _verdict(*arguments):
    run = subprocess.run([VERIFY, *map(str, arguments), "--json"], capture_output=True,
                         text=True)
    if not run.stdout.startswith("{"):
        return f"no verdict: {run.stderr.strip() or run.returncode}", {}
    said = json.loads(run.stdout)
    names = ", ".join(m["name"] for m in said["mistakes"])
    return said["verdict"] + (f": {names}" if names else ""), said


def law(got, want=None, **options):
    """Two numbers, or a number with sums and counts."""
    options = {
        k: ",".join(str(float(x)) for x in v) if isinstance(v, (list, tuple)) else v
        for k, v in options.items()
    }
    flags = [
        f for k, v in {"want": want, **options}.items() if v is not None for f in (f"--{k}", v)
    ]
    return _verdict("law", "--got", float(got), *flags)[0]


def ver(folder, *options):
    """A dump. Where only something is judged, or could not be, what that is."""
    text, said = _verdict("ver", folder, *options)
    if text != "insufficient":
        return text
    short = [s["stage"] for s in said["stages"] if s["verdict"] == "insufficient"]
    right = [s["stage"] for s in said["stages"] if s["verdict"] == "right"]
    if not right:
        return text
    return f"right: {', '.join(right)}; insufficient: {', '.join(short) or 'all others'}"


# ---- the table ----


def module_file(package, path):
    """A file of a package as a module, where its package's import wants what is not there."""
    import importlib.metadata
    import importlib.util
    place = importlib.metadata.distribution(package).locate_file(path)
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(package, version, name, verdict, witness="", mark=""):
    """A line. mark: 'known: THREAD', 'new' or 'adapter' where the verdict is wrong."""
    mark = mark if verdict.startswith("wrong") else ""
    print("\t".join((package, version, name, verdict, witness, mark)), file=sys.__stdout__,
          flush=True)


def version(package):
    import importlib.metadata
    return importlib.metadata.version(package)
