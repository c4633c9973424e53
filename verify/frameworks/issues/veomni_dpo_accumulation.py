# SPDX-License-Identifier: MIT OR Unlicense
"""Title: TextDPOTrainer: gradients are summed over micro-batches, not averaged
Packages: veomni torch
Ranks: one CPU rank with gloo
Mistake: times_accumulation
Expected: the gradient does not depend on into how many micro-batches the same pairs are cut.
Why: forward_backward_step (veomni/trainer/text_dpo_trainer.py, 390 in 0.1.12) calls backward()
on losses.mean() of each micro-batch; train_step (454) divides by their number in nothing but
the report. So gradients and their norm are as many times too large as there are micro-batches,
and the clip acts sooner. BaseTrainer has the division in mean_global_loss; DiTTrainer got it
with pull request 963; pull request 1130 averaged what DPO reports, and left the gradients. The
fix is (loss / num_micro_steps).backward(), with the number handed to forward_backward_step.
In the repro the same 4 pairs are one micro-batch, then 2 and 4. concatenated_forward stands in
for the model; the step is the package's.
"""
import os

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="29571")
import logging

logging.disable(logging.INFO)
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from veomni.distributed.parallel_state import init_parallel_state
from veomni.trainer.base import BaseTrainer
from veomni.trainer.text_dpo_trainer import DPOConfig, TextDPOTrainer

PAIRS = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0))


def norm_of(micro_batches):
    torch.manual_seed(1)
    policy, reference = torch.nn.Linear(8, 1, bias=False), torch.nn.Linear(8, 1, bias=False)
    trainer = TextDPOTrainer.__new__(TextDPOTrainer)
    trainer.reference_model = reference
    base = trainer.base = BaseTrainer.__new__(BaseTrainer)
    fsdp = SimpleNamespace(fsdp_config=SimpleNamespace(fsdp_mode="ddp"), dp_replicate_size=1)
    train = SimpleNamespace(enable_batch_invariant_mode=False, sync_each_train_step=False,
                            accelerator=fsdp, optimizer=SimpleNamespace(max_grad_norm=1e9))
    base.args = SimpleNamespace(train=train, dpo_config=DPOConfig())
    base.model, base.optimizer = policy, torch.optim.SGD(policy.parameters(), lr=0.1)
    base.lr_scheduler = SimpleNamespace(step=lambda: None)
    base.device, base.LOG_SAMPLE, base._callbacks = torch.device("cpu"), False, []
    base.model_fwd_context = base.model_bwd_context = nullcontext()
    base._reset_async_activation_offload_if_enabled = lambda: None
    base.state, shown = SimpleNamespace(global_step=0), {}
    base.on_step_end = lambda **said: shown.update(said)
    # log-probs of chosen and rejected answers
    trainer.concatenated_forward = lambda model, batch: model(batch["pairs"])[..., 0].unbind(1)
    trainer.train_step(iter([[{"pairs": x} for x in PAIRS.chunk(micro_batches)]]))
    return shown["loss"], shown["grad_norm"]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    init_parallel_state(dp_mode="ddp", device_type="cpu")
    for count in (1, 2, 4):
        loss, norm = norm_of(count)
        print(f"4 pairs in {count} micro-batches: loss {loss:.4f}, gradient norm {norm:.4f}")
