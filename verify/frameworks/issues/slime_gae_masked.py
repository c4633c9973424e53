# SPDX-License-Identifier: MIT OR Unlicense
# SLIME: the folder of its sources; git clone https://github.com/THUDM/slime
"""Title: PPO: advantages depend on values, KL and the reward of tokens that loss_mask leaves out
Packages: torch
Ranks: one process
Mistake: gae_over_masked_tokens
Expected: advantages of trained tokens that do not depend on what a tool wrote.
Why: compute_advantages_and_returns (slime/backends/megatron_utils/loss.py, 769 to 781 at
624b824a) adds the reward at the last token of the response and gives values and minus KL of all
its tokens to get_advantages_and_returns_batch (slime/utils/ppo_utils.py), without loss_masks.
Where a tool writes into a response, its tokens' values and KL go into the advantages before
them; where the response ends with such tokens, the reward is discounted on its way to the last
trained one. The other estimators of that function do take loss_masks. slime's fork miles has
mended the same lines (radixark/miles 1827): GAE runs over the trained tokens alone, and the
reward is at the last of them.
In the repro one value of a tool's token changes, and the advantages of trained tokens with it.
"""
import ast
import os
import pathlib
import sys
from types import SimpleNamespace

import torch


def get_advantages():
    path = pathlib.Path(os.environ["SLIME"], "slime/utils/ppo_utils.py")
    names = ("get_advantages_and_returns_batch", "vanilla_gae")
    tree = [x for x in ast.parse(path.read_text()).body if getattr(x, "name", "") in names]
    mpu = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    sys.modules["megatron"] = sys.modules["megatron.core"] = SimpleNamespace(mpu=mpu)
    space = {"torch": torch}
    exec(compile(ast.Module(tree, []), str(path), "exec"), space)
    return space["get_advantages_and_returns_batch"]


def main():
    whole, mask = get_advantages(), torch.tensor([1, 1, 0, 0, 1, 1, 0]).bool()
    rewards = torch.tensor([0.0, 0, 0, 0, 0, 0, 1])
    for value in (0.0, 2.0):
        values = torch.tensor([0.5, 0.5, value, 0, 0.5, 0.5, 0])
        advantages = whole([9], [7], [values], [rewards], 0.97, 0.9, chunked=False)[0][0][mask]
        print(f"value of a tool's token {value}: advantages of trained tokens",
              " ".join(f"{x:.3f}" for x in advantages))


if __name__ == "__main__":
    main()
