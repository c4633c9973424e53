# SPDX-License-Identifier: MIT OR Unlicense
# pip install trl==1.16.0
"""TRL's RewardTrainer on two ranks with two micro-batches; its SFT collator without padding."""
import tempfile
from collections import defaultdict
from types import SimpleNamespace

from common import IGNORED, check, factor, on_ranks, ver, version

import torch

LENGTHS, MICRO = [9, 7], 2


def _row(number, weight):
    """A pair of documents, the better first: values of tokens by a head."""
    draw = torch.Generator().manual_seed(200 + number)
    hidden = torch.randn(sum(LENGTHS), 8, generator=draw)
    return torch.randint(0, 64, (sum(LENGTHS),), generator=draw), hidden @ weight


def _weight():
    return torch.randn(8, generator=torch.Generator().manual_seed(5)).requires_grad_()


def step(rank, folder):
    import torch.distributed as dist
    from accelerate import Accelerator
    from seqpar_dump import Dump
    from trl import RewardTrainer
    weight, shown = _weight(), 0.0
    dump = Dump(folder, rank, 2, accumulation=MICRO, objective="rm")
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=Accelerator(cpu=True), _tp_size=1,
        args=SimpleNamespace(center_rewards_coefficient=None), _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)))
    for a in range(MICRO):
        ids, values = _row(2 * a + rank, weight)
        outputs = SimpleNamespace(logits=values[ends][:, None])
        batch = dict(input_ids=ids, attention_mask=torch.ones(2, max(LENGTHS)))
        loss = RewardTrainer.compute_loss(trainer, lambda **_: outputs, batch) / MICRO
        loss.backward()
        shown += float(loss.detach())
        dump.micro_batch(a, index=torch.arange(len(ids)), ids=ids, values=values,
                         scores=values[ends], cu_seqlens=torch.tensor([0, *(ends + 1)]))
    reduced, whole = weight.grad.clone(), torch.tensor(shown)
    dist.all_reduce(reduced), dist.all_reduce(whole)
    dump.step(whole / 2, {"head": reduced / 2}, local={"head": weight.grad})
    return {"head": reduced / 2}, float(whole / 2)


def one_rank():
    weight, total = _weight(), 0
    for number in range(2 * MICRO):
        better, worse = _row(number, weight)[1][torch.tensor(LENGTHS).cumsum(0) - 1]
        total = total - torch.nn.functional.logsigmoid(better - worse) / (2 * MICRO)
    total.backward()
    return {"head": weight.grad}, float(total.detach())


def collated(folder):
    """Three documents as the collator packs them: labels must not cross a boundary."""
    from seqpar_dump import Dump
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    documents = [list(range(1, 6)), list(range(10, 13)), [20]]
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batch = collate([{"input_ids": d, "labels": d} for d in documents])
    ids = batch["input_ids"][0]
    labels = torch.cat((batch["labels"][0, 1:], torch.tensor([IGNORED])))  # as the model shifts
    dump = Dump(folder, 0, 1)
    dump.micro_batch(0, index=torch.arange(len(ids)), ids=ids, labels=labels,
                     positions=batch["position_ids"][0], cu_seqlens=torch.tensor([0, 5, 8, 9]))
    dump.step()
    return int((labels != IGNORED).sum())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (got, shown), _ = on_ranks(step, folder + "/rm")
        want, right = one_rank()
        check("trl", version("trl"), "RewardTrainer, 2 ranks x 2", ver(folder + "/rm"),
              f"gradient {factor(got, want)}; loss {shown:.4f} of {right:.4f}")
        learned = collated(folder + "/sft")
        check("trl", version("trl"), "SFT collator, padding_free", ver(folder + "/sft"),
              f"{learned} labels of 6")
