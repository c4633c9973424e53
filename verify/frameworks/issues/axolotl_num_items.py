# SPDX-License-Identifier: MIT OR Unlicense
"""Title: Context parallelism with accumulation: micro-batches weigh alike, not by tokens
Packages: axolotl transformers torch
Mistake: mean_of_means
Expected: the mean over all tokens of the step, as transformers has it with
context_parallel_size 1: distance 0 from it.
Why: apply_sequence_parallelism replaces num_items_in_batch, which is that of the whole step, by
the count of this micro-batch x gradient_accumulation_steps. Here the micro-batches have 14 and
2 tokens to learn; the cut between ranks lies in front of them, so that nothing else differs.
"""
import os
from types import SimpleNamespace

os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29565")
import torch
import torch.distributed as dist

TOKENS, LEARNED = 32, (14, 2)


def main(rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    from axolotl.monkeypatch.ring_attn import patch
    from axolotl.utils.ctx_managers import sequence_parallel as cp
    from transformers.loss.loss_utils import ForCausalLMLoss
    patch.RING_ATTN_GROUP = dist.group.WORLD
    cp.update_ring_attn_params = lambda **_: None  # attention is not looked at
    # gloo has no mean of integers; NCCL's is the sum, divided without a rest
    mean = lambda x, op, group: (dist.all_reduce(x, group=group), x.floor_divide_(2))
    cp.dist = SimpleNamespace(**{**vars(dist), "all_reduce": mean})
    draw = torch.Generator().manual_seed(0)
    weight, sums, means = torch.randn(8, 64, generator=draw).requires_grad_(), 0, 0
    for learned in LEARNED:
        ids, labels = torch.randint(64, (2, 1, TOKENS), generator=draw)
        labels[:, :TOKENS - learned] = -100
        hidden = torch.randn(1, TOKENS, 8, generator=draw)
        losses = torch.nn.functional.cross_entropy((hidden @ weight)[0, :-1], labels[0, 1:],
                                                   reduction="sum")
        sums, means = sums + losses / sum(LEARNED), means + losses / learned / len(LEARNED)
        batch = {"input_ids": ids, "labels": labels, "num_items_in_batch": sum(LEARNED)}
        batch, *_ = cp.apply_sequence_parallelism(batch, rank, 2, len(LEARNED), None)
        logits = (hidden @ weight)[:, rank * TOKENS // 2:(rank + 1) * TOKENS // 2]
        ForCausalLMLoss(logits, batch["labels"], 64,
                        num_items_in_batch=batch["num_items_in_batch"]).backward()
    got = weight.grad.clone()
    dist.all_reduce(got)  # the mean over ranks, as DDP and FSDP take it
    got = got / 2
    for name, loss in (("the mean over tokens", sums), ("the mean of means", means)):
        want, = torch.autograd.grad(loss, weight, retain_graph=True)
        if rank == 0:
            away = float((got - want).norm() / want.norm())
            print(f"{away:.1e} away from {name}", flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
