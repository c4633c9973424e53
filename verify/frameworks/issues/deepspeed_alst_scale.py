# SPDX-License-Identifier: MIT OR Unlicense
"""Title: Ulysses SP (ALST) with the documented loss recipe: gradients are x sp under ZeRO 0 to
2, right under ZeRO 3
Packages: deepspeed torch
Mistake: times_sp
Expected: the same gradient at sequence_parallel_size 2 as on one rank, under each ZeRO stage:
factor 1 in each line.
Why: the backward pass of the differentiable all_gather of losses adds up the ranks' equal
seeds, x sp. Stages 0, 1 and 2 then divide by world / sp, stage 3's reduce_scatter_coalesced by
world.
"""
import os

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="29555")
import torch
import torch.distributed.nn.functional as dnf

ZERO = [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3},
        {"stage": 3, "reduce_scatter": False},
        {"stage": 3, "reduce_scatter": False, "reduce_bucket_size": 100}]


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def main(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    import deepspeed
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu
    from deepspeed.utils import safe_get_full_grad
    deepspeed.init_distributed("gloo")
    mpu.initialize_sequence_parallel(sequence_parallel_size=2)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))  # 16 tokens, 8 a rank
    one = model()
    one(x).pow(2).mean().backward()
    for zero in ZERO:
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero,
                  "zero_allow_untested_optimizer": True,
                  "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
        m = model()
        engine, *_ = deepspeed.initialize(model=m, config=config, mpu=mpu,
                                          model_parameters=m.parameters())
        loss = engine(x[rank * 8:rank * 8 + 8]).pow(2).mean()  # the mean over the own tokens
        losses = torch.stack(dnf.all_gather(loss, group=mpu.get_sequence_parallel_group()))
        counts = torch.tensor([8.0, 8.0])
        engine.backward((losses * counts).sum() / counts.sum())
        factors = [
            f"{n} x {float(safe_get_full_grad(p).norm() / w.grad.norm()):.3f}"
            for (n, p), w in zip(engine.module.named_parameters(), one.parameters())
        ]
        if rank == 0:
            print(zero, ", ".join(factors), flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
