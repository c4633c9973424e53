# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps openrlhf==0.11.2 (and what its import then names); flash_stub.py in
# place of flash-attn
"""OpenRLHF: GPTLMLoss with a ring group, which is exported and not used by its trainers any
more."""
import sys
import types

from common import IGNORED, check_losses, loss_case

import torch


def gpt(place, logits, labels):
    import flash_stub
    flash_stub.install()
    import torch.distributed as dist
    import openrlhf
    # its losses alone: the package's models import vLLM, DeepSpeed and more
    if "openrlhf.models" not in sys.modules:
        sys.modules["openrlhf.models"] = types.ModuleType("openrlhf.models")
        sys.modules["openrlhf.models"].__path__ = [openrlhf.__path__[0] + "/models"]
    from openrlhf.models.loss import GPTLMLoss
    unshifted = torch.cat((torch.tensor([IGNORED]), place["whole"][:-1]))
    own = unshifted.view(dist.get_world_size(), -1)[place["member"]]
    place["used"] = torch.cat((own[1:], torch.tensor([IGNORED])))  # what it makes of them
    return GPTLMLoss(ring_attn_group=dist.group.WORLD)(logits[None], unshifted[None])


if __name__ == "__main__":
    check_losses("openrlhf", [
        loss_case("GPTLMLoss, ring 2", gpt, prompts=(6,), mark="known: gallery B45",
                  value=True),
        loss_case("GPTLMLoss, ring 2, a rank without labels", gpt, prompts=(10,),
                  mark="known: gallery B45", value=True)
    ])
