# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps verl==0.9.1 ray tensordict hydra-core omegaconf codetiming cloudpickle
# ... (what its import then names)
"""verl: log-probs gathered over Ulysses ranks, then agg_loss; over replicas and micro-batches
with and without global counts."""
from common import IGNORED, check_losses, loss_case, token_losses

import torch


def _whole(place, logits, labels):
    """Losses of the whole row on each rank of the sequence."""
    import torch.distributed as dist
    from verl.utils import ulysses
    split = len(labels) < len(place["ids"])
    ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD if split else None)
    losses = ulysses.gather_outputs_and_unpad(token_losses(logits, labels), gather_dim=0)
    return losses[None], (place["whole"] != IGNORED)[None].float()


def _agg(place, logits, labels, **options):
    from verl.trainer.ppo.core_algos import agg_loss
    return agg_loss(*_whole(place, logits, labels), **options)


def ulysses(place, logits, labels):
    return _agg(place, logits, labels, loss_agg_mode="token-mean")


def counted(place, logits, labels):
    """As the workers do: counts of the whole step."""
    import torch.distributed as dist
    return _agg(place, logits, labels, loss_agg_mode="token-mean",
                dp_size=dist.get_world_size(), batch_num_tokens=sum(place["counts"]))


def not_counted(place, logits, labels):
    """agg_loss's defaults, averaged over micro-batches by the caller."""
    return _agg(place, logits, labels, loss_agg_mode="token-mean") / place["micro_batches"]


if __name__ == "__main__":
    check_losses("verl", [
        loss_case("agg_loss token-mean, Ulysses 2", ulysses),
        loss_case("agg_loss token-mean, Ulysses 2, a rank without labels", ulysses,
                  prompts=(10,)),
        loss_case("agg_loss token-mean, 2 replicas, batch_num_tokens", counted, prompts=(3, 12),
                  sp=1),
        loss_case("agg_loss token-mean, 2 replicas x 2, batch_num_tokens", counted,
                  prompts=(3, 12, 9, 5), sp=1),
        loss_case("agg_loss token-mean, 2 replicas, defaults", not_counted, prompts=(3, 12),
                  sp=1, value=True, mark="adapter: dp_size is not told")
    ])
