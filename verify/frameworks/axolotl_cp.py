# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps axolotl==0.19.0 (and what its import then names)
"""axolotl's context parallelism: labels sliced by its pre-hook and shifted in the model; logits
gathered with its AllGatherWithGrad."""
from types import SimpleNamespace

from common import IGNORED, check_losses, loss_case, token_losses

import torch


def sliced(place, logits, labels, steps=1):
    """SFT: its slice of ids and labels, then transformers' loss, which shifts;
    num_items_in_batch as its hook replaces it."""
    import torch.distributed as dist
    from axolotl.monkeypatch.ring_attn import patch
    from axolotl.utils.ctx_managers import sequence_parallel as cp
    from transformers.loss.loss_utils import ForCausalLMLoss
    patch.RING_ATTN_GROUP = dist.group.WORLD
    # gloo has no mean of integers; NCCL's is the sum, divided without a rest
    average = lambda x, op, group: (dist.all_reduce(x, group=group),
                                    x.floor_divide_(dist.get_world_size()))
    cp.dist = SimpleNamespace(**{**vars(dist), "all_reduce": average})
    cp.update_ring_attn_params = lambda **kw: None  # attention is not looked at here
    # labels as a collator gives them: not shifted
    unshifted = torch.cat((torch.tensor([IGNORED]), place["whole"][:-1]))
    batch = {
        "input_ids": place["ids"][None], "labels": unshifted[None],
        "position_ids": torch.arange(len(unshifted))[None],
        "num_items_in_batch": torch.tensor(sum(place["counts"]))
    }
    batch, *_ = cp.apply_sequence_parallelism(batch, place["member"], dist.get_world_size(),
                                              steps, None)
    place["used"] = torch.cat(
        (batch["labels"][0, 1:], torch.tensor([IGNORED])))  # what that loss makes of them
    return ForCausalLMLoss(logits[None], batch["labels"], logits.shape[-1],
                           num_items_in_batch=batch["num_items_in_batch"])


def two_steps(place, logits, labels):
    return sliced(place, logits, labels, 2)


def gathered(place, logits, labels):
    """GRPO: logits gathered, the loss of the whole row on every rank."""
    import torch.distributed as dist
    from axolotl.utils.ctx_managers.sequence_parallel import AllGatherWithGrad
    whole = AllGatherWithGrad.apply(logits[None], dist.group.WORLD)[0]
    return token_losses(whole, place["whole"]).sum() / (place["whole"] != IGNORED).sum()


if __name__ == "__main__":
    check_losses("axolotl", [
        loss_case("SFT, labels sliced and then shifted", sliced, prompts=(4,),
                  mark="known: gallery B48", value=True),
        loss_case("SFT, the same, the cut in the prompt", sliced, prompts=(10,), mark=""),
        loss_case("SFT, the same, 2 micro-batches", two_steps, prompts=(4, 9),
                  mark="known: gallery B48; new: weights of micro-batches"),
        loss_case("GRPO, AllGatherWithGrad", gathered, mark="new")
    ])
