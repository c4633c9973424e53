# SPDX-License-Identifier: MIT OR Unlicense
# pip install transformers==5.24.0 trl==1.16.0 datasets==5.2.0
"""Whole steps of TRL's SFTTrainer and transformers' Trainer on two ranks with two micro-batches,
written down by seqpar_trainer."""
import tempfile

from common import check, factor, on_ranks, row, tiny_llama, token_losses, ver, version

import torch

TOKENS = (24, 17, 21, 24, 13, 24, 19, 24)  # of each row; the last micro-batch has two a rank
PROMPTS = (3, 9, 5, 14, 2, 19, 8, 7)
CASES = ["SFTTrainer", "Trainer"]


def _rows():
    for number, (tokens, prompt) in enumerate(zip(TOKENS, PROMPTS)):
        ids, _, labels, _ = row([tokens], [prompt], seed=number)
        yield ids, labels


def _given():
    """Rows as collators take them: labels stand where their tokens do."""
    for (ids, _), prompt in zip(_rows(), PROMPTS):
        yield dict(input_ids=ids.tolist(), labels=[-100] * prompt + ids[prompt:].tolist())


def _tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(64)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")


def _trainer(case, folder):
    from datasets import Dataset
    common = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1,
                  use_cpu=True, train_sampling_strategy="sequential", report_to=[],
                  logging_steps=1, save_strategy="no", max_grad_norm=0.05, disable_tqdm=True,
                  learning_rate=1e-3)
    rows = Dataset.from_list(list(_given()))
    if case == "SFTTrainer":
        from trl import SFTConfig, SFTTrainer
        args = SFTConfig(f"{folder}/out", bf16=False, **common)
        return SFTTrainer(tiny_llama(), args, train_dataset=rows, processing_class=_tokenizer())
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
    return Trainer(tiny_llama(), TrainingArguments(f"{folder}/out", **common), train_dataset=rows,
                   data_collator=DataCollatorForSeq2Seq(_tokenizer()))


def train(rank, folder):
    import seqpar_trainer
    results = []
    for number, case in enumerate(CASES):
        trainer = _trainer(case, folder)
        seen = {}
        clip = trainer.accelerator.clip_grad_norm_

        def clipped(*rest, **named):
            seen.update({n: p.grad.clone() for n, p in trainer.model.named_parameters()})
            return clip(*rest, **named)

        trainer.accelerator.clip_grad_norm_ = clipped
        seqpar_trainer.record(trainer, f"{folder}/{number}")
        trainer.train()
        results.append((seen, trainer.state.log_history[0]["loss"]))
    return results


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama()
        model.save_pretrained(folder + "/model")
        losses = torch.cat([token_losses(model(input_ids=ids[None]).logits, labels)
                            for ids, labels in _rows()])
        want = losses.sum() / sum(t - p for t, p in zip(TOKENS, PROMPTS))
        want.backward()
        right = {n: p.grad for n, p in model.named_parameters()}
        first, _ = on_ranks(train, folder)
        for number, name in enumerate(CASES):
            package = "trl" if name == "SFTTrainer" else "transformers"
            check(package, version(package), f"{name}, 2 ranks x 2 of 2 rows",
                  ver(f"{folder}/{number}", "--model", folder + "/model"),
                  f"gradient {factor(first[number][0], right)}; "
                  f"loss {first[number][1]:.4f} of {float(want.detach()):.4f}")
