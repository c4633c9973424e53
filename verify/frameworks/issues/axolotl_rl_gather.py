# SPDX-License-Identifier: MIT OR Unlicense
"""Title: Context parallelism of GRPO: gradients are divided by context_parallel_size
Packages: axolotl torch
Mistake: over_sp
Expected: the gradient of one rank: factor 1.
Why: AllGatherWithGrad's backward pass takes the own slice of the gradient. Each rank's loss is
that of the whole sequence and gradients are averaged over all ranks: they are divided by the
size of the group. Adam alone hides it; clipping, weight decay and other optimizers do not.
Multiplied by the size of the group in the backward pass, the factor is 1.
"""
import os

os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29564")
import torch
import torch.distributed as dist

TOKENS = 16


def main(rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    from axolotl.utils.ctx_managers.sequence_parallel import AllGatherWithGrad
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, TOKENS, 8, generator=draw)
    weight = torch.randn(8, 64, generator=draw)
    labels = torch.randint(64, (TOKENS,), generator=draw)
    one, two = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    torch.nn.functional.cross_entropy((hidden @ one)[0], labels).backward()
    own = hidden[:, rank * TOKENS // 2:(rank + 1) * TOKENS // 2]
    logits = AllGatherWithGrad.apply(own @ two, dist.group.WORLD)
    torch.nn.functional.cross_entropy(logits[0], labels).backward()
    dist.all_reduce(two.grad)  # the mean over ranks, as DDP and FSDP take it
    if rank == 0:
        print(f"x {float((two.grad / 2).norm() / one.grad.norm()):.4f}", flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
