# SPDX-License-Identifier: MIT OR Unlicense
# pip install transformers==5.24.0 accelerate==1.15.0
"""transformers' Trainer on two ranks with two micro-batches each: num_items_in_batch and
average_tokens_across_devices."""
import tempfile

from common import IGNORED, check, factor, on_ranks, row, tiny_llama, token_losses, ver, version

import torch

PROMPTS, TOKENS = (3, 19, 9, 14), 24
CASES = [("average_tokens_across_devices", True), ("not average_tokens_across_devices", False)]


def _rows():
    """ids and labels as a collator gives them: not shifted."""
    for number, prompt in enumerate(PROMPTS):
        ids, _, labels, _ = row([TOKENS], [prompt], seed=number)
        yield ids, torch.cat((torch.tensor([IGNORED]), labels[:-1])), labels


def train(rank, folder):
    from seqpar_dump import Dump
    from transformers import Trainer, TrainerCallback, TrainingArguments
    results = []
    for number, (_, average) in enumerate(CASES):
        model, seen = tiny_llama(), {}

        class Watch(TrainerCallback):
            def on_pre_optimizer_step(self, *_, **__):
                seen.update({n: p.grad.clone() for n, p in model.named_parameters()})

        arguments = TrainingArguments(f"{folder}/out", per_device_train_batch_size=1,
                                      gradient_accumulation_steps=2, max_steps=1, use_cpu=True,
                                      average_tokens_across_devices=average,
                                      train_sampling_strategy="sequential", report_to=[],
                                      logging_steps=1, save_strategy="no", max_grad_norm=0,
                                      disable_tqdm=True)
        rows = [
            dict(input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids))
            for ids, labels, _ in _rows()
        ]
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Watch()],
                          optimizers=(torch.optim.SGD(model.parameters(), lr=1e-3), None))
        trainer.train()
        dump, before = Dump(f"{folder}/{number}", rank, 2, accumulation=2), tiny_llama()
        for a, (ids, _, labels) in enumerate(list(_rows())[rank::2]):
            dump.micro_batch(a, index=torch.arange(TOKENS), ids=ids,
                             positions=torch.arange(TOKENS), labels=labels,
                             cu_seqlens=torch.tensor([0, TOKENS]),
                             logp=-token_losses(before(input_ids=ids[None]).logits, labels))
        shown = [h["loss"] for h in trainer.state.log_history if "loss" in h]
        dump.step(shown[0] if shown else None, seen)
        results.append((seen, shown))
    return results


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama()
        model.save_pretrained(folder + "/model")
        losses = torch.cat([
            token_losses(model(input_ids=ids[None]).logits, labels)
            for ids, _, labels in _rows()
        ])
        want = losses.sum() / sum(TOKENS - prompt for prompt in PROMPTS)
        want.backward()
        right = {n: p.grad for n, p in model.named_parameters()}
        first, _ = on_ranks(train, folder)
        for number, (name, _) in enumerate(CASES):
            check(
                "transformers", version("transformers"), f"Trainer, 2 ranks x 2, {name}",
                ver(f"{folder}/{number}", "--model", folder + "/model"),
                f"gradient {factor(first[number][0], right)}; "
                f"loss {first[number][1]} of {float(want.detach()):.4f}",
                "known: documented, off by choice")
