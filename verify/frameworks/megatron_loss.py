# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps megatron-core==0.16.1
"""Megatron-Core: batches sliced for context parallelism, and what becomes of a loss function's
2 or 3 results."""
from types import SimpleNamespace

from common import IGNORED, check_losses, loss_case, token_losses, zigzag

import torch


def _scaled(place, logits, labels, three, per_token=False):
    """forward_step_calc_loss on the own tokens: the sum, or the mean of the sequence, as its
    loss functions return them."""
    import torch.distributed as dist
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
    from megatron.core.utils import get_batch_on_this_cp_rank
    own = get_batch_on_this_cp_rank({"labels": place["whole"][None].clone()},
                                    dist.group.WORLD)["labels"][0]
    losses, count = token_losses(logits, own), (own != IGNORED).sum()

    def loss_func(output):
        both = torch.stack((losses.sum(), count.float())).detach()
        dist.all_reduce(both)
        if three:
            return losses.sum(), count.clone(), {}
        return losses.sum() / both[1], {}

    config = SimpleNamespace(calculate_per_token_loss=per_token, timers=None,
                             num_moe_experts=None, mtp_num_layers=None, grad_scale_func=None)
    loss, _ = forward_step_calc_loss(None, logits, loss_func, config, None, False,
                                     place["micro_batches"], [], dist.get_world_size(), True)
    if per_token:  # finalize_model_grads divides by the tokens of all ranks
        return loss / sum(place["counts"])
    return loss


def three(place, logits, labels):
    return _scaled(place, logits, labels, True)


def two(place, logits, labels):
    return _scaled(place, logits, labels, False)


def per_token(place, logits, labels):
    return _scaled(place, logits, labels, True, True)


if __name__ == "__main__":
    known = "known: Megatron-LM 7452, 7513"
    check_losses("megatron-core", [
        loss_case("3 results, divided by the count of each rank", three, prompts=(7,),
                  order=zigzag, mark=known),
        loss_case("3 results, one token to learn", three, prompts=(15,), order=zigzag,
                  mark=known),
        loss_case("2 results", two, prompts=(7,), order=zigzag),
        loss_case("3 results, calculate_per_token_loss", per_token, prompts=(7,), order=zigzag,
                  mean=False)
    ])
