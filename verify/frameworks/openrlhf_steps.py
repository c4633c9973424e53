# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps openrlhf==0.11.2 (and what its import then names)
"""OpenRLHF's SFT: SFTLoss with the counts that iter_grad_accum_global_norm makes of a step, and
without them."""
from types import SimpleNamespace

from common import IGNORED, check_losses, loss_case, module_file, token_losses

import torch


def _sft(place, logits, labels, counted):
    loss_of = module_file("openrlhf", "openrlhf/models/loss.py").SFTLoss()
    steps = module_file("openrlhf", "openrlhf/utils/loss_utils.py")
    steps._get_dp_group = lambda _: torch.distributed.group.WORLD
    masks = [(row != IGNORED).float()[None] for row in place["window"]]
    items = steps.iter_grad_accum_global_norm(masks, SimpleNamespace(), len(masks), lambda x: x)
    norm = next(info for _, info in items)
    mask = (labels != IGNORED).float()[None]
    loss = loss_of(-token_losses(logits, labels)[None], mask, **(norm if counted else {}))
    return loss / len(masks)  # as the engine divides it


def counted(place, logits, labels):
    return _sft(place, logits, labels, True)


def alone(place, logits, labels):
    return _sft(place, logits, labels, False)


if __name__ == "__main__":
    rows = dict(prompts=(3, 12, 9, 5), sp=1)
    check_losses("openrlhf", [
        loss_case("SFT, 2 ranks x 2", counted, **rows),
        loss_case("SFT, 2 ranks x 2, without counts", alone, **rows,
                  mark="adapter: its trainer gives them")])
