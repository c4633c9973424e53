# SPDX-License-Identifier: MIT OR Unlicense
"""Title: reduce_sequence_parallel_loss: the loss is weighted by tokens, its gradient is not
Packages: xtuner torch
Mistake: mean_of_means
Expected: the gradient of the mean over all tokens, whose value the function gives: distance 0.
Why: the forward pass puts the ranks' means together by their counts of tokens; the backward
pass hands the gradient to each rank's mean as it is. After the mean over ranks each rank weighs
the same. Here the ranks have 3 and 8 tokens to learn.
"""
import os

os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29569")
import torch
import torch.distributed as dist
import torch.nn.functional as F

TOKENS, LEARNED = 16, 11


def main(rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    from xtuner.parallel.sequence.reduce_loss import reduce_sequence_parallel_loss
    draw = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(TOKENS, 8, generator=draw), torch.randn(8, 64, generator=draw)
    labels = torch.randint(64, (TOKENS,), generator=draw)
    labels[:TOKENS - LEARNED] = -100
    one, two = head.clone().requires_grad_(), head.clone().requires_grad_()
    want = F.cross_entropy(hidden @ one, labels)
    want.backward()
    own = slice(rank * TOKENS // 2, (rank + 1) * TOKENS // 2)
    mean = F.cross_entropy(hidden[own] @ two, labels[own])
    count = (labels[own] != -100).sum().float()
    loss = reduce_sequence_parallel_loss(mean, count, dist.group.WORLD)
    loss.backward()
    dist.all_reduce(two.grad)  # the mean over ranks, as DDP and FSDP take it
    away = float((two.grad / 2 - one.grad).norm() / one.grad.norm())
    if rank == 0:
        print(f"loss {float(loss):.4f} of {float(want):.4f}; gradient {away:.1e} away",
              flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
