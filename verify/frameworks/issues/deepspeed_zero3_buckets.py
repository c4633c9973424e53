# SPDX-License-Identifier: MIT OR Unlicense
"""Title: ZeRO 3 with reduce_scatter false and sequence parallelism: gradients of parameters
differ by a factor of sp, by reduce_bucket_size
Packages: deepspeed torch
Mistake: over_sp
Expected: one factor for all parameters, whatever reduce_bucket_size is, as with reduce_scatter.
Why: where a bucket was filled, gradients are added up and divided by world / sp; parameters
that are larger than reduce_bucket_size go by reduce_scatter_coalesced, which divides by world.
Here each rank's loss is its share of the mean, so that world / sp is right.
"""
import os

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="29566")
import torch

BUCKETS = (1000000, 100)


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
    for size in BUCKETS:
        zero = {"stage": 3, "reduce_scatter": False, "reduce_bucket_size": size}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero,
                  "zero_allow_untested_optimizer": True,
                  "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
        m = model()
        engine, *_ = deepspeed.initialize(model=m, config=config, mpu=mpu,
                                          model_parameters=m.parameters())
        # the own tokens' share of the mean over 16
        engine.backward(engine(x[rank * 8:rank * 8 + 8]).pow(2).sum() / 16)
        factors = [f"{n} x {float(safe_get_full_grad(p).norm() / w.grad.norm()):.3f}"
                   for (n, p), w in zip(engine.module.named_parameters(), one.parameters())]
        if rank == 0:
            print(f"reduce_bucket_size {size}:", ", ".join(factors), flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
