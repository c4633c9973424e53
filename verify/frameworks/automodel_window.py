# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps nemo-automodel==0.7.0, and pip install transformers torch==2.15.0 (and
# what its import then names)
"""NeMo Automodel's context parallelism for models of transformers: its test of whether a model
may have it, its hooks, and its batch cut head-tail; a Mistral with a window and one without.

torch's context parallelism knows CUDA's attention kernels alone. In their place sdpa() attends
to the keys of all ranks, and obeys what it is called with; torch's own is in torch_cp.py.
"""
import tempfile
from types import SimpleNamespace

from common import (VOCAB, apart, check, factor, on_ranks, row, token_losses, ver, version)

import torch
import torch.distributed as dist

WINDOW, TOKENS, PROMPT = 4, 24, 6
CASES = [("no window", None), (f"window {WINDOW}", WINDOW)]


def mistral(window):
    from transformers import MistralConfig, MistralForCausalLM
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        sliding_window=window, tie_word_embeddings=False, attn_implementation="sdpa"))


class Gathered(torch.autograd.Function):
    """Of all ranks along the tokens, in the order of the row; gradients are added."""

    @staticmethod
    def forward(ctx, x, places):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        ctx.own = places[dist.get_rank()]
        return torch.cat(parts, 2)[:, :, torch.cat(places).argsort()]

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient[:, :, ctx.own], None


def sdpa(places):
    """scaled_dot_product_attention of a row whose tokens are with the ranks at these places."""
    own = places[dist.get_rank()]

    def call(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
             enable_gqa=False):
        assert attn_mask is None and is_causal  # of a causal mask, nothing of a window
        group = query.shape[1] // key.shape[1]
        key, value = (Gathered.apply(x, places).repeat_interleave(group, 1)
                      for x in (key, value))
        scores = query @ key.transpose(2, 3) * (scale or query.shape[-1] ** -0.5)
        seen = own[:, None] >= torch.arange(key.shape[2])
        return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value

    return call


def step(rank, folder):
    from nemo_automodel._transformers.capabilities import validate_for_mesh
    from nemo_automodel.components.distributed.context_parallel.sharder import (
        ContextParallelSharder)
    from nemo_automodel.components.distributed.context_parallel.utils import (
        attach_context_parallel_hooks)
    import seqpar_dump
    import seqpar_record
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention as cp
    mesh, results = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), []
    ids, positions, labels, cu = row([TOKENS], [PROMPT])
    places = [torch.arange(TOKENS).view(4, -1)[[r, 3 - r]].flatten() for r in (0, 1)]
    own, whole = places[rank], torch.nn.functional.scaled_dot_product_attention
    cp._enable_context_parallel_dispatcher_impl = lambda **_: setattr(
        torch.nn.functional, "scaled_dot_product_attention", sdpa(places))
    cp._disable_context_parallel_dispatcher_impl = lambda: setattr(
        torch.nn.functional, "scaled_dot_product_attention", whole)
    for number, (_, window) in enumerate(CASES):
        model = mistral(window)
        validate_for_mesh(model, SimpleNamespace(cp_size=2))
        attach_context_parallel_hooks(model)
        batch = dict(input_ids=ids[None].clone(), position_ids=positions[None].clone(),
                     labels=labels[None].clone(), attention_mask=torch.ones(1, TOKENS))
        context, batch = ContextParallelSharder(model, mesh, batch).shard(batch)
        dump = seqpar_dump.Dump(f"{folder}/{number}", rank, 2, sp=2)
        with context():
            assert torch.equal(batch["input_ids"][0], ids[own])
            target = (torch.nn.functional, "scaled_dot_product_attention")
            facts = dict(window=window) if window else {}
            with seqpar_record.record_attention(target, f"{folder}/{number}.attention",
                                                index=own, cu_seqlens=cu, sp=2, layout="bhsd",
                                                **facts):
                given = {n: x for n, x in batch.items() if n != "labels"}
                used = batch["labels"][0].clone()
                logits = model(**given, use_cache=False).logits[0]
                losses = token_losses(logits, used)
                (losses.sum() / (labels != -100).sum()).backward()
            dump.micro_batch(0, index=own, ids=batch["input_ids"][0], labels=used,
                             positions=batch["position_ids"][0], logp=-losses, cu_seqlens=cu)
        gradients = {n: p.grad for n, p in model.named_parameters()}
        for x in gradients.values():
            dist.all_reduce(x)
        dump.step(None, gradients)
        results.append((gradients, own, logits.detach()))
    return results


def one_rank(window):
    """The same in plain transformers."""
    ids, positions, labels, _ = row([TOKENS], [PROMPT])
    model = mistral(window)
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits
    (token_losses(logits, labels).sum() / (labels != -100).sum()).backward()
    return {n: p.grad for n, p in model.named_parameters()}, logits[0].detach()


if __name__ == "__main__":
    from seqpar_dump import Dump
    with tempfile.TemporaryDirectory() as folder:
        parts = list(zip(*on_ranks(step, folder)))
        for number, (name, window) in enumerate(CASES):
            gradients, want = one_rank(window)
            dump = Dump(f"{folder}/{number}.want", 0, 1)
            dump.step(None, gradients)
            got = torch.empty_like(want)
            for _, own, logits in parts[number]:
                got[own] = logits
            witness = (f"gradient {factor(parts[number][0][0], gradients)}; "
                       + apart({"logits": got}, {"logits": want}))
            here = f"{folder}/{number}"
            check("nemo-automodel", version("nemo-automodel"), f"Mistral, cp 2, {name}",
                  ver(here, "--want", f"{here}.want"), witness, "new")
            check("nemo-automodel", version("nemo-automodel"),
                  f"Mistral, cp 2, {name}, attention",
                  ver(f"{here}.attention", "--require", "attention"), witness, "new")
