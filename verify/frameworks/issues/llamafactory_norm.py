# SPDX-License-Identifier: MIT OR Unlicense
"""Title: v1 with FSDP2 and cp_size > 1: the reported grad_norm is x sqrt(cp_size)
Packages: llamafactory torch
Mistake: norm_counts_copies
Expected: the norm of the gradient, whatever cp_size is.
Why: parameters are sharded over all ranks, also those of a sequence, so that clip_grad_norm_
gives the norm of the whole gradient on each of them. fit() adds its squares over the cp group
once more. Only the report is wrong: gradients were clipped by the right norm before.
The lines of fit() are repeated here, as it takes a model and data to run it.
"""
import os

os.environ.update(DISABLE_VERSION_CHECK="1", OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="29567", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
import torch


def main(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    from llamafactory.v1.accelerator.helper import ReduceOp
    from llamafactory.v1.accelerator.interface import Dim, DistributedInterface
    from torch.distributed.fsdp import fully_shard
    world = DistributedInterface({"cp_size": 2, "dp_size": 1})
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    fully_shard(model, mesh=world.model_device_mesh)
    model(torch.randn(2, 8)).pow(2).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    norm = world.all_reduce(norm ** 2, op=ReduceOp.SUM, dim=Dim.CP) ** 0.5
    squares = [(p.grad.full_tensor() ** 2).sum() for p in model.parameters()]
    if rank == 0:
        print(f"{norm:.4f} of {float(sum(squares) ** 0.5):.4f}", flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
