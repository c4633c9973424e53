# SPDX-License-Identifier: MIT OR Unlicense
# pip install transformers==5.24.0 accelerate==1.15.0 deepspeed==0.19.8 peft==0.21.2
"""PEFT's adapters under transformers' Trainer with Ulysses (sp 2 on two ranks, DeepSpeed's ZeRO
3): gradients of a step of one micro-batch, against those of one process."""
import tempfile

from hf_ulysses import TOKENS, _arguments, _row
from common import IGNORED, check, factor, on_ranks, tiny_llama, token_losses, ver, version

import torch

CASES = [("LoRA", {}),
         ("LoRA and a whole lm_head", dict(modules_to_save=["lm_head"])),
         ("DoRA", dict(use_dora=True)),
         ("rsLoRA of all linear layers", dict(use_rslora=True, target_modules="all-linear"))]


def adapted(model, more):
    """The model with adapters whose B is not zero, the same on all ranks."""
    from peft import LoraConfig, get_peft_model
    torch.manual_seed(7)
    config = dict(r=3, lora_alpha=8, lora_dropout=0.0, init_lora_weights=False,
                  target_modules=["q_proj", "v_proj", "down_proj"]) | more
    return get_peft_model(model, LoraConfig(**config))


def train(rank, folder, more):
    """Gradients of the step."""
    from deepspeed.utils import safe_get_full_grad
    from transformers import Trainer, TrainerCallback
    arguments, seen = _arguments(folder, 1), {}
    ids, labels = _row(0)
    labels = torch.cat((torch.tensor([IGNORED]), labels[:-1]))
    row = dict(input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids),
               position_ids=torch.arange(TOKENS))

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            for n, p in trainer.model_wrapped.module.named_parameters():
                if p.requires_grad:
                    seen[n] = safe_get_full_grad(p).clone()

    trainer = Trainer(adapted(tiny_llama(), more), arguments, train_dataset=[row, row],
                      callbacks=[Watch()])
    trainer.train()
    return seen


def right(more):
    """Gradients and log-probs of one process."""
    model = adapted(tiny_llama(), more)
    ids, labels = _row(0)
    losses = token_losses(model(input_ids=ids[None]).logits, labels)
    (losses.sum() / (labels != IGNORED).sum()).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}, -losses.detach()


def dump(folder, rank, sp, logp, gradients):
    from seqpar_dump import Dump
    ids, labels = _row(0)
    own, out = torch.arange(TOKENS).view(sp, -1)[rank], Dump(folder, rank, sp, sp)
    out.micro_batch(0, index=own, ids=ids[own], positions=own, labels=labels[own],
                    logp=logp[own], cu_seqlens=torch.tensor([0, TOKENS]))
    out.step(None, gradients)


if __name__ == "__main__":
    for name, more in CASES:
        with tempfile.TemporaryDirectory() as folder:
            got = on_ranks(train, folder, more)
            want, logp = right(more)
            for rank in range(2):
                dump(f"{folder}/dump", rank, 2, logp, got[rank])
            dump(f"{folder}/want", 0, 1, logp, want)
            check("peft", version("peft"), f"Trainer, Ulysses 2, {name}",
                  ver(f"{folder}/dump", "--want", f"{folder}/want"),
                  f"gradient of {len(want)} tensors {factor(got[0], want)}")
