# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps xtuner==0.2.0 mmengine==0.10.7 addict yapf rich termcolor
"""XTuner's loss under sequence parallelism: ranks' means put together by counts in the forward
pass, the mean's own gradient back."""
from common import IGNORED, check_losses, loss_case

import torch
import torch.nn.functional as F


def reduced(place, logits, labels):
    """As its SFT does: the model's mean over the own tokens, and their number."""
    import torch.distributed as dist
    from xtuner.parallel.sequence.reduce_loss import reduce_sequence_parallel_loss
    return reduce_sequence_parallel_loss(F.cross_entropy(logits, labels, ignore_index=IGNORED),
                                         (labels != IGNORED).sum().float(), dist.group.WORLD)


if __name__ == "__main__":
    known = "new"
    check_losses("xtuner", [
        loss_case("reduce_sequence_parallel_loss, counts 3 and 7", reduced, prompts=(6,),
                  mark=known, value=True),
        loss_case("reduce_sequence_parallel_loss, counts 8 and 7", reduced, prompts=(1,),
                  mark=known),
        loss_case("reduce_sequence_parallel_loss, a rank without labels", reduced,
                  prompts=(10,), mark=known, value=True)
    ])
