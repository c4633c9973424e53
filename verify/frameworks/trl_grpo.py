# SPDX-License-Identifier: MIT OR Unlicense
# pip install trl==1.16.0
"""TRL's GRPO losses: which tokens each loss_type divides by, over ranks and micro-batches.
Advantage 1 and ratio 1: an SFT gradient."""
from types import SimpleNamespace

from common import IGNORED, check_losses, loss_case, token_losses

import torch


def _grpo(place, logits, labels, loss_type):
    """GRPOTrainer._compute_loss with log-probs in place of a model; what it asks of the trainer
    and no more."""
    from collections import defaultdict
    import torch.distributed as dist
    from trl import GRPOTrainer
    identity = lambda x, **_: x
    accelerator = SimpleNamespace(num_processes=dist.get_world_size(), gather=identity,
                                  reduce=identity, gather_for_metrics=identity,
                                  sync_gradients=True)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__:
        (-token_losses(logits, labels)[None], torch.zeros(1, len(labels)), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level="token", beta=0.0, loss_type=loss_type, epsilon_low=0.2,
        epsilon_high=0.2, args=SimpleNamespace(delta=None,
                                               steps_per_generation=place["micro_batches"]),
        use_vllm=False, model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=place["micro_batches"], accelerator=accelerator,
        max_completion_length=len(labels), _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)))
    inputs = dict(prompt_ids=place["ids"][None, :1], prompt_mask=torch.ones(1, 1),
                  completion_ids=place["ids"][None],
                  completion_mask=(labels != IGNORED)[None].float(), advantages=torch.ones(1),
                  num_items_in_batch=torch.tensor(float(sum(place["counts"]))))
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def dapo(place, logits, labels):
    return _grpo(place, logits, labels, "dapo")


def bnpo(place, logits, labels):
    return _grpo(place, logits, labels, "bnpo")


def grpo(place, logits, labels):
    return _grpo(place, logits, labels, "grpo")


def dr_grpo(place, logits, labels):
    return _grpo(place, logits, labels, "dr_grpo")


if __name__ == "__main__":
    check_losses("trl", [
        loss_case("GRPO dapo, 2 ranks x 2", dapo, prompts=(3, 12, 9, 5), sp=1),
        loss_case("GRPO bnpo, 2 ranks x 2", bnpo, prompts=(3, 12, 9, 5), sp=1,
                  mark="known: documented, a mean over each local batch"),
        loss_case("GRPO grpo, 2 ranks x 2", grpo, prompts=(3, 12, 9, 5), sp=1,
                  mark="adapter: a mean over sequences is meant"),
        loss_case("GRPO dr_grpo, 2 ranks x 2", dr_grpo, prompts=(3, 12, 9, 5), sp=1,
                  mark="adapter: a constant is meant")
    ])
