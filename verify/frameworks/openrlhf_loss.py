# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps openrlhf==0.11.2 (and what its import then names); flash_stub.py in
# place of flash-attn
"""OpenRLHF: SFTLoss with the counts of a step, as its trainer has it, and without; GPTLMLoss
with a ring group, which is exported and not used by its trainers any more."""
import sys
import types

from common import IGNORED, check_losses, loss_case, module_file, token_losses

import torch
import torch.distributed as dist


def _losses():
    """Its losses alone: the package's models import vLLM, DeepSpeed and more."""
    import flash_stub
    flash_stub.install()
    import openrlhf
    if "openrlhf.models" not in sys.modules:
        sys.modules["openrlhf.models"] = types.ModuleType("openrlhf.models")
        sys.modules["openrlhf.models"].__path__ = [openrlhf.__path__[0] + "/models"]
    from openrlhf.models import loss
    return loss


def gpt(place, logits, labels):
    unshifted = torch.cat((torch.tensor([IGNORED]), place["whole"][:-1]))
    own = unshifted.view(dist.get_world_size(), -1)[place["member"]]
    place["used"] = torch.cat((own[1:], torch.tensor([IGNORED])))  # what it makes of them
    return _losses().GPTLMLoss(ring_attn_group=dist.group.WORLD)(logits[None], unshifted[None])


def sft(place, logits, labels, counted=True):
    steps = module_file("openrlhf", "openrlhf/utils/loss_utils.py")
    steps._get_dp_group = lambda _: dist.group.WORLD
    masks = [(row != IGNORED).float()[None] for row in place["window"]]
    items = steps.iter_grad_accum_global_norm(masks, None, len(masks), lambda mask: mask)
    counts = next(info for _, info in items) if counted else {}
    loss = _losses().SFTLoss()(-token_losses(logits, labels)[None],
                               (labels != IGNORED).float()[None], **counts)
    return loss / len(masks)  # as the engine divides it


def not_counted(place, logits, labels):
    return sft(place, logits, labels, False)


if __name__ == "__main__":
    rows = dict(prompts=(3, 12, 9, 5), sp=1)
    known = "known: gallery B45"
    check_losses("openrlhf", [
        loss_case("SFTLoss, 2 ranks x 2", sft, **rows),
        loss_case("SFTLoss, 2 ranks x 2, without counts", not_counted, **rows,
                  mark="adapter: its trainer gives them"),
        loss_case("GPTLMLoss, ring 2", gpt, prompts=(6,), mark=known, value=True),
        loss_case("GPTLMLoss, ring 2, a rank without labels", gpt, prompts=(10,), mark=known,
                  value=True)
    ])
