# SPDX-License-Identifier: MIT OR Unlicense
# pip install deepspeed==0.19.8 transformers==5.24.0 accelerate==1.15.0
"""DeepSpeed's UlyssesSPAttentionHF with the loss recipe of Hugging Face's Trainer, under ZeRO 0
to 3: one step at sp 2.

The recipe gathers the ranks' mean losses by a gather whose backward pass sums, and weights them
by counts of tokens.
"""
import os
import tempfile
from types import SimpleNamespace

os.environ["DS_ACCELERATOR"] = "cpu"
from common import (apart, check, factor, law, norm, on_ranks, row, tiny_llama, token_losses,
                    ver, version)

import torch

ONE, TWO = ([32], [12]), ([10, 22], [3, 2])  # lengths of documents and of their prompts
CASES = [("ZeRO 0", {"stage": 0}, ONE), ("ZeRO 1", {"stage": 1}, ONE),
         ("ZeRO 2", {"stage": 2}, ONE), ("ZeRO 3", {"stage": 3}, ONE),
         ("ZeRO 3, all-reduce", {"stage": 3, "reduce_scatter": False}, ONE),
         ("ZeRO 3, all-reduce, small buckets",
          {"stage": 3, "reduce_scatter": False, "reduce_bucket_size": 1200}, ONE),
         ("ZeRO 3, packed row, sdpa", {"stage": 3}, TWO)]

MARKS = {
    "ZeRO 3, all-reduce, small buckets": "new",
    "ZeRO 3, packed row, sdpa": "new"
}


def steps(rank, folder):
    """Each case on this rank: gradients, loss, logits, and the norm as the engine shows it."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from deepspeed.utils import safe_get_full_grad
    from seqpar_dump import Dump
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss
    deepspeed.init_distributed("gloo")
    mpu = UlyssesSPAttentionHF.register_with_transformers(tiny_llama(), "sdpa",
                                                          sequence_parallel_size=2,
                                                          micro_batch_size=1)
    results = []
    for number, (_, zero, packed) in enumerate(CASES):
        model = tiny_llama()
        config = {
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero,
            "gradient_clipping": 1e9, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            "zero_allow_untested_optimizer": True
        }
        engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu,
                                          model_parameters=model.parameters())
        ids, positions, labels, cu_seqlens = row(*packed)
        own = torch.arange(len(ids)).view(2, -1)[rank]
        # with a cache, transformers does not look for documents in positions
        batch = {"input_ids": ids[own][None], "position_ids": positions[own][None],
                 "shift_labels": labels[own][None], "use_cache": False}
        loss, outputs = deepspeed_sp_compute_loss(
            None, engine, batch, True, SimpleNamespace(sp_backend="deepspeed", sp_size=2))
        engine.backward(loss)
        gradients = {
            n: safe_get_full_grad(p).clone() for n, p in engine.module.named_parameters()
        }
        engine.step()
        dump = Dump(f"{folder}/{number}", rank, 2, sp=2)
        dump.micro_batch(0, index=own, ids=ids[own], positions=positions[own],
                         labels=labels[own], cu_seqlens=cu_seqlens,
                         logp=-token_losses(outputs.logits, labels[own]))
        dump.step(loss, gradients)
        shown = engine.get_global_grad_norm()  # none under ZeRO 0
        results.append(
            (gradients, float(loss), outputs.logits.detach(), float(shown or norm(gradients))))
    return results


def one_rank(packed):
    """The same in plain transformers, on one rank."""
    ids, positions, labels, _ = row(*packed)
    model = tiny_llama()
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits
    loss = token_losses(logits, labels).sum() / (labels != -100).sum()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters()}, float(loss), logits.detach()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama().save_pretrained(folder + "/model")
        first, second = on_ranks(steps, folder)
        for number, (name, _, packed) in enumerate(CASES):
            mark = MARKS.get(name, "known: DeepSpeed 5248; tmax PR 9 on stage 3")
            gradients, loss, logits, shown = first[number]
            want, want_loss, want_logits = one_rank(packed)
            logits = {"logits": torch.cat((logits, second[number][2]), 1)}
            check(
                "deepspeed", version("deepspeed"), f"ALST, {name}",
                ver(f"{folder}/{number}", "--model", folder + "/model"),
                f"gradient {factor(gradients, want)}; loss {loss:.4f} of {want_loss:.4f}; "
                + apart(logits, {"logits": want_logits}),
                mark)
            check("deepspeed", version("deepspeed"), f"ALST, {name}, norm",
                  law(shown, norm(want), sp=2), f"{shown:.4f} of {norm(want):.4f}", mark)
