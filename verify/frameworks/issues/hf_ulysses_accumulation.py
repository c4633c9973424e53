# SPDX-License-Identifier: MIT OR Unlicense
"""Title: Trainer with sp_size > 1: the loss of a step is the mean of its micro-batches' means
Packages: transformers accelerate deepspeed torch
Mistake: mean_of_means
Expected: sum of losses / num_items_in_batch, as with sp_size 1: 'over tokens' below.
Why: UlyssesSPDataLoaderAdapter takes labels out of batches: _get_num_items_in_batch gives None,
and deepspeed_sp_compute_loss divides by the tokens of its micro-batch alone. The calls are
those of Trainer.training_step; the micro-batches have 21 and 5 tokens to learn.
"""
import os
from types import SimpleNamespace

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="29568", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
import torch

TOKENS, LEARNED = 24, (21, 5)


def main(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu
    from deepspeed.utils import groups
    from transformers import Trainer
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss
    from transformers.loss.loss_utils import ForCausalLMLoss
    deepspeed.init_distributed("gloo")
    mpu.initialize_sequence_parallel(sequence_parallel_size=2)
    groups.mpu = mpu
    draw = torch.Generator().manual_seed(0)
    weight, sums, means = torch.randn(8, 64, generator=draw).requires_grad_(), 0, 0
    model = lambda hidden, shift_labels, labels: SimpleNamespace(
        loss=ForCausalLMLoss(hidden @ weight, None, 64, shift_labels=shift_labels))
    batches = []
    for learned in LEARNED:
        labels = torch.randint(64, (1, TOKENS), generator=draw)
        labels[:, :TOKENS - learned] = -100
        hidden = torch.randn(1, TOKENS, 8, generator=draw)
        losses = torch.nn.functional.cross_entropy((hidden @ weight)[0], labels[0],
                                                   reduction="sum")
        sums, means = sums + losses / sum(LEARNED), means + losses / learned / len(LEARNED)
        own = slice(rank * TOKENS // 2, (rank + 1) * TOKENS // 2)
        batches.append(dict(hidden=hidden[:, own], shift_labels=labels[:, own]))
    trainer = SimpleNamespace(model_accepts_loss_kwargs=True, compute_loss_func=None)
    items = Trainer._get_num_items_in_batch(trainer, batches, "cpu")
    sp = SimpleNamespace(sp_backend="deepspeed", sp_size=2)
    shown = 0
    for batch in batches:
        loss = deepspeed_sp_compute_loss(None, model, batch, False, sp)
        shown += float(loss) / (1 if items is not None else len(batches))
    if rank == 0:
        print(f"num_items_in_batch {items}; loss {shown:.4f}; over tokens {float(sums):.4f}, "
              f"mean of means {float(means):.4f}", flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
