# SPDX-License-Identifier: MIT OR Unlicense
"""Title: Sequence parallelism of classifiers, rerankers, embeddings: gradients below the gather
are divided by its size
Packages: ms-swift torch
Mistake: over_sp
Expected: the gradient of one rank for all weights: factor 1 in each line.
Why: gather_sequence_parallel_outputs uses GatherTensor, whose backward pass takes the own slice
of the gradient. Each rank's loss is that of the whole sequence, and gradients are averaged over
all ranks, so that what lies below the gather is divided by the group's size; the head above it
is not. GatherLoss, which the SFT, DPO and GRPO losses use, multiplies by that size.
"""
import os

os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29563")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

TOKENS = 16


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)


def pooled_loss(head, hidden):
    return torch.nn.functional.cross_entropy(head(hidden[:, -1] + hidden.mean(1)),
                                             torch.tensor([1]))


def main(rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    from swift.model.patcher import gather_sequence_parallel_outputs
    from swift.sequence_parallel import sequence_parallel as sp
    # as prepare() sets them up
    sp.device_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "sequence"))
    sp.world_size, sp.dp_world_size, sp.sp_world_size, sp.rp_world_size = 2, 1, 2, 1
    x = torch.randn(1, TOKENS, 8, generator=torch.Generator().manual_seed(1))
    (body, head), (body_of_one, head_of_one) = model(), model()
    pooled_loss(head_of_one, body_of_one(x)).backward()
    own = x[:, rank * TOKENS // 2:(rank + 1) * TOKENS // 2]
    outputs = gather_sequence_parallel_outputs({"last_hidden_state": body(own)})
    pooled_loss(head, outputs["last_hidden_state"]).backward()
    for name, part, one in (("body", body, body_of_one), ("head", head, head_of_one)):
        got = part.weight.grad
        dist.all_reduce(got)  # the mean over ranks, as DDP and FSDP take it
        if rank == 0:
            factor = float((got / 2).norm() / one.weight.grad.norm())
            print(f"{name}: x {factor:.4f}", flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
