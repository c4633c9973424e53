# SPDX-License-Identifier: MIT OR Unlicense
# pip install transformers==5.24.0 accelerate==1.15.0 deepspeed==0.19.8
"""transformers' Trainer with Ulysses (sp 2 on two ranks, DeepSpeed's ZeRO 3): a step of one
micro-batch, and of several."""
import os
import tempfile

os.environ.update(DS_ACCELERATOR="cpu", ACCELERATE_USE_DEEPSPEED="true")
from common import IGNORED, check, factor, on_ranks, row, tiny_llama, token_losses, ver, version

import torch

TOKENS, PROMPTS = 24, (3, 19, 9, 14)
TWICE = "known: DeepSpeed 7484, of its adapter; accelerate gives all ranks the same rows"
CASES = [("1 micro-batch", 1, [0], ""),
         ("2 micro-batches", 2, [0, 1], TWICE),
         ("4 micro-batches, as it reads them", 4, [0, 0, 1, 1], "new")]


def _row(number):
    """ids and labels shifted; a collator gives labels that are not."""
    ids, _, labels, _ = row([TOKENS], [PROMPTS[number]], seed=number)
    return ids, labels


def _arguments(folder, steps):
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
    from transformers import TrainingArguments
    how = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True,
                                          sp_attn_implementation="sdpa")
    engine = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1,
              "gradient_accumulation_steps": steps, "zero_allow_untested_optimizer": True,
              "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}, "sequence_parallel_size": 2}
    return TrainingArguments(
        f"{folder}/out", per_device_train_batch_size=1, gradient_accumulation_steps=steps,
        max_steps=1, learning_rate=1e-3, train_sampling_strategy="sequential", report_to=[],
        logging_steps=1, save_strategy="no", max_grad_norm=0, disable_tqdm=True,
        deepspeed=engine, remove_unused_columns=False,
        parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=how))


def train(rank, folder, steps):
    """Gradients of the step, and the first token of the rows that it read."""
    from deepspeed.utils import safe_get_full_grad
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback
    arguments, seen, read = _arguments(folder, steps), {}, []
    rows = [(ids, torch.cat((torch.tensor([IGNORED]), labels[:-1]))) for ids, labels in
            map(_row, range(len(PROMPTS)))]
    rows = [dict(input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids),
                 position_ids=torch.arange(TOKENS)) for ids, labels in rows]

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            for n, p in trainer.model_wrapped.module.named_parameters():
                seen[n] = safe_get_full_grad(p).clone()

    class Reading(Trainer):
        def training_step(self, model, inputs, *rest, **options):
            read.append(int(inputs["input_ids"][0, 0]))
            return super().training_step(model, inputs, *rest, **options)

    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", attn_implementation="sdpa")
    trainer = Reading(model, arguments, train_dataset=rows, callbacks=[Watch()])
    trainer.train()
    return seen, read, [h["loss"] for h in trainer.state.log_history if "loss" in h]


def dump(folder, rank, steps, rows, gradients):
    from seqpar_dump import Dump
    model = tiny_llama()
    own, out = torch.arange(TOKENS).view(2, -1)[rank], Dump(folder, rank, 2, 2, steps)
    for a, (ids, labels) in enumerate(map(_row, rows)):
        logp = -token_losses(model(input_ids=ids[None]).logits, labels)
        out.micro_batch(a, index=own, ids=ids[own], positions=own, labels=labels[own],
                        logp=logp[own], cu_seqlens=torch.tensor([0, TOKENS]))
    out.step(None, gradients)


def right(rows):
    """Gradients of the mean over all tokens of rows, and of the mean of rows' means."""
    for by_row in (False, True):
        model, sums, counts = tiny_llama(), 0, 0
        for ids, labels in map(_row, rows):
            count = (labels != IGNORED).sum()
            loss = token_losses(model(input_ids=ids[None]).logits, labels).sum()
            sums += loss / (count if by_row else 1)
            counts += 1 if by_row else count
        (sums / counts).backward()
        yield {n: p.grad for n, p in model.named_parameters()}


if __name__ == "__main__":
    for name, steps, rows, mark in CASES:
        with tempfile.TemporaryDirectory() as folder:
            tiny_llama().save_pretrained(f"{folder}/model")
            (got, read, _), _ = on_ranks(train, folder, steps)
            for rank in range(2):
                dump(f"{folder}/dump", rank, steps, rows, got)
            by_token, by_row = right(rows)
            firsts = [int(_row(number)[0][0]) for number in range(len(PROMPTS))]
            check("transformers", version("transformers"), f"Trainer, Ulysses 2, {name}",
                  ver(f"{folder}/dump", "--model", f"{folder}/model"),
                  f"gradient {factor(got, by_token)}; of the mean of rows' means "
                  f"{factor(got, by_row)}; rows read {[firsts.index(x) for x in read]}", mark)
